"""upipe_transformers.py -- upipe_torch.attention as an attention of Hugging Face's transformers, on a part of every sequence

    team = upipe_team.team_from_env()
    upipe_transformers.register(team)
    model = LlamaForCausalLM.from_pretrained(..., attn_implementation='upipe')     # the same weights on every rank
    batch = upipe_transformers.shard(team, input_ids=ids, labels=ids)              # this rank's tokens
    loss = model(**batch).loss                          # this rank's part of the mean
    loss.backward()
    team.sum_gradients(model)

Models are those whose attention goes through transformers' AttentionInterface: decoders with causal masks, sliding windows
and soft-caps. A rank sees its tokens with the positions that they have in the whole sequence. A model in which anything else
mixes tokens would be wrong. So LISTED has the families that were compared, and a model of another one is refused at its first
call, or compares itself: register(team, allow_unlisted=True).
"""

import collections
import gc
import hashlib
import inspect
import itertools
import re
import weakref

import torch
import transformers
from torch.distributed.tensor import DTensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES

from upipe_abi import Error

IGNORED = -100  # transformers' label of a token without a loss
# Of the positions that shard() gives. A model that is given none makes its own, of torch.int64, and rank 0's are even right: by
# the type each rank sees that they were forgotten, before it waits for another.
POSITIONS = torch.int32
# config.model_type of the families that tests/test_families.py holds to transformers' own attention, which it does to no other.
LISTED = frozenset('''
    afmoe apertus arcee aria_text bitnet codegen cohere cohere2 cohere2_moe cwm dory dots1 ernie4_5 ernie4_5_moe exaone
    exaone4 exaone_moe flex_olmo gemma gemma2 gemma3_text glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neox gpt_oss gptj
    granite granitemoe granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm3
    iquestcoder jais2 jetmoe kolibri1 laguna llama mellum minimax_m2 ministral ministral3 mistral mixtral
    modernbert-decoder nanochat olmo olmo2 olmo3 olmoe opt phi phi3 qwen2 qwen3 qwen3_moe sarvam_moe seed_oss smollm3
    solar_open starcoder2 vaultgemma
'''.split())
# By attn_implementation: what register() was given, and a number, which modules of the models that are served have as theirs.
REGISTERED, NUMBERS = {}, itertools.count(1)
Registered = collections.namedtuple('Registered', 'team allow_unlisted number')
LATEST = weakref.WeakKeyDictionary()  # by team: a reference to the last model that had its first call
SAMPLE = 1024  # numbers of a parameter that ranks compare
FAR = {torch.float32: 1e-3, torch.bfloat16: 5e-2}  # of the largest logit: from here on a model that compares itself is refused
# Classes of modules that mix tokens, are no attention, and may have no convolution.
MIXERS = re.compile('mamba|rwkv|rglru|lightning|retention|delta(net|attention)', re.IGNORECASE)
FORGOTTEN = ('the model is called without what shard() returns, or does not hand it to its attention: '
             'model(**upipe_transformers.shard(team, input_ids=ids, labels=ids)); generate() is not served')
SERVED = [0]  # layers that attend() has been called for, or that were traced


def shard(team, input_ids=None, labels=None, position_ids=None, attention_mask=None, **more):
    """Arguments of model(...) for this rank's tokens. All ranks call it, with the same tensors.

    input_ids       [batch][tokens], the same on all ranks
    labels          the same shape, unshifted, as transformers takes them: they are shifted here, before the cut. The model's
                    loss is then this rank's part of the mean over the tokens of all ranks
    position_ids    [1 or batch][tokens]; None: 0, 1, 2 ... Where they begin anew a packed document does, in a batch of 1
    attention_mask  ones, or None
    """
    check_batch(team, more, input_ids=input_ids, labels=labels, position_ids=position_ids, attention_mask=attention_mask)
    batch, tokens = input_ids.shape
    if tokens < team.ranks:
        raise Error(f'{tokens} tokens for {team.ranks} ranks, and each needs one: leave this batch out, or pack it with another')
    if attention_mask is not None and not attention_mask.bool().all():
        raise Error('attention_mask hides tokens: padding is not served; pack documents into one row')
    at = torch.arange(tokens, device=input_ids.device)
    position_ids = at[None] if position_ids is None else position_ids
    borders = torch.cat([at[position_ids[0] == 0], at.new_tensor([tokens])])
    if not torch.equal(position_ids, positions(at, borders).expand_as(position_ids)):
        raise Error('position_ids are not 0, 1, 2 ... of each document, and the same in each row')
    if len(borders) > 2 and batch > 1:
        raise Error(f'packed documents in a batch of {batch}: put all of them into one row')
    first, count = team.rows(tokens)
    rows = slice(first, first + count)
    out = {'input_ids': input_ids[:, rows], 'position_ids': position_ids[:, rows].to(POSITIONS), 'cu_seq_lens_q': borders,
           'team_tokens': tokens, 'use_cache': False}
    if labels is not None:
        shifted = torch.nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]
        out['labels'] = out['shift_labels'] = shifted[:, rows].contiguous()
        out['num_items_in_batch'] = (shifted != IGNORED).sum()
    return out


def check_batch(team, more, **given):
    """All ranks have the same batch, and a right one. A sampler of data parallelism gives each rank batches of its own: pieces of
    different texts would train without a word."""
    team.on_all(lambda: {**of_batch(more, **given), 'weights': middles(team)},
                'all ranks of a team take the same batches, and no sampler may cut the data by rank; they keep the same weights, and '
                'sum_gradients() comes before each step of the optimizer')


def digest(t):
    return hashlib.blake2b(t.detach().cpu().contiguous().view(torch.uint8).numpy(), digest_size=8).digest()


def of_batch(more, **given):
    """What ranks must have the same of. Labels of other tokens, for one, would be cut without a word."""
    if more:
        raise Error(f'shard() takes no {", ".join(sorted(more))}: give it the whole batch, and not what shard() has returned; '
                    'position_ids say where documents begin')
    whole = getattr(given['input_ids'], 'shape', None)
    for name, t in given.items():
        if t is None and name != 'input_ids':
            continue
        if not torch.is_tensor(t):
            raise Error(f'{name} is a {type(t).__name__}, and no tensor: shard() takes tensors of integers [batch][tokens]')
        fits = t.dim() == 2 and (t.shape == whole or name == 'position_ids' and t.shape == (1, whole[1]))
        if not fits or t.is_meta or t.is_floating_point() and name != 'attention_mask':
            raise Error(f'{name} is {t.dtype} {tuple(t.shape)} on {t.device}: shard() takes integers [batch][tokens], all of the shape '
                        'of input_ids, and with their numbers')
    return {name: () if t is None else (tuple(t.shape), digest(t.long())) for name, t in given.items()}


def middles(team):
    """Of the trained parameters of the last model that had its first call: a number of each; None: there is no such model."""
    model = LATEST.get(team, lambda: None)()
    parts = [p.detach().flatten() for p in model.parameters() if p.requires_grad and not isinstance(p, DTensor)] if model else []
    return digest(torch.stack([part[len(part) // 2].float().cpu() for part in parts if len(part)])) if parts else None


def positions(at, borders):
    """Those that tokens have in their documents, which begin at the borders."""
    return at - borders[torch.searchsorted(borders, at, right=True) - 1]


def mixers(module, where=''):
    """Names of what mixes tokens and is no attention."""
    for name, part in module.named_children():
        convolves = isinstance(part, torch.nn.Conv1d) and part.kernel_size[0] > 1
        if convolves or isinstance(part, torch.nn.RNNBase) or MIXERS.search(type(part).__name__):
            yield f'{where}{name}, a {type(part).__name__} of {type(module).__name__},'
        else:
            yield from mixers(part, f'{where}{name}.')


def unlisted(model):
    """Why a model is not served without a comparison; None: it is a listed family's, without a head or with that of a causal
    language model, whose results are a token's own. A class that inherits from theirs is, too, but not with a forward of its own."""
    family = model.config.model_type
    names = [names[family] for names in (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES) if family in names]
    if family not in LISTED:
        return f"{family} is not among the families that were compared with transformers' own attention"
    for kind in type(model).__mro__:
        if kind.__module__.startswith('transformers.models.') and kind.__name__ in names and kind.forward is type(model).forward:
            return None
    return f'of {family}, {" and ".join(names)} of transformers are'


def holder(model):
    """The largest model that this one is a part of. Who wraps models, as PEFT does, may call the forward() of it, and not itself."""
    if type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():  # the search takes 0.1 s
        return model
    held = [one for one in gc.get_objects() if issubclass(type(one), PreTrainedModel) and any(part is model for part in one.modules())]
    return max(held, key=lambda one: len(list(one.modules())))


def check_kind(model, allow_unlisted):
    name = type(model).__name__
    for what in mixers(model):
        raise Error(f'{name} is not served: {what} mixes the tokens that a rank has, and is no attention')
    why = not allow_unlisted and unlisted(model)
    if why:
        raise Error(f'{name} is not served: {why}; register(team, allow_unlisted=True) compares it at its first call')


def weights(model, allow_unlisted):
    """By name what ranks must have the same of: all of a parameter but its numbers, and some of these."""
    check_kind(model, allow_unlisted)
    for name, p in model.named_parameters():
        if p.is_meta:
            raise Error(f'{name} is on meta, and has no numbers: load the model, or move it with to_empty(device=...)')
    return {name: (tuple(p.shape), str(p.dtype), p.requires_grad,
                   None if isinstance(p, DTensor) else digest(p.detach().flatten()[::max(p.numel() // SAMPLE, 1)]))
            for name, p in model.named_parameters()}


@torch.compiler.assume_constant_result
def check_model(model, router_logits):
    """All ranks come here at the first call of a model. SERVED before it; -1 at later calls."""
    if getattr(model.config, 'output_router_logits', False) if router_logits is None else router_logits:
        raise Error("output_router_logits is not served: the routers' auxiliary loss is no sum over tokens, and each rank has that "
                    'of its own: turn it off')
    registered, before = REGISTERED.get(model.config._attn_implementation), SERVED[0]  # pylint: disable=protected-access
    if registered and getattr(model, 'upipe_number', None) == registered.number:
        return -1
    model = holder(model)
    if registered is None:
        check_kind(model, True)
        check_served(model, before)
    registered.team.on_all(lambda: weights(model, registered.allow_unlisted),
                           'all ranks begin with the same weights: load them, or seed the ranks alike')
    for part in model.modules():
        part.upipe_number = registered.number  # those of the comparison's calls are checked, too
    try:
        if unlisted(model):
            compare(model, registered.team)
    except BaseException:
        for part in model.modules():
            del part.upipe_number
        raise
    LATEST[registered.team] = weakref.ref(model)
    return before


def compare(model, team):
    """A model's results for its part of two packed documents against those of each document alone, on each rank by itself; all
    ranks. The first document is longer than each window that is called sliding_window and hides something of what the model was
    made for."""
    most = getattr(model.config, 'max_position_embeddings', None) or float('inf')
    windows = [getattr(part, 'sliding_window', None) or 0 for part in (model.config, *model.modules())]
    lengths = [min(4 * team.ranks + 3 + max(w for w in windows if w < most), most), 2 * team.ranks + 1]
    weight = model.get_input_embeddings().weight
    ids = torch.randint(len(weight), (1, sum(lengths)), generator=torch.Generator().manual_seed(0)).to(weight.device)
    at = torch.cat([torch.arange(n, device=ids.device) for n in lengths])[None]
    labels = {'labels': ids.where(at > 0, IGNORED)} if 'labels' in inspect.signature(model.forward).parameters else {}
    before, implementation = SERVED[0], model.config._attn_implementation  # pylint: disable=protected-access
    training = [part for part in model.modules() if part.training]
    model.eval()
    try:
        with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
            own = model(**shard(team, ids, position_ids=at, **labels))
            check_served(model, before)
            model.set_attn_implementation('eager')
            parts = zip(ids.split(lengths, 1), *(part.split(lengths, 1) for part in labels.values()))
            alone = [model(use_cache=False, **dict(zip(('input_ids', 'labels'), part))) for part in parts]
    finally:
        model.set_attn_implementation(implementation)
        for part in training:
            part.training = True
    got, whole = results(own).float(), torch.cat([results(one) for one in alone], 1).float()
    rows = shard(team, torch.arange(ids.shape[1], device=ids.device)[None], position_ids=at)['input_ids'][0]
    if got.shape[:2] != (1, len(rows)) or whole.shape[:2] != ids.shape:
        raise Error(f'{type(model).__name__} is not served: its results are not one a token')
    off, far = ((got - whole[:, rows]).abs().amax(2)[0] / whole.abs().max()).nan_to_num(torch.inf), FAR[weight.dtype]
    offs, firsts, losses = zip(*team.of_all((off.max().item(), min(rows[off > far].tolist(), default=ids.shape[1]),
                                             own.loss.item() if labels else 0)))
    if max(offs) > far:
        raise Error(f'{type(model).__name__} is not served: its results on {team.ranks} ranks and on one differ by {max(offs):.2g} of '
                    f'the largest, from token {min(firsts)} of {ids.shape[1]} on')
    if labels:
        loss = sum(one.loss.item() * (n - 1) for one, n in zip(alone, lengths)) / sum(n - 1 for n in lengths)
        if not abs(sum(losses) - loss) <= far * abs(loss):
            raise Error(f'{type(model).__name__} is not served: its loss on {team.ranks} ranks is {sum(losses):.6g}, '
                        f'and {loss:.6g} on one')


def results(out):
    """One a token: logits, or of a model without a head what it ends with."""
    return out['logits'] if 'logits' in out else out[0]


@torch.compiler.assume_constant_result
def check_served(model, before):
    if SERVED[0] == before:  # at a first call: what is compiled serves no more
        raise Error(f'{type(model).__name__} has called no attention of register(): its attn_implementation is '
                    f'{model.config._attn_implementation}, or what mixes tokens is its own')  # pylint: disable=protected-access


def call_model(model, *args, **kwargs):
    """A model's call, with or without what shard() returns."""
    if 'team_tokens' not in kwargs:
        return torch.nn.Module.__call__(model, *args, **kwargs)
    borders, position_ids, name = kwargs.get('cu_seq_lens_q'), kwargs.get('position_ids'), model.config._attn_implementation
    before = model.check_model(kwargs.get('output_router_logits'))
    if borders is None:
        refuse(FORGOTTEN)
    if position_ids is None or position_ids.dtype != POSITIONS:
        refuse('position_ids are not those that shard() returns, or are missing')
    if model.training and getattr(model.config, 'layerdrop', 0):
        refuse('layerdrop is not served: each rank would leave out other layers')
    kwargs['position_ids'] = positions_op(position_ids, borders, kwargs['team_tokens'], name)
    out = torch.nn.Module.__call__(model, *args, **kwargs)
    model.check_served(before)
    return out


PreTrainedModel.__call__ = call_model
# As methods, of these names, torch.compile takes them: a module as an argument is no constant.
PreTrainedModel.check_model, PreTrainedModel.check_served = check_model, check_served


@torch.compiler.assume_constant_result
def serve():
    SERVED[0] += 1


@torch.compiler.assume_constant_result
def refuse(words):
    """Of what is raised where torch.compile traces, not each PyTorch shows the words; of what it calls there, it does."""
    raise Error(words)


def check_call(module, attention_mask, dropout, use_cache, team_tokens, number, more):
    """What the library would compute otherwise, or not at all."""
    if team_tokens is None:
        refuse(FORGOTTEN)
    if getattr(module, 'upipe_number', None) != number:
        refuse('the model has not been checked: call it, and not its forward()')
    what = [name for name in ('position_bias', 'head_mask', 'block_table') if more.get(name) is not None]
    if attention_mask is not None:
        refuse("attention_mask is not served, nor a model's own: give it to shard(), which drops one that hides nothing")
    if dropout:
        refuse(f'attention dropout {dropout} is not served')
    if use_cache:
        refuse('use_cache is not served, nor generate(): keys of earlier tokens are not kept')
    if what or more.get('output_attentions'):
        refuse(f'{(what or ["output_attentions"])[0]} is not served')
    rope = getattr(module.config, 'rope_parameters', None) or {}
    kinds = {one['rope_type'] for one in (rope, *rope.values()) if isinstance(one, dict) and 'rope_type' in one}
    for kind in kinds & {'dynamic', 'longrope'}:
        refuse(f'rope_type {kind} is not served: its angles are those of the longest position that a rank sees')


def check_positions(position_ids, borders, tokens, name):
    """A copy of them, so that torch.compile keeps the check."""
    team = REGISTERED[name].team
    first, count = team.rows(tokens)
    own = positions(torch.arange(first, first + count, device=position_ids.device), borders)
    if position_ids.shape[-1] != count or not ((position_ids == own).all() & (borders[0] == 0) & (borders[-1] == tokens)):
        words = "position_ids and cu_seq_lens_q are not those of this rank's tokens: take shard()'s, of this team"
        team.u.abort(team.rank, words)  # on the other ranks they may be right
        raise Error(words)
    return position_ids.clone()


positions_op = torch.library.custom_op('upipe::positions', check_positions, mutates_args=(), schema=(
    '(Tensor position_ids, Tensor borders, SymInt tokens, str name) -> Tensor'))
positions_op.register_fake(lambda position_ids, borders, tokens, name: torch.empty_like(position_ids))


def own_mask(attention_mask=None, use_vmap=False, config=None, **_):
    """In place of transformers' masks: what hides more than causality, windows and borders of documents is no argument."""
    if use_vmap or getattr(config, 'attention_chunk_size', None):
        refuse("the model's own kind of mask is not served: causal, sliding windows and packed documents are")
    return attention_mask


def register(team, name='upipe', allow_unlisted=False):
    """From now on attn_implementation=name is the library's, on this team.

    allow_unlisted  models of families that are not LISTED compare themselves at their first call, which all ranks make together:
                    logits and loss of a short row, this rank's part against the whole; that costs memory for the attention
                    of the longest window
    """
    number = next(NUMBERS)
    REGISTERED[name] = Registered(team, allow_unlisted, number)

    def attend(module, query, key, value, attention_mask, dropout=0.0, scaling=None, sliding_window=None, softcap=None,
               is_causal=None, cu_seq_lens_q=None, team_tokens=None, use_cache=False, s_aux=None, **more):
        check_call(module, attention_mask, dropout, use_cache, None if cu_seq_lens_q is None else team_tokens, number, more)
        serve()
        return team.attention(*(t.transpose(1, 2) for t in (query, key, value)), tokens=team_tokens,
                              cu_seqlens=cu_seq_lens_q if len(cu_seq_lens_q) > 2 else (),
                              causal=bool(module.is_causal if is_causal is None else is_causal), window=sliding_window or 0,
                              scale=scaling or 0.0, softcap=softcap or 0.0, sinks=s_aux), None

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, own_mask)


def check_trainer(team, base, model, args, more):
    """What a Trainer on a team would compute otherwise."""
    for name in 'compute_loss', 'training_step':
        if getattr(base, name) is not getattr(transformers.Trainer, name):
            raise Error(f"{base.__name__} has a {name} of its own, which knows of no ranks: derive from a class with Trainer's")
    if model is None or args is None:
        raise Error(f'{"model" if model is None else "args"} is missing: a Trainer on a team takes a model and TrainingArguments')
    state = args.distributed_state
    if (state.process_index, state.num_processes) != (team.rank, team.ranks):
        raise Error(f'Trainer has process {state.process_index} of {state.num_processes}, the team rank {team.rank} of {team.ranks}: '
                    f'start one team with torchrun, and make new TrainingArguments for each Trainer')
    options = {**vars(args), **more}
    for name in ('deepspeed', 'deepspeed_plugin', 'fsdp', 'fsdp_plugin_args', 'parallelism_config', 'label_smoothing_factor',
                 'predict_with_generate', 'load_best_model_at_end', 'compute_metrics', 'compute_loss_func', 'neftune_noise_alpha'):
        if options.get(name):
            raise Error(f'{name} is not served by a Trainer on a team: leave it out')
    if re.search('layerwise|lomo', args.optim):
        raise Error(f'optim {args.optim.value} is not served: it steps within the backward, before gradients are summed')
    if isinstance(model, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)):
        raise Error(f'{type(model).__name__} takes means of gradients, which a Trainer on a team sums: give the model without it')
    if len(set((getattr(model, 'hf_device_map', None) or {}).values())) > 1:
        raise Error('device_map has put the model on several devices: a rank has one')


def trainer_class(team, base):
    """transformers.Trainer, or a class derived from it, as base, on this team."""

    class TeamTrainer(base):
        def __init__(self, model=None, args=None, **more):
            check_trainer(team, base, model, args, more)
            # Else accelerate would cut the batches by rank, and take means of gradients. The rank stays, so that rank 0 alone
            # saves and logs.
            args.distributed_state.distributed_type = type(args.distributed_state.distributed_type).NO
            args.distributed_state.num_processes = 1
            args.prediction_loss_only = True  # logits are those of a rank's tokens
            super().__init__(model, args, **more)

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            part, out = super().compute_loss(model, shard(team, **inputs), True, num_items_in_batch)
            loss = part + (team.sum(part) - part.detach())  # the mean over all tokens, with the gradient of this rank's part
            return (loss, out) if return_outputs else loss

        def training_step(self, *args, **more):
            loss = super().training_step(*args, **more)
            if self.accelerator.sync_gradients:  # after the last of the accumulated batches, before gradients are clipped
                team.sum_gradients(self.model)
            return loss

        def _save_checkpoint(self, *args, **more):
            if team.rank == 0:  # states of random numbers too, whose file is one
                super()._save_checkpoint(*args, **more)

    return TeamTrainer

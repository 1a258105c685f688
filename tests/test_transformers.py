#!/usr/bin/env python3
"""test_transformers.py TRAIN TOP -- train, and logits beside it, against Hugging Face's transformers, with biases

Small random models that transformers has saved: Qwen2, and Llama and Qwen3 with biases of all four projections; Llama
with every type of RoPE, whose rates are held to transformers' own to 1e-6; families whose K and V come from a latent. Loss, logits and the gradient of every tensor are
compared with PyTorch in double precision; errors are held to those of transformers in f32, by the rule of lib/tolerance.h.
Losses of trainings, one of them at 4k with YaRN, are PyTorch's, and so are gradients of an adapter, in PEFT's files. What
train saves, transformers reads. Where no Python here has both packages the test is left out (status 77).
"""

import copy
import functools
import json
import math
import os
import sys
import tempfile
from unittest import mock

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), 'lib'))
from checks import check, end, equal, load, needed, other_python, read, run_command, run_test, write  # pylint: disable=wrong-import-position
from programs import BOOK, npy, packed, safetensors  # pylint: disable=wrong-import-position

os.environ |= {'TRANSFORMERS_OFFLINE': '1', 'HF_HUB_OFFLINE': '1', 'TQDM_DISABLE': '1'}
try:
    import torch
    import transformers
    from safetensors.torch import save_file
    if int(transformers.__version__.split('.', maxsplit=1)[0]) < 5:
        raise ImportError('rope_parameters came with 5')
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.deepseek_v2 import modeling_deepseek_v2
    from transformers.models.qwen3_5 import modeling_qwen3_5
    from wide import in_double
except ImportError:
    other_python(os.path.join(sys.argv[2], 'build', 'bench', 'venv', 'bin', 'python'))
    print('left out: transformers, as no Python here has version 5 of it and PyTorch')
    sys.exit(77)

TRAIN = os.path.abspath(sys.argv[1])
LOGITS = os.path.join(os.path.dirname(TRAIN), 'logits')
TOKENS, HEAD_DIM, THETA = 64, 32, 500000.0
MODELS = [('Qwen2', {'tie_word_embeddings': True, 'use_sliding_window': False}),
          ('Llama', {'tie_word_embeddings': False, 'attention_bias': True}),
          ('Qwen3', {'tie_word_embeddings': True, 'attention_bias': True})]
# What other families do otherwise: windows and layers without RoPE, a padding that occurs in the text (an e), fused tensors,
# interleaved pairs, half a head, norms of what attention and MLP give and no others, multipliers, norms of 1 + w, two RoPEs and
# soft-caps.
FAMILIES = [('Qwen2', {'tie_word_embeddings': False, 'pad_token_id': 101, 'use_sliding_window': True, 'sliding_window': 16,
                       'max_window_layers': 1}),
            ('Ministral', {'sliding_window': 16, 'layer_types': ['sliding_attention', 'full_attention', 'sliding_attention']}),
            ('Cwm', {'sliding_window': 16}),
            ('SmolLM3', {'no_rope_layers': [1, 0, 1], 'pad_token_id': 101}),
            ('Phi3', {'sliding_window': 20, 'pad_token_id': None, 'partial_rotary_factor': 0.75}),
            ('Glm', {'pad_token_id': None, 'partial_rotary_factor': 0.5}),
            ('Glm4', {'pad_token_id': None, 'partial_rotary_factor': 0.5}),
            ('Granite', {'embedding_multiplier': 3.0, 'residual_multiplier': 0.375, 'attention_multiplier': 0.125,
                         'logits_scaling': 2.5, 'tie_word_embeddings': True}),
            ('Exaone4', {'sliding_window': 16, 'layer_types': ['sliding_attention', 'full_attention', 'sliding_attention']}),
            ('Gemma3Text', {'sliding_window': 16, 'layer_types': ['sliding_attention', 'full_attention', 'sliding_attention'],
                            'query_pre_attn_scalar': 24, 'pad_token_id': 101, 'rope_parameters': {
                                'full_attention': {'rope_type': 'linear', 'factor': 8.0, 'rope_theta': THETA},
                                'sliding_attention': {'rope_type': 'default', 'rope_theta': 1000.0}}}),
            ('Gemma2', {'sliding_window': 16, 'query_pre_attn_scalar': 24, 'pad_token_id': None, 'attn_logit_softcapping': 2.0,
                        'final_logit_softcapping': 3.0}),
            ('SeedOss', {'attention_dropout': 0.0, 'residual_dropout': 0.0, 'pad_token_id': None}),
            ('Ernie4_5', {'pad_token_id': 101})]
# Layers of linear attention among others, and more of them than the padding's row; alone and in teams whose cuts are no multiples
# of the rule's chunk.
LINEAR = ('Qwen3_5Text', {'layer_types': ['linear_attention', 'full_attention', 'linear_attention'], 'linear_num_key_heads': 2,
                          'linear_num_value_heads': 4, 'linear_key_head_dim': 24, 'linear_value_head_dim': 16,
                          'tie_word_embeddings': False, 'pad_token_id': 101})
LINEAR_WAYS = [('--ranks', '1'), ('--ranks', '2', '--method', 'upipe'), ('--ranks', '3', '--method', 'ulysses')]
# K and V of a latent, and Q of numbers that a token is projected down to or not: gathered, or with the larger latent as heads.
LATENT = {'num_key_value_heads': 4, 'head_dim': 8, 'qk_nope_head_dim': 24, 'qk_rope_head_dim': 8, 'v_head_dim': 40}
DENSE = {**LATENT, 'first_k_dense_replace': 3}
LATENTS = [('MiniCPM3', {**LATENT, 'q_lora_rank': 20, 'kv_lora_rank': 28, 'attention_bias': True, 'scale_emb': 3, 'scale_depth': 1.25,
                         'dim_model_base': 40}),
           ('Youtu', {**LATENT, 'q_lora_rank': None, 'kv_lora_rank': 100, 'attention_bias': True, 'rope_interleave': False,
                      'tie_word_embeddings': False}),
           ('DeepseekV2', {**DENSE, 'q_lora_rank': None, 'kv_lora_rank': 28, 'pad_token_id': 101}),
           ('DeepseekV3', {**DENSE, 'q_lora_rank': 20, 'kv_lora_rank': 100, 'attention_bias': True, 'tie_word_embeddings': True})]
LATENT_WAYS = [('--ranks', '1'), ('--ranks', '2', '--method', 'upipe'), ('--ranks', '4', '--method', 'ulysses'),
               ('--ranks', '3', '--method', 'zigzag')]
# Types of RoPE; 64 tokens are more than those of the training before.
ROPES = [{'rope_type': 'linear', 'factor': 4.0}, {'rope_type': 'dynamic', 'factor': 2.0},
         {'rope_type': 'llama3', 'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0,
          'original_max_position_embeddings': 32},
         {'rope_type': 'yarn', 'factor': 4.0, 'original_max_position_embeddings': 32},
         {'rope_type': 'yarn', 'factor': 4.0, 'original_max_position_embeddings': 32, 'beta_fast': 16.0, 'beta_slow': 2.0,
          'mscale': 1.0, 'mscale_all_dim': 0.5, 'truncate': False},
         {'rope_type': 'longrope', 'factor': 4.0, 'original_max_position_embeddings': 32,
          'short_factor': [1.0] * (HEAD_DIM // 2), 'long_factor': [1.0 + i for i in range(HEAD_DIM // 2)]}]
# A rank alone, a team, a ring, segments.
WAYS = [('--ranks', '1'), ('--ranks', '2', '--method', 'upipe'), ('--ranks', '3', '--method', 'zigzag'),
        ('--ranks', '2', '--method', 'upipe-fpdt', '--segments', '3')]


softmax = torch.nn.functional.softmax


def softmax_widened(x, *words, dtype=None, **more):
    """That of f64 scores is f64, which transformers' own attention would make f32."""
    return softmax(x, *words, dtype=None if x.dtype == torch.float64 else dtype, **more)


torch.nn.functional.softmax = softmax_widened


def sharpened(rope, by):
    return 0.1 * rope[by] * math.log(rope['factor']) + 1


class Angles(torch.nn.Module):
    """The rotary angles in double precision, which transformers' are not: of these rates, or of theta and a factor, by types of
    layers where these have their own."""

    def __init__(self, config, rope):
        super().__init__()
        plain = config.rope_parameters
        self.dims, self.complex = getattr(config, 'qk_rope_head_dim', HEAD_DIM), config.model_type == 'deepseek_v2'
        if rope:
            self.rates, self.factor = {None: torch.tensor(rope['rates'], dtype=torch.float64)}, rope['factor']
            return
        self.rates = {name: self.rates_of(one) for name, one in (plain if 'full_attention' in plain else {None: plain}).items()}
        self.factor = sharpened(plain, 'mscale') / sharpened(plain, 'mscale_all_dim') if plain.get('rope_type') == 'yarn' else 1

    def rates_of(self, one):
        dims = int(self.dims * one.get('partial_rotary_factor', 1))
        rates = one['rope_theta'] ** (-torch.arange(0, dims, 2, dtype=torch.float64) / dims)
        if one['rope_type'] != 'yarn':
            return rates / (one['factor'] if one['rope_type'] == 'linear' else 1)
        low, high = (dims * math.log(one['original_max_position_embeddings'] / (turns * 2 * math.pi)) / (2 * math.log(one['rope_theta']))
                     for turns in (32, 1))
        low, high = max(math.floor(low), 0), min(math.ceil(high), dims - 1)
        part = ((torch.arange(dims // 2, dtype=torch.float64) - low) / max(high - low, 0.001)).clamp(0, 1)
        return rates * (1 - part) + rates / one['factor'] * part

    def forward(self, x, position_ids, layer_type=None):
        if position_ids.dim() == 3:  # of time, height and width, which of a text are the same
            position_ids = position_ids[0]
        angles = position_ids[..., None].double() * self.rates[layer_type]
        if self.complex:
            return torch.polar(torch.full_like(angles, self.factor), angles)
        angles = angles.repeat(1, 1, 2)
        return (angles.cos() * self.factor).to(x.dtype), (angles.sin() * self.factor).to(x.dtype)


def class_of(name):
    return name.removesuffix('Text') + 'ForCausalLM'


def make_model(name, more, rope=None, positions=128):
    config = getattr(transformers, name + 'Config')(
        vocab_size=270, hidden_size=96, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=positions, rms_norm_eps=1e-5,
        **{'num_key_value_heads': 2, 'head_dim': HEAD_DIM,
           'rope_parameters': {'rope_type': 'default', 'rope_theta': THETA, **(rope or {})}, **more})
    torch.manual_seed(len(more))
    model = getattr(transformers, class_of(name))(config)
    for one, p in model.named_parameters():
        torch.nn.init.normal_(p, 1 if 'norm' in one else 0, 0.5 if one.endswith('.bias') else 0.1)
    return model


def widened(model, rope=None):
    """The same model with every number in f64; transformers' own norms and angles round to f32."""
    model = copy.deepcopy(model).double()
    model.model.rotary_emb = Angles(model.config, rope)
    for m in model.modules():
        if type(m).__name__.endswith('RMSNorm'):
            one, eps = (1, m.eps) if type(m).__name__.startswith(('Gemma', 'Qwen3_5')) else (0, m.variance_epsilon)
            m.forward = lambda x, m=m, one=one, eps=eps: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (one + m.weight)
    for name, modeling in (('Qwen3_5', modeling_qwen3_5), ('DeepseekV2', modeling_deepseek_v2)):
        if type(model).__name__.startswith(name):
            model.forward = forward_in_double(model.forward, modeling)
    return model


def forward_in_double(forward, modeling):
    def widely(*words, **more):
        with in_double(modeling):
            return forward(*words, **more)
    return widely


def run_model(model, ids):
    """'loss', 'logits' and the gradients by name."""
    model.zero_grad()
    logits = model(ids[None, :-1], use_cache=False).logits[0]
    loss = torch.nn.functional.cross_entropy(logits, ids[1:])
    loss.backward()
    return {'loss': loss.detach(), 'logits': logits.detach(),
            **{name: p.grad for name, p in model.named_parameters()}}


def runs_in_f32(model, ids):
    """run_model; of linear attention also with other chunks and token by token, and of a latent with transformers' own attention,
    which round otherwise: the greatest error counts."""
    runs, rule = [run_model(model, ids)], modeling_qwen3_5.torch_chunk_gated_delta_rule
    if type(model).__name__.startswith('Qwen3_5'):
        for other in (functools.partial(rule, chunk_size=32), modeling_qwen3_5.torch_recurrent_gated_delta_rule):
            with mock.patch.object(modeling_qwen3_5, 'torch_chunk_gated_delta_rule', other):
                runs.append(run_model(model, ids))
    if getattr(model.config, 'kv_lora_rank', None):
        before = model.config._attn_implementation  # pylint: disable=protected-access
        model.set_attn_implementation('eager')
        runs.append(run_model(model, ids))
        model.set_attn_implementation(before)
    return runs


def run(program, folder, *words):
    done = run_command([program, *words], cwd=folder, timeout=None)
    needed(done.returncode == 0, f'{words}: {done.returncode}: {done.stderr}')


def run_train(folder, way, *words):
    """One window, one step: Adam's first moments are the gradients where beta1 is 0."""
    run(TRAIN, folder, '--data', 'window', '--tokens', TOKENS, '--sample', 0, '--clip', 0, '--beta1', 0, '--json', 'out.json', *words, *way)
    return load(os.path.join(folder, 'out.json'))


def read_tensors(path):
    """name -> f32 tensor"""
    return {name: torch.frombuffer(bytearray(data), dtype=torch.float32).reshape(shape)
            for name, (_, shape, data) in safetensors(path)[1].items()}


def read_npy(path):
    data = bytearray(read(path))
    return torch.frombuffer(data, dtype=torch.float32, offset=10 + int.from_bytes(data[8:10], 'little')).reshape(TOKENS, -1)


def compare(what, got, rounded, exact):
    equal(sorted(got), sorted(exact), f'{what}: names')
    for name in got.keys() & exact.keys():
        off, most = ((a - b).abs().max().item() for a, b in ((got[name], exact[name]), (exact[name], torch.zeros(()))))
        theirs = max((one[name] - exact[name]).abs().max().item() for one in rounded)
        floor = 4 * torch.finfo(torch.float32).eps * most
        check(most > 1e-6 and off <= 2 * theirs + floor,
              f'{what}: {name}, at most {most:.3g}, is off by {off:.3g}, transformers in f32 by {theirs:.3g}')


def read_again(path, name, tensors, what):
    """transformers reads a checkpoint as the same model, without a tensor too few or too many."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    equal(type(model).__name__, class_of(name), f'{what}: the model')
    equal([len(info[key]) for key in ('missing_keys', 'unexpected_keys', 'mismatched_keys')], [0, 0, 0], f'{what}: {info}')
    for one, p in model.named_parameters():
        check(torch.equal(p, tensors[one]), f'{what}: {one} is not what train has written')
    return model


def got_of(path, numbers, folder):
    """Gradients in a checkpoint, which are moments there; loss, logits."""
    moments = read_tensors(os.path.join(path, 'optimizer.safetensors'))
    got = {one.removeprefix('exp_avg.'): t for one, t in moments.items() if one.startswith('exp_avg.')}
    return got | {'loss': torch.tensor(numbers['loss'][0], dtype=torch.float64),
                  'logits': read_npy(os.path.join(folder, 'out.npy'))}


def test_model(name, more, ways, ids, folder):
    model = make_model(name, more)
    model_at = f'{name}{len(more)}'
    model.save_pretrained(os.path.join(folder, model_at))
    exact, rounded = run_model(widened(model), ids), runs_in_f32(model, ids)
    for number, way in enumerate(ways):
        what, save = f'{name} {" ".join(way)}', f'{model_at}-{number}'
        numbers = run_train(folder, way, '--load', model_at, '--steps', 1, '--lr', 0, '--min-lr', 0, '--save', save)
        run(LOGITS, folder, '--load', model_at, '--ids', 'ids.npy', '--out', 'out.npy', *way)
        path = os.path.join(folder, save, 'checkpoint-1')
        compare(what, got_of(path, numbers, folder), rounded, exact)
        loss = run_model(read_again(path, name, dict(model.named_parameters()), what), ids)['loss']
        check(abs(loss - rounded[0]['loss']) < 1e-6, f'{what}: saved, the loss is {loss}, not {rounded[0]["loss"]}')


def test_whole(ids, folder):
    """Of a larger model that transformers has saved the text part is the same model."""
    text = make_model(*LINEAR)
    config = transformers.Qwen3_5Config(text_config=text.config.to_dict(), vision_config={
        'depth': 1, 'hidden_size': 32, 'intermediate_size': 32, 'num_heads': 2, 'out_hidden_size': text.config.hidden_size})
    whole = transformers.Qwen3_5ForConditionalGeneration(config)
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    whole.save_pretrained(os.path.join(folder, 'whole'))
    numbers = run_train(folder, ('--ranks', '2'), '--load', 'whole', '--steps', 1, '--lr', 0, '--min-lr', 0, '--save', 'part')
    read_again(os.path.join(folder, 'part', 'checkpoint-1'), LINEAR[0], dict(text.named_parameters()), 'of a larger model')
    loss = run_model(widened(text), ids)['loss'].item()
    check(abs(loss - numbers['loss'][0]) < 1e-6 * loss, f'of a larger model: {numbers["loss"]}, transformers has {loss}')


def check_rates(config, rope, what):
    """transformers' rates and factor, in f32."""
    rates, factor = ROPE_INIT_FUNCTIONS[config.rope_parameters['rope_type']](config, 'cpu', seq_len=TOKENS)
    equal(len(rope['rates']), len(rates), f'{what}: rates')
    for ours, theirs in zip([*rope['rates'], rope['factor']], [*rates.tolist(), factor]):
        check(abs(ours - theirs) <= 1e-6 * theirs, f'{what}: {ours}, transformers has {theirs}')


def test_rope(number, rope, name, more, ways, ids, folder):
    """Rates, and what comes of them; and what is saved."""
    way, save = ways[number % len(ways)], f'rope{number}'
    what = f'{name} {rope["rope_type"]} {" ".join(way)}'
    model = make_model(name, more, rope, 32 if rope['rope_type'] == 'dynamic' else 128)
    model.save_pretrained(os.path.join(folder, save + 'from'))
    numbers = run_train(folder, way, '--load', save + 'from', '--steps', 1, '--lr', 0, '--min-lr', 0, '--save', save)
    check_rates(model.config, numbers['rope'], what)
    run(LOGITS, folder, '--load', save + 'from', '--ids', 'ids.npy', '--out', 'out.npy', *way)
    path = os.path.join(folder, save, 'checkpoint-1')
    compare(what, got_of(path, numbers, folder), runs_in_f32(model, ids), run_model(widened(model, numbers['rope']), ids))
    check_rates(read_again(path, name, dict(model.named_parameters()), what).config, numbers['rope'], f'{what}, saved')


def test_new(name, flags, ids, folder):
    """A model of train's own: the loss of its second step is that of transformers after the first."""
    save = 'new' + name + ''.join(flags)
    numbers = run_train(folder, ('--ranks', '2'), '--steps', 2, '--lr', 1e-2, '--warmup', 1, '--layers', 2, '--model-dim', 64,
                        '--heads', 2, '--kv-heads', 1, *flags, '--save', save, '--save-every', 1, '--keep', 2)
    path = os.path.join(folder, save, 'checkpoint-1')
    model = read_again(path, name, read_tensors(os.path.join(path, 'model.safetensors')), f'a new {name}')
    loss = run_model(widened(model, numbers.get('rope')), ids)['loss'].item()
    check(abs(loss - numbers['loss'][1]) < 1e-6 * loss, f'a new {name}: {numbers["loss"]}, transformers has {loss}')


LENGTHS = [40, 1, 90, 13, 0, 64, 200, 7, 105]  # of packed documents; the windows of an epoch cut them
STEPS, BATCH, RATE, DECAY, EPS = 20, 2, 3e-3, 0.1, 1e-8
LONG = 4096


def mix(z):
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9 & 2**64 - 1
    z = (z ^ z >> 27) * 0x94d049bb133111eb & 2**64 - 1
    return z ^ z >> 31


def order(n, seed, epoch):
    """Fisher-Yates over splitmix64, as examples/train/files/data.h has it."""
    at, state = list(range(n)), mix(mix(seed + 0x9e3779b97f4a7c15 & 2**64 - 1) ^ epoch)
    for i in range(n - 1, 0, -1):
        state = state + 0x9e3779b97f4a7c15 & 2**64 - 1
        j = mix(state) % (i + 1)
        at[i], at[j] = at[j], at[i]
    return at


def window_losses(model, ids, ends, first):
    """Each document's part of a window as a sequence of its own: the sum of its losses, and how many there are."""
    last, total, count = min(first + TOKENS, len(ids) - 1), 0, 0
    cuts = [first, *(end for end in ends if first < end < last), last]
    for begin, end in zip(cuts, cuts[1:]):
        targets = ids[begin + 1:end + 1] if end not in ends else ids[begin + 1:end]  # the last token of one has none
        if len(targets):
            logits = model(ids[None, begin:end], use_cache=False).logits[0, :len(targets)]
            total, count = total + torch.nn.functional.cross_entropy(logits, targets, reduction='sum'), count + len(targets)
    return total, count


def adamw_losses(exact, steps, loss_of):
    """Those of so many steps of AdamW."""
    groups = [{'params': [p for p in exact.parameters() if p.dim() == 2], 'weight_decay': DECAY},
              {'params': [p for p in exact.parameters() if p.dim() != 2], 'weight_decay': 0}]
    adamw, losses = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=EPS), []
    for step in range(steps):
        exact.zero_grad()
        loss = loss_of(step)
        loss.backward()
        adamw.step()
        losses.append(loss.item())
    return losses


def train_losses(folder, way, *words):
    """The numbers of a training with the same settings."""
    run(TRAIN, folder, '--lr', RATE, '--min-lr', RATE, '--warmup', 0, '--weight-decay', DECAY, '--clip', 0, '--sample', 0, '--json',
        'out.json', *words, *way)
    return load(os.path.join(folder, 'out.json'))


def furthest(got, losses):
    return max(abs(a - b) / b for a, b in zip(got, losses))


def check_losses(what, got, losses, theirs=0):
    """theirs: how far transformers in f32 is off; Adam makes much of what is rounded in small gradients."""
    off = furthest(got, losses)
    check(len(got) == len(losses) and off <= max(1e-5, 2 * theirs), f'{what}: {got}, PyTorch has {losses}: off by {off:.3g}')


def test_packed(name, more, ways, ids, folder):
    """Twenty steps of AdamW over two epochs and more of packed documents, in f64."""
    ids = torch.tensor(list(read(BOOK)[5000:5000 + sum(LENGTHS)]))
    ends = [sum(LENGTHS[:i + 1]) for i in range(len(LENGTHS))]
    model = make_model(name, more)
    model.save_pretrained(os.path.join(folder, 'packed' + name))
    exact = widened(model)
    windows = (len(ids) - 2) // TOKENS + 1

    def loss_of(trained, step):
        parts = []
        for at in range(step * BATCH, (step + 1) * BATCH):
            parts.append(window_losses(trained, ids, ends, TOKENS * order(windows, 1, at // windows)[at % windows]))
        return sum(total for total, _ in parts) / sum(count for _, count in parts)

    losses = adamw_losses(exact, STEPS, functools.partial(loss_of, exact))
    theirs = 0 if ways is WAYS else furthest(adamw_losses(model, STEPS, functools.partial(loss_of, model)), losses)
    packed(os.path.join(folder, 'packed'), ids.tolist(), LENGTHS, 1)
    for way in ways if ways is WAYS else ():  # linear attention takes one sequence at a time
        got = train_losses(folder, way, '--load', 'packed' + name, '--tokens-file', 'packed.bin', '--tokens', TOKENS, '--batch', BATCH,
                           '--steps', STEPS)
        check_losses(f'packed {name} {" ".join(way)}', got['loss'], losses)
    for zero, way in enumerate(ways):  # the same sequences one by one, their gradients summed
        got = train_losses(folder, way, '--load', 'packed' + name, '--tokens-file', 'packed.bin', '--tokens', TOKENS, '--accumulate', BATCH,
                           '--zero', zero, '--steps', STEPS)
        check_losses(f'packed {name} {" ".join(way)}, accumulated, ZeRO {zero}', got['loss'], losses, theirs)
        got = train_losses(folder, way[2:], '--load', 'packed' + name, '--tokens-file', 'packed.bin', '--tokens', TOKENS, '--replicas', BATCH,
                           '--ranks', BATCH * int(way[1]), '--zero', zero, '--steps', STEPS)
        check_losses(f'packed {name} {" ".join(way)}, each of {BATCH} replicas, ZeRO {zero}', got['loss'], losses, theirs)


class Adapted(torch.nn.Module):
    """A projection and its adapter as two small products beside it."""

    def __init__(self, base, rank, scale):
        super().__init__()
        self.base, self.scale = base, scale
        self.lora_A = torch.nn.Parameter(torch.randn(rank, base.in_features, dtype=base.weight.dtype) / 10)
        self.lora_B = torch.nn.Parameter(torch.randn(base.out_features, rank, dtype=base.weight.dtype) / 10)

    def forward(self, x):
        return self.base(x) + self.scale * (x @ self.lora_A.T @ self.lora_B.T)


def test_adapter(name, more, adapted, ways, ids, folder):
    """Losses and gradients of an adapter of two products in three steps, and logits with it, in f64."""
    rank, alpha, steps, eps = 4, 6, 3, 1e-3  # with it the update is a smooth function of the gradient
    base, files = f'base {name}', f'adapter {name}'
    model = make_model(name, more)
    model.save_pretrained(os.path.join(folder, base))
    exact = widened(model).requires_grad_(False)
    for layer in exact.model.layers:
        for part, names in ((layer.self_attn, adapted), (layer.mlp, ('gate_proj', 'down_proj'))):
            for one in names:
                setattr(part, one, Adapted(getattr(part, one), rank, alpha / rank))
    adapter = {one + '.weight': p for one, p in exact.named_parameters() if '.lora_' in one}
    with torch.no_grad():
        for p in adapter.values():
            p.copy_(p.float())  # as the file has it
    os.mkdir(os.path.join(folder, files))
    save_file({'base_model.model.' + one: p.detach().float().contiguous() for one, p in adapter.items()},
              os.path.join(folder, files, 'adapter_model.safetensors'))
    write(os.path.join(folder, files, 'adapter_config.json'),
          json.dumps({'peft_type': 'LORA', 'task_type': 'CAUSAL_LM', 'r': rank, 'lora_alpha': alpha, 'use_dora': False,
                      'target_modules': [*adapted, 'gate_proj', 'down_proj']}))
    run(LOGITS, folder, '--load', base, '--load-adapter', files, '--ids', 'ids.npy', '--out', 'out.npy')
    wanted = exact(ids[None, :-1], use_cache=False).logits[0].detach()
    near(f'adapter of {name}: logits', read_npy(os.path.join(folder, 'out.npy')), wanted)
    for number, way in enumerate(ways):
        save = f'adapted {name}{number}'
        numbers = train_losses(folder, way, '--load', base, '--load-adapter', files, '--data', 'window', '--tokens', TOKENS,
                               '--beta1', 0, '--adam-eps', eps, '--steps', steps, '--save', save, '--save-every', 1, '--keep', 0)
        tested = copy.deepcopy(exact)
        trained = {one + '.weight': p for one, p in tested.named_parameters() if '.lora_' in one}
        adamw = torch.optim.AdamW(trained.values(), lr=RATE, betas=(0.0, 0.95), eps=eps, weight_decay=DECAY)
        losses = []
        for step in range(steps):
            tested.zero_grad()
            loss = torch.nn.functional.cross_entropy(tested(ids[None, :-1], use_cache=False).logits[0], ids[1:])
            loss.backward()
            losses.append(loss.item())
            got = read_tensors(os.path.join(folder, save, f'checkpoint-{step + 1}', 'optimizer.safetensors'))
            equal({one[8:] for one in got if one.startswith('exp_avg.')}, set(trained), 'adapter: what is trained')
            for one, p in trained.items():
                near(f'adapter of {name}, {" ".join(way)}, step {step + 1}: the gradient of {one}', got['exp_avg.' + one], p.grad)
            adamw.step()
        check_losses(f'adapter of {name}, {" ".join(way)}', numbers['loss'], losses)


def near(what, got, exact):
    off, most = (got - exact).abs().max().item(), exact.abs().max().item()
    check(got.shape == exact.shape and 0 < most and off <= 1e-5 * most, f'{what}, at most {most:.3g}, is off by {off:.3g}')


def test_long(ids, folder):
    """Three steps at 4k of a model that YaRN extends from 512, in f64."""
    text = read(BOOK)[5000:5001 + 3 * LONG]
    ids = torch.tensor(list(text))
    model = make_model('Llama', {'tie_word_embeddings': True},
                       {'rope_type': 'yarn', 'factor': LONG / 512, 'original_max_position_embeddings': 512}, LONG)
    model.save_pretrained(os.path.join(folder, 'long'))
    write(os.path.join(folder, 'longtext'), text)
    got = [train_losses(folder, way, '--load', 'long', '--data', 'longtext', '--tokens', LONG, '--steps', 3) for way in WAYS]
    exact = widened(model, got[0]['rope'])

    def loss_of(step):
        first = LONG * order(3, 1, 0)[step]
        logits = exact(ids[None, first:first + LONG], use_cache=False).logits[0]
        return torch.nn.functional.cross_entropy(logits, ids[first + 1:first + LONG + 1])

    losses = adamw_losses(exact, 3, loss_of)
    for way, numbers in zip(WAYS, got):
        check_losses(f'{LONG} tokens, {" ".join(way)}', numbers['loss'], losses)


def latent_cases():
    """Each family, one way in turn and one in every way; YaRN, whose mscale_all_dim counts twice, and the types of MiniCPM3's file."""
    down = ('q_a_proj', 'q_b_proj', 'kv_a_proj_with_mqa', 'kv_b_proj', 'o_proj')
    yarn = ROPES[4]
    longrope = {**ROPES[5], 'short_factor': [1.0] * 4, 'long_factor': [1.0, 2.0, 3.0, 4.0]}
    some = [LATENT_WAYS[0::2], LATENT_WAYS[1::2], LATENT_WAYS[0::2], LATENT_WAYS]
    return [*((test_model, *model, ways) for model, ways in zip(LATENTS, some)),
            *((test_rope, 20 + i, yarn, *model, LATENT_WAYS) for i, model in enumerate(LATENTS)),
            (test_rope, 25, longrope, *LATENTS[0], LATENT_WAYS),
            (test_packed, *LATENTS[3], LATENT_WAYS[:3]), (test_adapter, *LATENTS[3], down, LATENT_WAYS[1:3]),
            (test_adapter, *LATENTS[1], ('q_proj', 'kv_a_proj_with_mqa', 'kv_b_proj'), LATENT_WAYS[2:])]


def main():
    torch.set_num_threads(1)
    text = read(BOOK)[1000:1001 + TOKENS]
    ids = torch.tensor(list(text))
    with tempfile.TemporaryDirectory() as folder:
        write(os.path.join(folder, 'window'), text)
        write(os.path.join(folder, 'ids.npy'), npy(text[:TOKENS]))
        for test, *case in [*((test_model, *model, WAYS) for model in MODELS),
                            *((test_model, *model, [WAYS[(i + 1) % len(WAYS)]]) for i, model in enumerate(FAMILIES)),
                            *((test_rope, *one, 'Llama', {'tie_word_embeddings': True}, WAYS) for one in enumerate(ROPES)),
                            (test_rope, len(ROPES), ROPES[3], *LINEAR, LINEAR_WAYS), (test_new, 'Qwen2', ['--attention-bias', 'qkv']),
                            (test_new, 'Llama', ['--attention-bias', 'qkvo', '--untied']),
                            (test_packed, 'Llama', {'tie_word_embeddings': False}, WAYS),
                            (test_model, *LINEAR, LINEAR_WAYS), (test_packed, *LINEAR, LINEAR_WAYS), (test_whole,), (test_long,),
                            (test_adapter, 'Llama', {'tie_word_embeddings': True}, ('q_proj', 'o_proj'), WAYS[1::2]),
                            *latent_cases(),
                            (test_new, 'Llama', ['--rope-type', 'yarn', '--rope-factor', '4', '--rope-original', '16']),
                            (test_new, 'Llama', ['--rope-type', 'dynamic', '--rope-factor', '4', '--rope-original', '16']),
                            (test_new, 'Qwen3', ['--attention-bias', 'qkvo', '--qk-norm']), (test_new, 'Mistral', ['--window', '9'])]:
            run_test(test, *case, ids, folder)
    return end(f'transformers {transformers.__version__}, torch {torch.__version__}')


if __name__ == '__main__':
    sys.exit(main())

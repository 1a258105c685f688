#!/usr/bin/env python3
"""test_families.py LIBRARY TOP -- each family of models that upipe_transformers.py lists, against transformers' own attention

Random models with each kind of layer that a family has, on teams of one, two and four processes: logits, loss and the
gradient of every parameter, of two sequences and of packed documents, which are held to each document alone. The list is the
table's. What is refused: of every family of transformers, small, whether it is listed or refused; what mixes tokens; heads;
routers' losses. Models of families that are not listed compare themselves. Where no Python here has both packages the test is
left out (status 77).
"""

import copy
import functools
import itertools
import os
import re
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), 'lib'))
from checks import check, end, equal, read, run_test  # pylint: disable=wrong-import-position
from ranks import LIBRARY, VERSIONS, launch, refused  # pylint: disable=wrong-import-position
import torch  # pylint: disable=wrong-import-position
import transformers  # pylint: disable=wrong-import-position
from torch import distributed  # pylint: disable=wrong-import-position
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # pylint: disable=wrong-import-position
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # pylint: disable=wrong-import-position
from upipe_team import Team, team_from_env  # pylint: disable=wrong-import-position
from upipe_transformers import LISTED, check_kind, register, shard  # pylint: disable=wrong-import-position

TOKENS, RANKS = 37, 4
DOCUMENTS = [5, 1, 20, 11]
# Options of those families that have them, small.
SMALL = {'vocab_size': 97, 'hidden_size': 64, 'intermediate_size': 48, 'num_hidden_layers': 2, 'num_attention_heads': 2,
         'num_key_value_heads': 1, 'head_dim': 32, 'max_position_embeddings': 64, 'n_embd': 64, 'n_layer': 2, 'n_head': 2,
         'n_positions': 64, 'num_experts': 4, 'n_routed_experts': 4, 'num_local_experts': 4, 'num_experts_per_tok': 2,
         'moe_intermediate_size': 32, 'pad_token_id': 0, 'bos_token_id': 1, 'eos_token_id': 2, 'attention_dropout': 0.0,
         'residual_dropout': 0.0, 'resid_pdrop': 0.0, 'embd_pdrop': 0.0, 'attn_pdrop': 0.0, 'dropout': 0.0,
         'hidden_dropout_prob': 0.0, 'attention_probs_dropout_prob': 0.0}
WINDOW = {'sliding_window': 9}  # shorter than a document
MIXED = {**WINDOW, 'layer_types': ['sliding_attention', 'full_attention']}
GRANITE = {'attention_multiplier': 0.2, 'embedding_multiplier': 2.0, 'logits_scaling': 3.0, 'residual_multiplier': 0.5}
# Model types with options of layers of each kind. Two layers: of windows and experts the first has the one, the second the other.
FAMILIES = [
    ('afmoe', {**MIXED, 'num_dense_layers': 1}),
    ('apertus', {}),
    ('arcee', {}),
    ('aria_text', {}),
    ('bitnet', {}),
    ('codegen', {'rotary_dim': 16}),
    ('cohere', {'use_qk_norm': True}),
    ('cohere2', MIXED),
    ('cohere2_moe', {**MIXED, 'mlp_layer_types': ['dense', 'sparse'], 'prefix_dense_intermediate_size': 48}),
    ('cwm', MIXED),
    ('dory', {**MIXED, 'initializer_range': 1.0}),
    ('dots1', {**MIXED, 'n_shared_experts': 1, 'first_k_dense_replace': 1, 'n_routed_experts': 4, 'num_experts_per_tok': 2}),
    ('ernie4_5', {}),
    ('ernie4_5_moe', {'moe_num_experts': 4, 'moe_k': 2, 'moe_layer_start_index': 1, 'moe_layer_end_index': 1}),
    ('exaone', {}),
    ('exaone4', MIXED),
    ('exaone_moe', {**MIXED, 'mlp_layer_types': ['dense', 'sparse']}),
    ('flex_olmo', {}),
    ('gemma', {}),
    ('gemma2', {**MIXED, 'query_pre_attn_scalar': 32, 'attn_logit_softcapping': 5.0, 'final_logit_softcapping': 3.0}),
    ('gemma3_text', {**MIXED, 'query_pre_attn_scalar': 32, 'attn_logit_softcapping': 5.0}),
    ('glm', {}),
    ('glm4', {}),
    ('glm4_moe', {'first_k_dense_replace': 1, 'use_qk_norm': True}),
    ('gpt2', {'scale_attn_by_inverse_layer_idx': True}),
    ('gpt_bigcode', {}),
    ('gpt_neox', {}),
    ('gpt_neox', {'use_parallel_residual': False}),
    ('gpt_oss', MIXED),
    ('gptj', {'rotary_dim': 16}),
    ('granite', GRANITE),
    ('granitemoe', GRANITE),
    ('granitemoeshared', {**GRANITE, 'shared_intermediate_size': 32}),
    ('helium', {}),
    ('hrm_text', {}),
    ('hunyuan_v1_dense', {'head_dim': 32}),
    ('hunyuan_v1_moe', {'head_dim': 32, 'num_experts': 4, 'moe_topk': 2}),
    ('hy_v3', {'first_k_dense_replace': 1}),
    ('hyperclovax', {}),
    ('internlm3', {}),
    ('iquestcoder', {}),
    ('jais2', {}),
    ('jetmoe', {'kv_channels': 32}),
    ('kolibri1', {**MIXED, 'shared_expert_intermediate_size': 32}),
    ('laguna', {**MIXED, 'shared_expert_intermediate_size': 32, 'mlp_layer_types': ['dense', 'sparse']}),
    ('llama', {}),
    ('mellum', {**MIXED, 'mlp_layer_types': ['dense', 'sparse']}),
    ('minimax_m2', {}),
    ('ministral', {**MIXED, 'head_dim': 32}),
    ('ministral3', WINDOW),
    ('mistral', WINDOW),
    ('mixtral', WINDOW),
    ('modernbert-decoder', {'local_attention': 18, 'layer_types': MIXED['layer_types']}),
    ('nanochat', {}),
    ('olmo', {'clip_qkv': 1.0}),
    ('olmo2', {}),
    ('olmo3', MIXED),
    ('olmoe', {'clip_qkv': 0.9}),
    # Without rotation the gradient of the keys' bias is zero but for rounding.
    ('opt', {'word_embed_proj_dim': 64, 'ffn_dim': 48, 'enable_bias': False}),
    ('phi', {'qk_layernorm': True}),
    ('phi3', WINDOW),
    ('qwen2', {**WINDOW, 'use_sliding_window': True, 'max_window_layers': 1}),
    ('qwen3', {**WINDOW, 'use_sliding_window': True, 'max_window_layers': 1}),
    ('qwen3_moe', {**WINDOW, 'use_sliding_window': True, 'mlp_only_layers': [0]}),
    ('sarvam_moe', {'first_k_dense_replace': 1}),
    ('seed_oss', {}),
    ('smollm3', {**MIXED, 'use_sliding_window': True, 'no_rope_layers': [1, 0]}),
    ('solar_open', {}),
    ('starcoder2', WINDOW),
    ('vaultgemma', {**MIXED, 'query_pre_attn_scalar': 32, 'attn_logit_softcapping': 5.0}),
]
# Families with what mixes tokens and is no attention; and how they are refused.
MIXING = [('lfm2', {'layer_types': ['conv', 'full_attention']},
           'Lfm2ForCausalLM is not served: model.layers.0.conv.conv, a Conv1d of Lfm2ShortConv, mixes'),
          ('falcon_h1', {'mamba_d_ssm': 64, 'mamba_n_heads': 2}, 'model.layers.0.mamba.conv1d, a Conv1d of FalconH1Mixer, mixes'),
          ('qwen3_next', {'layer_types': ['linear_attention', 'full_attention']},
           'model.layers.0.linear_attn, a Qwen3NextGatedDeltaNet of'),
          ('minimax', {'layer_types': ['linear_attention', 'full_attention']}, 'model.layers.0.self_attn, a MiniMaxLightningAttention of'),
          ('mamba', {}, 'backbone, a MambaModel of MambaForCausalLM, mixes'),
          ('rwkv', {'attention_hidden_size': 64}, 'rwkv, a RwkvModel of RwkvForCausalLM, mixes')]
QWEN2_MOE = {'shared_expert_intermediate_size': 32, 'sliding_window': 25}

def make_model(family, more, kind=None):
    """Random, and so wide that a token shows in the others' results."""
    config = CONFIG_MAPPING[family]()
    small = {name: value for name, value in SMALL.items() if name.endswith('token_id') or getattr(config, name, None) is not None}
    config = CONFIG_MAPPING[family](**{**small, **more}, attn_implementation='eager')
    torch.manual_seed(3)
    model = getattr(transformers, kind or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family])(config)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.1 + (p if p.dim() < 2 else 0))
    return model


def draw_rows(packed):
    """Two rows, or one of documents, and their lengths. No document foretells the next one."""
    ids, labels = draw_ids(1 if packed else 2)
    lengths = DOCUMENTS if packed else [TOKENS]
    for border in itertools.accumulate(lengths[:-1]):
        labels[:, border] = -100
    return ids, labels, lengths


def draw_ids(batch):
    ids = torch.randint(3, 97, (batch, TOKENS), generator=torch.Generator().manual_seed(batch))
    labels = ids.clone()
    labels[:, :3] = -100
    return ids, labels


def gradients(model):
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


def plain_results(model, ids, labels, lengths):
    """Logits, loss and gradients with transformers' attention, of each document alone."""
    model.set_attn_implementation('eager')
    model.zero_grad()
    logits, total, targets = [], 0, (labels[:, 1:] != -100).sum()
    for part, target in zip(ids.split(lengths, 1), labels.split(lengths, 1)):
        out = model(input_ids=part, use_cache=False)
        logits.append(out.logits.detach())
        total += torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), target[:, 1:].flatten(), reduction='sum')
    (total / targets).backward()
    return torch.cat(logits, 1), (total / targets).detach(), gradients(model)


def own_results(team, model, ids, labels, lengths):
    model.set_attn_implementation('upipe')
    model.zero_grad()
    at = torch.cat([torch.arange(n) for n in lengths])[None]
    own = model(**shard(team, ids, labels, at))
    own.loss.backward()
    team.sum_gradients(model)
    return team.gather(own.logits), team.sum(own.loss), gradients(model)


@functools.cache
def wanted(row, packed):
    """Of the plain model, the same on teams of each size: results, and those in f64."""
    model, (ids, labels, lengths) = make_model(*FAMILIES[row]), draw_rows(packed)
    exact = copy.deepcopy(model).double()
    exact.config._experts_implementation = 'eager'  # grouped products are of narrower types alone  # pylint: disable=protected-access
    return plain_results(model, ids, labels, lengths), plain_results(exact, ids, labels, lengths)


def near(what, got, plain, exact):
    """To 2e-6 of the largest, or to three times the error of the plain model, which for a sum of terms that cancel may be more."""
    most, off, rounded = exact.abs().max().item(), (got - exact).abs().max().item(), (plain - exact).abs().max().item()
    check(rounded <= 1e-4 * most, f'{what}: the plain model is off by {rounded:.3g} of {most:.3g}')
    check(off <= max(2e-6 * most, 3 * rounded), f'{what} is off by {off:.3g} of {most:.3g}, and the plain model by {rounded:.3g}')


def test_kinds():
    """Each kind of layer that a family has is in its row."""
    for family, more in FAMILIES:
        config = make_model(family, more).config
        for name, value in more.items():
            equal(getattr(config, name, None), value, f'{name} of {family}')
        for kinds in (getattr(config, name, None) for name in ('layer_types', 'mlp_layer_types')):
            check(not kinds or len(set(kinds)) == 2, f'{family} has {kinds} alone')
        equal(getattr(config, 'sliding_window', 9), 9, f'the window of {family}')


def test_family(team, row):
    family, more = FAMILIES[row]
    for packed in False, True:
        what = f'on {team.ranks} ranks{", packed" * packed}: {family}'
        plain, exact = wanted(row, packed)
        got = own_results(team, make_model(family, more), *draw_rows(packed))
        near(f'{what}: the logits', got[0], plain[0], exact[0])
        near(f'{what}: the loss', got[1], plain[1], exact[1])
        for name, gradient in exact[2].items():
            near(f'{what}: {name}', got[2][name], plain[2][name], gradient)


def test_sweep():
    """Each family that transformers has is listed, or refused."""
    equal(sorted(LISTED), sorted({family for family, _ in FAMILIES}), 'the list')
    page = read(os.path.join(sys.argv[2], 'docs', 'python.md')).decode().partition('Families (')[2].split('\n\n')[1]
    equal(re.findall('`(.*?)`', page), sorted(LISTED), 'the list of docs/python.md')
    tried = 0
    for family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            with torch.device('meta'):
                model = make_model(family, dict(FAMILIES).get(family, {}))
        except Exception:  # pylint: disable=broad-except
            check(family not in LISTED, f'{family} is listed')
            continue  # it takes more than these options
        tried += 1
        if model.config.model_type in LISTED:
            check_kind(model, False)
        else:
            refused(f'{type(model).__name__} is not served: ', lambda model=model: check_kind(model, False))
    check(tried >= 150, f'{tried} families are compared')
    print(f'{tried} families of transformers: {len(LISTED)} are listed, and the others refused')


def own_model(*row):
    model = make_model(*row)
    model.set_attn_implementation('upipe')
    return model


class Heir(transformers.LlamaForCausalLM):
    pass


class Changed(Heir):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


def test_refused(team):
    ids, labels = draw_ids(1)
    batch, bare = shard(team, ids, labels), shard(team, ids)
    for family, more, words in MIXING:
        for allowed in False, True:
            register(team, allow_unlisted=allowed)
            refused(words, lambda model=own_model(family, more): model(**batch))
    register(team)
    refused('LlamaForCausalLM has called no attention of register(): its attn_implementation is eager',
            lambda: make_model('llama', {})(**batch))
    refused("StableLmForCausalLM is not served: stablelm is not among the families that were compared with transformers' own attention; "
            'register(team, allow_unlisted=True)', lambda: own_model('stablelm', {})(**batch))
    for head, given in (('SequenceClassification', bare), ('TokenClassification', batch)):
        refused(f'LlamaFor{head} is not served: of llama, LlamaForCausalLM and LlamaModel of transformers are',
                lambda head=head, given=given: own_model('llama', {}, f'LlamaFor{head}')(**given))
    heir, changed = own_model('llama', {}), own_model('llama', {})
    heir.__class__, changed.__class__ = Heir, Changed
    heir(**batch)
    refused('Changed is not served: of llama, LlamaForCausalLM', lambda: changed(**batch))
    mixtral = own_model('mixtral', {})
    refused("routers' auxiliary loss", lambda: mixtral(**batch, output_router_logits=True))
    mixtral.config.output_router_logits = True
    refused("routers' auxiliary loss", lambda: mixtral(**batch))
    mixtral(**batch, output_router_logits=False)


def test_bare(team):
    """Without a head: what the model ends with."""
    model, ids = make_model('llama', {}, 'LlamaModel'), draw_ids(2)[0]
    plain = model(ids, use_cache=False).last_hidden_state.detach()
    model.set_attn_implementation('upipe')
    near('LlamaModel', team.gather(model(**shard(team, ids)).last_hidden_state), plain, plain)


class Shift(torch.nn.Module):
    """Each token sees the one before it."""

    def forward(self, x):
        return x + torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]


class Mean(torch.nn.Module):
    """Each token sees the mean of those before it."""

    def forward(self, x):
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]


def toy(mixer=None, kind=None):
    """Of a family that nobody has compared."""
    model = own_model('llama', {}, kind)
    model.config.model_type = 'toy'
    if mixer:
        layer = (model if kind else model.model).layers[1]
        layer.mlp = torch.nn.Sequential(mixer, layer.mlp)
    return model


def compiled(model):
    """PyTorch 2.6 compiles no model of transformers 5.24 at all."""
    return model if torch.__version__ < '2.7' else torch.compile(model, backend='aot_eager', fullgraph=True)


def test_unlisted(team):
    register(team, allow_unlisted=True)
    ids, labels = draw_ids(1)
    batch, calls = shard(team, ids, labels), []
    model = toy()
    model.model.norm.eval()
    model.register_forward_hook(lambda *_: calls.append(0))
    model(**batch)
    equal(len(calls), 4, 'calls of a model that compares itself')
    equal((model.training, model.model.norm.training, model.config._attn_implementation),  # pylint: disable=protected-access
          (True, False, 'upipe'), 'what it is afterwards')
    model(**batch)
    equal(len(calls), 5, 'calls after its second call')
    toy(kind='LlamaModel')(**shard(team, ids))
    toy().bfloat16()(**batch)
    compiled(toy())(**batch)
    own_model('qwen2_moe', {**QWEN2_MOE, 'use_sliding_window': False})(**batch)
    for mixer in Shift(), Mean():
        model = toy(mixer)
        for words in ('LlamaForCausalLM is not served: its results on 4 ranks and on one differ by ',
                      ' of the largest, from token 7 of 28 on'):
            refused(words, lambda model=model: model(**batch))  # and stays so
        refused('its results on 4 ranks', lambda mixer=mixer: toy(mixer, 'LlamaModel')(**shard(team, ids)))
        refused('its results on 4 ranks', lambda mixer=mixer: toy(mixer).bfloat16()(**batch))
        refused('its results on 4 ranks', lambda mixer=mixer: compiled(toy(mixer))(**batch))
    # Its layers have windows, of which they do not tell their attention.
    refused('from token 25 of 53 on', lambda: own_model('qwen2_moe', {**QWEN2_MOE, 'use_sliding_window': True})(**batch))
    pooled = toy()
    pooled.register_forward_hook(lambda *of: transformers.utils.ModelOutput({**of[-1], 'logits': of[-1].logits[:, -1:]}))
    refused('its results are not one a token', lambda: pooled(**batch))
    refused('its loss on 4 ranks is', lambda: own_model('llama', {'num_labels': 97}, 'LlamaForTokenClassification')(**batch))
    refused('BloomForCausalLM has called no attention of register(): its attn_implementation is eager',
            lambda: own_model('bloom', {})(**batch))


def rank_main():
    torch.set_num_threads(1)  # of a pool that is this process's own, before the threads of a backward ask for it at once
    team = team_from_env(LIBRARY)
    register(team)
    for size in (1, 2, 4):
        made = [distributed.new_group(list(range(first, first + size))) for first in range(0, RANKS, size)]
        own = Team(LIBRARY, made[team.rank // size])
        register(own)
        for row in range(team.rank // size, len(FAMILIES), RANKS // size):
            test_family(own, row)
        own.close()
    test_refused(team)
    test_bare(team)
    test_unlisted(team)
    team.close()
    distributed.barrier()
    distributed.destroy_process_group()
    return end(f'rank {team.rank}')


def main():
    equal(launch(RANKS, rank_main), dict.fromkeys(range(RANKS), 0), 'what the ranks return')
    run_test(test_kinds)
    run_test(test_sweep)
    return end(VERSIONS)


if __name__ == '__main__':
    sys.exit(main())

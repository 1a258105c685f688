#!/usr/bin/env python3
"""test_torchrun.py LIBRARY TOP -- models of Hugging Face's transformers on a part of every sequence, against the same models

Processes that torchrun's launcher starts, forked from this one, which has PyTorch already. Random Llama, Qwen3 and Mistral
with windows, on teams of one to four: logits, loss and the gradient of every parameter, of whole sequences and of packed
documents. Qwen3, of which one layer has a window and one has none, compiled on two. What is refused, on every rank and at
once. Of every family of transformers, small: whether what mixes tokens beside its attention is refused. Where no Python here
has both packages the test is left out (status 77).
"""

import copy
import os
import socket
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), 'lib'))
from checks import check, end, equal, other_python, run_test, write  # pylint: disable=wrong-import-position
from pytorch import pythons  # pylint: disable=wrong-import-position

os.environ |= {'TRANSFORMERS_OFFLINE': '1', 'HF_HUB_OFFLINE': '1', 'OMP_NUM_THREADS': '1', 'TRANSFORMERS_VERBOSITY': 'critical'}
try:
    import torch
    import transformers
    from torch import distributed
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch
    if int(transformers.__version__.split('.', maxsplit=1)[0]) < 5:
        raise ImportError('rope_parameters came with 5')
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
except ImportError:
    other_python(*pythons(sys.argv[2]))
    print('left out: transformers, as no Python here has version 5 of it and PyTorch')
    sys.exit(77)

LIBRARY = os.path.abspath(sys.argv[1])
sys.path.insert(0, os.path.join(sys.argv[2], 'examples', 'bindings', 'python'))
from upipe_team import PROOF, Door, Team, read_secret, team_from_env  # pylint: disable=wrong-import-position
from upipe_transformers import mixers, register, shard  # pylint: disable=wrong-import-position

TOKENS, RANKS = 37, 4
MODELS = [('Llama', {}), ('Qwen3', {'use_sliding_window': True, 'sliding_window': 9, 'max_window_layers': 1}),
          ('Mistral', {'sliding_window': 9})]
DOCUMENTS = torch.cat([torch.arange(n) for n in (5, 1, 20, 11)])[None]
# Which ranks are a team at the same time.
TEAMS = [[[0, 1, 2, 3]], [[0, 1, 2], [3]], [[0, 1], [2, 3]]]


def make_model(name, more, **config):
    torch.manual_seed(3)
    config = getattr(transformers, name + 'Config')(
        vocab_size=97, hidden_size=64, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, attn_implementation='eager', **more, **config)
    return getattr(transformers, name + 'ForCausalLM')(config)


def draw_ids(batch):
    ids = torch.randint(0, 97, (batch, TOKENS), generator=torch.Generator().manual_seed(batch))
    labels = ids.clone()
    labels[:, :3] = -100
    return ids, labels


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


def same(what, got, want, limit=2e-6):
    off = (got - want).abs().max().item() / want.abs().max().item()
    check(off <= limit, f'{what} is off by {off:.3g} of the largest')


def test_model(team, name, more, position_ids, backend=None):
    what = f'{name} on {team.ranks} ranks{", packed" if position_ids is not None else ""}{f", {backend}" if backend else ""}'
    model, (ids, labels) = make_model(name, more), draw_ids(2 if position_ids is None else 1)
    plain = model(input_ids=ids, labels=labels, position_ids=position_ids, use_cache=False)
    want = gradients(model, plain.loss)
    model.set_attn_implementation('upipe')
    run = torch.compile(model, backend=backend, fullgraph=True) if backend else model
    own = run(**shard(team, ids, labels, position_ids))
    got = gradients(model, own.loss)
    team.sum_gradients(model)
    same(f'{what}: the loss', team.sum(own.loss), plain.loss.detach())
    same(f'{what}: the logits', team.gather(own.logits), plain.logits.detach())
    equal(sorted(got), sorted(want), f'{what}: names')
    for one, gradient in want.items():
        same(f'{what}: {one}', got[one], gradient)


def test_narrow(team, name, more, autocast):
    """bf16, and f32 under autocast: as far from f64 as the model without this attention, or up to three times."""
    model, (ids, labels) = make_model(name, more), draw_ids(2)
    model = model if autocast else model.bfloat16()
    exact = copy.deepcopy(model).double()
    want = gradients(exact, exact(input_ids=ids, labels=labels, use_cache=False).loss)
    with torch.autocast('cpu', torch.bfloat16, enabled=autocast):
        rounded = gradients(model, model(input_ids=ids, labels=labels, use_cache=False).loss)
        model.set_attn_implementation('upipe')
        got = gradients(model, model(**shard(team, ids, labels)).loss)
    team.sum_gradients(model)
    for one, true in want.items():
        off, plain = ((t - true).abs().max().item() for t in (got[one], rounded[one]))
        check(off <= 3 * plain, f'{name}, {"autocast" if autocast else "bf16"}: {one} is off by {off:.3g}, without by {plain:.3g}')


def refused(words, body):
    began = time.monotonic()
    try:
        body()
    except RuntimeError as error:
        check(words in str(error), f'"{error}" does not say "{words}"')
        check(time.monotonic() - began < 5, f'"{words}" takes {time.monotonic() - began:.1f} s')
    else:
        check(False, f'not refused: "{words}"')


def test_refused(team):
    model, (ids, labels) = make_model('Llama', {}, attention_dropout=0.5).eval(), draw_ids(1)
    model.set_attn_implementation('upipe')
    batch = shard(team, ids, labels, attention_mask=torch.ones_like(ids))
    padded = torch.ones_like(ids)
    padded[0, 0] = 0
    refused('padding is not served', lambda: shard(team, ids, attention_mask=padded))
    refused('3 tokens for 4 ranks', lambda: shard(team, ids[:, :3]))
    refused('0, 1, 2 ... of each document', lambda: shard(team, ids, position_ids=DOCUMENTS + 1))
    refused('in a batch of 2', lambda: shard(team, ids.repeat(2, 1), position_ids=DOCUMENTS))
    refused('attention_mask is not served', lambda: model(**batch, attention_mask=torch.ones_like(batch['input_ids'])))
    refused('use_cache is not served', lambda: model(**{**batch, 'use_cache': True}))
    refused('generate() is not served', lambda: model.generate(ids, max_new_tokens=2))
    refused('without what shard() returns', lambda: model(ids, use_cache=False))
    forgotten = {name: value for name, value in batch.items() if name != 'position_ids'}
    refused('not those that shard() returns, or are missing', lambda: model(**forgotten))
    refused('dropout 0.5 is not served', lambda: model.train()(**batch))
    stretched = make_model('Llama', {}, max_position_embeddings=64, rope_parameters={'rope_type': 'dynamic', 'factor': 2.0, 'rope_theta': 1e4})
    stretched.set_attn_implementation('upipe')
    refused('rope_type dynamic', lambda: stretched(**batch))
    test_mixing(batch)
    refused('torch.float16, which is not served', lambda: model.eval().half()(**batch))
    t, own = torch.zeros(1, 10, 2, 32), Team(LIBRARY)
    refused('window is 0 on rank 0 and 1 on rank 3', lambda: own.attention(t, t, t, tokens=40, window=int(team.rank == 3)))
    refused('window is 0 on rank 0 and 1 on rank 3', lambda: own.attention(t, t, t, tokens=40))
    own.close()


# Families with what mixes tokens and is no attention, or with attention of their own; and how they are refused.
MIXING = [('Lfm2', {'layer_types': ['conv', 'full_attention']}, 'Lfm2Model is not served: layers.0.conv.conv, a Conv1d of Lfm2ShortConv, mixes'),
          ('FalconH1', {'mamba_d_ssm': 64, 'mamba_n_heads': 4}, 'layers.0.mamba.conv1d, a Conv1d of FalconH1Mixer, mixes'),
          ('Qwen3Next', {'layer_types': ['linear_attention', 'full_attention']}, 'layers.0.linear_attn, a Qwen3NextGatedDeltaNet of'),
          ('MiniMax', {'layer_types': ['linear_attention', 'full_attention']}, 'layers.0.self_attn, a MiniMaxLightningAttention of'),
          ('Mamba', {}, 'backbone, a MambaModel of MambaForCausalLM, mixes'),
          ('Rwkv', {'attention_hidden_size': 64}, 'rwkv, a RwkvModel of RwkvForCausalLM, mixes'),
          ('Bloom', {}, 'BloomForCausalLM has called no attention of register(): its attn_implementation is eager')]


def test_mixing(batch):
    for name, more, words in MIXING:
        model = make_model(name, more)
        model.set_attn_implementation('upipe')
        refused(words, lambda model=model: model(**batch))
    refused('attn_implementation is eager', lambda: make_model('Llama', {})(**batch))


SMALL = {'vocab_size': 97, 'hidden_size': 64, 'intermediate_size': 64, 'num_hidden_layers': 4, 'num_attention_heads': 4,
         'num_key_value_heads': 2, 'head_dim': 16, 'max_position_embeddings': 64, 'n_embd': 64, 'n_layer': 4, 'n_head': 4,
         'num_experts': 4, 'n_routed_experts': 4, 'num_local_experts': 4, 'num_experts_per_tok': 2, 'moe_intermediate_size': 32}


def small_model(kind):
    config = kind.config_class()
    config = kind.config_class(**{name: value for name, value in SMALL.items() if hasattr(config, name)})
    with torch.device('meta'):
        if sum(p.numel() for p in kind(config).parameters()) > 3e7:
            raise ValueError('not small')
    torch.manual_seed(0)
    model = kind(config).eval()
    for p in model.parameters():
        if p.dim() > 1:
            torch.nn.init.normal_(p, 0, 0.1)
    return model


def test_families():
    """Each family that transformers has: if a token's result depends on another one's where attention sees its own alone, it is
    refused."""
    calls = []

    def own_token(module, query, key, value, *_, **more):
        calls.append(module)
        groups = query.shape[1] // key.shape[1]
        seen = torch.sigmoid((query * key.repeat_interleave(groups, 1)).mean(3, keepdim=True))
        return (value.repeat_interleave(groups, 1) * seen).transpose(1, 2), None

    transformers.AttentionInterface.register('own_token', own_token)
    transformers.AttentionMaskInterface.register('own_token', lambda *_, **more: None)
    tried = 0
    for family, name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()):
        ids = torch.arange(1, 13)[None]
        calls.clear()
        try:
            model = small_model(getattr(transformers, name))
            model.config._attn_implementation = 'own_token'  # pylint: disable=protected-access
            with torch.no_grad():
                one, other = (model(input_ids=torch.where(ids == 4, token, ids), use_cache=False).logits for token in (4, 50))
        except Exception:  # pylint: disable=broad-except
            continue  # it takes more than these options
        tried += 1
        off = (one - other).abs().amax(2)[0] / one.abs().max()
        parts = [part for part in model.modules() if isinstance(part, transformers.PreTrainedModel)]
        foreign = [what for part in parts for what in mixers(part)]
        check(foreign or not calls or all(off[at] < 1e-5 for at in range(len(off)) if at != 3), f'{family} mixes tokens, and is not refused')
    check(tried >= 100, f'{tried} families are compared')
    print(f'{tried} families of transformers: what mixes tokens is refused')


def test_secret(folder):
    path = os.path.join(folder, 'secret')
    write(path, 'a secret of 24 bytes....\n')
    for variables, words in (({'UPIPE_SECRET': 'short'}, 'has 5 bytes'), ({'UPIPE_SECRET': 'x' * 16, 'UPIPE_SECRET_FILE': path}, 'both set'),
                             ({'UPIPE_SECRET_FILE': path}, 'chmod 600'), ({'UPIPE_SECRET_FILE': path + '2'}, 'No such file')):
        os.environ.update(variables)
        os.chmod(path, 0o644)
        refused(words, read_secret)
        for name in variables:
            del os.environ[name]


def with_strangers(connect):
    def connect_second(door, place, *more):
        with socket.create_connection(place) as stranger:
            stranger.sendall(b'hello' * PROOF)
        return connect(door, place, *more)
    return connect_second


def rank_main():
    team = team_from_env(LIBRARY)
    Door.connect = with_strangers(Door.connect)
    groups = [[distributed.new_group(ranks) for ranks in teams] for teams in TEAMS]
    for teams, made in zip(TEAMS, groups):
        mine = [group for ranks, group in zip(teams, made) if team.rank in ranks]
        own = Team(LIBRARY, mine[0])
        register(own)
        for name, more in MODELS:
            for position_ids in (None, DOCUMENTS):
                test_model(own, name, more, position_ids)
        own.close()
    if team.rank in TEAMS[-1][0]:
        own = Team(LIBRARY, mine[0])  # its handles, one a window, are opened while the model is traced
        register(own)
        for position_ids in (None, DOCUMENTS):
            test_model(own, *MODELS[1], position_ids, 'aot_eager')
        for autocast in False, True:
            test_narrow(own, *MODELS[1], autocast)
        own.close()
    distributed.barrier()
    refused('is not in its group', lambda: Team(LIBRARY, groups[-1][team.rank < 2]))
    register(team)
    test_refused(team)
    team.close()
    os.environ['UPIPE_SECRET'] += 'r' * (team.rank == 2)
    refused('rank 2 has another secret', lambda: Team(LIBRARY))
    distributed.destroy_process_group()
    return end(f'rank {team.rank}')


def main():
    torch.set_num_threads(1)
    run_test(test_families)
    with tempfile.TemporaryDirectory() as folder:
        run_test(test_secret, folder)
        os.environ['UPIPE_SECRET'] = 'what all ranks have'
        config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=RANKS, run_id='test', rdzv_backend='c10d',
                              rdzv_endpoint='localhost:0', start_method='fork', monitor_interval=0.1, max_restarts=0)
        statuses = elastic_launch(config, rank_main)()
        equal(statuses, dict.fromkeys(range(RANKS), 0), 'what the ranks return')
    return end(f'transformers {transformers.__version__}, torch {torch.__version__}')


if __name__ == '__main__':
    sys.exit(main())

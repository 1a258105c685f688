#!/usr/bin/env python3
"""test_torchrun.py LIBRARY TOP -- models of Hugging Face's transformers on a part of every sequence, against the same models

Processes with torchrun's variables, forked from this one, which has PyTorch already. Random Llama, Qwen3 and Mistral
with windows, on teams of one to four: logits, loss and the gradient of every parameter, of whole sequences and of packed
documents. Qwen3, of which one layer has a window and one has none, compiled on two. What is refused, on every rank and at
once. Where no Python here has both packages the test is left out (status 77).
"""

import copy
import os
import socket
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), 'lib'))
from checks import check, end, equal, run_test, write  # pylint: disable=wrong-import-position
from ranks import LIBRARY, VERSIONS, launch, refused  # pylint: disable=wrong-import-position
import torch  # pylint: disable=wrong-import-position
import transformers  # pylint: disable=wrong-import-position
from torch import distributed  # pylint: disable=wrong-import-position
from upipe_team import PROOF, Door, Team, read_secret, team_from_env  # pylint: disable=wrong-import-position
from upipe_transformers import register, shard  # pylint: disable=wrong-import-position

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
    refused('torch.float16, which is not served', lambda: model.eval().half()(**batch))
    t, own = torch.zeros(1, 10, 2, 32), Team(LIBRARY)
    refused('window is 0 on rank 0 and 1 on rank 3', lambda: own.attention(t, t, t, tokens=40, window=int(team.rank == 3)))
    refused('window is 0 on rank 0 and 1 on rank 3', lambda: own.attention(t, t, t, tokens=40))
    own.close()


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
    torch.set_num_threads(1)
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
        own = Team(LIBRARY, mine[0])
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
    with tempfile.TemporaryDirectory() as folder:
        run_test(test_secret, folder)
        os.environ['UPIPE_SECRET'] = 'what all ranks have'
        equal(launch(RANKS, rank_main), dict.fromkeys(range(RANKS), 0), 'what the ranks return')
    return end(VERSIONS)


if __name__ == '__main__':
    sys.exit(main())

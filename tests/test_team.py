#!/usr/bin/env python3
"""test_team.py LIBRARY TOP -- calls of a team of processes, one after another on the same sockets, against double precision

Four ranks draw the same calls: type, batch, lengths, heads, packed sequences, window, soft-cap, sinks, scale, chunk, under
torch.compile and checkpoints; each in two lengths. Then many lengths, each once, with as many descriptors and as much memory
at the end as in the beginning. Where no Python here has the PyTorch that it needs the test is left out (status 77).
"""

import os
import random
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), 'lib'))
from bindings import dense, draw_call, sees  # pylint: disable=wrong-import-position
from checks import check, draws, end, equal  # pylint: disable=wrong-import-position
from ranks import LIBRARY, VERSIONS, launch  # pylint: disable=wrong-import-position
import torch  # pylint: disable=wrong-import-position
from torch import distributed  # pylint: disable=wrong-import-position
from torch.utils.checkpoint import checkpoint  # pylint: disable=wrong-import-position
from upipe_team import team_from_env  # pylint: disable=wrong-import-position
from upipe_torch import DTYPES  # pylint: disable=wrong-import-position

RANKS = 4
BACKENDS = [None] * 6 + ['eager', 'eager', 'aot_eager', 'aot_eager', 'inductor']


def gradients(tensors, dout, body):
    """O and the gradients of copies of these tensors."""
    leaves = [t.clone().requires_grad_(True) for t in tensors]
    o = body(*leaves)
    o.backward(dout)
    return [o.detach(), *(t.grad for t in leaves)]


def draw_inputs(desc, borders, seed, with_sinks):
    """Q, K, V and perhaps sinks, dO, and who sees whom; the same on every rank."""
    numbers = torch.Generator().manual_seed(seed)
    shapes = [(desc['batch'], desc['tokens'], desc[heads], desc['head_dim']) for heads in ('heads', 'kv_heads', 'kv_heads', 'heads')]
    *inputs, dout = [torch.randn(shape, generator=numbers).to(DTYPES[desc['dtype']]) for shape in shapes]
    inputs += [torch.randn(desc['heads'], generator=numbers)] * with_sinks
    tokens = range(desc['tokens'])
    mask = torch.tensor([[[sees(desc, borders, b, i, j) for j in tokens] for i in tokens] for b in range(desc['batch'])])
    return inputs, dout, mask


def one_draw(team, seed):
    draw = random.Random(seed)
    desc, borders = draw_call(draw)
    desc['heads'] = desc['kv_heads'] * max(desc['heads'] // desc['kv_heads'], -(-team.ranks // desc['kv_heads']))
    desc['chunk'] = draw.choice((0, team.ranks, desc['heads'])) if desc['heads'] % team.ranks == 0 else 0
    with_sinks, backend, reentrant = draw.randint(0, 1), draw.choice(BACKENDS), draw.choice((None, None, True, False))
    said = {name: desc[name] for name in ('window', 'softcap', 'scale', 'chunk')} | {'causal': bool(desc['causal'])}

    def call(q, k, v, sinks, packed, tokens):
        return team.attention(q, k, v, tokens=tokens, cu_seqlens=packed, sinks=sinks, **said)

    def attend(q, k, v, sinks, packed, tokens):
        return call(q, k, v, sinks, packed, tokens) if reentrant is None else checkpoint(
            call, q, k, v, sinks, packed, tokens, use_reentrant=reentrant)

    torch.compiler.reset()
    body = torch.compile(attend, backend=backend, fullgraph=not reentrant) if backend else attend
    for more in 0, draw.randint(1, 9):
        desc['tokens'] += more
        if more:
            borders = []
        inputs, dout, mask = draw_inputs(desc, borders, seed, with_sinks)
        exact, rounded = (gradients([t.to(dtype) for t in inputs], dout.to(dtype),
                                    lambda q, k, v, s=None: dense(q, k, v, s, desc, mask))  # pylint: disable=cell-var-from-loop
                          for dtype in (torch.float64, DTYPES[desc['dtype']]))
        first, count = team.rows(desc['tokens'])
        rows = slice(first, first + count)
        got = gradients([t[:, rows] for t in inputs[:3]] + inputs[3:], dout[:, rows],
                        lambda q, k, v, s=None: body(q, k, v, s, torch.tensor(borders) if borders else (), desc['tokens']))  # pylint: disable=cell-var-from-loop
        got[4:] = [team.sum(t) for t in got[4:]]
        for name, ours, theirs, true in zip(('o', 'dq', 'dk', 'dv', 'dsinks'), got, rounded, exact):
            theirs, true = (t if name == 'dsinks' else t[:, rows] for t in (theirs, true))
            off, limit = (ours - true).abs().max(), 3 * (theirs - true).abs().max() + 5e-6 * true.abs().max()
            check(bool(off <= limit), f'seed {seed}, {desc}, borders {borders}, {backend}, {reentrant}: {name} is off by {off:.3g} of {limit:.3g}')


def test_drawn(team):
    """All ranks take as many: those for which rank 0 has time."""
    seeds = draws(10)
    while True:
        seed = torch.tensor(next(seeds, -1) if team.rank == 0 else 0)
        distributed.broadcast(seed, 0)
        if seed < 0:
            break
        one_draw(team, int(seed))


def held():
    """Descriptors, and KiB of this process."""
    with open('/proc/self/statm', encoding='utf-8') as file:
        return len(os.listdir('/proc/self/fd')), int(file.read().split()[1]) * os.sysconf('SC_PAGE_SIZE') // 1024


def test_lengths(team):
    """Each length once, the longest first, which has the largest slab."""
    many, before = 10000 if os.environ.get('UPIPE_DRAWS') else 600, None
    for n in range(many):
        tokens = RANKS + many - n
        q, k = (torch.ones(1, team.rows(tokens)[1], heads, 32, requires_grad=True) for heads in (4, 2))
        team.attention(q, k, k, tokens=tokens, causal=True, window=64).sum().backward()
        if n == many // 10:
            before, slab = held(), team.u.bytes(team.rank)
    descriptors, size = held()
    equal(descriptors, before[0], f'descriptors after {many} lengths')
    equal(team.u.bytes(team.rank), slab, f'bytes of the slab after {many} lengths')
    check(size <= before[1] + 400, f'{many} lengths take {size - before[1]} KiB')


def rank_main():
    torch.set_num_threads(1)
    team = team_from_env(LIBRARY)
    test_drawn(team)
    test_lengths(team)
    team.close()
    distributed.destroy_process_group()
    return end(f'rank {team.rank}')


def main():
    with tempfile.TemporaryDirectory() as cache:
        os.environ['TORCHINDUCTOR_CACHE_DIR'] = cache
        equal(launch(RANKS, rank_main), dict.fromkeys(range(RANKS), 0), 'what the ranks return')
    return end(VERSIONS)


if __name__ == '__main__':
    sys.exit(main())

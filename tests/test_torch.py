#!/usr/bin/env python3
"""test_torch.py LIBRARY TOP [LIBRARY_MPI MPIRUN] -- examples/bindings/python/upipe_torch.py against PyTorch's own attention in double precision

O and the gradients of Q, K, V on one to four ranks, and with options drawn at random; a network of two layers with fused
projections, whose gradients of weights are summed over the ranks; layers under torch.utils.checkpoint; bf16, packed sequences,
autocast; what is refused; PyTorch's own check of the operators, and compiled attention with the bits of eager one; a team of
mpirun's processes; which PyTorch is refused. An error may be three times that of PyTorch in the same type. Where no Python here
has one that is taken the test is left out (status 77).
"""

import copy
import importlib
import os
import random
import sys
import tempfile
import threading
import time
import warnings
from unittest import mock

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), 'lib'))
from bindings import dense, draw_call, sees, wrong_borders  # pylint: disable=wrong-import-position
from checks import check, draws, end, equal, other_python, run_test  # pylint: disable=wrong-import-position
from launch import Mpi, free_port, run_ranks  # pylint: disable=wrong-import-position
from pytorch import pythons  # pylint: disable=wrong-import-position

LIBRARY = os.path.abspath(sys.argv[1])
sys.path.insert(0, os.path.join(sys.argv[2], 'examples', 'bindings', 'python'))
from upipe_abi import Attention, Error  # pylint: disable=wrong-import-position

try:
    import torch
    import upipe_torch
except (ImportError, Error):
    other_python(*pythons(sys.argv[2]))
    print('left out: PyTorch, of which no Python here has a version that upipe_torch takes')
    sys.exit(77)

from torch.utils.checkpoint import checkpoint  # pylint: disable=wrong-import-position
import upipe_team  # pylint: disable=wrong-import-position
from upipe_torch import attention  # pylint: disable=wrong-import-position

TOKENS, DIM = 37, 32


def reference(q, k, v, causal):
    """PyTorch's own, of [batch][tokens][heads][dim]."""
    groups = q.shape[2] // k.shape[2]
    q, k, v = (t.transpose(1, 2) for t in (q, k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


def compare(what, names, got, rounded, exact, least=1e-7):
    for name, ours, theirs, true in zip(names, got, rounded, exact):
        off, limit = (ours - true).abs().max(), 3 * (theirs - true).abs().max() + least * true.abs().max()
        check(bool(off <= limit), f'{what}: {name} is off by {off:.3g}, PyTorch by {(theirs - true).abs().max():.3g}')


def own_gradients(tensors, dout, body):
    """O and the gradients of copies of these tensors."""
    leaves = [t.clone().requires_grad_(True) for t in tensors]
    o = body(*leaves)
    o.backward(dout)
    return [o.detach(), *(t.grad for t in leaves)]


def test_tensors(ranks, chunk, heads, kv_heads, causal, batch):
    torch.manual_seed(ranks + heads)
    shapes = [(batch, TOKENS, h, DIM) for h in (heads, kv_heads, kv_heads, heads)]
    *inputs, dout = [torch.randn(shape) for shape in shapes]
    exact = own_gradients([t.double() for t in inputs], dout.double(), lambda *t: reference(*t, causal))
    rounded = own_gradients(inputs, dout, lambda *t: reference(*t, causal))
    got = [torch.full_like(t, float('nan')) for t in (inputs[0], *inputs)]
    u = Attention(LIBRARY, tokens=TOKENS, ranks=ranks, heads=heads, kv_heads=kv_heads, head_dim=DIM, chunk=chunk,
                  causal=int(causal), batch=batch)

    def rank_main(rank):
        first, count = u.rows(rank)
        rows = slice(first, first + count)
        # slices of the batch: their steps are those of the whole sequence
        for whole, part in zip(got, own_gradients([t[:, rows] for t in inputs], dout[:, rows],
                                                  lambda *t: attention(u, rank, *t))):
            whole[:, rows] = part

    u.run(rank_main)
    u.close()
    compare(f'C {ranks} U {chunk} {heads}/{kv_heads} heads', ('o', 'dq', 'dk', 'dv'), got, rounded, exact)


class Network(torch.nn.Module):
    """Two layers of attention with a fused projection and biases; `attend` is one's own."""

    def __init__(self, heads, kv_heads):
        super().__init__()
        self.split = [heads, kv_heads, kv_heads]
        width = heads * DIM
        self.qkv = torch.nn.ModuleList(torch.nn.Linear(width, sum(self.split) * DIM) for _ in range(2))
        self.out = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(2))

    def forward(self, x, attend):
        for qkv, out in zip(self.qkv, self.out):
            q, k, v = qkv(x).unflatten(2, (sum(self.split), DIM)).split(self.split, 2)
            x = x + out(attend(q, k, v).flatten(2))
        return x


def network_gradients(network, x, dout, attend):
    network.zero_grad()
    network(x, attend).backward(dout)
    return [p.grad for p in network.parameters()]


def test_network():
    torch.manual_seed(1)
    ranks, heads, kv_heads = 3, 6, 3
    network, x = Network(heads, kv_heads), torch.randn(2, TOKENS, heads * DIM)
    dout = torch.randn_like(x) / TOKENS
    exact = network_gradients(copy.deepcopy(network).double(), x.double(), dout.double(),
                              lambda *t: reference(*t, True))
    rounded = network_gradients(copy.deepcopy(network), x, dout, lambda *t: reference(*t, True))
    u = Attention(LIBRARY, tokens=TOKENS, batch=2, ranks=ranks, heads=heads, kv_heads=kv_heads, head_dim=DIM, causal=1)
    parts = [None] * ranks

    def rank_main(rank):
        first, count = u.rows(rank)
        rows = slice(first, first + count)
        with torch.no_grad():  # keeps nothing
            network(x[:, rows], lambda *t: attention(u, rank, *t))
        parts[rank] = network_gradients(copy.deepcopy(network), x[:, rows], dout[:, rows],
                                        lambda *t: attention(u, rank, *t))

    u.run(rank_main)
    u.close()
    names = [name for name, _ in network.named_parameters()]
    compare('network', names, [sum(p) for p in zip(*parts)], rounded, exact)


def test_checkpointed():
    """Three layers whose forwards are repeated: the bits of those that are kept. One layer of the handle does."""
    torch.manual_seed(2)
    x, found = torch.randn(1, TOKENS, 2, DIM), {}
    for reentrant in None, True, False:
        u = Attention(LIBRARY, tokens=TOKENS, ranks=2, heads=2, head_dim=DIM, causal=1)
        found[reentrant] = [None, None]

        def rank_main(rank):
            def layer(t):
                return torch.tanh(attention(u, rank, t, t * 0.5, t + 1))

            first, count = u.rows(rank)
            y = x[:, first:first + count].clone().requires_grad_(True)
            for _ in range(2):
                z, y.grad = y, None
                for _ in range(3):
                    z = layer(z) if reentrant is None else checkpoint(layer, z, use_reentrant=reentrant)
                z.square().sum().backward()
            found[reentrant][rank] = y.grad  # pylint: disable=cell-var-from-loop

        u.run(rank_main)
        u.close()
        for got, kept in zip(found[reentrant], found[None]):
            check(torch.equal(got, kept), f'checkpointed, reentrant {reentrant}: other bits')


def test_narrow():
    """bf16, and f32 that autocast casts, on two ranks; packed sequences are those that are asked for one by one."""
    torch.manual_seed(3)
    inputs = [torch.randn(1, TOKENS, h, DIM).bfloat16() for h in (4, 2, 2, 4)]
    *inputs, dout = inputs
    borders = [0, 5, 20, TOKENS]

    def each(q, k, v):
        parts = [slice(*b) for b in zip(borders, borders[1:])]
        return torch.cat([reference(q[:, p], k[:, p], v[:, p], True) for p in parts], 1)

    exact = own_gradients([t.double() for t in inputs], dout.double(), each)
    rounded = own_gradients(inputs, dout, each)
    u = Attention(LIBRARY, tokens=TOKENS, ranks=2, heads=4, kv_heads=2, head_dim=DIM, causal=1, dtype=1)
    got = {name: [torch.zeros_like(t) for t in (inputs[0], *inputs)] for name in ('bf16', 'autocast')}

    def rank_main(rank):
        first, count = u.rows(rank)
        rows = slice(first, first + count)
        mine = [t[:, rows] for t in inputs]
        packed = {'bf16': torch.tensor(borders, dtype=torch.int32), 'autocast': borders}
        for name, whole in got.items():

            def body(*t):
                with torch.autocast('cpu', torch.bfloat16, enabled=name == 'autocast'):  # pylint: disable=cell-var-from-loop
                    return attention(u, rank, *t, cu_seqlens=packed[name])  # pylint: disable=cell-var-from-loop

            tensors = [t.float() for t in mine] if name == 'autocast' else mine
            for out, part in zip(whole, own_gradients(tensors, dout[:, rows], body)):
                check(out is whole[0] or part.dtype == tensors[0].dtype, f'{name}: a gradient is {part.dtype}')
                out[:, rows] = part

    u.run(rank_main)
    u.close()
    compare('bf16', ('o', 'dq', 'dk', 'dv'), got['bf16'], rounded, exact)
    check(all(torch.equal(a, b) for a, b in zip(*got.values())), 'under autocast there are other bits than in bf16')


def one_draw(seed, teams):
    """Every option beside every other one, packed sequences in batches too; by a handle of its own, or by a team that has had
    other descriptions."""
    draw = random.Random(seed)
    desc, borders = draw_call(draw)
    torch.manual_seed(seed)
    tokens, dtype = desc['tokens'], upipe_torch.DTYPES[desc['dtype']]
    mask = torch.tensor([[[sees(desc, borders, b, i, j) for j in range(tokens)] for i in range(tokens)] for b in range(desc['batch'])])
    *inputs, dout = [torch.randn(desc['batch'], tokens, desc[heads], desc['head_dim']).to(dtype)
                     for heads in ('heads', 'kv_heads', 'kv_heads', 'heads')]
    sinks = [torch.randn(desc['heads'])] * draw.randint(0, 1)
    call = [*inputs, *sinks]
    exact = own_gradients([t.double() for t in call], dout.double(), lambda *t: dense(*t[:3], t[3] if sinks else None, desc, mask))
    rounded = own_gradients(call, dout, lambda *t: dense(*t[:3], t[3] if sinks else None, desc, mask))
    got = [torch.full_like(t, float('nan')) for t in (inputs[0], *inputs)] + [torch.zeros_like(t) for t in sinks]
    packed = draw.choice((borders, torch.tensor(borders, dtype=draw.choice((torch.int32, torch.int64)))))
    team = {name: desc[name] for name in ('ranks', 'ring', 'ring_mode', 'ring_inner', 'layout') if name in desc}
    own, reentrant = draw.randint(0, 1), draw.choice((None, True, False))
    said = {} if own else {**{name: desc[name] for name in ('tokens', 'window', 'softcap', 'scale', 'chunk')}, 'causal': bool(desc['causal'])}
    key = str(team)
    if not own and key not in teams:
        teams[key] = Attention(LIBRARY, **team)
    u = Attention(LIBRARY, **desc) if own else teams[key]

    def rank_main(rank):
        u.describe(rank, **desc)
        rows = u.positions(rank)

        def body(q, k, v, more=None):
            return attention(u, rank, q, k, v, cu_seqlens=packed, sinks=more, **said)

        found = own_gradients([t[:, rows] for t in inputs] + sinks, dout[:, rows],
                              body if reentrant is None else lambda *t: checkpoint(body, *t, use_reentrant=reentrant))
        for whole, part in zip(got[:4], found):
            whole[:, rows] = part
        dsinks[rank] = found[4:]

    dsinks = [None] * u.ranks
    u.run(rank_main)
    if own:
        u.close()
    for parts in dsinks:
        for whole, part in zip(got[4:], parts):
            whole += part
    # of so few numbers PyTorch's error may be small by chance
    compare(f'{desc}, borders {borders}', ('o', 'dq', 'dk', 'dv', 'dsinks'), got, rounded, exact, 5e-6)


def refused(words, what):
    try:
        what()
    except (Error, RuntimeError) as error:
        check(words in str(error), f'"{error}" does not say "{words}"')
    else:
        check(False, f'not refused: "{words}"')


def test_refused():
    q = torch.randn(1, TOKENS, 2, DIM, requires_grad=True)

    def refused_of(words, what, **more):
        """A call that is refused ends its handle."""
        u = Attention(LIBRARY, tokens=TOKENS, heads=2, head_dim=DIM, window=16, **more)
        refused(words, lambda: what(u))
        u.close()

    refused_of('q is torch.bfloat16', lambda u: attention(u, 0, q.bfloat16(), q, q))
    # the operator of a tensor without data has no call of the library
    refused_of('k is torch.float32 on meta; q is torch.float32, and the handle on cpu',
               lambda u: upipe_torch.forward(q, q.to('meta'), q, *8 * [None], 10000, u.number, 0))
    refused_of('v is (1, 37, 1, 32)', lambda u: attention(u, 0, q, q, q[:, :, :1]))
    swapped = q.transpose(1, 2)  # as scaled_dot_product_attention takes it
    refused_of('q is (1, 2, 37, 32)', lambda u: attention(u, 0, swapped, swapped, swapped))
    refused_of('q is (37, 2, 32)', lambda u: attention(u, 0, q[0], q, q))
    refused_of('rank 1 of 1', lambda u: attention(u, 1, q, q, q))
    refused_of('cu_seqlens is torch.float32', lambda u: attention(u, 0, q, q, q, cu_seqlens=[0., 37.]))
    refused_of('torch.int64 with 2 dimensions', lambda u: attention(u, 0, q, q, q, cu_seqlens=[[0, TOKENS]]))
    for batch, borders, words in wrong_borders(TOKENS):
        more = q.detach().expand(batch, -1, -1, -1)
        refused_of(words, lambda u, t=more, borders=borders: attention(u, 0, t, t, t, cu_seqlens=borders), batch=batch)
    u = Attention(LIBRARY, tokens=TOKENS, heads=2, head_dim=DIM)
    pid = os.fork()
    if pid == 0:
        try:
            attention(u, 0, q, q, q)
        except Error as error:
            os._exit(0 if 'forked' in str(error) else 2)  # pylint: disable=protected-access
        os._exit(1)  # pylint: disable=protected-access
    equal(os.waitpid(pid, 0)[1], 0, 'the status of a forked process that uses the handle')
    o = attention(u, 0, q, q, q, causal=False, window=0, softcap=0.0, scale=DIM**-0.5)
    o.sum().backward(retain_graph=True)
    first, q.grad = q.grad, None
    for _ in range(3):
        attention(u, 0, q, q, q)  # thrown away
    o.sum().backward()
    check(torch.equal(first, q.grad), 'the second backward has other bits')
    slope, = torch.autograd.grad(attention(u, 0, q, q, q).square().sum(), q, create_graph=True)
    refused('no derivatives of derivatives', slope.sum().backward)
    check(torch.equal(attention(u, 0, q, q, q, cu_seqlens=[]), o), 'no packed sequences')
    o = attention(u, 0, q, q, q)
    u.close()
    refused('the handle is closed', o.sum().backward)
    refused('the handle is closed', lambda: attention(u, 0, q, q, q))


def test_refused_of_many():
    """What one rank has refused is told to the others at once."""
    q = torch.randn(1, TOKENS, 2, DIM)
    u = Attention(LIBRARY, tokens=TOKENS, ranks=2, heads=2, head_dim=DIM)
    if threading.active_count() == 1:
        refused('2 ranks and one thread', lambda: attention(u, 0, *3 * [q[:, :u.rows(0)[1]]]))
    u.close()
    u = Attention(LIBRARY, tokens=TOKENS, ranks=2, heads=2, head_dim=DIM)
    said, began = {}, time.monotonic()

    def rank_main(rank):
        try:
            attention(u, rank, *3 * [q[:, :u.rows(0)[1] - 1] if rank else q[:, :u.rows(0)[1]]])
        except Error as error:
            said[rank] = str(error)

    u.run(rank_main)
    u.close()
    check(time.monotonic() - began < 30, 'a rank waits for one whose call was refused')  # the deadline is 60 s
    check(all('q is (1, 17, 2, 32); rank 1 has' in said.get(rank, '') for rank in range(2)), f'ranks say {said}')


def test_versions():
    with mock.patch('torch.__version__', '2.7.1+cpu'):
        refused('PyTorch 2.7.1+cpu is too old: install one from 2.8 to 2.15', lambda: importlib.reload(upipe_torch))
    for version, words in ('2.8.0a0+git', []), ('2.15.1', []), ('2.16.0', ['not been tested with PyTorch 2.16.0, but with 2.8 to 2.15']):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter('always')
            upipe_torch.check_version(version)
        equal([str(one.message).removeprefix('upipe has ') for one in said], words, f'what is said of {version}')


def test_operators():
    """PyTorch's check of both operators; then they are compiled."""
    torch.manual_seed(4)
    tensors, borders = [torch.randn(1, TOKENS, h, DIM) for h in (4, 2, 2)], torch.tensor([0, 5, TOKENS])
    u = Attention(LIBRARY, tokens=TOKENS, heads=4, kv_heads=2, head_dim=DIM, causal=1)
    call = (torch.randn(4), borders, TOKENS, None, True, None, None, None)
    options = (*call, upipe_torch.saved_bytes(u, 0, TOKENS, 1, 4), u.number, 0)
    torch.library.opcheck(torch.ops.upipe.attention.default, (*(t.clone().requires_grad_(True) for t in tensors), *options))
    o, saved = torch.ops.upipe.attention(*tensors, *options)
    torch.library.opcheck(torch.ops.upipe.attention_backward.default, (o, o, *tensors, saved, *call, u.number, 0))

    def body(*t):
        return attention(u, 0, *t, causal=True, cu_seqlens=borders)

    def twice(*t):
        return attention(u, 0, checkpoint(body, *t, use_reentrant=False), *t[1:], causal=True)

    for call in body, twice:
        eager = own_gradients(tensors, o, call)
        for backend in 'aot_eager', 'inductor':
            compiled = own_gradients(tensors, o, torch.compile(call, fullgraph=True, backend=backend))
            check(all(torch.equal(a, b) for a, b in zip(eager, compiled)), f'{backend}, {call.__name__}: other bits than eager')
    u.close()
    refused('the handle is closed', lambda: torch.compile(body, fullgraph=True, backend='aot_eager')(*tensors))


def check_sums(team):
    """A weight that has two names is summed once; what this rank has not used counts as zeros, what none has used has no gradient."""
    model = torch.nn.ModuleList([torch.nn.Linear(2, 3, bias=False), torch.nn.Linear(2, 3, bias=False), torch.nn.Linear(1, 1)])
    model[1].weight = model[0].weight
    loss = (1 + team.rank) * model[1].weight.sum()
    (loss + model[2].weight.sum() if team.rank == 1 else loss).backward()
    team.sum_gradients(model)
    for name, p in model.named_parameters():
        want, got = {'0.weight': [3], '2.weight': [1], '2.bias': []}[name], [] if p.grad is None else p.grad.unique().tolist()
        equal(got, want, f'MPI, rank {team.rank}: numbers of the gradient of {name}')


def rank_of_mpi():
    """This process is one of mpirun's: a team over MPI, and sums of the process group."""
    torch.manual_seed(1)
    *inputs, dout = [torch.randn(1, TOKENS, heads, DIM) for heads in (4, 2, 2, 4)]
    weight = torch.nn.Linear(DIM, DIM, bias=False)
    want = own_gradients(inputs, dout, lambda q, k, v: reference(weight(q), k, v, True))
    summed, weight.weight.grad = weight.weight.grad, None
    team = upipe_team.team_from_env(LIBRARY)
    equal((type(team).__name__, team.ranks), ('MpiTeam', 2), 'the team')
    first, count = team.rows(TOKENS)
    rows = slice(first, first + count)
    got = own_gradients([t[:, rows] for t in inputs], dout[:, rows],
                        lambda q, k, v: team.attention(weight(q), k, v, tokens=TOKENS, causal=True))
    team.sum_gradients(weight)
    for name, ours, true in zip(('o', 'dq', 'dk', 'dv', 'dw'), [*(team.gather(t) for t in got), weight.weight.grad], [*want, summed]):
        off = (ours - true).abs().max() / true.abs().max()
        check(bool(off <= 2e-6), f'MPI, rank {team.rank}: {name} is off by {off:.3g} of the largest')
    check_sums(team)
    t = torch.zeros(1, 20, 4, DIM)
    refused('q is (1, 20, 4, 32); rank 1 has (1, 21, 4, 32)', lambda: team.attention(t, t, t, tokens=40 + team.rank))
    team.close()
    return end(f'rank {team.rank}')


def test_mpi(library, mpirun):
    """And what team_from_env refuses."""
    ranks = {'OMPI_COMM_WORLD_RANK': '0', 'OMPI_COMM_WORLD_SIZE': '2'}
    refused('RANK is not set', lambda: upipe_team.team_from_env(LIBRARY))
    with mock.patch.dict(os.environ, ranks):
        refused('has no MPI: give libupipe_abi_mpi.so', lambda: upipe_team.team_from_env(LIBRARY))
        refused('MASTER_ADDR and MASTER_PORT are not set', lambda: upipe_team.team_from_env(library))
    with mock.patch('upipe_team.can', lambda library, name: name == 'cuda'):
        refused('CUDA devices and has no NCCL', lambda: upipe_team.team_from_env(LIBRARY))
    statuses, outs, errs, _ = run_ranks(Mpi(mpirun, MASTER_ADDR='localhost', MASTER_PORT=free_port()), 2,
                                        [sys.executable, os.path.abspath(__file__), library, sys.argv[2], 'rank'], 120)
    check(statuses == [0] and all(' 0 failed' in text for text in outs), f'{statuses}: {outs}{errs}')


def test_drawn():
    teams = {}
    for seed in draws(4):
        one_draw(seed, teams)
    for u in teams.values():
        u.close()


def main():
    torch.set_num_threads(1)
    if sys.argv[3:] == ['rank']:
        return rank_of_mpi()
    if len(sys.argv) > 3:
        run_test(test_mpi, os.path.abspath(sys.argv[3]), sys.argv[4])
    for case in ((1, 0, 4, 2, True, 1), (2, 2, 4, 2, True, 1), (2, 4, 4, 4, False, 2), (4, 0, 8, 2, True, 2), (3, 3, 6, 2, False, 1)):
        run_test(test_tensors, *case)
    run_test(test_drawn)
    run_test(test_network)
    run_test(test_checkpointed)
    run_test(test_narrow)
    run_test(test_refused_of_many)
    run_test(test_refused)
    run_test(test_versions)
    with tempfile.TemporaryDirectory() as cache:
        os.environ['TORCHINDUCTOR_CACHE_DIR'] = cache
        run_test(test_operators)
    return end(f'torch {torch.__version__}')


if __name__ == '__main__':
    sys.exit(main())

#!/usr/bin/env python3
"""test_torch.py LIBRARY TOP -- examples/abi/upipe_torch.py against PyTorch's own attention in double precision

O and the gradients of Q, K, V on one to four ranks; a network of two layers with fused projections, whose gradients of
weights are summed over the ranks; layers under torch.utils.checkpoint; what is refused. An error may be three times that
of PyTorch in f32. Where no Python here has PyTorch the test is left out (status 77).
"""

import copy
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), 'lib'))
from checks import check, end, other_python  # pylint: disable=wrong-import-position

try:
    import torch
except ImportError:
    other_python(os.path.join(sys.argv[2], 'build', 'bench', 'venv', 'bin', 'python'))
    print('left out: PyTorch, which no Python here has: install python3-torch')
    sys.exit(77)

from torch.utils.checkpoint import checkpoint  # pylint: disable=wrong-import-position

LIBRARY = os.path.abspath(sys.argv[1])
sys.path.insert(0, os.path.join(sys.argv[2], 'examples', 'abi'))
from upipe_abi import Attention, Error  # pylint: disable=wrong-import-position
from upipe_torch import attention  # pylint: disable=wrong-import-position

TOKENS, DIM = 37, 32


def reference(q, k, v, causal):
    """[batch][tokens][heads][dim]; PyTorch's function where its version has it."""
    groups = q.shape[2] // k.shape[2]
    q, k, v = (t.transpose(1, 2) for t in (q, k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)))
    if hasattr(torch.nn.functional, 'scaled_dot_product_attention'):
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    else:
        scores = q @ k.transpose(2, 3) / DIM**0.5
        if causal:
            scores = scores.masked_fill(torch.ones(scores.shape[2:], dtype=torch.bool).triu(1), float('-inf'))
        o = scores.softmax(3) @ v
    return o.transpose(1, 2)


def compare(what, names, got, rounded, exact):
    for name, ours, theirs, true in zip(names, got, rounded, exact):
        off, limit = (ours - true).abs().max(), 3 * (theirs - true).abs().max() + 1e-7 * true.abs().max()
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
    u = Attention(LIBRARY, tokens=TOKENS, batch=2, ranks=ranks, heads=heads, kv_heads=kv_heads, head_dim=DIM, causal=1,
                  layers=2)
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
    """Three layers whose forwards are repeated: the bits of those that are kept."""
    torch.manual_seed(2)
    x, found = torch.randn(1, TOKENS, 2, DIM), {}
    for reentrant, layers in ((None, 3), (True, 1), (False, 4)):
        u = Attention(LIBRARY, tokens=TOKENS, ranks=2, heads=2, head_dim=DIM, causal=1, layers=layers)
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


def refused(words, what):
    try:
        what()
    except (Error, RuntimeError) as error:
        check(words in str(error), f'"{error}" does not say "{words}"')
    else:
        check(False, f'not refused: "{words}"')


def test_refused():
    u = Attention(LIBRARY, tokens=TOKENS, heads=2, head_dim=DIM)
    q = torch.randn(1, TOKENS, 2, DIM, requires_grad=True)
    refused('torch.bfloat16', lambda: attention(u, 0, q.bfloat16(), q, q))
    refused('v is (1, 37, 1, 32)', lambda: attention(u, 0, q, q, q[:, :, :1]))
    o = attention(u, 0, q, q, q)
    refused('no more layers', lambda: attention(u, 0, q, q, q))
    o.sum().backward(retain_graph=True)
    slope, = torch.autograd.grad(attention(u, 0, q, q, q).square().sum(), q, create_graph=True)
    refused('once_differentiable', slope.sum().backward)
    attention(u, 0, q, q, q)  # thrown away: its layer is free again
    refused('nothing to drop', lambda: u.drop(0, u.free_layer(0)))
    refused('consumed before', o.sum().backward)
    other = attention(u, 0, q, q, q)  # has the layer of the first one
    refused('consumed before', o.sum().backward)
    other.sum().backward()
    u.close()


def main():
    torch.set_num_threads(1)
    for case in ((1, 0, 4, 2, True, 1), (2, 2, 4, 2, True, 1), (2, 4, 4, 4, False, 2), (4, 0, 8, 2, True, 2), (3, 3, 6, 2, False, 1)):
        test_tensors(*case)
    test_network()
    test_checkpointed()
    test_refused()
    return end(f'torch {torch.__version__}')


if __name__ == '__main__':
    sys.exit(main())

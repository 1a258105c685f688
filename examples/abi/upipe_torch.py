"""upipe_torch.py -- context-parallel attention as an autograd function of PyTorch, over the C ABI (upipe_abi.py)

    u = Attention('libupipe_abi.so', tokens=1024, ranks=4, heads=8, kv_heads=4, head_dim=64, causal=1, layers=2)
    def rank_main(rank):                                # each rank on a thread of its own
        o = attention(u, rank, q, k, v)                 # this rank's tokens; layers one behind the other
        loss(o).backward()
    u.run(rank_main)

In place of torch.nn.functional.scaled_dot_product_attention where each rank holds a part of every sequence. All ranks make
the same calls in the same order, backwards in reverse order. PyTorch runs the backward of CPU tensors on the thread that
asks for it, so that a rank's backward meets those of the others. Of the forwards whose backward is still to come there may
be as many as the handle has layers. A forward without gradients holds none, nor one whose result is thrown away. Under
torch.utils.checkpoint with use_reentrant=False the repeated forward needs one layer more.
"""

import torch
from torch.autograd.function import once_differentiable

from upipe_abi import Error


def check(u, rank, q, k, v):
    """The library sees pointers alone: types and shapes are checked here."""
    rows = u.rows(rank)[1]
    for name, tensor, heads in (('q', q, u.desc.heads), ('k', k, u.desc.kv_heads), ('v', v, u.desc.kv_heads)):
        shape = (u.desc.batch, rows, heads, u.desc.head_dim)
        if tensor.device.type != 'cpu' or tensor.dtype != torch.float32:
            raise Error(f'{name} is {tensor.dtype} on {tensor.device}; the ABI has torch.float32 on the CPU')
        if tuple(tensor.shape) != shape:
            raise Error(f'{name} is {tuple(tensor.shape)}; rank {rank} has {shape}: batch, tokens, heads, head dim')


class Held:
    """A forward's layer. Its backward ends it, or the end of the last graph that could ask for that backward: Python may
    notice this on another rank's thread, so that the rank's next forward drops the layer."""

    def __init__(self, u, rank, layer):
        self.u, self.rank, self.layer, self.spent = u, rank, layer, False

    def __del__(self):
        if not self.spent:
            self.u.lost[self.rank].append(self.layer)


class ContextAttention(torch.autograd.Function):  # pylint: disable=abstract-method
    @staticmethod
    def forward(ctx, u, rank, layer, q, k, v):  # pylint: disable=arguments-differ
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()  # a slice of a fused projection is copied
        o = torch.empty_like(q)
        u.qkv_fwd(rank, o.data_ptr(), q.data_ptr(), k.data_ptr(), v.data_ptr(), layer=layer)
        ctx.held = Held(u, rank, layer)
        ctx.save_for_backward(q, k, v, o)
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):  # pylint: disable=arguments-differ
        held = ctx.held
        if held.spent:  # its layer may be another forward's by now
            raise Error('what the forward has left was consumed before, by its first backward')
        held.spent = True
        q, k, v, o = ctx.saved_tensors
        dout = dout.contiguous()
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        held.u.qkv_bwd(held.rank, *(t.data_ptr() for t in (dq, dk, dv, dout, o, q, k, v)), layer=held.layer)
        return None, None, None, dq, dk, dv


def attention(u, rank, q, k, v):
    """O of this rank's tokens.

    q    [batch][rows][heads][head_dim] f32 on the CPU, rows of u.rows(rank); k, v with kv_heads; steps as they are
    out  as q
    upipe_abi.Error with a sentence: for tensors of another type or shape, too many forwards before their backward, a second
    backward, and what another rank has failed with
    """
    check(u, rank, q, k, v)
    return ContextAttention.apply(u, rank, u.free_layer(rank), q, k, v)

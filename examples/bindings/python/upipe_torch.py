"""upipe_torch.py -- context-parallel attention as an operator of PyTorch, over the C ABI (upipe_abi.py)

    u = Attention('libupipe_abi.so', tokens=1024, ranks=4, heads=8, kv_heads=4, head_dim=64, causal=1)
    def rank_main(rank):                                # each rank on a thread of its own
        o = attention(u, rank, q, k, v)                 # this rank's tokens
        loss(o).backward()
    u.run(rank_main)

In place of torch.nn.functional.scaled_dot_product_attention where each rank holds a part of every sequence. All ranks make
the same calls in the same order, forwards and backwards. PyTorch runs the backward of CPU tensors on the thread that asks
for it, so that a rank's backward meets those of the others.

Forward and backward are operators, upipe::attention and upipe::attention_backward, which torch.compile takes as they are. What
a forward leaves for its backward is a tensor of bytes, so that PyTorch alone says how long it lives: the handle needs one layer
for any number of forwards, repeated ones included.
"""

import contextlib
import ctypes
import re
import threading
import warnings

import torch

from upipe_abi import OPENED, Error

OLDEST, NEWEST = '2.6', '2.15'  # PyTorch that this is tested with; pyproject.toml has the same
DTYPES = (torch.float32, torch.bfloat16)  # by upipe_abi_desc.dtype


def check_version(version):
    """An older PyTorch is refused; a newer one may have changed what is used here."""
    has, oldest, newest = (tuple(map(int, re.match(r'(\d+)\.(\d+)', v).groups())) for v in (version, OLDEST, NEWEST))
    if has < oldest:
        raise Error(f'PyTorch {version} is too old: install one from {OLDEST} to {NEWEST}')
    if has > newest:
        warnings.warn(f'upipe has not been tested with PyTorch {version}, but with {OLDEST} to {NEWEST}', stacklevel=2)


check_version(torch.__version__)


@contextlib.contextmanager
def one_call(number, rank):
    """The handle, for a call of this rank. An error releases the other ranks, which would wait for this one."""
    u = OPENED.get(number)
    if u is None:
        raise Error('the handle is closed')
    try:
        u.rows(rank)  # refuses a rank that is not here, and a handle that is closed or a forked parent's
        if len(u.ranks_here) > 1 and threading.active_count() == 1:
            raise Error(f'{len(u.ranks_here)} ranks and one thread; each rank calls on a thread of its own')
        if u.device == 'cuda':
            if len(u.ranks_here) > 1:
                raise Error('PyTorch has one thread for all backwards of a device: on CUDA a rank is a process')
            u.stream(rank, torch.cuda.current_stream().cuda_stream)
        yield u
    except Error as error:
        u.abort(rank, str(error))
        raise


def check(u, rank, heads, **tensors):
    """The library sees pointers alone: types, devices and shapes are checked here."""
    dtype, shape = DTYPES[u.desc.dtype], (u.desc.batch, u.rows(rank)[1], heads, u.desc.head_dim)
    for name, t in tensors.items():
        if t.device.type != u.device or t.dtype != dtype:
            raise Error(f'{name} is {t.dtype} on {t.device}; the handle has {dtype} on {u.device}')
        if tuple(t.shape) != shape:
            raise Error(f'{name} is {tuple(t.shape)}; rank {rank} has {shape}: batch, tokens, heads, head dim')


def borders(cu_seqlens):
    if cu_seqlens is None:
        return []
    if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.dim() != 1:
        raise Error(f'cu_seqlens is {cu_seqlens.dtype} with {cu_seqlens.dim()} dimensions; torch.int32 or int64 with one')
    return cu_seqlens.tolist()


def check_saved(u, rank, count):
    if count != u.saved_bytes[rank]:
        raise Error(f'{count} bytes for what a forward leaves; rank {rank} needs {u.saved_bytes[rank]}')


def check_mask(desc, causal, window, softcap, scale):
    """The mask and the scale are the handle's: a call says what it counts on."""
    have = (bool(desc.causal), desc.window, desc.softcap, desc.scale or ctypes.c_float(desc.head_dim**-0.5).value)
    for name, asked, has in zip(('causal', 'window', 'softcap', 'scale'), (causal, window, softcap, scale), have):
        if asked is not None and (ctypes.c_float(asked).value if isinstance(has, float) else asked) != has:
            raise Error(f'{name} is {asked}; the handle has {has}')


def forward(q, k, v, cu_seqlens, causal, window, softcap, scale, number, rank, saved_bytes):  # pylint: disable=too-many-positional-arguments
    """O, and what the backward needs of the forward. The schema is below."""
    with one_call(number, rank) as u:
        check(u, rank, u.desc.heads, q=q)
        check(u, rank, u.desc.kv_heads, k=k, v=v)
        check_mask(u.desc, causal, window, softcap, scale)
        check_saved(u, rank, saved_bytes)
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        o, saved = torch.empty_like(q), q.new_empty(saved_bytes, dtype=torch.uint8)
        u.qkv_fwd(rank, o.data_ptr(), q.data_ptr(), k.data_ptr(), v.data_ptr(), cu_seqlens=borders(cu_seqlens))
        u.save(rank, saved.data_ptr())
        return o, saved


def backward(dout, o, q, k, v, saved, cu_seqlens, number, rank):  # pylint: disable=too-many-positional-arguments
    """dQ, dK, dV."""
    with one_call(number, rank) as u:
        check(u, rank, u.desc.heads, dout=dout, o=o, q=q)
        check(u, rank, u.desc.kv_heads, k=k, v=v)
        check_saved(u, rank, saved.numel() * saved.element_size())
        dout, o, q, k, v = (t.contiguous() for t in (dout, o, q, k, v))
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        u.restore(rank, saved.data_ptr())
        u.qkv_bwd(rank, *(t.data_ptr() for t in (dq, dk, dv, dout, o, q, k, v)), cu_seqlens=borders(cu_seqlens))
        return dq, dk, dv


def keep(ctx, inputs, output):
    q, k, v, cu_seqlens, *_, ctx.number, ctx.rank, _ = inputs
    o, saved = output
    ctx.save_for_backward(o, q, k, v, saved, cu_seqlens)


def gradients(ctx, dout, _=None):
    return *backward_op(dout, *ctx.saved_tensors, ctx.number, ctx.rank), *8 * [None]


def no_gradients(ctx, *_):
    raise Error('attention has no derivatives of derivatives')


def packed_like(t):
    return torch.empty_like(t, memory_format=torch.contiguous_format)


forward_op = torch.library.custom_op(
    'upipe::attention', forward, mutates_args=(),
    schema='(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens, bool? causal, int? window, float? softcap, float? scale, '
    'int number, int rank, int saved_bytes) -> (Tensor, Tensor)')
forward_op.register_fake(lambda q, k, v, cu_seqlens, causal, window, softcap, scale, number, rank, saved_bytes:
                         (packed_like(q), q.new_empty(saved_bytes, dtype=torch.uint8)))
forward_op.register_autograd(gradients, setup_context=keep)
backward_op = torch.library.custom_op(
    'upipe::attention_backward', backward, mutates_args=(),
    schema='(Tensor dout, Tensor o, Tensor q, Tensor k, Tensor v, Tensor saved, Tensor? cu_seqlens, int number, int rank) '
    '-> (Tensor, Tensor, Tensor)')
backward_op.register_fake(lambda dout, o, q, k, v, saved, cu_seqlens, number, rank:
                          (packed_like(q), packed_like(k), packed_like(v)))
backward_op.register_autograd(no_gradients)


def autocast_dtype(device):
    """Of torch.autocast around this call; None: there is none."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def attention(u, rank, q, k, v, *, cu_seqlens=None, causal=None, window=None, softcap=None, scale=None):
    """O of this rank's tokens.

    q           [batch][rows][heads][head_dim] of the handle's type where it computes, rows of u.rows(rank); k, v with kv_heads; steps
                as they are. Under torch.autocast they are cast first
    cu_seqlens  flash-attention's borders of packed sequences, over the rows of the flattened batch, in which sequence b begins at
                b * tokens: from 0 to batch * tokens, and none within two sequences of the batch; a tensor of integers or a list,
                the same on all ranks; []: none; None: what u.pack() has said
    causal, window, softcap, scale  the handle's; one that is given and differs is refused
    out         as q, packed
    upipe_abi.Error with a sentence: for tensors of another type, device or shape, a handle that is closed or a forked parent's, a
    rank that is not here, all ranks on one thread, and what another rank has failed with. It releases the other ranks, and the
    handle can then only be closed
    """
    dtype = autocast_dtype(q.device.type)
    if dtype is not None:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if cu_seqlens is None:
        cu_seqlens = u.packed.get(rank, [])
    cu_seqlens = torch.as_tensor(cu_seqlens) if len(cu_seqlens) > 0 else None
    # a slice of a fused projection is copied once, for forward and backward
    return forward_op(q.contiguous(), k.contiguous(), v.contiguous(), cu_seqlens, causal, window, softcap, scale, u.number, rank,
                      u.saved_bytes.get(rank, 0))[0]

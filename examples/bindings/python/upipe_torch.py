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
for any number of forwards, repeated ones included. Each call says its own description, so that one handle does for any length,
batch, model and mask.
"""

import contextlib
import re
import threading
import warnings

import torch
from torch.autograd.forward_ad import unpack_dual

from upipe_abi import OPENED, Attention, Error

OLDEST, NEWEST = '2.8', '2.15'  # PyTorch that this is tested with; pyproject.toml has the same
DTYPES = (torch.float32, torch.bfloat16)  # by upipe_abi_desc.dtype
SAVED_HEAD = 224  # bytes of what the library keeps of a forward beside numbers of its rows


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
    except BaseException as error:
        u.abort(rank, str(error))
        raise


def describe(u, rank, q, k, v, sinks, **asked):
    """The call's description: what its tensors say, what it asks for, and for the rest that of the handle's open."""
    if q.dtype not in DTYPES:
        raise Error(f'q is {q.dtype}, which is not served: torch.float32 and torch.bfloat16 are')
    if q.dim() != 4 or k.dim() != 4:
        raise Error(f'q is {tuple(q.shape)} and k {tuple(k.shape)}: they are batch, rows, heads, head dim')
    for name, t in ('q', q), ('k', k):  # v has the shape of k, below
        if 0 in t.shape:  # which a description takes for a default
            raise Error(f'{name} is {tuple(t.shape)}: batch, rows, heads and head dim are at least 1')
    if asked['tokens'] is None and u.tokens == 0:
        raise Error('tokens= is missing, those of a sequence on all ranks: the handle of a team has none')
    batch, _, heads, head_dim = q.shape
    u.describe(rank, batch=batch, heads=heads, kv_heads=k.shape[2], head_dim=head_dim, dtype=DTYPES.index(q.dtype),
               **{name: value for name, value in asked.items() if value is not None})
    rows = u.rows(rank)[1]
    check(u, q.dtype, (batch, rows, heads, head_dim), f'rank {rank}', q=q)
    if v.shape[-1:] != q.shape[-1:]:
        raise Error(f'v has head dim {v.shape[-1]} and q {head_dim}, as in latent attention, which is not served')
    check(u, q.dtype, (batch, rows, k.shape[2], head_dim), f'rank {rank}', k=k, v=v)
    if sinks is not None and (sinks.dtype != torch.float32 or sinks.device != q.device or tuple(sinks.shape) != (heads,)):
        raise Error(f'sinks is {sinks.dtype} {tuple(sinks.shape)} on {sinks.device}; q has {heads} heads on {q.device}, and sinks are float32')


def check(u, dtype, shape, whose, **tensors):
    """The library sees pointers alone: types, devices and shapes are checked here."""
    for name, t in tensors.items():
        if t.device.type != u.device or t.dtype != dtype:
            raise Error(f'{name} is {t.dtype} on {t.device}; q is {dtype}, and the handle on {u.device}')
        if tuple(t.shape) != shape:
            raise Error(f'{name} is {tuple(t.shape)}; {whose} has {shape}: batch, rows, heads, head dim')


def borders(cu_seqlens):
    if cu_seqlens is None:
        return []
    if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.dim() != 1:
        raise Error(f'cu_seqlens is {cu_seqlens.dtype} with {cu_seqlens.dim()} dimensions; torch.int32 or int64 with one')
    return cu_seqlens.tolist()


def saved_bytes(u, rank, tokens, batch, heads):
    """At least what u.saved_bytes(rank) is of such a call, and never NULL: of numbers that torch.compile may leave open."""
    ranks, member = u.ranks // u.ring, rank % (u.ranks // u.ring)
    own = max(heads * (member + 1) // ranks - heads * member // ranks, 1)
    most = tokens if u.ring == 1 else 2 * (-(-tokens // (2 * u.ring)))  # of a rank of the ring, in any layout
    return SAVED_HEAD + 4 * own * most * batch


def address(t):
    return None if t is None else t.data_ptr()


def forward(q, k, v, sinks, cu_seqlens, tokens, window, causal, softcap, scale, chunk, saved, number, rank):  # pylint: disable=too-many-positional-arguments
    """O, and what the backward needs of the forward, of `saved` bytes. The schema is below."""
    with one_call(number, rank) as u:
        describe(u, rank, q, k, v, sinks, tokens=tokens, window=window, causal=causal, softcap=softcap, scale=scale, chunk=chunk)
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        o, kept = torch.empty_like(q), q.new_empty(saved, dtype=torch.uint8)
        check_saved(u, rank, kept)
        u.qkv_fwd(rank, o.data_ptr(), q.data_ptr(), k.data_ptr(), v.data_ptr(), cu_seqlens=borders(cu_seqlens),
                  sinks=address(sinks))
        u.save(rank, kept.data_ptr())
        return o, kept


def check_saved(u, rank, kept):
    if kept.numel() * kept.element_size() < u.saved_bytes(rank):
        raise Error(f'{kept.numel()} bytes for what a forward leaves; rank {rank} needs {u.saved_bytes(rank)}')


def backward(dout, o, q, k, v, kept, sinks, cu_seqlens, tokens, window, causal, softcap, scale, chunk, number, rank):  # pylint: disable=too-many-positional-arguments
    """dQ, dK, dV, and of the sinks' gradients those of the heads that this rank has computed, the others 0; [0]: there are none."""
    with one_call(number, rank) as u:
        describe(u, rank, q, k, v, sinks, tokens=tokens, window=window, causal=causal, softcap=softcap, scale=scale, chunk=chunk)
        check(u, q.dtype, tuple(q.shape), 'q', dout=dout, o=o)
        check_saved(u, rank, kept)
        dout, o, q, k, v = (t.contiguous() for t in (dout, o, q, k, v))
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        u.restore(rank, kept.data_ptr())
        dsinks = no_sinks(q) if sinks is None else torch.zeros_like(sinks)
        u.qkv_bwd(rank, *(t.data_ptr() for t in (dq, dk, dv, dout, o, q, k, v)), cu_seqlens=borders(cu_seqlens),
                  sinks=address(sinks), dsinks=None if sinks is None else dsinks.data_ptr())
        return dq, dk, dv, dsinks


def no_sinks(q):
    return q.new_empty(0, dtype=torch.float32)


def keep(ctx, inputs, output):
    q, k, v, sinks, cu_seqlens, *call, _, number, rank = inputs
    ctx.call = (*call, number, rank)
    ctx.save_for_backward(output[0], q, k, v, output[1], sinks, cu_seqlens)


def gradients(ctx, dout, _=None):
    *found, dsinks = backward_op(dout, *ctx.saved_tensors, *ctx.call)
    return *found, dsinks if ctx.needs_input_grad[3] else None, *10 * [None]


def no_gradients(ctx, *_):
    raise Error('attention has no derivatives of derivatives')


def packed_like(t):
    return torch.empty_like(t, memory_format=torch.contiguous_format)


CALL = 'Tensor? sinks, Tensor? cu_seqlens, SymInt? tokens, SymInt? window, bool? causal, float? softcap, float? scale, int? chunk'
forward_op = torch.library.custom_op('upipe::attention', forward, mutates_args=(), schema=(
    f'(Tensor q, Tensor k, Tensor v, {CALL}, SymInt saved, int number, int rank) -> (Tensor, Tensor)'))
forward_op.register_fake(lambda q, k, v, sinks, cu_seqlens, tokens, window, causal, softcap, scale, chunk, saved, number, rank:
                         (packed_like(q), q.new_empty(saved, dtype=torch.uint8)))
forward_op.register_autograd(gradients, setup_context=keep)
backward_op = torch.library.custom_op('upipe::attention_backward', backward, mutates_args=(), schema=(
    f'(Tensor dout, Tensor o, Tensor q, Tensor k, Tensor v, Tensor kept, {CALL}, int number, int rank) -> (Tensor, Tensor, Tensor, Tensor)'))
backward_op.register_fake(lambda dout, o, q, k, v, kept, sinks, *_: (
    packed_like(q), packed_like(k), packed_like(v), no_sinks(q) if sinks is None else torch.empty_like(sinks)))
backward_op.register_autograd(no_gradients)


@forward_op.register_vmap
def no_map(*_):
    raise Error('attention is not mapped: a batch is a dimension of its tensors')


def check_numbers(**tensors):
    """If one tensor is on meta, PyTorch calls no library, and returns what nobody has written. It drops tangents without a word."""
    for name, t in tensors.items():
        if not torch.is_tensor(t):
            raise Error(f'{name} is a {type(t).__name__}, and no tensor')
        if t.is_meta:
            raise Error(f'{name} is on meta, and has no numbers: load the model, or move it with to_empty(device=...)')
        if unpack_dual(t).tangent is not None:
            raise Error(f'{name} has a tangent: attention has no derivatives in forward mode; take those of backward()')


def autocast_dtype(device):
    """Of torch.autocast around this call; None: there is none."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def attention(u, rank, q, k, v, *, tokens=None, cu_seqlens=(), causal=None, window=None, softcap=None, scale=None, chunk=None, sinks=None):
    """O of this rank's tokens.

    q           [batch][rows][heads][head_dim], of this rank's rows of so many tokens; k, v with their own heads. torch.float32 or
                torch.bfloat16; under torch.autocast they are cast first. Strides as they are
    tokens      of a sequence, on all ranks. None, here and below: as in the handle's open
    cu_seqlens  flash-attention's borders of packed sequences, over the rows of the flattened batch, in which sequence b begins at
                b * tokens: from 0 to batch * tokens, and none within two sequences of the batch; a tensor of integers or a list,
                the same on all ranks; (): none
    causal, window, softcap, scale, chunk  as upipe_abi.h says, the same on all ranks
    sinks       [heads], a logit in each head's softmax that has no value; its gradient is of the heads that this rank has computed, so
                that the sum over the ranks is all of it. None: none
    out         as q, packed
    upipe_abi.Error with a sentence: for tensors of another type, device or shape, ranks whose calls differ, a handle that is closed
    or a forked parent's, a rank that is not here, all ranks on one thread, and what another rank has failed with. It releases the
    other ranks, and the handle can then only be closed
    """
    if not isinstance(u, Attention):
        raise Error(f'u is a {type(u).__name__}, and no handle: give team.u, or call team.attention()')
    call = {'causal': causal, 'window': window, 'softcap': softcap, 'scale': scale, 'chunk': chunk}
    if torch.compiler.is_compiling():
        return one_attention(u, rank, q, k, v, tokens, cu_seqlens, sinks, **call)
    try:
        return one_attention(u, rank, q, k, v, tokens, cu_seqlens, sinks, **call)
    except (RuntimeError, TypeError, ValueError) as error:  # and not what a checkpoint ends its second forward with
        u.abort(rank, str(error))  # what the other ranks have given may be right
        raise


def one_attention(u, rank, q, k, v, tokens, cu_seqlens, sinks, **call):
    borders_of = torch.as_tensor(cu_seqlens) if len(cu_seqlens) > 0 else None
    check_numbers(q=q, k=k, v=v, **{name: t for name, t in (('sinks', sinks), ('cu_seqlens', borders_of)) if t is not None})
    dtype = autocast_dtype(q.device.type)
    if dtype is not None:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    saved = saved_bytes(u, rank, u.tokens if tokens is None else tokens, q.shape[0], q.shape[2]) if q.dim() == 4 else 0
    # a slice of a fused projection is copied once, for forward and backward
    return forward_op(q.contiguous(), k.contiguous(), v.contiguous(), None if sinks is None else sinks.float().contiguous(), borders_of,
                      tokens, *(call[name] for name in ('window', 'causal', 'softcap', 'scale', 'chunk')), saved, u.number, rank)[0]

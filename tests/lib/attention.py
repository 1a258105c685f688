"""attention.py -- attention in whole matrices of NumPy, forward and backward: what scripts hold results to

    seen = visible(batch, tokens, window=30)[:, None]
    kept = attend(q, k, v, scale, seen)                   # kept[0]: O
    dq, dk, dv, _ = attend_bwd(q, k, v, dout, scale, kept)

Heads stand before tokens: q [..., H, S, d], k [..., K, S, d], v [..., K, S, v_dim]. The loops of oracle.h, and those of
examples/compare, share no line with it, and so no mistake. Arithmetic is in the type of the arguments.
"""

import numpy as np


def visible(batch, tokens, causal=True, window=0, borders=()):
    """[batch, S, S]: whether a token sees another one. borders: of packed sequences, in the whole batch."""
    back = np.arange(tokens)[:, None] - np.arange(tokens)
    sees = (back >= 0) | (not causal)
    if window:
        sees &= back < window
    packed = np.searchsorted(borders, np.arange(batch * tokens), 'right').reshape(batch, tokens)
    return sees & (packed[:, :, None] == packed[:, None, :])


def rope(t, rates, factor=1.0, sign=1):
    """t [..., S, d], pairs (p, p + d/2), turned by rates [d/2] a position; sign -1 turns back."""
    half = t.shape[-1] // 2
    angle = np.arange(t.shape[-2])[:, None] * rates
    cos, sin = (x.astype(t.dtype) for x in (factor * np.cos(angle), factor * sign * np.sin(angle)))
    a, b = t[..., :half], t[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def of_queries(q, *tensors):
    """The key or value head of each query head."""
    return (np.repeat(t, q.shape[-3] // t.shape[-3], axis=-3) for t in tensors)


def attend(q, k, v, scale, sees, softcap=0, sinks=None, product=np.matmul):
    """O; then weights [..., H, S, S], slopes of the soft-cap, and the sinks' weights [..., H, S, 1], for attend_bwd."""
    k, v = of_queries(q, k, v)
    s, slope = product(q, k.swapaxes(-1, -2)) * scale, 1
    if softcap:
        bent = np.tanh(s / softcap)
        s, slope = softcap * bent, 1 - bent**2
    s = np.where(sees, s, -np.inf).astype(q.dtype)
    sink = -np.inf if sinks is None else sinks[:, None, None]
    most = np.maximum(s.max(axis=-1, keepdims=True), sink)
    p, p_sink = np.exp(s - most), np.exp(sink - most)
    total = p.sum(axis=-1, keepdims=True) + p_sink
    p /= total
    return product(p, v), p, slope, p_sink / total


def attend_bwd(q, k, v, dout, scale, kept):
    """dQ, dK, dV, and each row's term of the sinks' gradients, [..., H, S, 1]."""
    def summed(t, of):
        """Over the query heads of each key or value head."""
        return t.reshape(*of.shape[:-2], -1, *t.shape[-2:]).sum(axis=-3)

    _, p, slope, p_sink = kept
    kk, vv = of_queries(q, k, v)
    dp = dout @ vv.swapaxes(-1, -2)
    delta = (p * dp).sum(axis=-1, keepdims=True)
    ds = slope * p * (dp - delta) * scale
    return ds @ kk, summed(ds.swapaxes(-1, -2) @ q, k), summed(p.swapaxes(-1, -2) @ dout, v), -p_sink * delta

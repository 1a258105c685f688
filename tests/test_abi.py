#!/usr/bin/env python3
"""test_abi.py LIBRARY TOP [MPIRUN] -- the C ABI (examples/bindings) from Python: several ranks against attention in double precision

Gradients are compared with the formula, with options drawn at random too, and O and all gradients of every team and chunk with
those of one rank: O and dQ have the same bits. Two layers are in flight. Ranks that are processes have the bits of those that
are threads, and tensors in which Q, K and V lie together those of separate ones. With MPIRUN,
and a library that has MPI, each rank is one of its processes.
"""

import ctypes
import math
import mmap
import os
import random
import select
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), 'lib'))
from bindings import draw_call, wrong_borders  # pylint: disable=wrong-import-position
from checks import check, draws, end, needed, other_python, run_test  # pylint: disable=wrong-import-position
from launch import Mpi  # pylint: disable=wrong-import-position

try:
    import numpy as np
except ImportError:
    other_python()
    sys.exit('test_abi.py: no NumPy here to check results with: install python3-numpy')
from attention import attend, attend_bwd, visible  # pylint: disable=wrong-import-position

TOKENS, HEADS, KV, DIM = 13, 4, 2, 32
SIZES = {'tokens': TOKENS, 'heads': HEADS, 'kv_heads': KV, 'head_dim': DIM, 'causal': 1, 'layers': 2}


def floats(values):
    return (ctypes.c_float * len(values))(*values)


def oracle(*tensors, borders=(), sinks=None, **more):
    """O, dQ, dK, dV in f64 of q, k, v and dout, of a handle of SIZES and `more`; flat lists [batch][tokens][heads][head_dim]; and
    the sinks' gradients. borders: of packed sequences."""
    desc = {**SIZES, **more}
    batch, tokens, dim = desc.get('batch', 1), desc['tokens'], desc['head_dim']
    scale = desc.get('scale') or dim**-0.5
    q, k, v, dout = (np.array(t).reshape(batch, tokens, -1, dim).swapaxes(1, 2) for t in tensors)
    sees = visible(batch, tokens, desc['causal'], desc.get('window'), borders)[:, None]
    kept = attend(q, k, v, scale, sees, desc.get('softcap'), None if sinks is None else np.array(sinks))
    *found, dsinks = attend_bwd(q, k, v, dout, scale, kept)
    return [*(t.swapaxes(1, 2).ravel().tolist() for t in (kept[0], *found)), dsinks.sum((0, 2, 3)).tolist()][:5 if sinks else 4]


def run(abi, library, ranks, chunk, layers, borders=(), sinks=None, **more):
    """O, dQ, dK, dV of each layer as flat lists, and the sinks' gradients where there are some; layers are tuples q, k, v, dout."""
    u = abi.Attention(library, tokens=TOKENS, ranks=ranks, heads=HEADS, kv_heads=KV, head_dim=DIM, chunk=chunk, causal=1,
                      layers=len(layers), **more)
    results = [[[0.0] * len(t) for t in (q, q, k, v, sinks or ())][:5 if sinks else 4] for q, k, v, dout in layers]
    floats, values = (halves, of_halves) if more.get('dtype') else (globals()['floats'], list)

    def body(rank):
        first, count = u.rows(rank)
        widths = [HEADS * DIM, KV * DIM, KV * DIM, HEADS * DIM]
        mine = [[floats(t[first * w:(first + count) * w]) for t, w in zip(layer, widths)] for layer in layers]
        out = [[floats([math.nan] * len(t)) for t in (m[0], m[0], m[1], m[2])] for m in mine]
        for n, (m, r) in enumerate(zip(mine, out)):
            u.qkv_fwd(rank, r[0], m[0], m[1], m[2], layer=n, cu_seqlens=borders, sinks=sinks and floats(sinks))
        for n in reversed(range(len(layers))):
            (q, k, v, dout), (o, dq, dk, dv) = mine[n], out[n]
            dsinks = sinks and floats([0.0] * HEADS)
            u.qkv_bwd(rank, dq, dk, dv, dout, o, q, k, v, layer=n, cu_seqlens=borders, sinks=sinks and floats(sinks), dsinks=dsinks)
            if sinks:
                results[n][4] = [a + b for a, b in zip(results[n][4], dsinks)]
            for t, w, all_rows in zip(out[n], [HEADS * DIM, HEADS * DIM, KV * DIM, KV * DIM], results[n]):
                all_rows[first * w:(first + count) * w] = values(t)

    if 'rank' in more:
        body(more['rank'])
    else:
        u.run(body)
    u.close()
    return results


def halves(values):
    """bf16, to the nearest even."""
    bits = [struct.unpack('<I', struct.pack('<f', x))[0] for x in values]
    return (ctypes.c_uint16 * len(bits))(*((b + 0x7fff + (b >> 16 & 1)) >> 16 if b & 0x7fffffff <= 0x7f800000 else 0x7fc0 for b in bits))


def of_halves(numbers):
    return [struct.unpack('<f', struct.pack('<I', b << 16))[0] for b in numbers]


def in_process(body):
    """Runs body in a process; its id. The process ends with 0 if body says so."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = 0 if body() else 1
        finally:
            os._exit(status)  # pylint: disable=protected-access
    return pid


def same_in_processes(abi, library, layers, ranks=3):
    """Each rank is a process with two sockets to each other one."""
    want = run(abi, library, ranks, 4, layers, (0, 5, TOKENS), softcap=2.0)
    ends = {(r, p, which): None for r in range(ranks) for p in range(ranks) for which in range(2)}
    for r, p, which in ends:
        if r < p:
            ends[r, p, which], ends[p, r, which] = socket.socketpair()

    def body(rank):
        for (r, _, _), end_of in ends.items():
            if end_of and r != rank:
                end_of.close()
        fds = [[ends[rank, p, which].fileno() if p != rank else -1 for p in range(ranks)] for which in range(2)]
        got = run(abi, library, ranks, 4, layers, (0, 5, TOKENS), softcap=2.0, rank=rank, headers=fds[0], data=fds[1])
        # what other ranks have is zeros here
        return all(x in (0.0, y) for a, b in zip(got, want) for t, u in zip(a, b) for x, y in zip(t, u)) and any(got[0][0])

    pids = [in_process(lambda rank=rank: body(rank)) for rank in range(ranks)]
    check([os.waitpid(pid, 0)[1] for pid in pids] == [0] * ranks, 'ranks that are processes have other bits than threads')
    for end_of in ends.values():
        if end_of:
            end_of.close()
    refused(abi, lambda: abi.Attention(library, tokens=8, ranks=2, heads=4, head_dim=32, rank=2, headers=[0, 0], data=[0, 0]), 'rank 2 of')
    refused(abi, lambda: abi.Attention(library, tokens=8, ranks=2, heads=4, head_dim=32, rank=0, headers=[0], data=[0]), '2 ranks')
    with tempfile.TemporaryFile() as plain:
        fds = [-1, plain.fileno()]
        refused(abi, lambda: abi.Attention(library, tokens=8, ranks=2, heads=4, head_dim=32, rank=0, headers=fds, data=fds), 'no stream socket')
    socket_twice(abi, library)


def socket_twice(abi, library):
    """Found at the open, under whatever numbers, and in team and ring."""
    ends = sum((socket.socketpair() for _ in range(4)), ())
    a, b, c, d = (one.fileno() for one in ends[::2])
    again = os.dup(a)
    for ranks, ring, headers, data in ((2, 1, [-1, a], [-1, a]), (2, 1, [-1, a], [-1, again]), (3, 1, [-1, a, b], [-1, c, again]),
                                       (1, 3, [-1, a, b], [-1, c, a]), (2, 2, [-1, a, b, -1], [-1, c, again, -1])):
        began = time.monotonic()
        refused(abi, lambda ranks=ranks, ring=ring, headers=headers, data=data: abi.Attention(
            library, tokens=8, ranks=ranks, ring=ring, heads=4, head_dim=32, rank=0, headers=headers, data=data), 'are the same socket')
        check(time.monotonic() - began < 5, 'the same socket twice is found late')
    # places that are neither in team nor in ring are not read
    u = abi.Attention(library, tokens=8, ranks=2, ring=2, heads=4, head_dim=32, rank=0, headers=[a, a, b, a], data=[a, c, d, a])
    for one in ends[1::2]:
        one.shutdown(socket.SHUT_WR)
    u.close()
    for one in ends[1:5:2]:  # one of the team and one of the ring are told that the rank has gone
        check(select.select([one], [], [], 0)[0] and len(one.recv(4096)) > 0, 'a close without a goodbye')
    os.close(again)
    for one in ends:
        one.close()


# ---- rings, and tensors in which Q, K and V lie together ----

RINGS = [{'ring': 2}, {'ring': 2, 'ranks': 2, 'layout': 1}, {'ring': 4, 'ring_inner': 2, 'ring_mode': 1, 'layout': 2},
         {'ring': 2, 'ranks': 2, 'ring_mode': 2, 'layout': 1, 'chunk': 4}]


def calls(library):
    """The library, told what its calls take."""
    lib = ctypes.CDLL(library)
    p, i, n = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
    for name, result, given in (('open', p, [p, p, n]), ('open_sockets', p, [p, i, p, p, p, n]), ('open_mpi', p, [p, p, p, n]),
                                ('open_nccl', p, [p, p, p, n]), ('open_nccl_id', p, [p, i, p, p, n]), ('nccl_id', i, [p, p, n]),
                                ('rows', ctypes.c_int64, [p, i, p]), ('positions', i, [p, i, p]), ('stream', i, [p, i, p]),
                                ('pack', i, [p, i, p, ctypes.c_int64]), ('abort', i, [p, i, ctypes.c_char_p]),
                                ('sync', i, [p, i]), ('qkv_fwd', i, [p, i, i] + 4 * [p]), ('qkv_bwd', i, [p, i, i] + 8 * [p]),
                                ('fused_fwd', i, [p, i, i, p, p]), ('fused_bwd', i, [p, i, i] + 4 * [p]),
                                ('sbh3d_fwd', i, [p, i, i, p, p, i, i]), ('sbh3d_bwd', i, [p, i, i] + 4 * [p] + [i, i]),
                                ('drop', i, [p, i, i]), ('error', ctypes.c_char_p, [p, i]), ('close', i, [p])):
        call = getattr(lib, 'upipe_abi_' + name)
        call.restype, call.argtypes = result, given
    return lib


def described(abi, **more):
    return abi.Desc(**{**SIZES, **more})


def opened(handle, why):
    check(handle is not None, f'not open: {why.value.decode()}')
    return handle


def ask(lib, u, rank, status):
    check(status == 0, f'rank {rank}: {lib.upipe_abi_error(u, rank).decode()}')


def one_rank(lib, u, rank, layer):
    """The rank's positions, and its rows of O, dQ, dK and dV: of separate tensors, then of fused ones, which have the same bits."""
    positions = (ctypes.c_int64 * lib.upipe_abi_rows(u, rank, None))()
    ask(lib, u, rank, lib.upipe_abi_positions(u, rank, positions))
    widths = [HEADS * DIM, KV * DIM, KV * DIM, HEADS * DIM]
    rows = [[t[at * w:(at + 1) * w] for at in positions] for t, w in zip(layer, widths)]
    q, k, v, dout = [floats(sum(t, [])) for t in rows]
    o, dq, dk, dv = [floats([math.nan] * len(t)) for t in (q, q, k, v)]
    ask(lib, u, rank, lib.upipe_abi_qkv_fwd(u, rank, 0, o, q, k, v))
    ask(lib, u, rank, lib.upipe_abi_qkv_bwd(u, rank, 0, dq, dk, dv, dout, o, q, k, v))
    qkv = floats(sum((sum(three, []) for three in zip(*rows[:3])), []))
    fused_o, dqkv = floats([math.nan] * len(o)), floats([math.nan] * len(qkv))
    ask(lib, u, rank, lib.upipe_abi_fused_fwd(u, rank, 1, fused_o, qkv))
    ask(lib, u, rank, lib.upipe_abi_fused_bwd(u, rank, 1, dqkv, dout, fused_o, qkv))
    ask(lib, u, rank, lib.upipe_abi_sync(u, rank))
    apart = [[t[i * w:(i + 1) * w] for i in range(len(positions))] for t, w in zip((dq, dk, dv), widths)]
    check(list(fused_o) == list(o) and list(dqkv) == sum((sum(three, []) for three in zip(*apart)), []),
          f'rank {rank}: fused tensors have other bits')
    return list(positions), [list(t) for t in (o, dq, dk, dv)]


def held_to(want, positions, got, what):
    """A rank's rows of O and gradients."""
    for name, w, t, width in zip(('o', 'dq', 'dk', 'dv'), want, got, (HEADS * DIM, HEADS * DIM, KV * DIM, KV * DIM)):
        off = max(abs(t[i * width + c] - w[at * width + c]) for i, at in enumerate(positions) for c in range(width))
        check(off < 5e-6, f'{what}: {name} is off by {off:.3g}')


def rings(abi, library, layer):
    lib, why, want = calls(library), ctypes.create_string_buffer(256), oracle(*layer)
    for more in RINGS:
        u, got = abi.Attention(library, **SIZES, **more), {}

        def body(rank, u=u, got=got):
            got[rank] = one_rank(lib, u.handle, rank, layer)

        u.run(body)
        for rank in range(more['ring'] * more.get('ranks', 1)):
            held_to(want, *got[rank], f'{more}, rank {rank}')
            check(u.positions(rank) == got[rank][0], f'{more}: positions of rank {rank}: {u.positions(rank)}')
        check(sorted(sum((positions for positions, _ in got.values()), [])) == list(range(TOKENS)), f'{more}: positions {got}')
        refused(abi, lambda u=u: u.positions(u.ranks), f'rank {u.ranks} of {len(got)}')
        u.close()
    for more, words in (({'ring': -1}, b'a ring of -1'), ({'ring': 1025}, b'a ring of 1025'), ({'ring': 2, 'layout': 7}, b'layout'),
                        ({'ring': 2, 'ring_mode': 9}, b'mode'), ({'ring': 4, 'ring_inner': 3}, b'inner'), ({'ring': 8}, b'13')):
        check(lib.upipe_abi_open(ctypes.byref(described(abi, **{'layout': 1, **more})), why, len(why)) is None and words in why.value,
              f'{more}: {why.value}')
    over_sockets(abi, library, lib, layer, want)


def over_sockets(abi, library, lib, layer, want):
    """A team and a ring of two, each rank a process."""
    ranks, ends = 4, {}
    for r in range(ranks):
        for p in range(r):
            for which in range(2):
                ends[r, p, which], ends[p, r, which] = socket.socketpair()

    def body(rank):
        fds = [[ends[rank, p, which].fileno() if p != rank else -1 for p in range(ranks)] for which in range(2)]
        for at, end_of in ends.items():
            if at[0] != rank:
                end_of.close()
        u = abi.Attention(library, rank=rank, headers=fds[0], data=fds[1], **SIZES, **RINGS[1])
        held_to(want, *one_rank(lib, u.handle, rank, layer), f'sockets, rank {rank}')
        return lib.upipe_abi_close(u.handle) == 0 and end('abi') == 0

    pids = [in_process(lambda rank=rank: body(rank)) for rank in range(ranks)]
    check([os.waitpid(pid, 0)[1] for pid in pids] == [0] * ranks, 'a ring of processes')
    for end_of in ends.values():
        end_of.close()


def sbh3d(abi, library, layer):
    """[T][B][H][3][d], sequence by sequence, has the bits of separate tensors."""
    lib, why, batch = calls(library), ctypes.create_string_buffer(256), 2
    q, dout = layer[0], layer[3]
    k, v = q[1:] + q[:1], q[2:] + q[:2]
    u = opened(lib.upipe_abi_open(ctypes.byref(described(abi, kv_heads=HEADS, layers=3)), why, len(why)), why)
    qkv = [math.nan] * (TOKENS * batch * HEADS * 3 * DIM)
    o, d = floats([math.nan] * (TOKENS * batch * HEADS * DIM)), [math.nan] * (TOKENS * batch * HEADS * DIM)
    for t in range(TOKENS):
        for b in range(batch):
            for h in range(HEADS):
                to, of = ((t * batch + b) * HEADS + h) * DIM, (t * HEADS + h) * DIM
                d[to:to + DIM] = [x * (b + 1) for x in dout[of:of + DIM]]
                for n, x in enumerate((q, k, v)):
                    qkv[3 * to + n * DIM:3 * to + (n + 1) * DIM] = [y * (b + 1) for y in x[of:of + DIM]]
    qkv, d, dqkv = floats(qkv), floats(d), floats([math.nan] * len(qkv))
    for b in range(batch):
        ask(lib, u, 0, lib.upipe_abi_sbh3d_fwd(u, 0, b, o, qkv, batch, b))
    for b in range(batch):
        ask(lib, u, 0, lib.upipe_abi_sbh3d_bwd(u, 0, b, dqkv, d, o, qkv, batch, b))
        one = [floats([x * (b + 1) for x in t]) for t in (q, k, v, dout)]
        out = [floats([math.nan] * len(q)) for _ in range(4)]
        ask(lib, u, 0, lib.upipe_abi_qkv_fwd(u, 0, 2, out[0], *one[:3]))
        ask(lib, u, 0, lib.upipe_abi_qkv_bwd(u, 0, 2, *out[1:], one[3], out[0], *one[:3]))
        same = True
        for t in range(TOKENS):
            for h in range(HEADS):
                to, of = ((t * batch + b) * HEADS + h) * DIM, (t * HEADS + h) * DIM
                same &= o[to:to + DIM] == out[0][of:of + DIM]
                same &= all(dqkv[3 * to + n * DIM:3 * to + (n + 1) * DIM] == out[1 + n][of:of + DIM] for n in range(3))
        check(same, f'sequence {b} of [T][B][H][3][d] has other bits')
    check(lib.upipe_abi_sbh3d_fwd(u, 0, 0, o, qkv, batch, 2) != 0 and b'sequence 2 of 2' in lib.upipe_abi_error(u, 0), 'sequence 2')
    lib.upipe_abi_close(u)
    for more, words in ({'batch': 2, 'kv_heads': HEADS}, b'batch 2, not 1'), ({}, b'as many heads'):
        u = opened(lib.upipe_abi_open(ctypes.byref(described(abi, **more)), why, len(why)), why)
        check(lib.upipe_abi_sbh3d_fwd(u, 0, 0, o, qkv, 2, 0) != 0 and words in lib.upipe_abi_error(u, 0), lib.upipe_abi_error(u, 0))
        lib.upipe_abi_close(u)


def in_a_call(lib, u, rank, statuses):
    """A thread that is in a forward of the rank, whose status it will leave."""
    tensors = [floats([0.5] * 4 * 4 * 32) for _ in range(4)]

    def body():
        statuses.append(lib.upipe_abi_qkv_fwd(u, rank, 0, *tensors))
        while statuses[-1] != 0 and b'another thread' in lib.upipe_abi_error(u, rank):  # the one that asks below
            statuses[-1] = lib.upipe_abi_qkv_fwd(u, rank, 0, *tensors)

    thread, until = threading.Thread(target=body), time.monotonic() + 30
    thread.start()
    while lib.upipe_abi_drop(u, rank, 0) == 0 or b'another thread' not in lib.upipe_abi_error(u, rank):
        needed(time.monotonic() < until, 'a rank is in a call of two threads')
        time.sleep(0.001)
    return thread


def closed_early(abi, library):
    """A close under a call of another thread leaves that call's sentence alone."""
    lib, why, statuses = calls(library), ctypes.create_string_buffer(256), []
    u = opened(lib.upipe_abi_open(ctypes.byref(abi.Desc(tokens=8, ranks=2, heads=4, head_dim=32)), why, len(why)), why)
    thread = in_a_call(lib, u, 1, statuses)
    check(lib.upipe_abi_error(u, 0) == b'', f'rank 0 is told what became of a call of rank 1: {lib.upipe_abi_error(u, 0)}')
    check(lib.upipe_abi_drop(u, 0, 0) != 0 and lib.upipe_abi_close(u) != 0, 'a handle is closed under a call')
    check(lib.upipe_abi_rows(u, 1, None) == 4, 'a rank that is in a call is asked for its rows')
    lib.upipe_abi_abort(u, 0, b'rank 0 has left')
    thread.join()
    check(statuses[-1] != 0 and b'rank 0 has left' in lib.upipe_abi_error(u, 1),
          f'a refused close in place of a sentence: {lib.upipe_abi_error(u, 1)}')
    check(lib.upipe_abi_close(u) == 0, 'the close')


def misplaced(abi, library):
    """Calls on another thread, in a forked process, on a stream; and what this library was built without."""
    lib, why = calls(library), ctypes.create_string_buffer(256)
    desc = abi.Desc(tokens=8, ranks=2, heads=4, head_dim=32)
    u = opened(lib.upipe_abi_open(ctypes.byref(desc), why, len(why)), why)
    tensors, statuses = [floats([0.5] * 4 * 4 * 32) for _ in range(4)], []
    thread = in_a_call(lib, u, 0, statuses)
    check(lib.upipe_abi_close(u) != 0, 'a handle is closed under a call')
    ask(lib, u, 1, lib.upipe_abi_qkv_fwd(u, 1, 0, *tensors))
    thread.join()
    check(statuses == [0], f'a forward on a thread of its own: {statuses}')
    ask(lib, u, 0, lib.upipe_abi_drop(u, 0, 0))
    check(lib.upipe_abi_positions(u, 2, None) != 0, 'positions of nobody')
    check(lib.upipe_abi_positions(u, 0, None) != 0 and b'positions is NULL' in lib.upipe_abi_error(u, 0), 'positions for nobody')
    forked = in_process(lambda: lib.upipe_abi_close(u) != 0 and b'forked' in lib.upipe_abi_error(u, 0))
    check(os.waitpid(forked, 0)[1] == 0, 'a handle is closed behind a fork')
    check(lib.upipe_abi_fused_fwd(u, 0, 0, tensors[0], None) != 0 and b'a tensor is NULL' in lib.upipe_abi_error(u, 0), 'no tensor')
    check(lib.upipe_abi_close(u) == 0, 'the close')
    u = opened(lib.upipe_abi_open(ctypes.byref(desc), why, len(why)), why)
    ask(lib, u, 0, lib.upipe_abi_stream(u, 0, None))
    check(lib.upipe_abi_stream(u, 0, 1) != 0 and b'computes on the CPU' in lib.upipe_abi_error(u, 0), 'a stream on the CPU')
    lib.upipe_abi_close(u)
    at = ctypes.byref(desc)
    for call, words in ((lambda: lib.upipe_abi_open_nccl(at, 1, why, len(why)), b'without NCCL'),
                        (lambda: lib.upipe_abi_open_nccl_id(at, 0, None, why, len(why)), b'id, is NULL')):
        check(call() is None and words in why.value, why.value)
    small = {'tokens': 8, 'heads': 4, 'head_dim': 32}
    refused(abi, lambda: abi.Attention(library, mpi=True, **small), 'without MPI')
    refused(abi, lambda: abi.Attention(library, rank=0, nccl_id=bytes(128), **small), 'without NCCL')
    refused(abi, lambda: abi.Attention(library, rank=0, nccl_id=bytes(127), **small), '127 bytes, not 128')
    refused(abi, lambda: abi.draw_nccl_id(library), 'without NCCL')


def by_mpi(abi, library, layer):
    """This process is one of MPI's; its sentences go to the launcher."""
    lib, want = calls(library), oracle(*layer)
    refused(abi, lambda: abi.Attention(library, mpi=True, **SIZES), 'not running')
    check(lib.MPI_Init(None, None) == 0, 'MPI does not start')
    for more in {'ranks': 4}, *RINGS[1:]:
        u = abi.Attention(library, mpi=True, **SIZES, **more)
        check(len(u.ranks_here) == 1, f'ranks {u.ranks_here} are here')
        held_to(want, *one_rank(lib, u.handle, u.ranks_here[0], layer), f'MPI, {more}, rank {u.ranks_here[0]}')
        check(lib.upipe_abi_close(u.handle) == 0, 'close')
    refused(abi, lambda: abi.Attention(library, mpi=True, **SIZES, ranks=3), '4 ranks, and a description of 3')
    lib.MPI_Finalize()


# ---- options drawn at random ----


def drawn(abi, library):
    """Every option beside every other one, packed sequences in batches too, against the oracle on the same numbers."""
    for seed in draws(10):
        draw = random.Random(seed)
        desc, borders = draw_call(draw)
        rows = desc['batch'] * desc['tokens']
        widths = [desc[name] * desc['head_dim'] for name in ('heads', 'kv_heads', 'kv_heads', 'heads')]
        to, back = (halves, of_halves) if desc['dtype'] else (floats, list)
        tensors = [back(to([draw.gauss(0, 1) for _ in range(rows * width)])) for width in widths]
        u, outs = abi.Attention(library, **desc), [widths[0], *widths[:3]]
        got = [[math.nan] * (rows * width) for width in outs]

        def body(rank, u=u, desc=desc, borders=borders, widths=widths, outs=outs, tensors=tensors, got=got, to=to, back=back):
            at = [b * desc['tokens'] + position for b in range(desc['batch']) for position in u.positions(rank)]
            q, k, v, dout = (to(sum((t[i * w:(i + 1) * w] for i in at), [])) for t, w in zip(tensors, widths))
            out = [to([math.nan] * (len(at) * w)) for w in outs]
            u.qkv_fwd(rank, out[0], q, k, v, cu_seqlens=borders)
            u.qkv_bwd(rank, *out[1:], dout, out[0], q, k, v, cu_seqlens=borders)
            for whole, part, w in zip(got, map(back, out), outs):
                for n, i in enumerate(at):
                    whole[i * w:(i + 1) * w] = part[n * w:(n + 1) * w]

        u.run(body)
        u.close()
        for name, t, want in zip(('o', 'dq', 'dk', 'dv'), got, oracle(*tensors, borders=borders, **desc)):
            off, most = max(map(abs, map(float.__sub__, t, want))), max(1, *map(abs, want))
            check(off <= most * (1 / 64 if desc['dtype'] else 5e-6), f'{desc}, borders {borders}: {name} is off by {off:.3g} of {most:.3g}')


# ---- what a caller may ask, and what is refused ----


# (field of a description, value, words of the refusal)
MISTAKES = [('tokens', 0, 'tokens 0'), ('tokens', -1, 'tokens -1'), ('tokens', 2**62, '4611686018427387904 tokens'), ('batch', -1, 'batch -1'),
            ('batch', 2**62, '4611686018427387904 sequences'), ('window', -1, 'a window of -1'), ('ranks', -1, '-1 ranks, at most 1024'),
            ('heads', 0, 'heads 0'), ('heads', 3, '3 query heads'), ('kv_heads', -1, 'kv heads -1'), ('kv_heads', 3, '3 key/value heads'),
            ('head_dim', 0, 'head dim 0'), ('head_dim', 7, 'head dim 7'), ('head_dim', 512, 'head dim 512'), ('chunk', -1, 'chunk -1'),
            ('chunk', 5, 'a chunk of 5 of 4'), ('layers', -1, '-1 layers'), ('scale', -1.0, 'scale -1'), ('scale', math.nan, 'scale nan'),
            ('scale', math.inf, 'scale inf'), ('softcap', -1.0, 'soft-cap -1'), ('softcap', math.nan, 'soft-cap nan'),
            ('softcap', 1e38, 'soft-cap 1e+38'), ('dtype', 2, 'dtype 2'), ('dtype', -1, 'dtype -1'), ('ring', 14, 'fewer than 14'),
            ('ring_mode', 3, 'ring mode 3'), ('ring_inner', -1, 'inner -1'), ('layout', 3, 'layout 3'), ('causl', 1, 'no such option: causl')]


def mistaken(abi, library):
    """Each field of a description, and each tensor that is missing."""
    for name, value, words in MISTAKES:
        refused(abi, lambda name=name, value=value: abi.Attention(library, **{**SIZES, 'ring': 2, name: value}), words)
    t = floats([0.5] * TOKENS * HEADS * DIM)
    for at, name in enumerate(('o', 'q', 'k', 'v')):
        u = abi.Attention(library, **SIZES)
        refused(abi, lambda u=u, at=at: u.qkv_fwd(0, *at * [t], None, *(3 - at) * [t]), f'{name} is NULL')
        u.close()
    for at, name in enumerate(('dout', 'o', 'q', 'k', 'v'), 3):
        u = abi.Attention(library, **SIZES)
        u.qkv_fwd(0, t, t, t, t)
        refused(abi, lambda u=u, at=at: u.qkv_bwd(0, *at * [t], None, *(7 - at) * [t]), f'{name} is NULL')
        u.close()


def packed_wrongly(abi, library):
    """Borders that are none of the flattened batch's, by Python and by C, whose n is more than the array holds."""
    t = floats([0.5] * 2 * TOKENS * HEADS * DIM)
    for batch, borders, words in wrong_borders(TOKENS):
        u = abi.Attention(library, **SIZES, batch=batch)
        refused(abi, lambda u=u, borders=borders: u.qkv_fwd(0, t, t, t, t, cu_seqlens=borders), words)
        u.close()
    for borders, words in (([0, 2**64 + TOKENS], 'cu_seqlens holds 18446744073709551629'), ([0, 6.5, TOKENS], 'cu_seqlens holds what is no'),
                           (['0', TOKENS], 'cu_seqlens holds what is no integer')):
        u = abi.Attention(library, **SIZES)
        refused(abi, lambda u=u, borders=borders: u.qkv_fwd(0, t, t, t, t, cu_seqlens=borders), words)
        u.close()
    lib, page, none = calls(library), mmap.PAGESIZE, ctypes.c_int64 * 0
    memory = mmap.mmap(-1, 2 * page)
    at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    check(ctypes.CDLL(None).mprotect(ctypes.c_void_p(at + page), ctypes.c_size_t(page), 0) == 0, 'no page that nobody may read')
    array = (ctypes.c_int64 * 3).from_address(at + page - 24)
    array[:] = 0, 5, TOKENS

    def answers():
        """A process, as one that reads behind the array ends there."""
        for n in 3, 1000, 2**60, 2**63 - 1, 1, -1, -2**63:
            u = abi.Attention(library, **SIZES)
            check(lib.upipe_abi_pack(u.handle, 0, array, n) != 0 and f'{n}'.encode() in lib.upipe_abi_error(u.handle, 0),
                  f'n {n}: {lib.upipe_abi_error(u.handle, 0)}')
            u.close()
        u = abi.Attention(library, **SIZES)
        for borders, n in (array, 2), (None, 0):
            ask(lib, u.handle, 0, lib.upipe_abi_pack(u.handle, 0, borders, n))
        for borders, n in (none(), 0), (None, 2):
            check(lib.upipe_abi_pack(u.handle, 0, borders, n) != 0, f'{n} packed sequences of {borders}')
        u.close()
        return end('abi') == 0

    check(os.waitpid(in_process(answers), 0)[1] == 0, 'a wrong number of packed sequences')


def asked(abi, library):
    """What a caller may ask: the version, what there is, what a handle needs; and what is refused."""
    u = abi.Attention(library, tokens=8, ranks=2, heads=4, head_dim=32, layers=3)
    lib, why = u.lib, ctypes.create_string_buffer(256)
    check(lib.upipe_abi_version() >= 100, f'version {lib.upipe_abi_version()}')
    for name in 'cpu f32 bf16 window softcap cu_seqlens threads sockets ring zigzag striped fused sbh3d sinks'.split():
        check(abi.can(library, name), name)
    check(not any(abi.can(library, name) for name in ('cuda', 'nccl', 'mpi')), 'it has what it was built without')
    check(lib.upipe_abi_can(b'teleport') == 0 and lib.upipe_abi_can(None) == 0, 'it has what there is not')
    for rank in range(2):
        check(lib.upipe_abi_need(ctypes.byref(u.desc), rank, why, len(why)) == u.bytes(rank), f'what rank {rank} needs: {why.value}')
    check(lib.upipe_abi_need(ctypes.byref(u.desc), 2, why, len(why)) == -1 and b'rank 2 of 2' in why.value, why.value)
    check(lib.upipe_abi_need(None, 0, why, len(why)) == -1 and b'desc is NULL' in why.value, why.value)
    huge = abi.Desc(tokens=2**40, ranks=8, heads=64, head_dim=128)
    check(lib.upipe_abi_need(ctypes.byref(huge), 0, why, len(why)) > 2**40, f'what nobody has: {why.value}')
    refused(abi, lambda: abi.Attention(library, tokens=8, heads=4, head_dim=32, dtype=2), 'dtype 2; 0 is f32')
    u.close()
    t = floats([0.5] * 8 * 4 * 32)
    for other in [0, 8], [0, 5, 8]:
        u = abi.Attention(library, tokens=8, heads=4, head_dim=32, causal=1)
        u.qkv_fwd(0, t, t, t, t, cu_seqlens=[0, 4, 8])
        refused(abi, lambda u=u, other=other: u.qkv_bwd(0, t, t, t, t, t, t, t, t, cu_seqlens=other), 'of the forward')
        u.close()
    u = abi.Attention(library, tokens=8, heads=4, head_dim=32, causal=1)
    u.qkv_fwd(0, t, t, t, t, cu_seqlens=[0, 4, 8])
    u.qkv_bwd(0, t, t, t, t, t, t, t, t, cu_seqlens=(0, 4, 8, 8))
    u.qkv_fwd(0, t, t, t, t)  # none, in place of those of the call before
    u.qkv_bwd(0, t, t, t, t, t, t, t, t, cu_seqlens=[])
    u.close()
    u = abi.Attention(library, tokens=8, heads=4, head_dim=32)

    def forked():
        return lib.upipe_abi_qkv_fwd(u.handle, 0, 0, t, t, t, t) != 0 and b'forked' in lib.upipe_abi_error(u.handle, 0)

    check(os.waitpid(in_process(forked), 0)[1] == 0, 'a handle is used behind a fork')
    u.qkv_fwd(0, t, t, t, t)
    u.close()


def kept_elsewhere(abi, library, layer):
    """What a forward leaves waits in the caller's memory: the same bits, twice, and another forward has its layer meanwhile."""
    q, k, v, dout = (floats(t) for t in layer)
    want = run(abi, library, 1, 0, [layer])[0]
    u = abi.Attention(library, tokens=TOKENS, heads=HEADS, kv_heads=KV, head_dim=DIM, causal=1)
    out = [floats([math.nan] * len(t)) for t in (q, q, k, v)]
    saved, none = (ctypes.c_char * u.saved_bytes(0))(), floats([0.0] * len(q))
    u.qkv_fwd(0, out[0], q, k, v)
    u.save(0, saved)
    u.qkv_fwd(0, none, none, none, none)
    u.drop(0)
    for _ in range(2):
        out[1:] = (floats([math.nan] * len(t)) for t in out[1:])
        u.restore(0, saved)
        u.qkv_bwd(0, *out[1:], dout, out[0], q, k, v)
        check([list(t) for t in out] == want, 'a forward that waited elsewhere has other bits')
    refused(abi, lambda: u.save(0, saved), 'nothing to save')
    u.close()
    u = abi.Attention(library, tokens=TOKENS, heads=HEADS, head_dim=DIM)
    u.qkv_fwd(0, none, none, none, none)
    refused(abi, lambda: u.restore(0, saved), 'is before its backward')
    refused(abi, lambda: u.qkv_fwd(0, none, none, none, none), 'or again before its backward')
    u.close()


DESCRIPTIONS = [{'tokens': 13, 'heads': 6, 'kv_heads': 3, 'head_dim': 32, 'causal': 1}, {'tokens': 5, 'heads': 3, 'head_dim': 64, 'batch': 2},
                {'tokens': 40, 'heads': 6, 'head_dim': 32, 'dtype': 1, 'window': 7}, {'tokens': 13, 'heads': 6, 'head_dim': 32, 'chunk': 6}]


def forward_of(u, rank, desc, layer=0):
    """A forward with numbers of the rank's own, and all that its backward takes."""
    size = u.rows(rank)[1] * desc.get('batch', 1) * desc['head_dim'] // (2 if desc.get('dtype') else 1)
    q, o, k, v = (floats([math.sin(rank + 0.1 * i * n) for i in range(size * heads)]) for n, heads in
                  enumerate([desc['heads']] * 2 + [desc.get('kv_heads', desc['heads'])] * 2, 1))
    u.qkv_fwd(rank, o, q, k, v, layer=layer)
    return o, q, k, v


def backward_of(u, rank, kept, layer=0):
    """The bytes of O and all gradients."""
    o, q, k, v = kept
    out = [floats([math.nan] * len(t)) for t in (q, k, v)]
    u.qkv_bwd(rank, *out, q, o, q, k, v, layer=layer)
    return [bytes(t) for t in (o, *out)]


def redescribed(abi, library):
    """One team for all descriptions, in turns: the bits of handles of their own, and a slab of the largest."""
    for ranks in 1, 3:
        want, most = {}, [0] * ranks
        for n, desc in enumerate(DESCRIPTIONS):
            u = abi.Attention(library, ranks=ranks, **desc)
            u.run(lambda rank: want.update({(n, rank): backward_of(u, rank, forward_of(u, rank, desc))}))  # pylint: disable=cell-var-from-loop
            most = [max(b, u.bytes(rank)) for rank, b in enumerate(most)]
            u.close()
        u = abi.Attention(library, ranks=ranks)
        check([u.bytes(rank) for rank in range(ranks)] == ranks * [0], 'a team has a slab')

        def body(rank):
            waiting = []
            for n in 0, 1, 2, 3, 0, 2, 1, 3, 3:
                u.describe(rank, **DESCRIPTIONS[n])  # pylint: disable=cell-var-from-loop
                kept = forward_of(u, rank, DESCRIPTIONS[n])
                if n % 2:
                    saved = (ctypes.c_char * u.saved_bytes(rank))()
                    u.save(rank, saved)
                    waiting.append((n, kept, saved))
                else:
                    check(backward_of(u, rank, kept) == want[n, rank], f'description {n} has other bits')  # pylint: disable=cell-var-from-loop
            while waiting:
                n, kept, saved = waiting.pop()
                u.describe(rank, **DESCRIPTIONS[n])
                u.restore(rank, saved)
                check(backward_of(u, rank, kept) == want[n, rank], f'a backward of description {n} has other bits')  # pylint: disable=cell-var-from-loop

        u.run(body)
        check([u.bytes(rank) for rank in range(ranks)] == most, f'slabs {[u.bytes(r) for r in range(ranks)]}, not {most}')
        u.close()


def described_wrongly(abi, library):
    """Each ends its handle."""
    t, desc = floats([0.5] * 8 * 4 * 32), {'tokens': 8, 'heads': 4, 'head_dim': 32}
    for words, what in (('rank 0 has no description yet', lambda u: u.qkv_fwd(0, t, t, t, t)),
                        ('has no description yet', lambda u: u.restore(0, t)),
                        ('2 ranks and a ring of 1, and the handle has 1 and 1', lambda u: u.describe(0, **desc, ranks=2)),
                        ('dtype 2; 0 is f32', lambda u: u.describe(0, **desc, dtype=2)),
                        ('tokens', lambda u: u.describe(0, heads=4, head_dim=32)),
                        ('is 4294967304, which its 32 bits', lambda u: u.describe(0, **{**desc, 'heads': 2**32 + 8})),
                        ('no such option: wndow', lambda u: u.describe(0, **desc, wndow=3))):
        u = abi.Attention(library)
        refused(abi, lambda u=u, what=what: what(u), words)
        u.close()
    refused(abi, lambda: abi.Attention(library, heads=4, head_dim=32), 'tokens')
    u = abi.Attention(library, **desc)
    u.qkv_fwd(0, t, t, t, t)
    u.describe(0, **desc)  # the same
    refused(abi, lambda: u.describe(0, **{**desc, 'tokens': 7}), 'another description before the backward of a forward')
    u.close()
    u, said = abi.Attention(library, ranks=2), []

    def body(rank):
        try:
            u.describe(rank, **desc, window=rank)
            u.qkv_fwd(rank, t, t, t, t)
        except abi.Error as error:
            said.append(str(error))

    u.run(body)
    u.close()
    check(said == 2 * ['window is 0 on rank 0 and 1 on rank 1'], f'{said}')


def masked(abi, library, layer):
    """A soft-cap, packed sequences, and bf16: against the oracle on the same numbers."""
    for softcap, borders in (2.0, ()), (0.0, (0, 5, 6, TOKENS)), (2.0, (0, 5, 6, TOKENS)):
        want = oracle(*layer, borders=borders, softcap=softcap)
        for ranks in 1, 3:
            got = run(abi, library, ranks, 0, [layer], borders, softcap=softcap)[0]
            off = max(abs(a - b) for t, w in zip(got, want) for a, b in zip(t, w, strict=True))
            check(off < 5e-6, f'soft-cap {softcap}, sequences {borders}, C {ranks}: off by {off:.3g}')
    sinks = [0.3 * head - 1 for head in range(HEADS)]
    want = oracle(*layer, borders=(0, 5, TOKENS), softcap=2.0, sinks=sinks)
    for ranks in 1, 3:
        got = run(abi, library, ranks, 0, [layer], (0, 5, TOKENS), sinks, softcap=2.0)[0]
        off = max(abs(a - b) for t, w in zip(got, want, strict=True) for a, b in zip(t, w, strict=True))
        check(off < 5e-6, f'sinks, C {ranks}: off by {off:.3g}')
    narrow = [of_halves(halves(t)) for t in layer]
    want = oracle(*narrow)
    for ranks in 1, 3:
        got = run(abi, library, ranks, 0, [narrow], dtype=1)[0]
        for name, t, w in zip(('o', 'dq', 'dk', 'dv'), got, want):
            off, most = max(abs(a - b) for a, b in zip(t, w, strict=True)), max(map(abs, w))
            check(off <= most / 64, f'bf16, C {ranks}: {name} is off by {off:.3g} of {most:.3g}')


def refused(abi, what, words):
    try:
        what()
    except abi.Error as error:
        check(words in str(error), f'"{error}" does not say "{words}"')
    else:
        check(False, f'not refused: "{words}"')


def misused(abi, library):
    """What a caller gets wrong in the C calls themselves."""
    u = abi.Attention(library, tokens=8, ranks=2, heads=4, head_dim=32)
    lib, own, first = u.lib, u.handle, ctypes.c_int64()

    def says(handle, rank, words):
        text = lib.upipe_abi_error(handle, rank).decode()
        check(words in text, f'"{text}" does not say "{words}"')

    def all_refused(handle, rank, words):
        t = floats([0.0] * 8 * 4 * 32)
        check(lib.upipe_abi_rows(handle, rank, ctypes.byref(first)) == -1, f'rows of {handle}, rank {rank}')
        check(lib.upipe_abi_bytes(handle, rank) == -1, f'bytes of {handle}, rank {rank}')
        check(lib.upipe_abi_saved_bytes(handle, rank) == -1, f'saved bytes of {handle}, rank {rank}')
        check(lib.upipe_abi_describe(handle, rank, ctypes.byref(u.desc)) != 0, f'description of {handle}, rank {rank}')
        check(lib.upipe_abi_sinks(handle, rank, t, t) != 0, f'sinks of {handle}, rank {rank}')
        check(lib.upipe_abi_drop(handle, rank, 0) != 0, f'drop of {handle}, rank {rank}')
        check(lib.upipe_abi_save(handle, rank, 0, t) != 0, f'save of {handle}, rank {rank}')
        check(lib.upipe_abi_restore(handle, rank, 0, t) != 0, f'restore of {handle}, rank {rank}')
        check(lib.upipe_abi_qkv_fwd(handle, rank, 0, t, t, t, t) != 0, f'forward of {handle}, rank {rank}')
        check(lib.upipe_abi_qkv_bwd(handle, rank, 0, t, t, t, t, t, t, t, t) != 0, f'backward of {handle}, rank {rank}')
        check(lib.upipe_abi_abort(handle, rank, None) != 0, f'abort of {handle}, rank {rank}')
        says(handle, rank, words)

    check(lib.upipe_abi_rows(own, 1, None) == 4, 'rows without a place for the first one')
    all_refused(None, 0, 'the handle is NULL')
    all_refused(own + 1000, 0, 'never open')
    for rank in -1, 2, 2**31 - 1, -2**31:
        all_refused(own, rank, 'no rank of this number')
    why = ctypes.create_string_buffer(256)
    check(lib.upipe_abi_open(None, why, len(why)) is None and b'desc is NULL' in why.value, why.value)
    desc = abi.Desc(tokens=8, heads=3, kv_heads=2, head_dim=32)
    check(lib.upipe_abi_open(ctypes.byref(desc), None, 256) is None, 'no place for the sentence')
    check(lib.upipe_abi_open(ctypes.byref(desc), why, 0) is None, 'no bytes for the sentence')
    for ranks in 1025, 2**31 - 1:
        refused(abi, lambda ranks=ranks: abi.Attention(library, tokens=2**20, heads=4, head_dim=32, ranks=ranks),
                f'{ranks} ranks, at most 1024')

    def one_is_wrong(rank):
        t = floats([0.0] * 8 * 4 * 32)
        status = lib.upipe_abi_qkv_fwd(own, 7 if rank == 1 else rank, 0, t, t, t, t)
        check(status != 0, f'rank {rank} is not told')

    u.close()
    u = abi.Attention(library, tokens=8, ranks=2, heads=4, head_dim=32)
    own = u.handle
    began = time.monotonic()
    u.run(one_is_wrong)
    check(time.monotonic() - began < 30, 'a rank waits for one that called as another')
    says(own, 0, 'a call of rank 7 of 2')
    check(lib.upipe_abi_close(None) == 0, 'NULL is closed')
    check(lib.upipe_abi_close(own) == 0, 'the first close')
    check(lib.upipe_abi_close(own) != 0, 'the second close')
    all_refused(own, 0, 'the handle is closed')
    again = abi.Attention(library, tokens=8, ranks=2, heads=4, head_dim=32)
    check(again.handle != own, 'a handle comes twice')
    check(lib.upipe_abi_close(own) != 0 and again.bytes(0) > 0, 'a closed handle closes another one')
    again.close()


def in_mpi(abi, library, layer):
    """Starts this script once more, by the launcher; there its last word is that it is a rank."""
    if sys.argv[3] == 'rank':
        by_mpi(abi, library, layer)
        return end('abi')
    done = subprocess.run([*Mpi(sys.argv[3], lives=True).words, '-np', '4', sys.executable, os.path.abspath(__file__), *sys.argv[1:3], 'rank'],
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=100, check=False)
    check(done.returncode == 0 and done.stdout.count('0 failed') == 4, done.stdout)
    return end('abi')


def same_bits(abi, library, layers):
    """Ranks and chunks: within the truth, and O and dQ with the bits of one rank."""
    names = ['o', 'dq', 'dk', 'dv']
    want = [oracle(*layer) for layer in layers]
    one = None
    for ranks, chunk in ((1, 1), (1, 4), (2, 2), (2, 4), (3, 3), (4, 4)):
        got = run(abi, library, ranks, chunk, layers)
        one = one or got
        for n, layer in enumerate(got):
            for name, x, y, bits in zip(names, layer, want[n], one[n]):
                off = [abs(a - b) for a, b in zip(x, y, strict=True)]
                check(all(error < 5e-6 for error in off), f'C {ranks} U {chunk}, layer {n}: {name} is off by {max(off):.3g}')
                check(name not in ('o', 'dq') or x == bits,
                      f'C {ranks} U {chunk}, layer {n}: {name} has other bits than on one rank')


def out_of_range(abi, library, layer):
    # more than there are addresses: a plan does not go through sequences one by one
    refused(abi, lambda: abi.Attention(library, tokens=64, batch=2**31 - 1, heads=16, head_dim=32), 'bytes for rank 0')
    small = {'tokens': 8, 'heads': 4, 'kv_heads': 2, 'head_dim': 32}
    for name in 'tokens', 'batch', 'window':
        refused(abi, lambda name=name: abi.Attention(library, **{**small, name: 2**64 + 8}), f'{name} is 18446744073709551624')
    for name in 'ranks', 'heads', 'kv_heads', 'head_dim', 'chunk', 'causal', 'layers':
        refused(abi, lambda name=name: abi.Attention(library, **{**small, name: 2**32 + 1}), f'{name} is 4294967297')
    most = 1000
    for more in {'ranks': 1}, {'ranks': 2, 'chunk': 2}:
        abi.Attention(library, **small, **more, layers=most).close()
        refused(abi, lambda more=more: abi.Attention(library, **small, **more, layers=most + 1), f'at most {most}')
    u = abi.Attention(library, tokens=TOKENS, heads=HEADS, kv_heads=KV, head_dim=DIM)
    q = floats(layer[0])
    refused(abi, lambda: u.qkv_bwd(0, q, q, q, q, q, q, q, q), 'consumed before')
    refused(abi, lambda: u.qkv_fwd(0, q, q, q, q, layer=1), 'forward 1 of 1')
    refused(abi, lambda: u.qkv_fwd(0, q, q, q, q, layer=2**32), 'layer 4294967296 of 1')
    refused(abi, lambda: u.qkv_bwd(0, q, q, q, q, q, q, q, q, layer=2**32), 'layer 4294967296 of 1')
    refused(abi, lambda: u.drop(0, layer=-2**32), 'layer -4294967296 of 1')
    refused(abi, lambda: u.rows(-1), 'rank -1 of 1')
    refused(abi, lambda: u.qkv_fwd(1, q, q, q, q), 'rank 1 of 1')
    u.close()
    refused(abi, lambda: u.bytes(0), 'the handle is closed')


def left(abi, library):
    """A rank that has left, and one whose call was refused: the other does not wait for the deadline of 60 s."""
    def one_leaves(rank):
        if rank == 1:
            raise own
        t = floats([0.0] * (u.rows(rank)[1] * HEADS * DIM))
        u.qkv_fwd(rank, t, t, t, t)

    own, raised = ValueError('rank 1 has other plans'), None
    u = abi.Attention(library, tokens=TOKENS, ranks=2, heads=HEADS, head_dim=DIM)
    began = time.monotonic()
    try:
        u.run(one_leaves)
    except Exception as error:  # pylint: disable=broad-except
        raised = error
    check(raised is own, f'a rank leaves by {own!r}, and its team by {raised!r}')  # not by what that does to rank 0
    check(time.monotonic() - began < 30, 'a rank waits for one that has left')
    u.close()

    said = [None, None]

    def one_refused(rank):
        t = floats([0.0] * (u.rows(rank)[1] * HEADS * DIM))
        try:
            u.qkv_fwd(rank, t, t, t, t, layer=rank * 5)
        except abi.Error as error:
            said[rank] = str(error)

    u = abi.Attention(library, tokens=TOKENS, ranks=2, heads=HEADS, head_dim=DIM)
    began = time.monotonic()
    u.run(one_refused)
    check(time.monotonic() - began < 30, 'a rank waits for one whose call was refused')
    check(all('forward 5 of 1' in str(words) for words in said), f'a layer that is not there: {said}')
    u.close()


def main():
    library = os.path.abspath(sys.argv[1])
    sys.path.insert(0, os.path.join(sys.argv[2], 'examples', 'bindings', 'python'))
    import upipe_abi as abi  # pylint: disable=import-outside-toplevel
    draw = random.Random(1)
    sizes = [TOKENS * HEADS * DIM, TOKENS * KV * DIM, TOKENS * KV * DIM, TOKENS * HEADS * DIM]
    layers = [[list(floats([draw.gauss(0, 1) for _ in range(n)])) for n in sizes] for _ in range(2)]
    if len(sys.argv) > 3:
        return in_mpi(abi, library, layers[0])
    for test, *more in ((same_bits, layers), (mistaken,), (out_of_range, layers[0]), (misused,), (asked,), (packed_wrongly,), (drawn,),
                        (masked, layers[0]), (kept_elsewhere, layers[0]), (redescribed,), (described_wrongly,),
                        (same_in_processes, layers), (rings, layers[0]), (sbh3d, layers[0]), (misplaced,), (closed_early,), (left,)):
        run_test(test, abi, library, *more)
    return end('abi')


if __name__ == '__main__':
    sys.exit(main())

#!/usr/bin/env python3
"""test_cuda_processes.py FOLDER TOP -- two processes with a device of the fake each, over its NCCL: the ports, the C ABI's
library, what is refused, and what is left when one is killed

FOLDER holds the programs. The ranks share no address: nothing that one of them tells another may be one. The killed one dies
inside of a call; the other must end by its deadline, and neither may leave anything in /dev/shm. The full run kills at more calls.
"""

import ctypes
import os
import random
import re
import sys
import time

sys.path[:0] = [os.path.join(os.path.dirname(os.path.abspath(__file__)), folder) for folder in ('..', '../lib')]
from checks import check, end, equal, read, run_tests, wait_for, write  # pylint: disable=wrong-import-position
from launch import run_fake  # pylint: disable=wrong-import-position
from test_abi import DIM, HEADS, KV, SIZES, TOKENS, floats, held_to, oracle  # pylint: disable=wrong-import-position

FOLDER, TOP = (os.path.abspath(path) for path in sys.argv[1:3])
FULL = bool(os.environ.get('UPIPE_FULL'))
LIBRARY = os.path.join(FOLDER, 'libfake_upipe_abi.so')
TEAMS = [{'ranks': 2}, {'ranks': 1, 'ring': 2}, {'ranks': 1, 'ring': 2, 'layout': 1, 'ring_mode': 1}]
TRAIN = ('--layers 1 --model-dim 64 --heads 2 --kv-heads 2 --ff-dim 64 --tokens 32 --steps 2 --batch 1 --sample 0 --device cuda --dtype bf16 '
         '--transport nccl --deadline 3').split()


def good(done, what):
    for rank, (status, said, why) in enumerate(done):
        check(status == 0 and re.search(r'\d+ checks, 0 failed', said), f'{what}, rank {rank}: {status}: {said[-500:]}{why[-500:]}')


def test_ports(_):
    for seed in (0, 3, 7) if FULL else (3,):
        good(run_fake([os.path.join(FOLDER, 'test_cuda_ports')], 'aa', FAKE_SEED=seed), f'ports, seed {seed}')


def test_abi(_):
    words = [sys.executable, os.path.abspath(__file__), FOLDER, TOP, 'abi']
    good(run_fake(words, 'aa', FAKE_SEED=3), 'the C ABI')
    if FULL:  # the library's deadline is a minute
        alone, killed = run_fake(words, 'aa', {1: {'FAKE_FAIL': '300k'}}, FAKE_CLEAN=0)
        check((alone[0], killed[0]) == (1, -9) and 'Error: rank 0 waited 60 s' in alone[2], f'the C ABI, one killed: {alone} {killed}')


def abi_rank(rank):
    """Of teams made from an id: tensors on this rank's device, held to attention in f64."""
    sys.path.insert(0, os.path.join(TOP, 'examples', 'bindings', 'python'))
    import upipe_abi as abi  # pylint: disable=import-outside-toplevel
    cuda, cards = ctypes.CDLL(LIBRARY), random.Random(5)
    layer = [[cards.uniform(-1, 1) for _ in range(TOKENS * heads * DIM)] for heads in (HEADS, KV, KV, HEADS)]
    want = oracle(*layer)
    check(cuda.cudaSetDevice(rank) == 0, 'no device')

    def put(values):
        p = ctypes.c_void_p()
        check(cuda.cudaMalloc(ctypes.byref(p), ctypes.c_size_t(4 * len(values))) == 0, 'no memory')
        check(cuda.cudaMemcpy(p, floats(values), ctypes.c_size_t(4 * len(values)), 1) == 0, 'no copy')
        return p

    def get(p, n):
        out = floats([0.0] * n)
        check(cuda.cudaMemcpy(out, p, ctypes.c_size_t(4 * n), 2) == 0 and cuda.cudaFree(p) == 0, 'no copy back')
        return list(out)

    for number, more in enumerate(TEAMS):
        path = f'{os.environ["MASTER_ADDR"]}{number}'
        if rank == 0:
            write(path + '-part', abi.draw_nccl_id(LIBRARY))
            os.rename(path + '-part', path)
        wait_for(lambda path=path: os.path.exists(path))
        u = abi.Attention(LIBRARY, rank=rank, nccl_id=read(path), **SIZES, **more)
        at, widths = u.positions(rank), [HEADS * DIM, KV * DIM, KV * DIM, HEADS * DIM]
        q, k, v, dout = [put(sum((t[i * w:(i + 1) * w] for i in at), [])) for t, w in zip(layer, widths)]
        o, dq, dk, dv = [put([0.0] * (len(at) * w)) for w in (widths[0], *widths[:3])]
        u.qkv_fwd(rank, o, q, k, v)
        u.qkv_bwd(rank, dq, dk, dv, dout, o, q, k, v)
        u.ask(rank, 'sync')
        held_to(want, at, [get(p, len(at) * w) for p, w in zip((o, dq, dk, dv), (widths[0], *widths[:3]))], f'{more}, rank {rank}')
        check(u.lib.upipe_abi_close(ctypes.c_void_p(u.handle)) == 0 and all(cuda.cudaFree(p) == 0 for p in (q, k, v, dout)), 'the close')
    return end(f'rank {rank}')


def test_one_device(_):
    for status, said, why in run_fake([os.path.join(FOLDER, 'fake_08_nccl')], 'aa', {1: {'LOCAL_RANK': 0}}, FAKE_CLEAN=0):
        check(status == 1 and 'two ranks on one device' in why, f'two processes on a device: {status}: {said}{why}')


def shared():
    return {name for name in os.listdir('/dev/shm') if re.match('upipe|fake', name)}


def nothing_left(before, k):
    left = shared() - before  # or another test's, for a moment
    check(wait_for(lambda: not left & shared(), 5), f'killed at call {k}: {left} in /dev/shm')


def test_killed(_):
    """One of two trainers kills itself inside of its k-th call: while they meet, in a stage, between steps."""
    if not os.path.exists(os.path.join(FOLDER, 'fake_train')):
        print('left out: train, as jansson is missing')
        return
    before = shared()
    for number, k in enumerate((9, 60, 150, 250, 400, 600, 900) if FULL else (150, 400)):
        killed, began = number % 2, time.monotonic()
        done = run_fake([os.path.join(FOLDER, 'fake_train'), *TRAIN], 'aa', {killed: {'FAKE_FAIL': f'{k}k'}}, FAKE_CLEAN=0)
        status, _, why = done[1 - killed]
        equal(done[killed][0], -9, f'the status of rank {killed}, killed at call {k}')
        check(status == 1 and re.search('^train: .*(waited 3 s|within 3 s|in 3 s)', why), f'killed at call {k}: {status}: {why}')
        check(time.monotonic() - began < 25, f'killed at call {k}: the other rank takes {time.monotonic() - began:.1f} s')
        nothing_left(before, k)
    # teams of two: each of the others has its number among all, though NCCL does not say which rank is missing
    done = run_fake([os.path.join(FOLDER, 'fake_train'), *TRAIN, '--replicas', '2'], 'aaaa', {2: {'FAKE_FAIL': '500k'}}, FAKE_CLEAN=0)
    said = [[line for line in why.splitlines() if line.startswith('train: ')] for _, _, why in done]
    check([one[0] for one in done] == [1, 1, -9, 1] and all(len(said[r]) == 1 and re.search(rf'rank {r}\b', said[r][0]) for r in (0, 1, 3)),
          f'rank 2 of two teams killed: {done}')
    nothing_left(before, 500)


if __name__ == '__main__':
    if len(sys.argv) > 3:
        sys.exit(abi_rank(int(os.environ['RANK'])))
    sys.exit(run_tests('cuda_processes', test_ports, test_abi, test_one_device, test_killed))

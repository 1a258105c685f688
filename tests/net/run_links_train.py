#!/usr/bin/env python3
"""run_links_train.py MPIRUN TRAIN TRAIN_MPI -- the trainer on two machines, which are network namespaces (run_links.py)

Over a link with a delay the losses are those of threads, bit for bit. A link that is cut at a random instant of training
and saving ends every rank on both sides within the deadline and a second, both say which ranks are missing, and what is saved
is whole.
"""

import os
import re
import shlex
import sys
import tempfile
import time

from run_links import RANKS, Link, open_link, sayings, two_sides
from run_mpi import alive, newest, user_launcher
from checks import check, end, load, read, run_command, wait_for

MPIRUN = sys.argv[1]
TRAIN, TRAIN_MPI = (os.path.abspath(path) for path in sys.argv[2:4])
MODEL = '--layers 2 --model-dim 64 --heads 8 --kv-heads 4 --tokens 128 --sample 0'.split()
DEADLINE = 2
CUTS = 6


def start(link, folder, *flags):
    return two_sides(link, user_launcher(MPIRUN), folder, f'{shlex.quote(TRAIN_MPI)} --transport mpi "$@"', *MODEL, *flags)


def trainers(link):
    """The ranks that run, on both sides."""
    def trains(pid):
        try:
            return read(f'/proc/{pid}/cmdline').split(b'\0')[0] == TRAIN_MPI.encode()
        except OSError:
            return False

    return [pid for pid in link.pids() if trains(pid) and alive(pid)]


def test_same(link, method, flags):
    with tempfile.TemporaryDirectory() as folder:
        common = ['--method', method, *flags, '--steps', '3', '--json']
        alone = run_command([TRAIN, *MODEL, '--ranks', RANKS, *common, folder + '/threads'])
        check(alone.returncode == 0, f'{method} on threads: {alone.stderr}')
        passed = link.passed
        job = start(link, folder, *common, folder + '/mpi')
        if check(job.end() == 0, f'{method} over the link: {job.text()} {sayings(folder)}'):
            losses = [load(f'{folder}/{name}')['loss'] for name in ('threads', 'mpi')]
            check(losses[0] == losses[1], f'{method} over the link: other losses')
            check(link.passed - passed > 100, f'{method}: {link.passed - passed} frames have passed the link')


def test_cut(link, number, ahead):
    with tempfile.TemporaryDirectory() as folder:
        saved = os.path.join(folder, 'saved')
        job = start(link, folder, *ahead, '--steps', '100000', '--warmup', '0', '--lr', '1e-3', '--min-lr', '1e-3', '--save',
                    saved, '--save-every', '1', '--deadline', str(DEADLINE))
        wait_for(lambda: newest(saved) >= 2 or not job.runs(), 120)
        time.sleep(link.random.random() * 0.5)
        there = trainers(link)
        check(len(there) == RANKS, f'cut {number}: {len(there)} ranks run: {sayings(folder)}')
        link.up = False
        cut = time.monotonic()
        wait_for(lambda: not trainers(link), 20, 0.02)
        took, left = time.monotonic() - cut, trainers(link)
        link.kill()
        link.up = True
        job.end(30)
        text = sayings(folder)
        check(not left and took <= DEADLINE + 1, f'cut {number}: {len(left)} ranks are left after {took:.2f} s: {job.text()} {text}')
        for side, beyond in ((0, 1), '[23]'), ((2, 3), '[01]'):  # each of its own, as nothing passes the link
            check(any(re.search(fr'^train: .*waited 2 s in .* for ranks? [\d, ]*{beyond}', text.get(rank, ''), re.M)
                      for rank in side), f'cut {number}: ranks {side} do not say who is missing: {text}')
        step = newest(saved)
        done = run_command([TRAIN, '--resume', saved, '--save', saved, '--ranks', RANKS, '--steps', step + 1, '--sample', 0])
        check(done.returncode == 0, f'cut {number}: what is left at step {step} does not go on: {done.stderr}')
        print(f'cut in step {step + 1}: every rank has ended after {took:.2f} s', flush=True)


def main():
    link = Link()
    try:
        open_link(link, MPIRUN)
        link.delay = 0.002
        for method, flags in ('upipe', []), ('usp', ['--ring', '2', '--zero', '3', '--zero-prefetch']):
            test_same(link, method, flags)
        link.delay = 0.0
        for number in range(CUTS):
            test_cut(link, number, ['--zero', '3', '--zero-prefetch'] if number % 2 else [])
    finally:
        link.close()
    return end('links_train')


if __name__ == '__main__':
    sys.exit(main())

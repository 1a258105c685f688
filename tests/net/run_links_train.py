#!/usr/bin/env python3
"""run_links_train.py TRAIN [MPIRUN TRAIN_MPI] -- the trainer on two machines, which are network namespaces (run_links.py)

Over TCP, and over Open MPI where it is there. Over a link with a delay, which under TCP also loses packets, the losses
are those of threads, bit for bit. A link that is cut at a random instant of training and saving ends every rank on both
sides within the deadline and a second, both say which ranks are missing, and what is saved is whole. A link that is cut
while ranks meet over TCP ends them within two deadlines and a second.
"""

import os
import re
import shlex
import sys
import tempfile
import time

from run_links import RANKS, Link, open_link, sayings, two_sides
from run_mpi import Job, alive, is_open_mpi, newest, user_launcher
from checks import check, end, load, read, run_command, run_test, wait_for

TRAIN, MPIRUN, TRAIN_MPI = [os.path.abspath(word) for word in sys.argv[1:4]] + [None] * (4 - len(sys.argv))
MODEL = '--layers 2 --model-dim 64 --heads 8 --kv-heads 4 --tokens 128 --sample 0'.split()
DEADLINE = 2
CUTS = 3  # of each transport
SECRET = 'a secret of two machines'
# The ranks of both sides, each with what a launcher of machines would set; their status is the worst.
LAUNCHER = '''
said=$1 a=$2 b=$3; shift 3
for r in 0 1 2 3; do
    if [ $r -lt 2 ]; then side=$a; else side=$b; fi
    ip netns exec $side unshare --uts sh -c 'hostname "$0"; exec "$@"' $side env RANK=$r LOCAL_RANK=$((r % 2)) "$@" \\
        > $said/$r 2>&1 &
    ranks="$ranks $!"
done
status=0
for rank in $ranks; do wait $rank || status=$?; done
exit $status
'''


def over_mpi(link, folder, *flags):
    return two_sides(link, user_launcher(MPIRUN), folder, f'{shlex.quote(TRAIN_MPI)} --transport mpi "$@"', *MODEL,
                     *flags)


def over_tcp(link, folder, *flags):
    said = os.path.join(folder, 'said')
    os.makedirs(said)
    return Job(['sh', '-c', LAUNCHER, 'sh', said, *link.names, f'WORLD_SIZE={RANKS}', 'MASTER_ADDR=10.77.0.1',
                'MASTER_PORT=29500', f'UPIPE_SECRET={SECRET}', TRAIN, '--transport', 'tcp', *MODEL, *map(str, flags)])


def trainers(link):
    """The ranks that run, on both sides."""
    def trains(pid):
        try:
            return read(f'/proc/{pid}/cmdline').split(b'\0')[0].decode() in (TRAIN, TRAIN_MPI)
        except OSError:
            return False

    return [pid for pid in link.pids() if trains(pid) and alive(pid)]


def test_same(link, start, method, flags):
    what = f'{method}, {start.__name__}'
    with tempfile.TemporaryDirectory() as folder:
        common = ['--method', method, *flags, '--steps', '3', '--json']
        alone = run_command([TRAIN, *MODEL, '--ranks', RANKS, *common, folder + '/threads'])
        check(alone.returncode == 0, f'{method} on threads: {alone.stderr}')
        passed, lost = link.passed, link.lost
        job = start(link, folder, *common, folder + '/link')
        if check(job.end() == 0, f'{what}: {job.text()} {sayings(folder)}'):
            losses = [load(f'{folder}/{name}')['loss'] for name in ('threads', 'link')]
            check(losses[0] == losses[1], f'{what}: other losses')
            check(link.passed - passed > 100, f'{what}: {link.passed - passed} frames have passed the link')
            check(link.lost > lost or link.loss == 0, f'{what}: no frame was lost')


def cut(link, job, folder, what, seconds):
    """Cuts the link; every rank ends in time. What the ranks say."""
    link.up = False
    began = time.monotonic()
    wait_for(lambda: not trainers(link), 20, 0.02)
    took, left = time.monotonic() - began, trainers(link)
    link.kill()
    link.up = True
    job.end(30)
    text = sayings(folder)
    check(not left and took <= seconds,
          f'{what}: {len(left)} ranks are left after {took:.2f} s: {job.text()} {text}')
    print(f'{what}: every rank has ended after {took:.2f} s', flush=True)
    return text


def test_cut(link, start, number, ahead):
    with tempfile.TemporaryDirectory() as folder:
        saved = os.path.join(folder, 'saved')
        job = start(link, folder, *ahead, '--steps', '100000', '--warmup', '0', '--lr', '1e-3', '--min-lr', '1e-3',
                    '--save', saved, '--save-every', '1', '--deadline', str(DEADLINE))
        wait_for(lambda: newest(saved) >= 2 or not job.runs(), 120)
        time.sleep(link.random.random() * 0.5)
        what, there = f'{start.__name__}, cut {number}', trainers(link)
        check(len(there) == RANKS, f'{what}: {len(there)} ranks run: {sayings(folder)}')
        text = cut(link, job, folder, what, DEADLINE + 1)
        for side, beyond in ((0, 1), '[23]'), ((2, 3), '[01]'):  # each of its own, as nothing passes the link
            check(any(re.search(fr'^train: .*waited 2 s in .* for ranks? [\d, ]*{beyond}', text.get(rank, ''), re.M)
                      for rank in side), f'{what}: ranks {side} do not say who is missing: {text}')
        step = newest(saved)
        done = run_command([TRAIN, '--resume', saved, '--save', saved, '--ranks', RANKS, '--steps', step + 1,
                            '--sample', 0])
        check(done.returncode == 0, f'{what}: what is left at step {step} does not go on: {done.stderr}')


def test_cut_meeting(link, after):
    """Over TCP, that long after the start: while ranks meet and connect."""
    with tempfile.TemporaryDirectory() as folder:
        job = over_tcp(link, folder, '--steps', '100000', '--deadline', str(DEADLINE), '--method', 'usp', '--ring',
                       '2')
        wait_for(lambda: len(trainers(link)) == RANKS, 20, 0.001)
        time.sleep(after)
        text = cut(link, job, folder, f'cut {after:g} s after the start', 2 * DEADLINE + 1)
        check(all(re.search(fr'^train: (rank {rank} |\d of \d ranks)', said, re.M) for rank, said in text.items()),
              f'a sentence of another rank: {text}')


def test_transport(link, start, loss):
    link.delay, link.loss = 0.002, loss
    for method, flags in ('upipe', []), ('usp', ['--ring', '2', '--zero', '3', '--zero-prefetch']):
        test_same(link, start, method, flags)
    link.delay = link.loss = 0.0
    for number in range(CUTS):
        test_cut(link, start, number, ['--zero', '3', '--zero-prefetch'] if number % 2 else [])


def main():
    link = Link()
    try:
        open_link(link)
        run_test(test_transport, link, over_tcp, 0.01)
        for after in 0, 0.01:
            run_test(test_cut_meeting, link, after)
        if MPIRUN and is_open_mpi(MPIRUN):
            run_test(test_transport, link, over_mpi, 0.0)
    finally:
        link.close()
    return end('links_train')


if __name__ == '__main__':
    sys.exit(main())

#!/usr/bin/env python3
"""run_links_train.py MPIRUN TRAIN TRAIN_MPI -- the trainer on two machines, which are network namespaces (run_links.py)

Over a link with a delay the losses are those of threads, bit for bit. A link that is cut at a random instant of training
and saving ends every rank on both sides within the deadline and a second, both say which ranks are missing, and what is saved
is whole.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time

from run_links import Link, RANKS, agent_of, hosts, open_link
from run_mpi import user_launcher

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'lib'))
from checks import check, end  # pylint: disable=wrong-import-position

MPIRUN = sys.argv[1]
TRAIN, TRAIN_MPI = (os.path.abspath(path) for path in sys.argv[2:4])
MODEL = '--layers 2 --model-dim 64 --heads 8 --kv-heads 4 --tokens 128 --sample 0'.split()
DEADLINE = 2
CUTS = 6
SECONDS = 120


def start(link, folder, said, *flags):
    """The job; what its ranks say is in files, as a cut would keep it from the launcher."""
    body = f'exec {shlex.quote(TRAIN_MPI)} --transport mpi "$@" > {said}/$OMPI_COMM_WORLD_RANK 2>&1'
    words = ['ip', 'netns', 'exec', link.names[0], *user_launcher(MPIRUN), *hosts(agent_of(link, folder)), '-np', str(RANKS),
             'sh', '-c', body, 'sh', *MODEL, *flags]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors='replace',
                            start_new_session=True)


def read(path):
    with open(path, encoding='utf-8', errors='replace') as file:
        return file.read()


def sayings(said):
    return {int(name): read(os.path.join(said, name)) for name in sorted(os.listdir(said))}


def trainers(link):
    """The ranks that run, on both sides."""
    found = []
    for pid in link.pids():
        try:
            if read(f'/proc/{pid}/cmdline').split('\0')[0] == TRAIN_MPI and read(f'/proc/{pid}/stat').rpartition(')')[2].split()[0] != 'Z':
                found.append(pid)
        except OSError:
            pass
    return found


def newest(folder):
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return max((int(name[11:]) for name in names if re.fullmatch(r'checkpoint-\d+', name)), default=0)


def losses(path):
    with open(path, encoding='utf-8') as file:
        return json.load(file)['loss']


def test_same(link, method, flags):
    with tempfile.TemporaryDirectory() as folder:
        said = os.path.join(folder, 'said')
        os.mkdir(said)
        common = ['--method', method, *flags, '--steps', '3', '--json']
        alone = subprocess.run([TRAIN, *MODEL, '--ranks', str(RANKS), *common, folder + '/threads'], capture_output=True, text=True,
                               check=False)
        check(alone.returncode == 0, f'{method} on threads: {alone.stderr}')
        passed = link.passed
        job = start(link, folder, said, *common, folder + '/mpi')
        try:
            launched = job.communicate(timeout=SECONDS)[0]
        except subprocess.TimeoutExpired:
            link.kill()
            launched = job.communicate(timeout=30)[0]
        if check(job.returncode == 0, f'{method} over the link: {job.returncode}: {launched} {sayings(said)}'):
            check(losses(folder + '/threads') == losses(folder + '/mpi'), f'{method} over the link: other losses')
            check(link.passed - passed > 100, f'{method}: {link.passed - passed} frames have passed the link')


def test_cut(link, number, ahead):
    with tempfile.TemporaryDirectory() as folder:
        said, saved = os.path.join(folder, 'said'), os.path.join(folder, 'saved')
        os.mkdir(said)
        job = start(link, folder, said, *ahead, '--steps', '100000', '--warmup', '0', '--lr', '1e-3', '--min-lr', '1e-3', '--save',
                    saved, '--save-every', '1', '--deadline', str(DEADLINE))
        begun = time.monotonic()
        while newest(saved) < 2 and job.poll() is None and time.monotonic() < begun + SECONDS:
            time.sleep(0.01)
        time.sleep(link.random.random() * 0.5)
        there = trainers(link)
        check(len(there) == RANKS, f'cut {number}: {len(there)} ranks run: {sayings(said)}')
        link.up = False
        cut = time.monotonic()
        while trainers(link) and time.monotonic() < cut + 20:
            time.sleep(0.02)
        took, left = time.monotonic() - cut, trainers(link)
        link.kill()
        link.up = True
        launched = job.communicate(timeout=30)[0]
        text = sayings(said)
        check(not left and took <= DEADLINE + 1, f'cut {number}: {len(left)} ranks are left after {took:.2f} s: {launched} {text}')
        for side, beyond in ((0, 1), '[23]'), ((2, 3), '[01]'):  # each of its own, as nothing passes the link
            check(any(re.search(fr'^train: .*waited 2 s in .* for ranks? [\d, ]*{beyond}', text.get(rank, ''), re.M)
                      for rank in side), f'cut {number}: ranks {side} do not say who is missing: {text}')
        step = newest(saved)
        done = subprocess.run([TRAIN, '--resume', saved, '--save', saved, '--ranks', str(RANKS), '--steps', str(step + 1),
                               '--sample', '0'], capture_output=True, text=True, check=False)
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

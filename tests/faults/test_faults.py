#!/usr/bin/env python3
"""test_faults.py TRAIN LOGITS COMPARE FAULT TOP -- what the programs leave where an allocation, a thread or a write fails

FAULT is the library that fault.c describes. A run without a fault says how many calls of a kind there are and what the
files are to be. Then call n fails, for n over all of them or, in the ordinary run, for a few. A run that ends with 0 has
every file of the run without a fault. Any other ends with 1 and with sentences; every file is as it was before, or as it
is to be; and where there was a checkpoint there is one.

UPIPE_FAULT_SECONDS is the time for it (0); each scene has at least FEW tries, however long they take.
"""

import json
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'lib'))
from checks import check, end  # pylint: disable=wrong-import-position

TRAIN, LOGITS, COMPARE, FAULT, TOP = (os.path.abspath(word) for word in sys.argv[1:6])
BOOK = os.path.join(TOP, 'examples', 'data', 'genesis_exodus.txt')
SECONDS = float(os.environ.get('UPIPE_FAULT_SECONDS', '0'))
SEED = int(os.environ.get('UPIPE_SEED', '1'))
FEW = 4
ERRORS = ('EIO', 'ENOSPC', 'SHORT', 'EINTR')
MODEL = ('--layers 1 --model-dim 8 --heads 2 --kv-heads 1 --head-dim 32 --ff-dim 8 --tokens 16 --data book').split()
TRAINING = '--ranks 2 --deadline 20 --sample 2 --json j.json --trace t.json --save-every 1'.split()
LEFT = re.compile(r'\.tmp(\.\d+)?(/|$)|\.old(\.\d+)?$|/\.lock$')  # what a call that removes it may leave where it fails


def read(path):
    with open(path, 'rb') as source:
        return source.read()


def write(path, data):
    with open(path, 'wb') as out:
        out.write(data)


def without_times(value):
    if isinstance(value, dict):
        return {key: without_times(one) for key, one in value.items()
                if key not in ('ts', 'tokens_per_s', 'seconds_fwd', 'seconds_bwd')}
    return [without_times(one) for one in value] if isinstance(value, list) else value


def content(path):
    """What must not differ between two runs; a result that is no JSON is nothing that a run makes."""
    data = read(path)
    if not path.endswith('.json') or data.startswith(b'old '):
        return data
    try:
        return without_times(json.loads(data))
    except ValueError:
        return b'no JSON: ' + data


def tree(folder):
    found = {}
    for where, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(where, name)
            found[os.path.relpath(path, folder)] = content(path)
    return found


def run(words, folder, fault=None, count=None):
    env = {**os.environ, 'OPENBLAS_NUM_THREADS': '1'}
    if fault:
        env.update(LD_PRELOAD=FAULT, UPIPE_FAULT=fault, **({'UPIPE_FAULT_COUNT': count} if count else {}))
    try:
        return subprocess.run(words, cwd=folder, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                              encoding='utf-8', errors='backslashreplace', timeout=120, check=False)
    except subprocess.TimeoutExpired as late:
        return subprocess.CompletedProcess(words, 'none: it hangs', '', str(late.stderr))


def checkpoints(files):
    return {path.split('/')[1] for path in files if re.match(r's/(\.checkpoint-\d+\.old|checkpoint-\d+)/', path)}


def part_of(got, want):
    """Numbers of a training that ended early: all of them, and the first of each list."""
    if not isinstance(got, dict) or not isinstance(want, dict) or set(got) != set(want):
        return False
    lists = ('loss', 'grad_norm')
    return all(got[key] == want[key][:len(got[key])] if key in lists else got[key] == want[key] or key == 'memory'
               for key in got)


class Scene:
    """A program's command line in a folder with files of its own. keeps: it writes the same checkpoints, and all stay."""

    def __init__(self, name, words, root, prepare, keeps=()):
        self.name, self.words, self.root = name, words, os.path.join(root, name)
        self.template, self.work = os.path.join(self.root, 'template'), os.path.join(self.root, 'work')
        os.makedirs(self.template)
        prepare(self.template)
        self.before = tree(self.template)
        self.fresh()
        done = run(words, self.work)
        check((done.returncode, done.stderr) == (0, ''), f'{name} without a fault: {done.returncode} {done.stderr}')
        self.want = tree(self.work)
        self.between = {}
        if keeps:
            self.fresh()
            run([*words, *keeps], self.work)
            self.between = tree(self.work)
            check(len(checkpoints(self.between)) > len(checkpoints(self.want)), f'{name}: no checkpoint was removed')

    def fresh(self):
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(self.template, self.work, symlinks=True)

    def count(self, kind):
        self.fresh()
        path = os.path.join(self.root, 'count')
        run(self.words, self.work, kind + ':0', path)
        check(tree(self.work) == self.want, f'{self.name}: other files under {os.path.basename(FAULT)}')
        return int(read(path))

    def whole(self, path, now):
        """A file is as it was, or as it is to be; a training that ended early has a part of the numbers."""
        if now in (self.before.get(path), self.want.get(path), self.between.get(path)):
            return True
        return path == 'j.json' and part_of(now, self.want.get(path))

    def attempt(self, fault):
        self.fresh()
        done = run(self.words, self.work, fault)
        what = f'{self.name}, {fault}: status {done.returncode}, "{done.stderr.strip()}"'
        now = tree(self.work)
        left = {path for path in now if LEFT.search(path)}
        if 'file:' in fault:
            now = {path: now[path] for path in now if path not in left}
        if done.returncode == 0:
            wrong = sorted(path for path in {**now, **self.want} if now.get(path) != self.want.get(path))
            return check(not wrong, f'{what}: not what is to be: {wrong}')
        program = os.path.basename(self.words[0])
        lines = done.stderr.strip().split('\n')
        said = all(re.match(f'{program}: .*[a-z]', line) and not line.endswith(': ') for line in lines)
        if fault.startswith('thread:'):
            check(re.search('thread', done.stderr) is not None, f'{what}: does not name the thread')
        wrong = sorted(path for path in now if not self.whole(path, now[path]))
        lost = sorted(path for path in self.before if path not in now and not path.startswith('s/'))
        ok = check(done.returncode == 1 and said, f'{what}: not a sentence and status 1')
        ok &= check(not wrong and not lost, f'{what}: neither old nor new: {wrong}; lost: {lost}')
        halves = [name for name in checkpoints(now) if len([p for p in now if p.startswith(f's/{name}/')]) < 3]
        ok &= check(not halves, f'{what}: not whole: {halves}')
        ok &= check(bool(checkpoints(now)) or not checkpoints(self.before), f'{what}: no checkpoint is left')
        return ok


def npy(values):
    head = f"{{'descr': '<i4', 'fortran_order': False, 'shape': ({len(values)},), }}".ljust(117) + '\n'
    return b'\x93NUMPY\x01\x00' + struct.pack('<H', len(head)) + head.encode() + struct.pack(f'<{len(values)}i', *values)


def scenes(root):
    def book(folder):
        write(os.path.join(folder, 'book'), read(BOOK)[:2000])

    def old(folder):
        book(folder)
        for name in ('j.json', 't.json'):
            write(os.path.join(folder, name), b'old ' + name.encode())

    def trained(folder, steps):
        done = run([TRAIN, *MODEL, '--sample', '0', '--steps', str(steps), '--warmup', '0', '--save', 's'], folder)
        check(done.returncode == 0, f'a checkpoint to begin with: {done.stderr}')

    def begun(folder):
        old(folder)
        trained(folder, 1)

    def model(folder):
        """In parts, with an index."""
        book(folder)
        trained(folder, 1)
        at = os.path.join(folder, 's', 'checkpoint-1')
        data = read(os.path.join(at, 'model.safetensors'))
        names = json.loads(data[8:8 + struct.unpack('<Q', data[:8])[0]]).keys() - {'__metadata__'}
        os.rename(os.path.join(at, 'model.safetensors'), os.path.join(at, 'part'))
        index = {'weight_map': {name: 'part' for name in sorted(names)}}
        write(os.path.join(at, 'model.safetensors.index.json'), json.dumps(index).encode())
        write(os.path.join(folder, 'ids.npy'), npy([1, 2, 3, 250]))

    save = [*TRAINING, '--save', 's']
    made = [
        Scene('train', [TRAIN, *MODEL, *save, '--steps', '2', '--keep', '2'], root, old),
        Scene('resume', [TRAIN, '--data', 'book', '--resume', 's', *save, '--steps', '3'], root, begun,
              keeps=['--keep', '0']),
        Scene('logits', [LOGITS, '--load', 's', '--ids', 'ids.npy', '--out', 'out.npy', '--ranks', '2'], root, model),
        Scene('compare', [COMPARE, '--method', 'ulysses', '--method', 'upipe', '--ranks', '2', '--heads', '2', '--kv-heads',
                          '1', '--head-dim', '32', '--model-dim', '8', '--tokens', '16', '--deadline', '20', '--json',
                          'j.json', '--trace', 'traces', '--dump', 'dump', '--data', 'book'], root, old),
    ]
    return {scene.name: scene for scene in made}


def faults(scene):
    """All that is tried, by kind."""
    calls = scene.count('alloc')
    yield 'an allocation', [f'alloc:{n}' for n in range(1, calls + 1)]
    yield 'all from one allocation on', [f'alloc:{n}+' for n in range(1, calls + 1)]
    calls = scene.count('file')
    yield 'a call that changes files', [f'file:{n}:{error}' for n in range(1, calls + 1) for error in ERRORS]
    calls = scene.count('thread')
    yield 'a thread', [f'thread:{n}' for n in range(1, calls + 1)]


def spread(tries):
    """A few of them, the last among them."""
    return [tries[(k + 1) * len(tries) // FEW - 1] for k in range(min(FEW, len(tries)))]


def main():
    chance = random.Random(SEED)
    with tempfile.TemporaryDirectory() as root:
        plans = [(scene, kind, tries) for scene in scenes(root).values() for kind, tries in faults(scene)]
        every = sum(len(tries) for _, _, tries in plans)
        for scene, kind, tries in plans:
            began, share = time.monotonic(), SECONDS * len(tries) / every
            chosen = spread(tries)
            rest = [fault for fault in tries if fault not in chosen]
            chance.shuffle(rest)
            for fault in chosen:
                scene.attempt(fault)
            done = len(chosen)
            while rest and time.monotonic() - began < share:
                scene.attempt(rest.pop())
                done += 1
            print(f'reached: {scene.name}, {kind}: {done} of {len(tries)} in {time.monotonic() - began:.0f} s')
    return end('faults')


if __name__ == '__main__':
    sys.exit(main())

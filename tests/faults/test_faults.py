#!/usr/bin/env python3
"""test_faults.py TRAIN LOGITS COMPARE PLAN FAULT [tcp | MPIRUN TRAIN_MPI LOGITS_MPI COMPARE_MPI] -- what the programs leave where
an allocation, a thread, a write or a read fails; over TCP and MPI on one of two ranks, over TCP a call of a socket too

FAULT is the library that fault.c describes. A run without a fault says how many calls of a kind there are and what the
files are to be. Then call n fails, for n over all of them or, in the ordinary run, for a few. A run that ends with 0 has
every file of the run without a fault. Any other ends with 1 and with sentences; every file is as it was before, or as it
is to be; and where there was a checkpoint there is one. A planner that ends with 0 has said what it says without a fault.
The sentence of a failure says what has failed: memory, a thread, or the system's own word.

Over TCP and MPI only calls of the program itself fail, as OpenSSL and Open MPI do not bear that their own do. No rank may wait
for the one that fails until the deadline is over, and what failed is said whichever rank it is, though rank 0 prints. Over TCP
there is no launcher that ends ranks: one that fails before it has met the others is missed at the deadline.

UPIPE_FAULT_SECONDS is the time for it (0), over TCP and MPI a tenth; each kind in each scene has at least FEW tries, however
long they take. Which ones, over TCP and MPI, and which are the others, is a matter of UPIPE_SEED.

Allocations of a block that fail are test_layer.c's; calls of CUDA, cuda/test_cuda_faults.c's.
"""

import copy
import itertools
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'lib'))
from checks import check, end, read, run_command, tree as files_of, write  # pylint: disable=wrong-import-position
from launch import PROGRAM, SECRET, Mpi, Tcp, run_ranks  # pylint: disable=wrong-import-position
from programs import BOOK, npy, packed, safetensors, sentences  # pylint: disable=wrong-import-position

TRAIN, LOGITS, COMPARE, PLAN, FAULT = (os.path.abspath(word) for word in sys.argv[1:6])
TCP = sys.argv[6:] == ['tcp']
MPIRUN = sys.argv[6] if len(sys.argv) > 7 else None
TRAIN_MPI, LOGITS_MPI, COMPARE_MPI = (os.path.abspath(word) for word in sys.argv[7:10]) if MPIRUN else (None, None, None)
PROCESSES = 2
SECONDS = float(os.environ.get('UPIPE_FAULT_SECONDS', '0')) / (10 if TCP or MPIRUN else 1)
SEED = int(os.environ.get('UPIPE_SEED', '1'))
FEW = 1 if TCP or MPIRUN else 4
DEADLINE = 2 if TCP else 20
ERRORS = ('EIO', 'ENOSPC', 'SHORT', 'EINTR')
NET_ERRORS = ('ECONNRESET', 'ENOBUFS', 'SHORT', 'EINTR')
MODEL = ('--layers 1 --model-dim 8 --heads 2 --kv-heads 1 --head-dim 32 --ff-dim 8 --tokens 16 --data book').split()
TRAINING = f'--ranks 2 --deadline {DEADLINE} --sample 2 --json j.json --trace t.json --log l.log --save-every 1'.split()
COMPARISON = ('--method ulysses --method upipe --ranks 2 --heads 2 --kv-heads 1 --head-dim 32 --model-dim 8 --tokens 16 '
              f'--deadline {DEADLINE} --json j.json --trace traces --dump dump --data book').split()
NAMED = 'Input/output error|No space left|Interrupted|the system does not say|a killed run has left'
LOCK = re.compile(r'/\.lock$')  # what a call that removes it may leave where it fails: without harm
LEFT = re.compile(LOCK.pattern + r'|\.tmp(\.\d+)?(/|$)|\.old(\.\d+)?$')  # and with a sentence


def without_times(value):
    if isinstance(value, dict):
        return {key: without_times(one) for key, one in value.items()
                if key not in ('ts', 'tokens_per_s', 'seconds_fwd', 'seconds_bwd', 'seconds_cpu')}
    return [without_times(one) for one in value] if isinstance(value, list) else value


def content(path, data):
    """What must not differ between two runs; a result that is no JSON is nothing that a run makes. Of a log whole lines."""
    if path == 'l.log':
        return without_times([{**json.loads(line), 'seconds': None} for line in data.split(b'\n')[:-1]])
    if not path.endswith('.json') or data.startswith(b'old '):
        return data
    try:
        return without_times(json.loads(data))
    except ValueError:
        return b'no JSON: ' + data


def tree(folder):
    return {path: content(path, data) for path, data in files_of(folder).items() if data is not None}


def variables_of(fault, count):
    if not fault:
        return {}
    return {'LD_PRELOAD': FAULT, 'UPIPE_FAULT': fault, **({'UPIPE_FAULT_COUNT': count} if count else {})}


def run(words, folder, fault=None, count=None):
    try:
        return run_command(words, 120, {'OPENBLAS_NUM_THREADS': '1', **variables_of(fault, count)}, cwd=folder)
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
    """A program's command line in a folder with files of its own. keeps: it writes the same checkpoints, and all stay.
    says: what it prints is a result too."""

    killed = False  # other ranks end it, which then removes nothing
    # what a thread needs the C library allocates itself
    named = {'alloc:': 'memory|thread of rank \\d+ did not start: ', 'thread:': 'thread', 'file:': NAMED, 'flush:': NAMED, 'read:': NAMED,
             'net:': 'connection|socket|listen|met rank|have come'}
    waits = 'deadline'  # what a rank says that has waited for the one that fails

    def __init__(self, name, words, root, prepare, keeps=(), says=False):
        self.name, self.words, self.root = name, words, os.path.join(root, name)
        self.program = os.path.basename(words[0]).removesuffix('_mpi')
        self.template, self.work = os.path.join(self.root, 'template'), os.path.join(self.root, 'work')
        os.makedirs(self.template)
        prepare(self.template)
        self.before = tree(self.template)
        self.fresh()
        done = self.start(words)
        check((done.returncode, sentences(done.stderr)) == (0, []), f'{name} without a fault: {done.returncode} {done.stderr}')
        self.want = tree(self.work)
        self.said = done.stdout if says else None
        self.between = {}
        if keeps:
            self.fresh()
            self.start([*words, *keeps])
            self.between = tree(self.work)
            check(len(checkpoints(self.between)) > len(checkpoints(self.want)), f'{name}: no checkpoint was removed')

    def start(self, words, fault=None, count=None):
        return run(words, self.work, fault, count)

    def fresh(self):
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(self.template, self.work, symlinks=True)

    def count(self, kind):
        self.fresh()
        path = os.path.join(self.root, 'count')
        self.start(self.words, kind + ':0', path)
        check(tree(self.work) == self.want, f'{self.name}: other files under {os.path.basename(FAULT)}')
        return int(read(path))

    def whole(self, path, now):
        """A file is as it was, or as it is to be; a training that ended early has a part of the numbers, and of the log."""
        if now in (self.before.get(path), self.want.get(path), self.between.get(path)):
            return True
        if path == 'l.log':
            return now == self.want[path][:len(now)]
        return path == 'j.json' and part_of(now, self.want.get(path))

    def attempt(self, fault):
        self.fresh()
        done = self.start(self.words, fault)
        what = f'{self.name}, {fault}: status {done.returncode}, "{done.stderr.strip()}"'
        now = tree(self.work)
        if self.killed or fault.startswith(('file:', 'read:')):
            may = LEFT if done.returncode or self.killed else LOCK # what stays is said
            now = {path: now[path] for path in now if not may.search(path)}
        if done.returncode == 0:
            wrong = sorted(path for path in {**now, **self.want} if now.get(path) != self.want.get(path))
            ok = check(self.said is None or done.stdout == self.said, f'{what}: it says something else: {done.stdout}')
            return check(not wrong, f'{what}: not what is to be: {wrong}') and ok
        check(not fault.startswith('net:') or not fault.endswith('EINTR'), f'{what}: a call that was interrupted')
        lines = sentences(done.stderr)
        said = lines and all(re.match(f'{self.program}: .*[a-z]', line) and not line.endswith(': ') for line in lines)
        for kind, names in self.named.items():
            if fault.startswith(kind):
                check(re.search(names, done.stderr) is not None, f'{what}: does not name what failed')
        check(re.search(self.waits, done.stderr) is None, f'{what}: a rank waits for the one that fails')
        wrong = sorted(path for path in now if not self.whole(path, now[path]))
        lost = sorted(path for path in self.before if path not in now and not path.startswith('s/'))
        ok = check(done.returncode == 1 and said, f'{what}: not a sentence and status 1')
        ok &= check(not wrong and not lost, f'{what}: neither old nor new: {wrong}; lost: {lost}')
        halves = [name for name in checkpoints(now) if len([p for p in now if p.startswith(f's/{name}/')]) < 3]
        ok &= check(not halves, f'{what}: not whole: {halves}')
        ok &= check(bool(checkpoints(now)) or not checkpoints(self.before), f'{what}: no checkpoint is left')
        return ok


class Ranks(Scene):
    """The same with processes for ranks; what is counted and what fails is on one of them."""

    rank = 0

    def __init__(self, launcher, *more):
        self.launcher, self.killed = launcher, launcher.name == 'mpi'
        self.waits = 'deadline' if self.killed else 'waited'
        super().__init__(*more)

    def start(self, words, fault=None, count=None):
        there = ' '.join(f'{name}={shlex.quote(str(value))}' for name, value in variables_of(fault, count).items())
        shell = f'if [ $RANK = {self.rank} ]; then exec env UPIPE_FAULT_OWN=1 {there} "$0" "$@"; fi; {PROGRAM}'
        statuses, outs, errs, own = run_ranks(self.launcher, PROCESSES, [*words, '--transport', self.launcher.name], 60, shell=shell, cwd=self.work)
        said = '\n'.join(itertools.chain(*own)) if self.killed else ''.join(errs)
        return subprocess.CompletedProcess(words, next(filter(None, statuses), 0), ''.join(outs), said)

    def ranks(self):
        for rank in range(PROCESSES):
            one = copy.copy(self)
            one.rank, one.name = rank, f'{self.name}, rank {rank}'
            yield one


def scenes(root):
    def book(folder):
        write(os.path.join(folder, 'book'), read(BOOK)[:2000])

    def old(folder):
        book(folder)
        for name in ('j.json', 't.json'):
            write(os.path.join(folder, name), 'old ' + name)

    def tokens(folder):
        """Two files behind a list, one with an index, and a mask."""
        old(folder)
        ids = read(BOOK)[:2000]
        packed(os.path.join(folder, 'a'), ids[:900], [300, 0, 600], 1)
        write(os.path.join(folder, 'b.npy'), npy(ids[900:]))
        write(os.path.join(folder, 'list'), 'a.bin\nb.npy\n')
        write(os.path.join(folder, 'mask'), b'\1' * 2000)

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
        names = safetensors(os.path.join(at, 'model.safetensors'))[1]
        os.rename(os.path.join(at, 'model.safetensors'), os.path.join(at, 'part'))
        index = {'weight_map': {name: 'part' for name in sorted(names)}}
        write(os.path.join(at, 'model.safetensors.index.json'), json.dumps(index))
        write(os.path.join(folder, 'ids.npy'), npy([1, 2, 3, 250]))

    def machine(folder):
        config = {'model_type': 'llama', 'hidden_size': 64, 'intermediate_size': 96, 'num_hidden_layers': 1, 'vocab_size': 300,
                  'num_attention_heads': 2, 'num_key_value_heads': 2, 'head_dim': 32}
        os.mkdir(os.path.join(folder, 'model'))
        write(os.path.join(folder, 'model', 'config.json'), json.dumps(config))
        write(os.path.join(folder, 'machine.json'), json.dumps({
            'base': 'cpu', 'ranks': 2, 'ranks_per_node': 2, 'host_memory': '2GiB', 'rates': {'dense_flops': 1e11}}))
        write(os.path.join(folder, 'rates.json'), '{"op": "gemm", "gflops": 100, "threads": 2}\n')
        for name in ('j.json', 'new.json'):
            write(os.path.join(folder, name), 'old ' + name)

    small = ['--model', 'model', '--machine', 'machine.json', '--json', 'j.json']
    save = [*TRAINING, '--save', 's']
    train = ['--steps', '2', '--keep', '2']
    logits = ['--load', 's', '--ids', 'ids.npy', '--out', 'out.npy', '--ranks', '2', '--deadline', str(DEADLINE)]
    if TCP or MPIRUN:
        launcher = Tcp(lambda r: {'UPIPE_SECRET': SECRET}) if TCP else Mpi(MPIRUN)
        trainer, reader, comparer = (TRAIN, LOGITS, COMPARE) if TCP else (TRAIN_MPI, LOGITS_MPI, COMPARE_MPI)
        return [one for job in (Ranks(launcher, 'train', [trainer, *MODEL, *save, *train], root, old),
                                Ranks(launcher, 'logits', [reader, *logits], root, model),
                                Ranks(launcher, 'compare', [comparer, *COMPARISON], root, old)) for one in job.ranks()]
    return [
        Scene('train', [TRAIN, *MODEL[:-2], '--tokens-file', '@list', '--loss-mask', 'mask', '--shuffle', 'documents', *save,
                        *train], root, tokens),
        Scene('resume', [TRAIN, '--data', 'book', '--resume', 's', *save, '--steps', '3'], root, begun,
              keeps=['--keep', '0']),
        Scene('logits', [LOGITS, *logits], root, model),
        Scene('compare', [COMPARE, *COMPARISON], root, old),
        Scene('plan', [PLAN, *small, '--tokens', '4k', '--batch', '2', '--calibrate', 'rates.json', '--write-machine',
                       'new.json'], root, machine, says=True),
        Scene('plan_block', [PLAN, '--model', 'model', '--machine', 'cpu', '--ranks', '2', '--tokens', '4k', '--json',
                             'j.json'], root, machine, says=True),
        Scene('plan_longest', [PLAN, *small, '--max-tokens'], root, machine, says=True),
        Scene('plan_best', [PLAN, *small, '--tokens', '4k', '--best'], root, machine, says=True),
        Scene('plan_best_longest', [PLAN, *small, '--max-tokens', '--best'], root, machine, says=True),
    ]


def faults(scene):
    """All that is tried, by kind."""
    calls = scene.count('alloc')
    yield 'an allocation', [f'alloc:{n}' for n in range(1, calls + 1)]
    yield 'all from one allocation on', [f'alloc:{n}+' for n in range(1, calls + 1)]
    calls = scene.count('file')
    yield 'a call that changes files', [f'file:{n}:{error}' for n in range(1, calls + 1) for error in ERRORS]
    calls = scene.count('flush')
    yield 'a flush', [f'flush:{n}' for n in range(1, calls + 1)]
    calls = scene.count('read')
    yield 'a call that reads', [f'read:{n}:{error}' for n in range(1, calls + 1) for error in ERRORS]
    calls = scene.count('thread')
    yield 'a thread', [f'thread:{n}' for n in range(1, calls + 1)]
    if TCP:
        calls = scene.count('net')
        yield 'a call of a socket', [f'net:{n}:{error}' for n in range(1, calls + 1) for error in NET_ERRORS]


def spread(tries):
    """A few of them, the last among them."""
    return [tries[(k + 1) * len(tries) // FEW - 1] for k in range(min(FEW, len(tries)))]


def main():
    chance = random.Random(SEED)
    with tempfile.TemporaryDirectory() as root:
        plans = [(scene, kind, tries) for scene in scenes(root) for kind, tries in faults(scene)]
        every = sum(len(tries) for _, _, tries in plans)
        for scene, kind, tries in plans:
            began, share = time.monotonic(), SECONDS * len(tries) / every
            chosen = chance.sample(tries, min(FEW, len(tries))) if TCP or MPIRUN else spread(tries)
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

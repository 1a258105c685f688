#!/usr/bin/env python3
"""test_world.py MPIRUN TRAIN TRAIN_MPI LOGITS LOGITS_MPI TOP -- programs with processes for ranks: the threads' losses,
checkpoints and logits bit for bit, one voice, and what is left when a rank dies or stops at any moment

In the full run: every method, 8 processes, more ranks killed and stopped, and the loop of docs/clusters.md that starts a
training again with the ranks that are left.
"""

import json
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time

from run_mpi import alive, all_gone, is_open_mpi, user_launcher

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'lib'))
from checks import check, end  # pylint: disable=wrong-import-position

MPIRUN = sys.argv[1]
TRAIN, TRAIN_MPI, LOGITS, LOGITS_MPI, TOP = (os.path.abspath(path) for path in sys.argv[2:7])
FULL = bool(os.environ.get('UPIPE_FULL'))
MODEL = '--layers 2 --model-dim 64 --heads 8 --kv-heads 4 --tokens 128'.split()
LARGE = '--layers 4 --model-dim 256 --heads 8 --kv-heads 4 --tokens 128'.split()
AHEAD = ['--zero', '3', '--zero-prefetch']  # a thread that waits in a communicator of its own
# method and its flags, processes
SHORT = [('upipe', ['--chunk', '4'], 4), ('usp', AHEAD, 4), ('upipe-fpdt', ['--segments', '2'], 2)]
ALL = [(name, [], 4) for name in ('ulysses', 'upipe', 'upipe-naive', 'ring', 'zigzag', 'stripe', 'allgather', 'usp',
                                  'upipe-ring', 'double-ring', 'fpdt', 'upipe-fpdt')]
LONG = SHORT + ALL + [('upipe-ring', ['--ring', '2'], 8), ('upipe', [], 8), ('double-ring', ['--inner', '4'], 8)]
SAME = ('loss', 'grad_norm', 'peak_bytes', 'plan_bytes', 'slab_bytes', 'host_bytes', 'plan_sent_bytes', 'sent_bytes_per_step',
        'plan_moved_bytes', 'memory')
DEADLINE = 2
SECONDS = 120


def command(processes, *flags, program=TRAIN_MPI):
    return [*user_launcher(MPIRUN), '-np', str(processes), *([program] if isinstance(program, str) else program), *flags]


def run(words, **variables):
    job = subprocess.run(words, capture_output=True, timeout=SECONDS, check=False, env={**os.environ, **variables})
    return job.returncode, job.stdout.decode(errors='replace'), job.stderr.decode(errors='replace')


def own(stderr):
    return [line for line in stderr.splitlines() if line.startswith('train: ')]


def read(path):
    with open(path, 'rb') as file:
        return file.read()


def tree(folder):
    return {os.path.relpath(os.path.join(at, name), folder): read(os.path.join(at, name))
            for at, _, names in os.walk(folder) for name in names}


def test_same(folder, method, flags, processes):
    """Threads and processes: the same numbers, checkpoints and text; both hold what their plans say."""
    results = []
    for kind, words in (('threads', [TRAIN, '--ranks', str(processes)]), ('mpi', command(processes, '--transport', 'mpi'))):
        top = os.path.join(folder, f'{method}{processes}{len(flags)}{kind}')
        os.mkdir(top)
        status, out, err = run([*words, *MODEL, '--sample', '8', '--method', method, *flags, '--steps', '3', '--save', top + '/c', '--json',
                                top + '/j', '--trace', top + '/t'])
        if not check(status == 0, f'{method} on {processes} {kind} ends with {status}: {err}'):
            return
        with open(top + '/j', encoding='utf-8') as file:
            results.append((json.load(file), tree(top + '/c'), [line for line in out.splitlines() if 'tokens/s' not in line],
                            top + '/t'))
        results[-1][2][:] = [line for line in results[-1][2] if not line.startswith('checkpoint')]
    (one, saved, said, trace), (two, saved_two, said_two, trace_two) = results
    what = f'{method} on {processes} processes'
    for name in SAME:
        check(one[name] == two[name], f'{what}: {name} is {two[name]}, with threads {one[name]}')
    check(two['sent_bytes_per_step'] == two['plan_sent_bytes'], f'{what}: bytes sent are not the plan\'s')
    check(saved == saved_two and len(saved) == 3, f'{what}: other checkpoints')
    check(said == said_two, f'{what}: says {said_two}, with threads {said}')
    with open(trace, encoding='utf-8') as a, open(trace_two, encoding='utf-8') as b:
        shape = [[(e['pid'], e.get('name'), e['ph']) for e in json.load(file)] for file in (a, b)]
    check(shape[0] == shape[1] and len({e[0] for e in shape[0]}) == processes, f'{what}: another trace')


def npy(tokens):
    head = f"{{'descr': '<i4', 'fortran_order': False, 'shape': ({len(tokens)},), }}".ljust(117) + '\n'
    return b'\x93NUMPY\x01\x00' + struct.pack('<H', len(head)) + head.encode() + struct.pack(f'<{len(tokens)}i', *tokens)


def test_logits(folder):
    """Threads' logits and processes', and what one process finds otherwise than rank 0."""
    model, ids = (os.path.join(folder, name) for name in ('model', 'ids'))
    status, _, err = run([TRAIN, *MODEL, '--ranks', '2', '--steps', '1', '--sample', '0', '--save', model])
    check(status == 0, f'a model is not trained: {err}')
    for name, tokens in ((ids, range(96)), (ids + '0', range(96)), (ids + '1', range(1, 97))):
        with open(name, 'wb') as file:
            file.write(npy(tokens))
    flags = ['--load', model, '--ids', ids]
    cases = [('upipe', [], 4), ('zigzag', [], 2)]
    if FULL:
        cases += [('usp', [], 4), ('stripe', [], 3), ('upipe-fpdt', ['--segments', '2'], 2), ('upipe', [], 1)]
    for method, more, processes in cases:
        outs = []
        for words in ([LOGITS, '--ranks', str(processes)], command(processes, '--transport', 'mpi', program=LOGITS_MPI)):
            out = os.path.join(folder, f'out{len(outs)}')
            status, said, err = run([*words, *flags, '--method', method, *more, '--out', out])
            if check(status == 0 and said == '', f'logits, {method}: {status}: {said}{err}'):
                outs.append(read(out))
                os.remove(out)
        check(len(outs) == 2 and outs[0] == outs[1], f'logits, {method} on {processes} processes: other bits')
    mpi = ['--transport', 'mpi', '--out', folder + '/none']
    shell = ['sh', '-c', 'exec "$0" "$@" --ids ' + ids + '${OMPI_COMM_WORLD_RANK:-$PMI_RANK}', LOGITS_MPI]
    for program, more, sentence in ((LOGITS_MPI, [*flags, '--out', folder + '/none'], 'a launcher has started 2 processes'),
                                    (LOGITS_MPI, [*flags, *mpi, '--ranks', '3'], '--ranks 3, but the launcher has started 2'),
                                    (LOGITS_MPI, ['--load', folder, '--ids', ids, *mpi], folder),
                                    (LOGITS, [*flags, *mpi], 'built without MPI'),
                                    (shell, ['--load', model, *mpi], 'rank 1: --ids or --load finds something else')):
        status, out, err = run(command(2, *more, program=program))
        said = [line for line in err.splitlines() if line.startswith('logits: ')]
        check(status != 0 and len(said) == 1 and sentence in said[0], f'logits, {sentence}: {status}: {err}')
    check(not os.path.exists(folder + '/none'), 'logits: a run that failed leaves a file')


def test_reads(folder):
    """Each of 4 processes reads of a checkpoint what it holds, and nothing else: bytes that the kernel counts."""
    saved = os.path.join(folder, 'large')
    status, _, err = run([TRAIN, *LARGE, '--ranks', '2', '--steps', '1', '--sample', '0', '--save', saved])
    if not check(status == 0, f'a large model is not trained: {err}'):
        return
    top = os.path.join(saved, f'checkpoint-{newest(saved)}')
    model, optimizer = (os.path.getsize(os.path.join(top, name + '.safetensors')) for name in ('model', 'optimizer'))
    # the shell's count has that of the program for which it has waited
    shell = ['sh', '-c', '"$0" "$@"; status=$?; grep rchar /proc/$$/io; exit $status', TRAIN_MPI]
    cases = [(['--resume', saved, '--steps', '2', '--zero', '3'], (model + optimizer) / 4),
             (['--resume', saved, '--steps', '2', '--zero', '1'], model + optimizer / 4)]
    if FULL:
        cases += [(['--load', saved, '--steps', '1', '--tokens', '128', '--zero', '3'], model / 4),
                  (['--load', saved, '--steps', '1', '--tokens', '128', '--zero', '0'], model)]
    for flags, need in cases:
        status, out, err = run(command(4, '--transport', 'mpi', '--sample', '0', *flags, program=shell))
        reads = [int(number) for number in re.findall(r'^rchar: (\d+)$', out, re.M)]
        # what else: libraries, headers, config.json
        check(status == 0 and len(reads) == 4 and all(0 <= read - need < 1 << 20 for read in reads),
              f'{flags[:1] + flags[-2:]}: processes read {reads}, and hold {need:.0f} of {model + optimizer} bytes: {status}: {err}')


def documented_loop():
    """The lines of docs/clusters.md, from `until` to `done`."""
    with open(os.path.join(TOP, 'docs', 'clusters.md'), encoding='utf-8') as file:
        return re.search(r'^until mpirun .*?^do .*?done', file.read(), re.M | re.S).group()


def script(path, text):
    with open(path, 'w', encoding='utf-8') as file:
        file.write('#!/bin/sh\n' + text + '\n')
    os.chmod(path, 0o755)


def test_loop(folder, left, reference):
    """A rank is killed; the documented loop goes on from the newest checkpoint with the processes that are left."""
    at = os.path.join(folder, f'loop{left}')
    os.makedirs(at + '/bin')
    loop = documented_loop()
    for word, short in (('--steps 10000', '--steps 60'), ('--save-every 100', '--save-every 1'), ('sleep 10', 'sleep 0.1')):
        check(word in loop, f'the documented loop has no {word}')
        loop = loop.replace(word, short)
    # its commands, with what this machine and a short training need beside what it says
    script(at + '/bin/mpirun', 'echo >> started\nexec ' + ' '.join(command(0)[:-3]) + ' "$@"')
    script(at + '/bin/train_mpi', ' '.join(['exec', TRAIN_MPI, '"$@"', *MODEL, '--sample 0 --warmup 0 --lr 1e-3 --min-lr 1e-3 --json losses']))
    with open(at + '/alive', 'w', encoding='utf-8') as file:
        file.write('localhost\n' * 4)
    env = {**os.environ, 'PATH': at + '/bin:' + os.environ['PATH']}
    with tempfile.TemporaryFile() as said:
        job = subprocess.Popen(['sh', '-c', loop], cwd=at, env=env, stdout=said, stderr=said, start_new_session=True)
        start = time.monotonic()
        while newest(at + '/out') < 3 and job.poll() is None and time.monotonic() < start + 60:
            time.sleep(0.01)
        ranks = ranks_of(job)
        check(len(ranks) == 4, f'the loop: {len(ranks)} ranks of 4 run')
        with open(at + '/alive', 'w', encoding='utf-8') as file:
            file.write('localhost\n' * left)
        if ranks:
            os.kill(ranks[-1], signal.SIGKILL)
        try:
            status = job.wait(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            status = -1
        said.seek(0)
        text = said.read().decode(errors='replace')
    check(status == 0 and len(read(at + '/started')) == 2, f'the loop with {left} processes left ends with {status}: {text[-2000:]}')
    if not os.path.exists(at + '/losses'):
        return
    with open(at + '/losses', encoding='utf-8') as file:
        end_of = json.load(file)
    first, loss = end_of['first_step'], end_of['loss']
    check(first > 3 and len(loss) == 61 - first, f'the loop goes on with step {first}, and does {len(loss)}')
    near = 0 if left == 4 else 1e-4
    check(all(abs(a - b) <= near for a, b in zip(loss, reference[first - 1:])), f'the loop with {left} processes left: other losses')


def test_voice(folder):
    """What is wrong is said once, by rank 0, whichever rank it is wrong at."""
    flags = ['--transport', 'mpi', *MODEL, '--steps', '2']
    cases = [(command(2, *MODEL), 2, 'a launcher has started 2 processes'),
             (command(2, *flags, '--ranks', '4'), 2, '--ranks 4, but the launcher has started 2'),
             (command(2, *flags, '--method', 'usp', '--ring', '3'), 2, 'does not divide into rings'),
             (command(2, *flags, '--data', folder + '/none'), 1, 'cannot be read'),
             (command(2, *flags, program=TRAIN), 2, 'built without MPI')]
    for words, want, sentence in cases:
        status, out, err = run(words)
        check(status == want and len(own(err)) == 1 and sentence in own(err)[0] and 'tokens' not in out,
              f'{words[-3:]}: {status}: {err}')
    # a text that only rank 1 cannot read, or reads otherwise
    book = os.path.join(folder, 'book')
    with open(book, 'wb') as file:
        file.write(bytes(range(256)) * 8)
    rank = '${OMPI_COMM_WORLD_RANK:-$PMI_RANK}'
    os.symlink(book, book + '0')
    for there, sentence in ((None, 'rank 1: the text'), (b'\0' * 2048, 'rank 1: --data, --resume or --load finds')):
        if there is not None:
            with open(book + '1', 'wb') as file:
                file.write(there)
        shell = ['sh', '-c', f'exec "$0" "$@" --data {book}{rank}', TRAIN_MPI]
        status, _, err = run(command(2, *flags, program=shell))
        check(status != 0 and len(own(err)) == 1 and sentence in err, f'{sentence}: {status}: {err}')
    check(run(command(2, '--help'))[1].count('usage: train') == 1, '--help is not said once')
    status, out, _ = run(command(2, '--transport', 'threads', *MODEL, '--ranks', '1', '--steps', '1'))
    check(status == 0 and out.count('tokens/s') == 2, f'two trainings side by side: {out}')


def ranks_of(job):
    """The processes of the job that train."""
    found = []
    for pid in filter(str.isdigit, os.listdir('/proc')):
        try:
            words = read(f'/proc/{pid}/cmdline').split(b'\0')
            session = int(read(f'/proc/{pid}/stat').rpartition(b')')[2].split()[3])
        except (OSError, IndexError):
            continue
        if words[0] == os.fsencode(TRAIN_MPI) and int(pid) not in found and session_of(int(pid), job, session):
            found.append(int(pid))
    return sorted(found)


def session_of(pid, job, session):
    """Launchers give ranks process groups of their own, and may give them sessions: look at the parents too."""
    while session != job.pid and pid > 1:
        try:
            pid = int(read(f'/proc/{pid}/stat').rpartition(b')')[2].split()[1])
        except (OSError, IndexError):
            return False
        if pid == job.pid:
            return True
    return session == job.pid


def newest(folder):
    steps = [int(name[11:]) for name in os.listdir(folder) if re.fullmatch(r'checkpoint-\d+', name)] if os.path.isdir(folder) else []
    return max(steps, default=0)


def saving(folder):
    return any(name.endswith('.tmp') for name in os.listdir(folder))


def test_loss(folder, number, what, draw, reference):
    """A rank is killed or stopped at some instant of training and saving; the others end, and what is saved is whole."""
    saved = os.path.join(folder, f'loss{number}')
    ahead = AHEAD if number // 2 % 2 else []
    words = command(4, '--transport', 'mpi', *MODEL, *ahead, '--sample', '0', '--steps', '100000', '--warmup', '0', '--lr', '1e-3',
                    '--min-lr', '1e-3', '--save', saved, '--save-every', '1', '--deadline', str(DEADLINE))
    with tempfile.TemporaryFile() as said:
        job = subprocess.Popen(words, stdout=said, stderr=said, start_new_session=True)
        start = time.monotonic()
        while newest(saved) == 0 and job.poll() is None and time.monotonic() < start + 60:
            time.sleep(0.01)
        time.sleep(draw.random() * 0.3)
        while number // 2 % 2 == 0 and not saving(saved) and job.poll() is None:
            pass
        ranks = ranks_of(job)
        check(len(ranks) == 4, f'{len(ranks)} ranks of 4 run')
        victim = draw.choice(ranks)
        os.kill(victim, what)
        lost = time.monotonic()
        while any(alive(pid) for pid in ranks if pid != victim) and time.monotonic() < lost + 60:
            time.sleep(0.01)
        took = time.monotonic() - lost
        try:
            status = job.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            status = 0
        gone = all_gone(ranks)
        said.seek(0)
        text = said.read().decode(errors='replace')
    for pid in ranks:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)
    name = signal.Signals(what).name
    check(status != 0 and gone, f'{name}: the job ends with {status}, all gone: {gone}: {text}')
    check(took <= DEADLINE + 1, f'{name}: the others are gone after {took:.2f} s: {text}')
    check(re.search(r'rank \d', text) is not None, f'{name}: nobody says who is missing: {text}')
    step = newest(saved)
    status, _, err = run([TRAIN, '--resume', saved, '--save', saved, '--ranks', '4', '--steps', str(step + 1), '--sample', '0',
                          '--json', saved + '.json', '--lr', '1e-3', '--min-lr', '1e-3', '--warmup', '0'])
    if check(status == 0, f'{name}: what is left at step {step} does not go on: {err}') and step < len(reference):
        with open(saved + '.json', encoding='utf-8') as file:
            check(json.load(file)['loss'] == [reference[step]], f'{name}: step {step + 1} has another loss')
    shutil.rmtree(saved)
    return took


def test_signal(folder):
    """A signal that the launcher passes on ends all ranks after the same step, with a checkpoint."""
    saved = os.path.join(folder, 'signalled')
    words = command(2, '--transport', 'mpi', *MODEL, '--steps', '100000', '--sample', '0', '--save', saved, '--progress')
    with tempfile.TemporaryFile() as said:
        job = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=said, start_new_session=True)
        start = time.monotonic()
        while len(ranks_of(job)) < 2 and time.monotonic() < start + 60:
            time.sleep(0.05)
        # Not any line: what a library says at its start comes before the program's handlers.
        while time.monotonic() < start + 60 and not re.search(rb'^step \d+/', os.pread(said.fileno(), 1 << 20, 0), re.M):
            time.sleep(0.05)
        job.send_signal(signal.SIGUSR1)
        job.communicate(timeout=SECONDS)
        said.seek(0)
        text = said.read().decode(errors='replace')
    ended = [line for line in own(text) if 'ended by a signal' in line]
    steps = re.findall(r'^step (\d+)/', text, re.M)
    check(job.returncode != 0 and len(ended) == 1, f'after SIGUSR1 {job.returncode}: {text[-1000:]}')
    check(steps and newest(saved) == int(steps[-1]), f'{newest(saved)} is saved, the last step is {steps[-1:]}')


def reference_losses(folder):
    """Of 200 steps on 4 threads."""
    path = os.path.join(folder, 'reference.json')
    run([TRAIN, *MODEL, '--ranks', '4', '--steps', '200', '--lr', '1e-3', '--min-lr', '1e-3', '--warmup', '0', '--json', path])
    with open(path, encoding='utf-8') as file:
        return json.load(file)['loss']


def test_losses(folder, reference):
    draw = random.Random(int(os.environ.get('UPIPE_SEED', '1')))
    tries = int(os.environ.get('UPIPE_WORLD_TRIES', '2'))
    took = [test_loss(folder, number, (signal.SIGKILL, signal.SIGSTOP)[number % 2], draw, reference) for number in range(tries)]
    late = sum(seconds > DEADLINE + 1 for seconds in took)
    print(f'reached: {tries} ranks lost; the others were gone after {max(took):.2f} s at most, the deadline is {DEADLINE} s; '
          f'{late} times later than a second after it')


def main():
    with tempfile.TemporaryDirectory() as folder:
        for case in LONG if FULL else SHORT:
            test_same(folder, *case)
        test_voice(folder)
        test_logits(folder)
        test_reads(folder)
        if is_open_mpi(MPIRUN):
            reference = reference_losses(folder)
            test_signal(folder)
            test_losses(folder, reference)
            for left in (4, 2) if FULL else ():
                test_loop(folder, left, reference)
    return end('world')


if __name__ == '__main__':
    sys.exit(main())

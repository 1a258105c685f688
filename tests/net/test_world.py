#!/usr/bin/env python3
"""test_world.py MPIRUN TRAIN TRAIN_MPI LOGITS LOGITS_MPI TOP same|lost -- programs with processes for ranks. same: the
threads' losses, checkpoints and logits bit for bit, and one voice; lost: what is left when a rank dies or stops at any
moment, and how soon, for which the machine must have no other work; with Open MPI

In the full run: every method, 8 processes, more ranks killed and stopped, and the loop of docs/clusters.md that starts a
training again with the ranks that are left.
"""

import contextlib
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time

from run_mpi import RANK, SECONDS, Job, alive, all_gone, command, newest, own, rank_one
from checks import check, end, load, needed, read, run_command, run_test, tree, wait_for, write
from programs import METHODS, npy

MPIRUN = sys.argv[1]
TRAIN, TRAIN_MPI, LOGITS, LOGITS_MPI, TOP = (os.path.abspath(path) for path in sys.argv[2:7])
FULL = bool(os.environ.get('UPIPE_FULL'))
MODEL = '--layers 2 --model-dim 64 --heads 8 --kv-heads 4 --tokens 128'.split()
LARGE = '--layers 4 --model-dim 256 --heads 8 --kv-heads 4 --tokens 128'.split()
AHEAD = ['--zero', '3', '--zero-prefetch']  # a thread that waits in a communicator of its own
# what a rank is lost to: teams, rings and that thread
LOST = [[], ['--replicas', '2'], AHEAD, ['--method', 'usp', *AHEAD], ['--method', 'upipe-ring']]
# method and its flags, processes
SHORT = [('upipe', ['--chunk', '4'], 4), ('usp', AHEAD, 4), ('upipe-fpdt', ['--segments', '2'], 2)]
ALL = [(name, [], 4) for name in METHODS]
LONG = SHORT + ALL + [('upipe-ring', ['--ring', '2'], 8), ('upipe', [], 8), ('usp', ['--replicas', '2'], 8), ('double-ring', ['--inner', '4'], 8)]
SAME = ('loss', 'grad_norm', 'peak_bytes', 'plan_bytes', 'slab_bytes', 'host_bytes', 'plan_sent_bytes', 'sent_bytes_per_step',
        'plan_moved_bytes', 'memory')
# flags of one rank alone, and what they say there and on rank 0
DISAGREE = [('--lr 0.5', '0.5', '0.001'), ('--zero-prefetch', 'given', 'not given'), ('--save x', 'x', 'not given'),
            ('--method usp', 'usp', 'upipe'), ('--norm-eps 1e-6', '1e-06', '1e-05'), ('--steps 3', '3', '2'), ('--seed 2', '2', '1'),
            ('--adam-eps 1e-9', '1e-09', '1e-08'), ('--beta1 0.8', '0.8', '0.9'), ('--weight-decay 0', '0', '0.1'), ('--warmup 2', '2', 'not given'),
            ('--clip 0', '0', '1'), ('--min-lr 1e-4', '0.0001', 'not given')]
DEADLINE = 2
STEADY = '--warmup 0 --lr 1e-3 --min-lr 1e-3'.split()  # a rate that does not depend on the number of steps


def mpi(processes, *flags, program=TRAIN_MPI):
    return command(MPIRUN, processes, program, *flags)


def run(words, **variables):
    job = run_command(words, SECONDS, variables)
    return job.returncode, job.stdout, job.stderr


def trained(folder, *flags):
    """A checkpoint of a step on two threads."""
    status, _, err = run([TRAIN, *flags, '--ranks', '2', '--steps', '1', '--sample', '0', '--save', folder])
    needed(status == 0, f'a model is not trained: {err}')


def test_same(folder, method, flags, processes):
    """Threads and processes: the same numbers, checkpoints and text; both hold what their plans say."""
    results, what = [], f'{method} on {processes} processes'
    for kind, words in (('threads', [TRAIN, '--ranks', str(processes)]), ('mpi', mpi(processes, '--transport', 'mpi'))):
        top = os.path.join(folder, f'{method}{processes}{len(flags)}{kind}')
        os.mkdir(top)
        status, out, err = run([*words, *MODEL, '--sample', '8', '--method', method, *flags, '--steps', '3', '--save', top + '/c', '--json',
                                top + '/j', '--trace', top + '/t'])
        needed(status == 0, f'{what}, {kind}: {status}: {err}')
        results.append((load(top + '/j'), tree(top + '/c'),
                        [line for line in out.splitlines() if 'tokens/s' not in line and not line.startswith('checkpoint')],
                        [(e['pid'], e.get('name'), e['ph']) for e in load(top + '/t')]))
    (one, saved, said, trace), (two, saved_two, said_two, trace_two) = results
    for name in SAME:
        check(one[name] == two[name], f'{what}: {name} is {two[name]}, with threads {one[name]}')
    check(two['sent_bytes_per_step'] == two['plan_sent_bytes'], f'{what}: bytes sent are not the plan\'s')
    check(saved == saved_two and len(saved) == 4, f'{what}: other checkpoints')  # a folder with three files
    check(said == said_two, f'{what}: says {said_two}, with threads {said}')
    check(trace == trace_two and len({pid for pid, *_ in trace}) == processes, f'{what}: another trace')


def test_logits(folder):
    """Threads' logits and processes', and what one process finds otherwise than rank 0."""
    model, ids = (os.path.join(folder, name) for name in ('model', 'ids'))
    trained(model, *MODEL)
    for name, tokens in ((ids, range(96)), (ids + '0', range(96)), (ids + '1', range(1, 97))):
        write(name, npy(tokens))
    flags = ['--load', model, '--ids', ids]
    cases = [('upipe', [], 4), ('zigzag', [], 2)]
    if FULL:
        cases += [('usp', [], 4), ('stripe', [], 3), ('upipe-fpdt', ['--segments', '2'], 2), ('upipe', [], 1)]
    for method, more, processes in cases:
        outs = []
        for words in ([LOGITS, '--ranks', str(processes)], mpi(processes, '--transport', 'mpi', program=LOGITS_MPI)):
            out = os.path.join(folder, f'out{len(outs)}')
            status, said, err = run([*words, *flags, '--method', method, *more, '--out', out])
            if check(status == 0 and said == '', f'logits, {method}: {status}: {said}{err}'):
                outs.append(read(out))
                os.remove(out)
        check(len(outs) == 2 and outs[0] == outs[1], f'logits, {method} on {processes} processes: other bits')
    over = ['--transport', 'mpi', '--out', folder + '/none']
    shell = ['sh', '-c', f'exec "$0" "$@" --ids {ids}{RANK}', LOGITS_MPI]
    for program, more, sentence in ((LOGITS_MPI, [*flags, '--out', folder + '/none'], 'a launcher has started 2 processes'),
                                    (LOGITS_MPI, [*flags, *over, '--ranks', '3'], '--ranks 3, but the launcher has started 2'),
                                    (LOGITS_MPI, ['--load', folder, '--ids', ids, *over], folder),
                                    (LOGITS, [*flags, *over], 'built without MPI'),
                                    (shell, ['--load', model, *over], 'rank 1: --ids or --load finds something else'),
                                    (rank_one(LOGITS_MPI, '--dtype', 'bf16'), [*flags, *over],
                                     'ranks disagree: dtype is bf16 on rank 1, f32 on rank 0'),
                                    (rank_one(LOGITS_MPI, '--out'), [*flags, *over], 'rank 1: --out wants a value')):
        status, out, err = run(mpi(2, *more, program=program))
        said = own('logits', err)
        check(status != 0 and len(said) == 1 and sentence in said[0], f'logits, {sentence}: {status}: {err}')
    check(not os.path.exists(folder + '/none'), 'logits: a run that failed leaves a file')


def test_reads(folder):
    """Each of 4 processes reads of a checkpoint what it holds, and nothing else: bytes that the kernel counts."""
    saved = os.path.join(folder, 'large')
    trained(saved, *LARGE)
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
        status, out, err = run(mpi(4, '--transport', 'mpi', '--sample', '0', *flags, program=shell))
        reads = [int(number) for number in re.findall(r'^rchar: (\d+)$', out, re.M)]
        # what else: libraries, headers, config.json
        check(status == 0 and len(reads) == 4 and all(0 <= read - need < 1 << 20 for read in reads),
              f'{flags[:1] + flags[-2:]}: processes read {reads}, and hold {need:.0f} of {model + optimizer} bytes: {status}: {err}')


def documented_loop():
    """The lines of docs/clusters.md, from `until` to `done`."""
    text = read(os.path.join(TOP, 'docs', 'clusters.md')).decode()
    return re.search(r'^until mpirun .*?^do .*?done', text, re.M | re.S).group()


def script(path, text):
    write(path, f'#!/bin/sh\n{text}\n')
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
    script(at + '/bin/mpirun', 'echo >> started\nexec ' + ' '.join(mpi(0)[:-3]) + ' "$@"')
    script(at + '/bin/train_mpi', ' '.join(['exec', TRAIN_MPI, '"$@"', *MODEL, '--sample 0', *STEADY, '--json losses']))
    write(at + '/alive', 'localhost\n' * 4)
    job = Job(['sh', '-c', loop], cwd=at, env={**os.environ, 'PATH': at + '/bin:' + os.environ['PATH']})
    wait_for(lambda: newest(at + '/out') >= 3 or not job.runs())
    ranks = ranks_of(job)
    check(len(ranks) == 4, f'the loop: {len(ranks)} ranks of 4 run')
    write(at + '/alive', 'localhost\n' * left)
    if ranks:
        os.kill(ranks[-1], signal.SIGKILL)
    status = job.end()
    check(status == 0 and len(read(at + '/started')) == 2,
          f'the loop with {left} processes left ends with {status}: {job.text()[-2000:]}')
    if not os.path.exists(at + '/losses'):
        return
    end_of = load(at + '/losses')
    first, loss = end_of['first_step'], end_of['loss']
    check(first > 3 and len(loss) == 61 - first, f'the loop goes on with step {first}, and does {len(loss)}')
    near = 0 if left == 4 else 1e-4
    check(all(abs(a - b) <= near for a, b in zip(loss, reference[first - 1:])), f'the loop with {left} processes left: other losses')


def test_voice(folder):
    """What is wrong is said once, by rank 0, whichever rank it is wrong at."""
    flags = ['--transport', 'mpi', *MODEL, '--steps', '2']
    cases = [(mpi(2, *MODEL), 2, 'a launcher has started 2 processes'),
             (mpi(2, *flags, '--ranks', '4'), 2, '--ranks 4, but the launcher has started 2'),
             (mpi(2, *flags, '--method', 'usp', '--ring', '3'), 2, 'does not divide into rings'),
             (mpi(2, *flags, '--data', folder + '/none'), 1, 'cannot be read'),
             (mpi(2, *flags, program=TRAIN), 2, 'built without MPI')]
    for words, want, sentence in cases:
        status, out, err = run(words)
        said = own('train', err)
        check(status == want and len(said) == 1 and sentence in said[0] and 'tokens' not in out, f'{words[-3:]}: {status}: {err}')
    # a text that only rank 1 cannot read, or reads otherwise
    book = os.path.join(folder, 'book')
    write(book, bytes(range(256)) * 8)
    os.symlink(book, book + '0')
    finds = 'rank 1: --data, --tokens-file, --eval, --resume or --load finds'
    for flag, there, sentence in (('data', None, 'rank 1: --data'), ('data', b'\0' * 2048, finds), ('eval', b'\0' * 2048, finds)):
        if there is not None:
            write(book + '1', there)
        status, _, err = run(mpi(2, *flags, program=['sh', '-c', f'exec "$0" "$@" --{flag} {book}{RANK}', TRAIN_MPI]))
        check(status != 0 and len(own('train', err)) == 1 and sentence in err, f'--{flag}, {sentence}: {status}: {err}')
    # words that one rank alone has otherwise: before the first step, in one sentence
    cases = [(one, 1, f'ranks disagree: {one.split()[0][2:]} is {says[0]} on rank 1, {says[1]} on rank 0') for one, *says in DISAGREE[:None if FULL else 6]]
    cases += [('--frobnicate', 2, "rank 1: '--frobnicate' is no flag"), ('--lr 1x', 2, 'rank 1: --lr wants a number'),
              ('--transport wire', 2, "rank 1: --transport is threads, mpi, nccl or tcp, not 'wire'"), ('--lr', 2, 'rank 1: --lr wants a value'),
              ('--window 4 --qk-norm', 1, 'ranks disagree: qk-norm is given on rank 1')]
    for one, want, sentence in cases:
        status, out, err = run(mpi(2, *flags, program=rank_one(TRAIN_MPI, one)))
        said = own('train', err)
        check(status == want and len(said) == 1 and sentence in said[0] and out == '', f'{one} on rank 1 alone: {status}: {err}')
    for omits in (0, 1):
        shell = ['sh', '-c', f'[ {RANK} = {omits} ] && shift 2; exec "$0" "$@"', TRAIN_MPI]
        status, out, err = run(mpi(2, *flags, program=shell))
        said = own('train', err)
        check(status == 2 and len(said) == 1 and 'rank 1: ' * omits + 'a launcher has started 2 processes' in said[0] and out == '',
              f'rank {omits} without --transport: {status}: {err}')
    # and what a folder says otherwise there
    trained(folder + '/kept0', *MODEL)
    shutil.copytree(folder + '/kept0', folder + '/kept1')
    config = folder + '/kept1/checkpoint-1/config.json'
    text = read(config).decode()
    write(config, text.replace('1e-05', '2e-05'))
    check('1e-05' in text, f'no eps in {text}')
    for flag in '--resume', '--load':
        shell = ['sh', '-c', f'exec "$0" "$@" {flag} {folder}/kept{RANK}', TRAIN_MPI]
        status, out, err = run(mpi(2, '--transport', 'mpi', '--steps', '2', '--tokens', '128', program=shell))
        check(status == 1 and len(own('train', err)) == 1 and 'ranks disagree: norm-eps is 2e-05 on rank 1, 1e-05 on rank 0' in err,
              f'{flag}: {status}: {err}')
    check(run(mpi(2, '--help'))[1].count('usage: train') == 1, '--help is not said once')
    status, out, _ = run(mpi(2, '--transport', 'threads', *MODEL, '--ranks', '1', '--steps', '1'))
    check(status == 0 and out.count('tokens/s') == 2, f'two trainings side by side: {out}')


def ranks_of(job):
    """The processes of the job that train. Launchers give ranks process groups of their own, and may give them sessions: so
    parents count too."""
    def about(pid):  # its parent, and its session
        fields = read(f'/proc/{pid}/stat').rpartition(b')')[2].split()
        return int(fields[1]), int(fields[3])

    def belongs(pid):
        if about(pid)[1] == job.process.pid:
            return True
        while pid > 1:
            pid = about(pid)[0]
            if pid == job.process.pid:
                return True
        return False

    found = []
    for pid in filter(str.isdigit, os.listdir('/proc')):
        with contextlib.suppress(OSError, IndexError):
            if read(f'/proc/{pid}/cmdline').split(b'\0')[0] == os.fsencode(TRAIN_MPI) and belongs(int(pid)):
                found.append(int(pid))
    return sorted(found)


def saving(folder):
    return any(name.endswith('.tmp') for name in os.listdir(folder))


def test_loss(folder, number, what, draw, reference):
    """A rank is killed or stopped at some instant of training and saving; the others end, and what is saved is whole."""
    saved, way = os.path.join(folder, f'loss{number}'), LOST[number % len(LOST)]
    job = Job(mpi(4, '--transport', 'mpi', *MODEL, *way, '--sample', '0', '--steps', '100000', *STEADY, '--save', saved,
                  '--save-every', '1', '--deadline', str(DEADLINE)))
    wait_for(lambda: newest(saved) > 0 or not job.runs())
    time.sleep(draw.random() * 0.3)
    while number // 2 % 2 == 0 and not saving(saved) and job.runs():
        pass
    ranks = ranks_of(job)
    check(len(ranks) == 4, f'{len(ranks)} ranks of 4 run')
    victim = draw.choice(ranks)
    missing = read(f'/proc/{victim}/environ').split(b'OMPI_COMM_WORLD_RANK=')[1].split(b'\0')[0].decode()
    os.kill(victim, what)
    lost = time.monotonic()
    wait_for(lambda: not any(alive(pid) for pid in ranks if pid != victim))
    took = time.monotonic() - lost
    status, gone, text = job.end(60), all_gone(ranks), job.text()
    for pid in filter(alive, ranks):
        os.kill(pid, signal.SIGKILL)
    name = signal.Signals(what).name
    check(status != 0 and gone, f'{name}: the job ends with {status}, all gone: {gone}: {text}')
    check(took <= DEADLINE + 1, f'{name}: the others are gone after {took:.2f} s: {text}')
    said = own('train', text)
    # of a rank that is killed the launcher says so, if it is faster than the others
    blamed = re.findall(r'for ranks? ([\d, ]+)', ' '.join(said))
    check((said or what == signal.SIGKILL) and len(said) <= 3, f'{name}: not a sentence of each: {text}')
    check(all(one.strip() == missing for one in blamed) and f'rank {missing}' in text, f'{name}: rank {missing} is missing: {text}')
    step = newest(saved)
    status, _, err = run([TRAIN, '--resume', saved, '--save', saved, '--ranks', '4', '--steps', str(step + 1), '--sample', '0',
                          '--json', saved + '.json', *STEADY])
    if check(status == 0, f'{name}: what is left at step {step} does not go on: {err}') and step < len(reference) and way in ([], AHEAD):
        check(load(saved + '.json')['loss'] == [reference[step]], f'{name}: step {step + 1} has another loss')
    shutil.rmtree(saved)
    return took


def test_start(draw):
    """A rank is stopped while MPI starts: one of the others says that one does not come, and they end. What becomes of
    mpirun then is its own affair (docs/clusters.md)."""
    job = Job(mpi(4, '--transport', 'mpi', *MODEL, '--steps', '1', '--deadline', str(DEADLINE)))
    wait_for(lambda: len(ranks_of(job)) == 4 or not job.runs())
    ranks = ranks_of(job)
    victim = draw.choice(ranks)
    os.kill(victim, signal.SIGSTOP)
    lost = time.monotonic()
    wait_for(lambda: not any(alive(pid) for pid in ranks if pid != victim))
    took = time.monotonic() - lost
    if not wait_for(lambda: not job.runs(), 5):
        os.killpg(job.process.pid, signal.SIGKILL)
    job.end()
    said = own('train', job.text())
    for pid in filter(alive, ranks):
        os.kill(pid, signal.SIGKILL)
    check(len(said) == 1 and 'MPI_Init waits for a process that does not come' in said[0],
          f'process {ranks.index(victim)} of 4 is stopped as MPI starts: {job.text()}')
    check(took <= DEADLINE + 4, f'process {ranks.index(victim)} of 4 is stopped as MPI starts: the others are gone after {took:.2f} s')


def test_signal(folder):
    """A signal that the launcher passes on ends all ranks after the same step, with a checkpoint."""
    saved = os.path.join(folder, 'signalled')
    job = Job(mpi(2, '--transport', 'mpi', *MODEL, '--steps', '100000', '--sample', '0', '--save', saved, '--progress'))
    # Not any line: what a library says at its start comes before the program's handlers.
    wait_for(lambda: len(ranks_of(job)) == 2 and re.search(r'^step \d+/', job.text(), re.M), pause=0.05)
    job.process.send_signal(signal.SIGUSR1)
    status, text = job.end(), job.text()
    ended = [line for line in own('train', text) if 'ended by a signal' in line]
    steps = re.findall(r'^step (\d+)/', text, re.M)
    check(status != 0 and len(ended) == 1, f'after SIGUSR1 {status}: {text[-1000:]}')
    check(steps and newest(saved) == int(steps[-1]), f'{newest(saved)} is saved, the last step is {steps[-1:]}')


def reference_losses(folder):
    """Of 200 steps on 4 threads."""
    path = os.path.join(folder, 'reference.json')
    run([TRAIN, *MODEL, '--ranks', '4', '--steps', '200', *STEADY, '--json', path])
    return load(path)['loss']


def test_losses(folder, reference):
    draw = random.Random(int(os.environ.get('UPIPE_SEED', '1')))
    tries = int(os.environ.get('UPIPE_WORLD_TRIES', '2'))
    for _ in range(max(1, tries // 5)):
        test_start(draw)
    took = [test_loss(folder, number, (signal.SIGKILL, signal.SIGSTOP)[number % 2], draw, reference) for number in range(tries)]
    late = sum(seconds > DEADLINE + 1 for seconds in took)
    print(f'reached: {tries} ranks lost; the others were gone after {max(took):.2f} s at most, the deadline is {DEADLINE} s; '
          f'{late} times later than a second after it')


def main():
    with tempfile.TemporaryDirectory() as folder:
        if sys.argv[7] == 'same':
            for test, *case in [*((test_same, *case) for case in (LONG if FULL else SHORT)), (test_voice,), (test_logits,), (test_reads,)]:
                run_test(test, folder, *case)
        else:
            reference = reference_losses(folder)
            run_test(test_signal, folder)
            run_test(test_losses, folder, reference)
            for left in (4, 2) if FULL else ():
                run_test(test_loop, folder, left, reference)
    return end(f'world, {sys.argv[7]}')


if __name__ == '__main__':
    sys.exit(main())

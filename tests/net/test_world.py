#!/usr/bin/env python3
"""test_world.py tcp|mpi|lost|sides TRAIN LOGITS COMPARE TOP [MPIRUN TRAIN_MPI LOGITS_MPI COMPARE_MPI] -- programs whose ranks are
processes, over TCP and, where it is there, MPI

tcp, mpi: what threads write and say, bit for bit; what is wrong is said once; over TCP a rank that is lost is named by all others.
lost: ranks that are killed or stopped at any moment of a training, how soon the others leave, and what is left; over MPI
where the launcher is Open MPI's, as others end with the first rank that does. sides: two machines, which are network
namespaces (sides.py), whose link is slow, loses packets or is cut. For lost and sides the machine must have no other work.
In the full run: every method, 8 processes, more ranks lost, and the loop of docs/clusters.md that starts a training again
with the ranks that are left.
"""

import concurrent.futures
import contextlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'lib'))
# pylint: disable=wrong-import-position
from checks import check, end, equal, load, needed, read, run_command, run_test, tree, wait_for, write
from launch import PROGRAM, SECRET, Job, Mpi, Run, Tcp, alive, newest, run_ranks
from programs import METHODS, npy
from sides import Link, MpiSides, TcpSides
# pylint: enable=wrong-import-position

KIND = sys.argv[1]
TRAIN, LOGITS, COMPARE, TOP = (os.path.abspath(path) for path in sys.argv[2:6])
MPI = Mpi(sys.argv[6]) if len(sys.argv) > 6 else None
if MPI and KIND != 'mpi' and not MPI.is_open:  # which ends all with the first rank that does
    MPI = None
LAUNCHERS = [*[Tcp()] * (KIND != 'mpi'), *[MPI] * bool(MPI)]
FULL = bool(os.environ.get('UPIPE_FULL'))
MODEL = '--layers 2 --model-dim 64 --heads 8 --kv-heads 4 --tokens 128'.split()
LARGE = '--layers 4 --model-dim 256 --heads 8 --kv-heads 4 --tokens 128'.split()
BLOCK = '--heads 8 --kv-heads 4 --head-dim 32 --model-dim 64 --tokens 250'.split()  # tokens that do not divide
STEADY = '--sample 0 --warmup 0 --lr 1e-3 --min-lr 1e-3'.split()  # a rate that does not depend on the number of steps
AHEAD = ['--zero', '3', '--zero-prefetch']  # a thread that waits in a communicator of its own
DEADLINE = 2


def words(launcher, program, *flags):
    return [program + '_mpi' * (launcher.name == 'mpi'), '--transport', launcher.name, *flags]


def on_threads(program, ranks, *flags, cwd=None):
    """Of a run that must end well, what it prints."""
    done = run_command([program, '--ranks', ranks, *flags], cwd=cwd)
    needed(done.returncode == 0, f'{program} on threads, {flags}: {done.returncode}: {done.stderr}')
    return done.stdout


def trained(folder, *flags):
    """A checkpoint of a step."""
    on_threads(TRAIN, 2, *flags, '--steps', 1, '--sample', 0, '--save', folder)


# ---- the same as threads ----


def without_times(value):
    if isinstance(value, dict):
        return {key: without_times(one) for key, one in value.items() if key not in ('transport', 'tokens_per_s') and not key.startswith('seconds')}
    return [without_times(one) for one in value] if isinstance(value, list) else value


def results(folder):
    """What a run has left there: bytes, but for numbers and traces, of which times differ."""
    found = {}
    for path, data in tree(folder).items():
        if data and path.startswith('trace'):
            data = [(event['pid'], event.get('name'), event['ph']) for event in json.loads(data)]
        elif data and path == 'numbers':
            data = without_times(json.loads(data))
        found[path] = data
    return found


def printed(text):
    """Without times."""
    return re.sub(r'\d+ tokens/s| +\d+\.\d{3} +\d+\.\d{3}(?= +\d\.\de)', '', text)


def same(folder, program, ranks, *flags):
    """Threads and processes leave and print the same: numbers, traces, checkpoints, results. What they leave."""
    def fresh():
        shutil.rmtree(at, ignore_errors=True)
        os.mkdir(at)

    at, what = os.path.join(folder, 'at'), f'{os.path.basename(program)} {flags} on {ranks} processes'
    fresh()
    out = printed(on_threads(program, ranks, *flags, cwd=at))
    want = results(at)
    for launcher in LAUNCHERS:
        fresh()
        statuses, outs, errs, _ = run_ranks(launcher, ranks, words(launcher, program, *flags), cwd=at)
        if not check(not any(statuses), f'{what}, {launcher.name}: {statuses}: {errs}'):
            continue
        got = results(at)
        equal(sorted(got), sorted(want), f'{what}, {launcher.name}: the files')
        for name in set(got) & set(want):
            equal(got[name], want[name], f'{what}, {launcher.name}: {name}')
        equal([printed(one) for one in outs], [out] + [''] * (ranks - 1), f'{what}, {launcher.name}: what ranks print')
        if 'numbers' in got:
            equal(load(at + '/numbers')['config']['transport'], launcher.name, f'{what}: the transport')
    return want


# processes and flags
TRAININGS = [(4, '--method upipe --chunk 4'), (4, '--method usp --zero 3 --zero-prefetch'), (2, '--method upipe-fpdt --segments 2'),
             (8, '--method usp --replicas 2 --zero 3')]
COMPARISONS = [(4, 'upipe ulysses ring usp fpdt', '--segments 2 --sinks')]
READINGS = [(4, 'upipe'), (2, 'zigzag')]
if FULL:
    TRAININGS += [(4, '--method ' + name) for name in METHODS]
    TRAININGS += [(8, '--method upipe-ring --ring 2'), (8, '--method upipe'), (8, '--method double-ring --inner 4'),
                  (4, '--method upipe-fpdt --segments 2 --replicas 2'), (1, '--method ulysses')]
    COMPARISONS += [(2, 'ulysses upipe zigzag upipe-fpdt', '--segments 2 --dtype bf16 --layers 3'),
                    (4, ' '.join(METHODS), '--segments 2 --window 70 --rope'), (4, 'upipe fpdt', '--segments 2 --overlap'),
                    (8, 'ulysses upipe double-ring usp upipe-ring', '--inner 4 --ring 2'),
                    (3, 'ulysses stripe upipe', '--offload --layers 2'), (1, 'ulysses ring fpdt', '--segments 2')]
    READINGS += [(4, 'usp'), (3, 'stripe'), (2, 'upipe-fpdt --segments 2'), (1, 'upipe')]


def test_same(folder):
    for ranks, flags in TRAININGS:
        want = same(folder, TRAIN, ranks, *MODEL, *flags.split(), *'--sample 8 --steps 3 --save c --json numbers --trace trace'.split())
        equal(sorted(want), ['c', *(f'c/checkpoint-3{name}' for name in ('', '/config.json', '/model.safetensors', '/optimizer.safetensors')),
                             'numbers', 'trace'], f'{flags}: the files')
        equal({pid for pid, *_ in want['trace']}, set(range(ranks)), f'{flags}: ranks of the trace')
        equal(want['numbers']['sent_bytes_per_step'], want['numbers']['plan_sent_bytes'], f'{flags}: bytes sent')
    trained(folder + '/model', *MODEL)
    write(folder + '/ids', npy(range(96)))
    for ranks, method in READINGS:
        same(folder, LOGITS, ranks, '--load', folder + '/model', '--ids', folder + '/ids', '--out', 'out', '--method', *method.split())


def test_compare(folder):
    """compare itself holds bytes to the plan, and results to their errors."""
    for ranks, methods, flags in COMPARISONS:
        names = methods.split()
        want = same(folder, COMPARE, ranks, *BLOCK, *flags.split(), *(word for name in names for word in ('--method', name)),
                    *'--check on --json numbers --trace traces --dump dump'.split())
        check({f'traces/{name}.json' for name in names} < set(want) and sum(path.startswith('dump/') for path in want) > 10 * len(names),
              f'{methods}: the files are {sorted(want)}')
        check(all(one['err_out'] is not None for one in want['numbers']['methods']), f'{methods}: no errors')


def test_reads(folder):
    """Each of 4 processes reads of a checkpoint what it holds, and nothing else: bytes that the kernel counts."""
    saved = os.path.join(folder, 'large')
    trained(saved, *LARGE)
    model, optimizer = (os.path.getsize(f'{saved}/checkpoint-1/{name}.safetensors') for name in ('model', 'optimizer'))
    # the shell's count has that of the program for which it has waited
    shell = '"$0" "$@"; status=$?; grep rchar /proc/$$/io; exit $status'
    cases = [(['--resume', saved, '--steps', '2', '--zero', '3'], (model + optimizer) / 4),
             (['--resume', saved, '--steps', '2', '--zero', '1'], model + optimizer / 4)]
    if FULL:
        cases += [(['--load', saved, '--steps', '1', '--tokens', '128', '--zero', '3'], model / 4),
                  (['--load', saved, '--steps', '1', '--tokens', '128', '--zero', '0'], model)]
    for launcher, (flags, need) in itertools.product(LAUNCHERS, cases):
        statuses, outs, errs, _ = run_ranks(launcher, 4, words(launcher, TRAIN, '--sample', '0', *flags), shell=shell)
        reads = [int(number) for number in re.findall(r'^rchar: (\d+)$', ''.join(outs), re.M)]
        # what else: libraries, headers, config.json
        check(not any(statuses) and len(reads) == 4 and all(0 <= read - need < 1 << 20 for read in reads),
              f'{launcher.name} {flags[:1] + flags[-2:]}: processes read {reads}, and hold {need:.0f} of {model + optimizer} bytes: {errs}')


# ---- one voice ----

SMALL = {TRAIN: f'{" ".join(MODEL)} --steps 2 --json numbers --trace trace', COMPARE: f'{" ".join(BLOCK)} --json numbers --trace traces --dump dump',
         LOGITS: '--load ../kept0 --ids ../ids0 --out out'}
FINDS = 'rank 1: --data, --tokens-file, --eval, --resume or --load finds'
DISAGREE = 'ranks disagree: norm-eps is 2e-05 on rank 1, 1e-05 on rank 0'
# program, its flags, status, what is said: of all ranks, and of rank 1 alone
OF_ALL = [(program, '--ranks 4', 2, '--ranks 4, but the launcher has started 2') for program in (TRAIN, COMPARE, LOGITS)]
OF_ALL += [(TRAIN, '--method usp --ring 3', 2, 'does not divide into rings'), (TRAIN, '--data none', 1, 'cannot be read'),
           (TRAIN, '--data ../none$RANK', 1, 'rank 1: --data'), (TRAIN, '--data ../book$RANK', 1, FINDS), (TRAIN, '--eval ../book$RANK', 1, FINDS),
           (TRAIN, '--resume ../kept$RANK', 1, DISAGREE), (TRAIN, '--load ../kept$RANK', 1, DISAGREE),
           (COMPARE, '--method usp --ring 3', 2, 'do not divide into rings'), (COMPARE, '--json /dev/full/none', 1, 'cannot be written'),
           (COMPARE, '--data ../none$RANK', 1, 'rank 1: the text'), (COMPARE, '--data ../book$RANK', 1, 'rank 1: --data finds something else'),
           (LOGITS, '--load .', 1, '.: '), (LOGITS, '--ids ../ids$RANK', 1, 'rank 1: --ids or --load finds something else')]
OF_ONE = [(TRAIN, flags, 1, f'ranks disagree: {flags.split()[0][2:]} is {there} on rank 1, {here} on rank 0') for flags, there, here in [
    ('--lr 0.5', '0.5', '0.001'), ('--zero-prefetch', 'given', 'not given'), ('--save x', 'x', 'not given'), ('--method usp', 'usp', 'upipe'),
    ('--norm-eps 1e-6', '1e-06', '1e-05'), ('--steps 3', '3', '2'), ('--qk-norm --window 4', 'given', 'not given'), *[
        ('--seed 2', '2', '1'), ('--adam-eps 1e-9', '1e-09', '1e-08'), ('--beta1 0.8', '0.8', '0.9'), ('--weight-decay 0', '0', '0.1'),
        ('--warmup 2', '2', 'not given'), ('--clip 0', '0', '1'), ('--min-lr 1e-4', '0.0001', 'not given')] * FULL]]
OF_ONE += [(TRAIN, '--frobnicate', 2, "rank 1: '--frobnicate' is no flag"), (TRAIN, '--lr 1x', 2, 'rank 1: --lr wants a number'),
           (TRAIN, '--lr', 2, 'rank 1: --lr wants a value'), (COMPARE, '--softcap x', 2, 'rank 1: --softcap wants a number'),
           (COMPARE, '--softcap 30', 1, 'ranks disagree: softcap is 30 on rank 1, not given on rank 0'),
           (COMPARE, '--method ring', 1, 'ranks disagree: method is ring on rank 1, not given on rank 0'),
           (LOGITS, '--dtype bf16', 1, 'ranks disagree: dtype is bf16 on rank 1, f32 on rank 0'), (LOGITS, '--ids', 2, 'rank 1: --ids wants a value')]


def of_one(flags):
    """A shell that gives them to rank 1 alone."""
    return f'if [ $RANK = 1 ]; then {PROGRAM} {flags}; else {PROGRAM}; fi'


def refused(folder, launcher, command, status, sentence, shell=PROGRAM):
    """Rank 0 alone says what is wrong, whichever rank it is wrong at, in one sentence; and nothing else is printed, nor left."""
    with tempfile.TemporaryDirectory(dir=folder) as at:
        statuses, outs, errs, own = run_ranks(launcher, 2, command, shell=shell, cwd=at)
        what = f'{os.path.basename(command[0])} over {launcher.name}, {shell}'
        check(set(statuses) == {status} and [len(one) for one in own] == [1, 0] and sentence in own[0][0], f'{what}: {statuses}, not {sentence}: {errs}')
        check(not any(outs), f'{what}: {outs}')
        equal(tree(at), {}, f'{what}: what is left')


def test_voice(folder):
    """Before the first step: flags of all ranks, words that one has otherwise, files that it reads otherwise."""
    for name in 'kept0', 'kept1':
        trained(f'{folder}/{name}', *MODEL)
    config = folder + '/kept1/checkpoint-1/config.json'
    text = read(config).decode()
    check('1e-05' in text, f'no eps in {text}')
    write(config, text.replace('1e-05', '2e-05'))
    book = bytes(range(256)) * 8
    for name, data in {'book0': book, 'none0': book, 'book1': bytes(2048), 'ids0': npy(range(96)), 'ids1': npy(range(1, 97))}.items():
        write(f'{folder}/{name}', data)
    for launcher in LAUNCHERS:
        for program in (TRAIN, LOGITS, COMPARE) if FULL or launcher is not MPI else (TRAIN, LOGITS):
            small = SMALL[program].split()
            for _, flags, status, sentence in (case for case in OF_ALL if case[0] == program):
                # in place of the small run's own
                kept = [word for i, word in enumerate(small) if small[i - i % 2] not in flags.split()]
                refused(folder, launcher, words(launcher, program, *kept), status, sentence, f'{PROGRAM} {flags}')
            for _, flags, status, sentence in (case for case in OF_ONE if case[0] == program):
                refused(folder, launcher, words(launcher, program, *small), status, sentence, of_one(flags))
            command = words(launcher, program)
            refused(folder, launcher, [command[0], *small], 2, 'a launcher has started 2 processes')
            if launcher is MPI:
                refused(folder, launcher, [program, *command[1:], *small], 2, 'built without MPI')
        program = words(launcher, TRAIN)[0]
        equal([text.count('usage: train') for text in run_ranks(launcher, 2, [program, '--help'])[1]], [1, 0], f'{launcher.name}: --help')
        statuses, outs, _, _ = run_ranks(launcher, 2, [program, *MODEL, '--ranks', '1', '--steps', '1', '--transport', 'threads'])
        check(not any(statuses) and all('tokens/s' in text for text in outs), f'{launcher.name}: two trainings side by side: {outs}')


def test_voice_of_mpi(folder):
    """MPI lets ranks speak to each other whatever their flags are."""
    command = words(MPI, TRAIN, *MODEL)
    refused(folder, MPI, command, 2, "rank 1: --transport is threads, mpi, nccl or tcp, not 'wire'", of_one('--transport wire'))
    for omits in 0, 1:
        refused(folder, MPI, command, 2, 'rank 1: ' * omits + 'a launcher has started 2 processes', f'[ $RANK = {omits} ] && shift 2; {PROGRAM}')
    # in MPI_Init, or in the first call after it. Rank 1 says it too where the launcher is slow to end it
    statuses, outs, _, own = run_ranks(MPI, 2, words(MPI, COMPARE, *BLOCK, '--deadline', '0.00001'))
    check(all(statuses) and not any(outs) and any(own) and all(len(one) <= 1 for one in own) and all('1e-05' in text for text in sum(own, [])),
          f'a short deadline: {statuses}: {own}')


class Without(Tcp):
    """Some do not come."""

    def __init__(self, *absent):
        super().__init__()
        self.absent = absent

    def commands(self, ranks, words):
        return [command for r, command in enumerate(super().commands(ranks, words)) if r not in self.absent]


def test_meeting(_):
    """Ranks that do not come to each other: rank 0 knows which, and tells the others, even if it is late."""
    flags = words(Tcp(), TRAIN, *MODEL, '--deadline', DEADLINE)
    for more, sentence in ((lambda r: {'MASTER_ADDR': '/file'}, '--transport tcp needs an address in MASTER_ADDR'),
                           (lambda r: {'UPIPE_SECRET': SECRET + str(r)}, 'does not prove the secret')):
        statuses, outs, errs, own = run_ranks(Tcp(more), 2, flags)
        check(all(statuses) and sentence in str(own[0]) and not any(outs), f'{sentence}: {statuses}: {errs}')
    for absent, ranks, late in ((2,), 4, False), ((3, 4), 5, False), ((3,), 4, True):
        with Run(Without(*absent), ranks, flags) as run:
            if late:  # rank 0 gets no processor as its deadline ends
                time.sleep(DEADLINE - 0.3)
                run.processes[0].send_signal(signal.SIGSTOP)
                time.sleep(0.45)
                run.processes[0].send_signal(signal.SIGCONT)
            statuses, own = run.end(), run.own()
            there = [own[r] for r in range(ranks) if r not in absent]
            check(all(statuses) and all(len(one) == 1 and 'secret' not in one[0] for one in there), f'without {absent}: {statuses}: {own}')
            missing = re.search('missing: ranks? (.*)', there[0][0])
            equal(missing and missing.group(1), ', '.join(map(str, absent)), f'without {absent}: {there[0]}')
            check(all(f'rank {absent[0]} has not come' in one[0] for one in there[1:]), f'without {absent}: {own}')


# ---- lost ranks ----


@contextlib.contextmanager
def endless(launcher, saved, *flags, deadline=DEADLINE):
    """A training of 4 ranks without an end that has begun, or has saved something; and its processes by rank."""
    with Run(launcher, 4, words(launcher, TRAIN, *MODEL, *STEADY, '--steps', 100000, '--deadline', deadline, '--progress', *flags,
                                *(['--save', saved, '--save-every', 1] if saved else []))) as run:
        wait_for(lambda: (newest(saved) > 0 if saved else re.search(r'^step \d+/', run.err(), re.M)) or not run.runs())
        pids = run.pids()
        needed(len(pids) == 4, f'{launcher.name} {flags}: {len(pids)} ranks of 4 run: {run.said()}')
        yield run, pids


def leave(run, pids, seconds, what):
    """These are gone within this time; how long it took."""
    began = time.monotonic()
    wait_for(lambda: not any(map(alive, pids)), 60)
    took = time.monotonic() - began
    check(took <= seconds, f'{what}: the others are gone after {took:.2f} s: {run.said()}')
    return took


def lose(launcher, way, victim, what, saved=None, pause=0.0, within_save=False):
    """A rank is killed or stopped in a training: the others leave in time, and blame no other one. How long it took."""
    name = f'{launcher.name} {way} without rank {victim}, {signal.Signals(what).name}'
    with endless(launcher, saved, *way, deadline=DEADLINE if saved else 2 * DEADLINE) as (run, pids):
        pid = pids.pop(victim)
        time.sleep(pause)
        while within_save and run.runs() and not any(one.endswith('.tmp') for one in os.listdir(saved)):
            pass
        os.kill(pid, what)
        # what is killed closes its connections
        late = 60 if saved is None else 1 if launcher.name == 'tcp' and what == signal.SIGKILL else DEADLINE + 1
        took = leave(run, pids.values(), late, name)
        if launcher.name == 'tcp':  # MPI's launcher ends what is stopped
            os.kill(pid, signal.SIGKILL)
        statuses, own = run.end(60), run.own()
        check(all(statuses) and wait_for(lambda: not run.pids(), 10), f'{name}: {statuses}, {run.pids()} are left: {run.said()}')
        own.pop(victim)
        blamed = [re.findall(r'(?:for|connection to) ranks? ([\d, ]+)', ' '.join(one)) for one in own]
        check(all(len(one) <= 1 for one in own) and all(rank.strip() == str(victim) for one in blamed for rank in one), f'{name}: {run.said()}')
        # of a rank that is killed MPI's launcher says so, if it is faster than the others, which it ends
        said = str(own) + run.text() * (what == signal.SIGKILL)
        check(all(blamed) if launcher.name == 'tcp' else f'rank {victim}' in said, f'{name}: the others say {run.said()}')
    return took


def goes_on(saved, reference, what):
    """What is saved is whole, and the next step has the loss that it has without a loss."""
    step = newest(saved)
    on_threads(TRAIN, 4, '--resume', saved, '--save', saved, '--steps', step + 1, *STEADY, '--json', saved + '.json')
    if reference and step < len(reference):
        equal(load(saved + '.json')['loss'], [reference[step]], f'{what}: the loss of step {step + 1}')


def test_named(_):
    """Over TCP, with each method, each rank: all others have its number. Several trainings side by side, as ranks mostly wait."""
    ways = [['--method', name] for name in METHODS] + [['--replicas', '2'], ['--replicas', '2', '--node-ranks', '2', '--zero', '3'],
                                                       ['--method', 'usp', *AHEAD]]
    kinds = (signal.SIGKILL, signal.SIGSTOP)
    cases = [(Tcp(), way, victim, what) for n, way in enumerate(ways) for victim in range(4)
             for what in (kinds if FULL else kinds[(n + victim) % 2:][:1])]
    with concurrent.futures.ThreadPoolExecutor(8) as side_by_side:
        list(side_by_side.map(lambda case: lose(*case), cases))
    print(f'reached: {len(cases)} ranks lost, and named by the others')


def test_losses(folder):
    """At some instant of training or saving, to teams, rings, and the thread that gathers ahead."""
    reference, draw = folder + '/reference.json', random.Random(int(os.environ.get('UPIPE_SEED', '1')))
    on_threads(TRAIN, 4, *MODEL, '--steps', 200, *STEADY, '--json', reference)
    ways = [[], ['--replicas', '2'], AHEAD, ['--method', 'usp', *AHEAD], ['--method', 'upipe-ring']]
    tries = int(os.environ.get('UPIPE_WORLD_TRIES', '2'))
    for launcher in LAUNCHERS:
        took = []
        for number in range(tries):
            way, saved = ways[number % len(ways)], f'{folder}/{launcher.name}{number}'
            what = (signal.SIGKILL, signal.SIGSTOP)[number % 2]
            took.append(lose(launcher, way, draw.randrange(4), what, saved, draw.random() * 0.3, number // 2 % 2 == 0))
            goes_on(saved, load(reference)['loss'] if way in ([], AHEAD) else None, f'{launcher.name} {way} {what}')
            shutil.rmtree(saved)
        print(f'reached: {tries} ranks lost over {launcher.name}; the others were gone after {max(took):.2f} s at most, the deadline is {DEADLINE} s')
    for left in (4, 2) if FULL and MPI else ():
        goes_round(f'{folder}/loop{left}', left, load(reference)['loss'])


def test_start(_):
    """A rank is stopped while MPI starts: who is not ended first says that one does not come, and all end. What becomes of
    mpirun then is its own affair (docs/clusters.md)."""
    draw = random.Random(int(os.environ.get('UPIPE_SEED', '1')))
    for victim in [draw.randrange(4) for _ in range(max(1, int(os.environ.get('UPIPE_WORLD_TRIES', '2')) // 5))]:
        what = f'rank {victim} of 4 is stopped as MPI starts'
        with Run(MPI, 4, words(MPI, TRAIN, *MODEL, '--steps', '1', '--deadline', DEADLINE)) as run:
            wait_for(lambda: len(run.pids()) == 4 or not run.runs())
            pids = run.pids()
            os.kill(pids.pop(victim), signal.SIGSTOP)
            leave(run, pids.values(), DEADLINE + 4, what)
            own = run.own()
            check(any(own) and all(len(one) <= 1 for one in own), f'{what}: {run.said()}')
            check(all('MPI_Init waits for a process that does not come' in text for text in sum(own, [])), f'{what}: {run.said()}')


def test_comparison(folder):
    """compare loses a rank in the middle of a method: the job ends, and leaves no file."""
    for launcher, what in itertools.product(LAUNCHERS, (signal.SIGKILL, signal.SIGSTOP)):
        at = f'{folder}/{launcher.name}{what}'
        os.mkdir(at)
        command = words(launcher, COMPARE, *'--tokens 16384 --heads 6 --head-dim 32 --check off --method ring --progress'.split(),
                        *f'--deadline {DEADLINE} --json numbers --trace traces'.split())
        with Run(launcher, 3, command, cwd=at) as run:
            wait_for(lambda: 'with ring' in run.err() or not run.runs())
            time.sleep(0.3)
            pids = run.pids()
            pid = pids.pop(2)
            os.kill(pid, what)
            leave(run, pids.values(), 60, f'compare, {launcher.name}')
            if launcher.name == 'tcp':
                os.kill(pid, signal.SIGKILL)
            statuses, said = run.end(), run.said()
            check(all(statuses) and re.search(r'rank 2\b', str(said)), f'compare, {launcher.name} {what}: {statuses}: {said}')
            check(wait_for(lambda: not run.pids(), 10), f'compare, {launcher.name} {what}: processes are left')
        equal(tree(at), {}, f'compare, {launcher.name} {what}: what is left')


def signalled(folder, launcher, when, victim, what):
    """A signal that comes to one process alone, or to the launcher, ends all ranks as it would end that one."""
    saved, name = f'{folder}/{launcher.name}{when}{victim}', f'{launcher.name}: {signal.Signals(what).name} to {victim} in its {when}'
    flags = {'step': ['--steps', 100000, '--sample', 0], 'evaluation': ['--steps', 1, '--sample', 0, '--eval', saved + '.text'],
             'sample': ['--steps', 1, '--sample', 1000000]}[when]
    write(saved + '.text', bytes(range(32, 127)) * 100000)
    with Run(launcher, 3, words(launcher, TRAIN, *MODEL, *flags, '--save', saved, '--log', saved + '.log')) as run:
        wait_for(lambda: (newest(saved) if when == 'sample' else os.path.exists(saved + '.log') and os.path.getsize(saved + '.log'))
                 or not run.runs())
        os.kill(run.processes[0].pid if victim == 'mpirun' else run.pids()[victim], what)
        statuses, own = run.end(), run.own()
        check(set(statuses) == {128 + what} or victim == 'mpirun' and all(statuses), f'{name}: {statuses}: {run.said()}')
        check([len(one) for one in own] == [1, 0, 0] and f'ended by a signal: {signal.strsignal(what)}' in own[0][0], f'{name}: {own}')
    step = len(read(saved + '.log').splitlines())
    equal(newest(saved), step, f'{name}: the step that is saved')


def test_signal(folder):
    kinds = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    for number, when in enumerate(('step', 'evaluation', 'sample')):
        for victim in 0, 2:
            signalled(folder, Tcp(), when, victim, kinds[(number + victim) % 4])


def test_signal_of_mpi(folder):
    """Open MPI's launcher passes it on."""
    signalled(folder, MPI, 'step', 'mpirun', signal.SIGUSR1)


def goes_round(at, left, reference):
    """A rank is killed; the loop of docs/clusters.md goes on from the newest checkpoint with the processes that are left."""
    def script(name, text):
        write(f'{at}/bin/{name}', f'#!/bin/sh\n{text}\n')
        os.chmod(f'{at}/bin/{name}', 0o755)

    os.makedirs(at + '/bin')
    loop = re.search(r'^until mpirun .*?^do .*?done', read(f'{TOP}/docs/clusters.md').decode(), re.M | re.S).group()
    for word, short in (('--steps 10000', '--steps 60'), ('--save-every 100', '--save-every 1'), ('sleep 10', 'sleep 0.1')):
        check(word in loop, f'the documented loop has no {word}')
        loop = loop.replace(word, short)
    # its commands, with what this machine and a short training need beside what it says
    program = words(MPI, TRAIN)[0]
    script('mpirun', f'echo >> started\nexec {" ".join(MPI.words)} "$@"')
    script('train_mpi', ' '.join(['exec', program, '"$@"', *MODEL, *STEADY, '--json losses']))
    write(at + '/alive', 'localhost\n' * 4)
    with Job([(['sh', '-c', loop], {**os.environ, 'PATH': at + '/bin:' + os.environ['PATH']})], cwd=at) as job:
        wait_for(lambda: newest(at + '/out') >= 3 or not job.runs())
        needed(len(job.pids(program)) == 4, f'the loop: {job.pids(program)} run')
        write(at + '/alive', 'localhost\n' * left)
        os.kill(job.pids(program)[3], signal.SIGKILL)
        status = job.end()
        needed(status == [0] and len(read(at + '/started')) == 2, f'the loop with {left} processes left ends with {status}: {job.text()[-2000:]}')
    end_of = load(at + '/losses')
    first, loss = end_of['first_step'], end_of['loss']
    check(first > 3 and len(loss) == 61 - first, f'the loop goes on with step {first}, and does {len(loss)}')
    near = 0 if left == 4 else 1e-4
    check(all(abs(a - b) <= near for a, b in zip(loss, reference[first - 1:])), f'the loop with {left} processes left: other losses')


# ---- two machines ----


def test_link(folder, link, launcher, loss):
    """A delay, and over TCP lost packets too: the losses of threads, bit for bit. Then cuts at random instants."""
    link.delay, link.loss = 0.002, loss
    for flags in ['--method', 'upipe'], ['--method', 'usp', '--ring', '2', *AHEAD]:
        what, flags = f'{flags}, {launcher.name} over a link', [*MODEL, *flags, *'--sample 0 --steps 3 --json'.split()]
        on_threads(TRAIN, 4, *flags, folder + '/threads')
        passed, lost = link.passed, link.lost
        statuses, _, errs, _ = run_ranks(launcher, 4, words(launcher, TRAIN, *flags, folder + '/link'))
        needed(not any(statuses), f'{what}: {statuses}: {errs}')
        equal(load(folder + '/link')['loss'], load(folder + '/threads')['loss'], f'{what}: losses')
        check(link.passed - passed > 100, f'{what}: {link.passed - passed} frames have passed the link')
        check(link.lost > lost or link.loss == 0, f'{what}: no frame was lost')
    link.delay = link.loss = 0.0
    for number in range(3):
        what, saved = f'{launcher.name}, cut {number}', f'{folder}/{launcher.name}{number}'
        with endless(launcher, saved, *AHEAD * (number % 2)) as (run, pids), link.cut(link.random.random() * 0.5):
            print(f'{what}: every rank has ended after {leave(run, pids.values(), DEADLINE + 1, what):.2f} s', flush=True)
            for side, beyond in ((0, 1), '[23]'), ((2, 3), '[01]'):  # each of its own, as nothing passes the link
                check(any(re.search(fr'^train: .*waited 2 s in .* for ranks? [\d, ]*{beyond}', run.err(r), re.M) for r in side),
                      f'{what}: ranks {side} do not say who is missing: {run.said()}')
        goes_on(saved, None, what)


def test_cut_meeting(link):
    """Over TCP, while ranks meet and connect: they end within two deadlines."""
    for after in 0, 0.01:
        command = words(Tcp(), TRAIN, *MODEL, '--steps', '100000', '--deadline', DEADLINE, '--method', 'usp', '--ring', '2')
        with Run(TcpSides(link), 4, command) as run:
            wait_for(lambda: len(run.pids()) == 4, 20, 0.001)
            with link.cut(after):
                leave(run, run.pids().values(), 2 * DEADLINE + 1, f'cut {after:g} s after the start')
                check(all(re.search(fr'^train: (rank {r} |\d of \d ranks)', run.err(r), re.M) for r in range(4)),
                      f'a sentence of another rank: {run.said()}')


def main():
    with tempfile.TemporaryDirectory() as folder:
        if KIND == 'sides':
            with Link() as link:
                run_test(test_link, folder, link, TcpSides(link), 0.01)
                run_test(test_cut_meeting, link)
                if MPI:
                    run_test(test_link, folder, link, MpiSides(link, MPI), 0.0)
        else:
            both = [test_same, test_compare, test_reads, test_voice]
            tests = {'tcp': [*both, test_meeting, test_signal, test_named], 'mpi': [*both, test_voice_of_mpi, *[test_signal_of_mpi] * bool(MPI and MPI.is_open)],
                     'lost': [*[test_start] * bool(MPI), test_losses, *[test_comparison] * FULL]}
            for test in tests[KIND]:
                with tempfile.TemporaryDirectory() as own:
                    run_test(test, own)
    return end(f'world, {KIND}')


if __name__ == '__main__':
    sys.exit(main())

#!/usr/bin/env python3
"""test_world_tcp.py TRAIN LOGITS COMPARE -- programs whose ranks are processes over TCP, started as torchrun does: the threads'
losses, checkpoints and logits bit for bit, what is left when a rank dies, stops or has a signal, and what the others say then

Each rank is lost with each method: the sentence of each other one has its number, and no other rank is blamed.
"""

import concurrent.futures
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time

from test_rendezvous import CLEAN, SECRET, free_port
from run_mpi import alive, newest, own
from checks import check, end, load, needed, read, run_command, run_test, tree, wait_for, write
from programs import METHODS, heed_signals, npy

TRAIN, LOGITS, COMPARE = (os.path.abspath(path) for path in sys.argv[1:4])
FULL = bool(os.environ.get('UPIPE_FULL'))
MODEL = '--layers 2 --model-dim 64 --heads 8 --kv-heads 4 --tokens 128'.split()
CASES = [('upipe', ['--chunk', '4'], 4), ('usp', ['--zero', '3', '--zero-prefetch'], 4), ('usp', ['--replicas', '2', '--zero', '3'], 8)]
MORE = [('upipe-fpdt', ['--segments', '2', '--replicas', '2'], 4), ('upipe-ring', ['--ring', '2'], 8), ('ulysses', [], 1)]
SAME = ('loss', 'grad_norm', 'peak_bytes', 'plan_bytes', 'slab_bytes', 'plan_sent_bytes', 'sent_bytes_per_step', 'memory')
DEADLINE = 2
# what a rank is lost to, with 4 ranks
WAYS = [('--method', name) for name in METHODS] + [('--replicas', '2'), ('--replicas', '2', '--node-ranks', '2', '--zero', '3'),
                                                   ('--method', 'usp', '--zero', '3', '--zero-prefetch')]
STEADY = '--warmup 0 --lr 1e-3 --min-lr 1e-3'.split()  # a rate that does not depend on the number of steps


class Ranks:
    """The processes of a run, and what each says; more: a dictionary of variables of a rank."""

    def __init__(self, ranks, words, more=lambda r: {}):
        port = free_port()
        self.said = [tempfile.TemporaryFile() for _ in range(ranks)]
        self.all = [subprocess.Popen(list(map(str, words)), stdout=f, stderr=subprocess.STDOUT, preexec_fn=heed_signals, env={
            **CLEAN, 'RANK': str(r), 'LOCAL_RANK': str(r), 'WORLD_SIZE': str(ranks), 'MASTER_ADDR': '127.0.0.1',
            'MASTER_PORT': str(port), **more(r)}) for r, f in enumerate(self.said)]

    def text(self, r):
        return os.pread(self.said[r].fileno(), 1 << 20, 0).decode(errors='replace')

    def end(self, seconds=120):
        """The statuses; who hangs is killed, which is a failure."""
        if not wait_for(lambda: all(p.poll() is not None for p in self.all), seconds):
            check(False, f'ranks hang: {[self.text(r) for r in range(len(self.all))]}')
            for p in self.all:
                p.kill()
        return [p.wait() for p in self.all]


def run(ranks, *words, **more):
    """Statuses, and what the ranks say."""
    job = Ranks(ranks, words, **more)
    return job.end(), [job.text(r) for r in range(ranks)]


def test_same(folder, method, flags, ranks):
    results, what = [], f'{method} on {ranks} processes'
    for kind in 'threads', 'tcp':
        top = os.path.join(folder, f'{method}{ranks}{kind}')
        os.mkdir(top)
        words = [TRAIN, *MODEL, '--sample', '8', '--method', method, *flags, '--steps', '3', '--save', top + '/c', '--json', top + '/j']
        if kind == 'tcp':
            statuses, said = run(ranks, *words, '--transport', 'tcp', more=lambda r: {'UPIPE_SECRET': SECRET})
        else:
            done = run_command([*words, '--ranks', ranks], 120)
            statuses, said = [done.returncode], [done.stdout + done.stderr]
        needed(not any(statuses), f'{what}, {kind}: {statuses}: {said}')
        check(not any(said[1:]), f'{what}: others than rank 0 print: {said[1:]}')
        results.append((load(top + '/j'), tree(top + '/c')))
    (one, saved), (two, saved_two) = results
    for name in SAME:
        check(one[name] == two[name], f'{what}: {name} is {two[name]}, with threads {one[name]}')
    check(saved == saved_two and len(saved) == 4, f'{what}: other checkpoints')


def test_programs(folder):
    """The other programs: the same logits, and a comparison that holds what it promises."""
    model, ids, outs = (os.path.join(folder, name) for name in ('model', 'ids', 'out'))
    run_command([TRAIN, *MODEL, '--ranks', 2, '--steps', 1, '--sample', 0, '--save', model], 120)
    write(ids, npy(range(96)))
    words = [LOGITS, '--load', model, '--ids', ids, '--method', 'upipe', '--out']
    run_command([*words, outs + '0', '--ranks', 4], 120)
    statuses, said = run(4, *words, outs + '1', '--transport', 'tcp')
    check(not any(statuses) and read(outs + '0') == read(outs + '1'), f'logits: {statuses}: {said}')
    statuses, said = run(2, COMPARE, *'--tokens 64 --heads 4 --kv-heads 2 --head-dim 32 --transport tcp'.split())
    check(not any(statuses) and 'relative error' in said[0], f'compare: {statuses}: {said}')


def test_voice(folder):
    """What is wrong is said in a sentence; nobody trains."""
    flags = [TRAIN, *MODEL, '--steps', 2, '--transport', 'tcp', '--deadline', DEADLINE]
    for more, words, sentence in (
            (lambda r: {}, ['--ranks', 4], '--ranks 4, but the launcher has started 2'),
            (lambda r: {}, ['--data', folder + '/none'], 'cannot be read'),
            (lambda r: {'MASTER_ADDR': folder + '/file'}, [], '--transport tcp needs an address in MASTER_ADDR'),
            (lambda r: {'UPIPE_SECRET': SECRET + str(r)}, [], 'does not prove the secret'),
            (lambda r: {'WORLD_SIZE': '3'}, [], '2 of 3 ranks have come')):
        statuses, said = run(2, *flags, *words, more=more)
        check(all(statuses) and sentence in said[0] and 'tokens/s' not in ''.join(said), f'{sentence}: {statuses}: {said}')
    # a rank that does not come: rank 0 knows which, and tells the others
    for names, sentence in ((lambda r: {'WORLD_SIZE': '4', 'RANK': str(r + r // 2)}, 'missing: rank 2'),
                            (lambda r: {'WORLD_SIZE': '5', 'RANK': str(r)}, 'missing: ranks 3, 4')):
        statuses, said = run(3, *flags, more=names)
        lost = re.search(r'\d', sentence).group()
        check(all(statuses) and sentence in said[0] and all(f'rank {lost} has not come' in one for one in said[1:]) and
              all(len(own('train', one)) == 1 and 'secret' not in one for one in said), f'{sentence}: {statuses}: {said}')
    # the same where rank 0 gets no processor as its deadline ends
    job = Ranks(3, flags, more=lambda r: {'WORLD_SIZE': '4'})
    time.sleep(DEADLINE - 0.3)
    job.all[0].send_signal(signal.SIGSTOP)
    time.sleep(0.45)
    job.all[0].send_signal(signal.SIGCONT)
    statuses, said = job.end(), [job.text(r) for r in range(3)]
    check(all(statuses) and 'missing: rank 3' in said[0] and all('rank 3 has not come' in one for one in said[1:]),
          f'rank 0 is late: {statuses}: {said}')


def test_loss(folder, number, what, draw):
    """A rank is killed or stopped at some instant; the others end in time, and what is saved goes on."""
    saved = os.path.join(folder, f'loss{number}')
    ahead = ['--zero', '3', '--zero-prefetch'] if number // 2 % 2 else []
    job = Ranks(4, [TRAIN, '--transport', 'tcp', *MODEL, *ahead, '--sample', 0, '--steps', 100000, *STEADY, '--save', saved, '--save-every', 1,
                    '--deadline', DEADLINE])
    wait_for(lambda: newest(saved) > 0 or any(p.poll() is not None for p in job.all), 60)
    time.sleep(draw.random() * 0.3)
    check(all(p.poll() is None for p in job.all), f'4 ranks run: {[job.text(r) for r in range(4)]}')
    victim = draw.choice(job.all)
    victim.send_signal(what)
    lost = time.monotonic()
    wait_for(lambda: not any(alive(p.pid) for p in job.all if p is not victim), 30)
    took, name = time.monotonic() - lost, signal.Signals(what).name
    victim.send_signal(signal.SIGCONT)
    statuses, text = job.end(20), [job.text(r) for r in range(4)]
    missing = job.all.index(victim)
    check(all(statuses) and took <= (1 if what == signal.SIGKILL else DEADLINE + 1), f'{name}: {statuses} after {took:.2f} s: {text}')
    check(all(r == missing or re.search(rf'^train: .*rank \d', text[r], re.M) for r in range(4)), f'{name}: who is missing: {text}')
    check(all(len(own('train', said)) <= 1 for said in text), f'{name}: more than a sentence: {text}')
    step = newest(saved)
    done = run_command([TRAIN, '--resume', saved, '--save', saved, '--ranks', 4, '--steps', step + 1, '--sample', 0, *STEADY], 120)
    check(done.returncode == 0, f'{name}: what is left at step {step} does not go on: {done.stderr}')


def signalled(folder, when, victim, what):
    """A signal that comes to one process alone ends all of them as it would end that one."""
    saved = os.path.join(folder, f'{when}{victim}')
    words = {'step': ['--steps', 100000, '--sample', 0], 'evaluation': ['--steps', 1, '--sample', 0, '--eval', saved + '.text'],
             'sample': ['--steps', 1, '--sample', 1000000]}[when]
    write(saved + '.text', bytes(range(32, 127)) * 100000)
    job = Ranks(3, [TRAIN, '--transport', 'tcp', *MODEL, *words, '--save', saved, '--log', saved + '.log'])
    wait_for(lambda: (newest(saved) if when == 'sample' else os.path.exists(saved + '.log') and os.path.getsize(saved + '.log'))
             or any(p.poll() is not None for p in job.all), 60)
    job.all[victim].send_signal(what)
    statuses, said = job.end(), [own('train', job.text(r)) for r in range(3)]
    name = f'{signal.Signals(what).name} to rank {victim} in its {when}'
    check(statuses == [128 + what] * 3, f'{name}: {statuses}: {said}')
    check([len(one) for one in said] == [1, 0, 0] and f'ended by a signal: {signal.strsignal(what)}' in said[0][0], f'{name}: {said}')
    step = len(read(saved + '.log').splitlines())
    check(newest(saved) == step, f'{name}: {step} steps are done, {os.listdir(saved)} saved')


def test_signal(folder):
    kinds = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    for number, when in enumerate(('step', 'evaluation', 'sample')):
        for victim in (0, 2):
            signalled(folder, when, victim, kinds[(number + victim) % 4])


def lose(way, victim, what):
    """What is wrong where a rank is lost in a training; None: all is well."""
    job = Ranks(4, [TRAIN, '--transport', 'tcp', '--layers', 1, *MODEL[2:], *way, '--sample', 0, '--steps', 100000, '--deadline', DEADLINE,
                    '--progress'])
    wait_for(lambda: re.search(r'^step \d+/', job.text(0), re.M) or any(p.poll() is not None for p in job.all), 60)
    job.all[victim].send_signal(what)
    wait_for(lambda: not any(alive(p.pid) for r, p in enumerate(job.all) if r != victim), 60)
    job.all[victim].kill()
    statuses = [p.wait() for p in job.all]
    said = [own('train', job.text(r)) for r in range(4) if r != victim]
    blamed = [re.findall(r'(?:for|connection to) ranks? ([\d, ]+)', ' '.join(one)) for one in said]
    if all(statuses) and all(len(one) == 1 for one in said) and all([name.strip() for name in one] == [str(victim)] for one in blamed):
        return None
    return f'{way} without rank {victim}, {signal.Signals(what).name}: {statuses}: {said}'


def test_lost():
    """Several trainings side by side, as ranks mostly wait."""
    kinds = (signal.SIGKILL, signal.SIGSTOP)
    cases = [(way, victim, what) for n, way in enumerate(WAYS) for victim in range(4)
             for what in (kinds if FULL else kinds[(n + victim) % 2:][:1])]
    with concurrent.futures.ThreadPoolExecutor(8) as side_by_side:
        for wrong in side_by_side.map(lambda case: lose(*case), cases):
            check(wrong is None, wrong)
    print(f'reached: {len(cases)} ranks lost, and named by the others')


def main():
    draw = random.Random(int(os.environ.get('UPIPE_SEED', '1')))
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES + (MORE if FULL else []):
            run_test(test_same, folder, *case)
        run_test(test_programs, folder)
        run_test(test_voice, folder)
        run_test(test_signal, folder)
        run_test(test_lost)
        for number in range(10 if FULL else 2):
            run_test(test_loss, folder, number, (signal.SIGKILL, signal.SIGSTOP)[number % 2], draw)
    return end('world_tcp')


if __name__ == '__main__':
    sys.exit(main())

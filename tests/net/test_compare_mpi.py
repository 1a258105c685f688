#!/usr/bin/env python3
"""test_compare_mpi.py MPIRUN COMPARE COMPARE_MPI -- the comparison of methods with processes for ranks: the threads' numbers,
traces and results bit for bit, and one voice

In the full run: every method, 3 and 8 processes, stages that overlap, and a rank that dies or stops on the way.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time

from run_mpi import RANK, SECONDS, all_gone, command, is_open_mpi, own, rank_one
from checks import check, end, load, run_command, run_test, tree, write

MPIRUN = sys.argv[1]
COMPARE, COMPARE_MPI = (os.path.abspath(path) for path in sys.argv[2:4])
FULL = bool(os.environ.get('UPIPE_FULL'))
MODEL = '--heads 8 --kv-heads 4 --head-dim 32 --model-dim 64 --tokens 250'.split()  # tokens that do not divide
RINGS = ['usp', 'upipe-ring']
EVERY = ['upipe', 'ulysses', 'upipe-naive', 'ring', 'zigzag', 'stripe', 'double-ring', 'allgather', *RINGS, 'fpdt', 'upipe-fpdt']
OWN = {'seconds_fwd', 'seconds_bwd', 'seconds_cpu', 'transport', 'json', 'trace', 'dump'}  # of a run, beside the results
MPI = ['--transport', 'mpi']


def run(words, folder):
    """Status, what the program says, stdout, and all of stderr."""
    job = run_command(words, SECONDS, cwd=folder)
    return job.returncode, own('compare', job.stderr), job.stdout, job.stderr


def numbers(folder):
    """The JSON file without what two runs have apart."""
    got = load(os.path.join(folder, 'numbers.json'))
    transport = got['config']['transport']
    for part in [got['config'], *got['methods']]:
        for name in OWN & set(part):
            del part[name]
    return transport, got


def shape(text):
    return [(event['pid'], event.get('name'), event['ph']) for event in json.loads(text)]


def test_same(folder, processes, methods, *flags):
    """Threads and processes: the same numbers, results and traces. compare itself holds bytes to the plan."""
    cut = ['--segments', '2'] if any('fpdt' in name for name in methods) else []
    words = [*MODEL, *cut, *flags, *(word for name in methods for word in ('--method', name)), '--check', 'on', '--json', 'numbers.json',
             '--trace', 'traces', '--dump', 'dump']
    what, results = f'{methods} {flags} on {processes} processes', []
    for kind, start in (('threads', [COMPARE, '--ranks', str(processes)]), ('mpi', command(MPIRUN, processes, COMPARE_MPI, *MPI))):
        top = os.path.join(folder, kind + '-'.join([str(processes), *methods, *flags]))
        os.mkdir(top)
        status, wrong, said, err = run([*start, *words], top)
        if not check(status == 0 and not wrong, f'{what}, {kind}: {status}: {err}'):
            return
        transport, got = numbers(top)
        check(transport == kind, f'{what}: transport {transport}, not {kind}')
        tables = [line for line in said.splitlines() if not re.match(r'[a-z-]+ .*\d\.\d{3}   \d', line)]  # rows with seconds
        results.append((got, tree(top + '/dump'), tree(top + '/traces'), re.sub(r' +\d+\.\d{3} +\d+\.\d{3}(?= )', '', '\n'.join(tables))))
    (one, dumped, traces, said), (two, dumped_two, traces_two, said_two) = results
    check(one == two, f'{what}: other numbers:\n{one}\n{two}')
    check(all(method['err_out'] is not None for method in two['methods']), f'{what}: no errors')
    check(dumped == dumped_two and len(dumped) >= 10 * len(methods), f'{what}: other results')
    check([*traces] == [*traces_two] and len(traces) == len(methods), f'{what}: other traces')
    check(all(shape(traces[name]) == shape(traces_two[name]) for name in traces), f'{what}: other events in the traces')
    check(said == said_two, f'{what}: says\n{said_two}\nwith threads\n{said}')


def test_voice(folder):
    """What is wrong is said once, by rank 0, whichever rank it is wrong at; and nothing is left."""
    book = os.path.join(folder, 'book')
    write(book, bytes(range(256)))
    os.symlink(book, book + '0')
    outputs = ['--json', 'numbers.json', '--trace', 'traces', '--dump', 'dump']
    each = ['sh', '-c', f'exec "$0" "$@" --data {book}{RANK}', COMPARE_MPI]
    cases = [(rank_one(COMPARE_MPI, '--softcap', '30'), MPI, 'ranks disagree: softcap is 30 on rank 1, not given on rank 0'),
             (rank_one(COMPARE_MPI, '--method', 'ring'), MPI, 'ranks disagree: method is ring on rank 1, not given on rank 0'),
             (rank_one(COMPARE_MPI, '--softcap', 'x'), MPI, 'rank 1: --softcap wants a number'),
             (COMPARE_MPI, [*MPI, '--ranks', '4'], '--ranks 4, but the launcher has started 2'),
             (each, MPI, 'rank 1: the text'), (each, MPI, 'rank 1: --data finds something else')]
    if FULL:
        cases += [(COMPARE_MPI, [], 'a launcher has started 2 processes'), (COMPARE, MPI, 'built without MPI'),
                  (COMPARE_MPI, [*MPI, '--method', 'usp', '--ring', '3'], 'do not divide into rings'),
                  (COMPARE_MPI, [*MPI, '--json', '/dev/full/none'], 'cannot be written'),
                  # in MPI_Init, or in the first call after it
                  (COMPARE_MPI, [*MPI, '--deadline', '0.00001'], '1e-05')]
    for program, flags, sentence in cases:
        with tempfile.TemporaryDirectory() as fresh:
            more = outputs if '--json' not in flags else []
            status, said, out, err = run(command(MPIRUN, 2, program, *MODEL, *flags, *more), fresh)
            check(status != 0 and len(said) == 1 and sentence in said[0] and out == '', f'{sentence}: {status}: {out}{err}')
            check(tree(fresh) == {}, f'{sentence}: leaves {tree(fresh).keys()}')
        if sentence == 'rank 1: the text':  # in the next case it can be read, and is another one
            write(book + '1', bytes(256))


def test_lost(folder, what):
    """A rank is killed or stopped in the middle of a method: the job ends, and leaves no file."""
    top = os.path.join(folder, f'lost{what}')
    os.mkdir(top)
    words = command(MPIRUN, 3, ['sh', '-c', 'echo $$ >&2; exec "$0" "$@"', COMPARE_MPI], *MPI, *'--tokens 16384 --heads 6 --head-dim 32'.split(),
                    *'--check off --method ring --progress --deadline 2 --json numbers.json --trace traces'.split())
    with subprocess.Popen(words, cwd=top, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True) as job:
        ranks, said = [], ''
        for line in job.stderr:
            said += line
            if line.strip().isdigit():
                ranks.append(int(line))
            if 'with ring' in line:
                time.sleep(0.3)
                os.kill(ranks[-1], what)
        status = job.wait(timeout=SECONDS)
    check(len(ranks) == 3 and status != 0 and re.search(r'rank \d', said), f'{what.name}: {status}: {said}')
    check(all_gone(ranks), f'{what.name}: processes are left')
    check(tree(top) == {}, f'{what.name}: leaves {tree(top).keys()}')


def main():
    with tempfile.TemporaryDirectory() as folder:
        run_test(test_same, folder, 4, ['upipe', 'ulysses', 'ring', 'usp', 'fpdt'], '--sinks')
        run_test(test_same, folder, 2, ['ulysses', 'upipe', 'zigzag', 'upipe-fpdt'], '--dtype', 'bf16', '--layers', '3')
        run_test(test_voice, folder)
        if FULL:
            run_test(test_same, folder, 4, EVERY, '--window', '70', '--rope')
            run_test(test_same, folder, 4, ['upipe', 'fpdt'], '--overlap')
            run_test(test_same, folder, 8, ['ulysses', 'upipe', 'double-ring', *RINGS], '--inner', '4', '--ring', '2')
            run_test(test_same, folder, 3, ['ulysses', 'stripe', 'upipe'], '--offload', '--layers', '2')
            run_test(test_same, folder, 1, ['ulysses', 'ring', 'fpdt'])
            # launchers of others end a job as they like when a rank dies
            for what in (signal.SIGKILL, signal.SIGSTOP) if is_open_mpi(MPIRUN) else ():
                run_test(test_lost, folder, what)
    return end('compare_mpi')


if __name__ == '__main__':
    sys.exit(main())

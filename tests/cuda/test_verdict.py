#!/usr/bin/env python3
"""test_verdict.py VERDICT [emulated] -- every case of verdict is right; bugs of the kernels are named by read_verdict.py

VERDICT is the program, linked with the emulator or for a device. On a device all cases run. On the emulator the ordinary
run takes a share of them. The full run (UPIPE_FULL=1) takes all cases, and bugs as long as 60 s of processors last;
UPIPE_MUTANTS=all takes all bugs.

A bug is one of planted/cuda.txt that gives a wrong number. verdict of the tree with all bugs (planted/planted.py) must
print the case as wrong, and the reader must name the kind that stands beside the bug.
"""

import concurrent.futures
import os
import re
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(HERE, '..', 'lib'), os.path.join(HERE, '..', 'planted')]
import planted  # pylint: disable=wrong-import-position
from checks import check, equal, run_command, run_tests  # pylint: disable=wrong-import-position

FULL = bool(os.environ.get('UPIPE_FULL'))
EVERY = os.environ.get('UPIPE_MUTANTS') == 'all'
SHARE, BUGS, SECONDS = 11, 3, 60  # every so many cases in the ordinary run; bugs of the full one at least, and seconds


def run(words, bug=0):
    """(exit status, what it printed). The other cores have cases of their own."""
    done = run_command(words, timeout=600, variables={'SIMT_THREADS': 1, 'UPIPE_PLANTED': bug})
    return done.returncode, done.stdout + done.stderr


def read(path):
    """The kind that the reader names."""
    status, said = run([sys.executable, os.path.join(HERE, 'read_verdict.py'), path])
    kind = re.match(r'[\w ]+: ([\w ]+) -- ', said)
    check(status == 0 and kind, f'read_verdict.py, status {status}: {said}')
    return kind.group(1) if kind else ''


def try_case(program, case):
    status, said = run([program, *case.split()])
    check(said.startswith(f'{case}: ') and said.count('\n') == 1, f'not one line: {said}')
    return status, said


def test_cases(_):
    status, said = run([PROGRAM, '--list'])
    cases = said.splitlines()
    equal((status, len(cases), len(set(cases))), (0, 150, 150), 'the list')
    equal([run([PROGRAM])[0], run([PROGRAM, 'fwd90', '128', 'none'])[0]], [2, 2], 'the status of a wrong call')
    chosen = cases if FULL or not EMULATED else cases[::SHARE]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        ran = list(pool.map(lambda case: try_case(PROGRAM, case), chosen))
    # a device of another generation leaves some out
    wrong = [said for status, said in ran if status != 0 and (EMULATED or status != 77)]
    equal(wrong, [], 'cases that are not right')
    print(f'cases: {sum(status == 0 for status, _ in ran)} of {len(cases)} ran, and are right')


def test_hang(_):
    """What a watch has left is read too."""
    with open('hang', 'w', encoding='utf-8') as out:
        out.write('verdict fwd90 128 full\nqueries 1\nkeys 1\nq_pos 0\ntile 128\nborders\nscale 1\nwatch 0 00ff\nhangs K full\n')
    equal(read('hang'), 'wait', 'the kind of a hang')


def try_bug(program, folder, bug):
    case, kind = bug.verdict.split(': ')
    evidence = os.path.join(folder, f'{bug.number}.evidence')
    status, said = run([program, *case.split(), '--evidence', evidence], bug.number)
    named = ''
    wrong = status == 1 and said.startswith(f'{case}: WRONG ') and said.count('\n') == 1
    if check(wrong, f'{bug.says}: status {status}: {said}'):
        check(os.path.getsize(evidence) <= 2 << 20, f'{bug.says}: {os.path.getsize(evidence)} bytes of evidence')
        named = read(evidence)
    print(f'{bug.says}  [{case}: {named}]', flush=True)
    return check(named == kind, f'{bug.says}: the reader says {named}, not {kind}')


def test_bugs(folder):
    if not EMULATED or not (FULL or EVERY):
        return
    every = planted.read_all()
    shown = [bug for bug in every if '90.h' in bug.file and not bug.test.endswith(('_race', '_watchdog'))]
    equal([bug.says for bug in shown if ': ' not in bug.verdict], [], 'bugs without a line of what verdict shows')
    tried = planted.shuffled([bug for bug in every if bug.verdict and not bug.verdict.startswith('none: ')])
    shop = planted.Shop(planted.FOLDER, every)
    shop.build({'cuda_verdict'})
    program = os.path.join(shop.built, 'tests', 'cuda', 'verdict')
    began, cores = time.monotonic(), os.cpu_count() or 1

    def in_time(number, bug):
        late = not EVERY and number >= BUGS and time.monotonic() - began >= SECONDS / cores
        return None if late else try_bug(program, folder, bug)

    with concurrent.futures.ThreadPoolExecutor(cores) as pool:
        named = [good for good in pool.map(in_time, range(len(tried)), tried) if good is not None]
    print(f'bugs: {sum(named)} named of {len(named)}; there are {len(tried)}')
    check(len(named) >= BUGS, 'too few bugs')


if __name__ == '__main__':
    PROGRAM, EMULATED = os.path.abspath(sys.argv[1]), len(sys.argv) > 2
    sys.exit(run_tests('cuda_verdict', test_cases, test_hang, test_bugs))

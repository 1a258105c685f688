#!/usr/bin/env python3
"""test_verdict.py VERDICT [TOP BUILD] -- every case of verdict is right; bugs of the kernels are named by read_verdict.py

VERDICT is the program, linked with the emulator or for a device; TOP is the tree, BUILD Meson's folder of tests/cuda. On
a device, without these, all cases run. On the emulator the ordinary run takes a share of them and three bugs. The full
run (UPIPE_FULL=1) takes all cases, and bugs as long as 60 s last; UPIPE_MUTANTS=all takes all bugs.

A bug is one of simt/mutants.txt that gives a wrong number, or one of PLANTED: faults that no line of these lists has, and
a device could. verdict must print the case as wrong, and the reader must name the kind that stands beside the bug.
"""

import concurrent.futures
import os
import re
import shutil
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(HERE, '..', 'lib'), os.path.join(HERE, '..', 'simt')]
import mutants  # pylint: disable=wrong-import-position
from checks import check, equal, run_command, run_tests  # pylint: disable=wrong-import-position

FULL = bool(os.environ.get('UPIPE_FULL'))
EVERY = os.environ.get('UPIPE_MUTANTS') == 'all'
SHARE, BUGS, SECONDS = 11, 3, 60  # every so many cases in the ordinary run; bugs of the full one at least, and seconds
HEADERS = ('upipe_cuda_attn_fwd90.h', 'upipe_cuda_attn_bwd90.h')

# header, bug, case and kind, the code as it is, and with the bug
PLANTED = (
    ('upipe_cuda_hopper.h', 'tiles in shared memory are swizzled by another bit of the row', 'fwd90 128 full: swizzle phase',
     '((c ^ r) & 7) * 16', '((c ^ r >> 1) & 7) * 16'),
    ('upipe_cuda_attn_fwd90.h', 'a step of K is 32 columns', 'fwd90 128 full: K step',
     'upi_wgmma_further(k, i / 4 * KEYS * 128 + i % 4 * 32)', 'upi_wgmma_further(k, i / 4 * KEYS * 128 + i % 2 * 64)'),
    ('upipe_cuda_attn_fwd90.h', 'a step of V is that of its neighbour', 'fwd90 128 causal: K step',
     'upi_wgmma_further(v, i * 16 * 128), 1);', 'upi_wgmma_further(v, (i ^ 1) * 16 * 128), 1);'),
    ('upipe_cuda_attn_fwd90.h', 'panels of K change places', 'fwd90 128 causal: panel',
     'upi_wgmma_further(k, i / 4 * KEYS * 128', 'upi_wgmma_further(k, (i / 4 ^ 1) * KEYS * 128'),
    ('upipe_cuda_attn_fwd90.h', 'rows of o have the place of those 8 below', 'fwd90 64 full: lane',
     'upi_pack_bf16(o[4 * i], o[4 * i + 1]), upi_pack_bf16(o[4 * i + 2], o[4 * i + 3]),',
     'upi_pack_bf16(o[4 * i + 2], o[4 * i + 3]), upi_pack_bf16(o[4 * i], o[4 * i + 1]),'),
    ('upipe_cuda_attn_bwd90.h', 'every block stores its dQ where it should add', 'bwd90 128 full: turns',
     'if (is_first && !x.g.a.merge)', 'if (!x.g.a.merge)'),
    ('upipe_cuda_attn_bwd90.h', 'a step of Q and of dO is that of its neighbour', 'bwd90 128 full: K step',
     'panel * shape::ROWS * 128 + column), i > 0);', 'panel * shape::ROWS * 128 + (column ^ 32)), i > 0);'),
    ('upipe_cuda_attn_bwd90.h', 'dV and dK begin with the second half of the tile', 'bwd90 64 full: half',
     'upi_wgmma_rs<D, 1>(out, x + 4 * i, upi_wgmma_further(tile, i * 16 * 128), 1);',
     'upi_wgmma_rs<D, 1>(out, x + 4 * i, upi_wgmma_further(tile, (i ^ 4) * 16 * 128), 1);'),
)

def run(words):
    """(exit status, what it printed). The other cores have cases of their own."""
    done = run_command(words, timeout=600, variables={'SIMT_THREADS': 1})
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


class Workshop(mutants.Workshop):
    def test_object(self, mutant):
        return os.path.join(self.built, 'verdict.p', 'verdict.c.o')

    def own_source(self, mutant):
        return None


def bugs(top):
    """Those that give a wrong number."""
    every = mutants.read_mutants()
    every = [mutant for mutant in every
             if mutant.file in HEADERS and not mutant.build and mutant.program != 'watchdog']  # no result is wrong there
    for number, (header, bug, verdict, old, new) in enumerate(PLANTED):
        every.append(mutants.Mutant(1000 + number, header, 'verdict', bug))
        every[-1].verdict, every[-1].old, every[-1].new = verdict, old, new
    equal([mutant.says for mutant in every if ': ' not in mutant.verdict], [], 'bugs without a line of what verdict shows')
    mutants.check_places(top, every)
    return [mutant for mutant in every if not mutant.verdict.startswith('none: ')]


def try_bug(shop, mutant):
    name = f'verdict{mutant.number}'
    case, kind = mutant.verdict.split(': ')
    evidence = os.path.join(shop.scratch, f'{name}.evidence')
    status, said = run([shop.build(name, mutant, True), *case.split(), '--evidence', evidence])
    shutil.rmtree(os.path.join(shop.scratch, name))
    named = ''
    wrong = status == 1 and said.startswith(f'{case}: WRONG ') and said.count('\n') == 1
    if check(wrong, f'{mutant.says}: status {status}: {said}'):
        check(os.path.getsize(evidence) <= 2 << 20, f'{mutant.says}: {os.path.getsize(evidence)} bytes of evidence')
        named = read(evidence)
    print(f'{mutant.file[11:-2]}: {mutant.says}  [{case}: {named}]', flush=True)
    return check(named == kind, f'{mutant.says}: the reader says {named}, not {kind}')


def test_bugs(folder):
    if not EMULATED or not (FULL or EVERY):
        return
    tried, _ = mutants.in_order(bugs(TOP), mutants.commit(TOP))
    began, cores = time.monotonic(), os.cpu_count() or 1
    shop = Workshop(TOP, BUILD, folder)
    shop.prepare(tried[:1])

    def in_time(number, mutant):
        late = not EVERY and number >= BUGS and time.monotonic() - began >= SECONDS / cores
        return None if late else try_bug(shop, mutant)

    with concurrent.futures.ThreadPoolExecutor(cores) as pool:
        named = [good for good in pool.map(in_time, range(len(tried)), tried) if good is not None]
    print(f'bugs: {sum(named)} named of {len(named)}; there are {len(tried)}')
    check(len(named) >= BUGS, 'too few bugs')


if __name__ == '__main__':
    PROGRAM, TOP, BUILD = [os.path.abspath(path) for path in sys.argv[1:4]] if len(sys.argv) > 2 else \
        [os.path.abspath(sys.argv[1]), '', '']
    EMULATED = TOP != ''
    sys.exit(run_tests('cuda_verdict', test_cases, test_hang, test_bugs))

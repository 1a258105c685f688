#!/usr/bin/env python3
"""test_descriptors.py TRAIN LOGITS COMPARE PLAN -- programs that are started with stdin, stdout or stderr closed

What a program opens must not come in their place: a lock or a checkpoint would be written what is meant for a
terminal. A table that cannot be written is status 1, whatever else is done; stdin and stderr are no result.
"""

import os
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), 'lib'))
from checks import check, end, equal, run_command, run_test, tree, write  # pylint: disable=wrong-import-position
from programs import BOOK, npy  # pylint: disable=wrong-import-position

TRAIN, LOGITS, COMPARE, PLAN = (os.path.abspath(path) for path in sys.argv[1:])
MODEL = ['--layers', '1', '--model-dim', '64', '--heads', '4', '--kv-heads', '2']
CLOSED = ((), (0,), (1,), (2,), (0, 1), (0, 1, 2))


def run(command, folder, closed=()):
    """With these descriptors closed; a shell closes them, as users do."""
    words = ''.join(f' {fd}>&-' for fd in closed)
    return run_command(['sh', '-c', f'exec "$@"{words}', 'sh', *command], 50, cwd=folder)


def lasting(found):
    """Measured seconds differ from run to run."""
    return {name: b'' if name == 'numbers.json' else data for name, data in found.items()}


def test_program(name, command, table=True, kept=True):
    """The files of a run with all three open, and what it says there, but for what is closed. `kept`: the files too, where
    the table cannot be written."""
    first = None
    for closed in CLOSED:
        with tempfile.TemporaryDirectory() as folder:
            done, left = run(command, folder, closed), tree(folder)
            first = first or left
            want = 1 if table and 1 in closed else 0
            what = f'{name} without {closed or "nothing"}'
            equal(done.returncode, want, f'{what}: {done.stderr}: the status')
            lasts = lasting(first) if kept or not want else {}
            equal(sorted(lasting(left)), sorted(lasts), f'{what}: the files')
            check(lasting(left) == lasts, f'{what}: a file has other bytes')
            if 1 not in closed:
                check(bool(done.stdout) == table, f'{what}: stdout has {done.stdout[:200]}')
            if 2 not in closed:
                said = 'the table cannot be written' if want else ''
                check(said in done.stderr and bool(said) == bool(done.stderr), f'{what}: stderr has {done.stderr[:500]}')


def test_words(program):
    with tempfile.TemporaryDirectory() as folder:
        for flag in ('--help', '--version'):
            done = run([program, flag], folder, (1,))
            check(done.returncode == 1 and flag + ' cannot be written' in done.stderr, f'{program} {flag}: {done}')
        done = run([program, '--nonsense'], folder, (0, 1, 2))
        check(done.returncode == 2 and not tree(folder), f'{program}: a wrong flag gives {done}, {sorted(tree(folder))}')


def main():
    small = ['--tokens', '32', '--ranks', '2']
    train = [TRAIN, *MODEL, *small, '--steps', '1', '--sample', '0', '--data', BOOK]
    run_test(test_program, 'train', [*train, '--save', 'd', '--json', 'numbers.json'])
    run_test(test_program, 'compare', [COMPARE, *small, '--data', BOOK, '--json', 'numbers.json', '--dump', 'dump'], kept=False)
    run_test(test_program, 'plan', [PLAN, '--model', 'llama3-8b', '--tokens', '128k', '--json', 'numbers.json'])
    with tempfile.TemporaryDirectory() as folder:
        equal(run([*train, '--save', 'd'], folder).returncode, 0, 'the status of a training')
        ids = os.path.join(folder, 'ids.npy')
        write(ids, npy(range(32)))
        run_test(test_program, 'logits', [LOGITS, '--load', os.path.join(folder, 'd'), '--ids', ids, '--out', 'out.npy', '--ranks', '2'],
                     table=False)
    for program in (TRAIN, LOGITS, COMPARE, PLAN):
        run_test(test_words, program)
    return end('descriptors')


if __name__ == '__main__':
    sys.exit(main())

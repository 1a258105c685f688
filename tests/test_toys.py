#!/usr/bin/env python3
"""test_toys.py TOP TABLE -- a flag that train does not have, as a patch: it applies, does what it says, and stays as small

toys/flag.patch adds --loss-scale, on which ranks agree and which a resumed run cannot change, as docs/flags.md says that a
flag is added. The patch holds the files of its tests and pages too. TABLE is a library with the CPU's kernels.
"""

import os
import re
import shlex
import shutil
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), 'lib'))
from checks import check, equal, load, needed, read, run_command, run_tests, write  # pylint: disable=wrong-import-position
from programs import BOOK, refused  # pylint: disable=wrong-import-position

TOP, TABLE = (os.path.abspath(path) for path in sys.argv[1:3])
CC = shlex.split(os.environ.get('CC', 'cc'))
FILES = 7  # at most: a flag that needs more of them has become harder to add
SMALL = '--ranks 2 --tokens 64 --layers 1 --model-dim 64 --heads 2 --kv-heads 2 --sample 0'.split()
RESULTS = ('loss', 'grad_norm', 'peak_bytes', 'sent_bytes_per_step')


def apply_patch(patch, folder):
    """The patched files, below folder. A hunk's text must stand in its file once; its line may have moved."""
    for part in re.split(r'^diff --git .*\n', patch, flags=re.M)[1:]:
        head, *hunks = re.split(r'^@@ .*\n', part, flags=re.M)
        name = re.search(r'^\+\+\+ b/(.+)$', head, re.M).group(1)
        text = read(os.path.join(TOP, name)).decode()
        for hunk in hunks:
            lines = [line or ' ' for line in hunk.splitlines()]  # git leaves out the blank of an empty line
            old, new = (''.join(line[1:] + '\n' for line in lines if line[0] in kinds) for kinds in (' -', ' +'))
            needed(text.count(old) == 1, f'toys/flag.patch does not apply to {name}: its text stands there {text.count(old)} '
                                         f'times, make the patch anew:\n{hunk}')
            text = text.replace(old, new)
        os.makedirs(os.path.dirname(os.path.join(folder, name)), exist_ok=True)
        write(os.path.join(folder, name), text)
        yield name


def compiled(out, source, *more):
    done = run_command([*CC, '-std=c11', '-O0', '-D_POSIX_C_SOURCE=200809L', '-I', '.', source, '-o', out, *more, '-lm', '-pthread'])
    needed(done.returncode == 0, f'{source} does not compile: {done.stderr}')


def trained(folder, name, *flags):
    done = run_command([f'{folder}/train', *SMALL, '--data', BOOK, '--json', name + '.json', '--log', name + '.log', *flags])
    needed(done.returncode == 0, f'train {flags}: {done.returncode}: {done.stderr}')
    line = float(re.search(r'loss ([\d.]+) -> ', done.stdout).group(1))
    return {**load(name + '.json'), 'line': line, 'log': [load(name + '.log')[key] for key in ('loss', 'norm')]}


def test_flag(folder):
    jansson = run_command(['pkg-config', '--cflags', '--libs', 'jansson']).stdout.split()
    os.symlink(os.path.join(TOP, 'upipe'), 'upipe')
    shutil.copytree(os.path.join(TOP, 'examples'), 'examples')
    names = list(apply_patch(read(os.path.join(TOP, 'tests/toys/flag.patch')).decode(), folder))
    check(0 < len(names) <= FILES, f'the flag is in {len(names)} files: {names}')
    compiled('test_flags', os.path.join(TOP, 'tests/test_flags.c'))
    done = run_command(['./test_flags', 'docs/flags.md'])
    check(done.returncode == 0, f'the table of flags, and its page: {done.stderr}')
    compiled('train', 'examples/llama/train.c', '-DUPIPE_CPU_DECLARE', TABLE, *jansson)
    check('--loss-scale X' in run_command(['./train', '--help']).stdout, '--help does not list the flag')
    refused([f'{folder}/train', '--loss-scale', '0'], folder, 2, ['--loss-scale', '0.001', '1000'])
    one, four = trained(folder, 'one', '--steps', '1'), trained(folder, 'four', '--steps', '1', '--loss-scale', '4', '--save', 'm')
    equal([four[key] for key in RESULTS], [[4 * x for x in one['loss']], *(one[key] for key in RESULTS[1:])], 'what is printed as JSON')
    equal(four['log'], [4 * one['log'][0], one['log'][1]], 'loss and norm of --log')
    check(abs(four['line'] - four['loss'][0]) < 1e-4, f'the line says {four["line"]}')
    refused([f'{folder}/train', *SMALL, '--data', BOOK, '--resume', 'm', '--steps', '2', '--loss-scale', '3'], folder, 1,
            ['was trained with --loss-scale 4, not --loss-scale 3'])
    again = trained(folder, 'again', '--resume', 'm', '--steps', '2')
    equal(again['config']['loss_scale'], 4, 'the flag of a resumed run')


if __name__ == '__main__':
    sys.exit(run_tests('toys', test_flag))

#!/usr/bin/env python3
"""test_toys.py TOP TABLE -- a flag, a method and a mask that the tree does not have, as patches: each applies, does what it
says, and stays as small

They are made as CONTRIBUTING.md says, pages and tests included. toys/flag.patch adds --loss-scale, on which ranks agree and
which a resumed run cannot change. toys/method.patch adds upipe-stripe: UPipe over teams whose rings hold striped tokens.
toys/mask.patch adds block-local attention, which the CPU's kernels have and CUDA's do not. TABLE is a library with the CPU's
kernels.
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
FILES = {'flag': 6, 'method': 7, 'mask': 15}  # at most: what needs more of them has become harder to add
SMALL = '--ranks 2 --tokens 64 --layers 1 --model-dim 64 --heads 2 --kv-heads 2 --sample 0'.split()
JANSSON = run_command(['pkg-config', '--cflags', '--libs', 'jansson']).stdout.split()
RESULTS = ('loss', 'grad_norm', 'peak_bytes', 'sent_bytes_per_step')


def apply_patch(toy, folder):
    """The patched files, below folder. A hunk's text must stand in its file once; its line may have moved."""
    patch = read(os.path.join(TOP, f'tests/toys/{toy}.patch')).decode()
    for part in re.split(r'^diff --git .*\n', patch, flags=re.M)[1:]:
        head, *hunks = re.split(r'^@@ .*\n', part, flags=re.M)
        name = re.search(r'^\+\+\+ b/(.+)$', head, re.M).group(1)
        text = read(os.path.join(TOP, name)).decode()
        for hunk in hunks:
            lines = [line or ' ' for line in hunk.splitlines()]  # git leaves out the blank of an empty line
            old, new = (''.join(line[1:] + '\n' for line in lines if line[0] in kinds) for kinds in (' -', ' +'))
            needed(text.count(old) == 1, f'toys/{toy}.patch does not apply to {name}: its text stands there {text.count(old)} '
                                         f'times, make the patch anew:\n{hunk}')
            text = text.replace(old, new)
        os.makedirs(os.path.dirname(os.path.join(folder, name)), exist_ok=True)
        write(os.path.join(folder, name), text)
        yield name


def patched(toy, folder):
    """The tree in this folder, with the toy."""
    for name in 'upipe', 'examples', 'tests':
        shutil.copytree(os.path.join(TOP, name), name)
    names = list(apply_patch(toy, folder))
    check(0 < len(names) <= FILES[toy], f'the {toy} is in {len(names)} files: {names}')


def compiled(out, source, *more):
    done = run_command([*CC, '-std=c11', '-O0', '-D_POSIX_C_SOURCE=200809L', '-I', '.', source, '-o', out, *more, '-lm', '-pthread'])
    needed(done.returncode == 0, f'{source} does not compile: {done.stderr}')


def check_table():
    compiled('test_flags', 'tests/test_flags.c')
    done = run_command(['./test_flags'])
    check(done.returncode == 0, f'the table of flags: {done.stderr}')


def trained(folder, name, *flags):
    done = run_command([f'{folder}/train', *SMALL, '--data', BOOK, '--json', name + '.json', '--log', name + '.log', *flags])
    needed(done.returncode == 0, f'train {flags}: {done.returncode}: {done.stderr}')
    line = float(re.search(r'loss ([\d.]+) -> ', done.stdout).group(1))
    return {**load(name + '.json'), 'line': line, 'log': [load(name + '.log')[key] for key in ('loss', 'norm')]}


def test_flag(folder):
    patched('flag', folder)
    check_table()
    compiled('train', 'examples/llama/train.c', '-DUPIPE_CPU_DECLARE', TABLE, *JANSSON)
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


def test_method(folder):
    patched('method', folder)
    check_table()
    compiled('compare', 'examples/compare/compare.c', '-DUPIPE_CPU_DECLARE', TABLE, *JANSSON)
    equal(sorted(re.findall(r'^  ([a-z-]+) ', run_command(['./compare', '--help']).stdout.split('\nMethods:\n')[1], re.M)),
          sorted(re.findall(r"'([a-z-]+)'", re.search(r'^METHODS = \[.*?\]', read('tests/lib/programs.py').decode(), re.M | re.S).group())),
          'the methods of --help')
    for flags, grid in [
            ('--heads 8 --kv-heads 4 --tokens 128 --ranks 4', [2, 2]),
            ('--heads 6 --kv-heads 3 --tokens 67 --ranks 6 --ring 3 --batch 2 --window 20', [2, 3]),
            ('--heads 8 --kv-heads 2 --tokens 96 --ranks 4 --cu-seqlens 17,33,46 --ring-mode p2p', [2, 2])]:
        done = run_command(['./compare', *'--model-dim 64 --head-dim 32 --json n.json --method upipe-stripe'.split(), *flags.split()])
        needed(done.returncode == 0, f'compare {flags}: {done.returncode}: {done.stderr}')
        m = load('n.json')['methods'][0]
        equal([m[key] for key in ('name', 'layout', 'ranks', 'ring')], ['upipe-stripe', 'striped', *grid], flags)
        check(m['stages'] > 1, f'{flags}: one stage')
        equal([m['peak_bytes'], m['sent_bytes']], [m['plan_bytes'], m['plan_sent_bytes']], f'{flags}: peak and bytes sent')
        check(all(m[key] < 4e-5 for key in ('err_out', 'err_dx', 'err_dw')), f'{flags}: {m}')


def checked(source, calls, variables, *flags):
    """Runs some of the checks of a test, by what its main calls."""
    write('some.c', f'#define main all_of_them\n#include "{source}"\n#undef main\nint main(int argc, char **argv)\n{{\n{calls}\n}}\n')
    compiled('some', 'some.c', '-I', 'tests', *flags)
    done = run_command(['./some'], variables=variables)
    check(done.returncode == 0 and ', 0 failed' in done.stdout, f'{source}: {done.returncode}: {done.stdout}{done.stderr}')


def test_mask(folder):
    patched('mask', folder)
    compiled('table.o', 'upipe/cpu/upipe_cpu.c', '-c', '-DUPIPE_CPU_SCALAR')
    table = '-DUPIPE_CPU_DECLARE', 'table.o'
    checked('tests/test_attn_masks.c', """
    upipe_ops cuda;
    upipe_ctx c = {.ops = &cuda};
    upipe_attn a = {.mask.block = 4};
    upipe_cuda_plan_ops(&cuda);
    CHECK_REFUSED(upi_attn_check_can(&c, &a, 0), UPIPE_ERR_UNSUPPORTED, c.err, "cuda does not know block-local attention yet");
    cpu_place(), test_sight(), test_refusals();
    return test_end("masks");""", {}, *table, '-DUPIPE_CPU_SCALAR', '-include', 'upipe/cuda/upipe_cuda_bytes.h')
    checked('tests/test_plan.c', 'test_rings(); return test_end("plan");', {}, *table)
    checked('tests/test_dry.c', 'test_pairs(); return test_end("dry");', {'UPIPE_DRAWS': 2000}, *table)
    checked('tests/test_mistakes.c', 'return all_of_them(argc, argv);', {}, *table)
    checked('tests/test_property.c', 'return all_of_them(argc, argv);', {'UPIPE_DRAWS': 8, 'UPIPE_SEED': 1}, *table)


if __name__ == '__main__':
    sys.exit(run_tests('toys', test_flag, test_method, test_mask))

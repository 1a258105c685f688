#!/usr/bin/env python3
"""check_reach.py TOP [--list] -- how much of the library a plain forward and backward walk through

Four counts, the first three of the core alone: backends, upipe_dry.h, the dry transport (upi_dry_*) and what counts pairs for it are left out.

    executed  functions that examples/00_trainer.c, a trainer of four ranks, executes inside upipe_layer_fwd and
              upipe_layer_bwd, and the files that they stand in. The program is compiled with -finstrument-functions,
              where nothing is inlined. upipe_base.h has a count of its own: its views, status and arithmetic are no
              steps of a pass.
    reached   functions that the text of upipe_layer_fwd names, and the text of those, and so on: rings and overlap too
    stack     bytes of each function's frame, nothing inlined, as gcc reports them with -fstack-usage

    path      functions of examples/llama that have begun and not ended when a training step of the program train enters
              upipe_layer_fwd, main and that one included. What starts the ranks, examples/common's, is not counted

Each has a ceiling. Prints a line for each count and each breach, with --list the functions too, and exits non-zero if a
ceiling is broken. Where gcc or nm is missing, it says so and counts what is reached alone; without jansson there is no path.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, 'lib'))
from csource import code, functions, macros
from tree import Report, list_files, read_text

PROGRAM = 'examples/00_trainer.c'
# root -> functions, files, and functions of upipe_base.h besides. They go down, or up with a reason: a tile's product of
# all heads joins its operands, and its heads are cast side by side; borders are upipe_attn.h's in attention too.
EXECUTED = {'upipe_layer_fwd': (102, 15, 12), 'upipe_layer_bwd': (122, 17, 13)}
REACHED = {'upipe_layer_fwd': 167}
# Bytes of stack of each frame of these calls, and of what they reach.
STACK, STACK_ROOTS, STACK_SHOWN = 2048, r'upipe_(layer|qkv)_\w+', r'upipe_(layer|qkv|fpdt)_\w+'
# A training's path to this call. It only goes down.
TRAINER, PATH_TO, PATH = 'examples/llama/train.c', 'upipe_layer_fwd', 8
TRAIN = ['--method', 'upipe', '--ranks', '1', '--tokens', '32', '--layers', '1', '--model-dim', '32', '--heads', '1',
         '--kv-heads', '1', '--steps', '1', '--sample', '0']

BASE = 'upipe_base.h'
BACKENDS = ('cpu', 'cuda', 'net')
DRY = re.compile(r'upi_dry_\w+|upi_pairs_\w+|upipe_attn_pairs')

# Scalar kernels compile in a second; of the core nothing depends on them. ThreadSanitizer's macro keeps them at -O0.
BASIC = ['gcc', '-std=c11', '-D_POSIX_C_SOURCE=200809L', '-w', '-DUPIPE_CPU_SCALAR', '-D__SANITIZE_THREAD__']
INSTRUMENTED = ['-O0', '-no-pie', '-fno-inline', '-finstrument-functions',
                '-finstrument-functions-exclude-file-list=cpu/upipe_cpu,net/upipe_net']
FRAMES = ['-O1', '-fno-inline', '-fno-ipa-cp', '-fno-ipa-sra', '-fkeep-static-functions', '-fkeep-inline-functions',
          '-fstack-usage']


def core(top):
    """{function: (file, what it names)} of the core, and the same of its macros."""
    found, names = {}, {}
    for name in list_files(top):
        folder, _, path = name.partition('/')
        if folder != 'upipe' or path.split('/')[0] in BACKENDS:
            continue
        text = code(read_text(os.path.join(top, name)))
        for function in functions(text):
            found[function.name] = path, set(re.findall(r'\w+', function.parameters + function.body))
        for macro, body in macros(text).items():
            names[macro] = set(re.findall(r'\w+', body))
    return found, names


def reached(found, names, root):
    """The functions of the core that can be reached by names in the text. A macro is what it stands for."""
    seen, waiting = set(), [root]
    for word in waiting:
        for other in found[word][1] if word in found else names[word]:
            if other not in seen and (other in found or other in names):
                seen.add(other)
                waiting.append(other)
    return {word for word in seen | {root} if word in found}


def counted(found, functions_of):
    """Of these functions those that count, and those of upipe_base.h."""
    counts = {name for name in functions_of
              if name in found and found[name][0] != 'upipe_dry.h' and not DRY.fullmatch(name)}
    base = {name for name in counts if found[name][0] == BASE}
    return counts - base, base


def has_gcc():
    """Elsewhere gcc is another compiler's second name."""
    return shutil.which('gcc') and 'gcc version' in subprocess.run(['gcc', '-v'], capture_output=True, text=True,
                                                                   check=False).stderr


def run(command, **more):
    done = subprocess.run(command, capture_output=True, text=True, check=False, **more)
    if done.returncode != 0:
        said = re.sub(r'^\d+ [0-9a-f]+\n', '', done.stdout + done.stderr, flags=re.M)
        sys.exit(f'{" ".join(command)} ended with {done.returncode}:\n{said[-4000:]}')
    return done


def instrumented(top, folder, source, *libraries):
    """The program that says what it executes, and {address: function} of it."""
    program, objects = os.path.join(folder, 'program'), [os.path.join(folder, name) for name in ('p.o', 'e.o')]
    run([*BASIC, *INSTRUMENTED, '-I', top, '-c', os.path.join(top, source), '-o', objects[0]])
    run(['gcc', '-std=c11', '-O1', '-c', os.path.join(HERE, 'lib', 'executed.c'), '-o', objects[1]])
    run(['gcc', '-no-pie', *objects, '-o', program, *libraries, '-lm', '-pthread'])
    symbols = [line.split() for line in run(['nm', program]).stdout.splitlines()]
    return program, {int(row[0], 16): row[2] for row in symbols if len(row) == 3 and row[1] in 'tT'}


def addresses(at, names, program):
    where = {name: f'{address:x}' for address, name in at.items()}
    missing = [name for name in names if name not in where]
    if missing:
        sys.exit(f'{program} does not call {" and ".join(missing)}')
    return ' '.join(where[name] for name in names)


def execute(top, folder, roots):
    """For each root what the program executes inside of it."""
    program, at = instrumented(top, folder, PROGRAM)
    said = run([program], cwd=folder, timeout=120,
               env={**os.environ, 'EXECUTED_IN': addresses(at, roots, PROGRAM)}).stderr
    inside = {root: set() for root in roots}
    for root, address in re.findall(r'^(\d+) ([0-9a-f]+)$', said, re.M):
        inside[roots[int(root)]].add(at[int(address, 16)])
    return inside


def path_of_training(top, folder):
    """The functions of the trainer from main to the call, in order."""
    own = {PATH_TO}
    for where, _, files in os.walk(os.path.join(top, os.path.dirname(TRAINER))):
        for file in files:
            with open(os.path.join(where, file), encoding='utf-8') as source:
                own |= {function.name for function in functions(code(source.read()))}
    program, at = instrumented(top, folder, TRAINER, '-ljansson')
    data = os.path.join(top, 'examples', 'data', 'genesis_exodus.txt')
    said = run([program, *TRAIN, '--data', data], cwd=folder, timeout=120,
               env={**os.environ, 'EXECUTED_TO': addresses(at, [PATH_TO], TRAINER)}).stderr
    return [name for name in (at[int(address, 16)] for address in re.findall(r'^path ([0-9a-f]+)$', said, re.M))
            if name in own]


def frames(top, folder):
    """Bytes of each function's frame in a unit with the whole core."""
    unit = os.path.join(folder, 'unit.c')
    with open(unit, 'w', encoding='utf-8') as out:
        out.write('#include "upipe/upipe.h"\n')
    run([*BASIC, *FRAMES, '-I', top, '-c', unit, '-o', os.path.join(folder, 'unit.o')], cwd=folder)
    with open(os.path.join(folder, 'unit.su'), encoding='utf-8') as usage:
        rows = [line.split('\t') for line in usage]
    return {row[0].split(':')[-1].split('.')[0]: int(row[1]) for row in rows}


def by_file(found, counts):
    return ', '.join(f'{file} {count}' for file, count in Counter(found[name][0] for name in counts).most_common())


def check_executed(report, top, folder, found, listed):
    inside = execute(top, folder, list(EXECUTED))
    for root, (most, most_files, most_base) in EXECUTED.items():
        counts, base = counted(found, inside[root])
        files = {found[name][0] for name in counts}
        print(f'executed in {root}: {len(counts)} functions in {len(files)} files (at most {most} in {most_files}), and '
              f'{len(base)} of {BASE} (at most {most_base})')
        if listed:
            print(''.join(f'    {found[name][0]}: {name}\n' for name in sorted(counts | base, key=lambda n: (found[n][0], n))),
                  end='')
        if len(counts) > most or len(files) > most_files:
            report(f'    too many: {by_file(found, counts)}')
        if len(base) > most_base:
            report(f'    too many of {BASE}: {", ".join(sorted(base))}')


def check_path(report, top, folder):
    if subprocess.run(['gcc', '-E', '-include', 'jansson.h', '-x', 'c', os.devnull], capture_output=True, check=False).returncode:
        print('left out: the path of a training, as jansson is missing')
        return
    path = path_of_training(top, folder)
    print(f'path of a training: {len(path)} functions (at most {PATH}): {", ".join(path)}')
    if len(path) > PATH or path[:1] != ['main'] or path[-1:] != [PATH_TO]:
        report('    too long, or not from main to the call')


def check_reached(report, found, names, listed):
    for root, most in REACHED.items():
        if root not in found:
            report(f'{root} is not defined')
            continue
        counts = reached(found, names, root)
        print(f'reached from {root}: {len(counts)} functions in {len({found[name][0] for name in counts})} files '
              f'(at most {most})')
        if listed:
            print(''.join(f'    {found[name][0]}: {name}\n' for name in sorted(counts, key=lambda n: (found[n][0], n))),
                  end='')
        if len(counts) > most:
            report(f'    too many: {by_file(found, counts)}')


def check_stack(report, top, folder, found, names):
    bytes_of = frames(top, folder)
    shown = sorted(name for name in bytes_of if re.fullmatch(STACK_SHOWN, name) and name in found)
    print(f'bytes of stack (at most {STACK}): {", ".join(f"{name} {bytes_of[name]}" for name in shown)}')
    held = set()
    for root in [name for name in found if re.fullmatch(STACK_ROOTS, name)]:
        held |= reached(found, names, root)
    for name in sorted(held, key=lambda n: (-bytes_of.get(n, 0), n)):
        if name not in bytes_of:
            report(f'    gcc reports no frame of {name}')
        elif bytes_of[name] > STACK:
            report(f'    {name} in {found[name][0]}: {bytes_of[name]} bytes of stack')
    if not shown or not held:
        report('    no such call')


def main():
    top = os.path.abspath(sys.argv[1])
    listed = '--list' in sys.argv[2:]
    report = Report()
    found, names = core(top)
    check_reached(report, found, names, listed)
    if not has_gcc() or not shutil.which('nm'):
        print('left out: what is executed, and the stack, as gcc or nm is missing')
    else:
        with tempfile.TemporaryDirectory() as folder:
            check_executed(report, top, folder, found, listed)
            check_stack(report, top, folder, found, names)
            check_path(report, top, folder)
    print(f'reach: {len(found)} functions of the core, {report.count} breaches')
    return 1 if report.count or not found else 0


if __name__ == '__main__':
    sys.exit(main())

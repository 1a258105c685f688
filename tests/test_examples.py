#!/usr/bin/env python3
"""test_examples.py TOP TABLE -- the numbered examples: short, alone, listed in README.md, and run by the command in their heads

Where stdout is closed they end with status 1. TABLE is a library with the CPU's kernels, which take most of the time to
compile: it is linked, and the example compiled alone. In the full run three commands are taken as they are, and all run
once more, kernels included, under clang's sanitizer of undefined behaviour. The commands for a GPU are read, not run.
"""

import concurrent.futures
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), 'lib'))
from checks import check, end  # pylint: disable=wrong-import-position

TOP, TABLE = (os.path.abspath(path) for path in sys.argv[1:3])
FULL = bool(os.environ.get('UPIPE_FULL'))
CC = os.environ.get('CC', 'cc')
KERNELS = 'cc -O2 -march=native -c upipe/cpu/upipe_cpu.c && '
LINES = {'03_plug_attention.c': 200, '03_plug_cudnn.cpp': 250, '05_methods.c': 190}  # at most; all others have fewer than 160
AS_IT_IS = ['00_trainer.c', '04_mlp.c', '07_linear.c'] # the others' commands differ in the name alone
COMMON = {'08_nccl.c': ['common/rendezvous.h']}
WATCHED = 'clang -fsanitize=undefined -fno-sanitize-recover=all' # sees offsets from NULL, which gcc's does not


def command_of(text):
    """The first command in the head, its lines joined."""
    words = re.search(r'^ \*     (\S(?:.*\\\n \*         )*.*)$', text.split('*/')[0], re.M)
    return re.sub(r'\\\n \* +', '', words.group(1)) if words else ''


def run(name, command, compiler, table):
    """In a folder of its own, which has the headers and the example."""
    if table:
        command = command.removeprefix(KERNELS).replace('upipe_cpu.o', shlex.quote(table))
        command = re.sub(r'-O2 -march=native(.*\.c)', lambda words: f'-DUPIPE_CPU_DECLARE{words.group(1)} {shlex.quote(table)}', command)
    with tempfile.TemporaryDirectory() as folder:
        for part in 'upipe', 'examples':
            os.symlink(os.path.join(TOP, part), os.path.join(folder, part))
        done = subprocess.run(['sh', '-c', re.sub(r'(?<![^ ])cc (?=-)', lambda _: compiler + ' ', command)], cwd=folder, capture_output=True, text=True,
                              timeout=300, check=False)
        check(done.returncode == 0 and done.stdout != '' and done.stderr == '',
              f'{name}: {command}: {done.returncode}: {done.stdout[-200:]}{done.stderr[-500:]}')
        closed = subprocess.run(['sh', '-c', command.split('&&')[-1] + ' >&-'], cwd=folder, timeout=300, check=False)
        check(closed.returncode == 1, f'{name}: {closed.returncode} where its results cannot be written')


def run_all(host):
    with concurrent.futures.ThreadPoolExecutor(2) as pool, tempfile.TemporaryDirectory() as folder:
        runs = [pool.submit(run, name, command, CC, None if FULL and name in AS_IT_IS else TABLE) for name, command in host.items()]
        if FULL and shutil.which('clang'):
            table = os.path.join(folder, 'table.o')
            subprocess.run([*shlex.split(WATCHED), '-march=native', '-D_GNU_SOURCE', '-I' + TOP, '-c',
                            os.path.join(TOP, 'upipe', 'cpu', 'upipe_cpu.c'), '-o', table], check=True)
            runs += [pool.submit(run, name, command, WATCHED, table) for name, command in host.items()]
        for one in runs:
            one.result()


def main():
    names = sorted(name for name in os.listdir(os.path.join(TOP, 'examples')) if re.match(r'\d\d_.*\.(c|cpp)$', name))
    with open(os.path.join(TOP, 'examples', 'README.md'), encoding='utf-8') as file:
        rows = re.findall(r'^\| \[(\d\d_\S+)\]\(\1\) \| .+ \| `(.+)` \|$', file.read(), re.M)
    check([name for name, _ in rows] == names, f'examples/README.md lists {[name for name, _ in rows]}, not {names}')
    check({name[:2] for name in names} == {f'{i:02}' for i in range(11)}, f'not 00 to 10: {names}')
    commands = {}
    for name in names:
        with open(os.path.join(TOP, 'examples', name), encoding='utf-8') as file:
            text = file.read()
        lines, shared = text.count('\n'), re.findall(r'#include "((?!upipe/).*)"', text)
        check(lines <= LINES.get(name, 159), f'{name} has {lines} lines')
        check(shared == COMMON.get(name, []), f'{name} includes {shared}')
        commands[name] = command_of(text)
        check(f' examples/{name} ' in commands[name], f'the head of {name} has the command "{commands[name]}"')
        check((name, commands[name]) in rows, f'{name}: README.md has another command than its head')
    host = {name: command for name, command in commands.items() if command.startswith('cc ')}
    check(len(host) == 9, f'{sorted(host)} run here')
    if shutil.which(shlex.split(CC)[0]):
        run_all(host)
    return end('examples')


if __name__ == '__main__':
    sys.exit(main())

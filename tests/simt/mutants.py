#!/usr/bin/env python3
"""mutants.py TOP BUILD [WORD] -- bugs of mutants.txt, planted in a copy of the kernels, must fail a test

BUILD is meson's folder of tests/cuda, from which tests, fakes and tables are taken as they are compiled there. One header
is changed at a time, compiled alone, and takes the place of its entries in the table; then a test program runs. It must
print a line on stderr, which is a failed check or a finding of the emulator, or end otherwise than with 0, or hang. The
programs must pass with the kernels as they are, which is tried where all bugs or chosen ones are: the suite simt does it
anyway. A line a bug, then how many ran, and the seconds; the status is zero if all that ran were caught.

With a WORD bugs whose text has it are tried. Otherwise one of every kernel, and then others as long as
UPIPE_MUTANTS_SECONDS (60) last, in an order that the commit says; with UPIPE_MUTANTS=all all of them.
"""

import concurrent.futures
import glob
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, '..', 'planted'))
from lists import Broken, Bug, place, read_list  # noqa: E402

PATIENCE = 600  # seconds for a run that may hang; an original that passes takes a minute on an idle machine
CXX = os.environ.get('CXX', 'g++')
CXX_FLAGS = ['-std=c++17', '-D_GNU_SOURCE', '-O1', '-g1', '-Wno-psabi', '-DUPIPE_CUDA_SEAMS="simt/seams.h"']
BUILDS = {'': [], 'race': ['-fsanitize=thread', '-DSIMT_RACE']}
TABLES = {'': 'libemulated_table.a.p', 'race': 'librace_table.a.p'}

# The table with the entries of one header, or of those that include it.
UNIT = '''{includes}
extern "C" upipe_status base_cuda_ops(upipe_ops *ops, upipe_cuda *device, upipe_err *e);
extern "C" upipe_status app_ops(upipe_ops *ops, upipe_cuda *device, upipe_err *e);
extern "C" upipe_status app_ops(upipe_ops *ops, upipe_cuda *device, upipe_err *e)
{{
    UPIPE_TRY(base_cuda_ops(ops, device, e));
{entries}    return UPIPE_OK;
}}
'''
# Rules of linear attention are a table of their own, in one header.
RULES = {'linear': '#include "upipe/cuda/upipe_cuda_linear.h"\nUPIPE_EXPORT_LINEAR(app_linear, upipe_cuda_linear)\n'}


class Mutant(Bug):
    def __init__(self, number, header, program, says):
        race = says.startswith('race: ')
        super().__init__(number, header, program, says[6:] if race else says)
        self.build = 'race' if race else ''
        self.test = f'test_cuda_{program}' + (' under the race detector' if race else '')


def run(command, what):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        raise Broken(f'{what}: {" ".join(command)}\n{done.stdout[:4000]}')


def read_mutants():
    return read_list(os.path.join(HERE, 'mutants.txt'), kind=Mutant)


def check_places(top, mutants):
    """Each must change one place of its header."""
    for mutant in mutants:
        with open(os.path.join(top, 'upipe', 'cuda', mutant.file), encoding='utf-8') as source:
            place(source.read(), mutant)


class Workshop:
    """What all mutants share: compiled tests, fakes and tables."""

    def __init__(self, top, built, scratch):
        self.top, self.built, self.scratch = top, built, scratch
        self.base = {}
        fakes = os.path.join(built, 'libfake.a.p')
        self.fakes = [os.path.join(fakes, name) for name in sorted(os.listdir(fakes)) if name.endswith('.o')]
        self.cpu = os.path.join(built, '..', '..', 'libcpu_table.a')
        with open(os.path.join(top, 'upipe', 'cuda', 'upipe_cuda.h'), encoding='utf-8') as source:
            table = re.findall(r'ops->(\w+) = (\w+);', source.read())
        self.entries = {}  # of the table, by the header that defines them
        self.users = {}    # the headers that include the header
        for path in sorted(glob.glob(os.path.join(top, 'upipe', 'cuda', '*.h'))):
            name = os.path.basename(path)
            with open(path, encoding='utf-8') as source:
                text = source.read()
            self.entries[name] = [(entry, function) for entry, function in table if f'{function}(upipe_ctx' in text]
            for used in re.findall(r'#include "(\w+\.h)"', text):
                self.users.setdefault(used, []).append(name)

    def touched(self, header):
        """The headers whose entries a change of this one must reach: its own, and those of all that use it."""
        found, left = {header}, [header]
        while left:
            more = set(self.users.get(left.pop(), [])) - found
            found |= more
            left += more
        return {name for name in found if self.entries[name]}

    def includes(self, first):
        return [f'-I{first}'] + [f'-I{os.path.join(self.top, *path)}' for path in ((), ('tests',), ('tests', 'fake'))]

    def compile(self, source, flags, output, first):
        run([CXX, *CXX_FLAGS, *flags, *self.includes(first), '-c', source, '-o', output], source)

    def prepare(self, mutants):
        """The whole tables, unchanged, under another name."""
        for build in {mutant.build for mutant in mutants}:
            whole = os.path.join(self.built, TABLES[build], 'table.cpp.o')
            self.base[build] = os.path.join(self.scratch, f'base{build}.o')
            run(['objcopy', '--redefine-sym', 'app_ops=base_cuda_ops', '--redefine-sym', 'app_linear=base_cuda_linear',
                 whole, self.base[build]], whole)

    def own_source(self, mutant):
        """A test that has the kernels in its own unit, and no table."""
        path = os.path.join(self.top, 'tests', 'cuda', f'{mutant.program}.cpp')
        return path if os.path.exists(path) else None

    def test_object(self, mutant):
        name = f'test_cuda_{mutant.program}'
        folder = f'{name}_race.p' if mutant.build else f'{name}.p'
        return os.path.join(self.built, folder, f'{name}.c.o')

    def build(self, name, mutant, change):
        """The test program with the mutant's header compiled anew, changed or not."""
        copy = os.path.join(self.scratch, name)
        shutil.copytree(os.path.join(self.top, 'upipe'), os.path.join(copy, 'upipe'))
        header = os.path.join(copy, 'upipe', 'cuda', mutant.file)
        with open(header, encoding='utf-8') as source:
            text = source.read()
        if change:
            start, end = place(text, mutant)
            text = text[:start] + mutant.new + text[end:]
            with open(header, 'w', encoding='utf-8') as out:
                out.write(text)
        rules = RULES.get(mutant.program, '')
        mine = [] if rules else sorted(self.touched(mutant.file))
        unit = os.path.join(copy, 'unit.cpp')
        program = os.path.join(copy, 'program')
        own = self.own_source(mutant)
        if own:
            self.compile(own, BUILDS[mutant.build], unit + '.o', copy)
            run([CXX, unit + '.o', *self.fakes, '-pthread', '-lm', '-ldl', '-o', program], name)
            return program
        with open(unit, 'w', encoding='utf-8') as out:
            out.write(UNIT.format(includes=rules + '\n'.join(f'#include "upipe/cuda/{name}"' for name in mine),
                                  entries=''.join(f'    ops->{entry} = {function};\n'
                                                  for name in mine for entry, function in self.entries[name])))
        self.compile(unit, BUILDS[mutant.build], unit + '.o', copy)
        run([CXX, self.test_object(mutant), unit + '.o', self.base[mutant.build], *self.fakes, self.cpu, '-pthread', '-lm', '-o',
             program], name)
        return program


def watch(program, mutant):
    """How a run failed, in a line; None if it did not. The first line on stderr says it, so nobody waits for more."""
    environment = dict(os.environ)
    if not mutant.build:
        environment['SIMT_THREADS'] = '1'  # the other cores have mutants of their own
    process = subprocess.Popen([program], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                               errors='replace', env=environment)
    timer = threading.Timer(PATIENCE, process.kill)
    timer.start()
    began = time.monotonic()
    line = process.stderr.readline().strip()
    if line:
        process.kill()
    status = process.wait()
    process.stderr.close()
    timer.cancel()
    if line:
        return re.sub(r'^.*?([\w.]+:\d+: )', r'\1', line)
    if time.monotonic() - began >= PATIENCE:
        return f'still running after {PATIENCE} s'
    return f'status {status}' if status != 0 else None


def try_mutant(shop, mutant):
    name = f'mutant{mutant.number}'
    try:
        return watch(shop.build(name, mutant, True), mutant)
    finally:
        shutil.rmtree(os.path.join(shop.scratch, name), ignore_errors=True)


def try_original(shop, mutant):
    began = time.monotonic()
    line = watch(shop.build(f'original{mutant.number}', mutant, False), mutant)
    if line:
        raise Broken(f'without a bug {mutant.test} fails: {line}')
    print(f'    passes  without a bug: {mutant.test}, {time.monotonic() - began:.0f} s', flush=True)


def commit(top):
    """A number that changes with every commit; 0 where there is no history."""
    done = subprocess.run(['git', '-C', top, 'rev-parse', 'HEAD'], capture_output=True, text=True, check=False)
    return int(done.stdout, 16) if done.returncode == 0 else 0


def in_order(mutants, seed):
    """Shuffled, one of every kernel first; and how many those are."""
    mutants = random.Random(seed).sample(mutants, len(mutants))
    first = {}
    for mutant in mutants:
        first.setdefault(mutant.file, mutant)
    chosen = list(first.values())
    return chosen + [mutant for mutant in mutants if mutant not in chosen], len(chosen)


def main():
    top, built = os.path.abspath(sys.argv[1]), os.path.abspath(sys.argv[2])
    word = sys.argv[3] if len(sys.argv) > 3 else ''
    began = time.monotonic()
    mutants = [mutant for mutant in read_mutants()
               if word in f'{mutant.file} {mutant.test} {mutant.says}']
    every = word != '' or os.environ.get('UPIPE_MUTANTS') == 'all'
    mutants, floor = in_order(mutants, commit(top))
    budget = float('inf') if every else float(os.environ.get('UPIPE_MUTANTS_SECONDS') or 60)
    ran, survived = 0, 0
    scratch = tempfile.mkdtemp(prefix='mutants')
    try:
        check_places(top, mutants)
        shop = Workshop(top, built, scratch)
        shop.prepare(mutants)

        def try_in_time(number, mutant):
            late = number >= floor and time.monotonic() - began >= budget
            return mutant, not late, None if late else try_mutant(shop, mutant)

        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            originals = {mutant.test: mutant for mutant in mutants} if every else {}
            checks = [pool.submit(try_original, shop, mutant) for mutant in originals.values()]
            jobs = [pool.submit(try_in_time, *numbered) for numbered in enumerate(mutants)]
            for job in concurrent.futures.as_completed(jobs):
                mutant, tried, line = job.result()
                if not tried:
                    continue
                ran += 1
                survived += line is None
                print(f'{mutant.number:3} {"caught" if line else "SURVIVED"}  {mutant.file[11:-2]}: {mutant.says}'
                      f'  [{line or mutant.test + " passed"}'[:200] + ']', flush=True)
            for check in checks:
                check.result()
    except Broken as broken:
        print(broken, file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(f'mutants: {ran} run of {len(mutants)}, {floor} kernels, '
          f'{f"{survived} SURVIVED" if survived else "all caught"}, {time.monotonic() - began:.0f} s')
    return 0 if ran >= floor > 0 and not survived else 1


if __name__ == '__main__':
    sys.exit(main())

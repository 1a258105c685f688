#!/usr/bin/env python3
"""planted.py [--only WORD...] [--first] [--check | --page] -- which test sees which planted bug

The lists beside this file name small bugs of the library, the trainer, the planner, the bindings and the CUDA kernels. All
are put into one copy of the tree, each behind a switch (planted.h), and the copy is compiled once. Every test of the
ordinary run then says which bugs' code it reaches, and must pass without a bug. With one bug on, those tests run that reach
it, the quickest first. A bug of the kernels names the one test over the emulator that it is tried with. A test sees a bug
where it fails or hangs. The result is matrix.tsv, a line a bug.

    planted.py                      every bug, every test that reaches it; hours
    planted.py --first              every bug, up to the first test that sees it
    planted.py --unseen             those that no test which is there has seen so far
    planted.py --most SECONDS       of each bug tests that take so long together
    planted.py --only pool 'step'   the bugs of a list, or whose text has a word
    planted.py --tests mem a2a ...  the same with these tests alone; nothing is written
    planted.py --check              only whether each bug has its place in the code, those of C compile, and the page has
                                    what is kept
    planted.py --page               prints what docs/testing.md has of matrix.tsv
    planted.py --some               each with the test that saw it first, as many as UPIPE_MUTANTS_SECONDS (60) allow, of
                                    those that were seen within 10 s, and not of transports, where a bug may show by chance;
                                    with UPIPE_MUTANTS=all all of them. The commit says the order. Nothing is written

The status is zero if every bug that ran was seen.
"""

import argparse
import concurrent.futures
import fcntl
import glob
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(HERE))
sys.path[:0] = [os.path.join(HERE, '..'), os.path.join(HERE, '..', 'lib')]
import run as runner  # noqa: E402
from lists import Broken, place, read_list  # noqa: E402
from tree import list_files  # noqa: E402

MOST = 1 << 20  # numbers, as in planted.h
MATRIX = os.path.join(HERE, 'matrix.tsv')
FOLDER = os.path.join(TOP, 'build', 'planted')
SOON = 10  # seconds; what hangs takes longer
CHANCE = {'transports'}  # a wait that is left out shows by chance
TRIES = 3
EMULATED = {'simt', 'fake'}  # suites: for the bugs that name a test of them
ALSO = {'nccl'}  # over the fake device
# What --check compiles: units that include the C of the lists, but for what needs other libraries.
COMPILED = ('upipe/upipe.h', 'examples/train/train.c', 'examples/train/logits.c', 'examples/plan/plan.c',
            'examples/compare/compare.c', 'examples/bindings/c/upipe_abi.c')
# What reads the tree, which the copy is not.
TREE = {'api', 'headers', 'layers', 'planted', 'runner', 'setup'}
PYTHON = '''import os
SEEN = set()


def planted(number):
    """Whether this process has that bug; writes down what is reached, as planted.h does."""
    path = os.environ.get('UPIPE_PLANTED_REACHED')
    if path and number not in SEEN:
        SEEN.add(number)
        with open(path, 'a', encoding='utf-8') as out:
            out.write(f'{number}\\n')
    return os.environ.get('UPIPE_PLANTED') == str(number)
'''


def read_all():
    """The bugs of all lists, each with the list's name in `area`, and a number that is its own whatever bugs there are."""
    bugs, numbers = [], {}
    for path in sorted(glob.glob(os.path.join(HERE, '*.txt'))):
        for bug in read_list(path):
            bug.area = os.path.basename(path)[:-4]
            bug.number = 1 + zlib.crc32(f'{bug.area}: {bug.says}'.encode()) % (MOST - 1)
            if bug.number in numbers:
                raise Broken(f'{bug.area}: say this in other words, which have a number of their own: {bug.says}')
            numbers[bug.number] = bug
            bugs.append(bug)
    return bugs


# ---- the copy ----

def switch(bugs, old):
    """The C that stands in the place of `old`, which all these bugs change: statements, or an expression."""
    if old[-1] in ';}':
        return ''.join(f'if (UPIPE_PLANTED({bug.number})) {{ {bug.new} }} else ' for bug in bugs) + f'{{ {old} }}'
    for bug in bugs:
        old = f'(UPIPE_PLANTED({bug.number}) ? ({bug.new}) : ({old}))'
    return old


def switch_python(bugs, old, indent):
    """The same in Python; indent: of the line that `old` is, None where it is a part of one."""
    name = "__import__('upipe_planted').planted"
    if indent is not None:
        return f'\n{indent}el'.join(f'if {name}({bug.number}): {bug.new or "pass"}' for bug in bugs) + f'\n{indent}else: {old}'
    for bug in bugs:
        old = f'(({bug.new}) if {name}({bug.number}) else ({old}))'
    return old


def plant(name, text, bugs):
    """A file's text with the bugs behind their switches."""
    spans = {}
    for bug in bugs:
        spans.setdefault(place(text, bug), []).append(bug)
    after = len(text)
    for begin, end in sorted(spans, reverse=True):
        here = spans[begin, end]
        if end > after:
            raise Broken(f'{name}: another planted bug overlaps: {here[0].says}')
        after = begin
        if name.endswith('.py'):
            line = text.rfind('\n', 0, begin) + 1
            whole = not text[line:begin].strip() and text[end:].split('\n', 1)[0] == ''
            new = switch_python(here, text[begin:end], text[line:begin] if whole else None)
        else:
            new = switch(here, text[begin:end])
        text = text[:begin] + new + text[end:]
    return text if name.endswith('.py') else f'#include "{HERE}/planted.h"\n#line 1\n{text}'


def write_if_new(path, data):
    """What has not changed keeps its time, and is not compiled again."""
    if os.path.exists(path) and read(path) == data:
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, 'wb') as out:
        out.write(data)


def read(path):
    with open(path, 'rb') as source:
        return source.read()


def make_copy(folder, bugs):
    """The tree with all bugs, in `folder`/tree."""
    by_file = {}
    for bug in bugs:
        by_file.setdefault(bug.file, []).append(bug)
    names = list_files(TOP)
    for name in by_file:
        if name not in names:
            raise Broken(f'{name} is not there')
    tree = os.path.join(folder, 'tree')
    for name in names:
        source, copy = os.path.join(TOP, name), os.path.join(tree, name)
        data = read(source)
        if name in by_file:
            data = plant(name, data.decode(), by_file[name]).encode()
        write_if_new(copy, data)
        shutil.copymode(source, copy)
    kept = set(names)
    for name in list_files(tree):
        if name not in kept:
            os.remove(os.path.join(tree, name))
    write_if_new(os.path.join(folder, 'python', 'upipe_planted.py'), PYTHON.encode())
    return tree


# ---- tests ----

class Shop:
    """The compiled copy, and what runs there."""

    def __init__(self, folder, bugs):
        self.folder, self.bugs = folder, bugs
        self.built = os.path.join(folder, 'built')
        os.makedirs(folder, exist_ok=True)

    def build(self, names):
        """The tests of these names; '': all that bugs do not name. Others that run beside this wait, and share the copy."""
        with open(os.path.join(self.folder, 'lock'), 'wb') as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.build_alone(names)

    def build_alone(self, names):
        tree = make_copy(self.folder, self.bugs)
        if not os.path.exists(os.path.join(self.built, 'build.ninja')):
            self.run_command(['meson', 'setup', self.built, tree, '-Doptimization=0', '-Dwerror=false', '-Dcuda=disabled'])
        self.run_command(['ninja', '-C', self.built, 'build.ninja'])
        known = self.described('tests')
        if '' in names:
            names = names | ALSO | {test['name'] for test in runner.parts()[0].tests(known, 'ordinary')
                                    if test['name'] not in TREE and not set(runner.suites(test)) & EMULATED}
        self.tests = {test['name']: test for test in known if test['name'] in names}
        files = {target['id']: target['filename'] for target in self.described('targets')}
        wanted = {os.path.relpath(file, self.built) for test in self.tests.values() for name in test['depends']
                  for file in files.get(name, [])}
        if wanted:
            self.run_command(['ninja', '-C', self.built, *sorted(wanted)])

    def described(self, what):
        with open(os.path.join(self.built, f'meson-info/intro-{what}.json'), encoding='utf-8') as file:
            return json.load(file)

    def run_command(self, words):
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode != 0:
            lines = [line for line in done.stdout.split('\n') if 'error' in line or 'ERROR' in line]
            raise Broken(f'{" ".join(words[:3])} ...\n' + '\n'.join(lines[:40] or done.stdout.split('\n')[-40:]))

    def run_test(self, name, variables, limit):
        """(status, seconds); None as the status where time is up."""
        test = self.tests[name]
        budget = {**runner.BUDGETS['ordinary'], 'UPIPE_SECONDS': '0', 'UPIPE_FUZZ_SECONDS': '1'}
        path = os.pathsep.join(filter(None, [os.path.join(self.folder, 'python'), os.environ.get('PYTHONPATH')]))
        threads = {} if name.endswith('_race') else {'SIMT_THREADS': '1'}  # the other cores have bugs of their own
        python = {'PYTHONPATH': path, 'PYTHONDONTWRITEBYTECODE': '1', 'TORCHDYNAMO_DISABLE': '1',  # Dynamo refuses switches
                  'UPIPE_TORCH_FOLDER': os.path.join(TOP, 'build', 'torch')}
        env = {**os.environ, **test['env'], **budget, **threads, **python, **variables}
        began = time.monotonic()
        with open(os.path.join(self.folder, f'{name}.{variables.get("UPIPE_PLANTED", 0)}.log'), 'wb') as log:
            child = subprocess.Popen(test['cmd'], cwd=test['workdir'] or self.built, stdout=log, stderr=subprocess.STDOUT,
                                     stdin=subprocess.DEVNULL, env=env, start_new_session=True)
            try:
                status = child.wait(limit)
            except subprocess.TimeoutExpired:
                status = None
            try:
                os.killpg(child.pid, signal.SIGKILL)
            except OSError:
                pass
            child.wait()
        if status == 0:
            os.remove(log.name)
        return status, time.monotonic() - began

    def sees(self, name, bug, limit):
        """(whether a test sees a bug in one of some tries, the seconds of the last one)"""
        for _ in range(TRIES):
            status, seconds = self.run_test(name, {'UPIPE_PLANTED': str(bug.number)}, limit)
            if status not in (0, runner.SKIPPED):
                return True, seconds
        return False, seconds

    def reached(self, name):
        """(status, the numbers of the bugs that name a test, or else whose code it reaches)"""
        named = {bug.number: bug.test for bug in self.bugs if bug.test}
        if name in named.values():
            return 0, {number for number, test in named.items() if test == name}
        with tempfile.NamedTemporaryFile(dir=self.folder) as file:
            status, _ = self.run_test(name, {'UPIPE_PLANTED_REACHED': file.name}, 900)
            return status, {int(line) for line in file.read().split()} - named.keys()

    def reach(self, name):
        """(bugs whose code a test reaches, its seconds), or the reason why it cannot say."""
        status, found = self.reached(name)
        if status == runner.SKIPPED:
            return set(), 0.0
        if status == 0 and found:
            status, seconds = self.run_test(name, {}, 900)
        if status != 0:
            raise Broken(f'{name} fails without a bug: {self.folder}/{name}.0.log')
        return found, seconds if found else 0.0


def reach_all(shop, workers):
    """{test: (bugs, seconds)}; kept until a file of the copy changes."""
    path, tree = os.path.join(shop.folder, 'reached.json'), os.path.join(shop.folder, 'tree')
    stamp = max(os.path.getmtime(os.path.join(tree, name)) for name in list_files(tree))
    try:
        with open(path, encoding='utf-8') as file:
            kept = json.load(file)
    except (OSError, ValueError):
        kept = {}
    reached = kept.get('reached', {}) if kept.get('stamp') == stamp else {}
    wrong = []
    left = [name for name in shop.tests if name not in reached]
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        jobs = {pool.submit(shop.reach, name): name for name in left}
        for job in concurrent.futures.as_completed(jobs):
            try:
                found, seconds = job.result()
                reached[jobs[job]] = [sorted(found), round(seconds, 2)]
                print(f'{jobs[job]}: reaches {len(found)} in {seconds:.1f} s', flush=True)
            except Broken as broken:
                wrong.append(str(broken))
                print(broken, flush=True)
    with open(path, 'w', encoding='utf-8') as file:
        json.dump({'stamp': stamp, 'reached': reached}, file)
    return {name: (set(reached[name][0]), reached[name][1]) for name in shop.tests if name in reached}, wrong


def try_bug(shop, bug, reached, first, most):
    """[(test, how it fails, seconds)] of the tests that see a bug."""
    seen, spent = [], 0.0
    for name in sorted((n for n in reached if bug.number in reached[n][0]), key=lambda n: reached[n][1]):
        usual = reached[name][1]
        if spent + usual > most:
            break
        status, seconds = shop.run_test(name, {'UPIPE_PLANTED': str(bug.number)}, 4 * usual + 20)
        spent += seconds
        if status not in (0, runner.SKIPPED):
            seen.append((name, 'hangs' if status is None else 'fails', seconds))
            if first:
                break
    return seen


# ---- what is kept ----

def read_matrix():
    """{(area, what): [tests]}"""
    kept = {}
    try:
        with open(MATRIX, encoding='utf-8') as source:
            for line in source.read().split('\n')[1:]:
                if line:
                    area, says, seconds, *tests = line.split('\t')
                    kept[area, says] = ('', []) if seconds == '-' else (seconds, tests)
    except OSError:
        pass
    return kept


def write_matrix(bugs, kept):
    with open(MATRIX, 'w', encoding='utf-8') as out:
        out.write('list\tplanted bug\tseconds\tseen by, the quickest first\n')
        for bug in bugs:
            if (bug.area, bug.says) in kept:
                seconds, tests = kept[bug.area, bug.says]
                out.write('\t'.join([bug.area, bug.says, seconds or '-', *tests]) + '\n')


def page(bugs):
    """Rows of docs/testing.md: a list, its bugs, how many are seen, and by what first."""
    kept = read_matrix()
    lines = ['| list | bugs | seen | within 3 s | first seen by |', '|---|---|---|---|---|']
    for area in sorted({bug.area for bug in bugs}):
        rows = [kept.get((bug.area, bug.says), ('', [])) for bug in bugs if bug.area == area]
        seen = [row for row in rows if row[1]]
        firsts = [row[1][0] for row in seen]
        names = sorted(set(firsts), key=lambda name: (-firsts.count(name), name))
        quick = sum(float(row[0]) <= 3 for row in seen)
        lines.append(f'| `{area}` | {len(rows)} | {len(seen)} | {quick} | '
                     + ', '.join(f'`{name}` {firsts.count(name)}' for name in names[:6]) + (', ...' if names[6:] else '') + ' |')
    return '\n'.join(lines)


def check(bugs):
    """Each bug has its place, those of C compile; what is kept is of these bugs; the page has it."""
    by_file, wrong = {}, []
    for bug in bugs:
        by_file.setdefault(bug.file, []).append(bug)
    for name, here in by_file.items():
        try:
            with open(os.path.join(TOP, name), encoding='utf-8') as source:
                text = plant(name, source.read(), here)
            if name.endswith('.py'):
                compile(text, name, 'exec')
        except (OSError, Broken, SyntaxError) as broken:
            wrong.append(f'{name}: {broken}')
    known = {(bug.area, bug.says) for bug in bugs}
    wrong += [f'matrix.tsv has a bug that no list has: {": ".join(row)}' for row in read_matrix() if row not in known]
    with open(os.path.join(TOP, 'docs', 'testing.md'), encoding='utf-8') as source:
        text = source.read()
    wrong += [f'docs/testing.md lacks this line of planted.py --page: {line}'
              for line in page(bugs).split('\n') if line not in text]
    if not wrong:
        with tempfile.TemporaryDirectory() as folder:
            tree = make_copy(folder, bugs)
            for name in COMPILED:
                words = ['cc', '-x', 'c', '-std=c11', '-D_GNU_SOURCE', '-DUPIPE_PROGRAM', '-march=native', '-fsyntax-only', '-w',
                         '-I.', name]
                done = subprocess.run(words, cwd=tree, stderr=subprocess.PIPE, text=True, check=False)
                if done.returncode:
                    wrong.append(done.stderr.strip())
    for line in wrong:
        print(line, file=sys.stderr)
    print(f'planted: {len(bugs)} bugs in {len(by_file)} files, {len(wrong)} breaches')
    return 1 if wrong or not bugs else 0


def choose(bugs, words):
    return [bug for bug in bugs
            if not words or any(word == bug.area or word in f'{bug.file} {bug.says}' for word in words)]


def shuffled(things):
    """In an order that the commit says."""
    commit = subprocess.run(['git', '-C', TOP, 'rev-parse', 'HEAD'], capture_output=True, text=True, check=False).stdout
    return random.Random(commit).sample(things, len(things))


def some(shop, workers):
    """As many as the time allows, with their builds, each with the test that saw it first: how many ran, and were not seen."""
    every = os.environ.get('UPIPE_MUTANTS') == 'all'
    budget, began = float('inf') if every else float(os.environ.get('UPIPE_MUTANTS_SECONDS') or 60), time.monotonic()
    kept, by_test = read_matrix(), {}
    for bug in shop.bugs:
        seconds, tests = kept.get((bug.area, bug.says), ('', []))
        if tests and (every or (float(seconds) <= SOON and bug.area not in CHANCE)):
            by_test.setdefault(tests[0], []).append((bug, float(seconds)))
    ran = survived = 0

    def late():
        return time.monotonic() - began >= budget

    def in_time(place, name, bug, seconds):
        """What was built for is not in vain: a bug a worker is tried at any time."""
        return None if place >= workers and late() else shop.sees(name, bug, 4 * seconds + 20)

    for name in shuffled(sorted(by_test)):
        if late():
            break
        shop.build({name})
        if name not in shop.tests:  # it needs what this machine has not
            continue
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            jobs = [(bug, pool.submit(in_time, place, name, bug, seconds))
                    for place, (bug, seconds) in enumerate(shuffled(by_test[name]))]
            for bug, job in jobs:
                if job.result() is None:
                    continue
                seen, seconds = job.result()
                if not seen and bug.number not in shop.reached(name)[1]:
                    continue  # code of another processor, or of a package that is not here
                ran += 1
                survived += not seen
                print(f'{"seen" if seen else "SURVIVED"}  {bug.area}: {bug.says}  [{name} {seconds:.1f} s]', flush=True)
    return ran, survived


def main():
    parser = argparse.ArgumentParser(prog='planted.py', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--only', nargs='+', default=[], metavar='WORD')
    parser.add_argument('--tests', nargs='+', metavar='NAME')
    parser.add_argument('--unseen', action='store_true')
    parser.add_argument('--first', action='store_true')
    parser.add_argument('--most', type=float, default=float('inf'), metavar='SECONDS')
    parser.add_argument('--some', action='store_true')
    parser.add_argument('--check', action='store_true')
    parser.add_argument('--page', action='store_true')
    parser.add_argument('--folder', default=FOLDER, help='where the copy is')
    parser.add_argument('--workers', type=int, default=os.cpu_count() or 1, help='tests that run at once')
    options = parser.parse_args()
    try:
        bugs = read_all()
        if options.page:
            print(page(bugs))
            return 0
        if options.check:
            return check(bugs)
        chosen = choose(bugs, options.only)
        shop = Shop(options.folder, bugs)
        if options.some:
            ran, survived = some(shop, options.workers)
            print(f'planted: {ran} run of {len(bugs)}, {f"{survived} SURVIVED" if survived else "all seen"}')
            return 1 if survived or not ran else 0
        shop.build(set(options.tests or (bug.test for bug in chosen)))
        reached, wrong = reach_all(shop, options.workers)
        kept, survived = read_matrix(), 0
        if options.unseen:
            chosen = [bug for bug in chosen if not shop.tests.keys() & kept.get((bug.area, bug.says), ('', []))[1]]
        with concurrent.futures.ThreadPoolExecutor(options.workers) as pool:
            jobs = {pool.submit(try_bug, shop, bug, reached, options.first, options.most): bug for bug in chosen}
            for job in concurrent.futures.as_completed(jobs):
                bug, seen = jobs[job], job.result()
                survived += not seen
                at = sum(bug.number in found for found, _ in reached.values())
                print(f'{"seen" if seen else "SURVIVED"}  {bug.area}: {bug.says}  [{at} tests reach it: '
                      + ', '.join(f'{name} {how} {seconds:.1f} s' for name, how, seconds in seen) + ']', flush=True)
                if not options.tests:
                    kept[bug.area, bug.says] = (f'{seen[0][2]:.1f}' if seen else '', [name for name, _, _ in seen])
                    write_matrix(bugs, kept)
    except Broken as broken:
        print(broken, file=sys.stderr)
        return 1
    print(f'planted: {len(chosen)} run of {len(bugs)}, {f"{survived} SURVIVED" if survived else "all seen"}'
          + (f'; {len(wrong)} tests fail without a bug' if wrong else ''))
    return 1 if survived or wrong else 0


if __name__ == '__main__':
    sys.exit(main())

#!/usr/bin/env python3
"""test_runner.py TOP -- tests by name, what failing tests say, the end of a run (lib/test.h, lib/checks.py, run.py)"""

import argparse
import contextlib
import io
import os
import re
import shlex
import shutil
import sys
import time
from unittest import mock

TOP = os.path.abspath(sys.argv[1])
sys.path[:0] = [os.path.join(TOP, 'tests'), os.path.join(TOP, 'tests', 'lib')]
import run  # pylint: disable=wrong-import-position
from checks import check, equal, needed, read, run_command, run_tests, write  # pylint: disable=wrong-import-position

# Three tests in two forms: 3 checks, 12 that fail, 1.
PROGRAM = r'''
#include "memory.h"
#include "page.h"
static void test_good(void) { for (int i = 0; i < 3; ++i) CHECK(zeroed(8) != NULL); }
static void check_bad(int many)
{
    test_at("case %d", many);
    for (int i = 0; i < many; ++i) CHECK_SAY(0, "row %d", i);
}
static void fine(void) { CHECK(buffers_n == 0); }
static void print(FILE *f) { fputs("one\ntwo\nthree\n", f); }
int main(int argc, char **argv)
{
    test_begin(argc, argv);
    TEST(test_good());
    for (int i = 0; i < 2; ++i) TEST(check_bad(6));
    TEST_OF("last", fine());
    if (getenv("PAGE") != NULL) page_check(getenv("PAGE"), print, "tiny > page.md");
    return test_end("tiny");
}
'''
SCRIPT = f'''
import sys
sys.path.insert(0, {os.path.join(TOP, "tests", "lib")!r})
from checks import check, end, needed, run_test

def test_good(): [check(True, '') for _ in range(3)]

def check_bad(many):
    for i in range(many):
        check(False, f'row {{i}}')
    needed(False, f'row {{many}}')
    check(True, 'not reached')

def last(): check(True, '')

run_test(test_good)
run_test(check_bad, 11)
run_test(last)
sys.exit(end('tiny'))
'''


def by_name(command):
    """What holds of a program and of a script."""
    def said(names):
        done = run_command(command, variables={'UPIPE_TEST': names})
        return done.returncode, done.stdout.strip().split('\n'), done.stderr

    status, out, err = said('')
    equal((status, out[-1]), (1, 'tiny: 16 checks, 12 failed'), 'the verdict')
    equal(len(re.findall(r':\d+: row \d+', err)), 10, f'failures shown in {err!r}')
    check('2 more failures are not shown' in err, err)
    for names, checks in ('good', 3), ('test_good', 3), ('last,good', 4), ('last', 1):
        status, out, err = said(names)
        equal((status, out[-1], err), (0, f'tiny: {checks} checks, 0 failed', ''), f'the test of {names}')
        check(out[0].startswith('chosen: '), out)
    equal(said('check_bad')[0], 1, 'the status of a chosen test that fails')
    for names in 'other', 'good,other', 'goo':
        status, _, err = said(names)
        check(status == 2 and f'no test is named {names.split(",")[-1]}\n' in err and 'tests are: good bad last' in err,
              f'{names}: {err}')


def test_program(folder):
    program, compiler = os.path.join(folder, 'tiny'), shlex.split(os.environ.get('CC', 'cc'))
    write('tiny.c', PROGRAM)
    done = run_command([*compiler, '-std=c11', '-D_POSIX_C_SOURCE=200809L', '-O2', '-Wall', '-Wextra', '-Werror',
                        '-I', os.path.join(TOP, 'tests', 'lib'), 'tiny.c', '-o', program, '-lm'])
    needed(done.returncode == 0, done.stderr)
    by_name([program])
    said = run_command([program]).stderr
    check('row 5; case 6\n' in said and 'failed: bad, 12 times\n' in said, said)
    equal(run_command([program, 'last', 'good']).stdout, 'chosen: last,good\ntiny: 4 checks, 0 failed\n',
          'names as arguments')
    check(re.search(r' t test_failed', run_command(['nm', program]).stdout), 'no function where every failure comes')
    write('page.md', 'one\nzwei\nthree\n')
    done = run_command([program, 'last'], variables={'PAGE': 'page.md'})
    check('page.md:2 is not what "tiny > page.md" prints: it is "zwei", not "two"' in done.stderr, done.stderr)


def test_script(_):
    write('tiny.py', SCRIPT)
    by_name([sys.executable, 'tiny.py'])


def test_end(_):
    """A line for each failure, thirty at most, and every failure is named."""
    for many in 1, 30, 31, 100:
        lines = run.failure_lines([(f'gcc/t{i}', f't{i}.c:{i}: the sum is {i}') for i in range(many)], ['--full'])
        check(len(lines) <= 30, f'{len(lines)} lines for {many} failures')
        check(all(line.startswith('sh tests/run.sh --full --only gcc/t') for line in lines), lines)
        named = re.findall(r'gcc/t(\d+)', '\n'.join(lines))
        equal(named, [str(i) for i in range(many)], 'those that are named')
    equal(run.failure_lines([('gcc/mem', 'm.c:3: no')], []), ['sh tests/run.sh --only gcc/mem  # m.c:3: no'],
          'the line of one failure')
    for said, sentence in (('reached: 3\n../../tests/a.c:1: x is 1, not 2\nb.c:1: more\n', 'tests/a.c:1: x is 1, not 2'),
                           ('[1/2] cc\na.c:3:9: warning: odd\na.c:4:9: error: no x\n', 'a.c:4:9: error: no x'),
                           ('Traceback (most recent call last):\n  File "a.py"\nValueError: bad\n', 'ValueError: bad'),
                           ('fine\n==3==ERROR: AddressSanitizer: heap\n', '==3==ERROR: AddressSanitizer: heap'),
                           ('some\nwords\nkilled after 60 s: it hangs\n', 'killed after 60 s: it hangs'),
                           ('\n', 'status 9')):
        equal(run.sentence_of(said, 9), sentence, 'the first sentence')


# Its child waits for a byte that does not come, as it does for its child.
HANGS = '''
import os
def hears_nothing():
    os.read(os.pipe()[0], 1)
def waits(pid):
    os.waitpid(pid, 0)
pid = os.fork()
waits(pid) if pid else hears_nothing()
'''


def test_hang(folder):
    """What is killed says where each of its processes was."""
    write('hangs.py', HANGS)
    with mock.patch.object(run, 'TOP', os.path.realpath(folder)):
        status, said, _ = run.Runner('full', 0).command([sys.executable, os.path.realpath('hangs.py')], folder, limit=5)
        sentence = run.sentence_of(said, status)
    check(status != 0 and sentence.startswith('killed after 5 s: it hangs, in '), said)
    equal(sorted(sentence.split(', in ')[1].split(', ')), ['hears_nothing at hangs.py:4', 'waits at hangs.py:6'], 'where they were')


def session_of(*only, full=False):
    return run.Session(argparse.Namespace(all=False, full=full, only=list(only)))


def test_names(_):
    known = [{'name': 'layer', 'suite': ['upipe:unit']}, {'name': 'mem', 'suite': ['upipe:unit']}]
    parts = [run.Part('gcc', [], full='unit', ordinary='unit'), run.Part('asan', [], full='unit', ordinary='mem')]
    equal(list(session_of('gcc/layer', 'asan', 'unit:bits').absent(parts, known)), [], 'names that are there')
    equal(list(session_of('asan/layer', 'gcc/none:x', 'mem').absent(parts, known)),
          [('asan/layer', '--full '), ('gcc/none:x', '')], 'names that are not')
    session = session_of('gcc/layer:bits,sums', 'mem:marks', 'gcc/mem')
    equal([session.functions(part, test) for part in parts for test in known], ['bits,sums', '', '', 'marks'],
          'functions')
    equal([test['name'] for test in session.chosen(parts[1], known)], ['mem'], 'those that are chosen')


def test_installs(_):
    """A PyTorch is installed once, for the tests that wait for it, and for no others."""
    known = [{'name': name, 'suite': ['upipe:weights', *version], 'depends': [], 'timeout': 60, 'is_parallel': True}
             for name, version in (('mem', []), ('torch_oldest', ['upipe:oldest']), ('wheel', ['upipe:newest']),
                                   ('torch_newest', ['upipe:newest']))]
    part = run.Part('gcc', [], full='weights')
    for installed, want in (set(), []), ({'oldest', 'newest'}, ['install torch oldest', 'install torch newest', 'install torch newest']):
        with mock.patch.object(run, 'INSTALLED', installed):
            jobs = session_of().test_jobs(part, known, None)
        equal(sorted(job.name for job in jobs if job.test is None), sorted(set(want)), 'what is installed')
        equal([other.name for job in jobs for other in job.after], want, 'what tests wait for')


def test_screen(folder):
    """The logs have what jobs print; the screen has it of those that failed."""
    run.LOGS, session = folder, session_of()
    jobs = [run.Job('gcc/well', lambda: (0, 'reached: 5 draws\n', 1.0)),
            run.Job('build gcc', lambda: (1, 'a.c:1:2: error: no\n', 1.0))]
    jobs[0].test, jobs[0].again, jobs[1].again = {}, 'gcc/well:one', 'gcc'
    screen = io.StringIO()
    with contextlib.redirect_stdout(screen):
        session.runner.go(jobs, session.ended)
    said = screen.getvalue()
    check('reached' not in said and 'error: no\nFAILED: build gcc' in said, said)
    equal([read('gcc-well.log'), read('build-gcc.log')], [b'reached: 5 draws\n', b'a.c:1:2: error: no\n'], 'the logs')
    check('gcc/well' not in session.runner.times and 'build gcc' in session.runner.times,
          'the seconds of a part of a test are kept')
    equal((session.passed, session.failures), (1, [('gcc', 'a.c:1:2: error: no')]), 'what is counted')


def test_times(folder):
    """What is known of a run's seconds, and what is left of them."""
    own, shipped = os.path.join(folder, 'own.json'), os.path.join(folder, 'shipped.json')
    write(own, '{"full": {"gcc/mem": [1.5, 1]}, "ordinary": {"gcc/mem": [8, 8]}}')
    write(shipped, '{"full": {"gcc/mem": [5, 5], "gcc/ring": [30, 40], "build gcc": [20, 38], "asan/ring": [9, 9]}}')
    with mock.patch.multiple(run, TIMES=own, SHIPPED_TIMES=shipped, SLOWNESS=2.0, CORES=2):
        session = session_of(full=True)
        runner = session.runner
        equal(runner.known, {'gcc/mem': [1.5, 1], 'gcc/ring': [60, 80], 'build gcc': [40, 76], 'asan/ring': [18, 18]},
              'this machine\'s own seconds, and another\'s by how fast it is')
        session.expect({'gcc'}, {'setup gcc': None})
        equal(runner.expected, {'gcc/mem': 1, 'gcc/ring': 80, 'build gcc': 76}, 'what a run of these parts takes')
        check(86 < runner.estimate() < 87, f'{runner.estimate()} s on two cores')
        equal(runner.left(), ', 0 % of the seconds; some 86 s left', 'before it has begun')
        runner.began = time.time() - 200
        for job, words in ('setup gcc', '0 %'), ('build gcc', '48 % of the seconds; some 4 min left'), ('gcc/ring', '99 %'):
            with contextlib.redirect_stdout(io.StringIO()):
                runner.go([run.Job(job, lambda: (0, '', 1.0))], lambda job: [])
            check(words in runner.left(), f'after {job}: {runner.left()}')
        chosen = session_of('gcc/ring', full=True)
        chosen.expect({'gcc'}, {'setup gcc': None})
        equal(chosen.runner.left(), '', 'what is left of tests by name')
    equal(run.times_of(own, 'all'), {}, 'a mode that has not run')
    equal(run.times_of(os.path.join(folder, 'none.json'), 'full'), {}, 'a file that is not there')
    for mode in 'full', 'ordinary':
        shipped = run.times_of(os.path.join(TOP, 'tests', 'times.json'), mode)
        check({'build gcc', 'gcc/runner'} <= set(shipped), f'the tree has no seconds of the {mode} run')


if __name__ == '__main__':
    there = shutil.which(shlex.split(os.environ.get('CC', 'cc'))[0])
    sys.exit(run_tests('runner', *[test_program] * bool(there), test_script, test_end, test_hang, test_names, test_installs,
                       test_screen, test_times))

"""checks.py -- what tests that are scripts share: assertions, commands, what a folder holds

    sys.path.insert(0, ...)             # this folder
    from checks import equal, run_command, run_tests

    def test_flags(folder):
        done = run_command([TRAIN, '--steps', 'x'], cwd=folder)
        equal(done.returncode, 2, 'the status of a wrong flag')

    sys.exit(run_tests('train', test_flags))

UPIPE_TEST=flags runs test_flags alone; it takes several names with commas between them. The exit status is 2 if one is
no test's. Each assertion counts, and one that fails says its line and goes on; where the rest of a test would have
nothing to look at, `needed` ends it.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time

COUNTS = {'checks': 0, 'failed': 0}
MOST_SHOWN = 10
TESTS = {}  # their names in order


def name_of(test):
    return re.sub('^(test|check)_', '', test)


STARTED = os.getpid()  # a child that a test forks does not know the tests after it
ASKED = [name_of(name) for name in os.environ.get('UPIPE_TEST', '').split(',') if name]


class Ended(Exception):
    """What a test needs has failed, and was counted."""


def check(ok, sentence):
    COUNTS['checks'] += 1
    if not ok:
        COUNTS['failed'] += 1
    if not ok and COUNTS['failed'] <= MOST_SHOWN:
        caller = sys._getframe(1)
        while os.path.dirname(caller.f_code.co_filename) == os.path.dirname(__file__):  # the test's own line
            caller = caller.f_back
        print(f'{os.path.basename(caller.f_code.co_filename)}:{caller.f_lineno}: {sentence}', file=sys.stderr)
    return ok


def equal(got, want, what):
    return check(got == want, f'{what} is {str(got)[:500]}, not {str(want)[:500]}')


def needed(ok, sentence):
    """A check without which the test cannot go on."""
    if not check(ok, sentence):
        raise Ended


def run_command(words, timeout=300, variables=None, **more):
    """The finished command: text of both streams whatever bytes it wrote. variables: more of the environment."""
    more = {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE, 'encoding': 'utf-8', 'errors': 'backslashreplace', **more}
    if variables is not None:
        more['env'] = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    words = [word if isinstance(word, bytes) else str(word) for word in words]
    return subprocess.run(words, timeout=timeout, check=False, **more)


def read(path):
    with open(path, 'rb') as source:
        return source.read()


def write(path, data):
    """Bytes, or a text."""
    with open(path, 'wb') as out:
        out.write(data.encode() if isinstance(data, str) else data)


def load(path):
    """Of a JSON file."""
    return json.loads(read(path))


def tree(folder):
    """What lies below it: the bytes of files, None for folders."""
    return {os.path.relpath(os.path.join(where, name), folder):
            read(os.path.join(where, name)) if os.path.isfile(os.path.join(where, name)) else None
            for where, folders, names in os.walk(folder) for name in folders + names}


def wait_for(condition, seconds=60, pause=0.01):
    """Whether it came true within this time."""
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(pause)
    return True


def draws(part):
    """Seeds of random draws, by the variables of test.h: a part of the number and of the seconds. One that fails says how to
    replay it."""
    seed, exact = int(os.environ.get('UPIPE_SEED', 1)), os.environ.get('UPIPE_DRAWS')
    least = int(exact or int(os.environ.get('UPIPE_DRAWS_MIN', 200)) // part)
    budget, began, done = 0 if exact else float(os.environ.get('UPIPE_SECONDS', 0)) / part, time.monotonic(), 0
    while done < least or time.monotonic() - began < budget:
        failed = COUNTS['failed']
        yield seed + done
        if COUNTS['failed'] > failed and failed < MOST_SHOWN:
            print(f'replay: UPIPE_SEED={seed + done} UPIPE_DRAWS=1', file=sys.stderr)
        done += 1
    print(f'reached: {done} draws from seed {seed} in {time.monotonic() - began:.0f} s')


def other_python(*places):
    """Starts the script again with the next of these Pythons, which may have a package that this one lacks: Debian's belong
    to Debian's, which need not be the first in PATH. Returns where none is left. What lib/pytorch.py has chosen fails
    instead."""
    if 'UPIPE_NO_OTHER_PYTHON' in os.environ:
        raise  # pylint: disable=misplaced-bare-raise
    tried = os.environ.get('UPIPE_PYTHONS_TRIED', '').split(':')
    for place in (*places, '/usr/bin/python3'):
        if os.path.exists(place) and place not in tried:
            os.environ |= {'UPIPE_PYTHONS_TRIED': ':'.join([*tried, place]), 'UPIPE_TEST': ','.join(ASKED)}
            os.execv(place, [place, *sys.argv])


def python_with(module):
    """A Python here that has it, this one first; None if none has."""
    has = f'import importlib.util, sys; sys.exit(not importlib.util.find_spec({module!r}))'
    return next((python for python in (sys.executable, shutil.which('python3'), '/usr/bin/python3')
                 if python and os.path.exists(python) and run_command([python, '-c', has]).returncode == 0), None)


def run_test(test, *arguments, **named):
    """Calls it, if it is asked for. What it starts has tests of other names."""
    name = name_of(test.__name__)
    TESTS[name] = True
    if ASKED and name not in ASKED:
        return
    os.environ.pop('UPIPE_TEST', None)
    try:
        test(*arguments, **named)
    except Ended:
        pass


def run_tests(name, *tests):
    """Each in a folder of its own, which is the current one. The exit status; with TEST_TIMES also the seconds of each, and
    those of processors that its commands took."""
    def used():
        times = os.times()
        return times.children_user + times.children_system

    for test in tests:
        began, spent = time.monotonic(), used()
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            run_test(test, folder)
            os.chdir('/')
        if 'TEST_TIMES' in os.environ:
            print(f'{test.__name__}: {time.monotonic() - began:.1f} s, of processors {used() - spent:.1f} s', flush=True)
    return end(name)


def end(name):
    """The last line, and the exit status: 1 if a check failed, or if there was none; 2 if a name is no test's."""
    if COUNTS['failed'] > MOST_SHOWN:
        print(f'{COUNTS["failed"] - MOST_SHOWN} more failures are not shown', file=sys.stderr)
    unknown = [one for one in ASKED if one not in TESTS and os.getpid() == STARTED]
    if unknown:
        print(f'no test is named {", ".join(unknown)}\nthe tests are: {" ".join(TESTS)}', file=sys.stderr)
        return 2
    if ASKED:
        print(f'chosen: {",".join(ASKED)}')
    print(f'{name}: {COUNTS["checks"]} checks, {COUNTS["failed"]} failed')
    return 1 if COUNTS['failed'] or not COUNTS['checks'] else 0

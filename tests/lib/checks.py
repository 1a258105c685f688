"""checks.py -- the assertions of tests that are scripts: each counts, and one that fails says its line and goes on

    sys.path.insert(0, ...)             # this folder
    from checks import check, end, equal

    equal(status, 2, 'the status of a wrong flag')
    sys.exit(end('train'))
"""

import os
import sys

COUNTS = {'checks': 0, 'failed': 0}


def check(ok, sentence):
    COUNTS['checks'] += 1
    if not ok:
        COUNTS['failed'] += 1
        caller = sys._getframe(1)
        while caller.f_code.co_filename == __file__:
            caller = caller.f_back
        print(f'{os.path.basename(caller.f_code.co_filename)}:{caller.f_lineno}: {sentence}', file=sys.stderr)
    return ok


def equal(got, want, what):
    return check(got == want, f'{what} is {str(got)[:500]}, not {str(want)[:500]}')


def end(name):
    """The last line, and the exit status: 1 if a check failed, or if there was none."""
    print(f'{name}: {COUNTS["checks"]} checks, {COUNTS["failed"]} failed')
    return 1 if COUNTS['failed'] or not COUNTS['checks'] else 0

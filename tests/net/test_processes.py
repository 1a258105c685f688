#!/usr/bin/env python3
"""test_processes.py MPIRUN PROGRAM -- the example 08_mpi under mpirun: its result, a closed stdout, and what survivors of a dead rank say"""

import os
import re
import shlex
import shutil
import signal
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'lib'))
from checks import check, equal, run_command, run_tests, write  # pylint: disable=wrong-import-position
from launch import Mpi, run_ranks  # pylint: disable=wrong-import-position

MPI, EXAMPLE = Mpi(sys.argv[1], lives=True), os.path.abspath(sys.argv[2])
RANKS = 4


def run(deadline, before='', after=''):
    """The launcher's status, what each rank ends with, prints, and says.

    MPICH's launcher returns the status of what it has started, which is then the program's. Open MPI's goes by the
    program itself, and would end the survivors of one that it sees fail.
    """
    shell = f'{before}"$0" "$@" {after}; status=$?; echo "ends with $status"; exit {0 if MPI.is_open else "$status"}'
    [status], outs, errs, _ = run_ranks(MPI, RANKS, [EXAMPLE, deadline], shell=shell)
    return status, [int(found) for out in outs for found in re.findall('^ends with (.*)$', out, re.M)], outs, errs


def test_result(_):
    status, each, outs, errs = run(30)
    check((status, each) == (0, [0] * RANKS) and 'the same bits as those of one rank alone' in outs[0], f'{status}, {each}: {outs} {errs}')


def test_closed(_):
    """Nothing that MPI opens comes in the place of a closed stdout, and a result that cannot be written is none."""
    status, each, _, errs = run(30, after='>&-')
    check((status == 0) == MPI.is_open and each == [1, 0, 0, 0] and 'the result cannot be written' in errs[0], f'{status}, {each}: {errs}')


def test_usage(_):
    for words in (['0'], ['-1'], ['soon'], ['30', '30']):
        done = run_command([EXAMPLE, *words], 60)
        check(done.returncode == 2 and 'usage: ' in done.stderr and done.stdout == '', f'{words}: {done}')


def test_death(folder):
    """Of the rank that prints the result, in making its inputs: it is a member of the team, and has met the others."""
    compiler = shlex.split(os.environ.get('CC', 'cc'))
    if not shutil.which(compiler[0]):
        return
    write('death.c', '#include <signal.h>\ndouble cos(double x) { raise(SIGKILL); return x; }\n')
    run_command([*compiler, '-shared', '-fPIC', '-fno-builtin', 'death.c', '-o', 'death.so']).check_returncode()
    status, each, outs, errs = run(2, before=f'[ $RANK = 0 ] && export LD_PRELOAD={folder}/death.so; ')
    check('those of one rank alone' not in str(outs), f'a result without rank 0: {outs}')
    if not MPI.is_open:  # the launcher ends the others
        check(status != 0, f'the launcher ends with {status} after a death')
        return
    equal(each, [128 + signal.SIGKILL, 1, 1, 1], f'statuses without rank 0, which say {errs}')
    for r in range(1, RANKS):
        check(re.search(rf'^08_mpi: rank {r}: no result: .*rank 0 ', errs[r], re.M) is not None, f'rank {r} without rank 0: {errs[r]}')


if __name__ == '__main__':
    sys.exit(run_tests('processes', test_result, test_closed, test_usage, test_death))

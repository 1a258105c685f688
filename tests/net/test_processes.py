#!/usr/bin/env python3
"""test_processes.py MPIRUN PROGRAM -- the example 08_mpi under mpirun: its result, a closed stdout, and what survivors of a dead rank say"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

from run_mpi import RANK, is_open_mpi, launcher
from checks import check, end, read, run_command, run_test, write

RANKS = 4
# The victim dies in making its inputs: it is a member of the team, and has met the others.
DEATH = r'''
#include <signal.h>
#include <stdlib.h>
double cos(double x)
{
    const char *rank = getenv("OMPI_COMM_WORLD_RANK") != NULL ? getenv("OMPI_COMM_WORLD_RANK") : getenv("PMI_RANK");
    if (rank != NULL && atoi(rank) == atoi(getenv("VICTIM"))) raise(SIGKILL);
    return x;
}
'''


def run(mpirun, program, folder, deadline=30, output='', **variables):
    """Each rank says with what status it has ended. Its sentences go to a file of its own: the launcher mixes them.

    MPICH's launcher returns the status of what it has started, which is then the program's. Open MPI's goes by the
    program itself, and would end the survivors of one that it sees fail.
    """
    errors = f'{shlex.quote(folder)}/"{RANK}"'
    body = f'{shlex.quote(program)} {deadline} 2>{errors} {output}; status=$?; echo "a rank ends with $status"'
    if not is_open_mpi(mpirun):
        body += '; exit $status'
    job = run_command([*launcher(mpirun), '-np', RANKS, 'sh', '-c', body], 60, variables)
    return job.returncode, job.stdout + job.stderr


def sentences(folder, rank):
    return read(os.path.join(folder, str(rank))).decode()


def test_result(mpirun, program, folder):
    status, said = run(mpirun, program, folder)
    check(status == 0 and 'the same bits as those of one rank alone' in said, f'{status}: {said}')
    check(said.count('a rank ends with 0') == RANKS, said)


def test_closed(mpirun, program, folder):
    """Nothing that MPI opens comes in the place of a closed stdout, and a result that cannot be written is none."""
    status, said = run(mpirun, program, folder, output='>&-')
    check((status == 0) == is_open_mpi(mpirun), f'{status}: {said}')
    check(said.count('a rank ends with 0') == RANKS - 1 and said.count('a rank ends with 1') == 1, said)
    check('the result cannot be written' in sentences(folder, 0), f'rank 0 says {sentences(folder, 0)}')


def test_usage(program):
    for words in (['0'], ['-1'], ['soon'], ['30', '30']):
        done = run_command([program, *words], 60)
        check(done.returncode == 2 and 'usage: ' in done.stderr and done.stdout == '', f'{words}: {done}')


def test_death(mpirun, program, folder, victim, library):
    status, said = run(mpirun, program, folder, 2, LD_PRELOAD=library, VICTIM=str(victim))
    check('those of one rank alone' not in said, f'a result without rank {victim}: {said}')
    if not is_open_mpi(mpirun):  # the launcher ends the others
        check(status != 0, f'the launcher ends with {status} after a death')
        return
    for rank in range(RANKS):
        own = sentences(folder, rank)
        ok = re.search(rf'^08_mpi: rank {rank}: no result: .*rank {victim} ', own, re.M) is not None
        check(ok == (rank != victim), f'rank {rank} without rank {victim}: {own}')
    check(said.count('a rank ends with 1\n') == RANKS - 1, f'statuses of survivors: {said}')


def main():
    mpirun, program = sys.argv[1], os.path.abspath(sys.argv[2])
    compiler = shlex.split(os.environ.get('CC', 'cc'))
    with tempfile.TemporaryDirectory() as folder:
        run_test(test_result, mpirun, program, folder)
        run_test(test_closed, mpirun, program, folder)
        run_test(test_usage, program)
        if shutil.which(compiler[0]):
            source, library = os.path.join(folder, 'death.c'), os.path.join(folder, 'death.so')
            write(source, DEATH)
            subprocess.run([*compiler, '-shared', '-fPIC', '-fno-builtin', source, '-o', library], check=True)
            run_test(test_death, mpirun, program, folder, 0, library)  # the one that prints the result
    return end('processes')


if __name__ == '__main__':
    sys.exit(main())

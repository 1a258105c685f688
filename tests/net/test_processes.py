#!/usr/bin/env python3
"""test_processes.py MPIRUN PROGRAM -- 08_processes under mpirun: its result, and what survivors of a dead rank say"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

from run_mpi import is_open_mpi, launcher

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'lib'))
from checks import check, end  # pylint: disable=wrong-import-position

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


def run(mpirun, program, folder, deadline=30, **variables):
    """Each rank says with what status it has ended. Its sentences go to a file of its own: the launcher mixes them."""
    errors = shlex.quote(folder) + '/"${OMPI_COMM_WORLD_RANK:-$PMI_RANK}"'
    body = f'{shlex.quote(program)} --deadline {deadline} 2>{errors}; echo "a rank ends with $?"'
    job = subprocess.run([*launcher(mpirun), '-np', str(RANKS), 'sh', '-c', body], capture_output=True, text=True, timeout=60,
                         check=False, env={**os.environ, **variables})
    return job.returncode, job.stdout + job.stderr


def sentences(folder, rank):
    with open(os.path.join(folder, str(rank)), encoding='utf-8') as said:
        return said.read()


def test_result(mpirun, program, folder):
    status, said = run(mpirun, program, folder)
    check(status == 0 and 'the same bits as those of one rank alone' in said, f'{status}: {said}')
    check(said.count('a rank ends with 0') == RANKS, said)


def test_death(mpirun, program, folder, victim, library):
    status, said = run(mpirun, program, folder, 2, LD_PRELOAD=library, VICTIM=str(victim))
    check('those of one rank alone' not in said, f'a result without rank {victim}: {said}')
    if not is_open_mpi(mpirun):  # the launcher ends the others
        check(status != 0, f'the launcher ends with {status} after a death')
        return
    for rank in range(RANKS):
        own = sentences(folder, rank)
        ok = re.search(rf'^08_processes: rank {rank}: no result: .*rank {victim} ', own, re.M) is not None
        check(ok == (rank != victim), f'rank {rank} without rank {victim}: {own}')
    check(said.count('a rank ends with 1\n') == RANKS - 1, f'statuses of survivors: {said}')


def main():
    mpirun, program = sys.argv[1], os.path.abspath(sys.argv[2])
    compiler = shlex.split(os.environ.get('CC', 'cc'))
    with tempfile.TemporaryDirectory() as folder:
        test_result(mpirun, program, folder)
        if shutil.which(compiler[0]):
            source, library = os.path.join(folder, 'death.c'), os.path.join(folder, 'death.so')
            with open(source, 'w', encoding='utf-8') as out:
                out.write(DEATH)
            subprocess.run([*compiler, '-shared', '-fPIC', '-fno-builtin', source, '-o', library], check=True)
            test_death(mpirun, program, folder, 0, library)  # the one that prints the result
    return end('processes')


if __name__ == '__main__':
    sys.exit(main())

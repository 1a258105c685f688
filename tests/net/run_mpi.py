#!/usr/bin/env python3
"""run_mpi.py PROGRAM -- runs test_mpi under mpirun, with 2 to 8 processes, and counts the verdicts of its ranks

A rank that is killed leaves none; a check that fails prints its file and line, from whichever rank. Exits with 77, which
Meson takes as skipped, where there is no mpirun.
"""

import os
import re
import shutil
import signal
import subprocess
import sys

# what, processes, ranks that live to give a verdict
JOBS = [('all', 1, 1), ('all', 2, 2), ('all', 4, 4), ('all', 7, 7), ('kill', 4, 1), ('kill', 8, 1)]
SECONDS = 60


def launcher():
    mpirun = shutil.which('mpirun') or shutil.which('mpiexec')
    if mpirun is None:
        print('skipped: there is no mpirun')
        sys.exit(77)
    said = subprocess.run([mpirun, '--version'], capture_output=True, text=True, check=False).stdout
    if 'Open MPI' in said or 'OpenRTE' in said:
        # survivors live on; ranks may outnumber cores, and then must let each other run
        command = [mpirun, '--oversubscribe', '--enable-recovery', '--bind-to', 'none', '--mca', 'mpi_yield_when_idle', '1']
        return command + (['--allow-run-as-root'] if os.geteuid() == 0 else [])
    return [mpirun, '-disable-auto-cleanup']


def run_job(command, program, what, processes, verdicts):
    job = subprocess.Popen(command + ['-np', str(processes), program, what], stdout=subprocess.PIPE,
                           stderr=subprocess.STDOUT, text=True, errors='replace', start_new_session=True)
    try:
        said, late = job.communicate(timeout=SECONDS)[0], False
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        said, late = job.communicate()[0], True
    passed = re.findall(r'^mpi, rank \d+ of \d+: \d+ checks, 0 failed$', said, re.M)
    wrong = re.search(r'\.[ch]:\d+: |checks, [1-9]\d* failed|ERROR: \w+Sanitizer', said)
    ok = not late and not wrong and len(passed) == verdicts
    print(f'{what}, {processes} processes: {len(passed)} of {verdicts} verdicts' + (', hangs' if late else ''))
    if not ok:
        print(said)
    return ok


def main():
    command = launcher()
    results = [run_job(command, os.path.abspath(sys.argv[1]), *job) for job in JOBS]
    print(f'mpi: {len(results)} jobs, {results.count(False)} failed')
    return 1 if False in results else 0


if __name__ == '__main__':
    sys.exit(main())

#!/usr/bin/env python3
"""run_mpi.py MPIRUN PROGRAM -- runs test_mpi with 1 to 8 processes, and counts the verdicts of its ranks

A rank that is killed leaves none; a check that fails prints its file and line, from whichever rank. In the full run there
are more numbers of processes, and one rank is also stopped for longer than the deadline, and continues.
"""

import os
import re
import signal
import subprocess
import sys
import time

# what, processes, ranks that live to give a verdict
OPEN_MPI = [('all', 1, 1), ('all', 2, 2), ('all', 7, 7), ('kill', 8, 1)]
OPEN_MPI_FULL = OPEN_MPI + [('all', 4, 4), ('kill', 4, 1)]
# Launchers of others end every rank when one dies, and ranks that outnumber cores spin in the host's own barriers.
OTHERS = [('all', 1, 1), ('all', 2, 2), ('all', 3, 3), ('all', 4, 4)]
STOPPED = [('endure', 2, 2), ('endure', 4, 4), ('endure', 4, 4)]
SECONDS = 120


def is_open_mpi(mpirun):
    said = subprocess.run([mpirun, '--version'], capture_output=True, text=True, check=False).stdout
    return 'Open MPI' in said or 'OpenRTE' in said


def launcher(mpirun):
    """The command, up to the number of processes."""
    if not is_open_mpi(mpirun):
        return [mpirun]
    # survivors live on; ranks may outnumber cores, and then must let each other run
    command = [mpirun, '--oversubscribe', '--enable-recovery', '--bind-to', 'none', '--mca', 'mpi_yield_when_idle', '1']
    return command + (['--allow-run-as-root'] if os.geteuid() == 0 else [])


def user_launcher(mpirun):
    """As users start it: a rank that fails ends the job."""
    return [word for word in launcher(mpirun) if word != '--enable-recovery']


def alive(pid):
    try:
        with open(f'/proc/{pid}/stat', 'rb') as file:
            return file.read().rpartition(b')')[2].split()[0] != b'Z'
    except OSError:
        return False


def all_gone(pids):
    """After the launcher's end: a rank that it has killed still takes the kernel a moment, long on a busy machine."""
    end = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.01)
    return not any(map(alive, pids))


def stop_one(job, processes):
    """Once all are in their transfers, the last one to say so is stopped past the deadline of 1 s."""
    said, running = '', []
    for line in job.stdout:
        said += line
        running += re.findall(r'^running, process (\d+)$', line)
        if len(running) == processes:
            time.sleep(0.1)
            os.kill(int(running[-1]), signal.SIGSTOP)
            time.sleep(2.5)
            os.kill(int(running[-1]), signal.SIGCONT)
            break
    return said


def run_job(command, program, what, processes, verdicts):
    job = subprocess.Popen(command + ['-np', str(processes), program, what], stdout=subprocess.PIPE,
                           stderr=subprocess.STDOUT, text=True, errors='replace', start_new_session=True)
    said, late = stop_one(job, processes) if what == 'endure' else '', False
    try:
        said += job.communicate(timeout=SECONDS)[0]
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        said, late = said + job.communicate()[0], True
    passed = re.findall(r'^mpi, rank \d+ of \d+: \d+ checks, 0 failed$', said, re.M)
    wrong = re.search(r'\.[ch]:\d+: |checks, [1-9]\d* failed|ERROR: \w+Sanitizer', said)
    ok = not late and not wrong and len(passed) == verdicts
    print(f'{what}, {processes} processes: {len(passed)} of {verdicts} verdicts' + (', hangs' if late else ''))
    if not ok:
        print(said)
    return ok


def main():
    mpirun, program = sys.argv[1], os.path.abspath(sys.argv[2])
    full = bool(os.environ.get('UPIPE_FULL'))
    jobs = OTHERS if not is_open_mpi(mpirun) else OPEN_MPI_FULL if full else OPEN_MPI
    jobs = jobs + (STOPPED if full else [])
    results = [run_job(launcher(mpirun), program, *job) for job in jobs]
    print(f'mpi: {len(results)} jobs, {results.count(False)} failed')
    return 1 if False in results else 0


if __name__ == '__main__':
    sys.exit(main())

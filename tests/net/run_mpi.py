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
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'lib'))
from checks import check, end, read, run_command, wait_for  # pylint: disable=wrong-import-position

# what, processes, ranks that live to give a verdict
OPEN_MPI = [('all', 1, 1), ('all', 2, 2), ('all', 7, 7), ('kill', 8, 1)]
OPEN_MPI_FULL = OPEN_MPI + [('all', 4, 4), ('kill', 4, 1)]
# Launchers of others end every rank when one dies, and ranks that outnumber cores spin in the host's own barriers.
OTHERS = [('all', 1, 1), ('all', 2, 2), ('all', 3, 3), ('all', 4, 4)]
STOPPED = [('endure', 2, 2), ('endure', 4, 4), ('endure', 4, 4)]
SECONDS = 120
RANK = '${OMPI_COMM_WORLD_RANK:-$PMI_RANK}'  # for a shell
VERDICT = re.compile(r'^mpi, rank \d+ of \d+: \d+ checks, 0 failed$', re.M)


def is_open_mpi(mpirun):
    said = run_command([mpirun, '--version']).stdout
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


def command(mpirun, processes, program, *flags):
    """program: a path, or words that start it."""
    return [*user_launcher(mpirun), '-np', str(processes), *([program] if isinstance(program, str) else program), *flags]


def rank_one(program, *words):
    """The program, which has more words on rank 1."""
    return ['sh', '-c', f'if [ {RANK} = 1 ]; then exec "$0" "$@" {" ".join(words)}; else exec "$0" "$@"; fi', program]


def own(program, stderr):
    """What the program says, without what MPI does, which names what a machine lacks."""
    return [line for line in stderr.splitlines() if line.startswith(program + ': ')]


def newest(folder):
    """The step of the last checkpoint, or 0."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return max((int(name[11:]) for name in names if re.fullmatch(r'checkpoint-\d+', name)), default=0)


class Job:
    """A command in a group of its own; what it says can be read while it runs."""

    def __init__(self, words, **more):
        self.said = tempfile.TemporaryFile()
        self.process = subprocess.Popen(words, stdout=self.said, stderr=subprocess.STDOUT, start_new_session=True, **more)

    def text(self):
        return os.pread(self.said.fileno(), 1 << 24, 0).decode(errors='replace')

    def runs(self):
        return self.process.poll() is None

    def end(self, seconds=SECONDS):
        """Its status. One that hangs is killed, which is a failure."""
        try:
            return self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            check(False, f'{self.process.args} hangs: {self.text()}')
            return None


def alive(pid):
    try:
        return read(f'/proc/{pid}/stat').rpartition(b')')[2].split()[0] != b'Z'
    except OSError:
        return False


def all_gone(pids):
    """After the launcher's end: a rank that it has killed still takes the kernel a moment, long on a busy machine."""
    return wait_for(lambda: not any(map(alive, pids)), 10)


def stop_one(job, processes):
    """Once all are in their transfers, the last one to say so is stopped past the deadline of 1 s."""
    def running():
        return re.findall(r'^running, process (\d+)$', job.text(), re.M)

    wait_for(lambda: len(running()) == processes or not job.runs(), SECONDS)
    if job.runs():
        time.sleep(0.1)
        os.kill(int(running()[-1]), signal.SIGSTOP)
        time.sleep(2.5)
        os.kill(int(running()[-1]), signal.SIGCONT)


def run_job(words, what, processes, verdicts):
    job = Job(words + ['-np', str(processes), os.path.abspath(sys.argv[2]), what])
    if what == 'endure':
        stop_one(job, processes)
    job.end()
    said = job.text()
    passed = VERDICT.findall(said)
    wrong = re.search(r'\.[ch]:\d+: |checks, [1-9]\d* failed|ERROR: \w+Sanitizer', said)
    print(f'{what}, {processes} processes: {len(passed)} of {verdicts} verdicts')
    check(not wrong and len(passed) == verdicts, said)


def main():
    mpirun, full = sys.argv[1], bool(os.environ.get('UPIPE_FULL'))
    jobs = OTHERS if not is_open_mpi(mpirun) else OPEN_MPI_FULL if full else OPEN_MPI
    for job in jobs + (STOPPED if full else []):
        run_job(launcher(mpirun), *job)
    return end('mpi')


if __name__ == '__main__':
    sys.exit(main())

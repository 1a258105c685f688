#!/usr/bin/env python3
"""run_mpi.py MPIRUN PROGRAM [links] -- runs test_mpi with 1 to 8 processes, and counts the verdicts of its ranks; links: with 4
on two machines that are network namespaces (sides.py), whose link loses packets or is cut, over TCP and with Open MPI

A rank that is killed leaves none; a check that fails prints its file and line, from whichever rank. In the full run there
are more numbers of processes, and one rank is also stopped for longer than the deadline, and continues.
"""

import os
import re
import signal
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'lib'))
from checks import check, end, wait_for  # pylint: disable=wrong-import-position
from launch import SECONDS, Mpi, Run  # pylint: disable=wrong-import-position
from sides import Link, MpiSides  # pylint: disable=wrong-import-position

# what, processes, ranks that live to give a verdict
OPEN_MPI = [('all', 1, 1), ('all', 2, 2), ('all', 7, 7), ('kill', 8, 1)]
OPEN_MPI_FULL = OPEN_MPI + [('all', 4, 4), ('kill', 4, 1)]
# Launchers of others end every rank when one dies, and ranks that outnumber cores spin in the host's own barriers.
OTHERS = [('all', 1, 1), ('all', 2, 2), ('all', 3, 3), ('all', 4, 4)]
STOPPED = [('endure', 2, 2), ('endure', 4, 4), ('endure', 4, 4)]
CUTS = 5
VERDICT = re.compile(r'^mpi, rank \d+ of \d+: (\d+) checks, (\d+) failed$', re.M)


class Transfers(Run):
    """test_mpi, where all ranks say that they are in their transfers, and what they find."""

    def __init__(self, launcher, ranks, program, what):
        super().__init__(launcher, ranks, [program, what])

    def texts(self):
        return [self.out(r) + self.err(r) for r in range(self.ranks)]

    def over(self):
        return all(map(VERDICT.search, self.texts())) or not self.runs()

    def all_run(self):
        wait_for(lambda: sum('running' in text for text in self.texts()) == self.ranks or not self.runs(), SECONDS)

    def judge(self, what, verdicts):
        passed = [found for text in self.texts() for found in VERDICT.findall(text) if found[1] == '0']
        wrong = re.search(r'\.[ch]:\d+: |checks, [1-9]\d* failed|ERROR: \w+Sanitizer', ''.join(self.texts()))
        print(f'{what}, {self.ranks} processes: {len(passed)} of {verdicts} verdicts', flush=True)
        check(not wrong and len(passed) == verdicts, str(self.said()))


def run_job(mpi, program, what, processes, verdicts):
    with Transfers(mpi, processes, program, what) as run:
        if what == 'endure':  # one is stopped past the deadline of 1 s
            run.all_run()
            for pid in list(run.pids().values())[-1:]:
                time.sleep(0.1)
                os.kill(pid, signal.SIGSTOP)
                time.sleep(2.5)
                os.kill(pid, signal.SIGCONT)
        run.end()
        run.judge(what, verdicts)


def run_links(mpi, program):
    with Link() as link:
        link.loss, link.delay = 0.01, 0.001
        run_job(MpiSides(link, mpi), program, 'data', 4, 4)
        print(f'data: {link.passed} frames passed, {link.lost} lost')
        check(link.lost > 0, 'no frame was lost')
        link.loss = 0.0
        for _ in range(CUTS):
            after = link.random.uniform(0, 0.3)
            with Transfers(MpiSides(link, mpi), 4, program, 'endure') as run:
                run.all_run()
                with link.cut(after):
                    wait_for(run.over, SECONDS, 0.02)  # the launcher may not see it
                    run.judge(f'cut after {after:.3f} s', 4)


def main():
    mpi, program, full = Mpi(sys.argv[1], lives=True), os.path.abspath(sys.argv[2]), bool(os.environ.get('UPIPE_FULL'))
    if sys.argv[3:] == ['links']:
        if not mpi.is_open:
            print('skipped: the launcher is not that of Open MPI')
            return 77
        run_links(mpi, program)
        return end('links')
    jobs = OTHERS if not mpi.is_open else OPEN_MPI_FULL if full else OPEN_MPI
    for job in jobs + (STOPPED if full else []):
        run_job(mpi, program, *job)
    return end('mpi')


if __name__ == '__main__':
    sys.exit(main())

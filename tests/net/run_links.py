#!/usr/bin/env python3
"""run_links.py MPIRUN PROGRAM -- test_mpi over TCP between two network namespaces, whose link loses packets or is cut

This process is the link: it reads the frames of both ends from packet sockets, and delays, drops and passes them. Namespaces
need root and a kernel that has them; where they are missing the script says so and exits with 77, which Meson takes as
skipped. Open MPI alone lets survivors live.
"""

import collections
import os
import random
import re
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

from run_mpi import VERDICT, Job, is_open_mpi, launcher
from checks import check, end, read, run_command, wait_for, write

RANKS = 4  # two on each side
CUTS = 5
SECONDS = 120
SOL_PACKET, PACKET_VNET_HDR, PACKET_OUTGOING, ETH_P_ALL = 263, 15, 4, 3
AGENT = '''#!/bin/sh
# in place of ssh: the host's name, then a command for a shell
shift
exec ip netns exec {b} unshare --uts sh -c 'hostname {b}; exec sh -c "$0"' "$*"
'''


def skip(why):
    print(f'skipped: {why}')
    sys.exit(77)


def ip(*words):
    done = run_command(['ip', *words])
    done.check_returncode()
    return done.stdout


class Link(threading.Thread):
    """Two namespaces, a and b, with addresses 10.77.0.1 and 10.77.0.2; each has a veth whose other end is here."""

    def __init__(self):
        super().__init__(daemon=True)
        self.names = [f'upipe{os.getpid()}{side}' for side in 'ab']
        self.loss = self.delay = 0.0
        self.passed = self.lost = 0
        self.up, self.random, self.ends = True, random.Random(1), []

    def open(self):
        for i, name in enumerate(self.names):
            ip('netns', 'add', name)
            ip('link', 'add', name, 'type', 'veth', 'peer', 'name', 'eth0', 'netns', name)
            ip('link', 'set', name, 'up')
            for words in (['addr', 'add', f'10.77.0.{i + 1}/24', 'dev', 'eth0'], ['link', 'set', 'eth0', 'up'],
                          ['link', 'set', 'lo', 'up']):
                ip('-n', name, *words)
            end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
            end.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)  # long segments and open checksums pass as they are
            end.bind((name, 0))
            self.ends.append(end)
        self.start()

    def run(self):
        waiting = collections.deque()  # (when it is due, where to, frame)
        while self.ends:
            now = time.monotonic()
            while waiting and waiting[0][0] <= now:
                _, end, frame = waiting.popleft()
                try:
                    end.send(frame)
                except OSError:
                    self.lost += 1  # no buffer, or the end is gone
            left = waiting[0][0] - now if waiting else 0.1
            for end in select.select(self.ends, [], [], left)[0]:
                try:
                    frame, address = end.recvfrom(1 << 17)
                except OSError:
                    continue
                if address[2] == PACKET_OUTGOING:
                    continue
                if not self.up or self.random.random() < self.loss:
                    self.lost += 1
                    continue
                self.passed += 1
                waiting.append((time.monotonic() + self.delay, self.ends[1 - self.ends.index(end)], frame))

    def pids(self):
        return [int(pid) for name in self.names for pid in ip('netns', 'pids', name).split()]

    def kill(self):
        """Ends what runs on both sides."""
        for pid in self.pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it has just ended

    def close(self):
        self.ends = []
        for name in self.names:  # a namespace ends some time after its last connection
            for what in 'link', 'netns':
                run_command(['ip', what, 'del', name])


def open_link(link):
    """Or the end of the script, where there are no namespaces."""
    if not shutil.which('ip') or not shutil.which('unshare'):
        skip('the programs ip and unshare are missing')
    try:
        link.open()
    except (OSError, subprocess.CalledProcessError) as wrong:
        skip(f'no network namespaces here: {getattr(wrong, "stderr", None) or wrong}'.strip())


def agent_of(link, folder):
    """A program in the folder that starts commands on the second side."""
    agent = os.path.join(folder, 'agent')
    write(agent, AGENT.format(b=link.names[1]))
    os.chmod(agent, 0o755)
    return agent


def hosts(agent):
    """The launcher's words for both sides."""
    return ['--mca', 'btl', 'tcp,self', '--mca', 'btl_tcp_if_include', '10.77.0.0/24', '--mca', 'oob_tcp_if_include',
            '10.77.0.0/24', '--mca', 'plm_rsh_agent', agent, '--host', f'10.77.0.1:{RANKS // 2},10.77.0.2:{RANKS // 2}']


def two_sides(link, mpirun_words, folder, body, *words):
    """Starts a job of RANKS on both sides: a shell that runs this; what a rank says is in the folder, as a cut would keep it
    from the launcher."""
    said = os.path.join(folder, 'said')
    os.makedirs(said)
    return Job(['ip', 'netns', 'exec', link.names[0], *mpirun_words, *hosts(agent_of(link, folder)), '-np', str(RANKS), 'sh', '-c',
                f'exec {body} > {said}/$OMPI_COMM_WORLD_RANK 2>&1', 'sh', *words])


def sayings(folder):
    """By rank."""
    said = os.path.join(folder, 'said')
    return {int(name): read(os.path.join(said, name)).decode(errors='replace') for name in sorted(os.listdir(said))}


def run_job(link, mpirun, program, what, cut_after=None):
    with tempfile.TemporaryDirectory() as folder:
        job = two_sides(link, launcher(mpirun), folder, f'{shlex.quote(program)} {what}')

        def ended():
            said = ''.join(sayings(folder).values())
            if link.up and cut_after is not None and said.count('running') == RANKS:
                time.sleep(cut_after)
                link.up = False
            return len(re.findall(r'checks, \d+ failed$', said, re.M)) == RANKS or not job.runs()

        wait_for(ended, SECONDS, 0.02)
        if cut_after is None and job.runs():
            job.end(30)
        link.kill()
        job.end(30)
        link.up, said = True, ''.join(sayings(folder).values())
    return check(len(VERDICT.findall(said)) == RANKS, f'{what}: {said}\n{job.text()}')


def main():
    mpirun, program = sys.argv[1], os.path.abspath(sys.argv[2])
    link = Link()
    try:
        if not is_open_mpi(mpirun):
            skip('the launcher is not that of Open MPI')
        open_link(link)
        link.loss, link.delay = 0.01, 0.001
        run_job(link, mpirun, program, 'data')
        print(f'data: {link.passed} frames passed, {link.lost} lost')
        check(link.lost > 0, 'no frame was lost')
        link.loss = 0.0
        for _ in range(CUTS):
            after = link.random.uniform(0, 0.3)
            ok = run_job(link, mpirun, program, 'endure', after)
            print(f'cut after {after:.3f} s: {"every rank has returned" if ok else "FAILED"}', flush=True)
    finally:
        link.close()
    return end('links')


if __name__ == '__main__':
    sys.exit(main())

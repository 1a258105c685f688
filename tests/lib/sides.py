"""sides.py -- two network namespaces, which stand for two machines, and launchers that put half of the ranks on each

This process is the link: it reads the frames of both ends from packet sockets, and delays, drops and passes them. Namespaces
need root and a kernel that has them; where they are missing the script says so and exits with 77, which Meson takes as
skipped.
"""

import collections
import contextlib
import os
import random
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time

from checks import run_command, write
from launch import SECRET, Mpi, Tcp

SOL_PACKET, PACKET_VNET_HDR, PACKET_OUTGOING, ETH_P_ALL = 263, 15, 4, 3
HOST = 'hostname "$0"; exec "$@"'  # for a shell with a name of its own
AGENT = '''#!/bin/sh
# in place of ssh: the host's name, then a command for a shell
shift
exec ip netns exec {b} unshare --uts sh -c 'hostname {b}; exec sh -c "$0"' "$*"
'''


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
        self.folder = tempfile.TemporaryDirectory()

    def __enter__(self):
        """Or the end of the script, where there are no namespaces."""
        try:
            if not shutil.which('ip') or not shutil.which('unshare'):
                raise OSError('the programs ip and unshare are missing')
            self.open()
        except (OSError, subprocess.CalledProcessError) as wrong:
            self.__exit__()
            print(f'skipped: no network namespaces here: {getattr(wrong, "stderr", None) or wrong}'.strip())
            sys.exit(77)
        return self

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

    @contextlib.contextmanager
    def cut(self, after):
        """So many seconds from now, until the end of the block."""
        time.sleep(after)
        self.up = False
        try:
            yield
        finally:
            self.up = True

    def __exit__(self, *_):
        self.ends = []
        for name in self.names:  # a namespace ends some time after its last connection
            for what in 'link', 'netns':
                run_command(['ip', what, 'del', name])
        self.folder.cleanup()


class TcpSides(Tcp):
    def __init__(self, link):
        super().__init__(lambda r: {'LOCAL_RANK': r % 2, 'MASTER_ADDR': '10.77.0.1', 'UPIPE_SECRET': SECRET})
        self.link = link

    def commands(self, ranks, words):
        sides = [self.link.names[2 * r // ranks] for r in range(ranks)]
        return [(['ip', 'netns', 'exec', side, 'unshare', '--uts', 'sh', '-c', HOST, side, *command], variables)
                for side, (command, variables) in zip(sides, super().commands(ranks, words))]


class MpiSides(Mpi):
    """With Open MPI, over TCP."""

    def __init__(self, link, mpi):
        super().__init__(mpi.words[0], '--enable-recovery' in mpi.words)
        self.link, self.agent = link, os.path.join(link.folder.name, 'agent')
        write(self.agent, AGENT.format(b=link.names[1]))
        os.chmod(self.agent, 0o755)

    def commands(self, ranks, words):
        net, [(command, variables)] = '10.77.0.0/24', super().commands(ranks, words)
        for name, value in {'btl': 'tcp,self', 'btl_tcp_if_include': net, 'oob_tcp_if_include': net, 'plm_rsh_agent': self.agent}.items():
            command[1:1] = ['--mca', name, value]
        command[1:1] = ['--host', f'10.77.0.1:{ranks // 2},10.77.0.2:{ranks // 2}']
        return [(['ip', 'netns', 'exec', self.link.names[0], *command], variables)]

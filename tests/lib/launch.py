"""launch.py -- programs whose ranks are processes: what starts them, what each says, and with what it ends

    with Run(Tcp(), 4, [TRAIN, '--transport', 'tcp']) as run:
        statuses, said = run.end(), run.err(0)

A launcher is Tcp, Nccl or Mpi here, or has its ranks on two machines (sides.py).
"""

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import tempfile

from checks import check, read, run_command, wait_for
from programs import heed_signals

SECONDS = 120  # for what ends by itself on a busy machine
SECRET = 'a secret of 26 characters'
OF_LAUNCHERS = re.compile(r'RANK$|WORLD_SIZE$|MASTER_|OMPI_|PMI|SLURM_|MPI_|TORCHELASTIC|UPIPE_SECRET')
CLEAN = {key: value for key, value in os.environ.items() if not OF_LAUNCHERS.search(key)}
RANKS = ('OMPI_COMM_WORLD_RANK', 'PMI_RANK', 'RANK')  # a launcher sets one of them
PROGRAM = 'exec "$0" "$@"'  # for a shell


def free_port():
    """At every address, as rank 0 binds it, and none of those from which the system chooses for who asks for any: such a one
    may be somebody's before rank 0 binds it. It may be bound again: a process that another thread starts has this socket
    too, until it runs its program."""
    with open('/proc/sys/net/ipv4/ip_local_port_range', encoding='utf-8') as file:
        first, last = map(int, file.read().split())
    ports = [*range(10240, first), *range(last + 1, 1 << 16)] or range(first, last + 1)
    while True:
        port = random.SystemRandom().choice(ports)
        with socket.socket() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                s.bind(('', port))
                return port
            except OSError:
                continue


def alive(pid):
    try:
        return read(f'/proc/{pid}/stat').rpartition(b')')[2].split()[0] != b'Z'
    except OSError:
        return False


def newest(folder):
    """The step of the last checkpoint, or 0."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return max((int(name[11:]) for name in names if re.fullmatch(r'checkpoint-\d+', name)), default=0)


# ---- launchers: of so many ranks of a program, (words, variables) of each process to start ----


class Tcp:
    """The ranks one by one, with the variables that torchrun gives them. more(rank): others that this one has."""

    name = 'tcp'

    def __init__(self, more=lambda r: {}):
        self.more = more

    def commands(self, ranks, words):
        port = free_port()
        return [(words, {**CLEAN, 'RANK': r, 'LOCAL_RANK': r, 'WORLD_SIZE': ranks, 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': port,
                         **self.more(r)}) for r in range(ranks)]


def is_open_mpi(mpirun):
    said = run_command([mpirun, '--version']).stdout
    return 'Open MPI' in said or 'OpenRTE' in said


class Mpi:
    """lives: where a rank dies the others live on, if the launcher can that; users start it so that they do not."""

    name = 'mpi'

    def __init__(self, mpirun, lives=False, **variables):
        self.is_open, self.words, self.variables = is_open_mpi(mpirun), [mpirun], variables
        if self.is_open:  # ranks may outnumber cores, and then must let each other run
            self.words += ['--oversubscribe', *['--enable-recovery'] * lives, '--bind-to', 'none', '--mca', 'mpi_yield_when_idle', '1',
                           *['--allow-run-as-root'] * (os.geteuid() == 0)]

    def commands(self, ranks, words):
        return [([*self.words, '-np', ranks, *words], {**os.environ, **self.variables})]


# ---- what runs ----


class Job:
    """Commands, each in a session of its own. All that they start is known by a variable, wherever launchers put it."""

    def __init__(self, commands, cwd=None):
        self.kept = tempfile.TemporaryDirectory()
        self.processes = []
        with open(self.kept.name + '/launcher', 'wb') as said:
            for words, variables in commands:
                env = {name: str(value) for name, value in {**variables, 'UPIPE_JOB': self.kept.name}.items()}
                self.processes.append(subprocess.Popen(list(map(str, words)), cwd=cwd, stdout=said, stderr=said, env=env,
                                                       start_new_session=True, preexec_fn=heed_signals))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        """Nothing of it is left."""
        for pid in self.started():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()
        self.kept.cleanup()

    def started(self):
        """{process: its variables}"""
        found = {}
        for pid in map(int, filter(str.isdigit, os.listdir('/proc'))):
            with contextlib.suppress(OSError):
                variables = dict(one.partition('=')[::2] for one in read(f'/proc/{pid}/environ').decode(errors='replace').split('\0'))
                if variables.get('UPIPE_JOB') == self.kept.name and alive(pid):
                    found[pid] = variables
        return found

    def pids(self, program):
        """{rank: process} of those that run this program."""
        found = {}
        for pid, variables in self.started().items():
            with contextlib.suppress(OSError):
                if read(f'/proc/{pid}/cmdline').split(b'\0')[0] == os.fsencode(program):
                    found[next(int(variables[name]) for name in RANKS if name in variables)] = pid
        return found

    def text(self, name='launcher'):
        path = os.path.join(self.kept.name, name)
        return read(path).decode(errors='replace') if os.path.exists(path) else ''

    def said(self):
        """All of it, for a message."""
        return {name: self.text(name) for name in sorted(os.listdir(self.kept.name))}

    def runs(self):
        """None has ended."""
        return all(process.poll() is None for process in self.processes)

    def end(self, seconds=SECONDS):
        """The statuses. What hangs is killed, which is a failure."""
        if not wait_for(lambda: all(process.poll() is not None for process in self.processes), seconds):
            check(False, f'{self.processes[0].args} hangs: {self.said()}')
            for process in self.processes:
                process.kill()
        return [process.wait() for process in self.processes]


class Run(Job):
    """The ranks of a program. shell: what a shell does in its place; it has the program and its flags as PROGRAM does, and
    its rank as $RANK."""

    def __init__(self, launcher, ranks, words, shell=PROGRAM, cwd=None):
        self.ranks, self.words = ranks, list(map(str, words))
        self.name = os.path.basename(self.words[0]).removesuffix('_mpi')
        rank = '${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-$RANK}}'
        own = f'RANK={rank}; cd "$UPIPE_JOB"; exec >$RANK.out 2>$RANK.err; cd "$OLDPWD"; '
        super().__init__(launcher.commands(ranks, ['sh', '-c', own + shell, *self.words]), cwd)

    def pids(self, program=None):
        return super().pids(program or self.words[0])

    def out(self, r=0):
        return self.text(f'{r}.out')

    def err(self, r=0):
        return self.text(f'{r}.err')

    def own(self):
        """Of each rank the program's own sentences, without what MPI says, which names what a machine lacks."""
        return [[line for line in self.err(r).splitlines() if line.startswith(self.name + ': ')] for r in range(self.ranks)]


def run_ranks(launcher, ranks, words, seconds=SECONDS, **more):
    """The run that has ended, and its statuses."""
    with Run(launcher, ranks, words, **more) as run:
        statuses = run.end(seconds)
        return statuses, [run.out(r) for r in range(ranks)], [run.err(r) for r in range(ranks)], run.own()


def run_fake(words, hosts, own=None, cwd=None, **variables):
    """[(status, stdout, stderr)] of the ranks of a program over the fake's NCCL, a letter of hosts for each: those of one machine
    have the same one. own: {rank: more variables}. What a process leaves on its devices is status 3."""
    with tempfile.TemporaryDirectory() as folder:
        def here(r):
            return {'LOCAL_RANK': hosts[:r].count(hosts[r]), 'FAKE_HOST': hosts[r], 'FAKE_CLEAN': 1, 'MASTER_ADDR': folder + '/meet',
                    **variables, **(own or {}).get(r, {})}

        return list(zip(*run_ranks(Tcp(here), len(hosts), words, 5 * SECONDS, cwd=cwd)[:3]))

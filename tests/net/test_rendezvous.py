#!/usr/bin/env python3
"""test_rendezvous.py PROGRAM -- what 08_processes makes of its launcher's variables, and of ranks that stay away

PROGRAM is 08_processes, built WITH_MPI or WITH_NCCL: the variables are read before anything else starts. The
meeting itself is run by a program of this test, compiled with $CC from examples/common/rendezvous.h.
"""

import concurrent.futures
import os
import random
import re
import shlex
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'lib'))
from checks import check, end  # pylint: disable=wrong-import-position

PROGRAM = os.path.abspath(sys.argv[1])
TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
LAUNCHERS = re.compile(r'RANK$|WORLD_SIZE$|MASTER_|OMPI_|PMI|SLURM_|MPI_|TORCHELASTIC')
CLEAN = {key: value for key, value in os.environ.items() if not LAUNCHERS.search(key)}

MEETING = r'''
#define PROGRAM "meeting"
#define _POSIX_C_SOURCE 200809L
#include "common/rendezvous.h"

int main(int argc, char **argv)
{
    char data[5000];
    launch l;
    int status = launch_read(&l), i, step = argc > 2 ? atoi(argv[2]) : 7; /* of the run */
    if (status != 0) return status - 1;
    for (i = 0; i < 5000; ++i) data[i] = (char)(l.rank == 0 ? i * step : 0);
    if (rendezvous(&l, data, sizeof data, argc > 1 ? atof(argv[1]) : 10) != 0) return EXIT_RUN;
    for (i = 0; i < 5000; ++i)
        if (data[i] != (char)(i * step)) return cli_fail("byte %d is wrong", i), EXIT_RUN;
    printf("%d of %d, device %d\n", l.rank, l.ranks, l.local);
    return 0;
}
'''


def free_ports(n):
    """At every address, as rank 0 binds them. All at once, before there are threads: a process that another thread starts
    has a port that is being tried until it runs its program."""
    sockets = [socket.socket() for _ in range(n)]
    for s in sockets:
        s.bind(('', 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


PORTS = free_ports(32)


def free_port():
    return PORTS.pop()


def start(command, **variables):
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env={**CLEAN, **{key: str(value) for key, value in variables.items()}})


def finish(process, seconds=30):
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err


def expect(status, words, command, **variables):
    got, out, err = finish(start(command, **variables))
    check(got == status and words in out + err, f'{variables} gives {got}: {out}{err}')


def test_variables():
    expect(2, 'RANK is not set', [PROGRAM], WORLD_SIZE=2)
    expect(2, "RANK is 'x'", [PROGRAM], RANK='x')
    expect(2, "RANK is '2'", [PROGRAM], RANK=2, WORLD_SIZE=2)
    expect(2, "RANK is '-1'", [PROGRAM], RANK=-1, WORLD_SIZE=2)
    expect(2, "WORLD_SIZE is '0'", [PROGRAM], WORLD_SIZE=0)
    expect(2, "MASTER_PORT is '99999'", [PROGRAM], MASTER_PORT=99999)
    expect(2, 'set MASTER_ADDR', [PROGRAM], RANK=0, WORLD_SIZE=4, LOCAL_WORLD_SIZE=2)
    for several in ({'SLURM_STEP_NUM_NODES': 2, 'SLURM_NNODES': 3}, {'SLURM_NNODES': 2}, {'SLURM_JOB_NUM_NODES': 2},
                    {'SLURM_STEP_NUM_NODES': 2, 'SLURM_NTASKS_PER_NODE': 4}):
        expect(2, 'the 4 processes are on 2 machines: set MASTER_ADDR', [PROGRAM], SLURM_PROCID=1, SLURM_NTASKS=4,
               SLURM_LOCALID=1, **several)
    expect(2, "SLURM_STEP_NUM_NODES is '2(x'", [PROGRAM], SLURM_PROCID=1, SLURM_NTASKS=4, SLURM_STEP_NUM_NODES='2(x')
    expect(2, 'wants seconds', [PROGRAM, '--deadline', '0'])
    expect(2, 'no flag', [PROGRAM, '--nonsense'])
    expect(0, 'usage:', [PROGRAM, '--help'])
    expect(0, 'upipe', [PROGRAM, '--version'])
    got, out, err = finish(start([PROGRAM, '--help'], RANK=1, WORLD_SIZE=2))
    check(got == 0 and out == '' and err == '', f'rank 1 says {out}{err} for --help')


def test_machines(meeting):
    """Several machines in Slurm's job, and all processes on one; or rank 0's is known."""
    for more in ({'SLURM_STEP_NUM_NODES': 1}, {'OMPI_COMM_WORLD_LOCAL_SIZE': 2}, {'LOCAL_WORLD_SIZE': 2},
                 {'MPI_LOCALNRANKS': 2}, {'SLURM_STEP_NUM_NODES': 2, 'MASTER_ADDR': 'localhost'}):
        both = {'SLURM_NTASKS': 2, 'SLURM_NNODES': 2, 'MASTER_PORT': free_port(), **more}
        running = [start([meeting, '5'], SLURM_PROCID=r, SLURM_LOCALID=r, **both) for r in (0, 1)]
        for r, process in enumerate(running):
            got = finish(process)
            check(got == (0, f'{r} of 2, device {r}\n', ''), f'{more}, rank {r}: {got}')
    expect(0, '0 of 1', [meeting], SLURM_PROCID=0, SLURM_NTASKS=1, SLURM_NNODES=2)


def meet(meeting, path, order, ranks=3, step=7, seconds=10):
    return [(r, start([meeting, str(seconds), str(step)], RANK=r, WORLD_SIZE=ranks, MASTER_ADDR=path)) for r in order]


def met(running, what, want=0):
    for r, process in running:
        got, out, err = finish(process)
        check(got == want, f'{what}: rank {r} ends with {got}: {out}{err}')


def test_file(meeting):
    """Through files; what an earlier run has left, at whatever moment it ended, is neither taken nor counted."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, 'meet')
        for order in ((0, 1, 2), (2, 1, 0)):
            met(meet(meeting, path, order), f'in the order {order}')
            check(not os.listdir(folder), f'{os.listdir(folder)} is left')
        began = time.monotonic()
        early = meet(meeting, path, (0, 1), seconds=1)  # rank 1 takes the data, rank 2 does not come
        got, _, err = finish(early[0][1])
        check(got == 1 and f'2 of 3 ranks have come to {path} within 1 s' in err, f'rank 0 without rank 2: {got}: {err}')
        check(finish(early[1][1])[0] == 0, 'rank 1 does not meet rank 0')
        check({'meet', 'meet.1'} == set(os.listdir(folder)), f'the run that failed leaves {os.listdir(folder)}')
        lone = meet(meeting, path, (2,), seconds=0.5)[0][1]
        got, _, err = finish(lone)
        check(got == 1 and f'rank 2 has not met rank 0 at {path} within 0.5 s' in err, f'rank 2 takes old data: {got}: {err}')
        check(time.monotonic() - began < 8, 'the deadline is not kept')
        for first in (0, 1, 2):  # the others find what is left, and then what this one makes of it
            running = meet(meeting, path, (first,), step=first + 11)
            time.sleep(0.2)
            running += meet(meeting, path, [r for r in (0, 1, 2) if r != first], step=first + 11)
            met(running, f'rank {first} first, after a run that failed')
            check(not os.listdir(folder), f'{os.listdir(folder)} is left')
            met(meet(meeting, path, (0, 1), seconds=0.3)[:1], 'rank 0 without rank 2', 1)


def test_file_killed(meeting):
    """Runs that end at random instants; the next one meets with its own data."""
    draw = random.Random(1)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, 'meet')
        for step in range(2, 8):
            broken = meet(meeting, path, draw.sample(range(3), 3), step=100 + step)
            time.sleep(draw.random() * 0.15)
            for _, process in broken:
                process.kill()
                process.communicate()
            met(meet(meeting, path, draw.sample(range(3), 3), step=step), f'after {sorted(os.listdir(folder))}')
        with open(path, 'wb') as file:
            file.write(b'upipe-ff')
        for size in (0, 39, 41):
            with open(path + '.1', 'wb') as file:
                file.write(bytes(size))
            met(meet(meeting, path, (0, 1, 2)), f'among {size} bytes that are no file of ours')
    for where, words in ((os.path.join(folder, 'none'), 'No such file'), ('/' + 'x' * 5000, 'it is too long')):
        for r in (0, 1):
            expect(1, words, [meeting, '1'], RANK=r, WORLD_SIZE=2, MASTER_ADDR=where)


def test_meeting(meeting):
    names = {'torchrun': ('RANK', 'WORLD_SIZE', 'LOCAL_RANK'),
             'mpirun': ('OMPI_COMM_WORLD_RANK', 'OMPI_COMM_WORLD_SIZE', 'OMPI_COMM_WORLD_LOCAL_RANK'),
             'srun': ('SLURM_PROCID', 'SLURM_NTASKS', 'SLURM_LOCALID')}
    for rank, ranks, local in names.values():
        port, running = free_port(), []
        for r in (3, 1, 0, 2):  # some are there before rank 0
            running.append((r, start([meeting], **{rank: r, ranks: 4, local: r % 2, 'MASTER_PORT': port})))
            time.sleep(0.05)
        for r, process in running:
            got = finish(process)
            check(got == (0, f'{r} of 4, device {r % 2}\n', ''), f'rank {r}: {got}')


def test_strangers(meeting):
    port = free_port()
    first = start([meeting], RANK=0, WORLD_SIZE=2, MASTER_PORT=port)
    for noise in (b'', b'GET / HTTP/1.0\r\n\r\n' + b'x' * 100):
        for _ in range(100):
            try:
                with socket.create_connection(('127.0.0.1', port)) as s:
                    s.sendall(noise)
                break
            except ConnectionRefusedError:
                time.sleep(0.02)
    second = start([meeting], RANK=1, WORLD_SIZE=2, MASTER_PORT=port)
    check(finish(second)[0] == 0, 'rank 1 does not get through to rank 0 behind strangers')
    check(finish(first)[0] == 0, 'rank 0 does not survive strangers')


def hello(rank, ranks):
    return struct.pack('=8siiQ', b'upipe-08', rank, ranks, 5000)


def test_strange_clients(meeting):
    """Connections that stay open: one says nothing, one half of it, one more than it should, one reads no answer."""
    port = free_port()
    first = start([meeting], RANK=0, WORLD_SIZE=3, MASTER_PORT=port)
    open_ones = []
    for said in (b'', hello(1, 3)[:11], hello(1, 3) + bytes(100000), hello(-1, 3), hello(0, 3), b'x' * 10_000_000):
        for _ in range(100):
            try:
                s = socket.create_connection(('127.0.0.1', port))
                break
            except ConnectionRefusedError:
                time.sleep(0.02)
        open_ones.append(s)
        try:
            s.settimeout(5)
            s.sendall(said)
        except OSError:
            pass  # closed before it has said it all
    second = start([meeting], RANK=2, WORLD_SIZE=3, MASTER_PORT=port)
    check(finish(second)[0] == 0, 'rank 2 does not get through to rank 0 behind strangers')
    check(finish(first)[0] == 0, 'rank 0 does not survive strangers')
    for s in open_ones:
        s.close()


def test_no_descriptors(meeting):
    """Rank 0 has none left for a connection: it ends by its deadline, says why, and does not spin until then."""
    port, began = free_port(), time.monotonic()
    used = os.times()
    first = start(['sh', '-c', f'ulimit -n 4; exec {meeting} 1.5'], RANK=0, WORLD_SIZE=2, MASTER_PORT=port)
    second = start([meeting, '1.5'], RANK=1, WORLD_SIZE=2, MASTER_PORT=port)
    try:
        got, _, err = finish(first, 10)
    except subprocess.TimeoutExpired:
        first.kill()
        got, _, err = finish(first)
    check(got == 1 and '1 of 2 ranks have come' in err and 'Too many open files' in err, f'without descriptors: {got}: {err}')
    check(finish(second)[0] == 1, 'rank 1 ends well without rank 0')
    check(time.monotonic() - began < 8, 'the deadline is not kept')
    now = os.times()
    check(now.children_user + now.children_system - used.children_user - used.children_system < 0.7, 'a wait that spins')


def test_absent(meeting):
    began = time.monotonic()
    port = free_port()
    expect(1, '2 of 3 ranks have come', ['sh', '-c', f'{meeting} 1 & RANK=1 {meeting} 1; wait $!'], RANK=0, WORLD_SIZE=3,
           MASTER_PORT=port)
    expect(1, 'has not met rank 0', [meeting, '0.3'], RANK=1, WORLD_SIZE=2, MASTER_PORT=free_port())
    expect(1, 'rank 1 of 3 comes to a rank 0 of 2',
           ['sh', '-c', f'{meeting} 1 & RANK=1 WORLD_SIZE=3 {meeting} 0.5 2>/dev/null; wait $!'], RANK=0, WORLD_SIZE=2,
           MASTER_PORT=free_port())
    with socket.socket() as taken:
        taken.bind(('', 0))
        taken.listen()
        expect(1, 'cannot listen', [meeting, '1'], RANK=0, WORLD_SIZE=2, MASTER_PORT=taken.getsockname()[1])
    check(time.monotonic() - began < 15, 'deadlines are not kept')


def main():
    test_variables()
    compiler = shlex.split(os.environ.get('CC', 'cc'))
    if shutil.which(compiler[0]):
        with tempfile.TemporaryDirectory() as folder:
            source, meeting = os.path.join(folder, 'meeting.c'), os.path.join(folder, 'meeting')
            with open(source, 'w', encoding='utf-8') as out:
                out.write(MEETING)
            subprocess.run([*compiler, '-std=c11', '-I', TOP, '-I', os.path.join(TOP, 'examples'), source, '-o', meeting,
                            '-lm'], check=True)
            tests = [test_machines, test_meeting, test_file, test_file_killed, test_strangers, test_strange_clients, test_no_descriptors, test_absent]
            with concurrent.futures.ThreadPoolExecutor(len(tests)) as pool:  # they wait, most of the time
                list(pool.map(lambda test: test(meeting), tests))
    return end('rendezvous')


if __name__ == '__main__':
    sys.exit(main())

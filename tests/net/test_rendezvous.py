#!/usr/bin/env python3
"""test_rendezvous.py TOP -- what a program makes of its launcher's variables, and of ranks that stay away

The program is this test's own, compiled with $CC from examples/common/rendezvous.h, with OpenSSL's libcrypto where
pkg-config finds it and without. Strangers follow the protocol that rendezvous.h describes.
"""

import concurrent.futures
import contextlib
import hmac
import itertools
import os
import random
import shlex
import shutil
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'lib'))
from checks import check, end, run_test, wait_for, write  # pylint: disable=wrong-import-position
from launch import CLEAN, SECRET, free_port  # pylint: disable=wrong-import-position

TOP = os.path.abspath(sys.argv[1])

SOURCE = r'''
#define PROGRAM "meeting"
#define _POSIX_C_SOURCE 200809L
#include "common/rendezvous.h"

/* Of connections without a hello the oldest goes, wherever it stands; one that has brought its hello never. */
static int evictions(void)
{
    static const double until[] = {5, 1, 3, 2, 4};
    struct pollfd polls[1 + 5];
    rendezvous_conn conns[5];
    rendezvous_server s;
    int i, k;
    memset(&s, 0, sizeof s);
    memset(conns, 0, sizeof conns);
    s.polls = polls;
    s.conns = conns;
    for (; s.n < 5; ++s.n) {
        polls[1 + s.n].fd = -1;
        conns[s.n].until = until[s.n];
        conns[s.n].next = until[s.n] < 2 ? RENDEZVOUS_READ_ACK : RENDEZVOUS_READ_HELLO;
    }
    for (k = 2; k <= 5; ++k) {
        if (!rendezvous_evict(&s) || s.n != 6 - k) return cli_fail("%d connections are left", s.n), EXIT_RUN;
        for (i = 0; i < s.n; ++i)
            if (conns[i].until == k) return cli_fail("connection %d is left", k), EXIT_RUN;
    }
    return rendezvous_evict(&s) ? EXIT_RUN : 0;
}

int main(int argc, char **argv)
{
    char data[5000];
    launch l;
    int status = launch_read(&l), i, step = argc > 2 ? atoi(argv[2]) : 7; /* of the run */
    if (status != 0) return status - 1;
    if (argc > 1 && strcmp(argv[1], "evictions") == 0) return evictions();
    if (argc > 3) l.first = 4, l.step = 2; /* of some ranks */
    for (i = 0; i < 5000; ++i) data[i] = (char)(l.rank == 0 ? i * step : 0);
    if (rendezvous(&l, data, sizeof data, argc > 1 ? atof(argv[1]) : 10) != 0) return EXIT_RUN;
    for (i = 0; i < 5000; ++i)
        if (data[i] != (char)(i * step)) return cli_fail("byte %d is wrong", i), EXIT_RUN;
    printf("%d of %d, device %d\n", l.rank, l.ranks, l.local);
    return 0;
}
'''


def start(command, **variables):
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env={**CLEAN, **{key: str(value) for key, value in variables.items()}})


def rank(r, ranks, *words, program=None, **variables):
    """Starts rank r; words: its deadline in seconds, and its step."""
    return start([program or MEETING, *map(str, words)], RANK=r, WORLD_SIZE=ranks, **variables)


def finish(process, seconds=30):
    """Status, stdout and stderr; one that hangs is killed, and its status is that of the signal."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
    return process.returncode, out, err


def ends(process, status, what, *words, seconds=30):
    """With this status, and says all of these words; what is on stderr."""
    got, out, err = finish(process, seconds)
    check(got == status and all(word in out + err for word in words), f'{what}: status {got}, not {status}, {words}: {out}{err}')
    return err


def met(running, what, device=lambda r: r):
    """All ranks, (number, process), end well and say so, and nothing else."""
    for r, process in running:
        got = finish(process)
        check(got == (0, f'{r} of {len(running)}, device {device(r)}\n', ''), f'{what}, rank {r}: {got}')


def expect(status, words, *command, **variables):
    ends(start([MEETING, *command], **variables), status, str(variables), words)


def test_variables():
    for words, variables in (
            ('RANK is not set', {'WORLD_SIZE': 2}), ("RANK is 'x'", {'RANK': 'x'}), ("RANK is '2'", {'RANK': 2, 'WORLD_SIZE': 2}),
            ("RANK is '-1'", {'RANK': -1, 'WORLD_SIZE': 2}), ("WORLD_SIZE is '0'", {'WORLD_SIZE': 0}),
            ("MASTER_PORT is '99999'", {'MASTER_PORT': 99999}),
            ('set MASTER_ADDR', {'RANK': 0, 'WORLD_SIZE': 4, 'LOCAL_WORLD_SIZE': 2})):
        expect(2, words, **variables)
    slurm = {'SLURM_PROCID': 1, 'SLURM_NTASKS': 4}
    for several in ({'SLURM_STEP_NUM_NODES': 2, 'SLURM_NNODES': 3}, {'SLURM_NNODES': 2}, {'SLURM_JOB_NUM_NODES': 2},
                    {'SLURM_STEP_NUM_NODES': 2, 'SLURM_NTASKS_PER_NODE': 4}):
        expect(2, 'the 4 processes are on 2 machines: set MASTER_ADDR', **slurm, SLURM_LOCALID=1, **several)
    expect(2, "SLURM_STEP_NUM_NODES is '2(x'", **slurm, SLURM_STEP_NUM_NODES='2(x')


def test_machines():
    """Several machines in Slurm's job, and all processes on one; or rank 0's is known."""
    for more in ({'SLURM_STEP_NUM_NODES': 1}, {'OMPI_COMM_WORLD_LOCAL_SIZE': 2}, {'LOCAL_WORLD_SIZE': 2},
                 {'MPI_LOCALNRANKS': 2}, {'SLURM_STEP_NUM_NODES': 2, 'MASTER_ADDR': 'localhost'}):
        both = {'SLURM_NTASKS': 2, 'SLURM_NNODES': 2, 'MASTER_PORT': free_port(), **more}
        met([(r, start([MEETING, '5'], SLURM_PROCID=r, SLURM_LOCALID=r, **both)) for r in (0, 1)], more)
    expect(0, '0 of 1', SLURM_PROCID=0, SLURM_NTASKS=1, SLURM_NNODES=2)


def meet(path, order, ranks=3, step=7, seconds=10):
    return [(r, rank(r, ranks, seconds, step, MASTER_ADDR=path)) for r in order]


def test_file():
    """Through files; what an earlier run has left, at whatever moment it ended, is neither taken nor counted."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, 'meet')
        for order in ((0, 1, 2), (2, 1, 0)):
            met(meet(path, order), f'in the order {order}')
            check(not os.listdir(folder), f'{os.listdir(folder)} is left')
        began = time.monotonic()
        (_, zero), (_, one) = meet(path, (0, 1), seconds=1)  # rank 1 takes the data, rank 2 does not come
        ends(zero, 1, 'rank 0 without rank 2', f'2 of 3 ranks have come to {path} within 1 s; missing: rank 2')
        ends(one, 0, 'rank 1 does not meet rank 0')
        check({'meet', 'meet.1'} == set(os.listdir(folder)), f'the run that failed leaves {os.listdir(folder)}')
        lone = meet(path, (2,), seconds=0.5)[0][1]
        ends(lone, 1, 'rank 2 takes old data', f'rank 2 has not met rank 0 at {path} within 0.5 s')
        check(time.monotonic() - began < 8, 'the deadline is not kept')
        for first in (0, 1, 2):  # the others find what is left, and then what this one makes of it
            running = meet(path, (first,), step=first + 11)
            time.sleep(0.2)
            running += meet(path, [r for r in (0, 1, 2) if r != first], step=first + 11)
            met(running, f'rank {first} first, after a run that failed')
            check(not os.listdir(folder), f'{os.listdir(folder)} is left')
            ends(meet(path, (0, 1), seconds=0.3)[0][1], 1, 'rank 0 without rank 2')


def test_file_killed():
    """Runs that end at random instants; the next one meets with its own data."""
    draw = random.Random(1)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, 'meet')
        for step in range(2, 8):
            broken = meet(path, draw.sample(range(3), 3), step=100 + step)
            time.sleep(draw.random() * 0.15)
            for _, process in broken:
                process.kill()
                process.communicate()
            met(meet(path, draw.sample(range(3), 3), step=step), f'after {sorted(os.listdir(folder))}')
        write(path, b'upipe-ff')
        for size in (0, 39, 41):
            write(path + '.1', bytes(size))
            met(meet(path, (0, 1, 2)), f'among {size} bytes that are no file of ours')
    for where, words in ((os.path.join(folder, 'none'), 'No such file'), ('/' + 'x' * 5000, 'it is too long')):
        for r in (0, 1):
            expect(1, words, '1', RANK=r, WORLD_SIZE=2, MASTER_ADDR=where)


def test_file_pipes():
    """What is no file is not waited for, and not replaced."""
    with tempfile.TemporaryDirectory() as folder:
        path, began = os.path.join(folder, 'meet'), time.monotonic()
        os.mkfifo(path)
        for r in (0, 1):
            ends(rank(r, 2, 1, MASTER_ADDR=path), 1, f'rank {r} at a pipe', 'no regular file', seconds=5)
        check(stat.S_ISFIFO(os.stat(path).st_mode), 'the pipe is gone')
        os.unlink(path)
        os.mkfifo(path + '.1')
        for r, words in ((0, '1 of 2 ranks have come'), (1, 'no regular file')):
            ends(rank(r, 2, 0.5, MASTER_ADDR=path), 1, f'rank {r}, where rank 1 has a pipe', words, seconds=5)
        os.unlink(path + '.1')
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        guest = rank(1, 2, 1, MASTER_ADDR=path)
        wait_for(lambda: os.path.exists(path + '.1') or guest.poll() is not None)
        os.mkfifo(path)
        ends(guest, 1, 'a pipe in place of rank 0', 'rank 1 has not met rank 0', seconds=5)
        check(time.monotonic() - began < 10, 'the deadline is not kept')


def test_meeting():
    for own, ranks, local in (('RANK', 'WORLD_SIZE', 'LOCAL_RANK'),  # torchrun, mpirun, srun
                              ('OMPI_COMM_WORLD_RANK', 'OMPI_COMM_WORLD_SIZE', 'OMPI_COMM_WORLD_LOCAL_RANK'),
                              ('SLURM_PROCID', 'SLURM_NTASKS', 'SLURM_LOCALID')):
        port, running = free_port(), []
        for r in (3, 1, 0, 2):  # some are there before rank 0
            running.append((r, start([MEETING], **{own: r, ranks: 4, local: r % 2, 'MASTER_PORT': port})))
            time.sleep(0.05)
        met(running, own, lambda r: r % 2)


# ---- strangers: what rendezvous.h says of the protocol, again ----

WORD = '=8siiQ16s'


def word(mark, rank, ranks, size=5000):
    return struct.pack(WORD, mark, rank, ranks, size, os.urandom(16))


def prove(secret, *parts):
    return hmac.new(secret.encode(), b''.join(parts), 'sha256').digest() if secret else bytes(32)


def hello(rank, ranks, host=b'', secret='', size=5000):
    own = word(b'upipe-c1', rank, ranks, size)
    return own + prove(secret, own, host)


def receive(s, size):
    """As many bytes, or what comes before the connection ends."""
    got = b''
    with contextlib.suppress(OSError):
        while len(got) < size:
            piece = s.recv(size - len(got))
            if not piece:
                break
            got += piece
    return got


def connect(port, address='127.0.0.1'):
    """To rank 0, once it listens; what it says first."""
    for _ in range(500):
        with contextlib.suppress(ConnectionRefusedError):
            s = socket.create_connection((address, port))
            s.settimeout(8)
            return s, receive(s, struct.calcsize(WORD))
        time.sleep(0.02)
    raise OSError('rank 0 does not listen')


def send(s, said):
    with contextlib.suppress(OSError):  # closed before all is said
        s.sendall(said)


def client(port, said):
    """A client that says this, bytes or a function of what rank 0 says first."""
    s, host = connect(port)
    send(s, said(host) if callable(said) else said)
    return s


def test_names():
    """Some of the ranks meet: sentences have their numbers among all."""
    port = free_port()
    ends(rank(2, 3, 0.3, 7, 'some', MASTER_PORT=port), 1, 'a rank 2 of some', f'rank 8 has not met rank 4 at 127.0.0.1 port {port}')
    expect(1, 'rank 4 cannot listen at 192.0.2.1', '1', '7', 'some', RANK=0, WORLD_SIZE=2, MASTER_ADDR='192.0.2.1', MASTER_PORT=port)


def test_strangers():
    """They come and go before rank 1: nothing, what is no hello, and a hello of other programs and versions."""
    port, draw = free_port(), random.Random(3)
    first = rank(0, 2, MASTER_PORT=port)
    noise = [b'', b'GET / HTTP/1.0\r\n\r\n' + b'x' * 100, struct.pack('=8siiQ', b'upipe-08', 1, 2, 5000)]
    noise += [draw.choice((b'', b'upipe-c1')) + draw.randbytes(draw.randrange(200)) for _ in range(60)]
    for said in noise:
        client(port, said).close()
    ends(rank(1, 2, MASTER_PORT=port), 0, 'rank 1 behind strangers', '1 of 2, device 1')
    ends(first, 0, 'rank 0 behind strangers', '0 of 2, device 0', 'wrong hellos: ')


def test_strange_clients():
    """Connections that stay open: they say nothing, half of a hello, more than they should, or read no answer."""
    port = free_port()
    first = rank(0, 3, MASTER_PORT=port)
    with contextlib.ExitStack() as open_ones:
        for said in (b'', hello(1, 3)[:11], hello(1, 3) + bytes(100000), hello(1, 3), hello(-1, 3), hello(0, 3),
                     b'x' * 10_000_000):
            open_ones.enter_context(client(port, said))
        for s in [connect(port)[0] for _ in range(100)]:
            open_ones.enter_context(s)
        for r, process in [(r, rank(r, 3, MASTER_PORT=port)) for r in (2, 1)]:
            ends(process, 0, f'rank {r} among strangers', f'{r} of 3, device {r}')
        ends(first, 0, 'rank 0 among strangers', '0 of 3, device 0', 'wrong hellos: 2, ')


def test_short_limit():
    """Who says nothing is dismissed long before the deadline."""
    port, began = free_port(), time.monotonic()
    first = rank(0, 2, MASTER_PORT=port)
    s, said = connect(port)
    check(said[:8] == b'upipe-s1' and receive(s, 1) == b'', 'rank 0 does not dismiss a silent client')
    check(time.monotonic() - began < 7, f'that takes {time.monotonic() - began:.1f} s')
    s.close()
    first.kill()
    finish(first)


def test_evictions():
    expect(0, '', 'evictions')


def test_wrong_hellos():
    """Of other runs, without a secret: they end none, and are counted and named if rank 1 does not come, and if it does."""
    for comes in (False, True):
        port = free_port()
        first = rank(0, 2, 10 if comes else 2.5, MASTER_PORT=port)
        for said in (hello(5, 7), hello(0, 2), hello(1, 2, secret='a secret that is not wanted'), hello(1, 3)):
            with client(port, said) as s:
                check(receive(s, 10000) in (b'', bytes(32)), 'a wrong hello brings data')
        if comes:
            ends(rank(1, 2, MASTER_PORT=port), 0, 'rank 1 does not meet rank 0')
        err = ends(first, 0 if comes else 1, 'wrong hellos', f'{1 + comes} of 2 ranks have come to 127.0.0.1 port {port}',
                   'wrong hellos: 4, the last from 127.0.0.1: rank 1 of 3 comes to a rank 0 of 2')
        check(err.count('\n') == 1, f'wrong hellos: {err}')
    port = free_port()
    zero, one = (rank(r, 3, 2, MASTER_PORT=port) for r in (0, 1))
    ends(one, 0, 'rank 1 does not meet rank 0')
    ends(rank(1, 3, 0.5, MASTER_PORT=port), 1, 'a second rank 1', 'rank 0 does not answer this rank')
    ends(zero, 1, 'twice', '2 of 3 ranks', 'rank 1 of 3 comes to a rank 0 of 3 a second time')


# ---- where rank 0 listens ----


def refuses(address, port):
    with socket.socket() as s:
        return s.connect_ex((address, port)) != 0


def test_address():
    """At the address that it was given, and at no other; on Linux all of 127/8 is this machine's."""
    for address in (None, 'localhost', '127.0.0.3'):
        where = {'MASTER_PORT': free_port(), **({} if address is None else {'MASTER_ADDR': address})}
        first = rank(0, 2, **where)
        listens = '127.0.0.3' if address == '127.0.0.3' else '::1' if address and has_ipv6_localhost() else '127.0.0.1'
        connect(where['MASTER_PORT'], listens)[0].close()
        check(refuses('127.0.0.2', where['MASTER_PORT']), f'rank 0 at {address} listens at 127.0.0.2 too')
        ends(rank(1, 2, **where), 0, f'no meeting at {address}')
        check(ends(first, 0, f'at {address}') == '', f'rank 0 at {address} says something')
    expect(1, 'cannot listen at 192.0.2.1', RANK=0, WORLD_SIZE=2, MASTER_ADDR='192.0.2.1', MASTER_PORT=free_port())
    began = time.monotonic()
    for r in (0, 1):  # a label has 63 letters at most, so no server is asked
        expect(1, 'is no address', '20', RANK=r, WORLD_SIZE=2, MASTER_ADDR='x' * 64)
    check(time.monotonic() - began < 10, 'a name that does not resolve waits for the deadline')


def has_ipv6_localhost():
    return socket.getaddrinfo('localhost', 1, type=socket.SOCK_STREAM)[0][4][0] == '::1'


def test_open():
    """At every address: rank 0 says once that there is no secret."""
    for program, secret in ((MEETING, {}), (PLAIN, {}), *([(MEETING, {'UPIPE_SECRET': SECRET})] if MEETING != PLAIN else [])):
        port = free_port()
        where = {'MASTER_PORT': port, **secret}
        first = rank(0, 3, program=program, MASTER_ADDR='0.0.0.0', **where)
        for r, process in [(r, rank(r, 3, **where)) for r in (1, 2)]:
            check(ends(process, 0, f'rank {r}, to a rank 0 at every address') == '', f'rank {r} says something')
        said = '' if secret else f'listens at 0.0.0.0 port {port} without a secret'
        err = ends(first, 0, 'rank 0 at every address', said)
        check(err.count('\n') == (said != ''), f'rank 0: {err}')


# ---- secrets ----


def test_secrets():
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, 'secret')
        os.close(os.open(path, os.O_CREAT, 0o600))
        write(path, SECRET + '\n')
        by_name, by_file = {'UPIPE_SECRET': SECRET}, {'UPIPE_SECRET_FILE': path}
        for ways in itertools.product((by_name, by_file), repeat=2):
            port = free_port()
            met([(r, rank(r, 2, MASTER_PORT=port, **ways[r])) for r in (0, 1)], f'secrets from {ways}')
        tries, other = [], {'UPIPE_SECRET': 'another of 26 characters !'}
        for ways in ((by_name, other), (by_name, {}), ({}, by_name)):
            port = free_port()
            tries.append((ways, [rank(r, 2, 1.5, MASTER_PORT=port, **ways[r]) for r in (0, 1)]))
        for ways, (zero, one) in tries:
            words = 'does not prove the secret' if ways[0] else 'has a secret that rank 0 has not'
            ends(zero, 1, f'secrets {ways}, rank 0', '1 of 2 ranks', f'rank 1 of 2 comes to a rank 0 of 2, and {words}')
            said = ends(one, 1, f'secrets {ways}, rank 1', "rank 0 does not answer this rank's hello")
            check((': has it the same secret?' in said) == bool(ways[1]), f'secrets {ways}, rank 1: {said}')


def test_bad_secrets():
    """A secret that cannot be used is a sentence at once; so is one in a program that cannot prove any."""
    with tempfile.TemporaryDirectory() as folder:
        def made(name, text, mode=0o600):
            path = os.path.join(folder, name)
            write(path, text)
            os.chmod(path, mode)
            return path

        os.mkfifo(os.path.join(folder, 'pipe'), 0o600)
        good = made('good', SECRET)
        tries = [({'UPIPE_SECRET': ''}, 'fewer than 16'), ({'UPIPE_SECRET': 'fifteen letters\n'}, 'fewer than 16'),
                 ({'UPIPE_SECRET': 'x' * 1025}, 'more than 1024'), ({'UPIPE_SECRET_FILE': good, 'UPIPE_SECRET': SECRET}, 'both set'),
                 *(({'UPIPE_SECRET_FILE': path}, words) for path, words in [
                     (made('long', 'x' * 5000), 'more than'), (made('short', 'x\n'), 'fewer than 16'), ('', 'No such file'),
                     (made('group', SECRET, 0o640), 'chmod 600'), (made('all', SECRET, 0o604), 'chmod 600'),
                     (folder + '/pipe', 'no regular file'), (folder, 'no regular file'), (folder + '/none', 'No such file')])]
        for program, variables, words in [(MEETING, *one) for one in tries if MEETING != PLAIN] + [
                (PLAIN, {'UPIPE_SECRET': SECRET}, 'built without'), (PLAIN, {'UPIPE_SECRET_FILE': good}, 'built without')]:
            for r in (0, 1):
                ends(rank(r, 2, 20, program=program, MASTER_PORT=1, **variables), 1, str(variables), words)


def test_forged_hellos():
    """With a secret nobody takes a seat without it, whatever was overheard; a stranger is no rank 0 either."""
    where = {'MASTER_PORT': free_port(), 'UPIPE_SECRET': SECRET}
    first = rank(0, 3, **where)
    s, host = connect(where['MASTER_PORT'])
    overheard = hello(1, 3, host, SECRET)
    send(s, overheard)
    answer = receive(s, 32 + 5000)
    check(answer[:32] == prove(SECRET, host, overheard[:40], answer[32:]), 'rank 0 proves something else')
    check(answer[32:] == bytes(i * 7 % 256 for i in range(5000)), 'rank 0 sends something else')
    s.close()  # rank 1 does not say that it has them

    def changed(said, at):
        return said[:at] + bytes([said[at] ^ 2]) + said[at + 1:]

    forged = (hello(1, 3), overheard, hello(2, 4), hello(1, 3)[:40] + os.urandom(32),
              lambda host: hello(1, 3, host, 'another of 26 characters !'),
              *(lambda host, at=at: changed(hello(1, 3, host, SECRET), at) for at in (8, 12, 16, 24, 40, 71)))
    for said in forged:
        with client(where['MASTER_PORT'], said) as s:
            check(receive(s, 1) == b'', 'rank 0 answers a forged hello')
    for r, process in [(r, rank(r, 3, **where)) for r in (1, 2)]:
        got = finish(process)
        check(got == (0, f'{r} of 3, device {r}\n', ''), f'rank {r} behind forged hellos: {got}')
    ends(first, 0, 'rank 0 behind forged hellos', f'wrong hellos: {len(forged)}, ')


def test_forged_host():
    """Who listens first without the secret: sends zeros, sends the guest's own proof back, or lies about the ranks. What it
    has said stays in the sentence when later connections end without a word, as those of a rank 0 that is gone do."""
    for secret, ranks, answer, words in ((SECRET, 2, lambda said: bytes(32), 'does not prove the secret'),
                                         (SECRET, 2, lambda said: said[40:], 'does not prove the secret'),
                                         (SECRET, 5, lambda said: bytes(32), 'does not prove the secret'),
                                         ('', 5, lambda said: bytes(32), 'rank 1 of 2 comes to a rank 0 of 5'),
                                         ('', 2, lambda said: b'short', 'does not answer')):
        with socket.socket() as door:
            door.bind(('127.0.0.1', 0))
            door.listen()
            door.settimeout(0.05)
            guest, said = rank(1, 2, 1, MASTER_PORT=door.getsockname()[1], **({'UPIPE_SECRET': secret} if secret else {})), b''
            while guest.poll() is None:
                with contextlib.suppress(TimeoutError):
                    s, _ = door.accept()
                    with s:
                        if said:
                            continue
                        s.settimeout(5)
                        send(s, word(b'upipe-s1', 0, ranks))
                        said = answer(receive(s, 72))
                        send(s, said + (bytes(5000) if ranks == 2 and len(said) == 32 else b''))
        got, out, err = finish(guest)
        check(got == 1 and out == '' and words in err, f'a forged rank 0: {got}: {out}{err}')


def test_no_descriptors():
    """Rank 0 has none left for a connection: it ends by its deadline, says why, and does not spin until then."""
    port, began = free_port(), time.monotonic()
    first = start(['sh', '-c', f'ulimit -n 4; exec {MEETING} 1.5'], RANK=0, WORLD_SIZE=2, MASTER_PORT=port)
    second = rank(1, 2, 1.5, MASTER_PORT=port)
    clock = threading.Timer(10, first.kill)
    clock.start()
    err = first.stderr.read()
    _, status, used = os.wait4(first.pid, 0)
    clock.cancel()
    got = first.returncode = os.waitstatus_to_exitcode(status)
    check(got == 1 and '1 of 2 ranks have come' in err and 'Too many open files' in err, f'without descriptors: {got}: {err}')
    ends(second, 1, 'rank 1 without rank 0')
    check(time.monotonic() - began < 8, 'the deadline is not kept')
    check(used.ru_utime + used.ru_stime < 0.7, 'a wait that spins')


def test_absent():
    began = time.monotonic()
    for status, words, shell, ranks in (
            (1, '2 of 3 ranks have come', f'{MEETING} 1 & RANK=1 {MEETING} 1; wait $!', 3),
            (1, 'rank 1 of 3 comes to a rank 0 of 2', f'{MEETING} 1 & RANK=1 WORLD_SIZE=3 {MEETING} 0.5 2>/dev/null; wait $!', 2)):
        ends(start(['sh', '-c', shell], RANK=0, WORLD_SIZE=ranks, MASTER_PORT=free_port()), status, shell, words)
    ends(rank(1, 2, 0.3, MASTER_PORT=free_port()), 1, 'rank 1 alone', 'has not met rank 0')
    with socket.socket() as taken:
        taken.bind(('', 0))
        taken.listen()
        ends(rank(0, 2, 1, MASTER_PORT=taken.getsockname()[1]), 1, 'a port that is taken', 'cannot listen')
    check(time.monotonic() - began < 15, 'deadlines are not kept')


def main():
    global MEETING, PLAIN  # the program, with libcrypto where that is, and without  # pylint: disable=global-variable-undefined
    compiler = shlex.split(os.environ.get('CC', 'cc'))
    if not shutil.which(compiler[0]):
        return end('rendezvous')
    with tempfile.TemporaryDirectory() as folder:
        source, MEETING = os.path.join(folder, 'meeting.c'), os.path.join(folder, 'plain')
        PLAIN = MEETING
        write(source, SOURCE)
        compiler += ['-std=c11', '-I', TOP, '-I', os.path.join(TOP, 'examples'), source, '-lm']
        subprocess.run([*compiler, '-o', PLAIN], check=True)
        tests = [test_variables, test_machines, test_meeting, test_file, test_file_killed, test_file_pipes, test_strangers,
                 test_strange_clients, test_short_limit, test_evictions, test_wrong_hellos, test_address, test_no_descriptors, test_absent,
                 test_names, test_open, test_bad_secrets]
        crypto = subprocess.run(['pkg-config', '--cflags', '--libs', 'libcrypto'], capture_output=True, text=True, check=False)
        if crypto.returncode == 0:
            MEETING = os.path.join(folder, 'meeting')
            subprocess.run([*compiler, '-DUPIPE_WITH_OPENSSL', *crypto.stdout.split(), '-o', MEETING], check=True)
            tests += [test_secrets, test_forged_hellos, test_forged_host]
        else:
            print('libcrypto is missing: no secrets')
        with concurrent.futures.ThreadPoolExecutor(len(tests)) as pool:  # they wait, most of the time
            list(pool.map(run_test, tests))
    return end('rendezvous')


if __name__ == '__main__':
    sys.exit(main())

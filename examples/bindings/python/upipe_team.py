"""upipe_team.py -- the processes that torchrun or mpirun has started as ranks of upipe_abi.py, over TCP, MPI or NCCL

    team = team_from_env()                              # or Team(group=...) for a process group of one's own
    first, count = team.rows(1024)                      # this rank's tokens of 1024
    o = team.attention(q, k, v, tokens=1024, causal=True)                      # upipe_torch.attention, on all ranks
    team.sum_gradients(model)                           # each rank has those of its own tokens

Over TCP a process group tells the ranks where each of them listens. Whoever connects proves that it has what rank 0 has drawn
for this team, and the secret of UPIPE_SECRET_FILE or UPIPE_SECRET where there is one. Nothing that is sent is encrypted.

Attention alone goes over MPI or NCCL: sums over ranks are the process group's.
"""

import atexit
import ctypes
import hmac
import os
import socket
import stat
import time

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from upipe_abi import Attention, Error, can, draw_nccl_id, load
from upipe_torch import attention

LIBRARY = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'libupipe_abi.so')  # where the wheel has it
DEADLINE = 60  # seconds, as the library's
HELLO = 5  # seconds that a client has for its first words
PROOF = 32  # bytes
SECRET_LEAST, SECRET_MOST = 16, 1024  # bytes
MPI_LAUNCHERS = (('OMPI_COMM_WORLD_RANK', 'OMPI_COMM_WORLD_SIZE'), ('PMI_RANK', 'PMI_SIZE'))


def read_secret():
    """What UPIPE_SECRET_FILE, which must be its owner's alone, or UPIPE_SECRET holds; b'' without both."""
    text, path = os.environ.get('UPIPE_SECRET'), os.environ.get('UPIPE_SECRET_FILE')
    if text is None and path is None:
        return b''
    if text is not None and path is not None:
        raise Error('UPIPE_SECRET and UPIPE_SECRET_FILE are both set')
    secret = text.encode() if text is not None else b''
    if path is not None:
        try:
            with open(path, 'rb') as file:
                if os.fstat(file.fileno()).st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                    raise Error(f'UPIPE_SECRET_FILE {path} is not used: others may open it: chmod 600')
                secret = file.read(SECRET_MOST + 2)
        except OSError as error:
            raise Error(f'UPIPE_SECRET_FILE {path} is not used: {error.strerror}') from error
    secret = secret.rstrip(b'\r\n')
    if not SECRET_LEAST <= len(secret) <= SECRET_MOST:
        raise Error(f'the secret has {len(secret)} bytes; at least {SECRET_LEAST} and at most {SECRET_MOST} will do')
    return secret


def own_address():
    """The address by which the others reach this machine: that of its way to MASTER_ADDR."""
    family, kind, proto, _, place = socket.getaddrinfo(os.environ.get('MASTER_ADDR', 'localhost'), 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, proto) as probe:  # sends nothing
        probe.connect(place)
        return probe.getsockname()[0]


def receive(end, count):
    data = b''
    while len(data) < count:
        more = end.recv(count - len(data))
        if not more:
            raise OSError('the connection has ended')
        data += more
    return data


class Door:
    """Where a rank listens while a team is made."""

    def __init__(self, rank, ranks, key):
        self.rank, self.ranks, self.key = rank, ranks, key
        self.until = time.monotonic() + DEADLINE
        host = own_address()
        self.listening = socket.create_server((host, 0), family=socket.AF_INET6 if ':' in host else socket.AF_INET,
                                              backlog=2 * ranks)
        self.place = self.listening.getsockname()[:2]

    def proof(self, *words):
        return hmac.digest(self.key, b'|'.join(words), 'sha256')

    def connect(self, place, peer, which):
        """A socket to a lower rank: its nonce, who we are with a nonce and a proof, and its proof."""
        end = socket.create_connection(place, timeout=self.left())
        hello = b'%d %d %d' % (self.rank, peer, which)
        nonce, own = receive(end, PROOF), os.urandom(PROOF)
        end.sendall(hello.ljust(PROOF) + own + self.proof(b'joins', hello, nonce, own))
        if not hmac.compare_digest(receive(end, PROOF), self.proof(b'takes', hello, nonce, own)):
            raise OSError(f'who answers at {place[0]} is not rank {peer}')
        end.settimeout(None)
        return end

    def accept(self):
        """(rank, which, socket) of a higher rank; None for a stranger."""
        self.listening.settimeout(self.left())
        end = self.listening.accept()[0]
        try:
            end.settimeout(HELLO)
            nonce = os.urandom(PROOF)
            end.sendall(nonce)
            hello, own, proof = (receive(end, PROOF) for _ in range(3))
            hello = hello.rstrip()
            if hmac.compare_digest(proof, self.proof(b'joins', hello, nonce, own)):
                end.sendall(self.proof(b'takes', hello, nonce, own))
                end.settimeout(None)
                rank, _, which = map(int, hello.split())
                return rank, which, end
        except OSError:
            pass
        end.close()
        return None

    def left(self):
        return max(self.until - time.monotonic(), 0.001)

    def sockets(self, places):
        """[which][rank]: two sockets to each other rank, None at one's own place."""
        ends = [[None] * self.ranks for _ in range(2)]
        try:
            for peer in range(self.rank):
                for which in range(2):
                    ends[which][peer] = self.connect(places[peer], peer, which)
            while any(end is None for row in ends for end in row[self.rank + 1:]):
                came = self.accept()
                if came:
                    ends[came[1]][came[0]] = came[2]
        except OSError as error:
            raise Error(f'rank {self.rank} has no sockets to all {self.ranks} ranks: {error}') from error
        finally:
            self.listening.close()
        return ends


def trained(model):
    """{name: (shape, type)} of the parameters whose gradients can be summed; refuses those that cannot."""
    for part in model.modules():  # torch.compile may have wrapped it once more
        if isinstance(part, (DistributedDataParallel, FullyShardedDataParallel)):
            raise Error(f'{type(part).__name__} has taken means of the gradients: multiply the loss by the ranks, and leave '
                        'sum_gradients() out; or wrap no model')
    out = {}
    for name, p in model.named_parameters():
        if isinstance(p, DTensor):
            raise Error(f'{name} is sharded, as by FSDP2, which sums gradients itself: leave sum_gradients() out')
        if getattr(p.grad, 'upipe_summed', False):  # a step that begins with new gradients has no such mark
            raise Error(f'the gradient of {name} has been summed before: call sum_gradients() once, after the last backward of a step, '
                        'and zero_grad(), which sets to None, after it')
        if p.requires_grad:
            out[name] = (tuple(p.shape), str(p.dtype))
    return out


class Ranks:
    """The ranks of a process group, which hold a part of every sequence each; the base of teams.

    rank, ranks   those of the group
    u             this rank's upipe_abi.Attention, of a team alone
    close()       all ranks
    """

    def __init__(self, library=LIBRARY, group=None):
        if not dist.is_initialized():
            raise Error('torch.distributed has no process group: call init_process_group() before, or team_from_env()')
        self.library, self.group = library, group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise Error(f'rank {dist.get_rank()} is not in its group: a team is made by the ranks of the group')
        self.u = self.open()

    def of_all(self, what):
        """[ranks]: what each rank has brought; all ranks call it."""
        all_of_it = [None] * self.ranks
        dist.all_gather_object(all_of_it, what, group=self.group)
        return all_of_it

    def on_all(self, make, same=None):
        """What make() returns; all ranks call it. What it raises on one rank is raised on all, which would wait for that rank. same:
        why it is a dict that must be the same on all ranks, but for values of None."""
        made = failed = None
        try:
            made = make()
        except Exception as error:  # pylint: disable=broad-except
            failed = error
        own = failed and str(failed)
        all_of_it = self.of_all((own, same and made))
        for peer, (sentence, _) in enumerate(all_of_it):
            if sentence is not None:
                raise Error(sentence if sentence == own else f'rank {peer}: {sentence}') from failed
        first = all_of_it[0][1]
        for peer, (_, other) in enumerate(all_of_it if same else ()):
            for name in {**first, **other}:
                one, two = first.get(name, ()), other.get(name, ())
                if one != two and None not in (one, two):
                    raise Error(f'rank {peer} has other {name} than rank 0: {same}')
        return made

    def rows(self, tokens):
        """(first, count) of this rank's tokens."""
        cut = [tokens // self.ranks * i + tokens % self.ranks * i // self.ranks for i in (self.rank, self.rank + 1)]
        return cut[0], cut[1] - cut[0]

    def attention(self, q, k, v, *, tokens, **options):
        """upipe_torch.attention of this rank's rows, of so many tokens on all ranks."""
        return attention(self.u, self.rank, q, k, v, tokens=tokens, **options)

    def sum(self, tensor):
        """A tensor of its sum over the ranks; without gradients."""
        total = tensor.detach().clone()
        dist.all_reduce(total, group=self.group)
        return total

    def sum_gradients(self, model):
        """In place, once a step. A parameter that no token of this rank has used counts as zeros; one that no rank has used keeps
        None as its gradient."""
        names = self.on_all(lambda: trained(model), 'all ranks train the same parameters')
        parameters = [(name, model.get_parameter(name)) for name in names]
        used = set().union(*self.of_all([name for name, p in parameters if p.grad is not None]))
        for name, p in parameters:
            if name in used:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                dist.all_reduce(p.grad, group=self.group)
                p.grad.upipe_summed = True

    def gather(self, part, dim=1):
        """The tensor of which each rank has its tokens' part; without gradients."""
        return torch.cat(self.of_all(part.detach()), dim)

    def __reduce_ex__(self, _):
        raise Error('a team is of its processes: it is not copied, pickled or sent; make one where it is needed')

    def close(self):
        self.u.close()


class Team(Ranks):
    """Over TCP."""

    def open(self):
        secret = self.on_all(read_secret)
        key = self.of_all(os.urandom(PROOF))[0] + secret
        shown = self.of_all(hmac.digest(key, b'team', 'sha256'))
        for peer, other in enumerate(shown):
            if other != shown[0]:
                raise Error(f'rank {peer} has another secret than rank 0')
        door = self.on_all(lambda: Door(self.rank, self.ranks, key))
        ends = door.sockets(self.of_all(door.place))
        self.ends = [end for row in ends for end in row if end]
        headers, data = ([end.fileno() if end else -1 for end in row] for row in ends)
        return Attention(self.library, rank=self.rank, headers=headers, data=data, ranks=self.ranks)

    def close(self):
        super().close()
        for end in self.ends:
            end.close()


class MpiTeam(Ranks):
    """Over MPI, all ranks of MPI_COMM_WORLD. Who finds MPI not yet running starts it, and ends it with the process."""

    def open(self):
        mpi, running = load(self.library), ctypes.c_int()
        mpi.MPI_Initialized(ctypes.byref(running))
        if not running.value:
            mpi.MPI_Init(None, None)
            atexit.register(mpi.MPI_Finalize)
        return Attention(self.library, mpi=True, ranks=self.ranks)


class NcclTeam(Ranks):
    """Over NCCL, each rank on the device that is current."""

    def open(self):
        drawn = self.of_all(self.on_all(lambda: draw_nccl_id(self.library) if self.rank == 0 else None))[0]
        return Attention(self.library, rank=self.rank, nccl_id=drawn, ranks=self.ranks)


def team_from_env(library=LIBRARY):
    """The team of all processes that torchrun or mpirun has started: over NCCL where the library computes on CUDA devices, over
    MPI under mpirun, else over TCP. Makes torch.distributed's default group where there is none."""
    mpi = next((names for names in MPI_LAUNCHERS if names[0] in os.environ and 'RANK' not in os.environ), None)
    cuda = can(library, 'cuda')
    if cuda and not can(library, 'nccl'):
        raise Error(f'{library} computes on CUDA devices and has no NCCL: build libupipe_abi_cuda.so with -Dnccl=enabled')
    if mpi and not cuda and not can(library, 'mpi'):
        raise Error(f'mpirun has started the ranks, and {library} has no MPI: give libupipe_abi_mpi.so, or use torchrun')
    if not dist.is_initialized():
        if not mpi and 'RANK' not in os.environ:
            raise Error('RANK is not set: start the ranks with torchrun or mpirun')
        if mpi and not {'MASTER_ADDR', 'MASTER_PORT'} <= os.environ.keys():
            raise Error('MASTER_ADDR and MASTER_PORT are not set: mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500')
        rank, ranks = (int(os.environ[name]) for name in mpi or ('RANK', 'WORLD_SIZE'))
        dist.init_process_group('cpu:gloo,cuda:nccl' if cuda else 'gloo', rank=rank, world_size=ranks)
    return NcclTeam(library) if cuda else MpiTeam(library) if mpi else Team(library)

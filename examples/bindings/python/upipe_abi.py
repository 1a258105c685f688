"""upipe_abi.py -- upipe_abi.h from Python, with nothing but ctypes

    u = Attention('libupipe_abi.so', tokens=1024, ranks=4, heads=8, head_dim=64, causal=1)
    def rank_main(rank):                                    # each rank on a thread of its own
        u.qkv_fwd(rank, o, q, k, v)                         # pointers to f32, or ctypes arrays
        u.qkv_bwd(rank, dq, dk, dv, dout, o, q, k, v)
    u.run(rank_main)
    u.close()

A NumPy array's pointer is a.ctypes.data, a torch tensor's t.data_ptr(); either must be f32, contiguous, and held by the
caller during the call. ctypes releases Python's lock in a call, so the ranks run side by side.

Fused tensors (upipe_abi_fused_fwd ..), upipe_abi_sync and communicators of the host's own are C's alone.
"""

import ctypes
import itertools
import os
import threading

NCCL_ID_BYTES = 128
OPENED = {}  # by Attention.number, until the close: for who can pass on no more than an integer
NUMBERS = itertools.count()


class Desc(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ('tokens', 'batch', 'window')] + [
        (name, ctypes.c_int32) for name in ('ranks', 'heads', 'kv_heads', 'head_dim', 'chunk', 'causal', 'layers')] + [
            ('scale', ctypes.c_float), ('softcap', ctypes.c_float)] + [
                (name, ctypes.c_int32) for name in ('dtype', 'ring', 'ring_mode', 'ring_inner', 'layout')]


class Error(RuntimeError):
    pass


def load(library):
    """The library; what is none is refused."""
    try:
        lib = ctypes.CDLL(library)
    except OSError as error:
        raise Error(f'no library is loaded: {error}: give the path of libupipe_abi.so') from error
    if not hasattr(lib, 'upipe_abi_sinks'):  # the newest function
        raise Error(f'{library} is no library of upipe, or an older one: give the path of libupipe_abi.so')
    return lib


def can(library, name):
    """Whether this library has what upipe_abi_can names."""
    return bool(load(library).upipe_abi_can(name.encode()))


def draw_nccl_id(library):
    """Bytes of which one rank draws them and sends them to all: nccl_id= of their Attention."""
    lib, drawn, why = load(library), ctypes.create_string_buffer(NCCL_ID_BYTES), ctypes.create_string_buffer(256)
    if lib.upipe_abi_nccl_id(drawn, why, ctypes.c_size_t(len(why))) != 0:
        raise Error(why.value.decode())
    return drawn.raw


def described(desc, **options):
    """A copy of desc with these options, which must be some, and fit."""
    unknown = set(options) - {name for name, _ in Desc._fields_}
    if unknown:  # ctypes would keep them as attributes
        raise Error(f'no such option: {", ".join(sorted(unknown))}')
    desc = Desc.from_buffer_copy(desc)
    for name, value in options.items():
        try:
            setattr(desc, name, value)
        except TypeError as error:
            raise Error(f'{name} is {value!r}: {error}') from error
        if name not in ('scale', 'softcap') and getattr(desc, name) != value:  # ctypes keeps the low bits of an integer
            raise Error(f'{name} is {value}, which its {8 * getattr(Desc, name).size} bits do not hold')
    for name, default in (('batch', 1), ('ranks', 1), ('ring', 1), ('layers', 1), ('kv_heads', desc.heads)):
        if getattr(desc, name) == 0:
            setattr(desc, name, default)
    return desc


class Attention:
    """Attention of ranks * ring ranks, all of them threads of this process, or one of them this process. Without tokens it has a
    team alone, until describe().

    headers, data  of rank `rank`: two connected sockets to each other one, lists of their numbers
    nccl_id        of rank `rank`: what draw_nccl_id() has given one of the ranks; tensors are on the current device
    mpi            this process is its rank of MPI_COMM_WORLD; MPI runs from before the open until after the close
    """

    def __init__(self, library, rank=None, headers=None, data=None, nccl_id=None, mpi=False, **desc):
        p, i = ctypes.c_void_p, ctypes.c_int
        self.lib = load(library)
        self.lib.upipe_abi_open.restype = p
        self.lib.upipe_abi_open.argtypes = [ctypes.POINTER(Desc), ctypes.c_char_p, ctypes.c_size_t]
        self.lib.upipe_abi_open_sockets.restype = p
        self.lib.upipe_abi_open_sockets.argtypes = [ctypes.POINTER(Desc), i, ctypes.POINTER(i), ctypes.POINTER(i), ctypes.c_char_p,
                                                    ctypes.c_size_t]
        self.lib.upipe_abi_open_mpi.restype = self.lib.upipe_abi_open_nccl_id.restype = p
        self.lib.upipe_abi_open_mpi.argtypes = [ctypes.POINTER(Desc), p, ctypes.c_char_p, ctypes.c_size_t]
        self.lib.upipe_abi_open_nccl_id.argtypes = [ctypes.POINTER(Desc), i, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t]
        self.lib.upipe_abi_need.restype = ctypes.c_int64
        self.lib.upipe_abi_need.argtypes = [ctypes.POINTER(Desc), i, ctypes.c_char_p, ctypes.c_size_t]
        self.lib.upipe_abi_can.argtypes = [ctypes.c_char_p]
        self.lib.upipe_abi_describe.argtypes = [p, i, ctypes.POINTER(Desc)]
        self.lib.upipe_abi_pack.argtypes = [p, i, ctypes.POINTER(ctypes.c_int64), ctypes.c_int64]
        for function in 'rows', 'bytes', 'saved_bytes':
            getattr(self.lib, 'upipe_abi_' + function).restype = ctypes.c_int64
            getattr(self.lib, 'upipe_abi_' + function).argtypes = [p, i]
        self.lib.upipe_abi_rows.argtypes = self.lib.upipe_abi_positions.argtypes = [p, i, ctypes.POINTER(ctypes.c_int64)]
        self.lib.upipe_abi_sinks.argtypes = [p, i, p, p]
        self.lib.upipe_abi_qkv_fwd.argtypes = [p, i, i] + 4 * [p]
        self.lib.upipe_abi_qkv_bwd.argtypes = [p, i, i] + 8 * [p]
        self.lib.upipe_abi_drop.argtypes = [p, i, i]
        self.lib.upipe_abi_stream.argtypes = [p, i, p]
        self.lib.upipe_abi_sync.argtypes = [p, i]
        self.lib.upipe_abi_save.argtypes = self.lib.upipe_abi_restore.argtypes = [p, i, i, p]
        self.lib.upipe_abi_error.restype = ctypes.c_char_p
        self.lib.upipe_abi_error.argtypes = [p, i]
        self.lib.upipe_abi_abort.argtypes = [p, i, ctypes.c_char_p]
        self.lib.upipe_abi_close.argtypes = [p]
        why = ctypes.create_string_buffer(256)
        self.desc = described(Desc(), **desc)  # that of the open
        self.tokens, self.ring = self.desc.tokens, self.desc.ring
        self.ranks, at = self.desc.ranks * self.ring, ctypes.byref(self.desc)
        if mpi:
            self.handle = self.lib.upipe_abi_open_mpi(at, None, why, len(why))
        elif nccl_id is not None:
            if len(nccl_id) != NCCL_ID_BYTES:
                raise Error(f'nccl_id has {len(nccl_id)} bytes, not {NCCL_ID_BYTES}')
            self.handle = self.lib.upipe_abi_open_nccl_id(at, rank, nccl_id, why, len(why))
        elif rank is not None:
            both = [(i * len(fds))(*fds) for fds in (headers, data)]
            if any(len(fds) != self.ranks for fds in both):
                raise Error(f'{len(headers)} and {len(data)} sockets, and {self.ranks} ranks')
            self.handle = self.lib.upipe_abi_open_sockets(at, rank, *both, why, len(why))
        else:
            self.handle = self.lib.upipe_abi_open(at, why, len(why))
        if not self.handle:
            raise Error(why.value.decode())
        self.ranks_here = [r for r in range(self.ranks) if self.lib.upipe_abi_rows(self.handle, r, None) >= 0]
        self.device = 'cuda' if self.lib.upipe_abi_can(b'cuda') else 'cpu'
        self.process, self.number = os.getpid(), next(NUMBERS)
        OPENED[self.number] = self

    def __reduce_ex__(self, _):
        raise Error('a handle is of its process: it is not copied, pickled or sent; open one where it is needed')

    def layer_of(self, layer):
        """The layer for a call; the library says whether there is one."""
        if not -2**31 <= layer < 2**31:  # ctypes keeps the low bits
            raise Error(f'layer {layer} of {self.desc.layers}')
        return layer

    def of(self, rank):
        """The handle for a call of this rank; the library sees a number and a pointer alone."""
        handle = self.handle  # another thread may close it
        if not handle or not 0 <= rank < self.ranks:
            raise Error(f'rank {rank} of {self.ranks}' if handle else 'the handle is closed')
        return handle

    def ask(self, rank, name, *arguments):
        """A call of this rank, which returns a status."""
        handle = self.of(rank)
        if getattr(self.lib, 'upipe_abi_' + name)(handle, rank, *arguments) != 0:
            raise Error(self.lib.upipe_abi_error(handle, rank).decode())

    def number_of(self, rank, name, *arguments):
        """What a call of this rank returns that is a number."""
        handle = self.of(rank)
        number = getattr(self.lib, 'upipe_abi_' + name)(handle, rank, *arguments)
        if number < 0:
            raise Error(self.lib.upipe_abi_error(handle, rank).decode())
        return number

    def describe(self, rank, **desc):
        """The rank's calls from now on are of this description; what is not given is as in the open. All ranks say the same. No
        forward may be before its backward, but those of save()."""
        self.ask(rank, 'describe', ctypes.byref(described(self.desc, **desc)))

    def rows(self, rank):
        """(first, count) of this rank's tokens; in a ring they are not neighbours in each layout: see positions."""
        first = ctypes.c_int64()
        count = self.number_of(rank, 'rows', ctypes.byref(first))
        return first.value, count

    def positions(self, rank):
        """Of the rank's rows in their sequence."""
        out = (ctypes.c_int64 * self.rows(rank)[1])()
        self.ask(rank, 'positions', out)
        return list(out)

    def bytes(self, rank):
        return self.number_of(rank, 'bytes')

    def set_borders(self, rank, cu_seqlens):
        numbers = list(cu_seqlens)
        while len(numbers) > 2 and numbers[-2] == numbers[-1]:  # empty, behind the end, where the library reads nothing
            numbers.pop()
        try:
            array = (ctypes.c_int64 * len(numbers))(*numbers)
        except TypeError as error:
            raise Error(f'cu_seqlens holds what is no integer: {error}') from error
        for number, kept in zip(numbers, array):  # ctypes keeps the low bits of an integer
            if number != kept:
                raise Error(f'cu_seqlens holds {number}, which 64 bits do not hold')
        self.ask(rank, 'pack', array or None, max(len(numbers) - 1, 0))

    def set_sinks(self, rank, sinks, dsinks=None):
        self.ask(rank, 'sinks', sinks, dsinks)

    def qkv_fwd(self, rank, o, q, k, v, layer=0, cu_seqlens=(), sinks=None):
        """cu_seqlens: where packed sequences begin, and the end: flash-attention's borders over batch * tokens rows; (): none.
        sinks: f32 [heads], or None."""
        self.set_borders(rank, cu_seqlens)
        self.set_sinks(rank, sinks)
        self.ask(rank, 'qkv_fwd', self.layer_of(layer), o, q, k, v)

    def qkv_bwd(self, rank, dq, dk, dv, dout, o, q, k, v, layer=0, cu_seqlens=(), sinks=None, dsinks=None):
        """dsinks: f32 [heads], to which the gradients of the heads that this rank has computed are added; None: not wanted."""
        self.set_borders(rank, cu_seqlens)
        self.set_sinks(rank, sinks, dsinks)
        self.ask(rank, 'qkv_bwd', self.layer_of(layer), dq, dk, dv, dout, o, q, k, v)

    def drop(self, rank, layer=0):
        """In place of a backward that never comes."""
        self.ask(rank, 'drop', self.layer_of(layer))

    def saved_bytes(self, rank):
        return self.number_of(rank, 'saved_bytes')

    def save(self, rank, to, layer=0):
        """Moves what the forward has left to memory of the caller's, saved_bytes(rank) of it: the layer is free."""
        self.ask(rank, 'save', self.layer_of(layer), to)

    def restore(self, rank, saved, layer=0):
        """Brings it back, to a free layer, before the backward."""
        self.ask(rank, 'restore', self.layer_of(layer), saved)

    def stream(self, rank, stream):
        """The rank's calls from now on are enqueued on this CUDA stream, an address."""
        self.ask(rank, 'stream', stream)

    def abort(self, rank, why):
        """The rank will not make the calls of the others, which are released with this sentence."""
        if self.handle:
            self.lib.upipe_abi_abort(self.handle, rank, why.encode())

    def run(self, body):
        """body(rank) for every rank, each on a thread. The first exception is raised again; it releases the other ranks."""
        failed = []

        def one(rank):
            try:
                body(rank)
            except BaseException as error:  # pylint: disable=broad-except
                failed.append(error)
                self.abort(rank, str(error))

        self.of(0)
        threads = [threading.Thread(target=one, args=(rank,)) for rank in self.ranks_here]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]

    def close(self):
        """Refused while a call of another thread is not over. In a forked child it lets go of what stays the parent's."""
        if self.lib.upipe_abi_close(self.handle) != 0 and os.getpid() == self.process:
            raise Error('the handle is not closed: another thread is in a call of it')
        self.handle = None
        OPENED.pop(self.number, None)

#!/usr/bin/env python3
"""ops.py -- the table's row operations, and the all-to-all, beside memcpy

Each operation is validated against NumPy in double precision, then timed in turn with a memcpy by as many threads in
the same run: medians. Bytes are those that the operation has to read and to write, once each; memcpy reads and writes
too. `percent` is the ratio of the two rates. It can exceed 100: memcpy also reads the lines that it overwrites.
Sizes: in the second-level cache, and beyond all caches.

Lines: {"op", "dtype", "rows", "d", "threads", "gbytes_per_s", "memcpy_gbytes_per_s", "percent"}; the all-to-all, whose
memcpy has the same blocks and as many threads as there are ranks: {"op": "all_to_all", "ranks", "block_bytes", ...}. With
more ranks than cores all take turns, in memcpy too.

Exit status: 0; 1 if something failed or is wrong; 2 for wrong usage.
"""

import ctypes
import itertools
import statistics
import sys

import common
import rates

DTYPES = ['f32', 'bf16']
# In the order of the enum in ops.c.
OPS = ['memcpy', 'copy', 'zero', 'narrow', 'widen', 'rope', 'rope_interleaved', 'rmsnorm', 'rmsnorm_bwd', 'rowdot',
       'sum', 'add', 'swiglu', 'swiglu_bwd', 'glu', 'glu_bwd', 'cross_entropy', 'embed', 'embed_bwd', 'total', 'adamw']
HEAD, PARTS, SLOTS, EPS = 128, 4, 6, 1e-5
NEAR = {'f32': 2e-5, 'bf16': 1e-2}
SHAPES = [(64, 1024), (8192, 4096)]
QUICK_SHAPES = [(64, 1024)]
BLOCKS = [1 << 16, 1 << 18, 1 << 20, 1 << 24]
QUICK_BLOCKS = [1 << 16]


def bytes_of(op, width):
    """Bytes an element that the operation reads and writes; of `width` bytes each where the type is the case's."""
    w = width
    return {'memcpy': 2 * w, 'copy': 2 * w, 'zero': w, 'narrow': 4 + w, 'widen': 4 + w, 'rope': 2 * w,
            'rope_interleaved': 2 * w, 'rmsnorm': 2 * w, 'rmsnorm_bwd': 3 * w, 'rowdot': 2 * w + 4 / HEAD,
            'sum': 4 * PARTS + w, 'add': 3 * w, 'swiglu': 3 * w, 'swiglu_bwd': 5 * w, 'glu': 3 * w, 'glu_bwd': 5 * w,
            'cross_entropy': 4 + w, 'embed': 2 * w, 'embed_bwd': 8 + w, 'total': w, 'adamw': 7 * 4 + w}[op]


class Case(ctypes.Structure):
    """ops_case of ops.c"""
    _fields_ = [('slots', ctypes.c_void_p * SLOTS),
                *((name, ctypes.c_void_p) for name in ('weight', 'dweight', 'loss', 'tokens', 'targets')),
                ('total', ctypes.c_double), ('rows', ctypes.c_int64), ('d', ctypes.c_int32), ('dtype', ctypes.c_int32)]


class Library(common.Kernels):
    def __init__(self, isa):
        i32, given = ctypes.c_int32, [ctypes.c_void_p, ctypes.POINTER(Case), ctypes.c_int32]
        super().__init__('ops.c', isa, ('ops_call', ctypes.c_char_p, given),
                         ('ops_seconds', ctypes.c_double, [*given, i32]),
                         ('ops_all_to_all', ctypes.c_double, [i32, ctypes.c_int64, i32, i32]))


class Operands:
    """Of one shape and type. Slots begin a line apart within their pages, as blocks of a heap do: equal places would
    collide in the caches."""

    def __init__(self, library, threads, rows, d, dtype):
        self.library, self.handle, self.rows, self.d, self.dtype = library.c, library.open(threads), rows, d, dtype
        self.width = 4 if dtype == 'f32' else 2
        whole, apart = common.aligned(SLOTS * (4 * rows * d + 6 * 64)), 4 * rows * d + 6 * 64
        self.slots = [whole[slot * apart:][:4 * rows * d] for slot in range(SLOTS)]
        self.weight, self.dweight = (1 + np.arange(d) % 7 / 16).astype(np.float32), np.zeros(d, np.float32)
        self.loss, places = np.zeros(rows, np.float32), 5 * np.arange(rows)
        # they repeat where rows is a multiple of 5
        self.tokens, self.targets = (places % rows).astype(np.int32), (places % d).astype(np.int32)
        arrays = self.weight, self.dweight, self.loss, self.tokens, self.targets
        self.case = Case((ctypes.c_void_p * SLOTS)(*(slot.ctypes.data for slot in self.slots)),
                         *(array.ctypes.data for array in arrays), 0, rows, d, DTYPES.index(dtype))
        self.noise = 2 * np.random.default_rng(1).random(min(rows * d, 1 << 20), dtype=np.float32) - 1

    def type_of(self, op, slot):
        """The storage type of a slot."""
        wide = {'narrow': [0], 'widen': [1], 'sum': range(5), 'cross_entropy': [0], 'embed_bwd': [1], 'adamw': range(4)}
        return 'f32' if slot in wide.get(op, []) else self.dtype

    def stored(self, op, slot):
        kind, width = (np.float32, 4) if self.type_of(op, slot) == 'f32' else (np.uint16, 2)
        return self.slots[slot][:width * self.rows * self.d].view(kind).reshape(self.rows, self.d)

    def array(self, op, slot):
        """A slot's elements in double precision."""
        return rates.to_f32(self.stored(op, slot)).astype(np.float64)

    def fill(self, op):
        """Numbers between -1 and 1, others in each slot; v of AdamW is no negative number."""
        for slot in range(SLOTS):
            values = np.resize(np.roll(self.noise, 977 * slot), (self.rows, self.d))
            if (op, slot) == ('adamw', 2):
                np.abs(values, out=values)
            self.stored(op, slot)[:] = values if self.type_of(op, slot) == 'f32' else rates.to_bf16(values)

    def call(self, op):
        common.check(self.library.ops_call(self.handle, self.case, OPS.index(op)))

    def seconds(self, op, turns):
        took = self.library.ops_seconds(self.handle, self.case, OPS.index(op), turns)
        if took < 0:
            common.fail(f'{op} failed')
        return took / turns


def turned(x, interleaved):
    """RoPE of heads from position 0 on."""
    heads = x.reshape(x.shape[0], -1, HEAD)
    angle = np.outer(np.arange(x.shape[0]), 500000.0 ** (-2.0 * np.arange(HEAD // 2) / HEAD))[:, None, :]
    first, second = heads[..., :HEAD // 2], heads[..., HEAD // 2:]
    if interleaved:
        first, second = heads[..., 0::2], heads[..., 1::2]
    pair = first * np.cos(angle) - second * np.sin(angle), first * np.sin(angle) + second * np.cos(angle)
    return (np.stack(pair, -1) if interleaved else np.concatenate(pair, -1)).reshape(x.shape)


def expected(b, op):
    """[(what, the f64 result, the slot or a function that reads what came of it)] from the operands as they are."""
    x, y, z = (b.array(op, slot) for slot in range(3))
    weight = b.weight.astype(np.float64)
    scale = 1 / np.sqrt((x * x).mean(1, keepdims=True) + EPS)
    sigmoid = 1 / (1 + np.exp(-x))
    if op in ('copy', 'narrow', 'widen', 'memcpy'):
        return [('y', x, 1)]
    if op == 'zero':
        return [('y', 0 * x, 1)]
    if op in ('rope', 'rope_interleaved'):
        return [('x', turned(x, op != 'rope'), 0)]
    if op == 'rmsnorm':
        return [('y', x * scale * weight, 1)]
    if op == 'rmsnorm_bwd':
        unit = x * scale
        return [('dx', scale * (weight * y - unit * (unit * weight * y).mean(1, keepdims=True)), 2),
                ('dgain', b.dweight + (y * unit).sum(0), lambda: b.dweight)]
    if op == 'rowdot':
        return [('out', (x * y).reshape(-1, HEAD).sum(1),
                 lambda: b.slots[2].view(np.float32)[:b.rows * b.d // HEAD])]
    if op == 'sum':
        return [('dst', sum(b.array(op, slot) for slot in range(PARTS)), 5)]
    if op == 'add':
        return [('y', x + y, 1)]
    if op == 'swiglu':
        return [('y', x * sigmoid * y, 2)]
    if op == 'swiglu_bwd':
        return [('gate', sigmoid * (1 + x * (1 - sigmoid)) * y * z, 0), ('up', x * sigmoid * z, 1)]
    if op == 'glu':
        return [('y', sigmoid * y, 2)]
    if op == 'glu_bwd':
        return [('gate', sigmoid * (1 - sigmoid) * y * z, 0), ('up', sigmoid * z, 1)]
    if op == 'cross_entropy':
        p = np.exp(x) / np.exp(x).sum(1, keepdims=True)
        onehot = np.eye(b.d)[b.targets]
        return [('grad', p - onehot, 1), ('loss', -np.log((p * onehot).sum(1)), lambda: b.loss)]
    if op == 'embed':
        return [('x', x[b.tokens], 1)]
    if op == 'embed_bwd':
        np.add.at(y, b.tokens, x)
        return [('dtable', y, 1)]
    if op == 'total':
        return [('out', np.array([(x * x).sum()]), lambda: np.array([b.case.total]))]
    m, v = 0.9 * y + 0.1 * b.array(op, 3), 0.95 * z + 0.05 * b.array(op, 3) ** 2
    step = m / (1 - 0.9 ** 10) / (np.sqrt(v / (1 - 0.95 ** 10)) + 1e-8)
    return [('w', x - 1e-3 * (step + 0.1 * x), 0), ('m', m, 1), ('v', v, 2), ('copy', x - 1e-3 * (step + 0.1 * x), 4)]


def validate(library, threads, dtype):
    """Every operation on a shape that leaves a rest of every vector."""
    b = Operands(library, threads, 37, 11 * HEAD, dtype)
    for op in OPS:
        b.fill(op)
        results = expected(b, op)
        b.call(op)
        for what, right, where in results:
            got = where() if callable(where) else b.array(op, where)
            worst = float(np.max(np.abs(got - right)) / max(1e-30, float(np.max(np.abs(right)))))
            if not worst <= NEAR[dtype] and not (op == 'zero' and not np.any(got)):
                common.fail(f'{op} in {dtype}, {threads} threads: {what} is off by {worst:.3g} of its greatest')


def measure(b, op, rounds, least):
    """Median bytes a second of the operation and of memcpy, in turn; a sample lasts about `least` seconds."""
    b.fill(op)
    samples, turns = {op: [], 'memcpy': []}, {}
    for name in samples:
        b.seconds(name, 1)
        turns[name] = max(1, int(least / max(1e-9, b.seconds(name, 1))))
    for turn in range(rounds):
        for name in list(samples)[::1 if turn % 2 == 0 else -1]:
            b.seconds(name, 1)
            samples[name].append(b.seconds(name, turns[name]))
    count = b.rows * b.d
    # memcpy has the case's own type; an operation that fills its slots with others leaves numbers that nobody reads
    return [count * bytes_of(name, b.width) / statistics.median(samples[name]) for name in (op, 'memcpy')]


def all_to_all(library, ranks, block, rounds):
    """Median bytes a second of the all-to-all and of plain copies of the same blocks."""
    whole = ranks * ranks * block
    turns = max(2, min(2000, (1 << 29) // whole))
    samples = [[], []]
    for _ in range(rounds):
        for plain in 0, 1:
            took = library.c.ops_all_to_all(ranks, block, turns, plain)
            if took < 0:
                common.fail(f'the all-to-all of {ranks} ranks, blocks of {block} bytes, failed')
            samples[plain].append(took / turns)
    return [whole / statistics.median(one) for one in samples]


class Ops(common.Benchmark):
    name, text = 'ops', __doc__
    head = ['op', 'case', 'GB/s', "memcpy's", 'percent']

    def flags(self, parser):
        every = [*OPS[1:], 'all_to_all']
        common.add_list(parser, '--ops', 'operations', every, every)
        common.add_list(parser, '--dtypes', 'storage types', DTYPES, DTYPES)
        common.add_list(parser, '--threads', 'threads of the row operations', sorted({1, common.cores()}))

    def open(self):
        self.library = Library(self.options.isa)
        self.rounds_of, self.least = (3, 1e-3) if self.options.quick else (9, 2e-2)
        for threads in self.options.threads:
            for dtype in self.options.dtypes:
                validate(self.library, threads, dtype)
        return {}

    def cases(self):
        given = self.options
        shapes = QUICK_SHAPES if given.quick else SHAPES
        for threads, dtype, (rows, d) in itertools.product(given.threads, given.dtypes, shapes):
            yield f'{rows} rows of {d}, {dtype}, {common.counted(threads)}', threads, dtype, rows, d
        if 'all_to_all' in given.ops:
            for ranks in 2, 4:
                yield f'all-to-all of {ranks} ranks', ranks

    def run(self, threads, dtype=None, rows=None, d=None):
        if dtype is None:
            for block in QUICK_BLOCKS if self.options.quick else BLOCKS:
                yield self.line({'op': 'all_to_all', 'ranks': threads, 'block_bytes': block},
                                *all_to_all(self.library, threads, block, self.rounds_of))
            return
        b = Operands(self.library, threads, rows, d, dtype)
        for op in [op for op in self.options.ops if op != 'all_to_all']:
            yield self.line({'op': op, 'dtype': dtype, 'rows': rows, 'd': d, 'threads': threads},
                            *measure(b, op, self.rounds_of, self.least))

    @staticmethod
    def line(fields, ours, memcpy):
        return {**fields, 'gbytes_per_s': round(ours * 1e-9, 2), 'memcpy_gbytes_per_s': round(memcpy * 1e-9, 2),
                'percent': round(100 * ours / memcpy, 1)}

    def row(self, line):
        where = ', '.join(f'{name} {line[name]}' for name in ('dtype', 'rows', 'd', 'threads', 'ranks', 'block_bytes')
                          if name in line)
        return [line['op'], where, f"{line['gbytes_per_s']:.2f}", f"{line['memcpy_gbytes_per_s']:.2f}",
                f"{line['percent']:.1f}"]


if __name__ == '__main__':
    benchmark = Ops()
    benchmark.read()
    import numpy as np
    sys.exit(benchmark.main())

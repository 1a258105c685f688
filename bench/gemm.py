#!/usr/bin/env python3
"""gemm.py -- the matrix products of a layer on the CPU, beside OpenBLAS, BLIS and oneDNN in the same run

The shapes are those of a projection of T tokens of model dim D to the N columns of a stage:

    qkv_nt   Y = X * W^T       m = T, n = N, k = D    W stored [N][D]
    dx_nn    dX = dY * W       m = T, n = D, k = N
    dw_tn    dW += dY^T * X    m = N, n = D, k = T

In bf16 Y is rounded to bf16 by ours; the other two, and everything that oneDNN returns, are f32. All take turns, and
the medians count; the peak is that of fused multiply-adds in f32, measured in the same turns with the vectors that our
kernels use and as many threads. A peer's ratio is our rate over its rate: above 1 we are faster.

Peers are the system's libraries, loaded by name (Debian and Ubuntu: apt-get install libopenblas0-pthread
libblis4-pthread libdnnl2); one that is not there is left out, and that is said. The first two have no bf16. BLIS takes
kernels for AVX2 where it does not recognise a virtual machine's processor, and the environment may make OpenBLAS do so:
both are told to take those for what --peer-isa allows. oneDNN multiplies bf16 with AMX where there is AMX; --peer-isa
avx512 forbids it. bf16 is this library's product in the processor's bf16 instructions, AMX or AVX512-BF16.

Exit status: 0; 1 if something failed or is wrong; 2 for wrong usage.
"""

import ctypes
import itertools
import os
import sys

import common
import picture
import rates

PEERS = ['openblas', 'blis', 'onednn', 'bf16']
SHAPES = ['qkv_nt', 'dx_nn', 'dw_tn']
TRANS_A, TRANS_B, ACCUMULATE = 1, 2, 4
FLAGS = {'qkv_nt': TRANS_B, 'dx_nn': 0, 'dw_tn': TRANS_A | ACCUMULATE}
DTYPES = {'f32': 0, 'bf16': 1}  # upipe_dtype
# What libraries call their kernels.
CORES = {'avx2': {'OPENBLAS_CORETYPE': 'Haswell', 'BLIS_ARCH_TYPE': '3'},
         'avx512': {'OPENBLAS_CORETYPE': 'SkylakeX', 'BLIS_ARCH_TYPE': '0'},
         'avx512_bf16': {'OPENBLAS_CORETYPE': 'Sapphirerapids', 'BLIS_ARCH_TYPE': '0'}}
# Largest error of a result over its largest value: f32 sums; bf16 rounds Y by 2e-3 of itself.
BOUNDS = {'f32': 2e-5, 'bf16': 5e-3}
VALIDATED = 70, 100, 400  # tokens, columns, model dim


# ---- one product ----

class Product(ctypes.Structure):
    """bench_product of gemm.c."""
    _fields_ = [(name, ctypes.c_void_p) for name in ('c', 'a', 'b', 'work')] + \
               [(name, ctypes.c_int64) for name in ('work_bytes', 'm', 'n', 'k')] + \
               [(name, ctypes.c_int32) for name in ('flags', 'dtype', 'out_dtype')]


def address(array):
    return array.ctypes.data_as(ctypes.c_void_p)


class Problem:
    """Operands, as stored, and a c for everyone."""

    def __init__(self, shape, tokens, columns, model, dtype):
        self.dtype, self.flags, self.about = dtype, FLAGS[shape], f'{shape}, {dtype}'
        self.m, self.n, self.k = {'qkv_nt': (tokens, columns, model), 'dx_nn': (tokens, model, columns),
                                  'dw_tn': (columns, model, tokens)}[shape]
        self.fields = {'shape': shape, 'm': self.m, 'n': self.n, 'k': self.k, 'dtype': dtype}
        self.trans_a, self.trans_b = bool(self.flags & TRANS_A), bool(self.flags & TRANS_B)
        self.accumulate = bool(self.flags & ACCUMULATE)
        random = np.random.default_rng(1)
        shapes = [(self.k, self.m) if self.trans_a else (self.m, self.k),
                  (self.n, self.k) if self.trans_b else (self.k, self.n)]
        self.a, self.b = [random.standard_normal(size, dtype=np.float32) for size in shapes]
        if dtype == 'bf16':
            self.a, self.b = rates.to_bf16(self.a), rates.to_bf16(self.b)
        self.out_dtype = 'bf16' if dtype == 'bf16' and shape == 'qkv_nt' else 'f32'

    def out(self, dtype='f32'):
        return np.zeros((self.m, self.n), np.uint16 if dtype == 'bf16' else np.float32)

    def flop(self, _):
        return 2.0 * self.m * self.n * self.k

    def reference(self):
        a, b = rates.to_f32(self.a).astype(np.float64), rates.to_f32(self.b).astype(np.float64)
        return {'c': (a.T if self.trans_a else a) @ (b.T if self.trans_b else b)}


# ---- who multiplies ----

class Ours(common.Kernels):
    def __init__(self, options):
        why, product = ctypes.c_char_p, [ctypes.c_void_p, ctypes.POINTER(Product)]
        super().__init__('gemm.c', options.isa, ('bench_gemm', why, product),
                         ('bench_gemm_bytes', ctypes.c_int64, product),
                         ('bench_use_bf16_gemm', why, [ctypes.c_void_p]), ('bench_bf16_name', why, []))

    def serve(self, problem, threads):
        handle, out = self.open(threads), problem.out(problem.out_dtype)
        product = Product(address(out), address(problem.a), address(problem.b), None, 0, problem.m, problem.n,
                          problem.k, problem.flags, DTYPES[problem.dtype], DTYPES[problem.out_dtype])
        product.work_bytes = self.c.bench_gemm_bytes(handle, product)
        work = common.aligned(product.work_bytes)
        product.work = work.ctypes.data
        product.kept = work, problem  # as long as somebody may call
        return {'gemm': lambda: common.check(self.c.bench_gemm(handle, product)),
                'results': lambda: {'c': rates.to_f32(out)}}


class Bf16(Ours):
    """This library's other product, a table entry for processors with bf16 instructions."""

    def __init__(self, options):
        super().__init__(options)
        for threads in options.threads:
            why = self.c.bench_use_bf16_gemm(self.open(threads))
            if why:
                raise LookupError(why.decode())
        self.about = self.c.bench_bf16_name().decode()

    def serve(self, problem, threads):
        return super().serve(problem, threads) if problem.dtype == 'bf16' else None


def load(name, package):
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise LookupError(f'{name} cannot be loaded (Debian and Ubuntu: apt-get install {package})') from error


class Blas:
    """A library with cblas_sgemm."""

    def __init__(self, lib, set_threads, about):
        self.lib, self.set_threads, self.about = lib, set_threads, about
        self.sgemm = lib.cblas_sgemm
        self.sgemm.argtypes = [ctypes.c_int] * 6 + [ctypes.c_float, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p,
                                                    ctypes.c_int, ctypes.c_float, ctypes.c_void_p, ctypes.c_int]

    def serve(self, problem, threads):
        if problem.dtype != 'f32':
            return None
        out = problem.out()
        row_major, plain, turned = 101, 111, 112  # of cblas.h
        given = [row_major, turned if problem.trans_a else plain, turned if problem.trans_b else plain, problem.m,
                 problem.n, problem.k, 1, address(problem.a), problem.a.shape[1], address(problem.b),
                 problem.b.shape[1], float(problem.accumulate), address(out), problem.n]

        def call():
            self.set_threads(threads)
            self.sgemm(*given)
        return {'gemm': call, 'results': lambda: {'c': out}}


def openblas(_):
    lib = load('libopenblas.so.0', 'libopenblas0-pthread')
    lib.openblas_get_config.restype = lib.openblas_get_corename.restype = ctypes.c_char_p
    version = b' '.join(lib.openblas_get_config().split()[:2] + [lib.openblas_get_corename()])
    return Blas(lib, lib.openblas_set_num_threads, version.decode())


def blis(_):
    lib = load('libblis.so.4', 'libblis4-pthread')
    lib.bli_info_get_version_str.restype = lib.bli_arch_string.restype = ctypes.c_char_p
    lib.bli_thread_set_num_threads.argtypes = [ctypes.c_int64]
    lib.bli_init()
    kernels = lib.bli_arch_string(lib.bli_arch_query_id()).decode()
    return Blas(lib, lib.bli_thread_set_num_threads, f'BLIS {lib.bli_info_get_version_str().decode()} {kernels}')


class OneDnn:
    """dnnl_sgemm, and dnnl_gemm_bf16bf16f32, which the library exports but does not document: f32 results. Its threads
    are OpenMP's."""

    def __init__(self, _):
        lib = load('libdnnl.so.2', 'libdnnl2')
        self.openmp = load('libgomp.so.1', 'libgomp1')
        self.entries = {'f32': lib.dnnl_sgemm, 'bf16': lib.dnnl_gemm_bf16bf16f32}
        for entry in self.entries.values():
            entry.argtypes = [ctypes.c_char] * 2 + [ctypes.c_int64] * 3 + \
                [ctypes.c_float, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_float,
                 ctypes.c_void_p, ctypes.c_int64]

        class Version(ctypes.Structure):
            _fields_ = [('parts', ctypes.c_int * 3)]
        lib.dnnl_version.restype = ctypes.POINTER(Version)
        self.about = 'oneDNN ' + '.'.join(map(str, lib.dnnl_version().contents.parts)) + \
            f', at most {os.environ.get("ONEDNN_MAX_CPU_ISA", "what there is")}'

    def serve(self, problem, threads):
        entry, out = self.entries[problem.dtype], problem.out()
        given = [b'T' if problem.trans_a else b'N', b'T' if problem.trans_b else b'N', problem.m, problem.n, problem.k,
                 1, address(problem.a), problem.a.shape[1], address(problem.b), problem.b.shape[1],
                 float(problem.accumulate), address(out), problem.n]

        def call():
            self.openmp.omp_set_num_threads(threads)
            if entry(*given) != 0:
                common.fail(f'oneDNN refused {problem.m} x {problem.n} x {problem.k} in {problem.dtype}')
        return {'gemm': call, 'results': lambda: {'c': out}}


# ---- measuring ----

class Gemm(rates.Rates):
    name, text, peers, ops, bounds = 'gemm', __doc__, PEERS, ['gemm'], BOUNDS
    rounds, quick = 7, {'tokens': [512], 'columns': [128], 'model_dims': [1024], 'rounds': 3}
    makers = {'ours': Ours, 'bf16': Bf16, 'openblas': openblas, 'blis': blis, 'onednn': OneDnn}
    head = ['shape', 'm x n x k', 'dtype', 'threads']

    def flags(self, parser):
        common.add_list(parser, '--shapes', 'shapes', SHAPES, SHAPES)
        common.add_list(parser, '--tokens', 'T', [2048, 8192])
        common.add_list(parser, '--columns', 'N', [128, 256, 512, 1024])
        common.add_list(parser, '--model-dims', 'D', [4096])
        common.add_list(parser, '--dtypes', 'storage types', list(DTYPES), list(DTYPES))
        common.add_list(parser, '--threads', 'numbers of threads', sorted({1, common.cores()}))

    def problems(self):
        for shape, dtype, threads in itertools.product(self.options.shapes, self.options.dtypes, self.options.threads):
            yield Problem(shape, *VALIDATED, dtype), threads

    def open(self):
        more = super().open()
        return {**more, 'peak_gflops': {n: round(1e-9 * self.ours.peak(n), 1) for n in self.options.threads}}

    def cases(self):
        given = self.options
        for shape, tokens, columns, model, dtype, threads in itertools.product(
                given.shapes, given.tokens, given.columns, given.model_dims, given.dtypes, given.threads):
            yield (f'{shape}, {tokens} tokens, {columns} columns, model dim {model}, {dtype}, '
                   f'{common.counted(threads)}', shape, tokens, columns, model, dtype, threads)

    def run(self, shape, tokens, columns, model, dtype, threads):
        return super().run(Problem(shape, tokens, columns, model, dtype), threads)

    def cells(self, line):
        return [line['shape'], f"{line['m']} x {line['n']} x {line['k']}", line['dtype'], str(line['threads'])]

    def picture(self, lines):
        """Shares of the peak over a stage's columns, of the most tokens and threads: a row a data type, a column a
        shape."""
        given = self.options
        threads, tokens, model = max(given.threads), max(given.tokens), max(given.model_dims)

        def panel(shape, dtype):
            # where a line has tokens, columns and the model dim
            t, n, d = {'qkv_nt': ('m', 'n', 'k'), 'dx_nn': ('m', 'k', 'n'), 'dw_tn': ('k', 'm', 'n')}[shape]
            shown = [line for line in lines if (line['shape'], line['dtype'], line['threads'], line[t], line[d]) ==
                     (shape, dtype, threads, tokens, model)]
            curves = [self.curve(name, shown, lambda line, rate: (line[n], 100 * rate / line['peak_gflops']),
                                 picture.SOLID) for name in ['ours', *self.names]]
            return picture.Panel(f'{shape}, {dtype}', curves, x='columns of a stage', y='% of the f32 peak')
        picture.draw(given.chart, f'Products of {tokens} tokens, model dim {model}, {common.counted(threads)}: '
                     f'{self.header["machine"]}',
                     [[panel(shape, dtype) for shape in given.shapes] for dtype in given.dtypes],
                     self.legend(), bold=common.COLOURS['ours'], tick=str)


def choose_kernels(isa):
    """Tells OpenBLAS and BLIS, which read it as they are loaded, the first by NumPy perhaps."""
    if isa == 'native':
        known = common.features()
        isa = 'avx512_bf16' if 'avx512_bf16' in known else 'avx512' if 'avx512f' in known else 'avx2'
    os.environ.update(CORES[isa])
    os.environ['OPENBLAS_THREAD_TIMEOUT'] = '10'  # its threads spin for 2^26 ticks otherwise, into the next one's turn


if __name__ == '__main__':
    benchmark = Gemm()
    choose_kernels(benchmark.read().peer_isa)
    import numpy as np
    sys.exit(benchmark.main())

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

PEERS = ['openblas', 'blis', 'onednn', 'bf16']
SHAPES = ['qkv_nt', 'dx_nn', 'dw_tn']
TRANS_A, TRANS_B, ACCUMULATE = 1, 2, 4
FLAGS = {'qkv_nt': TRANS_B, 'dx_nn': 0, 'dw_tn': TRANS_A | ACCUMULATE}
DTYPES = {'f32': 0, 'bf16': 1}  # upipe_dtype
COLOURS = {'ours': '#e07a5f', 'openblas': '#3b4252', 'blis': '#81a969', 'onednn': '#2a9d8f', 'bf16': '#f2a65a'}
# What libraries call their kernels.
CORES = {'avx2': {'OPENBLAS_CORETYPE': 'Haswell', 'BLIS_ARCH_TYPE': '3'},
         'avx512': {'OPENBLAS_CORETYPE': 'SkylakeX', 'BLIS_ARCH_TYPE': '0'},
         'avx512_bf16': {'OPENBLAS_CORETYPE': 'Sapphirerapids', 'BLIS_ARCH_TYPE': '0'}}
# Largest error of a result over its largest value: f32 sums; bf16 rounds Y by 2e-3 of itself.
BOUNDS = {'f32': 2e-5, 'bf16': 5e-3}
VALIDATED = 70, 100, 400  # tokens, columns, model dim
ALIGN = 64


def read_options():
    common.PACKAGES.clear()  # these peers are no Python packages
    parser = common.arguments(__doc__, PEERS)
    common.add_list(parser, '--shapes', 'shapes', SHAPES, SHAPES)
    common.add_list(parser, '--tokens', 'T', [2048, 8192])
    common.add_list(parser, '--columns', 'N', [128, 256, 512, 1024])
    common.add_list(parser, '--model-dims', 'D', [4096])
    common.add_list(parser, '--dtypes', 'storage types', list(DTYPES), list(DTYPES))
    common.add_list(parser, '--threads', 'numbers of threads', sorted({1, common.cores()}))
    parser.add_argument('--rounds', type=int, default=7, metavar='N', help='turns of everyone (7)')
    options = common.parse(parser, 'gemm')
    if options.quick:
        options.tokens, options.columns, options.model_dims, options.rounds = [512], [128], [1024], 3
    if options.rounds < 1 or min(options.tokens + options.columns + options.model_dims + options.threads) < 1:
        parser.error('rounds, tokens, columns, model dims and threads are positive')
    return options


# ---- one product ----

class Product(ctypes.Structure):
    """bench_product of gemm.c."""
    _fields_ = [(name, ctypes.c_void_p) for name in ('c', 'a', 'b', 'work')] + \
               [(name, ctypes.c_int64) for name in ('work_bytes', 'm', 'n', 'k')] + \
               [(name, ctypes.c_int32) for name in ('flags', 'dtype', 'out_dtype')]


def to_bf16(values):
    """The upper halves of f32, to nearest even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7fff + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def to_f32(values):
    return values if values.dtype == np.float32 else (values.astype(np.uint32) << 16).view(np.float32)


def address(array):
    return array.ctypes.data_as(ctypes.c_void_p)


class Problem:
    """Operands, as stored, and a c for everyone."""

    def __init__(self, shape, tokens, columns, model, dtype):
        self.shape, self.dtype, self.flags = shape, dtype, FLAGS[shape]
        self.m, self.n, self.k = {'qkv_nt': (tokens, columns, model), 'dx_nn': (tokens, model, columns),
                                  'dw_tn': (columns, model, tokens)}[shape]
        self.trans_a, self.trans_b = bool(self.flags & TRANS_A), bool(self.flags & TRANS_B)
        self.accumulate = bool(self.flags & ACCUMULATE)
        random = np.random.default_rng(1)
        shapes = [(self.k, self.m) if self.trans_a else (self.m, self.k),
                  (self.n, self.k) if self.trans_b else (self.k, self.n)]
        self.a, self.b = [random.standard_normal(size, dtype=np.float32) for size in shapes]
        if dtype == 'bf16':
            self.a, self.b = to_bf16(self.a), to_bf16(self.b)
        self.out_dtype = 'bf16' if dtype == 'bf16' and shape == 'qkv_nt' else 'f32'

    def out(self, dtype='f32'):
        return np.zeros((self.m, self.n), np.uint16 if dtype == 'bf16' else np.float32)

    def flop(self):
        return 2.0 * self.m * self.n * self.k

    def reference(self):
        a, b = to_f32(self.a).astype(np.float64), to_f32(self.b).astype(np.float64)
        return (a.T if self.trans_a else a) @ (b.T if self.trans_b else b)


# ---- who multiplies: serve(problem, threads) gives a call and the c that it writes, or None ----

class Ours:
    def __init__(self, options):
        lib = common.compile_library('gemm.c', options.isa)
        lib.bench_open.restype = ctypes.c_void_p
        lib.bench_close.argtypes = [ctypes.c_void_p]
        lib.bench_peak.argtypes, lib.bench_peak.restype = [ctypes.c_void_p], ctypes.c_double
        lib.bench_name.argtypes, lib.bench_name.restype = [ctypes.c_void_p], ctypes.c_char_p
        lib.bench_gemm.argtypes, lib.bench_gemm.restype = [ctypes.c_void_p] * 2, ctypes.c_char_p
        lib.bench_gemm_bytes.argtypes, lib.bench_gemm_bytes.restype = [ctypes.c_void_p] * 2, ctypes.c_int64
        self.lib, self.benches = lib, {}
        for threads in options.threads:
            self.benches[threads] = lib.bench_open(threads)
            if not self.benches[threads]:
                common.fail(f'no memory for {threads} threads')
        self.about = lib.bench_name(self.benches[options.threads[0]]).decode()

    def peak(self, threads):
        return self.lib.bench_peak(self.benches[threads])

    def serve(self, problem, threads):
        bench, out = self.benches[threads], problem.out(problem.out_dtype)
        product = Product(address(out), address(problem.a), address(problem.b), None, 0, problem.m, problem.n,
                          problem.k, problem.flags, DTYPES[problem.dtype], DTYPES[problem.out_dtype])
        product.work_bytes = self.lib.bench_gemm_bytes(bench, ctypes.addressof(product))
        work = np.zeros(product.work_bytes + ALIGN, np.uint8)
        product.work = work.ctypes.data + -work.ctypes.data % ALIGN

        def call(work=work):  # which it keeps
            why = self.lib.bench_gemm(bench, ctypes.addressof(product))
            if why:
                common.fail(f'ours: {why.decode()}')
        return call, out

    def close(self):
        for bench in self.benches.values():
            self.lib.bench_close(bench)


class Bf16(Ours):
    """This library's other product, a table entry for processors with bf16 instructions."""

    def __init__(self, options):
        super().__init__(options)
        self.lib.bench_use_bf16_gemm.argtypes = [ctypes.c_void_p]
        self.lib.bench_use_bf16_gemm.restype = self.lib.bench_bf16_name.restype = ctypes.c_char_p
        for bench in self.benches.values():
            why = self.lib.bench_use_bf16_gemm(bench)
            if why:
                raise LookupError(why.decode())
        self.about = self.lib.bench_bf16_name().decode()

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
        return call, out


def openblas():
    lib = load('libopenblas.so.0', 'libopenblas0-pthread')
    lib.openblas_get_config.restype = lib.openblas_get_corename.restype = ctypes.c_char_p
    version = b' '.join(lib.openblas_get_config().split()[:2] + [lib.openblas_get_corename()])
    return Blas(lib, lib.openblas_set_num_threads, version.decode())


def blis():
    lib = load('libblis.so.4', 'libblis4-pthread')
    lib.bli_info_get_version_str.restype = lib.bli_arch_string.restype = ctypes.c_char_p
    lib.bli_thread_set_num_threads.argtypes = [ctypes.c_int64]
    lib.bli_init()
    kernels = lib.bli_arch_string(lib.bli_arch_query_id()).decode()
    return Blas(lib, lib.bli_thread_set_num_threads, f'BLIS {lib.bli_info_get_version_str().decode()} {kernels}')


class OneDnn:
    """dnnl_sgemm, and dnnl_gemm_bf16bf16f32, which the library exports but does not document: f32 results. Its threads
    are OpenMP's."""

    def __init__(self):
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
        return call, out


CONTESTANTS = {'openblas': openblas, 'blis': blis, 'onednn': OneDnn}


# ---- measuring ----

def validate(contestants, options):
    """The largest error of everyone; ends the program where it is above the bound."""
    worst = {name: {} for name in contestants}
    for shape, dtype, threads in itertools.product(options.shapes, options.dtypes, options.threads):
        problem = Problem(shape, *VALIDATED, dtype)
        truth = problem.reference()
        for name, contestant in contestants.items():
            served = contestant.serve(problem, threads)
            if served is None:
                continue
            call, out = served
            call()
            error = float(abs(to_f32(out) - truth).max() / abs(truth).max())
            if not error <= BOUNDS[dtype]:
                common.fail(f'{name} is wrong: {shape} in {dtype} on {threads} threads differs by {error:.1e} from '
                            f'double precision, of at most {BOUNDS[dtype]:g}')
            worst[name][dtype] = max(error, worst[name].get(dtype, 0))
    return {name: {dtype: float(f'{error:.1e}') for dtype, error in errors.items()} for name, errors in worst.items()}


def measure(contestants, problem, threads, rounds):
    served = {name: contestant.serve(problem, threads) for name, contestant in contestants.items()}
    calls = {name: pair[0] for name, pair in served.items() if pair is not None}
    peaks = []
    calls['peak'] = lambda: peaks.append(contestants['ours'].peak(threads))
    seconds = common.alternate(calls, rounds)
    return {'op': 'gemm', 'shape': problem.shape, 'm': problem.m, 'n': problem.n, 'k': problem.k, 'dtype': problem.dtype,
            'threads': threads, **common.rates_of(seconds, peaks, problem.flop())}


def print_case(line, names):
    common.table_line([line['shape'], f"{line['m']} x {line['n']} x {line['k']}", line['dtype'], str(line['threads']),
                       *common.rate_cells(line, names)])


def draw(cases, names, title, path):
    """Shares of the peak over a stage's columns: a row a data type, a column a shape; the most tokens and threads."""
    plt = common.pyplot()
    if plt is None:
        return
    threads = max(case['threads'] for case in cases)
    # where a line has tokens, columns and the model dim
    where = {'qkv_nt': ('m', 'n', 'k'), 'dx_nn': ('m', 'k', 'n'), 'dw_tn': ('k', 'm', 'n')}
    sizes = {tuple(case[where[case['shape']][i]] for i in (0, 2)) for case in cases}
    tokens, model = max(sizes)
    shapes = [shape for shape in SHAPES if any(case['shape'] == shape for case in cases)]
    dtypes = [dtype for dtype in DTYPES if any(case['dtype'] == dtype for case in cases)]
    figure, panels = plt.subplots(len(dtypes), len(shapes), figsize=(3.4 * len(shapes) + 1.6, 2.8 * len(dtypes) + 0.8),
                                  sharex=True, sharey=True, squeeze=False)
    for (row, dtype), (column, shape) in itertools.product(enumerate(dtypes), enumerate(shapes)):
        axes = panels[row][column]
        at = where[shape]
        shown = [case for case in cases if (case['shape'], case['dtype'], case['threads'], case[at[0]], case[at[2]]) ==
                 (shape, dtype, threads, tokens, model)]
        for name in ['ours', *names]:
            points = sorted((case[at[1]], 100 * rate / case['peak_gflops']) for case in shown
                            for rate in [case['gflops'] if name == 'ours' else case['peers'].get(name)] if rate)
            if points:
                axes.plot(*zip(*points), color=COLOURS[name], marker='o', markersize=3,
                          linewidth=2 if name == 'ours' else 1.3, label='upipe' if name == 'ours' else name)
        axes.set_xscale('log', base=2)
        ticks = sorted({case[at[1]] for case in shown})
        axes.set_xticks(ticks, map(str, ticks))
        axes.set_title(f'{shape}, {dtype}', fontsize=10)
        common.tidy(axes)
    panels[0][0].set_ylim(bottom=0)
    for row in panels:
        row[0].set_ylabel('% of the f32 peak')
    for axes in panels[-1]:
        axes.set_xlabel('columns of a stage')
    common.finish(figure, *panels[0][0].get_legend_handles_labels(), f'Products of {tokens} tokens, model dim {model}, {threads} '
                  f'{"thread" if threads == 1 else "threads"}: {title}', path)


def choose_kernels(isa):
    """Tells OpenBLAS and BLIS, which read it as they are loaded, the first by NumPy perhaps."""
    if isa == 'native':
        known = common.features()
        isa = 'avx512_bf16' if 'avx512_bf16' in known else 'avx512' if 'avx512f' in known else 'avx2'
    os.environ.update(CORES[isa])
    os.environ['OPENBLAS_THREAD_TIMEOUT'] = '10'  # its threads spin for 2^26 ticks otherwise, into the next one's turn


def main(options):
    makers = {'ours': lambda: Ours(options), 'bf16': lambda: Bf16(options), **CONTESTANTS}
    contestants, left_out = common.contestants(makers, ['ours', *options.peers])
    ours, names = contestants['ours'], [name for name in contestants if name != 'ours']
    common.log('validating against double precision')
    more = {'isa': options.isa, 'peer_isa': options.peer_isa,
            'contestants': {name: contestant.about for name, contestant in contestants.items()}, 'left_out': left_out,
            'errors': validate(contestants, options),
            'peak_gflops': {threads: round(1e-9 * ours.peak(threads), 1) for threads in options.threads}}
    cases = list(itertools.product(options.shapes, options.tokens, options.columns, options.model_dims, options.dtypes,
                                   options.threads))
    with common.Lines(options.json, more) as lines:
        lines.print_header()
        common.table_head(['shape', 'm x n x k', 'dtype', 'threads', 'GFLOP/s', 'of the peak', *names])
        for number, (shape, tokens, columns, model, dtype, threads) in enumerate(cases):
            common.log(f'{number + 1} of {len(cases)}: {shape}, {tokens} tokens, {columns} columns, model dim {model}, '
                       f'{dtype}, {threads} threads')
            line = measure(contestants, Problem(shape, tokens, columns, model, dtype), threads, options.rounds)
            lines.write(line)
            print_case(line, names)
        draw(lines.cases, names, lines.header['machine'], options.chart)
    ours.close()
    common.log(f'numbers: {options.json}')
    return 0


if __name__ == '__main__':
    given = read_options()  # before NumPy is needed: run.sh asks what to install with a Python that may lack it
    choose_kernels(given.peer_isa)
    import numpy as np
    sys.exit(main(given))

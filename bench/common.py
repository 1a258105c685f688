"""common.py -- what the benchmarks share: command line, machine, compiling, files, table; a benchmark's frame

A benchmark is a script bench/NAME.py that `sh bench/run.sh NAME` starts with a Python that has NumPy: a Benchmark
with a table of cases and a function that runs one. Its files are JSON lines: first the header (machine, compiler,
command, and what the benchmark adds), then one line a case, with the fields of CASE that say which case it is, and
measured values, of which compare.py knows those in BETTER. Who times contestants against each other is a Rates
(rates.py).
"""

import argparse
import ctypes
import datetime
import json
import os
import platform
import re
import shlex
import subprocess
import sys

TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BUILD = os.path.join(TOP, 'build', 'bench')
PROGRAM = os.path.basename(sys.argv[0])

ISA_FLAGS = {'native': ['-march=native'], 'avx2': ['-mavx2', '-mfma'], 'portable': ['-DUPIPE_CPU_PORTABLE']}
C_FLAGS = ['-std=c11', '-D_POSIX_C_SOURCE=200809L', '-O3', '-g1', '-Wall', '-Wextra', '-I', TOP]

# The most that libraries may use of the processor, in their own words, read as they are loaded. avx512 ends before AMX.
PEER_ISA = {
    'avx2': {'ATEN_CPU_CAPABILITY': 'avx2', 'ONEDNN_MAX_CPU_ISA': 'AVX2', 'MKL_ENABLE_INSTRUCTIONS': 'AVX2'},
    'avx512': {'ATEN_CPU_CAPABILITY': 'avx512', 'ONEDNN_MAX_CPU_ISA': 'AVX512_CORE_BF16',
               'MKL_ENABLE_INSTRUCTIONS': 'AVX512_E3'},
}

# Fields that say which case a line is about.
CASE = ['op', 'method', 'form', 'rule', 'gate', 'head_dim', 'v_dim', 'dtype', 'data', 'causal', 'window', 'sequences',
        'softcap', 'heads', 'kv_heads', 'model_dim', 'rows', 'cols', 'depth', 'shape', 'm', 'n', 'k', 'd', 'block_bytes',
        'ranks', 'ring', 'segments', 'chunk', 'tokens', 'threads', 'products']
# Measured fields: 1 where more is better, -1 where less is.
BETTER = {'gflops': 1, 'gbytes_per_s': 1, 'seconds': -1, 'forward_s': -1, 'backward_s': -1, 'l2': -1}
# Everyone's colour in a picture.
COLOURS = {'ours': '#e07a5f', 'torch': '#3b4252', 'onednn': '#2a9d8f', 'ggml': '#81a969', 'naive': '#c3cede',
           'bf16': '#f2a65a', 'openblas': '#3b4252', 'blis': '#81a969'}


def log(sentence):
    print(f'{PROGRAM}: {sentence}', file=sys.stderr, flush=True)


def fail(sentence):
    log(sentence)
    sys.exit(1)


# ---- the command line ----

def positive(text):
    """An argparse type: a whole number, 1 at least."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f'{text} is no positive whole number')
    return int(text)


def listed(allowed):
    """An argparse type: words of `allowed`, or positive numbers, with commas between them; none twice."""
    def parse(text):
        words = [word for word in text.split(',') if word]
        values = words if allowed else [positive(word) for word in words]
        unknown = [word for word in words if allowed and word not in allowed]
        if unknown or not values:
            raise argparse.ArgumentTypeError(f'{", ".join(unknown) or "an empty list"}: not of '
                                             f'{", ".join(allowed or ["a number"])}')
        if len(set(values)) < len(values):
            raise argparse.ArgumentTypeError(f'{text}: one is given twice')
        return values
    return parse


def add_list(parser, flag, about, default, allowed=None):
    """A flag with a list: of words that are allowed, or of numbers."""
    shown = '' if default is None else f' ({",".join(map(str, default))})'
    parser.add_argument(flag, type=listed(allowed), default=default, metavar='LIST', help=about + shown)


def contestants(makers, names, *arguments_of):
    """Those of them that can be measured here, by name, and why the others are left out."""
    found, left_out = {}, {}
    for name in names:
        try:
            found[name] = makers[name](*arguments_of)
        except LookupError as error:
            left_out[name] = str(error)
            log(f'left out: {name}: {error}')
    return found, left_out


class Benchmark:
    """What is read from the command line, done before and after the cases, written and shown. A script fills in:

        name, text     of the script and its files; what --help says
        peers          who can be measured beside ours
        packages       {peer: what it needs of PyPI}
        rounds         the default of --rounds; None: there is no such flag
        quick          options of --quick
        head           columns of the table; none: the benchmark prints tables of its own

    and what is below. NumPy is imported after read(): run.sh asks what to install with a Python that may lack it.
    """
    name = text = ''
    peers, packages, rounds, quick, head = [], {}, None, {}, []

    def flags(self, parser):
        """Adds flags."""

    def refuse(self, options):
        """A sentence about flags that do not go together."""

    def open(self):
        """Compiles, loads and validates what is measured. What the header says beside machine, compiler and command."""
        return {}

    def cases(self):
        """(what the log says of a case, arguments of run)"""
        return []

    def run(self, *case):
        """Yields the lines of a case."""

    def row(self, line):
        """A line's cells."""

    def end(self, lines):
        """Prints what stands below the table."""

    def picture(self, lines):
        """Draws options.chart."""

    def parser(self):
        parser = argparse.ArgumentParser(description=self.text, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument('--quick', action='store_true', help='a few small cases, to see that it works')
        parser.add_argument('--json', metavar='FILE', help='where the numbers go (build/bench/COMMAND.json)')
        parser.add_argument('--chart', metavar='FILE', help='where the picture goes (beside the numbers, as .png)')
        parser.add_argument('--isa', choices=sorted(ISA_FLAGS), default='native',
                            help='instructions that our kernels are compiled for (native)')
        if self.peers:
            add_list(parser, '--peers', f'who is measured beside ours, of {",".join(self.peers)}, or none (all)', None,
                     ['none', *self.peers])
            parser.add_argument('--peer-isa', choices=['native', *sorted(PEER_ISA)], default='native',
                                help='the most that torch and oneDNN may use (native: AMX too where there is AMX)')
        if self.rounds:
            parser.add_argument('--rounds', type=positive, metavar='N',
                                help=f'turns of all that is compared ({self.rounds})')
        parser.add_argument('--needs', action='store_true', help='print the packages that these flags need, and end')
        self.flags(parser)
        return parser

    def read(self):
        """Reads the command line; answers --needs; fills in defaults."""
        parser = self.parser()
        options = self.options = parser.parse_args()
        if self.rounds and options.rounds is None:
            options.rounds = self.rounds
        vars(options).update(self.quick if options.quick else {})
        options.peers = [peer for peer in getattr(options, 'peers', None) or self.peers if peer != 'none']
        refused = self.refuse(options)
        if refused:
            parser.error(refused)
        if options.needs:
            print(*dict.fromkeys(package for peer in options.peers for package in self.packages.get(peer, [])))
            sys.exit(0)
        os.makedirs(BUILD, exist_ok=True)
        options.json = os.path.abspath(options.json or os.path.join(BUILD, f'{self.name}.json'))
        options.chart = os.path.abspath(options.chart or os.path.splitext(options.json)[0] + '.png')
        for path in options.json, options.chart:
            if not os.access(os.path.dirname(path), os.W_OK):
                parser.error(f'{path} cannot be written')
        os.environ.update(PEER_ISA.get(getattr(options, 'peer_isa', None), {}))
        return options

    def main(self):
        options = self.options
        more = {'isa': options.isa, **({'peer_isa': options.peer_isa} if self.peers else {}), **self.open()}
        cases = list(self.cases())
        with Lines(options.json, more) as lines:
            lines.print_header()
            if self.head:
                print_table(self.head)
            for number, (about, *case) in enumerate(cases):
                log(f'{number + 1} of {len(cases)}: {about}')
                for line in self.run(*case):
                    lines.write(line)
                    if self.head:
                        print(table(self.row(line))[0], flush=True)
            self.header = lines.header
            self.end(lines.cases)
            self.picture(lines.cases)
        log(f'numbers: {options.json}')
        return 0


# ---- machine and compiler ----

def processor():
    """The processor's name, where the system says it."""
    try:
        with open('/proc/cpuinfo', encoding='utf-8') as source:
            found = re.search(r'^model name\s*:\s*(.+)$', source.read(), re.M)
        return found.group(1) if found else platform.processor()
    except OSError:
        return platform.processor()


def features():
    """Vector and matrix instructions of the processor that matter here."""
    try:
        with open('/proc/cpuinfo', encoding='utf-8') as source:
            flags = re.search(r'^flags\s*:\s*(.+)$', source.read(), re.M)
    except OSError:
        flags = None
    known = ['avx2', 'fma', 'avx512f', 'avx512_bf16', 'avx512_fp16', 'amx_tile', 'amx_bf16']
    return [flag for flag in known if flags and flag in flags.group(1).split()]


def cores():
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()


def compiler():
    return shlex.split(os.environ.get('CC', 'gcc'))


def own_flags():
    return shlex.split(os.environ.get('CFLAGS', ''))


def compiler_line():
    done = subprocess.run([*compiler(), '--version'], stdout=subprocess.PIPE, text=True, check=False)
    name = done.stdout.split('\n')[0].strip() if done.returncode == 0 else ' '.join(compiler())
    return ' '.join([name, *own_flags()])


def accepts(*flags):
    """Whether the compiler makes a program with these flags."""
    command = [*compiler(), *flags, '-x', 'c', '-', '-o', os.devnull]
    return subprocess.run(command, input='int main(void) { return 0; }', stderr=subprocess.DEVNULL, text=True,
                          check=False).returncode == 0


def compile_unit(source, made, flags):
    """bench/SOURCE into build/bench/MADE; ends the program if it cannot be compiled."""
    os.makedirs(BUILD, exist_ok=True)
    target = os.path.join(BUILD, made)
    command = [*compiler(), *C_FLAGS, *own_flags(), *flags, os.path.join(TOP, 'bench', source), '-o', target]
    if subprocess.run(command, cwd=TOP, check=False).returncode != 0:
        fail(f'failed: {" ".join(command)}')
    return target


def compile_library(source, isa, flags=(), libraries=()):
    """The C file as a shared object for these instructions, loaded. Compiled and linked apart: -Ofast, say, would link
    what changes the arithmetic of the whole process."""
    name = f'{os.path.splitext(source)[0]}_{isa}'
    made = compile_unit(source, f'{name}.o', ['-c', '-fPIC', *ISA_FLAGS[isa], *flags])
    target = os.path.join(BUILD, f'{name}.so')
    command = [*compiler(), '-shared', made, '-o', target, *libraries, '-lm', '-pthread']
    if subprocess.run(command, cwd=TOP, check=False).returncode != 0:
        fail(f'failed: {" ".join(command)}')
    return ctypes.CDLL(target)


def declare(library, *entries):
    """Types of a library's functions: (name, result, types of the arguments)."""
    for name, result, types in entries:
        function = getattr(library, name)
        function.restype, function.argtypes = result, types


def aligned(count):
    """So many bytes for scratch, from a multiple of 64 on."""
    import numpy
    whole = numpy.zeros(count + 64, numpy.uint8)
    first = -whole.ctypes.data % 64
    return whole[first:first + count]


def check(why):
    """Ends the program with the sentence that a call gives where it fails."""
    if why:
        fail(why.decode())


class Kernels:
    """A C file that is kernels.c or includes it, loaded, with the functions that are declared; its handles by number of
    threads."""

    def __init__(self, source, isa, *entries):
        self.c, self.handles = compile_library(source, isa), {}
        pointer = ctypes.c_void_p
        declare(self.c, ('bench_open', pointer, [ctypes.c_int32]), ('bench_name', ctypes.c_char_p, [pointer]),
                ('bench_peak', ctypes.c_double, [pointer]), *entries)
        self.about = self.c.bench_name(self.open(1)).decode()

    def open(self, threads):
        """The handle of so many threads, opened once."""
        if threads not in self.handles:
            self.handles[threads] = self.c.bench_open(threads)
            if not self.handles[threads]:
                fail(f'no {threads} threads, or no memory for them')
        return self.handles[threads]

    def peak(self, threads):
        """FLOP/s of fused multiply-adds with the vectors that our kernels use."""
        return self.c.bench_peak(self.open(threads))


# ---- files of numbers ----

class Lines:
    """A file of JSON lines, the header first; each line is there as soon as it is written."""

    def __init__(self, path, more):
        self.path = path
        self.out = open(path, 'w', encoding='utf-8')  # closed by __exit__
        self.header = {'machine': f'{processor()}, {cores()} cores', 'features': features(),
                       'compiler': compiler_line(), 'command': ' '.join([PROGRAM, *map(shlex.quote, sys.argv[1:])]),
                       'date': datetime.datetime.now(datetime.timezone.utc).strftime('%Y-%m-%d'), **more}
        self.cases = []
        self.put(self.header)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.out.close()

    def put(self, line):
        self.out.write(json.dumps(line) + '\n')
        self.out.flush()

    def print_header(self):
        for key, value in self.header.items():
            print(f'{key}: {value}')
        print()

    def write(self, case):
        self.cases.append(case)
        self.put(case)


def read_lines(path):
    """The header and the cases of such a file; a ValueError says what is wrong with it."""
    with open(path, encoding='utf-8') as source:
        try:
            lines = [json.loads(line) for line in source]
        except json.JSONDecodeError as error:
            raise ValueError(f'{path} is no file of JSON lines: {error}') from error
    if not lines or not all(isinstance(line, dict) for line in lines) or 'machine' not in lines[0]:
        raise ValueError(f'{path} does not begin with a line of machine, compiler and command')
    if not all('op' in line for line in lines[1:]):
        raise ValueError(f'{path} has a line without "op"')
    return lines[0], lines[1:]


# ---- tables ----

def table(head, rows=()):
    """Lines of a table in Markdown."""
    lines = [f'| {" | ".join(map(str, cells))} |' for cells in (head, *rows)]
    return [lines[0], '|' + '---|' * len(head), *lines[1:]]


def print_table(head, rows=()):
    print(*table(head, rows), sep='\n', flush=True)


def amount(tokens):
    """512, 4k, 1M."""
    return f'{tokens >> 20}M' if tokens % (1 << 20) == 0 else f'{tokens >> 10}k' if tokens % 1024 == 0 else str(tokens)


def counted(number, what='thread'):
    return f'{number} {what}' if number == 1 else f'{number} {what}s'

"""common.py -- what the benchmarks share: the machine's line, compiling, alternating timers, JSON lines, charts

A benchmark is a script bench/NAME.py that `sh bench/run.sh NAME` starts with a Python that has NumPy. Its files are
JSON lines: first the header (machine, compiler, command, and what the benchmark adds), then one line a case, with the
fields of CASE that say which case it is, and measured values, of which compare.py knows those in BETTER.

    options = common.arguments(__doc__, default_peers).parse_args()
    library = common.compile_library('kernels.c', options.isa)
    with common.Lines(options.json, {'isa': options.isa}) as lines:
        seconds = common.alternate({'ours': ours, 'torch': theirs}, rounds=5)
        lines.write({'op': 'attn_fwd', 'tokens': 1024, 'gflops': 2e-9 * flop / statistics.median(seconds['ours'])})
"""

import argparse
import ctypes
import datetime
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time

TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BUILD = os.path.join(TOP, 'build', 'bench')
PROGRAM = os.path.basename(sys.argv[0])

ISA_FLAGS = {'native': ['-march=native'], 'avx2': ['-mavx2', '-mfma'], 'portable': ['-DUPIPE_CPU_PORTABLE']}
C_FLAGS = ['-std=c11', '-D_POSIX_C_SOURCE=200809L', '-O3', '-g1', '-Wall', '-Wextra', '-I', TOP]

# What PyPI calls the packages of a peer. oneDNN is the one in PyTorch, and llama-cpp-python carries ggml's sources.
PACKAGES = {'torch': ['torch'], 'onednn': ['torch'], 'ggml': ['cmake', 'llama-cpp-python:source']}
# The most that libraries may use of the processor, in their own words, read as they are loaded. avx512 ends before AMX.
PEER_ISA = {
    'avx2': {'ATEN_CPU_CAPABILITY': 'avx2', 'ONEDNN_MAX_CPU_ISA': 'AVX2', 'MKL_ENABLE_INSTRUCTIONS': 'AVX2'},
    'avx512': {'ATEN_CPU_CAPABILITY': 'avx512', 'ONEDNN_MAX_CPU_ISA': 'AVX512_CORE_BF16',
               'MKL_ENABLE_INSTRUCTIONS': 'AVX512_E3'},
}

# Fields that say which case a line is about.
CASE = ['op', 'method', 'rule', 'gate', 'head_dim', 'dtype', 'data', 'causal', 'window', 'sequences', 'softcap', 'heads', 'kv_heads',
        'model_dim', 'rows', 'cols', 'depth', 'shape', 'm', 'n', 'k', 'd', 'block_bytes', 'ranks', 'ring', 'segments',
        'chunk', 'tokens', 'threads', 'products']
# Measured fields: 1 where more is better, -1 where less is.
BETTER = {'gflops': 1, 'gbytes_per_s': 1, 'seconds': -1, 'forward_s': -1, 'backward_s': -1, 'l2': -1}

REST = 0.01  # seconds between two turns, in which the threads of the one before stop to look for work


def log(sentence):
    print(f'{PROGRAM}: {sentence}', file=sys.stderr, flush=True)


def fail(sentence):
    log(sentence)
    sys.exit(1)


# ---- the command line ----

def listed(allowed, kind=str):
    """An argparse type: words of `allowed` with commas between them; every word goes if `allowed` is None."""
    def parse(text):
        words = [word for word in text.split(',') if word]
        try:
            values = [kind(word) for word in words]
        except ValueError as error:
            raise argparse.ArgumentTypeError(f'{text} is no list of numbers') from error
        unknown = [str(value) for value in values if allowed is not None and value not in allowed]
        if unknown or not values:
            raise argparse.ArgumentTypeError(f'{", ".join(unknown) or "an empty list"}: not of '
                                             f'{", ".join(map(str, allowed or ["a number"]))}')
        return values
    return parse


def add_list(parser, flag, about, default, allowed=None):
    """A flag with a list: of words that are allowed, or of numbers."""
    shown = '' if default is None else f' ({",".join(map(str, default))})'
    parser.add_argument(flag, type=listed(allowed, str if allowed else int), default=default, metavar='LIST', help=about + shown)


def arguments(text, peers):
    """The flags that all benchmarks share. `peers`: what can be measured beside ours."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--quick', action='store_true', help='a few small cases, to see that it works')
    parser.add_argument('--json', metavar='FILE', help='where the numbers go (build/bench/COMMAND.json)')
    parser.add_argument('--chart', metavar='FILE', help='where the picture goes (beside the numbers, as .png)')
    parser.add_argument('--isa', choices=sorted(ISA_FLAGS), default='native',
                        help='instructions that our kernels are compiled for (native)')
    if peers:
        parser.add_argument('--peers', type=listed(['none', *peers]), default=peers, metavar='LIST',
                            help=f'who is measured beside ours, of {",".join(peers)}, or none (all)')
        parser.add_argument('--peer-isa', choices=['native', *sorted(PEER_ISA)], default='native',
                            help='the most that torch and oneDNN may use (native: AMX too where there is AMX)')
    parser.add_argument('--needs', action='store_true', help='print the packages that these flags need, and end')
    return parser


def parse(parser, name):
    """Reads the command line; answers --needs; fills the defaults of file names."""
    options = parser.parse_args()
    options.peers = [peer for peer in getattr(options, 'peers', []) if peer != 'none']
    if options.needs:
        print(*dict.fromkeys(package for peer in options.peers for package in PACKAGES.get(peer, [])))
        sys.exit(0)
    os.makedirs(BUILD, exist_ok=True)
    options.json = os.path.abspath(options.json or os.path.join(BUILD, f'{name}.json'))
    options.chart = os.path.abspath(options.chart or os.path.splitext(options.json)[0] + '.png')
    for path in options.json, options.chart:
        if not os.access(os.path.dirname(path), os.W_OK):
            parser.error(f'{path} cannot be written')
    os.environ.update(PEER_ISA.get(getattr(options, 'peer_isa', None), {}))
    return options


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


def compile_program(source, isa, flags=()):
    """The C file as a program for these instructions: its path."""
    return compile_unit(source, f'{os.path.splitext(source)[0]}_{isa}', [*ISA_FLAGS[isa], *flags, '-lm', '-pthread'])


# ---- measuring ----

def alternate(calls, rounds, slow=20, clock=time.perf_counter):
    """Seconds of every call in every round: {name: [seconds, ...]}. They take turns, in the opposite order every other
    round; each is called once before. One that takes more than `slow` seconds then has its turn in the first round
    only."""
    first = {}
    for name, call in calls.items():
        start = clock()
        call()
        first[name] = clock() - start
    seconds = {name: [] for name in calls}
    for turn in range(rounds):
        names = [name for name in calls if turn == 0 or first[name] < slow]
        for name in names if turn % 2 == 0 else names[::-1]:
            time.sleep(REST)
            start = clock()
            calls[name]()
            seconds[name].append(clock() - start)
    return seconds


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


# ---- tables and charts ----

def table_line(cells):
    print('| ' + ' | '.join(cells) + ' |', flush=True)


def table_head(cells):
    table_line(cells)
    table_line(['---'] * len(cells))


def rate_cells(line, names):
    """Our rate, its share of the peak, and those of these peers, with ours over theirs."""
    rates = [line['peers'].get(name) for name in names] if names else []
    return [f"{line['gflops']:.1f}", f"{100 * line['gflops'] / line['peak_gflops']:.0f} % of {line['peak_gflops']:.0f}",
            *(f"{rate:.1f}, {line['gflops'] / rate:.2f}x" if rate else '-' for rate in rates)]


def rates_of(seconds, peaks, flop):
    """What a line says of ours, the peak and the peers, from everyone's seconds in each round."""
    rates = {name: 1e-9 * flop / statistics.median(values) for name, values in seconds.items()}
    return {'gflops': round(rates['ours'], 2), 'peak_gflops': round(1e-9 * statistics.median(peaks), 2),
            'peers': {name: round(rate, 2) for name, rate in rates.items() if name not in ('ours', 'peak')},
            'round_s': [round(value, 6) for value in seconds['ours']]}


def pyplot():
    """Matplotlib's pyplot for files; None, and said so, where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        log('left out: the chart, as Matplotlib is not installed')
        return None
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    return plt


def tidy(axes):
    """The look that all charts share."""
    axes.grid(axis='y', color='#dddddd', linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ('top', 'right'):
        axes.spines[side].set_visible(False)


def finish(figure, handles, labels, title, path, margin=1.2, **more):
    """The legend at the right, in a margin of so many inches; the title; the file."""
    figure.legend(handles, labels, loc='center right', frameon=False, fontsize=9, **more)
    figure.suptitle(title, fontsize=11)
    figure.tight_layout(rect=(0, 0, 1 - margin / figure.get_figwidth(), 1))
    save(figure, path)


def save(figure, path):
    figure.savefig(path, dpi=110, metadata={'Software': None})
    log(f'chart: {path}')

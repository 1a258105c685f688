#!/usr/bin/env python3
"""methods.py -- methods of context parallelism side by side: memory, bytes sent and time over the length

Compiles examples/compare and runs it: forward and backward of one attention block, 16 query heads and 4 key/value heads
of 64, causal, on ranks that are threads. All methods of a length run in one process over the same data, one after the
other, in the opposite order every other round. Before, each is held to a reference in double precision at a small size;
in every run bytes held and sent must be those of its plan.

In the numbers, seconds are medians over rounds, from a barrier until the slowest rank is done; bytes are the largest of
one rank: peak_bytes of the device, host_bytes beside it, sent_bytes [forward, backward] to its team (all-to-all), to
its ring, and over the link between device and host. `ratio` is the time of forward and backward over that of the first
method, the median of those within a round. Where ranks outnumber cores, time is the sum of their work.

Exit status: 0; 1 if something failed or is wrong; 2 for wrong usage.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile

import common

METHODS = ['ulysses', 'upipe', 'ring', 'zigzag', 'stripe', 'double-ring', 'allgather', 'usp', 'upipe-ring', 'fpdt',
           'upipe-fpdt']
SHAPE = {'ranks': 4, 'heads': 16, 'kv-heads': 4, 'head-dim': 64}
TOKENS, QUICK_TOKENS = [1024, 2048, 4096, 8192, 16384], [256, 512]
DTYPES = ['f32', 'bf16']
VALIDATED = 256  # tokens
ROUNDS, QUICK_ROUNDS = 3, 1
# A family a colour: what trades heads, what goes round a ring, both, and segments. Dashes tell its members apart.
SOLID, DASHED, DOTTED, MIXED = '-', (0, (5, 2)), (0, (1, 1.5)), (0, (5, 2, 1, 2))
LINES = {'ulysses': ('#e07a5f', SOLID, 'o'), 'upipe': ('#2a9d8f', SOLID, 'o'), 'ring': ('#3b4252', SOLID, 's'),
         'zigzag': ('#3b4252', DASHED, 'D'), 'stripe': ('#3b4252', DOTTED, 'v'), 'double-ring': ('#3b4252', MIXED, '^'),
         'allgather': ('#8fa3bf', SOLID, 's'), 'usp': ('#e07a5f', DASHED, 'D'), 'upipe-ring': ('#2a9d8f', DASHED, 'D'),
         'fpdt': ('#e07a5f', DOTTED, 'v'), 'upipe-fpdt': ('#2a9d8f', DOTTED, 'v')}
MIB = 2**20


# ---- measuring ----

def program(options):
    """examples/compare, compiled."""
    libraries = ['-Wl,--no-as-needed', '-lm', '-pthread']  # they stand before what needs them
    flags = [*common.ISA_FLAGS[options.isa], f'-DUPIPE_SOURCE_ROOT="{common.TOP}"', *libraries]
    return common.compile_unit(os.path.join('..', 'examples', 'compare', 'compare.c'), f'compare_{options.isa}', flags)


def run(path, methods, tokens, dtype, check):
    """What the program says: its configuration, and each method by name."""
    flags = {**SHAPE, 'tokens': tokens, 'dtype': dtype, 'check': check}
    with tempfile.TemporaryDirectory() as folder:
        numbers = os.path.join(folder, 'numbers.json')
        command = [path, *(word for method in methods for word in ('--method', method)),
                   *(word for flag, value in flags.items() for word in (f'--{flag}', str(value))), '--json', numbers]
        if subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode != 0:
            common.fail(f'no figures: failed: {" ".join(command)}')
        with open(numbers, encoding='utf-8') as source:
            figures = json.load(source)
    return figures['config'], {method['name']: method for method in figures['methods']}


def validate(path, options):
    """The largest relative L2 error of every method and data type; the program refuses what is not sound."""
    errors = {}
    for dtype in options.dtypes:
        _, figures = run(path, options.methods, VALIDATED, dtype, 'on')
        for name, method in figures.items():
            worst = max(method[error] for error in ('err_out', 'err_dx', 'err_dw'))
            errors.setdefault(name, {})[dtype] = float(f'{worst:.1e}')
    return errors


def passes(rounds, name):
    """Seconds of forward and backward together, round by round."""
    return [figures[name]['seconds_fwd'] + figures[name]['seconds_bwd'] for figures in rounds]


def line(config, rounds, name, base):
    """A line of the file, from what the program printed of this method in every round."""
    method = rounds[0][name]
    ratios = [mine / its for mine, its in zip(passes(rounds, name), passes(rounds, base))]
    return {'op': 'method', 'method': name, 'head_dim': config['head_dim'], 'dtype': config['dtype'], 'causal': True,
            'heads': config['heads'], 'kv_heads': config['kv_heads'], 'model_dim': config['model_dim'],
            'ranks': config['ranks'], 'ring': method['ring'], 'segments': method['segments'], 'chunk': method['chunk'],
            'tokens': config['tokens'], 'products': config['products'], 'stages': method['stages'],
            'layout': method['layout'], 'ring_mode': method['ring_mode'], 'unit_bytes': config['unit_bytes'],
            'peak_bytes': max(method['peak_bytes'].values()), 'host_bytes': method['host_bytes'],
            'sent_bytes': method['sent_bytes'],
            'forward_s': statistics.median(figures[name]['seconds_fwd'] for figures in rounds),
            'backward_s': statistics.median(figures[name]['seconds_bwd'] for figures in rounds),
            'total_s': statistics.median(passes(rounds, name)),
            'round_s': [round(value, 6) for value in passes(rounds, name)],
            'ratio': round(statistics.median(ratios), 4), 'ratio_range': [round(min(ratios), 4), round(max(ratios), 4)]}


def measure(path, options, lines):
    total = len(options.dtypes) * len(options.tokens) * options.rounds
    number = 0
    for dtype in options.dtypes:
        for tokens in options.tokens:
            rounds = []
            for turn in range(options.rounds):
                number += 1
                common.log(f'{number} of {total}: {tokens} tokens, {dtype}, round {turn + 1}')
                config, figures = run(path, options.methods[::1 if turn % 2 == 0 else -1], tokens, dtype, 'off')
                rounds.append(figures)
            cases = [line(config, rounds, name, options.methods[0]) for name in options.methods]
            for case in cases:
                lines.write(case)
            print_table(cases)


# ---- tables ----

def mib(amount):
    return f'{amount / MIB:.2f}' if amount else '-'


def print_table(cases):
    """All methods at one length."""
    first = cases[0]
    print(f"{first['tokens']:,} tokens, {first['dtype']}: {first['heads']}/{first['kv_heads']} heads of "
          f"{first['head_dim']}, {first['ranks']} ranks; one unit, a rank's tokens x model dim, is "
          f"{first['unit_bytes'] / MIB:g} MiB\n")
    common.table_head(['method', 'team x ring', 'stages x heads', 'peak, MiB', 'units', 'host, MiB', 'all-to-all, MiB', 'ring, MiB',
                       'host link, MiB', 'forward, s', 'backward, s', f"time / {first['method']}"])
    for case in cases:
        low, high = case['ratio_range']
        sent = case['sent_bytes']
        common.table_line([case['method'], f"{case['ranks'] // case['ring']} x {case['ring']}",
                    f"{case['stages']} x {case['chunk']}", mib(case['peak_bytes']),
                    f"{case['peak_bytes'] / case['unit_bytes']:.2f}", mib(case['host_bytes']),
                    *(mib(sum(sent[way])) for way in ('team', 'ring', 'host')), f"{case['forward_s']:.3f}",
                    f"{case['backward_s']:.3f}", f"{case['ratio']:.3f} ({low:.3f} to {high:.3f})"])
    print(flush=True)


# ---- the picture ----

def draw_panel(axes, cases, methods, value):
    for name in methods:
        points = [(case['tokens'], value(case)) for case in cases if case['method'] == name]
        colour, dashes, marker = LINES[name]
        axes.plot(*zip(*points), color=colour, linestyle=dashes, marker=marker, markersize=3.5, linewidth=1.4)
    common.tidy(axes)


def draw(cases, options, title):
    """As the paper's first figure: peak memory and time over S, a line a method, a column a data type."""
    plt = common.pyplot()
    if plt is None:
        return
    figure, panels = plt.subplots(2, len(options.dtypes), figsize=(4.6 * len(options.dtypes) + 1.8, 7), squeeze=False,
                                  sharey='row')
    for column, dtype in enumerate(options.dtypes):
        of_type = [case for case in cases if case['dtype'] == dtype]
        memory, seconds = panels[0][column], panels[1][column]
        draw_panel(memory, of_type, options.methods, lambda case: case['peak_bytes'] / MIB)
        memory.set_xticks(options.tokens[-3:], [f'{tokens / 1024:g}k' for tokens in options.tokens[-3:]])
        memory.set_xlim(left=0)
        memory.set_ylim(bottom=0)
        memory.set_title(f'peak memory of a rank, {dtype}', fontsize=10)
        draw_panel(seconds, of_type, options.methods, lambda case: case['total_s'])
        seconds.set_xscale('log', base=2)
        seconds.set_yscale('log', base=2)
        seconds.set_xticks(options.tokens, [f'{tokens / 1024:g}k' for tokens in options.tokens])
        seconds.yaxis.set_major_formatter(lambda value, _: f'{value:g}')
        seconds.set_title(f'forward and backward, {dtype}', fontsize=10)
        seconds.set_xlabel('tokens')
    panels[0][0].set_ylabel('MiB')
    panels[1][0].set_ylabel('seconds')
    handles = [plt.Line2D([], [], color=LINES[name][0], linestyle=LINES[name][1], marker=LINES[name][2], markersize=3.5)
               for name in options.methods]
    shape = f'{SHAPE["heads"]}/{SHAPE["kv-heads"]} heads of {SHAPE["head-dim"]}, {SHAPE["ranks"]} ranks'
    common.finish(figure, handles, options.methods, f'{shape}: {title}', options.chart, 1.5, handlelength=3.5)


# ---- the command line ----

def read_options():
    parser = common.arguments(__doc__, [])
    common.add_list(parser, '--methods', 'methods', METHODS, METHODS)
    common.add_list(parser, '--tokens', f'lengths of the sequence ({",".join(map(str, TOKENS))})', None)
    common.add_list(parser, '--dtypes', 'storage types', DTYPES, DTYPES)
    parser.add_argument('--rounds', type=int, metavar='N', help=f'runs of all methods at a length ({ROUNDS})')
    options = common.parse(parser, 'methods')
    options.tokens = sorted(options.tokens or (QUICK_TOKENS if options.quick else TOKENS))
    options.rounds = (QUICK_ROUNDS if options.quick else ROUNDS) if options.rounds is None else options.rounds
    if options.rounds < 1 or options.tokens[0] < 1:
        parser.error('rounds and tokens are positive')
    for chosen in options.methods, options.tokens, options.dtypes:
        if len(set(chosen)) < len(chosen):
            parser.error(f'{",".join(map(str, chosen))}: one is given twice')
    return options


def main(options):
    path = program(options)
    common.log('validating against double precision')
    errors = validate(path, options)
    with common.Lines(options.json, {'isa': options.isa, 'errors': errors}) as lines:
        lines.print_header()
        measure(path, options, lines)
        draw(lines.cases, options, lines.header['machine'])
    common.log(f'numbers: {options.json}')
    return 0


if __name__ == '__main__':
    sys.exit(main(read_options()))

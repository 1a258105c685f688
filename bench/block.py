#!/usr/bin/env python3
"""block.py [--shapes LIST] [--tokens LIST] [--products WHICH] [--dtype TYPE] -- UPipe's attention block beside Ulysses'

Forward and backward of one block (x -> Q, K, V -> RoPE -> all-to-all -> causal attention -> all-to-all -> output
projection, and back), with ranks that are threads. Methods, in turn in one process over the same data, after their
results were compared (block.c):

  ulysses             the library's layer with U = H
  ulysses_plain_gemm  Ulysses from the library's primitives, one plain product for each projection and gradient
  upipe               the layer with U = C, 2C, ... below H

Prints the paper's runtime table (tab:runtime, Appendix C) and ratios to Ulysses over U and S, and draws the paper's
ablation (fig:chunk_size: U against time and memory). Where ranks outnumber cores, as C = 4 and 8 do on two, wall clock
is the sum of their work; parts are seconds of processor time of all ranks. All of it takes about an hour on two cores.

In the numbers, seconds are medians over rounds, and ratio_to_ulysses is the median of the ratios within each round.
"""

import argparse
import json
import os
import re
import statistics
import subprocess

import common

# Ranks, query heads, key/value heads, and the most tokens that are measured with them.
SHAPES = {(4, 16, 4): 32768, (4, 16, 16): 8192, (8, 32, 8): 16384, (8, 32, 32): 8192}
TOKENS = [2048, 4096, 8192, 16384, 32768]
ROUNDS = {2048: 9, 4096: 9, 8192: 7, 16384: 5}
MOST_ROUNDS, LEAST_ROUNDS = 9, 3
QUICK_SHAPE, QUICK_TOKENS, QUICK_ROUNDS = (4, 16, 4), [512, 1024], 2
GOAL, GOAL_TOKENS = 1.02, 8192
PARTS = {'transfer': 'All-to-All', 'attn_fwd': 'attention forward', 'attn_bwd': 'attention backward',
         'products': 'products', 'other': 'other', 'all': 'all'}
NAMES = {'ulysses': 'Ulysses', 'ulysses_plain_gemm': 'Ulysses, plain products', 'upipe': 'UPipe'}


def shape(text):
    found = re.fullmatch(r'(\d+)x(\d+)/(\d+)', text)
    if not found:
        raise ValueError(text)
    return tuple(map(int, found.groups()))


def shapes(text):
    try:
        return [shape(word) for word in text.split(',')]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f'{error} is not like 4x16/4: ranks, query heads, key/value heads') from error


def shape_name(line):
    return f'C = {line["ranks"]}, {line["heads"]}/{line["kv_heads"]} heads of {line["head_dim"]}'


def tokens_of(options, measured_shape):
    if options.tokens or options.quick:
        return options.tokens or QUICK_TOKENS
    return [tokens for tokens in TOKENS if tokens <= SHAPES.get(measured_shape, tokens)]


def rounds_of(options, tokens):
    if options.rounds or options.quick:
        return options.rounds or QUICK_ROUNDS
    return ROUNDS.get(tokens, MOST_ROUNDS if tokens < TOKENS[0] else LEAST_ROUNDS)


# ---- measuring ----

def program(options):
    """The program that measures, with the library's own products or with OpenBLAS'."""
    libraries = ['-Wl,--no-as-needed', '-lm', '-pthread']  # they stand before what needs them
    flags = [*common.ISA_FLAGS[options.isa], *libraries]
    if options.products == 'built-in':
        return common.compile_unit('block.c', f'block_{options.isa}', flags)
    os.environ['OPENBLAS_NUM_THREADS'] = '1'  # the ranks are the threads
    return common.compile_unit('block.c', f'block_blas_{options.isa}', [*flags, '-DUPIPE_WITH_CBLAS', '-lopenblas'])


def measured(command):
    """What the program says of each method."""
    common.log(' '.join([os.path.basename(command[0]), *command[1:]]))
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        common.fail('no figures: the program failed')
    return [json.loads(line) for line in done.stdout.splitlines()]


def passes(method):
    """Seconds of forward and backward together, round by round."""
    return [sum(both) for both in zip(method['forward_s'], method['backward_s'])]


def ratios(method, base):
    return [mine / its for mine, its in zip(passes(method), passes(base))]


def summary(method, methods):
    """A line of the file, from what the program says."""
    line = {'op': 'block', **method}
    line.update({key: statistics.median(method[key]) for key in ('forward_s', 'backward_s')})
    line['total_s'] = statistics.median(passes(method))
    line['cpu_s'] = {part: statistics.median(values) for part, values in method['cpu_s'].items()}
    known = sum(line['cpu_s'][part] for part in PARTS if part not in ('other', 'all'))
    line['cpu_s']['other'] = line['cpu_s']['all'] - known
    for base in methods:
        if base['method'] == 'upipe':
            continue
        of_rounds = ratios(method, base)
        line[f'ratio_to_{base["method"]}'] = statistics.median(of_rounds)
        line[f'ratio_to_{base["method"]}_range'] = [min(of_rounds), max(of_rounds)]
        line[f'cpu_ratio_to_{base["method"]}'] = statistics.median(
            mine / its for mine, its in zip(method['cpu_s']['all'], base['cpu_s']['all']))
    line['total_s_range'] = [min(passes(method)), max(passes(method))]
    line['rounds'] = len(method['forward_s'])
    return line


def measure(options, lines):
    path = program(options)
    for ranks, heads, kv_heads in options.shapes or ([QUICK_SHAPE] if options.quick else SHAPES):
        for tokens in tokens_of(options, (ranks, heads, kv_heads)):
            flags = {'tokens': tokens, 'ranks': ranks, 'heads': heads, 'kv-heads': kv_heads, 'dtype': options.dtype,
                     'rounds': rounds_of(options, tokens)}
            methods = measured([path, *(word for flag, value in flags.items() for word in (f'--{flag}', str(value)))])
            for method in methods:
                lines.write(summary(method, methods))


# ---- tables ----

def table(head, rows):
    common.table_head(head)
    for row in rows:
        common.table_line(row)
    print()


def select(cases, method, tokens, smallest=False):
    """A method's case: of UPipe the one with U = C, or None."""
    found = [case for case in cases if case['method'] == method and case['tokens'] == tokens and
             (not smallest or case['chunk'] == case['ranks'])]
    return found[0] if found else None


def lengths_of(cases):
    return sorted({case['tokens'] for case in cases})


def runtime_table(cases):
    """The paper's tab:runtime: parts of a pass by method, over S."""
    lengths = lengths_of(cases)
    rows = []
    for method, name in NAMES.items():
        columns = [select(cases, method, tokens, method == 'upipe') for tokens in lengths]
        if None in columns:
            continue
        for part, label in PARTS.items():
            rows.append([name, f'{label}, CPU s'] +
                        [f'{case["cpu_s"][part]:.3f}' for case in columns])
        rows.append([name, '**total, s**'] + [f'**{case["total_s"]:.3f}**' for case in columns])
    table(['method', 'part'] + [f'{tokens:,}' for tokens in lengths], rows)


def ratio_table(cases):
    """Time over U and S, divided by Ulysses', with the range of the rounds; and the peak in units at the longest S."""
    lengths = lengths_of(cases)
    rows = []
    for method, chunk in sorted({(case['method'], case['chunk']) for case in cases}):
        columns = {case['tokens']: case for case in cases if (case['method'], case['chunk']) == (method, chunk)}
        row = [f'{NAMES[method]}, U = {chunk}']
        for tokens in lengths:
            case = columns[tokens]
            low, high = case['ratio_to_ulysses_range']
            row.append('1' if method == 'ulysses' else f'{case["ratio_to_ulysses"]:.3f} ({low:.3f} to {high:.3f})')
        last = columns[lengths[-1]]
        rows.append(row + [f'{last["peak_bytes"] / last["unit_bytes"]:.2f}'])
    table(['time / Ulysses\''] + [f'{tokens:,}' for tokens in lengths] + ['peak, units'], rows)


def goals(cases):
    """UPipe with U = C from GOAL_TOKENS on: at most GOAL times the time of either Ulysses."""
    for case in cases:
        if case['method'] != 'upipe' or case['chunk'] != case['ranks'] or case['tokens'] < GOAL_TOKENS:
            continue
        for base in 'ulysses', 'ulysses_plain_gemm':
            ratio = case.get(f'ratio_to_{base}')
            if ratio is not None:
                print(f'goal: {shape_name(case)}, {case["tokens"]:,} tokens, UPipe / {NAMES[base]}: {ratio:.3f}, '
                      f'by processor time {case[f"cpu_ratio_to_{base}"]:.3f}; '
                      f'at most {GOAL}: {"met" if ratio <= GOAL else "missed"}')


def report(cases):
    groups = {}
    for case in cases:
        groups.setdefault(shape_name(case), []).append(case)
    for name, group in groups.items():
        print(f'{name}, D = {group[0]["model_dim"]:,}, {group[0]["dtype"]}, {group[0]["products"]} products\n')
        runtime_table(group)
        ratio_table(group)
    goals(cases)
    return groups


# ---- the picture ----

def draw_panel(axes, cases, value, label):
    """value(case): a number, or a number with the ends of its range."""
    sweep = sorted((case for case in cases if case['method'] != 'ulysses_plain_gemm'), key=lambda case: case['chunk'])
    places = range(len(sweep))
    points = [value(case) for case in sweep]
    axes.plot(places, [point[0] for point in points], color='#2a9d8f', marker='o', linewidth=1.5, zorder=3)
    axes.vlines(places, [point[1] for point in points], [point[2] for point in points], color='#2a9d8f', linewidth=3,
                alpha=0.35)
    for case in cases:
        if case['method'] == 'ulysses_plain_gemm':
            axes.plot([len(sweep) - 1], [value(case)[0]], color='#e07a5f', marker='x', markersize=8, linestyle='none',
                      label=NAMES['ulysses_plain_gemm'])
            axes.legend(frameon=False, fontsize=8)
    axes.set_xticks(list(places), [f'U = {case["chunk"]}' + ('\nUlysses' if case['method'] == 'ulysses' else '')
                                   for case in sweep])
    axes.set_xlim(-0.4, len(sweep) - 0.6)
    axes.set_ylim(0, 1.15 * max(value(case)[2] for case in cases))
    axes.set_ylabel(label)


def draw(groups, path):
    """The paper's fig:chunk_size, a column for each shape, at its longest sequence: U against time and memory."""
    plt = common.pyplot()
    if plt is None:
        return
    figure, panels = plt.subplots(2, len(groups), figsize=(3.4 * len(groups) + 0.6, 5.6), squeeze=False)
    for column, group in enumerate(groups.values()):
        tokens = lengths_of(group)[-1]
        cases = [case for case in group if case['tokens'] == tokens]
        draw_panel(panels[0][column], cases, lambda case: (case['total_s'], *case['total_s_range']),
                   'forward and backward, s')
        mib = 2**20
        draw_panel(panels[1][column], cases, lambda case: (case['peak_bytes'] / mib,) * 3, 'peak of a rank, MiB')
        panels[0][column].set_title(f'{shape_name(cases[0])}\n{tokens:,} tokens', fontsize=10)
        for row in panels:
            common.tidy(row[column])
    figure.tight_layout()
    common.save(figure, path)


# ---- the command line ----

def main():
    parser = common.arguments(__doc__, [])
    parser.add_argument('--shapes', type=shapes, metavar='LIST',
                        help='RANKSxHEADS/KV_HEADS,... (4x16/4,4x16/16,8x32/8,8x32/32); heads of 64')
    common.add_list(parser, '--tokens', 'lengths of the sequence (2048 to 32768, less for larger shapes)', None)
    parser.add_argument('--rounds', type=int, metavar='N', help='rounds that are timed (9 to 3, by length)')
    parser.add_argument('--dtype', choices=['f32', 'bf16'], default='f32', help='storage type (f32)')
    parser.add_argument('--products', choices=['built-in', 'blas'], default='built-in',
                        help='who multiplies matrices for all methods: the library, or an OpenBLAS that is installed')
    options = common.parse(parser, 'block')
    if any(number is not None and number < 1 for number in [options.rounds, *(options.tokens or [])]):
        parser.error('rounds and tokens are positive')
    with common.Lines(options.json, {'isa': options.isa, 'products': options.products}) as lines:
        measure(options, lines)
        groups = report(lines.cases)
    common.log(f'numbers: {options.json}')
    draw(groups, options.chart)
    return 0


if __name__ == '__main__':
    raise SystemExit(main())

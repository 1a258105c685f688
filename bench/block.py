#!/usr/bin/env python3
"""block.py -- UPipe's attention block beside Ulysses', over U and S

Compiles examples/compare and runs it: forward and backward of one causal block with RoPE, on ranks that are threads.
A run has Ulysses (U = H) and UPipe with one U in one process, over the same data; each round has a run for U = C, 2C,
... below H, with the two methods in the opposite order every other round. In every run their results must have the bits
that their plans promise, and bytes held and sent must be the planned ones. Before, both are held to a reference in
double precision at a small size.

Prints the paper's runtime table (tab:runtime, Appendix C) and ratios to Ulysses over U and S, and draws the paper's
ablation (fig:chunk_size: U against time and memory). Where ranks outnumber cores, wall clock is the sum of their work;
parts are seconds of processor time of all ranks. All of it takes about an hour on two cores.

In the numbers, seconds are medians over rounds, and ratio_to_ulysses is the median of the ratios within each run.

Exit status: 0; 1 if something failed or is wrong; 2 for wrong usage.
"""

import argparse
import os
import re
import statistics
import sys

import common
import methods
import picture
import rates

# Ranks, query heads, key/value heads, and the most tokens that are measured with them.
SHAPES = {(4, 16, 4): 32768, (4, 16, 16): 8192, (8, 32, 8): 16384, (8, 32, 32): 8192}
TOKENS = [2048, 4096, 8192, 16384, 32768]
ROUNDS = {2048: 9, 4096: 9, 8192: 7, 16384: 5, 32768: 3}
HEAD_DIM = 64
GOAL, GOAL_TOKENS = 1.02, 8192
PARTS = {'transfer': 'All-to-All', 'attn_fwd': 'attention forward', 'attn_bwd': 'attention backward',
         'products': 'products', 'other': 'other', 'all': 'all'}
NAMES, COLOUR = {'ulysses': 'Ulysses', 'upipe': 'UPipe'}, '#2a9d8f'


def shapes(text):
    found = [re.fullmatch(r'(\d+)x(\d+)/(\d+)', word) for word in text.split(',')]
    if None in found:
        raise argparse.ArgumentTypeError(f'{text} is not like 4x16/4: ranks, query heads, key/value heads')
    return [tuple(map(int, one.groups())) for one in found]


def shape_name(line):
    return f'C = {line["ranks"]}, {line["heads"]}/{line["kv_heads"]} heads of {line["head_dim"]}'


def lengths_of(lines):
    return sorted({line['tokens'] for line in lines})


def select(lines, **fields):
    return [line for line in lines if all(line[name] == value for name, value in fields.items())]


def runtime_table(lines):
    """The paper's tab:runtime: parts of a pass by method, UPipe's with U = C, over S."""
    rows = []
    for method, name in NAMES.items():
        chunk = min(line['chunk'] for line in select(lines, method=method))
        columns = [select(lines, method=method, chunk=chunk, tokens=tokens)[0] for tokens in lengths_of(lines)]
        rows += [[name, f'{label}, CPU s', *(f'{line["cpu_s"][part]:.3f}' for line in columns)]
                 for part, label in PARTS.items()]
        rows.append([name, '**total, s**', *(f'**{line["total_s"]:.3f}**' for line in columns)])
    common.print_table(['method', 'part', *(f'{tokens:,}' for tokens in lengths_of(lines))], rows)


def ratio_table(lines):
    """Time over U and S, divided by Ulysses', with the range of the rounds; and the peak in units at the longest S."""
    rows = []
    for method, chunk in sorted({(line['method'], line['chunk']) for line in lines}):
        columns = [select(lines, method=method, chunk=chunk, tokens=tokens)[0] for tokens in lengths_of(lines)]
        cells = ['1' if method == 'ulysses' else rates.ratio_cell(line, 'ratio_to_ulysses') for line in columns]
        units = columns[-1]['peak_bytes'] / columns[-1]['unit_bytes']
        rows.append([f'{NAMES[method]}, U = {chunk}', *cells, f'{units:.2f}'])
    print()
    common.print_table(["time / Ulysses'", *(f'{tokens:,}' for tokens in lengths_of(lines)), 'peak, units'], rows)


def goals(lines):
    """UPipe with U = C from GOAL_TOKENS on: at most GOAL times the time of Ulysses."""
    for line in select(lines, method='upipe'):
        if line['chunk'] == line['ranks'] and line['tokens'] >= GOAL_TOKENS:
            ratio = line['ratio_to_ulysses']
            print(f'goal: {shape_name(line)}, {line["tokens"]:,} tokens: {ratio:.3f}, by processor time '
                  f'{line["cpu_ratio_to_ulysses"]:.3f}; at most {GOAL}: {"met" if ratio <= GOAL else "missed"}')


class Block(common.Benchmark):
    name, text, quick = 'block', __doc__, {'shapes': [(4, 16, 4)], 'tokens': [512, 1024], 'rounds': 2}

    def flags(self, parser):
        parser.add_argument('--shapes', type=shapes, metavar='LIST', default=list(SHAPES),
                            help=f'RANKSxHEADS/KV_HEADS,... (4x16/4,4x16/16,8x32/8,8x32/32); heads of {HEAD_DIM}')
        common.add_list(parser, '--tokens', 'lengths of the sequence (2048 to 32768, less for larger shapes)', None)
        parser.add_argument('--rounds', type=common.positive, metavar='N',
                            help='rounds that are timed (9 to 3, by length)')
        parser.add_argument('--dtype', choices=methods.DTYPES, default='f32', help='storage type (f32)')
        parser.add_argument('--products', choices=['built-in', 'blas'], default='built-in',
                            help='who multiplies matrices for both: the library, or an OpenBLAS that is installed')

    def open(self):
        if self.options.products == 'blas':
            os.environ['OPENBLAS_NUM_THREADS'] = '1'  # the ranks are the threads
            self.program = methods.program(self.options, 'compare_blas', '-DUPIPE_WITH_CBLAS', '-lopenblas')
        else:
            self.program = methods.program(self.options)
        common.log('validating against double precision')
        errors = {}
        for shape in self.options.shapes:
            for name, method in self.compare(*shape, shape[0], methods.VALIDATED, 'on')[1].items():
                errors[name] = max(methods.worst_error(method), errors.get(name, 0))
        return {'products': self.options.products, 'errors': errors}

    def cases(self):
        for shape in self.options.shapes:
            for tokens in self.options.tokens or [n for n in TOKENS if n <= SHAPES.get(shape, n)]:
                yield f'C = {shape[0]}, {shape[1]}/{shape[2]} heads, {tokens} tokens', *shape, tokens

    def compare(self, ranks, heads, kv_heads, chunk, tokens, check, order=1):
        """Both methods, or in the opposite order (-1)."""
        return methods.compare(self.program, list(NAMES)[::order], ranks=ranks, heads=heads, kv_heads=kv_heads,
                               head_dim=HEAD_DIM, chunk=chunk, tokens=tokens, dtype=self.options.dtype, rope=True,
                               check=check)

    def run(self, ranks, heads, kv_heads, tokens):
        chunks = [ranks * 2**i for i in range(heads) if ranks * 2**i < heads and heads % (ranks * 2**i) == 0]
        if not chunks:
            common.fail(f'{heads} heads on {ranks} ranks have no U below H')
        rounds = {chunk: [] for chunk in chunks}
        most = ROUNDS.get(tokens, max(ROUNDS.values()) if tokens < TOKENS[0] else min(ROUNDS.values()))
        for turn in range(self.options.rounds or most):
            for chunk in chunks:
                config, figures = self.compare(ranks, heads, kv_heads, chunk, tokens, 'off', 1 if turn % 2 == 0 else -1)
                rounds[chunk].append(figures)
        ulysses = [one['ulysses'] for of in rounds.values() for one in of]
        yield self.line(config, ulysses, ulysses)
        for of in rounds.values():
            yield self.line(config, [one['upipe'] for one in of], [one['ulysses'] for one in of])

    @staticmethod
    def line(config, figures, base):
        line = methods.summary(config, figures, base)
        known = sum(line['cpu_s'][part] for part in PARTS if part in line['cpu_s'] and part != 'all')
        line['cpu_s']['other'] = line['cpu_s']['all'] - known
        cpu = [one['seconds_cpu']['all'] / other['seconds_cpu']['all'] for one, other in zip(figures, base)]
        ratio, ends = line.pop('ratio'), line.pop('ratio_range')
        return {'op': 'block', **line, 'total_s_range': [min(line['round_s']), max(line['round_s'])],
                'rounds': len(figures), 'ratio_to_ulysses': ratio, 'ratio_to_ulysses_range': ends,
                'cpu_ratio_to_ulysses': statistics.median(cpu)}

    def end(self, lines):
        self.groups = {}
        for line in lines:
            self.groups.setdefault(shape_name(line), []).append(line)
        for name, group in self.groups.items():
            print(f'{name}, D = {group[0]["model_dim"]:,}, {group[0]["dtype"]}, {group[0]["products"]} products\n')
            runtime_table(group)
            ratio_table(group)
            print()
        goals(lines)

    def picture(self, lines):
        """The paper's fig:chunk_size, a column for each shape, at its longest sequence: U against time and memory."""
        def panel(group, title, value, label):
            """value(line): a number with the ends of its range."""
            sweep = sorted(group, key=lambda line: line['chunk'])
            points = [value(line) for line in sweep]

            def more(axes):
                axes.vlines(range(len(sweep)), [point[1] for point in points], [point[2] for point in points],
                            color=COLOUR, linewidth=3, alpha=0.35)
                axes.set_xticks(range(len(sweep)), [
                    f'U = {line["chunk"]}' + ('\nUlysses' if line['method'] == 'ulysses' else '') for line in sweep])
                axes.set_xlim(-0.4, len(sweep) - 0.6)
                axes.set_ylim(0, 1.15 * max(point[2] for point in points))
            curve = [(place, point[0]) for place, point in enumerate(points)]
            return picture.Panel(title, [(curve, COLOUR, picture.SOLID)], y=label, linear=True, more=more)
        grid = [[], []]
        for name, group in self.groups.items():
            longest = select(group, tokens=lengths_of(group)[-1])
            grid[0].append(panel(longest, f'{name}\n{longest[0]["tokens"]:,} tokens',
                                 lambda line: (line['total_s'], *line['total_s_range']), 'forward and backward, s'))
            grid[1].append(panel(longest, '', lambda line: (line['peak_bytes'] / methods.MIB,) * 3,
                                 'peak of a rank, MiB'))
        picture.draw(self.options.chart, '', grid, [], share=('none', 'none'), size=(3.4, 2.6), margin=0.2)


if __name__ == '__main__':
    benchmark = Block()
    benchmark.read()
    sys.exit(benchmark.main())

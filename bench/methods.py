#!/usr/bin/env python3
"""methods.py -- methods of context parallelism side by side: memory, bytes sent and time over the length

Compiles examples/compare and runs it: forward and backward of one attention block, 16 query heads and 4 key/value heads
of 64, causal, on ranks that are threads. All methods of a length run in one process over the same data, one after the
other, in the opposite order every other round. Before, each is held to a reference in double precision at a small size;
in every run bytes held and sent must be those of its plan.

In the numbers, seconds are medians over rounds, from a barrier until the slowest rank is done; cpu_s those of the
processors, of all ranks together, by part. Bytes are the largest of one rank: peak_bytes of the device, host_bytes
beside it, sent_bytes [forward, backward] to its team (all-to-all), to its ring, and over the link between device and
host. `ratio` is the time of forward and backward over that of the first method, the median of those within a round.
Where ranks outnumber cores, time is the sum of their work.

Exit status: 0; 1 if something failed or is wrong; 2 for wrong usage.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile

import common
import picture
import rates

METHODS = ['ulysses', 'upipe', 'ring', 'zigzag', 'stripe', 'double-ring', 'allgather', 'usp', 'upipe-ring', 'fpdt',
           'upipe-fpdt']
SHAPE = {'ranks': 4, 'heads': 16, 'kv_heads': 4, 'head_dim': 64}
DTYPES = ['f32', 'bf16']
VALIDATED = 256  # tokens
# A family a colour: what trades heads, what goes round a ring, both, and segments. Dashes tell its members apart.
SOLID, DASHED, DOTTED, MIXED = '-', (0, (5, 2)), (0, (1, 1.5)), (0, (5, 2, 1, 2))
LINES = {'ulysses': ('#e07a5f', SOLID, 'o'), 'upipe': ('#2a9d8f', SOLID, 'o'), 'ring': ('#3b4252', SOLID, 's'),
         'zigzag': ('#3b4252', DASHED, 'D'), 'stripe': ('#3b4252', DOTTED, 'v'), 'double-ring': ('#3b4252', MIXED, '^'),
         'allgather': ('#8fa3bf', SOLID, 's'), 'usp': ('#e07a5f', DASHED, 'D'), 'upipe-ring': ('#2a9d8f', DASHED, 'D'),
         'fpdt': ('#e07a5f', DOTTED, 'v'), 'upipe-fpdt': ('#2a9d8f', DOTTED, 'v')}
MIB = 2**20


# ---- the program ----

def program(options, name='compare', *more):
    """examples/compare, compiled."""
    libraries = ['-Wl,--no-as-needed', '-lm', '-pthread']  # they stand before what needs them
    flags = [*common.ISA_FLAGS[options.isa], f'-DUPIPE_SOURCE_ROOT="{common.TOP}"', *libraries, *more]
    return common.compile_unit(os.path.join('..', 'examples', 'compare', 'compare.c'), f'{name}_{options.isa}', flags)


def compare(path, methods, **flags):
    """What the program says: its configuration, and each method by name. A flag's value True: it has none."""
    words = [word for method in methods for word in ('--method', method)]
    for flag, value in flags.items():
        words += [f'--{flag.replace("_", "-")}', *([] if value is True else [str(value)])]
    with tempfile.TemporaryDirectory() as folder:
        numbers = os.path.join(folder, 'numbers.json')
        command = [path, *words, '--json', numbers]
        if subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode != 0:
            common.fail(f'no figures: failed: {" ".join(command)}')
        with open(numbers, encoding='utf-8') as source:
            figures = json.load(source)
    return figures['config'], {method['name']: method for method in figures['methods']}


def worst_error(method):
    return float(f"{max(method[error] for error in ('err_out', 'err_dx', 'err_dw')):.1e}")


def passes(figures):
    """Seconds of forward and backward together, round by round."""
    return [method['seconds_fwd'] + method['seconds_bwd'] for method in figures]


def summary(config, rounds, base):
    """A line of the file, from what the program printed in every round of a method and of what it is compared with."""
    method, round_s = rounds[0], [round(value, 6) for value in passes(rounds)]
    return {**{key: config[key] for key in ('head_dim', 'dtype', 'heads', 'kv_heads', 'model_dim', 'tokens', 'products',
                                            'unit_bytes')},
            **{key: method[key] for key in ('ring', 'segments', 'chunk', 'stages', 'layout', 'ring_mode', 'host_bytes',
                                            'sent_bytes')},
            'method': method['name'], 'causal': True, 'ranks': config['ranks'],
            'peak_bytes': max(method['peak_bytes'].values()), 'plan_bytes': max(method['plan_bytes'].values()),
            'forward_s': statistics.median(one['seconds_fwd'] for one in rounds),
            'backward_s': statistics.median(one['seconds_bwd'] for one in rounds),
            'total_s': statistics.median(round_s), 'round_s': round_s,
            'cpu_s': {part: statistics.median(one['seconds_cpu'][part] for one in rounds)
                      for part in method['seconds_cpu']},
            **rates.ratios(passes(rounds), passes(base))}


def mib(amount):
    return f'{amount / MIB:.2f}' if amount else '-'


def print_table(lines):
    """All methods at one length."""
    first = lines[0]
    print(f"{first['tokens']:,} tokens, {first['dtype']}: {first['heads']}/{first['kv_heads']} heads of "
          f"{first['head_dim']}, {first['ranks']} ranks; one unit, a rank's tokens x model dim, is "
          f"{first['unit_bytes'] / MIB:g} MiB\n")
    rows = []
    for line in lines:
        sent = line['sent_bytes']
        rows.append([line['method'], f"{line['ranks'] // line['ring']} x {line['ring']}",
                     f"{line['stages']} x {line['chunk']}", mib(line['peak_bytes']),
                     f"{line['peak_bytes'] / line['unit_bytes']:.2f}", mib(line['host_bytes']),
                     *(mib(sum(sent[way])) for way in ('team', 'ring', 'host')), f"{line['forward_s']:.3f}",
                     f"{line['backward_s']:.3f}", rates.ratio_cell(line)])
    common.print_table(['method', 'team x ring', 'stages x heads', 'peak, MiB', 'units', 'host, MiB', 'all-to-all, MiB',
                        'ring, MiB', 'host link, MiB', 'forward, s', 'backward, s', f"time / {first['method']}"], rows)
    print(flush=True)


class Methods(common.Benchmark):
    name, text, rounds, quick = 'methods', __doc__, 3, {'tokens': [256, 512], 'rounds': 1}

    def flags(self, parser):
        common.add_list(parser, '--methods', 'methods', METHODS, METHODS)
        common.add_list(parser, '--tokens', 'lengths of the sequence', [1024, 2048, 4096, 8192, 16384])
        common.add_list(parser, '--dtypes', 'storage types', DTYPES, DTYPES)

    def open(self):
        given = self.options
        given.tokens.sort()
        self.program = program(given)
        common.log('validating against double precision')
        errors = {name: {} for name in given.methods}
        for dtype in given.dtypes:
            _, figures = compare(self.program, given.methods, **SHAPE, tokens=VALIDATED, dtype=dtype, check='on')
            for name, method in figures.items():
                errors[name][dtype] = worst_error(method)
        return {'errors': errors}

    def cases(self):
        return [(f'{tokens} tokens, {dtype}', tokens, dtype)
                for dtype in self.options.dtypes for tokens in self.options.tokens]

    def run(self, tokens, dtype):
        methods, rounds = self.options.methods, []
        for turn in range(self.options.rounds):
            config, figures = compare(self.program, methods[::1 if turn % 2 == 0 else -1], **SHAPE, tokens=tokens,
                                      dtype=dtype, check='off')
            rounds.append(figures)
        lines = [{'op': 'method', **summary(config, [one[name] for one in rounds], [one[methods[0]] for one in rounds])}
                 for name in methods]
        yield from lines
        print_table(lines)

    def picture(self, lines):
        """As the paper's first figure: peak memory and time over S, a line a method, a column a data type."""
        given = self.options

        def panel(title, dtype, value, **more):
            of_type = [line for line in lines if line['dtype'] == dtype]
            curves = [([(line['tokens'], value(line)) for line in of_type if line['method'] == name], *LINES[name])
                      for name in given.methods]
            return picture.Panel(f'{title}, {dtype}', curves, **more)

        def longest(axes):
            axes.set_xticks(given.tokens[-3:], map(common.amount, given.tokens[-3:]))
            axes.set_xlim(left=0)

        def powers(axes):
            axes.set_yscale('log', base=2)
            axes.yaxis.set_major_formatter(lambda value, _: f'{value:g}')
        grid = [[panel('peak memory of a rank', dtype, lambda line: line['peak_bytes'] / MIB, y='MiB', linear=True,
                       more=longest) for dtype in given.dtypes],
                [panel('forward and backward', dtype, lambda line: line['total_s'], x='tokens', y='seconds', log_y=True,
                       more=powers) for dtype in given.dtypes]]
        shape = f'{SHAPE["heads"]}/{SHAPE["kv_heads"]} heads of {SHAPE["head_dim"]}, {SHAPE["ranks"]} ranks'
        picture.draw(given.chart, f'{shape}: {self.header["machine"]}', grid,
                     [(name, *LINES[name]) for name in given.methods], share=('none', 'row'), size=(4.6, 3.1),
                     margin=1.5)


if __name__ == '__main__':
    benchmark = Methods()
    benchmark.read()
    sys.exit(benchmark.main())

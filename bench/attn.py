#!/usr/bin/env python3
"""attn.py -- attention on the CPU, forward and backward, beside its peers in the same run

Measures the rate of fused multiply-adds and the bandwidth of memory, validates everyone against NumPy in double
precision, then times: all take turns, and the medians count. Operations are 4 d a visible pair of query and key forward
and 10 d backward, for everyone; with values of another head dim 2 d of keys and 2 of values, 6 and 4. The peak is
measured in the same turns, with the vectors that our kernels use and as many threads. A peer's ratio is our rate over
its rate: above 1 we are faster.

Exit status: 0; 1 if something failed or is wrong; 2 for wrong usage.
"""

import itertools
import statistics
import sys

import common
import picture
import rates

PEERS = ['torch', 'onednn', 'ggml', 'naive', 'bf16']
DTYPES, MASKS = ['f32', 'bf16'], ['causal', 'full']
# Largest error of a result over its largest value. What is stored in bf16 is rounded by 2e-3 of itself, and PyTorch
# rounds weights to bf16 too.
BOUNDS = {'f32': 2e-5, 'bf16': 2e-2}
VALIDATED = 192, 2  # tokens, heads
BANDWIDTH_FLOATS = 1 << 25  # an array's


def heads_of(tokens):
    """Work for all threads, and about as much in short sequences as in long ones."""
    return max(2, min(16, 16384 // tokens))


def dims_of(line):
    """Of keys, and of values where they have another."""
    return '/'.join(str(line[name]) for name in ('head_dim', 'v_dim') if name in line)


class Attn(rates.Rates):
    name, text, prefix, peers, bounds = 'attn', __doc__, 'attn_', PEERS, BOUNDS
    # What PyPI calls them: oneDNN is the one in PyTorch, and llama-cpp-python carries ggml's sources.
    packages = {'torch': ['torch'], 'onednn': ['torch'], 'ggml': ['cmake', 'llama-cpp-python:source']}
    rounds, quick = 5, {'dims': [64], 'tokens': [256], 'rounds': 3}
    head = ['op', 'd', 'dtype', 'mask', 'tokens x heads', 'threads']

    def flags(self, parser):
        common.add_list(parser, '--dims', 'head dims', [64, 128])
        parser.add_argument('--v-dim', type=common.positive, metavar='N',
                            help="head dim of values, where it is not the keys'; ours alone, as peers have one head dim")
        common.add_list(parser, '--dtypes', 'storage types', DTYPES, DTYPES)
        common.add_list(parser, '--masks', 'masks', MASKS, MASKS)
        common.add_list(parser, '--tokens', 'lengths', [1024, 2048, 4096, 8192, 16384])
        common.add_list(parser, '--threads', 'numbers of threads', sorted({1, common.cores()}))
        common.add_list(parser, '--ops', 'operations', self.ops, self.ops)

    def problems(self):
        given = self.options
        for dim, dtype, mask, threads in itertools.product(given.dims, given.dtypes, given.masks, given.threads):
            yield attn_peers.Problem(*VALIDATED, dim, dtype, mask == 'causal', v_dim=given.v_dim), threads

    def refuse(self, options):
        if options.v_dim and options.peers not in (PEERS, [], ['bf16']):
            return '--v-dim: peers have one head dim; --peers is bf16 or none'
        return None

    def open(self):
        apart = [name for name in self.options.peers if self.options.v_dim and name != 'bf16']
        self.options.peers = [name for name in self.options.peers if name not in apart]
        self.makers = {'ours': attn_peers.Ours, **attn_peers.CONTESTANTS}
        threads, made = self.options.threads, super().open()
        made['left_out'].update({name: 'has one head dim' for name in apart})
        return {**made, 'peak_gflops': {n: round(1e-9 * self.ours.peak(n), 1) for n in threads},
                'triad_gb_per_s': {n: round(1e-9 * self.ours.bandwidth(n, BANDWIDTH_FLOATS), 1) for n in threads}}

    def cases(self):
        given = self.options
        for dim, dtype, mask, tokens, threads in itertools.product(given.dims, given.dtypes, given.masks, given.tokens,
                                                                   given.threads):
            dims = dims_of({'head_dim': dim, **({'v_dim': given.v_dim} if given.v_dim else {})})
            yield (f'head dim {dims}, {dtype}, {mask}, {tokens} tokens, {common.counted(threads)}', tokens, dim, dtype,
                   mask == 'causal', threads)

    def run(self, tokens, dim, dtype, causal, threads):
        return super().run(attn_peers.Problem(tokens, heads_of(tokens), dim, dtype, causal, v_dim=self.options.v_dim),
                           threads)

    def cells(self, line):
        return [rates.NAMES[line['op'][-3:]], dims_of(line), line['dtype'],
                'causal' if line['causal'] else 'full', f"{line['tokens']:,} x {line['heads']}",
                str(line['threads'])]

    def panel(self, lines, op, dim, dtype):
        """Rates over tokens, causal solid, full dashed."""
        shown = [line for line in lines if (line['op'], line['head_dim'], line['dtype']) == (op, dim, dtype)]
        curves = []
        for causal, dashes in (True, picture.SOLID), (False, picture.DASHED):
            of_mask = [line for line in shown if line['causal'] == causal]
            curves += [self.curve(name, of_mask, lambda line, rate: (line['tokens'], rate), dashes)
                       for name in ['ours', *self.names]]
        peak = statistics.median(line['peak_gflops'] for line in shown)
        return picture.Panel(f'{rates.NAMES[op[-3:]]}, head dim {dim}, {dtype}', curves, x='tokens', y='GFLOP/s',
                             levels=[(peak, picture.DOTTED)])

    def picture(self, lines):
        """A row an operation, a column a head dim and data type; the most threads."""
        threads = max(line['threads'] for line in lines)
        lines = [line for line in lines if line['threads'] == threads]
        ops = sorted({line['op'] for line in lines}, reverse=True)
        kinds = sorted({(line['head_dim'], line['dtype']) for line in lines},
                       key=lambda kind: (kind[1] != 'f32', kind[0]))
        legend = [*self.legend(), ('causal', picture.GREY, picture.SOLID), ('full', picture.GREY, picture.DASHED),
                  ('peak', picture.BLACK, picture.DOTTED)]
        picture.draw(self.options.chart, f'Attention, {common.counted(threads)}: {self.header["machine"]}',
                     [[self.panel(lines, op, *kind) for kind in kinds] for op in ops], legend,
                     bold=common.COLOURS['ours'])


if __name__ == '__main__':
    benchmark = Attn()
    benchmark.read()
    import attn_peers
    sys.exit(benchmark.main())

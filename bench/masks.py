#!/usr/bin/env python3
"""masks.py -- what masks cost the CPU's attention, forward and backward, all of it causal

  packed   packed sequences of equal length in one call, against one call for each of them alone
  window   a sliding window of one size over longer and longer sequences: seconds a token against the shortest's
  softcap  scores with a soft-cap against the same without

Validates every mask against NumPy in double precision, then times: what is compared takes turns in one process. A ratio
is the time of a case over that of what it is compared with, for as many tokens; the median of those within a round.
Operations are counted for visible pairs alone, 4 d each forward and 10 d backward.

Exit status: 0; 1 if something failed or is wrong; 2 for wrong usage.
"""

import itertools
import statistics
import sys

import attn
import common
import picture
import rates

KINDS, OPS = ['packed', 'window', 'softcap'], ['fwd', 'bwd']
HEADS = 4
SEQUENCES, SEQUENCE_TOKENS, QUICK_SEQUENCE_TOKENS, GOAL = 8, [128, 256, 512, 1024, 2048], [32, 64], 1.3
# The shortest sequence is eight windows: its first rows, which see less, are few.
WINDOW, WINDOW_TOKENS = 512, [4096, 8192, 16384, 32768]
QUICK_WINDOW, QUICK_WINDOW_TOKENS = 16, [128, 256, 512, 1024]
SOFTCAP, SOFTCAP_TOKENS, QUICK_SOFTCAP_TOKENS = 50, [1024, 2048, 4096], [128]
# Packed sequences of a few tokens, an empty one, and a cap that bends scores whose deviation is 1.
VALIDATED = {'packed': {'packed': [1, 31, 40, 8, 0, 64, 47, 1]}, 'window': {'window': 40}, 'softcap': {'softcap': 1.5}}
PANELS = {'packed': ('packed sequences in one call / each alone', 'tokens a sequence', 'ratio'),
          'window': ('a sliding window', 'tokens', 'us a token'),
          'softcap': ('with a soft-cap / without', 'tokens', 'ratio')}
COLOURS = ['#2a9d8f', '#e07a5f', '#3b4252', '#81a969']


def kind_of(line):
    return line['op'].split('_')[0]


def compared(line, shortest):
    """What a case is, and with what it is compared."""
    if kind_of(line) == 'packed':
        return f"{line['sequences']} packed sequences of {line['tokens'] // line['sequences']:,} / each alone"
    if kind_of(line) == 'window':
        return f"window {line['window']:,} / at {shortest:,} tokens"
    return f"soft-cap {line['softcap']} / none"


class Masks(common.Benchmark):
    shortest = 0  # tokens of the sequence that windows are compared with
    name, text, rounds = 'masks', __doc__, 9
    quick = {'dims': [64], 'rounds': 3}
    head = ['compared', 'op', 'd', 'dtype', 'tokens x heads', 'threads', 'us a token', 'of the peak', 'ratio of times']

    def flags(self, parser):
        common.add_list(parser, '--kinds', 'kinds', KINDS, KINDS)
        common.add_list(parser, '--dims', 'head dims', [64, 128])
        common.add_list(parser, '--dtypes', 'storage types', attn.DTYPES, attn.DTYPES)
        common.add_list(parser, '--threads', 'numbers of threads', sorted({1, common.cores()}))

    def open(self):
        given = self.options
        self.ours = peers.Ours(given)
        common.log('validating against double precision')
        errors = {}
        for kind in given.kinds:
            problems = [(peers.Problem(*attn.VALIDATED, dim, dtype, True, **VALIDATED[kind]), threads)
                        for dim, dtype, threads in itertools.product(given.dims, given.dtypes, given.threads)]
            errors |= rates.validate({kind: self.ours}, problems, OPS, attn.BOUNDS)
        return {'kernels': self.ours.about, 'errors': errors}

    def cases(self):
        given = self.options
        for kind, dim, dtype, threads in itertools.product(given.kinds, given.dims, given.dtypes, given.threads):
            yield f'{kind}, head dim {dim}, {dtype}, {common.counted(threads)}', kind, dim, dtype, threads

    def run(self, kind, dim, dtype, threads):
        def problem(tokens, **mask):
            return peers.Problem(tokens, HEADS, dim, dtype, True, **mask)
        return {'packed': self.packed, 'window': self.window, 'softcap': self.softcap}[kind](threads, problem)

    def packed(self, threads, problem):
        for tokens in QUICK_SEQUENCE_TOKENS if self.options.quick else SEQUENCE_TOKENS:
            one = problem(SEQUENCES * tokens, packed=[tokens] * SEQUENCES)
            for op, seconds, peak in self.measure({'packed': [one], 'alone': [problem(tokens)] * SEQUENCES}, threads):
                yield self.line('packed', op, one, threads, seconds['packed'], seconds['alone'], peak,
                                sequences=SEQUENCES)

    def window(self, threads, problem):
        window, lengths = (QUICK_WINDOW, QUICK_WINDOW_TOKENS) if self.options.quick else (WINDOW, WINDOW_TOKENS)
        self.shortest = lengths[0]
        problems = {tokens: problem(tokens, window=window) for tokens in lengths}
        for op, seconds, peak in self.measure({tokens: [one] for tokens, one in problems.items()}, threads):
            for tokens, one in problems.items():
                base = [value * tokens / lengths[0] for value in seconds[lengths[0]]]
                yield self.line('window', op, one, threads, seconds[tokens], base, peak, window=window)

    def softcap(self, threads, problem):
        for tokens in QUICK_SOFTCAP_TOKENS if self.options.quick else SOFTCAP_TOKENS:
            capped = problem(tokens, softcap=SOFTCAP)
            for op, seconds, peak in self.measure({'capped': [capped], 'plain': [problem(tokens)]}, threads):
                yield self.line('softcap', op, capped, threads, seconds['capped'], seconds['plain'], peak,
                                softcap=SOFTCAP)

    def measure(self, sides, threads):
        """Each operation, with the seconds of every side's rounds and the peak. A side is a list of problems, called
        one after the other."""
        served = {name: [self.ours.serve(problem, threads) for problem in problems] for name, problems in sides.items()}
        for op in OPS:  # a backward reads what the forward before it left
            peaks = []
            calls = {name: lambda all_of=[calls[op] for calls in of]: [call() for call in all_of]
                     for name, of in served.items()}
            calls['peak'] = lambda into=peaks: into.append(self.ours.peak(threads))
            yield op, rates.alternate(calls, self.options.rounds), statistics.median(peaks)

    @staticmethod
    def line(kind, op, problem, threads, seconds, base, peak, **mask):
        """`base`: seconds, round by round, of what it is compared with, for as many tokens."""
        median = statistics.median(seconds)
        return {'op': f'{kind}_{op}', **problem.fields, **mask, 'threads': threads,
                'gflops': round(1e-9 * problem.flop(op) / median, 2), 'peak_gflops': round(1e-9 * peak, 2),
                'seconds_per_token': float(f'{median / problem.tokens:.4g}'), **rates.ratios(seconds, base),
                'round_s': [round(value, 6) for value in seconds], 'base_round_s': [round(value, 6) for value in base]}

    def row(self, line):
        return [compared(line, self.shortest), rates.NAMES[line['op'][-3:]], str(line['head_dim']), line['dtype'],
                f"{line['tokens']:,} x {line['heads']}", str(line['threads']), f"{1e6 * line['seconds_per_token']:.3g}",
                rates.peak_cell(line), rates.ratio_cell(line)]

    def end(self, lines):
        """The worst of each kind in a sentence; packed sequences have a goal."""
        print()
        for kind in self.options.kinds:
            of = [line for line in lines if kind_of(line) == kind]
            if kind == 'window':
                of = [line for line in of if line['tokens'] == max(each['tokens'] for each in of)]
            worst = max(of, key=lambda line: line['ratio'])
            goal = f"; at most {GOAL}: {'met' if worst['ratio'] <= GOAL else 'missed'}" if kind == 'packed' else ''
            print(f"largest: {compared(worst, self.shortest)}, {rates.NAMES[worst['op'][-3:]]}, head dim "
                  f"{worst['head_dim']}, {worst['dtype']}, {worst['tokens']:,} tokens, "
                  f"{common.counted(worst['threads'])}: {worst['ratio']:.3f}{goal}")

    def picture(self, lines):
        """A panel a kind; forward solid, backward dashed, a colour for head dim and data type; the most threads."""
        given = self.options
        threads = max(given.threads)
        colours = dict(zip(itertools.product(given.dims, given.dtypes), itertools.cycle(COLOURS)))

        def place(line):
            """Where it lies in its panel."""
            if kind_of(line) == 'window':
                return line['tokens'], 1e6 * line['seconds_per_token']
            return line['tokens'] // line.get('sequences', 1), line['ratio']

        def panel(kind):
            shown, curves = [line for line in lines if line['threads'] == threads], []
            for of_type, colour in colours.items():
                for op, dashes in zip(OPS, (picture.SOLID, picture.DASHED)):
                    curves.append(([place(line) for line in shown if (line['op'], line['head_dim'], line['dtype']) ==
                                    (f'{kind}_{op}', *of_type)], colour, dashes))
            levels = [(1, picture.SOLID)] if kind != 'window' else []
            levels += [(GOAL, picture.DOTTED)] if kind == 'packed' else []
            about, x, y = PANELS[kind]
            return picture.Panel(about, curves, x=x, y=y, levels=levels)
        legend = [(f'{dim}, {dtype}', colour, picture.SOLID) for (dim, dtype), colour in colours.items()]
        legend += [('forward', picture.GREY, picture.SOLID), ('backward', picture.GREY, picture.DASHED)]
        legend += [('goal', picture.BLACK, picture.DOTTED)] if 'packed' in given.kinds else []
        picture.draw(given.chart, f'Masks, {common.counted(threads)}: {self.header["machine"]}',
                     [[panel(kind) for kind in given.kinds]], legend, share=('none', 'none'), size=(3.6, 3),
                     tick='{:,}'.format)


if __name__ == '__main__':
    benchmark = Masks()
    benchmark.read()
    import attn_peers as peers
    sys.exit(benchmark.main())

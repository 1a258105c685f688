#!/usr/bin/env python3
"""latent.py -- attention over a latent (MLA): K and V sent as heads beside the latent gathered, by Ulysses and by UPipe

Compiles bench/latent.c and runs it: forward and backward of one causal block in f32, on ranks that are threads, with 16
heads of DeepSeek-V3. Each way runs once a round, in the opposite order every other round. In every run y and all
gradients must have the same bits for all ways, and bytes held and sent must be those of the dry run.

In the numbers, seconds are medians over rounds, until the slowest rank is done; cpu_s those of the processors, of all
ranks together. `ratio` is the time over that of the same method with K and V as heads, the median of those within a
round; cpu_ratio the same by processor time. Bytes are those of rank 0. Where ranks outnumber cores, time is the sum of
their work, and what is sent is copied in memory: times do not carry over to other links.

Exit status: 0; 1 if something failed or is wrong; 2 for wrong usage.
"""

import itertools
import json
import statistics
import subprocess
import sys

import common
import methods
import picture
import rates

NAMES, FORMS = {'ulysses': 'Ulysses', 'upipe': 'UPipe'}, {'heads': picture.SOLID, 'gathered': picture.DASHED}
RANKS = [2, 4, 8]  # divisors of the heads, below them: UPipe has several stages


class Latent(common.Benchmark):
    name, text, rounds, quick = 'latent', __doc__, 7, {'tokens': [128, 256], 'rounds': 2}
    head = ['tokens', 'method', 'form', 'seconds', "time / heads'", 'processor time', 'sent, MiB', 'peak, MiB']

    def flags(self, parser):
        common.add_list(parser, '--tokens', 'lengths of the sequence', [2048, 4096, 8192])
        parser.add_argument('--ranks', type=int, choices=RANKS, default=4, help='threads (4)')

    def refuse(self, options):
        if any(tokens % options.ranks for tokens in options.tokens):
            return '--tokens are multiples of --ranks'
        return None

    def open(self):
        isa, libraries = self.options.isa, ['-Wl,--no-as-needed', '-lm', '-pthread']  # they stand before what needs them
        self.program = common.compile_unit('latent.c', f'latent_{isa}', [*common.ISA_FLAGS[isa], *libraries])
        return {}

    def cases(self):
        return [(f'{tokens} tokens', tokens) for tokens in self.options.tokens]

    def run(self, tokens):
        command = [self.program, *map(str, (tokens, self.options.ranks, self.options.rounds))]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode != 0:
            common.fail(f'failed: {" ".join(command)}')
        runs = [json.loads(line) for line in done.stdout.splitlines()]
        for method in NAMES:
            of = {form: [run for run in runs if (run['method'], run['form']) == (method, form)] for form in FORMS}
            wall, cpu = ({form: [run.pop(clock) for run in of[form]] for form in FORMS} for clock in ('wall', 'cpu'))
            for form in FORMS:
                yield {'op': 'latent', **of[form][0], 'dtype': 'f32', 'causal': True, 'ranks': self.options.ranks,
                       'tokens': tokens, 'seconds': round(statistics.median(wall[form]), 6),
                       'cpu_s': round(statistics.median(cpu[form]), 6), 'round_s': wall[form],
                       **rates.ratios(wall[form], wall['heads']),
                       'cpu_ratio': rates.ratios(cpu[form], cpu['heads'])['ratio']}

    def row(self, line):
        ratios = ['1', '1'] if line['form'] == 'heads' else [rates.ratio_cell(line), f"{line['cpu_ratio']:.3f}"]
        return [f"{line['tokens']:,}", NAMES[line['method']], line['form'], f"{line['seconds']:.3f}", *ratios,
                methods.mib(line['sent_bytes']), methods.mib(line['peak_bytes'])]

    def picture(self, lines):
        """Time, bytes sent and the peak over the length, a colour a method, dashed where the latent is gathered."""
        def panel(title, value, **more):
            points = {way: [(line['tokens'], value(line)) for line in lines if (line['method'], line['form']) == way]
                      for way in itertools.product(NAMES, FORMS)}
            curves = [(of, methods.LINES[method][0], FORMS[form]) for (method, form), of in points.items()]
            return picture.Panel(title, curves, x='tokens', **more)
        panels = [panel('forward and backward', lambda line: line['seconds'], y='seconds', log_y=True),
                  panel('sent by a rank', lambda line: line['sent_bytes'] / methods.MIB, y='MiB'),
                  panel('peak of a rank', lambda line: line['peak_bytes'] / methods.MIB, y='MiB')]
        legend = [(f'{NAMES[method]}, {form}', methods.LINES[method][0], FORMS[form])
                  for method, form in itertools.product(NAMES, FORMS)]
        picture.draw(self.options.chart, f'A latent on {self.options.ranks} ranks, f32: {self.header["machine"]}',
                     [panels], legend, share=('none', 'none'), margin=1.8)


if __name__ == '__main__':
    benchmark = Latent()
    benchmark.read()
    sys.exit(benchmark.main())

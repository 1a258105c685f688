#!/usr/bin/env python3
"""states.py -- errors of the rules of linear attention over up to a million tokens, against f64 token by token

One head of 64 in f32, in chunks of 64 tokens, from a state of zeros. At every power of two: the state behind so many
tokens, and the output of the second half of them (of all of the first 1,024), each as relative L2 distance. `gate` is
the mean of -g: 0.05 is a gate as models have it, whose state lasts for 20 tokens; 1e-5 a state of 100,000 tokens; 0 one
that never decays. Beside ours `transformers`, the gated delta rule of Qwen3-Next on PyTorch in f32 on the same data.

Exit status: 0; 1 if something failed; 2 for wrong usage.
"""

import sys

import common
import picture

RULES = {'delta': 'gated delta rule', 'decay': 'scalar decay'}
COLOURS = {'0.05': '#3b4252', '1e-5': '#e07a5f', '0': '#2a9d8f'}  # of the gates
FIRST, HEAD_DIM = 1024, 64


class Sums:
    """Of the squares of errors, and of what is exact."""

    def __init__(self):
        self.error = self.exact = 0.0

    def add(self, got, exact):
        self.error += float(((got.astype(np.float64) - exact) ** 2).sum())
        self.exact += float((exact ** 2).sum())

    def l2(self):
        return float(f'{(self.error / self.exact) ** 0.5:.3g}')


class States(common.Benchmark):
    name, text, peers, packages = 'states', __doc__, ['transformers'], {'transformers': ['torch', 'transformers']}
    quick = {'tokens': 4 * FIRST}
    head = ['', 'rule', 'gate', 'tokens', 'ours', 'transformers']

    def flags(self, parser):
        parser.add_argument('--tokens', type=int, default=1 << 20, metavar='N',
                            help='the longest sequence, a power of two (1048576)')

    def refuse(self, options):
        if options.tokens < FIRST or options.tokens & (options.tokens - 1):
            return f'--tokens is a power of two, and not below {FIRST}'
        return None

    def open(self):
        self.ours = rules.Library(self.options.isa)
        found, left_out = common.contestants({'transformers': rules.Transformers}, self.options.peers, self.options)
        self.peer = found.get('transformers')
        return {'left_out': left_out,
                'contestants': {'ours': self.ours.about, **{name: peer.about for name, peer in found.items()}}}

    def cases(self):
        return [(f'{about}, gate {gate}', rule, gate) for rule, about in RULES.items() for gate in COLOURS]

    def run(self, rule, gate):
        """Lines of one sequence, part by part: each as long as all before it together."""
        peer, tokens = self.peer if rule == 'delta' else None, self.options.tokens
        shape = (1, HEAD_DIM, HEAD_DIM)
        exact, mine, theirs = np.zeros(shape), np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        first, seed = 0, 0
        while first < tokens:
            end, sums, peer_sums = max(FIRST, 2 * first), Sums(), Sums()
            while first < end:  # pieces that fit in memory
                seed += 1
                problem = rules.Problem(min(end - first, 1 << 16), 1, HEAD_DIM, rule, float(gate), seed)
                problem.arrays['state'] = mine
                call = self.ours.call(problem, 1, first)
                call.run(0)
                o = call.exact(exact)
                mine = call.arrays['out']
                sums.add(call.arrays['o'][:, 0], o)
                if peer:
                    problem.arrays['state'] = theirs
                    x = [peer.tensor(problem, name) for name in rules.INPUTS[:6]]
                    with peer.torch.no_grad():
                        got, theirs = (y[0].numpy() for y in peer.rule(x))
                    peer_sums.add(got[:, 0], o)
                first += problem.tokens
            for op, got, other in (('out', sums, peer_sums), ('state', Sums(), Sums())):
                if op == 'state':
                    got.add(mine, exact), other.add(theirs, exact)
                yield {'op': op, 'rule': rule, 'gate': gate, 'head_dim': HEAD_DIM, 'dtype': 'f32', 'tokens': end,
                       'l2': got.l2(), 'peers': {'transformers': other.l2()} if peer else {}}

    def row(self, line):
        return [line['op'], line['rule'], line['gate'], f"{line['tokens']:,}", f"{line['l2']:.2g}",
                *(f'{value:.2g}' for value in line['peers'].values())]

    def picture(self, lines):
        """A column a rule; output solid, state dashed, the peer's output dotted."""
        def curve(rule, gate, op, dashes, value):
            shown = [line for line in lines if (line['op'], line['rule'], line['gate']) == (op, rule, gate)]
            return [(line['tokens'], value(line)) for line in shown if value(line)], COLOURS[gate], dashes

        def panel(rule):
            curves = [curve(rule, gate, *what) for gate in COLOURS for what in (
                ('out', picture.SOLID, lambda line: line['l2']), ('state', picture.DASHED, lambda line: line['l2']),
                ('out', picture.DOTTED, lambda line: line['peers'].get('transformers')))]
            return picture.Panel(RULES[rule], curves, x='tokens', y='relative L2 error', log_y=True)
        legend = [(f'gate {gate}', colour, picture.SOLID) for gate, colour in COLOURS.items()]
        legend += [('output', picture.GREY, picture.SOLID), ('state', picture.GREY, picture.DASHED)]
        legend += [('output, PyTorch', picture.GREY, picture.DOTTED)] if self.peer else []
        picture.draw(self.options.chart, f'Errors against f64, f32, one head of {HEAD_DIM}: {self.ours.about}',
                     [[panel(rule) for rule in RULES]], legend, size=(4, 3), margin=1.5)


if __name__ == '__main__':
    benchmark = States()
    benchmark.read()
    import numpy as np
    import linear_rules as rules
    sys.exit(benchmark.main())

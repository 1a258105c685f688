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

RULES, GATES = ['delta', 'decay'], ['0.05', '1e-5', '0']
NAMES = {'delta': 'gated delta rule', 'decay': 'scalar decay'}
COLOURS = dict(zip(GATES, ['#3b4252', '#e07a5f', '#2a9d8f']))
FIRST, HEAD_DIM = 1024, 64


def read_options():
    common.PACKAGES['transformers'] = ['torch', 'transformers']
    parser = common.arguments(__doc__, ['transformers'])
    parser.add_argument('--tokens', type=int, default=1 << 20, metavar='N', help='the longest sequence, a power of two (1048576)')
    options = common.parse(parser, 'states')
    if options.quick:
        options.tokens = 4 * FIRST
    if options.tokens < FIRST or options.tokens & (options.tokens - 1):
        parser.error(f'--tokens is a power of two, and not below {FIRST}')
    return options


class Ours:
    def __init__(self, options):
        self.library = rules.Library(options.isa)
        self.about = self.library.about

    def run(self, problem, first):
        call = self.library.call(problem, 1, first)
        call.run(0)
        return call


class Sums:
    """Of the squares of errors, and of what is exact."""

    def __init__(self):
        self.error = self.exact = 0.0

    def add(self, got, exact):
        self.error += float(((got.astype(np.float64) - exact) ** 2).sum())
        self.exact += float((exact ** 2).sum())

    def l2(self):
        return float(f'{(self.error / self.exact) ** 0.5:.3g}')


def measure(ours, peer, rule, gate, tokens):
    """Lines of one sequence, part by part: each as long as all before it together."""
    shape = (1, HEAD_DIM, HEAD_DIM)
    exact, mine, theirs = np.zeros(shape), np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    first, seed = 0, 0
    while first < tokens:
        end, sums, peer_sums = max(FIRST, 2 * first), Sums(), Sums()
        while first < end:  # pieces that fit in memory
            seed += 1
            problem = rules.Problem(min(end - first, 1 << 16), 1, HEAD_DIM, rule, float(gate), seed)
            problem.arrays['state'] = mine
            call = ours.run(problem, first)
            o = call.exact(exact)
            mine = call.arrays['out']
            sums.add(call.arrays['o'][:, 0], o)
            if peer and rule == 'delta':
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
                   'l2': got.l2(), 'peers': {'transformers': other.l2()} if peer and rule == 'delta' else {}}


def draw(cases, title, path):
    """A column a rule; output solid, state dashed, the peer's output dotted."""
    plt = common.pyplot()
    if plt is None:
        return
    figure, panels = plt.subplots(1, len(RULES), figsize=(9.6, 3.6), sharey=True)
    for axes, rule in zip(panels, RULES):
        for gate in GATES:
            for op, line in (('out', '-'), ('state', (0, (4, 2)))):
                shown = [case for case in cases if (case['op'], case['rule'], case['gate']) == (op, rule, gate)]
                axes.plot([case['tokens'] for case in shown], [case['l2'] for case in shown], color=COLOURS[gate],
                          linestyle=line, linewidth=1.8, marker='o', markersize=3)
                if op == 'out' and any(case['peers'] for case in shown):
                    axes.plot([case['tokens'] for case in shown], [case['peers']['transformers'] for case in shown],
                              color=COLOURS[gate], linestyle=(0, (1, 2)), linewidth=1.3)
        ticks = sorted({case['tokens'] for case in cases})[::2]
        axes.set_xscale('log', base=2)
        axes.set_yscale('log')
        axes.set_xticks(ticks, [f'{n // 1024}k' if n < 1 << 20 else f'{n >> 20}M' for n in ticks])
        axes.set_title(NAMES[rule], fontsize=10)
        axes.set_xlabel('tokens')
        common.tidy(axes)
    panels[0].set_ylabel('relative L2 error')
    labels = [(f'gate {gate}', COLOURS[gate], '-') for gate in GATES]
    labels += [('output', '#555555', '-'), ('state', '#555555', (0, (4, 2)))]
    if any(case['peers'] for case in cases):
        labels.append(('output, PyTorch', '#555555', (0, (1, 2))))
    common.finish(figure, [plt.Line2D([], [], color=colour, linestyle=line) for _, colour, line in labels],
                  [name for name, _, _ in labels], f'Errors against f64, f32, one head of {HEAD_DIM}: {title}', path, 1.5)


def main(options):
    makers = {'ours': Ours, 'transformers': rules.Transformers}
    contestants, left_out = common.contestants(makers, ['ours', *options.peers], options)
    more = {'isa': options.isa, 'left_out': left_out,
            'contestants': {name: contestant.about for name, contestant in contestants.items()}}
    with common.Lines(options.json, more) as lines:
        lines.print_header()
        common.table_head(['', 'rule', 'gate', 'tokens', 'ours', 'transformers'])
        for rule in RULES:
            for gate in GATES:
                common.log(f'{NAMES[rule]}, gate {gate}')
                for line in measure(contestants['ours'], contestants.get('transformers'), rule, gate, options.tokens):
                    lines.write(line)
                    common.table_line([line['op'], rule, gate, f"{line['tokens']:,}", f"{line['l2']:.2g}",
                                       *(f'{value:.2g}' for value in line['peers'].values() or [])])
        draw(lines.cases, contestants['ours'].about, options.chart)
    common.log(f'numbers: {options.json}')
    return 0


if __name__ == '__main__':
    given = read_options()  # before NumPy is needed: run.sh asks what to install with a Python that may lack it
    import numpy as np
    import linear_rules as rules
    sys.exit(main(given))

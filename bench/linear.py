#!/usr/bin/env python3
"""linear.py -- the rules of linear attention on the CPU, forward and backward, beside PyTorch's in the same run

The gated delta rule and the scalar decay, in f32, in chunks of 64 tokens. Everyone is validated against the rule in
double precision, token by token; then all take turns, and the medians count. `products` are our own
products alone, without what is between them, on one thread. `transformers` is torch_chunk_gated_delta_rule of
Qwen3-Next, forward under no_grad, backward by autograd.grad alone.

Operations are those that a chunked rule needs, for everyone. A product of rows with the state of d x d counts 2 d^2 a
token and head, one up to the diagonal of a chunk 64 d: 3 and 4 of them forward, 8 and 11 backward; with scalar decay 2
and 2, 5 and 5. What a contestant really computes does not count: whole squares, and states a second time. The peak is
that of fused multiply-adds, the fastest of the same turns.

Exit status: 0; 1 if something failed or is wrong; 2 for wrong usage.
"""

import itertools
import sys
import time

import common
import rates

RULES = {'delta': 'gated delta', 'decay': 'scalar decay'}
VALIDATED = 200, 2  # tokens, heads


class Ours:
    def __init__(self, options):
        self.rules = rules.Library(options.isa)
        self.about, self.peak = self.rules.about, self.rules.peak

    def serve(self, problem, threads):
        call = self.rules.call(problem, threads)
        return {'fwd': lambda: call.run(0), 'bwd': lambda: call.run(1), 'call': call,
                'results': lambda: {name: call.arrays[name] for name in rules.RESULTS if name in call.arrays}}


class Transformers:
    def __init__(self, _):
        self.peer = rules.Transformers()
        self.about = self.peer.about

    def serve(self, problem, threads):
        if problem.rule != 'delta':
            return None
        torch, made = self.peer.torch, {}
        torch.set_num_threads(threads)
        x = [self.peer.tensor(problem, name) for name in rules.INPUTS]

        def fwd():
            with torch.no_grad():
                made.update(zip(('o', 'out'), self.peer.rule(x[:6])))
        leaves = [y.clone().requires_grad_() for y in x[:6]]
        out = self.peer.rule(leaves)

        def bwd():
            made.update(zip(('dq', 'dk', 'dv', 'dg', 'dbeta', 'dstate'),
                            torch.autograd.grad(out, leaves, x[6:], retain_graph=True)))
        return {'fwd': fwd, 'bwd': bwd, 'results': lambda: {name: y[0].numpy() for name, y in made.items()}}


class Linear(rates.Rates):
    name, text, prefix, peers = 'linear', __doc__, 'linear_', ['transformers']
    packages = {'transformers': ['torch', 'transformers']}
    makers = {'ours': Ours, 'transformers': Transformers}
    bounds = {'f32': 5e-6}  # two of them are within 1e-5
    best = max
    rounds, quick = 7, {'dims': [64], 'tokens': [256], 'rounds': 3}
    head = ['', 'rule', 'dim', 'threads']

    def flags(self, parser):
        common.add_list(parser, '--dims', 'dims of key and value', [64, 128])
        common.add_list(parser, '--rules', 'rules', list(RULES), list(RULES))
        common.add_list(parser, '--tokens', 'lengths', [4096])
        common.add_list(parser, '--threads', 'numbers of threads', sorted({1, common.cores()}))
        parser.add_argument('--heads', type=common.positive, default=4, metavar='N', help='heads (4)')
        parser.add_argument('--cpu-time', action='store_true',
                            help='seconds of the processor, on a machine that others use too; of one thread alone')

    def refuse(self, options):
        return '--cpu-time is that of --threads 1' if options.cpu_time and options.threads != [1] else None

    def problems(self):
        for dim, rule, threads in itertools.product(self.options.dims, self.options.rules, self.options.threads):
            yield rules.Problem(*VALIDATED, dim, rule), threads

    def open(self):
        if self.options.cpu_time:
            self.clock = time.process_time
        more = super().open()
        self.names.insert(0, 'products')
        self.head = [*type(self).head, 'GFLOP/s', 'of the peak', *self.names]
        return {**more, 'errors': {name: error['f32'] for name, error in more['errors'].items()}}

    def cases(self):
        given = self.options
        for rule, dim, tokens, threads in itertools.product(given.rules, given.dims, given.tokens, given.threads):
            yield f'{rule}, {tokens} tokens, dim {dim}, {common.counted(threads)}', tokens, dim, rule, threads

    def run(self, tokens, dim, rule, threads):
        return super().run(rules.Problem(tokens, self.options.heads, dim, rule), threads)

    def beside(self, op, served, threads):
        return {'products': served['ours']['call'].products(self.ops.index(op))} if threads == 1 else {}

    def cells(self, line):
        return [rates.NAMES[line['op'][-3:]], RULES[line['rule']], str(line['head_dim']), str(line['threads'])]


if __name__ == '__main__':
    benchmark = Linear()
    benchmark.read()
    import linear_rules as rules
    sys.exit(benchmark.main())

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

PEERS = ['transformers']
OPS, RULES = ['fwd', 'bwd'], ['delta', 'decay']
NAMES = {'fwd': 'forward', 'bwd': 'backward', 'delta': 'gated delta', 'decay': 'scalar decay'}
CHUNK = 64
# Products with a state, and of rows of a chunk up to the diagonal, that a chunked rule needs.
WORK = {('fwd', 'delta'): (3, 4), ('bwd', 'delta'): (8, 11), ('fwd', 'decay'): (2, 2), ('bwd', 'decay'): (5, 5)}
BOUND = 5e-6  # largest error of a result over its largest value: two of them are within 1e-5
VALIDATED = 200, 2  # tokens, heads


def read_options():
    common.PACKAGES['transformers'] = ['torch', 'transformers']
    parser = common.arguments(__doc__, PEERS)
    common.add_list(parser, '--dims', 'dims of key and value', [64, 128])
    common.add_list(parser, '--rules', 'rules', RULES, RULES)
    common.add_list(parser, '--tokens', 'lengths', [4096])
    common.add_list(parser, '--threads', 'numbers of threads', sorted({1, common.cores()}))
    parser.add_argument('--heads', type=int, default=4, metavar='N', help='heads (4)')
    parser.add_argument('--rounds', type=int, default=7, metavar='N', help='turns of everyone (7)')
    parser.add_argument('--cpu-time', action='store_true',
                        help='seconds of the processor, on a machine that others use too; of one thread alone')
    options = common.parse(parser, 'linear')
    if options.quick:
        options.dims, options.tokens, options.rounds = [64], [256], 3
    if options.rounds < 1 or options.heads < 1 or min(options.dims + options.tokens + options.threads) < 1:
        parser.error('rounds, heads, dims, tokens and threads are positive')
    if options.cpu_time and options.threads != [1]:
        parser.error('--cpu-time is that of --threads 1')
    return options


def flop(op, problem):
    """Squares of the state and triangles of a chunk, of each token and head."""
    squares, triangles = WORK[op, problem.rule]
    return problem.tokens * problem.heads * problem.dim * (2 * squares * problem.dim + CHUNK * triangles)


# ---- who runs it: serve(problem, threads) gives {'fwd': call, 'bwd': call}, and 'results', a function ----

class Ours:
    def __init__(self, options):
        self.rules = rules.Library(options.isa)
        self.about = self.rules.about

    def serve(self, problem, threads):
        call = self.rules.call(problem, threads)
        return {'fwd': lambda: call.run(0), 'bwd': lambda: call.run(1), 'results': lambda: call.arrays, 'call': call}

    def peak(self, threads):
        return self.rules.peak(threads)


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


CONTESTANTS = {'ours': Ours, 'transformers': Transformers}


# ---- measuring ----

def validate(contestants, options):
    """The largest error of everyone; ends the program where it is above the bound."""
    worst = dict.fromkeys(contestants, 0.0)
    for dim, rule, threads in itertools.product(options.dims, options.rules, options.threads):
        problem = rules.Problem(*VALIDATED, dim, rule)
        truth = rules.reference(problem)
        for name, contestant in contestants.items():
            calls = contestant.serve(problem, threads)
            if calls is None:
                continue
            for op in OPS:
                calls[op]()
            got = calls['results']()
            for what, values in truth.items():
                error = float(abs(got[what] - values).max() / abs(values).max())
                if not error <= BOUND:
                    common.fail(f'{name} is wrong: {what} differs by {error:.1e} from double precision, of at most '
                                f'{BOUND:g} (dim {dim}, {rule}, {threads} threads)')
                worst[name] = max(error, worst[name])
    return {name: float(f'{error:.1e}') for name, error in worst.items()}


def measure(contestants, problem, threads, options):
    """A line for each operation."""
    served = {name: contestant.serve(problem, threads) for name, contestant in contestants.items()}
    served = {name: calls for name, calls in served.items() if calls is not None}
    for op in OPS:
        calls, peaks = {name: of[op] for name, of in served.items()}, []
        calls['peak'] = lambda: peaks.append(contestants['ours'].peak(threads))
        alone = served['ours']['call'].products(OPS.index(op)) if threads == 1 else None
        if alone:
            calls['products'] = alone
        clock = time.process_time if options.cpu_time else time.perf_counter
        seconds = common.alternate(calls, options.rounds, clock=clock)
        yield {'op': f'linear_{op}', 'rule': problem.rule, 'head_dim': problem.dim, 'dtype': 'f32', 'heads': problem.heads,
               'tokens': problem.tokens, 'threads': threads, **common.rates_of(seconds, [max(peaks)], flop(op, problem))}


def print_case(line, names):
    common.table_line([NAMES[line['op'][-3:]], NAMES[line['rule']], str(line['head_dim']), str(line['threads']),
                       *common.rate_cells(line, names)])


def main(options):
    contestants, left_out = common.contestants(CONTESTANTS, ['ours', *options.peers], options)
    names = ['products', *(name for name in contestants if name != 'ours')]
    common.log('validating against double precision')
    more = {'isa': options.isa, 'contestants': {name: contestant.about for name, contestant in contestants.items()},
            'left_out': left_out, 'errors': validate(contestants, options)}
    cases = list(itertools.product(options.rules, options.dims, options.tokens, options.threads))
    with common.Lines(options.json, more) as lines:
        lines.print_header()
        common.table_head(['', 'rule', 'dim', 'threads', 'GFLOP/s', 'of the peak', *names])
        for number, (rule, dim, tokens, threads) in enumerate(cases):
            common.log(f'{number + 1} of {len(cases)}: {rule}, {tokens} tokens, dim {dim}, {threads} threads')
            for line in measure(contestants, rules.Problem(tokens, options.heads, dim, rule), threads, options):
                lines.write(line)
                print_case(line, names)
    common.log(f'numbers: {options.json}')
    return 0


if __name__ == '__main__':
    given = read_options()  # before NumPy is needed: run.sh asks what to install with a Python that may lack it
    import linear_rules as rules
    sys.exit(main(given))

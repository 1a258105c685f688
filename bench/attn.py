#!/usr/bin/env python3
"""attn.py -- attention on the CPU, forward and backward, beside its peers in the same run

Measures the rate of fused multiply-adds and the bandwidth of memory, validates everyone against NumPy in double
precision, then times: all take turns, and the medians count. Operations are 4 d a visible pair of query and key forward
and 10 d backward, for everyone; the peak is measured in the same turns, with the vectors that our kernels use and as
many threads. A peer's ratio is our rate over its rate: above 1 we are faster.

Exit status: 0; 1 if something failed or is wrong; 2 for wrong usage.
"""

import itertools
import statistics
import sys

import common

PEERS = ['torch', 'onednn', 'ggml', 'naive', 'bf16']
OPS = ['fwd', 'bwd']
NAMES = {'fwd': 'forward', 'bwd': 'backward'}
TOKENS = [1024, 2048, 4096, 8192, 16384]
COLOURS = {'ours': '#e07a5f', 'torch': '#3b4252', 'onednn': '#2a9d8f', 'ggml': '#81a969', 'naive': '#c3cede',
           'bf16': '#f2a65a'}
# Largest error of a result over its largest value. What is stored in bf16 is rounded by 2e-3 of itself, and PyTorch
# rounds weights to bf16 too.
BOUNDS = {'f32': 2e-5, 'bf16': 2e-2}
VALIDATED = 192, 2  # tokens, heads
BANDWIDTH_FLOATS = 1 << 25  # an array's


def heads_of(tokens):
    """Work for all threads, and about as much in short sequences as in long ones."""
    return max(2, min(16, 16384 // tokens))


def read_options():
    parser = common.arguments(__doc__, PEERS)
    common.add_list(parser, '--dims', 'head dims', [64, 128])
    common.add_list(parser, '--dtypes', 'storage types', ['f32', 'bf16'], ['f32', 'bf16'])
    common.add_list(parser, '--masks', 'masks', ['causal', 'full'], ['causal', 'full'])
    common.add_list(parser, '--tokens', 'lengths', TOKENS)
    common.add_list(parser, '--threads', 'numbers of threads', sorted({1, common.cores()}))
    common.add_list(parser, '--ops', 'operations', OPS, OPS)
    parser.add_argument('--rounds', type=int, default=5, metavar='N', help='turns of everyone (5)')
    options = common.parse(parser, 'attn')
    if options.quick:
        options.dims, options.tokens, options.rounds = [64], [256], 3
    if options.rounds < 1 or min(options.dims + options.tokens + options.threads) < 1:
        parser.error('rounds, head dims, tokens and threads are positive')
    return options


def validate(contestants, options):
    """The largest error of everyone in every kind of case; ends the program where it is above the bound."""
    tokens, heads = VALIDATED
    worst = {name: {} for name in contestants}
    for dim, dtype, mask, threads in itertools.product(options.dims, options.dtypes, options.masks, options.threads):
        problem = peers.Problem(tokens, heads, dim, dtype, mask == 'causal')
        truth = peers.reference(problem)
        for name, contestant in contestants.items():
            calls = contestant.serve(problem, threads)
            if calls is None:
                continue
            for op in OPS:
                if op in calls:
                    calls[op]()
            for what, values in contestant.results(calls).items():
                error = float(abs(values - truth[what]).max() / abs(truth[what]).max())
                if not error <= BOUNDS[dtype]:
                    common.fail(f'{name} is wrong: {what} differs by {error:.1e} from double precision, of at most '
                                f'{BOUNDS[dtype]:g} (head dim {dim}, {dtype}, {mask}, {threads} threads)')
                worst[name][dtype] = max(error, worst[name].get(dtype, 0))
            calls.get('free', lambda: None)()
    return {name: {dtype: float(f'{error:.1e}') for dtype, error in errors.items()} for name, errors in worst.items()}


def measure(contestants, problem, threads, options):
    """A line for each operation: our rate, the peak's, and the peers'."""
    served = {name: contestant.serve(problem, threads) for name, contestant in contestants.items()}
    served = {name: calls for name, calls in served.items() if calls is not None}
    for op in OPS:  # a backward reads what the forward before it left
        if op == 'bwd' and op not in options.ops:
            continue
        calls = {name: of[op] for name, of in served.items() if op in of}
        if op not in options.ops:
            for call in calls.values():
                call()
            continue
        peaks = []
        calls['peak'] = lambda: peaks.append(contestants['ours'].peak(threads))
        seconds = common.alternate(calls, options.rounds)
        yield {'op': f'attn_{op}', 'head_dim': problem.head_dim, 'dtype': problem.dtype, 'causal': problem.causal,
               'tokens': problem.tokens, 'heads': problem.heads, 'threads': threads, **common.rates_of(seconds, peaks, problem.flop(op))}
    for calls in served.values():
        calls.get('free', lambda: None)()


def print_case(line, names):
    common.table_line([NAMES[line['op'][-3:]], str(line['head_dim']), line['dtype'], 'causal' if line['causal'] else 'full',
                       f"{line['tokens']:,} x {line['heads']}", str(line['threads']), *common.rate_cells(line, names)])


def draw(cases, names, title, path):
    """Rates over tokens: a row an operation, a column a head dim and data type; causal solid, full dashed."""
    plt = common.pyplot()
    if plt is None:
        return
    threads = max(case['threads'] for case in cases)
    lengths = sorted({case['tokens'] for case in cases})
    ops = sorted({case['op'] for case in cases}, reverse=True)
    kinds = sorted({(case['head_dim'], case['dtype']) for case in cases}, key=lambda kind: (kind[1] != 'f32', kind[0]))
    figure, panels = plt.subplots(len(ops), len(kinds), figsize=(3.4 * len(kinds) + 1.6, 3 * len(ops) + 0.8),
                                  sharex=True, sharey=True, squeeze=False)
    for (row, op), (column, (dim, dtype)) in itertools.product(enumerate(ops), enumerate(kinds)):
        axes = panels[row][column]
        shown = [case for case in cases if (case['op'], case['head_dim'], case['dtype'], case['threads']) ==
                 (op, dim, dtype, threads)]
        for causal, dashes in ((True, '-'), (False, (0, (4, 2)))):
            for name in ['ours', *names]:
                points = [(case['tokens'], case['gflops'] if name == 'ours' else case['peers'].get(name))
                          for case in shown if case['causal'] == causal]
                points = sorted(point for point in points if point[1])
                if points:
                    axes.plot(*zip(*points), color=COLOURS[name], linestyle=dashes, marker='o', markersize=3,
                              linewidth=2 if name == 'ours' else 1.3)
        if shown:
            axes.axhline(statistics.median(case['peak_gflops'] for case in shown), color='black', linewidth=0.8,
                         linestyle=(0, (1, 2)))
        axes.set_xscale('log', base=2)
        axes.set_xticks(lengths, [f'{tokens / 1024:g}k' for tokens in lengths])
        axes.set_title(f'{NAMES[op[-3:]]}, head dim {dim}, {dtype}', fontsize=10)
        common.tidy(axes)
    panels[0][0].set_ylim(bottom=0)
    for row in panels:
        row[0].set_ylabel('GFLOP/s')
    for axes in panels[-1]:
        axes.set_xlabel('tokens')
    labels = [('ours', 'upipe'), *((name, name) for name in names)]
    handles = [plt.Line2D([], [], color=COLOURS[name]) for name, _ in labels]
    handles += [plt.Line2D([], [], color='#555555', linestyle=style) for style in ('-', (0, (4, 2)), (0, (1, 2)))]
    common.finish(figure, handles, [label for _, label in labels] + ['causal', 'full', 'peak'],
                  f'Attention, {threads} {"thread" if threads == 1 else "threads"}: {title}', path)


def main(options):
    contestants, left_out = common.contestants({'ours': peers.Ours, **peers.CONTESTANTS}, ['ours', *options.peers], options)
    ours, names = contestants['ours'], [name for name in contestants if name != 'ours']
    common.log('validating against double precision')
    errors = validate(contestants, options)
    peaks = {threads: ours.peak(threads) for threads in options.threads}
    bandwidths = {threads: ours.bandwidth(threads, BANDWIDTH_FLOATS) for threads in options.threads}
    more = {'isa': options.isa, 'peer_isa': options.peer_isa,
            'contestants': {name: contestant.about for name, contestant in contestants.items()}, 'left_out': left_out,
            'errors': errors, 'peak_gflops': {threads: round(1e-9 * rate, 1) for threads, rate in peaks.items()},
            'triad_gb_per_s': {threads: round(1e-9 * rate, 1) for threads, rate in bandwidths.items()}}
    shapes = list(itertools.product(options.dims, options.dtypes, options.masks, options.tokens, options.threads))
    with common.Lines(options.json, more) as lines:
        lines.print_header()
        common.table_head(['op', 'd', 'dtype', 'mask', 'tokens x heads', 'threads', 'GFLOP/s', 'of the peak', *names])
        for number, (dim, dtype, mask, tokens, threads) in enumerate(shapes):
            common.log(f'{number + 1} of {len(shapes)}: head dim {dim}, {dtype}, {mask}, {tokens} tokens, '
                       f'{threads} threads')
            problem = peers.Problem(tokens, heads_of(tokens), dim, dtype, mask == 'causal')
            for line in measure(contestants, problem, threads, options):
                lines.write(line)
                print_case(line, names)
        draw(lines.cases, names, lines.header['machine'], options.chart)
    ours.close()
    common.log(f'numbers: {options.json}')
    return 0


if __name__ == '__main__':
    given = read_options()  # before NumPy is needed: run.sh asks what to install with a Python that may lack it
    import attn_peers as peers  # noqa: E402
    sys.exit(main(given))

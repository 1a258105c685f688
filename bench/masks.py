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

KINDS = ['packed', 'window', 'softcap']
HEADS = 4
SEQUENCES, SEQUENCE_TOKENS, QUICK_SEQUENCE_TOKENS, GOAL = 8, [128, 256, 512, 1024, 2048], [32, 64], 1.3
# The shortest sequence is eight windows: its first rows, which see less, are few.
WINDOW, WINDOW_TOKENS = 512, [4096, 8192, 16384, 32768]
QUICK_WINDOW, QUICK_WINDOW_TOKENS = 16, [128, 256, 512, 1024]
SOFTCAP, SOFTCAP_TOKENS, QUICK_SOFTCAP_TOKENS = 50, [1024, 2048, 4096], [128]
# Packed sequences of a few tokens, an empty one, and a cap that bends scores whose deviation is 1.
VALIDATED = {'packed': {'packed': [1, 31, 40, 8, 0, 64, 47, 1]}, 'window': {'window': 40}, 'softcap': {'softcap': 1.5}}
COLOURS = ['#2a9d8f', '#e07a5f', '#3b4252', '#81a969']


def read_options():
    parser = common.arguments(__doc__, [])
    common.add_list(parser, '--kinds', 'kinds', KINDS, KINDS)
    common.add_list(parser, '--dims', 'head dims', [64, 128])
    common.add_list(parser, '--dtypes', 'storage types', ['f32', 'bf16'], ['f32', 'bf16'])
    common.add_list(parser, '--threads', 'numbers of threads', sorted({1, common.cores()}))
    parser.add_argument('--rounds', type=int, default=9, metavar='N', help='turns of all that is compared (9)')
    options = common.parse(parser, 'masks')
    if options.quick:
        options.dims, options.rounds = [64], 3
    if options.rounds < 1 or min(options.dims + options.threads) < 1:
        parser.error('rounds, head dims and threads are positive')
    return options


# ---- measuring ----

def validate(ours, options):
    """The largest error of every mask and data type; ends the program where it is above the bound."""
    tokens, heads = attn.VALIDATED
    worst = {kind: {} for kind in options.kinds}
    for kind, dim, dtype, threads in itertools.product(options.kinds, options.dims, options.dtypes, options.threads):
        problem = peers.Problem(tokens, heads, dim, dtype, True, **VALIDATED[kind])
        truth, calls = peers.reference(problem), ours.serve(problem, threads)
        for op in attn.OPS:
            calls[op]()
        for what, values in ours.results(calls).items():
            error = float(abs(values - truth[what]).max() / abs(truth[what]).max())
            if not error <= attn.BOUNDS[dtype]:
                common.fail(f'{kind}: {what} differs by {error:.1e} from double precision, of at most '
                            f'{attn.BOUNDS[dtype]:g} (head dim {dim}, {dtype}, {threads} threads)')
            worst[kind][dtype] = max(float(f'{error:.1e}'), worst[kind].get(dtype, 0))
    return worst


def measure(ours, sides, threads, rounds):
    """Each operation, with the seconds of every side's rounds and the peak. A side is a list of problems, called one
    after the other."""
    served = {name: [ours.serve(problem, threads) for problem in problems] for name, problems in sides.items()}
    for op in attn.OPS:  # a backward reads what the forward before it left
        peaks = []
        calls = {name: lambda all_of=[calls[op] for calls in of]: [call() for call in all_of]
                 for name, of in served.items()}
        calls['peak'] = lambda into=peaks: into.append(ours.peak(threads))
        yield op, common.alternate(calls, rounds), statistics.median(peaks)


def line(kind, op, problem, threads, seconds, base, peak, **case):
    """`base`: seconds, round by round, of what it is compared with, for as many tokens."""
    ratios = [mine / its for mine, its in zip(seconds, base)]
    median = statistics.median(seconds)
    return {'op': f'{kind}_{op}', 'head_dim': problem.head_dim, 'dtype': problem.dtype, 'causal': True, **case,
            'tokens': problem.tokens, 'heads': problem.heads, 'threads': threads,
            'gflops': round(1e-9 * problem.flop(op) / median, 2), 'peak_gflops': round(1e-9 * peak, 2),
            'seconds_per_token': float(f'{median / problem.tokens:.4g}'), 'ratio': round(statistics.median(ratios), 4),
            'ratio_range': [round(min(ratios), 4), round(max(ratios), 4)],
            'round_s': [round(value, 6) for value in seconds], 'base_round_s': [round(value, 6) for value in base]}


def packed_sequences(ours, dim, dtype, threads, options):
    for tokens in QUICK_SEQUENCE_TOKENS if options.quick else SEQUENCE_TOKENS:
        packed = peers.Problem(SEQUENCES * tokens, HEADS, dim, dtype, True, packed=[tokens] * SEQUENCES)
        alone = [peers.Problem(tokens, HEADS, dim, dtype, True)] * SEQUENCES
        for op, seconds, peak in measure(ours, {'packed': [packed], 'alone': alone}, threads, options.rounds):
            yield line('packed', op, packed, threads, seconds['packed'], seconds['alone'], peak, sequences=SEQUENCES)


def windows(ours, dim, dtype, threads, options):
    window, lengths = (QUICK_WINDOW, QUICK_WINDOW_TOKENS) if options.quick else (WINDOW, WINDOW_TOKENS)
    problems = [peers.Problem(tokens, HEADS, dim, dtype, True, window=window) for tokens in lengths]
    for op, seconds, peak in measure(ours, {p.tokens: [p] for p in problems}, threads, options.rounds):
        for problem in problems:
            base = [value * problem.tokens / lengths[0] for value in seconds[lengths[0]]]
            yield line('window', op, problem, threads, seconds[problem.tokens], base, peak, window=window)


def softcaps(ours, dim, dtype, threads, options):
    for tokens in QUICK_SOFTCAP_TOKENS if options.quick else SOFTCAP_TOKENS:
        capped, plain = (peers.Problem(tokens, HEADS, dim, dtype, True, softcap=cap) for cap in (SOFTCAP, 0))
        for op, seconds, peak in measure(ours, {'capped': [capped], 'plain': [plain]}, threads, options.rounds):
            yield line('softcap', op, capped, threads, seconds['capped'], seconds['plain'], peak, softcap=SOFTCAP)


MEASURES = {'packed': packed_sequences, 'window': windows, 'softcap': softcaps}


# ---- tables ----

def counted(threads):
    return f'{threads} thread' if threads == 1 else f'{threads} threads'


def kind_of(case):
    return case['op'].split('_')[0]


def compared(case, shortest):
    """What a case is, and with what it is compared."""
    if kind_of(case) == 'packed':
        return f"{case['sequences']} packed sequences of {case['tokens'] // case['sequences']:,} / each alone"
    if kind_of(case) == 'window':
        return f"window {case['window']:,} / at {shortest:,} tokens"
    return f"soft-cap {case['softcap']} / none"


def shortest_of(cases):
    """Tokens of the sequence that windows are compared with; 0 where none was measured."""
    return min((case['tokens'] for case in cases if kind_of(case) == 'window'), default=0)


def print_case(case, shortest):
    low, high = case['ratio_range']
    common.table_line([compared(case, shortest), attn.NAMES[case['op'][-3:]], str(case['head_dim']), case['dtype'],
                       f"{case['tokens']:,} x {case['heads']}", str(case['threads']), f"{1e6 * case['seconds_per_token']:.3g}",
                       common.rate_cells(case, [])[1], f"{case['ratio']:.3f} ({low:.3f} to {high:.3f})"])


def verdicts(cases):
    """The worst of each kind in a sentence; packed sequences have a goal."""
    print()
    for kind in KINDS:
        of = [case for case in cases if kind_of(case) == kind]
        if kind == 'window':
            of = [case for case in of if case['tokens'] == max(each['tokens'] for each in of)]
        if not of:
            continue
        worst = max(of, key=lambda case: case['ratio'])
        goal = f"; at most {GOAL}: {'met' if worst['ratio'] <= GOAL else 'missed'}" if kind == 'packed' else ''
        print(f"largest: {compared(worst, shortest_of(cases))}, {attn.NAMES[worst['op'][-3:]]}, head dim "
              f"{worst['head_dim']}, {worst['dtype']}, {worst['tokens']:,} tokens, {counted(worst['threads'])}: "
              f"{worst['ratio']:.3f}{goal}")


# ---- the picture ----

PANELS = {'packed': ('packed sequences in one call / each alone', 'tokens a sequence', 'ratio'),
          'window': ('a sliding window', 'tokens', 'us a token'),
          'softcap': ('with a soft-cap / without', 'tokens', 'ratio')}


def points_of(cases):
    """Where the cases lie in their panel."""
    if kind_of(cases[0]) == 'window':
        return [(case['tokens'], 1e6 * case['seconds_per_token']) for case in cases]
    return [(case['tokens'] // case.get('sequences', 1), case['ratio']) for case in cases]


def draw(cases, title, path):
    """A panel a kind; forward solid, backward dashed, a colour for head dim and data type."""
    plt = common.pyplot()
    if plt is None:
        return
    threads = max(case['threads'] for case in cases)
    kinds = [kind for kind in KINDS if any(kind_of(case) == kind for case in cases)]
    types = list(dict.fromkeys((case['head_dim'], case['dtype']) for case in cases))
    colours = dict(zip(types, itertools.cycle(COLOURS)))
    figure, panels = plt.subplots(1, len(kinds), figsize=(3.6 * len(kinds) + 1.6, 3.8), squeeze=False)
    for axes, kind in zip(panels[0], kinds):
        ticks = set()
        for of_type, (op, dashes) in itertools.product(types, (('fwd', '-'), ('bwd', (0, (4, 2))))):
            points = points_of([case for case in cases if (case['op'], case['threads']) == (f'{kind}_{op}', threads) and
                                (case['head_dim'], case['dtype']) == of_type])
            ticks.update(place for place, _ in points)
            axes.plot(*zip(*points), color=colours[of_type], linestyle=dashes, marker='o', markersize=3)
        if kind != 'window':
            axes.axhline(1, color='black', linewidth=0.8)
        if kind == 'packed':
            axes.axhline(GOAL, color='black', linewidth=0.8, linestyle=(0, (1, 2)))
        axes.set_xscale('log', base=2)
        axes.set_xticks(sorted(ticks), [f'{tick:,}' for tick in sorted(ticks)])
        axes.set_ylim(bottom=0)
        about, over, label = PANELS[kind]
        axes.set_title(about, fontsize=10)
        axes.set_xlabel(over)
        axes.set_ylabel(label)
        common.tidy(axes)
    labels = [f'{dim}, {dtype}' for dim, dtype in types] + ['forward', 'backward']
    handles = [plt.Line2D([], [], color=colours[of_type]) for of_type in types]
    handles += [plt.Line2D([], [], color='#555555', linestyle=style) for style in ('-', (0, (4, 2)))]
    if 'packed' in kinds:
        labels.append('goal')
        handles.append(plt.Line2D([], [], color='black', linewidth=0.8, linestyle=(0, (1, 2))))
    common.finish(figure, handles, labels, f'Masks, {counted(threads)}: {title}', path)


def main(options):
    ours = peers.Ours(options)
    common.log('validating against double precision')
    more = {'isa': options.isa, 'kernels': ours.about, 'errors': validate(ours, options)}
    shapes = list(itertools.product(options.kinds, options.dims, options.dtypes, options.threads))
    with common.Lines(options.json, more) as lines:
        lines.print_header()
        common.table_head(['compared', 'op', 'd', 'dtype', 'tokens x heads', 'threads', 'us a token', 'of the peak', 'ratio of times'])
        for number, (kind, dim, dtype, threads) in enumerate(shapes):
            common.log(f'{number + 1} of {len(shapes)}: {kind}, head dim {dim}, {dtype}, {counted(threads)}')
            for case in MEASURES[kind](ours, dim, dtype, threads, options):
                lines.write(case)
                print_case(case, shortest_of(lines.cases))
        verdicts(lines.cases)
        draw(lines.cases, lines.header['machine'], options.chart)
    ours.close()
    common.log(f'numbers: {options.json}')
    return 0


if __name__ == '__main__':
    given = read_options()  # before NumPy is needed: run.sh asks what to install with a Python that may lack it
    import attn_peers as peers  # noqa: E402
    sys.exit(main(given))

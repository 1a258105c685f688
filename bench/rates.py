"""rates.py -- contestants that are validated, and then take turns

A contestant has `about`, its version and what it runs, and serve(problem, threads): {'fwd': call, 'bwd': call}, what it
has of these, and 'results', a function that gives {name: array} of what the calls have left; None: it has no such case.
A problem has `dtype`, `fields` (those of a line), `about` (words for a log), flop(op) and reference(), the results in
double precision.
"""

import statistics
import time

import common

REST = 0.01  # seconds between two turns, in which the threads of the one before stop to look for work
NAMES = {'fwd': 'forward', 'bwd': 'backward'}


def to_bf16(x):
    """f32 rounded to nearest, ties to even: the upper half of its bits."""
    bits = x.astype('float32').view('uint32')
    return ((bits + 0x7fff + (bits >> 16 & 1)) >> 16).astype('uint16')


def to_f32(x):
    """bf16 widened; f32 as it is."""
    return (x.astype('uint32') << 16).view('float32') if x.dtype == 'uint16' else x


def validate(contestants, problems, ops, bounds):
    """{contestant: {dtype: its largest error}}, errors over a result's largest value. `problems`: (problem, threads).
    Ends the program where an error is above the bound of the dtype."""
    worst = {name: {} for name in contestants}
    for problem, threads in problems:
        truth = problem.reference()
        for name, contestant in contestants.items():
            calls = contestant.serve(problem, threads)
            if calls is None:
                continue
            for op in ops:
                calls.get(op, lambda: None)()
            for what, values in calls['results']().items():
                error = float(abs(values - truth[what]).max() / abs(truth[what]).max())
                if not error <= bounds[problem.dtype]:
                    common.fail(f'{name} is wrong: {what} differs by {error:.1e} from double precision, of at most '
                                f'{bounds[problem.dtype]:g} ({problem.about}, {common.counted(threads)})')
                worst[name][problem.dtype] = max(float(f'{error:.1e}'), worst[name].get(problem.dtype, 0))
            calls.get('free', lambda: None)()
    return worst


def alternate(calls, rounds, slow=20, clock=time.perf_counter):
    """Seconds of every call in every round: {name: [seconds, ...]}. They take turns, in the opposite order every other
    round; each is called once before. One that takes more than `slow` seconds then has its turn in the first round
    only."""
    first = {}
    for name, call in calls.items():
        start = clock()
        call()
        first[name] = clock() - start
    seconds = {name: [] for name in calls}
    for turn in range(rounds):
        names = [name for name in calls if turn == 0 or first[name] < slow]
        for name in names if turn % 2 == 0 else names[::-1]:
            time.sleep(REST)
            start = clock()
            calls[name]()
            seconds[name].append(clock() - start)
    return seconds


def ratios(mine, base):
    """Of two lists of seconds, round by round: the median of the ratios, and their ends."""
    of_rounds = [one / other for one, other in zip(mine, base)]
    return {'ratio': round(statistics.median(of_rounds), 4),
            'ratio_range': [round(min(of_rounds), 4), round(max(of_rounds), 4)]}


def ratio_cell(line, name='ratio'):
    low, high = line[f'{name}_range']
    return f'{line[name]:.3f} ({low:.3f} to {high:.3f})'


def peak_cell(line):
    return f"{100 * line['gflops'] / line['peak_gflops']:.0f} % of {line['peak_gflops']:.0f}"


class Rates(common.Benchmark):
    """A benchmark of rates beside the peak and the peers'.

        prefix, ops   what lines say of the operations, and these, each of which reads what those before it left
        bounds        {dtype: the largest error}
        makers        {contestant: its class}, ours too
        clock, best   seconds; of a case's peaks the one that counts
        problems()    (problem, threads) that are validated
        cells(line)   of a row, before the rates
    """
    prefix, ops, bounds, makers = '', ['fwd', 'bwd'], {}, {}
    clock, best = staticmethod(time.perf_counter), staticmethod(statistics.median)

    def open(self):
        self.contestants, left_out = common.contestants(self.makers, ['ours', *self.options.peers], self.options)
        self.ours, self.names = self.contestants['ours'], [name for name in self.contestants if name != 'ours']
        self.head = [*self.head, 'GFLOP/s', 'of the peak', *self.names]
        common.log('validating against double precision')
        return {'contestants': {name: contestant.about for name, contestant in self.contestants.items()},
                'left_out': left_out, 'errors': validate(self.contestants, self.problems(), self.ops, self.bounds)}

    def beside(self, op, served, threads):
        """More calls that take turns."""
        return {}

    def run(self, problem, threads):
        """A line for each operation: our rate, the peak's, and the peers'."""
        requested = getattr(self.options, 'ops', self.ops)
        served = {name: contestant.serve(problem, threads) for name, contestant in self.contestants.items()}
        served = {name: calls for name, calls in served.items() if calls is not None}
        for op in self.ops[:1 + max(map(self.ops.index, requested))]:
            calls, peaks = {name: of[op] for name, of in served.items() if op in of}, []
            if op not in requested:
                for call in calls.values():
                    call()
                continue
            calls['peak'] = lambda: peaks.append(self.ours.peak(threads))
            calls.update(self.beside(op, served, threads))
            seconds = alternate(calls, self.options.rounds, clock=self.clock)
            rates = {name: round(1e-9 * problem.flop(op) / statistics.median(of), 2) for name, of in seconds.items()}
            yield {'op': self.prefix + op, **problem.fields, 'threads': threads, 'gflops': rates['ours'],
                   'peak_gflops': round(1e-9 * self.best(peaks), 2),
                   'peers': {name: rate for name, rate in rates.items() if name not in ('ours', 'peak')},
                   'round_s': [round(value, 6) for value in seconds['ours']]}
        for calls in served.values():
            calls.get('free', lambda: None)()

    def cells(self, line):
        return []

    @staticmethod
    def rate_of(line, name):
        """None: who has no rate there."""
        return line['gflops'] if name == 'ours' else line['peers'].get(name)

    def curve(self, name, lines, point, dashes):
        """One contestant's; point(line, rate): where it lies."""
        points = [point(line, self.rate_of(line, name)) for line in lines if self.rate_of(line, name)]
        return points, common.COLOURS[name], dashes

    def legend(self):
        return [('upipe' if name == 'ours' else name, common.COLOURS[name], '-') for name in ['ours', *self.names]]

    def row(self, line):
        rates = [self.rate_of(line, name) for name in self.names]
        return [*self.cells(line), f"{line['gflops']:.1f}", peak_cell(line),
                *(f"{rate:.1f}, {line['gflops'] / rate:.2f}x" if rate else '-' for rate in rates)]

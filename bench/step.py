#!/usr/bin/env python3
"""step.py -- a whole training step of a Llama, by examples/train and by transformers on PyTorch

Layers of D = 512 with 8 query heads and 4 key/value heads of 64, an MLP of 1,408 and bytes as tokens, batch 1: the same
weights, text, loss, clipping and AdamW for everyone. Losses of three steps at the shortest length must agree first, to
1e-5 of the loss in f32; bf16 to 2e-2.

    ours                 recomputes all activations of a layer from its input, the default of `train`
    ours-sac             keeps attention's result too (--activations sac)
    torch-checkpointed   transformers with gradient checkpointing, SDPA and fused AdamW
    torch                the same without checkpointing

Each turn is a process of its own: a step that does not count, up to 8k tokens, then --steps that do. In each round everyone
has a turn, in the opposite order every other round; one whose step takes more than 60 s has its turn in the first round
alone. Times are medians, without start and loading. Memory is the most that a process had resident, its program and
libraries included. Threads of ours are ranks, over which weights, gradients and states are sharded (--zero 3). llm.c's
trainer for CPUs has GPT-2's positions, norms and MLP alone, which make no Llama, so it is not measured.

Exit status: 0; 1 if something failed or is wrong; 2 for wrong usage.
"""

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

import common
import picture
import rates

SHAPE = {'model-dim': 512, 'heads': 8, 'kv-heads': 4, 'head-dim': 64, 'ff-dim': 1408}
RANKS = [1, 2, 4, 8]
ADAMW = {'lr': 1e-3, 'weight-decay': 0.1, 'beta1': 0.9, 'beta2': 0.95, 'adam-eps': 1e-8, 'clip': 1.0}
OURS = {'ours': 'ac', 'ours-sac': 'sac'}
PEERS = {'torch-checkpointed': True, 'torch': False}
LINES = {'ours': (common.COLOURS['ours'], picture.SOLID), 'ours-sac': (common.COLOURS['ours'], picture.DASHED),
         'torch-checkpointed': (common.COLOURS['torch'], picture.DASHED), 'torch': (common.COLOURS['torch'], picture.SOLID)}
BOUNDS, AGREE_STEPS = {'f32': 1e-5, 'bf16': 2e-2}, 3
SLOW, WARM, MIB = 60, 8192, 2**20  # seconds; the most tokens with a first step that does not count
WORKER = os.path.join(common.TOP, 'bench', 'step_torch.py')
BOOK = os.path.join(common.TOP, 'examples', 'data', 'genesis_exodus.txt')
PHASES = ['forward', 'backward', 'sum', 'update']
# What is hoped for: a sentence, the peer, from how many tokens on, its ratio to ours, and the least of it
GOALS = [('never slower than torch with checkpointing', 'torch-checkpointed', 4096, 'ratio', 1),
         ('faster than torch without', 'torch', 8192, 'ratio', 1),
         ('at most a quarter of the memory of torch with checkpointing', 'torch-checkpointed', 4096, 'memory_ratio', 4)]


def size(text):
    """An argparse type: lengths as 512 or 64k, with commas between them."""
    return common.listed([])(','.join(str(int(word[:-1]) * 1024) if word[:-1].isdecimal() and word[-1] == 'k' else word
                                      for word in text.split(',')))


def first_to_go():
    """Where memory ends, the system ends a contestant and no other process."""
    try:
        with open('/proc/self/oom_score_adj', 'w', encoding='ascii') as score:
            score.write('1000')
    except OSError:
        pass  # no such file on this system


class Failed(Exception):
    """A turn that memory or time did not suffice for."""


def process(command, threads, limit, folder):
    """Runs it. The most bytes it had resident. This process stays small: a child's peak begins with its parent's."""
    variables = {**os.environ, 'OMP_NUM_THREADS': str(threads), 'MKL_NUM_THREADS': str(threads)}
    said = os.path.join(folder, 'said')
    with open(said, 'w', encoding='utf-8') as err:
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=err, env=variables,  # pylint: disable=consider-using-with
                                 preexec_fn=first_to_go)
    late, (pid, status, usage) = time.monotonic() + limit, os.wait4(child.pid, os.WNOHANG)
    while pid == 0:
        time.sleep(0.02)
        if time.monotonic() > late:
            os.kill(child.pid, signal.SIGKILL)
        pid, status, usage = os.wait4(child.pid, os.WNOHANG)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode == -signal.SIGKILL:
        raise Failed('out of time' if time.monotonic() > late else 'out of memory')
    if child.returncode != 0:
        with open(said, encoding='utf-8', errors='replace') as err:
            words = err.read().strip()
        if 'memory' in words.split('\n')[-1].lower():
            raise Failed('out of memory')
        common.fail(f'failed: {" ".join(command)}: status {child.returncode}: {words}')
    return usage.ru_maxrss * (1 if sys.platform == 'darwin' else 1024)


class Step(common.Benchmark):
    name, text, peers, rounds = 'step', __doc__, list(PEERS), 3
    packages = dict.fromkeys(PEERS, ['torch', 'transformers'])
    quick = {'tokens': [512], 'threads': [1], 'rounds': 1, 'layers': 1}
    head = ['', 'tokens', 'threads', 'dtype', 'seconds', 'tokens/s', 'time / ours', 'peak, MiB', 'memory / ours',
            f'{"/".join(PHASES)}, %']

    def flags(self, parser):
        lengths = [1024 * 2**i for i in range(7)]
        parser.add_argument('--tokens', type=size, default=lengths, metavar='LIST',
                            help=f'lengths of the sequence ({",".join(map(common.amount, lengths))})')
        common.add_list(parser, '--dtypes', 'storage types, of f32,bf16; bf16 is autocast in PyTorch', ['f32'], list(BOUNDS))
        common.add_list(parser, '--threads', 'numbers of threads', sorted({1, max(n for n in RANKS if n <= common.cores())}))
        parser.add_argument('--layers', type=common.positive, default=4, metavar='N', help='layers (4)')
        parser.add_argument('--method', default='upipe', help='method of our ranks, as `train` has it (upipe)')
        parser.add_argument('--steps', type=common.positive, default=1, metavar='N', help='steps of a turn that count (1)')
        parser.add_argument('--limit', type=common.positive, default=3600, metavar='SECONDS', help='most of a turn (3600)')

    def refuse(self, options):
        most = os.path.getsize(BOOK) - 1
        if max(options.tokens) > most:
            return f'--tokens: the text has {most}'
        return None if set(options.threads) <= set(RANKS) else f'--threads: of {", ".join(map(str, RANKS))}, which share the heads'

    def turn(self, name, tokens, dtype, threads, steps):
        """The log's lines of that many steps, and the peak."""
        with tempfile.TemporaryDirectory() as folder:
            text, log = os.path.join(folder, 'text'), os.path.join(folder, 'log')
            with open(BOOK, 'rb') as book, open(text, 'wb') as out:
                out.write(book.read(tokens + 1))
            job = {'load': self.weights, 'data': text, 'log': log, 'steps': steps, 'dtype': dtype, **ADAMW}
            if name in OURS:
                command = self.train({**job, 'tokens': tokens, 'ranks': threads, 'method': self.options.method, 'zero': 3,
                                      'activations': OURS[name], 'schedule': 'constant', 'warmup': 0})
            else:
                command = [sys.executable, WORKER, json.dumps({**job, 'threads': threads, 'checkpointed': PEERS[name]})]
            peak = process(command, threads, self.options.limit, folder)
            with open(log, encoding='utf-8') as source:
                return [json.loads(line) for line in source], peak

    def train(self, flags):
        """The command with these flags."""
        return [self.program, '--sample', '0', *(word for flag, value in flags.items() for word in (f'--{flag}', str(value)))]

    def open(self):
        flags = [*common.ISA_FLAGS[self.options.isa], f'-DUPIPE_SOURCE_ROOT="{common.TOP}"', '-Wl,--no-as-needed',
                 '-ljansson', '-lm', '-pthread']
        self.program = common.compile_unit(os.path.join('..', 'examples', 'train', 'train.c'), f'train_{self.options.isa}', flags)
        about, left_out = dict.fromkeys(OURS, self.said([self.program, '--version'])), {}
        if self.options.peers:
            versions = self.said([sys.executable, WORKER])
            (about if versions else left_out).update(dict.fromkeys(self.options.peers, versions or 'transformers cannot be loaded'))
        self.names = list(about)
        saved = os.path.join(common.BUILD, 'step_weights')
        shutil.rmtree(saved, ignore_errors=True)
        self.weights = os.path.join(saved, 'checkpoint-0')
        made = self.train({**SHAPE, 'layers': self.options.layers, 'tokens': max(self.options.tokens), 'ranks': 1, 'steps': 0,
                           'save': saved})
        if subprocess.run(made, stdout=subprocess.DEVNULL, check=False).returncode != 0:
            common.fail(f'failed: {" ".join(made)}')
        common.log('comparing losses')
        return {'contestants': about, 'left_out': left_out, 'errors': self.agree()}

    @staticmethod
    def said(command):
        """What a command prints, if it can be run."""
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ''

    def agree(self):
        """{contestant: {dtype: the largest difference of its losses from those of ours on one thread, over the loss}}"""
        given, errors = self.options, {name: {} for name in self.names}
        for dtype in given.dtypes:
            truth = None
            for threads in sorted({1, *given.threads}):
                for name in self.names:
                    try:
                        lines, _ = self.turn(name, min(given.tokens), dtype, threads, AGREE_STEPS)
                    except Failed as why:
                        common.fail(f'{name}, {dtype}, {common.counted(threads)}: {why}')
                    losses = [line['loss'] for line in lines]
                    truth = truth or losses
                    error = max(abs(loss / true - 1) for loss, true in zip(losses, truth))
                    if len(losses) != AGREE_STEPS or not error <= BOUNDS[dtype]:
                        common.fail(f'{name} is wrong: losses {losses}, {truth} of ours on one thread, off by {error:.1e} of at most '
                                    f'{BOUNDS[dtype]:g} ({dtype}, {common.counted(threads)})')
                    errors[name][dtype] = max(float(f'{error:.1e}'), errors[name].get(dtype, 0))
        return errors

    def cases(self):
        given = self.options
        return [(f'{tokens} tokens, {dtype}, {common.counted(threads)}', tokens, dtype, threads)
                for dtype in given.dtypes for threads in given.threads for tokens in sorted(given.tokens)]

    def turns(self, tokens, dtype, threads):
        """{contestant: its turns}, and {contestant: why it has none}"""
        turns, failed, steps = {name: [] for name in self.names}, {}, (tokens <= WARM) + self.options.steps
        for number in range(self.options.rounds):
            for name in self.names[::1 if number % 2 == 0 else -1]:
                if name in failed or (turns[name] and turns[name][0][0][-1]['seconds']['step'] > SLOW):
                    continue
                try:
                    turns[name].append(self.turn(name, tokens, dtype, threads, steps))
                except Failed as why:
                    failed[name] = str(why)
                    common.log(f'{name}: {why}')
        return turns, failed

    def run(self, tokens, dtype, threads):
        turns, failed = self.turns(tokens, dtype, threads)
        ours = None
        for name in self.names:
            line = {'op': 'step', 'method': name, 'shape': f'{self.options.layers}x{SHAPE["model-dim"]}', 'dtype': dtype,
                    'tokens': tokens, 'threads': threads}
            if name in failed:
                yield {**line, 'failed': failed[name]}
                continue
            counted = [[step['seconds'] for step in steps[-self.options.steps:]] for steps, _ in turns[name]]
            round_s = [round(statistics.median(step['step'] for step in steps), 6) for steps in counted]
            seconds, peak = statistics.median(round_s), max(peak for _, peak in turns[name])
            line |= {'seconds': seconds, 'tokens_per_s': round(tokens / seconds, 2), 'round_s': round_s, 'peak_rss': peak}
            if name in OURS:
                line['phases_s'] = {phase: round(statistics.median(step[phase] for steps in counted for step in steps), 6)
                                    for phase in PHASES}
            else:
                line['imported_rss'] = turns[name][0][0][0]['imported_rss']
            ours = line if name == 'ours' else ours
            if ours:
                line |= {**rates.ratios(round_s, ours['round_s']), 'memory_ratio': round(peak / ours['peak_rss'], 4)}
            yield line

    def row(self, line):
        cells = [line['method'], f"{line['tokens']:,}", line['threads'], line['dtype']]
        if 'failed' in line:
            cells.append(line['failed'])
        else:
            cells += [f"{line['seconds']:.3f}", f"{line['tokens_per_s']:.0f}", rates.ratio_cell(line) if 'ratio' in line else '-',
                      f"{line['peak_rss'] / MIB:.0f}", f"{line['memory_ratio']:.2f}" if 'ratio' in line else '-',
                      '/'.join(f"{100 * value / line['seconds']:.0f}" for value in line.get('phases_s', {}).values())]
        return cells + [''] * (len(self.head) - len(cells))

    def end(self, lines):
        """Goals, by the worst ratio to `ours`."""
        print()
        for what, peer, least, key, goal in GOALS:
            ratios = [(line[key], line) for line in lines if line['method'] == peer and key in line and line['tokens'] >= least]
            if not ratios:
                print(f'goal: from {common.amount(least)} {what}: not measured')
                continue
            worst, line = min(ratios, key=lambda one: one[0])
            print(f'goal: from {common.amount(least)} {what}: {"met" if worst >= goal else "missed"}: {peer} / ours is {worst:.2f} '
                  f'at least, of {goal} ({common.amount(line["tokens"])} tokens, {line["dtype"]}, {common.counted(line["threads"])})')

    def picture(self, lines):
        """Time and memory over tokens, a column for each data type and number of threads."""
        def panel(dtype, threads, key, unit, label):
            curves = [([(line['tokens'], line[key] / unit) for line in lines if key in line and
                        (line['method'], line['dtype'], line['threads']) == (name, dtype, threads)], *LINES[name])
                      for name in self.names]
            return picture.Panel(f'{dtype}, {common.counted(threads)}', curves, x='tokens', y=label, log_y=True, more=plain)

        def plain(axes):
            axes.set_yscale('log', base=2)
            axes.yaxis.set_major_formatter(lambda value, _: f'{value:g}')
        columns = [(dtype, threads) for dtype in self.options.dtypes for threads in self.options.threads]
        grid = [[panel(*column, 'seconds', 1, 'seconds of a step') for column in columns],
                [panel(*column, 'peak_rss', MIB, 'peak memory, MiB') for column in columns]]
        picture.draw(self.options.chart, f'A training step: {self.header["machine"]}', grid,
                     [(name, *LINES[name]) for name in self.names], share=('all', 'row'), margin=1.8)


if __name__ == '__main__':
    benchmark = Step()
    benchmark.read()
    sys.exit(benchmark.main())

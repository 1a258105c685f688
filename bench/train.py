#!/usr/bin/env python3
"""train.py convergence|batch [--train PROGRAM] [--out FILE] -- the paper's two tables of a whole training, from here

convergence: 1,000 steps with DeepSpeed-Ulysses and with UPipe, the loss after every 100 (Appendix C of the paper).
batch: tokens a second and peak memory over batch sizes (section 6.3), methods in turn, the median of three runs.

Prints a table in Markdown and writes the numbers, with machine and command, as JSON (bench/results/train_*.json). The
program is the one that `sh examples/run.sh` builds. Takes about ten minutes each on two cores.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

import common

METHODS = ['ulysses', 'upipe']
MODEL = ('--layers 2 --model-dim 256 --heads 16 --kv-heads 4 --head-dim 32 --ranks 4 --tokens 1024 --seed 1 '
         '--sample 0').split()
CONVERGENCE = ['--steps', '1000', '--batch', '1', '--lr', '1e-3']
BATCHES = [1, 2, 4, 8, 10]
BATCH_STEPS, REPEATS = 4, 3


def run(program, flags):
    """The numbers of one training."""
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, 'numbers.json')
        command = [program, *MODEL, *flags, '--json', out]
        print('train ' + ' '.join(MODEL + flags), file=sys.stderr)
        if subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode != 0:
            sys.exit('train.py: the training failed')
        with open(out, encoding='utf-8') as source:
            return json.load(source)


def convergence(program):
    """Losses of both methods, which are to be the same bits in f32: main fails otherwise."""
    runs = {method: run(program, ['--method', method, *CONVERGENCE]) for method in METHODS}
    losses = {method: runs[method]['loss'] for method in METHODS}
    every = list(range(100, 1001, 100))
    common.print_table(['step'] + [f'{step:,}' for step in every],
                       [[method] + [f'{losses[method][step - 1]:.4f}' for step in every] for method in METHODS])
    same = losses['ulysses'] == losses['upipe'] and runs['ulysses']['grad_norm'] == runs['upipe']['grad_norm']
    print(f'\nall {len(losses["upipe"])} losses and gradient norms: {"the same bits" if same else "different bits"}')
    return {
        'command': ' '.join(['train', *MODEL, *CONVERGENCE, '--method', '|'.join(METHODS)]),
        'steps': every,
        'loss': {method: [losses[method][step - 1] for step in every] for method in METHODS},
        'same_bits_of_all_steps': same,
        'peak_bytes': {method: runs[method]['peak_bytes'] for method in METHODS},
        'products': runs['upipe']['config']['products'],
        'kernels': runs['upipe']['config']['kernels'],
    }


def batch(program):
    """Medians over runs in which the methods take turns."""
    speeds = {(method, size): [] for method in METHODS for size in BATCHES}
    peaks = {}
    for size in BATCHES:
        for turn in range(REPEATS):
            for method in METHODS if turn % 2 == 0 else METHODS[::-1]:
                numbers = run(program, ['--method', method, '--batch', str(size), '--steps', str(BATCH_STEPS)])
                speeds[method, size].append(numbers['tokens_per_s'])
                peaks[method, size] = numbers['peak_bytes']
    medians = {key: statistics.median(values) for key, values in speeds.items()}
    common.print_table(['batch size'] + [str(size) for size in BATCHES],
                       [[f'{method}, tokens/s'] + [f'{medians[method, size]:,.0f}' for size in BATCHES] for method in METHODS] +
                       [[f'{method}, peak MiB'] + [f'{peaks[method, size] / 2**20:.2f}' for size in BATCHES] for method in METHODS])
    return {
        'command': ' '.join(['train', *MODEL, '--batch', '|'.join(map(str, BATCHES)), '--steps', str(BATCH_STEPS),
                             '--method', '|'.join(METHODS)]),
        'batch': BATCHES,
        'tokens_per_s': {method: [medians[method, size] for size in BATCHES] for method in METHODS},
        'tokens_per_s_all': {method: [speeds[method, size] for size in BATCHES] for method in METHODS},
        'peak_bytes': {method: [peaks[method, size] for size in BATCHES] for method in METHODS},
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('what', choices=['convergence', 'batch'])
    parser.add_argument('--train', default=os.path.join(common.TOP, 'build', 'run', 'examples', 'train'), metavar='PROGRAM')
    parser.add_argument('--out', metavar='FILE')
    options = parser.parse_args()
    if not os.access(options.train, os.X_OK):
        sys.exit(f'train.py: {options.train} is not there: sh examples/run.sh builds it')
    out = options.out or os.path.join(common.TOP, 'bench', 'results', f'train_{options.what}.json')
    if not os.access(os.path.dirname(os.path.abspath(out)), os.W_OK):
        sys.exit(f'train.py: {out} cannot be written')
    numbers = {'machine': f'{common.processor()}, {os.cpu_count()} cores'}
    numbers.update(convergence(options.train) if options.what == 'convergence' else batch(options.train))
    with open(out, 'w', encoding='utf-8') as target:
        json.dump(numbers, target, indent=2)
        target.write('\n')
    print(f'written: {out}', file=sys.stderr)
    return 0 if numbers.get('same_bits_of_all_steps', True) else 1


if __name__ == '__main__':
    sys.exit(main())

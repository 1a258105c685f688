#!/usr/bin/env python3
"""paper.py [--plan PROGRAM] [--pages FILE] [--quick] -- the paper's tables and figures, theirs beside ours

Everything of the paper on Untied Ulysses (arXiv 2602.21196) that can be computed or simulated: closed forms from the
numbers of heads, the rest by upipe-plan --as torchtitan, whose constants are fitted on the Llama3-8B rows of 8 GPUs
(upipe-plan --write-machine prints them with their origins). Prints Markdown, with the error of each cell, and writes
the numbers as JSON and two pictures. --pages writes docs/paper.md.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile

import common

LENGTHS = ['128k', '256k', '512k', '1M', '2M', '3M', '4M', '5M', '6M']
GIB = 2**30
METHODS = ['native', 'ring', 'ulysses', 'fpdt', 'upipe']
MEMORY = {'native': [25.32, 31.40, 43.55, 67.86], 'ring': [21.32, 23.40, 27.58, 35.86, 52.49, 69.11],
          'ulysses': [21.26, 23.02, 26.80, 34.35, 49.49, 64.55],
          'fpdt': [21.73, 22.50, 24.03, 27.09, 35.17, 43.35, 51.42],
          'upipe': [21.10, 22.30, 24.70, 29.90, 40.50, 51.10, 61.70, 72.30]}
SPEED = {'native': [1373.87, 845.99, 474.30, 249.85], 'ring': [2064.90, 1387.67, 841.05, 458.51, 237.99, 159.96],
         'ulysses': [2320.47, 1503.80, 878.63, 475.33, 246.05, 162.41],
         'fpdt': [1171.68, 884.75, 621.20, 382.42, 219.53, 153.48, 119.76],
         'upipe': [2281.05, 1487.29, 867.17, 472.53, 246.07, 166.32, 125.56, 98.25]}
RUNTIME = {'ulysses': {'all_to_all': [0.40, 0.90, 1.68, 4.93, 16.30, 42.21],
                       'attention_forward': [1.58, 6.35, 25.71, 103.49, 421.67, 995.92],
                       'attention_backward': [2.40, 9.13, 36.74, 146.86, 588.73, 1324.71],
                       'other': [3.03, 5.33, 10.08, 19.78, 41.30, 56.31]},
           'upipe': {'all_to_all': [0.46, 1.10, 2.43, 5.52, 17.12, 34.34],
                     'attention_forward': [1.51, 6.38, 25.93, 103.92, 417.55, 940.62],
                     'attention_backward': [2.41, 9.25, 36.99, 147.37, 590.79, 1330.76],
                     'other': [2.82, 5.23, 10.10, 19.58, 37.76, 55.52]}}
BATCH = {'ulysses': ([2458.28, 2485.78, 2543.43, 2564.38, 2464.10], [22.53, 27.25, 38.13, 59.99, 71.13]),
         'upipe': ([2405.30, 2432.11, 2498.80, 2518.56, 2526.77], [22.53, 27.03, 36.56, 56.79, 67.11])}
SAO = {'Ulysses': ([2417.79, 1516.51, 880.27, 476.45], [62.94, 63.01, 63.15, 63.43], 'ulysses', 'offload'),
       'UPipe': ([2377.98, 1515.59, 878.73, 470.34], [53.24, 53.31, 53.45, 53.73], 'upipe', 'offload'),
       'UPipe-SAO': ([2445.10, 1512.69, 872.57, 471.07], [62.39, 62.47, 62.61, 62.89], 'upipe', 'sao:7')}
SAC = {'Ulysses': (864.16, 27.34, 'ulysses', 'offload'), 'Ulysses+SAC': (1066.01, 27.85, 'ulysses', 'sac'),
       'UPipe': (850.97, 25.24, 'upipe', 'offload'), 'UPipe+SAC': (1056.77, 25.75, 'upipe', 'sac')}

pages, numbers = [], {}


def say(*lines):
    pages.extend(lines)


def table(head, rows):
    say('', '| ' + ' | '.join(head) + ' |', '|' + '---|' * len(head))
    say(*('| ' + ' | '.join(row) + ' |' for row in rows), '')


class Planner:
    """upipe-plan, and what it said so far."""

    def __init__(self, program):
        self.program = program

    def ask(self, *flags):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, 'plan.json')
            done = subprocess.run([self.program, '--model', 'llama3-8b', *map(str, flags), '--json', path],
                                  capture_output=True, text=True, check=False)
            if done.returncode not in (0, 3):
                common.fail(f'{" ".join(map(str, flags))}: {done.stderr.strip()}')
            with open(path, encoding='utf-8') as source:
                return {**json.load(source), 'text': done.stdout}

    def paper(self, method, tokens, *flags):
        return self.ask('--as', 'torchtitan', '--method', method, '--tokens', tokens, *flags)


def beside(ours, theirs, name):
    """A cell: theirs, ours, the error."""
    numbers.setdefault(name, []).append([theirs, round(ours, 4)])
    return f'{theirs:g} / {ours:.2f} ({100 * (ours / theirs - 1):+.1f} %)'


# ---- closed forms ----

def stages():
    d, ff, vocab = 4096, 14336, 128256
    say('## The four stages of a forward', '',
        'In units of S * d_model bytes. The paper has typical ratios (d_ff = 2.67 d_model, V = 30 d_model); Llama3-8B has '
        f'{ff / d:g} and {vocab / d:.1f}.')
    table(['stage', 'paper', "the same formula with Llama3-8B's numbers"],
          [['embedding', '2', '2'], ['attention', '16', '16, with G = 1; 2 + 2 (1 + 2/G) 2 + 2 = 10 with 32/8 heads'],
           ['feed-forward', '25', f'{2 + 8 * ff / d + 2:g}'], ['cross-entropy', '240', f'{8 * vocab / d:.1f}']])


def intermediates():
    say('## Intermediate tensors of attention', '',
        "Q, K, V chunks and their all-to-all buffers, as a part of Ulysses'. The paper has 1/nu. It is exact where all heads "
        'have keys of their own; with grouped heads and U = C a rank holds a whole K and V head for a round, so the exact part '
        'is (3/nu) / (1 + 2/G).')
    rows = []
    for heads, kv_heads, ranks in (32, 32, 8), (64, 64, 8), (32, 8, 8), (64, 8, 8):
        nu, group = heads / ranks, heads / kv_heads
        exact = 3 / nu / (1 + 2 / group)
        numbers.setdefault('intermediates', []).append([heads, kv_heads, ranks, 1 / nu, exact])
        rows.append([f'{heads}/{kv_heads} on {ranks}', f'{100 * (1 - 1 / nu):.1f} % less', f'{100 * (1 - exact):.1f} % less'])
    table(['heads', 'paper', 'exact'], rows)
    say('## Volume of the all-to-all under grouped queries', '',
        'Heads sent by all stages of a forward (Q, K, V), in units of (C - 1) heads divided by C.')
    rows = []
    for heads, kv_heads in (32, 8), (64, 8), (16, 4):
        group = heads // kv_heads
        rows.append([f'{heads}/{kv_heads}', f'{3 * heads}', f'{heads + 2 * heads // group}', f'{heads + 2 * kv_heads}'])
    table(['heads', 'in order (paper 3H)', 'scheduled (paper H + 2H/G)', 'exact'], rows)


def phases(planner):
    say('## Attention by phase', '', "In units of T * d_model in bf16, at 1M tokens of Llama3-8B on 8 ranks; exact bytes of this "
        "library's block by a dry run, with the scratch of its CUDA kernels, beside the paper's formulas.")
    for method in 'ulysses', 'upipe':
        text = planner.ask('--method', method, '--tokens', '1M')['text'].split('attention block alone')[1]
        rows = re.findall(r'^  (\S.*?) +([\d.]+) +([\d.]+)$', text, re.M)
        numbers[f'phases_{method}'] = rows
        say('', f'{method}:')
        table(['phase', 'exact', 'paper'], [list(row) for row in rows[:8]])


# ---- simulated ----

def grid(planner):
    memory, speed, longest = [], [], []
    for method in METHODS:
        cells = [], []
        for i, length in enumerate(LENGTHS):
            if i > len(MEMORY[method]):
                break
            got = planner.paper(method, length)
            if i == len(MEMORY[method]):
                fails = 'fails' if method == 'fpdt' else 'OOM'
                ends = f'{fails} / ' + ('fits' if got['fits'] else 'OOM') + f" ({got['gpu_bytes'] / GIB:.1f})"
                cells[0].append(ends)
                cells[1].append(fails)
                numbers.setdefault('oom', {})[method] = [length, not got['fits']]
                break
            cells[0].append(beside(got['gpu_bytes'] / GIB, MEMORY[method][i], f'memory_{method}'))
            cells[1].append(beside(got['tokens_per_s_per_gpu'], SPEED[method][i], f'speed_{method}'))
        memory.append([method, *cells[0], *[''] * (9 - len(cells[0]))])
        speed.append([method, *cells[1], *[''] * (9 - len(cells[1]))])
        most = planner.ask('--as', 'torchtitan', '--method', method, '--max-tokens')['max_tokens']
        longest.append([method, LENGTHS[len(MEMORY[method]) - 1], f'{most / 2**20:.2f}M'])
    say('## Peak memory', '', 'Llama3-8B on 8 H100, GiB: the paper / the model (error). OOM beyond 75 of 80 GiB.')
    table(['method', *LENGTHS], memory)
    say('## Throughput', '', 'The same, tokens/s/GPU.')
    table(['method', *LENGTHS], speed)
    say('## Longest contexts', '', 'The longest of the paper\'s lengths, and the longest that fits by the model.')
    for method, most in ('ulysses', '6M'), ('upipe', '8M'):
        got = planner.ask('--machine', 'h100x16', '--as', 'torchtitan', '--method', method, '--max-tokens')['max_tokens']
        longest.append([f'{method}, 16 GPUs', most, f'{got / 2**20:.2f}M'])
    table(['method', 'paper', 'model'], longest)


def breakdown(planner):
    say('## Breakdown at 3M tokens', '', 'The figure has no numbers in the text; these are the model\'s, GiB.')
    rows, names = [], []
    for method in METHODS:
        got = planner.paper(method, '3M')
        parts = {part['name']: part['bytes'] / GIB for part in got['components']}
        names = list(parts)
        numbers.setdefault('breakdown', {})[method] = parts
        rows.append([method, *(f'{parts[name]:.2f}' for name in names), 'fits' if got['fits'] else 'OOM'])
    table(['method', *names, ''], rows)


def runtime(planner):
    say('## Runtime', '', 'Seconds of a step: the paper / the model (error). "Other" is everything that is neither attention '
        'nor all-to-all.')
    for method, theirs in RUNTIME.items():
        rows = {name: [name] for name in theirs}
        for i, length in enumerate(LENGTHS[:6]):
            got = planner.paper(method, length)
            found = {name: float(value) for name, value in re.findall(r'^  (\w+) +([\d.]+) s ', got['text'], re.M)}
            found['other'] = got['seconds_step'] - sum(found.get(name, 0) for name in theirs if name != 'other')
            for name, row in rows.items():
                row.append(beside(found[name], theirs[name][i], f'runtime_{method}_{name}'))
        say('', f'{method}:')
        table(['', *LENGTHS[:6]], list(rows.values()))


def ablations(planner):
    say('## Head chunk U', '', 'Llama3-8B, 512K tokens, 4 GPUs; the figure has no numbers in the text.')
    table(['U', 'GiB', 'tokens/s/GPU'], [[str(u), f"{got['gpu_bytes'] / GIB:.2f}", f"{got['tokens_per_s_per_gpu']:.1f}"] for u in
          (4, 8, 16, 32) for got in [planner.paper('upipe', '512k', '--ranks', 4, '--chunk', u)]])
    say('## Batch', '', '128K tokens, activations stay on the GPU: tokens/s/GPU, and GiB.')
    rows = []
    for method, (speed, memory) in BATCH.items():
        got = [planner.paper(method, '128k', '--activations', 'ac', '--batch', size) for size in (1, 2, 4, 8, 10)]
        rows.append([method, *(beside(one['tokens_per_s_per_gpu'], t, 'batch_speed') for one, t in zip(got, speed))])
        rows.append(['GiB', *(beside(one['gpu_bytes'] / GIB, t, 'batch_memory') for one, t in zip(got, memory))])
    table(['batch', '1', '2', '4', '8', '10'], rows)
    say('## Strided activation offloading', '', '3M tokens in all: tokens/s/GPU, and GiB.')
    rows = []
    for name, (speed, memory, method, kept) in SAO.items():
        got = [planner.paper(method, length, '--batch', size, '--activations', kept) for length, size in
               (('128k', 24), ('256k', 12), ('512k', 6), ('1M', 3))]
        rows.append([name, *(beside(one['tokens_per_s_per_gpu'], t, 'sao_speed') for one, t in zip(got, speed))])
        rows.append(['GiB', *(beside(one['gpu_bytes'] / GIB, t, 'sao_memory') for one, t in zip(got, memory))])
    table(['', *LENGTHS[:4]], rows)
    say('## Selective activation checkpointing', '', '512K tokens.')
    rows = []
    for name, (speed, memory, method, kept) in SAC.items():
        got = planner.paper(method, '512k', '--activations', kept)
        rows.append([name, beside(got['tokens_per_s_per_gpu'], speed, 'sac_speed'),
                     beside(got['gpu_bytes'] / GIB, memory, 'sac_memory')])
    table(['', 'tokens/s/GPU', 'GiB'], rows)


# ---- pictures, the page ----

def draw(path):
    plt = common.pyplot()
    if plt is None:
        return
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.2))
    for kind, axes, unit in ('memory', panels[0], 'GiB'), ('speed', panels[1], 'tokens/s/GPU'):
        for i, method in enumerate(METHODS):
            cells = numbers[f'{kind}_{method}']
            x = [{'k': 2**10, 'M': 2**20}[length[-1]] * int(length[:-1]) / 2**20 for length in LENGTHS[:len(cells)]]
            axes.plot(x, [ours for _, ours in cells], color=f'C{i}', label=method)
            axes.plot(x, [theirs for theirs, _ in cells], 'o', color=f'C{i}', markersize=4)
        axes.set_xlabel('million tokens')
        axes.set_ylabel(unit)
        common.tidy(axes)
    panels[1].set_yscale('log')
    panels[0].legend(frameon=False, title='lines: model, dots: paper', fontsize=8)
    figure.tight_layout()
    common.save(figure, path)
    figure, axes = plt.subplots(figsize=(8, 3.8))
    left = [0.0] * len(METHODS)
    for name in numbers['breakdown'][METHODS[0]]:
        width = [numbers['breakdown'][method][name] for method in METHODS]
        axes.barh(METHODS, width, left=left, label=name)
        left = [a + b for a, b in zip(left, width)]
    axes.axvline(75, color='black', linewidth=0.8)
    axes.set_xlabel('GiB at 3M tokens; the line is what a GPU of 80 GiB has for tensors')
    axes.legend(frameon=False, fontsize=7, ncol=4, loc='lower right')
    figure.tight_layout()
    common.save(figure, os.path.splitext(path)[0] + '_breakdown.png')


def discussion():
    say('## Where model and paper disagree', '',
        '- **Intermediates with grouped heads.** The paper charges K and V 2/(G nu). Under its own schedule with U = C it is 2/nu, '
        'so 87.5 % holds without grouped heads alone; [memory](memory.md) derives it.',
        "- **Peaks by phase.** Exact bytes hold f32 gradients of K and V, which the paper's formulas leave out, and CUDA's f32 sums "
        'of dQ.',
        '- **FPDT beyond 4M.** By the model 5M fits; in the paper execution fails there, not memory.',
        "- **Batch.** The paper's memory at batch 1 is the same for both methods and 3 GiB below what its main table's offset "
        'and 32 kept inputs add up to. The model keeps the offset of the main table, and is too high. The main table\'s Native row, '
        'which keeps 32 inputs too, has that offset: both cannot hold for one program. The drop of Ulysses\' speed at batch 10 is '
        'retries of the allocator, which are not modelled.',
        '- **Strided offloading.** Every 7th of 32 layers are four, 12 GiB at 3M tokens. The paper shows 9.2 GiB more, three '
        'layers. Its UPipe with a batch holds 2.1 GiB more than one sequence of 3M tokens in the main table; the model has no such '
        'copy. Its speed-up at 128K comes from copies that the model hides behind the kernels.',
        '- **All-to-all.** A rate fitted on totals: the paper\'s own times grow faster than bytes beyond 1M (16 GB/s at 3M, 70 at '
        '128K), which is waiting for other ranks. It is 2 % of a step.',
        '- **Attention.** One rate for all lengths; the paper\'s own vary by 9 %.', '')


def page(path):
    head = ['# The paper, reproduced', '',
            'This page shows the tables of the paper on Untied Ulysses (arXiv 2602.21196) beside what this project computes. '
            'To make it again:', '', '```sh', 'sh bench/run.sh paper --pages docs/paper.md', '```', '',
            'Nothing here was measured on GPUs. `upipe-plan --as torchtitan` is a model of the paper\'s own setting: a sum of the '
            'tensors that PyTorch is known to hold, with four fitted sizes, and eight fitted rates. They are fitted on the Llama3-8B '
            'rows of 8 GPUs alone; `upipe-plan --machine h100x8 --write-machine FILE` writes the rates with their origins, and '
            '`examples/plan/titan.h` explains the sizes. This library\'s own bytes are exact and another matter: '
            '[memory](memory.md).', '', '![memory and throughput](images/paper.png)', '',
            '![breakdown at 3M tokens](images/paper_breakdown.png)', '']
    text = re.sub(r'\n{3,}', '\n\n', '\n'.join(head + pages)).strip() + '\n'
    with open(path, 'w', encoding='utf-8') as target:
        target.write(text)


def program():
    """upipe-plan: built before, or compiled here."""
    for build in 'run', 'gcc', 'bench':
        found = os.path.join(common.TOP, 'build', build, 'examples', 'upipe-plan')
        if os.access(found, os.X_OK):
            return found
    if shutil.which('upipe-plan'):
        return 'upipe-plan'
    return common.compile_unit(os.path.join('..', 'examples', 'plan', 'plan.c'), 'upipe-plan',
                               ['-Wl,--no-as-needed', '-lm', '-pthread', '-ljansson'])


def main(options):
    planner = Planner(os.path.abspath(options.plan) if options.plan else program())
    stages()
    intermediates()
    phases(planner)
    grid(planner)
    if not options.quick:
        breakdown(planner)
        runtime(planner)
        ablations(planner)
        draw(options.chart)
    discussion()
    print('\n'.join(pages))
    with open(options.json, 'w', encoding='utf-8') as target:
        json.dump(numbers, target, indent=1)
        target.write('\n')
    if options.pages:
        page(options.pages)
    return 0


if __name__ == '__main__':
    PARSER = common.arguments(__doc__, [])
    PARSER.add_argument('--plan', metavar='PROGRAM', help='upipe-plan (the one built here)')
    PARSER.add_argument('--pages', metavar='FILE', help='write the page too (docs/paper.md)')
    sys.exit(main(common.parse(PARSER, 'paper')))

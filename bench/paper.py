#!/usr/bin/env python3
"""paper.py -- the paper's tables and figures, theirs beside ours

Everything of the paper on Untied Ulysses (arXiv 2602.21196) that can be computed or simulated: closed forms from the
numbers of heads, the rest by upipe-plan --as paper, whose constants are fitted on the Llama3-8B tables of 8 GPUs
(upipe-plan --write-machine prints them with their origins). Each length, and each method where the others determine it,
is also left out of a new fit and predicted. Prints Markdown, with the error of each cell, and writes
the numbers as JSON and three pictures. --pages puts all of it into a page, docs/paper.md, whose first lines and last
chapter are its own.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile

import common
import picture

LENGTHS = ['128k', '256k', '512k', '1M', '2M', '3M', '4M', '5M', '6M']
GIB = 2**30
GAMMA = 1 + 2 / 4  # of Llama3-8B: Q, K and V of 32/8 heads
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


def put(*lines):
    pages.extend(lines)


def table(head, rows):
    put('', *common.table(head, rows), '')


class Planner:
    """upipe-plan, and what it said so far."""

    def __init__(self, program):
        self.program = program
        self.answers = {}

    def ask(self, *flags):
        if flags not in self.answers:
            self.answers[flags] = self.run(*flags)
        return self.answers[flags]

    def run(self, *flags):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, 'plan.json')
            done = subprocess.run([self.program, *([] if '--model' in flags else ['--model', 'llama3-8b']), *map(str, flags),
                                   '--json', path],
                                  capture_output=True, text=True, check=False)
            if done.returncode not in (0, 3):
                common.fail(f'{" ".join(map(str, flags))}: {done.stderr.strip()}')
            with open(path, encoding='utf-8') as source:
                return {**json.load(source), 'text': done.stdout, 'shares': {name: float(value) for name, value in
                        re.findall(r'^  (\w+) +([\d.]+) s ', done.stdout, re.M)}}

    def paper(self, method, tokens, *flags):
        return self.ask('--as', 'paper', '--method', method, '--tokens', tokens, *flags)


def beside(ours, theirs, name):
    """A cell: theirs, ours, the error."""
    numbers.setdefault(name, []).append([theirs, round(ours, 4)])
    return f'{theirs:g} / {ours:.2f} ({100 * (ours / theirs - 1):+.1f} %)'


# ---- closed forms ----

def stages():
    d, ff, vocab = 4096, 14336, 128256
    put('## The four stages of a forward', '',
        'In units of S * d_model bytes. The paper has typical ratios (d_ff = 2.67 d_model, V = 30 d_model); Llama3-8B has '
        f'{ff / d:g} and {vocab / d:.1f}.')
    table(['stage', 'paper', "the same formula with Llama3-8B's numbers"],
          [['embedding', '2', '2'], ['attention', '16', '16, with G = 1; 2 + 2 (1 + 2/G) 2 + 2 = 10 with 32/8 heads'],
           ['feed-forward', '25', f'{2 + 8 * ff / d + 2:g}'], ['cross-entropy', '240', f'{8 * vocab / d:.1f}']])


def intermediates():
    put('## Intermediate tensors of attention', '',
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
    put('## Volume of the all-to-all under grouped queries', '',
        'Heads sent by all stages of a forward (Q, K, V), in units of (C - 1) heads divided by C.')
    rows = []
    for heads, kv_heads in (32, 8), (64, 8), (16, 4):
        group = heads // kv_heads
        rows.append([f'{heads}/{kv_heads}', f'{3 * heads}', f'{heads + 2 * heads // group}', f'{heads + 2 * kv_heads}'])
    table(['heads', 'in order (paper 3H)', 'scheduled (paper H + 2H/G)', 'exact'], rows)


def phases(planner):
    put('## Attention by phase', '', "In units of T * d_model in bf16, at 1M tokens of Llama3-8B on 8 ranks; exact bytes of this "
        "library's block by a dry run, with the scratch of its CUDA kernels, beside the paper's formulas.")
    found = {}
    for name, method, kept in ('Ulysses', 'ulysses', 'ac'), ('Ulysses + offloading', 'ulysses', 'offload'), ('UPipe', 'upipe', 'offload'):
        text = planner.ask('--method', method, '--tokens', '1M', '--activations', kept)['text'].split('attention block alone')[1]
        found[name] = re.findall(r'^  (\S.*?) +([\d.]+) +([\d.]+)$', text, re.M)[:8]
    numbers['phases'] = found
    fpdt = [1, GAMMA + 2, 2 * GAMMA + 1, 2, 1, 3, 2 * GAMMA + 4, GAMMA + 2]
    table(['phase', *(f'{name}: exact / paper' for name in found), 'FPDT, 4 chunks: paper'],
          [[cells[0][0], *(f'{exact} / {paper}' for _, exact, paper in cells), f'{cell / 4:.3f}']
           for *cells, cell in zip(*found.values(), fpdt)])
    put('Ulysses without offloading has the inputs of the other 31 layers too. Exact bytes of segments are those of whole steps: '
        '`upipe-plan --method fpdt`; this library keeps x whole.', '')


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
        most = planner.ask('--as', 'paper', '--method', method, '--max-tokens')['max_tokens']
        longest.append([method, LENGTHS[len(MEMORY[method]) - 1], f'{most / 2**20:.2f}M'])
    put('## Peak memory', '', 'Llama3-8B on 8 H100, GiB: the paper / the model (error). OOM beyond 75 of 80 GiB.')
    table(['method', *LENGTHS], memory)
    put('## Throughput', '', 'The same, tokens/s/GPU.')
    table(['method', *LENGTHS], speed)
    put('## Longest contexts', '', 'The longest of the paper\'s lengths, and the longest that fits by the model.')
    for method, most in ('ulysses', '6M'), ('upipe', '8M'):
        got = planner.ask('--machine', 'h100x16', '--as', 'paper', '--method', method, '--max-tokens')['max_tokens']
        longest.append([f'{method}, 16 GPUs', most, f'{got / 2**20:.2f}M'])
    table(['method', 'paper', 'model'], longest)
    most = {row[0]: float(row[2][:-1]) for row in longest}
    put(f"The paper's sequences are 25 % longer (5M over FPDT's 4M; over Ulysses' 3M 67 %) and 33 % on 16 GPUs; the model's lengths that fit "
        f"are {100 * (most['upipe'] / most['ulysses'] - 1):.0f} % over Ulysses', and "
        f"{100 * (most['upipe, 16 GPUs'] / most['ulysses, 16 GPUs'] - 1):.0f} % on 16 GPUs.", '')


def nodes(planner):
    """16 GPUs: the figure's two methods, and the model whose rows the specification leaves out."""
    put('## 16 GPUs', '', 'Llama3-8B: the figure compares the two methods from 512K to 8M tokens, throughput as a part of '
        "USP-Hybrid's, without numbers in the text. The text has the longest contexts, 6M and 8M, and comparable throughput.")
    lengths, rows = ['512k', '1M', '2M', '3M', '4M', '5M', '6M', '7M', '8M', '9M'], {}
    for method in 'ulysses', 'upipe':
        rows[method] = [planner.paper(method, length, '--machine', 'h100x16') for length in lengths]
    cells = [[f'{name}, GiB', *(f"{got['gpu_bytes'] / GIB:.1f}" if got['fits'] else f"OOM ({got['gpu_bytes'] / GIB:.1f})"
                                for got in rows[method])] for name, method in (('USP-Hybrid', 'ulysses'), ('UPipe', 'upipe'))]
    cells.append(['UPipe / USP-Hybrid, tokens/s', *('' if not a['fits'] else f"{b['tokens_per_s_per_gpu'] / a['tokens_per_s_per_gpu']:.3f}"
                                                     for a, b in zip(rows['ulysses'], rows['upipe']))])
    numbers['nodes'] = {method: [[length, got['gpu_bytes'] / GIB, got['tokens_per_s_per_gpu'], got['fits']] for length, got in
                                 zip(lengths, gots)] for method, gots in rows.items()}
    table(['', *lengths], cells)
    for model, ranks in ('qwen3-32b', 16), ('llama3-70b', 32):
        put('', f'{model} on {ranks} GPUs, GiB and tokens/s/GPU by the model: nothing is fitted here.')
        cells = []
        for method in METHODS:
            row = []
            for length in LENGTHS:
                got = planner.paper(method, length, '--model', model, '--machine', f'h100x{ranks}')
                numbers.setdefault(f'{model}_{method}', []).append([length, got['gpu_bytes'] / GIB, got['tokens_per_s_per_gpu'],
                                                                    got['fits']])
                row.append(f"{got['gpu_bytes'] / GIB:.1f} / {got['tokens_per_s_per_gpu']:.1f}" if got['fits'] else
                           f"OOM ({got['gpu_bytes'] / GIB:.1f})")
            cells.append([method, *row])
        table(['method', *LENGTHS], cells)


def breakdown(planner):
    put('## Breakdown at 3M tokens', '', 'The figure has no numbers in the text; these are the model\'s, GiB.')
    rows, names = [], []
    for method in METHODS:
        got = planner.paper(method, '3M')
        parts = {part['name']: part['bytes'] / GIB for part in got['components']}
        names = list(parts)
        numbers.setdefault('breakdown', {})[method] = parts
        rows.append([method, *(f'{parts[name]:.2f}' for name in names), 'fits' if got['fits'] else 'OOM'])
    table(['method', *names, ''], rows)


def runtime(planner):
    put('## Runtime', '', 'Seconds of a step: the paper / the model (error). "Other" is everything that is neither attention '
        'nor all-to-all.')
    for method, theirs in RUNTIME.items():
        rows = {name: [name] for name in theirs}
        for i, length in enumerate(LENGTHS[:6]):
            got = planner.paper(method, length)
            found = dict(got['shares'])
            found['other'] = got['seconds_step'] - sum(found.get(name, 0) for name in theirs if name != 'other')
            for name, row in rows.items():
                row.append(beside(found[name], theirs[name][i], f'runtime_{method}_{name}'))
        put('', f'{method}:')
        table(['', *LENGTHS[:6]], list(rows.values()))


def ablations(planner):
    put('## Head chunk U', '', 'Llama3-8B, 512K tokens, 4 GPUs; the figure has no numbers in the text.')
    table(['U', 'GiB', 'tokens/s/GPU'], [[str(u), f"{got['gpu_bytes'] / GIB:.2f}", f"{got['tokens_per_s_per_gpu']:.1f}"] for u in
          (4, 8, 16, 32) for got in [planner.paper('upipe', '512k', '--ranks', 4, '--chunk', u)]])
    put('## Batch', '', '128K tokens, activations stay on the GPU: tokens/s/GPU, and GiB.')
    rows = []
    for method, (speed, memory) in BATCH.items():
        got = [planner.paper(method, '128k', '--activations', 'ac', '--batch', size) for size in (1, 2, 4, 8, 10)]
        rows.append([method, *(beside(one['tokens_per_s_per_gpu'], t, 'batch_speed') for one, t in zip(got, speed))])
        rows.append(['GiB', *(beside(one['gpu_bytes'] / GIB, t, 'batch_memory') for one, t in zip(got, memory))])
    table(['batch', '1', '2', '4', '8', '10'], rows)
    put('## Strided activation offloading', '', '3M tokens in all: tokens/s/GPU, and GiB.')
    rows = []
    for name, (speed, memory, method, kept) in SAO.items():
        got = [planner.paper(method, length, '--batch', size, '--activations', kept) for length, size in
               (('128k', 24), ('256k', 12), ('512k', 6), ('1M', 3))]
        rows.append([name, *(beside(one['tokens_per_s_per_gpu'], t, 'sao_speed') for one, t in zip(got, speed))])
        rows.append(['GiB', *(beside(one['gpu_bytes'] / GIB, t, 'sao_memory') for one, t in zip(got, memory))])
    table(['', *LENGTHS[:4]], rows)
    put('## Selective activation checkpointing', '', '512K tokens.')
    rows = []
    for name, (speed, memory, method, kept) in SAC.items():
        got = planner.paper(method, '512k', '--activations', kept)
        rows.append([name, beside(got['tokens_per_s_per_gpu'], speed, 'sac_speed'),
                     beside(got['gpu_bytes'] / GIB, memory, 'sac_memory')])
    table(['', 'tokens/s/GPU', 'GiB'], rows)


# ---- how well the constants are determined ----

def cells_of(planner):
    """Each cell of the tables of Llama3-8B on 8 GPUs: (table, method, length, flags, tokens/s/GPU, GiB)."""
    for method in METHODS:
        for length, speed, memory in zip(LENGTHS, SPEED[method], MEMORY[method]):
            yield 'main', method, length, (), speed, memory
    for method, (speed, memory) in BATCH.items():
        for size, one, other in zip((1, 2, 4, 8, 10), speed, memory):  # Ulysses' last is slowed by retries of the allocator
            yield 'batch', method, '128k', ('--activations', 'ac', '--batch', size), one if (method, size) != ('ulysses', 10) else None, other
    for speed, memory, method, kept in SAO.values():
        for length, size, one, other in zip(LENGTHS, (24, 12, 6, 3), speed, memory):
            yield 'sao', method, length, ('--batch', size, '--activations', kept), one, other
    for speed, memory, method, kept in SAC.values():
        yield 'sac', method, '512k', ('--activations', kept), speed, memory


TIMES = ['attention_forward', 'attention_backward', 'dense', 'all_to_all', 'wait', 'host', 'segments', 'ring', 'stage', 'layer',
         'native']
SIZES = ['stream', 'fetched', 'mlp', 'loss', 'batch', 'chunks', 'fixed']


def times_of(got, method, tokens, kept, rates):
    """A step's seconds by the rates that they depend on."""
    share = dict.fromkeys(['all_to_all', 'ring_and_sums', 'host_link', 'other'], 0) | got['shares']
    attention = share['attention_forward'] + share['attention_backward']
    wait = rates['wait_part'] * attention
    out = dict.fromkeys(TIMES, 0)
    out['native' if method == 'native' else 'attention_forward'] = share['attention_forward']
    out['native' if method == 'native' else 'attention_backward'] += share['attention_backward']
    out['dense'], out['wait'] = share['dense'], wait
    out['all_to_all' if method not in ('native', 'ring') else 'ring'] = share['all_to_all'] + share['ring_and_sums'] - wait
    out['host'] = share['host_link']
    if method == 'fpdt':
        out['host'] = 2 * 32 * tokens / 8 * 8192 / rates['host_link_bytes']
        out['segments'] = share['host_link'] - out['host']
    out['layer'] = 32 * rates['layer_seconds']
    out['stage'] = share['other'] - out['layer']
    return [out[name] for name in TIMES]


def sizes_of(got, method, tokens, flags):
    """GiB by the constants of examples/plan/as/paper.h that they depend on."""
    unit, out = tokens / 8 * 8192 / GIB, dict.fromkeys(SIZES, 0)
    part = {one['name']: one['bytes'] for one in got['components']}
    out['fixed'] = 1
    if part['loss'] > 0:
        out['loss'] = unit
    else:
        out['stream'], out['fetched'] = unit, unit if method != 'native' and 'ac' not in flags else 0
        out['mlp'] = unit if part['mlp'] > 0 and method != 'fpdt' else 0
        out['chunks'] = 65536 / 8 * 8192 / GIB if part['mlp'] > 0 and method == 'fpdt' else 0
        out['batch'] = unit if part['mlp'] == 0 and method == 'upipe' and '--batch' in flags and flags[flags.index('--batch') + 1] > 1 else 0
    return [out[name] for name in SIZES]


def leave_out(planner):
    """Fits all constants again without a length, without a method, without each cell: the errors where they were not used."""
    try:
        import numpy
    except ImportError:
        common.log('left out: new fits, as NumPy is not installed')
        return
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, 'machine.json')
        subprocess.run([planner.program, '--machine', 'h100x8', '--write-machine', path], check=True)
        with open(path, encoding='utf-8') as source:
            rates = {name: rate['value'] for name, rate in json.load(source)['rates'].items()}
    speed, memory = [], []  # (where, coefficients, the paper's, ours, tolerance)
    for name, method, length, flags, tps, gib in cells_of(planner):
        got = planner.paper(method, length, *flags)
        tokens = {'k': 2**10, 'M': 2**20}[length[-1]] * int(length[:-1])
        tokens *= flags[flags.index('--batch') + 1] if '--batch' in flags else 1
        where = (name, method, length)
        if tps is not None:
            coefs = times_of(got, method, tokens, flags, rates)
            speed.append((where, coefs, tokens / 8 / tps, got['seconds_step'], 0.02))
            if name == 'main' and method in RUNTIME and length in LENGTHS[:6]:
                for stage, theirs in RUNTIME[method].items():
                    used = {'other': ('dense', 'host', 'stage', 'layer'), 'all_to_all': ('all_to_all', 'wait')}.get(stage, (stage,))
                    row = [coef if one in used else 0 for one, coef in zip(TIMES, coefs)]
                    speed.append((('runtime', method, length), row, theirs[LENGTHS.index(length)], sum(row), 0.06))
        if gib is not None:
            memory.append((where, sizes_of(got, method, tokens, flags), gib, got['gpu_bytes'] / GIB, 0.01))

    def errors(cells, out):
        """Of main cells that `out` says, by a fit without all that it says: the smallest change of the constants in use."""
        fit = [cell for cell in cells if not out(cell)]
        weight = numpy.array([1 / (theirs * tolerance) for _, _, theirs, _, tolerance in fit])
        rows = numpy.array([coefs for _, coefs, _, _, _ in fit]) * weight[:, None]
        rest = numpy.array([theirs - ours for _, _, theirs, ours, _ in fit]) * weight
        change = numpy.linalg.lstsq(rows, rest, rcond=1e-6)[0]
        return change, [100 * ((ours + float(numpy.dot(coefs, change))) / theirs - 1) for where, coefs, theirs, ours, _ in
                        [cell for cell in cells if out(cell)] if where[0] == 'main']

    put('## Constants left out of their fit', '', f'{len(TIMES)} rates and {len(SIZES)} sizes stand against {len(speed)} and '
        f'{len(memory)} cells. Below, one least-squares fit of all constants without a part of the cells, and the errors of '
        "the main tables' cells that it did not use: the largest, and the root of the mean square, in %. A length is left out "
        'of every table; so is a method, where the other methods have the same constants but for the seconds of a stage.')
    rows = []
    parts = [(length, lambda cell, length=length: cell[0][2] == length) for length in LENGTHS[:8]]
    parts += [(method, lambda cell, method=method: cell[0][1] == method) for method in ('ulysses', 'upipe')]
    for name, out in parts:
        row = [name]
        for kind, cells in ('speed', speed), ('memory', memory):
            found = errors(cells, out)[1]
            numbers.setdefault('left_out', {}).setdefault(kind, {})[name] = found
            row += [f'{max(found, key=abs):+.1f}', f'{(sum(e * e for e in found) / len(found))**0.5:.1f}']
        rows.append(row)
    row = ['each cell alone']
    for kind, cells in ('speed', speed), ('memory', memory):
        found = [e for cell in cells if cell[0][0] == 'main' for e in errors(cells, lambda other, cell=cell: other is cell)[1]]
        numbers['left_out'][kind]['cell'] = found
        row += [f'{max(found, key=abs):+.1f}', f'{(sum(e * e for e in found) / len(found))**0.5:.1f}']
    rows.append(row)
    table(['without', 'throughput, largest', 'rms', 'memory, largest', 'rms'], rows)
    moved = {name: 100 * float(change) for name, change in zip(TIMES, errors(speed, lambda cell: False)[0])}
    grown = {name: float(change) for name, change in zip(SIZES, errors(memory, lambda cell: False)[0])}
    numbers['refitted'] = moved, grown
    put('The constants in use are rounded. A fit of all cells would change the seconds of '
        + ', '.join(f'{name.replace("_", " ")} by {change:+.1f} %' for name, change in moved.items())
        + '; and the sizes, tensors and GiB, of ' + ', '.join(f'{name} by {change:+.2f}' for name, change in grown.items()) + '.', '')


# ---- pictures, the page ----

def draw(path):
    plt = picture.pyplot()
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
        picture.tidy(axes)
    panels[1].set_yscale('log')
    panels[0].legend(frameon=False, title='lines: model, dots: paper', fontsize=8)
    figure.tight_layout()
    picture.save(figure, path)
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6))
    for i, (name, method) in enumerate((('USP-Hybrid', 'ulysses'), ('UPipe', 'upipe'))):
        cells = numbers['nodes'][method]
        panels[0].bar([k + 0.4 * i for k in range(len(cells))], [cell[1] if cell[3] else 0 for cell in cells], 0.4, label=name)
        panels[1].bar([k + 0.4 * i for k in range(len(cells))], [cell[2] / numbers['nodes']['ulysses'][k][2] if numbers['nodes']['ulysses'][k][3] else 0
                                                                 for k, cell in enumerate(cells)], 0.4, label=name)
    for axes, unit in zip(panels, ('GiB a GPU; none: out of memory', "tokens/s as a part of USP-Hybrid's")):
        axes.set_xticks([k + 0.2 for k in range(len(cells))], [cell[0] for cell in cells])
        axes.set_xlabel('tokens, Llama3-8B on 16 GPUs, by the model')
        axes.set_ylabel(unit)
        picture.tidy(axes)
    panels[0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    picture.save(figure, os.path.splitext(path)[0] + '_nodes.png')
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
    picture.save(figure, os.path.splitext(path)[0] + '_breakdown.png')


LAST = '## Where model and paper disagree'


def page(path):
    """The page's chapters, from the first heading below its title to the last chapter, are those that were put."""
    with open(path, encoding='utf-8') as source:
        before, last = source.read().split(LAST)
    made = re.sub(r'\n{3,}', '\n\n', '\n'.join(pages)).strip()
    with open(path, 'w', encoding='utf-8') as target:
        target.write(before[:before.index('\n## ') + 1] + made + '\n\n' + LAST + last)


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


class Paper(common.Benchmark):
    name, text = 'paper', __doc__

    def flags(self, parser):
        parser.add_argument('--plan', metavar='PROGRAM', help='upipe-plan (the one built here)')
        parser.add_argument('--pages', metavar='FILE', help='write the page too (docs/paper.md)')

    def main(self):
        options = self.options
        planner = Planner(os.path.abspath(options.plan) if options.plan else program())
        stages()
        intermediates()
        phases(planner)
        grid(planner)
        if not options.quick:
            breakdown(planner)
            nodes(planner)
            runtime(planner)
            ablations(planner)
            leave_out(planner)
            draw(options.chart)
        print('\n'.join(pages))
        with open(options.json, 'w', encoding='utf-8') as target:
            json.dump(numbers, target, indent=1)
            target.write('\n')
        if options.pages:
            page(options.pages)
        return 0


if __name__ == '__main__':
    benchmark = Paper()
    benchmark.read()
    sys.exit(benchmark.main())

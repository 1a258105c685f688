"""gpu_table.py -- what a results folder of gpu.py holds, as tables in Markdown"""

import json
import os
import statistics

import common

MIB = 2 ** 20


def kept(folder, stage):
    """The figures of a stage that have numbers; those of an unfinished one too."""
    for end in '.json', '.failed.json':
        path = os.path.join(folder, f'gpu_{stage}{end}')
        if os.path.exists(path):
            with open(path, encoding='utf-8') as source:
                return json.load(source)
    return {}


def rows_of(head, rows):
    return ['', *common.table(head, rows)] if rows else []


def verdict(folder):
    made = kept(folder, 'verdict')
    if not made:
        return []
    out = [f'{made["cases"] - made["wrong"]} of {made["cases"]} kernels and masks are right']
    return out + [f'- head dim {dim}: {" ".join(names)} left out, kernels for 8.0 in their place' for dim,
                  names in made['avoid'].items()]


def roofline(folder):
    rows = []
    for figure in kept(folder, 'roofline').get('figures', []):
        for name, one in [('upipe', figure), *((peer['name'], peer) for peer in figure.get('peers', []))]:
            if 'copy_bytes_per_s' in one:
                rows.append([name, f"{one['copy_bytes_per_s'] / 1e12:.2f}", f"{one['product_flop_per_s'] / 1e12:.0f}"])
    return rows_of(['roof', 'copy, TB/s', 'product, TFLOP/s'], rows)


def rate(kernel):
    for word in 'refused', 'failed':
        if word in kernel:
            return word
    spread = f" ± {100 * kernel['fwd_spread']:.0f} %" if kernel.get('fwd_spread', 0) >= 0.02 else ''
    return f"{kernel['fwd_flop_per_s'] / 1e12:.0f} / {kernel['bwd_flop_per_s'] / 1e12:.0f}{spread}"


def shape_of(figure):
    """Head dims, mask, tokens and heads in words."""
    dims = str(figure['head_dim'])
    dims += f"/{figure['v_dim']}" if figure.get('v_dim', figure['head_dim']) != figure['head_dim'] else ''
    mask = 'causal' if figure['causal'] else 'full'
    mask += f", window {figure['window']}" if figure['window'] else ''
    mask += f", {figure['cu_seqlens']} sequences" if figure['cu_seqlens'] else ''
    heads = str(figure['heads'])
    heads += '' if figure['heads'] == figure['kv_heads'] else f"/{figure['kv_heads']}"
    margin = f", margin {figure['margin']}" if figure.get('margin') else ''
    return f"d {dims}, {mask}, {common.amount(figure['tokens'])} × {heads}{margin}"


def shapes(folder):
    """What each contestant did at each shape; contestants of several commands at one shape stand together."""
    rows = {}
    for stage in 'attention', 'long', 'masks', 'repeat':
        for figure in kept(folder, stage).get('figures', []):
            if 'tokens' in figure:
                row = rows.setdefault(shape_of(figure), {})
                for kernel in figure['kernels']:
                    row.setdefault(kernel['name'], kernel)
    return rows


def attention(folder):
    rows = shapes(folder)
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    return rows_of(['TFLOP/s, forward / backward', *names],
                   [[shape, *(rate(row[name]) if name in row else '' for name in names)] for shape, row in rows.items()])


def block(folder):
    runs = {}
    for figure in kept(folder, 'block').get('figures', []):
        if 'fwd_seconds' in figure:
            method = figure['method'] + (', overlapped' if figure['overlap'] else '')
            runs.setdefault((figure['tokens'], figure['ranks'], method), []).append(figure)
    rows = []
    for (tokens, ranks, method), figures in runs.items():
        base = runs.get((tokens, ranks, 'ulysses'), [])
        pairs = [[mine[way] / other[way] for mine, other in zip(figures, base)]
                 for way in ('fwd_seconds', 'bwd_seconds')]
        one = figures[0]
        rows.append([f'{common.amount(tokens)}, {ranks} ranks', method,
                     *(' '.join(f'{1e3 * figure[way]:.1f}' for figure in figures)
                       for way in ('fwd_seconds', 'bwd_seconds')),
                     ' / '.join(f'{statistics.median(pair):.3f}' for pair in pairs if pair),
                     f"{one['plan_bytes'] / MIB:.0f}", f"{one['peak_bytes'] / MIB:.0f}",
                     one['driver_beyond_slabs_bytes']])
    return rows_of(['block', 'method', 'forward, ms', 'backward, ms', 'of Ulysses', 'plan, MiB', 'peak, MiB',
                    'driver beyond slabs, B'], rows)


def train(folder):
    """Of rank 0: its plan, its pool's peak, and what of that is neither weights nor gradients nor the optimizer's."""
    out = []
    for figure in kept(folder, 'train').get('figures', []):
        if 'train' in figure:
            made = figure['train']
            held = made['memory']['at_peak']
            rest = made['peak_bytes'] - held['weights'] - held['gradients'] - held['optimizer']
            out.append([made['config']['method'], f"{made['tokens_per_s']:.0f}",
                        *(f'{number / MIB:.0f}' for number in (rest, made['plan_bytes'], made['peak_bytes'],
                                                               made['driver_plan_bytes'], made['driver_peak_bytes']))])
    return rows_of(['training step', 'tokens/s', 'activations, MiB', 'plan, MiB', 'peak, MiB', 'both ranks, MiB',
                    "driver's peak, MiB"], out)


def rows(folder):
    out = [[op['name'], f"{op['bytes'] / MIB:.0f}", f"{op['bytes_per_s'] / 1e12:.2f}"]
           for figure in kept(folder, 'rows').get('figures', []) for op in figure.get('ops', [])]
    return rows_of(['rows', 'MiB', 'TB/s'], out)


def transfer(folder):
    out = [[f"{common.amount(figure['tokens'])}, {figure['ranks']} ranks",
            f"{figure['bytes_per_s'] / 1e12:.2f}"]
           for figure in kept(folder, 'transfer').get('figures', []) if 'bytes_per_s' in figure]
    return rows_of(['all-to-all', 'TB/s'], out)


def lines(folder):
    stages = [kept(folder, stage) for stage in ('roofline', 'attention', 'block')]
    device = next((made['device'] for made in stages if made.get('device', {}).get('name')), None)
    out = [f"{device['name']}, {device['processors']} processors"] if device else []
    for part in (verdict, roofline, attention, block, train, rows, transfer):
        try:
            out += part(folder)
        except (KeyError, TypeError, ZeroDivisionError) as error:  # the others are not lost for it
            out += ['', f'{part.__name__}: the figures are not as they should be ({type(error).__name__}: {error})']
    return out

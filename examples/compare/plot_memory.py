#!/usr/bin/env python3
"""plot_memory.py NUMBERS TRACES PICTURE -- the memory of one rank over time, by tag, one panel a method

NUMBERS is what compare wrote with --json, TRACES the folder of its --trace. Every take and give of rank 0's pool is a
step of the stack. Each method's forward has the width 1 and its backward the width 2, whatever time they took.
"""

import json
import os
import sys

import matplotlib

matplotlib.use('Agg')
import matplotlib.pyplot as plt  # noqa: E402

# From the bottom of the stack upwards: label, colour, tags.
GROUPS = [
    ('x', '#3b4252', ['x', 'dx']),
    ('slots: O, later dO and dQ', '#7f95b5', ['final_out', 'dout', 'slot', 'dq']),
    ('log-sum-exp, delta', '#c3cede', ['lse', 'delta', 'delta_heads']),
    ('dK, dV that wait for dX', '#9c4a5b', ['dk', 'dv', 'tokens_grad']),
    ('dK, dV in f32', '#e07a5f', ['dk_heads', 'dv_heads', 'dkv', 'dkv_sum', 'kv_grad', 'ring_grad', 'ring_partial']),
    ('O, dQ in f32', '#d4a373', ['o_sum', 'dq_sum']),
    ('K, V and their buffers', '#81a969', ['k', 'v', 'kv', 'kv_send', 'ring_kv', 'host_kv']),
    ('Q and its send buffer', '#2a9d8f', ['q', 'q_send', 'send', 'o_send', 'dq_send']),
    ('dO of the stage', '#e9c46a', ['dout_heads', 'dout_block']),
    ('streamed queries of segments', '#457b9d', ['host_q']),
    ('scratch', '#7d6b91', ['gemm_work', 'attn_work', 'sums', 'tile', 'tile_heads']),
]
NAMES = {'ulysses': 'DeepSpeed-Ulysses', 'upipe': 'UPipe', 'upipe-naive': 'UPipe, heads in order',
         'ring': 'Ring attention', 'zigzag': 'Zigzag ring', 'stripe': 'Striped ring', 'double-ring': 'Double ring',
         'allgather': 'All-gather', 'usp': 'USP',
         'upipe-ring': 'UPipe over a ring', 'fpdt': 'FPDT', 'upipe-fpdt': 'UPipe in segments'}
FORWARD, BACKWARD = 1, 2  # widths


def read_trace(path):
    """Rank 0's steps: (place on the axis, bytes of each group) after every alloc and free."""
    with open(path, encoding='utf-8') as source:
        events = [event for event in json.load(source) if event['pid'] == 0 and 'ts' in event]
    phases = [(event['name'], event['ts']) for event in events if event['ph'] == 'B']
    starts = [next(ts for name, ts in phases if name == first) for first in ('fwd_before', 'bwd_before')]
    ends = [next(ts for name, ts in phases if name == 'other' and ts >= start) for start in starts]
    rows = {tag: row for row, (_, _, tags) in enumerate(GROUPS) for tag in tags}
    live, steps = [0] * len(GROUPS), [(0, [0] * len(GROUPS))]
    for event in events:
        if event['ph'] not in 'be':
            continue
        if event['name'] not in rows:
            sys.exit(f'plot_memory.py: no colour for the tag {event["name"]}')
        live[rows[event['name']]] += event['args']['bytes'] * (1 if event['ph'] == 'b' else -1)
        if event['ts'] > ends[1]:
            break  # what the host gives back after the backward
        if event['ts'] < starts[1]:  # what the host does between the passes has no width
            at = FORWARD * min(max((event['ts'] - starts[0]) / (ends[0] - starts[0]), 0), 1)
        else:
            at = FORWARD + BACKWARD * (event['ts'] - starts[1]) / (ends[1] - starts[1])
        steps.append((at, list(live)))
    steps.append((FORWARD + BACKWARD, steps[-1][1]))
    return steps


def draw(axes, method, unit, steps, first):
    times = [at for at, _ in steps]
    stack = [[row[group] / unit for _, row in steps] for group in range(len(GROUPS))]
    axes.stackplot(times, stack, step='post', colors=[colour for _, colour, _ in GROUPS], linewidth=0)
    peak = max(method['peak_bytes'].values()) / unit
    axes.axhline(peak, color='black', linewidth=0.8, linestyle=(0, (4, 3)))
    axes.annotate(f'{peak:.2f} units', (0.02, peak), xytext=(0, 3), textcoords='offset points', fontsize=9)
    if method is not first:
        other = max(first['peak_bytes'].values()) / unit
        axes.axhline(other, color='#999999', linewidth=0.8, linestyle=(0, (4, 3)))
        axes.annotate('', (2.1, peak), xytext=(2.1, other), arrowprops={'arrowstyle': '->', 'color': '#555555'})
        axes.annotate(f'{100 * abs(1 - peak / other):.0f} % {"less" if peak <= other else "more"}',
                      (2.1, (peak + other) / 2), xytext=(6, 0), textcoords='offset points', fontsize=10, va='center')
    axes.axvline(FORWARD, color='black', linewidth=0.8)
    axes.set_xlim(0, FORWARD + BACKWARD)
    axes.set_xticks([FORWARD / 2, FORWARD + BACKWARD / 2], ['forward', 'backward'])
    axes.set_xlabel('time within each pass')
    axes.tick_params(axis='x', length=0)
    stages = '1 stage' if method['stages'] == 1 else f'{method["stages"]} stages'
    axes.set_title(f'{NAMES[method["name"]]}, {stages}', fontsize=11)
    axes.grid(axis='y', color='#dddddd', linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ('top', 'right'):
        axes.spines[side].set_visible(False)


def main():
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    with open(sys.argv[1], encoding='utf-8') as source:
        numbers = json.load(source)
    config, methods = numbers['config'], numbers['methods']
    figure, panels = plt.subplots(1, len(methods), sharey=True, figsize=(4.2 * len(methods) + 2.2, 4.2), squeeze=False)
    used = set()
    for axes, method in zip(panels[0], methods):
        steps = read_trace(os.path.join(sys.argv[2], method['name'] + '.json'))
        used.update(group for _, row in steps for group, live in enumerate(row) if live)
        draw(axes, method, config['unit_bytes'], steps, methods[0])
    panels[0][0].set_ylim(0, 1.08 * max(max(m['peak_bytes'].values()) for m in methods) / config['unit_bytes'])
    mib = config['unit_bytes'] / 2**20
    panels[0][0].set_ylabel(f'live bytes of one rank, in units of {mib:.4g} MiB')
    in_mib = panels[0][-1].secondary_yaxis('right', functions=(lambda units: units * mib, lambda value: value / mib))
    in_mib.set_ylabel('MiB')
    figure.suptitle(f'One attention block: {config["heads"]} query heads, {config["kv_heads"]} key/value heads, '
                    f'{config["tokens"]:,} tokens on {config["ranks"]} ranks', fontsize=12)
    shown = [GROUPS[group] for group in sorted(used, reverse=True)]
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for _, colour, _ in shown]
    figure.legend(handles, [label for label, _, _ in shown], loc='center right', frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0, 1 - 2.3 / figure.get_figwidth(), 1))
    figure.savefig(sys.argv[3], dpi=110, metadata={'Software': None})


if __name__ == '__main__':
    main()

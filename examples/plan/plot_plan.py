#!/usr/bin/env python3
"""plot_plan.py PICTURE NUMBERS... -- what upipe-plan wrote with --json, as a picture

    upipe-plan --model llama3-8b --tokens 3M --method ulysses --json ulysses.json
    upipe-plan --model llama3-8b --tokens 3M --method upipe --json upipe.json
    plot_plan.py breakdown.png ulysses.json upipe.json

Of plans: the memory of the largest rank by component at its peak, and in every phase; a plan's name is that of its file.
Of the file of one --best: every setting that fits by its time and memory, and the Pareto set; of --max-tokens --best: the
longest sequence of every setting by its memory. Of latent attention: what is sent, and the peak of a backward. The status
is 2 for files that are none of these.
"""

import json
import os
import sys

import matplotlib

matplotlib.use('Agg')
import matplotlib.pyplot as plt  # noqa: E402

GIB = 2**30
M = 2**20
# By what a component is, so that one has one colour in all pictures; others take the colours that follow.
COLOURS = {'states': '#3b4252', 'weights': '#3b4252', 'optimizer': '#7f95b5', 'gradients': '#c3cede', 'gathered': '#7f95b5',
           'workspaces': '#bbbbbb', 'rope_table': '#9c4a5b', 'tokens': '#9c4a5b', 'checkpoints': '#81a969', 'stream': '#2a9d8f',
           'attention': '#e07a5f', 'mlp': '#d4a373', 'loss': '#e9c46a', 'sum': '#7d6b91', 'alignment': '#dddddd'}


def tidy(axes, grid):
    axes.grid(axis=grid, color='#dddddd', linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ('top', 'right'):
        axes.spines[side].set_visible(False)


def method(flags):
    return flags.split('--method ')[1].split()[0]


def breakdown(plans):
    """One bar a plan by component; beside it every phase."""
    figure, panels = plt.subplots(1, 2, figsize=(11, 1.8 + 0.55 * max(len(plans), 4)), gridspec_kw={'width_ratios': (3, 2)})
    names = [name + ('' if plan['fits'] else ' (does not fit)') for name, plan in plans]
    components = list(dict.fromkeys(part['name'] for _, plan in plans for part in plan['components']))
    left = [0.0] * len(plans)
    for component in components:
        width = [sum(part['bytes'] for part in plan['components'] if part['name'] == component) / GIB for _, plan in plans]
        if any(width):
            panels[0].barh(names, width, left=left, label=component, color=COLOURS.get(component))
        left = [a + b for a, b in zip(left, width)]
    for at, total in enumerate(left):
        panels[0].annotate(f'{total:.1f}', (total, at), xytext=(3, 0), textcoords='offset points', va='center', fontsize=8)
    panels[0].set_xlabel('GiB of the largest rank, at its peak')
    panels[0].legend(frameon=False, fontsize=8, ncol=5, loc='lower left', bbox_to_anchor=(0, 1))
    phases = list(dict.fromkeys(phase['name'] for _, plan in plans for phase in plan['phases']))
    for row, (name, plan) in enumerate(plans):
        held = {phase['name']: phase['bytes'] / GIB for phase in plan['phases']}
        panels[1].plot([phases.index(phase) for phase in held], list(held.values()), 'o-', markersize=3, label=name, color=f'C{row}')
    panels[1].set_xticks(range(len(phases)), phases, rotation=60, ha='right', fontsize=7)
    panels[1].set_ylabel('GiB, at most in the phase')
    panels[1].set_ylim(0)
    panels[1].legend(frameon=False, fontsize=8)
    for axes in panels:
        axes.margins(x=0.08)
    panels[0].invert_yaxis()
    tidy(panels[0], 'x')
    tidy(panels[1], 'y')
    return figure


def settings(numbers):
    """Every setting that fits: a dot, coloured by its method."""
    longest = 'max_tokens' in numbers
    figure, axes = plt.subplots(figsize=(8, 4.6))
    for colour, name in enumerate(dict.fromkeys(method(one['flags']) for one in numbers['settings'])):
        own = [one for one in numbers['settings'] if method(one['flags']) == name]
        axes.plot([one['gpu_bytes'] / GIB for one in own], [one['max_tokens'] / M if longest else one['seconds_step'] for one in own],
                  'o', markersize=4, color=f'C{colour % 10}', label=name, alpha=0.7)
    axes.set_xlabel('GiB of the largest rank')
    axes.set_ylabel('longest sequence, million tokens' if longest else 'seconds a step, estimated')
    if not longest:
        best = [one for one in numbers['settings'] if one['pareto']]
        axes.step([one['gpu_bytes'] / GIB for one in best], [one['seconds_step'] for one in best], where='pre', color='black',
                  linewidth=0.9, label='Pareto set')
        for one in best:  # the setting of the title
            if one['flags'] == numbers.get('best'):
                axes.plot(one['gpu_bytes'] / GIB, one['seconds_step'], 'o', markersize=11, markerfacecolor='none', color='black',
                          label='the fastest: the title')
    axes.set_title(numbers.get('best', 'nothing fits'), fontsize=9)
    axes.legend(frameon=False, fontsize=7, loc='center left', bbox_to_anchor=(1, 0.5))
    tidy(axes, 'y')
    return figure


def latent(plans):
    """One layer's latent attention, a bar a method and form: what a forward sends, and what a backward holds."""
    rows = [(plan['unit_bytes'], row) for _, plan in plans for row in plan['rows']]
    names = [f"{plan['attention_of']}: {row['method']}, {row['form']}" for _, plan in plans for row in plan['rows']]
    figure, panels = plt.subplots(1, 2, figsize=(11, 1.6 + 0.4 * len(rows)), sharey=True)
    parts = [{'Q and O': lambda row: row['sent_forward_bytes'] - row['sent_kv_bytes'], 'K and V, or the latent': lambda row: row['sent_kv_bytes']},
             {'latent of all tokens': lambda row: row['latent_bytes'], "K' and V' of a stage": lambda row: row['kv_stage_bytes'],
              'all else': lambda row: row['q_by_stages']['backward_bytes'] - row['latent_bytes'] - row['kv_stage_bytes']}]
    colours = [('#c3cede', '#e07a5f'), ('#e07a5f', '#2a9d8f', '#c3cede')]
    for axes, of, colour in zip(panels, parts, colours):
        left = [0.0] * len(rows)
        for (name, count), one in zip(of.items(), colour):
            width = [count(row) / unit for unit, row in rows]
            axes.barh(range(len(rows)), width, left=left, label=name, color=one)
            left = [a + b for a, b in zip(left, width)]
        for at, total in enumerate(left):
            axes.annotate(f'{total:.2f}', (total, at), xytext=(3, 0), textcoords='offset points', va='center', fontsize=8)
        axes.legend(frameon=False, fontsize=8, ncol=3, loc='lower left', bbox_to_anchor=(0, 1))
        axes.margins(x=0.1)
        tidy(axes, 'x')
    panels[0].set_yticks(range(len(rows)), names)
    panels[0].set_xlabel('sent by a rank in a forward, units of x')
    panels[1].set_xlabel('held by a rank at the peak of a backward, units of x')
    panels[0].invert_yaxis()
    return figure


def read(path):
    with open(path, encoding='utf-8') as source:
        numbers = json.load(source)
    if not isinstance(numbers, dict) or not ({'components', 'phases', 'fits'} <= set(numbers) or 'attention_of' in numbers):
        raise ValueError('no numbers of upipe-plan --json')
    return numbers


def main():
    if len(sys.argv) < 3 or sys.argv[1].startswith('-'):
        print(__doc__, file=sys.stderr)
        return 2
    plans = []
    for path in sys.argv[2:]:
        try:
            plans.append((os.path.splitext(os.path.basename(path))[0], read(path)))
        except (OSError, ValueError) as error:
            print(f'plot_plan.py: {path}: {error}', file=sys.stderr)
            return 2
    many = [name for name, numbers in plans if 'settings' in numbers]
    if many and len(plans) > 1:
        print(f'plot_plan.py: {many[0]} is of all settings: it has a picture of its own', file=sys.stderr)
        return 2
    latents = [name for name, numbers in plans if 'attention_of' in numbers]
    if 0 < len(latents) < len(plans):
        print(f'plot_plan.py: {latents[0]} is of latent attention alone: others have a picture of their own', file=sys.stderr)
        return 2
    figure = settings(plans[0][1]) if many else latent(plans) if latents else breakdown(plans)
    figure.tight_layout()
    figure.savefig(sys.argv[1], dpi=110, metadata={'Software': None})
    return 0


if __name__ == '__main__':
    sys.exit(main())

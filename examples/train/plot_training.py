#!/usr/bin/env python3
"""plot_training.py loss|memory PICTURE NUMBERS... -- what train wrote with --json, one NUMBERS a method

loss: the loss of every step; below, what the second method's losses differ by from the first's. Lines show what would be
left to learn for who knows how often each byte follows none, one and two others in the text, which is printed too.
memory: what one rank holds at the peak of a step, by component, one bar a method; beside it the largest that each
component becomes in the step, each at a moment of its own. Gradients are those of the weights in both; the residual
stream's are with the stream, and those of attention with attention. NUMBERS of --plan are drawn as planned. Runs of a
device's size have a line at 80 GB, and runs with a second pool its bytes, in the host's memory.
"""

import collections
import json
import math
import sys

import matplotlib

matplotlib.use('Agg')
import matplotlib.pyplot as plt  # noqa: E402

# From the bottom of the stack upwards: component, label, colour.
COMPONENTS = [
    ('weights', 'weights', '#3b4252'),
    ('gradients', 'gradients of weights', '#9c4a5b'),
    ('optimizer', 'optimizer states', '#7f95b5'),
    ('checkpoints', 'activation checkpoints', '#c3cede'),
    ('stream', 'residual stream', '#81a969'),
    ('attention', 'attention', '#2a9d8f'),
    ('mlp', 'MLP', '#e9c46a'),
    ('loss', 'loss', '#e07a5f'),
    ('other', 'other', '#7d6b91'),
]
OTHER = ['tokens', 'sum']  # small; together they are 'other'
NAMES = {'ulysses': 'DeepSpeed-Ulysses', 'upipe': 'UPipe'}
COLOURS = {'ulysses': '#e07a5f', 'upipe': '#2a9d8f'}
H100 = 80e9  # bytes of a device of the size that the paper used
# GiB of a GPU that the paper measured for Llama3-8B on 8 GPUs (its table of memory by sequence length), by 2^20 tokens;
# None: out of memory.
PAPER = {1: {'ulysses': 34.35, 'upipe': 29.9}, 2: {'ulysses': 49.49, 'upipe': 40.5}, 3: {'ulysses': 64.55, 'upipe': 51.1},
         4: {'ulysses': None, 'upipe': 61.7}, 5: {'ulysses': None, 'upipe': 72.3}}


def read(path):
    with open(path, encoding='utf-8') as source:
        return json.load(source)


def title(config):
    return (f'a Llama of {config["layers"]} layers, model dim {config["model_dim"]}, {config["heads"]} query heads, '
            f'{config["kv_heads"]} key/value heads\n{config["batch"]} x {config["tokens"]:,} tokens a step '
            f'on {config["ranks"]} ranks, {config["dtype"]}')


def tidy(axes):
    axes.set_axisbelow(True)
    for side in ('top', 'right'):
        axes.spines[side].set_visible(False)


def draw_difference(axes, first, second):
    """The second's losses minus the first's, over the steps that both have."""
    steps = range(1, min(len(first['loss']), len(second['loss'])) + 1)
    difference = [b - a for a, b in zip(first['loss'], second['loss'])]
    most = max(map(abs, difference))
    axes.plot(steps, difference, color='#3b4252', linewidth=1.2)
    if most == 0:
        axes.set_ylim(-1, 1)
        axes.set_yticks([0])
        note = f'exactly 0 in all {len(steps)} steps'
    else:
        axes.set_ylim(-1.25 * most, 1.6 * most)
        note = f'at most {most:.2g}'
    axes.annotate(note, (0.5, 0.95), xycoords='axes fraction', ha='center', va='top', fontsize=9)
    axes.set_ylabel('difference')
    axes.grid(axis='y', color='#dddddd', linewidth=0.6)
    tidy(axes)


def entropies(path):
    """Nats of a byte of the text by the frequencies of single bytes, and where one or two bytes before it are known."""
    with open(path, 'rb') as source:
        text = source.read()
    together = [0.0]
    for length in (1, 2, 3):
        runs = collections.Counter(zip(*(text[start:] for start in range(length))))
        total = sum(runs.values())
        together.append(-sum(count / total * math.log(count / total) for count in runs.values()))
    return [max(after - before, 0) for before, after in zip(together, together[1:])]


def draw_entropies(axes, runs):
    """The lines of a text of bytes. Prints them beside what a model has come to: the mean of the last steps."""
    if runs[0]['config']['tokens_file'] is not None:
        return
    names, levels = ['no context', '1 byte of it', '2 bytes of it'], entropies(runs[0]['config']['data'])
    for name, level in zip(names, levels):
        axes.axhline(level, color='black', linewidth=0.8, linestyle=(0, (4, 3)))
        axes.annotate(f'{name}\n{level:.2f}', (1, level), xycoords=('axes fraction', 'data'), xytext=(4, 0),
                      textcoords='offset points', va='center', fontsize=8, annotation_clip=False)
    last = runs[-1]['loss'][-50:]
    print(f'nats a byte at the end: {sum(last) / len(last):.2f}, the mean of {len(last)} steps. By frequencies in the text: '
          + ', '.join(f'{name} {level:.2f}' for name, level in zip(names, levels)))


def draw_loss(runs):
    two = len(runs) > 1
    figure, panels = plt.subplots(1 + two, 1, sharex=True, squeeze=False, figsize=(7.2, 5.2 if two else 4.2),
                                  height_ratios=[4, 1][:1 + two])
    axes = panels[0][0]
    for place, run in enumerate(runs):
        method, steps = run['config']['method'], range(1, len(run['loss']) + 1)
        dashed = {'linestyle': (0, (4, 3))} if place > 0 else {}  # equal curves hide each other
        mean = max(len(run['loss']) // 80, 1)
        if mean > 1:
            axes.plot(steps, run['loss'], color=COLOURS[method], linewidth=0.4, alpha=0.4)
        axes.plot(steps, [sum(run['loss'][max(step - mean, 0):step]) / min(step, mean) for step in steps],
                  color=COLOURS[method], linewidth=1.6 if place else 2.4, **dashed,
                  label=NAMES[method] + (f', mean of {mean} steps' if mean > 1 else ''))
    draw_entropies(axes, runs)
    axes.set_ylabel('loss, nats a ' + ('byte' if runs[0]['config']['tokens_file'] is None else 'token'))
    axes.grid(color='#dddddd', linewidth=0.6)
    axes.legend(frameon=False)
    tidy(axes)
    if two:
        draw_difference(panels[1][0], runs[0], runs[1])
    panels[-1][0].set_xlabel('step')
    panels[-1][0].set_xlim(1, max(max(len(run['loss']) for run in runs), 2))
    figure.suptitle('Training ' + title(runs[0]['config']), fontsize=10)
    return figure


def short(number):
    return f'{number:.3g}' if number < 100 else f'{number:.0f}'


def in_components(measured, path):
    """Bytes of every one of COMPONENTS."""
    known = [name for name, _, _ in COMPONENTS] + OTHER
    for name in measured:
        if name not in known:
            sys.exit(f'plot_training.py: {path}: no colour for the component {name}')
    grouped = {name: measured.get(name, 0) for name, _, _ in COMPONENTS}
    grouped['other'] += sum(measured.get(name, 0) for name in OTHER)
    return grouped


def is_planned(run):
    """Whether nothing ran: the numbers are those of train --plan."""
    return 'all_ranks' in run


def paper_of(config):
    """The paper's figures for this run, by method; {} where it has none."""
    llama = {'layers': 32, 'model_dim': 4096, 'heads': 32, 'kv_heads': 8, 'ranks': 8, 'dtype': 'bf16', 'batch': 1}
    same = all(config[key] == value for key, value in llama.items())
    return PAPER.get(config['tokens'] / 2**20, {}) if same else {}


def draw_paper(axes, place, measured):
    """What the paper measured: a line across the bar, or a word below it."""
    if measured is not None:
        axes.plot([place - 0.38, place + 0.38], [measured, measured], color='#9c4a5b', linewidth=1.2)
        axes.annotate('measured by the paper', (place, measured), xytext=(0, -3), textcoords='offset points', ha='center',
                      va='top', fontsize=8, color='#9c4a5b')
    return 'paper, measured:\n' + ('out of memory' if measured is None else f'{measured:.1f} GiB')


def draw_beside(axes, place, thin, most):
    """Numbers of segments too thin to hold them, right of the bar: from the bottom upwards, each with a line to its own."""
    below = -most
    for middle, height in thin:
        at = max(middle, below + 0.04 * most)
        axes.annotate(short(height), (place + 0.275, middle), xytext=(place + 0.34, at), va='center', fontsize=8,
                      arrowprops={'arrowstyle': '-', 'linewidth': 0.6, 'shrinkA': 1, 'shrinkB': 0})
        below = at


def draw_stacks(axes, runs, stacks, unit):
    totals = [sum(stack.values()) / unit for stack in stacks]
    names = []
    for place, stack in enumerate(stacks):
        bottom, thin = 0, []
        for name, _, colour in COMPONENTS:
            height = stack[name] / unit
            axes.bar(place, height, 0.55, bottom, color=colour, edgecolor='white', linewidth=0.5)
            if height > 0.045 * max(totals):
                dark = sum(int(colour[at:at + 2], 16) for at in (1, 3, 5)) < 400
                axes.annotate(short(height), (place, bottom + height / 2), ha='center', va='center', fontsize=8,
                              color='white' if dark else 'black')
            elif height > 0.005 * max(totals):
                thin.append((bottom + height / 2, height))
            bottom += height
        draw_beside(axes, place, thin, max(totals))
        note = f'{bottom:.1f}'
        if place > 0 and totals[0] > 0:
            share = 100 * (1 - totals[place] / totals[0])
            digits = 1 if abs(share) < 10 else 0
            note += '\nthe same' if share == 0 else f'\n{abs(share):.{digits}f} % {"less" if share > 0 else "more"}'
        axes.annotate(note, (place, bottom), xytext=(0, 3), textcoords='offset points', ha='center', fontsize=9)
        config = runs[place]['config']
        paper = paper_of(config)
        names.append(NAMES[config['method']])
        if config['method'] in paper:
            names[-1] += '\n' + draw_paper(axes, place, paper[config['method']])
    axes.set_xlim(-0.5, len(runs) - 0.42)
    axes.set_ylim(0, 1.14 * max(totals + [axes.get_ylim()[1] / 1.14]))
    axes.set_xticks(range(len(runs)), names)
    axes.tick_params(axis='x', length=0)
    axes.grid(axis='y', color='#dddddd', linewidth=0.6)
    axes.set_title('together, at the peak of the step', fontsize=10)
    tidy(axes)


def draw_largest(axes, runs, largest, unit):
    """A row a component, a bar in it for every method, the first on top."""
    most = max(max(each.values()) for each in largest) / unit
    thick = 0.8 / len(runs)
    for row, (name, _, colour) in enumerate(COMPONENTS):
        for place, each in enumerate(largest):
            at = row + 0.4 - thick * (place + 0.5)
            length = each[name] / unit
            axes.barh(at, length, thick * 0.92, color=colour, alpha=1 if place == 0 else 0.6)
            axes.annotate(short(length), (length, at), xytext=(3, 0), textcoords='offset points', va='center',
                          fontsize=7)
    axes.set_yticks(range(len(COMPONENTS)), [label for _, label, _ in COMPONENTS])
    axes.tick_params(axis='y', length=0)
    axes.set_xlim(0, 1.12 * most)
    axes.grid(axis='x', color='#dddddd', linewidth=0.6)
    order = ' above '.join(NAMES[run['config']['method']] for run in runs)
    axes.set_title(f'the largest of each in the step, each at a moment of its own\n{order}', fontsize=10)
    tidy(axes)


def host_bytes(run):
    """The second pool's: one number, or the most of several phases."""
    held = run['host_bytes']
    return max(held.values()) if isinstance(held, dict) else held


def draw_device(axes, runs, peak, unit, name):
    """A device's memory as a line, where the run is of that size; what is in the host's memory under the names."""
    if peak > H100 / 4:
        axes.set_ylim(0, 1.14 * max(peak, H100) / unit)
        axes.axhline(H100 / unit, color='black', linewidth=0.8, linestyle=(0, (4, 3)))
        axes.annotate('a GPU of 80 GB: 74.5 GiB', (-0.47, H100 / unit), xytext=(0, 3), textcoords='offset points', fontsize=8)
    if any(map(host_bytes, runs)):
        labels = [label.get_text() for label in axes.get_xticklabels()]
        axes.set_xticks(range(len(runs)), [f'{text}\n(host: {short(host_bytes(run) / unit)} {name})'
                                           for text, run in zip(labels, runs)])


def draw_memory(runs, paths):
    stacks = [in_components(run['memory']['at_peak'], path) for run, path in zip(runs, paths)]
    largest = [in_components(run['memory']['largest'], path) for run, path in zip(runs, paths)]
    peak = max(sum(stack.values()) for stack in stacks)
    unit, name = (2**30, 'GiB') if peak >= 2**30 else (2**20, 'MiB') if peak >= 2**20 else (2**10, 'KiB')
    left = 1.5 * len(runs) + 1
    figure, panels = plt.subplots(1, 2, figsize=(left + 6, 5.2), width_ratios=[left, 5.4])
    draw_stacks(panels[0], runs, stacks, unit)
    draw_device(panels[0], runs, peak, unit, name)
    draw_largest(panels[1], runs, largest, unit)
    panels[0].set_ylabel(('planned ' if all(map(is_planned, runs)) else '') + f'live bytes of one rank, {name}')
    panels[1].set_xlabel(name)
    what = 'Planned memory of ' if all(map(is_planned, runs)) else 'Memory of '
    figure.suptitle(what + title(runs[0]['config']), fontsize=10)
    return figure


def main():
    if len(sys.argv) < 4 or sys.argv[1] not in ('loss', 'memory'):
        sys.exit(__doc__)
    runs = [read(path) for path in sys.argv[3:]]
    figure = draw_loss(runs) if sys.argv[1] == 'loss' else draw_memory(runs, sys.argv[3:])
    figure.tight_layout()
    figure.savefig(sys.argv[2], dpi=110, metadata={'Software': None})


if __name__ == '__main__':
    main()

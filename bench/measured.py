#!/usr/bin/env python3
"""measured.py -- runs that others have published, beside what upipe-plan plans for them

bench/measured.json has the runs: the flags that plan each, and what was measured. This prints planned, measured and their
ratio, the ends of the ratios by program and method, which the planner says of its plans, and draws planned over measured.
Runs that were seen when the numbers of their program were chosen are marked; all others are held out. --pages puts the
tables into a page, docs/measured.md, whose other lines are its own.
"""

import collections
import json
import os
import sys
import textwrap

import common
import paper
import picture

RUNS = os.path.join(common.TOP, 'bench', 'measured.json')
GIB = 2**30
WITHIN = {'memory': 7, 'time': 10}  # %
BEGIN, END = '<!-- by sh bench/run.sh measured --pages -->', '<!-- to here -->'


def amount(tokens):
    """512k, 1M, 3800000."""
    return int(tokens[:-1]) * {'k': 2**10, 'M': 2**20}[tokens[-1]] if tokens[-1] in 'kM' else int(tokens)


def machine(run):
    words = run['flags'].split()
    return words[words.index('--machine') + 1] if '--machine' in words else 'h100x8'


def planned(planner):
    """The runs with what is planned for them: seconds of both, `fits`, and the ratios of memory and time."""
    with open(RUNS, encoding='utf-8') as source:
        known = json.load(source)
    runs = []
    for run in known['runs']:
        words = run['flags'].split()
        got = planner.ask(*words)
        seconds = run.get('seconds', 0)
        if 'speed' in run:
            seconds = got['seconds_step'] * got['tokens_per_s_per_gpu'] / run['speed']
        off = {}
        if 'gib' in run:
            off['memory'] = got['gpu_bytes'] / GIB / run['gib']
        if seconds:
            off['time'] = got['seconds_step'] / seconds
        runs.append({**run, 'program': words[words.index('--as') + 1], 'method': got['method'], 'planned_gib': got['gpu_bytes'] / GIB,
                     'planned_seconds': got['seconds_step'], 'real': seconds, 'fits': got['fits'], 'off': off,
                     'said': got['measured']})
    return known['sources'], runs


def ends(runs):
    """{(program, method): what the planner says of it}, from the runs that did not end out of memory."""
    of = collections.defaultdict(list)
    for run in runs:
        of[run['program'], run['method']].append(run)
    said = {}
    for key, mine in of.items():
        mine = [run for run in mine if run['off']]
        lengths = sorted({run['flags'].split('--tokens ')[1].split()[0] for run in mine}, key=amount)
        cards = sorted({machine(run).split('x')[0] for run in mine})
        models = sorted({run['flags'].split('--model ')[1].split()[0] for run in mine})
        parts = [f"{len(mine)} runs of {', '.join(models)} on {', '.join(cards)}, {lengths[0]} to {lengths[-1]} tokens"]
        for what in WITHIN:
            ratios = [100 * (run['off'][what] - 1) for run in mine if what in run['off']]
            if ratios:
                fitted = sum(what in run.get('seen', []) for run in mine if what in run['off'])
                how = {0: 'none fitted', len(ratios): 'all fitted'}.get(fitted, f'{fitted} fitted')
                parts.append(f'{what} of {len(ratios)}, {how}, is off by {min(ratios):+.0f} to {max(ratios):+.0f} %')
        said[key] = '; '.join(parts)
    return said


def held(runs):
    """(what, within, of) of the runs that are held out, and (right, of all) of those that fitted and of those that did not."""
    counts = []
    for what, most in WITHIN.items():
        ratios = [run['off'][what] for run in runs if what in run['off'] and what not in run.get('seen', [])]
        counts.append((what, sum(abs(ratio - 1) * 100 <= most for ratio in ratios), len(ratios)))
    rights = [[run['fits'] != ended for run in runs if run.get('ends', False) == ended] for ended in (False, True)]
    return counts, [(sum(right), len(right)) for right in rights]


def cell(run, what, ours, theirs):
    if not theirs:
        return f'{ours:.4g}'
    mark = '' if what in run.get('seen', []) else ' *'
    return f"{ours:.4g} / {theirs:.4g} ({100 * (run['off'][what] - 1):+.1f} %){mark}"


class Measured(common.Benchmark):
    name, text = 'measured', __doc__

    def flags(self, parser):
        parser.add_argument('--plan', metavar='PROGRAM', help='upipe-plan (the one built here)')
        parser.add_argument('--pages', metavar='FILE', help='put the tables into the page (docs/measured.md)')

    def tables(self, sources, runs):
        lines = []
        for source, where in sorted(sources.items(), key=lambda known: known[0] == 'paper'): # what is fitted at the end
            mine = [run for run in runs if run['source'] == source]
            lines += ['', *textwrap.wrap(f'**{source}**: {where}.', 118, break_on_hyphens=False), '']
            lines += common.table(['upipe-plan', 'GiB', 'seconds', ''], [
                [f"`{run['flags']}`", cell(run, 'memory', run['planned_gib'], run.get('gib')),
                 cell(run, 'time', run['planned_seconds'], run['real']) if run['off'].get('time') or not run.get('ends') else '',
                 ('out of memory' if run.get('ends') else '') + ('' if run['fits'] != run.get('ends', False) else ' **wrong: '
                  + ('fits' if run['fits'] else 'does not fit') + '**')] for run in mine])
        return lines

    def summary(self, runs):
        counts, (fitted, ended) = held(runs)
        lines = [f'{len(runs)} runs. Of what is held out ' + ', '.join(f'{what} is within {WITHIN[what]} % in {good} of {n}'
                                                                       for what, good, n in counts) + '.',
                 f'Of {fitted[1]} runs that fitted {fitted[0]} are planned to fit, of {ended[1]} that did not {ended[1] - ended[0]}.', '']
        return lines + common.table(['program', 'method', 'plans and measurements'],
                                    [[*key, text] for key, text in sorted(ends(runs).items())])

    def main(self):
        options = self.options
        planner = paper.Planner(os.path.abspath(options.plan) if options.plan else paper.program())
        sources, runs = planned(planner)
        lines = self.summary(runs) + self.tables(sources, runs)
        print('\n'.join(lines))
        with open(options.json, 'w', encoding='utf-8') as target:
            json.dump(runs, target, indent=1)
            target.write('\n')
        if not options.quick:
            self.picture(runs)
        stale = [f"--as {key[0]} --method {key[1]} says \"{was}\", not \"{text}\"" for key, text in ends(runs).items()
                 for was in {run['said'] for run in runs if (run['program'], run['method']) == key} if was != text]
        for sentence in stale:
            common.log(sentence)
        if options.pages:
            with open(options.pages, encoding='utf-8') as source:
                before, rest = source.read().split(BEGIN)
            with open(options.pages, 'w', encoding='utf-8') as target:
                target.write(before + BEGIN + '\n\n' + '\n'.join(lines) + '\n\n' + END + rest.split(END)[1])
        return 1 if stale else 0

    def picture(self, runs):
        plt = picture.pyplot()
        if plt is None:
            return
        figure, panels = plt.subplots(1, 2, figsize=(10, 4.4))
        names = list(dict.fromkeys(run['program'] for run in runs))
        for axes, what, theirs in (panels[0], 'memory', 'gib'), (panels[1], 'time', 'real'):
            for i, name in enumerate(names):
                for seen in True, False:
                    points = [(run[theirs], run['off'][what]) for run in runs if run['program'] == name and what in run['off']
                              and (what in run.get('seen', [])) == seen]
                    if points:
                        axes.plot(*zip(*points), 'o', color=f'C{i}', markersize=5, markerfacecolor='none' if seen else f'C{i}',
                                  label=name if not seen or name == 'paper' else None)
            axes.axhspan(1 - WITHIN[what] / 100, 1 + WITHIN[what] / 100, color='#dddddd', linewidth=0)
            axes.axhline(1, color='black', linewidth=0.8)
            axes.set_xscale('log')
            if what == 'memory':
                axes.set_xticks([20, 40, 80, 140], ['20', '40', '80', '140'], minor=False)
                axes.minorticks_off()
            axes.set_xlabel(f"measured, {'GiB of a GPU' if what == 'memory' else 'seconds a step'}")
            axes.set_ylabel('planned / measured')
            picture.tidy(axes)
        panels[1].legend(frameon=False, fontsize=8, title='filled: held out; grey: within 7 and 10 %', title_fontsize=8)
        figure.tight_layout()
        picture.save(figure, self.options.chart)


if __name__ == '__main__':
    benchmark = Measured()
    benchmark.read()
    sys.exit(benchmark.main())

#!/usr/bin/env python3
"""test_compare.py COMPARE -- the program examples/compare, from the outside

Numbers must obey the identities of the schedule and of the paper's tables, spelled out here a second time; dumped
results must agree with NumPy in double precision; bad input must end in a sentence, a non-zero status and no file.
"""

import ast
import math
import os
import re
import resource
import shutil
import signal
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), 'lib'))
from checks import check, equal, load, needed, other_python, read, run_command, run_tests, tree, write  # pylint: disable=wrong-import-position
from programs import (BOOK, ODD_NAME, ODD_TEXT, TOP, flags_of, limit_files, refused as refused_command,  # pylint: disable=wrong-import-position
                      replay, watched)

try:
    import numpy as np
except ImportError:
    other_python()
    sys.exit('test_compare.py: no NumPy here to check results with: install python3-numpy')
from attention import attend, attend_bwd, rope, visible  # pylint: disable=wrong-import-position

COMPARE = os.path.abspath(sys.argv[1])
PHASES = ['fwd_before', 'fwd_in', 'fwd_attn', 'fwd_out', 'bwd_before', 'bwd_out', 'bwd_attn', 'bwd_in']
CONFIG = {name.replace('-', '_') for name in flags_of('IN_COMPARE')} - {'help', 'version'} | {'products', 'unit_bytes'}
METHOD = {'name', 'ranks', 'ring', 'ring_inner', 'ring_mode', 'layout', 'chunk', 'stages', 'segments', 'peak_bytes',
          'plan_bytes', 'host_bytes', 'plan_host_bytes', 'paper_units', 'slab_bytes', 'intermediate_bytes_fwd',
          'sent_bytes', 'plan_sent_bytes', 'seconds_fwd', 'seconds_bwd', 'seconds_cpu', 'err_out', 'err_dx', 'err_dw', 'err_dsinks',
          'same_bits_out', 'same_bits_dx', 'same_bits_dw'}
HEADS = ['ulysses', 'upipe', 'upipe-naive']  # one all-to-all of all ranks
RINGS = ['ring', 'zigzag', 'stripe', 'double-ring', 'allgather', 'usp', 'upipe-ring']
SEGMENTED = ['fpdt', 'upipe-fpdt']
PARTS = {'transfer', 'attn_fwd', 'attn_bwd', 'products'}  # of the processor time of a pass, "all"
LAYOUTS = {'stripe': 'striped', 'zigzag': 'zigzag', 'double-ring': 'zigzag', 'allgather': 'zigzag', 'usp': 'zigzag',
           'upipe-ring': 'zigzag'}


def named(names):
    return [word for name in names for word in ('--method', name)]


ALL = named(HEADS)
EVERY = named(HEADS + RINGS + SEGMENTED)
OUTPUTS = ['--json', 'numbers.json', '--trace', 'traces', '--dump', 'dump']


def run(args, folder, **more):
    return run_command([COMPARE, *args], cwd=folder, timeout=100, **more)


def refused(folder, args, status, words, what=None, **more):
    return refused_command([COMPARE, *args], folder, status, words, what, timeout=100, **more)


# ---- good runs ----


def paper(name, group, stages, segments, layers, offload):
    """The rows of the paper's two tables, in units: Ulysses with and without offloading, the others with it."""
    g, nu = 1 + 2 / group, stages
    if name in RINGS or name == 'upipe-fpdt':
        return None
    if name == 'fpdt':
        return [cell / segments for cell in (1, g + 2, 2 * g + 1, 2, 1, 3, 2 * g + 4, g + 2)]
    if name == 'ulysses' and not offload:
        return [layers + cell for cell in (0, g + 1, g + 1, 2, 2, 3, 2 * g + 2, g + 1)]
    if name == 'ulysses':
        return [1, g + 2, g + 2, 3, 3, 4, 2 * g + 3, g + 2]
    if layers > 1 and not offload:
        return None
    before = 2 * (nu - 1) / nu
    return [1, 2 + g / nu, 2 + g / nu, 2 + 1 / nu, 3, 3 + 1 / nu, max(3 + 2 * g / nu, 2 + 2 * g / nu + before),
            2 + g / nu + before]


def width(c):
    return {'f32': 4, 'bf16': 2}[c['dtype']]


def expected_plan(c, m, ring, inner):
    """Ranks that trade heads, ring, inner ring, layout and heads of a stage of a method by its name."""
    name, N = m['name'], c['ranks']
    R = ring if name in ('usp', 'upipe-ring') else 1 if name in HEADS + SEGMENTED else N
    chunk = c['heads'] // c['kv_heads'] if name == 'allgather' else m['chunk'] if 'upipe' in name else c['heads']
    layout = LAYOUTS.get(name, 'contiguous') if R > 1 else 'contiguous'
    return [N // R, R, inner if name == 'double-ring' else 0, layout, chunk]


def divides(c, m):
    """Whether all ranks hold, get and send equally much."""
    C, R, H, Hkv = m['ranks'], m['ring'], c['heads'], c['kv_heads']
    even = c['tokens'] % (2 * C * R * m['segments']) == 0 and H % m['chunk'] == 0 and m['chunk'] % C == 0
    return even and c['v_dim'] == c['head_dim'] and (Hkv % C == 0 or C % Hkv == 0)


def expected_sent(c, m):
    """Bytes that a rank sends to its team and to its ring: [forward, backward]. Heads that a rank sends of each tensor,
    all stages together."""
    C, R, H, Hkv, e, name = m['ranks'], m['ring'], c['heads'], c['kv_heads'], width(c), m['name']
    rows = c['batch'] * c['tokens'] // (C * R)
    per, group = m['chunk'] // C, H // Hkv
    head = rows * c['head_dim']
    kv_heads = max(Hkv, C) if name != 'upipe-naive' else H // min(per, group)
    partial = (name == 'upipe-naive' or Hkv < C) and per % group != 0
    forward = (2 * H + 2 * kv_heads) * head * e
    backward = forward + H * head * e + H * rows * 4 + 2 * kv_heads * head * (4 if partial else e)
    if name in SEGMENTED:  # Q, K and V travel once
        backward -= (H + 2 * kv_heads) * head * e
    # K and V of a rank's heads and its ring share: R - 1 times on, but not where every query sees its own key alone (of
    # striped tokens that is not looked into); their gradients in f32 one step further, to their own rank
    block = 2 * kv_heads * head
    inner = m['ring_inner'] or R
    home = R - 1 if m['ring_mode'] == 'all-gather' else R if inner == R else R + R // inner
    on = 0 if c['window'] == 1 and m['layout'] != 'striped' else R - 1
    around = [on * block * e, on * block * e + home * block * 4 * (R > 1)]
    return {'team': [n * (C - 1) // C for n in (forward, backward)], 'ring': around}


def error_limits(c):
    """Roundings walk at random over the longest chain of a sum, which is added in blocks of 640 terms; each storage in
    bf16 rounds by 2^-9 at most."""
    longest = c['batch'] * c['tokens'] + c['model_dim']
    longest += (c['heads'] + c['kv_heads']) * c['head_dim'] + c['kv_heads'] * c['v_dim']
    if longest > 640:
        longest = 640 + longest / 640
    return 4 * 2**-24 * math.sqrt(longest) + 8 * {'f32': 0, 'bf16': 2**-9}[c['dtype']]


def stages_of_rank(c, m, rank):
    """The query heads of a rank, a list for each stage."""
    C, H, G, U = m['ranks'], c['heads'], c['heads'] // c['kv_heads'], m['chunk']
    per = -(-U // C)
    if U % C == 0 and H % U == 0:
        stages = range(H // U)
        if per % G == 0 or m['name'] == 'upipe-naive':  # heads in order
            return [list(range((i * C + rank) * per, (i * C + rank + 1) * per)) for i in stages]
        if c['kv_heads'] % C == 0 and G % per == 0:  # a group stage by stage, then the rank's next one
            steps = G // per
            begins = [(i // steps * C + rank) * G + i % steps * per for i in stages]
            return [list(range(begin, begin + per)) for begin in begins]
        if C % c['kv_heads'] == 0:  # a part of a group
            return [list(range(rank * H // C + i * per, rank * H // C + (i + 1) * per)) for i in stages]
    if G == 1:  # uneven: a stage has the next heads, of which each rank has the next ones
        parts = [(first, min(per * C, H - first)) for first in range(0, H, per * C)]
        return [list(range(first + n * rank // C, first + n * (rank + 1) // C)) for first, n in parts]
    # uneven: at most `per` heads a stage, of one group that was begun before, or of whole groups
    left, made = list(range(rank * H // C, (rank + 1) * H // C)), []
    while left:
        groups = [[head for head in left if head // G == kv] for kv in sorted({head // G for head in left})]
        stage = groups[0][:per]
        if not (made and made[-1][-1] // G == stage[0] // G):
            for group in groups[1:]:
                if len(stage) + len(group) <= per and stage[-1] == group[0] - 1:
                    stage = stage + group
                else:
                    break
        made.append(stage)
        left = left[len(stage):]
    return made


def kv_sums(c, m):
    """How the gradient of each key/value head is summed: groups of query heads, in order, but for the first two."""
    G, name = c['heads'] // c['kv_heads'], m['name']
    parts = []  # (key/value head, stage in which it is sent, rank, the rank's query heads)
    for rank in range(m['ranks']):
        open_parts = {}
        for i, heads in enumerate(stages_of_rank(c, m, rank)):
            for head in heads:
                kv = head // G
                alone = name == 'upipe-naive' or name in SEGMENTED
                part = open_parts.setdefault((kv, i) if alone else kv, [kv, i, rank, []])
                part[1] = i
                part[3].append(head)
        parts += open_parts.values()
    sums = []
    for kv in range(c['kv_heads']):
        order = [part[3] for part in sorted(parts) if part[0] == kv]
        sums.append(sorted(order[:2]) + order[2:])
    return sums


def check_numbers(numbers, what, checked=True, ring=2, inner=2, segments=4):
    c = numbers['config']
    equal(set(numbers), {'config', 'methods'}, f'{what}: keys')
    equal(set(c), CONFIG, f'{what}: keys of config')
    unit = c['batch'] * c['tokens'] * c['model_dim'] * width(c) / c['ranks']
    check(abs(c['unit_bytes'] / unit - 1) < 1e-8, f'{what}: unit_bytes {c["unit_bytes"]}, not {unit}')
    equal([m['name'] for m in numbers['methods']], c['method'], f'{what}: names')
    for m in numbers['methods']:
        name = f'{what}: {m["name"]}'
        equal(set(m), METHOD, f'{name}: keys')
        plan = [m['ranks'], m['ring'], m['ring_inner'], m['layout'] if m['ring'] > 1 else 'contiguous', m['chunk']]
        equal(plan, expected_plan(c, m, ring, inner), f'{name}: plan')
        for key in ('peak_bytes', 'plan_bytes'):
            equal(list(m[key]), PHASES, f'{name}: {key}')
        equal(m['peak_bytes'], m['plan_bytes'], f'{name}: peak')
        equal(m['sent_bytes'], m['plan_sent_bytes'], f'{name}: bytes sent')
        equal(m['host_bytes'], m['plan_host_bytes'], f'{name}: bytes of the host')
        equal(m['segments'], segments if m['name'] in SEGMENTED else 1, f'{name}: segments')
        host = m['sent_bytes'].pop('host')
        hosted = c['offload'] or m['name'] in SEGMENTED
        equal([n > 0 for n in (m['host_bytes'], *host)], [hosted] * 3, f'{name}: bytes of the host')
        cells = paper(m['name'], c['heads'] / c['kv_heads'], m['stages'], m['segments'], c['layers'], c['offload'])
        equal(m['paper_units'] is None, cells is None, f'{name}: formulas of the paper')
        for phase, cell in zip(PHASES, cells or []):
            units = m['paper_units'][phase]
            check(abs(units - cell) < 1e-9, f'{name}: paper {phase} is {units}, not {cell}')
        check(m['slab_bytes'] >= max(m['peak_bytes'].values()), f'{name}: slab {m["slab_bytes"]} below the peak')
        if divides(c, m):
            equal(m['stages'], c['heads'] // m['chunk'], f'{name}: stages')
            inputs = 0 if m['name'] in SEGMENTED else 1 if c['offload'] else c['layers']
            equal(m['peak_bytes']['fwd_before'], inputs * unit, f'{name}: x')
            if c['offload'] and m['name'] not in SEGMENTED:
                equal([m['host_bytes'], *host], [c['layers'] * unit, unit, unit], f'{name}: offloaded inputs')
            equal(m['sent_bytes'], expected_sent(c, m), f'{name}: bytes sent')
        check(m['seconds_fwd'] > 0 and m['seconds_bwd'] > 0, f'{name}: seconds {m["seconds_fwd"]} {m["seconds_bwd"]}')
        check_parts(m['seconds_cpu'], c['overlap'] and m['stages'] * m['segments'] > 1, name)
        for key in ('err_out', 'err_dx', 'err_dw', 'err_dsinks'):
            if checked and (key != 'err_dsinks' or c['sinks']):
                check(0 < m[key] < error_limits(c), f'{name}: {key} {m[key]}, at most {error_limits(c)}')
            else:
                equal(m[key], None, f'{name}: {key}')
        # another ring, segments, and a BLAS in place of the built-in product promise no equal bits
        first = numbers['methods'][0]
        order = [[*(one[key] for key in ('ring', 'ring_mode', 'ring_inner', 'layout')), one['name'] in SEGMENTED]
                 for one in (m, first)]
        if (c['products'] == 'built-in' and c['dtype'] == 'f32' and order[0] == order[1]) or m is first:
            check(m['same_bits_out'], f'{name}: out has other bits')
            if kv_sums(c, m) == kv_sums(c, first):
                equal([m['same_bits_dx'], m['same_bits_dw']], [True] * 2, f'{name}: same bits')


def check_parts(cpu, beside, name):
    """Processor seconds: every part is there, and together they are not more than all. `beside`: a second thread of a rank
    computes, perhaps, and nothing is said."""
    if beside and cpu is None:
        return
    needed(cpu is not None, f'{name}: no processor time')
    equal(set(cpu), PARTS | {'all'}, f'{name}: parts of the processor time')
    parts = [cpu[part] for part in PARTS]
    check(min(parts) > 0 and sum(parts) < 1.05 * cpu['all'], f'{name}: parts of the processor time {cpu}')


def verdict(m, first):
    """The sentence that compares a method with the first one: numbers of JSON in words. What goes to the host is not sent."""
    peak, sent = (max(m['peak_bytes'].values()) / max(first['peak_bytes'].values()),
                  [sum(map(sum, one['sent_bytes'].values())) for one in (m, first)])
    off = abs(1 - peak)
    held = 'as much as' if off == 0 else f'{100 * off:.{2 if off < 0.005 else 0}f} % {"less" if peak < 1 else "more"} than'
    others = [key for key in ('out', 'dx', 'dw') if not m['same_bits_' + key]]
    bits = ' '.join(['gives other bits in', *others] if others else ['gives the same bits'])
    sends = 'nothing, as one rank does' if sent[1] == 0 else 'the same number of bytes' if sent[0] == sent[1] else \
        f'{sent[0] / sent[1]:.2f} times the bytes'
    return f'{m["name"]} holds {held} {first["name"]} at its peak, {bits}, and sends {sends}.\n'


def good(folder, args, what, checked=True, **grid):
    """Runs compare, checks all that holds for every run, returns the numbers."""
    path = 'numbers.json'
    done = run([*args, '--json', path], folder)
    needed(done.returncode == 0, f'{what}: status {done.returncode}: {done.stderr}')
    equal(done.stderr, '', f'{what}: stderr')
    wide = [line for line in done.stdout.split('\n') if len(line) > 120]
    check(not wide, f'{what}: a line wraps on a terminal of 120 columns: {wide}')
    check(all(phase in done.stdout for phase in PHASES), f'{what}: a phase is missing on screen: {done.stdout}')
    numbers = load(path)
    equal([name for name in os.listdir(folder) if '.tmp.' in name], [], f'{what}: temporary files')
    for m in numbers['methods']:
        check(f'\n{m["name"]} ' in done.stdout, f'{what}: {m["name"]} is missing on screen: {done.stdout}')
    check_numbers(numbers, what, checked, **grid)
    for m in numbers['methods'][1:]:
        sentence = verdict(m, numbers['methods'][0])
        check(sentence in done.stdout, f'{what}: "{sentence}" is not on screen: {done.stdout}')
    return numbers


def by_name(numbers):
    return {m['name']: m for m in numbers['methods']}


def test_shapes(folder):
    small = '--head-dim 32 --model-dim 96 --tokens 128'.split()
    mha = good(folder, small + ALL, 'as many key/value heads')
    gqa = good(folder, small + ALL + ['--kv-heads', '4', '--rope'], 'groups of four')
    for args, what in [
        ('--kv-heads 4 --dtype bf16 --rope', 'bf16'),
        ('--dtype bf16 --full --batch 3', 'bf16, full, batch'),
        ('--kv-heads 2 --batch 2 --rope', 'more ranks than key/value heads'),
        ('--ranks 1 --heads 4 --kv-heads 2 --chunk 2', 'one rank'),
    ]:
        good(folder, small + args.split(), what)
    good(folder, '--kv-heads 8 --batch 2 --full --chunk 8 --head-dim 40 --model-dim 96 --tokens 128'.split(), 'two heads a stage')
    good(folder, '--ranks 3 --heads 12 --head-dim 32 --model-dim 96 --tokens 129'.split(), 'three ranks')
    good(folder, small + ['--kv-heads', '4', '--method', 'upipe-naive', '--method', 'upipe'], 'the naive order first')
    off = good(folder, small + ['--check', 'off', '--method', 'upipe'], 'unchecked', checked=False)
    # The forward's chunks and buffers: 1/nu of Ulysses' with as many K/V heads, (3/nu)/(1 + 2/G) with groups.
    m, g = by_name(mha), by_name(gqa)
    wide = mha['config']['heads'] * mha['config']['head_dim'] / mha['config']['model_dim']
    nu = m['upipe']['stages']
    equal(m['upipe']['intermediate_bytes_fwd'] * nu, m['ulysses']['intermediate_bytes_fwd'], 'intermediate, MHA')
    equal(m['ulysses']['intermediate_bytes_fwd'], 3 * wide * mha['config']['unit_bytes'], 'intermediate, Ulysses')
    equal(g['upipe']['intermediate_bytes_fwd'] * nu, 3 * wide * gqa['config']['unit_bytes'], 'intermediate, GQA')
    equal(g['ulysses']['intermediate_bytes_fwd'], 1.5 * wide * gqa['config']['unit_bytes'], 'intermediate, Ulysses')
    # (2 + 2/min(m, G)) / (2 + 2/G) with m = 1, G = 4
    naive, grouped = (g[name]['sent_bytes']['team'][0] for name in ('upipe-naive', 'upipe'))
    equal(naive * 2.5, grouped * 4, 'what the naive order sends')
    equal(m['upipe-naive']['sent_bytes'], m['upipe']['sent_bytes'], 'what the naive order sends, MHA')
    for numbers in (m, g):
        check(max(numbers['upipe']['peak_bytes'].values()) < max(numbers['ulysses']['peak_bytes'].values()),
              'UPipe does not hold less')
    equal(off['config']['data'], BOOK, 'the text that is taken by itself')


def test_methods(folder):
    """Every method, over heads and tokens that divide and that do not, with every mask."""
    small = '--head-dim 32 --tokens 128'.split()
    even = good(folder, [*small, *'--heads 8 --kv-heads 4 --rope'.split(), *EVERY], 'every method')
    rest = named(name for name in HEADS + RINGS if name != 'upipe-naive')  # whose order needs heads that divide
    pieces = named(SEGMENTED)
    for args, what, grid in [
        ('--ranks 8 --heads 28 --kv-heads 4 --model-dim 64 --inner 4 --method fpdt', '28/4 on 8', {'inner': 4}),
        ('--ranks 6 --ring 3 --heads 10 --kv-heads 5 --batch 2 --full --tokens 101 --inner 3 --segments 3 --method fpdt',
         'nothing divides', {'ring': 3, 'inner': 3, 'segments': 3}),
        ('--ranks 3 --ring 3 --inner 3 --heads 2 --tokens 11 --rope --segments 3 --method fpdt --method upipe-fpdt',
         'fewer heads than ranks', {'ring': 3, 'inner': 3, 'segments': 3}),
        ('--heads 8 --kv-heads 2 --window 30 --cu-seqlens 50,1,77,100,30 --batch 2 --tokens 129 --softcap 3 --sinks --v-dim 40 --rope '
         '--method fpdt --method upipe-fpdt', 'every mask', {}),
        ('--heads 8 --cu-seqlens 7 --full --sinks --dtype bf16 --method fpdt --method upipe-fpdt', 'random packed sequences', {}),
        ('--heads 8 --kv-heads 1 --window 1 --dtype bf16 --rope --method fpdt --method upipe-fpdt', 'bf16', {}),
        ('--heads 8 --kv-heads 2 --chunk 4 --ring-mode all-gather', 'a gathered ring', {}),
        ('--heads 8 --kv-heads 2 --chunk 4 --ring-mode p2p', 'a shifted ring', {}),
        ('--heads 8 --kv-heads 4 --batch 2 --segments 1 --method fpdt --method upipe-fpdt', 'one segment', {'segments': 1}),
    ]:
        good(folder, [*small[:2], *([] if '--tokens' in args else small[2:]), *args.split(), *rest], what, **grid)
    for kept in ('--layers 3', '--layers 3 --offload', '--offload'):
        good(folder, [*small, *f'--heads 8 --kv-heads 4 --batch 2 {kept}'.split(), *EVERY], kept)
    good(folder, [*small, '--layers', '2', *pieces], 'layers in segments')
    for kind in ('dynamic', 'llama3', 'yarn'):
        words = f'--heads 8 --kv-heads 4 --rope --rope-type {kind} --rope-factor 4 --rope-original 32'
        good(folder, [*small, *words.split(), *EVERY], f'{kind} RoPE')
    beside = good(folder, [*small, *'--heads 8 --kv-heads 4 --rope --overlap'.split(), *EVERY], 'overlap')
    good(folder, [*small, *'--ranks 1 --heads 4 --ring 1'.split(),
                  *named(['ring', 'zigzag', 'stripe', 'allgather', 'usp', 'upipe-ring'])], 'rings of one', ring=1)
    good(folder, [*small, '--heads', '4', *named(['upipe-ring', 'ring', 'ulysses'])], 'a ring first')
    good(folder, [*small[:2], *'--heads 12 --kv-heads 6 --tokens 121 --rope --ring-mode p2p'.split(),
                  *named(['usp', 'upipe-ring'])], 'the same bits over a ring')
    m = by_name(even)
    for name in m:
        held = [sum(by_name(n)[name]['peak_bytes'].values()) for n in (even, beside)]
        check((held[1] > held[0]) == (name in ('upipe', 'upipe-naive')) and held[1] >= held[0],
              f'{name}: stages that overlap hold {held[1]}, others {held[0]}')
    peak = {name: max(m[name]['peak_bytes'].values()) for name in m}
    check(peak['upipe-ring'] < peak['usp'], f'stages over a ring do not hold less: {peak}')
    check(peak['upipe-fpdt'] < min(peak['fpdt'], peak['upipe']), f'stages in segments do not hold less: {peak}')
    check(peak['allgather'] < peak['zigzag'], f'a key/value head at a time does not hold less: {peak}')
    check(not m['ring']['same_bits_dx'], 'a ring sums in another order, but has the same bits of dx')
    equal(m['upipe-ring']['ring_mode'], 'all-gather', 'the mode that holds less')


def test_sums_of_heads(folder):
    """Heads that do not divide: dK and dV of a head that three ranks share are summed in the order in which ranks are
    done with it. This changes bits of dx and dw, and is no failure."""
    small = ['--head-dim', '32', '--model-dim', '64', '--tokens', '70', '--sinks']
    for ranks, heads, kv_heads in [(7, 28, 4), (7, 14, 2), (5, 10, 2), (5, 15, 3), (5, 20, 2), (4, 6, 1)]:
        shape = ['--ranks', str(ranks), '--heads', str(heads), '--kv-heads', str(kv_heads)]
        numbers = good(folder, [*small, *shape], f'{heads}/{kv_heads} on {ranks}')
        c, (first, m) = numbers['config'], numbers['methods']
        check(kv_sums(c, first) != kv_sums(c, m), f'{heads}/{kv_heads} on {ranks}: the same sums')
        check(not m['same_bits_dx'], f'{heads}/{kv_heads} on {ranks}: other sums give the same bits of dx')
    # two ranks share a head; the naive order, where a stage has whole groups, is the order; in segments a group's heads
    # are in one stage, or in several
    good(folder, [*small, '--ranks', '3', '--heads', '6', '--kv-heads', '2'], 'heads of two ranks')
    whole = good(folder, [*small, '--heads', '16', '--kv-heads', '8', '--chunk', '8', *ALL], 'the naive order of groups')
    # more queries than a partial sum of dK has: with one such sum a head, both orders add up the same numbers alike
    split = good(folder, ['--head-dim', '32', '--model-dim', '64', '--tokens', '600', '--heads', '16', '--kv-heads', '4', *ALL],
                 'the naive order within groups')
    many = good(folder, [*small, '--heads', '8', *named(SEGMENTED)], 'a head a group in segments')
    grouped = good(folder, [*small, '--heads', '8', '--kv-heads', '4', *named(SEGMENTED)], 'groups in segments')
    for numbers, name, same in [(whole, 'upipe-naive', True), (split, 'upipe-naive', False),
                                (many, 'upipe-fpdt', True), (grouped, 'upipe-fpdt', False)]:
        if numbers['config']['products'] == 'built-in':
            equal(by_name(numbers)[name]['same_bits_dx'], same, f'{name}: the same bits of dx')


def test_length(folder):
    """Sums over many tokens, of which many are equal: errors stay below a limit that hardly grows with the length."""
    good(folder, ['--ranks', '2', '--heads', '1', '--head-dim', '32', '--tokens', '4096', '--full', '--check', 'on',
                  '--method', 'upipe'], '4,096 tokens')


def test_defaults(folder):
    c = good(folder, ['--tokens', '64'], 'defaults')['config']
    for key, want in {'ranks': 4, 'heads': 16, 'kv_heads': 16, 'head_dim': 64, 'model_dim': 1024, 'batch': 1, 'v_dim': 64,
                      'window': None, 'cu_seqlens': None, 'softcap': None, 'layers': 1, 'offload': False, 'overlap': False,
                      'sinks': False, 'dtype': 'f32', 'device': 'cpu', 'full': False, 'rope': False, 'check': 'on',
                      'method': ['ulysses', 'upipe'], 'trace': None, 'dump': None}.items():
        equal(c[key], want, f'default of {key}')
    for flag, word in [('--help', '--kv-heads'), ('--version', 'upipe')]:
        done = run([flag], folder)
        check(done.returncode == 0 and word in done.stdout, f'{flag}: {done.returncode} {done.stdout}')
        with open('/dev/full', 'w', encoding='utf-8') as full:
            refused(folder, [flag], 1, ['No space'], f'{flag} on a full disk', stdout=full)
    done = run(['--tokens', '64', '--progress'], folder)
    check(done.returncode == 0 and 'upipe ...' in done.stderr, f'progress: {done.stderr}')
    odd = os.path.join(os.fsencode(folder), ODD_NAME)
    shutil.copy(BOOK, odd)
    done = run(['--tokens', '64', '--data', odd, '--json', 'odd.json'], folder)
    needed(done.returncode == 0, f'a path of odd bytes: {done.stderr}')
    equal(os.path.basename(load('odd.json')['config']['data']), ODD_TEXT, 'a path of odd bytes')


# ---- dumps, against NumPy ----


def turns(c):
    """What RoPE turns each pair by a position, and its factor."""
    half, theta, more = c['head_dim'] // 2, c['rope_theta'], c['rope_factor']
    rates = theta ** (-np.arange(half) / half)
    if c['rope_type'] == 'linear':
        rates = rates / more
    if c['rope_type'] != 'yarn':
        return rates, 1
    # slow pairs are stretched, from the one that turns once to the one that turns 32 times
    low, high = (half * math.log(c['rope_original'] / (2 * math.pi * often)) / math.log(theta) for often in (32, 1))
    low, high = max(math.floor(low), 0), min(math.ceil(high), 2 * half - 1)
    slow = np.clip((np.arange(half) - low) / (high - low), 0, 1)
    return rates * (1 - slow) + rates / more * slow, 1 + 0.1 * math.log(more)


def reference(got, c):
    """out, dx, dwq, dwk, dwv in double precision, by whole matrices; and what the error of each is relative to."""
    B, S, d, vd, cap = (c[key] for key in ('batch', 'tokens', 'head_dim', 'v_dim', 'softcap'))

    def split(t, dim):
        return t.reshape(B, S, -1, dim).swapaxes(1, 2)

    def rows(t):
        return t.swapaxes(1, 2).reshape(B * S, -1)

    x, dout = got['x'].astype(np.float64), split(got['dout'].astype(np.float64), vd)
    w = {name: got[name].astype(np.float64) for name in ('wq', 'wk', 'wv')}
    q, k, v = (split(x @ w[name].T, dim) for name, dim in [('wq', d), ('wk', d), ('wv', vd)])
    if c['rope']:
        q, k = (rope(t, *turns(c)) for t in (q, k))
    sees = visible(B, S, not c['full'], c['window'], np.cumsum(c['cu_seqlens'] or []))[:, None]
    sinks = got['sinks'].astype(np.float64)[0] if c['sinks'] else None
    kept = attend(q, k, v, d**-0.5, sees, cap, sinks)
    dq, dk, dv, dsinks = attend_bwd(q, k, v, dout, d**-0.5, kept)
    if c['rope']:
        dq, dk = (rope(t, *turns(c), -1) for t in (dq, dk))
    grads = {'wq': rows(dq), 'wk': rows(dk), 'wv': rows(dv)}
    want = {'out': rows(kept[0]), 'dx': sum(grads[name] @ w[name] for name in w)}
    want.update({'d' + name: grads[name].T @ x for name in w})
    size = {name: np.linalg.norm(value) for name, value in want.items()}
    if c['sinks']:  # a sum that may cancel: relative to its terms
        want['dsinks'] = dsinks.sum(axis=(0, 2, 3))[None]
        size['dsinks'] = np.linalg.norm(kept[3] * kept[0] * dout)
    return want, size


def check_dump(folder, c, what):
    B, S, H, K, d, dv, D = (c[key] for key in
                            ('batch', 'tokens', 'heads', 'kv_heads', 'head_dim', 'v_dim', 'model_dim'))
    shapes = {'x': (B * S, D), 'wq': (H * d, D), 'wk': (K * d, D), 'wv': (K * dv, D), 'out': (B * S, H * dv),
              'dout': (B * S, H * dv), 'dx': (B * S, D), 'dwq': (H * d, D), 'dwk': (K * d, D), 'dwv': (K * dv, D)}
    if c['sinks']:
        shapes.update({'sinks': (1, H), 'dsinks': (1, H)})
    equal(sorted(os.listdir(folder)), sorted(name + '.npy' for name in shapes), f'{what}: files')
    got = {}
    for name, shape in shapes.items():
        equal(read(os.path.join(folder, name + '.npy'))[:8], b'\x93NUMPY\x01\x00', f'{what}: the head of {name}.npy')
        got[name] = np.load(os.path.join(folder, name + '.npy'))
        equal((got[name].shape, str(got[name].dtype)), (shape, 'float32'), f'{what}: {name}')
    if c['dtype'] == 'bf16':  # what is stored in bf16 has sixteen zero bits in f32
        for name in ('x', 'wq', 'wk', 'wv', 'out', 'dout', 'dx'):
            check(not (got[name].view(np.uint32) & 0xffff).any(), f'{what}: {name} is not bf16')
    # Tokens are the text's bytes: the same byte has the same row, of root mean square 1.
    text = np.frombuffer(read(BOOK)[:B * S], np.uint8)
    first = {byte: np.flatnonzero(text == byte)[0] for byte in set(text.tolist())}
    rows = np.array([first[byte] for byte in text.tolist()])
    check((got['x'] == got['x'][rows]).all(), f'{what}: a byte has two embeddings')
    equal(len(np.unique(got['x'], axis=0)), len(first), f'{what}: embeddings')
    rms = np.sqrt((got['x'].astype(np.float64) ** 2).mean(axis=1))
    check(np.abs(rms - 1).max() < (1e-2 if c['dtype'] == 'bf16' else 1e-6), f'{what}: rows of x have {rms.max()}')
    for name, variance in [('wq', 1 / D), ('dout', 1)]:
        measured = got[name].astype(np.float64).var() / variance
        check(0.9 < measured < 1.1, f'{what}: {name} has {measured} times its variance')
    truth, size = reference(got, c)
    for name, want in truth.items():
        error = np.linalg.norm(got[name] - want) / size[name]
        check(error < error_limits(c), f'{what}: {name} is {error} from the reference')
    return got


def test_dumps(folder):
    base = '--head-dim 32 --model-dim 80 --heads 8'.split()
    for args, what in [
        ('--kv-heads 4', 'causal'),
        ('--kv-heads 2 --ranks 2 --batch 2 --rope --full', 'full, RoPE, batch'),
        ('--kv-heads 2 --rope --batch 2 --seed 7', 'shared heads'),
        ('--kv-heads 2 --rope --rope-type linear --rope-factor 4 --rope-theta 5e4', 'linear RoPE'),
        ('--kv-heads 2 --rope --rope-type yarn --rope-factor 4 --rope-original 24', 'YaRN'),
        ('--kv-heads 4 --dtype bf16 --rope', 'bf16'),
        ('--kv-heads 4 --batch 2 --window 20 --cu-seqlens 70,40,82 --softcap 2 --sinks --v-dim 48 --rope', 'masks'),
    ]:
        dump = 'deeper/dump'
        words = [*base, '--tokens', '96', *args.split(), *ALL, '--dump', dump]
        c = good(folder, words, what)['config']
        all_got = [check_dump(os.path.join(dump, name), c, f'{what}: {name}') for name in c['method']]
        for name in all_got[0] if c['products'] == 'built-in' else []:
            if not name.startswith('d') or name == 'dout':
                check((all_got[0][name] == all_got[2][name]).all(), f'{what}: {name} differs in the naive order')
            same = (all_got[0][name].view(np.uint32) == all_got[1][name].view(np.uint32)).all()
            check(same, f'{what}: {name} has other bits with UPipe')
        # The same command again replaces the files by equal ones.
        good(folder, words, what)
        again = np.load(os.path.join(dump, 'upipe', 'dx.npy'))
        check((again == all_got[1]['dx']).all(), f'{what}: dx differs from run to run')
        shutil.rmtree(dump)
    numbers = good(folder, [*base, *'--kv-heads 4 --full --rope --cu-seqlens 3 --sinks --tokens 90'.split(),
                            *named(RINGS + SEGMENTED), '--dump', dump], 'rings')
    for name in RINGS + SEGMENTED:
        check_dump(os.path.join(dump, name), numbers['config'], f'rings: {name}')


def test_same_bits(folder):
    """What is said of bits is so of all of a result's: with some methods the others than the first quarter are different."""
    small = '--heads 4 --head-dim 32 --model-dim 64 --tokens 128 --dump dump'.split()
    numbers, behind = good(folder, [*small, *named(['ulysses', *RINGS, *SEGMENTED])], 'bits'), 0
    for m in numbers['methods']:
        same = {}
        for result in ('out', 'dx', 'dwq', 'dwk', 'dwv'):
            got, first = (np.load(f'dump/{name}/{result}.npy').view(np.uint32).ravel() for name in (m['name'], 'ulysses'))
            same[result[:3] if result == 'out' else result[:2]] = bool((got == first).all()) and same.get(result[:2], True)
            behind += (got[:got.size // 4] == first[:got.size // 4]).all() and not (got == first).all()
        equal({key: m['same_bits_' + key] for key in same}, same, f'{m["name"]}: the same bits')
    check(behind > 0 or numbers['config']['products'] != 'built-in', 'every result has other bits from its beginning')


def test_cancelling(folder):
    """The sinks' gradients of a few heads may be small beside their terms, whose roundings they keep."""
    dump = os.path.join(folder, 'dump')
    for heads, seed in ((1, 2), (1, 14), (1, 17), (1, 19), (1, 23), (1, 29), (2, 4), (2, 6)):
        what = f'{heads} heads, seed {seed}'
        numbers = good(folder, ['--sinks', '--heads', str(heads), '--kv-heads', '1', '--dtype', 'bf16', '--seed', str(seed),
                                '--tokens', '64', '--ranks', '1', '--dump', dump], what)
        if numbers is None:
            continue
        for m in numbers['methods']:
            got = check_dump(os.path.join(dump, m['name']), numbers['config'], what)
            want, size = reference(got, numbers['config'])
            error = np.linalg.norm(got['dsinks'] - want['dsinks'])
            check(abs(m['err_dsinks'] * size['dsinks'] / error - 1) < 0.05, f'{what}: {m["err_dsinks"]} of dsinks')


# ---- traces ----


def test_traces(folder):
    numbers = good(folder, ['--tokens', '128', '--kv-heads', '4', '--trace', 'traces'], 'traced')
    equal(sorted(os.listdir('traces')), ['ulysses.json', 'upipe.json'], 'traces')
    for m in numbers['methods']:
        events = load(f'traces/{m["name"]}.json')
        equal({event['pid'] for event in events}, set(range(4)), f'{m["name"]}: ranks in the trace')
        for rank in range(4):
            peaks, live, spans = replay([event for event in events if event['pid'] == rank], f'{m["name"]}, rank {rank}')
            equal((spans, live), ({}, 0), f'{m["name"]}: open at the end of rank {rank}')
            for name in PHASES:
                equal(peaks[name], m['peak_bytes'][name], f'{m["name"]}: {name} by the trace of rank {rank}')


def test_colours(folder):
    """The picture of a trace has a colour for every tag. What draws it is read, as it needs a library that draws."""
    source = ast.parse(read(os.path.join(TOP, 'examples', 'compare', 'plot_memory.py')))
    drawn = {ast.unparse(line.targets[0]): line.value for line in source.body if isinstance(line, ast.Assign)}
    groups, titles = (ast.literal_eval(drawn[name]) for name in ('GROUPS', 'NAMES'))
    tags = {tag for _, _, tags in groups for tag in tags}
    for dtype in 'f32', 'bf16':
        done = run([*EVERY, '--tokens', '256', '--kv-heads', '4', '--check', 'off', '--dtype', dtype, '--trace', dtype], folder)
        needed(done.returncode == 0, f'{dtype}: status {done.returncode}: {done.stderr}')
        for name in HEADS + RINGS + SEGMENTED:
            seen = {event['name'] for event in load(f'{dtype}/{name}.json') if event['ph'] in 'be'}
            equal((seen - tags, name in titles), (set(), True), f'{name}, {dtype}: tags without a colour, a title')


# ---- bad input ----


def test_refusals(folder):
    for name, (values, *words) in {  # what the sentence has beside the flag and the value
        'ranks': (['12x', '-4', '0', '257'], '1 to 256'), 'tokens': (['9e19', '9223372036854775808', ' 64'],), 'batch': (['0x10'],),
        'heads': (['2147483648'],), 'seed': (['-1'],), 'deadline': (['0', 'nan', '1e9', '0x10'],), 'dtype': (['f16'], 'f32 or bf16'),
        'check': (['maybe'], 'auto'), 'method': (['rings'], 'no method'), 'layers': (['0', '5000'],), 'window': (['0'],),
        'softcap': (['-1'],), 'cu-seqlens': (['0'],), 'v-dim': (['0'],),
    }.items():
        for value in values:
            refused(folder, ['--' + name, value], 2, [f"--{name}.*'{value}'", *words])
    for name in 'tokens', 'json':
        refused(folder, ['--' + name, ''], 2, ['--' + name])
    for args, *words in [
        ('--method upipe --method upipe', 'upipe is given twice'), ('--method ulysses --chunk 8', 'heeds --chunk 8'),
        ('--method zigzag --ring 2', 'heeds --ring 2'), ('--method usp --ring-mode all-gather', 'heeds --ring-mode'),
        ('--method ring --inner 2', 'heeds --inner 2'), ('--segments 2', 'heeds --segments 2'),
        ('--method ulysses --method upipe-ring --method usp --overlap', 'heeds --overlap'),
        ('--method fpdt --method upipe-fpdt --offload', '--offload', 'nothing new'),
        ('--method upipe-ring --ring-mode round', 'p2p or all-gather', 'round'),
        ('--method usp --ring 3', '--ranks 4', 'rings of 3'), ('--cu-seqlens 100,28', '128 tokens', '1 x 2048'),
        ('--cu-seqlens 2000,49', '--cu-seqlens', '0 to 48', "'49'"), ('--cu-seqlens 2048,', '--cu-seqlens', "''"),
        ('--cu-seqlens 2048,' + 31 * '0' + '9', '--cu-seqlens', 'of 32 characters'), ('--cu-seqlens 1000,,1048', '--cu-seqlens', "''"), ('--frobnicate', '--frobnicate'), ('--full=yes', '--full=yes'),
        ('--he 4', '--he'), ('--ranks', '--ranks wants'), ('-r 4', '-r'), ('4', "'4'"),
        ('--trace here --dump here', 'same folder', 'here'), ('--json here --dump here', 'here'),
        ('--rope-type yarn', '--rope-type', 'without --rope'),
        ('--rope --rope-type yarn --rope-factor 2', 'yarn', 'wants --rope-original'),
        ('--rope --rope-type linear', 'linear', 'wants --rope-factor'),
        ('--rope --rope-factor 2', '--rope-factor', 'no effect', 'default'),
    ]:
        refused(folder, args.split(), 2, words)

    done = run(['--tokens', '128', '--full', '--full', '--tokens', '64', '--json', 'twice.json'], folder)
    said = done.stderr.splitlines()
    check(done.returncode == 0 and len(said) == 2 and all('is given twice: the last one counts' in line for line in said),
          f'flags given twice: {done.returncode} {done.stderr}')
    c = load('twice.json')['config']
    equal((c['tokens'], c['full']), (64, True), 'flags given twice')
    os.remove('twice.json')

    write('empty.txt', b'')
    os.mkfifo('pipe')
    for args, *words in [
        ('--chunk 6', '6', '4'), ('--chunk 32', '32', '16'), ('--method upipe --chunk 16 --overlap', '--overlap', 'one stage'),
        ('--method fpdt --segments 1 --overlap', '--overlap', 'one stage or segment'), ('--tokens 3', '3 tokens', '4'),
        ('--method zigzag --tokens 7', '7 tokens', '8', 'two parts'), ('--method double-ring --ranks 6 --inner 4', 'ring of 6', '4'),
        ('--method upipe-naive --heads 12 --kv-heads 6 --ranks 8', '12 heads', 'order'),
        ('--method upipe-ring --heads 10 --kv-heads 5 --ranks 12 --ring 4 --ring-mode p2p', '10/5 heads over 3 ranks', 'gathered'),
        ('--method fpdt --segments 600', '2048 tokens in 600 segments over 4 ranks'),
        ('--method upipe-fpdt --heads 28 --kv-heads 4 --ranks 8', '28/4 heads', 'which are uneven'), ('--v-dim 300', '300'),
        ('--window 2305843009213693952', 'window of 2305843009213693952'), ('--kv-heads 3', '16', '3'), ('--kv-heads 32', '16', '32'),
        ('--head-dim 24', '24', '32', '256'), ('--head-dim 33', '33'), ('--head-dim 264', '264'),
        ('--tokens 9000000000000000000', '9000000000000000000', '63 bits'),
        ('--tokens 4 --batch 4611686018427387904', '4611686018427387904'), ('--heads 2147483644 --ranks 4', '2147483644'),
        ('--tokens 388088', '388085', '388088'), ('--tokens 2048 --batch 190', '388085', '190', '389120'),
        ('--tokens 1099511627776', '388085', '1099511627776'), ('--model-dim 2147483647', 'GiB', '[0-9]'),
        ('--data empty.txt', 'empty.txt', ' 0 bytes', '2048'), ('--data missing.txt', 'missing.txt', 'No such file'),
        ('--data .', 'no regular file'), ('--data /dev/zero', '/dev/zero', 'no regular file'), ('--data pipe', 'pipe', 'no regular file'),
    ]:
        refused(folder, OUTPUTS + args.split(), 1, words)

    small = ['--tokens', '64']
    refused(folder, small + ['--json', 'missing/deeper/out'], 1, ['missing/deeper/out', 'No such file'])
    for flag in ('--trace', '--dump'):  # which make the folders above, and remove them after a failure
        refused(folder, small + [flag, 'missing/deeper/out', '--json', 'empty.txt/out'], 1, ['Not a directory'])
    for flag in ('--json', '--trace', '--dump'):
        refused(folder, small + [flag, 'empty.txt/out'], 1, ['Not a directory'])
    for flag in ('--trace', '--dump'):
        refused(folder, small + [flag, 'empty.txt'], 1, ['empty.txt', 'no folder'])
    refused(folder, small + ['--json', folder], 1, ['directory'])
    refused(folder, small + ['--json', '/dev/full'], 1, ['/dev/full'])
    for args in (['--json', 'new/upipe.json', '--trace', 'new'], ['--json', 'new/./ulysses.json', '--trace', 'new'],
                 ['--json', 'new/ulysses/x.npy', '--dump', 'new'], ['--json', 'new/upipe/dwv.npy', '--dump', './new']):
        refused(folder, small + args, 1, ['new/', 'both'])
    refused(folder, small + ['--json', 'a' * 300], 1, ['too long'])
    os.makedirs('taken/ulysses.json')
    refused(folder, small + ['--trace', 'taken'], 1, ['taken/ulysses.json', 'directory'])
    # The text by another name is still the text.
    os.makedirs('texts/upipe')
    shutil.copy(BOOK, 'texts/book.txt')
    os.symlink('book.txt', 'texts/link.txt')
    os.link('texts/book.txt', 'texts/upipe.json')
    os.symlink('../book.txt', 'texts/upipe/dx.npy')
    for data, args in [('texts/book.txt', ['--json', 'texts/book.txt']),
                       ('texts/book.txt', ['--json', './texts/book.txt']),
                       ('texts/book.txt', ['--json', 'texts/link.txt']),
                       ('texts/link.txt', ['--json', f'{folder}/texts/book.txt']),
                       ('texts/book.txt', ['--trace', 'texts']), ('texts/book.txt', ['--dump', 'texts'])]:
        refused(folder, small + ['--data', data] + args, 1, ['texts/', 'replace the file of --data'])


def test_failures(folder):
    """What goes wrong on the way: a rank that others wait for too long, no memory, no space on the disk."""
    write('numbers.json', 'old')
    # One of four ranks has two heads of five, for which the others wait. Ranks that meet without sleeping never look at
    # the clock: such a run is good, and another is tried.
    late = '--tokens 2048 --heads 5 --kv-heads 5 --check off --deadline 0.000001'.split()
    for methods in ([], ['--method', 'usp']):
        for _ in range(20):
            with tempfile.TemporaryDirectory() as fresh:
                shutil.copy('numbers.json', fresh)
                done = run(OUTPUTS + late + methods, fresh)
                if done.returncode == 0:
                    continue
                check(re.fullmatch('compare: .*rank [0-3].*deadline.*\n', done.stderr) is not None, done.stderr)
                equal(tree(fresh), {'numbers.json': b'old'}, 'what a late rank leaves')
            break
        else:
            check(False, 'no rank was late in 20 runs')

    def little_memory():
        resource.setrlimit(resource.RLIMIT_AS, (100 << 20, 100 << 20))

    # A program built with AddressSanitizer reserves terabytes of addresses, and cannot start under such a limit.
    if run(['--version'], folder, preexec_fn=little_memory).returncode == 0:
        refused(folder, OUTPUTS + ['--tokens', '8192'], 1, ['memory', '[0-9]'], 'little memory', preexec_fn=little_memory)
    else:
        print('left out: little memory, as the program does not start under a limit of addresses')

    small = ['--tokens', '64', *OUTPUTS]
    refused(folder, small, 1, ['cannot be written'], 'little space', preexec_fn=limit_files(5000))
    with open('/dev/full', 'w', encoding='utf-8') as full:
        refused(folder, small, 1, ['table cannot be written'], 'no space on stdout', stdout=full)
    reader, writer = os.pipe()
    os.close(reader)
    refused(folder, small, 1, ['table cannot be written'], 'nobody reads stdout', stdout=writer)
    os.close(writer)
    before, long = tree(folder), '--heads 4 --head-dim 32 --tokens 65536 --check off --progress'.split()
    for ends in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        status, _ = watched([COMPARE, *long, *OUTPUTS], folder, 'with ulysses', lambda process, ends=ends: process.send_signal(ends))
        equal(status, -ends, f'{ends.name}: status')
        equal(tree(folder), before, f'{ends.name}: the folder')


def test_replacing(folder):
    """All older results are replaced, or all stay: here the last trace's older file cannot be moved out of the way."""
    olds = ['numbers.json', 'traces/ulysses.json', 'traces/upipe.json']
    os.mkdir('traces')
    for name in olds:
        write(name, 'old ' + name)
    before = tree(folder)
    args = ['--tokens', '64', *OUTPUTS]
    for blocked in ['traces/upipe.json', 'numbers.json']:
        done = run_command(['sh', '-c', f'mkdir {blocked}.old.$$ && exec "$0" "$@"', COMPARE, *args], cwd=folder)
        check(done.returncode == 1 and f'{blocked}: cannot be written' in done.stderr, f'{blocked}: {done.stderr}')
        os.rmdir(next(path for path, data in tree(folder).items() if '.old.' in path and data is None))
        equal(tree(folder), before, f'{blocked} could not be replaced: the folder')
    done = run(args, folder)
    equal(done.returncode, 0, 'replacing: status')
    after = tree(folder)
    check(all(after[path] != before[path] for path in before if before[path] is not None), 'an old result stays')
    equal([path for path in after if re.search(r'[.](old|tmp)[.]', path)], [], 'replacing: other files')


if __name__ == '__main__':
    sys.exit(run_tests('compare', test_defaults, test_shapes, test_methods, test_sums_of_heads, test_length, test_dumps, test_same_bits, test_cancelling,
                        test_traces, test_colours, test_refusals, test_failures, test_replacing))

#!/usr/bin/env python3
"""read_verdict.py FILE... -- names the kind of fault that the evidence of tests/cuda/verdict.c shows

A paragraph a file: the case; the kind; the numbers on which that rests; which lines of the kernel make it. What the
runs are, and what their numbers mean, is in verdict_data.h. The first rule that holds names the kind, so the order of
RULES is part of them: what was never written or came from elsewhere says more than what it has led to.
"""

import math
import re
import sys
from collections import Counter

RESULTS = ('o', 'lse', 'dq', 'dk', 'dv')
SHIFTS = (-128, -64, -32, -16, -8, 8, 16, 32, 64, 128)  # of rows that belong to another part of a tile, or another tile

# kind -> what it means
KINDS = {
    'wait': 'a block waits for ever',
    'items': 'whole blocks of queries, or heads, are nobody\'s item, or are another one',
    'missing store': 'a part of every row is never written',
    'head': 'numbers of another head',
    'panel': 'a panel, or the half of one, stands for another: a wrong column, or a wrong distance between panels',
    'swizzle phase': 'chunks of 16 bytes are permuted, by the number of the row: a wrong XOR',
    'K step': 'a step of a product, 16 columns or rows, meets another one, is left out or comes twice',
    'lane': 'what is a row\'s comes from another lane or another row of the fragment',
    'half': 'a part of a tile stands for another part: of 32 or 64 rows, a consumer\'s',
    'tile': 'numbers of another tile: a stale slot, or a wrong row',
    'stats': 'lse or delta is another row\'s or head\'s, or of another unit',
    'rescale': 'a factor is missing or wrong',
    'empty': 'rows that see nothing, of all keys or of a tile, are no case of their own',
    'mask': 'some rows see more or fewer keys than they should',
    'turns': 'the sum of dQ lacks a block of keys, has one twice, or begins with something',
    'accumulation': 'terms come twice or never, or a sum does not begin anew',
    'too early': 'an operand is read before it is there, or from where nobody has put it',
    'unknown': 'no rule holds',
}

# kind -> where to look; {f} is fwd90 or bwd90
LOOK = {
    'fwd': {
        'wait': 'the barrier that is named: who arrives (count in upi_mbarrier_init), bytes (upi_cuda_fwd90_load), turns',
        'items': 'upi_cuda_fwd90_item_of (place, section, round), upi_cuda_fwd90_deal, upi_cuda_fwd90_order_kernel',
        'missing store': 'upi_cuda_fwd90_output: the loop over panels, c * 64 < v_dim, upi_tma_store',
        'head': 'upi_cuda_fwd90_produce: kv = head / group; item.head in upi_cuda_fwd90_output',
        'panel': '{S}{V}upi_cuda_fwd90_load: c * ROWS * 128 and c * 64',
        'swizzle phase': 'upi_panel_at, upi_wgmma_rows and _columns (layout, stride), the swizzle of the tensor map',
        'K step': 'upi_cuda_fwd90_scores: i % 4 * 32; upi_cuda_fwd90_values: p + 4 * i and i * 16 * 128',
        'lane': 'upi_cuda_attn_quad_max and _sum; upi_cuda_fwd90_row; lanes in upi_cuda_fwd90_output',
        'half': 'group * 64 in upi_cuda_fwd90_consume and _output: rows of Q, of the mask, of o',
        'tile': 'row in upi_cuda_fwd90_produce; i % 2 and parities of K and V; what waits for full and gives back empty',
        'rescale': 'fold: upi_cuda_fwd90_weigh, o[e] *= fold[..] and its condition; upi_cuda_attn_merge',
        'empty': 'upi_cuda_attn_base, by upi_cuda_fwd90_weigh; sum == 0 in upi_cuda_attn_end_of',
        'mask': 'upi_cuda_fwd90_hide (high, sight, low), upi_cuda_attn_hide, mine.whole and whole_end, upi_cuda_attn_query_runs',
        'accumulation': 'i > 0 in upi_cuda_fwd90_scores; o, top and sum at the start of an item',
        'too early': 'bytes that full expects (upi_cuda_fwd90_load), panels, upi_wgmma_wait before scores or values are used',
    },
    'bwd': {
        'wait': 'the barrier that is named: who arrives, bytes (upi_cuda_bwd90_load), turns (upi_cuda_bwd90_sum, _pass_on)',
        'items': 'b.block, b.kv and the ticket in upi_cuda_bwd90_kernel; tiles.first and end',
        'missing store': 'upi_cuda_bwd90_round_kernel; column >= d and part >= APART in upi_cuda_bwd90_sum',
        'head': 't.h and b.kv: upi_cuda_bwd90_first and _next, coordinates of loads',
        'panel': '{S}{dq}{dk}upi_cuda_bwd90_load: c / PART * COLUMNS + c % PART * 64',
        'swizzle phase': 'upi_panel_at in upi_cuda_bwd90_share and _store (odd), upi_wgmma_rows and _columns, tensor maps',
        'K step': 'upi_cuda_bwd90_dots: steps, panel and column; i * 16 * 128 and x + 4 * i in the other products',
        'lane': 'upi_cuda_bwd90_row, lanes in upi_cuda_bwd90_share and _store, upi_cuda_attn_grad_put',
        'half': 'group * 64, group * ROWS and 64 * 128: second half of dO, panels of dS, queries of P, rows of dQ',
        'tile': 't.m in loads; t.n % 2 and parities; full and empty of Q, dO, K, V',
        'stats': 'upi_cuda_bwd90_stats: t.h, row, the factor log2(e) unless exact; lse + group * ROWS in upi_cuda_bwd90_step',
        'rescale': 'a.slope in upi_cuda_bwd90_weigh, upi_cuda_bwd90_slopes',
        'empty': 'lse == -INFINITY in upi_cuda_bwd90_stats; turns != 0 in upi_cuda_bwd90_round_kernel',
        'mask': 'upi_cuda_bwd90_whole, upi_cuda_bwd90_hide (low, high, q0 of the consumer), runs of keys',
        'turns': 'upi_cuda_bwd90_sum: is_first, store or add, upi_bulk_wait before _pass_on, fences; memset of turns',
        'accumulation': 'i > 0 and 1 in the products; dk and dv over tiles; rounds of upi_cuda_bwd90_sum',
        'too early': 'bytes that full expects, upi_wgmma_wait, upi_fence_async_shared and upi_barrier_sync around P and dS',
    },
}
PANELS = {'S': 'columns of the products that make scores: i / 4 * ROWS * 128; ', 'V': 'upi_wgmma_columns(at_v, KEYS * 128); ',
          'dq': 'dQ: half in upi_cuda_bwd90_dq, column and APART in upi_cuda_bwd90_sum, i / 8 * 8192 in _store; ',
          'dk': 'columns of upi_cuda_bwd90_times_shared, column of upi_cuda_bwd90_grads; '}


class Tensor:
    """A result of a run: counts, and the wrong chunks (head, row, column, got, want); None in got: never written."""

    def __init__(self, words):
        self.name, self.n, self.h, self.d = words[0], *map(int, words[1:4])
        self.wrong, self.nan, self.unwritten, self.every = map(int, words[5::2])
        self.bins, self.chunks = {}, []

    def columns(self):
        """Those of 8 that have something wrong, and whether these are not all."""
        wrong = [i for i, count in enumerate(self.bins.get('column/8', [])) if count]
        return wrong, len(wrong) < (self.d + 7) // 8


class Evidence:
    def __init__(self, path):
        self.call, self.runs, self.watch = {}, {}, 0
        tensor = None
        with open(path, encoding='utf-8') as file:
            for line in file:
                words = line.split()
                if words[0] == 'run':
                    run = self.runs.setdefault(words[1], {})
                elif words[0] == 'tensor':
                    tensor = run[words[1]] = Tensor(words[1:])
                elif words[0] == 'bins':
                    tensor.bins[words[1]] = [int(word) for word in words[2:]]
                elif words[0] == 'watch':
                    self.watch += 1
                elif words[0] in RESULTS:
                    got, want = line.split('/')[1:]
                    numbers = [None if word == '_' else float(word) for word in got.split()]
                    tensor.chunks.append((*map(int, words[1:4]), numbers, [float(word) for word in want.split()]))
                else:
                    self.call[words[0]] = ' '.join(words[1:])
        self.kernel, d, self.mask = self.call['verdict'].split()
        self.d, self.backward = int(d), self.kernel.startswith('bwd')
        self.queries, self.keys, self.q_pos = (int(self.call[name]) for name in ('queries', 'keys', 'q_pos'))
        self.borders = [int(word) for word in self.call['borders'].split()]
        self.scale = float(self.call['scale'])
        # rows of a tile
        self.query_tile = (128 if self.d <= 64 else 64) if self.backward else (192 if self.d <= 64 else 128)
        self.key_tile = (128 if self.d <= 128 else 64) if self.backward else int(self.call['tile']) or 64

    def result(self, run, name):
        return self.runs.get(run, {}).get(name)

    def wrong(self, run):
        """Results of a run that are wrong, by name."""
        return {name: tensor for name, tensor in self.runs.get(run, {}).items() if tensor.wrong}

    def visible(self, i):
        """The keys that query i sees, as upipe_attn_visible has them."""
        first, end = 0, self.keys
        if self.mask in ('causal', 'grouped', 'packed', 'items'):
            end = min(end, self.q_pos + i + 1)
        if self.borders:
            inside = [pair for pair in zip(self.borders, self.borders[1:]) if pair[0] <= i < pair[1]]
            first, end = (max(first, inside[0][0]), min(end, inside[0][1])) if inside else (0, 0)
        return (first, end) if first < end else (0, 0)

    def target(self, i, h):
        """The key that a query finds in the run of labels; None: it sees none."""
        first, end = self.visible(i)
        return first + (i * 171 + h * 89) % (end - first) if first < end else None

    def rows_with(self, t, columns):
        """How many rows of a result have one of these columns in the runs of columns."""
        return sum((row + 5 * (row // 64) + (0 if t.name != 'o' else 67 * h)) % self.d in columns
                   for row in range(t.n) for h in range(t.h))

    def blind(self, i):
        """Whether a query sees nothing, or nothing of the tile of keys with which its block begins."""
        block = range(i // self.query_tile * self.query_tile, min(self.queries, (i // self.query_tile + 1) * self.query_tile))
        # behind the last packed sequence a row's tiles are those that it would see without these
        ends = [row + 1 if self.borders and row >= self.borders[-1] else self.visible(row)[1] for row in block]
        mine = self.visible(i)[1]
        return mine == 0 or (not self.backward and (mine - 1) // self.key_tile < (max(ends) - 1) // self.key_tile)


def broken(numbers):
    return any(x is not None and not math.isfinite(x) for x in numbers)


def close(x, y):
    return abs(x - y) <= 0.02 * max(1, abs(y))


def decode(name, numbers, scale):
    """(row, head, chunk, factor) of a label; or 'zero', 'nan', 'unwritten', 'other'."""
    if None in numbers:
        return 'unwritten'
    if broken(numbers):
        return 'nan'
    if all(abs(x) < 1e-5 for x in numbers):
        return 'zero'
    if name in ('o', 'dv'):
        factor = numbers[4]
        x = [round(number / factor) for number in numbers] if factor > 0 else [0] * 8
        known = x[4] == x[7] == 1 and x[5] == 1 + (x[0] - 64 + 64 * x[1]) % 59
        head, chunk = x[2], x[3]
    else:
        numbers = [number / scale for number in numbers[0 if name == 'dk' else 3:][:3]]
        factor = 2.0**math.floor(math.log2(numbers[0] / 64) + 1e-6) if numbers[0] > 0 else 0
        x = [round(number / factor) for number in numbers] if factor > 0 else [0] * 3
        known = True
        head, chunk = divmod(x[2], 32)
    if not known or not 64 <= x[0] < 128 or not all(close(number / factor, y) for number, y in zip(numbers, x)):
        return 'other'
    return x[0] - 64 + 64 * x[1], head, chunk, factor


class Labels:
    """What the run of labels says of a result: a list of (head, row, got, want), of which want is a label."""

    def __init__(self, e, tensor):
        self.name, self.all = tensor.name, []
        for head, row, column, got, want in tensor.chunks:
            want = decode(tensor.name, want, e.scale)
            # of dk and dv a sum of several may look like a label
            if isinstance(want, tuple) and want[2] == column // 8 and (
                    self.name in ('o', 'dq') or e.target(want[0], want[1]) == row):
                self.all.append((head, row, decode(tensor.name, got, e.scale), want))
        self.known = [x for x in self.all if isinstance(x[2], tuple) and (e.backward or abs(x[2][3] - 1) < 0.01)]
        # of dk and dv the terms that do not belong to the row
        self.strange = [x for x in self.known if self.name in ('o', 'dq') or e.target(x[2][0], x[2][1]) != x[1]]

    def some(self, found):
        """Whether a list is a good part of what is wrong."""
        return len(found) >= 4 and len(found) >= 0.2 * len(self.all)


def agree(values):
    """Whether two numbers in five are the same: chance does not make that."""
    counts = Counter(values)
    return counts.most_common(1)[0][1] >= 0.4 * sum(counts.values())


def shift_kind(shift, tile):
    return {8: 'lane', 16: 'K step'}.get(abs(shift), 'half' if abs(shift) < tile else 'tile')


# ---- the rules: each gives (kind, words), or None ----


def hangs(e):
    if e.watch:
        return 'wait', f'{e.watch} blocks stand still: {e.call.get("hangs", "")}'
    return None


def excess(e):
    """Scores above the greatest that any two rows have: forward, by lse, where one key has all the weight."""
    lse = e.wrong('labels').get('lse')
    most_keys = math.log(e.keys) + 1
    found = [chunk for chunk in lse.chunks if None not in chunk[3] and math.isfinite(chunk[4][0]) and
             chunk[3][0] > chunk[4][0] + most_keys] if lse else []
    if len(found) >= 4:
        return 'accumulation', f'lse is up to {max(chunk[3][0] for chunk in found):g} where no score is above ' \
                               f'{found[0][4][0]:g}, in {len(found)} rows and more: scores begin with something'
    return None


def never_written(e):
    for name, t in e.wrong('check').items():
        if name != 'lse' and t.unwritten >= 0.5 * t.wrong:
            columns, some = t.columns()
            if some:
                return 'missing store', f'{name}: columns {spans(columns, 8)} are never written'
            tiles = [i for i, count in enumerate(t.bins['row/64']) if count]
            heads = sorted({chunk[0] for chunk in t.chunks})
            lse = e.result('check', 'lse')
            return ('missing store' if e.backward or not lse.unwritten else 'items',
                    f'{name}: {t.unwritten} of {t.n * t.h * t.d} never written, in rows {spans(tiles, 64)}, heads {heads}' +
                    ('' if e.backward or lse.unwritten else ', and lse is'))
    return None


def not_merged(e):
    """What is merged into holds what was there."""
    lse = e.wrong('labels').get('lse') if e.mask == 'merge' else None
    found = [chunk for chunk in lse.chunks if chunk[3][0] == -math.inf] if lse else []
    if found:
        return 'items', f'{len(found)} of {len(lse.chunks)} wrong rows are as they were before the call, ' \
                        f'in rows {spans(sorted({chunk[1] // 64 for chunk in found}), 64)}'
    return None


def displaced(e):
    for name, t in e.wrong('labels').items():
        if name == 'lse':
            continue
        labels = Labels(e, t)
        heads = [x for x in labels.strange if x[2][1] != x[3][1]]
        if labels.some(heads):
            return 'head', f'{name} has head {most(got[1] for _, _, got, _ in heads)} where head ' \
                           f'{most(want[1] for _, _, _, want in heads)} belongs: {len(heads)} of {len(labels.all)} chunks'
        chunks = [x for x in labels.known if x[2][2] != x[3][2]]
        if labels.some(chunks) and agree(abs(got[2] - want[2]) for _, _, got, want in chunks):
            return chunks_kind(name, labels, chunks)
        rows = [x for x in labels.strange if x[2][0] != x[3][0]]
        found = rows_kind(e, name, rows) if labels.some(rows) else None
        if found is not None:
            return found
    return None


def chunks_kind(name, labels, chunks):
    xor = Counter(got[2] ^ want[2] for _, _, got, want in chunks)
    phases = Counter((row % 8, got[2] ^ want[2]) for _, row, got, want in chunks)
    away = Counter((got[2] - want[2]) * 8 for _, _, got, want in chunks)
    words = f'{name}: chunks of eight columns come from {", ".join(f"{x:+d} ({n})" for x, n in away.most_common(4))} columns'
    inside = all(x < 8 for x in xor)
    if inside and (len(xor) > 1 or len({phase for phase, _ in phases}) < 8 or any(x % 2 for x in xor)):
        return 'swizzle phase', f'{words}, by row % 8: {dict(sorted((phase, x) for phase, x in phases))} is what is XORed'
    return 'panel', words


def rows_kind(e, name, rows):
    away = Counter(abs(got[0] - want[0]) for _, _, got, want in rows)
    shift, count = away.most_common(1)[0]
    side = ('keys', e.key_tile) if name in ('o', 'dq') else ('queries', e.query_tile)
    # or the result of a neighbour: whose target is it?
    found = Counter()
    for head, row, got, _ in rows:
        if name in ('o', 'dq'):
            found.update(abs(s) for s in SHIFTS if e.target(row + s, head) == got[0])
        else:
            key = e.target(got[0], got[1])
            found.update([abs(key - row)] if key is not None else [])
    row_shift, row_count = found.most_common(1)[0] if found else (0, 0)
    if max(row_count, count) < 0.4 * len(rows):
        return None
    if row_count > count:
        tile = e.query_tile if name in ('o', 'dq') else e.key_tile
        return shift_kind(row_shift, tile), \
            f'{name} has the result of a row {row_shift} away ({row_count} of {len(rows)} chunks)'
    return shift_kind(shift, side[1]), f'{name} has what {side[0]} {shift} rows away bring ({count} of {len(rows)} chunks)'


def factors(e):
    found = {}
    for name, t in e.wrong('labels').items():
        if name != 'lse':
            labels = Labels(e, t)
            same = [x for x in labels.known if x[2][:3] == x[3][:3] and abs(x[2][3] / x[3][3] - 1) > 0.01]
            if labels.some(same):
                found[name] = Counter(round(math.log2(got[3] / want[3]), 1) for _, _, got, want in same)
    if not found:
        return None
    words = '; '.join(f'{name} is off by 2^{list(counts)[:4]}' for name, counts in found.items())
    if 'dv' in found:
        return 'stats', f'{words}: the right rows with wrong weights, so lse is not theirs'
    if all(len(counts) == 1 for counts in found.values()):
        return 'rescale', f'{words}: the same everywhere, and dv is right'
    return 'stats', f'{words}, and dv is right: delta is another row\'s'


def not_numbers(e):
    wrong = e.wrong('check')
    for name, t in wrong.items():
        if name == 'lse' or t.nan < 0.5 * t.wrong:
            continue
        words = f'{name}: {t.nan} NaNs of {t.n * t.h * t.d}'
        rows = {row for _, row, _, got, _ in t.chunks if broken(got)}
        if name in ('o', 'dq') and all(e.blind(row) for row in rows):
            return 'empty', f'{words}, all in rows that see no key of all or of the first tile ({spans(sorted(rows), 1)})'
        if not any(x.nan for run in e.runs if run != 'check' for x in e.runs[run].values()):
            return 'mask', f'{words}, where scores are so low that a key of zeros outweighs all, and nowhere else: zeros ' \
                           'beyond the last key are seen'
        columns, some = t.columns()
        if some:
            return 'panel', f'{words}, in columns {spans(columns, 8)} alone: read from where no tile lies'
        if list(wrong) == ['dq']:
            return 'turns', f'{words}, while dk and dv are right: the sum begins with what was in scratch'
        return 'too early', f'{words}; NaN too: {[other for other in wrong if wrong[other].nan]}, ' \
                            f'right: {[other for other in e.runs["check"] if other not in wrong]}'
    return None


def met(e, run, name):
    """From a run of columns: Counter of (own column, other column that came in), lost columns, those that came otherwise; and the rows."""
    rows, pairs, lost, odd = {}, Counter(), Counter(), Counter()
    t = e.result(run, name)
    for head, row, column, got, want in t.chunks:
        x = rows.setdefault((head, row), ({}, {}))
        x[0].update({column + k: number for k, number in enumerate(got) if abs(number) > 0.02})
        x[1].update({column + k: number for k, number in enumerate(want) if abs(number) > 0.02})
    for got, want in rows.values():
        own = set(want) or set(got)
        gone, new = own - set(got), set(got) - own
        for column in own:
            lost[column] += column in gone and not new
            odd[column] += column not in gone or bool(new)
            pairs.update((column, other) for other in new if len(new) <= 4)
    return pairs, +lost, +odd, len(rows)


def of_step(columns, step):
    return sum(count for column, count in columns.items() if column // 16 == step)


def products(e):
    """Columns that met others: in Q K^T, or in dO V^T."""
    for run, name, what in (('columns', 'dv' if e.backward else 'o', 'Q K^T'), ('grads', 'dk', 'dO V^T')):
        t = e.result(run, name)
        if t is None or not t.wrong or t.nan:
            continue
        pairs, lost, odd, rows = met(e, run, name)
        away = Counter()
        for (own, other), count in pairs.items():
            away[other - own] += count
        whole = {x: n for x, n in away.items() if x % 8 == 0}
        if whole and sum(whole.values()) >= max(0.5 * sum(away.values()), 0.25 * rows):
            words = f'{what}: columns meet those {", ".join(f"{x:+d}" for x in list(whole)[:4])} away'
            if any(x % 16 for x in whole):
                return 'swizzle phase', words
            return 'panel' if all(x % 32 == 0 for x in whole) else 'K step', words
        if away and sum(away.values()) > max(sum(lost.values()), 0.25 * rows):
            # a row 64 further has its column 69 further; dk tells pairs of columns
            fits = Counter({s: sum(n for x, n in away.items() if (x - s - 5 * round(s / 64) + 1) % e.d <= 2)
                            for s in SHIFTS})
            shift, count = fits.most_common(1)[0]
            if count >= 0.5 * sum(away.values()):
                return shift_kind(shift, e.query_tile), f'{what}: rows {shift:+d} away come in ({count} of {sum(away.values())})'
        # a step of which nearly all rows have lost their column, and not some
        steps = sorted(x for x in {column // 16 for column in lost}
                       if of_step(lost, x) >= 4 and of_step(lost, x) >= 0.8 * (of_step(lost, x) + of_step(odd, x)))
        if steps and sum(lost.values()) * t.every >= 0.7 * e.rows_with(t, lost):
            panels = {x // 4 for x in steps}
            whole = all(sum(x // 4 == panel for x in steps) * 16 >= min(64, e.d - panel * 64) for panel in panels)
            twice = sorted({column // 16 for column in odd} - set(steps))
            return 'panel' if whole else 'K step', f'{what}: columns {spans(steps, 16)} meet nothing' + \
                (f', {spans(twice, 16)} come otherwise' if twice else '')
    return None


def counted(e):
    """Terms by number, where every one weighs the same."""
    wrong = e.wrong('counts')
    if not wrong or any(t.nan or t.unwritten for t in wrong.values()):
        return None
    return counted_backward(wrong) if e.backward else counted_forward(e, wrong)


def counted_forward(e, wrong):
    labels, columns = e.wrong('labels'), e.wrong('columns')
    if 'lse' in labels and 'lse' in columns and \
            ('o' not in labels or labels['o'].wrong < 0.1 * e.d * labels['lse'].wrong):
        return 'accumulation', f'lse is wrong in {labels["lse"].wrong} rows even where one key has all the weight, and o is ' \
                               'right in nearly all of them: scores begin with something'
    if 'lse' not in wrong:
        rows = Counter(row // 8 % 2 for _, row, _, _, _ in wrong['o'].chunks)
        if not rows[0]:
            return 'rescale', f'o is wrong in {wrong["o"].wrong} elements, all in rows whose top rises with every 64 keys; ' \
                              'lse is right'
        return 'accumulation', f'terms of o: {steps_of(wrong["o"])}; lse is right'
    more = Counter()
    for _, row, _, got, want in wrong['lse'].chunks:
        if row // 8 % 2 == 0:
            more[round(math.exp(got[0])) - (round(math.exp(want[0])) if math.isfinite(want[0]) else 0)] += 1
    if more:
        return 'mask', f'rows that weigh all keys the same have {", ".join(f"{x:+d}" for x, _ in more.most_common(4))} keys ' \
                       f'({sum(more.values())} rows)'
    return None


def steps_of(t):
    """Differences of counts in chunks, by step of 16 rows."""
    steps = Counter()
    for _, _, column, got, want in t.chunks:
        steps.update(column + k for k in range(8) if not close(got[k], want[k]))
    return f'{t.name} off in columns {spans(sorted(steps)[:16], 1)}'


def counted_backward(wrong):
    factor = Counter()
    for _, _, column, got, want in wrong['dv'].chunks if 'dv' in wrong else []:
        own = [round(got[k] / want[k] * (1 + column // 32), 2) for k in range(8) if want[k] and got[k]]
        factor.update(x for x in own if x == round(x) and x != 1 + column // 32)
    more = {name: Counter(round(sum(got) - sum(want)) for _, _, _, got, want in t.chunks) for name, t in wrong.items()}
    words = '; '.join(f'{name}: a chunk has {", ".join(f"{x:+d}" for x, _ in counts.most_common(3))}'
                      for name, counts in more.items())
    if sum(factor.values()) >= 0.5 * len(wrong['dv'].chunks if 'dv' in wrong else [0]):
        return 'panel', f'dv has the terms of columns {spans([x - 1 for x in sorted(factor)], 32)} elsewhere'
    if set(wrong) == {'dq'}:
        return 'turns', f'{words} terms, and dk and dv are right'
    if {'dv', 'dk', 'dq'} <= set(wrong):
        return 'mask', f'{words} terms'
    return 'accumulation', f'{words} terms, and the others are right'


def strangers(e):
    """Rows that should have nothing have something."""
    lse = e.wrong('labels').get('lse')
    seen = {chunk[1] for chunk in lse.chunks if chunk[4][0] == -math.inf and None not in chunk[3] and
            math.isfinite(chunk[3][0])} if lse else None
    return ('mask', f'rows {spans(sorted(seen), 1)}, which see nothing, have found keys') if seen else None


def mixed(e):
    t, counts = e.wrong('labels').get('o'), e.wrong('counts')
    if t is not None and 'lse' not in counts and ('o' not in counts or counts['o'].wrong < 0.02 * t.wrong):
        found = [x for x in Labels(e, t).all if x[2] == 'other']
        if found:
            return 'lane', f'o mixes keys where one has all the weight ({len(found)} chunks), and where all keys weigh the ' \
                           'same it is right: lanes of a row do not agree on its top'
    return None


RULES = (hangs, never_written, not_merged, excess, strangers, displaced, factors, products, not_numbers, mixed, counted)


def most(values):
    return Counter(values).most_common(1)[0][0]


def spans(numbers, size):
    """`0-63,128-191`: numbers times their size."""
    text, numbers = [], list(numbers)
    for i, x in enumerate(numbers):
        if i == 0 or x != numbers[i - 1] + 1:
            text.append([x, x])
        text[-1][1] = x
    parts = [f'{a * size}-{b * size + size - 1}' if a != b or size > 1 else str(a) for a, b in text]
    return ','.join(parts[:8]) + (',...' if len(parts) > 8 else '')


def name_kind(e):
    for rule in RULES:
        found = rule(e)
        if found is not None:
            return found
    return 'unknown', 'wrong by run: ' + '; '.join(f'{run}: {", ".join(e.wrong(run)) or "nothing"}' for run in e.runs)


def look_at(e, kind, words):
    text = LOOK['bwd' if e.backward else 'fwd'].get(kind, 'the runs that are wrong, in the file itself')
    named = {'S': 'Q K^T' in words or 'dO V^T' in words, 'V': words.startswith('o'), 'dq': words.startswith('dq'),
             'dk': words.startswith(('dk', 'dv'))}
    return re.sub(r'\{(\w+)\}', lambda found: PANELS[found.group(1)] if named[found.group(1)] else '', text)


def report(path):
    e = Evidence(path)
    kind, words = name_kind(e)
    again = e.call.get('again', '')
    print(f'{e.call["verdict"]}: {kind} -- {KINDS[kind]}.\n    {words}.\n    Wrong in the check: ' +
          (', '.join(f'{name} {t.wrong} of {t.n * t.h * t.d}' for name, t in e.wrong('check').items()) or 'nothing') +
          ('' if not again else '; a second run gave the same bits' if again == '0' else f'; {again} numbers of a second '
           'run differ: a race, or what nobody has set') + f'.\n    Look at {look_at(e, kind, words)}.')


def main():
    if len(sys.argv) == 1 or sys.argv[1].startswith('-'):
        print(__doc__.strip())
        return 0 if '--help' in sys.argv else 2
    status = 0
    for path in sys.argv[1:]:
        try:
            report(path)
        except (OSError, ValueError, KeyError, IndexError) as error:  # one that was cut off hides no other
            print(f'{path}: no evidence of verdict that can be read ({type(error).__name__}: {error})', file=sys.stderr)
            status = 1
    return status


if __name__ == '__main__':
    sys.exit(main())

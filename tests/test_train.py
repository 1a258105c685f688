#!/usr/bin/env python3
"""test_train.py TRAIN TOP -- the program examples/llama/train, and logits beside it, from the outside

UPipe and Ulysses must give the same bits and all methods the same losses, numbers must add up, a training that was
stopped anywhere must go on as if it had not been, and bad input must end in a sentence, a non-zero status and the files
as they were. Checkpoints are read here a second time, by the format's specification alone.
"""

import array
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), 'lib'))
from checks import check, end, equal  # pylint: disable=wrong-import-position

TRAIN, TOP = os.path.abspath(sys.argv[1]), os.path.abspath(sys.argv[2])
LOGITS = os.path.join(os.path.dirname(TRAIN), 'logits')
BOOK = os.path.join(TOP, 'examples', 'data', 'genesis_exodus.txt')
ROOT = {'config', 'first_step', 'loss', 'grad_norm', 'tokens_per_s', 'peak_bytes', 'plan_bytes', 'slab_bytes',
        'host_bytes', 'plan_sent_bytes', 'plan_moved_bytes', 'sent_bytes_per_step', 'memory'}
CONFIG = {'method', 'ranks', 'ring', 'inner', 'segments', 'chunk', 'overlap', 'window', 'layers', 'model_dim', 'heads',
          'kv_heads', 'head_dim', 'ff_dim', 'vocab', 'untied', 'qk_norm', 'attention_bias', 'rope_theta', 'norm_eps', 'tokens',
          'batch', 'steps', 'lr', 'min_lr', 'warmup', 'weight_decay', 'beta1', 'beta2', 'adam_eps', 'clip', 'dtype', 'device', 'seed',
          'tile_bytes', 'activations', 'zero', 'zero_prefetch', 'reduce_dtype', 'data', 'save', 'resume', 'load'}
MEASURED = {'text_bytes', 'products', 'kernels', 'transport'}
NO_NUMBERS = {'offload', 'json', 'trace', 'save-every', 'keep', 'sample', 'prompt', 'temperature', 'deadline', 'plan',
              'transport', 'node-ranks',
              'progress', 'help', 'version'}
METHODS = ['ulysses', 'upipe', 'upipe-naive', 'ring', 'zigzag', 'stripe', 'allgather', 'usp', 'upipe-ring',
           'double-ring', 'fpdt', 'upipe-fpdt']
SEGMENTED = METHODS[-2:]
PARTS = ['weights', 'gradients', 'optimizer', 'tokens', 'checkpoints', 'stream', 'attention', 'mlp', 'loss', 'sum']
MODEL = {'layers': 2, 'model_dim': 64, 'heads': 4, 'kv_heads': 2}
RUN = {'tokens': 64, 'ranks': 2, 'steps': 4, 'sample': 0}
LONG = 50 if os.environ.get('UPIPE_FULL') == '1' else 4  # steps of a long training
EVEN = {'lr': 1e-3, 'min_lr': 1e-3, 'warmup': 0}  # a rate that does not depend on the number of steps


def near(got, want, relative, what):
    """Two lists of numbers."""
    ok = len(got) == len(want) and all(abs(a - b) <= relative * max(abs(a), abs(b)) for a, b in zip(got, want))
    return check(ok, f'{what} is {got}, not within {relative} of {want}')


# ---- running ----


def words_of(flags):
    out = []
    for name, value in flags.items():
        if value is None or value is False:
            continue
        out.append('--' + name.replace('_', '-'))
        if value is not True:
            out.append(str(value))
    return out


def given(**flags):
    """A small run's command line; with resume or load the folder says what the model is."""
    model = {} if flags.get('resume') or flags.get('load') else MODEL
    return words_of({**model, **RUN, **flags})


def run(args, folder, program=TRAIN, **more):
    more = {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE, **more}
    return subprocess.run([program, *args], cwd=folder, encoding='utf-8', errors='backslashreplace', timeout=280,
                          check=False, **more)


def read(path):
    with open(path, 'rb') as source:
        return source.read()


def write(path, data):
    with open(path, 'wb') as out:
        out.write(data)


def fnv(data):
    """FNV-1a of 64 bits: how a checkpoint knows its text."""
    value = 1469598103934665603
    for byte in data:
        value = (value ^ byte) * 1099511628211 & 2**64 - 1
    return value


def numbers_of(folder, name='numbers.json'):
    return json.loads(read(os.path.join(folder, name)))


def tree(folder):
    found = {}
    for where, folders, names in os.walk(folder):
        for name in folders + names:
            path = os.path.join(where, name)
            found[path] = read(path) if os.path.isfile(path) else None
    return found


def good(folder, what, **flags):
    """Trains, checks what holds for every run, returns the numbers."""
    done = run(given(json='numbers.json', **flags), folder)
    if not check(done.returncode == 0, f'{what}: status {done.returncode}: {done.stderr}'):
        return None
    equal(done.stderr, '', f'{what}: stderr')
    equal([name for name in os.listdir(folder) if '.tmp' in name], [], f'{what}: temporary files')
    numbers = numbers_of(folder)
    check_numbers(numbers, what)
    return numbers


def failed(folder, args, status, words, what=None, kept=True, program=TRAIN, lines=1, **more):
    """Ends with this status and one sentence, or so many, with these words, and leaves the folder as it was."""
    what = what or ' '.join(args)
    before = tree(folder)
    done = run(args, folder, program, **more)
    equal(done.returncode, status, f'{what}: status')
    said = done.stderr.strip().split('\n')
    check(len(said) == lines and all(line.startswith(os.path.basename(program) + ': ') for line in said),
          f'{what}: not {lines} sentences: {done.stderr}')
    for word in words:
        check(re.search(word, done.stderr) is not None, f'{what}: "{done.stderr.strip()}" does not say {word}')
    if kept:
        after = tree(folder)
        equal(sorted(after), sorted(before), f'{what}: the names in the folder')
        equal([path for path in before if after.get(path) != before[path]], [], f'{what}: files that changed')
    return done


# ---- numbers ----


def held(c):
    """Tokens of a sequence on rank 0: its ring's share, then its team's of that; or of every segment."""
    def cut(n, parts, i):
        return n // parts * i + n % parts * i // parts

    n, rings, pieces = c['tokens'], c['ring'], c['segments']
    if pieces:
        return sum(cut(cut(n, pieces, i + 1) - cut(n, pieces, i), c['ranks'], 1) for i in range(pieces))
    if c['method'] == 'stripe':
        n = -(-n // rings)
    elif c['method'] == 'ring' or rings == 1:
        n = cut(n, rings, 1)
    else:
        n = cut(n, 2 * rings, 1) + n - cut(n, 2 * rings, 2 * rings - 1)
    return cut(n, c['ranks'] // rings, 1)


def offloaded(c, rows):
    """Bytes at most that attention in segments takes of the second pool where all ranks hold equally much: O, or dO, Q,
    dO at the heads, dQ in f32, lse, delta at home and at the heads; K, V, dK, dV; dK and dV in f32 between the stages of a
    round; x."""
    element, dim, heads = 2 if c['dtype'] == 'bf16' else 4, c['head_dim'], c['heads']
    between = c['chunk'] // c['ranks'] < heads // c['kv_heads']
    return rows * (heads * (dim * (3 * element + 4) + 12) + 4 * c['kv_heads'] * dim * element +
                   2 * c['ranks'] * dim * 4 * between + c['model_dim'] * element)


def is_plain(c):
    """The second pool holds most while attention's backward runs, beside inputs of layers alone."""
    return c['activations'].split(':')[0] in ('ac', 'offload', 'sao')


def kept(c, rows):
    """Bytes kept for the backward at most, without segments: in the rank's own pool, and in the second one."""
    element, layers = 2 if c['dtype'] == 'bf16' else 4, c['layers']
    kind, _, k = c['activations'].removesuffix(',grad').partition(':')
    grad, k = c['activations'].endswith(',grad'), int(k or layers)
    unit, attention = rows * c['model_dim'] * element, rows * c['heads'] * (c['head_dim'] * element + 4)
    here = {'ac': layers, 'sao': layers // k}.get(kind, 0)
    away = {'ac': 0, 'sao': layers - here, 'blocks': -(-layers // k)}.get(kind, layers) * unit
    if kind == 'sac':
        away += 0 if c['segments'] else k * attention
    if kind == 'blocks': # the last block, or the one before, which is longer
        size = [min(k, layers - first) for first in range(0, layers, k)]
        away = max((at + 1) * unit + (n - 1) * (unit + (0 if c['segments'] else attention))
                   for at, n in enumerate(size))
    if grad: # before what the first backward of a layer frees
        away += unit
    return here * unit, away


def check_states(c, at_peak, element, what):
    """What rank 0 holds of weights, gradients and the optimizer; of the first two also what is gathered at the peak."""
    units, vectors, zero = {}, 0, c['zero']
    for name, shape in tensors_wanted(c).items():
        if len(shape) == 1:
            vectors += shape[0]
        else: # half a layer, the embedding, the head
            unit = name.rsplit('.', 2)[0] if 'layers' in name else name
            units[unit] = units.get(unit, 0) + math.prod(shape)
    whole, most = sum(units.values()), max(units.values())
    shard = sum(-(-n // c['ranks']) for n in units.values())
    weights, gradients = shard if zero > 2 else whole, shard if zero > 1 else whole
    more = at_peak['weights'] - weights * element - vectors * 4
    check(more == 0 if zero < 3 else 0 <= more <= (2 + c['zero_prefetch']) * most * element,
          f'{what}: {more} bytes more of weights')
    more = at_peak['gradients'] - gradients * 4 - vectors * 4
    check(more == 0 if zero < 2 else 0 <= more <= 2 * most * 4, f'{what}: {more} bytes more of gradients')
    states, vector_states = (shard, -(-vectors // c['ranks'])) if zero else (whole, vectors)
    equal(at_peak['optimizer'], 8 * (states + vector_states) + (4 * states if c['dtype'] == 'bf16' else 0),
          f'{what}: optimizer')


def check_numbers(numbers, what):
    c = numbers['config']
    equal(set(numbers), ROOT, f'{what}: keys')
    equal(set(c), CONFIG | MEASURED, f'{what}: keys of config')
    equal(set(numbers['memory']), {'at_peak', 'largest'}, f'{what}: keys of memory')
    steps = c['steps'] - numbers['first_step'] + 1
    equal((len(numbers['loss']), len(numbers['grad_norm'])), (steps, steps), f'{what}: steps')
    check(all(0 < n < 1e6 for n in numbers['loss'] + numbers['grad_norm']), f'{what}: {numbers["loss"]}')
    check(numbers['tokens_per_s'] > 0, f'{what}: {numbers["tokens_per_s"]} tokens/s')
    equal(numbers['peak_bytes'], numbers['plan_bytes'], f'{what}: peak')
    check(numbers['peak_bytes'] <= numbers['slab_bytes'], f'{what}: the slab is less than the peak')
    at_peak, largest = numbers['memory']['at_peak'], numbers['memory']['largest']
    equal((list(at_peak), list(largest)), (PARTS, PARTS), f'{what}: parts')
    equal(sum(at_peak.values()), numbers['plan_bytes'], f'{what}: the parts at the peak')
    check(all(at_peak[part] <= largest[part] for part in PARTS), f'{what}: {at_peak} above {largest}')
    element = 2 if c['dtype'] == 'bf16' else 4
    rows = c['batch'] * held(c)
    unit = rows * c['model_dim'] * element
    check_states(c, at_peak, element, what)
    equal(at_peak['tokens'], rows * 12, f'{what}: tokens')
    # while a block's layers run again their stream is beside its gradient
    block = c['activations'].startswith('blocks') and not c['activations'].endswith(',grad') and c['layers'] > 1
    equal(largest['stream'], unit * (1 + block), f'{what}: stream')
    # What lies in the second pool is fetched by tiles, of which two have buffers.
    here, away = kept(c, rows)
    tile = min(rows, 2 * max(64, c['model_dim'] // 64 * 64)) * c['model_dim'] * element
    if away or c['segments']:
        check(here <= largest['checkpoints'] <= here + tile, f'{what}: checkpoints are {largest["checkpoints"]}')
    else:
        equal(largest['checkpoints'], here, f'{what}: checkpoints')
    equal(c['segments'] > 0, c['method'] in SEGMENTED, f'{what}: segments')
    even = c['tokens'] % c['ranks'] == 0 and c['heads'] % c['ranks'] == 0
    if not c['segments'] and (is_plain(c) or even):
        equal(numbers['host_bytes'], away, f'{what}: the second pool')
    elif not c['segments']: # O and lse where a rank has more heads than its share
        check(away < numbers['host_bytes'] < 1.3 * away, f'{what}: the second pool has {numbers["host_bytes"]} bytes')
    elif c['tokens'] % (c['segments'] * c['ranks']) == 0 and c['kv_heads'] % c['ranks'] == 0 and is_plain(c):
        equal(numbers['host_bytes'], away + offloaded(c, rows), f'{what}: the second pool')
    else:
        check(numbers['host_bytes'] > away + unit, f'{what}: the second pool has {numbers["host_bytes"]} bytes')
    equal(numbers['sent_bytes_per_step'], numbers['plan_sent_bytes'], f'{what}: bytes sent')
    check((numbers['sent_bytes_per_step'] > 0) == (c['ranks'] > 1), f'{what}: {numbers["sent_bytes_per_step"]} sent')


def test_numbers(folder):
    numbers = good(folder, 'defaults', data=BOOK)
    if numbers is None:
        return
    c = numbers['config']
    for key, want in [('method', 'upipe'), ('ring', 1), ('inner', 0), ('segments', 0), ('chunk', 2), ('window', 0),
                      ('head_dim', 32), ('ff_dim', 192), ('vocab', 256), ('untied', False), ('qk_norm', False),
                      ('attention_bias', 'none'),
                      ('batch', 1), ('lr', 1e-3), ('min_lr', 1e-4), ('warmup', 1), ('weight_decay', 0.1),
                      ('beta1', 0.9), ('beta2', 0.95), ('clip', 1), ('dtype', 'f32'), ('device', 'cpu'),
                      ('seed', 1), ('activations', 'ac'), ('zero', 1), ('zero_prefetch', False), ('reduce_dtype', 'f32'), ('data', BOOK), ('save', None), ('resume', None),
                      ('load', None), ('text_bytes', os.path.getsize(BOOK))]:
        equal(c[key], want, f'default of {key}')
    equal(numbers['first_step'], 1, 'the first step')
    check(abs(numbers['loss'][0] - math.log(256)) < 0.2, f'a new model has the loss {numbers["loss"][0]}')
    check(0.1 < numbers['grad_norm'][0] < 10, f'a new model has the gradient {numbers["grad_norm"][0]}')
    texts = json.loads(read(os.path.join(folder, 'numbers.json')), parse_float=str)
    for text in texts['loss'] + texts['grad_norm']:
        check(float(text) == float(f'{float(text):.17g}') and len(text) >= 15, f'{text} has not all its digits')
    done = run(given(data=BOOK, steps=1), folder)
    check('loss 5.' in done.stdout and f'{numbers["peak_bytes"]} bytes' in done.stdout, f'the table: {done.stdout}')
    # A path may hold any bytes: valid UTF-8 is kept, other bytes become the characters of those numbers.
    odd = os.path.join(os.fsencode(folder), b'\xc3\xa9\xe2\x82\xac\xf0\x9f\x93\x96\xff\xc0\xaf\xed\xa0\x80"\\.txt')
    shutil.copy(BOOK, odd)
    done = run([*given(steps=1, json='odd.json'), '--data', odd], folder)
    if check(done.returncode == 0, f'a path of odd bytes: {done.returncode} {done.stderr}'):
        got = numbers_of(folder, 'odd.json')['config']['data']
        equal(os.path.basename(got), 'é€📖\xff\xc0\xaf\xed\xa0\x80"\\.txt', 'a path of odd bytes')


def test_flags(folder):
    done = run(['--help'], folder)
    equal((done.returncode, done.stderr), (0, ''), '--help')
    flags = set(re.findall(r'--([a-z][a-z0-9-]*)', done.stdout))
    source = read(os.path.join(TOP, 'examples', 'llama', 'options.h')).decode()
    kinds = dict(re.findall(r'\{"([a-z0-9-]+)", +(no|required)_argument', source))
    equal(flags, set(kinds), 'what --help lists')
    equal({name.replace('-', '_') for name in flags - NO_NUMBERS}, CONFIG, 'flags that the numbers say')
    for name in sorted(kinds.keys() - {'help', 'version'}):
        if kinds[name] == 'required':
            failed(folder, ['--' + name], 2, [f'--{name} wants a value'])
            failed(folder, ['--' + name, ''], 2, [f'--{name} is empty'])
        else:
            failed(folder, ['--' + name, '--' + name], 2, [f'--{name} is given twice'])
            failed(folder, [f'--{name}=yes'], 2, [f'--{name}=yes'])
    for program, name in [(TRAIN, 'train'), (LOGITS, 'logits')]:
        for flag, word in [('--help', '--dtype'), ('--version', name)]:
            done = run([flag], folder, program)
            check(done.returncode == 0 and word in done.stdout, f'{name} {flag}: {done.returncode} {done.stdout}')
            with open('/dev/full', 'w', encoding='utf-8') as full:
                failed(folder, [flag], 1, ['No space'], f'{name} {flag} on a full disk', program=program, stdout=full)


# ---- the same bits ----


def test_bits(folder):
    book = read(BOOK)
    write(os.path.join(folder, 'short.txt'), book[:64 + 64 + 21])  # the last window: rank 0 of 4 full, 1 partly
    for what, flags in [
        ('groups', {}),
        ('as many key/value heads', {'heads': 8, 'kv_heads': 8, 'ranks': 4, 'method': 'upipe', 'chunk': 4}),
        ('more ranks than key/value heads', {'heads': 8, 'kv_heads': 2, 'ranks': 4}),
        ('one key/value head, two heads a stage', {'heads': 8, 'kv_heads': 1, 'ranks': 4, 'chunk': 8}),
        ('all of the model', {'qk_norm': True, 'attention_bias': 'qkvo', 'untied': True, 'vocab': 300, 'head_dim': 40, 'ff_dim': 100,
                              'rope_theta': 500000, 'norm_eps': 1e-6}),
        ('unequal targets, biases', {'attention_bias': 'qkv', 'heads': 4, 'kv_heads': 4, 'ranks': 4, 'batch': 2, 'data': 'short.txt'}),
        ('unequal targets, batch 3, offload', {'ranks': 2, 'batch': 3, 'data': 'short.txt', 'offload': True}),
        ('three ranks', {'heads': 6, 'kv_heads': 3, 'ranks': 3, 'tokens': 63, 'layers': 3, 'data': 'short.txt'}),
        ('offload, small tiles', {'offload': True, 'tile_bytes': '200kB', 'tokens': 384}),
        ('one layer, one rank', {'layers': 1, 'ranks': 1, 'chunk': 2}),
        ('neither tokens nor heads divide', {'heads': 6, 'kv_heads': 2, 'ranks': 4, 'tokens': 67, 'batch': 2}),
        ('a window', {'heads': 8, 'kv_heads': 4, 'ranks': 4, 'window': 10}),
    ]:
        chunk = flags.get('chunk')
        upipe = good(folder, f'{what}: upipe', **{**flags, 'method': 'upipe', 'chunk': chunk})
        ulysses = good(folder, f'{what}: ulysses', **{**flags, 'method': 'ulysses', 'chunk': None})
        if upipe is None or ulysses is None:
            continue
        built_in = upipe['config']['products'] == 'built-in'  # a BLAS in place of it promises no equal bits
        for key in ('loss', 'grad_norm'):
            if built_in:
                equal(upipe[key], ulysses[key], f'{what}: {key}')
            near(upipe[key], ulysses[key], 1e-4, f'{what}: {key}')
        if upipe['config']['heads'] % upipe['config']['ranks'] == 0:
            check(upipe['peak_bytes'] <= ulysses['peak_bytes'], f'{what}: UPipe holds more')

    first = good(folder, 'first', steps=6, offload=False)
    again = good(folder, 'again', steps=6)
    offload = good(folder, 'offload', steps=6, offload=True)
    other = good(folder, 'another seed', steps=6, seed=2)
    if first and again and offload and other:
        for key in ('loss', 'grad_norm'):
            equal(again[key], first[key], f'twice the same: {key}')
            equal(offload[key], first[key], f'with offload: {key}')
            check(all(a != b for a, b in zip(other[key], first[key])), f'the seed makes no difference to {key}')
    for data in (BOOK, 'short.txt'):
        ranks = [good(folder, f'{n} ranks', ranks=n, data=data, steps=5) for n in (1, 2, 4)]
        for key in ('loss', 'grad_norm') if all(ranks) else []:
            near(ranks[1][key], ranks[0][key], 1e-4, f'{key} of 2 ranks')
            near(ranks[2][key], ranks[0][key], 1e-4, f'{key} of 4 ranks')

    half = [good(folder, f'bf16, {method}', dtype='bf16', method=method) for method in ('upipe', 'ulysses')]
    if all(half) and first:
        near(half[0]['loss'], half[1]['loss'], 1e-2, 'bf16: loss')
        near(half[0]['grad_norm'], half[1]['grad_norm'], 5e-2, 'bf16: grad_norm')
        near(half[0]['loss'][:1], first['loss'][:1], 1e-2, 'bf16: the first loss')
        check(half[0]['loss'] != first['loss'][:4], 'bf16 makes no difference')


def test_methods(folder):
    """All methods train the same. Rings add in another order, as other numbers of ranks do: the tolerance is theirs."""
    def alike(got, want, what):
        for key in ('loss', 'grad_norm') if got and want else []:
            near(got[key], want[key], 1e-4, f'{what}: {key}')

    for what, flags in [
        ('equal parts, biases', {'attention_bias': 'qkv', 'heads': 8, 'kv_heads': 4}),
        ('unequal parts, a window, offload', {'heads': 8, 'kv_heads': 4, 'tokens': 67, 'batch': 2, 'window': 20,
                                              'offload': True, 'tile_bytes': '120kB'}),
        ('QK norm, biases', {'qk_norm': True, 'attention_bias': 'qkvo', 'heads': 8, 'kv_heads': 4, 'tokens': 30}),
    ]:
        runs = {method: good(folder, f'{what}: {method}', method=method, ranks=4, steps=5, **flags)
                for method in METHODS}
        for method in METHODS[1:]:
            alike(runs[method], runs['ulysses'], f'{what}: {method}')
        for method in 'upipe', 'fpdt', 'upipe-fpdt':
            beside = good(folder, f'{what}: {method} overlaps', method=method, overlap=True, ranks=4, steps=5, **flags)
            for key in ('loss', 'grad_norm') if beside and runs[method] else []:
                equal(beside[key], runs[method][key], f'{what}: {key} where {method} overlaps')
        if all(runs.values()):
            equal([runs[m]['config']['ring'] for m in METHODS], [1, 1, 1, 4, 4, 4, 4, 2, 2, 4, 1, 1], f'{what}: rings')
            equal(runs['double-ring']['config']['inner'], 2, f'{what}: ranks of an inner ring')
            equal([runs[m]['config']['segments'] for m in METHODS], [0] * 10 + [4, 4], f'{what}: segments')
    one = [good(folder, f'one rank: {method}', method=method, ranks=1) for method in ('ulysses', 'zigzag', 'allgather')]
    for numbers in one[1:]:
        alike(numbers, one[0], 'a ring of one')
    # More ranks than heads, and teams whose heads do not divide.
    small = {'heads': 4, 'kv_heads': 2, 'ranks': 6, 'tokens': 35}
    base = good(folder, 'six ranks: ulysses', method='ulysses', **small)
    for method, more in [('upipe', {}), ('ring', {}), ('allgather', {}), ('upipe-ring', {'ring': 2}),
                         ('usp', {'ring': 3}), ('double-ring', {'inner': 3}), ('fpdt', {'segments': 5}),
                         ('upipe-fpdt', {'segments': 1})]:
        alike(good(folder, f'six ranks: {method}', method=method, **small, **more), base, f'six ranks: {method}')
    half = [good(folder, f'bf16: {method}', method=method, ranks=4, dtype='bf16') for method in METHODS]
    for method, run_of in zip(METHODS, half) if all(half) else []:
        near(run_of['loss'], half[0]['loss'], 1e-2, f'bf16: {method}: loss')
        near(run_of['grad_norm'], half[0]['grad_norm'], 5e-2, f'bf16: {method}: grad_norm')
    # The second pool makes no difference in segments either; what is offloaded there is not on the device.
    cut = {'heads': 8, 'kv_heads': 4, 'tokens': 96, 'segments': 3, 'batch': 2, 'method': 'upipe-fpdt'}
    here, there = (good(folder, f'segments, offload {offload}', offload=offload, **cut) for offload in (False, True))
    base = good(folder, 'as many tokens at once', **{**cut, 'method': 'upipe', 'segments': None})
    if here and there and base:
        for key in ('loss', 'grad_norm'):
            equal(there[key], here[key], f'segments with offload: {key}')
        alike(here, base, 'segments')
        check(here['peak_bytes'] < base['peak_bytes'], 'segments hold more than all at once')
        check(there['peak_bytes'] < here['peak_bytes'], 'segments hold more with offload')
    # A checkpoint does not know the method.
    whole = good(folder, 'usp', method='usp', ranks=4, steps=6, save='usp', save_every=3, keep=2)
    for method in METHODS:
        rest = good(folder, f'usp, then {method}', method=method, ranks=4, steps=6, resume='usp/checkpoint-3')
        near(rest['loss'] if rest else [], whole['loss'][3:] if whole else [], 1e-4, f'usp, then {method}')
    # What the window does, and that config.json keeps it.
    wide, narrow = (good(folder, f'a window of {n}', window=n, steps=6, save=f'w{n}', save_every=3, keep=2)
                    for n in (64, 8))
    full = good(folder, 'no window', steps=6)
    rest = good(folder, 'a window, resumed', steps=6, resume='w8/checkpoint-3')
    if wide and narrow and full and rest:
        near(wide['loss'], full['loss'], 1e-4, 'a window of the whole sequence')
        check(all(abs(a - b) > 1e-4 for a, b in zip(narrow['loss'], full['loss'])), 'a window makes no difference')
        equal((rest['config']['window'], rest['loss']), (8, narrow['loss'][3:]), 'a window, resumed')
        check_files(os.path.join(folder, 'w8', 'checkpoint-6'), narrow['config'], 6, 'a window')
        failed(folder, given(resume='w8/checkpoint-3', steps=6, window=9), 1, ['--window', 'config.json'])


def test_activations(folder):
    """What is kept, and where, changes no bit and no promise of bytes."""
    settings = ['offload', 'sao:2', 'sac', 'sac:2', 'blocks:2', 'blocks:3,grad', 'ac,grad', 'sac:1,grad']
    for what, flags, some in [
        ('upipe', {'steps': LONG, 'layers': 5, 'heads': 8, 'kv_heads': 4, 'ranks': 2, 'tokens': 96, 'batch': 2}, settings),
        ('uneven', {'layers': 3, 'heads': 8, 'kv_heads': 4, 'ranks': 3, 'tokens': 67}, settings[3:5]),
        ('a ring', {'layers': 3, 'method': 'usp', 'ranks': 4, 'attention_bias': 'qkv'}, settings[2:6:3]),
        ('segments', {'layers': 5, 'method': 'upipe-fpdt', 'segments': 3, 'tokens': 200, 'attention_bias': 'qkvo'}, settings[:1] + settings[3:6]),
        ('bf16', {'layers': 4, 'dtype': 'bf16', 'qk_norm': True}, settings[2:5:2]),
    ]:
        base = good(folder, f'{what}, ac', **flags)
        for activations in some:
            numbers = good(folder, f'{what}, {activations}', activations=activations, **flags)
            for key in ('loss', 'grad_norm') if numbers and base else []:
                equal(numbers[key], base[key], f'{what}, {activations}: {key}')
    for words, said in [('sac:0', 'from 1'), ('sac:', 'from 1'), ('blocks', 'blocks:K'), ('sao', 'sao:K'), ('ac:2', 'not'),
                        ('offload:2', 'not'), ('grad', 'not'), (',grad', 'not'), ('blocks:-1', 'from 1'),
                        ('sac:2,', 'from 1'), ('sacs', 'not'), ('sa', 'not'), (f'sac:{2:023}junk', 'not')]:
        failed(folder, given(activations=words), 2, ['--activations', said])
    failed(folder, given(activations='sac', offload=True), 2, ['--offload', '--activations'])
    for words in ('sac:3', 'sao:3', 'blocks:3,grad'):
        failed(folder, given(activations=words), 1, [f'--activations {words}', '2 layers'])


def test_zero(folder):
    """What is sharded changes no bit of many steps, in no method; and a run goes on in any stage, on as many ranks."""
    few = {'steps': LONG, 'tokens': 48, 'layers': 2, 'model_dim': 32, 'heads': 2, 'kv_heads': 2, 'lr': 1e-2}
    for what, flags in [('upipe', {}), ('ulysses', {'method': 'ulysses', 'untied': True, 'attention_bias': 'qkvo'}),
                        ('fpdt', {'method': 'fpdt', 'segments': 2, 'activations': 'offload'}),
                        ('3 ranks, bf16', {'ranks': 3, 'heads': 3, 'kv_heads': 3, 'dtype': 'bf16', 'steps': 4, 'activations': 'sac'})]:
        base = good(folder, f'{what}, zero 1', **{**few, **flags})
        for zero in (0, 2, 3):
            numbers = good(folder, f'{what}, zero {zero}', zero=zero, **{**few, **flags})
            for key in ('loss', 'grad_norm') if numbers and base else []:
                equal(numbers[key], base[key], f'{what}, zero {zero}: {key}')
    flags = {**few, **EVEN, 'steps': 6, 'attention_bias': 'qkv'}
    base = good(folder, 'zero, six steps', **flags, zero=3, save='whole')
    for first, then in [(3, 0), (0, 2), (2, 3)]:
        good(folder, f'zero {first}, three steps', **{**flags, 'steps': 3}, zero=first, save=f'zero{first}')
        numbers = good(folder, f'zero {first}, then {then}', steps=6, tokens=few['tokens'], zero=then,
                       resume=f'zero{first}', save=f'zero{first}')
        if numbers and base:
            equal(numbers['loss'], base['loss'][3:], f'zero {first}, then {then}: losses')
        for name in ('model.safetensors', 'optimizer.safetensors'):
            got, want = (os.path.join(folder, of, 'checkpoint-6', name) for of in (f'zero{first}', 'whole'))
            check(os.path.exists(got) and read(got) == read(want), f'zero {first}, then {then}: {name}')
    for words, said in [('4', 'not'), ('-1', 'not'), ('', 'is empty'), ('3x', 'not')]:
        failed(folder, given(zero=words), 2, ['--zero', said])


def test_prefetch(folder):
    """Weights that are gathered ahead change no bit, and send no byte more; the largest rank holds a unit more at most."""
    few = {'tokens': 48, 'steps': 3, 'layers': 3, 'model_dim': 32, 'heads': 4, 'kv_heads': 4, 'lr': 1e-2, 'zero': 3}
    for ranks, flags in [(1, {}), (2, {'untied': True, 'activations': 'blocks:2,grad'}), (4, {'sample': 3}),
                         (4, {'method': 'upipe-fpdt', 'segments': 2, 'untied': True, 'activations': 'sac:1'})]:
        what = f'prefetch, {ranks} ranks, {flags}'
        base = good(folder, f'{what}: without', ranks=ranks, **few, **flags)
        ahead = good(folder, what, ranks=ranks, zero_prefetch=True, **few, **flags)
        if not base or not ahead:
            continue
        for key in ('loss', 'grad_norm', 'sent_bytes_per_step'):
            equal(ahead[key], base[key], f'{what}: {key}')
        unit = 4 * 32 * max(3 * ahead['config']['ff_dim'], 4 * 4 * ahead['config']['head_dim'], ahead['config']['vocab'])
        more = ahead['peak_bytes'] - base['peak_bytes']
        check(0 < more <= unit, f'{what}: {more} bytes more at the peak')
    for zero in ([], ['--zero', '2']):
        failed(folder, ['--zero-prefetch', *zero], 2, ['--zero-prefetch', 'no effect', f'--zero {(zero or [0, 1])[1]}'])


def test_reduce_dtype(folder):
    """Gradients that travel in bf16: fewer bytes, nearly the losses, and the same bits in every stage and every run."""
    few = {'tokens': 48, 'steps': 3, 'layers': 2, 'model_dim': 32, 'heads': 4, 'kv_heads': 4, 'ranks': 4}
    wide = good(folder, 'sums of f32', **few, reduce_dtype='f32')
    runs = [good(folder, f'sums of bf16, zero {zero}', **few, zero=zero, reduce_dtype='bf16') for zero in (0, 1, 2, 3, 3)]
    if not wide or not all(runs):
        return
    for run_ in runs:
        for key in ('loss', 'grad_norm'):
            equal(run_[key], runs[0][key], f'sums of bf16, zero {run_["config"]["zero"]}: {key}')
    check(wide['grad_norm'] != runs[1]['grad_norm'], 'sums of bf16 have the bits of f32')
    near(runs[1]['loss'], wide['loss'], 1e-3, 'sums of bf16: losses')
    near(runs[1]['grad_norm'], wide['grad_norm'], 2e-2, 'sums of bf16: norms')
    # of each unit three of four slices leave, 2 bytes an element instead of 4
    units = [256 * 32] + 2 * [4 * 4 * wide['config']['head_dim'] * 32, 3 * 32 * wide['config']['ff_dim']]
    equal(wide['sent_bytes_per_step'] - runs[1]['sent_bytes_per_step'], 2 * sum(units) * 3 // 4, 'sums of bf16: bytes sent')
    failed(folder, given(reduce_dtype='f16'), 2, ['--reduce-dtype', 'f32 or bf16'])


def test_learning(folder):
    write(os.path.join(folder, 'text'), read(BOOK)[:4096])
    wish = {'data': 'text', 'tokens': 128, 'batch': 4, 'steps': 60, 'lr': 1e-2, 'untied': True}
    numbers = good(folder, 'learning', **wish)
    if numbers:
        check(numbers['loss'][-1] < 2.5, f'after 60 steps the loss is {numbers["loss"][-1]}')
        near(numbers['loss'][:1], [math.log(256)], 0.05, 'learning: the first loss')
    write(os.path.join(folder, 'text'), read(BOOK)[:513])
    wish.update(tokens=512, steps=2, batch=1, lr=0, min_lr=0)
    still = good(folder, 'no rate', **wish)
    equal(still and still['loss'][1], still and still['loss'][0], 'the loss without a rate')


# ---- checkpoints ----


def tensors_wanted(c):
    """Hugging Face's names and shapes."""
    D, F, V, d = c['model_dim'], c['ff_dim'], c['vocab'], c['head_dim']
    H, K = c['heads'] * d, c['kv_heads'] * d
    want = {'model.embed_tokens.weight': [V, D], 'model.norm.weight': [D]}
    for layer in range(c['layers']):
        at = f'model.layers.{layer}.'
        want.update({at + 'input_layernorm.weight': [D], at + 'post_attention_layernorm.weight': [D],
                     at + 'self_attn.q_proj.weight': [H, D], at + 'self_attn.k_proj.weight': [K, D],
                     at + 'self_attn.v_proj.weight': [K, D], at + 'self_attn.o_proj.weight': [D, H],
                     at + 'mlp.gate_proj.weight': [F, D], at + 'mlp.up_proj.weight': [F, D],
                     at + 'mlp.down_proj.weight': [D, F]})
        if c['qk_norm']:
            want.update({at + 'self_attn.q_norm.weight': [d], at + 'self_attn.k_norm.weight': [d]})
        for name, size in {'none': {}, 'qkv': {'q': H, 'k': K, 'v': K}, 'qkvo': {'q': H, 'k': K, 'v': K, 'o': D}}[
                c['attention_bias']].items():
            want[at + f'self_attn.{name}_proj.bias'] = [size]
    if c['untied']:
        want['lm_head.weight'] = [V, D]
    return want


def safetensors(path):
    """(metadata, {name: (dtype, shape, bytes)}, header, where the data begins)"""
    data = read(path)
    start = 8 + struct.unpack('<Q', data[:8])[0]
    head = json.loads(data[8:start])
    tensors = {name: (t['dtype'], t['shape'], data[start + t['data_offsets'][0]:start + t['data_offsets'][1]])
               for name, t in head.items() if name != '__metadata__'}
    return head.get('__metadata__', {}), tensors, head, start


def check_files(path, c, step, what):
    equal(sorted(os.listdir(path)), ['config.json', 'model.safetensors', 'optimizer.safetensors'], f'{what}: files')
    meta, tensors, _, _ = safetensors(os.path.join(path, 'model.safetensors'))
    want = tensors_wanted(c)
    half = 'BF16' if c['dtype'] == 'bf16' else 'F32'
    equal(meta, {'format': 'pt'}, f'{what}: metadata')
    equal({name: (t[0], t[1]) for name, t in tensors.items()},
          {name: (half if len(shape) == 2 else 'F32', shape) for name, shape in want.items()}, f'{what}: tensors')
    for name, (dtype, shape, data) in tensors.items():
        equal(len(data), math.prod(shape) * (2 if dtype == 'BF16' else 4), f'{what}: bytes of {name}')
        check(len(set(data[i:i + 4] for i in range(0, len(data), 4))) > len(data) // 64, f'{what}: {name} is flat')
    meta, moments, _, _ = safetensors(os.path.join(path, 'optimizer.safetensors'))
    schedule = {key: '%.17g' % c[key] for key in ('lr', 'min_lr', 'weight_decay', 'beta1', 'beta2', 'adam_eps', 'clip')}
    equal(meta, {**schedule, 'steps': str(c['steps']), 'warmup': str(c['warmup']),
                 'dtype': c['dtype'], 'step': str(step), 'tokens': str(c['tokens']), 'batch': str(c['batch']),
                 'text_bytes': str(c['text_bytes']), 'seed': str(c['seed']),
                 'text_hash': str(fnv(read(c['data']))), 'format_version': '1'},
          f'{what}: metadata of the optimizer')
    names = {prefix + name: ('F32', shape) for name, shape in want.items() for prefix in ('exp_avg.', 'exp_avg_sq.')}
    if c['dtype'] == 'bf16':
        names.update({'master.' + name: ('F32', shape) for name, shape in want.items() if len(shape) == 2})
    equal({name: (t[0], t[1]) for name, t in moments.items()}, names, f'{what}: the optimizer')
    for name, (_, _, data) in moments.items():
        if name.startswith('exp_avg_sq.'):
            check(min(array.array('f', data)) >= 0 < max(array.array('f', data)), f'{what}: {name} is no square')
        if name.startswith('master.'):  # the weights are its upper halves, rounded to the nearest, ties to even
            words = array.array('I', data)
            rounded = array.array('H', [(w + 0x7fff + (w >> 16 & 1)) >> 16 for w in words]).tobytes()
            equal(tensors[name[7:]][2] == rounded, True, f'{what}: {name} rounds to the weights')
    config = json.loads(read(os.path.join(path, 'config.json')))
    model = 'Qwen3' if c['qk_norm'] else 'Mistral' if c['window'] else 'Qwen2' if c['attention_bias'] == 'qkv' else 'Llama'
    for key, value in [('hidden_size', c['model_dim']), ('intermediate_size', c['ff_dim']), ('hidden_act', 'silu'),
                       ('num_hidden_layers', c['layers']), ('num_attention_heads', c['heads']),
                       ('num_key_value_heads', c['kv_heads']), ('head_dim', c['head_dim']),
                       ('vocab_size', c['vocab']), ('max_position_embeddings', c['tokens']),
                       ('rms_norm_eps', c['norm_eps']), ('rope_theta', c['rope_theta']), ('rope_scaling', None),
                       ('tie_word_embeddings', not c['untied']), ('mlp_bias', False),
                       ('attention_bias', 'missing' if model == 'Qwen2' else c['attention_bias'] == 'qkvo'),
                       ('use_sliding_window', False if model == 'Qwen2' else 'missing'),
                       ('torch_dtype', 'bfloat16' if c['dtype'] == 'bf16' else 'float32'),
                       ('sliding_window', c['window'] or 'missing'),
                       ('model_type', model.lower()), ('architectures', [model + 'ForCausalLM'])]:
        equal(config.get(key, 'missing'), value, f'{what}: {key} of config.json')


def test_checkpoints(folder):
    def path(*names):
        return os.path.join(folder, *names)

    for what, flags in [('f32, biases', {'ranks': 4, 'kv_heads': 4, 'attention_bias': 'qkv'}), ('bf16, biases', {'dtype': 'bf16', 'untied': True, 'attention_bias': 'qkv'}),
                        ('f32, qk-norm', {'qk_norm': True, 'attention_bias': 'qkvo', 'offload': True, 'ranks': 3, 'heads': 6, 'kv_heads': 3,
                                          'tokens': 63, 'data': BOOK})]:
        here = {key: value for key, value in flags.items()
                if key in ('ranks', 'dtype', 'offload', 'tokens', 'data')}
        whole = good(folder, f'{what}: in one go', steps=6, save='whole', save_every=3, keep=2, **flags)
        if whole is None:
            continue
        equal(sorted(os.listdir(path('whole'))), ['checkpoint-3', 'checkpoint-6'], f'{what}: checkpoints')
        check_files(path('whole', 'checkpoint-6'), whole['config'], 6, what)
        rest = good(folder, f'{what}: resumed', steps=6, resume='whole/checkpoint-3', save='rest', **here)
        equal(os.listdir(path('rest')), ['checkpoint-6'], f'{what}: checkpoints of the rest')
        if rest:
            equal(rest['first_step'], 4, f'{what}: the first step')
            for key in ('loss', 'grad_norm'):
                equal(rest[key], whole[key][3:], f'{what}: {key} resumed')
        for name in ('config.json', 'model.safetensors', 'optimizer.safetensors'):
            equal(read(path('rest', 'checkpoint-6', name)) == read(path('whole', 'checkpoint-6', name)), True,
                  f'{what}: {name} has the same bytes')
        # The checkpoint knows the schedule and the data's numbers; equal flags of the model are no contradiction.
        bare = {key: value for key, value in here.items() if key in ('ranks', 'offload', 'data')}
        done = run(words_of({'ranks': 2, **bare, 'resume': 'whole/checkpoint-3', 'sample': 0, 'json': 'numbers.json',
                             'layers': 2, 'model_dim': 64}), folder)
        if equal((done.returncode, done.stderr), (0, ''), f'{what}: resumed without flags') and rest:
            equal(numbers_of(folder)['loss'], rest['loss'], f'{what}: resumed without flags')
        # The same with another method, which writes into the folder it came from.
        shutil.copytree(path('whole', 'checkpoint-3'), path('same', 'checkpoint-3'))
        again = good(folder, f'{what}: by ulysses', steps=6, resume='same', save='same', method='ulysses', **here)
        if again and again['config']['products'] == 'built-in' and whole['config']['dtype'] == 'f32':
            equal(again['loss'], whole['loss'][3:], f'{what}: by ulysses')
        equal(os.listdir(path('same')), ['checkpoint-6'], f'{what}: the newest stays')
        if whole['config']['ranks'] == 4:
            fewer = [good(folder, f'{what}: on 2 ranks', steps=6, resume='whole/checkpoint-3', ranks=2, dtype=here.get(
                'dtype')) for _ in range(2)]
            if all(fewer):
                equal(fewer[0]['loss'], fewer[1]['loss'], f'{what}: on 2 ranks, twice')
                near(fewer[0]['loss'], whole['loss'][3:], 1e-4, f'{what}: on 2 ranks')
        for name in ('whole', 'rest', 'same'):
            shutil.rmtree(path(name))

    for flags, want in [({}, [7]), ({'save_every': 2}, [7]), ({'save_every': 2, 'keep': 2}, [6, 7]),
                        ({'save_every': 3, 'keep': 1000}, [3, 6, 7]),
                        ({'save_every': 3, 'keep': 0}, [3, 6, 7]), ({'save_every': 7, 'keep': 3}, [7])]:
        good(folder, f'kept: {flags}', steps=7, save='kept', **flags)
        equal(sorted(os.listdir(path('kept'))), [f'checkpoint-{n}' for n in want], f'kept: {flags}')
        shutil.rmtree(path('kept'))


def cross_entropy(path, targets, vocab):
    data = read(path)
    length = struct.unpack('<H', data[8:10])[0]
    equal(data[:8], b'\x93NUMPY\x01\x00', 'the head of the logits')
    check(f'({len(targets)}, {vocab})' in data[10:10 + length].decode(), f'shape of the logits: {data[10:138]}')
    values = array.array('f', data[10 + length:])
    total = 0
    for i, target in enumerate(targets):
        row = values[i * vocab:(i + 1) * vocab]
        top = max(row)
        total += top + math.log(sum(math.exp(v - top) for v in row)) - row[target]
    return total / len(targets)


def npy(values, descr='<i4', shape=None):
    head = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape or f'({len(values)},)'}, }}"
    head = head.ljust(117) + '\n'
    kind = {'<i4': 'i', '<i8': 'q', '<f4': 'f'}[descr]
    data = array.array(kind, list(values)).tobytes()
    return b'\x93NUMPY\x01\x00' + struct.pack('<H', len(head)) + head.encode() + data


def test_loading(folder):
    """--load starts anew with the weights; logits must see the same model."""
    def path(*names):
        return os.path.join(folder, *names)

    text = read(BOOK)[1000:1065]
    write(path('window'), text)  # one window: every step has it
    write(path('ids4.npy'), npy(text[:64]))
    write(path('ids8.npy'), npy(text[:64], '<i8'))
    for what, flags in [('tied', {'kv_heads': 4}), ('untied, qk-norm', {'kv_heads': 4, 'untied': True, 'qk_norm': True,
                                                                        'vocab': 300}),
                        ('shared key/value heads', {'kv_heads': 1, 'attention_bias': 'qkvo', 'rope_theta': 300, 'norm_eps': 0.01})]:
        first = good(folder, f'{what}: first', data='window', steps=12, save='out', save_every=11, keep=2, lr=3e-3,
                     **flags)
        anew = good(folder, f'{what}: anew', data='window', steps=1, load='out/checkpoint-11', seed=5)
        if not first or not anew:
            continue
        equal(anew['first_step'], 1, f'{what}: starts anew')
        equal(anew['loss'], first['loss'][11:], f'{what}: the loss after --load')
        equal(anew['config']['model_dim'], 64, f'{what}: the model after --load')
        newest = good(folder, f'{what}: the newest', data='window', steps=1, load='out')
        check(newest and newest['loss'][0] < anew['loss'][0], f'{what}: --load takes not the newest')
        half = good(folder, f'{what}: in bf16', data='window', steps=1, load='out/checkpoint-11', dtype='bf16')
        near(half['loss'] if half else [], anew['loss'], 1e-2, f'{what}: loaded into bf16')
        outs = []
        for ids, more in [('ids4.npy', {}), ('ids8.npy', {'ranks': 2}), ('ids4.npy', {'ranks': 4}),
                          ('ids4.npy', {'ranks': 4, 'method': 'ulysses'}), ('ids4.npy', {'ranks': 3})]:
            done = run(words_of({'load': 'out/checkpoint-11', 'ids': ids, 'out': 'out.npy', **more}), folder, LOGITS)
            if check((done.returncode, done.stderr) == (0, ''), f'{what}: logits {more}: {done.stderr}'):
                outs.append(read(path('out.npy')))
        if outs and anew['config']['products'] == 'built-in':
            check(all(out == outs[0] for out in outs), f'{what}: logits differ with the ranks or the method')
        mean = cross_entropy(path('out.npy'), text[1:], first['config']['vocab'])
        near([mean], anew['loss'], 1e-5, f'{what}: the loss by the logits')
        for method, more in [('zigzag', {'ranks': 3}), ('upipe-ring', {'ranks': 4}), ('stripe', {'ranks': 2}),
                             ('fpdt', {'ranks': 3, 'segments': 5}), ('upipe-fpdt', {'ranks': 2})]:
            done = run(words_of({'load': 'out/checkpoint-11', 'ids': 'ids4.npy', 'out': 'out.npy', 'method': method,
                                 **more}), folder, LOGITS)
            if check((done.returncode, done.stderr) == (0, ''), f'{what}: logits by {method}: {done.stderr}'):
                mean = cross_entropy(path('out.npy'), text[1:], first['config']['vocab'])
                near([mean], anew['loss'], 1e-5, f'{what}: the loss by the logits by {method}')
        shutil.rmtree(path('out'))

    good(folder, 'a model', save='m')
    base = {'load': 'm', 'ids': 'ids4.npy', 'out': 'bad.npy'}
    for name, data in [('text.npy', text), ('empty.npy', b''), ('float.npy', npy([1.0] * 64, '<f4')),
                       ('two.npy', npy(text[:64], shape='(8, 8)')),
                       ('huge.npy', npy(text[:64], shape='(9223372036854775807,)')),
                       ('minus.npy', npy(text[:64], shape='(-1,)'))]:
        write(path(name), data)
        failed(folder, words_of({**base, 'ids': name}), 1, [name, 'no .npy file'], f'ids: {name}', program=LOGITS)
    write(path('short.npy'), npy(text[:64], shape='(65,)'))
    failed(folder, words_of({**base, 'ids': 'short.npy'}), 1, ['short.npy', '64', '65'], program=LOGITS)
    for name, bad in [('above.npy', 256), ('below.npy', -1), ('far.npy', 2**40)]:
        write(path(name), npy([1, bad], '<i8'))
        failed(folder, words_of({**base, 'ids': name}), 1, [name, 'token 1 is', str(bad), '256'], program=LOGITS)
    # what nobody writes to is not waited for, in any file's place
    found = path('m', next(name for name in os.listdir(path('m')) if name.startswith('checkpoint-')))
    for place in ('config.json', 'model.safetensors', 'model.safetensors.index.json'):
        waits = path('waits')
        shutil.copytree(found, waits, ignore=shutil.ignore_patterns(place, 'model.*'))
        os.mkfifo(os.path.join(waits, place))
        failed(folder, words_of({**base, 'load': 'waits'}), 1, [place, 'no regular file'], place, program=LOGITS)
        failed(folder, ['--load', 'waits', *([] if place != 'config.json' else ['--plan'])], 1, [place, 'no regular file'])
        shutil.rmtree(waits)
    os.mkfifo(path('pipe.npy'))
    failed(folder, words_of({**base, 'ids': 'pipe.npy'}), 1, ['pipe.npy', 'no regular file'], program=LOGITS)
    os.remove(path('pipe.npy'))
    for more, status, words in [({'load': 'nowhere'}, 1, ['nowhere']), ({'ids': 'nothing'}, 1, ['nothing']),
                                ({'ranks': 65}, 1, ['64', '65']), ({'ranks': 0}, 2, ["'0'"]), ({'out': 'm'}, 1, ['m']),
                                ({'out': 'ids4.npy'}, 1, ['ids4.npy', 'replace', '--ids']),
                                ({'out': None}, 2, ['--out']),
                                ({'method': 'rings'}, 2, ['rings']), ({'dtype': 'f16'}, 2, ['f16']),
                                ({'method': 'ulysses', 'chunk': 4}, 2, ['contradict', '4']),
                                ({'out': 'a/b/c'}, 1, ['a/b/c'])]:
        failed(folder, words_of({**base, **more}), status, words, program=LOGITS)
    # What is read is not replaced, by whatever name, and what is no number is not written.
    os.link(path('m', 'checkpoint-4', 'config.json'), path('other'))
    shutil.copytree(path('m', 'checkpoint-4'), path('parts'))
    os.rename(path('parts', 'model.safetensors'), path('parts', 'part'))
    names = safetensors(path('parts', 'part'))[1]
    write(path('parts', 'model.safetensors.index.json'), json.dumps({'weight_map': {n: 'part' for n in names}}).encode())
    for load, out in [('m', 'm/checkpoint-4/model.safetensors'), ('m/checkpoint-4', 'm/checkpoint-4/config.json'),
                      ('m', 'other'), ('parts', 'parts/part'), ('parts', 'parts/model.safetensors.index.json')]:
        failed(folder, words_of({**base, 'load': load, 'out': out}), 1, [out, 'replace a file of the model'], program=LOGITS)
        for flag in ('json', 'trace'):
            failed(folder, given(load=load, **{flag: out}), 1, [f'--{flag} {out} would replace a file of the model'])
    patched(path('m', 'checkpoint-4'), path('nan'), 'model.norm.weight', struct.pack('<f', float('nan')))
    failed(folder, words_of({**base, 'load': 'nan'}), 1, ['logits of token 0 are not finite'], program=LOGITS)
    # Names in files may hold what a terminal would obey.
    odd = '\x1b]0;owned\x07\x9b31m\x7f'
    shutil.copytree(path('m', 'checkpoint-4'), path('odd'))
    changed_header(path('odd', 'model.safetensors'),
                   lambda head: head.update({odd: head.pop('model.norm.weight')}))
    write(path('parts', 'model.safetensors.index.json'), json.dumps({'weight_map': {odd: '../' + odd}}).encode())
    for load in ('odd', 'parts'):
        for done in (failed(folder, words_of({**base, 'load': load}), 1, [r'\\x1b\]0;owned\\x07\\xc2\\x9b31m\\x7f'],
                            program=LOGITS),
                     failed(folder, given(load=load), 1, [r'\\x1b\]0;owned'])):
            check(all(ord(c) >= 32 for c in done.stderr.strip()), f'{load}: control characters: {done.stderr!r}')


# What Qwen2 says of itself on Hugging Face, but for the sizes.
QWEN2 = {'architectures': ['Qwen2ForCausalLM'], 'attention_dropout': 0.0, 'bos_token_id': 151643, 'eos_token_id': 151643,
         'hidden_act': 'silu', 'hidden_size': 64, 'initializer_range': 0.02, 'intermediate_size': 96,
         'max_position_embeddings': 131072, 'max_window_layers': 24, 'model_type': 'qwen2', 'num_attention_heads': 2,
         'num_hidden_layers': 2, 'num_key_value_heads': 1, 'rms_norm_eps': 1e-6, 'rope_theta': 1000000.0,
         'sliding_window': 131072, 'tie_word_embeddings': True, 'torch_dtype': 'bfloat16', 'use_cache': True,
         'use_sliding_window': False, 'vocab_size': 300}


def write_qwen2(folder, config, tensors):
    """tensors: name -> (shape, numbers), of which bf16 keeps the upper halves."""
    os.makedirs(folder)
    write(os.path.join(folder, 'config.json'), json.dumps(config).encode())
    head, data = {'__metadata__': {'format': 'pt'}}, b''
    for name, (shape, numbers) in tensors.items():
        piece = array.array('f', numbers).tobytes()
        piece = b''.join(piece[i + 2:i + 4] for i in range(0, len(piece), 4))
        head[name] = {'dtype': 'BF16', 'shape': shape, 'data_offsets': [len(data), len(data) + len(piece)]}
        data += piece
    text = json.dumps(head).encode()
    write(os.path.join(folder, 'model.safetensors'), struct.pack('<Q', len(text)) + text + data)


def test_qwen2(folder):
    """A Qwen2 as Hugging Face has it is trained: its biases count, are saved, and do not decay."""
    def path(*names):
        return os.path.join(folder, *names)

    def biases(name):
        tensors = safetensors(path(name, 'model.safetensors'))[1]
        return {one: t for one, t in tensors.items() if one.endswith('.bias')}

    draw = random.Random(7)
    sizes = {'model_dim': 64, 'ff_dim': 96, 'vocab': 300, 'head_dim': 32, 'heads': 2, 'kv_heads': 1, 'layers': 2,
             'qk_norm': False, 'untied': False, 'attention_bias': 'qkv'}
    model = {}
    for name, shape in tensors_wanted(sizes).items():
        middle, width = (0, 0.1) if len(shape) == 2 else (0, 1) if name.endswith('.bias') else (1, 0.1)
        model[name] = (shape, [draw.gauss(middle, width) for _ in range(math.prod(shape))])
    plain = {name: t for name, t in model.items() if not name.endswith('.bias')}
    still = {name: t if name in plain else (t[0], [0] * t[0][0]) for name, t in model.items()}
    llama = {**QWEN2, 'architectures': ['LlamaForCausalLM'], 'model_type': 'llama'}
    write_qwen2(path('qwen2'), QWEN2, model)
    write_qwen2(path('still'), QWEN2, still)
    write_qwen2(path('llama'), llama, plain)
    text = read(BOOK)[1000:1065]
    write(path('window'), text)
    write(path('ids.npy'), npy(text[:64]))
    run_of = {'data': 'window', 'tokens': 64, 'lr': 0, 'min_lr': 0, 'steps': 1}
    got = {(name, ranks, method): good(folder, f'{name} on {ranks}: {method}', load=name, ranks=ranks, method=method, **run_of)
           for name, ranks, method in [('qwen2', 1, 'upipe'), ('qwen2', 2, 'upipe'), ('qwen2', 2, 'ulysses'), ('qwen2', 4, 'usp'),
                                       ('qwen2', 2, 'fpdt'), ('still', 2, 'upipe'), ('llama', 2, 'upipe')]}
    if not all(got.values()):
        return
    base = got['qwen2', 2, 'upipe']
    equal([base['config'][key] for key in sizes], list(sizes.values()), 'the model of config.json')
    for (name, ranks, method), numbers in got.items():
        if name == 'qwen2':
            near(numbers['loss'] + numbers['grad_norm'], base['loss'] + base['grad_norm'], 1e-4, f'{method} on {ranks}')
    if base['config']['products'] == 'built-in':
        equal(got['qwen2', 2, 'ulysses']['loss'], base['loss'], 'ulysses: the loss')
    equal(got['still', 2, 'upipe']['loss'], got['llama', 2, 'upipe']['loss'], 'biases of 0: the loss')
    check(abs(base['loss'][0] - got['llama', 2, 'upipe']['loss'][0]) > 1e-2, 'biases make no difference')
    for more in ({'ranks': 2}, {'ranks': 3, 'method': 'zigzag'}):
        done = run(words_of({'load': 'qwen2', 'ids': 'ids.npy', 'out': 'out.npy', **more}), folder, LOGITS)
        if check((done.returncode, done.stderr) == (0, ''), f'logits {more}: {done.stderr}'):
            near([cross_entropy(path('out.npy'), text[1:], 300)], base['loss'], 1e-5, f'the loss by the logits {more}')
    prompt = text[:20].decode()
    write(path('prompt.npy'), npy(text[:20]))
    done = run(words_of({'load': 'qwen2', 'ids': 'prompt.npy', 'out': 'out.npy', 'ranks': 1}), folder, LOGITS)
    if check((done.returncode, done.stderr) == (0, ''), f'logits of the prompt: {done.stderr}'):
        row = array.array('f', read(path('out.npy'))[-1200:])[:256]
        likeliest = bytes([row.index(max(row))]).decode(errors='backslashreplace')
        done = run(words_of({**run_of, 'load': 'qwen2', 'ranks': 2, 'sample': 1, 'temperature': 0, 'prompt': prompt}), folder)
        equal(done.stdout.split(prompt)[-1], likeliest + '\n', 'the byte after the prompt')
    # What is saved is what was read, in f32; and after a step with whatever decay the same.
    good(folder, 'qwen2: saved', load='qwen2', save='same', dtype='bf16', **run_of)
    words = {name: (t[0], t[1], b''.join(t[2][i + 2:i + 4] for i in range(0, len(t[2]), 4)))
             for name, t in biases('same/checkpoint-1').items()}
    equal(words, {name: ('F32', t[1], t[2]) for name, t in biases('qwen2').items()}, 'biases that were read and saved')
    moved = {**run_of, 'lr': 1e-3, 'min_lr': 1e-3}
    for decay in (0, 100):
        good(folder, f'decay {decay}', load='qwen2', save=f'decay{decay}', sample=4, weight_decay=decay, **moved)
    few, many = (safetensors(path(f'decay{decay}', 'checkpoint-1', 'model.safetensors'))[1] for decay in (0, 100))
    for name, t in few.items():
        equal(t == many[name], len(t[1]) == 1, f'{name} with and without decay')
    check(all(t != few[name] for name, t in biases('same/checkpoint-1').items()), 'a step moves no bias')
    anew = [good(folder, f'new: {bias}', attention_bias=bias, steps=2) for bias in ('none', 'qkv', 'qkvo')]
    if all(anew):
        equal([numbers['loss'][0] for numbers in anew[1:]], anew[0]['loss'][:1] * 2, 'the loss of new biases')
        check(len({numbers['loss'][1] for numbers in anew}) == 3, 'new biases do not learn')
    one = 'model.layers.1.self_attn.k_proj.bias'
    write_qwen2(path('without'), QWEN2, {name: t for name, t in model.items() if name != one})
    write_qwen2(path('with'), QWEN2, {**model, one.replace('k_proj', 'o_proj'): ([64], [0] * 64)})
    write_qwen2(path('sliding'), {**QWEN2, 'use_sliding_window': True}, model)
    for name, said in ('without', [one, 'missing']), ('with', ['o_proj.bias is no tensor']), ('sliding', ['use_sliding_window']):
        failed(folder, given(load=name), 1, said)
        failed(folder, words_of({'load': name, 'ids': 'ids.npy', 'out': 'bad.npy'}), 1, said, program=LOGITS)


# ---- stopped on the way ----


def heed_signals():
    """Whoever runs the tests in the background may have had some ignored, and a program inherits that."""
    for ends in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ends, signal.SIG_DFL)


def test_signals(folder):
    for number, (ends, flags) in enumerate([(signal.SIGINT, {}), (signal.SIGTERM, {'dtype': 'bf16'}),
                                            (signal.SIGHUP, {'ranks': 4, 'sample': 5, 'method': 'usp'})]):
        save = f'save{number}'
        args = given(steps=100000, progress=True, save=save, json='stopped.json', **EVEN, **flags)
        with subprocess.Popen([TRAIN, *args], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                              encoding='utf-8', preexec_fn=heed_signals) as process:
            for line in process.stderr:
                if line.startswith('step 5/'):
                    process.send_signal(ends)
        equal(process.returncode, 128 + ends, f'{ends.name}: status')
        names = os.listdir(os.path.join(folder, save))
        if not check(len(names) == 1 and re.fullmatch(r'checkpoint-\d+', names[0]), f'{ends.name}: {names}'):
            continue
        at = int(names[0].split('-')[1])
        stopped = numbers_of(folder, 'stopped.json')
        equal(len(stopped['loss']), at, f'{ends.name}: steps that were done and saved')
        check(5 <= at < 100000, f'{ends.name}: stopped after {at} steps')
        whole = good(folder, f'{ends.name}: whole', steps=at + 3, **EVEN, **flags)
        rest = good(folder, f'{ends.name}: resumed', steps=at + 3, resume=save, **EVEN, **flags)
        if whole and rest:
            equal(stopped['loss'] + rest['loss'], whole['loss'], f'{ends.name}: the losses')
            equal(stopped['grad_norm'] + rest['grad_norm'], whole['grad_norm'], f'{ends.name}: the gradients')
    # In the sample too; the numbers are written. Signals that come in one burst, of whatever kind, are one wish.
    for more in ([], [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]):
        args = given(steps=2, progress=True, sample=1000000, save='sampled', json='sampled.json')
        with subprocess.Popen([TRAIN, *args], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                              encoding='utf-8', preexec_fn=heed_signals) as process:
            for line in process.stderr:
                if line.startswith('step 2/'):
                    while not os.path.isdir(os.path.join(folder, 'sampled', 'checkpoint-2')):
                        time.sleep(0.01)
                    time.sleep(0.3)
                    for number in [signal.SIGINT, *more]:
                        process.send_signal(number)
                        time.sleep(0.005)
        # Those that come before the first one's handler has run are handled last first.
        check(process.returncode - 128 in [signal.SIGINT, *more], f'stopped in the sample, {more}: {process.returncode}')
        equal(len(numbers_of(folder, 'sampled.json')['loss']), 2, f'what a stopped sample leaves, {more}')
        shutil.rmtree(os.path.join(folder, 'sampled'))
    # The same in the steps, as timeout does it: to the process and to its group at once.
    args = given(steps=100000, progress=True, save='burst', json='burst.json', **EVEN)
    with subprocess.Popen([TRAIN, *args], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                          encoding='utf-8', preexec_fn=heed_signals, start_new_session=True) as process:
        for line in process.stderr:
            if line.startswith('step 5/'):
                process.send_signal(signal.SIGTERM)
                os.killpg(process.pid, signal.SIGTERM)
    equal((process.returncode, line), (128 + signal.SIGTERM, 'train: ended by a signal: Terminated\n'), 'a burst in a step')
    names = os.listdir(os.path.join(folder, 'burst'))
    equal(names, [f'checkpoint-{len(numbers_of(folder, "burst.json")["loss"])}'], 'a burst in a step: checkpoints')
    # A second later another one ends the program at once: here in a step of some minutes, in which it sleeps meanwhile.
    args = given(steps=1, layers=1, model_dim=8, tokens=131072, save='long', json='long.json')
    with subprocess.Popen([TRAIN, *args], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                          preexec_fn=heed_signals) as process:
        while len(os.listdir(f'/proc/{process.pid}/task')) < 3:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.1)
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGCONT)
    equal(process.returncode, -signal.SIGHUP, 'a second signal, a second later: status')
    # The folder was given back by its death, and is another's.
    good(folder, 'after a death', steps=1, save='long')
    equal(os.listdir(os.path.join(folder, 'long')), ['checkpoint-1'], 'after a death: what is there')


def test_two_writers(folder):
    """A folder of checkpoints is one training's: the second is refused, the first goes on."""
    args = given(steps=100000, progress=True, save='s', **EVEN)
    with subprocess.Popen([TRAIN, *args], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                          encoding='utf-8', preexec_fn=heed_signals) as process:
        for line in process.stderr:
            if not line.startswith('step 2/'):
                continue
            for flags in ({'save': 's'}, {'save': './s/'}, {'save': 's', 'ranks': 1, 'json': 'x.json'}):
                failed(folder, given(**flags), 1, ['s/?: another training writes its checkpoints there'])
            process.send_signal(signal.SIGINT)
    equal(process.returncode, 130, 'the first of two trainings: status')
    equal([name[:11] for name in os.listdir(os.path.join(folder, 's'))], ['checkpoint-'], 'the first of two trainings')
    names = os.listdir(os.path.join(folder, 's'))
    failed(folder, given(save='s'), 1, [f's holds s/{names[0]} already'])


def test_kills(folder):
    steps = 10
    begin = time.monotonic()
    whole = good(folder, 'not killed', steps=steps, save='whole', save_every=1, **EVEN)
    if whole is None:
        return
    seconds = time.monotonic() - begin
    save = os.path.join(folder, 'save')
    chance = random.Random(1)
    resumed = 0
    saved = re.compile(r'checkpoint-\d+|\.checkpoint-\d+\.old')
    for number in range(20):
        names = os.listdir(save) if os.path.isdir(save) else []
        there = [name for name in names if saved.fullmatch(name)]
        if f'checkpoint-{steps}' in names:
            shutil.rmtree(save)
            there = []
        more = {'resume': 'save'} if there else {}
        with subprocess.Popen([TRAIN, *given(steps=steps, save='save', save_every=1, **EVEN, **more)], cwd=folder,
                              stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, encoding='utf-8') as process:
            time.sleep(chance.uniform(0, seconds))
            process.kill()
            sentence = process.stderr.read()
        check(process.returncode in (0, -signal.SIGKILL), f'kill {number}: {process.returncode} {sentence}')
        # What is there now can be resumed, by a run that leaves it as it is.
        names = os.listdir(save) if os.path.isdir(save) else []
        found = [int(re.search(r'\d+', name)[0]) for name in names if saved.fullmatch(name)]
        if not found:
            failed(folder, given(steps=steps, resume='save', **EVEN), 1, ['save'], f'kill {number}: nothing yet')
            continue
        if max(found) == steps:
            continue
        rest = good(folder, f'kill {number}', steps=max(found) + 1, resume='save', **EVEN)
        if rest:
            resumed += 1
            equal((rest['first_step'], rest['loss']), (max(found) + 1, whole['loss'][max(found):max(found) + 1]),
                  f'kill {number}: goes on at {max(found)}')
    check(resumed > 3, f'only {resumed} of 20 kills left something to resume')
    names = os.listdir(save) if os.path.isdir(save) else []
    if f'checkpoint-{steps}' not in names:
        more = {'resume': 'save'} if any(saved.fullmatch(name) for name in names) else {}
        rest = good(folder, 'after the kills', steps=steps, save='save', save_every=1, **EVEN, **more)
        if rest:
            equal(rest['loss'], whole['loss'][rest['first_step'] - 1:], 'after the kills')
        equal(os.listdir(save), [f'checkpoint-{steps}'], 'after the kills: what is there')
    name = os.path.join(f'checkpoint-{steps}', 'model.safetensors')
    same = read(os.path.join(save, name)) == read(os.path.join(folder, 'whole', name))
    check(same, 'after the kills: the weights differ')


# ---- bad input ----


def test_usage(folder):
    os.mkdir(os.path.join(folder, 'old'))
    for args, words in [
        (['--ranks', '12x'], ['--ranks', '12x']),
        (['--ranks', '-4'], ['--ranks', '-4']),
        (['--ranks', '0'], ['--ranks', "'0'", '256']),
        (['--ranks', '257'], ['257', '256']),
        (['--layers', '0'], ['--layers', "'0'"]),
        (['--layers', '999999999'], ['--layers', '4096', '999999999']),
        (['--model-dim', '16777217'], ['16777216', '16777217']),
        (['--vocab', '255'], ['256', '255']),
        (['--tokens', '9e18'], ['--tokens', '9e18']),
        (['--tokens', '9223372036854775808'], ['9223372036854775808']),
        (['--tokens', ' 64'], ["' 64'"]),
        (['--batch', '0x10'], ['--batch', '0x10']),
        (['--steps', '0'], ['--steps', "'0'"]),
        (['--lr', 'nan'], ['--lr', 'nan']),
        (['--lr', '-1'], ['--lr', '-1']),
        (['--lr', '1e999'], ['--lr', '1e999']),
        (['--beta1', '1'], ['--beta1', "'1'"]),
        (['--rope-theta', '0'], ['--rope-theta', "'0'"]),
        (['--norm-eps', '0'], ['--norm-eps', "'0'"]),
        (['--seed', '-1'], ['--seed', '-1']),
        (['--deadline', '0'], ['--deadline', "'0'"]),
        (['--dtype', 'f16'], ['f32 or bf16', 'f16']),
        (['--method', 'rings'], ['--method', 'rings']),
        (['--method', 'usp', '--ring', '3'], ['--ranks 4', '--ring 3']),
        (['--method', 'zigzag', '--ring', '2'], ['--ring 2', 'zigzag', 'all ranks']),
        (['--ring', '2'], ['--ring 2', 'upipe', 'no ranks']),
        (['--method', 'zigzag', '--inner', '2'], ['--inner 2', 'no effect', 'zigzag']),
        (['--method', 'ulysses', '--overlap'], ['--overlap', 'no effect', 'ulysses']),
        (['--method', 'upipe', '--segments', '2'], ['--segments 2', 'no effect', 'upipe']),
        (['--method', 'fpdt', '--segments', '0'], ['--segments', '0']),
        (['--method', 'fpdt', '--chunk', '2'], ['--chunk 2', 'fpdt', 'all heads']),
        (['--method', 'allgather', '--chunk', '2'], ['--chunk 2', 'allgather', 'a group']),
        (['--window', '-1'], ['--window', "'-1'"]),
        (['--window', '8', '--qk-norm'], ['--window', '--qk-norm']),
        (['--window', '8', '--attention-bias', 'qkvo'], ['--window', '--attention-bias']),
        (['--qk-norm', '--attention-bias', 'qkv'], ['--qk-norm', '--attention-bias']),
        (['--attention-bias', 'q'], ['--attention-bias', 'none, qkv or qkvo', "'q'"]),
        (['--keep', '-1', '--save', 'x'], ['--keep', "'-1'"]),
        (['--tile-bytes', '99999999999999999999B'], ['99999999999999999999B']),
        (['--tile-bytes', '65536'], ['with its unit', "'65536'"]),
        (['--frobnicate'], ['--frobnicate']),
        (['--he', '4'], ['--he']),
        (['-r', '4'], ['-r']),
        (['4'], ["'4'"]),
        (['--tokens', '64', '--tokens', '64'], ['--tokens is given twice']),
        (['--method', 'ulysses', '--chunk', '8'], ['--chunk 8', 'ulysses']),
        (['--resume', 'old', '--load', 'old'], ['--resume', '--load', 'contradict']),
        (['--plan', '--trace', 'x'], ['--plan', '--trace']),
        (['--plan', '--lr', '1'], ['--plan', '--lr']),
        (['--plan', '--data', 'x'], ['--plan', '--data']),
        (['--plan', '--sample', '0'], ['--plan', '--sample']),
        (['--save-every', '2'], ['--save-every wants --save']),
        (['--keep', '2'], ['--keep wants --save']),
        (['--sample', '0', '--prompt', 'x'], ['--prompt', '--sample is 0']),
        (['--sample', '0', '--temperature', '1'], ['--temperature', '--sample is 0']),
        (['--json', 'x', '--trace', 'x'], ['same file, x']),
        (['--json', 'x', '--save', 'x'], ['x', '--save']),
        (['--trace', 'x', '--save', 'x'], ['x', '--save']),
        (['--lr', '0.1', '--min-lr', '0.2'], ['0.2', '0.1']),
        (['--steps', '5', '--warmup', '6'], ['6', '5']),
        (['--steps', '5', '--save-every', '6', '--save', 'x'], ['6', '5']),
    ]:
        failed(folder, args, 2, words)


def test_refusals(folder):
    outputs = {'json': 'numbers.json', 'trace': 'trace.json', 'save': 'save'}
    write(os.path.join(folder, 'empty'), b'')
    write(os.path.join(folder, 'text'), read(BOOK)[:64])
    os.mkfifo(os.path.join(folder, 'pipe'))
    for flags, words in [
        ({'data': 'missing'}, ['missing', 'No such file']),
        ({'data': 'empty'}, ['empty', 'is empty']),
        ({'data': 'text'}, ['text', '64 bytes', '65']),
        ({'data': folder}, ['no regular file']),
        ({'data': 'pipe'}, ['pipe', 'no regular file']),
        ({'data': '/dev/zero'}, ['no regular file']),
        ({'tokens': 2147483646}, ['388085', '2147483646']),
        ({'heads': 5, 'kv_heads': 2}, ['5', '2']),
        ({'method': 'upipe', 'ranks': 4, 'overlap': True}, ['--overlap', '4 heads at a time', 'one stage']),
        ({'method': 'fpdt', 'ranks': 2, 'segments': 1, 'overlap': True}, ['--overlap', 'one segment']),
        ({'kv_heads': 8}, ['4', '8']),
        ({'ranks': 4, 'tokens': 3}, ['3', '4']),
        ({'ranks': 4, 'tokens': 7, 'method': 'zigzag'}, ['7', '8', 'two parts']),
        ({'ranks': 4, 'method': 'double-ring', 'inner': 3}, ['4', '3']),
        ({'ranks': 3, 'heads': 4, 'method': 'upipe-naive'}, ['unsupported', '4', '3']),
        ({'method': 'fpdt', 'segments': 33}, ['64 tokens in 33 segments over 2 ranks']),
        ({'ranks': 3, 'method': 'upipe-fpdt'}, ['unsupported', 'segments', '2 stages', '3 ranks']),
        ({'chunk': 3}, ['3']),
        ({'chunk': 8}, ['8', '4']),
        ({'head_dim': 7}, ['7', '32', '256']),
        ({'head_dim': 264}, ['264']),
        ({'tile_bytes': '5B'}, ['5', '[0-9]{3}']),
        ({'untied': True, 'vocab': 2147483647}, ['GiB', '[0-9]']),
        ({'model_dim': 65536, 'head_dim': 256, 'ff_dim': 1000000}, ['GiB', '[0-9]']),
        ({'layers': 4096, 'model_dim': 16777216, 'head_dim': 256, 'ff_dim': 16777216}, ['[0-9]']),
        ({'resume': 'nowhere'}, ['nowhere', 'No such file']),
        ({'load': folder}, ['neither a config.json nor a checkpoint']),
        ({'json': 'missing/deeper'}, ['missing/deeper', 'No such file']),
        ({'trace': 'missing/deeper'}, ['missing/deeper', 'No such file']),
        ({'save': 'missing/deeper'}, ['missing/deeper', 'No such file']),
        ({'save': 'text'}, ['text', 'Not a directory']),
        ({'json': folder}, ['directory']),
        ({'json': '/dev/full'}, ['/dev/full']),
        ({'json': 'a' * 300}, ['too long']),
        ({'trace': './numbers.json'}, ['numbers.json', 'both']),
    ]:
        failed(folder, given(**{**outputs, **flags}), 1, words)
    shutil.copy(BOOK, os.path.join(folder, 'book'))
    os.symlink('book', os.path.join(folder, 'link'))
    failed(folder, given(data='book', json='link'), 1, ['link', 'replace the file of --data'])
    failed(folder, given(data='link', trace='book'), 1, ['book', 'replace the file of --data'])
    if os.geteuid() != 0:
        os.mkdir(os.path.join(folder, 'closed'), 0o500)
        for flag in ('json', 'trace', 'save'):
            failed(folder, given(**{flag: 'closed/x'}), 1, ['closed/x', 'Permission denied'])
        failed(folder, given(save='closed'), 1, ['closed', 'Permission denied'])
    else:
        print('left out: a folder that cannot be written to, as root may write everywhere')


def test_resume_refusals(folder):
    good(folder, 'a run', save='m', seed=3, batch=2)
    write(os.path.join(folder, 'other'), read(BOOK)[1:])
    write(os.path.join(folder, 'backwards'), read(BOOK)[::-1])
    base = {'resume': 'm', 'seed': 3, 'batch': 2, 'steps': 6}
    failed(folder, given(**base) + ['--layers', '3'], 1, ['--layers', 'm/checkpoint-4/config.json'])
    failed(folder, given(**base, attention_bias='qkv'), 1, ['--attention-bias', 'm/checkpoint-4/config.json'])
    failed(folder, given(**{**base, 'steps': 4}), 1, ['done 4 steps', 'says 4'])
    failed(folder, given(**{**base, 'steps': 2}), 1, ['done 4 steps', 'says 2'])
    for more, words in [({'seed': 4}, ['--seed 3', '--seed 4']), ({'tokens': 32}, ['--tokens 64', '--tokens 32']),
                        ({'batch': 1}, ['--batch 2', '--batch 1']), ({'dtype': 'bf16'}, ['f32', 'bf16']),
                        ({'data': 'other'}, ['388085', '388084']),
                        ({'data': 'backwards'}, ['another text than backwards', 'same length'])]:
        failed(folder, given(**{**base, **more, 'save': 'n', 'json': 'x.json'}), 1, words)
    for flags in ({'load': 'm'}, {}, {'resume': 'm/checkpoint-4', 'seed': 3, 'batch': 2, 'steps': 5, 'save': 'n'}):
        other = {'save': 'm', **flags}
        if other['save'] == 'n':
            shutil.copytree(os.path.join(folder, 'm'), os.path.join(folder, 'n'))
        failed(folder, given(**other), 1, [f'{other["save"]} holds', 'does not continue'])
    # The schedule that does not fit is the checkpoint's, and is called so.
    failed(folder, given(**base, lr=1e-5), 1, ["the checkpoint's --min-lr 0.0001 is above --lr 1e-05"])
    failed(folder, given(**base, min_lr=0.5), 1, ["--min-lr 0.5 is above the checkpoint's --lr 0.001"])
    # Another branch that goes on beside newer checkpoints: the next --resume would take those.
    shutil.copytree(os.path.join(folder, 'm', 'checkpoint-4'), os.path.join(folder, 'm', 'checkpoint-9'))
    failed(folder, given(**{**base, 'resume': 'm/checkpoint-4', 'save': 'm'}), 1,
           ['m holds m/checkpoint-9, which a later --resume m would take', 'follows m/checkpoint-4', 'save elsewhere'])
    good(folder, 'an older one, saved elsewhere', **{**base, 'resume': 'm/checkpoint-4', 'save': 'branch', 'steps': 5})


def changed_header(path, change):
    data = read(path)
    _, _, head, start = safetensors(path)
    change(head)
    text = json.dumps(head).encode()
    write(path, struct.pack('<Q', len(text)) + text + data[start:])


def test_broken(folder):
    """A checkpoint that is not what it should be is refused, by --load where it is about the model."""
    def path(*names):
        return os.path.join(folder, *names)

    good(folder, 'a run', save='m')
    whole = path('m', 'checkpoint-4')
    gate = 'model.layers.1.mlp.gate_proj.weight'
    model, optimizer = 'model.safetensors', 'optimizer.safetensors'

    def case(what, name, change, words):
        shutil.copytree(whole, path('broken'))
        at = path('broken', name)
        done = change(at)
        if done is not None:
            write(at, done)
        for flag in ['resume', 'load'] if name != optimizer else ['resume']:
            failed(folder, given(**{flag: 'broken'}, steps=6, save='n', json='x.json'), 1, words, f'{what}, --{flag}')
        shutil.rmtree(path('broken'))

    for name in (model, optimizer):
        data = read(os.path.join(whole, name))
        start = safetensors(os.path.join(whole, name))[3]
        for cut in (0, 4, 8, 9, start - 1, start, start + 1, len(data) // 2, len(data) - 1):
            case(f'{name} cut to {cut} bytes', name, lambda at, cut=cut, data=data: data[:cut], [name])
        case(f'{name} is longer', name, lambda at, data=data: data + b'x', [name])
        case(f'{name} is gone', name, lambda at: os.remove(at), [model.split('.', maxsplit=1)[0]
                                                                 if name == model else name])
        for length in (2**64 - 1, 2**63, 10**8 + 1, len(data), 0):
            case(f'{name}: a header of {length}', name,
                 lambda at, length=length, data=data: struct.pack('<Q', length) + data[8:], [name])
        case(f'{name}: no JSON', name, lambda at, data=data: data[:8] + b'!' + data[9:], [name])
        case(f'{name}: a list', name, lambda at: struct.pack('<Q', 8) + b'[]      ', [name])
    for name, prefix in ((model, ''), (optimizer, 'exp_avg.')):
        for what, change, words in [
            ('a shape', lambda t: t.update(shape=t['shape'][::-1]), [gate, '192', '64']),
            ('another dtype', lambda t: t.update(dtype='I32'), [gate, 'I32']),
            ('a dtype that is none', lambda t: t.update(dtype='F99'), ['F99']),
            ('a smaller shape', lambda t: t.update(shape=[1, 1]), [name]),
            ('a huge shape', lambda t: t.update(shape=[2**62, 4]), [name]),
            ('an overflowing shape', lambda t: t.update(shape=[2**32, 2**32]), [name]),
            ('a negative shape', lambda t: t.update(shape=[-1, -1]), [name]),
            ('offsets beyond the end', lambda t: t.update(data_offsets=[2**40, 2**40 + 49152]), [name]),
            ('offsets that go back', lambda t: t.update(data_offsets=t['data_offsets'][::-1]), [name]),
            ('no offsets', lambda t: t.pop('data_offsets'), [name]),
        ]:
            case(f'{name}: {what}', name,
                 lambda at, change=change: changed_header(at, lambda head: change(head[prefix + gate])), words)
        case(f'{name}: another name', name, lambda at: changed_header(at, lambda head: head.update(
            {'model.layers.9.mlp.gate_proj.weight': head.pop(prefix + gate)})), ['gate_proj'])
    for key, value in [('step', '-1'), ('step', 'x'), ('tokens', '1e3'), ('seed', '99999999999999999999'),
                       ('format_version', '2'), ('dtype', 'f16'), ('tokens', '0'), ('batch', '0'), ('steps', '0'),
                       ('tokens', str(2**63 - 1)), ('batch', str(2**31)), ('adam_eps', '0'), ('beta1', '1'), ('lr', '1e4'),
                       ('text_bytes', '1')]:
        case(f'{key} is {value}', optimizer, lambda at, key=key, value=value: changed_header(
            at, lambda head: head['__metadata__'].update({key: value})), [key, value[:20]])
    case('no metadata', optimizer, lambda at: changed_header(at, lambda head: head.pop('__metadata__')), ['missing'])

    config = json.loads(read(os.path.join(whole, 'config.json')))
    for change, words in [
        ({'hidden_act': 'gelu'}, ['hidden_act', 'gelu']),
        ({'rope_scaling': {'rope_type': 'llama3', 'factor': 8.0}}, ['rope_scaling', 'llama3']),
        ({'rope_scaling': {'type': 'linear', 'factor': 2.0}}, ['rope_scaling', 'linear']),
        ({'attention_bias': True}, ['q_proj.bias', 'missing']),
        ({'attention_bias': 1}, ['attention_bias']),
        ({'model_type': 'qwen2', 'architectures': ['Qwen2ForCausalLM']}, ['q_proj.bias', 'missing']),
        ({'model_type': 'gpt2'}, ['gpt2']),
        ({'num_hidden_layers': 3}, ['layers.2']),
        ({'num_hidden_layers': 1}, ['layers.1']),
        ({'num_hidden_layers': 0}, ['num_hidden_layers', '0']),
        ({'hidden_size': 2**40}, ['hidden_size', str(2**40)]),
        ({'hidden_size': '64'}, ['hidden_size']),
        ({'hidden_size': None}, ['hidden_size']),
        ({'intermediate_size': 128}, ['192', '128']),
        ({'num_key_value_heads': 3}, ['4', '3']),
        ({'vocab_size': 100}, ['100', '256']),
        ({'tie_word_embeddings': False}, ['lm_head']),
        ({'rms_norm_eps': -1}, ['rms_norm_eps', '-1']),
        ({'head_dim': 7}, ['head_dim', '7']),
    ]:
        case(f'config.json: {change}', 'config.json', lambda at, change=change: json.dumps(
            {**config, **change}).encode(), words)
    for text in (b'', b'{', b'[]', b'{"a": 1, "a": 2}', b'\xff\xfe', b'{} x', b'[' * 100000, b' ' * (1 << 24)):
        case(f'config.json: {text[:20]}', 'config.json', lambda at, text=text: text, ['config.json'])


# ---- what goes wrong on the way ----


def patched(source, target, name, pattern, file='model.safetensors'):
    """A copy of a checkpoint with a number of one tensor replaced."""
    shutil.copytree(source, target)
    at = os.path.join(target, file)
    data = bytearray(read(at))
    _, _, head, start = safetensors(at)
    begin = start + head[name]['data_offsets'][0]
    data[begin:begin + 4] = pattern
    write(at, data)


def test_not_finite(folder):
    def path(*names):
        return os.path.join(folder, *names)

    good(folder, 'a run', save='m')
    whole = path('m', 'checkpoint-4')
    for what, name, value in [('nan', 'model.layers.0.mlp.up_proj.weight', float('nan')),
                              ('inf', 'model.norm.weight', float('inf')),
                              ('huge', 'model.layers.1.self_attn.v_proj.weight', 3e38)]:
        patched(whole, path('bad'), name, struct.pack('<f', value))
        for ranks in (1, 4):
            failed(folder, given(load='bad', save='out', sample=3, ranks=ranks, deadline=60), 1,
                   ['step 1:', 'nothing was updated'], f'{what} in the weights')
        equal(os.path.exists(path('out')), False, f'{what}: a checkpoint')
        shutil.rmtree(path('bad'))
    # Of weights that are NaN the loss is the first to be told, the checkpoint that cannot be saved follows from it.
    patched(whole, path('bad', 'checkpoint-4'), 'model.norm.weight', struct.pack('<f', float('nan')))
    done = failed(folder, given(resume='bad', save='bad', steps=5), 1, ['not finite, and is not saved'], 'NaN resumed', lines=2)
    check(done.stderr.startswith('train: step 5: the loss is not a number'), f'NaN resumed: {done.stderr}')
    shutil.rmtree(path('bad'))
    # A state that makes the weights NaN in a step whose loss is finite: nothing is saved of it, nothing removed.
    patched(whole, path('nan', 'checkpoint-4'), 'exp_avg.model.norm.weight', struct.pack('<f', float('nan')),
            'optimizer.safetensors')
    for every in (1, 0):
        failed(folder, given(resume='nan', save='nan', steps=5, save_every=every), 1,
               ['nan/checkpoint-5: .*norm.weight is not finite, and is not saved'], f'NaN after a step, every {every}')
    done = failed(folder, given(resume='nan', save='nan', steps=6), 1, ['checkpoint-5'], 'NaN, then a step',
                  lines=2)
    check(done.stderr.startswith('train: step 6: the loss is not a number'), f'NaN, then a step: {done.stderr}')
    shutil.rmtree(path('nan'))
    # Too large a rate: what had been saved before stays, and so does the last state with a finite loss.
    for ranks in (2, 4):
        done = failed(folder, given(steps=60, lr=1000, clip=0, save='out', save_every=3, json='x.json', ranks=ranks,
                                    sample=3, deadline=60), 1, [r'step \d+:'], 'too large a rate', kept=False)
        last = int((re.search(r'step (\d+):', done.stderr) or [0, 0])[1]) - 1
        if not check(last > 1, f'too large a rate: {done.stderr}'):
            continue
        equal(sorted(os.listdir(path('out'))), sorted({f'checkpoint-{n}' for n in (last, last // 3 * 3) if n}),
              'too large a rate: checkpoints')
        equal(len(numbers_of(folder, 'x.json')['loss']), last, 'too large a rate: losses')
        failed(folder, given(steps=60, lr=1000, clip=0, resume='out', ranks=ranks), 1, [f'step {last + 1}:'],
               'too large a rate: goes on')
        for name in os.listdir(path('out')):
            done = run(given(steps=1, load=f'out/{name}', ranks=ranks), folder)
            check('cannot be' not in done.stderr and done.returncode in (0, 1), f'{name} is not whole: {done.stderr}')
            check_files(path('out', name), numbers_of(folder, 'x.json')['config'], int(name[11:]), name)
        shutil.rmtree(path('out'))
        os.remove(path('x.json'))


def limit_files(size):
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def test_disk(folder):
    good(folder, 'a run', save='save', steps=2)
    for name in ('numbers.json', 'trace.json'):
        write(os.path.join(folder, name), b'old')
    failed(folder, given(json='numbers.json'), 1, ['numbers.json', 'cannot be written'], 'no space for the numbers',
           preexec_fn=limit_files(1000))
    failed(folder, given(json='numbers.json', trace='trace.json'), 1, ['trace.json', 'cannot be written'],
           'no space for the trace', preexec_fn=limit_files(5000))
    for size in (100, 3000, 100000, 600000):
        failed(folder, given(resume='save', save='save', save_every=1, steps=6), 1, ['checkpoint-3', '[a-z]'],
               f'no space for a checkpoint beyond {size} bytes', preexec_fn=limit_files(size))
    failed(folder, given(resume='save', save='save', steps=6, method='usp', ranks=4), 1, ['checkpoint-6', '[a-z]'],
           'no space for a checkpoint of teams in a ring', preexec_fn=limit_files(3000))
    # What was trained until then is not lost.
    done = run(given(resume='save', save='save', save_every=2, steps=6, json='numbers.json'), folder,
               preexec_fn=limit_files(100000))
    equal((done.returncode, len(numbers_of(folder, 'numbers.json')['loss'])), (1, 2), 'a full disk after two steps')
    equal(sorted(os.listdir(os.path.join(folder, 'save'))), ['checkpoint-2'], 'checkpoints after a full disk')
    failed(folder, given(resume='save', save='save', steps=5), 1, ['checkpoint-5'], 'no space after a resume',
           preexec_fn=limit_files(100000))
    with open('/dev/full', 'w', encoding='utf-8') as full:
        failed(folder, given(), 1, ['table cannot be written', 'No space'], 'no space on stdout', stdout=full)
    reader, writer = os.pipe()
    os.close(reader)
    failed(folder, given(), 1, ['table cannot be written'], 'nobody reads stdout', stdout=writer)
    os.close(writer)
    # Ranks that happen to meet without sleeping never look at the clock: such a run is good, and another is tried.
    for _ in range(40):
        done = run(given(deadline='0.000001', tokens=512, ranks=4), folder)
        if done.returncode != 0:
            check(re.fullmatch('train: rank [0-3]: .*deadline.*\n', done.stderr) is not None, done.stderr)
            break
    else:
        check(False, 'no rank was late in 40 runs')


# ---- the plan, the trace, the sample ----


def test_plan(folder):
    shape = {'layers': 32, 'model_dim': 4096, 'heads': 32, 'kv_heads': 8, 'ff_dim': 14336, 'vocab': 128256,
             'untied': True, 'ranks': 8, 'dtype': 'bf16', 'tokens': 1048576}
    slopes = {}
    for method, activations in [('ulysses', 'ac'), ('ulysses', 'offload'), ('upipe', 'ac'), ('upipe', 'offload')]:
        done = run(words_of({**shape, 'method': method, 'plan': True, 'activations': activations, 'json': 'plan.json'}),
                   folder)
        equal((done.returncode, done.stderr), (0, ''), f'the plan of {method}')
        slopes[method, activations] = slope = numbers_of(folder, 'plan.json')['slope_units']
        found = re.search(r'peak +([\d.]+) +slab +([\d.]+)\n +host +([\d.]+) +slab +([\d.]+)', done.stdout)
        if not check(found is not None, f'no slopes: {done.stdout}'):
            return
        near([float(text) for text in found.groups()], list(slope.values()), 1e-2, f'{method}: slopes')
        near([slope['slab'], slope['host_slab']], [slope['peak'], slope['host']], 1e-6, f'{method}: holes')
        check(all(part in done.stdout for part in PARTS), f'{method}: a part is missing: {done.stdout}')
        os.remove(os.path.join(folder, 'plan.json'))
    for method in ('ulysses', 'upipe'):
        here, away = slopes[method, 'ac'], slopes[method, 'offload']
        equal((here['host'], away['host']), (0, 32), f'{method}: what is in the second pool')
        near([here['peak'] - away['peak']], [32], 1e-3, f'{method}: {here} and {away}')
    upipe, ulysses = slopes['upipe', 'offload']['peak'], slopes['ulysses', 'offload']['peak']
    check(upipe <= 5.1 and upipe < ulysses <= 6.6, f'slopes: {slopes}')
    # Many stages, and sizes that nobody would wait for.
    equal(run(words_of({'plan': True, 'layers': 1, 'heads': 64, 'kv_heads': 64, 'ranks': 1, 'chunk': 1}),
              folder).returncode, 0, 'a plan of 64 stages')
    failed(folder, words_of({'plan': True, 'model_dim': 8, 'tokens': 2147483644}), 1, ['dry run', '[0-9]e\\+'])
    done = run(words_of({**shape, 'ranks': 16, 'method': 'upipe-ring', 'ring': 4, 'plan': True}), folder)
    equal(done.returncode, 0, f'the plan of a ring: {done.stderr}')
    check('16 ranks in rings of 4, chunk 4' in done.stdout, f'the plan of a ring: {done.stdout}')
    # In many segments what a token adds to the device is little more than the stream.
    for activations in ('ac', 'offload'):
        done = run(words_of({**shape, 'method': 'upipe-fpdt', 'segments': 16, 'plan': True, 'json': 'plan.json',
                             'activations': activations}), folder)
        if not check((done.returncode, done.stderr) == (0, ''), f'the plan of segments: {done.stderr}'):
            return
        check('8 ranks, 16 segments, chunk 8' in done.stdout, f'the plan of segments: {done.stdout}')
        slopes[activations] = numbers_of(folder, 'plan.json')['slope_units']
        os.remove(os.path.join(folder, 'plan.json'))
    here, away = slopes['ac'], slopes['offload']
    check(1 <= away['peak'] <= away['slab'] <= 1.25, f'in segments: {away}')
    near([here['peak'] - away['peak'], away['host'] - here['host']], [32, 32], 1e-3, 'copies, in segments')
    check(away['host_slab'] <= 40.1, f'the second pool in segments: {away}')
    # Where the kernels will run makes a difference, but need not be there.
    done = run(words_of({**shape, 'method': 'upipe', 'plan': True, 'offload': True, 'device': 'cuda', 'json': 'plan.json'}),
               folder)
    if check((done.returncode, done.stderr) == (0, ''), f'the plan for a GPU: {done.stderr}'):
        slope = numbers_of(folder, 'plan.json')['slope_units']
        check(upipe < slope['peak'] <= slope['slab'] <= 5.35, f'the plan for a GPU: {slope}')
        os.remove(os.path.join(folder, 'plan.json'))
    # The largest rank is not always the first one.
    done = run(words_of({'layers': 2, 'model_dim': 3584, 'heads': 28, 'kv_heads': 4, 'head_dim': 128, 'ranks': 8,
                         'tokens': 65536, 'dtype': 'bf16', 'method': 'ulysses', 'plan': True, 'json': 'plan.json'}), folder)
    if check((done.returncode, done.stderr) == (0, ''), f'the plan of uneven heads: {done.stderr}'):
        plan = numbers_of(folder, 'plan.json')
        check(plan['rank'] > 0 and plan['all_ranks']['slab_bytes'] < 8 * plan['slab_bytes'], f'the largest rank: {plan}')
        os.remove(os.path.join(folder, 'plan.json'))
    # The plan is the run's.
    numbers = good(folder, 'as planned', offload=True, steps=1)
    done = run(words_of({**MODEL, 'tokens': 64, 'ranks': 2, 'offload': True, 'plan': True}), folder)
    for key in ('plan_bytes', 'host_bytes'):
        check(numbers and f' {numbers[key]} bytes' in done.stdout, f'{key} is not in the plan: {done.stdout}')
    equal(os.listdir(folder), ['numbers.json'], 'what a plan leaves')
    plan = words_of({**MODEL, 'tokens': 64, 'ranks': 2, 'offload': True, 'plan': True, 'json': 'plan.json'})
    equal(run(plan, folder).returncode, 0, 'a plan as JSON: status')
    planned = numbers_of(folder, 'plan.json')
    for key in ('plan_bytes', 'host_bytes', 'plan_sent_bytes', 'plan_moved_bytes', 'memory'):
        equal(planned[key], numbers and numbers[key], f'a plan as JSON: {key}')
    equal(set(planned), {'config', 'plan_bytes', 'slab_bytes', 'host_bytes', 'host_slab_bytes', 'plan_sent_bytes',
                         'plan_moved_bytes', 'memory', 'rank', 'all_ranks', 'slope_units', 'slope_bytes_all_ranks'},
          'keys of a plan')


def test_trace(folder):
    static = {'weights', 'vectors', 'gradients', 'moments', 'master', 'tokens', 'losses'}
    for flags in ({'ranks': 4, 'heads': 8, 'method': 'ulysses'}, {'dtype': 'bf16', 'ranks': 2, 'sample': 3},
                  {'ranks': 4, 'method': 'usp', 'tokens': 67}, {'ranks': 2, 'method': 'upipe-fpdt', 'segments': 3}):
        numbers = good(folder, 'traced', trace='trace.json', **flags)
        if numbers is None:
            continue
        events = json.loads(read(os.path.join(folder, 'trace.json')))
        equal({event['pid'] for event in events}, set(range(flags['ranks'])), 'ranks in the trace')
        for rank in range(flags['ranks']):
            spans, depth, live, peak, last = {}, 0, 0, 0, 0
            for event in (event for event in events if event['pid'] == rank):
                if 'ts' in event:
                    check(event['ts'] >= last, 'the trace goes back')
                    last = event['ts']
                if event['ph'] in 'BE':
                    depth += 1 if event['ph'] == 'B' else -1
                    check(0 <= depth <= 1, 'a phase within a phase')
                elif event['ph'] == 'b':
                    check(event['id'] not in spans, f'{event["id"]} begins twice')
                    spans[event['id']] = event
                    live += event['args']['bytes']
                    peak = max(peak, live)
                elif event['ph'] == 'e':
                    begin = spans.pop(event['id'], None)
                    check(begin is not None and begin['name'] == event['name'], f'{event["id"]} ends, not there')
                    live -= event['args']['bytes']
            equal(depth, 0, 'phases that are open at the end')
            equal({event['name'] for event in spans.values()} - static, set(), f'rank {rank}: never given back')
            parts = numbers['memory']['at_peak']
            if rank == 0:
                equal(peak, numbers['peak_bytes'], 'the peak by the trace')
                equal(live, sum(parts[part] for part in PARTS[:4]), 'what stays by the trace')


def test_sample(folder):
    prompt = 'And God said '
    wish = {'sample': 20, 'temperature': 0, 'prompt': prompt, 'steps': 3, 'ranks': 4}
    outs = [run(given(**{**wish, **more}), folder) for more in
            ({}, {}, {'method': 'ulysses'}, {'temperature': 0.9}, {'temperature': 0.9}, {'sample': 0, 'prompt': None,
                                                                                        'temperature': None})]
    equal([out.returncode for out in outs], [0] * 6, 'samples: status')
    texts = [out.stdout[out.stdout.find(prompt):] if prompt in out.stdout else '' for out in outs]
    check(all(len(text) > len(prompt) + 20 for text in texts[:5]), f'samples: {texts}')
    check(texts[0] == texts[1] == texts[2], f'the likeliest bytes differ: {texts[:3]}')
    check(texts[3] == texts[4] != texts[0], f'with the temperature: {texts[3:5]}')
    equal(texts[5], '', 'no sample')
    # What a terminal would obey is written as numbers, of the prompt and of bytes that nothing was learnt of.
    done = run(given(sample=100, temperature=5, prompt='\x1b[31m', steps=1), folder)
    check('\\x1b[31m' in done.stdout and all(c.isprintable() or c in '\n\t' for c in done.stdout),
          f'control characters: {done.stdout!r}')
    long = 'x' * 100 + 'In the beginning God created the heaven and the earth. And the earth was with'
    ends = [run(given(**{**wish, 'prompt': text}), folder) for text in (long, long[-64:], 'q' + long)]
    tails = [end.stdout.split(long[-64:])[-1] for end in ends]
    equal([end.returncode for end in ends], [0] * 3, 'a long prompt: status')
    check(tails[0] == tails[1] == tails[2] and len(tails[0]) > 20, f'only the context counts: {tails}')
    # Logits of a large vocabulary may be what takes most memory, on whichever rank the last token is.
    for ranks, start in [(4, 'x'), (4, 'x' * 60), (3, 'x' * 60)]:
        more = {'vocab': 200000, 'model_dim': 32, 'heads': 12, 'layers': 1, 'steps': 1, 'tokens': 72, 'sample': 2}
        done = run(given(**more, ranks=ranks, kv_heads=12, prompt=start), folder)
        check(done.returncode == 0, f'a large vocabulary, {ranks} ranks: {done.stderr}')
    # Segments of which a rank trains with unequally many tokens, and a context that is shorter than the sequence.
    done = run(given(method='fpdt', segments=3, ranks=3, tokens=301, sample=4), folder)
    equal((done.returncode, done.stderr), (0, ''), 'a sample in segments')
    # A text that is not cut: as much as the context can hold, and over its end.
    done = run(given(sample=80, tokens=64, ranks=1, prompt='a' * 63), folder)
    equal(done.returncode, 0, 'a sample over the end of the context')
    for method in METHODS:
        done = run(given(**{**wish, 'tokens': 67, 'method': method}), folder)
        check(done.returncode == 0 and len(done.stdout.split(prompt)[-1]) > 20, f'a sample by {method}: {done.stderr}')


def main():
    for test in (test_flags, test_usage, test_refusals, test_numbers, test_bits, test_methods, test_activations, test_zero, test_prefetch,
                 test_reduce_dtype, test_learning,
                 test_checkpoints, test_loading, test_qwen2, test_resume_refusals, test_broken, test_not_finite, test_disk,
                 test_signals, test_two_writers, test_kills, test_plan, test_trace, test_sample):
        begin = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            test(folder)
        if 'TEST_TIMES' in os.environ:
            print(f'{test.__name__}: {time.monotonic() - begin:.1f} s')
    return end('train')


if __name__ == '__main__':
    sys.exit(main())

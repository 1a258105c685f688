#!/usr/bin/env python3
"""test_train.py TRAIN LOGITS -- the program examples/train, and logits beside it, from the outside

UPipe and Ulysses must give the same bits and all methods the same losses, numbers must add up, a training that was
stopped anywhere must go on as if it had not been, and bad input must end in a sentence, a non-zero status and the files
as they were. Checkpoints are read here a second time, by the format's specification alone.
"""

import array
import fnmatch
import json
import math
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), 'lib'))
from checks import (check, equal, load, needed, other_python, python_with, read, run_command, run_tests, wait_for,  # pylint: disable=wrong-import-position
                    write)
from programs import (BOOK, METHODS, ODD_NAME, ODD_TEXT, TOP, flags_of, heed_signals, limit_files, near, npy,  # pylint: disable=wrong-import-position
                      refused, replay, safetensors, same, same_files, sentences, watched, words_of, write_header, write_model, write_tensors)

try:
    import numpy as np
except ImportError:
    other_python()
    sys.exit('test_train.py: no NumPy here to check results with: install python3-numpy')

TRAIN, LOGITS = (os.path.abspath(path) for path in sys.argv[1:3])
ROOT = {'config', 'first_step', 'loss', 'grad_norm', 'eval', 'tokens_per_s', 'peak_bytes', 'plan_bytes', 'slab_bytes',
        'host_bytes', 'plan_sent_bytes', 'plan_moved_bytes', 'sent_bytes_per_step', 'memory'}
MEASURED = {'text_bytes', 'products', 'kernels'}
SEGMENTED = METHODS[-2:]
SCHEDULES = ['cosine', 'linear', 'constant', 'wsd']
PARTS = ['weights', 'gradients', 'optimizer', 'tokens', 'checkpoints', 'stream', 'attention', 'mlp', 'loss', 'sum']
MODEL = {'layers': 2, 'model_dim': 64, 'heads': 4, 'kv_heads': 2}
FLAGS = flags_of('IN_TRAIN')
CONFIG = {name.replace('-', '_') for name in FLAGS} - {'help', 'version'}
RUN = {'tokens': 64, 'ranks': 2, 'steps': 4, 'sample': 0}
NAN = struct.pack('<f', math.nan)
LONG = 50 if os.environ.get('UPIPE_FULL') == '1' else 4  # steps of a long training
POINTER = b'version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab\nsize 12345\n'  # Git's, of a large file
EVEN = {'lr': 1e-3, 'min_lr': 1e-3, 'warmup': 0}  # a rate that does not depend on the number of steps


def alike(got, want, what, loss=1e-4, norm=None):
    near(got['loss'], want['loss'], f'{what}: loss', loss)
    near(got['grad_norm'], want['grad_norm'], f'{what}: grad_norm', norm or loss)


# ---- running ----


def given(**flags):
    """A small run's command line; with resume or load the folder says what the model is."""
    model = {} if flags.get('resume') or flags.get('load') else MODEL
    return words_of({**model, **RUN, **flags})


def run(args, folder, program=TRAIN, **more):
    return run_command([program, *args], cwd=folder, timeout=280, **more)


def quiet(args, folder, what, program=TRAIN):
    """A run without a word on stderr."""
    done = run(args, folder, program)
    needed((done.returncode, done.stderr) == (0, ''), f'{what}: {done.returncode} {done.stderr}')
    return done


def fnv(data):
    """FNV-1a of 64 bits: how a checkpoint knows its text."""
    value = 1469598103934665603
    for byte in data:
        value = (value ^ byte) * 1099511628211 & 2**64 - 1
    return value


def numbers_of(folder, name='numbers.json'):
    return load(os.path.join(folder, name))


def good(folder, what, **flags):
    """Trains, checks what holds for every run, returns the numbers."""
    done = run(given(json='numbers.json', **flags), folder)
    needed(done.returncode == 0, f'{what}: status {done.returncode}: {done.stderr}')
    equal(sentences(done.stderr), [], f'{what}: stderr')
    equal([name for name in os.listdir(folder) if '.tmp' in name], [], f'{what}: temporary files')
    numbers = numbers_of(folder)
    check_numbers(numbers, what)
    return numbers


def failed(folder, args, status, words, what=None, program=TRAIN, **more):
    return refused([program, *args], folder, status, words, what, timeout=280, **more)


def logits(what, folder, out='out.npy', **flags):
    """The file that the program writes of ids.npy, or of others."""
    quiet(words_of({'ids': 'ids.npy', 'out': out, **flags}), folder, f'{what}: logits {flags}', LOGITS)
    return read(out)


def no_logits(folder, words, status=1, **flags):
    return failed(folder, words_of({'ids': 'ids.npy', 'out': 'bad.npy', **flags}), status, words, program=LOGITS)


# ---- numbers ----


def held(c):
    """Tokens of a sequence on rank 0: its ring's share, then its team's of that; or of every segment."""
    def cut(n, parts, i):
        return n // parts * i + n % parts * i // parts

    n, rings, pieces, ranks = c['tokens'], c['ring'], c['segments'], c['ranks'] // c['replicas']
    if pieces:
        return sum(cut(cut(n, pieces, i + 1) - cut(n, pieces, i), ranks, 1) for i in range(pieces))
    if c['method'] == 'stripe':
        n = -(-n // rings)
    elif c['method'] == 'ring' or rings == 1:
        n = cut(n, rings, 1)
    else:
        n = cut(n, 2 * rings, 1) + n - cut(n, 2 * rings, 2 * rings - 1)
    return cut(n, ranks // rings, 1)


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


def is_trained(c, name):
    if c['lora']:
        return '.lora_' in name
    return c['train'] is None or any(fnmatch.fnmatchcase(name, pattern) for pattern in c['train'].split(','))


def units_of(c):
    """Elements of the matrices that are used together, half a layer, the embedding, the head: trained, and frozen."""
    units = ({}, {})
    for name, shape in tensors_wanted(c).items():
        if len(shape) == 2:
            unit = '.'.join(name.split('.')[:4]) if 'layers' in name else name
            kind = units[not is_trained(c, name)]
            kind[unit] = kind.get(unit, 0) + math.prod(shape)
    return units


def check_states(c, at_peak, element, what):
    """What rank 0 holds of weights, gradients and the optimizer; of the first two also what is gathered at the peak."""
    units, zero, away = units_of(c), c['zero'], c['offload_optimizer']
    all_vectors = sum(shape[0] for shape in tensors_wanted(c).values() if len(shape) == 1)
    vectors = sum(shape[0] for name, shape in tensors_wanted(c).items() if len(shape) == 1 and is_trained(c, name))
    whole, frozen = (sum(u.values()) for u in units)
    shard, frozen_shard = (sum(-(-n // c['ranks']) for n in u.values()) for u in units)
    most = max(sum(u.get(name, 0) for u in units) for name in {**units[0], **units[1]})
    adapted = c['lora'] is not None # a unit's matrices with their adapters, and their gradients
    weights = 0 if c['offload_weights'] else shard + frozen_shard if zero > 2 else whole + frozen
    gradients = 0 if away and zero > 1 else shard if zero > 1 else whole
    more = at_peak['weights'] - weights * element - all_vectors * 4
    check(0 <= more <= ((2 + c['zero_prefetch']) * (zero == 3) + 2 * adapted) * most * element,
          f'{what}: {more} bytes more of weights')
    more = at_peak['gradients'] - gradients * 4 - vectors * 4
    check(0 <= more <= (2 * (zero > 1) + adapted) * most * 4, f'{what}: {more} bytes more of gradients')
    states, vector_states = (shard, -(-vectors // c['ranks'])) if zero else (whole, vectors)
    states = 0 if away else states
    equal(at_peak['optimizer'], 8 * (states + vector_states) + (4 * states if c['dtype'] == 'bf16' else 0),
          f'{what}: optimizer')


def with_states(c, element, away):
    """Bytes of rank 0's second pool: `away` of activations, and the optimizer's, with gradients that are sharded. While it
    updates a unit, two tiles of what is not there are in the place of activations."""
    if not c['offload_optimizer']:
        return away
    trained, frozen = ([-(-n // c['ranks']) if c['zero'] else n for n in u.values()] for u in units_of(c))
    weights = element if c['offload_weights'] else 0
    tiles = 2 * min(max(trained, default=0), 2**20) * (element - weights + 4 * (c['zero'] < 2))
    states = sum(trained) * ((12 if element == 2 else 8) + 4 * (c['zero'] > 1))
    return states + sum(trained + frozen) * weights + max(away, tiles)


def check_numbers(numbers, what):
    c = numbers['config']
    equal(set(numbers), ROOT | ({'rope'} if c['rope_type'] != 'default' else set()), f'{what}: keys')
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
        equal(numbers['host_bytes'], with_states(c, element, away), f'{what}: the second pool')
    elif not c['segments']: # O and lse where a rank has more heads than its share
        check(away < numbers['host_bytes'] < 1.3 * away, f'{what}: the second pool has {numbers["host_bytes"]} bytes')
    elif c['tokens'] % (c['segments'] * c['ranks']) == 0 and c['kv_heads'] % c['ranks'] == 0 and is_plain(c):
        equal(numbers['host_bytes'], with_states(c, element, away + offloaded(c, rows)), f'{what}: the second pool')
    else:
        check(numbers['host_bytes'] > away + unit, f'{what}: the second pool has {numbers["host_bytes"]} bytes')
    equal(numbers['sent_bytes_per_step'], numbers['plan_sent_bytes'], f'{what}: bytes sent')
    check((numbers['sent_bytes_per_step'] > 0) == (c['ranks'] > 1), f'{what}: {numbers["sent_bytes_per_step"]} sent')


def test_numbers(folder):
    numbers = good(folder, 'defaults', data=BOOK)
    c = numbers['config']
    for key, want in {'method': 'upipe', 'ring': 1, 'inner': 0, 'segments': 0, 'chunk': 2, 'window': 0, 'head_dim': 32, 'ff_dim': 192,
                      'vocab': 256, 'untied': False, 'qk_norm': False, 'attention_bias': 'none', 'batch': 1, 'lr': 1e-3,
                      'min_lr': 1e-4, 'warmup': 1, 'weight_decay': 0.1, 'beta1': 0.9, 'beta2': 0.95, 'clip': 1, 'dtype': 'f32',
                      'device': 'cpu', 'seed': 1, 'activations': 'ac', 'zero': 1, 'zero_prefetch': False, 'reduce_dtype': 'f32', 'offload_optimizer': False, 'offload_weights': False,
                      'data': BOOK, 'save': None, 'resume': None, 'load': None, 'text_bytes': os.path.getsize(BOOK)}.items():
        equal(c[key], want, f'default of {key}')
    equal(numbers['first_step'], 1, 'the first step')
    check(abs(numbers['loss'][0] - math.log(256)) < 0.2, f'a new model has the loss {numbers["loss"][0]}')
    check(0.1 < numbers['grad_norm'][0] < 10, f'a new model has the gradient {numbers["grad_norm"][0]}')
    texts = json.loads(read('numbers.json'), parse_float=str)
    for text in texts['loss'] + texts['grad_norm']:
        check(float(text) == float(f'{float(text):.17g}') and len(text) >= 15, f'{text} has not all its digits')
    done = run(given(data=BOOK, steps=1), folder)
    check('loss 5.' in done.stdout and f'{numbers["peak_bytes"]} bytes' in done.stdout, f'the table: {done.stdout}')
    odd = os.path.join(os.fsencode(folder), ODD_NAME)
    shutil.copy(BOOK, odd)
    done = run([*given(steps=1, json='odd.json'), '--data', odd], folder)
    needed(done.returncode == 0, f'a path of odd bytes: {done.returncode} {done.stderr}')
    equal(os.path.basename(numbers_of(folder, 'odd.json')['config']['data']), ODD_TEXT, 'a path of odd bytes')


def test_flags(folder):
    done = run(['--help'], folder)
    equal((done.returncode, done.stderr), (0, ''), '--help')
    flags = set(re.findall(r'--([a-z][a-z0-9-]*)', done.stdout))
    equal(flags, set(FLAGS), 'what --help lists')
    check(len(FLAGS) > 50, f'{len(FLAGS)} flags are read from the table')
    for name in sorted(FLAGS.keys() - {'help', 'version'}):
        if FLAGS[name]:
            failed(folder, ['--' + name], 2, [f'--{name} wants a value'])
            failed(folder, ['--' + name, ''], 2, [f'--{name} is empty'])
        else:
            failed(folder, ['--' + name, '--' + name, '--frobnicate'], 2, [f'--{name} is given twice: the last one counts'], lines=2)
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
    write('short.txt', book[:64 + 64 + 21])  # the last window: rank 0 of 4 full, 1 partly
    for what, flags in [
        ('groups', {}),
        ('as many key/value heads', {'heads': 8, 'kv_heads': 8, 'ranks': 4, 'method': 'upipe', 'chunk': 4}),
        ('more ranks than key/value heads', {'heads': 8, 'kv_heads': 2, 'ranks': 4}),
        ('one key/value head, two heads a stage', {'heads': 8, 'kv_heads': 1, 'ranks': 4, 'chunk': 8}),
        ('all of the model', {'qk_norm': True, 'attention_bias': 'qkvo', 'untied': True, 'vocab': 300, 'head_dim': 40, 'ff_dim': 100,
                              'rope_theta': 500000, 'norm_eps': 1e-6, 'rope_type': 'yarn', 'rope_factor': 4, 'rope_original': 16}),
        ('unequal targets, biases', {'attention_bias': 'qkv', 'heads': 4, 'kv_heads': 4, 'ranks': 4, 'batch': 2, 'data': 'short.txt'}),
        ('unequal targets, batch 3, offload', {'ranks': 2, 'batch': 3, 'data': 'short.txt', 'offload': True}),
        ('three ranks', {'heads': 6, 'kv_heads': 3, 'ranks': 3, 'tokens': 63, 'layers': 3, 'data': 'short.txt'}),
        ('offload, small tiles', {'offload': True, 'tile_bytes': '200kB', 'tokens': 384}),
        ('one layer, one rank', {'layers': 1, 'ranks': 1, 'chunk': 2}),
        ('neither tokens nor heads divide', {'heads': 6, 'kv_heads': 2, 'ranks': 4, 'tokens': 67, 'batch': 2}),
        ('a window', {'heads': 8, 'kv_heads': 4, 'ranks': 4, 'window': 10, 'rope_type': 'dynamic', 'rope_factor': 2, 'rope_original': 16}),
    ]:
        chunk = flags.get('chunk')
        upipe = good(folder, f'{what}: upipe', **{**flags, 'method': 'upipe', 'chunk': chunk})
        ulysses = good(folder, f'{what}: ulysses', **{**flags, 'method': 'ulysses', 'chunk': None})
        if upipe['config']['products'] == 'built-in':  # a BLAS in place of it promises no equal bits
            same(upipe, ulysses, what)
        alike(upipe, ulysses, what)
        if upipe['config']['heads'] % upipe['config']['ranks'] == 0:
            check(upipe['peak_bytes'] <= ulysses['peak_bytes'], f'{what}: UPipe holds more')

    first = good(folder, 'first', steps=6, offload=False)
    same(good(folder, 'again', steps=6), first, 'twice the same')
    same(good(folder, 'offload', steps=6, offload=True), first, 'with offload')
    other = good(folder, 'another seed', steps=6, seed=2)
    for key in ('loss', 'grad_norm'):
        check(all(a != b for a, b in zip(other[key], first[key])), f'the seed makes no difference to {key}')
    for data in (BOOK, 'short.txt'):
        one, *more = [good(folder, f'{n} ranks', ranks=n, data=data, steps=5) for n in (1, 2, 4)]
        for n, numbers in zip((2, 4), more):
            alike(numbers, one, f'{n} ranks')

    half = [good(folder, f'bf16, {method}', dtype='bf16', method=method) for method in ('upipe', 'ulysses')]
    alike(*half, 'bf16', 1e-2, 5e-2)
    near(half[0]['loss'][:1], first['loss'][:1], 'bf16: the first loss', 1e-2)
    check(half[0]['loss'] != first['loss'][:4], 'bf16 makes no difference')


def test_methods(folder):
    """All methods train the same. Rings add in another order, as other numbers of ranks do: the tolerance is theirs."""
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
            same(beside, runs[method], f'{what}, where {method} overlaps')
        equal([runs[m]['config']['ring'] for m in METHODS], [1, 1, 1, 4, 4, 4, 4, 2, 2, 4, 1, 1], f'{what}: rings')
        equal(runs['double-ring']['config']['inner'], 2, f'{what}: ranks of an inner ring')
        equal([runs[m]['config']['segments'] for m in METHODS], [0] * 10 + [4, 4], f'{what}: segments')
    one, *more = [good(folder, f'one rank: {method}', method=method, ranks=1) for method in ('ulysses', 'zigzag', 'allgather')]
    for numbers in more:
        alike(numbers, one, 'a ring of one')
    # More ranks than heads, and teams whose heads do not divide.
    small = {'heads': 4, 'kv_heads': 2, 'ranks': 6, 'tokens': 35}
    base = good(folder, 'six ranks: ulysses', method='ulysses', **small)
    for method, more in [('upipe', {}), ('ring', {}), ('allgather', {}), ('upipe-ring', {'ring': 2}),
                         ('usp', {'ring': 3}), ('double-ring', {'inner': 3}), ('fpdt', {'segments': 5}),
                         ('upipe-fpdt', {'segments': 1})]:
        alike(good(folder, f'six ranks: {method}', method=method, **small, **more), base, f'six ranks: {method}')
    half = [good(folder, f'bf16: {method}', method=method, ranks=4, dtype='bf16') for method in METHODS]
    for method, numbers in zip(METHODS, half):
        alike(numbers, half[0], f'bf16: {method}', 1e-2, 5e-2)
    # The second pool makes no difference in segments either; what is offloaded there is not on the device.
    cut = {'heads': 8, 'kv_heads': 4, 'tokens': 96, 'segments': 3, 'batch': 2, 'method': 'upipe-fpdt'}
    here, there = (good(folder, f'segments, offload {offload}', offload=offload, **cut) for offload in (False, True))
    base = good(folder, 'as many tokens at once', **{**cut, 'method': 'upipe', 'segments': None})
    same(there, here, 'segments with offload')
    alike(here, base, 'segments')
    check(here['peak_bytes'] < base['peak_bytes'], 'segments hold more than all at once')
    check(there['peak_bytes'] < here['peak_bytes'], 'segments hold more with offload')
    # A checkpoint does not know the method.
    whole = good(folder, 'usp', method='usp', ranks=4, steps=6, save='usp', save_every=3, keep=2)
    for method in METHODS:
        rest = good(folder, f'usp, then {method}', method=method, ranks=4, steps=6, resume='usp/checkpoint-3')
        near(rest['loss'], whole['loss'][3:], f'usp, then {method}', 1e-4)
    # What the window does, and that config.json keeps it.
    wide, narrow = (good(folder, f'a window of {n}', window=n, steps=6, save=f'w{n}', save_every=3, keep=2)
                    for n in (64, 8))
    full = good(folder, 'no window', steps=6)
    rest = good(folder, 'a window, resumed', steps=6, resume='w8/checkpoint-3')
    near(wide['loss'], full['loss'], 'a window of the whole sequence', 1e-4)
    check(all(abs(a - b) > 1e-4 for a, b in zip(narrow['loss'], full['loss'])), 'a window makes no difference')
    equal((rest['config']['window'], rest['loss']), (8, narrow['loss'][3:]), 'a window, resumed')
    check_files('w8/checkpoint-6', narrow['config'], 6, 'a window')
    failed(folder, given(resume='w8/checkpoint-3', steps=6, window=9), 1, ['--window', 'config.json'])


def test_accumulate(folder):
    """Micro-batches are the step of one batch with their sequences, whose memory they do not take."""
    write('short.txt', read(BOOK)[:5 * 64 + 21])  # an epoch of five windows and a part: it ends within a step
    for method, more in [('upipe', {'method': 'upipe'}), ('segments', {'method': 'upipe-fpdt', 'segments': 2}),
                         ('a ring', {'method': 'usp', 'ranks': 4}), ('ahead', {'zero_prefetch': True})]:
        flags = {'data': 'short.txt', **more}
        once = good(folder, f'{method}: at once', batch=4, **flags, **({'zero': 3} if method == 'ahead' else {}))
        stages = [good(folder, f'{method}: ZeRO {zero}', batch=2, accumulate=2, zero=zero, **flags)
                  for zero in ([3] if method == 'ahead' else range(4))]
        for numbers in stages:
            alike(numbers, once, f'{method}: accumulated', 1e-5)
        for one, two in zip(stages[::2], stages[1::2]):
            same(one, two, f'{method}: stages whose sums have one order')
    one, three = (good(folder, f'accumulate {n}', accumulate=n) for n in (1, 3))
    equal(three['peak_bytes'], one['peak_bytes'], 'whole gradients: the memory of one micro-batch')
    whole = good(folder, 'accumulate', data='short.txt', accumulate=3, steps=6, save='k', save_every=3, keep=2)
    check_files('k/checkpoint-6', whole['config'], 6, 'accumulate')
    for ranks in (2, 3):
        rest = good(folder, f'accumulate, resumed on {ranks}', data='short.txt', steps=6, ranks=ranks, resume='k/checkpoint-3')
        equal(rest['config']['accumulate'], 3, 'accumulate is the checkpoint\'s')
        near(rest['loss'], whole['loss'][3:], f'accumulate, resumed on {ranks}', 0 if ranks == 2 else 1e-4)


def matrices(path):
    """Weights and moments of a checkpoint that are no vectors."""
    return {name: data for part in ('model', 'optimizer') for name, (_, shape, data) in safetensors(f'{path}/{part}.safetensors')[1].items()
            if len(shape) == 2}


def test_replicas(folder):
    """Groups of ranks with sequences of their own are one group with the sequences of all."""
    write('short.txt', read(BOOK)[:5 * 64 + 21])  # an epoch ends within a step
    flags = {'data': 'short.txt', 'clip': 0, 'save_every': 1, 'keep': 0}
    for what, ranks, more in [('alone', 2, {}), ('upipe', 4, {'batch': 2}), ('a ring', 8, {'method': 'usp'}),
                              ('segments', 4, {'method': 'upipe-fpdt', 'segments': 2})]:
        one = good(folder, f'{what}: one replica', ranks=ranks // 2, accumulate=4, zero=2, save=f'{what} one', **flags, **more)
        stages = [good(folder, f'{what}: two replicas, ZeRO {zero}', ranks=ranks, replicas=2, accumulate=2, zero=zero,
                       save=f'{what} {zero}', **flags, **more) for zero in (range(4) if what == 'upipe' else [1, 3])]
        for numbers in stages:
            alike(numbers, one, f'{what}: replicas', 1e-5)
        if what == 'upipe':
            same(stages[0], stages[1], 'replicas: whole gradients')
            same(stages[2], stages[3], 'replicas: sharded gradients')
        # micro-batches in turn, and ranks in turn within each, are one chain of sums where gradients are sharded
        check(matrices(f'{what} one/checkpoint-1') == matrices(f'{what} 3/checkpoint-1'), f'{what}: other sums of gradients')
    plain, ahead = (good(folder, f'ahead: {on}', ranks=4, replicas=2, zero=3, zero_prefetch=on) for on in (False, True))
    same(ahead, plain, 'replicas: gathered ahead')
    whole = good(folder, 'replicas', data='short.txt', replicas=2, accumulate=3, steps=6, save='k', save_every=3, keep=2)
    check_files('k/checkpoint-6', whole['config'], 6, 'replicas')
    for ranks, replicas in [(2, 2), (6, 3), (2, 1), (4, 2)]:
        what = f'resumed on {ranks} ranks, {replicas} replicas'
        rest = good(folder, what, data='short.txt', steps=6, ranks=ranks, replicas=replicas, resume='k/checkpoint-3')
        equal(rest['config']['accumulate'], 6 // replicas, f'{what}: micro-batches')
        near(rest['loss'], whole['loss'][3:], what, 0 if ranks == replicas == 2 else 1e-4)
    for status, words, more in [(1, ['6 micro-batches', '--replicas 4'], {'ranks': 4, 'replicas': 4, 'resume': 'k', 'steps': 7}),
                                (1, ['--accumulate 3', '--accumulate 2'], {'replicas': 2, 'accumulate': 2, 'resume': 'k', 'steps': 7}),
                                (2, ['--ranks 4', '--replicas 3'], {'ranks': 4, 'replicas': 3}),
                                (2, ['--ranks 6', '--replicas 2', '--ring 2'], {'ranks': 6, 'replicas': 2, 'method': 'usp'}),
                                (2, ['1048576', '--replicas 2'], {'accumulate': 1 << 20, 'replicas': 2})]:
        failed(folder, given(**{'data': 'short.txt', **more}), status, words)


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
            same(good(folder, f'{what}, {activations}', activations=activations, **flags), base, f'{what}, {activations}')
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
            same(good(folder, f'{what}, zero {zero}', zero=zero, **{**few, **flags}), base, f'{what}, zero {zero}')
        for zero in (1, 3):
            same(good(folder, f'{what}, zero {zero}, offloaded', zero=zero, offload_optimizer=True, offload_weights=zero == 3,
                      **{**few, **flags}), base, f'{what}, zero {zero}, offloaded')
    flags = {**few, **EVEN, 'steps': 6, 'attention_bias': 'qkv'}
    base = good(folder, 'zero, six steps', **flags, zero=3, save='whole')
    for first, then, way, other in [(3, 0, {}, {}), (0, 2, {}, {'offload_optimizer': True}),
                                    (2, 3, {'offload_optimizer': True}, {'offload_optimizer': True, 'offload_weights': True})]:
        good(folder, f'zero {first}, three steps', **{**flags, 'steps': 3}, zero=first, save=f'zero{first}', **way)
        numbers = good(folder, f'zero {first}, then {then}', steps=6, tokens=few['tokens'], zero=then,
                       resume=f'zero{first}', save=f'zero{first}', **other)
        equal(numbers['loss'], base['loss'][3:], f'zero {first}, then {then}: losses')
        same_files(f'zero{first}/checkpoint-6', 'whole/checkpoint-6', f'zero {first}, then {then}')
    for words in ['--zero', '3'], ['--zero', '2', '--offload-optimizer']:
        failed(folder, ['--offload-weights', *words], 2, ['--offload-weights wants --zero 3 and --offload-optimizer'])
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
        same(ahead, base, what, keys=('loss', 'grad_norm', 'sent_bytes_per_step'))
        unit = 4 * 32 * max(3 * ahead['config']['ff_dim'], 4 * 4 * ahead['config']['head_dim'], ahead['config']['vocab'])
        more = ahead['peak_bytes'] - base['peak_bytes']
        check(0 < more <= unit, f'{what}: {more} bytes more at the peak')
    for zero in ([], ['--zero', '2']):
        failed(folder, ['--zero-prefetch', *zero], 2, ['--zero-prefetch', 'no effect', f'--zero {(zero or [0, 1])[1]}'])


def test_frozen(folder):
    """What is frozen has no gradient and no states, and keeps its bits; the gradients of the rest keep theirs."""
    few = {'tokens': 48, 'layers': 2, 'model_dim': 32, 'heads': 2, 'kv_heads': 2, 'clip': 0, **EVEN}

    def stored(folder, step, name):
        return {tensor: data for tensor, (_, _, data) in safetensors(f'{folder}/checkpoint-{step}/{name}.safetensors')[1].items()}

    for what, train, flags in [('a half', '*.self_attn.*', {'ranks': 3, 'heads': 3, 'kv_heads': 3}),
                               ('some', '*.q_proj.weight,*1.input_layernorm*,model.embed_tokens.weight', {'untied': True, 'dtype': 'bf16'}),
                               ('norms', '*norm*', {}), ('a tied table', 'model.embed_tokens.weight', {'zero': 3, 'ranks': 1}),
                               ('segments', '*_proj.bias,lm_head.weight',
                                {'method': 'fpdt', 'segments': 2, 'attention_bias': 'qkv', 'untied': True, 'activations': 'offload,grad'})]:
        flags = {**few, **flags}
        whole = good(folder, f'{what}: all trained', **flags, steps=1, save=what + '/whole')
        one = good(folder, f'{what}: one step', **flags, steps=1, save=what + '/one', train=train)
        equal(one['loss'], whole['loss'], f'frozen, {what}: the first loss')
        trained = [name for name in tensors_wanted(one['config']) if is_trained(one['config'], name)]
        moments, all_moments = stored(what + '/one', 1, 'optimizer'), stored(what + '/whole', 1, 'optimizer')
        masters = [n for n in trained if f'master.{n}' in all_moments]
        equal(sorted(moments), sorted([p + n for n in trained for p in ('exp_avg.', 'exp_avg_sq.')] + ['master.' + n for n in masters]),
              f'frozen, {what}: states')
        equal([name for name in moments if moments[name] != all_moments[name]], [], f'frozen, {what}: gradients')
        squares = sum((x / (1 - one['config']['beta1'])) ** 2 for n in trained for x in array.array('f', moments['exp_avg.' + n]))
        check(abs(math.sqrt(squares) / one['grad_norm'][0] - 1) < 1e-5, f'frozen, {what}: the norm')
        saved = [sum(n['memory']['at_peak'][part] for part in ('gradients', 'optimizer')) for n in (whole, one)]
        if one['config']['zero'] < 2:
            equal(whole['peak_bytes'] - one['peak_bytes'], saved[0] - saved[1], f'frozen, {what}: bytes saved')
        long = good(folder, f'{what}: 20 steps', **flags, steps=20, save=what + '/long', train=train, zero_prefetch=flags.get('zero') == 3)
        first, last = (stored(f'{what}/{name}', step, 'model') for name, step in (('one', 1), ('long', 20)))
        equal(sorted(name for name in last if last[name] != first[name]), sorted(trained), f'frozen, {what}: what has moved')
        for zero in (0, 2, 3):
            same(good(folder, f'{what}, zero {zero}', **{**flags, 'zero': zero}, steps=2, train=train),
                 {key: long[key][:2] for key in ('loss', 'grad_norm')}, f'frozen, {what}, zero {zero}')
    away = {**few, 'zero': 3, 'offload_optimizer': True, 'offload_weights': True, 'steps': 1}
    moved = [good(folder, f'frozen, away: {train}', **away, train=train) for train in (None, '*.self_attn.*')]
    # weights come from the second pool whether they are trained or not; gradients go there
    equal(moved[0]['plan_moved_bytes'] - moved[1]['plan_moved_bytes'],
          sum(units_of(moved[1]['config'])[1].values()) // 2 * 4, 'frozen: bytes moved')
    flags = {**few, 'train': '*.down_proj.weight,*norm*'}
    whole = good(folder, 'frozen, six steps', **flags, steps=6, save='six')
    good(folder, 'frozen, three steps', **flags, steps=3, save='three')
    rest = good(folder, 'frozen, three more', tokens=48, steps=6, clip=0, resume='three', save='three', zero=3)
    equal((rest['loss'], rest['config']['train']), (whole['loss'][3:], flags['train']), 'frozen: resumed')
    same_files('three/checkpoint-6', 'six/checkpoint-6', 'frozen, after a resume')
    failed(folder, given(resume='six', tokens=48, steps=9, train='*norm*'), 1, ['--train .*down_proj.*, not --train .*norm'])
    failed(folder, given(resume='some/whole', tokens=48, steps=9, train='*norm*'), 1, ['--train not given, not --train .*norm'])
    for train, *words in [('*.q_proj.weight,*.qq', "no tensor of the model has a name like '.*qq'"), (',', "''"), ('x' * 1024, 'at most 1023')]:
        failed(folder, given(train=train), 2, ['--train', *words])
    # no matrix is trained: nothing is in the second pool
    for zero in (1, 3):
        numbers = good(folder, f'vectors alone, zero {zero}', **few, zero=zero, offload_optimizer=True, steps=2, train='*norm*')
        equal((numbers['host_bytes'], numbers['plan_moved_bytes']), (0, 0), f'vectors alone, zero {zero}: of the second pool')


def product(a, b, columns):
    """[n][k] by [k][columns], numbers in rows, in f64."""
    depth = len(b) // columns
    return [math.fsum(a[i + k] * b[k * columns + j] for k in range(depth)) for i in range(0, len(a), depth) for j in range(columns)]


def turned(a, columns):
    return [x for j in range(columns) for x in a[j::columns]]


def floats(path):
    """{name: (shape, numbers)} of a file of f32"""
    return {name: (shape, array.array('f', data)) for name, (_, shape, data) in safetensors(path)[1].items()}


def write_floats(path, tensors):
    """The reverse."""
    write_tensors(path, {name: ('F32', shape, numbers.tobytes()) for name, (shape, numbers) in tensors.items()})


def test_lora(folder):
    """Gradients of adapters are those of the merged matrices, in all that is trained, multiplied with the other one."""
    few = {'tokens': 48, 'layers': 2, 'model_dim': 32, 'heads': 2, 'kv_heads': 2, 'clip': 0, 'data': 'window', **EVEN}
    alpha, rank = 6, 4
    write('window', read(BOOK)[:49]) # each micro-batch has the same tokens

    def stored(folder, step, name):
        return floats(f'{folder}/checkpoint-{step}/{name}.safetensors')

    quiet(given(**few, steps=0, save='base'), folder, 'the base')
    loaded = {**{key: few[key] for key in ('tokens', 'clip', 'data')}, **EVEN, 'layers': None}
    lora = {**loaded, 'lora': f'{rank}:{alpha}:q,k,v,o,gate,up,down'}
    one = good(folder, 'adapters', **lora, load='base', steps=2, accumulate=2, save='lora', save_every=1, keep=2)
    whole = good(folder, 'without adapters', **loaded, load='base', steps=1)
    equal(one['loss'][0], whole['loss'][0], 'adapters: the first loss')
    base, first = stored('base', 0, 'model'), stored('lora', 1, 'model')
    equal([name for name in base if base[name] != first[name]], [], 'adapters: what has moved beside them')
    tensors = {}
    for name, (shape, numbers) in base.items():
        a, b = (first.get(name.replace('weight', f'lora_{which}.weight')) for which in 'AB')
        if a:
            more = product(b[1], a[1], shape[1])
            numbers = array.array('f', [w + alpha / rank * x for w, x in zip(numbers, more)])
        tensors[name] = shape, numbers
    os.makedirs('merged')
    shutil.copy('base/checkpoint-0/config.json', 'merged')
    write_floats('merged/model.safetensors', tensors)
    merged = good(folder, 'merged', **loaded, load='merged', steps=1, save='all')
    near(merged['loss'], one['loss'][1:], 'adapters: the loss of merged matrices', 1e-6)
    gradients = {name[8:]: [x / (1 - 0.9) for x in numbers] for name, (_, numbers) in stored('all', 1, 'optimizer').items() if 'exp_avg.' in name}
    before, after = (stored('lora', step, 'optimizer') for step in (1, 2))
    for name, (shape, _) in base.items():
        a, b = (name.replace('weight', f'lora_{which}.weight') for which in 'AB')
        if a not in first:
            continue
        want = {a: product(turned(first[b][1], rank), gradients[name], shape[1]),
                b: product(gradients[name], turned(first[a][1], shape[1]), rank)}
        for one_of, numbers in want.items():
            key = 'exp_avg.' + one_of
            got = [(y - 0.9 * x) / (1 - 0.9) for x, y in zip(before[key][1], after[key][1])]
            largest = max(map(abs, numbers)) * alpha / rank
            off = max(abs(x - alpha / rank * y) for x, y in zip(got, numbers))
            check(off <= 1e-5 * largest, f'{one_of}: {off} off, of {largest}')
        check(not any(before['exp_avg.' + a][1]) and any(first[a][1]), f'{a}: B is zero at first, A is not')
    for what, flags in [('3 ranks', {'ranks': 3, 'heads': 3, 'kv_heads': 3}), ('bf16', {'dtype': 'bf16', 'untied': True}),
                        ('segments', {'method': 'fpdt', 'segments': 2, 'attention_bias': 'qkvo', 'activations': 'blocks:2,grad'})]:
        flags = {**few, 'steps': 2, 'data': BOOK, 'lora': '3:8:k,o,down', **flags}
        stages = [good(folder, f'adapters, {what}, zero {zero}', **flags, zero=zero, zero_prefetch=zero == 3) for zero in range(4)]
        for stage in stages[1:]:
            same(stage, stages[0], f'adapters, {what}')
    flags = {**few, 'data': BOOK, 'lora': '2'}
    six = good(folder, 'adapters, six steps', **flags, steps=6, save='six')
    good(folder, 'adapters, three', **flags, steps=3, save='three')
    rest = good(folder, 'adapters, three more', tokens=48, steps=6, resume='three', save='three', zero=3)
    equal((rest['loss'], rest['config']['lora']), (six['loss'][3:], '2'), 'adapters: resumed')
    same_files('three/checkpoint-6', 'six/checkpoint-6', 'adapters, after a resume')
    failed(folder, given(resume='six', tokens=48, steps=9, lora='3'), 1, ['--lora 2, not --lora 3'])
    failed(folder, given(load='six', steps=9), 1, ['lora_A.weight is no tensor of this model'])
    failed(folder, given(lora='2', train='*norm*'), 2, ['--lora', '--train would have no effect'])
    for words in ['0', '1025', 'x', '2:0', '2:x', '2:8:', '2:8:q,w', '2:8:q,', '2:8:q,q', '2:8:q:v', '2:8:' + 'q,' * 40 + 'q']:
        failed(folder, given(lora=words), 2, ['--lora is RANK:ALPHA:TARGETS'])


def drawn_of(folder, what, kinds_n, starts_n, **flags):
    """The tensors of a new model, which are of so many kinds, and its matrices, of which no two begin with the same numbers."""
    for dtype in ('f32', 'bf16'):
        quiet(given(**flags, dtype=dtype, save=what + dtype), folder, f'{what}, {dtype}')
    _, stored, _, _ = safetensors(f'{what}bf16/checkpoint-0/model.safetensors')
    kinds, starts = set(), set()
    for name, (shape, numbers) in floats(f'{what}f32/checkpoint-0/model.safetensors').items():
        kind, root = re.sub(r'\d+', '*', name), len(numbers) ** 0.5
        kinds.add(kind)
        words = [w + 0x7fff + (w >> 16 & 1) >> 16 for w in array.array('I', numbers.tobytes())]
        equal(stored[name][2] == (array.array('H', words) if len(shape) == 2 else numbers).tobytes(), True, f'{name}: the same of bf16')
        if kind.endswith('.bias') or '.lora_B' in kind or 'norm' in kind:
            equal(set(numbers), {1 if 'norm' in kind else 0}, f'{name}: numbers')
            continue
        starts.add(tuple(numbers[:4]))
        is_lora = '.lora_A' in kind  # drawn evenly, up to a bound
        deviation = (3 * shape[1]) ** -0.5 if is_lora else 0.02 / (6 ** 0.5 if re.search(r'\.(o|down)_proj', kind) else 1)
        check(abs(sum(numbers)) < 5 * deviation * root, f'{name}: a mean of {sum(numbers) / len(numbers)}')
        near([(sum(x * x for x in numbers) / len(numbers)) ** 0.5], [deviation], f'{name}: deviation', 4 / root)
        within, far = (sum(abs(x) < bound * deviation for x in numbers) / len(numbers) for bound in (1, 2))
        near([within, far], [3 ** -0.5, 1] if is_lora else [0.6827, 0.9545], f'{name}: shares within one and two deviations', 4 / root)
    equal((len(kinds), len(starts)), (kinds_n, starts_n), f'{what}: kinds of tensors, and matrices that begin apart')


def test_initial(folder):
    """What a new model starts from: normal numbers of GPT-2's deviation, less where a layer adds to the stream; norms 1, biases 0."""
    flags = {'layers': 3, 'untied': True, 'qk_norm': True, 'attention_bias': 'qkvo', 'steps': 0}
    drawn_of(folder, 'whole', 18, 23, **flags)
    drawn_of(folder, 'adapters', 18 + 14, 23 + 21, **flags, lora='8:8:q,k,v,o,gate,up,down')


def bad_tensors(folder, loaded, saved):
    """An adapter in bad/, whose config leaves it to the tensors, with other ones than in `saved`."""
    path, first = 'bad/adapter_model.safetensors', 'base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight'

    def fails(words, **more):
        """Merged by train and logits, in which it is the adapter's file that is named."""
        words = [r'^\w+: (rank \d: )?bad/adapter_model\.\w+: ' + words]
        failed(folder, given(**{**loaded, 'load_adapter': 'bad', 'merge': True, 'steps': 0, **more}), 1, words, kept=False)
        no_logits(folder, words, load='base', load_adapter='bad', **more)

    write_floats(path, {name: tensor for name, tensor in saved.items() if 'layers.1.self_attn.q' not in name})
    fails('.*layers.1.self_attn.q_proj.lora_A.weight is missing')
    write_floats(path, {})
    fails('has no tensor of a projection')
    write_floats(path, {**saved, first: ([0], array.array('f'))})
    fails('.*q_proj.lora_A.weight is empty, as where ZeRO-3')
    for value in math.nan, math.inf, 3e38: # which is finite, and no sum with it
        wrong = {name: (shape, array.array('f', [value] * len(numbers))) for name, (shape, numbers) in saved.items()}
        write_floats(path, wrong if value == 3e38 else {**saved, first: (saved[first][0], array.array('f', [value, *saved[first][1][1:]]))})
        fails(r'merged into model.layers.\d.\w+.(q|o|down)_proj.weight it gives a value that is not finite$')
        fails(r'merged into model.layers.\d.\w+.(q|o|down)_proj.weight it gives a value that is not finite in bf16$', dtype='bf16')
    write(path, POINTER)
    fails('cannot be opened: it is a Git LFS pointer')
    os.rename(path, 'bad/adapter_model.bin')
    fails('is of pickles, which are not read')


def test_adapter(folder):
    """PEFT's files: what a checkpoint has; read, merged, continued; and what is refused of them."""
    few = {'tokens': 48, 'layers': 2, 'model_dim': 32, 'heads': 2, 'kv_heads': 2}
    quiet(given(**few, steps=0, save='base'), folder, 'the base')
    loaded = {'tokens': 48, 'layers': None, 'load': 'base'}
    peft = 'base_model.model.'
    for what, flags in [('f32', {}), ('bf16', {'dtype': 'bf16', 'ranks': 3, 'zero': 3, 'offload_optimizer': True})]:
        flags = {**loaded, **flags}
        good(folder, f'adapter, {what}', **flags, lora='4:6:q,o,down', lr=0.1, save='all' + what, save_adapter='some/' + what)
        kept = floats(f'all{what}/checkpoint-4/{"model" if what == "f32" else "optimizer"}.safetensors')
        kept = {name.removeprefix('master.'): t for name, t in kept.items() if '.lora_' in name and 'exp_avg' not in name}
        saved = floats(f'some/{what}/adapter_model.safetensors')
        check(saved == {peft + name: t for name, t in kept.items()}, f'adapter, {what}: not the numbers of the checkpoint')
        quiet(given(**flags, load_adapter='some/' + what, steps=0, save_adapter='again' + what), folder, f'adapter, {what}: again')
        for name in sorted(os.listdir('some/' + what)):
            check(read(f'again{what}/{name}') == read(f'some/{what}/{name}'), f'adapter, {what}: {name} is not what was read')
    equal(sorted(os.listdir('some/f32')), ['adapter_config.json', 'adapter_model.safetensors'], 'adapter: files')
    config = load('some/f32/adapter_config.json')
    for key, value in {'peft_type': 'LORA', 'task_type': 'CAUSAL_LM', 'r': 4, 'lora_alpha': 6, 'bias': 'none', 'lora_dropout': 0,
                       'target_modules': ['q_proj', 'o_proj', 'down_proj']}.items():
        equal(config.get(key), value, f'adapter: {key}')
    adapted = {**loaded, 'load_adapter': 'some/f32'}
    # slices of five ranks begin within rows of the adapted matrices
    quiet(given(**adapted, merge=True, steps=0, save='merged', ranks=5, zero=3), folder, 'merging')
    base, merged = (floats(f'{name}/checkpoint-0/model.safetensors') for name in ('base', 'merged'))
    saved = floats('some/f32/adapter_model.safetensors')
    equal(merged.keys(), base.keys(), 'merged: names')
    for name, (shape, numbers) in base.items():
        a, b = (saved.get(peft + name.replace('weight', f'lora_{which}.weight')) for which in 'AB')
        want = [w + 6 / 4 * x for w, x in zip(numbers, product(b[1], a[1], shape[1]))] if a else numbers
        check(not a or merged[name] != base[name], f'merged: {name} has not changed')
        check(all(abs(x - y) <= 2**-23 * abs(y) for x, y in zip(merged[name][1], want)), f'merged: {name}')
    write('ids.npy', npy(read(BOOK)[:40]))
    merging = logits('merged as it is read', folder, load='base', load_adapter='some/f32')
    check(logits('merged', folder, load='merged') == merging != logits('the base', folder, load='base'), 'logits of merged weights')
    one = good(folder, 'adapter, trained on', **adapted, steps=1)
    equal(one['config']['lora'], '4:6:q,o,down', 'adapter: trained on')
    for what, flags in [('merged', {'load': 'merged'}), ('merged as it is read', {'merge': True, 'lora': '2'})]:
        near(good(folder, what, **{**adapted, 'load_adapter': None if 'load' in flags else 'some/f32', **flags}, steps=1)['loss'],
             one['loss'], f'{what}: the loss of the adapter', 1e-6)

    def put(change):
        write('bad/adapter_config.json', json.dumps({**config, **change}).encode())

    shutil.copytree('some/f32', 'bad')
    # cases/adapter_config.json has what a config may say: here is what depends on its tensors, and that it is refused here too
    for change, words in [({'use_dora': True}, 'use_dora is set, and not built'), ({'r': 3}, 'lora_A.weight has 2 dimensions, 4 x 32, not 2, 3 x 32'),
                          ({'target_modules': ['q_proj', 'v_proj']}, 'v_proj.lora_A.weight is missing'),
                          ({'target_modules': ['q_proj']}, 'has 12 tensors, not the 4')]:
        put(change)
        failed(folder, given(**loaded, load_adapter='bad'), 1, [words])
    for what, change in [('alpha over a root', {'use_rslora': True, 'lora_alpha': 3}), ('a pattern', {'target_modules': r'.*\.(q|o|down)_proj'})]:
        put(change)
        same(good(folder, what, **{**adapted, 'load_adapter': 'bad'}, steps=1), one, what)
        check(logits(what, folder, load='base', load_adapter='bad') == merging, f'{what}: logits')
    put({'target_modules': 'any'})
    bad_tensors(folder, loaded, saved)
    put({})
    write('bad/adapter_config.json', b'[]')
    failed(folder, given(**loaded, load_adapter='bad'), 1, ['is not a JSON object'])
    failed(folder, given(**loaded, load_adapter='nothing'), 1, ['adapter_config.json', 'cannot be read'])
    for status, words, flags in [(2, '--load-adapter wants --load', {**few, 'load_adapter': 'some/f32'}), (2, '--merge wants', {**loaded, 'merge': True}),
                                 (2, '--lora would have no effect', {**adapted, 'lora': '2'}), (2, '--train would', {**adapted, 'train': '*'}),
                                 (1, '--save-adapter wants', {**loaded, 'save_adapter': 'x'}), (1, 'File exists', {**adapted, 'save_adapter': 'base'}),
                                 (1, 'would replace a file', {**adapted, 'json': 'some/f32/adapter_config.json'})]:
        failed(folder, given(**flags), status, [words])


def test_reduce_dtype(folder):
    """Gradients that travel in bf16: fewer bytes, nearly the losses, and the same bits in every stage and every run."""
    few = {'tokens': 48, 'steps': 3, 'layers': 2, 'model_dim': 32, 'heads': 4, 'kv_heads': 4, 'ranks': 4}
    wide = good(folder, 'sums of f32', **few, reduce_dtype='f32')
    runs = [good(folder, f'sums of bf16, zero {zero}', **few, zero=zero, reduce_dtype='bf16') for zero in (0, 1, 2, 3, 3)]
    for numbers in runs[1:]:
        same(numbers, runs[0], f'sums of bf16, zero {numbers["config"]["zero"]}')
    check(wide['grad_norm'] != runs[1]['grad_norm'], 'sums of bf16 have the bits of f32')
    alike(runs[1], wide, 'sums of bf16', 1e-3, 2e-2)
    # of each unit three of four slices leave, 2 bytes an element instead of 4
    units = [256 * 32] + 2 * [4 * 4 * wide['config']['head_dim'] * 32, 3 * 32 * wide['config']['ff_dim']]
    equal(wide['sent_bytes_per_step'] - runs[1]['sent_bytes_per_step'], 2 * sum(units) * 3 // 4, 'sums of bf16: bytes sent')
    failed(folder, given(reduce_dtype='f16'), 2, ['--reduce-dtype', 'f32 or bf16'])


def test_learning(folder):
    write('text', read(BOOK)[:4096])
    flags = {'data': 'text', 'tokens': 128, 'batch': 4, 'steps': 60, 'lr': 1e-2, 'untied': True}
    numbers = good(folder, 'learning', **flags)
    check(numbers['loss'][-1] < 2.5, f'after 60 steps the loss is {numbers["loss"][-1]}')
    near(numbers['loss'][:1], [math.log(256)], 'learning: the first loss', 0.05)
    write('text', read(BOOK)[:513])
    flags.update(tokens=512, steps=2, batch=1, lr=0, min_lr=0)
    still = good(folder, 'no rate', **flags)
    equal(still['loss'][1], still['loss'][0], 'the loss without a rate')


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
        rank, _, more = (c.get('lora') or '').partition(':')
        for name in (more.partition(':')[2] or 'q,v').split(',') if rank else []:
            part = at + ('mlp.' if name in ('gate', 'up', 'down') else 'self_attn.') + name + '_proj.'
            out, into = want[part + 'weight']
            want.update({part + 'lora_A.weight': [int(rank), into], part + 'lora_B.weight': [out, int(rank)]})
    if c['untied']:
        want['lm_head.weight'] = [V, D]
    return want


def check_files(path, c, step, what):
    equal(sorted(os.listdir(path)), ['config.json', 'model.safetensors', 'optimizer.safetensors'], f'{what}: files')
    meta, tensors, _, _ = safetensors(f'{path}/model.safetensors')
    want = tensors_wanted(c)
    half = 'BF16' if c['dtype'] == 'bf16' else 'F32'
    equal(meta, {'format': 'pt'}, f'{what}: metadata')
    equal({name: (t[0], t[1]) for name, t in tensors.items()},
          {name: (half if len(shape) == 2 else 'F32', shape) for name, shape in want.items()}, f'{what}: tensors')
    for name, (dtype, shape, data) in tensors.items():
        equal(len(data), math.prod(shape) * (2 if dtype == 'BF16' else 4), f'{what}: bytes of {name}')
        check(len(set(data[i:i + 4] for i in range(0, len(data), 4))) > len(data) // 64, f'{what}: {name} is flat')
    meta, moments, _, _ = safetensors(f'{path}/optimizer.safetensors')
    schedule = {key: '%.17g' % c[key] for key in ('lr', 'min_lr', 'weight_decay', 'beta1', 'beta2', 'adam_eps', 'clip')}
    equal(meta, {**schedule, 'steps': str(c['steps']), 'warmup': str(c['warmup']), 'decay': str(c['decay']),
                 'schedule': str(SCHEDULES.index(c['schedule'])),
                 'dtype': c['dtype'], 'step': str(step), 'tokens': str(c['tokens']), 'batch': str(c['batch']),
                 'accumulate': str(c['accumulate'] * c['replicas']), 'text_bytes': str(c['text_bytes']), 'seed': str(c['seed']),
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
    config = load(f'{path}/config.json')
    model = 'Qwen3' if c['qk_norm'] else 'Mistral' if c['window'] else 'Qwen2' if c['attention_bias'] == 'qkv' else 'Llama'
    for key, value in [('hidden_size', c['model_dim']), ('intermediate_size', c['ff_dim']), ('hidden_act', 'silu'),
                       ('num_hidden_layers', c['layers']), ('num_attention_heads', c['heads']),
                       ('num_key_value_heads', c['kv_heads']), ('head_dim', c['head_dim']),
                       ('vocab_size', c['vocab']), ('max_position_embeddings', c['tokens']),
                       ('rms_norm_eps', c['norm_eps']), ('rope_theta', c['rope_theta']), ('rope_scaling', None),
                       ('tie_word_embeddings', not c['untied']), ('mlp_bias', False),
                       ('attention_bias', 'missing' if model == 'Qwen2' else c['attention_bias'] == 'qkvo'),
                       ('use_sliding_window', False if 'Qwen' in model else 'missing'),
                       ('torch_dtype', 'bfloat16' if c['dtype'] == 'bf16' else 'float32'),
                       ('sliding_window', c['window'] or 'missing'),
                       ('model_type', model.lower()), ('architectures', [model + 'ForCausalLM'])]:
        equal(config.get(key, 'missing'), value, f'{what}: {key} of config.json')


def test_checkpoints(folder):
    for what, flags in [('f32, biases', {'ranks': 4, 'kv_heads': 4, 'attention_bias': 'qkv'}), ('bf16, biases', {'dtype': 'bf16', 'untied': True, 'attention_bias': 'qkv'}),
                        ('f32, qk-norm', {'qk_norm': True, 'attention_bias': 'qkvo', 'offload': True, 'ranks': 3, 'heads': 6, 'kv_heads': 3,
                                          'tokens': 63, 'data': BOOK})]:
        here = {key: value for key, value in flags.items()
                if key in ('ranks', 'dtype', 'offload', 'tokens', 'data')}
        whole = good(folder, f'{what}: in one go', steps=6, save='whole', save_every=3, keep=2, **flags)
        equal(sorted(os.listdir('whole')), ['checkpoint-3', 'checkpoint-6'], f'{what}: checkpoints')
        check_files('whole/checkpoint-6', whole['config'], 6, what)
        rest = good(folder, f'{what}: resumed', steps=6, resume='whole/checkpoint-3', save='rest', **here)
        equal(os.listdir('rest'), ['checkpoint-6'], f'{what}: checkpoints of the rest')
        equal(rest['first_step'], 4, f'{what}: the first step')
        same(rest, whole, f'{what}, resumed', first=3)
        same_files('rest/checkpoint-6', 'whole/checkpoint-6', what)
        # The checkpoint knows the schedule and the data's numbers; equal flags of the model are no contradiction.
        bare = {key: value for key, value in here.items() if key in ('ranks', 'offload', 'data')}
        quiet(words_of({'ranks': 2, **bare, 'resume': 'whole/checkpoint-3', 'sample': 0, 'json': 'numbers.json', 'layers': 2,
                        'model_dim': 64}), folder, f'{what}: resumed without flags')
        equal(numbers_of(folder)['loss'], rest['loss'], f'{what}: resumed without flags')
        # The same with another method, which writes into the folder it came from.
        shutil.copytree('whole/checkpoint-3', 'same/checkpoint-3')
        again = good(folder, f'{what}: by ulysses', steps=6, resume='same', save='same', method='ulysses', **here)
        if again['config']['products'] == 'built-in' and whole['config']['dtype'] == 'f32':
            equal(again['loss'], whole['loss'][3:], f'{what}: by ulysses')
        equal(os.listdir('same'), ['checkpoint-6'], f'{what}: the newest stays')
        if whole['config']['ranks'] == 4:
            fewer = [good(folder, f'{what}: on 2 ranks', steps=6, resume='whole/checkpoint-3', ranks=2, dtype=here.get(
                'dtype')) for _ in range(2)]
            equal(fewer[0]['loss'], fewer[1]['loss'], f'{what}: on 2 ranks, twice')
            near(fewer[0]['loss'], whole['loss'][3:], f'{what}: on 2 ranks', 1e-4)
        for name in ('whole', 'rest', 'same'):
            shutil.rmtree(name)

    for flags, want in [({}, [7]), ({'save_every': 2}, [7]), ({'save_every': 2, 'keep': 2}, [6, 7]),
                        ({'save_every': 3, 'keep': 1000}, [3, 6, 7]),
                        ({'save_every': 3, 'keep': 0}, [3, 6, 7]), ({'save_every': 7, 'keep': 3}, [7])]:
        good(folder, f'kept: {flags}', steps=7, save='kept', **flags)
        equal(sorted(os.listdir('kept')), [f'checkpoint-{n}' for n in want], f'kept: {flags}')
        shutil.rmtree('kept')


def cross_entropy(data, targets, vocab):
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


def test_loading(folder):
    """--load starts anew with the weights; logits must see the same model."""
    text = read(BOOK)[1000:1065]
    write('window', text)  # one window: every step has it
    write('ids.npy', npy(text[:64]))
    write('ids8.npy', npy(text[:64], '<i8'))
    for what, flags in [('tied', {'kv_heads': 4}), ('untied, qk-norm', {'kv_heads': 4, 'untied': True, 'qk_norm': True,
                                                                        'vocab': 300}),
                        ('shared key/value heads', {'kv_heads': 1, 'attention_bias': 'qkvo', 'rope_theta': 300, 'norm_eps': 0.01})]:
        first = good(folder, f'{what}: first', data='window', steps=12, save='out', save_every=11, keep=2, lr=3e-3,
                     **flags)
        anew = good(folder, f'{what}: anew', data='window', steps=1, load='out/checkpoint-11', seed=5)
        equal(anew['first_step'], 1, f'{what}: starts anew')
        equal(anew['loss'], first['loss'][11:], f'{what}: the loss after --load')
        equal(anew['config']['model_dim'], 64, f'{what}: the model after --load')
        newest = good(folder, f'{what}: the newest', data='window', steps=1, load='out')
        check(newest['loss'][0] < anew['loss'][0], f'{what}: --load takes not the newest')
        half = good(folder, f'{what}: in bf16', data='window', steps=1, load='out/checkpoint-11', dtype='bf16')
        near(half['loss'], anew['loss'], f'{what}: loaded into bf16', 1e-2)
        outs = [logits(what, folder, load='out/checkpoint-11', **more) for more in (
            {}, {'ranks': 2, 'ids': 'ids8.npy'}, {'ranks': 4}, {'ranks': 4, 'method': 'ulysses'}, {'ranks': 3})]
        if anew['config']['products'] == 'built-in':
            check(all(out == outs[0] for out in outs), f'{what}: logits differ with the ranks or the method')
        for more in [{'ranks': 3}, {'method': 'zigzag', 'ranks': 3}, {'method': 'upipe-ring', 'ranks': 4}, {'method': 'stripe', 'ranks': 2},
                     {'method': 'fpdt', 'ranks': 3, 'segments': 5}, {'method': 'upipe-fpdt', 'ranks': 2}]:
            mean = cross_entropy(logits(what, folder, load='out/checkpoint-11', **more), text[1:], first['config']['vocab'])
            near([mean], anew['loss'], f'{what}: the loss by the logits {more}', 1e-5)
        shutil.rmtree('out')

    good(folder, 'a model', save='m')
    for name, data, *said in [('text.npy', text, 'is no .npy, has no header'), ('empty.npy', b'', 'is no .npy'),
                              ('none.npy', npy([]), 'has no tokens'), ('above.npy', npy([1, 256], '<i8'), 'token 1 is 256', '256'),
                              ('below.npy', npy([1, -1]), 'token 1 is -1', '256'), ('far.npy', npy([1, 2**40], '<i8'), f'token 1 is {2**40}')]:
        write(name, data)
        no_logits(folder, [f'--ids {name}', *said], load='m', ids=name)
    # what nobody writes to is not waited for, in any file's place
    for place in ('config.json', 'model.safetensors', 'model.safetensors.index.json'):
        shutil.copytree('m/checkpoint-4', 'waits', ignore=shutil.ignore_patterns(place, 'model.*'))
        os.mkfifo(f'waits/{place}')
        no_logits(folder, [place, 'no regular file'], load='waits')
        failed(folder, ['--load', 'waits', *([] if place != 'config.json' else ['--plan'])], 1, [place, 'no regular file'])
        shutil.rmtree('waits')
    os.mkfifo('pipe.npy')
    no_logits(folder, ['pipe.npy', 'no regular file'], load='m', ids='pipe.npy')
    os.remove('pipe.npy')
    for more, status, *words in [
        ({'load': 'nowhere'}, 1, 'nowhere'), ({'ids': 'nothing'}, 1, 'nothing'), ({'ranks': 65}, 1, '64', '65'), ({'ranks': 0}, 2, "'0'"),
        ({'out': 'm'}, 1, 'm'), ({'out': 'ids.npy'}, 1, 'ids.npy', 'replace', '--ids'), ({'out': None}, 2, '--out'),
        ({'method': 'rings'}, 2, 'rings'), ({'dtype': 'f16'}, 2, 'f16'), ({'method': 'ulysses', 'chunk': 4}, 2, 'contradict', '4'),
        ({'out': 'a/b/c'}, 1, 'a/b/c'),
    ]:
        no_logits(folder, words, status, **{'load': 'm', **more})
    # What is read is not replaced, by whatever name, and what is no number is not written.
    os.link('m/checkpoint-4/config.json', 'other')
    shutil.copytree('m/checkpoint-4', 'parts')
    os.rename('parts/model.safetensors', 'parts/part')
    names = safetensors('parts/part')[1]
    write('parts/model.safetensors.index.json', json.dumps({'weight_map': {n: 'part' for n in names}}))
    for load, out in [('m', 'm/checkpoint-4/model.safetensors'), ('m/checkpoint-4', 'm/checkpoint-4/config.json'),
                      ('m', 'other'), ('parts', 'parts/part'), ('parts', 'parts/model.safetensors.index.json')]:
        no_logits(folder, [out, 'replace a file of the model'], load=load, out=out)
        for flag in ('json', 'trace'):
            failed(folder, given(load=load, **{flag: out}), 1, [f'--{flag} {out} would replace a file of the model'])
    patched('m/checkpoint-4', 'nan', 'model.norm.weight', NAN)
    no_logits(folder, ['model.norm.weight has a value that is not finite'], load='nan')
    # Names in files may hold what a terminal would obey.
    odd = '\x1b]0;owned\x07\x9b31m\x7f'
    shutil.copytree('m/checkpoint-4', 'odd')
    changed_header('odd/model.safetensors', lambda head: head.update({odd: head.pop('model.norm.weight')}))
    write('parts/model.safetensors.index.json', json.dumps({'weight_map': {odd: '../' + odd}}))
    for load in ('odd', 'parts'):
        for done in (no_logits(folder, [r'\\x1b\]0;owned\\x07\\xc2\\x9b31m\\x7f'], load=load), failed(folder, given(load=load), 1, [r'\\x1b\]0;owned'])):
            check(all(ord(c) >= 32 for c in done.stderr.strip()), f'{load}: control characters: {done.stderr!r}')


# What Qwen2 says of itself on Hugging Face, but for the sizes.
QWEN2 = {'architectures': ['Qwen2ForCausalLM'], 'attention_dropout': 0.0, 'bos_token_id': 151643, 'eos_token_id': 151643,
         'hidden_act': 'silu', 'hidden_size': 64, 'initializer_range': 0.02, 'intermediate_size': 96,
         'max_position_embeddings': 131072, 'max_window_layers': 24, 'model_type': 'qwen2', 'num_attention_heads': 2,
         'num_hidden_layers': 2, 'num_key_value_heads': 1, 'rms_norm_eps': 1e-6, 'rope_theta': 1000000.0,
         'sliding_window': 131072, 'tie_word_embeddings': True, 'torch_dtype': 'bfloat16', 'use_cache': True,
         'use_sliding_window': False, 'vocab_size': 300}


def write_halves(folder, config, tensors):
    """A model in bf16, which keeps the upper halves of {name: (shape, numbers)}."""
    write_model(folder, config, {name: ('BF16', shape, array.array('H', array.array('f', numbers).tobytes())[1::2].tobytes())
                                 for name, (shape, numbers) in tensors.items()})


def test_rope(folder):
    """A loaded model's RoPE becomes what the flags say, and what is saved says so."""
    def scaling(name):
        config = load(f'{name}/config.json')
        return config['rope_scaling'], config['rope_theta'], config['max_position_embeddings']

    plain = good(folder, 'theta', save='plain', steps=2)
    check('rope' not in plain, 'rates of a plain model')
    more = {'steps': 2, 'tokens': 128}
    yarn = good(folder, 'to yarn', load='plain', save='yarn', rope_type='yarn', rope_factor=2, rope_original=64, **more)
    equal(scaling('yarn/checkpoint-2'), ({'rope_type': 'yarn', 'factor': 2, 'original_max_position_embeddings': 64, 'truncate': True},
                                         10000, 128), 'yarn, saved')
    check(abs(yarn['rope']['factor'] - (1 + 0.1 * math.log(2))) < 1e-15 and yarn['rope']['rates'][0] == 1, f'yarn: {yarn["rope"]}')
    on = good(folder, 'yarn goes on', resume='yarn', **{**more, 'steps': 3})
    equal(on['rope'], yarn['rope'], 'rates of a resumed run')
    equal(good(folder, 'another factor', load='yarn', rope_factor=4, **more)['rope']['rates'][-1], yarn['rope']['rates'][-1] / 2, 'a factor of 4')
    good(folder, 'to dynamic', load='yarn', save='dynamic', rope_type='dynamic', rope_factor=3, rope_original=32, rope_theta=5000, **more)
    equal(scaling('dynamic/checkpoint-2'), ({'rope_type': 'dynamic', 'factor': 3}, 5000, 32), 'dynamic, saved')
    back = good(folder, 'back to theta', load='yarn', save='back', rope_type='default', **more)
    equal(('rope' in back, scaling('back/checkpoint-2')), (False, (None, 10000, 128)), 'default again')
    failed(folder, given(load='plain', rope_type='llama3', rope_factor=2), 1, ['--rope-type llama3 wants --rope-original'])
    failed(folder, given(load='plain', rope_factor=2), 1, ['--rope-factor would have no effect'])
    write('ids.npy', npy(bytes(range(64))))
    for flags, scaled in (({'rope_type': 'linear', 'rope_factor': 4}, {'rope_type': 'linear', 'factor': 4}), (
            {'rope_type': 'dynamic', 'rope_factor': 4, 'rope_original': 16}, {'rope_type': 'dynamic', 'factor': 4}),
            ({'rope_theta': 500}, None)): # logits of the flags are those of a folder that says so
        shutil.copytree('plain/checkpoint-2', 'says', dirs_exist_ok=True)
        write('says/config.json', json.dumps({**load('says/config.json'), 'rope_scaling': scaled, 'max_position_embeddings': 16,
                                              'rope_theta': flags.get('rope_theta', 10000)}))
        by_flags, by_folder, plain = (logits('RoPE', folder, **more) for more in ({'load': 'plain', **flags}, {'load': 'says'}, {'load': 'plain'}))
        check(by_flags == by_folder != plain, f'logits with {flags}')
    no_logits(folder, ['--rope-factor would have no effect'], load='plain', rope_factor=2)


def test_qwen2(folder):
    """A Qwen2 as Hugging Face has it is trained: its biases count, are saved, and do not decay."""
    def biases(name):
        tensors = safetensors(f'{name}/model.safetensors')[1]
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
    del llama['max_window_layers']
    write_halves('qwen2', QWEN2, model)
    write_halves('still', QWEN2, still)
    write_halves('llama', llama, plain)
    text = read(BOOK)[1000:1065]
    write('window', text)
    write('ids.npy', npy(text[:64]))
    run_of = {'data': 'window', 'tokens': 64, 'lr': 0, 'min_lr': 0, 'steps': 1}
    got = {(name, ranks, method): good(folder, f'{name} on {ranks}: {method}', load=name, ranks=ranks, method=method, **run_of)
           for name, ranks, method in [('qwen2', 1, 'upipe'), ('qwen2', 2, 'upipe'), ('qwen2', 2, 'ulysses'), ('qwen2', 4, 'usp'),
                                       ('qwen2', 2, 'fpdt'), ('still', 2, 'upipe'), ('llama', 2, 'upipe')]}
    base = got['qwen2', 2, 'upipe']
    equal([base['config'][key] for key in sizes], list(sizes.values()), 'the model of config.json')
    for (name, ranks, method), numbers in got.items():
        if name == 'qwen2':
            near(numbers['loss'] + numbers['grad_norm'], base['loss'] + base['grad_norm'], f'{method} on {ranks}', 1e-4)
    if base['config']['products'] == 'built-in':
        equal(got['qwen2', 2, 'ulysses']['loss'], base['loss'], 'ulysses: the loss')
    equal(got['still', 2, 'upipe']['loss'], got['llama', 2, 'upipe']['loss'], 'biases of 0: the loss')
    check(abs(base['loss'][0] - got['llama', 2, 'upipe']['loss'][0]) > 1e-2, 'biases make no difference')
    for more in ({'ranks': 2}, {'ranks': 3, 'method': 'zigzag'}):
        near([cross_entropy(logits('qwen2', folder, load='qwen2', **more), text[1:], 300)], base['loss'], f'the loss by the logits {more}', 1e-5)
    prompt = text[:20].decode()
    write('prompt.npy', npy(text[:20]))
    row = array.array('f', logits('the prompt', folder, load='qwen2', ids='prompt.npy', ranks=1)[-1200:])[:256]
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
    few, many = (safetensors(f'decay{decay}/checkpoint-1/model.safetensors')[1] for decay in (0, 100))
    for name, t in few.items():
        equal(t == many[name], len(t[1]) == 1, f'{name} with and without decay')
    check(all(t != few[name] for name, t in biases('same/checkpoint-1').items()), 'a step moves no bias')
    anew = [good(folder, f'new: {bias}', attention_bias=bias, steps=2) for bias in ('none', 'qkv', 'qkvo')]
    equal([numbers['loss'][0] for numbers in anew[1:]], anew[0]['loss'][:1] * 2, 'the loss of new biases')
    check(len({numbers['loss'][1] for numbers in anew}) == 3, 'new biases do not learn')
    one = 'model.layers.1.self_attn.k_proj.bias'
    write_halves('without', QWEN2, {name: t for name, t in model.items() if name != one})
    write_halves('with', QWEN2, {**model, one.replace('k_proj', 'o_proj'): ([64], [0] * 64)})
    # Windows by layer, saved and resumed: the last layer's alone.
    sliding = {**QWEN2, 'use_sliding_window': True, 'sliding_window': 9, 'max_window_layers': 1}
    write_halves('sliding', sliding, model)
    narrow = [good(folder, f'windows by layer, {more}', load='sliding', save='narrow' + str(more['ranks']), **run_of, **more)
              for more in ({'ranks': 1}, {'ranks': 3, 'method': 'zigzag'}, {'ranks': 2, 'method': 'fpdt'})]
    for numbers in narrow[1:]:
        near(numbers['loss'] + numbers['grad_norm'], narrow[0]['loss'] + narrow[0]['grad_norm'], 'windows by layer', 1e-4)
    check(abs(narrow[0]['loss'][0] - base['loss'][0]) > 1e-4, 'windows by layer make no difference')
    saved = load('narrow1/checkpoint-1/config.json')
    equal([saved.get(key) for key in ('model_type', 'use_sliding_window', 'sliding_window', 'layer_types')],
          ['qwen2', True, 9, ['full_attention', 'sliding_attention']], 'windows by layer, saved')
    write_halves('other', {**QWEN2, 'other_key': 1}, model)
    write_halves('head', QWEN2, {**model, 'lm_head.weight': model['model.embed_tokens.weight']})
    write_halves('another', QWEN2, {**model, 'lm_head.weight': ([300, 64], [0.5] * 300 * 64)})
    known = good(folder, 'an ignored key', load='other', ignore_key='other_key', **run_of)
    equal(known['loss'], good(folder, 'a stored head', load='head', **run_of)['loss'], 'an ignored key, a stored head: the loss')
    equal(known['config']['ignore_key'], ['other_key'], 'an ignored key')
    write('qwen2/tokenizer.json', '{}')
    done = run(given(load='qwen2', **run_of), folder)
    check(done.returncode == 0 and 'qwen2/tokenizer.json is not used' in done.stderr, f'a tokenizer: {done.stderr}')
    for name, said in ('without', [one, 'missing']), ('with', ['o_proj.bias is no tensor']), ('another', ['lm_head.weight is not the embedding']), (
            'other', ['other_key is a key that is not known of a qwen2', '--ignore-key']):
        failed(folder, given(load=name), 1, said)
        no_logits(folder, said, load=name)


def test_soft_cap(folder):
    """Logits of a Gemma2 have the soft-cap that its loss has."""
    config = load(os.path.join(TOP, 'tests', 'golden', 'families.json'))['gemma2']['config']
    shapes = tensors_wanted({'model_dim': 32, 'ff_dim': 40, 'vocab': 24, 'head_dim': 32, 'heads': 4, 'kv_heads': 2, 'layers': 2,
                             'qk_norm': False, 'untied': False, 'attention_bias': 'none'})
    shapes |= {f'model.layers.{layer}.{which}_feedforward_layernorm.weight': [32] for layer in (0, 1) for which in ('pre', 'post')}
    draw = random.Random(7)
    write_halves('gemma', config, {name: (shape, [draw.gauss(0, 0.5) for _ in range(math.prod(shape))]) for name, shape in shapes.items()})
    ids = [draw.randrange(24) for _ in range(17)]
    write('window.npy', npy(ids))
    write('ids.npy', npy(ids[:16]))
    quiet(given(load='gemma', tokens_file='window.npy', tokens=16, steps=1, json='numbers.json'), folder, 'a soft-cap')
    near([cross_entropy(logits('a soft-cap', folder, load='gemma', ranks=2), ids[1:], 24)], numbers_of(folder)['loss'], 'the loss by the logits with a soft-cap', 1e-5)


def test_padding(folder):
    """The row of pad_token_id gets no gradient but a tied head's; nothing else changes by a bit."""
    draw = random.Random(8)
    sizes = {'model_dim': 64, 'ff_dim': 96, 'vocab': 300, 'head_dim': 32, 'heads': 2, 'kv_heads': 1, 'layers': 2,
             'qk_norm': False, 'untied': True, 'attention_bias': 'qkv'}
    model = {name: (shape, [draw.gauss(0, 0.1) for _ in range(math.prod(shape))]) for name, shape in tensors_wanted(sizes).items()}
    embed, head, pad = 'model.embed_tokens.weight', 'lm_head.weight', 101  # an e, which every text has
    model[head] = model[embed]
    untied = {**QWEN2, 'tie_word_embeddings': False}
    write_halves('untied', untied, model)
    write_halves('untied_pad', {**untied, 'pad_token_id': pad}, model)
    write_halves('tied', QWEN2, model)
    write_halves('tied_pad', {**QWEN2, 'pad_token_id': pad - 300}, model)
    write('window', read(BOOK)[1000:1065])

    def gradients(name, **more):
        numbers = good(folder, f'{name} {more}', load=name, save='grads', data='window', tokens=64, steps=1, lr=0, min_lr=0, beta1=0,
                       clip=0, **more)
        tensors = safetensors('grads/checkpoint-1/optimizer.safetensors')[1]
        config = load('grads/checkpoint-1/config.json')
        equal(config.get('pad_token_id'), pad if name.endswith('pad') else None, f'{name}: pad_token_id')
        shutil.rmtree('grads')
        return {one.removeprefix('exp_avg.'): array.array('f', t[2]) for one, t in tensors.items() if one.startswith('exp_avg.')}, numbers

    row = slice(64 * pad, 64 * pad + 64)
    for more in ({'ranks': 1}, {'ranks': 2, 'method': 'fpdt', 'zero': 3}):
        got = {name: gradients(name, **more) for name in ('untied', 'untied_pad', 'tied', 'tied_pad')}
        part = got['untied'][0]
        check(max(map(abs, part[embed][row])) > 1e-3, f'{more}: the token has no gradient')
        for name, want in (('untied', [0] * 64), ('tied', part[head][row])):
            plain, numbers = got[name]
            padded, again = got[name + '_pad']
            same(again, numbers, f'{name}, {more}: with a padding', keys=('loss',))
            size = max(map(abs, part[head][row]))
            check(all(abs(a - b) <= 1e-5 * size for a, b in zip(padded[embed][row], want)), f'{name}, {more}: the row of the padding')
            for one, numbers in padded.items():
                if one == embed:
                    numbers[row] = plain[one][row]
                equal(numbers == plain[one], True, f'{name}, {more}: {one} with a padding')


# ---- stopped on the way ----


def test_signals(folder):
    for number, (ends, flags) in enumerate([(signal.SIGINT, {}), (signal.SIGTERM, {'dtype': 'bf16'}),
                                            (signal.SIGHUP, {'ranks': 4, 'sample': 5, 'method': 'usp'})]):
        save = f'save{number}'
        args = given(steps=100000, progress=True, save=save, json='stopped.json', **EVEN, **flags)
        status, _ = watched([TRAIN, *args], folder, 'step 5/', lambda process, ends=ends: process.send_signal(ends))
        equal(status, 128 + ends, f'{ends.name}: status')
        names = os.listdir(save)
        needed(len(names) == 1 and re.fullmatch(r'checkpoint-\d+', names[0]), f'{ends.name}: {names}')
        at = int(names[0].split('-')[1])
        stopped = numbers_of(folder, 'stopped.json')
        equal(len(stopped['loss']), at, f'{ends.name}: steps that were done and saved')
        check(5 <= at < 100000, f'{ends.name}: stopped after {at} steps')
        whole = good(folder, f'{ends.name}: whole', steps=at + 3, **EVEN, **flags)
        rest = good(folder, f'{ends.name}: resumed', steps=at + 3, resume=save, **EVEN, **flags)
        for key in ('loss', 'grad_norm'):
            equal(stopped[key] + rest[key], whole[key], f'{ends.name}: {key}')
    # In the sample too; the numbers are written. Signals that come in one burst, of whatever kind, are one request.
    for more in ([], [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]):
        def burst(process, more=more):
            wait_for(lambda: os.path.isdir('sampled/checkpoint-2'))
            time.sleep(0.3)
            for number in [signal.SIGINT, *more]:
                process.send_signal(number)
                time.sleep(0.005)

        args = given(steps=2, progress=True, sample=1000000, save='sampled', json='sampled.json')
        status, _ = watched([TRAIN, *args], folder, 'step 2/', burst)
        # Those that come before the first one's handler has run are handled last first.
        check(status - 128 in [signal.SIGINT, *more], f'stopped in the sample, {more}: {status}')
        equal(len(numbers_of(folder, 'sampled.json')['loss']), 2, f'what a stopped sample leaves, {more}')
        shutil.rmtree('sampled')

    # The same in the steps, as timeout does it: to the process and to its group at once.
    def twice(process):
        process.send_signal(signal.SIGTERM)
        os.killpg(process.pid, signal.SIGTERM)

    args = given(steps=100000, progress=True, save='burst', json='burst.json', **EVEN)
    ended = watched([TRAIN, *args], folder, 'step 5/', twice, start_new_session=True)
    at = len(numbers_of(folder, 'burst.json')['loss'])
    equal(ended, (128 + signal.SIGTERM, f'train: ended by a signal: Terminated; --resume burst continues after step {at}\n'),
          'a burst in a step')
    equal(os.listdir('burst'), [f'checkpoint-{at}'], 'a burst in a step: checkpoints')
    # A second later another one ends the program at once: here in a step of some minutes, in which it sleeps meanwhile.
    args = given(steps=1, layers=1, model_dim=8, tokens=131072, save='long', json='long.json')
    with subprocess.Popen([TRAIN, *args], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                          preexec_fn=heed_signals) as process:
        wait_for(lambda: len(os.listdir(f'/proc/{process.pid}/task')) >= 3)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.1)
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGCONT)
    equal(process.returncode, -signal.SIGHUP, 'a second signal, a second later: status')
    # The folder was given back by its death, and is another's.
    good(folder, 'after a death', steps=1, save='long')
    equal(os.listdir('long'), ['checkpoint-1'], 'after a death: what is there')


def test_two_writers(folder):
    """A folder of checkpoints is one training's: the second is refused, the first goes on."""
    def others(process):
        for flags in ({'save': 's'}, {'save': './s/'}, {'save': 's', 'ranks': 1, 'json': 'x.json'}):
            failed(folder, given(**flags), 1, ['s/?: another training writes its checkpoints there'])
        process.send_signal(signal.SIGINT)

    status, _ = watched([TRAIN, *given(steps=100000, progress=True, save='s', **EVEN)], folder, 'step 2/', others)
    equal(status, 130, 'the first of two trainings: status')
    names = os.listdir('s')
    equal([name[:11] for name in names], ['checkpoint-'], 'the first of two trainings')
    failed(folder, given(save='s'), 1, [f's holds s/{names[0]} already'])


def killed(folder, what, kills, least, wait, other, **flags):
    """Kills a training again and again, at any time or in a step behind a checkpoint (wait), and resumes what it has left,
    with `other` flags: the bits are those of one that was not killed."""
    steps, resumed, chance = 10, 0, random.Random(1)
    save, whole_save = what, what + ' whole'
    flags = {**EVEN, **flags}
    begin = time.monotonic()
    whole = good(folder, f'{what}: not killed', steps=steps, save=whole_save, save_every=1, **flags)
    seconds = time.monotonic() - begin
    other = {**EVEN, **other, 'resume': save}

    def saved():
        names = os.listdir(save) if os.path.isdir(save) else []
        return [int(re.search(r'\d+', name)[0]) for name in names if re.fullmatch(r'checkpoint-\d+|\.checkpoint-\d+\.old', name)]

    for number in range(kills):
        if os.path.isdir(f'{save}/checkpoint-{steps}'):
            shutil.rmtree(save)
        begun = max(saved(), default=0)
        with subprocess.Popen([TRAIN, *given(steps=steps, save=save, save_every=1, **(other if begun else flags))], cwd=folder,
                              stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, encoding='utf-8') as process:
            if wait:
                check(wait_for(lambda begun=begun: max(saved(), default=0) > begun), f'{what}, kill {number}: no checkpoint')
            time.sleep(chance.uniform(0, seconds / (steps if wait else 1)))
            process.kill()
            sentence = process.stderr.read()
        check(process.returncode in (0, -signal.SIGKILL), f'{what}, kill {number}: {process.returncode} {sentence}')
        # What is there now can be resumed, by a run that leaves it as it is.
        at = max(saved(), default=0)
        if at == 0:
            failed(folder, given(steps=steps, resume=save, **EVEN), 1, [save], f'{what}, kill {number}: nothing yet')
        elif at < steps:
            rest = good(folder, f'{what}, kill {number}', steps=at + 1, **other)
            resumed += 1
            equal((rest['first_step'], rest['loss']), (at + 1, whole['loss'][at:at + 1]), f'{what}, kill {number}: goes on at {at}')
    check(resumed >= least, f'{what}: only {resumed} of {kills} kills left something to resume')
    if not os.path.isdir(f'{save}/checkpoint-{steps}'):
        rest = good(folder, f'{what}: after the kills', steps=steps, save=save, save_every=1, **(other if saved() else flags))
        equal(rest['loss'], whole['loss'][rest['first_step'] - 1:], f'{what}: after the kills')
        equal(os.listdir(save), [f'checkpoint-{steps}'], f'{what}: what is there after the kills')
    same_files(f'{save}/checkpoint-{steps}', f'{whole_save}/checkpoint-{steps}', f'{what}, after the kills')


def test_kills(folder):
    killed(folder, 'killed', 20, 4, False, {})
    # states in the second pool, and adapters; what is resumed holds them elsewhere
    away = {'zero': 3, 'offload_optimizer': True, 'offload_weights': True}
    killed(folder, 'offloaded', 3, 1, True, away, zero=2, offload_optimizer=True)
    killed(folder, 'adapters', 3, 1, True, {'zero': 1, 'offload_optimizer': True}, lora='2:4:q,o,down', **away)


# ---- bad input ----


def test_usage(folder):
    os.mkdir('old')
    for name, (values, *words) in {  # what the sentence has beside the flag and the value
        'ranks': (['12x', '-4', '0', '257'], '1 to 256'), 'layers': (['0', '999999999'], '4096'), 'model-dim': (['16777217'], '16777216'),
        'vocab': (['255'], '256'), 'tokens': (['9e18', '9223372036854775808', ' 64'],), 'batch': (['0x10'],), 'steps': (['-1'],), 'schedule': (['step'], 'cosine, linear, constant or wsd'), 'stop-token': (['-1'], "a token's number"),
        'lr': (['nan', '-1', '1e999'],), 'beta1': (['1'],), 'rope-theta': (['0'],), 'rope-type': (['ntk'], 'yarn'), 'rope-factor': (['0.5'],), 'norm-eps': (['0'],), 'seed': (['-1'],),
        'deadline': (['0'],), 'dtype': (['f16'], 'f32 or bf16'), 'method': (['rings'],), 'window': (['-1'],), 'keep': (['-1'],),
        'attention-bias': (['q'], 'none, qkv or qkvo'), 'tile-bytes': (['99999999999999999999B', '65536', '0B'], 'with its unit'),
    }.items():
        for value in values:
            failed(folder, ['--' + name, value], 2, [f"--{name}.*'{value}'", *words])
    for args, *words in [
        ('--method usp --ring 3', '--ranks 4', '--ring 3'),
        ('--method zigzag --ring 2', '--ring 2', 'zigzag', 'all ranks'),
        ('--ring 2', '--ring 2', 'upipe', 'no ranks'),
        ('--method zigzag --inner 2', '--inner 2', 'no effect', 'zigzag'),
        ('--method ulysses --overlap', '--overlap', 'no effect', 'ulysses'),
        ('--method upipe --segments 2', '--segments 2', 'no effect', 'upipe'),
        ('--method fpdt --segments 0', '--segments', '0'),
        ('--method fpdt --chunk 2', '--chunk 2', 'fpdt', 'all heads'),
        ('--method allgather --chunk 2', '--chunk 2', 'allgather', 'a group'),
        ('--window 8 --qk-norm', '--window', '--qk-norm'), ('--window 8 --attention-bias qkvo', '--window', '--attention-bias'),
        ('--qk-norm --attention-bias qkv', '--qk-norm', '--attention-bias'),
        ('--frobnicate', '--frobnicate'), ('--he 4', '--he'), ('-r 4', '-r'), ('4', "'4'"),
        ('--method ulysses --chunk 8', '--chunk 8', 'ulysses'),
        ('--resume old --load old', '--resume', '--load', 'contradict'),
        *((f'--resume old --rope-{flag}', f'--rope-{flag.split()[0]} would change the model that --resume continues')
          for flag in ('theta 10000', 'type yarn', 'factor 2', 'original 64')),
        ('--rope-type yarn --rope-original 64', '--rope-type yarn wants --rope-factor'), ('--rope-factor 2', '--rope-factor', 'default'),
        ('--rope-type dynamic --rope-factor 2', '--rope-type dynamic wants --rope-original'), ('--rope-original 9', '--rope-original', 'default'),
        ('--rope-type linear --rope-factor 2 --rope-original 9', '--rope-original', 'linear'), ('--rope-type longrope', 'longrope wants the lists'),
        ('--plan --trace x', '--plan', '--trace'), ('--plan --lr 1', '--plan', '--lr'),
        ('--plan --data x', '--plan', '--data'), ('--plan --sample 0', '--plan', '--sample'),
        ('--save-every 2', '--save-every wants --save'), ('--keep 2', '--keep wants --save'),
        ('--sample 0 --prompt x', '--prompt', '--sample is 0'), ('--sample 0 --temperature 1', '--temperature', '--sample is 0'),
        ('--json x --trace x', 'same file, x'), ('--log x --json x', '--json and --log name the same file, x'),
        ('--log x --save x', '--log names x', '--save'), ('--json x --save x', 'x', '--save'), ('--trace x --save x', 'x', '--save'),
        ('--lr 0.1 --min-lr 0.2', '0.2', '0.1'), ('--steps 5 --warmup 6', '6', '5'),
        ('--steps 5 --save-every 6 --save x', '6', '5'), ('--eval-every 2', '--eval-every wants --eval'),
        ('--steps 5 --eval-every 6 --eval x', '--eval-every 6', '5'), ('--decay 3', '--decay', 'cosine'),
        ('--schedule constant --min-lr 0', '--min-lr', 'constant'), ('--steps 5 --warmup 3 --schedule wsd --decay 3', '--decay 3', '3', '5'),
        ('--sample 0 --stop-token 1', '--stop-token', '--sample is 0'),
    ]:
        failed(folder, args.split(), 2, words)
    # the last one counts, and one of several wrong words is said
    done = run(given(json='twice.json', steps=1) + ['--tokens', '32', '--lr=0.5', '--lr', '0.25', '--tokens', '1k', '--tokens=48'], folder)
    got = numbers_of(folder, 'twice.json')['config'] if done.returncode == 0 else {}
    equal((got.get('tokens'), got.get('lr'), done.stderr.count('the last one counts')), (48, 0.25, 2), f'flags given twice: {done.stderr}')
    failed(folder, ['--tokens', '1x', '--lr', '-1', '--frobnicate', 'word'], 2, ["'1x'"])


def lines_of(path):
    return [json.loads(line) for line in read(path).decode().splitlines()]


def test_log(folder):
    """A line a step in a file, and now and then one on stderr, while the training runs."""
    flags = {'save': 'saved', 'log': 'log', **EVEN}
    first = good(folder, 'with a log', **flags)
    plain = good(folder, 'without a log', **EVEN)
    same(first, plain, 'a log changes bits')
    more = good(folder, 'a log that goes on', **{**flags, 'resume': 'saved', 'steps': 6})
    lines = lines_of('log')
    equal([line['step'] for line in lines], [1, 2, 3, 4, 5, 6], 'the log: steps')
    equal([line['loss'] for line in lines], first['loss'] + more['loss'], 'the log: loss')
    equal([line['norm'] for line in lines], first['grad_norm'] + more['grad_norm'], 'the log: norm')
    for line in lines:
        equal(list(line), ['step', 'loss', 'norm', 'rate', 'tokens_per_s', 'seconds', 'peak_bytes'], 'the log: keys')
        seconds = line['seconds']
        equal(list(seconds), ['step', 'forward', 'backward', 'sum', 'update'], 'the log: phases')
        check(all(part > 0 for part in seconds.values()) and sum(seconds.values()) <= 2 * seconds['step'] * (1 + 1e-9),
              f'the log: phases are longer than their step: {seconds}')
        check(abs(line['tokens_per_s'] * seconds['step'] - 64) < 1e-6, f'the log: {line["tokens_per_s"]} tokens/s')
        equal(line['rate'], 1e-3, 'the log: rate')
    equal({line['peak_bytes'] for line in lines}, {first['peak_bytes']}, 'the log: peak')
    good(folder, 'a log that begins anew', **{**flags, 'save': None})
    equal(len(lines_of('log')), 4, 'lines of a log that begins anew')
    # what is not finite is null, and is there
    done = run(given(log='broken', lr=1000, min_lr=1000, warmup=0, clip=0, steps=50), folder)
    lines = lines_of('broken')
    if done.returncode == 1:
        check(lines[-1]['norm'] is None and all(line['loss'] is not None for line in lines[:-1]), f'a broken step: {lines[-1]}')
    # a disk that is full: said once, and the training goes on to its numbers
    done = run(given(log='cut', json='cut.json', steps=50), folder, preexec_fn=limit_files(10000))
    equal(len(sentences(done.stderr)), 1, f'a log that cannot be written: {done.stderr}')
    check(done.returncode == 1 and '--log cut cannot be written: File too large' in done.stderr, f'a full disk: {done.returncode} {done.stderr}')
    equal(len(numbers_of(folder, 'cut.json')['loss']), 50, 'steps with a log that cannot be written')
    # readable while it runs, without a terminal
    with open('said', 'wb') as said:
        job = subprocess.Popen([TRAIN, *given(log='long', steps=10**8, sample=0)], cwd=folder, stdout=subprocess.DEVNULL, stderr=said)
    start = time.monotonic()
    wait_for(lambda: re.search(rb'^step \d+/\d+  loss .* tokens/s', read('said'), re.M), pause=0.1)
    took, steps = time.monotonic() - start, len(lines_of('long')) if os.path.exists('long') else 0
    job.terminate()
    job.wait(timeout=60)
    spoken = read('said').decode()
    check(len(re.findall('^step ', spoken, re.M)) in range(1, 3) and 4.9 < took < 60 and steps > 3,
          f'after {took:.1f} s and {steps} lines of the log stderr has {spoken!r}')
    check(read('long').endswith(b'}\n'), 'the log ends within a line')


def rates(folder, what, **flags):
    good(folder, what, **{'log': 'rates', 'steps': 10, 'lr': 1e-2, 'warmup': 2, **flags})
    return [line['rate'] for line in lines_of('rates')]


def test_schedules(folder):
    """The rate of every step, and the same over a resume; a schedule is the checkpoint's unless a flag changes it."""
    rise = [0.5e-2, 1e-2]
    line = [1e-2 + (1e-3 - 1e-2) * k / 8 for k in range(1, 9)]
    near(rates(folder, 'cosine'), rise + [1e-3 + 4.5e-3 * (1 + math.cos(math.pi * k / 8)) for k in range(1, 9)], 'cosine', 1e-12)
    near(rates(folder, 'linear', schedule='linear', save='line'), rise + line, 'linear', 1e-12)
    near(rates(folder, 'constant', schedule='constant'), rise + [1e-2] * 8, 'constant', 1e-12)
    wsd = rise + [1e-2] * 5 + [1e-2 - 9e-3 * k / 3 for k in (1, 2, 3)]
    near(rates(folder, 'wsd', schedule='wsd', decay=3), wsd, 'wsd', 1e-12)
    near(rates(folder, 'wsd by itself', schedule='wsd', save='wsd'), rise + [1e-2] * 7 + [1e-3], 'wsd, a tenth', 1e-12)
    on = {'lr': None, 'warmup': None, 'log': 'on'}
    near(rates(folder, 'wsd', schedule='wsd', decay=3, save='part', steps=10, log='rates'), wsd, 'wsd, saved', 1e-12)
    good(folder, 'wsd goes on', resume='part', steps=12, **on)
    near([line['rate'] for line in lines_of('on')], [1e-2 - 9e-3 * 2 / 3, 1e-3], 'wsd over a resume', 1e-12)
    good(folder, 'another schedule', resume='part', steps=12, schedule='constant', **on)
    near([line['rate'] for line in lines_of('on')][2:], [1e-2, 1e-2], 'another schedule over a resume', 1e-12)


def adamw(c, step, rate, decay, real, w, m, v, m_after):
    """The moment of the squares and the weights after a step, and its gradient, in numbers of this type."""
    b1, b2, eps = (real(c[key]) for key in ('beta1', 'beta2', 'adam_eps'))
    grad = (m_after.astype(real) - b1 * m) / (1 - b1)
    squares = b2 * v + (1 - b2) * grad * grad
    mean, root = m_after / (1 - b1**real(step)), np.sqrt(squares / (1 - b2**real(step)))
    return grad, squares, w - real(rate) * (mean / (root + eps) + real(decay) * w)


def states_of(folder, step):
    """{name: (shape, numbers)} of a checkpoint: weights, as they are stored, and the optimizer's states"""
    return {name: (shape, np.frombuffer(data, np.float32 if dtype == 'F32' else np.uint16)) for part in ('model', 'optimizer')
            for name, (dtype, shape, data) in safetensors(f'{folder}/checkpoint-{step}/{part}.safetensors')[1].items()}


def check_step(folder, c, step, rate, norm, what):
    """A step's checkpoint against the one before: the formula in f64, by the tolerance rule, of the gradient that the first
    moment says; the norm of all gradients is clipped; matrices decay."""
    before, after, total = states_of(folder, step - 1), states_of(folder, step), 0
    for name in [name[8:] for name in after if name.startswith('exp_avg.')]:
        m, v, at = 'exp_avg.' + name, 'exp_avg_sq.' + name, 'master.' + name if 'master.' + name in after else name
        decay = c['weight_decay'] if len(after[name][0]) == 2 else 0
        numbers = [before[at][1], before[m][1], before[v][1], after[m][1]]
        naive = adamw(c, step, rate, decay, np.float32, *numbers)
        want = adamw(c, step, rate, decay, np.float64, *[x.astype(np.float64) for x in numbers])
        total += np.sum(want[0]**2)
        for part, got, truth, near_it in zip((v, at), (after[v][1], after[at][1]), want[1:], naive[1:]):
            error, allowed = np.abs(got - truth), np.abs(near_it - truth)
            floor = 4 * np.finfo(np.float32).eps * np.max(np.abs(truth))
            check(np.max(error) <= 2 * np.max(allowed) + floor and np.mean(error) <= 1.5 * np.mean(allowed) + floor,
                  f'{what}, step {step}: {part} is up to {np.max(error)} off')
        if at != name:
            bits = after[at][1].view(np.uint32)
            check(np.array_equal(after[name][1], (bits + 0x7fff + (bits >> 16 & 1)) >> 16), f'{what}, step {step}: {name} is not rounded')
    limit = min(norm, c['clip'])
    check(abs(math.sqrt(total) / limit - 1) < 1e-6, f'{what}, step {step}: a gradient of {math.sqrt(total)}, not {limit}')


def test_updates(folder):
    """Every step with a gradient that is clipped is AdamW's formula, by the rate of its schedule; what is sharded, and where
    it is, changes no bit of the last checkpoint."""
    steps = {'steps': 4, 'lr': 1e-2, 'min_lr': 1e-3, 'warmup': 2, 'weight_decay': 0.5, 'beta1': 0.8, 'beta2': 0.9, 'adam_eps': 1e-3}
    rate = [0.5e-2, 1e-2, 5.5e-3, 1e-3]
    away = {'offload_optimizer': True}
    for what, clip, flags, others in [
        ('clipped', 1, {}, [{'zero': 0}, {'zero': 2, **away}, {'zero': 3, 'offload_weights': True, **away}, {'activations': 'offload'}]),
        ('not clipped', 100, {}, []),
        ('in turn', 1, {'accumulate': 2}, [{'zero': 0}]),
        ('in turn, sharded', 1, {'accumulate': 2, 'zero': 2}, [{'zero': 3, **away}]),
        ('replicas', 1, {'ranks': 4, 'replicas': 2, 'zero': 3}, [{'zero': 0}]),
        ('bf16', 1, {'dtype': 'bf16'}, [{'zero': 3, **away}]),
        ('adapters', 0.01, {'lora': '2', 'clip': 0.01}, [{'zero': 3}]),
        ('more than 2^20 of a unit', 1, {'vocab': 40000, 'ranks': 1}, [{'zero': 2, **away}]),
    ]:
        model = {'layers': 1, 'model_dim': 32, 'heads': 2, 'kv_heads': 2, 'attention_bias': 'qkv', **flags}
        quiet(given(**model, steps=0, save=what), folder, what)
        flags = {**steps, **({} if clip == 1 else {'clip': clip}), **flags, 'resume': what, 'save_every': 1, 'keep': 0}
        one = good(folder, what, **flags, save=what)
        equal([norm > clip for norm in one['grad_norm']], [clip < 100] * 4, f'{what}: norms {one["grad_norm"]} over {clip}')
        for step in range(1, 5):
            check_step(what, one['config'], step, rate[step - 1], one['grad_norm'][step - 1], what)
        for other in others:
            good(folder, f'{what}, {other}', **{**flags, 'resume': f'{what}/checkpoint-0', **other}, save='other')
            same_files('other/checkpoint-4', f'{what}/checkpoint-4', f'{what}, {other}')
            shutil.rmtree('other')


def still(folder, what, **flags):
    """The numbers of a run without a step, which has no peak of one."""
    quiet(given(**{'json': 'still.json', 'steps': 0, **flags}), folder, what)
    return load('still.json')


def test_eval(folder):
    """The loss of a text of which nothing is learnt: of all its windows, the same whoever computes it, and no bit of the training."""
    write('held', read(BOOK)[5000:5000 + 331])
    few = {'eval': 'held', 'layers': 1, 'batch': 2}
    plain = good(folder, 'no evaluation', layers=1, batch=2, steps=4)
    evaluated = good(folder, 'evaluations', **few, steps=4, eval_every=2, save='a/b/c', log='log')
    same(evaluated, plain, 'an evaluation changes bits')
    equal([(e['step'], e['targets']) for e in evaluated['eval']], [(2, 330), (4, 330)], 'evaluations')
    equal([line['eval_loss'] for line in lines_of('log') if 'eval_loss' in line], [e['loss'] for e in evaluated['eval']], 'their log')
    equal(os.listdir('a/b/c'), ['checkpoint-4'], 'parents of --save')
    loaded = {'eval': 'held', 'load': 'a/b/c', 'layers': None}
    values = [still(folder, f'evaluated by {method}, {ranks}', **{**loaded, 'method': method, 'ranks': ranks})['eval']
              for method, ranks in [('ulysses', 1), ('upipe', 2), ('upipe', 3), ('upipe', 4)]]
    values += [still(folder, f'evaluated by {n} replicas', **{**loaded, 'ranks': ranks, 'replicas': n})['eval'] for ranks, n in [(2, 2), (8, 4)]]
    exact = 0 if plain['config']['products'] == 'built-in' else 1e-6  # a BLAS promises no equal bits
    near([v[0]['loss'] for v in values], [evaluated['eval'][1]['loss']] * 6, 'evaluations by other ranks, methods and batches', exact)
    merged = [still(folder, f'evaluated by {method}', **loaded, method=method, ranks=ranks)['eval'][0]['loss']
              for method, ranks in [('zigzag', 3), ('upipe-fpdt', 2)]]
    near(merged, [values[0][0]['loss']] * 2, 'the loss where attention is merged', 1e-6)
    parts = []
    for at in range(0, 320, 64):  # each window alone
        write('part', read('held')[at:at + 65])
        parts.append(still(folder, f'window {at}', **{**loaded, 'eval': 'part', 'ranks': 1})['eval'][0]['loss'] * 64)
    write('part', read('held')[:321])
    near([sum(parts)], [still(folder, 'five windows', **{**loaded, 'eval': 'part'})['eval'][0]['loss'] * 320], 'windows alone', max(exact, 1e-12))
    first = still(folder, 'first weights', save='first', layers=1)
    equal((first['loss'], first['eval'], os.listdir('first')), ([], [], ['checkpoint-0']), 'no step')
    same(good(folder, 'from first weights', resume='first', steps=4, save='first', layers=None, batch=None, lr=1e-3, warmup=1, min_lr=1e-4),
         good(folder, 'from the start', layers=1, lr=1e-3, warmup=1, min_lr=1e-4), 'exported first weights')
    failed(folder, given(**{**few, 'eval': 'none'}), 1, ['none', 'No such file'])
    shutil.copy('held', 'own')
    failed(folder, given(**{**few, 'eval': 'own', 'json': 'own'}), 1, ['own', 'replace the file of --eval'])


def test_order(folder):
    """Each epoch has every window once, in an order of its own."""
    write('short', read(BOOK)[:8 * 64 + 1])
    loss = good(folder, 'two epochs', data='short', layers=1, steps=16, lr=0, min_lr=0)['loss']
    equal((sorted(loss[8:]), len(set(loss))), (sorted(loss[:8]), 8), 'two epochs: each window once')
    check(loss[8:] != loss[:8], f'two epochs have one order: {loss}')


def test_refusals(folder):
    outputs = {'json': 'numbers.json', 'trace': 'trace.json', 'save': 'save'}
    write('empty', b'')
    write('text', read(BOOK)[:64])
    os.mkfifo('pipe')
    for flags, *words in [
        ({'data': 'missing'}, 'missing', 'No such file'), ({'data': 'empty'}, 'empty', 'is empty'),
        ({'data': 'text'}, 'text', '64 bytes', '65'), ({'data': folder}, 'no regular file'),
        ({'data': 'pipe'}, 'pipe', 'no regular file'), ({'data': '/dev/zero'}, 'no regular file'),
        ({'tokens': 2147483646}, '388085', '2147483646'),
        ({'heads': 5, 'kv_heads': 2}, '5', '2'), ({'kv_heads': 8}, '4', '8'),
        ({'method': 'upipe', 'ranks': 4, 'overlap': True}, '--overlap', '4 heads at a time', 'one stage'),
        ({'method': 'fpdt', 'ranks': 2, 'segments': 1, 'overlap': True}, '--overlap', 'one segment'),
        ({'ranks': 4, 'tokens': 3}, '3', '4'), ({'ranks': 4, 'tokens': 7, 'method': 'zigzag'}, '7', '8', 'two parts'),
        ({'ranks': 4, 'method': 'double-ring', 'inner': 3}, '4', '3'),
        ({'ranks': 3, 'heads': 4, 'method': 'upipe-naive'}, 'unsupported', '4', '3'),
        ({'method': 'fpdt', 'segments': 33}, '64 tokens in 33 segments over 2 ranks'),
        ({'ranks': 3, 'method': 'upipe-fpdt'}, 'unsupported', 'segments', '2 stages', '3 ranks'),
        ({'chunk': 3}, '3'), ({'chunk': 8}, '8', '4'), ({'head_dim': 7}, '7', '32', '256'), ({'head_dim': 264}, '264'),
        ({'tile_bytes': '5B'}, '5', '[0-9]{3}'), ({'untied': True, 'vocab': 2147483647}, 'GiB', '[0-9]'),
        ({'model_dim': 65536, 'head_dim': 256, 'ff_dim': 1000000}, 'GiB', '[0-9]'),
        ({'layers': 4096, 'model_dim': 16777216, 'head_dim': 256, 'ff_dim': 16777216}, '[0-9]'),
        ({'resume': 'nowhere'}, 'nowhere', 'No such file'), ({'load': folder}, 'neither a config.json nor a checkpoint'),
        *(({flag: 'missing/deeper'}, 'missing/deeper', 'No such file') for flag in ('json', 'trace', 'log')),
        ({'save': 'text'}, 'text', 'Not a directory'), ({'json': folder}, 'directory'), ({'json': '/dev/full'}, '/dev/full'),
        ({'json': 'a' * 300}, 'too long'), ({'trace': './numbers.json'}, 'numbers.json', 'both'), ({'log': '/dev/full'}, '/dev/full'),
    ]:
        failed(folder, given(**{**outputs, **flags}), 1, words)
    shutil.copy(BOOK, 'book')
    os.symlink('book', 'link')
    failed(folder, given(data='book', json='link'), 1, ['link', 'replace the file of --data'])
    failed(folder, given(data='link', trace='book'), 1, ['book', 'replace the file of --data'])
    if os.geteuid() != 0:
        os.mkdir('closed', 0o500)
        for flag in ('json', 'trace', 'save'):
            failed(folder, given(**{flag: 'closed/x'}), 1, ['closed/x', 'Permission denied'])
        failed(folder, given(save='closed'), 1, ['closed', 'Permission denied'])
    else:
        print('left out: a folder that cannot be written to, as root may write everywhere')


def test_resume_refusals(folder):
    good(folder, 'a run', save='m', seed=3, batch=2)
    write('other', read(BOOK)[1:])
    write('backwards', read(BOOK)[::-1])
    base = {'resume': 'm', 'seed': 3, 'batch': 2, 'steps': 6}
    failed(folder, given(**base) + ['--layers', '3'], 1, ['--layers', 'm/checkpoint-4/config.json'])
    failed(folder, given(**base, attention_bias='qkv'), 1, ['--attention-bias', 'm/checkpoint-4/config.json'])
    for steps in (4, 2):
        failed(folder, given(**{**base, 'steps': steps}), 1, ['done 4 steps', f'says {steps}'])
    failed(folder, given(**{**base, 'steps': None}), 1, ['done all 4 steps of its training'])
    for more, *words in [({'seed': 4}, '--seed 3', '--seed 4'), ({'tokens': 32}, '--tokens 64', '--tokens 32'),
                         ({'batch': 1}, '--batch 2', '--batch 1'),
                         ({'accumulate': 2}, '--accumulate 1', '--accumulate 2'), ({'dtype': 'bf16'}, 'f32', 'bf16'),
                         ({'data': 'other'}, '388085', '388084'),
                         ({'data': 'backwards'}, 'another text than backwards', 'same length')]:
        failed(folder, given(**{**base, **more, 'save': 'n', 'json': 'x.json'}), 1, words)
    for flags in ({'load': 'm'}, {}, {'resume': 'm/checkpoint-4', 'seed': 3, 'batch': 2, 'steps': 5, 'save': 'n'}):
        other = {'save': 'm', **flags}
        if other['save'] == 'n':
            shutil.copytree('m', 'n')
        failed(folder, given(**other), 1, [f'{other["save"]} holds', 'does not continue'])
    # The schedule that does not fit is the checkpoint's, and is called so.
    failed(folder, given(**base, lr=1e-5), 1, ["the checkpoint's --min-lr 0.0001 is above --lr 1e-05"])
    failed(folder, given(**base, min_lr=0.5), 1, ["--min-lr 0.5 is above the checkpoint's --lr 0.001"])
    # Another branch that goes on beside newer checkpoints: the next --resume would take those.
    shutil.copytree('m/checkpoint-4', 'm/checkpoint-9')
    changed_header('m/checkpoint-9/optimizer.safetensors', lambda head: head['__metadata__'].update(step='9'))
    failed(folder, given(**{**base, 'resume': 'm/checkpoint-4', 'save': 'm'}), 1,
           ['m holds m/checkpoint-9, which a later --resume m would take', 'follows m/checkpoint-4', 'save elsewhere'])
    good(folder, 'an older one, saved elsewhere', **{**base, 'resume': 'm/checkpoint-4', 'save': 'branch', 'steps': 5})


def test_renamed(folder):
    """A checkpoint that has another name than its step's: each --resume would take it again, and train the same anew."""
    good(folder, 'a run', save='m', save_every=2, keep=3)
    shutil.copytree(os.path.join(folder, 'm', 'checkpoint-2'), os.path.join(folder, 'm', 'checkpoint-100'))
    words = ['m/checkpoint-100', 'has done 2 steps, and not the 100 of its name: name it checkpoint-2, or remove it']
    for where in ('m', 'm/checkpoint-100', 'm/checkpoint-100//'):
        failed(folder, given(resume=where, steps=6, save='m'), 1, words)
        failed(folder, given(load=where, steps=6), 1, words)
        no_logits(folder, words, load=where, ids=BOOK)
    failed(folder, given(save='m'), 1, words)
    # one that is older by its name, and would be pruned or replaced
    os.rename(os.path.join(folder, 'm', 'checkpoint-100'), os.path.join(folder, 'm', 'checkpoint-1'))
    failed(folder, given(resume='m', steps=6, save='m', keep=1), 1, ['m/checkpoint-1:', 'has done 2 steps, and not the 1 of'])
    # of one that has no metadata, or none that can be read, no name is wrong
    for name in ('optimizer.safetensors', 'model.safetensors'):
        write(os.path.join(folder, 'm', 'checkpoint-1', name), b'')
    good(folder, 'beside what is no checkpoint', resume='m', steps=6, save='m')
    good(folder, 'a copy under a name of its own', resume='m/checkpoint-6', steps=8)


def changed_header(path, change):
    _, _, head, start = safetensors(path)
    change(head)
    write_header(path, head, read(path)[start:])


def emptied(path, name):
    """A tensor becomes one of no element."""
    metadata, tensors, _, _ = safetensors(path)
    write_tensors(path, {**tensors, name: (tensors[name][0], [0], b'')}, metadata)


def test_broken(folder):
    """A checkpoint that is not what it should be is refused, by --load where it is about the model. What files may say is in
    cases/: here is what they must have of each other, and a case of each kind."""
    good(folder, 'a run', save='m')
    whole = 'm/checkpoint-4'
    gate = 'model.layers.1.mlp.gate_proj.weight'
    model, optimizer = 'model.safetensors', 'optimizer.safetensors'

    def case(what, name, change, words):
        shutil.copytree(whole, 'broken')
        data = change(f'broken/{name}')
        if data is not None:
            write(f'broken/{name}', data)
        for flag in ['resume', 'load'] if name != optimizer else ['resume']:
            failed(folder, given(**{flag: 'broken'}, steps=6, save='n', json='x.json'), 1, words, f'{what}, --{flag}')
        shutil.rmtree('broken')

    def header_case(what, name, change, words):
        case(f'{name}: {what}', name, lambda at: changed_header(at, change), words)

    for name, prefix in ((model, ''), (optimizer, 'exp_avg.')):
        data = read(f'{whole}/{name}')
        for what, broken in {'empty': b'', 'cut': data[:len(data) // 2], 'longer': data + b'x', 'a header of 2^63': struct.pack('<Q', 2**63) + data[8:]}.items():
            case(f'{name}: {what}', name, lambda at, broken=broken: broken, [name])
        case(f'{name}: a pointer', name, lambda at: POINTER, [name, 'it is a Git LFS pointer'])
        case(f'{name} is gone', name, os.remove, ['model' if name == model else name])
        for what, change, words in [('a shape', lambda t: t.update(shape=t['shape'][::-1]), [gate, '192', '64']),
                                    ('another dtype', lambda t: t.update(dtype='I32'), [gate, 'I32']),
                                    ('no offsets', lambda t: t.pop('data_offsets'), [name])]:
            header_case(what, name, lambda head, change=change: change(head[prefix + gate]), words)
        case(f'{name}: a shard of ZeRO-3', name, lambda at, empty=prefix + gate: emptied(at, empty), [gate, 'is empty, as where ZeRO-3'])
        header_case('another name', name, lambda head: head.update(
            {'model.layers.9.mlp.gate_proj.weight': head.pop(prefix + gate)}), ['gate_proj'])
    header_case('a step', optimizer, lambda head: head['__metadata__'].update(step='-1'), ['step is -1'])
    header_case('no metadata', optimizer, lambda head: head.pop('__metadata__'), ['missing'])

    for pickle in 'pytorch_model.bin', 'pytorch_model.bin.index.json':
        case(pickle, model, lambda at, pickle=pickle: os.rename(at, os.path.join(os.path.dirname(at), pickle)), [pickle + ': is of pickles, which are not read'])
    case('an index: a pointer', model + '.index.json', lambda at: os.remove('broken/' + model) or POINTER, ['index.json', 'Git LFS pointer'])
    case('config.json: a pointer', 'config.json', lambda at: POINTER, ['config.json', 'Git LFS pointer'])
    config = load('m/checkpoint-4/config.json')
    for change, *words in [
        ({'model_type': 'gpt2'}, 'gpt2'), ({'other': 1}, 'other', '--ignore-key'), ({'attention_bias': True}, 'q_proj.bias', 'missing'),
        ({'model_type': 'qwen2', 'architectures': ['Qwen2ForCausalLM']}, 'q_proj.bias', 'missing'),
        ({'num_hidden_layers': 3}, 'layers.2'), ({'num_hidden_layers': 1}, 'layers.1'), ({'intermediate_size': 128}, '192', '128'),
        ({'vocab_size': 100}, '100', '256'), ({'tie_word_embeddings': False}, 'lm_head'),
    ]:
        text = json.dumps({**config, **change})
        case(f'config.json: {change}', 'config.json', lambda at, text=text: text, words)
    for text in (b'', b'\xff\xfe', b'[' * 100000):
        case(f'config.json: {text[:20]}', 'config.json', lambda at, text=text: text, ['config.json'])


# ---- what goes wrong on the way ----


def patched(source, target, name, pattern, file='model.safetensors'):
    """A copy of a checkpoint with a number of one tensor replaced."""
    shutil.copytree(source, target)
    at = f'{target}/{file}'
    data = bytearray(read(at))
    _, _, head, start = safetensors(at)
    begin = start + head[name]['data_offsets'][0]
    data[begin:begin + 4] = pattern
    write(at, data)


def test_not_finite(folder):
    good(folder, 'a run', save='m')
    whole = 'm/checkpoint-4'
    for what, name, value, *words in [('nan', 'model.layers.0.mlp.up_proj.weight', float('nan'), 'not finite'),
                                      ('inf', 'model.norm.weight', float('inf'), 'not finite'),
                                      ('huge', 'model.layers.1.self_attn.v_proj.weight', 3e38, 'step 1:', 'nothing was updated')]:
        patched(whole, 'bad', name, struct.pack('<f', value))
        for ranks in (1, 4):
            failed(folder, given(load='bad', save='out', sample=3, ranks=ranks, deadline=60), 1,
                   [name, *words] if len(words) == 1 else words, f'{what} in the weights')
        equal(os.path.exists('out'), False, f'{what}: a checkpoint')
        shutil.rmtree('bad')
    # Finite in the file, and in bf16 not.
    patched(whole, 'bad', 'model.layers.0.mlp.up_proj.weight', struct.pack('<f', 3.4e38))
    failed(folder, given(load='bad', steps=0, dtype='bf16'), 1, ['up_proj.weight has a value that is not finite in bf16'])
    shutil.rmtree('bad')
    # Finite weights whose losses, or their sum, are not: no number is reported, and no character drawn.
    write('held', read(BOOK)[:200])
    for what, value in ('overflows', 3e38), ('leaves 63 bits', 1e20):
        patched(whole, 'bad', 'model.norm.weight', struct.pack('<f', value))
        still = {'load': 'bad', 'steps': 0, 'deadline': 60}
        for more in {'ranks': 1}, {'ranks': 4}, {'ranks': 4, 'replicas': 2}:
            done = failed(folder, given(**{**still, 'eval': 'held', 'sample': 3, 'json': 'x.json', 'log': 'x.log', **more}), 1,
                          [r'step 0: the loss of --eval is no number: [1-9]\d* of its 199 targets'], f'{what}, evaluated', kept=False)
            equal([e['loss'] for e in numbers_of(folder, 'x.json')['eval']], [None], f'{what}: an evaluation in JSON')
            equal([line['eval_loss'] for line in lines_of('x.log')], [None], f'{what}: an evaluation in the log')
            check('sample' not in done.stdout, f'{what}: a sample of {done.stdout}')
            if value > 1e30:
                done = failed(folder, given(**{**still, 'sample': 3, **more}), 1, ['the sample: a logit is not finite'], f'{what}, sampled')
                check('sample' not in done.stdout, f'{what}: a sample of {done.stdout}')
        shutil.rmtree('bad')
    patched(whole, 'bad/checkpoint-4', 'model.norm.weight', NAN)
    failed(folder, given(resume='bad', save='bad', steps=5), 1, ['norm.weight has a value that is not finite'], 'NaN resumed')
    shutil.rmtree('bad')
    # A state that makes the weights NaN in a step whose loss is finite: nothing is saved of it, nothing removed.
    patched(whole, 'nan/checkpoint-4', 'exp_avg.model.norm.weight', NAN, 'optimizer.safetensors')
    for every in (1, 0):
        failed(folder, given(resume='nan', save='nan', steps=5, save_every=every), 1,
               ['nan/checkpoint-5: .*norm.weight is not finite, and is not saved'], f'NaN after a step, every {every}')
    done = failed(folder, given(resume='nan', save='nan', steps=6), 1, ['checkpoint-5'], 'NaN, then a step', lines=2)
    check(done.stderr.startswith('train: step 6: the loss is not a number'), f'NaN, then a step: {done.stderr}')
    shutil.rmtree('nan')
    # Too large a rate: what had been saved before stays, and so does the last state with a finite loss.
    for ranks in (2, 4):
        done = failed(folder, given(steps=60, lr=1000, clip=0, save='out', save_every=4, json='x.json', ranks=ranks,
                                    sample=3, deadline=60), 1, [r'step \d+:'], 'too large a rate', kept=False)
        last = int((re.search(r'step (\d+):', done.stderr) or [0, 0])[1]) - 1
        needed(last > 1, f'too large a rate: {done.stderr}')
        equal(sorted(os.listdir('out')), sorted({f'checkpoint-{n}' for n in (last, last // 4 * 4) if n}),
              'too large a rate: checkpoints')
        equal(len(numbers_of(folder, 'x.json')['loss']), last, 'too large a rate: losses')
        failed(folder, given(steps=60, lr=1000, clip=0, resume='out', ranks=ranks), 1, [f'step {last + 1}:'],
               'too large a rate: goes on')
        for name in os.listdir('out'):
            done = run(given(steps=1, load=f'out/{name}', ranks=ranks), folder)
            check('cannot be' not in done.stderr and done.returncode in (0, 1), f'{name} is not whole: {done.stderr}')
            check_files(f'out/{name}', numbers_of(folder, 'x.json')['config'], int(name[11:]), name)
        shutil.rmtree('out')
        os.remove('x.json')


def test_not_finite_kept(folder):
    """The only checkpoint that --keep leaves is the one to go on from, whatever comes after it: it stays beside the last one."""
    write('held', read(BOOK)[:200])
    good(folder, 'two steps', save='m', steps=2)
    name = 'exp_avg.model.layers.1.self_attn.%s_proj.weight'  # a step makes both so large that their product overflows in the next one
    patched('m/checkpoint-2', 'one', name % 'v', struct.pack('<f', 1e30), 'optimizer.safetensors')
    patched('one', 'loss/checkpoint-2', name % 'o', struct.pack('<f', 1e30), 'optimizer.safetensors')
    patched('m/checkpoint-2', 'eval/checkpoint-2', 'model.norm.weight', struct.pack('<f', 1e16))
    for what, flags, words in [('loss', {}, 'step 4: .* nothing was updated'),
                               ('eval', {'eval': 'held', 'eval_every': 3}, 'step 3: the loss of --eval is no number')]:
        failed(folder, given(resume=what, save=what, save_every=2, steps=6, deadline=60, **flags), 1, [words], what, kept=False)
        equal(sorted(os.listdir(what)), ['checkpoint-2', 'checkpoint-3'], f'the {what} is not finite: checkpoints')


def test_disk(folder):
    good(folder, 'a run', save='save', steps=2)
    for name in ('numbers.json', 'trace.json'):
        write(name, b'old')
    on = {'resume': 'save', 'save': 'save', 'steps': 6}
    for size, flags, *words in [
        (1000, {'json': 'numbers.json'}, 'numbers.json', 'cannot be written'),
        (5000, {'json': 'numbers.json', 'trace': 'trace.json'}, 'trace.json', 'cannot be written'),
        *((size, {**on, 'save_every': 1}, 'checkpoint-3', '[a-z]') for size in (100, 3000, 100000, 600000)),
        (3000, {**on, 'method': 'usp', 'ranks': 4}, 'checkpoint-6', '[a-z]'),
    ]:
        failed(folder, given(**flags), 1, words, f'no space beyond {size} bytes, {flags}', preexec_fn=limit_files(size))
    # What was trained until then is not lost.
    done = run(given(resume='save', save='save', save_every=2, steps=6, json='numbers.json'), folder,
               preexec_fn=limit_files(100000))
    equal((done.returncode, len(numbers_of(folder, 'numbers.json')['loss'])), (1, 2), 'a full disk after two steps')
    equal(sorted(os.listdir('save')), ['checkpoint-2'], 'checkpoints after a full disk')
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

    def planned(**flags):
        """What a plan says, and its JSON, which is all that it leaves."""
        done = quiet(words_of({**flags, 'plan': True, 'json': 'plan.json'}), folder, f'the plan of {flags}')
        numbers = load('plan.json')
        os.remove('plan.json')
        return done.stdout, numbers

    slopes = {}
    for method, activations in [('ulysses', 'ac'), ('ulysses', 'offload'), ('upipe', 'ac'), ('upipe', 'offload')]:
        said, numbers = planned(**shape, method=method, activations=activations)
        slopes[method, activations] = slope = numbers['slope_units']
        found = re.search(r'peak +([\d.]+) +slab +([\d.]+)\n +host +([\d.]+) +slab +([\d.]+)', said)
        needed(found is not None, f'no slopes: {said}')
        near([float(text) for text in found.groups()], list(slope.values()), f'{method}: slopes', 1e-2)
        near([slope['slab'], slope['host_slab']], [slope['peak'], slope['host']], f'{method}: holes', 1e-6)
        check(all(part in said for part in PARTS), f'{method}: a part is missing: {said}')
    for method in ('ulysses', 'upipe'):
        here, away = slopes[method, 'ac'], slopes[method, 'offload']
        equal((here['host'], away['host']), (0, 32), f'{method}: what is in the second pool')
        near([here['peak'] - away['peak']], [32], f'{method}: {here} and {away}', 1e-3)
    upipe, ulysses = slopes['upipe', 'offload']['peak'], slopes['ulysses', 'offload']['peak']
    check(upipe <= 5.1 and upipe < ulysses <= 6.6, f'slopes: {slopes}')
    # Many stages, and sizes that nobody would wait for.
    equal(run(words_of({'plan': True, 'layers': 1, 'heads': 64, 'kv_heads': 64, 'ranks': 1, 'chunk': 1}),
              folder).returncode, 0, 'a plan of 64 stages')
    equal(run(words_of({'plan': True, 'model_dim': 8, 'tokens': 2147483644}), folder).returncode, 0, 'a plan of 2^31 tokens')
    failed(folder, words_of({'plan': True, 'model_dim': 65536, 'vocab': 2147483647}), 1, ['dry run', '[0-9]e\\+'])
    done = run(words_of({**shape, 'ranks': 16, 'method': 'upipe-ring', 'ring': 4, 'plan': True}), folder)
    equal(done.returncode, 0, f'the plan of a ring: {done.stderr}')
    check('16 ranks in rings of 4, chunk 4' in done.stdout, f'the plan of a ring: {done.stdout}')
    # In many segments what a token adds to the device is little more than the stream.
    for activations in ('ac', 'offload'):
        said, numbers = planned(**shape, method='upipe-fpdt', segments=16, activations=activations)
        check('8 ranks, 16 segments, chunk 8' in said, f'the plan of segments: {said}')
        slopes[activations] = numbers['slope_units']
    here, away = slopes['ac'], slopes['offload']
    check(1 <= away['peak'] <= away['slab'] <= 1.25, f'in segments: {away}')
    near([here['peak'] - away['peak'], away['host'] - here['host']], [32, 32], 'copies, in segments', 1e-3)
    check(away['host_slab'] <= 40.1, f'the second pool in segments: {away}')
    # Where the kernels will run makes a difference, but need not be there.
    slope = planned(**shape, method='upipe', offload=True, device='cuda')[1]['slope_units']
    check(upipe < slope['peak'] <= slope['slab'] <= 5.35, f'the plan for a GPU: {slope}')
    # The largest rank is not always the first one.
    _, plan = planned(layers=2, model_dim=3584, heads=28, kv_heads=4, head_dim=128, ranks=8, tokens=65536, dtype='bf16', method='ulysses')
    check(plan['rank'] > 0 and plan['all_ranks']['slab_bytes'] < 8 * plan['slab_bytes'], f'the largest rank: {plan}')
    # The plan is the run's.
    numbers = good(folder, 'as planned', offload=True, steps=1)
    small = {**MODEL, 'tokens': 64, 'ranks': 2, 'offload': True}
    done = run(words_of({**small, 'plan': True}), folder)
    for key in ('plan_bytes', 'host_bytes'):
        check(f' {numbers[key]} bytes' in done.stdout, f'{key} is not in the plan: {done.stdout}')
    equal(os.listdir(folder), ['numbers.json'], 'what a plan leaves')
    _, plan = planned(**small)
    same(plan, numbers, 'a plan as JSON', keys=('plan_bytes', 'host_bytes', 'plan_sent_bytes', 'plan_moved_bytes', 'memory'))
    equal(set(plan), {'config', 'plan_bytes', 'slab_bytes', 'host_bytes', 'host_slab_bytes', 'plan_sent_bytes',
                      'plan_moved_bytes', 'memory', 'rank', 'all_ranks', 'slope_units', 'slope_bytes_all_ranks'},
          'keys of a plan')


def test_trace(folder):
    static = {'weights', 'vectors', 'gradients', 'moments', 'master', 'tokens', 'losses'}
    for flags in ({'ranks': 4, 'heads': 8, 'method': 'ulysses'}, {'dtype': 'bf16', 'ranks': 2, 'sample': 3},
                  {'ranks': 4, 'method': 'usp', 'tokens': 67}, {'ranks': 2, 'method': 'upipe-fpdt', 'segments': 3},
                  {'ranks': 2, 'zero': 3, 'untied': True, 'vocab': 1024, 'tokens': 256}):
        numbers = good(folder, 'traced', trace='trace.json', **flags)
        events = load('trace.json')
        equal({event['pid'] for event in events}, set(range(flags['ranks'])), 'ranks in the trace')
        for rank in range(flags['ranks']):
            peaks, live, spans = replay([event for event in events if event['pid'] == rank], f'rank {rank}')
            equal({event['name'] for event in spans.values()} - static, set(), f'rank {rank}: never given back')
            if rank == 0:
                equal(max(peaks.values()), numbers['peak_bytes'], 'the peak by the trace')
                if flags.get('zero', 1) < 2: # nothing is gathered
                    equal(live, sum(numbers['memory']['at_peak'][part] for part in PARTS[:4]), 'what stays by the trace')
                gradients = replay([event for event in events if (event['pid'], event.get('name')) == (0, 'gradients')], 'gradients')
                equal(max(gradients[0].values()), numbers['memory']['largest']['gradients'], 'the largest by the trace')


def test_sample(folder):
    prompt = 'And God said '
    flags = {'sample': 20, 'temperature': 0, 'prompt': prompt, 'steps': 3, 'ranks': 4}
    plain = {'sample': 0, 'prompt': None, 'temperature': None}
    outs = [run(given(**{**flags, **more}), folder) for more in
            ({}, {'temperature': 1e-4}, {'method': 'ulysses'}, {'temperature': 0.9}, {'temperature': 0.9}, plain)]
    equal([out.returncode for out in outs], [0] * 6, 'samples: status')
    texts = [out.stdout[out.stdout.find(prompt):] if prompt in out.stdout else '' for out in outs]
    check(all(len(text) > len(prompt) + 20 for text in texts[:5]), f'samples: {texts}')
    check(texts[0] == texts[1] == texts[2], f'the likeliest bytes differ: {texts[:3]}')
    check('sample, temperature 0: what the model writes after the prompt\n' + prompt in outs[0].stdout, f'a heading: {outs[0].stdout}')
    drawn = texts[0][len(prompt):]
    stop = re.match(r'((?:\\x[0-9a-f]{2}|[^ -~])*)([ -~])', drawn)
    needed(stop, f'no ASCII in {drawn!r}')
    done = run(given(**flags, stop_token=ord(stop.group(2))), folder)
    equal(done.stdout.split(prompt)[-1].rstrip('\n'), stop.group(1), 'a stop token')
    check(texts[3] == texts[4] != texts[0], f'with the temperature: {texts[3:5]}')
    equal(texts[5], '', 'no sample')
    # What a terminal would obey is written as numbers, of the prompt and of bytes that nothing was learnt of.
    done = run(given(sample=100, temperature=5, prompt='\x1b[31m', steps=1), folder)
    check('\\x1b[31m' in done.stdout and all(c.isprintable() or c in '\n\t' for c in done.stdout),
          f'control characters: {done.stdout!r}')
    long = 'x' * 100 + 'In the beginning God created the heaven and the earth. And the earth was with'
    ends = [run(given(**{**flags, 'prompt': text}), folder) for text in (long, long[-64:], 'q' + long)]
    tails = [end.stdout.split(long[-64:])[-1] for end in ends]
    equal([end.returncode for end in ends], [0] * 3, 'a long prompt: status')
    check(tails[0] == tails[1] == tails[2] and len(tails[0]) > 20, f'only the context counts: {tails}')
    # Logits of a large vocabulary may be what takes most memory, on whichever rank the last token is.
    for ranks, start in [(4, 'x'), (4, 'x' * 60), (3, 'x' * 60)]:
        more = {'vocab': 200000, 'model_dim': 32, 'heads': 12, 'layers': 1, 'steps': 1, 'tokens': 72, 'sample': 2}
        done = run(given(**more, ranks=ranks, kv_heads=12, prompt=start), folder)
        check(done.returncode == 0, f'a large vocabulary, {ranks} ranks: {done.stderr}')
    # Segments of which a rank trains with unequally many tokens, and a context that is shorter than the sequence.
    quiet(given(method='fpdt', segments=3, ranks=3, tokens=301, sample=4), folder, 'a sample in segments')
    # A text that is not cut: as much as the context can hold, and over its end.
    done = run(given(sample=80, tokens=64, ranks=1, prompt='a' * 63), folder)
    equal(done.returncode, 0, 'a sample over the end of the context')
    for method in METHODS:
        done = run(given(**{**flags, 'tokens': 67, 'method': method}), folder)
        check(done.returncode == 0 and len(done.stdout.split(prompt)[-1]) > 20, f'a sample by {method}: {done.stderr}')


def test_pictures(folder):
    """plot_training.py draws what --json wrote, and prints what the text's frequencies say; where a Python has Matplotlib."""
    python = python_with('matplotlib')
    if python is None:
        print('train: left out: pictures, as no Python here has Matplotlib')
        return
    write('text', b'abcb' * 100)
    for method in 'ulysses', 'upipe':
        good(folder, method, method=method, ranks=2, data='text', tokens=64, steps=200, zero=3)
        os.rename('numbers.json', method + '.json')
    script = os.path.join(TOP, 'examples', 'train', 'plot_training.py')
    for what in 'loss', 'memory':
        done = run_command([python, script, what, what + '.png', 'ulysses.json', 'upipe.json'], cwd=folder)
        check(done.returncode == 0 and os.path.exists(what + '.png') and read(what + '.png')[:4] == b'\x89PNG',
              f'no picture of {what}: {done.stderr[-400:]}')
        # b is every other byte, and a or c is certain only to who knows two bytes before it
        want = r'nats a byte at the end: \d\.\d\d, .*: no context 1\.04, 1 byte of it 0\.35, 2 bytes of it 0\.00\n'
        check(re.fullmatch(want if what == 'loss' else '', done.stdout), f'{what}: {done.stdout!r} is not {want}')


if __name__ == '__main__':
    sys.exit(run_tests('train', test_flags, test_usage, test_log, test_schedules, test_updates, test_eval, test_order, test_refusals, test_numbers, test_bits, test_methods,
                       test_accumulate, test_replicas, test_activations,
                       test_zero, test_prefetch, test_frozen, test_initial, test_lora, test_adapter, test_reduce_dtype, test_learning, test_checkpoints, test_loading, test_rope, test_qwen2, test_soft_cap, test_padding,
                       test_resume_refusals, test_renamed, test_broken, test_not_finite, test_not_finite_kept, test_disk, test_signals, test_two_writers, test_kills,
                       test_plan, test_trace, test_pictures, test_sample))

#!/usr/bin/env python3
"""test_block.py BLOCK -- the program bench/block, from the outside: what it says of each method, and how it ends

It compares the methods' results itself, before it prints anything; here it must find them equal, on small shapes. Times
are not asserted, only that they are there.
"""

import json
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), 'lib'))
from checks import check, end, equal, run_command, run_test  # pylint: disable=wrong-import-position

BLOCK = os.path.abspath(sys.argv[1])
FIELDS = {'method', 'ranks', 'chunk', 'stages', 'heads', 'kv_heads', 'head_dim', 'model_dim', 'tokens', 'dtype', 'kernels',
          'products', 'same_bits', 'other_bits', 'distance', 'unit_bytes', 'peak_bytes', 'plan_bytes', 'product_calls',
          'forward_s', 'backward_s', 'cpu_s'}
PARTS = {'transfer', 'attn_fwd', 'attn_bwd', 'products', 'all'}
PLAIN = 'ulysses_plain_gemm'
# Heads, key/value heads, model dim, tokens, type; then the methods, with their chunks. Ranks are four. Sums over 768
# terms of dX, and over the first model dim, have several parts. Where ranks share key/value heads, nothing is plain.
CASES = [
    ((16, 4, 680, 256, 'f32'), [('ulysses', 16), (PLAIN, 16), ('upipe', 4), ('upipe', 8)]),
    ((16, 4, 680, 256, 'bf16'), [('ulysses', 16), (PLAIN, 16), ('upipe', 4), ('upipe', 8)]),
    ((8, 8, 64, 132, 'f32'), [('ulysses', 8), (PLAIN, 8), ('upipe', 4)]),
    ((8, 2, 96, 128, 'f32'), [('ulysses', 8), ('upipe', 4)]),
]


def run(words, status, says='', **more):
    """What it prints; it must end with this status and say this on stderr, and print nothing where it fails."""
    done = run_command([BLOCK, *words], 50, **more)
    name = ' '.join(['block', *words])
    check(done.returncode == status, f'{name}: exit status {done.returncode}, not {status}: {done.stderr.strip()}')
    check(says in done.stderr, f'{name}: "{says}" is not in: {done.stderr.strip()}')
    check(status == 0 or not done.stdout, f'{name}: fails, and prints {done.stdout}')
    return done.stdout or ''


def check_method(line, shape, rounds):
    heads, kv_heads, model_dim, tokens, dtype = shape
    name = f'{line["method"]} with U = {line["chunk"]} of {shape}'
    equal(set(line) ^ FIELDS, set(), f'{name}: too much or too little')
    equal((line['heads'], line['kv_heads'], line['model_dim'], line['tokens'], line['dtype'], line['ranks']),
          (heads, kv_heads, model_dim, tokens, dtype, 4), f'{name}: the shape')
    equal(line['stages'], heads // line['chunk'], f'{name}: stages')
    equal(line['unit_bytes'], tokens // 4 * model_dim * (4 if dtype == 'f32' else 2), f'{name}: a unit')
    check(0 < line['plan_bytes'] == line['peak_bytes'], f'{name}: held {line["peak_bytes"]}, planned {line["plan_bytes"]}')
    equal(set(line['cpu_s']), PARTS, f'{name}: parts')
    for seconds in [line['forward_s'], line['backward_s'], *line['cpu_s'].values()]:
        check(len(seconds) == rounds and min(seconds) > 0, f'{name}: seconds {seconds}')
    for k in range(rounds):
        parts = sum(line['cpu_s'][part][k] for part in PARTS - {'all'})
        check(parts < 1.05 * line['cpu_s']['all'][k], f'{name}: parts of {parts} s in {line["cpu_s"]}')
    check(min(line['product_calls']) > 0 and (line['method'] != PLAIN or line['product_calls'] == [4, 11]),
          f'{name}: products {line["product_calls"]}')
    # Bits are promised in f32 with the built-in products, but of y and dX from plain products.
    equal(line['same_bits'], line['other_bits'] == [], f'{name}: same_bits, with others in {line["other_bits"]}')
    check(line['same_bits'] or 0 < line['distance'] < (1e-5 if dtype == 'f32' else 2e-2), f'{name}: {line["distance"]} away')
    if line['products'] == 'built-in' and dtype == 'f32':
        other = {'y', 'dX'} if line['method'] == PLAIN else set()
        check(set(line['other_bits']) <= other, f'{name}: other bits in {line["other_bits"]}')


def check_case(shape, methods, rounds=2):
    heads, kv_heads, model_dim, tokens, dtype = shape
    text = run(['--heads', str(heads), '--kv-heads', str(kv_heads), '--head-dim', '32', '--model-dim', str(model_dim),
                '--tokens', str(tokens), '--dtype', dtype, '--rounds', str(rounds)], 0, f'round {rounds} of {rounds}')
    lines = [json.loads(line) for line in text.splitlines()]
    if not equal([(line['method'], line['chunk']) for line in lines], methods, f'methods of {shape}'):
        return
    for line in lines:
        check_method(line, shape, rounds)
    check(lines[-1]['peak_bytes'] < lines[0]['peak_bytes'], f'UPipe holds no less than Ulysses: {lines}')


def check_ends():
    check('usage: block' in run(['--help'], 0), '--help does not mention its usage')
    for words, says in [('', '--tokens is needed'), ('--tokens many', 'many'), ('--tokens 64 --rounds 0', 'rounds'),
                        ('--tokens 64 --dtype f64', 'f64'), ('--tokens 64 more', "'more' is not a flag")]:
        run(words.split(), 2, says)
    for words, says in [('--tokens 64 --kv-heads 5', '16 query heads are no multiple of 5'),
                        ('--tokens 64 --head-dim 31', 'unsupported: head dim 31'), ('--tokens 3', '3 tokens are fewer than 4'),
                        ('--tokens 66', '66 tokens and 16/4 heads do not divide evenly into 4 ranks'),
                        ('--tokens 60 --ranks 3', '60 tokens and 16/4 heads do not divide evenly into 3 ranks')]:
        run(words.split(), 1, 'block: ulysses: ' + says)
    with open('/dev/full', 'w', encoding='utf-8') as full:
        run(['--tokens', '32', '--heads', '4', '--head-dim', '32', '--rounds', '1'], 1, 'block: the table cannot be written: ', stdout=full)


def main():
    for shape, methods in CASES:
        run_test(check_case, shape, methods)
    run_test(check_ends)
    return end('block')


if __name__ == '__main__':
    sys.exit(main())

#!/usr/bin/env python3
"""test_bench.py TOP -- the benchmarks' scripts, from the outside: a short run, what it writes, and how two are compared

Rates are not asserted, only that they are there: this machine may have other work.
"""

import json
import os
import sys

TOP = os.path.abspath(sys.argv[1])
sys.path[:0] = [os.path.join(os.path.dirname(os.path.abspath(__file__)), 'lib'), os.path.join(TOP, 'bench')]
# pylint: disable=wrong-import-position
from checks import check, needed, read, run_command, run_tests, write
import common

# Nothing is timed here, and kernels are optimized anyway. What a program forgets to set is garbage.
os.environ['CFLAGS'] = '-O0'
PATTERN = '-ftrivial-auto-var-init=pattern'
if common.accepts(PATTERN):
    os.environ['CFLAGS'] += f' {PATTERN}'
RUN = ['sh', os.path.join(TOP, 'bench', 'run.sh')]
COMPARE = [sys.executable, os.path.join(TOP, 'bench', 'compare.py')]
HEADER = {'machine', 'features', 'compiler', 'command', 'date', 'isa', 'peer_isa', 'contestants', 'left_out', 'errors',
          'peak_gflops', 'triad_gb_per_s'}
FIELDS = {'op', 'head_dim', 'dtype', 'causal', 'tokens', 'heads', 'threads', 'gflops', 'peak_gflops', 'peers',
          'round_s'}
MASK_FIELDS = {'op', 'head_dim', 'dtype', 'causal', 'tokens', 'heads', 'threads', 'gflops', 'peak_gflops',
               'seconds_per_token', 'ratio', 'ratio_range', 'round_s', 'base_round_s'}
MASKS = {'packed': 'sequences', 'window': 'window', 'softcap': 'softcap'}  # and the field that each adds
METHOD_FIELDS = {'op', 'method', 'head_dim', 'dtype', 'causal', 'heads', 'kv_heads', 'model_dim', 'ranks', 'ring',
                 'segments', 'chunk', 'tokens', 'products', 'stages', 'layout', 'ring_mode', 'unit_bytes', 'peak_bytes',
                 'plan_bytes', 'host_bytes', 'sent_bytes', 'forward_s', 'backward_s', 'total_s', 'round_s', 'cpu_s'}
BLOCK_FIELDS = METHOD_FIELDS | {'total_s_range', 'rounds', 'ratio_to_ulysses', 'ratio_to_ulysses_range',
                                'cpu_ratio_to_ulysses'}
LATENT_FIELDS = {'op', 'method', 'form', 'head_dim', 'v_dim', 'dtype', 'causal', 'heads', 'model_dim', 'ranks', 'chunk',
                 'tokens', 'peak_bytes', 'sent_bytes', 'seconds', 'cpu_s', 'round_s', 'ratio', 'ratio_range',
                 'cpu_ratio'}
STEP_FIELDS = {'op', 'method', 'shape', 'dtype', 'tokens', 'threads', 'seconds', 'tokens_per_s', 'round_s', 'peak_rss',
               'phases_s', 'ratio', 'ratio_range', 'memory_ratio'}
PARTS = {'transfer', 'attn_fwd', 'attn_bwd', 'products', 'all'}
BLOCK_METHODS = [('ulysses', 16), ('upipe', 4), ('upipe', 8)]
# Methods, and the ways on which they send something.
METHODS = {'upipe': {'team'}, 'zigzag': {'ring'}, 'upipe-ring': {'team', 'ring'}, 'fpdt': {'team', 'host'}}


def run(command, status, says=''):
    """The finished command, which must end with this status and say this on stderr."""
    done = run_command(command)
    name = ' '.join([os.path.basename(command[1]), *command[2:]])
    check(done.returncode == status, f'{name}: exit status {done.returncode}, not {status}: {done.stderr.strip()}')
    check(says in done.stderr, f'{name}: "{says}" is not in: {done.stderr.strip()}')
    return done


def check_usage(folder):
    check('COMMAND' in run([*RUN, '--help'], 0).stdout, 'run.sh --help does not mention COMMAND')
    check('--peers' in run([*RUN, 'attn', '--help'], 0).stdout, 'attn --help does not mention --peers')
    for words, says in [
        ('', 'no command'), ('nosuch', 'no command nosuch'), ('attn --peers nobody', 'nobody'),
        ('attn --tokens many --peers none', 'many'), ('attn --rounds 0 --peers none', 'positive'),
        ('attn --v-dim 32 --peers naive', 'one head dim'),
        ('attn --peers none --json nosuch/x.json', 'cannot be written'), ('masks --kinds nothing', 'nothing'),
        ('masks --threads 0', 'positive'), ('block --shapes 4x16', '4x16 is not like'), ('block --rounds 0', 'positive'),
        ('block --products nothing', 'nothing'), ('methods --methods nobody', 'nobody'), ('methods --tokens 512,512', 'twice'),
        ('methods --rounds 0', 'positive'), ('latent --ranks 3', 'invalid choice'),
        ('latent --tokens 255', 'multiples of --ranks'), ('ops --threads 0', 'positive'), ('gemm --peers nobody', 'nobody'),
        ('accuracy --data nothing', 'nothing'), ('accuracy --gradients --peers none', 'torch'),
        ('linear --cpu-time --threads 2 --peers none', '--threads 1'), ('states --tokens 5000 --peers none', 'power of two'),
        ('step --tokens 1024k --peers none', 'the text has'), ('step --tokens 4m --peers none', '4m'),
        ('step --threads 3 --peers none', 'share the heads'),
    ]:
        run([*RUN, *words.split()], 2, says)


def json_lines(path):
    return [json.loads(line) for line in read(path).splitlines()]


def short_run(path, *words):
    """Its table, the header and the cases of its file."""
    table = run([*RUN, *words, '--json', path], 0).stdout
    needed(os.path.exists(path), f'{words[0]} left no numbers')
    return table, *json_lines(path)


def check_numbers(folder):
    table, header, *cases = short_run('attn.json', 'attn', '--quick', '--peers', 'naive,bf16')
    check(set(header) == HEADER, f'the header has {sorted(set(header) ^ HEADER)} too much or too little')
    units = 'bf16' in header['contestants']  # bf16 instructions, which the processor may lack
    check(set(header['contestants']) - {'bf16'} == {'ours', 'naive'}, f'contestants: {header["contestants"]}')
    check(units or 'neither AMX nor AVX512-BF16' in header['left_out']['bf16'], f'left out: {header["left_out"]}')
    check(header['errors']['ours']['f32'] < header['errors']['ours']['bf16'], f'errors: {header["errors"]}')
    seen = set()
    for case in cases:
        check(set(case) == FIELDS, f'a line has {sorted(set(case) ^ FIELDS)} too much or too little')
        check(case['op'] in ('attn_fwd', 'attn_bwd') and case['dtype'] in ('f32', 'bf16'), f'a line: {case}')
        check(isinstance(case['causal'], bool) and case['tokens'] > 0 and case['threads'] > 0, f'a line: {case}')
        check(case['gflops'] > 0 and case['peak_gflops'] > 0, f'rates: {case}')
        check(min(case['round_s']) > 0 and len(case['round_s']) == 3, f'rounds: {case}')
        peers = {'naive'} if case['dtype'] == 'f32' else {'bf16'} if units else set()
        check(set(case['peers']) == peers, f'peers: {case}')
        check(all(rate > 0 for rate in case['peers'].values()), f'peers: {case}')
        seen.add((case['op'], case['dtype'], case['causal'], case['threads']))
    threads = {case['threads'] for case in cases}
    check(len(seen) == len(cases) == 8 * len(threads), f'{len(seen)} different cases in {len(cases)} lines')
    check(table.count('\n| forward') == table.count('\n| backward') == len(cases) // 2, 'the table lacks cases')
    check_compare('attn.json')


def check_apart(path, measured):
    """compare.py tells the cases of a file apart: none differs from itself."""
    same = run([*COMPARE, path, path], 0).stdout.count('+0.0 %')
    check(same == measured, f'{same} of {measured} measured values of {path} are equal to themselves')


def check_masks(folder):
    path = 'masks.json'
    table, header, *cases = short_run(path, 'masks', '--quick', '--threads', '1,2')
    check(set(header.get('errors', {})) == set(MASKS), f'masks: the header has {header}')
    for case in cases:
        kind, op = case['op'].split('_')
        check(op in ('fwd', 'bwd') and set(case) == MASK_FIELDS | {MASKS[kind]}, f'a line: {case}')
        low, high = case['ratio_range']
        check(0 < low <= case['ratio'] <= high and case['seconds_per_token'] > 0, f'ratios: {case}')
        check(len(case['round_s']) == len(case['base_round_s']) == 3, f'rounds: {case}')
    count = {kind: sum(case['op'].startswith(kind) for case in cases) for kind in MASKS}
    # Lengths; of each a forward and a backward, two data types, two numbers of threads.
    check(count == {'packed': 2 * 8, 'window': 4 * 8, 'softcap': 1 * 8}, f'masks: {count} cases')
    check(table.count('\nlargest: ') == 3, 'masks: the largest ratios are not all there')
    check_apart(path, len(cases))


def check_methods(folder):
    path = 'methods.json'
    table, header, *cases = short_run(path, 'methods', '--tokens', '256,512', '--dtypes', 'f32', '--rounds', '2',
                                        '--methods', ','.join(METHODS))
    check(set(header.get('errors', {})) == set(METHODS), f'methods: the header has {header}')
    check([(case['tokens'], case['method']) for case in cases] ==
          [(tokens, method) for tokens in (256, 512) for method in METHODS], 'methods: other cases')
    for case in cases:
        name, (low, high) = case['method'], case['ratio_range']
        check(set(case) == METHOD_FIELDS | {'ratio', 'ratio_range'} and set(case['cpu_s']) == PARTS, f'a line: {case}')
        check(min(case['forward_s'], case['backward_s'], *case['round_s']) > 0 and len(case['round_s']) == 2 and
              0 < low <= case['ratio'] <= high, f'times: {case}')
        check(case['peak_bytes'] > 0 and (case['host_bytes'] > 0) == (name == 'fpdt'), f'memory: {case}')
        sends = {way for way, sent in case['sent_bytes'].items() if sum(sent) > 0}
        check(sends == METHODS[name], f'bytes sent: {case}')
        check(f'\n| {name} |' in table, f'methods: the table lacks {name}')
    check_apart(path, 2 * len(cases))


def check_block(folder):
    path = 'block.json'
    table, header, *cases = short_run(path, 'block', '--quick')
    check(header.get('products') == 'built-in' and 0 < max(header['errors'].values()) < 1e-5,
          f'block: the header has {header}')
    check([(case['tokens'], case['method'], case['chunk']) for case in cases] ==
          [(tokens, *method) for tokens in (512, 1024) for method in BLOCK_METHODS], 'block: other cases')
    for case in cases:
        check(set(case) == BLOCK_FIELDS, f'a line has {sorted(set(case) ^ BLOCK_FIELDS)} too much or too little')
        first = case['method'] == 'ulysses'  # which every run of UPipe has beside it
        check(set(case['cpu_s']) == PARTS | {'other'} and case['rounds'] == (4 if first else 2), f'parts: {case}')
        low, high = case['ratio_to_ulysses_range']
        check(0 < low <= case['ratio_to_ulysses'] <= high and case['cpu_ratio_to_ulysses'] > 0, f'ratios: {case}')
        check(not first or low == high == 1, f'ratios: {case}')
        check(0 < case['total_s_range'][0] <= case['total_s'] <= case['total_s_range'][1], f'times: {case}')
        check(0 < case['plan_bytes'] == case['peak_bytes'] and case['stages'] == 16 // case['chunk'], f'memory: {case}')
    check(table.count(' | **total, s** | ') == 2 and table.count('\n| UPipe, U = ') == 2, 'block: the tables lack rows')
    check_apart(path, 2 * len(cases))
    run([*RUN, 'block', '--shapes', '4x16/5', '--tokens', '256', '--json', path], 1, 'no figures: failed')


def check_latent(folder):
    path = 'latent.json'
    table, _, *cases = short_run(path, 'latent', '--quick', '--ranks', '2')
    check([(case['tokens'], case['method'], case['chunk'], case['form']) for case in cases] ==
          [(tokens, *method, form) for tokens in (128, 256) for method in (('ulysses', 16), ('upipe', 2))
           for form in ('heads', 'gathered')], 'latent: other cases')
    for case in cases:
        check(set(case) == LATENT_FIELDS, f'a line has {sorted(set(case) ^ LATENT_FIELDS)} too much or too little')
        low, high = case['ratio_range']
        check(min(case['seconds'], case['cpu_s'], case['cpu_ratio'], *case['round_s']) > 0 and
              len(case['round_s']) == 2 and 0 < low <= case['ratio'] <= high, f'times: {case}')
        check(case['form'] != 'heads' or low == high == 1, f'ratios: {case}')
    for heads, gathered in zip(cases[::2], cases[1::2]):
        check(heads['sent_bytes'] > gathered['sent_bytes'] > 0 < heads['peak_bytes'] != gathered['peak_bytes'],
              f'bytes: {heads}, {gathered}')
    check(table.count(' | gathered | ') == 4, 'latent: the table lacks rows')
    check_apart(path, len(cases))


def check_accuracy(folder):
    path = 'accuracy.json'
    table, header, *cases = short_run(path, 'accuracy', '--quick', '--peers', 'none')
    check(set(header.get('contestants', {})) == {'ours'}, f'accuracy: the header has {header}')
    check(len(cases) == 2 * 2 * 2 * 5, f'accuracy: {len(cases)} cases')
    for case in cases:
        bound = 2e-5 if case['dtype'] == 'f32' else 2e-2
        check(0 < case['l2'] < bound and 0 < case['max'] < bound and case['peers'] == {}, f'errors: {case}')
    check(table.count('\n| dQ |') == 4, 'accuracy: the table lacks rows')
    check_apart(path, len(cases))


def check_linear(folder):
    path = 'linear.json'
    table, header, *cases = short_run(path, 'linear', '--quick', '--threads', '1', '--peers', 'none')
    check(0 < header['errors']['ours'] < 2e-6, f'linear: the header has {header}')
    check([(case['op'], case['rule']) for case in cases] ==
          [(f'linear_{op}', rule) for rule in ('delta', 'decay') for op in ('fwd', 'bwd')], 'linear: other cases')
    for case in cases:
        check(min(case['gflops'], case['peak_gflops'], *case['round_s'], case['peers']['products']) > 0, f'rates: {case}')
    check(table.count('\n| forward |') == 2, 'linear: the table lacks rows')
    check_apart(path, len(cases))


def check_states(folder):
    path = 'states.json'
    _, _, *cases = short_run(path, 'states', '--quick', '--peers', 'none')
    check(len(cases) == 2 * 3 * 3 * 2, f'states: {len(cases)} cases')
    check(all(0 < case['l2'] < 1e-6 and case['peers'] == {} for case in cases), f'states: errors: {cases}')
    check_apart(path, len(cases))


def check_step(folder):
    if not common.accepts('-ljansson'):
        print('left out: step, as its trainer needs jansson')
        return
    path = 'step.json'
    table, header, *cases = short_run(path, 'step', '--peers', 'none', '--layers', '1', '--tokens', '64', '--dtypes', 'f32,bf16',
                                      '--threads', '1,2', '--rounds', '2')
    check(header['errors']['ours']['f32'] < 1e-6 and header['errors']['ours-sac']['bf16'] < 1e-2, f'step: the header has {header}')
    check([(case['dtype'], case['threads'], case['method']) for case in cases] ==
          [(dtype, threads, method) for dtype in ('f32', 'bf16') for threads in (1, 2) for method in ('ours', 'ours-sac')],
          'step: other cases')
    for case in cases:
        check(set(case) == STEP_FIELDS, f'a line has {sorted(set(case) ^ STEP_FIELDS)} too much or too little')
        check(0 < sum(case['phases_s'].values()) < 1.5 * case['seconds'] and len(case['round_s']) == 2, f'times: {case}')
        check(case['peak_rss'] > 2**20 and 0 < case['ratio_range'][0] <= case['ratio'], f'memory and ratios: {case}')
    check(table.count('\n| ours') == len(cases) and table.count('goal: ') == 3, 'step: the table lacks rows')
    check_apart(path, len(cases))


def check_ops(folder):
    path = 'ops.json'
    _, _, *cases = short_run(path, 'ops', '--quick', '--threads', '1', '--dtypes', 'f32', '--ops', 'add,all_to_all')
    check([case['op'] for case in cases] == ['add'] + ['all_to_all'] * 2, f'ops: other cases than {cases}')
    check(all(case['gbytes_per_s'] > 0 and case['memcpy_gbytes_per_s'] > 0 for case in cases), f'ops: rates: {cases}')
    check_apart(path, len(cases))


def check_gemm(folder):
    path = 'gemm.json'
    table, header, *cases = short_run(path, 'gemm', '--quick', '--threads', '1', '--peers', 'bf16')
    check(header['errors']['ours']['f32'] < header['errors']['ours']['bf16'], f'gemm: the header has {header}')
    check([(case['shape'], case['dtype']) for case in cases] ==
          [(shape, dtype) for shape in ('qkv_nt', 'dx_nn', 'dw_tn') for dtype in ('f32', 'bf16')], 'gemm: other cases')
    for case in cases:
        check(min(case['gflops'], case['peak_gflops'], *case['round_s']) > 0 and len(case['round_s']) == 3,
              f'rates: {case}')
    check(table.count('\n| dw_tn |') == 2, 'gemm: the table lacks rows')
    check_apart(path, len(cases))


def check_compare(path):
    lines = json_lines(path)
    write('first.json', json.dumps(lines[0]) + '\n')
    lines[1]['gflops'] *= 0.9
    write('slower.json', ''.join(json.dumps(line) + '\n' for line in lines))
    write('broken.json', 'no numbers\n')
    check('+0.0 %' in run([*COMPARE, path, path], 0).stdout, 'compare.py finds no equal case in equal files')
    check('-10.0 % worse' in run([*COMPARE, path, 'slower.json'], 1, '1 worse').stdout, 'compare.py hides what is worse')
    for words, status, says in [
        (['slower.json', path], 0, ''), ([path, 'slower.json', '--threshold', '12'], 0, ''),
        ([path, 'broken.json'], 1, 'no file of JSON lines'), ([path, 'nosuch.json'], 1, 'nosuch.json'),
        ([path, 'first.json'], 1, 'no case in common'), ([path], 2, 'NEW'), ([path, path, '--threshold', 'little'], 2, 'little'),
    ]:
        run([*COMPARE, *words], status, says)


if __name__ == '__main__':
    sys.exit(run_tests('bench', check_usage, check_numbers, check_masks, check_methods, check_block, check_latent,
                       check_accuracy, check_linear, check_states, check_step, check_ops, check_gemm))

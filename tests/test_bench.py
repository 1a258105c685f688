#!/usr/bin/env python3
"""test_bench.py TOP -- the benchmarks' scripts, from the outside: a short run, what it writes, and how two are compared

Rates are not asserted, only that they are there: this machine may have other work.
"""

import json
import os
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), 'lib'))
from checks import check, end  # pylint: disable=wrong-import-position

TOP = os.path.abspath(sys.argv[1])
RUN = ['sh', os.path.join(TOP, 'bench', 'run.sh')]
COMPARE = [sys.executable, os.path.join(TOP, 'bench', 'compare.py')]
HEADER = {'machine', 'features', 'compiler', 'command', 'date', 'isa', 'peer_isa', 'contestants', 'left_out', 'errors',
          'peak_gflops', 'triad_gb_per_s'}
FIELDS = {'op', 'head_dim', 'dtype', 'causal', 'tokens', 'heads', 'threads', 'gflops', 'peak_gflops', 'peers',
          'round_s'}
MASK_FIELDS = {'op', 'head_dim', 'dtype', 'causal', 'tokens', 'heads', 'threads', 'gflops', 'peak_gflops',
               'seconds_per_token', 'ratio', 'ratio_range', 'round_s', 'base_round_s'}
MASKS = {'packed': 'sequences', 'window': 'window', 'softcap': 'softcap'}  # and the field that each adds
# Methods, and the ways on which they send something.
METHODS = {'upipe': {'team'}, 'zigzag': {'ring'}, 'upipe-ring': {'team', 'ring'}, 'fpdt': {'team', 'host'}}


def run(command, status, says=''):
    """The finished command, which must end with this status and say this on stderr."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=300, check=False)
    name = ' '.join([os.path.basename(command[1]), *command[2:]])
    check(done.returncode == status, f'{name}: exit status {done.returncode}, not {status}: {done.stderr.strip()}')
    check(says in done.stderr, f'{name}: "{says}" is not in: {done.stderr.strip()}')
    return done


def check_usage(folder):
    run([*RUN], 2, 'no command')
    run([*RUN, 'nosuch'], 2, 'no command nosuch')
    check('COMMAND' in run([*RUN, '--help'], 0).stdout, 'run.sh --help does not speak of COMMAND')
    check('--peers' in run([*RUN, 'attn', '--help'], 0).stdout, 'attn --help does not speak of --peers')
    run([*RUN, 'attn', '--peers', 'nobody'], 2, 'nobody')
    run([*RUN, 'attn', '--tokens', 'many', '--peers', 'none'], 2, 'many')
    run([*RUN, 'attn', '--rounds', '0', '--peers', 'none'], 2, 'positive')
    run([*RUN, 'attn', '--peers', 'none', '--json', os.path.join(folder, 'nosuch', 'x.json')], 2, 'cannot be written')
    run([*RUN, 'masks', '--kinds', 'nothing'], 2, 'nothing')
    run([*RUN, 'masks', '--threads', '0'], 2, 'positive')
    run([*RUN, 'methods', '--methods', 'nobody'], 2, 'nobody')
    run([*RUN, 'methods', '--tokens', '512,512'], 2, 'twice')
    run([*RUN, 'methods', '--rounds', '0'], 2, 'positive')
    run([*RUN, 'accuracy', '--data', 'nothing'], 2, 'nothing')
    run([*RUN, 'accuracy', '--gradients', '--peers', 'none'], 2, 'torch')


def short_run(path, *words):
    """Its table, and the lines of its file."""
    table = run([*RUN, *words, '--json', path], 0).stdout
    if not os.path.exists(path):
        check(False, f'{words[0]} left no numbers')
        return table, [{}]
    with open(path, encoding='utf-8') as source:
        return table, [json.loads(line) for line in source]


def check_numbers(folder):
    """The short run; its file."""
    path = os.path.join(folder, 'attn.json')
    table, (header, *cases) = short_run(path, 'attn', '--quick', '--peers', 'naive,bf16')
    if not cases:
        return None
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
    return path


def check_apart(path, measured):
    """compare.py tells the cases of a file apart: none differs from itself."""
    same = run([*COMPARE, path, path], 0).stdout.count('+0.0 %')
    check(same == measured, f'{same} of {measured} measured values of {path} are equal to themselves')


def check_masks(folder):
    path = os.path.join(folder, 'masks.json')
    table, (header, *cases) = short_run(path, 'masks', '--quick', '--threads', '1,2')
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
    path = os.path.join(folder, 'methods.json')
    table, (header, *cases) = short_run(path, 'methods', '--tokens', '256,512', '--dtypes', 'f32', '--rounds', '2',
                                        '--methods', ','.join(METHODS))
    check(set(header.get('errors', {})) == set(METHODS), f'methods: the header has {header}')
    check([(case['tokens'], case['method']) for case in cases] ==
          [(tokens, method) for tokens in (256, 512) for method in METHODS], 'methods: other cases')
    for case in cases:
        name, (low, high) = case['method'], case['ratio_range']
        check(min(case['forward_s'], case['backward_s'], *case['round_s']) > 0 and len(case['round_s']) == 2 and
              0 < low <= case['ratio'] <= high, f'times: {case}')
        check(case['peak_bytes'] > 0 and (case['host_bytes'] > 0) == (name == 'fpdt'), f'memory: {case}')
        sends = {way for way, sent in case['sent_bytes'].items() if sum(sent) > 0}
        check(sends == METHODS[name], f'bytes sent: {case}')
        check(f'\n| {name} |' in table, f'methods: the table lacks {name}')
    check_apart(path, 2 * len(cases))


def check_accuracy(folder):
    path = os.path.join(folder, 'accuracy.json')
    table, (header, *cases) = short_run(path, 'accuracy', '--quick', '--peers', 'none')
    check(set(header.get('contestants', {})) == {'ours'}, f'accuracy: the header has {header}')
    check(len(cases) == 2 * 2 * 2 * 5, f'accuracy: {len(cases)} cases')
    for case in cases:
        bound = 2e-5 if case['dtype'] == 'f32' else 2e-2
        check(0 < case['l2'] < bound and 0 < case['max'] < bound and case['peers'] == {}, f'errors: {case}')
    check(table.count('\n| dQ |') == 4, 'accuracy: the table lacks rows')
    check_apart(path, len(cases))


def check_compare(folder, path):
    with open(path, encoding='utf-8') as source:
        lines = [json.loads(line) for line in source]
    slower = os.path.join(folder, 'slower.json')
    lines[1]['gflops'] *= 0.9
    with open(slower, 'w', encoding='utf-8') as target:
        target.writelines(json.dumps(line) + '\n' for line in lines)
    check('+0.0 %' in run([*COMPARE, path, path], 0).stdout, 'compare.py finds no equal case in equal files')
    check('-10.0 % worse' in run([*COMPARE, path, slower], 1, '1 worse').stdout, 'compare.py hides what is worse')
    run([*COMPARE, slower, path], 0)
    run([*COMPARE, path, slower, '--threshold', '12'], 0)
    broken = os.path.join(folder, 'broken.json')
    with open(broken, 'w', encoding='utf-8') as target:
        target.write('no numbers\n')
    run([*COMPARE, path, broken], 1, 'no file of JSON lines')
    run([*COMPARE, path, os.path.join(folder, 'nosuch.json')], 1, 'nosuch.json')
    with open(broken, 'w', encoding='utf-8') as target:
        target.write(json.dumps(lines[0]) + '\n')
    run([*COMPARE, path, broken], 1, 'no case in common')
    run([*COMPARE, path], 2, 'NEW')
    run([*COMPARE, path, path, '--threshold', 'little'], 2, 'little')


def main():
    with tempfile.TemporaryDirectory() as folder:
        check_usage(folder)
        path = check_numbers(folder)
        if path:
            check_compare(folder, path)
        check_masks(folder)
        check_methods(folder)
        check_accuracy(folder)
    return end('bench')


if __name__ == '__main__':
    sys.exit(main())

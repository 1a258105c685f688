#!/usr/bin/env python3
"""test_planner.py PLAN TRAIN TOP -- the program upipe-plan from the outside

Its bytes are those of `train --plan` and of real trainings; --as paper has the paper's cells of Llama3-8B on 8
GPUs, out of memory where the paper was; latent attention has the bytes of its tensors, counted here; numbers are read as
people write them; what cannot be is refused in a sentence.
"""

import itertools
import json
import math
import os
import re
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), 'lib'))
import latents  # pylint: disable=wrong-import-position
import programs  # pylint: disable=wrong-import-position
from checks import check, end, load, needed, python_with, read, run_command, run_test, write  # pylint: disable=wrong-import-position

PLAN, TRAIN, TOP = (os.path.abspath(path) for path in sys.argv[1:4])
FIELDS = {'fits', 'gpu_bytes', 'host_bytes_node', 'link_bytes', 'binding', 'seconds_step', 'tokens_per_s_per_gpu', 'phases',
          'components', 'advice'}
GIB = 2**30
LENGTHS = ['128k', '256k', '512k', '1M', '2M', '3M', '4M', '5M', '6M']
# The paper's tables of memory (GiB) and throughput (tokens/s/GPU): a row ends before the length that does not fit.
PAPER = {
    'native': ([25.32, 31.40, 43.55, 67.86], [1373.87, 845.99, 474.30, 249.85]),
    'ring': ([21.32, 23.40, 27.58, 35.86, 52.49, 69.11], [2064.90, 1387.67, 841.05, 458.51, 237.99, 159.96]),
    'ulysses': ([21.26, 23.02, 26.80, 34.35, 49.49, 64.55], [2320.47, 1503.80, 878.63, 475.33, 246.05, 162.41]),
    'fpdt': ([21.73, 22.50, 24.03, 27.09, 35.17, 43.35, 51.42],
             [1171.68, 884.75, 621.20, 382.42, 219.53, 153.48, 119.76]),
    'upipe': ([21.10, 22.30, 24.70, 29.90, 40.50, 51.10, 61.70, 72.30],
              [2281.05, 1487.29, 867.17, 472.53, 246.07, 166.32, 125.56, 98.25])}
# The paper's batches at 128k, activations on the GPU: of 1, 2, 4, 8 and 10 sequences.
BATCH = {'ulysses': ([22.53, 27.25, 38.13, 59.99, 71.13], [2458.28, 2485.78, 2543.43, 2564.38, 2464.10]),
         'upipe': ([22.53, 27.03, 36.56, 56.79, 67.11], [2405.30, 2432.11, 2498.80, 2518.56, 2526.77])}
SMALL = {'architectures': ['LlamaForCausalLM'], 'model_type': 'llama', 'hidden_size': 64, 'intermediate_size': 192,
         'num_hidden_layers': 2, 'vocab_size': 256, 'num_attention_heads': 4, 'num_key_value_heads': 2, 'head_dim': 32,
         'tie_word_embeddings': True}

TINY = {**SMALL, 'num_hidden_layers': 1, 'num_attention_heads': 2}
# Parameters as the models' authors publish them.
BILLIONS = {'llama3-8b': 8.03, 'llama3-70b': 70.55, 'llama3.1-8b': 8.03, 'llama3.1-70b': 70.55, 'llama3.1-405b': 405.85,
            'llama3.2-1b': 1.236, 'llama3.2-3b': 3.213, 'qwen2.5-7b': 7.616, 'qwen2.5-32b': 32.76, 'qwen2.5-72b': 72.71,
            'qwen3-0.6b': 0.596, 'qwen3-4b': 4.022, 'qwen3-8b': 8.19, 'qwen3-14b': 14.77, 'qwen3-32b': 32.76, 'mistral-7b': 7.242, 'mistral-7b-v0.3': 7.248,
            'smollm2-135m': 0.1345, 'gemma3-1b': 1.0, 'gemma2-2b': 2.614, 'gemma2-9b': 9.242}
QWEN2 = {'architectures': ['Qwen2ForCausalLM'], 'model_type': 'qwen2', 'use_sliding_window': False}


def at(*names):
    return os.path.join(FOLDER, *names)


def run(program, *words):
    """Status, what it said, and its JSON."""
    out = at('out.json')
    if os.path.exists(out):
        os.remove(out)
    done = run_command([program, *words, '--json', out])
    return done.returncode, done.stdout + done.stderr, load(out) if os.path.exists(out) else None


def plan(*words, status=0):
    got, said, numbers = run(PLAN, *words)
    check(got == status, f'{words}: exit status {got}, not {status}: {said[-400:]}')
    return numbers


def refused(sentence, *words, status=2):
    """With one sentence, and before anything is planned: no file is another one than before."""
    done = programs.refused([PLAN, *words], FOLDER, status, [re.escape(sentence)])
    check(done.stdout == '', f'{words}: {done.stdout[:100]}')


def model(name, **other):
    os.makedirs(at(name), exist_ok=True)
    write(at(name, 'config.json'), json.dumps({**SMALL, **other}))
    return at(name)


def machine(file='machine.json', **other):
    write(at(file), json.dumps({'base': 'h100x8', **other}))
    return at(file)


def written(host, *words):
    """What --write-machine makes of this one."""
    run_command([PLAN, '--machine', host, *words, '--write-machine', at('written.json')]).check_returncode()
    return load(at('written.json'))


# ---- the paper ----


def close(got, memory, speed, what):
    check(abs(got['gpu_bytes'] / GIB / memory - 1) < 0.03, f"{what}: {got['gpu_bytes'] / GIB:.2f} GiB, {memory} in the paper")
    check(abs(got['tokens_per_s_per_gpu'] / speed - 1) < 0.05,
          f"{what}: {got['tokens_per_s_per_gpu']:.2f} tokens/s/GPU, {speed} in the paper")


def paper():
    for method, (memory, speed) in PAPER.items():
        for i, length in enumerate(LENGTHS[:len(memory) + 1]):
            words = ['--model', 'llama3-8b', '--machine', 'h100x8', '--as', 'paper', '--method', method, '--tokens',
                     length]
            if i == len(memory):
                if method != 'fpdt':  # where it fails in the paper, memory is not why
                    check(not plan(*words, status=3)['fits'], f'{method} at {length} is out of memory in the paper')
                continue
            got = plan(*words)
            close(got, memory[i], speed[i], f'{method} {length}')
            check(abs(sum(part['bytes'] for part in got['components']) / got['gpu_bytes'] - 1) < 1e-9,
                  f'{method} {length}: the components are not the whole')
    for method, (memory, speed) in BATCH.items():
        for i, batch in enumerate((1, 2, 4, 8, 10)):
            got = plan('--model', 'llama3-8b', '--as', 'paper', '--method', method, '--tokens', '128k', '--batch', batch,
                       '--activations', 'ac')
            close(got, memory[i], speed[i], f'{method}, batch {batch}')
    beyond()
    # two nodes: the paper's longest contexts on its grid, 6M and 8M
    for method, fits, not_any_more in ('ulysses', '6M', '8M'), ('upipe', '8M', '10M'):
        words = ['--model', 'llama3-8b', '--machine', 'h100x16', '--as', 'paper', '--method', method, '--tokens']
        plan(*words, fits)
        plan(*words, not_any_more, status=3)
    got = plan('--model', 'llama3-8b', '--as', 'paper', '--max-tokens')
    check(5 * 2**20 <= got['max_tokens'] < 6 * 2**20 and got['fits'], f"the longest is {got['max_tokens']}")
    more = got['max_tokens'] + 8 * 1024
    plan('--model', 'llama3-8b', '--as', 'paper', '--tokens', more, status=3)
    got, said, numbers = run(PLAN, '--model', 'llama3-70b', '--machine', 'h100x16', '--max-tokens')
    check((got, numbers['max_tokens']) == (3, 0) and said.endswith('no length fits with these settings, not even 16k tokens; --best looks '
                                                                   'for others\n'), f'no length fits: {got}, {said[-200:]}')


def beyond():
    """What nothing is fitted on has the right form: bytes convex in tokens, time between linear and square, methods in order."""
    for name, nodes in ('qwen3-32b', 16), ('llama3-70b', 32), ('qwen2.5-72b', 16):
        gpu = {}
        for method in ('ring', 'ulysses', 'upipe', 'fpdt'):
            words = ['--model', name, '--machine', f'h100x{nodes}', '--as', 'paper', '--method', method, '--tokens']
            got = [run(PLAN, *words, length)[2] for length in ('256k', '512k', '1M', '2M', '4M')]
            bytes_of = [one['gpu_bytes'] for one in got]
            seconds = [one['seconds_step'] for one in got]
            steps = [b - a for a, b in zip(bytes_of, bytes_of[1:])]
            check(all(a > 0 and b >= 2 * a * (1 - 1e-9) for a, b in zip(steps, steps[1:])),
                  f'{name} {method}: {steps} bytes more for twice the tokens')
            check(all(1.5 < b / a < 4 for a, b in zip(seconds, seconds[1:])), f'{name} {method}: {seconds} s')
            gpu[method] = bytes_of[-1]
        check(gpu['upipe'] < gpu['ulysses'] and gpu['fpdt'] < gpu['upipe'], f'{name}: {gpu}')


# ---- the same bytes as the trainer ----


def flags(config, ranks):
    c = {**SMALL, **config}
    return ['--layers', c['num_hidden_layers'], '--model-dim', c['hidden_size'], '--ff-dim', c['intermediate_size'],
            '--vocab', c['vocab_size'], '--heads', c['num_attention_heads'], '--kv-heads', c['num_key_value_heads'],
            '--head-dim', c['head_dim'], '--ranks', ranks, '--device', 'cpu',
            '--attention-bias', {'qwen2': 'qkv', 'llama': 'qkvo' if c.get('attention_bias') else 'none'}[c['model_type']]]


def small_cards():
    """A card of 24 GiB trains Llama3-8B where its states are in the host's memory; what would help says so."""
    words = ['--model', 'llama3-8b', '--machine', '4090x4', '--tokens', '256k', '--method', 'upipe']
    away = ['--offload-optimizer', '--offload-weights']
    for n in 0, 1, 2:
        got = plan(*words, *away[:n], status=0 if n else 3)
        left = {advice['flags']: advice for advice in got['advice']}
        check(got['fits'] == (n > 0) and 19 * GIB >= got['gpu_bytes'] * got['fits'], f"{away[:n]}: {got['gpu_bytes']} bytes")
        flag = (away[:1], away[1:], [])[n]
        check(all(left[' '.join(flag)][key] > 0 for key in ('gpu_bytes_saved', 'link_bytes_more', 'seconds_more')) if flag else
              not left.keys() & set(away), f'{away[:n]}: {left}')
    update()


def presets():
    """Every model that has a name is planned for a GPU, and has as many parameters as its authors say."""
    known = run(PLAN, '--model', 'nosuch', '--tokens', '64k')[1].split('one of ')[1].split(' (')[0].split(', ')
    check(set(known) == set(BILLIONS), f'models {known}')
    for name in known:
        got, said, numbers = run(PLAN, '--model', name, '--machine', 'h100x8', '--ranks', '4', '--tokens', '8k',
                                 '--activations', 'offload')
        check(got in (0, 3) and numbers['gpu_bytes'] > 0, f'{name}: {got}: {said[-200:]}')
        held = {part['name']: part['bytes'] for part in numbers['components']}
        size = held['optimizer'] * 4 / 12 # of a quarter: f32 weights and two moments
        check(abs(size / (BILLIONS[name] * 1e9) - 1) < 0.005,
              f'{name}: {size / 1e9:.3f}, published are {BILLIONS[name]} billion parameters')


def update():
    """The CPU's update takes as long as the host's memory, and no less than the link, which runs beside it."""
    config = {**SMALL, 'hidden_size': 512, 'tie_word_embeddings': True}
    elements = 256 * 512 + 2 * 512 * (3 * 192 + 4 * 32 * 2 + 2 * 32 * 2)
    words = ['--model', model('updated', **config), '--tokens', '1k', '--method', 'ulysses', '--offload-optimizer', '--machine']
    slow = machine('slow.json', ranks=4, ranks_per_node=2, rates={'host_update_bytes': 1e6, 'host_link_bytes': 1e20})
    fast = machine('fast.json', ranks=4, ranks_per_node=2, rates={'host_update_bytes': 1e20, 'host_link_bytes': 1e20})
    link = machine('narrow.json', ranks=4, ranks_per_node=2, rates={'host_update_bytes': 1e20, 'host_link_bytes': 1e6})
    for more, update_bytes, moved in [(['--zero', '1'], 30, 6), (['--zero', '3'], 34, 6), (['--zero', '3', '--offload-weights'], 34, None),
                                      (['--zero', '1', '--dtype', 'f32'], 28, 12)]:
        plans = [plan(*words, box, *more, '--activations', 'ac') for box in (slow, fast, link)]
        took = (plans[0]['seconds_step'] - plans[1]['seconds_step']) * 1e6
        check(abs(took / (elements * update_bytes / 2) - 1) < 1e-6, f'{more}: {took} bytes of a node, not {elements} x {update_bytes} / 2')
        if moved:
            crossed = (plans[2]['seconds_step'] - plans[1]['seconds_step']) * 1e6
            check(plans[0]['link_bytes'] == elements * moved / 4 and abs(crossed / plans[0]['link_bytes'] - 1) < 1e-6,
                  f"{more}: {crossed} bytes of the link, of {plans[0]['link_bytes']}")


def same_bytes():
    uneven = {'num_attention_heads': 7, 'num_key_value_heads': 1}
    cases = [(QWEN2, 2, 'bf16', ['--method', 'upipe', '--activations', 'offload'], True),
             ({}, 2, 'f32', ['--method', 'ulysses', '--activations', 'ac', '--batch', '3'], False),
             ({'attention_bias': True}, 4, 'f32', ['--method', 'zigzag', '--activations', 'sac'], False),
             ({}, 4, 'bf16', ['--method', 'usp', '--ring', '2', '--activations', 'ac', '--zero-prefetch', '--reduce-dtype', 'bf16'],
              False),
             ({}, 2, 'f32', ['--method', 'fpdt', '--segments', '4', '--activations', 'blocks:2,grad'], True),
             ({}, 2, 'f32', ['--method', 'upipe-fpdt', '--activations', 'offload', '--overlap'], False),
             ({}, 2, 'f32', ['--method', 'upipe', '--activations', 'offload', '--accumulate', '3', '--offload-optimizer'], True),
             ({}, 4, 'f32', ['--method', 'upipe', '--activations', 'offload', '--accumulate', '2', '--replicas', '2'], True),
             ({}, 4, 'f32', ['--method', 'upipe', '--activations', 'offload', '--train', '*.mlp.*,*1.self_attn.q_proj.weight,*norm*'], True),
             ({}, 2, 'bf16', ['--method', 'upipe', '--activations', 'offload', '--lora', '4:8:q,o,up'], True),
             (uneven, 3, 'f32', ['--method', 'upipe', '--activations', 'offload'], True)]
    for number, (config, ranks, dtype, words, real) in enumerate(cases):
        words = [*words, '--dtype', dtype, '--tokens', '512', '--zero', number % 4]
        mine = plan('--model', model(f'model{number}', **config), '--machine', machine(ranks=ranks, ranks_per_node=2),
                    '--device', 'cpu', *words)
        shape = flags(config, ranks)
        _, said, theirs = run(TRAIN, *shape, *words, '--plan')
        check(theirs is not None, f'train --plan {words}: {said[-400:]}')
        if mine is None or theirs is None:
            continue
        check(mine['gpu_bytes'] == theirs['slab_bytes'], f"{words}: {mine['gpu_bytes']}, train has {theirs['slab_bytes']}")
        live = max(phase['bytes'] for phase in mine['phases'])
        check(live == theirs['plan_bytes'], f"{words}: {live} live bytes, train has {theirs['plan_bytes']}")
        parts = {part['name']: part['bytes'] for part in mine['components'] if part['name'] != 'alignment'}
        check(parts == {name: n for name, n in theirs['memory']['at_peak'].items() if n > 0}, f'{words}: {parts}')
        both = theirs['all_ranks']['host_slab_bytes'] if ranks == 2 else None
        check(both in (None, mine['host_bytes_node']), f"{words}: {mine['host_bytes_node']} of a node, train has {both}")
        if not real:
            continue
        _, said, theirs = run(TRAIN, *shape, *words, '--steps', '1', '--sample', '0')
        check(theirs is not None and (theirs['plan_bytes'] == theirs['peak_bytes']), f'{words}: {said[-400:]}')
        check(config == uneven or theirs['peak_bytes'] == live, f"{words}: a training held {theirs['peak_bytes']}")


def accumulated():
    """A step of K micro-batches takes K times as long, and from the second one on the memory stays. Replicas take the
    time of their ranks, and share states."""
    words = ['--model', model('accumulated'), '--tokens', '4k', '--zero', '3']
    one, two, four = (plan(*words, '--accumulate', k) for k in (1, 2, 4))
    check(abs(two['seconds_step'] / one['seconds_step'] - 2) < 0.02, f"{two['seconds_step']} s of 2, {one['seconds_step']} of 1")
    check(abs(four['tokens_per_s_per_gpu'] / one['tokens_per_s_per_gpu'] - 1) < 0.02, f"{four['tokens_per_s_per_gpu']} tokens/s")
    check(two['gpu_bytes'] == four['gpu_bytes'] >= one['gpu_bytes'], f"{[k['gpu_bytes'] for k in (one, two, four)]} bytes")
    half, all_of = plan(*words, '--ranks', 4), plan(*words, '--replicas', 2)
    check(all_of['gpu_bytes'] < half['gpu_bytes'], f"{all_of['gpu_bytes']} bytes of a replica, alone {half['gpu_bytes']}")
    check(1 <= all_of['seconds_step'] / half['seconds_step'] < 1.1, f"{all_of['seconds_step']} s of replicas, alone {half['seconds_step']}")


# ---- the time ----

# Rates at which each share of a step of TIMED is seen; NARROW: of what runs beside the kernels too.
WIDE = {'attention_forward_flops': 2e8, 'attention_backward_flops': 3e8, 'dense_flops': 5e8, 'all_to_all_bytes': 3e6,
        'all_to_all_bytes_nodes': 2e6, 'ring_bytes': 7e6, 'ring_bytes_nodes': 5e6, 'host_link_bytes': 4e6,
        'segments_link_bytes': 6e6, 'ring_merge_bytes': 9e6, 'stage_seconds': 0.01, 'layer_seconds': 0.1,
        'wait_part': 0.05, 'native_ring_attention_part': 0.4}
FREE = {name: 1e-12 if name.endswith(('seconds', 'part')) else 1e24 for name in WIDE}
FREE['native_ring_attention_part'] = 1
NARROW = {**WIDE, 'ring_bytes': 2e5, 'ring_bytes_nodes': 1e5, 'host_link_bytes': 3e5}
TIMED = {**SMALL, 'num_hidden_layers': 3, 'num_key_value_heads': 4}
LAYERS, DIM, FF, VOCAB, HEADS, WIDTH = 3, 64, 192, 256, 4, 128
LAYER = DIM * (4 * WIDTH + 3 * FF)


def shares_of(work, rate, ranks, team, node):
    """Seconds of what a rank does: transfers beside kernels take what they take longer."""
    beside = rate['ring_bytes_nodes' if ranks > node else 'ring_bytes']
    forward, backward = (work[name] / rate[f'attention_{name}_flops'] for name in ('forward', 'backward'))
    attention, products = forward + backward, work['products'] / rate['dense_flops']
    compute = attention + products
    away = (team - node) / (team - 1) if team > node else 0
    waits = attention * rate['wait_part']
    sent = (1 - away) / rate['all_to_all_bytes'] + away / rate['all_to_all_bytes_nodes']
    return {'all_to_all': work['team'] * sent + (waits if team > 1 else 0),
            'attention_forward': forward, 'attention_backward': backward, 'dense': products,
            'ring_and_sums': max(0, work['ring'] / beside - attention) + work['merged'] / rate['ring_merge_bytes'] +
                             (0 if team > 1 else waits),
            'host_link': work.get('waited', 0) / rate['host_link_bytes'] +
                         work.get('segments', 0) / rate['segments_link_bytes'],
            'states': max(0, work['states'] / beside - compute) + work.get('exposed', 0) / beside,
            'other': work['layers'] * rate['layer_seconds'] + work['stages'] * rate['stage_seconds']}


def same_time(words, work, rates, team, node, speed):
    """The plan of 4 ranks, whose seconds are those of the work. speed: tokens of a rank in a step."""
    words = [*words, '--machine', machine(f'rates{node}.json', ranks=4, ranks_per_node=node, rates=rates)]
    _, said, got = run(PLAN, *words)
    shares = shares_of(work, rates, 4, team, node)
    want, what = sum(shares.values()), f'{words[6:]}, {rates is WIDE}'
    check(abs(got['seconds_step'] / want - 1) < 1e-8, f"{what}: {got['seconds_step']} s, not {want}")
    check(abs(got['tokens_per_s_per_gpu'] * want / speed - 1) < 1e-8, f"{what}: {got['tokens_per_s_per_gpu']} tokens/s")
    parts = {name: float(seconds) for name, seconds in re.findall(r'^ +(\w+) +([\d.]+) s +[\d.]+ %$', said, re.M)}
    check(parts.keys() == {name for name, share in shares.items() if share > 0} and
          all(abs(parts[name] - shares[name]) < 0.001 for name in parts), f'{what}: {parts}, not {shares}')
    return got


def trained(method, ranks, ring, batch, micro, size, ahead):
    """A step of this library's trainer on 512 tokens, zero 3, layers computed twice and the MLP's last product once."""
    team, sequences = ranks // ring, batch * micro
    rows = 512 * sequences // ranks
    last = sum(range(512 - 512 // ranks + 1, 513)) if method == 'ring' else 512 * 513 / 2 / ranks
    pairs = last * sequences * HEADS * LAYERS
    # calls of attention: blocks of a ring, of two pieces each where it is even; a backward of pieces goes head by head
    blocks = ring if method in ('ring', 'ulysses') else 2 * ring + 1
    calls = 3 * blocks if blocks == ring else blocks * (2 + HEADS // team)
    merged = 3 * ring - 2 if blocks == ring else (3 * blocks - 4) / 2
    tokens = rows * team  # of a rank's heads: keys and values go round three times, and their gradients in f32 once
    round_trips = (0 if method == 'ring' else 3 * (ring - 1) * size) + ring * 4
    sums = micro * 4 * (1 - 1 / ranks) * (LAYERS * LAYER + VOCAB * DIM)
    norms = (2 * LAYERS + 1) * DIM * 4 * 2 * (1 - 1 / ranks)
    gathered = 2 * sums * size / 4
    return {'forward': 2 * 4 * 32 * pairs, 'backward': 10 * 32 * pairs,
            'products': rows * (LAYERS * (8 * LAYER + 2 * DIM * 3 * WIDTH - 2 * DIM * FF) + 6 * VOCAB * DIM),
            'team': rows * LAYERS * (size * 15 * WIDTH + 4 * HEADS) * (1 - 1 / team),
            'ring': tokens * LAYERS * 2 * WIDTH / team * round_trips if ring > 1 else 0,
            'merged': 8 * rows * WIDTH * LAYERS * merged if ring > 1 else 0,
            'states': (gathered + norms if ahead else 0), 'exposed': sums + (0 if ahead else gathered + norms),
            'layers': LAYERS * micro, 'stages': LAYERS * micro * (batch * calls - 3)}


def step_time():
    """Seconds of a step are those of its FLOPs and bytes, counted here: methods, nodes, batches and micro-batches."""
    one = ['--model', model('timed', **TIMED), '--device', 'cpu', '--tokens', '512', '--activations', 'ac']
    for method, ring, batch, micro, size, ahead in [
            ('ulysses', 1, 1, 1, 4, 0), ('ulysses', 1, 3, 2, 2, 0), ('ulysses', 1, 1, 2, 2, 1), ('ring', 4, 1, 1, 4, 0),
            ('ring', 4, 2, 2, 2, 1), ('zigzag', 4, 1, 1, 4, 0), ('zigzag', 4, 2, 1, 2, 1), ('usp', 2, 1, 1, 4, 0),
            ('usp', 2, 2, 3, 4, 1)]:
        words = [*one, '--method', method, '--batch', batch, '--accumulate', micro]
        words += ['--zero', '3', '--dtype', {2: 'bf16', 4: 'f32'}[size], *(['--zero-prefetch'] if ahead else [])]
        words += ['--ring', ring] if method == 'usp' else []
        work = trained(method, 4, ring, batch, micro, size, ahead)
        for node in 1, 2, 3, 4:
            for rates in WIDE, NARROW:
                same_time(words, work, rates, 4 // ring, node, 512 * batch * micro / 4)


def in_paper(method, ranks, team, tokens, batch, kept, sac, tables):
    """A step of the paper's setting, of two key heads. kept: layers whose input stays on the GPU; sac: that keep
    attention's result."""
    ring, stages = ranks // team, HEADS // team if method == 'upipe' else 1
    rows, layer = tokens * batch / ranks, LAYER - DIM * WIDTH
    x, q, k = rows * 2 * DIM, rows * 2 * WIDTH, rows * WIDTH
    parameters = tables * VOCAB * DIM + LAYERS * layer
    pairs = rows * tokens / 2 * WIDTH * LAYERS / (WIDE['native_ring_attention_part'] if method == 'native' else 1)
    sent = stages * 4 * rows * team * 32 if team > 1 else 2 * k  # keys and values of a rank's heads, once a stage
    away = (LAYERS - kept) * x + sac * q
    return {'forward': 4 * pairs * (2 - sac / LAYERS), 'backward': 10 * pairs,
            'products': rows * (8 * LAYERS * layer + 6 * VOCAB * DIM),
            'team': LAYERS * 3 * (2 * q + 2 * k * max(1, team / 2)) * (1 - 1 / team),
            'ring': LAYERS * (ring - 1) * 5 * sent, 'merged': LAYERS * (ring - 1) * (q * 14 + k * 8),
            'states': parameters * 8 * (1 - 1 / ranks), 'waited': 2 * away,
            'segments': LAYERS * 6 * (q + 2 * k) if method == 'fpdt' else 0, 'layers': LAYERS,
            'stages': LAYERS * 3 * (stages - 1)}, parameters, away


def paper_time():
    """The same of the paper's setting, and its states and the host's bytes."""
    kinds = {'ac': (3, 0), 'offload': (0, 0), 'sao:2': (1, 0), 'sac': (0, 3), 'sac:1': (0, 1)}
    for tied in True, False:
        config = {**TIMED, 'num_key_value_heads': 2, 'tie_word_embeddings': tied}
        one = ['--model', model('paper', **config), '--as', 'paper', '--attention', 'machine', '--tokens', '4k']
        for method, activations, batch in [('native', 'ac', 1), ('ring', 'offload', 2), ('ulysses', 'sac', 1),
                                           ('ulysses', 'sao:2', 3), ('fpdt', 'offload', 1), ('upipe', 'sac:1', 1),
                                           ('upipe', 'ac', 2)]:
            words = [*one, '--method', method, '--batch', batch, '--activations', activations]
            for node in (2, 4) if tied else (4,):
                team = 1 if method in ('native', 'ring') else 4 if method == 'fpdt' else node
                work, parameters, away = in_paper(method, 4, team, 4096, batch, *kinds[activations], 1 if tied else 2)
                for rates in WIDE, NARROW:
                    got = same_time(words, work, rates, team, node, 4096 * batch / 4)
                    host = got['host_bytes_node']
                    check(host == away * node, f'{words[4:]}: {host} bytes of a node, not {away * node}')
                    states = [part['bytes'] for part in got['components'] if part['name'] == 'states']
                    check(states == [16 * parameters / 4], f'{words[4:]}: {states} of {parameters} parameters')


# ---- other programs ----

# What each can: methods, the default first, their kernel; then flags, of which those that it lacks are refused.
PROGRAMS = {'paper': (['upipe', 'ulysses', 'ring', 'fpdt', 'native'], ['fa3'] * 5), 'torchtitan': (['ring'], ['fa2']),
            'deepspeed-alst': (['ulysses'], ['fa2']), 'trl': (['ring', 'ulysses'], ['cudnn', 'fa2']),
            'megatron': (['ring', 'ulysses'], ['cudnn'] * 2)}
SETTINGS = {('--loss', 'whole'): 'torchtitan deepspeed-alst trl megatron', ('--loss', 'tiled'): 'paper deepspeed-alst trl',
            ('--mlp', 'whole'): 'torchtitan deepspeed-alst trl megatron', ('--mlp', 'tiled'): 'paper deepspeed-alst',
            ('--keep-all',): 'megatron', ('--fp8',): 'torchtitan megatron', ('--zero', '1'): 'megatron',
            ('--zero', '3'): 'paper torchtitan deepspeed-alst trl megatron', ('--zero', '2'): '',
            ('--offload-optimizer',): 'deepspeed-alst trl megatron',
            ('--offload-optimizer', '--offload-weights'): 'deepspeed-alst', ('--activations', 'offload'): 'paper deepspeed-alst trl',
            ('--activations', 'ac'): 'paper torchtitan deepspeed-alst trl megatron', ('--activations', 'sac'): 'paper',
            ('--activations', 'blocks:2'): '', ('--activations', 'offload,grad'): ''}


def has_settings():
    """A program has its settings, and refuses all others; what would help and --best have none that it lacks."""
    for name, (methods, kernels) in PROGRAMS.items():
        words = ['--model', 'llama3-8b', '--tokens', '128k', '--as', name]
        for method, kernel in zip(methods, kernels):
            status, said, got = run(PLAN, *words, '--method', method)
            check(status in (0, 3) and got['as'] == name and got['method'] == method, f'{name} {method}: {said[-200:]}')
            check(f'attention: {kernel}, ' in said and f"measured runs like this: {got['measured'] or 'none'}\n" in said,
                  f'{name}: {said[:400]}')
        longest = plan('--model', 'llama3.2-1b', '--as', name, '--max-tokens', '--best')
        again = plan('--model', 'llama3.2-1b', '--as', name, *longest['best'].split(), '--tokens', longest['max_tokens'])
        check(again['gpu_bytes'] == longest['gpu_bytes'], f'{name}: the longest is not what it was')
        check(run(PLAN, *words)[2]['method'] == methods[0], f'{name} begins with another method')
        refused(f'--as {name} has {methods[0]}', *words, '--method', 'double-ring')
        for flags, who in SETTINGS.items():
            if name in who.split():
                got = run(PLAN, *words, *flags)
                check(got[0] in (0, 3), f'{name} {flags}: {got[1][-200:]}')
                known = [PLAN, *words, *flags]
                for advice in got[2]['advice'][:2]:
                    more = advice['flags'].split()
                    if more[0] in ('the', '--method') or more[0] in known:
                        continue
                    check(run_command([*known, *more]).returncode in (0, 3), f'{name}: advice {more} is refused')
            else:
                refused('has no --', *words, *flags)
        refused('contradict each other', *words, '--keep-all', '--activations', 'ac')
        words = ['--model', model('small'), '--machine', 'h100x2', '--tokens', '4k', '--as', name]
        status, said, got = run(PLAN, *words, '--best')
        check(got['settings'] and ('this library would take --method' in said), f'{name}: {said[-300:]}')
        for one in got['settings'][:3]:
            again = plan(*words, *one['flags'].split())
            check(again['gpu_bytes'] == one['gpu_bytes'] and abs(again['seconds_step'] / one['seconds_step'] - 1) < 1e-7,
                  f'{name}: {one} is {again["gpu_bytes"]} bytes')
    refused('--attention fa2 wants GPUs', '--model', 'llama3-8b', '--tokens', '64k', '--machine', 'cpu', '--attention', 'fa2')
    refused('an A100 has none', '--model', 'llama3-8b', '--tokens', '64k', '--as', 'megatron', '--machine', 'a100x8', '--fp8')
    refused('H100 and H200 alone', '--model', 'llama3-8b', '--tokens', '64k', '--attention', 'fa3', '--machine', 'a100x8')
    plan('--model', 'llama3-8b', '--tokens', '64k', '--as', 'paper', '--machine', 'a100x8')
    for flags in (['--loss', 'tiled'], ['--mlp', 'whole'], ['--keep-all'], ['--fp8']):
        refused('want --as', '--model', 'llama3-8b', '--tokens', '64k', *flags)
    for flags in (['--dtype', 'f32'], ['--segments', '4'], ['--tile-bytes', '1MiB'], ['--overlap'], ['--lora', '8'], ['--device', 'cpu']):
        refused(f'{flags[0]} would have no effect with --as trl', '--model', 'llama3-8b', '--tokens', '64k', '--as', 'trl', *flags)


def phase(got, name):
    return {one['name']: one['bytes'] for one in got['phases']}[name]


def part(got, name):
    return {one['name']: one['bytes'] for one in got['components']}.get(name, 0)


def as_bytes():
    """What a setting changes of another program's memory and time is that of the tensors, counted here."""
    config = {**TIMED, 'num_key_value_heads': 2}
    rows, parameters = 4096 // 4, VOCAB * DIM + LAYERS * (LAYER - DIM * WIDTH)
    box = machine('as.json', ranks=4, ranks_per_node=4, rates=WIDE)
    words = ['--model', model('as', **config), '--machine', box, '--tokens', '4k', '--attention', 'machine', '--as']
    x, q, k = rows * 2 * DIM, rows * 2 * WIDTH, rows * WIDTH

    def whole(name, logit, ffn, moved, weights):
        """Of a program: bytes of a logit, tensors of its MLP, bytes a parameter that go to the host, and of weights."""
        tiled, loss = plan(*words, name, '--loss', 'tiled'), plan(*words, name, '--loss', 'whole')
        check(phase(loss, 'loss') - phase(tiled, 'loss') == logit * rows * VOCAB, f'{name}: logits')
        if ffn:
            got = [plan(*words, name, '--mlp', how) for how in ('whole', 'tiled')]
            check(phase(got[0], 'mlp_backward') - phase(got[1], 'mlp_backward') == ffn * 2 * (rows - DIM) * FF, f'{name}: MLP')
        ac = plan(*words, name, '--activations', 'ac')
        host = plan(*words, name, '--activations', 'ac', '--offload-optimizer')
        check(part(ac, 'states') - part(host, 'states') == host['host_bytes_node'] / 4 == moved * parameters / 4, f'{name}: states')
        if weights:
            all_of = plan(*words, name, '--activations', 'ac', '--offload-optimizer', '--offload-weights')
            check(part(all_of, 'states') == 0 and all_of['host_bytes_node'] == (moved + weights) * parameters, f'{name}: weights')
            took = (all_of['seconds_step'] - host['seconds_step']) * WIDE['host_link_bytes']
            check(abs(took / (3 * weights * parameters / 4) - 1) < 1e-6, f'{name}: {took} bytes of weights came')

    whole('deepspeed-alst', 14, 4, 14, 2)
    whole('trl', 12, 0, 12, 0)
    # replicas share states, and have each a sequence; micro-batches take each their time
    one, two = plan(*words, 'trl', '--ranks', 2), plan(*words, 'trl', '--replicas', 2)
    check(part(one, 'states') == 2 * part(two, 'states') == 16 * parameters / 2, f"{part(one, 'states')} bytes of states")
    check(part(one, 'checkpoints') == part(two, 'checkpoints') and one['host_bytes_node'] * 2 == two['host_bytes_node'], 'inputs')
    attention = 4 * (4096 / 2) * 2048 * WIDTH * LAYERS
    for micro in 1, 3:
        got = plan(*words, 'megatron', '--ranks', 1, '--keep-all', '--fp8', '--accumulate', micro)
        want = micro * (2 * attention / WIDE['attention_forward_flops'] + 5 * attention / WIDE['attention_backward_flops'] +
                        4096 * 6 * (LAYERS * (LAYER - DIM * WIDTH) / 1.5 + VOCAB * DIM) / 1.2 / WIDE['dense_flops'] + LAYERS * 0.0005)
        check(abs(got['seconds_step'] / want - 1) < 1e-6, f"{micro} micro-batches: {got['seconds_step']} s, not {want}")
    # of micro-batches each moves its own activations, segments and weights
    for name, *more in (['paper', '--method', 'fpdt'], ['deepspeed-alst', '--offload-optimizer', '--offload-weights']):
        links = [plan(*words, name, *more, '--accumulate', micro)['link_bytes'] for micro in (1, 3)]
        returned = (2 + 2) * parameters / 4 if len(more) == 2 and name != 'paper' else 0 # by the optimizer, once a step
        check(links[1] - returned == 3 * (links[0] - returned), f'{name}: {links} bytes of one and of three micro-batches')
    # weights and gradients are whole where only moments are sharded
    got = [part(plan(*words, 'megatron', '--zero', stage), 'states') for stage in (1, 3)]
    check(got == [(6 + 12 / 4) * parameters, 18 / 4 * parameters], f'{got} bytes of states')
    # all of a forward: inputs and norms, heads, four tensors of the MLP
    got = [plan(*words, 'megatron', *more) for more in ([], ['--keep-all'])]
    layer = 4 * x + 2 * q + 2 * k + 8 * rows * FF
    check(phase(got[1], 'loss') - phase(got[0], 'loss') == LAYERS * (layer - x), 'what is kept of a layer')
    # PyTorch's ring gathers keys and values; norms and RoPE of a program without fused ones leave heads
    ring, team = (phase(plan(*words, 'trl', '--method', method), 'attention_backward') for method in ('ring', 'ulysses'))
    grouped = q + 2 * k + q + k + 2 * q + 2 * k + 2 * q + 10 * k + 3 * 2 * k
    staged = 3 * q + 2 * k + 3 * q + 2 * k # as many heads of keys as of queries
    staged += 2 * (q - k) * 2 if k < q else 0
    check(ring - team == grouped - staged, f'{ring} bytes of a ring, {team} of a team: {ring - team}, not {grouped - staged}')


def attention_rates():
    """A kernel's time is that of its published rate, between lengths; what is published of another card is a guess."""
    def shares(*words, of='llama3-8b'):
        _, said, got = run(PLAN, '--model', of, '--tokens', '1M', *words)
        took = {name: float(seconds) for name, seconds in re.findall(r'^ +(\w+) +([\d.]+) s +[\d.]+ %$', said, re.M)}
        return took['attention_forward'], took['attention_backward'], said, got

    own = shares()
    for kernel, forward, backward in (('machine', 1, 1), ('upipe', 1, 1), ('fa3', 1, 1), ('fa2', 367 / 680, 330 / 586),
                                      ('cudnn', 567 / 680, 486 / 586)):
        got = shares('--attention', kernel)
        check(abs(own[0] / got[0] - forward) < 1e-3 and abs(own[1] / got[1] - backward) < 1e-3, f'{kernel}: {got[:2]}, {own[:2]}')
        check(got[3]['gpu_bytes'] == own[3]['gpu_bytes'] and got[3]['phases'] == own[3]['phases'], f'{kernel} changes bytes')
    # of a length between two of the table, and of heads of 64
    got, machine_s = (plan('--model', 'llama3-8b', '--tokens', '24576', '--attention', kernel) for kernel in ('fa2', 'machine'))
    between = math.log2(24576 / 16384)
    forward, backward = (690e12 * (364 + between * 3) / 680, 604e12 * (323 + between * 7) / 586)
    work = 4 * 24576 / 8 * 24577 / 2 * 4096 * 32
    want = work * (2 / forward + 2.5 / backward - 2 / 690e12 - 2.5 / 604e12)
    more = got['seconds_step'] - machine_s['seconds_step']
    check(abs(more / want / 1.011 - 1) < 1e-3, f'{more} s more of another kernel, not {want}') # and what ranks wait
    for words, sure in (['--machine', 'a100x8', '--attention', 'fa2'], 1), (['--machine', 'a100x8', '--attention', 'cudnn'], 0), (
            ['--machine', 'b200x8', '--attention', 'fa4'], 1), (['--machine', '4090x4', '--attention', 'cudnn'], 0), (
            ['--machine', 'l40sx8', '--attention', 'fa2'], 0), (
            ['--machine', '4090x4', '--attention', 'fa2'], 1), (['--machine', '5090x8', '--attention', 'fa2'], 0), (
            ['--machine', 'h200x8', '--attention', 'upipe'], 0):
        _, said, _ = run(PLAN, '--model', 'llama3-8b', '--tokens', '64k', *words)
        check(('a guess for this card' in said) == (not sure) and 'TFLOP/s: ' in said, f'{words}: {said[:300]}')
    small = shares('--attention', 'fa3', of='llama3.2-1b')
    check(abs(shares(of='llama3.2-1b')[0] / small[0] - 473 / 680) < 1e-3, 'the rates of heads of 64 are those of 128')


def measured():
    """Published runs: what the planner says of its plans is what bench/measured.py finds, and does not become worse."""
    sys.path.insert(0, os.path.join(TOP, 'bench'))
    import measured as bench # pylint: disable=import-outside-toplevel
    _, runs = bench.planned(bench.paper.Planner(PLAN))
    of = bench.ends(runs)
    for one in runs:
        check(one['said'] == of[one['program'], one['method']], f"{one['flags']}: says {one['said']}")
    check(len(runs) >= 40 and {one['program'] for one in runs} == set(PROGRAMS), f'{len(runs)} runs')
    counts, fits = bench.held(runs)
    for (what, within, n), (least, most) in zip(counts, ((12, 13), (21, 23))):
        check(n >= most and within * most >= least * n, f'{what}: {within} of {n} are within {bench.WITHIN[what]} %')
    check(fits[0][0] >= fits[0][1] - 1 and fits[1][0] == fits[1][1] >= 7, f'whether it fits: {fits}')


def machines():
    """A preset has the paper's rates times what its data sheet has against an H100."""
    compute = ['attention_forward', 'attention_backward', 'dense']
    link = [f'{what}_bytes{far}' for what in ('all_to_all', 'ring') for far in ('', '_nodes')]
    for name, flops, peers, host, memory in [
            ('h100x32', 1, 1, 1, 1), ('h200x8', 1, 1, 1, 1), ('a100x8', 312 / 989, 0.5, 0.5, 0.5),
            ('b200x8', 2250 / 989, 2, 1, 8000 / 3350), ('4090x4', 165.2 / 989, 32 / 450, 0.5, 1008 / 3350)]:
        of = [written(preset) for preset in ('h100x8', name)]
        factors = {**{f'{what}_flops': flops for what in compute}, **{what: peers for what in link},
                   'host_link_bytes': host, 'segments_link_bytes': host, 'ring_merge_bytes': memory}
        for rate, paper_s in of[0]['rates'].items():
            want = paper_s['value'] * factors.get(rate, 1)
            got = of[1]['rates'][rate]['value']
            check(abs(got / want - 1) < 1e-5, f'{name}: {rate} is {got}, not {want}')
        ranks = int(name.split('x')[1])
        check(of[1]['ranks'] == ranks and of[1]['ranks_per_node'] == min(8, ranks), f'{name}: {of[1]}')


def advised():
    """What advice says to save and to cost is the difference of two plans."""
    name, names = model('advised'), {'gpu_bytes': -1, 'host_bytes_node': -1, 'link_bytes': 1, 'seconds_step': 1}
    small = ['--model', name, '--machine', machine(ranks=4, ranks_per_node=2), '--device', 'cpu']
    for words in ([*small, '--tokens', '48k', '--method', 'ulysses', '--batch', '2'],
                  [*small, '--tokens', '64k', '--method', 'fpdt', '--segments', '4', '--activations', 'ac']):
        now = plan(*words)
        check(len(now['advice']) > 3, f"{words}: {now['advice']}")
        for one in now['advice']:
            flags = one['flags'].split()
            kept = words[:words.index(flags[0])] + words[words.index(flags[0]) + 2:] if flags[0] in words else words
            if flags[0] == '--method' and '--segments' in kept:
                kept = [word for word in kept if word not in ('--segments', '4')]
            other = plan(*kept, *flags)
            said = [one['gpu_bytes_saved'], one['host_bytes_node_saved'], one['link_bytes_more'], one['seconds_more']]
            want = [(other[what] - now[what]) * sign for what, sign in names.items()]
            check(one['fits'] == other['fits'] and said[:3] == want[:3] and
                  abs(said[3] - want[3]) < 1e-8 * now['seconds_step'], f'{flags}: {said}, not {want}')


def nodes():
    """A node holds what its ranks hold, the fullest one counts; ranks without GPUs hold all of it there."""
    of = ['--model', model('nodes'), '--device', 'cpu', '--activations', 'offload', '--tokens']
    alone = plan(*of, 512, '--machine', machine(ranks=4, ranks_per_node=1))['host_bytes_node']
    red = alone - 2 * 128 * 128 # behind two blocks, where AddressSanitizer watches
    check(red in (0, 2 * 256), f'{alone} bytes of a rank')
    for tokens in 512, 513:
        words = [*of, tokens]
        # inputs of two layers
        held = [2 * -(-(tokens * (r + 1) // 4 - tokens * r // 4) * 128 // 256) * 256 + red for r in range(4)]
        for node in 1, 2, 3, 4:
            got = plan(*words, '--machine', machine(ranks=4, ranks_per_node=node))
            fullest = max(sum(held[at:at + node]) for at in range(0, 4, node))
            host = got['host_bytes_node']
            check(host == fullest, f'{tokens} tokens, nodes of {node}: {host} bytes, not {fullest}')
            if tokens == 512:
                both = plan(*words, '--machine', machine(base='cpu', ranks=4, ranks_per_node=node))['host_bytes_node']
                check(both == fullest + node * got['gpu_bytes'], f'nodes of {node}: {both} bytes without GPUs')


# ---- what people write, and what is refused ----


def numbers():
    at = ['--model', 'llama3-8b', '--as', 'paper', '--tokens']
    for one, other in ('1M', '1048576'), ('1M', '1024k'), ('1.5M', '1536k'), ('1e6', '1000000'), ('128K', '131072'):
        check(plan(*at, one) == plan(*at, other), f'{one} tokens are not {other}')
    check(plan(*at, '1e6') != plan(*at, '1M'), '1e6 tokens are 1M')
    for wrong in '5m', '5Mi', '-1', '1e', '0x10', '1.5', '1e99', '5 M', '0', '3T', '1.':
        refused('--tokens wants', *at, wrong)
    small = ['--model', 'llama3-8b', '--tokens', '128k']
    for words in ['--tile-bytes', '65536'], ['--machine', machine('text.json', gpu_memory='80')], ['--machine', machine(gpu_memory=80)]:
        refused('with its unit', *small, *words)
    words = [*small, '--as', 'paper', '--machine']
    plan(*words, machine(gpu_memory='26.2GiB'))
    plan(*words, machine(gpu_memory='26.2GB'), status=3)
    got = plan(*words, machine(host_memory='1GiB'), status=3)
    check(got['binding'] == 'host' and not got['fits'], f"{got['binding']} binds, not the host")
    check(set(got) == FIELDS | {'as', 'method', 'measured'}, f'fields {sorted(got)}')


def refusals():
    small = ['--model', 'llama3-8b', '--tokens', '128k']
    for flag in '--accumulate', '--replicas':
        refused('would have no effect with --documents', *small, flag, '2', '--documents', 'lognormal:2k,1.5,128k')
    for best in [], ['--best']:
        refused('--ranks 8 does not divide into --replicas 3', *small, '--replicas', '3', *best)
    paper_s = [*small, '--as', 'paper']
    for sentence, *words in [
        ('neither a folder', '--model', 'llama9', '--tokens', '1M'), ('--tokens is missing', '--model', 'llama3-8b'),
        ('--model is missing', '--tokens', '1M'),
        *[('neither a file nor cpu', *small, '--machine', name) for name in ('abacus', 'h100', 'h100x0', 'h100x257', 'x8', 'cpux8')],
        ('--as paper has upipe, ulysses, ring, fpdt, native', *paper_s, '--method', 'zigzag'),
        ('--as is upipe', *small, '--as', 'nanotron'),
        ('has 8', *small, '--ranks', '16'), ('no --activations offload', *paper_s, '--method', 'native', '--activations', 'offload'),
        ('wants GPUs', *paper_s, '--machine', 'cpu'), ('may come 16 times', *small, *['--calibrate', 'x'] * 17),
        ('no effect without --model', '--write-machine', at('never.json'), '--tokens', '1M'),
        ('contradict', *small, '--method', 'ulysses', '--chunk', '8'), ('chunk', *paper_s, '--chunk', '7'),
        ('--train would have no effect', *paper_s, '--train', '*norm*'),
        ('--documents would have no effect with --as paper', *paper_s, '--documents', 'lognormal:2k,1,4k'),
        ('--lora is RANK', *small, '--lora', '0'),
        ('has a name like', *small, '--train', '*.qq'), ('--ignore-key would have no effect', *small, '--ignore-key', 'x'),
        ('none of these can be given', *small, '--best', '--method', 'upipe'),
        ('mixtral', '--tokens', '1k', '--model', model('experts', model_type='mixtral')),
    ]:
        refused(sentence, *words)
    # Values of a wrong type, keys that are not known: nothing of a machine file is passed over.
    for sentence, other in [
        ('there is no rate', {'rates': {'speed': 1}}), ('there is no hbm', {'hbm': '80GiB'}), ('base is no string', {'base': 8}),
        ('wants a number from', {'rates': {'dense_flops': 1e-300}}), ('name is no string', {'name': 1}),
        ('origin is no string', {'rates': {'dense_flops': {'value': 1e12, 'origin': 3}}}),
        ('there is no orign in a rate', {'rates': {'dense_flops': {'value': 1e12, 'orign': 'a guess'}}}),
        ('wants a number from', {'rates': {'dense_flops': {'origin': 'a guess'}}}),
    ]:
        refused(sentence, *small, '--machine', machine(**other))
    got = plan(*small, '--machine', machine(gpu_memory='4GiB'), status=3)
    check(got['binding'] == 'gpu', f"{got['binding']} binds where the reserve is all of the GPU")


def shard(layout, tokens, ring, rank):
    """Positions of the tokens that a rank of a ring has."""
    cut = [tokens * i // (2 * ring) for i in range(2 * ring + 1)]
    if layout == 'contiguous':
        return list(range(cut[2 * rank], cut[2 * rank + 2]))
    if layout == 'zigzag':
        return [*range(cut[rank], cut[rank + 1]), *range(cut[2 * ring - 1 - rank], cut[2 * ring - rank])]
    return list(range(rank, tokens, ring))


def packed_in(lengths, tokens, batch=1):
    """Which document each token is in, of all sequences: the last one of each is cut."""
    of, filled = [], 0
    while len(of) < tokens * batch:
        of += [filled] * min(lengths[filled % len(lengths)], tokens - len(of) % tokens)
        filled += 1
    return of


def pairs_of(rows, inner, of, window=0):
    """[step][rank]: pairs of a query and a key that it sees, one by one. rows: those of a sequence that a rank has."""
    ring, tokens = len(rows), sum(map(len, rows))
    steps = [[0] * ring for _ in range(ring)]
    for step in range(ring):
        for rank in range(ring):
            block = (rank // inner - step // inner) % (ring // inner) * inner + (rank % inner - step % inner) % inner
            steps[step][rank] = sum(k <= q and of[at + k] == of[at + q] and (window == 0 or q - k < window)
                                    for at in range(0, len(of), tokens) for q in rows[rank] for k in rows[block])
    return steps


LAYOUTS = [('ring', 'contiguous', 4), ('zigzag', 'zigzag', 4), ('stripe', 'striped', 4), ('double-ring', 'zigzag', 2)]


# Latent attention: layers, hidden size, heads, of a head without RoPE, with it and of V, the latent, what Q is projected from.
LATENT = {'deepseek-v3': (61, 7168, 128, 128, 64, 128, 512), 'kimi-k2': (61, 7168, 64, 128, 64, 128, 512),
          'minicpm3-4b': (62, 2560, 40, 64, 32, 64, 256), 'moonlight': (27, 2048, 16, 128, 64, 128, 512)}
LATENT_ROWS = [(method, form) for method in ('ulysses', 'upipe') for form in ('heads', 'gathered')]


def latent_plan(name, ranks, *words):
    """The plan, and its rows by method and form."""
    got = plan('--model', name, '--machine', machine(f'latent{ranks}.json', ranks=ranks), *words)
    check([(row['method'], row['form']) for row in got['rows']] == LATENT_ROWS and got['attention_of'] == name, f'{got}')
    return got, {(row['method'], row['form']): row for row in got['rows']}


def latent_page():
    """The table of the page about latent attention is what the planner prints, to the byte."""
    page = read(os.path.join(TOP, 'docs', 'latent.md')).decode()
    names = {'DeepSeek-V3': 'deepseek-v3', 'Kimi K2': 'kimi-k2', 'MiniCPM3-4B': 'minicpm3-4b', 'Moonlight': 'moonlight'}
    lines = re.findall(r'^\| ([\w. -]*?) ?\| (8|16) \| ([\d,]+) \| ([\d,]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| (\w+) \|$',
                       page, re.M)
    check([line[1] for line in lines] == ['8', '16', '8', '8', '8', '16'], f'the table has the lines {lines}')
    name = None
    for title, ranks, heads, latent, ratio, held, stage, whole, auto in lines:
        name = names[title] if title else name
        got, rows = latent_plan(name, int(ranks), '--tokens', '64k')
        tokens, unit = 65536 // int(ranks), got['unit_bytes']
        check(unit == tokens * LATENT[name][1] * 2 and got['layers'] == LATENT[name][0] and got['auto'] == auto, f'{name}: {got}')
        for form, numbers in ('heads', heads), ('gathered', latent):
            for method in 'ulysses', 'upipe':
                sent = rows[method, form]['sent_kv_bytes']
                check(sent == int(numbers.replace(',', '')) * tokens * 2, f'{name} {ranks} {method}: {sent} of K and V as {form}')
        both = [rows['upipe', form]['sent_forward_bytes'] for form in ('gathered', 'heads')]
        found = [both[0] / both[1], rows['upipe', 'gathered']['latent_bytes'] / unit,
                 rows['upipe', 'gathered']['kv_stage_bytes'] / unit, rows['ulysses', 'heads']['kv_stage_bytes'] / unit]
        check([f'{number:.2f}' for number in found] == [ratio, held, stage, whole], f'{name} {ranks}: {found}')


def latent_bytes():
    """Bytes sent, and of phases without scratch of kernels, are those of the tensors, counted here."""
    for name, ranks, tokens, batch, chunk, size in [('deepseek-v3', 8, 4096, 1, 8, 2), ('kimi-k2', 4, 1024, 3, 16, 2),
                                                    ('minicpm3-4b', 4, 2048, 2, 4, 4), ('moonlight', 16, 512, 1, 16, 2)]:
        _, dim, heads, nope, rope, v_dim, latent = LATENT[name]
        got, rows = latent_plan(name, ranks, '--tokens', tokens, '--batch', batch, '--chunk', chunk, '--dtype', {2: 'bf16', 4: 'f32'}[size])
        rows_of, all_of, k_dim, width = tokens * batch // ranks, tokens * batch, nope + rope, latent + rope
        check(got['unit_bytes'] == rows_of * dim * size, f"{name}: a unit of {got['unit_bytes']}")
        for (method, form), row in rows.items():
            here, what = heads if method == 'ulysses' else chunk, f'{name} {method} {form}'
            check(row['chunk'] == here and row['stages'] == heads // here, f'{what}: {row}')
            # of a token, to all other ranks: Q and O or the like of their heads, and K and V
            away = heads * (ranks - 1) // ranks
            kv = away * (k_dim + v_dim) * size if form == 'heads' else (ranks - 1) * width * size
            want = [away * (k_dim + v_dim) * size + kv,
                    away * ((2 * k_dim + v_dim + k_dim + v_dim) * size + 4) + kv, kv]
            sent = [row[key] for key in ('sent_forward_bytes', 'sent_backward_bytes', 'sent_kv_bytes')]
            check(sent == [number * rows_of for number in want], f'{what}: {sent}, not {want} a token')
            own, every = rows_of * width * size, all_of * width * size if form == 'gathered' else 0
            stage = all_of * here // ranks * size # an element of each head of a stage, on a rank
            stat, slots = rows_of * heads * 4, rows_of * heads * k_dim * size
            check(row['latent_bytes'] == every and row['kv_stage_bytes'] == stage * (k_dim + v_dim), f'{what}: {row}')
            given, by_stages = row['q_given'], row['q_by_stages']
            for door in given, by_stages:
                most = [max(door['phases'][f'{way}_{phase}'] for phase in ('before', 'in', 'attn', 'out')) for way in ('fwd', 'bwd')]
                check([door['forward_bytes'], door['backward_bytes']] == most, f'{what}: {door}')
            # K', V' and their gradients in f32; dO', delta', the send buffer of Q
            held = own + every + rows_of * width * 4 + stage * (k_dim + v_dim) * (1 + 4 // size) + 2 * stat
            held += stage * (v_dim + k_dim) + stage // size * 4
            want = [0, stat, held + stage * k_dim, slots + 2 * stat, held + slots]
            found = [given['phases']['fwd_before'], given['phases']['bwd_before'], given['phases']['bwd_out'],
                     by_stages['phases']['bwd_before'], by_stages['phases']['bwd_out']]
            check(found == want, f'{what}: {found}, not {want}')
            if size == 2: # products in f32 have scratch of their own
                want = [(every or own) + stat + stage * (k_dim + v_dim) + stage * k_dim + kept for kept in (stage * k_dim, slots)]
                found = [door['phases']['fwd_in'] for door in (given, by_stages)]
                check(found == want, f'{what}: {found}, not {want}')
        for door, phase in itertools.product(('q_given', 'q_by_stages'), ('fwd_attn', 'bwd_attn')): # with scratch
            for method in 'ulysses', 'upipe':
                more = rows[method, 'gathered'][door]['phases'][phase] - rows[method, 'heads'][door]['phases'][phase]
                want = rows[method, 'gathered']['latent_bytes'] - (own if phase == 'fwd_attn' else 0) # freed once all is there
                check(more == want, f'{name} {method} {door} {phase}: {more} bytes more, not {want}')


def latent_uneven():
    """Each number is that of the rank which has the most; each flag that is taken changes something."""
    tokens, ranks = 10001, 16
    got, rows = latent_plan('minicpm3-4b', ranks, '--tokens', tokens)
    most = -(-tokens // ranks)
    check(got['unit_bytes'] == most * 2560 * 2, f"a unit of {got['unit_bytes']}")
    check(rows['ulysses', 'gathered']['sent_kv_bytes'] == 15 * most * 288 * 2, f'{rows}')
    sent = max((tokens * (r + 1) // ranks - tokens * r // ranks) * (40 - (40 * (r + 1) // ranks - 40 * r // ranks)) for r in range(ranks))
    check(rows['ulysses', 'heads']['sent_kv_bytes'] == sent * 160 * 2, f'{rows}')
    check(rows['ulysses', 'heads']['kv_stage_bytes'] == 3 * tokens * 160 * 2, f'{rows}')
    words = {'--ranks': '4', '--chunk': '32', '--overlap': None, '--tokens': '8k', '--batch': '2', '--dtype': 'f32', '--device': 'cpu'}
    small = {'--model': 'deepseek-v3', '--tokens': '4k', '--chunk': '16'}
    plain = plan(*itertools.chain(*small.items()))
    for flag, value in words.items():
        more = {**small, flag: value}
        other = plan(*(word for pair in more.items() for word in pair if word is not None))
        check(other['rows'] != plain['rows'], f'{flag} changes nothing')
    refused('a chunk of 7 heads', *itertools.chain(*{**small, '--chunk': '7'}.items()))
    refused('128 heads at a time are one stage', *itertools.chain(*{**small, '--chunk': '128'}.items()), '--overlap')
    refused('has 8', *itertools.chain(*small.items()), '--ranks', '16')
    refused('--tokens is missing', '--model', 'kimi-k2')
    # all other flags are of whole models
    rest = {'--method': 'upipe', '--replicas': '2', '--ring': '2', '--inner': '2', '--segments': '4', '--accumulate': '2',
            '--train': '*', '--lora': '8', '--activations': 'ac', '--zero': '1', '--zero-prefetch': None, '--reduce-dtype': 'bf16',
            '--offload-optimizer': None, '--offload-weights': None, '--tile-bytes': '1MiB', '--as': 'paper', '--documents': 'x',
            '--max-tokens': None, '--best': None, '--ignore-key': 'x', '--progress': None, '--attention': 'fa2', '--loss': 'whole',
            '--mlp': 'whole', '--keep-all': None, '--fp8': None}
    for flag, value in rest.items():
        refused(f'{flag} would have no effect with --model deepseek-v3: of a model with latent attention the attention of one layer',
                *itertools.chain(*small.items()), flag, *([value] if value else []))
    said = run_command([PLAN, '--help']).stdout
    known = set(re.findall(r'^  (--[a-z-]+8?)', said, re.M)) - {'--help', '--version'}
    check(known == words.keys() | rest.keys() | {'--model', '--machine', '--json', '--calibrate', '--write-machine'}, f'{known}')
    check(all(name in said.split('  --model')[0] for name in LATENT), said[:600])
    said = run(PLAN, '--model', 'nosuch', '--tokens', '1k')[1]
    check(f"(of one layer's attention: {', '.join(LATENT)})" in said, said)


def latent_whole():
    """Of a folder whose model has dense layers alone all is planned: its bytes are those of the trainer, and of a training."""
    for name, config in latents.MODELS.items():
        programs.write_model(at(name), config, latents.random_tensors(config))
        for ranks, words in ((4, ['--method', 'upipe', '--activations', 'offload', '--zero', '3']),
                             (3, ['--method', 'ulysses', '--activations', 'ac', '--batch', '2', '--zero', '2']),
                             (4, ['--method', 'usp', '--ring', '2', '--activations', 'sac', '--lora', '4:8:kv_b,o', '--zero', '1'])):
            words += ['--dtype', 'bf16', '--tokens', '120', '--device', 'cpu']
            mine = plan('--model', at(name), '--machine', machine(ranks=ranks, ranks_per_node=2), *words)
            # of uneven heads a training says what its first rank holds
            for more in (['--plan'], ['--steps', '1', '--sample', '0'])[:1 if ranks == 3 else 2]:
                _, said, theirs = run(TRAIN, '--load', at(name), '--ranks', ranks, *words, *more)
                check(theirs is not None and mine['gpu_bytes'] == theirs['slab_bytes'] and
                      max(phase['bytes'] for phase in mine['phases']) == theirs['plan_bytes'] ==
                      theirs.get('peak_bytes', theirs['plan_bytes']),
                      f"{name} {words}: {mine['gpu_bytes']}, train: {theirs and theirs['slab_bytes']} {said[-300:]}")
    got = plan('--model', at('gathered'), *roomy('machine'), '--tokens', '4k', '--best')
    fastest(got, 'best')
    check(got['refused'] > 0 and not any('fpdt' in one['flags'] for one in got['settings']), 'segments of a latent are planned')


def latent_said():
    """The table says what the file says."""
    _, said, got = run(PLAN, '--model', 'moonlight', '--tokens', '1M')
    for word in 'one of 27 layers', 'Q from the hidden state', '1M tokens x 1', 'form AUTO: heads', 'the attention alone is planned':
        check(word in said, f'"{word}" is not in {said[:500]}')
    size = {'bytes': 1, 'KiB': 2**10, 'MiB': 2**20, 'GiB': 2**30}
    tables = said.split('\n\n')[2:]
    keys = [['sent_forward_bytes', 'sent_backward_bytes', 'sent_kv_bytes'], ['latent_bytes', 'kv_stage_bytes'], 'q_given', 'q_by_stages']
    check(len(tables) == len(keys), said)
    for table, columns in zip(tables, keys):
        for line, row in zip(table.strip().splitlines()[1:], got['rows'], strict=True):
            cells = re.findall(r'([\d.]+) (bytes|KiB|MiB|GiB) +([\d.]+)', line)
            of = row[columns] if isinstance(columns, str) else row
            want = [of[key] for key in (['forward_bytes', 'backward_bytes'] if of is not row else columns)]
            name = row['method'] + (f" --chunk {row['chunk']}" if row['method'] == 'upipe' else '') + f", {row['form']}"
            check(line.split('  ')[1] == name and len(cells) == len(want) and all(
                abs(float(number) * size[unit] - n) <= 0.005 * size[unit] and abs(float(part) - n / got['unit_bytes']) <= 0.0051
                for (number, unit, part), n in zip(cells, want)), f'{line}: not {name} {want}')
    check(re.findall(r'(\d+)$', tables[0], re.M) == ['4480', '4032'] * 2, tables[0])


def documents():
    """Pairs by rank and step against all of them, one by one; the numbers of attention follow."""
    tokens, ring, lengths = 1024, 4, [100, 1, 300, 37, 250]
    write(at('lengths'), '100 1\n300,37\n250\n')
    small = ['--model', model('small'), '--machine', machine(ranks=ring), '--device', 'cpu', '--tokens', str(tokens)]
    packed = [*small, '--documents', at('lengths')]
    of = packed_in(lengths, tokens)
    for method, layout, inner in LAYOUTS:
        steps = pairs_of([shard(layout, tokens, ring, rank) for rank in range(ring)], inner, of)
        got = plan(*packed, '--method', method)['documents']
        sums = [sum(step[rank] for step in steps) for rank in range(ring)]
        check(got['steps'] == steps, f"{method}: {got['steps']}, not {steps}")
        check(got['number'] == len(set(of)) and got['pairs'] == sum(sums), f'{method}: {got}')
        check(got['pairs_of_one'] == tokens * (tokens + 1) // 2, f'{method}: {got}')
        for name, used in ('used_p2p', sum(sums) / ring / sum(map(max, steps))), ('used_all_gather', sum(sums) / ring / max(sums)):
            check(abs(got[name] - used) < 1e-8, f'{method}: {name} is {got[name]}, not {used}')
    of_teams = plan(*packed, '--method', 'upipe')
    check(of_teams['documents']['used_p2p'] == 1, 'a team is not even')
    check(of_teams['gpu_bytes'] == plan(*small, '--method', 'upipe')['gpu_bytes'], 'documents take memory')
    check(of_teams['seconds_step'] < plan(*small, '--method', 'upipe')['seconds_step'], 'documents take no less time')
    drawn = plan(*small, '--documents', 'lognormal:64,1.5,256')['documents']
    check(1 < drawn['number'] < tokens and drawn['pairs'] < drawn['pairs_of_one'], f'{drawn}')
    write(at('zeros'), '5 0 7')
    write(at('nul'), '10 20\0 34')
    for sentence, *words in [
        ('lognormal:MEDIAN,SIGMA,MOST', '--documents', 'lognormal:2k,1.5'), ('MEDIAN,SIGMA,MOST', '--documents', 'lognormal:4k,1,2k'),
        ('MEDIAN,SIGMA,MOST', '--documents', 'lognormal:2k,1.5,128k,5'), ('MEDIAN,SIGMA,MOST', '--documents', 'lognormal:2k,1.5,128k 5'),
        ('no length from 1', '--documents', at('zeros')), ('byte 5 of', '--documents', at('nul'))]:
        refused(sentence, *small, *words)
    write(at('ones'), '1 ') # as many documents as tokens
    short = ['--model', model('small'), '--device', 'cpu', '--documents', at('ones'), '--machine', machine('many.json', ranks=64), '--tokens']
    ones = plan(*short, tokens, '--ranks', '4', '--method', 'stripe')['documents']
    check(ones['pairs'] == ones['number'] == tokens, f'{ones}')
    refused('a step of more than 131072 documents is not planned', *short, '256k', '--ranks', '4')
    refused('131072 documents over a ring of 64 ranks with striped tokens', *short, '128k', '--method', 'stripe')


def packed_steps():
    """The sequences of a batch have their own documents, layers their windows; each step waits for its slowest rank."""
    tokens, batch, ring, lengths = 128, 3, 4, [100, 1, 37, 50]
    write(at('lengths'), '100 1 37 50')
    of = packed_in(lengths, tokens, batch)
    rates = {**FREE, 'attention_forward_flops': 1, 'attention_backward_flops': 0.1}
    small = ['--machine', machine('attention.json', ranks=ring, rates=rates), '--device', 'cpu', '--tokens', tokens,
             '--batch', batch, '--documents', at('lengths'), '--activations', 'ac', '--model']
    sliding = {'architectures': ['MistralForCausalLM'], 'model_type': 'mistral', 'sliding_window': 9}
    partly = {**QWEN2, 'use_sliding_window': True, 'sliding_window': 9, 'max_window_layers': 1}
    for config, window in ({}, 0), (sliding, 9), (partly, 0):
        name = model('windowed', **config)
        for method, layout, inner in LAYOUTS:
            steps = pairs_of([shard(layout, tokens, ring, rank) for rank in range(ring)], inner, of, window)
            got = plan(*small, name, '--method', method)
            said, waited = got['documents'], sum(map(max, steps)) * 4 * 32 * 2  # of 4 heads and 2 layers
            check(said['steps'] == steps and said['number'] == len(set(of)), f'{config} {method}: {said}, not {steps}')
            whole = batch * sum(min(q + 1, window or tokens) for q in range(tokens))
            check(said['pairs_of_one'] == whole, f'{config} {method}: {said}, not {whole}')
            if config is not partly: # each layer sees as much
                check(abs(got['seconds_step'] / (waited * (2 * 4 + 10 * 10)) - 1) < 1e-8,
                      f"{config} {method}: {got['seconds_step']} s, not {waited * (2 * 4 + 10 * 10)}")


def progress():
    """A plan that takes long says how far it is, and with --progress each does; it plans no more settings than its search has."""
    small = ['--model', model('small'), '--machine', machine(ranks=2, gpu_reserve='0B', gpu_memory='12MiB'), '--device', 'cpu']
    for most, *words in (32, '--tokens', '4k'), (128, '--max-tokens'), (4096, '--tokens', '4k', '--best'), (4096, '--max-tokens', '--best'):
        done = run_command([PLAN, *small, *words, '--progress'])
        said = re.findall(r'^(\d+) settings planned in \d+\.\d s \.\.\.$', done.stderr, re.M)
        check(done.returncode == 0 and said and said[0] == '1', f'{words}: {done.stderr[-400:]}')
        check(int(said[-1]) <= most and len(said) == len(done.stderr.splitlines()), f'{words}: {done.stderr[-400:]}')


def paths():
    """Results replace nothing that is read, nor each other; a link stays one."""
    own, host, rates = model('own'), machine('own.json'), at('rates.json')
    write(rates, '{"op": "gemm", "tflops": 3, "threads": 1}\n')
    link, new = at('link.json'), at('new.json')
    os.symlink('own.json', link)
    small = ['--model', own, '--machine', host, '--tokens', '1k', '--device', 'cpu', '--ranks', '2']
    for flag, path in ('model', os.path.join(own, 'config.json')), ('machine', host), ('machine', link), ('calibrate', rates):
        for words in ['--json', path, '--write-machine', new], ['--write-machine', path]:
            refused(f'would replace the file of --{flag}', *small, '--calibrate', rates, *words, status=1)
    refused('would replace', '--machine', host, '--write-machine', host, status=1)
    for same in new, at('own', '..', 'new.json'):
        refused('both of two results', *small, '--json', new, '--write-machine', same, status=1)
    for path in at('none', 'x.json'), FOLDER:
        refused('cannot be written', *small, '--json', path, status=1)
        refused('cannot be written', *small, '--best', '--json', path, status=1)
        refused('cannot be written', *small, '--json', new, '--write-machine', path, status=1)
    write(at('cut.json'), '{"op": "gemm", "tflops": 3, "threads": 1}\n\0{"op": "attn_fwd", "tflops": 3, "threads": 1}\n')
    refused('no numbers of a benchmark', *small, '--calibrate', at('cut.json'), '--write-machine', new)
    # what cannot be read is no wrong usage
    os.makedirs(os.path.join(FOLDER, 'empty', 'config.json'))
    refused('cannot be read', '--model', own, '--tokens', '1k', '--machine', FOLDER, status=1)
    refused('cannot be read', '--model', os.path.join(FOLDER, 'empty'), '--tokens', '1k', status=1)
    refused('cannot be read', *small, '--calibrate', os.path.join(FOLDER, 'none'), '--write-machine', new, status=1)
    os.remove(link)
    os.symlink('link.json', link)
    refused('cannot be written', *small, '--json', link, status=1)  # to itself
    for to in 'far.json', at('farther.json'):
        os.remove(link)
        os.symlink(to, link)
        for what in 'a link to nothing', 'a link':
            run_command([PLAN, *small, '--json', link]).check_returncode()
            far = load(at(to))
            check(os.path.islink(link) and 'fits' in far, f'{what} was replaced, not written through to {to}')
            write(at(to), '{}')
    for line in '{"op": "gemm", "tflops": 1e14, "threads": 1}', '{"op": "gemm", "gflops": 1e-30, "threads": 1}':
        write(rates, line + '\n')
        refused('not in 1e-12 .. 1e+24', *small, '--calibrate', rates, '--write-machine', new)


def others():
    """Models that the trainer refuses; advice; a machine that was written."""
    for name, other, word in ('biased', QWEN2, None), (
            'scaled', {'rope_scaling': {'rope_type': 'llama3', 'factor': 8}}, 'rope_scaling'), (
            'sliding', {**QWEN2, 'use_sliding_window': True, 'sliding_window': 9, 'max_window_layers': 1}, None), (
            'dropping', {'attention_dropout': 0.1}, 'attention_dropout'):
        _, said, got = run(PLAN, '--model', model(name, **other), '--machine', machine(ranks=2), '--tokens', '256')
        check(got is not None and got['fits'], f'{name}: {said[-300:]}')
        check(word in said and 'refuses' in said if word else 'refuses' not in said, f'{name}: {said[:300]}')
    for name, word in ('qwen2.5-7b', None), ('llama3.1-8b', None):
        _, said, got = run(PLAN, '--model', name, '--tokens', '128k', '--device', 'cpu')
        check(got is not None and (word in said and 'refuses' in said if word else 'refuses' not in said), said[:300])
    got = plan('--model', 'llama3-8b', '--tokens', '4M', '--method', 'ulysses', '--zero', '1', status=3)
    check(any(one['flags'] == '--method upipe' and one['gpu_bytes_saved'] > 0 for one in got['advice']), got['advice'])
    written('h100x8')
    words = ['--model', 'llama3-8b', '--tokens', '1M', '--as', 'paper']
    check(plan(*words) == plan(*words, '--machine', at('written.json')), 'a machine is not what was written')
    measured = os.path.join(TOP, 'bench', 'results', 'machine_h200.json')
    faster, preset = (plan('--model', 'llama3-8b', '--tokens', '1M', '--machine', name) for name in (measured, 'h200x8'))
    check(faster['gpu_bytes'] == preset['gpu_bytes'] and faster['seconds_step'] != preset['seconds_step'],
          'measured rates are not read')


def calibrated():
    """Rates of benchmarks: of the most threads, of the most elements, and of a CPU the part of each rank."""
    attention = os.path.join(TOP, 'bench', 'results', 'attn_avx512.json')
    products = os.path.join(TOP, 'bench', 'results', 'gemm.json')
    rates = written('cpu', '--calibrate', attention, '--calibrate', products)['rates']
    update = at('update.json') # the most elements are beyond caches; ranks of a node share its memory
    write(update, ''.join(f'{{"op": "adamw", "gbytes_per_s": {rate}, "rows": {rows}, "d": 4096, "threads": {threads}}}\n'
                          for rate, rows, threads in ((90, 64, 2), (10, 8192, 2), (7, 8192, 2), (80, 9999, 1))))
    most = written('cpu', '--calibrate', update)['rates']['host_update_bytes']
    check(most['value'] == 10e9, most)
    check(all('measured' in rates[name]['origin'] and 1e9 < rates[name]['value'] < 1e12 for name in
              ('attention_forward_flops', 'attention_backward_flops', 'dense_flops')), rates)
    many = at('many.json')
    write(many, ''.join(json.dumps({'op': op, unit: rate, 'rows': 9, 'd': 9, 'threads': threads}) + '\n'
                        for op, unit, rate, threads in (
                            ('gemm', 'gflops', 100, 1), ('gemm', 'gflops', 48, 4), ('gemm', 'gflops', 40, 4),
                            ('attn_fwd', 'tflops', 2, 4), ('attn_bwd', 'tflops', 1, 4),
                            ('adamw', 'gbytes_per_s', 6, 4))))
    for host, ranks in ('cpu', 8), ('h100x8', 1):
        got = written(host, '--calibrate', many)['rates']
        want = {'dense_flops': 48e9 / ranks, 'attention_forward_flops': 2e12 / ranks, 'attention_backward_flops': 1e12 / ranks,
                'host_update_bytes': 6e9}
        check(all(got[name]['value'] == rate for name, rate in want.items()), f'{host}: {got}, not {want}')


def roomy(name, **other):
    """A machine of two GPUs, on which all settings are tried."""
    has = {'ranks': 2, 'gpu_reserve': '0B', 'gpu_memory': '12MiB', **other}
    return ['--machine', machine(f'{name}.json', **has), '--device', 'cpu']


def fastest(got, what):
    """Settings are in the order of their time; of the Pareto set is what needs less than all faster ones."""
    settings, least = got['settings'], float('inf')
    seconds = [one['seconds_step'] for one in settings]
    check(seconds == sorted(seconds), f'{what}: not in the order of their time: {seconds}')
    for one in settings:
        check(one['pareto'] == (one['gpu_bytes'] < least), f'{what}: {one}, others have {least}')
        least = min(least, one['gpu_bytes'])
    check(got['tried'] == got['refused'] + got['pruned'] + len(settings), f'{what}: settings do not add up')


def best_setting():
    """The fastest that fits; states leave a GPU that does not hold them; where nothing fits, what comes nearest."""
    small = ['--model', model('small'), *roomy('machine'), '--tokens', '4k']
    got = plan(*small, '--best')
    fastest(got, 'best')
    first = got['settings'][0]
    check(got['seconds_step'] == first['seconds_step'] and got['best'] == first['flags'], f"{got['best']}, not {first}")
    confirmed = plan(*small, *got['best'].split())
    check(confirmed['gpu_bytes'] == got['gpu_bytes'], 'the best setting is not what it was')
    check(FIELDS <= set(got), f'fields {sorted(got)}')
    check(not any('--offload' in one['flags'] for one in got['settings']), 'states have left a GPU that holds them')
    kinds = {one['flags'].split('--activations ')[1] for one in got['settings']}
    check({'ac', 'offload', 'sao:2', 'sac', 'sac:1', 'blocks:2'} <= kinds, f'only {kinds} were tried')
    least = min(one['gpu_bytes'] for one in got['settings'])
    less = ['--model', model('small'), *roomy('less', gpu_memory=f'{least - 1:.0f}B'), '--tokens', '4k']
    got = plan(*less, '--best')
    check(got['settings'] and all('--offload-optimizer' in one['flags'] and one['link_bytes'] > 0 for one in got['settings']),
          f"states are on a GPU that does not hold them: {got['settings'][:3]}")
    check(plan(*less, *got['best'].split())['gpu_bytes'] == got['gpu_bytes'], 'the best setting is not what it was')
    tiny = ['--model', model('tiny', **TINY), '--best']
    for words in ['--max-tokens'], ['--tokens', '8k']:
        got = plan(*tiny, *roomy('tight', gpu_memory='1KiB'), *words, status=3)
        check(got['gpu_bytes'] > 1024 and got['pruned'] + got['refused'] == got['tried'] and not got['settings'] and
              'best' not in got and FIELDS <= set(got), f"{got['gpu_bytes']} bytes come nearest")
    nearest = got['gpu_bytes']
    plan(*tiny, *roomy('tight', gpu_memory=f'{nearest - 1}B'), *words, status=3)
    got = plan(*tiny, *roomy('tight', gpu_memory=f'{nearest}B'), *words)
    least = min(one['gpu_bytes'] for one in got['settings'])
    check(got['gpu_bytes'] == nearest == least, f'{nearest} bytes come nearest, not {least}')


def extrapolated():
    """Time, host and link of a long sequence are those of full plans; the best is the fastest that fits by one."""
    long = ['--model', model('tiny', **TINY), '--tokens', '512k']
    got = plan(*long, *roomy('all', gpu_memory='90TiB', rates={'host_update_bytes': 1}), '--best')
    fastest(got, 'extrapolated')
    full = {}
    for one in got['settings'][::3] + [one for one in got['settings'] if one['pareto']]:
        full[one['flags']] = whole = plan(*long, *roomy('all', gpu_memory='90TiB'), *one['flags'].split())
        check(abs(whole['seconds_step'] / one['seconds_step'] - 1) < 1e-7 and
              abs(whole['gpu_bytes'] / one['gpu_bytes'] - 1) < 0.01 and
              all(whole[name] == one[name] for name in ('host_bytes_node', 'link_bytes')), f'{one}, in full {whole}')
    longer = [one for one in got['settings'] if one['pareto'] and full[one['flags']]['gpu_bytes'] > one['gpu_bytes']]
    needed(longer, 'no line is too short')
    host = roomy('short', gpu_memory=f"{longer[0]['gpu_bytes']}B", rates={'host_update_bytes': 1})
    status, _, got = run(PLAN, *long, *host, '--best')
    tried = [one['flags'] for one in got['settings']]
    fits = [flags for flags in tried if run(PLAN, *long, *host, *flags.split())[0] == 0]
    check(longer[0]['flags'] in tried and longer[0]['flags'] not in fits, f'{longer[0]}: {fits}')
    check((status == 0) == got['fits'] == bool(fits) and got.get('best') == (fits[0] if fits else None),
          f"{got.get('best')}, not {fits[:1]}")


def longest_settings():
    """The longest sequence of each method, confirmed by full plans."""
    small = ['--model', model('small'), *roomy('machine'), '--tokens', '4k']
    far = plan(*small[:-2], '--max-tokens', '--best')
    confirmed = [one for one in far['settings'] if one['confirmed']]
    check(FIELDS <= set(far) and far['max_tokens'] == confirmed[0]['max_tokens'], f'fields {sorted(far)}')
    check(len({one['flags'].split()[1] for one in confirmed}) > 4, confirmed)
    for size in range(4): # of some memories the lines overestimate the longest, whatever scratch the kernels take
        words = ['--model', model('small'), *roomy(f'far{size}', gpu_memory=f'{6144 + 397 * size}KiB')]
        many = plan(*words, '--max-tokens', '--best')
        longest = {}
        for one in many['settings']:
            kind = one['flags'].split()[1]
            if one['confirmed']:
                longest[kind] = max(longest.get(kind, 0), one['max_tokens'])
        check(many['max_tokens'] == max(longest.values()), f'{size}: {longest}')
        check(all(one['max_tokens'] <= longest[one['flags'].split()[1]] for one in many['settings']),
              f'the longest is not the longest: {size}, {longest}')
    for one in far['settings'][:1] + confirmed[-1:] + [one for one in far['settings'] if not one['confirmed']][:2]:
        words = [*small[:-2], *one['flags'].split(), '--tokens']
        most = one['max_tokens'] if one['confirmed'] else plan(*words[:-1], '--max-tokens')['max_tokens']
        check(one['confirmed'] or abs(most / one['max_tokens'] - 1) < 0.02, f"{one}: {most} tokens by full dry runs")
        plan(*words, most)
        plan(*words, most + 2048, status=3)
        seconds = plan(*words, one['max_tokens'])['seconds_step'] if one['max_tokens'] <= most else one['seconds_step']
        check(abs(seconds / one['seconds_step'] - 1) < 1e-7, f'{one}: {seconds} s by a full plan')
    _, said, _ = run(PLAN, '--model', 'llama3-8b', '--as', 'paper', '--max-tokens', '--machine',
                     machine('huge.json', gpu_memory='900TiB', host_memory='900TiB'))
    check('longer ones are not planned: ' in said, said[-300:])
    longest = plan(*small[:-2], '--max-tokens', '--activations', 'offload')
    plan(*small[:-2], '--tokens', longest['max_tokens'], '--activations', 'offload')
    plan(*small[:-2], '--tokens', longest['max_tokens'] + 2048, '--activations', 'offload', status=3)


def pictures():
    """plot_plan.py draws what --json wrote, with a Python that has Matplotlib, where there is one."""
    python = python_with('matplotlib')
    if python is None:
        print('planner: left out: pictures, as no Python here has Matplotlib')
        return
    paths = []
    small = ['--model', model('small'), '--machine', machine(ranks=2), '--device', 'cpu', '--tokens', '4k', '--best']
    paper = ['--model', 'llama3-8b', '--as', 'paper', '--tokens', '3M', '--method']
    attention = ['--model', 'kimi-k2', '--tokens', '64k']
    for name, words in (('ulysses', [*paper, 'ulysses']), ('upipe', [*paper, 'upipe']), ('settings', small), ('latent', attention)):
        paths.append(at(name + '.json'))
        write(paths[-1], json.dumps(plan(*words)))
    pictures_of = [[at('plans.png'), *paths[:2]], [at('settings.png'), paths[2]], [at('latent.png'), paths[3], paths[3]]]
    twice = 'import sys, plot_plan\nfor sys.argv in ' + repr([['plot_plan.py', *words] for words in pictures_of]) + ': plot_plan.main()'
    done = run_command([python, '-c', twice], variables={'PYTHONDONTWRITEBYTECODE': '1'}, cwd=os.path.join(TOP, 'examples', 'plan'))
    for path, *_ in pictures_of:
        check(os.path.exists(path) and read(path)[:4] == b'\x89PNG', f'no {path}: {done.stderr[-400:]}')


with tempfile.TemporaryDirectory() as FOLDER:
    for test in (paper, presets, small_cards, same_bytes, accumulated, step_time, paper_time, has_settings, as_bytes, attention_rates,
                 measured, machines, advised, nodes,
                 numbers, latent_page, latent_bytes, latent_uneven, latent_whole, latent_said, documents, packed_steps, progress, refusals,
                 paths, others, calibrated, best_setting, extrapolated, longest_settings, pictures):
        run_test(test)
sys.exit(end('planner'))

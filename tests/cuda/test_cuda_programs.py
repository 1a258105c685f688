#!/usr/bin/env python3
"""test_cuda_programs.py FOLDER -- the programs with --device cuda, on the fake device

FOLDER holds them as fake_NAME. What they compute is held against the same programs on the CPU; streams run as late as
they may, in several orders, of which the full run has more, and calls of the libraries fail. Ends with a verdict; the exit
status is zero if all held.
"""

import json
import os
import re
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'lib'))
from checks import check, end  # pylint: disable=wrong-import-position

FOLDER = os.path.abspath(sys.argv[1])
FULL = bool(os.environ.get('UPIPE_FULL'))
SEEDS = (3, 8) if FULL else (8,)  # orders of the streams; 0 is that of the calls
TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
MODEL = ('--layers 2 --model-dim 64 --heads 4 --kv-heads 2 --ff-dim 64 --tokens 64 --ranks 2 --steps 3 --batch 1 '
         '--sample 0 --lr 1e-3 --warmup 0').split()

HANGS = 600  # seconds: ten times and more what the slowest program takes on an idle machine


def run(name, *args, **fake):
    """A program of the fake device; fake: FAKE_SEED and so on."""
    return subprocess.run([os.path.join(FOLDER, 'fake_' + name), *args], capture_output=True, text=True, timeout=HANGS,
                          check=False, env={**os.environ, **{key: str(value) for key, value in fake.items()}})


def there(name):
    return os.path.exists(os.path.join(FOLDER, 'fake_' + name))


def numbers(name, *args, **fake):
    """What a program writes to --json; None, and a failed check, if it failed."""
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, 'numbers.json')
        done = run(name, *args, '--json', out, **fake)
        if not check(done.returncode == 0, f'{name} {" ".join(args)} {fake}: {done.returncode}: {done.stderr[-500:]}'):
            return None
        with open(out, encoding='utf-8') as source:
            return json.load(source)


def test_examples():
    for name in '03_all_to_all', '04_attention', '05_layer', '06_step', '07_tiles':
        cpu, cuda = run(name), run(name, '--device', 'cuda')
        check(cpu.returncode == 0, f'{name}: {cpu.stderr}')
        if not check(cuda.returncode == 0, f'{name} --device cuda: {cuda.returncode}: {cuda.stderr}'):
            continue
        # the same lines; numbers may differ by what a different order of sums does
        words = [re.findall(r'[-+]?\d+\.\d+|\w+', text.replace(cpu_name, 'NAME'))
                 for text, cpu_name in ((cpu.stdout, 'cpu-avx2'), (cuda.stdout, 'cuda'))]
        if name in ('03_all_to_all', '06_step'):
            near = len(words[0]) == len(words[1]) and all(
                a == b or ('.' in a and abs(float(a) - float(b)) < 1e-3) for a, b in zip(*words))
            check(near, f'{name}: on the CPU {cpu.stdout}, on the device {cuda.stdout}')
    done = run('09_cuda')
    check(done.returncode == 0 and 'token 0 looks at 0' in done.stdout, f'09_cuda: {done.stdout} {done.stderr}')
    done = run('03_all_to_all', '--device', 'tpu')
    check(done.returncode == 2 and 'usage' in done.stderr, f'--device tpu: {done.returncode} {done.stderr}')


def test_processes():
    """A team of one over NCCL: the fake's ranks are threads. With copy engines and without."""
    alone = {'RANK': '0', 'WORLD_SIZE': '1', 'LOCAL_RANK': '0', 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': '29400'}
    for flags in [], ['--zero-sm']:
        done = run('08_processes', *flags, **alone)
        check(done.returncode == 0 and 'over nccl' in done.stdout and 'the same bits as' in done.stdout,
              f'08_processes {flags}: {done.returncode} {done.stdout} {done.stderr}')
        check(('asked of the copy engines' in done.stdout) == bool(flags), f'08_processes {flags}: {done.stdout}')
    for k in 3, 10, 30, 45:
        done = run('08_processes', '--zero-sm', **alone, FAKE_FAIL=str(k))
        check(done.returncode == 1 and done.stderr.startswith('08_processes: '),
              f'08_processes, FAKE_FAIL={k}: {done.returncode} {done.stderr}')


def test_compare():
    flags = '--tokens 64 --heads 4 --kv-heads 2 --head-dim 32 --ranks 2 --check on --device'.split()
    for dtype in 'bf16', 'f32':
        for seed in 0, 5:
            got = numbers('compare', *flags, 'cuda', '--dtype', dtype, FAKE_SEED=seed, SIMT_SEED=seed)
            want = numbers('compare', *flags, 'cpu', '--dtype', dtype)
            if got is None or want is None:
                return
            check(got['config']['device'] == 'cuda' and got['config']['products'] == 'cublas', str(got['config']))
            for a, b in zip(got['methods'], want['methods']):
                check(a['peak_bytes'] == a['plan_bytes'], f'{a["name"]}: {a["peak_bytes"]} is not {a["plan_bytes"]}')
                check(a['err_dx'] <= 2 * b['err_dx'] + 1e-6, f'{dtype}: dx {a["err_dx"]} beside {b["err_dx"]}')


METHODS = ['ulysses', 'upipe', 'upipe-naive', 'ring', 'zigzag', 'stripe', 'double-ring', 'allgather', 'usp',
           'upipe-ring', 'fpdt', 'upipe-fpdt']


def test_methods():
    """Every method, with every mask and stages that overlap: compare itself holds bytes to the plan."""
    every = [word for name in METHODS for word in ('--method', name)]
    shape = '--tokens 36 --heads 8 --kv-heads 4 --head-dim 32 --model-dim 48 --check on --rope --dtype bf16'.split()
    masks = '--window 14 --cu-seqlens 9,0,27 --softcap 4 --sinks --v-dim 40'.split()
    for flags in ([*shape, '--overlap'], [*shape, *masks]) if FULL else ([*shape, '--overlap', *masks],):
        got = numbers('compare', *flags, *every, '--device', 'cuda', FAKE_SEED=3)
        want = numbers('compare', *flags, *every, '--device', 'cpu')
        if got is None or want is None:
            return
        check([m['name'] for m in got['methods']] == METHODS, str(got['config']))
        for a, b in zip(got['methods'], want['methods']):
            for key in 'err_out', 'err_dx', 'err_dw':
                check(a[key] <= 2 * b[key] + 1e-6, f'{flags}: {a["name"]}: {key} {a[key]}, on the CPU {b[key]}')
    # the copies of segments on a stream of their own: the same numbers in the same bytes, in any order of the streams
    segments = [*shape, '--method', 'fpdt', '--method', 'upipe-fpdt', '--device', 'cuda']
    alone = numbers('compare', *segments)
    for seed in (0, 4) if FULL else (4,):
        got = numbers('compare', *segments, '--overlap', FAKE_SEED=seed)
        for a, b in zip(got['methods'], alone['methods']) if got and alone else []:
            for key in 'err_out', 'err_dx', 'err_dw', 'peak_bytes', 'host_bytes':
                check(a[key] == b[key], f'{a["name"]}, seed {seed}: {key} {a[key]} where copies overlap, not {b[key]}')


def test_train():
    if not there('train'):
        print('left out: train, as jansson is missing')
        return
    flags = [*MODEL, '--attention-bias', 'qkvo', '--dtype', 'bf16', '--device']
    want = numbers('train', *flags, 'cpu')
    seen = set()
    for seed in 0, *SEEDS:
        got = numbers('train', *flags, 'cuda', '--offload', FAKE_SEED=seed, SIMT_SEED=seed)
        if want is None or got is None:
            return
        seen.add(json.dumps([got['loss'], got['grad_norm']]))
        for key in 'loss', 'grad_norm':
            check(all(abs(a - b) < 0.02 * b for a, b in zip(got[key], want[key])), f'{key} {got[key]}, on the CPU {want[key]}')
    check(len(seen) == 1, f'the order of the streams changes what is learnt: {seen}')
    for kept in 'ac', 'sac,grad', 'blocks:2', 'sao:2,grad':
        other = numbers('train', *flags, 'cuda', '--activations', kept, FAKE_SEED=5, SIMT_SEED=5)
        if other is not None:
            check(other['loss'] == got['loss'], f'losses {other["loss"]} with {kept}, {got["loss"]} with offload')
    cut = [numbers('train', *flags, 'cuda', '--method', 'upipe-fpdt', '--segments', '3', '--overlap', '--activations', kept,
                   FAKE_SEED=seed, SIMT_SEED=seed) for seed, kept in enumerate(('offload,grad', 'sac'))]
    check(None in cut or all(one['loss'] == cut[0]['loss'] for one in cut), f'losses in segments: {cut}')
    # weights gathered ahead, on a stream of their own: it waits for the step before, and the computing stream for it
    sharded = [*flags, 'cuda', '--untied', '--zero', '3', '--offload']
    alone = numbers('train', *sharded)
    for seed in SEEDS:
        got = numbers('train', *sharded, '--zero-prefetch', FAKE_SEED=seed, SIMT_SEED=seed)
        for key in ('loss', 'grad_norm') if got and alone else []:
            check(got[key] == alone[key], f'seed {seed}: {key} {got[key]} with weights ahead, not {alone[key]}')
    for k in '150', '700', '1200', '1600s', '2000':
        done = run('train', *sharded, '--zero-prefetch', '--deadline', '5', FAKE_FAIL=k)
        check(done.returncode == 1 and done.stderr.startswith('train: rank '), f'FAKE_FAIL={k}: {done.returncode} {done.stderr}')


def test_world():
    """The trainer's ranks over NCCL, a device each: the numbers of ranks that are threads over the memory of one."""
    if not there('train_ranks'):
        return
    small = [*MODEL[:MODEL.index('--ranks')], '--device', 'cuda', '--dtype', 'bf16', '--steps', '2', '--sample', '0']
    for hosts, seed, flags in (('aa', 3, ['--overlap', '--zero', '3', '--zero-prefetch']),
                               ('abab', 0, ['--method', 'usp', '--ring', '2'])):
        want = numbers('train', *small, *flags, '--ranks', str(len(hosts)))
        got = numbers('train_ranks', hosts, *small, *flags, '--transport', 'nccl', FAKE_SEED=seed)
        if want is None or got is None:
            continue
        check((want['config'].pop('transport'), got['config'].pop('transport')) == ('threads', 'nccl'),
              f'transports of {flags}')
        unlike = [name for name in want if name != 'tokens_per_s' and want[name] != got.get(name)]
        check(not unlike, f'{hosts} {flags}: other {unlike} over NCCL')


def test_world_failures():
    """What fails while the ranks meet is said, and leaves nothing on the devices (the program's status is 3 otherwise)."""
    if not there('train_ranks'):
        return
    flags = [*MODEL[:MODEL.index('--ranks')], '--device', 'cuda', '--transport', 'nccl', '--steps', '1', '--sample', '0',
             '--deadline', '0.5']
    for k in 3, 6, 8, 12, 40, 90, 150:
        done = run('train_ranks', 'ab', *flags, FAKE_FAIL=k)
        check(done.returncode == 1 and 'train: ' in done.stderr, f'FAKE_FAIL={k}: {done.returncode} {done.stderr}')


def results(folder):
    """What lies below it, without the rows of --json that two runs have apart."""
    found = {}
    for at, _, names in os.walk(folder):
        for name in names:
            with open(os.path.join(at, name), 'rb') as file:
                found[os.path.relpath(os.path.join(at, name), folder)] = re.sub(rb'"(seconds_\w+|transport|ts)": ?[^,}]+', b'', file.read())
    return found


def test_world_compare():
    """Methods of several shapes, and the logits of a checkpoint, over NCCL as with ranks that are threads: all files alike."""
    if not there('logits_ranks'):
        return
    small = ('--heads 4 --kv-heads 2 --head-dim 32 --tokens 60 --segments 2 --check off --device cuda --dtype bf16 --json numbers '
             '--trace traces --dump dump --method upipe --method usp --method ring --method fpdt').split()
    there_too = ['--transport', 'nccl']
    with tempfile.TemporaryDirectory() as folder:
        model, ids = os.path.join(folder, 'model'), os.path.join(folder, 'ids')
        done = run('train', *MODEL, '--save', model)
        check(done.returncode == 0, f'a model: {done.stderr}')
        head = "{'descr': '<i4', 'fortran_order': False, 'shape': (33,), }".ljust(117) + '\n'
        with open(ids, 'wb') as file:
            file.write(b'\x93NUMPY\x01\x00v\x00' + head.encode() + bytes(n for i in range(33) for n in (7 * i % 256, 0, 0, 0)))
        read = ['--load', model, '--ids', ids, '--out', 'logits', '--device', 'cuda']
        for what, hosts, flags in (('compare', 'abab', small), ('logits', 'aa', read), ('logits', 'aba', [*read, '--method', 'zigzag'])):
            got = []
            for name, words, seed in ((what, ['--ranks', str(len(hosts))], 0), (what + '_ranks', there_too, 3)):
                at = os.path.join(folder, f'{name}-{hosts}')
                os.mkdir(at)
                words = [hosts, *flags, *words] if name != what else [*flags, *words]
                done = subprocess.run([os.path.join(FOLDER, 'fake_' + name), *words], cwd=at, capture_output=True, text=True, timeout=HANGS,
                                      check=False, env={**os.environ, 'FAKE_SEED': str(seed)})
                check(done.returncode == 0, f'{name} {hosts}: {done.returncode}: {done.stderr}')
                got.append(results(at))
            unlike = [name for name in got[0] if got[0][name] != got[1].get(name)]
            check(got[0] and got[0].keys() == got[1].keys() and not unlike, f'{what} {hosts}: other {unlike} over NCCL')


def test_world_alone():
    """What a process says that is alone, or should not be."""
    if not there('train'):
        return
    flags = [*MODEL[:MODEL.index('--ranks')], '--device', 'cuda', '--transport', 'nccl', '--steps', '1', '--sample', '0',
             '--deadline', '0.5']
    port = {'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': '29434'}
    for words, status, sentence, launched in (
            (flags, 0, '', {}),
            ([word if word != 'cuda' else 'cpu' for word in flags], 2, 'needs --device cuda', {}),
            ([*flags, '--ranks', '2'], 2, 'the launcher has started 1 processes', {}),
            (flags, 1, '1 of 2 ranks have come to port 29434 within 0.5 s', {'RANK': 0, 'WORLD_SIZE': 2}),
            (flags, 1, 'rank 1 has not met rank 0', {'RANK': 1, 'WORLD_SIZE': 2}),
            (flags, 1, 'WORLD_SIZE is 2, but RANK is not set', {'WORLD_SIZE': 2}),
            (flags, 1, 'process 16 of this machine, which has 16 devices', {'LOCAL_RANK': 16}),
            (flags[:-4] + ['--deadline', '5'], 1, 'train: ', {'FAKE_FAIL': 400})):
        done = run('train', *words, **port, **launched)
        check(done.returncode == status and sentence in done.stderr, f'{words} {launched}: {done.returncode} {done.stderr}')


def test_failures():
    """A call that fails ends the program with a sentence and status 1, whichever it is."""
    flags = '--tokens 64 --heads 2 --head-dim 32 --ranks 2 --check off --dtype bf16 --device cuda --deadline 5'.split()
    for method, calls in [(['upipe'], [1, 2, 3, 5, 8, 12, 15, 20, 30, 45, 60, 80, 110]),
                          (['fpdt', '--overlap'], [75, 150, 260, 400])]:
        told = set()
        for k in calls:
            for sticky in '', 's':
                done = run('compare', *flags, '--method', *method, FAKE_FAIL=f'{k}{sticky}')
                text = done.stderr.strip()
                check(done.returncode == 1 and text.startswith('compare: '),
                      f'{method}, FAKE_FAIL={k}{sticky}: {done.returncode}: {text}')
                told.add(text)
        check(2 * len(told) > len(calls), f'{method}: {len(told)} different sentences')


def test_bench():
    """bench/gpu.py in small, over the fake device: every figure is there, and what has no device says so."""
    script = os.path.join(TOP, 'bench', 'gpu.py')
    stages = ['roofline', 'attention', 'masks', 'transfer', 'block']
    with tempfile.TemporaryDirectory() as folder:
        flags = ['--quick', '--program', os.path.join(FOLDER, 'fake_gpu'), '--results', folder]
        done = subprocess.run([sys.executable, script, *flags, *stages, 'chart'], capture_output=True, text=True,
                              timeout=HANGS, check=False)
        if not check(done.returncode == 0, f'gpu.py: {done.returncode}: {done.stderr[-800:]}'):
            return
        figures = {}
        for stage in stages:
            with open(os.path.join(folder, f'gpu_{stage}.json'), encoding='utf-8') as source:
                made = json.load(source)
            check(made['device']['name'] == 'fake' and made['stage'] == stage, str(made['device']))
            figures[stage] = made['figures']
        counts = [len(figures[stage]) for stage in stages]
        check(counts == [1, 10, 3, 2, 6], f'{stages} have {counts} figures')
        for made in figures['attention'] + figures['masks']:
            for kernel in made['kernels']:
                check(set(kernel['checked']) == {'o', 'lse', 'dq', 'dk', 'dv'}, str(kernel))
            check(made['kernels'][0]['name'] == 'upipe' and made['bwd_flop'] == 2.5 * made['fwd_flop'], str(made))
        full, window, packed = (made['fwd_flop'] for made in figures['masks'])
        check(window < full and packed < full, f'flops of masks: {full}, {window}, {packed}')
        for made in figures['block']:
            check(made['plan_bytes'] == made['peak_bytes'], str(made))
            check(made['driver_beyond_slabs_bytes'] == 0, f'memory beyond the slabs: {made}')
        check({made['transport'] for made in figures['transfer']} == {'threads', 'peer'}, str(figures['transfer']))
        check('gpu_roofline.png' in done.stderr or 'matplotlib is not installed' in done.stderr, done.stderr[-300:])
        # a device that fails is a sentence and a status, and nothing is kept
        done = subprocess.run([sys.executable, script, *flags, 'roofline'], capture_output=True, text=True, timeout=HANGS,
                              check=False, env={**os.environ, 'FAKE_FAIL': '1s'})
        check(done.returncode == 1 and 'there is no CUDA device to test and measure on (gpu: ' in done.stderr,
              done.stderr)
        done = subprocess.run([sys.executable, script, *flags, 'bread'], capture_output=True, text=True, timeout=HANGS,
                              check=False)
        check(done.returncode == 2 and 'no such stage: bread' in done.stderr, done.stderr)


def main():
    test_examples()
    test_processes()
    test_compare()
    test_methods()
    test_train()
    test_world()
    test_world_failures()
    test_world_compare()
    test_world_alone()
    test_failures()
    if FULL:
        test_bench()
    return end('cuda_programs')


if __name__ == '__main__':
    sys.exit(main())

#!/usr/bin/env python3
"""test_cuda_programs.py FOLDER -- the programs with --device cuda, on the fake device

FOLDER holds them as fake_NAME. What they compute is held against the same programs on the CPU; streams run as late as
they may, in several orders, of which the full run has more, and calls of the libraries fail. Ends with a verdict; the exit
status is zero if all held.
"""

import array
import json
import os
import re
import sys
import tarfile
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'lib'))
from checks import check, equal, load, needed, read, run_command, run_tests, tree, write  # pylint: disable=wrong-import-position
from hybrid import CONFIG, random_tensors  # pylint: disable=wrong-import-position
from latents import MODELS as LATENTS, random_tensors as latent_tensors  # pylint: disable=wrong-import-position
from launch import free_port, run_fake  # pylint: disable=wrong-import-position
from programs import BOOK, METHODS, TOP, npy, packed, write_model  # pylint: disable=wrong-import-position

FOLDER = os.path.abspath(sys.argv[1])
FULL = bool(os.environ.get('UPIPE_FULL'))
SEEDS = (3, 8) if FULL else (8,)  # orders of the streams; 0 is that of the calls
MODEL = ('--layers 2 --model-dim 64 --heads 4 --kv-heads 2 --ff-dim 64 --tokens 64 --ranks 2 --steps 3 --batch 1 '
         '--sample 0 --lr 1e-3 --warmup 0').split()

HANGS = 600  # seconds: ten times and more what the slowest program takes on an idle machine


def run(name, *args, **fake):
    """A program of the fake device; fake: FAKE_SEED and so on."""
    return run_command([os.path.join(FOLDER, 'fake_' + name), *args], HANGS, fake)


def ends(status, words, name, *args, starts='', **fake):
    """With this status and these words in what it says; what it says begins so. The finished program."""
    done = run(name, *args, **fake)
    check(done.returncode == status and words in done.stdout + done.stderr and done.stderr.startswith(starts),
          f'{name} {" ".join(args)} {fake}: {done.returncode} {done.stdout[-500:]}{done.stderr[-500:]}')
    return done


def all_end(status, words, name, hosts, *args, starts='', **more):
    """The same for a process for each letter of hosts, with the words of rank 0. What all of them say."""
    done = run_fake([os.path.join(FOLDER, 'fake_' + name), *args], hosts, **more)
    check([one[0] for one in done] == [status] * len(hosts) and words in done[0][1] and all(one[2].startswith(starts) for one in done),
          f'{name} {hosts} {" ".join(map(str, args))} {more}: {done}')
    return done


def there(name):
    return os.path.exists(os.path.join(FOLDER, 'fake_' + name))


def numbers(name, *args, **fake):
    """What a program writes to --json; the test ends if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, 'numbers.json')
        done = run(name, *args, '--json', out, **fake)
        needed(done.returncode == 0, f'{name} {" ".join(args)} {fake}: {done.returncode}: {done.stderr[-500:]}')
        return load(out)


def test_examples(_):
    ends(0, 'token 0 looks at 0', '09_cuda')
    # processes over NCCL
    alone = {'RANK': '0', 'WORLD_SIZE': '1', 'LOCAL_RANK': '0', 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(free_port())}
    done = ends(0, 'over nccl', '08_nccl', **alone)
    check('the same bits as' in done.stdout, f'08_nccl: {done.stdout}')
    for hosts in 'aa', 'aba':
        said = all_end(0, f'{len(hosts)} processes over nccl', '08_nccl', hosts, FAKE_SEED=3)[0][1]
        check('as those of one' in said, f'08_nccl {hosts}: {said}')
    done = run_command(['sh', '-c', 'exec "$0" >&-', os.path.join(FOLDER, 'fake_08_nccl')], HANGS, alone)
    check(done.returncode == 1 and 'the result cannot be written' in done.stderr, f'08_nccl, no stdout: {done.returncode} {done.stderr}')
    for k in 3, 10, 30, 45, 100, 160:
        ends(1, '', '08_nccl', starts='08_nccl: ', **alone, FAKE_FAIL=str(k))
    for words, launched, sentence in (['--nonsense'], alone, 'usage'), ([], {'WORLD_SIZE': '2'}, 'RANK is not set'):
        ends(2, sentence, '08_nccl', *words, **launched)


def test_compare(_):
    flags = '--tokens 64 --heads 4 --kv-heads 2 --head-dim 32 --ranks 2 --check on --device'.split()
    for dtype in 'bf16', 'f32':
        for seed in 0, 5:
            got = numbers('compare', *flags, 'cuda', '--dtype', dtype, FAKE_SEED=seed, SIMT_SEED=seed)
            want = numbers('compare', *flags, 'cpu', '--dtype', dtype)
            check(got['config']['device'] == 'cuda' and got['config']['products'] == 'cublas', str(got['config']))
            for a, b in zip(got['methods'], want['methods']):
                check(a['peak_bytes'] == a['plan_bytes'], f'{a["name"]}: {a["peak_bytes"]} is not {a["plan_bytes"]}')
                check(a['err_dx'] <= 2 * b['err_dx'] + 1e-6, f'{dtype}: dx {a["err_dx"]} beside {b["err_dx"]}')
    for name, words in ('compare', [*flags, 'cuda']), ('09_cuda', []): # compiled for other devices
        done = run(name, *words, FAKE_NO_CODE=1)
        check(done.returncode == 1 and 'this program has no code for device 0, of compute capability 8.0' in done.stderr,
              f'{name} without code: {done.returncode} {done.stderr}')
    ends(2, 'is cpu or cuda', 'compare', '--device', 'tpu')


def test_avoid(_):
    """Where kernels for 9.0 are avoided, numbers are those of 8.0, and a call says why."""
    flags = '--tokens 600 --heads 2 --head-dim 64 --ranks 2 --method upipe --check on --dtype bf16 --device cuda --avoid'.split()
    errors = {}
    for capability, avoid in (80, 'none'), (90, 'none'), (90, 'fwd90'), (90, 'bwd90'), (90, 'both'):
        got = numbers('compare', *flags, avoid, FAKE_CAPABILITY=capability)['methods'][0]
        errors[capability, avoid] = got['err_out'], got['err_dx']
    check(errors[90, 'both'] == errors[80, 'none'] != errors[90, 'none'], str(errors))
    check(errors[90, 'fwd90'][0] == errors[80, 'none'][0] and errors[90, 'bwd90'][0] == errors[90, 'none'][0], str(errors))
    check(len({dx for _, dx in errors.values()}) == 4, str(errors))
    ends(2, '--avoid would have no effect with --device cpu', 'compare', '--avoid', 'both')
    avoids = 'kernels for 8.0, as the host avoids those for 9.0'
    for avoid in 'none', 'fwd90', 'both':
        done = ends(0, '', 'gpu', *'attention --tokens 64 --head-dim 64 --heads 1 --avoid'.split(), avoid, FAKE_CAPABILITY=90)
        ours, older = json.loads(done.stdout)['kernels']
        seen = [avoids in ours[name + '_chosen'] for name in ('fwd', 'bwd')]
        check(seen == [avoid in ('fwd90', 'both'), avoid == 'both'], f'{avoid}: {ours}')
        check(all(avoids in older[name + '_chosen'] for name in ('fwd', 'bwd')), str(older))
    whole = json.loads(ends(0, '', 'gpu', *'attention --tokens 64 --head-dim 192 --v-dim 128 --heads 1 --full'.split(),
                            FAKE_CAPABILITY=90).stdout)
    check(whole['fwd_flop'] == 2 * 64**2 * (192 + 128) and whole['bwd_flop'] == 2 * 64**2 * (3 * 192 + 2 * 128), str(whole))
    check([len(kernel['checked']) for kernel in whole['kernels']] == [5, 5], str(whole))
    ends(2, '--v-dim would have no effect with rows', 'gpu', 'rows', '--v-dim', '128')
    if there('train'):
        step = [*MODEL, '--model-dim', '128', '--heads', '2', '--tokens', '300', '--steps', '1', '--dtype', 'bf16', '--device', 'cuda', '--avoid']
        losses = [numbers('train', *step, avoid, FAKE_CAPABILITY=capability)['loss']
                  for capability, avoid in ((80, 'none'), (90, 'both'), (90, 'none'))]
        check(losses[0] == losses[1] != losses[2], str(losses))
        ends(2, '--avoid would have no effect with --device cpu', 'train', *MODEL, '--avoid', 'fwd90')
        ends(2, '--plan trains nothing, so --avoid', 'train', '--plan', '--device', 'cuda', '--avoid', 'fwd90')


def test_probes(_):
    """Each probe in a process of its own, by its name."""
    probe = os.path.join(FOLDER, 'test_cuda_probe')
    names = run_command([probe, '--list'], HANGS).stdout.splitlines()
    check(len(names) == 24 and {'relay', 'wgmma 96 2 1'} < set(names), str(names))
    for name in names:
        done = run_command([probe, name], HANGS)
        check(done.returncode == 0 and done.stdout.startswith(f'{name}: as it should be\n'), f'{name}: {done.stdout}{done.stderr}')
    done = run_command([probe, 'relay', 'replay'], HANGS)
    check(done.returncode == 1 and '1 of these names' in done.stderr, f'{done.returncode} {done.stderr}')


def test_share(_):
    """Blocks of a row of logits wait for one another: ranks that could hold all places of a device are refused."""
    if not there('train'):
        return
    flags = [*MODEL, '--tokens', '60', '--heads', '12', '--kv-heads', '12', '--model-dim', '120', '--steps', '0', '--device',
             'cuda', '--ranks']
    # pieces of 8,192 logits; four processors, 12 places
    for vocab, ranks, status in (8192, 6, 0), (16385, 5, 0), (16385, 6, 1):
        said = f'{ranks} ranks share a device; with a vocabulary of {vocab} it takes 5 at most' if status else 'parameters'
        ends(status, said, 'train', *flags, str(ranks), '--vocab', str(vocab))


def test_lazy(_):
    """What a device loads when a kernel is first launched is no memory beyond the slabs."""
    flags = 'block --tokens 64 --ranks 2 --heads 8 --kv-heads 4 --head-dim 32 --model-dim 64'.split()
    for lazy in {}, {'FAKE_LAZY': 1}:
        made = json.loads(ends(0, '', 'gpu', *flags, **lazy).stdout)
        check(made['driver_slabs_bytes'] == 2 * made['slab_bytes'] and made['driver_beyond_slabs_bytes'] == 0, str(made))
        check((made['driver_first_pass_bytes'] > 0) == (lazy != {}), str(made))


def test_methods(_):
    """Every method, with every mask and stages that overlap: compare itself holds bytes to the plan."""
    every = [word for name in METHODS for word in ('--method', name)]
    shape = '--tokens 36 --heads 8 --kv-heads 4 --head-dim 32 --model-dim 48 --check on --rope --dtype bf16'.split()
    masks = '--window 14 --cu-seqlens 9,0,27 --softcap 4 --sinks --v-dim 40'.split()
    for flags in ([*shape, '--overlap'], [*shape, *masks]) if FULL else ([*shape, '--overlap', *masks],):
        got = numbers('compare', *flags, *every, '--device', 'cuda', FAKE_SEED=3)
        want = numbers('compare', *flags, *every, '--device', 'cpu')
        check([m['name'] for m in got['methods']] == METHODS, str(got['config']))
        for a, b in zip(got['methods'], want['methods']):
            for key in 'err_out', 'err_dx', 'err_dw':
                check(a[key] <= 2 * b[key] + 1e-6, f'{flags}: {a["name"]}: {key} {a[key]}, on the CPU {b[key]}')
    # the copies of segments on a stream of their own: the same numbers in the same bytes, in any order of the streams
    segments = [*shape, '--method', 'fpdt', '--method', 'upipe-fpdt', '--device', 'cuda']
    alone = numbers('compare', *segments)
    for seed in (0, 4) if FULL else (4,):
        got = numbers('compare', *segments, '--overlap', FAKE_SEED=seed)
        for a, b in zip(got['methods'], alone['methods']):
            for key in 'err_out', 'err_dx', 'err_dw', 'peak_bytes', 'host_bytes':
                check(a[key] == b[key], f'{a["name"]}, seed {seed}: {key} {a[key]} where copies overlap, not {b[key]}')


def test_train(_):
    if not there('train'):
        print('left out: train, as jansson is missing')
        return
    flags = [*MODEL, '--attention-bias', 'qkvo', '--dtype', 'bf16', '--device']
    want = numbers('train', *flags, 'cpu')
    seen = set()
    for seed in 0, *SEEDS:
        got = numbers('train', *flags, 'cuda', '--offload', FAKE_SEED=seed, SIMT_SEED=seed)
        seen.add(json.dumps([got['loss'], got['grad_norm']]))
        for key in 'loss', 'grad_norm':
            check(all(abs(a - b) < 0.02 * b for a, b in zip(got[key], want[key])), f'{key} {got[key]}, on the CPU {want[key]}')
    check(len(seen) == 1, f'the order of the streams changes what is learnt: {seen}')
    for kept in 'ac', 'sac,grad', 'blocks:2', 'sao:2,grad':
        other = numbers('train', *flags, 'cuda', '--activations', kept, FAKE_SEED=5, SIMT_SEED=5)
        check(other['loss'] == got['loss'], f'losses {other["loss"]} with {kept}, {got["loss"]} with offload')
    away = ['--offload-optimizer', '--zero', '3'] # the CPU's update, of weights here, there, and gathered ahead from there
    there_too = [numbers('train', *flags, 'cuda', '--offload', *away, *more, FAKE_SEED=seed, SIMT_SEED=seed)['loss']
                 for seed, more in enumerate(([], ['--offload-weights'], ['--offload-weights', '--zero-prefetch']))]
    check(all(losses == there_too[0] for losses in there_too), f'losses with the optimizer offloaded: {there_too}')
    check(all(abs(a - b) < 0.02 * b for a, b in zip(there_too[0], got['loss'])), f'{there_too[0]}, {got["loss"]} on the device')
    cut = [numbers('train', *flags, 'cuda', '--method', 'upipe-fpdt', '--segments', '3', '--overlap', '--activations', kept,
                   FAKE_SEED=seed, SIMT_SEED=seed) for seed, kept in enumerate(('offload,grad', 'sac'))]
    check(all(one['loss'] == cut[0]['loss'] for one in cut), f'losses in segments: {cut}')
    # steps in f32, whose sums have another order, with tiles of half a rank's tokens and of all
    wide = ('--layers 1 --model-dim 64 --heads 2 --kv-heads 1 --ff-dim 64 --tokens 256 --ranks 2 --steps 3 --batch 1 --sample 0 '
            '--lr 1e-3 --warmup 0 --dtype f32 --device').split()
    want = numbers('train', *wide, 'cpu')
    for tile in '96KiB', '8MiB':
        got = numbers('train', *wide, 'cuda', '--tile-bytes', tile)
        for key in 'loss', 'grad_norm':
            check(all(abs(a - b) < 1e-3 for a, b in zip(got[key], want[key])), f'{key} {got[key]}, on the CPU {want[key]}')
            check(got['loss'][-1] < got['loss'][0], f'losses {got["loss"]}')
    # weights gathered ahead, on a stream of their own: it waits for the step before, and the computing stream for it
    sharded = [*flags, 'cuda', '--untied', '--zero', '3', '--offload']
    alone = numbers('train', *sharded)
    for seed in SEEDS:
        got = numbers('train', *sharded, '--zero-prefetch', FAKE_SEED=seed, SIMT_SEED=seed)
        for key in 'loss', 'grad_norm':
            check(got[key] == alone[key], f'seed {seed}: {key} {got[key]} with weights ahead, not {alone[key]}')
    with tempfile.TemporaryDirectory() as folder: # a rank that takes the time of each phase
        timed = numbers('train', *sharded, '--zero-prefetch', '--log', os.path.join(folder, 'log'), FAKE_SEED=1, SIMT_SEED=1)
        losses = [json.loads(line)['loss'] for line in read(os.path.join(folder, 'log')).splitlines()]
        check(timed['loss'] == alone['loss'] == losses, f'losses {losses} with --log')
    for k in '150', '700', '1200', '1600s', '2000':
        ends(1, '', 'train', *sharded, '--zero-prefetch', '--deadline', '5', starts='train: rank ', FAKE_FAIL=k)


def test_train_driver(_):
    """What the driver has given out at its most is the slabs of the plan and what each table holds beside them, to the byte."""
    if not there('train'):
        return
    held = (32 + 4) << 20 # cuBLAS's workspace, and the scratch of the kernels
    flags = [*MODEL[:MODEL.index('--steps')], '--dtype', 'bf16', '--device', 'cuda']
    for tables, more in (1, ['--method', 'ulysses']), (1, ['--offload']), (3, ['--overlap', '--zero', '3', '--zero-prefetch']):
        slabs = numbers('train', *flags, *more, '--plan')['all_ranks']['slab_bytes']
        with tempfile.TemporaryDirectory() as folder:
            out = os.path.join(folder, 'numbers.json')
            said = ends(0, 'given out by the driver', 'train', *flags, '--steps', '2', '--sample', '0', *more, '--json', out).stdout
            got = load(out)
        want = slabs + 2 * tables * held
        check((got['driver_peak_bytes'], got['driver_plan_bytes']) == (want, want) and str(want) in said, f'{more}: {got}, not {want}')


def check_loaded(folder, name, config, tensors):
    """A model that is loaded, and packed documents: ranks hold what their plans say, and have the CPU's numbers."""
    model, text, ids, out = (os.path.join(folder, name + part) for part in ('', ' text', ' ids', ' out'))
    lengths = [70, 1, 25, 0, 64, 33] # of two windows, whose second rank begins within a chunk, and a target
    write_model(model, config, tensors)
    packed(text, read(BOOK)[3000:3000 + sum(lengths)], lengths, 1)
    flags = ['--load', model, '--tokens-file', text + '.bin', '--tokens', '96', '--sample', '0', '--lr', '1e-3', '--warmup', '0',
             '--steps', '2', '--device']
    for ranks, more in ('1', ['--activations', 'sac']), ('2', ['--offload', '--zero', '3']):
        want = numbers('train', *flags, 'cpu', '--ranks', ranks, *more)
        got = numbers('train', *flags, 'cuda', '--ranks', ranks, *more, FAKE_SEED=8, SIMT_SEED=8)
        check(got['peak_bytes'] == got['plan_bytes'], f'{name}, {ranks} ranks: {got["peak_bytes"]} bytes, planned are {got["plan_bytes"]}')
        for key in 'loss', 'grad_norm':
            check(all(abs(a - b) < 1e-3 for a, b in zip(got[key], want[key])),
                  f'{name}, {ranks} ranks: {key} {got[key]}, on the CPU {want[key]}')
    one = [*flags, 'cpu', '--ranks', '2', '--dtype', 'bf16', '--steps', '1'] # a step of other roundings leads elsewhere
    want = numbers('train', *one)
    got = numbers('train', *(word if word != 'cpu' else 'cuda' for word in one), FAKE_SEED=8, SIMT_SEED=8)
    for key in 'loss', 'grad_norm':
        check(abs(got[key][0] - want[key][0]) < 0.02 * want[key][0], f'{name}, bf16: {key} {got[key]}, on the CPU {want[key]}')
    write(ids, npy(read(BOOK)[3000:3096]))
    logits = {}
    for device in 'cpu', 'cuda':
        ends(0, '', 'logits', '--load', model, '--ids', ids, '--out', out, '--ranks', '2', '--device', device)
        logits[device] = array.array('f', read(out)[128:])
    off = max(abs(a - b) for a, b in zip(logits['cpu'], logits['cuda']))
    check(off <= 1e-4 * max(map(abs, logits['cpu'])), f'{name}: logits are off by {off}')


def test_linear(folder):
    if there('train'):
        config = {**CONFIG, 'num_hidden_layers': 2, 'full_attention_interval': 2}
        check_loaded(folder, 'linear', config, random_tensors(config))


def test_latents(folder):
    for name, config in LATENTS.items() if there('train') else ():
        check_loaded(folder, name, config, latent_tensors(config))


def test_world(_):
    """The trainer's ranks over NCCL, a process and a device each: the numbers of ranks that are threads over the memory of one."""
    if not there('train'):
        return
    small = [*MODEL[:MODEL.index('--ranks')], '--device', 'cuda', '--dtype', 'bf16', '--steps', '2', '--sample', '0']
    for hosts, seed, flags in (('aa', 3, ['--overlap', '--zero', '3', '--zero-prefetch']),
                               ('abab', 0, ['--method', 'usp', '--ring', '2'])):
        want = numbers('train', *small, *flags, '--ranks', str(len(hosts)))
        with tempfile.TemporaryDirectory() as folder:
            out = os.path.join(folder, 'numbers.json')
            all_end(0, '', 'train', hosts, *small, *flags, '--transport', 'nccl', '--json', out, FAKE_SEED=seed)
            got = load(out)
        check((want['config'].pop('transport'), got['config'].pop('transport')) == ('threads', 'nccl'),
              f'transports of {flags}')
        del want['config']['json'], got['config']['json'] # where they are written
        own = 'tokens_per_s', 'driver_peak_bytes', 'driver_plan_bytes' # a process's
        unlike = [name for name in want if name not in own and want[name] != got.get(name)]
        check(not unlike, f'{hosts} {flags}: other {unlike} over NCCL')


def test_world_failures(_):
    """What fails while the ranks meet is said, and leaves nothing on the devices (a process has status 3 otherwise)."""
    if not there('train'):
        return
    flags = [*MODEL[:MODEL.index('--ranks')], '--device', 'cuda', '--transport', 'nccl', '--steps', '1', '--sample', '0',
             '--deadline', '0.5']
    for rank, k in enumerate((2, 3, 4, 6, 20, 45, 75)):
        all_end(1, '', 'train', 'ab', *flags, starts='train: ', own={rank % 2: {'FAKE_FAIL': k}})


def results(folder):
    """What lies below it, without the rows of --json that two runs have apart."""
    apart = rb'"(seconds_\w+|transport|ts)": ?[^,}]+'
    return {path: data and re.sub(apart, b'', data) for path, data in tree(folder).items()}


def test_world_compare(_):
    """Methods of several shapes, and the logits of a checkpoint, over NCCL as with ranks that are threads: all files alike."""
    if not there('logits'):
        return
    small = ('--heads 4 --kv-heads 2 --head-dim 32 --tokens 60 --segments 2 --check off --device cuda --dtype bf16 --json numbers '
             '--trace traces --dump dump --method upipe --method usp --method ring --method fpdt').split()
    there_too = ['--transport', 'nccl']
    with tempfile.TemporaryDirectory() as folder:
        model, ids = os.path.join(folder, 'model'), os.path.join(folder, 'ids')
        ends(0, '', 'train', *MODEL, '--save', model)
        write(ids, npy([7 * i % 256 for i in range(33)]))
        loaded = ['--load', model, '--ids', ids, '--out', 'logits', '--device', 'cuda']
        for what, hosts, flags in (('compare', 'abab', small), ('logits', 'aa', loaded), ('logits', 'aba', [*loaded, '--method', 'zigzag'])):
            got = []
            for how in 'threads', 'processes':
                at = os.path.join(folder, f'{what}-{hosts}-{how}')
                os.mkdir(at)
                if how == 'threads':
                    done = run_command([os.path.join(FOLDER, 'fake_' + what), *flags, '--ranks', str(len(hosts))], HANGS, cwd=at)
                    check(done.returncode == 0, f'{what} {hosts}: {done.returncode}: {done.stderr}')
                else:
                    all_end(0, '', what, hosts, *flags, *there_too, cwd=at, FAKE_SEED=3)
                got.append(results(at))
            unlike = [name for name in got[0] if got[0][name] != got[1].get(name)]
            check(got[0] and got[0].keys() == got[1].keys() and not unlike, f'{what} {hosts}: other {unlike} over NCCL')


def test_world_alone(_):
    """What a process says that is alone, or should not be."""
    if not there('train'):
        return
    flags = [*MODEL[:MODEL.index('--ranks')], '--device', 'cuda', '--transport', 'nccl', '--steps', '1', '--sample', '0',
             '--deadline', '0.5']
    number = free_port()
    port = {'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': number}
    for words, status, sentence, launched in (
            (flags, 0, '', {}),
            ([word if word != 'cuda' else 'cpu' for word in flags], 2, 'needs --device cuda', {}),
            ([*flags, '--ranks', '2'], 2, 'the launcher has started 1 processes', {}),
            (flags, 1, f'1 of 2 ranks have come to 127.0.0.1 port {number} within 0.5 s', {'RANK': 0, 'WORLD_SIZE': 2}),
            (flags, 1, 'rank 1 has not met rank 0', {'RANK': 1, 'WORLD_SIZE': 2}),
            (flags, 1, 'WORLD_SIZE is 2, but RANK is not set', {'WORLD_SIZE': 2}),
            (flags, 1, 'process 16 of this machine, which has 16 devices', {'LOCAL_RANK': 16}),
            (flags[:-4] + ['--deadline', '5'], 1, 'train: ', {'FAKE_FAIL': 400})):
        ends(status, sentence, 'train', *words, **port, **launched)


def test_failures(_):
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


# The program where our kernels for 9.0 are broken, if a flag is SICK: the device is lost to all that run in one process.
SICK = '''#!/bin/sh
[ -z "$LOG" ] || echo "$*" >>"$LOG"
case "$* " in
*" $SICK "*"upipe_80 "*) ;;
*" $SICK "*) FAKE_FAIL=60s; export FAKE_FAIL ;;
esac
exec "$PROGRAM" "$@"
'''


# The programs of a pack, as they are built for the fake.
PACKED = {**{name: f'fake_{name}' for name in ('gpu', 'train', 'compare', '08_nccl', '09_cuda')},
          **{name: f'test_cuda_{name}' for name in ('maps', 'probe', 'watchdog')},
          'verdict': 'verdict', 'test_cuda_graph': 'test_cuda_graph'}


def test_brief(folder):
    """The fifteen minutes of a device, over the fake: everything comes back in two files."""
    os.makedirs(os.path.join(folder, 'programs'))
    for name, built in PACKED.items():
        os.symlink(os.path.join(FOLDER, built), os.path.join(folder, 'programs', name))
    brief = [sys.executable, os.path.join(TOP, 'bench', 'gpu.py'), '--brief', '--quick', '--program',
             os.path.join(folder, 'programs', 'gpu'), '--results', os.path.join(folder, 'back')]
    done = run_command(brief, HANGS, {'FAKE_CAPABILITY': '90'})
    lines = done.stderr.splitlines() + done.stdout.splitlines()
    check(done.returncode == 0, f'--brief: {done.returncode}: {done.stderr[-1500:]}')
    equal(sorted(os.listdir(os.path.join(folder, 'back'))), ['gpu.tar.xz', 'table.md'], 'what comes back')
    check(len(lines) <= 100 and lines[-1].startswith('in all ') and '| upipe |' in done.stdout, done.stdout)
    with tarfile.open(os.path.join(folder, 'back', 'gpu.tar.xz')) as archive:
        names = archive.getnames()
    stages = ('verdict', 'roofline', 'attention', 'block', 'train', 'long', 'masks', 'rows', 'transfer')
    check({f'gpu_{stage}.json' for stage in stages} <= set(names), str(names))


def test_bench(_):
    """bench/gpu.py in small, over the fake device: every figure is there, and what has no device says so."""
    script = os.path.join(TOP, 'bench', 'gpu.py')
    stages = ['roofline', 'attention', 'block', 'masks', 'transfer']
    with tempfile.TemporaryDirectory() as folder:
        flags = ['--quick', '--program', os.path.join(FOLDER, 'fake_gpu'), '--results', folder]
        stage = [word for name in (*stages, 'chart') for word in ('--stage', name)]
        done = run_command([sys.executable, script, *flags, *stage], HANGS)
        needed(done.returncode == 0, f'gpu.py: {done.returncode}: {done.stderr[-800:]}')
        figures = {}
        for stage in stages:
            made = load(os.path.join(folder, f'gpu_{stage}.json'))
            check(made['device']['name'] == 'fake' and made['stage'] == stage, str(made['device']))
            figures[stage] = made['figures']
        counts = [len(figures[stage]) for stage in stages]
        check(counts == [1, 12, 3, 4, 1], f'{stages} have {counts} figures')
        for made in figures['attention'] + figures['masks']:
            for kernel in made['kernels']:
                check(set(kernel['checked']) == {'o', 'lse', 'dq', 'dk', 'dv'}, str(kernel))
            d, v_dim = made['head_dim'], made['v_dim']
            check(made['kernels'][0]['name'] == 'upipe' and made['bwd_flop'] * (d + v_dim) == made['fwd_flop'] * (3 * d + 2 * v_dim), str(made))
        check([made['v_dim'] for made in figures['masks']] == [64, 64, 64, 128], str(figures['masks']))
        full, window, packed, _ = (made['fwd_flop'] for made in figures['masks'])
        check(window < full and packed < full, f'flops of masks: {full}, {window}, {packed}')
        for made in figures['block']:
            check(made['plan_bytes'] == made['peak_bytes'], str(made))
            check(made['driver_beyond_slabs_bytes'] == 0, f'memory beyond the slabs: {made}')
        check('gpu_attention.png' in done.stderr or 'matplotlib is not installed' in done.stderr, done.stderr[-300:])
        # a device that fails is a sentence and a status, and nothing is kept
        done = run_command([sys.executable, script, *flags, '--stage', 'roofline'], HANGS, {'FAKE_FAIL': '1s'})
        check(done.returncode == 1 and 'there is no CUDA device to test and measure on (gpu: ' in done.stderr,
              done.stderr)
        done = run_command([sys.executable, script, *flags, '--stage', 'bread'], HANGS)
        check(done.returncode == 2 and "invalid choice: 'bread'" in done.stderr, done.stderr)
        # a contestant that fails is named, and hides no other; the next run measures what is missing alone
        program = os.path.join(folder, 'gpu')
        write(program, SICK)
        os.chmod(program, 0o755)
        masks = [sys.executable, script, '--quick', '--results', folder, '--stage', 'masks', '--program', program]
        os.remove(os.path.join(folder, 'gpu_masks.json'))
        sick = {'PROGRAM': os.path.join(FOLDER, 'fake_gpu'), 'FAKE_CAPABILITY': '90'}
        done = run_command(masks, HANGS, {**sick, 'SICK': '--window'})
        made = load(os.path.join(folder, 'gpu_masks.failed.json'))['figures']
        check(done.returncode == 1 and 'upipe of gpu attention --tokens 128' in done.stderr, done.stderr[-500:])
        ends = [[(kernel['name'], 'failed' in kernel) for kernel in one['kernels']] for one in made]
        check(ends == [[('upipe', i == 1), ('upipe_80', False)] for i in range(4)], str(made))
        done = run_command([*masks, '--resume'], HANGS, {**sick, 'SICK': 'nothing', 'LOG': os.path.join(folder, 'ran')})
        ran = read(os.path.join(folder, 'ran')).decode().splitlines()
        check(done.returncode == 0 and [' --window ' in line for line in ran if line.startswith('attention')] == [True],
              f'resumed: {done.returncode}: {done.stderr[-500:]}')
        check(not os.path.exists(os.path.join(folder, 'gpu_masks.failed.json')), 'a figure failed')


if __name__ == '__main__':
    sys.exit(run_tests('cuda_programs', test_examples, test_compare, test_avoid, test_probes, test_share, test_lazy,
                       test_methods, test_train, test_train_driver, test_linear, test_latents, test_world, test_world_failures,
                       test_world_compare, test_world_alone, test_failures, *([test_bench, test_brief] if FULL else [])))

#!/usr/bin/env python3
"""test_gpu_stages.py TOP -- bench/gpu.py's fifteen minutes of a device, over a virtual clock and a device that is made up

No program runs: each command of gpu.py takes as long as it is thought to take on an H100, and ends as the device of the
case makes it end: everything good; a kernel that hangs, is wrong, or leaves a fault that takes its process down; one that
hangs after the verdict has found it right; a device that is lost. What is printed, written, left out, and when it ends.
"""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from unittest import mock

TOP = os.path.abspath(sys.argv[1])
sys.path[:0] = [os.path.join(TOP, 'tests', 'lib'), os.path.join(TOP, 'bench')]
# pylint: disable=wrong-import-position
from checks import check, equal, read, run_command, run_tests, write
import gpu
import gpu_build
import gpu_run

DIMS = (128, 64, 256, 96, 192)
MASKS = {'fwd': ('full', 'causal', 'grouped', 'packed', 'items', 'merge'), 'bwd': ('full', 'causal', 'grouped', 'packed')}
CASES = [f'{way}{kernel} {dim} {mask}' for kernel in (80, 32, 90) for dim in DIMS for way in MASKS for mask in MASKS[way]]
ASKED = 5 * (10 + 4)  # in a brief run: all of 9.0, one mask of the others
PROBES = [f'wgmma {n} {a} {b}' for n in (64, 96, 128, 256) for a in (0, 1, 2) for b in (0, 1)]
START = 1.2  # seconds until a process has its context
RATES = {'upipe': 500e12, 'upipe_80': 250e12, 'cudnn': 550e12, 'cudnn_deterministic': 450e12}
PROGRAMS = [
    'gpu',
    'gpu_cudnn',
    'maps',
    'probe',
    'watchdog',
    'verdict',
    'verdict_serial',
    'train',
    'compare',
    '09_cuda',
    '08_nccl',
     '03_plug_cudnn']


class Device:
    """Answers commands as an H100 with these faults would, and moves the clock."""

    def __init__(self, wrong=(), hangs=(), hidden_hang=None, sticky=None, lost_after=None):
        self.wrong, self.hangs = set(wrong), set(hangs)  # kernel and head dim, as the verdict finds them
        # (head dim, tokens): the kernel hangs there, and the verdict's small shapes are right
        self.hidden_hang = hidden_hang
        self.sticky = sticky  # head dim at which our kernel ends its process
        self.lost_after = lost_after  # seconds after which nothing answers
        self.now, self.width, self.commands = 0.0, 1, []

    def launch(self, command, seconds=None, _env=None, _stdin=''):
        name, words = os.path.basename(command[0]), command[1:]
        lost = self.lost_after is not None and self.now > self.lost_after
        took, status, out, err = (60, None, '', '') if lost else self.answer(name, words)
        limit = float('inf') if seconds is None else seconds
        if took >= limit or status is None:
            took, status = limit, None
        check(took < float('inf'), f'{command} has no limit')
        self.commands.append((name, words, status))
        self.now += took / self.width
        return gpu_run.Done(status, out if status is not None else '', err, took)

    def answer(self, name, words):
        """Seconds, exit status (None: it hangs), stdout, stderr."""
        if name in ('verdict', 'verdict_serial'):
            return self.verdict(name, words)
        if name in ('gpu', 'gpu_cudnn'):
            return self.gpu(words)
        if name == 'probe':
            return START, 0, '\n'.join(PROBES) if words == ['--list'] else f'{" ".join(words)}: as it should be', ''
        if name == 'train':
            at = words.index('--json') if '--json' in words else None
            if at is not None:
                write(words[at + 1], json.dumps({
                    'config': {'method': words[words.index('--method') + 1]}, 'tokens_per_s': 9000, 'plan_bytes': 12 << 30,
                    'peak_bytes': 12 << 30, 'driver_plan_bytes': 24 << 30, 'driver_peak_bytes': 25 << 30,
                    'memory': {'at_peak': {'weights': 2 << 30, 'gradients': 4 << 30, 'optimizer': 4 << 30}}}))
            return 25, 0, '', ''
        return (30 if name.startswith('test_') else 4), 0, '', ''

    def verdict(self, name, words):
        if words == ['--list']:
            return START, 0, '\n'.join(CASES), ''
        case, kernel = ' '.join(words[:3]), ' '.join(words[:2])
        hangs, wrong = kernel in self.hangs, kernel in self.wrong and name == 'verdict'
        if hangs or wrong:
            write(words[words.index('--evidence') + 1], 'barriers')
        end = ': HANGS: Q full waits' if hangs else ': WRONG o 12 of 9000, row 3' if wrong else ': right'
        return START + 3 * hangs, 3 if hangs else 1 if wrong else 0, case + end, ''

    def gpu(self, words):
        def value(flag, default=0):
            return int(words[words.index(flag) + 1]) if flag in words else default
        if words[0] == 'device':
            return START, 0, json.dumps({'name': 'H100', 'processors': 132, 'memory_bytes': 80 << 30}), ''
        if words[0] == 'attention':
            return self.attention(words, value)
        numbers = {'tokens': value('--tokens'), 'ranks': value('--ranks')}
        if words[0] == 'block':
            numbers.update(method='ulysses' if value('--chunk') == 32 else 'upipe', overlap='--overlap' in words,
                           fwd_seconds=0.08, bwd_seconds=0.25, plan_bytes=1 << 30,
                           peak_bytes=1 << 30, driver_beyond_slabs_bytes=0)
            return 6, None if self.hangs and '--avoid' not in words else 0, json.dumps(numbers), ''
        if words[0] == 'roofline':
            return 3, 0, json.dumps({'copy_bytes_per_s': 3e12, 'product_flop_per_s': 7.9e14}), ''
        if words[0] == 'rows':
            return 4, 0, json.dumps({'ops': [{'name': 'rope', 'bytes': 1 << 28, 'bytes_per_s': 2.5e12}]}), ''
        return 3, 0, json.dumps({**numbers, 'bytes_per_s': 2e12}), ''

    def attention(self, words, value):
        tokens, dim, heads, full = value('--tokens'), value('--head-dim'), value('--heads'), '--full' in words
        flop = 4.0 * tokens ** 2 * heads * dim / (1 if full else 2)
        asked = [words[words.index('--kernels') + 1]] if '--kernels' in words else list(RATES)
        avoid = words[words.index('--avoid') + 1] if '--avoid' in words else ''
        kernels, seconds, fault = [], START, False
        for name in asked:
            ours = name == 'upipe' and not avoid
            if ours and (f'fwd90 {dim}' in self.hangs or self.hidden_hang == (dim, tokens)):
                return seconds, None, '', ''
            fault = fault or (ours and self.sticky == dim)
            seconds += 4.0 * tokens / 2 ** 20 + 4 * 3.5 * flop / RATES[name]
            kernels.append({'name': name, 'failed': 'an illegal address'} if fault else
                           {'name': name, 'fwd_flop_per_s': RATES[name], 'bwd_flop_per_s': RATES[name]})
        return seconds, 0, json.dumps({'tokens': tokens, 'heads': heads, 'kv_heads': value('--kv-heads', heads),
                                       'head_dim': dim, 'v_dim': value('--v-dim', dim), 'causal': not full,
                                       'window': value('--window'), 'cu_seqlens': value('--cu-seqlens'),
                                       'margin': value('--margin'),
                                       'fwd_flop': flop, 'bwd_flop': 2.5 * flop, 'kernels': kernels}), ''


class Peers:
    """PyTorch, which takes two seconds a shape."""

    def __init__(self, run):
        self.run, self.device = run, Peers.device

    def ask(self, _question):
        self.device.now += 2
        return [{'name': 'sdpa_cudnn', 'fwd_flop_per_s': 540e12, 'bwd_flop_per_s': 440e12, 'copy_bytes_per_s': 3e12,
                 'product_flop_per_s': 7.9e14}]

    def close(self):
        pass


def go(device, *flags):
    """Runs gpu.py --brief on the device: exit status, lines of output, what the bundle holds, the table."""
    def side_by_side(_self, work, items, width):
        device.width = width
        made = [work(item) for item in items]
        device.width = 1
        return made

    Peers.device = device
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as patches:
        for name in PROGRAMS + [gpu_build.stem(name) for name in gpu_build.device_tests()[1]]:
            write(os.path.join(folder, name), '')
        results = os.path.join(folder, 'results')
        output = io.StringIO()
        for patch in (mock.patch('time.monotonic', lambda: device.now),
                      mock.patch.object(gpu_run, 'launch', device.launch),
                      mock.patch.object(gpu_run.Run, 'side_by_side', side_by_side),
                      mock.patch.object(gpu, 'Peers', Peers),
                      mock.patch.object(gpu_run.Run, 'ask_driver', lambda _self, _what: '580, 1980 MHz, 700 W'),
                      mock.patch.object(os, 'access', lambda _path, _mode: True),
                      mock.patch.object(sys, 'argv', ['gpu.py', '--brief', '--program', os.path.join(folder, 'gpu'),
                                                      '--results', results, *flags]),
                      contextlib.redirect_stdout(output), contextlib.redirect_stderr(output)):
            patches.enter_context(patch)
        status = gpu.main()
        second = '_second' if '--second' in flags else ''
        with tarfile.open(os.path.join(results, f'gpu{second}.tar.xz')) as archive:
            held = {entry.name: archive.extractfile(entry).read() for entry in archive if entry.isfile()}
        table = read(os.path.join(results, f'table{second}.md')).decode()
        equal(sorted(os.listdir(results)), [f'gpu{second}.tar.xz', f'table{second}.md'], 'what comes back')
    return status, output.getvalue().splitlines(), held, table


def bounds(device, lines, limit):
    check(device.now <= limit, f'it took {device.now:.0f} s, more than {limit}')
    check(len(lines) <= 100, f'{len(lines)} lines of output')
    check(lines[-1].startswith('in all '), f'the last line is {lines[-1]}')


def figures(held, stage):
    name = next((name for name in (f'gpu_{stage}.json', f'gpu_{stage}.failed.json') if name in held), None)
    return json.loads(held[name])['figures'] if name else []


def test_good(_):
    device = Device()
    status, lines, held, table = go(device)
    bounds(device, lines, gpu.BRIEF)
    equal(status, 0, '\n'.join(lines) + '\nthe status')
    for stage in ('roofline', 'attention', 'block', 'train', 'long', 'masks', 'rows', 'transfer'):
        check(f'gpu_{stage}.json' in held, f'{stage} left no figures: {sorted(held)}')
    ran = {name for name, _, _ in device.commands}
    check({'maps', 'watchdog', 'test_cuda_graph', '08_nccl'} <= ran, f'left out: {ran}')
    check(not any('--avoid' in words for _, words, _ in device.commands), 'a kernel that is right was left out')
    for word in ('d 128, causal, 16k × 16', 'd 128, causal, 1M × 1', '| upipe, overlapped |', 'sdpa_cudnn', '| rope |',
                 '| upipe | 9000 | 2048 | 12288 | 12288 | 24576 | 25600 |', f'{ASKED} of {ASKED} kernels'):
        check(word in table, f'the table has no {word}:\n{table}')
    check(lines[-1 - len(table.strip().splitlines()):-1] == table.strip().splitlines(), 'the table is not last')


def test_hang(_):
    device = Device(hangs={'fwd90 128'})
    status, lines, held, table = go(device)
    bounds(device, lines, gpu.BRIEF)
    equal(status, 1, 'the status')
    check(sum('fwd90 128' in line and 'HANGS: Q full waits' in line for line in lines) >= 6, 'no line for each mask')
    check('evidence/verdict_fwd90_128_causal' in held, f'no evidence: {sorted(held)}')
    check('head dim 128: fwd90 left out' in table, table)
    started = [words for name, words, _ in device.commands
               if name.startswith('gpu') and words[0] == 'attention' and words[words.index('--head-dim') + 1] == '128']
    check(started and all('--avoid' in words and 'fwd90' in words for words in started), f'it was started: {started}')
    others = [words for name, words, _ in device.commands
              if name.startswith('gpu') and words[0] == 'attention' and words[words.index('--head-dim') + 1] != '128']
    check(others and not any('--avoid' in words for words in others), f'a kernel that is right was left out: {others}')
    for stage in ('attention', 'block', 'train', 'long', 'masks'):
        check(f'gpu_{stage}.json' in held, f'{stage} left no figures: {sorted(held)}')


def test_wrong(_):
    device = Device(wrong={'bwd90 64', 'fwd90 256', 'bwd90 256'})
    status, lines, held, table = go(device)
    bounds(device, lines, gpu.BRIEF)
    equal(status, 1, 'the status')
    check('products one by one: bwd90 64 full: right' in lines, 'no verdict with products one by one')
    check('head dim 256: bwd90 fwd90 left out' in table, table)
    avoided = [words[words.index('--avoid') + 1] for _, words, _ in device.commands if '--avoid' in words]
    check({'both', 'bwd90'} == set(avoided), f'left out: {avoided}')
    check('gpu_attention.json' in held, f'no figures: {sorted(held)}')


def test_all_wrong(_):
    """Every kernel for 9.0 hangs: the lines are few, and the figures those of the kernels for 8.0."""
    device = Device(hangs={f'{way}90 {dim}' for way in MASKS for dim in DIMS})
    status, lines, held, table = go(device)
    bounds(device, lines, gpu.BRIEF)
    equal(status, 1, 'the status')
    check('and 38 more, in gpu_verdict.json' in lines and table.count('left out, kernels for 8.0') == 5, '\n'.join(lines[:40]))
    check({'gpu_attention.json', 'gpu_block.json', 'gpu_train.json', 'gpu_rows.json'} <= set(held), f'{sorted(held)}')


def test_sticky(_):
    """A fault that ends our kernel's process: the others run again, each alone, and have figures."""
    device = Device(sticky=64)
    status, lines, held, _ = go(device)
    bounds(device, lines, gpu.BRIEF)
    equal(status, 1, 'the status')
    sick = [figure for figure in figures(held, 'attention') if figure.get('head_dim') == 64]
    good = {kernel['name'] for kernel in sick[0]['kernels'] if 'fwd_flop_per_s' in kernel}
    check(good >= {'upipe_80', 'cudnn'}, f'{good} of {sick}')
    check('gpu_block.json' in held and 'gpu_train.json' in held, f'stages behind it: {sorted(held)}')


def test_late_hang(_):
    """A hang that the verdict's shapes don't show costs its limit once, and the contestant is not asked again there."""
    device = Device(hidden_hang=(128, 16384))
    status, lines, held, _ = go(device)
    bounds(device, lines, gpu.BRIEF)
    equal(status, 1, 'the status')
    made = [figure for figure in figures(held, 'attention') if figure.get('head_dim') == 128]
    failed = [kernel for one in made for kernel in one['kernels'] if kernel['name'] == 'upipe' and 'failed' in kernel]
    check(len(made) == len(failed) >= 3, str(made)[:300])
    check(any('hung before' in str(one) for one in made), 'it was asked again')
    check('gpu_block.json' in held, f'stages behind it: {sorted(held)}')


def test_lost(_):
    device = Device(lost_after=150)
    status, lines, held, _ = go(device)
    bounds(device, lines, gpu.BRIEF)
    equal(status, 1, 'the status')
    check(any('the device does not answer any more' in line for line in lines), '\n'.join(lines[-8:]))
    check(device.now < 300, f'it went on for {device.now - 150:.0f} s')
    check('gpu_roofline.json' in held, f'what came before: {sorted(held)}')
    device = Device(lost_after=-1)
    status, lines, _, _ = go(device)
    check(status == 1 and device.now < 30 and any('there is no CUDA device' in line for line in lines), str(lines))


def test_second(_):
    device = Device(wrong={'fwd90 128'})
    status, lines, held, _ = go(device, '--second')
    bounds(device, lines, gpu.SECOND)
    equal(status, 1, 'the status')
    ran = {name for name, _, _ in device.commands}
    check({'compute-sanitizer', 'ncu', 'test_cuda_attn'} <= ran, f'left out: {ran}')
    check('gpu_repeat.json' in held, f'no figures: {sorted(held)}')
    equal(json.loads(held['gpu_repeat.json'])['command'], 'python3 bench/gpu.py --brief --second', 'the command')


def test_some(_):
    """A brief run of some stages."""
    device = Device()
    status, lines, held, _ = go(device, '--stage', 'rows', '--stage', 'transfer')
    bounds(device, lines, gpu.BRIEF)
    equal(status, 0, 'the status')
    equal({name for name in held if name.startswith('gpu_')}, {'gpu_rows.json', 'gpu_transfer.json'}, 'figures')
    equal(json.loads(held['gpu_rows.json'])['command'], 'python3 bench/gpu.py --brief --stage rows --stage transfer',
          'the command')


def test_chart(folder):
    """A contestant that refuses every shape has no bars, and the others have theirs."""
    device = Device()
    _, _, held, _ = go(device, '--stage', 'roofline', '--stage', 'attention')
    whole = json.loads(held['gpu_attention.json'])
    for figure in whole['figures']:
        figure['kernels'] = [{'name': 'cudnn', 'refused': 'no'} if kernel['name'] == 'cudnn' else kernel
                             for kernel in figure['kernels']]
    write(os.path.join(folder, 'gpu_attention.json'), json.dumps(whole))
    write(os.path.join(folder, 'gpu_roofline.json'), held['gpu_roofline.json'].decode())
    done = run_command([sys.executable, os.path.join(TOP, 'bench', 'gpu.py'), '--stage', 'chart', '--results', folder])
    check(done.returncode == 0 and ('gpu_attention.png' in done.stderr or 'matplotlib is not installed' in done.stderr),
          f'{done.returncode}: {done.stderr[-300:]}')


def test_sessions(_):
    """A command that has no time left ends with all that it has started: a hung process would hold the device."""
    done = gpu_run.launch(['sh', '-c', 'sleep 100 & echo $!; wait'], 0.5)
    equal(done.status, None, 'the status of a command without time')
    check(gone(int(done.out)), 'what it had started runs on')
    done = gpu_run.launch(['sh', '-c', 'cat; echo sick >&2; exit 4'], 30, stdin='given')
    equal((done.status, done.out, done.reason()), (4, 'given', 'sick'), 'a command that fails')


def test_flags(_):
    """Flags that would be read and ignored are refused."""
    for flags, sentence in (('--second', 'goes with --brief'), ('--brief --minutes 3', 'of its own'),
                            ('--brief --stage profile', 'no such stage'), ('--brief --second --stage block', 'no such stage'), ('--pack --quick', 'alone'),
                            ('--pack --brief', 'alone'), ('--pack --results x', 'alone'), ('--stage bread', 'invalid choice'),
                            ('--brief --program nothing', 'no such file')):
        done = run_command([sys.executable, os.path.join(TOP, 'bench', 'gpu.py'), *flags.split()])
        check(done.returncode == 2 and sentence in done.stderr, f'{flags}: {done.returncode}: {done.stderr}')


def gone(number):
    """Whether a process has ended, within seconds."""
    path = f'/proc/{number}/stat'
    for _ in range(100):
        if not os.path.exists(path) or read(path).split()[2] == b'Z':
            return True
        time.sleep(0.05)
    return False


def test_signal(folder):
    """A script that is ended leaves nothing running."""
    path = os.path.join(folder, 'number')
    code = ('import gpu_run, signal, sys; signal.signal(signal.SIGTERM, gpu_run.end_all); '
            'gpu_run.launch(["sh", "-c", "echo $$ >$0.part; mv $0.part $0; sleep 100", sys.argv[1]])')
    with subprocess.Popen([sys.executable, '-c', code, path], cwd=os.path.join(TOP, 'bench')) as script:
        while script.poll() is None and not os.path.exists(path):
            time.sleep(0.05)
        script.terminate()
        equal(script.wait(), 128 + signal.SIGTERM, 'the status of a script that was ended')
    check(gone(int(read(path))), 'what it had started runs on')


def test_pack(folder):
    """A pack comes back whole, and only over the tree that it was made from."""
    made = mock.Mock(links={name: [] for name in PROGRAMS}, kernels={}, serial={})
    options = mock.Mock(results=folder, brief=False, quick=False, objects=None, lines=10)
    build, there = os.path.join(folder, 'gpu'), os.path.join(folder, 'there')
    os.makedirs(build)
    for name in PROGRAMS:
        write(os.path.join(build, name), f'#!/bin/sh\n# {name}')
        os.chmod(os.path.join(build, name), 0o755)
    output = io.StringIO()
    with mock.patch.multiple(gpu_build, PACK=os.path.join(folder, 'pack'),
                             KEPT=os.path.join(folder, 'kept'),
                             build=lambda _run, packing: made, nccl=lambda: '/', jansson=lambda: ['-ljansson'],
                             nvcc=lambda: 'true'), \
            contextlib.redirect_stderr(output):
        run = gpu_run.Run(options, build)
        gpu_build.pack(run)
        run.programs = there
        gpu_build.unpack(run)
        for name in PROGRAMS:
            equal(read(os.path.join(there, name)), read(os.path.join(build, name)), f'{name}, unpacked,')
        check(os.access(os.path.join(there, 'gpu'), os.X_OK), 'it cannot be run')
        manifest = json.loads(read(os.path.join(there, 'manifest.json')))
        check(manifest['commit'] and manifest['programs'] == sorted(PROGRAMS), str(manifest))
        write(os.path.join(folder, 'half'), read(os.path.join(folder, 'pack'))[:200])
        for what, sentence in (({'sources_hash': lambda: 'other'}, 'packed from other sources'),
                               ({'PACK': folder + '/nothing'}, 'there is no '), ({'PACK': folder + '/half'}, 'is no whole pack')):
            with mock.patch.multiple(gpu_build, **what):
                try:
                    gpu_build.unpack(run)
                    check(False, f'accepted: {sentence}')
                except gpu_run.Failed as failure:
                    check(sentence in str(failure), str(failure))
        with mock.patch.multiple(gpu_build, PACK_BYTES=100):
            run.programs = build
            try:
                gpu_build.pack(run)
                check(False, 'a pack that is too large')
            except gpu_run.Failed as failure:
                check('more than' in str(failure), str(failure))


if __name__ == '__main__':
    sys.exit(run_tests('gpu_stages', test_good, test_hang, test_wrong, test_all_wrong, test_sticky, test_late_hang, test_lost, test_second,
                       test_some, test_chart, test_flags, test_sessions, test_signal, test_pack))

#!/usr/bin/env python3
"""gpu.py [FLAGS] -- on a machine with a CUDA device: builds, tests, measures, and keeps the figures

Stages, in this order; without --stage all but sanitize, profile and repeat, in at most 20 minutes together. Each takes at
most what stands beside it. What failed or had no time is reported, the rest goes on, and the run fails at its end.

  build      240 s  kernels for this device (nvcc) and the programs (cc), into build/gpu; with cuDNN beside ours where its
                    header library is (pip install nvidia-cudnn-frontend, or --cudnn-frontend FOLDER); the machine code for
                    9.0 is checked where cuobjdump and nvdisasm are. A warning of the compiler, or machine code that is
                    not as it should be, is reported and does not end the run
  probe       30 s  every tensor map encoded; each instruction of Hopper in a process of its own
  verdict     60 s  every attention kernel under every mask, a process each. One that is wrong or hangs leaves evidence
                    (tests/cuda/read_verdict.py names the fault), and the kernel for 8.0 takes its place in all stages below
  roofline    30 s  bandwidth of a copy, rate of a bf16 product; PyTorch's beside them
  attention  360 s  forward and backward, head dim 64, 128 and 256, causal and full, 1k to 32k tokens; eight key/value heads
                    of 32: the kernels for this device, those for 8.0, cuDNN with and without a deterministic backward, in
                    turn; and in a process of its own PyTorch's SDPA and the FlashAttention packages, as far as installed
  block      180 s  Llama3-8B's attention block on two and eight ranks: Ulysses, UPipe, UPipe with stages that overlap:
                    seconds, and the driver's count of memory beside the plan
  train      120 s  a training step of four layers of Llama3-8B's shape on two ranks, Ulysses and UPipe: seconds, and the
                    driver's peak beside the plan
  long       150 s  attention of one head, 64k to 1M tokens, as a stage of UPipe has it
  masks       60 s  a sliding window, packed sequences; head dims 96, 192, and 192 with values of 128
  rows        30 s  the kernels that are no attention, beside the bytes that must pass the memory
  transfer    40 s  all-to-all of eight thread ranks on the device
  test       240 s  every test of the CUDA backend that needs no injected errors, and the examples
  sanitize   300 s  compute-sanitizer (memcheck, racecheck) on the verdict of head dim 128, if it is installed
  profile     60 s  ncu on the kernels of head dim 128, if it is installed
  repeat      60 s  1,000 runs of attention have the same bits; attention with 0, 8 and 16 processors left free
  chart       20 s  gpu_attention.png: the rates of `attention`, `long` and `masks` under that of a product (matplotlib)
  table             what the results folder holds, as tables in Markdown on stdout

Figures go to bench/results/gpu_STAGE.json with device, driver, date and command; as long as some are missing, those that
are there are in gpu_STAGE.failed.json instead, and an earlier result stays. What compilers and tests print is kept in
build/gpu/logs. Needs nvcc, a C compiler and Python 3; no Meson. Exit status: 0; 1 if something failed; 2 for wrong usage.

  --stage NAME      this stage alone, with --brief as that has it; may be repeated
  --resume          figures that gpu_STAGE.failed.json has from this device are not measured again
  --minutes N       at most so long in all (20, or without a limit with --stage)
  --quick           a few small cases without limits of time, to see that it works
  --program FILE    measure with this gpu (bench/gpu.c), built elsewhere, and with the other programs of its folder
  --objects FOLDER  link the kernels that Meson has built in this folder, into RESULTS/programs
  --results FOLDER  where figures go

A device for a few minutes, on a machine without a network (docs/benchmarks.md, "A GPU for fifteen minutes"):

  --pack            without a device: builds for 9.0 and puts all programs into one file, build/gpu.tar.xz
  --brief           unpacks that file, then the most telling cases of every stage from probe to test, within 480 s, at most
                    100 lines of output, the table last. RESULTS has table.md and everything else in one file,
                    gpu.tar.xz, after every stage
  --brief --second  verdict, profile, sanitize and repeat, within 240 s: why, not what. RESULTS has table_second.md and
                    gpu_second.tar.xz

Seconds at most with --brief: unpack 20, probe 15, verdict 60, roofline 15, attention 90, block 90, train 100, long 45,
masks 40, rows 15, transfer 15, test 90; with --second: unpack 20, verdict 30, sanitize 70, profile 60, repeat 50.
"""

import argparse
import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
import time

import gpu_build
import gpu_table
import picture
from gpu_run import (BUILD, COMMAND, CONTESTANTS, RUNNING, TOP, Failed, Lost, Run, end_all, keep, kill_session, number)

RESULTS = os.path.join(TOP, 'bench', 'results')
PEERS = os.path.join(TOP, 'bench', 'gpu_peers.py')
KERNEL_DIMS = (64, 96, 128, 192, 256)
BLOCK = ['--heads', '32', '--kv-heads', '8', '--head-dim', '128', '--model-dim', '4096']
METHODS = [['--chunk', '32'], ['--chunk', '8'], ['--chunk', '8', '--overlap']]
VERDICT = 25  # seconds of a kernel and mask that is wrong, whose traces the host makes; one that hangs ends after 3
PEER = 60  # seconds of PyTorch and FlashAttention at a shape
BRIEF, SECOND = 480, 240  # seconds of a run, its table included
TABLE = 8  # of these, for the table and the last bundle
LINES, TABLE_LINES = 40, 60  # of output: before the table, and of it
SHOWN = 12  # kernels and masks that are wrong, a line each
COLORS = {'upipe': '#1f4e9c', 'cudnn': '#76b900', 'cudnn_deterministic': '#b8dc6a', 'sdpa_flash': '#e08b2d',
          'fa3': '#a33ea1', 'upipe_80': '#9bb8e0'}  # of the chart's bars, in this order


def pick(run, whole, brief, quick):
    """What a stage measures in this kind of run."""
    return quick if run.options.quick else brief if run.options.brief else whole


# ---- what a kernel that is wrong changes ----

def avoided(run, dim):
    """The flags by which a command at this head dim leaves out kernels that the verdict has found wrong."""
    kernel = next((kernel for kernel in KERNEL_DIMS if dim <= kernel), KERNEL_DIMS[-1])
    bad = run.avoid.get(kernel, set())
    return ['--avoid', 'both' if len(bad) > 1 else min(bad)] if bad else []


def verdict_case(run, case, program='verdict'):
    """The line of a kernel and mask, and the exit status."""
    evidence = os.path.join(run.results, 'evidence', '_'.join([program, *case]))
    done = run.launch([run.path(program), *case, '--evidence', evidence], VERDICT)
    lines = [line for line in done.out.splitlines() if line.startswith(' '.join(case))]
    if done.status in (0, 1, 3, 4, 77) and lines:
        return lines[-1], done.status
    if done.seconds == 0:
        return f'{" ".join(case)}: no time was left for it', 4
    return f'{" ".join(case)}: {"HANGS" if done.status is None else "FAILED"}: {done.reason()}', done.status or 4


def verdict(run):
    done = run.launch([run.path('verdict'), '--list'], COMMAND)
    cases = [line.split() for line in done.out.splitlines()]
    if done.status != 0 or not cases:
        raise Failed(f'verdict --list: {done.reason()}')
    if run.options.second:
        cases = [case for case in cases if case[1] == '128']
    elif run.options.quick:
        cases = cases[::12]
    elif run.options.brief:  # the tests have the other masks of the kernels that are not in doubt
        cases = [case for case in cases if case[0].endswith('90') or case[2] == 'causal']
    os.makedirs(os.path.join(run.results, 'evidence'), exist_ok=True)
    ends = run.side_by_side(lambda case: verdict_case(run, case), cases, 8)
    lines = [line for line, _ in ends]
    bad = [(case, line) for case, (line, status) in zip(cases, ends) if status not in (0, 77)]
    for number, (case, line) in enumerate(bad):
        (run.report if number < SHOWN else run.log)(line)
        if case[0] in ('fwd90', 'bwd90'):
            run.avoid.setdefault(int(case[1]), set()).add(case[0])
    # the same with every product waiting for the one before: right then, and the products race
    if run.has('verdict_serial'):
        for line, _ in run.side_by_side(lambda case: verdict_case(run, case, 'verdict_serial'),
                                        [case for case, _ in bad if case[0] in ('fwd90', 'bwd90')][:8], 8):
            run.report(f'products one by one: {line}')
            lines.append(f'products one by one: {line}')
    with open(os.path.join(run.results, 'gpu_verdict.json'), 'w', encoding='utf-8') as out:
        json.dump({'cases': len(cases), 'wrong': len(bad), 'lines': lines,
                   'avoid': {str(dim): sorted(kernels) for dim, kernels in run.avoid.items()}}, out, indent=1)
    if len(bad) > SHOWN:
        run.report(f'and {len(bad) - SHOWN} more, in gpu_verdict.json')
    run.report(f'verdict: {len(cases) - len(bad)} of {len(cases)} kernels and masks are right')
    if bad:
        raise Failed('kernels are wrong: their evidence is kept, and those for 8.0 take their places')


# ---- probe, test, sanitize ----

def probe(run):
    names = run.launch([run.path('probe'), '--list'], COMMAND).out.splitlines()
    jobs = [('maps', ['maps'])] + [(f'probe_{name.replace(" ", "_")}', ['probe', name]) for name in names]
    if len(jobs) == 1:
        raise Failed('probe --list says nothing')
    ends = run.side_by_side(lambda job: run.call(job[0], [run.path(job[1][0]), *job[1][1:]], COMMAND), jobs, 8)
    bad = [name for (name, _), status in zip(jobs, ends) if status != 0]
    for name in 'probe_waits', 'maps':
        path = os.path.join(run.logs, f'{name}.log')
        if os.path.exists(path):
            with open(path, encoding='utf-8') as source:
                for line in source.read().splitlines()[:2]:
                    run.report(f'{name}: {line}')
    if bad:
        raise Failed(f'failed: {" ".join(bad)}')
    run.report(f'probe: {len(jobs)} processes passed')


def one_process():
    """What a launcher would tell the only process, with a port that is free."""
    with socket.socket() as here:
        here.bind(('127.0.0.1', 0))
        port = here.getsockname()[1]
    return {'RANK': '0', 'WORLD_SIZE': '1', 'LOCAL_RANK': '0', 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(port)}


def test(run):
    jobs = [([gpu_build.stem(name)], {}) for name in gpu_build.device_tests()[1] if gpu_build.stem(name) != 'verdict']
    jobs += [(['watchdog'], {}), (['09_cuda'], {}), (['08_nccl'], {'env': one_process()}), (['03_plug_cudnn'], {}),
             (['train', '--device', 'cuda', '--ranks', '2', '--tokens', '256', '--steps', '3', '--sample', '0'], {})]
    jobs += [(['compare', '--device', 'cuda', '--dtype', dtype, '--kv-heads', '4', '--check', 'on'], {})
             for dtype in ('f32', 'bf16')]
    if run.options.quick:
        jobs = [job for job in jobs if job[0][0] in ('test_cuda_graph', '09_cuda', '08_nccl')]
    jobs = [job for job in jobs if run.has(job[0][0])]
    if not jobs:
        raise Failed('there are no programs to test; run the stage build first')

    def run_one(job):
        words, more = job
        name = '_'.join(words[:1] + [word for word in words if word in ('f32', 'bf16')])
        return run.call(name, [run.path(words[0]), *words[1:]], 60 if run.options.brief else float('inf'), **more)

    # the host's oracles take most of the time: programs share the device
    ends = list(zip(jobs, run.side_by_side(run_one, jobs, 8)))
    bad = [f'{" ".join(words[:3])} ({"out of time" if status is None else status})' for (words, _), status in ends
           if status != 0]
    if bad:
        raise Failed(f'failed: {"; ".join(bad)}')
    run.report(f'{len(jobs)} programs passed')


def sanitize(run):
    tool = shutil.which('compute-sanitizer') or '/usr/local/cuda/bin/compute-sanitizer'
    if not os.access(tool, os.X_OK):
        return run.report('left out: compute-sanitizer is not installed')
    jobs = [(f'{check}_{kernel}', [tool, '--tool', check, '--error-exitcode', '9', run.path('verdict'), kernel, '128',
                                   'causal'])
            for check in ('memcheck', 'racecheck') for kernel in ('fwd90', 'bwd90')]
    ends = run.side_by_side(lambda job: run.call(*job, 60), jobs, 4)
    bad = [name for (name, _), status in zip(jobs, ends) if status != 0]
    if bad:
        raise Failed(f'failed: {" ".join(bad)}')
    return run.report(f'sanitize: {len(jobs)} runs without a finding')


def profile(run):
    """What bounds the kernels: tensor pipe, stalls, bytes of L2 and memory."""
    tool = shutil.which('ncu') or '/usr/local/cuda/bin/ncu'
    if not os.access(tool, os.X_OK):
        return run.report('left out: ncu is not installed')
    shape = ['attention', '--tokens', '16384', '--head-dim', '128', '--heads', '16', '--kernels', 'upipe', '--full']
    bad = [kernel for kernel in ('fwd90', 'bwd90')
           if run.call(f'ncu_{kernel}', [tool, '--clock-control', 'none', '--kernel-name', f'regex:{kernel}_kernel',
                                         '--launch-count', '1', '--set', 'full', '--page', 'details', run.path('gpu'),
                                         *shape, *avoided(run, 128)], 40) != 0]
    if bad:
        raise Failed(f'failed: ncu on {" ".join(bad)}')
    return run.report('profile: ncu_fwd90.log, ncu_bwd90.log')


def repeat(run):
    if run.call('test_cuda_attn', [run.path('test_cuda_attn')], 60) != 0:
        raise Failed('failed: test_cuda_attn, 1,000 runs')
    shape = pick(run, *[['--tokens', '16384', '--head-dim', '128', '--heads', '16']] * 2,
                 ['--tokens', '128', '--head-dim', '64', '--heads', '2'])
    keep(run, 'repeat', [['attention', *shape, '--kernels', 'upipe', '--margin', margin, *avoided(run, 128)]
                         for margin in ('0', '8', '16')],
         show=lambda figure: show(run, figure))


# ---- figures ----

class Peers:
    """PyTorch and the FlashAttention packages, in a process that is started early, as its imports take seconds."""

    def __init__(self, run):
        self.run, self.lines, self.process, self.ready = run, queue.Queue(), None, False
        if not run.options.quick:
            # pylint: disable=consider-using-with
            self.process = subprocess.Popen([sys.executable, PEERS], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                            stderr=subprocess.DEVNULL, text=True, start_new_session=True)
            RUNNING.add(self.process)
            threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for line in self.process.stdout:
            if line.startswith('{"'):  # PyTorch may have words of its own
                self.lines.put(json.loads(line))
        self.lines.put({'missing': 'PyTorch and FlashAttention beside it ended early'})

    def answers(self, seconds):
        """The figures until the end of an answer; None: there are no more."""
        made, end = [], time.monotonic() + seconds
        while True:
            try:
                figure = self.lines.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                figure = {'missing': f'PyTorch and FlashAttention beside it took more than {seconds:.0f} s'}
            if 'missing' in figure:
                self.run.report(f'left out: {figure["missing"]}')
                self.close()
                return None
            if 'end' in figure:
                return made
            made.append(figure)

    def ask(self, question):
        """The contestants' figures, none where there is no PyTorch for CUDA."""
        seconds = self.run.left(PEER)
        if self.process is None or not seconds:
            return []
        if not self.ready:
            self.ready = self.answers(seconds) is not None
            if not self.ready:
                return []
        try:
            self.process.stdin.write(json.dumps(question) + '\n')
            self.process.stdin.flush()
        except OSError:
            pass  # its end says why
        return self.answers(seconds) or []

    def close(self):
        if self.process is not None:
            kill_session(self.process)
            RUNNING.discard(self.process)
            self.process.wait()
            self.process = None


def roofline(run):
    def measure(run, command):
        return {**number(run, command), 'peers': run.peers.ask({'roofline': True})}

    def show_one(figure):
        if 'copy_bytes_per_s' in figure:
            run.log(f"a copy {figure['copy_bytes_per_s'] / 1e12:.2f} TB/s, "
                    f"a product {figure['product_flop_per_s'] / 1e12:.0f} TFLOP/s")
    keep(run, 'roofline', [['roofline', *(['--tokens', '256'] if run.options.quick else [])]], measure, show_one)


def contest(run, command):
    """The figure of `gpu attention`, PyTorch's contestants with it. Those that failed, all of them if the program did, run
    again, each alone; one that hangs is not asked again at this head dim."""
    program = 'gpu_cudnn' if run.has_cudnn else 'gpu'
    dim = int(command[command.index('--head-dim') + 1])
    shape = [*command, *avoided(run, dim)]
    asked = [command[command.index('--kernels') + 1]] if '--kernels' in command else CONTESTANTS
    words, limit = {'command': 'gpu ' + ' '.join(command)}, attention_seconds(command)
    out = {name: f'{name} hung before at head dim {dim}' for name in asked if (name, dim) in run.hung}
    whole = number(run, shape, program, limit) if not out else {'failed': 'a contestant hung before'}
    kernels = {kernel['name']: kernel for kernel in whole.get('kernels', [])}
    for name in asked if 'failed' in whole else [name for name in kernels if 'failed' in kernels[name]]:
        if name in out:
            kernels[name] = {'name': name, 'failed': out[name]}
            continue
        alone = number(run, shape if asked != CONTESTANTS else [*shape, '--kernels', name], program,
                       min(limit, COMMAND))
        if str(alone.get('failed')).startswith('no result within') and run.left() != 0:
            run.hung.add((name, dim))
        if 'kernels' not in alone:
            kernels[name] = {'name': name, 'failed': alone.get('failed', alone.get('refused'))}
        else:
            whole = {**alone, **whole}
            kernels.update({kernel['name']: kernel for kernel in alone['kernels']})
    if 'fwd_flop' in whole:
        whole.pop('failed', None)
        whole['kernels'] = [kernels[name] for name in CONTESTANTS if name in kernels]
        plain = whole['heads'] == whole['kv_heads'] and not whole['window'] and not whole['cu_seqlens']
        if plain and '--kernels' not in command:
            whole['kernels'] += run.peers.ask({key: whole[key] for key in ('tokens', 'heads', 'head_dim', 'v_dim',
                                                                           'causal', 'fwd_flop', 'bwd_flop')})
    return {**whole, **words}


def attention_seconds(command):
    """What a shape may take: 20 s, the slowest contestant's runs at 200 TFLOP/s, and the host's checks."""
    at = {name: int(command[command.index(name) + 1]) for name in ('--tokens', '--head-dim', '--heads')}
    flop = 2.0 * at['--tokens'] ** 2 * at['--head-dim'] * at['--heads'] * (2 if '--full' in command else 1)
    each = 5 * 3.5 * flop / 200e12 + 5 * at['--tokens'] / 2 ** 20
    return COMMAND + each * (1 if '--kernels' in command else len(CONTESTANTS))


def show(run, figure):
    if 'kernels' in figure:
        run.log(f'{gpu_table.shape_of(figure)}, TFLOP/s forward / backward: '
                + ', '.join(f"{kernel['name']} {gpu_table.rate(kernel)}" for kernel in figure['kernels']))


def shape_of(tokens, dim, heads, *more):
    return ['attention', '--tokens', str(tokens), '--head-dim', str(dim), '--heads', str(heads), *more]


def keep_attention(run, stage, cases):
    keep(run, stage, cases, contest, lambda figure: show(run, figure))


def attention(run):
    lengths = [1024, 2048, 4096, 8192, 16384, 32768]
    # as many tokens of a batch as 16k hold, as heads
    whole = [shape_of(tokens, dim, heads * max(1, 16384 // tokens), *full)
             for dim, heads, some in ((128, 16, lengths), (64, 32, lengths), (256, 8, lengths[-2:-1]))
             for full in ([], ['--full']) for tokens in some]
    whole += [shape_of(tokens, 128, 32, '--kv-heads', '8') for tokens in lengths[-2:]]
    brief = [shape_of(16384, 128, 16), shape_of(16384, 128, 16, '--full'), shape_of(16384, 128, 32, '--kv-heads', '8'),
             shape_of(4096, 128, 64), shape_of(16384, 64, 32), shape_of(16384, 256, 8)]
    quick = [shape_of(tokens, dim, 2, *full) for dim, some in ((128, (64, 128)), (64, (64, 128)), (256, (64,)))
             for full in ([], ['--full']) for tokens in some] + [shape_of(tokens, 128, 4, '--kv-heads', '1')
                                                                 for tokens in (64, 128)]
    keep_attention(run, 'attention', pick(run, whole, brief, quick))


def long(run):
    whole = [shape_of(tokens, 128, 1) for tokens in (65536, 131072, 262144, 1048576)]
    brief = [shape_of(tokens, 128, 1, '--kernels', name) for tokens in (65536, 262144, 1048576)
             for name in ('upipe', 'cudnn') if name != 'cudnn' or run.has_cudnn]
    keep_attention(run, 'long', pick(run, whole, brief, [shape_of(256, 128, 1)]))


def masks(run):
    cases = [(16384, []), (16384, ['--window', '1024']), (32768, ['--window', '1024']), (16384, ['--cu-seqlens', '8']),
             (16384, ['--cu-seqlens', '64'])]
    whole = [shape_of(tokens, 128, 16, *mask) for tokens, mask in cases] + [shape_of(16384, dim, 16)
                                                                            for dim in (96, 192)]
    whole.append(shape_of(16384, 192, 16, '--v-dim', '128'))
    quick = [shape_of(128, 64, 2, *mask) for mask in ([], ['--window', '40'], ['--cu-seqlens', '3'])]
    quick.append(shape_of(128, 192, 2, '--v-dim', '128'))
    keep_attention(run, 'masks', pick(run, whole, [case for case in whole if '32768' not in case], quick))


def rows(run):
    def show_one(one):
        for op in one.get('ops', []):
            run.log(f"{op['name']}: {op['bytes_per_s'] / 1e12:.2f} TB/s")
    shape = pick(run, *[['--tokens', '16384']] * 2, ['--tokens', '64', '--model-dim', '64', '--head-dim', '64'])
    keep(run, 'rows', [['rows', *shape]], show=show_one)


def transfer(run):
    def show_one(one):
        if 'bytes_per_s' in one:
            run.log(f"{one['command']}: {one['bytes_per_s'] / 1e9:.1f} GB/s read and written")

    keep(run, 'transfer', [['transfer', '--tokens', str(tokens), '--head-dim', '128',
                            '--ranks', '2' if run.options.quick else '8']
                           for tokens in pick(run, [16384, 65536, 262144], [262144], [64])], show=show_one)


def block(run):
    def show_one(one):
        if 'fwd_seconds' in one:
            run.log(f"{one['tokens']} tokens, {one['ranks']} ranks, {one['method']}{' overlapped' if one['overlap'] else ''}, "
                    f"{one['fwd_seconds']:.3f} s forward, {one['bwd_seconds']:.3f} s backward, "
                    f"{one['peak_bytes'] / 2**20:.0f} MiB")

    def case(tokens, ranks, method, shape):
        return ['block', '--tokens', str(tokens), '--ranks', str(ranks), *method, *shape, *avoided(run, 128)]

    small = '--heads 4 --kv-heads 2 --head-dim 64 --model-dim 64 --layers 1'.split()
    whole = [case(tokens, ranks, method, BLOCK) for tokens, ranks in ((65536, 8), (131072, 8), (65536, 2))
             for method in METHODS]
    brief = [case(65536, 8, method, BLOCK) for _ in range(2) for method in METHODS]  # in turn: their ratios pair
    brief += [case(131072, 8, method, BLOCK) for method in METHODS[:2]]
    brief += [case(65536, 2, ['--chunk', chunk], BLOCK) for chunk in ('32', '2')]  # most stages
    quick = [case(128, 2, method, small) for method in (['--chunk', '4'], ['--chunk', '2'],
                                                        ['--chunk', '2', '--overlap'])]
    keep(run, 'block', pick(run, whole, brief, quick), show=show_one)


# 4 layers of Llama3-8B's shape from random weights, over the text of examples/data: the paper's headline on one device.
STEP = ['--device', 'cuda', '--ranks', '2', '--dtype', 'bf16', '--sample', '0', '--lr', '1e-4']
STEP_SHAPE = ['--layers', '4', '--model-dim', '4096', '--heads', '32', '--kv-heads', '8', '--head-dim', '128',
              '--ff-dim', '14336',
              '--tokens', '64k', '--steps', '3']
STEP_SMALL = ['--layers', '1', '--model-dim', '64', '--heads', '4', '--kv-heads', '2', '--ff-dim', '64', '--tokens', '64',
              '--batch', '1', '--steps', '2']


def train(run):
    if not run.has('train'):
        return run.report('left out: train, as it is not built')
    cases = [[*STEP, *(STEP_SMALL if run.options.quick else STEP_SHAPE), '--method', method, *avoided(run, 128)]
             for method in ('ulysses', 'upipe')]
    return keep(run, 'train', cases, train_step)


def train_step(run, command):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, 'train.json')
        done = run.launch([run.path('train'), *command, '--json', path], 90)
        words = {'command': 'train ' + ' '.join(command)}
        if done.status != 0 or not os.path.exists(path):
            run.report(f'{words["command"]}: {done.reason()}')
            return {**words, 'failed': done.reason()}
        with open(path, encoding='utf-8') as source:
            made = json.load(source)
        made['config'].pop('json', None)  # a file that is gone
        return {**words, 'train': made}


# ---- chart ----

def chart(run):
    plt, roof = picture.pyplot(), gpu_table.kept(run.results, 'roofline')
    if plt is None:
        return run.report('left out: the chart, as matplotlib is not installed')
    if not roof:
        raise Failed('there is no result of roofline yet')
    shapes = {shape: row for shape, row in gpu_table.shapes(run.results).items() if 'margin' not in shape}
    product = roof['figures'][0]['product_flop_per_s'] / 1e12
    names = [name for name in COLORS if any(name in row for row in shapes.values())]
    figure, panels = plt.subplots(1, 2, figsize=(13, 1.5 + 0.62 * len(shapes)), sharey=True)
    for panel, way, title in zip(panels, ('fwd', 'bwd'), ('forward', 'backward')):
        for i, name in enumerate(names):
            bars = [(at + (i - (len(names) - 1) / 2) * 0.8 / len(names), row[name][f'{way}_flop_per_s'] / 1e12)
                    for at, row in enumerate(shapes.values()) if f'{way}_flop_per_s' in row.get(name, {})]
            if bars:  # a contestant may have refused every shape
                panel.barh(*zip(*bars), height=0.8 / len(names), color=COLORS[name], label=name)
        panel.axvline(product, color='black', linewidth=1, label='a product of 8,192³')
        panel.set_title(f'{title}, TFLOP/s of visible pairs', fontsize=10)
        picture.tidy(panel, 'x')
    panels[0].set_yticks(range(len(shapes)), shapes)
    panels[0].invert_yaxis()
    panels[1].legend(loc='lower right', fontsize=8)
    figure.suptitle(f"Attention in bf16 on {roof['device'].get('name', 'the device')}: tokens × heads")
    figure.tight_layout()
    path = os.path.join(run.results, 'gpu_attention.png')
    return picture.save(figure, path)


def table(run):
    for line in gpu_table.lines(run.results):
        print(line)


# name: what it runs, the seconds it may take in a whole run, in --brief, in --second; None: it is not part of that
STAGES = {
    'build': (gpu_build.build, 240, None, None), 'unpack': (gpu_build.unpack, None, 20, 20),
    'probe': (probe, 30, 15, None),
    'verdict': (verdict, 60, 60, 30), 'roofline': (roofline, 30, 15, None), 'attention': (attention, 360, 90, None),
    'block': (block, 180, 90, None), 'train': (train, 120, 100, None), 'long': (long, 150, 45, None),
    'masks': (masks, 60, 40, None),
    'rows': (rows, 30, 15, None), 'transfer': (transfer, 40, 15, None), 'test': (test, 240, 90, None),
    'sanitize': (sanitize, 300, None, 70), 'profile': (profile, 60, None, 60), 'repeat': (repeat, 60, None, 50),
    'chart': (chart, 20, None, None), 'table': (table, 20, None, None), 'pack': (gpu_build.pack, None, None, None)}
ASKED = ('unpack', 'sanitize', 'profile', 'repeat', 'table')  # run where they are named, or in --brief
HOST = ('build', 'unpack', 'pack', 'chart', 'table')  # need no device


def stages_of(options):
    """Names and seconds of the stages of this call."""
    kind = 3 if options.second else 2 if options.brief else 1
    if options.stage and not options.brief:
        return {name: STAGES[name][1] for name in STAGES if name in options.stage}
    chosen = {name: about[kind] for name, about in STAGES.items() if about[kind] is not None
              and not (kind == 1 and name in ASKED) and (not options.stage or name in ('unpack', *options.stage))}
    if options.brief and options.program:
        del chosen['unpack']
    return chosen


# ---- a device for a few minutes ----

def bring_back(run, folder):
    """All that there is so far, in the two files that come back: a run may be cut off at any time. Returns the table."""
    second = '_second' if run.options.second else ''
    path = os.path.join(folder, f'gpu{second}.tar.xz')
    with tarfile.open(path + '.part', 'w:xz', preset=1) as archive:
        for place, folders, names in os.walk(run.results):
            folders.sort()
            for name in sorted(names):
                archive.add(os.path.join(place, name), os.path.relpath(os.path.join(place, name), run.results))
    os.replace(path + '.part', path)
    lines = gpu_table.lines(run.results)[:TABLE_LINES]
    with open(os.path.join(folder, f'table{second}.md'), 'w', encoding='utf-8') as file:
        file.write('\n'.join([*lines, '', *run.failed]) + '\n')
    return lines


def programs_of(options):
    """The folder of the programs."""
    if options.program:
        return os.path.dirname(os.path.abspath(options.program))
    return os.path.join(options.results, 'programs') if options.objects else BUILD


def brief(options):
    os.makedirs(options.results, exist_ok=True)
    out, began = options.results, time.monotonic()
    with tempfile.TemporaryDirectory() as options.results:
        run = Run(options, programs_of(options))
        run.ends['run'] = began + (SECOND if options.second else BRIEF) - TABLE
        bad = run_stages(run, stages_of(options), lambda: bring_back(run, out))
        print('\n'.join([*bring_back(run, out),
                         f'in all {time.monotonic() - began:.0f} s; failed: {" ".join(bad) or "nothing"}']), flush=True)
    return bad


def run_stages(run, stages, after=lambda: None):
    """Names of the stages that failed. Without a device none but build, unpack, chart and table begin."""
    bad, device = [], None
    peers = set(stages) & {'roofline', 'attention', 'long', 'masks'}
    run.peers, run.hung, run.has_cudnn, run.failed = Peers(run) if peers else None, set(), False, []
    try:
        for name, seconds in stages.items():
            if run.left() == 0:
                run.report(f'{name}: no time is left')
                bad.append(name)
                continue
            with run.stage(name, None if run.options.quick else seconds):
                try:
                    if name not in HOST and device is None:
                        device = number(run, ['device'])
                        if 'failed' in device:
                            raise Lost(f'there is no CUDA device to test and measure on ({device["failed"]})')
                        run.has_cudnn = run.has('gpu_cudnn') and 'failed' not in number(run, ['device'], 'gpu_cudnn')
                        run.report(f"{device['name']}, {device['processors']} processors, {device['memory_bytes'] / 2**30:.0f} GiB; driver, clock, "
                                   f"power: {run.ask_driver('driver_version,clocks.max.sm,power.limit')}")
                    STAGES[name][0](run)
                except Failed as failure:
                    run.report(f'{name}: {failure}')
                    run.failed.append(f'{name}: {failure}')
                    bad.append(name)
                    if isinstance(failure, Lost) or name in ('build', 'unpack', 'pack'):
                        break
                finally:
                    after()
    finally:
        if run.peers:
            run.peers.close()
    return bad


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     usage=argparse.SUPPRESS)
    parser.add_argument('--stage', action='append', choices=[name for name in STAGES if name != 'pack'],
                        help=argparse.SUPPRESS)
    for flag in 'resume', 'quick', 'pack', 'brief', 'second':
        parser.add_argument(f'--{flag}', action='store_true', help=argparse.SUPPRESS)
    parser.add_argument('--minutes', type=float, help=argparse.SUPPRESS)
    for flag in 'program', 'objects', 'cudnn-frontend':
        parser.add_argument(f'--{flag}', help=argparse.SUPPRESS)
    parser.add_argument('--results', default=RESULTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.second and not options.brief:
        parser.error('--second goes with --brief')
    if options.pack and (options.brief or options.stage or options.quick or options.resume or options.minutes or
                         options.program or options.objects or options.results != RESULTS):
        parser.error('--pack builds everything for 9.0 into build: of the other flags it takes --cudnn-frontend alone')
    if options.brief and (options.minutes or options.resume or options.objects):
        parser.error('--brief has minutes and programs of its own, and resumes nothing')
    if options.brief and not set(options.stage or []) <= set(stages_of(argparse.Namespace(**{**vars(options), 'stage': None}))):
        parser.error('--brief has no such stage; the first call and --second have others')
    if options.program and not os.path.exists(options.program):
        parser.error(f'--program {options.program}: there is no such file')
    for number in signal.SIGINT, signal.SIGTERM:
        signal.signal(number, end_all)
    options.lines = LINES if options.brief else None
    if options.brief:
        bad = brief(options)
    else:
        run = Run(options, programs_of(options))
        if options.minutes or not (options.stage or options.quick or options.pack):
            run.ends['run'] = time.monotonic() + 60 * (options.minutes or 20)
        bad = run_stages(run, {'pack': None} if options.pack else stages_of(options))
        if bad:
            run.report(f'failed: {" ".join(bad)}')
    return 1 if bad else 0


if __name__ == '__main__':
    sys.exit(main())

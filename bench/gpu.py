#!/usr/bin/env python3
"""gpu.py [FLAGS] -- on a machine with a CUDA device: builds, tests, measures, and keeps the figures

Stages, in this order; all but sanitize without --stage, in at most 20 minutes together. Each takes at most what stands
beside it, and a command that measures at most 20 s of it, so that one that hangs costs one figure. What failed or had no
time is said, the rest goes on, and the run fails at its end.

  build      180 s  kernels for this device (nvcc) and the C programs (cc), into build/gpu; with cuDNN beside ours where
                    its header library is (pip install nvidia-cudnn-frontend, or --cudnn-frontend FOLDER); the machine
                    code for 9.0 is checked where cuobjdump and nvdisasm are. A warning of the compiler, or machine code
                    that is not as it should be, is told and does not end the run
  test       240 s  every tensor map encoded; each instruction of Hopper alone; every test of the CUDA backend that needs no
                    injected errors, and the examples
  sanitize   450 s  compute-sanitizer (memcheck, racecheck, synccheck) on the small ones, if it is installed
  roofline    30 s  bandwidth of a copy, rate of a bf16 product
  attention  420 s  forward and backward, head dim 64 and 128, causal and full, 1k to 32k tokens; head dim 256, 16k; eight
                    key/value heads of 32; one head, 64k to 1M tokens, as UPipe's stages have it: the kernels for this
                    device, those for 8.0, cuDNN with and without a deterministic backward; and in a process of its own
                    PyTorch's SDPA and the FlashAttention packages, as far as they are installed
  masks       60 s  a sliding window, packed sequences
  transfer    40 s  all-to-all of eight thread ranks on the device, by transport
  block      180 s  Llama3-8B's attention block on two and eight ranks: Ulysses, UPipe, UPipe with stages that overlap, by
                    transport: seconds, and the driver's count of memory beside the plan
  chart       20 s  gpu_roofline.png: attainable rates over arithmetic intensity, and every kernel of `attention`
                    (matplotlib)

Figures go to bench/results/gpu_STAGE.json with device, driver, date and command; as long as some are missing, those that
are there are in gpu_STAGE.failed.json instead, and an earlier result stays. What compilers and tests print is kept in
build/gpu/logs. Needs nvcc, a C compiler and Python 3; no Meson. Exit status: 0; 1 if something failed; 2 for wrong usage.

  --stage NAME      this stage alone; may be repeated
  --resume          figures that gpu_STAGE.failed.json has from this device are not measured again
  --minutes N       at most so long in all (20, or without a limit with --stage)
  --quick           a few small cases without limits of time, to see that it works
  --watchdog        kernels that hang say who waits for what, and end; slower: not for figures that are kept
  --program FILE    measure with this gpu (bench/gpu.c), built elsewhere: on a fake device, say
  --results FOLDER  where figures go
"""

import argparse
import concurrent.futures
import datetime
import glob
import importlib.metadata
import json
import os
import shutil
import socket
import subprocess
import sys
import time

TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BUILD = os.path.join(TOP, 'build', 'gpu')
LOGS = os.path.join(BUILD, 'logs')
RESULTS = os.path.join(TOP, 'bench', 'results')
C_FLAGS = ['-std=c11', '-D_POSIX_C_SOURCE=200809L', '-O2', '-g1', '-Wall', '-DUPIPE_WITH_CUDA',
           f'-DUPIPE_SOURCE_ROOT="{TOP}"']
SMALL = ['test_cuda_rows', 'test_cuda_train_ops', 'test_cuda_attn', 'test_cuda_attn90', 'test_cuda_attn90_bwd',
         'test_cuda_linear']
FIRST = ['maps', 'probe', 'watchdog']  # of tests/cuda, before all other tests
COMMAND = 20  # seconds of a command that measures
CONTESTANTS = ['upipe', 'upipe_80', 'cudnn', 'cudnn_deterministic']
BLOCK = ['--heads', '32', '--kv-heads', '8', '--head-dim', '128', '--model-dim', '4096']
METHODS = [['--chunk', '32'], ['--chunk', '8'], ['--chunk', '8', '--overlap']]
TRANSPORTS = ['threads', 'peer']
# The data sheet's dense bf16 and memory rates, for the chart.
SHEETS = {'H100': (989e12, 3.35e12), 'H200': (989e12, 4.8e12), 'A100': (312e12, 2.04e12)}

clock = {'run': float('inf'), 'stage': float('inf')}  # when they must be over


class Failed(Exception):
    """A stage cannot go on; the sentence says why."""


def log(sentence):
    print(f'gpu.py: {sentence}', file=sys.stderr, flush=True)


def left():
    """Seconds that the stage may still take; None: any."""
    end = min(clock.values())
    return None if end == float('inf') else max(0.0, end - time.monotonic())


# ---- programs ----

def nvcc():
    found = shutil.which('nvcc') or '/usr/local/cuda/bin/nvcc'
    if not os.access(found, os.X_OK):
        raise Failed('there is no nvcc on the path or in /usr/local/cuda')
    return found


def toolkit():
    return os.path.dirname(os.path.dirname(os.path.realpath(nvcc())))


def nccl():
    """The folder of the NCCL library; None if it or its header is not where compiler or toolkit look."""
    folders = ['/usr/include', '/usr/local/include', f'{toolkit()}/include']
    headers = [os.path.join(folder, 'nccl.h') for folder in folders]
    places = ['/usr/lib*', '/usr/lib/*', '/usr/local/lib', f'{toolkit()}/lib64']
    libraries = [library for place in places for library in sorted(glob.glob(os.path.join(place, 'libnccl.so')))]
    return os.path.dirname(libraries[0]) if libraries and any(map(os.path.exists, headers)) else None


def frontend(options):
    """The folder of cudnn-frontend's headers; None if they or cuDNN are not there."""
    folder = options.cudnn_frontend
    if not folder:
        try:
            folder = str(importlib.metadata.distribution('nvidia-cudnn-frontend').locate_file('include'))
        except importlib.metadata.PackageNotFoundError:
            return None
    library = glob.glob(os.path.join(toolkit(), 'lib64', 'libcudnn.so')) or glob.glob('/usr/lib/*/libcudnn.so')
    return folder if library and os.path.exists(os.path.join(folder, 'cudnn_frontend.h')) else None


def tail(path):
    """The end of a log, for the terminal."""
    with open(path, encoding='utf-8', errors='replace') as source:
        return ''.join(source.readlines()[-30:])


def call(name, command, seconds=float('inf'), **more):
    """The exit status of a command whose output is kept as NAME.log, and shown if it failed; None: there was no time."""
    seconds = min(seconds, float('inf') if left() is None else left())
    path = os.path.join(LOGS, name + '.log')
    os.makedirs(LOGS, exist_ok=True)
    log(' '.join(command))
    with open(path, 'w', encoding='utf-8') as out:
        try:
            status = subprocess.run(command, cwd=TOP, check=False, timeout=None if seconds == float('inf') else seconds,
                                    stdout=out, stderr=subprocess.STDOUT, **more).returncode
        except subprocess.TimeoutExpired:
            status = None
    if status != 0:
        log(f'{name}: {"out of time" if status is None else f"status {status}"}; the end of {path}:\n{tail(path)}')
    return status


def run_all(jobs):
    """Pairs of name and command, side by side, as many as there are cores. Returns the names of those that failed."""
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        ends = pool.map(lambda job: call(*job), jobs)
        return [name for (name, _), status in zip(jobs, ends) if status != 0]


def number(options, command):
    """The JSON object that a command prints, with the command in it; with `failed` or `refused` if there is none."""
    words = {'command': 'gpu ' + ' '.join(command)}
    seconds = None if options.quick else COMMAND if left() is None else min(COMMAND, left())
    try:
        done = subprocess.run([options.program, *command], cwd=TOP, capture_output=True, text=True, check=False,
                              timeout=seconds)
    except subprocess.TimeoutExpired:
        log(f'{words["command"]}: no result within {seconds:.0f} s')
        return {**words, 'failed': f'no result within {seconds:.0f} s'}
    except OSError as error:
        raise Failed(f'{options.program}: {error.strerror}; run the stage build first') from error
    if done.returncode == 0:
        return {**words, **json.loads(done.stdout)}
    sentence = (done.stderr.strip().splitlines() or [f'exit status {done.returncode}'])[-1]
    log(f'{words["command"]}: {sentence}')
    return {**words, 'refused' if done.returncode == 3 else 'failed': sentence}


def contest(options, command):
    """The figure of `gpu attention`. Contestants that failed, all of them if the program did, run again, each alone."""
    whole = number(options, command)
    kernels = {kernel['name']: kernel for kernel in whole.get('kernels', [])}
    again = CONTESTANTS if 'failed' in whole else [name for name in kernels if 'failed' in kernels[name]]
    for name in again:
        alone = number(options, [*command, '--kernels', name])
        if 'kernels' not in alone:
            kernels[name] = {'name': name, 'failed': alone.get('failed', alone.get('refused'))}
        else:
            whole = {**alone, **whole}
            kernels.update({kernel['name']: kernel for kernel in alone['kernels']})
    if 'fwd_flop' in whole:
        whole.pop('failed', None)
        whole['kernels'] = [kernels[name] for name in CONTESTANTS if name in kernels]
    return whole


def ask_driver(what):
    """What nvidia-smi says of the first device; None without it."""
    if not shutil.which('nvidia-smi'):
        return None
    done = subprocess.run(['nvidia-smi', f'--query-gpu={what}', '--format=csv,noheader'], stdout=subprocess.PIPE,
                          text=True, check=False)
    return done.stdout.split('\n')[0].strip() if done.returncode == 0 else None


# ---- results ----

def failures(figures):
    """What each figure that failed says, and each contestant of one."""
    for figure in figures:
        if 'failed' in figure:
            yield f'{figure["command"]} ({figure["failed"]})'
        for kernel in figure.get('kernels', []):
            if 'failed' in kernel:
                yield f'{kernel["name"]} of {figure["command"]} ({kernel["failed"]})'


def keep(options, stage, cases, measure=number, show=lambda figure: None, more=lambda figures: None):
    """Measures the cases, each a command, and writes the stage's file, beside an earlier one until the last figure is there.

    more(figures) adds what is measured otherwise. Where figures failed, ends the stage.
    """
    good, beside = (os.path.join(options.results, f'gpu_{stage}{end}') for end in ('.json', '.failed.json'))
    whole = {'stage': stage, 'date': datetime.datetime.now(datetime.timezone.utc).strftime('%Y-%m-%d'),
             'command': f'python3 bench/gpu.py --stage {stage}', 'device': number(options, ['device']),
             'driver': ask_driver('driver_version,clocks.max.sm,power.limit'), 'figures': []}
    had = {}
    if options.resume and os.path.exists(beside):
        with open(beside, encoding='utf-8') as source:
            last = json.load(source)
        if last['device'] == whole['device']:
            had = {figure['command']: figure for figure in last['figures'] if not list(failures([figure]))}
        log(f'{stage}: {len(had)} figures are there')

    def write(path):
        os.makedirs(options.results, exist_ok=True)
        with open(path, 'w', encoding='utf-8') as out:
            json.dump(whole, out, indent=1)
            out.write('\n')

    for command in cases:
        whole['figures'].append(had.get('gpu ' + ' '.join(command)) or measure(options, command))
        show(whole['figures'][-1])
        write(beside)
    more(whole['figures'])
    bad = list(failures([whole['device'], *whole['figures']]))
    write(beside if bad else good)
    log(f'wrote {beside if bad else good}')
    if bad:
        raise Failed(f'no figure from: {"; ".join(bad)}')
    os.remove(beside)


def kept(options, stage):
    """What an earlier keep has written; a result that lacks figures if there is no better one."""
    for end in '.json', '.failed.json':
        path = os.path.join(options.results, f'gpu_{stage}{end}')
        if os.path.exists(path):
            with open(path, encoding='utf-8') as source:
                return json.load(source)
    raise Failed(f'there is no result of {stage} yet')


# ---- build, test ----

def tests():
    """Test programs that run on a real device: those that do not drive the fake one."""
    for path in sorted(glob.glob(os.path.join(TOP, 'tests', 'cuda', 'test_cuda_*.c'))):
        with open(path, encoding='utf-8') as source:
            if 'runner_cuda.h' not in source.read():
                yield os.path.splitext(os.path.basename(path))[0]


def check_machine_code(compiled):
    """Whether the compiler has undone an overlap or spilled: figures are then not what the kernels could give."""
    if all(shutil.which(tool) or shutil.which(tool, path='/usr/local/cuda/bin') for tool in ('cuobjdump', 'nvdisasm')):
        if call('sass', [sys.executable, os.path.join(TOP, 'tests', 'cuda', 'sass.py'), compiled]) != 0:
            log('warning: the machine code is not what it should be; the run goes on')
    else:
        log('left out: the check of the machine code, as cuobjdump and nvdisasm are not installed')


def build(options):
    os.makedirs(BUILD, exist_ok=True)
    arch = (ask_driver('compute_cap') or '8.0').replace('.', '')
    if arch == '90':
        arch = '90a'  # Hopper's own instructions
    units = {'09_cuda.o': 'examples/09_cuda.cu', **{f'{name}.o': f'tests/cuda/{name}.cpp' for name in FIRST}}
    gates = [sys.executable, os.path.join(TOP, 'tests', 'cuda', 'nvcc.py')]  # fails where ptxas serializes products
    strict = ['-Werror=all-warnings', '-Xptxas=-warn-spills']
    kernels = {made: [nvcc(), '-x', 'cu', '-std=c++17', '-O3', '-lineinfo', '-Wno-deprecated-gpu-targets',
                      *(['-DUPIPE_CUDA_WATCHDOG=67108864'] if options.watchdog else []),
                      f'-gencode=arch=compute_{arch},code=sm_{arch}', '-I', TOP, '-c', source, '-o', os.path.join(BUILD, made)]
               for made, source in units.items()}
    libraries = [f'-L{toolkit()}/lib64', f'-Wl,-rpath,{toolkit()}/lib64', '-lcublas', '-lcudart', '-lstdc++', '-lm',
                 '-lpthread']
    places = ['-I', TOP, '-I', os.path.join(TOP, 'tests'), '-isystem', f'{toolkit()}/include']
    cpu = ['-mavx2', '-mfma'] if os.uname().machine == 'x86_64' else []
    programs = {'gpu': 'bench/gpu.c', 'compare': 'examples/compare/compare.c', '09_cuda': 'examples/09_cuda.c'}
    programs.update({name: f'tests/cuda/{name}.c' for name in tests()})
    more = {}
    if nccl():
        programs['08_nccl'] = 'examples/08_nccl.c'
        more['08_nccl'] = [f'-L{nccl()}', f'-Wl,-rpath,{nccl()}', '-lnccl']
    else:
        log('left out: 08_nccl, as NCCL is not installed')
    jansson = shutil.which('pkg-config') and subprocess.run(['pkg-config', '--cflags', '--libs', 'jansson'],
                                                            stdout=subprocess.PIPE, text=True, check=False)
    if jansson and jansson.returncode == 0:
        programs['train'] = 'examples/llama/train.c'
        more['train'] = jansson.stdout.split()
    else:
        log('left out: train, as jansson is not installed')
    headers, objects = frontend(options), []
    if headers:
        more['gpu'] = ['-DWITH_CUDNN', os.path.join(BUILD, 'gpu_cudnn.o'), '-lcudnn', '-lnvrtc']
        for name, source in ('gpu_cudnn.o', 'bench/gpu_cudnn.cpp'), ('13_plug_cudnn.o', 'examples/13_plug_cudnn.cpp'):
            objects.append((name, [shutil.which('c++') or 'g++', '-std=c++17', '-O1', '-DCUDNN_FRONTEND_SKIP_JSON_LIB', '-I',
                                   TOP, '-isystem', headers, '-isystem', f'{toolkit()}/include', '-c', source, '-o',
                                   os.path.join(BUILD, name)]))
    else:
        log('left out: cuDNN beside ours, as it or cudnn-frontend is not installed')
    bad = run_all([(name, [*gates, *command, *strict]) for name, command in kernels.items()] + objects)
    warned = [name for name in bad if name in kernels]
    if warned:
        log(f'warning: {" ".join(warned)} compiled without the checks of warnings, spills and serialized products')
        bad = [name for name in bad if name not in kernels] + run_all([(name, kernels[name]) for name in warned])
    if bad:
        raise Failed(f'failed: {" ".join(bad)}')
    if arch == '90a':
        check_machine_code(os.path.join(BUILD, '09_cuda.o'))
    linked = [(name, [shutil.which('c++') or 'g++', os.path.join(BUILD, name + '.o'), '-o', os.path.join(BUILD, name),
                      *libraries]) for name in FIRST]
    if headers:
        linked.append(('13_plug_cudnn', [shutil.which('c++') or 'g++', os.path.join(BUILD, '13_plug_cudnn.o'),
                                         os.path.join(BUILD, '09_cuda.o'), '-o', os.path.join(BUILD, '13_plug_cudnn'), '-lcudnn',
                                         '-lnvrtc', *libraries]))
    for name, source in programs.items():
        linked.append((name, [shutil.which('cc') or 'gcc', *C_FLAGS, *cpu, *places, source, os.path.join(BUILD, '09_cuda.o'), '-o',
                              os.path.join(BUILD, name), *more.get(name, []), *libraries]))
    bad = run_all(linked)
    if bad:
        raise Failed(f'failed: {" ".join(bad)}')


def one_process():
    """What a launcher would tell the only process, with a port that is free."""
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        port = probe.getsockname()[1]
    return {**os.environ, 'RANK': '0', 'WORLD_SIZE': '1', 'LOCAL_RANK': '0', 'MASTER_ADDR': '127.0.0.1',
            'MASTER_PORT': str(port)}


def test(_):
    if not all(os.path.exists(os.path.join(BUILD, name)) for name in FIRST):
        raise Failed('there are no programs to test; run the stage build first')
    first = [name for name in FIRST if call(name, [os.path.join(BUILD, name)], seconds=COMMAND) != 0]
    with open(os.path.join(LOGS, 'probe.log'), encoding='utf-8') as probed: # what each instruction does, and what waits take
        log('probe:\n' + probed.read())
    jobs = [([name], {}) for name in tests()]
    more = [(['08_nccl'], {'env': one_process()}), (['13_plug_cudnn'], {}),
            (['train', '--device', 'cuda', '--ranks', '2', '--tokens', '256', '--steps', '3', '--sample', '0'], {})]
    jobs += [(['09_cuda'], {})] + [job for job in more if os.path.exists(os.path.join(BUILD, job[0][0]))]
    jobs += [(['compare', '--device', 'cuda', '--dtype', dtype, '--kv-heads', '4', '--check', 'on'], {})
             for dtype in ('f32', 'bf16')]
    jobs = [job for job in jobs if os.path.exists(os.path.join(BUILD, job[0][0]))]

    def run(job):
        words, more = job
        name = '_'.join(words[:1] + [word for word in words if word in ('f32', 'bf16')])
        return call(name, [os.path.join(BUILD, words[0]), *words[1:]], **more)

    # the host's oracles take most of the time: programs share the device
    with concurrent.futures.ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        ends = list(zip(jobs, pool.map(run, jobs)))
    bad = first + [f'{" ".join(words)} ({"out of time" if status is None else status})'
                   for (words, _), status in ends if status != 0]
    if bad:
        raise Failed(f'failed: {"; ".join(bad)}')
    log(f'{len(jobs) + len(FIRST)} programs passed')


def sanitize(_):
    tool = shutil.which('compute-sanitizer') or os.path.join(toolkit(), 'bin', 'compute-sanitizer')
    if not os.access(tool, os.X_OK):
        log('left out: compute-sanitizer is not installed')
        return
    few = {**os.environ, 'UPIPE_DRAWS': '0'}
    bad = [f'{check} {name}' for check in ('memcheck', 'racecheck', 'synccheck') for name in SMALL
           if call(f'{check}_{name}', [tool, '--tool', check, '--error-exitcode', '9', os.path.join(BUILD, name)], env=few) != 0]
    if bad:
        raise Failed(f'failed: {"; ".join(bad)}')


# ---- figures ----

def roofline(options):
    keep(options, 'roofline', [['roofline', *(['--tokens', '256'] if options.quick else [])]])


# Reads the shapes as JSON lines; a line for each contestant of each.
PEERS = r'''
import json, statistics, sys, torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
versions = {'torch': torch.__version__}
makers = {}
def sdpa(backend, same_bits):
    def make(q, k, v, causal):
        torch.use_deterministic_algorithms(same_bits)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return make, (0, 2, 1, 3)
makers['sdpa_flash'] = sdpa(SDPBackend.FLASH_ATTENTION, False)
makers['sdpa_flash_deterministic'] = sdpa(SDPBackend.FLASH_ATTENTION, True)
makers['sdpa_cudnn'] = sdpa(SDPBackend.CUDNN_ATTENTION, False)
def package(name, same_bits):
    function = __import__(name, fromlist=['flash_attn_func']).flash_attn_func
    def make(q, k, v, causal):
        made = function(q, k, v, causal=causal, deterministic=same_bits)
        return made[0] if isinstance(made, tuple) else made
    return make, (0, 1, 2, 3)
for name, module in (('fa2', 'flash_attn'), ('fa3', 'flash_attn_interface')):
    try:
        makers[name], makers[name + '_deterministic'] = package(module, False), package(module, True)
        versions[name] = getattr(__import__(module), '__version__', 'there')
    except ImportError:
        pass
def median(call):
    seconds = []
    for i in range(11):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(); call(); end.record(); end.synchronize()
        if i >= 2: seconds.append(start.elapsed_time(end) * 1e-3)
    return statistics.median(seconds)
for line in sys.stdin:
    at = json.loads(line)
    for name, (make, order) in makers.items():
        figure = {'shape': at, 'name': name, 'versions': versions}
        try:
            size = [1, at['tokens'], at['heads'], at['head_dim']]
            size = [size[i] for i in order]
            q, k, v = (torch.randn(size, device='cuda', dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
            with torch.no_grad():
                fwd = median(lambda: make(q, k, v, at['causal']))
            out = make(q, k, v, at['causal'])
            grad = torch.randn_like(out)
            bwd = median(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))
            figure.update(fwd_seconds=fwd, bwd_seconds=bwd, fwd_flop_per_s=at['fwd_flop'] / fwd,
                          bwd_flop_per_s=at['bwd_flop'] / bwd)
        except Exception as error:
            figure['refused'] = str(error).split('\n')[0][:200]
        print(json.dumps(figure), flush=True)
'''


def beside(figures):
    """Adds what PyTorch and the FlashAttention packages make of the same shapes; of a crash, what came before."""
    if subprocess.run([sys.executable, '-c', 'import torch, sys; sys.exit(not torch.cuda.is_available())'],
                      stderr=subprocess.DEVNULL, check=False).returncode != 0:
        log('left out: PyTorch and FlashAttention beside it, as there is no PyTorch for CUDA')
        return
    keys = ['tokens', 'heads', 'head_dim', 'causal', 'fwd_flop', 'bwd_flop']
    shapes = [{key: figure[key] for key in keys} for figure in figures
              if figure.get('heads') == figure.get('kv_heads') and len(figure.get('kernels', [])) <= len(CONTESTANTS)]
    try:
        done = subprocess.run([sys.executable, '-c', PEERS], input='\n'.join(map(json.dumps, shapes)),
                              stdout=subprocess.PIPE, text=True, check=False, timeout=left())
        lines, status = done.stdout, done.returncode
    except subprocess.TimeoutExpired as late:
        lines, status = (late.stdout or b'').decode(), 'out of time'
    for line in lines.splitlines():
        if not line.startswith('{') or not line.endswith('}'):
            continue
        made = json.loads(line)
        shape = made.pop('shape')
        for figure in figures:
            if all(figure.get(key) == shape[key] for key in keys):
                figure['kernels'].append(made)
    if status != 0:
        log(f'PyTorch and FlashAttention beside it ended early: {status}')


def rates(kernel):
    for word in 'refused', 'failed':
        if word in kernel:
            return word
    return f"{kernel['fwd_flop_per_s'] / 1e12:.0f} / {kernel['bwd_flop_per_s'] / 1e12:.0f}"


def show(figure):
    if 'kernels' in figure:
        mask = ' causal' if figure['causal'] else ' full'
        mask += f" window {figure['window']}" if figure['window'] else ''
        mask += f" {figure['cu_seqlens']} packed sequences" if figure['cu_seqlens'] else ''
        log(f"d {figure['head_dim']}{mask} {figure['tokens']}, TFLOP/s forward / backward: "
            + ', '.join(f"{kernel['name']} {rates(kernel)}" for kernel in figure['kernels']))


def attention(options):
    def shape(tokens, dim, heads, *more):
        return ['attention', '--tokens', str(tokens), '--head-dim', str(dim), '--heads', str(heads), *more]

    lengths = [64, 128] if options.quick else [1024, 2048, 4096, 8192, 16384, 32768]
    # as many tokens of a batch as 16k hold, as heads
    cases = [shape(tokens, dim, 2 if options.quick else heads * max(1, 16384 // tokens), *full)
             for dim, heads, some in ((128, 16, lengths), (64, 32, lengths), (256, 8, lengths[-2:-1]))
             for full in ([], ['--full']) for tokens in some]
    cases += [shape(tokens, 128, 4 if options.quick else 32, '--kv-heads', '1' if options.quick else '8')
              for tokens in lengths[-2:]]
    cases += [shape(tokens, 128, 1) for tokens in ([256] if options.quick else [65536, 131072, 262144, 1048576])]
    keep(options, 'attention', cases, contest, show, (lambda _: None) if options.quick else beside)


def masks(options):
    shape = ['--head-dim', '64', '--heads', '2'] if options.quick else ['--head-dim', '128', '--heads', '16']
    cases = [(16384, []), (16384, ['--window', '1024']), (32768, ['--window', '1024']), (16384, ['--cu-seqlens', '8']),
             (16384, ['--cu-seqlens', '64'])]
    if options.quick:
        cases = [(128, []), (128, ['--window', '40']), (128, ['--cu-seqlens', '3'])]
    keep(options, 'masks', [['attention', '--tokens', str(tokens), *shape, *mask] for tokens, mask in cases], contest, show)


def transfer(options):
    def show_one(one):
        if 'bytes_per_s' in one:
            log(f"{one['command']}: {one['bytes_per_s'] / 1e9:.1f} GB/s read and written")

    keep(options, 'transfer',
         [['transfer', '--tokens', str(tokens), '--head-dim', '128', '--transport', transport, '--ranks',
           '2' if options.quick else '8'] for tokens in ([64] if options.quick else [16384, 65536, 262144])
          for transport in TRANSPORTS], show=show_one)


def block(options):
    def show_one(one):
        if 'fwd_seconds' in one:
            log(f"{one['tokens']} tokens, {one['ranks']} ranks, {one['method']}{' overlapped' if one['overlap'] else ''}, "
                f"{one['transport']}: {one['fwd_seconds']:.3f} s forward, {one['bwd_seconds']:.3f} s backward, "
                f"{one['peak_bytes'] / 2**20:.0f} MiB")

    shape, methods, sizes = BLOCK, METHODS, [(65536, 8), (131072, 8), (65536, 2)]
    if options.quick:
        shape = '--heads 4 --kv-heads 2 --head-dim 64 --model-dim 64 --layers 1'.split()
        methods, sizes = [['--chunk', '4'], ['--chunk', '2'], ['--chunk', '2', '--overlap']], [(128, 2)]
    keep(options, 'block',
         [['block', '--tokens', str(tokens), '--ranks', str(ranks), '--transport', transport, *method, *shape]
          for tokens, ranks in sizes for method in methods for transport in TRANSPORTS], show=show_one)


# ---- chart ----

def chart(options):
    try:
        import matplotlib
    except ImportError:
        log('left out: the chart, as matplotlib is not installed')
        return
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    roof, figures = kept(options, 'roofline'), kept(options, 'attention')['figures']
    machine, measured = roof['device'].get('name', 'the device'), roof['figures'][0]
    roofs = [('measured: a bf16 product, a copy', measured['product_flop_per_s'], measured['copy_bytes_per_s'], '-')]
    roofs += [(f'data sheet, {name}', *sheet, ':') for name, sheet in SHEETS.items() if name in machine]
    figure, panels = plt.subplots(3, 2, figsize=(13, 13), sharex='row')
    places = [(dim, way) for dim in (128, 64, 256) for way in ('fwd', 'bwd')]
    for panel, (dim, way) in zip(panels.flat, places):
        points = [(one[f'{way}_flop'] / one[f'{way}_bytes'], one, kernel)
                  for one in figures if one.get('head_dim') == dim
                  for kernel in one.get('kernels', []) if f'{way}_flop_per_s' in kernel]
        if not points:
            continue
        low, high = (edge(x for x, _, _ in points) for edge in (min, max))
        for name, flops, bandwidth, line in roofs:
            at = [low / 4, flops / bandwidth, max(high, flops / bandwidth) * 2]
            panel.plot(at, [min(flops, x * bandwidth) / 1e12 for x in at], 'k' + line, linewidth=1, label=name)
        names = list(dict.fromkeys(kernel['name'] for _, _, kernel in points))
        for i, name in enumerate(names):
            for causal, marker in (True, 'o'), (False, 's'):
                own = sorted((x, kernel[f'{way}_flop_per_s'] / 1e12) for x, one, kernel in points
                             if kernel['name'] == name and one['causal'] == causal)
                if own:
                    panel.plot(*zip(*own), marker=marker, color=f'C{i}', linewidth=0.7, markersize=4,
                               label=f"{name}, {'causal' if causal else 'full'}")
        panel.set_xscale('log', base=2)
        panel.set_yscale('log', base=2)
        panel.xaxis.set_major_formatter('{x:g}')
        panel.yaxis.set_major_formatter('{x:g}')
        panel.set_title(f"head dim {dim}, {'forward' if way == 'fwd' else 'backward'}", fontsize=10)
        panel.set_xlabel('flops a byte that must pass the memory (more tokens: further right)')
        panel.set_ylabel('TFLOP/s')
        panel.grid(True, alpha=0.3)
    lines = {name: line for panel in panels.flat for line, name in zip(*panel.get_legend_handles_labels())}
    figure.legend(lines.values(), lines, loc='lower center', ncols=4, fontsize=8)
    figure.suptitle(f'Attention in bf16 under the roofs of {machine}')
    figure.tight_layout(rect=(0, 0.03 + 0.014 * (len(lines) / 4), 1, 1))
    path = os.path.join(options.results, 'gpu_roofline.png')
    figure.savefig(path, dpi=110)
    log(f'wrote {path}')


# name: what it runs, the seconds it may take
STAGES = {'build': (build, 180), 'test': (test, 240), 'sanitize': (sanitize, 450), 'roofline': (roofline, 30),
          'attention': (attention, 420), 'masks': (masks, 60), 'transfer': (transfer, 40), 'block': (block, 180),
          'chart': (chart, 20)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     usage=argparse.SUPPRESS)
    parser.add_argument('--stage', action='append', choices=STAGES, help=argparse.SUPPRESS)
    parser.add_argument('--resume', action='store_true', help=argparse.SUPPRESS)
    parser.add_argument('--quick', action='store_true', help=argparse.SUPPRESS)
    parser.add_argument('--minutes', type=float, help=argparse.SUPPRESS)
    parser.add_argument('--program', default=os.path.join(BUILD, 'gpu'), help=argparse.SUPPRESS)
    parser.add_argument('--results', default=RESULTS, help=argparse.SUPPRESS)
    parser.add_argument('--watchdog', action='store_true', help=argparse.SUPPRESS)
    parser.add_argument('--cudnn-frontend', help=argparse.SUPPRESS)
    options = parser.parse_args()
    stages = [stage for stage in STAGES if (stage in options.stage if options.stage else stage != 'sanitize')]
    if options.minutes or not (options.stage or options.quick):
        clock['run'] = time.monotonic() + 60 * (options.minutes or 20)
    bad, device = [], None
    for stage in stages:
        body, seconds = STAGES[stage]
        start = time.monotonic()
        clock['stage'] = float('inf') if options.quick else start + seconds
        try:
            if stage not in ('build', 'chart') and device is None:
                device = number(options, ['device'])
                if 'failed' in device:
                    raise Failed(f'there is no CUDA device to test and measure on ({device["failed"]})')
            body(options)
        except Failed as failure:
            log(f'{stage}: {failure}')
            bad.append(stage)
        log(f'{stage}: {time.monotonic() - start:.0f} s')
        if stage == 'build' and bad or device is not None and 'failed' in device:
            break
    if bad:
        log(f'failed: {" ".join(bad)}')
    return 1 if bad else 0


if __name__ == '__main__':
    sys.exit(main())

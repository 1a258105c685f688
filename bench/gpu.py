#!/usr/bin/env python3
"""gpu.py [STAGE...] -- on a machine with a CUDA device: builds, tests, measures, and keeps the figures

Stages, in this order; all of them without an argument. Each takes less than ten minutes and can be run alone after build:

  build      kernels for this device (nvcc) and the C programs (cc), into build/gpu
  test       every test of the CUDA backend that needs no injected errors, and the examples; 08_processes as one process if
             NCCL is installed
  sanitize   compute-sanitizer (memcheck, racecheck, synccheck) on the small ones, if it is installed
  roofline   bandwidth of a copy, rate of a bf16 product
  attention  forward and backward, head dim 64 and 128, causal and full, 1k to 64k tokens; beside PyTorch's SDPA with the
             FlashAttention and cuDNN backends, in the same run, if PyTorch is installed
  exchange   all-to-all of eight thread ranks on the device
  block      Llama3-8B's attention block on eight ranks with Ulysses and UPipe: seconds, and the driver's count of memory
             beside the plan

Figures go to bench/results/gpu_STAGE.json with device, driver, date and command; if one could not be had, those that could
go to gpu_STAGE.failed.json instead, and an earlier result stays. Needs nvcc, a C compiler and Python 3; no Meson. Exit
status: 0; 1 if something failed; 2 for wrong usage.
"""

import argparse
import datetime
import glob
import json
import os
import shutil
import socket
import subprocess
import sys
import time

TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BUILD = os.path.join(TOP, 'build', 'gpu')
RESULTS = os.path.join(TOP, 'bench', 'results')
C_FLAGS = ['-std=c11', '-D_POSIX_C_SOURCE=200809L', '-O2', '-g1', '-Wall', '-DUPIPE_WITH_CUDA',
           f'-DUPIPE_SOURCE_ROOT="{TOP}"']
EXAMPLES = ['09_cuda', '03_exchange', '04_attention', '05_layer', '06_step', '07_tiles']
SMALL = ['test_cuda_rows', 'test_cuda_train_ops', 'test_cuda_attn']
LENGTHS = [1024, 2048, 4096, 8192, 16384, 32768, 65536]
BLOCK = ['--ranks', '8', '--heads', '32', '--kv-heads', '8', '--head-dim', '128', '--model-dim', '4096']
BLOCK_TOKENS = [65536, 131072]


def say(sentence):
    print(f'gpu.py: {sentence}', file=sys.stderr, flush=True)


def fail(sentence):
    say(sentence)
    sys.exit(1)


def nvcc():
    found = shutil.which('nvcc') or '/usr/local/cuda/bin/nvcc'
    if not os.access(found, os.X_OK):
        fail('there is no nvcc on the path or in /usr/local/cuda')
    return found


def toolkit():
    return os.path.dirname(os.path.dirname(os.path.realpath(nvcc())))


def nccl():
    """The folder of the NCCL library; None if it or its header is not where compiler or toolkit look."""
    headers = [os.path.join(place, 'nccl.h') for place in ('/usr/include', '/usr/local/include', f'{toolkit()}/include')]
    places = ['/usr/lib*', '/usr/lib/*', '/usr/local/lib', f'{toolkit()}/lib64']
    libraries = [library for place in places for library in sorted(glob.glob(os.path.join(place, 'libnccl.so')))]
    return os.path.dirname(libraries[0]) if libraries and any(map(os.path.exists, headers)) else None


def run(command, **more):
    """One command; its output is shown. Ends the program if it fails."""
    say(' '.join(command))
    if subprocess.run(command, cwd=TOP, check=False, **more).returncode != 0:
        fail(f'failed: {" ".join(command)}')


def number(command):
    """The JSON object that a command prints, with the command in it; None if it failed."""
    say(' '.join(command))
    done = subprocess.run([os.path.join(BUILD, 'gpu'), *command], cwd=TOP, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        return {'command': 'gpu ' + ' '.join(command), 'failed': done.returncode}
    return {'command': 'gpu ' + ' '.join(command), **json.loads(done.stdout)}


def ask_driver(what):
    """What nvidia-smi says of the first device; None without it."""
    if not shutil.which('nvidia-smi'):
        return None
    done = subprocess.run(['nvidia-smi', f'--query-gpu={what}', '--format=csv,noheader'], stdout=subprocess.PIPE, text=True,
                          check=False)
    return done.stdout.split('\n')[0].strip() if done.returncode == 0 else None


def keep(stage, figures, lacks=None):
    """Writes the stage's file. Where figures are missing (lacks: why there are no more) or failed, writes them beside a good
    result, not over it, and ends the program."""
    device = number(['device'])
    failed = [figure['command'] for figure in (device, *figures) if 'failed' in figure]
    bad = [lacks] if lacks else []
    if failed:
        bad.append(f'no figure from: {"; ".join(failed)}')
    whole = {'stage': stage, 'date': datetime.datetime.now(datetime.timezone.utc).strftime('%Y-%m-%d'),
             'command': f'python3 bench/gpu.py {stage}', 'device': device,
             'driver': ask_driver('driver_version,clocks.max.sm,power.limit')}
    if lacks:
        whole['partial'] = True
    whole['figures'] = figures
    os.makedirs(RESULTS, exist_ok=True)
    good, beside = (os.path.join(RESULTS, f'gpu_{stage}{end}') for end in ('.json', '.failed.json'))
    path = beside if bad else good
    with open(path, 'w', encoding='utf-8') as out:
        json.dump(whole, out, indent=1)
        out.write('\n')
    say(f'wrote {os.path.relpath(path, TOP)}')
    if bad:
        fail('; '.join(bad))
    if os.path.exists(beside):
        os.remove(beside)  # what failed then works now


# ---- stages ----

def tests():
    """Test programs that run on a real device: those that do not drive the fake one."""
    for path in sorted(glob.glob(os.path.join(TOP, 'tests', 'cuda', 'test_cuda_*.c'))):
        with open(path, encoding='utf-8') as source:
            if 'runner_cuda.h' not in source.read():
                yield os.path.splitext(os.path.basename(path))[0]


def build(_):
    os.makedirs(BUILD, exist_ok=True)
    arch = (ask_driver('compute_cap') or '8.0').replace('.', '')
    units = {'device_table.o': 'examples/common/device_table.cu', '09_cuda.o': 'examples/09_cuda.cu'}
    running = []
    for made, source in units.items():
        command = [nvcc(), '-x', 'cu', '-std=c++17', '-O3', '-lineinfo', '-Werror=all-warnings', '-Xptxas=-warn-spills',
                   '-Wno-deprecated-gpu-targets', f'-arch=sm_{arch}', '-I', TOP, '-c', source, '-o',
                   os.path.join(BUILD, made)]
        say(' '.join(command))
        running.append((source, subprocess.Popen(command, cwd=TOP)))
    for source, process in running:
        if process.wait() != 0:
            fail(f'nvcc failed on {source}')
    libraries = [f'-L{toolkit()}/lib64', f'-Wl,-rpath,{toolkit()}/lib64', '-lcublas', '-lcudart', '-lstdc++', '-lm',
                 '-lpthread']
    places = ['-I', TOP, '-I', os.path.join(TOP, 'tests'), '-isystem', f'{toolkit()}/include']
    cpu = ['-mavx2', '-mfma'] if os.uname().machine == 'x86_64' else []
    programs = {'gpu': 'bench/gpu.c', 'compare': 'examples/compare/compare.c'}
    programs.update({name: f'examples/{name}.c' for name in EXAMPLES})
    programs.update({name: f'tests/cuda/{name}.c' for name in tests()})
    more = {}
    if nccl():
        programs['08_processes'] = 'examples/08_processes.c'
        more['08_processes'] = ['-DWITH_NCCL', f'-L{nccl()}', f'-Wl,-rpath,{nccl()}', '-lnccl']
    else:
        say('left out: 08_processes, as NCCL is not installed')
    for name, source in programs.items():
        table = '09_cuda.o' if name in ('08_processes', '09_cuda') else 'device_table.o'
        run([shutil.which('cc') or 'gcc', *C_FLAGS, *cpu, *places, source, os.path.join(BUILD, table), '-o',
             os.path.join(BUILD, name), *libraries, *more.get(name, [])])


def one_process():
    """What a launcher would tell the only process, with a port that is free."""
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        port = probe.getsockname()[1]
    return {**os.environ, 'RANK': '0', 'WORLD_SIZE': '1', 'LOCAL_RANK': '0', 'MASTER_ADDR': '127.0.0.1',
            'MASTER_PORT': str(port)}


def test(_):
    bad = []
    for name in tests():
        say(name)
        if subprocess.run([os.path.join(BUILD, name)], cwd=TOP, check=False).returncode != 0:
            bad.append(name)
    for name in EXAMPLES:
        flags = [] if name == '09_cuda' else ['--device', 'cuda']
        say(' '.join([name, *flags]))
        if subprocess.run([os.path.join(BUILD, name), *flags], cwd=TOP, stdout=subprocess.DEVNULL,
                          check=False).returncode != 0:
            bad.append(name)
    if nccl():
        say('08_processes, one process')
        if subprocess.run([os.path.join(BUILD, '08_processes')], cwd=TOP, env=one_process(), check=False).returncode != 0:
            bad.append('08_processes')
    else:
        say('left out: 08_processes, as NCCL is not installed')
    for dtype in 'f32', 'bf16':
        command = [os.path.join(BUILD, 'compare'), '--device', 'cuda', '--dtype', dtype, '--kv-heads', '4', '--check', 'on']
        say(' '.join(command))
        if subprocess.run(command, cwd=TOP, check=False).returncode != 0:
            bad.append(f'compare {dtype}')
    if bad:
        fail(f'failed: {" ".join(bad)}')


def sanitize(_):
    tool = shutil.which('compute-sanitizer') or os.path.join(toolkit(), 'bin', 'compute-sanitizer')
    if not os.access(tool, os.X_OK):
        say('left out: compute-sanitizer is not installed')
        return
    few = {**os.environ, 'UPIPE_DRAWS': '0'}
    for check in 'memcheck', 'racecheck', 'synccheck':
        for name in SMALL:
            run([tool, '--tool', check, '--error-exitcode', '9', os.path.join(BUILD, name)], env=few)


def roofline(_):
    keep('roofline', [number(['roofline'])])


SDPA = r'''
import json, statistics, sys, torch
from torch.nn.attention import SDPBackend, sdpa_kernel
import torch.nn.functional as F
tokens, heads, dim, causal = (int(word) for word in sys.argv[1:5])
made = [torch.randn(1, heads, tokens, dim, device='cuda', dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
grad = torch.randn(1, heads, tokens, dim, device='cuda', dtype=torch.bfloat16)
def median(call):
    seconds = []
    for i in range(11):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(); call(); end.record(); end.synchronize()
        if i >= 2: seconds.append(start.elapsed_time(end) * 1e-3)
    return statistics.median(seconds)
flop = 4.0 * tokens * tokens * heads * dim / (2 if causal else 1)
for name, backend in (('flash', SDPBackend.FLASH_ATTENTION), ('cudnn', SDPBackend.CUDNN_ATTENTION)):
    try:
        with sdpa_kernel(backend):
            fwd = median(lambda: F.scaled_dot_product_attention(*(x.detach() for x in made), is_causal=bool(causal)))
            out = F.scaled_dot_product_attention(*made, is_causal=bool(causal))
            bwd = median(lambda: torch.autograd.grad(out, made, grad, retain_graph=True))
        print(json.dumps({'backend': name, 'fwd_seconds': fwd, 'fwd_flop_per_s': flop / fwd, 'bwd_seconds': bwd,
                          'bwd_flop_per_s': 2.5 * flop / bwd, 'torch': torch.__version__}))
    except RuntimeError as error:
        print(json.dumps({'backend': name, 'refused': str(error).split('\n')[0]}))
'''


def has_torch():
    return subprocess.run([sys.executable, '-c', 'import torch, sys; sys.exit(not torch.cuda.is_available())'],
                          stderr=subprocess.DEVNULL, check=False).returncode == 0


def beside(*numbers):
    """What PyTorch makes of the same attention: an object a backend, and one for the whole if it crashed."""
    done = subprocess.run([sys.executable, '-c', SDPA, *map(str, numbers)], stdout=subprocess.PIPE, text=True, check=False)
    made = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{') and line.endswith('}')]
    if done.returncode != 0:
        made.append({'backend': 'torch', 'failed': done.returncode})
    return made


def attention(options):
    figures, other = [], has_torch()
    if not other:
        say('left out: PyTorch beside it, which is not installed')
    until = time.monotonic() + options.minutes * 60
    shapes = [(dim, heads, causal, tokens) for dim, heads in ((128, 16), (64, 32)) for causal in (True, False)
              for tokens in LENGTHS]
    for dim, heads, causal, tokens in shapes:
        if time.monotonic() > until:
            keep('attention', figures, f'{options.minutes:g} minutes are over after {len(figures)} of {len(shapes)} figures')
        # as many tokens of a batch as 16k hold, as heads
        many = heads * max(1, 16384 // tokens)
        command = ['attention', '--tokens', str(tokens), '--head-dim', str(dim), '--heads', str(many)]
        figure = number(command + ([] if causal else ['--full']))
        if other:
            figure['beside'] = beside(tokens, many, dim, int(causal))
        figures.append(figure)
        print_attention(figure)
    keep('attention', figures)


def print_attention(figure):
    def rates(one):
        if 'failed' in one:
            return f"failed ({one['failed']})"
        if 'refused' in one:
            return 'refused'
        return f"{one['fwd_flop_per_s'] / 1e12:.0f} / {one['bwd_flop_per_s'] / 1e12:.0f}"
    others = ', '.join(f"{one['backend']} {rates(one)}" for one in figure.get('beside', []))
    if 'failed' in figure:
        say(f"{figure['command']}: {rates(figure)}; {others}")
    else:
        say(f"d {figure['head_dim']} {'causal' if figure['causal'] else 'full'} {figure['tokens']}: "
            f"{rates(figure)} TFLOP/s forward / backward; {others}")


def exchange(_):
    keep('exchange', [number(['exchange', '--tokens', str(tokens), '--head-dim', '128']) for tokens in BLOCK_TOKENS])


def block(_):
    figures = []
    for tokens in BLOCK_TOKENS:
        for chunk in 32, 8:
            figures.append(number(['block', '--tokens', str(tokens), '--chunk', str(chunk), *BLOCK]))
    keep('block', figures)


STAGES = {stage.__name__: stage for stage in (build, test, sanitize, roofline, attention, exchange, block)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('stage', nargs='*', help='one or more of: ' + ' '.join(STAGES))
    parser.add_argument('--minutes', type=float, default=9, help='after which the attention stage gives up (9)')
    options = parser.parse_args()
    unknown = [stage for stage in options.stage if stage not in STAGES]
    if unknown:
        parser.error(f'no such stage: {" ".join(unknown)}')
    for stage in options.stage or STAGES:
        start = time.monotonic()
        STAGES[stage](options)
        say(f'{stage}: {time.monotonic() - start:.0f} s')


if __name__ == '__main__':
    main()

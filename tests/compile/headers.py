#!/usr/bin/env python3
"""headers.py TOP [cuda] -- every header compiles alone, twice, and in two linked units, as C11 and C++17; all as CUDA; no mutable object

For each header under TOP/upipe a unit that includes it first and then again is read as C11 with all warnings as errors
(by clang, and as C23, C++17 and C++20, all of them at once); two units with all of them are compiled and linked.
Headers in cpu/ are also read for every instruction set that a compiler here has, whether this machine runs it or not:
in the full run each of them alone, else all at once. gcc makes code of everything in all of them, in the full run for
each instruction set, and no writable object or visible symbol may be there. Kernels are C++: alone with the emulator's
seams. Flags that break IEEE arithmetic are refused, with a sentence that says the mend. With the word cuda nvcc
compiles two linked units with all of them, and nothing else does: that takes long. Where CUDA or NCCL is missing, the
tests' fakes stand for their headers. What a missing compiler or library leaves out is said; it is a failure if no
compiler is found at all.
"""

import concurrent.futures
import os
import re
import shutil
import subprocess
import sys
import tempfile

WARNINGS = ['-Wall', '-Wextra', '-Wpedantic', '-Wshadow', '-Wconversion', '-Werror']
# Without optimization gcc compiles kernels as they ask, with -O3, even if nothing calls them, half a minute a unit. The
# intrinsics are macros then, with warnings of their own: what is read is read as optimized.
DROP_UNUSED = ['-O1']
READ_ONLY = ['-O1', '-fsyntax-only']
# With the macro of ThreadSanitizer kernels don't ask for -O3, which takes long.
PLAIN = ['-D__SANITIZE_THREAD__']
# Everything is emitted.
KEEP = PLAIN + ['-O0', '-w', '-fno-pic', '-fkeep-static-functions', '-fkeep-inline-functions', '-fno-toplevel-reorder']
# What net/upipe_net_threads.h asks of a host in strict C11 that includes something else first.
POSIX = ['-D_POSIX_C_SOURCE=200809L']
# Instruction sets of the headers in cpu/: flags, and the machines they are for.
SIMD = {
    '': ([], '.'),
    ' with AVX2': (['-mavx2', '-mfma'], 'x86_64|amd64'),
    ' with AVX-512': (['-mavx512f', '-mavx2', '-mfma'], 'x86_64|amd64'),
    ' with portable vectors': (['-DUPIPE_CPU_PORTABLE'], 'aarch64'),
    ' without vectors': (['-DUPIPE_CPU_SCALAR'], '.'),
}
# Folders of parts, which compile with the headers that include them alone.
PRIVATE = {'stage', 'ring', 'fpdt', 'linear', 'parts', 'latent'}
# Headers that need other projects' headers: the words that name these.
FOREIGN = {'cuda/upipe_cuda_bytes.h': 'cuda', 'cuda/upipe_cuda_device.h': 'cuda',
           'cuda/upipe_cuda_linear_bytes.h': 'cuda', 'cuda/upipe_cuda_watch.h': 'cuda', 'net/upipe_net_nccl.h': 'cuda',
           'net/upipe_net_nccl_stream.h': 'cuda', 'net/upipe_net_mpi.h': 'mpi', 'cpu/upipe_cpu_cblas.h': 'cblas'}
NVCC_PLACES = ['/usr/local/cuda/bin/nvcc', '/usr/lib/nvidia-cuda-toolkit/bin/nvcc']

# language -> (compiler, flags, suffix of its units)
HOST = {
    'C11, gcc': ('gcc', ['-std=c11'], '.c'),
    'C11, clang': ('clang', ['-std=c11'], '.c'),
    'C++17, g++': ('g++', ['-std=c++17'], '.cpp'),
}
# The next languages warn of more: there all headers are read once.
NEXT = {'C++20, g++': ('g++', '-std=c++20', '.cpp'), 'C23, gcc': ('gcc', '-std=c2x', '.c')}
# Another processor's: the headers in cpu/ alone, as the libraries of the others are this machine's.
CROSS = {'C11, gcc for aarch64': ('aarch64-linux-gnu-gcc', ['-std=c11'], '.c')}
# The build with nvcc optimizes the kernels.
NVCC_FLAGS = ['-std=c++17', '-arch=compute_80', '-Xcicc', '-O0', '-Werror=all-warnings', '-Xcompiler', '-Wall,-Wextra,-Wshadow',
              '-Wno-deprecated-gpu-targets']

FULL = bool(os.environ.get('UPIPE_FULL'))

NCCL_PLACES = ['/usr/include', '/usr/local/include', '/usr/local/cuda/include']

FIRST = '{includes}{includes}int second(void);\nint main(void)\n{{\n    return second();\n}}\n'
SECOND = '{includes}int second(void);\nint second(void)\n{{\n    return 0;\n}}\n'
# Units of a build with -DUPIPE_CPU_DECLARE: compiler, language, name, what it includes and what follows.
APART = [
    ('g++', '-std=c++17', 'table.cpp', 'upipe_cpu.c', ''),
    ('gcc', '-std=c11', 'main.c', 'upipe_cpu.h',
     'int main(void)\n{\n    upipe_ops ops;\n    upipe_cpu_ops(&ops);\n    return ops.gemm == NULL;\n}\n'),
]


def run(command):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return done.returncode == 0, done.stdout


def write_units(folder, suffix, headers):
    includes = ''.join(f'#include "upipe/{name}"\n' for name in headers)
    paths = []
    for file, text in (('first', FIRST), ('second', SECOND)):
        paths.append(os.path.join(folder, file + suffix))
        with open(paths[-1], 'w', encoding='utf-8') as out:
            out.write(text.format(includes=includes))
    return paths


def compile_pair(label, compiler, flags, suffix, headers, top):
    """Two units with these headers, compiled apart and linked. Returns (label, ok, what the compiler said)."""
    with tempfile.TemporaryDirectory() as folder:
        units = write_units(folder, suffix, headers)
        for unit in units:
            ok, said = run([compiler, *flags, '-I', top, '-c', unit, '-o', unit + '.o'])
            if not ok:
                return label, False, said
        ok, said = run([compiler, *[unit + '.o' for unit in units], '-o', os.path.join(folder, 'both'), '-lm'])
        return label, ok, said


def compile_one(label, compiler, flags, suffix, headers, top):
    """One unit that includes these headers twice."""
    with tempfile.TemporaryDirectory() as folder:
        unit = write_units(folder, suffix, headers)[0]
        ok, said = run([compiler, *flags, '-I', top, '-c', unit, '-o', unit + '.o'])
        return label, ok, said


def find_objects(label, compiler, flags, suffix, headers, top):
    """A unit with these headers has no writable object, and nothing that other units see."""
    with tempfile.TemporaryDirectory() as folder:
        unit = os.path.join(folder, 'unit' + suffix)
        with open(unit, 'w', encoding='utf-8') as out:
            out.write(''.join(f'#include "upipe/{name}"\n' for name in headers))
        ok, said = run([compiler, *flags, '-I', top, '-c', unit, '-o', unit + '.o'])
        if not ok:
            return label, False, said
        rows = [line.split()[-2:] for line in run(['nm', unit + '.o'])[1].splitlines()]
        found = [f'a mutable object: {symbol}' for kind, symbol in rows if kind in 'bBdDCsSgGuvV']
        found += [f'a symbol that other units see: {symbol}' for kind, symbol in rows if kind in 'TRW']
        return label, not found, '\n'.join(found)


def compile_apart(label, top):
    """The CPU table in a C++ unit, used by a C unit that only declares it."""
    with tempfile.TemporaryDirectory() as folder:
        objects = []
        for compiler, standard, name, included, after in APART:
            unit = os.path.join(folder, name)
            with open(unit, 'w', encoding='utf-8') as out:
                out.write(f'#include "upipe/cpu/{included}"\n{after}')
            objects.append(unit + '.o')
            ok, said = run([compiler, standard, *WARNINGS, *DROP_UNUSED, *PLAIN, '-DUPIPE_CPU_DECLARE', '-I', top, '-c', unit,
                            '-o', unit + '.o'])
            if not ok:
                return label, False, said
        symbols = subprocess.run(['nm', objects[1]], capture_output=True, text=True, check=True).stdout
        if 'upi_cpu' in symbols:
            return label, False, f'a unit that declares the table has kernels:\n{symbols}'
        ok, said = run(['g++', *objects, '-o', os.path.join(folder, 'both'), '-lm'])
        return (label, *run([os.path.join(folder, 'both')])) if ok else (label, False, said)


def compile_refused(label, compiler, flags, suffix, text, sentence, top):
    """A unit that must not compile, for this reason; without a sentence one that must."""
    with tempfile.TemporaryDirectory() as folder:
        unit = os.path.join(folder, 'unit' + suffix)
        with open(unit, 'w', encoding='utf-8') as out:
            out.write(text)
        ok, said = run([compiler, *flags, '-I', top, '-c', unit, '-o', unit + '.o'])
        return label, ok == (sentence is None) and (sentence or '') in said, said or 'compiles'


def documented_build(label, nvcc, top):
    """The documented command for several devices embeds PTX of 8.0, which every later device takes, and Hopper's own code."""
    with open(os.path.join(top, 'docs', 'cuda.md'), encoding='utf-8') as page:
        line = re.search(r'^nvcc (.*\.cu)$', page.read().replace('\\\n', ' '), re.M)
    ok, said = run([nvcc, '--dryrun', *line.group(1).split()])
    parts = ('kind=ptx,sm=80,', 'kind=elf,sm=80,', 'kind=elf,sm=90a,')
    return label, ok and all(part in said for part in parts), said


def fast_math_jobs(compiler, top):
    """Kernels, and a unit that only declares them: there a scale of NaN would pass."""
    jobs = []
    both, declared = '#include "upipe/upipe.h"\n#include "upipe/cpu/upipe_cpu.h"\n', ['-DUPIPE_CPU_DECLARE', '-fsyntax-only']
    for flag in ('-ffast-math', '-Ofast', '-ffinite-math-only'):
        for words in (declared, ['-fsyntax-only']):
            jobs.append((compile_refused, f'{compiler} {flag} {words[0]} is refused', compiler, [flag, *words], '.c', both,
                         'add -fno-finite-math-only', top))
    if compiler == 'gcc': # clang's macros do not tell
        jobs.append((compile_refused, 'associative kernels are refused', compiler,
                     ['-Ofast', '-fno-finite-math-only', '-fsyntax-only'], '.c', both, 'UPIPE_CPU_DEFINE', top))
    jobs.append((compile_refused, f'{compiler} with NaN and declared kernels', compiler,
                 ['-Ofast', '-fno-finite-math-only', '-w', *declared], '.c', both, None, top))
    return jobs


def find_flags(top):
    """Include flags by the words of FOREIGN; a word that is missing has none to offer."""
    flags = {'cuda': ['-isystem', os.path.join(top, 'tests', 'fake')]}
    found = subprocess.run(['gcc', '-E', '-x', 'c', '-'], input='#include <cblas.h>\n', capture_output=True, text=True,
                           check=False) if shutil.which('gcc') else None
    if found and found.returncode == 0:
        flags['cblas'] = []
    if shutil.which('mpicc'):
        words = subprocess.run(['mpicc', '--showme:incdirs'], stdout=subprocess.PIPE, text=True, check=False)
        if words.returncode == 0:
            # without the C++ bindings, which need MPI's libraries
            flags['mpi'] = ['-DOMPI_SKIP_MPICXX', '-DMPICH_SKIP_MPICXX']
            flags['mpi'] += [flag for place in words.stdout.split() for flag in ('-isystem', place)]
    return flags


def find_headers(top):
    found = []
    for folder, _, files in os.walk(os.path.join(top, 'upipe')):
        if os.path.basename(folder) in PRIVATE:
            continue
        found += [os.path.relpath(os.path.join(folder, name), os.path.join(top, 'upipe')) for name in files]
    return sorted(name.replace(os.sep, '/') for name in found if name.endswith('.h'))


def find_nvcc():
    """An nvcc that can compile an empty unit with the host compiler of this machine, or None."""
    for place in [shutil.which('nvcc'), *NVCC_PLACES]:
        if place and os.access(place, os.X_OK):
            with tempfile.TemporaryDirectory() as folder:
                unit = write_units(folder, '.cu', [])[0]
                if run([place, *NVCC_FLAGS, '-c', unit, '-o', unit + '.o'])[0]:
                    return place
    return None


def cuda_jobs(headers, flags_of, top):
    nvcc = find_nvcc()
    if not nvcc:
        print('skipped: headers as CUDA, as there is no nvcc that works, on the path or in its usual places')
        return []
    real = NVCC_FLAGS + flags_of.get('mpi', [])
    if not any(os.path.exists(os.path.join(place, 'nccl.h')) for place in NCCL_PLACES):
        headers = [name for name in headers if 'net/upipe_net_nccl' not in name]
        print('left out: net/upipe_net_nccl*.h as CUDA, as nccl.h is not in its usual places')
    jobs = [(compile_pair, 'CUDA, nvcc: all headers', nvcc, real, '.cu', headers, top),
            (documented_build, 'CUDA, nvcc: the documented command', nvcc, top)]
    one = '#include "upipe/cuda/upipe_cuda_rows.h"\nvoid *cast(void) { return (void *)upi_cuda_cast; }\n'
    for flag in ('--use_fast_math', '-ftz=true', '-prec-div=false'):
        jobs.append((compile_refused, f'nvcc {flag} is refused', nvcc, ['-std=c++17', '-arch=sm_80', flag], '.cu', one,
                     'without_use_fast_math', top))
    return jobs


def host_jobs(headers, flags_of, top):
    host_headers = [name for name in headers if not name.startswith('cuda/') or name in FOREIGN]
    foreign = [flag for flags in flags_of.values() for flag in flags]
    jobs = []
    for name in headers:
        if name not in host_headers and shutil.which('g++'):
            seams = [*flags_of['cuda'], '-I', os.path.join(top, 'tests'), '-DUPIPE_CUDA_SEAMS="simt/seams.h"']
            jobs.append((compile_one, f'C++17, g++, emulated: {name}', 'g++',
                         ['-std=c++17', '-fsyntax-only', '-D_GNU_SOURCE', '-Wall', '-Wextra', '-Wno-psabi', '-Werror', *seams], '.cpp',
                         [name], top))

    if shutil.which('gcc') and shutil.which('g++'):
        jobs.append((compile_apart, 'the CPU table in a unit of its own', top))
    for language, (compiler, standard, suffix) in NEXT.items():
        if shutil.which(compiler):
            jobs.append((compile_one, f'{language}: all headers', compiler,
                         [standard, *WARNINGS, *READ_ONLY, *POSIX, *foreign], suffix, host_headers, top))
    for compiler in ('gcc', 'clang'):
        if shutil.which(compiler):
            jobs += fast_math_jobs(compiler, top)
    for language, (program, standard, suffix) in (HOST | CROSS).items():
        compiler = shutil.which(program)
        if not compiler:
            print(f'left out: headers as {language}, as {program} is missing')
            continue
        machine = run([compiler, '-dumpmachine'])[1]
        # what a header lacks alone does not depend on the compiler
        for name in host_headers if program != 'clang' and suffix == '.c' else []:
            if language in CROSS and (not name.startswith('cpu/') or name in FOREIGN):
                continue
            for note, (flags, machines) in SIMD.items():
                # intrinsics take long to read as C++: there all headers at once
                if note and not (FULL and name.startswith('cpu/') and re.match(machines, machine) and suffix == '.c'):
                    continue
                flags = flags + flags_of.get(FOREIGN.get(name), [])
                jobs.append((compile_one, f'{language}: {name}{note}', compiler,
                             standard + WARNINGS + READ_ONLY + flags, suffix, [name], top))
        if FULL and suffix == '.cpp' and re.match('x86_64|amd64', machine):
            # optimized, and not read alone: g++ 12 warns of its own header where intrinsics are inlined
            jobs.append((compile_refused, 'C++17, g++: kernels of AVX-512', compiler,
                         [*standard, *WARNINGS, '-O1', *PLAIN, *SIMD[' with AVX-512'][0], '-DUPIPE_CPU_DECLARE'], suffix,
                         '#include "upipe/cpu/upipe_cpu.c"\n', None, top))
        for note, (flags, machines) in SIMD.items():
            if note and suffix == '.cpp' and re.match(machines, machine):
                jobs.append((compile_one, f'{language}: all headers{note}', compiler,
                             standard + WARNINGS + READ_ONLY + POSIX + foreign + flags, suffix, host_headers, top))
        if language == 'C11, gcc':
            for note, (flags, machines) in SIMD.items():
                if (FULL or not note) and re.match(machines, machine):
                    jobs.append((find_objects, f'objects of all headers{note}', compiler,
                                 standard + KEEP + POSIX + foreign + flags, suffix, host_headers, top))
        if language in HOST:
            jobs.append((compile_pair, f'{language}: all headers', compiler,
                         standard + WARNINGS + DROP_UNUSED + POSIX + foreign, suffix, host_headers, top))
    return jobs


def main():
    top = os.path.abspath(sys.argv[1])
    flags_of = find_flags(top)
    headers = [name for name in find_headers(top) if FOREIGN.get(name, 'cuda') in flags_of]
    if 'mpi' not in flags_of:
        print('left out: net/upipe_net_mpi.h, as there is no mpicc that tells where mpi.h is')
    if 'cblas' not in flags_of:
        print('left out: cpu/upipe_cpu_cblas.h, as cblas.h is missing')
    if sys.argv[2:] == ['cuda']:
        jobs = cuda_jobs(headers, flags_of, top)
        if not jobs:
            return 77
    else:
        jobs = host_jobs(headers, flags_of, top)

    failed = 0
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for label, ok, said in pool.map(lambda job: job[0](*job[1:]), jobs):
            if not ok:
                failed += 1
                print(f'FAILED {label}\n{said}')
    print(f'headers: {len(headers)} headers, {len(jobs)} compilations, {failed} failed')
    return 1 if failed or not headers or not jobs else 0


if __name__ == '__main__':
    sys.exit(main())

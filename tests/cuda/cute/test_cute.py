#!/usr/bin/env python3
"""test_cute.py CXX CACHE -- compiles and runs the comparison of descriptors, swizzles and fragments with CuTe's

CuTe's headers come from PyPI into CACHE, those of CUDA from beside nvcc; the rest is host code. Where either cannot be had,
a sentence says so and the exit status is 77.
"""

import glob
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile

PACKAGE = 'nvidia-cutlass==4.2.0.0'
CUDA = '/usr/local/cuda'


def leave_out(why):
    print(f'left out: the comparison with CuTe, as {why}')
    sys.exit(77)


def fetch(cache):
    """The folder of CuTe's headers."""
    place = os.path.join(cache, 'cutlass_library', 'source', 'include')
    if not os.path.isdir(place):
        pip = subprocess.run([sys.executable, '-m', 'pip', 'download', '-q', '--no-deps', '-d', cache, PACKAGE],
                             capture_output=True, text=True, check=False)
        if pip.returncode != 0:
            leave_out(f'PyPI does not give {PACKAGE}')
        with zipfile.ZipFile(glob.glob(os.path.join(cache, 'nvidia_cutlass-*.whl'))[0]) as wheel:
            wheel.extractall(cache, [name for name in wheel.namelist() if '/source/include/' in name])
    return place


def main():
    compiler, cache = sys.argv[1].split(), sys.argv[2]
    here = os.path.dirname(os.path.abspath(__file__))
    tests, top = (os.path.normpath(os.path.join(here, *['..'] * n)) for n in (2, 3))
    nvcc = shutil.which('nvcc')
    cuda = os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(nvcc))) if nvcc else CUDA, 'include')
    if not os.path.exists(os.path.join(cuda, 'cuda_runtime_api.h')):
        leave_out(f'CUDA\'s headers are not in {cuda}')
    os.makedirs(cache, exist_ok=True)
    theirs = [fetch(cache), os.path.join(cuda, 'cccl'), cuda]
    with tempfile.TemporaryDirectory() as folder:
        units = {'ours': ['-I', top, '-I', tests, '-I', os.path.join(tests, 'fake'), '-D_GNU_SOURCE',
                          '-DUPIPE_CUDA_SEAMS="simt/seams.h"'],
                 'theirs': [flag for place in theirs for flag in ('-isystem', place)]}
        for name, flags in units.items():
            subprocess.run([*compiler, '-std=c++17', '-O1', '-w', *flags, '-c', os.path.join(here, name + '.cpp'), '-o',
                            os.path.join(folder, name + '.o')], check=True)
        program = os.path.join(folder, 'cute')
        subprocess.run([*compiler, *(os.path.join(folder, name + '.o') for name in units), '-o', program, '-pthread'], check=True)
        done = subprocess.run([program], stdout=subprocess.PIPE, text=True, check=False)
        print(done.stdout.splitlines()[-1])  # CuTe says before that it cannot take addresses in shared memory
        return done.returncode


if __name__ == '__main__':
    sys.exit(main())

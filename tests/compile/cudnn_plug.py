#!/usr/bin/env python3
"""cudnn_plug.py TOP -- examples/03_plug_cudnn.cpp compiles against cuDNN's header library and cuDNN's headers of today

Of the wheels (nvidia-cudnn-frontend, nvidia-cudnn-cu13) only headers are fetched (lib/wheels.py). Without a network, or
without CUDA's own headers, the test is left out.
"""

import os
import subprocess
import sys

TOP = os.path.abspath(sys.argv[1])
sys.path.insert(0, os.path.join(TOP, 'tests', 'lib'))
import wheels  # pylint: disable=wrong-import-position

CACHE = os.path.join(os.environ.get('UPIPE_CACHE') or os.path.join(TOP, 'build', 'cache'), 'cudnn')
CUDA = '/usr/local/cuda/include'
PACKAGES = {'nvidia-cudnn-frontend': r'(?=include/)', 'nvidia-cudnn-cu13': r'nvidia/cudnn/(?=include/)'}


def newest(package):
    version, at = list(wheels.listed(package).items())[-1]
    folder = os.path.join(CACHE, f'{package}-{".".join(map(str, version))}')
    return os.path.join(wheels.fetched(folder, *at, PACKAGES[package]), 'include')


def main():
    if not os.path.exists(os.path.join(CUDA, 'cublas_v2.h')):
        print('skipped: the plug of cuDNN, as the headers of CUDA are missing')
        return 77
    try:
        folders = [newest(package) for package in PACKAGES]
    except wheels.FAILURES as error:
        print(f'skipped: the plug of cuDNN, as PyPI could not be read ({error})')
        return 77
    flags = [word for folder in (*folders, CUDA) for word in ('-isystem', folder)]
    done = subprocess.run(['g++', '-std=c++17', '-fsyntax-only', '-Wall', '-Wextra', '-Werror', '-DCUDNN_FRONTEND_SKIP_JSON_LIB',
                           '-I', TOP, *flags, os.path.join(TOP, 'examples', '03_plug_cudnn.cpp')],
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    print(done.stdout, end='')
    print(f'cudnn_plug: {" ".join(os.path.basename(os.path.dirname(folder)) for folder in folders)}, {"failed" if done.returncode else "0 failed"}')
    return 1 if done.returncode else 0


if __name__ == '__main__':
    sys.exit(main())

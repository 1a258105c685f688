#!/usr/bin/env python3
"""nccl_versions.py TOP -- upipe_net_nccl.h compiles against the header of every NCCL from 2.28 to the newest that PyPI has

Of a wheel (nvidia-nccl-cu13) only the header is fetched (lib/wheels.py). Without a network the test is left out; a header
that was fetched and does not compile is a failure. CUDA's headers are the toolkit's, or the tests' fakes.
"""

import concurrent.futures
import os
import subprocess
import sys

TOP = os.path.abspath(sys.argv[1])
sys.path.insert(0, os.path.join(TOP, 'tests', 'lib'))
import wheels  # pylint: disable=wrong-import-position

CACHE = os.path.join(os.environ.get('UPIPE_CACHE') or os.path.join(TOP, 'build', 'cache'), 'nccl')
FIRST = (2, 28)
UNIT = '#include "upipe/net/upipe_net_nccl.h"\n#include "upipe/upipe.h"\nint main(void)\n{\n    return 0;\n}\n'
FLAGS = ['-fsyntax-only', '-Wall', '-Wextra', '-Wshadow', '-Werror', '-I', TOP]


def header_of(version, address, size):
    """The folder with the version's nccl.h."""
    return wheels.fetched(os.path.join(CACHE, '.'.join(map(str, version))), address, size, r'.*/(?=nccl\.h$)')


def compiled(folder, compiler, standard, language):
    cuda = '/usr/local/cuda/include'
    if not os.path.exists(os.path.join(cuda, 'cuda_runtime_api.h')):
        cuda = os.path.join(TOP, 'tests', 'fake')
    done = subprocess.run([compiler, standard, *FLAGS, '-isystem', folder, '-isystem', cuda, '-x', language, '-'], input=UNIT,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return done.returncode == 0, done.stdout


def main():
    try:
        found = {version: at for version, at in wheels.listed('nvidia-nccl-cu13').items() if version >= FIRST}
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            folders = dict(zip(found, pool.map(lambda version: header_of(version, *found[version]), found)))
    except wheels.FAILURES as error:
        print(f'skipped: the headers of NCCL, as PyPI could not be read ({error})')
        return 77
    bad = 0
    for version, folder in sorted(folders.items()):
        for compiler, standard, language in ('gcc', '-std=gnu11', 'c'), ('g++', '-std=gnu++17', 'c++'):
            ok, said = compiled(folder, compiler, standard, language)
            if not ok:
                bad += 1
                print(f'NCCL {".".join(map(str, version))}, {compiler}:\n{said}')
    print(f'nccl_versions: {len(folders)} headers, {2 * len(folders)} compilations, {bad} failed')
    return 1 if bad or not folders else 0


if __name__ == '__main__':
    sys.exit(main())

#!/usr/bin/env python3
"""on_device.py GPU [PROGRAM...] -- runs a test program where there is a CUDA device

GPU is bench/gpu.c's program, which tells. Without a device a program is skipped (exit status 77); GPU alone then must have
ended with status 1 and a sentence of the CUDA runtime's own.
"""

import subprocess
import sys


def main():
    gpu, program = sys.argv[1], sys.argv[2:]
    there = subprocess.run([gpu, 'device'], capture_output=True, text=True, check=False)
    if there.returncode == 0:
        print(there.stdout)
        return subprocess.run(program, check=False).returncode if program else 0
    if program:
        print('left out: the CUDA tests on a device, as there is none')
        return 77
    print(there.stderr)
    return 0 if there.returncode == 1 and there.stderr.startswith('gpu: ') and '(cudaError' in there.stderr else 1


if __name__ == '__main__':
    sys.exit(main())

#!/usr/bin/env python3
"""test_wheel.py TOP -- the wheel of examples/bindings/python: pip builds it, and attention runs from what is in it alone

Where pip cannot fetch meson-python the test is left out (status 77). The kernels are those that compile fastest.
"""

import os
import sys
import tempfile
import zipfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), 'lib'))
from checks import check, end, equal, needed, other_python, run_command  # pylint: disable=wrong-import-position

RUN = """
import ctypes, os, sys
import upipe_abi
u = upipe_abi.Attention(os.path.join(sys.argv[1], 'libupipe_abi.so'), tokens=2, heads=1, head_dim=32)
v = (ctypes.c_float * 64)(*64 * [3])
o = (ctypes.c_float * 64)()
u.qkv_fwd(0, o, v, v, v)
print(*o)
"""


def main():
    pip = [sys.executable, '-m', 'pip', '--disable-pip-version-check', '-q']
    with tempfile.TemporaryDirectory() as folder:
        if run_command([*pip, 'download', '--no-deps', '-d', folder, 'meson-python']).returncode != 0:
            other_python()
            print('left out: meson-python, which pip cannot fetch')
            return 77
        done = run_command([*pip, 'wheel', '--no-deps', '--config-settings=setup-args=-Dbuildtype=plain', '-w', folder,
                            os.path.join(sys.argv[1], 'examples', 'bindings', 'python')], variables={'CFLAGS': '-O0 -DUPIPE_CPU_SCALAR'})
        needed(done.returncode == 0, f'no wheel: {done.stdout}{done.stderr}')
        wheel = [name for name in os.listdir(folder) if name.startswith('upipe-') and name.endswith('.whl')]
        equal(len(wheel), 1, f'wheels in {os.listdir(folder)}')
        with zipfile.ZipFile(os.path.join(folder, wheel[0])) as packed:
            packed.extractall(os.path.join(folder, 'site'))
        modules = [name for name in os.listdir(os.path.join(sys.argv[1], 'examples', 'bindings', 'python')) if name.endswith('.py')]
        inside = os.listdir(os.path.join(folder, 'site'))
        check(set(modules) <= set(inside), f'the wheel has {sorted(inside)}, the folder {sorted(modules)}')
        done = run_command([sys.executable, '-c', RUN, 'site'], cwd=folder, variables={'PYTHONPATH': 'site'})
        equal(done.stdout.split(), 64 * ['3.0'], f'what attention says, {done.stderr}')
    return end('wheel')


if __name__ == '__main__':
    sys.exit(main())

#!/usr/bin/env python3
"""pytorch.py oldest|newest [SCRIPT ARGUMENT...] -- the PyTorch of PyPI that the bindings are tested with

Without a script: installs it, with transformers, in build/torch/VERSION, some 6 GB (run.py calls this). With one: runs the
script on it, which is left out (status 77) where it is not installed. UPIPE_TORCH_FOLDER is another place than build/torch.
"""

import os
import shutil
import subprocess
import sys

VERSIONS = {'oldest': '2.8.0', 'newest': '2.15.0'}  # of the range that upipe_torch.py and pyproject.toml promise
BESIDE = ['transformers==5.24.0', 'accelerate==1.15.0', 'numpy']
TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def place(name):
    """Of an environment, and of the file that says what it was made of, once it is whole."""
    folder = os.path.join(os.environ.get('UPIPE_TORCH_FOLDER') or os.path.join(TOP, 'build', 'torch'), VERSIONS[name])
    return folder, os.path.join(folder, 'made_of')


def wanted(name):
    return [f'torch=={VERSIONS[name]}', *BESIDE]


def python_of(name):
    """Its Python; None where it is not whole, or of other packages."""
    folder, stamp = place(name)
    python = os.path.join(folder, 'bin', 'python')
    try:
        with open(stamp, encoding='utf-8') as file:
            return python if file.read().split() == wanted(name) and os.path.exists(python) else None
    except OSError:
        return None


def pythons(top):
    """For checks.other_python: those that the tree has installed, the newest first."""
    return [*filter(None, map(python_of, ('newest', 'oldest'))), os.path.join(top, 'build', 'bench', 'venv', 'bin', 'python')]


def install(name):
    """The status. What cannot be fetched is left out, and is no failure."""
    if python_of(name):
        return 0
    folder, stamp = place(name)
    shutil.rmtree(folder, ignore_errors=True)
    pip = [os.path.join(folder, 'bin', 'python'), '-m', 'pip', '--disable-pip-version-check', '--retries', '3']
    made = subprocess.run([sys.executable, '-m', 'venv', folder], stdout=subprocess.PIPE, text=True, check=False)
    if made.returncode != 0:
        print(f'left out: PyTorch {VERSIONS[name]}, as this Python makes no environments: install python3-venv\n{made.stdout}')
        return 0
    found = subprocess.run([*pip, 'index', 'versions', 'torch'], stdout=subprocess.PIPE, text=True, check=False).stdout
    if VERSIONS[name] not in found.replace(',', ' ').split():
        print(f'left out: PyTorch {VERSIONS[name]}, which pip does not find for this Python, or not without a network')
        return 0
    if subprocess.run([*pip, 'install', '-q', '--no-cache-dir', '--no-compile', *wanted(name)], check=False).returncode != 0:
        print(f'left out: PyTorch {VERSIONS[name]}, which pip could not install')
        return 0
    with open(stamp, 'w', encoding='utf-8') as file:
        file.write('\n'.join(wanted(name)))
    return 0


def main():
    name, *script = sys.argv[1:]
    if not script:
        return install(name)
    python = python_of(name)
    if python is None:
        print(f'left out: tests with PyTorch {VERSIONS[name]}, which is not installed in {os.path.relpath(place(name)[0], TOP)}')
        return 77
    os.environ['UPIPE_NO_OTHER_PYTHON'] = '1'
    return os.execv(python, [python, *script])


if __name__ == '__main__':
    sys.exit(main())

#!/usr/bin/env python3
"""test_setup.py TOP -- what is done without being asked: programs that tests/run.sh and examples/run.sh install, PyTorch that
the full run installs, and kernels that Meson compiles for a GPU

The scripts see a PATH with stubs alone, which write down how they are called. apt-get brings those that were missing.
"""

import os
import pty
import re
import shutil
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), 'lib'))
from checks import check, equal, load, read, run_command, run_tests, write  # pylint: disable=wrong-import-position
import pytorch  # pylint: disable=wrong-import-position

TOP = os.path.abspath(sys.argv[1])
TOOLS = ['cat', 'date', 'dirname', 'env', 'mkdir', 'mv', 'rm', 'sh', 'sleep', 'tr', 'uname']
PROGRAMS = ['gcc', 'g++', 'meson', 'ninja', 'pkg-config', 'python3', 'mpirun', 'cmake']
WITHOUT = '0 passed, 1 failed'  # how tests/run.sh ends then
INSTALL = 'apt-get update -q; {0}env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends {1}'
# What the stubs see of a run that goes on.
GOES_ON = {'tests': 'python3 TOP/tests/run.py', 'examples': 'meson setup TOP/build/run TOP'}


def stub(path, text=''):
    write(path, f'#!/bin/sh\n{text}\n')
    os.chmod(path, 0o755)


class Machine:
    """A tree with both scripts, and programs of which some are missing."""

    def __init__(self, folder, lacking, user=0, sudo=True, apt=True):
        self.top, self.bin, self.log = (os.path.join(folder, name) for name in ('tree', 'bin', 'log'))
        shutil.rmtree(folder, ignore_errors=True)
        for name in 'tests/run.sh', 'examples/run.sh', 'examples/common/install.sh':
            os.makedirs(os.path.dirname(os.path.join(self.top, name)), exist_ok=True)
            shutil.copy(os.path.join(TOP, name), os.path.join(self.top, name))
        os.makedirs(os.path.join(self.bin, 'away'))
        for name in TOOLS:
            os.symlink(shutil.which(name), os.path.join(self.bin, name))
        says = f'echo "${{0##*/}} $*" >>"{self.log}"\n'
        for name in PROGRAMS:
            # a run of examples ends with its setup
            fails = {'meson': 'exit 3', 'python3': 'case $1 in *.py) exit 5 ;; esac'}.get(name, '')
            stub(os.path.join(self.bin, 'away' if name in lacking else '', name), says + fails)
        stub(os.path.join(self.bin, 'id'), f'echo {user}')
        if sudo:
            stub(os.path.join(self.bin, 'sudo'), says + '"$@"')
        if apt:
            stub(os.path.join(self.bin, 'apt-get'),
                 says + f'case $* in install*) mv "{self.bin}/away/"* "{self.bin}"; echo fetched ;; esac')

    def run(self, script, *flags, answer=None):
        """The status, what a terminal or a pipe shows, and the calls of stubs but for those that ask what is there.
        answer: what is typed at a terminal."""
        words = ['sh', os.path.join(self.top, script, 'run.sh'), *flags]
        if answer is None:
            done = run_command(words, variables={'PATH': self.bin}, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT,
                               timeout=20)
            status, said = done.returncode, done.stdout
        else:
            status, said = self.at_terminal(words, answer)
        calls = read(self.log).decode().replace(self.top, 'TOP').split('\n')[:-1] if os.path.exists(self.log) else []
        return status, said, [call for call in calls if not call.startswith(('python3 -', 'pkg-config'))]

    def at_terminal(self, words, answer):
        ours, theirs = pty.openpty()
        os.write(ours, answer)
        with subprocess.Popen(words, env={**os.environ, 'PATH': self.bin}, stdin=theirs, stdout=theirs,
                              stderr=theirs) as process:
            os.close(theirs)
            said = b''
            try:
                while part := os.read(ours, 4096):
                    said += part
            except OSError:  # how a terminal ends whose programs have ended
                pass
        os.close(ours)
        return process.returncode, said.decode().replace('\r\n', '\n')


def installs(script, said, calls, root, packages):
    """It has shown one line and run that, and then goes on."""
    line = root + INSTALL.format(root, packages)
    equal([part.strip() for part in said.split('\n') if 'apt-get install' in part], [line], f'the line of {script}')
    want = []
    for call in line.replace('env DEBIAN_FRONTEND=noninteractive ', '').split('; '):
        want += [call.strip(), call.strip().replace('sudo ', '', 1)] if root else [call.strip()]
    seen = [call.replace('env DEBIAN_FRONTEND=noninteractive ', '') for call in calls]
    equal(seen[:-1], want, f'what {script} calls')
    check(calls[-1].startswith(GOES_ON[script]), f'{script} has not gone on: {calls}')


def leaves(script, status, said, calls, line, name):
    """It has said what to run and ended."""
    equal((status, calls), (1, []), f'what {script} does without {name}')
    check(line in said and f'missing: {name} \n' in said, f'{script} does not name {name} and {line}: {said}')


def test_without_terminal(folder):
    for script in GOES_ON:
        for user, root in (0, ''), (1000, 'sudo '):
            status, said, calls = Machine(folder + '/m', ['gcc', 'ninja'], user).run(script)
            installs(script, said, calls, root, 'gcc libc6-dev ninja-build')
            check('[Y/n]' not in said, f'{script} asks without a terminal: {said}')
            equal(status, 5 if script == 'tests' else 1, 'the status')  # of what it goes on with


def test_terminal(folder):
    for script in GOES_ON:
        for answer in b'\n', b'y\n', b'Yes\n':
            _, said, calls = Machine(folder + '/m', ['gcc', 'ninja'], 1000).run(script, answer=answer)
            installs(script, said, calls, 'sudo ', 'gcc libc6-dev ninja-build')
            equal(said.count('[Y/n]'), 1, f'questions of {script}')
            check(0 <= said.find('apt-get install') < said.find('[Y/n]'), f'{script} asks before it shows it: {said}')
        for answer in b'n\n', b'No\n', b'what\n', b'\4':  # the last is the end of the input
            status, said, calls = Machine(folder + '/m', ['gcc', 'ninja']).run(script, answer=answer)
            leaves(script, status, said, calls, INSTALL.format('', 'gcc libc6-dev ninja-build'), 'gcc ninja')
            equal(said.count('[Y/n]'), 1, f'questions of {script}')


def test_no_install(folder):
    for script in GOES_ON:
        for answer in None, b'\4':  # nothing is asked
            status, said, calls = Machine(folder + '/m', ['meson'], 1000).run(script, '--no-install', answer=answer)
            leaves(script, status, said, calls, 'sudo ' + INSTALL.format('sudo ', 'meson'), 'meson')
            equal(said.strip().split('\n')[-1] == WITHOUT, script == 'tests', f'the last line is the verdict: {said}')
            check('[Y/n]' not in said, f'{script} asks: {said}')


def test_left_out(folder):
    """What only some tests need."""
    for flags, answer in (['--no-install'], None), ([], b'n\n'):
        status, said, calls = Machine(folder + '/m', ['cmake']).run('tests', '--only', *flags, 'ring', answer=answer)
        equal((status, calls), (5, [GOES_ON['tests'] + ' --only ring']), 'what it does without cmake')
        check(INSTALL.format('', 'cmake') in said, f'it does not say how to install cmake: {said}')
        check('left out, as the programs are missing: cmake' in said, f'it does not say what it leaves out: {said}')


def test_nothing_missing(folder):
    for script in GOES_ON:
        for flags in [], ['--no-install']:
            _, said, calls = Machine(folder + '/m', []).run(script, *flags, answer=b'\4')
            equal(len(calls), 1, f'calls of {script}, {calls}')
            check(calls[0].startswith(GOES_ON[script]), f'{script} calls {calls}')
            check('missing' not in said, f'{script} says {said}')


def test_takes(folder):
    """How long it takes here is said first, or known to what says it."""
    for lacking in [], ['gcc']:
        _, said, _ = Machine(folder + '/m', lacking).run('examples', '--no-install')
        found = re.match(r'This takes about (\d+) s on this machine \(\d+ cores\)', said)
        check(found and int(found[1]) > 0, f'the first line of examples/run.sh is not how long it takes: {said}')
    machine = Machine(folder + '/m', [])
    stub(os.path.join(machine.bin, 'python3'), 'echo "$UPIPE_SLOWNESS"')
    _, said, _ = machine.run('tests')
    check(said.strip().isdecimal() and int(said) > 0, f'tests/run.sh tells run.py no slowness: {said}')
    for shell in filter(shutil.which, ('dash', 'bash')):
        done = run_command([shell, '-c', f'top={folder}; . {TOP}/examples/common/install.sh; slowness'])
        check(done.stdout.strip().isdecimal() and 10 < int(done.stdout) < 10000, f'{shell} finds a slowness of {done.stdout}')


def demonstration(folder, flaw):
    """The status and the words of examples/run.sh over programs that end at once, of which one has this flaw."""
    machine = Machine(folder + '/m', [])
    build = os.path.join(machine.top, 'build', 'run')
    os.makedirs(build + '/examples')
    write(build + '/build.ninja', '')
    write(build + '/made_of', machine.top + '\n')
    for tool in 'chmod', 'cmp', 'cp', 'ls', 'mkdir', 'nproc', 'rm', 'sed', 'tail':
        if not os.path.exists(os.path.join(machine.bin, tool)):
            os.symlink(shutil.which(tool), os.path.join(machine.bin, tool))
    # The path behind a flag, and what is written there.
    writes = 'while [ $# -gt 0 ]; do [ "$1" = --json ] && echo "$method" >"$2"; shift; done'
    stub(build + '/examples/compare', f'method=; echo compared; {writes}; exit {int(flaw == "compare")}')
    sample = '"sample, of' + (' $method' if flaw == 'sample' else '') + '"; echo the end of it'
    stub(build + '/examples/train', f'method=$2; {writes}; echo {sample}; [ "{flaw}-$method" != train-upipe ]')
    stub(os.path.join(machine.bin, 'ninja'), f'case $* in *upipe-plan*) [ {flaw or "none"} != rest ] || {{ echo no rest; exit 1; }} ;; esac')
    # The losses of a method, and pictures.
    loss = '1.5; read -r method <"$3"; echo "$method"' if flaw == 'loss' else '1.5'
    stub(os.path.join(machine.bin, 'python3'), f"""case "$*" in
-c*loss*) echo {loss} ;;
*plot_memory*) [ "{flaw}" != picture ] || exit 1 ;;
esac""")
    status, said, _ = machine.run('examples')
    return status, said


def test_demonstration(folder):
    """What fails while others run is not lost, and the methods' results are compared."""
    status, said = demonstration(folder, '')
    check(status == 0 and 'the same bits: losses' in said and 'all in' in said, f'status {status}: {said}')
    for flaw, words in (('compare', 'compare failed (checked_16_16)'), ('rest', 'no rest\nrun.sh: the build failed'),
                        ('train', 'train failed (upipe)'), ('loss', 'what the two methods have learnt is not the same bits'),
                        ('sample', 'what the two methods have learnt is not the same bits'),
                        ('picture', 'a picture could not be drawn')):
        status, said = demonstration(folder, flaw)
        check(status == 1 and words in said, f'{flaw}: status {status}: {said}')


def test_cannot_install(folder):
    for script in GOES_ON:
        for user, sudo, apt in (0, True, False), (1000, False, True):
            root = 'sudo ' if user else ''
            status, said, calls = Machine(folder + '/m', ['gcc'], user, sudo, apt).run(script, answer=b'\4')
            leaves(script, status, said, calls, root + INSTALL.format(root, 'gcc libc6-dev'), 'gcc')
            check('[Y/n]' not in said, f'{script} asks for what it cannot do: {said}')
        machine = Machine(folder + '/m', ['gcc'])
        stub(os.path.join(machine.bin, 'apt-get'), 'echo no such package >&2\nexit 100')
        status, said, calls = machine.run(script)
        leaves(script, status, said, calls, 'no such package', 'gcc')


def test_quietly(folder):
    """A command that ends at once: what says that it goes on ends too."""
    script = f'top={folder}; . {TOP}/examples/common/install.sh; for i in $(seq 200); do quietly waiting true; done'
    done = run_command(['timeout', '-s', 'KILL', '20', 'sh', '-c', script])
    equal((done.returncode, done.stdout), (0, ''), 'the status, and what commands say that say nothing')


class Toolkit:
    """An nvcc, with or without the library that the tree links; nvidia-smi lists a device or fails."""

    def __init__(self, folder, device=False, cublas=True):
        self.folder, self.build = folder, os.path.join(folder, 'build')
        shutil.rmtree(folder, ignore_errors=True)
        for name in 'bin', 'include', 'lib64':
            os.makedirs(os.path.join(folder, name))
        write(folder + '/version.txt', 'CUDA Version 12.8.0\n')
        for name in ['cudart', 'cublas'][:1 + cublas]:
            run_command([*os.environ.get('CC', 'cc').split(), '-shared', '-x', 'c', '/dev/null',
                         '-o', f'{folder}/lib64/lib{name}.so'])
        stub(folder + '/bin/nvcc')
        stub(folder + '/bin/nvidia-smi', '' if device else 'exit 9')

    def setup(self, *flags):
        """The status of Meson's setup, what its summary says of CUDA, and whether the build has the kernels."""
        done = run_command(['meson', 'setup', self.build, TOP, '-Dtests=disabled', '-Dmpi=disabled', *flags],
                           variables={'PATH': f'{self.folder}/bin:{os.environ["PATH"]}', 'CUDA_PATH': self.folder})
        says = [line.split(':', 1)[1].strip() for line in done.stdout.split('\n') if line.strip().startswith('cuda ')]
        targets = load(self.build + '/meson-info/intro-targets.json') if done.returncode == 0 else []
        return done.returncode == 0, says[:1], 'cuda_kernels' in [target['name'] for target in targets]


def test_versions(_):
    """The wheel promises what the full run tests."""
    python = os.path.join(TOP, 'examples', 'bindings', 'python')
    oldest, newest, transformers = ([int(n) for n in words.split('==')[-1].split('.')]
                                    for words in (*pytorch.VERSIONS.values(), pytorch.BESIDE[0]))
    check(f"OLDEST, NEWEST = '{oldest[0]}.{oldest[1]}', '{newest[0]}.{newest[1]}'" in read(python + '/upipe_torch.py').decode(),
          'upipe_torch.py has another range of PyTorch than tests/lib/pytorch.py')
    wheel = read(python + '/pyproject.toml').decode()
    for words in (f"'torch >= {oldest[0]}.{oldest[1]}, < {newest[0]}.{newest[1] + 1}'",
                  f"'transformers >= {transformers[0]}.{transformers[1]}, < {transformers[0] + 1}'"):
        check(words in wheel, f'pyproject.toml lacks {words}, which is what tests/lib/pytorch.py has')


def test_meson(folder):
    folder += '/toolkit'
    none, lacks = 'NO (no device here; -Dcuda=enabled compiles anyway)', 'NO (nvcc 12.8 or cuBLAS is missing)'
    equal(Toolkit(folder).setup(), (True, [none], False), 'a setup without a device')
    equal(Toolkit(folder).setup('-Dcuda=enabled'), (True, ['YES'], True), 'one that asks for CUDA')
    equal(Toolkit(folder, device=True).setup(), (True, ['YES'], True), 'one with a device')
    equal(Toolkit(folder, device=True, cublas=False).setup(), (True, [lacks], False), 'one without cuBLAS')
    equal(Toolkit(folder, cublas=False).setup('-Dcuda=enabled'), (False, [], False), 'one that asks without cuBLAS')


sys.exit(run_tests('setup', test_without_terminal, test_terminal, test_no_install, test_left_out, test_nothing_missing,
                   test_takes, test_demonstration, test_cannot_install, test_quietly, test_versions, test_meson))

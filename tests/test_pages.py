#!/usr/bin/env python3
"""test_pages.py TOP PROGRAMS TABLE -- the commands of the pages run as they stand there, and print what the pages say; code
that a page shows is its file's

A block of ```sh is a script, which runs in a folder of its own. The folder has the repository's files, the programs where
the pages have them, and a program to compile, trainer.c. A block of ```text right below is what the script prints, with
... for lines that it leaves out. Sequences and trainings are short here. PROGRAMS is the folder of train, compare and
upipe-plan, TABLE a library with the CPU's kernels.
"""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), 'lib'))
from checks import check, end, other_python, run_command  # pylint: disable=wrong-import-position
from tree import list_files, read_text  # pylint: disable=wrong-import-position

if importlib.util.find_spec('matplotlib') is None:
    other_python()
TOP, PROGRAMS, TABLE = (os.path.abspath(path) for path in sys.argv[1:4])
# What a command has -> why it does not run here. Some command has each of these; all others run.
ELSEWHERE = {
    r'sh (tests|examples)/run\.sh': 'takes minutes; what it runs are tests of their own',
    r'bench/(run\.sh|compare\.py|gpu\.py|perplexity\.py)': 'takes minutes; test_bench.py and test_planner.py run it over less',
    r'--best|best\.png': 'takes half a minute; test_planner.py has it for a small model, and its picture',
    r'^meson setup build &&': 'is the build that has made PROGRAMS',
    r'build/gcc/tests|^verdict |read_verdict\.py': 'is what the suite simt runs',
    r'tests/planted/planted\.py': 'takes minutes to hours',
    r'^(?!.*--plan).*--device cuda|\bnvcc\b|09_cuda\.o': 'needs a GPU, or nvcc',
    r'\bsrun\b|#SBATCH': 'needs Slurm',
    r'\btorchrun\b|08_nccl': 'needs a launcher or GPUs; test_world.py sets what the launcher sets',
    r'--hostfile': 'needs a cluster; test_world.py runs the loop',
    r'mpirun\.mpich': 'needs a program made with that MPI; the build mpich has the suite net',
    r'^pip install|examples/train/tokenize\.py': 'needs downloads; test_documents.py has a tokenizer',
    r'/dev/shm/vader_segment': 'removes what programs have left that run beside the test',
}
# What a command has -> whether the machine has what it needs.
NEEDS = {
    r'\bmpi(cc|run)\b': shutil.which('mpirun') and os.path.exists(os.path.join(PROGRAMS, 'train_mpi')),
    r'\bcmake\b': shutil.which('cmake'),
    r'\bopenssl\b': shutil.which('openssl'),
    r'plot_plan\.py': importlib.util.find_spec('matplotlib'),
}
# Steps, samples, long sequences and the compilation of kernels take seconds.
TRAIN = r'((?:^|/)train(?:_mpi)?) (?!.*--(?:plan|help))'
SHORTER = [
    (TRAIN + '(?!.*--steps)', r'\1 --steps 1 '),
    (TRAIN, r'\1 --sample 1 '),
    (r'((?:^|/)(?:train|train_mpi|compare) (?!.*--plan).*--tokens) \w+', r'\1 64'),
    (r'--steps \d+', '--steps 1'),
    (r'(--resume .*--steps) 1', r'\1 2'),
    (r'--warmup \d+', '--warmup 0'),
    (r'cc -O2 -march=native (?=-c upipe/cpu/upipe_cpu\.c)', 'cc -DUPIPE_CPU_SCALAR '),
    (r'cc -O2 -march=native(.*?\.c)\b', lambda words: f'cc -DUPIPE_CPU_DECLARE{words.group(1)} {shlex.quote(TABLE)}'),
    (r'^python3 ', lambda _: shlex.quote(sys.executable) + ' '),
]
# Ranks may outnumber the cores here, and their user may be root.
VARIABLES = {'OMPI_MCA_rmaps_base_oversubscribe': 1, 'OMPI_ALLOW_RUN_AS_ROOT': 1, 'OMPI_ALLOW_RUN_AS_ROOT_CONFIRM': 1}


def commands_of(block):
    """Without comments, each whole: of a loop the lines to its end."""
    out, command = [], ''
    for line in re.sub(r'(?m) +# .*$', '', block.replace('\\\n', ' ')).splitlines():
        command += line + '\n'
        if subprocess.run(['sh', '-n', '-c', command], capture_output=True, check=False).returncode == 0:
            out, command = out + [command.strip()], ''
    check(command == '', f'a command has no end: {command}')
    return out


def make_folder(folder, source):
    for name in os.listdir(TOP):
        if name == 'upipe':  # CMake installs no link
            shutil.copytree(os.path.join(TOP, name), os.path.join(folder, name))
        elif not name.startswith(('build', '.')):
            os.symlink(os.path.join(TOP, name), os.path.join(folder, name))
    for build in 'build', 'build/run':
        os.mkdir(os.path.join(folder, build))
        os.symlink(PROGRAMS, os.path.join(folder, build, 'examples'))
    shutil.copy(os.path.join(TOP, 'examples', source), os.path.join(folder, 'trainer.c'))


def run(place, commands, prints):
    script = '\n'.join(['set -e', *commands])
    for pattern, shorter in SHORTER:
        script = re.sub(pattern, shorter, script, flags=re.M)
    with tempfile.TemporaryDirectory() as folder:
        make_folder(folder, '08_mpi.c' if 'mpicc' in script else '00_trainer.c')
        done = run_command(['sh', '-c', script], cwd=folder, variables={
            **VARIABLES, 'PATH': PROGRAMS + ':' + os.environ['PATH'], 'HOME': folder, 'TMPDIR': folder, 'PREFIX': folder + '/installed'})
    check(done.returncode == 0, f'{place}: {script}: {done.returncode}: {done.stdout[-500:]}{done.stderr[-1000:]}')
    if prints:
        lines = '.*'.join(map(re.escape, re.split(r'^\.\.\.\n', prints, flags=re.M)))
        check(re.fullmatch(lines, done.stdout, re.S), f'{place} does not show what {script} prints:\n{done.stdout}')


def check_shown(name, text):
    """A block of ```c PATH is a part of that file, which may stand less deep."""
    for shown in re.finditer(r'^```\w+ (\S+)\n(.*?)^```$', text, re.M | re.S):
        source = read_text(os.path.join(TOP, shown.group(1)))
        lines, part = ([line.strip() for line in whole.split('\n')] for whole in (source, shown.group(2).strip()))
        check('\n'.join(['', *part, '']) in '\n'.join(['', *lines, '']), f'{name} shows what is not in {shown.group(1)}: {part[0]}')


def main():
    elsewhere = set()
    for name in (name for name in list_files(TOP) if name.endswith('.md')):
        text = read_text(os.path.join(TOP, name))
        check_shown(name, text)
        for block in re.finditer(r'^```sh\n(.*?)^```\n+(?:```text\n(.*?)^```$)?', text, re.M | re.S):
            here = []
            for command in commands_of(block.group(1)):
                reasons = {pattern for pattern in ELSEWHERE if re.search(pattern, command)}
                elsewhere |= reasons
                lacks = [pattern for pattern, there in NEEDS.items() if not there and re.search(pattern, command)]
                if lacks and not reasons:
                    print(f'left out, as it needs what is missing: {command}')
                here += [] if reasons or lacks else [command]
            if here:
                run(f'{name}:{text.count(chr(10), 0, block.start()) + 1}', here, block.group(2))
    check(elsewhere == set(ELSEWHERE), f'no command has {set(ELSEWHERE) - elsewhere}')
    return end('pages')


if __name__ == '__main__':
    sys.exit(main())

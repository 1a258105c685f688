"""ranks.py -- what the tests of a team of Python's processes share: their packages, the library, a launcher, refusals

    from ranks import LIBRARY, launch, refused
    equal(launch(4, body), {0: 0, 1: 0, 2: 0, 3: 0}, 'what the ranks return')

The script's arguments are LIBRARY TOP. Where no Python here has the packages it is left out (status 77).
"""

import multiprocessing
import os
import sys
import time
from multiprocessing.connection import wait

from checks import check, equal, needed, other_python
from launch import free_port
from pytorch import pythons

# torch.compile would start processes beside each rank, which import PyTorch once more.
os.environ |= {'TRANSFORMERS_OFFLINE': '1', 'HF_HUB_OFFLINE': '1', 'OMP_NUM_THREADS': '1', 'TRANSFORMERS_VERBOSITY': 'critical',
               'TORCHINDUCTOR_COMPILE_THREADS': '1'}
try:
    import torch
    import transformers
    if int(transformers.__version__.split('.', maxsplit=1)[0]) < 5 or not transformers.utils.is_accelerate_available():
        raise ImportError('rope_parameters came with 5, and Trainer needs accelerate')
except ImportError:
    other_python(*pythons(sys.argv[2]))
    print('left out: teams of processes, as no Python here has transformers 5, accelerate and PyTorch')
    sys.exit(77)

LIBRARY = os.path.abspath(sys.argv[1])
sys.path.insert(0, os.path.join(sys.argv[2], 'examples', 'bindings', 'python'))
VERSIONS = f'transformers {transformers.__version__}, torch {torch.__version__}'


def launch(ranks, body, *arguments):
    """{rank: what body has returned} of processes with torchrun's variables. They are forked from this one, which has the packages
    already, and must have no other thread: that may hold a lock, as of libc's resolver, which nobody releases in the fork. Each
    sets its own number of threads first. Where one fails, those that run 30 s after the last that has ended are killed."""
    needed(len(os.listdir('/proc/self/task')) == 1, 'a process with several threads is forked')
    fork, port = multiprocessing.get_context('fork'), free_port()

    def run(rank):
        os.environ |= {'RANK': str(rank), 'LOCAL_RANK': str(rank), 'WORLD_SIZE': str(ranks), 'LOCAL_WORLD_SIZE': str(ranks),
                       'MASTER_ADDR': 'localhost', 'MASTER_PORT': str(port)}
        pipes[rank][1].send(body(*arguments))

    pipes = [fork.Pipe(False) for _ in range(ranks)]
    processes = [fork.Process(target=run, args=(rank,)) for rank in range(ranks)]
    for process in processes:
        process.start()
    while running := [process for process in processes if process.exitcode is None]:
        if not wait([process.sentinel for process in running], 30 if any(process.exitcode for process in processes) else None):
            for process in running:
                process.kill()
    equal([process.exitcode for process in processes], [0] * ranks, 'how the ranks end')
    return {rank: reads.recv() if reads.poll() else None for rank, (reads, _) in enumerate(pipes)}


def refused(words, body):
    """At once."""
    began = time.monotonic()
    try:
        body()
    except RuntimeError as error:
        check(words in str(error), f'"{error}" does not say "{words}"')
        check(time.monotonic() - began < 5, f'"{words}" takes {time.monotonic() - began:.1f} s')
    else:
        check(False, f'not refused: "{words}"')

"""ranks.py -- what the tests of a team of Python's processes share: their packages, the library, a launcher, refusals

    from ranks import LIBRARY, launch, refused
    equal(launch(4, body), {0: 0, 1: 0, 2: 0, 3: 0}, 'what the ranks return')

The script's arguments are LIBRARY TOP. Where no Python here has the packages it is left out (status 77).
"""

import os
import sys
import time

from checks import check, other_python
from pytorch import pythons

os.environ |= {'TRANSFORMERS_OFFLINE': '1', 'HF_HUB_OFFLINE': '1', 'OMP_NUM_THREADS': '1', 'TRANSFORMERS_VERBOSITY': 'critical'}
try:
    import torch
    import transformers
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch
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
    """{rank: what body has returned} of processes that are forked from this one, which has the packages already. Each sets its
    own number of threads first: where this one has, those of a first backward may end it."""
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=ranks, run_id='test', rdzv_backend='c10d',
                          rdzv_endpoint='localhost:0', start_method='fork', monitor_interval=0.1, max_restarts=0)
    return elastic_launch(config, body)(*arguments)


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

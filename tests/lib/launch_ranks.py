"""launch_ranks.py -- the ranks of a program as processes over the fake's NCCL, with the variables that torchrun gives them"""

import os
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

HANGS = 600  # seconds: far more than any of them takes


def run_ranks(words, hosts, own=None, cwd=None, **variables):
    """[(status, stdout, stderr)] of all ranks, a letter of hosts for each: ranks of one machine have the same one.

    own: {rank: more variables}. What a process leaves on its devices is status 3.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks, until = [], time.monotonic() + HANGS
        for r, host in enumerate(hosts):
            env = {'RANK': r, 'WORLD_SIZE': len(hosts), 'LOCAL_RANK': hosts[:r].count(host), 'FAKE_HOST': host, 'FAKE_CLEAN': 1,
                   'MASTER_ADDR': os.path.join(folder, 'meet'), **variables, **(own or {}).get(r, {})}
            ranks.append(subprocess.Popen([str(word) for word in words], env={**os.environ, **{name: str(env[name]) for name in env}},
                                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding='utf-8', cwd=cwd))
        try:
            with ThreadPoolExecutor(len(ranks)) as readers:  # one that says much waits for its reader, and others for it
                said = list(readers.map(lambda rank: rank.communicate(timeout=max(until - time.monotonic(), 0.1)), ranks))
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        return [(rank.returncode, *texts) for rank, texts in zip(ranks, said)]

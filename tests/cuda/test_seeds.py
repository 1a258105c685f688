#!/usr/bin/env python3
"""test_seeds.py PROGRAM... -- results of the emulated kernels have the same bits under every schedule

Each program prints a digest of all that it computed; with other orders of threads, blocks, copies and streams it must be
the same, and no check may fail. The second run leaves out what has the same outcome where the digest is the same. All take
a share of their shapes; with UPIPE_FULL=1 every one. The probe, which takes no time, runs under more orders.
"""

import os
import re
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'lib'))
from checks import run_command  # pylint: disable=wrong-import-position

ORDERS = [{'SIMT_SEED': '5', 'FAKE_SEED': '11'},
          {'SIMT_SEED': '3', 'SIMT_EAGER': '1', 'FAKE_EAGER': '1', 'SIMT_THREADS': '1', 'TEST_DIGEST': '1'}]
MORE = [{'SIMT_SEED': str(seed), 'SIMT_EAGER': str(eager)} for seed in range(8) for eager in range(2)]


def main():
    failed = 0
    for program in sys.argv[1:]:
        seen = {}
        for order in ORDERS + (MORE if 'probe' in os.path.basename(program) else []):
            done = run_command([program], None, {'TEST_BRIEF': 1, **order})
            digest = re.search(r'digest ([0-9a-f]+)', done.stdout)
            if done.returncode != 0 or not digest:
                print(f'{os.path.basename(program)} {order}: status {done.returncode}\n{done.stderr}')
                failed += 1
                continue
            seen.setdefault(digest.group(1), []).append(order)
        if len(seen) > 1:
            print(f'{os.path.basename(program)}: other bits under another schedule: {seen}')
            failed += 1
        print(f'{os.path.basename(program)}: {" ".join(seen)}')
    return 1 if failed or len(sys.argv) == 1 else 0


if __name__ == '__main__':
    sys.exit(main())

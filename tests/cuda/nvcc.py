#!/usr/bin/env python3
"""nvcc.py NVCC ARGUMENTS -- runs nvcc, and fails too where ptxas only remarks that it serialized wgmma

Every product then waits for the one before: a remark by ptxas (C7510 to C7519), which no flag makes an error. Among its
reasons is code that touches registers of a product under way, so this stands for correctness too.
"""

import re
import subprocess
import sys

done = subprocess.run(sys.argv[1:], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
sys.stdout.write(done.stdout)
if done.returncode == 0 and re.search(r'C751\d|wgmma\S* instructions are serialized', done.stdout):
    sys.exit('nvcc.py: ptxas serialized wgmma: that is an error here')
sys.exit(done.returncode)

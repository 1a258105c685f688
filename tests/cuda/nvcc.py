#!/usr/bin/env python3
"""nvcc.py NVCC ARGUMENTS -- runs nvcc, and fails too where ptxas only remarks that it serialized wgmma

Such a kernel computes the same, but every product waits for the one before: a remark by ptxas (C7510 to C7514), which
no flag makes an error.
"""

import re
import subprocess
import sys

done = subprocess.run(sys.argv[1:], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
sys.stdout.write(done.stdout)
if done.returncode == 0 and re.search(r'wgmma\S* instructions are serialized', done.stdout):
    sys.exit('nvcc.py: ptxas serialized wgmma: that is an error here')
sys.exit(done.returncode)

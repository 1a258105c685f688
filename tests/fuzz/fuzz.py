#!/usr/bin/env python3
"""fuzz.py PROGRAM CORPUS.txt -- runs a fuzzer of libFuzzer from a corpus of this folder

For a quarter of UPIPE_FUZZ_SECONDS, as there are four, and until UPIPE_FUZZ_MIN inputs have run; ten times the seconds
for these is a failure, and so is an input that takes five seconds. A failing input is printed as a line for the corpus.
"""

import os
import re
import subprocess
import sys
import tempfile

LIMIT = 5  # seconds of one input; milliseconds where nothing else runs and nothing is instrumented


def decoded(line):
    """The bytes of a line, as fuzz.h decodes it."""
    return re.sub(rb'\\(\\|x[0-9a-f]{2})', lambda found: b'\\' if found[1] == b'\\' else bytes([int(found[1][1:], 16)]), line)


def encoded(data):
    return ''.join('\\\\' if byte == 92 else chr(byte) if 32 <= byte < 127 else f'\\x{byte:02x}' for byte in data)


def main():
    program, corpus = os.path.abspath(sys.argv[1]), sys.argv[2]
    seconds = max(1, int(os.environ.get('UPIPE_FUZZ_SECONDS', '4')) // 4)
    least, runs = int(os.environ.get('UPIPE_FUZZ_MIN', '1000')), 0
    memory = '/dev/shm' if os.access('/dev/shm', os.W_OK) else None  # the inputs are many, and some are written to files
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        found = os.path.join(folder, 'corpus')
        os.mkdir(found)
        with open(corpus, 'rb') as lines:
            inputs = [decoded(line.rstrip(b'\n')) for line in lines if line[:1] not in (b'#', b'\n')]
        for i, data in enumerate(inputs):
            with open(os.path.join(found, str(i)), 'wb') as out:
                out.write(data)
        for _ in range(10):
            done = subprocess.run([program, f'-max_total_time={seconds}', f'-timeout={LIMIT}', '-max_len=2000', '-len_control=0',
                                   '-artifact_prefix=' + os.path.join(folder, 'failed-'), found],
                                  cwd=folder, env={**os.environ, 'TMPDIR': folder}, capture_output=True, text=True,
                                  errors='replace', check=False)
            for name in os.listdir(folder):
                if name.startswith('failed-'):
                    with open(os.path.join(folder, name), 'rb') as one:
                        print('input:', encoded(one.read()))
            if done.returncode != 0:
                print(done.stderr[-8000:])
                return 1
            runs += int(re.search(r'Done (\d+) runs', done.stderr).group(1))
            if runs >= least:
                print(f'reached: {runs} inputs from a corpus of {len(inputs)} in {seconds} s (at least {least})')
                return 0
    print(f'only {runs} inputs in {10 * seconds} s, at least {least} count')
    return 1


if __name__ == '__main__':
    sys.exit(main())

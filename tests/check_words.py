#!/usr/bin/env python3
"""check_words.py TOP -- the field's words: none of the words that this project once invented for them

Looks at identifiers, flags, JSON keys and messages of the code, and at the text of the pages. docs/testing.md has the
table of words. Prints one line a breach and exits non-zero if there is one.
"""

import os
import re
import subprocess
import sys

# Parts of identifiers, between underscores: what to say instead.
PARTS = {
    'room': 'buffer, scratch, capacity', 'rooms': 'buffers', 'lane': 'side stream', 'lanes': 'side streams',
    'take': 'alloc', 'give': 'free', 'takes': 'allocs', 'gives': 'frees', 'exchange': 'all_to_all, transfer',
    'exchanges': 'transfers', 'exchanged': 'transferred', 'visit': 'fetch', 'visits': 'fetches', 'visitor': 'fetched',
    'visitors': 'fetched', 'parked': 'offloaded', 'park': 'offload', 'parks': 'offloads', 'spans': 'uneven',
    'ragged': 'uneven', 'gain': 'norm_weight', 'gains': 'norm_weights', 'dgain': 'dweight', 'fingerprint': 'hash',
    'docs': 'cu_seqlens', 'gq': 'dq', 'gk': 'dk', 'gv': 'dv', 'gkv': 'dkv', 'gx': 'dx', 'gy': 'dy', 'gout': 'dout',
    'gsinks': 'dsinks', 'gwq': 'dwq', 'gwk': 'dwk', 'gwv': 'dwv', 'gwo': 'dwo',
}
# In messages, flags, keys and pages.
WORDS = re.compile(
    r'\b(rooms?|lanes?|line of execution|second line|exchang(?:e|es|ed|ing)|(?:go|goes|come|comes|came|way) home|visits?|'
    r'visitors?|parked|ragged|gains?|fingerprints?|gq|gk|gv|gx|gout|gsinks|give up|gives up|gave up)\b')
MODES = re.compile(r'\bUPIPE_(?:RING_)?(?:SHIFT|GATHER|SPANS|ORDER)\b')
# The lanes of a vector or a warp have this name in the field, and so has C11's atomic operation.
LANES = re.compile(r'^(upipe/cpu/|upipe/cuda/|tests/simt/|tests/cuda/|tests/test_simd_lanes\.c|tests/test_attn\.c|'
                   r'tests/test_gemm\.c|tests/lib/|tests/compile/|tests/meson\.build|tests/run\.(py|sh)|'
                   r'docs/(kernels|kernels_cpu|testing|results\w*|numerics|backends|config|benchmarks)\.md|bench/)')
FOREIGN = re.compile(r'atomic_compare_exchange|cudaStreamCapture|docs/|--room|gained|again')
SKIPPED = re.compile(r'^(examples/data/|docs/images/|bench/results/|tests/golden/two|tests/check_words\.py|LICENSE)')
CODE = ('.c', '.h', '.cpp', '.cu', '.inc')
TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|//[^\n]*|/\*.*?\*/|[A-Za-z_]\w*', re.S)


def listed(top):
    run = subprocess.run(['git', '-C', top, 'ls-files'], capture_output=True, text=True, check=False)
    if run.returncode == 0 and run.stdout:
        return run.stdout.split('\n')[:-1]
    return [os.path.relpath(os.path.join(folder, file), top) for folder, _, files in os.walk(top) for file in files
            if not os.path.relpath(folder, top).startswith(('build', '.git'))]


def allowed(name, word):
    return word in ('lane', 'lanes') and LANES.match(name) is not None


def identifier(name, word):
    """What to say instead of a part of an identifier."""
    if MODES.search(word):
        return 'p2p, all-gather, uneven, in order'
    for part in word.lower().split('_'):
        if part in PARTS and not allowed(name, part) and not FOREIGN.search(word):
            return PARTS[part]
    return None


def sentence(name, text):
    for found in WORDS.finditer(FOREIGN.sub(' ', text)):
        if not allowed(name, found.group(1)):
            return found.group(1)
    return None


def check(report, name, text):
    if name.endswith(CODE):
        for found in TOKEN.finditer(text):
            word, line = found.group(0), text.count('\n', 0, found.start()) + 1
            if word.startswith(('/*', '//')):
                continue
            if word[0] in '"\'':
                wrong = sentence(name, word)
                if wrong:
                    report(name, line, f'a message or a name says "{wrong}"')
                continue
            instead = identifier(name, word)
            if instead:
                report(name, line, f'{word}: say {instead}')
    elif name.endswith(('.py', '.md')):
        for line, words in enumerate(text.split('\n'), 1):
            for word in re.findall(r'[A-Za-z_]\w*_\w*', words):
                instead = identifier(name, word)
                if instead:
                    report(name, line, f'{word}: say {instead}')
            wrong = sentence(name, words)
            if wrong:
                report(name, line, f'"{wrong}" is none of the field\'s words')


def main():
    top = os.path.abspath(sys.argv[1])
    breaches = files = 0

    def report(name, line, said):
        nonlocal breaches
        breaches += 1
        print(f'{name}:{line}: {said}')

    for name in listed(top):
        path = os.path.join(top, name)
        if SKIPPED.match(name) or not os.path.isfile(path):
            continue
        with open(path, encoding='utf-8', errors='replace') as source:
            text = source.read()
        files += 1
        check(report, name, text)
    print(f'words: {files} files, {breaches} breaches')
    return 1 if breaches or not files else 0


if __name__ == '__main__':
    sys.exit(main())

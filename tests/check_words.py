#!/usr/bin/env python3
"""check_words.py TOP -- the field's words: none of those that this project once invented for them, and one meaning a word

Reads identifiers, comments, messages, flags and keys of C and Python, and every line of shell scripts, build files and
pages. The tables below have the words and what to say instead. Ordinary verbs of English ("a call takes 3 s", "this gives
NaN") are no breach where they are prose; a program's names do not take, give, want, wish, speak, hush or linger. Prints
one line a breach and exits non-zero if there is one.
"""

import io
import os
import re
import sys
import tokenize

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), 'lib'))
from tree import Report, texts  # pylint: disable=wrong-import-position

# Parts of identifiers, between underscores: what to say instead.
PARTS = {
    'room': 'buffer, scratch, capacity', 'rooms': 'buffers', 'lane': 'side stream', 'lanes': 'side streams',
    'take': 'alloc', 'give': 'free', 'takes': 'allocs', 'gives': 'frees', 'exchange': 'all_to_all, transfer',
    'exchanges': 'transfers', 'exchanged': 'transferred', 'visit': 'fetch', 'visits': 'fetches', 'visitor': 'fetched',
    'visitors': 'fetched', 'parked': 'offloaded', 'park': 'offload', 'parks': 'offloads',
    'ragged': 'uneven', 'gain': 'norm_weight', 'gains': 'norm_weights', 'dgain': 'dweight', 'fingerprint': 'hash',
    'docs': 'cu_seqlens', 'gq': 'dq', 'gk': 'dk', 'gv': 'dv', 'gkv': 'dkv', 'gx': 'dx', 'gy': 'dy', 'gout': 'dout',
    'gsinks': 'dsinks', 'gwq': 'dwq', 'gwk': 'dwk', 'gwv': 'dwv', 'gwo': 'dwo',
    # programs do not speak
    'speak': 'is_root, report', 'speaks': 'is_root, report', 'hush': 'mute', 'wish': 'request', 'wishes': 'requests',
    'want': 'need, expected', 'wants': 'needs', 'wanted': 'requested', 'linger': 'flush', 'lingers': 'flushes',
    'say': 'report, text', 'says': 'reason, text', 'said': 'reported', 'tell': 'broadcast, report', 'tells': 'reports',
    'told': 'reported',
}
# Whole identifiers with another meaning: a step is a turn of a loop, a stride is between neighbours in memory.
NAMES = {
    re.compile(r'(?:[nhqkvoabcy]|d[qkv]|dout|lse|delta|dq_sum|sums|grad|row|head|lane|pair|src|dst|depth|b_depth)_step'):
        'a stride, as in n_stride',
    re.compile(r'UPIPE_(?:RING_)?(?:SHIFT|GATHER|SPANS|ORDER)'): 'P2P, ALL_GATHER, UNEVEN, IN_ORDER',
}
# In prose: comments, messages, flags, keys and pages.
WORDS = re.compile(
    r'\b(rooms?|lanes?|line of execution|second line|exchang(?:e|es|ed|ing)|(?:go|goes|come|comes|came|way) home|'
    r'visit(?:s|ed|ing|ors?)?|parked|ragged|gains?|fingerprints?|gq|gk|gv|gx|gout|gsinks|giv(?:e|es|ing) up|gave up|'
    r'(?:a|the|its|their) prints?|documents? (?:of|in|borders?|boundar\w+|masks?)|'
    r'speaks?|hush(?:es|ed)?|wish(?:es)?|linger(?:s|ed)?)\b', re.I)
# The lanes of a vector or a warp have this name in the field.
LANES = re.compile(r'^(CONTRIBUTING\.md|upipe/cpu/|upipe/cuda/|tests/planted/|tests/simt/|tests/cuda/|tests/test_simd_lanes\.c|tests/test_attn\.c|'
                   r'tests/test_gemm\.c|tests/lib/|tests/compile/|tests/meson\.build|tests/run\.(py|sh)|'
                   r'docs/(api|kernels|kernels_cpu|testing|results\w*|numerics|backends|cuda|config|benchmarks)\.md|bench/)')
# A test compares what it got with what it wants, and says what is wrong.
TESTS = re.compile(r'^tests/')
SPOKEN = {'want', 'wants', 'wanted', 'say', 'says', 'said', 'tell', 'tells', 'told'}
# Other projects' names, and words that look like those above.
FOREIGN = re.compile(r'atomic_compare_exchange|SO_LINGER|docs/|--room|np\.take|(?:documents?|documented) in\b')
SKIPPED = re.compile(r'^(examples/data/|docs/images/|bench/results/|tests/golden/two|tests/check_words\.py|LICENSE)')
C_CODE = ('.c', '.h', '.cpp', '.cu', '.cuh', '.inc')
TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|//[^\n]*|/\*.*?\*/|[A-Za-z_]\w*', re.S)


def allowed(name, word):
    return (word.lower() in ('lane', 'lanes') and LANES.match(name)) or \
        (word in SPOKEN and TESTS.match(name))


def identifier(name, word):
    """What to say instead of an identifier."""
    for pattern, instead in NAMES.items():
        if pattern.fullmatch(word):
            return instead
    if not FOREIGN.search(word):
        for part in word.lower().split('_'):
            if part in PARTS and not allowed(name, part):
                return PARTS[part]
    return None


class Reader:
    """Goes through a file and reports what is wrong."""

    def __init__(self, report, name):
        self.report, self.name = report, name

    def word(self, line, word):
        instead = identifier(self.name, word)
        if instead:
            self.report(self.name, line, f'{word}: say {instead}')

    def prose(self, line, text):
        """Words, and the identifiers that prose names."""
        for number, words in enumerate(text.split('\n'), line):
            for found in WORDS.finditer(FOREIGN.sub(' ', words)):
                if not allowed(self.name, found.group(1)):
                    self.report(self.name, number, f'"{found.group(1)}" is none of the field\'s words')
            for word in re.findall(r'[A-Za-z]\w*_\w*', words):
                self.word(number, word)

    def c(self, text):
        for found in TOKEN.finditer(text):
            word, line = found.group(0), text.count('\n', 0, found.start()) + 1
            if word[0] in '"\'/':
                self.prose(line, word)
                if re.fullmatch(r'"[a-z]+"', word): # a key, a flag, a tag
                    self.word(line, word[1:-1])
            else:
                self.word(line, word)

    def python(self, text):
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in (tokenize.COMMENT, tokenize.STRING):
                self.prose(token.start[0], token.string)
            elif token.type == tokenize.NAME and not FOREIGN.search(token.line[max(0, token.start[1] - 3):token.end[1]]):
                self.word(token.start[0], token.string)


def main():
    report, files = Report(), 0
    for name, text in texts(os.path.abspath(sys.argv[1])):
        if text is None or SKIPPED.match(name):
            continue
        files += 1
        reader = Reader(report, name)
        if name.endswith(C_CODE):
            reader.c(text)
        elif name.endswith('.py'):
            reader.python(text)
        else:
            reader.prose(1, text)
    print(f'words: {files} files, {report.count} breaches')
    return 1 if report.count or not files else 0


if __name__ == '__main__':
    sys.exit(main())

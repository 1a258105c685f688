#!/usr/bin/env python3
"""test_gpt2.py PLAIN WITH_UPIPE SOURCE -- the example host: losses and samples of both forms, and the lines that UPipe adds

Every team and chunk must give the plain form's losses, of steps and of validations, within the rounding of f32, and its
sample; Ulysses and UPipe of one team give the same bits.
"""

import os
import re
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), 'lib'))
from checks import check, end, run_command  # pylint: disable=wrong-import-position

MOST_LINES = 26
STEPS, SAMPLED = 5, 6
RUNS = [(1, 0), (1, 2), (1, 4), (2, 0), (2, 4), (4, 0)]  # ranks, chunk; with 4 ranks UPipe is Ulysses


def trained(*command):
    """Loss and validation loss of each step, and the sample's tokens."""
    done = run_command(command, 60)
    done.check_returncode()
    *steps, sample = done.stdout.splitlines()
    check((len(steps), len(sample.split())) == (STEPS, SAMPLED), f'{command}: {done.stdout}')
    return [tuple(map(float, line.split())) for line in steps], sample


def added(path):
    """Lines of code, without blanks and comments, that only the form with UPipe has."""
    with open(path, encoding='utf-8') as source:
        text = re.sub(r'/\*.*?\*/', lambda found: re.sub(r'[^\n]', '', found.group(0)), source.read(), flags=re.S)
    count, inside = 0, False
    for line in text.split('\n'):
        if re.match(r'\s*#\s*ifdef UPIPE', line):
            inside = True
        elif re.match(r'\s*#\s*(else|endif)', line):
            inside = False
        elif inside and line.strip() not in ('', '{', '}'):
            count += 1
    return count


def main():
    plain, with_upipe, source = sys.argv[1:]
    lines = added(source)
    check(0 < lines <= MOST_LINES, f'UPipe adds {lines} lines; at most {MOST_LINES}')
    (want, sample), same = trained(plain), {}
    check(all(late < early for early, late in zip(want[0], want[-1])), f'the plain form does not learn: {want}')
    check(want[0][0] != want[0][1] and len(set(sample.split())) > 1, f'validation and sample say nothing: {want} {sample}')
    for ranks, chunk in RUNS:
        got, made = trained(with_upipe, ranks, chunk)
        check(all(abs(a - b) < 2e-6 for ours, plain_s in zip(got, want) for a, b in zip(ours, plain_s)),
              f'C {ranks} U {chunk}: losses {got}, not {want}')
        check(made == sample, f'C {ranks} U {chunk}: the sample {made}, not {sample}')
        check(same.setdefault(ranks, got) == got, f'C {ranks} U {chunk}: other bits than another chunk')
    return end('gpt2')


if __name__ == '__main__':
    sys.exit(main())

#!/usr/bin/env python3
"""compare.py OLD NEW [--threshold PERCENT] -- two files of a benchmark's numbers, case by case

Prints a table in Markdown of the cases that are in both. A rate is compared as its share of the peak that was measured
beside it, where both lines have one: clocks and neighbours change both. Times are compared as they are.

Exit status: 0; 1 if a case is worse by more than the threshold (5 %), or if there is nothing to compare; 2 for wrong
usage.
"""

import argparse
import sys

import common


def key(case):
    return tuple((name, case[name]) for name in common.CASE if name in case)


def values(old, new):
    """(name, old, new, change in percent, more is better) of everything measured in both."""
    for name, sign in common.BETTER.items():
        if not (old.get(name) and new.get(name)):
            continue
        was, now = old[name], new[name]
        if name == 'gflops' and old.get('peak_gflops') and new.get('peak_gflops'):
            name, was, now = '% of peak', 100 * was / old['peak_gflops'], 100 * now / new['peak_gflops']
        yield name, was, now, 100 * (now / was - 1), sign


def positive(text):
    value = float(text)
    if not 0 <= value < float('inf'):
        raise argparse.ArgumentTypeError(f'{text} is no percentage')
    return value


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('old', metavar='OLD')
    parser.add_argument('new', metavar='NEW')
    parser.add_argument('--threshold', type=positive, default=5, metavar='PERCENT', help='what is no change (5)')
    options = parser.parse_args()
    try:
        (old_header, old), (new_header, new) = (common.read_lines(path) for path in (options.old, options.new))
    except (OSError, ValueError) as error:
        common.fail(error)
    before = {key(case): case for case in old}
    shared = [case for case in new if key(case) in before]
    if not shared:
        common.fail(f'{options.old} and {options.new} have no case in common')
    if old_header['machine'] != new_header['machine']:
        common.log(f'not the same machine: {old_header["machine"]}; {new_header["machine"]}')
    left = len(old) + len(new) - 2 * len(shared)
    if left:
        common.log(f'left out: {left} cases that are in one file alone')
    names = [name for name in common.CASE if any(name in case for case in shared)]
    rows, worse = [], 0
    for case in shared:
        for name, was, now, change, sign in values(before[key(case)], case):
            bad = sign * change < -options.threshold
            worse += bad
            rows.append([*(case.get(part, '') for part in names), name, f'{was:.4g}', f'{now:.4g}',
                         f'{change:+.1f} %' + (' worse' if bad else '')])
    common.print_table([*names, 'measured', 'old', 'new', 'change'], rows)
    if worse:
        common.fail(f'{worse} worse by more than {options.threshold:g} %')
    return 0


if __name__ == '__main__':
    sys.exit(main())

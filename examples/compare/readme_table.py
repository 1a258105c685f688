#!/usr/bin/env python3
"""readme_table.py NUMBERS... README -- writes README's table of one attention block

NUMBERS are what compare wrote with --json, ulysses and upipe in each. The table is what stands in README
between "| | Ulysses" and the next empty line.
"""

import json
import re
import sys

MIB = 2**20


def columns(path):
    """A heading and the numbers of each method of a file."""
    with open(path, encoding='utf-8') as source:
        numbers = json.load(source)
    config, methods = numbers['config'], {method['name']: method for method in numbers['methods']}
    first = methods['ulysses']
    for name in ('ulysses', 'upipe'):
        yield f'{config["heads"]}/{config["kv_heads"]}', config['unit_bytes'], first, methods[name]


def sent(method):
    return [sum(way[i] for way in method['sent_bytes'].values()) / MIB for i in (0, 1)]


def cells(heads, unit, first, method):
    name = 'Ulysses' if method is first else 'UPipe'
    peak = max(method['peak_bytes'].values())
    if peak != max(method['plan_bytes'].values()):
        sys.exit(f'readme_table.py: {name} {heads}: a peak of {peak} bytes is not the plan\'s')
    same = [what for what in ('out', 'dx', 'dw') if method[f'same_bits_{what}']]
    return [f'{name}, {heads} heads', f'{peak:,}', f'{peak / unit:.2f}',
            f'{method["intermediate_bytes_fwd"] / unit:.2f}',
            'the same' if method is not first and sent(method) == sent(first) else
            '{:.2f} / {:.2f} MiB'.format(*sent(method)),
            '{:.2f} / {:.2f}'.format(method['seconds_fwd'], method['seconds_bwd']),
            '' if method is first else 'the same' if len(same) == 3 else 'the same in ' + ', '.join(same) if same else 'other']


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    *paths, readme = sys.argv[1:]
    rows = ['', 'peak of a rank, bytes', 'peak of a rank, units', 'Q, K, V buffers of the forward, units',
            'sent forward / backward', 'seconds forward / backward', 'bits of out, dX, dW']
    table = [[row] for row in rows]
    for path in paths:
        for column in columns(path):
            for row, cell in zip(table, cells(*column)):
                row.append(cell)
    lines = [re.sub(' +', ' ', '| ' + ' | '.join(row) + ' |') for row in table]
    lines.insert(1, '|' + '---|' * len(table[0]))
    with open(readme, encoding='utf-8') as source:
        text = source.read()
    text, count = re.subn(r'^\| \| Ulysses, .*?\n\n', lambda _: '\n'.join(lines) + '\n\n', text, flags=re.M | re.S)
    if count != 1:
        sys.exit(f'readme_table.py: {count} tables in {readme} begin with "| | Ulysses"')
    with open(readme, 'w', encoding='utf-8') as out:
        out.write(text)


if __name__ == '__main__':
    main()

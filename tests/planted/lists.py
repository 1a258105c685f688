"""lists.py -- lists of planted bugs: what they say, and where in the code they belong

    file [program]               a file, and of a kernel also the test that must fail. For all bugs below
    what bug it is               a line
    = what else it says          for those who know what it is
    - the code as it is          one or more lines, blanks and line ends taken as one; found exactly once
    + the code with the bug      none, one or more lines
"""

import re

HEADING = re.compile(r'(\S+\.(?:h|c|cpp|py))(?: (\w+))?')


class Broken(Exception):
    """A list, or the tree, is not as it should be."""


class Bug:
    def __init__(self, number, file, program, says):
        self.number, self.file, self.program, self.says = number, file, program, says
        self.old, self.new, self.verdict = '', '', ''


def read_list(path, first=1, kind=Bug):
    """The bugs of a file, numbered from `first` on."""
    bugs, below = [], None
    with open(path, encoding='utf-8') as source:
        lines = [line.strip() for line in source if line.strip() and not line.startswith('#')]
    for line in lines:
        heading = HEADING.fullmatch(line)
        if heading:
            below = heading.groups()
        elif line[0] not in '-+=' and below:
            bugs.append(kind(first + len(bugs), *below, line))
        elif line[0] == '=' and bugs and not bugs[-1].old:
            bugs[-1].verdict = line[1:].strip()
        elif line[0] == '-' and bugs and not bugs[-1].new:
            bugs[-1].old = ' '.join([*bugs[-1].old.split(), *line[1:].split()])
        elif line[0] == '+' and bugs and bugs[-1].old:
            bugs[-1].new = ' '.join([*bugs[-1].new.split(), *line[1:].split()])
        else:
            raise Broken(f'{path}: no planted bug: {line}')
    for bug in bugs:
        if not bug.old:
            raise Broken(f'{path}: no code of {bug.file}: {bug.says}')
    return bugs


def place(text, bug):
    """Where a file has the code that the bug changes: (start, end)."""
    found = list(re.finditer(r'\s+'.join(re.escape(word) for word in bug.old.split()), text))
    if len(found) != 1:
        raise Broken(f'{bug.file}, {bug.says}: "{bug.old}" is there {len(found)} times')
    return found[0].span()

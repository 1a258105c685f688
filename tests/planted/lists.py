"""lists.py -- lists of planted bugs: what they say, and where in the code they belong

    file [program]               a file, and of a kernel also its test: cuda_<program>. For all bugs below
    what bug it is               a line; behind "race: " it is for cuda_<program>_race
    = what else it says          for those who know what it is
    - the code as it is          one or more lines, blanks and line ends taken as one; found exactly once. What stands
                                 behind " ... " is only there to be found
    + the code with the bug      none, one or more lines
"""

import re

HEADING = re.compile(r'(\S+\.(?:h|c|cpp|py))(?: (\w+))?')


class Broken(Exception):
    """A list, or the tree, is not as it should be."""


class Bug:
    def __init__(self, file, program, says):
        self.file, self.program, self.says = file, program, says
        self.test = f'cuda_{program}' + '_race' * says.startswith('race: ') if program else ''
        self.old, self.new, self.verdict = '', '', ''


def read_list(path):
    bugs, below = [], None
    with open(path, encoding='utf-8') as source:
        lines = [line.strip() for line in source if line.strip() and not line.startswith('#')]
    for line in lines:
        heading = HEADING.fullmatch(line)
        if heading:
            below = heading.groups()
        elif line[0] not in '-+=' and below:
            bugs.append(Bug(*below, line))
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
    code, behind = (r'\s+'.join(map(re.escape, part.split())) for part in f'{bug.old} ... '.split(' ... ')[:2])
    found = list(re.finditer(rf'({code})\s*{behind}', text))
    if len(found) != 1:
        raise Broken(f'{bug.file}, {bug.says}: "{bug.old}" is there {len(found)} times')
    return found[0].span(1)

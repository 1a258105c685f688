#!/usr/bin/env python3
"""check_api.py TOP [--print] -- docs/api.md lists every public function, with the first sentence of its comment

The page is printed from the headers of upipe/: --print writes it to standard output. Without it, prints one line for each
function without a comment, the first line of the page that is out of date, and each line of docs/upgrade.sed that replaces
what is still there, or by what is not; and exits non-zero if there is one.
"""

import itertools
import os
import re
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), 'lib'))
from csource import code, functions  # pylint: disable=wrong-import-position
from tree import Report, list_files, read_text  # pylint: disable=wrong-import-position

PAGE, UPGRADE = 'docs/api.md', 'docs/upgrade.sed'
TITLE = """# Public functions

Every public function of the library, by header, with the first sentence of its comment. The comment in the header has the
shapes, the units and the errors. A program includes `upipe/upipe.h`, and the headers of the backends that it uses. Types
are described in the same headers. The [glossary](glossary.md) explains the words.

`check_api.py . --print > docs/api.md` (in `tests`) prints this page.
"""
# Headers that users include come first; what stands in a folder follows them.
FOLDERS = ('', 'cpu', 'cuda', 'net')
BETWEEN = re.compile(r'(?:#[^\n]*|extern "C" \{|template <[^\n]*>)\s*$')


def comment_before(source, start):
    """The comment that ends where a definition begins, without its stars."""
    before = source[:start].rstrip()
    while BETWEEN.search(before):
        before = BETWEEN.sub('', before).rstrip()
    found = re.search(r'/\*((?:(?!\*/).)*)\*/$', before, re.S)
    return re.sub(r'^ \*(?: |$)', '', found.group(1), flags=re.M).strip() if found else ''


def sentence(comment, name=''):
    """The first sentence; "name --" before it is left out. A line that is indented by more than a name's begins fields."""
    named = re.match(r'(?:[\w, \n]*\b%s\b[\w, \n]*) -- ' % name, comment)
    text = comment[named.end():] if named else comment
    lines = text.split('\n')
    prose = [lines[0]]
    for line in lines[1:]:
        if not line.strip() or (re.match(r' {2}', line) and not (named and line.startswith(' ' * named.end()))):
            break
        prose.append(line.strip())
    text = ' '.join(prose)
    return re.match(r'.*?(?:\.(?= )|$)', text).group(0).rstrip('.: ')


def page(top, report):
    text = TITLE
    headers = [name for name in list_files(top) if name.endswith('.h') and os.path.dirname(name)[len('upipe/'):] in FOLDERS and name.startswith('upipe/')]
    headers.sort(key=lambda name: (FOLDERS.index(os.path.dirname(name)[len('upipe/'):]), name))
    for header in headers:
        source = read_text(os.path.join(top, header))
        rows = []
        for function in functions(code(source)):
            if function.name.startswith('upipe_'):
                first = sentence(comment_before(source, function.start), function.name)
                if not first:
                    report(header, function.name, 'has no comment')
                rows.append('| `%s` | %s |\n' % (function.name, first.replace('|', '\\|')))
        if rows:
            about = re.match(r'/\* \S+ -- (.*?)(?: {2,}.*)?$', source, re.M).group(1)
            text += f'\n## {header[len("upipe/"):]}: {about}\n\n| function | what it does |\n| --- | --- |\n' + ''.join(rows)
    return text


def check_upgrade(top, report):
    """What hosts replace is gone, and what takes its place is there."""
    headers = [name for name in list_files(top) if name.startswith('upipe/')]
    words = set(re.findall(r'\w+', ' '.join(code(read_text(os.path.join(top, name))) for name in headers)))
    for number, line in enumerate(read_text(os.path.join(top, UPGRADE)).splitlines(), 1):
        found = re.fullmatch(r's([#/])(?:\\b)?(.+?)(?:\\b)?\1(.+)\1g?', line)
        there = set(headers) if line.startswith('s#') else words
        if not line.startswith('#') and (not found or found.group(2) in there or found.group(3) not in there):
            report(UPGRADE, number, f'replaces what is there, or by what is not: {line}')


def main(top, *option):
    report = Report()
    text = page(top, report)
    if option:
        sys.stdout.write(text)
        return 0
    lines = itertools.zip_longest(read_text(os.path.join(top, PAGE)).split('\n'), text.split('\n'))
    for number, (is_there, wanted) in enumerate(lines, 1):
        if is_there != wanted:
            report(PAGE, number, f'not what "python3 tests/check_api.py . --print > {PAGE}" prints: '
                                 f'it is {is_there!r}, not {wanted!r}')
            break
    check_upgrade(top, report)
    print(f'api: {text.count("| `")} functions, {report.count} breaches')
    return report.count > 0


if __name__ == '__main__':
    sys.exit(main(*sys.argv[1:]))

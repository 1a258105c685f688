#!/usr/bin/env python3
"""check_text.py TOP -- what every text file of the project keeps to

No notes to self, no paths of somebody's machine, no trailing blanks, a newline at the end; C files as clang-format
leaves them; a comment right above every public function; code shown in a page (```c PATH) is the file's,
line by line; paragraphs of pages in 120 columns.
Prints one line a breach and exits non-zero if there is one.
"""

import os
import re
import shutil
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), 'lib'))
from tree import Report, read_text, texts  # pylint: disable=wrong-import-position

# Spelled in halves, so that this file passes its own test.
NOTES = re.compile(r'\b(' + '|'.join(['TO' 'DO', 'FIX' 'ME', 'XX' 'X', 'HA' 'CK']) + r')\b')
PATHS = re.compile(r'(?<![\w.$})~])/(' + '|'.join(['wo' 'rk', 'tm' 'p', 'ro' 'ot', 'ho' 'me', 'Us' 'ers']) + ')/')
FORMATTED = ('.c', '.h', '.cpp', '.cu', '.cuh')
# The tree is laid out by this release; others break lines elsewhere.
FORMAT_RELEASE = '14'
# Foreign text, kept letter for letter.
VERBATIM = {'LICENSE'}
COLUMNS = 120
# Pages that a program prints, and the list of changes, have longer lines.
LONG_LINES = {'CHANGELOG.md', 'docs/api.md', 'docs/models.md', 'docs/paper.md'}
PUBLIC = re.compile(r'UPIPE_API\s[^;({]*?\b(upipe_\w+)\(')


def check_lines(report, name, text):
    if text and not text.endswith('\n'):
        report(name, text.count('\n') + 1, 'no newline at the end')
    if text.endswith('\n\n'):
        report(name, text.count('\n'), 'an empty line at the end')
    for number, line in enumerate(text.split('\n'), 1):
        if line != line.rstrip():
            report(name, number, 'blanks at the end of the line')
        found = NOTES.search(line)
        if found:
            report(name, number, f'a note to self: {found.group(0)}')
        found = PATHS.search(line)
        if found:
            report(name, number, f'a path of one machine: {found.group(0)}')


def check_shown(report, top, name, text):
    for shown in re.finditer(r'^```\w+ (\S+)\n(.*?)^```$', text, re.M | re.S):
        number = text.count('\n', 0, shown.start()) + 1
        try:
            # a part of a file may stand less deep
            text_of, part = ('\n'.join(['', *(line.strip() for line in whole.split('\n')), ''])
                             for whole in (read_text(os.path.join(top, shown.group(1))), shown.group(2).strip()))
            if part not in text_of:
                report(name, number, f'what is shown is not the text of {shown.group(1)}')
        except OSError:
            report(name, number, f'shows {shown.group(1)}, which is not there')


def check_columns(report, name, text):
    """Of paragraphs: tables, blocks and code between words are not broken."""
    code = False
    for number, line in enumerate(text.split('\n'), 1):
        code ^= line.lstrip().startswith('```')
        if len(line) > COLUMNS and not code and not line.startswith('|'):
            report(name, number, f'{len(line)} columns, at most {COLUMNS}')
        if not code and line.replace('```', '').count('`') % 2:
            report(name, number, 'code that is broken over two lines')


def check_comments(report, name, text):
    lines = text.split('\n')
    for number, line in enumerate(lines):
        if not line.startswith('UPIPE_API'):
            continue
        found = PUBLIC.match('\n'.join(lines[number:number + 3]))
        if not found:
            continue
        above = lines[number - 1].strip() if number else ''
        if not above.endswith('*/') or 'clang-format' in above or re.match(r'/\*\s*-+', above):
            report(name, number + 1, f'{found.group(1)} has no comment right above it')


def check_format(report, top, names):
    for program in (f'clang-format-{FORMAT_RELEASE}', 'clang-format'):
        if shutil.which(program):
            said = subprocess.run([program, '--version'], capture_output=True, text=True, check=False).stdout
            if re.search(rf'version {FORMAT_RELEASE}\.', said):
                break
    else:
        print(f'left out: the layout of C files, as clang-format {FORMAT_RELEASE} is not installed')
        return
    run = subprocess.run([program, '--dry-run', '--Werror', '--style=file', *names], cwd=top, capture_output=True, text=True,
                         check=False)
    wrong = {}  # the first place of each file
    for name, number in re.findall(r'^(\S+?):(\d+):\d+: ', run.stderr, re.M):
        wrong.setdefault(name, int(number))
    for name, number in wrong.items():
        report(name, number, 'not as clang-format leaves it')
    if run.returncode != 0 and not wrong:
        report(program, 1, run.stderr)


def main():
    top = os.path.abspath(sys.argv[1])
    report, names = Report(), []
    for name, text in texts(top):
        names.append(name)
        if text is None:
            report(name, 1, 'neither UTF-8 nor binary')
        elif name not in VERBATIM:
            check_lines(report, name, text)
            if name.startswith('upipe' + os.sep):
                check_comments(report, name, text)
            if name.endswith('.md'):
                check_shown(report, top, name, text)
                if name not in LONG_LINES:
                    check_columns(report, name, text)
    check_format(report, top, [name for name in names if name.endswith(FORMATTED)])
    print(f'text: {len(names)} files, {report.count} breaches')
    return 1 if report.count or not names else 0


if __name__ == '__main__':
    sys.exit(main())

"""csource.py -- what a header of upipe/ defines and includes, read from its text

The tree is laid out by clang-format: at file scope a function's braces stand alone at the beginning of a line, and so does
the brace that ends a struct. That is all the C that the tests of structure need to know.

    text = code(source)             # comments, strings and characters are blanks; places stay
    for f in functions(text):       # f.name, f.start, f.end
        ...
    private(text)                   # {name: offset}: what a header defines that begins with upi_ or UPI_
"""

import re
from collections import namedtuple

Function = namedtuple('Function', 'name start end')

LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|//[^\n]*|/\*.*?\*/', re.S)
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(["<])([^">\n]+)[">]', re.M)
DIRECTIVE = re.compile(r'^[ \t]*#(?:[^\n]*\\\n)*[^\n]*', re.M)
PRIVATE = re.compile(r'\b(?:upi|UPI)_\w+')


def blank(text):
    return re.sub(r'[^\n]', ' ', text)


def without_comments(source):
    """Comments become blanks; string and character literals stay."""
    return LITERAL.sub(lambda found: blank(found.group(0)) if found.group(0)[0] == '/' else found.group(0), source)


def code(source):
    """Comments become blanks, and what strings and characters say; the name in an #include stays."""
    included = [found.span(2) for found in INCLUDE.finditer(source)]

    def word(found):
        text = found.group(0)
        if text[0] == '/':
            return blank(text)
        if any(start <= found.start() + 1 <= end for start, end in included):
            return text
        return text[0] + ' ' * (len(text) - 2) + text[-1]

    return LITERAL.sub(word, source)


def line_of(text, offset):
    return text.count('\n', 0, offset) + 1


def functions(text):
    """Every function that code() of a header defines at file scope."""
    text = DIRECTIVE.sub(lambda found: blank(found.group(0)), text)
    found = []
    for brace in re.finditer(r'^\{$', text, re.M):
        before = text[:brace.start()].rstrip()
        if not before.endswith(')'):
            continue
        depth = 0
        for opening in range(len(before) - 1, -1, -1):
            depth += {')': 1, '(': -1}.get(before[opening], 0)
            if depth == 0:
                break
        name = re.search(r'\w+$', before[:opening])
        closing = re.compile(r'^\}', re.M).search(text, brace.end())
        if name is None or closing is None:
            continue
        start = max(before.rfind(mark, 0, opening) for mark in ';}{') + 1
        start += len(text[start:opening]) - len(text[start:opening].lstrip())
        found.append(Function(name.group(0), start, closing.end()))
    return found


def private(text):
    """Functions, types, enumerators, macros and constants that begin with upi_ or UPI_, and where."""
    found = {}

    def note(name, offset):
        if PRIVATE.fullmatch(name):
            found.setdefault(name, offset)

    for define in re.finditer(r'^[ \t]*#[ \t]*define[ \t]+(\w+)', text, re.M):
        note(define.group(1), define.start(1))
    for function in functions(text):
        note(function.name, function.start)
    plain = DIRECTIVE.sub(lambda directive: blank(directive.group(0)), text)
    for kind in re.finditer(r'\b(struct|union|enum|class)\s*(\w*)\s*\{', plain):
        note(kind.group(2), kind.start())
        if kind.group(1) == 'enum':
            body = plain[kind.end():plain.index('}', kind.end())]
            for name in re.finditer(r'(?:^|,)\s*(\w+)', body):
                note(name.group(1), kind.end() + name.start(1))
    for name in re.finditer(r'^(?:\}|typedef\b[^;{}]*|typedef\b[^;{}]*\{[^{}]*\})\s*\b(\w+)\s*;', plain, re.M):
        note(name.group(1), name.start(1))
    for name in re.finditer(r'^typedef\b[^;{}]*?\b(\w+)\)?\([^;{}]*\);', plain, re.M):
        note(name.group(1), name.start(1))
    for name in re.finditer(r'^(?:template <[^;{}]*>\s*)?(?:static|using|constexpr|inline)\b[^;{}()=]*?\b(\w+)(?:\[[^\]]*\])*\s*=',
                            plain, re.M):
        note(name.group(1), name.start(1))
    return found

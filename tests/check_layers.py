#!/usr/bin/env python3
"""check_layers.py TOP -- the library's structure: who includes whom, and what headers may say

Arrows point down only: a core header includes lower layers of the table below, and its own parts, which are private and
lie in a folder; a part includes its owner, other parts of it, and layers below; a backend includes the core and its own
folder; the core names no backend. No header prints or exits; core headers do not touch the heap either. Lengths have
ceilings. Prints one line a breach and exits non-zero if there is one.
"""

import os
import re
import sys

LAYERS = [
    ['upipe_base.h'],
    ['upipe_shard.h', 'upipe_mem.h', 'upipe_ops.h', 'upipe_comm.h'],
    ['upipe_plan.h', 'upipe_attn.h', 'upipe_check.h', 'upipe_tile.h', 'upipe_side_stream.h', 'upipe_unwind.h',
     'upipe_agree.h'],
    ['upipe_bytes.h', 'upipe_sent.h', 'upipe_reduce.h'],
    ['upipe_a2a.h', 'upipe_zero.h'],
    ['upipe_ring.h'],
    ['upipe_layer.h'],
    ['upipe_fpdt.h', 'upipe_qkv.h'],
    ['upipe_dry.h'],
    ['upipe.h'],
]
LAYER = {name: level for level, names in enumerate(LAYERS) for name in names}
# Folders of private parts, and the header that includes them.
PARTS = {'layer': 'upipe_layer.h', 'fpdt': 'upipe_fpdt.h', 'plan': 'upipe_plan.h', 'ring': 'upipe_ring.h',
         'tile': 'upipe_tile.h', 'zero': 'upipe_zero.h'}
BACKENDS = ['cpu', 'cuda', 'net']
# Lines with comments. The attention block can be read: in few lines, few functions, and none of them long.
CORE_LINES, BACKEND_LINES = 500, 900
LAYER_LINES, LAYER_FUNCTIONS, FUNCTION_LINES = 300, 70, 80

CORE_SYSTEM = {'assert.h', 'float.h', 'limits.h', 'math.h', 'stdarg.h', 'stddef.h', 'stdint.h', 'stdio.h', 'string.h'}
# A pool that marks its free bytes for AddressSanitizer needs that tool's header.
CORE_SYSTEM_OF = {'upipe_mem.h': {'sanitizer/asan_interface.h'}}
# Headers of other projects, and the only places that may include them: a host without that backend has none of them.
FOREIGN = {
    'mpi.h': ('net/upipe_net_mpi.h',),
    'nccl.h': ('net/upipe_net_nccl_stream.h',),
    'cuda_runtime.h': ('cuda/',),
    'cuda_runtime_api.h': ('cuda/', 'net/upipe_net_nccl_stream.h', 'net/upipe_net_peer_memory.h'),
    'cublas_v2.h': ('cuda/',),
}

BACKEND_NAME = re.compile(r'(?i)(?<![a-z0-9])(cpu|cuda|cublas|nccl|mpi|cblas|openblas|avx2?|pthread|thrd)(?![a-z])')
PRINTS = 'printf vprintf puts putchar fputs fputc putc fwrite perror vfprintf fprintf'.split()
LEAVES = 'exit _exit _Exit quick_exit abort atexit signal raise system longjmp'.split()
HEAP = 'malloc calloc realloc free aligned_alloc posix_memalign strdup alloca mmap'.split()


def call_of(names):
    """Matches a call or declaration of one of these functions, not a member of that name."""
    return re.compile(r'(?<![\w.*])(?<!->)(' + '|'.join(names) + r')\s*\(')


def strip_comments(text):
    """Comments become blanks, so that line numbers stay; string and character literals survive."""
    pattern = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|//[^\n]*|/\*.*?\*/', re.S)

    def blank(match):
        word = match.group(0)
        return re.sub(r'[^\n]', ' ', word) if word[0] == '/' else word

    return pattern.sub(blank, text)


def strip_strings(text):
    return re.sub(r'"(?:\\.|[^"\\\n])*"', '""', text)


class Report:
    def __init__(self):
        self.count = 0

    def __call__(self, name, line, sentence):
        self.count += 1
        print(f'upipe/{name}:{line}: {sentence}')


def owner(name):
    """The header that a private part belongs to; the header itself for all others."""
    return PARTS.get(os.path.dirname(name), name)


def check_include(report, name, line, form, target):
    folder = os.path.dirname(name)
    core = owner(name) in LAYER
    if form == '<':
        if core and target not in CORE_SYSTEM | CORE_SYSTEM_OF.get(name, set()):
            report(name, line, f'the core includes <{target}>: only standard C headers without state')
        homes = FOREIGN.get(target)
        if homes and not name.startswith(homes):
            report(name, line, f'<{target}> belongs in {" and ".join(homes)} alone')
        return
    path = os.path.normpath(os.path.join(folder, target))
    if path.startswith('..'):
        report(name, line, f'"{target}" leaves the folder')
    elif core:
        if owner(path) not in LAYER:
            report(name, line, f'the core includes "{target}", which is not a core header')
        elif owner(path) != owner(name) and (path != owner(path) or LAYER[path] >= LAYER[owner(name)]):
            report(name, line, f'"{target}" is not below "{owner(name)}" (layer {LAYER[owner(name)]})')
    elif os.path.dirname(path) not in ('', folder):
        report(name, line, f'a backend in {folder}/ includes "{target}": only the core and its own folder')


def check_source(report, name, text):
    core = owner(name) in LAYER
    lines = text.count('\n')
    ceiling = LAYER_LINES if name == 'upipe_layer.h' else CORE_LINES if core else BACKEND_LINES
    if lines > ceiling:
        report(name, lines, f'{lines} lines, at most {ceiling}: split it')
    if not core and '/' not in name:
        report(name, 1, 'a core header without a layer: add it to the table in tests/check_layers.py')
    if not core and '/' in name and name.split('/')[0] not in BACKENDS:
        report(name, 1, f'an unknown folder, not one of {BACKENDS + list(PARTS)}')
    public = re.findall(r'^UPIPE_API\s[^;({]*?\b(upipe_\w+)\(|^typedef struct (upipe_\w+)', text, re.M)
    if core and '/' in name and public:
        report(name, 1, f'a private part with something public, {"".join(public[0])}: it belongs in {owner(name)}')
    if core and '/' not in name and not public and name != 'upipe.h':
        report(name, 1, 'nothing public at the top level: a private part lies in a folder')

    code = strip_comments(text)
    for number, line in enumerate(code.split('\n'), 1):
        include = re.match(r'\s*#\s*include\s*([<"])([^>"]+)[>"]', line)
        if include:
            check_include(report, name, number, include.group(1), include.group(2))
            continue
        if core:
            found = BACKEND_NAME.search(line)
            if found:
                report(name, number, f'the core names a backend: {found.group(1)}')
        line = strip_strings(line)
        prints = [word for word in PRINTS if not (word == 'fprintf' and name == 'upipe_mem.h')]
        for names, verb in ((prints, 'prints'), (LEAVES, 'ends or hijacks the program'), (HEAP, 'uses the heap')):
            if verb == 'uses the heap' and not core:
                continue
            for word in call_of(names).findall(line):
                report(name, number, f'{word}() {verb}')
        for word in re.findall(r'\b(stdin|stdout|stderr|getenv|setenv|errno)\b', line):
            if core or word != 'errno':
                report(name, number, f'{word}: state of the process')


def check_functions(report, sources):
    """upipe_layer.h and its parts: how many functions they define, and how long each is."""
    count = 0
    for name in sorted(sources):
        if owner(name) != 'upipe_layer.h':
            continue
        for found in re.finditer(r'^UPIPE_API\s[^;{]*?\b(\w+)\([^;{]*\)\n\{\n(.*?)^\}', sources[name], re.M | re.S):
            count += 1
            lines = found.group(0).count('\n') + 1
            if lines > FUNCTION_LINES:
                report(name, sources[name].count('\n', 0, found.start()) + 1,
                       f'{found.group(1)} has {lines} lines, at most {FUNCTION_LINES}')
    if not 0 < count <= LAYER_FUNCTIONS:
        report('upipe_layer.h', 1, f'{count} functions with its parts, at most {LAYER_FUNCTIONS}')


def check_cycles(report, includes):
    """Backends and parts have no table of layers: within a folder it is enough that there is no circle. A part includes
    its owner to compile alone, which is no circle."""
    state = {}

    def follow(name, trail):
        if state.get(name) == 'done':
            return
        if name in trail:
            report(name, 1, 'includes itself: ' + ' -> '.join(trail[trail.index(name):] + [name]))
            return
        for other in includes.get(name, []):
            follow(other, trail + [name])
        state[name] = 'done'

    for name in includes:
        follow(name, [])


def main():
    top = os.path.abspath(sys.argv[1])
    report = Report()
    names, includes, sources = [], {}, {}
    for folder, _, files in os.walk(os.path.join(top, 'upipe')):
        for file in files:
            path = os.path.join(folder, file)
            name = os.path.relpath(path, os.path.join(top, 'upipe')).replace(os.sep, '/')
            if not file.endswith(('.h', '.cuh')):
                report(name, 1, 'not a header')
                continue
            names.append(name)
    for name in sorted(names):
        with open(os.path.join(top, 'upipe', name), encoding='utf-8') as source:
            text = source.read()
        check_source(report, name, text)
        sources[name] = text
        found = re.findall(r'^\s*#\s*include\s*"([^"]+)"', strip_comments(text), re.M)
        paths = [os.path.normpath(os.path.join(os.path.dirname(name), target)) for target in found]
        includes[name] = [path for path in paths if path != owner(name)]
    check_functions(report, sources)
    check_cycles(report, includes)
    print(f'layers: {len(names)} headers, {report.count} breaches')
    return 1 if report.count or not names else 0


if __name__ == '__main__':
    sys.exit(main())

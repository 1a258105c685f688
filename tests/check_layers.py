#!/usr/bin/env python3
"""check_layers.py TOP -- the library's structure: who includes whom, what stands where, and what headers may say

Arrows point down only: a public header includes those before it in the list below. What it has of private parts lies in
a folder. Its door, which is a public header, includes them behind the types that they use, and they include nothing. A
part has private names alone, which begin with upi_. A public function stands in the header that its first word names.
Private names of the core are the library's: examples and benchmarks use none. Those of a backend are its folder's. A
backend includes the core and its own folder; the core names no backend. No header prints or exits; core headers do not
touch the heap either. What a program reads has no real number by printf, whose point is the locale's: such formats stand
in sentences alone, and nothing sets a locale. Prints one line a breach and exits non-zero if there is one.
"""

import os
import re
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), 'lib'))
from csource import INCLUDE, PRIVATE, code, line_of, private, without_comments
from tree import Report, list_files, read_text

# Public headers, from the lowest to the highest, and the first words of the functions that stand in them.
HEADERS = {
    'upipe_base.h': 'status fail dtype view offset max cut mul hash',
    'upipe_mem.h': 'mem alloc free phase',
    'upipe_ops.h': 'ops bias side',
    'upipe_comm.h': 'comm msg',
    'upipe_reduce.h': 'reduce all scalars',
    'upipe_attn.h': 'attn',
    'upipe_plan.h': 'plan shard layout',
    'upipe_a2a.h': 'a2a slots',
    'upipe_ring.h': 'ring attend',
    'upipe_layer.h': 'layer saved',
    'upipe_qkv.h': 'qkv',
    'upipe_latent.h': 'latent',
    'upipe_latent_layer.h': 'latent_layer',
    'upipe_fpdt.h': 'fpdt',
    'upipe_linear.h': 'linear',
    'upipe_scan.h': 'scan',
    'upipe_linear_layer.h': 'linear_layer',
    'upipe_mlp.h': 'mlp loss',
    'upipe_zero.h': 'zero',
    'upipe_dry.h': 'dry',
    'upipe_session.h': 'session',
    'upipe.h': '',
}
ORDER = list(HEADERS)
# Folders of private parts, each with the doors that include them.
PARTS = {'stage': {'upipe_layer.h'}, 'ring': {'upipe_ring.h'}, 'fpdt': {'upipe_fpdt.h'},
         'linear': {'upipe_scan.h', 'upipe_linear_layer.h'}, 'latent': {'upipe_latent.h'},
         'parts': {'upipe_ops.h', 'upipe_comm.h', 'upipe_plan.h', 'upipe_zero.h'}}
BACKENDS = ['cpu', 'cuda', 'net']
KERNELS = 'upipe/cpu/upipe_cpu.c'  # the only unit: two includes

CORE_SYSTEM = {'assert.h', 'float.h', 'limits.h', 'math.h', 'stdarg.h', 'stddef.h', 'stdint.h', 'stdio.h', 'string.h'}
# A pool that marks its free bytes for AddressSanitizer needs that tool's header.
CORE_SYSTEM_OF = {'upipe_mem.h': {'sanitizer/asan_interface.h'}}
# Headers of other projects, and the only places that may include them: a host without that backend has none of them.
FOREIGN = {
    'mpi.h': ('net/upipe_net_mpi.h',),
    'nccl.h': ('net/upipe_net_nccl_stream.h',),
    'cuda_runtime.h': ('cuda/',),
    'cuda_runtime_api.h': ('cuda/', 'net/upipe_net_nccl_stream.h'),
    'cublas_v2.h': ('cuda/',),
}

BACKEND_NAME = re.compile(r'(?i)(?<![a-z0-9])(cpu|cuda|cublas|nccl|mpi|cblas|openblas|avx2?|pthread|thrd)(?![a-z])')
PRINTS = 'printf vprintf puts putchar fputs fputc putc fwrite perror vfprintf fprintf'.split()
LEAVES = 'setlocale newlocale uselocale exit _exit _Exit quick_exit abort atexit signal raise system longjmp'.split()
# A kernel that hangs has no other way to say so, in a build that asks for it.
MAY_PRINT = {('printf', 'cuda/upipe_cuda_kernel.h')}
# A conversion of a real number, and the calls whose text a person reads.
REAL = re.compile(r'%[-+ #0]*[\d.*]*(?:l|L)?[aAeEfFgG](?![a-z])')
SENTENCES = re.compile(r'_fail\s*\(')
HEAP = 'malloc calloc realloc free aligned_alloc posix_memalign strdup alloca mmap'.split()


def call_of(names):
    """Matches a call or declaration of one of these functions, not a member of that name."""
    return re.compile(r'(?<![\w.*])(?<!->)(' + '|'.join(names) + r')\s*\(')


def is_core(name):
    return name.split('/')[0] not in BACKENDS


# ---- one header ----

def check_include(report, name, line, form, target):
    folder = os.path.dirname(name)
    at = f'upipe/{name}'
    if form == '<':
        if is_core(name) and target not in CORE_SYSTEM | CORE_SYSTEM_OF.get(name, set()):
            report(at, line, f'the core includes <{target}>: only standard C headers without state')
        homes = FOREIGN.get(target)
        if homes and not name.startswith(homes):
            report(at, line, f'<{target}> belongs in {" and ".join(homes)} alone')
        return
    path = os.path.normpath(os.path.join(folder, target))
    if path.startswith('..'):
        report(at, line, f'"{target}" leaves the folder')
    elif not is_core(name):
        if os.path.dirname(path) not in ('', folder):
            report(at, line, f'a backend in {folder}/ includes "{target}": only the core and its own folder')
    elif folder:
        report(at, line, f'a part includes "{target}": its door includes what it needs, before it')
    elif not is_core(path):
        report(at, line, f'the core includes "{target}", which is not a core header')
    elif '/' in path:
        if name not in PARTS.get(os.path.dirname(path), ()):
            report(at, line, f'"{target}" is a private part of another door')
    elif path not in HEADERS or (name in HEADERS and ORDER.index(path) >= ORDER.index(name)):
        report(at, line, f'"{target}" is not below {name}')


def check_place(report, name, source):
    """The header's folder, and whether what is public stands at the top level. Returns how many functions that is."""
    at = f'upipe/{name}'
    if '/' not in name and name not in HEADERS:
        report(at, 1, 'a public header that is not in the list of tests/check_layers.py')
    if '/' in name and name.split('/')[0] not in [*BACKENDS, *PARTS]:
        report(at, 1, f'an unknown folder, not one of {[*BACKENDS, *PARTS]}')
    found = re.findall(r'^UPIPE_API\s[^;({]*?\b(upipe_\w+)\(|^(?:typedef )?(?:struct|enum) (upipe_\w+) \{'
                       r'|^#define (UPIPE_\w+)(?= +\S)|^enum \{\s*(UPIPE_\w+)', source, re.M)
    if is_core(name) and '/' in name:
        for names in found:
            report(at, 1, f'a private part with something public, {"".join(names)}')
    if not is_core(name) or '/' in name:
        return 0
    public = [names[0] for names in found if names[0]]
    for function in public:
        words = [word for other in HEADERS for word in HEADERS[other].split() if re.match(rf'upipe_{word}(?![a-z0-9])', function)]
        if not words or max(words, key=len) not in HEADERS.get(name, '').split():
            report(at, 1, f'{function} is not named by one of the words of {name}: {HEADERS.get(name)}')
    return len(public)


def check_guard(report, name, text):
    """The guard is the header's own and nothing more: no other header decides what this one has."""
    directives = re.findall(r'^[ \t]*#[ \t]*(\w+)[ \t]*([^\n]*)', text, re.M)
    guard = re.sub(r'\W', '_', os.path.basename(name) if name.startswith('upipe') else f'upipe_{name}').upper()
    guards = {guard, re.sub(r'\W', '_', os.path.basename(name)).upper()}
    first = [directive[0] for directive in directives[:2]] + [directives[-1][0]] if len(directives) > 2 else []
    words = {directive[1].strip() for directive in directives[:2]}
    if first != ['ifndef', 'define', 'endif'] or len(words) != 1 or not words <= guards:
        report(f'upipe/{name}', 1, f'opens with another guard than #ifndef {guard}, #define {guard}')


def check_words(report, name, source):
    """No name of a backend in the core; nothing that prints, exits or touches the heap."""
    at = f'upipe/{name}'
    core = is_core(name)
    for number, line in enumerate(without_comments(source).split('\n'), 1):
        found = BACKEND_NAME.search(line) if core and not INCLUDE.match(line) else None
        if found:
            report(at, number, f'the core names a backend: {found.group(1)}')
    for number, line in enumerate(code(source).split('\n'), 1):
        if INCLUDE.match(line):
            continue
        prints = [word for word in PRINTS if (word, name) not in MAY_PRINT]
        for names, verb in ((prints, 'prints'), (LEAVES, 'ends or hijacks the program'), (HEAP, 'uses the heap')):
            if verb == 'uses the heap' and not core:
                continue
            for word in call_of(names).findall(line):
                report(at, number, f'{word}() {verb}')
        for word in re.findall(r'\b(stdin|stdout|stderr|getenv|setenv|errno)\b', line):
            if core or word != 'errno':
                report(at, number, f'{word}: state of the process')


def check_reals(report, name, source):
    """Real numbers are written in sentences alone."""
    text = without_comments(source)
    for found in re.finditer(r'"(?:[^"\\\n]|\\.)*"', text):
        statement = text[max(text.rfind(mark, 0, found.start()) for mark in ';{}') + 1:found.start()]
        if REAL.search(found.group(0)) and not SENTENCES.search(statement):
            report(f'upipe/{name}', line_of(text, found.start()), f'{found.group(0)}: the point of a real number is the locale\'s')


# ---- the tree ----

def check_circles(report, includes):
    """No header includes itself, not through others either."""
    said = set()
    for name in sorted(includes):
        came, waiting = {}, [name]
        for header in waiting: # breadth first: the shortest circle
            for other in includes.get(header, []):
                if other not in came:
                    came[other] = header
                    waiting.append(other)
        if name not in came:
            continue
        circle = [came[name], name]
        while circle[0] != name:
            circle.insert(0, came[circle[0]])
        if frozenset(circle) not in said:
            report(f'upipe/{name}', 1, 'a circle of includes: ' + ' -> '.join(circle))
        said.add(frozenset(circle))


def check_parts(report, texts, includes):
    """Each part is included once, by one of its folder's doors."""
    for part in (name for name in sorted(texts) if name.split('/')[0] in PARTS):
        doors = [name for name in includes if part in includes[name]]
        if len(doors) != 1:
            report(f'upipe/{part}', 1, f'included by {len(doors)} headers, not by one')


def check_private(report, texts, others):
    """Who uses a name that begins with upi_: the library, of a backend's its folder, and nobody else but tests."""
    homes, places = {}, {}
    for name, text in sorted(texts.items()):
        for word, offset in private(text).items():
            homes.setdefault(word, set()).add(name.split('/')[0] if not is_core(name) else 'the core')
            places.setdefault(word, f'upipe/{name}:{line_of(text, offset)}')
    for word, several in sorted(homes.items()):
        if len(several) > 1 and 'the core' in several:
            report(places[word].split(':')[0], int(places[word].split(':')[1]),
                   f'{word} is defined by {" and ".join(sorted(several))}')
    for name, text in sorted([*((f'upipe/{name}', text) for name, text in texts.items()), *others.items()]):
        inside = name.startswith('upipe/')
        user = name.split('/')[1] if inside and not is_core(name[len('upipe/'):]) else 'the core' if inside else ''
        said = set()
        for found in PRIVATE.finditer(text):
            word = found.group(0)
            allowed = {user, 'the core'} if inside else set()
            if word in said or word not in homes or homes[word] & allowed:
                continue
            said.add(word)
            report(name, line_of(text, found.start()),
                   f'{word} is private to {" and ".join(sorted(homes[word]))} ({places[word]})')
    return len(homes)


def main():
    top = os.path.abspath(sys.argv[1])
    report = Report()
    sources, others, includes = {}, {}, {}
    for name in list_files(top):
        folder, _, rest = name.partition('/')
        if name == KERNELS:
            others[name] = code(read_text(os.path.join(top, name)))
        elif folder == 'upipe' and not name.endswith(('.h', '.cuh')):
            report(name, 1, 'not a header')
        elif folder == 'upipe':
            sources[rest] = read_text(os.path.join(top, name))
        elif folder in ('examples', 'bench') and name.endswith(('.c', '.h', '.cpp', '.cu', '.cuh', '.inc')):
            others[name] = code(read_text(os.path.join(top, name)))
    texts = {name: code(source) for name, source in sources.items()}
    public = 0
    for name in sorted(set(HEADERS) - set(sources)):
        report('tests/check_layers.py', 1, f'{name} is in the list of headers, and is not there')
    for name, text in sorted(texts.items()):
        public += check_place(report, name, sources[name])
        check_guard(report, name, text)
        check_words(report, name, sources[name])
        check_reals(report, name, sources[name])
        includes[name] = []
        for found in INCLUDE.finditer(text):
            check_include(report, name, line_of(text, found.start()), '<' if found.group(1) == '<' else '"',
                          found.group(2))
            if found.group(1) == '"':
                includes[name].append(os.path.normpath(os.path.join(os.path.dirname(name), found.group(2))))
    for name, text in sorted(others.items()):
        for found in call_of(['setlocale', 'newlocale', 'uselocale']).finditer(text):
            report(name, line_of(text, found.start()), f'{found.group(1)}(): the point in what programs write is then another')
    check_circles(report, includes)
    check_parts(report, texts, includes)
    names = check_private(report, texts, others)
    print(f'layers: {len(texts)} headers, {public} public functions, {names} private names; {report.count} breaches')
    return 1 if report.count or not public else 0


if __name__ == '__main__':
    sys.exit(main())

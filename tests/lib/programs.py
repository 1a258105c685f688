"""programs.py -- what the scripts share that test the programs of examples/: refusals, signals, and the files of a run"""

import array
import json
import os
import re
import resource
import signal
import struct
import subprocess

from checks import check, equal, load, needed, read, run_command, tree, write

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BOOK = os.path.join(TOP, 'examples', 'data', 'genesis_exodus.txt')
METHODS = ['ulysses', 'upipe', 'upipe-naive', 'ring', 'zigzag', 'stripe', 'allgather', 'usp', 'upipe-ring',
           'double-ring', 'fpdt', 'upipe-fpdt']
# A path may hold any bytes: JSON has valid UTF-8 as it is, and other bytes as the characters of those numbers.
ODD_NAME = b'\xc3\xa9\xe2\x82\xac\xf0\x9f\x93\x96\xff\xc0\xaf\xed\xa0\x80"\\.txt'
ODD_TEXT = 'é€📖\xff\xc0\xaf\xed\xa0\x80"\\.txt'


def flags_of(program):
    """{flag: whether it has a value} by the table of flags, read a second time; program: a word of its third column."""
    table = read(os.path.join(TOP, 'examples', 'common', 'options.h')).decode()
    return {name: value != 'NULL' for name, value, programs in
            re.findall(r'\n    \{"([a-z0-9-]+)", (NULL|"[^"]+"), ([A-Z_ |]+),', table) if program in programs.split(' | ')}


def words_of(flags):
    """The words of a command line: False and None are no flag, True is one without a value."""
    out = []
    for name, value in flags.items():
        if value is not None and value is not False:
            out += ['--' + name.replace('_', '-'), *([] if value is True else [str(value)])]
    return out


def sentences(stderr):
    """What is said, but for the steps of a run, or the settings of a plan, that takes long."""
    return [line for line in stderr.splitlines() if not re.match(r'step \d+/\d+  loss |\d+ settings planned in ', line)]


def trained(program, what, said=0, **flags):
    """The numbers of a training that says so many sentences. It holds and sends what its plan says."""
    done = run_command([program, *words_of({**flags, 'json': 'out.json'})], timeout=280)
    needed(done.returncode == 0, f'{what}: status {done.returncode}: {done.stderr}')
    equal(len([line for line in sentences(done.stderr) if '  evaluation: ' not in line]), said, f'{what}: {done.stderr}')
    numbers = load('out.json')
    if numbers['loss']:
        equal(numbers['peak_bytes'], numbers['plan_bytes'], f'{what}: peak')
        equal(numbers['sent_bytes_per_step'], numbers['plan_sent_bytes'], f'{what}: bytes sent')
    return numbers


def same(got, want, what, first=0, keys=('loss', 'grad_norm')):
    """Losses and norms of a training, in JSON, have the same bits as those of another one from step `first` on."""
    for key in keys:
        equal(got[key], want[key][first:] if first else want[key], f'{what}: {key}')


def same_files(got, want, what):
    """Of two checkpoints, by their folders."""
    for name in ('config.json', 'model.safetensors', 'optimizer.safetensors'):
        check(os.path.exists(f'{got}/{name}') and read(f'{got}/{name}') == read(f'{want}/{name}'), f'{what}: {name} has other bytes')


def near(got, want, what, relative=1e-5):
    check(len(got) == len(want) and all(abs(a - b) <= relative * abs(b) for a, b in zip(got, want)),
          f'{what} is {got}, not {want}')


def refused(command, folder, status, words, what=None, kept=True, lines=1, **more):
    """Ends with this status and one sentence, or so many, with these words, and leaves the folder as it was."""
    what, before = what or ' '.join(command[1:]), tree(folder)
    done = run_command(command, cwd=folder, **more)
    equal(done.returncode, status, f'{what}: status')
    said = sentences(done.stderr)
    check(len(said) == lines and all(line.startswith(os.path.basename(command[0]) + ': ') for line in said),
          f'{what}: not {lines} sentences: {done.stderr}')
    for word in words:
        check(re.search(word, done.stderr) is not None, f'{what}: "{done.stderr.strip()}" does not say {word}')
    if kept:
        after = tree(folder)
        equal(sorted(after), sorted(before), f'{what}: the names in the folder')
        equal([path for path in before if after.get(path) != before[path]], [], f'{what}: files that changed')
    return done


def heed_signals():
    """Whoever runs the tests in the background may have had some ignored, and a program inherits that."""
    for ends in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ends, signal.SIG_DFL)


def watched(command, folder, words, act, **more):
    """The program's status and its last line; act(process) at each line of stderr with these words."""
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, encoding='utf-8',
                          preexec_fn=heed_signals, **more) as process:
        for line in process.stderr:
            if words in line:
                act(process)
    return process.returncode, line


def limit_files(size):
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def npy(values, descr='<i4', shape=None):
    """The bytes of such a file."""
    head = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape or f'({len(values)},)'}, }}".ljust(117) + '\n'
    data = array.array({'<i4': 'i', '<i8': 'q', '<f4': 'f', '|u1': 'B', '|b1': 'B'}[descr], list(values)).tobytes()
    return b'\x93NUMPY\x01\x00' + struct.pack('<H', len(head)) + head.encode() + data


def safetensors(path):
    """(metadata, {name: (dtype, shape, bytes)}, header, where the data begins), by the format's specification"""
    data = read(path)
    start = 8 + struct.unpack('<Q', data[:8])[0]
    head = json.loads(data[8:start])
    tensors = {name: (t['dtype'], t['shape'], data[start + t['data_offsets'][0]:start + t['data_offsets'][1]])
               for name, t in head.items() if name != '__metadata__'}
    return head.get('__metadata__', {}), tensors, head, start


def write_tensors(path, tensors, metadata=None):
    """A file of {name: (dtype, shape, bytes)}."""
    head, at = {} if metadata is None else {'__metadata__': metadata}, 0
    for name, (dtype, shape, data) in tensors.items():
        head[name] = {'dtype': dtype, 'shape': shape, 'data_offsets': [at, at + len(data)]}
        at += len(data)
    write_header(path, head, b''.join(data for _, _, data in tensors.values()))


def write_header(path, head, data):
    """The same of a header as it is, good or bad."""
    text = json.dumps(head).encode()
    write(path, struct.pack('<Q', len(text)) + text + data)


def write_model(folder, config, tensors):
    """A folder as Hugging Face has it."""
    os.makedirs(folder)
    write(f'{folder}/config.json', json.dumps(config))
    write_tensors(f'{folder}/model.safetensors', tensors, {'format': 'pt'})


def packed(name, ids, lengths, width=2):
    """Raw ids of 1 or 2 bytes, and Megatron's index of their documents, a sequence each."""
    n = len(lengths)
    offsets = [sum(lengths[:i]) * width for i in range(n)]
    write(name + '.bin', struct.pack(f'<{len(ids)}{"BH"[width - 1]}', *ids))
    write(name + '.idx', struct.pack(f'<9sQBQQ{n}i{n}q{n + 1}q', b'MMIDIDX\0\0', 1, {1: 1, 2: 8}[width], n, n + 1, *lengths, *offsets,
                                     *range(n + 1)))


def replay(events, what):
    """A trace's events of one rank: the peak in each phase, what is live at the end, and the spans of that by id."""
    spans, depth, live, phase, peaks, last = {}, 0, 0, None, {}, 0
    for event in events:
        if 'ts' in event:
            check(event['ts'] >= last, f'{what}: the trace goes back')
            last = event['ts']
        if event['ph'] in 'BE':
            depth += 1 if event['ph'] == 'B' else -1
            phase = event['name'] if depth else phase
            check(0 <= depth <= 1, f'{what}: a phase within a phase')
        elif event['ph'] == 'b':
            check(event['id'] not in spans, f'{what}: {event["id"]} begins twice')
            spans[event['id']] = event
            live += event['args']['bytes']
        elif event['ph'] == 'e':
            begin = spans.pop(event['id'], None)
            check(begin is not None and begin['name'] == event['name'], f'{what}: {event["id"]} ends, not there')
            live -= event['args']['bytes']
        elif event['ph'] == 'C':
            equal(event['args']['bytes'], live, f'{what}: the counter')
        peaks[phase] = max(peaks.get(phase, 0), live)
    equal(depth, 0, f'{what}: phases that are open at the end')
    return peaks, live, spans

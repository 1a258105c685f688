#!/usr/bin/env python3
"""test_documents.py TRAIN TOKENIZE -- train on files of tokens and packed documents, from the outside

Packed documents must have the losses that they have alone, weighted by their tokens, with every method; a window of one
document the bits of no borders. A training that was stopped in the middle of an epoch goes on as if it had not been, and
with other files not at all. What tokenize.py writes is read back, where its package is installed.
"""

import json
import os
import signal
import struct
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), 'lib'))
from checks import check, equal, load, needed, read, run_command, run_tests, wait_for, write  # pylint: disable=wrong-import-position
from programs import BOOK, METHODS, TOP, near, npy, packed, refused, same, sentences, trained, words_of  # pylint: disable=wrong-import-position

TRAIN, TOKENIZE = (os.path.abspath(path) for path in sys.argv[1:3])
FULL = os.environ.get('UPIPE_FULL') == '1'
MODEL = {'layers': 2, 'model_dim': 64, 'heads': 4, 'kv_heads': 2, 'sample': 0}
LENGTHS = [20, 1, 31, 0, 13]  # of documents; their tokens are a window of 64, and its last target
IDS = [(i * 67 + 13) % 241 for i in range(sum(LENGTHS))]


def run(what, **flags):
    return trained(TRAIN, what, **{**({} if flags.get('resume') else MODEL), 'ranks': 1, 'steps': 1, **flags})


def test_formats(_):
    """The same bytes by every way are the same training, order and sample included."""
    book = read(BOOK)[:2000]
    write('text', book)
    write('ids.npy', npy(book))
    write('wide.npy', npy(book, '<i8'))
    write('one', book[:700])
    write('two', book[700:])
    write('list', 'one\ntwo\n')
    flags = {'tokens': 64, 'ranks': 2, 'batch': 2, 'steps': 20}
    text = run('a text', data='text', **flags)
    for what, more in {'raw': {'tokens_file': 'text', 'token_type': 'u8'}, '.npy': {'tokens_file': 'ids.npy'},
                       '.npy of i8': {'tokens_file': 'wide.npy'}, 'a list': {'tokens_file': '@list', 'token_type': 'u8'}}.items():
        same(run(what, **more, **flags), text, what)
    done = run_command([TRAIN, *words_of({**MODEL, 'tokens_file': 'ids.npy', 'tokens': 64, 'ranks': 2, 'steps': 1, 'sample': 5,
                                          'prompt': '73, 110'})])
    ids = done.stdout.splitlines()[-1].split()
    equal((done.returncode, ids[:4], len(ids)), (0, ['ids:', '73', '110', '|'], 9), 'a sample of ids')
    # ids of another width than the flag says: those below 65536 are read, with a zero behind each
    for width, kind, note in ('I', 'u16', True), ('H', 'u16', False), ('I', 'u32', False):
        write('raw', struct.pack(f'<{len(book)}{width}', *book))
        done = run_command([TRAIN, *words_of({**MODEL, 'tokens_file': 'raw', 'token_type': kind, 'tokens': 64, 'ranks': 2, 'steps': 1})])
        equal((done.returncode, done.stderr), (0, 'train: raw: every second token is 0, as if the file were u32\n' if note else ''),
              f'{width} as {kind}')


def test_alone(_):
    """One window; the last token of all is a target alone."""
    packed('all', IDS, LENGTHS)
    sums, at = 0, 0
    for i, n in enumerate(LENGTHS):
        if n > 1:
            packed(f'one{i}', IDS[at:at + n], [n])
            numbers = run(f'document {i}', tokens_file=f'one{i}.bin', tokens=n - 1)
            sums += numbers['loss'][0] * (n - 1)
            same(run('one document', tokens_file=f'one{i}.bin', tokens=n - 1, documents='joined'), numbers, 'one document')
        at += n
    wanted = sums / sum(n - 1 for n in LENGTHS if n > 1)
    flags = {'tokens_file': 'all.bin', 'tokens': len(IDS) - 1, 'steps': 2, 'lr': 1e-2, 'warmup': 0}
    first = run('packed', method='ulysses', **flags)
    near(first['loss'][:1], [wanted], 'the loss of packed documents')
    check(abs(run('joined', documents='joined', **flags)['loss'][0] - wanted) > 1e-4 * wanted, 'borders make no difference')
    for method in METHODS if FULL else ['upipe', 'upipe-ring', 'stripe', 'upipe-fpdt']:
        for ranks in (2, 4) if FULL else (4,):
            got = run(f'{method}, {ranks} ranks', method=method, **{**flags, 'ranks': ranks})
            near(got['loss'], first['loss'], f'{method}, {ranks} ranks: loss')
            near(got['grad_norm'], first['grad_norm'], f'{method}, {ranks} ranks: norm')
    for method in ['upipe', 'upipe-ring']:  # nothing is learnt: the evaluation is of the same weights
        got = run(f'{method}, evaluated', **{**flags, 'method': method, 'ranks': 4, 'eval': 'all.bin', 'lr': 0, 'min_lr': 0, 'steps': 1})
        near([got['eval'][0]['loss']], got['loss'], f'{method}: evaluation', 1e-6)
        equal(got['eval'][0]['targets'], sum(n - 1 for n in LENGTHS if n > 1), f'{method}: targets')
    more = {**flags, 'tokens': 61, 'zero': 3, 'eval': 'all.bin'}
    one, two = (run(f'{n} replicas', **{**more, 'ranks': 2 * n, 'replicas': n, 'accumulate': 6 // n, 'method': 'ring'}) for n in (1, 2))
    near(two['loss'] + two['grad_norm'], one['loss'] + one['grad_norm'], 'packed, two replicas')
    near([e['loss'] for e in two['eval']], [e['loss'] for e in one['eval']], 'packed, two replicas: evaluation')
    # the same documents by a token at their ends
    ids, at = list(IDS), 0
    for n in LENGTHS:
        at += n
        if n and at < len(ids):
            ids[at - 1] = 250
    packed('ends', ids, LENGTHS)
    by_index = run('by the index', **{**flags, 'tokens_file': 'ends.bin'})
    os.unlink('ends.idx')
    same(run('by a token', token_type='u16', end_token=250, **{**flags, 'tokens_file': 'ends.bin'}), by_index, 'by a token')


def test_batch(_):
    """Two windows in a batch, and one document over both and more: the order of rows apart, its windows are those of none."""
    packed('long', IDS * 3, [195])
    flags = {'tokens_file': 'long.bin', 'tokens': 64, 'batch': 2, 'ranks': 2, 'steps': 4}
    same(run('long', **flags), run('joined', documents='joined', **flags), 'one document over all windows')
    packed('all', IDS * 3, LENGTHS * 3)
    flags['tokens_file'] = 'all.bin'
    first = run('a batch', **flags)
    for method in ['upipe-ring', 'upipe-fpdt']:
        got = run(method, method=method, **flags)
        near(got['loss'], first['loss'], f'{method}: loss')
    # without a target in the whole step there is nothing to learn, and nothing breaks
    packed('single', IDS, [1] * len(IDS))
    numbers = run('documents that are a token', tokens_file='single.bin', tokens=64, steps=2)
    equal((numbers['loss'], numbers['grad_norm']), ([0, 0], [0, 0]), 'documents that are a token')


def test_after(_):
    """Borders are those of a micro-batch: what comes after a step or an evaluation of packed documents has none of them."""
    packed('apart', IDS * 4, LENGTHS * 4)
    write('plain.npy', npy(IDS * 4))
    for text, held in ('apart.bin', 'plain.npy'), ('plain.npy', 'apart.bin'):
        flags = {'tokens_file': text, 'eval': held, 'tokens': 64, 'ranks': 2}
        sample = {'sample': 40, 'prompt': ', '.join(map(str, IDS[:30])), 'temperature': 0.2}
        learnt = {'lr': 1e-2, 'warmup': 0, 'steps': 8, 'accumulate': 2}
        said = []
        for what, more in {'trained': {**MODEL, **learnt, 'eval_every': 1, 'save': 'of ' + text}, 'loaded': {'load': 'of ' + text, 'steps': 0}}.items():
            done = run_command([TRAIN, *words_of({**more, **flags, **sample, 'json': what})])
            needed((done.returncode, done.stderr) == (0, ''), f'{text}, {what}: {done.returncode} {done.stderr}')
            said.append((done.stdout.splitlines()[-1], load(what)['eval'][-1]['loss']))
        equal(said[0], said[1], f'the sample and the evaluation of what has learnt from {text}')
        same(run('no evaluation', **{**flags, **learnt, 'eval': None}), load('trained'), f'{text}: not evaluated')


def test_bytes(_):
    """Pools hold what they hold without documents, teams send the same; what no query sees is not sent round a ring, nor fetched."""
    packed('short', IDS * 3, [8] * 24 + [3])
    for method, ranks, less in [('upipe', 4, ()), ('ulysses', 2, ()), ('zigzag', 4, ('sent_bytes_per_step',)), ('ring', 4, ('sent_bytes_per_step',)),
                                ('usp', 4, ('sent_bytes_per_step',)), ('upipe-fpdt', 2, ('plan_moved_bytes',))]:
        flags = {'tokens_file': 'short.bin', 'tokens': 64, 'ranks': ranks, 'steps': 1, 'method': method}
        apart, joined = run(method, **flags), run(f'{method}, joined', documents='joined', **flags)
        for key in 'plan_bytes', 'slab_bytes', 'sent_bytes_per_step', 'plan_moved_bytes':
            right = apart[key] < joined[key] if key in less else apart[key] == joined[key]
            check(right, f'{method}: {key} is {apart[key]}, joined {joined[key]}')


def test_mask(_):
    """What is masked is no target: the mean is over the rest, which is the document after the first."""
    packed('all', IDS, LENGTHS)
    flags = {'tokens_file': 'all.bin', 'tokens': 64, 'ranks': 2}
    write('mask', b'\1' * len(IDS))
    same(run('all', loss_mask='mask', **flags), run('none', **flags), 'a mask of ones')
    mask = b'\0' * 21 + b'\1' * 31 + b'\0' * 13
    write('mask', mask)
    packed('one', IDS[21:52], [31])
    masked = run('masked', loss_mask='mask', **flags)
    near(masked['loss'], run('alone', tokens_file='one.bin', tokens=30)['loss'], 'masked')
    for kind in '|u1', '|b1', '<i8':
        write('mask.npy', npy(mask, kind))
        same(run(f'a mask of {kind}', loss_mask='mask.npy', eval='all.bin', eval_mask='mask.npy', **flags), masked, f'a mask of {kind}')
    still = {'loss_mask': 'mask', 'eval': 'all.bin', 'lr': 0, 'min_lr': 0, **flags}
    for more in {}, {'ranks': 4, 'replicas': 2}, {'ranks': 3, 'batch': 2}:
        got = run('an evaluation is masked', **{**still, 'eval_mask': 'mask', **more})
        equal(got['eval'][0]['targets'], 30, 'targets of a masked evaluation')
        near([got['eval'][0]['loss']], got['loss'], 'a masked evaluation', 1e-6)
    equal(run('an evaluation is not masked', **still)['eval'][0]['targets'], sum(n - 1 for n in LENGTHS if n > 1), 'targets that no mask hides')
    write('short', b'\1' * 9)
    refused([TRAIN, *words_of({**MODEL, **still, 'eval_mask': 'short'})], '.', 1, ['--eval-mask short has 9 numbers'])
    refused([TRAIN, *words_of({**MODEL, **flags, 'eval_mask': 'mask'})], '.', 2, ['--eval-mask wants --eval'])
    write('own', read('mask'))
    refused([TRAIN, *words_of({**MODEL, **still, 'eval_mask': 'own', 'json': 'own'})], '.', 1, ['replace the file of --eval-mask'])


def test_resume(_):
    """Ten windows an epoch, stopped in the second one."""
    packed('all', IDS * 10, LENGTHS * 10)
    packed('other', [*IDS * 9, *IDS[::-1]], LENGTHS * 10)
    packed('index', IDS * 10, LENGTHS[::-1] * 10)
    write('mask', bytes(i % 5 > 0 for i in range(len(IDS) * 10)))
    flags = {'tokens_file': 'all.bin', 'loss_mask': 'mask', 'shuffle': 'documents', 'batch': 2, 'tokens': 64}
    whole = run('whole', ranks=2, steps=9, save='out', save_every=7, keep=0, **flags)
    more = {'resume': 'out/checkpoint-7', 'ranks': 2, 'steps': None}
    del flags['batch'], flags['tokens']
    same(run('resumed', **more, **flags), whole, 'resumed', 7)
    for change, words in ({'tokens_file': 'other.bin'}, 'another text'), ({'tokens_file': 'index.bin'}, 'another text'), \
            ({'shuffle': None}, '--shuffle'), ({'loss_mask': None}, '--loss-mask'), ({'documents': 'joined'}, '--documents'):
        refused([TRAIN, *words_of({**more, **flags, **change})], '.', 1, [words, '--load starts anew'])


def test_usage(folder):
    packed('all', IDS, LENGTHS)
    write('raw', bytes(IDS))
    for flags, status, words in (
            ('--end-token 3', 2, ['--end-token wants --tokens-file']), ('--shuffle windows', 2, ['--shuffle wants']),
            ('--tokens-file all.bin --data x', 2, ['--data x and --tokens-file all.bin contradict']),
            ('--tokens-file all.bin --end-token x', 2, ["not 'x'"]), ('--tokens-file all.bin --plan', 2, ['--plan', '--tokens-file']),
            ('--tokens-file all.bin --end-token 256', 1, ['the vocabulary has 256']), ('--tokens-file @raw', 1, ['--tokens-file: byte 7 of the list raw is 0']),
            ('--tokens-file raw', 1, ['--token-type says their type']), ('--tokens-file none.bin', 1, ['none.bin cannot be read']),
            ('--tokens-file raw --token-type u8 --documents apart', 1, ['would have no effect']),
            ('--tokens-file all.bin --token-type u8', 1, ['--token-type is for raw files']),
            ('--tokens-file all.bin', 1, ['has 65 tokens, but a sequence of 1024 tokens needs 1025']),
            ('--tokens-file all.bin --prompt hello', 1, ['numbers of tokens, below 256']),
            ('--tokens-file all.bin --json all.bin', 1, ['replace the file of --tokens-file']),
            ('--tokens-file all.bin --rope-type dynamic --rope-factor 2 --rope-original 16', 1, ['packed documents with RoPE of the type dynamic']),
            ('--tokens-file raw --token-type u16', 1, ['has 65 bytes'])):
        refused([TRAIN, *flags.split(), *([] if 'needs' in words[0] else ['--tokens', '32'])], folder, status, words)


def test_changes(_):
    """Written to, or cut, while it is read: a sentence, and a checkpoint that goes on where the training was."""
    for what in ('cut', 'written'):
        packed('all', IDS * 20, LENGTHS * 20)
        words = words_of({**MODEL, 'tokens_file': 'all.bin', 'tokens': 64, 'ranks': 2, 'steps': 100000, 'save': what,
                          'warmup': 0, 'log': what + '.log', 'deadline': 250})
        training = subprocess.Popen([TRAIN, *words], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        needed(wait_for(lambda: os.path.exists(what + '.log') and os.path.getsize(what + '.log') > 500), f'{what}: no step')
        if what == 'cut':
            os.truncate('all.bin', 100)
        else:
            with open('all.bin', 'r+b') as file:
                file.write(b'\0\0')
        stderr = training.communicate(timeout=250)[1]
        equal((training.returncode, len(sentences(stderr))), (1, 1), f'{what}: {stderr}')
        check('all.bin has changed since the training began' in stderr, f'{what}: {stderr}')
        last = json.loads(read(what + '.log').splitlines()[-1])['step']
        equal([name for name in os.listdir(what) if name.startswith('checkpoint')], [f'checkpoint-{last}'], f'{what}: kept')
        packed('all', IDS * 20, LENGTHS * 20)
        run(f'{what}: resumed', resume=what, tokens_file='all.bin', steps=last + 1)


def test_sparse(_):
    """8 GiB that are not there, of which a half is read: up to a wrong id at a place and an offset beyond 31 and 32 bits."""
    if not FULL:
        return
    with open('sparse.bin', 'wb') as file:
        file.truncate(8 << 30)
        file.seek(4 << 30)
        file.write(b'\xff\xff')
    done = run_command([TRAIN, *words_of({'tokens_file': 'sparse.bin', 'token_type': 'u16'})])
    equal((done.returncode, done.stderr), (1, f'train: sparse.bin: token {2 << 30} is 65535, the vocabulary has 256\n'),
          'a sparse file')


def test_tokenize(_):
    words = ['<end>', *'abcdefghij']
    write('tokenizer.json', json.dumps({
        'version': '1.0', 'truncation': None, 'padding': None, 'added_tokens': [], 'normalizer': None,
        'pre_tokenizer': {'type': 'Whitespace'}, 'post_processor': None, 'decoder': None,
        'model': {'type': 'WordLevel', 'vocab': {word: i for i, word in enumerate(words)}, 'unk_token': '<end>'}}))
    write('in.jsonl', ''.join(json.dumps({'q': 'a b', 'text': text}) + '\n' for text in ('c d e', '', 'j')))
    pythons = [sys.executable, os.path.join(TOP, 'build', 'bench', 'venv', 'bin', 'python')]
    able = [python for python in pythons
            if os.path.exists(python) and run_command([python, '-c', 'import tokenizers']).returncode == 0]
    done = run_command([*(able or pythons)[:1], TOKENIZE, '--tokenizer', 'tokenizer.json', '--prompt-field', 'q', '--end-token',
                        '<end>', '--out', 'made', 'in.jsonl'])
    if not able:
        print('left out: what tokenize.py writes, as no Python here has the package tokenizers')
        equal((done.returncode, done.stderr), (1, 'tokenize.py: needs the package tokenizers (pip install tokenizers)\n'),
              'tokenize.py without it')
        return
    equal(done.returncode, 0, f'tokenize.py: {done.stderr}')
    packed('expected', [1, 2, 3, 4, 5, 0, 1, 2, 0, 1, 2, 10, 0], [6, 3, 4])
    equal((read('made.bin'), read('made.idx')), (read('expected.bin'), read('expected.idx')), 'tokenize.py: files')
    equal(list(read('made.mask')), [0, 0, 1, 1, 1, 1, 0, 0, 1, 0, 0, 1, 1], 'tokenize.py: the mask')
    run('made', tokens_file='made.bin', loss_mask='made.mask', tokens=12)
    done = run_command([able[0], TOKENIZE, '--tokenizer', '.', '--decode'], input='a line\nids: 1 2 | 10\n')
    equal(done.stdout, 'a line\nids: 1 2 | 10\na b j\n', f'tokenize.py --decode: {done.stderr}')


if __name__ == '__main__':
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(run_tests('documents', test_formats, test_alone, test_batch, test_after, test_bytes, test_mask, test_resume, test_usage, test_changes,
                       test_sparse, test_tokenize))

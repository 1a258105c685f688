#!/usr/bin/env python3
"""tokenize.py --tokenizer tokenizer.json --out PREFIX FILE... -- texts as token ids, for train --tokens-file PREFIX.bin

    pip install tokenizers
    python3 examples/train/tokenize.py --tokenizer SmolLM2-135M --end-token '<|endoftext|>' --out fineweb part*.jsonl
    train --load SmolLM2-135M --tokens-file fineweb.bin ... | python3 examples/train/tokenize.py --tokenizer SmolLM2-135M --decode

Writes PREFIX.bin and PREFIX.idx, as Megatron has them: u16, or i32 where the vocabulary is larger. A document is a line of a
.jsonl (its field "text", or --field), a row of a .parquet (that column; needs pyarrow), or another file as a whole. With
--prompt-field a document begins with that field, which is read and not learnt: PREFIX.mask, for --loss-mask, has a byte a
token, 0 for the prompt's. tokenizer.json is Hugging Face's, or in the folder that is named. Documents are encoded in
parallel, by as many threads as RAYON_NUM_THREADS says or the machine has.

--decode copies what train prints, and behind its line of ids the text of them.
"""

import os
import sys
import sysconfig

if __name__ != '__main__':  # the scripts of this folder that look for Python's own module of this name find this file
    with open(os.path.join(sysconfig.get_path('stdlib'), 'tokenize.py'), encoding='utf-8') as source:
        exec(compile(source.read(), source.name, 'exec'))  # pylint: disable=exec-used
else:
    sys.path = [place for place in sys.path if os.path.abspath(place or '.') != os.path.dirname(os.path.abspath(__file__))]
    import argparse
    import array
    import json
    import struct
    import time

MAGIC, TYPES = b'MMIDIDX\0\0', {'H': 8, 'i': 4}
BATCH = 1024  # documents that are encoded at a time


def parse():
    about = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    about.add_argument('files', nargs='*')
    about.add_argument('--tokenizer', required=True, help='tokenizer.json, or a folder that has one')
    about.add_argument('--out', help='PREFIX of the files that are written')
    about.add_argument('--field', default='text', help='of .jsonl and .parquet')
    about.add_argument('--prompt-field', help='what stands before it, and is not learnt')
    about.add_argument('--end-token', help='a token that is put behind each document')
    about.add_argument('--decode', action='store_true', help='the ids in what train prints, from stdin, as a text')
    o = about.parse_args()
    if o.decode == bool(o.files) or o.decode == bool(o.out):
        about.error('--decode reads stdin; otherwise --out and files are needed')
    return o


def rows(path, fields):
    """What a file has, a list of the fields' texts for each document."""
    if path.endswith('.jsonl'):
        with open(path, encoding='utf-8') as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                    yield [row[field] for field in fields]
                except (ValueError, KeyError, TypeError) as error:
                    sys.exit(f'tokenize.py: {path}, line {number}: no object with {", ".join(fields)} ({error})')
    elif path.endswith('.parquet'):
        from pyarrow import parquet
        for part in parquet.ParquetFile(path).iter_batches(columns=fields):
            yield from zip(*(part.column(field).to_pylist() for field in fields))
    else:
        with open(path, encoding='utf-8') as text:
            yield [text.read()]


def batches(o):
    """Lists of documents."""
    fields, batch = [o.prompt_field, o.field] if o.prompt_field else [o.field], []
    for path in o.files:
        for row in rows(path, fields):
            batch.append([text or '' for text in row])
            if len(batch) == BATCH:
                yield batch
                batch = []
    if batch:
        yield batch


def encode(o, tokenizer):
    code = 'H' if tokenizer.get_vocab_size() <= 1 << 16 else 'i'
    end = [] if o.end_token is None else [tokenizer.token_to_id(o.end_token)]
    if end == [None]:
        sys.exit(f'tokenize.py: {o.end_token} is no token of {o.tokenizer}')
    parts = [open(f'{o.out}.{end_of}.tmp', 'wb') for end_of in (['bin', 'mask'] if o.prompt_field else ['bin'])]
    lengths, began, last, tokens = array.array('i'), time.monotonic(), 0, 0
    for batch in batches(o):
        done = tokenizer.encode_batch([text for row in batch for text in row], add_special_tokens=False)
        for i in range(0, len(done), len(parts)):
            own = [one.ids for one in done[i:i + len(parts)]] + [end]
            array.array(code, sum(own, [])).tofile(parts[0])
            lengths.append(sum(map(len, own)))
            tokens += lengths[-1]
            if o.prompt_field:
                parts[1].write(b'\0' * len(own[0]) + b'\1' * (lengths[-1] - len(own[0])))
        if time.monotonic() > last + 1:
            last = time.monotonic()
            print(f'{len(lengths)} documents, {tokens} tokens, {tokens / (last - began):.0f} a second', file=sys.stderr)
    parts.append(open(o.out + '.idx.tmp', 'wb'))
    write_index(parts[-1], code, lengths)
    for part in parts:
        part.close()
        os.replace(part.name, part.name.removesuffix('.tmp'))
    print(f'{o.out}: {len(lengths)} documents, {tokens} tokens')


def write_index(index, code, lengths):
    offsets, at = array.array('q'), 0
    for n in lengths:
        offsets.append(at)
        at += n * struct.calcsize(code)
    index.write(MAGIC + struct.pack('<QBQQ', 1, TYPES[code], len(lengths), len(lengths) + 1))
    for numbers in (lengths, offsets, array.array('q', range(len(lengths) + 1))):
        numbers.tofile(index)


def decode(tokenizer):
    for line in sys.stdin:
        print(line, end='')
        if line.startswith('ids: '):
            print(tokenizer.decode([int(word) for word in line[5:].split() if word != '|'], skip_special_tokens=False))


def main():
    o = parse()
    try:
        from tokenizers import Tokenizer
    except ImportError:
        sys.exit('tokenize.py: needs the package tokenizers (pip install tokenizers)')
    path = os.path.join(o.tokenizer, 'tokenizer.json') if os.path.isdir(o.tokenizer) else o.tokenizer
    try:
        tokenizer = Tokenizer.from_file(path)
    except Exception as error:  # the package has no class of its own for it
        sys.exit(f'tokenize.py: {path} cannot be read: {error}')
    decode(tokenizer) if o.decode else encode(o, tokenizer)


if __name__ == '__main__':
    main()

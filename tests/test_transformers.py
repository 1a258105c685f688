#!/usr/bin/env python3
"""test_transformers.py TRAIN TOP -- train, and logits beside it, against Hugging Face's transformers, with biases

Small random models that transformers has saved: Qwen2, and Llama and Qwen3 with biases of all four projections. Loss,
logits and the gradient of every tensor are compared with PyTorch in double precision; errors are held to those of
transformers in f32, by the rule of lib/tolerance.h. What train saves, transformers reads. Where no Python here has both
packages the test is left out (status 77).
"""

import copy
import json
import os
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), 'lib'))
from checks import check, end, equal  # pylint: disable=wrong-import-position

os.environ |= {'TRANSFORMERS_OFFLINE': '1', 'HF_HUB_OFFLINE': '1', 'TQDM_DISABLE': '1'}
try:
    import torch
    import transformers
    if int(transformers.__version__.split('.', maxsplit=1)[0]) < 5:
        raise ImportError('rope_parameters came with 5')
except ImportError:
    # Those for the benchmarks have a Python of their own; Debian's PyTorch belongs to Debian's.
    TRIED = os.environ.get('UPIPE_PYTHONS_TRIED', '').split(':')
    for PLACE in (os.path.join(sys.argv[2], 'build', 'bench', 'venv', 'bin', 'python'), '/usr/bin/python3'):
        if os.path.exists(PLACE) and PLACE not in TRIED:
            os.environ['UPIPE_PYTHONS_TRIED'] = ':'.join([*TRIED, PLACE])
            os.execv(PLACE, [PLACE] + sys.argv)
    print('left out: transformers, as no Python here has version 5 of it and PyTorch')
    sys.exit(77)

TRAIN, TOP = os.path.abspath(sys.argv[1]), os.path.abspath(sys.argv[2])
LOGITS = os.path.join(os.path.dirname(TRAIN), 'logits')
TOKENS, HEAD_DIM, THETA = 64, 32, 500000.0
MODELS = [('Qwen2', {'tie_word_embeddings': True, 'use_sliding_window': False}),
          ('Llama', {'tie_word_embeddings': False, 'attention_bias': True}),
          ('Qwen3', {'tie_word_embeddings': True, 'attention_bias': True})]
# A rank alone, a team, a ring, segments.
WAYS = [('--ranks', '1'), ('--ranks', '2', '--method', 'upipe'), ('--ranks', '3', '--method', 'zigzag'),
        ('--ranks', '2', '--method', 'upipe-fpdt', '--segments', '3')]


class Angles(torch.nn.Module):
    """The rotary angles in double precision, which transformers' are not."""

    def __init__(self, theta):
        super().__init__()
        self.theta = theta

    def forward(self, x, position_ids):
        rates = self.theta ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
        angles = (position_ids[..., None].double() * rates).repeat(1, 1, 2)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def make_model(name, more):
    config = getattr(transformers, name + 'Config')(
        vocab_size=270, hidden_size=96, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=HEAD_DIM, max_position_embeddings=128, rms_norm_eps=1e-5,
        rope_parameters={'rope_type': 'default', 'rope_theta': THETA}, **more)
    torch.manual_seed(len(more))
    model = getattr(transformers, name + 'ForCausalLM')(config)
    for one, p in model.named_parameters():
        torch.nn.init.normal_(p, 1 if 'norm' in one else 0, 0.5 if one.endswith('.bias') else 0.1)
    return model


def widened(model):
    """The same model with every number in f64; transformers' own norms and angles round to f32."""
    model = copy.deepcopy(model).double()
    model.model.rotary_emb = Angles(model.config.rope_parameters['rope_theta'])
    for m in model.modules():
        if type(m).__name__.endswith('RMSNorm'):
            m.forward = lambda x, m=m: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + m.variance_epsilon) * m.weight
    return model


def run_model(model, ids):
    """'loss', 'logits' and the gradients by name."""
    model.zero_grad()
    logits = model(ids[None, :-1], use_cache=False).logits[0]
    loss = torch.nn.functional.cross_entropy(logits, ids[1:])
    loss.backward()
    return {'loss': loss.detach(), 'logits': logits.detach(),
            **{name: p.grad for name, p in model.named_parameters()}}


def run(program, folder, *words):
    done = subprocess.run([program, *map(str, words)], cwd=folder, capture_output=True, text=True, check=False)
    return check(done.returncode == 0, f'{words}: {done.returncode}: {done.stderr}')


def run_train(folder, way, *words):
    """One window, one step: Adam's first moments are the gradients where beta1 is 0."""
    if not run(TRAIN, folder, '--data', 'window', '--tokens', TOKENS, '--sample', 0, '--clip', 0, '--beta1', 0,
               '--json', 'out.json', *words, *way):
        return None
    with open(os.path.join(folder, 'out.json'), encoding='utf-8') as source:
        return json.load(source)


def read_tensors(path):
    """name -> f32 tensor of a safetensors file, by the format's specification."""
    with open(path, 'rb') as source:
        data = bytearray(source.read())
    start = 8 + int.from_bytes(data[:8], 'little')
    head = json.loads(data[8:start])
    return {name: torch.frombuffer(data, dtype=torch.float32, offset=start + t['data_offsets'][0],
                                   count=(t['data_offsets'][1] - t['data_offsets'][0]) // 4).reshape(t['shape'])
            for name, t in head.items() if name != '__metadata__'}


def read_npy(path):
    with open(path, 'rb') as source:
        data = bytearray(source.read())
    return torch.frombuffer(data, dtype=torch.float32, offset=10 + int.from_bytes(data[8:10], 'little')).reshape(TOKENS, -1)


def compare(what, got, rounded, exact):
    equal(sorted(got), sorted(exact), f'{what}: names')
    for name in got.keys() & exact.keys():
        off, theirs, most = ((a - b).abs().max().item() for a, b in (
            (got[name], exact[name]), (rounded[name], exact[name]), (exact[name], torch.zeros(()))))
        floor = 4 * torch.finfo(torch.float32).eps * most
        check(most > 1e-6 and off <= 2 * theirs + floor,
              f'{what}: {name}, at most {most:.3g}, is off by {off:.3g}, transformers in f32 by {theirs:.3g}')


def read_again(path, name, tensors, what):
    """transformers reads a checkpoint as the same model, without a tensor too few or too many."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    equal(type(model).__name__, name + 'ForCausalLM', f'{what}: the model')
    equal([len(info[key]) for key in ('missing_keys', 'unexpected_keys', 'mismatched_keys')], [0, 0, 0], f'{what}: {info}')
    for one, p in model.named_parameters():
        check(torch.equal(p, tensors[one]), f'{what}: {one} is not what train has written')
    return model


def test_model(name, more, ids, folder):
    model = make_model(name, more)
    model.save_pretrained(os.path.join(folder, name))
    exact, rounded = run_model(widened(model), ids), run_model(model, ids)
    for number, way in enumerate(WAYS):
        what, save = f'{name} {" ".join(way)}', f'{name}{number}'
        numbers = run_train(folder, way, '--load', name, '--steps', 1, '--lr', 0, '--min-lr', 0, '--save', save)
        if numbers is None or not run(LOGITS, folder, '--load', name, '--ids', 'ids.npy', '--out', 'out.npy', *way):
            continue
        path = os.path.join(folder, save, 'checkpoint-1')
        moments = read_tensors(os.path.join(path, 'optimizer.safetensors'))
        got = {one.removeprefix('exp_avg.'): t for one, t in moments.items() if one.startswith('exp_avg.')}
        got |= {'loss': torch.tensor(numbers['loss'][0], dtype=torch.float64),
                'logits': read_npy(os.path.join(folder, 'out.npy'))}
        compare(what, got, rounded, exact)
        read_again(path, name, dict(model.named_parameters()), what)


def test_new(name, flags, ids, folder):
    """A model of train's own: the loss of its second step is that of transformers after the first."""
    numbers = run_train(folder, ('--ranks', '2'), '--steps', 2, '--lr', 1e-2, '--warmup', 1, '--layers', 2, '--model-dim', 64,
                        '--heads', 2, '--kv-heads', 1, *flags, '--save', 'new' + name, '--save-every', 1, '--keep', 2)
    if numbers is None:
        return
    path = os.path.join(folder, 'new' + name, 'checkpoint-1')
    model = read_again(path, name, read_tensors(os.path.join(path, 'model.safetensors')), f'a new {name}')
    loss = run_model(widened(model), ids)['loss'].item()
    check(abs(loss - numbers['loss'][1]) < 1e-6 * loss, f'a new {name}: {numbers["loss"]}, transformers has {loss}')


def main():
    torch.set_num_threads(1)
    with open(os.path.join(TOP, 'examples', 'data', 'genesis_exodus.txt'), 'rb') as book:
        text = book.read()[1000:1001 + TOKENS]
    ids = torch.tensor(list(text))
    head = f"{{'descr': '<i4', 'fortran_order': False, 'shape': ({TOKENS},), }}".ljust(117) + '\n'
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, 'window'), 'wb') as out:
            out.write(text)
        with open(os.path.join(folder, 'ids.npy'), 'wb') as out:
            out.write(b'\x93NUMPY\x01\x00' + len(head).to_bytes(2, 'little') + head.encode())
            out.write(b''.join(i.to_bytes(4, 'little') for i in text[:TOKENS]))
        for name, more in MODELS:
            test_model(name, more, ids, folder)
        for name, flags in [('Qwen2', ['--attention-bias', 'qkv']), ('Llama', ['--attention-bias', 'qkvo', '--untied']),
                            ('Qwen3', ['--attention-bias', 'qkvo', '--qk-norm']), ('Mistral', ['--window', '9'])]:
            test_new(name, flags, ids, folder)
    return end(f'transformers {transformers.__version__}, torch {torch.__version__}')


if __name__ == '__main__':
    sys.exit(main())

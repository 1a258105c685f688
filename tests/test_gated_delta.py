#!/usr/bin/env python3
"""test_gated_delta.py PROGRAM TOP -- a layer of linear attention against Hugging Face's Qwen3_5GatedDeltaNet and Qwen3-Next's

Random layers over ranks: output, last state and the gradients of input and weights are within 1e-5 of the largest number of
the module in double precision. PROGRAM is test_linear_layer, which runs a layer from a file. Where no Python here has
PyTorch and transformers the test is left out (status 77).
"""

import os
import struct
import sys
import tempfile
from unittest import mock

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), 'lib'))
from checks import check, end, other_python, run_command  # pylint: disable=wrong-import-position

os.environ |= {'TRANSFORMERS_OFFLINE': '1', 'HF_HUB_OFFLINE': '1', 'TQDM_DISABLE': '1'}
try:
    import torch
    from transformers.models.qwen3_5 import configuration_qwen3_5, modeling_qwen3_5
    from transformers.models.qwen3_next import configuration_qwen3_next, modeling_qwen3_next
    from wide import in_double
except ImportError:
    other_python(os.path.join(sys.argv[2], 'build', 'bench', 'venv', 'bin', 'python'))
    print('left out: transformers, as no Python here has a version with Qwen3.5, and PyTorch')
    sys.exit(77)

# As lib/linear_layer.h orders them; of Qwen3.5's module.
WEIGHTS = ['in_proj_qkv.weight', 'in_proj_z.weight', 'in_proj_b.weight', 'in_proj_a.weight', 'out_proj.weight', 'conv1d.weight',
           'A_log', 'dt_bias', 'norm.weight']
SHAPE = ['hidden_size', 'linear_num_value_heads', 'linear_num_key_heads', 'linear_key_head_dim', 'linear_value_head_dim',
         'linear_conv_kernel_dim']
CHUNK, EPS = 64, 1e-6
BOUND = 1e-5
LAYERS = [(80, (32, 4, 2, 16, 24, 4)), (200, (48, 6, 2, 32, 16, 4)), (130, (24, 2, 2, 20, 40, 3)), (67, (64, 2, 1, 128, 128, 2))]


def module_of(modeling, config_class, name, shape):
    config = config_class(**dict(zip(SHAPE, shape)), rms_norm_eps=EPS, hidden_act='silu', num_hidden_layers=1,
                          layer_types=['linear_attention'])
    return getattr(modeling, name)(config, 0)


def run_module(modeling, module, x, dy):
    """Output, last state of the rule, gradients of x and by name."""
    states = []
    rule = modeling.torch_chunk_gated_delta_rule

    def kept(*args, **more):
        out, state = rule(*args, **{**more, 'output_final_state': True})
        states.append(state)
        return out, state

    module.zero_grad()
    x = x.clone().requires_grad_()
    with mock.patch.object(modeling, 'torch_chunk_gated_delta_rule', kept):
        y = module(x[None])[0]
    (y * dy).sum().backward()
    return {'y': y.detach(), 'state': states[0][0].detach(), 'x': x.grad,
            **{name: p.grad for name, p in module.named_parameters()}}


def next_weights(weights, shape):
    """Qwen3-Next's weights, or their gradients, of Qwen3.5's: a key head's q, k, v and z are neighbours, and so are b and a."""
    _, heads, keys, key_dim, value_dim, _ = shape
    group = heads // keys
    q, k, v = weights['in_proj_qkv.weight'].split([keys * key_dim] * 2 + [heads * value_dim])
    z = weights['in_proj_z.weight']
    by_key = [part.reshape(keys, -1, part.shape[-1]) for part in (q, k, v, z)]
    ba = [weights[f'in_proj_{one}.weight'].reshape(keys, group, -1) for one in 'ba']
    return {'in_proj_qkvz.weight': torch.cat(by_key, 1).flatten(0, 1), 'in_proj_ba.weight': torch.cat(ba, 1).flatten(0, 1),
            **{name: weights[name] for name in WEIGHTS if not name.startswith('in_proj')}}


def run_program(program, folder, ranks, n, shape, tensors):
    """What the library gives: a list of tensors, in the order of the file."""
    path = os.path.join(folder, 'layer')
    with open(path, 'wb') as out:
        out.write(struct.pack('<8if', n, *shape, CHUNK, EPS))
        for one in tensors:
            out.write(one.float().contiguous().numpy().tobytes())
    done = run_command([program, path, str(ranks)], timeout=None)
    check(done.returncode == 0, f'{program} {path} {ranks}: {done.returncode}, {done.stdout} {done.stderr}')
    with open(path + '.out', 'rb') as got:
        return torch.frombuffer(bytearray(got.read()), dtype=torch.float32)


def check_near(got, want, what):
    far = (got.double() - want).abs().max().item() / want.abs().max().item()
    check(far <= BOUND, f'{what} is {far:.2e} of the largest number away, not {BOUND}')
    return far


def compare(program, folder, ranks, n, shape, seed):
    torch.manual_seed(seed)
    module = module_of(modeling_qwen3_5, configuration_qwen3_5.Qwen3_5TextConfig, 'Qwen3_5GatedDeltaNet', shape)
    with torch.no_grad():
        for name, p in module.named_parameters():
            if name.endswith('.weight'):
                torch.nn.init.normal_(p, 1 if 'norm' in name else 0, 0.3)
    x, dy = torch.randn(n, shape[0]), torch.randn(n, shape[0])
    weights = dict(module.named_parameters())
    got = run_program(program, folder, ranks, n, shape, [x, *(weights[name].detach() for name in WEIGHTS), dy])
    with in_double(modeling_qwen3_5):
        want = run_module(modeling_qwen3_5, module.double(), x.double(), dy.double())
    names = ['y', 'x', *WEIGHTS, 'state']
    results = dict(zip(names, got.split([want[name].numel() for name in names])))
    worst = max(check_near(results[name].reshape(want[name].shape), want[name], f'{name} of {n} tokens, {shape}, {ranks} ranks')
                for name in names)
    other = module_of(modeling_qwen3_next, configuration_qwen3_next.Qwen3NextConfig, 'Qwen3NextGatedDeltaNet', shape).double()
    with torch.no_grad():
        for name, p in other.named_parameters():
            p.copy_(next_weights(weights, shape)[name])
    with in_double(modeling_qwen3_next):
        want = run_module(modeling_qwen3_next, other, x.double(), dy.double())
    results = {name: one.reshape(weights[name].shape if name in weights else want[name].shape) for name, one in results.items()}
    results = {**{name: results[name] for name in ('y', 'x', 'state')}, **next_weights(results, shape)}
    return max(worst, *(check_near(results[name], want[name], f'{name} of Qwen3-Next, {n} tokens, {shape}, {ranks} ranks')
                        for name in want))


def main(program):
    torch.set_num_threads(1)
    worst = 0
    with tempfile.TemporaryDirectory() as folder:
        for seed, (n, shape) in enumerate(LAYERS):
            worst = max(worst, compare(os.path.abspath(program), folder, 1 + seed, n, shape, seed))
    print(f'{len(LAYERS)} layers, the furthest number {worst:.1e} of the largest one away')
    return end('gated_delta')


if __name__ == '__main__':
    sys.exit(main(sys.argv[1]))

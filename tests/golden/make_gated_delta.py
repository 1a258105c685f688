#!/usr/bin/env python3
"""make_gated_delta.py OUT -- writes gated_delta_net.h: numbers of the output, last state and gradients of a layer, in f64

The layer is the Qwen3_5GatedDeltaNet of Hugging Face's transformers, in PyTorch. Its inputs and weights are not stored,
since ../lib/linear_layer.h draws the same ones. README.md says what the file has.
"""

import os
import sys

import torch

TESTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), '..')
sys.path.insert(0, TESTS)
OUT = sys.argv[1]
sys.argv[1:1] = ['test_linear_layer', os.path.join(TESTS, '..')]  # which that test is called with, and which nothing here uses
from make_families import draws, short  # pylint: disable=wrong-import-position
from test_gated_delta import CHUNK, EPS, WEIGHTS, configuration_qwen3_5, in_double, modeling_qwen3_5, module_of, run_module  # pylint: disable=wrong-import-position

TOKENS, SHAPE = 150, (32, 4, 2, 16, 24, 4)
# The names of lib/linear_layer.h, its mean and its scale of a drawn number.
DRAWN = {'in_proj_qkv.weight': ('w_qkv', 0, 0.25), 'in_proj_z.weight': ('w_z', 0, 0.25), 'in_proj_b.weight': ('w_b', 0, 0.25),
         'in_proj_a.weight': ('w_a', 0, 0.25), 'out_proj.weight': ('w_out', 0, 0.25), 'conv1d.weight': ('conv', 0, 0.5),
         'A_log': ('a_log', 0, 1), 'dt_bias': ('dt_bias', -1, 1), 'norm.weight': ('norm', 1, 0.25), 'x': ('x', 0, 1),
         'dy': ('dy', 0, 1)}


def drawn(name, shape):
    """Eleven bits each, which f32 holds with every scale here."""
    short_name, mean, scale = DRAWN[name]
    n = torch.Size(shape).numel()
    return mean + scale * torch.tensor([(z >> 53) / 1024 - 1 for z in draws(short_name, n)], dtype=torch.float64).reshape(shape)


def main():
    torch.set_num_threads(1)
    module = module_of(modeling_qwen3_5, configuration_qwen3_5.Qwen3_5TextConfig, 'Qwen3_5GatedDeltaNet', SHAPE)
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(drawn(name, p.shape))
    x, dy = drawn('x', (TOKENS, SHAPE[0])), drawn('dy', (TOKENS, SHAPE[0]))
    rounded = {name: one.double() for name, one in run_module(modeling_qwen3_5, module.float(), x.float(), dy.float()).items()}
    with in_double(modeling_qwen3_5):
        exact = run_module(modeling_qwen3_5, module.double(), x, dy)
    lines = []
    for name in ['x', *WEIGHTS, 'y', 'state']:
        to, want = DRAWN[name][0] if name in DRAWN else name, exact[name]
        signs = torch.tensor([1.0 - 2 * (z >> 63) for z in draws('signs of ' + to, want.numel())], dtype=torch.float64)
        numbers = [short((signs * want.flatten()).sum(), 13), short(want.norm(), 5), short((rounded[name] - want).norm(), 3)]
        lines.append(f'    {{"{to}", {", ".join(map(str, numbers))}}},')
    n, model, heads, keys, key_dim, value_dim, taps = TOKENS, *SHAPE
    with open(OUT, 'w', encoding='utf-8') as out:
        out.write(f'''/* gated_delta_net.h -- made by make_gated_delta.py: README.md */
/* clang-format off */
#ifndef UPIPE_TEST_GATED_DELTA_NET_H
#define UPIPE_TEST_GATED_DELTA_NET_H

enum {{
    GOLDEN_TOKENS = {n},
    GOLDEN_MODEL = {model},
    GOLDEN_HEADS = {heads},
    GOLDEN_KEY_HEADS = {keys},
    GOLDEN_KEY_DIM = {key_dim},
    GOLDEN_VALUE_DIM = {value_dim},
    GOLDEN_TAPS = {taps},
    GOLDEN_CHUNK = {CHUNK}
}};

static const float golden_eps = {EPS}f;

static const golden_row golden_rows[] = {{
''' + '\n'.join(lines) + '''
};

#endif
''')


if __name__ == '__main__':
    main()

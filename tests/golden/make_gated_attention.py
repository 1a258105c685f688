#!/usr/bin/env python3
"""make_gated_attention.py OUT -- writes gated_attention.h: numbers of the output and gradients of an attention block, in f64

The block is the Qwen3_5Attention of Hugging Face's transformers, in PyTorch, whose output is gated. Its inputs and weights
are not stored, since ../test_gated_output.c draws the same ones. README.md says what the file has.
"""

import os
import sys
from unittest import mock

import torch

TESTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), '..')
sys.path.insert(0, TESTS)
OUT = sys.argv[1]
sys.argv[1:1] = ['test_linear_layer', os.path.join(TESTS, '..')]  # which that test is called with, and which nothing here uses
from make_families import draws, short  # pylint: disable=wrong-import-position
from test_gated_delta import EPS, Wide, configuration_qwen3_5, modeling_qwen3_5  # pylint: disable=wrong-import-position

TOKENS, MODEL, HEADS, KV_HEADS, DIM, PART, THETA = 70, 32, 4, 2, 32, 0.25, 10000.0
# Means and scales of what is drawn; a norm's weight is what is added to 1.
SCALES = {'x': 1, 'dy': 1, 'q_norm_weight': 0.25, 'k_norm_weight': 0.25}
NAMES = ['x', 'wq', 'wk', 'wv', 'wo', 'wg', 'q_norm_weight', 'k_norm_weight', 'y']


class Wider(Wide):
    """And what is called `float` there."""

    def __getattr__(self, name):
        return super().__getattr__('float32' if name == 'float' else name)


def drawn(name, *shape):
    """Eleven bits each, which f32 holds with every scale here."""
    n = torch.Size(shape).numel()
    numbers = torch.tensor([(z >> 53) / 1024 - 1 for z in draws(name, n)], dtype=torch.float64)
    return SCALES.get(name, 0.25) * numbers.reshape(shape)


def with_gates(wq, wg):
    """The rows of q_proj: a head of Q, then its gate."""
    return torch.cat([wq.reshape(HEADS, DIM, MODEL), wg.reshape(HEADS, DIM, MODEL)], 1).reshape(-1, MODEL)


def run(module, embedding, x, dy):
    """Output, gradients of x and of the weights by their names here."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    hidden = torch.full((TOKENS, TOKENS), float('-inf'), dtype=x.dtype).triu(1)[None, None]
    y = module(x[None], embedding(x, torch.arange(TOKENS)[None]), hidden)[0][0]
    (y * dy).sum().backward()
    heads = module.q_proj.weight.grad.reshape(HEADS, 2, DIM, MODEL)
    return {'y': y.detach(), 'x': x.grad, 'wq': heads[:, 0], 'wg': heads[:, 1], 'wk': module.k_proj.weight.grad,
            'wv': module.v_proj.weight.grad, 'wo': module.o_proj.weight.grad, 'q_norm_weight': module.q_norm.weight.grad,
            'k_norm_weight': module.k_norm.weight.grad}


def main():
    torch.set_num_threads(1)
    config = configuration_qwen3_5.Qwen3_5TextConfig(
        hidden_size=MODEL, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=DIM, rms_norm_eps=EPS,
        num_hidden_layers=1, layer_types=['full_attention'], attention_bias=False,
        rope_parameters={'rope_type': 'default', 'rope_theta': THETA, 'partial_rotary_factor': PART})
    config._attn_implementation = 'eager'  # pylint: disable=protected-access
    module = modeling_qwen3_5.Qwen3_5Attention(config, 0)
    rows, width = KV_HEADS * DIM, HEADS * DIM
    weights = [('q_proj', with_gates(drawn('wq', width, MODEL), drawn('wg', width, MODEL))), ('k_proj', drawn('wk', rows, MODEL)),
               ('v_proj', drawn('wv', rows, MODEL)), ('o_proj', drawn('wo', MODEL, width)), ('q_norm', drawn('q_norm_weight', DIM)),
               ('k_norm', drawn('k_norm_weight', DIM))]
    with torch.no_grad():
        for name, one in weights:
            getattr(module, name).weight.copy_(one)
    x, dy = drawn('x', TOKENS, MODEL), drawn('dy', TOKENS, MODEL)
    embedding = modeling_qwen3_5.Qwen3_5TextRotaryEmbedding(config)
    naive = {name: one.double() for name, one in run(module.float(), embedding, x.float(), dy.float()).items()}
    with mock.patch.object(modeling_qwen3_5, 'torch', Wider()), mock.patch.object(torch.Tensor, 'float', torch.Tensor.double):
        exact = run(module.double(), modeling_qwen3_5.Qwen3_5TextRotaryEmbedding(config), x, dy)
    lines = []
    for name in NAMES:
        want = exact[name]
        if want.dtype != torch.float64:
            sys.exit(f'{name} is {want.dtype}')
        signs = torch.tensor([1.0 - 2 * (z >> 63) for z in draws('signs of ' + name, want.numel())], dtype=torch.float64)
        numbers = [short((signs * want.flatten()).sum(), 13), short(want.norm(), 5), short((naive[name] - want).norm(), 3)]
        lines.append(f'    {{"{name}", {", ".join(map(str, numbers))}}},')
    with open(OUT, 'w', encoding='utf-8') as out:
        out.write(f'''/* gated_attention.h -- made by make_gated_attention.py: README.md */
/* clang-format off */
#ifndef UPIPE_TEST_GATED_ATTENTION_H
#define UPIPE_TEST_GATED_ATTENTION_H

enum {{
    GOLDEN_TOKENS = {TOKENS},
    GOLDEN_MODEL = {MODEL},
    GOLDEN_HEADS = {HEADS},
    GOLDEN_KV_HEADS = {KV_HEADS},
    GOLDEN_DIM = {DIM},
    GOLDEN_ROPE_DIMS = {int(DIM * PART)}
}};

static const double golden_theta = {THETA}, golden_eps = {EPS};

static const golden_row golden_rows[] = {{
''' + '\n'.join(lines) + '''
};

#endif
''')


if __name__ == '__main__':
    main()

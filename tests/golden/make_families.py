#!/usr/bin/env python3
"""make_families.py OUT -- writes families.json: a small model of each family, its loss, and numbers of its gradients in f64

The models are those of Hugging Face's transformers, in PyTorch. Weights and tokens are not stored, since ../test_llama.c draws
the same ones. README.md says what the file has, and how a family is added.
"""

import json
import os
import sys

import torch
import transformers

TESTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), '..')
sys.path.insert(0, TESTS)
sys.argv[1:1] = ['train', os.path.join(TESTS, '..')]  # which that test is called with, and which nothing here uses
from test_transformers import HEAD_DIM, class_of, widened  # pylint: disable=wrong-import-position

VOCAB, DIM, HIDDEN, HEADS, KV_HEADS, LAYERS = 24, 32, 40, 4, 2, 2
BATCH, TOKENS, PAD = 2, 16, 8
# Windows, layers without RoPE and a padding that occurs, wherever a family can have them.
SOME_WINDOWS = {'sliding_window': 6, 'layer_types': ['sliding_attention', 'full_attention']}
SWITCHED = {'use_sliding_window': True, 'sliding_window': 6, 'max_window_layers': 1}
# Of attention with a latent: K and V of as many heads, those of V wider. The norms of what is projected down have an epsilon of
# their own, which is not this one.
LATENT = {'num_key_value_heads': HEADS, 'head_dim': 8, 'qk_nope_head_dim': 24, 'qk_rope_head_dim': 8, 'v_head_dim': 40,
          'kv_lora_rank': 28, 'rms_norm_eps': 0.05}
YARN = {'rope_type': 'yarn', 'rope_theta': 10000.0, 'factor': 4.0, 'original_max_position_embeddings': 16, 'mscale': 1.5,
        'mscale_all_dim': 0.5}
FAMILIES = [
    ('Llama', {'attention_bias': True}),
    ('Mistral', {'sliding_window': 6}),
    ('Qwen2', SWITCHED | {'tie_word_embeddings': True, 'pad_token_id': PAD}),
    ('Qwen3', SWITCHED | {'attention_bias': True}),
    ('Ministral', SOME_WINDOWS),
    ('Cwm', {'sliding_window': 6}),
    ('SmolLM3', {'no_rope_layers': [1, 0], 'pad_token_id': PAD}),
    ('SeedOss', {'pad_token_id': PAD, 'attention_dropout': 0.0, 'residual_dropout': 0.0}),
    ('Ernie4_5', {'pad_token_id': PAD}),
    ('Phi3', {'sliding_window': 6, 'partial_rotary_factor': 0.75, 'pad_token_id': None}),
    ('Glm', {'pad_token_id': PAD}),
    ('Glm4', {'pad_token_id': PAD}),
    ('Granite', {'embedding_multiplier': 3.0, 'residual_multiplier': 0.375, 'attention_multiplier': 0.125, 'logits_scaling': 2.5,
                 'attention_bias': True}),
    ('Exaone4', SOME_WINDOWS),
    ('Gemma3Text', SOME_WINDOWS | {'query_pre_attn_scalar': 24, 'tie_word_embeddings': True, 'pad_token_id': PAD}),
    ('Gemma2', SOME_WINDOWS | {'query_pre_attn_scalar': 24, 'attn_logit_softcapping': 2.0, 'final_logit_softcapping': 3.0,
                               'tie_word_embeddings': True}),
    ('Qwen3_5Text', {'layer_types': ['linear_attention', 'full_attention'], 'linear_num_key_heads': 2, 'linear_num_value_heads': 4,
                     'linear_key_head_dim': 8, 'linear_value_head_dim': 16, 'pad_token_id': PAD}),
    ('MiniCPM3', LATENT | {'q_lora_rank': 20, 'attention_bias': True, 'tie_word_embeddings': True, 'scale_emb': 3, 'scale_depth': 1.25,
                           'dim_model_base': 12}),
    ('Youtu', LATENT | {'q_lora_rank': None, 'attention_bias': True, 'rope_interleave': False, 'pad_token_id': PAD}),
    ('DeepseekV2', LATENT | {'q_lora_rank': 20, 'first_k_dense_replace': LAYERS, 'rope_parameters': YARN}),
    ('DeepseekV3', LATENT | {'q_lora_rank': None, 'first_k_dense_replace': LAYERS, 'rope_parameters': YARN}),
]
FUSED = {'qkv_proj': [('q_proj', HEADS * HEAD_DIM), ('k_proj', KV_HEADS * HEAD_DIM), ('v_proj', KV_HEADS * HEAD_DIM)],
         'gate_up_proj': [('gate_proj', HIDDEN), ('up_proj', HIDDEN)]}
GATED = 2 * HEADS * HEAD_DIM  # rows of a q_proj that has the gate of each head behind its q


def draws(name, n):
    """splitmix64 of ../lib/test.h, from a seed that the name says."""
    state, mask, out = 0, 2**64 - 1, []
    for byte in name.encode():
        state = 31 * state + byte & mask
    for _ in range(n):
        state = state + 0x9e3779b97f4a7c15 & mask
        z = (state ^ state >> 30) * 0xbf58476d1ce4e5b9 & mask
        z = (z ^ z >> 27) * 0x94d049bb133111eb & mask
        out.append(z ^ z >> 31)
    return out


def weights(name, shape):
    """Eleven bits each, which f32 holds with every scale here."""
    n = torch.Size(shape).numel()
    u = torch.tensor([(z >> 53) / 1024 - 1 for z in draws(name, n)], dtype=torch.float64).reshape(shape)
    return 1 + u / 4 if 'norm' in name else u / (2 if name.endswith('.bias') or 'embed' in name else 4)


def pieces(name, tensor):
    """The tensors that the trainer has for one of the model's: (name, rows), or heads of rows."""
    if 'q_proj' in name and len(tensor) == GATED:
        by_head = tensor.unflatten(0, (HEADS, 2, HEAD_DIM))
        return [(name.replace('q_proj', part), by_head[:, i]) for i, part in enumerate(('q_proj', 'g_proj'))]
    for fused, parts in FUSED.items():
        if fused in name:
            rows = tensor.split([n for _, n in parts])
            return [(name.replace(fused, part), piece) for (part, _), piece in zip(parts, rows)]
    return [(name, tensor)]


def run(model, tokens):
    model.zero_grad()
    logits = model(tokens[:, :-1], use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    grads = [one for name, p in model.named_parameters() for one in pieces(name, p.grad.double())]
    return loss.item(), dict(grads)


def short(x, digits):
    return float(f'{float(x):.{digits}g}')


def row(name, more):
    config = getattr(transformers, name + 'Config')(
        vocab_size=VOCAB, hidden_size=DIM, intermediate_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        max_position_embeddings=64, bos_token_id=1, eos_token_id=2,
        **{'num_key_value_heads': KV_HEADS, 'head_dim': HEAD_DIM, 'tie_word_embeddings': False, 'pad_token_id': None, **more})
    model = getattr(transformers, class_of(name))(config).float()
    config.architectures = [type(model).__name__]
    with torch.no_grad():
        for one, p in model.named_parameters():
            for part, piece in pieces(one, p):
                piece.copy_(weights(part, piece.shape))
    tokens = torch.tensor([z % VOCAB for z in draws('tokens', BATCH * TOKENS)]).reshape(BATCH, TOKENS)
    rounded, naive = run(model, tokens)
    loss, grads = run(widened(model), tokens)
    numbers = {}
    for one, g in grads.items():
        signs = torch.tensor([1.0 - 2 * (z >> 63) for z in draws('signs of ' + one, g.numel())], dtype=torch.float64)
        numbers[one] = [short((signs * g.flatten()).sum(), 13), short(g.norm(), 5), short((naive[one] - g).norm(), 3)]
    print(f'{config.model_type}: loss {loss:.12f}, {len(numbers)} gradients, the smallest {min(n[1] for n in numbers.values())}')
    return config.model_type, {'config': json.loads(config.to_json_string()), 'loss': [short(loss, 13), short(abs(rounded - loss), 3)], 'grads': numbers}


def main():
    torch.set_num_threads(1)
    made = dict(row(*one) for one in FAMILIES)
    with open(sys.argv[3], 'w', encoding='utf-8') as out:
        families = ',\n'.join(
            f' "{name}": {{\n  "config": {json.dumps(one["config"])},\n  "loss": {json.dumps(one["loss"])},\n  "grads": {{\n'
            + ',\n'.join(f'   "{tensor}": {json.dumps(numbers)}' for tensor, numbers in one['grads'].items()) + '}}'
            for name, one in made.items())
        out.write('{\n' + families + '\n}\n')


if __name__ == '__main__':
    main()

"""hybrid.py -- a small random Qwen3.5, three layers of linear attention to one with a gated output"""

import array
import math
import random

# What a Qwen3.5 says of itself on Hugging Face, but for the sizes.
CONFIG = {'attention_bias': False, 'attention_dropout': 0.0, 'attn_output_gate': True, 'dtype': 'bfloat16', 'eos_token_id': 248044,
          'full_attention_interval': 4, 'head_dim': 32, 'hidden_act': 'silu', 'hidden_size': 64, 'initializer_range': 0.02,
          'intermediate_size': 96, 'linear_conv_kernel_dim': 4, 'linear_key_head_dim': 16, 'linear_num_key_heads': 3,
          'linear_num_value_heads': 6, 'linear_value_head_dim': 8, 'mamba_ssm_dtype': 'float32', 'max_position_embeddings': 262144,
          'mlp_only_layers': [], 'model_type': 'qwen3_5_text', 'mtp_num_hidden_layers': 1, 'mtp_use_dedicated_embeddings': False,
          'num_attention_heads': 4, 'num_hidden_layers': 4, 'num_key_value_heads': 2, 'rms_norm_eps': 1e-06, 'use_cache': True,
          'tie_word_embeddings': False, 'vocab_size': 256,
          'rope_parameters': {'mrope_interleaved': True, 'mrope_section': [2, 1, 1], 'rope_type': 'default', 'rope_theta': 10000000,
                              'partial_rotary_factor': 0.25}}


def tensors_wanted(config):
    D, F, V, dim = (config[name] for name in ('hidden_size', 'intermediate_size', 'vocab_size', 'head_dim'))
    q, kv = config['num_attention_heads'] * dim, config['num_key_value_heads'] * dim
    heads, width, taps = (config['linear_' + name] for name in ('num_value_heads', 'value_head_dim', 'conv_kernel_dim'))
    keys, values = config['linear_num_key_heads'] * config['linear_key_head_dim'], heads * width
    want = {'model.embed_tokens.weight': [V, D], 'model.norm.weight': [D], 'lm_head.weight': [V, D]}
    for layer in range(config['num_hidden_layers']):
        at = f'model.layers.{layer}.'
        want |= {at + 'input_layernorm.weight': [D], at + 'post_attention_layernorm.weight': [D],
                 at + 'mlp.gate_proj.weight': [F, D], at + 'mlp.up_proj.weight': [F, D], at + 'mlp.down_proj.weight': [D, F]}
        want |= {at + 'self_attn.' + name: shape for name, shape in {
            'q_proj.weight': [2 * q, D], 'k_proj.weight': [kv, D], 'v_proj.weight': [kv, D], 'o_proj.weight': [D, q],
            'q_norm.weight': [dim], 'k_norm.weight': [dim]}.items()} if (layer + 1) % config['full_attention_interval'] == 0 else {
                at + 'linear_attn.' + name: shape for name, shape in {
                    'in_proj_qkv.weight': [2 * keys + values, D], 'in_proj_z.weight': [values, D], 'in_proj_b.weight': [heads, D],
                    'in_proj_a.weight': [heads, D], 'out_proj.weight': [D, values], 'conv1d.weight': [2 * keys + values, 1, taps],
                    'A_log': [heads], 'dt_bias': [heads], 'norm.weight': [width]}.items()}
    return want


def random_tensors(config):
    """{name: (dtype, shape, bytes)}"""
    draw, tensors = random.Random(35), {}
    for name, shape in tensors_wanted(config).items():
        middle, width = (1, 0.2) if 'linear_attn.norm' in name else (0, 0.3) if 'conv1d' in name or len(shape) == 1 else (0, 0.1)
        tensors[name] = 'F32', shape, array.array('f', [draw.gauss(middle, width) for _ in range(math.prod(shape))]).tobytes()
    return tensors

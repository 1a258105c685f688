"""latents.py -- small random models whose K and V come from a latent: one gathers it on few ranks, of the other heads are sent"""

import array
import random

SIZES = {'attention_bias': False, 'hidden_size': 64, 'intermediate_size': 96, 'num_hidden_layers': 3, 'num_attention_heads': 4,
         'num_key_value_heads': 4, 'qk_nope_head_dim': 24, 'qk_rope_head_dim': 8, 'v_head_dim': 40, 'rms_norm_eps': 1e-06,
         'vocab_size': 256, 'max_position_embeddings': 128, 'tie_word_embeddings': False}
MODELS = {
    'gathered': {**SIZES, 'model_type': 'youtu', 'q_lora_rank': 20, 'kv_lora_rank': 28, 'rope_interleave': True},
    'heads': {**SIZES, 'model_type': 'deepseek_v2', 'q_lora_rank': None, 'kv_lora_rank': 100, 'attention_bias': True,
              'first_k_dense_replace': 3, 'rope_scaling': {'type': 'yarn', 'factor': 4.0, 'mscale': 1.0, 'mscale_all_dim': 0.5,
                                                           'original_max_position_embeddings': 32}},
}


def tensors_wanted(config):
    D, F, V, r, q_rank = (config[name] for name in ('hidden_size', 'intermediate_size', 'vocab_size', 'kv_lora_rank', 'q_lora_rank'))
    H, dn, dr, dv = (config[name] for name in ('num_attention_heads', 'qk_nope_head_dim', 'qk_rope_head_dim', 'v_head_dim'))
    want = {'model.embed_tokens.weight': [V, D], 'model.norm.weight': [D], 'lm_head.weight': [V, D]}
    for layer in range(config['num_hidden_layers']):
        at = f'model.layers.{layer}.'
        want |= {at + 'input_layernorm.weight': [D], at + 'post_attention_layernorm.weight': [D],
                 at + 'mlp.gate_proj.weight': [F, D], at + 'mlp.up_proj.weight': [F, D], at + 'mlp.down_proj.weight': [D, F]}
        own = {'kv_a_proj_with_mqa.weight': [r + dr, D], 'kv_a_layernorm.weight': [r], 'kv_b_proj.weight': [H * (dn + dv), r],
               'o_proj.weight': [D, H * dv]}
        own |= {'q_proj.weight': [H * (dn + dr), D]} if q_rank is None else {
            'q_a_proj.weight': [q_rank, D], 'q_a_layernorm.weight': [q_rank], 'q_b_proj.weight': [H * (dn + dr), q_rank]}
        if config['attention_bias']:
            own |= {name.replace('weight', 'bias'): [shape[0]] for name, shape in own.items()
                    if name.startswith(('q_a_proj', 'kv_a_proj', 'o_proj'))}
        want |= {at + 'self_attn.' + name: shape for name, shape in own.items()}
    return want


def random_tensors(config):
    """{name: (dtype, shape, bytes)}"""
    draw, tensors = random.Random(7), {}
    for name, shape in tensors_wanted(config).items():
        n = shape[0] * (shape[1] if len(shape) > 1 else 1)
        one, scale = (1, 0.25) if 'norm' in name else (0, 0.08)
        tensors[name] = 'F32', shape, array.array('f', (one + draw.gauss(0, scale) for _ in range(n))).tobytes()
    return tensors

/* families.h -- what a model's name in config.json means: one table, a row a family
 *
 * From a row come the reading and writing of config.json (config_file.h, config_write.h), which of its keys count, the
 * presets of upipe-plan and docs/models.md. Said is what transformers does, of 5.23.
 */
#ifndef LLAMA_FAMILIES_H
#define LLAMA_FAMILIES_H

#include "config.h"

/* Which layers have a window. */
typedef enum llama_windows {
    LLAMA_WINDOWS_NONE,   /* sliding_window is passed over */
    LLAMA_WINDOWS_ALL,    /* all layers, of sliding_window */
    LLAMA_WINDOWS_SWITCH, /* with use_sliding_window: those of layer_types, or from max_window_layers on */
    LLAMA_WINDOWS_TYPES,  /* those of layer_types */
    LLAMA_WINDOWS_LINEAR  /* none: layers of layer_types have linear attention instead */
} llama_windows;

enum {
    LLAMA_HEAD_DIVIDED = 0, /* head_dim that is absent or null: hidden_size / num_attention_heads */
    LLAMA_HEAD_GIVEN = -1,  /* it must be there */
    LLAMA_FUSED_QKV = 1,    /* qkv_proj: the rows of q, then k, then v */
    LLAMA_FUSED_MLP = 2,    /* gate_up_proj: the rows of gate, then up */
    LLAMA_FUSED_GATE = 4    /* q_proj: head by head the rows of q, then of attention's gate */
};

/* The norms of a layer; layout.h has their names. */
typedef enum llama_norms {
    LLAMA_NORMS_PRE,    /* of what both halves read */
    LLAMA_NORMS_GLM4,   /* and of both halves' results, before they are added */
    LLAMA_NORMS_GEMMA,  /* the same by other names */
    LLAMA_NORMS_RESULTS /* of these alone */
} llama_norms;

/* Attention whose K and V come from a latent of each token. */
enum {
    LLAMA_LATENT = 1,
    LLAMA_LATENT_PAIRS = 2,  /* RoPE turns neighbours together, always */
    LLAMA_LATENT_EITHER = 4, /* rope_interleave says it; absent: they do */
    LLAMA_LATENT_DENSE =
        8, /* layers from first_k_dense_replace on have a mixture of experts, and there may be none */
    LLAMA_LATENT_DEPTH =
        16 /* MiniCPM's multipliers; v_head_dim that is absent or null: hidden_size / heads */
};

/* llama_family -- what is 0 is as in a Llama
 *   bias         what attention_bias gives; NONE: true is refused. bias_absent: it is true where it is absent; bias_always:
 *                whatever it says
 *   windows      sliding_window that is absent is `window` tokens, 0 none; every full_every-th layer from the first on has
 *                none where layer_types is absent
 *   pattern      every so many-th layer has no window where layer_types is absent, and sliding_window_pattern, where the
 *                family has that key, says no other number
 *                With linear attention every so many-th layer has none, and full_attention_interval says another number
 *   nope         1: where there is a window, layers without one turn nothing
 *   shifted      1: norms multiply by 1 + the weight that is stored, but for those of linear attention's heads
 *   gemma        1: the gate's activation is gelu by tanh, what the embedding gives is multiplied by the root of
 *                hidden_size, scores by 1 / that of query_pre_attn_scalar
 *   local        theta of layers with a window where rope_local_base_freq is absent; 0: that of all layers
 *   attention_cap, logit_cap  attn_logit_softcapping and final_logit_softcapping where they are absent; 0: none
 *   kv_heads     1: as many as heads where num_key_value_heads is absent or null; 0: it must be there
 *   head_dim     where it is absent; LLAMA_HEAD_...
 *   pad          1 + pad_token_id where it is absent; 0: none
 *   partial      partial_rotary_factor where it is absent; 0: only 1 is built
 *   original     original_max_position_embeddings beside rope_scaling where it is absent, which counts more than that in
 *                it; 0: that counts
 *   ropes        bits of llama_rope: the types that the family has; 0: all
 *   interleaved  RoPE turns pairs (2p, 2p+1)
 *   fused        what is stored as one tensor; LLAMA_FUSED_...
 *   whole        model_type of the larger model whose text part it is, in text_config; NULL: of none. Its tensors' names
 *                begin there with `part` in the place of "model.", and those of the others with a word of `others`
 *   rope_idle    keys of the object of RoPE that change nothing
 *   rope_given   1: rope_scaling or rope_parameters must be there, as without them it is no RoPE of the type default
 *   norms        which ones a layer has
 *   latent       how attention comes from a latent; LLAMA_LATENT_..., 0: it does not
 *   bos          1: bos_token_id cannot be null, and is not written
 *   keys         that count beside llama_keys, a blank around each; idle: that change nothing, beside llama_keys_idle
 */
typedef struct llama_family {
    const char *type, *architecture;
    llama_bias bias;
    int bias_absent, bias_always, qk_norm;
    llama_windows windows;
    int64_t window;
    int full_every, pattern, nope, shifted, gemma, kv_heads, head_dim, tied;
    double norm_eps, rope_theta, local, attention_cap, logit_cap;
    int64_t pad;
    double partial;
    int64_t original;
    unsigned ropes;
    int interleaved, fused, rope_given, bos, latent;
    llama_norms norms;
    const char *keys, *idle, *rope_idle, *whole, *part, *others;
} llama_family;

enum {
    LLAMA_IS_LLAMA,
    LLAMA_IS_MISTRAL,
    LLAMA_IS_QWEN2,
    LLAMA_IS_QWEN3,
    LLAMA_IS_MINISTRAL,
    LLAMA_IS_CWM,
    LLAMA_IS_SMOLLM3,
    LLAMA_IS_SEED_OSS,
    LLAMA_IS_ERNIE4_5,
    LLAMA_IS_PHI3,
    LLAMA_IS_GLM,
    LLAMA_IS_GLM4,
    LLAMA_IS_GRANITE,
    LLAMA_IS_EXAONE4,
    LLAMA_IS_GEMMA3,
    LLAMA_IS_GEMMA2,
    LLAMA_IS_QWEN3_5,
    LLAMA_IS_MINICPM3,
    LLAMA_IS_YOUTU,
    LLAMA_IS_DEEPSEEK_V2,
    LLAMA_IS_DEEPSEEK_V3,
    LLAMA_FAMILIES
};

/* clang-format off */
static const llama_family llama_families[LLAMA_FAMILIES] = {
    {.type = "llama", .architecture = "LlamaForCausalLM", .bias = LLAMA_BIAS_QKVO, .kv_heads = 1,
     .norm_eps = 1e-6, .rope_theta = 1e4, .keys = "", .idle = " sliding_window max_sequence_length "},
    {.type = "mistral", .architecture = "MistralForCausalLM", .windows = LLAMA_WINDOWS_ALL, .window = 4096,
     .norm_eps = 1e-6, .rope_theta = 1e4, .keys = " sliding_window ", .idle = ""},
    {.type = "qwen2", .architecture = "Qwen2ForCausalLM", .bias = LLAMA_BIAS_QKV, .bias_always = 1,
     .windows = LLAMA_WINDOWS_SWITCH, .window = 4096,
     .norm_eps = 1e-6, .rope_theta = 1e4, .keys = " sliding_window max_window_layers use_mrope ", .idle = ""},
    {.type = "qwen3", .architecture = "Qwen3ForCausalLM", .bias = LLAMA_BIAS_QKVO, .qk_norm = 1,
     .windows = LLAMA_WINDOWS_SWITCH, .window = 4096, .head_dim = 128,
     .norm_eps = 1e-6, .rope_theta = 1e4, .keys = " sliding_window max_window_layers ", .idle = ""},
    {.type = "ministral", .architecture = "MinistralForCausalLM", .windows = LLAMA_WINDOWS_TYPES, .window = 4096,
     .head_dim = LLAMA_HEAD_GIVEN, .norm_eps = 1e-6, .rope_theta = 1e4, .keys = " sliding_window ", .idle = ""},
    {.type = "cwm", .architecture = "CwmForCausalLM", .windows = LLAMA_WINDOWS_TYPES, .window = 8192, .full_every = 4,
     .head_dim = 128, .rope_given = 1, .bos = 1, .norm_eps = 1e-5, .rope_theta = 1e6, .keys = " sliding_window ", .idle = ""},
    {.type = "smollm3", .architecture = "SmolLM3ForCausalLM", .bias = LLAMA_BIAS_QKVO, .windows = LLAMA_WINDOWS_SWITCH,
     .tied = 1, .norm_eps = 1e-6, .rope_theta = 2e6, .pad = 1 + 128004,
     .keys = " sliding_window no_rope_layers no_rope_layer_interval ", .idle = " max_window_layers "},
    {.type = "seed_oss", .architecture = "SeedOssForCausalLM", .bias = LLAMA_BIAS_QKV, .bias_absent = 1, .head_dim = 128,
     .norm_eps = 1e-6, .rope_theta = 1e4, .pad = 1 + 1, .keys = " attention_out_bias residual_dropout ", .idle = ""},
    {.type = "ernie4_5", .architecture = "Ernie4_5ForCausalLM", .head_dim = 128, .tied = 1,
     .norm_eps = 1e-5, .rope_theta = 5e5, .pad = 1 + 0, .interleaved = 1, .keys = " use_bias ", .idle = ""},
    {.type = "phi3", .architecture = "Phi3ForCausalLM", .windows = LLAMA_WINDOWS_ALL, .kv_heads = 1,
     .norm_eps = 1e-5, .rope_theta = 1e4, .pad = 1 + 32000, .partial = 1, .original = 4096,
     .ropes = 1u << LLAMA_ROPE_DEFAULT | 1u << LLAMA_ROPE_LONGROPE, .fused = LLAMA_FUSED_QKV | LLAMA_FUSED_MLP,
     .keys = " sliding_window resid_pdrop embd_pdrop lm_head_bias full_attn_mod interpolate_factor ", .idle = " auto_map "},
    {.type = "glm", .architecture = "GlmForCausalLM", .bias = LLAMA_BIAS_QKV, .bias_absent = 1, .head_dim = 128,
     .norm_eps = 1.5625e-07, .rope_theta = 1e4, .pad = 1 + 151329, .partial = 0.5, .interleaved = 1,
     .fused = LLAMA_FUSED_MLP, .keys = "", .idle = ""},
    {.type = "glm4", .architecture = "Glm4ForCausalLM", .bias = LLAMA_BIAS_QKV, .bias_absent = 1, .head_dim = 128,
     .norm_eps = 1.5625e-07, .rope_theta = 1e4, .pad = 1 + 151329, .partial = 0.5, .interleaved = 1,
     .fused = LLAMA_FUSED_MLP, .norms = LLAMA_NORMS_GLM4, .keys = "", .idle = ""},
    {.type = "granite", .architecture = "GraniteForCausalLM", .bias = LLAMA_BIAS_QKVO, .kv_heads = 1,
     .norm_eps = 1e-6, .rope_theta = 1e4,
     .keys = " embedding_multiplier residual_multiplier attention_multiplier logits_scaling ", .idle = ""},
    {.type = "exaone4", .architecture = "Exaone4ForCausalLM", .qk_norm = 1, .windows = LLAMA_WINDOWS_TYPES, .window = 4096,
     .pattern = 4, .nope = 1, .norm_eps = 1e-5, .rope_theta = 1e4, .norms = LLAMA_NORMS_RESULTS,
     .keys = " sliding_window sliding_window_pattern ", .idle = ""},
    {.type = "gemma3_text", .architecture = "Gemma3ForCausalLM", .qk_norm = 1, .windows = LLAMA_WINDOWS_TYPES, .window = 4096,
     .pattern = 6, .shifted = 1, .gemma = 1, .head_dim = 256, .tied = 1, .norm_eps = 1e-6, .rope_theta = 1e6, .local = 1e4, .pad = 1 + 0,
     .norms = LLAMA_NORMS_GEMMA,
     .keys = " sliding_window sliding_window_pattern hidden_activation query_pre_attn_scalar rope_local_base_freq "
             "final_logit_softcapping attn_logit_softcapping use_bidirectional_attention ",
     .idle = " _sliding_window_pattern "},
    {.type = "gemma2", .architecture = "Gemma2ForCausalLM", .windows = LLAMA_WINDOWS_TYPES, .window = 4096, .pattern = 2,
     .shifted = 1, .gemma = 1, .head_dim = 256, .tied = 1, .norm_eps = 1e-6, .rope_theta = 1e4, .attention_cap = 50, .logit_cap = 30,
     .pad = 1 + 0, .norms = LLAMA_NORMS_GEMMA,
     .keys = " sliding_window hidden_activation query_pre_attn_scalar final_logit_softcapping attn_logit_softcapping "
             "use_bidirectional_attention ",
     .idle = " sliding_window_size "},
    {.type = "qwen3_5_text", .architecture = "Qwen3_5ForCausalLM", .qk_norm = 1, .windows = LLAMA_WINDOWS_LINEAR, .pattern = 4,
     .shifted = 1, .head_dim = 256, .norm_eps = 1e-6, .rope_theta = 1e4, .partial = 0.25, .fused = LLAMA_FUSED_GATE,
     .keys = " full_attention_interval linear_num_value_heads linear_num_key_heads linear_key_head_dim linear_value_head_dim "
             "linear_conv_kernel_dim attn_output_gate mlp_only_layers ",
     .idle = " mamba_ssm_dtype mtp_num_hidden_layers mtp_use_dedicated_embeddings ",
     .rope_idle = " mrope_section mrope_interleaved ",
     .whole = "qwen3_5", .part = "model.language_model.", .others = " model.visual. mtp. "},
    {.type = "minicpm3", .architecture = "MiniCPM3ForCausalLM", .bias = LLAMA_BIAS_QKVO, .latent = LLAMA_LATENT | LLAMA_LATENT_DEPTH,
     .tied = 1, .norm_eps = 1e-5, .rope_theta = 1e4,
     .keys = " q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim qk_head_dim v_head_dim scale_emb scale_depth dim_model_base ",
     .idle = " auto_map "},
    {.type = "youtu", .architecture = "YoutuForCausalLM", .bias = LLAMA_BIAS_QKVO, .latent = LLAMA_LATENT | LLAMA_LATENT_EITHER,
     .tied = 1, .norm_eps = 1e-6, .rope_theta = 1e4,
     .keys = " q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim qk_head_dim v_head_dim rope_interleave ",
     .idle = " auto_map embedding_initializer_range "},
    {.type = "deepseek_v2", .architecture = "DeepseekV2ForCausalLM", .bias = LLAMA_BIAS_QKVO,
     .latent = LLAMA_LATENT | LLAMA_LATENT_PAIRS | LLAMA_LATENT_DENSE, .kv_heads = 1, .norm_eps = 1e-6, .rope_theta = 1e4,
     .keys = " q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim qk_head_dim v_head_dim first_k_dense_replace ",
     .idle = " auto_map aux_loss_alpha ep_size moe_intermediate_size moe_layer_freq n_group n_routed_experts n_shared_experts "
             "norm_topk_prob num_experts_per_tok output_router_logits routed_scaling_factor scoring_func seq_aux topk_group "
             "topk_method "},
    {.type = "deepseek_v3", .architecture = "DeepseekV3ForCausalLM", .bias = LLAMA_BIAS_QKVO,
     .latent = LLAMA_LATENT | LLAMA_LATENT_EITHER | LLAMA_LATENT_DENSE, .norm_eps = 1e-6, .rope_theta = 1e4,
     .keys = " q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim qk_head_dim v_head_dim rope_interleave "
             "first_k_dense_replace ",
     .idle = " auto_map aux_loss_alpha ep_size moe_intermediate_size moe_layer_freq n_group n_routed_experts n_shared_experts "
             "norm_topk_prob num_experts_per_tok num_mtp_layers num_nextn_predict_layers output_router_logits "
             "routed_scaling_factor scoring_func seq_aux topk_group topk_method "}};
/* clang-format on */

/* Keys of every family that count: they are used, or must say what is built. */
static const char llama_keys[] =
    " hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "vocab_size rms_norm_eps rope_theta rope_scaling rope_parameters partial_rotary_factor "
    "max_position_embeddings original_max_position_embeddings tie_word_embeddings attention_bias "
    "pad_token_id "
    "model_type architectures torch_dtype dtype hidden_act mlp_bias attention_dropout use_sliding_window "
    "layer_types "
    "is_causal quantization_config per_layer_config text_config ";

/* Keys of a larger model, beside text_config, that change nothing in its text part, or must say the same there. */
static const char llama_keys_whole[] =
    " model_type architectures text_config vision_config image_token_id video_token_id vision_start_token_id "
    "vision_end_token_id tie_word_embeddings torch_dtype dtype ";

/* Keys of every family that change neither what is computed nor what is learned. */
static const char llama_keys_idle[] =
    " _name_or_path _attn_implementation _attn_implementation_autoset attn_implementation _commit_hash "
    "transformers_version transformers.js_config gradient_checkpointing tie_encoder_decoder tf_legacy_loss "
    "unsloth_version unsloth_fixed tokenizer_class bos_token_id eos_token_id sep_token_id cls_token_id "
    "mask_token_id "
    "decoder_start_token_id use_cache initializer_range pretraining_tp rope_interleaved is_llama_config "
    "is_decoder "
    "is_encoder_decoder add_cross_attention chunk_size_feed_forward torchscript use_bfloat16 return_dict "
    "output_attentions output_hidden_states output_scores return_dict_in_generate id2label label2id "
    "num_labels "
    "problem_type finetuning_task task_specific_params prefix max_length min_length do_sample early_stopping "
    "num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p repetition_penalty "
    "length_penalty "
    "no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences "
    "forced_bos_token_id "
    "forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens "
    "begin_suppress_tokens "
    "max_new_tokens cache_implementation ";

/* Whether one of the words, with a blank around each, is this one. */
static inline int llama_is_word(const char *words, const char *name)
{
    const size_t n = strlen(name);
    const char *at = words;
    if (n == 0 || strchr(name, ' ') != NULL) return 0;
    while ((at = strstr(at, name)) != NULL && (at[-1] != ' ' || at[n] != ' ')) ++at;
    return at != NULL;
}

/* Whether the key counts in this family. */
static inline int llama_has_key(const llama_family *f, const char *key)
{
    return llama_is_word(llama_keys, key) || llama_is_word(f->keys, key);
}

/* The family of a new model with these options; -1: none has them together. */
static inline int llama_family_of(const llama_config *c)
{
    const int family = c->attention_bias == LLAMA_BIAS_QKV ? LLAMA_IS_QWEN2
                       : c->window > 0                     ? LLAMA_IS_MISTRAL
                       : c->qk_norm                        ? LLAMA_IS_QWEN3
                                                           : LLAMA_IS_LLAMA;
    if ((c->window > 0 && family != LLAMA_IS_MISTRAL) || (c->qk_norm && family != LLAMA_IS_QWEN3)) return -1;
    return family == LLAMA_IS_MISTRAL && c->attention_bias != LLAMA_BIAS_NONE ? -1 : family;
}

#endif

/* config.h -- the numbers of a Llama, and how config.json and the flags call them
 *
 * families.h has what models of other names do otherwise, layout.h the tensors, and config_file.h reads config.json.
 */
#ifndef LLAMA_CONFIG_H
#define LLAMA_CONFIG_H

#include "../files/fields.h"

/* Which of attention's projections have a bias. */
typedef enum llama_bias { LLAMA_BIAS_NONE, LLAMA_BIAS_QKV, LLAMA_BIAS_QKVO } llama_bias;

/* How the rates of RoPE come from theta; the names are rope_type's. */
typedef enum llama_rope {
    LLAMA_ROPE_DEFAULT,
    LLAMA_ROPE_LINEAR,
    LLAMA_ROPE_DYNAMIC,
    LLAMA_ROPE_LLAMA3,
    LLAMA_ROPE_YARN,
    LLAMA_ROPE_LONGROPE,
    LLAMA_ROPES
} llama_rope;

static const char *const llama_rope_names[LLAMA_ROPES] = {"default", "linear", "dynamic",
                                                          "llama3",  "yarn",   "longrope"};

enum {
    LLAMA_ROPE_PAIRS = 128, /* of the largest head */
    LLAMA_SEES_ALL = 1,     /* by_layer: the layer has no window */
    LLAMA_NO_ROPE = 2,      /* by_layer: the layer turns nothing */
    LLAMA_LINEAR = 4        /* by_layer: its attention is linear */
};

/* Numbers of RoPE that are 0 are not said. */
typedef struct llama_config {
    int64_t layers, dim, hidden, vocab; /* hidden = the MLP's width F */
    int heads, kv_heads, head_dim;
    int tied, qk_norm; /* tied: the head is the embedding table; qk_norm: Qwen3's q_norm and k_norm */
    llama_bias attention_bias;
    double rope_theta, norm_eps;
    int64_t window; /* a token sees so many, its own included; 0 = all up to it */
    int64_t pad;    /* 1 + the token whose row of the embedding gets no gradient from it; 0 = none */
    int64_t family; /* row of llama_families */
    /* Factors of what the embedding gives, of both halves' results and of scores; what logits are divided by. 0:
     * none */
    double embedding_multiplier, residual_multiplier, attention_multiplier, logits_scaling;
    int64_t query_scalar;            /* scores are divided by its root; 0: attention_multiplier says */
    double attention_cap, logit_cap; /* soft-caps; 0: none */
    double rope_local; /* theta of layers with a window, whose RoPE is the default; 0: all are the same */
    int rope_type, rope_untruncated;
    double rope_partial; /* the part of a head that turns; 0 = all */
    double rope_factor, rope_low, rope_high, rope_beta_fast, rope_beta_slow, rope_mscale, rope_mscale_all;
    double rope_attention;
    int64_t rope_original;  /* positions of the training that the factor extends */
    int64_t rope_positions; /* max_position_embeddings, where the rates depend on it */
    double rope_short[LLAMA_ROPE_PAIRS], rope_long[LLAMA_ROPE_PAIRS];
    /* Of linear attention, where a layer has it: heads of v, and of q and k; their dimensions; rows of the convolution */
    int64_t linear_heads, linear_key_heads, linear_key_dim, linear_value_dim, linear_taps;
    /* Of attention whose K and V come from a latent: of each token numbers of what Q is made of (0: of the token itself), and of
     * the latent (0: there is none); of a head of Q and K elements that do not turn, and that do, together head_dim; of V.
     * pairs: neighbours turn together */
    int64_t q_rank, kv_rank;
    int still_dim, turned_dim, v_dim, pairs;
    double
        scale_depth; /* MiniCPM's; what both halves give is multiplied by it over the root of the layers; 0: by 1 */
    int64_t dim_base; /* MiniCPM's; logits are divided by hidden_size over it; 0: by 1 */
    unsigned char by_layer[LLAMA_LAYERS_MAX]; /* bits */
} llama_config;
#define AT(member) offsetof(llama_config, member)
#define ROPE(type) (1u << LLAMA_ROPE_##type)

/* In config.json's order. attention_bias is true there for one bias more than the model type says. Rows of RoPE's types
 * stand in the object rope_scaling or rope_parameters. */
static const field llama_fields[] = {
    {"hidden_size", "model-dim", FLAG_WHOLE, AT(dim), 0, 0, 0, 0},
    {"intermediate_size", "ff-dim", FLAG_WHOLE, AT(hidden), 0, 0, 0, 0},
    {"num_hidden_layers", "layers", FLAG_WHOLE, AT(layers), 0, 0, 0, 0},
    {"num_attention_heads", "heads", FLAG_INT, AT(heads), 0, 0, 0, 0},
    {"num_key_value_heads", "kv-heads", FLAG_INT, AT(kv_heads), 0, 0, 0, 0},
    {"head_dim", "head-dim", FLAG_INT, AT(head_dim), 0, 0, 0, 0},
    {"vocab_size", "vocab", FLAG_WHOLE, AT(vocab), 0, 0, 0, 0},
    {"rms_norm_eps", "norm-eps", FLAG_REAL, AT(norm_eps), 0, 0, 0, 0},
    {"rope_theta", "rope-theta", FLAG_REAL, AT(rope_theta), 0, 0, 0, 0},
    {"sliding_window", "window", FLAG_WHOLE, AT(window), 0, 0, 0, 0},
    {"attention_bias", "attention-bias", FLAG_CHOICE, AT(attention_bias), 0, 0, 0, 0},
    {"tie_word_embeddings", "untied", FLAG_SWITCH, AT(tied), 1, 0, 0, 0},
    {"embedding_multiplier", "embedding-multiplier", FLAG_REAL, AT(embedding_multiplier), 0, 0, 0, 0},
    {"residual_multiplier", "residual-multiplier", FLAG_REAL, AT(residual_multiplier), 0, 0, 0, 0},
    {"attention_multiplier", "attention-multiplier", FLAG_REAL, AT(attention_multiplier), 0, 0, 0, 0},
    {"logits_scaling", "logits-scaling", FLAG_REAL, AT(logits_scaling), 0, 0, 0, 0},
    {"query_pre_attn_scalar", "query-pre-attn-scalar", FLAG_WHOLE, AT(query_scalar), 0, 0, 0, 0},
    {"attn_logit_softcapping", "attention-softcap", FLAG_REAL, AT(attention_cap), 0, 0, 0, 0},
    {"final_logit_softcapping", "logit-softcap", FLAG_REAL, AT(logit_cap), 0, 0, 0, 0},
    {"rope_local_base_freq", "rope-local", FLAG_REAL, AT(rope_local), 0, 0, 0, 0},
    {"linear_num_value_heads", "linear-heads", FLAG_WHOLE, AT(linear_heads), 0, 0, 0, 0},
    {"linear_num_key_heads", "linear-key-heads", FLAG_WHOLE, AT(linear_key_heads), 0, 0, 0, 0},
    {"linear_key_head_dim", "linear-key-dim", FLAG_WHOLE, AT(linear_key_dim), 0, 0, 0, 0},
    {"linear_value_head_dim", "linear-value-dim", FLAG_WHOLE, AT(linear_value_dim), 0, 0, 0, 0},
    {"linear_conv_kernel_dim", "linear-taps", FLAG_WHOLE, AT(linear_taps), 0, 0, 0, 0},
    {"q_lora_rank", "q-rank", FLAG_WHOLE, AT(q_rank), 0, 0, 0, 0},
    {"kv_lora_rank", "kv-rank", FLAG_WHOLE, AT(kv_rank), 0, 0, 0, 0},
    {"qk_nope_head_dim", "still-dim", FLAG_INT, AT(still_dim), 0, 0, 0, 0},
    {"qk_rope_head_dim", "turned-dim", FLAG_INT, AT(turned_dim), 0, 0, 0, 0},
    {"v_head_dim", "v-head-dim", FLAG_INT, AT(v_dim), 0, 0, 0, 0},
    {"rope_interleave", "rope-pairs", FLAG_SWITCH, AT(pairs), 0, 0, 0, 0},
    {"scale_emb", "embedding-multiplier", FLAG_REAL, AT(embedding_multiplier), 0, 0, 0, 0},
    {"scale_depth", "scale-depth", FLAG_REAL, AT(scale_depth), 0, 0, 0, 0},
    {"dim_model_base", "dim-base", FLAG_WHOLE, AT(dim_base), 0, 0, 0, 0},
    {NULL, "qk-norm", FLAG_SWITCH, AT(qk_norm), 0, 0, 0, 0},
    {NULL, "pad-token-id", FLAG_WHOLE, AT(pad), 0, 0, 0, 0},
    {NULL, "model-type", FLAG_WHOLE, AT(family), 0, 0, 0, 0},
    {NULL, "rope-type", FLAG_CHOICE, AT(rope_type), 0, 0, 0, 0},
    {NULL, "rope-positions", FLAG_WHOLE, AT(rope_positions), 0, 0, 0, 0},
    {NULL, "rope-partial", FLAG_REAL, AT(rope_partial), 0, 0, 0, 0},
    {NULL, "layer-types", FLAG_TEXT, AT(by_layer), 0, LLAMA_LAYERS_MAX, 0, 0},
    {"factor", "rope-factor", FLAG_REAL, AT(rope_factor), 0, 0,
     ROPE(LINEAR) | ROPE(DYNAMIC) | ROPE(LLAMA3) | ROPE(YARN) | ROPE(LONGROPE),
     ROPE(LINEAR) | ROPE(DYNAMIC) | ROPE(LLAMA3)},
    {"original_max_position_embeddings", "rope-original", FLAG_WHOLE, AT(rope_original), 0, 0,
     ROPE(LLAMA3) | ROPE(YARN) | ROPE(LONGROPE), 0},
    {"low_freq_factor", "rope-low", FLAG_REAL, AT(rope_low), 0, 0, ROPE(LLAMA3), ROPE(LLAMA3)},
    {"high_freq_factor", "rope-high", FLAG_REAL, AT(rope_high), 0, 0, ROPE(LLAMA3), ROPE(LLAMA3)},
    {"beta_fast", "rope-beta-fast", FLAG_REAL, AT(rope_beta_fast), 0, 0, ROPE(YARN), 0},
    {"beta_slow", "rope-beta-slow", FLAG_REAL, AT(rope_beta_slow), 0, 0, ROPE(YARN), 0},
    {"mscale", "rope-mscale", FLAG_REAL, AT(rope_mscale), 0, 0, ROPE(YARN), 0},
    {"mscale_all_dim", "rope-mscale-all", FLAG_REAL, AT(rope_mscale_all), 0, 0, ROPE(YARN), 0},
    {"truncate", "rope-untruncated", FLAG_SWITCH, AT(rope_untruncated), 1, 0, ROPE(YARN), 0},
    {"attention_factor", "rope-attention", FLAG_REAL, AT(rope_attention), 0, 0, ROPE(YARN) | ROPE(LONGROPE),
     0},
    {"short_factor", "rope-short", FLAG_REAL, AT(rope_short), 0, LLAMA_ROPE_PAIRS, ROPE(LONGROPE),
     ROPE(LONGROPE)},
    {"long_factor", "rope-long", FLAG_REAL, AT(rope_long), 0, LLAMA_ROPE_PAIRS, ROPE(LONGROPE),
     ROPE(LONGROPE)},
};

#undef ROPE
#undef AT

enum { LLAMA_FIELDS = sizeof llama_fields / sizeof *llama_fields };

/* Dimensions of a head that turn. */
static inline int llama_rope_dims(const llama_config *c)
{
    if (c->kv_rank > 0) return c->turned_dim;
    return c->rope_partial > 0 ? (int)((double)c->head_dim * c->rope_partial) : c->head_dim;
}

static inline int llama_is_linear(const llama_config *c, int64_t layer)
{
    return (c->by_layer[layer] & LLAMA_LINEAR) != 0;
}

/* Whether a layer has linear attention. */
static inline int llama_has_linear(const llama_config *c)
{
    int64_t i = 0;
    while (i < c->layers && !llama_is_linear(c, i)) ++i;
    return i < c->layers;
}

/* How many tokens a layer's token sees; 0: all up to it. */
static inline int64_t llama_window(const llama_config *c, int64_t layer)
{
    return c->by_layer[layer] & LLAMA_SEES_ALL ? 0 : c->window;
}

#endif

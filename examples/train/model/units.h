/* units.h -- the weights and gradients of a model in units, and a layer's parts as the library describes them
 *
 * Weights and their gradients come in units, half a layer each (config.h): model_weights_begin and
 * model_grads_begin bring one, and nothing reads a unit that has not begun.
 */
#ifndef LLAMA_UNITS_H
#define LLAMA_UNITS_H

#include "upipe/cpu/upipe_cpu_simd.h"

#include "lora.h"

static inline const llama_tensor *model_tensor(const model_rank *r, llama_kind kind, int64_t layer)
{
    return llama_find(r->m->layout, kind, layer);
}

/* model_vectors_alloc, model_vectors_free -- where layers read the vectors: as they are stored, or of a family whose norms
 * multiply by 1 + w in blocks for 1 + w, which model_vectors_shift fills. Behind each is a 1. w itself is what is trained:
 * 1 + w, rounded, would not give back its bits. */
static inline upipe_status model_vectors_alloc(model_rank *r, const float *trained, const float *frozen)
{
    const llama_layout *l = r->m->layout;
    const int64_t n[2] = {l->vectors, l->frozen[LLAMA_VECTORS]};
    const float one = 1;
    int i;
    r->stored[0] = trained;
    r->stored[1] = frozen;
    for (i = 0; i < 2; ++i) {
        void *data;
        r->vectors[i] = r->stored[i];
        if (n[i] == 0 || !llama_families[l->config.family].shifted) continue;
        UPIPE_TRY(upipe_mem_alloc(r->c->mem, &data, (size_t)(n[i] + 1) * 4, UPIPE_USE_WEIGHTS, "shifted",
                                  &r->c->err));
        r->vectors[i] = r->shifted[i] = (float *)data;
        UPIPE_TRY(r->c->ops->copy(r->c, r->shifted[i] + n[i], &one, sizeof one));
    }
    return UPIPE_OK;
}

static inline upipe_status model_vectors_free(model_rank *r)
{
    UPIPE_TRY(upipe_free(r->c, r->shifted[0]));
    return upipe_free(r->c, r->shifted[1]);
}

/* 1 is added to n of them. */
static inline upipe_status model_vectors_add(model_rank *r, int frozen, int64_t at, int64_t n)
{
    const llama_layout *l = r->m->layout;
    float *const all = r->shifted[frozen];
    const float *const one = all + (frozen ? l->frozen[LLAMA_VECTORS] : l->vectors);
    return upipe_bias_add(r->c, upipe_view_packed(all + at, UPIPE_F32, n, 1, 1), one, 0);
}

/* Before a forward: the stored ones may have changed. Norms that are neighbours are shifted together. */
static inline upipe_status model_vectors_shift(model_rank *r)
{
    const llama_layout *l = r->m->layout;
    const int64_t all[2] = {l->vectors, l->frozen[LLAMA_VECTORS]};
    const llama_tensor *t;
    int64_t at, n;
    int i;
    for (i = 0; i < 2; ++i) {
        if (r->shifted[i] == NULL) continue;
        UPIPE_TRY(r->c->ops->copy(r->c, r->shifted[i], r->stored[i], (size_t)all[i] * 4));
        for (t = l->tensors, at = n = 0; t < l->tensors + l->n; ++t) {
            if (!t->is_vector || t->frozen != i || !llama_is_norm(t->kind)) continue;
            if (n > 0 && t->at != at + n) UPIPE_TRY(model_vectors_add(r, i, at, n));
            if (t->at != at + n) at = t->at, n = 0;
            n += t->n;
        }
        if (n > 0) UPIPE_TRY(model_vectors_add(r, i, at, n));
    }
    return UPIPE_OK;
}

/* The head's matrix is the embedding table where they are tied. */
static inline llama_kind model_head_kind(const model_rank *r)
{
    return r->m->layout->config.tied ? LLAMA_EMBED : LLAMA_HEAD;
}

static inline int model_unit_of(const model_rank *r, llama_kind kind, int64_t layer)
{
    return model_tensor(r, kind, layer)->unit;
}

/* The unit of a layer's attention half: one half follows another behind the embedding. */
static inline int model_unit_attention(int64_t layer)
{
    return (int)(1 + 2 * layer);
}

static inline int model_unit_kind(const model_rank *r, int unit)
{
    if (unit == 0) return MODEL_UNIT_EMBED;
    if (unit > 2 * r->m->layout->config.layers) return MODEL_UNIT_HEAD;
    return unit % 2 != 0 ? MODEL_UNIT_ATTENTION : MODEL_UNIT_MLP;
}

/* The unit's weights can be read, by model_weight, until model_weights_end. Those of unit `next`, whose turn is next,
 * may be gathered meanwhile; -1: it is not known. */
static inline upipe_status model_weights_begin(model_rank *r, int unit, int next)
{
    const int kind = model_unit_kind(r, unit);
    UPIPE_TRY(upipe_zero_weights_begin(r->c, r->zero, unit, &r->weights[0][kind]));
    UPIPE_TRY(upipe_zero_weights_begin(r->c, r->frozen, unit, &r->weights[1][kind]));
    if (next >= 0) {
        UPIPE_TRY(upipe_zero_ahead(r->c, r->zero, next));
        UPIPE_TRY(upipe_zero_ahead(r->c, r->frozen, next));
    }
    return model_lora_merge(r, unit, kind);
}

/* The first unit that the forward of a layer reads; behind the last layer the head. */
static inline int model_unit_above(const model_rank *r, int64_t layer)
{
    return layer < r->m->layout->config.layers ? model_unit_attention(layer)
                                               : model_unit_of(r, model_head_kind(r), -1);
}

/* The first unit that the backward of the layers below this one reads: of the layer below, or of the first layer of its
 * block, which runs again; -1: none. */
static inline int model_unit_below(const model_rank *r, int64_t layer)
{
    if (--layer < 0) return -1;
    while (r->kept.layer[layer].x == NULL) --layer;
    return model_unit_attention(layer);
}

static inline upipe_status model_weights_end(model_rank *r, int unit)
{
    const int kind = model_unit_kind(r, unit);
    UPIPE_TRY(upipe_free(r->c, r->merged[kind]));
    UPIPE_TRY(upipe_zero_weights_end(r->c, r->zero, r->weights[0][kind]));
    UPIPE_TRY(upipe_zero_weights_end(r->c, r->frozen, r->weights[1][kind]));
    r->weights[0][kind] = r->weights[1][kind] = r->merged[kind] = NULL;
    return UPIPE_OK;
}

/* Gradients can be added to the unit's, by model_grad, until model_grads_end. */
static inline upipe_status model_grads_begin(model_rank *r, int unit)
{
    const int kind = model_unit_kind(r, unit);
    UPIPE_TRY(upipe_zero_grads_begin(r->c, r->zero, unit, &r->grads[kind]));
    return model_lora_grads_begin(r, kind);
}

/* Those of the unit's adapted matrices become its adapters', while its weights are there. */
static inline upipe_status model_grads_adapt(model_rank *r, int unit)
{
    return model_lora_grads_end(r, unit, model_unit_kind(r, unit));
}

/* The same for the head, the first unit that ends: the largest one, and it takes no block. */
static inline upipe_status model_grads_first(model_rank *r, int unit)
{
    return upipe_zero_grads_first(r->c, r->zero, unit, &r->grads[model_unit_kind(r, unit)]);
}

static inline upipe_status model_grads_end(model_rank *r, int unit)
{
    float **g = &r->grads[model_unit_kind(r, unit)];
    UPIPE_TRY(upipe_zero_grads_end(r->c, r->zero, unit, *g));
    *g = NULL;
    return UPIPE_OK;
}

static inline const void *model_weight(const model_rank *r, llama_kind kind, int64_t layer)
{
    const llama_tensor *t = model_tensor(r, kind, layer);
    const int unit = model_unit_kind(r, t->unit);
    if (t->lora)
        return upipe_offset(r->merged[unit], (size_t)t->lora_at * upipe_dtype_bytes(r->m->plan.desc.dtype));
    return lora_stored(r, t, unit).data;
}

/* NULL where the model has none of these: QK norm, biases, norms of results. */
static inline const float *model_vector(const model_rank *r, llama_kind kind, int64_t layer)
{
    const llama_tensor *t = model_tensor(r, kind, layer);
    return t != NULL ? r->vectors[t->frozen] + t->at : NULL;
}

/* And NULL of what is frozen, but for matrices that have adapters. */
static inline float *model_grad(const model_rank *r, llama_kind kind, int64_t layer)
{
    const llama_tensor *t = model_tensor(r, kind, layer);
    if (t != NULL && t->lora) return r->adapted_grads[model_unit_kind(r, t->unit)] + t->lora_at;
    if (t == NULL || t->frozen) return NULL;
    return t->is_vector ? r->vector_grads + t->at
                        : r->grads[model_unit_kind(r, t->unit)] + (t->at - r->m->layout->first[t->unit]);
}

/* ---- a layer's parts, as the library describes them ---- */

/* A factor as the calls take it: 0, as there is nothing to multiply, where it is 1 or the model has none. */
static inline float model_factor(double factor)
{
    return factor == 1 ? 0 : (float)factor;
}

/* Of what the embedding gives: Gemma's root, and MiniCPM's factor, are rounded to the type of the weights, as transformers
 * does. */
static inline float model_embed_factor(const model_rank *r)
{
    const llama_config *config = &r->m->layout->config;
    const llama_family *family = &llama_families[config->family];
    const float factor =
        family->gemma ? (float)sqrt((double)config->dim) : model_factor(config->embedding_multiplier);
    if (r->m->plan.desc.dtype != UPIPE_BF16 || !(family->gemma || family->latent & LLAMA_LATENT_DEPTH))
        return factor;
    return upipe_bf16_to_f32(upipe_f32_to_bf16(factor));
}

static inline float model_logit_scale(const llama_config *config)
{
    return config->logits_scaling > 0 ? model_factor(1 / config->logits_scaling) : 0;
}

static inline upipe_layer model_attention_layer(const model_rank *r, int64_t layer)
{
    const llama_config *config = &r->m->layout->config;
    upipe_layer l;
    memset(&l, 0, sizeof l);
    l.plan = &r->m->plan;
    l.id = layer + 1; /* sharded weights are gathered into other blocks for the backward */
    l.wq = model_weight(r, LLAMA_WQ, layer);
    l.wk = model_weight(r, LLAMA_WK, layer);
    l.wv = model_weight(r, LLAMA_WV, layer);
    l.wo = model_weight(r, LLAMA_WO, layer);
    if (model_tensor(r, LLAMA_WG, layer) != NULL) l.wg = model_weight(r, LLAMA_WG, layer);
    if (!(config->by_layer[layer] & LLAMA_NO_ROPE)) {
        l.rope_theta = config->rope_theta;
        l.rope_rates = r->m->rates.own ? r->m->rates.value : NULL;
        l.rope_factor = r->m->rates.factor;
        l.rope_dims = r->m->rates.dims;
        l.rope_interleaved = llama_families[config->family].interleaved;
        if (config->rope_local > 0 && llama_window(config, layer) > 0) {
            l.rope_theta = config->rope_local;
            l.rope_rates = NULL;
            l.rope_factor = 0;
        }
    }
    l.scale = (float)(config->query_scalar > 0 ? 1 / sqrt((double)config->query_scalar)
                                               : config->attention_multiplier);
    l.mask.causal = 1;
    l.mask.window = llama_window(config, layer);
    l.mask.softcap = (float)config->attention_cap;
    l.mask.borders.cu_seqlens = r->borders;
    l.mask.borders.cu_seqlens_n = r->borders_n;
    l.tile_rows = config->dim;
    l.q_norm_weight = model_vector(r, LLAMA_QNORM, layer);
    l.k_norm_weight = model_vector(r, LLAMA_KNORM, layer);
    l.norm_eps = l.q_norm_weight != NULL ? (float)config->norm_eps : 0;
    l.bq = model_vector(r, LLAMA_BQ, layer);
    l.bk = model_vector(r, LLAMA_BK, layer);
    l.bv = model_vector(r, LLAMA_BV, layer);
    l.bo = model_vector(r, LLAMA_BO, layer);
    return l;
}

/* A layer of linear attention, a key head a stage: so it holds the least, and later ranks wait for the least. */
static inline upipe_linear_layer model_linear_layer(const model_rank *r, int64_t layer)
{
    const llama_config *config = &r->m->layout->config;
    upipe_linear_layer l;
    memset(&l, 0, sizeof l);
    l.plan = &r->m->plan;
    l.id = layer + 1; /* as an attention layer's */
    l.borders.cu_seqlens = r->borders;
    l.borders.cu_seqlens_n = r->borders_n;
    l.capacity = r->m->capacity;
    l.rules = &r->m->rules;
    l.heads = (int)config->linear_heads;
    l.key_heads = (int)config->linear_key_heads;
    l.key_dim = (int)config->linear_key_dim;
    l.value_dim = (int)config->linear_value_dim;
    l.taps = (int)config->linear_taps;
    l.stage_keys = 1;
    l.w_qkv = model_weight(r, LLAMA_LINEAR_QKV, layer);
    l.w_z = model_weight(r, LLAMA_LINEAR_Z, layer);
    l.w_b = model_weight(r, LLAMA_LINEAR_B, layer);
    l.w_a = model_weight(r, LLAMA_LINEAR_A, layer);
    l.w_out = model_weight(r, LLAMA_LINEAR_OUT, layer);
    l.conv = model_vector(r, LLAMA_CONV, layer);
    l.a_log = model_vector(r, LLAMA_A_LOG, layer);
    l.dt_bias = model_vector(r, LLAMA_DT_BIAS, layer);
    l.norm_weight = model_vector(r, LLAMA_LINEAR_NORM, layer);
    l.norm_eps = (float)config->norm_eps;
    return l;
}

static inline upipe_linear_layer_grads model_linear_grads(const model_rank *r, int64_t layer)
{
    upipe_linear_layer_grads g;
    g.w_qkv = model_grad(r, LLAMA_LINEAR_QKV, layer);
    g.w_z = model_grad(r, LLAMA_LINEAR_Z, layer);
    g.w_b = model_grad(r, LLAMA_LINEAR_B, layer);
    g.w_a = model_grad(r, LLAMA_LINEAR_A, layer);
    g.w_out = model_grad(r, LLAMA_LINEAR_OUT, layer);
    g.conv = model_grad(r, LLAMA_CONV, layer);
    g.a_log = model_grad(r, LLAMA_A_LOG, layer);
    g.dt_bias = model_grad(r, LLAMA_DT_BIAS, layer);
    g.norm_weight = model_grad(r, LLAMA_LINEAR_NORM, layer);
    return g;
}

static inline upipe_grads model_attention_grads(const model_rank *r, int64_t layer)
{
    upipe_grads g;
    memset(&g, 0, sizeof g);
    g.wq = model_grad(r, LLAMA_WQ, layer);
    g.wk = model_grad(r, LLAMA_WK, layer);
    g.wv = model_grad(r, LLAMA_WV, layer);
    g.wo = model_grad(r, LLAMA_WO, layer);
    g.wg = model_grad(r, LLAMA_WG, layer);
    g.q_norm_weight = model_grad(r, LLAMA_QNORM, layer);
    g.k_norm_weight = model_grad(r, LLAMA_KNORM, layer);
    g.bq = model_grad(r, LLAMA_BQ, layer);
    g.bk = model_grad(r, LLAMA_BK, layer);
    g.bv = model_grad(r, LLAMA_BV, layer);
    g.bo = model_grad(r, LLAMA_BO, layer);
    return g;
}

static inline upipe_mlp model_mlp(const model_rank *r, int64_t layer)
{
    upipe_mlp m;
    memset(&m, 0, sizeof m);
    m.w_gate = model_weight(r, LLAMA_GATE, layer);
    m.w_up = model_weight(r, LLAMA_UP, layer);
    m.w_down = model_weight(r, LLAMA_DOWN, layer);
    m.norm_weight = model_vector(r, LLAMA_NORM2, layer);
    m.post_norm_weight = model_vector(r, LLAMA_POST_NORM2, layer);
    m.norm_eps = (float)r->m->layout->config.norm_eps;
    m.hidden = r->m->layout->config.hidden;
    m.gelu = llama_families[r->m->layout->config.family].gemma;
    m.residual = 1;
    m.result_scale = model_factor(r->m->layout->config.residual_multiplier);
    m.tile_bytes = r->m->tile_bytes;
    return m;
}

static inline upipe_loss model_head(const model_rank *r)
{
    upipe_loss h;
    memset(&h, 0, sizeof h);
    h.w = model_weight(r, model_head_kind(r), -1);
    h.norm_weight = model_vector(r, LLAMA_NORM, -1);
    h.norm_eps = (float)r->m->layout->config.norm_eps;
    h.logit_scale = model_logit_scale(&r->m->layout->config);
    h.logit_softcap = (float)r->m->layout->config.logit_cap;
    h.vocab = r->m->layout->config.vocab;
    h.tile_bytes = r->m->tile_bytes;
    return h;
}

#endif

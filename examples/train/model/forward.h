/* forward.h -- a Llama's forward on one rank, assembled from upipe's primitives; model.h has an overview
 *
 *     model_fwd(&rank, &x, 1);                 embedding and layers, with what the backward needs
 *     model_logits(&rank, logits, rows);       the head, of some rows
 */
#ifndef LLAMA_FORWARD_H
#define LLAMA_FORWARD_H

#include "attention.h"

/* ---- the norm, and sums, of what may be in the second pool ---- */

/* y += x, which lies in the second pool if it is `away`. */
static inline upipe_status model_add(model_rank *r, upipe_view y, upipe_view x, int away)
{
    activations_tiles t;
    UPIPE_TRY(activations_tiles_begin(&r->kept, r->c, &t, x, away, NULL));
    while (t.tile.n > 0) {
        UPIPE_TRY(r->c->ops->add(r->c, upipe_view_rows(y, t.at.row, t.tile.n), t.tile));
        UPIPE_TRY(activations_tiles_next(&r->kept, r->c, &t));
    }
    return activations_tiles_end(r->c, &t);
}

/* A part of the normed stream as the device reads it: in place, or where that lies in the second pool a new block. */
static inline upipe_status model_here(model_rank *r, upipe_view *here, upipe_view there)
{
    *here = there;
    if (r->m->fpdt.segments == 0) return UPIPE_OK;
    return model_alloc_rows(r, r->c->mem, here, there.n, UPIPE_USE_OTHER, "normed");
}

/* It has been written, and is where it belongs. */
static inline upipe_status model_there(model_rank *r, upipe_view there, upipe_view here)
{
    if (r->m->fpdt.segments == 0) return UPIPE_OK;
    UPIPE_TRY(model_copy(r, there, here));
    return model_free_block(r, here);
}

/* n = the attention half's norm of x, or x where it has none; x lies in the second pool if it is `away`. */
static inline upipe_status model_norm(model_rank *r, int64_t layer, upipe_view n, upipe_view x, int away)
{
    const float *weight = model_vector(r, LLAMA_NORM1, layer);
    activations_tiles t;
    upipe_view here;
    int i;
    for (i = 0; i < model_parts(r->m); ++i) {
        UPIPE_TRY(model_here(r, &here, model_part(r->m, n, i)));
        UPIPE_TRY(activations_tiles_begin(&r->kept, r->c, &t, model_part(r->m, x, i), away, here.data));
        while (t.tile.n > 0) {
            upipe_view rows = upipe_view_rows(here, t.at.row, t.tile.n);
            UPIPE_TRY(weight != NULL ? r->c->ops->rmsnorm(r->c, rows, t.tile, weight,
                                                          (float)r->m->layout->config.norm_eps)
                                     : r->c->ops->cast(r->c, rows, t.tile));
            UPIPE_TRY(activations_tiles_next(&r->kept, r->c, &t));
        }
        UPIPE_TRY(activations_tiles_end(r->c, &t));
        UPIPE_TRY(model_there(r, model_part(r->m, n, i), here));
    }
    return UPIPE_OK;
}

/* ---- layers ---- */

static inline upipe_status model_mlp_fwd(model_rank *r, int64_t layer, upipe_view x)
{
    const int unit = model_unit_of(r, LLAMA_GATE, layer);
    upipe_mlp m;
    model_phase(r, MODEL_MLP_FWD);
    UPIPE_TRY(model_weights_begin(r, unit, model_unit_above(r, layer + 1)));
    m = model_mlp(r, layer);
    UPIPE_TRY(upipe_mlp_fwd(r->c, &m, x, x));
    UPIPE_TRY(model_weights_end(r, unit));
    model_phase(r, UPIPE_PHASE_OTHER);
    return UPIPE_OK;
}

/* Whether what the attention half gives is changed before it is added to x. */
static inline int model_is_changed(const model_rank *r, int64_t layer)
{
    return model_vector(r, LLAMA_POST_NORM1, layer) != NULL ||
           model_factor(r->m->layout->config.residual_multiplier) != 0;
}

/* y, what it gives, becomes what is added: its norm, or a multiple of it; no family has both. */
static inline upipe_status model_change(model_rank *r, int64_t layer, upipe_view y)
{
    const llama_config *config = &r->m->layout->config;
    const float *post = model_vector(r, LLAMA_POST_NORM1, layer);
    if (!model_is_changed(r, layer)) return UPIPE_OK;
    return post != NULL ? r->c->ops->rmsnorm(r->c, y, y, post, (float)config->norm_eps)
                        : r->c->ops->scale(r->c, y, y, model_factor(config->residual_multiplier));
}

/* One layer: x, of which copies may be being made, becomes its result. */
static inline upipe_status model_layer_fwd(model_rank *r, int64_t layer, upipe_view x, int keep_attention)
{
    upipe_ctx *c = r->c;
    const int unit = model_unit_attention(layer), mlp = model_unit_of(r, LLAMA_GATE, layer);
    attention a;
    upipe_view n, y;
    int i;
    UPIPE_TRY(model_weights_begin(r, unit, mlp));
    a = attention_of(r, layer);
    UPIPE_TRY(model_alloc_rows(r, a.pool, &n, r->m->rows, UPIPE_USE_OTHER, "normed"));
    UPIPE_TRY(model_norm(r, layer, n, x, 0));
    a.x = n;
    UPIPE_TRY(a.kind->fwd(&a, n));
    if (!a.kind->reads_x) UPIPE_TRY(upipe_mem_free(a.pool, n.data, &c->err));
    if (keep_attention) UPIPE_TRY(a.kind->keep(&a));
    for (i = 0; i < model_parts(r->m); ++i) {
        y = n;
        if (!a.kind->reads_x) y.data = NULL;
        UPIPE_TRY(a.kind->out(&a, i, &y));
        UPIPE_TRY(model_change(r, layer, y));
        UPIPE_TRY(activations_wait(&r->kept, c)); /* copies of O and x are made */
        UPIPE_TRY(c->ops->add(c, model_part(r->m, x, i), y));
        UPIPE_TRY(model_free_block(r, y));
    }
    UPIPE_TRY(a.kind->free(&a, keep_attention));
    UPIPE_TRY(model_weights_end(r, unit));
    return model_mlp_fwd(r, layer, x);
}

/* x, taken here, becomes the stream after the last layer. With keep nonzero the backward's copies are kept. */
static inline upipe_status model_fwd(model_rank *r, upipe_view *x, int keep)
{
    const llama_config *config = &r->m->layout->config;
    const int unit = model_unit_of(r, LLAMA_EMBED, -1);
    upipe_view table;
    int64_t i;
    model_phase(r, MODEL_EMBED);
    UPIPE_TRY(model_vectors_shift(r));
    UPIPE_TRY(model_alloc(r, x, UPIPE_USE_STREAM, "stream"));
    UPIPE_TRY(model_weights_begin(r, unit, model_unit_above(r, 0)));
    table = upipe_view_packed((void *)(uintptr_t)model_weight(r, LLAMA_EMBED, -1), r->m->plan.desc.dtype,
                              config->vocab, 1, (int32_t)config->dim);
    UPIPE_TRY(r->c->ops->embed(r->c, *x, table, r->tokens));
    if (model_embed_factor(r) != 0) UPIPE_TRY(r->c->ops->scale(r->c, *x, *x, model_embed_factor(r)));
    UPIPE_TRY(model_weights_end(r, unit));
    model_phase(r, UPIPE_PHASE_OTHER);
    for (i = 0; i < config->layers; ++i) {
        const activations_row row = activations_of(&r->m->activations, i);
        if (keep && row.x) UPIPE_TRY(activations_keep_x(&r->kept, r->c, i, *x, row.away));
        UPIPE_TRY(model_layer_fwd(r, i, *x, keep && row.attention));
    }
    return UPIPE_OK;
}

/* model_loss_fwd -- the loss of each token of the stream after the last layer, into r->losses */
static inline upipe_status model_loss_fwd(model_rank *r, upipe_view x)
{
    const int unit = model_unit_of(r, model_head_kind(r), -1);
    upipe_loss h;
    model_phase(r, MODEL_LOSS);
    UPIPE_TRY(model_weights_begin(r, unit, -1));
    h = model_head(r);
    UPIPE_TRY(upipe_loss_fwd(r->c, &h, r->losses, x, r->targets));
    UPIPE_TRY(model_weights_end(r, unit));
    model_phase(r, UPIPE_PHASE_OTHER);
    return UPIPE_OK;
}

/* model_logits -- f32 logits [n][vocab] of n rows of the stream, in the device's memory, without a soft-cap: on the host
 *                 model_logits_cap applies it; the head's weights have begun */
static inline upipe_status model_logits(model_rank *r, upipe_view logits, upipe_view x)
{
    const llama_config *config = &r->m->layout->config;
    upipe_ctx *c = r->c;
    upipe_view w = upipe_view_packed((void *)(uintptr_t)model_weight(r, model_head_kind(r), -1), x.dtype,
                                     config->vocab, 1, (int32_t)config->dim);
    upipe_view n = upipe_view_packed(NULL, x.dtype, x.n, 1, x.d);
    size_t bytes = c->ops->gemm_bytes(c->ops, logits, n, w, UPIPE_GEMM_TRANS_B);
    void *work;
    UPIPE_TRY(upipe_mem_alloc(c->mem, &n.data, (size_t)(x.n * x.d) * upipe_dtype_bytes(x.dtype),
                              UPIPE_USE_OTHER, "normed", &c->err));
    UPIPE_TRY(upipe_mem_alloc(c->mem, &work, bytes, UPIPE_USE_LOSS, "logits_work", &c->err));
    UPIPE_TRY(c->ops->rmsnorm(c, n, x, model_vector(r, LLAMA_NORM, -1), (float)config->norm_eps));
    UPIPE_TRY(c->ops->gemm(c, logits, n, w, UPIPE_GEMM_TRANS_B, work, bytes));
    if (model_logit_scale(config) != 0)
        UPIPE_TRY(c->ops->scale(c, logits, logits, model_logit_scale(config)));
    UPIPE_TRY(upipe_mem_free(c->mem, work, &c->err));
    return upipe_mem_free(c->mem, n.data, &c->err);
}

static inline void model_logits_cap(const llama_config *config, float *logits, int64_t n)
{
    const float cap = (float)config->logit_cap;
    int64_t i;
    for (i = 0; cap > 0 && i < n; ++i) logits[i] = cap * tanhf(logits[i] / cap);
}

#endif

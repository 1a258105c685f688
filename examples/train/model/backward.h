/* backward.h -- a Llama's backward on one rank, and its losses; model.h has an overview */
#ifndef LLAMA_BACKWARD_H
#define LLAMA_BACKWARD_H

#include "forward.h"

/* ---- the gradient of the stream, in the second pool meanwhile ---- */

/* The gradient of the stream waits in the second pool: begins the copy. */
static inline upipe_status model_grad_put(model_rank *r, void **there, upipe_view g)
{
    *there = NULL;
    if (!r->m->activations.grad) return UPIPE_OK;
    return activations_put(&r->kept, r->c, there, g.data, activations_bytes(g), "stream");
}

/* It is there, and nowhere else. */
static inline upipe_status model_grad_leave(model_rank *r, const void *there, upipe_view g)
{
    if (there == NULL) return UPIPE_OK;
    UPIPE_TRY(activations_wait(&r->kept, r->c));
    return model_free_block(r, g);
}

/* It is back. */
static inline upipe_status model_grad_fetch(model_rank *r, void *there, upipe_view *g)
{
    if (there == NULL) return UPIPE_OK;
    UPIPE_TRY(model_alloc(r, g, UPIPE_USE_STREAM, "stream"));
    UPIPE_TRY(activations_copy(&r->kept, r->c, g->data, there, activations_bytes(*g)));
    UPIPE_TRY(activations_wait(&r->kept, r->c));
    return upipe_mem_free(r->kept.second, there, &r->c->err);
}

/* ---- embedding and loss ---- */

/* The stream becomes the gradient of scale times the sum of the losses. The gradient of a tied embedding goes on to
 * model_embed_bwd, so that its sums are the same however gradients are held. */
static inline upipe_status model_loss_bwd(model_rank *r, upipe_view x, float scale)
{
    const int unit = model_unit_of(r, model_head_kind(r), -1), tied = r->m->layout->config.tied;
    upipe_loss h;
    upipe_loss_grads g;
    model_phase(r, MODEL_LOSS);
    UPIPE_TRY(tied ? model_grads_begin(r, unit) : model_grads_first(r, unit));
    UPIPE_TRY(model_weights_begin(r, unit, model_unit_below(r, r->m->layout->config.layers)));
    h = model_head(r);
    g.w = model_grad(r, model_head_kind(r), -1);
    g.norm_weight = model_grad(r, LLAMA_NORM, -1);
    h.scale = scale;
    UPIPE_TRY(upipe_loss_bwd(r->c, &h, x, &g, r->losses, x, r->targets));
    UPIPE_TRY(model_weights_end(r, unit));
    if (!tied) UPIPE_TRY(model_grads_end(r, unit));
    model_phase(r, UPIPE_PHASE_OTHER);
    return UPIPE_OK;
}

/* The row of the padding's token as it was before or, with `back`, again: its own uses give it no gradient, as in
 * PyTorch's padding_idx. What a tied head has added to it stays. */
static inline upipe_status model_embed_pad(model_rank *r, upipe_view table, void **row, int back)
{
    upipe_view one;
    if (r->m->layout->config.pad == 0) return UPIPE_OK;
    one = upipe_view_rows(table, r->m->layout->config.pad - 1, 1);
    if (!back)
        UPIPE_TRY(
            upipe_mem_alloc(r->c->mem, row, activations_bytes(one), UPIPE_USE_OTHER, "padding", &r->c->err));
    UPIPE_TRY(r->c->ops->copy(r->c, back ? one.data : *row, back ? *row : one.data, activations_bytes(one)));
    return back ? upipe_mem_free(r->c->mem, *row, &r->c->err) : UPIPE_OK;
}

/* The gradient of the embedding, unless that is frozen, from g, that of the first layer's input, whose block goes back
 * to the pool. Where a rank holds no whole gradient until now, and in segments little else, g waits in the second pool
 * and is read by tiles. */
static inline upipe_status model_embed_bwd(model_rank *r, upipe_view g)
{
    const llama_config *config = &r->m->layout->config;
    const int unit = model_unit_of(r, LLAMA_EMBED, -1);
    const int away = r->m->fpdt.segments > 0 && r->zero->stage >= 2 && !config->tied;
    activations_tiles t;
    upipe_view table;
    void *padding = NULL;
    if (model_tensor(r, LLAMA_EMBED, -1)->frozen) return model_free_block(r, g);
    if (model_embed_factor(r) != 0) UPIPE_TRY(r->c->ops->scale(r->c, g, g, model_embed_factor(r)));
    if (away) {
        void *there;
        UPIPE_TRY(activations_put(&r->kept, r->c, &there, g.data, activations_bytes(g), "stream"));
        UPIPE_TRY(model_grad_leave(r, there, g));
        g.data = there;
    }
    if (!config->tied) UPIPE_TRY(model_grads_begin(r, unit));
    table =
        upipe_view_packed(model_grad(r, LLAMA_EMBED, -1), UPIPE_F32, config->vocab, 1, (int32_t)config->dim);
    UPIPE_TRY(model_embed_pad(r, table, &padding, 0));
    UPIPE_TRY(activations_tiles_begin(&r->kept, r->c, &t, g, away, NULL));
    while (t.tile.n > 0) {
        UPIPE_TRY(r->c->ops->embed_bwd(r->c, table, t.tile, r->tokens + t.at.row));
        UPIPE_TRY(activations_tiles_next(&r->kept, r->c, &t));
    }
    UPIPE_TRY(activations_tiles_end(r->c, &t));
    UPIPE_TRY(model_embed_pad(r, table, &padding, 1));
    UPIPE_TRY(upipe_mem_free(away ? r->second : r->c->mem, g.data, &r->c->err));
    return model_grads_end(r, unit);
}

/* ---- layers ---- */

/* g += the gradient dn through the attention half's norm of x, or dn where it has none; x lies in the second pool if it
 * is `away`. */
static inline upipe_status model_norm_bwd(model_rank *r, int64_t layer, upipe_view g, upipe_view dn,
                                          upipe_view x, int away)
{
    const float *weight = model_vector(r, LLAMA_NORM1, layer);
    activations_tiles t;
    int i;
    for (i = 0; i < model_parts(r->m); ++i) {
        const upipe_view rows = model_part(r->m, g, i), there = model_part(r->m, dn, i);
        upipe_view here;
        UPIPE_TRY(model_here(r, &here, there));
        if (here.data != there.data) UPIPE_TRY(model_copy(r, here, there));
        UPIPE_TRY(activations_tiles_begin(&r->kept, r->c, &t, model_part(r->m, x, i), away, NULL));
        while (t.tile.n > 0) {
            const upipe_view dx = upipe_view_rows(rows, t.at.row, t.tile.n);
            const upipe_view dy = upipe_view_rows(here, t.at.row, t.tile.n);
            UPIPE_TRY(weight == NULL ? r->c->ops->add(r->c, dx, dy)
                                     : r->c->ops->rmsnorm_bwd(r->c, dx, dy, t.tile, weight,
                                                              (float)r->m->layout->config.norm_eps,
                                                              model_grad(r, LLAMA_NORM1, layer), 1));
            UPIPE_TRY(activations_tiles_next(&r->kept, r->c, &t));
        }
        UPIPE_TRY(activations_tiles_end(r->c, &t));
        if (here.data != there.data) UPIPE_TRY(model_free_block(r, here));
    }
    return UPIPE_OK;
}

/* g, the gradient of the MLP half's result, becomes that of its input x, which is as model_add's. */
static inline upipe_status model_mlp_bwd(model_rank *r, int64_t layer, upipe_view g, upipe_view x, int away)
{
    const int unit = model_unit_of(r, LLAMA_GATE, layer);
    upipe_mlp m;
    upipe_mlp_grads grads;
    activations_tiles t;
    model_phase(r, MODEL_MLP_BWD);
    UPIPE_TRY(model_weights_begin(r, unit, model_unit_below(r, layer)));
    UPIPE_TRY(model_grads_begin(r, unit));
    m = model_mlp(r, layer);
    grads.w_gate = model_grad(r, LLAMA_GATE, layer);
    grads.w_up = model_grad(r, LLAMA_UP, layer);
    grads.w_down = model_grad(r, LLAMA_DOWN, layer);
    grads.norm_weight = model_grad(r, LLAMA_NORM2, layer);
    grads.post_norm_weight = model_grad(r, LLAMA_POST_NORM2, layer);
    UPIPE_TRY(activations_tiles_begin(&r->kept, r->c, &t, x, away, NULL));
    while (t.tile.n > 0) {
        upipe_view rows = upipe_view_rows(g, t.at.row, t.tile.n);
        UPIPE_TRY(upipe_mlp_bwd(r->c, &m, rows, &grads, rows, t.tile));
        UPIPE_TRY(activations_tiles_next(&r->kept, r->c, &t));
    }
    UPIPE_TRY(activations_tiles_end(r->c, &t));
    UPIPE_TRY(model_grads_adapt(r, unit));
    UPIPE_TRY(model_weights_end(r, unit));
    UPIPE_TRY(model_grads_end(r, unit));
    model_phase(r, UPIPE_PHASE_OTHER);
    return UPIPE_OK;
}

/* n = x + O * Wo^T, or what that is changed to, which the MLP reads; x lies in the second pool if it is `away`. */
static inline upipe_status model_between(model_rank *r, attention *a, upipe_view n, upipe_view x, int away)
{
    int i;
    for (i = 0; i < model_parts(r->m); ++i) {
        const upipe_view there = model_part(r->m, n, i);
        upipe_view here = there;
        if (a->pool != r->c->mem) here.data = NULL;
        UPIPE_TRY(a->kind->out(a, i, &here));
        UPIPE_TRY(model_change(r, a->at, here));
        UPIPE_TRY(model_add(r, here, model_part(r->m, x, i), away));
        UPIPE_TRY(model_there(r, there, here));
    }
    return UPIPE_OK;
}

/* dy, a block taken here, = the gradient of O * Wo^T from that of what it is changed to; for a norm O * Wo^T is made
 * again. */
static inline upipe_status model_change_bwd(model_rank *r, attention *a, upipe_view *dy, upipe_view g)
{
    int i;
    UPIPE_TRY(model_alloc(r, dy, UPIPE_USE_OTHER, "attended"));
    if (model_vector(r, LLAMA_POST_NORM1, a->at) == NULL)
        return r->c->ops->scale(r->c, *dy, g, model_factor(r->m->layout->config.residual_multiplier));
    for (i = 0; i < model_parts(r->m); ++i) {
        upipe_view part = model_part(r->m, *dy, i);
        UPIPE_TRY(a->kind->out(a, i, &part));
        UPIPE_TRY(r->c->ops->rmsnorm_bwd(
            r->c, part, model_part(r->m, g, i), part, model_vector(r, LLAMA_POST_NORM1, a->at),
            (float)r->m->layout->config.norm_eps, model_grad(r, LLAMA_POST_NORM1, a->at), 0));
    }
    return UPIPE_OK;
}

/* A layer's backward: *g, the gradient of its result, becomes that of its input. One block is in turn the
 * norm's result, what the MLP reads, the norm's result again, and its gradient: so no hole is left. */
static inline upipe_status model_layer_bwd(model_rank *r, int64_t layer, upipe_view *g)
{
    upipe_ctx *c = r->c;
    const int away = r->kept.layer[layer].away;
    const int unit = model_unit_attention(layer), mlp = model_unit_of(r, LLAMA_GATE, layer);
    upipe_view x = *g, n, dy;
    attention a;
    upipe_grads grads;
    void *there;
    x.data = r->kept.layer[layer].x;
    UPIPE_TRY(model_weights_begin(r, unit, mlp));
    a = attention_of(r, layer);
    UPIPE_TRY(model_alloc_rows(r, a.pool, &n, r->m->rows, UPIPE_USE_OTHER, "normed"));
    a.x = n;
    if (!attention_kept(&a) || a.kind->reads_x) UPIPE_TRY(model_norm(r, layer, n, x, away));
    if (attention_kept(&a))
        UPIPE_TRY(a.kind->fetch(&a));
    else
        UPIPE_TRY(a.kind->fwd(&a, n));
    UPIPE_TRY(model_between(r, &a, n, x, away));
    UPIPE_TRY(model_mlp_bwd(r, layer, *g, n, a.pool != c->mem));
    UPIPE_TRY(model_grads_begin(r, unit));
    grads = model_attention_grads(r, layer);
    UPIPE_TRY(model_norm(r, layer, n, x, away));
    UPIPE_TRY(model_grad_put(r, &there, *g));
    dy = *g;
    if (model_is_changed(r, layer)) UPIPE_TRY(model_change_bwd(r, &a, &dy, *g));
    UPIPE_TRY(a.kind->out_bwd(&a, &grads, dy)); /* g goes on down the stream */
    if (dy.data != g->data) UPIPE_TRY(model_free_block(r, dy));
    UPIPE_TRY(model_grad_leave(r, there, *g));
    UPIPE_TRY(a.kind->bwd(&a, &grads, n));
    UPIPE_TRY(a.kind->free(&a, 0));
    UPIPE_TRY(model_grad_fetch(r, there, g));
    UPIPE_TRY(model_norm_bwd(r, layer, *g, n, x, away));
    UPIPE_TRY(upipe_mem_free(a.pool, n.data, &c->err));
    UPIPE_TRY(model_grads_adapt(r, unit));
    UPIPE_TRY(model_weights_end(r, unit));
    return model_grads_end(r, unit);
}

/* The layers of a block from its first one, whose x is kept, to the last: keeps the x of those that follow, and
 * attention's O and lse of all but the last. */
static inline upipe_status model_block_fwd(model_rank *r, int64_t last, upipe_view *g)
{
    upipe_ctx *c = r->c;
    int64_t first = last;
    upipe_view x;
    void *there;
    while (r->kept.layer[first].x == NULL) --first;
    UPIPE_TRY(model_grad_put(r, &there, *g));
    UPIPE_TRY(model_grad_leave(r, there, *g));
    UPIPE_TRY(model_alloc(r, &x, UPIPE_USE_STREAM, "stream"));
    UPIPE_TRY(activations_copy(&r->kept, c, x.data, r->kept.layer[first].x, activations_bytes(x)));
    UPIPE_TRY(activations_wait(&r->kept, c));
    for (; first < last; ++first) {
        UPIPE_TRY(model_layer_fwd(r, first, x, 1));
        UPIPE_TRY(activations_keep_x(&r->kept, c, first + 1, x, 1));
    }
    UPIPE_TRY(activations_wait(&r->kept, c));
    UPIPE_TRY(model_free_block(r, x));
    return model_grad_fetch(r, there, g);
}

/* model_bwd -- after model_fwd with keep: losses, and the gradients of scale times their sum over this rank's
 *              tokens, += into grads; x goes back to the pool */
static inline upipe_status model_bwd(model_rank *r, upipe_view x, float scale)
{
    int64_t i;
    UPIPE_TRY(model_loss_bwd(r, x, scale));
    for (i = r->m->layout->config.layers; i-- > 0;) {
        if (r->kept.layer[i].x == NULL) UPIPE_TRY(model_block_fwd(r, i, &x));
        UPIPE_TRY(model_layer_bwd(r, i, &x));
        UPIPE_TRY(activations_drop(&r->kept, r->c, i));
    }
    return model_embed_bwd(r, x);
}

#endif

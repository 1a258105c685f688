/* attention.h -- a layer's attention, of one kind or another: of the whole sequence, or in segments; with a gate; linear; of a
 * latent
 *
 *     attention a = attention_of(r, layer);
 *     a.x = normed;                            the norm of the stream, a block of a.pool
 *     a.kind->fwd(&a, normed);                 O and lse
 *     a.kind->keep(&a);                        for the backward, which fetches them: attention_kept, a.kind->fetch(&a)
 *     a.kind->out(&a, i, &y);                  y = O * Wo^T of part i; where y has no block, a new one. Where a.kind
 *                                              reads_x, normed is there until now, and y may be it
 *     a.kind->out_bwd(&a, &grads, g);          O becomes its gradient, from that of the half's result; normed is there
 *     a.kind->bwd(&a, &grads, normed);         normed becomes its gradient
 *     a.kind->free(&a, kept);
 *
 * The weights of the layer's unit have begun. Another kind of attention is another row of attention_kinds.
 */
#ifndef LLAMA_ATTENTION_H
#define LLAMA_ATTENTION_H

#include "latent.h"

/* ---- the whole sequence ---- */

static inline upipe_status attention_whole_fwd(attention *a, upipe_view x)
{
    return upipe_layer_fwd(a->r->c, &a->f.layer, &a->saved, x);
}

/* Begins copies, until activations_wait. */
static inline upipe_status attention_whole_keep(attention *a)
{
    return activations_keep_attention(&a->r->kept, a->r->c, a->at, a->f.layer.plan, &a->saved);
}

static inline upipe_status attention_whole_fetch(attention *a)
{
    return activations_fetch_attention(&a->r->kept, a->r->c, a->at, a->f.layer.plan, &a->saved);
}

static inline upipe_status attention_whole_out(attention *a, int part, upipe_view *y)
{
    (void)part; /* it is the only one */
    if (y->data == NULL) UPIPE_TRY(model_alloc(a->r, y, UPIPE_USE_OTHER, "attended"));
    return upipe_layer_out_fwd(a->r->c, &a->f.layer, *y, &a->saved);
}

static inline upipe_status attention_whole_out_bwd(attention *a, const upipe_grads *grads, upipe_view g)
{
    return upipe_layer_out_bwd(a->r->c, &a->f.layer, grads, &a->saved, g);
}

static inline upipe_status attention_whole_bwd(attention *a, const upipe_grads *grads, upipe_view x)
{
    return upipe_layer_bwd(a->r->c, &a->f.layer, x, grads, &a->saved, &a->saved.out, x);
}

static inline upipe_status attention_whole_free(attention *a, int kept)
{
    (void)kept; /* copies are */
    return upipe_saved_free(a->r->c, &a->saved);
}

/* ---- the whole sequence, its output times a gate of x ---- */

static inline upipe_status attention_gated_out(attention *a, int part, upipe_view *y)
{
    (void)part; /* it is the only one */
    return upipe_layer_gated_out_fwd(a->r->c, &a->f.layer, *y, &a->saved, a->x);
}

static inline upipe_status attention_gated_out_bwd(attention *a, const upipe_grads *grads, upipe_view g)
{
    UPIPE_TRY(model_alloc(a->r, &a->dx, UPIPE_USE_OTHER, "attended"));
    return upipe_layer_gated_out_bwd(a->r->c, &a->f.layer, grads, &a->saved, a->dx, g, a->x);
}

static inline upipe_status attention_gated_bwd(attention *a, const upipe_grads *grads, upipe_view x)
{
    UPIPE_TRY(attention_whole_bwd(a, grads, x));
    UPIPE_TRY(a->r->c->ops->add(a->r->c, x, a->dx));
    return model_free_block(a->r, a->dx);
}

/* ---- segments: all but one of them in the second pool ---- */

static inline upipe_status attention_segments_fwd(attention *a, upipe_view x)
{
    return upipe_fpdt_fwd(a->r->c, &a->f, &a->offloaded, x.data);
}

/* What attention has offloaded stays where it is. */
static inline upipe_status attention_segments_keep(attention *a)
{
    a->r->kept.layer[a->at].fpdt = a->offloaded;
    return UPIPE_OK;
}

static inline upipe_status attention_segments_fetch(attention *a)
{
    a->offloaded = a->r->kept.layer[a->at].fpdt;
    memset(&a->r->kept.layer[a->at].fpdt, 0, sizeof a->offloaded); /* freed with a */
    return UPIPE_OK;
}

/* O or its gradient of segment i in the second pool, to or from slots in the rank's own. */
static inline upipe_status attention_segment_slots(attention *a, const upipe_plan *p, int i,
                                                   const upipe_slots *slots, int back)
{
    upipe_ctx *c = a->r->c;
    const size_t slot = a->segment_bytes / (size_t)p->stages;
    int stage;
    for (stage = 0; stage < p->stages; ++stage) {
        char *there = a->offloaded.out + (size_t)(i * p->stages + stage) * slot;
        char *here = (char *)slots->data + (size_t)stage * slots->slot_bytes;
        const size_t bytes =
            upipe_plan_rows_bytes(p, upipe_plan_heads_sent(p, UPIPE_A2A_Q, stage), p->desc.v_dim);
        a->r->kept.moved += (int64_t)bytes;
        UPIPE_TRY(c->ops->copy(c, back ? there : here, back ? here : there, bytes));
    }
    return UPIPE_OK;
}

/* Segment i of the forward's result, in the rank's own pool, as the output projection reads it. */
static inline upipe_status attention_segment_begin(attention *a, int i, upipe_plan *p, upipe_layer *l,
                                                   upipe_saved *out)
{
    UPIPE_TRY(upipe_fpdt_plan(&a->f, i, p, &a->r->c->err));
    *l = a->f.layer;
    l->plan = p;
    UPIPE_TRY(upipe_slots_alloc(a->r->c, p, &out->out, UPIPE_SLOT_FULL, "final_out"));
    out->lse = (float *)(void *)a->offloaded.out; /* is not read; NULL would mean consumed */
    out->delta = NULL;
    out->given = a->offloaded.given;
    out->given.plan = p->seal; /* a segment's own */
    return attention_segment_slots(a, p, i, &out->out, 0);
}

static inline upipe_status attention_segments_out(attention *a, int i, upipe_view *y)
{
    upipe_ctx *c = a->r->c;
    upipe_saved out;
    upipe_layer l;
    upipe_plan p;
    UPIPE_TRY(attention_segment_begin(a, i, &p, &l, &out));
    if (y->data == NULL) UPIPE_TRY(model_alloc_rows(a->r, c->mem, y, p.rows, UPIPE_USE_OTHER, "attended"));
    UPIPE_TRY(upipe_layer_out_fwd(c, &l, *y, &out));
    return upipe_mem_free(c->mem, out.out.data, &c->err);
}

/* And delta. */
static inline upipe_status attention_segments_out_bwd(attention *a, const upipe_grads *grads, upipe_view g)
{
    upipe_ctx *c = a->r->c;
    const size_t each = upipe_fpdt_delta_bytes(&a->f) / (size_t)a->f.segments;
    void *delta;
    int i;
    UPIPE_TRY(
        upipe_mem_alloc(a->pool, &delta, each * (size_t)a->f.segments, UPIPE_USE_STAT, "delta", &c->err));
    a->offloaded.delta = (char *)delta;
    for (i = 0; i < a->f.segments; ++i) {
        upipe_saved out;
        upipe_layer l;
        upipe_plan p;
        UPIPE_TRY(attention_segment_begin(a, i, &p, &l, &out));
        UPIPE_TRY(upipe_layer_out_bwd(c, &l, grads, &out, model_part(a->r->m, g, i)));
        UPIPE_TRY(attention_segment_slots(a, &p, i, &out.out, 1));
        a->r->kept.moved += (int64_t)p.buffers.delta;
        UPIPE_TRY(c->ops->copy(c, a->offloaded.delta + (size_t)i * each, out.delta, p.buffers.delta));
        UPIPE_TRY(upipe_mem_free(c->mem, out.delta, &c->err));
        UPIPE_TRY(upipe_mem_free(c->mem, out.out.data, &c->err));
    }
    return UPIPE_OK;
}

static inline upipe_status attention_segments_bwd(attention *a, const upipe_grads *grads, upipe_view x)
{
    return upipe_fpdt_bwd(a->r->c, &a->f, x.data, grads, &a->offloaded, a->offloaded.out, x.data);
}

static inline upipe_status attention_segments_free(attention *a, int kept)
{
    if (kept) return UPIPE_OK;
    a->r->kept.moved += a->offloaded.moved;
    return upipe_fpdt_free(&a->f, &a->offloaded, &a->r->c->err);
}

/* ---- linear ---- */

static inline size_t attention_linear_bytes(const attention *a)
{
    const upipe_linear_layer *l = &a->linear;
    return (size_t)(l->plan->local * l->heads * l->value_dim) * upipe_dtype_bytes(l->plan->desc.dtype);
}

static inline upipe_status attention_linear_fwd(attention *a, upipe_view x)
{
    upipe_view later = x;
    later.data = NULL;
    return upipe_linear_layer_fwd(a->r->c, a->r->c->team, &a->linear, &a->linear_saved, later, x, NULL);
}

static inline upipe_status attention_linear_keep(attention *a)
{
    const upipe_linear_layer_saved *s = &a->linear_saved;
    a->r->kept.layer[a->at].given = s->given;
    return activations_keep_out(&a->r->kept, a->r->c, a->at, s->o, attention_linear_bytes(a), s->states,
                                upipe_linear_layer_state_bytes(&a->linear));
}

static inline upipe_status attention_linear_fetch(attention *a)
{
    const activations_kept *k = &a->r->kept.layer[a->at];
    const size_t states = upipe_linear_layer_state_bytes(&a->linear);
    upipe_ctx *c = a->r->c;
    upipe_linear_layer_saved *s = &a->linear_saved;
    void *data;
    s->given = k->given;
    UPIPE_TRY(upipe_alloc(c, &s->o, attention_linear_bytes(a), UPIPE_USE_OUT, "linear_o"));
    UPIPE_TRY(upipe_alloc(c, &data, states, UPIPE_USE_STAT, "linear_states"));
    s->states = (float *)data;
    UPIPE_TRY(activations_copy(&a->r->kept, c, s->o, k->out, attention_linear_bytes(a)));
    UPIPE_TRY(activations_copy(&a->r->kept, c, data, k->lse, states));
    return activations_wait(&a->r->kept, c);
}

static inline upipe_status attention_linear_out(attention *a, int part, upipe_view *y)
{
    (void)part; /* it is the only one */
    return upipe_linear_layer_out_fwd(a->r->c, a->r->c->team, &a->linear, &a->linear_saved, *y, a->x);
}

/* All of the layer's backward, whose gradient of normed waits in a block of its own: it reads normed to the end. */
static inline upipe_status attention_linear_out_bwd(attention *a, const upipe_grads *grads, upipe_view g)
{
    const upipe_linear_layer_grads linear = model_linear_grads(a->r, a->at);
    (void)grads;
    UPIPE_TRY(model_alloc(a->r, &a->dx, UPIPE_USE_OTHER, "attended"));
    return upipe_linear_layer_bwd(a->r->c, a->r->c->team, &a->linear, a->dx, &linear, &a->linear_saved, g,
                                  a->x, NULL);
}

static inline upipe_status attention_linear_bwd(attention *a, const upipe_grads *grads, upipe_view x)
{
    (void)grads;
    UPIPE_TRY(a->r->c->ops->cast(a->r->c, x, a->dx));
    return model_free_block(a->r, a->dx);
}

static inline upipe_status attention_linear_free(attention *a, int kept)
{
    (void)kept; /* copies are */
    return upipe_linear_layer_saved_free(a->r->c, &a->linear_saved);
}

/* ---- kinds ---- */

enum { ATTENTION_WHOLE, ATTENTION_SEGMENTS, ATTENTION_GATED, ATTENTION_LINEAR, ATTENTION_LATENT };

static const attention_kind attention_kinds[] = {
    {attention_whole_fwd, attention_whole_keep, attention_whole_fetch, attention_whole_out,
     attention_whole_out_bwd, attention_whole_bwd, attention_whole_free, 0},
    {attention_segments_fwd, attention_segments_keep, attention_segments_fetch, attention_segments_out,
     attention_segments_out_bwd, attention_segments_bwd, attention_segments_free, 0},
    {attention_whole_fwd, attention_whole_keep, attention_whole_fetch, attention_gated_out,
     attention_gated_out_bwd, attention_gated_bwd, attention_whole_free, 1},
    {attention_linear_fwd, attention_linear_keep, attention_linear_fetch, attention_linear_out,
     attention_linear_out_bwd, attention_linear_bwd, attention_linear_free, 1},
    {attention_latent_fwd, attention_whole_keep, attention_whole_fetch, attention_whole_out,
     attention_whole_out_bwd, attention_latent_bwd, attention_whole_free, 0}};

static inline attention attention_of(model_rank *r, int64_t layer)
{
    const int cut = r->m->fpdt.segments > 0;
    attention a;
    memset(&a, 0, sizeof a);
    a.kind = &attention_kinds[cut ? ATTENTION_SEGMENTS : ATTENTION_WHOLE];
    a.r = r;
    a.at = layer;
    a.f = r->m->fpdt;
    a.f.host = r->second;
    a.pool = cut ? r->second : r->c->mem;
    if (cut) a.segment_bytes = upipe_fpdt_out_bytes(&a.f) / (size_t)a.f.segments;
    if (model_tensor(r, LLAMA_WG, layer) != NULL) a.kind = &attention_kinds[ATTENTION_GATED];
    if (llama_is_linear(&r->m->layout->config, layer)) {
        a.kind = &attention_kinds[ATTENTION_LINEAR];
        a.linear = model_linear_layer(r, layer);
    } else if (r->m->layout->config.kv_rank > 0) {
        a.kind = &attention_kinds[ATTENTION_LATENT];
        a.f.layer = model_latent_layer(r, layer);
    } else {
        a.f.layer = model_attention_layer(r, layer);
    }
    return a;
}

/* Whether the forward has kept O and lse. */
static inline int attention_kept(const attention *a)
{
    const activations_kept *k = &a->r->kept.layer[a->at];
    return k->out != NULL || k->fpdt.out != NULL;
}

#endif

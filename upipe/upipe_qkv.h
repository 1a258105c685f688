/* upipe_qkv.h -- context-parallel attention of Q, K and V that the host has made        layer 7
 *
 * For a trainer with projections of its own: Megatron, PyTorch, a fused product with biases. Each stage's heads
 * are packed into the send layout as they leave, and its results are unpacked into the host's tensors as they
 * arrive. So a stage of buffers is held, whatever the method, and no slot per stage.
 *
 *     upipe_qkv a = {&plan, mask, 0, q, k, v, o};          views of [rows][heads][dim], any steps
 *     upipe_qkv_grads g = {dout, dq, dk, dv, NULL};
 *     upipe_qkv_fwd(&ctx, &a, &saved);                     o; saved: lse
 *     ...
 *     upipe_qkv_bwd(&ctx, &a, &g, &saved);                 dq, dk, dv; lse is freed
 *
 * Row r is token r % T of this rank's part of sequence r / T, in the positions of upipe_plan.shard. Rotary
 * embeddings are the host's business. A fused product [rows][3][H][d] is three views of step 3 * H * d:
 *
 *     q = upipe_view_make(qkv, UPIPE_F32, rows, 3 * H * d, H, d, d);
 *     k = upipe_view_make(qkv + H * d, ...), v = upipe_view_make(qkv + 2 * H * d, ...);
 *
 * The stages are those of upipe_layer.h, with its parts: load, attend, store. Both loops are below.
 */
#ifndef UPIPE_QKV_H
#define UPIPE_QKV_H

#include "upipe_layer.h"

/* upipe_qkv -- one call
 *   plan     from upipe_plan_init; its model_dim is not used
 *   mask     as in upipe_layer
 *   scale    of the scores; 0 = 1/sqrt(d)
 *   q k v    [rows][H][d], [rows][Hkv][d], [rows][Hkv][v_dim]: read
 *   o        [rows][H][v_dim]: written by the forward, read by the backward
 * Views have any steps, and any type that the compute table casts. What is sent is in the plan's type. The
 * tensors may lie outside of the pool, in memory that the compute table reaches.
 */
typedef struct upipe_qkv {
    const upipe_plan *plan;
    upipe_mask mask;
    float scale;
    upipe_view q, k, v, o;
} upipe_qkv;

/* upipe_qkv_grads -- of the backward; views of any steps and type
 *   dout      [rows][H][v_dim]: the gradient of o, read
 *   dq dk dv  shapes of q, k, v, written (=): rounded to the plan's type once, when a value is complete. data
 *             NULL: not wanted. dq may be q itself, dk k, and dv v: each head is read for the last time before
 *   dsinks    f32 [H], +=, over this rank's heads: sum it over team and ring. NULL: not wanted
 */
typedef struct upipe_qkv_grads {
    upipe_view dout, dq, dk, dv;
    float *dsinks;
} upipe_qkv_grads;

/* A pass: the layer's, of a layer without weights, and what the host's tensors are. */
typedef struct upi_qkv_pass {
    upi_pass pass;
    upipe_layer layer;
    upipe_saved save; /* slots of the stages in flight; lse and delta of all stages */
    upipe_grads grads;
    const upipe_qkv *a;
    const upipe_qkv_grads *g; /* backward */
} upi_qkv_pass;

/* ---- a stage ---- */

/* O of the stages i .. i + width - 1, out of their slots. */
UPIPE_API upipe_status upi_qkv_fwd_store(upipe_ctx *c, upi_qkv_pass *f, int i)
{
    const upipe_plan *p = f->a->plan;
    void *slot;
    int t;
    UPIPE_TRY(upi_fwd_store(c, &f->pass, i));
    for (t = 0; t < p->width; ++t) {
        UPIPE_TRY(upipe_slot_drain(&f->save.out, i + t, &slot, &c->err));
        UPIPE_TRY(upipe_a2a_unpack(c, f->a->o, p, i + t, UPIPE_A2A_Q, slot));
    }
    return UPIPE_OK;
}

/* dO of the stages into their slots, and delta from what the slots then hold; then the layer's load. */
UPIPE_API upipe_status upi_qkv_bwd_load(upipe_ctx *c, upi_qkv_pass *f, int i)
{
    const upipe_plan *p = f->a->plan;
    const int32_t d = p->desc.v_dim;
    void *slot;
    int t, rank;
    upipe_phase_set(c, UPIPE_BWD_OUT);
    for (t = 0; t < p->width; ++t) {
        UPIPE_TRY(upipe_slot_lend(&f->save.out, i + t, &slot, &c->err));
        UPIPE_TRY(upipe_a2a_pack(c, slot, p, i + t, UPIPE_A2A_Q, f->g->dout));
        for (rank = 0; rank < p->desc.ranks; ++rank) {
            const upipe_span q = upipe_plan_q(p, i + t, rank);
            const int64_t before =
                upipe_plan_before(p, i + t, -1) + upipe_plan_offset(p, UPIPE_A2A_Q, i + t, rank);
            upipe_view o = f->a->o;
            if (q.count == 0) continue;
            o.data = upipe_view_at(o, 0, q.first);
            o.h = q.count;
            UPIPE_TRY(c->ops->rowdot(
                c, upipe_view_packed(f->save.delta + before * p->rows, UPIPE_F32, p->rows, q.count, 1), o,
                upipe_view_packed(upipe_slots_matrix(p, &f->save.out, i + t, rank, d).data, p->desc.dtype,
                                  p->rows, q.count, d)));
        }
        UPIPE_TRY(upipe_slot_fill(&f->save.out, i + t, &c->err));
    }
    return upi_bwd_load(c, &f->pass, i);
}

/* The layer's store, which unpacks dQ; dK and dV are unpacked after their round, and not needed afterwards. */
UPIPE_API upipe_status upi_qkv_bwd_store(upipe_ctx *c, upi_qkv_pass *f, int i)
{
    const upipe_plan *p = f->a->plan;
    void *slot;
    int t;
    UPIPE_TRY(upi_bwd_store(c, &f->pass, i));
    for (t = 0; t < p->width; ++t) UPIPE_TRY(upipe_slot_drain(&f->save.out, i + t, &slot, &c->err));
    if (p->kv_grads_accumulate) return UPIPE_OK; /* complete after the last stage */
    return upi_kv_grad_free(c, &f->pass.run, &f->pass.dkv);
}

/* Load and store, on the side stream. */
UPIPE_API upipe_status upi_qkv_side_call(upipe_ctx *side, void *pass, int store, int i)
{
    upi_qkv_pass *f = (upi_qkv_pass *)pass;
    if (f->g == NULL) return store ? upi_qkv_fwd_store(side, f, i) : upi_fwd_load(side, &f->pass, i);
    return store ? upi_qkv_bwd_store(side, f, i) : upi_qkv_bwd_load(side, f, i);
}

/* ---- both loops ---- */

/* Slots of the stages in flight: those that attend together, or two in a pipeline. */
UPIPE_API upipe_status upi_qkv_slots(upipe_ctx *c, const upipe_plan *p, upipe_slots *slots)
{
    const size_t bytes = upipe_plan_buffers(p).slot;
    const int held = p->overlap ? 2 : p->width;
    void *data;
    UPIPE_TRY(upipe_alloc(c, &data, bytes * (size_t)held, "slots"));
    upipe_slots_init(slots, data, bytes, p->stages, UPIPE_SLOT_EMPTY);
    slots->held = held;
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_qkv_fwd(upipe_ctx *c, upi_qkv_pass *f)
{
    const upipe_plan *p = f->a->plan;
    upi_pass *pass = &f->pass;
    void *lse;
    int i;
    upipe_phase_set(c, UPIPE_FWD_IN);
    UPIPE_TRY(upipe_alloc(c, &lse, pass->run.buffers.lse, "lse"));
    f->save.lse = (float *)lse;
    UPIPE_TRY(upi_qkv_slots(c, p, &f->save.out));
    UPIPE_TRY(upi_kv_begin(c, &pass->run, &pass->kv));
    for (i = 0; i < p->stages && !p->overlap; i += p->width) {
        UPIPE_TRY(upi_fwd_load(c, pass, i));   /* Q', K', V': packed, inp_all_to_all */
        UPIPE_TRY(upi_fwd_attend(c, pass, i)); /* O' */
        UPIPE_TRY(upi_qkv_fwd_store(c, f, i)); /* out_all_to_all, unpacked into o */
    }
    if (p->overlap) UPIPE_TRY(upi_pipelined(c, pass, upi_qkv_side_call, f));
    UPIPE_TRY(upi_kv_end(c, &pass->run, &pass->kv));
    return upipe_free(c, f->save.out.data);
}

UPIPE_API upipe_status upi_qkv_bwd(upipe_ctx *c, upi_qkv_pass *f)
{
    const upipe_plan *p = f->a->plan;
    upi_pass *pass = &f->pass;
    void *delta;
    int i;
    upipe_phase_set(c, UPIPE_BWD_IN);
    UPIPE_TRY(upipe_alloc(c, &delta, pass->run.buffers.delta, "delta"));
    f->save.delta = (float *)delta;
    UPIPE_TRY(upi_qkv_slots(c, p, &f->save.out));
    UPIPE_TRY(upi_kv_grad_begin(c, &pass->run, &pass->dkv));
    UPIPE_TRY(upi_kv_begin(c, &pass->run, &pass->kv));
    for (i = 0; i < p->stages && !p->overlap; i += p->width) {
        UPIPE_TRY(upi_qkv_bwd_load(c, f, i));  /* dO packed, delta; Q', K', V' again */
        UPIPE_TRY(upi_bwd_attend(c, pass, i)); /* dQ', dK', dV' */
        UPIPE_TRY(upi_qkv_bwd_store(c, f, i)); /* unpacked into dq, and after a round into dk and dv */
    }
    if (p->overlap) UPIPE_TRY(upi_pipelined(c, pass, upi_qkv_side_call, f));
    UPIPE_TRY(upi_kv_end(c, &pass->run, &pass->kv));
    UPIPE_TRY(upipe_free(c, f->save.out.data));
    UPIPE_TRY(upipe_free(c, delta));
    UPIPE_TRY(upi_kv_grad_end(c, &pass->run, &pass->dkv));
    return upi_kv_grad_free(c, &pass->run, &pass->dkv);
}

/* ---- public calls ---- */

/* ARG unless v is a tensor of these rows and heads. */
UPIPE_API upipe_status upi_qkv_check(upipe_ctx *c, const upipe_plan *p, const char *name, upipe_view v,
                                     int heads, int dim)
{
    if (v.data == NULL) return upipe_fail(&c->err, UPIPE_ERR_ARG, "%s is NULL", name);
    if (v.n != p->rows || v.h != heads || v.d != dim)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "%s is [%lld][%d][%d], the plan says [%lld][%d][%d]", name,
                          (long long)v.n, v.h, v.d, (long long)p->rows, heads, dim);
    if (!upi_dtype_built(c->ops, &v.dtype))
        return upipe_fail(&c->err, UPIPE_ERR_UNSUPPORTED, "%s is %s, which %s does not cast", name,
                          upi_dtype_name_of(&v.dtype), c->ops->name);
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_qkv_begin(upipe_ctx *c, upi_qkv_pass *f, const upipe_qkv *a,
                                     const upipe_qkv_grads *g)
{
    const upipe_plan *p = a->plan;
    const upipe_plan_desc *d = &p->desc;
    const upipe_view from[3] = {a->q, a->k, a->v};
    static const char *const names[] = {"q", "k", "v"}, *const grads[] = {"dq", "dk", "dv"};
    int i;
    f->a = a;
    f->g = g;
    f->layer.plan = p;
    f->layer.mask = a->mask;
    f->layer.scale = a->scale;
    UPIPE_TRY(upi_check_attends(c, &f->layer));
    for (i = 0; i < 3; ++i) {
        const int heads = i == UPI_PROJ_Q ? d->heads : d->kv_heads, dim = upi_dim(p, (upi_proj)i);
        UPIPE_TRY(upi_qkv_check(c, p, names[i], from[i], heads, dim));
        if (g != NULL) {
            const upipe_view to = i == UPI_PROJ_Q ? g->dq : i == UPI_PROJ_K ? g->dk : g->dv;
            if (to.data != NULL) UPIPE_TRY(upi_qkv_check(c, p, grads[i], to, heads, dim));
        }
    }
    UPIPE_TRY(upi_qkv_check(c, p, "o", a->o, d->heads, d->v_dim));
    if (g != NULL) UPIPE_TRY(upi_qkv_check(c, p, "dout", g->dout, d->heads, d->v_dim));
    if (g != NULL && g->dsinks != NULL && a->mask.sinks == NULL)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "a gradient of sinks is wanted without sinks");
    UPIPE_TRY(upi_layer_agree(c, &f->layer, 0, 0));
    f->pass.save = &f->save;
    f->pass.run = upi_run_make(c, &f->layer, a->q);
    for (i = 0; i < 3; ++i) f->pass.run.host[i] = from[i];
    if (g == NULL) return UPIPE_OK;
    f->pass.run.dhost[UPI_PROJ_Q] = g->dq;
    f->pass.run.dhost[UPI_PROJ_K] = g->dk;
    f->pass.run.dhost[UPI_PROJ_V] = g->dv;
    f->grads.sinks = g->dsinks;
    f->pass.run.grads = &f->grads;
    f->pass.dout = &f->save.out;
    return UPIPE_OK;
}

/* upipe_qkv_fwd -- o = attention of q, k and v over the whole sequence
 *   save    written: lse alone, in the pool; upipe_saved_free or the backward frees it
 *   bytes   phases FWD_* of upipe_dry_qkv; sends upipe_plan_sent(plan, 0), to the ring
 *           upipe_plan_sent_ring(plan, 0)
 *   errors  ARG, UNSUPPORTED, MEMORY, MISMATCH, TIMEOUT, ABORTED; the team is aborted, and the pool as before
 *   paper   section 3.3 and Figure (b)
 */
UPIPE_API upipe_status upipe_qkv_fwd(upipe_ctx *c, const upipe_qkv *a, upipe_saved *save)
{
    upi_qkv_pass pass;
    upipe_status s;
    int64_t mark;
    memset(save, 0, sizeof *save);
    memset(&pass, 0, sizeof pass);
    UPIPE_TRY(upipe_ctx_check(c));
    mark = upipe_mem_mark(c->mem);
    upipe_phase_set(c, UPIPE_FWD_BEFORE);
    s = upi_qkv_begin(c, &pass, a, NULL);
    if (s == UPIPE_OK) s = upi_qkv_fwd(c, &pass);
    if (s == UPIPE_OK) save->lse = pass.save.lse;
    return upi_layer_end(c, s, mark);
}

/* upipe_qkv_bwd -- the gradients of q, k and v; these are sent again
 *   a       the forward's, o included
 *   save    consumed
 *   bytes   phases BWD_* of upipe_dry_qkv; sends upipe_plan_sent(plan, 1), to the ring
 *           upipe_plan_sent_ring(plan, 1)
 *   errors  as upipe_qkv_fwd; save is then valid for upipe_saved_free alone, and dq, dk, dv hold parts
 *   paper   Appendix A
 */
UPIPE_API upipe_status upipe_qkv_bwd(upipe_ctx *c, const upipe_qkv *a, const upipe_qkv_grads *g,
                                     upipe_saved *save)
{
    upi_qkv_pass pass;
    upipe_status s;
    int64_t mark;
    memset(&pass, 0, sizeof pass);
    UPIPE_TRY(upipe_ctx_check(c));
    mark = upipe_mem_mark(c->mem);
    upipe_phase_set(c, UPIPE_BWD_BEFORE);
    s = save->lse == NULL || save->out.data != NULL
            ? upipe_fail(&c->err, UPIPE_ERR_ARG, "save is not upipe_qkv_fwd's (consumed before?)")
            : upi_qkv_begin(c, &pass, a, g);
    pass.save.lse = save->lse;
    if (s == UPIPE_OK) s = upi_qkv_bwd(c, &pass);
    if (s == UPIPE_OK) s = upipe_saved_free(c, save);
    return upi_layer_end(c, s, mark);
}

#endif

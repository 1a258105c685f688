/* upipe_qkv.h -- context-parallel attention of Q, K and V that the host has made
 *
 * For a trainer with projections of its own: Megatron, PyTorch, a fused product with biases. Each stage's heads
 * are packed into the send layout as they leave, and its results are unpacked into the host's tensors as they
 * arrive. So one stage has buffers, whatever the method, and no stage has a slot of its own.
 *
 *     upipe_qkv a = {&plan, id, mask, 0, q, k, v, o};      views of [rows][heads][dim], any strides
 *     upipe_qkv_grads g = {dout, dq, dk, dv, NULL};
 *     upipe_qkv_fwd(&ctx, &a, &saved);                     o; saved: lse
 *     ...
 *     upipe_qkv_bwd(&ctx, &a, &g, &saved);                 dq, dk, dv; lse is freed
 *
 * Row r is token r % T of this rank's part of sequence r / T, in the positions of upipe_plan.shard. Rotary
 * embeddings are the host's business. The views of a fused product have constructors:
 *
 *     upipe_qkv call = {&plan, id, mask};
 *     a = upipe_qkv_fused(&call, qkv, o, UPIPE_F32);       [B][T][H + 2 Hkv][d], and so [B][T][3][H][d]
 *     a = upipe_qkv_sbh3d(&call, qkv, o, UPIPE_F32, B, b); [T][B][H][3][d]: sequence b
 *     g = upipe_qkv_grads_of(&d);                          d: the same constructor, over dqkv and dout
 *
 * The stages are those of upipe_layer.h: load, attend, store. Both loops are below.
 */
#ifndef UPIPE_QKV_H
#define UPIPE_QKV_H

#include "upipe_layer.h"

/* upipe_qkv -- one call
 *   plan     from upipe_plan_init; its model_dim is not used
 *   id       0, or the layer's number: a backward with another one is refused
 *   mask     as in upipe_layer
 *   scale    of the scores; 0 = 1/sqrt(d)
 *   q k v    [rows][H][d], [rows][Hkv][d], [rows][Hkv][v_dim]: read
 *   o        [rows][H][v_dim]: written by the forward, read by the backward
 * Views have any strides, and any type that the compute table casts. What is sent is in the plan's type. The
 * tensors may lie outside of the pool, in memory that the compute table reaches.
 */
typedef struct upipe_qkv {
    const upipe_plan *plan;
    int64_t id;
    upipe_mask mask;
    float scale;
    upipe_view q, k, v, o;
} upipe_qkv;

/* upipe_qkv_grads -- of the backward; views of any strides and type
 *   dout      [rows][H][v_dim]: the gradient of o, read
 *   dq dk dv  shapes of q, k, v, written (=): rounded to the plan's type once, when a value is complete. data
 *             NULL: not wanted. dq may be q itself, dk k, and dv v: each head is read for the last time before
 *   dsinks    f32 [H], +=, over this rank's heads: sum it over team and ring. NULL: not wanted
 */
typedef struct upipe_qkv_grads {
    upipe_view dout, dq, dk, dv;
    float *dsinks;
} upipe_qkv_grads;

/* upipe_qkv_fused -- a call whose Q, K and V lie side by side at each token
 *   call   plan, id, mask and scale, which the result has too; its views are not read. Rows, heads and dims are the
 *          plan's, so batch is included. Without a plan there are no views, and upipe_qkv_fwd refuses the result
 *   qkv    [B][T][H + 2 Hkv][d]: the query heads, then those of K, then those of V. [B][T][3][H][d] is the same with
 *          Hkv = H. Heads of V have v_dim elements
 *   o      [B][T][H][v_dim], packed
 */
UPIPE_API upipe_qkv upipe_qkv_fused(const upipe_qkv *call, void *qkv, void *o, upipe_dtype dtype)
{
    upipe_qkv a = *call;
    if (a.plan != NULL) {
        const int64_t n = a.plan->rows;
        const int32_t h = a.plan->desc.heads, kv = a.plan->desc.kv_heads, d = a.plan->desc.head_dim,
                      v = a.plan->desc.v_dim;
        const int64_t row = (int64_t)(h + kv) * d + (int64_t)kv * v;
        a.q = upipe_view_make(qkv, dtype, n, row, h, d, d);
        a.k = upipe_view_make(upipe_view_at(a.q, 0, h), dtype, n, row, kv, d, d);
        a.v = upipe_view_make(upipe_view_at(a.k, 0, kv), dtype, n, row, kv, v, v);
        a.o = upipe_view_packed(o, dtype, n, h, v);
    }
    return a;
}

/* upipe_qkv_sbh3d -- the same of Megatron's tensors, in which a head's Q, K and V are neighbours: one sequence of them
 *   call   as upipe_qkv_fused, of a plan with batch 1: a view's rows have one stride, so each sequence is a call
 *   qkv    [T][batch][H][3][d]: Hkv = H and v_dim = d, and upipe_qkv_fwd refuses the views with another plan
 *   o      [T][batch][H][d]
 *   b      the sequence, 0 <= b < batch
 */
UPIPE_API upipe_qkv upipe_qkv_sbh3d(const upipe_qkv *call, void *qkv, void *o, upipe_dtype dtype, int batch,
                                    int b)
{
    upipe_qkv a = *call;
    if (a.plan != NULL) {
        const int32_t h = a.plan->desc.heads, d = a.plan->desc.head_dim;
        const int64_t n = a.plan->local, row = (int64_t)batch * h * d;
        a.q = upipe_view_make(qkv, dtype, n, 3 * row, h, 3 * (int64_t)d, d);
        a.q.data = upipe_view_at(a.q, 0, b * h);
        a.k = a.v = a.q;
        a.k.data = upipe_offset(a.q.data, (size_t)d * upipe_dtype_bytes(dtype));
        a.v.data = upipe_offset(a.k.data, (size_t)d * upipe_dtype_bytes(dtype));
        a.o = upipe_view_make(o, dtype, n, row, h, d, d);
        a.o.data = upipe_view_at(a.o, 0, b * h);
    }
    return a;
}

/* upipe_qkv_grads_of -- gradients in the views of a call: dq, dk and dv in those of q, k and v, dout in that of o
 *   d      from a constructor above, over the gradients' tensors. dsinks is NULL
 */
UPIPE_API upipe_qkv_grads upipe_qkv_grads_of(const upipe_qkv *d)
{
    upipe_qkv_grads g;
    g.dout = d->o;
    g.dq = d->q;
    g.dk = d->k;
    g.dv = d->v;
    g.dsinks = NULL;
    return g;
}

/* ---- a pass over the stages ---- */

/* The door's own part of a pass: of a layer without weights. */
typedef struct upi_qkv_pass {
    upi_pass pass; /* the first member: the engine's calls get it */
    upipe_layer layer;
    upipe_slots slots; /* of the stages in flight */
    upipe_grads grads;
    const upipe_qkv *a;
    upipe_view heads[3], dheads[3], dout;
} upi_qkv_pass;

/* ---- before the stages ---- */

/* ARG unless v is a tensor of these rows and heads. */
UPIPE_API upipe_status upi_qkv_check(upipe_ctx *c, const upipe_plan *p, const char *name, upipe_view v,
                                     int heads, int dim)
{
    if (v.data == NULL) return upipe_fail(&c->err, UPIPE_ERR_ARG, "%s is NULL", name);
    if (v.n != p->rows || v.h != heads || v.d != dim)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "%s is [%lld][%d][%d], the plan says [%lld][%d][%d]", name,
                          (long long)v.n, v.h, v.d, (long long)p->rows, heads, dim);
    if (!upi_dtype_built(&v.dtype))
        return upipe_fail(&c->err, UPIPE_ERR_UNSUPPORTED, "%s is %s, which %s does not cast", name,
                          upi_dtype_name_of(&v.dtype), c->ops->name);
    return UPIPE_OK;
}

/* The same of three views, those of Q, K and V; with `may_lack`, data NULL is none. */
UPIPE_API upipe_status upi_qkv_check_all(upipe_ctx *c, const upipe_plan *p, const char *const *names,
                                         const upipe_view *views, int may_lack)
{
    const upipe_plan_desc *d = &p->desc;
    int i;
    for (i = 0; i < 3; ++i)
        if (views[i].data != NULL || !may_lack)
            UPIPE_TRY(upi_qkv_check(c, p, names[i], views[i], i == UPI_PROJ_Q ? d->heads : d->kv_heads,
                                    i == UPI_PROJ_V ? d->v_dim : d->head_dim));
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_qkv_begin(upipe_ctx *c, upi_qkv_pass *f, const upipe_qkv *a, upipe_phase phase)
{
    static const char *const names[] = {"q", "k", "v"};
    memset(f, 0, sizeof *f);
    upi_phase_set(c, phase);
    if (a == NULL) return upipe_fail(&c->err, UPIPE_ERR_ARG, "the host's tensors are NULL");
    f->a = a;
    f->layer.plan = a->plan;
    f->layer.id = a->id;
    f->layer.mask = a->mask;
    f->layer.scale = a->scale;
    f->heads[UPI_PROJ_Q] = a->q;
    f->heads[UPI_PROJ_K] = a->k;
    f->heads[UPI_PROJ_V] = a->v;
    UPIPE_TRY(upi_check_stages(c, &f->layer));
    UPIPE_TRY(upi_qkv_check_all(c, a->plan, names, f->heads, 0));
    return upi_qkv_check(c, a->plan, "o", a->o, a->plan->desc.heads, a->plan->desc.v_dim);
}

/* The backward's own arguments. */
UPIPE_API upipe_status upi_qkv_begin_bwd(upipe_ctx *c, upi_qkv_pass *f, const upipe_qkv_grads *g)
{
    static const char *const names[] = {"dq", "dk", "dv"};
    const upipe_plan *p = f->a->plan;
    if (g == NULL) return upipe_fail(&c->err, UPIPE_ERR_ARG, "grads is NULL");
    f->dheads[UPI_PROJ_Q] = g->dq;
    f->dheads[UPI_PROJ_K] = g->dk;
    f->dheads[UPI_PROJ_V] = g->dv;
    f->dout = g->dout;
    f->grads.sinks = g->dsinks;
    UPIPE_TRY(upi_qkv_check_all(c, p, names, f->dheads, 1));
    UPIPE_TRY(upi_qkv_check(c, p, "dout", g->dout, p->desc.heads, p->desc.v_dim));
    return upi_check_grads(c, &f->layer, &f->grads, NULL, NULL);
}

/* All ranks make the same call; a backward that of its forward. */
UPIPE_API upipe_status upi_qkv_agree(upipe_ctx *c, upi_qkv_pass *f, upipe_given *given)
{
    UPIPE_TRY(upi_stage_agree(c, &f->layer, 0, 0, NULL, given));
    upi_pass_init(c->ops, &f->pass, &f->layer, &f->slots);
    f->pass.fill = upi_pack;
    f->pass.heads = f->heads;
    f->pass.out = f->a->o;
    return UPIPE_OK;
}

/* ---- a stage ---- */

/* The engine's store, then O out of its slot. */
UPIPE_API upipe_status upi_qkv_fwd_store(upipe_ctx *c, void *pass, int i)
{
    upi_qkv_pass *f = (upi_qkv_pass *)pass;
    const upipe_plan *p = f->a->plan;
    void *slot;
    int t;
    UPIPE_TRY(upi_fwd_store(c, &f->pass, i));
    for (t = 0; t < p->width; ++t) {
        UPIPE_TRY(upi_slot_drain(&f->slots, i + t, &slot, &c->err));
        UPIPE_TRY(upipe_a2a_unpack(c, f->a->o, p, i + t, UPIPE_A2A_Q, slot));
    }
    return UPIPE_OK;
}

/* dO into the slots, and delta from it; then the engine's load. */
UPIPE_API upipe_status upi_qkv_bwd_load(upipe_ctx *c, void *pass, int i)
{
    upi_qkv_pass *f = (upi_qkv_pass *)pass;
    const upipe_plan *p = f->a->plan;
    void *slot;
    int t, rank;
    upi_phase_set(c, UPIPE_BWD_OUT);
    for (t = 0; t < p->width; ++t) {
        UPIPE_TRY(upi_slot_lend(&f->slots, i + t, &slot, &c->err));
        UPIPE_TRY(upipe_a2a_pack(c, slot, p, i + t, UPIPE_A2A_Q, f->dout));
        for (rank = 0; rank < p->desc.ranks; ++rank) {
            const upipe_head_range q = upipe_plan_q(p, i + t, rank);
            upipe_view o = f->a->o, dout = upipe_slots_matrix(p, &f->slots, i + t, rank, p->desc.v_dim);
            if (q.count == 0) continue;
            o.data = upipe_view_at(o, 0, q.first);
            o.h = q.count;
            UPIPE_TRY(upi_delta(c, p, f->pass.delta + upipe_plan_before(p, i + t, -1) * p->rows, i + t, rank,
                                o, upipe_view_heads(dout, q.count)));
        }
        UPIPE_TRY(upi_slot_fill(&f->slots, i + t, &c->err));
    }
    return upi_bwd_load(c, &f->pass, i);
}

/* The engine's store, which unpacks dQ; dK and dV are unpacked after their round, and not needed afterwards. */
UPIPE_API upipe_status upi_qkv_bwd_store(upipe_ctx *c, void *pass, int i)
{
    upi_qkv_pass *f = (upi_qkv_pass *)pass;
    const upipe_plan *p = f->a->plan;
    void *slot;
    int t;
    UPIPE_TRY(upi_bwd_store(c, &f->pass, i));
    for (t = 0; t < p->width; ++t) UPIPE_TRY(upi_slot_drain(&f->slots, i + t, &slot, &c->err));
    return p->kv_grads_accumulate ? UPIPE_OK : upi_kv_grad_free(c, &f->pass);
}

/* ---- both loops ---- */

/* Slots of the stages in flight: those that attend together, or two in a pipeline. */
UPIPE_API upipe_status upi_qkv_slots(upipe_ctx *c, const upipe_plan *p, upipe_slots *slots)
{
    const int buffers = p->overlap ? 2 : p->width;
    void *data;
    UPIPE_TRY(upipe_alloc(c, &data, p->buffers.slot * (size_t)buffers, UPIPE_USE_OUT, "slots"));
    upipe_slots_init(slots, data, p->buffers.slot, p->stages, UPIPE_SLOT_EMPTY);
    slots->buffers = buffers;
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_qkv_fwd(upipe_ctx *c, upi_qkv_pass *f, upipe_saved *save)
{
    const upipe_plan *p = f->a->plan;
    void *lse;
    int i;
    upi_phase_set(c, UPIPE_FWD_IN);
    UPIPE_TRY(upipe_alloc(c, &lse, p->buffers.lse, UPIPE_USE_STAT, "lse"));
    f->pass.lse = save->lse = (float *)lse;
    UPIPE_TRY(upi_qkv_slots(c, p, &f->slots));
    if (p->overlap) {
        UPIPE_TRY(upi_pipelined(c, &f->pass, f->pass.scratch.attn_fwd, upi_fwd_load, upi_fwd_attend,
                                upi_qkv_fwd_store));
    } else {
        for (i = 0; i < p->stages; i += p->width) {
            UPIPE_TRY(upi_fwd_load(c, f, i));      /* Q', K', V': packed, inp_all_to_all */
            UPIPE_TRY(upi_fwd_attend(c, f, i));    /* O' */
            UPIPE_TRY(upi_qkv_fwd_store(c, f, i)); /* out_all_to_all, unpacked into o */
        }
    }
    return upipe_free(c, f->slots.data);
}

UPIPE_API upipe_status upi_qkv_bwd(upipe_ctx *c, upi_qkv_pass *f)
{
    const upipe_plan *p = f->a->plan;
    void *delta;
    int i;
    upi_phase_set(c, UPIPE_BWD_IN);
    UPIPE_TRY(upipe_alloc(c, &delta, p->buffers.delta, UPIPE_USE_STAT, "delta"));
    f->pass.delta = (float *)delta;
    UPIPE_TRY(upi_qkv_slots(c, p, &f->slots));
    if (p->overlap) {
        UPIPE_TRY(upi_pipelined(c, &f->pass, f->pass.scratch.attn_bwd, upi_qkv_bwd_load, upi_bwd_attend,
                                upi_qkv_bwd_store));
    } else {
        for (i = 0; i < p->stages; i += p->width) {
            UPIPE_TRY(upi_qkv_bwd_load(c, f, i));  /* dO packed, delta; Q', K', V' again */
            UPIPE_TRY(upi_bwd_attend(c, f, i));    /* dQ', dK', dV' */
            UPIPE_TRY(upi_qkv_bwd_store(c, f, i)); /* unpacked into dq, and after a round into dk and dv */
        }
    }
    UPIPE_TRY(upipe_free(c, f->slots.data));
    UPIPE_TRY(upipe_free(c, delta));
    if (p->kv_grads_accumulate) UPIPE_TRY(upi_kv_grad_end(c, &f->pass));
    return upi_kv_grad_free(c, &f->pass);
}

/* ---- public calls ---- */

/* upipe_qkv_fwd -- o = attention of q, k and v over the whole sequence
 *   save    written: lse alone, in the pool; upipe_saved_free or the backward frees it
 *   bytes   phases FWD_* of upipe_dry_qkv; sends upipe_plan_sent(plan, 0), to the ring
 *           upipe_ring_sent(plan, &mask, 0)
 *   errors  ARG, UNSUPPORTED, MEMORY, MISMATCH, TIMEOUT, ABORTED; the team is aborted, and the pool as before
 *   paper   section 3.3 and Figure (b)
 */
UPIPE_API upipe_status upipe_qkv_fwd(upipe_ctx *c, const upipe_qkv *a, upipe_saved *save)
{
    upi_qkv_pass f;
    upipe_status s;
    int64_t mark;
    if (save != NULL) memset(save, 0, sizeof *save);
    UPIPE_TRY(upi_ctx_check(c));
    mark = upipe_mem_mark(c->mem);
    s = upi_qkv_begin(c, &f, a, UPIPE_FWD_BEFORE);
    if (s == UPIPE_OK && save == NULL) s = upipe_fail(&c->err, UPIPE_ERR_ARG, "save is NULL");
    if (s == UPIPE_OK) s = upi_qkv_agree(c, &f, &save->given);
    if (s == UPIPE_OK) s = upi_qkv_fwd(c, &f, save);
    if (s != UPIPE_OK && save != NULL) memset(save, 0, sizeof *save);
    return upi_pass_end(c, s, mark);
}

/* upipe_qkv_eval -- upipe_qkv_fwd without a backward: nothing is left in the pool
 *   bytes, errors  as upipe_qkv_fwd
 */
UPIPE_API upipe_status upipe_qkv_eval(upipe_ctx *c, const upipe_qkv *a)
{
    upipe_saved save;
    UPIPE_TRY(upipe_qkv_fwd(c, a, &save));
    return upipe_saved_free(c, &save);
}

/* upipe_qkv_bwd -- the gradients of q, k and v; these are sent again
 *   a       the forward's, o included; its tensors may lie elsewhere
 *   save    consumed
 *   bytes   phases BWD_* of upipe_dry_qkv; sends upipe_plan_sent(plan, 1), or (plan, 2) with upipe_ops.attn_reads_o,
 *           to the ring upipe_ring_sent(plan, &mask, 1)
 *   errors  as upipe_qkv_fwd; save is then valid for upipe_saved_free alone, and dq, dk, dv hold parts
 *   paper   Appendix A
 */
UPIPE_API upipe_status upipe_qkv_bwd(upipe_ctx *c, const upipe_qkv *a, const upipe_qkv_grads *g,
                                     upipe_saved *save)
{
    upi_qkv_pass f;
    upipe_status s;
    int64_t mark;
    UPIPE_TRY(upi_ctx_check(c));
    mark = upipe_mem_mark(c->mem);
    s = upi_qkv_begin(c, &f, a, UPIPE_BWD_BEFORE);
    if (s == UPIPE_OK &&
        (save == NULL || save->given.plan == 0 || save->lse == NULL || save->out.data != NULL))
        s = upipe_fail(&c->err, UPIPE_ERR_ARG, "save is not upipe_qkv_fwd's (consumed before?)");
    if (s == UPIPE_OK) s = upi_qkv_begin_bwd(c, &f, g);
    if (s == UPIPE_OK) s = upi_qkv_agree(c, &f, &save->given);
    f.pass.grad = upi_unpack_grad;
    f.pass.dheads = f.dheads;
    f.pass.grads = &f.grads;
    f.pass.lse = save != NULL ? save->lse : NULL;
    if (s == UPIPE_OK) s = upi_qkv_bwd(c, &f);
    if (s == UPIPE_OK) s = upipe_free(c, save->lse);
    if (s == UPIPE_OK) memset(save, 0, sizeof *save);
    return upi_pass_end(c, s, mark);
}

#endif

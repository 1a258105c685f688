/* pass.h -- a pass over the host's tensors: its checks, and what it adds to a stage        part of upipe_qkv.h */
#ifndef UPIPE_QKV_PASS_H
#define UPIPE_QKV_PASS_H

#include "types.h"

/* The door's own part of a pass: of a layer without weights. */
typedef struct upi_qkv_pass {
    upipe_pass pass; /* the first member: the engine's calls get it */
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
    if (!upipe_dtype_built(&v.dtype))
        return upipe_fail(&c->err, UPIPE_ERR_UNSUPPORTED, "%s is %s, which %s does not cast", name,
                          upipe_dtype_name_of(&v.dtype), c->ops->name);
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
            UPIPE_TRY(upi_qkv_check(c, p, names[i], views[i], i == UPIPE_PROJ_Q ? d->heads : d->kv_heads,
                                    i == UPIPE_PROJ_V ? d->v_dim : d->head_dim));
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_qkv_begin(upipe_ctx *c, upi_qkv_pass *f, const upipe_qkv *a, upipe_phase phase)
{
    static const char *const names[] = {"q", "k", "v"};
    memset(f, 0, sizeof *f);
    upipe_phase_set(c, phase);
    if (a == NULL) return upipe_fail(&c->err, UPIPE_ERR_ARG, "the host's tensors are NULL");
    f->a = a;
    f->layer.plan = a->plan;
    f->layer.id = a->id;
    f->layer.mask = a->mask;
    f->layer.scale = a->scale;
    f->heads[UPIPE_PROJ_Q] = a->q;
    f->heads[UPIPE_PROJ_K] = a->k;
    f->heads[UPIPE_PROJ_V] = a->v;
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
    f->dheads[UPIPE_PROJ_Q] = g->dq;
    f->dheads[UPIPE_PROJ_K] = g->dk;
    f->dheads[UPIPE_PROJ_V] = g->dv;
    f->dout = g->dout;
    f->grads.sinks = g->dsinks;
    UPIPE_TRY(upi_qkv_check_all(c, p, names, f->dheads, 1));
    UPIPE_TRY(upi_qkv_check(c, p, "dout", g->dout, p->desc.heads, p->desc.v_dim));
    return upi_check_grads(c, &f->layer, &f->grads, NULL, NULL);
}

/* All ranks make the same call; a backward that of its forward. */
UPIPE_API upipe_status upi_qkv_agree(upipe_ctx *c, upi_qkv_pass *f, upipe_given *given)
{
    UPIPE_TRY(upi_stage_agree(c, &f->layer, 0, 0, given));
    upipe_pass_init(c->ops, &f->pass, &f->layer, &f->slots);
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
    UPIPE_TRY(upipe_fwd_store(c, &f->pass, i));
    for (t = 0; t < p->width; ++t) {
        UPIPE_TRY(upipe_slot_drain(&f->slots, i + t, &slot, &c->err));
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
    upipe_phase_set(c, UPIPE_BWD_OUT);
    for (t = 0; t < p->width; ++t) {
        UPIPE_TRY(upipe_slot_lend(&f->slots, i + t, &slot, &c->err));
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
        UPIPE_TRY(upipe_slot_fill(&f->slots, i + t, &c->err));
    }
    return upipe_bwd_load(c, &f->pass, i);
}

/* The engine's store, which unpacks dQ; dK and dV are unpacked after their round, and not needed afterwards. */
UPIPE_API upipe_status upi_qkv_bwd_store(upipe_ctx *c, void *pass, int i)
{
    upi_qkv_pass *f = (upi_qkv_pass *)pass;
    const upipe_plan *p = f->a->plan;
    void *slot;
    int t;
    UPIPE_TRY(upipe_bwd_store(c, &f->pass, i));
    for (t = 0; t < p->width; ++t) UPIPE_TRY(upipe_slot_drain(&f->slots, i + t, &slot, &c->err));
    return p->kv_grads_accumulate ? UPIPE_OK : upi_kv_grad_free(c, &f->pass);
}

#endif

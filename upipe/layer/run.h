/* run.h -- what every step of a pass over the block reads        part of upipe_layer.h */
#ifndef UPIPE_LAYER_H
#include "../upipe_layer.h"
#elif !defined(UPIPE_LAYER_RUN_H)
#define UPIPE_LAYER_RUN_H

#include "scratch.h"

/* One pass over one block; arrays are indexed by upi_proj. */
typedef struct upi_run {
    const upipe_layer *l;
    const upipe_plan *p;
    upipe_view x;        /* [rows][D] */
    upipe_view host[3];  /* instead of x: Q, K, V of the host's own, [rows][heads][dim]; data NULL without */
    upipe_view dhost[3]; /* their gradients; data NULL: not wanted */
    upi_scratch scratch; /* bytes */
    upipe_buffers buffers;    /* bytes */
    upipe_shard shard;        /* positions of this rank's rows */
    const void *w[3];         /* wq, wk, wv */
    const float *bias[3];     /* bq, bk, bv; NULL without */
    const float *norm[3];     /* QK norm weights; NULL without */
    const upipe_grads *grads; /* backward */
    size_t each[3];           /* bytes of one token and head */
    size_t held[3], dheld[3]; /* bytes of K', V' and of dK', dV'; all-gather ring: of all its ranks */
    float *dnorm;    /* backward with QK norm: f32 [H + Hkv][d], the norm weights' gradients by head */
    void *attn_work; /* scratch of attention, if it is held through all stages; otherwise NULL */
} upi_run;

UPIPE_API upi_run upi_run_make(upipe_ctx *c, const upipe_layer *l, upipe_view x)
{
    upi_run r;
    int i;
    memset(&r, 0, sizeof r);
    r.l = l;
    r.p = l->plan;
    r.x = x;
    r.scratch = upi_layer_scratch(c->ops, l, l->plan->desc.ring > 1);
    r.buffers = upipe_plan_buffers(r.p);
    r.shard = upipe_shard_team(&r.p->held, r.p->desc.ranks, c->team->rank);
    r.w[UPI_PROJ_Q] = l->wq;
    r.w[UPI_PROJ_K] = l->wk;
    r.w[UPI_PROJ_V] = l->wv;
    r.bias[UPI_PROJ_Q] = l->bq;
    r.bias[UPI_PROJ_K] = l->bk;
    r.bias[UPI_PROJ_V] = l->bv;
    r.norm[UPI_PROJ_Q] = l->q_norm_weight;
    r.norm[UPI_PROJ_K] = l->k_norm_weight;
    for (i = 0; i < 3; ++i)
        r.each[i] = (size_t)upi_dim(r.p, (upi_proj)i) * upipe_dtype_bytes(r.p->desc.dtype);
    r.held[UPI_PROJ_K] = r.p->kv_gathered ? r.buffers.all_k : r.buffers.k;
    r.held[UPI_PROJ_V] = r.p->kv_gathered ? r.buffers.all_v : r.buffers.v;
    r.dheld[UPI_PROJ_K] = r.p->kv_gathered ? r.buffers.all_dk : r.buffers.dk;
    r.dheld[UPI_PROJ_V] = r.p->kv_gathered ? r.buffers.all_dv : r.buffers.dv;
    return r;
}

UPIPE_API upipe_status upi_gemm(upipe_ctx *c, const upi_run *r, upipe_view out, upipe_view a, upipe_view b,
                                int flags)
{
    void *work;
    UPIPE_TRY(upipe_alloc(c, &work, r->scratch.gemm, "gemm_work"));
    UPIPE_TRY(c->ops->gemm(c, out, a, b, flags, work, r->scratch.gemm));
    return upipe_free(c, work);
}

/* The gradient of a weight: dw += a^T * b. One that is not f32 is rounded once: the product comes in f32 first. */
UPIPE_API upipe_status upi_gemm_grad(upipe_ctx *c, const upi_run *r, upipe_view dw, upipe_view a,
                                     upipe_view b)
{
    void *sum;
    upipe_view wide = upipe_view_make(NULL, UPIPE_F32, dw.n, dw.d, dw.h, dw.n * dw.d, dw.d);
    if (dw.dtype == UPIPE_F32) return upi_gemm(c, r, dw, a, b, UPIPE_GEMM_TRANS_A | UPIPE_GEMM_ACCUMULATE);
    UPIPE_TRY(upipe_alloc(c, &sum, (size_t)(dw.n * dw.d * dw.h) * 4, "dw_sum"));
    wide.data = sum;
    UPIPE_TRY(upi_gemm(c, r, wide, a, b, UPIPE_GEMM_TRANS_A));
    UPIPE_TRY(c->ops->add(c, dw, wide));
    return upipe_free(c, sum);
}

#endif

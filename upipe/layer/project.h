/* project.h -- from x to a stage's send buffer, and back: products, QK norm, RoPE    part of upipe_layer.h */
#ifndef UPIPE_LAYER_H
#include "../upipe_layer.h"
#elif !defined(UPIPE_LAYER_PROJECT_H)
#define UPIPE_LAYER_PROJECT_H

#include "run.h"

/* RoPE of these heads of a send buffer, one call for each piece of the rank's tokens. */
UPIPE_API upipe_status upi_rope(upipe_ctx *c, const upi_run *r, void *data, upipe_head_run h, int inverse)
{
    const upipe_plan *p = r->p;
    const int64_t width = (int64_t)h.each * p->desc.head_dim;
    const size_t row = (size_t)width * upipe_dtype_bytes(p->desc.dtype);
    char *to = (char *)upipe_head_run_at(p, data, h, p->desc.head_dim);
    upipe_rope rope;
    int64_t at = 0;
    int i;
    if (r->l->rope_theta == 0) return UPIPE_OK;
    memset(&rope, 0, sizeof rope);
    rope.count = h.blocks * p->desc.batch;
    rope.step = p->local * width;
    rope.pos_step = r->shard.step;
    rope.theta = r->l->rope_theta;
    rope.interleaved = r->l->rope_interleaved;
    rope.inverse = inverse;
    for (i = 0; i < r->shard.pieces; at += r->shard.piece[i++].n) {
        rope.x = upipe_view_packed(to + (size_t)at * row, p->desc.dtype, r->shard.piece[i].n, h.each,
                                   p->desc.head_dim);
        rope.pos0 = r->shard.piece[i].pos;
        UPIPE_TRY(c->ops->rope(c, &rope));
    }
    return UPIPE_OK;
}

/* The product alone, and the bias: these heads of dst = x * W^T + b. */
UPIPE_API upipe_status upi_project_raw(upipe_ctx *c, const upi_run *r, upi_proj which, upipe_head_run h,
                                       void *dst)
{
    const int64_t dim = upi_dim(r->p, which);
    const upipe_view y = upipe_head_run_matrix(r->p, dst, h, (int)dim);
    UPIPE_TRY(upi_gemm(c, r, y, r->x, upi_weight_rows(r->p, r->w[which], r->p->desc.dtype, h, which),
                       UPIPE_GEMM_TRANS_B));
    return r->bias[which] != NULL ? upipe_bias_add(c, y, r->bias[which] + h.first * dim, h.step * dim)
                                  : UPIPE_OK;
}

/* Fills a stage's send buffer, all of its runs: projected, normed and rotated; or packed, where the host has made
 * Q, K and V. */
UPIPE_API upipe_status upi_project(upipe_ctx *c, const upi_run *r, upi_proj which, int stage, void *dst)
{
    const upipe_plan *p = r->p;
    const float *weight = r->norm[which];
    upipe_head_run h;
    int rank = 0;
    while (upipe_head_run_next(p, which == UPI_PROJ_Q ? UPIPE_A2A_Q : UPIPE_A2A_KV, stage, &rank, &h)) {
        if (r->host[which].data != NULL) {
            UPIPE_TRY(upi_head_run_copy(c, p, dst, h, r->host[which], 1));
            continue;
        }
        UPIPE_TRY(upi_project_raw(c, r, which, h, dst));
        if (weight != NULL) {
            upipe_view x = upipe_view_packed(upipe_head_run_at(p, dst, h, p->desc.head_dim), p->desc.dtype,
                                             h.blocks * p->rows, h.each, p->desc.head_dim);
            UPIPE_TRY(c->ops->rmsnorm(c, x, x, weight, r->l->norm_eps));
        }
        if (which != UPI_PROJ_V) UPIPE_TRY(upi_rope(c, r, dst, h, 0));
    }
    return UPIPE_OK;
}

/* The backward of one run: g becomes the gradient of x * W^T; dW += g^T * x, and db += the sums of g over its
 * rows, where they are wanted. Where the host has made Q, K and V, g is unpacked. */
UPIPE_API upipe_status upi_project_heads_bwd(upipe_ctx *c, const upi_run *r, upi_proj which, upipe_head_run h,
                                             void *g)
{
    const upipe_plan *p = r->p;
    const int dim = upi_dim(p, which);
    const upipe_grads *to = r->grads;
    void *const dw = which == UPI_PROJ_Q ? to->wq : which == UPI_PROJ_K ? to->wk : to->wv;
    float *const db = which == UPI_PROJ_Q ? to->bq : which == UPI_PROJ_K ? to->bk : to->bv;
    const float *weight = r->norm[which];
    int64_t block = p->rows * h.each * dim * (int64_t)upipe_dtype_bytes(p->desc.dtype), b;
    upipe_view dy = upipe_view_packed(upipe_head_run_at(p, g, h, dim), p->desc.dtype, p->rows, h.each, dim);
    if (r->host[which].data != NULL)
        return r->dhost[which].data != NULL ? upi_head_run_copy(c, p, g, h, r->dhost[which], 0) : UPIPE_OK;
    if (which != UPI_PROJ_V) UPIPE_TRY(upi_rope(c, r, g, h, 1));
    if (weight != NULL) {
        upipe_head_run own = h;
        upipe_view in = dy, out = dy;
        own.at = 0;
        UPIPE_TRY(upipe_alloc(c, &in.data, upipe_plan_rows_bytes(p, (int64_t)h.blocks * h.each, dim),
                              "norm_input"));
        UPIPE_TRY(upi_project_raw(c, r, which, own, in.data));
        for (b = 0; b < h.blocks; ++b, out.data = (char *)out.data + block) {
            int64_t head = h.first + b * h.step + (which == UPI_PROJ_K ? p->desc.heads : 0);
            upipe_view x = in;
            x.data = (char *)in.data + b * block;
            UPIPE_TRY(c->ops->rmsnorm_bwd(c, out, out, x, weight, r->l->norm_eps, r->dnorm + head * dim, 0));
        }
        UPIPE_TRY(upipe_free(c, in.data));
    }
    for (b = 0; db != NULL && b < h.blocks; ++b, dy.data = (char *)dy.data + block)
        UPIPE_TRY(c->ops->bias_bwd(c, db + (h.first + b * h.step) * dim, dy));
    if (dw == NULL) return UPIPE_OK;
    return upi_gemm_grad(c, r, upi_weight_rows(p, dw, r->l->grad_dtype, h, which),
                         upipe_head_run_matrix(p, g, h, dim), r->x);
}

/* The same for all heads of a stage's Q, or of a complete round's K or V. */
UPIPE_API upipe_status upi_project_bwd(upipe_ctx *c, const upi_run *r, upi_proj which, int stage, void *g)
{
    upipe_head_run h;
    int rank = 0;
    while (upipe_head_run_next(r->p, which == UPI_PROJ_Q ? UPIPE_A2A_Q : UPIPE_A2A_KV, stage, &rank, &h))
        UPIPE_TRY(upi_project_heads_bwd(c, r, which, h, g));
    return UPIPE_OK;
}

/* Zeroes the gradients of the norm weights, one row a head. */
UPIPE_API upipe_status upi_norm_grads_begin(upipe_ctx *c, upi_run *r)
{
    const upipe_plan_desc *d = &r->p->desc;
    const size_t bytes = (size_t)(d->heads + d->kv_heads) * (size_t)d->head_dim * 4;
    void *dnorm;
    if (r->l->q_norm_weight == NULL) return UPIPE_OK;
    UPIPE_TRY(upipe_alloc(c, &dnorm, bytes, "norm_grad"));
    r->dnorm = (float *)dnorm;
    return c->ops->zero(c, dnorm, bytes);
}

/* The gradients of the norm weights: sums over heads in natural order, whatever order the stages had. */
UPIPE_API upipe_status upi_norm_grads(upipe_ctx *c, const upi_run *r)
{
    const upipe_grads *g = r->grads;
    const int32_t d = r->p->desc.head_dim;
    const int heads = r->p->desc.heads, kv_heads = r->p->desc.kv_heads;
    if (r->dnorm == NULL) return UPIPE_OK;
    if (g->q_norm_weight != NULL)
        UPIPE_TRY(
            c->ops->sum(c, upipe_view_packed(g->q_norm_weight, UPIPE_F32, 1, 1, d), r->dnorm, d, heads, 1));
    if (g->k_norm_weight != NULL)
        UPIPE_TRY(c->ops->sum(c, upipe_view_packed(g->k_norm_weight, UPIPE_F32, 1, 1, d),
                              r->dnorm + (int64_t)heads * d, d, kv_heads, 1));
    return upipe_free(c, r->dnorm);
}

#endif

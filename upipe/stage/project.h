/* project.h -- Q, K and V of a stage's heads, made for the send buffer; their gradients at this rank's tokens
 *
 * One pair of functions makes Q, K and V from x (upi_project, upi_project_grad), another one packs tensors of the
 * host's own (upi_pack, upi_unpack_grad). A door chooses: upi_pass.fill and .grad.
 */
#ifndef UPIPE_STAGE_PROJECT_H
#define UPIPE_STAGE_PROJECT_H

/* RoPE of these heads of a send buffer, one call for each piece of the rank's tokens. */
UPIPE_API upipe_status upi_rope(upipe_ctx *c, const upi_pass *f, void *data, upi_head_run h, int inverse)
{
    const upipe_plan *p = f->plan;
    const int64_t width = (int64_t)h.heads * p->desc.head_dim;
    const size_t row = (size_t)width * upipe_dtype_bytes(p->desc.dtype);
    char *to = (char *)upi_head_run_matrix(p, data, h, p->desc.head_dim).data +
               (size_t)f->rope_from * upipe_dtype_bytes(p->desc.dtype);
    upipe_rope rope;
    int i;
    if (f->layer->rope_theta == 0 && f->layer->rope_rates == NULL) return UPIPE_OK;
    memset(&rope, 0, sizeof rope);
    rope.count = h.blocks * p->desc.batch;
    rope.step = p->local * width;
    rope.pos_step = f->rows.step;
    rope.theta = f->layer->rope_theta;
    rope.rates = f->layer->rope_rates;
    rope.factor = f->layer->rope_factor;
    rope.dims = f->layer->rope_dims;
    rope.interleaved = f->layer->rope_interleaved;
    rope.inverse = inverse;
    for (i = 0; i < f->rows.pieces; to += (size_t)f->rows.piece[i++].n * row) {
        rope.x = upipe_view_make(to, p->desc.dtype, f->rows.piece[i].n, width, h.heads, p->desc.head_dim,
                                 p->desc.head_dim - f->rope_from);
        rope.pos0 = f->rows.piece[i].pos;
        UPIPE_TRY(c->ops->rope(c, &rope));
    }
    return UPIPE_OK;
}

/* These heads of dst = x * W^T + b, before norm and RoPE. */
UPIPE_API upipe_status upi_project_raw(upipe_ctx *c, const upi_pass *f, upi_proj which, upi_head_run h,
                                       void *dst)
{
    const upipe_plan *p = f->plan;
    const int64_t dim = f->dim[which];
    const upipe_view y = upi_head_run_matrix(p, dst, h, (int)dim);
    UPIPE_TRY(upi_gemm(c, f, y, f->x, upi_weight_rows(f, f->w[which], p->desc.dtype, h, which),
                       UPIPE_GEMM_TRANS_B));
    return f->bias[which] != NULL ? upipe_bias_add(c, y, f->bias[which] + h.first * dim, h.stride * dim)
                                  : UPIPE_OK;
}

/* Fills a stage's send buffer from x: projected, normed and rotated. */
UPIPE_API upipe_status upi_project(upipe_ctx *c, const upi_pass *f, upi_proj which, int stage, void *dst)
{
    const upipe_plan *p = f->plan;
    const float *weight = f->norm[which];
    upi_head_run h;
    int rank = 0;
    while (upi_head_run_next(p, f->sent[which], stage, &rank, &h)) {
        UPIPE_TRY(upi_project_raw(c, f, which, h, dst));
        if (weight != NULL) {
            upipe_view x = upipe_view_packed(upi_head_run_matrix(p, dst, h, p->desc.head_dim).data,
                                             p->desc.dtype, h.blocks * p->rows, h.heads, p->desc.head_dim);
            UPIPE_TRY(c->ops->rmsnorm(c, x, x, weight, f->layer->norm_eps));
        }
        if (which != UPI_PROJ_V) UPIPE_TRY(upi_rope(c, f, dst, h, 0));
    }
    return UPIPE_OK;
}

/* Fills a stage's send buffer from the host's Q, K or V. */
UPIPE_API upipe_status upi_pack(upipe_ctx *c, const upi_pass *f, upi_proj which, int stage, void *dst)
{
    return upipe_a2a_pack(c, dst, f->plan, stage, f->sent[which], f->heads[which]);
}

/* The gradient of these heads before their norm, in place: g, of what the norm made of x * W^T. */
UPIPE_API upipe_status upi_norm_grad(upipe_ctx *c, const upi_pass *f, upi_proj which, upi_head_run h, void *g)
{
    const upipe_plan *p = f->plan;
    const int d = p->desc.head_dim;
    const size_t block = upipe_plan_rows_bytes(p, h.heads, d);
    upipe_view dy = upipe_view_packed(upi_head_run_matrix(p, g, h, d).data, p->desc.dtype, p->rows, h.heads,
                                      d),
               x = dy;
    upi_head_run own = h;
    void *in;
    int b;
    own.offset = 0;
    UPIPE_TRY(upipe_alloc(c, &in, (size_t)h.blocks * block, UPIPE_USE_SCRATCH, "norm_input"));
    UPIPE_TRY(upi_project_raw(c, f, which, own, in));
    for (b = 0; b < h.blocks; ++b, dy.data = (char *)dy.data + block) {
        int64_t head = h.first + b * h.stride + (which == UPI_PROJ_K ? p->desc.heads : 0);
        x.data = (char *)in + (size_t)b * block;
        UPIPE_TRY(
            c->ops->rmsnorm_bwd(c, dy, dy, x, f->norm[which], f->layer->norm_eps, f->dnorm + head * d, 0));
    }
    return upipe_free(c, in);
}

/* g becomes the gradient of x * W^T; dW += g^T * x, and db += the sums of g over its rows, where they are wanted. */
UPIPE_API upipe_status upi_project_grad(upipe_ctx *c, const upi_pass *f, upi_proj which, upi_head_run h,
                                        void *g)
{
    const upipe_plan *p = f->plan;
    const upipe_grads *to = f->grads;
    const int dim = f->dim[which];
    float *const dw = which == UPI_PROJ_Q ? to->wq : which == UPI_PROJ_K ? to->wk : to->wv;
    float *const db = which == UPI_PROJ_Q ? to->bq : which == UPI_PROJ_K ? to->bk : to->bv;
    upipe_view dy =
        upipe_view_packed(upi_head_run_matrix(p, g, h, dim).data, p->desc.dtype, p->rows, h.heads, dim);
    int b;
    if (which != UPI_PROJ_V) UPIPE_TRY(upi_rope(c, f, g, h, 1));
    if (f->norm[which] != NULL) UPIPE_TRY(upi_norm_grad(c, f, which, h, g));
    for (b = 0; db != NULL && b < h.blocks; ++b) {
        UPIPE_TRY(c->ops->bias_bwd(c, db + (h.first + b * h.stride) * dim, dy));
        dy.data = (char *)dy.data + upipe_plan_rows_bytes(p, h.heads, dim);
    }
    if (dw == NULL) return UPIPE_OK;
    return upi_gemm(c, f, upi_weight_rows(f, dw, UPIPE_F32, h, which), upi_head_run_matrix(p, g, h, dim),
                    f->x, UPIPE_GEMM_TRANS_A | UPIPE_GEMM_ACCUMULATE);
}

/* g is unpacked into the host's gradient, if that is wanted. */
UPIPE_API upipe_status upi_unpack_grad(upipe_ctx *c, const upi_pass *f, upi_proj which, upi_head_run h,
                                       void *g)
{
    if (f->dheads[which].data == NULL) return UPIPE_OK;
    return upi_head_run_copy(c, f->plan, g, h, f->dheads[which], 0);
}

/* The gradients of all heads of a stage's Q, or of a complete round's K or V. */
UPIPE_API upipe_status upi_stage_grad(upipe_ctx *c, const upi_pass *f, upi_proj which, int stage, void *g)
{
    upi_head_run h;
    int rank = 0;
    while (upi_head_run_next(f->plan, f->sent[which], stage, &rank, &h))
        UPIPE_TRY(f->grad(c, f, which, h, g));
    return UPIPE_OK;
}

/* Zeroes the gradients of the norm weights, one row a head. */
UPIPE_API upipe_status upi_norm_grads_begin(upipe_ctx *c, upi_pass *f)
{
    const upipe_plan_desc *d = &f->plan->desc;
    const size_t bytes = (size_t)(d->heads + d->kv_heads) * (size_t)d->head_dim * 4;
    void *dnorm;
    UPIPE_TRY(upipe_alloc(c, &dnorm, bytes, UPIPE_USE_ACT_GRAD, "norm_grad"));
    f->dnorm = (float *)dnorm;
    return c->ops->zero(c, dnorm, bytes);
}

/* The gradients of the norm weights: sums over heads in natural order, whatever order the stages had. */
UPIPE_API upipe_status upi_norm_grads_end(upipe_ctx *c, upi_pass *f)
{
    const upipe_plan_desc *d = &f->plan->desc;
    float *const to[2] = {f->grads->q_norm_weight, f->grads->k_norm_weight};
    const float *from = f->dnorm;
    int i;
    for (i = 0; i < 2; ++i, from += (int64_t)d->heads * d->head_dim)
        if (to[i] != NULL)
            UPIPE_TRY(c->ops->sum(c, upipe_view_packed(to[i], UPIPE_F32, 1, 1, d->head_dim), from,
                                  d->head_dim, i == 0 ? d->heads : d->kv_heads, 1));
    return upipe_free(c, f->dnorm);
}

#endif

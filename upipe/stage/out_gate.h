/* out_gate.h -- the tiles of a gated output projection */
#ifndef UPIPE_STAGE_OUT_GATE_H
#define UPIPE_STAGE_OUT_GATE_H

/* z: the gate of a tile, and its gradient; u: what is gated, and its gradient; [n][H*v_dim]. o: O of the heads of one
 * stage and rank. */
typedef struct upi_gated {
    upi_pass pass;
    upi_tile tile;
    size_t work_bytes;
    void *z, *u, *o;
} upi_gated;

UPIPE_API int32_t upi_gated_width(const upi_gated *g)
{
    return g->pass.plan->desc.heads * g->pass.plan->desc.v_dim;
}

/* A matrix of the storage type; a weight's are rows of D or, of wo, of H*v_dim elements. */
UPIPE_API upipe_view upi_gated_matrix(const upi_gated *g, const void *data, int64_t rows, int64_t columns)
{
    return upipe_view_packed((void *)(uintptr_t)data, g->pass.plan->desc.dtype, rows, 1, (int32_t)columns);
}

/* z or u of this tile. */
UPIPE_API upipe_view upi_gated_tile(const upi_gated *g, void *data)
{
    return upi_gated_matrix(g, data, g->tile.at.n, upi_gated_width(g));
}

/* n heads of it. */
UPIPE_API upipe_view upi_gated_heads(const upi_gated *g, void *data, int head, int n)
{
    upipe_view v = upipe_view_heads(upi_gated_tile(g, data), g->pass.plan->desc.heads);
    v.data = upipe_view_at(v, 0, head);
    v.h = n;
    return v;
}

/* The same rows of the heads of one stage and rank, in slots. */
UPIPE_API upipe_view upi_gated_slot(const upi_gated *g, const upipe_slots *slots, int stage, int rank)
{
    const upipe_plan *p = g->pass.plan;
    const upipe_view all = upipe_slots_matrix(p, slots, stage, rank, p->desc.v_dim);
    return upipe_view_heads(upipe_view_rows(all, g->tile.at.row, g->tile.at.n),
                            upipe_plan_q(p, stage, rank).count);
}

/* wo, and wg, as matrices of a head each: [D][v_dim], and [v_dim][D]. */
UPIPE_API upipe_view upi_gated_wo(const upi_gated *g)
{
    const upipe_plan_desc *d = &g->pass.plan->desc;
    return upipe_view_heads(upi_gated_matrix(g, g->pass.layer->wo, d->model_dim, upi_gated_width(g)),
                            d->heads);
}

UPIPE_API upipe_view upi_gated_wg(const upi_gated *g)
{
    const upipe_plan_desc *d = &g->pass.plan->desc;
    upipe_view v = upi_gated_matrix(g, g->pass.layer->wg, d->v_dim, d->model_dim);
    v.h = d->heads;
    v.h_stride = d->v_dim * d->model_dim;
    return v;
}

/* Scratch of a tile's products. */
UPIPE_API size_t upi_gated_work_bytes(const upipe_ops *ops, const upi_gated *g, int backward)
{
    const int64_t rows = g->pass.tile_rows, model = g->pass.plan->desc.model_dim, width = upi_gated_width(g);
    const upipe_view x = upi_gated_matrix(g, NULL, rows, model), z = upi_gated_matrix(g, NULL, rows, width),
                     wg = upi_gated_matrix(g, NULL, width, model),
                     wo = upi_gated_matrix(g, NULL, model, width),
                     heads = upipe_view_heads(z, g->pass.plan->desc.heads);
    upipe_view sum = x, dwo = wo, dwg = wg;
    size_t most = ops->gemm_bytes(ops, z, x, wg, UPIPE_GEMM_TRANS_B);
    sum.dtype = dwo.dtype = dwg.dtype = UPIPE_F32;
    if (!backward)
        return upipe_max_bytes(most, ops->gemm_bytes(ops, sum, heads, upi_gated_wo(g), UPIPE_GEMM_TRANS_B));
    most = upipe_max_bytes(most, ops->gemm_bytes(ops, z, x, wo, 0));
    most = upipe_max_bytes(most, ops->gemm_bytes(ops, dwo, x, z, UPIPE_GEMM_TRANS_A | UPIPE_GEMM_ACCUMULATE));
    most = upipe_max_bytes(most, ops->gemm_bytes(ops, dwg, z, x, UPIPE_GEMM_TRANS_A | UPIPE_GEMM_ACCUMULATE));
    return upipe_max_bytes(most, ops->gemm_bytes(ops, sum, heads, upi_gated_wg(g), 0));
}

/* ---- before and after the tiles ---- */

/* Views that begin at one address must have one stride: a tile's rows are written before the next tile's are read. */
UPIPE_API upipe_status upi_gated_check_alias(upipe_ctx *c, const char *to, upipe_view y, const char *from,
                                             upipe_view x)
{
    if (y.n < 2 || y.data != x.data || y.n_stride == x.n_stride) return UPIPE_OK;
    return upipe_fail(&c->err, UPIPE_ERR_ARG, "%s, of stride %lld, lies over %s, of stride %lld", to,
                      (long long)y.n_stride, from, (long long)x.n_stride);
}

/* What both directions check; g is ready but for its buffers. */
UPIPE_API upipe_status upi_gated_check(upipe_ctx *c, upi_gated *g, const upipe_layer *l, upipe_view y,
                                       const upipe_saved *save, upipe_view x)
{
    UPIPE_TRY(upi_check_out(c, l, y, save));
    UPIPE_TRY(upi_check_rows(c, l->plan, "x", x, l->plan->desc.model_dim));
    if (l->wg == NULL) return upipe_fail(&c->err, UPIPE_ERR_ARG, "wg is NULL");
    memset(g, 0, sizeof *g);
    upi_pass_init(NULL, &g->pass, l, NULL);
    return UPIPE_OK;
}

/* The buffers of both directions. */
UPIPE_API upipe_status upi_gated_begin(upipe_ctx *c, upi_gated *g, size_t work_bytes)
{
    const upipe_plan_desc *d = &g->pass.plan->desc;
    const size_t sum = d->dtype == UPIPE_F32 ? 0 : (size_t)(g->pass.tile_rows * d->model_dim) * 4;
    const size_t gate = (size_t)(g->pass.tile_rows * upi_gated_width(g)) * upipe_dtype_bytes(d->dtype);
    g->work_bytes = work_bytes;
    UPIPE_TRY(upipe_alloc(c, &g->tile.buf, sum, UPIPE_USE_SCRATCH, "tile"));
    UPIPE_TRY(upipe_alloc(c, &g->tile.work, work_bytes, UPIPE_USE_SCRATCH, "gemm_work"));
    return upipe_alloc(c, &g->z, gate, UPIPE_USE_SCRATCH, "gate");
}

UPIPE_API upipe_status upi_gated_end(upipe_ctx *c, upi_gated *g)
{
    UPIPE_TRY(upipe_free(c, g->z));
    UPIPE_TRY(upipe_free(c, g->tile.work));
    return upipe_free(c, g->tile.buf);
}

UPIPE_API upipe_status upi_gated_gemm(upipe_ctx *c, const upi_gated *g, upipe_view out, upipe_view a,
                                      upipe_view b, int flags)
{
    return c->ops->gemm(c, out, a, b, flags, g->tile.work, g->work_bytes);
}

/* z of this tile, and in `to` what it gates: O of all heads; NULL: that is not wanted. */
UPIPE_API upipe_status upi_gated_make(upipe_ctx *c, const upi_gated *g, void *to, const upipe_slots *o,
                                      upipe_view x)
{
    const upipe_plan *p = g->pass.plan;
    int head, stage, rank, n;
    UPIPE_TRY(upi_gated_gemm(c, g, upi_gated_tile(g, g->z), upipe_view_rows(x, g->tile.at.row, g->tile.at.n),
                             upi_gated_matrix(g, g->pass.layer->wg, upi_gated_width(g), p->desc.model_dim),
                             UPIPE_GEMM_TRANS_B));
    for (head = 0; to != NULL && head < p->desc.heads; head += n) {
        n = upipe_plan_q_place(p, head, &stage, &rank).count;
        UPIPE_TRY(c->ops->gate(c, UPIPE_GATE_SIGMOID, upi_gated_heads(g, to, head, n),
                               upi_gated_heads(g, g->z, head, n), upi_gated_slot(g, o, stage, rank)));
    }
    return UPIPE_OK;
}

/* ---- forward ---- */

UPIPE_API upipe_status upi_gated_fwd(upipe_ctx *c, upi_gated *g, upipe_view y, const upipe_slots *out,
                                     upipe_view x)
{
    const upipe_plan *p = g->pass.plan;
    const float *bo = g->pass.layer->bo;
    UPIPE_TRY(upi_gated_begin(c, g, upi_gated_work_bytes(c->ops, g, 0)));
    while (upi_tile_next(c, &g->pass, &g->tile, y)) {
        UPIPE_TRY(upi_gated_make(c, g, g->z, out, x));
        UPIPE_TRY(upi_gated_gemm(c, g, g->tile.sum, upipe_view_heads(upi_gated_tile(g, g->z), p->desc.heads),
                                 upi_gated_wo(g), UPIPE_GEMM_TRANS_B));
        if (bo != NULL) UPIPE_TRY(upipe_bias_add(c, g->tile.sum, bo, 0));
        if (g->tile.buf != NULL) UPIPE_TRY(c->ops->cast(c, g->tile.out, g->tile.sum));
    }
    return upi_gated_end(c, g);
}

/* ---- backward ---- */

/* From u, the gradient of what is gated: z becomes its gradient, O that of O, in `to`; delta. */
UPIPE_API upipe_status upi_gated_bwd_heads(upipe_ctx *c, const upi_gated *g, upipe_saved *save,
                                           const upipe_slots *to)
{
    const upipe_plan *p = g->pass.plan;
    const int64_t row = g->tile.at.row, rows = g->tile.at.n;
    int head, stage, rank, n;
    for (head = 0; head < p->desc.heads; head += n) {
        upipe_view o, dout, copy, delta;
        int64_t before;
        n = upipe_plan_q_place(p, head, &stage, &rank).count;
        before = upipe_plan_before(p, stage, -1) + upipe_plan_offset(p, UPIPE_A2A_Q, stage, rank);
        delta = upipe_view_packed(save->delta + before * p->rows, UPIPE_F32, p->rows, n, 1);
        o = upi_gated_slot(g, &save->out, stage, rank);
        dout = upi_gated_slot(g, to, stage, rank);
        copy = to->data != save->out.data ? dout : upipe_view_packed(g->o, o.dtype, rows, n, o.d);
        UPIPE_TRY(c->ops->cast(c, copy, o));
        if (copy.data != dout.data) o = copy;
        UPIPE_TRY(c->ops->gate_bwd(c, UPIPE_GATE_SIGMOID, upi_gated_heads(g, g->z, head, n), dout,
                                   upi_gated_heads(g, g->u, head, n)));
        UPIPE_TRY(c->ops->rowdot(c, upipe_view_rows(delta, row, rows), o, dout));
    }
    return UPIPE_OK;
}

/* A tile. dx is written last: it may lie over dy. */
UPIPE_API upipe_status upi_gated_bwd_tile(upipe_ctx *c, const upi_gated *g, upipe_saved *save,
                                          const upipe_slots *to, upipe_view dy, upipe_view x)
{
    enum { BY_TOKENS = UPIPE_GEMM_TRANS_A | UPIPE_GEMM_ACCUMULATE };
    const upipe_plan_desc *d = &g->pass.plan->desc;
    const upipe_grads *grads = g->pass.grads;
    const int64_t width = upi_gated_width(g);
    const upipe_view z = upi_gated_tile(g, g->z), u = upi_gated_tile(g, g->u);
    upipe_view x_tile = upipe_view_rows(x, g->tile.at.row, g->tile.at.n);
    dy = upipe_view_rows(dy, g->tile.at.row, g->tile.at.n);
    UPIPE_TRY(upi_gated_make(c, g, grads->wo != NULL ? g->u : NULL, &save->out, x));
    if (grads->wo != NULL)
        UPIPE_TRY(upi_gated_gemm(c, g,
                                 upipe_view_packed(grads->wo, UPIPE_F32, d->model_dim, 1, (int32_t)width), dy,
                                 u, BY_TOKENS));
    UPIPE_TRY(upi_gated_gemm(c, g, u, dy, upi_gated_matrix(g, g->pass.layer->wo, d->model_dim, width), 0));
    UPIPE_TRY(upi_gated_bwd_heads(c, g, save, to));
    if (grads->wg != NULL)
        UPIPE_TRY(upi_gated_gemm(c, g,
                                 upipe_view_packed(grads->wg, UPIPE_F32, width, 1, (int32_t)d->model_dim), z,
                                 x_tile, BY_TOKENS));
    UPIPE_TRY(upi_gated_gemm(c, g, g->tile.sum, upipe_view_heads(z, d->heads), upi_gated_wg(g), 0));
    return g->tile.buf != NULL ? c->ops->cast(c, g->tile.out, g->tile.sum) : UPIPE_OK;
}

UPIPE_API upipe_status upi_gated_bwd(upipe_ctx *c, upi_gated *g, upipe_saved *save, upipe_view dx,
                                     upipe_view dy, upipe_view x)
{
    const upipe_plan *p = g->pass.plan;
    const upipe_grads *grads = g->pass.grads;
    const size_t element = upipe_dtype_bytes(p->desc.dtype);
    upipe_slots to = save->out;
    void *delta;
    UPIPE_TRY(upipe_alloc(c, &delta, p->buffers.delta, UPIPE_USE_STAT, "delta"));
    save->delta = (float *)delta;
    if (c->ops->attn_reads_o) UPIPE_TRY(upipe_slots_alloc(c, p, &to, UPIPE_SLOT_FULL, "dout"));
    UPIPE_TRY(upi_gated_begin(c, g, upi_gated_work_bytes(c->ops, g, 1)));
    UPIPE_TRY(upipe_alloc(c, &g->u, (size_t)(g->pass.tile_rows * upi_gated_width(g)) * element,
                          UPIPE_USE_SCRATCH, "gated"));
    UPIPE_TRY(upipe_alloc(
        c, &g->o,
        c->ops->attn_reads_o ? 0 : (size_t)(g->pass.tile_rows * p->per_rank * p->desc.v_dim) * element,
        UPIPE_USE_SCRATCH, "out_tile"));
    if (grads->bo != NULL) UPIPE_TRY(c->ops->bias_bwd(c, grads->bo, dy));
    while (upi_tile_next(c, &g->pass, &g->tile, dx)) UPIPE_TRY(upi_gated_bwd_tile(c, g, save, &to, dy, x));
    UPIPE_TRY(upipe_free(c, g->o));
    UPIPE_TRY(upipe_free(c, g->u));
    UPIPE_TRY(upi_gated_end(c, g));
    if (c->ops->attn_reads_o) save->o = save->out.data;
    save->out = to;
    return UPIPE_OK;
}

#endif

/* out.h -- sums over all heads, by tiles of rows: the output projection, and dX; delta
 *
 * final_out is stage-major. A tile's rows of all heads are put side by side in their natural order, and are one
 * product, in which each head is one partial sum. So an element's additions, and its bits, are the same for every chunk
 * and number of ranks; and a sum in f32 passes through memory once, not once a stage and rank.
 */
#ifndef UPIPE_STAGE_OUT_H
#define UPIPE_STAGE_OUT_H

/* A tile of rows and its sum, which is in f32; in place if the result is f32. */
typedef struct upi_tile {
    void *buf, *work;    /* the f32 sum, NULL where it is in place; scratch of the products. Of all tiles */
    void *heads;         /* those that lie apart, side by side */
    upipe_view out, sum; /* [n][D]: the result's rows; in f32 */
    upipe_mem_tiles at;
    int begun; /* the sum has its first term */
} upi_tile;

/* The next tile of `out`; 0 after the last. */
UPIPE_API int upi_tile_next(upipe_ctx *c, const upi_pass *f, upi_tile *t, upipe_view out)
{
    if (!upipe_mem_tiles_next(c->mem, &t->at, f->plan->rows, f->tile_rows)) return 0;
    t->begun = 0;
    t->out = upipe_view_rows(out, t->at.row, t->at.n);
    t->sum = t->buf != NULL ? upipe_view_packed(t->buf, UPIPE_F32, t->at.n, 1, out.d) : t->out;
    return 1;
}

/* tile (+)= the sum over all heads of the weight, a head at a time, of head * weight. A call brings some neighbouring ones
 * of all rows, [rows][width], from `head` on; the call that brings the last ones multiplies. */
UPIPE_API upipe_status upi_tile_add(upipe_ctx *c, const upi_pass *f, upi_tile *t, upipe_view heads, int head,
                                    upipe_view weight, int flags)
{
    const int32_t dim = (flags & UPIPE_GEMM_TRANS_B) != 0 ? weight.d : (int32_t)weight.n;
    upipe_view all = upipe_view_packed(t->heads, heads.dtype, t->at.n, weight.h, dim), to = all;
    heads = upipe_view_rows(heads, t->at.row, t->at.n);
    to.h = heads.d / dim;
    if (to.h == all.h) {
        all = upipe_view_heads(heads, all.h);
    } else {
        to.data = upipe_view_at(all, 0, head);
        UPIPE_TRY(c->ops->cast(c, to, upipe_view_heads(heads, to.h)));
        if (head + to.h < all.h) return UPIPE_OK;
    }
    if (t->begun) flags |= UPIPE_GEMM_ACCUMULATE;
    t->begun = 1;
    return c->ops->gemm(c, t->sum, all, weight, flags, t->work, f->scratch.gemm);
}

/* Columns of wo (or of its gradient) that belong to n heads from `head` on: [D][n * v_dim]. */
UPIPE_API upipe_view upi_out_columns(const upipe_plan *p, const void *wo, upipe_dtype dtype, int head, int n)
{
    const int64_t all = (int64_t)p->desc.heads * p->desc.v_dim;
    char *data = (char *)(uintptr_t)wo + (size_t)(head * p->desc.v_dim) * upipe_dtype_bytes(dtype);
    return upipe_view_make(data, dtype, p->desc.model_dim, all, 1, all, n * p->desc.v_dim);
}

/* y = O * Wo^T + bo */
UPIPE_API upipe_status upi_out_fwd(upipe_ctx *c, const upi_pass *f, upipe_view y, const upipe_slots *out)
{
    const upipe_plan *p = f->plan;
    const upipe_view wo = upi_out_columns(p, f->layer->wo, p->desc.dtype, 0, p->desc.heads);
    upi_tile tile;
    memset(&tile, 0, sizeof tile);
    UPIPE_TRY(upipe_alloc(c, &tile.buf, f->scratch.tile, UPIPE_USE_SCRATCH, "tile"));
    UPIPE_TRY(upipe_alloc(c, &tile.heads, f->scratch.heads, UPIPE_USE_SCRATCH, "tile_heads"));
    UPIPE_TRY(upipe_alloc(c, &tile.work, f->scratch.gemm, UPIPE_USE_SCRATCH, "gemm_work"));
    while (upi_tile_next(c, f, &tile, y)) {
        int head, stage, rank, n;
        for (head = 0; head < p->desc.heads; head += n) {
            n = upipe_plan_q_place(p, head, &stage, &rank).count;
            UPIPE_TRY(upi_tile_add(c, f, &tile, upipe_slots_matrix(p, out, stage, rank, p->desc.v_dim), head,
                                   upipe_view_heads(wo, p->desc.heads), UPIPE_GEMM_TRANS_B));
        }
        if (f->layer->bo != NULL) UPIPE_TRY(upipe_bias_add(c, tile.sum, f->layer->bo, 0));
        if (tile.buf != NULL) UPIPE_TRY(c->ops->cast(c, tile.out, tile.sum));
    }
    UPIPE_TRY(upipe_free(c, tile.work));
    UPIPE_TRY(upipe_free(c, tile.heads));
    return upipe_free(c, tile.buf);
}

/* delta = rowsum(dO * O) of the heads of one stage and rank.
 *   delta   f32 [rank][batch][T][n] of the stage
 *   o dout  [rows][n][v_dim] of these heads */
UPIPE_API upipe_status upi_delta(upipe_ctx *c, const upipe_plan *p, float *delta, int stage, int rank,
                                 upipe_view o, upipe_view dout)
{
    const int64_t before = upipe_plan_offset(p, UPIPE_A2A_Q, stage, rank);
    return c->ops->rowdot(c, upipe_view_packed(delta + before * p->rows, UPIPE_F32, p->rows, o.h, 1), o,
                          dout);
}

/* delta of a stage, from its O and dO in slots. */
UPIPE_API upipe_status upi_delta_stage(upipe_ctx *c, const upipe_plan *p, float *delta, int stage,
                                       const upipe_slots *out, const upipe_slots *dout)
{
    int rank;
    for (rank = 0; rank < p->desc.ranks; ++rank) {
        const int n = upipe_plan_q(p, stage, rank).count;
        if (n == 0) continue;
        UPIPE_TRY(upi_delta(c, p, delta, stage, rank,
                            upipe_view_heads(upipe_slots_matrix(p, out, stage, rank, p->desc.v_dim), n),
                            upipe_view_heads(upipe_slots_matrix(p, dout, stage, rank, p->desc.v_dim), n)));
    }
    return UPIPE_OK;
}

/* delta of all heads, while both dO and O are in slots; O is not needed afterwards, unless attention reads it. */
UPIPE_API upipe_status upi_delta_all(upipe_ctx *c, const upipe_plan *p, upipe_saved *save,
                                     const upipe_slots *dout)
{
    void *delta;
    int stage;
    UPIPE_TRY(upipe_alloc(c, &delta, p->buffers.delta, UPIPE_USE_STAT, "delta"));
    save->delta = (float *)delta;
    for (stage = 0; stage < p->stages; ++stage)
        UPIPE_TRY(upi_delta_stage(c, p, save->delta + upipe_plan_before(p, stage, -1) * p->rows, stage,
                                  &save->out, dout));
    if (c->ops->attn_reads_o)
        save->o = save->out.data;
    else
        UPIPE_TRY(upipe_free(c, save->out.data));
    save->out.data = NULL;
    return UPIPE_OK;
}

/* From dy: dWo += dy^T * O, dbo += the sums of dy, delta, and dO in O's place; in slots of its own where attention
 * reads O. */
UPIPE_API upipe_status upi_out_bwd(upipe_ctx *c, const upi_pass *f, upipe_saved *save, upipe_view dy)
{
    const upipe_plan *p = f->plan;
    const upipe_layer *l = f->layer;
    const int dim = p->desc.v_dim;
    upipe_slots to = save->out;
    void *buf, *delta;
    int stage, rank;
    UPIPE_TRY(upipe_alloc(c, &delta, p->buffers.delta, UPIPE_USE_STAT, "delta"));
    save->delta = (float *)delta;
    if (c->ops->attn_reads_o) UPIPE_TRY(upipe_slots_alloc(c, p, &to, UPIPE_SLOT_FULL, "dout"));
    UPIPE_TRY(
        upipe_alloc(c, &buf, upipe_plan_rows_bytes(p, p->per_rank, dim), UPIPE_USE_ACT_GRAD, "dout_block"));
    if (f->grads->bo != NULL) UPIPE_TRY(c->ops->bias_bwd(c, f->grads->bo, dy));
    for (stage = 0; stage < p->stages; ++stage) {
        for (rank = 0; rank < p->desc.ranks; ++rank) {
            const upipe_head_range q = upipe_plan_q(p, stage, rank);
            const upipe_view o = upipe_slots_matrix(p, &save->out, stage, rank, dim);
            const upipe_view dout = upipe_view_packed(buf, p->desc.dtype, p->rows, 1, q.count * dim);
            if (q.count == 0) continue;
            UPIPE_TRY(
                upi_gemm(c, f, dout, dy, upi_out_columns(p, l->wo, p->desc.dtype, q.first, q.count), 0));
            UPIPE_TRY(upi_delta(c, p, save->delta + upipe_plan_before(p, stage, -1) * p->rows, stage, rank,
                                upipe_view_heads(o, q.count), upipe_view_heads(dout, q.count)));
            if (f->grads->wo != NULL)
                UPIPE_TRY(upi_gemm(c, f, upi_out_columns(p, f->grads->wo, UPIPE_F32, q.first, q.count), dy, o,
                                   UPIPE_GEMM_TRANS_A | UPIPE_GEMM_ACCUMULATE));
            UPIPE_TRY(c->ops->copy(c, upipe_slots_matrix(p, &to, stage, rank, dim).data, buf,
                                   upipe_plan_rows_bytes(p, q.count, dim)));
        }
    }
    UPIPE_TRY(upipe_free(c, buf));
    if (c->ops->attn_reads_o) save->o = save->out.data;
    save->out = to;
    return UPIPE_OK;
}

/* dX = dQ * Wq + dK * Wk + dV * Wv; without weights of K and V, which then are not of x, the first alone */
UPIPE_API upipe_status upi_grad_x(upipe_ctx *c, const upi_pass *f, upipe_view dx, const upipe_slots *dq)
{
    const upipe_plan *p = f->plan;
    const upipe_dtype type = p->desc.dtype;
    const upi_head_run q = upi_head_run_make(p->desc.heads, 1, 0, 1),
                       kv = upi_head_run_make(p->desc.kv_heads, 1, 0, 1);
    upi_tile tile;
    memset(&tile, 0, sizeof tile);
    UPIPE_TRY(upipe_alloc(c, &tile.buf, f->scratch.tile, UPIPE_USE_SCRATCH, "tile"));
    UPIPE_TRY(upipe_alloc(c, &tile.heads, f->scratch.heads, UPIPE_USE_SCRATCH, "tile_heads"));
    UPIPE_TRY(upipe_alloc(c, &tile.work, f->scratch.gemm, UPIPE_USE_SCRATCH, "gemm_work"));
    while (upi_tile_next(c, f, &tile, dx)) {
        int head, stage, rank, n, which;
        for (head = 0; head < p->desc.heads; head += n) {
            n = upipe_plan_q_place(p, head, &stage, &rank).count;
            UPIPE_TRY(upi_tile_add(c, f, &tile, upipe_slots_matrix(p, dq, stage, rank, p->desc.head_dim),
                                   head, upi_weight_rows(f, f->w[UPI_PROJ_Q], type, q, UPI_PROJ_Q), 0));
        }
        for (which = UPI_PROJ_K; which <= UPI_PROJ_V; ++which) {
            upipe_view w;
            if (f->w[which] == NULL) continue;
            w = upi_weight_rows(f, f->w[which], type, kv, (upi_proj)which);
            for (head = 0; head < p->desc.kv_heads; head += n) {
                const upipe_view grads = upi_kv_grad_matrix(c, f, head, (upi_proj)which);
                n = grads.d / f->dim[which];
                UPIPE_TRY(upi_tile_add(c, f, &tile, grads, head, w, 0));
            }
        }
        if (tile.buf != NULL) UPIPE_TRY(c->ops->cast(c, tile.out, tile.sum));
    }
    UPIPE_TRY(upipe_free(c, tile.work));
    UPIPE_TRY(upipe_free(c, tile.heads));
    return upipe_free(c, tile.buf);
}

#endif

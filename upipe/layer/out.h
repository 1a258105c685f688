/* out.h -- sums over all heads, by tiles of rows: the output projection, and dX        part of upipe_layer.h
 *
 * final_out is stage-major. Its heads are added to a tile of rows in their natural order, one partial sum a
 * head. So an element's additions, and its bits, are the same for every chunk and number of ranks.
 */
#ifndef UPIPE_LAYER_H
#include "../upipe_layer.h"
#elif !defined(UPIPE_LAYER_OUT_H)
#define UPIPE_LAYER_OUT_H

#include "kv_grad.h"

/* A tile of rows and its sum, which is in f32; in place if the result is f32. */
typedef struct upi_tile {
    void *buf, *work; /* the f32 sum, NULL where it is in place; scratch of the products. Of all tiles */
    upipe_view sum;   /* [n][D], f32 */
    int64_t row, n;
    int begun; /* the sum has its first term */
} upi_tile;

UPIPE_API void upi_tile_begin(const upi_run *r, upi_tile *t, upipe_view out, int64_t row)
{
    int64_t rows = upi_tile_rows(r->l), left = r->p->rows - row;
    t->row = row;
    t->n = left < rows ? left : rows;
    t->begun = 0;
    t->sum = t->buf != NULL ? upipe_view_packed(t->buf, UPIPE_F32, t->n, 1, out.d)
                            : upipe_view_rows(out, row, t->n);
}

/* tile (+)= the sum over heads of head * weight, where heads [rows][width] are some neighbouring heads of all
 * rows. A head at a time: how many one call has then changes no bit. */
UPIPE_API upipe_status upi_tile_add(upipe_ctx *c, const upi_run *r, upi_tile *t, upipe_view heads,
                                    upipe_view weight, int flags)
{
    if (t->begun) flags |= UPIPE_GEMM_ACCUMULATE;
    t->begun = 1;
    heads = upipe_view_heads(upipe_view_rows(heads, t->row, t->n), weight.h);
    return c->ops->gemm(c, t->sum, heads, weight, flags, t->work, r->scratch.gemm);
}

/* Columns of wo (or of its gradient) that belong to n heads from `head` on: [D][n * v_dim]. */
UPIPE_API upipe_view upi_out_columns(const upipe_plan *p, const void *wo, upipe_dtype dtype, int head, int n)
{
    const int64_t all = (int64_t)p->desc.heads * p->desc.v_dim;
    char *data = (char *)(uintptr_t)wo + (size_t)(head * p->desc.v_dim) * upipe_dtype_bytes(dtype);
    return upipe_view_make(data, dtype, p->desc.model_dim, all, 1, all, n * p->desc.v_dim);
}

/* y = O * Wo^T + bo */
UPIPE_API upipe_status upi_out_fwd(upipe_ctx *c, const upi_run *r, upipe_view y, const upipe_saved *save)
{
    const upipe_plan *p = r->p;
    upi_tile tile;
    int64_t row;
    UPIPE_TRY(upipe_alloc(c, &tile.buf, r->scratch.tile, "tile"));
    UPIPE_TRY(upipe_alloc(c, &tile.work, r->scratch.gemm, "gemm_work"));
    for (row = 0; row < p->rows; row += upi_tile_rows(r->l)) {
        int head, stage, rank, n;
        upi_tile_begin(r, &tile, y, row);
        for (head = 0; head < p->desc.heads; head += n) {
            n = upipe_plan_q_place(p, head, &stage, &rank).count;
            UPIPE_TRY(upi_tile_add(c, r, &tile, upipe_slots_matrix(p, &save->out, stage, rank, p->desc.v_dim),
                                   upipe_view_heads(upi_out_columns(p, r->l->wo, p->desc.dtype, head, n), n),
                                   UPIPE_GEMM_TRANS_B));
        }
        if (r->l->bo != NULL) UPIPE_TRY(upipe_bias_add(c, tile.sum, r->l->bo, 0));
        if (tile.buf != NULL) UPIPE_TRY(c->ops->cast(c, upipe_view_rows(y, row, tile.n), tile.sum));
    }
    UPIPE_TRY(upipe_free(c, tile.work));
    return upipe_free(c, tile.buf);
}

/* delta = rowsum(dO * O) of the heads of one stage and rank: [rows][n]. */
UPIPE_API upipe_status upi_delta(upipe_ctx *c, const upi_run *r, upipe_saved *save, int stage, int rank,
                                 upipe_view dout)
{
    const upipe_plan *p = r->p;
    const int32_t n = upipe_plan_q(p, stage, rank).count, d = p->desc.v_dim;
    upipe_view o = upipe_slots_matrix(p, &save->out, stage, rank, d);
    int64_t before = upipe_plan_before(p, stage, -1) + upipe_plan_offset(p, UPIPE_A2A_Q, stage, rank);
    if (n == 0) return UPIPE_OK;
    return c->ops->rowdot(c, upipe_view_packed(save->delta + before * p->rows, UPIPE_F32, p->rows, n, 1),
                          upipe_view_packed(o.data, p->desc.dtype, p->rows, n, d),
                          upipe_view_packed(dout.data, p->desc.dtype, p->rows, n, d));
}

/* delta of all heads, while both dO and O are in slots; O is not needed afterwards. */
UPIPE_API upipe_status upi_delta_all(upipe_ctx *c, const upi_run *r, upipe_saved *save,
                                     const upipe_slots *dout)
{
    void *delta;
    int stage, rank;
    UPIPE_TRY(upipe_alloc(c, &delta, r->buffers.delta, "delta"));
    save->delta = (float *)delta;
    for (stage = 0; stage < r->p->stages; ++stage)
        for (rank = 0; rank < r->p->desc.ranks; ++rank)
            UPIPE_TRY(upi_delta(c, r, save, stage, rank,
                                upipe_slots_matrix(r->p, dout, stage, rank, r->p->desc.v_dim)));
    UPIPE_TRY(upipe_free(c, save->out.data));
    save->out.data = NULL;
    return UPIPE_OK;
}

/* From dy: dWo += dy^T * O, dbo += the sums of dy, delta, and dO in O's place. */
UPIPE_API upipe_status upi_out_bwd(upipe_ctx *c, const upi_run *r, upipe_saved *save, upipe_view dy)
{
    const upipe_plan *p = r->p;
    const upipe_grads *g = r->grads;
    void *buf;
    void *delta;
    int stage, rank;
    UPIPE_TRY(upipe_alloc(c, &delta, r->buffers.delta, "delta"));
    save->delta = (float *)delta;
    UPIPE_TRY(upipe_alloc(c, &buf, upipe_plan_rows_bytes(p, p->per_rank, p->desc.v_dim), "dout_block"));
    if (g->bo != NULL) UPIPE_TRY(c->ops->bias_bwd(c, g->bo, dy));
    for (stage = 0; stage < p->stages; ++stage) {
        for (rank = 0; rank < p->desc.ranks; ++rank) {
            const upipe_span q = upipe_plan_q(p, stage, rank);
            upipe_view o = upipe_slots_matrix(p, &save->out, stage, rank, p->desc.v_dim), dout = o;
            if (q.count == 0) continue;
            dout.data = buf;
            UPIPE_TRY(
                upi_gemm(c, r, dout, dy, upi_out_columns(p, r->l->wo, p->desc.dtype, q.first, q.count), 0));
            UPIPE_TRY(upi_delta(c, r, save, stage, rank, dout));
            if (g->wo != NULL)
                UPIPE_TRY(upi_gemm_grad(c, r, upi_out_columns(p, g->wo, r->l->grad_dtype, q.first, q.count),
                                        dy, o));
            UPIPE_TRY(c->ops->copy(c, o.data, buf, upipe_plan_rows_bytes(p, q.count, p->desc.v_dim)));
        }
    }
    return upipe_free(c, buf);
}

/* dX = dQ * Wq + dK * Wk + dV * Wv */
UPIPE_API upipe_status upi_grad_x(upipe_ctx *c, const upi_run *r, upipe_view dx, const upipe_slots *dq,
                                  const upi_kv_grad *dkv)
{
    const upipe_plan *p = r->p;
    const upipe_dtype type = p->desc.dtype;
    upi_tile tile;
    int64_t row;
    UPIPE_TRY(upipe_alloc(c, &tile.buf, r->scratch.tile, "tile"));
    UPIPE_TRY(upipe_alloc(c, &tile.work, r->scratch.gemm, "gemm_work"));
    for (row = 0; row < p->rows; row += upi_tile_rows(r->l)) {
        int head, stage, rank, n, which;
        upi_tile_begin(r, &tile, dx, row);
        for (head = 0; head < p->desc.heads; head += n) {
            n = upipe_plan_q_place(p, head, &stage, &rank).count;
            UPIPE_TRY(upi_tile_add(
                c, r, &tile, upipe_slots_matrix(p, dq, stage, rank, p->desc.head_dim),
                upi_weight_rows(p, r->w[UPI_PROJ_Q], type, upipe_head_run_make(n, 1, head, 1), UPI_PROJ_Q),
                0));
        }
        for (which = UPI_PROJ_K; which <= UPI_PROJ_V; ++which) {
            for (head = 0; head < p->desc.kv_heads; head += n) {
                n = p->kv_grads_partial ? 1 : p->kv_per_rank;
                UPIPE_TRY(upi_tile_add(c, r, &tile, upi_kv_grad_matrix(p, dkv, head, (upi_proj)which),
                                       upi_weight_rows(p, r->w[which], type,
                                                       upipe_head_run_make(n, 1, head, 1), (upi_proj)which),
                                       0));
            }
        }
        if (tile.buf != NULL) UPIPE_TRY(c->ops->cast(c, upipe_view_rows(dx, row, tile.n), tile.sum));
    }
    UPIPE_TRY(upipe_free(c, tile.work));
    return upipe_free(c, tile.buf);
}

#endif

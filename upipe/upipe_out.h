/* upipe_out.h -- the output projection over slots of final_out, forward and backward        layer 7
 *
 *     upipe_layer_fwd(&ctx, &layer, &saved, x);
 *     upipe_layer_out_fwd(&ctx, &layer, y, &saved);                          y = O * Wo^T
 *     ...
 *     upipe_layer_out_bwd(&ctx, &layer, &grads, &saved, dy);                 O becomes dO, in place
 *     upipe_layer_bwd(&ctx, &layer, dx, &grads, &saved, &saved.out, x);
 *     upipe_saved_free(&ctx, &saved);                                        the slots, which hold dQ now
 *
 * The projection needs all heads of a row, and final_out holds them stage-major: heads are added to a tile of
 * rows in their natural order, so y has the same bits for every chunk and for every number of ranks.
 */
#ifndef UPIPE_OUT_H
#define UPIPE_OUT_H

#include "upipe_step.h"

/* Columns of wo (or of its gradient) that belong to n heads from `head` on: [D][n * v_dim]. */
UPIPE_API upipe_view upi_out_columns(const upipe_plan *p, void *wo, upipe_dtype dtype, int head, int n)
{
    const int64_t all = upi_out_width(p);
    char *data = (char *)wo + (size_t)head * (size_t)p->desc.v_dim * upipe_dtype_bytes(dtype);
    return upipe_view_make(data, dtype, p->desc.model_dim, all, 1, all, n * p->desc.v_dim);
}

UPIPE_API upipe_status upi_out_check(upipe_ctx *c, const upipe_layer *l, upipe_view y,
                                     const upipe_saved *save)
{
    if (l->wo == NULL) return upipe_fail(&c->err, UPIPE_ERR_ARG, "wo is NULL");
    UPIPE_TRY(upi_slots_check(c, l, &save->out, "final_out"));
    if (save->lse == NULL || save->delta != NULL)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "final_out is consumed already: its slots hold a gradient");
    if (y.n != l->plan->rows || y.h != 1 || y.d != l->plan->desc.model_dim || y.dtype != l->plan->desc.dtype)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "y is %s [%lld][%d][%d], the plan says %s [%lld][1][%lld]",
                        upipe_dtype_name(y.dtype), (long long)y.n, y.h, y.d,
                        upipe_dtype_name(l->plan->desc.dtype), (long long)l->plan->rows,
                        (long long)l->plan->desc.model_dim);
    return UPIPE_OK;
}

UPIPE_API upi_run upi_out_run(upipe_ctx *c, const upipe_layer *l)
{
    upi_run r;
    memset(&r, 0, sizeof r);
    r.c = c;
    r.l = l;
    r.p = l->plan;
    upi_run_sizes(&r);
    return r;
}

/* Bytes of the largest block of O of one stage and rank. */
UPIPE_API size_t upi_out_block(const upipe_plan *p)
{
    return upipe_plan_rows_bytes(p, p->per_rank, p->desc.v_dim);
}

/* upipe_layer_out_bytes -- what upipe_layer_out_fwd or, with backward, upipe_layer_out_bwd takes from the
 *                          pool, exactly; of that, delta (rows * heads * 4 bytes) stays after the backward
 *   scratch  from upipe_layer_scratch, for a layer with wo
 */
UPIPE_API size_t upipe_layer_out_bytes(const upipe_plan *p, const upipe_plan_scratch *scratch, int backward)
{
    if (!backward) return (size_t)(scratch->tile_rows * p->desc.model_dim) * 4 + scratch->gemm;
    return (size_t)(p->rows * p->desc.heads) * 4 + upi_out_block(p) + scratch->gemm;
}

UPIPE_API upipe_status upi_layer_out_fwd(upi_run *r, upipe_view y, const upipe_saved *save)
{
    const upipe_plan *p = r->p;
    void *buf;
    int64_t row;
    UPIPE_TRY(upi_alloc(r, &buf, upi_tile_buf(r), "tile"));
    for (row = 0; row < p->rows; row += upi_tile_rows(r->l)) {
        upi_tile tile = upi_tile_at(r, y, buf, row);
        int head, stage, rank, n;
        for (head = 0; head < p->desc.heads; head += n) {
            n = upipe_plan_q_place(p, head, &stage, &rank).count;
            UPIPE_TRY(upi_tile_add(r, &tile, upi_slot_matrix(p, &save->out, stage, rank, p->desc.v_dim),
                                   upi_out_columns(p, (void *)(uintptr_t)r->l->wo, p->desc.dtype, head, n),
                                   UPIPE_GEMM_TRANS_B));
        }
        UPIPE_TRY(upi_tile_store(r, &tile, y, buf));
    }
    return upi_free(r, buf);
}

/* upipe_layer_out_fwd -- y = O * Wo^T, no exchange
 *   y       [rows][1][D] view, the plan's type, written
 *   bytes   takes one tile in f32 (none for f32 storage) and the scratch of a product
 *   errors  ARG, MEMORY; the team is then aborted
 */
UPIPE_API upipe_status upipe_layer_out_fwd(upipe_ctx *c, const upipe_layer *l, upipe_view y,
                                           const upipe_saved *save)
{
    int64_t mark = upipe_mem_mark(c->mem);
    upi_run run = upi_out_run(c, l);
    upipe_status s = upi_out_check(c, l, y, save);
    if (s == UPIPE_OK) s = upi_layer_out_fwd(&run, y, save);
    return s == UPIPE_OK ? UPIPE_OK : upipe_unwind(c, s, mark);
}

UPIPE_API upipe_status upi_layer_out_bwd(upi_run *r, upipe_grads *g, upipe_saved *save, upipe_view dy)
{
    const upipe_plan *p = r->p;
    void *buf;
    int stage, rank;
    UPIPE_TRY(upi_alloc_delta(r, save));
    UPIPE_TRY(upi_alloc(r, &buf, upi_out_block(p), "dout_block"));
    for (stage = 0; stage < p->stages; ++stage) {
        for (rank = 0; rank < p->desc.ranks; ++rank) {
            const upipe_span q = upipe_plan_q(p, stage, rank);
            upipe_view o = upi_slot_matrix(p, &save->out, stage, rank, p->desc.v_dim), dout = o;
            if (q.count == 0) continue;
            dout.data = buf;
            UPIPE_TRY(upi_gemm(
                r, dout, dy, upi_out_columns(p, (void *)(uintptr_t)r->l->wo, p->desc.dtype, q.first, q.count),
                0));
            UPIPE_TRY(upi_delta(r, save, stage, rank, dout));
            if (g->wo != NULL)
                UPIPE_TRY(upi_gemm(r, upi_out_columns(p, g->wo, UPIPE_F32, q.first, q.count), dy, o,
                                   UPIPE_GEMM_TRANS_A | UPIPE_GEMM_ACCUMULATE));
            UPIPE_TRY(r->c->ops->copy(r->c, o.data, buf, upipe_plan_rows_bytes(p, q.count, p->desc.v_dim)));
        }
    }
    return upi_free(r, buf);
}

/* upipe_layer_out_bwd -- from the gradient of y: dWo, delta, and the gradient of O in O's place
 *   grads   wo += dy^T * O
 *   save    consumes out: its slots hold the gradient of O afterwards; delta is taken from the pool
 *   dy      [rows][1][D] view, the plan's type; may be given back afterwards
 *   bytes   takes delta (rows * H * 4), one stage and rank's block of O, and the scratch of a product
 *   errors  ARG, MEMORY; the team is then aborted, and save is good for upipe_saved_free alone
 */
UPIPE_API upipe_status upipe_layer_out_bwd(upipe_ctx *c, const upipe_layer *l, upipe_grads *grads,
                                           upipe_saved *save, upipe_view dy)
{
    int64_t mark = upipe_mem_mark(c->mem);
    float *delta = save->delta;
    upi_run run = upi_out_run(c, l);
    upipe_status s = upi_out_check(c, l, dy, save);
    if (s == UPIPE_OK) s = upi_layer_out_bwd(&run, grads, save, dy);
    if (s == UPIPE_OK) return UPIPE_OK;
    if (delta == NULL) save->delta = NULL; /* taken after the mark: the pool has it back */
    return upipe_unwind(c, s, mark);
}

#endif

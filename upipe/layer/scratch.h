/* scratch.h -- scratch of the block: one size for all of its products, one for each attention kernel
 *                                                                                 part of upipe_layer.h
 */
#ifndef UPIPE_LAYER_H
#include "../upipe_layer.h"
#elif !defined(UPIPE_LAYER_SCRATCH_H)
#define UPIPE_LAYER_SCRATCH_H

/* Bytes: scratch as the compute table asks for it, and the f32 sum of a tile (0 where y and dX are summed in
 * place). dq_sum: of dQ' in f32, to which attention adds instead of asking for scratch; 0 where it does not. */
typedef struct upi_scratch {
    size_t gemm, attn_fwd, attn_bwd, tile, dq_sum;
} upi_scratch;

typedef enum upi_proj { UPI_PROJ_Q, UPI_PROJ_K, UPI_PROJ_V } upi_proj;

/* Elements of a head. */
UPIPE_API int upi_dim(const upipe_plan *p, upi_proj which)
{
    return which == UPI_PROJ_V ? p->desc.v_dim : p->desc.head_dim;
}

/* The rows of a weight that make these heads, as a batch of matrices [each * dim][D]. */
UPIPE_API upipe_view upi_weight_rows(const upipe_plan *p, const void *w, upipe_dtype dtype, upipe_head_run h,
                                     upi_proj which)
{
    int64_t dim = p->desc.model_dim, head = upi_dim(p, which) * dim;
    void *at = (char *)(uintptr_t)w + (size_t)(h.first * head) * upipe_dtype_bytes(dtype);
    return upipe_view_make(at, dtype, (int64_t)h.each * upi_dim(p, which), dim, h.blocks, h.step * head,
                           (int32_t)dim);
}

/* Rows of a tile of y and dX. */
UPIPE_API int64_t upi_tile_rows(const upipe_layer *l)
{
    int64_t rows = l->tile_rows > 0 ? l->tile_rows : (int64_t)UPIPE_TILE_ROWS;
    return rows < l->plan->rows ? rows : l->plan->rows;
}

/* The largest scratch of a weight's products: with x, for its gradient, and with a tile for dX. */
UPIPE_API size_t upi_product_scratch(const upipe_ops *ops, const upipe_layer *l, upi_proj which,
                                     upipe_head_run h)
{
    const upipe_plan *p = l->plan;
    const upipe_dtype t = p->desc.dtype;
    const int by_tokens =
        l->grad_dtype == UPIPE_F32 ? UPIPE_GEMM_TRANS_A | UPIPE_GEMM_ACCUMULATE : UPIPE_GEMM_TRANS_A;
    const int32_t model = (int32_t)p->desc.model_dim, columns = h.each * upi_dim(p, which);
    float none[1];
    upipe_view x = upipe_view_packed(NULL, t, p->rows, 1, model), block, grad, w, cols, sum;
    size_t most;
    h.at = h.first = 0;
    block = upipe_head_run_matrix(p, NULL, h, upi_dim(p, which));
    grad = upi_weight_rows(p, none, UPIPE_F32, h, which);
    w = upi_weight_rows(p, none, t, h, which);
    cols = upipe_view_packed(NULL, t, upi_tile_rows(l), 1, columns);
    sum = upipe_view_packed(NULL, UPIPE_F32, upi_tile_rows(l), 1, model);
    most = ops->gemm_bytes(ops, block, x, w, UPIPE_GEMM_TRANS_B);
    most = upipe_max_bytes(most, ops->gemm_bytes(ops, grad, block, x, by_tokens));
    w = upi_weight_rows(p, none, t, upipe_head_run_make(h.each, 1, 0, 1), which);
    cols = upipe_view_heads(cols, h.each);
    most = upipe_max_bytes(most, ops->gemm_bytes(ops, sum, cols, w, 0));
    return upipe_max_bytes(most, ops->gemm_bytes(ops, sum, cols, w, UPIPE_GEMM_ACCUMULATE));
}

/* The largest scratch of the output projection's products with the heads of one stage and rank. */
UPIPE_API size_t upi_out_scratch(const upipe_ops *ops, const upipe_layer *l, int heads)
{
    const upipe_plan *p = l->plan;
    const upipe_dtype t = p->desc.dtype;
    const int by_tokens =
        l->grad_dtype == UPIPE_F32 ? UPIPE_GEMM_TRANS_A | UPIPE_GEMM_ACCUMULATE : UPIPE_GEMM_TRANS_A;
    const int32_t model = (int32_t)p->desc.model_dim, columns = heads * p->desc.v_dim,
                  width = p->desc.heads * p->desc.v_dim;
    upipe_view x = upipe_view_packed(NULL, t, p->rows, 1, model);
    upipe_view wo = upipe_view_make(NULL, t, model, width, 1, columns, columns);
    upipe_view block = upipe_view_packed(NULL, t, p->rows, 1, columns);
    upipe_view grad = upipe_view_make(NULL, UPIPE_F32, model, width, 1, columns, columns);
    upipe_view sum = upipe_view_packed(NULL, UPIPE_F32, upi_tile_rows(l), 1, model);
    upipe_view cols = upipe_view_packed(NULL, t, upi_tile_rows(l), heads, p->desc.v_dim);
    upipe_view by_head = upipe_view_heads(wo, heads);
    size_t most = ops->gemm_bytes(ops, sum, cols, by_head, UPIPE_GEMM_TRANS_B);
    most = upipe_max_bytes(
        most, ops->gemm_bytes(ops, sum, cols, by_head, UPIPE_GEMM_TRANS_B | UPIPE_GEMM_ACCUMULATE));
    most = upipe_max_bytes(most, ops->gemm_bytes(ops, block, x, wo, 0));
    return upipe_max_bytes(most, ops->gemm_bytes(ops, grad, x, block, by_tokens));
}

/* A compute table may sum dQ' in f32 scratch. It adds to a sum in the send buffer instead, which is cast into
 * the place of dO' afterwards, where the scratch that this saves is more than what the send buffer grows by.
 *   merge   as in upi_ring_scratch
 */
UPIPE_API upi_scratch upi_layer_scratch(const upipe_ops *ops, const upipe_layer *l, int merge)
{
    const upipe_plan *p = l->plan;
    const upipe_head_run all_kv = upipe_head_run_all_kv(p);
    const upipe_buffers b = upipe_plan_buffers(p);
    const size_t dq_sum = b.q / upipe_dtype_bytes(p->desc.dtype) * 4;
    size_t adding = 0;
    upi_scratch s;
    upipe_head_run h;
    int stage, rank;
    memset(&s, 0, sizeof s);
    for (stage = 0; stage < p->stages; ++stage) {
        for (rank = 0; upipe_head_run_next(p, UPIPE_A2A_Q, stage, &rank, &h);) {
            s.gemm = upipe_max_bytes(s.gemm, upi_product_scratch(ops, l, UPI_PROJ_Q, h));
            if (l->wo != NULL) s.gemm = upipe_max_bytes(s.gemm, upi_out_scratch(ops, l, h.each));
        }
        for (rank = 0; upipe_head_run_next(p, UPIPE_A2A_KV, stage, &rank, &h);) {
            s.gemm = upipe_max_bytes(s.gemm, upi_product_scratch(ops, l, UPI_PROJ_K, h));
            s.gemm = upipe_max_bytes(s.gemm, upi_product_scratch(ops, l, UPI_PROJ_V, h));
        }
        s.attn_fwd =
            upipe_max_bytes(s.attn_fwd, upi_ring_scratch(ops, p, &l->mask, l->scale, stage, merge, 0));
        s.attn_bwd =
            upipe_max_bytes(s.attn_bwd, upi_ring_scratch(ops, p, &l->mask, l->scale, stage, merge, 1));
        adding = upipe_max_bytes(adding, upi_ring_scratch(ops, p, &l->mask, l->scale, stage, 1, 1));
    }
    if (p->kv_grads_accumulate) { /* all heads of K, then of V, are complete at once */
        s.gemm = upipe_max_bytes(s.gemm, upi_product_scratch(ops, l, UPI_PROJ_K, all_kv));
        s.gemm = upipe_max_bytes(s.gemm, upi_product_scratch(ops, l, UPI_PROJ_V, all_kv));
    }
    if (!merge && p->desc.dtype != UPIPE_F32 && !p->overlap && b.o >= b.q &&
        (ops->attn_can & UPIPE_ATTN_ADD_DQ) != 0 &&
        upipe_max_bytes(b.send, dq_sum) + adding < b.send + s.attn_bwd) {
        s.attn_bwd = adding;
        s.dq_sum = dq_sum;
    }
    if (p->desc.dtype != UPIPE_F32) s.tile = (size_t)(upi_tile_rows(l) * p->desc.model_dim) * 4;
    return s;
}

#endif

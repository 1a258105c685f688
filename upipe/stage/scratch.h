/* scratch.h -- the block's products and the scratch of all its calls */
#ifndef UPIPE_STAGE_SCRATCH_H
#define UPIPE_STAGE_SCRATCH_H

/* The rows of a weight that make these heads, as a batch of matrices [each * dim][D]. */
UPIPE_API upipe_view upi_weight_rows(const upi_pass *f, const void *w, upipe_dtype dtype, upi_head_run h,
                                     upi_proj which)
{
    int64_t dim = f->in_dim, head = f->dim[which] * dim;
    void *at = (char *)(uintptr_t)w + (size_t)(h.first * head) * upipe_dtype_bytes(dtype);
    return upipe_view_make(at, dtype, (int64_t)h.heads * f->dim[which], dim, h.blocks, h.stride * head,
                           (int32_t)dim);
}

/* The largest scratch of a weight's products: with x, for its gradient, and of all heads with a tile for dX. */
UPIPE_API size_t upi_product_scratch(const upipe_ops *ops, const upi_pass *f, upi_proj which, upi_head_run h)
{
    const upipe_plan *p = f->plan;
    const upipe_dtype t = p->desc.dtype;
    const int by_tokens = UPIPE_GEMM_TRANS_A | UPIPE_GEMM_ACCUMULATE;
    const int32_t in = (int32_t)f->in_dim;
    const int all = which == UPI_PROJ_Q ? p->desc.heads : p->desc.kv_heads;
    float none[1];
    upipe_view x = upipe_view_packed(NULL, t, p->rows, 1, in), block, grad, w, cols, sum;
    size_t most;
    h.offset = h.first = 0;
    block = upi_head_run_matrix(p, NULL, h, f->dim[which]);
    grad = upi_weight_rows(f, none, UPIPE_F32, h, which);
    w = upi_weight_rows(f, none, t, h, which);
    cols = upipe_view_packed(NULL, t, f->tile_rows, all, f->dim[which]);
    sum = upipe_view_packed(NULL, UPIPE_F32, f->tile_rows, 1, in);
    most = ops->gemm_bytes(ops, block, x, w, UPIPE_GEMM_TRANS_B);
    most = upipe_max_bytes(most, ops->gemm_bytes(ops, grad, block, x, by_tokens));
    w = upi_weight_rows(f, none, t, upi_head_run_make(all, 1, 0, 1), which);
    most = upipe_max_bytes(most, ops->gemm_bytes(ops, sum, cols, w, 0));
    return upipe_max_bytes(most, ops->gemm_bytes(ops, sum, cols, w, UPIPE_GEMM_ACCUMULATE));
}

/* The largest scratch of the output projection's products with the heads of one stage and rank, and of a tile's with all. */
UPIPE_API size_t upi_out_scratch(const upipe_ops *ops, const upi_pass *f, int heads)
{
    const upipe_plan *p = f->plan;
    const upipe_dtype t = p->desc.dtype;
    const int by_tokens = UPIPE_GEMM_TRANS_A | UPIPE_GEMM_ACCUMULATE;
    const int32_t model = (int32_t)p->desc.model_dim, columns = heads * p->desc.v_dim,
                  width = p->desc.heads * p->desc.v_dim;
    upipe_view x = upipe_view_packed(NULL, t, p->rows, 1, model);
    upipe_view wo = upipe_view_make(NULL, t, model, width, 1, columns, columns);
    upipe_view block = upipe_view_packed(NULL, t, p->rows, 1, columns);
    upipe_view grad = upipe_view_make(NULL, UPIPE_F32, model, width, 1, columns, columns);
    upipe_view sum = upipe_view_packed(NULL, UPIPE_F32, f->tile_rows, 1, model);
    upipe_view all = upipe_view_packed(NULL, t, f->tile_rows, p->desc.heads, p->desc.v_dim);
    upipe_view by_head = upipe_view_heads(upipe_view_packed(NULL, t, model, 1, width), p->desc.heads);
    size_t most = ops->gemm_bytes(ops, sum, all, by_head, UPIPE_GEMM_TRANS_B);
    most = upipe_max_bytes(most, ops->gemm_bytes(ops, block, x, wo, 0));
    return upipe_max_bytes(most, ops->gemm_bytes(ops, grad, x, block, by_tokens));
}

/* Scratch of the pass, no less than f->scratch has: one size for all products, one for each attention kernel. A compute
 * table may sum dQ' in f32 scratch of its own. Where that takes more bytes than a send buffer of f32 has over one of
 * the storage type, dQ' is summed in the send buffer, and cast into the place of dO' afterwards.
 *   merge   1: a row attends its keys in several calls, as in a ring and in segments
 */
UPIPE_API void upi_scratch_add(const upipe_ops *ops, upi_pass *f, int merge)
{
    const upipe_plan *p = f->plan;
    const upipe_layer *l = f->layer;
    const upipe_buffers *b = &p->buffers;
    const size_t dq_sum = b->q / upipe_dtype_bytes(p->desc.dtype) * 4;
    upi_scratch s = f->scratch;
    size_t adding = 0;
    upi_head_run h;
    int stage, rank;
    if (p->kv_grads_accumulate) { /* all heads of K, then of V, are complete at once */
        h = upi_head_run_all_kv(p);
        s.gemm = upipe_max_bytes(s.gemm, upi_product_scratch(ops, f, UPI_PROJ_K, h));
        s.gemm = upipe_max_bytes(s.gemm, upi_product_scratch(ops, f, UPI_PROJ_V, h));
    }
    for (stage = 0; stage < p->stages; ++stage) {
        for (rank = 0; upi_head_run_next(p, UPIPE_A2A_Q, stage, &rank, &h);) {
            s.gemm = upipe_max_bytes(s.gemm, upi_product_scratch(ops, f, UPI_PROJ_Q, h));
            if (l->wo != NULL) s.gemm = upipe_max_bytes(s.gemm, upi_out_scratch(ops, f, h.heads));
        }
        for (rank = 0; upi_head_run_next(p, UPIPE_A2A_KV, stage, &rank, &h);) {
            s.gemm = upipe_max_bytes(s.gemm, upi_product_scratch(ops, f, UPI_PROJ_K, h));
            s.gemm = upipe_max_bytes(s.gemm, upi_product_scratch(ops, f, UPI_PROJ_V, h));
        }
        s.attn_fwd =
            upipe_max_bytes(s.attn_fwd, upipe_attend_bytes(ops, p, &l->mask, l->scale, stage, merge, 0));
        s.attn_bwd =
            upipe_max_bytes(s.attn_bwd, upipe_attend_bytes(ops, p, &l->mask, l->scale, stage, merge, 1));
        adding = upipe_max_bytes(adding, upipe_attend_bytes(ops, p, &l->mask, l->scale, stage, 1, 1));
    }
    if (!merge && p->desc.dtype != UPIPE_F32 && !p->overlap && b->o >= b->q &&
        (ops->attn_can & UPIPE_ATTN_ADD_DQ) != 0 &&
        upipe_max_bytes(b->send, dq_sum) + adding < b->send + s.attn_bwd) {
        s.attn_bwd = adding;
        s.dq_sum = dq_sum;
    }
    if (p->desc.dtype != UPIPE_F32) s.tile = upipe_max_bytes(s.tile, (size_t)(f->tile_rows * f->in_dim) * 4);
    if (p->desc.ranks > 1 || p->stages > 1 || (p->kv_grads_partial && p->desc.kv_heads > 1))
        s.heads = upipe_max_bytes(
            s.heads, (size_t)f->tile_rows * upipe_max_bytes((size_t)p->desc.head_dim, (size_t)p->desc.v_dim) *
                         (size_t)p->desc.heads * upipe_dtype_bytes(p->desc.dtype));
    f->scratch = s;
}

/* ---- products ---- */

UPIPE_API upipe_status upi_gemm(upipe_ctx *c, const upi_pass *f, upipe_view out, upipe_view a, upipe_view b,
                                int flags)
{
    void *work;
    UPIPE_TRY(upipe_alloc(c, &work, f->scratch.gemm, UPIPE_USE_SCRATCH, "gemm_work"));
    UPIPE_TRY(c->ops->gemm(c, out, a, b, flags, work, f->scratch.gemm));
    return upipe_free(c, work);
}

#endif

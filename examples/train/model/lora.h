/* lora.h -- adapters of low rank over frozen matrices: W + s * B * A, s = alpha / rank
 *
 *     model_lora_merge(r, unit);                 behind the unit's weights: its adapted matrices, whole
 *     model_lora_grads_begin(r, unit);           zeros for the gradients of these
 *     model_lora_grads_end(r, unit);             become those of A and B, before the unit's are summed over ranks
 *
 * A unit's adapted matrices are computed when its weights begin, and everything else reads them as it would read W: so
 * adapters work in every method, on every table. Their gradients are one unit's at a time, G of [out][in] in f32:
 *
 *     dB += s * G * A^T,    dA += s * B^T * G
 *
 * Both are linear in G, so ranks sum adapters alone. The alternative, two small products beside each product with W,
 * would save the product for G, and the blocks of one unit; it would be a second path through each stage and tile.
 */
#ifndef LLAMA_LORA_H
#define LLAMA_LORA_H

#include "model.h"

enum { LLAMA_LORA_ROWS = 1024 }; /* of a matrix that are merged at a time */

/* One adapter in f32, the device's: A times s, B, and scratch. s is the diagonal of a matrix. */
typedef struct lora_pair {
    upipe_view scale, a, scaled, b; /* [R][R]; [R][in]: A, and s * A; [out][R] */
    void *work;
    size_t work_bytes;
} lora_pair;

static inline upipe_status lora_alloc(model_rank *r, upipe_view *x, int64_t rows, int64_t cols)
{
    void *data;
    UPIPE_TRY(upipe_alloc(r->c, &data, (size_t)(rows * cols) * 4, UPIPE_USE_SCRATCH, "adapter"));
    *x = upipe_view_packed(data, UPIPE_F32, rows, 1, (int32_t)cols);
    return UPIPE_OK;
}

/* A stored tensor of the unit. */
static inline upipe_view lora_stored(const model_rank *r, const llama_tensor *t, int kind)
{
    const upipe_dtype dtype = r->m->plan.desc.dtype;
    const int64_t first = (t->frozen ? r->m->layout->frozen_first : r->m->layout->first)[t->unit];
    const char *data =
        (const char *)r->weights[t->frozen][kind] + (size_t)(t->at - first) * upipe_dtype_bytes(dtype);
    return upipe_view_packed((void *)(uintptr_t)data, dtype, t->rows, 1, (int32_t)t->cols);
}

static inline upipe_status lora_scale(model_rank *r, upipe_view scale)
{
    const llama_lora *l = &r->m->layout->lora;
    const float s = (float)(l->alpha / l->rank);
    int i;
    UPIPE_TRY(r->c->ops->zero(r->c, scale.data, (size_t)(l->rank * l->rank) * 4));
    for (i = 0; i < l->rank; ++i)
        UPIPE_TRY(r->c->ops->copy(r->c, (float *)scale.data + i * (l->rank + 1), &s, sizeof s));
    return UPIPE_OK;
}

static inline upipe_status lora_pair_begin(model_rank *r, lora_pair *p, const llama_tensor *t, int kind)
{
    upipe_ctx *c = r->c;
    const upipe_ops *ops = c->ops;
    const int64_t rank = r->m->layout->lora.rank;
    const upipe_view g = upipe_view_packed(NULL, UPIPE_F32, t->rows, 1, (int32_t)t->cols);
    UPIPE_TRY(lora_alloc(r, &p->scale, rank, rank));
    UPIPE_TRY(lora_alloc(r, &p->a, rank, t->cols));
    UPIPE_TRY(lora_alloc(r, &p->scaled, rank, t->cols));
    UPIPE_TRY(lora_alloc(r, &p->b, t->rows, rank));
    p->work_bytes = ops->gemm_bytes(ops, p->scaled, p->scale, p->a, UPIPE_GEMM_ACCUMULATE);
    p->work_bytes =
        upipe_max_bytes(p->work_bytes, ops->gemm_bytes(ops, g, p->b, p->scaled, UPIPE_GEMM_ACCUMULATE));
    p->work_bytes = upipe_max_bytes(
        p->work_bytes, ops->gemm_bytes(ops, p->b, g, p->scaled, UPIPE_GEMM_TRANS_B | UPIPE_GEMM_ACCUMULATE));
    p->work_bytes = upipe_max_bytes(p->work_bytes, ops->gemm_bytes(ops, p->a, p->b, g, UPIPE_GEMM_TRANS_A));
    UPIPE_TRY(upipe_alloc(c, &p->work, p->work_bytes, UPIPE_USE_SCRATCH, "gemm_work"));
    UPIPE_TRY(lora_scale(r, p->scale));
    UPIPE_TRY(ops->cast(c, p->a, lora_stored(r, t + t->lora, kind)));
    UPIPE_TRY(ops->cast(c, p->b, lora_stored(r, t + t->lora + 1, kind)));
    return ops->gemm(c, p->scaled, p->scale, p->a, 0, p->work, p->work_bytes);
}

static inline upipe_status lora_pair_end(model_rank *r, const lora_pair *p)
{
    UPIPE_TRY(upipe_free(r->c, p->work));
    UPIPE_TRY(upipe_free(r->c, p->b.data));
    UPIPE_TRY(upipe_free(r->c, p->scaled.data));
    UPIPE_TRY(upipe_free(r->c, p->a.data));
    return upipe_free(r->c, p->scale.data);
}

/* to = W + s * B * A, in f32 and rounded once. */
static inline upipe_status lora_merge(model_rank *r, const lora_pair *p, upipe_view to, upipe_view w)
{
    upipe_mem_tiles at = {0, 0, 0};
    upipe_view sum;
    UPIPE_TRY(lora_alloc(r, &sum, w.n < LLAMA_LORA_ROWS ? w.n : LLAMA_LORA_ROWS, w.d));
    while (upipe_mem_tiles_next(r->c->mem, &at, w.n, LLAMA_LORA_ROWS)) {
        const upipe_view tile = upipe_view_rows(sum, 0, at.n);
        UPIPE_TRY(r->c->ops->cast(r->c, tile, upipe_view_rows(w, at.row, at.n)));
        UPIPE_TRY(r->c->ops->gemm(r->c, tile, upipe_view_rows(p->b, at.row, at.n), p->scaled,
                                  UPIPE_GEMM_ACCUMULATE, p->work, p->work_bytes));
        UPIPE_TRY(r->c->ops->cast(r->c, upipe_view_rows(to, at.row, at.n), tile));
    }
    return upipe_free(r->c, sum.data);
}

/* Tensors of a unit that have an adapter: the first from *t on, NULL behind the last one. */
static inline const llama_tensor *lora_next(const model_rank *r, int unit, const llama_tensor *t)
{
    const llama_layout *l = r->m->layout;
    for (t = t == NULL ? l->tensors : t + 1; t < l->tensors + l->n && t->unit <= unit && !t->is_vector; ++t)
        if (t->unit == unit && t->lora) return t;
    return NULL;
}

/* Elements of a unit that have adapters. */
static inline int64_t lora_adapted(const model_rank *r, int kind)
{
    return kind == MODEL_UNIT_ATTENTION ? r->m->layout->adapted[0]
           : kind == MODEL_UNIT_MLP     ? r->m->layout->adapted[1]
                                        : 0;
}

/* The unit's adapted matrices, in a block until model_weights_end frees it. */
static inline upipe_status model_lora_merge(model_rank *r, int unit, int kind)
{
    const upipe_dtype dtype = r->m->plan.desc.dtype;
    const llama_tensor *t = NULL;
    UPIPE_TRY(upipe_alloc(r->c, &r->merged[kind], (size_t)lora_adapted(r, kind) * upipe_dtype_bytes(dtype),
                          UPIPE_USE_WEIGHTS, "adapted"));
    if (r->merged[kind] == NULL) return UPIPE_OK;
    while ((t = lora_next(r, unit, t)) != NULL) {
        const upipe_view w = lora_stored(r, t, kind);
        upipe_view to = w;
        lora_pair p;
        to.data = upipe_offset(r->merged[kind], (size_t)t->lora_at * upipe_dtype_bytes(dtype));
        UPIPE_TRY(lora_pair_begin(r, &p, t, kind));
        UPIPE_TRY(lora_merge(r, &p, to, w));
        UPIPE_TRY(lora_pair_end(r, &p));
    }
    return UPIPE_OK;
}

/* Zeros for the gradients of the unit's adapted matrices, until model_lora_grads_end. */
static inline upipe_status model_lora_grads_begin(model_rank *r, int kind)
{
    const size_t bytes = (size_t)lora_adapted(r, kind) * 4;
    void *data;
    UPIPE_TRY(upipe_alloc(r->c, &data, bytes, UPIPE_USE_WEIGHT_GRAD, "adapted"));
    r->adapted_grads[kind] = (float *)data;
    return bytes > 0 ? r->c->ops->zero(r->c, data, bytes) : UPIPE_OK;
}

/* Where the gradient of an adapter's tensor is added. */
static inline upipe_view lora_grad(const model_rank *r, const llama_tensor *t, int kind)
{
    return upipe_view_packed(r->grads[kind] + (t->at - r->m->layout->first[t->unit]), UPIPE_F32, t->rows, 1,
                             (int32_t)t->cols);
}

/* While the unit's weights and gradients are there. */
static inline upipe_status model_lora_grads_end(model_rank *r, int unit, int kind)
{
    const int add = UPIPE_GEMM_ACCUMULATE;
    upipe_ctx *c = r->c;
    const llama_tensor *t = NULL;
    if (r->adapted_grads[kind] == NULL) return UPIPE_OK;
    while ((t = lora_next(r, unit, t)) != NULL) {
        const upipe_view g =
            upipe_view_packed(r->adapted_grads[kind] + t->lora_at, UPIPE_F32, t->rows, 1, (int32_t)t->cols);
        lora_pair p;
        UPIPE_TRY(lora_pair_begin(r, &p, t, kind));
        UPIPE_TRY(c->ops->gemm(c, lora_grad(r, t + t->lora + 1, kind), g, p.scaled, UPIPE_GEMM_TRANS_B | add,
                               p.work, p.work_bytes));
        UPIPE_TRY(c->ops->gemm(c, p.a, p.b, g, UPIPE_GEMM_TRANS_A, p.work, p.work_bytes));
        UPIPE_TRY(c->ops->gemm(c, lora_grad(r, t + t->lora, kind), p.scale, p.a, add, p.work, p.work_bytes));
        UPIPE_TRY(lora_pair_end(r, &p));
    }
    UPIPE_TRY(upipe_free(c, r->adapted_grads[kind]));
    r->adapted_grads[kind] = NULL;
    return UPIPE_OK;
}

#endif

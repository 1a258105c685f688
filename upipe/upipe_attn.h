/* upipe_attn.h -- what one attention call is: arguments and their checks        layer 2, includes ops
 *
 * One operation serves the whole sequence, a tile, a ring step and a document: q and k carry the global
 * position of their first row, and the mask is a statement about positions. Query head h reads key/value head
 * h / (H/Hkv).
 *
 *     s[i][j] = scale * <q_i, k_j>          visible if not causal, or q_pos + i >= k_pos + j
 *     lse[i]  = log sum_j exp(s[i][j])      natural logarithm; -inf for a row that sees no key
 *     o[i]    = sum_j exp(s[i][j] - lse[i]) v_j      0 for a row that sees no key
 *
 * q, o [Sq][H][d]   k, v [Sk][Hkv][d]   lse, delta [Sq][H] in f32. Any steps; rows of d elements are
 *                   contiguous.
 */
#ifndef UPIPE_ATTN_H
#define UPIPE_ATTN_H

#include "upipe_ops.h"

/* upipe_attn -- forward
 *   q k v o     one storage type; o does not overlap the others
 *   lse         f32, d = 1, written
 *   q_pos k_pos global position of row 0 of q and of k
 *   scale       0 = 1/sqrt(d)
 *   causal      nonzero: a query sees positions up to its own
 *   window      keys further back than this many positions are hidden; 0 = none
 *   softcap     scores become softcap * tanh(score / softcap); 0 = none
 *   merge       forward: o and lse hold what the same queries saw of other keys, and are brought up to all of
 *               them; o may then be f32 beside narrower q, k, v. A row's old lse of -inf: nothing was seen
 *   sinks       one extra score a head, f32 [H]; NULL = none
 *   docs        cu_seqlens of packed documents, docs_n + 1 positions; NULL = one document
 *   work        scratch of upipe_ops.attn_bytes bytes
 * Not built yet, refused with UNSUPPORTED: window, softcap, sinks, docs, v.d != q.d.
 */
typedef struct upipe_attn {
    upipe_view q, k, v, o, lse;
    int64_t q_pos, k_pos;
    int64_t window;
    const int64_t *docs;
    int64_t docs_n;
    const float *sinks;
    void *work;
    size_t work_bytes;
    float scale, softcap;
    int causal, merge;
} upipe_attn;

/* upipe_attn_grad -- backward, with the probabilities recomputed from the forward's lse
 *   a       the forward's arguments; a.o is not read (delta stands for it)
 *   go      gradient of o, shape and type of o
 *   delta   f32, d = 1: rowsum(go * o)
 *   gq      shape and type of q, written
 *   gk gv   f32, shapes of k and v: += in the order of query heads, and within a head in one fixed order of
 *           queries, so that a group's heads may come in one call or in several with the same bits
 */
typedef struct upipe_attn_grad {
    upipe_attn a;
    upipe_view go, delta, gq, gk, gv;
} upipe_attn_grad;

enum { UPIPE_HEAD_DIM_MIN = 32, UPIPE_HEAD_DIM_MAX = 256, UPIPE_HEAD_DIM_STEP = 8 };

UPIPE_API upipe_status upi_attn_like(upipe_ctx *c, const char *name, upipe_view v, int64_t n, int32_t h,
                                     int32_t d, upipe_dtype dtype)
{
    if (v.data == NULL && n > 0) return upi_fail(&c->err, UPIPE_ERR_ARG, "attention: %s is NULL", name);
    if (v.n != n || v.h != h || v.d != d)
        return upi_fail(&c->err, UPIPE_ERR_ARG, "attention: %s is [%lld][%d][%d], not [%lld][%d][%d]", name,
                        (long long)v.n, v.h, v.d, (long long)n, h, d);
    if (v.dtype != dtype)
        return upi_fail(&c->err, UPIPE_ERR_ARG, "attention: %s is %s, not %s", name,
                        upipe_dtype_name(v.dtype), upipe_dtype_name(dtype));
    return UPIPE_OK;
}

/* Checks what every backend may then rely on. */
UPIPE_API upipe_status upi_attn_check(upipe_ctx *c, const upipe_attn *a, int backward)
{
    const int64_t limit = INT64_C(1) << 60; /* sums and differences of four such numbers stay in 63 bits */
    upipe_view q = a->q, k = a->k;
    if (q.dtype != UPIPE_F32 && q.dtype != UPIPE_BF16 && q.dtype != UPIPE_F16)
        return upi_fail(&c->err, UPIPE_ERR_ARG, "attention: data type %d is none of f32, bf16 and f16",
                        (int)q.dtype);
    if (q.dtype == UPIPE_F16 && !c->ops->f16)
        return upi_fail(&c->err, UPIPE_ERR_UNSUPPORTED, "attention: %s does not take f16", c->ops->name);
    if (q.h < 1 || k.h < 1 || q.h % k.h != 0)
        return upi_fail(&c->err, UPIPE_ERR_ARG, "attention: %d query heads over %d key/value heads", q.h,
                        k.h);
    if (q.d < UPIPE_HEAD_DIM_MIN || q.d > UPIPE_HEAD_DIM_MAX || q.d % UPIPE_HEAD_DIM_STEP != 0)
        return upi_fail(&c->err, UPIPE_ERR_UNSUPPORTED,
                        "attention: head dim %d; %d to %d in steps of %d are built", q.d, UPIPE_HEAD_DIM_MIN,
                        UPIPE_HEAD_DIM_MAX, UPIPE_HEAD_DIM_STEP);
    if (a->v.d != q.d)
        return upi_fail(&c->err, UPIPE_ERR_UNSUPPORTED, "attention: head dim %d of v is not q's %d", a->v.d,
                        q.d);
    if (q.n < 0 || k.n < 0)
        return upi_fail(&c->err, UPIPE_ERR_ARG, "attention: %lld queries, %lld keys", (long long)q.n,
                        (long long)k.n);
    UPIPE_TRY(upi_attn_like(c, "q", q, q.n, q.h, q.d, q.dtype));
    UPIPE_TRY(upi_attn_like(c, "k", k, k.n, k.h, q.d, q.dtype));
    UPIPE_TRY(upi_attn_like(c, "v", a->v, k.n, k.h, q.d, q.dtype));
    if (!backward)
        UPIPE_TRY(upi_attn_like(c, "o", a->o, q.n, q.h, q.d,
                                a->merge && a->o.dtype == UPIPE_F32 ? UPIPE_F32 : q.dtype));
    if (backward && a->merge)
        return upi_fail(&c->err, UPIPE_ERR_ARG, "attention: the backward has nothing to merge");
    UPIPE_TRY(upi_attn_like(c, "lse", a->lse, q.n, q.h, 1, UPIPE_F32));
    if (a->window != 0)
        return upi_fail(&c->err, UPIPE_ERR_UNSUPPORTED, "attention: sliding window of %lld is not built yet",
                        (long long)a->window);
    if (a->softcap != 0)
        return upi_fail(&c->err, UPIPE_ERR_UNSUPPORTED, "attention: soft-cap %g is not built yet",
                        a->softcap);
    if (a->sinks != NULL)
        return upi_fail(&c->err, UPIPE_ERR_UNSUPPORTED, "attention: sinks are not built yet");
    if (a->docs != NULL || a->docs_n != 0)
        return upi_fail(&c->err, UPIPE_ERR_UNSUPPORTED, "attention: packed documents are not built yet");
    if (!(a->scale >= 0) || !__builtin_isfinite(a->scale))
        return upi_fail(&c->err, UPIPE_ERR_ARG, "attention: scale %g", a->scale);
    if (a->q_pos < -limit || a->q_pos > limit || a->k_pos < -limit || a->k_pos > limit || q.n > limit ||
        k.n > limit)
        return upi_fail(&c->err, UPIPE_ERR_OVERFLOW,
                        "attention: %lld queries from %lld and %lld keys from %lld", (long long)q.n,
                        (long long)a->q_pos, (long long)k.n, (long long)a->k_pos);
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_attn_aligned(upipe_ctx *c, const upipe_attn *a)
{
    if ((uintptr_t)a->work % 64 == 0) return UPIPE_OK;
    return upi_fail(&c->err, UPIPE_ERR_ARG, "attention: scratch at %p is not aligned to 64 bytes", a->work);
}

/* upipe_attn_fwd -- o and lse of the queries over all keys given
 *   errors  ARG (shapes, too little scratch), UNSUPPORTED (see upipe_attn)
 *   order   enqueued on ctx->stream
 */
UPIPE_API upipe_status upipe_attn_fwd(upipe_ctx *c, const upipe_attn *a)
{
    size_t need;
    UPIPE_TRY(upi_attn_check(c, a, 0));
    need = c->ops->attn_bytes(c->ops, a, 0);
    if (a->work_bytes < need || (a->work == NULL && need > 0))
        return upi_fail(&c->err, UPIPE_ERR_ARG, "attention: %zu bytes of scratch, %zu needed",
                        a->work != NULL ? a->work_bytes : (size_t)0, need);
    UPIPE_TRY(upi_attn_aligned(c, a));
    return c->ops->attn_fwd(c, a);
}

/* upipe_attn_bwd -- gradients of q, k, v. Errors and order as upipe_attn_fwd. */
UPIPE_API upipe_status upipe_attn_bwd(upipe_ctx *c, const upipe_attn_grad *g)
{
    const upipe_attn *a = &g->a;
    size_t need;
    UPIPE_TRY(upi_attn_check(c, a, 1));
    UPIPE_TRY(upi_attn_like(c, "go", g->go, a->q.n, a->q.h, a->q.d, a->q.dtype));
    UPIPE_TRY(upi_attn_like(c, "delta", g->delta, a->q.n, a->q.h, 1, UPIPE_F32));
    UPIPE_TRY(upi_attn_like(c, "gq", g->gq, a->q.n, a->q.h, a->q.d, a->q.dtype));
    UPIPE_TRY(upi_attn_like(c, "gk", g->gk, a->k.n, a->k.h, a->k.d, UPIPE_F32));
    UPIPE_TRY(upi_attn_like(c, "gv", g->gv, a->k.n, a->k.h, a->k.d, UPIPE_F32));
    need = c->ops->attn_bytes(c->ops, a, 1);
    if (a->work_bytes < need || (a->work == NULL && need > 0))
        return upi_fail(&c->err, UPIPE_ERR_ARG, "attention: %zu bytes of scratch, %zu needed",
                        a->work != NULL ? a->work_bytes : (size_t)0, need);
    UPIPE_TRY(upi_attn_aligned(c, a));
    return c->ops->attn_bwd(c, g);
}

/* The scale that a call uses. */
UPIPE_API float upi_attn_scale(const upipe_attn *a)
{
    return a->scale != 0 ? a->scale : (float)(1.0 / __builtin_sqrt((double)a->q.d));
}

#endif

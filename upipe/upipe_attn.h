/* upipe_attn.h -- one attention call: what a row sees, arguments, checks
 *
 * One operation serves the whole sequence, a tile, a ring step and a packed sequence: q and k carry the
 * global position of their first row, and the mask is a statement about positions. Query head h reads
 * key/value head h / (H/Hkv).
 *
 *     s[i][j] = scale * <q_i, k_j>          softcap * tanh(that / softcap) with a soft-cap
 *     lse[i]  = log sum_j exp(s[i][j])      natural logarithm, over the visible keys and the sink, if any;
 *                                           -inf for a row that sees nothing
 *     o[i]    = sum_j exp(s[i][j] - lse[i]) v_j      0 for a row that sees no key
 *
 *     q [Sq][H][d]   k [Sk][Hkv][d]   v [Sk][Hkv][v_dim]   o [Sq][H][v_dim]   lse, delta f32 [Sq][H]
 *
 * Steps are free; the d elements of a row are contiguous.
 *
 * What a row sees is one run of keys, whatever masks are combined, and both of its ends ascend with the row
 * (upipe_attn_visible): tiles outside it cost nothing.
 */
#ifndef UPIPE_ATTN_H
#define UPIPE_ATTN_H

#include "upipe_ops.h"

/* ---- packed documents ---- */

/* upipe_borders -- of packed documents
 * cu_seqlens has cu_seqlens_n + 1 ascending positions, in host memory: document i is [cu_seqlens[i], cu_seqlens[i + 1]),
 * which may be empty. A position before the first border, or from the last one on, lies in no document: a token there
 * sees nothing in attention, and linear attention takes none. NULL: there are no borders.
 */
typedef struct upipe_borders {
    const int64_t *cu_seqlens;
    int64_t cu_seqlens_n;
} upipe_borders;

/* upi_borders_check -- ARG unless the borders ascend and their number fits */
UPIPE_API upipe_status upi_borders_check(upipe_err *e, const upipe_borders *b)
{
    const int64_t limit = INT64_C(1) << 60;
    int64_t i;
    if (b->cu_seqlens_n < 0 || (b->cu_seqlens == NULL) != (b->cu_seqlens_n == 0))
        return upipe_fail(e, UPIPE_ERR_ARG, "%lld packed documents, cu_seqlens is %sNULL",
                          (long long)b->cu_seqlens_n, b->cu_seqlens != NULL ? "not " : "");
    for (i = 0; i < b->cu_seqlens_n; ++i)
        if (b->cu_seqlens[i] > b->cu_seqlens[i + 1] || b->cu_seqlens[i] < -limit ||
            b->cu_seqlens[i + 1] > limit)
            return upipe_fail(e, UPIPE_ERR_ARG, "packed document %lld is [%lld, %lld)", (long long)i,
                              (long long)b->cu_seqlens[i], (long long)b->cu_seqlens[i + 1]);
    return UPIPE_OK;
}

/* upi_borders_until -- how many borders lie at or before a position */
UPIPE_API int64_t upi_borders_until(const upipe_borders *b, int64_t pos)
{
    int64_t low = 0, high = b->cu_seqlens != NULL ? b->cu_seqlens_n + 1 : 0;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (b->cu_seqlens[middle] <= pos)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* upi_borders_hash -- as ranks and passes compare them */
UPIPE_API uint64_t upi_borders_hash(const upipe_borders *b)
{
    const size_t n = b->cu_seqlens != NULL ? (size_t)(b->cu_seqlens_n + 1) : 0;
    return upipe_hash_bytes(UPIPE_HASH, b->cu_seqlens, n * sizeof *b->cu_seqlens);
}

/* upi_border_before -- the last border at or before a position; INT64_MIN: there is none */
UPIPE_API int64_t upi_border_before(const upipe_borders *b, int64_t pos)
{
    const int64_t n = upi_borders_until(b, pos);
    return n > 0 ? b->cu_seqlens[n - 1] : INT64_MIN;
}

/* upi_border_behind -- the first border behind a position; INT64_MAX: there is none */
UPIPE_API int64_t upi_border_behind(const upipe_borders *b, int64_t pos)
{
    const int64_t n = upi_borders_until(b, pos);
    return b->cu_seqlens != NULL && n <= b->cu_seqlens_n ? b->cu_seqlens[n] : INT64_MAX;
}

/* upi_borders_at -- the packed document where a position lies, [*begin, *end). Returns 0 where there is none: then *begin
 *                   is INT64_MIN before the first border, and *end INT64_MAX behind the last one */
UPIPE_API int upi_borders_at(const upipe_borders *b, int64_t pos, int64_t *begin, int64_t *end)
{
    const int64_t n = upi_borders_until(b, pos);
    *begin = n > 0 ? b->cu_seqlens[n - 1] : INT64_MIN;
    *end = n <= b->cu_seqlens_n ? b->cu_seqlens[n] : INT64_MAX;
    return n > 0 && n <= b->cu_seqlens_n;
}

/* upi_borders_cover -- ARG unless each of the positions [first, end) lies in a document, or there are no borders */
UPIPE_API upipe_status upi_borders_cover(upipe_err *e, const upipe_borders *b, int64_t first, int64_t end)
{
    if (b->cu_seqlens == NULL || first >= end ||
        (b->cu_seqlens[0] <= first && end <= b->cu_seqlens[b->cu_seqlens_n]))
        return UPIPE_OK;
    return upipe_fail(e, UPIPE_ERR_ARG,
                      "packed documents, [%lld, %lld) in all, do not cover the tokens [%lld, %lld)",
                      (long long)b->cu_seqlens[0], (long long)b->cu_seqlens[b->cu_seqlens_n],
                      (long long)first, (long long)end);
}

/* ---- one call ---- */

/* upipe_mask -- the mask of an attention call, a layer or a ring; zero fields mask nothing
 *   window      a query at position p sees no position below p - window + 1; 0 = no limit
 *   borders     of packed documents. A query sees its own document alone; a query outside of all of
 *               them sees nothing, and all rows there may hold NaNs
 *   padded      nonzero: tokens outside of all documents are padding. Else the calls that know the whole sequence, those
 *               of a layer, of Q, K and V, and of segments, refuse documents that do not cover it
 *   sinks       f32 [H], where the backend computes: one more score a head, whose value is 0; NULL = none
 *   softcap     scores become softcap * tanh(score / softcap); 0 = none
 *   causal      nonzero: a query sees positions up to its own; 0: also later ones
 */
typedef struct upipe_mask {
    int64_t window;
    upipe_borders borders;
    const float *sinks;
    float softcap;
    int causal, padded; /* padded is last: dry runs tell masks apart by what stands before it */
} upipe_mask;

/* upipe_attn -- forward
 *   q k v o     one storage type, but o may be f32 beside narrower ones; o does not overlap the others
 *   lse         f32, d = 1, written
 *   q_pos k_pos global position of row 0 of q and of k
 *   pos_step    positions between neighbouring rows, of q and of k; 0 = 1
 *   mask        which keys a query sees, and the form of its scores; sinks are those of the heads of q
 *   scale       0 = 1/sqrt(d). With a soft-cap, scale / softcap must be a normal f32 number
 *   merge       forward: o and lse hold the result over other keys for the same queries, and are updated to
 *               the result over all of them. A row with lse -inf has seen nothing. Sinks belong to one of the
 *               calls.
 *               Backward: dq is f32, and +=
 * A backend declares what it supports of this in upipe_ops.attn_can; the rest is UNSUPPORTED.
 */
typedef struct upipe_attn {
    upipe_view q, k, v, o, lse;
    int64_t q_pos, k_pos, pos_step;
    upipe_mask mask;
    void *work;
    size_t work_bytes;
    float scale;
    int merge;
} upipe_attn;

/* upipe_attn_grad -- backward, with the probabilities recomputed from the forward's lse
 *   a       the forward's arguments; a.o is of q's type, and read where upipe_ops.attn_reads_o is set. Otherwise it
 *           is not read: delta stands for it
 *   dout    gradient of o, shape and type of o
 *   delta   f32, d = 1: rowsum(dout * o)
 *   dq      shape and type of q, written; with merge f32, and +=
 *   dk dv   f32, shapes of k and v: += in the order of query heads, and within a head in one fixed order of
 *           queries. So a group's heads may come in one call or in several, with the same bits
 *   dsinks  f32 [H], +=: the sinks' gradient; NULL = not wanted
 */
typedef struct upipe_attn_grad {
    upipe_attn a;
    upipe_view dout, delta, dq, dk, dv;
    float *dsinks;
} upipe_attn_grad;

enum {
    UPIPE_HEAD_DIM_MIN = 32,
    UPIPE_HEAD_DIM_MAX = 256,
    UPIPE_HEAD_DIM_STEP = 8,
    UPIPE_POS_STEP_MAX = 1 << 20
};

UPIPE_API upipe_status upi_attn_like(upipe_ctx *c, const char *name, upipe_view v, int64_t n, int32_t h,
                                     int32_t d, upipe_dtype dtype)
{
    if (v.data == NULL && n > 0) return upipe_fail(&c->err, UPIPE_ERR_ARG, "attention: %s is NULL", name);
    if (v.n != n || v.h != h || v.d != d)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "attention: %s is [%lld][%d][%d], not [%lld][%d][%d]", name,
                          (long long)v.n, v.h, v.d, (long long)n, h, d);
    if (upi_enum_number(&v.dtype, sizeof v.dtype) != (int)dtype)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "attention: %s is %s, not %s", name,
                          upi_dtype_name_of(&v.dtype), upipe_dtype_name(dtype));
    return UPIPE_OK;
}

/* ---- what a row sees ---- */

/* Whether a mask reads positions, and not only how far a key is from a query: then each sequence of a batch, and each
 * segment, sees other keys. */
UPIPE_API int upi_mask_reads_positions(const upipe_mask *m)
{
    return m->borders.cu_seqlens != NULL;
}

/* floor(a / b), b > 0 */
UPIPE_API int64_t upi_floor_div(int64_t a, int64_t b)
{
    return b == 1 ? a : a / b - (a % b < 0); /* a division costs as much as the rest of upipe_attn_visible */
}

/* x, but no less than low and no more than high. */
UPIPE_API int64_t upi_clamp(int64_t x, int64_t low, int64_t high)
{
    return x < low ? low : x > high ? high : x;
}

/* Query i sees keys up to i + this, if the mask is causal and nothing more. */
UPIPE_API int64_t upi_attn_ahead(const upipe_attn *a)
{
    return upi_floor_div(a->q_pos - a->k_pos, a->pos_step > 0 ? a->pos_step : 1);
}

/* Row i of q sees the keys [*first, *end) of k; both ascend with i, and are equal where it sees none. */
UPIPE_API void upipe_attn_visible(const upipe_attn *a, int64_t i, int64_t *first, int64_t *end)
{
    const upipe_mask *m = &a->mask;
    const int64_t step = a->pos_step > 0 ? a->pos_step : 1, n = a->k.n;
    /* key `same` is the last one at or before the row's position, as if keys had no ends; key j lies j - same
     * steps on */
    const int64_t away = a->q_pos - a->k_pos, same = i + upi_attn_ahead(a);
    const int64_t pos = a->q_pos + i * step;
    int64_t from = 0, to = n;
    if (m->causal) to = same + 1;
    if (m->window > 0) from = i - upi_floor_div(m->window - 1 - away, step);
    if (m->borders.cu_seqlens != NULL) {
        int64_t low, high;
        if (upi_borders_at(&m->borders, pos, &low, &high)) {
            /* the first keys at or behind both borders */
            low = -upi_floor_div(a->k_pos - low, step);
            high = -upi_floor_div(a->k_pos - high, step);
            if (low > from) from = low;
            if (high < to) to = high;
        } else if (low == INT64_MIN) {
            to = 0;
        } else {
            from = n;
        }
    }
    *end = upi_clamp(to, 0, n);
    *first = upi_clamp(from, 0, *end);
}

typedef struct upipe_attn_rows {
    int64_t first, end;
} upipe_attn_rows;

/* Which of the n rows of q or k, whose first position is pos, lie inside the borders of packed sequences: the others
 * are padding, which neither sees nor is seen. All where there are no borders. */
UPIPE_API upipe_attn_rows upi_attn_inside(const upipe_attn *a, int64_t pos, int64_t n)
{
    const upipe_borders *b = &a->mask.borders;
    const int64_t step = a->pos_step > 0 ? a->pos_step : 1;
    upipe_attn_rows x = {0, n};
    if (b->cu_seqlens == NULL) return x;
    x.end = upi_clamp(-upi_floor_div(pos - b->cu_seqlens[b->cu_seqlens_n], step), 0, n);
    x.first = upi_clamp(-upi_floor_div(pos - b->cu_seqlens[0], step), 0, x.end);
    return x;
}

/* upi_attn_sees -- whether any of a call's queries may see any of its keys */
UPIPE_API int upi_attn_sees(const upipe_attn *a)
{
    int64_t first, end, other;
    upipe_attn_visible(a, 0, &first, &other);
    upipe_attn_visible(a, a->q.n - 1, &other, &end);
    return first < end;
}

/* ---- checks ---- */

/* The scale that a call uses. */
UPIPE_API float upipe_attn_scale(const upipe_attn *a)
{
    return a->scale != 0 ? a->scale : (float)(1.0 / __builtin_sqrt((double)a->q.d));
}

/* UNSUPPORTED for head dims that no kernel is built for. */
UPIPE_API upipe_status upi_attn_check_dims(upipe_ctx *c, int head_dim, int v_dim)
{
    const int sizes[2] = {head_dim, v_dim};
    int i;
    for (i = 0; i < 2; ++i)
        if (sizes[i] < UPIPE_HEAD_DIM_MIN || sizes[i] > UPIPE_HEAD_DIM_MAX ||
            sizes[i] % UPIPE_HEAD_DIM_STEP != 0)
            return upipe_fail(
                &c->err, UPIPE_ERR_UNSUPPORTED, "head dim %d%s; %d to %d in steps of %d are built", sizes[i],
                i == 1 ? " of V" : "", UPIPE_HEAD_DIM_MIN, UPIPE_HEAD_DIM_MAX, UPIPE_HEAD_DIM_STEP);
    return UPIPE_OK;
}

/* Whether the numbers of the masks and the scale make sense. */
UPIPE_API upipe_status upi_attn_check_masks(upipe_ctx *c, const upipe_attn *a)
{
    const upipe_mask *m = &a->mask;
    const int64_t limit = INT64_C(1) << 60;
    if (m->window < 0 || m->window > limit)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "attention: a window of %lld positions",
                          (long long)m->window);
    if (a->pos_step < 0 || a->pos_step > UPIPE_POS_STEP_MAX)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "attention: %lld positions between rows",
                          (long long)a->pos_step);
    if (!(a->scale >= 0) || !__builtin_isfinite(a->scale))
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "attention: scale %g", a->scale);
    if (!(m->softcap >= 0) || !__builtin_isfinite(m->softcap))
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "attention: soft-cap %g", m->softcap);
    /* f32 must hold the factors of a soft-cap, in whose units scores are kept: that of products, and that of the
     * exponential to base 2 */
    if (m->softcap > 0 && (!__builtin_isnormal(upipe_attn_scale(a) / m->softcap) ||
                           !__builtin_isfinite(m->softcap * 1.4426951f)))
        return upipe_fail(&c->err, UPIPE_ERR_ARG,
                          "attention: soft-cap %g is out of all proportion to scale %g", m->softcap,
                          upipe_attn_scale(a));
    return upi_borders_check(&c->err, &m->borders);
}

/* Whether the backend supports what this call asks for.
 *   adds_dq   nonzero: a backward that adds to dq */
UPIPE_API upipe_status upi_attn_check_can(upipe_ctx *c, const upipe_attn *a, int adds_dq)
{
    static const char *const names[] = {"a sliding window",
                                        "packed sequences (cu_seqlens)",
                                        "a soft-cap",
                                        "sinks",
                                        "a head dim of v that is not q's",
                                        "a gradient of q that is added to"};
    int asked = 0, i;
    if (a->mask.window != 0) asked |= UPIPE_ATTN_WINDOW;
    if (a->mask.borders.cu_seqlens != NULL) asked |= UPIPE_ATTN_CU_SEQLENS;
    if (a->mask.softcap != 0) asked |= UPIPE_ATTN_SOFTCAP;
    if (a->mask.sinks != NULL) asked |= UPIPE_ATTN_SINKS;
    if (a->v.d != a->q.d) asked |= UPIPE_ATTN_V_DIM;
    if (adds_dq) asked |= UPIPE_ATTN_ADD_DQ;
    asked &= ~c->ops->attn_can;
    for (i = 0; i < (int)(sizeof names / sizeof *names); ++i)
        if (asked & (1 << i))
            return upipe_fail(&c->err, UPIPE_ERR_UNSUPPORTED, "attention: %s does not know %s yet",
                              c->ops->name, names[i]);
    return UPIPE_OK;
}

/* Checks what every backend may then rely on. */
UPIPE_API upipe_status upi_attn_check(upipe_ctx *c, const upipe_attn *a)
{
    const int64_t limit = INT64_C(1) << 60; /* sums and differences of four such numbers stay in 63 bits */
    upipe_view q = a->q, k = a->k;
    const int dtype = upi_enum_number(&q.dtype, sizeof q.dtype);
    if (dtype < 0 || dtype > UPIPE_BF16)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "attention: data type %d is neither f32 nor bf16", dtype);
    if (q.h < 1 || k.h < 1 || q.h % k.h != 0)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "attention: %d query heads over %d key/value heads", q.h,
                          k.h);
    UPIPE_TRY(upi_attn_check_dims(c, q.d, a->v.d));
    if (q.n < 0 || k.n < 0)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "attention: %lld queries, %lld keys", (long long)q.n,
                          (long long)k.n);
    UPIPE_TRY(upi_attn_like(c, "q", q, q.n, q.h, q.d, q.dtype));
    UPIPE_TRY(upi_attn_like(c, "k", k, k.n, k.h, q.d, q.dtype));
    UPIPE_TRY(upi_attn_like(c, "v", a->v, k.n, k.h, a->v.d, q.dtype));
    UPIPE_TRY(upi_attn_like(c, "lse", a->lse, q.n, q.h, 1, UPIPE_F32));
    UPIPE_TRY(upi_attn_check_masks(c, a));
    if (a->q_pos < -limit || a->q_pos > limit || a->k_pos < -limit || a->k_pos > limit ||
        q.n > limit / (a->pos_step > 0 ? a->pos_step : 1) ||
        k.n > limit / (a->pos_step > 0 ? a->pos_step : 1))
        return upipe_fail(&c->err, UPIPE_ERR_OVERFLOW,
                          "attention: %lld queries from %lld and %lld keys from %lld", (long long)q.n,
                          (long long)a->q_pos, (long long)k.n, (long long)a->k_pos);
    return UPIPE_OK;
}

/* Whether the scratch is what attn_bytes asks for. */
UPIPE_API upipe_status upi_attn_check_work(upipe_ctx *c, const upipe_attn *a, size_t need)
{
    if (a->work_bytes < need || (a->work == NULL && need > 0))
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "attention: %zu bytes of scratch, %zu needed",
                          a->work != NULL ? a->work_bytes : (size_t)0, need);
    if ((uintptr_t)a->work % 64 == 0) return UPIPE_OK;
    return upipe_fail(&c->err, UPIPE_ERR_ARG, "attention: scratch at %p is not aligned to 64 bytes", a->work);
}

/* upipe_attn_fwd -- o and lse of the queries over all keys given
 *   errors  ARG (shapes, too little scratch), UNSUPPORTED (see upipe_attn)
 *   order   enqueued on ctx->stream
 */
UPIPE_API upipe_status upipe_attn_fwd(upipe_ctx *c, const upipe_attn *a)
{
    const int wide = a != NULL && upi_enum_number(&a->o.dtype, sizeof a->o.dtype) == UPIPE_F32;
    if (a == NULL) return upipe_fail(&c->err, UPIPE_ERR_ARG, "attention: the call is NULL");
    UPIPE_TRY(upi_attn_check(c, a));
    UPIPE_TRY(upi_attn_like(c, "o", a->o, a->q.n, a->q.h, a->v.d, wide ? UPIPE_F32 : a->q.dtype));
    UPIPE_TRY(upi_attn_check_can(c, a, 0));
    UPIPE_TRY(upi_attn_check_work(c, a, c->ops->attn_bytes(c->ops, a, 0)));
    return c->ops->attn_fwd(c, a);
}

/* upipe_attn_bwd -- gradients of q, k, v. Errors and order as upipe_attn_fwd. */
UPIPE_API upipe_status upipe_attn_bwd(upipe_ctx *c, const upipe_attn_grad *g)
{
    const upipe_attn *a = g != NULL ? &g->a : NULL;
    if (g == NULL) return upipe_fail(&c->err, UPIPE_ERR_ARG, "attention: the call is NULL");
    UPIPE_TRY(upi_attn_check(c, a));
    UPIPE_TRY(upi_attn_check_can(c, a, a->merge));
    if (c->ops->attn_reads_o) UPIPE_TRY(upi_attn_like(c, "o", a->o, a->q.n, a->q.h, a->v.d, a->q.dtype));
    UPIPE_TRY(upi_attn_like(c, "dout", g->dout, a->q.n, a->q.h, a->v.d, a->q.dtype));
    UPIPE_TRY(upi_attn_like(c, "delta", g->delta, a->q.n, a->q.h, 1, UPIPE_F32));
    UPIPE_TRY(upi_attn_like(c, "dq", g->dq, a->q.n, a->q.h, a->q.d, a->merge ? UPIPE_F32 : a->q.dtype));
    UPIPE_TRY(upi_attn_like(c, "dk", g->dk, a->k.n, a->k.h, a->k.d, UPIPE_F32));
    UPIPE_TRY(upi_attn_like(c, "dv", g->dv, a->k.n, a->k.h, a->v.d, UPIPE_F32));
    if (g->dsinks != NULL && a->mask.sinks == NULL)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "attention: a gradient of sinks without sinks");
    UPIPE_TRY(upi_attn_check_work(c, a, c->ops->attn_bytes(c->ops, a, 1)));
    return c->ops->attn_bwd(c, g);
}

/* ---- pairs ---- */

/* The sum over i < n of i + ahead + 1, each at least 0 and at most `most`. */
UPIPE_API double upi_pairs_ramp(int64_t n, int64_t ahead, int64_t most)
{
    const int64_t first = upi_clamp(-ahead, 0, n), full = upi_clamp(most - ahead - 1, first, n);
    const double rising = (double)(full - first);
    return rising * ((double)(first + ahead + 1) + (double)(full + ahead)) / 2 +
           (double)(n - full) * (double)most;
}

/* Pairs of a call without borders. */
UPIPE_API double upi_pairs_plain(const upipe_attn *a)
{
    const int64_t step = a->pos_step > 0 ? a->pos_step : 1, last = a->mask.window - 1 - (a->q_pos - a->k_pos);
    double pairs =
        a->mask.causal ? upi_pairs_ramp(a->q.n, upi_attn_ahead(a), a->k.n) : (double)a->q.n * (double)a->k.n;
    if (a->mask.window > 0) pairs -= upi_pairs_ramp(a->q.n, -upi_floor_div(last, step) - 1, a->k.n);
    return pairs;
}

/* The rows of n, the first at pos and each `step` further, that lie in [from, to): their number and, in *pos, the first's
 * position. */
UPIPE_API int64_t upi_pairs_between(int64_t *pos, int64_t n, int64_t step, int64_t from, int64_t to)
{
    const int64_t first = upi_clamp(-upi_floor_div(*pos - from, step), 0, n),
                  end = upi_clamp(-upi_floor_div(*pos - to, step), first, n);
    *pos += first * step;
    return end - first;
}

/* upipe_attn_pairs -- pairs of a query and a key that it sees, of one head: the keys of upipe_attn_visible, added up. The
 *                    time grows with the borders of cu_seqlens between these rows, not with rows */
UPIPE_API double upipe_attn_pairs(const upipe_attn *a)
{
    const int64_t *const borders = a->mask.borders.cu_seqlens, step = a->pos_step > 0 ? a->pos_step : 1;
    double pairs = borders == NULL ? upi_pairs_plain(a) : 0;
    const int64_t q_end = a->q_pos + a->q.n * step, k_end = a->k_pos + a->k.n * step;
    const int64_t from = a->q_pos > a->k_pos ? a->q_pos : a->k_pos, end = q_end < k_end ? q_end : k_end;
    /* `from` lies in what begins at the border before this one */
    int64_t i = upi_borders_until(&a->mask.borders, from);
    for (i -= i > 0; i < a->mask.borders.cu_seqlens_n && borders[i] < end; ++i) {
        upipe_attn part = *a;
        part.q.n = upi_pairs_between(&part.q_pos, a->q.n, step, borders[i], borders[i + 1]);
        part.k.n = upi_pairs_between(&part.k_pos, a->k.n, step, borders[i], borders[i + 1]);
        if (part.q.n > 0 && part.k.n > 0) pairs += upi_pairs_plain(&part);
    }
    return pairs;
}

#endif

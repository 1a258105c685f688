/* gemm.h -- the product that a table's gemm must compute, of matrices with gaps (tensors.h), and what it must refuse
 *
 *     gemm_product p = product_make(&rng, rows, cols, depth, heads, shared, flags, UPIPE_F32, UPIPE_F32, UPIPE_F32);
 *     ... p.out = p.a * p.b by the table ...
 *     CHECK_SAY(reference(&p), "%s", product_text(&p));
 *     buffers_free(0);
 */
#ifndef UPIPE_TEST_GEMM_H
#define UPIPE_TEST_GEMM_H

#include "tensors.h"

/* [h][n][d], or inner: [n][h][d] */
static inline upipe_view matrix(test_rng *r, upipe_dtype dtype, int64_t n, int h, int d, int inner, int gap)
{
    upipe_view v = inner ? upipe_view_make(NULL, dtype, n, (int64_t)h * (d + gap), h, d + gap, d)
                         : upipe_view_make(NULL, dtype, n, d + gap, h, n * (d + gap) + gap, d);
    v.data = buffer(view_bytes(v));
    draw_elements(r, v, 1);
    return v;
}

/* ---- one product ---- */

/* Bits of `shared`: a, or b, has one matrix for all heads; the products are added up; the heads lie as one matrix. */
enum { SHARED_A = 1, SHARED_B = 2, ADDED = 4, JOINED = 8 };

typedef struct gemm_product {
    upipe_view out, a, b;
    upipe_view before, want; /* of out: as it was, and what reference() writes */
    int64_t depth;
    int64_t sum_depth; /* terms of one chain; 0 = the whole depth */
    int flags, shared;
} gemm_product;

static inline gemm_product product_make(test_rng *r, int64_t rows, int cols, int64_t depth, int heads,
                                        int shared, int flags, upipe_dtype type_a, upipe_dtype type_b,
                                        upipe_dtype type_out)
{
    const int trans_a = flags & UPIPE_GEMM_TRANS_A, trans_b = flags & UPIPE_GEMM_TRANS_B,
              joined = shared & JOINED;
    gemm_product p;
    p.flags = flags, p.shared = shared, p.depth = depth, p.sum_depth = 0;
    p.a = matrix(r, type_a, trans_a ? depth : rows, shared & SHARED_A ? 1 : heads,
                 (int)(trans_a ? rows : depth), joined ? !trans_a : test_below(r, 2),
                 joined ? 0 : test_below(r, 4));
    p.b =
        matrix(r, type_b, trans_b ? cols : depth, shared & SHARED_B ? 1 : heads, trans_b ? (int)depth : cols,
               joined ? trans_b != 0 : test_below(r, 2), joined ? 0 : test_below(r, 4));
    p.out = matrix(r, type_out, rows, shared & ADDED ? 1 : heads, cols, test_below(r, 2), test_below(r, 4));
    if (!(flags & UPIPE_GEMM_ACCUMULATE)) /* an old NaN must not survive */
        memset(p.out.data, 0xff, view_bytes(p.out));
    p.before = twin(p.out), p.want = twin(p.out);
    return p;
}

/* What it is, until the next call. */
static inline const char *product_text(const gemm_product *p)
{
    static char text[200];
    snprintf(text, sizeof text, "%lld x %d x %lld, %d and %d heads, shared %d, flags %d, %s x %s -> %s",
             (long long)p->out.n, p->out.d, (long long)p->depth, p->a.h, p->b.h, p->shared, p->flags,
             upipe_dtype_name(p->a.dtype), upipe_dtype_name(p->b.dtype), upipe_dtype_name(p->out.dtype));
    return text;
}

/* Products that are added up, one a matrix of a and of b. */
static inline int gemm_added(const gemm_product *p)
{
    return p->out.h == 1 ? p->a.h : 1;
}

static inline float chain_step(float x, float y, float sum)
{
#if UPIPE_CPU_AVX2 || UPIPE_CPU_NEON
    return fmaf(x, y, sum);
#else
    return x * y + sum;
#endif
}

/* Element (i, n) of matrix j of out: += terms k0 .. k1 - 1 of product `head`, one chain from 0; exactly too, with
 * their size. */
static inline float chain(const gemm_product *p, int64_t i, int64_t n, int j, int head, int64_t k0,
                          int64_t k1, double *exact, double *size)
{
    const int trans_a = p->flags & UPIPE_GEMM_TRANS_A, trans_b = p->flags & UPIPE_GEMM_TRANS_B;
    const int ja = p->a.h > 1 ? j + head : 0, jb = p->b.h > 1 ? j + head : 0;
    float sum = 0;
    for (int64_t k = k0; k < k1; ++k) {
        double x = trans_a ? get(p->a, k, ja, i) : get(p->a, i, ja, k);
        double y = trans_b ? get(p->b, n, jb, k) : get(p->b, k, jb, n);
        *exact += x * y;
        *size += fabs(x * y);
        sum = chain_step((float)x, (float)y, sum);
    }
    return sum;
}

/* Writes what sums of sum_depth terms, added up, give into p->want; returns false if out leaves the f64 bound. */
static inline int reference(const gemm_product *p)
{
    const int64_t step = p->sum_depth > 0 && p->sum_depth < p->depth ? p->sum_depth : p->depth;
    int ok = 1;
    for (int j = 0; j < p->out.h; ++j)
        for (int64_t i = 0; i < p->out.n; ++i)
            for (int64_t n = 0; n < p->out.d; ++n) {
                double exact = 0, size = 0, got, bound;
                float sum = p->depth > 0 ? -0.0f : 0; /* -0 + x is x, bit by bit */
                if (p->flags & UPIPE_GEMM_ACCUMULATE) {
                    exact = get(p->before, i, j, n);
                    size = fabs(exact);
                    sum = (float)exact;
                }
                for (int head = 0; head < gemm_added(p); ++head)
                    for (int64_t k = 0; k < p->depth; k += step)
                        sum += chain(p, i, n, j, head, k, k + step < p->depth ? k + step : p->depth, &exact,
                                     &size);
                upipe_cpu_put(upipe_view_at(p->want, i, j), p->want.dtype, n, sum);
                got = get(p->out, i, j, n);
                bound = (double)(p->depth * gemm_added(p) + 2) * 0x1.02p-24 * size;
                if (p->out.dtype == UPIPE_BF16) bound += (fabs(exact) + bound) * 0x1.01p-8 + 0x1p-133;
                if (!(fabs(got - exact) <= bound)) {
                    CHECK_SAY(0, "out[%lld][%d][%lld] is %.9g, exactly %.9g, bound %g", (long long)i, j,
                              (long long)n, got, exact, bound);
                    ok = 0;
                }
            }
    return ok;
}

/* ---- refusals ---- */

/* What every table refuses; work: enough for the little product, or NULL. */
static inline void check_gemm_statuses(upipe_ctx *c, void *work, size_t bytes)
{
    static float buf[64];
    const upipe_view out = upipe_view_packed(buf, UPIPE_F32, 3, 1, 4);
    const upipe_view a = upipe_view_packed(buf, UPIPE_F32, 3, 1, 5);
    const upipe_view b = upipe_view_packed(buf, UPIPE_F32, 5, 1, 4);
    upipe_view v;
#define REFUSED(x, y, z, flags, status, words) \
    CHECK_REFUSED(c->ops->gemm(c, x, y, z, flags, work, bytes), UPIPE_ERR_##status, c->err, words)
    REFUSED(out, a, b, UPIPE_GEMM_TRANS_B, ARG, "op(b) is 4 x 5");
    REFUSED(out, a, b, UPIPE_GEMM_TRANS_A, ARG, "op(a) is 5 x 3");
    REFUSED(out, a, (v = b, v.n = 6, v), 0, ARG, "op(b) is 6 x 4");
    REFUSED(out, (v = a, v.h = 2, v), b, 0, ARG, "2 matrices of a and 1 of b for 1 of out");
    REFUSED((v = out, v.h = 0, v), a, b, 0, ARG, "out [3][0][4]");
    REFUSED((v = out, v.dtype = UPIPE_BF16, v), a, b, UPIPE_GEMM_ACCUMULATE, UNSUPPORTED,
            "accumulates into f32 only");
    REFUSED(out, a, b, 8, UNSUPPORTED, "unknown flags 0x8");
    REFUSED(out, (v = a, v.data = NULL, v), b, 0, ARG, "a is NULL");
    REFUSED(out, (v = a, v.dtype = (upipe_dtype)7, v), b, 0, UNSUPPORTED, "storage type 0, 7 or 0");
#undef REFUSED
}

#endif

/* gemm.h -- matrices with gaps, and the product that a table's gemm must compute
 *
 * Matrices lie in exact allocations (the sanitizer sees a read past the end) with gaps full of NaNs (a result
 * shows a read inside).
 */
#ifndef UPIPE_TEST_GEMM_H
#define UPIPE_TEST_GEMM_H

#include "test.h"

#include "upipe/upipe_ops.h"
#include "upipe/cpu/upipe_cpu_simd.h"

/* ---- matrices with gaps ---- */

enum { HEADS_OUTER, HEADS_INNER }; /* [h][n][d] or [n][h][d] */

static size_t view_bytes(upipe_view v)
{
    int64_t last = (v.n - 1) * v.n_step + (v.h - 1) * v.h_step + v.d;
    return v.n > 0 && v.d > 0 ? (size_t)last * upipe_dtype_bytes(v.dtype) : 0;
}

static double element(upipe_view v, int64_t i, int j, int64_t k)
{
    return (double)upipe_cpu_get(upipe_view_at(v, i, j), v.dtype, k);
}

/* All bytes 0xff are a NaN in every type. */
static upipe_view matrix(test_rng *r, upipe_dtype dtype, int64_t n, int h, int d, int layout, int gap)
{
    upipe_view v;
    int64_t i, k;
    int j;
    v = layout == HEADS_OUTER ? upipe_view_make(NULL, dtype, n, d + gap, h, n * (d + gap) + gap, d)
                              : upipe_view_make(NULL, dtype, n, (int64_t)h * (d + gap), h, d + gap, d);
    v.data = malloc(view_bytes(v) + 1);
    memset(v.data, 0xff, view_bytes(v) + 1);
    for (i = 0; i < n; ++i)
        for (j = 0; j < h; ++j)
            for (k = 0; k < d; ++k) upipe_cpu_put(upipe_view_at(v, i, j), dtype, k, (float)test_normal(r));
    return v;
}

static void *copy_of(const void *data, size_t bytes)
{
    void *p = malloc(bytes + 1);
    memcpy(p, data, bytes);
    return p;
}

/* ---- one product ---- */

typedef struct gemm_product {
    upipe_view out, a, b;
    int64_t depth;
    int64_t sum_depth; /* terms of one chain; 0 = the whole depth */
    int flags;
} gemm_product;

/* Products that are added up, one a matrix of a and of b. */
static int gemm_added(const gemm_product *p)
{
    return p->out.h == 1 ? p->a.h : 1;
}

static float chain_step(float x, float y, float sum)
{
#if UPIPE_CPU_AVX2 || UPIPE_CPU_NEON
    return fmaf(x, y, sum);
#else
    return x * y + sum;
#endif
}

/* Element (i, n) of matrix j of out: += terms k0 .. k1 - 1 of product `head`, one chain from 0; exactly too, with
 * their size. */
static float chain(const gemm_product *p, int64_t i, int64_t n, int j, int head, int64_t k0, int64_t k1,
                   double *exact, double *size)
{
    const int trans_a = p->flags & UPIPE_GEMM_TRANS_A, trans_b = p->flags & UPIPE_GEMM_TRANS_B;
    const int ja = p->a.h > 1 ? j + head : 0, jb = p->b.h > 1 ? j + head : 0;
    float sum = 0;
    int64_t k;
    for (k = k0; k < k1; ++k) {
        double x = trans_a ? element(p->a, k, ja, i) : element(p->a, i, ja, k);
        double y = trans_b ? element(p->b, n, jb, k) : element(p->b, k, jb, n);
        *exact += x * y;
        *size += fabs(x * y);
        sum = chain_step((float)x, (float)y, sum);
    }
    return sum;
}

/* Writes what sums of sum_depth terms, added up, give into `want`, a copy of out as it was; returns false if out leaves the f64
 * bound. */
static int reference(const gemm_product *p, upipe_view before, upipe_view want)
{
    const int64_t step = p->sum_depth > 0 && p->sum_depth < p->depth ? p->sum_depth : p->depth;
    int64_t i, k, n;
    int j, head, ok = 1;
    for (j = 0; j < p->out.h; ++j)
        for (i = 0; i < p->out.n; ++i)
            for (n = 0; n < p->out.d; ++n) {
                double exact = 0, size = 0, got, bound;
                float sum = p->depth > 0 ? -0.0f : 0; /* -0 + x is x, bit by bit */
                if (p->flags & UPIPE_GEMM_ACCUMULATE) {
                    exact = element(before, i, j, n);
                    size = fabs(exact);
                    sum = (float)exact;
                }
                for (head = 0; head < gemm_added(p); ++head)
                    for (k = 0; k < p->depth; k += step)
                        sum += chain(p, i, n, j, head, k, k + step < p->depth ? k + step : p->depth, &exact,
                                     &size);
                upipe_cpu_put(upipe_view_at(want, i, j), want.dtype, n, sum);
                got = element(p->out, i, j, n);
                bound = (double)(p->depth * gemm_added(p) + 2) * 0x1.02p-24 * size;
                if (p->out.dtype == UPIPE_BF16) bound += (fabs(exact) + bound) * 0x1.01p-8 + 0x1p-133;
                if (p->out.dtype == UPIPE_F16) bound += (fabs(exact) + bound) * 0x1.01p-11 + 0x1p-25;
                if (!(fabs(got - exact) <= bound)) {
                    CHECK_SAY(0, "out[%lld][%d][%lld] is %.9g, exactly %.9g, bound %g", (long long)i, j,
                              (long long)n, got, exact, bound);
                    ok = 0;
                }
            }
    return ok;
}

#endif

/* upipe_cpu_rows.h -- copies, casts, and all that works row by row        backend cpu, includes cpu_simd, check
 *
 * Fills the table's copy, zero, cast, rope, rmsnorm, rmsnorm_bwd, rowdot and sum. Links with the math
 * library.
 *
 *     upi_cpu_rope(&ctx, &r)      x [count][tokens][heads][d], in place; angles once a token, for all heads
 *     upi_cpu_rmsnorm(...)        y = norm of x [tokens][heads][d], in place or not
 *     upi_cpu_rowdot(...)         [tokens][heads] = a . b
 *
 * A row is d contiguous elements, walked eight at a time; its last few ride in a vector filled up with zeros,
 * through the same instructions. So the bits of a row depend on its values alone: not on steps, nor on its
 * neighbours, nor on how tokens are split over calls. Arithmetic is f32, rounded once where a bf16 is stored.
 */
#ifndef UPIPE_CPU_ROWS_H
#define UPIPE_CPU_ROWS_H

#include <math.h>

#include "upipe_cpu_simd.h"
#include "../upipe_check.h"

enum { UPI_ROPE_ANCHOR = 64 }; /* positions between angles that come from sin and cos */

/* ---- eight elements, or the last few, of a row ---- */

/* Elements i .. i+7 of a row of d, zeros behind its end. */
UPI_INLINE upi_f8 upi_row_get(const void *row, upipe_dtype dtype, int64_t i, int64_t d)
{
    float t[UPI_LANES] = {0, 0, 0, 0, 0, 0, 0, 0};
    int64_t k;
    if (i + UPI_LANES <= d) return upi_f8_get(row, dtype, i);
    for (k = 0; i + k < d; ++k) t[k] = upi_f1_get(row, dtype, i + k);
    return upi_f8_load(t);
}

UPI_INLINE void upi_row_put(void *row, upipe_dtype dtype, int64_t i, int64_t d, upi_f8 v)
{
    float t[UPI_LANES];
    int64_t k;
    if (i + UPI_LANES <= d) {
        upi_f8_put(row, dtype, i, v);
        return;
    }
    upi_f8_store(t, v);
    for (k = 0; i + k < d; ++k) upi_f1_put(row, dtype, i + k, t[k]);
}

/* ---- entries of the table ---- */

/* Every entry returns when it is done. */
UPIPE_API upipe_status upi_cpu_sync(upipe_ctx *c)
{
    (void)c;
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_cpu_copy(upipe_ctx *c, void *dst, const void *src, size_t bytes)
{
    UPIPE_TRY(upi_copy_check(c, dst, src, bytes));
    if (dst != NULL && src != NULL) memcpy(dst, src, bytes);
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_cpu_zero(upipe_ctx *c, void *dst, size_t bytes)
{
    UPIPE_TRY(upi_zero_check(c, dst, bytes));
    if (dst != NULL) memset(dst, 0, bytes);
    return UPIPE_OK;
}

/* Rows that follow each other without a gap in both views are one long row. */
UPI_INLINE void upi_cast_rows(upipe_view dst, upipe_view src, int64_t *rows, int64_t *heads, int64_t *d)
{
    *rows = dst.n;
    *heads = dst.h;
    *d = dst.d;
    if (dst.h > 1 && (dst.h_step != dst.d || src.h_step != src.d)) return;
    *d *= *heads;
    *heads = 1;
    if (dst.n > 1 && (dst.n_step != *d || src.n_step != *d)) return;
    *d *= *rows;
    *rows = 1;
}

UPIPE_API upipe_status upi_cpu_cast(upipe_ctx *c, upipe_view dst, upipe_view src)
{
    int64_t rows, heads, d, i, j, k;
    UPIPE_TRY(upi_cast_check(c, dst, src));
    if (dst.n == 0) return UPIPE_OK;
    upi_cast_rows(dst, src, &rows, &heads, &d);
    for (i = 0; i < rows; ++i)
        for (j = 0; j < heads; ++j) {
            void *to = upipe_view_at(dst, i, (int32_t)j);
            const void *from = upipe_view_at(src, i, (int32_t)j);
            if (dst.dtype == src.dtype)
                memcpy(to, from, (size_t)d * upipe_dtype_bytes(dst.dtype));
            else
                for (k = 0; k < d; k += UPI_LANES)
                    upi_row_put(to, dst.dtype, k, d, upi_row_get(from, src.dtype, k, d));
        }
    return UPIPE_OK;
}

/* Angles of one position: cos and sin of position * theta^(-2p/d) for the pairs p < d/2.
 *
 * In f64. sin and cos are called at multiples of 64 only; from there each position turns the one before it by
 * the frequency, which costs four products a pair and adds an error below 3e-14. The anchors are absolute
 * positions, so a position has the same angles whatever token a call starts with.
 */
typedef struct upi_rope_angles {
    double cos_now[UPI_ROPE_DIM_MAX / 2], sin_now[UPI_ROPE_DIM_MAX / 2];   /* of `position` */
    double cos_step[UPI_ROPE_DIM_MAX / 2], sin_step[UPI_ROPE_DIM_MAX / 2]; /* of one position */
    double frequency[UPI_ROPE_DIM_MAX / 2];                                /* radians a position */
    float cos_row[UPI_ROPE_DIM_MAX / 2], sin_row[UPI_ROPE_DIM_MAX / 2]; /* rounded; sin negative if inverse */
    int64_t position;
    int pairs;
} upi_rope_angles;

UPI_CPU_KERNEL void upi_rope_anchor(upi_rope_angles *g, int64_t position)
{
    int p;
    for (p = 0; p < g->pairs; ++p) {
        g->cos_now[p] = cos((double)position * g->frequency[p]);
        g->sin_now[p] = sin((double)position * g->frequency[p]);
    }
    g->position = position;
}

UPI_CPU_KERNEL void upi_rope_advance(upi_rope_angles *g)
{
    int p;
    for (p = 0; p < g->pairs; ++p) {
        double cos_p = g->cos_now[p], sin_p = g->sin_now[p];
        g->cos_now[p] = cos_p * g->cos_step[p] - sin_p * g->sin_step[p];
        g->sin_now[p] = sin_p * g->cos_step[p] + cos_p * g->sin_step[p];
    }
    ++g->position;
}

UPI_INLINE void upi_rope_begin(upi_rope_angles *g, const upipe_rope *r)
{
    int p;
    memset(g, 0, sizeof *g); /* pairs behind the last are read as whole vectors */
    g->pairs = r->x.d / 2;
    for (p = 0; p < g->pairs; ++p) {
        g->frequency[p] = pow(r->theta, -2.0 * p / r->x.d);
        g->cos_step[p] = cos(g->frequency[p]);
        g->sin_step[p] = sin(g->frequency[p]);
    }
    upi_rope_anchor(g, r->pos0 / UPI_ROPE_ANCHOR * UPI_ROPE_ANCHOR);
    while (g->position < r->pos0) upi_rope_advance(g);
}

UPI_INLINE void upi_rope_next(upi_rope_angles *g)
{
    if ((g->position + 1) % UPI_ROPE_ANCHOR == 0)
        upi_rope_anchor(g, g->position + 1);
    else
        upi_rope_advance(g);
}

/* Turns the pairs (x, y) of eight angles. Spelled out as fused operations, lest the compiler choose which
 * product of a difference to fuse, and choose differently in two places. */
UPI_INLINE void upi_rope_turn(const upi_rope_angles *g, int p, upi_f8 *x, upi_f8 *y)
{
    upi_f8 c = upi_f8_load(g->cos_row + p), s = upi_f8_load(g->sin_row + p), x0 = *x;
    *x = upi_f8_fma(x0, c, upi_f8_mul(*y, upi_f8_sub(upi_f8_zero(), s)));
    *y = upi_f8_fma(x0, s, upi_f8_mul(*y, c));
}

UPI_INLINE void upi_rope_row(const upi_rope_angles *g, void *row, upipe_dtype dtype, int interleaved)
{
    int p, i;
    for (p = 0; p < g->pairs; p += UPI_LANES) {
        upi_f8 x, y;
        if (interleaved) {
            float pair[2 * UPI_LANES], first[UPI_LANES], second[UPI_LANES];
            upi_f8_store(pair, upi_row_get(row, dtype, 2 * p, 2 * g->pairs));
            upi_f8_store(pair + UPI_LANES, upi_row_get(row, dtype, 2 * p + UPI_LANES, 2 * g->pairs));
            for (i = 0; i < UPI_LANES; ++i) {
                first[i] = pair[2 * i];
                second[i] = pair[2 * i + 1];
            }
            x = upi_f8_load(first);
            y = upi_f8_load(second);
            upi_rope_turn(g, p, &x, &y);
            upi_f8_store(first, x);
            upi_f8_store(second, y);
            for (i = 0; i < UPI_LANES; ++i) {
                pair[2 * i] = first[i];
                pair[2 * i + 1] = second[i];
            }
            upi_row_put(row, dtype, 2 * p, 2 * g->pairs, upi_f8_load(pair));
            upi_row_put(row, dtype, 2 * p + UPI_LANES, 2 * g->pairs, upi_f8_load(pair + UPI_LANES));
        } else {
            void *half = (char *)row + (size_t)g->pairs * upipe_dtype_bytes(dtype);
            x = upi_row_get(row, dtype, p, g->pairs);
            y = upi_row_get(half, dtype, p, g->pairs);
            upi_rope_turn(g, p, &x, &y);
            upi_row_put(row, dtype, p, g->pairs, x);
            upi_row_put(half, dtype, p, g->pairs, y);
        }
    }
}

UPIPE_API upipe_status upi_cpu_rope(upipe_ctx *c, const upipe_rope *r)
{
    upi_rope_angles g;
    int64_t token, block;
    int32_t head;
    int p;
    UPIPE_TRY(upi_rope_check(c, r));
    if (r->count == 0 || r->x.n == 0) return UPIPE_OK;
    upi_rope_begin(&g, r);
    for (token = 0; token < r->x.n; ++token) {
        if (token > 0) upi_rope_next(&g);
        for (p = 0; p < g.pairs; ++p) {
            g.cos_row[p] = (float)g.cos_now[p];
            g.sin_row[p] = (float)(r->inverse ? -g.sin_now[p] : g.sin_now[p]);
        }
        for (block = 0; block < r->count; ++block)
            for (head = 0; head < r->x.h; ++head) {
                char *row = (char *)upipe_view_at(r->x, token, head) +
                            block * r->step * (int64_t)upipe_dtype_bytes(r->x.dtype);
                upi_rope_row(&g, row, r->x.dtype, r->interleaved);
            }
    }
    return UPIPE_OK;
}

/* Sum of the products of two rows. Eight partial sums, then their sum: one order for every row of d
 * elements. */
UPI_INLINE float upi_row_dot(const void *a, upipe_dtype a_type, const void *b, upipe_dtype b_type, int64_t d)
{
    upi_f8 sum = upi_f8_zero();
    int64_t k;
    for (k = 0; k < d; k += UPI_LANES)
        sum = upi_f8_fma(upi_row_get(a, a_type, k, d), upi_row_get(b, b_type, k, d), sum);
    return upi_f8_sum(sum);
}

/* 1 / sqrt(mean of the squares + eps) */
UPI_INLINE float upi_row_scale(const void *row, upipe_dtype dtype, int32_t d, float eps)
{
    return 1.0f / sqrtf(upi_row_dot(row, dtype, row, dtype, d) / (float)d + eps);
}

UPIPE_API upipe_status upi_cpu_rmsnorm(upipe_ctx *c, upipe_view y, upipe_view x, const float *gain, float eps)
{
    int64_t i, k;
    int32_t j;
    UPIPE_TRY(upi_rmsnorm_check(c, y, x, gain, eps));
    for (i = 0; i < x.n; ++i)
        for (j = 0; j < x.h; ++j) {
            const void *from = upipe_view_at(x, i, j);
            void *to = upipe_view_at(y, i, j);
            upi_f8 scale = upi_f8_set1(upi_row_scale(from, x.dtype, x.d, eps));
            for (k = 0; k < x.d; k += UPI_LANES) {
                upi_f8 unit = upi_f8_mul(upi_row_get(from, x.dtype, k, x.d), scale);
                upi_row_put(to, y.dtype, k, x.d, upi_f8_mul(unit, upi_row_get(gain, UPIPE_F32, k, x.d)));
            }
        }
    return UPIPE_OK;
}

/* With u = x * scale, the row of mean square 1:  dx = scale * (gain dy - u * mean(u gain dy)),  dgain +=
 * dy u. The first loop over a row only reads dy and x, so that dx may be either. */
UPIPE_API upipe_status upi_cpu_rmsnorm_bwd(upipe_ctx *c, upipe_view dx, upipe_view dy, upipe_view x,
                                           const float *gain, float eps, float *dgain, int accumulate)
{
    int64_t i, k;
    int32_t j;
    UPIPE_TRY(upi_rmsnorm_bwd_check(c, dx, dy, x, gain, eps, accumulate));
    for (i = 0; i < x.n; ++i)
        for (j = 0; j < x.h; ++j) {
            const void *from = upipe_view_at(x, i, j), *row = upipe_view_at(dy, i, j);
            void *to = upipe_view_at(dx, i, j);
            float *dg = dgain != NULL ? dgain + (int64_t)j * x.d : NULL;
            float one = upi_row_scale(from, x.dtype, x.d, eps);
            upi_f8 scale = upi_f8_set1(one), sum = upi_f8_zero(), minus_mean;
            for (k = 0; k < x.d; k += UPI_LANES) {
                upi_f8 unit = upi_f8_mul(upi_row_get(from, x.dtype, k, x.d), scale);
                upi_f8 grad = upi_row_get(row, dy.dtype, k, x.d);
                sum = upi_f8_fma(upi_f8_mul(grad, upi_row_get(gain, UPIPE_F32, k, x.d)), unit, sum);
                if (dg != NULL)
                    upi_row_put(dg, UPIPE_F32, k, x.d,
                                upi_f8_fma(grad, unit, upi_row_get(dg, UPIPE_F32, k, x.d)));
            }
            minus_mean = upi_f8_set1(-upi_f8_sum(sum) / (float)x.d);
            for (k = 0; k < x.d; k += UPI_LANES) {
                upi_f8 unit = upi_f8_mul(upi_row_get(from, x.dtype, k, x.d), scale);
                upi_f8 grad =
                    upi_f8_mul(upi_row_get(row, dy.dtype, k, x.d), upi_row_get(gain, UPIPE_F32, k, x.d));
                grad = upi_f8_mul(scale, upi_f8_fma(unit, minus_mean, grad));
                if (accumulate) grad = upi_f8_add(upi_row_get(to, dx.dtype, k, x.d), grad);
                upi_row_put(to, dx.dtype, k, x.d, grad);
            }
        }
    return UPIPE_OK;
}

/* Up to eight rows at a time, one in each lane, summed in the very order in which the attention backward
 * forms dO * V: chains of UPI_DOT_PIECE. Where a query sees one key alone O is V, delta cancels exactly, and
 * dQ is 0 as it should be.
 */
UPI_INLINE upi_f8 upi_row_dot8(upipe_view a, upipe_view b, int64_t i, int32_t j, int64_t rows)
{
    upi_f8 total = upi_f8_zero(), sum = upi_f8_zero(), at[UPI_LANES], bt[UPI_LANES];
    int64_t r, k;
    int l;
    for (k = 0; k < a.d; k += UPI_LANES) {
        for (r = 0; r < UPI_LANES; ++r) {
            at[r] = r < rows ? upi_row_get(upipe_view_at(a, i + r, j), a.dtype, k, a.d) : upi_f8_zero();
            bt[r] = r < rows ? upi_row_get(upipe_view_at(b, i + r, j), b.dtype, k, a.d) : upi_f8_zero();
        }
        upi_f8_transpose(at);
        upi_f8_transpose(bt);
        if (k % UPI_DOT_PIECE == 0) {
            total = k == UPI_DOT_PIECE ? sum : upi_f8_add(total, sum);
            sum = upi_f8_zero();
        }
        for (l = 0; l < UPI_LANES; ++l) sum = upi_f8_fma(at[l], bt[l], sum);
    }
    return a.d > UPI_DOT_PIECE ? upi_f8_add(total, sum) : sum;
}

UPIPE_API upipe_status upi_cpu_rowdot(upipe_ctx *c, upipe_view out, upipe_view a, upipe_view b)
{
    int64_t i, r;
    int32_t j;
    UPIPE_TRY(upi_rowdot_check(c, out, a, b));
    for (i = 0; i < a.n; i += UPI_LANES)
        for (j = 0; j < a.h; ++j) {
            int64_t rows = a.n - i < UPI_LANES ? a.n - i : (int64_t)UPI_LANES;
            float t[UPI_LANES];
            upi_f8_store(t, upi_row_dot8(a, b, i, j, rows));
            for (r = 0; r < rows; ++r) *(float *)upipe_view_at(out, i + r, j) = t[r];
        }
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_cpu_sum(upipe_ctx *c, upipe_view dst, const float *src, int64_t step, int count,
                                   int accumulate)
{
    int64_t i, k, packed = 0;
    int32_t j;
    int part;
    UPIPE_TRY(upi_sum_check(c, dst, src, count, accumulate));
    for (i = 0; i < dst.n; ++i)
        for (j = 0; j < dst.h; ++j, packed += dst.d) {
            void *row = upipe_view_at(dst, i, j);
            for (k = 0; k < dst.d; k += UPI_LANES) {
                upi_f8 sum = accumulate ? upi_row_get(row, UPIPE_F32, k, dst.d) : upi_f8_zero();
                for (part = 0; part < count; ++part)
                    sum = upi_f8_add(sum, upi_row_get(src + part * step + packed, UPIPE_F32, k, dst.d));
                upi_row_put(row, dst.dtype, k, dst.d, sum);
            }
        }
    return UPIPE_OK;
}

#endif

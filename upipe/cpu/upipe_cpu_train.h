/* upipe_cpu_train.h -- what a model needs around its attention        backend cpu, includes cpu_rows
 *
 * Fills the table's add, swiglu, swiglu_bwd, cross_entropy, embed, embed_bwd, total and adamw. Links with the
 * math library.
 *
 *     upi_cpu_swiglu(...)            y [n][h][d] = silu(gate) * up
 *     upi_cpu_cross_entropy(...)     logits [n][1][V] -> loss [n] and, if wanted, its gradient
 *     upi_cpu_embed(...)             x [n][1][D] = rows of table [V][1][D]
 *     upi_cpu_total(...)             one f64 number of a whole tensor
 *     upi_cpu_adamw(...)             w, m, v [n]
 *
 * As in upipe_cpu_rows.h every element goes through the same vector instructions, the last few of a row
 * padded, so its bits depend neither on steps nor on its place nor on how rows are split over calls.
 */
#ifndef UPIPE_CPU_TRAIN_H
#define UPIPE_CPU_TRAIN_H

#include "upipe_cpu_rows.h"

UPI_KERNELS_BEGIN

/* ---- rows: y += x, and the gated unit ---- */

UPI_CPU_KERNEL void upi_add_row(void *y, upipe_dtype y_type, const void *x, upipe_dtype x_type, int64_t d)
{
    int64_t k;
    for (k = 0; k < d; k += UPI_LANES)
        upi_row_put(y, y_type, k, d, upi_f8_add(upi_row_get(y, y_type, k, d), upi_row_get(x, x_type, k, d)));
}

/* s = 1 / (1 + e^-z) and rest = 1 - s, each to full relative precision. From e^-|z|, which neither overflows
 * nor needs a bound: it is exactly 0 beyond 88, and a NaN stays one. */
UPI_INLINE void upi_f8_sigmoid(upi_f8 z, upi_f8 *s, upi_f8 *rest)
{
    const upi_f8 one = upi_f8_set1(1.0f);
    upi_f8 below = upi_f8_min(z, upi_f8_sub(upi_f8_zero(), z)), e = upi_f8_exp(below);
    upi_f8 large = upi_f8_div(one, upi_f8_add(one, e)), small = upi_f8_mul(e, large);
    upi_mask8 negative = upi_f8_equal(below, z);
    *s = upi_f8_select(negative, small, large);
    *rest = upi_f8_select(negative, large, small);
}

UPI_CPU_KERNEL void upi_swiglu_row(void *y, upipe_dtype y_type, const void *gate, upipe_dtype gate_type,
                                   const void *up, upipe_dtype up_type, int64_t d)
{
    int64_t k;
    for (k = 0; k < d; k += UPI_LANES) {
        upi_f8 g = upi_row_get(gate, gate_type, k, d), s, rest;
        upi_f8_sigmoid(g, &s, &rest);
        upi_row_put(y, y_type, k, d, upi_f8_mul(upi_f8_mul(g, s), upi_row_get(up, up_type, k, d)));
    }
}

/* The slope s (1 + g (1 - s)) comes first: it lies within -0.1 .. 1.1 for any finite g. */
UPI_CPU_KERNEL void upi_swiglu_bwd_row(void *gate, upipe_dtype gate_type, void *up, upipe_dtype up_type,
                                       const void *dy, upipe_dtype dy_type, int64_t d)
{
    int64_t k;
    for (k = 0; k < d; k += UPI_LANES) {
        upi_f8 g = upi_row_get(gate, gate_type, k, d), u = upi_row_get(up, up_type, k, d), s, rest, slope;
        upi_f8 grad = upi_row_get(dy, dy_type, k, d);
        upi_f8_sigmoid(g, &s, &rest);
        slope = upi_f8_mul(s, upi_f8_fma(g, rest, upi_f8_set1(1.0f)));
        upi_row_put(gate, gate_type, k, d, upi_f8_mul(upi_f8_mul(slope, u), grad));
        upi_row_put(up, up_type, k, d, upi_f8_mul(upi_f8_mul(g, s), grad));
    }
}

/* ---- one row of logits ---- */

/* Logits k .. k+7, -inf behind the row's end. */
UPI_INLINE upi_f8 upi_logits_get(const float *row, int64_t k, int64_t d)
{
    upi_f8 v = upi_row_get(row, UPIPE_F32, k, d);
    if (k + UPI_LANES <= d) return v;
    return upi_f8_select(upi_lanes_above((int32_t)(d - k) - 1), upi_f8_set1(-INFINITY), v);
}

/* The greatest logit, NaNs left aside: they show in the sum. */
UPI_CPU_KERNEL float upi_logits_max(const float *row, int64_t d)
{
    upi_f8 most = upi_f8_set1(-INFINITY);
    float t[UPI_LANES];
    int64_t k;
    int l;
    for (k = 0; k < d; k += UPI_LANES) most = upi_f8_max(upi_logits_get(row, k, d), most);
    upi_f8_store(t, most);
    for (l = 1; l < UPI_LANES; ++l)
        if (t[l] > t[0]) t[0] = t[l];
    return t[0];
}

/* Sum of e^(logit - top) of all but the target. */
UPI_CPU_KERNEL float upi_logits_sum(const float *row, int64_t d, float top, int64_t target)
{
    const upi_f8 high = upi_f8_set1(top);
    upi_f8 sum = upi_f8_zero();
    int64_t k;
    for (k = 0; k < d; k += UPI_LANES) {
        upi_f8 e = upi_f8_exp(upi_f8_sub(upi_logits_get(row, k, d), high));
        if (k == target / UPI_LANES * UPI_LANES) {
            int32_t lane = (int32_t)(target - k);
            upi_f8 behind = upi_f8_select(upi_lanes_above(lane), e, upi_f8_zero());
            e = upi_f8_select(upi_lanes_above(lane - 1), behind, e);
        }
        sum = upi_f8_add(sum, e);
    }
    return upi_f8_sum(sum);
}

/* grad = factor * e^(logit - top); grad may be the row itself. */
UPI_CPU_KERNEL void upi_logits_grad(void *grad, upipe_dtype dtype, const float *row, int64_t d, float top,
                                    float factor)
{
    const upi_f8 high = upi_f8_set1(top), by = upi_f8_set1(factor);
    int64_t k;
    for (k = 0; k < d; k += UPI_LANES)
        upi_row_put(grad, dtype, k, d,
                    upi_f8_mul(upi_f8_exp(upi_f8_sub(upi_logits_get(row, k, d), high)), by));
}

/* ---- sums and the optimizer ---- */

/* Adds element k, or its square, to partial sum k mod 8. The square of an f32 is exact in f64. */
UPI_CPU_KERNEL void upi_total_row(double *sums, const void *row, upipe_dtype dtype, int64_t d, int squares)
{
    float t[UPI_LANES];
    int64_t k;
    int l;
    for (k = 0; k < d; k += UPI_LANES) {
        upi_f8_store(t, upi_row_get(row, dtype, k, d));
        for (l = 0; l < UPI_LANES; ++l) sums[l] += squares ? (double)t[l] * (double)t[l] : (double)t[l];
    }
}

UPI_CPU_KERNEL void upi_adamw_run(const upipe_adamw *a)
{
    const upi_f8 m_keep = upi_f8_set1((float)a->beta1), m_take = upi_f8_set1((float)(1 - a->beta1));
    const upi_f8 v_keep = upi_f8_set1((float)a->beta2), v_take = upi_f8_set1((float)(1 - a->beta2));
    const upi_f8 m_scale = upi_f8_set1((float)(1 / (1 - pow(a->beta1, (double)a->step))));
    const upi_f8 v_scale = upi_f8_set1((float)(1 / (1 - pow(a->beta2, (double)a->step))));
    const upi_f8 g_scale = upi_f8_set1((float)a->grad_scale), eps = upi_f8_set1((float)a->eps);
    const upi_f8 minus_rate = upi_f8_set1((float)-a->rate), decay = upi_f8_set1((float)a->decay);
    int64_t i;
    for (i = 0; i < a->n; i += UPI_LANES) {
        upi_f8 g = upi_f8_mul(upi_row_get(a->g, UPIPE_F32, i, a->n), g_scale);
        upi_f8 w = upi_row_get(a->w, UPIPE_F32, i, a->n), m, v, step;
        m = upi_f8_fma(m_keep, upi_row_get(a->m, UPIPE_F32, i, a->n), upi_f8_mul(m_take, g));
        v = upi_f8_fma(v_keep, upi_row_get(a->v, UPIPE_F32, i, a->n), upi_f8_mul(upi_f8_mul(v_take, g), g));
        step = upi_f8_div(upi_f8_mul(m, m_scale), upi_f8_add(upi_f8_sqrt(upi_f8_mul(v, v_scale)), eps));
        w = upi_f8_fma(minus_rate, upi_f8_fma(decay, w, step), w);
        upi_row_put(a->m, UPIPE_F32, i, a->n, m);
        upi_row_put(a->v, UPIPE_F32, i, a->n, v);
        upi_row_put(a->w, UPIPE_F32, i, a->n, w);
        if (a->copy != NULL) upi_row_put(a->copy, a->copy_dtype, i, a->n, w);
    }
}

UPI_KERNELS_END

/* ---- entries of the table ---- */

UPIPE_API upipe_status upi_cpu_add(upipe_ctx *c, upipe_view y, upipe_view x)
{
    int64_t i;
    int32_t j;
    UPIPE_TRY(upi_add_check(c, y, x));
    for (i = 0; i < y.n; ++i)
        for (j = 0; j < y.h; ++j)
            upi_add_row(upipe_view_at(y, i, j), y.dtype, upipe_view_at(x, i, j), x.dtype, y.d);
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_cpu_swiglu(upipe_ctx *c, upipe_view y, upipe_view gate, upipe_view up)
{
    int64_t i;
    int32_t j;
    UPIPE_TRY(upi_swiglu_check(c, y, gate, up));
    for (i = 0; i < y.n; ++i)
        for (j = 0; j < y.h; ++j)
            upi_swiglu_row(upipe_view_at(y, i, j), y.dtype, upipe_view_at(gate, i, j), gate.dtype,
                           upipe_view_at(up, i, j), up.dtype, y.d);
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_cpu_swiglu_bwd(upipe_ctx *c, upipe_view gate, upipe_view up, upipe_view dy)
{
    int64_t i;
    int32_t j;
    UPIPE_TRY(upi_swiglu_bwd_check(c, gate, up, dy));
    for (i = 0; i < dy.n; ++i)
        for (j = 0; j < dy.h; ++j)
            upi_swiglu_bwd_row(upipe_view_at(gate, i, j), gate.dtype, upipe_view_at(up, i, j), up.dtype,
                               upipe_view_at(dy, i, j), dy.dtype, dy.d);
    return UPIPE_OK;
}

/* The row's loss; its gradient where grad is not NULL.
 *
 * With the target t apart from the others, 1 - p[t] = others / sum: neither the gradient of a target whose
 * probability is almost 1 nor its loss, log(1 + others) where it is the greatest, is left to a difference.
 */
UPI_INLINE float upi_cross_entropy_row(const upipe_cross_entropy *x, int64_t i, void *grad)
{
    const float *row = (const float *)upipe_view_at(x->logits, i, 0);
    int64_t d = x->logits.d, target = x->targets[i];
    float top = upi_logits_max(row, d), others = upi_logits_sum(row, d, top, target), at = row[target], sum;
    float t[UPI_LANES];
    upi_f8_store(t, upi_f8_exp(upi_f8_set1(at - top)));
    sum = others + t[0];
    if (grad != NULL) {
        upi_logits_grad(grad, x->grad.dtype, row, d, top, x->scale / sum);
        upi_f1_put(grad, x->grad.dtype, target, -(x->scale * (others / sum)));
    }
    return (at == top ? log1pf(others) : logf(sum)) + (top - at);
}

UPIPE_API upipe_status upi_cpu_cross_entropy(upipe_ctx *c, const upipe_cross_entropy *x)
{
    int64_t i;
    UPIPE_TRY(upi_cross_entropy_check(c, x));
    for (i = 0; i < x->logits.n; ++i)
        if (x->targets[i] >= x->logits.d)
            return upi_fail(&c->err, UPIPE_ERR_ARG, "cross_entropy: target %d of row %lld, of %d columns",
                            x->targets[i], (long long)i, x->logits.d);
    for (i = 0; i < x->logits.n; ++i) {
        void *grad = x->grad.data != NULL ? upipe_view_at(x->grad, i, 0) : NULL;
        if (x->targets[i] >= 0)
            x->loss[i] = upi_cross_entropy_row(x, i, grad);
        else {
            x->loss[i] = 0;
            if (grad != NULL) memset(grad, 0, (size_t)x->grad.d * upipe_dtype_bytes(x->grad.dtype));
        }
    }
    return UPIPE_OK;
}

/* All tokens within 0 .. rows-1. */
UPIPE_API upipe_status upi_tokens_check(upipe_ctx *c, const char *call, const int32_t *tokens, int64_t n,
                                        int64_t rows)
{
    int64_t i;
    for (i = 0; i < n; ++i)
        if (tokens[i] < 0 || tokens[i] >= rows)
            return upi_fail(&c->err, UPIPE_ERR_ARG, "%s: token %d of row %lld, of a table of %lld rows", call,
                            tokens[i], (long long)i, (long long)rows);
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_cpu_embed(upipe_ctx *c, upipe_view x, upipe_view table, const int32_t *tokens)
{
    int64_t i;
    UPIPE_TRY(upi_embed_check(c, "embed", x, table, tokens));
    UPIPE_TRY(upi_tokens_check(c, "embed", tokens, x.n, table.n));
    for (i = 0; i < x.n; ++i)
        UPIPE_TRY(upi_cpu_cast(c, upipe_view_rows(x, i, 1), upipe_view_rows(table, tokens[i], 1)));
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_cpu_embed_bwd(upipe_ctx *c, upipe_view dtable, upipe_view dx,
                                         const int32_t *tokens)
{
    int64_t i;
    UPIPE_TRY(upi_embed_bwd_check(c, dtable, dx, tokens));
    UPIPE_TRY(upi_tokens_check(c, "embed_bwd", tokens, dx.n, dtable.n));
    for (i = 0; i < dx.n; ++i)
        upi_add_row(upipe_view_at(dtable, tokens[i], 0), UPIPE_F32, upipe_view_at(dx, i, 0), dx.dtype, dx.d);
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_cpu_total(upipe_ctx *c, double *out, upipe_view x, int squares)
{
    double s[UPI_LANES] = {0, 0, 0, 0, 0, 0, 0, 0};
    int64_t i;
    int32_t j;
    UPIPE_TRY(upi_total_check(c, out, x));
    for (i = 0; i < x.n; ++i)
        for (j = 0; j < x.h; ++j) upi_total_row(s, upipe_view_at(x, i, j), x.dtype, x.d, squares);
    *out = ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_cpu_adamw(upipe_ctx *c, const upipe_adamw *a)
{
    UPIPE_TRY(upi_adamw_check(c, a));
    upi_adamw_run(a);
    return UPIPE_OK;
}

#endif

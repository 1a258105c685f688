/* upipe_cpu_train.h -- what a model needs around its attention
 *
 * Fills the table's add, scale, gate, gate_bwd, cross_entropy, embed, embed_bwd, bias_bwd, total and adamw. Links with
 * the math library.
 *
 *     upi_cpu_gate(...)              y [n][h][d] = kind(gate) * up
 *     upi_cpu_cross_entropy(...)     logits [n][1][V] -> loss [n] and, if wanted, its gradient
 *     upi_cpu_embed(...)             x [n][1][D] = rows of table [V][1][D]
 *     upi_cpu_total(...)             one f64 number of a whole tensor
 *     upi_cpu_adamw(...)             w, m, v [n]
 *
 * As in upipe_cpu_rows.h every element goes through the same vector instructions, the last few of a row
 * padded, so its bits depend neither on strides nor on its place nor on how rows are split over calls or shared
 * among threads.
 */
#ifndef UPIPE_CPU_TRAIN_H
#define UPIPE_CPU_TRAIN_H

#include "upipe_cpu_rows.h"

enum {
    UPI_EMBED_COLUMNS = 256, /* of a strip of embed_bwd, at least */
    UPI_LOGITS_EACH = 2048,  /* logits whose exponentials are one sum; a multiple of UPI_ROW_SUMS */
    UPI_TOTAL_PIECE = 8192,  /* elements of one partial sum of total, or a row that is no longer */
    UPI_TOTAL_SUMS = 16,     /* sums that such a piece is added up in, element k in sum k mod 16 */
    UPI_TOTAL_PARTS = 256,   /* partial sums that are kept until they are added up */
    UPI_BIAS_STRIP = 64,     /* columns of a strip of bias_bwd: a multiple */
    UPI_ADAMW_PIECE = 64
};

UPI_KERNELS_BEGIN

/* ---- element by element: y += x, y = factor * x, and the gated unit ---- */

UPI_INLINE void upi_add_row(void *y, upipe_dtype y_type, const void *x, upipe_dtype x_type, int64_t d)
{
    UPI_ROW_STEPS(
        k, n, d,
        upi_row_put(y, y_type, k, n, upi_fw_add(upi_row_get(y, y_type, k, n), upi_row_get(x, x_type, k, n))));
}

UPI_INLINE void upi_add_rows(const upi_flat *f, int64_t first, int64_t last, upipe_dtype y, upipe_dtype x)
{
    int64_t i, j;
    for (i = first; i < last; ++i)
        for (j = 0; j < f->heads; ++j)
            upi_add_row(upi_flat_at(f, 0, i, j), y, upi_flat_at(f, 1, i, j), x, upi_flat_length(f, i));
}

UPI_CPU_KERNEL void upi_add_run(const void *call, int64_t first, int64_t last)
{
    const upi_flat *f = (const upi_flat *)call;
    UPI_WITH_TYPES(y, f->v[0].dtype, x, f->v[1].dtype, upi_add_rows(f, first, last, y, x));
}

/* Views: y, x. */
typedef struct upi_scaling {
    upi_flat flat;
    float factor;
} upi_scaling;

UPI_INLINE void upi_scale_rows(const upi_flat *f, int64_t first, int64_t last, upipe_dtype y_type,
                               upipe_dtype x_type, upi_fw factor)
{
    int64_t i, j;
    for (i = first; i < last; ++i)
        for (j = 0; j < f->heads; ++j) {
            char *y = upi_flat_at(f, 0, i, j), *x = upi_flat_at(f, 1, i, j);
            UPI_ROW_STEPS(k, n, upi_flat_length(f, i),
                          upi_row_put(y, y_type, k, n, upi_fw_mul(upi_row_get(x, x_type, k, n), factor)));
        }
}

UPI_CPU_KERNEL void upi_scale_run(const void *call, int64_t first, int64_t last)
{
    const upi_scaling *s = (const upi_scaling *)call;
    UPI_WITH_TYPES(y, s->flat.v[0].dtype, x, s->flat.v[1].dtype,
                   upi_scale_rows(&s->flat, first, last, y, x, upi_fw_set1(s->factor)));
}

/* s = 1 / (1 + e^-z) and rest = 1 - s, each to full relative precision. From e^-|z|, which neither overflows
 * nor needs a bound: it is exactly 0 beyond 88, and a NaN stays one. */
UPI_INLINE void upi_fw_sigmoid(upi_fw z, upi_fw *s, upi_fw *rest)
{
    const upi_fw one = upi_fw_set1(1.0f);
    upi_fw below = upi_fw_min(z, upi_fw_sub(upi_fw_zero(), z)), e = upi_fw_exp(below);
    upi_fw large = upi_fw_div(one, upi_fw_add(one, e)), small = upi_fw_mul(e, large);
    upi_maskw negative = upi_fw_equal(below, z);
    *s = upi_fw_select(negative, small, large);
    *rest = upi_fw_select(negative, large, small);
}

/* A gate's activation and its slope. sigmoid: s and s (1 - s). The others are g * s. silu: s is the sigmoid of g; its
 * slope s (1 + g (1 - s)) lies within -0.1 .. 1.1 for any finite g. gelu: that of 2u, whose slope is 2u'. Beyond 100 s is
 * 0 or 1, whatever g is, and powers of g could overflow; a NaN stays one. */
UPI_INLINE void upi_fw_gate(upi_fw g, upipe_gate_kind kind, upi_fw *value, upi_fw *slope)
{
    const upi_fw one = upi_fw_set1(1.0f);
    upi_fw near, square, s, rest, grows;
    if (kind != UPIPE_GATE_GELU) {
        upi_fw_sigmoid(g, &s, &rest);
        *value = kind == UPIPE_GATE_SILU ? upi_fw_mul(g, s) : s;
        *slope = upi_fw_mul(s, kind == UPIPE_GATE_SILU ? upi_fw_fma(g, rest, one) : rest);
        return;
    }
    near = upi_fw_max(upi_fw_set1(-100.0f), upi_fw_min(upi_fw_set1(100.0f), g));
    square = upi_fw_mul(near, near);
    upi_fw_sigmoid(
        upi_fw_mul(near, upi_fw_fma(upi_fw_set1(UPIPE_GELU_CUBE), square, upi_fw_set1(UPIPE_GELU_ONE))), &s,
        &rest);
    grows = upi_fw_fma(upi_fw_set1(3 * UPIPE_GELU_CUBE), square, upi_fw_set1(UPIPE_GELU_ONE));
    *value = upi_fw_mul(g, s);
    *slope = upi_fw_mul(s, upi_fw_fma(upi_fw_mul(near, rest), grows, one));
}

/* Runs a statement with `name`, the kind of a gate, as a constant. */
#define UPI_WITH_GATE(name, kind, ...)                       \
    do {                                                     \
        if ((kind) == UPIPE_GATE_SILU) {                     \
            const upipe_gate_kind name = UPIPE_GATE_SILU;    \
            __VA_ARGS__;                                     \
        } else if ((kind) == UPIPE_GATE_GELU) {              \
            const upipe_gate_kind name = UPIPE_GATE_GELU;    \
            __VA_ARGS__;                                     \
        } else {                                             \
            const upipe_gate_kind name = UPIPE_GATE_SIGMOID; \
            __VA_ARGS__;                                     \
        }                                                    \
    } while (0)

/* Views: y, gate, up. y's type is looked at for every vector: beside an exponential that costs nothing. */
UPI_INLINE void upi_gated_step(void *y, upipe_dtype y_type, const void *gate, upipe_dtype gate_type,
                               const void *up, upipe_dtype up_type, upipe_gate_kind kind, int64_t k,
                               int64_t n)
{
    upi_fw value, slope;
    upi_fw_gate(upi_row_get(gate, gate_type, k, n), kind, &value, &slope);
    upi_row_put(y, y_type, k, n, upi_fw_mul(value, upi_row_get(up, up_type, k, n)));
}

UPI_INLINE void upi_gated_rows(const upi_flat *f, int64_t first, int64_t last, upipe_dtype gate_type,
                               upipe_dtype up_type, upipe_gate_kind kind)
{
    int64_t i, j;
    for (i = first; i < last; ++i)
        for (j = 0; j < f->heads; ++j) {
            char *y = upi_flat_at(f, 0, i, j), *gate = upi_flat_at(f, 1, i, j), *up = upi_flat_at(f, 2, i, j);
            UPI_ROW_STEPS(k, n, upi_flat_length(f, i),
                          upi_gated_step(y, f->v[0].dtype, gate, gate_type, up, up_type, kind, k, n));
        }
}

UPI_CPU_KERNEL void upi_gate_run(const void *call, int64_t first, int64_t last)
{
    const upi_flat *f = (const upi_flat *)call;
    UPI_WITH_GATE(kind, f->kind,
                  UPI_WITH_TYPES(gate, f->v[1].dtype, up, f->v[2].dtype,
                                 upi_gated_rows(f, first, last, gate, up, kind)));
}

/* Views: gate, up, dy. */
UPI_INLINE void upi_gated_bwd_step(void *gate, upipe_dtype gate_type, void *up, upipe_dtype up_type,
                                   const void *dy, upipe_dtype dy_type, upipe_gate_kind kind, int64_t k,
                                   int64_t n)
{
    upi_fw u = upi_row_get(up, up_type, k, n), grad = upi_row_get(dy, dy_type, k, n), value, slope;
    upi_fw_gate(upi_row_get(gate, gate_type, k, n), kind, &value, &slope);
    upi_row_put(gate, gate_type, k, n, upi_fw_mul(upi_fw_mul(slope, u), grad));
    upi_row_put(up, up_type, k, n, upi_fw_mul(value, grad));
}

UPI_INLINE void upi_gated_bwd_rows(const upi_flat *f, int64_t first, int64_t last, upipe_dtype gate_type,
                                   upipe_dtype up_type, upipe_gate_kind kind)
{
    int64_t i, j;
    for (i = first; i < last; ++i)
        for (j = 0; j < f->heads; ++j) {
            char *gate = upi_flat_at(f, 0, i, j), *up = upi_flat_at(f, 1, i, j),
                 *dy = upi_flat_at(f, 2, i, j);
            UPI_ROW_STEPS(k, n, upi_flat_length(f, i),
                          upi_gated_bwd_step(gate, gate_type, up, up_type, dy, f->v[2].dtype, kind, k, n));
        }
}

UPI_CPU_KERNEL void upi_gate_bwd_run(const void *call, int64_t first, int64_t last)
{
    const upi_flat *f = (const upi_flat *)call;
    UPI_WITH_GATE(kind, f->kind,
                  UPI_WITH_TYPES(gate, f->v[0].dtype, up, f->v[1].dtype,
                                 upi_gated_bwd_rows(f, first, last, gate, up, kind)));
}

/* ---- one row of logits: UPI_ROW_SUMS at a time, the last few filled up with -inf ---- */

/* Logits k .. k+31, or what is left of d, padded in t. */
UPI_INLINE const float *upi_logits_at(const float *row, int64_t k, int64_t d, float *t)
{
    int l;
    if (k + UPI_ROW_SUMS <= d) return row + k;
    for (l = 0; l < UPI_ROW_SUMS; ++l) t[l] = k + l < d ? row[k + l] : -INFINITY;
    return t;
}

/* The greatest logit, NaNs left aside: they show in the sum. */
UPI_CPU_KERNEL float upi_logits_max(const float *row, int64_t d)
{
    upi_fw most[UPI_ROW_VECTORS];
    float t[UPI_ROW_SUMS];
    int64_t k;
    int l;
    UPI_CPU_UNROLL
    for (l = 0; l < UPI_ROW_VECTORS; ++l) most[l] = upi_fw_set1(-INFINITY);
    for (k = 0; k < d; k += UPI_ROW_SUMS) {
        const float *x = upi_logits_at(row, k, d, t);
        UPI_CPU_UNROLL
        for (l = 0; l < UPI_ROW_VECTORS; ++l) most[l] = upi_fw_max(upi_fw_load(x + l * UPI_WIDE), most[l]);
    }
    UPI_CPU_UNROLL
    for (l = 0; l < UPI_ROW_VECTORS; ++l) upi_fw_store(t + l * UPI_WIDE, most[l]);
    for (l = 1; l < UPI_ROW_SUMS; ++l)
        if (t[l] > t[0]) t[0] = t[l];
    return t[0];
}

/* Sum of e^(logit - top) of all but the target: logit k in sum k mod 32 of UPI_LOGITS_EACH logits, and these
 * added up. */
UPI_CPU_KERNEL float upi_logits_sum(const float *row, int64_t d, float top, int64_t target)
{
    const upi_fw high = upi_fw_set1(top);
    upi_fw sum[UPI_ROW_VECTORS], all[UPI_ROW_VECTORS];
    float t[UPI_ROW_SUMS];
    int64_t k;
    int l;
    UPI_CPU_UNROLL
    for (l = 0; l < UPI_ROW_VECTORS; ++l) sum[l] = all[l] = upi_fw_zero();
    for (k = 0; k < d; k += UPI_ROW_SUMS) {
        const float *x = upi_logits_at(row, k, d, t);
        if (k == target / UPI_ROW_SUMS * UPI_ROW_SUMS) {
            if (x == row + k) memcpy(t, x, sizeof t);
            t[target - k] = -INFINITY;
            x = t;
        }
        UPI_CPU_UNROLL
        for (l = 0; l < UPI_ROW_VECTORS; ++l)
            sum[l] = upi_fw_add(sum[l], upi_fw_exp(upi_fw_sub(upi_fw_load(x + l * UPI_WIDE), high)));
        if ((k + UPI_ROW_SUMS) % UPI_LOGITS_EACH != 0 && k + UPI_ROW_SUMS < d) continue;
        UPI_CPU_UNROLL
        for (l = 0; l < UPI_ROW_VECTORS; ++l) {
            all[l] = upi_fw_add(all[l], sum[l]);
            sum[l] = upi_fw_zero();
        }
    }
    return upi_row_fold(all);
}

/* grad = factor * e^(logit - top); grad may be the row itself. */
UPI_INLINE void upi_logits_grad(void *grad, upipe_dtype dtype, const float *row, int64_t d, float top,
                                float factor)
{
    const upi_fw high = upi_fw_set1(top), by = upi_fw_set1(factor);
    UPI_ROW_STEPS(
        k, n, d,
        upi_row_put(grad, dtype, k, n,
                    upi_fw_mul(upi_fw_exp(upi_fw_sub(upi_row_get(row, UPIPE_F32, k, n), high)), by)));
}

/* The row becomes softcap * tanh(row / softcap). */
UPI_CPU_KERNEL void upi_logits_cap(float *row, int64_t d, float softcap)
{
    const upi_fw cap = upi_fw_set1(softcap);
    UPI_ROW_STEPS(
        k, n, d,
        upi_row_put(row, UPIPE_F32, k, n,
                    upi_fw_mul(cap, upi_fw_tanh(upi_fw_div(upi_row_get(row, UPIPE_F32, k, n), cap)))));
}

/* factor * e^(x - top), times 1 - (x / cap)^2. */
UPI_INLINE upi_fw upi_fw_capped(upi_fw x, upi_fw top, upi_fw factor, upi_fw cap)
{
    const upi_fw t = upi_fw_div(x, cap), p = upi_fw_mul(upi_fw_exp(upi_fw_sub(x, top)), factor);
    return upi_fw_mul(p, upi_fw_sub(upi_fw_set1(1.0f), upi_fw_mul(t, t)));
}

/* upi_logits_grad of the logits before the cap; row is what they have become. */
UPI_INLINE void upi_logits_grad_capped(void *grad, upipe_dtype dtype, const float *row, int64_t d, float top,
                                       float factor, float softcap)
{
    const upi_fw high = upi_fw_set1(top), by = upi_fw_set1(factor), cap = upi_fw_set1(softcap);
    UPI_ROW_STEPS(
        k, n, d,
        upi_row_put(grad, dtype, k, n, upi_fw_capped(upi_row_get(row, UPIPE_F32, k, n), high, by, cap)));
}

/* The row's loss; its gradient where grad is not NULL.
 *
 * With the target t apart from the others, 1 - p[t] = others / sum: neither the gradient of a target whose
 * probability is almost 1 nor its loss, log(1 + others) where it is the greatest, is left to a difference.
 */
UPI_INLINE float upi_cross_entropy_row(const upipe_cross_entropy *x, int64_t i, void *grad)
{
    float *const row = (float *)upipe_view_at(x->logits, i, 0);
    int64_t d = x->logits.d, target = x->targets[i];
    float top, others, at, sum, t[UPI_LANES];
    if (x->softcap != 0) upi_logits_cap(row, d, x->softcap);
    top = upi_logits_max(row, d);
    others = upi_logits_sum(row, d, top, target);
    at = row[target];
    upi_f8_store(t, upi_f8_exp(upi_f8_set1(at - top)));
    sum = others + t[0];
    if (grad != NULL && x->softcap == 0) {
        UPI_WITH_TYPE(dtype, x->grad.dtype, upi_logits_grad(grad, dtype, row, d, top, x->scale / sum));
        upipe_cpu_put(grad, x->grad.dtype, target, -(x->scale * (others / sum)));
    }
    if (grad != NULL && x->softcap != 0) {
        const float squashed = at / x->softcap;
        UPI_WITH_TYPE(dtype, x->grad.dtype,
                      upi_logits_grad_capped(grad, dtype, row, d, top, x->scale / sum, x->softcap));
        upipe_cpu_put(grad, x->grad.dtype, target, -(x->scale * (others / sum)) * (1 - squashed * squashed));
    }
    return (at == top ? log1pf(others) : logf(sum)) + (top - at);
}

UPI_CPU_KERNEL void upi_cross_entropy_run(const void *call, int64_t first, int64_t last)
{
    const upipe_cross_entropy *x = (const upipe_cross_entropy *)call;
    int64_t i;
    for (i = first; i < last; ++i) {
        void *grad = x->grad.data != NULL ? upipe_view_at(x->grad, i, 0) : NULL;
        if (x->targets[i] >= 0)
            x->loss[i] = upi_cross_entropy_row(x, i, grad);
        else {
            x->loss[i] = 0;
            if (grad != NULL) memset(grad, 0, (size_t)x->grad.d * upipe_dtype_bytes(x->grad.dtype));
        }
    }
}

/* ---- embedding ---- */

typedef struct upi_embed_call {
    upipe_view x, table; /* backward: dx, dtable */
    const int32_t *tokens;
    int64_t columns; /* of a strip */
} upi_embed_call;

UPI_CPU_KERNEL void upi_embed_run(const void *call, int64_t first, int64_t last)
{
    const upi_embed_call *o = (const upi_embed_call *)call;
    int64_t i;
    for (i = first; i < last; ++i)
        UPI_WITH_TYPE(to, o->x.dtype,
                      UPI_WITH_TYPE(from, o->table.dtype,
                                    upi_cast_row(upipe_view_at(o->x, i, 0), to,
                                                 upipe_view_at(o->table, o->tokens[i], 0), from, o->x.d)));
}

/* One strip of columns, for all tokens in order. */
UPI_CPU_KERNEL void upi_embed_bwd_item(void *arg, int64_t strip, int32_t worker)
{
    const upi_embed_call *o = (const upi_embed_call *)arg;
    int64_t from = strip * o->columns, count = o->x.d - from, i;
    (void)worker;
    if (count > o->columns) count = o->columns;
    for (i = 0; i < o->x.n; ++i) {
        float *sum = (float *)upipe_view_at(o->table, o->tokens[i], 0) + from;
        const char *x =
            (const char *)upipe_view_at(o->x, i, 0) + (size_t)from * upipe_dtype_bytes(o->x.dtype);
        UPI_WITH_TYPE(dtype, o->x.dtype, upi_add_row(sum, UPIPE_F32, x, dtype, count));
    }
}

/* ---- the gradient of a bias ---- */

typedef struct upi_bias_call {
    float *db;
    upipe_view dy;
    int64_t columns; /* of a strip */
} upi_bias_call;

/* Columns k .. k + n - 1 of head j: += the sum of tokens first .. last - 1, in order. */
UPI_INLINE void upi_bias_step(const upi_bias_call *o, int64_t first, int64_t last, int32_t j, int64_t k,
                              int64_t n, upipe_dtype dtype)
{
    float *db = o->db + (int64_t)j * o->dy.d;
    upi_fw sum = upi_fw_zero();
    int64_t i;
    for (i = first; i < last; ++i)
        sum = upi_fw_add(sum, upi_row_get(upipe_view_at(o->dy, i, j), dtype, k, n));
    upi_row_put(db, UPIPE_F32, k, n, upi_fw_add(upi_row_get(db, UPIPE_F32, k, n), sum));
}

/* Elements begin .. end - 1 of db, rows of all heads behind each other. */
UPI_INLINE void upi_bias_part(const upi_bias_call *o, int64_t first, int64_t last, int64_t begin, int64_t end,
                              upipe_dtype dtype)
{
    while (begin < end) {
        const int32_t j = (int32_t)(begin / o->dy.d);
        const int64_t from = begin - (int64_t)j * o->dy.d;
        int64_t left = end - begin, at;
        if (left > o->dy.d - from) left = o->dy.d - from;
        for (at = 0; at + UPI_WIDE <= left; at += UPI_WIDE)
            upi_bias_step(o, first, last, j, from + at, UPI_WIDE, dtype);
        if (at < left) upi_bias_step(o, first, last, j, from + at, left - at, dtype);
        begin += left;
    }
}

/* One strip of columns, for all tokens in order. */
UPI_CPU_KERNEL void upi_bias_item(void *arg, int64_t strip, int32_t worker)
{
    const upi_bias_call *o = (const upi_bias_call *)arg;
    const int64_t begin = strip * o->columns, all = (int64_t)o->dy.h * o->dy.d;
    const int64_t end = begin + o->columns < all ? begin + o->columns : all;
    int64_t i, last;
    (void)worker;
    for (i = 0; i < o->dy.n; i = last) {
        last = i + UPIPE_SUM_ROWS < o->dy.n ? i + UPIPE_SUM_ROWS : o->dy.n;
        UPI_WITH_TYPE(dtype, o->dy.dtype, upi_bias_part(o, i, last, begin, end, dtype));
    }
}

/* ---- sums and the optimizer ---- */

#if UPIPE_CPU_AVX2

typedef __m256d upi_d4;

/* clang-format off */
UPI_INLINE upi_d4 upi_d4_load(const double *p)                   { return _mm256_loadu_pd(p); }
UPI_INLINE void   upi_d4_store(double *p, upi_d4 v)              { _mm256_storeu_pd(p, v); }
UPI_INLINE upi_d4 upi_d4_add(upi_d4 a, upi_d4 b)                 { return _mm256_add_pd(a, b); }
UPI_INLINE upi_d4 upi_d4_mul(upi_d4 a, upi_d4 b)                 { return _mm256_mul_pd(a, b); }
UPI_INLINE upi_d4 upi_d4_low(upi_f8 v)                           { return _mm256_cvtps_pd(_mm256_castps256_ps128(v)); }
UPI_INLINE upi_d4 upi_d4_high(upi_f8 v)                          { return _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1)); }
/* clang-format on */

#else

typedef struct upi_d4 {
    double v[4];
} upi_d4;

UPI_INLINE upi_d4 upi_d4_load(const double *p)
{
    upi_d4 r;
    memcpy(r.v, p, sizeof r.v);
    return r;
}

UPI_INLINE void upi_d4_store(double *p, upi_d4 v)
{
    memcpy(p, v.v, sizeof v.v);
}

UPI_INLINE upi_d4 upi_d4_add(upi_d4 a, upi_d4 b)
{
    int l;
    for (l = 0; l < 4; ++l) a.v[l] += b.v[l];
    return a;
}

UPI_INLINE upi_d4 upi_d4_mul(upi_d4 a, upi_d4 b)
{
    int l;
    for (l = 0; l < 4; ++l) a.v[l] *= b.v[l];
    return a;
}

UPI_INLINE upi_d4 upi_d4_part(upi_f8 v, int first)
{
    float t[UPI_LANES];
    upi_d4 r;
    int l;
    upi_f8_store(t, v);
    for (l = 0; l < 4; ++l) r.v[l] = (double)t[first + l];
    return r;
}

UPI_INLINE upi_d4 upi_d4_low(upi_f8 v)
{
    return upi_d4_part(v, 0);
}

UPI_INLINE upi_d4 upi_d4_high(upi_f8 v)
{
    return upi_d4_part(v, 4);
}

#endif

/* Adds the elements of a row, or their squares, to 16 sums. The square of an f32 is exact in f64. */
UPI_INLINE void upi_total_row(double *sums, const void *row, upipe_dtype dtype, int64_t d, int squares)
{
    upi_d4 s[UPI_TOTAL_SUMS / 4], x;
    int64_t k;
    int l;
    UPI_CPU_UNROLL
    for (l = 0; l < UPI_TOTAL_SUMS / 4; ++l) s[l] = upi_d4_load(sums + 4 * l);
    for (k = 0; k + UPI_TOTAL_SUMS <= d; k += UPI_TOTAL_SUMS) {
        UPI_CPU_UNROLL
        for (l = 0; l < UPI_TOTAL_SUMS / 4; ++l) {
            upi_f8 v = upi_f8_get(row, dtype, k + l / 2 * UPI_LANES);
            x = l % 2 ? upi_d4_high(v) : upi_d4_low(v);
            s[l] = upi_d4_add(s[l], squares ? upi_d4_mul(x, x) : x);
        }
    }
    UPI_CPU_UNROLL
    for (l = 0; l < UPI_TOTAL_SUMS / 4; ++l) upi_d4_store(sums + 4 * l, s[l]);
    for (l = 0; k < d; ++k, ++l) {
        double one = (double)upipe_cpu_get(row, dtype, k);
        sums[l] += squares ? one * one : one;
    }
}

/* The pieces of a tensor: some whole rows, or a part of a long one. They are a matter of its shape alone. */
typedef struct upi_total_call {
    upipe_view x;
    int64_t pieces; /* of a row; 1 where it is short */
    int64_t rows;   /* of a piece; 1 where it is long */
    int64_t first;  /* piece whose sum comes first in parts */
    double parts[UPI_TOTAL_PARTS];
    int squares;
} upi_total_call;

UPI_INLINE double upi_total_piece(const upi_total_call *o, int64_t piece, upipe_dtype dtype, int squares)
{
    double s[UPI_TOTAL_SUMS] = {0};
    int64_t row = piece / o->pieces * o->rows, last = row + o->rows,
            from = piece % o->pieces * UPI_TOTAL_PIECE;
    int64_t count = o->x.d - from;
    int l, half;
    if (last > o->x.n * o->x.h) last = o->x.n * o->x.h;
    if (count > UPI_TOTAL_PIECE) count = UPI_TOTAL_PIECE;
    for (; row < last; ++row)
        upi_total_row(s,
                      (const char *)upipe_view_at(o->x, row / o->x.h, (int32_t)(row % o->x.h)) +
                          (size_t)from * upipe_dtype_bytes(dtype),
                      dtype, count, squares);
    for (half = UPI_TOTAL_SUMS / 2; half > 0; half /= 2)
        for (l = 0; l < half; ++l) s[l] += s[l + half];
    return s[0];
}

UPI_CPU_KERNEL void upi_total_item(void *arg, int64_t i, int32_t worker)
{
    upi_total_call *o = (upi_total_call *)arg;
    (void)worker;
    UPI_WITH_TYPE(dtype, o->x.dtype,
                  o->parts[i] = o->squares ? upi_total_piece(o, o->first + i, dtype, 1)
                                           : upi_total_piece(o, o->first + i, dtype, 0));
}

/* The factors of the formula, rounded. */
typedef struct upi_adamw_call {
    const upipe_adamw *a;
    float m_keep, m_part, m_scale, v_keep, v_part, v_scale, g_scale, eps, minus_rate, decay;
} upi_adamw_call;

UPI_INLINE void upi_adamw_step(const upi_adamw_call *o, int64_t k, int64_t n, upipe_dtype copy)
{
    const upipe_adamw *a = o->a;
    upi_fw g = upi_fw_mul(upi_row_get(a->g, UPIPE_F32, k, n), upi_fw_set1(o->g_scale));
    upi_fw w = upi_row_get(a->w, UPIPE_F32, k, n), m = upi_row_get(a->m, UPIPE_F32, k, n);
    upi_fw v = upi_row_get(a->v, UPIPE_F32, k, n), step;
    m = upi_fw_fma(upi_fw_set1(o->m_keep), m, upi_fw_mul(upi_fw_set1(o->m_part), g));
    v = upi_fw_fma(upi_fw_set1(o->v_keep), v, upi_fw_mul(upi_fw_mul(upi_fw_set1(o->v_part), g), g));
    step = upi_fw_add(upi_fw_sqrt(upi_fw_mul(v, upi_fw_set1(o->v_scale))), upi_fw_set1(o->eps));
    step = upi_fw_div(upi_fw_mul(m, upi_fw_set1(o->m_scale)), step);
    w = upi_fw_fma(upi_fw_set1(o->minus_rate), upi_fw_fma(upi_fw_set1(o->decay), w, step), w);
    upi_row_put(a->m, UPIPE_F32, k, n, m);
    upi_row_put(a->v, UPIPE_F32, k, n, v);
    upi_row_put(a->w, UPIPE_F32, k, n, w);
    if (a->copy != NULL) upi_row_put(a->copy, copy, k, n, w);
}

/* Pieces of UPI_ADAMW_PIECE elements. */
UPI_CPU_KERNEL void upi_adamw_run(const void *call, int64_t first, int64_t last)
{
    const upi_adamw_call o = *(const upi_adamw_call *)call;
    int64_t k, end = last * UPI_ADAMW_PIECE < o.a->n ? last * UPI_ADAMW_PIECE : o.a->n;
    UPI_WITH_TYPE(copy, o.a->copy_dtype,
                  for (k = first * UPI_ADAMW_PIECE; k + UPI_WIDE <= end; k += UPI_WIDE)
                      upi_adamw_step(&o, k, UPI_WIDE, copy);
                  if (k < end) upi_adamw_step(&o, k, end - k, copy));
}

UPI_KERNELS_END

/* ---- entries of the table ---- */

UPIPE_API upipe_status upi_cpu_add(upipe_ctx *c, upipe_view y, upipe_view x)
{
    upipe_view v[2];
    upi_flat f;
    UPIPE_TRY(upi_check_add(c, y, x));
    if (y.n == 0) return UPIPE_OK;
    v[0] = y;
    v[1] = x;
    f = upi_flat_make(v, 2);
    upi_rows_share(c->ops, f.rows, f.row_bytes, 1, upi_add_run, &f);
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_cpu_scale(upipe_ctx *c, upipe_view y, upipe_view x, float factor)
{
    upipe_view v[2];
    upi_scaling s;
    UPIPE_TRY(upi_check_scale(c, y, x, factor));
    if (y.n == 0) return UPIPE_OK;
    v[0] = y;
    v[1] = x;
    s.flat = upi_flat_make(v, 2);
    s.factor = factor;
    upi_rows_share(c->ops, s.flat.rows, s.flat.row_bytes, 1, upi_scale_run, &s);
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_cpu_gate(upipe_ctx *c, upipe_gate_kind kind, upipe_view y, upipe_view gate,
                                    upipe_view up)
{
    upipe_view v[3];
    upi_flat f;
    UPIPE_TRY(upi_check_gate(c, kind, y, gate, up));
    if (y.n == 0) return UPIPE_OK;
    v[0] = y;
    v[1] = gate;
    v[2] = up;
    f = upi_flat_make(v, 3);
    f.kind = kind;
    upi_rows_share(c->ops, f.rows, f.row_bytes, 1, upi_gate_run, &f);
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_cpu_gate_bwd(upipe_ctx *c, upipe_gate_kind kind, upipe_view gate, upipe_view up,
                                        upipe_view dy)
{
    upipe_view v[3];
    upi_flat f;
    UPIPE_TRY(upi_check_gate_bwd(c, kind, gate, up, dy));
    if (dy.n == 0) return UPIPE_OK;
    v[0] = gate;
    v[1] = up;
    v[2] = dy;
    f = upi_flat_make(v, 3);
    f.kind = kind;
    upi_rows_share(c->ops, f.rows, f.row_bytes, 1, upi_gate_bwd_run, &f);
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_cpu_cross_entropy(upipe_ctx *c, const upipe_cross_entropy *x)
{
    int64_t i;
    UPIPE_TRY(upi_check_cross_entropy(c, x));
    for (i = 0; i < x->logits.n; ++i)
        if (x->targets[i] >= x->logits.d)
            return upipe_fail(&c->err, UPIPE_ERR_ARG, "cross_entropy: target %d of row %lld, of %d columns",
                              x->targets[i], (long long)i, x->logits.d);
    upi_rows_share(c->ops, x->logits.n, 2 * (int64_t)x->logits.d * (int64_t)sizeof(float), 1,
                   upi_cross_entropy_run, x);
    return UPIPE_OK;
}

/* All tokens within 0 .. rows-1. */
UPIPE_API upipe_status upi_tokens_check(upipe_ctx *c, const char *call, const int32_t *tokens, int64_t n,
                                        int64_t rows)
{
    int64_t i;
    for (i = 0; i < n; ++i)
        if (tokens[i] < 0 || tokens[i] >= rows)
            return upipe_fail(&c->err, UPIPE_ERR_ARG, "%s: token %d of row %lld, of a table of %lld rows",
                              call, tokens[i], (long long)i, (long long)rows);
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_cpu_embed(upipe_ctx *c, upipe_view x, upipe_view table, const int32_t *tokens)
{
    upi_embed_call call;
    UPIPE_TRY(upi_check_embed(c, "embed", x, table, tokens));
    UPIPE_TRY(upi_tokens_check(c, "embed", tokens, x.n, table.n));
    call.x = x;
    call.table = table;
    call.tokens = tokens;
    call.columns = 0;
    upi_rows_share(c->ops, x.n, 2 * (int64_t)x.d * (int64_t)upipe_dtype_bytes(x.dtype), 1, upi_embed_run,
                   &call);
    return UPIPE_OK;
}

/* Tokens that are the same word add to one row, in their order: so threads share the columns, not the
 * tokens. */
UPIPE_API upipe_status upi_cpu_embed_bwd(upipe_ctx *c, upipe_view dtable, upipe_view dx,
                                         const int32_t *tokens)
{
    int64_t strips = 2 * upi_par_workers(c->ops);
    upi_embed_call call;
    UPIPE_TRY(upi_check_embed_bwd(c, dtable, dx, tokens));
    UPIPE_TRY(upi_tokens_check(c, "embed_bwd", tokens, dx.n, dtable.n));
    call.x = dx;
    call.table = dtable;
    call.tokens = tokens;
    if (strips == 2) strips = 1; /* nobody to share with */
    call.columns = (dx.d + strips - 1) / strips;
    call.columns = (call.columns + UPI_EMBED_COLUMNS - 1) / UPI_EMBED_COLUMNS * UPI_EMBED_COLUMNS;
    upi_par_each(c->ops, (dx.d + call.columns - 1) / call.columns, upi_embed_bwd_item, &call);
    return UPIPE_OK;
}

/* Threads share the columns, so that a sum has one order. */
UPIPE_API upipe_status upi_cpu_bias_bwd(upipe_ctx *c, float *db, upipe_view dy)
{
    int64_t strips = upi_par_workers(c->ops), width = (int64_t)dy.h * dy.d;
    upi_bias_call call;
    UPIPE_TRY(upi_check_bias_bwd(c, db, dy));
    call.db = db;
    call.dy = dy;
    call.columns = ((width + strips - 1) / strips + UPI_BIAS_STRIP - 1) / UPI_BIAS_STRIP * UPI_BIAS_STRIP;
    upi_par_each(c->ops, (width + call.columns - 1) / call.columns, upi_bias_item, &call);
    return UPIPE_OK;
}

/* Each piece has a sum of its own; they are added up in order. */
UPIPE_API upipe_status upi_cpu_total(upipe_ctx *c, double *out, upipe_view x, int squares)
{
    upi_total_call call;
    int64_t rows = x.n * x.h, all, i, count;
    double sum = 0;
    UPIPE_TRY(upi_check_total(c, out, x));
    call.x = x;
    call.squares = squares;
    call.pieces = ((int64_t)x.d + UPI_TOTAL_PIECE - 1) / UPI_TOTAL_PIECE;
    call.rows = call.pieces > 1 ? 1 : UPI_TOTAL_PIECE / x.d;
    all = (rows + call.rows - 1) / call.rows * call.pieces;
    for (call.first = 0; call.first < all; call.first += count) {
        count = all - call.first < UPI_TOTAL_PARTS ? all - call.first : (int64_t)UPI_TOTAL_PARTS;
        upi_par_each(c->ops, count, upi_total_item, &call);
        for (i = 0; i < count; ++i) sum += call.parts[i];
    }
    *out = sum;
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_cpu_adamw(upipe_ctx *c, const upipe_adamw *a)
{
    upi_adamw_call call;
    UPIPE_TRY(upi_check_adamw(c, a));
    call.a = a;
    call.m_keep = (float)a->beta1;
    call.m_part = (float)(1 - a->beta1);
    call.m_scale = (float)(1 / (1 - pow(a->beta1, (double)a->step)));
    call.v_keep = (float)a->beta2;
    call.v_part = (float)(1 - a->beta2);
    call.v_scale = (float)(1 / (1 - pow(a->beta2, (double)a->step)));
    call.g_scale = (float)a->grad_scale;
    call.eps = (float)a->eps;
    call.minus_rate = (float)-a->rate;
    call.decay = (float)a->decay;
    upi_rows_share(c->ops, (a->n + UPI_ADAMW_PIECE - 1) / UPI_ADAMW_PIECE,
                   UPI_ADAMW_PIECE * 7 * (int64_t)sizeof(float), 1, upi_adamw_run, &call);
    return UPIPE_OK;
}

#endif

/* upipe_cpu_linear_rows.h -- linear attention's convolution and gates on the CPU
 *
 *     upi_cpu_linear_conv(&ctx, &a)       y = silu of a causal convolution of few taps, every channel by itself
 *     upi_cpu_linear_gates(&ctx, &g)      decays and strengths of all tokens
 *
 * The threads share channels, in blocks, and heads. A block walks its rows from the last one: y may lie over x then, and the
 * gradient of a row has all its terms when it is written over that of y.
 */
#ifndef UPIPE_CPU_LINEAR_ROWS_H
#define UPIPE_CPU_LINEAR_ROWS_H

#include <math.h>

#include "upipe_cpu_train.h"
#include "../upipe_linear.h"

enum { UPI_CONV_CHANNELS = 64, UPI_CONV_ROWS = UPIPE_LINEAR_TAPS_MAX }; /* of a block; in its ring of rows */

typedef struct upi_conv_job {
    const upipe_linear_conv *a;
    const upipe_linear_conv_grad *g; /* NULL in a forward */
} upi_conv_job;

/* A block of channels. w dw [taps][channels]: those of distance j at j; part: sums of UPIPE_SUM_ROWS rows; ds: gradients
 * before SiLU of rows t, t + 1 .., row t at t % UPI_CONV_ROWS. */
typedef struct upi_conv_block {
    float w[UPIPE_LINEAR_TAPS_MAX][UPI_CONV_CHANNELS], dw[UPIPE_LINEAR_TAPS_MAX][UPI_CONV_CHANNELS],
        part[UPIPE_LINEAR_TAPS_MAX][UPI_CONV_CHANNELS], ds[UPI_CONV_ROWS][UPI_CONV_CHANNELS];
    int first, channels;
} upi_conv_block;

/* Rows before row t that its document has, at most taps - 1. */
UPI_INLINE int upi_conv_reach(const upipe_linear_conv *a, int64_t t)
{
    const int64_t border = upi_border_before(&a->borders, a->pos + t), most = a->taps - 1;
    return (int)(border == INT64_MIN || a->pos + t - border > most ? most : a->pos + t - border);
}

/* Rows behind row t that its document has. */
UPI_INLINE int upi_conv_ahead(const upipe_linear_conv *a, int64_t t)
{
    const int64_t border = upi_border_behind(&a->borders, a->pos + t), most = a->taps - 1;
    return (int)(border > a->pos + t + most ? most : border - 1 - (a->pos + t));
}

UPI_KERNELS_BEGIN

/* Vector k of row t of x, of which n elements count; rows below 0 are those of `before`. */
UPI_INLINE upi_fw upi_conv_get(const upipe_linear_conv *a, const upi_conv_block *b, int64_t t, int64_t k,
                               int64_t n)
{
    if (t >= 0) return upi_row_get(upipe_view_at(a->x, t, 0), a->x.dtype, b->first + k, n);
    return upi_row_get(upipe_view_at(a->before, t + a->taps - 1, 0), UPIPE_F32, b->first + k, n);
}

/* The convolution of row t, before SiLU. */
UPI_INLINE upi_fw upi_conv_sum(const upipe_linear_conv *a, const upi_conv_block *b, int64_t t, int reach,
                               int64_t k, int64_t n)
{
    upi_fw sum = upi_fw_zero();
    int j;
    for (j = reach; j >= 0; --j)
        sum = upi_fw_fma(upi_row_get(b->w[j], UPIPE_F32, k, n), upi_conv_get(a, b, t - j, k, n), sum);
    return sum;
}

UPI_INLINE void upi_conv_begin(const upi_conv_job *job, upi_conv_block *b, int64_t i)
{
    const upipe_linear_conv *a = job->a;
    int j, k;
    b->first = (int)i * UPI_CONV_CHANNELS;
    b->channels = a->x.d - b->first < UPI_CONV_CHANNELS ? a->x.d - b->first : UPI_CONV_CHANNELS;
    memset(b->dw, 0, sizeof b->dw);
    memset(b->part, 0, sizeof b->part);
    for (j = 0; j < a->taps; ++j)
        for (k = 0; k < b->channels; ++k)
            b->w[j][k] = a->weight[(int64_t)(b->first + k) * a->taps + a->taps - 1 - j];
}

UPI_INLINE void upi_conv_step(const upipe_linear_conv *a, const upi_conv_block *b, void *y, int64_t t,
                              int reach, int64_t k, int64_t n)
{
    const upi_fw sum = upi_conv_sum(a, b, t, reach, k, n);
    upi_fw s, rest;
    upi_fw_sigmoid(sum, &s, &rest);
    upi_row_put(y, a->y.dtype, b->first + k, n, upi_fw_mul(sum, s));
}

UPI_CPU_KERNEL void upi_conv_item(void *arg, int64_t i, int32_t worker)
{
    const upi_conv_job *job = (const upi_conv_job *)arg;
    const upipe_linear_conv *a = job->a;
    upi_conv_block b;
    int64_t t;
    (void)worker;
    upi_conv_begin(job, &b, i);
    for (t = a->x.n - a->taps + 1; a->after.data != NULL && t < a->x.n; ++t) {
        float *to = (float *)upipe_view_at(a->after, t - (a->x.n - a->taps + 1), 0) + b.first;
        UPI_ROW_STEPS(k, n, b.channels, upi_row_put(to, UPIPE_F32, k, n, upi_conv_get(a, &b, t, k, n)));
    }
    for (t = a->x.n - 1; t >= 0; --t) {
        void *y = upipe_view_at(a->y, t, 0);
        const int reach = upi_conv_reach(a, t);
        UPI_ROW_STEPS(k, n, b.channels, upi_conv_step(a, &b, y, t, reach, k, n));
    }
}

/* Row t's gradient before SiLU, and what it adds to the weights'. */
UPI_INLINE void upi_conv_bwd_step(const upi_conv_job *job, upi_conv_block *b, int64_t t, int reach, int64_t k,
                                  int64_t n)
{
    const upipe_linear_conv *a = job->a;
    const upipe_view dy = job->g->dy;
    const upi_fw sum = upi_conv_sum(a, b, t, reach, k, n);
    upi_fw s, rest, d = upi_row_get(upipe_view_at(dy, t, 0), dy.dtype, b->first + k, n);
    int j;
    upi_fw_sigmoid(sum, &s, &rest);
    d = upi_fw_mul(d, upi_fw_mul(s, upi_fw_fma(sum, rest, upi_fw_set1(1.0f))));
    upi_row_put(b->ds[t % UPI_CONV_ROWS], UPIPE_F32, k, n, d);
    for (j = 0; j <= reach; ++j)
        upi_row_put(b->part[j], UPIPE_F32, k, n,
                    upi_fw_fma(d, upi_conv_get(a, b, t - j, k, n), upi_row_get(b->part[j], UPIPE_F32, k, n)));
}

UPI_INLINE void upi_conv_bwd_row(const upi_conv_job *job, upi_conv_block *b, int64_t t)
{
    const int reach = upi_conv_reach(job->a, t);
    int j, k;
    UPI_ROW_STEPS(i, n, b->channels, upi_conv_bwd_step(job, b, t, reach, i, n));
    if (t % UPIPE_SUM_ROWS != 0) return;
    for (j = 0; j < job->a->taps; ++j)
        for (k = 0; k < b->channels; ++k) b->dw[j][k] += b->part[j][k];
    memset(b->part, 0, sizeof b->part);
}

/* The gradient of row t of x, or below 0 of `before`: terms of `ahead` rows behind it. from: what the rows behind this call
 * have added; NULL: nothing. */
UPI_INLINE void upi_conv_bwd_x_step(const upi_conv_job *job, const upi_conv_block *b, upipe_view to,
                                    int64_t row, const void *from, int64_t t, int ahead, int64_t k, int64_t n)
{
    upi_fw sum = from != NULL ? upi_row_get(from, UPIPE_F32, b->first + k, n) : upi_fw_zero();
    int j;
    for (j = ahead; j >= 0; --j)
        if (t + j >= 0 && t + j < job->a->x.n)
            sum = upi_fw_fma(upi_row_get(b->w[j], UPIPE_F32, k, n),
                             upi_row_get(b->ds[(t + j) % UPI_CONV_ROWS], UPIPE_F32, k, n), sum);
    upi_row_put(upipe_view_at(to, row, 0), to.dtype, b->first + k, n, sum);
}

UPI_INLINE void upi_conv_bwd_x(const upi_conv_job *job, const upi_conv_block *b, int64_t t)
{
    const int64_t before = job->a->taps - 1,
                  kept = t - (job->a->x.n - before); /* which row of `after` this is */
    const upipe_view to = t >= 0 ? job->g->dy : job->g->dstate;
    const void *from = kept >= 0 ? upipe_view_at(job->g->dstate, kept, 0) : NULL;
    const int ahead = upi_conv_ahead(job->a, t);
    UPI_ROW_STEPS(k, n, b->channels,
                  upi_conv_bwd_x_step(job, b, to, t >= 0 ? t : t + before, from, t, ahead, k, n));
}

UPI_CPU_KERNEL void upi_conv_bwd_item(void *arg, int64_t i, int32_t worker)
{
    const upi_conv_job *job = (const upi_conv_job *)arg;
    const upipe_linear_conv *a = job->a;
    upi_conv_block b;
    int64_t t;
    int j, k;
    (void)worker;
    upi_conv_begin(job, &b, i);
    for (t = a->x.n - 1; t > -a->taps; --t) {
        if (t >= 0) upi_conv_bwd_row(job, &b, t);
        upi_conv_bwd_x(job, &b, t);
    }
    for (j = 0; job->g->dweight != NULL && j < a->taps; ++j)
        for (k = 0; k < b.channels; ++k)
            job->g->dweight[(int64_t)(b.first + k) * a->taps + a->taps - 1 - j] += b.dw[j][k];
}

UPI_KERNELS_END

UPIPE_API upipe_status upi_cpu_linear_conv(upipe_ctx *c, const upipe_linear_conv *a)
{
    upi_conv_job job;
    job.a = a;
    job.g = NULL;
    upi_par_each(c->ops, (a->x.d - 1) / UPI_CONV_CHANNELS + 1, upi_conv_item, &job);
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_cpu_linear_conv_bwd(upipe_ctx *c, const upipe_linear_conv_grad *g)
{
    upi_conv_job job;
    job.a = &g->a;
    job.g = g;
    upi_par_each(c->ops, (g->a.x.d - 1) / UPI_CONV_CHANNELS + 1, upi_conv_bwd_item, &job);
    return UPIPE_OK;
}

/* ---- gates ---- */

UPI_INLINE double upi_gates_sigmoid(double z)
{
    const double e = exp(-fabs(z));
    return z < 0 ? e / (1 + e) : 1 / (1 + e); /* a NaN stays one */
}

/* log(1 + e^z) */
UPI_INLINE double upi_gates_softplus(double z)
{
    return (z > 0 ? z : 0) + log1p(exp(-fabs(z)));
}

UPI_INLINE double upi_gates_get(upipe_view v, int64_t i, int head)
{
    return (double)upipe_cpu_get(upipe_view_at(v, i, head), v.dtype, 0);
}

/* A head. */
UPIPE_API void upi_gates_item(void *arg, int64_t head, int32_t worker)
{
    const upipe_linear_gates *a = (const upipe_linear_gates *)arg;
    const double rate = exp((double)a->a_log[head]), bias = (double)a->dt_bias[head];
    const int h = (int)head;
    int64_t i;
    (void)worker;
    for (i = 0; i < a->a.n; ++i) {
        *(float *)upipe_view_at(a->g, i, h) =
            (float)(-rate * upi_gates_softplus(upi_gates_get(a->a, i, h) + bias));
        *(float *)upipe_view_at(a->beta, i, h) = (float)upi_gates_sigmoid(upi_gates_get(a->b, i, h));
    }
}

/* A head; sums over its tokens are one f64 chain. */
UPIPE_API void upi_gates_bwd_item(void *arg, int64_t head, int32_t worker)
{
    const upipe_linear_gates_grad *d = (const upipe_linear_gates_grad *)arg;
    const upipe_linear_gates *a = &d->gates;
    const double rate = exp((double)a->a_log[head]), bias = (double)a->dt_bias[head];
    const int h = (int)head;
    double log_sum = 0, bias_sum = 0;
    int64_t i;
    (void)worker;
    for (i = 0; i < a->a.n; ++i) {
        const double z = upi_gates_get(a->a, i, h) + bias,
                     beta = upi_gates_sigmoid(upi_gates_get(a->b, i, h));
        const double dg = -rate * upi_gates_get(d->dg, i, h), da = dg * upi_gates_sigmoid(z);
        log_sum += dg * upi_gates_softplus(z);
        bias_sum += da;
        upipe_cpu_put(upipe_view_at(a->a, i, h), a->a.dtype, 0, (float)da);
        upipe_cpu_put(upipe_view_at(a->b, i, h), a->b.dtype, 0,
                      (float)(upi_gates_get(d->dbeta, i, h) * beta * (1 - beta)));
    }
    if (d->da_log != NULL) d->da_log[head] += (float)log_sum;
    if (d->ddt_bias != NULL) d->ddt_bias[head] += (float)bias_sum;
}

UPIPE_API upipe_status upi_cpu_linear_gates(upipe_ctx *c, const upipe_linear_gates *a)
{
    upi_par_each(c->ops, a->a.h, upi_gates_item, (void *)(uintptr_t)a);
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_cpu_linear_gates_bwd(upipe_ctx *c, const upipe_linear_gates_grad *g)
{
    upi_par_each(c->ops, g->gates.a.h, upi_gates_bwd_item, (void *)(uintptr_t)g);
    return UPIPE_OK;
}

#endif

/* oracle.h -- dense attention in plain loops: in f64, the truth; in the kernel's own type, the naive
 *             yardstick
 *
 * Tensors are packed: q and its gradient [sq][h][d], k and its [sk][hkv][d], v and its [sk][hkv][v_dim], o
 * and its [sq][h][v_dim], lse [sq][h]. Query head x reads key/value head x / (h / hkv). What query i sees is
 * asked of every key on its own (oracle_visible). A row that sees no key has o = 0, and lse = -inf or the
 * sink. Inputs are values that the storage type holds: round them before (naive_store).
 *
 *     oracle_attn_fwd(&shape, q, k, v, o, lse);                          double: the reference
 *     naive_attn_fwd(&shape, UPIPE_BF16, qf, kf, vf, of, lsef);          float: what a plain kernel would
 *                                                                        give
 *     CHECK_CLOSE(got, naive, ways, o, n, "o");                          tolerance.h: got against both
 *
 * The naive one does its arithmetic in f32, row by row, and rounds what a kernel would store: o and dq. dk
 * and dv stay f32. Each reads o and lse of its own forward for its backward. shape.naive says how its sums
 * run; sums over keys and over queries are blocked (naive_carry).
 */
#ifndef UPIPE_TEST_ORACLE_H
#define UPIPE_TEST_ORACLE_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "upipe/cpu/upipe_cpu_simd.h"

/* Sanitizers watch the library. In these plain loops they would spend most of their time. What is watched may
 * not be inlined into what is not: so naive_store, which calls the library, is. */
#define UNWATCHED __attribute__((no_sanitize("address", "undefined", "thread")))

/* 0 in what comes after scale: without it. */
typedef struct oracle_attn {
    int64_t sq, sk, q_pos, k_pos;
    int h, hkv, d, causal;
    int naive; /* naive runs alone: which of the NAIVE_WAYS ways to sum */
    double scale;
    int v_dim; /* 0 = d */
    int64_t pos_step, window, cu_seqlens_n;
    const int64_t *cu_seqlens; /* [cu_seqlens_n + 1] */
    double softcap;
    const float *sinks; /* [h] */
} oracle_attn;

/* The head dim of v and o. */
UNWATCHED static inline int oracle_v_dim(const oracle_attn *t)
{
    return t->v_dim != 0 ? t->v_dim : t->d;
}

/* Does query i see key j? */
UNWATCHED static inline int oracle_visible(const oracle_attn *t, int64_t i, int64_t j)
{
    const int64_t step = t->pos_step != 0 ? t->pos_step : 1;
    const int64_t at = t->q_pos + i * step, key = t->k_pos + j * step;
    int64_t e;
    if (t->causal && key > at) return 0;
    if (t->window > 0 && key <= at - t->window) return 0;
    if (t->cu_seqlens == NULL) return 1;
    for (e = 0; e < t->cu_seqlens_n; ++e)
        if (t->cu_seqlens[e] <= at && at < t->cu_seqlens[e + 1] && t->cu_seqlens[e] <= key &&
            key < t->cu_seqlens[e + 1])
            return 1;
    return 0;
}

/* First element of row i of head x of q, or of o. */
UNWATCHED static inline int64_t oracle_q_row(const oracle_attn *t, int64_t i, int x)
{
    return (i * t->h + x) * t->d;
}

UNWATCHED static inline int64_t oracle_o_row(const oracle_attn *t, int64_t i, int x)
{
    return (i * t->h + x) * oracle_v_dim(t);
}

/* First element of the key row j that query head x reads, or of the value row. */
UNWATCHED static inline int64_t oracle_k_row(const oracle_attn *t, int64_t j, int x)
{
    return (j * t->hkv + x / (t->h / t->hkv)) * t->d;
}

UNWATCHED static inline int64_t oracle_v_row(const oracle_attn *t, int64_t j, int x)
{
    return (j * t->hkv + x / (t->h / t->hkv)) * oracle_v_dim(t);
}

UNWATCHED static inline double oracle_dot(const double *a, const double *b, int d)
{
    double s = 0;
    int c;
    for (c = 0; c < d; ++c) s += a[c] * b[c];
    return s;
}

/* The score of a product, and its slope: d score / d product. */
UNWATCHED static inline double oracle_score(const oracle_attn *t, double product, double *slope)
{
    double squashed = t->softcap > 0 ? tanh(t->scale * product / t->softcap) : 0;
    *slope = t->scale * (1 - squashed * squashed);
    return t->softcap > 0 ? t->softcap * squashed : t->scale * product;
}

UNWATCHED static inline void oracle_attn_fwd(const oracle_attn *t, const double *q, const double *k,
                                             const double *v, double *o, double *lse)
{
    double *p = (double *)malloc(((size_t)t->sk + 1) * sizeof *p), slope;
    int64_t i, j;
    int x, c, v_dim = oracle_v_dim(t);
    for (i = 0; i < t->sq; ++i)
        for (x = 0; x < t->h; ++x) {
            int64_t row = oracle_o_row(t, i, x);
            double top = t->sinks != NULL ? (double)t->sinks[x] : -(double)INFINITY, sum = 0;
            for (c = 0; c < v_dim; ++c) o[row + c] = 0;
            for (j = 0; j < t->sk; ++j) {
                if (!oracle_visible(t, i, j)) continue;
                p[j] = oracle_score(t, oracle_dot(q + oracle_q_row(t, i, x), k + oracle_k_row(t, j, x), t->d),
                                    &slope);
                if (p[j] > top) top = p[j];
            }
            if (t->sinks != NULL) sum = exp((double)t->sinks[x] - top);
            for (j = 0; j < t->sk; ++j)
                if (oracle_visible(t, i, j)) sum += p[j] = exp(p[j] - top);
            for (j = 0; j < t->sk; ++j)
                for (c = 0; c < v_dim && oracle_visible(t, i, j); ++c)
                    o[row + c] += p[j] / sum * v[oracle_v_row(t, j, x) + c];
            lse[i * t->h + x] = sum > 0 ? top + log(sum) : -(double)INFINITY;
        }
    free(p);
}

/* dq, dk, dv = the gradients of sum(dout * o); o and lse are oracle_attn_fwd's. */
UNWATCHED static inline void oracle_attn_bwd(const oracle_attn *t, const double *q, const double *k,
                                             const double *v, const double *dout, const double *o,
                                             const double *lse, double *dq, double *dk, double *dv)
{
    int64_t i, j;
    int x, c;
    memset(dq, 0, (size_t)(t->sq * t->h * t->d) * sizeof *dq);
    memset(dk, 0, (size_t)(t->sk * t->hkv * t->d) * sizeof *dk);
    memset(dv, 0, (size_t)(t->sk * t->hkv * oracle_v_dim(t)) * sizeof *dv);
    for (x = 0; x < t->h; ++x)
        for (i = 0; i < t->sq; ++i) {
            int64_t row = oracle_q_row(t, i, x), o_row = oracle_o_row(t, i, x);
            double delta = oracle_dot(dout + o_row, o + o_row, oracle_v_dim(t));
            for (j = 0; j < t->sk; ++j) {
                int64_t at = oracle_k_row(t, j, x), v_at = oracle_v_row(t, j, x);
                double slope, p, ds;
                if (!oracle_visible(t, i, j)) continue;
                p = oracle_score(t, oracle_dot(q + row, k + at, t->d), &slope);
                p = exp(p - lse[i * t->h + x]);
                ds = slope * p * (oracle_dot(dout + o_row, v + v_at, oracle_v_dim(t)) - delta);
                for (c = 0; c < oracle_v_dim(t); ++c) dv[v_at + c] += p * dout[o_row + c];
                for (c = 0; c < t->d; ++c) {
                    dk[at + c] += ds * q[row + c];
                    dq[row + c] += ds * k[at + c];
                }
            }
        }
}

/* The same of the sinks; one of -inf is none. */
UNWATCHED static inline void oracle_attn_sinks_bwd(const oracle_attn *t, const double *dout, const double *o,
                                                   const double *lse, double *dsinks)
{
    int64_t i;
    int x;
    for (x = 0; x < t->h; ++x)
        for (dsinks[x] = 0, i = 0; i < t->sq && !isinf(t->sinks[x]); ++i)
            dsinks[x] -= exp((double)t->sinks[x] - lse[i * t->h + x]) *
                         oracle_dot(dout + oracle_o_row(t, i, x), o + oracle_o_row(t, i, x), oracle_v_dim(t));
}

/* x as the storage type would hold it. */
static inline float naive_store(upipe_dtype dtype, float x)
{
    return dtype == UPIPE_F32    ? x
           : dtype == UPIPE_BF16 ? upipe_bf16_to_f32(upipe_f32_to_bf16(x))
                                 : upi_f16_to_f32(upi_f32_to_f16(x));
}

/* A plain loop leaves two things open: where it begins, and whether the compiler fuses multiply and add. For
 * kernels on matrix units, whose operands are of the storage type, NAIVE_NARROW comes to each of these ways:
 * the weights and the gradients of the scores are then rounded before they are multiplied with a matrix. With
 * NAIVE_LATE they are rounded to bf16 whatever is stored, the scale comes behind this rounding, and delta, which
 * is another kernel's, is summed in another order than products are. */
enum { NAIVE_DOWN = 1, NAIVE_FUSED = 2, NAIVE_WAYS = 4, NAIVE_NARROW = 4, NAIVE_LATE = 8 };

/* x as an operand of a matrix product. */
UNWATCHED static inline float naive_operand(upipe_dtype dtype, float x, int naive)
{
    return naive & NAIVE_NARROW ? naive_store(naive & NAIVE_LATE ? UPIPE_BF16 : dtype, x) : x;
}

/* The k-th of n terms of a sum that runs up or down. */
UNWATCHED static inline int64_t naive_term(int64_t k, int64_t n, int naive)
{
    return naive & NAIVE_DOWN ? n - 1 - k : k;
}

UNWATCHED static inline float naive_add(float sum, float a, float b, int naive)
{
    return naive & NAIVE_FUSED ? fmaf(a, b, sum) : sum + a * b;
}

/* Long sums are blocked: the error of one chain grows with its length, and a yardstick that grows too would not
 * see it grow elsewhere. No chain has more than NAIVE_CHAIN terms, and the sums of full chains are added in the
 * same way. The longest chain of any set of kernels has 640 terms, so a sound sum is at most about 640 / 512
 * times as far off; sums of up to NAIVE_CHAIN terms are plain loops. */
enum { NAIVE_CHAIN = 512, NAIVE_LEVELS = 3 };

/* `width` sums side by side: sums [NAIVE_LEVELS][width], zero at first. Terms are added to level 0; this comes
 * after the terms-th one, and moves full chains a level up. */
UNWATCHED static inline void naive_carry(float *sums, int64_t width, int64_t terms)
{
    int64_t i;
    int level;
    for (level = 1; level < NAIVE_LEVELS && terms % NAIVE_CHAIN == 0; ++level, terms /= NAIVE_CHAIN) {
        for (i = 0; i < width; ++i) sums[width + i] += sums[i];
        memset(sums, 0, (size_t)width * sizeof *sums);
        sums += width;
    }
}

/* After the last one of so many terms: the sums are in level 0. */
UNWATCHED static inline void naive_total(float *sums, int64_t width, int64_t terms)
{
    int64_t i;
    int level;
    for (level = 1; level < NAIVE_LEVELS && terms >= NAIVE_CHAIN; ++level, terms /= NAIVE_CHAIN)
        for (i = 0; i < width; ++i) sums[i] += sums[level * width + i];
}

/* Of a head's elements: no more than its dim. */
UNWATCHED static inline float naive_dot(const float *a, const float *b, int d, int naive)
{
    float s = 0;
    int c;
    for (c = 0; c < d; ++c) s = naive_add(s, a[naive_term(c, d, naive)], b[naive_term(c, d, naive)], naive);
    return s;
}

UNWATCHED static inline float naive_score(const oracle_attn *t, float product, float *slope)
{
    float scale = (float)t->scale, cap = (float)t->softcap, squashed;
    *slope = scale;
    if (!(cap > 0)) return scale * product;
    squashed = tanhf(scale * product / cap);
    *slope = scale * (1 - squashed * squashed);
    return cap * squashed;
}

UNWATCHED static inline void naive_attn_fwd(const oracle_attn *t, upipe_dtype dtype, const float *q,
                                            const float *k, const float *v, float *o, float *lse)
{
    const int v_dim = oracle_v_dim(t);
    const size_t o_bytes = (size_t)(NAIVE_LEVELS * v_dim) * sizeof(float);
    float *p = (float *)malloc(((size_t)t->sk + 1) * sizeof *p), *o_sums = (float *)malloc(o_bytes), slope;
    int64_t i, j, m;
    int x, c;
    for (i = 0; i < t->sq; ++i)
        for (x = 0; x < t->h; ++x) {
            int64_t row = oracle_o_row(t, i, x);
            float top = t->sinks != NULL ? t->sinks[x] : -INFINITY, sum[NAIVE_LEVELS] = {0};
            memset(o_sums, 0, o_bytes);
            for (j = 0; j < t->sk; ++j) {
                if (!oracle_visible(t, i, j)) continue;
                p[j] = naive_score(
                    t, naive_dot(q + oracle_q_row(t, i, x), k + oracle_k_row(t, j, x), t->d, t->naive),
                    &slope);
                if (p[j] > top) top = p[j];
            }
            if (t->sinks != NULL) sum[0] = expf(t->sinks[x] - top);
            for (m = 0; m < t->sk; ++m) {
                j = naive_term(m, t->sk, t->naive);
                if (oracle_visible(t, i, j)) {
                    sum[0] += p[j] = expf(p[j] - top);
                    p[j] = naive_operand(dtype, p[j], t->naive);
                    for (c = 0; c < v_dim; ++c)
                        o_sums[c] = naive_add(o_sums[c], p[j], v[oracle_v_row(t, j, x) + c], t->naive);
                }
                naive_carry(sum, 1, m + 1);
                naive_carry(o_sums, v_dim, m + 1);
            }
            naive_total(sum, 1, t->sk);
            naive_total(o_sums, v_dim, t->sk);
            for (c = 0; c < v_dim; ++c) o[row + c] = sum[0] > 0 ? naive_store(dtype, o_sums[c] / sum[0]) : 0;
            lse[i * t->h + x] = sum[0] > 0 ? top + logf(sum[0]) : -INFINITY;
        }
    free(p);
    free(o_sums);
}

UNWATCHED static inline void naive_attn_bwd(const oracle_attn *t, upipe_dtype dtype, const float *q,
                                            const float *k, const float *v, const float *dout, const float *o,
                                            const float *lse, float *dq, float *dk, float *dv)
{
    const int64_t keys = t->sk * t->hkv * t->d, values = t->sk * t->hkv * oracle_v_dim(t);
    float *dq_sums = (float *)malloc((size_t)(NAIVE_LEVELS * t->d) * sizeof *dq_sums);
    float *dk_sums = (float *)calloc((size_t)(NAIVE_LEVELS * keys) + 1, sizeof *dk_sums);
    float *dv_sums = (float *)calloc((size_t)(NAIVE_LEVELS * values) + 1, sizeof *dv_sums);
    const int late = (t->naive & NAIVE_LATE) != 0;
    int64_t r, i, j, m;
    int x, c;
    for (x = 0; x < t->h; ++x)
        for (r = 0; r < t->sq; ++r) {
            int64_t row, o_row;
            float delta;
            i = naive_term(r, t->sq, t->naive);
            row = oracle_q_row(t, i, x);
            o_row = oracle_o_row(t, i, x);
            delta =
                naive_dot(dout + o_row, o + o_row, oracle_v_dim(t), late ? t->naive ^ NAIVE_DOWN : t->naive);
            memset(dq_sums, 0, (size_t)(NAIVE_LEVELS * t->d) * sizeof *dq_sums);
            for (m = 0; m < t->sk; naive_carry(dq_sums, t->d, ++m)) {
                int64_t at, v_at;
                float p, ds, slope;
                j = naive_term(m, t->sk, t->naive);
                if (!oracle_visible(t, i, j)) continue;
                at = oracle_k_row(t, j, x);
                v_at = oracle_v_row(t, j, x);
                p = naive_score(t, naive_dot(q + row, k + at, t->d, t->naive), &slope);
                p = expf(p - lse[i * t->h + x]);
                ds = p * (naive_dot(dout + o_row, v + v_at, oracle_v_dim(t), t->naive) - delta);
                if (late) slope /= (float)t->scale;
                ds = naive_operand(dtype, slope * ds, t->naive);
                if (late) ds *= (float)t->scale;
                p = naive_operand(dtype, p, t->naive);
                for (c = 0; c < oracle_v_dim(t); ++c)
                    dv_sums[v_at + c] = naive_add(dv_sums[v_at + c], p, dout[o_row + c], t->naive);
                for (c = 0; c < t->d; ++c) {
                    dk_sums[at + c] = naive_add(dk_sums[at + c], ds, q[row + c], t->naive);
                    dq_sums[c] = naive_add(dq_sums[c], ds, k[at + c], t->naive);
                }
            }
            naive_total(dq_sums, t->d, t->sk);
            for (c = 0; c < t->d; ++c) dq[row + c] = naive_store(dtype, dq_sums[c]);
            naive_carry(dk_sums, keys, x * t->sq + r + 1);
            naive_carry(dv_sums, values, x * t->sq + r + 1);
        }
    naive_total(dk_sums, keys, t->h * t->sq);
    naive_total(dv_sums, values, t->h * t->sq);
    memcpy(dk, dk_sums, (size_t)keys * sizeof *dk);
    memcpy(dv, dv_sums, (size_t)values * sizeof *dv);
    free(dq_sums);
    free(dk_sums);
    free(dv_sums);
}

#endif

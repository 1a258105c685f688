/* oracle.h -- dense attention in plain loops: in f64, the truth; in the kernel's own type, the naive
 *             yardstick
 *
 * Tensors are packed: q, o and their gradients [sq][h][d], k, v and theirs [sk][hkv][d], lse [sq][h]. Query
 * head x reads key/value head x / (h / hkv); a causal query i sees key j if q_pos + i >= k_pos + j. A row
 * that sees no key has o = 0 and lse = -inf. Inputs are values that the storage type holds: round them before
 * (naive_store).
 *
 *     oracle_attn_fwd(&shape, q, k, v, o, lse);                          double: the reference
 *     naive_attn_fwd(&shape, UPIPE_BF16, qf, kf, vf, of, lsef);          float: what a plain kernel would
 *                                                                        give
 *     CHECK_CLOSE(got, naive, ways, o, n, "o");                          tolerance.h: got against both
 *
 * The naive one does its arithmetic in f32, row by row, and rounds what a kernel would store: o and dq. dk
 * and dv stay f32. Each takes o and lse of its own forward for its backward. shape.naive says how its sums
 * run.
 */
#ifndef UPIPE_TEST_ORACLE_H
#define UPIPE_TEST_ORACLE_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "../upipe/cpu/upipe_cpu_simd.h"

typedef struct oracle_attn {
    int64_t sq, sk, q_pos, k_pos;
    int h, hkv, d, causal;
    int naive; /* naive runs alone: which of the NAIVE_WAYS ways to sum */
    double scale;
} oracle_attn;

/* Keys that query i sees: [0, result). */
static inline int64_t oracle_sees(const oracle_attn *t, int64_t i)
{
    int64_t n = t->q_pos + i - t->k_pos + 1;
    if (!t->causal || n > t->sk) return t->sk;
    return n > 0 ? n : 0;
}

/* First element of row i of head x. */
static inline int64_t oracle_q_row(const oracle_attn *t, int64_t i, int x)
{
    return (i * t->h + x) * t->d;
}

/* First element of the key or value row j that query head x reads. */
static inline int64_t oracle_k_row(const oracle_attn *t, int64_t j, int x)
{
    return (j * t->hkv + x / (t->h / t->hkv)) * t->d;
}

static inline double oracle_dot(const double *a, const double *b, int d)
{
    double s = 0;
    int c;
    for (c = 0; c < d; ++c) s += a[c] * b[c];
    return s;
}

static inline void oracle_attn_fwd(const oracle_attn *t, const double *q, const double *k, const double *v,
                                   double *o, double *lse)
{
    double *p = (double *)malloc(((size_t)t->sk + 1) * sizeof *p);
    int64_t i, j;
    int x, c;
    for (i = 0; i < t->sq; ++i)
        for (x = 0; x < t->h; ++x) {
            int64_t n = oracle_sees(t, i), row = oracle_q_row(t, i, x);
            double top = -INFINITY, sum = 0;
            for (c = 0; c < t->d; ++c) o[row + c] = 0;
            for (j = 0; j < n; ++j) {
                p[j] = t->scale * oracle_dot(q + row, k + oracle_k_row(t, j, x), t->d);
                if (p[j] > top) top = p[j];
            }
            for (j = 0; j < n; ++j) sum += p[j] = exp(p[j] - top);
            for (j = 0; j < n; ++j)
                for (c = 0; c < t->d; ++c) o[row + c] += p[j] / sum * v[oracle_k_row(t, j, x) + c];
            lse[i * t->h + x] = n > 0 ? top + log(sum) : -INFINITY;
        }
    free(p);
}

/* dq, dk, dv = the gradients of sum(go * o); o and lse are oracle_attn_fwd's. */
static inline void oracle_attn_bwd(const oracle_attn *t, const double *q, const double *k, const double *v,
                                   const double *go, const double *o, const double *lse, double *dq,
                                   double *dk, double *dv)
{
    int64_t i, j;
    int x, c;
    memset(dq, 0, (size_t)(t->sq * t->h * t->d) * sizeof *dq);
    memset(dk, 0, (size_t)(t->sk * t->hkv * t->d) * sizeof *dk);
    memset(dv, 0, (size_t)(t->sk * t->hkv * t->d) * sizeof *dv);
    for (x = 0; x < t->h; ++x)
        for (i = 0; i < t->sq; ++i) {
            int64_t n = oracle_sees(t, i), row = oracle_q_row(t, i, x);
            double delta = oracle_dot(go + row, o + row, t->d);
            for (j = 0; j < n; ++j) {
                int64_t at = oracle_k_row(t, j, x);
                double p = exp(t->scale * oracle_dot(q + row, k + at, t->d) - lse[i * t->h + x]);
                double ds = t->scale * p * (oracle_dot(go + row, v + at, t->d) - delta);
                for (c = 0; c < t->d; ++c) {
                    dv[at + c] += p * go[row + c];
                    dk[at + c] += ds * q[row + c];
                    dq[row + c] += ds * k[at + c];
                }
            }
        }
}

/* x as the storage type would hold it. */
static inline float naive_store(upipe_dtype dtype, float x)
{
    return dtype == UPIPE_F32    ? x
           : dtype == UPIPE_BF16 ? upi_bf16_to_f32(upi_f32_to_bf16(x))
                                 : upi_f16_to_f32(upi_f32_to_f16(x));
}

/* A plain loop leaves two things open: where it begins, and whether the compiler fuses multiply and add. For
 * kernels on matrix units, whose operands are of the storage type, NAIVE_NARROW comes to each of these ways:
 * the weights and the gradients of the scores are then rounded before they are multiplied with a matrix. */
enum { NAIVE_DOWN = 1, NAIVE_FUSED = 2, NAIVE_WAYS = 4, NAIVE_NARROW = 4 };

/* x as an operand of a matrix product. */
static inline float naive_operand(upipe_dtype dtype, float x, int naive)
{
    return naive & NAIVE_NARROW ? naive_store(dtype, x) : x;
}

/* The k-th of n terms of a sum that runs up or down. */
static inline int64_t naive_term(int64_t k, int64_t n, int naive)
{
    return naive & NAIVE_DOWN ? n - 1 - k : k;
}

static inline float naive_add(float sum, float a, float b, int naive)
{
    return naive & NAIVE_FUSED ? fmaf(a, b, sum) : sum + a * b;
}

static inline float naive_dot(const float *a, const float *b, int d, int naive)
{
    float s = 0;
    int c;
    for (c = 0; c < d; ++c) s = naive_add(s, a[naive_term(c, d, naive)], b[naive_term(c, d, naive)], naive);
    return s;
}

static inline void naive_attn_fwd(const oracle_attn *t, upipe_dtype dtype, const float *q, const float *k,
                                  const float *v, float *o, float *lse)
{
    float *p = (float *)malloc(((size_t)t->sk + 1) * sizeof *p);
    float scale = (float)t->scale;
    int64_t i, j, m;
    int x, c;
    for (i = 0; i < t->sq; ++i)
        for (x = 0; x < t->h; ++x) {
            int64_t n = oracle_sees(t, i), row = oracle_q_row(t, i, x);
            float top = -INFINITY, sum = 0;
            for (c = 0; c < t->d; ++c) o[row + c] = 0;
            for (j = 0; j < n; ++j) {
                p[j] = scale * naive_dot(q + row, k + oracle_k_row(t, j, x), t->d, t->naive);
                if (p[j] > top) top = p[j];
            }
            for (m = 0; m < n; ++m) {
                j = naive_term(m, n, t->naive);
                sum += p[j] = expf(p[j] - top);
                p[j] = naive_operand(dtype, p[j], t->naive);
                for (c = 0; c < t->d; ++c)
                    o[row + c] = naive_add(o[row + c], p[j], v[oracle_k_row(t, j, x) + c], t->naive);
            }
            for (c = 0; c < t->d; ++c) o[row + c] = n > 0 ? naive_store(dtype, o[row + c] / sum) : 0;
            lse[i * t->h + x] = n > 0 ? top + logf(sum) : -INFINITY;
        }
    free(p);
}

static inline void naive_attn_bwd(const oracle_attn *t, upipe_dtype dtype, const float *q, const float *k,
                                  const float *v, const float *go, const float *o, const float *lse,
                                  float *dq, float *dk, float *dv)
{
    float scale = (float)t->scale;
    int64_t r, i, j, m;
    int x, c;
    memset(dq, 0, (size_t)(t->sq * t->h * t->d) * sizeof *dq);
    memset(dk, 0, (size_t)(t->sk * t->hkv * t->d) * sizeof *dk);
    memset(dv, 0, (size_t)(t->sk * t->hkv * t->d) * sizeof *dv);
    for (x = 0; x < t->h; ++x)
        for (r = 0; r < t->sq; ++r) {
            int64_t n, row;
            float delta;
            i = naive_term(r, t->sq, t->naive);
            n = oracle_sees(t, i);
            row = oracle_q_row(t, i, x);
            delta = naive_dot(go + row, o + row, t->d, t->naive);
            for (m = 0; m < n; ++m) {
                int64_t at;
                float p, ds;
                j = naive_term(m, n, t->naive);
                at = oracle_k_row(t, j, x);
                p = expf(scale * naive_dot(q + row, k + at, t->d, t->naive) - lse[i * t->h + x]);
                ds = scale * p * (naive_dot(go + row, v + at, t->d, t->naive) - delta);
                ds = naive_operand(dtype, ds, t->naive);
                p = naive_operand(dtype, p, t->naive);
                for (c = 0; c < t->d; ++c) {
                    dv[at + c] = naive_add(dv[at + c], p, go[row + c], t->naive);
                    dk[at + c] = naive_add(dk[at + c], ds, q[row + c], t->naive);
                    dq[row + c] = naive_add(dq[row + c], ds, k[at + c], t->naive);
                }
            }
            for (c = 0; c < t->d; ++c) dq[row + c] = naive_store(dtype, dq[row + c]);
        }
}

#endif

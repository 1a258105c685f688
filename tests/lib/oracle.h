/* oracle.h -- dense attention in plain loops: in f64, the truth; in the kernel's own type, the naive
 *             yardstick
 *
 * Tensors are packed: q and its gradient [sq][h][d], k and its [sk][hkv][d], v and its [sk][hkv][v_dim], o
 * and its [sq][h][v_dim], lse [sq][h]. Query head x reads key/value head x / (h / hkv). What query i sees is
 * asked of every key on its own (oracle_visible). A row that sees no key has o = 0, and lse = -inf or the
 * sink. Inputs are values that the storage type holds: round them before (naive_store).
 *
 *     f64_attn_fwd(&shape, UPIPE_F32, q, k, v, o, lse);                  double: the reference
 *     f32_attn_fwd(&shape, UPIPE_BF16, qf, kf, vf, of, lsef);            float: what a plain kernel would
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

#include "memory.h"

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
    if (t->causal && key > at) return 0;
    if (t->window > 0 && key <= at - t->window) return 0;
    if (t->cu_seqlens == NULL) return 1;
    for (int64_t e = 0; e < t->cu_seqlens_n; ++e)
        if (t->cu_seqlens[e] <= at && at < t->cu_seqlens[e + 1] && t->cu_seqlens[e] <= key &&
            key < t->cu_seqlens[e + 1])
            return 1;
    return 0;
}

/* Does query i lie outside of all packed sequences? */
UNWATCHED static inline int oracle_outside(const oracle_attn *t, int64_t i)
{
    const int64_t at = t->q_pos + i * (t->pos_step != 0 ? t->pos_step : 1);
    return t->cu_seqlens != NULL && (at < t->cu_seqlens[0] || at >= t->cu_seqlens[t->cu_seqlens_n]);
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

/* x as the storage type would hold it. */
static inline float naive_store(upipe_dtype dtype, float x)
{
    return dtype == UPIPE_F32 ? x : upipe_bf16_to_f32(upipe_f32_to_bf16(x));
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
    for (int level = 1; level < NAIVE_LEVELS && terms % NAIVE_CHAIN == 0; ++level, terms /= NAIVE_CHAIN) {
        for (int64_t i = 0; i < width; ++i) sums[width + i] += sums[i];
        memset(sums, 0, (size_t)width * sizeof *sums);
        sums += width;
    }
}

/* After the last one of so many terms: the sums are in level 0. */
UNWATCHED static inline void naive_total(float *sums, int64_t width, int64_t terms)
{
    for (int level = 1; level < NAIVE_LEVELS && terms >= NAIVE_CHAIN; ++level, terms /= NAIVE_CHAIN)
        for (int64_t i = 0; i < width; ++i) sums[i] += sums[level * width + i];
}

#define ORACLE_PART "oracle_attn.inc"
#include "oracle_twice.inc"

/* dsinks; one of -inf is none. */
UNWATCHED static inline void oracle_attn_sinks_bwd(const oracle_attn *t, const double *dout, const double *o,
                                                   const double *lse, double *dsinks)
{
    int64_t i;
    for (int x = 0; x < t->h; ++x)
        for (dsinks[x] = 0, i = 0; i < t->sq && !isinf(t->sinks[x]); ++i)
            dsinks[x] -= exp((double)t->sinks[x] - lse[i * t->h + x]) *
                         f64_dot(dout + oracle_o_row(t, i, x), o + oracle_o_row(t, i, x), oracle_v_dim(t), 0);
}

#endif

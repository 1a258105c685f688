/* upipe_cpu_attn.h -- attention on one CPU core, forward and backward   backend cpu, includes cpu_simd, attn
 *
 * Fills three entries of the table (upi_cpu_attn_fwd, _bwd, _bytes). Links with the math library.
 *
 * Sixteen queries, a panel, lie in the lanes of two vectors, and everything is computed transposed:
 *
 *     S^T[key][16] = K[key] . Q^T[d][16]        softmax runs down the columns: no sum across lanes
 *     O^T[d][16]  += V[key][d] . P^T[key][16]   V and K are only broadcast: no transpose, only a copy of rows
 *
 * A block of queries stays in scratch as panels while blocks of 64 keys pass by; o leaves once, at the end.
 * The backward recomputes P from lse in the same form, five products in one pass; dQ stays in scratch, dK and
 * dV are added to memory block by block of queries. Every element of every sum is one chain in a fixed order.
 * All rows are first copied to scratch as f32, so results depend on the values alone, not on steps or
 * addresses. A hidden key gets the weight 0 exactly, and work on it is left out where a whole panel does not
 * see it.
 */
#ifndef UPIPE_CPU_ATTN_H
#define UPIPE_CPU_ATTN_H

#include <math.h>

#include "upipe_cpu_simd.h"
#include "../upipe_attn.h"

enum {
    UPI_ATTN_PANEL = 16,     /* queries in the lanes of a panel */
    UPI_ATTN_TILE = 4,       /* rows of a register tile: 4 x 16 sums, eight registers */
    UPI_ATTN_KEYS = 64,      /* keys in a block */
    UPI_ATTN_ROWS_FWD = 192, /* queries in a block; Q and O then fill a fifth of a 1 MiB cache at d 128 */
    UPI_ATTN_ROWS_BWD = 128,
    UPI_ATTN_PAD = 16, /* elements between copied rows: steps of a power of two would share few cache sets */
};

UPI_KERNELS_BEGIN

/* One query head with its key/value head; steps in elements. gq .. gv only in the backward. */
typedef struct upi_attn_head {
    const void *q, *k, *v, *go;
    void *o, *gq;
    float *lse, *gk, *gv;
    const float *delta;
    int64_t q_step, k_step, v_step, go_step, o_step, gq_step, lse_step, gk_step, gv_step, delta_step;
    int64_t queries, keys;
    int64_t ahead; /* query i sees keys up to i + ahead */
    int d, causal, merge;
    float scale;
    upipe_dtype dtype, o_dtype;
} upi_attn_head;

/* The lesser of what is left and a block's size. */
UPI_INLINE int upi_attn_least(int64_t left, int size)
{
    return left < size ? (int)left : size;
}

/* ---- scratch ---- */

/* Hands out `count` floats, a multiple of 16, behind *used; NULL if there is no base: then only *used
 * counts. */
UPI_INLINE float *upi_attn_carve(float *base, size_t *used, int64_t count)
{
    float *at = base != NULL ? base + *used : NULL;
    *used += (size_t)count;
    return at;
}

typedef struct upi_attn_fwd_work {
    float *q;     /* [12 panels][d][16]  queries */
    float *o;     /* [12 panels][d][16]  sums of weighted values */
    float *k, *v; /* [64][d + pad] */
    float *p;     /* [64][16]            products k . q, then weights, of one panel */
    float *top;   /* [12 panels][16]     greatest score so far */
    float *sum;   /* [12 panels][16]     sum of weights so far */
} upi_attn_fwd_work;

/* Lays the scratch out from base, which may be NULL; returns its floats. */
UPI_INLINE size_t upi_attn_fwd_layout(upi_attn_fwd_work *w, float *base, int64_t d)
{
    size_t used = 0;
    w->q = upi_attn_carve(base, &used, UPI_ATTN_ROWS_FWD * d);
    w->o = upi_attn_carve(base, &used, UPI_ATTN_ROWS_FWD * d);
    w->k = upi_attn_carve(base, &used, UPI_ATTN_KEYS * (d + UPI_ATTN_PAD));
    w->v = upi_attn_carve(base, &used, UPI_ATTN_KEYS * (d + UPI_ATTN_PAD));
    w->p = upi_attn_carve(base, &used, UPI_ATTN_KEYS * UPI_ATTN_PANEL);
    w->top = upi_attn_carve(base, &used, UPI_ATTN_ROWS_FWD);
    w->sum = upi_attn_carve(base, &used, UPI_ATTN_ROWS_FWD);
    return used;
}

typedef struct upi_attn_bwd_work {
    float *q, *go, *gq;      /* [8 panels][d][16]      queries, gradients of o and of q */
    float *q_rows, *go_rows; /* [d/16, up][128][16]    queries times scale, gradients of o */
    float *p, *s;            /* [8 panels][64][16]     weights, and gradients of the scores */
    float *k, *v;            /* [64][d + pad] */
    float *lse, *delta;      /* [8 panels][16] */
} upi_attn_bwd_work;

UPI_INLINE size_t upi_attn_bwd_layout(upi_attn_bwd_work *w, float *base, int64_t d)
{
    int64_t d16 = (d + 15) / 16 * 16;
    size_t used = 0;
    w->q = upi_attn_carve(base, &used, UPI_ATTN_ROWS_BWD * d);
    w->go = upi_attn_carve(base, &used, UPI_ATTN_ROWS_BWD * d);
    w->gq = upi_attn_carve(base, &used, UPI_ATTN_ROWS_BWD * d);
    w->q_rows = upi_attn_carve(base, &used, UPI_ATTN_ROWS_BWD * d16);
    w->go_rows = upi_attn_carve(base, &used, UPI_ATTN_ROWS_BWD * d16);
    w->p = upi_attn_carve(base, &used, UPI_ATTN_ROWS_BWD * UPI_ATTN_KEYS);
    w->s = upi_attn_carve(base, &used, UPI_ATTN_ROWS_BWD * UPI_ATTN_KEYS);
    w->k = upi_attn_carve(base, &used, UPI_ATTN_KEYS * (d + UPI_ATTN_PAD));
    w->v = upi_attn_carve(base, &used, UPI_ATTN_KEYS * (d + UPI_ATTN_PAD));
    w->lse = upi_attn_carve(base, &used, UPI_ATTN_ROWS_BWD);
    w->delta = upi_attn_carve(base, &used, UPI_ATTN_ROWS_BWD);
    return used;
}

/* ---- rows of storage <-> f32 scratch; `rows` is row `first` of a matrix of steps `step` ---- */

/* panel[k][lane] = rows[lane][k]; lanes from count on are 0. */
UPI_CPU_KERNEL void upi_attn_pack_panel(float *panel, const void *rows, upipe_dtype dtype, int64_t first,
                                        int64_t step, int count, int d)
{
    int half, k, i;
    for (half = 0; half < UPI_ATTN_PANEL; half += UPI_LANES)
        for (k = 0; k < d; k += UPI_LANES) {
            upi_f8 r[UPI_LANES];
            UPI_CPU_UNROLL
            for (i = 0; i < UPI_LANES; ++i)
                r[i] =
                    half + i < count ? upi_f8_get(rows, dtype, (first + half + i) * step + k) : upi_f8_zero();
            upi_f8_transpose(r);
            UPI_CPU_UNROLL
            for (i = 0; i < UPI_LANES; ++i) upi_f8_store(panel + (k + i) * UPI_ATTN_PANEL + half, r[i]);
        }
}

/* rows[lane][k] = panel[k][lane] * factor[lane] for lanes below count; with keep, + keep[lane] * what is
 * there, where keep[lane] is not 0. */
UPI_CPU_KERNEL void upi_attn_unpack_panel(void *rows, upipe_dtype dtype, int64_t first, int64_t step,
                                          int count, int d, const float *panel, const float *factor,
                                          const float *keep)
{
    int half, k, i;
    for (half = 0; half < UPI_ATTN_PANEL; half += UPI_LANES) {
        const upi_f8 times = upi_f8_load(factor + half);
        for (k = 0; k < d; k += UPI_LANES) {
            upi_f8 r[UPI_LANES];
            UPI_CPU_UNROLL
            for (i = 0; i < UPI_LANES; ++i)
                r[i] = upi_f8_mul(times, upi_f8_load(panel + (k + i) * UPI_ATTN_PANEL + half));
            upi_f8_transpose(r);
            UPI_CPU_UNROLL
            for (i = 0; i < UPI_LANES; ++i)
                if (half + i < count) {
                    const int64_t at = (first + half + i) * step + k;
                    if (keep != NULL && keep[half + i] != 0)
                        r[i] = upi_f8_fma(upi_f8_set1(keep[half + i]), upi_f8_get(rows, dtype, at), r[i]);
                    upi_f8_put(rows, dtype, at, r[i]);
                }
        }
    }
}

/* out[i][d + pad] = rows[i][d] for a block of keys; zeros up to the next whole tile. */
UPI_CPU_KERNEL void upi_attn_pack_keys(float *out, const void *rows, upipe_dtype dtype, int64_t first,
                                       int64_t step, int count, int d)
{
    int i, k;
    for (i = 0; i < count; ++i, out += d + UPI_ATTN_PAD)
        for (k = 0; k < d; k += UPI_LANES)
            upi_f8_store(out + k, upi_f8_get(rows, dtype, (first + i) * step + k));
    for (; i % UPI_ATTN_TILE != 0; ++i, out += d + UPI_ATTN_PAD)
        for (k = 0; k < d; k += UPI_LANES) upi_f8_store(out + k, upi_f8_zero());
}

/* out[k / 16][i][k % 16] = factor * rows[i][k]; zeros up to the next whole panel. */
UPI_CPU_KERNEL void upi_attn_pack_columns(float *out, const void *rows, upipe_dtype dtype, int64_t first,
                                          int64_t step, int count, int d, float factor)
{
    const upi_f8 times = upi_f8_set1(factor);
    int i, k;
    for (k = 0; k < d; k += UPI_LANES) {
        float *column = out + k / 16 * 16 * UPI_ATTN_ROWS_BWD + k % 16;
        for (i = 0; i < count; ++i)
            upi_f8_store(column + i * 16, upi_f8_mul(times, upi_f8_get(rows, dtype, (first + i) * step + k)));
        for (; i % UPI_ATTN_PANEL != 0; ++i) upi_f8_store(column + i * 16, upi_f8_zero());
    }
}

/* ---- register tiles: `tile` rows x 16 columns, summed over `depth`; tile is constant after inlining ---- */

/* sums[i] += a[i * row_step + k * depth_step] * b[k][16], k = 0 .. depth - 1 in order */
UPI_INLINE void upi_attn_tile(int tile, int64_t depth, const float *a, int64_t row_step, int64_t depth_step,
                              const float *b, upi_f8 sums[][2])
{
    int64_t k;
    int i;
    for (k = 0; k < depth; ++k, a += depth_step, b += UPI_ATTN_PANEL) {
        upi_f8 b0 = upi_f8_load(b), b1 = upi_f8_load(b + UPI_LANES);
        UPI_OPAQUE(b0);
        UPI_OPAQUE(b1);
        UPI_CPU_UNROLL
        for (i = 0; i < tile; ++i) {
            upi_f8 x = upi_f8_broadcast(a + i * row_step);
            sums[i][0] = upi_f8_fma(x, b0, sums[i][0]);
            sums[i][1] = upi_f8_fma(x, b1, sums[i][1]);
        }
    }
}

/* sums[4][2] = products of four rows of [d + pad] with a panel [d][16]; see UPI_DOT_PIECE. */
UPI_INLINE void upi_attn_dot(int d, const float *rows, const float *panel, upi_f8 sums[][2])
{
    int c, i;
    UPI_CPU_UNROLL
    for (i = 0; i < UPI_ATTN_TILE; ++i) sums[i][0] = sums[i][1] = upi_f8_zero();
    upi_attn_tile(UPI_ATTN_TILE, d < UPI_DOT_PIECE ? d : (int)UPI_DOT_PIECE, rows, d + UPI_ATTN_PAD, 1, panel,
                  sums);
    for (c = UPI_DOT_PIECE; c < d; c += UPI_DOT_PIECE) {
        upi_f8 more[UPI_ATTN_TILE][2];
        int count = d - c < UPI_DOT_PIECE ? d - c : (int)UPI_DOT_PIECE;
        UPI_CPU_UNROLL
        for (i = 0; i < UPI_ATTN_TILE; ++i) more[i][0] = more[i][1] = upi_f8_zero();
        upi_attn_tile(UPI_ATTN_TILE, count, rows + c, d + UPI_ATTN_PAD, 1, panel + c * UPI_ATTN_PANEL, more);
        UPI_CPU_UNROLL
        for (i = 0; i < UPI_ATTN_TILE; ++i) {
            sums[i][0] = upi_f8_add(sums[i][0], more[i][0]);
            sums[i][1] = upi_f8_add(sums[i][1], more[i][1]);
        }
    }
}

/* Products of four keys with a panel: out[4][16]; raises top if there is one. */
UPI_INLINE void upi_attn_products(int d, const float *keys, const float *panel, float *__restrict out,
                                  upi_f8 *top)
{
    upi_f8 sums[UPI_ATTN_TILE][2];
    int i;
    upi_attn_dot(d, keys, panel, sums);
    UPI_CPU_UNROLL
    for (i = 0; i < UPI_ATTN_TILE; ++i) {
        upi_f8_store(out + i * UPI_ATTN_PANEL, sums[i][0]);
        upi_f8_store(out + i * UPI_ATTN_PANEL + UPI_LANES, sums[i][1]);
        if (top != NULL) {
            top[0] = upi_f8_max(top[0], sums[i][0]);
            top[1] = upi_f8_max(top[1], sums[i][1]);
        }
    }
}

/* out[d][16] = fold * out + rows^T . weights, over `keys` rows of [d + pad]; fold NULL = 1 */
UPI_INLINE void upi_attn_weigh(int d, int keys, const float *rows, const float *weights,
                               float *__restrict out, const upi_f8 *fold)
{
    int c, i;
    for (c = 0; c < d; c += UPI_ATTN_TILE) {
        float *at = out + c * UPI_ATTN_PANEL;
        upi_f8 sums[UPI_ATTN_TILE][2];
        UPI_CPU_UNROLL
        for (i = 0; i < UPI_ATTN_TILE; ++i) {
            sums[i][0] = upi_f8_load(at + i * UPI_ATTN_PANEL);
            sums[i][1] = upi_f8_load(at + i * UPI_ATTN_PANEL + UPI_LANES);
            if (fold != NULL) {
                sums[i][0] = upi_f8_mul(fold[0], sums[i][0]);
                sums[i][1] = upi_f8_mul(fold[1], sums[i][1]);
            }
        }
        upi_attn_tile(UPI_ATTN_TILE, keys, rows + c, 1, d + UPI_ATTN_PAD, weights, sums);
        UPI_CPU_UNROLL
        for (i = 0; i < UPI_ATTN_TILE; ++i) {
            upi_f8_store(at + i * UPI_ATTN_PANEL, sums[i][0]);
            upi_f8_store(at + i * UPI_ATTN_PANEL + UPI_LANES, sums[i][1]);
        }
    }
}

/* ---- what is visible ---- */

/* Keys that the queries first .. first + count - 1 see between them: [0, result). */
UPI_INLINE int64_t upi_attn_reach(const upi_attn_head *a, int64_t first, int64_t count)
{
    int64_t reach = first + count + a->ahead;
    if (!a->causal || reach > a->keys) return a->keys;
    return reach > 0 ? reach : 0;
}

/* Of a block of `count` keys from k0, those that the panel at query q0 sees: [0, result); 0 if none. Lane l
 * sees keys up to *last + l; the mask is needed if *last < result - 1, and *last > -16 then. */
UPI_INLINE int upi_attn_panel_keys(const upi_attn_head *a, int64_t q0, int64_t k0, int count, int *last)
{
    int64_t reach = q0 + a->ahead - k0;
    *last = count;
    if (!a->causal || reach >= count - 1) return count;
    if (reach <= -UPI_ATTN_PANEL) return 0;
    *last = (int)reach;
    return upi_attn_least(*last + UPI_ATTN_PANEL, count);
}

/* at[16] = its lanes that see key j, and `hidden` in the others */
UPI_INLINE void upi_attn_hide(float *at, int j, int last, upi_f8 hidden)
{
    upi_mask8 m0 = upi_lanes_above(j - last - 1), m1 = upi_lanes_above(j - last - 1 - UPI_LANES);
    upi_f8_store(at, upi_f8_select(m0, upi_f8_load(at), hidden));
    upi_f8_store(at + UPI_LANES, upi_f8_select(m1, upi_f8_load(at + UPI_LANES), hidden));
}

/* ---- forward ---- */

/* The scale is left to the exponent: products of bf16 values then sum almost without rounding. */
UPI_INLINE upi_f8 upi_attn_weight(upi_f8 product, upi_f8 rate, upi_f8 top)
{
    return upi_f8_exp2(upi_f8_mul(rate, upi_f8_sub(product, top)));
}

/* Turns products p[keys][16] into weights 2^(rate * (p - top)), adds them to sum. */
UPI_INLINE void upi_attn_softmax(float *p, int keys, upi_f8 rate, const upi_f8 *top, upi_f8 *sum)
{
    upi_f8 odd[2];
    int j, half;
    odd[0] = odd[1] = upi_f8_zero();
    for (j = 0; j + 2 <= keys; j += 2) {
        float *at = p + j * UPI_ATTN_PANEL;
        UPI_CPU_UNROLL
        for (half = 0; half < 2; ++half) {
            upi_f8 e = upi_attn_weight(upi_f8_load(at + half * UPI_LANES), rate, top[half]);
            upi_f8 f = upi_attn_weight(upi_f8_load(at + half * UPI_LANES + UPI_ATTN_PANEL), rate, top[half]);
            upi_f8_store(at + half * UPI_LANES, e);
            upi_f8_store(at + half * UPI_LANES + UPI_ATTN_PANEL, f);
            sum[half] = upi_f8_add(sum[half], e);
            odd[half] = upi_f8_add(odd[half], f);
        }
    }
    if (j < keys) {
        float *at = p + j * UPI_ATTN_PANEL;
        UPI_CPU_UNROLL
        for (half = 0; half < 2; ++half) {
            upi_f8 e = upi_attn_weight(upi_f8_load(at + half * UPI_LANES), rate, top[half]);
            upi_f8_store(at + half * UPI_LANES, e);
            sum[half] = upi_f8_add(sum[half], e);
        }
    }
    sum[0] = upi_f8_add(sum[0], odd[0]);
    sum[1] = upi_f8_add(sum[1], odd[1]);
}

/* One panel against one block of keys; rate = scale * log2(e). */
UPI_INLINE void upi_attn_fwd_panel(const upi_attn_fwd_work *w, int d, upi_f8 rate, int panel, int keys,
                                   int last)
{
    const upi_f8 nothing = upi_f8_set1(-INFINITY);
    const float *q = w->q + panel * UPI_ATTN_PANEL * d;
    float *at_top = w->top + panel * UPI_ATTN_PANEL, *at_sum = w->sum + panel * UPI_ATTN_PANEL;
    upi_f8 old[2], top[2], sum[2], fold[2];
    int masked = last < keys - 1;
    int whole = masked ? 0 : keys / UPI_ATTN_TILE * UPI_ATTN_TILE;
    int j, half;
    UPI_CPU_UNROLL
    for (half = 0; half < 2; ++half) top[half] = old[half] = upi_f8_load(at_top + half * UPI_LANES);

    for (j = 0; j < whole; j += UPI_ATTN_TILE)
        upi_attn_products(d, w->k + j * (d + UPI_ATTN_PAD), q, w->p + j * UPI_ATTN_PANEL, top);
    for (; j < keys; j += UPI_ATTN_TILE)
        upi_attn_products(d, w->k + j * (d + UPI_ATTN_PAD), q, w->p + j * UPI_ATTN_PANEL, NULL);
    for (j = whole; j < keys; ++j) {
        float *at = w->p + j * UPI_ATTN_PANEL;
        if (masked) upi_attn_hide(at, j, last, nothing);
        UPI_CPU_UNROLL
        for (half = 0; half < 2; ++half)
            top[half] = upi_f8_max(top[half], upi_f8_load(at + half * UPI_LANES));
    }

    UPI_CPU_UNROLL
    for (half = 0; half < 2; ++half) {
        upi_f8_store(at_top + half * UPI_LANES, top[half]);
        /* A lane that has seen nothing measures from 0: -inf - -inf would be a NaN, and a finite stand-in for
         * -inf would give hidden keys the weight exp(0). */
        top[half] = upi_f8_select(upi_f8_equal(top[half], nothing), upi_f8_zero(), top[half]);
        fold[half] = upi_attn_weight(old[half], rate, top[half]);
        sum[half] = upi_f8_mul(fold[half], upi_f8_load(at_sum + half * UPI_LANES));
        UPI_OPAQUE(sum[half]); /* the compiler could fuse it with the first addition, or not */
    }
    upi_attn_softmax(w->p, keys, rate, top, sum);
    UPI_CPU_UNROLL
    for (half = 0; half < 2; ++half) upi_f8_store(at_sum + half * UPI_LANES, sum[half]);
    upi_attn_weigh(d, keys, w->v, w->p, w->o + panel * UPI_ATTN_PANEL * d, fold);
}

/* Brings a row up to what it saw of other keys: old is its log-sum-exp there, *lse here. The row's o becomes
 * *factor times what is here, + *keep times what it was; *keep is 0 if nothing was seen there. */
UPI_INLINE void upi_attn_merge(float old, float *lse, float *factor, float *keep)
{
    const float top = old > *lse ? old : *lse, from = top == -INFINITY ? 0 : top;
    const double e_old = exp((double)old - from), e_new = exp((double)*lse - from), both = e_old + e_new;
    *keep = both == 0 ? 0 : (float)(e_old / both);
    *factor = both == 0 ? 0 : (float)(*factor * (e_new / both));
    *lse = both == 0 ? -INFINITY : (float)(from + log(both));
    if (old == -INFINITY) *keep = 0;
}

/* o and lse of `rows` queries from q0, from the sums in scratch. */
UPI_INLINE void upi_attn_fwd_finish(const upi_attn_head *a, const upi_attn_fwd_work *w, int d, int64_t q0,
                                    int rows)
{
    int first, i;
    for (first = 0; first < rows; first += UPI_ATTN_PANEL) {
        int count = upi_attn_least(rows - first, UPI_ATTN_PANEL);
        float inverse[UPI_ATTN_PANEL], keep[UPI_ATTN_PANEL];
        for (i = 0; i < UPI_ATTN_PANEL; ++i) {
            float sum = w->sum[first + i], lse;
            /* not `sum > 0`: a NaN must come out as one */
            inverse[i] = sum == 0 ? 0 : 1 / sum;
            keep[i] = 0;
            if (i >= count) continue;
            lse = sum == 0 ? -INFINITY : (float)(a->scale * w->top[first + i] + log((double)sum));
            if (a->merge) upi_attn_merge(a->lse[(q0 + first + i) * a->lse_step], &lse, &inverse[i], &keep[i]);
            a->lse[(q0 + first + i) * a->lse_step] = lse;
        }
        upi_attn_unpack_panel(a->o, a->o_dtype, q0 + first, a->o_step, count, d, w->o + first * d, inverse,
                              a->merge ? keep : NULL);
    }
}

/* d stays a run-time number: kernels compiled for one d each are at most 1 % faster. */
UPI_CPU_KERNEL void upi_attn_fwd_head(const upi_attn_head *a, float *scratch)
{
    const int d = a->d;
    const upi_f8 rate = upi_f8_set1((float)(a->scale * 1.4426950408889634));
    upi_attn_fwd_work w;
    int64_t q0, k0;
    upi_attn_fwd_layout(&w, scratch, d);
    for (q0 = 0; q0 < a->queries; q0 += UPI_ATTN_ROWS_FWD) {
        int rows = upi_attn_least(a->queries - q0, UPI_ATTN_ROWS_FWD);
        int panels = (rows + UPI_ATTN_PANEL - 1) / UPI_ATTN_PANEL;
        int64_t reach = upi_attn_reach(a, q0, rows);
        int p, i;
        for (p = 0; p < panels; ++p) {
            int first = p * UPI_ATTN_PANEL;
            upi_attn_pack_panel(w.q + first * d, a->q, a->dtype, q0 + first, a->q_step,
                                upi_attn_least(rows - first, UPI_ATTN_PANEL), d);
        }
        memset(w.o, 0, (size_t)(panels * UPI_ATTN_PANEL * d) * sizeof *w.o);
        for (i = 0; i < panels * UPI_ATTN_PANEL; ++i) {
            w.top[i] = -INFINITY;
            w.sum[i] = 0;
        }
        for (k0 = 0; k0 < reach; k0 += UPI_ATTN_KEYS) {
            int count = upi_attn_least(reach - k0, UPI_ATTN_KEYS);
            upi_attn_pack_keys(w.k, a->k, a->dtype, k0, a->k_step, count, d);
            upi_attn_pack_keys(w.v, a->v, a->dtype, k0, a->v_step, count, d);
            for (p = 0; p < panels; ++p) {
                int last, keys = upi_attn_panel_keys(a, q0 + p * UPI_ATTN_PANEL, k0, count, &last);
                if (keys > 0) upi_attn_fwd_panel(&w, d, rate, p, keys, last);
            }
        }
        upi_attn_fwd_finish(a, &w, d, q0, rows);
    }
}

/* ---- backward ---- */

/* Four keys against a panel: p[4][16] = weights exp(scale * k . q - lse), s[4][16] = p * (v . go - delta). */
UPI_INLINE void upi_attn_weights_grad(int d, const float *k, const float *q, const float *v, const float *go,
                                      upi_f8 scale, const upi_f8 *lse, const upi_f8 *delta,
                                      float *__restrict p, float *__restrict s)
{
    upi_f8 sums[UPI_ATTN_TILE][2];
    int i;
    upi_attn_dot(d, k, q, sums);
    UPI_CPU_UNROLL
    for (i = 0; i < UPI_ATTN_TILE; ++i) {
        float *at = p + i * UPI_ATTN_PANEL;
        upi_f8 score0 = upi_f8_mul(scale, sums[i][0]), score1 = upi_f8_mul(scale, sums[i][1]);
        /* no FMA here: the lse of a row with one weight of 1 is its score as rounded, and must give 1
         * again */
        UPI_OPAQUE(score0);
        UPI_OPAQUE(score1);
        upi_f8_store(at, upi_f8_exp(upi_f8_sub(score0, lse[0])));
        upi_f8_store(at + UPI_LANES, upi_f8_exp(upi_f8_sub(score1, lse[1])));
    }
    upi_attn_dot(d, v, go, sums);
    UPI_CPU_UNROLL
    for (i = 0; i < UPI_ATTN_TILE; ++i) {
        const float *weight = p + i * UPI_ATTN_PANEL;
        float *at = s + i * UPI_ATTN_PANEL;
        upi_f8_store(at, upi_f8_mul(upi_f8_load(weight), upi_f8_sub(sums[i][0], delta[0])));
        upi_f8_store(at + UPI_LANES,
                     upi_f8_mul(upi_f8_load(weight + UPI_LANES), upi_f8_sub(sums[i][1], delta[1])));
    }
}

/* grad[tile rows][8 or 16 columns] += sum over panels and lanes, in order, of weights[panel][row][lane] *
 * columns[panel][lane][16]. The sum goes on from what memory holds: one chain over heads and query blocks. */
UPI_INLINE void upi_attn_add_grad(int tile, int vectors, int panels, const float *weights,
                                  const float *columns, float *grad, int64_t grad_step)
{
    upi_f8 sums[UPI_ATTN_TILE][2];
    int panel, i;
    UPI_CPU_UNROLL
    for (i = 0; i < tile; ++i) {
        sums[i][0] = upi_f8_load(grad + i * grad_step);
        sums[i][1] = vectors > 1 ? upi_f8_load(grad + i * grad_step + UPI_LANES) : upi_f8_zero();
    }
    for (panel = 0; panel < panels; ++panel) {
        upi_attn_tile(tile, UPI_ATTN_PANEL, weights, UPI_ATTN_PANEL, 1, columns, sums);
        weights += UPI_ATTN_KEYS * UPI_ATTN_PANEL;
        columns += UPI_ATTN_PANEL * 16;
    }
    UPI_CPU_UNROLL
    for (i = 0; i < tile; ++i) {
        upi_f8_store(grad + i * grad_step, sums[i][0]);
        if (vectors > 1) upi_f8_store(grad + i * grad_step + UPI_LANES, sums[i][1]);
    }
}

/* Those rows of a block's gradient, all columns. seen[p] = keys of the block that panel p sees; later panels
 * see more. Panels before the first that sees one of the rows are left out; what others don't see weighs
 * 0. */
UPI_INLINE void upi_attn_add_grad_rows(int tile, int d, int j, const int *seen, int panels,
                                       const float *weights, const float *columns, float *grad,
                                       int64_t grad_step)
{
    int first = 0, c;
    while (first < panels && seen[first] <= j) ++first;
    if (first == panels) return;
    weights += (first * UPI_ATTN_KEYS + j) * UPI_ATTN_PANEL;
    columns += first * UPI_ATTN_PANEL * 16;
    for (c = 0; c + 16 <= d; c += 16, columns += 16 * UPI_ATTN_ROWS_BWD)
        upi_attn_add_grad(tile, 2, panels - first, weights, columns, grad + j * grad_step + c, grad_step);
    if (c < d)
        upi_attn_add_grad(tile, 1, panels - first, weights, columns, grad + j * grad_step + c, grad_step);
}

UPI_INLINE void upi_attn_add_grad_block(int d, int count, const int *seen, int panels, const float *weights,
                                        const float *columns, float *grad, int64_t grad_step)
{
    int j = 0;
    for (; j + UPI_ATTN_TILE <= count; j += UPI_ATTN_TILE)
        upi_attn_add_grad_rows(UPI_ATTN_TILE, d, j, seen, panels, weights, columns, grad, grad_step);
    for (; j < count; ++j) upi_attn_add_grad_rows(1, d, j, seen, panels, weights, columns, grad, grad_step);
}

/* One panel against one block of keys: its p and s, and its part of gq. */
UPI_INLINE void upi_attn_bwd_panel(const upi_attn_bwd_work *w, int d, upi_f8 scale, int panel, int keys,
                                   int last)
{
    const float *q = w->q + panel * UPI_ATTN_PANEL * d, *go = w->go + panel * UPI_ATTN_PANEL * d;
    float *p = w->p + panel * UPI_ATTN_KEYS * UPI_ATTN_PANEL,
          *s = w->s + panel * UPI_ATTN_KEYS * UPI_ATTN_PANEL;
    upi_f8 lse[2], delta[2];
    int j, half;
    UPI_CPU_UNROLL
    for (half = 0; half < 2; ++half) {
        lse[half] = upi_f8_load(w->lse + panel * UPI_ATTN_PANEL + half * UPI_LANES);
        delta[half] = upi_f8_load(w->delta + panel * UPI_ATTN_PANEL + half * UPI_LANES);
    }
    for (j = 0; j < keys; j += UPI_ATTN_TILE)
        upi_attn_weights_grad(d, w->k + j * (d + UPI_ATTN_PAD), q, w->v + j * (d + UPI_ATTN_PAD), go, scale,
                              lse, delta, p + j * UPI_ATTN_PANEL, s + j * UPI_ATTN_PANEL);
    if (last < keys - 1)
        for (j = last < 0 ? 0 : last; j < keys; ++j) {
            upi_attn_hide(p + j * UPI_ATTN_PANEL, j, last, upi_f8_zero());
            upi_attn_hide(s + j * UPI_ATTN_PANEL, j, last, upi_f8_zero());
        }
    /* the rest of the last tile: rows that this panel doesn't see, but that a tile of gk or gv takes along */
    for (j = keys * UPI_ATTN_PANEL; j % (UPI_ATTN_TILE * UPI_ATTN_PANEL) != 0; ++j) p[j] = s[j] = 0;
    upi_attn_weigh(d, keys, w->k, s, w->gq + panel * UPI_ATTN_PANEL * d, NULL);
}

/* Copies `rows` queries from q0 and what belongs to them to scratch. */
UPI_INLINE void upi_attn_bwd_pack(const upi_attn_head *a, const upi_attn_bwd_work *w, int d, int64_t q0,
                                  int rows)
{
    int panels = (rows + UPI_ATTN_PANEL - 1) / UPI_ATTN_PANEL, first, i;
    for (first = 0; first < rows; first += UPI_ATTN_PANEL) {
        int count = upi_attn_least(rows - first, UPI_ATTN_PANEL);
        upi_attn_pack_panel(w->q + first * d, a->q, a->dtype, q0 + first, a->q_step, count, d);
        upi_attn_pack_panel(w->go + first * d, a->go, a->dtype, q0 + first, a->go_step, count, d);
    }
    upi_attn_pack_columns(w->q_rows, a->q, a->dtype, q0, a->q_step, rows, d, a->scale);
    upi_attn_pack_columns(w->go_rows, a->go, a->dtype, q0, a->go_step, rows, d, 1);
    memset(w->gq, 0, (size_t)(panels * UPI_ATTN_PANEL * d) * sizeof *w->gq);
    for (i = 0; i < panels * UPI_ATTN_PANEL; ++i) {
        float lse = i < rows ? a->lse[(q0 + i) * a->lse_step] : -INFINITY;
        /* A row that saw no key, and a lane that is no row, weighs every key 0. */
        w->lse[i] = lse == -INFINITY ? INFINITY : lse;
        w->delta[i] = i < rows ? a->delta[(q0 + i) * a->delta_step] : 0;
    }
}

UPI_CPU_KERNEL void upi_attn_bwd_head(const upi_attn_head *a, float *scratch)
{
    const int d = a->d;
    const upi_f8 scale = upi_f8_set1(a->scale);
    upi_attn_bwd_work w;
    float factor[UPI_ATTN_PANEL];
    int64_t q0, k0;
    upi_attn_bwd_layout(&w, scratch, d);
    upi_f8_store(factor, scale);
    upi_f8_store(factor + UPI_LANES, scale);
    for (q0 = 0; q0 < a->queries; q0 += UPI_ATTN_ROWS_BWD) {
        int rows = upi_attn_least(a->queries - q0, UPI_ATTN_ROWS_BWD);
        int panels = (rows + UPI_ATTN_PANEL - 1) / UPI_ATTN_PANEL;
        int seen[UPI_ATTN_ROWS_BWD / UPI_ATTN_PANEL];
        int64_t reach = upi_attn_reach(a, q0, rows);
        int p, last;
        upi_attn_bwd_pack(a, &w, d, q0, rows);
        for (k0 = 0; k0 < reach; k0 += UPI_ATTN_KEYS) {
            int count = upi_attn_least(reach - k0, UPI_ATTN_KEYS);
            upi_attn_pack_keys(w.k, a->k, a->dtype, k0, a->k_step, count, d);
            upi_attn_pack_keys(w.v, a->v, a->dtype, k0, a->v_step, count, d);
            for (p = 0; p < panels; ++p) {
                seen[p] = upi_attn_panel_keys(a, q0 + p * UPI_ATTN_PANEL, k0, count, &last);
                if (seen[p] > 0) upi_attn_bwd_panel(&w, d, scale, p, seen[p], last);
            }
            upi_attn_add_grad_block(d, count, seen, panels, w.p, w.go_rows, a->gv + k0 * a->gv_step,
                                    a->gv_step);
            upi_attn_add_grad_block(d, count, seen, panels, w.s, w.q_rows, a->gk + k0 * a->gk_step,
                                    a->gk_step);
        }
        for (p = 0; p < panels; ++p) {
            int first = p * UPI_ATTN_PANEL;
            upi_attn_unpack_panel(a->gq, a->dtype, q0 + first, a->gq_step,
                                  upi_attn_least(rows - first, UPI_ATTN_PANEL), d, w.gq + first * d, factor,
                                  NULL);
        }
    }
}

UPI_KERNELS_END

/* ---- entries of the table ---- */

/* Row 0 of head j; NULL stays NULL, for an empty view need not point anywhere. */
UPI_INLINE void *upi_attn_view_head(upipe_view v, int32_t j)
{
    return v.data != NULL ? upipe_view_at(v, 0, j) : NULL;
}

/* What both directions need of head j. */
UPI_INLINE upi_attn_head upi_attn_head_make(const upipe_attn *a, int32_t j)
{
    int32_t kv = j / (a->q.h / a->k.h);
    upi_attn_head h;
    memset(&h, 0, sizeof h);
    h.q = upi_attn_view_head(a->q, j);
    h.k = upi_attn_view_head(a->k, kv);
    h.v = upi_attn_view_head(a->v, kv);
    h.lse = (float *)upi_attn_view_head(a->lse, j);
    h.q_step = a->q.n_step;
    h.k_step = a->k.n_step;
    h.v_step = a->v.n_step;
    h.lse_step = a->lse.n_step;
    h.queries = a->q.n;
    h.keys = a->k.n;
    h.ahead = a->q_pos - a->k_pos;
    h.d = a->q.d;
    h.causal = a->causal;
    h.scale = upi_attn_scale(a);
    h.dtype = a->q.dtype;
    return h;
}

UPIPE_API upipe_status upi_cpu_attn_fwd(upipe_ctx *c, const upipe_attn *a)
{
    int32_t j;
    (void)c;
    if (a->q.n == 0) return UPIPE_OK;
    for (j = 0; j < a->q.h; ++j) {
        upi_attn_head h = upi_attn_head_make(a, j);
        h.o = upi_attn_view_head(a->o, j);
        h.o_step = a->o.n_step;
        h.o_dtype = a->o.dtype;
        h.merge = a->merge;
        upi_attn_fwd_head(&h, (float *)a->work);
    }
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_cpu_attn_bwd(upipe_ctx *c, const upipe_attn_grad *g)
{
    const upipe_attn *a = &g->a;
    int32_t j;
    (void)c;
    if (a->q.n == 0) return UPIPE_OK;
    for (j = 0; j < a->q.h; ++j) {
        int32_t kv = j / (a->q.h / a->k.h);
        upi_attn_head h = upi_attn_head_make(a, j);
        h.go = upi_attn_view_head(g->go, j);
        h.delta = (const float *)upi_attn_view_head(g->delta, j);
        h.gq = upi_attn_view_head(g->gq, j);
        h.gk = (float *)upi_attn_view_head(g->gk, kv);
        h.gv = (float *)upi_attn_view_head(g->gv, kv);
        h.go_step = g->go.n_step;
        h.delta_step = g->delta.n_step;
        h.gq_step = g->gq.n_step;
        h.gk_step = g->gk.n_step;
        h.gv_step = g->gv.n_step;
        upi_attn_bwd_head(&h, (float *)a->work);
    }
    return UPIPE_OK;
}

UPIPE_API size_t upi_cpu_attn_bytes(const struct upipe_ops *ops, const upipe_attn *a, int backward)
{
    upi_attn_fwd_work fwd;
    upi_attn_bwd_work bwd;
    (void)ops;
    return (backward ? upi_attn_bwd_layout(&bwd, NULL, a->q.d) : upi_attn_fwd_layout(&fwd, NULL, a->q.d)) *
           sizeof(float);
}

#endif

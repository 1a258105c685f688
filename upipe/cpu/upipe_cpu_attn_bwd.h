/* upipe_cpu_attn_bwd.h -- attention backward on the CPU
 *
 * Fills the table's attn_bwd and attn_bytes (upi_cpu_attn_bwd, _bytes). Links with the math library.
 *
 *     for each head of a group, for each block of queries, the last one first:
 *         for each block of 64 keys that one of them sees, ascending:
 *             for each panel:    P = exp(K Q^T - lse),  S = P (V dO^T - delta),  dQ += K^T S
 *             dV += P dO,  dK += S Q        over all panels of the block, the last one first
 *             behind the last block of a section:    totals += dQ,  dQ = 0
 *         dQ leaves scratch once
 *
 * P is recomputed from lse: five products in one pass. What a block of queries adds to an element of dK or dV
 * is a sum from zero over its panels, the last one first. Memory holds the sum of these sums, over heads and,
 * within a head, over blocks from the last to the first. A block is always as large, and counted from the
 * call's first row: bits depend neither on threads nor on how a group's heads are split over calls.
 *
 * The items of the host's threads are the blocks of queries. Several work on one group at the same time, one
 * behind the other: a gate for each block of keys lets them add to it in the order above. The
 * blocks of queries that see a block of keys are one run, because both ends of what a row sees ascend. So
 * each block knows by itself which one precedes it.
 */
#ifndef UPIPE_CPU_ATTN_BWD_H
#define UPIPE_CPU_ATTN_BWD_H

#include "upipe_cpu_attn_fwd.h"

enum {
    UPI_ATTN_PANELS_BWD = 6,                   /* in a block */
    UPI_ATTN_TALL = UPIPE_CPU_AVX512 ? 12 : 6, /* rows of a register tile of two vectors */
    UPI_ATTN_ROWS_BWD = UPI_ATTN_PANELS_BWD * UPI_ATTN_PANEL
};

UPI_KERNELS_BEGIN

typedef struct upi_attn_bwd_work {
    float *q, *dq;        /* [6 panels][d][panel]         queries, and their gradient */
    float *dout;          /* [6 panels][v_dim][panel]        gradients of o */
    float *q_rows;        /* [d/wide, up][rows][wide]     queries times scale */
    float *dout_rows;     /* [v_dim/wide, up][rows][wide]    gradients of o */
    float *p, *s;         /* [6 panels][64][panel]        weights, and gradients of the scores */
    float *k;             /* [64][d + pad] */
    float *v;             /* [64][v_dim + pad] */
    float *lse, *delta;   /* [6 panels][panel] */
    upi_attn_lanes lanes; /* [6 panels][panel] */
    float *dq_total;      /* as dq, of earlier sections; only where the call has several */
    int q_finite, dout_finite;
} upi_attn_bwd_work;

/* What a block of queries sums, and knows of its rows, as upi_attn_fwd_layout_sums. */
UPI_INLINE void upi_attn_bwd_layout_sums(upi_attn_bwd_work *w, float *base, size_t *used, const upipe_attn *a)
{
    const int64_t d = a->q.d, totals = upi_attn_is_long(0, a->k.n) ? UPI_ATTN_ROWS_BWD : 0;
    w->dq = upi_attn_carve(base, used, UPI_ATTN_ROWS_BWD * d);
    w->lse = upi_attn_carve(base, used, UPI_ATTN_ROWS_BWD);
    w->delta = upi_attn_carve(base, used, UPI_ATTN_ROWS_BWD);
    w->lanes = upi_attn_carve_lanes(base, used, UPI_ATTN_ROWS_BWD);
    w->dq_total = upi_attn_carve(base, used, totals * d);
}

UPI_INLINE size_t upi_attn_bwd_layout(upi_attn_bwd_work *w, float *base, const upipe_attn *a)
{
    const int64_t d = a->q.d, v_dim = a->v.d;
    const int64_t columns = (d + UPI_WIDE - 1) / UPI_WIDE * UPI_WIDE;
    const int64_t v_columns = (v_dim + UPI_WIDE - 1) / UPI_WIDE * UPI_WIDE;
    size_t used = 0;
    w->q = upi_attn_carve(base, &used, UPI_ATTN_ROWS_BWD * d);
    w->dout = upi_attn_carve(base, &used, UPI_ATTN_ROWS_BWD * v_dim);
    w->q_rows = upi_attn_carve(base, &used, UPI_ATTN_ROWS_BWD * columns);
    w->dout_rows = upi_attn_carve(base, &used, UPI_ATTN_ROWS_BWD * v_columns);
    w->p = upi_attn_carve(base, &used, (int64_t)UPI_ATTN_ROWS_BWD * UPI_ATTN_KEYS);
    w->s = upi_attn_carve(base, &used, (int64_t)UPI_ATTN_ROWS_BWD * UPI_ATTN_KEYS);
    w->k = upi_attn_carve(base, &used, UPI_ATTN_KEYS * (d + UPI_ATTN_PAD));
    w->v = upi_attn_carve(base, &used, UPI_ATTN_KEYS * (v_dim + UPI_ATTN_PAD));
    upi_attn_bwd_layout_sums(w, base, &used, a);
    return used;
}

/* out[k / wide][i][k % wide] = factor * rows[i][k]; zeros up to the next whole panel of rows, and to the next
 * whole vector of columns. */
UPI_INLINE void upi_attn_pack_columns_of(float *out, const void *rows, int64_t first, int64_t stride,
                                         int count, int d, float factor, upipe_dtype dtype)
{
    const upi_f8 times = upi_f8_set1(factor);
    int i, k;
    for (k = 0; k < d || k % UPI_WIDE != 0; k += UPI_LANES) {
        float *column = out + k / UPI_WIDE * UPI_WIDE * UPI_ATTN_ROWS_BWD + k % UPI_WIDE;
        for (i = 0; i < count && k < d; ++i)
            upi_f8_store(column + i * UPI_WIDE,
                         upi_f8_mul(times, upi_f8_get(rows, dtype, (first + i) * stride + k)));
        for (; i < count || i % UPI_ATTN_PANEL != 0; ++i) upi_f8_store(column + i * UPI_WIDE, upi_f8_zero());
    }
}

UPI_CPU_KERNEL void upi_attn_pack_columns(float *out, const void *rows, upipe_dtype dtype, int64_t first,
                                          int64_t stride, int count, int d, float factor)
{
    UPI_BY_TYPE(upi_attn_pack_columns_of, dtype, out, rows, first, stride, count, d, factor);
}

/* Vector v of a row of a panel: the product of a key and the query becomes the weight exp(score - lse), and that
 * of the value and dout the gradient of the product k . q, but for the scale. */
UPI_INLINE void upi_attn_weight_grad(float *p, float *s, int capped, upi_fw unit, upi_fw squash, upi_fw lse,
                                     upi_fw delta)
{
    upi_fw score = upi_fw_load(p), grad = upi_fw_sub(upi_fw_load(s), delta);
    if (capped) {
        score = upi_fw_mul(squash, score);
        grad = upi_fw_mul(grad, upi_fw_tanh_slope(score));
        score = upi_fw_tanh(score);
    }
    score = upi_fw_mul(unit, score);
    /* no FMA here: the lse of a row with one weight of 1 is its score as rounded, and must give 1 again */
    UPI_OPAQUE(score);
    score = upi_fw_exp(upi_fw_sub(score, lse));
    upi_fw_store(p, score);
    upi_fw_store(s, upi_fw_mul(score, grad));
}

/* Turns products p and s[keys[v]][panel] of vector v into weights and gradients. */
UPI_INLINE void upi_attn_weights_grad_of(int capped, const upi_attn_head *a, float *p, float *s,
                                         const int *keys, const float *lse, const float *delta)
{
    const upi_fw unit = upi_fw_set1(a->unit), squash = upi_fw_set1(a->squash);
    int j, v;
    for (v = 0; v < UPI_ATTN_VECTORS; ++v) {
        const upi_fw from = upi_fw_load(lse + v * UPI_WIDE), less = upi_fw_load(delta + v * UPI_WIDE);
        for (j = v * UPI_WIDE; j < keys[v] * UPI_ATTN_PANEL; j += UPI_ATTN_PANEL)
            upi_attn_weight_grad(p + j, s + j, capped, unit, squash, from, less);
    }
}

UPI_CPU_KERNEL void upi_attn_weights_grad(const upi_attn_head *a, float *p, float *s, const int *keys,
                                          const float *lse, const float *delta)
{
    if (a->squash != 0)
        upi_attn_weights_grad_of(1, a, p, s, keys, lse, delta);
    else
        upi_attn_weights_grad_of(0, a, p, s, keys, lse, delta);
}

/* grad[tile rows][vectors] += sum over panels, the last one first, and over their lanes, in order, of
 * weights[panel][row][lane] * columns[vector][panel][lane]. `rest` columns of the last vector are the row's;
 * the first `skip` lanes of the first panel see none of the rows. */
UPI_INLINE void upi_attn_add_grad(int tile, int vectors, int rest, int panels, int skip, const float *weights,
                                  const float *columns, float *grad, int64_t grad_stride)
{
    upi_fw sums[UPI_ATTN_TALL][UPI_ATTN_VECTORS];
    int panel, i, v;
    UPI_CPU_UNROLL
    for (i = 0; i < tile; ++i) UPI_CPU_UNROLL
    for (v = 0; v < vectors; ++v) {
        sums[i][v] = upi_fw_zero();
        __builtin_prefetch(grad + i * grad_stride + v * UPI_WIDE, 1); /* else waited for at the end */
    }
    for (panel = panels - 1; panel >= 0; --panel) {
        const int from = panel > 0 ? 0 : skip;
        upi_attn_tile(1, 0, tile, 0, vectors, UPI_ATTN_PANEL - from,
                      weights + panel * UPI_ATTN_KEYS * UPI_ATTN_PANEL + from, UPI_ATTN_PANEL, 1,
                      columns + (panel * UPI_ATTN_PANEL + from) * UPI_WIDE,
                      UPI_WIDE * (int64_t)UPI_ATTN_ROWS_BWD, UPI_WIDE, sums);
    }
    UPI_CPU_UNROLL
    for (i = 0; i < tile; ++i) UPI_CPU_UNROLL
    for (v = 0; v < vectors; ++v) {
        float *at = grad + i * grad_stride + v * UPI_WIDE;
        if (v + 1 < vectors)
            upi_fw_store(at, upi_fw_add(upi_fw_load(at), sums[i][v]));
        else
            upi_fw_store_rest(at, rest, upi_fw_add(upi_fw_load_rest(at, rest), sums[i][v]));
    }
}

/* Lanes of a panel, of which some see rows of its part, that see none of the rows up to j of a block; of whole
 * turns of a tile's loop. */
UPI_INLINE int upi_attn_lanes_before(const upi_attn_part *part, int j)
{
    const float row = (float)(j - part->from);
    int count = 0, l;
    if (!part->masked || part->high[0] > row) return 0;
    for (l = 0; l < UPI_ATTN_PANEL; ++l) count += part->high[l] <= row;
    return count / UPI_ATTN_STEPS * UPI_ATTN_STEPS;
}

/* Rows j .. j + tile - 1 of a block's gradient, and parts[panels] of the block of queries. Panels that see
 * none of the rows, and the first one's lanes before those that do, are left out; what others don't see
 * weighs 0. */
UPI_INLINE void upi_attn_add_grad_rows(int tile, int vectors, int rest, int j, const upi_attn_part *parts,
                                       int panels, const float *weights, const float *columns, float *grad,
                                       int64_t grad_stride)
{
    int first = 0;
    while (first < panels && parts[first].from + parts[first].count <= j) ++first;
    while (panels > first && parts[panels - 1].from >= j + tile) --panels;
    if (first < panels)
        upi_attn_add_grad(tile, vectors, rest, panels - first, upi_attn_lanes_before(&parts[first], j),
                          weights + (first * UPI_ATTN_KEYS + j) * UPI_ATTN_PANEL,
                          columns + first * UPI_ATTN_PANEL * UPI_WIDE, grad + j * grad_stride, grad_stride);
}

/* Some vectors of a block's gradient, all `count` rows: the columns stay in the first-level cache. */
UPI_INLINE void upi_attn_add_grad_columns(int tile, int vectors, int rest, int count,
                                          const upi_attn_part *parts, int panels, const float *weights,
                                          const float *columns, float *grad, int64_t grad_stride)
{
    int j = 0;
    for (; j + tile <= count; j += tile)
        upi_attn_add_grad_rows(tile, vectors, rest, j, parts, panels, weights, columns, grad, grad_stride);
    for (; j + 4 <= count; j += 4)
        upi_attn_add_grad_rows(4, vectors, rest, j, parts, panels, weights, columns, grad, grad_stride);
    for (; j < count; ++j)
        upi_attn_add_grad_rows(1, vectors, rest, j, parts, panels, weights, columns, grad, grad_stride);
}

/* The whole block: three vectors at a time, two where one would be left. */
UPI_CPU_KERNEL void upi_attn_add_grad_block(int d, int count, const upi_attn_part *parts, int panels,
                                            const float *weights, const float *columns, float *grad,
                                            int64_t grad_stride)
{
    int left = (d + UPI_WIDE - 1) / UPI_WIDE;
    const int last = d - (left - 1) * UPI_WIDE;
    while (left > 0) {
        int vectors = left == 2 || left == 4 ? 2 : 3, rest = left > vectors ? (int)UPI_WIDE : last;
        if (vectors == 2)
            upi_attn_add_grad_columns(UPI_ATTN_TALL, 2, rest, count, parts, panels, weights, columns, grad,
                                      grad_stride);
        else
            upi_attn_add_grad_columns(UPI_ATTN_TILE, 3, rest, count, parts, panels, weights, columns, grad,
                                      grad_stride);
        left -= vectors;
        grad += vectors * UPI_WIDE;
        columns += vectors * UPI_WIDE * UPI_ATTN_ROWS_BWD;
    }
}

/* The same, of the queries that see a key alone. */
UPI_CPU_KERNEL void upi_attn_add_grad_seen(int d, int count, upi_attn_lanes lanes, int64_t k0, int panels,
                                           const float *weights, const float *columns, float *grad,
                                           int64_t grad_stride)
{
    int c, j, panel, l;
    for (c = 0; c < d; c += UPI_WIDE, columns += (int)UPI_WIDE * UPI_ATTN_ROWS_BWD)
        for (j = 0; j < count; ++j) {
            const int rest = upi_attn_least(d - c, UPI_WIDE);
            float *at = grad + j * grad_stride + c;
            upi_fw sum = upi_fw_zero();
            for (panel = panels - 1; panel >= 0; --panel)
                for (l = panel * UPI_ATTN_PANEL; l < (panel + 1) * UPI_ATTN_PANEL; ++l)
                    if (lanes.first[l] <= k0 + j && k0 + j < lanes.end[l])
                        upi_fw_accumulate(&sum,
                                          upi_fw_broadcast(weights + l % UPI_ATTN_PANEL +
                                                           (panel * UPI_ATTN_KEYS + j) * UPI_ATTN_PANEL),
                                          upi_fw_load(columns + l * UPI_WIDE));
            upi_fw_store_rest(at, rest, upi_fw_add(upi_fw_load_rest(at, rest), sum));
        }
}

/* The gradients of `count` keys from k0 on, of columns that are finite or not. */
UPI_INLINE void upi_attn_add_grad_all(int finite, int d, int count, const upi_attn_part *parts,
                                      upi_attn_lanes lanes, int64_t k0, int panels, const float *weights,
                                      const float *columns, float *grad, int64_t grad_stride)
{
    grad += k0 * grad_stride;
    if (finite)
        upi_attn_add_grad_block(d, count, parts, panels, weights, columns, grad, grad_stride);
    else
        upi_attn_add_grad_seen(d, count, lanes, k0, panels, weights, columns, grad, grad_stride);
}

/* p and s[from .. count][panel] become 0 in the lanes that don't see the row. */
UPI_CPU_KERNEL void upi_attn_hide_grad(float *p, float *s, int from, const upi_attn_part *part)
{
    int j, v;
    for (j = from; j < part->count; ++j) {
        if ((float)j >= part->low[UPI_ATTN_PANEL - 1] && (float)j < part->high[0]) continue;
        UPI_CPU_UNROLL
        for (v = 0; v < UPI_ATTN_VECTORS; ++v) {
            const int at = j * UPI_ATTN_PANEL + v * UPI_WIDE;
            upi_fw_store(p + at, upi_attn_hide(upi_fw_load(p + at), part, v, j, upi_fw_zero()));
            upi_fw_store(s + at, upi_attn_hide(upi_fw_load(s + at), part, v, j, upi_fw_zero()));
        }
    }
}

/* One panel against its part of a block of keys, finite or not: its p and s, and its part of dq. */
UPI_INLINE void upi_attn_bwd_panel(const upi_attn_bwd_work *w, const upi_attn_head *a, int panel,
                                   const upi_attn_part *part, int finite, const float *one)
{
    const int d = a->d, v_dim = a->v_dim, keys = part->count, from = part->from;
    /* rows that the first vector sees, up to a whole tile */
    const int whole = (part->seen[0] + UPI_ATTN_TILE - 1) / UPI_ATTN_TILE * UPI_ATTN_TILE;
    const float *k = w->k + from * (d + UPI_ATTN_PAD), *v_rows = w->v + from * (v_dim + UPI_ATTN_PAD);
    const float *q = w->q + panel * UPI_ATTN_PANEL * d, *dout = w->dout + panel * UPI_ATTN_PANEL * v_dim;
    float *p = w->p + (panel * UPI_ATTN_KEYS + from) * UPI_ATTN_PANEL;
    float *s = w->s + (panel * UPI_ATTN_KEYS + from) * UPI_ATTN_PANEL;
    int j, before, behind;
    upi_attn_products(d, whole, k, q, p, NULL);
    upi_attn_products(v_dim, whole, v_rows, dout, s, NULL);
    for (j = whole; j < keys; j += UPI_ATTN_TILE) {
        const int first = upi_attn_first_vector(part, j);
        upi_attn_products_rest(first, d, k + j * (d + UPI_ATTN_PAD), q, p + j * UPI_ATTN_PANEL);
        upi_attn_products_rest(first, v_dim, v_rows + j * (v_dim + UPI_ATTN_PAD), dout,
                               s + j * UPI_ATTN_PANEL);
    }
    upi_attn_weights_grad(a, p, s, part->seen, w->lse + panel * UPI_ATTN_PANEL,
                          w->delta + panel * UPI_ATTN_PANEL);
    if (part->masked) upi_attn_hide_grad(p, s, upi_attn_rows_seen_by_all(part), part);
    /* rows that this panel doesn't see, but that a tile of dk or dv takes along */
    before = upi_attn_least(from, UPI_ATTN_TALL);
    behind = upi_attn_least(UPI_ATTN_KEYS - from - keys, UPI_ATTN_TALL);
    memset(p - before * UPI_ATTN_PANEL, 0, (size_t)(before * UPI_ATTN_PANEL) * sizeof *p);
    memset(s - before * UPI_ATTN_PANEL, 0, (size_t)(before * UPI_ATTN_PANEL) * sizeof *s);
    memset(p + keys * UPI_ATTN_PANEL, 0, (size_t)(behind * UPI_ATTN_PANEL) * sizeof *p);
    memset(s + keys * UPI_ATTN_PANEL, 0, (size_t)(behind * UPI_ATTN_PANEL) * sizeof *s);
    upi_attn_weigh(finite, d, part, k, s, w->dq + panel * UPI_ATTN_PANEL * d, one);
}

/* The sums of a block of queries begin. */
UPI_INLINE void upi_attn_bwd_begin(const upi_attn_head *a, const upi_attn_bwd_work *w, int64_t q0, int rows,
                                   int is_long)
{
    const int lanes = (rows + UPI_ATTN_PANEL - 1) / UPI_ATTN_PANEL * UPI_ATTN_PANEL;
    int i;
    memset(w->dq, 0, (size_t)(lanes * a->d) * sizeof *w->dq);
    if (is_long) memset(w->dq_total, 0, (size_t)(lanes * a->d) * sizeof *w->dq);
    for (i = 0; i < lanes; ++i) {
        float lse = i < rows ? a->lse[(q0 + i) * a->lse_stride] : -INFINITY;
        /* A row that saw no key, and a lane that is no row, weighs every key 0. */
        w->lse[i] = lse == -INFINITY ? INFINITY : lse;
        w->delta[i] = i < rows ? a->delta[(q0 + i) * a->delta_stride] : 0;
    }
}

/* Its end: dq leaves scratch. */
UPI_INLINE void upi_attn_bwd_finish(const upi_attn_head *a, const upi_attn_bwd_work *w, int64_t q0, int rows,
                                    int is_long, const float *one)
{
    const int d = a->d;
    const float *dq = is_long ? w->dq_total : w->dq;
    float factor[UPI_ATTN_PANEL];
    int first, i;
    for (i = 0; i < UPI_ATTN_PANEL; ++i) factor[i] = a->scale;
    for (first = 0; first < rows; first += UPI_ATTN_PANEL) {
        if (is_long) upi_attn_end_section(d, one, w->dq_total + first * d, w->dq + first * d);
        upi_attn_unpack_panel(a->dq, a->dq_dtype, q0 + first, a->dq_stride,
                              upi_attn_least(rows - first, UPI_ATTN_PANEL), d, dq + first * d, factor,
                              a->merge ? one : NULL);
    }
}

/* Are the d elements of `rows` queries finite, as upi_attn_pack_columns leaves them? */
UPI_INLINE int upi_attn_columns_finite(const float *columns, int rows, int d)
{
    const int lanes = (rows + UPI_ATTN_PANEL - 1) / UPI_ATTN_PANEL * UPI_ATTN_PANEL;
    int c, finite = 1;
    for (c = 0; c < d && finite; c += UPI_WIDE)
        finite = upi_attn_finite(columns + c * UPI_ATTN_ROWS_BWD, UPI_WIDE, lanes, UPI_WIDE);
    return finite;
}

/* Copies `rows` queries from q0 to scratch. */
UPI_INLINE void upi_attn_bwd_pack(const upi_attn_head *a, upi_attn_bwd_work *w, int64_t q0, int rows)
{
    const int d = a->d, v_dim = a->v_dim;
    int first;
    for (first = 0; first < rows; first += UPI_ATTN_PANEL) {
        int count = upi_attn_least(rows - first, UPI_ATTN_PANEL);
        upi_attn_pack_panel(w->q + first * d, a->q, a->dtype, q0 + first, a->q_stride, count, d);
        upi_attn_pack_panel(w->dout + first * v_dim, a->dout, a->dtype, q0 + first, a->dout_stride, count,
                            v_dim);
    }
    upi_attn_pack_columns(w->q_rows, a->q, a->dtype, q0, a->q_stride, rows, d, a->scale);
    upi_attn_pack_columns(w->dout_rows, a->dout, a->dtype, q0, a->dout_stride, rows, v_dim, 1);
    w->q_finite = upi_attn_columns_finite(w->q_rows, rows, d);
    w->dout_finite = upi_attn_columns_finite(w->dout_rows, rows, v_dim);
}

/* ---- blocks, and their turns ---- */

/* A call, cut into blocks of UPI_ATTN_ROWS_BWD queries of a head. A block's turn counts through those of its
 * group, heads ascending, queries descending. gates[kv][block of keys] is the turn that may add to these keys;
 * NULL where one worker takes all turns in order. */
typedef struct upi_attn_bwd_job {
    const upipe_attn_grad *g;
    void (*block)(const struct upi_attn_bwd_job *job, const upi_attn_head *a, int64_t *gates, int64_t turn,
                  int64_t q0, int rows, float *scratch);
    const struct upi_bf16_unit *unit; /* of upipe_cpu_attn_bf16.h */
    int64_t blocks, key_blocks;
    int64_t *gates;
    size_t floats; /* scratch of a worker */
    int32_t group;
} upi_attn_bwd_job;

/* Is the last key that block b of the queries sees before k0? */
UPI_INLINE int upi_attn_ends_before(const upi_attn_bwd_job *job, int64_t b, int64_t k0)
{
    const upipe_attn *a = &job->g->a;
    const int64_t next = (b + 1) * UPI_ATTN_ROWS_BWD;
    int64_t first, end;
    upipe_attn_visible(a, (next < a->q.n ? next : a->q.n) - 1, &first, &end);
    return end <= k0;
}

/* The turn before turn t that adds to the keys from k0, + 1; 0 if t is the first. A block of queries adds to
 * those if they begin before its last row's end, and end behind its first row's first key. */
UPI_INLINE int64_t upi_attn_turn_after(const upi_attn_bwd_job *job, int64_t t, int64_t k0)
{
    int64_t b = job->blocks - 1 - t % job->blocks, low = 0, high = b, first, end;
    if (b + 1 < job->blocks) {
        upipe_attn_visible(&job->g->a, (b + 1) * UPI_ATTN_ROWS_BWD, &first, &end);
        if (first < k0 + UPI_ATTN_KEYS) return t;
    }
    if (t < job->blocks) return 0;
    /* the first block that adds to them is the last one of the head before */
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (upi_attn_ends_before(job, middle, k0))
            low = middle + 1;
        else
            high = middle;
    }
    return t / job->blocks * job->blocks - low;
}

UPI_CPU_KERNEL void upi_attn_bwd_block(const upi_attn_bwd_job *job, const upi_attn_head *a, int64_t *gates,
                                       int64_t turn, int64_t q0, int rows, float *scratch)
{
    const int d = a->d, v_dim = a->v_dim, panels = (rows + UPI_ATTN_PANEL - 1) / UPI_ATTN_PANEL;
    upi_attn_bwd_work w;
    float one[UPI_ATTN_PANEL];
    upi_attn_part parts[UPI_ATTN_PANELS_BWD];
    int64_t k0, begin, end;
    int p, is_long, finite;
    upi_attn_bwd_layout(&w, scratch, a->call);
    for (p = 0; p < UPI_ATTN_PANEL; ++p) one[p] = 1;
    upi_attn_see(w.lanes, a->call, q0, rows);
    begin = upi_attn_block_of(w.lanes.first[0]);
    end = w.lanes.end[rows - 1];
    is_long = upi_attn_is_long(begin, end);
    upi_attn_bwd_begin(a, &w, q0, rows, is_long);
    upi_attn_bwd_pack(a, &w, q0, rows);
    for (k0 = begin; k0 < end; k0 += UPI_ATTN_KEYS) {
        int keys = upi_attn_least(end - k0, UPI_ATTN_KEYS);
        if (k0 > begin && k0 % UPI_ATTN_SECTION == 0) upi_attn_end_section(panels * d, one, w.dq_total, w.dq);
        upi_attn_pack_keys(w.k, a->k, a->dtype, k0, a->k_stride, keys, d);
        upi_attn_pack_keys(w.v, a->v, a->dtype, k0, a->v_stride, keys, v_dim);
        finite = upi_attn_keys_finite(w.k, keys, d);
        for (p = 0; p < panels; ++p) {
            upi_attn_part_make(&parts[p], w.lanes, p * UPI_ATTN_PANEL, k0, keys);
            /* Without a row of its own too: its neighbours' tiles may take it along. */
            if (parts[p].from < keys && parts[p].from + parts[p].count > 0)
                upi_attn_bwd_panel(&w, a, p, &parts[p], finite, one);
        }
        if (gates != NULL) upi_par_wait(gates + k0 / UPI_ATTN_KEYS, upi_attn_turn_after(job, turn, k0));
        upi_attn_add_grad_all(w.dout_finite, v_dim, keys, parts, w.lanes, k0, panels, w.p, w.dout_rows, a->dv,
                              a->dv_stride);
        upi_attn_add_grad_all(w.q_finite, d, keys, parts, w.lanes, k0, panels, w.s, w.q_rows, a->dk,
                              a->dk_stride);
        if (gates != NULL) upi_par_open(gates + k0 / UPI_ATTN_KEYS, turn + 1);
    }
    upi_attn_bwd_finish(a, &w, q0, rows, is_long, one);
}

UPI_KERNELS_END

/* Item i of a call: turn by turn, and in a turn one block of each group, whose sums are apart. */
UPIPE_API void upi_attn_bwd_item(void *arg, int64_t i, int32_t worker)
{
    const upi_attn_bwd_job *job = (const upi_attn_bwd_job *)arg;
    const upipe_attn_grad *g = job->g;
    const upipe_attn *a = &g->a;
    const int32_t kv = (int32_t)(i % a->k.h), j = kv * job->group + (int32_t)(i / a->k.h / job->blocks);
    const int64_t turn = i / a->k.h, q0 = (job->blocks - 1 - turn % job->blocks) * UPI_ATTN_ROWS_BWD;
    upi_attn_head h = upi_attn_head_make(a, j);
    h.dout = upi_attn_view_head(g->dout, j);
    h.delta = (const float *)upi_attn_view_head(g->delta, j);
    h.dq = upi_attn_view_head(g->dq, j);
    h.dk = (float *)upi_attn_view_head(g->dk, kv);
    h.dv = (float *)upi_attn_view_head(g->dv, kv);
    h.dout_stride = g->dout.n_stride;
    h.delta_stride = g->delta.n_stride;
    h.dq_stride = g->dq.n_stride;
    h.dq_dtype = g->dq.dtype;
    h.dk_stride = g->dk.n_stride;
    h.dv_stride = g->dv.n_stride;
    job->block(job, &h, job->gates != NULL ? job->gates + kv * job->key_blocks : NULL, turn, q0,
               upi_attn_least(a->q.n - q0, UPI_ATTN_ROWS_BWD),
               (float *)a->work + (size_t)worker * job->floats);
}

/* The gradient of head j's sink, one chain over its rows: that of a score whose value is 0, and whose weight
 * is exp(sink - lse). Of a row of padding that has seen the sink alone o is 0, and so is delta, whatever dout is. */
UPIPE_API void upi_attn_sink_item(void *arg, int64_t j, int32_t worker)
{
    const upipe_attn_grad *g = (const upipe_attn_grad *)arg;
    const upi_attn_head h = upi_attn_head_make(&g->a, (int32_t)j);
    const upipe_attn_rows inside = upi_attn_inside(&g->a, g->a.q_pos, g->a.q.n);
    const float *delta = (const float *)upi_attn_view_head(g->delta, (int32_t)j);
    double sum = 0;
    int64_t i;
    (void)worker;
    if (*h.sink == -INFINITY) return;
    for (i = 0; i < g->a.q.n; ++i) {
        const float lse = h.lse[i * h.lse_stride];
        if ((i < inside.first || i >= inside.end) && lse == *h.sink) continue;
        sum += exp((double)*h.sink - (double)lse) * (double)delta[i * g->delta.n_stride];
    }
    g->dsinks[j] -= (float)sum;
}

/* Bytes of the gates, a multiple of 64. */
UPI_INLINE size_t upi_attn_gates(const upipe_ops *ops, const upipe_attn *a)
{
    int64_t blocks = (a->k.n + UPI_ATTN_KEYS - 1) / UPI_ATTN_KEYS;
    return upi_par_workers(ops) > 1 ? (size_t)(blocks * a->k.h * (int64_t)sizeof(int64_t) + 63) / 64 * 64 : 0;
}

/* Runs a job of which block, unit and floats are set. */
UPIPE_API void upi_attn_bwd_run(upipe_ctx *c, const upipe_attn_grad *g, upi_attn_bwd_job *job)
{
    const upipe_attn *a = &g->a;
    size_t gates = upi_attn_gates(c->ops, a);
    if (a->q.n == 0) return;
    job->g = g;
    job->group = a->q.h / a->k.h;
    job->blocks = (a->q.n + UPI_ATTN_ROWS_BWD - 1) / UPI_ATTN_ROWS_BWD;
    job->key_blocks = (a->k.n + UPI_ATTN_KEYS - 1) / UPI_ATTN_KEYS;
    job->gates = NULL;
    if (gates > 0) {
        job->gates = (int64_t *)(void *)((float *)a->work + (size_t)upi_par_workers(c->ops) * job->floats);
        memset(job->gates, 0, gates);
    }
    upi_par_each(c->ops, job->blocks * a->q.h, upi_attn_bwd_item, job);
    if (g->dsinks != NULL) upi_par_each(c->ops, a->q.h, upi_attn_sink_item, (void *)g);
}

UPIPE_API upipe_status upi_cpu_attn_bwd(upipe_ctx *c, const upipe_attn_grad *g)
{
    upi_attn_bwd_work work;
    upi_attn_bwd_job job;
    job.block = upi_attn_bwd_block;
    job.unit = NULL;
    job.floats = upi_attn_bwd_layout(&work, NULL, &g->a);
    upi_attn_bwd_run(c, g, &job);
    return UPIPE_OK;
}

/* ---- scratch of both ---- */

UPIPE_API size_t upi_cpu_attn_bytes(const struct upipe_ops *ops, const upipe_attn *a, int backward)
{
    upi_attn_fwd_work fwd;
    upi_attn_bwd_work bwd;
    size_t floats = backward ? upi_attn_bwd_layout(&bwd, NULL, a) : upi_attn_fwd_layout(&fwd, NULL, a);
    return floats * sizeof(float) * (size_t)upi_par_workers(ops) + (backward ? upi_attn_gates(ops, a) : 0);
}

#endif

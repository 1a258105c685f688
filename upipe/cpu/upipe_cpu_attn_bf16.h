/* upipe_cpu_attn_bf16.h -- attention by the processor's bf16 instructions
 *
 *     upipe_cpu_ops(&ops);
 *     if (upipe_cpu_attn_bf16(&ops, &err) != UPIPE_OK) puts(err.text);     the table is as it was
 *
 * Where q, k, v are bf16, all products of attention are taken by AMX or else AVX512-BF16 (upipe_cpu_bf16.h).
 * Weights, and gradients of scores, are rounded to bf16 before they are multiplied with a matrix; the weights'
 * sum is that of the unrounded ones. The rest is as in upipe_cpu_attn_fwd.h and _bwd.h: blocks, panels, masks,
 * sections, merges, and who adds to dk and dv when. Calls with f32 go to those kernels.
 *
 * With queries in the lanes, as there, weights become an operand without a shuffle: two rows of keys are the
 * two halves of a row of pairs.
 *
 *     S^T[key][panel]   = K[key][d]      . pairs of Q^T[d][panel]
 *     O^T[d][panel]    += V^T[d][key]    . pairs of P^T[key][panel]     dq the same, of K^T and the gradients
 *     dv[key][d]       += P^T[key][rows] . pairs of dO[rows][d]         all rows of a block; dk the same
 *
 * Steps of the instructions are counted from a block's first key, and from its first query: a step of which a
 * panel sees nothing adds exactly nothing, and is left out. What is weighed has zeros where it is not finite, as weights
 * of 0 don't hide that; behind the product it is added to the sums that see it (upi_attn_bf16_add_cleaned).
 */
#ifndef UPIPE_CPU_ATTN_BF16_H
#define UPIPE_CPU_ATTN_BF16_H

#include "upipe_cpu_attn_bwd.h"
#include "upipe_cpu_bf16.h"

enum {
    UPI_ATTN_BF16_KEY_STEP = (int)UPI_ATTN_KEYS / 2 + UPI_ATTN_PAD, /* words between rows of V^T and K^T */
    UPI_ATTN_BF16_STEPS = ((int)UPI_ATTN_ROWS_BWD + (int)UPI_BF16_STEP - 1) / (int)UPI_BF16_STEP,
    UPI_ATTN_BF16_PAIRS = UPI_ATTN_BF16_STEPS * (int)UPI_BF16_STEP / 2, /* of a block's rows */
    UPI_ATTN_BF16_ROW_STEP =
        UPI_ATTN_BF16_PAIRS + (int)UPI_ATTN_PAD /* words between keys of P^T[key][rows] */
};

UPI_KERNELS_BEGIN

/* Words of a row of d elements, whole steps. */
UPI_INLINE int upi_attn_bf16_words(int d)
{
    return (int)upi_bf16_up(d, UPI_BF16_STEP) / 2;
}

/* d elements, whole tiles. */
UPI_INLINE int upi_attn_bf16_tiles(int d)
{
    return (int)upi_bf16_up(d, UPI_BF16_PANEL);
}

UPI_INLINE uint32_t *upi_attn_bf16_carve(float *base, size_t *used, int64_t count)
{
    return (uint32_t *)(void *)upi_attn_carve(base, used, count);
}

/* ---- operands ---- */

/* Panels [panel][d / 2][lanes] of so many rows from row `first` on. */
UPI_INLINE void upi_attn_bf16_pack_panels(uint32_t *to, const void *from, int64_t first, int64_t stride,
                                          int rows, int d)
{
    const uint16_t *at = (const uint16_t *)from + first * stride;
    for (; rows > 0; rows -= UPI_ATTN_PANEL, at += UPI_ATTN_PANEL * stride) {
        upi_bf16_pack(to, 1, UPI_ATTN_PANEL, at, stride, 1, upi_attn_least(rows, UPI_ATTN_PANEL),
                      UPI_ATTN_PANEL, d);
        to += upi_attn_bf16_words(d) * UPI_ATTN_PANEL;
    }
}

/* A block of keys: [key][d / 2 + pad], */
UPI_INLINE void upi_attn_bf16_pack_keys(uint32_t *to, const void *from, int64_t k0, int64_t stride, int keys,
                                        int d)
{
    upi_bf16_pack(to, upi_attn_bf16_words(d) + UPI_ATTN_PAD, 1, (const uint16_t *)from + k0 * stride, stride,
                  1, keys, upi_attn_bf16_tiles(keys), d);
}

/* Is bf16 number `half` of a pair finite? */
UPI_INLINE int upi_attn_bf16_finite(uint32_t pair, int half)
{
    return (pair >> 16 * half & 0x7f80) != 0x7f80;
}

/* Puts zeros in the place of infinities and NaNs in `rows` rows of so many words; returns whether there were none. */
UPI_CPU_KERNEL int upi_attn_bf16_clean(uint32_t *to, int64_t stride, int rows, int words)
{
    int all = 1, i, w;
    for (i = 0; i < rows; ++i, to += stride) {
        int finite = 1;
        for (w = 0; w < words; ++w) finite &= upi_attn_bf16_finite(to[w], 0) & upi_attn_bf16_finite(to[w], 1);
        for (w = 0; w < words && !finite; ++w) {
            if (!upi_attn_bf16_finite(to[w], 0)) to[w] &= 0xffff0000u;
            if (!upi_attn_bf16_finite(to[w], 1)) to[w] &= 0xffff;
        }
        all &= finite;
    }
    return all;
}

/* and turned: [d][key / 2 + pad]; cleaned, and whether that changed nothing. */
UPI_INLINE int upi_attn_bf16_turn_keys(uint32_t *to, const void *from, int64_t k0, int64_t stride, int keys,
                                       int d)
{
    upi_bf16_pack(to, UPI_ATTN_BF16_KEY_STEP, 1, (const uint16_t *)from + k0 * stride, 1, stride, d,
                  upi_attn_bf16_tiles(d), keys);
    return upi_attn_bf16_clean(to, UPI_ATTN_BF16_KEY_STEP, d, (int)upi_bf16_up(keys, UPI_BF16_STEP) / 2);
}

/* A block of queries as the depth: [row / 2][d]; the same. */
UPI_INLINE int upi_attn_bf16_pack_rows(uint32_t *to, const void *from, int64_t q0, int64_t stride, int rows,
                                       int d)
{
    const int tiles = upi_attn_bf16_tiles(d);
    upi_bf16_pack(to, 1, tiles, (const uint16_t *)from + q0 * stride, 1, stride, d, tiles, rows);
    return upi_attn_bf16_clean(to, tiles, (int)upi_bf16_up(rows, UPI_BF16_STEP) / 2, tiles);
}

/* Row j of a block of keys, vector v: zeros where that vector sees none of it. */
UPI_INLINE upi_fw upi_attn_bf16_row(const float *p, const upi_attn_part *part, int v, int j)
{
    const int row = j - part->from;
    return row >= 0 && row < part->seen[v] ? upi_fw_load(p + j * UPI_ATTN_PANEL + v * UPI_WIDE)
                                           : upi_fw_zero();
}

/* The keys of a block that a part's steps hold: *first .. *end - 1. */
UPI_INLINE void upi_attn_bf16_steps(const upi_attn_part *part, int *first, int *end)
{
    *first = part->from / UPI_BF16_STEP * UPI_BF16_STEP;
    *end = (int)upi_bf16_up(part->from + part->count, UPI_BF16_STEP);
}

/* pairs[key / 2][panel] = p[key][panel], for the keys of the part's steps. */
UPI_CPU_KERNEL void upi_attn_bf16_pairs(const float *p, const upi_attn_part *part, uint32_t *pairs)
{
    uint16_t half[2][UPI_WIDE];
    int first, end, j, v, i;
    upi_attn_bf16_steps(part, &first, &end);
    for (j = first; j < end; j += 2)
        for (v = 0; v < UPI_ATTN_VECTORS; ++v) {
            uint32_t *to = pairs + j / 2 * UPI_ATTN_PANEL + v * UPI_WIDE;
            for (i = 0; i < 2; ++i) upi_fw_put(half[i], UPIPE_BF16, 0, upi_attn_bf16_row(p, part, v, j + i));
            for (i = 0; i < UPI_WIDE; ++i) to[i] = half[0][i] | (uint32_t)half[1][i] << 16;
        }
}

/* rows[key][.. panel ..] = p[key][panel], for all of so many keys. */
UPI_CPU_KERNEL void upi_attn_bf16_rows(const float *p, const upi_attn_part *part, int keys, uint32_t *rows)
{
    int j, v;
    for (j = 0; j < keys; ++j, rows += UPI_ATTN_BF16_ROW_STEP)
        for (v = 0; v < UPI_ATTN_VECTORS; ++v)
            upi_fw_put(rows, UPIPE_BF16, v * UPI_WIDE, upi_attn_bf16_row(p, part, v, j));
}

/* ---- products ---- */

/* out[rows][panel] = a[rows][depth / 2] . b[depth / 2][panel]. The last tile of lanes lies over the one before
 * where a panel has half a tile too many. */
UPI_INLINE void upi_attn_bf16_product(const upi_bf16_unit *unit, int rows, int depth, const uint32_t *a,
                                      int64_t a_stride, const uint32_t *b, float *out)
{
    int lane;
    for (lane = 0; lane < UPI_ATTN_PANEL; lane += UPI_BF16_PANEL) {
        const int last = (int)UPI_ATTN_PANEL - (int)UPI_BF16_PANEL, at = lane < last ? lane : last;
        unit->strip(rows, depth, a, a_stride, b + at, UPI_ATTN_PANEL, out + at, UPI_ATTN_PANEL);
    }
}

/* p[key][panel] = the products of the part's keys, and of their tiles' others. */
UPI_INLINE void upi_attn_bf16_scores(const upi_bf16_unit *unit, int d, const upi_attn_part *part,
                                     const uint32_t *keys, const uint32_t *panel, float *p)
{
    const int first = part->from / UPI_BF16_PANEL * UPI_BF16_PANEL, words = upi_attn_bf16_words(d);
    upi_attn_bf16_product(unit, upi_attn_bf16_tiles(part->from + part->count) - first, 2 * words,
                          keys + first * (words + UPI_ATTN_PAD), words + UPI_ATTN_PAD, panel,
                          p + first * UPI_ATTN_PANEL);
}

/* out[d][panel] = fold[panel] * out + turned keys . pairs; sums is scratch, [64][panel]. */
UPI_CPU_KERNEL void upi_attn_bf16_weigh(const upi_bf16_unit *unit, int d, const upi_attn_part *part,
                                        const uint32_t *keys, const uint32_t *pairs, float *out,
                                        const float *fold, float *sums)
{
    int first, end, c, i, v;
    upi_attn_bf16_steps(part, &first, &end);
    for (c = 0; c < d; c += UPI_ATTN_KEYS) {
        const int rows = upi_attn_least(d - c, UPI_ATTN_KEYS);
        upi_attn_bf16_product(unit, upi_attn_bf16_tiles(rows), end - first,
                              keys + c * UPI_ATTN_BF16_KEY_STEP + first / 2, UPI_ATTN_BF16_KEY_STEP,
                              pairs + first / 2 * UPI_ATTN_PANEL, sums);
        for (i = 0; i < rows; ++i, out += UPI_ATTN_PANEL)
            for (v = 0; v < UPI_ATTN_PANEL; v += UPI_WIDE)
                upi_fw_store(out + v, upi_fw_fma(upi_fw_load(fold + v), upi_fw_load(out + v),
                                                 upi_fw_load(sums + i * UPI_ATTN_PANEL + v)));
    }
}

/* grad[keys][d] += factor * weights[key][rows first .. end - 1] . rows[row / 2][d]; sums is scratch, [64][16]. */
UPI_CPU_KERNEL void upi_attn_bf16_add_grad(const upi_bf16_unit *unit, int d, int keys, int first, int end,
                                           const uint32_t *weights, const uint32_t *rows, float factor,
                                           float *grad, int64_t grad_stride, float *sums)
{
    const upi_f8 times = upi_f8_set1(factor);
    const int wide = upi_attn_bf16_tiles(d);
    int c, j, i;
    for (c = 0; c < d; c += UPI_BF16_PANEL) {
        unit->strip(upi_attn_bf16_tiles(keys), end - first, weights + first / 2, UPI_ATTN_BF16_ROW_STEP,
                    rows + first / 2 * wide + c, wide, sums, UPI_BF16_PANEL);
        for (j = 0; j < keys; ++j)
            for (i = 0; i < upi_attn_least(d - c, UPI_BF16_PANEL); i += UPI_LANES) {
                float *at = grad + j * grad_stride + c + i;
                upi_f8_store(at,
                             upi_f8_fma(times, upi_f8_load(sums + j * UPI_BF16_PANEL + i), upi_f8_load(at)));
            }
    }
}

/* What was cleaned away of a row of d elements goes to the sums first .. end - 1, which see the row: to element c of
 * sum i, out[i * sum_step + c * column_step]. Its weight is number `half` of the pair weights[i * weight_step]. */
UPI_INLINE void upi_attn_bf16_add_cleaned(const uint16_t *row, int d, int first, int end,
                                          const uint32_t *weights, int64_t weight_step, int half, float *out,
                                          int64_t sum_step, int64_t column_step)
{
    int c, i;
    for (c = 0; c < d; ++c)
        for (i = first; i < end && !upi_attn_bf16_finite(row[c], 0); ++i)
            out[i * sum_step + c * column_step] +=
                upipe_bf16_to_f32((uint16_t)(weights[i * weight_step] >> 16 * half)) *
                upipe_bf16_to_f32(row[c]);
}

/* Behind upi_attn_bf16_weigh, of the part of a block of keys that a panel sees: rows `from` from k0 on; lanes: the
 * panel's. */
UPI_CPU_KERNEL void upi_attn_bf16_weigh_cleaned(int d, const upi_attn_part *part, const uint16_t *from,
                                                int64_t stride, const int64_t *lanes_first,
                                                const int64_t *lanes_end, int64_t k0, const uint32_t *pairs,
                                                float *out)
{
    int j, first, end;
    for (j = part->from; j < part->from + part->count; ++j) {
        for (first = 0; first < UPI_ATTN_PANEL && lanes_end[first] <= k0 + j; ++first) continue;
        for (end = first; end < UPI_ATTN_PANEL && lanes_first[end] <= k0 + j; ++end) continue;
        upi_attn_bf16_add_cleaned(from + (k0 + j) * stride, d, first, end, pairs + j / 2 * UPI_ATTN_PANEL, 1,
                                  j % 2, out, 1, UPI_ATTN_PANEL);
    }
}

/* Behind upi_attn_bf16_add_grad, of `rows` queries: rows `from`. What is not finite needs no factor. */
UPI_CPU_KERNEL void upi_attn_bf16_add_grad_cleaned(int d, int keys, int rows, const uint16_t *from,
                                                   int64_t stride, upi_attn_lanes lanes, int64_t k0,
                                                   const uint32_t *weights, float *grad, int64_t grad_stride)
{
    int i;
    for (i = 0; i < rows; ++i)
        upi_attn_bf16_add_cleaned(from + i * stride, d, (int)upi_clamp(lanes.first[i] - k0, 0, keys),
                                  (int)upi_clamp(lanes.end[i] - k0, 0, keys), weights + i / 2,
                                  UPI_ATTN_BF16_ROW_STEP, i % 2, grad, grad_stride, 1);
}

/* ---- forward ---- */

typedef struct upi_attn_bf16_fwd_work {
    upi_attn_fwd_work f32; /* its sums; p is [64][panel] */
    uint32_t *q;           /* [12 panels][d / 2][panel] */
    uint32_t *k;           /* [64][d / 2 + pad] */
    uint32_t *v;           /* [v_dim][32 + pad] */
    uint32_t *pairs;       /* [32][panel]    weights */
} upi_attn_bf16_fwd_work;

UPI_INLINE size_t upi_attn_bf16_fwd_layout(upi_attn_bf16_fwd_work *w, float *base, const upipe_attn *a)
{
    const int64_t words = upi_attn_bf16_words(a->q.d);
    size_t used = 0;
    w->q = upi_attn_bf16_carve(base, &used, UPI_ATTN_ROWS_FWD * words);
    w->k = upi_attn_bf16_carve(base, &used, UPI_ATTN_KEYS * (words + UPI_ATTN_PAD));
    w->v = upi_attn_bf16_carve(base, &used, (int64_t)upi_attn_bf16_tiles(a->v.d) * UPI_ATTN_BF16_KEY_STEP);
    w->pairs = upi_attn_bf16_carve(base, &used, UPI_ATTN_KEYS / 2 * UPI_ATTN_PANEL);
    upi_attn_fwd_layout_sums(&w->f32, base, &used, a);
    return used;
}

/* As upi_attn_fwd_panel; its rows are block rows from `lane` on, and k0 is the block's first key. */
UPI_INLINE void upi_attn_bf16_fwd_panel(const upi_bf16_unit *unit, const upi_attn_bf16_fwd_work *w,
                                        const upi_attn_head *a, float rate, int panel,
                                        const upi_attn_part *part, int finite, int lane, int64_t k0)
{
    float *p = w->f32.p + part->from * UPI_ATTN_PANEL, *top = w->f32.top + panel * UPI_ATTN_PANEL;
    float *o = w->f32.o + panel * UPI_ATTN_PANEL * a->v_dim, old[UPI_ATTN_PANEL], fold[UPI_ATTN_PANEL];
    memcpy(old, top, sizeof old);
    upi_attn_bf16_scores(unit, a->d, part, w->k, w->q + panel * UPI_ATTN_PANEL * upi_attn_bf16_words(a->d),
                         w->f32.p);
    if (a->squash != 0) upi_attn_squash(p, part->seen, a->squash);
    upi_attn_hide_scores(p, 0, part, top);
    upi_attn_softmax(p, part->seen, rate, old, top, fold, w->f32.sum + panel * UPI_ATTN_PANEL);
    upi_attn_bf16_pairs(w->f32.p, part, w->pairs);
    upi_attn_bf16_weigh(unit, a->v_dim, part, w->v, w->pairs, o, fold, w->f32.p);
    if (!finite)
        upi_attn_bf16_weigh_cleaned(a->v_dim, part, (const uint16_t *)a->v, a->v_stride,
                                    w->f32.lanes.first + lane, w->f32.lanes.end + lane, k0, w->pairs, o);
}

/* As upi_attn_fwd_block. */
UPI_CPU_KERNEL void upi_attn_bf16_fwd_block(const upi_attn_fwd_job *job, const upi_attn_head *heads,
                                            int count, int64_t q0, int rows, float *scratch)
{
    const upi_attn_head *a = heads;
    const int v_dim = a->v_dim, panels = (rows + UPI_ATTN_PANEL - 1) / UPI_ATTN_PANEL;
    const float rate = (float)(a->unit * 1.4426950408889634);
    upi_attn_bf16_fwd_work w;
    upi_attn_part part;
    int64_t k0, begin, end;
    int h, p, is_long, finite;
    upi_attn_bf16_fwd_layout(&w, scratch, a->call);
    upi_attn_see(w.f32.lanes, a->call, q0, rows);
    begin = upi_attn_block_of(w.f32.lanes.first[0]);
    end = w.f32.lanes.end[rows - 1];
    is_long = upi_attn_is_long(begin, end);
    for (h = 0; h < count; ++h)
        upi_attn_bf16_pack_panels(w.q + h * panels * UPI_ATTN_PANEL * upi_attn_bf16_words(a->d), heads[h].q,
                                  q0, a->q_stride, rows, a->d);
    upi_attn_fwd_begin(&w.f32, count * panels, v_dim, is_long);
    job->unit->open();
    for (k0 = begin; k0 < end; k0 += UPI_ATTN_KEYS) {
        const int keys = upi_attn_least(end - k0, UPI_ATTN_KEYS);
        if (k0 > begin && k0 % UPI_ATTN_SECTION == 0)
            upi_attn_fwd_end_section(&w.f32, count * panels, v_dim, rate);
        upi_attn_bf16_pack_keys(w.k, a->k, k0, a->k_stride, keys, a->d);
        finite = upi_attn_bf16_turn_keys(w.v, a->v, k0, a->v_stride, keys, v_dim);
        for (p = 0; p < panels; ++p) {
            upi_attn_part_make(&part, w.f32.lanes, p * UPI_ATTN_PANEL, k0, keys);
            for (h = 0; h < count && part.count > 0; ++h)
                upi_attn_bf16_fwd_panel(job->unit, &w, a, rate, h * panels + p, &part, finite,
                                        p * UPI_ATTN_PANEL, k0);
        }
    }
    job->unit->close();
    if (is_long) {
        upi_attn_fwd_end_section(&w.f32, count * panels, v_dim, rate);
        w.f32.o = w.f32.o_total;
        w.f32.sum = w.f32.sum_total;
    }
    for (h = 0; h < count; ++h) upi_attn_fwd_finish(&heads[h], &w.f32, h * panels, q0, rows);
}

/* ---- backward ---- */

typedef struct upi_attn_bf16_bwd_work {
    upi_attn_bwd_work f32; /* its sums; p and s are [64][panel], of one panel */
    uint32_t *q;           /* [6 panels][d / 2][panel] */
    uint32_t *dout;        /* [6 panels][v_dim / 2][panel] */
    uint32_t *q_rows;      /* [rows / 2][d] */
    uint32_t *dout_rows;   /* [rows / 2][v_dim] */
    uint32_t *k, *v;       /* [64][d / 2 + pad], [64][v_dim / 2 + pad] */
    uint32_t *k_turned;    /* [d][32 + pad] */
    uint32_t *pairs;       /* [32][panel]           gradients of scores, of one panel */
    uint32_t *p, *s;       /* [64][rows / 2 + pad]  weights, and gradients of scores */
} upi_attn_bf16_bwd_work;

UPI_INLINE size_t upi_attn_bf16_bwd_layout(upi_attn_bf16_bwd_work *w, float *base, const upipe_attn *a)
{
    const int64_t words = upi_attn_bf16_words(a->q.d), v_words = upi_attn_bf16_words(a->v.d);
    const int64_t tiles = upi_attn_bf16_tiles(a->q.d), v_tiles = upi_attn_bf16_tiles(a->v.d);
    size_t used = 0;
    w->q = upi_attn_bf16_carve(base, &used, UPI_ATTN_ROWS_BWD * words);
    w->dout = upi_attn_bf16_carve(base, &used, UPI_ATTN_ROWS_BWD * v_words);
    w->q_rows = upi_attn_bf16_carve(base, &used, UPI_ATTN_BF16_PAIRS * tiles);
    w->dout_rows = upi_attn_bf16_carve(base, &used, UPI_ATTN_BF16_PAIRS * v_tiles);
    w->k = upi_attn_bf16_carve(base, &used, UPI_ATTN_KEYS * (words + UPI_ATTN_PAD));
    w->v = upi_attn_bf16_carve(base, &used, UPI_ATTN_KEYS * (v_words + UPI_ATTN_PAD));
    w->k_turned = upi_attn_bf16_carve(base, &used, tiles * UPI_ATTN_BF16_KEY_STEP);
    w->pairs = upi_attn_bf16_carve(base, &used, UPI_ATTN_KEYS / 2 * UPI_ATTN_PANEL);
    w->p = upi_attn_bf16_carve(base, &used, (int64_t)UPI_ATTN_KEYS * UPI_ATTN_BF16_ROW_STEP);
    w->s = upi_attn_bf16_carve(base, &used, (int64_t)UPI_ATTN_KEYS * UPI_ATTN_BF16_ROW_STEP);
    w->f32.p = upi_attn_carve(base, &used, UPI_ATTN_KEYS * UPI_ATTN_PANEL);
    w->f32.s = upi_attn_carve(base, &used, UPI_ATTN_KEYS * UPI_ATTN_PANEL);
    upi_attn_bwd_layout_sums(&w->f32, base, &used, a);
    return used;
}

/* One panel against its part of a block of keys from k0 on: its columns of p and s, and its part of dq. */
UPI_INLINE void upi_attn_bf16_bwd_panel(const upi_bf16_unit *unit, const upi_attn_bf16_bwd_work *w,
                                        const upi_attn_head *a, int panel, const upi_attn_part *part,
                                        int finite, int64_t k0, const float *one)
{
    const int lane = panel * UPI_ATTN_PANEL, from = part->from * UPI_ATTN_PANEL;
    float *p = w->f32.p, *s = w->f32.s;
    upi_attn_bf16_scores(unit, a->d, part, w->k, w->q + lane * upi_attn_bf16_words(a->d), p);
    upi_attn_bf16_scores(unit, a->v_dim, part, w->v, w->dout + lane * upi_attn_bf16_words(a->v_dim), s);
    upi_attn_weights_grad(a, p + from, s + from, part->seen, w->f32.lse + lane, w->f32.delta + lane);
    if (part->masked) upi_attn_hide_grad(p + from, s + from, upi_attn_rows_seen_by_all(part), part);
    upi_attn_bf16_rows(p, part, UPI_ATTN_KEYS, w->p + lane / 2);
    upi_attn_bf16_rows(s, part, UPI_ATTN_KEYS, w->s + lane / 2);
    upi_attn_bf16_pairs(s, part, w->pairs);
    upi_attn_bf16_weigh(unit, a->d, part, w->k_turned, w->pairs, w->f32.dq + lane * a->d, one, p);
    if (!finite)
        upi_attn_bf16_weigh_cleaned(a->d, part, (const uint16_t *)a->k, a->k_stride,
                                    w->f32.lanes.first + lane, w->f32.lanes.end + lane, k0, w->pairs,
                                    w->f32.dq + lane * a->d);
}

/* What the block of queries adds to the gradients of a block of keys, with its rows first .. last - 1. */
UPI_INLINE void upi_attn_bf16_bwd_add(const upi_bf16_unit *unit, const upi_attn_bf16_bwd_work *w,
                                      const upi_attn_head *a, int64_t q0, int rows, int64_t k0, int keys,
                                      int first, int last)
{
    float *dk = a->dk + k0 * a->dk_stride, *dv = a->dv + k0 * a->dv_stride;
    upi_attn_bf16_add_grad(unit, a->v_dim, keys, first, last, w->p, w->dout_rows, 1, dv, a->dv_stride,
                           w->f32.p);
    upi_attn_bf16_add_grad(unit, a->d, keys, first, last, w->s, w->q_rows, a->scale, dk, a->dk_stride,
                           w->f32.p);
    if (!w->f32.dout_finite)
        upi_attn_bf16_add_grad_cleaned(a->v_dim, keys, rows, (const uint16_t *)a->dout + q0 * a->dout_stride,
                                       a->dout_stride, w->f32.lanes, k0, w->p, dv, a->dv_stride);
    if (!w->f32.q_finite)
        upi_attn_bf16_add_grad_cleaned(a->d, keys, rows, (const uint16_t *)a->q + q0 * a->q_stride,
                                       a->q_stride, w->f32.lanes, k0, w->s, dk, a->dk_stride);
}

/* As upi_attn_bwd_block. */
UPI_CPU_KERNEL void upi_attn_bf16_bwd_block(const upi_attn_bwd_job *job, const upi_attn_head *a,
                                            int64_t *gates, int64_t turn, int64_t q0, int rows,
                                            float *scratch)
{
    const int d = a->d, v_dim = a->v_dim, panels = (rows + UPI_ATTN_PANEL - 1) / UPI_ATTN_PANEL;
    upi_attn_bf16_bwd_work w;
    float one[UPI_ATTN_PANEL];
    upi_attn_part part;
    int64_t k0, begin, end;
    int p, first, last, is_long, finite;
    upi_attn_bf16_bwd_layout(&w, scratch, a->call);
    for (p = 0; p < UPI_ATTN_PANEL; ++p) one[p] = 1;
    upi_attn_see(w.f32.lanes, a->call, q0, rows);
    begin = upi_attn_block_of(w.f32.lanes.first[0]);
    end = w.f32.lanes.end[rows - 1];
    is_long = upi_attn_is_long(begin, end);
    upi_attn_bwd_begin(a, &w.f32, q0, rows, is_long);
    upi_attn_bf16_pack_panels(w.q, a->q, q0, a->q_stride, rows, d);
    upi_attn_bf16_pack_panels(w.dout, a->dout, q0, a->dout_stride, rows, v_dim);
    w.f32.q_finite = upi_attn_bf16_pack_rows(w.q_rows, a->q, q0, a->q_stride, rows, d);
    w.f32.dout_finite = upi_attn_bf16_pack_rows(w.dout_rows, a->dout, q0, a->dout_stride, rows, v_dim);
    /* lanes behind the last panel, which its steps take along */
    memset(w.p, 0, (size_t)UPI_ATTN_KEYS * UPI_ATTN_BF16_ROW_STEP * sizeof *w.p);
    memset(w.s, 0, (size_t)UPI_ATTN_KEYS * UPI_ATTN_BF16_ROW_STEP * sizeof *w.s);
    job->unit->open();
    for (k0 = begin; k0 < end; k0 += UPI_ATTN_KEYS) {
        const int keys = upi_attn_least(end - k0, UPI_ATTN_KEYS);
        if (k0 > begin && k0 % UPI_ATTN_SECTION == 0)
            upi_attn_end_section(panels * d, one, w.f32.dq_total, w.f32.dq);
        upi_attn_bf16_pack_keys(w.k, a->k, k0, a->k_stride, keys, d);
        upi_attn_bf16_pack_keys(w.v, a->v, k0, a->v_stride, keys, v_dim);
        finite = upi_attn_bf16_turn_keys(w.k_turned, a->k, k0, a->k_stride, keys, d);
        for (p = 0, first = rows, last = 0; p < panels; ++p) {
            upi_attn_part_make(&part, w.f32.lanes, p * UPI_ATTN_PANEL, k0, keys);
            if (part.count > 0) {
                upi_attn_bf16_bwd_panel(job->unit, &w, a, p, &part, finite, k0, one);
                if (first == rows) first = p * UPI_ATTN_PANEL / UPI_BF16_STEP * UPI_BF16_STEP;
                last = upi_attn_least(rows, (p + 1) * UPI_ATTN_PANEL);
            } else { /* its columns are 0 */
                upi_attn_bf16_rows(w.f32.p, &part, UPI_ATTN_KEYS, w.p + p * UPI_ATTN_PANEL / 2);
                upi_attn_bf16_rows(w.f32.s, &part, UPI_ATTN_KEYS, w.s + p * UPI_ATTN_PANEL / 2);
            }
        }
        if (gates != NULL) upi_par_wait(gates + k0 / UPI_ATTN_KEYS, upi_attn_turn_after(job, turn, k0));
        if (first < last)
            upi_attn_bf16_bwd_add(job->unit, &w, a, q0, rows, k0, keys, first,
                                  (int)upi_bf16_up(last, UPI_BF16_STEP));
        if (gates != NULL) upi_par_open(gates + k0 / UPI_ATTN_KEYS, turn + 1);
    }
    job->unit->close();
    upi_attn_bwd_finish(a, &w.f32, q0, rows, is_long, one);
}

UPI_KERNELS_END

/* ---- entries of the table ---- */

UPIPE_API size_t upi_attn_bf16_bytes(const struct upipe_ops *ops, const upipe_attn *a, int backward)
{
    upi_attn_bf16_fwd_work fwd;
    upi_attn_bf16_bwd_work bwd;
    size_t floats;
    if (a->q.dtype != UPIPE_BF16) return upi_cpu_attn_bytes(ops, a, backward);
    floats = backward ? upi_attn_bf16_bwd_layout(&bwd, NULL, a) : upi_attn_bf16_fwd_layout(&fwd, NULL, a);
    return floats * sizeof(float) * (size_t)upi_par_workers(ops) + (backward ? upi_attn_gates(ops, a) : 0);
}

UPIPE_API upipe_status upi_attn_bf16_fwd(upipe_ctx *c, const upipe_attn *a, const upi_bf16_unit *unit)
{
    upi_attn_bf16_fwd_work work;
    upi_attn_fwd_job job;
    if (a->q.dtype != UPIPE_BF16) return upi_cpu_attn_fwd(c, a);
    job.block = upi_attn_bf16_fwd_block;
    job.unit = unit;
    job.floats = upi_attn_bf16_fwd_layout(&work, NULL, a);
    upi_attn_fwd_run(c, a, &job);
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_attn_bf16_bwd(upipe_ctx *c, const upipe_attn_grad *g, const upi_bf16_unit *unit)
{
    upi_attn_bf16_bwd_work work;
    upi_attn_bwd_job job;
    if (g->a.q.dtype != UPIPE_BF16) return upi_cpu_attn_bwd(c, g);
    job.block = upi_attn_bf16_bwd_block;
    job.unit = unit;
    job.floats = upi_attn_bf16_bwd_layout(&work, NULL, &g->a);
    upi_attn_bwd_run(c, g, &job);
    return UPIPE_OK;
}

#if UPIPE_CPU_BF16_X86

UPIPE_API upipe_status upi_attn_fwd_amx(upipe_ctx *c, const upipe_attn *a)
{
    return upi_attn_bf16_fwd(c, a, &upi_bf16_amx);
}

UPIPE_API upipe_status upi_attn_bwd_amx(upipe_ctx *c, const upipe_attn_grad *g)
{
    return upi_attn_bf16_bwd(c, g, &upi_bf16_amx);
}

UPIPE_API upipe_status upi_attn_fwd_avx512(upipe_ctx *c, const upipe_attn *a)
{
    return upi_attn_bf16_fwd(c, a, &upi_bf16_avx512);
}

UPIPE_API upipe_status upi_attn_bwd_avx512(upipe_ctx *c, const upipe_attn_grad *g)
{
    return upi_attn_bf16_bwd(c, g, &upi_bf16_avx512);
}

#endif

/* upipe_cpu_attn_bf16 -- replaces the table's attention by one in the processor's bf16 instructions, as
 *                        upipe_cpu_bf16 does for products; ops was filled by upipe_cpu_ops, err may be NULL.
 *   errors  UNSUPPORTED where it has neither, and the table stays as it is. Another processor gives other bits.
 */
UPIPE_API upipe_status upipe_cpu_attn_bf16(upipe_ops *ops, upipe_err *err)
{
    const upi_bf16_unit *unit = upi_bf16_here();
    if (unit == NULL) return upi_bf16_refuse(err, "attention");
#if UPIPE_CPU_BF16_X86
    ops->attn_fwd = unit == &upi_bf16_amx ? upi_attn_fwd_amx : upi_attn_fwd_avx512;
    ops->attn_bwd = unit == &upi_bf16_amx ? upi_attn_bwd_amx : upi_attn_bwd_avx512;
    ops->attn_bytes = upi_attn_bf16_bytes;
#else
    (void)ops;
#endif
    return UPIPE_OK;
}

#endif

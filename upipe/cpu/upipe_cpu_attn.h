/* upipe_cpu_attn.h -- attention on the CPU: what forward and backward share
 *
 * Three vectors of the widest kind hold as many queries, a panel (UPI_ATTN_PANEL: 24, or 48 with AVX-512),
 * and everything is computed transposed:
 *
 *     S^T[key][panel] = K[key] . Q^T[d][panel]        softmax runs down the columns: no sum across lanes
 *     O^T[d][panel]  += V[key][d] . P^T[key][panel]   V and K are only broadcast: no transpose, only a copy
 *                    of rows
 *
 * A block of queries stays in scratch as panels while the loop over blocks of 64 keys runs. All rows are first
 * copied to scratch as f32, so results depend on the values alone, not on strides or addresses.
 *
 * No sum is one long chain, whose rounding would grow with its length. What a block of 64 keys adds to an
 * element is a sum that starts from zero. These sums are added up over a section of 4,096 keys, and the
 * sections' sums in a total. Borders count from the call's first key, whatever a row sees: what it doesn't see
 * adds zeros, and these change nothing.
 *
 * Each lane sees one run of keys (upipe_attn_visible). Blocks of keys that a block of queries doesn't see are
 * skipped, and so are tiles of a block that a whole panel doesn't see. A key that single lanes don't see has
 * exactly the weight 0 there. Only keys at the end of a run are masked at all. Where what is multiplied with weights
 * holds a NaN or an infinity, which weights of 0 don't hide, sums are taken of what is seen alone
 * (upi_attn_weigh_seen), in the same order: with the same bits, and slower.
 *
 * upipe_cpu_attn_fwd.h and upipe_cpu_attn_bwd.h are the kernels.
 */
#ifndef UPIPE_CPU_ATTN_H
#define UPIPE_CPU_ATTN_H

#include <math.h>

#include "upipe_cpu_par.h"
#include "../upipe_attn.h"

enum {
    UPI_ATTN_VECTORS = 3,                         /* side by side in a register tile */
    UPI_ATTN_TILE = UPIPE_CPU_AVX512 ? 8 : 4,     /* rows of it: 12 or 24 sums, of 16 or 32 registers */
    UPI_ATTN_PANEL = UPI_ATTN_VECTORS * UPI_WIDE, /* queries in the lanes of a panel */
    UPI_ATTN_STEPS = 4,                           /* of a tile's depth in a turn of its loop */
    /* last steps of a tile, which go row by row (upi_attn_tile_row); none with 32 registers, where no machine
     * has shown that it helps */
    UPI_ATTN_APART = UPIPE_CPU_AVX512 ? 0 : UPI_ATTN_STEPS,
    UPI_ATTN_KEYS = 64,                    /* keys in a block */
    UPI_ATTN_SECTION = 64 * UPI_ATTN_KEYS, /* keys whose sums are added to totals at once */
    UPI_ATTN_PAD = 16, /* elements between copied rows: strides of a power of two share few cache sets */
    UPI_ATTN_CAN = UPIPE_ATTN_WINDOW | UPIPE_ATTN_CU_SEQLENS | UPIPE_ATTN_SOFTCAP | UPIPE_ATTN_SINKS |
                   UPIPE_ATTN_V_DIM | UPIPE_ATTN_ADD_DQ
};

UPI_KERNELS_BEGIN

/* One query head with its key/value head; strides in elements. dout .. dv only in the backward. */
typedef struct upi_attn_head {
    const upipe_attn *call;
    const void *q, *k, *v, *dout;
    void *o, *dq;
    float *lse, *dk, *dv;
    const float *delta, *sink; /* sink: NULL = none */
    int64_t q_stride, k_stride, v_stride, dout_stride, o_stride, dq_stride, lse_stride, dk_stride, dv_stride,
        delta_stride;
    int d, v_dim, merge;
    float scale;
    /* With a soft-cap a score is unit * tanh(squash * product), without one unit * product and squash 0. */
    float unit, squash;
    upipe_dtype dtype, o_dtype, dq_dtype;
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

/* ---- rows of storage <-> f32 scratch; `rows` is row `first` of a matrix with rows `stride` apart ---- */

/* UPI_BY_TYPE(f, dtype, arguments): the call with a constant storage type, for f inlines. */
#define UPI_BY_TYPE(f, dtype, ...)      \
    do {                                \
        if ((dtype) == UPIPE_F32)       \
            f(__VA_ARGS__, UPIPE_F32);  \
        else                            \
            f(__VA_ARGS__, UPIPE_BF16); \
    } while (0)

/* panel[k][lane] = rows[lane][k]; lanes from count on are 0. */
UPI_INLINE void upi_attn_pack_panel_of(float *panel, const void *rows, int64_t first, int64_t stride,
                                       int count, int d, upipe_dtype dtype)
{
    int part, k, i;
    for (part = 0; part < UPI_ATTN_PANEL; part += UPI_LANES)
        for (k = 0; k < d; k += UPI_LANES) {
            upi_f8 r[UPI_LANES];
            UPI_CPU_UNROLL
            for (i = 0; i < UPI_LANES; ++i)
                r[i] = part + i < count ? upi_f8_get(rows, dtype, (first + part + i) * stride + k)
                                        : upi_f8_zero();
            upi_f8_transpose(r);
            UPI_CPU_UNROLL
            for (i = 0; i < UPI_LANES; ++i) upi_f8_store(panel + (k + i) * UPI_ATTN_PANEL + part, r[i]);
        }
}

UPI_CPU_KERNEL void upi_attn_pack_panel(float *panel, const void *rows, upipe_dtype dtype, int64_t first,
                                        int64_t stride, int count, int d)
{
    UPI_BY_TYPE(upi_attn_pack_panel_of, dtype, panel, rows, first, stride, count, d);
}

/* rows[lane][k] = panel[k][lane] * factor[lane] + 0 for lanes below count; with keep, + keep[lane] * what is
 * there, where keep[lane] is not 0. Without + 0 an underflow's -0 would tell whether a section ended behind
 * it. */
UPI_CPU_KERNEL void upi_attn_unpack_panel(void *rows, upipe_dtype dtype, int64_t first, int64_t stride,
                                          int count, int d, const float *panel, const float *factor,
                                          const float *keep)
{
    int part, k, i;
    for (part = 0; part < UPI_ATTN_PANEL; part += UPI_LANES) {
        const upi_f8 times = upi_f8_load(factor + part);
        for (k = 0; k < d; k += UPI_LANES) {
            upi_f8 r[UPI_LANES];
            UPI_CPU_UNROLL
            for (i = 0; i < UPI_LANES; ++i)
                r[i] = upi_f8_fma(times, upi_f8_load(panel + (k + i) * UPI_ATTN_PANEL + part), upi_f8_zero());
            upi_f8_transpose(r);
            UPI_CPU_UNROLL
            for (i = 0; i < UPI_LANES; ++i)
                if (part + i < count) {
                    const int64_t at = (first + part + i) * stride + k;
                    if (keep != NULL && keep[part + i] != 0)
                        r[i] = upi_f8_fma(upi_f8_set1(keep[part + i]), upi_f8_get(rows, dtype, at), r[i]);
                    upi_f8_put(rows, dtype, at, r[i]);
                }
        }
    }
}

/* out[i][d + pad] = rows[i][d] for a block of keys; zeros up to the next whole tile. */
UPI_INLINE void upi_attn_pack_keys_of(float *out, const void *rows, int64_t first, int64_t stride, int count,
                                      int d, upipe_dtype dtype)
{
    int i, k;
    for (i = 0; i < count; ++i, out += d + UPI_ATTN_PAD) {
        for (k = 0; k + UPI_WIDE <= d; k += UPI_WIDE)
            upi_fw_store(out + k, upi_fw_get(rows, dtype, (first + i) * stride + k));
        if (k < d) upi_f8_store(out + k, upi_f8_get(rows, dtype, (first + i) * stride + k));
    }
    for (; i % UPI_ATTN_TILE != 0; ++i, out += d + UPI_ATTN_PAD) memset(out, 0, (size_t)d * sizeof *out);
}

UPI_CPU_KERNEL void upi_attn_pack_keys(float *out, const void *rows, upipe_dtype dtype, int64_t first,
                                       int64_t stride, int count, int d)
{
    UPI_BY_TYPE(upi_attn_pack_keys_of, dtype, out, rows, first, stride, count, d);
}

/* Are `count` elements of each of so many rows, a multiple of four, finite? */
UPI_CPU_KERNEL int upi_attn_finite(const float *x, int64_t stride, int rows, int count)
{
    const upi_f8 zero = upi_f8_zero();
    /* of products with 0: NaN where an element is not finite. Four chains hide their latency. */
    upi_f8 sums[4] = {zero, zero, zero, zero};
    float lanes[UPI_LANES], sum = 0;
    int k, i;
    for (; rows > 0; rows -= 4, x += 4 * stride)
        for (k = 0; k < count; k += UPI_LANES) {
            UPI_CPU_UNROLL
            for (i = 0; i < 4; ++i) sums[i] = upi_f8_fma(upi_f8_load(x + i * stride + k), zero, sums[i]);
        }
    upi_f8_store(lanes, upi_f8_add(upi_f8_add(sums[0], sums[1]), upi_f8_add(sums[2], sums[3])));
    for (i = 0; i < UPI_LANES; ++i) sum += lanes[i];
    return sum == 0;
}

/* Of a block of `count` copied keys. */
UPI_INLINE int upi_attn_keys_finite(const float *rows, int count, int d)
{
    return upi_attn_finite(rows, d + UPI_ATTN_PAD, (count + 3) / 4 * 4, d);
}

/* ---- register tiles, summed over `depth`; tile and vectors are constant after inlining ----
 *
 * Loops over tiles are kernels of their own: a tile fills the registers, and inside a larger function gcc keeps
 * some of its sums in memory. */

/* sums[i][v] += a[i * row_stride] * b[v * b_stride], for vectors from .. end - 1 */
UPI_INLINE void upi_attn_step(int tile, int from, int end, const float *a, int64_t row_stride, const float *b,
                              int64_t b_stride, upi_fw sums[][UPI_ATTN_VECTORS])
{
    upi_fw column[UPI_ATTN_VECTORS];
    int i, v;
    UPI_CPU_UNROLL
    for (v = from; v < end; ++v) column[v] = upi_fw_load(b + v * b_stride);
    UPI_CPU_UNROLL
    for (i = 0; i < tile; ++i) {
        const upi_fw x = upi_fw_broadcast(a + i * row_stride);
        UPI_CPU_UNROLL
        for (v = from; v < end; ++v) upi_fw_accumulate(&sums[i][v], x, column[v]);
    }
}

/* Where the steps that a tile takes row by row begin. */
typedef struct upi_attn_rows {
    const float *a[UPI_ATTN_STEPS], *b;
    int steps; /* UPI_ATTN_STEPS, or 0 */
} upi_attn_rows;

/* sums[i][v] += a[i * row_stride + k * depth_stride] * b[v * b_stride + k * b_depth_stride], k = 0 .. depth - 1 in
 * order, for vectors from .. end - 1. If `even`, depth is a multiple of UPI_ATTN_STEPS, and not 0: a loop less.
 * The last `apart` steps, none or UPI_ATTN_STEPS, are left to upi_attn_tile_row. */
UPI_INLINE upi_attn_rows upi_attn_tile(int even, int apart, int tile, int from, int end, int64_t depth,
                                       const float *a, int64_t row_stride, int64_t depth_stride,
                                       const float *b, int64_t b_stride, int64_t b_depth_stride,
                                       upi_fw sums[][UPI_ATTN_VECTORS])
{
    upi_attn_rows rows;
    int u;
    for (; depth >= apart + UPI_ATTN_STEPS; depth -= UPI_ATTN_STEPS) {
        UPI_CPU_UNROLL
        for (u = 0; u < UPI_ATTN_STEPS; ++u) {
            const float *column = a + u * depth_stride;
            UPI_OPAQUE_ADDRESS(column); /* or gcc has a register for each row and step */
            upi_attn_step(tile, from, end, column, row_stride, b + u * b_depth_stride, b_stride, sums);
        }
        a += UPI_ATTN_STEPS * depth_stride;
        b += UPI_ATTN_STEPS * b_depth_stride;
    }
    for (; !even && depth % UPI_ATTN_STEPS != 0; --depth, a += depth_stride, b += b_depth_stride)
        upi_attn_step(tile, from, end, a, row_stride, b, b_stride, sums);
    UPI_CPU_UNROLL
    for (u = 0; u < UPI_ATTN_STEPS; ++u) rows.a[u] = a + u * depth_stride;
    rows.b = b;
    rows.steps = even ? apart : (int)depth;
    return rows;
}

/* The steps that upi_attn_tile left, for row i. A caller that stores row i before it asks for row i + 1 spreads
 * the tile's stores over its products: in a run of stores each one costs a Zen 3 core one or two cycles of both
 * multipliers. */
UPI_INLINE void upi_attn_tile_row(const upi_attn_rows *rows, int i, int from, int end, int64_t row_stride,
                                  int64_t b_stride, int64_t b_depth_stride, upi_fw sums[][UPI_ATTN_VECTORS])
{
    const float *b = rows->b;
    int u;
    if (UPI_ATTN_APART == 0 || rows->steps == 0) return;
    UPI_OPAQUE_ADDRESS(b); /* or gcc keeps b for the next row, and sums in memory */
    UPI_CPU_UNROLL
    for (u = 0; u < UPI_ATTN_STEPS; ++u)
        upi_attn_step(1, from, end, rows->a[u] + i * row_stride, row_stride, b + u * b_depth_stride, b_stride,
                      sums + i);
}

/* Products of a tile's rows of [d + pad] with a panel [d][panel], from vector `from` on: out[tile][panel]; see
 * UPI_DOT_PIECE. Raises top[panel], unless it is NULL. */
UPI_INLINE void upi_attn_dot(int from, int d, const float *rows, const float *panel, float *__restrict out,
                             float *top)
{
    const int64_t stride = d + UPI_ATTN_PAD;
    int c, i, v;
    for (c = 0; c < d; c += UPI_DOT_PIECE) {
        upi_fw sums[UPI_ATTN_TILE][UPI_ATTN_VECTORS];
        upi_attn_rows last;
        UPI_CPU_UNROLL
        for (i = 0; i < UPI_ATTN_TILE; ++i) UPI_CPU_UNROLL
        for (v = from; v < UPI_ATTN_VECTORS; ++v) sums[i][v] = upi_fw_zero();
        last = upi_attn_tile(1, UPI_ATTN_APART, UPI_ATTN_TILE, from, UPI_ATTN_VECTORS,
                             upi_attn_least(d - c, UPI_DOT_PIECE), rows + c, stride, 1,
                             panel + c * UPI_ATTN_PANEL, UPI_WIDE, UPI_ATTN_PANEL, sums);
        UPI_CPU_UNROLL
        for (i = 0; i < UPI_ATTN_TILE; ++i) {
            upi_attn_tile_row(&last, i, from, UPI_ATTN_VECTORS, stride, UPI_WIDE, UPI_ATTN_PANEL, sums);
            UPI_CPU_UNROLL
            for (v = from; v < UPI_ATTN_VECTORS; ++v) {
                float *at = out + i * UPI_ATTN_PANEL + v * UPI_WIDE;
                UPI_OPAQUE_ADDRESS(at); /* or gcc reads the next piece's sums ahead */
                if (c > 0) sums[i][v] = upi_fw_add(upi_fw_load(at), sums[i][v]);
                upi_fw_store(at, sums[i][v]);
            }
        }
    }
    UPI_CPU_UNROLL
    for (v = from; v < UPI_ATTN_VECTORS && top != NULL; ++v) {
        upi_fw most = upi_fw_load(top + v * UPI_WIDE);
        UPI_CPU_UNROLL
        for (i = 0; i < UPI_ATTN_TILE; ++i)
            most = upi_fw_max(most, upi_fw_load(out + i * UPI_ATTN_PANEL + v * UPI_WIDE));
        upi_fw_store(top + v * UPI_WIDE, most);
    }
}

/* The same for `count` rows, a multiple of a tile's. */
UPI_CPU_KERNEL void upi_attn_products(int d, int count, const float *rows, const float *panel, float *out,
                                      float *top)
{
    int j;
    for (j = 0; j < count; j += UPI_ATTN_TILE)
        upi_attn_dot(0, d, rows + j * (d + UPI_ATTN_PAD), panel, out + j * UPI_ATTN_PANEL, top);
}

/* The same for a tile where the first vectors may see none of the rows. */
UPI_CPU_KERNEL void upi_attn_products_rest(int from, int d, const float *rows, const float *panel, float *out)
{
    if (from == 0)
        upi_attn_dot(0, d, rows, panel, out, NULL);
    else if (from == 1)
        upi_attn_dot(1, d, rows, panel, out, NULL);
    else
        upi_attn_dot(2, d, rows, panel, out, NULL);
}

/* sums += products of `count` rows of weights [count][panel] with a tile's columns of rows [count][stride], from
 * vector `from` on; see upi_attn_tile for `apart`. */
UPI_INLINE upi_attn_rows upi_attn_weigh_rows(int apart, int from, int count, const float *rows,
                                             int64_t stride, const float *weights,
                                             upi_fw sums[][UPI_ATTN_VECTORS])
{
    return upi_attn_tile(0, apart, UPI_ATTN_TILE, from, UPI_ATTN_VECTORS, count, rows, 1, stride, weights,
                         UPI_WIDE, UPI_ATTN_PANEL, sums);
}

/* out[tile][panel] = fold[panel] * out + rows^T . weights, where vector v takes keys[v] rows of [d + pad],
 * ascending in v and, unless `uneven`, the same. The products are summed from zero. */
UPI_INLINE void upi_attn_weigh_tile(int uneven, int d, const int *keys, const float *rows,
                                    const float *weights, float *__restrict out, const float *fold)
{
    const int64_t stride = d + UPI_ATTN_PAD;
    upi_fw sums[UPI_ATTN_TILE][UPI_ATTN_VECTORS];
    upi_attn_rows last;
    int i, v;
    UPI_CPU_UNROLL
    for (i = 0; i < UPI_ATTN_TILE; ++i) UPI_CPU_UNROLL
    for (v = 0; v < UPI_ATTN_VECTORS; ++v) sums[i][v] = upi_fw_zero();
    last = upi_attn_weigh_rows(uneven ? 0 : UPI_ATTN_APART, 0, keys[0], rows, stride, weights, sums);
    if (uneven) {
        upi_attn_weigh_rows(0, 1, keys[1] - keys[0], rows + keys[0] * stride, stride,
                            weights + keys[0] * UPI_ATTN_PANEL, sums);
        last = upi_attn_weigh_rows(0, 2, keys[2] - keys[1], rows + keys[1] * stride, stride,
                                   weights + keys[1] * UPI_ATTN_PANEL, sums);
    }
    UPI_CPU_UNROLL
    for (i = 0; i < UPI_ATTN_TILE; ++i) {
        upi_attn_tile_row(&last, i, 0, UPI_ATTN_VECTORS, 1, UPI_WIDE, UPI_ATTN_PANEL, sums);
        UPI_CPU_UNROLL
        for (v = 0; v < UPI_ATTN_VECTORS; ++v) {
            const float *times = fold + v * UPI_WIDE;
            float *sum = out + i * UPI_ATTN_PANEL + v * UPI_WIDE;
            UPI_OPAQUE_ADDRESS(times); /* or gcc keeps fold in registers */
            upi_fw_store(sum, upi_fw_fma(upi_fw_load(times), upi_fw_load(sum), sums[i][v]));
        }
    }
}

/* The same for all d rows of out; kept apart from its form for uneven vectors. */
UPI_CPU_KERNEL void upi_attn_weigh_even(int d, const int *keys, const float *rows, const float *weights,
                                        float *out, const float *fold)
{
    int c;
    for (c = 0; c < d; c += UPI_ATTN_TILE)
        upi_attn_weigh_tile(0, d, keys, rows + c, weights, out + c * UPI_ATTN_PANEL, fold);
}

UPI_CPU_KERNEL void upi_attn_weigh_uneven(int d, const int *keys, const float *rows, const float *weights,
                                          float *out, const float *fold)
{
    int c;
    for (c = 0; c < d; c += UPI_ATTN_TILE)
        upi_attn_weigh_tile(1, d, keys, rows + c, weights, out + c * UPI_ATTN_PANEL, fold);
}

/* A section ends: totals[d][panel] = fold[panel] * totals + sums, and sums begin again. */
UPI_CPU_KERNEL void upi_attn_end_section(int d, const float *fold, float *__restrict totals,
                                         float *__restrict sums)
{
    int c, v;
    for (c = 0; c < d * UPI_ATTN_PANEL; c += UPI_ATTN_PANEL)
        for (v = 0; v < UPI_ATTN_PANEL; v += UPI_WIDE) {
            const upi_fw total = upi_fw_load(totals + c + v), sum = upi_fw_load(sums + c + v);
            upi_fw_store(totals + c + v, upi_fw_fma(upi_fw_load(fold + v), total, sum));
            upi_fw_store(sums + c + v, upi_fw_zero());
        }
}

/* ---- what is visible ---- */

/* Which keys the lanes of panels see: [first[i], end[i]), both ascending. */
typedef struct upi_attn_lanes {
    int64_t *first, *end;
} upi_attn_lanes;

/* Scratch for so many lanes, a multiple of 16. */
UPI_INLINE upi_attn_lanes upi_attn_carve_lanes(float *base, size_t *used, int64_t count)
{
    upi_attn_lanes lanes;
    lanes.first = (int64_t *)(void *)upi_attn_carve(base, used, 2 * count);
    lanes.end = (int64_t *)(void *)upi_attn_carve(base, used, 2 * count);
    return lanes;
}

/* The lanes of queries q0 .. q0 + rows - 1; those that fill the last panel up see what the last query
 * sees. */
UPI_INLINE void upi_attn_see(upi_attn_lanes lanes, const upipe_attn *call, int64_t q0, int rows)
{
    int i;
    for (i = 0; i < rows; ++i) upipe_attn_visible(call, q0 + i, &lanes.first[i], &lanes.end[i]);
    for (; i % UPI_ATTN_PANEL != 0; ++i) {
        lanes.first[i] = lanes.first[rows - 1];
        lanes.end[i] = lanes.end[rows - 1];
    }
}

/* The first key of the block that key j lies in. */
UPI_INLINE int64_t upi_attn_block_of(int64_t j)
{
    return j / UPI_ATTN_KEYS * UPI_ATTN_KEYS;
}

/* Do keys first .. end - 1 lie in several sections? */
UPI_INLINE int upi_attn_is_long(int64_t first, int64_t end)
{
    return end > first && first / UPI_ATTN_SECTION < (end - 1) / UPI_ATTN_SECTION;
}

/* What a panel sees of a block of keys: `count` rows of it, from a tile's first row on. Both `from` and its
 * end, from + count, ascend from panel to panel; from is UPI_ATTN_KEYS where all that the panel sees comes
 * later. */
typedef struct upi_attn_part {
    int from, count;
    int seen[UPI_ATTN_VECTORS]; /* of those rows vector v sees some of the first seen[v]; ascending */
    int masked;                 /* not every lane sees all of those rows: lane l sees low[l] .. high[l] - 1 */
    float low[UPI_ATTN_PANEL], high[UPI_ATTN_PANEL];
} upi_attn_part;

/* Of a block of `keys` keys from k0, the part of the panel whose lanes begin at `lane`. */
UPI_INLINE void upi_attn_part_make(upi_attn_part *part, upi_attn_lanes lanes, int lane, int64_t k0, int keys)
{
    const int64_t *first = lanes.first + lane, *end = lanes.end + lane;
    const int top = UPI_ATTN_PANEL - 1, to = (int)upi_clamp(end[top] - k0, 0, keys);
    int64_t base;
    int l, v;
    part->from = (int)upi_clamp(first[0] - k0, 0, UPI_ATTN_KEYS) / UPI_ATTN_TILE * UPI_ATTN_TILE;
    part->count = to > part->from ? to - part->from : 0;
    base = k0 + part->from;
    part->masked = first[top] > base || end[0] < base + part->count;
    for (v = 0; v < UPI_ATTN_VECTORS; ++v)
        part->seen[v] = (int)upi_clamp(end[(v + 1) * UPI_WIDE - 1] - base, 0, part->count);
    if (!part->masked) return;
    for (l = 0; l < UPI_ATTN_PANEL; ++l) {
        part->low[l] = (float)(int)upi_clamp(first[l] - base, 0, UPI_ATTN_KEYS);
        part->high[l] = (float)(int)upi_clamp(end[l] - base, 0, UPI_ATTN_KEYS);
    }
}

/* The first vector that sees some of the rows from j on. */
UPI_INLINE int upi_attn_first_vector(const upi_attn_part *part, int j)
{
    return (part->seen[0] <= j) + (part->seen[1] <= j);
}

/* So many rows of the part, from its first one on, are seen by every lane. */
UPI_INLINE int upi_attn_rows_seen_by_all(const upi_attn_part *part)
{
    if (!part->masked) return part->count;
    return part->low[UPI_ATTN_PANEL - 1] > 0 ? 0 : upi_attn_least((int64_t)part->high[0], part->count);
}

/* x in the lanes of vector v that see row j, `hidden` in the others; the part is masked. */
UPI_INLINE upi_fw upi_attn_hide(upi_fw x, const upi_attn_part *part, int v, int j, upi_fw hidden)
{
    const upi_fw low = upi_fw_load(part->low + v * UPI_WIDE), high = upi_fw_load(part->high + v * UPI_WIDE);
    /* low <= j, and high >= j + 1 */
    x = upi_fw_select(upi_fw_equal(upi_fw_min(low, upi_fw_set1((float)j)), low), x, hidden);
    return upi_fw_select(upi_fw_equal(upi_fw_max(high, upi_fw_set1((float)(j + 1))), high), x, hidden);
}

/* As upi_attn_weigh_even and _uneven, of rows that a lane sees alone. */
UPI_CPU_KERNEL void upi_attn_weigh_seen(int d, const upi_attn_part *part, const float *rows,
                                        const float *weights, float *out, const float *fold)
{
    int c, j, v;
    for (c = 0; c < d; ++c, out += UPI_ATTN_PANEL)
        for (v = 0; v < UPI_ATTN_PANEL; v += UPI_WIDE) {
            upi_fw sum = upi_fw_zero();
            for (j = 0; j < part->seen[v / UPI_WIDE]; ++j) {
                upi_fw more = sum;
                upi_fw_accumulate(&more, upi_fw_broadcast(rows + j * (d + UPI_ATTN_PAD) + c),
                                  upi_fw_load(weights + j * UPI_ATTN_PANEL + v));
                sum = part->masked ? upi_attn_hide(more, part, v / UPI_WIDE, j, sum) : more;
            }
            upi_fw_store(out + v, upi_fw_fma(upi_fw_load(fold + v), upi_fw_load(out + v), sum));
        }
}

/* out[d][panel] = fold[panel] * out + rows^T . weights, for the rows of a part; finite: rows are. */
UPI_INLINE void upi_attn_weigh(int finite, int d, const upi_attn_part *part, const float *rows,
                               const float *weights, float *out, const float *fold)
{
    if (!finite)
        upi_attn_weigh_seen(d, part, rows, weights, out, fold);
    else if (part->seen[0] == part->seen[UPI_ATTN_VECTORS - 1])
        upi_attn_weigh_even(d, part->seen, rows, weights, out, fold);
    else
        upi_attn_weigh_uneven(d, part->seen, rows, weights, out, fold);
}

UPI_KERNELS_END

/* ---- a head of a call ---- */

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
    h.call = a;
    h.q = upi_attn_view_head(a->q, j);
    h.k = upi_attn_view_head(a->k, kv);
    h.v = upi_attn_view_head(a->v, kv);
    h.lse = (float *)upi_attn_view_head(a->lse, j);
    h.q_stride = a->q.n_stride;
    h.k_stride = a->k.n_stride;
    h.v_stride = a->v.n_stride;
    h.lse_stride = a->lse.n_stride;
    h.sink = a->mask.sinks != NULL ? a->mask.sinks + j : NULL;
    h.d = a->q.d;
    h.v_dim = a->v.d;
    h.merge = a->merge;
    h.scale = upipe_attn_scale(a);
    h.unit = a->mask.softcap > 0 ? a->mask.softcap : h.scale;
    h.squash = a->mask.softcap > 0 ? h.scale / a->mask.softcap : 0;
    h.dtype = a->q.dtype;
    return h;
}

#endif

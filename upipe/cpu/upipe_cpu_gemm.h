/* upipe_cpu_gemm.h -- matrix product on the CPU
 *
 * Fills two entries of the table (upi_cpu_gemm, upi_cpu_gemm_bytes). Any mix of f32 and bf16, any strides.
 * The scheme is BLAS's usual one: pieces of a and b are packed as f32, a register tile of ROWS x COLS sums
 * runs over both, 8 x 48 with AVX-512 and 6 x 16 elsewhere.
 *
 *     for each block of c, which is a thread's item:
 *         for each DEPTH of the depth, for each part of the columns:
 *             pack b                                           [B_PANELS][depth][COLS]
 *             for each strip of rows:
 *                 for the first part: pack a                   [panels][ROWS][DEPTH + 16]
 *                 for each panel of a, for each panel of b:    tile of c (+)= a * b, a sum after the other
 *
 * So an element of a is packed once for each block of columns, one of b once for each block of rows, and what
 * the tiles read again and again lies in the nearest caches: a panel of a in the first, a part of b in the
 * second, the block's a in the third.
 *
 * Packing waits for memory, tiles hardly touch it. So while a strip's tiles are computed, their kernel
 * fetches what is packed next into the second-level cache, one line every four steps of the depth: products
 * of few columns, such as a stage's Q, K and V of one x, do not wait for x.
 *
 * A batch that shares a is one product with more columns (all heads of a projection), one that shares b has
 * more rows (all heads of a weight gradient): the shared side is packed once. Panels do not cross matrices.
 *
 * The promise: the depth is cut into sums (g->sum_depth) that depend on the kind of product alone, counted from
 * the call's first element: DEPTH of them, 64 rows where the depth runs down the rows of a stored a (a weight's
 * gradient over tokens), or one matrix where matrices are added up. Such a sum is one chain of fused
 * multiply-adds from 0, ascending. c is the old c, or nothing, plus these sums in order. So rounding grows with
 * the number of sums and not with the depth, and calls that accumulate and cut the depth between two sums have
 * the bits of one call. Tiles that overhang the matrix run through the same kernels on padded data. Threads
 * share no sum: their number changes no bit. Without FMA hardware the chain rounds each product too; all else
 * holds.
 */
#ifndef UPIPE_CPU_GEMM_H
#define UPIPE_CPU_GEMM_H

#include "upipe_cpu_par.h"
#include "../upipe_ops.h"

/* clang-format off */
enum {
    /* The register tile: 24 sums, 3 of b and 1 of a in 32 registers, or 12, 2 and 1 in 16. 8 x 48 loads less
     * for each multiply-add than 14 x 32 does, and 8 divides what rows there usually are. */
    UPI_GEMM_ROWS      = UPIPE_CPU_AVX512 ? 8 : 6,
    UPI_GEMM_SHORT     = 4, /* rows of the kernel for a matrix's last ones */
    UPI_GEMM_VECTORS   = UPIPE_CPU_AVX512 ? 3 : 2,
    UPI_GEMM_COLS      = UPI_GEMM_VECTORS * UPI_WIDE,
    UPI_GEMM_TILE      = UPI_GEMM_ROWS * UPI_GEMM_COLS,
    /* A panel of a, 21 or 8 KiB, stays in a first-level cache while b, 720 or 160 KiB, streams by from the
     * second. */
    UPI_GEMM_DEPTH     = UPIPE_CPU_AVX512 ? 640 : 320,
    UPI_GEMM_A_STRIDE  = UPI_GEMM_DEPTH + 16,
    UPI_GEMM_A_PANEL   = UPI_GEMM_ROWS * UPI_GEMM_A_STRIDE,
    UPI_GEMM_A_PANELS  = UPIPE_CPU_AVX512 ? 4 : 8,
    UPI_GEMM_B_PANELS  = UPIPE_CPU_AVX512 ? 6 : 8,
    UPI_GEMM_BLOCK_ROWS = UPIPE_CPU_AVX512 ? 384 : 512, /* of a block: 984 or 669 KiB of packed a */
    UPI_GEMM_BLOCK_F32 = 1024 * 1024, /* sums of a block where they lie in c */
    UPI_GEMM_BLOCK_16  = 192 * 1024,  /* in scratch: 768 KiB */
    UPI_GEMM_ITEMS     = 2,  /* blocks for each of several threads, at least */
    UPI_GEMM_AHEAD     = 4,  /* steps of the depth for a line that is fetched ahead */
    UPI_GEMM_LINE      = 64, /* bytes of a line of a cache */
    UPI_GEMM_ALIGN     = 64, /* of scratch, bytes */
};
/* clang-format on */

/* One operand, a (lanes are rows of c) or b (lanes are columns of c). Element (head, lane, k) lies at
 * data + head * head_stride + lane * lane_stride + k * depth_stride; one of the last two strides is 1. */
typedef struct upi_gemm_side {
    const void *data;
    int64_t lanes, lane_stride, depth_stride, head_stride;
    int64_t panels; /* of one head; panel p of all belongs to head p / panels */
    int64_t all;    /* of the heads that this side counts through */
    int width;      /* lanes of a panel */
    upipe_dtype dtype;
} upi_gemm_side;

typedef struct upi_gemm_job {
    upi_gemm_side a, b;
    upipe_view out;
    int64_t depth;                  /* of one matrix; of all of them, where what is added up lies as one */
    int64_t added;                  /* products that are added up into one matrix of c */
    int sum_depth;                  /* of one chain */
    int pack_depth;                 /* sums that are packed together */
    int64_t block_rows, block_cols; /* panels of a block of c */
    int64_t row_blocks, col_blocks;
    int64_t products;      /* separate products: the heads, where neither side is shared */
    int64_t b_at, sums_at; /* in a worker's scratch, floats: packed a lies at 0 */
    size_t worker_bytes, bytes;
    char *work;
    int accumulate;
} upi_gemm_job;

/* What the kernels fetch meanwhile, line by line: rows of `lines` lines that packing reads next. */
typedef struct upi_gemm_ahead {
    uintptr_t at;
    intptr_t jump; /* from the end of a row to the next one, bytes */
    int64_t rows;  /* that are left */
    int lines, left;
} upi_gemm_ahead;

/* One block of c, as a worker computes it. */
typedef struct upi_gemm_block {
    const upi_gemm_job *g;
    upi_gemm_side a, b; /* of this product */
    char *out;
    int64_t row0, row1, col0, col1; /* panels */
    int64_t part0, part1;           /* panels of columns that are packed */
    float *a_pack, *b_pack;
    float *sums; /* [rows][cols][ROWS][COLS], for a c of 16 bits; NULL for f32 */
    upi_gemm_ahead ahead_a, ahead_b;
} upi_gemm_block;

UPI_INLINE int64_t upi_gemm_least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

UPI_INLINE void upi_gemm_side_init(upi_gemm_side *s, upipe_view v, int64_t lanes, int width, int lanes_outer,
                                   int64_t heads)
{
    s->data = v.data;
    s->lanes = lanes;
    s->lane_stride = lanes_outer ? v.n_stride : 1;
    s->depth_stride = lanes_outer ? 1 : v.n_stride;
    s->head_stride = v.h > 1 ? v.h_stride : 0;
    s->panels = (lanes + width - 1) / width;
    s->all = s->panels * heads;
    s->width = width;
    s->dtype = v.dtype;
}

/* Both sides of a product, whose rows and columns lie in panels of these widths. Returns the number of separate
 * products: of heads, where neither side is shared. */
UPI_INLINE int64_t upi_gemm_sides(upi_gemm_side *rows, upi_gemm_side *cols, upipe_view out, upipe_view a,
                                  upipe_view b, int flags, int row_width, int col_width)
{
    const int64_t row_heads = a.h > 1 && b.h == 1 ? out.h : 1, col_heads = a.h == 1 ? out.h : 1;
    upi_gemm_side_init(rows, a, out.n, row_width, (flags & UPIPE_GEMM_TRANS_A) == 0, row_heads);
    upi_gemm_side_init(cols, b, out.d, col_width, (flags & UPIPE_GEMM_TRANS_B) != 0, col_heads);
    return out.h / (row_heads * col_heads);
}

/* Panels of a block where `all` are cut into `blocks` of equal size; the number of blocks that this makes. */
UPI_INLINE int64_t upi_gemm_cut(int64_t all, int64_t *blocks)
{
    int64_t each = (all + *blocks - 1) / *blocks;
    *blocks = (all + each - 1) / each;
    return each;
}

/* Plans the product. Bytes never shrink as rows, columns or the depth grow, so that the scratch of a largest
 * product serves all smaller ones of its kind. */
UPI_INLINE void upi_gemm_plan(upi_gemm_job *g, const upipe_ops *ops, upipe_view out, upipe_view a,
                              upipe_view b, int flags)
{
    const int trans_a = (flags & UPIPE_GEMM_TRANS_A) != 0;
    const int64_t matrix = trans_a ? a.n : a.d; /* its depth */
    int64_t most = out.dtype == UPIPE_F32 ? UPI_GEMM_BLOCK_F32 : UPI_GEMM_BLOCK_16, sums, items, packed;
    const int32_t workers = upi_par_workers(ops);
    memset(g, 0, sizeof *g);
    g->added = out.h == 1 ? a.h : 1;
    packed = upi_gemm_least(matrix * g->added, UPI_GEMM_DEPTH); /* the most, however the depth is cut below */
    g->sum_depth = trans_a ? (int)UPIPE_SUM_ROWS : (int)UPI_GEMM_DEPTH;
    if (g->added > 1 && matrix > 0 && matrix <= g->sum_depth && upi_gemm_join(out, &a, &b, flags)) {
        g->sum_depth = (int)matrix;
        g->added = 1;
    }
    g->pack_depth = UPI_GEMM_DEPTH / g->sum_depth * g->sum_depth;
    g->products = upi_gemm_sides(&g->a, &g->b, out, a, b, flags, UPI_GEMM_ROWS, UPI_GEMM_COLS);
    g->out = out;
    g->depth = trans_a ? a.n : a.d;
    g->accumulate = (flags & UPIPE_GEMM_ACCUMULATE) != 0;
    if (g->a.all == 0 || g->b.all == 0 || g->depth == 0) return;
    g->block_rows = upi_gemm_least(g->a.all, UPI_GEMM_BLOCK_ROWS / UPI_GEMM_ROWS);
    g->block_cols = upi_gemm_least(g->b.all, most / (g->block_rows * UPI_GEMM_TILE));
    sums = out.dtype == UPIPE_F32 ? 0 : upi_gemm_least(g->block_rows * g->b.all * UPI_GEMM_TILE, most);
    g->b_at = g->block_rows * UPI_GEMM_A_PANEL;
    g->sums_at = g->b_at + upi_gemm_least(g->b.all, UPI_GEMM_B_PANELS) * UPI_GEMM_COLS * packed;
    g->worker_bytes = (size_t)(g->sums_at + sums) * sizeof(float);
    g->bytes = g->worker_bytes * (size_t)workers;
    /* Blocks of equal size: a last one of a few rows would pack all of b for itself. Enough of them for the
     * threads: what is split is the longer side, for the other one is packed again. */
    g->row_blocks = (g->a.all + g->block_rows - 1) / g->block_rows;
    g->col_blocks = (g->b.all + g->block_cols - 1) / g->block_cols;
    items = workers > 1 ? (int64_t)workers * UPI_GEMM_ITEMS : 1;
    while (g->products * g->row_blocks * g->col_blocks < items) {
        int64_t rows = g->a.all / g->row_blocks, cols = g->b.all / g->col_blocks;
        if (rows < 2 && cols < 2) break;
        if (cols < 2 || (rows >= 2 && rows * UPI_GEMM_ROWS >= cols * UPI_GEMM_COLS))
            ++g->row_blocks;
        else
            ++g->col_blocks;
    }
    g->block_rows = upi_gemm_cut(g->a.all, &g->row_blocks);
    g->block_cols = upi_gemm_cut(g->b.all, &g->col_blocks);
}

UPI_KERNELS_BEGIN

/* ---- packing ---- */

/* Fetches `count` elements that packing reaches some rows later: rows lie pages apart, where no hardware
 * prefetcher follows. For what no tile has fetched before. */
UPI_INLINE void upi_gemm_fetch(const void *base, upipe_dtype dtype, int64_t at, int64_t count)
{
    const char *p = (const char *)base + at * (int64_t)upipe_dtype_bytes(dtype);
    int64_t bytes = count * (int64_t)upipe_dtype_bytes(dtype), i;
    for (i = 0; i < bytes; i += UPI_GEMM_LINE) __builtin_prefetch(p + i);
}

/* First element of a panel; *count becomes its lanes inside the matrix. */
UPI_INLINE const void *upi_gemm_panel(const upi_gemm_side *s, int64_t panel, int64_t k, int *count)
{
    int64_t head = panel / s->panels, lane = panel % s->panels * s->width;
    int64_t at = head * s->head_stride + lane * s->lane_stride + k * s->depth_stride;
    *count = (int)upi_gemm_least(s->lanes - lane, s->width);
    return (const char *)s->data + at * (int64_t)upipe_dtype_bytes(s->dtype);
}

/* Rows of a as they lie, A_STRIDE apart. The kernel broadcasts from ROWS of them: no transpose. */
UPI_INLINE void upi_gemm_pack_rows(const upi_gemm_side *s, float *to, int64_t first, int64_t last, int64_t k0,
                                   int depth, upipe_dtype dtype)
{
    int64_t p;
    int i, k, count;
    for (p = first; p < last; ++p) {
        const void *from = upi_gemm_panel(s, p, k0, &count);
        for (i = 0; i < UPI_GEMM_ROWS; ++i, to += UPI_GEMM_A_STRIDE) {
            if (i >= count) {
                memset(to, 0, (size_t)depth * sizeof(float));
                continue;
            }
            if (i + 2 < count) upi_gemm_fetch(from, dtype, (i + 2) * s->lane_stride, depth);
            for (k = 0; k + UPI_LANES <= depth; k += UPI_LANES)
                upi_f8_store(to + k, upi_f8_get(from, dtype, i * s->lane_stride + k));
            for (; k < depth; ++k) to[k] = upipe_cpu_get(from, dtype, i * s->lane_stride + k);
        }
    }
}

/* Rows of b, whose depth is contiguous, to [depth][COLS]. */
UPI_INLINE void upi_gemm_pack_columns_turned(const upi_gemm_side *s, float *to, int64_t first, int64_t last,
                                             int64_t k0, int depth, upipe_dtype dtype)
{
    int64_t p;
    int half, i, k, count;
    for (p = first; p < last; ++p, to += (int64_t)depth * UPI_GEMM_COLS) {
        const void *from = upi_gemm_panel(s, p, k0, &count);
        for (half = 0; half < UPI_GEMM_COLS; half += UPI_LANES) {
            float *t = to + half;
            for (k = 0; k + UPI_LANES <= depth; k += UPI_LANES) {
                upi_f8 r[UPI_LANES];
                UPI_CPU_UNROLL
                for (i = 0; i < UPI_LANES; ++i)
                    r[i] = half + i < count ? upi_f8_get(from, dtype, (half + i) * s->lane_stride + k)
                                            : upi_f8_zero();
                upi_f8_transpose(r);
                UPI_CPU_UNROLL
                for (i = 0; i < UPI_LANES; ++i) upi_f8_store(t + (k + i) * UPI_GEMM_COLS, r[i]);
            }
            for (; k < depth; ++k)
                for (i = 0; i < UPI_LANES; ++i)
                    t[k * UPI_GEMM_COLS + i] =
                        half + i < count ? upipe_cpu_get(from, dtype, (half + i) * s->lane_stride + k) : 0;
        }
    }
}

/* a stored [depth][rows], turned into rows A_STRIDE apart: eight of the depth and eight rows at a time, of
 * which the panel keeps those that are its own. */
UPI_INLINE void upi_gemm_pack_rows_turned(const upi_gemm_side *s, float *to, int64_t first, int64_t last,
                                          int64_t k0, int depth, upipe_dtype dtype)
{
    while (first < last) {
        int64_t next = upi_gemm_least(last, (first / s->panels + 1) * s->panels); /* same head up to here */
        int64_t lanes = s->lanes - first % s->panels * UPI_GEMM_ROWS, p;
        int64_t here = upi_gemm_least(lanes, (next - first) * UPI_GEMM_ROWS);
        int count, i, j, k, row;
        const void *from = upi_gemm_panel(s, first, k0, &count);
        for (k = 0; k < depth; k += UPI_LANES) {
            for (i = k + UPI_LANES; i < depth && i < k + 2 * UPI_LANES; ++i)
                upi_gemm_fetch(from, dtype, i * s->depth_stride, here);
            for (p = 0; p < next - first; ++p)
                for (row = 0; row < UPI_GEMM_ROWS; row += UPI_LANES) {
                    float *t = to + p * UPI_GEMM_A_PANEL + row * UPI_GEMM_A_STRIDE + k;
                    int64_t lane = p * UPI_GEMM_ROWS + row;
                    const int keep = UPI_GEMM_ROWS - row < UPI_LANES ? UPI_GEMM_ROWS - row : UPI_LANES;
                    upi_f8 r[UPI_LANES];
                    if (k + UPI_LANES <= depth && lane + UPI_LANES <= lanes) {
                        UPI_CPU_UNROLL
                        for (i = 0; i < UPI_LANES; ++i)
                            r[i] = upi_f8_get(from, dtype, (k + i) * s->depth_stride + lane);
                        upi_f8_transpose(r);
                        UPI_CPU_UNROLL
                        for (i = 0; i < UPI_LANES; ++i)
                            if (i < keep) upi_f8_store(t + i * UPI_GEMM_A_STRIDE, r[i]);
                        continue;
                    }
                    for (i = 0; i < keep; ++i)
                        for (j = 0; j < UPI_LANES && k + j < depth; ++j)
                            t[i * UPI_GEMM_A_STRIDE + j] =
                                lane + i < lanes
                                    ? upipe_cpu_get(from, dtype, (k + j) * s->depth_stride + lane + i)
                                    : 0;
                }
        }
        to += (next - first) * UPI_GEMM_A_PANEL;
        first = next;
    }
}

/* b stored [depth][columns], to [depth][COLS]. The depth is outside, so that memory is read in order. */
UPI_INLINE void upi_gemm_pack_columns(const upi_gemm_side *s, float *to, int64_t first, int64_t last,
                                      int64_t k0, int depth, upipe_dtype dtype)
{
    while (first < last) {
        int64_t next = upi_gemm_least(last, (first / s->panels + 1) * s->panels);
        int64_t lanes = s->lanes - first % s->panels * UPI_GEMM_COLS, p;
        int64_t here = upi_gemm_least(lanes, (next - first) * UPI_GEMM_COLS);
        int count, i, k;
        const void *from = upi_gemm_panel(s, first, k0, &count);
        for (k = 0; k < depth; ++k) {
            if (k + 4 < depth) upi_gemm_fetch(from, dtype, (k + 4) * s->depth_stride, here);
            for (p = 0; p < next - first; ++p) {
                float *t = to + (p * depth + k) * UPI_GEMM_COLS;
                int64_t at = k * s->depth_stride + p * UPI_GEMM_COLS;
                if ((p + 1) * UPI_GEMM_COLS <= lanes) {
                    UPI_CPU_UNROLL
                    for (i = 0; i < UPI_GEMM_COLS; i += UPI_LANES)
                        upi_f8_store(t + i, upi_f8_get(from, dtype, at + i));
                } else {
                    for (i = 0; i < UPI_GEMM_COLS; ++i)
                        t[i] = p * UPI_GEMM_COLS + i < lanes ? upipe_cpu_get(from, dtype, at + i) : 0;
                }
            }
        }
        to += (next - first) * depth * UPI_GEMM_COLS;
        first = next;
    }
}

UPI_INLINE void upi_gemm_pack_a_as(const upi_gemm_side *s, float *to, int64_t first, int64_t last, int64_t k0,
                                   int depth, upipe_dtype dtype)
{
    if (s->depth_stride == 1)
        upi_gemm_pack_rows(s, to, first, last, k0, depth, dtype);
    else
        upi_gemm_pack_rows_turned(s, to, first, last, k0, depth, dtype);
}

UPI_CPU_KERNEL void upi_gemm_pack_a(const upi_gemm_side *s, float *to, int64_t first, int64_t last,
                                    int64_t k0, int depth)
{
    if (s->dtype == UPIPE_F32)
        upi_gemm_pack_a_as(s, to, first, last, k0, depth, UPIPE_F32);
    else
        upi_gemm_pack_a_as(s, to, first, last, k0, depth, UPIPE_BF16);
}

UPI_INLINE void upi_gemm_pack_b_as(const upi_gemm_side *s, float *to, int64_t first, int64_t last, int64_t k0,
                                   int depth, upipe_dtype dtype)
{
    if (s->depth_stride == 1)
        upi_gemm_pack_columns_turned(s, to, first, last, k0, depth, dtype);
    else
        upi_gemm_pack_columns(s, to, first, last, k0, depth, dtype);
}

UPI_CPU_KERNEL void upi_gemm_pack_b(const upi_gemm_side *s, float *to, int64_t first, int64_t last,
                                    int64_t k0, int depth)
{
    if (s->dtype == UPIPE_F32)
        upi_gemm_pack_b_as(s, to, first, last, k0, depth, UPIPE_F32);
    else
        upi_gemm_pack_b_as(s, to, first, last, k0, depth, UPIPE_BF16);
}

/* ---- fetching ahead ---- */

/* Nothing is left to fetch: the kernels touch `at`, over and over. */
UPI_INLINE void upi_gemm_ahead_none(upi_gemm_ahead *f, const void *at)
{
    f->at = (uintptr_t)at;
    f->jump = -UPI_GEMM_LINE;
    f->rows = 0;
    f->lines = f->left = 1;
}

/* What packing the panels first .. last - 1 at depth k reads, as far as they are of one head. */
UPI_INLINE void upi_gemm_ahead_of(upi_gemm_ahead *f, const upi_gemm_side *s, int64_t first, int64_t last,
                                  int64_t k, int64_t depth)
{
    const int64_t bytes = (int64_t)upipe_dtype_bytes(s->dtype);
    int64_t lanes = upi_gemm_least(s->lanes - first % s->panels * s->width, (last - first) * s->width);
    int64_t row = s->depth_stride == 1 ? depth : lanes,
            stride = s->depth_stride == 1 ? s->lane_stride : s->depth_stride;
    int count;
    f->at = (uintptr_t)upi_gemm_panel(s, first, k, &count);
    f->lines = f->left = (int)((row * bytes + UPI_GEMM_LINE - 1) / UPI_GEMM_LINE);
    f->jump = (intptr_t)(stride * bytes - f->lines * UPI_GEMM_LINE);
    f->rows = s->depth_stride == 1 ? lanes : depth;
}

/* ---- kernel ---- */

/* One step of the depth for a tile of rows x vectors sums. */
UPI_INLINE void upi_gemm_tile_step(int rows, int vectors, const float *a, const float *b,
                                   upi_fw sum[][UPI_GEMM_VECTORS])
{
    upi_fw y[UPI_GEMM_VECTORS];
    int i, v;
    UPI_CPU_UNROLL
    for (v = 0; v < vectors; ++v) y[v] = upi_fw_load(b + v * UPI_WIDE);
    UPI_CPU_UNROLL
    for (i = 0; i < rows; ++i) {
        const upi_fw x = upi_fw_broadcast(a + i * UPI_GEMM_A_STRIDE);
        UPI_CPU_UNROLL
        for (v = 0; v < vectors; ++v) upi_fw_accumulate(&sum[i][v], x, y[v]);
    }
}

/* c[rows][COLS], rows c_stride apart, (+)= one sum over k of a[i * A_STRIDE + k] * b[k][COLS]; of the columns the
 * first `vectors` vectors. */
UPI_INLINE void upi_gemm_tile_sum(int rows, int vectors, int depth, const float *__restrict a,
                                  const float *__restrict b, float *__restrict c, int64_t c_stride,
                                  int accumulate, upi_gemm_ahead *__restrict ahead)
{
    upi_fw sum[UPI_GEMM_ROWS][UPI_GEMM_VECTORS];
    upi_gemm_ahead f = *ahead;
    int i, v, k = 0;
    UPI_CPU_UNROLL
    for (i = 0; i < rows; ++i) {
        UPI_CPU_UNROLL
        for (v = 0; v < vectors; ++v) sum[i][v] = upi_fw_zero();
    }
    for (; k + UPI_GEMM_AHEAD <= depth; k += UPI_GEMM_AHEAD) {
        __builtin_prefetch((const void *)f.at, 0, 2);
        f.at += UPI_GEMM_LINE;
        if (--f.left == 0) {
            f.at += (uintptr_t)f.jump;
            f.left = f.lines;
            --f.rows;
        }
        UPI_CPU_UNROLL
        for (i = 0; i < UPI_GEMM_AHEAD; ++i, b += UPI_GEMM_COLS)
            upi_gemm_tile_step(rows, vectors, a + k + i, b, sum);
    }
    for (; k < depth; ++k, b += UPI_GEMM_COLS) upi_gemm_tile_step(rows, vectors, a + k, b, sum);
    *ahead = f;
    UPI_CPU_UNROLL
    for (i = 0; i < rows; ++i) {
        UPI_CPU_UNROLL
        for (v = 0; v < vectors; ++v) {
            float *at = c + i * c_stride + v * UPI_WIDE;
            upi_fw_store(at, accumulate ? upi_fw_add(upi_fw_load(at), sum[i][v]) : sum[i][v]);
        }
    }
}

/* The same for a packed depth of several sums. */
UPI_INLINE void upi_gemm_tile(int rows, int vectors, int depth, int sum_depth, const float *a, const float *b,
                              float *c, int64_t c_stride, int accumulate, upi_gemm_ahead *ahead)
{
    int k;
    for (k = 0; k < depth; k += sum_depth)
        upi_gemm_tile_sum(rows, vectors, depth - k < sum_depth ? depth - k : sum_depth, a + k,
                          b + (int64_t)k * UPI_GEMM_COLS, c, c_stride, accumulate || k > 0, ahead);
}

UPI_CPU_KERNEL void upi_gemm_tile_3(int depth, int sum_depth, const float *a, const float *b, float *c,
                                    int64_t c_stride, int accumulate, upi_gemm_ahead *ahead)
{
    upi_gemm_tile(UPI_GEMM_ROWS, UPI_GEMM_VECTORS, depth, sum_depth, a, b, c, c_stride, accumulate, ahead);
}

UPI_CPU_KERNEL void upi_gemm_tile_2(int depth, int sum_depth, const float *a, const float *b, float *c,
                                    int64_t c_stride, int accumulate, upi_gemm_ahead *ahead)
{
    upi_gemm_tile(UPI_GEMM_ROWS, 2, depth, sum_depth, a, b, c, c_stride, accumulate, ahead);
}

UPI_CPU_KERNEL void upi_gemm_tile_1(int depth, int sum_depth, const float *a, const float *b, float *c,
                                    int64_t c_stride, int accumulate, upi_gemm_ahead *ahead)
{
    upi_gemm_tile(UPI_GEMM_ROWS, 1, depth, sum_depth, a, b, c, c_stride, accumulate, ahead);
}

UPI_CPU_KERNEL void upi_gemm_tile_short(int depth, int sum_depth, const float *a, const float *b, float *c,
                                        int64_t c_stride, int accumulate, upi_gemm_ahead *ahead)
{
    upi_gemm_tile(UPI_GEMM_SHORT, UPI_GEMM_VECTORS, depth, sum_depth, a, b, c, c_stride, accumulate, ahead);
}

/* A tile of which rows x cols count. A matrix's last columns take a narrow kernel, its last rows a short one;
 * *kernel_rows x *kernel_cols is what the one for this tile writes. */
UPI_INLINE void upi_gemm_kernel(int rows, int cols, int *kernel_rows, int *kernel_cols)
{
    const int is_short = rows <= UPI_GEMM_SHORT;
    *kernel_rows = is_short ? UPI_GEMM_SHORT : UPI_GEMM_ROWS;
    *kernel_cols = is_short ? UPI_GEMM_COLS : (cols + UPI_WIDE - 1) / UPI_WIDE * UPI_WIDE;
}

UPI_INLINE void upi_gemm_tile_any(int rows, int cols, int depth, int sum_depth, const float *a,
                                  const float *b, float *c, int64_t c_stride, int accumulate,
                                  upi_gemm_ahead *ahead)
{
    if (rows <= UPI_GEMM_SHORT)
        upi_gemm_tile_short(depth, sum_depth, a, b, c, c_stride, accumulate, ahead);
    else if (cols <= UPI_WIDE)
        upi_gemm_tile_1(depth, sum_depth, a, b, c, c_stride, accumulate, ahead);
    else if (UPI_GEMM_VECTORS == 2 || cols <= 2 * UPI_WIDE)
        upi_gemm_tile_2(depth, sum_depth, a, b, c, c_stride, accumulate, ahead);
    else
        upi_gemm_tile_3(depth, sum_depth, a, b, c, c_stride, accumulate, ahead);
}

/* Address of c at a row panel and a column panel, with the part of the tile that lies in the matrix. */
UPI_INLINE void *upi_gemm_out(const upi_gemm_block *t, int64_t row_panel, int64_t col_panel, int *rows,
                              int *cols)
{
    const upipe_view *out = &t->g->out;
    int64_t head = row_panel / t->a.panels + col_panel / t->b.panels; /* one of them is 0 */
    int64_t row = row_panel % t->a.panels * UPI_GEMM_ROWS, col = col_panel % t->b.panels * UPI_GEMM_COLS;
    *rows = (int)upi_gemm_least(out->n - row, UPI_GEMM_ROWS);
    *cols = (int)upi_gemm_least(out->d - col, UPI_GEMM_COLS);
    return t->out +
           (head * out->h_stride + row * out->n_stride + col) * (int64_t)upipe_dtype_bytes(out->dtype);
}

/* A tile that overhangs an f32 c: its valid part is carried into a whole tile and back. */
UPI_CPU_KERNEL void upi_gemm_tile_edge(int rows, int cols, int depth, int sum_depth, const float *a,
                                       const float *b, float *c, int64_t c_stride, int accumulate,
                                       upi_gemm_ahead *ahead)
{
    float t[UPI_GEMM_TILE];
    int i;
    memset(t, 0, sizeof t);
    for (i = 0; accumulate && i < rows; ++i)
        memcpy(t + i * UPI_GEMM_COLS, c + i * c_stride, (size_t)cols * sizeof(float));
    upi_gemm_tile_any(rows, cols, depth, sum_depth, a, b, t, UPI_GEMM_COLS, accumulate, ahead);
    for (i = 0; i < rows; ++i) memcpy(c + i * c_stride, t + i * UPI_GEMM_COLS, (size_t)cols * sizeof(float));
}

/* Fetches the tile on the right; as addresses, since it need not exist. */
UPI_INLINE void upi_gemm_fetch_tile(const float *c, int64_t c_stride)
{
    uintptr_t row = (uintptr_t)(c + UPI_GEMM_COLS);
    int r;
    for (r = 0; r < UPI_GEMM_ROWS; ++r, row += (uintptr_t)c_stride * sizeof(float)) {
        __builtin_prefetch((const void *)row);
        __builtin_prefetch((const void *)(row + UPI_GEMM_COLS * sizeof(float) - 1));
    }
}

/* Row panels first .. last - 1, which are packed, times the packed columns of the block. */
UPI_INLINE void upi_gemm_strip(upi_gemm_block *t, int64_t first, int64_t last, int depth, int accumulate)
{
    const int64_t c_stride = t->g->out.n_stride, all = t->col1 - t->col0;
    const int sum_depth = t->g->sum_depth;
    int64_t i, j;
    int rows, cols, kernel_rows, kernel_cols;
    for (i = first; i < last; ++i) {
        const float *a = t->a_pack + (i - t->row0) * UPI_GEMM_A_PANEL, *b = t->b_pack;
        for (j = t->part0; j < t->part1; ++j, b += (int64_t)depth * UPI_GEMM_COLS) {
            float *c = (float *)upi_gemm_out(t, i, j, &rows, &cols);
            upi_gemm_ahead *ahead = t->ahead_a.rows > 0 ? &t->ahead_a : &t->ahead_b;
            upi_gemm_kernel(rows, cols, &kernel_rows, &kernel_cols);
            if (ahead->rows <= 0) upi_gemm_ahead_none(ahead, a);
            if (t->sums != NULL) {
                c = t->sums + ((i - t->row0) * all + j - t->col0) * UPI_GEMM_TILE;
                upi_gemm_tile_any(rows, cols, depth, sum_depth, a, b, c, UPI_GEMM_COLS, accumulate, ahead);
            } else if (rows == kernel_rows && cols == kernel_cols) {
                if (accumulate && j + 1 < t->part1) upi_gemm_fetch_tile(c, c_stride);
                upi_gemm_tile_any(rows, cols, depth, sum_depth, a, b, c, c_stride, accumulate, ahead);
            } else {
                upi_gemm_tile_edge(rows, cols, depth, sum_depth, a, b, c, c_stride, accumulate, ahead);
            }
        }
    }
}

/* Rounds the finished sums of a block into a c of bf16. */
UPI_CPU_KERNEL void upi_gemm_round(const upi_gemm_block *t)
{
    const int64_t all = t->col1 - t->col0, stride = t->g->out.n_stride;
    int64_t i, j, at;
    int rows, cols, r, k;
    for (i = t->row0; i < t->row1; ++i)
        for (j = 0; j < all; ++j) {
            const float *sum = t->sums + ((i - t->row0) * all + j) * UPI_GEMM_TILE;
            void *c = upi_gemm_out(t, i, t->col0 + j, &rows, &cols);
            for (r = 0, at = 0; r < rows; ++r, sum += UPI_GEMM_COLS, at += stride) {
                for (k = 0; k + UPI_LANES <= cols; k += UPI_LANES)
                    upi_f8_put(c, UPIPE_BF16, at + k, upi_f8_load(sum + k));
                for (; k < cols; ++k) upipe_cpu_put(c, UPIPE_BF16, at + k, sum[k]);
            }
        }
}

/* Strips of rows times the part of the columns that is packed. pack_a: as they are reached
 *   below  the part is the last one, and this much of the depth follows: the block's rows are packed again for it
 */
UPI_INLINE void upi_gemm_rows(upi_gemm_block *t, int64_t k, int depth, int64_t below, int pack_a,
                              int accumulate)
{
    int64_t row, end;
    for (row = t->row0; row < t->row1; row = end) {
        end = upi_gemm_least(t->row1, row + UPI_GEMM_A_PANELS);
        if (pack_a)
            upi_gemm_pack_a(&t->a, t->a_pack + (row - t->row0) * UPI_GEMM_A_PANEL, row, end, k, depth);
        t->ahead_a.rows = 0;
        if (pack_a && end < t->row1)
            upi_gemm_ahead_of(&t->ahead_a, &t->a, end, upi_gemm_least(t->row1, end + UPI_GEMM_A_PANELS), k,
                              depth);
        else if (end == t->row1 && below > 0)
            upi_gemm_ahead_of(&t->ahead_a, &t->a, t->row0,
                              upi_gemm_least(t->row1, t->row0 + UPI_GEMM_A_PANELS), k + depth, below);
        upi_gemm_strip(t, row, end, depth, accumulate);
    }
}

/* Adds one matrix's whole depth to a block of c. */
UPI_INLINE void upi_gemm_add(upi_gemm_block *t, int accumulate)
{
    const upi_gemm_job *g = t->g;
    int64_t k, below;
    int depth;
    for (k = 0; k < g->depth; k += depth) {
        depth = (int)upi_gemm_least(g->depth - k, g->pack_depth);
        below = upi_gemm_least(g->depth - k - depth, g->pack_depth);
        for (t->part0 = t->col0; t->part0 < t->col1; t->part0 = t->part1) {
            t->part1 = upi_gemm_least(t->col1, t->part0 + UPI_GEMM_B_PANELS);
            upi_gemm_pack_b(&t->b, t->b_pack, t->part0, t->part1, k, depth);
            t->ahead_b.rows = 0;
            if (t->part1 < t->col1)
                upi_gemm_ahead_of(&t->ahead_b, &t->b, t->part1,
                                  upi_gemm_least(t->col1, t->part1 + UPI_GEMM_B_PANELS), k, depth);
            else if (below > 0)
                upi_gemm_ahead_of(&t->ahead_b, &t->b, t->col0,
                                  upi_gemm_least(t->col1, t->col0 + UPI_GEMM_B_PANELS), k + depth, below);
            upi_gemm_rows(t, k, depth, t->part1 == t->col1 ? below : 0, t->part0 == t->col0,
                          accumulate || k > 0);
        }
    }
}

UPI_INLINE void upi_gemm_next_matrix(upi_gemm_side *s, int64_t heads)
{
    s->data = (const char *)s->data + heads * s->head_stride * (int64_t)upipe_dtype_bytes(s->dtype);
}

/* One block of c, over the whole depth of all matrices that are added up. */
UPIPE_API void upi_gemm_item(void *arg, int64_t item, int32_t worker)
{
    const upi_gemm_job *g = (const upi_gemm_job *)arg;
    const int64_t blocks = g->row_blocks * g->col_blocks, head = item / blocks, at = item % blocks;
    float *work = (float *)(void *)(g->work + (size_t)worker * g->worker_bytes);
    upi_gemm_block t;
    int64_t i;
    t.g = g;
    t.a = g->a;
    t.b = g->b;
    upi_gemm_next_matrix(&t.a, head);
    upi_gemm_next_matrix(&t.b, head);
    t.out = (char *)g->out.data + head * g->out.h_stride * (int64_t)upipe_dtype_bytes(g->out.dtype);
    t.row0 = at / g->col_blocks * g->block_rows;
    t.row1 = upi_gemm_least(g->a.all, t.row0 + g->block_rows);
    t.col0 = at % g->col_blocks * g->block_cols;
    t.col1 = upi_gemm_least(g->b.all, t.col0 + g->block_cols);
    t.a_pack = work;
    t.b_pack = work + g->b_at;
    t.sums = g->out.dtype == UPIPE_F32 ? NULL : work + g->sums_at;
    for (i = 0; i < g->added; ++i) {
        upi_gemm_add(&t, g->accumulate || i > 0);
        upi_gemm_next_matrix(&t.a, 1);
        upi_gemm_next_matrix(&t.b, 1);
    }
    if (t.sums != NULL) upi_gemm_round(&t);
}

UPI_KERNELS_END

/* ---- entries of the table ---- */

UPIPE_API size_t upi_cpu_gemm_bytes(const struct upipe_ops *ops, upipe_view out, upipe_view a, upipe_view b,
                                    int flags)
{
    upi_gemm_job g;
    if (out.n < 1 || out.h < 1 || out.d < 1) return 0;
    upi_gemm_plan(&g, ops, out, a, b, flags);
    return g.bytes;
}

UPIPE_API upipe_status upi_cpu_gemm(upipe_ctx *c, upipe_view out, upipe_view a, upipe_view b, int flags,
                                    void *work, size_t work_bytes)
{
    upi_gemm_job g;
    int64_t row;
    int head;
    UPIPE_TRY(upi_check_gemm(c, out, a, b, flags));
    upi_gemm_plan(&g, c->ops, out, a, b, flags);
    if (out.n == 0 || out.d == 0) return UPIPE_OK;
    if (g.depth == 0) { /* the empty sum */
        for (head = 0; head < out.h && !g.accumulate; ++head)
            for (row = 0; row < out.n; ++row)
                memset(upipe_view_at(out, row, head), 0, (size_t)out.d * upipe_dtype_bytes(out.dtype));
        return UPIPE_OK;
    }
    if (work == NULL || work_bytes < g.bytes || (uintptr_t)work % UPI_GEMM_ALIGN != 0)
        return upipe_fail(&c->err, UPIPE_ERR_ARG,
                          "gemm: %zu bytes of scratch at %p; %zu at a multiple of %d needed",
                          work == NULL ? (size_t)0 : work_bytes, work, g.bytes, UPI_GEMM_ALIGN);
    g.work = (char *)work;
    upi_par_each(c->ops, g.products * g.row_blocks * g.col_blocks, upi_gemm_item, &g);
    return UPIPE_OK;
}

#endif

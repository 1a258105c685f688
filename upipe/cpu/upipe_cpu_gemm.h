/* upipe_cpu_gemm.h -- matrix product on one CPU core        backend cpu, includes cpu_simd, check
 *
 * Fills two entries of the table (upi_cpu_gemm, upi_cpu_gemm_bytes). Any mix of f32 and bf16, any steps. The
 * scheme is BLAS's usual one: pieces of a and b are packed as f32, a register tile of 6 x 16 sums runs over
 * both.
 *
 *     for each block of rows of c, block of 256 columns, block of 320 of the depth:
 *         pack b                                           [16 panels][depth][16]
 *         for each strip of 48 rows:
 *             pack a                                       [8 panels][6][depth + 16]
 *             for each panel of b, for each panel of a:    tile of c (+)= a * b
 *
 * A batch that shares a is one product with more columns (all heads of a projection), one that shares b has
 * more rows (all heads of a weight gradient): the shared side is packed once. Panels do not cross matrices.
 *
 * The promise: an element of c is one chain of fused multiply-adds over the depth, ascending, from 0 or from
 * the old c. So no sum is ever split: a tile starts from the sums of the depth before it, in c itself or, for
 * a bf16 c, in an f32 copy of the block that is rounded once at the end; and tiles that overhang the matrix
 * run through the same kernels on padded data. Without FMA hardware the chain rounds each product too; all
 * else holds.
 */
#ifndef UPIPE_CPU_GEMM_H
#define UPIPE_CPU_GEMM_H

#include "upipe_cpu_simd.h"
#include "../upipe_check.h"

/* clang-format off */
enum {
    UPI_GEMM_ROWS       = 6,   /* register tile: 12 sums, 2 of b, 1 of a: 15 of 16 registers */
    UPI_GEMM_COLS       = 16,
    UPI_GEMM_TILE       = UPI_GEMM_ROWS * UPI_GEMM_COLS,
    UPI_GEMM_DEPTH      = 320, /* a panel of b and one of a, 28 KiB, share a first-level cache */
    UPI_GEMM_A_STEP     = UPI_GEMM_DEPTH + 16,
    UPI_GEMM_A_PANEL    = UPI_GEMM_ROWS * UPI_GEMM_A_STEP,
    UPI_GEMM_A_PANELS   = 8,   /* 63 KiB */
    UPI_GEMM_B_PANELS   = 16,  /* 320 KiB */
    UPI_GEMM_BLOCK_F32  = 96,  /* row panels that one packed block of b serves where the sums lie in c */
    UPI_GEMM_BLOCK_BF16 = 40,  /* where they lie in scratch: 240 KiB */
    UPI_GEMM_ALIGN      = 64,  /* of scratch, bytes */
};
/* clang-format on */

/* One operand, a (lanes are rows of c) or b (lanes are columns of c). Element (head, lane, k) lies at
 * data + head * head_step + lane * lane_step + k * depth_step; one of the last two steps is 1. */
typedef struct upi_gemm_side {
    const void *data;
    int64_t lanes, lane_step, depth_step, head_step;
    int64_t panels; /* of one head; panel p of all belongs to head p / panels */
    int64_t all;    /* of the heads that this side counts through */
    int width;      /* lanes of a panel */
    upipe_dtype dtype;
} upi_gemm_side;

typedef struct upi_gemm_job {
    upi_gemm_side a, b;
    upipe_view out;
    int64_t depth;
    int64_t block_rows, block_cols; /* panels of a block of c */
    int64_t products;               /* separate products: the heads, where neither side is shared */
    float *a_pack, *b_pack;
    float *sums; /* [block_rows][block_cols][6][16], the block of a bf16 c; NULL for f32 */
    size_t bytes;
    int accumulate;
} upi_gemm_job;

UPI_INLINE int64_t upi_gemm_least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

UPI_INLINE void upi_gemm_side_init(upi_gemm_side *s, upipe_view v, int64_t lanes, int width, int lanes_outer,
                                   int64_t heads)
{
    s->data = v.data;
    s->lanes = lanes;
    s->lane_step = lanes_outer ? v.n_step : 1;
    s->depth_step = lanes_outer ? 1 : v.n_step;
    s->head_step = v.h > 1 ? v.h_step : 0;
    s->panels = (lanes + width - 1) / width;
    s->all = s->panels * heads;
    s->width = width;
    s->dtype = v.dtype;
}

/* Plans the product and lays the scratch out from work, which may be NULL. Bytes never shrink as rows,
 * columns or the depth grow, so that the scratch of a largest product serves all smaller ones of its kind. */
UPI_INLINE void upi_gemm_plan(upi_gemm_job *g, upipe_view out, upipe_view a, upipe_view b, int flags,
                              void *work)
{
    int trans_a = (flags & UPIPE_GEMM_TRANS_A) != 0, trans_b = (flags & UPIPE_GEMM_TRANS_B) != 0;
    int64_t row_heads = a.h > 1 && b.h == 1 ? out.h : 1, col_heads = a.h == 1 ? out.h : 1;
    size_t a_floats, b_floats, sums_floats;
    upi_gemm_side_init(&g->a, a, out.n, UPI_GEMM_ROWS, !trans_a, row_heads);
    upi_gemm_side_init(&g->b, b, out.d, UPI_GEMM_COLS, trans_b, col_heads);
    g->out = out;
    g->depth = trans_a ? a.n : a.d;
    g->products = out.h / (row_heads * col_heads);
    g->accumulate = (flags & UPIPE_GEMM_ACCUMULATE) != 0;
    g->block_cols = upi_gemm_least(g->b.all, UPI_GEMM_B_PANELS);
    g->block_rows =
        upi_gemm_least(g->a.all, out.dtype == UPIPE_F32 ? UPI_GEMM_BLOCK_F32 : UPI_GEMM_BLOCK_BF16);
    a_floats = (size_t)(upi_gemm_least(g->a.all, UPI_GEMM_A_PANELS) * UPI_GEMM_A_PANEL);
    b_floats = (size_t)(g->block_cols * UPI_GEMM_COLS * upi_gemm_least(g->depth, UPI_GEMM_DEPTH));
    sums_floats = out.dtype == UPIPE_F32 ? 0 : (size_t)(g->block_rows * g->block_cols * UPI_GEMM_TILE);
    /* Blocks of equal size: a last one of a few rows would pack all of b for itself. */
    if (g->block_rows > 0) {
        int64_t blocks = (g->a.all + g->block_rows - 1) / g->block_rows;
        g->block_rows = (g->a.all + blocks - 1) / blocks;
    }
    g->bytes = (a_floats + b_floats + sums_floats) * sizeof(float);
    g->a_pack = (float *)work;
    g->b_pack = work != NULL ? g->a_pack + a_floats : NULL;
    g->sums = work != NULL && sums_floats > 0 ? g->b_pack + b_floats : NULL;
}

/* ---- packing ---- */

/* Fetches `count` elements that packing reaches some rows later: rows lie pages apart, where no hardware
 * prefetcher follows. */
UPI_INLINE void upi_gemm_fetch(const void *base, upipe_dtype dtype, int64_t at, int64_t count)
{
    const char *p = (const char *)base + at * (int64_t)upipe_dtype_bytes(dtype);
    int64_t bytes = count * (int64_t)upipe_dtype_bytes(dtype), i;
    for (i = 0; i < bytes; i += 64) __builtin_prefetch(p + i);
}

/* First element of a panel; *count becomes its lanes inside the matrix. */
UPI_INLINE const void *upi_gemm_panel(const upi_gemm_side *s, int64_t panel, int64_t k, int *count)
{
    int64_t head = panel / s->panels, lane = panel % s->panels * s->width;
    int64_t at = head * s->head_step + lane * s->lane_step + k * s->depth_step;
    *count = (int)upi_gemm_least(s->lanes - lane, s->width);
    return (const char *)s->data + at * (int64_t)upipe_dtype_bytes(s->dtype);
}

/* Rows of a as they lie, A_STEP apart. The kernel broadcasts from six of them: no transpose. */
UPI_INLINE void upi_gemm_pack_rows(const upi_gemm_side *s, float *to, int64_t first, int64_t last, int64_t k0,
                                   int depth, upipe_dtype dtype)
{
    int64_t p;
    int i, k, count;
    for (p = first; p < last; ++p) {
        const void *from = upi_gemm_panel(s, p, k0, &count);
        for (i = 0; i < UPI_GEMM_ROWS; ++i, to += UPI_GEMM_A_STEP) {
            if (i >= count) {
                memset(to, 0, (size_t)depth * sizeof(float));
                continue;
            }
            if (i + 2 < count) upi_gemm_fetch(from, dtype, (i + 2) * s->lane_step, depth);
            for (k = 0; k + UPI_LANES <= depth; k += UPI_LANES)
                upi_f8_store(to + k, upi_f8_get(from, dtype, i * s->lane_step + k));
            for (; k < depth; ++k) to[k] = upi_f1_get(from, dtype, i * s->lane_step + k);
        }
    }
}

/* Rows of b, whose depth is contiguous, to [depth][16]. */
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
                    r[i] = half + i < count ? upi_f8_get(from, dtype, (half + i) * s->lane_step + k)
                                            : upi_f8_zero();
                upi_f8_transpose(r);
                UPI_CPU_UNROLL
                for (i = 0; i < UPI_LANES; ++i) upi_f8_store(t + (k + i) * UPI_GEMM_COLS, r[i]);
            }
            for (; k < depth; ++k)
                for (i = 0; i < UPI_LANES; ++i)
                    t[k * UPI_GEMM_COLS + i] =
                        half + i < count ? upi_f1_get(from, dtype, (half + i) * s->lane_step + k) : 0;
        }
    }
}

/* a stored [depth][rows], turned into rows A_STEP apart: eight of the depth and eight rows at a time, of
 * which the panel keeps six. */
UPI_INLINE void upi_gemm_pack_rows_turned(const upi_gemm_side *s, float *to, int64_t first, int64_t last,
                                          int64_t k0, int depth, upipe_dtype dtype)
{
    while (first < last) {
        int64_t next = upi_gemm_least(last, (first / s->panels + 1) * s->panels); /* same head up to here */
        int64_t lanes = s->lanes - first % s->panels * UPI_GEMM_ROWS, p;
        int64_t here = upi_gemm_least(lanes, (next - first) * UPI_GEMM_ROWS);
        int count, i, j, k;
        const void *from = upi_gemm_panel(s, first, k0, &count);
        for (k = 0; k < depth; k += UPI_LANES) {
            for (i = k + UPI_LANES; i < depth && i < k + 2 * UPI_LANES; ++i)
                upi_gemm_fetch(from, dtype, i * s->depth_step, here);
            for (p = 0; p < next - first; ++p) {
                float *t = to + p * UPI_GEMM_A_PANEL + k;
                int64_t lane = p * UPI_GEMM_ROWS;
                upi_f8 r[UPI_LANES];
                if (k + UPI_LANES <= depth && lane + UPI_LANES <= lanes) {
                    UPI_CPU_UNROLL
                    for (i = 0; i < UPI_LANES; ++i)
                        r[i] = upi_f8_get(from, dtype, (k + i) * s->depth_step + lane);
                    upi_f8_transpose(r);
                    UPI_CPU_UNROLL
                    for (i = 0; i < UPI_GEMM_ROWS; ++i) upi_f8_store(t + i * UPI_GEMM_A_STEP, r[i]);
                } else {
                    for (i = 0; i < UPI_GEMM_ROWS; ++i)
                        for (j = 0; j < UPI_LANES && k + j < depth; ++j)
                            t[i * UPI_GEMM_A_STEP + j] =
                                lane + i < lanes ? upi_f1_get(from, dtype, (k + j) * s->depth_step + lane + i)
                                                 : 0;
                }
            }
        }
        to += (next - first) * UPI_GEMM_A_PANEL;
        first = next;
    }
}

/* b stored [depth][columns], to [depth][16]. The depth is the outer loop, so that memory is read in order. */
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
            if (k + 4 < depth) upi_gemm_fetch(from, dtype, (k + 4) * s->depth_step, here);
            for (p = 0; p < next - first; ++p) {
                float *t = to + (p * depth + k) * UPI_GEMM_COLS;
                int64_t at = k * s->depth_step + p * UPI_GEMM_COLS;
                if ((p + 1) * UPI_GEMM_COLS <= lanes) {
                    upi_f8_store(t, upi_f8_get(from, dtype, at));
                    upi_f8_store(t + UPI_LANES, upi_f8_get(from, dtype, at + UPI_LANES));
                } else {
                    for (i = 0; i < UPI_GEMM_COLS; ++i)
                        t[i] = p * UPI_GEMM_COLS + i < lanes ? upi_f1_get(from, dtype, at + i) : 0;
                }
            }
        }
        to += (next - first) * depth * UPI_GEMM_COLS;
        first = next;
    }
}

UPI_CPU_KERNEL void upi_gemm_pack_a(const upi_gemm_job *g, int64_t first, int64_t last, int64_t k0, int depth)
{
    const upi_gemm_side *s = &g->a;
    if (s->depth_step == 1 && s->dtype == UPIPE_F32)
        upi_gemm_pack_rows(s, g->a_pack, first, last, k0, depth, UPIPE_F32);
    else if (s->depth_step == 1)
        upi_gemm_pack_rows(s, g->a_pack, first, last, k0, depth, UPIPE_BF16);
    else if (s->dtype == UPIPE_F32)
        upi_gemm_pack_rows_turned(s, g->a_pack, first, last, k0, depth, UPIPE_F32);
    else
        upi_gemm_pack_rows_turned(s, g->a_pack, first, last, k0, depth, UPIPE_BF16);
}

UPI_CPU_KERNEL void upi_gemm_pack_b(const upi_gemm_job *g, int64_t first, int64_t last, int64_t k0, int depth)
{
    const upi_gemm_side *s = &g->b;
    if (s->depth_step == 1 && s->dtype == UPIPE_F32)
        upi_gemm_pack_columns_turned(s, g->b_pack, first, last, k0, depth, UPIPE_F32);
    else if (s->depth_step == 1)
        upi_gemm_pack_columns_turned(s, g->b_pack, first, last, k0, depth, UPIPE_BF16);
    else if (s->dtype == UPIPE_F32)
        upi_gemm_pack_columns(s, g->b_pack, first, last, k0, depth, UPIPE_F32);
    else
        upi_gemm_pack_columns(s, g->b_pack, first, last, k0, depth, UPIPE_BF16);
}

/* ---- kernel ---- */

/* c[rows][16], rows c_step apart, (+)= sum over k of a[i * A_STEP + k] * b[k][16]. */
UPI_INLINE void upi_gemm_tile(int rows, int depth, const float *__restrict a, const float *__restrict b,
                              float *__restrict c, int64_t c_step, int accumulate)
{
    upi_f8 sum[UPI_GEMM_ROWS][2];
    int i, k;
    UPI_CPU_UNROLL
    for (i = 0; i < rows; ++i) {
        sum[i][0] = accumulate ? upi_f8_load(c + i * c_step) : upi_f8_zero();
        sum[i][1] = accumulate ? upi_f8_load(c + i * c_step + UPI_LANES) : upi_f8_zero();
    }
    for (k = 0; k < depth; ++k, b += UPI_GEMM_COLS) {
        upi_f8 b0 = upi_f8_load(b), b1 = upi_f8_load(b + UPI_LANES);
        UPI_OPAQUE(b0);
        UPI_OPAQUE(b1);
        UPI_CPU_UNROLL
        for (i = 0; i < rows; ++i) {
            upi_f8 x = upi_f8_broadcast(a + i * UPI_GEMM_A_STEP + k);
            sum[i][0] = upi_f8_fma(x, b0, sum[i][0]);
            sum[i][1] = upi_f8_fma(x, b1, sum[i][1]);
        }
    }
    UPI_CPU_UNROLL
    for (i = 0; i < rows; ++i) {
        upi_f8_store(c + i * c_step, sum[i][0]);
        upi_f8_store(c + i * c_step + UPI_LANES, sum[i][1]);
    }
}

UPI_CPU_KERNEL void upi_gemm_tile_6(int depth, const float *a, const float *b, float *c, int64_t c_step,
                                    int accumulate)
{
    upi_gemm_tile(6, depth, a, b, c, c_step, accumulate);
}

UPI_CPU_KERNEL void upi_gemm_tile_4(int depth, const float *a, const float *b, float *c, int64_t c_step,
                                    int accumulate)
{
    upi_gemm_tile(4, depth, a, b, c, c_step, accumulate);
}

/* A tile of which `rows` rows count. A matrix's last rows, four or fewer, take the short kernel. */
UPI_INLINE void upi_gemm_tile_any(int rows, int depth, const float *a, const float *b, float *c,
                                  int64_t c_step, int accumulate)
{
    if (rows > 4)
        upi_gemm_tile_6(depth, a, b, c, c_step, accumulate);
    else
        upi_gemm_tile_4(depth, a, b, c, c_step, accumulate);
}

/* Address of c at a row panel and a column panel, with the part of the tile that lies in the matrix. */
UPI_INLINE void *upi_gemm_out(const upi_gemm_job *g, int64_t row_panel, int64_t col_panel, int *rows,
                              int *cols)
{
    int64_t head = row_panel / g->a.panels + col_panel / g->b.panels; /* one of them is 0 */
    int64_t row = row_panel % g->a.panels * UPI_GEMM_ROWS, col = col_panel % g->b.panels * UPI_GEMM_COLS;
    *rows = (int)upi_gemm_least(g->out.n - row, UPI_GEMM_ROWS);
    *cols = (int)upi_gemm_least(g->out.d - col, UPI_GEMM_COLS);
    return (char *)g->out.data +
           (head * g->out.h_step + row * g->out.n_step + col) * (int64_t)upipe_dtype_bytes(g->out.dtype);
}

/* A tile that overhangs an f32 c: its valid part is carried into a whole tile and back. */
UPI_CPU_KERNEL void upi_gemm_tile_edge(const upi_gemm_job *g, int rows, int cols, int depth, const float *a,
                                       const float *b, float *c, int accumulate)
{
    float t[UPI_GEMM_TILE];
    int i;
    memset(t, 0, sizeof t);
    for (i = 0; accumulate && i < rows; ++i)
        memcpy(t + i * UPI_GEMM_COLS, c + i * g->out.n_step, (size_t)cols * sizeof(float));
    upi_gemm_tile_any(rows, depth, a, b, t, UPI_GEMM_COLS, accumulate);
    for (i = 0; i < rows; ++i)
        memcpy(c + i * g->out.n_step, t + i * UPI_GEMM_COLS, (size_t)cols * sizeof(float));
}

/* Fetches the tile below this one; as addresses, since it need not exist. */
UPI_INLINE void upi_gemm_fetch_tile(const float *c, int64_t c_step)
{
    int r;
    for (r = UPI_GEMM_ROWS; r < 2 * UPI_GEMM_ROWS; ++r) {
        uintptr_t row = (uintptr_t)c + (uintptr_t)(r * c_step) * sizeof(float);
        __builtin_prefetch((const void *)row);
        __builtin_prefetch((const void *)(row + UPI_GEMM_COLS * sizeof(float) - 1));
    }
}

/* Row panels row0..row1 of the packed strip times column panels col0..col1 of the packed block. `block` is
 * the first row panel of the block. */
UPI_INLINE void upi_gemm_strip(const upi_gemm_job *g, int64_t block, int64_t row0, int64_t row1, int64_t col0,
                               int64_t col1, int depth, int accumulate)
{
    int64_t i, j;
    int rows, cols;
    for (j = col0; j < col1; ++j) {
        const float *b = g->b_pack + (j - col0) * depth * UPI_GEMM_COLS;
        for (i = row0; i < row1; ++i) {
            const float *a = g->a_pack + (i - row0) * UPI_GEMM_A_PANEL;
            float *c = (float *)upi_gemm_out(g, i, j, &rows, &cols);
            if (g->sums != NULL) {
                c = g->sums + ((i - block) * g->block_cols + (j - col0)) * UPI_GEMM_TILE;
                upi_gemm_tile_any(rows, depth, a, b, c, UPI_GEMM_COLS, accumulate);
            } else if (cols == UPI_GEMM_COLS && (rows == UPI_GEMM_ROWS || rows == 4)) {
                if (accumulate && i + 1 < row1) upi_gemm_fetch_tile(c, g->out.n_step);
                upi_gemm_tile_any(rows, depth, a, b, c, g->out.n_step, accumulate);
            } else {
                upi_gemm_tile_edge(g, rows, cols, depth, a, b, c, accumulate);
            }
        }
    }
}

/* Rounds the finished sums of a block into a bf16 c. */
UPI_CPU_KERNEL void upi_gemm_round(const upi_gemm_job *g, int64_t row0, int64_t row1, int64_t col0,
                                   int64_t col1)
{
    int64_t i, j;
    int rows, cols, r, k;
    for (i = row0; i < row1; ++i)
        for (j = col0; j < col1; ++j) {
            const float *t = g->sums + ((i - row0) * g->block_cols + (j - col0)) * UPI_GEMM_TILE;
            uint16_t *c = (uint16_t *)upi_gemm_out(g, i, j, &rows, &cols);
            for (r = 0; r < rows; ++r, t += UPI_GEMM_COLS, c += g->out.n_step) {
                for (k = 0; k + UPI_LANES <= cols; k += UPI_LANES)
                    upi_f8_store_bf16(c + k, upi_f8_load(t + k));
                for (; k < cols; ++k) c[k] = upi_f32_to_bf16(t[k]);
            }
        }
}

/* One product, or a batch that shares a side. */
UPI_INLINE void upi_gemm_product(const upi_gemm_job *g)
{
    int64_t block, col, row, k;
    for (block = 0; block < g->a.all; block += g->block_rows) {
        int64_t block_end = upi_gemm_least(g->a.all, block + g->block_rows);
        for (col = 0; col < g->b.all; col += g->block_cols) {
            int64_t col_end = upi_gemm_least(g->b.all, col + g->block_cols);
            for (k = 0; k < g->depth; k += UPI_GEMM_DEPTH) {
                int depth = (int)upi_gemm_least(g->depth - k, UPI_GEMM_DEPTH);
                upi_gemm_pack_b(g, col, col_end, k, depth);
                for (row = block; row < block_end; row += UPI_GEMM_A_PANELS) {
                    int64_t row_end = upi_gemm_least(block_end, row + UPI_GEMM_A_PANELS);
                    upi_gemm_pack_a(g, row, row_end, k, depth);
                    upi_gemm_strip(g, block, row, row_end, col, col_end, depth, g->accumulate || k > 0);
                }
            }
            if (g->sums != NULL) upi_gemm_round(g, block, block_end, col, col_end);
        }
    }
}

/* ---- entries of the table ---- */

UPIPE_API size_t upi_cpu_gemm_bytes(const struct upipe_ops *ops, upipe_view out, upipe_view a, upipe_view b,
                                    int flags)
{
    upi_gemm_job g;
    (void)ops;
    if (out.n < 1 || out.h < 1 || out.d < 1) return 0;
    upi_gemm_plan(&g, out, a, b, flags, NULL);
    return g.bytes;
}

UPIPE_API upipe_status upi_cpu_gemm(upipe_ctx *c, upipe_view out, upipe_view a, upipe_view b, int flags,
                                    void *work, size_t work_bytes)
{
    upi_gemm_job g;
    int64_t i, row;
    int head;
    UPIPE_TRY(upi_gemm_check(c, out, a, b, flags));
    upi_gemm_plan(&g, out, a, b, flags, work);
    if (out.n == 0 || out.d == 0) return UPIPE_OK;
    if (g.depth == 0) { /* the empty sum */
        for (head = 0; head < out.h && !g.accumulate; ++head)
            for (row = 0; row < out.n; ++row)
                memset(upipe_view_at(out, row, head), 0, (size_t)out.d * upipe_dtype_bytes(out.dtype));
        return UPIPE_OK;
    }
    if (work == NULL || work_bytes < g.bytes || (uintptr_t)work % UPI_GEMM_ALIGN != 0)
        return upi_fail(&c->err, UPIPE_ERR_ARG,
                        "gemm: %zu bytes of scratch at %p; %zu at a multiple of %d needed",
                        work == NULL ? (size_t)0 : work_bytes, work, g.bytes, UPI_GEMM_ALIGN);
    for (i = 0; i < g.products; ++i) {
        upi_gemm_product(&g);
        g.a.data = (const char *)g.a.data + g.a.head_step * (int64_t)upipe_dtype_bytes(g.a.dtype);
        g.b.data = (const char *)g.b.data + g.b.head_step * (int64_t)upipe_dtype_bytes(g.b.dtype);
        g.out.data = (char *)g.out.data + g.out.h_step * (int64_t)upipe_dtype_bytes(g.out.dtype);
    }
    return UPIPE_OK;
}

#endif

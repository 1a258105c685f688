/* upipe_cpu_bf16.h -- products of bf16 by the processor's bf16 instructions
 *
 *     upipe_cpu_ops(&ops);
 *     if (upipe_cpu_bf16(&ops, &err) != UPIPE_OK) puts(err.text);     the table is as it was
 *
 * Where a and b are bf16, AMX (TDPBF16PS) or else AVX512-BF16 (VDPBF16PS) multiplies pairs of them and sums in
 * f32. The table's own product converts to f32 and has one chain of multiply-adds; other bits are the price:
 *
 *     VDPBF16PS   for each pair: sum += x1 * y1, then sum += x0 * y0
 *     TDPBF16PS   for each 16 pairs: one chain of the even elements and one of the odd, from 0; sum += even + odd
 *
 * every step rounded to nearest, subnormal numbers read and written as 0. The rest of the promise holds: the
 * depth is cut into sums that depend on the kind of product alone (512 of it, 64 rows where it runs down the
 * rows of a stored a, one matrix where matrices are added up), which are added to c in order; rows, columns,
 * heads and threads change no bit. Products with f32 go to the table's own entry.
 *
 * Packed a and b hold pairs, two bf16 of the depth in 32 bits: a [16 rows][pairs], b [pairs][16 columns], as both
 * instructions want them. A kernel computes 32 x 32 elements; a block of c lies in scratch as f32 meanwhile.
 */
#ifndef UPIPE_CPU_BF16_H
#define UPIPE_CPU_BF16_H

#include <float.h>

#include "upipe_cpu_gemm.h"

/* Both instructions as compilers of x86-64 have them; asked for at run time. */
#if defined(__x86_64__) && defined(__linux__) && !defined(__CUDACC__)
#define UPIPE_CPU_BF16_X86 1
#include <cpuid.h>
#include <immintrin.h>
#else
#define UPIPE_CPU_BF16_X86 0
#endif

/* clang-format off */
enum {
    UPI_BF16_PANEL     = 16,  /* lanes of a panel: rows of an AMX tile, or lanes of a vector */
    UPI_BF16_STEP      = 32,  /* of the depth: a tile's row. What is packed is padded to it with zeros */
    UPI_BF16_DEPTH     = 512, /* of one sum, and packed at once */
    UPI_BF16_PAIRS     = UPI_BF16_DEPTH / 2,
    UPI_BF16_TILE      = UPI_BF16_PANEL * UPI_BF16_PANEL,
    UPI_BF16_PACKED    = UPI_BF16_PANEL * UPI_BF16_PAIRS, /* of a panel */
    UPI_BF16_ROW_PANELS = 16, /* of a block: 256 KiB of packed a, */
    UPI_BF16_COL_PANELS = 32, /* 512 of b and 512 of sums, in a second-level cache of 2 MiB */
};
/* clang-format on */

/* 2 x 2 panels: sums [2][2][16][16], rows of panels `next` apart, (+)= the sums of a packed depth.
 *   depth, sum_depth  multiples of UPI_BF16_STEP, but for the depth's end, which is padded to one */
typedef void (*upi_bf16_tile)(int depth, int sum_depth, const uint32_t *a, const uint32_t *b, float *sums,
                              int64_t next, int accumulate);

/* sums [rows][16], sums_stride apart = a [rows][depth / 2] . b [depth / 2][16], rows of a and of b a_stride and
 * b_stride words apart: one sum from 0. For short depths, where 2 x 2 panels would share little.
 *   rows, depth  multiples of UPI_BF16_PANEL and of UPI_BF16_STEP */
typedef void (*upi_bf16_strip)(int rows, int depth, const uint32_t *a, int64_t a_stride, const uint32_t *b,
                               int64_t b_stride, float *sums, int64_t sums_stride);

/* An instruction's kernels, which are called between open and close by the same thread. */
typedef struct upi_bf16_unit {
    const char *name;
    void (*open)(void), (*close)(void);
    upi_bf16_tile tile;
    upi_bf16_strip strip;
} upi_bf16_unit;

typedef struct upi_bf16_job {
    upi_gemm_side a, b;
    upipe_view out;
    const upi_bf16_unit *unit;
    int64_t depth, added, products;
    int sum_depth, pack_depth;
    int64_t block_rows, block_cols, row_blocks, col_blocks; /* panels */
    int64_t b_at, sums_at;                                  /* in a worker's scratch, words of 32 bits */
    size_t worker_bytes, bytes;
    char *work;
    int accumulate;
} upi_bf16_job;

UPI_INLINE int64_t upi_bf16_up(int64_t n, int64_t unit)
{
    return (n + unit - 1) / unit * unit;
}

/* As upi_gemm_plan: bytes never shrink as rows or columns grow, and do not depend on the depth. */
UPI_INLINE void upi_bf16_plan(upi_bf16_job *g, const upipe_ops *ops, upipe_view out, upipe_view a,
                              upipe_view b, int flags)
{
    const int trans_a = (flags & UPIPE_GEMM_TRANS_A) != 0;
    const int64_t matrix = trans_a ? a.n : a.d;
    const int32_t workers = upi_par_workers(ops);
    int64_t items;
    memset(g, 0, sizeof *g);
    g->added = out.h == 1 ? a.h : 1;
    g->sum_depth = trans_a ? (int)UPIPE_SUM_ROWS : (int)UPI_BF16_DEPTH;
    if (g->added > 1 && matrix > 0 && matrix <= g->sum_depth && matrix % UPI_BF16_STEP == 0 &&
        upi_gemm_join(out, &a, &b, flags)) {
        g->sum_depth = (int)matrix;
        g->added = 1;
    }
    g->pack_depth = UPI_BF16_DEPTH / g->sum_depth * g->sum_depth;
    g->products = upi_gemm_sides(&g->a, &g->b, out, a, b, flags, UPI_BF16_PANEL, UPI_BF16_PANEL);
    g->out = out;
    g->depth = trans_a ? a.n : a.d;
    g->accumulate = (flags & UPIPE_GEMM_ACCUMULATE) != 0;
    if (g->a.all == 0 || g->b.all == 0 || g->depth == 0) return;
    g->block_rows = upi_gemm_least(upi_bf16_up(g->a.all, 2), UPI_BF16_ROW_PANELS);
    g->block_cols = upi_gemm_least(upi_bf16_up(g->b.all, 2), UPI_BF16_COL_PANELS);
    g->b_at = g->block_rows * UPI_BF16_PACKED;
    g->sums_at = g->b_at + g->block_cols * UPI_BF16_PACKED;
    g->worker_bytes = (size_t)(g->sums_at + g->block_rows * g->block_cols * UPI_BF16_TILE) * 4;
    g->bytes = g->worker_bytes * (size_t)workers;
    /* for the threads, the longer side is cut: the other one is packed again */
    g->row_blocks = (g->a.all + g->block_rows - 1) / g->block_rows;
    g->col_blocks = (g->b.all + g->block_cols - 1) / g->block_cols;
    items = workers > 1 ? (int64_t)workers * UPI_GEMM_ITEMS : 1;
    while (g->products * g->row_blocks * g->col_blocks < items && (g->block_rows > 2 || g->block_cols > 2)) {
        int64_t *side = g->block_rows >= g->block_cols ? &g->block_rows : &g->block_cols;
        *side = upi_bf16_up(*side / 2, 2);
        g->row_blocks = (g->a.all + g->block_rows - 1) / g->block_rows;
        g->col_blocks = (g->b.all + g->block_cols - 1) / g->block_cols;
    }
}

UPI_KERNELS_BEGIN

/* ---- packing ---- */

/* Two elements of the depth, the first one in the low half; 0 where the matrix has ended. */
UPI_INLINE uint32_t upi_bf16_pair(const uint16_t *from, int64_t lane_stride, int64_t depth_stride,
                                  int64_t lane, int64_t lanes, int64_t k, int64_t depth)
{
    uint32_t pair = 0;
    if (lane < lanes && k < depth) pair = from[lane * lane_stride + k * depth_stride];
    if (lane < lanes && k + 1 < depth)
        pair |= (uint32_t)from[lane * lane_stride + (k + 1) * depth_stride] << 16;
    return pair;
}

/* Eight lanes by eight pairs as they lie: rows of pairs where the depth is contiguous, else rows of lanes. */
UPI_INLINE void upi_bf16_block(uint32_t (*block)[UPI_LANES], const uint16_t *from, int64_t lane_stride,
                               int64_t depth_stride, int lane, int lanes, int k, int depth)
{
    const int by_lanes = depth_stride == 1;
    int i, j;
    if (lane + UPI_LANES > lanes || k + 2 * UPI_LANES > depth) {
        for (i = 0; i < UPI_LANES; ++i)
            for (j = 0; j < UPI_LANES; ++j)
                block[i][j] = upi_bf16_pair(from, lane_stride, depth_stride, lane + (by_lanes ? i : j), lanes,
                                            k + 2 * (by_lanes ? j : i), depth);
        return;
    }
    from += lane * lane_stride + k * depth_stride;
    for (i = 0; i < UPI_LANES; ++i) {
        if (by_lanes) {
            memcpy(block[i], from + i * lane_stride, sizeof block[i]);
            continue;
        }
        for (j = 0; j < UPI_LANES; ++j)
            block[i][j] = from[2 * i * depth_stride + j] | (uint32_t)from[(2 * i + 1) * depth_stride + j]
                                                               << 16;
    }
}

/* A matrix of lanes x depth, one of whose strides is 1, in pairs that lie pair_stride words apart, and lanes
 * lane_to apart; one of these is 1 too. Zeros up to `padded` lanes, a multiple of UPI_LANES, and to whole steps
 * of the depth. */
UPI_CPU_KERNEL void upi_bf16_pack(uint32_t *to, int64_t lane_to, int64_t pair_stride, const uint16_t *from,
                                  int64_t lane_stride, int64_t depth_stride, int lanes, int padded, int depth)
{
    const int turn = (depth_stride == 1) != (pair_stride == 1), end = (int)upi_bf16_up(depth, UPI_BF16_STEP);
    int lane, k, i;
    for (lane = 0; lane < padded; lane += UPI_LANES)
        for (k = 0; k < end; k += 2 * UPI_LANES) {
            uint32_t block[UPI_LANES][UPI_LANES], *at = to + lane * lane_to + k / 2 * pair_stride;
            upi_bf16_block(block, from, lane_stride, depth_stride, lane, lanes, k, depth);
            if (turn) { /* as f32, which no move changes */
                upi_f8 r[UPI_LANES];
                memcpy(r, block, sizeof block);
                upi_f8_transpose(r);
                memcpy(block, r, sizeof block);
            }
            for (i = 0; i < UPI_LANES; ++i)
                memcpy(at + i * (pair_stride == 1 ? lane_to : pair_stride), block[i], sizeof block[i]);
        }
}

/* Panel `panel` of a side from depth k on. */
UPI_INLINE void upi_bf16_pack_panel(const upi_gemm_side *s, uint32_t *to, int64_t lane_to,
                                    int64_t pair_stride, int64_t panel, int64_t k, int depth)
{
    int lanes;
    const uint16_t *from = (const uint16_t *)upi_gemm_panel(s, panel, k, &lanes);
    upi_bf16_pack(to, lane_to, pair_stride, from, s->lane_stride, s->depth_stride, lanes, UPI_BF16_PANEL,
                  depth);
}

/* ---- kernels ---- */

#if UPIPE_CPU_BF16_X86

typedef struct upi_bf16_config {
    uint8_t palette, start, zero[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} upi_bf16_config;

/* Eight tiles of 16 rows of 64 bytes. The instructions stand as text, for compilers without their names; all
 * say that they touch memory, so that packing has ended before. */
UPIPE_API void upi_bf16_open_amx(void)
{
    upi_bf16_config config;
    int i;
    memset(&config, 0, sizeof config);
    config.palette = 1;
    for (i = 0; i < 8; ++i) config.row_bytes[i] = 64, config.rows[i] = 16;
    __asm__ volatile("ldtilecfg %0" : : "m"(config) : "memory");
}

UPIPE_API void upi_bf16_close_amx(void)
{
    __asm__ volatile("tilerelease" : : : "memory");
}

#define UPI_BF16_LOAD(tile, from, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile : : "r"(from), "r"((int64_t)(stride)) : "memory")
#define UPI_BF16_STORE(tile, to, stride) \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" : : "r"(to), "r"((int64_t)(stride)) : "memory")
#define UPI_BF16_DOT(sum, a, b) \
    __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #sum : : : "memory")
#define UPI_BF16_ZERO(tile) __asm__ volatile("tilezero %%tmm" #tile : : : "memory")

UPI_CPU_KERNEL void upi_bf16_tile_amx(int depth, int sum_depth, const uint32_t *a, const uint32_t *b,
                                      float *sums, int64_t next, int accumulate)
{
    enum { A_STRIDE = 4 * UPI_BF16_PAIRS, LINE = 4 * UPI_BF16_PANEL };
    float part[4][UPI_BF16_TILE];
    int first, k, i, j;
    for (first = 0; first < depth; first += sum_depth) {
        const int last = first + sum_depth < depth ? first + sum_depth : depth;
        UPI_BF16_ZERO(0);
        UPI_BF16_ZERO(1);
        UPI_BF16_ZERO(2);
        UPI_BF16_ZERO(3);
        for (k = first; k < last; k += UPI_BF16_STEP) {
            UPI_BF16_LOAD(4, a + k / 2, A_STRIDE);
            UPI_BF16_LOAD(5, a + UPI_BF16_PACKED + k / 2, A_STRIDE);
            UPI_BF16_LOAD(6, b + (int64_t)(k / 2) * UPI_BF16_PANEL, LINE);
            UPI_BF16_LOAD(7, b + UPI_BF16_PACKED + (int64_t)(k / 2) * UPI_BF16_PANEL, LINE);
            UPI_BF16_DOT(0, 4, 6);
            UPI_BF16_DOT(1, 4, 7);
            UPI_BF16_DOT(2, 5, 6);
            UPI_BF16_DOT(3, 5, 7);
        }
        UPI_BF16_STORE(0, part[0], LINE);
        UPI_BF16_STORE(1, part[1], LINE);
        UPI_BF16_STORE(2, part[2], LINE);
        UPI_BF16_STORE(3, part[3], LINE);
        for (j = 0; j < 4; ++j) {
            float *to = sums + j / 2 * next + j % 2 * UPI_BF16_TILE;
            for (i = 0; i < UPI_BF16_TILE; ++i)
                to[i] = accumulate || first > 0 ? to[i] + part[j][i] : part[j][i];
        }
    }
}

/* 64 rows of a at a time, four tiles of sums, whose chains of additions hide each other's latency. */
UPI_CPU_KERNEL void upi_bf16_strip_amx(int rows, int depth, const uint32_t *a, int64_t a_stride,
                                       const uint32_t *b, int64_t b_stride, float *sums, int64_t sums_stride)
{
    enum { TALL = 4 * UPI_BF16_PANEL };
    const int64_t a_next = UPI_BF16_PANEL * a_stride, sums_next = UPI_BF16_PANEL * sums_stride;
    int p;
    for (; rows >= TALL; rows -= TALL, a += 4 * a_next, sums += 4 * sums_next) {
        UPI_BF16_ZERO(0);
        UPI_BF16_ZERO(1);
        UPI_BF16_ZERO(2);
        UPI_BF16_ZERO(3);
        for (p = 0; p < depth / 2; p += UPI_BF16_STEP / 2) {
            UPI_BF16_LOAD(7, b + p * b_stride, 4 * b_stride);
            UPI_BF16_LOAD(4, a + p, 4 * a_stride);
            UPI_BF16_DOT(0, 4, 7);
            UPI_BF16_LOAD(5, a + a_next + p, 4 * a_stride);
            UPI_BF16_DOT(1, 5, 7);
            UPI_BF16_LOAD(6, a + 2 * a_next + p, 4 * a_stride);
            UPI_BF16_DOT(2, 6, 7);
            UPI_BF16_LOAD(4, a + 3 * a_next + p, 4 * a_stride);
            UPI_BF16_DOT(3, 4, 7);
        }
        UPI_BF16_STORE(0, sums, 4 * sums_stride);
        UPI_BF16_STORE(1, sums + sums_next, 4 * sums_stride);
        UPI_BF16_STORE(2, sums + 2 * sums_next, 4 * sums_stride);
        UPI_BF16_STORE(3, sums + 3 * sums_next, 4 * sums_stride);
    }
    for (; rows > 0; rows -= UPI_BF16_PANEL, a += a_next, sums += sums_next) {
        UPI_BF16_ZERO(0);
        for (p = 0; p < depth / 2; p += UPI_BF16_STEP / 2) {
            UPI_BF16_LOAD(7, b + p * b_stride, 4 * b_stride);
            UPI_BF16_LOAD(4, a + p, 4 * a_stride);
            UPI_BF16_DOT(0, 4, 7);
        }
        UPI_BF16_STORE(0, sums, 4 * sums_stride);
    }
}

UPIPE_API void upi_bf16_nothing(void)
{
}

/* Eight rows of a panel by two vectors of columns. */
__attribute__((target("avx512f,avx512bf16"))) UPI_CPU_KERNEL void upi_bf16_tile_avx512(
    int depth, int sum_depth, const uint32_t *a, const uint32_t *b, float *sums, int64_t next, int accumulate)
{
    enum { ROWS = 8 };
    int row, first, p, i;
    for (row = 0; row < 2 * UPI_BF16_PANEL; row += ROWS) {
        const int panel = row / UPI_BF16_PANEL, at = row % UPI_BF16_PANEL;
        const uint32_t *x = a + (int64_t)panel * UPI_BF16_PACKED + (int64_t)at * UPI_BF16_PAIRS;
        float *to = sums + panel * next + at * UPI_BF16_PANEL;
        for (first = 0; first < depth; first += sum_depth) {
            const int last = first + sum_depth < depth ? first + sum_depth : depth;
            __m512 sum[ROWS][2];
            UPI_CPU_UNROLL
            for (i = 0; i < ROWS; ++i) sum[i][0] = sum[i][1] = _mm512_setzero_ps();
            for (p = first / 2; p < (last + 1) / 2; ++p) {
                const __m512bh y0 = (__m512bh)_mm512_loadu_si512(b + (int64_t)p * UPI_BF16_PANEL);
                const __m512bh y1 =
                    (__m512bh)_mm512_loadu_si512(b + UPI_BF16_PACKED + (int64_t)p * UPI_BF16_PANEL);
                UPI_CPU_UNROLL
                for (i = 0; i < ROWS; ++i) {
                    const __m512bh z = (__m512bh)_mm512_set1_epi32((int)x[(int64_t)i * UPI_BF16_PAIRS + p]);
                    sum[i][0] = _mm512_dpbf16_ps(sum[i][0], z, y0);
                    sum[i][1] = _mm512_dpbf16_ps(sum[i][1], z, y1);
                }
            }
            UPI_CPU_UNROLL
            for (i = 0; i < 2 * ROWS; ++i) {
                float *c = to + i % 2 * UPI_BF16_TILE + i / 2 * UPI_BF16_PANEL;
                const __m512 s = sum[i / 2][i % 2];
                _mm512_storeu_ps(c, accumulate || first > 0 ? _mm512_add_ps(_mm512_loadu_ps(c), s) : s);
            }
        }
    }
}

__attribute__((target("avx512f,avx512bf16"))) UPI_CPU_KERNEL void upi_bf16_strip_avx512(
    int rows, int depth, const uint32_t *a, int64_t a_stride, const uint32_t *b, int64_t b_stride,
    float *sums, int64_t sums_stride)
{
    enum { ROWS = UPI_BF16_PANEL };
    int p, i;
    for (; rows > 0; rows -= ROWS, a += ROWS * a_stride, sums += ROWS * sums_stride) {
        __m512 sum[ROWS];
        UPI_CPU_UNROLL
        for (i = 0; i < ROWS; ++i) sum[i] = _mm512_setzero_ps();
        for (p = 0; p < depth / 2; ++p) {
            const __m512bh y = (__m512bh)_mm512_loadu_si512(b + p * b_stride);
            UPI_CPU_UNROLL
            for (i = 0; i < ROWS; ++i)
                sum[i] = _mm512_dpbf16_ps(sum[i], (__m512bh)_mm512_set1_epi32((int)a[i * a_stride + p]), y);
        }
        UPI_CPU_UNROLL
        for (i = 0; i < ROWS; ++i) _mm512_storeu_ps(sums + i * sums_stride, sum[i]);
    }
}

static const upi_bf16_unit upi_bf16_amx = {"AMX", upi_bf16_open_amx, upi_bf16_close_amx, upi_bf16_tile_amx,
                                           upi_bf16_strip_amx};
static const upi_bf16_unit upi_bf16_avx512 = {"AVX512-BF16", upi_bf16_nothing, upi_bf16_nothing,
                                              upi_bf16_tile_avx512, upi_bf16_strip_avx512};

#endif

/* ---- blocks ---- */

/* Address of c at a row panel and a column panel, with the part of the tile that lies in the matrix. */
UPI_INLINE void *upi_bf16_out(const upi_bf16_job *g, const upi_gemm_side *a, const upi_gemm_side *b,
                              char *out, int64_t row, int64_t col, int *rows, int *cols)
{
    const upipe_view *v = &g->out;
    const int64_t head = row / a->panels + col / b->panels; /* one of them is 0 */
    const int64_t n = row % a->panels * UPI_BF16_PANEL, d = col % b->panels * UPI_BF16_PANEL;
    *rows = (int)upi_gemm_least(v->n - n, UPI_BF16_PANEL);
    *cols = (int)upi_gemm_least(v->d - d, UPI_BF16_PANEL);
    return out + (head * v->h_stride + n * v->n_stride + d) * (int64_t)upipe_dtype_bytes(v->dtype);
}

/* Carries a block's sums into c, or the old c, which is f32, into them. */
UPI_CPU_KERNEL void upi_bf16_carry(const upi_bf16_job *g, const upi_gemm_side *a, const upi_gemm_side *b,
                                   char *out, int64_t row0, int64_t row1, int64_t col0, int64_t col1,
                                   float *sums, int to_c)
{
    int64_t i, j;
    int rows, cols, r, k;
    for (i = row0; i < row1; ++i)
        for (j = col0; j < col1; ++j) {
            float *sum = sums + ((i - row0) * g->block_cols + j - col0) * UPI_BF16_TILE;
            char *c = (char *)upi_bf16_out(g, a, b, out, i, j, &rows, &cols);
            for (r = 0; r < rows; ++r, sum += UPI_BF16_PANEL) {
                const int64_t at = r * g->out.n_stride;
                if (!to_c)
                    memcpy(sum, (const float *)(const void *)c + at, (size_t)cols * 4);
                else
                    for (k = 0; k < cols; ++k) upipe_cpu_put(c, g->out.dtype, at + k, sum[k]);
            }
        }
}

/* One block of c over the whole depth of all matrices that are added up. */
UPIPE_API void upi_bf16_item(void *arg, int64_t item, int32_t worker)
{
    const upi_bf16_job *g = (const upi_bf16_job *)arg;
    const int64_t blocks = g->row_blocks * g->col_blocks, head = item / blocks, at = item % blocks;
    const int64_t row0 = at / g->col_blocks * g->block_rows, col0 = at % g->col_blocks * g->block_cols;
    const int64_t row1 = upi_gemm_least(g->a.all, row0 + g->block_rows);
    const int64_t col1 = upi_gemm_least(g->b.all, col0 + g->block_cols);
    uint32_t *a_pack = (uint32_t *)(void *)(g->work + (size_t)worker * g->worker_bytes),
             *b_pack = a_pack + g->b_at;
    float *sums = (float *)(void *)(a_pack + g->sums_at);
    char *out = (char *)g->out.data + head * g->out.h_stride * (int64_t)upipe_dtype_bytes(g->out.dtype);
    upi_gemm_side a = g->a, b = g->b;
    int64_t m, k, i, j;
    int depth;
    upi_gemm_next_matrix(&a, head);
    upi_gemm_next_matrix(&b, head);
    g->unit->open();
    if (g->accumulate) upi_bf16_carry(g, &a, &b, out, row0, row1, col0, col1, sums, 0);
    for (m = 0; m < g->added; ++m) {
        for (k = 0; k < g->depth; k += depth) {
            depth = (int)upi_gemm_least(g->depth - k, g->pack_depth);
            for (i = row0; i < row1; ++i)
                upi_bf16_pack_panel(&a, a_pack + (i - row0) * UPI_BF16_PACKED, UPI_BF16_PAIRS, 1, i, k,
                                    depth);
            for (j = col0; j < col1; ++j)
                upi_bf16_pack_panel(&b, b_pack + (j - col0) * UPI_BF16_PACKED, 1, UPI_BF16_PANEL, j, k,
                                    depth);
            /* a last panel may stand alone: what is computed beside it is never looked at */
            for (i = 0; i < row1 - row0; i += 2)
                for (j = 0; j < col1 - col0; j += 2)
                    g->unit->tile(depth, g->sum_depth, a_pack + i * UPI_BF16_PACKED,
                                  b_pack + j * UPI_BF16_PACKED,
                                  sums + (i * g->block_cols + j) * UPI_BF16_TILE,
                                  g->block_cols * UPI_BF16_TILE, g->accumulate || m > 0 || k > 0);
        }
        upi_gemm_next_matrix(&a, 1);
        upi_gemm_next_matrix(&b, 1);
    }
    g->unit->close();
    upi_bf16_carry(g, &a, &b, out, row0, row1, col0, col1, sums, 1);
}

UPI_KERNELS_END

/* ---- entries of the table ---- */

UPI_INLINE int upi_bf16_fits(upipe_view out, upipe_view a, upipe_view b, int flags)
{
    return a.dtype == UPIPE_BF16 && b.dtype == UPIPE_BF16 && out.n > 0 && out.d > 0 &&
           (flags & UPIPE_GEMM_TRANS_A ? a.n : a.d) > 0;
}

UPIPE_API size_t upi_bf16_gemm_bytes(const struct upipe_ops *ops, upipe_view out, upipe_view a, upipe_view b,
                                     int flags)
{
    upi_bf16_job g;
    if (out.h < 1 || !upi_bf16_fits(out, a, b, flags)) return upi_cpu_gemm_bytes(ops, out, a, b, flags);
    upi_bf16_plan(&g, ops, out, a, b, flags);
    return g.bytes;
}

UPI_INLINE upipe_status upi_bf16_gemm(upipe_ctx *c, upipe_view out, upipe_view a, upipe_view b, int flags,
                                      void *work, size_t work_bytes, const upi_bf16_unit *unit)
{
    upi_bf16_job g;
    UPIPE_TRY(upi_check_gemm(c, out, a, b, flags));
    if (!upi_bf16_fits(out, a, b, flags)) return upi_cpu_gemm(c, out, a, b, flags, work, work_bytes);
    upi_bf16_plan(&g, c->ops, out, a, b, flags);
    if (work == NULL || work_bytes < g.bytes || (uintptr_t)work % UPI_GEMM_ALIGN != 0)
        return upipe_fail(&c->err, UPIPE_ERR_ARG,
                          "gemm: %zu bytes of scratch at %p; %zu at a multiple of %d needed",
                          work == NULL ? (size_t)0 : work_bytes, work, g.bytes, UPI_GEMM_ALIGN);
    g.work = (char *)work;
    g.unit = unit;
    upi_par_each(c->ops, g.products * g.row_blocks * g.col_blocks, upi_bf16_item, &g);
    return UPIPE_OK;
}

#if UPIPE_CPU_BF16_X86

UPIPE_API upipe_status upi_bf16_gemm_amx(upipe_ctx *c, upipe_view out, upipe_view a, upipe_view b, int flags,
                                         void *work, size_t work_bytes)
{
    return upi_bf16_gemm(c, out, a, b, flags, work, work_bytes, &upi_bf16_amx);
}

UPIPE_API upipe_status upi_bf16_gemm_avx512(upipe_ctx *c, upipe_view out, upipe_view a, upipe_view b,
                                            int flags, void *work, size_t work_bytes)
{
    return upi_bf16_gemm(c, out, a, b, flags, work, work_bytes, &upi_bf16_avx512);
}

/* Whether the processor has AMX's bf16 products, and Linux lets this process use tiles, for which it must be
 * asked once: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA). */
UPI_INLINE int upi_bf16_has_amx(void)
{
    enum { AMX = 1 << 22 | 1 << 24, ARCH_PRCTL = 158, ASK = 0x1023, TILES = 18 };
    unsigned a = 0, b = 0, c = 0, d = 0;
    long answer;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & AMX) != AMX) return 0;
    __asm__ volatile("syscall"
                     : "=a"(answer)
                     : "0"((long)ARCH_PRCTL), "D"((long)ASK), "S"((long)TILES)
                     : "rcx", "r11", "memory");
    return answer == 0;
}

#endif

/* The kernels of the instruction that is used here; NULL where the processor has none. */
UPIPE_API const upi_bf16_unit *upi_bf16_here(void)
{
#if UPIPE_CPU_BF16_X86
    if (upi_bf16_has_amx()) return &upi_bf16_amx;
    if (__builtin_cpu_supports("avx512bf16")) return &upi_bf16_avx512;
#endif
    return NULL;
}

UPIPE_API upipe_status upi_bf16_refuse(upipe_err *err, const char *what)
{
    return upipe_fail(err, UPIPE_ERR_UNSUPPORTED,
                      "%s in bf16 instructions: this processor has neither AMX nor AVX512-BF16", what);
}

/* upipe_cpu_bf16_name -- "AMX" or "AVX512-BF16", which upipe_cpu_bf16 and upipe_cpu_attn_bf16 use here; NULL where
 *                        they refuse */
UPIPE_API const char *upipe_cpu_bf16_name(void)
{
    const upi_bf16_unit *unit = upi_bf16_here();
    return unit != NULL ? unit->name : NULL;
}

/* upipe_cpu_bf16 -- replaces the table's matrix product by one in the processor's bf16 instructions, AMX where it
 *                   has it and else AVX512-BF16; ops was filled by upipe_cpu_ops, err may be NULL.
 *   errors  UNSUPPORTED where it has neither, and the table stays as it is. Another processor gives other bits.
 */
UPIPE_API upipe_status upipe_cpu_bf16(upipe_ops *ops, upipe_err *err)
{
    const upi_bf16_unit *unit = upi_bf16_here();
    if (unit == NULL) return upi_bf16_refuse(err, "products");
#if UPIPE_CPU_BF16_X86
    ops->gemm = unit == &upi_bf16_amx ? upi_bf16_gemm_amx : upi_bf16_gemm_avx512;
    ops->gemm_bytes = upi_bf16_gemm_bytes;
#else
    (void)ops;
#endif
    return UPIPE_OK;
}

#endif

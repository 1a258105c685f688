/* upipe_cuda_linear.h -- the rules of linear attention on CUDA
 *
 *     #include "upipe/cuda/upipe_cuda_linear.h"              in the .cu unit, beside upipe_cuda.h
 *     UPIPE_EXPORT_LINEAR(app_linear, upipe_cuda_linear)     void app_linear(upipe_linear_ops *rules);
 *
 * Tensors, states and scratch are device memory; borders are host memory, and may change when a call returns. Chunks have
 * at most 64 tokens. Every product and sum is f32, without tensor cores, and in one order: no atomics. G, the sum of the
 * gates, is f64, and so are the sums of its gradient.
 *
 * The mathematics is that of cpu/upipe_cpu_linear.h, and so are its letters. Two things differ: T = (1 + beta M)^-1 is
 * made itself, so that U = T R is a product; and chunks go in runs, whose parts lie in scratch:
 *
 *     chunks    a block a chunk and head     gates, M, P, T
 *     states    a block a head and columns   S from chunk to chunk; O in the forward, W and U in the backward
 *     back      a block a head and columns   dS from the last chunk to the first; gradients of R and V
 *     squares   a block a chunk and head     gradients of M and P, of beta, and what reaches G through these
 *     keys      a block a chunk and key head gradients of Q and K, over the heads that read it in their order; of g
 *
 * Columns of a state do not meet before `squares`, so a head's walk over its chunks is value_dim / 32 blocks. The backward
 * keeps the state that each run begins with, and makes those of one run's chunks again.
 */
#ifndef UPIPE_CUDA_LINEAR_H
#define UPIPE_CUDA_LINEAR_H

#include "upipe_cuda_linear_bytes.h"
#include "upipe_cuda_linear_rows.h"

enum {
    UPI_CUDA_LINEAR_THREADS = 128,
    UPI_CUDA_LINEAR_COLUMNS = 32, /* of a tile, which has UPI_CUDA_LINEAR_ROWS rows */
    UPI_CUDA_LINEAR_DEPTH = 32,   /* of the operands' pieces */
    UPI_CUDA_LINEAR_EACH = 4,     /* a thread has so many rows, 16 apart, and columns, 8 apart */
    UPI_CUDA_LINEAR_SQUARE = UPI_CUDA_LINEAR_ROWS * (UPI_CUDA_LINEAR_ROWS + 1),
    UPI_CUDA_LINEAR_PIECES =
        UPI_CUDA_LINEAR_ROWS * (UPI_CUDA_LINEAR_DEPTH + 1) +
        UPI_CUDA_LINEAR_DEPTH * (UPI_CUDA_LINEAR_COLUMNS + 1), /* both, in shared memory */
    UPI_CUDA_LINEAR_LOWEST = -128 /* e to that is 0 in f32, and so it is with -inf */
};

/* Chunks that a launch works on. at: twice the rows from `first` on, plus 1 where a document begins; the last chunk's end
 * behind it. */
typedef struct upi_cuda_linear_run {
    int64_t first; /* row */
    int chunks;
    uint16_t at[UPI_CUDA_LINEAR_RUN_MAX + 1];
} upi_cuda_linear_run;

/* One of them, for a head. */
typedef struct upi_cuda_linear_item {
    int64_t row, number; /* of its items */
    int l, begins;
} upi_cuda_linear_item;

/* An operand of a product: element (i, j) is scale * factor[i] * data[i * step + j], and 0 outside. */
typedef struct upi_cuda_linear_matrix {
    const void *data;
    const float *factor; /* NULL: 1 */
    int64_t step;
    int rows, columns, bf16;
    float scale;
} upi_cuda_linear_matrix;

/* A tile's part of one thread. */
typedef struct upi_cuda_linear_tile {
    float v[UPI_CUDA_LINEAR_EACH][UPI_CUDA_LINEAR_EACH];
} upi_cuda_linear_tile;

#define UPI_CUDA_LINEAR_ROW(r)    ((int)threadIdx.x / 8 + 16 * (r))
#define UPI_CUDA_LINEAR_COLUMN(c) ((int)threadIdx.x % 8 + 8 * (c))

/* For every element of a tile, which is v[r][c] of its thread, row i and column j. */
#define UPI_CUDA_LINEAR_EVERY(i, j, ...)                                             \
    do {                                                                             \
        int r, c;                                                                    \
        UPI_UNROLL                                                                   \
        for (r = 0; r < UPI_CUDA_LINEAR_EACH; ++r) {                                 \
            UPI_UNROLL                                                               \
            for (c = 0; c < UPI_CUDA_LINEAR_EACH; ++c) {                             \
                const int i = UPI_CUDA_LINEAR_ROW(r), j = UPI_CUDA_LINEAR_COLUMN(c); \
                __VA_ARGS__;                                                         \
            }                                                                        \
        }                                                                            \
    } while (0)

/* ---- operands ---- */

UPI_DEVICE upi_cuda_linear_item upi_cuda_linear_item_of(const upi_cuda_linear_run &r, int chunk, int head,
                                                        int heads)
{
    upi_cuda_linear_item x;
    const int at = r.at[chunk] / 2;
    x.row = r.first + at;
    x.l = r.at[chunk + 1] / 2 - at;
    x.begins = r.at[chunk] % 2;
    x.number = (int64_t)chunk * heads + head;
    return x;
}

/* A chunk's rows of a view. */
UPI_DEVICE upi_cuda_linear_matrix upi_cuda_linear_rows(upipe_view v, upi_cuda_linear_item x, int head,
                                                       const float *factor, float scale)
{
    upi_cuda_linear_matrix m;
    const int64_t at = x.row * v.n_stride + head * v.h_stride;
    m.bf16 = v.dtype == UPIPE_BF16;
    m.data =
        m.bf16 ? (const void *)((const upi_bf16 *)v.data + at) : (const void *)((const float *)v.data + at);
    m.factor = factor;
    m.step = v.n_stride;
    m.rows = x.l;
    m.columns = v.d;
    m.scale = scale;
    return m;
}

UPI_DEVICE upi_cuda_linear_matrix upi_cuda_linear_part(const float *p, int rows, int columns, int step,
                                                       const float *factor, float scale)
{
    upi_cuda_linear_matrix m;
    m.data = p;
    m.factor = factor;
    m.step = step;
    m.rows = rows;
    m.columns = columns;
    m.bf16 = 0;
    m.scale = scale;
    return m;
}

UPI_DEVICE float upi_cuda_linear_get(const upi_cuda_linear_matrix &m, int i, int j)
{
    float x;
    if (i >= m.rows || j >= m.columns) return 0.0f;
    x = m.bf16 ? upi_from_bf16(((const upi_bf16 *)m.data)[i * m.step + j])
               : ((const float *)m.data)[i * m.step + j];
    if (m.factor != NULL) x *= m.factor[i];
    return m.scale * x;
}

UPI_DEVICE void upi_cuda_linear_put(upipe_view v, int64_t row, int head, int column, float x)
{
    const int64_t at = row * v.n_stride + head * v.h_stride + column;
    if (v.dtype == UPIPE_BF16)
        ((upi_bf16 *)v.data)[at] = upi_to_bf16(x);
    else
        ((float *)v.data)[at] = x;
}

UPI_DEVICE float upi_cuda_linear_gate(upipe_view v, int64_t row, int head)
{
    return ((const float *)v.data)[row * v.n_stride + head * v.h_stride];
}

/* ---- products ---- */

/* to [ROWS][COLUMNS + 1] = the piece of m, or of its transpose, that begins at (i0, j0). Neighbouring threads read
 * neighbouring columns of m. */
template <int ROWS, int COLUMNS, int TRANS>
UPI_DEVICE void upi_cuda_linear_load(float *to, const upi_cuda_linear_matrix &m, int i0, int j0)
{
    int e;
    for (e = (int)threadIdx.x; e < ROWS * COLUMNS; e += UPI_CUDA_LINEAR_THREADS) {
        const int i = TRANS ? e % ROWS : e / COLUMNS, j = TRANS ? e / ROWS : e % COLUMNS;
        to[i * (COLUMNS + 1) + j] =
            TRANS ? upi_cuda_linear_get(m, j0 + j, i0 + i) : upi_cuda_linear_get(m, i0 + i, j0 + j);
    }
}

/* tile += op(a) op(b), the tile's first element being (i0, j0); sums ascend with the depth. pieces: shared memory. All
 * threads of the block, whose writes before are seen. */
template <int TRANS_A, int TRANS_B>
UPI_DEVICE void upi_cuda_linear_product(upi_cuda_linear_tile *tile, float *pieces,
                                        const upi_cuda_linear_matrix &a, int i0,
                                        const upi_cuda_linear_matrix &b, int j0)
{
    float *left = pieces, *right = pieces + UPI_CUDA_LINEAR_ROWS * (UPI_CUDA_LINEAR_DEPTH + 1);
    const int depth = TRANS_A ? a.rows : a.columns;
    int k0, k;
    for (k0 = 0; k0 < depth; k0 += UPI_CUDA_LINEAR_DEPTH) {
        __syncthreads(); /* the pieces before are not read any more */
        upi_cuda_linear_load<UPI_CUDA_LINEAR_ROWS, UPI_CUDA_LINEAR_DEPTH, TRANS_A>(left, a, i0, k0);
        upi_cuda_linear_load<UPI_CUDA_LINEAR_DEPTH, UPI_CUDA_LINEAR_COLUMNS, TRANS_B>(right, b, k0, j0);
        __syncthreads();
        UPI_UNROLL_4
        for (k = 0; k < UPI_CUDA_LINEAR_DEPTH; ++k)
            UPI_CUDA_LINEAR_EVERY(i, j,
                                  tile->v[r][c] =
                                      fmaf(left[i * (UPI_CUDA_LINEAR_DEPTH + 1) + k],
                                           right[k * (UPI_CUDA_LINEAR_COLUMNS + 1) + j], tile->v[r][c]));
    }
}

UPI_DEVICE upi_cuda_linear_tile upi_cuda_linear_zeros(void)
{
    upi_cuda_linear_tile tile;
    UPI_CUDA_LINEAR_EVERY(i, j, (void)i, (void)j; tile.v[r][c] = 0.0f);
    return tile;
}

/* Row r of a tile times a row of m, 32 columns from j0 on; in every of the row's 8 lanes. */
UPI_DEVICE float upi_cuda_linear_dot(const upi_cuda_linear_tile &tile, int r, const upi_cuda_linear_matrix &m,
                                     int j0)
{
    float sum = 0.0f;
    int c, step;
    UPI_UNROLL
    for (c = 0; c < UPI_CUDA_LINEAR_EACH; ++c)
        sum = fmaf(tile.v[r][c],
                   upi_cuda_linear_get(m, UPI_CUDA_LINEAR_ROW(r), j0 + UPI_CUDA_LINEAR_COLUMN(c)), sum);
    UPI_UNROLL
    for (step = 4; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    return sum;
}

/* A number of the state behind a chunk, which adds `more`. Where a decay is near 1 the state is rounded once: the rounding of
 * a factor, or of a state that has decayed and not grown yet, would add up over all chunks that it outlives. */
UPI_DEVICE float upi_cuda_linear_next(float s, float keep, float lose, float more)
{
    return keep > 0.5f ? s + fmaf(lose, s, more) : fmaf(keep, s, more);
}

/* e^(G_i - G_j) */
UPI_DEVICE float upi_cuda_linear_decay(const double *sums, int i, int j)
{
    return expf((float)(sums[i] - sums[j]));
}

/* ---- chunks: gates, M, P, T ---- */

/* G and its exponentials, in shared memory and in scratch. */
UPI_DEVICE void upi_cuda_linear_gates(const upipe_linear &a, const upi_cuda_linear_parts &w,
                                      upi_cuda_linear_item x, int head, double *sums)
{
    const int i = (int)threadIdx.x;
    const int64_t at = x.number * a.chunk;
    if (i < x.l) {
        const float g = upi_cuda_linear_gate(a.g, x.row + i, head), lowest = UPI_CUDA_LINEAR_LOWEST;
        sums[i] = g < lowest ? lowest : g; /* a NaN stays one */
    }
    __syncthreads();
    if (i == 0) {
        int k;
        for (k = 1; k < x.l; ++k) sums[k] += sums[k - 1];
        w.lose[x.number] = (float)(exp(sums[x.l - 1]) - 1);
    }
    __syncthreads();
    if (i < x.l) {
        w.sums[at + i] = sums[i];
        w.up[at + i] = (float)exp(sums[i]);
        w.down[at + i] = (float)exp(sums[x.l - 1] - sums[i]);
    }
}

/* t [l][l] = (1 + a)^-1, where a and the result's place are squares in shared memory. A thread has a column. */
UPI_DEVICE void upi_cuda_linear_invert(float *t, int step, const float *a, float *inverse, int l)
{
    const int width = UPI_CUDA_LINEAR_ROWS + 1, j = (int)threadIdx.x;
    int i, k;
    if (j < l) {
        for (i = 0; i < l; ++i) {
            float sum = i == j ? 1.0f : 0.0f;
            UPI_UNROLL_4
            for (k = j; k < i; ++k) sum = fmaf(-a[i * width + k], inverse[k * width + j], sum);
            inverse[i * width + j] = sum;
        }
    }
    __syncthreads();
    for (i = (int)threadIdx.x; i < l * l; i += UPI_CUDA_LINEAR_THREADS)
        t[i / l * step + i % l] = inverse[i / l * width + i % l];
}

enum {
    UPI_CUDA_LINEAR_CHUNKS_SHARED =
        (UPI_CUDA_LINEAR_PIECES + 2 * UPI_CUDA_LINEAR_SQUARE) * 4 + UPI_CUDA_LINEAR_ROWS * 8
};

template <int DELTA>
UPI_KERNEL(128, 2)
void upi_cuda_linear_chunks(const upipe_linear a, const upi_cuda_linear_parts w,
                            const upi_cuda_linear_run run)
{
    UPI_SHARED(double, sums);
    float *pieces = (float *)(sums + UPI_CUDA_LINEAR_ROWS), *square = pieces + UPI_CUDA_LINEAR_PIECES;
    const int heads = a.v.h, head = (int)(blockIdx.x % (unsigned)heads), step = a.chunk;
    const upi_cuda_linear_item x =
        upi_cuda_linear_item_of(run, (int)(blockIdx.x / (unsigned)heads), head, heads);
    const int key = head / (heads / a.q.h);
    const upi_cuda_linear_matrix q = upi_cuda_linear_rows(a.q, x, key, NULL, a.scale),
                                 k = upi_cuda_linear_rows(a.k, x, key, NULL, 1);
    const int64_t at = x.number * step * step;
    int j0;
    upi_need_ieee();
    upi_cuda_linear_gates(a, w, x, head, sums);
    for (j0 = 0; j0 < x.l; j0 += UPI_CUDA_LINEAR_COLUMNS) {
        upi_cuda_linear_tile tile = upi_cuda_linear_zeros();
        if (DELTA) {
            upi_cuda_linear_product<0, 1>(&tile, pieces, k, 0, k, j0);
            UPI_CUDA_LINEAR_EVERY(
                i, j, if (i < x.l && j0 + j < x.l) {
                    const int to = j0 + j;
                    const float m = to < i ? upi_cuda_linear_decay(sums, i, to) * tile.v[r][c] : 0.0f;
                    square[i * (UPI_CUDA_LINEAR_ROWS + 1) + to] =
                        upi_cuda_linear_gate(a.beta, x.row + i, head) * m;
                    if (w.m != NULL) w.m[at + i * step + to] = m;
                });
            tile = upi_cuda_linear_zeros();
        }
        if (w.p == NULL) continue;
        upi_cuda_linear_product<0, 1>(&tile, pieces, q, 0, k, j0);
        UPI_CUDA_LINEAR_EVERY(i, j,
                              if (i < x.l && j0 + j < x.l) w.p[at + i * step + j0 + j] =
                                  j0 + j <= i ? upi_cuda_linear_decay(sums, i, j0 + j) * tile.v[r][c] : 0.0f);
    }
    if (!DELTA) return;
    __syncthreads();
    upi_cuda_linear_invert(w.t + at, step, square, square + UPI_CUDA_LINEAR_SQUARE, x.l);
}

/* ---- states: from chunk to chunk ---- */

enum {
    UPI_CUDA_LINEAR_STATES_SHARED =
        (UPI_CUDA_LINEAR_PIECES + UPI_CUDA_LINEAR_ROWS * (UPI_CUDA_LINEAR_COLUMNS + 1)) * 4
};

/* value [ROWS][COLUMNS + 1] in shared memory = U of a chunk, 32 columns from j0 on; W and U in scratch, where they are
 * wanted. */
template <int DELTA>
UPI_DEVICE void upi_cuda_linear_values(const upipe_linear &a, const upi_cuda_linear_parts &w,
                                       upi_cuda_linear_item x, int head, int j0,
                                       const upi_cuda_linear_matrix &state, float *pieces, float *value)
{
    const int width = UPI_CUDA_LINEAR_COLUMNS + 1, dim = a.v.d;
    const upi_cuda_linear_matrix v = upi_cuda_linear_rows(a.v, x, head, NULL, 1);
    const int64_t at = x.number * a.chunk;
    upi_cuda_linear_tile tile = upi_cuda_linear_zeros();
    if (DELTA) {
        const upi_cuda_linear_matrix k = upi_cuda_linear_rows(a.k, x, head / (a.v.h / a.q.h), w.up + at, -1);
        upi_cuda_linear_product<0, 0>(&tile, pieces, k, 0, state, j0);
        UPI_CUDA_LINEAR_EVERY(
            i, j, const float rest = upi_cuda_linear_get(v, i, j0 + j) + tile.v[r][c];
            if (w.rest != NULL && i < x.l && j0 + j < dim) w.rest[(at + i) * dim + j0 + j] = rest;
            value[i * width + j] = i < x.l ? upi_cuda_linear_gate(a.beta, x.row + i, head) * rest : 0.0f);
        tile = upi_cuda_linear_zeros();
        upi_cuda_linear_product<0, 0>(
            &tile, pieces, upi_cuda_linear_part(w.t + at * a.chunk, x.l, x.l, a.chunk, NULL, 1), 0,
            upi_cuda_linear_part(value, x.l, UPI_CUDA_LINEAR_COLUMNS, width, NULL, 1), 0);
    } else
        UPI_CUDA_LINEAR_EVERY(i, j, tile.v[r][c] = upi_cuda_linear_get(v, i, j0 + j));
    UPI_CUDA_LINEAR_EVERY(i, j, value[i * width + j] = tile.v[r][c];
                          if (w.u != NULL && i < x.l && j0 + j < dim) w.u[(at + i) * dim + j0 + j] =
                              tile.v[r][c]);
}

/* from: the states before the run, [heads][key_dim][value_dim]; to: behind it, may be from. o is written where it has
 * memory; scratch gets the states of the run's chunks where it has a place for them. */
template <int DELTA>
UPI_KERNEL(128, 2)
void upi_cuda_linear_states(const upipe_linear a, const upi_cuda_linear_parts w,
                            const upi_cuda_linear_run run, const float *from, float *to)
{
    UPI_SHARED(float, pieces);
    float *value = pieces + UPI_CUDA_LINEAR_PIECES;
    const int key_dim = a.q.d, dim = a.v.d,
              tiles = (dim + UPI_CUDA_LINEAR_COLUMNS - 1) / UPI_CUDA_LINEAR_COLUMNS;
    const int head = (int)(blockIdx.x / (unsigned)tiles), key = head / (a.v.h / a.q.h);
    const int j0 = (int)(blockIdx.x % (unsigned)tiles) * UPI_CUDA_LINEAR_COLUMNS;
    const int64_t size = (int64_t)key_dim * dim;
    const upi_cuda_linear_matrix state = upi_cuda_linear_part(to + head * size, key_dim, dim, dim, NULL, 1);
    const upi_cuda_linear_matrix u = upi_cuda_linear_part(
        value, UPI_CUDA_LINEAR_ROWS, UPI_CUDA_LINEAR_COLUMNS, UPI_CUDA_LINEAR_COLUMNS + 1, NULL, 1);
    float *s = to + head * size;
    int n, e, i0;
    from += head * size;
    for (n = 0; n < run.chunks; ++n, from = s) {
        const upi_cuda_linear_item x = upi_cuda_linear_item_of(run, n, head, a.v.h);
        const int64_t at = x.number * a.chunk;
        const float keep = w.up[at + x.l - 1], lose = w.lose[x.number];
        upi_cuda_linear_tile o = upi_cuda_linear_zeros();
        __syncthreads(); /* the chunk before has left its state */
        for (e = (int)threadIdx.x; e < key_dim * UPI_CUDA_LINEAR_COLUMNS; e += UPI_CUDA_LINEAR_THREADS) {
            const int j = j0 + e % UPI_CUDA_LINEAR_COLUMNS;
            const int64_t place = (int64_t)(e / UPI_CUDA_LINEAR_COLUMNS) * dim + j;
            if (j >= dim) continue;
            if (x.begins || from != s) s[place] = x.begins ? 0.0f : from[place];
            if (w.state != NULL) w.state[x.number * size + place] = s[place];
        }
        if (a.o.data != NULL)
            upi_cuda_linear_product<0, 0>(&o, pieces, upi_cuda_linear_rows(a.q, x, key, w.up + at, a.scale),
                                          0, state, j0);
        upi_cuda_linear_values<DELTA>(a, w, x, head, j0, state, pieces, value);
        if (a.o.data != NULL) {
            upi_cuda_linear_product<0, 0>(
                &o, pieces, upi_cuda_linear_part(w.p + at * a.chunk, x.l, x.l, a.chunk, NULL, 1), 0, u, 0);
            UPI_CUDA_LINEAR_EVERY(i, j,
                                  if (i < x.l && j0 + j < dim)
                                      upi_cuda_linear_put(a.o, x.row + i, head, j0 + j, o.v[r][c]));
        }
        for (i0 = 0; i0 < key_dim; i0 += UPI_CUDA_LINEAR_ROWS) {
            upi_cuda_linear_tile tile = upi_cuda_linear_zeros();
            upi_cuda_linear_product<1, 0>(&tile, pieces, upi_cuda_linear_rows(a.k, x, key, w.down + at, 1),
                                          i0, u, 0);
            UPI_CUDA_LINEAR_EVERY(
                i, j, if (i0 + i < key_dim && j0 + j < dim) {
                    float *one = s + (int64_t)(i0 + i) * dim + j0 + j;
                    *one = upi_cuda_linear_next(*one, keep, lose, tile.v[r][c]);
                });
        }
    }
}

/* ---- back: gradients of states, R and V ---- */

template <int DELTA>
UPI_KERNEL(128, 2)
void upi_cuda_linear_back(const upipe_linear_grad g, const upi_cuda_linear_parts w,
                          const upi_cuda_linear_run run)
{
    UPI_SHARED(float, pieces);
    float *value = pieces + UPI_CUDA_LINEAR_PIECES;
    const upipe_linear &a = g.a;
    const int width = UPI_CUDA_LINEAR_COLUMNS + 1, step = a.chunk;
    const int key_dim = a.q.d, dim = a.v.d,
              tiles = (dim + UPI_CUDA_LINEAR_COLUMNS - 1) / UPI_CUDA_LINEAR_COLUMNS;
    const int head = (int)(blockIdx.x / (unsigned)tiles), key = head / (a.v.h / a.q.h);
    const int j0 = (int)(blockIdx.x % (unsigned)tiles) * UPI_CUDA_LINEAR_COLUMNS;
    const int64_t size = (int64_t)key_dim * dim;
    float *ds = g.dstate + head * size;
    int n, e, i0;
    for (n = run.chunks - 1; n >= 0; --n) {
        const upi_cuda_linear_item x = upi_cuda_linear_item_of(run, n, head, a.v.h);
        const int64_t at = x.number * step;
        const float keep = w.up[at + x.l - 1], lose = w.lose[x.number];
        const upi_cuda_linear_matrix dout = upi_cuda_linear_rows(g.dout, x, head, NULL, 1),
                                     held = upi_cuda_linear_part(value, x.l, UPI_CUDA_LINEAR_COLUMNS, width,
                                                                 NULL, 1);
        upi_cuda_linear_tile tile = upi_cuda_linear_zeros();
        __syncthreads(); /* the chunk behind has left its gradient */
        for (e = (int)threadIdx.x; e < key_dim * UPI_CUDA_LINEAR_COLUMNS; e += UPI_CUDA_LINEAR_THREADS) {
            const int j = j0 + e % UPI_CUDA_LINEAR_COLUMNS;
            const int64_t place = (int64_t)(e / UPI_CUDA_LINEAR_COLUMNS) * dim + j;
            if (j < dim) w.dstate[x.number * size + place] = ds[place];
        }
        upi_cuda_linear_product<1, 0>(
            &tile, pieces, upi_cuda_linear_part(w.p + at * step, x.l, x.l, step, NULL, 1), 0, dout, j0);
        upi_cuda_linear_product<0, 0>(&tile, pieces, upi_cuda_linear_rows(a.k, x, key, w.down + at, 1), 0,
                                      upi_cuda_linear_part(ds, key_dim, dim, dim, NULL, 1), j0);
        if (DELTA) {
            UPI_CUDA_LINEAR_EVERY(i, j, value[i * width + j] = tile.v[r][c]);
            tile = upi_cuda_linear_zeros();
            upi_cuda_linear_product<1, 0>(
                &tile, pieces, upi_cuda_linear_part(w.t + at * step, x.l, x.l, step, NULL, 1), 0, held, 0);
            UPI_CUDA_LINEAR_EVERY(
                i, j, if (i < x.l && j0 + j < dim) w.dr[(at + i) * dim + j0 + j] = tile.v[r][c];
                tile.v[r][c] *= i < x.l ? upi_cuda_linear_gate(a.beta, x.row + i, head) : 0.0f;
                value[i * width + j] = tile.v[r][c]);
        }
        UPI_CUDA_LINEAR_EVERY(i, j,
                              if (i < x.l && j0 + j < dim)
                                  upi_cuda_linear_put(g.dv, x.row + i, head, j0 + j, tile.v[r][c]));
        for (i0 = 0; i0 < key_dim; i0 += UPI_CUDA_LINEAR_ROWS) {
            tile = upi_cuda_linear_zeros();
            upi_cuda_linear_product<1, 0>(
                &tile, pieces, upi_cuda_linear_rows(a.q, x, key, w.up + at, a.scale), i0, dout, j0);
            if (DELTA)
                upi_cuda_linear_product<1, 0>(&tile, pieces, upi_cuda_linear_rows(a.k, x, key, w.up + at, -1),
                                              i0, held, 0);
            UPI_CUDA_LINEAR_EVERY(
                i, j, if (i0 + i < key_dim && j0 + j < dim) {
                    float *one = ds + (int64_t)(i0 + i) * dim + j0 + j;
                    *one = x.begins ? 0.0f : upi_cuda_linear_next(*one, keep, lose, tile.v[r][c]);
                });
        }
    }
}

/* ---- squares: gradients of M, P, beta ---- */

/* The sum of a square's row or column, with a factor for each element where it is given, in f64 over 16 f32 at a time. */
UPI_DEVICE double upi_cuda_linear_line(const float *first, int step, int l, const float *factor)
{
    double sum = 0;
    int i, e;
    for (i = 0; i < l; i += 16) {
        float part = 0.0f;
        UPI_UNROLL_4
        for (e = i; e < i + 16 && e < l; ++e)
            part = factor != NULL ? fmaf(factor[e], first[e * step], part) : part + first[e * step];
        sum += (double)part;
    }
    return sum;
}

/* a . b, n elements, by all threads of the block; the first one returns it. parts: shared memory, a double a thread. */
UPI_DEVICE double upi_cuda_linear_inner(const float *a, const float *b, int64_t n, double *parts)
{
    double sum = 0;
    float part = 0.0f;
    int64_t e;
    int i;
    for (e = (int64_t)threadIdx.x; e < n; e += UPI_CUDA_LINEAR_THREADS) part = fmaf(a[e], b[e], part);
    __syncthreads();
    parts[threadIdx.x] = (double)part;
    __syncthreads();
    for (i = 0; threadIdx.x == 0 && i < UPI_CUDA_LINEAR_THREADS; ++i) sum += parts[i];
    return sum;
}

enum {
    UPI_CUDA_LINEAR_SQUARES_SHARED =
        (UPI_CUDA_LINEAR_PIECES + UPI_CUDA_LINEAR_SQUARE + UPI_CUDA_LINEAR_ROWS) * 4 +
        (UPI_CUDA_LINEAR_ROWS + UPI_CUDA_LINEAR_THREADS) * 8
};

template <int DELTA>
UPI_KERNEL(128, 2)
void upi_cuda_linear_squares(const upipe_linear_grad g, const upi_cuda_linear_parts w,
                             const upi_cuda_linear_run run)
{
    UPI_SHARED(double, sums);
    double *lines = sums + UPI_CUDA_LINEAR_ROWS;
    float *beta = (float *)(lines + UPI_CUDA_LINEAR_THREADS), *pieces = beta + UPI_CUDA_LINEAR_ROWS,
          *square = pieces + UPI_CUDA_LINEAR_PIECES;
    const upipe_linear &a = g.a;
    const int width = UPI_CUDA_LINEAR_ROWS + 1, heads = a.v.h, step = a.chunk, dim = a.v.d,
              me = (int)threadIdx.x;
    const int head = (int)(blockIdx.x % (unsigned)heads);
    const upi_cuda_linear_item x =
        upi_cuda_linear_item_of(run, (int)(blockIdx.x / (unsigned)heads), head, heads);
    const int64_t at = x.number * step, size = (int64_t)a.q.d * dim;
    const upi_cuda_linear_matrix u = upi_cuda_linear_part(w.u + at * dim, x.l, dim, dim, NULL, 1);
    double reaches = 0, whole;
    int which, j0;
    if (me < x.l) {
        sums[me] = w.sums[at + me];
        beta[me] = DELTA ? upi_cuda_linear_gate(a.beta, x.row + me, head) : 1.0f;
    }
    for (which = 0; which <= DELTA; ++which) { /* through P, with the diagonal; through M */
        const upi_cuda_linear_matrix rows =
            which ? upi_cuda_linear_part(w.dr + at * dim, x.l, dim, dim, NULL, -1)
                  : upi_cuda_linear_rows(g.dout, x, head, NULL, 1);
        float *p = (which ? w.m : w.p) + at * step;
        for (j0 = 0; j0 < x.l; j0 += UPI_CUDA_LINEAR_COLUMNS) {
            upi_cuda_linear_tile tile = upi_cuda_linear_zeros();
            upi_cuda_linear_product<0, 1>(&tile, pieces, rows, 0, u, j0);
            UPI_CUDA_LINEAR_EVERY(
                i, j, if (i < x.l && j0 + j < x.l) {
                    const int to = j0 + j, seen = to + which <= i;
                    const float product = seen ? p[i * step + to] : 0.0f;
                    const float grad = seen ? tile.v[r][c] * upi_cuda_linear_decay(sums, i, to) : 0.0f;
                    square[i * width + to] = seen ? tile.v[r][c] * product : 0.0f;
                    if (!which)
                        p[i * step + to] = grad;
                    else if (seen)
                        p[i * step + to] = p[to * step + i] = beta[i] * grad;
                });
        }
        __syncthreads();
        lines[me] =
            me < x.l ? upi_cuda_linear_line(square + me * width, 1, x.l, NULL)
            : me >= UPI_CUDA_LINEAR_ROWS && me - UPI_CUDA_LINEAR_ROWS < x.l
                ? upi_cuda_linear_line(square + me - UPI_CUDA_LINEAR_ROWS, width, x.l, which ? beta : NULL)
                : 0;
        __syncthreads();
        if (me < x.l)
            reaches += (which ? (double)beta[me] * lines[me] : lines[me]) - lines[UPI_CUDA_LINEAR_ROWS + me];
    }
    if (DELTA && me < x.l) {
        const double own = upi_cuda_linear_line(w.dr + (at + me) * dim, 1, dim, w.rest + (at + me) * dim);
        ((float *)g.dbeta.data)[(x.row + me) * g.dbeta.n_stride + head * g.dbeta.h_stride] =
            (float)(own + lines[me]);
    }
    whole = upi_cuda_linear_inner(w.state + x.number * size, w.dstate + x.number * size, size, lines);
    if (me < x.l) {
        w.dsums[at + me] = reaches;
        if (me < x.l - 1) w.dends[at + me] = 0;
    }
    if (me == 0) w.dends[at + x.l - 1] = (double)w.up[at + x.l - 1] * whole;
}

/* ---- keys: gradients of Q, K, g ---- */

enum { UPI_CUDA_LINEAR_KEYS_SHARED = (UPI_CUDA_LINEAR_PIECES + UPI_CUDA_LINEAR_ROWS) * 4 };

/* What reaches G of a row through its products with q or k; of those with the state behind the chunk G_l gets the
 * rest. One lane of a row has all columns of all tiles, in turn. */
UPI_DEVICE void upi_cuda_linear_reach(const upi_cuda_linear_parts &w, int64_t at, int l,
                                      const upi_cuda_linear_tile &tile, const upi_cuda_linear_matrix &m,
                                      int j0, int end)
{
    int r;
    UPI_UNROLL
    for (r = 0; r < UPI_CUDA_LINEAR_EACH; ++r) {
        const int i = UPI_CUDA_LINEAR_ROW(r);
        const double sum = (double)upi_cuda_linear_dot(tile, r, m, j0);
        if (i >= l || threadIdx.x % 8 != 0) continue;
        w.dsums[at + i] += end ? -sum : sum;
        if (end) w.dends[at + i] += sum;
    }
}

UPI_DEVICE void upi_cuda_linear_add(upi_cuda_linear_tile *to, const upi_cuda_linear_tile &tile)
{
    UPI_CUDA_LINEAR_EVERY(i, j, (void)i, (void)j; to->v[r][c] += tile.v[r][c]);
}

/* dq, dk += of a head, 32 columns from j0 on; factor: shared memory, a float a row. */
template <int DELTA>
UPI_DEVICE void upi_cuda_linear_keys_of(const upipe_linear_grad &g, const upi_cuda_linear_parts &w,
                                        upi_cuda_linear_item x, int head, int j0, float *pieces,
                                        float *factor, upi_cuda_linear_tile *dq, upi_cuda_linear_tile *dk)
{
    const upipe_linear &a = g.a;
    const int key = head / (a.v.h / a.q.h), dim = a.v.d, step = a.chunk;
    const int64_t at = x.number * step, size = (int64_t)a.q.d * dim;
    const upi_cuda_linear_matrix q = upi_cuda_linear_rows(a.q, x, key, NULL, a.scale),
                                 k = upi_cuda_linear_rows(a.k, x, key, NULL, 1);
    const upi_cuda_linear_matrix s = upi_cuda_linear_part(w.state + x.number * size, a.q.d, dim, dim, NULL,
                                                          1),
                                 ds = upi_cuda_linear_part(w.dstate + x.number * size, a.q.d, dim, dim, NULL,
                                                           1);
    const upi_cuda_linear_matrix p = upi_cuda_linear_part(w.p + at * step, x.l, x.l, step, NULL, 1);
    upi_cuda_linear_tile tile = upi_cuda_linear_zeros();
    upi_cuda_linear_product<0, 1>(&tile, pieces, upi_cuda_linear_rows(g.dout, x, head, w.up + at, 1), 0, s,
                                  j0);
    upi_cuda_linear_reach(w, at, x.l, tile, q, j0, 0);
    upi_cuda_linear_product<0, 0>(&tile, pieces, p, 0, k, j0);
    upi_cuda_linear_add(dq, tile);
    tile = upi_cuda_linear_zeros();
    upi_cuda_linear_product<0, 1>(
        &tile, pieces, upi_cuda_linear_part(w.u + at * dim, x.l, dim, dim, w.down + at, 1), 0, ds, j0);
    upi_cuda_linear_reach(w, at, x.l, tile, k, j0, 1);
    upi_cuda_linear_product<1, 0>(&tile, pieces, p, 0, q, j0);
    upi_cuda_linear_add(dk, tile);
    if (!DELTA) return;
    if ((int)threadIdx.x < x.l) /* no barrier: the products before and behind have theirs */
        factor[threadIdx.x] =
            w.up[at + threadIdx.x] * upi_cuda_linear_gate(a.beta, x.row + (int64_t)threadIdx.x, head);
    tile = upi_cuda_linear_zeros();
    upi_cuda_linear_product<0, 1>(&tile, pieces,
                                  upi_cuda_linear_part(w.dr + at * dim, x.l, dim, dim, factor, -1), 0, s, j0);
    upi_cuda_linear_reach(w, at, x.l, tile, k, j0, 0);
    upi_cuda_linear_product<0, 0>(&tile, pieces,
                                  upi_cuda_linear_part(w.m + at * step, x.l, x.l, step, NULL, 1), 0, k, j0);
    upi_cuda_linear_add(dk, tile);
}

/* dg of a head's chunk, from what reaches G: a thread. */
UPI_DEVICE void upi_cuda_linear_gates_bwd(const upipe_linear_grad &g, const upi_cuda_linear_parts &w,
                                          upi_cuda_linear_item x, int head)
{
    const int64_t at = x.number * g.a.chunk;
    double sum = 0;
    int i;
    for (i = 0; i < x.l; ++i) sum += w.dends[at + i];
    for (i = x.l - 1; i >= 0; --i) {
        sum += w.dsums[at + i];
        ((float *)g.dg.data)[(x.row + i) * g.dg.n_stride + head * g.dg.h_stride] = (float)sum;
    }
}

template <int DELTA>
UPI_KERNEL(128, 2)
void upi_cuda_linear_keys(const upipe_linear_grad g, const upi_cuda_linear_parts w,
                          const upi_cuda_linear_run run)
{
    UPI_SHARED(float, pieces);
    const upipe_linear &a = g.a;
    const int group = a.v.h / a.q.h, key = (int)(blockIdx.x % (unsigned)a.q.h),
              chunk = (int)(blockIdx.x / (unsigned)a.q.h);
    int j0, h;
    for (j0 = 0; j0 < a.q.d; j0 += UPI_CUDA_LINEAR_COLUMNS) {
        const upi_cuda_linear_item x = upi_cuda_linear_item_of(run, chunk, 0, a.v.h);
        upi_cuda_linear_tile dq = upi_cuda_linear_zeros(), dk = upi_cuda_linear_zeros();
        for (h = key * group; h < (key + 1) * group; ++h)
            upi_cuda_linear_keys_of<DELTA>(g, w, upi_cuda_linear_item_of(run, chunk, h, a.v.h), h, j0, pieces,
                                           pieces + UPI_CUDA_LINEAR_PIECES, &dq, &dk);
        UPI_CUDA_LINEAR_EVERY(
            i, j, if (i < x.l && j0 + j < a.q.d) {
                upi_cuda_linear_put(g.dq, x.row + i, key, j0 + j, a.scale * dq.v[r][c]);
                upi_cuda_linear_put(g.dk, x.row + i, key, j0 + j, dk.v[r][c]);
            });
    }
    /* what reaches G is there, as a product with its barriers came behind */
    for (h = key * group + (int)threadIdx.x; h < (key + 1) * group; h += UPI_CUDA_LINEAR_THREADS)
        upi_cuda_linear_gates_bwd(g, w, upi_cuda_linear_item_of(run, chunk, h, a.v.h), h);
}

/* ---- host ---- */

/* The row with which row i's chunk begins. */
UPIPE_API int64_t upi_cuda_linear_chunk_begin(const upipe_linear *a, int64_t i)
{
    const int64_t pos = a->pos + i, border = upi_border_before(&a->borders, pos);
    const int64_t first = pos / a->chunk * a->chunk > border ? pos / a->chunk * a->chunk : border;
    return first > a->pos ? first - a->pos : 0;
}

/* At most `chunks` chunks from a row on; returns the row behind them. */
UPIPE_API int64_t upi_cuda_linear_run_fill(upi_cuda_linear_run *run, const upipe_linear *a, int64_t row,
                                           int chunks)
{
    memset(run, 0, sizeof *run);
    for (run->first = row; run->chunks < chunks && row < a->q.n; row = upi_linear_chunk_end(a, row))
        run->at[run->chunks++] = (uint16_t)((row - run->first) * 2 + upi_linear_begins(a, row));
    run->at[run->chunks] = (uint16_t)((row - run->first) * 2);
    return row;
}

/* What the kernels cannot take. */
UPIPE_API upipe_status upi_cuda_linear_check(upipe_ctx *c, const upipe_linear *a, const void *written)
{
    const void *const memory[] = {a->state, written, a->work};
    static const char *const names[] = {"the state", "the written state", "the scratch"};
    const int n = a->q.n > 0 ? 3 : 2; /* a call without tokens has no scratch */
    int i, pageable;
    if (a->v.h > INT32_MAX / UPI_CUDA_LINEAR_RUN_MAX)
        return upipe_fail(&c->err, UPIPE_ERR_UNSUPPORTED, "linear attention: %d heads in one call", a->v.h);
    for (i = 0; i < n; ++i) {
        UPIPE_TRY(upi_cuda_pageable(c, memory[i], &pageable));
        if (pageable)
            return upipe_fail(&c->err, UPIPE_ERR_ARG,
                              "linear attention: %s is memory of the host, not of the device", names[i]);
    }
    return UPIPE_OK;
}

/* Blocks of a launch that has one for each head and 32 columns of its values. */
UPIPE_API unsigned upi_cuda_linear_walks(const upipe_linear *a)
{
    return (unsigned)a->v.h * (unsigned)((a->v.d + UPI_CUDA_LINEAR_COLUMNS - 1) / UPI_CUDA_LINEAR_COLUMNS);
}

/* Gates and squares of a run's chunks, and the states behind them. */
template <int DELTA>
UPIPE_API upipe_status upi_cuda_linear_walk(upipe_ctx *c, const upipe_linear *a,
                                            const upi_cuda_linear_parts *w, const upi_cuda_linear_run *run,
                                            const float *from, float *to)
{
    UPIPE_TRY(UPI_LAUNCH(c, (upi_cuda_linear_chunks<DELTA>), (unsigned)run->chunks * (unsigned)a->v.h,
                         UPI_CUDA_LINEAR_THREADS, UPI_CUDA_LINEAR_CHUNKS_SHARED, *a, *w, *run));
    return UPI_LAUNCH(c, (upi_cuda_linear_states<DELTA>), upi_cuda_linear_walks(a), UPI_CUDA_LINEAR_THREADS,
                      UPI_CUDA_LINEAR_STATES_SHARED, *a, *w, *run, from, to);
}

template <int DELTA> UPIPE_API upipe_status upi_cuda_linear_fwd_of(upipe_ctx *c, const upipe_linear *a)
{
    upi_cuda_linear_parts w;
    upi_cuda_linear_run run;
    int64_t row = 0;
    upi_cuda_linear_layout(&w, a, UPIPE_LINEAR_FWD);
    while (row < a->q.n) {
        const float *from = row > 0 ? a->out : a->state;
        row = upi_cuda_linear_run_fill(&run, a, row, w.run);
        UPIPE_TRY(upi_cuda_linear_walk<DELTA>(c, a, &w, &run, from, a->out));
    }
    return UPIPE_OK;
}

/* The states that runs begin with: a walk without anything but the state. */
template <int DELTA>
UPIPE_API upipe_status upi_cuda_linear_begins(upipe_ctx *c, const upipe_linear *a,
                                              const upi_cuda_linear_parts *w)
{
    const int64_t states = (int64_t)a->v.h * a->q.d * a->v.d;
    upi_cuda_linear_parts only = *w;
    upi_cuda_linear_run run;
    int64_t row = 0, i;
    only.m = only.p = only.u = only.rest = only.state = NULL;
    for (i = 1; i < w->runs_n; ++i) {
        const float *from = i > 1 ? w->runs + (i - 1) * states : a->state;
        row = upi_cuda_linear_run_fill(&run, a, row, w->run);
        UPIPE_TRY(upi_cuda_linear_walk<DELTA>(c, a, &only, &run, from, w->runs + i * states));
    }
    return UPIPE_OK;
}

template <int DELTA> UPIPE_API upipe_status upi_cuda_linear_bwd_of(upipe_ctx *c, const upipe_linear_grad *g)
{
    upipe_linear_grad call = *g;
    const upipe_linear *a = &call.a;
    const int64_t states = (int64_t)a->v.h * a->q.d * a->v.d;
    upi_cuda_linear_parts w;
    upi_cuda_linear_run run;
    int64_t i, row = a->q.n;
    call.a.o.data = NULL;
    upi_cuda_linear_layout(&w, a, UPIPE_LINEAR_BWD);
    UPIPE_TRY(upi_cuda_linear_begins<DELTA>(c, a, &w));
    for (i = w.runs_n - 1; i >= 0; --i) {
        const int64_t count = i == w.runs_n - 1 ? w.chunks - i * w.run : w.run;
        const float *from = i > 0 ? w.runs + i * states : a->state;
        int64_t k;
        for (k = 0; k < count; ++k) row = upi_cuda_linear_chunk_begin(a, row - 1);
        upi_cuda_linear_run_fill(&run, a, row, (int)count);
        UPIPE_TRY(upi_cuda_linear_walk<DELTA>(c, a, &w, &run, from, w.runs + i * states));
        UPIPE_TRY(UPI_LAUNCH(c, (upi_cuda_linear_back<DELTA>), upi_cuda_linear_walks(a),
                             UPI_CUDA_LINEAR_THREADS, UPI_CUDA_LINEAR_STATES_SHARED, call, w, run));
        UPIPE_TRY(UPI_LAUNCH(c, (upi_cuda_linear_squares<DELTA>), (unsigned)run.chunks * (unsigned)a->v.h,
                             UPI_CUDA_LINEAR_THREADS, UPI_CUDA_LINEAR_SQUARES_SHARED, call, w, run));
        UPIPE_TRY(UPI_LAUNCH(c, (upi_cuda_linear_keys<DELTA>), (unsigned)run.chunks * (unsigned)a->q.h,
                             UPI_CUDA_LINEAR_THREADS, UPI_CUDA_LINEAR_KEYS_SHARED, call, w, run));
    }
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_cuda_linear_fwd(upipe_ctx *c, const upipe_linear *a)
{
    UPIPE_TRY(upi_cuda_linear_check(c, a, a->out));
    if (a->q.n == 0) {
        const size_t bytes = (size_t)a->v.h * (size_t)a->q.d * (size_t)a->v.d * sizeof(float);
        return a->out != a->state ? upi_cuda_copy(c, a->out, a->state, bytes) : UPIPE_OK;
    }
    return a->beta.data != NULL ? upi_cuda_linear_fwd_of<1>(c, a) : upi_cuda_linear_fwd_of<0>(c, a);
}

UPIPE_API upipe_status upi_cuda_linear_bwd(upipe_ctx *c, const upipe_linear_grad *g)
{
    UPIPE_TRY(upi_cuda_linear_check(c, &g->a, g->dstate));
    return g->a.beta.data != NULL ? upi_cuda_linear_bwd_of<1>(c, g) : upi_cuda_linear_bwd_of<0>(c, g);
}

/* upipe_cuda_linear -- fills the rules, and what a layer needs around them. Their calls take a context with the CUDA table,
 * whose program has code for the device (upipe_cuda_ops) */
UPIPE_API void upipe_cuda_linear(upipe_linear_ops *rules)
{
    upipe_cuda_plan_linear(rules);
    rules->fwd = upi_cuda_linear_fwd;
    rules->bwd = upi_cuda_linear_bwd;
    rules->conv = upi_cuda_linear_conv;
    rules->conv_bwd = upi_cuda_linear_conv_bwd;
    rules->gates = upi_cuda_linear_gates;
    rules->gates_bwd = upi_cuda_linear_gates_bwd;
}

/* Defines, with C linkage, void function(upipe_linear_ops *rules), which calls fill. */
#define UPIPE_EXPORT_LINEAR(function, fill)                   \
    extern "C" void function(struct upipe_linear_ops *rules); \
    extern "C" void function(struct upipe_linear_ops *rules)  \
    {                                                         \
        fill(rules);                                          \
    }

#endif

/* upipe_cpu_linear.h -- the rules of linear attention on the CPU
 *
 *     upipe_linear_ops rules;
 *     upipe_cpu_linear(&rules);
 *
 * A chunk of l tokens, which begins with the state S. G is the sum of g from the chunk's begin on, in f64; every decay
 * is an exponential of a difference of two of them, which is not above 0, so none overflows.
 *
 *     D_ij = e^(G_i - G_j), j <= i              M = K K^T, P = Q K^T, both times D
 *     W    = V - e^G K S                        R = beta W
 *     U    = (1 + beta M)^-1 R                  forward substitution; M below the diagonal alone. Without beta U = V
 *     O    = e^G Q S + P U                      P with the diagonal
 *     S'   = e^G_l S + (e^(G_l - G) K)^T U
 *
 * Products are the table's gemm, in f32; the threads share heads. Rows of K and Q, or of gradients, that are multiplied by
 * the same matrix lie one behind the other: it is packed once. The backward walks chunks from the last one. The states
 * that they begin with are computed again: first those of every run of chunks, about a square root of them, then those of
 * one run. Where a decay is near 1, S' is S + ((e^G_l - 1) S + ..): the rounding of a factor near 1, or of a state that
 * has decayed and not grown yet, would add up over all chunks that a state outlives.
 */
#ifndef UPIPE_CPU_LINEAR_H
#define UPIPE_CPU_LINEAR_H

#include "../upipe_linear.h"

#if defined(UPIPE_CPU_DECLARE) || defined(UPIPE_CPU_DEFINE)
#ifdef __cplusplus
extern "C" {
#endif
void upipe_cpu_linear(upipe_linear_ops *rules);
#ifdef __cplusplus
}
#endif
#endif

#if !defined(UPIPE_CPU_DECLARE) || defined(UPIPE_CPU_DEFINE)

#include <math.h>

#include "upipe_cpu_linear_rows.h"

enum {
    UPI_LINEAR_LOWEST = -128, /* e to that is 0 in f32, and so it is with -inf */
    UPI_LINEAR_ROWS = 4,      /* of a substitution's tile, whose sums stay in registers */
    UPI_LINEAR_VECTORS = UPIPE_CPU_AVX512 ? 4 : 2
};

/* What a worker has of its own: buffers of two parts, each [chunk] rows, where a chunk of l tokens has rows 0 .. 2l - 1: of K,
 * then of Q. Square ones have rows of `wide` elements.
 *   kq dkq     [key_dim]: K and Q, which has the scale; their gradients, sums over the heads of a key head
 *   key        [key_dim]: rows of a product
 *   w          [value_dim]: W, and Q S in a forward
 *   u          [value_dim]: U, where there is beta;  values: U, or the call's own rows of V
 *   r          [value_dim]: gradients of U, then of R; behind them that of O. In a forward P U
 *   d a        [wide]: D, -beta M
 *   mp x       [wide]: M and P; their gradients
 *   sums dsums f64: G and its gradient;  high low: G as the sum of two;  dots: sums of rows
 *   up down    e^G, e^(G_l - G);  both: -beta e^G, e^G;  beta dbeta
 *   next       [key_dim][value_dim]: what a state, or its gradient, gets from a chunk
 *   kept       w u mp a d of a chunk; in a backward with beta of all in a run, [heads of a key head][chunks]: what U needs
 *              is computed with the states
 *   state      [heads of a key head][chunks of a run][key_dim][value_dim], states [...][runs]...: the backward's */
typedef struct upi_linear_worker {
    upipe_ctx ctx; /* a table without threads: a head's products stay on its thread */
    upipe_ops ops;
    upipe_status status;
    const upipe_linear *call;
    float *kq, *key, *dkq, *w, *u, *r, *mp, *a, *d, *x, *high, *low, *up, *down, *both, *beta, *dbeta;
    upipe_view values;
    double *sums, *dsums, *dots;
    float *next, *state, *states;
    char *kept;
    size_t kept_bytes; /* from a chunk to the next one */
    void *work;
    size_t work_bytes;
    int wide;
    double last; /* G_l */
} upi_linear_worker;

typedef struct upi_linear_job {
    const upipe_linear *a;
    const upipe_linear_grad *g; /* NULL in a forward */
    char *work;
    size_t each;         /* bytes of a worker */
    int64_t chunks, run; /* of all tokens; of a run */
} upi_linear_job;

/* ---- scratch ---- */

/* The next part of a worker at `base`, which may be NULL. */
UPI_INLINE void *upi_linear_place(void *base, size_t *at, size_t bytes)
{
    void *const p = upipe_offset(base, *at);
    *at += (bytes + 63) / 64 * 64;
    return p;
}

UPI_INLINE upipe_view upi_linear_matrix(float *p, int64_t rows, int32_t columns, int64_t stride)
{
    return upipe_view_make(p, UPIPE_F32, rows, stride, 1, stride, columns);
}

/* Scratch of the largest product. */
UPIPE_API size_t upi_linear_gemm_bytes(const upipe_ops *ops, const upipe_linear *a)
{
    const int32_t dims[3] = {2 * a->chunk, a->q.d, a->v.d}; /* fewer rows take no more */
    size_t most = 0;
    int i, j, k, flags;
    for (i = 0; i < 3; ++i)
        for (j = 0; j < 3; ++j)
            for (k = 0; k < 3; ++k)
                for (flags = 0; flags < 3; ++flags) {
                    const upipe_view out = upi_linear_matrix(NULL, dims[i], dims[j], dims[j]);
                    const upipe_view x = flags & UPIPE_GEMM_TRANS_A
                                             ? upi_linear_matrix(NULL, dims[k], dims[i], dims[i])
                                             : upi_linear_matrix(NULL, dims[i], dims[k], dims[k]);
                    const upipe_view y = flags & UPIPE_GEMM_TRANS_B
                                             ? upi_linear_matrix(NULL, dims[j], dims[k], dims[k])
                                             : upi_linear_matrix(NULL, dims[k], dims[j], dims[j]);
                    most = upipe_max_bytes(most, ops->gemm_bytes(ops, out, x, y, flags));
                }
    return most;
}

/* Lays out what is kept of a chunk at `base`, which may be NULL; returns its bytes. */
UPIPE_API size_t upi_linear_keep(upi_linear_worker *w, const upipe_linear *a, int parts, void *base)
{
    const size_t row = (size_t)a->chunk * 4;
    size_t at = 0;
    w->w = (float *)upi_linear_place(base, &at, row * (size_t)(parts * a->v.d));
    w->u = (float *)upi_linear_place(base, &at, row * (size_t)a->v.d);
    w->mp = (float *)upi_linear_place(base, &at, row * (size_t)(2 * w->wide));
    w->a = (float *)upi_linear_place(base, &at, row * (size_t)w->wide);
    w->d = (float *)upi_linear_place(base, &at, row * (size_t)w->wide);
    return at;
}

/* Lays out a worker; returns its bytes. NULL: nothing but these. */
UPIPE_API size_t upi_linear_layout(upi_linear_worker *w, const upipe_ops *ops, const upi_linear_job *job)
{
    const upipe_linear *a = job->a;
    const size_t row = (size_t)a->chunk * 4, state = (size_t)a->q.d * (size_t)a->v.d * 4;
    const size_t group = (size_t)(a->v.h / a->q.h), run = group * (size_t)job->run;
    size_t at = 0, kept;
    upi_linear_worker local;
    upi_linear_worker *const to = w != NULL ? w : &local;
    upi_linear_place(w, &at, sizeof *w);
    to->ops = *ops;
    to->ops.par = NULL;
    to->wide = (a->chunk + 15) / 16 * 16;
#define UPI_LINEAR_PLACE(type, name, bytes) to->name = (type *)upi_linear_place(w, &at, bytes)
    UPI_LINEAR_PLACE(float, kq, 2 * row * (size_t)a->q.d);
    UPI_LINEAR_PLACE(float, key, 2 * row * (size_t)a->q.d);
    UPI_LINEAR_PLACE(float, dkq, 2 * row * (size_t)a->q.d);
    UPI_LINEAR_PLACE(float, r, 2 * row * (size_t)a->v.d);
    UPI_LINEAR_PLACE(float, x, 2 * row * (size_t)to->wide);
    UPI_LINEAR_PLACE(float, high, (size_t)to->wide * 4);
    UPI_LINEAR_PLACE(float, low, (size_t)to->wide * 4);
    UPI_LINEAR_PLACE(float, up, row);
    UPI_LINEAR_PLACE(float, down, row);
    UPI_LINEAR_PLACE(float, both, 2 * row);
    UPI_LINEAR_PLACE(float, beta, row);
    UPI_LINEAR_PLACE(float, dbeta, row);
    UPI_LINEAR_PLACE(double, sums, 2 * row);
    UPI_LINEAR_PLACE(double, dsums, (size_t)to->wide * 8);
    UPI_LINEAR_PLACE(double, dots, 4 * row);
    UPI_LINEAR_PLACE(float, next, state);
    UPI_LINEAR_PLACE(float, state, run > 0 ? run * state : 0);
    UPI_LINEAR_PLACE(float, states,
                     run > 0 ? group * (size_t)((job->chunks + job->run - 1) / job->run) * state : 0);
    kept = upi_linear_keep(to, a, run > 0 ? 1 : 2, NULL);
    to->kept_bytes = a->beta.data != NULL ? kept : 0;
    UPI_LINEAR_PLACE(char, kept, kept + (run > 0 ? run - 1 : 0) * to->kept_bytes);
#undef UPI_LINEAR_PLACE
    upi_linear_keep(to, a, run > 0 ? 1 : 2, to->kept);
    to->work_bytes = upi_linear_gemm_bytes(&to->ops, a);
    to->work = upi_linear_place(w, &at, to->work_bytes);
    return at;
}

/* Chunks, and in a backward those of a run. */
UPIPE_API void upi_linear_plan(upi_linear_job *job, const upipe_linear *a, upipe_linear_direction pass)
{
    int64_t i;
    memset(job, 0, sizeof *job);
    job->a = a;
    for (i = 0; i < a->q.n; i = upi_linear_chunk_end(a, i)) ++job->chunks;
    if (pass == UPIPE_LINEAR_BWD)
        for (job->run = 1; job->run * job->run < job->chunks;) ++job->run;
}

UPIPE_API size_t upi_cpu_linear_bytes(const upipe_ops *ops, const upipe_linear *a,
                                      upipe_linear_direction pass)
{
    upi_linear_job job;
    upi_linear_plan(&job, a, pass);
    return upi_linear_layout(NULL, ops, &job) * (size_t)upi_par_workers(ops);
}

/* ---- parts of a chunk ---- */

UPI_KERNELS_BEGIN

/* Rows of a tensor lie far apart, where no hardware prefetcher follows. */
UPI_INLINE void upi_linear_fetch(upipe_view v, int64_t row, int i, int l, int head)
{
    const char *next =
        (const char *)upipe_view_at(v, row + i, head) + 4 * v.n_stride * (int64_t)upipe_dtype_bytes(v.dtype);
    int64_t at;
    for (at = 0; i + 4 < l && at < v.d * (int64_t)upipe_dtype_bytes(v.dtype); at += 64)
        __builtin_prefetch(next + at);
}

UPI_INLINE void upi_linear_load_as(float *dst, upipe_view v, int64_t row, int l, int head, float factor,
                                   upipe_dtype dtype)
{
    int i;
    for (i = 0; i < l; ++i, dst += v.d) {
        const void *from = upipe_view_at(v, row + i, head);
        upi_linear_fetch(v, row, i, l, head);
        UPI_ROW_STEPS(k, n, v.d,
                      upi_row_put(dst, UPIPE_F32, k, n,
                                  upi_fw_mul(upi_row_get(from, dtype, k, n), upi_fw_set1(factor))));
    }
}

/* dst [l][d] = rows of a view, times a factor. */
UPI_CPU_KERNEL void upi_linear_load(float *dst, upipe_view v, int64_t row, int l, int head, float factor)
{
    UPI_WITH_TYPE(dtype, v.dtype, upi_linear_load_as(dst, v, row, l, head, factor, dtype));
}

UPI_INLINE void upi_linear_store_as(upipe_view v, int64_t row, int l, int head, const float *src,
                                    const float *factor, const float *more, upipe_dtype dtype)
{
    int i;
    for (i = 0; i < l; ++i, src += v.d) {
        void *to = upipe_view_at(v, row + i, head);
        const upi_fw f = upi_fw_set1(factor[i]);
        if (more != NULL) {
            UPI_ROW_STEPS(k, n, v.d,
                          upi_row_put(to, dtype, k, n,
                                      upi_fw_fma(upi_row_get(src, UPIPE_F32, k, n), f,
                                                 upi_row_get(more, UPIPE_F32, k, n))));
            more += v.d;
        } else {
            UPI_ROW_STEPS(k, n, v.d,
                          upi_row_put(to, dtype, k, n, upi_fw_mul(upi_row_get(src, UPIPE_F32, k, n), f)));
        }
    }
}

/* Rows of a view = factor_i * src_i, plus those of `more`, which may be NULL. */
UPI_CPU_KERNEL void upi_linear_store(upipe_view v, int64_t row, int l, int head, const float *src,
                                     const float *factor, const float *more)
{
    UPI_WITH_TYPE(dtype, v.dtype, upi_linear_store_as(v, row, l, head, src, factor, more, dtype));
}

/* dst_i = factor_i * src_i, rows of d elements. */
UPI_CPU_KERNEL void upi_linear_scale(float *dst, const float *src, const float *factor, int l, int d)
{
    int i, k;
    for (i = 0; i < l; ++i)
        for (k = 0; k < d; ++k) dst[(int64_t)i * d + k] = factor[i] * src[(int64_t)i * d + k];
}

/* A vector of a row: to += f * src; returns sum + f * src * with. */
UPI_INLINE upi_fw upi_linear_reach_step(float *to, const float *src, const float *with, upi_fw f, upi_fw sum,
                                        int64_t k, int64_t n)
{
    const upi_fw x = upi_fw_mul(f, upi_row_get(src, UPIPE_F32, k, n));
    upi_row_put(to, UPIPE_F32, k, n, upi_fw_add(upi_row_get(to, UPIPE_F32, k, n), x));
    return upi_fw_fma(x, upi_row_get(with, UPIPE_F32, k, n), sum);
}

/* dst_i += factor_i * src_i, and dots_i = factor_i * src_i . with_i. */
UPI_CPU_KERNEL void upi_linear_reach(float *dst, const float *src, const float *factor, const float *with,
                                     double *dots, int l, int d)
{
    int i, j;
    for (i = 0; i < l; ++i, dst += d, src += d, with += d) {
        const upi_fw f = upi_fw_set1(factor[i]);
        upi_fw sum = upi_fw_zero();
        float lanes[UPI_WIDE];
        UPI_ROW_STEPS(k, n, d, sum = upi_linear_reach_step(dst, src, with, f, sum, k, n));
        upi_fw_store(lanes, sum);
        for (dots[i] = 0, j = 0; j < UPI_WIDE; ++j) dots[i] += (double)lanes[j];
    }
}

/* a . b in f64, from 16 sums in one order. */
UPI_CPU_KERNEL double upi_linear_dot(const float *a, const float *b, int64_t n)
{
    float s[16] = {0};
    double sum = 0;
    int64_t k;
    int j;
    for (k = 0; k + 16 <= n; k += 16)
        for (j = 0; j < 16; ++j) s[j] += a[k + j] * b[k + j];
    for (j = 0; k < n; ++k, ++j) s[j] += a[k] * b[k];
    for (j = 0; j < 16; ++j) sum += (double)s[j];
    return sum;
}

/* to = e^sum s + more, n elements; to may be s. */
UPI_CPU_KERNEL void upi_linear_next(float *to, const float *s, const float *more, double sum, int64_t n)
{
    const float keep = (float)exp(sum), lose = (float)expm1(sum);
    const upi_fw factor = upi_fw_set1(keep > 0.5f ? lose : keep);
    if (keep > 0.5f)
        UPI_ROW_STEPS(k, m, n,
                      upi_row_put(to, UPIPE_F32, k, m,
                                  upi_fw_add(upi_row_get(s, UPIPE_F32, k, m),
                                             upi_fw_fma(factor, upi_row_get(s, UPIPE_F32, k, m),
                                                        upi_row_get(more, UPIPE_F32, k, m)))));
    else
        UPI_ROW_STEPS(k, m, n,
                      upi_row_put(to, UPIPE_F32, k, m,
                                  upi_fw_fma(factor, upi_row_get(s, UPIPE_F32, k, m),
                                             upi_row_get(more, UPIPE_F32, k, m))));
}

/* G, its exponentials and beta of a chunk. */
UPI_CPU_KERNEL void upi_linear_gates(upi_linear_worker *w, int64_t row, int l, int head)
{
    const upipe_linear *a = w->call;
    double sum = 0;
    int i;
    for (i = 0; i < l; ++i) {
        const double g = *(const float *)upipe_view_at(a->g, row + i, head), lowest = UPI_LINEAR_LOWEST;
        sum += g < lowest ? lowest : g; /* a NaN stays one */
        w->sums[i] = sum;
        w->high[i] = (float)sum;
        w->low[i] = (float)(sum - (double)w->high[i]);
        w->up[i] = (float)exp(sum);
        w->beta[i] = a->beta.data != NULL ? *(const float *)upipe_view_at(a->beta, row + i, head) : 1;
    }
    w->last = sum;
    for (i = 0; i < l; ++i) w->down[i] = (float)exp(sum - w->sums[i]);
}

/* D, with zeros above the diagonal; vectors above it are not read. */
UPI_CPU_KERNEL void upi_linear_decays(upi_linear_worker *w, int l)
{
    int i, j;
    for (i = 0; i < l; ++i)
        for (j = 0; j <= i; j += UPI_WIDE) {
            const upi_fw high = upi_fw_sub(upi_fw_set1(w->high[i]), upi_fw_load(w->high + j));
            const upi_fw low = upi_fw_sub(upi_fw_set1(w->low[i]), upi_fw_load(w->low + j));
            const upi_fw x =
                upi_fw_select(upi_wide_above(i - j), upi_fw_set1(UPI_LINEAR_LOWEST), upi_fw_add(high, low));
            upi_fw_store(w->d + (int64_t)i * w->wide + j, upi_fw_exp(x));
        }
}

/* A vector of row i of a product, from column j on: times D up to column `last`, zeros behind. */
UPI_INLINE upi_fw upi_linear_masked(const float *x, const float *d, int j, int last)
{
    return upi_fw_select(upi_wide_above(last - j), upi_fw_zero(),
                         upi_fw_mul(upi_fw_load(x + j), upi_fw_load(d + j)));
}

/* M below the diagonal, where m holds K K^T, and a = -beta M; vectors above it are not read. */
UPI_CPU_KERNEL void upi_linear_mask_m(upi_linear_worker *w, int l)
{
    int i, j;
    for (i = 0; i < l; ++i) {
        const int64_t row = (int64_t)i * w->wide;
        for (j = 0; j < i; j += UPI_WIDE) {
            const upi_fw m = upi_linear_masked(w->mp + row, w->d + row, j, i - 1);
            upi_fw_store(w->mp + row + j, m);
            upi_fw_store(w->a + row + j, upi_fw_mul(m, upi_fw_set1(-w->beta[i])));
        }
    }
}

/* P, where p holds Q K^T: zeros above the diagonal. */
UPI_CPU_KERNEL void upi_linear_mask_p(upi_linear_worker *w, float *p, int l)
{
    const float *d = w->d;
    int i, j;
    for (i = 0; i < l; ++i, p += w->wide, d += w->wide) {
        for (j = 0; j <= i; j += UPI_WIDE) upi_fw_store(p + j, upi_linear_masked(p, d, j, i));
        for (; j < w->wide; j += UPI_WIDE) upi_fw_store(p + j, upi_fw_zero());
    }
}

/* Rows first .. first + rows - 1 of a forward substitution, in some vectors of their columns: x_i += sum of b_ij x_j
 * over j < i, in the order of j. Rows of x are `step` elements apart; b_ij is b[i * down + j * right]. */
UPI_INLINE void upi_linear_solve_tile(int rows, int vectors, float *x, int64_t step, const float *b,
                                      int64_t down, int64_t right, int first)
{
    upi_fw sum[UPI_LINEAR_ROWS][UPI_LINEAR_VECTORS], y[UPI_LINEAR_VECTORS];
    const float *const rest = b + first * (down + right);
    int i, j, v;
    b += first * down;
    UPI_CPU_UNROLL
    for (i = 0; i < rows; ++i) {
        UPI_CPU_UNROLL
        for (v = 0; v < vectors; ++v) sum[i][v] = upi_fw_load(x + (first + i) * step + v * UPI_WIDE);
    }
    for (j = 0; j < first; ++j) {
        UPI_CPU_UNROLL
        for (v = 0; v < vectors; ++v) y[v] = upi_fw_load(x + j * step + v * UPI_WIDE);
        UPI_CPU_UNROLL
        for (i = 0; i < rows; ++i) {
            const upi_fw f = upi_fw_broadcast(b + i * down + j * right);
            UPI_CPU_UNROLL
            for (v = 0; v < vectors; ++v) upi_fw_accumulate(&sum[i][v], f, y[v]);
        }
    }
    UPI_CPU_UNROLL
    for (j = 0; j < rows; ++j) {
        UPI_CPU_UNROLL
        for (v = 0; v < vectors; ++v) upi_fw_store(x + (first + j) * step + v * UPI_WIDE, sum[j][v]);
        UPI_CPU_UNROLL
        for (i = j + 1; i < rows; ++i) {
            const upi_fw f = upi_fw_broadcast(rest + i * down + j * right);
            UPI_CPU_UNROLL
            for (v = 0; v < vectors; ++v) upi_fw_accumulate(&sum[i][v], f, sum[j][v]);
        }
    }
}

/* All rows of some vectors of their columns. */
UPI_INLINE void upi_linear_solve_columns(int vectors, float *x, int64_t step, const float *b, int64_t down,
                                         int64_t right, int l)
{
    int i;
    for (i = 0; i + UPI_LINEAR_ROWS <= l; i += UPI_LINEAR_ROWS)
        upi_linear_solve_tile(UPI_LINEAR_ROWS, vectors, x, step, b, down, right, i);
    for (; i < l; ++i) upi_linear_solve_tile(1, vectors, x, step, b, down, right, i);
}

/* x = (1 - b)^-1 x for l rows of d elements. Backwards, from the last row of x and the last element of b on, with steps
 * below 0, it is x = (1 - b)^-T x. */
UPI_CPU_KERNEL void upi_linear_solve(float *x, int64_t step, const float *b, int64_t down, int64_t right,
                                     int l, int d)
{
    const int wide = (int)UPI_LINEAR_VECTORS * (int)UPI_WIDE;
    int c = 0, i, j;
    for (; c + wide <= d; c += wide)
        upi_linear_solve_columns(UPI_LINEAR_VECTORS, x + c, step, b, down, right, l);
    for (; c + UPI_WIDE <= d; c += UPI_WIDE) upi_linear_solve_columns(1, x + c, step, b, down, right, l);
    for (; c < d; ++c)
        for (i = 1; i < l; ++i)
            for (j = 0; j < i; ++j) x[i * step + c] += b[i * down + j * right] * x[j * step + c];
}

UPI_INLINE void upi_linear_rest_step(float *w, float *u, upi_fw v, float up, float beta, int64_t k, int64_t n)
{
    const upi_fw rest = upi_fw_fma(upi_fw_set1(-up), upi_row_get(w, UPIPE_F32, k, n), v);
    upi_row_put(w, UPIPE_F32, k, n, rest);
    upi_row_put(u, UPIPE_F32, k, n, upi_fw_mul(rest, upi_fw_set1(beta)));
}

UPI_INLINE void upi_linear_rest_as(upi_linear_worker *w, upipe_view v, int64_t row, int l, int head,
                                   upipe_dtype dtype)
{
    int i;
    for (i = 0; i < l; ++i) {
        const void *from = upipe_view_at(v, row + i, head);
        float *const rest = w->w + (int64_t)i * v.d, *const u = w->u + (int64_t)i * v.d;
        upi_linear_fetch(v, row, i, l, head);
        UPI_ROW_STEPS(
            k, n, v.d,
            upi_linear_rest_step(rest, u, upi_row_get(from, dtype, k, n), w->up[i], w->beta[i], k, n));
    }
}

/* W = V - e^G K S, where w holds K S; u = beta W. */
UPI_CPU_KERNEL void upi_linear_rest(upi_linear_worker *w, int64_t row, int l, int head)
{
    const upipe_view v = w->call->v;
    UPI_WITH_TYPE(dtype, v.dtype, upi_linear_rest_as(w, v, row, l, head, dtype));
}

/* Gradients through x = (a product) * D below the diagonal, or with it: *x becomes the product's, from that of x in
 * `sign * x`, times beta where that is given; dsums gets what reaches G, and dbeta what reaches beta. */
UPI_CPU_KERNEL void upi_linear_unmask(upi_linear_worker *w, float *x, const float *product, int l,
                                      int diagonal, float sign, int times_beta)
{
    enum { SUMS = 8 };
    int i, j, k;
    for (i = 0; i < l; ++i, x += w->wide, product += w->wide) {
        const float *const d = w->d + (int64_t)i * w->wide;
        const float beta = times_beta ? w->beta[i] : 1;
        double part[SUMS] = {0}, sum = 0;
        for (j = i + diagonal; j < w->wide; ++j) x[j] = 0;
        for (j = 0; j < i + diagonal; j += SUMS)
            for (k = j; k < j + SUMS; ++k) {
                const double through = (double)(sign * x[k]) * (double)product[k];
                part[k - j] += through;
                w->dsums[k] -= (double)beta * through;
                x[k] *= sign * beta * d[k];
            }
        for (k = 0; k < SUMS; ++k) sum += part[k];
        w->dsums[i] += (double)beta * sum;
        if (times_beta) w->dbeta[i] += (float)sum;
    }
}

/* x += x^T of a square whose upper half is zeros. */
UPI_CPU_KERNEL void upi_linear_mirror(float *x, int wide, int l)
{
    int i, j;
    for (i = 0; i < l; ++i)
        for (j = 0; j < i; ++j) x[(int64_t)j * wide + i] = x[(int64_t)i * wide + j];
}

UPI_KERNELS_END

/* out (+)= op(x) op(y) */
UPIPE_API void upi_linear_product(upi_linear_worker *w, upipe_view out, upipe_view x, upipe_view y, int flags)
{
    if (w->status == UPIPE_OK && out.n > 0)
        w->status = w->ops.gemm(&w->ctx, out, x, y, flags, w->work, w->work_bytes);
}

/* ---- a chunk ---- */

/* Rows first .. end - 1 of a worker's buffer. */
UPI_INLINE upipe_view upi_linear_key(const upi_linear_worker *w, float *p, int first, int end)
{
    const int32_t d = w->call->q.d;
    return upi_linear_matrix(p + (int64_t)first * d, end - first, d, d);
}

UPI_INLINE upipe_view upi_linear_value(const upi_linear_worker *w, float *p, int first, int end)
{
    const int32_t d = w->call->v.d;
    return upi_linear_matrix(p + (int64_t)first * d, end - first, d, d);
}

UPI_INLINE upipe_view upi_linear_square(const upi_linear_worker *w, float *p, int first, int end, int l)
{
    return upi_linear_matrix(p + (int64_t)first * w->wide, end - first, l, w->wide);
}

UPI_INLINE upipe_view upi_linear_state(const upi_linear_worker *w, const float *p)
{
    return upi_linear_matrix((float *)(uintptr_t)p, w->call->q.d, w->call->v.d, w->call->v.d);
}

/* The first row of K and Q that a rule multiplies by K, or by a state: with scalar decay Q alone. */
UPI_INLINE int upi_linear_first(const upi_linear_worker *w, int l)
{
    return w->call->beta.data != NULL ? 0 : l;
}

/* The gates, K, where U is, and some rows of M and P, first .. end - 1: 0 to l is M, with -beta M, and l to 2l P, with Q. */
UPIPE_API void upi_linear_squares(upi_linear_worker *w, int64_t row, int l, int head, int first, int end)
{
    const upipe_linear *a = w->call;
    const int key = head / (a->v.h / a->q.h);
    upi_linear_gates(w, row, l, head);
    if (first < end && first == upi_linear_first(w, l)) upi_linear_decays(w, l); /* else they are kept */
    upi_linear_load(w->kq, a->k, row, l, key, 1);
    if (end > l) upi_linear_load(w->kq + (int64_t)l * a->q.d, a->q, row, l, key, a->scale);
    upi_linear_product(w, upi_linear_square(w, w->mp, first, end, l), upi_linear_key(w, w->kq, first, end),
                       upi_linear_key(w, w->kq, 0, l), UPIPE_GEMM_TRANS_B);
    w->values = a->v;
    w->values.data = upipe_view_at(a->v, row, head);
    w->values.n = l, w->values.h = 1;
    if (a->beta.data != NULL) w->values = upi_linear_value(w, w->u, 0, l);
    if (first < l) upi_linear_mask_m(w, l);
    if (end > l) upi_linear_mask_p(w, w->mp + (int64_t)l * w->wide, l);
}

/* With beta W and U of a chunk that begins with state s. Behind it Q S, where end is 2l and not l. */
UPIPE_API void upi_linear_values(upi_linear_worker *w, int64_t row, int l, int head, const float *s, int end)
{
    const upipe_linear *a = w->call;
    const int first = upi_linear_first(w, l);
    upi_linear_product(w, upi_linear_value(w, w->w, first, end), upi_linear_key(w, w->kq, first, end),
                       upi_linear_state(w, s), 0);
    if (first > 0) return;
    upi_linear_rest(w, row, l, head);
    upi_linear_solve(w->u, a->v.d, w->a, w->wide, 1, l, a->v.d);
}

/* to = the state behind the chunk that begins with s; may be s. */
UPIPE_API void upi_linear_advance(upi_linear_worker *w, int l, const float *s, float *to)
{
    const upipe_linear *a = w->call;
    upi_linear_scale(w->key, w->kq, w->down, l, a->q.d);
    upi_linear_product(w, upi_linear_state(w, w->next), upi_linear_key(w, w->key, 0, l), w->values,
                       UPIPE_GEMM_TRANS_A);
    upi_linear_next(to, s, w->next, w->last, (int64_t)a->q.d * a->v.d);
}

/* ---- forward ---- */

UPI_INLINE upi_linear_worker *upi_linear_of(const upi_linear_job *job, int32_t worker)
{
    return (upi_linear_worker *)(void *)(job->work + (size_t)worker * job->each);
}

UPIPE_API void upi_linear_fwd_item(void *arg, int64_t i, int32_t worker)
{
    const upi_linear_job *job = (const upi_linear_job *)arg;
    upi_linear_worker *w = upi_linear_of(job, worker);
    const upipe_linear *a = job->a;
    const size_t size = (size_t)a->q.d * (size_t)a->v.d;
    const int head = (int)i;
    float *s = a->out + (size_t)i * size;
    int64_t row, end;
    if (a->out != a->state) memcpy(s, a->state + (size_t)i * size, size * 4);
    for (row = 0; row < a->q.n; row = end) {
        const int l = (int)((end = upi_linear_chunk_end(a, row)) - row);
        if (upi_linear_begins(a, row)) memset(s, 0, size * 4);
        upi_linear_squares(w, row, l, head, upi_linear_first(w, l), 2 * l);
        upi_linear_values(w, row, l, head, s, 2 * l);
        upi_linear_product(w, upi_linear_value(w, w->r, 0, l), upi_linear_square(w, w->mp, l, 2 * l, l),
                           w->values, 0);
        upi_linear_store(a->o, row, l, head, w->w + (int64_t)l * a->v.d, w->up, w->r);
        upi_linear_advance(w, l, s, s);
    }
}

/* Runs a job on all heads, or key heads; its workers lie in the call's scratch. */
UPIPE_API upipe_status upi_linear_run(upipe_ctx *c, upi_linear_job *job, int64_t items, upi_par_item item)
{
    const int32_t workers = upi_par_workers(c->ops);
    int32_t i;
    job->work = (char *)job->a->work;
    job->each = upi_linear_layout(NULL, c->ops, job);
    for (i = 0; i < workers; ++i) {
        upi_linear_worker *w = upi_linear_of(job, i);
        upi_linear_layout(w, c->ops, job);
        w->ctx = *c;
        w->ctx.ops = &w->ops;
        w->call = job->a;
        w->status = UPIPE_OK;
    }
    upi_par_each(c->ops, items, item, job);
    for (i = 0; i < workers; ++i) {
        const upi_linear_worker *w = upi_linear_of(job, i);
        if (w->status == UPIPE_OK) continue;
        c->err = w->ctx.err;
        return w->status;
    }
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_cpu_linear_fwd(upipe_ctx *c, const upipe_linear *a)
{
    upi_linear_job job;
    upi_linear_plan(&job, a, UPIPE_LINEAR_FWD);
    return upi_linear_run(c, &job, a->v.h, upi_linear_fwd_item);
}

/* ---- backward ---- */

/* Gradients through M and P, from r and U: x becomes what K and Q are multiplied by. */
UPIPE_API void upi_linear_squares_bwd(upi_linear_worker *w, int l)
{
    const int first = upi_linear_first(w, l);
    const int64_t half = (int64_t)l * w->wide;
    upi_linear_product(w, upi_linear_square(w, w->x, first, 2 * l, l),
                       upi_linear_value(w, w->r, first, 2 * l), w->values, UPIPE_GEMM_TRANS_B);
    upi_linear_unmask(w, w->x + half, w->mp + half, l, 1, 1, 0);
    if (first > 0) return;
    upi_linear_unmask(w, w->x, w->mp, l, 0, -1, 1);
    upi_linear_mirror(w->x, w->wide, l);
}

/* The gradient of U in r, from that of O behind it and of the state behind the chunk; with beta then that of R. Gradients
 * of K through that state. */
UPIPE_API void upi_linear_values_bwd(upi_linear_worker *w, int l, const float *s, const float *ds)
{
    const upipe_linear *a = w->call;
    const int64_t d = a->v.d;
    int i;
    upi_linear_product(w, upi_linear_value(w, w->r, 0, l), upi_linear_square(w, w->mp, l, 2 * l, l),
                       upi_linear_value(w, w->r, l, 2 * l), UPIPE_GEMM_TRANS_A);
    upi_linear_scale(w->key, w->kq, w->down, l, a->q.d);
    upi_linear_product(w, upi_linear_value(w, w->r, 0, l), upi_linear_key(w, w->key, 0, l),
                       upi_linear_state(w, ds), UPIPE_GEMM_ACCUMULATE);
    upi_linear_product(w, upi_linear_key(w, w->key, 0, l), w->values, upi_linear_state(w, ds),
                       UPIPE_GEMM_TRANS_B);
    upi_linear_reach(w->dkq, w->key, w->down, w->kq, w->dots, l, a->q.d);
    for (i = 0; i < l; ++i) {
        w->dsums[i] -= w->dots[i];
        w->dsums[l - 1] += w->dots[i];
    }
    w->dsums[l - 1] += exp(w->last) * upi_linear_dot(s, ds, a->q.d * d);
    if (a->beta.data == NULL) return;
    upi_linear_solve(w->r + (l - 1) * d, -d, w->a + (int64_t)(l - 1) * (w->wide + 1), -1, -w->wide, l,
                     a->v.d);
    for (i = 0; i < l; ++i) w->dbeta[i] = (float)upi_linear_dot(w->r + i * d, w->w + i * d, d);
}

/* A chunk, of which M, W and U are kept: s is the state that it begins with; ds, the gradient of the state behind it, becomes that of s. */
UPIPE_API void upi_linear_bwd_chunk(upi_linear_worker *w, const upipe_linear_grad *g, int64_t row, int l,
                                    int head, const float *s, float *ds)
{
    const upipe_linear *a = w->call;
    const int first = upi_linear_first(w, l);
    const int64_t d = a->q.d, skipped = first * d;
    double sum = 0;
    int i;
    upi_linear_squares(w, row, l, head, l, 2 * l);
    upi_linear_load(w->r + (int64_t)l * a->v.d, g->dout, row, l, head, 1);
    memset(w->dsums, 0, (size_t)w->wide * sizeof *w->dsums);
    for (i = 0; i < l; ++i) {
        w->both[i] = -w->beta[i] * w->up[i];
        w->both[l + i] = w->up[i];
    }
    upi_linear_values_bwd(w, l, s, ds);
    upi_linear_squares_bwd(w, l);
    upi_linear_product(w, upi_linear_key(w, w->key, first, 2 * l), upi_linear_value(w, w->r, first, 2 * l),
                       upi_linear_state(w, s), UPIPE_GEMM_TRANS_B);
    upi_linear_reach(w->dkq + skipped, w->key + skipped, w->both + first, w->kq + skipped, w->dots,
                     2 * l - first, a->q.d);
    for (i = 0; i < 2 * l - first; ++i) w->dsums[i % l] += w->dots[i];
    upi_linear_product(w, upi_linear_key(w, w->dkq, first, 2 * l),
                       upi_linear_square(w, w->x, first, 2 * l, l), upi_linear_key(w, w->kq, 0, l),
                       UPIPE_GEMM_ACCUMULATE);
    upi_linear_product(w, upi_linear_key(w, w->dkq, 0, l), upi_linear_square(w, w->x, l, 2 * l, l),
                       upi_linear_key(w, w->kq, l, 2 * l), UPIPE_GEMM_TRANS_A | UPIPE_GEMM_ACCUMULATE);
    upi_linear_scale(w->key + skipped, w->kq + skipped, w->both + first, 2 * l - first, a->q.d);
    upi_linear_product(w, upi_linear_state(w, w->next), upi_linear_key(w, w->key, first, 2 * l),
                       upi_linear_value(w, w->r, first, 2 * l), UPIPE_GEMM_TRANS_A);
    upi_linear_next(ds, ds, w->next, w->last, d * a->v.d);
    upi_linear_store(g->dv, row, l, head, w->r, w->beta, NULL);
    for (i = l - 1; i >= 0; --i) {
        sum += w->dsums[i];
        *(float *)upipe_view_at(g->dg, row + i, head) = (float)sum;
        if (first == 0) *(float *)upipe_view_at(g->dbeta, row + i, head) = w->dbeta[i];
    }
}

/* The first row of chunk number `chunk`. */
UPI_INLINE int64_t upi_linear_row(const upipe_linear *a, int64_t chunk, int64_t from, int64_t row)
{
    for (; from < chunk; ++from) row = upi_linear_chunk_end(a, row);
    return row;
}

/* A key head, with all heads that read it. */
UPIPE_API void upi_linear_bwd_item(void *arg, int64_t i, int32_t worker)
{
    const upi_linear_job *job = (const upi_linear_job *)arg;
    upi_linear_worker *w = upi_linear_of(job, worker);
    const upipe_linear *a = job->a;
    const size_t size = (size_t)a->q.d * (size_t)a->v.d;
    const int group = a->v.h / a->q.h, first = (int)i * group;
    const int64_t runs = (job->chunks + job->run - 1) / job->run;
    int64_t run, chunk, row;
    int j, l;
    for (j = 0; j < group; ++j) { /* states that runs begin with */
        float *s = w->state;
        memcpy(s, a->state + (size_t)(first + j) * size, size * 4);
        for (chunk = row = 0; chunk < job->chunks; ++chunk, row += l) {
            l = (int)(upi_linear_chunk_end(a, row) - row);
            if (upi_linear_begins(a, row)) memset(s, 0, size * 4);
            if (chunk % job->run == 0)
                memcpy(w->states + (size_t)(j * runs + chunk / job->run) * size, s, size * 4);
            if (chunk == (runs - 1) * job->run) break;
            upi_linear_squares(w, row, l, first + j, upi_linear_first(w, l), l);
            upi_linear_values(w, row, l, first + j, s, l);
            upi_linear_advance(w, l, s, s);
        }
    }
    for (run = runs - 1; run >= 0; --run) {
        const int64_t begin = run * job->run,
                      last = begin + job->run < job->chunks ? begin + job->run : job->chunks;
        const int64_t start = upi_linear_row(a, begin, 0, 0);
        for (j = 0; j < group; ++j) { /* states that chunks of the run begin with, and what is kept of them */
            float *s = w->state + (size_t)(j * job->run) * size;
            memcpy(s, w->states + (size_t)(j * runs + run) * size, size * 4);
            for (chunk = begin, row = start; chunk < last; ++chunk, row += l, s += size) {
                l = (int)(upi_linear_chunk_end(a, row) - row);
                upi_linear_keep(w, a, 1, w->kept + (size_t)(j * job->run + chunk - begin) * w->kept_bytes);
                upi_linear_squares(w, row, l, first + j, upi_linear_first(w, l), l);
                upi_linear_values(w, row, l, first + j, s, l);
                if (chunk + 1 == last) break;
                upi_linear_advance(w, l, s, s + size);
                if (upi_linear_begins(a, row + l)) memset(s + size, 0, size * 4);
            }
        }
        for (chunk = last - 1; chunk >= begin; --chunk) {
            row = upi_linear_row(a, chunk, begin, start);
            l = (int)(upi_linear_chunk_end(a, row) - row);
            memset(w->dkq, 0, (size_t)(2 * l * a->q.d) * 4);
            for (j = 0; j < group; ++j) {
                const size_t number = (size_t)(j * job->run + chunk - begin);
                float *ds = job->g->dstate + (size_t)(first + j) * size;
                upi_linear_keep(w, a, 1, w->kept + number * w->kept_bytes);
                upi_linear_bwd_chunk(w, job->g, row, l, first + j, w->state + number * size, ds);
                if (upi_linear_begins(a, row)) memset(ds, 0, size * 4);
            }
            for (j = 0; j < l; ++j) w->both[j] = 1, w->both[l + j] = a->scale;
            upi_linear_store(job->g->dk, row, l, (int)i, w->dkq, w->both, NULL);
            upi_linear_store(job->g->dq, row, l, (int)i, w->dkq + (int64_t)l * a->q.d, w->both + l, NULL);
        }
    }
}

UPIPE_API upipe_status upi_cpu_linear_bwd(upipe_ctx *c, const upipe_linear_grad *g)
{
    upi_linear_job job;
    upi_linear_plan(&job, &g->a, UPIPE_LINEAR_BWD);
    job.g = g;
    return upi_linear_run(c, &job, g->a.q.h, upi_linear_bwd_item);
}

/* upipe_cpu_linear -- fills every entry of the rules */
UPI_CPU_OPS void upipe_cpu_linear(upipe_linear_ops *rules)
{
    memset(rules, 0, sizeof *rules);
    rules->name = upi_cpu_simd_name();
    rules->chunk_max = UPIPE_LINEAR_CHUNK_MAX;
    rules->fwd = upi_cpu_linear_fwd;
    rules->bwd = upi_cpu_linear_bwd;
    rules->bytes = upi_cpu_linear_bytes;
    rules->conv = upi_cpu_linear_conv;
    rules->conv_bwd = upi_cpu_linear_conv_bwd;
    rules->gates = upi_cpu_linear_gates;
    rules->gates_bwd = upi_cpu_linear_gates_bwd;
}

#endif

#endif

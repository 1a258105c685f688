/* upipe_cpu_linear.h -- the rules of linear attention on the CPU        backend cpu, includes cpu_linear_rows, linear
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
 * Products are the table's gemm, in f32; the threads share heads. The backward walks chunks from the last one. The
 * states that they begin with are computed again: first those of every run of chunks, about a square root of them, then
 * those of one run. S' is S plus a product with e^G_l - 1 where that is small: the rounding of a factor near 1 would
 * add up over all chunks that a state outlives.
 */
#ifndef UPIPE_CPU_LINEAR_H
#define UPIPE_CPU_LINEAR_H

#include <math.h>

#include "upipe_cpu_linear_rows.h"
#include "../upipe_linear.h"

enum {
    UPI_LINEAR_LOWEST = -128, /* e to that is 0 in f32, and so it is with -inf */
    UPI_LINEAR_ROWS = 4,      /* of a substitution's tile, whose sums stay in registers */
    UPI_LINEAR_VECTORS = UPIPE_CPU_AVX512 ? 4 : 2
};

/* What a worker has of its own: buffers of a chunk, each [chunk] rows. Square ones have rows of `wide` elements.
 *   q k        [key_dim]; q times the scale
 *   key key2   [key_dim]: rows of a product
 *   v w u      [value_dim]: V, W, U
 *   o du       [value_dim]: O or its gradient; gradients of U, then of R, then of V
 *   dq dk      [key_dim]: sums over the heads of a key head
 *   d m a p    [wide]: D, M, -beta M, P;  x: a gradient of M or P
 *   sums dsums f64: G and its gradient;  up, down: e^G, e^(G_l - G);  beta dbeta
 *   state      [heads of a key head][chunks of a run][key_dim][value_dim], states [...][runs]...: the backward's */
#define UPI_LINEAR_KEY(X)   X(q) X(k) X(key) X(key2) X(dq) X(dk)
#define UPI_LINEAR_VALUE(X) X(v) X(w) X(u) X(o) X(du)
#define UPI_LINEAR_WIDE(X)  X(d) X(m) X(a) X(p) X(x)
#define UPI_LINEAR_ROW(X)   X(up) X(down) X(beta) X(dbeta)
typedef struct upi_linear_worker {
    upipe_ctx ctx; /* a table without threads: a head's products stay on its thread */
    upipe_ops ops;
    upipe_status status;
    const upipe_linear *call;
#define UPI_LINEAR_FIELD(name) float *name;
    UPI_LINEAR_KEY(UPI_LINEAR_FIELD)
    UPI_LINEAR_VALUE(UPI_LINEAR_FIELD)
    UPI_LINEAR_WIDE(UPI_LINEAR_FIELD)
    UPI_LINEAR_ROW(UPI_LINEAR_FIELD)
#undef UPI_LINEAR_FIELD
    double *sums, *dsums;
    float *state, *states;
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
    const int32_t dims[3] = {a->chunk, a->q.d, a->v.d};
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

/* Lays out a worker; returns its bytes. NULL: nothing but these. */
UPIPE_API size_t upi_linear_layout(upi_linear_worker *w, const upipe_ops *ops, const upi_linear_job *job)
{
    const upipe_linear *a = job->a;
    const size_t row = (size_t)a->chunk * 4, state = (size_t)a->q.d * (size_t)a->v.d * 4;
    const size_t group = (size_t)(a->v.h / a->q.h);
    size_t at = 0;
    upi_linear_worker local;
    upi_linear_worker *const to = w != NULL ? w : &local;
    upi_linear_place(w, &at, sizeof *w);
    to->ops = *ops;
    to->ops.par = NULL;
    to->wide = (a->chunk + 15) / 16 * 16;
#define UPI_LINEAR_PLACE_KEY(name)   to->name = (float *)upi_linear_place(w, &at, row * (size_t)a->q.d);
#define UPI_LINEAR_PLACE_VALUE(name) to->name = (float *)upi_linear_place(w, &at, row * (size_t)a->v.d);
#define UPI_LINEAR_PLACE_WIDE(name)  to->name = (float *)upi_linear_place(w, &at, row * (size_t)to->wide);
#define UPI_LINEAR_PLACE_ROW(name)   to->name = (float *)upi_linear_place(w, &at, row);
    UPI_LINEAR_KEY(UPI_LINEAR_PLACE_KEY)
    UPI_LINEAR_VALUE(UPI_LINEAR_PLACE_VALUE)
    UPI_LINEAR_WIDE(UPI_LINEAR_PLACE_WIDE)
    UPI_LINEAR_ROW(UPI_LINEAR_PLACE_ROW)
    to->sums = (double *)upi_linear_place(w, &at, 2 * row);
    to->dsums = (double *)upi_linear_place(w, &at, 2 * row);
    to->state = (float *)upi_linear_place(w, &at, job->run > 0 ? group * (size_t)job->run * state : 0);
    to->states = (float *)upi_linear_place(
        w, &at, job->run > 0 ? group * (size_t)((job->chunks + job->run - 1) / job->run) * state : 0);
    to->work_bytes = upi_linear_gemm_bytes(&to->ops, a);
    to->work = upi_linear_place(w, &at, to->work_bytes);
    return at;
}

/* Chunks, and in a backward those of a run. */
UPIPE_API void upi_linear_plan(upi_linear_job *job, const upipe_linear *a, upipe_linear_pass pass)
{
    int64_t i;
    memset(job, 0, sizeof *job);
    job->a = a;
    for (i = 0; i < a->q.n; i = upipe_linear_chunk_end(a, i)) ++job->chunks;
    if (pass == UPIPE_LINEAR_BWD)
        for (job->run = 1; job->run * job->run < job->chunks;) ++job->run;
}

UPIPE_API size_t upi_cpu_linear_bytes(const upipe_ops *ops, const upipe_linear *a, upipe_linear_pass pass)
{
    upi_linear_job job;
    upi_linear_plan(&job, a, pass);
    return upi_linear_layout(NULL, ops, &job) * (size_t)upi_par_workers(ops);
}

/* ---- parts of a chunk ---- */

UPI_KERNELS_BEGIN

/* dst [l][d] = rows of a view, times a factor. */
UPI_CPU_KERNEL void upi_linear_load(float *dst, upipe_view v, int64_t row, int l, int head, float factor)
{
    int i;
    for (i = 0; i < l; ++i) {
        const void *from = upipe_view_at(v, row + i, head);
        float *to = dst + (int64_t)i * v.d;
        UPI_ROW_STEPS(k, n, v.d,
                      upi_row_put(to, UPIPE_F32, k, n,
                                  upi_fw_mul(upi_row_get(from, v.dtype, k, n), upi_fw_set1(factor))));
    }
}

UPI_CPU_KERNEL void upi_linear_store(upipe_view v, int64_t row, int l, int head, const float *src,
                                     float factor)
{
    int i;
    for (i = 0; i < l; ++i) {
        void *to = upipe_view_at(v, row + i, head);
        const float *from = src + (int64_t)i * v.d;
        UPI_ROW_STEPS(k, n, v.d,
                      upi_row_put(to, v.dtype, k, n,
                                  upi_fw_mul(upi_row_get(from, UPIPE_F32, k, n), upi_fw_set1(factor))));
    }
}

/* dst_i = factor_i * src_i, rows of d elements. */
UPI_CPU_KERNEL void upi_linear_scale(float *dst, const float *src, const float *factor, float sign, int l,
                                     int d)
{
    int i, k;
    for (i = 0; i < l; ++i)
        for (k = 0; k < d; ++k) dst[(int64_t)i * d + k] = sign * factor[i] * src[(int64_t)i * d + k];
}

/* dst += src, n elements. */
UPI_CPU_KERNEL void upi_linear_add(float *dst, const float *src, int64_t n)
{
    int64_t k;
    for (k = 0; k < n; ++k) dst[k] += src[k];
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

/* A state decays by e^sum. */
UPI_CPU_KERNEL void upi_linear_fade(float *s, double sum, int64_t n)
{
    const double factor = exp(sum);
    const float keep = (float)factor, lose = (float)(factor - 1);
    int64_t k;
    if (factor > 0.5)
        for (k = 0; k < n; ++k) s[k] += lose * s[k];
    else
        for (k = 0; k < n; ++k) s[k] *= keep;
}

/* G, its exponentials, D and beta of a chunk. */
UPI_CPU_KERNEL void upi_linear_gates(upi_linear_worker *w, int64_t row, int l, int head)
{
    const upipe_linear *a = w->call;
    double sum = 0;
    int i, j;
    for (i = 0; i < l; ++i) {
        const double g = *(const float *)upipe_view_at(a->g, row + i, head), lowest = UPI_LINEAR_LOWEST;
        sum += g < lowest ? lowest : g; /* a NaN stays one */
        w->sums[i] = sum;
        w->up[i] = (float)exp(sum);
        w->beta[i] = a->beta.data != NULL ? *(const float *)upipe_view_at(a->beta, row + i, head) : 1;
    }
    w->last = sum;
    for (i = 0; i < l; ++i) {
        float *d = w->d + (int64_t)i * w->wide;
        w->down[i] = (float)exp(sum - w->sums[i]);
        for (j = 0; j <= i; ++j) d[j] = (float)(w->sums[i] - w->sums[j]);
        for (; j < w->wide; ++j) d[j] = UPI_LINEAR_LOWEST;
        for (j = 0; j <= i; j += UPI_WIDE) upi_fw_store(d + j, upi_fw_exp(upi_fw_load(d + j)));
    }
}

/* x times D up to the diagonal, or below it; zeros behind. a = -beta times that, where it is wanted. */
UPI_CPU_KERNEL void upi_linear_mask(upi_linear_worker *w, float *x, float *a, int l, int diagonal)
{
    int i, j;
    for (i = 0; i < l; ++i) {
        float *const row = x + (int64_t)i * w->wide;
        const float *const d = w->d + (int64_t)i * w->wide;
        const int end = i + diagonal;
        for (j = 0; j < end; ++j) row[j] *= d[j];
        for (; j < w->wide; ++j) row[j] = 0;
        for (j = 0; a != NULL && j < w->wide; ++j) a[(int64_t)i * w->wide + j] = -w->beta[i] * row[j];
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

/* W = V - e^G K S, where w holds K S; u = beta W. */
UPI_CPU_KERNEL void upi_linear_rest(upi_linear_worker *w, int l, int d)
{
    int i, k;
    for (i = 0; i < l; ++i)
        for (k = 0; k < d; ++k) {
            const int64_t at = (int64_t)i * d + k;
            w->w[at] = w->v[at] - w->up[i] * w->w[at];
            w->u[at] = w->beta[i] * w->w[at];
        }
}

/* Gradients through x = (a product) * D below the diagonal, or with it: *x becomes the product's, from that of x in
 * `sign * x`, times beta where that is given; dsums gets what reaches G, and dbeta what reaches beta. */
UPI_CPU_KERNEL void upi_linear_unmask(upi_linear_worker *w, float *x, const float *product, int l,
                                      int diagonal, float sign, int times_beta)
{
    int i, j;
    for (i = 0; i < l; ++i) {
        float *const row = x + (int64_t)i * w->wide;
        const float *const d = w->d + (int64_t)i * w->wide, *const p = product + (int64_t)i * w->wide;
        const int end = i + diagonal;
        double sum = 0;
        for (j = 0; j < end; ++j) {
            const double through = (double)(sign * row[j]) * (double)p[j];
            sum += through;
            w->dsums[j] -= times_beta ? (double)w->beta[i] * through : through;
        }
        w->dsums[i] += times_beta ? (double)w->beta[i] * sum : sum;
        if (times_beta) w->dbeta[i] += (float)sum;
        for (j = 0; j < end; ++j) row[j] *= sign * (times_beta ? w->beta[i] : 1) * d[j];
        for (; j < w->wide; ++j) row[j] = 0;
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
    if (w->status == UPIPE_OK) w->status = w->ops.gemm(&w->ctx, out, x, y, flags, w->work, w->work_bytes);
}

/* ---- a chunk ---- */

/* Views of a worker's buffers, of l rows. */
UPI_INLINE upipe_view upi_linear_key(const upi_linear_worker *w, float *p, int l)
{
    return upi_linear_matrix(p, l, w->call->q.d, w->call->q.d);
}

UPI_INLINE upipe_view upi_linear_value(const upi_linear_worker *w, float *p, int l)
{
    return upi_linear_matrix(p, l, w->call->v.d, w->call->v.d);
}

UPI_INLINE upipe_view upi_linear_square(const upi_linear_worker *w, float *p, int l)
{
    return upi_linear_matrix(p, l, l, w->wide);
}

UPI_INLINE upipe_view upi_linear_state(const upi_linear_worker *w, const float *p)
{
    return upi_linear_matrix((float *)(uintptr_t)p, w->call->q.d, w->call->v.d, w->call->v.d);
}

/* K, V, the gates and U of a chunk that begins with state s; with beta also M, -beta M and W. */
UPIPE_API void upi_linear_values(upi_linear_worker *w, int64_t row, int l, int head, const float *s)
{
    const upipe_linear *a = w->call;
    upi_linear_load(w->k, a->k, row, l, head / (a->v.h / a->q.h), 1);
    upi_linear_load(a->beta.data != NULL ? w->v : w->u, a->v, row, l, head, 1);
    upi_linear_gates(w, row, l, head);
    if (a->beta.data == NULL) return;
    upi_linear_product(w, upi_linear_square(w, w->m, l), upi_linear_key(w, w->k, l),
                       upi_linear_key(w, w->k, l), UPIPE_GEMM_TRANS_B);
    upi_linear_mask(w, w->m, w->a, l, 0);
    upi_linear_product(w, upi_linear_value(w, w->w, l), upi_linear_key(w, w->k, l), upi_linear_state(w, s),
                       0);
    upi_linear_rest(w, l, a->v.d);
    upi_linear_solve(w->u, a->v.d, w->a, w->wide, 1, l, a->v.d);
}

/* Q and P. */
UPIPE_API void upi_linear_scores(upi_linear_worker *w, int64_t row, int l, int head)
{
    const upipe_linear *a = w->call;
    upi_linear_load(w->q, a->q, row, l, head / (a->v.h / a->q.h), a->scale);
    upi_linear_product(w, upi_linear_square(w, w->p, l), upi_linear_key(w, w->q, l),
                       upi_linear_key(w, w->k, l), UPIPE_GEMM_TRANS_B);
    upi_linear_mask(w, w->p, NULL, l, 1);
}

/* O, from the state that the chunk begins with. */
UPIPE_API void upi_linear_output(upi_linear_worker *w, int64_t row, int l, int head, const float *s)
{
    const upipe_linear *a = w->call;
    upi_linear_product(w, upi_linear_value(w, w->o, l), upi_linear_key(w, w->q, l), upi_linear_state(w, s),
                       0);
    upi_linear_scale(w->o, w->o, w->up, 1, l, a->v.d);
    upi_linear_product(w, upi_linear_value(w, w->o, l), upi_linear_square(w, w->p, l),
                       upi_linear_value(w, w->u, l), UPIPE_GEMM_ACCUMULATE);
    upi_linear_store(a->o, row, l, head, w->o, 1);
}

/* s becomes the state behind the chunk. */
UPIPE_API void upi_linear_advance(upi_linear_worker *w, int l, float *s)
{
    const upipe_linear *a = w->call;
    upi_linear_fade(s, w->last, (int64_t)a->q.d * a->v.d);
    upi_linear_scale(w->key, w->k, w->down, 1, l, a->q.d);
    upi_linear_product(w, upi_linear_state(w, s), upi_linear_key(w, w->key, l), upi_linear_value(w, w->u, l),
                       UPIPE_GEMM_TRANS_A | UPIPE_GEMM_ACCUMULATE);
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
        const int l = (int)((end = upipe_linear_chunk_end(a, row)) - row);
        if (upipe_linear_begins(a, row)) memset(s, 0, size * 4);
        upi_linear_values(w, row, l, head, s);
        upi_linear_scores(w, row, l, head);
        upi_linear_output(w, row, l, head, s);
        upi_linear_advance(w, l, s);
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

/* Gradients through U: du, which holds that of U, becomes that of V; dk and ds get their parts. */
UPIPE_API void upi_linear_values_bwd(upi_linear_worker *w, int l, const float *s, float *ds)
{
    const upipe_linear *a = w->call;
    int i;
    upi_linear_solve(w->du + (int64_t)(l - 1) * a->v.d, -a->v.d, w->a + (int64_t)(l - 1) * (w->wide + 1), -1,
                     -w->wide, l, a->v.d);
    for (i = 0; i < l; ++i)
        w->dbeta[i] = (float)upi_linear_dot(w->du + (int64_t)i * a->v.d, w->w + (int64_t)i * a->v.d, a->v.d);
    upi_linear_product(w, upi_linear_square(w, w->x, l), upi_linear_value(w, w->du, l),
                       upi_linear_value(w, w->u, l), UPIPE_GEMM_TRANS_B);
    upi_linear_unmask(w, w->x, w->m, l, 0, -1, 1);
    upi_linear_mirror(w->x, w->wide, l);
    upi_linear_product(w, upi_linear_key(w, w->dk, l), upi_linear_square(w, w->x, l),
                       upi_linear_key(w, w->k, l), UPIPE_GEMM_ACCUMULATE);
    upi_linear_scale(w->du, w->du, w->beta, 1, l, a->v.d);
    upi_linear_product(w, upi_linear_key(w, w->key, l), upi_linear_value(w, w->du, l), upi_linear_state(w, s),
                       UPIPE_GEMM_TRANS_B);
    upi_linear_scale(w->key, w->key, w->up, -1, l, a->q.d);
    for (i = 0; i < l; ++i)
        w->dsums[i] += upi_linear_dot(w->key + (int64_t)i * a->q.d, w->k + (int64_t)i * a->q.d, a->q.d);
    upi_linear_add(w->dk, w->key, (int64_t)l * a->q.d);
    upi_linear_scale(w->key, w->k, w->up, -1, l, a->q.d);
    upi_linear_product(w, upi_linear_state(w, ds), upi_linear_key(w, w->key, l),
                       upi_linear_value(w, w->du, l), UPIPE_GEMM_TRANS_A | UPIPE_GEMM_ACCUMULATE);
}

/* Gradients through O, whose own is in w->o: dq, dk, and du = P^T dO. */
UPIPE_API void upi_linear_output_bwd(upi_linear_worker *w, int l, const float *s)
{
    const upipe_linear *a = w->call;
    int i;
    upi_linear_product(w, upi_linear_value(w, w->du, l), upi_linear_square(w, w->p, l),
                       upi_linear_value(w, w->o, l), UPIPE_GEMM_TRANS_A);
    upi_linear_product(w, upi_linear_square(w, w->x, l), upi_linear_value(w, w->o, l),
                       upi_linear_value(w, w->u, l), UPIPE_GEMM_TRANS_B);
    upi_linear_unmask(w, w->x, w->p, l, 1, 1, 0);
    upi_linear_product(w, upi_linear_key(w, w->key, l), upi_linear_value(w, w->o, l), upi_linear_state(w, s),
                       UPIPE_GEMM_TRANS_B);
    upi_linear_scale(w->key, w->key, w->up, 1, l, a->q.d);
    for (i = 0; i < l; ++i)
        w->dsums[i] += upi_linear_dot(w->key + (int64_t)i * a->q.d, w->q + (int64_t)i * a->q.d, a->q.d);
    upi_linear_product(w, upi_linear_key(w, w->key, l), upi_linear_square(w, w->x, l),
                       upi_linear_key(w, w->k, l), UPIPE_GEMM_ACCUMULATE);
    upi_linear_add(w->dq, w->key, (int64_t)l * a->q.d);
    upi_linear_product(w, upi_linear_key(w, w->dk, l), upi_linear_square(w, w->x, l),
                       upi_linear_key(w, w->q, l), UPIPE_GEMM_TRANS_A | UPIPE_GEMM_ACCUMULATE);
}

/* Gradients through the state behind the chunk, ds: dk, and du +=. */
UPIPE_API void upi_linear_advance_bwd(upi_linear_worker *w, int l, const float *s, const float *ds)
{
    const upipe_linear *a = w->call;
    const int64_t d = a->q.d;
    int i;
    upi_linear_scale(w->key, w->k, w->down, 1, l, a->q.d);
    upi_linear_product(w, upi_linear_value(w, w->du, l), upi_linear_key(w, w->key, l),
                       upi_linear_state(w, ds), UPIPE_GEMM_ACCUMULATE);
    upi_linear_product(w, upi_linear_key(w, w->key2, l), upi_linear_value(w, w->u, l),
                       upi_linear_state(w, ds), UPIPE_GEMM_TRANS_B);
    for (i = 0; i < l; ++i) {
        const double through = upi_linear_dot(w->key + i * d, w->key2 + i * d, d);
        w->dsums[i] -= through;
        w->dsums[l - 1] += through;
    }
    w->dsums[l - 1] += exp(w->last) * upi_linear_dot(s, ds, d * a->v.d);
    upi_linear_scale(w->key2, w->key2, w->down, 1, l, a->q.d);
    upi_linear_add(w->dk, w->key2, (int64_t)l * d);
}

/* A chunk: s is the state that it begins with; ds, the gradient of the state behind it, becomes that of s. */
UPIPE_API void upi_linear_bwd_chunk(upi_linear_worker *w, const upipe_linear_grad *g, int64_t row, int l,
                                    int head, const float *s, float *ds)
{
    const upipe_linear *a = w->call;
    double sum = 0;
    int i;
    upi_linear_values(w, row, l, head, s);
    upi_linear_scores(w, row, l, head);
    upi_linear_load(w->o, g->dout, row, l, head, 1);
    memset(w->dsums, 0, (size_t)l * sizeof *w->dsums);
    upi_linear_output_bwd(w, l, s);
    upi_linear_advance_bwd(w, l, s, ds);
    upi_linear_fade(ds, w->last, (int64_t)a->q.d * a->v.d);
    upi_linear_scale(w->key, w->q, w->up, 1, l, a->q.d);
    upi_linear_product(w, upi_linear_state(w, ds), upi_linear_key(w, w->key, l), upi_linear_value(w, w->o, l),
                       UPIPE_GEMM_TRANS_A | UPIPE_GEMM_ACCUMULATE);
    if (a->beta.data != NULL) upi_linear_values_bwd(w, l, s, ds);
    upi_linear_store(g->dv, row, l, head, w->du, 1);
    for (i = l - 1; i >= 0; --i) {
        sum += w->dsums[i];
        *(float *)upipe_view_at(g->dg, row + i, head) = (float)sum;
        if (a->beta.data != NULL) *(float *)upipe_view_at(g->dbeta, row + i, head) = w->dbeta[i];
    }
}

/* The first row of chunk number `chunk`. */
UPI_INLINE int64_t upi_linear_row(const upipe_linear *a, int64_t chunk, int64_t from, int64_t row)
{
    for (; from < chunk; ++from) row = upipe_linear_chunk_end(a, row);
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
    int64_t run, chunk, row, end;
    int j;
    for (j = 0; j < group; ++j) { /* states that runs begin with */
        float *s = w->state;
        memcpy(s, a->state + (size_t)(first + j) * size, size * 4);
        for (chunk = row = 0; chunk < job->chunks; ++chunk, row = end) {
            end = upipe_linear_chunk_end(a, row);
            if (upipe_linear_begins(a, row)) memset(s, 0, size * 4);
            if (chunk % job->run == 0)
                memcpy(w->states + (size_t)(j * runs + chunk / job->run) * size, s, size * 4);
            upi_linear_values(w, row, (int)(end - row), first + j, s);
            upi_linear_advance(w, (int)(end - row), s);
        }
    }
    for (run = runs - 1; run >= 0; --run) {
        const int64_t begin = run * job->run,
                      last = begin + job->run < job->chunks ? begin + job->run : job->chunks;
        const int64_t start = upi_linear_row(a, begin, 0, 0);
        for (j = 0; j < group; ++j) { /* states that chunks of the run begin with */
            float *s = w->state + (size_t)(j * job->run) * size;
            memcpy(s, w->states + (size_t)(j * runs + run) * size, size * 4);
            for (chunk = begin, row = start; chunk + 1 < last; ++chunk, row = end, s += size) {
                end = upipe_linear_chunk_end(a, row);
                memcpy(s + size, s, size * 4);
                upi_linear_values(w, row, (int)(end - row), first + j, s);
                upi_linear_advance(w, (int)(end - row), s + size);
                if (upipe_linear_begins(a, end)) memset(s + size, 0, size * 4);
            }
        }
        for (chunk = last - 1; chunk >= begin; --chunk) {
            row = upi_linear_row(a, chunk, begin, start);
            end = upipe_linear_chunk_end(a, row);
            memset(w->dq, 0, (size_t)(end - row) * (size_t)a->q.d * 4);
            memset(w->dk, 0, (size_t)(end - row) * (size_t)a->q.d * 4);
            for (j = 0; j < group; ++j) {
                float *ds = job->g->dstate + (size_t)(first + j) * size;
                upi_linear_bwd_chunk(w, job->g, row, (int)(end - row), first + j,
                                     w->state + (size_t)(j * job->run + chunk - begin) * size, ds);
                if (upipe_linear_begins(a, row)) memset(ds, 0, size * 4);
            }
            upi_linear_store(job->g->dq, row, (int)(end - row), (int)i, w->dq, a->scale);
            upi_linear_store(job->g->dk, row, (int)(end - row), (int)i, w->dk, 1);
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
UPIPE_API void upipe_cpu_linear(upipe_linear_ops *rules)
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

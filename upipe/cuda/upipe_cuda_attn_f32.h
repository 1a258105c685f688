/* upipe_cuda_attn_f32.h -- attention in f32 storage, without tensor cores
 *
 *     upi_cuda_attn_f32_fwd(c, &attn);        upi_cuda_attn_f32_bwd(c, &grad);
 *
 * For checking a model, not for training at speed: tensor cores have no f32, and the rounding to bf16 is what
 * the kernels of upipe_cuda_attn_fwd.h are built around. Every product and sum here is an f32 FMA. Scratch is
 * the tables of a masked call (upipe_cuda_attn_mask.h), in the backward those of both sides; the same bits
 * whatever the schedule, and dk, dv continue from what they hold.
 *
 * A block of four warps holds 16 rows, four a warp; rows of the other side pass by in shared memory, 32 at a
 * time. For the scores a lane is one of those 32; for what is summed over them it is an element of the head,
 * and the next 31 lie in other lanes: element lane + 32 n, n < N.
 *     forward, dQ:  16 queries hold, keys pass        dK, dV:  16 keys hold, queries of the group's heads
 *                   pass
 * The scale comes after the product, so that forward and backward find the same score to the bit.
 * The passing rows are padded to an odd length, so that 32 lanes read 32 banks.
 */
#ifndef UPIPE_CUDA_ATTN_F32_H
#define UPIPE_CUDA_ATTN_F32_H

#include "upipe_cuda_attn_step.h"

enum {
    UPI_F32_WARPS = 4,
    UPI_F32_ROWS = 4, /* a warp's */
    UPI_F32_HELD = UPI_F32_WARPS * UPI_F32_ROWS,
    UPI_F32_THREADS = UPI_F32_WARPS * 32,
    UPI_F32_PASSING = 32
};

/* What kernels take beside the call. */
typedef struct upi_f32_masks {
    const upi_cuda_attn_run *queries, *keys; /* what each of them sees; NULL: see upi_f32_keys_of */
    int64_t ahead;                           /* a query sees keys up to its own + ahead */
    float scale, squash, slope;              /* as in upi_cuda_attn_args */
} upi_f32_masks;

/* Rows of the other side, [first, end). */
typedef struct upi_f32_run {
    int64_t first, end;
} upi_f32_run;

/* The keys that query i sees; a query beyond the last sees what that one does. */
UPI_DEVICE upi_f32_run upi_f32_keys_of(const upipe_attn &a, const upi_f32_masks &x, int64_t i)
{
    upi_f32_run run = {0, a.k.n};
    if (i >= a.q.n) i = a.q.n - 1;
    if (x.queries != NULL)
        run.first = x.queries[i].first, run.end = x.queries[i].end;
    else if (a.mask.causal && i + x.ahead + 1 < run.end)
        run.end = i + x.ahead + 1;
    return run;
}

/* The queries that see key j; likewise. */
UPI_DEVICE upi_f32_run upi_f32_queries_of(const upipe_attn &a, const upi_f32_masks &x, int64_t j)
{
    upi_f32_run run = {0, a.q.n};
    if (j >= a.k.n) j = a.k.n - 1;
    if (x.keys != NULL)
        run.first = x.keys[j].first, run.end = x.keys[j].end;
    else if (a.mask.causal && j - x.ahead > 0)
        run.first = j - x.ahead;
    return run;
}

/* Where the tiles of rows that pass begin. */
UPI_DEVICE int64_t upi_f32_begin(int64_t first, int64_t end)
{
    return first < end ? first / UPI_F32_PASSING * UPI_F32_PASSING : end;
}

/* The score of a product, rounded before lse is subtracted: of the only key that a query sees the weight is then 1.
 * Multiplies *slope with that of the soft-cap. */
UPI_DEVICE float upi_f32_score(const upi_f32_masks &x, float product, float *slope)
{
    if (x.squash != 0) product = upi_cuda_attn_tanh(upi_product(product, x.squash), slope);
    return upi_product(x.scale, product);
}

/* lse or delta of query i; `none` beyond the last. */
UPI_DEVICE float upi_f32_stat(upipe_view v, int h, int64_t i, float none)
{
    return i < v.n ? ((const float *)v.data)[i * v.n_stride + h * v.h_stride] : none;
}

/* A key's gradient, to or from registers: elements lane + 32 n. */
template <int N> UPI_DEVICE void upi_f32_grad_get(float x[N], upipe_view v, int h, int64_t row)
{
    const float *from = (const float *)v.data + row * v.n_stride + h * v.h_stride;
    UPI_UNROLL
    for (int n = 0; n < N; ++n) {
        const int e = (int)(threadIdx.x % 32) + 32 * n;
        x[n] = row < v.n && e < v.d ? from[e] : 0.0f;
    }
}

template <int N> UPI_DEVICE void upi_f32_grad_put(const float x[N], upipe_view v, int h, int64_t row)
{
    float *to = (float *)v.data + row * v.n_stride + h * v.h_stride;
    UPI_UNROLL
    for (int n = 0; n < N; ++n) {
        const int e = (int)(threadIdx.x % 32) + 32 * n;
        if (row < v.n && e < v.d) to[e] = x[n];
    }
}

/* The rows held: [UPI_F32_HELD][d], zeros beyond the last row. */
template <int N> UPI_DEVICE void upi_f32_hold(float *to, upipe_view v, int h, int64_t first)
{
    const float *from = (const float *)v.data + h * v.h_stride;
    int i;
    for (i = (int)threadIdx.x; i < UPI_F32_HELD * v.d; i += UPI_F32_THREADS) {
        int64_t row = first + i / v.d;
        to[i] = row < v.n ? from[row * v.n_stride + i % v.d] : 0.0f;
    }
}

/* The rows that pass: [UPI_F32_PASSING][d | 1], zeros beyond the last one. */
template <int N> UPI_DEVICE void upi_f32_pass(float *to, upipe_view v, int h, int64_t first)
{
    const float *from = (const float *)v.data + h * v.h_stride;
    int i;
    for (i = (int)threadIdx.x; i < UPI_F32_PASSING * v.d; i += UPI_F32_THREADS) {
        int64_t row = first + i / v.d;
        to[i / v.d * (v.d | 1) + i % v.d] = row < v.n ? from[row * v.n_stride + i % v.d] : 0.0f;
    }
}

/* s[r] = <held row r of the warp, the lane's passing row> */
template <int N>
UPI_DEVICE void upi_f32_dots(float s[UPI_F32_ROWS], const float *held, const float *passing, int d)
{
    const float *mine = passing + (int)(threadIdx.x % 32) * (d | 1);
    const float *rows = held + (int)(threadIdx.x / 32) * UPI_F32_ROWS * d;
    int r, x;
    UPI_UNROLL
    for (r = 0; r < UPI_F32_ROWS; ++r) s[r] = 0.0f;
    UPI_UNROLL_4
    for (x = 0; x < d; ++x) {
        UPI_UNROLL
        for (r = 0; r < UPI_F32_ROWS; ++r) s[r] = fmaf(rows[r * d + x], mine[x], s[r]);
    }
}

/* sum[n] += the sum over the 32 passing rows of weight (that lane's) * their element lane + 32 n, of rows that are
 * seen: what is not may hold a NaN. */
template <int N>
UPI_DEVICE void upi_f32_gather(float sum[N], float weight, int seen, const float *passing, int d)
{
    const uint32_t those = __ballot_sync(0xffffffffu, seen);
    int lane = (int)(threadIdx.x % 32), j, n;
    float part[N];
    UPI_UNROLL
    for (n = 0; n < N; ++n) part[n] = 0.0f;
    UPI_UNROLL_4
    for (j = 0; j < UPI_F32_PASSING; ++j) {
        float w = __shfl_sync(0xffffffffu, weight, j);
        UPI_UNROLL
        for (n = 0; n < N; ++n)
            if (those >> j & 1 && lane + 32 * n < d)
                part[n] = fmaf(w, passing[j * (d | 1) + lane + 32 * n], part[n]);
    }
    UPI_UNROLL
    for (n = 0; n < N; ++n) sum[n] += part[n];
}

UPI_DEVICE float upi_f32_warp_max(float v)
{
    int step;
    UPI_UNROLL
    for (step = 16; step > 0; step /= 2) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, step));
    return v;
}

UPI_DEVICE float upi_f32_warp_sum(float v)
{
    int step;
    UPI_UNROLL
    for (step = 16; step > 0; step /= 2) v += __shfl_xor_sync(0xffffffffu, v, step);
    return v;
}

/* One row's result, alone or brought together with an older one: `sum` weights, measured from the score `top`. */
template <int N>
UPI_DEVICE void upi_f32_finish(const upipe_attn &a, int h, int64_t i, const float o[N], float top, float sum)
{
    int lane = (int)(threadIdx.x % 32), n;
    float *lse = (float *)a.lse.data + i * a.lse.n_stride + h * a.lse.h_stride;
    float *out = (float *)a.o.data + i * a.o.n_stride + h * a.o.h_stride;
    upi_cuda_attn_end end = upi_cuda_attn_end_of(top, 1, sum);
    if (a.mask.sinks != NULL) upi_cuda_attn_add_sink(&end, a.mask.sinks[h], top, sum);
    if (a.merge) {
        upi_cuda_attn_merge(&end, *lse);
        __syncwarp(); /* every lane has read what lane 0 overwrites */
    }
    UPI_UNROLL
    for (n = 0; n < N; ++n) {
        int x = lane + 32 * n;
        if (x < a.o.d) out[x] = end.keep != 0 ? fmaf(end.keep, out[x], o[n] * end.weight) : o[n] * end.weight;
    }
    if (lane == 0) *lse = end.lse;
}

template <int N>
UPI_KERNEL(UPI_F32_THREADS, 1)
void upi_attn_f32_fwd(const upipe_attn a, const upi_f32_masks x)
{
    UPI_SHARED(float, buf);
    const int d = a.q.d, v_dim = a.v.d, lane = (int)(threadIdx.x % 32), warp = (int)(threadIdx.x / 32);
    const int64_t tiles = (a.q.n + UPI_F32_HELD - 1) / UPI_F32_HELD,
                  first = blockIdx.x % tiles * UPI_F32_HELD;
    const int h = (int)(blockIdx.x / tiles), kv = h / (a.q.h / a.k.h);
    float *q = buf, *k = q + UPI_F32_HELD * d, *v = k + UPI_F32_PASSING * (d | 1);
    float o[UPI_F32_ROWS][N], m[UPI_F32_ROWS], l[UPI_F32_ROWS], s[UPI_F32_ROWS];
    const int64_t end = upi_f32_keys_of(a, x, first + UPI_F32_HELD - 1).end;
    const int64_t begin = upi_f32_begin(upi_f32_keys_of(a, x, first).first, end);
    int64_t j;
    int r, n;
    UPI_UNROLL
    for (r = 0; r < UPI_F32_ROWS; ++r) {
        m[r] = -INFINITY;
        l[r] = 0.0f;
        UPI_UNROLL
        for (n = 0; n < N; ++n) o[r][n] = 0.0f;
    }
    upi_f32_hold<N>(q, a.q, h, first);
    for (j = begin; j < end; j += UPI_F32_PASSING) {
        __syncthreads(); /* the rows before are not read any more */
        upi_f32_pass<N>(k, a.k, kv, j);
        upi_f32_pass<N>(v, a.v, kv, j);
        __syncthreads();
        upi_f32_dots<N>(s, q, k, d);
        UPI_UNROLL
        for (r = 0; r < UPI_F32_ROWS; ++r) {
            const upi_f32_run sees = upi_f32_keys_of(a, x, first + warp * UPI_F32_ROWS + r);
            int seen = j + lane >= sees.first && j + lane < sees.end;
            float slope = 1, score = seen ? upi_f32_score(x, s[r], &slope) : -INFINITY,
                  top = fmaxf(m[r], upi_f32_warp_max(score));
            float base = upi_cuda_attn_base(top), p = expf(score - base), shrink = expf(m[r] - base);
            m[r] = top;
            l[r] = fmaf(l[r], shrink, p); /* the lane's keys alone */
            UPI_UNROLL
            for (n = 0; n < N; ++n) o[r][n] *= shrink;
            upi_f32_gather<N>(o[r], p, seen, v, v_dim);
        }
    }
    UPI_UNROLL
    for (r = 0; r < UPI_F32_ROWS; ++r) {
        int64_t i = first + warp * UPI_F32_ROWS + r;
        float sum = upi_f32_warp_sum(l[r]);
        if (i < a.q.n) upi_f32_finish<N>(a, h, i, o[r], m[r], sum);
    }
}

template <int N>
UPI_KERNEL(UPI_F32_THREADS, 1)
void upi_attn_f32_dq(const upipe_attn_grad g, const upi_f32_masks x)
{
    UPI_SHARED(float, buf);
    const upipe_attn &a = g.a;
    const int d = a.q.d, v_dim = a.v.d, lane = (int)(threadIdx.x % 32), warp = (int)(threadIdx.x / 32);
    const int64_t tiles = (a.q.n + UPI_F32_HELD - 1) / UPI_F32_HELD,
                  first = blockIdx.x % tiles * UPI_F32_HELD;
    const int h = (int)(blockIdx.x / tiles), kv = h / (a.q.h / a.k.h);
    float *q = buf, *dout = q + UPI_F32_HELD * d, *k = dout + UPI_F32_HELD * v_dim;
    float *v = k + UPI_F32_PASSING * (d | 1);
    float dq[UPI_F32_ROWS][N], lse[UPI_F32_ROWS], delta[UPI_F32_ROWS], s[UPI_F32_ROWS], dp[UPI_F32_ROWS];
    const int64_t end = upi_f32_keys_of(a, x, first + UPI_F32_HELD - 1).end;
    const int64_t begin = upi_f32_begin(upi_f32_keys_of(a, x, first).first, end);
    int64_t j;
    int r, n;
    UPI_UNROLL
    for (r = 0; r < UPI_F32_ROWS; ++r) {
        int64_t i = first + warp * UPI_F32_ROWS + r;
        lse[r] = upi_f32_stat(a.lse, h, i, -INFINITY);
        delta[r] = upi_f32_stat(g.delta, h, i, 0.0f);
        UPI_UNROLL
        for (n = 0; n < N; ++n) dq[r][n] = 0.0f;
    }
    upi_f32_hold<N>(q, a.q, h, first);
    upi_f32_hold<N>(dout, g.dout, h, first);
    for (j = begin; j < end; j += UPI_F32_PASSING) {
        __syncthreads();
        upi_f32_pass<N>(k, a.k, kv, j);
        upi_f32_pass<N>(v, a.v, kv, j);
        __syncthreads();
        upi_f32_dots<N>(s, q, k, d);
        upi_f32_dots<N>(dp, dout, v, v_dim);
        UPI_UNROLL
        for (r = 0; r < UPI_F32_ROWS; ++r) {
            const upi_f32_run sees = upi_f32_keys_of(a, x, first + warp * UPI_F32_ROWS + r);
            int seen = j + lane >= sees.first && j + lane < sees.end && lse[r] != -INFINITY;
            float slope = x.slope, p = seen ? expf(upi_f32_score(x, s[r], &slope) - lse[r]) : 0.0f;
            upi_f32_gather<N>(dq[r], p * slope * (dp[r] - delta[r]), seen, k, d);
        }
    }
    UPI_UNROLL
    for (r = 0; r < UPI_F32_ROWS; ++r) {
        int64_t i = first + warp * UPI_F32_ROWS + r;
        float *out = (float *)g.dq.data + i * g.dq.n_stride + h * g.dq.h_stride;
        UPI_UNROLL
        for (n = 0; n < N; ++n)
            if (i < a.q.n && lane + 32 * n < d)
                out[lane + 32 * n] = a.merge ? out[lane + 32 * n] + dq[r][n] : dq[r][n];
    }
}

template <int N>
UPI_KERNEL(UPI_F32_THREADS, 1)
void upi_attn_f32_dkv(const upipe_attn_grad g, const upi_f32_masks x)
{
    UPI_SHARED(float, buf);
    const upipe_attn &a = g.a;
    const int d = a.q.d, v_dim = a.v.d, lane = (int)(threadIdx.x % 32), warp = (int)(threadIdx.x / 32);
    const int64_t tiles = (a.k.n + UPI_F32_HELD - 1) / UPI_F32_HELD,
                  first = blockIdx.x % tiles * UPI_F32_HELD;
    const int kv = (int)(blockIdx.x / tiles), group = a.q.h / a.k.h;
    float *k = buf, *v = k + UPI_F32_HELD * d, *q = v + UPI_F32_HELD * v_dim;
    float *dout = q + UPI_F32_PASSING * (d | 1);
    float dk[UPI_F32_ROWS][N], dv[UPI_F32_ROWS][N], s[UPI_F32_ROWS], dp[UPI_F32_ROWS];
    const int64_t end = upi_f32_queries_of(a, x, first + UPI_F32_HELD - 1).end;
    const int64_t begin = upi_f32_begin(upi_f32_queries_of(a, x, first).first, end);
    int64_t i;
    int r, h;
    UPI_UNROLL
    for (r = 0; r < UPI_F32_ROWS; ++r) {
        int64_t j = first + warp * UPI_F32_ROWS + r;
        upi_f32_grad_get<N>(dk[r], g.dk, kv, j);
        upi_f32_grad_get<N>(dv[r], g.dv, kv, j);
    }
    upi_f32_hold<N>(k, a.k, kv, first);
    upi_f32_hold<N>(v, a.v, kv, first);
    for (h = kv * group; h < (kv + 1) * group; ++h) {
        for (i = begin; i < end; i += UPI_F32_PASSING) {
            float lse = upi_f32_stat(a.lse, h, i + lane, -INFINITY);
            float delta = upi_f32_stat(g.delta, h, i + lane, 0.0f);
            __syncthreads();
            upi_f32_pass<N>(q, a.q, h, i);
            upi_f32_pass<N>(dout, g.dout, h, i);
            __syncthreads();
            upi_f32_dots<N>(s, k, q, d);
            upi_f32_dots<N>(dp, v, dout, v_dim);
            UPI_UNROLL
            for (r = 0; r < UPI_F32_ROWS; ++r) {
                const int64_t j = first + warp * UPI_F32_ROWS + r;
                const upi_f32_run seen_by = upi_f32_queries_of(a, x, j);
                int seen =
                    j < a.k.n && i + lane >= seen_by.first && i + lane < seen_by.end && lse != -INFINITY;
                float slope = x.slope, p = seen ? expf(upi_f32_score(x, s[r], &slope) - lse) : 0.0f;
                upi_f32_gather<N>(dv[r], p, seen, dout, v_dim);
                upi_f32_gather<N>(dk[r], p * slope * (dp[r] - delta), seen, q, d);
            }
        }
    }
    UPI_UNROLL
    for (r = 0; r < UPI_F32_ROWS; ++r) {
        int64_t j = first + warp * UPI_F32_ROWS + r;
        upi_f32_grad_put<N>(dk[r], g.dk, kv, j);
        upi_f32_grad_put<N>(dv[r], g.dv, kv, j);
    }
}

/* ---- host ---- */

UPIPE_API upipe_status upi_f32_blocks(upipe_ctx *c, int64_t rows, int heads, unsigned *blocks)
{
    int64_t n;
    if (!upipe_mul(&n, (rows + UPI_F32_HELD - 1) / UPI_F32_HELD, heads) || n > INT32_MAX)
        return upipe_fail(&c->err, UPIPE_ERR_UNSUPPORTED, "attention: %lld rows of %d heads in one call",
                          (long long)rows, heads);
    *blocks = (unsigned)n;
    return UPIPE_OK;
}

/* Bytes of shared memory of a kernel that holds so many elements a row, and lets a row of d and one of v_dim
 * pass. */
UPIPE_API unsigned upi_f32_shared(int held, int d, int v_dim)
{
    return (unsigned)(UPI_F32_HELD * held + UPI_F32_PASSING * ((d | 1) + (v_dim | 1))) * 4;
}

/* The tables that are there, the queries' first. */
UPIPE_API upi_f32_masks upi_f32_masks_make(const upipe_attn *a, int backward)
{
    const int masked = upi_cuda_attn_masked(a);
    const size_t queries = masked ? upi_cuda_attn_runs_bytes(a->q.n) : 0;
    upi_f32_masks x;
    memset(&x, 0, sizeof x);
    if (masked) x.queries = (const upi_cuda_attn_run *)a->work;
    if (masked && backward) x.keys = (const upi_cuda_attn_run *)((const char *)a->work + queries);
    x.ahead = upi_attn_ahead(a);
    x.slope = upipe_attn_scale(a);
    x.scale = a->mask.softcap > 0 ? a->mask.softcap : x.slope;
    x.squash = a->mask.softcap > 0 ? x.slope / a->mask.softcap : 0;
    return x;
}

template <int N> UPIPE_API upipe_status upi_cuda_attn_f32_fwd_n(upipe_ctx *c, const upipe_attn *a)
{
    const upi_f32_masks x = upi_f32_masks_make(a, 0);
    unsigned blocks = 0, shared = upi_f32_shared(a->q.d, a->q.d, a->v.d);
    UPIPE_TRY(upi_f32_blocks(c, a->q.n, a->q.h, &blocks));
    if (blocks == 0) return UPIPE_OK;
    /* the most that this kernel may need: ranks that are threads allow it with other head dims */
    UPIPE_TRY(UPI_ALLOW_SHARED(c, (upi_attn_f32_fwd<N>), upi_f32_shared(32 * N, 32 * N, 32 * N)));
    if (x.queries != NULL) UPIPE_TRY(upi_cuda_attn_query_runs(c, a, (upi_cuda_attn_run *)x.queries));
    return UPI_LAUNCH(c, (upi_attn_f32_fwd<N>), blocks, UPI_F32_THREADS, shared, *a, x);
}

template <int N> UPIPE_API upipe_status upi_cuda_attn_f32_bwd_n(upipe_ctx *c, const upipe_attn_grad *g)
{
    const upipe_attn *a = &g->a;
    const upi_f32_masks x = upi_f32_masks_make(a, 1);
    unsigned queries = 0, keys = 0, shared = upi_f32_shared(a->q.d + a->v.d, a->q.d, a->v.d);
    const unsigned most = upi_f32_shared(64 * N, 32 * N, 32 * N);
    UPIPE_TRY(upi_f32_blocks(c, a->q.n, a->q.h, &queries));
    UPIPE_TRY(upi_f32_blocks(c, a->k.n, a->k.h, &keys));
    if (queries == 0) return UPIPE_OK;
    UPIPE_TRY(UPI_ALLOW_SHARED(c, (upi_attn_f32_dq<N>), most));
    UPIPE_TRY(UPI_ALLOW_SHARED(c, (upi_attn_f32_dkv<N>), most));
    if (x.queries != NULL) {
        UPIPE_TRY(upi_cuda_attn_query_runs(c, a, (upi_cuda_attn_run *)x.queries));
        UPIPE_TRY(upi_cuda_attn_key_runs(c, a, (upi_cuda_attn_run *)x.keys));
    }
    UPIPE_TRY(UPI_LAUNCH(c, (upi_attn_f32_dq<N>), queries, UPI_F32_THREADS, shared, *g, x));
    if (keys == 0) return UPIPE_OK;
    return UPI_LAUNCH(c, (upi_attn_f32_dkv<N>), keys, UPI_F32_THREADS, shared, *g, x);
}

/* The table's entries where q is f32, but for the sinks' gradients; arguments are checked. */
UPIPE_API upipe_status upi_cuda_attn_f32_fwd(upipe_ctx *c, const upipe_attn *a)
{
    const int columns = a->q.d > a->v.d ? a->q.d : a->v.d;
    UPIPE_TRY(upi_cuda_attn_check_masks(c, a));
    if (columns <= 64) return upi_cuda_attn_f32_fwd_n<2>(c, a);
    return columns <= 128 ? upi_cuda_attn_f32_fwd_n<4>(c, a) : upi_cuda_attn_f32_fwd_n<8>(c, a);
}

UPIPE_API upipe_status upi_cuda_attn_f32_bwd(upipe_ctx *c, const upipe_attn_grad *g)
{
    const upipe_attn *a = &g->a;
    const int columns = a->q.d > a->v.d ? a->q.d : a->v.d;
    UPIPE_TRY(upi_cuda_attn_check_masks(c, a));
    if (columns <= 64) return upi_cuda_attn_f32_bwd_n<2>(c, g);
    return columns <= 128 ? upi_cuda_attn_f32_bwd_n<4>(c, g) : upi_cuda_attn_f32_bwd_n<8>(c, g);
}

#endif

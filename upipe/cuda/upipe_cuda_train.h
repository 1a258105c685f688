/* upipe_cuda_train.h -- what a model needs around its attention        backend cuda, includes cuda_rows
 *
 * Fills the table's swiglu, swiglu_bwd, cross_entropy, embed, embed_bwd, bias_bwd, total and adamw.
 *
 *     upi_cuda_swiglu(...)            y [n][h][d] = silu(gate) * up
 *     upi_cuda_cross_entropy(...)     logits [n][1][V] -> loss [n] and, if wanted, its gradient
 *     upi_cuda_embed(...)             x [n][1][D] = rows of table [V][1][D]
 *     upi_cuda_total(...)             one f64 number of a whole tensor
 *     upi_cuda_adamw(...)             w, m, v [n]
 *
 * As in upipe_cuda_rows.h an element has one thread and a sum one order: nothing is added atomically, results
 * have the same bits in every run and on every device of one kind. Targets and tokens lie in the device's
 * memory, where only the kernel sees them: a target beyond the last column makes its row's loss and gradient
 * NaN; a token that the table lacks makes its row of x NaN, and its gradient goes nowhere.
 */
#ifndef UPIPE_CUDA_TRAIN_H
#define UPIPE_CUDA_TRAIN_H

#include "upipe_cuda_rows.h"

#define UPI_NAN upi_as_float(0x7fc00000u)

/* ---- the gated unit ---- */

/* s = 1 / (1 + e^-z) and rest = 1 - s, each to full relative precision: from e^-|z|, which does not
 * overflow. */
UPI_DEVICE void upi_sigmoid(float z, float *s, float *rest)
{
    float e = expf(-fabsf(z)), large = 1.0f / (1.0f + e), small = e * large;
    *s = z < 0 ? small : large;
    *rest = z < 0 ? large : small;
}

template <int TYPES>
UPI_KERNEL(256, 1)
void upi_swiglu_rows(upipe_view y, upipe_view gate, upipe_view up, upi_span s)
{
    UPI_EACH_TEAM(s, first)
    {
        upi_place p = upi_place_of(s, first);
        upi_numbers g = upi_view_get<TYPES>(gate, p, s.vec), u = upi_view_get<TYPES>(up, p, s.vec);
        int l;
        UPI_UNROLL
        for (l = 0; l < UPI_EIGHT; ++l) {
            float one, rest;
            upi_sigmoid(g.v[l], &one, &rest);
            g.v[l] = g.v[l] * one * u.v[l];
        }
        upi_view_put<TYPES>(y, p, s.vec, g);
    }
}

UPIPE_API upipe_status upi_cuda_swiglu(upipe_ctx *c, upipe_view y, upipe_view gate, upipe_view up)
{
    upipe_view v[3];
    upi_span s;
    UPIPE_TRY(upipe_check_swiglu(c, y, gate, up));
    if (y.n == 0) return UPIPE_OK;
    v[0] = y;
    v[1] = gate;
    v[2] = up;
    s = upi_span_of(v, 3, 1);
    return UPI_LAUNCH_TYPES(c, upi_types(v, 3), upi_swiglu_rows, upi_span_grid(c, s), UPI_BLOCK, 0, y, gate,
                            up, s);
}

/* The slope s (1 + g (1 - s)) comes first: it lies within -0.1 .. 1.1 for any finite g. */
template <int TYPES>
UPI_KERNEL(256, 1)
void upi_swiglu_bwd_rows(upipe_view gate, upipe_view up, upipe_view dy, upi_span s)
{
    UPI_EACH_TEAM(s, first)
    {
        upi_place p = upi_place_of(s, first);
        upi_numbers g = upi_view_get<TYPES>(gate, p, s.vec), u = upi_view_get<TYPES>(up, p, s.vec);
        upi_numbers o = upi_view_get<TYPES>(dy, p, s.vec);
        int l;
        UPI_UNROLL
        for (l = 0; l < UPI_EIGHT; ++l) {
            float one, rest, slope, silu;
            upi_sigmoid(g.v[l], &one, &rest);
            slope = one * fmaf(g.v[l], rest, 1.0f);
            silu = g.v[l] * one;
            g.v[l] = slope * u.v[l] * o.v[l];
            u.v[l] = silu * o.v[l];
        }
        upi_view_put<TYPES>(gate, p, s.vec, g);
        upi_view_put<TYPES>(up, p, s.vec, u);
    }
}

UPIPE_API upipe_status upi_cuda_swiglu_bwd(upipe_ctx *c, upipe_view gate, upipe_view up, upipe_view dy)
{
    upipe_view v[3];
    upi_span s;
    UPIPE_TRY(upipe_check_swiglu_bwd(c, gate, up, dy));
    if (dy.n == 0) return UPIPE_OK;
    v[0] = dy;
    v[1] = gate;
    v[2] = up;
    s = upi_span_of(v, 3, 1);
    return UPI_LAUNCH_TYPES(c, upi_types(v, 3), upi_swiglu_bwd_rows, upi_span_grid(c, s), UPI_BLOCK, 0, gate,
                            up, dy, s);
}

/* ---- cross entropy ---- */

/* The greatest x of the block's threads, for all of them; NaNs are left aside. */
UPI_DEVICE float upi_block_max(float x, float *buf)
{
    int step, w;
    for (step = 1; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    __syncthreads();
    if (threadIdx.x % 32 == 0) buf[threadIdx.x / 32] = x;
    __syncthreads();
    x = buf[0];
    for (w = 1; w < UPI_BLOCK / 32; ++w) x = fmaxf(x, buf[w]);
    return x;
}

/* A block has a row, and walks along it once for the greatest logit and the sum, once for the gradient.
 *
 * Each thread keeps the greatest logit that it has seen and the sum of e^(logit - greatest) of all others
 * than the target. With the target t apart, 1 - p[t] = others / sum: neither the gradient of a target whose
 * probability is almost 1 nor its loss, log(1 + others) where it is the greatest, is left to a difference.
 */
template <int TYPES>
UPI_KERNEL(256, 1)
void upi_cross_entropy_rows(upipe_view logits, upipe_view grad, float *losses, const int32_t *targets,
                            float scale, int vec)
{
    UPI_SHARED(float, buf);
    int64_t i, k, d = logits.d, begin = threadIdx.x * UPI_EIGHT, step = UPI_BLOCK * UPI_EIGHT;
    for (i = blockIdx.x; i < logits.n; i += gridDim.x) {
        const float *row = (const float *)upi_row_at(logits, i, 0);
        char *to = grad.data != NULL ? upi_row_at(grad, i, 0) : NULL;
        int64_t target = targets[i];
        float most = -INFINITY, top, others = 0, at, sum, factor, own;
        int l;
        if (target < 0 || target >= d) {
            upi_numbers same;
            UPI_UNROLL
            for (l = 0; l < UPI_EIGHT; ++l) same.v[l] = target < 0 ? 0.0f : UPI_NAN;
            for (k = begin; to != NULL && k < d; k += step) upi_put<TYPES>(to, grad.dtype, k, d, vec, same);
            if (threadIdx.x == 0) losses[i] = target < 0 ? 0.0f : UPI_NAN;
            continue;
        }
        for (k = begin; k < d; k += step) {
            upi_numbers x = upi_get<UPI_ALL_F32>(row, UPIPE_F32, k, d, vec);
            float before = most, base;
            UPI_UNROLL
            for (l = 0; l < UPI_EIGHT; ++l)
                if (k + l < d) most = fmaxf(most, x.v[l]);
            base = most == -INFINITY ? 0.0f : most; /* all are -inf so far: e^(-inf - -inf) is no number */
            others *= expf(before - base);
            UPI_UNROLL
            for (l = 0; l < UPI_EIGHT; ++l)
                if (k + l < d && k + l != target) others += expf(x.v[l] - base);
        }
        at = row[target];
        top = upi_block_max(most, buf);
        others = upi_team_sum(others * expf(most - top), 8, buf);
        own = expf(at - top);
        sum = others + own;
        factor = scale / sum;
        if (threadIdx.x == 0) losses[i] = (at == top ? log1pf(others) : logf(sum)) + (top - at);
        for (k = begin; to != NULL && k < d; k += step) {
            upi_numbers x = upi_get<UPI_ALL_F32>(row, UPIPE_F32, k, d, vec);
            UPI_UNROLL
            for (l = 0; l < UPI_EIGHT; ++l)
                x.v[l] = k + l == target ? -(scale * (others / sum)) : expf(x.v[l] - top) * factor;
            upi_put<TYPES>(to, grad.dtype, k, d, vec, x);
        }
    }
}

UPIPE_API upipe_status upi_cuda_cross_entropy(upipe_ctx *c, const upipe_cross_entropy *x)
{
    int64_t most = (int64_t)upi_cuda_self(c)->processors * UPI_WAVES;
    upipe_view v[2];
    unsigned grid;
    int vec;
    UPIPE_TRY(upipe_check_cross_entropy(c, x));
    if (x->logits.n == 0) return UPIPE_OK;
    v[0] = x->logits;
    v[1] = x->grad.data != NULL ? x->grad : x->logits;
    vec = upi_span_of(v, 2, 0).vec;
    grid = (unsigned)(x->logits.n < most ? x->logits.n : most);
    return v[1].dtype == UPIPE_F32
               ? UPI_LAUNCH(c, (upi_cross_entropy_rows<UPI_ALL_F32>), grid, UPI_BLOCK, UPI_TEAM_BUF,
                            x->logits, x->grad, x->loss, x->targets, x->scale, vec)
               : UPI_LAUNCH(c, (upi_cross_entropy_rows<UPI_ALL_BF16>), grid, UPI_BLOCK, UPI_TEAM_BUF,
                            x->logits, x->grad, x->loss, x->targets, x->scale, vec);
}

/* ---- embedding ---- */

template <int TYPES>
UPI_KERNEL(256, 1)
void upi_embed_rows(upipe_view x, upipe_view table, const int32_t *tokens, upi_span s)
{
    UPI_EACH_TEAM(s, first)
    {
        upi_place p = upi_place_of(s, first), from = p;
        if (p.d == 0) continue;
        from.i = tokens[p.i];
        if (from.i < 0 || from.i >= table.n) {
            upi_numbers none;
            int l;
            UPI_UNROLL
            for (l = 0; l < UPI_EIGHT; ++l) none.v[l] = UPI_NAN;
            upi_view_put<TYPES>(x, p, s.vec, none);
        } else if (TYPES == UPI_MIXED) {
            upi_view_put<TYPES>(x, p, s.vec, upi_view_get<TYPES>(table, from, s.vec));
        } else {
            upi_eight_store<TYPES>(
                upi_row_at(x, p.i, 0), x.dtype, p.k, p.d, s.vec,
                upi_eight_load<TYPES>(upi_row_at(table, from.i, 0), table.dtype, p.k, p.d, s.vec));
        }
    }
}

UPIPE_API upipe_status upi_cuda_embed(upipe_ctx *c, upipe_view x, upipe_view table, const int32_t *tokens)
{
    upipe_view v[2];
    upi_span s;
    UPIPE_TRY(upipe_check_embed(c, "embed", x, table, tokens));
    if (x.n == 0) return UPIPE_OK;
    v[0] = x;
    v[1] = table;
    s = upi_span_of(v, 2, 0);
    if (table.n > 1 && table.n_step * (int64_t)upipe_dtype_bytes(table.dtype) % 16 != 0) s.vec = 0;
    return UPI_LAUNCH_TYPES(c, upi_types(v, 2), upi_embed_rows, upi_span_grid(c, s), UPI_BLOCK, 0, x, table,
                            tokens, s);
}

enum {
    UPI_EMBED_CLASSES = UPI_BLOCK / 32, /* one a warp of a block */
    UPI_EMBED_WINDOW = 4                /* tokens in flight */
};

/* A block has 32 columns, one a lane; a warp has the tokens of one class (id mod 8), which meet no other
 * warp's rows, and adds them in order. It fetches the rows of a few tokens at once, so the first of equal
 * tokens in that window hands its sum to the next. */
template <int TYPES>
UPI_KERNEL(256, 1)
void upi_embed_bwd_rows(upipe_view dtable, upipe_view dx, const int32_t *tokens)
{
    int lane = threadIdx.x % 32, kind = threadIdx.x / 32, u, e;
    int64_t k = (int64_t)blockIdx.x * 32 + lane, base;
    int32_t next = lane < dx.n ? tokens[lane] : -1;
    for (base = 0; base < dx.n; base += 32) {
        int32_t id = next;
        int mine = id >= 0 && id < dtable.n && id % UPI_EMBED_CLASSES == kind;
        uint32_t left = __ballot_sync(0xffffffffu, mine);
        next = base + 32 + lane < dx.n ? tokens[base + 32 + lane] : -1;
        while (left != 0) {
            int32_t ids[UPI_EMBED_WINDOW];
            float sum[UPI_EMBED_WINDOW], x[UPI_EMBED_WINDOW];
            UPI_UNROLL
            for (u = 0; u < UPI_EMBED_WINDOW; ++u) {
                uint32_t low = left & (0u - left);
                int at = low != 0 ? (int)(upi_as_bits((float)low) >> 23) - 127 : 0; /* its bit's number */
                int32_t row = __shfl_sync(0xffffffffu, id, at);
                ids[u] = low != 0 ? row : -1;
                left ^= low;
                sum[u] = x[u] = 0;
                if (ids[u] >= 0 && k < dx.d) {
                    x[u] = upi_get1<TYPES>(upi_row_at(dx, base + at, 0), dx.dtype, k);
                    sum[u] = *((const float *)upi_row_at(dtable, ids[u], 0) + k);
                }
            }
            UPI_UNROLL
            for (u = 0; u < UPI_EMBED_WINDOW; ++u) {
                sum[u] += x[u];
                UPI_UNROLL
                for (e = u + 1; e < UPI_EMBED_WINDOW; ++e)
                    if (ids[e] == ids[u]) sum[e] = sum[u];
                if (ids[u] >= 0 && k < dx.d) *((float *)upi_row_at(dtable, ids[u], 0) + k) = sum[u];
            }
        }
    }
}

UPIPE_API upipe_status upi_cuda_embed_bwd(upipe_ctx *c, upipe_view dtable, upipe_view dx,
                                          const int32_t *tokens)
{
    unsigned grid = (unsigned)((dx.d + 31) / 32);
    UPIPE_TRY(upipe_check_embed_bwd(c, dtable, dx, tokens));
    if (dx.n == 0) return UPIPE_OK;
    return dx.dtype == UPIPE_F32
               ? UPI_LAUNCH(c, (upi_embed_bwd_rows<UPI_ALL_F32>), grid, UPI_BLOCK, 0, dtable, dx, tokens)
               : UPI_LAUNCH(c, (upi_embed_bwd_rows<UPI_ALL_BF16>), grid, UPI_BLOCK, 0, dtable, dx, tokens);
}

/* ---- the gradient of a bias ---- */

enum {
    UPI_BIAS_COLUMNS = 32,
    UPI_BIAS_PARTS = UPI_BLOCK / UPI_BIAS_COLUMNS
}; /* of a block: a warp sums a part */

/* db += sums down the columns: eight warps sum as many parts of UPIPE_SUM_ROWS tokens, which the first one adds
 * in their order. */
template <int TYPES> UPI_KERNEL(256, 1) void upi_bias_columns(float *db, upipe_view dy)
{
    UPI_SHARED(float, buf);
    int lane = threadIdx.x % UPI_BIAS_COLUMNS, warp = threadIdx.x / UPI_BIAS_COLUMNS, u;
    int64_t column = (int64_t)blockIdx.x * UPI_BIAS_COLUMNS + lane, j = column / dy.d, k = column % dy.d,
            token;
    int here = column < (int64_t)dy.h * dy.d, adds = here && warp == 0;
    float sum = adds ? db[column] : 0;
    for (token = 0; token < dy.n; token += UPI_BIAS_PARTS * UPIPE_SUM_ROWS) {
        int64_t i = token + warp * UPIPE_SUM_ROWS,
                end = i + UPIPE_SUM_ROWS < dy.n ? i + UPIPE_SUM_ROWS : dy.n;
        float part = 0;
        for (; here && i < end; ++i) part += upi_get1<TYPES>(upi_row_at(dy, i, j), dy.dtype, k);
        buf[threadIdx.x] = part;
        __syncthreads();
        for (u = 0; adds && u < UPI_BIAS_PARTS; ++u) sum += buf[u * UPI_BIAS_COLUMNS + lane];
        __syncthreads();
    }
    if (adds) db[column] = sum;
}

UPIPE_API upipe_status upi_cuda_bias_bwd(upipe_ctx *c, float *db, upipe_view dy)
{
    int64_t columns = (int64_t)dy.h * dy.d;
    UPIPE_TRY(upipe_check_bias_bwd(c, db, dy));
    if (dy.n == 0) return UPIPE_OK;
    return UPI_LAUNCH_TYPES(c, upi_types(&dy, 1), upi_bias_columns,
                            (unsigned)((columns + UPI_BIAS_COLUMNS - 1) / UPI_BIAS_COLUMNS), UPI_BLOCK,
                            UPI_BLOCK * 4, db, dy);
}

/* ---- total ---- */

enum {
    UPI_TOTAL_BLOCKS = 1024, /* at most, whatever the device: they decide the order of the sum */
    UPI_TOTAL_BUF = UPI_BLOCK * 8
};

/* The sum over a block, in the first thread. */
UPI_DEVICE double upi_block_total(double x, double *buf)
{
    unsigned half;
    buf[threadIdx.x] = x;
    for (half = UPI_BLOCK / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) buf[threadIdx.x] += buf[threadIdx.x + half];
    }
    return buf[0];
}

/* sums[block] = its part. The square of an f32 is exact in f64. */
template <int TYPES>
UPI_KERNEL(256, 1)
void upi_total_parts(double *sums, upipe_view x, int squares, upi_span s)
{
    UPI_SHARED(double, buf);
    double sum = 0;
    UPI_EACH_TEAM(s, first)
    {
        upi_place p = upi_place_of(s, first);
        upi_numbers a;
        int l;
        if (p.d == 0) continue;
        a = upi_view_get<TYPES>(x, p, s.vec);
        UPI_UNROLL
        for (l = 0; l < UPI_EIGHT; ++l) sum += squares ? (double)a.v[l] * (double)a.v[l] : (double)a.v[l];
    }
    sum = upi_block_total(sum, buf);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

/* sums[0] = all of them; the type is of no importance. */
template <int TYPES> UPI_KERNEL(256, 1) void upi_total_whole(double *sums, int count)
{
    UPI_SHARED(double, buf);
    double sum = 0;
    int i;
    for (i = threadIdx.x; i < count; i += UPI_BLOCK) sum += sums[i];
    sum = upi_block_total(sum, buf);
    if (threadIdx.x == 0) sums[0] = sum;
}

UPIPE_API upipe_status upi_cuda_total(upipe_ctx *c, double *out, upipe_view x, int squares)
{
    const upipe_cuda *self = upi_cuda_self(c);
    double *sums = (double *)self->scratch;
    int64_t blocks;
    upi_span s;
    UPIPE_TRY(upipe_check_total(c, out, x));
    UPIPE_TRY(upi_cuda_host_waits(c, "a total for the host"));
    *out = 0;
    if (x.n == 0) return UPIPE_OK;
    s = upi_span_of(&x, 1, 0); /* rows joined or not, the order would differ */
    blocks = (s.teams + (UPI_BLOCK >> s.shift) - 1) / (UPI_BLOCK >> s.shift);
    if (blocks > UPI_TOTAL_BLOCKS) blocks = UPI_TOTAL_BLOCKS;
    UPIPE_TRY(x.dtype == UPIPE_F32 ? UPI_LAUNCH(c, (upi_total_parts<UPI_ALL_F32>), (unsigned)blocks,
                                                UPI_BLOCK, UPI_TOTAL_BUF, sums, x, squares, s)
                                   : UPI_LAUNCH(c, (upi_total_parts<UPI_ALL_BF16>), (unsigned)blocks,
                                                UPI_BLOCK, UPI_TOTAL_BUF, sums, x, squares, s));
    UPIPE_TRY(UPI_LAUNCH(c, (upi_total_whole<0>), 1, UPI_BLOCK, UPI_TOTAL_BUF, sums, (int)blocks));
    UPIPE_CUDA_TRY(&c->err, cudaMemcpyAsync(self->result, sums, sizeof *out, cudaMemcpyDeviceToHost,
                                            (cudaStream_t)c->stream));
    UPIPE_TRY(upi_cuda_sync(c));
    UPIPE_TRY(upipe_comm_results(c));
    memcpy(out, self->result, sizeof *out);
    return UPIPE_OK;
}

/* ---- adamw ---- */

/* The step's constants, rounded to f32. */
typedef struct upi_adamw_rates {
    float m_keep, m_part, v_keep, v_part, m_scale, v_scale, g_scale, eps, minus_rate, decay;
} upi_adamw_rates;

/* TYPES is the copy's. */
template <int TYPES>
UPI_KERNEL(256, 1)
void upi_adamw_step(float *w_all, float *m_all, float *v_all, const float *g_all, void *copy,
                    upi_adamw_rates r, upi_span s)
{
    UPI_EACH_TEAM(s, first)
    {
        upi_place p = upi_place_of(s, first);
        upi_numbers g = upi_get<UPI_ALL_F32>(g_all, UPIPE_F32, p.k, p.d, s.vec);
        upi_numbers w = upi_get<UPI_ALL_F32>(w_all, UPIPE_F32, p.k, p.d, s.vec);
        upi_numbers m = upi_get<UPI_ALL_F32>(m_all, UPIPE_F32, p.k, p.d, s.vec);
        upi_numbers v = upi_get<UPI_ALL_F32>(v_all, UPIPE_F32, p.k, p.d, s.vec);
        int l;
        UPI_UNROLL
        for (l = 0; l < UPI_EIGHT; ++l) {
            float grad = g.v[l] * r.g_scale, step;
            m.v[l] = fmaf(r.m_keep, m.v[l], r.m_part * grad);
            v.v[l] = fmaf(r.v_keep, v.v[l], r.v_part * grad * grad);
            step = m.v[l] * r.m_scale / (sqrtf(v.v[l] * r.v_scale) + r.eps);
            w.v[l] = fmaf(r.minus_rate, fmaf(r.decay, w.v[l], step), w.v[l]);
        }
        upi_put<UPI_ALL_F32>(m_all, UPIPE_F32, p.k, p.d, s.vec, m);
        upi_put<UPI_ALL_F32>(v_all, UPIPE_F32, p.k, p.d, s.vec, v);
        upi_put<UPI_ALL_F32>(w_all, UPIPE_F32, p.k, p.d, s.vec, w);
        if (copy != NULL) upi_put<TYPES>(copy, UPIPE_F32, p.k, p.d, s.vec, w);
    }
}

/* All of n, one row, in pieces. */
UPIPE_API upi_span upi_adamw_span(const upipe_adamw *a)
{
    const void *at[5];
    upi_span s;
    int i;
    at[0] = a->w;
    at[1] = a->m;
    at[2] = a->v;
    at[3] = a->g;
    at[4] = a->copy;
    s.tokens = s.heads = s.vec = 1;
    s.d = a->n;
    s.shift = 8;
    s.pieces = s.teams = (a->n + UPI_BLOCK * UPI_EIGHT - 1) / (UPI_BLOCK * UPI_EIGHT);
    for (i = 0; i < 5; ++i)
        if ((uintptr_t)at[i] % 16 != 0) s.vec = 0;
    return s;
}

UPIPE_API upipe_status upi_cuda_adamw(upipe_ctx *c, const upipe_adamw *a)
{
    upi_adamw_rates r;
    upi_span s;
    UPIPE_TRY(upipe_check_adamw(c, a));
    if (a->n == 0) return UPIPE_OK;
    r.m_keep = (float)a->beta1;
    r.m_part = (float)(1 - a->beta1);
    r.v_keep = (float)a->beta2;
    r.v_part = (float)(1 - a->beta2);
    r.m_scale = (float)(1 / (1 - pow(a->beta1, (double)a->step)));
    r.v_scale = (float)(1 / (1 - pow(a->beta2, (double)a->step)));
    r.g_scale = (float)a->grad_scale;
    r.eps = (float)a->eps;
    r.minus_rate = (float)-a->rate;
    r.decay = (float)a->decay;
    s = upi_adamw_span(a);
    return a->copy != NULL && a->copy_dtype == UPIPE_BF16
               ? UPI_LAUNCH(c, (upi_adamw_step<UPI_ALL_BF16>), upi_span_grid(c, s), UPI_BLOCK, 0, a->w, a->m,
                            a->v, a->g, a->copy, r, s)
               : UPI_LAUNCH(c, (upi_adamw_step<UPI_ALL_F32>), upi_span_grid(c, s), UPI_BLOCK, 0, a->w, a->m,
                            a->v, a->g, a->copy, r, s);
}

#endif

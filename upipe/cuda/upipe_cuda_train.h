/* upipe_cuda_train.h -- what a model needs around its attention
 *
 * Fills the table's gate, gate_bwd, cross_entropy, embed, embed_bwd, bias_bwd, total and adamw.
 *
 *     upi_cuda_gate(...)              y [n][h][d] = kind(gate) * up
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

#include "upipe_cuda_norm.h"

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

/* A gate's activation and its slope. sigmoid: s and s (1 - s). The others are g * s. silu: s is the sigmoid of g; its
 * slope s (1 + g (1 - s)) lies within -0.1 .. 1.1 for any finite g. gelu: that of 2u, whose slope is 2u'. Beyond 100 s is
 * 0 or 1, whatever g is, and powers of g could overflow; a NaN stays one. */
template <int KIND> UPI_DEVICE void upi_gate(float g, float *value, float *slope)
{
    float s, rest;
    if (KIND == UPIPE_GATE_GELU) {
        const float near = g > 100 ? 100.0f : g < -100 ? -100.0f : g, square = near * near;
        upi_sigmoid(near * fmaf(UPIPE_GELU_CUBE, square, UPIPE_GELU_ONE), &s, &rest);
        *slope = s * fmaf(near * rest, fmaf(3 * UPIPE_GELU_CUBE, square, UPIPE_GELU_ONE), 1.0f);
    } else {
        upi_sigmoid(g, &s, &rest);
        *slope = KIND == UPIPE_GATE_SILU ? s * fmaf(g, rest, 1.0f) : s * rest;
    }
    *value = KIND == UPIPE_GATE_SIGMOID ? s : g * s;
}

template <int TYPES, int KIND>
UPI_KERNEL(256, 1)
void upi_gated_rows(upipe_view y, upipe_view gate, upipe_view up, upi_span s)
{
    UPI_EACH_TEAM(s, first)
    {
        upi_place p = upi_place_of(s, first);
        upi_numbers g = upi_view_get<TYPES>(gate, p, s.vec), u = upi_view_get<TYPES>(up, p, s.vec);
        int l;
        UPI_UNROLL
        for (l = 0; l < UPI_EIGHT; ++l) {
            float value, slope;
            upi_gate<KIND>(g.v[l], &value, &slope);
            g.v[l] = value * u.v[l];
        }
        upi_view_put<TYPES>(y, p, s.vec, g);
    }
}

template <int TYPES, int KIND>
UPI_KERNEL(256, 1)
void upi_gated_bwd_rows(upipe_view gate, upipe_view up, upipe_view dy, upi_span s)
{
    UPI_EACH_TEAM(s, first)
    {
        upi_place p = upi_place_of(s, first);
        upi_numbers g = upi_view_get<TYPES>(gate, p, s.vec), u = upi_view_get<TYPES>(up, p, s.vec);
        upi_numbers o = upi_view_get<TYPES>(dy, p, s.vec);
        int l;
        UPI_UNROLL
        for (l = 0; l < UPI_EIGHT; ++l) {
            float value, slope;
            upi_gate<KIND>(g.v[l], &value, &slope);
            g.v[l] = slope * u.v[l] * o.v[l];
            u.v[l] = value * o.v[l];
        }
        upi_view_put<TYPES>(gate, p, s.vec, g);
        upi_view_put<TYPES>(up, p, s.vec, u);
    }
}

/* The launch of one of these, as UPI_LAUNCH_TYPES. */
#define UPI_LAUNCH_GATED(c, types, kernel, kind, grid, ...)                                               \
    ((types) == UPI_ALL_F32 ? UPI_LAUNCH(c, (kernel<UPI_ALL_F32, kind>), grid, UPI_BLOCK, 0, __VA_ARGS__) \
     : (types) == UPI_ALL_BF16                                                                            \
         ? UPI_LAUNCH(c, (kernel<UPI_ALL_BF16, kind>), grid, UPI_BLOCK, 0, __VA_ARGS__)                   \
         : UPI_LAUNCH(c, (kernel<UPI_MIXED, kind>), grid, UPI_BLOCK, 0, __VA_ARGS__))

/* The same of a kind that is no constant. */
#define UPI_LAUNCH_GATE(c, types, kernel, kind, grid, ...)                                              \
    ((kind) == UPIPE_GATE_SILU ? UPI_LAUNCH_GATED(c, types, kernel, UPIPE_GATE_SILU, grid, __VA_ARGS__) \
     : (kind) == UPIPE_GATE_GELU                                                                        \
         ? UPI_LAUNCH_GATED(c, types, kernel, UPIPE_GATE_GELU, grid, __VA_ARGS__)                       \
         : UPI_LAUNCH_GATED(c, types, kernel, UPIPE_GATE_SIGMOID, grid, __VA_ARGS__))

UPIPE_API upipe_status upi_cuda_gate(upipe_ctx *c, upipe_gate_kind kind, upipe_view y, upipe_view gate,
                                     upipe_view up)
{
    const upipe_view v[3] = {y, gate, up};
    upi_span s;
    UPIPE_TRY(upi_check_gate(c, kind, y, gate, up));
    if (y.n == 0) return UPIPE_OK;
    s = upi_span_of(v, 3, 1);
    return UPI_LAUNCH_GATE(c, upi_types(v, 3), upi_gated_rows, kind, upi_span_grid(c, s), y, gate, up, s);
}

UPIPE_API upipe_status upi_cuda_gate_bwd(upipe_ctx *c, upipe_gate_kind kind, upipe_view gate, upipe_view up,
                                         upipe_view dy)
{
    const upipe_view v[3] = {dy, gate, up};
    upi_span s;
    UPIPE_TRY(upi_check_gate_bwd(c, kind, gate, up, dy));
    if (dy.n == 0) return UPIPE_OK;
    s = upi_span_of(v, 3, 1);
    return UPI_LAUNCH_GATE(c, upi_types(v, 3), upi_gated_bwd_rows, kind, upi_span_grid(c, s), gate, up, dy,
                           s);
}

/* ---- cross entropy ---- */

/* The greatest x of the block's threads, for all of them; NaNs are left aside. */
UPI_DEVICE float upi_block_max(float x, float *buf)
{
    int step, w;
    for (step = 1; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    if (threadIdx.x % 32 == 0) buf[threadIdx.x / 32] = x;
    __syncthreads();
    x = buf[0];
    for (w = 1; w < UPI_BLOCK / 32; ++w) x = fmaxf(x, buf[w]);
    return x;
}

/* times eight logits that a thread holds */
enum { UPI_ENTROPY_EACH = UPI_ENTROPY_TURN / (UPI_BLOCK * UPI_EIGHT) };

/* A row lies in pieces of `width` logits, a block each. */
typedef struct upi_entropy_job {
    upipe_view logits, grad;
    float *losses;
    const int32_t *targets;
    float *sums;  /* [rows][pieces][2]: the greatest logit of a piece; the sum of e^(logit - greatest) */
    int *arrived; /* [1 + rows]: the next ticket; pieces of a row whose sums are there */
    int64_t width;
    float scale, softcap;
    int pieces, vec;
} upi_entropy_job;

UPI_DEVICE float upi_softcap(float x, float softcap)
{
    return softcap != 0 ? softcap * tanhf(x / softcap) : x;
}

/* A thread's logits, of which the row has `left` from the first one on; -inf beyond. */
UPI_DEVICE void upi_entropy_load(upi_numbers *x, const float *logits, int left, int vec, float softcap)
{
    int e, l;
    UPI_UNROLL
    for (e = 0; e < UPI_ENTROPY_EACH; ++e) {
        const int k = e * (UPI_BLOCK * UPI_EIGHT);
        x[e] = upi_get<UPI_ALL_F32>(logits, UPIPE_F32, k, left, vec);
        UPI_UNROLL
        for (l = 0; l < UPI_EIGHT; ++l)
            if (k + l >= left) x[e].v[l] = -INFINITY;
        if (softcap == 0) continue;
        UPI_UNROLL
        for (l = 0; l < UPI_EIGHT; ++l)
            if (k + l < left) x[e].v[l] = upi_softcap(x[e].v[l], softcap);
    }
}

/* sum + the sum of e^(logit - base) of all but number `apart`. */
UPI_DEVICE float upi_entropy_sum(const upi_numbers *x, int apart, float base, float sum)
{
    int e, l;
    UPI_UNROLL
    for (e = 0; e < UPI_ENTROPY_EACH; ++e) {
        UPI_UNROLL
        for (l = 0; l < UPI_EIGHT; ++l)
            if (e * (UPI_BLOCK * UPI_EIGHT) + l != apart) sum += expf(x[e].v[l] - base);
    }
    return sum;
}

/* Eight logits become their gradient, that of the target, number `apart` of them, `own`; under a soft-cap that of what they
 * were before it. */
UPI_DEVICE void upi_entropy_grad(upi_numbers *x, int apart, float own, float top, float factor, float softcap)
{
    const upi_numbers y = *x;
    int l;
    UPI_UNROLL
    for (l = 0; l < UPI_EIGHT; ++l) x->v[l] = l == apart ? own : expf(y.v[l] - top) * factor;
    if (softcap == 0) return;
    UPI_UNROLL
    for (l = 0; l < UPI_EIGHT; ++l) {
        const float t = y.v[l] / softcap;
        x->v[l] *= 1 - t * t;
    }
}

/* Blocks share a row, so that each holds its piece in registers from the sum to the gradient: a logit is read once.
 * (Where a piece has more logits than that, they are read again.) A block waits for the others of its row. Tickets give
 * these to blocks that start together, and no row has more pieces than the device holds blocks at a time. Of a launch the
 * blocks of one row alone wait for some that have not started: upipe_cuda_ranks_most says how many launches leave a place.
 *
 * Each thread keeps the greatest logit that it has seen and the sum of e^(logit - greatest) of all others
 * than the target. With the target t apart, 1 - p[t] = others / sum: neither the gradient of a target whose
 * probability is almost 1 nor its loss, log(1 + others) where it is the greatest, is left to a difference.
 */
template <int TYPES> UPI_KERNEL(256, UPI_ENTROPY_BLOCKS) void upi_cross_entropy_rows(upi_entropy_job g)
{
    UPI_SHARED(float, buf);
    int64_t i = blockIdx.x, d = g.logits.d, target, begin;
    int piece = 0, n, apart, first = threadIdx.x * UPI_EIGHT, k, e, l;
    float most = -INFINITY, top, others = 0, at, sum, factor, own;
    upi_numbers x[UPI_ENTROPY_EACH];
    const float *logits;
    char *to = NULL;
    if (g.pieces > 1) {
        int *ticket = (int *)(buf + UPI_TEAM_BUF / 4);
        if (threadIdx.x == 0) *ticket = atomicAdd(g.arrived, 1);
        __syncthreads();
        i = *ticket / g.pieces;
        piece = *ticket % g.pieces;
    }
    begin = piece * g.width;
    n = (int)(begin + g.width < d ? g.width : d - begin);
    logits = (const float *)upi_row_at(g.logits, i, 0) + begin;
    if (g.grad.data != NULL)
        to = upi_row_at(g.grad, i, 0) + begin * (upi_is_f32<TYPES>(g.grad.dtype) ? 4 : 2);
    target = g.targets[i];
    if (target < 0 || target >= d) {
        upi_numbers same;
        UPI_UNROLL
        for (l = 0; l < UPI_EIGHT; ++l) same.v[l] = target < 0 ? 0.0f : UPI_NAN;
        for (k = first; to != NULL && k < n; k += UPI_BLOCK * UPI_EIGHT)
            upi_put<TYPES>(to, g.grad.dtype, k, n, g.vec, same);
        if (piece == 0 && threadIdx.x == 0) g.losses[i] = target < 0 ? 0.0f : UPI_NAN;
        return;
    }
    apart = target >= begin && target < begin + n ? (int)(target - begin) : INT32_MAX;
    at = upi_softcap(logits[target - begin], g.softcap);
    for (k = first; k < n; k += UPI_ENTROPY_TURN) {
        float before = most, base;
        upi_entropy_load(x, logits + k, n - k, g.vec, g.softcap);
        UPI_UNROLL
        for (e = 0; e < UPI_ENTROPY_EACH; ++e) {
            UPI_UNROLL
            for (l = 0; l < UPI_EIGHT; ++l) most = fmaxf(most, x[e].v[l]);
        }
        base = most == -INFINITY ? 0.0f : most; /* all are -inf so far: e^(-inf - -inf) is no number */
        others = upi_entropy_sum(x, apart - k, base, others * expf(before - base));
    }
    top = upi_block_max(most, buf);
    others = upi_team_sum(others * expf(most - (top == -INFINITY ? 0.0f : top)), 8, buf);
    if (g.pieces > 1) {
        float *sums = g.sums + i * g.pieces * 2;
        const int goes_on = to != NULL || piece == 0;
        if (threadIdx.x == 0) {
            sums[2 * piece] = top;
            sums[2 * piece + 1] = others;
            upi_add_release(g.arrived + 1 + i, 1);
            while (goes_on && upi_load_acquire(g.arrived + 1 + i) != g.pieces) upi_pause();
        }
        __syncthreads();
        if (!goes_on) return;
        for (l = 0, top = -INFINITY; l < g.pieces; ++l) top = fmaxf(top, sums[2 * l]);
        for (l = 0, others = 0; l < g.pieces; ++l) others += sums[2 * l + 1] * expf(sums[2 * l] - top);
    } else {
        others *= expf(top - top); /* nothing but -inf: no number */
    }
    sum = others + expf(at - top);
    factor = g.scale / sum;
    own = -(g.scale * (others / sum));
    if (piece == 0 && threadIdx.x == 0) g.losses[i] = (at == top ? log1pf(others) : logf(sum)) + (top - at);
    for (k = first; to != NULL && k < n; k += UPI_ENTROPY_TURN) {
        if (n > UPI_ENTROPY_TURN) upi_entropy_load(x, logits + k, n - k, g.vec, g.softcap);
        UPI_UNROLL
        for (e = 0; e < UPI_ENTROPY_EACH; ++e) {
            const int here = e * (UPI_BLOCK * UPI_EIGHT);
            upi_entropy_grad(&x[e], apart - k - here, own, top, factor, g.softcap);
            upi_put<TYPES>(to + k * (upi_is_f32<TYPES>(g.grad.dtype) ? 4 : 2), g.grad.dtype, here, n - k,
                           g.vec, x[e]);
        }
    }
}

UPIPE_API upipe_status upi_cuda_cross_entropy(upipe_ctx *c, const upipe_cross_entropy *x)
{
    const upipe_cuda *self = upi_cuda_self(c);
    int64_t d = x->logits.d, row, most;
    upi_entropy_job g;
    upipe_view v[2];
    UPIPE_TRY(upi_check_cross_entropy(c, x));
    if (x->logits.n == 0) return UPIPE_OK;
    v[0] = x->logits;
    v[1] = x->grad.data != NULL ? x->grad : x->logits;
    memset(&g, 0, sizeof g);
    g.vec = upi_span_of(v, 2, 0).vec;
    g.scale = x->scale;
    g.softcap = x->softcap;
    g.pieces = upi_cuda_entropy_pieces(self, d);
    g.width = ((d + g.pieces - 1) / g.pieces + UPI_EIGHT - 1) / UPI_EIGHT * UPI_EIGHT; /* nearly equal ones */
    most = (int64_t)self->processors * UPI_WAVES;                                      /* rows of a launch */
    if (most > (UPIPE_CUDA_SCRATCH - 4) / (4 + 8 * g.pieces))
        most = (UPIPE_CUDA_SCRATCH - 4) / (4 + 8 * g.pieces);
    g.arrived = (int *)self->scratch;
    g.sums = (float *)self->scratch + 1 + most;
    for (row = 0; row < x->logits.n; row += most) {
        int64_t rows = x->logits.n - row < most ? x->logits.n - row : most;
        unsigned grid = (unsigned)(rows * g.pieces);
        g.logits = upipe_view_rows(x->logits, row, rows);
        g.grad = x->grad.data != NULL ? upipe_view_rows(x->grad, row, rows) : x->grad;
        g.losses = x->loss + row;
        g.targets = x->targets + row;
        if (g.pieces > 1)
            UPIPE_CUDA_TRY(&c->err, cudaMemsetAsync(g.arrived, 0, (size_t)(1 + rows) * sizeof *g.arrived,
                                                    (cudaStream_t)c->stream));
        UPIPE_TRY(v[1].dtype == UPIPE_F32
                      ? UPI_LAUNCH_TOGETHER(c, g.pieces, (upi_cross_entropy_rows<UPI_ALL_F32>), grid,
                                            UPI_BLOCK, UPI_TEAM_BUF + 4, g)
                      : UPI_LAUNCH_TOGETHER(c, g.pieces, (upi_cross_entropy_rows<UPI_ALL_BF16>), grid,
                                            UPI_BLOCK, UPI_TEAM_BUF + 4, g));
    }
    return UPIPE_OK;
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

/* Rows of x, with those of a table, of which there may be more. */
UPIPE_API upi_span upi_span_of_embed(upipe_view x, upipe_view table)
{
    upipe_view v[2];
    upi_span s;
    v[0] = x;
    v[1] = table;
    s = upi_span_of(v, 2, 0);
    if (table.n > 1 && table.n_stride * (int64_t)upipe_dtype_bytes(table.dtype) % 16 != 0) s.vec = 0;
    return s;
}

UPIPE_API upipe_status upi_cuda_embed(upipe_ctx *c, upipe_view x, upipe_view table, const int32_t *tokens)
{
    upipe_view v[2];
    upi_span s;
    UPIPE_TRY(upi_check_embed(c, "embed", x, table, tokens));
    if (x.n == 0) return UPIPE_OK;
    v[0] = x;
    v[1] = table;
    s = upi_span_of_embed(x, table);
    return UPI_LAUNCH_TYPES(c, upi_types(v, 2), upi_embed_rows, upi_span_grid(c, s), UPI_BLOCK, 0, x, table,
                            tokens, s);
}

enum {
    UPI_EMBED_WARP = 32 * UPI_EIGHT,                        /* of a warp */
    UPI_EMBED_WARPS = UPI_BLOCK / 32,                       /* of a block */
    UPI_EMBED_BLOCKS = 8,                                   /* for the same columns */
    UPI_EMBED_CLASSES = UPI_EMBED_WARPS * UPI_EMBED_BLOCKS, /* of tokens, one a warp */
    UPI_EMBED_WINDOW = 8                                    /* tokens in flight */
};

/* A warp has the tokens of one class (id mod 64), which meet no other warp's rows, and adds them in order, eight
 * columns a lane. It fetches the rows of a few tokens at once, so the first of equal tokens in that window hands its
 * sum to the next. */
template <int TYPES>
UPI_KERNEL(256, 1)
void upi_embed_bwd_rows(upipe_view dtable, upipe_view dx, const int32_t *tokens, int vec)
{
    int lane = threadIdx.x % 32, u, e, l;
    int kind = blockIdx.x % UPI_EMBED_BLOCKS * UPI_EMBED_WARPS + threadIdx.x / 32;
    int64_t k = (int64_t)(blockIdx.x / UPI_EMBED_BLOCKS) * UPI_EMBED_WARP + lane * UPI_EIGHT, base;
    int32_t next = lane < dx.n ? tokens[lane] : -1;
    for (base = 0; base < dx.n; base += 32) {
        int32_t id = next;
        int mine = id >= 0 && id < dtable.n && id % UPI_EMBED_CLASSES == kind;
        uint32_t left = __ballot_sync(0xffffffffu, mine);
        next = base + 32 + lane < dx.n ? tokens[base + 32 + lane] : -1;
        while (left != 0) {
            int32_t ids[UPI_EMBED_WINDOW];
            upi_numbers sum[UPI_EMBED_WINDOW], x[UPI_EMBED_WINDOW];
            UPI_UNROLL
            for (u = 0; u < UPI_EMBED_WINDOW; ++u) {
                uint32_t low = left & (0u - left);
                int at = low != 0 ? (int)(upi_as_bits((float)low) >> 23) - 127 : 0; /* its bit's number */
                int32_t row = __shfl_sync(0xffffffffu, id, at);
                int64_t end = low != 0 ? dx.d : 0;
                ids[u] = low != 0 ? row : -1;
                left ^= low;
                x[u] = upi_get<TYPES>(upi_row_at(dx, base + at, 0), dx.dtype, k, end, vec);
                sum[u] = upi_get<UPI_ALL_F32>(upi_row_at(dtable, row, 0), UPIPE_F32, k, end, vec);
            }
            UPI_UNROLL
            for (u = 0; u < UPI_EMBED_WINDOW; ++u) {
                UPI_UNROLL
                for (l = 0; l < UPI_EIGHT; ++l) sum[u].v[l] += x[u].v[l];
                UPI_UNROLL
                for (e = u + 1; e < UPI_EMBED_WINDOW; ++e)
                    if (ids[e] == ids[u]) sum[e] = sum[u];
                if (ids[u] >= 0)
                    upi_put<UPI_ALL_F32>(upi_row_at(dtable, ids[u], 0), UPIPE_F32, k, dx.d, vec, sum[u]);
            }
        }
    }
}

UPIPE_API upipe_status upi_cuda_embed_bwd(upipe_ctx *c, upipe_view dtable, upipe_view dx,
                                          const int32_t *tokens)
{
    unsigned grid = (unsigned)((dx.d + UPI_EMBED_WARP - 1) / UPI_EMBED_WARP) * UPI_EMBED_BLOCKS;
    int vec;
    UPIPE_TRY(upi_check_embed_bwd(c, dtable, dx, tokens));
    if (dx.n == 0) return UPIPE_OK;
    vec = upi_span_of_embed(dx, dtable).vec;
    return dx.dtype == UPIPE_F32
               ? UPI_LAUNCH(c, (upi_embed_bwd_rows<UPI_ALL_F32>), grid, UPI_BLOCK, 0, dtable, dx, tokens, vec)
               : UPI_LAUNCH(c, (upi_embed_bwd_rows<UPI_ALL_BF16>), grid, UPI_BLOCK, 0, dtable, dx, tokens,
                            vec);
}

/* ---- the gradient of a bias ---- */

enum { UPI_BIAS_WINDOW = 8 }; /* tokens in flight */

/* parts [part][h][d]: sums of UPIPE_SUM_ROWS tokens, eight columns a thread. */
template <int TYPES> UPI_KERNEL(64, 1) void upi_bias_parts(float *parts, upipe_view dy, int vec)
{
    const int64_t pieces = (dy.d + UPI_EIGHT - 1) / UPI_EIGHT, eights = dy.h * pieces;
    const int64_t thread = (int64_t)blockIdx.x * UPI_COLUMNS + threadIdx.x, part = thread / eights;
    const int64_t j = thread % eights / pieces, k = thread % eights % pieces * UPI_EIGHT;
    int64_t i = part * UPIPE_SUM_ROWS, end = i + UPIPE_SUM_ROWS < dy.n ? i + UPIPE_SUM_ROWS : dy.n;
    upi_numbers sum = {{0, 0, 0, 0, 0, 0, 0, 0}};
    int u, l;
    if (i >= dy.n) return;
    for (; i < end; i += UPI_BIAS_WINDOW) {
        upi_numbers x[UPI_BIAS_WINDOW];
        UPI_UNROLL
        for (u = 0; u < UPI_BIAS_WINDOW; ++u)
            x[u] = upi_get<TYPES>(upi_row_at(dy, i + u, j), dy.dtype, k, i + u < end ? dy.d : 0, vec);
        UPI_UNROLL
        for (u = 0; u < UPI_BIAS_WINDOW; ++u) UPI_UNROLL
        for (l = 0; l < UPI_EIGHT; ++l) sum.v[l] += x[u].v[l];
    }
    upi_put<UPI_ALL_F32>(parts + (part * dy.h + j) * dy.d, UPIPE_F32, k, dy.d, dy.d % 4 == 0, sum);
}

UPIPE_API upipe_status upi_cuda_bias_bwd(upipe_ctx *c, float *db, upipe_view dy)
{
    float *parts = (float *)upi_cuda_self(c)->scratch;
    int64_t columns = (int64_t)dy.h * dy.d, eights = dy.h * (((int64_t)dy.d + UPI_EIGHT - 1) / UPI_EIGHT);
    int64_t token, most;
    UPIPE_TRY(upi_check_bias_bwd(c, db, dy));
    if (dy.n == 0) return UPIPE_OK;
    most = upi_column_tokens(columns, UPIPE_SUM_ROWS);
    if (most == 0)
        return upipe_fail(&c->err, UPIPE_ERR_UNSUPPORTED, "bias_bwd: %lld columns, at most %d",
                          (long long)columns, UPIPE_CUDA_SCRATCH / 4);
    for (token = 0; token < dy.n; token += most) {
        int64_t n = dy.n - token < most ? dy.n - token : most,
                count = (n + UPIPE_SUM_ROWS - 1) / UPIPE_SUM_ROWS;
        upipe_view rows = upipe_view_rows(dy, token, n);
        UPIPE_TRY(UPI_LAUNCH_TYPES(c, upi_types(&dy, 1), upi_bias_parts, upi_column_grid(count * eights),
                                   UPI_COLUMNS, 0, parts, rows, upi_span_of(&rows, 1, 0).vec));
        UPIPE_TRY(UPI_LAUNCH(c, (upi_column_sums<1>), upi_column_grid(columns), UPI_COLUMNS, 0, db, parts,
                             columns, count));
    }
    return UPIPE_OK;
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

/* *out = all of them; the type is of no importance. */
template <int TYPES> UPI_KERNEL(256, 1) void upi_total_whole(double *out, const double *sums, int count)
{
    UPI_SHARED(double, buf);
    double sum = 0;
    int i;
    for (i = threadIdx.x; i < count; i += UPI_BLOCK) sum += sums[i];
    sum = upi_block_total(sum, buf);
    if (threadIdx.x == 0) *out = sum;
}

UPIPE_API upipe_status upi_cuda_total(upipe_ctx *c, double *out, upipe_view x, int squares)
{
    double *sums = (double *)upi_cuda_self(c)->scratch;
    int64_t blocks;
    upi_span s;
    UPIPE_TRY(upi_check_total(c, out, x));
    if (x.n == 0) return c->ops->zero(c, out, sizeof *out);
    s = upi_span_of(&x, 1, 0); /* rows joined or not, the order would differ */
    blocks = (s.teams + (UPI_BLOCK >> s.shift) - 1) / (UPI_BLOCK >> s.shift);
    if (blocks > UPI_TOTAL_BLOCKS) blocks = UPI_TOTAL_BLOCKS;
    UPIPE_TRY(x.dtype == UPIPE_F32 ? UPI_LAUNCH(c, (upi_total_parts<UPI_ALL_F32>), (unsigned)blocks,
                                                UPI_BLOCK, UPI_TOTAL_BUF, sums, x, squares, s)
                                   : UPI_LAUNCH(c, (upi_total_parts<UPI_ALL_BF16>), (unsigned)blocks,
                                                UPI_BLOCK, UPI_TOTAL_BUF, sums, x, squares, s));
    return UPI_LAUNCH(c, (upi_total_whole<0>), 1, UPI_BLOCK, UPI_TOTAL_BUF, out, sums, (int)blocks);
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
    UPIPE_TRY(upi_check_adamw(c, a));
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

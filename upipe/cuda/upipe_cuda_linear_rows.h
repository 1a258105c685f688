/* upipe_cuda_linear_rows.h -- linear attention's convolution and gates on CUDA
 *
 *     upi_cuda_linear_conv(&ctx, &a)       y = silu of a causal convolution of few taps, every channel by itself
 *     upi_cuda_linear_gates(&ctx, &g)      decays and strengths of all tokens
 *
 * A thread of the convolution walks over a tile of 64 rows of a few channels, in groups of 4 or 8 rows that it loads at once.
 * It keeps the group and the one beside it in registers, so it reads a row once, and once more a group at the border between
 * two tiles: 4 or 8 rows of 64. What a tile needs of rows that another thread overwrites is in the device's scratch before: of y that
 * lies over x, rows of x; of dx that lies over dy, gradients before SiLU.
 *
 * Nothing waits for another thread, and nothing is added atomically. An element is one f32 chain, in the CPU's order. The
 * gradient of a weight is a sum of UPIPE_SUM_ROWS rows a thread, and a second kernel adds these in their order.
 */
#ifndef UPIPE_CUDA_LINEAR_ROWS_H
#define UPIPE_CUDA_LINEAR_ROWS_H

#include "../upipe_linear.h"
#include "upipe_cuda_train.h"

enum {
    UPI_CUDA_CONV_THREADS = 64,
    UPI_CUDA_CONV_ROWS = UPIPE_SUM_ROWS, /* of a tile */
    UPI_CUDA_CONV_CHANNELS = 1024,       /* of a launch, at most */
    UPI_CUDA_CONV_TILES = 384, /* likewise; its arguments, with a bit for each row, have at most 4 KB */
    UPI_CUDA_CONV_BACK = 8,    /* the bit of a launch's first row */
    UPI_CUDA_CONV_BITS = UPI_CUDA_CONV_TILES * UPI_CUDA_CONV_ROWS + 2 * UPI_CUDA_CONV_BACK,
    UPI_CUDA_CONV_WORDS = UPI_CUDA_CONV_BITS / 32 + 2,
    UPI_CUDA_CONV_HELD = 16 /* numbers of a group: 4 channels of 4 rows, or 2 of 8 */
};

/* Tiles of some channels.
 *   y        in a backward dy, which becomes dx
 *   dbefore  f32 [taps - 1][channels]: what dstate becomes
 *   halo     f32 [tiles][taps - 1][channels]: rows of x before each tile, or gradients behind it; NULL: x has its rows yet
 *   parts    f32 [tiles][channels][taps]: of the weights' gradients; NULL: not wanted
 *   first    row of the first tile
 *   vec      all rows begin at multiples of a thread's channels, which are whole
 *   begins   bit 8 + i: a document begins at row first + i */
typedef struct upi_cuda_conv_job {
    upipe_view x, y, before, dstate;
    const float *weight;
    float *dbefore, *halo, *parts;
    int64_t first;
    int tiles, taps, vec;
    uint32_t begins[UPI_CUDA_CONV_WORDS];
} upi_cuda_conv_job;

/* W rows of a thread's channels. */
template <int W> struct upi_cuda_conv_group {
    float v[W][UPI_CUDA_CONV_HELD / W];
};

/* A thread's work. end: behind the tile's last row. */
typedef struct upi_cuda_conv_place {
    int64_t begin, end;
    int tile, k;
} upi_cuda_conv_place;

/* Returns 0 for a thread without work. */
template <int W> UPI_DEVICE int upi_cuda_conv_place_of(const upi_cuda_conv_job &g, upi_cuda_conv_place *p)
{
    const int each = UPI_CUDA_CONV_HELD / W, groups = (g.x.d + each - 1) / each;
    const int thread = (int)blockIdx.x * UPI_CUDA_CONV_THREADS + (int)threadIdx.x;
    p->tile = thread / groups;
    p->k = thread % groups * each;
    p->begin = g.first + (int64_t)p->tile * UPI_CUDA_CONV_ROWS;
    p->end = p->begin + UPI_CUDA_CONV_ROWS < g.x.n ? p->begin + UPI_CUDA_CONV_ROWS : g.x.n;
    return p->tile < g.tiles;
}

/* ---- channels of a row ---- */

template <int TYPES, int C>
UPI_DEVICE void upi_cuda_conv_get(float *to, const void *row, int k, const upi_cuda_conv_job &g)
{
    const int f32 = TYPES == UPI_ALL_F32;
    int l;
    if (g.vec) {
        uint32_t w[C];
        const char *at = (const char *)row + (int64_t)k * (f32 ? 4 : 2);
        __builtin_memcpy(w, __builtin_assume_aligned(at, C * (f32 ? 4 : 2)), C * (f32 ? 4 : 2));
        UPI_UNROLL
        for (l = 0; l < C; ++l)
            to[l] = upi_as_float(f32 ? w[l] : l % 2 ? w[l / 2] & 0xffff0000 : w[l / 2] << 16);
        return;
    }
    UPI_UNROLL
    for (l = 0; l < C; ++l)
        to[l] = k + l < g.x.d ? upi_get1<TYPES>(row, f32 ? UPIPE_F32 : UPIPE_BF16, k + l) : 0.0f;
}

template <int TYPES, int C>
UPI_DEVICE void upi_cuda_conv_put(void *row, const float *from, int k, const upi_cuda_conv_job &g)
{
    const int f32 = TYPES == UPI_ALL_F32;
    int l;
    if (g.vec) {
        uint32_t w[C];
        char *at = (char *)row + (int64_t)k * (f32 ? 4 : 2);
        UPI_UNROLL
        for (l = 0; l < C; ++l) {
            if (f32) w[l] = upi_as_bits(from[l]);
            if (!f32 && l % 2) w[l / 2] = upi_pack_bf16(from[l - 1], from[l]);
        }
        __builtin_memcpy(__builtin_assume_aligned(at, C * (f32 ? 4 : 2)), w, C * (f32 ? 4 : 2));
        return;
    }
    UPI_UNROLL
    for (l = 0; l < C; ++l) {
        if (k + l >= g.x.d) continue;
        if (f32)
            ((float *)row)[k + l] = from[l];
        else
            ((upi_bf16 *)row)[k + l] = upi_to_bf16(from[l]);
    }
}

/* Rows t .. t + W - 1 of x below `end`, zeros from there on. Rows below 0 are those of `before`. */
template <int TYPES, int W>
UPI_DEVICE void upi_cuda_conv_load(upi_cuda_conv_group<W> *to, const upi_cuda_conv_job &g, int64_t t,
                                   int64_t end, int k)
{
    const int back = g.taps - 1;
    int u, l;
    UPI_UNROLL
    for (u = 0; u < W; ++u) {
        UPI_UNROLL
        for (l = 0; l < UPI_CUDA_CONV_HELD / W; ++l) to->v[u][l] = 0.0f;
        if (t + u >= 0 && t + u < end)
            upi_cuda_conv_get<TYPES, UPI_CUDA_CONV_HELD / W>(to->v[u], upi_row_at(g.x, t + u, 0), k, g);
        else if (t + u < 0 && t + u >= -back)
            upi_cuda_conv_get<UPI_ALL_F32, UPI_CUDA_CONV_HELD / W>(
                to->v[u], upi_row_at(g.before, t + u + back, 0), k, g);
    }
}

/* Row j of the tile's halo. */
UPI_DEVICE float *upi_cuda_conv_halo(const upi_cuda_conv_job &g, int tile, int j)
{
    return g.halo + ((int64_t)tile * (g.taps - 1) + j) * g.x.d;
}

/* to->v[j]: the weights of distance j. */
template <int W>
UPI_DEVICE void upi_cuda_conv_weights(upi_cuda_conv_group<W> *to, const upi_cuda_conv_job &g, int k)
{
    int j, l;
    UPI_UNROLL
    for (j = 0; j < W; ++j) {
        UPI_UNROLL
        for (l = 0; l < UPI_CUDA_CONV_HELD / W; ++l)
            to->v[j][l] =
                j < g.taps && k + l < g.x.d ? g.weight[(int64_t)(k + l) * g.taps + g.taps - 1 - j] : 0.0f;
    }
}

/* ---- how far rows reach ---- */

/* Bit 8 + u: a document begins at row t + u, of 8 rows on either side. t: in the launch, or the first row behind it. */
UPI_DEVICE uint32_t upi_cuda_conv_begins(const upi_cuda_conv_job &g, int64_t t)
{
    const int at = (int)(t - g.first), word = at / 32;
    return (uint32_t)(((uint64_t)g.begins[word + 1] << 32 | g.begins[word]) >> at % 32);
}

/* reach[u] = rows before row t + u that its document has, at most taps - 1; -1 from row `end` on. */
template <int W>
UPI_DEVICE void upi_cuda_conv_reach(int *reach, const upi_cuda_conv_job &g, int64_t t, int64_t end)
{
    const uint32_t begins = upi_cuda_conv_begins(g, t);
    int u, r;
    UPI_UNROLL
    for (u = 0; u < W; ++u) {
        reach[u] = g.taps - 1;
        UPI_UNROLL
        for (r = W - 2; r >= 0; --r)
            if (r < g.taps - 1 && (begins >> (UPI_CUDA_CONV_BACK + u - r) & 1) != 0) reach[u] = r;
        if (t + u >= end) reach[u] = -1;
    }
}

/* ---- the convolution ---- */

/* Row u of a group, or of the one before it. */
template <int W>
UPI_DEVICE float upi_cuda_conv_at(const upi_cuda_conv_group<W> &group, const upi_cuda_conv_group<W> &before,
                                  int u, int l)
{
    return u >= 0 ? group.v[u][l] : before.v[W + u][l];
}

/* The convolution of row u, before SiLU. */
template <int W>
UPI_DEVICE float upi_cuda_conv_sum(const upi_cuda_conv_group<W> &x, const upi_cuda_conv_group<W> &before,
                                   const upi_cuda_conv_group<W> &w, int reach, int u, int l)
{
    float sum = 0.0f;
    int j;
    UPI_UNROLL
    for (j = W - 1; j >= 0; --j)
        if (j <= reach) sum = fmaf(w.v[j][l], upi_cuda_conv_at<W>(x, before, u - j, l), sum);
    return sum;
}

template <int TYPES, int W> UPI_KERNEL(64, W == 4 ? 12 : 8) void upi_cuda_conv_rows(const upi_cuda_conv_job g)
{
    enum { EACH = UPI_CUDA_CONV_HELD / W };
    upi_cuda_conv_place p;
    upi_cuda_conv_group<W> w, x, before;
    int reach[W], u, l;
    int64_t t;
    if (!upi_cuda_conv_place_of<W>(g, &p)) return;
    upi_cuda_conv_weights<W>(&w, g, p.k);
    upi_cuda_conv_load<TYPES, W>(&before, g, p.begin - W, g.halo != NULL ? 0 : p.begin, p.k);
    UPI_UNROLL
    for (u = 0; u < W; ++u)
        if (g.halo != NULL && p.begin > 0 && u >= W - (g.taps - 1))
            upi_cuda_conv_get<UPI_ALL_F32, EACH>(before.v[u],
                                                 upi_cuda_conv_halo(g, p.tile, u - W + g.taps - 1), p.k, g);
    for (t = p.begin; t < p.end; t += W) {
        upi_cuda_conv_load<TYPES, W>(&x, g, t, p.end, p.k);
        upi_cuda_conv_reach<W>(reach, g, t, p.end);
        UPI_UNROLL
        for (u = 0; u < W; ++u) {
            float y[EACH];
            UPI_UNROLL
            for (l = 0; l < EACH; ++l) {
                const float sum = upi_cuda_conv_sum<W>(x, before, w, reach[u], u, l);
                float s, rest;
                upi_sigmoid(sum, &s, &rest);
                y[l] = sum * s;
            }
            if (t + u < p.end) upi_cuda_conv_put<TYPES, EACH>(upi_row_at(g.y, t + u, 0), y, p.k, g);
        }
        before = x;
    }
}

/* ---- its backward ---- */

/* ds: the gradients of rows of y become those before SiLU. */
template <int W>
UPI_DEVICE void upi_cuda_conv_slopes(upi_cuda_conv_group<W> *ds, const upi_cuda_conv_group<W> &x,
                                     const upi_cuda_conv_group<W> &before, const upi_cuda_conv_group<W> &w,
                                     const int *reach)
{
    int u, l;
    UPI_UNROLL
    for (u = 0; u < W; ++u) {
        UPI_UNROLL
        for (l = 0; l < UPI_CUDA_CONV_HELD / W; ++l) {
            const float sum = upi_cuda_conv_sum<W>(x, before, w, reach[u], u, l);
            float s, rest;
            upi_sigmoid(sum, &s, &rest);
            ds->v[u][l] *= s * fmaf(sum, rest, 1.0f);
        }
    }
}

/* Rows t .. t + W - 1 of dy, zeros from `end` on. */
template <int TYPES, int W>
UPI_DEVICE void upi_cuda_conv_load_dy(upi_cuda_conv_group<W> *to, const upi_cuda_conv_job &g, int64_t t,
                                      int64_t end, int k)
{
    int u, l;
    UPI_UNROLL
    for (u = 0; u < W; ++u) {
        UPI_UNROLL
        for (l = 0; l < UPI_CUDA_CONV_HELD / W; ++l) to->v[u][l] = 0.0f;
        if (t + u < end)
            upi_cuda_conv_get<TYPES, UPI_CUDA_CONV_HELD / W>(to->v[u], upi_row_at(g.y, t + u, 0), k, g);
    }
}

/* halo = the gradients before SiLU of the first taps - 1 rows behind each tile. */
template <int TYPES, int W> UPI_KERNEL(64, 1) void upi_cuda_conv_borders(const upi_cuda_conv_job g)
{
    upi_cuda_conv_place p;
    upi_cuda_conv_group<W> w, x, before, ds;
    int reach[W], u;
    int64_t end;
    if (!upi_cuda_conv_place_of<W>(g, &p) || p.end == g.x.n) return;
    end = p.end + g.taps - 1 < g.x.n ? p.end + g.taps - 1 : g.x.n;
    upi_cuda_conv_weights<W>(&w, g, p.k);
    upi_cuda_conv_load<TYPES, W>(&before, g, p.end - W, p.end, p.k);
    upi_cuda_conv_load<TYPES, W>(&x, g, p.end, end, p.k);
    upi_cuda_conv_load_dy<TYPES, W>(&ds, g, p.end, end, p.k);
    upi_cuda_conv_reach<W>(reach, g, p.end, end);
    upi_cuda_conv_slopes<W>(&ds, x, before, w, reach);
    UPI_UNROLL
    for (u = 0; u < W; ++u)
        if (p.end + u < end)
            upi_cuda_conv_put<UPI_ALL_F32, UPI_CUDA_CONV_HELD / W>(upi_cuda_conv_halo(g, p.tile, u), ds.v[u],
                                                                   p.k, g);
}

/* A group's ds and how far its rows reach. */
template <int W> struct upi_cuda_conv_grad {
    upi_cuda_conv_group<W> ds;
    int reach[W];
};

/* to = the gradient of row t, number u of its group. dstate has what rows behind the call have added. */
template <int W>
UPI_DEVICE void upi_cuda_conv_dx(float *to, const upi_cuda_conv_job &g, const upi_cuda_conv_grad<W> &own,
                                 const upi_cuda_conv_grad<W> &behind, const upi_cuda_conv_group<W> &w,
                                 int64_t t, int u, int k)
{
    const int64_t kept = t - (g.x.n - (g.taps - 1));
    int j, l;
    UPI_UNROLL
    for (l = 0; l < UPI_CUDA_CONV_HELD / W; ++l) to[l] = 0.0f;
    if (kept >= 0)
        upi_cuda_conv_get<UPI_ALL_F32, UPI_CUDA_CONV_HELD / W>(to, upi_row_at(g.dstate, kept, 0), k, g);
    UPI_UNROLL
    for (j = W - 1; j >= 0; --j) {
        const int at = u + j;
        if (j > (at < W ? own.reach[at] : behind.reach[at - W])) continue;
        UPI_UNROLL
        for (l = 0; l < UPI_CUDA_CONV_HELD / W; ++l)
            to[l] = fmaf(w.v[j][l], at < W ? own.ds.v[at][l] : behind.ds.v[at - W][l], to[l]);
    }
}

/* From the tile's last group to its first one. */
template <int TYPES, int W> UPI_KERNEL(64, 6) void upi_cuda_conv_bwd_rows(const upi_cuda_conv_job g)
{
    enum { EACH = UPI_CUDA_CONV_HELD / W };
    upi_cuda_conv_place p;
    upi_cuda_conv_group<W> w, dw, x, before;
    upi_cuda_conv_grad<W> own, behind;
    const int back = g.taps - 1;
    int u, j, l;
    int64_t t;
    if (!upi_cuda_conv_place_of<W>(g, &p)) return;
    upi_cuda_conv_weights<W>(&w, g, p.k);
    upi_cuda_conv_reach<W>(behind.reach, g, p.end < g.x.n ? p.end : p.begin, p.end < g.x.n ? g.x.n : p.begin);
    UPI_UNROLL
    for (u = 0; u < W; ++u) {
        UPI_UNROLL
        for (l = 0; l < EACH; ++l) behind.ds.v[u][l] = dw.v[u][l] = 0.0f;
        if (u >= back) behind.reach[u] = -1;
        if (behind.reach[u] >= 0)
            upi_cuda_conv_get<UPI_ALL_F32, EACH>(behind.ds.v[u], upi_cuda_conv_halo(g, p.tile, u), p.k, g);
    }
    t = p.begin + (p.end - p.begin - 1) / W * W;
    upi_cuda_conv_load<TYPES, W>(&x, g, t, p.end, p.k);
    for (; t >= p.begin; t -= W) {
        upi_cuda_conv_load<TYPES, W>(&before, g, t - W, p.end, p.k);
        upi_cuda_conv_load_dy<TYPES, W>(&own.ds, g, t, p.end, p.k);
        upi_cuda_conv_reach<W>(own.reach, g, t, p.end);
        upi_cuda_conv_slopes<W>(&own.ds, x, before, w, own.reach);
        UPI_UNROLL
        for (u = W - 1; u >= 0; --u) {
            float dx[EACH];
            UPI_UNROLL
            for (j = 0; j < W; ++j) {
                if (j > own.reach[u]) continue;
                UPI_UNROLL
                for (l = 0; l < EACH; ++l)
                    dw.v[j][l] = fmaf(own.ds.v[u][l], upi_cuda_conv_at<W>(x, before, u - j, l), dw.v[j][l]);
            }
            if (t + u >= p.end) continue;
            upi_cuda_conv_dx<W>(dx, g, own, behind, w, t + u, u, p.k);
            upi_cuda_conv_put<TYPES, EACH>(upi_row_at(g.y, t + u, 0), dx, p.k, g);
        }
        behind = own;
        x = before;
    }
    UPI_UNROLL
    for (u = 0; u < W; ++u) own.reach[u] = -1;
    UPI_UNROLL
    for (u = 0; u < W; ++u) {
        float dx[EACH];
        if (p.begin > 0 || u < W - back) continue;
        upi_cuda_conv_dx<W>(dx, g, own, behind, w, u - W, u, p.k);
        upi_cuda_conv_put<UPI_ALL_F32, EACH>(g.dbefore + (int64_t)(u - W + back) * g.x.d, dx, p.k, g);
    }
    UPI_UNROLL
    for (j = 0; j < W; ++j) {
        UPI_UNROLL
        for (l = 0; l < EACH; ++l)
            if (g.parts != NULL && j < g.taps && p.k + l < g.x.d)
                g.parts[((int64_t)p.tile * g.x.d + p.k + l) * g.taps + back - j] = dw.v[j][l];
    }
}

/* ---- host ---- */

/* Some channels of a view. */
UPIPE_API upipe_view upi_cuda_conv_slice(upipe_view v, int first, int channels)
{
    v.data = upipe_offset(v.data, (size_t)first * upipe_dtype_bytes(v.dtype));
    v.d = channels;
    return v;
}

/* Channels of a thread. */
UPIPE_API int upi_cuda_conv_each(int taps)
{
    return taps <= 4 ? UPI_CUDA_CONV_HELD / 4 : UPI_CUDA_CONV_HELD / 8;
}

/* The launch for some channels; rows are set one launch after another. */
UPIPE_API void upi_cuda_conv_begin(upi_cuda_conv_job *g, const upipe_linear_conv *a, upipe_view y,
                                   upipe_view dstate, int first)
{
    const int left = a->x.d - first, channels = left < UPI_CUDA_CONV_CHANNELS ? left : UPI_CUDA_CONV_CHANNELS;
    const int each = upi_cuda_conv_each(a->taps);
    int i;
    memset(g, 0, sizeof *g);
    g->x = upi_cuda_conv_slice(a->x, first, channels);
    g->y = upi_cuda_conv_slice(y, first, channels);
    g->before = upi_cuda_conv_slice(a->before, first, channels);
    g->dstate = upi_cuda_conv_slice(dstate, first, channels);
    g->weight = a->weight + (int64_t)first * a->taps;
    g->taps = a->taps;
    g->vec = channels % each == 0;
    for (i = 0; i < 4; ++i) {
        const upipe_view v = i == 0 ? g->x : i == 1 ? g->y : i == 2 ? g->before : g->dstate;
        const size_t size = upipe_dtype_bytes(v.dtype);
        if ((uintptr_t)v.data % (size * (size_t)each) != 0 || v.n_stride % each != 0) g->vec = 0;
    }
}

/* Which rows the launch has, and where documents begin. */
UPIPE_API void upi_cuda_conv_rows_of(upi_cuda_conv_job *g, const upipe_linear_conv *a, int64_t tile,
                                     int64_t most)
{
    const int64_t tiles = (a->x.n - 1) / UPI_CUDA_CONV_ROWS + 1;
    const int64_t low = a->pos + tile * UPI_CUDA_CONV_ROWS - UPI_CUDA_CONV_BACK;
    int64_t at = low - 1;
    g->first = tile * UPI_CUDA_CONV_ROWS;
    g->tiles = (int)(tiles - tile < most ? tiles - tile : most);
    memset(g->begins, 0, sizeof g->begins);
    while ((at = upi_border_behind(&a->borders, at)) < low + UPI_CUDA_CONV_BITS)
        g->begins[(at - low) / 32] |= (uint32_t)1 << (at - low) % 32;
}

UPIPE_API unsigned upi_cuda_conv_grid(const upi_cuda_conv_job *g)
{
    const int each = upi_cuda_conv_each(g->taps);
    return (unsigned)(((int64_t)g->tiles * ((g->x.d + each - 1) / each) + UPI_CUDA_CONV_THREADS - 1) /
                      UPI_CUDA_CONV_THREADS);
}

#define UPI_LAUNCH_CONV(c, kernel, g)                                                                      \
    ((g).x.dtype == UPIPE_F32 ? (g).taps <= 4                                                              \
                                    ? UPI_LAUNCH(c, (kernel<UPI_ALL_F32, 4>), upi_cuda_conv_grid(&(g)),    \
                                                 UPI_CUDA_CONV_THREADS, 0, g)                              \
                                    : UPI_LAUNCH(c, (kernel<UPI_ALL_F32, 8>), upi_cuda_conv_grid(&(g)),    \
                                                 UPI_CUDA_CONV_THREADS, 0, g)                              \
     : (g).taps <= 4                                                                                       \
         ? UPI_LAUNCH(c, (kernel<UPI_ALL_BF16, 4>), upi_cuda_conv_grid(&(g)), UPI_CUDA_CONV_THREADS, 0, g) \
         : UPI_LAUNCH(c, (kernel<UPI_ALL_BF16, 8>), upi_cuda_conv_grid(&(g)), UPI_CUDA_CONV_THREADS, 0, g))

/* after = the last taps - 1 rows of `before` and x. */
UPIPE_API upipe_status upi_cuda_conv_after(upipe_ctx *c, const upipe_linear_conv *a)
{
    const int64_t back = a->taps - 1, of_x = a->x.n < back ? a->x.n : back;
    if (a->after.data == NULL) return UPIPE_OK;
    if (of_x < back)
        UPIPE_TRY(upi_cuda_cast(c, upipe_view_rows(a->after, 0, back - of_x),
                                upipe_view_rows(a->before, of_x, back - of_x)));
    return upi_cuda_cast(c, upipe_view_rows(a->after, back - of_x, of_x),
                         upipe_view_rows(a->x, a->x.n - of_x, of_x));
}

/* halo = rows of x before the launch's tiles; the call's first tile has those of `before`. */
UPIPE_API upipe_status upi_cuda_conv_keep(upipe_ctx *c, const upi_cuda_conv_job *g)
{
    const int skipped = g->first == 0, back = g->taps - 1, d = g->x.d;
    const int64_t row = g->first + skipped * UPI_CUDA_CONV_ROWS - back;
    if (g->tiles == skipped) return UPIPE_OK;
    return upi_cuda_cast(
        c, upipe_view_packed(g->halo + (int64_t)skipped * back * d, UPIPE_F32, g->tiles - skipped, back, d),
        upipe_view_make(upipe_view_at(g->x, row, 0), g->x.dtype, g->tiles - skipped,
                        UPI_CUDA_CONV_ROWS * g->x.n_stride, back, g->x.n_stride, d));
}

UPIPE_API upipe_status upi_cuda_linear_conv(upipe_ctx *c, const upipe_linear_conv *a)
{
    const int64_t tiles = (a->x.n + UPI_CUDA_CONV_ROWS - 1) / UPI_CUDA_CONV_ROWS;
    const int over = a->y.data == a->x.data;
    upi_cuda_conv_job g;
    int first;
    UPIPE_TRY(upi_cuda_conv_after(c, a));
    for (first = 0; first < a->x.d; first += UPI_CUDA_CONV_CHANNELS) {
        int64_t most = UPI_CUDA_CONV_TILES, tile;
        upi_cuda_conv_begin(&g, a, a->y, a->before, first);
        if (over) {
            const int64_t fit = UPIPE_CUDA_SCRATCH / 4 / ((g.taps - 1) * g.x.d);
            g.halo = (float *)upi_cuda_self(c)->scratch;
            if (fit < most) most = fit;
        }
        /* from the last rows on: those before a launch are whole yet */
        for (tile = (tiles - 1) / most * most; tile >= 0 && tiles > 0; tile -= most) {
            upi_cuda_conv_rows_of(&g, a, tile, most);
            if (over) UPIPE_TRY(upi_cuda_conv_keep(c, &g));
            UPIPE_TRY(UPI_LAUNCH_CONV(c, upi_cuda_conv_rows, g));
        }
    }
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_cuda_linear_conv_bwd(upipe_ctx *c, const upipe_linear_conv_grad *grad)
{
    const upipe_linear_conv *a = &grad->a;
    const int64_t tiles = (a->x.n + UPI_CUDA_CONV_ROWS - 1) / UPI_CUDA_CONV_ROWS;
    upi_cuda_conv_job g;
    int first;
    for (first = 0; first < a->x.d && tiles > 0; first += UPI_CUDA_CONV_CHANNELS) {
        float *const scratch = (float *)upi_cuda_self(c)->scratch;
        int64_t back, most, tile;
        upi_cuda_conv_begin(&g, a, grad->dy, grad->dstate, first);
        back = (int64_t)(g.taps - 1) * g.x.d;
        most = (UPIPE_CUDA_SCRATCH / 4 - back) / (back + (int64_t)g.taps * g.x.d);
        if (most > UPI_CUDA_CONV_TILES) most = UPI_CUDA_CONV_TILES;
        g.dbefore = scratch;
        g.halo = scratch + back;
        if (grad->dweight != NULL) g.parts = g.halo + most * back;
        /* from the first rows on: those behind a launch are whole yet */
        for (tile = 0; tile < tiles; tile += most) {
            upi_cuda_conv_rows_of(&g, a, tile, most);
            UPIPE_TRY(UPI_LAUNCH_CONV(c, upi_cuda_conv_borders, g));
            UPIPE_TRY(UPI_LAUNCH_CONV(c, upi_cuda_conv_bwd_rows, g));
            if (grad->dweight == NULL) continue;
            UPIPE_TRY(UPI_LAUNCH(c, (upi_column_sums<1>), upi_column_grid((int64_t)g.taps * g.x.d),
                                 UPI_COLUMNS, 0, grad->dweight + (int64_t)first * g.taps, g.parts,
                                 (int64_t)g.taps * g.x.d, (int64_t)g.tiles));
        }
        UPIPE_TRY(upi_cuda_cast(c, g.dstate, upipe_view_packed(g.dbefore, UPIPE_F32, g.taps - 1, 1, g.x.d)));
    }
    return UPIPE_OK;
}

/* ---- gates ---- */

enum {
    UPI_CUDA_GATES_ROWS = 16, /* of a thread, which has one head */
    UPI_CUDA_GATES_EACH = UPIPE_SUM_ROWS / UPI_CUDA_GATES_ROWS
};

UPI_DEVICE double upi_cuda_gates_sigmoid(double z)
{
    const double e = exp(-fabs(z));
    return z < 0 ? e / (1 + e) : 1 / (1 + e); /* a NaN stays one */
}

/* log(1 + e^z) */
UPI_DEVICE double upi_cuda_gates_softplus(double z)
{
    return (z > 0 ? z : 0) + log1p(exp(-fabs(z)));
}

template <int TYPES> UPI_DEVICE double upi_cuda_gates_get(const upipe_view &v, int64_t i, int head)
{
    return (double)upi_get1<TYPES>(upi_row_at(v, i, head), v.dtype, 0);
}

template <int TYPES> UPI_DEVICE void upi_cuda_gates_put(const upipe_view &v, int64_t i, int head, double x)
{
    void *const at = upi_row_at(v, i, head);
    if (TYPES == UPI_ALL_F32)
        *(float *)at = (float)x;
    else
        *(upi_bf16 *)at = upi_to_bf16((float)x);
}

/* A thread's first row; which head it has. */
UPI_DEVICE int64_t upi_cuda_gates_row(int heads, int *head)
{
    const int64_t thread = (int64_t)blockIdx.x * UPI_COLUMNS + threadIdx.x;
    *head = (int)(thread % heads);
    return thread / heads * UPI_CUDA_GATES_ROWS;
}

template <int TYPES> UPI_KERNEL(64, 1) void upi_cuda_gates_rows(const upipe_linear_gates a)
{
    int head;
    int64_t i = upi_cuda_gates_row(a.a.h, &head);
    const int64_t end = i + UPI_CUDA_GATES_ROWS < a.a.n ? i + UPI_CUDA_GATES_ROWS : a.a.n;
    const double rate = exp((double)a.a_log[head]), bias = (double)a.dt_bias[head];
    for (; i < end; ++i) {
        const double z = upi_cuda_gates_get<TYPES>(a.a, i, head) + bias;
        upi_cuda_gates_put<UPI_ALL_F32>(a.g, i, head, -rate * upi_cuda_gates_softplus(z));
        upi_cuda_gates_put<UPI_ALL_F32>(a.beta, i, head,
                                        upi_cuda_gates_sigmoid(upi_cuda_gates_get<TYPES>(a.b, i, head)));
    }
}

/* logs biases: f32 [rows / 16][heads], sums of a thread's terms in f64. */
template <int TYPES>
UPI_KERNEL(64, 1)
void upi_cuda_gates_bwd_rows(const upipe_linear_gates_grad d, float *logs, float *biases)
{
    const upipe_linear_gates &a = d.gates;
    int head;
    const int64_t first = upi_cuda_gates_row(a.a.h, &head);
    const int64_t end = first + UPI_CUDA_GATES_ROWS < a.a.n ? first + UPI_CUDA_GATES_ROWS : a.a.n;
    const double rate = exp((double)a.a_log[head]), bias = (double)a.dt_bias[head];
    double log_sum = 0, bias_sum = 0;
    int64_t i;
    if (first >= a.a.n) return;
    for (i = first; i < end; ++i) {
        const double z = upi_cuda_gates_get<TYPES>(a.a, i, head) + bias,
                     beta = upi_cuda_gates_sigmoid(upi_cuda_gates_get<TYPES>(a.b, i, head));
        const double dg = -rate * upi_cuda_gates_get<UPI_ALL_F32>(d.dg, i, head),
                     da = dg * upi_cuda_gates_sigmoid(z);
        log_sum += dg * upi_cuda_gates_softplus(z);
        bias_sum += da;
        upi_cuda_gates_put<TYPES>(a.a, i, head, da);
        upi_cuda_gates_put<TYPES>(a.b, i, head,
                                  upi_cuda_gates_get<UPI_ALL_F32>(d.dbeta, i, head) * beta * (1 - beta));
    }
    logs[first / UPI_CUDA_GATES_ROWS * a.a.h + head] = (float)log_sum;
    biases[first / UPI_CUDA_GATES_ROWS * a.a.h + head] = (float)bias_sum;
}

/* Rows first .. first + n - 1 of a call. */
UPIPE_API upipe_linear_gates upi_cuda_gates_part(const upipe_linear_gates *a, int64_t first, int64_t n)
{
    upipe_linear_gates part = *a;
    part.a = upipe_view_rows(a->a, first, n);
    part.b = upipe_view_rows(a->b, first, n);
    part.g = upipe_view_rows(a->g, first, n);
    part.beta = upipe_view_rows(a->beta, first, n);
    return part;
}

UPIPE_API unsigned upi_cuda_gates_grid(upipe_view a)
{
    return upi_column_grid((a.n + UPI_CUDA_GATES_ROWS - 1) / UPI_CUDA_GATES_ROWS * a.h);
}

/* Rows of a launch, of which the scratch holds two sums each 16. */
UPIPE_API upipe_status upi_cuda_gates_most(upipe_ctx *c, const upipe_linear_gates *a, int64_t *most)
{
    *most = upi_column_tokens(2 * (int64_t)a->a.h, UPI_CUDA_GATES_ROWS);
    if (*most > 0) return UPIPE_OK;
    return upipe_fail(&c->err, UPIPE_ERR_UNSUPPORTED, "linear attention: gates of %d heads, at most %d",
                      a->a.h, UPIPE_CUDA_SCRATCH / 8 / UPI_CUDA_GATES_EACH);
}

UPIPE_API upipe_status upi_cuda_linear_gates(upipe_ctx *c, const upipe_linear_gates *a)
{
    int64_t row, most;
    UPIPE_TRY(upi_cuda_gates_most(c, a, &most));
    for (row = 0; row < a->a.n; row += most) {
        const upipe_linear_gates part =
            upi_cuda_gates_part(a, row, a->a.n - row < most ? a->a.n - row : most);
        UPIPE_TRY(a->a.dtype == UPIPE_F32 ? UPI_LAUNCH(c, (upi_cuda_gates_rows<UPI_ALL_F32>),
                                                       upi_cuda_gates_grid(part.a), UPI_COLUMNS, 0, part)
                                          : UPI_LAUNCH(c, (upi_cuda_gates_rows<UPI_ALL_BF16>),
                                                       upi_cuda_gates_grid(part.a), UPI_COLUMNS, 0, part));
    }
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_cuda_linear_gates_bwd(upipe_ctx *c, const upipe_linear_gates_grad *g)
{
    const upipe_linear_gates *a = &g->gates;
    float *const logs = (float *)upi_cuda_self(c)->scratch;
    int64_t row, most;
    UPIPE_TRY(upi_cuda_gates_most(c, a, &most));
    for (row = 0; row < a->a.n; row += most) {
        const int64_t n = a->a.n - row < most ? a->a.n - row : most,
                      count = (n + UPI_CUDA_GATES_ROWS - 1) / UPI_CUDA_GATES_ROWS;
        float *const biases = logs + count * a->a.h;
        upipe_linear_gates_grad part = *g;
        part.gates = upi_cuda_gates_part(a, row, n);
        part.dg = upipe_view_rows(g->dg, row, n);
        part.dbeta = upipe_view_rows(g->dbeta, row, n);
        UPIPE_TRY(a->a.dtype == UPIPE_F32
                      ? UPI_LAUNCH(c, (upi_cuda_gates_bwd_rows<UPI_ALL_F32>),
                                   upi_cuda_gates_grid(part.gates.a), UPI_COLUMNS, 0, part, logs, biases)
                      : UPI_LAUNCH(c, (upi_cuda_gates_bwd_rows<UPI_ALL_BF16>),
                                   upi_cuda_gates_grid(part.gates.a), UPI_COLUMNS, 0, part, logs, biases));
        if (g->da_log != NULL)
            UPIPE_TRY(UPI_LAUNCH(c, (upi_column_sums<UPI_CUDA_GATES_EACH>), upi_column_grid(a->a.h),
                                 UPI_COLUMNS, 0, g->da_log, logs, (int64_t)a->a.h, count));
        if (g->ddt_bias != NULL)
            UPIPE_TRY(UPI_LAUNCH(c, (upi_column_sums<UPI_CUDA_GATES_EACH>), upi_column_grid(a->a.h),
                                 UPI_COLUMNS, 0, g->ddt_bias, biases, (int64_t)a->a.h, count));
    }
    return UPIPE_OK;
}

#endif

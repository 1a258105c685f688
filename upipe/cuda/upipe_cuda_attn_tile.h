/* upipe_cuda_attn_tile.h -- what attention kernels share: arguments, what a tile of queries sees
 *
 * For every generation of tensor cores: the arguments of a call, the tiles of keys that some queries go
 * through, and what every kernel refuses.
 */
#ifndef UPIPE_CUDA_ATTN_TILE_H
#define UPIPE_CUDA_ATTN_TILE_H

#include "upipe_cuda_attn_mask.h"

#define UPI_CUDA_ATTN_LOG2E 1.4426950408889634f

/* ---- on the device ---- */

/* Strides in elements. */
typedef struct upi_cuda_attn_args {
    const upi_bf16 *q, *k, *v;
    void *o;
    float *lse;
    int64_t q_stride, q_head, k_stride, k_head, v_stride, v_head, o_stride, o_head, lse_stride, lse_head;
    int64_t queries, keys;
    int64_t ahead; /* query i sees keys up to i + ahead */
    int heads, group, d, causal, merge;
    int wide;          /* o is f32 */
    float scale, rate; /* rate = scale * log2(e) */
    int v_dim;
    const float *sinks;            /* [heads], or NULL */
    const upi_cuda_attn_run *runs; /* masked: of queries forward, of keys backward */
    /* Under a soft-cap, `scale`, a score is scale * tanh(squash * product); its slope at 0. Else squash is
     * 0. */
    float squash, slope;
} upi_cuda_attn_args;

/* Keys that the `rows` queries from q0 see between them, where no table says it: [0, result). */
UPI_DEVICE int64_t upi_cuda_attn_reach(const upi_cuda_attn_args &a, int64_t q0, int rows)
{
    int64_t reach = (a.queries - q0 < rows ? a.queries : q0 + rows) + a.ahead;
    if (!a.causal || reach > a.keys) return a.keys;
    return reach > 0 ? reach : 0;
}

/* Whether an exponent of 2 must come of a difference: f32 rounds one FMA's second product by 2^-14 or more. */
UPI_DEVICE int upi_cuda_attn_huge(float exponent)
{
    return fabsf(exponent) > 1024;
}

/* What one instruction reads or writes. */
struct alignas(16) upi_cuda_attn_chunk16 {
    uint32_t word[4];
};
struct alignas(8) upi_cuda_attn_pair {
    float x, y;
};

/* x, or what is as good as infinite. */
UPI_DEVICE int upi_cuda_attn_near(int64_t x, int finite)
{
    const int64_t far = 1 << 30;
    return (int)(!finite || x > far ? far : x < -far ? -far : x);
}

/* x, anew: what is made of the result is made again in every turn of a loop. Otherwise the compiler keeps
 * it in registers from one turn to the next, and there are none to spare. */
UPI_DEVICE int upi_cuda_attn_anew(int x)
{
#ifndef UPIPE_CUDA_SEAMS
    asm volatile("" : "+r"(x));
#endif
    return x;
}

/* A loop whose whole body n times over would take more registers than there are: that many turns at once. */
#ifdef UPIPE_CUDA_SEAMS
#define UPI_CUDA_ATTN_TURNS(n)
#else
#define UPI_CUDA_ATTN_PRAGMA(text) _Pragma(#text)
#define UPI_CUDA_ATTN_TURNS(n)     UPI_CUDA_ATTN_PRAGMA(unroll n)
#endif

/* Tiles of keys that a block, or a warp, goes through: [first, end), of which [whole, whole_end) need no
 * mask. */
typedef struct upi_cuda_attn_tiles {
    int first, end, whole, whole_end;
} upi_cuda_attn_tiles;

/* Those of `count` queries from `query`, in tiles of `keys`; past the last query they say nothing. */
template <int MASKED>
UPI_DEVICE upi_cuda_attn_tiles upi_cuda_attn_tiles_of(const upi_cuda_attn_args &a, int64_t query, int count,
                                                      int keys)
{
    upi_cuda_attn_tiles x = {0, 0, 0, 0};
    if (!MASKED) {
        x.end = (int)((upi_cuda_attn_reach(a, query, count) + keys - 1) / keys);
        x.whole_end = (int)(upi_cuda_attn_reach(a, query, 1) / keys);
    } else if (query < a.queries) {
        const upi_cuda_attn_run some = upi_cuda_attn_some(a.runs, query, count, a.queries);
        const upi_cuda_attn_run all = upi_cuda_attn_all(a.runs, query, count, a.queries);
        x.first = some.first / keys;
        x.end = some.first < some.end ? (some.end + keys - 1) / keys : 0;
        x.whole = (all.first + keys - 1) / keys;
        x.whole_end = all.end / keys;
    }
    return x;
}

/* ---- the backward, on the device ---- */

/* A call of the backward. */
typedef struct upi_cuda_attn_bwd_args {
    upi_cuda_attn_args a; /* o is not used */
    const upi_bf16 *dout;
    const float *delta;
    upi_bf16 *dq; /* not with merge */
    float *dk, *dv;
    int64_t dout_stride, dout_head, delta_stride, delta_head, dq_stride, dq_head, dk_stride, dk_head,
        dv_stride, dv_head;
    int *turns;    /* [1 + heads * tiles]: the next ticket; whose turn it is at each tile of queries */
    float *dq_sum; /* the sums: [heads][queries][d], or what is added to */
    int64_t dq_sum_stride, dq_sum_head;
    int tiles, blocks; /* of queries, of keys */
} upi_cuda_attn_bwd_args;

/* Tiles of queries that a block of keys takes, [first, end); both ascend with the block. */
typedef struct upi_cuda_attn_bwd_tiles {
    int first, end;
} upi_cuda_attn_bwd_tiles;

template <int KEYS, int ROWS, int MASKED>
UPI_DEVICE upi_cuda_attn_bwd_tiles upi_cuda_attn_bwd_tiles_of(const upi_cuda_attn_bwd_args &g, int block)
{
    const int64_t k0 = (int64_t)block * KEYS;
    upi_cuda_attn_bwd_tiles x = {g.tiles, g.tiles};
    if (MASKED && k0 < g.a.keys) {
        const upi_cuda_attn_run some = upi_cuda_attn_some(g.a.runs, k0, KEYS, g.a.keys);
        /* Keys that no query sees have an empty run: behind the last query it is no part of a tile. Between
         * two queries of a tile it is, lest blocks that add to the tile have one among them that does not. */
        x.first = some.first < g.a.queries ? some.first / ROWS : g.tiles;
        x.end = (some.end + ROWS - 1) / ROWS;
    } else if (!MASKED) {
        const int64_t first = g.a.causal && k0 > g.a.ahead ? k0 - g.a.ahead : 0; /* query that sees key k0 */
        x.first = (int)((first >= g.a.queries || k0 >= g.a.keys ? g.a.queries + ROWS - 1 : first) / ROWS);
    }
    return x;
}

/* The first column of a warp's tile i of 8 columns, from its first tile on, where SHARES warps take two tiles each in
 * turn. */
template <int SHARES> UPI_DEVICE int upi_cuda_attn_column(int i)
{
    return (i / 2 * 2 * SHARES + i % 2) * 8;
}

/* A block's gradient of its keys, to or from registers: rows from `first`, columns from `column`. */
template <int N, int SHARES>
UPI_DEVICE void upi_cuda_attn_grad_get(float x[N][4], const float *from, int64_t stride, int rows, int first,
                                       int column, int d)
{
    const int lane = upi_cuda_attn_anew((int)threadIdx.x) % 32;
    UPI_UNROLL
    for (int i = 0; i < N; ++i) {
        UPI_UNROLL
        for (int half = 0; half < 2; ++half) {
            const int row = first + lane / 4 + half * 8, c = column + upi_cuda_attn_column<SHARES>(i);
            const int there = row < rows && c < d;
            upi_cuda_attn_pair pair = {0, 0};
            if (there) pair = *(const upi_cuda_attn_pair *)(from + row * stride + c + lane % 4 * 2);
            x[i][2 * half] = pair.x;
            x[i][2 * half + 1] = pair.y;
        }
    }
}

template <int N, int SHARES>
UPI_DEVICE void upi_cuda_attn_grad_put(const float x[N][4], float *to, int64_t stride, int64_t rows,
                                       int first, int column, int d)
{
    const int lane = upi_cuda_attn_anew((int)threadIdx.x) % 32;
    UPI_UNROLL
    for (int i = 0; i < N; ++i) {
        UPI_UNROLL
        for (int half = 0; half < 2; ++half) {
            const int row = first + lane / 4 + half * 8, c = column + upi_cuda_attn_column<SHARES>(i);
            const upi_cuda_attn_pair pair = {x[i][2 * half], x[i][2 * half + 1]};
            if (row < rows && c < d) *(upi_cuda_attn_pair *)(to + row * stride + c + lane % 4 * 2) = pair;
        }
    }
}

/* ---- host ---- */

/* Every row of the view begins at a multiple of 16 bytes. */
UPIPE_API upipe_status upi_cuda_attn_aligned(upipe_ctx *c, const char *name, upipe_view v)
{
    const int64_t each = 16 / (int64_t)upipe_dtype_bytes(v.dtype);
    if (v.n == 0) return UPIPE_OK;
    if ((uintptr_t)v.data % 16 == 0 && (v.n == 1 || v.n_stride % each == 0) &&
        (v.h == 1 || v.h_stride % each == 0))
        return UPIPE_OK;
    return upipe_fail(
        &c->err, UPIPE_ERR_UNSUPPORTED,
        "attention: %s at %p with strides of %lld and %lld %s elements; rows must begin at multiples "
        "of 16 bytes",
        name, v.data, (long long)v.n_stride, (long long)v.h_stride, upipe_dtype_name(v.dtype));
}

/* What both directions refuse. */
UPIPE_API upipe_status upi_cuda_attn_check(upipe_ctx *c, const upipe_attn *a)
{
    const upipe_cuda *self = (const upipe_cuda *)c->ops->self;
    if (self->margin < 0 || self->margin >= self->processors)
        return upipe_fail(
            &c->err, UPIPE_ERR_ARG,
            "upipe_cuda.margin is %d: device %d has %d multiprocessors, so 0 to %d of them are left free",
            self->margin, self->device, self->processors, self->processors - 1);
    UPIPE_TRY(upi_cuda_attn_check_masks(c, a));
    UPIPE_TRY(upi_cuda_attn_aligned(c, "q", a->q));
    UPIPE_TRY(upi_cuda_attn_aligned(c, "k", a->k));
    return upi_cuda_attn_aligned(c, "v", a->v);
}

UPIPE_API upi_cuda_attn_args upi_cuda_attn_args_make(const upipe_attn *a)
{
    upi_cuda_attn_args x;
    memset(&x, 0, sizeof x);
    x.q = (const upi_bf16 *)a->q.data;
    x.k = (const upi_bf16 *)a->k.data;
    x.v = (const upi_bf16 *)a->v.data;
    x.lse = (float *)a->lse.data;
    x.q_stride = a->q.n_stride, x.q_head = a->q.h_stride;
    x.k_stride = a->k.n_stride, x.k_head = a->k.h_stride;
    x.v_stride = a->v.n_stride, x.v_head = a->v.h_stride;
    x.lse_stride = a->lse.n_stride, x.lse_head = a->lse.h_stride;
    x.queries = a->q.n;
    x.keys = a->k.n;
    x.ahead = upi_attn_ahead(a);
    x.heads = a->q.h;
    x.group = a->q.h / a->k.h;
    x.d = a->q.d;
    x.v_dim = a->v.d;
    x.causal = a->mask.causal;
    x.sinks = a->mask.sinks;
    x.runs = upi_cuda_attn_masked(a) ? (const upi_cuda_attn_run *)a->work : NULL;
    x.slope = upipe_attn_scale(a);
    x.scale = a->mask.softcap > 0 ? a->mask.softcap : x.slope;
    x.squash = a->mask.softcap > 0 ? x.slope / a->mask.softcap : 0;
    x.rate = x.scale * UPI_CUDA_ATTN_LOG2E;
    return x;
}

/* Blocks of keys; one where there are none, for it writes the zeros. */
UPIPE_API int64_t upi_cuda_attn_key_blocks(int64_t keys, int size)
{
    return keys > 0 ? (keys + size - 1) / size : 1;
}

/* Tells the host, where it has asked, which kernels a call takes; `why` not those for 9.0, or NULL. */
UPIPE_API void upi_cuda_attn_chosen(upipe_ctx *c, const char *direction, const char *kernels, const char *why)
{
    char *to = ((const upipe_cuda *)c->ops->self)->choice;
    if (to == NULL) return;
    snprintf(to, UPIPE_CUDA_CHOICE, "attention %s: kernels for %s%s%s", direction, kernels,
             why != NULL ? ", as " : "", why != NULL ? why : "");
}

#endif

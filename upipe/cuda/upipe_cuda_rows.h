/* upipe_cuda_rows.h -- copies, casts, and all that works row by row
 *
 * Fills the table's sync, copy, zero, cast, rowdot, sum, add and scale.
 *
 *     upi_cuda_rowdot(...)         [tokens][heads] = a . b
 *
 * A thread works on eight neighbouring elements at a time, in 16-byte loads where every view's rows begin at
 * multiples of 16 bytes, otherwise one by one. A team of 1, 2, 4 .. 32 threads side by side, or a block,
 * works on a row, or on one piece of a row that is summed by nobody. Either way an element has one thread and
 * a sum one order, which follow from d alone: as on the CPU the bits of a row depend neither on strides, nor on
 * its neighbours, nor on how tokens are split over calls. Arithmetic is f32, rounded once where a bf16 is
 * stored.
 */
#ifndef UPIPE_CUDA_ROWS_H
#define UPIPE_CUDA_ROWS_H

#include <math.h>

#include "../upipe_ops.h"
#include "upipe_cuda_kernel.h"

enum {
    UPI_EIGHT = 8,   /* elements that a thread holds */
    UPI_BLOCK = 256, /* threads of a block */
    UPI_WAVES = 32   /* blocks a processor at most, in a grid that strides over its work */
};

/* A kernel's storage types: all of its views have one of them, or each says itself. */
enum { UPI_ALL_F32, UPI_ALL_BF16, UPI_MIXED };

UPIPE_API int upi_types(const upipe_view *v, int count)
{
    int i;
    for (i = 1; i < count; ++i)
        if (v[i].dtype != v[0].dtype) return UPI_MIXED;
    return v[0].dtype == UPIPE_F32 ? UPI_ALL_F32 : UPI_ALL_BF16;
}

/* The launch of a kernel for these types; more arguments follow the grid's. */
#define UPI_LAUNCH_TYPES(c, types, kernel, grid, block, shared, ...)                                     \
    ((types) == UPI_ALL_F32    ? UPI_LAUNCH(c, (kernel<UPI_ALL_F32>), grid, block, shared, __VA_ARGS__)  \
     : (types) == UPI_ALL_BF16 ? UPI_LAUNCH(c, (kernel<UPI_ALL_BF16>), grid, block, shared, __VA_ARGS__) \
                               : UPI_LAUNCH(c, (kernel<UPI_MIXED>), grid, block, shared, __VA_ARGS__))

UPIPE_API const upipe_cuda *upi_cuda_self(const upipe_ctx *c)
{
    return (const upipe_cuda *)c->ops->self;
}

/* ---- how rows are dealt out ---- */

/* Rows of d elements, in teams of 2^shift threads. vec: rows begin at multiples of 16 bytes in all views. */
typedef struct upi_span {
    int64_t tokens, heads, d;
    int64_t pieces; /* of a row, one a team; 1 where teams walk along their row */
    int64_t teams;  /* tokens * heads * pieces */
    int shift, vec;
} upi_span;

/* Rows of the first view's shape, given out piece by piece. join: rows that follow each other without a gap
 * in every view are one long row. */
UPIPE_API upi_span upi_span_of(const upipe_view *v, int count, int join)
{
    upi_span s;
    int64_t eights;
    int i, heads_join = join, tokens_join;
    s.tokens = v[0].n;
    s.heads = v[0].h;
    s.d = v[0].d;
    s.vec = 1;
    for (i = 0; i < count; ++i)
        if (v[i].h > 1 && v[i].h_stride != v[i].d) heads_join = 0;
    if (heads_join) {
        s.d *= s.heads;
        s.heads = 1;
    }
    tokens_join = heads_join;
    for (i = 0; i < count; ++i)
        if (v[i].n > 1 && v[i].n_stride != s.d) tokens_join = 0;
    if (tokens_join) {
        s.d *= s.tokens;
        s.tokens = 1;
    }
    for (i = 0; i < count; ++i) {
        int64_t size = (int64_t)upipe_dtype_bytes(v[i].dtype);
        if ((uintptr_t)v[i].data % 16 != 0 || (s.tokens > 1 && v[i].n_stride * size % 16 != 0) ||
            (s.heads > 1 && v[i].h_stride * size % 16 != 0))
            s.vec = 0;
    }
    eights = (s.d + UPI_EIGHT - 1) / UPI_EIGHT;
    for (s.shift = 0; s.shift < 8 && (int64_t)1 << s.shift < eights; ++s.shift) {
    }
    s.pieces = (eights + ((int64_t)1 << s.shift) - 1) >> s.shift;
    s.teams = s.tokens * s.heads * s.pieces;
    return s;
}

/* The same for sums along a row: a team walks along its own. Teams are of a warp at most, or, where rows are
 * long, a block each, so that what a processor has in hand stays in its caches for a second look. */
UPIPE_API upi_span upi_span_of_rows(const upipe_view *v, int count)
{
    upi_span s = upi_span_of(v, count, 0);
    if (s.shift > 5) s.shift = s.d > 1024 ? 8 : 5;
    s.pieces = 1;
    s.teams = s.tokens * s.heads;
    return s;
}

/* Blocks for these teams, at most some waves of them. */
UPIPE_API unsigned upi_span_grid(const upipe_ctx *c, upi_span s)
{
    int64_t most = (int64_t)upi_cuda_self(c)->processors * UPI_WAVES;
    int64_t blocks = (s.teams + (UPI_BLOCK >> s.shift) - 1) / (UPI_BLOCK >> s.shift);
    return (unsigned)(blocks < most ? blocks : most);
}

/* Where a thread works: token, head, its first element of the row, and the elements from one turn to the
 * next. */
typedef struct upi_place {
    int64_t i, j, k, step;
    int64_t d; /* the row ends here; 0 for a team without work */
} upi_place;

/* The team's number in the grid, of which the first one of the block is `first`. */
UPI_DEVICE upi_place upi_place_of(const upi_span &s, int64_t first)
{
    upi_place p;
    int64_t team = first + (threadIdx.x >> s.shift), row = team, piece = 0;
    if (s.pieces > 1) {
        row = team / s.pieces;
        piece = team % s.pieces;
    }
    p.i = row;
    p.j = 0;
    if (s.heads > 1) {
        p.i = row / s.heads;
        p.j = row % s.heads;
    }
    p.step = (int64_t)UPI_EIGHT << s.shift;
    p.k = piece * p.step + (threadIdx.x & ((1u << s.shift) - 1)) * UPI_EIGHT;
    p.d = team < s.teams ? s.d : 0;
    return p;
}

/* A loop whose body has barriers or shuffles: all threads of a block make the same turns. */
#define UPI_EACH_TEAM(s, first)                                                             \
    for (int64_t first = (int64_t)blockIdx.x * (UPI_BLOCK >> (s).shift); first < (s).teams; \
         first += (int64_t)gridDim.x * (UPI_BLOCK >> (s).shift))

/* ---- eight elements, or the last few, of a row ---- */

/* As they lie: f32 one a word, bf16 two a word. */
typedef struct upi_eight {
    uint32_t w[UPI_EIGHT];
} upi_eight;

template <int TYPES> UPI_DEVICE bool upi_is_f32(upipe_dtype dtype)
{
    return TYPES == UPI_MIXED ? dtype == UPIPE_F32 : TYPES == UPI_ALL_F32;
}

UPI_DEVICE void upi_load16(uint32_t *w, const void *p)
{
    __builtin_memcpy(w, __builtin_assume_aligned(p, 16), 16);
}

UPI_DEVICE void upi_store16(void *p, const uint32_t *w)
{
    __builtin_memcpy(__builtin_assume_aligned(p, 16), w, 16);
}

/* Elements k .. k+7 of the row, zeros from d on. */
template <int TYPES>
UPI_DEVICE upi_eight upi_eight_load(const void *row, upipe_dtype dtype, int64_t k, int64_t d, int vec)
{
    upi_eight e = {{0, 0, 0, 0, 0, 0, 0, 0}};
    int l;
    if (upi_is_f32<TYPES>(dtype)) {
        const float *p = (const float *)row + k;
        if (vec && k + UPI_EIGHT <= d) {
            upi_load16(e.w, p);
            upi_load16(e.w + 4, p + 4);
        } else {
            UPI_UNROLL
            for (l = 0; l < UPI_EIGHT; ++l)
                if (k + l < d) e.w[l] = upi_as_bits(p[l]);
        }
    } else {
        const upi_bf16 *p = (const upi_bf16 *)row + k;
        if (vec && k + UPI_EIGHT <= d) {
            upi_load16(e.w, p);
        } else {
            UPI_UNROLL
            for (l = 0; l < UPI_EIGHT; ++l)
                if (k + l < d) e.w[l / 2] |= (uint32_t)p[l] << 16 * (l % 2);
        }
    }
    return e;
}

template <int TYPES>
UPI_DEVICE void upi_eight_store(void *row, upipe_dtype dtype, int64_t k, int64_t d, int vec,
                                const upi_eight &e)
{
    int l;
    if (upi_is_f32<TYPES>(dtype)) {
        float *p = (float *)row + k;
        if (vec && k + UPI_EIGHT <= d) {
            upi_store16(p, e.w);
            upi_store16(p + 4, e.w + 4);
        } else {
            UPI_UNROLL
            for (l = 0; l < UPI_EIGHT; ++l)
                if (k + l < d) p[l] = upi_as_float(e.w[l]);
        }
    } else {
        upi_bf16 *p = (upi_bf16 *)row + k;
        if (vec && k + UPI_EIGHT <= d) {
            upi_store16(p, e.w);
        } else {
            UPI_UNROLL
            for (l = 0; l < UPI_EIGHT; ++l)
                if (k + l < d) p[l] = (upi_bf16)(e.w[l / 2] >> 16 * (l % 2) & 0xffff);
        }
    }
}

/* Eight numbers. */
typedef struct upi_numbers {
    float v[UPI_EIGHT];
} upi_numbers;

template <int TYPES>
UPI_DEVICE upi_numbers upi_get(const void *row, upipe_dtype dtype, int64_t k, int64_t d, int vec)
{
    upi_eight e = upi_eight_load<TYPES>(row, dtype, k, d, vec);
    upi_numbers x;
    int l;
    UPI_UNROLL
    for (l = 0; l < UPI_EIGHT; ++l)
        x.v[l] = upi_as_float(upi_is_f32<TYPES>(dtype) ? e.w[l]
                              : l % 2                  ? e.w[l / 2] & 0xffff0000
                                                       : e.w[l / 2] << 16);
    return x;
}

template <int TYPES>
UPI_DEVICE void upi_put(void *row, upipe_dtype dtype, int64_t k, int64_t d, int vec, const upi_numbers &x)
{
    upi_eight e;
    int l;
    if (upi_is_f32<TYPES>(dtype)) {
        UPI_UNROLL
        for (l = 0; l < UPI_EIGHT; ++l) e.w[l] = upi_as_bits(x.v[l]);
    } else {
        UPI_UNROLL
        for (l = 0; l < UPI_EIGHT; l += 2) e.w[l / 2] = upi_pack_bf16(x.v[l], x.v[l + 1]);
    }
    upi_eight_store<TYPES>(row, dtype, k, d, vec, e);
}

/* One number. */
template <int TYPES> UPI_DEVICE float upi_get1(const void *row, upipe_dtype dtype, int64_t k)
{
    return upi_is_f32<TYPES>(dtype) ? ((const float *)row)[k] : upi_from_bf16(((const upi_bf16 *)row)[k]);
}

UPI_DEVICE char *upi_row_at(const upipe_view &v, int64_t i, int64_t j)
{
    return (char *)v.data + (i * v.n_stride + j * v.h_stride) * (v.dtype == UPIPE_F32 ? 4 : 2);
}

/* Of a view, at a place. */
template <int TYPES> UPI_DEVICE upi_numbers upi_view_get(const upipe_view &v, const upi_place &p, int vec)
{
    return upi_get<TYPES>(upi_row_at(v, p.i, p.j), v.dtype, p.k, p.d, vec);
}

template <int TYPES>
UPI_DEVICE void upi_view_put(const upipe_view &v, const upi_place &p, int vec, const upi_numbers &x)
{
    upi_put<TYPES>(upi_row_at(v, p.i, p.j), v.dtype, p.k, p.d, vec, x);
}

/* The sum over a team of 2^shift threads, in one order, for all of them. A team that is a block takes turns
 * with `buffer`, a float for each of its warps. */
UPI_DEVICE float upi_team_sum(float x, int shift, float *buf)
{
    int step, w;
    for (step = 1; step < 32 && step < 1 << shift; step *= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    if (shift <= 5) return x;
    __syncthreads();
    if (threadIdx.x % 32 == 0) buf[threadIdx.x / 32] = x;
    __syncthreads();
    x = buf[0];
    for (w = 1; w < UPI_BLOCK / 32; ++w) x += buf[w];
    return x;
}

enum { UPI_TEAM_BUF = UPI_BLOCK / 32 * 4 }; /* bytes of shared memory that team sums need */

/* ---- bytes ---- */

UPIPE_API upipe_status upi_cuda_sync(upipe_ctx *c)
{
    UPIPE_TRY(upi_cuda_host_waits(c, "sync"));
    UPIPE_CUDA_TRY(&c->err, cudaStreamSynchronize((cudaStream_t)c->stream));
    return UPIPE_OK;
}

/* Memory that the host owns without the device's knowledge. */
UPIPE_API upipe_status upi_cuda_pageable(upipe_ctx *c, const void *p, int *pageable)
{
    struct cudaPointerAttributes at;
    UPIPE_CUDA_TRY(&c->err, cudaPointerGetAttributes(&at, p));
    *pageable = at.type == cudaMemoryTypeUnregistered;
    return UPIPE_OK;
}

/* A copy of pageable memory usually returns when it is done, but nothing says so for every system: one whose
 * device reads that memory itself need not stage it. So the stream is waited for. */
UPIPE_API upipe_status upi_cuda_copy(upipe_ctx *c, void *dst, const void *src, size_t bytes)
{
    int to, from;
    UPIPE_TRY(upi_check_copy(c, dst, src, bytes));
    if (bytes == 0) return UPIPE_OK;
    UPIPE_TRY(upi_cuda_pageable(c, dst, &to));
    UPIPE_TRY(upi_cuda_pageable(c, src, &from));
    if (to || from) UPIPE_TRY(upi_cuda_host_waits(c, "a copy of ordinary host memory"));
    UPIPE_CUDA_TRY(&c->err, cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, (cudaStream_t)c->stream));
    if (to || from) UPIPE_TRY(upi_cuda_sync(c));
    return to ? upi_comm_results(c) : UPIPE_OK;
}

UPIPE_API upipe_status upi_cuda_zero(upipe_ctx *c, void *dst, size_t bytes)
{
    UPIPE_TRY(upi_check_zero(c, dst, bytes));
    if (bytes == 0) return UPIPE_OK;
    UPIPE_CUDA_TRY(&c->err, cudaMemsetAsync(dst, 0, bytes, (cudaStream_t)c->stream));
    return UPIPE_OK;
}

/* ---- element by element ---- */

/* Between equal types the bits go as they are, those of a NaN too. */
template <int TYPES> UPI_KERNEL(256, 1) void upi_cast_rows(upipe_view dst, upipe_view src, upi_span s)
{
    upi_need_ieee();
    UPI_EACH_TEAM(s, first)
    {
        upi_place p = upi_place_of(s, first);
        if (TYPES == UPI_MIXED)
            upi_view_put<TYPES>(dst, p, s.vec, upi_view_get<TYPES>(src, p, s.vec));
        else
            upi_eight_store<TYPES>(
                upi_row_at(dst, p.i, p.j), dst.dtype, p.k, p.d, s.vec,
                upi_eight_load<TYPES>(upi_row_at(src, p.i, p.j), src.dtype, p.k, p.d, s.vec));
    }
}

UPIPE_API upipe_status upi_cuda_cast(upipe_ctx *c, upipe_view dst, upipe_view src)
{
    upipe_view v[2];
    upi_span s;
    UPIPE_TRY(upi_check_cast(c, dst, src));
    if (dst.n == 0) return UPIPE_OK;
    v[0] = dst;
    v[1] = src;
    s = upi_span_of(v, 2, 1);
    return UPI_LAUNCH_TYPES(c, upi_types(v, 2), upi_cast_rows, upi_span_grid(c, s), UPI_BLOCK, 0, dst, src,
                            s);
}

template <int TYPES> UPI_KERNEL(256, 1) void upi_add_rows(upipe_view y, upipe_view x, upi_span s)
{
    UPI_EACH_TEAM(s, first)
    {
        upi_place p = upi_place_of(s, first);
        upi_numbers a = upi_view_get<TYPES>(y, p, s.vec), b = upi_view_get<TYPES>(x, p, s.vec);
        int l;
        UPI_UNROLL
        for (l = 0; l < UPI_EIGHT; ++l) a.v[l] += b.v[l];
        upi_view_put<TYPES>(y, p, s.vec, a);
    }
}

UPIPE_API upipe_status upi_cuda_add(upipe_ctx *c, upipe_view y, upipe_view x)
{
    upipe_view v[2];
    upi_span s;
    UPIPE_TRY(upi_check_add(c, y, x));
    if (y.n == 0) return UPIPE_OK;
    v[0] = y;
    v[1] = x;
    s = upi_span_of(v, 2, 1);
    return UPI_LAUNCH_TYPES(c, upi_types(v, 2), upi_add_rows, upi_span_grid(c, s), UPI_BLOCK, 0, y, x, s);
}

template <int TYPES>
UPI_KERNEL(256, 1)
void upi_scale_rows(upipe_view y, upipe_view x, float factor, upi_span s)
{
    UPI_EACH_TEAM(s, first)
    {
        upi_place p = upi_place_of(s, first);
        upi_numbers a = upi_view_get<TYPES>(x, p, s.vec);
        int l;
        UPI_UNROLL
        for (l = 0; l < UPI_EIGHT; ++l) a.v[l] *= factor;
        upi_view_put<TYPES>(y, p, s.vec, a);
    }
}

UPIPE_API upipe_status upi_cuda_scale(upipe_ctx *c, upipe_view y, upipe_view x, float factor)
{
    upipe_view v[2];
    upi_span s;
    UPIPE_TRY(upi_check_scale(c, y, x, factor));
    if (y.n == 0) return UPIPE_OK;
    v[0] = y;
    v[1] = x;
    s = upi_span_of(v, 2, 1);
    return UPI_LAUNCH_TYPES(c, upi_types(v, 2), upi_scale_rows, upi_span_grid(c, s), UPI_BLOCK, 0, y, x,
                            factor, s);
}

/* src is a view of dst's shape, packed, for the first term; the others follow `stride` floats apart. */
template <int TYPES>
UPI_KERNEL(256, 1)
void upi_sum_rows(upipe_view dst, upipe_view src, int64_t stride, int count, int accumulate, upi_span s)
{
    UPI_EACH_TEAM(s, first)
    {
        upi_place p = upi_place_of(s, first);
        const float *from = (const float *)upi_row_at(src, p.i, p.j);
        upi_numbers sum = {{0, 0, 0, 0, 0, 0, 0, 0}};
        int part, l;
        if (accumulate) sum = upi_view_get<TYPES>(dst, p, s.vec);
        for (part = 0; part < count; ++part, from += stride) {
            upi_numbers x = upi_get<UPI_ALL_F32>(from, UPIPE_F32, p.k, p.d, s.vec);
            UPI_UNROLL
            for (l = 0; l < UPI_EIGHT; ++l) sum.v[l] += x.v[l];
        }
        upi_view_put<TYPES>(dst, p, s.vec, sum);
    }
}

UPIPE_API upipe_status upi_cuda_sum(upipe_ctx *c, upipe_view dst, const float *src, int64_t stride, int count,
                                    int accumulate)
{
    upipe_view v[2];
    upi_span s;
    UPIPE_TRY(upi_check_sum(c, dst, src, count, accumulate));
    if (dst.n == 0) return UPIPE_OK;
    v[0] = dst;
    v[1] = upipe_view_packed((void *)(uintptr_t)src, UPIPE_F32, dst.n, dst.h, dst.d);
    s = upi_span_of(v, 2, 1);
    if (stride % 4 != 0 && count > 1) s.vec = 0;
    return UPI_LAUNCH_TYPES(c, upi_types(v, 1), upi_sum_rows, upi_span_grid(c, s), UPI_BLOCK, 0, dst, v[1],
                            stride, count, accumulate, s);
}

/* ---- rowdot ---- */

template <int TYPES>
UPI_KERNEL(256, 1)
void upi_rowdot_rows(upipe_view out, upipe_view a, upipe_view b, upi_span s)
{
    UPI_SHARED(float, buf);
    UPI_EACH_TEAM(s, first)
    {
        upi_place p = upi_place_of(s, first);
        float sum = 0;
        int l, writes = p.d > 0 && p.k == 0;
        for (; p.k < p.d; p.k += p.step) {
            upi_numbers x = upi_view_get<TYPES>(a, p, s.vec), y = upi_view_get<TYPES>(b, p, s.vec);
            UPI_UNROLL
            for (l = 0; l < UPI_EIGHT; ++l) sum = fmaf(x.v[l], y.v[l], sum);
        }
        sum = upi_team_sum(sum, s.shift, buf);
        if (writes) *(float *)upi_row_at(out, p.i, p.j) = sum;
    }
}

/* Elements k, k+1 of a row of bf16, zeros from d on. */
UPI_DEVICE uint32_t upi_get_pair(const upipe_view &v, int64_t i, int64_t j, int64_t k, int vec)
{
    const upi_bf16 *p;
    if (i >= v.n || k >= v.d) return 0;
    p = (const upi_bf16 *)upi_row_at(v, i, j) + k;
    if (vec && k + 1 < v.d) return *(const uint32_t *)(const void *)p;
    return p[0] | (k + 1 < v.d ? (uint32_t)p[1] << 16 : 0u);
}

/* Sixteen rows a warp, by the instructions that form dO * V: of a whole tile a * b^T the diagonal is kept,
 * rows 0..7 of the first eight columns and 8..15 of the next. Row r of either half is in lane 4 r + r / 2. */
template <int TYPES>
UPI_KERNEL(256, 1)
void upi_rowdot_tiles(upipe_view out, upipe_view a, upipe_view b, int64_t tiles, int vec)
{
    int64_t tile = (int64_t)blockIdx.x * (UPI_BLOCK / 32) + threadIdx.x / 32, k;
    int lane = threadIdx.x % 32, row = lane / 4;
    for (; tile < tiles; tile += (int64_t)gridDim.x * (UPI_BLOCK / 32)) {
        int64_t i = tile / a.h * 16 + row, j = tile % a.h;
        float upper[4] = {0, 0, 0, 0}, lower[4] = {0, 0, 0, 0};
        for (k = lane % 4 * 2; k - lane % 4 * 2 < a.d; k += 16) {
            uint32_t x[4], y[2];
            x[0] = upi_get_pair(a, i, j, k, vec);
            x[1] = upi_get_pair(a, i + 8, j, k, vec);
            x[2] = upi_get_pair(a, i, j, k + 8, vec);
            x[3] = upi_get_pair(a, i + 8, j, k + 8, vec);
            y[0] = upi_get_pair(b, i, j, k, vec);
            y[1] = upi_get_pair(b, i, j, k + 8, vec);
            upi_mma(upper, x, y);
            y[0] = upi_get_pair(b, i + 8, j, k, vec);
            y[1] = upi_get_pair(b, i + 8, j, k + 8, vec);
            upi_mma(lower, x, y);
        }
        if (lane % 4 == row / 2) {
            if (i < a.n) *(float *)upi_row_at(out, i, j) = row % 2 ? upper[1] : upper[0];
            if (i + 8 < a.n) *(float *)upi_row_at(out, i + 8, j) = row % 2 ? lower[3] : lower[2];
        }
        __syncwarp(); /* the next products need all lanes */
    }
}

/* In the order of attn_bwd: one chain a row in f32, the tensor cores' in bf16. Where a query sees one key
 * alone O is V, delta cancels exactly, and dQ is 0 as it should be. Mixed types, which attention has not, are
 * summed eight terms a thread and then by a tree. */
UPIPE_API upipe_status upi_cuda_rowdot(upipe_ctx *c, upipe_view out, upipe_view a, upipe_view b)
{
    upipe_view v[2];
    upi_span s;
    UPIPE_TRY(upi_check_rowdot(c, out, a, b));
    if (a.n == 0) return UPIPE_OK;
    v[0] = a;
    v[1] = b;
    s = upi_span_of_rows(v, 2);
    if (upi_types(v, 2) == UPI_ALL_BF16) {
        int64_t tiles = (a.n + 15) / 16 * a.h;
        s.shift = 5;
        s.teams = tiles;
        return UPI_LAUNCH(c, (upi_rowdot_tiles<UPI_ALL_BF16>), upi_span_grid(c, s), UPI_BLOCK, 0, out, a, b,
                          tiles, s.vec);
    }
    if (upi_types(v, 2) == UPI_MIXED)
        return UPI_LAUNCH(c, (upi_rowdot_rows<UPI_MIXED>), upi_span_grid(c, s), UPI_BLOCK, UPI_TEAM_BUF, out,
                          a, b, s);
    s.shift = 0; /* a thread a row: f32 attention is for checking, not for speed */
    return UPI_LAUNCH(c, (upi_rowdot_rows<UPI_ALL_F32>), upi_span_grid(c, s), UPI_BLOCK, UPI_TEAM_BUF, out, a,
                      b, s);
}

#endif

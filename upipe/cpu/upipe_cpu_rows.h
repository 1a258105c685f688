/* upipe_cpu_rows.h -- copies, casts, and all that works row by row
 *
 * Fills the table's copy, zero, cast, rope, rmsnorm, rmsnorm_bwd, rowdot and sum. Links with the math
 * library.
 *
 *     upi_cpu_rope(&ctx, &r)      x [count][tokens][heads][d], in place; angles once a token, for all heads
 *     upi_cpu_rmsnorm(...)        y = norm of x [tokens][heads][d], in place or not
 *     upi_cpu_rowdot(...)         [tokens][heads] = a . b
 *
 * A row is d contiguous elements, walked a vector at a time; its last few ride in a vector filled up with
 * zeros, through the same instructions. So the bits of a row depend on its values alone: not on strides, nor on
 * its neighbours, nor on how tokens are split over calls or shared among threads. Arithmetic is f32, rounded
 * once where a bf16 is stored.
 *
 * Threads of the host (ops.par) process items of some rows each. Sums over tokens keep their order: see
 * upi_cpu_rmsnorm_bwd.
 */
#ifndef UPIPE_CPU_ROWS_H
#define UPIPE_CPU_ROWS_H

#include <math.h>

#include "upipe_cpu_walk.h"
#include "../upipe_ops.h"

enum {
    UPI_ROPE_ANCHOR = 64, /* positions between angles that come from sin and cos */
    UPI_ROW_SUMS = 32,    /* partial sums of a row: element k is in sum k mod 32 */
    UPI_ROW_VECTORS = UPI_ROW_SUMS / UPI_WIDE,
    UPI_COPY_PIECE = 4096,  /* bytes */
    UPI_NORM_ROWS = 512,    /* rows of an item of rmsnorm_bwd, at most */
    UPI_NORM_TOKENS = 4,    /* its tokens, at least; with dweight UPIPE_SUM_ROWS */
    UPI_NORM_STRIPS = 16,   /* pieces of dweight that items take turns at */
    UPI_NORM_COLUMNS = 128, /* of such a piece, at least */
};

UPI_KERNELS_BEGIN

/* ---- bytes, casts ---- */

typedef struct upi_bytes {
    char *dst;
    const char *src; /* NULL: zeros */
    size_t bytes;
} upi_bytes;

UPI_CPU_KERNEL void upi_bytes_run(const void *call, int64_t first, int64_t last)
{
    const upi_bytes *b = (const upi_bytes *)call;
    size_t from = (size_t)first * UPI_COPY_PIECE, to = (size_t)last * UPI_COPY_PIECE;
    if (to > b->bytes) to = b->bytes;
    if (b->src != NULL)
        memcpy(b->dst + from, b->src + from, to - from);
    else
        memset(b->dst + from, 0, to - from);
}

UPI_INLINE void upi_cast_row(void *to, upipe_dtype to_type, const void *from, upipe_dtype from_type,
                             int64_t d)
{
    if (to_type == from_type)
        memcpy(to, from, (size_t)d * upipe_dtype_bytes(to_type));
    else
        UPI_ROW_STEPS(k, n, d, upi_row_put(to, to_type, k, n, upi_row_get(from, from_type, k, n)));
}

UPI_INLINE void upi_cast_rows(const upi_flat *f, int64_t first, int64_t last, upipe_dtype to,
                              upipe_dtype from)
{
    int64_t i, j;
    for (i = first; i < last; ++i)
        for (j = 0; j < f->heads; ++j)
            upi_cast_row(upi_flat_at(f, 0, i, j), to, upi_flat_at(f, 1, i, j), from, upi_flat_length(f, i));
}

UPI_CPU_KERNEL void upi_cast_run(const void *call, int64_t first, int64_t last)
{
    const upi_flat *f = (const upi_flat *)call;
    UPI_WITH_TYPE(to, f->v[0].dtype,
                  UPI_WITH_TYPE(from, f->v[1].dtype, upi_cast_rows(f, first, last, to, from)));
}

/* ---- rope ---- */

/* Angles of one position: cos and sin of position * theta^(-2p/dims), or of position * rates[p], for the pairs.
 *
 * In f64. sin and cos are called at multiples of 64 only; from there each position turns the one before it by
 * the frequency, which costs four products a pair and adds an error below 3e-14. The anchors are absolute
 * positions, so a position has the same angles whatever token a call, or a thread, starts with.
 */
typedef struct upi_rope_angles {
    double cos_now[UPIPE_ROPE_DIM_MAX / 2], sin_now[UPIPE_ROPE_DIM_MAX / 2];   /* of `position` */
    double cos_step[UPIPE_ROPE_DIM_MAX / 2], sin_step[UPIPE_ROPE_DIM_MAX / 2]; /* of one position */
    double frequency[UPIPE_ROPE_DIM_MAX / 2];                                  /* radians a position */
    /* Rounded, factors of an element and of its partner: [pairs], or for interleaved pairs [2 * pairs] with
     * the first element's sin negative. */
    float cos_row[UPIPE_ROPE_DIM_MAX], sin_row[UPIPE_ROPE_DIM_MAX];
    int64_t position;
    int pairs, interleaved;
    double cos_factor, sin_factor; /* the call's factor; sin's is negative to turn back */
} upi_rope_angles;

UPI_CPU_KERNEL void upi_rope_anchor(upi_rope_angles *g, int64_t position)
{
    int p;
    for (p = 0; p < g->pairs; ++p) {
        g->cos_now[p] = cos((double)position * g->frequency[p]);
        g->sin_now[p] = sin((double)position * g->frequency[p]);
    }
    g->position = position;
}

UPI_CPU_KERNEL void upi_rope_advance(upi_rope_angles *g)
{
    int p;
    for (p = 0; p < g->pairs; ++p) {
        double cos_p = g->cos_now[p], sin_p = g->sin_now[p];
        g->cos_now[p] = cos_p * g->cos_step[p] - sin_p * g->sin_step[p];
        g->sin_now[p] = sin_p * g->cos_step[p] + cos_p * g->sin_step[p];
    }
    ++g->position;
}

UPI_CPU_KERNEL void upi_rope_round(upi_rope_angles *g)
{
    int p;
    if (g->interleaved)
        for (p = 0; p < g->pairs; ++p) {
            float s = (float)(g->sin_factor * g->sin_now[p]);
            g->cos_row[2 * p] = g->cos_row[2 * p + 1] = (float)(g->cos_factor * g->cos_now[p]);
            g->sin_row[2 * p] = -s;
            g->sin_row[2 * p + 1] = s;
        }
    else
        for (p = 0; p < g->pairs; ++p) {
            g->cos_row[p] = (float)(g->cos_factor * g->cos_now[p]);
            g->sin_row[p] = (float)(g->sin_factor * g->sin_now[p]);
        }
}

UPI_INLINE void upi_rope_seek(upi_rope_angles *g, int64_t position)
{
    upi_rope_anchor(g, position / UPI_ROPE_ANCHOR * UPI_ROPE_ANCHOR);
    while (g->position < position) upi_rope_advance(g);
}

UPI_INLINE void upi_rope_begin(upi_rope_angles *g, const upipe_rope *r)
{
    const int turned = r->dims > 0 ? r->dims : r->x.d;
    int p;
    memset(g, 0, sizeof *g); /* pairs behind the last are read as whole vectors */
    g->pairs = turned / 2;
    g->interleaved = r->interleaved;
    g->cos_factor = r->factor > 0 ? r->factor : 1;
    g->sin_factor = r->inverse ? -g->cos_factor : g->cos_factor;
    for (p = 0; p < g->pairs; ++p) {
        g->frequency[p] = r->rates != NULL ? r->rates[p] : pow(r->theta, -2.0 * p / turned);
        g->cos_step[p] = cos(g->frequency[p]);
        g->sin_step[p] = sin(g->frequency[p]);
    }
    upi_rope_seek(g, r->pos0);
}

/* The angles of a position are the same numbers however it is reached. */
UPI_INLINE void upi_rope_next(upi_rope_angles *g, int64_t step)
{
    const int64_t position = g->position + step;
    if (position / UPI_ROPE_ANCHOR != g->position / UPI_ROPE_ANCHOR)
        upi_rope_seek(g, position);
    else
        while (g->position < position) upi_rope_advance(g);
}

/* An element turned: x * cos + its partner * sin, the sin's sign as the element needs it. Spelled out as a
 * fused operation, lest the compiler choose which product to fuse, and choose differently in two places. */
UPI_INLINE upi_fw upi_rope_turn(upi_fw x, upi_fw partner, upi_fw c, upi_fw s)
{
    return upi_fw_fma(x, c, upi_fw_mul(partner, s));
}

UPI_INLINE void upi_rope_pair(const upi_rope_angles *g, char *row, upipe_dtype dtype, int64_t k, int64_t n)
{
    char *half = row + (size_t)g->pairs * upipe_dtype_bytes(dtype);
    upi_fw c = upi_fw_load(g->cos_row + k), s = upi_fw_load(g->sin_row + k);
    upi_fw x = upi_row_get(row, dtype, k, n), y = upi_row_get(half, dtype, k, n);
    upi_row_put(row, dtype, k, n, upi_rope_turn(x, y, c, upi_fw_sub(upi_fw_zero(), s)));
    upi_row_put(half, dtype, k, n, upi_rope_turn(y, x, c, s));
}

UPI_INLINE void upi_rope_interleaved(const upi_rope_angles *g, char *row, upipe_dtype dtype, int64_t k,
                                     int64_t n)
{
    upi_fw c = upi_fw_load(g->cos_row + k), s = upi_fw_load(g->sin_row + k),
           x = upi_row_get(row, dtype, k, n);
    upi_row_put(row, dtype, k, n, upi_rope_turn(x, upi_fw_swap(x), c, s));
}

UPI_INLINE void upi_rope_row(const upi_rope_angles *g, char *row, upipe_dtype dtype)
{
    if (g->interleaved)
        UPI_ROW_STEPS(k, n, 2 * g->pairs, upi_rope_interleaved(g, row, dtype, k, n));
    else
        UPI_ROW_STEPS(k, n, g->pairs, upi_rope_pair(g, row, dtype, k, n));
}

/* One token of all blocks. */
UPI_INLINE void upi_rope_token(const upi_rope_angles *g, const upipe_rope *r, int64_t token,
                               upipe_dtype dtype)
{
    int64_t block;
    int32_t head;
    for (block = 0; block < r->count; ++block)
        for (head = 0; head < r->x.h; ++head)
            upi_rope_row(g,
                         (char *)upipe_view_at(r->x, token, head) +
                             block * r->step * (int64_t)upipe_dtype_bytes(dtype),
                         dtype);
}

typedef struct upi_rope_call {
    const upipe_rope *r;
    const upi_rope_angles *start; /* at pos0 */
} upi_rope_call;

UPI_CPU_KERNEL void upi_rope_run(const void *call, int64_t first, int64_t last)
{
    const upi_rope_call *o = (const upi_rope_call *)call;
    const int64_t step = o->r->pos_step > 0 ? o->r->pos_step : 1;
    upi_rope_angles g = *o->start;
    int64_t token;
    if (first > 0) upi_rope_seek(&g, o->r->pos0 + first * step);
    for (token = first; token < last; ++token) {
        if (token > first) upi_rope_next(&g, step);
        upi_rope_round(&g);
        UPI_WITH_TYPE(dtype, o->r->x.dtype, upi_rope_token(&g, o->r, token, dtype));
    }
}

/* ---- rmsnorm ---- */

/* The sum of UPI_ROW_SUMS partial sums, in one fixed order. */
UPI_INLINE float upi_row_fold(const upi_fw *sum)
{
    float t[UPI_ROW_SUMS];
    int l;
    UPI_CPU_UNROLL
    for (l = 0; l < UPI_ROW_VECTORS; ++l) upi_fw_store(t + l * UPI_WIDE, sum[l]);
    return upi_f8_sum(upi_f8_add(upi_f8_add(upi_f8_load(t), upi_f8_load(t + 16)),
                                 upi_f8_add(upi_f8_load(t + 8), upi_f8_load(t + 24))));
}

/* Sum of the squares of a row: one order for every row of d elements. */
UPI_INLINE float upi_row_square(const void *row, upipe_dtype dtype, int64_t d)
{
    upi_fw sum[UPI_ROW_VECTORS], x;
    int64_t k;
    int l;
    UPI_CPU_UNROLL
    for (l = 0; l < UPI_ROW_VECTORS; ++l) sum[l] = upi_fw_zero();
    for (k = 0; k + UPI_ROW_SUMS <= d; k += UPI_ROW_SUMS) {
        UPI_CPU_UNROLL
        for (l = 0; l < UPI_ROW_VECTORS; ++l) {
            x = upi_fw_get(row, dtype, k + l * UPI_WIDE);
            sum[l] = upi_fw_fma(x, x, sum[l]);
        }
    }
    UPI_CPU_UNROLL
    for (l = 0; l < UPI_ROW_VECTORS; ++l, k += UPI_WIDE)
        if (k < d) {
            x = upi_row_get(row, dtype, k, d - k);
            sum[l] = upi_fw_fma(x, x, sum[l]);
        }
    return upi_row_fold(sum);
}

/* 1 / sqrt(mean of the squares + eps) */
UPI_INLINE float upi_row_scale_of(float square, int64_t d, float eps)
{
    return 1.0f / sqrtf(square / (float)d + eps);
}

UPI_INLINE float upi_row_scale(const void *row, upipe_dtype dtype, int64_t d, float eps)
{
    return upi_row_scale_of(upi_row_square(row, dtype, d), d, eps);
}

typedef struct upi_norm_call {
    upipe_view y, x, dy; /* backward: y is dx */
    const float *weight;
    float *dweight; /* [x.h][x.d] or NULL */
    int64_t tokens; /* of an item */
    int64_t ahead;  /* tokens from an item to the next of the same thread, roughly */
    int64_t *gates; /* [UPI_NORM_STRIPS]: items that are done with this piece of dweight */
    float eps;
    int accumulate;
} upi_norm_call;

/* The row that comes after (i, j), or the last one. */
UPI_INLINE const void *upi_norm_below(upipe_view v, int64_t i, int32_t j)
{
    if (j + 1 < v.h) return upipe_view_at(v, i, j + 1);
    return i + 1 < v.n ? upipe_view_at(v, i + 1, 0) : upipe_view_at(v, i, j);
}

/* `below` is the row that comes next. */
UPI_INLINE void upi_norm_step(void *y, const void *x, const void *below, const float *weight, upi_fw scale,
                              int64_t k, int64_t n, upipe_dtype to, upipe_dtype from)
{
    upi_fw unit = upi_fw_mul(upi_row_get(x, from, k, n), scale);
    upi_row_fetch(below, from, k);
    upi_row_put(y, to, k, n, upi_fw_mul(unit, upi_row_get(weight, UPIPE_F32, k, n)));
}

UPI_INLINE void upi_norm_row(const upi_norm_call *o, int64_t i, int32_t j, upipe_dtype to, upipe_dtype from)
{
    const void *x = upipe_view_at(o->x, i, j), *below = upi_norm_below(o->x, i, j);
    void *y = upipe_view_at(o->y, i, j);
    upi_fw scale = upi_fw_set1(upi_row_scale(x, from, o->x.d, o->eps));
    UPI_ROW_STEPS(k, n, o->x.d, upi_norm_step(y, x, below, o->weight, scale, k, n, to, from));
}

UPI_INLINE void upi_norm_rows(const upi_norm_call *o, int64_t first, int64_t last, upipe_dtype to,
                              upipe_dtype from)
{
    int64_t i;
    int32_t j;
    for (i = first; i < last; ++i)
        for (j = 0; j < o->x.h; ++j) upi_norm_row(o, i, j, to, from);
}

UPI_CPU_KERNEL void upi_norm_run(const void *call, int64_t first, int64_t last)
{
    const upi_norm_call *o = (const upi_norm_call *)call;
    UPI_WITH_TYPES(to, o->y.dtype, from, o->x.dtype, upi_norm_rows(o, first, last, to, from));
}

/* ---- its backward: with u = x * scale, the row of mean square 1,
 *          dx = scale * (w dy - u * mean(u w dy)) with norm weight w,  dweight += dy u ---- */

/* A row's scale, as the forward has it, and -mean. */
UPI_INLINE void upi_norm_sums(const upi_norm_call *o, int64_t i, int32_t j, float *scale, float *minus_mean,
                              upipe_dtype dy_type, upipe_dtype x_type)
{
    const void *row = upipe_view_at(o->x, i, j), *dy = upipe_view_at(o->dy, i, j);
    upi_fw square[UPI_ROW_VECTORS], sum[UPI_ROW_VECTORS], x, grad;
    int64_t k, d = o->x.d;
    int l;
    UPI_CPU_UNROLL
    for (l = 0; l < UPI_ROW_VECTORS; ++l) square[l] = sum[l] = upi_fw_zero();
    for (k = 0; k + UPI_ROW_SUMS <= d; k += UPI_ROW_SUMS) {
        UPI_CPU_UNROLL
        for (l = 0; l < UPI_ROW_VECTORS; ++l) {
            int64_t at = k + l * UPI_WIDE;
            x = upi_fw_get(row, x_type, at);
            grad = upi_fw_mul(upi_fw_get(dy, dy_type, at), upi_fw_load(o->weight + at));
            square[l] = upi_fw_fma(x, x, square[l]);
            sum[l] = upi_fw_fma(grad, x, sum[l]);
        }
    }
    UPI_CPU_UNROLL
    for (l = 0; l < UPI_ROW_VECTORS; ++l, k += UPI_WIDE)
        if (k < d) {
            x = upi_row_get(row, x_type, k, d - k);
            grad =
                upi_fw_mul(upi_row_get(dy, dy_type, k, d - k), upi_row_get(o->weight, UPIPE_F32, k, d - k));
            square[l] = upi_fw_fma(x, x, square[l]);
            sum[l] = upi_fw_fma(grad, x, sum[l]);
        }
    *scale = upi_row_scale_of(upi_row_fold(square), d, o->eps);
    *minus_mean = -(upi_row_fold(sum) * *scale) / (float)d;
}

/* dweight of one head, columns k .. k + n - 1: += the sum of tokens first .. last - 1, in order. */
UPI_INLINE void upi_norm_weight_step(const upi_norm_call *o, const float *scales, int64_t first, int64_t last,
                                     int32_t j, int64_t k, int64_t n, upipe_dtype dy_type, upipe_dtype x_type)
{
    float *dweight = o->dweight + (int64_t)j * o->x.d;
    upi_fw sum = upi_fw_zero();
    int64_t i;
    for (i = first; i < last; ++i) {
        upi_fw scale = upi_fw_set1(scales[(i - first) * o->x.h + j]);
        upi_fw unit = upi_fw_mul(upi_row_get(upipe_view_at(o->x, i, j), x_type, k, n), scale);
        sum = upi_fw_fma(upi_row_get(upipe_view_at(o->dy, i, j), dy_type, k, n), unit, sum);
    }
    upi_row_put(dweight, UPIPE_F32, k, n, upi_fw_add(upi_row_get(dweight, UPIPE_F32, k, n), sum));
}

/* Elements begin .. end - 1 of dweight, rows of all heads behind each other. */
UPI_INLINE void upi_norm_weight(const upi_norm_call *o, const float *scales, int64_t first, int64_t last,
                                int64_t begin, int64_t end, upipe_dtype dy_type, upipe_dtype x_type)
{
    while (begin < end) {
        int32_t j = (int32_t)(begin / o->x.d);
        int64_t from = begin - (int64_t)j * o->x.d, left = end - begin, at;
        if (left > o->x.d - from) left = o->x.d - from;
        for (at = 0; at + UPI_WIDE <= left; at += UPI_WIDE)
            upi_norm_weight_step(o, scales, first, last, j, from + at, UPI_WIDE, dy_type, x_type);
        if (at < left) upi_norm_weight_step(o, scales, first, last, j, from + at, left - at, dy_type, x_type);
        begin += left;
    }
}

/* A row of dx, and lines of the row that is this thread's after its item. */
typedef struct upi_norm_dx {
    void *dx;
    const void *dy, *x, *next_dy, *next_x;
    const float *weight;
    upi_fw scale, minus_mean;
    upipe_dtype dx_type;
    int accumulate;
} upi_norm_dx;

UPI_INLINE void upi_norm_dx_step(const upi_norm_dx *r, int64_t k, int64_t n, upipe_dtype dy_type,
                                 upipe_dtype x_type)
{
    upi_fw unit = upi_fw_mul(upi_row_get(r->x, x_type, k, n), r->scale);
    upi_fw grad = upi_fw_mul(upi_row_get(r->dy, dy_type, k, n), upi_row_get(r->weight, UPIPE_F32, k, n));
    upi_row_fetch(r->next_dy, dy_type, k);
    upi_row_fetch(r->next_x, x_type, k);
    grad = upi_fw_mul(r->scale, upi_fw_fma(unit, r->minus_mean, grad));
    if (r->accumulate) grad = upi_fw_add(upi_row_get(r->dx, r->dx_type, k, n), grad);
    upi_row_put(r->dx, r->dx_type, k, n, grad);
}

UPI_INLINE void upi_norm_dx_row(const upi_norm_call *o, int64_t i, int32_t j, float scale, float minus_mean,
                                upipe_dtype dy_type, upipe_dtype x_type)
{
    int64_t next = i + o->ahead < o->x.n ? i + o->ahead : i;
    upi_norm_dx r;
    r.dx = upipe_view_at(o->y, i, j);
    r.dy = upipe_view_at(o->dy, i, j);
    r.x = upipe_view_at(o->x, i, j);
    r.next_dy = upipe_view_at(o->dy, next, j);
    r.next_x = upipe_view_at(o->x, next, j);
    r.weight = o->weight;
    r.scale = upi_fw_set1(scale);
    r.minus_mean = upi_fw_set1(minus_mean);
    r.dx_type = o->y.dtype;
    r.accumulate = o->accumulate;
    UPI_ROW_STEPS(k, n, o->x.d, upi_norm_dx_step(&r, k, n, dy_type, x_type));
}

/* Tokens first .. last - 1, item number `item`. dx comes last: it may lie in dy or in x. */
UPI_INLINE void upi_norm_bwd(const upi_norm_call *o, int64_t item, int64_t first, int64_t last,
                             upipe_dtype dy_type, upipe_dtype x_type)
{
    float scales[UPI_NORM_ROWS], means[UPI_NORM_ROWS];
    int64_t i, all = (int64_t)o->x.h * o->x.d, strip = (all + UPI_NORM_STRIPS - 1) / UPI_NORM_STRIPS;
    int32_t j;
    int s, row = 0;
    for (i = first; i < last; ++i)
        for (j = 0; j < o->x.h; ++j, ++row)
            upi_norm_sums(o, i, j, &scales[row], &means[row], dy_type, x_type);
    strip = (strip + UPI_NORM_COLUMNS - 1) / UPI_NORM_COLUMNS * UPI_NORM_COLUMNS;
    for (s = 0; o->dweight != NULL && s * strip < all; ++s) {
        upi_par_wait(&o->gates[s], item);
        upi_norm_weight(o, scales, first, last, s * strip, (s + 1) * strip < all ? (s + 1) * strip : all,
                        dy_type, x_type);
        upi_par_open(&o->gates[s], item + 1);
    }
    for (i = first, row = 0; i < last; ++i)
        for (j = 0; j < o->x.h; ++j, ++row)
            upi_norm_dx_row(o, i, j, scales[row], means[row], dy_type, x_type);
}

UPI_CPU_KERNEL void upi_norm_bwd_item(void *arg, int64_t item, int32_t worker)
{
    const upi_norm_call *o = (const upi_norm_call *)arg;
    int64_t first = item * o->tokens, last = first + o->tokens < o->x.n ? first + o->tokens : o->x.n;
    (void)worker;
    UPI_WITH_TYPES(dy_type, o->dy.dtype, x_type, o->x.dtype,
                   upi_norm_bwd(o, item, first, last, dy_type, x_type));
}

/* ---- rowdot ---- */

UPI_INLINE upi_f8 upi_row_get8(const void *row, upipe_dtype dtype, int64_t i, int64_t n)
{
    float t[UPI_WIDE];
    if (n >= UPI_LANES) return upi_f8_get(row, dtype, i);
    upi_row_get_last(t, row, dtype, i, n);
    return upi_f8_load(t);
}

/* Up to eight rows at a time, one in each lane, summed in the very order in which the attention backward
 * forms dO * V: chains of UPI_DOT_PIECE. Where a query sees one key alone O is V, delta cancels exactly, and
 * dQ is 0 as it should be.
 */
UPI_INLINE upi_f8 upi_row_dot8_step(const char *const *a, const char *const *b, int64_t k, int64_t n,
                                    upi_f8 sum, upipe_dtype a_type, upipe_dtype b_type)
{
    upi_f8 at[UPI_LANES], bt[UPI_LANES];
    int l;
    UPI_CPU_UNROLL
    for (l = 0; l < UPI_LANES; ++l) {
        at[l] = upi_row_get8(a[l], a_type, k, n);
        bt[l] = upi_row_get8(b[l], b_type, k, n);
    }
    upi_f8_transpose(at);
    upi_f8_transpose(bt);
    UPI_CPU_UNROLL
    for (l = 0; l < UPI_LANES; ++l) sum = upi_f8_fma(at[l], bt[l], sum);
    return sum;
}

/* The lines of the next eight rows, where they are as far apart as these. */
UPI_INLINE void upi_rowdot_fetch(const char *const *rows, int64_t k, upipe_dtype dtype)
{
    uintptr_t on = UPI_LANES * ((uintptr_t)rows[1] - (uintptr_t)rows[0]);
    int l;
    UPI_CPU_UNROLL
    for (l = 0; l < UPI_LANES; ++l) upi_row_fetch((const void *)((uintptr_t)rows[l] + on), dtype, k);
}

UPI_INLINE upi_f8 upi_row_dot8(const char *const *a, const char *const *b, int64_t d, upipe_dtype a_type,
                               upipe_dtype b_type)
{
    upi_f8 total = upi_f8_zero(), sum = upi_f8_zero();
    int64_t k;
    for (k = 0; k < d; k += UPI_LANES) {
        if (k * (int64_t)upipe_dtype_bytes(a_type) % 64 == 0) upi_rowdot_fetch(a, k, a_type);
        if (k * (int64_t)upipe_dtype_bytes(b_type) % 64 == 0) upi_rowdot_fetch(b, k, b_type);
        if (k % UPI_DOT_PIECE == 0) {
            total = k == UPI_DOT_PIECE ? sum : upi_f8_add(total, sum);
            sum = upi_f8_zero();
        }
        if (k + UPI_LANES <= d)
            sum = upi_row_dot8_step(a, b, k, UPI_LANES, sum, a_type, b_type);
        else
            sum = upi_row_dot8_step(a, b, k, d - k, sum, a_type, b_type);
    }
    return d > UPI_DOT_PIECE ? upi_f8_add(total, sum) : sum;
}

typedef struct upi_rowdot_call {
    upipe_view out, a, b;
} upi_rowdot_call;

/* Rows row .. row + 7 of all, counted through tokens and their heads; behind the last the last again. */
UPI_INLINE void upi_rowdot_eight(const upi_rowdot_call *o, int64_t row, int64_t rows, upipe_dtype a_type,
                                 upipe_dtype b_type)
{
    const char *a[UPI_LANES], *b[UPI_LANES];
    float t[UPI_LANES], *out[UPI_LANES];
    int64_t i = row / o->a.h;
    int32_t j = (int32_t)(row - i * o->a.h);
    int l;
    for (l = 0; l < UPI_LANES; ++l) {
        a[l] = (const char *)upipe_view_at(o->a, i, j);
        b[l] = (const char *)upipe_view_at(o->b, i, j);
        out[l] = (float *)upipe_view_at(o->out, i, j);
        if (row + l + 1 < rows && ++j == o->a.h) {
            j = 0;
            ++i;
        }
    }
    upi_f8_store(t, upi_row_dot8(a, b, o->a.d, a_type, b_type));
    for (l = 0; l < UPI_LANES; ++l) *out[l] = t[l];
}

UPI_CPU_KERNEL void upi_rowdot_run(const void *call, int64_t first, int64_t last)
{
    const upi_rowdot_call *o = (const upi_rowdot_call *)call;
    int64_t row;
    for (row = first * o->a.h; row < last * o->a.h; row += UPI_LANES)
        UPI_WITH_TYPES(a_type, o->a.dtype, b_type, o->b.dtype,
                       upi_rowdot_eight(o, row, last * o->a.h, a_type, b_type));
}

/* ---- sum ---- */

UPI_INLINE void upi_sum_step(const upi_flat *f, void *row, const float *src, int64_t k, int64_t n,
                             upipe_dtype dtype)
{
    upi_fw sum = f->accumulate ? upi_row_get(row, UPIPE_F32, k, n) : upi_fw_zero();
    int part;
    for (part = 0; part < f->src_count; ++part)
        sum = upi_fw_add(sum, upi_row_get(src + part * f->src_stride, UPIPE_F32, k, n));
    upi_row_put(row, dtype, k, n, sum);
}

UPI_INLINE void upi_sum_rows(const upi_flat *f, int64_t first, int64_t last, upipe_dtype dtype)
{
    int64_t i, j;
    for (i = first; i < last; ++i)
        for (j = 0; j < f->heads; ++j) {
            const float *src = f->src + (i * f->heads + j) * f->d;
            void *row = upi_flat_at(f, 0, i, j);
            UPI_ROW_STEPS(k, n, upi_flat_length(f, i), upi_sum_step(f, row, src, k, n, dtype));
        }
}

UPI_CPU_KERNEL void upi_sum_run(const void *call, int64_t first, int64_t last)
{
    const upi_flat *f = (const upi_flat *)call;
    UPI_WITH_TYPE(dtype, f->v[0].dtype, upi_sum_rows(f, first, last, dtype));
}

UPI_KERNELS_END

/* ---- entries of the table ---- */

/* Every entry returns when it is done. */
UPIPE_API upipe_status upi_cpu_sync(upipe_ctx *c)
{
    (void)c;
    return UPIPE_OK;
}

UPIPE_API void upi_bytes_share(const upipe_ops *ops, void *dst, const void *src, size_t bytes)
{
    upi_bytes b;
    b.dst = (char *)dst;
    b.src = (const char *)src;
    b.bytes = bytes;
    upi_rows_share(ops, (int64_t)((bytes + UPI_COPY_PIECE - 1) / UPI_COPY_PIECE), UPI_COPY_PIECE, 1,
                   upi_bytes_run, &b);
}

UPIPE_API upipe_status upi_cpu_copy(upipe_ctx *c, void *dst, const void *src, size_t bytes)
{
    UPIPE_TRY(upi_check_copy(c, dst, src, bytes));
    if (bytes > 0) upi_bytes_share(c->ops, dst, src, bytes);
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_cpu_zero(upipe_ctx *c, void *dst, size_t bytes)
{
    UPIPE_TRY(upi_check_zero(c, dst, bytes));
    if (bytes > 0) upi_bytes_share(c->ops, dst, NULL, bytes);
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_cpu_cast(upipe_ctx *c, upipe_view dst, upipe_view src)
{
    upipe_view v[2];
    upi_flat f;
    UPIPE_TRY(upi_check_cast(c, dst, src));
    if (dst.n == 0) return UPIPE_OK;
    v[0] = dst;
    v[1] = src;
    f = upi_flat_make(v, 2);
    upi_rows_share(c->ops, f.rows, f.row_bytes, 1, upi_cast_run, &f);
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_cpu_rope(upipe_ctx *c, const upipe_rope *r)
{
    upi_rope_angles start;
    upi_rope_call call;
    UPIPE_TRY(upi_check_rope(c, r));
    if (r->count == 0 || r->x.n == 0) return UPIPE_OK;
    upi_rope_begin(&start, r);
    call.r = r;
    call.start = &start;
    upi_rows_share(c->ops, r->x.n, r->count * r->x.h * r->x.d * (int64_t)upipe_dtype_bytes(r->x.dtype),
                   UPI_ROPE_ANCHOR, upi_rope_run, &call);
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_cpu_rmsnorm(upipe_ctx *c, upipe_view y, upipe_view x, const float *weight,
                                       float eps)
{
    upi_norm_call call;
    UPIPE_TRY(upi_check_rmsnorm(c, y, x, weight, eps));
    memset(&call, 0, sizeof call);
    call.y = y;
    call.x = x;
    call.weight = weight;
    call.eps = eps;
    upi_rows_share(c->ops, x.n, (int64_t)x.h * x.d * (int64_t)upipe_dtype_bytes(x.dtype), 1, upi_norm_run,
                   &call);
    return UPIPE_OK;
}

UPI_INLINE upipe_view upi_norm_heads(upipe_view v, int32_t head, int32_t heads)
{
    if (v.n > 0) v.data = upipe_view_at(v, 0, head);
    v.h = heads;
    return v;
}

/* An item's tokens are one partial sum of dweight. It adds them in the order of the tokens, whatever the threads: an
 * item waits for its turn at each piece of it, and the items before it are then one piece further. In between, each
 * works on its own tokens, which lie in its caches. */
UPIPE_API upipe_status upi_cpu_rmsnorm_bwd(upipe_ctx *c, upipe_view dx, upipe_view dy, upipe_view x,
                                           const float *weight, float eps, float *dweight, int accumulate)
{
    const int32_t most = dweight != NULL ? (int)UPI_NORM_ROWS / (int)UPIPE_SUM_ROWS : UPI_NORM_ROWS;
    int32_t head, heads;
    UPIPE_TRY(upi_check_rmsnorm_bwd(c, dx, dy, x, weight, eps, accumulate));
    for (head = 0; head < x.h; head += heads) {
        int64_t gates[UPI_NORM_STRIPS] = {0}, bytes, tokens;
        upi_norm_call call;
        heads = x.h - head < most ? x.h - head : most;
        bytes = 2 * (int64_t)heads * x.d * (int64_t)upipe_dtype_bytes(x.dtype);
        tokens = UPI_PAR_ROW_BYTES / bytes;
        if (tokens < UPI_NORM_TOKENS) tokens = UPI_NORM_TOKENS;
        if (tokens > UPI_NORM_ROWS / heads) tokens = UPI_NORM_ROWS / heads;
        if (dweight != NULL) tokens = UPIPE_SUM_ROWS;
        call.y = upi_norm_heads(dx, head, heads);
        call.x = upi_norm_heads(x, head, heads);
        call.dy = upi_norm_heads(dy, head, heads);
        call.weight = weight;
        call.dweight = dweight != NULL ? dweight + (int64_t)head * x.d : NULL;
        call.tokens = tokens;
        call.ahead = tokens * upi_par_workers(c->ops);
        call.gates = gates;
        call.eps = eps;
        call.accumulate = accumulate;
        upi_par_each(c->ops, (x.n + tokens - 1) / tokens, upi_norm_bwd_item, &call);
    }
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_cpu_rowdot(upipe_ctx *c, upipe_view out, upipe_view a, upipe_view b)
{
    upi_rowdot_call call;
    UPIPE_TRY(upi_check_rowdot(c, out, a, b));
    call.out = out;
    call.a = a;
    call.b = b;
    upi_rows_share(c->ops, a.n, 2 * (int64_t)a.h * a.d * (int64_t)upipe_dtype_bytes(a.dtype), UPI_LANES,
                   upi_rowdot_run, &call);
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_cpu_sum(upipe_ctx *c, upipe_view dst, const float *src, int64_t stride, int count,
                                   int accumulate)
{
    upi_flat f;
    UPIPE_TRY(upi_check_sum(c, dst, src, count, accumulate));
    if (dst.n == 0) return UPIPE_OK;
    f = upi_flat_make(&dst, 1);
    f.src = src;
    f.src_stride = stride;
    f.src_count = count;
    f.accumulate = accumulate;
    upi_rows_share(c->ops, f.rows, f.row_bytes * (1 + count), 1, upi_sum_run, &f);
    return UPIPE_OK;
}

#endif

/* upipe_cuda_norm.h -- RMS norm, and sums down the columns
 *
 * Fills the table's rmsnorm and rmsnorm_bwd.
 *
 *     upi_cuda_rmsnorm(...)        y = norm of x [tokens][heads][d], in place or not
 *
 * The gradient of a weight or bias that all tokens share is a sum down the columns of UPIPE_SUM_ROWS tokens at a time.
 * Many threads form such sums, or parts of them, at the same time, and leave them in the device's scratch; a second
 * kernel adds them in the order of the tokens. What lies in scratch is 1/16 or 1/64 of the elements.
 */
#ifndef UPIPE_CUDA_NORM_H
#define UPIPE_CUDA_NORM_H

#include "upipe_cuda_rows.h"

/* ---- rmsnorm ---- */

/* 1 / sqrt(mean of the squares + eps), from the sum of the squares */
UPI_DEVICE float upi_norm_scale(float squares, int64_t d, float eps)
{
    return 1.0f / sqrtf(squares / (float)d + eps);
}

template <int TYPES>
UPI_KERNEL(256, 1)
void upi_rmsnorm_rows(upipe_view y, upipe_view x, const float *weight, float eps, upi_span s)
{
    UPI_SHARED(float, buf);
    UPI_EACH_TEAM(s, first)
    {
        upi_place p = upi_place_of(s, first);
        int64_t begin = p.k;
        float sum = 0;
        int l;
        for (; p.k < p.d; p.k += p.step) {
            upi_numbers a = upi_view_get<TYPES>(x, p, s.vec);
            UPI_UNROLL
            for (l = 0; l < UPI_EIGHT; ++l) sum = fmaf(a.v[l], a.v[l], sum);
        }
        sum = upi_norm_scale(upi_team_sum(sum, s.shift, buf), s.d, eps);
        for (p.k = begin; p.k < p.d; p.k += p.step) {
            upi_numbers a = upi_view_get<TYPES>(x, p, s.vec);
            upi_numbers w = upi_get<UPI_ALL_F32>(weight, UPIPE_F32, p.k, p.d, s.vec);
            UPI_UNROLL
            for (l = 0; l < UPI_EIGHT; ++l) a.v[l] = a.v[l] * sum * w.v[l];
            upi_view_put<TYPES>(y, p, s.vec, a);
        }
    }
}

/* As above, with a norm weight that every row reads. */
UPIPE_API upi_span upi_span_of_norm(const upipe_view *v, int count, const float *weight)
{
    upi_span s = upi_span_of_rows(v, count);
    if ((uintptr_t)weight % 16 != 0) s.vec = 0;
    return s;
}

UPIPE_API upipe_status upi_cuda_rmsnorm(upipe_ctx *c, upipe_view y, upipe_view x, const float *weight,
                                        float eps)
{
    upipe_view v[2];
    upi_span s;
    UPIPE_TRY(upi_check_rmsnorm(c, y, x, weight, eps));
    if (x.n == 0) return UPIPE_OK;
    v[0] = y;
    v[1] = x;
    s = upi_span_of_norm(v, 2, weight);
    return UPI_LAUNCH_TYPES(c, upi_types(v, 2), upi_rmsnorm_rows, upi_span_grid(c, s), UPI_BLOCK,
                            UPI_TEAM_BUF, y, x, weight, eps, s);
}

/* ---- sums down the columns ---- */

/* A part of UPIPE_SUM_ROWS tokens lies in scratch as EACH sums of fewer, by as many threads: parts
 * [count][columns]. sums += the parts, in order. */
enum {
    UPI_COLUMNS = 64,       /* threads of a block */
    UPI_COLUMN_WINDOW = 16, /* loads in flight, a multiple of EACH */
    UPI_COLUMN_SUMS = 1024  /* that a thread adds, at most */
};

template <int EACH>
UPI_KERNEL(64, 1)
void upi_column_sums(float *sums, const float *parts, int64_t columns, int64_t count)
{
    int64_t column = (int64_t)blockIdx.x * UPI_COLUMNS + threadIdx.x, first;
    float sum;
    if (column >= columns) return;
    sum = sums[column];
    for (first = 0; first < count; first += UPI_COLUMN_WINDOW) {
        float x[UPI_COLUMN_WINDOW], part = 0;
        int u;
        UPI_UNROLL
        for (u = 0; u < UPI_COLUMN_WINDOW; ++u)
            x[u] = first + u < count ? parts[(first + u) * columns + column] : 0.0f;
        UPI_UNROLL
        for (u = 0; u < UPI_COLUMN_WINDOW; ++u) {
            part += x[u];
            if (u % EACH != EACH - 1) continue;
            sum += part;
            part = 0;
        }
    }
    sums[column] = sum;
}

/* Tokens of one launch, whose sums of `rows` tokens the scratch holds; 0 where it does not hold those of one part. */
UPIPE_API int64_t upi_column_tokens(int64_t columns, int rows)
{
    int64_t count = UPIPE_CUDA_SCRATCH / 4 / columns;
    if (count > UPI_COLUMN_SUMS) count = UPI_COLUMN_SUMS;
    return count * rows / UPIPE_SUM_ROWS * UPIPE_SUM_ROWS;
}

UPIPE_API unsigned upi_column_grid(int64_t columns)
{
    return (unsigned)((columns + UPI_COLUMNS - 1) / UPI_COLUMNS);
}

/* ---- rmsnorm, backward ---- */

enum {
    UPI_WEIGHT_ROWS = 16, /* tokens whose terms of the norm weight's gradient one team sums */
    UPI_WEIGHT_EACH = UPIPE_SUM_ROWS / UPI_WEIGHT_ROWS,
    UPI_WEIGHT_STEP =
        UPI_BLOCK * UPI_EIGHT * 4 /* bytes of shared memory: what a block sums at one turn of its teams */
};

/* With u = x * scale, the row of mean square 1:  dx = scale * (w dy - u * mean(u w dy)), w = norm weight. The
 * first walk over a row only reads dy and x, so that dx may be either; the second finds them in the caches.
 *
 * parts: NULL, or sums of dy u over UPI_WEIGHT_ROWS tokens, which a team then takes one after another. Each thread
 * has its columns' in shared memory. */
template <int TYPES>
UPI_KERNEL(256, 1)
void upi_rmsnorm_bwd_rows(upipe_view dx, upipe_view dy, upipe_view x, const float *weight, float eps,
                          int accumulate, float *parts, upi_span s)
{
    UPI_SHARED(float, buf);
    const int rows = parts != NULL ? UPI_WEIGHT_ROWS : 1;
    UPI_EACH_TEAM(s, first)
    {
        upi_place p = upi_place_of(s, first);
        const int64_t begin = p.k, d = p.d, group = p.i;
        float *const sums = buf + UPI_TEAM_BUF / 4 + threadIdx.x, *own;
        int r, l;
        for (r = 0; r < rows; ++r) {
            float squares = 0, sum = 0, scale, minus_mean;
            p.i = group * rows + r;
            p.d = p.i < dy.n ? d : 0;
            for (p.k = begin; p.k < p.d; p.k += p.step) {
                upi_numbers a = upi_view_get<TYPES>(x, p, s.vec), g = upi_view_get<TYPES>(dy, p, s.vec);
                upi_numbers w = upi_get<UPI_ALL_F32>(weight, UPIPE_F32, p.k, p.d, s.vec);
                UPI_UNROLL
                for (l = 0; l < UPI_EIGHT; ++l) {
                    squares = fmaf(a.v[l], a.v[l], squares);
                    sum = fmaf(g.v[l] * w.v[l], a.v[l], sum);
                }
            }
            scale = upi_norm_scale(upi_team_sum(squares, s.shift, buf), s.d, eps);
            minus_mean = -(upi_team_sum(sum, s.shift, buf) * scale) / (float)s.d;
            own = sums;
            for (p.k = begin; p.k < p.d; p.k += p.step, own += UPI_WEIGHT_STEP / 4) {
                upi_numbers a = upi_view_get<TYPES>(x, p, s.vec), g = upi_view_get<TYPES>(dy, p, s.vec);
                upi_numbers w = upi_get<UPI_ALL_F32>(weight, UPIPE_F32, p.k, p.d, s.vec), old;
                UPI_UNROLL
                for (l = 0; l < UPI_EIGHT; ++l) {
                    float unit = a.v[l] * scale;
                    if (parts != NULL)
                        own[l * UPI_BLOCK] = fmaf(g.v[l], unit, r > 0 ? own[l * UPI_BLOCK] : 0.0f);
                    g.v[l] = upi_product(scale, fmaf(unit, minus_mean, upi_product(g.v[l], w.v[l])));
                }
                if (accumulate) {
                    old = upi_view_get<TYPES>(dx, p, s.vec);
                    UPI_UNROLL
                    for (l = 0; l < UPI_EIGHT; ++l) g.v[l] += old.v[l];
                }
                upi_view_put<TYPES>(dx, p, s.vec, g);
            }
        }
        own = sums;
        for (p.k = begin; parts != NULL && p.k < d; p.k += p.step, own += UPI_WEIGHT_STEP / 4) {
            upi_numbers part;
            UPI_UNROLL
            for (l = 0; l < UPI_EIGHT; ++l) part.v[l] = own[l * UPI_BLOCK];
            upi_put<UPI_ALL_F32>(parts + (group * s.heads + p.j) * d, UPIPE_F32, p.k, d, d % 4 == 0, part);
        }
    }
}

template <int TYPES>
UPIPE_API upipe_status upi_rmsnorm_bwd_launch(upipe_ctx *c, const upipe_view *v, const float *weight,
                                              float eps, int accumulate, float *parts, upi_span s, int shared)
{
    if (shared > 48 << 10) UPIPE_TRY(UPI_ALLOW_SHARED(c, (upi_rmsnorm_bwd_rows<TYPES>), shared));
    return UPI_LAUNCH(c, (upi_rmsnorm_bwd_rows<TYPES>), upi_span_grid(c, s), UPI_BLOCK, shared, v[0], v[1],
                      v[2], weight, eps, accumulate, parts, s);
}

/* With the norm weight's gradient: as many tokens as the scratch holds sums of. */
UPIPE_API upipe_status upi_cuda_rmsnorm_bwd(upipe_ctx *c, upipe_view dx, upipe_view dy, upipe_view x,
                                            const float *weight, float eps, float *dweight, int accumulate)
{
    float *parts = dweight != NULL ? (float *)upi_cuda_self(c)->scratch : NULL;
    int64_t columns = (int64_t)dy.h * dy.d, token, most = dy.n;
    UPIPE_TRY(upi_check_rmsnorm_bwd(c, dx, dy, x, weight, eps, accumulate));
    if (dy.n == 0) return UPIPE_OK;
    if (dweight != NULL) most = upi_column_tokens(columns, UPI_WEIGHT_ROWS);
    if (most == 0)
        return upipe_fail(&c->err, UPIPE_ERR_UNSUPPORTED, "rmsnorm_bwd: %lld columns, at most %d with dgain",
                          (long long)columns, UPIPE_CUDA_SCRATCH / 4 / UPI_WEIGHT_EACH);
    for (token = 0; token < dy.n; token += most) {
        int64_t n = dy.n - token < most ? dy.n - token : most,
                groups = (n + UPI_WEIGHT_ROWS - 1) / UPI_WEIGHT_ROWS;
        int64_t shared = UPI_TEAM_BUF;
        upipe_view v[3];
        upi_span s;
        int types;
        v[0] = upipe_view_rows(dx, token, n);
        v[1] = upipe_view_rows(dy, token, n);
        v[2] = upipe_view_rows(x, token, n);
        s = upi_span_of_norm(v, 3, weight);
        types = upi_types(v, 3);
        if (dweight != NULL) {
            const int64_t turn = (int64_t)UPI_EIGHT << s.shift;
            s.teams = groups * s.heads;
            shared += (s.d + turn - 1) / turn * UPI_WEIGHT_STEP;
        }
        if (shared > upi_cuda_self(c)->shared_most)
            return upipe_fail(
                &c->err, UPIPE_ERR_UNSUPPORTED,
                "rmsnorm_bwd: rows of %d elements with dgain take %lld bytes of shared memory a block, "
                "this device has %d",
                dy.d, (long long)shared, upi_cuda_self(c)->shared_most);
        UPIPE_TRY(
            types == UPI_ALL_F32
                ? upi_rmsnorm_bwd_launch<UPI_ALL_F32>(c, v, weight, eps, accumulate, parts, s, (int)shared)
            : types == UPI_ALL_BF16
                ? upi_rmsnorm_bwd_launch<UPI_ALL_BF16>(c, v, weight, eps, accumulate, parts, s, (int)shared)
                : upi_rmsnorm_bwd_launch<UPI_MIXED>(c, v, weight, eps, accumulate, parts, s, (int)shared));
        if (dweight != NULL)
            UPIPE_TRY(UPI_LAUNCH(c, (upi_column_sums<UPI_WEIGHT_EACH>), upi_column_grid(columns), UPI_COLUMNS,
                                 0, dweight, parts, columns, groups));
    }
    return UPIPE_OK;
}

#endif

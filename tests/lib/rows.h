/* rows.h -- checks of a table's row operations: against f64, against differences, bits against steps and
 *           split calls
 *
 * Tensors lie in exact allocations with gaps full of NaNs: a gap that is read shows in a result, one that is
 * written shows in the guard check, and the sanitizer sees the rest. They lie in host memory: the table of a
 * device is wrapped (cuda/staged.h).
 *
 *     check_rows(&rng, c);         c->ops: the table
 *     check_row_statuses(c);       refusals; c->ops: the table itself, as no memory is touched
 */
#ifndef UPIPE_TEST_ROWS_H
#define UPIPE_TEST_ROWS_H

#include "test.h"

#include "upipe/upipe_ops.h"
#include "upipe/cpu/upipe_cpu_simd.h"

#define EPS_F32  0x1p-24 /* half a unit in the last place, relative */
#define EPS_BF16 0x1.01p-8
#define EPS_F16  0x1.01p-11

/* ---- tensors with gaps ---- */

enum { PACKED, HEADS_INNER, HEADS_OUTER, ROWS_APART, LAYOUTS };

static size_t view_bytes(upipe_view v)
{
    int64_t last = (v.n - 1) * v.n_step + (v.h - 1) * v.h_step + v.d;
    return v.n > 0 ? (size_t)last * upipe_dtype_bytes(v.dtype) : 0;
}

static double get(upipe_view v, int64_t i, int j, int64_t k)
{
    return (double)upipe_cpu_get(upipe_view_at(v, i, j), v.dtype, k);
}

static upipe_view empty(upipe_dtype dtype, int64_t n, int h, int d, int layout)
{
    upipe_view v = upipe_view_packed(NULL, dtype, n, h, d);
    if (layout == HEADS_INNER) {
        v.h_step = d + 3;
        v.n_step = h * v.h_step + 5;
    }
    if (layout == HEADS_OUTER) {
        v.n_step = d + 1;
        v.h_step = n * v.n_step + 2;
    }
    if (layout == ROWS_APART) v.n_step += 8;
    v.data = malloc(view_bytes(v) + 1);
    memset(v.data, 0xff, view_bytes(v) + 1);
    return v;
}

static upipe_view tensor(test_rng *r, upipe_dtype dtype, int64_t n, int h, int d, int layout)
{
    upipe_view v = empty(dtype, n, h, d, layout);
    int64_t i;
    int j, k;
    for (i = 0; i < n; ++i)
        for (j = 0; j < h; ++j)
            for (k = 0; k < d; ++k) upipe_cpu_put(upipe_view_at(v, i, j), dtype, k, (float)test_normal(r));
    return v;
}

static upipe_view twin(upipe_view v)
{
    void *data = malloc(view_bytes(v) + 1);
    memcpy(data, v.data, view_bytes(v));
    v.data = data;
    return v;
}

/* The same elements in another layout. */
static upipe_view moved(upipe_view v, int layout)
{
    upipe_view to = empty(v.dtype, v.n, v.h, v.d, layout);
    int64_t i;
    int j;
    for (i = 0; i < v.n; ++i)
        for (j = 0; j < v.h; ++j)
            memcpy(upipe_view_at(to, i, j), upipe_view_at(v, i, j), (size_t)v.d * upipe_dtype_bytes(v.dtype));
    return to;
}

static int same(upipe_view a, upipe_view b)
{
    int64_t i;
    int j;
    for (i = 0; i < a.n; ++i)
        for (j = 0; j < a.h; ++j)
            if (memcmp(upipe_view_at(a, i, j), upipe_view_at(b, i, j),
                       (size_t)a.d * upipe_dtype_bytes(a.dtype)))
                return 0;
    return 1;
}

/* Every byte outside the rows is still 0xff. */
static int gaps_whole(upipe_view v)
{
    size_t bytes = view_bytes(v), at, size = upipe_dtype_bytes(v.dtype);
    unsigned char *mask = (unsigned char *)calloc(bytes + 1, 1);
    int64_t i;
    int j, ok = 1;
    for (i = 0; i < v.n; ++i)
        for (j = 0; j < v.h; ++j)
            memset(mask + (size_t)(i * v.n_step + j * v.h_step) * size, 1, (size_t)v.d * size);
    for (at = 0; at < bytes; ++at)
        if (!mask[at] && ((unsigned char *)v.data)[at] != 0xff) ok = 0;
    free(mask);
    return ok;
}

static double store_error(upipe_dtype dtype, double value)
{
    return dtype == UPIPE_F32    ? 0
           : dtype == UPIPE_BF16 ? fabs(value) * EPS_BF16
                                 : fabs(value) * EPS_F16 + 0x1p-25; /* half of the least f16 */
}

/* x as the storage type would hold it. */
static float stored(upipe_dtype dtype, float x)
{
    uint32_t buf;
    upipe_cpu_put(&buf, dtype, 0, x);
    return upipe_cpu_get(&buf, dtype, 0);
}

/* Storage types that the table supports: UPIPE_F32 .. */
static int types(const upipe_ctx *c)
{
    return c->ops->f16 ? 3 : 2;
}

static const int dims[] = {1, 2, 6, 8, 15, 16, 20, 30, 64, 100, 128, 250, 256};
enum { DIMS = (int)(sizeof dims / sizeof *dims) };

/* ---- copy, zero, cast ---- */

static void check_cast(test_rng *r, upipe_ctx *c)
{
    int pick, from, to, layout;
    for (pick = 0; pick < DIMS; ++pick)
        for (from = 0; from < types(c); ++from)
            for (to = 0; to < types(c); ++to)
                for (layout = 0; layout < LAYOUTS; ++layout) {
                    upipe_view src = tensor(r, (upipe_dtype)from, 3, 2, dims[pick], layout),
                               before = twin(src);
                    upipe_view dst = empty((upipe_dtype)to, 3, 2, dims[pick], (layout + pick) % LAYOUTS);
                    int i, j, k, ok = 1;
                    CHECK_STATUS(c->ops->cast(c, dst, src), UPIPE_OK, c->err);
                    for (i = 0; i < 3; ++i)
                        for (j = 0; j < 2; ++j)
                            for (k = 0; k < src.d; ++k) {
                                double x = get(src, i, j, k), y = get(dst, i, j, k);
                                if (!(fabs(y - x) <= (from != to ? store_error(dst.dtype, x) : 0))) ok = 0;
                            }
                    CHECK_SAY(ok, "cast %s to %s, d %d, layout %d", upipe_dtype_name(src.dtype),
                              upipe_dtype_name(dst.dtype), src.d, layout);
                    CHECK(gaps_whole(dst));
                    CHECK_BYTES(src.data, before.data, view_bytes(src));
                    free(src.data);
                    free(before.data);
                    free(dst.data);
                }
}

/* Nearest, ties to even, and the values that rounding could spoil. */
static void check_rounding(upipe_ctx *c)
{
    static const uint32_t from[] = {0x3f808000, 0x3f818000, 0x3f808001, 0x3f807fff, 0x7f7fffff, 0x7f800000,
                                    0xff800000, 0x80000000, 0x00008000, 0x00018000, 0xbf818000};
    static const uint16_t want[] = {0x3f80, 0x3f82, 0x3f81, 0x3f80, 0x7f80, 0x7f80,
                                    0xff80, 0x8000, 0x0000, 0x0002, 0xbf82};
    static const uint32_t nan_bits[] = {0x7f800001, 0x7fffffff, 0xff800001, 0xffffffff};
    enum { COUNT = (int)(sizeof from / sizeof *from) };
    float src[COUNT], nans[4];
    uint16_t dst[COUNT], dst_nans[4];
    int i;
    memcpy(src, from, sizeof src);
    memcpy(nans, nan_bits, sizeof nans);
    CHECK_STATUS(c->ops->cast(c, upipe_view_packed(dst, UPIPE_BF16, 1, 1, COUNT),
                              upipe_view_packed(src, UPIPE_F32, 1, 1, COUNT)),
                 UPIPE_OK, c->err);
    for (i = 0; i < COUNT; ++i)
        CHECK_SAY(dst[i] == want[i], "%08x rounds to %04x, not %04x", from[i], dst[i], want[i]);
    CHECK_STATUS(c->ops->cast(c, upipe_view_packed(dst_nans, UPIPE_BF16, 1, 1, 4),
                              upipe_view_packed(nans, UPIPE_F32, 1, 1, 4)),
                 UPIPE_OK, c->err);
    for (i = 0; i < 4; ++i)
        CHECK_SAY((dst_nans[i] & 0x7fff) > 0x7f80, "NaN %08x becomes %04x", nan_bits[i], dst_nans[i]);
}

/* The same in f16, whose range ends soon: at 65504 above, at 2^-24 below. */
static void check_rounding_f16(upipe_ctx *c)
{
    static const float from[] = {1 + 0x1p-11f, 1 + 0x3p-11f, 1 + 0x1p-11f + 0x1p-20f,
                                 65504,        65519.99f,    65520,
                                 -65520,       1e30f,        INFINITY,
                                 -0.0f,        0x1p-24f,     0x1p-25f,
                                 0x1.002p-25f, 0x3p-25f,     0x1p-14f,
                                 0x1.ff8p-15f, -0x1p-40f,    0x1.ffep-15f};
    static const uint16_t want[] = {0x3c00, 0x3c02, 0x3c01, 0x7bff, 0x7bff, 0x7c00, 0xfc00, 0x7c00, 0x7c00,
                                    0x8000, 0x0001, 0x0000, 0x0001, 0x0002, 0x0400, 0x03ff, 0x8000, 0x0400};
    enum { COUNT = (int)(sizeof from / sizeof *from) };
    float src[COUNT + 1], back[COUNT + 1];
    uint16_t dst[COUNT + 1];
    int i;
    memcpy(src, from, sizeof from);
    src[COUNT] = NAN;
    CHECK_STATUS(c->ops->cast(c, upipe_view_packed(dst, UPIPE_F16, 1, 1, COUNT + 1),
                              upipe_view_packed(src, UPIPE_F32, 1, 1, COUNT + 1)),
                 UPIPE_OK, c->err);
    for (i = 0; i < COUNT; ++i)
        CHECK_SAY(dst[i] == want[i], "%a rounds to %04x, not %04x", (double)from[i], dst[i], want[i]);
    CHECK((dst[COUNT] & 0x7fff) > 0x7c00);
    CHECK_STATUS(c->ops->cast(c, upipe_view_packed(back, UPIPE_F32, 1, 1, COUNT + 1),
                              upipe_view_packed(dst, UPIPE_F16, 1, 1, COUNT + 1)),
                 UPIPE_OK, c->err);
    CHECK(back[4] == 65504 && isinf(back[5]) && back[6] == -back[5] && back[10] == 0x1p-24f &&
          isnan(back[COUNT]));
}

static void check_bytes(upipe_ctx *c)
{
    unsigned char a[16], b[16];
    int i;
    for (i = 0; i < 16; ++i) a[i] = (unsigned char)(i + 1);
    memset(b, 0, sizeof b);
    CHECK_STATUS(c->ops->copy(c, b + 1, a, 13), UPIPE_OK, c->err);
    CHECK(b[0] == 0 && b[14] == 0 && memcmp(b + 1, a, 13) == 0);
    CHECK_STATUS(c->ops->zero(c, a + 2, 3), UPIPE_OK, c->err);
    CHECK(a[1] == 2 && a[2] == 0 && a[3] == 0 && a[4] == 0 && a[5] == 6);
    CHECK_STATUS(c->ops->copy(c, NULL, NULL, 0), UPIPE_OK, c->err);
    CHECK_STATUS(c->ops->zero(c, NULL, 0), UPIPE_OK, c->err);
    CHECK_STATUS(c->ops->copy(c, NULL, a, 4), UPIPE_ERR_ARG, c->err);
    CHECK_TEXT(c->err.text, "dst is NULL");
    CHECK_STATUS(c->ops->copy(c, b, NULL, 4), UPIPE_ERR_ARG, c->err);
    CHECK_TEXT(c->err.text, "src is NULL");
    CHECK_STATUS(c->ops->zero(c, NULL, 4), UPIPE_ERR_ARG, c->err);
}

/* ---- rope ---- */

static upipe_rope rope_of(upipe_view x, int64_t pos0, int interleaved, int inverse)
{
    upipe_rope r;
    memset(&r, 0, sizeof r);
    r.x = x;
    r.count = 1;
    r.pos0 = pos0;
    r.theta = 10000;
    r.interleaved = interleaved;
    r.inverse = inverse;
    return r;
}

static void check_rope_case(test_rng *r, upipe_ctx *c, int d, upipe_dtype dtype, int layout, int interleaved,
                            int inverse, int64_t pos0, int64_t pos_step)
{
    const int64_t apart = pos_step > 0 ? pos_step : 1;
    upipe_view x = tensor(r, dtype, 5, 2, d, layout), before = twin(x), late, other;
    upipe_rope call = rope_of(x, pos0, interleaved, inverse);
    int i, j, p, ok = 1;
    call.pos_step = pos_step;
    CHECK_STATUS(c->ops->rope(c, &call), UPIPE_OK, c->err);
    for (i = 0; i < 5; ++i)
        for (j = 0; j < 2; ++j)
            for (p = 0; p < d / 2; ++p) {
                int k0 = interleaved ? 2 * p : p, k1 = interleaved ? 2 * p + 1 : p + d / 2;
                double angle = (double)(pos0 + i * apart) * pow(10000, -2.0 * p / d) * (inverse ? -1 : 1);
                double x0 = get(before, i, j, k0), x1 = get(before, i, j, k1);
                double y0 = x0 * cos(angle) - x1 * sin(angle), y1 = x0 * sin(angle) + x1 * cos(angle);
                double near = (fabs(x0) + fabs(x1)) * 4 * EPS_F32;
                if (!(fabs(get(x, i, j, k0) - y0) <= near + store_error(dtype, y0)) ||
                    !(fabs(get(x, i, j, k1) - y1) <= near + store_error(dtype, y1)))
                    ok = 0;
            }
    CHECK_SAY(ok, "rope d %d, %s, layout %d, interleaved %d, inverse %d, position %lld in steps of %lld", d,
              upipe_dtype_name(dtype), layout, interleaved, inverse, (long long)pos0, (long long)pos_step);
    CHECK(gaps_whole(x));
    /* the last two tokens alone, and all in another layout */
    late = twin(before);
    call.x = upipe_view_rows(late, 3, 2);
    call.pos0 = pos0 + 3 * apart;
    CHECK_STATUS(c->ops->rope(c, &call), UPIPE_OK, c->err);
    CHECK(same(upipe_view_rows(late, 3, 2), upipe_view_rows(x, 3, 2)));
    CHECK(same(upipe_view_rows(late, 0, 3), upipe_view_rows(before, 0, 3)));
    other = moved(before, (layout + 1) % LAYOUTS);
    call.x = other;
    call.pos0 = pos0;
    CHECK_STATUS(c->ops->rope(c, &call), UPIPE_OK, c->err);
    CHECK(same(other, x));
    free(x.data);
    free(before.data);
    free(late.data);
    free(other.data);
}

static void check_rope(test_rng *r, upipe_ctx *c)
{
    static const int64_t positions[] = {0, 61, 130, 4095, 8000000}, steps[] = {0, 1, 3, 1000};
    int pick, which, dtype;
    for (pick = 0; pick < DIMS; ++pick) {
        if (dims[pick] % 2 != 0) continue;
        for (which = 0; which < 4 * LAYOUTS; ++which)
            for (dtype = 0; dtype < types(c); ++dtype)
                check_rope_case(r, c, dims[pick], (upipe_dtype)dtype, which / 4, which & 1, which >> 1 & 1,
                                positions[(which + dtype + pick) % 5], steps[(which / 2 + pick) % 4]);
    }
}

/* Blocks share the positions; inverse is the transpose, so it undoes the turn and keeps inner products. */
static void check_rope_blocks(test_rng *r, upipe_ctx *c)
{
    int interleaved;
    for (interleaved = 0; interleaved < 2; ++interleaved) {
        upipe_view all = tensor(r, UPIPE_F32, 12, 2, 36, PACKED), before = twin(all), single = twin(all);
        upipe_view back;
        upipe_rope call = rope_of(upipe_view_rows(all, 0, 3), 100, interleaved, 0);
        int i, j, k;
        double left = 0, right = 0, size = 0;
        call.count = 3;
        call.step = 4 * all.n_step; /* three tokens of every four */
        CHECK_STATUS(c->ops->rope(c, &call), UPIPE_OK, c->err);
        for (i = 0; i < 3; ++i) {
            upipe_rope one = rope_of(upipe_view_rows(single, 4 * i, 3), 100, interleaved, 0);
            CHECK_STATUS(c->ops->rope(c, &one), UPIPE_OK, c->err);
            CHECK(same(upipe_view_rows(all, 4 * i + 3, 1), upipe_view_rows(before, 4 * i + 3, 1)));
        }
        CHECK(same(all, single));
        back = twin(all);
        call.x = upipe_view_rows(back, 0, 3);
        call.inverse = 1;
        CHECK_STATUS(c->ops->rope(c, &call), UPIPE_OK, c->err);
        for (i = 0; i < 3; ++i)
            for (j = 0; j < 2; ++j)
                for (k = 0; k < 36; ++k)
                    CHECK(fabs(get(back, i, j, k) - get(before, i, j, k)) <= 32 * EPS_F32);
        /* <R x, y> = <x, R' y> with y = the block of the next tokens as they were */
        memcpy(back.data, before.data, view_bytes(back));
        call.x = upipe_view_rows(back, 6, 3);
        call.count = 1;
        CHECK_STATUS(c->ops->rope(c, &call), UPIPE_OK, c->err);
        for (i = 0; i < 3; ++i)
            for (j = 0; j < 2; ++j)
                for (k = 0; k < 36; ++k) {
                    left += get(all, i, j, k) * get(before, 6 + i, j, k);
                    right += get(before, i, j, k) * get(back, 6 + i, j, k);
                    size += fabs(get(all, i, j, k) * get(before, 6 + i, j, k));
                }
        CHECK_SAY(fabs(left - right) <= 16 * EPS_F32 * size, "<Rx,y> = %.9g, <x,R'y> = %.9g", left, right);
        free(all.data);
        free(before.data);
        free(single.data);
        free(back.data);
    }
}

/* ---- rmsnorm ---- */

static void norm_f64(double *y, const double *x, const float *weight, double eps, int d)
{
    double sum = 0, scale;
    int k;
    for (k = 0; k < d; ++k) sum += x[k] * x[k];
    scale = 1 / sqrt(sum / d + eps);
    for (k = 0; k < d; ++k) y[k] = x[k] * scale * (double)weight[k];
}

static void check_rmsnorm(test_rng *r, upipe_ctx *c, int d, upipe_dtype dtype, int layout)
{
    const float eps = 1e-5f;
    upipe_view x = tensor(r, dtype, 4, 3, d, layout), before = twin(x),
               other = moved(x, (layout + 1) % LAYOUTS);
    float *weight = (float *)malloc((size_t)d * sizeof *weight);
    double row[256], want[256];
    int i, j, k, ok = 1;
    for (k = 0; k < d; ++k) weight[k] = (float)test_normal(r);
    CHECK_STATUS(c->ops->rmsnorm(c, x, x, weight, eps), UPIPE_OK, c->err);
    for (i = 0; i < 4; ++i)
        for (j = 0; j < 3; ++j) {
            for (k = 0; k < d; ++k) row[k] = get(before, i, j, k);
            norm_f64(want, row, weight, (double)eps, d);
            for (k = 0; k < d; ++k) {
                double near = fabs(want[k]) * (8 + d / 8.0) * EPS_F32 + store_error(dtype, want[k]);
                if (!(fabs(get(x, i, j, k) - want[k]) <= near)) ok = 0;
            }
        }
    CHECK_SAY(ok, "rmsnorm d %d, %s, layout %d", d, upipe_dtype_name(dtype), layout);
    CHECK(gaps_whole(x));
    CHECK_STATUS(c->ops->rmsnorm(c, other, other, weight, eps), UPIPE_OK, c->err);
    CHECK(same(other, x));
    free(x.data);
    free(before.data);
    free(other.data);
    free(weight);
}

/* Loss sum of dy * y of one row, in f64. */
static double norm_loss(const double *dy, const double *x, const double *weight, double eps, int d)
{
    double sum = 0, loss = 0;
    int k;
    for (k = 0; k < d; ++k) sum += x[k] * x[k];
    for (k = 0; k < d; ++k) loss += dy[k] * x[k] * weight[k];
    return loss / sqrt(sum / d + eps);
}

static void check_rmsnorm_bwd(test_rng *r, upipe_ctx *c, int d, upipe_dtype dy_type, upipe_dtype x_type,
                              int layout)
{
    const float eps = 1e-5f;
    const double step = 1e-4;
    enum { TOKENS = 4, HEADS = 2 };
    upipe_view x = tensor(r, x_type, TOKENS, HEADS, d, layout),
               dy = tensor(r, dy_type, TOKENS, HEADS, d, layout);
    upipe_view x_before = twin(x), before = twin(dy), other;
    size_t weights = (size_t)(HEADS * d);
    float *weight = (float *)malloc((size_t)d * sizeof *weight),
          *dweight = (float *)malloc(weights * sizeof *dweight);
    float *dweight2 = (float *)malloc(weights * sizeof *dweight);
    double weight64[256], grad_x[256], grad_y[256], want_weight[2 * 256], size_weight[2 * 256];
    int i, j, k, ok = 1, ok_weight = 1;
    for (k = 0; k < d; ++k) weight64[k] = (double)(weight[k] = (float)test_normal(r));
    for (k = 0; k < HEADS * d; ++k) {
        dweight[k] = (float)test_normal(r);
        want_weight[k] = (double)dweight[k];
        size_weight[k] = fabs(want_weight[k]) + 1;
    }
    memcpy(dweight2, dweight, weights * sizeof *dweight);
    CHECK_STATUS(c->ops->rmsnorm_bwd(c, dy, dy, x, weight, eps, dweight, 0), UPIPE_OK, c->err);
    for (i = 0; i < TOKENS; ++i)
        for (j = 0; j < HEADS; ++j) {
            double square = 0, bound = 0;
            for (k = 0; k < d; ++k) {
                grad_x[k] = get(x, i, j, k);
                grad_y[k] = get(before, i, j, k);
                square += grad_x[k] * grad_x[k];
                bound += fabs(grad_y[k] * weight64[k]);
            }
            bound = (bound + 1) / sqrt(square / d + (double)eps);
            for (k = 0; k < d; ++k) {
                double old = grad_x[k], up, down, slope;
                grad_x[k] = old + step;
                up = norm_loss(grad_y, grad_x, weight64, (double)eps, d);
                grad_x[k] = old - step;
                down = norm_loss(grad_y, grad_x, weight64, (double)eps, d);
                grad_x[k] = old;
                slope = (up - down) / (2 * step);
                /* differences are off by step^2 times a third derivative, which grows as the row shrinks */
                if (!(fabs(get(dy, i, j, k) - slope) <=
                      bound * (16 * EPS_F32 + step * step / (square / d + (double)eps)) +
                          store_error(dy_type, slope)))
                    ok = 0;
                want_weight[j * d + k] += grad_y[k] * grad_x[k] / sqrt(square / d + (double)eps);
                size_weight[j * d + k] += fabs(grad_y[k] * grad_x[k]) / sqrt(square / d + (double)eps);
            }
        }
    for (k = 0; k < HEADS * d; ++k)
        if (!(fabs((double)dweight[k] - want_weight[k]) <= size_weight[k] * (16 + d / 8.0) * EPS_F32))
            ok_weight = 0;
    CHECK_SAY(ok, "rmsnorm_bwd dx: d %d, %s, %s, layout %d", d, upipe_dtype_name(dy_type),
              upipe_dtype_name(x_type), layout);
    CHECK_SAY(ok_weight, "rmsnorm_bwd dgain: d %d, %s, %s, layout %d", d, upipe_dtype_name(dy_type),
              upipe_dtype_name(x_type), layout);
    CHECK(gaps_whole(dy));
    CHECK_BYTES(x.data, x_before.data, view_bytes(x));
    /* in another layout: the same bits */
    other = moved(before, (layout + 2) % LAYOUTS);
    CHECK_STATUS(c->ops->rmsnorm_bwd(c, other, other, x, weight, eps, dweight2, 0), UPIPE_OK, c->err);
    CHECK(same(other, dy));
    CHECK_BYTES(dweight2, dweight, weights * sizeof *dweight);
    free(x.data);
    free(dy.data);
    free(x_before.data);
    free(before.data);
    free(other.data);
    free(weight);
    free(dweight);
    free(dweight2);
}

/* In two calls, of which the second begins between two partial sums: the same bits as in one. */
static void check_rmsnorm_bwd_sums(test_rng *r, upipe_ctx *c, int d, upipe_dtype dtype, int heads)
{
    enum { TOKENS = 2 * UPIPE_SUM_ROWS + 5 };
    upipe_view x = tensor(r, dtype, TOKENS, heads, d, PACKED),
               dy = tensor(r, dtype, TOKENS, heads, d, PACKED);
    upipe_view halves = twin(dy);
    size_t weights = (size_t)(heads * d);
    float *weight = (float *)calloc((size_t)d, sizeof *weight);
    float *whole = (float *)calloc(weights, sizeof *whole), *sums = (float *)calloc(weights, sizeof *sums);
    int first, k;
    for (k = 0; k < d; ++k) weight[k] = (float)test_normal(r);
    CHECK_STATUS(c->ops->rmsnorm_bwd(c, dy, dy, x, weight, 1e-5f, whole, 0), UPIPE_OK, c->err);
    for (first = 0; first < TOKENS; first += UPIPE_SUM_ROWS) {
        int n = TOKENS - first < UPIPE_SUM_ROWS ? TOKENS - first : UPIPE_SUM_ROWS;
        upipe_view part = upipe_view_rows(halves, first, n);
        CHECK_STATUS(c->ops->rmsnorm_bwd(c, part, part, upipe_view_rows(x, first, n), weight, 1e-5f, sums, 0),
                     UPIPE_OK, c->err);
    }
    CHECK_BYTES(halves.data, dy.data, view_bytes(dy));
    CHECK_BYTES(sums, whole, weights * sizeof *whole);
    free(x.data);
    free(dy.data);
    free(halves.data);
    free(weight);
    free(whole);
    free(sums);
}

/* Wherever the result goes, and whatever its type, it is the f32 result of the call in place, rounded. */
static void check_rmsnorm_places(test_rng *r, upipe_ctx *c, int d, int layout)
{
    const float eps = 1e-5f;
    enum { TOKENS = 3, HEADS = 2 };
    upipe_view x = tensor(r, UPIPE_F32, TOKENS, HEADS, d, layout), keep_x = twin(x), norm = twin(x);
    upipe_view dy = tensor(r, UPIPE_F32, TOKENS, HEADS, d, (layout + 1) % LAYOUTS), keep_dy = twin(dy);
    upipe_view grad = twin(dy), as_x = twin(x), old = tensor(r, UPIPE_F32, TOKENS, HEADS, d, layout);
    size_t weights = (size_t)(HEADS * d);
    float *weight = (float *)malloc((size_t)d * sizeof *weight),
          *dweight = (float *)calloc(weights, sizeof *dweight);
    float *dweight2 = (float *)calloc(weights, sizeof *dweight);
    int i, j, k, to;
    for (k = 0; k < d; ++k) weight[k] = (float)test_normal(r);
    CHECK_STATUS(c->ops->rmsnorm(c, norm, norm, weight, eps), UPIPE_OK, c->err);
    CHECK_STATUS(c->ops->rmsnorm_bwd(c, grad, grad, x, weight, eps, dweight, 0), UPIPE_OK, c->err);
    CHECK_STATUS(c->ops->rmsnorm_bwd(c, as_x, dy, as_x, weight, eps, dweight2, 0), UPIPE_OK, c->err);
    CHECK(same(as_x, grad));
    CHECK_BYTES(dweight2, dweight, weights * sizeof *dweight);
    for (to = 0; to < types(c); ++to) {
        upipe_dtype dtype = (upipe_dtype)to;
        upipe_view y = empty(dtype, TOKENS, HEADS, d, (layout + 2) % LAYOUTS), dx = twin(y), sum = twin(y);
        int ok_y = 1, ok_dx = 1, ok_sum = 1;
        CHECK_STATUS(c->ops->cast(c, sum, old), UPIPE_OK, c->err);
        CHECK_STATUS(c->ops->rmsnorm(c, y, x, weight, eps), UPIPE_OK, c->err);
        CHECK_STATUS(c->ops->rmsnorm_bwd(c, dx, dy, x, weight, eps, NULL, 0), UPIPE_OK, c->err);
        memset(dweight2, 0, weights * sizeof *dweight2);
        CHECK_STATUS(c->ops->rmsnorm_bwd(c, sum, dy, x, weight, eps, dweight2, 1), UPIPE_OK, c->err);
        CHECK_BYTES(dweight2, dweight, weights * sizeof *dweight);
        for (i = 0; i < TOKENS; ++i)
            for (j = 0; j < HEADS; ++j)
                for (k = 0; k < d; ++k) {
                    float one[2];
                    volatile float want;
                    one[0] = (float)get(norm, i, j, k);
                    one[1] = (float)get(grad, i, j, k);
                    want = (float)get(old, i, j, k);
                    want = stored(dtype, want);
                    want = want + one[1];
                    want = stored(dtype, want);
                    one[0] = stored(dtype, one[0]);
                    one[1] = stored(dtype, one[1]);
                    if ((float)get(y, i, j, k) != one[0]) ok_y = 0;
                    if ((float)get(dx, i, j, k) != one[1]) ok_dx = 0;
                    if ((float)get(sum, i, j, k) != want) ok_sum = 0;
                }
        CHECK_SAY(ok_y && ok_dx && ok_sum, "rmsnorm into %s, d %d, layout %d: y %d, dx %d, dx += %d",
                  upipe_dtype_name(dtype), d, layout, ok_y, ok_dx, ok_sum);
        CHECK(gaps_whole(y) && gaps_whole(dx) && gaps_whole(sum));
        free(y.data);
        free(dx.data);
        free(sum.data);
    }
    CHECK_BYTES(x.data, keep_x.data, view_bytes(x));
    CHECK_BYTES(dy.data, keep_dy.data, view_bytes(dy));
    free(x.data);
    free(keep_x.data);
    free(norm.data);
    free(dy.data);
    free(keep_dy.data);
    free(grad.data);
    free(as_x.data);
    free(old.data);
    free(weight);
    free(dweight);
    free(dweight2);
}

/* ---- rowdot, sum ---- */

static void check_rowdot(test_rng *r, upipe_ctx *c, int d, upipe_dtype a_type, upipe_dtype b_type, int layout)
{
    upipe_view a = tensor(r, a_type, 4, 3, d, layout), b = tensor(r, b_type, 4, 3, d, (layout + 1) % LAYOUTS);
    upipe_view out = empty(UPIPE_F32, 4, 3, 1, layout), again = empty(UPIPE_F32, 4, 3, 1, PACKED);
    upipe_view a2 = moved(a, PACKED), b2 = moved(b, PACKED);
    int i, j, k, ok = 1;
    CHECK_STATUS(c->ops->rowdot(c, out, a, b), UPIPE_OK, c->err);
    for (i = 0; i < 4; ++i)
        for (j = 0; j < 3; ++j) {
            double want = 0, size = 0;
            for (k = 0; k < d; ++k) {
                want += get(a, i, j, k) * get(b, i, j, k);
                size += fabs(get(a, i, j, k) * get(b, i, j, k));
            }
            if (!(fabs(get(out, i, j, 0) - want) <= size * (d + 4) * EPS_F32)) ok = 0;
        }
    CHECK_SAY(ok, "rowdot d %d, %s . %s, layout %d", d, upipe_dtype_name(a_type), upipe_dtype_name(b_type),
              layout);
    CHECK(gaps_whole(out));
    CHECK_STATUS(c->ops->rowdot(c, again, a2, b2), UPIPE_OK, c->err);
    CHECK(same(again, out));
    free(a.data);
    free(b.data);
    free(a2.data);
    free(b2.data);
    free(out.data);
    free(again.data);
}

/* Bitwise: the chain of additions is exactly defined. */
static void check_sum(test_rng *r, upipe_ctx *c, int d, upipe_dtype dtype, int layout, int count,
                      int accumulate)
{
    enum { TOKENS = 3, HEADS = 2 };
    int64_t each = (int64_t)TOKENS * HEADS * d, step = each + 3;
    size_t floats = (size_t)(count > 0 ? (count - 1) * step + each : 0);
    float *src = (float *)malloc(floats * sizeof *src + 1);
    upipe_view dst = tensor(r, dtype, TOKENS, HEADS, d, layout), before = twin(dst);
    int i, j, k, part, ok = 1;
    size_t at;
    if (floats > 0) memset(src, 0xff, floats * sizeof *src);
    for (part = 0; part < count; ++part)
        for (at = 0; at < (size_t)each; ++at) src[(size_t)(part * step) + at] = (float)test_normal(r);
    CHECK_STATUS(c->ops->sum(c, dst, src, step, count, accumulate), UPIPE_OK, c->err);
    for (i = 0; i < TOKENS; ++i)
        for (j = 0; j < HEADS; ++j)
            for (k = 0; k < d; ++k) {
                volatile float sum = accumulate ? (float)get(before, i, j, k) : 0.0f;
                for (part = 0; part < count; ++part) sum = sum + src[part * step + (i * HEADS + j) * d + k];
                if ((float)get(dst, i, j, k) != stored(dtype, sum)) ok = 0;
            }
    CHECK_SAY(ok, "sum of %d, d %d, %s, layout %d, accumulate %d", count, d, upipe_dtype_name(dtype), layout,
              accumulate);
    CHECK(gaps_whole(dst));
    free(src);
    free(dst.data);
    free(before.data);
}

/* ---- refusals ---- */

static void check_row_statuses(upipe_ctx *c)
{
    float buf[64];
    upipe_view x = upipe_view_packed(buf, UPIPE_F32, 2, 2, 8), v;
    upipe_view one = upipe_view_packed(buf, UPIPE_F32, 2, 2, 1);
    upipe_rope rope = rope_of(x, 0, 0, 0), bad;
    memset(buf, 0, sizeof buf);

    v = x;
    v.d = 7;
    CHECK_STATUS(c->ops->cast(c, x, v), UPIPE_ERR_ARG, c->err);
    CHECK_TEXT(c->err.text, "src is [2][2][7], not [2][2][8]");
    v = x;
    v.data = NULL;
    CHECK_STATUS(c->ops->cast(c, v, x), UPIPE_ERR_ARG, c->err);
    CHECK_TEXT(c->err.text, "dst is NULL");
    v = x;
    v.dtype = (upipe_dtype)5;
    CHECK_STATUS(c->ops->cast(c, v, x), UPIPE_ERR_UNSUPPORTED, c->err);
    CHECK_TEXT(c->err.text, "storage type 5");
    v = x;
    v.h = 0;
    CHECK_STATUS(c->ops->cast(c, v, x), UPIPE_ERR_ARG, c->err);
    v = x;
    v.n = 0;
    v.data = NULL;
    CHECK_STATUS(c->ops->cast(c, v, v), UPIPE_OK, c->err);

    bad = rope;
    bad.x.d = 7;
    CHECK_STATUS(c->ops->rope(c, &bad), UPIPE_ERR_ARG, c->err);
    CHECK_TEXT(c->err.text, "head dim 7");
    bad.x.d = 258;
    CHECK_STATUS(c->ops->rope(c, &bad), UPIPE_ERR_UNSUPPORTED, c->err);
    bad = rope;
    bad.theta = 0;
    CHECK_STATUS(c->ops->rope(c, &bad), UPIPE_ERR_ARG, c->err);
    CHECK_TEXT(c->err.text, "theta 0");
    bad = rope;
    bad.pos0 = -1;
    CHECK_STATUS(c->ops->rope(c, &bad), UPIPE_ERR_ARG, c->err);
    CHECK_TEXT(c->err.text, "position -1");
    bad = rope;
    bad.pos_step = -3;
    CHECK_STATUS(c->ops->rope(c, &bad), UPIPE_ERR_ARG, c->err);
    CHECK_TEXT(c->err.text, "in steps of -3");
    bad = rope;
    bad.count = -2;
    CHECK_STATUS(c->ops->rope(c, &bad), UPIPE_ERR_ARG, c->err);
    bad.count = 0;
    CHECK_STATUS(c->ops->rope(c, &bad), UPIPE_OK, c->err);

    CHECK_STATUS(c->ops->rmsnorm(c, x, x, NULL, 1e-5f), UPIPE_ERR_ARG, c->err);
    CHECK_TEXT(c->err.text, "norm weight is NULL");
    CHECK_STATUS(c->ops->rmsnorm(c, x, x, buf, -1), UPIPE_ERR_ARG, c->err);
    CHECK_TEXT(c->err.text, "eps -1");
    v = x;
    v.n = 1;
    CHECK_STATUS(c->ops->rmsnorm(c, v, x, buf, 1e-5f), UPIPE_ERR_ARG, c->err);
    CHECK_TEXT(c->err.text, "y is [1][2][8], not [2][2][8]");
    CHECK_STATUS(c->ops->rmsnorm_bwd(c, x, x, v, buf, 1e-5f, buf, 0), UPIPE_ERR_ARG, c->err);
    CHECK_TEXT(c->err.text, "x is [1][2][8], not [2][2][8]");
    CHECK_STATUS(c->ops->rmsnorm_bwd(c, v, x, x, buf, 1e-5f, buf, 0), UPIPE_ERR_ARG, c->err);
    CHECK_TEXT(c->err.text, "dx is [1][2][8], not [2][2][8]");
    v = x;
    v.dtype = UPIPE_BF16;
    CHECK_STATUS(c->ops->rmsnorm(c, v, x, buf, 1e-5f), UPIPE_ERR_ARG, c->err);
    CHECK_TEXT(c->err.text, "y (bf16, steps 16, 8) lies over x (f32, steps 16, 8)");
    v = x;
    v.n_step = 20;
    CHECK_STATUS(c->ops->rmsnorm_bwd(c, v, x, x, buf, 1e-5f, NULL, 0), UPIPE_ERR_ARG, c->err);
    CHECK_TEXT(c->err.text, "dx (f32, steps 20, 8) lies over dy (f32, steps 16, 8)");
    v = upipe_view_packed(buf + 32, UPIPE_F32, 2, 2, 8);
    CHECK_STATUS(c->ops->rmsnorm_bwd(c, x, x, v, buf, 1e-5f, NULL, 1), UPIPE_ERR_ARG, c->err);
    CHECK_TEXT(c->err.text, "dx, which accumulates, is dy");
    CHECK_STATUS(c->ops->rmsnorm_bwd(c, x, v, x, buf, 1e-5f, NULL, 1), UPIPE_ERR_ARG, c->err);
    CHECK_TEXT(c->err.text, "dx, which accumulates, is x");
    CHECK_STATUS(c->ops->rmsnorm_bwd(c, x, x, v, NULL, 1e-5f, NULL, 0), UPIPE_ERR_ARG, c->err);
    CHECK_STATUS(c->ops->rmsnorm_bwd(c, x, x, v, buf, NAN, NULL, 0), UPIPE_ERR_ARG, c->err);

    CHECK_STATUS(c->ops->rowdot(c, x, x, x), UPIPE_ERR_ARG, c->err);
    CHECK_TEXT(c->err.text, "out is [2][2][8], not [2][2][1]");
    v = one;
    v.dtype = UPIPE_BF16;
    CHECK_STATUS(c->ops->rowdot(c, v, x, x), UPIPE_ERR_ARG, c->err);
    CHECK_TEXT(c->err.text, "out is bf16");

    v = x;
    v.dtype = UPIPE_BF16;
    CHECK_STATUS(c->ops->sum(c, v, buf, 0, 1, 1), UPIPE_ERR_UNSUPPORTED, c->err);
    CHECK_TEXT(c->err.text, "accumulates into f32 only");
    CHECK_STATUS(c->ops->sum(c, x, NULL, 0, 1, 0), UPIPE_ERR_ARG, c->err);
    CHECK_STATUS(c->ops->sum(c, x, buf, 0, -1, 0), UPIPE_ERR_ARG, c->err);
    CHECK_TEXT(c->err.text, "-1 terms");
}

static void check_rows(test_rng *r, upipe_ctx *c)
{
    int pick, which, all = types(c);
    check_bytes(c);
    check_rounding(c);
    if (c->ops->f16) check_rounding_f16(c);
    check_cast(r, c);
    check_rope(r, c);
    check_rope_blocks(r, c);
    for (pick = 0; pick < DIMS; ++pick)
        for (which = 0; which < all * all * LAYOUTS; ++which) {
            int d = dims[pick], layout = which / (all * all);
            upipe_dtype one = (upipe_dtype)(which % all), two = (upipe_dtype)(which / all % all);
            if (two == UPIPE_F32) check_rmsnorm(r, c, d, one, layout);
            check_rmsnorm_bwd(r, c, d, one, two, layout);
            check_rowdot(r, c, d, one, two, layout);
            check_sum(r, c, d, one, layout, (which + pick) % 5, one == UPIPE_F32 && two == UPIPE_BF16);
        }
    for (pick = 0; pick < DIMS; ++pick)
        for (which = 0; which < LAYOUTS; ++which) check_rmsnorm_places(r, c, dims[pick], which);
    check_rmsnorm_places(r, c, 5003, PACKED);
    check_rmsnorm_bwd_sums(r, c, 40, UPIPE_F32, 2);
    check_rmsnorm_bwd_sums(r, c, 8, UPIPE_BF16, 11); /* more heads than one item holds */
}

#endif

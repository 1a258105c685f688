/* rows.h -- checks of a table's row operations: against f64, against differences, bits against steps and
 *           split calls
 *
 *     check_rows(&rng, c);         c->ops: the table
 *     check_row_statuses(c);       refusals; c->ops: the table itself, as no memory is touched
 */
#ifndef UPIPE_TEST_ROWS_H
#define UPIPE_TEST_ROWS_H

#include "oracle.h"
#include "tensors.h"

#define EPS_F32  0x1p-24 /* half a unit in the last place, relative */
#define EPS_BF16 0x1.01p-8

static inline double store_error(upipe_dtype dtype, double value)
{
    return dtype == UPIPE_F32 ? 0 : fabs(value) * EPS_BF16;
}

static const int dims[] = {1, 2, 6, 8, 15, 16, 20, 30, 64, 100, 128, 250, 256};
enum { DIMS = (int)(sizeof dims / sizeof *dims) };

/* ---- copy, zero, cast ---- */

static inline void check_cast(test_rng *r, upipe_ctx *c)
{
    for (int pick = 0; pick < DIMS; ++pick)
        for (int from = 0; from < TYPES; ++from)
            for (int to = 0; to < TYPES; ++to)
                for (int layout = 0; layout < LAYOUTS; ++layout) {
                    upipe_view src = tensor(r, (upipe_dtype)from, 3, 2, dims[pick], layout, 1),
                               before = twin(src);
                    upipe_view dst = empty((upipe_dtype)to, 3, 2, dims[pick], (layout + pick) % LAYOUTS);
                    int ok = 1;
                    CHECK_OP(cast(c, dst, src));
                    for (int i = 0; i < 3; ++i)
                        for (int j = 0; j < 2; ++j)
                            for (int k = 0; k < src.d; ++k) {
                                double x = get(src, i, j, k), y = get(dst, i, j, k);
                                if (!(fabs(y - x) <= (from != to ? store_error(dst.dtype, x) : 0))) ok = 0;
                            }
                    CHECK_SAY(ok, "cast %s to %s, d %d, layout %d", upipe_dtype_name(src.dtype),
                              upipe_dtype_name(dst.dtype), src.d, layout);
                    CHECK(gaps_whole(dst));
                    CHECK_BYTES(src.data, before.data, view_bytes(src));
                    buffers_free(0);
                }
}

/* Nearest, ties to even, and the values that rounding could spoil. */
static inline void check_rounding(upipe_ctx *c)
{
    static const uint32_t from[] = {0x3f808000, 0x3f818000, 0x3f808001, 0x3f807fff, 0x7f7fffff, 0x7f800000,
                                    0xff800000, 0x80000000, 0x00008000, 0x00018000, 0xbf818000};
    static const uint16_t want[] = {0x3f80, 0x3f82, 0x3f81, 0x3f80, 0x7f80, 0x7f80,
                                    0xff80, 0x8000, 0x0000, 0x0002, 0xbf82};
    static const uint32_t nan_bits[] = {0x7f800001, 0x7fffffff, 0xff800001, 0xffffffff};
    enum { COUNT = (int)(sizeof from / sizeof *from) };
    float src[COUNT], nans[4];
    uint16_t dst[COUNT], dst_nans[4];
    memcpy(src, from, sizeof src);
    memcpy(nans, nan_bits, sizeof nans);
    CHECK_OP(cast(c, upipe_view_packed(dst, UPIPE_BF16, 1, 1, COUNT),
                  upipe_view_packed(src, UPIPE_F32, 1, 1, COUNT)));
    for (int i = 0; i < COUNT; ++i)
        CHECK_SAY(dst[i] == want[i], "%08x rounds to %04x, not %04x", from[i], dst[i], want[i]);
    CHECK_OP(cast(c, upipe_view_packed(dst_nans, UPIPE_BF16, 1, 1, 4),
                  upipe_view_packed(nans, UPIPE_F32, 1, 1, 4)));
    for (int i = 0; i < 4; ++i)
        CHECK_SAY((dst_nans[i] & 0x7fff) > 0x7f80, "NaN %08x becomes %04x", nan_bits[i], dst_nans[i]);
}

static inline void check_bytes(upipe_ctx *c)
{
    unsigned char a[16], b[16] = {0};
    for (int i = 0; i < 16; ++i) a[i] = (unsigned char)(i + 1);
    CHECK_OP(copy(c, b + 1, a, 13));
    CHECK(b[0] == 0 && b[14] == 0 && memcmp(b + 1, a, 13) == 0);
    CHECK_OP(zero(c, a + 2, 3));
    CHECK(a[1] == 2 && a[2] == 0 && a[3] == 0 && a[4] == 0 && a[5] == 6);
    CHECK_OP(copy(c, NULL, NULL, 0));
    CHECK_OP(zero(c, NULL, 0));
    CHECK_REFUSED(c->ops->copy(c, NULL, a, 4), UPIPE_ERR_ARG, c->err, "dst is NULL");
    CHECK_REFUSED(c->ops->copy(c, b, NULL, 4), UPIPE_ERR_ARG, c->err, "src is NULL");
    CHECK_STATUS(c->ops->zero(c, NULL, 4), UPIPE_ERR_ARG, c->err);
}

/* ---- rope ---- */

static inline upipe_rope rope_of(upipe_view x, int64_t pos0, int interleaved, int inverse)
{
    upipe_rope r = {
        .x = x, .count = 1, .pos0 = pos0, .theta = 10000, .interleaved = interleaved, .inverse = inverse};
    return r;
}

/* The first of d are rotated; factor as in upipe_rope: with a factor the rates are the call's own, not theta's. */
static inline void check_rope_case(test_rng *r, upipe_ctx *c, int d, upipe_dtype dtype, int layout,
                                   int interleaved, int inverse, int64_t pos0, int64_t pos_step, int first,
                                   double factor)
{
    const int64_t apart = pos_step > 0 ? pos_step : 1;
    const int turned = first > 0 ? first : d;
    const double by = factor > 0 ? factor : 1;
    double rates[128];
    upipe_view x = tensor(r, dtype, 5, 2, d, layout, 1), before = twin(x), late, other;
    upipe_rope call = rope_of(x, pos0, interleaved, inverse);
    int ok = 1;
    call.pos_step = pos_step;
    call.dims = first;
    call.factor = factor;
    for (int p = 0; p < turned / 2; ++p)
        rates[p] = factor > 0 ? 2.5e-3 * test_below(r, 1001) : pow(10000, -2.0 * p / turned);
    if (factor > 0) call.rates = rates;
    CHECK_OP(rope(c, &call));
    for (int i = 0; i < 5; ++i)
        for (int j = 0; j < 2; ++j) {
            for (int k = turned; k < d; ++k) ok &= get(x, i, j, k) == get(before, i, j, k);
            for (int p = 0; p < turned / 2; ++p) {
                int k0 = interleaved ? 2 * p : p, k1 = interleaved ? 2 * p + 1 : p + turned / 2;
                double angle = (double)(pos0 + i * apart) * rates[p] * (inverse ? -1 : 1);
                double x0 = get(before, i, j, k0), x1 = get(before, i, j, k1);
                double y0 = by * (x0 * cos(angle) - x1 * sin(angle)),
                       y1 = by * (x0 * sin(angle) + x1 * cos(angle));
                double near = (fabs(x0) + fabs(x1)) * by * 4 * EPS_F32;
                if (!(fabs(get(x, i, j, k0) - y0) <= near + store_error(dtype, y0)) ||
                    !(fabs(get(x, i, j, k1) - y1) <= near + store_error(dtype, y1)))
                    ok = 0;
            }
        }
    CHECK_SAY(
        ok,
        "rope d %d, %s, layout %d, interleaved %d, inverse %d, position %lld in steps of %lld, dims %d, "
        "factor %g",
        d, upipe_dtype_name(dtype), layout, interleaved, inverse, (long long)pos0, (long long)pos_step, first,
        factor);
    CHECK(gaps_whole(x));
    /* the last two tokens alone, and all in another layout */
    late = twin(before);
    call.x = upipe_view_rows(late, 3, 2);
    call.pos0 = pos0 + 3 * apart;
    CHECK_OP(rope(c, &call));
    CHECK(same(upipe_view_rows(late, 3, 2), upipe_view_rows(x, 3, 2)));
    CHECK(same(upipe_view_rows(late, 0, 3), upipe_view_rows(before, 0, 3)));
    other = moved(before, before.dtype, (layout + 1) % LAYOUTS);
    call.x = other;
    call.pos0 = pos0;
    CHECK_OP(rope(c, &call));
    CHECK(same(other, x));
    buffers_free(0);
}

static inline void check_rope(test_rng *r, upipe_ctx *c)
{
    static const int64_t positions[] = {0, 61, 130, 4095, 1 << 23}, steps[] = {0, 1, 3, 1000};
    for (int pick = 0; pick < DIMS; ++pick) {
        if (dims[pick] % 2 != 0) continue;
        for (int which = 0; which < 4 * LAYOUTS; ++which)
            for (int dtype = 0; dtype < TYPES; ++dtype)
                for (int own = 0; own < 2; ++own)
                    check_rope_case(r, c, dims[pick], (upipe_dtype)dtype, which / 4, which & 1,
                                    which >> 1 & 1, positions[(which + dtype + pick) % 5],
                                    steps[(which / 2 + pick) % 4],
                                    own ? 2 + 2 * (which % (dims[pick] / 2)) : 0, own ? 1.2 : 0);
    }
}

/* Rates that are theta's, a factor of 1 and all dims: the bits of none. */
static inline void check_rope_defaults(test_rng *r, upipe_ctx *c)
{
    upipe_view x = tensor(r, UPIPE_F32, 5, 2, 64, PACKED, 1), other = twin(x);
    upipe_rope call = rope_of(x, (1 << 23) - 2, 0, 0);
    double rates[32];
    for (int p = 0; p < 32; ++p) rates[p] = pow(10000, -2.0 * p / 64);
    CHECK_OP(rope(c, &call));
    call.x = other;
    call.theta = 0;
    call.rates = rates;
    call.factor = 1;
    call.dims = 64;
    CHECK_OP(rope(c, &call));
    CHECK(same(x, other));
    buffers_free(0);
}

/* cos and sin themselves, times a factor, which pairs of 1 and 0 become: to a rounding and an angle's error in f64, at
 * any position. */
static inline void check_rope_angle(test_rng *r, upipe_ctx *c)
{
    static const int64_t starts[] = {1, 4000, 1000000, (1 << 23) - 512};
    enum { PAIRS = 64, TOKENS = 512 };
    for (int pick = 0; pick < 4; ++pick) {
        upipe_view x = tensor(r, UPIPE_F32, TOKENS, 1, 2 * PAIRS, PACKED, 1);
        upipe_rope call = rope_of(x, starts[pick], 0, 0);
        const long double factor = pick % 2 ? (long double)1.2 : 1;
        double worst = 0, rates[PAIRS];
        for (int64_t i = 0; i < TOKENS * 2 * PAIRS; ++i) ((float *)x.data)[i] = i % (2 * PAIRS) < PAIRS;
        for (int p = 0; p < PAIRS; ++p) rates[p] = pow(10000, -p / 64.0) * (1 - 1e-4 * test_below(r, 1000));
        call.rates = rates;
        call.factor = pick % 2 ? 1.2 : 0;
        CHECK_OP(rope(c, &call));
        for (int i = 0; i < TOKENS; ++i)
            for (int p = 0; p < PAIRS; ++p) {
                const long double angle = (long double)rates[p] * (long double)(starts[pick] + i);
                const long double want[2] = {factor * cosl(angle), factor * sinl(angle)};
                for (int k = 0; k < 2; ++k) {
                    const double off = fabs((double)((long double)get(x, i, 0, p + k * PAIRS) - want[k]));
                    worst = fmax(worst, fabsl(want[k]) > 1
                                            ? off / 2
                                            : off); /* in (1, 2) a float's place is twice as wide */
                }
            }
        CHECK_SAY(worst <= 3.3e-8, "cos or sin off by %g from position %lld", worst, (long long)starts[pick]);
        buffers_free(0);
    }
}

/* Blocks share the positions; inverse is the transpose, so it undoes the turn and keeps inner products. */
static inline void check_rope_blocks(test_rng *r, upipe_ctx *c)
{
    for (int interleaved = 0; interleaved < 2; ++interleaved) {
        upipe_view all = tensor(r, UPIPE_F32, 12, 2, 36, PACKED, 1), before = twin(all), single = twin(all);
        upipe_view back;
        upipe_rope call = rope_of(upipe_view_rows(all, 0, 3), 100, interleaved, 0);
        double left = 0, right = 0, size = 0;
        call.count = 3;
        call.step = 4 * all.n_stride; /* three tokens of every four */
        CHECK_OP(rope(c, &call));
        for (int i = 0; i < 3; ++i) {
            upipe_rope one = rope_of(upipe_view_rows(single, 4 * i, 3), 100, interleaved, 0);
            CHECK_OP(rope(c, &one));
            CHECK(same(upipe_view_rows(all, 4 * i + 3, 1), upipe_view_rows(before, 4 * i + 3, 1)));
        }
        CHECK(same(all, single));
        back = twin(all);
        call.x = upipe_view_rows(back, 0, 3);
        call.inverse = 1;
        CHECK_OP(rope(c, &call));
        for (int i = 0; i < 3; ++i)
            for (int j = 0; j < 2; ++j)
                for (int k = 0; k < 36; ++k)
                    CHECK(fabs(get(back, i, j, k) - get(before, i, j, k)) <= 32 * EPS_F32);
        /* <R x, y> = <x, R' y> with y = the block of the next tokens as they were */
        memcpy(back.data, before.data, view_bytes(back));
        call.x = upipe_view_rows(back, 6, 3);
        call.count = 1;
        CHECK_OP(rope(c, &call));
        for (int i = 0; i < 3; ++i)
            for (int j = 0; j < 2; ++j)
                for (int k = 0; k < 36; ++k) {
                    left += get(all, i, j, k) * get(before, 6 + i, j, k);
                    right += get(before, i, j, k) * get(back, 6 + i, j, k);
                    size += fabs(get(all, i, j, k) * get(before, 6 + i, j, k));
                }
        CHECK_SAY(fabs(left - right) <= 16 * EPS_F32 * size, "<Rx,y> = %.9g, <x,R'y> = %.9g", left, right);
        buffers_free(0);
    }
}

/* ---- rmsnorm ---- */

static inline void norm_f64(double *y, const double *x, const float *weight, double eps, int d)
{
    double sum = 0, scale;
    for (int k = 0; k < d; ++k) sum += x[k] * x[k];
    scale = 1 / sqrt(sum / d + eps);
    for (int k = 0; k < d; ++k) y[k] = x[k] * scale * (double)weight[k];
}

static inline void check_rmsnorm(test_rng *r, upipe_ctx *c, int d, upipe_dtype dtype, int layout)
{
    const float eps = 1e-5f;
    upipe_view x = tensor(r, dtype, 4, 3, d, layout, 1), before = twin(x),
               other = moved(x, x.dtype, (layout + 1) % LAYOUTS);
    const float *weight = normals(r, d);
    double row[256], want[256];
    int ok = 1;
    CHECK_OP(rmsnorm(c, x, x, weight, eps));
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 3; ++j) {
            for (int k = 0; k < d; ++k) row[k] = get(before, i, j, k);
            norm_f64(want, row, weight, (double)eps, d);
            for (int k = 0; k < d; ++k) {
                double near = fabs(want[k]) * (8 + d / 8.0) * EPS_F32 + store_error(dtype, want[k]);
                if (!(fabs(get(x, i, j, k) - want[k]) <= near)) ok = 0;
            }
        }
    CHECK_SAY(ok, "rmsnorm d %d, %s, layout %d", d, upipe_dtype_name(dtype), layout);
    CHECK(gaps_whole(x));
    CHECK_OP(rmsnorm(c, other, other, weight, eps));
    CHECK(same(other, x));
    buffers_free(0);
}

/* Loss sum of dy * y of one row, in f64. */
static inline double norm_loss(const double *dy, const double *x, const double *weight, double eps, int d)
{
    double sum = 0, loss = 0;
    for (int k = 0; k < d; ++k) sum += x[k] * x[k];
    for (int k = 0; k < d; ++k) loss += dy[k] * x[k] * weight[k];
    return loss / sqrt(sum / d + eps);
}

static inline void check_rmsnorm_bwd(test_rng *r, upipe_ctx *c, int d, upipe_dtype dy_type,
                                     upipe_dtype x_type, int layout)
{
    const float eps = 1e-5f;
    const double step = 1e-4;
    enum { TOKENS = 4, HEADS = 2 };
    upipe_view x = tensor(r, x_type, TOKENS, HEADS, d, layout, 1),
               dy = tensor(r, dy_type, TOKENS, HEADS, d, layout, 1);
    upipe_view x_before = twin(x), before = twin(dy), other;
    size_t weights = (size_t)(HEADS * d);
    float *weight = normals(r, d), *dweight = normals(r, HEADS * d);
    float *dweight2 = (float *)copy_of(dweight, weights * sizeof *dweight);
    double weight64[256], grad_x[256], grad_y[256], want_weight[2 * 256], size_weight[2 * 256];
    int ok = 1, ok_weight = 1;
    for (int k = 0; k < d; ++k) weight64[k] = (double)weight[k];
    for (int k = 0; k < HEADS * d; ++k) {
        want_weight[k] = (double)dweight[k];
        size_weight[k] = fabs(want_weight[k]) + 1;
    }
    CHECK_OP(rmsnorm_bwd(c, dy, dy, x, weight, eps, dweight, 0));
    for (int i = 0; i < TOKENS; ++i)
        for (int j = 0; j < HEADS; ++j) {
            double square = 0, bound = 0;
            for (int k = 0; k < d; ++k) {
                grad_x[k] = get(x, i, j, k);
                grad_y[k] = get(before, i, j, k);
                square += grad_x[k] * grad_x[k];
                bound += fabs(grad_y[k] * weight64[k]);
            }
            bound = (bound + 1) / sqrt(square / d + (double)eps);
            for (int k = 0; k < d; ++k) {
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
    for (int k = 0; k < HEADS * d; ++k)
        if (!(fabs((double)dweight[k] - want_weight[k]) <= size_weight[k] * (16 + d / 8.0) * EPS_F32))
            ok_weight = 0;
    CHECK_SAY(ok, "rmsnorm_bwd dx: d %d, %s, %s, layout %d", d, upipe_dtype_name(dy_type),
              upipe_dtype_name(x_type), layout);
    CHECK_SAY(ok_weight, "rmsnorm_bwd dgain: d %d, %s, %s, layout %d", d, upipe_dtype_name(dy_type),
              upipe_dtype_name(x_type), layout);
    CHECK(gaps_whole(dy));
    CHECK_BYTES(x.data, x_before.data, view_bytes(x));
    /* in another layout: the same bits */
    other = moved(before, before.dtype, (layout + 2) % LAYOUTS);
    CHECK_OP(rmsnorm_bwd(c, other, other, x, weight, eps, dweight2, 0));
    CHECK(same(other, dy));
    CHECK_BYTES(dweight2, dweight, weights * sizeof *dweight);
    buffers_free(0);
}

/* In two calls, of which the second begins between two partial sums: the same bits as in one. */
static inline void check_rmsnorm_bwd_sums(test_rng *r, upipe_ctx *c, int d, upipe_dtype dtype, int heads)
{
    enum { TOKENS = 2 * UPIPE_SUM_ROWS + 5 };
    upipe_view x = tensor(r, dtype, TOKENS, heads, d, PACKED, 1),
               dy = tensor(r, dtype, TOKENS, heads, d, PACKED, 1);
    upipe_view halves = twin(dy);
    size_t weights = (size_t)(heads * d);
    const float *weight = normals(r, d);
    float *whole = floats(heads * d), *sums = floats(heads * d);
    CHECK_OP(rmsnorm_bwd(c, dy, dy, x, weight, 1e-5f, whole, 0));
    for (int first = 0; first < TOKENS; first += UPIPE_SUM_ROWS) {
        int n = TOKENS - first < UPIPE_SUM_ROWS ? TOKENS - first : UPIPE_SUM_ROWS;
        upipe_view part = upipe_view_rows(halves, first, n);
        CHECK_OP(rmsnorm_bwd(c, part, part, upipe_view_rows(x, first, n), weight, 1e-5f, sums, 0));
    }
    CHECK_BYTES(halves.data, dy.data, view_bytes(dy));
    CHECK_BYTES(sums, whole, weights * sizeof *whole);
    buffers_free(0);
}

/* Wherever the result goes, and whatever its type, it is the f32 result of the call in place, rounded. */
static inline void check_rmsnorm_places(test_rng *r, upipe_ctx *c, int d, int layout)
{
    const float eps = 1e-5f;
    enum { TOKENS = 3, HEADS = 2 };
    upipe_view x = tensor(r, UPIPE_F32, TOKENS, HEADS, d, layout, 1), keep_x = twin(x), norm = twin(x);
    upipe_view dy = tensor(r, UPIPE_F32, TOKENS, HEADS, d, (layout + 1) % LAYOUTS, 1), keep_dy = twin(dy);
    upipe_view grad = twin(dy), as_x = twin(x), old = tensor(r, UPIPE_F32, TOKENS, HEADS, d, layout, 1);
    size_t weights = (size_t)(HEADS * d);
    const float *weight = normals(r, d);
    float *dweight = floats(HEADS * d), *dweight2 = floats(HEADS * d);
    CHECK_OP(rmsnorm(c, norm, norm, weight, eps));
    CHECK_OP(rmsnorm_bwd(c, grad, grad, x, weight, eps, dweight, 0));
    CHECK_OP(rmsnorm_bwd(c, as_x, dy, as_x, weight, eps, dweight2, 0));
    CHECK(same(as_x, grad));
    CHECK_BYTES(dweight2, dweight, weights * sizeof *dweight);
    for (int to = 0; to < TYPES; ++to) {
        upipe_dtype dtype = (upipe_dtype)to;
        upipe_view y = empty(dtype, TOKENS, HEADS, d, (layout + 2) % LAYOUTS), dx = twin(y), sum = twin(y);
        int ok_y = 1, ok_dx = 1, ok_sum = 1;
        CHECK_OP(cast(c, sum, old));
        CHECK_OP(rmsnorm(c, y, x, weight, eps));
        CHECK_OP(rmsnorm_bwd(c, dx, dy, x, weight, eps, NULL, 0));
        memset(dweight2, 0, weights * sizeof *dweight2);
        CHECK_OP(rmsnorm_bwd(c, sum, dy, x, weight, eps, dweight2, 1));
        CHECK_BYTES(dweight2, dweight, weights * sizeof *dweight);
        for (int i = 0; i < TOKENS; ++i)
            for (int j = 0; j < HEADS; ++j)
                for (int k = 0; k < d; ++k) {
                    float one[2];
                    volatile float want;
                    one[0] = (float)get(norm, i, j, k);
                    one[1] = (float)get(grad, i, j, k);
                    want = (float)get(old, i, j, k);
                    want = naive_store(dtype, want);
                    want = want + one[1];
                    want = naive_store(dtype, want);
                    one[0] = naive_store(dtype, one[0]);
                    one[1] = naive_store(dtype, one[1]);
                    if ((float)get(y, i, j, k) != one[0]) ok_y = 0;
                    if ((float)get(dx, i, j, k) != one[1]) ok_dx = 0;
                    if ((float)get(sum, i, j, k) != want) ok_sum = 0;
                }
        CHECK_SAY(ok_y && ok_dx && ok_sum, "rmsnorm into %s, d %d, layout %d: y %d, dx %d, dx += %d",
                  upipe_dtype_name(dtype), d, layout, ok_y, ok_dx, ok_sum);
        CHECK(gaps_whole(y) && gaps_whole(dx) && gaps_whole(sum));
    }
    CHECK_BYTES(x.data, keep_x.data, view_bytes(x));
    CHECK_BYTES(dy.data, keep_dy.data, view_bytes(dy));
    buffers_free(0);
}

/* ---- rowdot, sum ---- */

static inline void check_rowdot(test_rng *r, upipe_ctx *c, int d, upipe_dtype a_type, upipe_dtype b_type,
                                int layout)
{
    upipe_view a = tensor(r, a_type, 4, 3, d, layout, 1),
               b = tensor(r, b_type, 4, 3, d, (layout + 1) % LAYOUTS, 1);
    upipe_view out = empty(UPIPE_F32, 4, 3, 1, layout), again = empty(UPIPE_F32, 4, 3, 1, PACKED);
    upipe_view a2 = moved(a, a.dtype, PACKED), b2 = moved(b, b.dtype, PACKED);
    int ok = 1;
    CHECK_OP(rowdot(c, out, a, b));
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 3; ++j) {
            double want = 0, size = 0;
            for (int k = 0; k < d; ++k) {
                want += get(a, i, j, k) * get(b, i, j, k);
                size += fabs(get(a, i, j, k) * get(b, i, j, k));
            }
            if (!(fabs(get(out, i, j, 0) - want) <= size * (d + 4) * EPS_F32)) ok = 0;
        }
    CHECK_SAY(ok, "rowdot d %d, %s . %s, layout %d", d, upipe_dtype_name(a_type), upipe_dtype_name(b_type),
              layout);
    CHECK(gaps_whole(out));
    CHECK_OP(rowdot(c, again, a2, b2));
    CHECK(same(again, out));
    buffers_free(0);
}

/* Bitwise: the chain of additions is exactly defined. */
static inline void check_sum(test_rng *r, upipe_ctx *c, int d, upipe_dtype dtype, int layout, int count,
                             int accumulate)
{
    enum { TOKENS = 3, HEADS = 2 };
    int64_t each = (int64_t)TOKENS * HEADS * d, step = each + 3;
    size_t bytes = (size_t)(count > 0 ? (count - 1) * step + each : 0) * sizeof(float);
    float *src = (float *)buffer(bytes);
    upipe_view dst = tensor(r, dtype, TOKENS, HEADS, d, layout, 1), before = twin(dst);
    int ok = 1;
    for (int part = 0; part < count; ++part)
        for (size_t at = 0; at < (size_t)each; ++at) src[(size_t)(part * step) + at] = (float)test_normal(r);
    CHECK_OP(sum(c, dst, src, step, count, accumulate));
    for (int i = 0; i < TOKENS; ++i)
        for (int j = 0; j < HEADS; ++j)
            for (int k = 0; k < d; ++k) {
                volatile float sum = accumulate ? (float)get(before, i, j, k) : 0.0f;
                for (int part = 0; part < count; ++part)
                    sum = sum + src[part * step + (i * HEADS + j) * d + k];
                if ((float)get(dst, i, j, k) != naive_store(dtype, sum)) ok = 0;
            }
    CHECK_SAY(ok, "sum of %d, d %d, %s, layout %d, accumulate %d", count, d, upipe_dtype_name(dtype), layout,
              accumulate);
    CHECK(gaps_whole(dst));
    buffers_free(0);
}

/* ---- refusals ---- */

static inline void check_row_statuses(upipe_ctx *c)
{
    float buf[64];
    upipe_view x = upipe_view_packed(buf, UPIPE_F32, 2, 2, 8), v;
    const upipe_view far = upipe_view_packed(buf + 32, UPIPE_F32, 2, 2, 8);
    const upipe_view one = upipe_view_packed(buf, UPIPE_F32, 2, 2, 1);
    static const double bad_rates[] = {1, NAN, 0, -1};
    upipe_rope r;
    memset(buf, 0, sizeof buf);
#define WITH(change)                 (v = x, (change), v) /* x with one thing changed */
#define REFUSED(call, status, words) CHECK_REFUSED(c->ops->call, UPIPE_ERR_##status, c->err, words)
#define ROPE(change)                 rope(c, (r = rope_of(x, 0, 0, 0), (change), &r))
    REFUSED(cast(c, x, WITH(v.d = 7)), ARG, "src is [2][2][7], not [2][2][8]");
    REFUSED(cast(c, WITH(v.data = NULL), x), ARG, "dst is NULL");
    REFUSED(cast(c, WITH(v.dtype = (upipe_dtype)5), x), UNSUPPORTED, "storage type 5");
    REFUSED(cast(c, WITH(v.h = 0), x), ARG, "[2][0][8]");
    v = x;
    v.n = 0;
    v.data = NULL;
    CHECK_OP(cast(c, v, v));

    REFUSED(ROPE(r.x.d = 7), ARG, "head dim 7");
    REFUSED(ROPE(r.x.d = 258), UNSUPPORTED, "head dim 258");
    REFUSED(ROPE(r.theta = 0), ARG, "theta 0");
    REFUSED(ROPE(r.dims = 3), ARG, "3 dims of a head dim 8");
    REFUSED(ROPE(r.dims = -2), ARG, "-2 dims of a head dim 8");
    REFUSED(ROPE(r.dims = 10), ARG, "10 dims of a head dim 8");
    REFUSED(ROPE(r.factor = -1), ARG, "factor -1");
    REFUSED(ROPE(r.factor = NAN), ARG, "factor nan");
    REFUSED(ROPE(r.factor = INFINITY), ARG, "factor inf");
    REFUSED(ROPE(r.rates = bad_rates), ARG, "rate 1 is nan");
    REFUSED(ROPE((r.rates = bad_rates + 2, r.dims = 4)), ARG, "rate 1 is -1");
    CHECK_OP(ROPE((r.rates = bad_rates + 2, r.dims = 2, r.theta = 0, r.count = 0)));
    REFUSED(ROPE(r.pos0 = -1), ARG, "position -1");
    REFUSED(ROPE(r.pos_step = -3), ARG, "in steps of -3");
    REFUSED(ROPE(r.count = -2), ARG, "-2 blocks");
    CHECK_OP(ROPE(r.count = 0));

    REFUSED(rmsnorm(c, x, x, NULL, 1e-5f), ARG, "norm weight is NULL");
    REFUSED(rmsnorm(c, x, x, buf, -1), ARG, "eps -1");
    REFUSED(rmsnorm(c, WITH(v.n = 1), x, buf, 1e-5f), ARG, "y is [1][2][8], not [2][2][8]");
    REFUSED(rmsnorm_bwd(c, x, x, WITH(v.n = 1), buf, 1e-5f, buf, 0), ARG, "x is [1][2][8], not [2][2][8]");
    REFUSED(rmsnorm_bwd(c, WITH(v.n = 1), x, x, buf, 1e-5f, buf, 0), ARG, "dx is [1][2][8], not [2][2][8]");
    REFUSED(rmsnorm(c, WITH(v.dtype = UPIPE_BF16), x, buf, 1e-5f), ARG,
            "y (bf16, strides 16, 8) lies over x (f32, strides 16, 8)");
    REFUSED(rmsnorm_bwd(c, WITH(v.n_stride = 20), x, x, buf, 1e-5f, NULL, 0), ARG,
            "dx (f32, strides 20, 8) lies over dy (f32, strides 16, 8)");
    REFUSED(rmsnorm_bwd(c, x, x, far, buf, 1e-5f, NULL, 1), ARG, "dx, which accumulates, is dy");
    REFUSED(rmsnorm_bwd(c, x, far, x, buf, 1e-5f, NULL, 1), ARG, "dx, which accumulates, is x");
    REFUSED(rmsnorm_bwd(c, x, x, far, NULL, 1e-5f, NULL, 0), ARG, "norm weight is NULL");
    REFUSED(rmsnorm_bwd(c, x, x, far, buf, NAN, NULL, 0), ARG, "eps nan");

    REFUSED(rowdot(c, x, x, x), ARG, "out is [2][2][8], not [2][2][1]");
    REFUSED(rowdot(c, (v = one, v.dtype = UPIPE_BF16, v), x, x), ARG, "out is bf16");

    REFUSED(sum(c, WITH(v.dtype = UPIPE_BF16), buf, 0, 1, 1), UNSUPPORTED, "accumulates into f32 only");
    REFUSED(sum(c, x, NULL, 0, 1, 0), ARG, "src is NULL");
    REFUSED(sum(c, x, buf, 0, -1, 0), ARG, "-1 terms");
#undef WITH
#undef REFUSED
#undef ROPE
}

static inline void check_rows(test_rng *r, upipe_ctx *c)
{
    const int all = TYPES;
    check_bytes(c);
    check_rounding(c);
    check_cast(r, c);
    check_rope(r, c);
    check_rope_defaults(r, c);
    check_rope_angle(r, c);
    check_rope_blocks(r, c);
    for (int pick = 0; pick < DIMS; ++pick)
        for (int which = 0; which < all * all * LAYOUTS; ++which) {
            int d = dims[pick], layout = which / (all * all);
            upipe_dtype one = (upipe_dtype)(which % all), two = (upipe_dtype)(which / all % all);
            if (two == UPIPE_F32) check_rmsnorm(r, c, d, one, layout);
            check_rmsnorm_bwd(r, c, d, one, two, layout);
            check_rowdot(r, c, d, one, two, layout);
            check_sum(r, c, d, one, layout, (which + pick) % 5, one == UPIPE_F32 && two == UPIPE_BF16);
        }
    for (int pick = 0; pick < DIMS; ++pick)
        for (int which = 0; which < LAYOUTS; ++which) check_rmsnorm_places(r, c, dims[pick], which);
    check_rmsnorm_places(r, c, 5003, PACKED);
    check_rmsnorm_bwd_sums(r, c, 40, UPIPE_F32, 2);
    check_rmsnorm_bwd_sums(r, c, 8, UPIPE_BF16, 11); /* more heads than one item holds */
}

#endif

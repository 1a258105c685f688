/* upipe_cuda_rope.h -- rotary position embedding
 *
 * Fills the table's rope.
 *
 *     upi_cuda_rope(&ctx, &r)      x [count][tokens][heads][d], in place; angles once for eight heads
 */
#ifndef UPIPE_CUDA_ROPE_H
#define UPIPE_CUDA_ROPE_H

#include "upipe_cuda_rows.h"

enum { UPI_ROPE_HEADS = 8 }; /* heads that share one computation of angles */

/* Turns a position of each pair: the fraction of a circle, times 2^64. */
typedef struct upi_rope_turns {
    uint64_t turns[UPIPE_ROPE_DIM_MAX / 2];
} upi_rope_turns;

typedef struct upi_rope_job {
    upipe_view x;
    int64_t count, step, pos0, pos_step, pairs;
    int64_t groups, teams;    /* groups of heads; teams = count * tokens * groups */
    float factor, factor_low; /* in two parts */
    int shift, vec, interleaved, inverse;
} upi_rope_job;

/* cos and sin of an angle, times a factor, within 0.53 of an f32's last place. Without f64, which some devices have at
 * a 64th of the rate of f32.
 *
 * A product with a position is whole circles and a fraction, of which 64 bits keep the fraction: nothing is lost. What
 * is left of it beside a quarter of a circle is two floats, in radians; the terms that count in a result's last place
 * have two parts too. The polynomials are Taylor's, to 2e-10 within an eighth of a circle.
 */
UPI_DEVICE void upi_rope_angle(uint64_t phase, float factor, float factor_low, float *cosine, float *sine)
{
    const uint32_t q = (uint32_t)((phase + ((uint64_t)1 << 61)) >> 62);
    const int64_t rest = (int64_t)(phase - ((uint64_t)q << 62));
    /* 31 bits and the sign, 31 bits behind them; the first float has 24 */
    const int32_t high = (int32_t)(rest >> 31), low = (int32_t)(rest & 0x7fffffff);
    const float x = (float)high, x_low = (float)((high - (int32_t)x) * (1 << 25) + low / 64) * 0x1p-25f;
    const float unit = 0x1.921fb6p-31f, unit_low = -0x1.777a5cp-56f; /* 2 pi / 2^33 */
    const float a = upi_product(x, unit);
    const float a_low = fmaf(x, unit, -a) + fmaf(x, unit_low, x_low * unit);
    const float aa = a * a, aa_low = fmaf(2 * a, a_low, fmaf(a, a, -aa));
    const float aaa = aa * a, aaa_low = fmaf(aa_low, a, fmaf(aa, a_low, fmaf(aa, a, -aaa)));
    const float sixth = -0x1.555556p-3f, sixth_low = 0x1.555556p-28f; /* -1/6 */
    const float t = upi_product(aaa, sixth);
    float s, s_low, c, c_low;
    s_low = fmaf(aa, -1.0f / 39916800, 1.0f / 362880);
    s_low = fmaf(aa, s_low, -1.0f / 5040);
    s_low = fmaf(aa, s_low, 1.0f / 120);
    s_low = fmaf(aaa * aa, s_low, a_low);
    s_low += fmaf(aaa_low, sixth, fmaf(aaa, sixth_low, fmaf(aaa, sixth, -t)));
    s = a + t;
    s_low += t - (s - a);
    c_low = fmaf(aa, -1.0f / 3628800, 1.0f / 40320);
    c_low = fmaf(aa, c_low, -1.0f / 720);
    c_low = fmaf(aa, c_low, 1.0f / 24);
    c = fmaf(aa, -0.5f, 1.0f);
    c_low = fmaf(aa * aa, c_low, fmaf(aa_low, fmaf(aa, 1.0f / 12, -0.5f), fmaf(aa, -0.5f, 1.0f - c)));
    s = fmaf(s, factor, fmaf(s, factor_low, s_low * factor));
    c = fmaf(c, factor, fmaf(c, factor_low, c_low * factor));
    *cosine = q == 0 ? c : q == 1 ? -s : q == 2 ? -c : s;
    *sine = q == 0 ? s : q == 1 ? c : q == 2 ? -s : -c;
}

/* Pairs (x, y) by the angles of eight pairs. */
UPI_DEVICE void upi_rope_turn(const upi_numbers &cosine, const upi_numbers &sine, upi_numbers *x,
                              upi_numbers *y)
{
    int l;
    UPI_UNROLL
    for (l = 0; l < UPI_EIGHT; ++l) {
        float x0 = x->v[l], y0 = y->v[l];
        x->v[l] = fmaf(x0, cosine.v[l], -upi_product(y0, sine.v[l]));
        y->v[l] = fmaf(x0, sine.v[l], upi_product(y0, cosine.v[l]));
    }
}

/* A team has one token of one block and up to eight of its heads, a thread eight of the pairs. */
template <int TYPES> UPI_KERNEL(256, 1) void upi_rope_rows(upi_rope_job g, upi_rope_turns f)
{
    int64_t pairs = g.pairs, p = (threadIdx.x & ((1u << g.shift) - 1)) * UPI_EIGHT;
    int64_t per = UPI_BLOCK >> g.shift, team = blockIdx.x * per + (threadIdx.x >> g.shift);
    for (; team < g.teams && p < pairs; team += gridDim.x * per) {
        int64_t group = team % g.groups, row = team / g.groups, token = row % g.x.n, block = row / g.x.n;
        int64_t head = group * UPI_ROPE_HEADS, last = head + UPI_ROPE_HEADS;
        upi_numbers cosine, sine;
        int l;
        UPI_UNROLL
        for (l = 0; l < UPI_EIGHT; ++l) {
            uint64_t turns = p + l < pairs ? f.turns[p + l] : 0;
            upi_rope_angle((uint64_t)(g.pos0 + token * g.pos_step) * turns, g.factor, g.factor_low,
                           &cosine.v[l], &sine.v[l]);
            if (g.inverse) sine.v[l] = -sine.v[l];
        }
        if (last > g.x.h) last = g.x.h;
        for (; head < last; ++head) {
            char *at = upi_row_at(g.x, token, head) + block * g.step * (TYPES == UPI_ALL_F32 ? 4 : 2);
            if (g.interleaved) {
                upi_numbers a = upi_get<TYPES>(at, g.x.dtype, 2 * p, 2 * pairs, g.vec);
                upi_numbers b = upi_get<TYPES>(at, g.x.dtype, 2 * p + UPI_EIGHT, 2 * pairs, g.vec), x, y;
                UPI_UNROLL
                for (l = 0; l < UPI_EIGHT; ++l) {
                    x.v[l] = l < 4 ? a.v[2 * l % 8] : b.v[2 * l % 8];
                    y.v[l] = l < 4 ? a.v[2 * l % 8 + 1] : b.v[2 * l % 8 + 1];
                }
                upi_rope_turn(cosine, sine, &x, &y);
                UPI_UNROLL
                for (l = 0; l < UPI_EIGHT; ++l) {
                    a.v[l] = l % 2 ? y.v[l / 2] : x.v[l / 2];
                    b.v[l] = l % 2 ? y.v[4 + l / 2] : x.v[4 + l / 2];
                }
                upi_put<TYPES>(at, g.x.dtype, 2 * p, 2 * pairs, g.vec, a);
                upi_put<TYPES>(at, g.x.dtype, 2 * p + UPI_EIGHT, 2 * pairs, g.vec, b);
            } else {
                char *half = at + pairs * (TYPES == UPI_ALL_F32 ? 4 : 2);
                upi_numbers x = upi_get<TYPES>(at, g.x.dtype, p, pairs, g.vec);
                upi_numbers y = upi_get<TYPES>(half, g.x.dtype, p, pairs, g.vec);
                upi_rope_turn(cosine, sine, &x, &y);
                upi_put<TYPES>(at, g.x.dtype, p, pairs, g.vec, x);
                upi_put<TYPES>(half, g.x.dtype, p, pairs, g.vec, y);
            }
        }
    }
}

UPIPE_API upipe_status upi_cuda_rope(upipe_ctx *c, const upipe_rope *r)
{
    upi_rope_turns f;
    upi_rope_job g;
    upi_span s;
    double factor;
    int p, turned, pairs;
    UPIPE_TRY(upi_check_rope(c, r));
    turned = r->dims > 0 ? r->dims : r->x.d;
    pairs = turned / 2;
    factor = r->factor > 0 ? r->factor : 1;
    if (r->count == 0 || r->x.n == 0) return UPIPE_OK;
    memset(&f, 0, sizeof f);
    for (p = 0; p < pairs; ++p) {
        const double rate = r->rates != NULL ? r->rates[p] : pow(r->theta, -2.0 * p / turned);
        f.turns[p] = (uint64_t)(fmod(rate / 6.283185307179586477, 1) * 0x1p64);
    }
    s = upi_span_of(&r->x, 1, 0);
    g.x = r->x;
    g.count = r->count;
    g.step = r->step;
    g.pos0 = r->pos0;
    g.pos_step = r->pos_step > 0 ? r->pos_step : 1;
    g.pairs = pairs;
    g.factor = (float)factor;
    g.factor_low = (float)(factor - (double)g.factor);
    g.groups = (r->x.h + UPI_ROPE_HEADS - 1) / UPI_ROPE_HEADS;
    g.teams = g.count * g.x.n * g.groups;
    g.interleaved = r->interleaved;
    g.inverse = r->inverse;
    g.vec = s.vec && (r->count == 1 || r->step * (int64_t)upipe_dtype_bytes(r->x.dtype) % 16 == 0) &&
            (r->interleaved || pairs * (int64_t)upipe_dtype_bytes(r->x.dtype) % 16 == 0);
    for (g.shift = 0; UPI_EIGHT << g.shift < pairs; ++g.shift) {
    }
    s.shift = g.shift;
    s.teams = g.teams;
    return r->x.dtype == UPIPE_F32
               ? UPI_LAUNCH(c, (upi_rope_rows<UPI_ALL_F32>), upi_span_grid(c, s), UPI_BLOCK, 0, g, f)
               : UPI_LAUNCH(c, (upi_rope_rows<UPI_ALL_BF16>), upi_span_grid(c, s), UPI_BLOCK, 0, g, f);
}

#endif

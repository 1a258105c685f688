/* linear_rows.h -- what the convolution and the gates of linear attention promise, on any place: values and gradients against
 *                  f64; bits over cuts, packed documents, layouts and y over x; types; sums that are added to
 *
 *     upipe_cpu_linear(&rules);             of linear.h
 *     check_conv_drawn(c, 40);              draws; c: a context whose calls the rules take
 *     check_conv_long(c, 24700);            tokens: more than a launch has
 *     check_gates(c, 16500);                likewise
 */
#ifndef UPIPE_TEST_LINEAR_ROWS_H
#define UPIPE_TEST_LINEAR_ROWS_H

#include "upipe/upipe_linear.h"

#include "linear.h"

/* ---- the convolution ---- */

/* Inputs and results, f32, packed, on the list of memory.h. dafter becomes the gradient of before. */
typedef struct conv {
    int64_t n, pos;
    int channels, taps;
    upipe_borders borders;
    float *x, *before, *weight, *dy, *dafter; /* inputs */
    float *y, *after, *dx, *dbefore, *dweight;
} conv;

enum {
    CONV_INPUTS = 5,
    CONV_RESULTS = 5,
    CONV_BITS = 4
}; /* results before the last one have their bits wherever it is cut */

static const char *const conv_names[CONV_RESULTS] = {"y", "after", "dx", "dbefore", "dweight"};

static inline float **conv_field(conv *x, int i)
{
    float **const fields[CONV_INPUTS + CONV_RESULTS] = {&x->x,       &x->before, &x->weight, &x->dy,
                                                        &x->dafter,  &x->y,      &x->after,  &x->dx,
                                                        &x->dbefore, &x->dweight};
    return fields[i];
}

static inline int64_t conv_count(const conv *x, int i)
{
    const int64_t rows = x->n * x->channels, state = (int64_t)(x->taps - 1) * x->channels,
                  weights = (int64_t)x->channels * x->taps;
    const int64_t counts[CONV_INPUTS + CONV_RESULTS] = {rows, state, weights, rows,  state,
                                                        rows, state, rows,    state, weights};
    return counts[i];
}

static inline void conv_draw(conv *x, test_rng *r)
{
    for (int i = 0; i < CONV_INPUTS + CONV_RESULTS; ++i) *conv_field(x, i) = floats(conv_count(x, i));
    for (int i = 0; i < CONV_INPUTS; ++i)
        for (int64_t j = 0; j < conv_count(x, i); ++j) (*conv_field(x, i))[j] = (float)test_normal(r);
}

/* The same inputs, results of its own. */
static inline conv conv_twin(conv *x)
{
    conv y = *x;
    for (int i = CONV_INPUTS; i < CONV_INPUTS + CONV_RESULTS; ++i)
        *conv_field(&y, i) = floats(conv_count(&y, i));
    return y;
}

/* Rows before row t that its document has. */
static inline int conv_reach(const conv *x, int64_t t)
{
    for (int r = 0; r < x->taps - 1; ++r)
        for (int64_t i = 0; x->borders.cu_seqlens != NULL && i <= x->borders.cu_seqlens_n; ++i)
            if (x->borders.cu_seqlens[i] == x->pos + t - r) return r;
    return x->taps - 1;
}

static inline double conv_x(const conv *x, int64_t t, int channel)
{
    return (double)(t < 0 ? x->before[(t + x->taps - 1) * x->channels + channel]
                          : x->x[t * x->channels + channel]);
}

/* Results in f64, all gradients added to zeros. */
static inline void conv_oracle(const conv *x, double **out)
{
    const int K = x->taps, C = x->channels;
    for (int i = 0; i < CONV_RESULTS; ++i)
        out[i] = (double *)zeroed((size_t)conv_count(x, CONV_INPUTS + i) * 8);
#define GRADIENT(t) (*((t) < 0 ? out[3] + ((t) + K - 1) * C + c : out[2] + (t)*C + c))
    for (int64_t j = 0; j < K - 1; ++j)
        for (int c = 0; c < C; ++c) {
            const int64_t t = x->n - (K - 1) + j;
            out[1][j * C + c] = conv_x(x, t, c);
            GRADIENT(t) += (double)x->dafter[j * C + c];
        }
    for (int64_t t = 0; t < x->n; ++t) {
        const int reach = conv_reach(x, t);
        for (int c = 0; c < C; ++c) {
            double sum = 0, s, ds;
            for (int j = 0; j <= reach; ++j)
                sum += (double)x->weight[c * K + K - 1 - j] * conv_x(x, t - j, c);
            s = 1 / (1 + exp(-sum));
            out[0][t * C + c] = sum * s;
            ds = (double)x->dy[t * C + c] * s * (1 + sum * (1 - s));
            for (int j = 0; j <= reach; ++j) {
                GRADIENT(t - j) += (double)x->weight[c * K + K - 1 - j] * ds;
                out[4][c * K + K - 1 - j] += ds * conv_x(x, t - j, c);
            }
        }
    }
#undef GRADIENT
}

/* How a call lies in memory: its type, elements between rows, y over x. */
typedef struct conv_place {
    upipe_dtype dtype;
    int gap, over;
} conv_place;

/* Rows [first, first + n) of packed f32, in the place's type and layout; NaNs where there are none. */
static inline upipe_view conv_rows(const conv *x, const float *from, int64_t first, int64_t n, conv_place at)
{
    const int64_t step = x->channels + at.gap;
    const upipe_view v = upipe_view_make(buffer((size_t)(n * step) * upipe_dtype_bytes(at.dtype)), at.dtype,
                                         n, step, 1, x->channels, x->channels);
    for (int64_t i = 0; from != NULL && i < n * x->channels; ++i)
        upipe_cpu_put(upipe_view_at(v, i / x->channels, 0), at.dtype, i % x->channels,
                      from[first * x->channels + i]);
    return v;
}

/* What was written, as f32; what lies between rows is whole. */
static inline void conv_read(const conv *x, float *to, int64_t first, upipe_view v, const char *name)
{
    int whole = 1;
    for (int64_t i = 0; i < v.n; ++i) {
        const char *row = (const char *)upipe_view_at(v, i, 0);
        for (int c = 0; c < x->channels; ++c)
            to[(first + i) * x->channels + c] = upipe_cpu_get(row, v.dtype, c);
        for (size_t e = (size_t)v.d * upipe_dtype_bytes(v.dtype);
             e < (size_t)v.n_stride * upipe_dtype_bytes(v.dtype); ++e)
            whole &= (unsigned char)row[e] == 0xff;
    }
    CHECK_SAY(whole, "%s: what lies between rows is written", name);
}

/* Forward and backward of rows [first, first + n). before, after, dafter: the states at its ends; dafter becomes that of
 * before. */
static inline void conv_part(conv *x, upipe_ctx *c, int64_t first, int64_t n, const float *before,
                             float *after, float *dafter, conv_place at)
{
    const conv_place wide = {UPIPE_F32, at.gap, 0};
    upipe_linear_conv_grad g;
    upipe_linear_conv *a = &g.a;
    memset(&g, 0, sizeof g);
    a->x = conv_rows(x, x->x, first, n, at);
    a->y = at.over ? a->x : conv_rows(x, NULL, 0, n, at);
    a->before = conv_rows(x, before, 0, x->taps - 1, wide);
    a->after = conv_rows(x, NULL, 0, x->taps - 1, wide);
    a->weight = x->weight;
    a->pos = x->pos + first;
    a->borders = x->borders;
    a->taps = x->taps;
    CHECK_STATUS(rules.conv(c, a), UPIPE_OK, c->err);
    conv_read(x, x->y, first, a->y, "y");
    conv_read(x, after, 0, a->after, "after");
    if (!at.over) {
        upipe_view none = a->after;
        upipe_view again = conv_rows(x, NULL, 0, n, at), y = a->y;
        none.data = NULL;
        a->after = none, a->y = again;
        CHECK_STATUS(rules.conv(c, a), UPIPE_OK, c->err);
        CHECK_BYTES(again.data, y.data, (size_t)(n * y.n_stride) * upipe_dtype_bytes(y.dtype));
    } else
        a->x = conv_rows(x, x->x, first, n, at);
    a->y.data = a->after.data = NULL; /* not accessed */
    g.dy = conv_rows(x, x->dy, first, n, at);
    g.dstate = conv_rows(x, dafter, 0, x->taps - 1, wide);
    g.dweight = x->dweight;
    CHECK_STATUS(rules.conv_bwd(c, &g), UPIPE_OK, c->err);
    conv_read(x, x->dx, first, g.dy, "dx");
    conv_read(x, dafter, 0, g.dstate, "dbefore");
}

/* In these parts, [0, cuts[0]), [cuts[0], cuts[1]) and so on, the last of them ends at n. */
static inline void conv_run(conv *x, upipe_ctx *c, const int64_t *cuts, int parts, conv_place at)
{
    const int64_t state = conv_count(x, 1);
    float *states = floats(state * (parts + 1)), *unused = floats(state);
    memcpy(states, x->before, (size_t)state * 4);
    memcpy(x->dbefore, x->dafter, (size_t)state * 4);
    for (int i = 1; i <= parts; ++i) /* what a forward of these parts makes, in plain C */
        for (int64_t j = 0; j < state; ++j) {
            const int64_t t = cuts[i - 1] - (x->taps - 1) + j / x->channels;
            states[i * state + j] = (float)conv_x(x, t, (int)(j % x->channels));
        }
    for (int i = parts - 1; i >= 0; --i) {
        const int64_t first = i > 0 ? cuts[i - 1] : 0;
        conv_part(x, c, first, cuts[i] - first, states + i * state, i == parts - 1 ? x->after : unused,
                  x->dbefore, at);
        CHECK_BYTES(i == parts - 1 ? x->after : unused, states + (i + 1) * state, state * 4);
    }
}

/* No result is further from f64 than 16 units in the last place of its largest number. */
static inline void conv_close(conv *x, const char *what)
{
    const double bound = 16 * 0x1p-23;
    double *want[CONV_RESULTS];
    conv_oracle(x, want);
    for (int i = 0; i < CONV_RESULTS; ++i) {
        double far = 0, most = 1e-30;
        for (int64_t j = 0; j < conv_count(x, CONV_INPUTS + i); ++j) {
            const double d = fabs((double)(*conv_field(x, CONV_INPUTS + i))[j] - want[i][j]);
            if (!(d <= far)) far = d;
            most = fmax(most, fabs(want[i][j]));
        }
        CHECK_SAY(far <= bound * most, "%s: %s is %.3g away of at most %.3g", what, conv_names[i], far, most);
    }
}

static inline void conv_same(conv *x, conv *y, int results, const char *what)
{
    for (int i = CONV_INPUTS; i < CONV_INPUTS + results; ++i)
        CHECK_SAY(memcmp(*conv_field(x, i), *conv_field(y, i), (size_t)conv_count(x, i) * 4) == 0,
                  "%s: %s has other bits", what, conv_names[i - CONV_INPUTS]);
}

/* bf16: the bits of f32 with the same inputs, rounded once. */
static inline void conv_types(conv *x, upipe_ctx *c, const char *what)
{
    conv y, z;
    for (int i = 0; i < CONV_INPUTS; ++i)
        for (int64_t j = 0; (i == 0 || i == 3) && j < conv_count(x, i); ++j) {
            uint16_t one;
            upipe_cpu_put(&one, UPIPE_BF16, 0, (*conv_field(x, i))[j]);
            (*conv_field(x, i))[j] = upipe_cpu_get(&one, UPIPE_BF16, 0);
        }
    y = conv_twin(x), z = conv_twin(x);
    conv_run(&y, c, &x->n, 1, (conv_place){UPIPE_F32, 0, 0});
    for (int way = 0; way < 3; ++way) {
        z = conv_twin(x);
        conv_run(&z, c, &x->n, 1, (conv_place){UPIPE_BF16, way == 2 ? 3 : 0, way == 1});
        for (int i = 0; i < CONV_INPUTS; i += 2) /* y and dx */
            for (int64_t j = 0; i < 4 && j < conv_count(&y, CONV_INPUTS + i); ++j) {
                uint16_t one;
                upipe_cpu_put(&one, UPIPE_BF16, 0, (*conv_field(&y, CONV_INPUTS + i))[j]);
                if (way == 0) (*conv_field(&y, CONV_INPUTS + i))[j] = upipe_cpu_get(&one, UPIPE_BF16, 0);
            }
        conv_same(&y, &z, CONV_RESULTS, what);
    }
}

/* Random shapes, whole, in parts, with y over x, with gaps between rows, and in bf16. */
static inline void check_conv_drawn(upipe_ctx *c, int draws)
{
    static const int widths[] = {1, 2, 3, 4, 6, 8, 31, 32, 70, 1029};
    static const int lengths[] = {1, 2, 5, 8, 63, 64, 65, 128, 150};
    test_rng r = {61};
    for (int i = 0; i < draws; ++i) {
        conv x = {.n = lengths[test_below(&r, 9)], .channels = widths[test_below(&r, i % 4 == 0 ? 10 : 9)]};
        int64_t cu[6], cuts[3];
        char what[120];
        conv y;
        x.taps = i % 3 == 0 ? 4 : 2 + test_below(&r, UPIPE_LINEAR_TAPS_MAX - 1);
        x.pos = test_below(&r, 20);
        for (int j = 0; j < 6; ++j) cu[j] = j == 0 ? test_below(&r, 24) : cu[j - 1] + test_below(&r, 40);
        if (i % 2) x.borders = (upipe_borders){cu, 5};
        for (int j = 0; j < 3; ++j)
            cuts[j] = j == 2 ? x.n : (j > 0 ? cuts[0] : 0) + test_below(&r, (int)x.n / 2 + 1);
        snprintf(what, sizeof what, "%lld tokens of %d channels, %d taps%s", (long long)x.n, x.channels,
                 x.taps, x.borders.cu_seqlens != NULL ? ", borders" : "");
        conv_draw(&x, &r);
        conv_run(&x, c, &x.n, 1, (conv_place){UPIPE_F32, 0, 0});
        conv_close(&x, what);
        for (int way = 0; way < 2; ++way) {
            y = conv_twin(&x);
            conv_run(&y, c, &y.n, 1, (conv_place){UPIPE_F32, way ? 3 : 4, !way});
            conv_same(&x, &y, CONV_RESULTS, what);
        }
        y = conv_twin(&x);
        conv_run(&y, c, cuts, 3, (conv_place){UPIPE_F32, 0, i % 2});
        conv_same(&x, &y, CONV_BITS, what);
        conv_types(&x, c, what);
        buffers_free(0);
    }
}

/* So many tokens, with documents; sums are added to what is there. */
static inline void check_conv_long(upipe_ctx *c, int64_t tokens)
{
    test_rng r = {67};
    for (int taps = 4; taps <= UPIPE_LINEAR_TAPS_MAX; taps += 4) {
        const int64_t cu[] = {5, tokens / 2, tokens / 2 + 2, tokens - 1};
        conv x = {.n = tokens, .channels = 3, .taps = taps, .borders = {cu, 3}}, y;
        conv_draw(&x, &r);
        conv_run(&x, c, &x.n, 1, (conv_place){UPIPE_F32, 0, 0});
        conv_close(&x, "many tokens");
        y = conv_twin(&x);
        conv_run(&y, c, &y.n, 1, (conv_place){UPIPE_F32, 1, 1});
        conv_same(&x, &y, CONV_RESULTS, "many tokens, y over x");
        for (int64_t j = 0; j < conv_count(&y, 9); ++j) y.dweight[j] = 1;
        conv_run(&y, c, &y.n, 1, (conv_place){UPIPE_F32, 0, 0});
        for (int64_t j = 0; j < conv_count(&y, 9); ++j) y.dweight[j] -= 1;
        conv_close(&y, "sums that begin with 1");
        buffers_free(0);
    }
}

/* ---- gates ---- */

/* Against f64, of which every element is a rounding; sums within 16 units of the last place of the length of their terms.
 * Values at the ends: nothing finite becomes a NaN. */
static inline void check_gates_of(upipe_ctx *c, test_rng *r, int64_t n, int heads, upipe_dtype t, int gap)
{
    static const float ends[] = {0, -0.0f, 1e-30f, -17, 17, -80, 80, -200, 200, 1e30f, -1e30f};
    const conv rows = {.channels = heads};
    const conv_place at = {t, gap, 0}, wide = {UPIPE_F32, gap, 0};
    float *in[4], *a_log = floats(heads), *dt_bias = floats(heads), *da_log = floats(heads),
                  *ddt_bias = floats(heads);
    float *out = floats(n * heads);
    double *sums = (double *)zeroed((size_t)heads * 4 * 8);
    upipe_linear_gates_grad g, flat;
    upipe_view *views[6] = {&g.gates.a, &g.gates.b, &g.dg, &g.dbeta, &g.gates.g, &g.gates.beta};
    memset(&g, 0, sizeof g);
    for (int i = 0; i < 4; ++i) {
        in[i] = floats(n * heads);
        for (int64_t j = 0; j < n * heads; ++j) {
            char one[4];
            in[i][j] = i < 2 && test_below(r, 5) == 0 ? ends[test_below(r, 11)] : (float)test_normal(r);
            if (i >= 2) continue;
            upipe_cpu_put(one, t, 0, in[i][j]);
            in[i][j] = upipe_cpu_get(one, t, 0);
        }
    }
    for (int h = 0; h < heads; ++h) {
        a_log[h] = (float)test_normal(r), dt_bias[h] = (float)test_normal(r);
        da_log[h] = 1, ddt_bias[h] = 2;
    }
    for (int i = 0; i < 6; ++i) *views[i] = conv_rows(&rows, i < 4 ? in[i] : NULL, 0, n, i < 2 ? at : wide);
    g.gates.a_log = a_log, g.gates.dt_bias = dt_bias, g.da_log = da_log, g.ddt_bias = ddt_bias;
    flat = g;
    for (int i = 0; i < 6; ++i) {
        upipe_view *v = views[i];
        v->h = heads, v->d = 1, v->h_stride = 1;
    }
    CHECK_STATUS(rules.gates(c, &g.gates), UPIPE_OK, c->err);
#define EACH(view, name, tiny, value)                                                                     \
    do {                                                                                                  \
        const double one = (view).dtype == UPIPE_F32 ? 0x1p-23 : 0x1p-8;                                  \
        conv_read(&rows, out, 0, (view), name);                                                           \
        for (int64_t j = 0; j < n * heads; ++j) {                                                         \
            const int h = (int)(j % heads);                                                               \
            const double z = (double)in[0][j] + (double)dt_bias[h], b = 1 / (1 + exp(-(double)in[1][j])), \
                         soft = fmax(z, 0) + log1p(exp(-fabs(z))), sigma = 1 / (1 + exp(-z)),             \
                         rate = -exp((double)a_log[h]), dg = (double)in[2][j], dbeta = (double)in[3][j];  \
            const double want = (value);                                                                  \
            (void)b, (void)soft, (void)sigma, (void)rate, (void)dg, (void)dbeta;                          \
            CHECK_SAY(fabs((double)out[j] - want) <= one * fabs(want) + (tiny),                           \
                      "%s of %g, %g is %g, not %g", name, (double)in[0][j], (double)in[1][j],             \
                      (double)out[j], want);                                                              \
        }                                                                                                 \
    } while (0)
    EACH(flat.gates.g, "g", 0x1p-149, rate * soft);
    EACH(flat.gates.beta, "beta", 0x1p-149, b);
    CHECK_STATUS(rules.gates_bwd(c, &g), UPIPE_OK, c->err);
    for (int64_t j = 0; j < n * heads; ++j) {
        const int h = (int)(j % heads);
        const double z = (double)in[0][j] + (double)dt_bias[h], rate = -exp((double)a_log[h]),
                     dg = (double)in[2][j];
        const double terms[2] = {dg * rate * (fmax(z, 0) + log1p(exp(-fabs(z)))), dg * rate / (1 + exp(-z))};
        for (int i = 0; i < 2; ++i) sums[4 * h + i] += terms[i], sums[4 * h + 2 + i] += terms[i] * terms[i];
    }
    for (int h = 0; h < heads; ++h)
        for (int i = 0; i < 2; ++i) {
            const double want = sums[4 * h + i] + 1 + i, got = (double)(i ? ddt_bias : da_log)[h];
            CHECK_SAY(fabs(got - want) <= 16 * 0x1p-23 * (fabs(want) + sqrt(sums[4 * h + 2 + i])),
                      "%s of head %d is %g, not %g", i ? "ddt_bias" : "da_log", h, got, want);
        }
    EACH(flat.gates.a, "da", 0x1p-126, dg * rate * sigma);
    EACH(flat.gates.b, "db", 0x1p-126, dbeta * b * (1 - b));
#undef EACH
    for (int i = 0; i < 2; ++i) *views[i] = conv_rows(&rows, in[i], 0, n, at);
    for (int i = 0; i < 2; ++i) views[i]->h = heads, views[i]->d = 1, views[i]->h_stride = 1;
    g.da_log = g.ddt_bias = NULL;
    CHECK_STATUS(rules.gates_bwd(c, &g), UPIPE_OK, c->err);
    for (int i = 0; i < 2; ++i) {
        upipe_view again = *views[i], first = i ? flat.gates.b : flat.gates.a;
        CHECK_BYTES(again.data, first.data, (size_t)(n * again.n_stride) * upipe_dtype_bytes(t));
    }
}

static inline void check_gates(upipe_ctx *c, int64_t tokens)
{
    static const int64_t lengths[] = {1, 15, 64, 65, 200};
    static const int heads[] = {1, 2, 5, 33};
    test_rng r = {71};
    for (int i = 0; i < 20; ++i) {
        check_gates_of(c, &r, lengths[i % 5], heads[i / 5], i % 3 ? UPIPE_F32 : UPIPE_BF16, i % 2 * 3);
        buffers_free(0);
    }
    for (int t = 0; tokens > 0 && t < 2; ++t) {
        check_gates_of(c, &r, tokens, 2, t ? UPIPE_BF16 : UPIPE_F32, 0);
        buffers_free(0);
    }
}

#endif

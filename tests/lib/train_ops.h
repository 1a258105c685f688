/* train_ops.h -- checks of a table's operations around attention: against f64 and against differences, bits
 *                against steps, places and split calls, values at the ends of the range
 *
 * Tensors lie in exact allocations with gaps full of NaNs: a gap that is read shows in a result, one that is
 * written shows in the guard check, and the sanitizer sees the rest. They lie in host memory: the table of a
 * device is wrapped (cuda/staged.h). Closeness is tolerance.h's rule; the yardsticks are plain f32 loops, and
 * the f64 gradients are themselves held against central differences.
 *
 *     check_train_ops(&rng, c, 32003);     c->ops: the table; the most columns of logits
 *     check_train_statuses(c);             refusals; c->ops: the table itself, as no memory is touched
 */
#ifndef UPIPE_TEST_TRAIN_OPS_H
#define UPIPE_TEST_TRAIN_OPS_H

#include "test.h"
#include "oracle.h"
#include "tolerance.h"

#include "upipe/upipe_ops.h"
#include "upipe/cpu/upipe_cpu_simd.h"

/* Storage types that the table supports: UPIPE_F32 .. */
static int types(const upipe_ctx *c)
{
    return c->ops->f16 ? 3 : 2;
}

/* ---- tensors with gaps ---- */

enum { PACKED, HEADS_INNER, HEADS_OUTER, LAYOUTS };

static const int dims[] = {1, 7, 8, 9, 16, 63, 200};
enum { DIMS = (int)(sizeof dims / sizeof *dims) };

static size_t view_bytes(upipe_view v)
{
    int64_t last = (v.n - 1) * v.n_step + (v.h - 1) * v.h_step + v.d;
    return v.n > 0 ? (size_t)last * upipe_dtype_bytes(v.dtype) : 0;
}

static float get(upipe_view v, int64_t i, int j, int64_t k)
{
    return upipe_cpu_get(upipe_view_at(v, i, j), v.dtype, k);
}

/* Element at of a view, counted row by row. */
static float get_at(upipe_view v, int64_t at)
{
    return get(v, at / v.d / v.h, (int)(at / v.d % v.h), at % v.d);
}

static void put_at(upipe_view v, int64_t at, double x)
{
    upipe_cpu_put(upipe_view_at(v, at / v.d / v.h, (int32_t)(at / v.d % v.h)), v.dtype, at % v.d, (float)x);
}

static int64_t elements(upipe_view v)
{
    return v.n * v.h * v.d;
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
    v.data = malloc(view_bytes(v) + 1);
    memset(v.data, 0xff, view_bytes(v) + 1);
    return v;
}

static upipe_view tensor(test_rng *r, upipe_dtype dtype, int64_t n, int h, int d, int layout, double size)
{
    upipe_view v = empty(dtype, n, h, d, layout);
    int64_t at;
    for (at = 0; at < elements(v); ++at) put_at(v, at, size * test_normal(r));
    return v;
}

static upipe_view twin(upipe_view v)
{
    void *data = malloc(view_bytes(v) + 1);
    memcpy(data, v.data, view_bytes(v));
    v.data = data;
    return v;
}

/* The same elements, as far as the type holds them, in another layout. */
static upipe_view moved(upipe_view v, upipe_dtype dtype, int layout)
{
    upipe_view to = empty(dtype, v.n, v.h, v.d, layout);
    int64_t at;
    for (at = 0; at < elements(v); ++at) put_at(to, at, (double)get_at(v, at));
    return to;
}

/* Equal bits, element by element. */
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

/* narrow holds what wide, an f32 view, rounds to. */
static int same_rounded(upipe_view narrow, upipe_view wide)
{
    int64_t at;
    for (at = 0; at < elements(wide); ++at)
        if (get_at(narrow, at) != naive_store(narrow.dtype, get_at(wide, at))) return 0;
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

/* ---- a result, its truth and the yardsticks ---- */

typedef struct judged {
    float *got, *naive[NAIVE_WAYS];
    double *want;
    int64_t n;
} judged;

static judged judge_begin(int64_t n)
{
    judged t;
    int way;
    t.n = n;
    t.got = (float *)malloc((size_t)n * sizeof *t.got + 1);
    t.want = (double *)malloc((size_t)n * sizeof *t.want + 1);
    for (way = 0; way < NAIVE_WAYS; ++way) t.naive[way] = (float *)malloc((size_t)n * sizeof *t.got + 1);
    return t;
}

static void judge_end(judged *t)
{
    int way;
    free(t->got);
    free(t->want);
    for (way = 0; way < NAIVE_WAYS; ++way) free(t->naive[way]);
}

static void judge(judged *t, upipe_view got, const char *name)
{
    const float *naive[NAIVE_WAYS];
    int64_t at;
    int way;
    for (way = 0; way < NAIVE_WAYS; ++way) naive[way] = t->naive[way];
    for (at = 0; at < t->n; ++at) t->got[at] = get_at(got, at);
    CHECK_CLOSE(t->got, naive, NAIVE_WAYS, t->want, t->n, name);
}

/* slope is the derivative that a central difference of two values shows. */
static int is_slope(double slope, double up, double down, double step)
{
    return fabs((up - down) / (2 * step) - slope) <= 1e-7 * (1 + fabs(slope));
}

/* ---- rmsnorm over whole tokens: rows too long for test_rows.c's bounds ---- */

static double norm_scale64(const float *x, double eps, int d)
{
    double sum = 0;
    int k;
    for (k = 0; k < d; ++k) sum += (double)x[k] * (double)x[k];
    return 1 / sqrt(sum / d + eps);
}

static double norm_loss64(const float *dy, const float *x, const float *weight, double eps, int d, int at,
                          double step)
{
    double sum = 0, loss = 0;
    int k;
    for (k = 0; k < d; ++k) {
        double xk = (double)x[k] + (k == at ? step : 0);
        sum += xk * xk;
        loss += (double)dy[k] * xk * (double)weight[k];
    }
    return loss / sqrt(sum / d + eps);
}

static void check_rmsnorm(test_rng *r, upipe_ctx *c, int d)
{
    const double eps = 1e-5, step = 1e-5;
    enum { TOKENS = 3 };
    upipe_view x = tensor(r, UPIPE_F32, TOKENS, 1, d, PACKED, 1), y = empty(UPIPE_F32, TOKENS, 1, d, PACKED);
    upipe_view dy = tensor(r, UPIPE_F32, TOKENS, 1, d, PACKED, 1), dx = twin(y);
    upipe_view weight = tensor(r, UPIPE_F32, 1, 1, d, PACKED, 1), dweight = twin(weight);
    const float *g = (const float *)weight.data;
    judged ty = judge_begin(elements(x)), tx = judge_begin(elements(x)), tg = judge_begin(d);
    int i, k, way, ok = 1;
    memset(dweight.data, 0, view_bytes(dweight));
    for (k = 0; k < d; ++k) {
        tg.want[k] = 0;
        for (way = 0; way < NAIVE_WAYS; ++way) tg.naive[way][k] = 0;
    }
    for (i = 0; i < TOKENS; ++i) {
        const float *row = (const float *)upipe_view_at(x, i, 0),
                    *grad_y = (const float *)upipe_view_at(dy, i, 0);
        double scale = norm_scale64(row, eps, d), mean = 0;
        for (k = 0; k < d; ++k) mean += (double)grad_y[k] * (double)g[k] * (double)row[k] * scale / d;
        for (k = 0; k < d; ++k) {
            double unit = (double)row[k] * scale;
            ty.want[i * d + k] = unit * (double)g[k];
            tx.want[i * d + k] = scale * ((double)grad_y[k] * (double)g[k] - unit * mean);
            tg.want[k] += (double)grad_y[k] * unit;
        }
        for (k = 0; k < d; k += 1 + d / 40)
            if (!is_slope(tx.want[i * d + k], norm_loss64(grad_y, row, g, eps, d, k, step),
                          norm_loss64(grad_y, row, g, eps, d, k, -step), step))
                ok = 0;
        for (way = 0; way < NAIVE_WAYS; ++way) {
            float s = 1 / sqrtf(naive_dot(row, row, d, way) / (float)d + (float)eps), m = 0;
            for (k = 0; k < d; ++k) {
                int64_t at = naive_term(k, d, way);
                m = naive_add(m, grad_y[at] * g[at], row[at] * s, way);
            }
            for (k = 0; k < d; ++k) {
                float unit = row[k] * s;
                ty.naive[way][i * d + k] = unit * g[k];
                tx.naive[way][i * d + k] = s * naive_add(grad_y[k] * g[k], -unit, m / (float)d, way);
                tg.naive[way][k] = naive_add(tg.naive[way][k], grad_y[k], unit, way);
            }
        }
    }
    CHECK_SAY(ok, "rmsnorm's f64 gradient is not its slope, d %d", d);
    CHECK_STATUS(c->ops->rmsnorm(c, y, x, g, (float)eps), UPIPE_OK, c->err);
    CHECK_STATUS(c->ops->rmsnorm_bwd(c, dx, dy, x, g, (float)eps, (float *)dweight.data, 0), UPIPE_OK,
                 c->err);
    judge(&ty, y, "rmsnorm y");
    judge(&tx, dx, "rmsnorm dx");
    judge(&tg, dweight, "rmsnorm dgain");
    judge_end(&ty);
    judge_end(&tx);
    judge_end(&tg);
    free(x.data);
    free(y.data);
    free(dy.data);
    free(dx.data);
    free(weight.data);
    free(dweight.data);
}

/* ---- add ---- */

static void check_add(test_rng *r, upipe_ctx *c, int d, upipe_dtype y_type, upipe_dtype x_type, int layout)
{
    upipe_view y = tensor(r, y_type, 4, 2, d, layout, 1),
               x = tensor(r, x_type, 4, 2, d, (layout + 1) % LAYOUTS, 1);
    upipe_view before = twin(y), keep = twin(x), other = moved(y, y_type, (layout + 2) % LAYOUTS);
    upipe_view twice = twin(y);
    int64_t at;
    int i, ok = 1, ok_twice = 1;
    CHECK_STATUS(c->ops->add(c, y, x), UPIPE_OK, c->err);
    CHECK_STATUS(c->ops->add(c, twice, twice), UPIPE_OK, c->err);
    for (at = 0; at < elements(y); ++at) {
        volatile float sum = get_at(before, at) + get_at(x, at);
        if (get_at(y, at) != naive_store(y_type, sum)) ok = 0;
        if (get_at(twice, at) != 2 * get_at(before, at)) ok_twice = 0;
    }
    CHECK_SAY(ok && ok_twice, "add %s to %s, d %d, layout %d: %d, to itself %d", upipe_dtype_name(x_type),
              upipe_dtype_name(y_type), d, layout, ok, ok_twice);
    CHECK(gaps_whole(y) && gaps_whole(twice));
    CHECK_BYTES(x.data, keep.data, view_bytes(x));
    for (i = 0; i < 2; ++i)
        CHECK_STATUS(c->ops->add(c, upipe_view_rows(other, i, 1 + 2 * i), upipe_view_rows(x, i, 1 + 2 * i)),
                     UPIPE_OK, c->err);
    CHECK(same(other, y));
    free(y.data);
    free(x.data);
    free(before.data);
    free(keep.data);
    free(other.data);
    free(twice.data);
}

/* ---- swiglu ---- */

static double swiglu64(double g, double u)
{
    return g / (1 + exp(-g)) * u;
}

/* d swiglu / d gate */
static double swiglu_slope64(double g, double u)
{
    double s = 1 / (1 + exp(-g));
    return u * s * (1 + g * (1 - s));
}

static void check_swiglu(test_rng *r, upipe_ctx *c, int d, upipe_dtype y_type, upipe_dtype g_type,
                         upipe_dtype u_type, int layout)
{
    const double step = 1e-5;
    upipe_view gate = tensor(r, g_type, 4, 2, d, layout, 4), up = tensor(r, u_type, 4, 2, d, PACKED, 1);
    upipe_view dy = tensor(r, y_type, 4, 2, d, (layout + 1) % LAYOUTS, 1), y = empty(y_type, 4, 2, d, layout);
    upipe_view dgate = twin(gate), dup = twin(up), keep = twin(dy), y2 = empty(y_type, 4, 2, d, HEADS_INNER);
    upipe_view gate2 = moved(gate, g_type, (layout + 2) % LAYOUTS), up2 = moved(up, u_type, HEADS_OUTER);
    judged t = judge_begin(elements(y)), tg = judge_begin(elements(y)), tu = judge_begin(elements(y));
    int64_t at;
    int i, way, ok = 1;
    for (at = 0; at < t.n; ++at) {
        float g = get_at(gate, at), u = get_at(up, at), o = get_at(dy, at), s = 1 / (1 + expf(-g));
        double g64 = (double)g, u64 = (double)u, o64 = (double)o;
        t.want[at] = swiglu64(g64, u64);
        tg.want[at] = o64 * swiglu_slope64(g64, u64);
        tu.want[at] = o64 * swiglu64(g64, 1);
        if (!is_slope(swiglu_slope64(g64, u64), swiglu64(g64 + step, u64), swiglu64(g64 - step, u64), step))
            ok = 0;
        for (way = 0; way < NAIVE_WAYS; ++way) {
            t.naive[way][at] = naive_store(y_type, g / (1 + expf(-g)) * u);
            tg.naive[way][at] = naive_store(g_type, o * u * s * naive_add(1, g, 1 - s, way));
            tu.naive[way][at] = naive_store(u_type, o * g * s);
        }
    }
    CHECK_SAY(ok, "swiglu's f64 gradient is not its slope, d %d", d);
    CHECK_STATUS(c->ops->swiglu(c, y, gate, up), UPIPE_OK, c->err);
    CHECK(same(gate, dgate) && same(up, dup));
    CHECK_STATUS(c->ops->swiglu_bwd(c, dgate, dup, dy), UPIPE_OK, c->err);
    judge(&t, y, "swiglu");
    judge(&tg, dgate, "swiglu dgate");
    judge(&tu, dup, "swiglu dup");
    CHECK(gaps_whole(y) && gaps_whole(dgate) && gaps_whole(dup));
    CHECK_BYTES(dy.data, keep.data, view_bytes(dy));
    /* in two calls and other layouts: the same bits */
    for (i = 0; i < 2; ++i) {
        upipe_view gi = upipe_view_rows(gate2, i, 1 + 2 * i), ui = upipe_view_rows(up2, i, 1 + 2 * i);
        CHECK_STATUS(c->ops->swiglu(c, upipe_view_rows(y2, i, 1 + 2 * i), gi, ui), UPIPE_OK, c->err);
        CHECK_STATUS(c->ops->swiglu_bwd(c, gi, ui, upipe_view_rows(dy, i, 1 + 2 * i)), UPIPE_OK, c->err);
    }
    CHECK(same(y2, y) && same(gate2, dgate) && same(up2, dup));
    /* in place */
    if (g_type == y_type) {
        CHECK_STATUS(c->ops->swiglu(c, gate, gate, up), UPIPE_OK, c->err);
        CHECK(same(gate, y) && gaps_whole(gate));
    } else if (u_type == y_type) {
        CHECK_STATUS(c->ops->swiglu(c, up, gate, up), UPIPE_OK, c->err);
        CHECK(same(up, y) && gaps_whole(up));
    }
    judge_end(&t);
    judge_end(&tg);
    judge_end(&tu);
    free(gate.data);
    free(up.data);
    free(dy.data);
    free(y.data);
    free(dgate.data);
    free(dup.data);
    free(keep.data);
    free(y2.data);
    free(gate2.data);
    free(up2.data);
}

/* Far gates: nothing finite becomes infinite, what is 0 in f64 is 0, and a NaN stays one. */
static void check_swiglu_ends(upipe_ctx *c)
{
    static const float gates[] = {0,      1e-30f, -1e-30f, 17,  -17,  80,    -80,   87,    -87,
                                  88.05f, -88.1f, 89,      -89, 1e4f, -1e4f, 3e38f, -3e38f};
    enum { COUNT = (int)(sizeof gates / sizeof *gates) };
    float y[COUNT], gate[COUNT], up[COUNT], dy[COUNT];
    upipe_view vy = upipe_view_packed(y, UPIPE_F32, 1, 1, COUNT), vg = vy, vu = vy, vd = vy;
    int i, which;
    vg.data = gate;
    vu.data = up;
    vd.data = dy;
    memcpy(gate, gates, sizeof gate);
    for (i = 0; i < COUNT; ++i) {
        up[i] = 1;
        dy[i] = i % 2 ? -1.0f : 1.0f;
    }
    CHECK_STATUS(c->ops->swiglu(c, vy, vg, vu), UPIPE_OK, c->err);
    CHECK_STATUS(c->ops->swiglu_bwd(c, vg, vu, vd), UPIPE_OK, c->err);
    for (i = 0; i < COUNT; ++i) {
        double g = (double)gates[i], value = swiglu64(g, 1), slope = swiglu_slope64(g, 1);
        double near = 4e-7 + (fabs(g) < 100 ? 1.2e-7 * fabs(g) : 0), sign = (double)dy[i];
        CHECK_SAY(fabs((double)y[i] - value) <= near * fabs(value) + 1e-36, "silu(%g) = %g, not %g", g,
                  (double)y[i], value);
        CHECK_SAY(fabs((double)gate[i] - sign * slope) <= near * fabs(slope) + 1e-36,
                  "silu'(%g) = %g, not %g", g, (double)gate[i], sign * slope);
        CHECK_SAY(fabs((double)up[i] - sign * value) <= near * fabs(value) + 1e-36, "dup at %g is %g, not %g",
                  g, (double)up[i], sign * value);
    }
    /* one NaN at a time: gate, up, dy */
    for (which = 0; which < 3; ++which) {
        for (i = 0; i < COUNT; ++i) gate[i] = up[i] = dy[i] = 1;
        if (which == 0) gate[5] = NAN;
        if (which == 1) up[5] = NAN;
        if (which == 2) dy[5] = NAN;
        CHECK_STATUS(c->ops->swiglu(c, vy, vg, vu), UPIPE_OK, c->err);
        CHECK_STATUS(c->ops->swiglu_bwd(c, vg, vu, vd), UPIPE_OK, c->err);
        CHECK_INT(isnan(y[5]) != 0, which != 2);
        CHECK(isnan(gate[5]));
        CHECK_INT(isnan(up[5]) != 0, which != 1);
        CHECK(!isnan(y[4]) && !isnan(gate[4]) && !isnan(up[4]) && !isnan(y[6]) && !isnan(gate[6]));
    }
}

/* ---- cross entropy ---- */

static double loss64(const double *x, int64_t v, int64_t target)
{
    double top = -INFINITY, others = 0;
    int64_t k;
    for (k = 0; k < v; ++k) top = x[k] > top ? x[k] : top;
    for (k = 0; k < v; ++k)
        if (k != target) others += exp(x[k] - top);
    return x[target] == top ? log1p(others) : log(others + exp(x[target] - top)) + (top - x[target]);
}

static void grad64(double *grad, const double *x, int64_t v, int64_t target)
{
    double top = -INFINITY, others = 0, sum;
    int64_t k;
    for (k = 0; k < v; ++k) top = x[k] > top ? x[k] : top;
    for (k = 0; k < v; ++k)
        if (k != target) others += exp(x[k] - top);
    sum = others + exp(x[target] - top);
    for (k = 0; k < v; ++k) grad[k] = exp(x[k] - top) / sum;
    grad[target] = -others / sum;
}

static void naive_loss(float *loss, float *grad, const float *x, int64_t v, int64_t target, float scale,
                       int way)
{
    float top = -INFINITY, sum = 0;
    int64_t k;
    for (k = 0; k < v; ++k) top = x[k] > top ? x[k] : top;
    for (k = 0; k < v; ++k) sum += expf(x[naive_term(k, v, way)] - top);
    *loss = logf(sum) + top - x[target];
    for (k = 0; k < v; ++k) grad[k] = scale * (expf(x[k] - top) / sum - (k == target ? 1.0f : 0.0f));
}

enum { CE_ROWS = 8 };

/* Rows of all kinds. Row 0 and 1 normal, 2 all equal, 3 spread over +-1e4, 4 with -inf, 5 sure of its target,
 * 6 ignored, 7 normal. */
static void ce_fill(test_rng *r, upipe_view logits, int32_t *targets)
{
    int64_t i;
    int k, v = logits.d;
    for (i = 0; i < CE_ROWS; ++i) {
        targets[i] = i == 6 ? -1 - test_below(r, 100) : test_below(r, v);
        for (k = 0; k < v; ++k) {
            double x = 3 * test_normal(r);
            if (i == 2) x = 7.25;
            if (i == 3) x = test_below(r, 3) * 1e4 - 1e4;
            if (i == 4 && k != targets[i] && test_below(r, 2)) x = -INFINITY;
            if (i == 5 && k == targets[i]) x = 12;
            put_at(logits, i * v + k, x);
        }
    }
    targets[1] = v - 1;
    if (v > 1) targets[7] = v / 2;
}

static upipe_status cross_entropy(upipe_ctx *c, upipe_view logits, upipe_view grad, float *loss,
                                  const int32_t *targets, float scale)
{
    upipe_cross_entropy x;
    memset(&x, 0, sizeof x);
    x.logits = logits;
    x.grad = grad;
    x.loss = loss;
    x.targets = targets;
    x.scale = scale;
    return c->ops->cross_entropy(c, &x);
}

static void check_cross_entropy(test_rng *r, upipe_ctx *c, int v, upipe_dtype narrow_type, float scale)
{
    upipe_view logits = empty(UPIPE_F32, CE_ROWS, 1, v, HEADS_OUTER), in_place, again, halves, none, keep;
    upipe_view grad = empty(UPIPE_F32, CE_ROWS, 1, v, HEADS_INNER);
    upipe_view narrow = empty(narrow_type, CE_ROWS, 1, v, HEADS_INNER);
    float loss[CE_ROWS], loss2[CE_ROWS];
    int32_t targets[CE_ROWS];
    double *row = (double *)malloc((size_t)v * sizeof *row);
    upipe_view rows = upipe_view_packed(loss, UPIPE_F32, CE_ROWS, 1, 1);
    judged tl = judge_begin(CE_ROWS), tg = judge_begin(elements(logits)), tn = judge_begin(elements(logits));
    int i, k, way, ok = 1;
    memset(&none, 0, sizeof none);
    ce_fill(r, logits, targets);
    for (i = 0; i < CE_ROWS; ++i) {
        for (k = 0; k < v; ++k) row[k] = (double)get(logits, i, 0, k);
        tl.want[i] = targets[i] < 0 ? 0 : loss64(row, v, targets[i]);
        memset(tg.want + i * v, 0, (size_t)v * sizeof *tg.want);
        if (targets[i] >= 0) grad64(tg.want + i * v, row, v, targets[i]);
        for (k = 0; targets[i] >= 0 && k < v; k += 1 + v / 50) {
            double old = row[k], step = 1e-5, up, down;
            if (isinf(old) || (i == 3 && v > 1))
                continue; /* the loss of row 3 has but 11 digits after the point */
            row[k] = old + step;
            up = loss64(row, v, targets[i]);
            row[k] = old - step;
            down = loss64(row, v, targets[i]);
            row[k] = old;
            if (!is_slope(tg.want[i * v + k], up, down, step)) ok = 0;
        }
        for (way = 0; way < NAIVE_WAYS; ++way) {
            tl.naive[way][i] = 0;
            memset(tg.naive[way] + i * v, 0, (size_t)v * sizeof(float));
            if (targets[i] >= 0)
                naive_loss(&tl.naive[way][i], tg.naive[way] + i * v,
                           (const float *)upipe_view_at(logits, i, 0), v, targets[i], scale, way);
        }
        for (k = 0; k < v; ++k) tg.want[i * v + k] *= (double)scale;
    }
    for (k = 0; k < CE_ROWS * v; ++k) {
        tn.want[k] = tg.want[k];
        for (way = 0; way < NAIVE_WAYS; ++way) tn.naive[way][k] = naive_store(narrow_type, tg.naive[way][k]);
    }
    CHECK_SAY(ok, "cross entropy's f64 gradient is not its slope, %d columns", v);
    in_place = twin(logits);
    again = twin(logits);
    halves = twin(logits);
    keep = twin(logits);
    CHECK_STATUS(cross_entropy(c, logits, grad, loss, targets, scale), UPIPE_OK, c->err);
    judge(&tl, rows, "cross entropy");
    judge(&tg, grad, "cross entropy's gradient");
    CHECK(gaps_whole(grad) && gaps_whole(logits) && same(logits, keep));
    CHECK(loss[6] == 0);
    for (k = 0; k < v; ++k) CHECK(get(grad, 6, 0, k) == 0);
    if (v == 1)
        for (i = 0; i < CE_ROWS; ++i) CHECK(loss[i] == 0 && get(grad, i, 0, 0) == 0);
    /* sure of its target: loss and gradient are small, and right to the last digits but few */
    CHECK_SAY(fabs((double)loss[5] - tl.want[5]) <= 4e-6 * tl.want[5] &&
                  fabs((double)get(grad, 5, 0, targets[5]) - tg.want[5 * v + targets[5]]) <=
                      4e-6 * fabs(tg.want[5 * v + targets[5]]),
              "%d columns, sure: loss %.9g, not %.9g; gradient %.9g, not %.9g", v, (double)loss[5],
              tl.want[5], (double)get(grad, 5, 0, targets[5]), tg.want[5 * v + targets[5]]);
    /* the gradient in place, narrow, none: the same numbers */
    CHECK_STATUS(cross_entropy(c, in_place, in_place, loss2, targets, scale), UPIPE_OK, c->err);
    CHECK(same(in_place, grad) && gaps_whole(in_place));
    CHECK_BYTES(loss2, loss, sizeof loss);
    memset(loss2, 0xff, sizeof loss2);
    CHECK_STATUS(cross_entropy(c, again, narrow, loss2, targets, scale), UPIPE_OK, c->err);
    CHECK(same_rounded(narrow, grad) && gaps_whole(narrow));
    judge(&tn, narrow, "cross entropy's narrow gradient");
    CHECK_BYTES(loss2, loss, sizeof loss);
    memset(loss2, 0xff, sizeof loss2);
    CHECK_STATUS(cross_entropy(c, again, none, loss2, targets, scale), UPIPE_OK, c->err);
    CHECK_BYTES(loss2, loss, sizeof loss);
    memset(loss2, 0xff, sizeof loss2);
    for (i = 0; i < 2; ++i) {
        upipe_view part = upipe_view_rows(halves, 3 * i, 3 + 2 * i);
        CHECK_STATUS(cross_entropy(c, part, part, loss2 + 3 * i, targets + 3 * i, scale), UPIPE_OK, c->err);
    }
    CHECK(same(halves, grad));
    CHECK_BYTES(loss2, loss, sizeof loss);
    judge_end(&tl);
    judge_end(&tg);
    judge_end(&tn);
    free(row);
    free(logits.data);
    free(in_place.data);
    free(again.data);
    free(halves.data);
    free(keep.data);
    free(grad.data);
    free(narrow.data);
}

/* A NaN, an infinite logit or nothing but -inf: the loss is a NaN, wherever it stands. A target of -inf costs
 * infinitely much. */
static void check_cross_entropy_ends(upipe_ctx *c)
{
    static const float spoils[] = {NAN, INFINITY};
    enum { COLUMNS = 21 };
    float logits[COLUMNS], grad[COLUMNS], loss;
    upipe_view x = upipe_view_packed(logits, UPIPE_F32, 1, 1, COLUMNS), g = x;
    int32_t target;
    int at, k, which;
    g.data = grad;
    for (which = 0; which < 2; ++which)
        for (at = 0; at < COLUMNS; ++at)
            for (target = 0; target < COLUMNS; target += 5) {
                for (k = 0; k < COLUMNS; ++k) logits[k] = (float)(k * 7 % 5);
                logits[at] = spoils[which];
                CHECK_STATUS(cross_entropy(c, x, g, &loss, &target, 1), UPIPE_OK, c->err);
                CHECK_SAY(isnan(loss) && isnan(grad[0]) && isnan(grad[COLUMNS - 1]) && isnan(grad[target]),
                          "a logit of %g in column %d, target %d: loss %g", (double)spoils[which], at,
                          (int)target, (double)loss);
            }
    target = 9;
    for (k = 0; k < COLUMNS; ++k) logits[k] = -INFINITY;
    CHECK_STATUS(cross_entropy(c, x, g, &loss, &target, 1), UPIPE_OK, c->err);
    CHECK(isnan(loss));
    logits[3] = -20000;
    CHECK_STATUS(cross_entropy(c, x, g, &loss, &target, 0.5f), UPIPE_OK, c->err);
    CHECK(isinf(loss) && loss > 0);
    for (k = 0; k < COLUMNS; ++k) CHECK(grad[k] == (k == 3 ? 0.5f : k == 9 ? -0.5f : 0.0f));
    target = 3;
    CHECK_STATUS(cross_entropy(c, x, g, &loss, &target, 1), UPIPE_OK, c->err);
    CHECK(loss == 0);
    for (k = 0; k < COLUMNS; ++k) CHECK(grad[k] == 0);
}

/* ---- embedding ---- */

static void check_embed(test_rng *r, upipe_ctx *c, int d, upipe_dtype x_type, upipe_dtype table_type,
                        int layout)
{
    enum { TOKENS = 9, VOCAB = 5 };
    upipe_view table = tensor(r, table_type, VOCAB, 1, d, layout, 1), keep = twin(table);
    upipe_view x = empty(x_type, TOKENS, 1, d, (layout + 1) % LAYOUTS);
    upipe_view dx = tensor(r, x_type, TOKENS, 1, d, layout, 1),
               grad = tensor(r, UPIPE_F32, VOCAB, 1, d, layout, 1);
    upipe_view grad2 = moved(grad, UPIPE_F32, PACKED), want = moved(grad, UPIPE_F32, PACKED);
    int32_t tokens[TOKENS];
    int i, k, ok = 1;
    for (i = 0; i < TOKENS; ++i) tokens[i] = i == 0 ? 0 : i == 1 ? VOCAB - 1 : test_below(r, VOCAB);
    CHECK_STATUS(c->ops->embed(c, x, table, tokens), UPIPE_OK, c->err);
    CHECK_STATUS(c->ops->embed_bwd(c, grad, dx, tokens), UPIPE_OK, c->err);
    CHECK_STATUS(c->ops->embed_bwd(c, grad2, upipe_view_rows(dx, 0, 4), tokens), UPIPE_OK, c->err);
    CHECK_STATUS(c->ops->embed_bwd(c, grad2, upipe_view_rows(dx, 4, TOKENS - 4), tokens + 4), UPIPE_OK,
                 c->err);
    for (i = 0; i < TOKENS; ++i)
        for (k = 0; k < d; ++k) {
            volatile float sum = get(want, tokens[i], 0, k) + get(dx, i, 0, k);
            if (get(x, i, 0, k) != naive_store(x_type, get(table, tokens[i], 0, k))) ok = 0;
            put_at(want, (int64_t)tokens[i] * d + k, (double)sum);
        }
    CHECK_SAY(ok, "embed %s from %s, d %d, layout %d", upipe_dtype_name(x_type), upipe_dtype_name(table_type),
              d, layout);
    CHECK_SAY(same(grad, want), "embed_bwd of %s, d %d, layout %d", upipe_dtype_name(x_type), d, layout);
    CHECK(same(grad2, grad));
    CHECK(gaps_whole(x) && gaps_whole(grad));
    CHECK_BYTES(table.data, keep.data, view_bytes(table));
    free(table.data);
    free(keep.data);
    free(x.data);
    free(dx.data);
    free(grad.data);
    free(grad2.data);
    free(want.data);
}

/* ---- the gradient of a bias ---- */

/* The sums to the bit: parts of UPIPE_SUM_ROWS tokens, each one chain, in order; the same for a call that is cut
 * between two parts. */
static void check_bias_bwd(test_rng *r, upipe_ctx *c, int d, upipe_dtype dtype, int layout)
{
    enum { HEADS = 3, MORE = 2 * UPIPE_SUM_ROWS + 5 };
    const int64_t n =
        d > 16 ? MORE : 9 * UPIPE_SUM_ROWS + 1; /* more parts than a block of a device sums at once */
    upipe_view dy = tensor(r, dtype, n, HEADS, d, layout, 1), keep = twin(dy);
    upipe_view got = tensor(r, UPIPE_F32, 1, HEADS, d, PACKED, 1), cut = twin(got), want = twin(got);
    int64_t i, k;
    for (k = 0; k < HEADS * d; ++k) {
        volatile float sum = get_at(want, k), part = 0;
        for (i = 0; i < n; ++i) {
            part = part + get(dy, i, (int)(k / d), k % d);
            if (i % UPIPE_SUM_ROWS != UPIPE_SUM_ROWS - 1 && i != n - 1) continue;
            sum = sum + part;
            part = 0;
        }
        put_at(want, k, (double)sum);
    }
    CHECK_STATUS(c->ops->bias_bwd(c, (float *)got.data, dy), UPIPE_OK, c->err);
    CHECK_STATUS(c->ops->bias_bwd(c, (float *)cut.data, upipe_view_rows(dy, 0, UPIPE_SUM_ROWS)), UPIPE_OK,
                 c->err);
    CHECK_STATUS(
        c->ops->bias_bwd(c, (float *)cut.data, upipe_view_rows(dy, UPIPE_SUM_ROWS, n - UPIPE_SUM_ROWS)),
        UPIPE_OK, c->err);
    CHECK_STATUS(c->ops->bias_bwd(c, (float *)cut.data, upipe_view_rows(dy, 0, 0)), UPIPE_OK, c->err);
    CHECK_SAY(same(got, want), "bias_bwd of %s, d %d, layout %d", upipe_dtype_name(dtype), d, layout);
    CHECK(same(cut, want));
    CHECK_BYTES(dy.data, keep.data, view_bytes(dy));
    free(dy.data);
    free(keep.data);
    free(got.data);
    free(cut.data);
    free(want.data);
}

/* A bias: one row of f32, added to all rows. */
static void check_bias(test_rng *r, upipe_ctx *c, int d, upipe_dtype dtype, int layout)
{
    upipe_view y = tensor(r, dtype, 5, 3, d, layout, 1), want = twin(y),
               b = tensor(r, UPIPE_F32, 1, 3, d, PACKED, 1);
    int64_t at;
    for (at = 0; at < elements(y); ++at) put_at(want, at, (double)(get_at(y, at) + get_at(b, at % (3 * d))));
    CHECK_STATUS(upipe_bias_add(c, y, (const float *)b.data, d), UPIPE_OK, c->err);
    CHECK_SAY(same(y, want), "bias of %s, d %d, layout %d", upipe_dtype_name(dtype), d, layout);
    free(y.data);
    free(want.data);
    free(b.data);
}

/* ---- total ---- */

static void check_total(test_rng *r, upipe_ctx *c, int d, upipe_dtype dtype, int layout)
{
    upipe_view x = tensor(r, dtype, 5, 3, d, layout, 1), other = moved(x, dtype, (layout + 1) % LAYOUTS), v;
    double got, again, want, size;
    int64_t at;
    int squares;
    for (squares = 0; squares < 2; ++squares) {
        want = size = 0;
        for (at = 0; at < elements(x); ++at) {
            double one = (double)get_at(x, at);
            one = squares ? one * one : one;
            want += one;
            size += fabs(one);
        }
        got = again = NAN;
        CHECK_STATUS(c->ops->total(c, &got, x, squares), UPIPE_OK, c->err);
        CHECK_STATUS(c->ops->total(c, &again, other, squares), UPIPE_OK, c->err);
        CHECK_SAY(fabs(got - want) <= 1e-15 * (double)elements(x) * size, "total %.17g, not %.17g", got,
                  want);
        CHECK_BYTES(&again, &got, sizeof got);
    }
    v = upipe_view_rows(x, 0, 0);
    CHECK_STATUS(c->ops->total(c, &got, v, 0), UPIPE_OK, c->err);
    CHECK(got == 0);
    put_at(x, elements(x) - 1, NAN);
    CHECK_STATUS(c->ops->total(c, &got, x, 1), UPIPE_OK, c->err);
    CHECK(isnan(got));
    free(x.data);
    free(other.data);
}

/* Numbers that f32 cannot add: 2^24 ones after 2^24, and the square of the greatest f32. */
static void check_total_range(upipe_ctx *c)
{
    float x[3] = {16777216, 1, 3e38f};
    double got;
    CHECK_STATUS(c->ops->total(c, &got, upipe_view_packed(x, UPIPE_F32, 1, 1, 2), 0), UPIPE_OK, c->err);
    CHECK(got == 16777217);
    CHECK_STATUS(c->ops->total(c, &got, upipe_view_packed(x, UPIPE_F32, 1, 1, 3), 1), UPIPE_OK, c->err);
    CHECK(fabs(got / 9e76 - 1) < 1e-6);
}

/* ---- adamw ---- */

static upipe_adamw adamw_of(int64_t n, int64_t step, int which)
{
    static const double rate[] = {1e-3, 0.5, 3e-4}, beta1[] = {0.9, 0, 0.8}, beta2[] = {0.999, 0.95, 0.5},
                        eps[] = {1e-8, 1e-2, 1e-6}, decay[] = {0, 0.1, 1.5}, grad_scale[] = {1, 0.125, -3};
    upipe_adamw a;
    memset(&a, 0, sizeof a);
    a.n = n;
    a.step = step;
    a.rate = rate[which];
    a.beta1 = beta1[which];
    a.beta2 = beta2[which];
    a.eps = eps[which];
    a.decay = decay[which];
    a.grad_scale = grad_scale[which];
    return a;
}

/* The formula of the textbook: in f64, and in f32 with the constants rounded. */
static void adamw64(const upipe_adamw *a, double *w, double *m, double *v, const float *g)
{
    int64_t i;
    for (i = 0; i < a->n; ++i) {
        double grad = (double)g[i] * a->grad_scale, m_hat, v_hat;
        m[i] = a->beta1 * m[i] + (1 - a->beta1) * grad;
        v[i] = a->beta2 * v[i] + (1 - a->beta2) * grad * grad;
        m_hat = m[i] / (1 - pow(a->beta1, (double)a->step));
        v_hat = v[i] / (1 - pow(a->beta2, (double)a->step));
        w[i] = w[i] - a->rate * (m_hat / (sqrt(v_hat) + a->eps) + a->decay * w[i]);
    }
}

static void naive_adamw(const upipe_adamw *a, float *w, float *m, float *v, const float *g, int way)
{
    float b1 = (float)a->beta1, b2 = (float)a->beta2, m_all = (float)(1 - pow(a->beta1, (double)a->step));
    float v_all = (float)(1 - pow(a->beta2, (double)a->step));
    int64_t i;
    for (i = 0; i < a->n; ++i) {
        float grad = g[i] * (float)a->grad_scale;
        m[i] = naive_add((float)(1 - a->beta1) * grad, b1, m[i], way);
        v[i] = naive_add((float)(1 - a->beta2) * grad * grad, b2, v[i], way);
        w[i] = naive_add(
            w[i], -(float)a->rate,
            naive_add(m[i] / m_all / (sqrtf(v[i] / v_all) + (float)a->eps), (float)a->decay, w[i], way), way);
    }
}

/* Thirty steps; from w = 0 too, where nothing hides the update. The numbers after each step are judged
 * together. */
static void check_adamw(test_rng *r, upipe_ctx *c, int n, int which, int from_zero)
{
    enum { STEPS = 30 };
    upipe_dtype copy_type = which == 1 && c->ops->f16 ? UPIPE_F16 : UPIPE_BF16;
    upipe_view w = tensor(r, UPIPE_F32, STEPS + 1, 1, n, PACKED, from_zero ? 0 : 1);
    upipe_view m = tensor(r, UPIPE_F32, STEPS + 1, 1, n, PACKED, 0), v = twin(m), w1 = twin(w), m1 = twin(m),
               v1 = twin(m), copy = empty(copy_type, STEPS + 1, 1, n, PACKED);
    judged tw = judge_begin(elements(w)), tm = judge_begin(elements(w)), tv = judge_begin(elements(w));
    int step, i, way, each = 1 + n / 16;
    for (i = 0; i < n; ++i) {
        tw.want[i] = (double)get_at(w, i);
        tm.want[i] = tv.want[i] = 0;
        for (way = 0; way < NAIVE_WAYS; ++way) {
            tw.naive[way][i] = get_at(w, i);
            tm.naive[way][i] = tv.naive[way][i] = 0;
        }
    }
    for (step = 1; step <= STEPS; ++step) {
        upipe_view g = tensor(r, UPIPE_F32, 1, 1, n, PACKED, step % 7 == 0 ? 100 : 1), keep = twin(g);
        upipe_view wide = upipe_view_rows(w, step, 1), narrow = upipe_view_rows(copy, step, 1);
        const float *grad = (const float *)g.data;
        upipe_adamw a = adamw_of(n, step, which);
        int64_t at = (int64_t)step * n, old = at - n;
        size_t floats = (size_t)n * sizeof(float), doubles = (size_t)n * sizeof(double);
        memcpy(tw.want + at, tw.want + old, doubles);
        memcpy(tm.want + at, tm.want + old, doubles);
        memcpy(tv.want + at, tv.want + old, doubles);
        adamw64(&a, tw.want + at, tm.want + at, tv.want + at, grad);
        for (way = 0; way < NAIVE_WAYS; ++way) {
            float *wn = tw.naive[way] + at, *mn = tm.naive[way] + at, *vn = tv.naive[way] + at;
            memcpy(wn, wn - n, floats);
            memcpy(mn, mn - n, floats);
            memcpy(vn, vn - n, floats);
            naive_adamw(&a, wn, mn, vn, grad, way);
        }
        a.w = (float *)w.data + at;
        a.m = (float *)m.data + at;
        a.v = (float *)v.data + at;
        memcpy(a.w, a.w - n, floats);
        memcpy(a.m, a.m - n, floats);
        memcpy(a.v, a.v - n, floats);
        a.g = grad;
        a.copy = step % 2 ? narrow.data : NULL;
        a.copy_dtype = copy_type;
        CHECK_STATUS(c->ops->adamw(c, &a), UPIPE_OK, c->err);
        CHECK_BYTES(g.data, keep.data, view_bytes(g));
        CHECK(step % 2 == 0 || same_rounded(narrow, wide));
        /* in sixteen calls or so, in place all along: the same bits */
        for (i = 0; i < n; i += each) {
            float apart[200];
            a.n = i + each < n ? each : n - i;
            a.w = (float *)w1.data + i;
            a.m = (float *)m1.data + i;
            a.v = (float *)v1.data + i;
            a.g = grad + i;
            a.copy = apart;
            a.copy_dtype = UPIPE_F32;
            CHECK_STATUS(c->ops->adamw(c, &a), UPIPE_OK, c->err);
            CHECK_BYTES(apart, a.w, (size_t)a.n * sizeof *apart);
        }
        CHECK(same(wide, upipe_view_rows(w1, 0, 1)) &&
              same(upipe_view_rows(m, step, 1), upipe_view_rows(m1, 0, 1)) &&
              same(upipe_view_rows(v, step, 1), upipe_view_rows(v1, 0, 1)));
        free(g.data);
        free(keep.data);
    }
    judge(&tw, w, "adamw w");
    judge(&tm, m, "adamw m");
    judge(&tv, v, "adamw v");
    judge_end(&tw);
    judge_end(&tm);
    judge_end(&tv);
    free(w.data);
    free(m.data);
    free(v.data);
    free(w1.data);
    free(m1.data);
    free(v1.data);
    free(copy.data);
}

/* The first step is rate * sign(g), however small or great g is, and decay is not part of the moments. */
static void check_adamw_first(upipe_ctx *c)
{
    static const float grads[] = {1e-12f, -1e-12f, 1, -1, 1e12f, 0};
    float w[6], m[6], v[6], g[6];
    upipe_adamw a = adamw_of(6, 1, 0);
    int i;
    a.eps = 1e-30;
    a.decay = 0.25;
    a.rate = 0.125;
    a.w = w;
    a.m = m;
    a.v = v;
    a.g = g;
    memset(m, 0, sizeof m);
    memset(v, 0, sizeof v);
    for (i = 0; i < 6; ++i) {
        g[i] = grads[i];
        w[i] = 8;
    }
    CHECK_STATUS(c->ops->adamw(c, &a), UPIPE_OK, c->err);
    for (i = 0; i < 6; ++i) {
        double want = 8 - 0.125 * ((g[i] > 0) - (g[i] < 0) + 0.25 * 8);
        CHECK_SAY(fabs((double)w[i] - want) <= 2e-6, "w %.9g after a gradient of %g, not %.9g", (double)w[i],
                  (double)g[i], want);
    }
    CHECK(m[5] == 0 && v[5] == 0);
}

/* ---- refusals ---- */

static void check_row_statuses(upipe_ctx *c)
{
    float buf[96];
    upipe_view x = upipe_view_packed(buf, UPIPE_F32, 2, 2, 8), y = x, z = x, v;
    double out;
    y.data = buf + 32;
    z.data = buf + 64;
    memset(buf, 0, sizeof buf);
    v = y;
    v.d = 7;
    CHECK_STATUS(c->ops->add(c, x, v), UPIPE_ERR_ARG, c->err);
    CHECK_TEXT(c->err.text, "x is [2][2][7], not [2][2][8]");
    v = x;
    v.h_step = 4;
    CHECK_STATUS(c->ops->add(c, v, x), UPIPE_ERR_ARG, c->err);
    CHECK_TEXT(c->err.text, "y (f32, steps 16, 4) lies over x (f32, steps 16, 8)");
    v = x;
    v.dtype = (upipe_dtype)9;
    CHECK_STATUS(c->ops->add(c, v, y), UPIPE_ERR_UNSUPPORTED, c->err);
    CHECK_TEXT(c->err.text, "storage type 9");
    v = x;
    v.data = NULL;
    CHECK_STATUS(c->ops->add(c, x, v), UPIPE_ERR_ARG, c->err);
    CHECK_STATUS(c->ops->swiglu(c, v, x, y), UPIPE_ERR_ARG, c->err);
    CHECK_TEXT(c->err.text, "y is NULL");
    CHECK_STATUS(c->ops->swiglu(c, x, v, y), UPIPE_ERR_ARG, c->err);
    CHECK_TEXT(c->err.text, "gate is NULL");
    CHECK_STATUS(c->ops->swiglu(c, x, y, v), UPIPE_ERR_ARG, c->err);
    CHECK_TEXT(c->err.text, "up is NULL");
    v = x;
    v.dtype = UPIPE_BF16;
    CHECK_STATUS(c->ops->swiglu(c, v, x, y), UPIPE_ERR_ARG, c->err);
    CHECK_TEXT(c->err.text, "lies over gate");
    CHECK_STATUS(c->ops->swiglu(c, v, y, x), UPIPE_ERR_ARG, c->err);
    CHECK_TEXT(c->err.text, "lies over up");
    CHECK_STATUS(c->ops->swiglu_bwd(c, x, x, y), UPIPE_ERR_ARG, c->err);
    CHECK_TEXT(c->err.text, "gate and up are the same memory");
    CHECK_STATUS(c->ops->swiglu_bwd(c, x, y, x), UPIPE_ERR_ARG, c->err);
    CHECK_TEXT(c->err.text, "gate and dy are the same memory");
    CHECK_STATUS(c->ops->swiglu_bwd(c, x, y, y), UPIPE_ERR_ARG, c->err);
    CHECK_TEXT(c->err.text, "up and dy are the same memory");
    v = z;
    v.n = 1;
    CHECK_STATUS(c->ops->swiglu_bwd(c, x, y, v), UPIPE_ERR_ARG, c->err);
    CHECK_TEXT(c->err.text, "gate is [2][2][8], not [1][2][8]");
    CHECK_STATUS(c->ops->total(c, NULL, x, 0), UPIPE_ERR_ARG, c->err);
    CHECK_TEXT(c->err.text, "out is NULL");
    v.data = NULL;
    CHECK_STATUS(c->ops->total(c, &out, v, 0), UPIPE_ERR_ARG, c->err);
    CHECK_TEXT(c->err.text, "x is NULL");
    /* no rows: no memory needed */
    v.n = 0;
    CHECK_STATUS(c->ops->add(c, v, v), UPIPE_OK, c->err);
    CHECK_STATUS(c->ops->swiglu(c, v, v, v), UPIPE_OK, c->err);
    CHECK_STATUS(c->ops->swiglu_bwd(c, v, v, v), UPIPE_OK, c->err);
}

static void check_token_statuses(upipe_ctx *c)
{
    float buf[64], loss[2];
    int32_t ids[2] = {1, 0};
    upipe_view x = upipe_view_packed(buf, UPIPE_F32, 2, 1, 8), y = x, none, v;
    memset(buf, 0, sizeof buf);
    memset(&none, 0, sizeof none);
    y.data = buf + 32;
    CHECK_STATUS(cross_entropy(c, x, none, NULL, ids, 1), UPIPE_ERR_ARG, c->err);
    CHECK_TEXT(c->err.text, "loss is NULL");
    CHECK_STATUS(cross_entropy(c, x, none, loss, NULL, 1), UPIPE_ERR_ARG, c->err);
    CHECK_TEXT(c->err.text, "targets is NULL");
    CHECK_STATUS(cross_entropy(c, none, none, loss, ids, 1), UPIPE_ERR_ARG, c->err);
    v = x;
    v.dtype = UPIPE_BF16;
    CHECK_STATUS(cross_entropy(c, v, none, loss, ids, 1), UPIPE_ERR_ARG, c->err);
    CHECK_TEXT(c->err.text, "logits are bf16 [2][1][8]");
    CHECK_STATUS(cross_entropy(c, x, v, loss, ids, 1), UPIPE_ERR_ARG, c->err);
    CHECK_TEXT(c->err.text, "grad (bf16, steps 8, 8) lies over logits (f32, steps 8, 8)");
    v = upipe_view_packed(buf, UPIPE_F32, 1, 2, 8);
    CHECK_STATUS(cross_entropy(c, v, none, loss, ids, 1), UPIPE_ERR_ARG, c->err);
    v = y;
    v.d = 7;
    CHECK_STATUS(cross_entropy(c, x, v, loss, ids, 1), UPIPE_ERR_ARG, c->err);
    CHECK_TEXT(c->err.text, "grad is [2][1][7], not [2][1][8]");
    v = x;
    v.n = 0;
    v.data = NULL;
    CHECK_STATUS(cross_entropy(c, v, none, NULL, NULL, 1), UPIPE_OK, c->err);
    CHECK_STATUS(c->ops->embed(c, v, y, NULL), UPIPE_OK, c->err);
    CHECK_STATUS(c->ops->embed_bwd(c, y, v, NULL), UPIPE_OK, c->err);

    CHECK_STATUS(c->ops->embed(c, x, y, NULL), UPIPE_ERR_ARG, c->err);
    CHECK_TEXT(c->err.text, "tokens is NULL");
    v = y;
    v.d = 7;
    CHECK_STATUS(c->ops->embed(c, x, v, ids), UPIPE_ERR_ARG, c->err);
    CHECK_TEXT(c->err.text, "rows [2][1][8] of a table [2][1][7]");
    v = y;
    v.dtype = UPIPE_BF16;
    CHECK_STATUS(c->ops->embed_bwd(c, v, x, ids), UPIPE_ERR_ARG, c->err);
    CHECK_TEXT(c->err.text, "is bf16, not f32");
}

static void check_adamw_statuses(upipe_ctx *c)
{
    float buf[32];
    upipe_adamw good = adamw_of(4, 1, 0), a;
    int i;
    for (i = 0; i < 32; ++i) buf[i] = 1;
    good.w = buf;
    good.m = buf + 4;
    good.v = buf + 8;
    good.g = buf + 12;
#define REFUSED(field, value, words)                               \
    do {                                                           \
        a = good;                                                  \
        a.field = (value);                                         \
        CHECK_STATUS(c->ops->adamw(c, &a), UPIPE_ERR_ARG, c->err); \
        CHECK_TEXT(c->err.text, words);                            \
        for (i = 0; i < 32; ++i) CHECK(buf[i] == 1);               \
    } while (0)
    REFUSED(w, NULL, "w is NULL");
    REFUSED(m, NULL, "m is NULL");
    REFUSED(v, NULL, "v is NULL");
    REFUSED(g, NULL, "g is NULL");
    REFUSED(n, -3, "-3 elements");
    REFUSED(step, 0, "step 0");
    REFUSED(beta1, 1, "betas 1, 0.999");
    REFUSED(beta1, NAN, "betas nan");
    REFUSED(beta2, -0.5, "betas 0.9, -0.5");
    REFUSED(beta2, 1, "betas 0.9, 1");
    REFUSED(rate, -1, "rate -1");
    REFUSED(eps, -1e-8, "eps -1e-08");
    REFUSED(decay, -2, "decay -2");
    REFUSED(rate, INFINITY, "rate inf");
    REFUSED(grad_scale, NAN, "gradients times nan");
    REFUSED(grad_scale, INFINITY, "gradients times inf");
    REFUSED(grad_scale, 1e300, "gradients times 1e+300");
    REFUSED(copy, buf, "w and copy are the same memory");
    REFUSED(v, buf + 4, "m and v are the same memory");
    REFUSED(g, buf, "w and g are the same memory");
#undef REFUSED
    a = good;
    a.copy = buf + 16;
    a.copy_dtype = (upipe_dtype)7;
    CHECK_STATUS(c->ops->adamw(c, &a), UPIPE_ERR_UNSUPPORTED, c->err);
    CHECK_TEXT(c->err.text, "storage type 7");
    a = good;
    a.n = 0;
    a.w = NULL;
    CHECK_STATUS(c->ops->adamw(c, &a), UPIPE_OK, c->err);
}

static void check_train_statuses(upipe_ctx *c)
{
    check_row_statuses(c);
    check_token_statuses(c);
    check_adamw_statuses(c);
}

static void check_train_ops(test_rng *r, upipe_ctx *c, int most_columns)
{
    static const int columns[] = {1, 7, 8, 9, 63, 200, 1003, 32003};
    int pick, which, all = types(c);
    for (pick = 0; pick < DIMS; ++pick)
        for (which = 0; which < all * all * LAYOUTS; ++which) {
            int d = dims[pick], layout = which / (all * all), one = which % all, two = which / all % all;
            /* each three of types in one of the layouts */
            check_swiglu(r, c, d, (upipe_dtype)one, (upipe_dtype)two,
                         (upipe_dtype)((one + two + layout) % all), layout);
            check_add(r, c, d, (upipe_dtype)one, (upipe_dtype)two, layout);
            check_embed(r, c, d, (upipe_dtype)one, (upipe_dtype)two, layout);
            if (two != UPIPE_F32) continue;
            check_total(r, c, d, (upipe_dtype)one, layout);
            check_bias_bwd(r, c, d, (upipe_dtype)one, layout);
            check_bias(r, c, d, (upipe_dtype)one, layout);
        }
    for (pick = 0; pick < DIMS; ++pick)
        for (which = 0; which < 6; ++which) check_adamw(r, c, dims[pick], which % 3, which / 3);
    for (pick = 0; pick < (int)(sizeof columns / sizeof *columns) && columns[pick] <= most_columns; ++pick)
        for (which = 0; which < 3; ++which)
            check_cross_entropy(r, c, columns[pick], which == 1 && c->ops->f16 ? UPIPE_F16 : UPIPE_BF16,
                                which == 0   ? 1.0f
                                : which == 1 ? 0.037f
                                             : -2.0f);
    check_rmsnorm(r, c, 6);
    check_rmsnorm(r, c, 9);
    check_rmsnorm(r, c, 2051);
    check_swiglu_ends(c);
    check_cross_entropy_ends(c);
    check_total_range(c);
    check_adamw_first(c);
}

#endif

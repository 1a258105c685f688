/* train_ops.h -- checks of a table's operations around attention: against f64 and against differences, bits
 *                against steps, places and split calls, values at the ends of the range
 *
 * Closeness is tolerance.h's rule; the yardsticks are plain f32 loops, and
 * the f64 gradients are themselves held against central differences.
 *
 *     check_train_ops(&rng, c, 32003);     c->ops: the table; the most columns of logits
 *     check_train_statuses(c);             refusals; c->ops: the table itself, as no memory is touched
 */
#ifndef UPIPE_TEST_TRAIN_OPS_H
#define UPIPE_TEST_TRAIN_OPS_H

#include "oracle.h"
#include "tensors.h"
#include "tolerance.h"

static const int train_dims[] = {1, 7, 8, 9, 16, 63, 200};
enum {
    TRAIN_DIMS = (int)(sizeof train_dims / sizeof *train_dims),
    FEW = ROWS_APART
}; /* layouts, without the last one */

/* narrow holds what wide, an f32 view, rounds to. */
static inline int same_rounded(upipe_view narrow, upipe_view wide)
{
    for (int64_t at = 0; at < elements(wide); ++at)
        if (get_at(narrow, at) != naive_store(narrow.dtype, get_at(wide, at))) return 0;
    return 1;
}

/* ---- a result, its truth and the yardsticks ---- */

typedef struct judged {
    float *got, *naive[NAIVE_WAYS];
    double *want;
    int64_t n;
} judged;

static inline judged judge_begin(int64_t n)
{
    judged t;
    t.n = n;
    t.got = floats(n);
    t.want = (double *)buffer((size_t)n * sizeof *t.want);
    for (int way = 0; way < NAIVE_WAYS; ++way) t.naive[way] = floats(n);
    return t;
}

static inline void judge(judged *t, upipe_view got, const char *name)
{
    const float *naive[NAIVE_WAYS];
    for (int way = 0; way < NAIVE_WAYS; ++way) naive[way] = t->naive[way];
    for (int64_t at = 0; at < t->n; ++at) t->got[at] = get_at(got, at);
    CHECK_CLOSE(t->got, naive, NAIVE_WAYS, t->want, t->n, name);
}

/* slope is the derivative that a central difference of two values shows. */
static inline int is_slope(double slope, double up, double down, double step)
{
    return fabs((up - down) / (2 * step) - slope) <= 1e-7 * (1 + fabs(slope));
}

/* ---- rmsnorm over whole tokens: rows too long for test_rows.c's bounds ---- */

static inline double norm_scale64(const float *x, double eps, int d)
{
    double sum = 0;
    for (int k = 0; k < d; ++k) sum += (double)x[k] * (double)x[k];
    return 1 / sqrt(sum / d + eps);
}

static inline double norm_loss64(const float *dy, const float *x, const float *weight, double eps, int d,
                                 int at, double step)
{
    double sum = 0, loss = 0;
    for (int k = 0; k < d; ++k) {
        double xk = (double)x[k] + (k == at ? step : 0);
        sum += xk * xk;
        loss += (double)dy[k] * xk * (double)weight[k];
    }
    return loss / sqrt(sum / d + eps);
}

static inline void check_rmsnorm_long(test_rng *r, upipe_ctx *c, int d)
{
    const double eps = 1e-5, step = 1e-5;
    enum { TOKENS = 3 };
    upipe_view x = tensor(r, UPIPE_F32, TOKENS, 1, d, PACKED, 1), y = empty(UPIPE_F32, TOKENS, 1, d, PACKED);
    upipe_view dy = tensor(r, UPIPE_F32, TOKENS, 1, d, PACKED, 1), dx = twin(y);
    upipe_view weight = tensor(r, UPIPE_F32, 1, 1, d, PACKED, 1), dweight = twin(weight);
    const float *g = (const float *)weight.data;
    judged ty = judge_begin(elements(x)), tx = judge_begin(elements(x)), tg = judge_begin(d);
    int ok = 1;
    memset(dweight.data, 0, view_bytes(dweight));
    for (int k = 0; k < d; ++k) {
        tg.want[k] = 0;
        for (int way = 0; way < NAIVE_WAYS; ++way) tg.naive[way][k] = 0;
    }
    for (int i = 0; i < TOKENS; ++i) {
        const float *row = (const float *)upipe_view_at(x, i, 0),
                    *grad_y = (const float *)upipe_view_at(dy, i, 0);
        double scale = norm_scale64(row, eps, d), mean = 0;
        for (int k = 0; k < d; ++k) mean += (double)grad_y[k] * (double)g[k] * (double)row[k] * scale / d;
        for (int k = 0; k < d; ++k) {
            double unit = (double)row[k] * scale;
            ty.want[i * d + k] = unit * (double)g[k];
            tx.want[i * d + k] = scale * ((double)grad_y[k] * (double)g[k] - unit * mean);
            tg.want[k] += (double)grad_y[k] * unit;
        }
        for (int k = 0; k < d; k += 1 + d / 40)
            if (!is_slope(tx.want[i * d + k], norm_loss64(grad_y, row, g, eps, d, k, step),
                          norm_loss64(grad_y, row, g, eps, d, k, -step), step))
                ok = 0;
        for (int way = 0; way < NAIVE_WAYS; ++way) {
            float s = 1 / sqrtf(f32_dot(row, row, d, way) / (float)d + (float)eps), m = 0;
            for (int k = 0; k < d; ++k) {
                int64_t at = naive_term(k, d, way);
                m = naive_add(m, grad_y[at] * g[at], row[at] * s, way);
            }
            for (int k = 0; k < d; ++k) {
                float unit = row[k] * s;
                ty.naive[way][i * d + k] = unit * g[k];
                tx.naive[way][i * d + k] = s * naive_add(grad_y[k] * g[k], -unit, m / (float)d, way);
                tg.naive[way][k] = naive_add(tg.naive[way][k], grad_y[k], unit, way);
            }
        }
    }
    CHECK_SAY(ok, "rmsnorm's f64 gradient is not its slope, d %d", d);
    CHECK_OP(rmsnorm(c, y, x, g, (float)eps));
    CHECK_OP(rmsnorm_bwd(c, dx, dy, x, g, (float)eps, (float *)dweight.data, 0));
    judge(&ty, y, "rmsnorm y");
    judge(&tx, dx, "rmsnorm dx");
    judge(&tg, dweight, "rmsnorm dgain");
    buffers_free(0);
}

/* ---- add ---- */

static inline void check_add(test_rng *r, upipe_ctx *c, int d, upipe_dtype y_type, upipe_dtype x_type,
                             int layout)
{
    upipe_view y = tensor(r, y_type, 4, 2, d, layout, 1),
               x = tensor(r, x_type, 4, 2, d, (layout + 1) % FEW, 1);
    upipe_view before = twin(y), keep = twin(x), other = moved(y, y_type, (layout + 2) % FEW);
    upipe_view twice = twin(y);
    int ok = 1, ok_twice = 1;
    CHECK_OP(add(c, y, x));
    CHECK_OP(add(c, twice, twice));
    for (int64_t at = 0; at < elements(y); ++at) {
        volatile float sum = get_at(before, at) + get_at(x, at);
        if (get_at(y, at) != naive_store(y_type, sum)) ok = 0;
        if (get_at(twice, at) != 2 * get_at(before, at)) ok_twice = 0;
    }
    CHECK_SAY(ok && ok_twice, "add %s to %s, d %d, layout %d: %d, to itself %d", upipe_dtype_name(x_type),
              upipe_dtype_name(y_type), d, layout, ok, ok_twice);
    CHECK(gaps_whole(y) && gaps_whole(twice));
    CHECK_BYTES(x.data, keep.data, view_bytes(x));
    for (int i = 0; i < 2; ++i)
        CHECK_OP(add(c, upipe_view_rows(other, i, 1 + 2 * i), upipe_view_rows(x, i, 1 + 2 * i)));
    CHECK(same(other, y));
    buffers_free(0);
}

/* ---- scale ---- */

static inline void check_scale(test_rng *r, upipe_ctx *c, int d, upipe_dtype y_type, upipe_dtype x_type,
                               int layout)
{
    upipe_view x = tensor(r, x_type, 4, 2, d, (layout + 1) % FEW, 1), y = empty(y_type, 4, 2, d, layout);
    upipe_view keep = twin(x), other = moved(y, y_type, (layout + 2) % FEW), self = twin(x);
    const float factor = 0.22f;
    int ok = 1;
    CHECK_OP(scale(c, y, x, factor));
    CHECK_OP(scale(c, self, self, factor));
    for (int64_t at = 0; at < elements(y); ++at) {
        volatile float product = get_at(x, at) * factor;
        ok = ok && get_at(y, at) == naive_store(y_type, product) &&
             get_at(self, at) == naive_store(x_type, product);
    }
    CHECK_SAY(ok, "scale of %s into %s, d %d, layout %d", upipe_dtype_name(x_type), upipe_dtype_name(y_type),
              d, layout);
    CHECK(gaps_whole(y) && gaps_whole(self));
    CHECK_BYTES(x.data, keep.data, view_bytes(x));
    for (int i = 0; i < 2; ++i)
        CHECK_OP(scale(c, upipe_view_rows(other, i, 1 + 2 * i), upipe_view_rows(x, i, 1 + 2 * i), factor));
    CHECK(same(other, y));
    buffers_free(0);
}

/* ---- gates ---- */

enum { GATES = UPIPE_GATE_SIGMOID + 1 };
static const char *const gate_names[GATES][3] = {{"silu", "silu dgate", "silu dup"},
                                                 {"gelu", "gelu dgate", "gelu dup"},
                                                 {"sigmoid", "sigmoid dgate", "sigmoid dup"}};

/* The sigmoid that an activation multiplies its gate by, and the slope of that sigmoid's argument. */
static inline double gate64(double g, upipe_gate_kind kind, double *slope)
{
    const double root = 2 * sqrt(2 / acos(-1.0));
    *slope = kind == UPIPE_GATE_GELU ? root * (1 + 3 * 0.044715 * g * g) : 1;
    return 1 / (1 + exp(kind == UPIPE_GATE_GELU ? -root * (g + 0.044715 * g * g * g) : -g));
}

static inline double gated64(double g, double u, upipe_gate_kind kind)
{
    double slope, s = gate64(g, kind, &slope);
    return (kind == UPIPE_GATE_SIGMOID ? s : g * s) * u;
}

/* d gated / d gate */
static inline double gated_slope64(double g, double u, upipe_gate_kind kind)
{
    double slope, s = gate64(g, kind, &slope), far = exp(-fabs(g));
    if (kind == UPIPE_GATE_SIGMOID)
        return u * far / ((1 + far) * (1 + far)); /* s (1 - s), where 1 - s has no digits too */
    return s == 0 ? 0 : u * s * (1 + (s == 1 ? 0 : g * (1 - s) * slope));
}

/* What the gate multiplies by, as PyTorch says it, with tanh where it is gelu. */
static inline float naive_gate(float g, upipe_gate_kind kind, float *slope, int way)
{
    const float root = 0.7978845608f;
    float t, inner;
    if (kind != UPIPE_GATE_GELU) {
        const float s = 1 / (1 + expf(-g));
        *slope = kind == UPIPE_GATE_SILU ? s * naive_add(1, g, 1 - s, way) : s * (1 - s);
        return kind == UPIPE_GATE_SILU ? g * s : s;
    }
    t = tanhf(root * naive_add(g, 0.044715f, g * g * g, way));
    inner = root * naive_add(1, 3 * 0.044715f, g * g, way);
    *slope = naive_add(0.5f * (1 + t), 0.5f * g * (1 - t * t), inner, way);
    return g * (0.5f * (1 + t));
}

static inline void check_gated(test_rng *r, upipe_ctx *c, upipe_gate_kind kind, int d, upipe_dtype y_type,
                               upipe_dtype g_type, upipe_dtype u_type, int layout)
{
    const double step = 1e-5;
    upipe_view gate = tensor(r, g_type, 4, 2, d, layout, 4), up = tensor(r, u_type, 4, 2, d, PACKED, 1);
    upipe_view dy = tensor(r, y_type, 4, 2, d, (layout + 1) % FEW, 1), y = empty(y_type, 4, 2, d, layout);
    upipe_view dgate = twin(gate), dup = twin(up), keep = twin(dy), y2 = empty(y_type, 4, 2, d, HEADS_INNER);
    upipe_view gate2 = moved(gate, g_type, (layout + 2) % FEW), up2 = moved(up, u_type, HEADS_OUTER);
    judged t = judge_begin(elements(y)), tg = judge_begin(elements(y)), tu = judge_begin(elements(y));
    int ok = 1;
    for (int64_t at = 0; at < t.n; ++at) {
        float g = get_at(gate, at), u = get_at(up, at), o = get_at(dy, at);
        double g64 = (double)g, u64 = (double)u, o64 = (double)o;
        t.want[at] = gated64(g64, u64, kind);
        tg.want[at] = o64 * gated_slope64(g64, u64, kind);
        tu.want[at] = o64 * gated64(g64, 1, kind);
        if (!is_slope(gated_slope64(g64, u64, kind), gated64(g64 + step, u64, kind),
                      gated64(g64 - step, u64, kind), step))
            ok = 0;
        for (int way = 0; way < NAIVE_WAYS; ++way) {
            float slope, value = naive_gate(g, kind, &slope, way);
            t.naive[way][at] = naive_store(y_type, value * u);
            tg.naive[way][at] = naive_store(g_type, o * u * slope);
            tu.naive[way][at] = naive_store(u_type, o * value);
        }
    }
    CHECK_SAY(ok, "the f64 gradient of %s is not its slope, d %d", gate_names[kind][0], d);
    CHECK_OP(gate(c, kind, y, gate, up));
    CHECK(same(gate, dgate) && same(up, dup));
    CHECK_OP(gate_bwd(c, kind, dgate, dup, dy));
    judge(&t, y, gate_names[kind][0]);
    judge(&tg, dgate, gate_names[kind][1]);
    judge(&tu, dup, gate_names[kind][2]);
    CHECK(gaps_whole(y) && gaps_whole(dgate) && gaps_whole(dup));
    CHECK_BYTES(dy.data, keep.data, view_bytes(dy));
    /* in two calls and other layouts: the same bits */
    for (int i = 0; i < 2; ++i) {
        upipe_view gi = upipe_view_rows(gate2, i, 1 + 2 * i), ui = upipe_view_rows(up2, i, 1 + 2 * i);
        CHECK_OP(gate(c, kind, upipe_view_rows(y2, i, 1 + 2 * i), gi, ui));
        CHECK_OP(gate_bwd(c, kind, gi, ui, upipe_view_rows(dy, i, 1 + 2 * i)));
    }
    CHECK(same(y2, y) && same(gate2, dgate) && same(up2, dup));
    /* in place */
    if (g_type == y_type) {
        CHECK_OP(gate(c, kind, gate, gate, up));
        CHECK(same(gate, y) && gaps_whole(gate));
    } else if (u_type == y_type) {
        CHECK_OP(gate(c, kind, up, gate, up));
        CHECK(same(up, y) && gaps_whole(up));
    }
    buffers_free(0);
}

/* Far gates: nothing finite becomes infinite, what is 0 in f64 is 0, and a NaN stays one. The exponent of gelu's sigmoid
 * is off by a few roundings of its own size, the others' by none. */
static inline void check_gated_ends(upipe_ctx *c, upipe_gate_kind kind)
{
    static const float gates[] = {0,      1e-30f, -1e-30f, 17,    -17,  80,    -80,   87,     -87,
                                  88.05f, -88.1f, 89,      -89,   1e4f, -1e4f, 3e38f, -3e38f, 5.5f,
                                  -5.5f,  9.9f,   -9.9f,   99.9f, -101, 2e13f, -2e13f};
    enum { COUNT = (int)(sizeof gates / sizeof *gates) };
    float y[COUNT], gate[COUNT], up[COUNT], dy[COUNT];
    upipe_view vy = upipe_view_packed(y, UPIPE_F32, 1, 1, COUNT), vg = vy, vu = vy, vd = vy;
    vg.data = gate;
    vu.data = up;
    vd.data = dy;
    memcpy(gate, gates, sizeof gate);
    for (int i = 0; i < COUNT; ++i) {
        up[i] = 1;
        dy[i] = i % 2 ? -1.0f : 1.0f;
    }
    CHECK_OP(gate(c, kind, vy, vg, vu));
    CHECK_OP(gate_bwd(c, kind, vg, vu, vd));
    for (int i = 0; i < COUNT; ++i) {
        double g = (double)gates[i], value = gated64(g, 1, kind), slope = gated_slope64(g, 1, kind),
               sign = (double)dy[i];
        double large = fabs(g) < 100 ? fabs(g) : 0; /* of the exponent */
        if (kind == UPIPE_GATE_GELU && fabs(g) < 12)
            large = 4 * (1.6 * large + 0.072 * large * large * large);
        const double near = 4e-7 + 1.2e-7 * large;
        CHECK_SAY(fabs((double)y[i] - value) <= near * fabs(value) + 1e-36, "%s of %g is %g, not %g",
                  gate_names[kind][0], g, (double)y[i], value);
        CHECK_SAY(fabs((double)gate[i] - sign * slope) <= near * fabs(slope) + 1e-36,
                  "%s at %g is %g, not %g", gate_names[kind][1], g, (double)gate[i], sign * slope);
        CHECK_SAY(fabs((double)up[i] - sign * value) <= near * fabs(value) + 1e-36, "dup at %g is %g, not %g",
                  g, (double)up[i], sign * value);
    }
    /* one NaN at a time: gate, up, dy */
    for (int which = 0; which < 3; ++which) {
        for (int i = 0; i < COUNT; ++i) gate[i] = up[i] = dy[i] = 1;
        if (which == 0) gate[5] = NAN;
        if (which == 1) up[5] = NAN;
        if (which == 2) dy[5] = NAN;
        CHECK_OP(gate(c, kind, vy, vg, vu));
        CHECK_OP(gate_bwd(c, kind, vg, vu, vd));
        CHECK_INT(isnan(y[5]) != 0, which != 2);
        CHECK(isnan(gate[5]));
        CHECK_INT(isnan(up[5]) != 0, which != 1);
        CHECK(!isnan(y[4]) && !isnan(gate[4]) && !isnan(up[4]) && !isnan(y[6]) && !isnan(gate[6]));
    }
}

/* ---- cross entropy ---- */

static inline double loss64(const double *x, int64_t v, int64_t target)
{
    double top = -INFINITY, others = 0;
    for (int64_t k = 0; k < v; ++k) top = x[k] > top ? x[k] : top;
    for (int64_t k = 0; k < v; ++k)
        if (k != target) others += exp(x[k] - top);
    return x[target] == top ? log1p(others) : log(others + exp(x[target] - top)) + (top - x[target]);
}

static inline void grad64(double *grad, const double *x, int64_t v, int64_t target)
{
    double top = -INFINITY, others = 0, sum;
    for (int64_t k = 0; k < v; ++k) top = x[k] > top ? x[k] : top;
    for (int64_t k = 0; k < v; ++k)
        if (k != target) others += exp(x[k] - top);
    sum = others + exp(x[target] - top);
    for (int64_t k = 0; k < v; ++k) grad[k] = exp(x[k] - top) / sum;
    grad[target] = -others / sum;
}

static inline void naive_loss(float *loss, float *grad, const float *x, int64_t v, int64_t target,
                              float scale, int way)
{
    float top = -INFINITY, sum = 0;
    for (int64_t k = 0; k < v; ++k) top = x[k] > top ? x[k] : top;
    for (int64_t k = 0; k < v; ++k) sum += expf(x[naive_term(k, v, way)] - top);
    *loss = logf(sum) + top - x[target];
    for (int64_t k = 0; k < v; ++k) grad[k] = scale * (expf(x[k] - top) / sum - (k == target ? 1.0f : 0.0f));
}

enum { CE_ROWS = 8 };

/* Rows of all kinds. Row 0 and 1 normal, 2 all equal, 3 spread over +-1e4, 4 with -inf, 5 sure of its target,
 * 6 ignored, 7 normal. */
static inline void ce_fill(test_rng *r, upipe_view logits, int32_t *targets)
{
    int v = logits.d;
    for (int64_t i = 0; i < CE_ROWS; ++i) {
        targets[i] = i == 6 ? -1 - test_below(r, 100) : test_below(r, v);
        for (int k = 0; k < v; ++k) {
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

static inline upipe_cross_entropy cross_entropy_of(upipe_view logits, upipe_view grad, float *loss,
                                                   const int32_t *targets, float scale)
{
    upipe_cross_entropy x = {
        .logits = logits, .grad = grad, .loss = loss, .targets = targets, .scale = scale};
    return x;
}

static inline upipe_status cross_entropy(upipe_ctx *c, upipe_view logits, upipe_view grad, float *loss,
                                         const int32_t *targets, float scale)
{
    const upipe_cross_entropy x = cross_entropy_of(logits, grad, loss, targets, scale);
    return c->ops->cross_entropy(c, &x);
}

static inline void check_cross_entropy(test_rng *r, upipe_ctx *c, int v, upipe_dtype narrow_type, float scale)
{
    upipe_view logits = empty(UPIPE_F32, CE_ROWS, 1, v, HEADS_OUTER), in_place, again, halves, none, keep;
    upipe_view grad = empty(UPIPE_F32, CE_ROWS, 1, v, HEADS_INNER);
    upipe_view narrow = empty(narrow_type, CE_ROWS, 1, v, HEADS_INNER);
    float loss[CE_ROWS], loss2[CE_ROWS];
    int32_t targets[CE_ROWS];
    double *row = (double *)buffer((size_t)v * sizeof *row);
    upipe_view rows = upipe_view_packed(loss, UPIPE_F32, CE_ROWS, 1, 1);
    judged tl = judge_begin(CE_ROWS), tg = judge_begin(elements(logits)), tn = judge_begin(elements(logits));
    int ok = 1;
    memset(&none, 0, sizeof none);
    ce_fill(r, logits, targets);
    for (int i = 0; i < CE_ROWS; ++i) {
        for (int k = 0; k < v; ++k) row[k] = get(logits, i, 0, k);
        tl.want[i] = targets[i] < 0 ? 0 : loss64(row, v, targets[i]);
        memset(tg.want + i * v, 0, (size_t)v * sizeof *tg.want);
        if (targets[i] >= 0) grad64(tg.want + i * v, row, v, targets[i]);
        for (int k = 0; targets[i] >= 0 && k < v; k += 1 + v / 50) {
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
        for (int way = 0; way < NAIVE_WAYS; ++way) {
            tl.naive[way][i] = 0;
            memset(tg.naive[way] + i * v, 0, (size_t)v * sizeof(float));
            if (targets[i] >= 0)
                naive_loss(&tl.naive[way][i], tg.naive[way] + i * v,
                           (const float *)upipe_view_at(logits, i, 0), v, targets[i], scale, way);
        }
        for (int k = 0; k < v; ++k) tg.want[i * v + k] *= (double)scale;
    }
    for (int k = 0; k < CE_ROWS * v; ++k) {
        tn.want[k] = tg.want[k];
        for (int way = 0; way < NAIVE_WAYS; ++way)
            tn.naive[way][k] = naive_store(narrow_type, tg.naive[way][k]);
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
    for (int k = 0; k < v; ++k) CHECK((float)get(grad, 6, 0, k) == 0);
    if (v == 1)
        for (int i = 0; i < CE_ROWS; ++i) CHECK(loss[i] == 0 && (float)get(grad, i, 0, 0) == 0);
    /* sure of its target: loss and gradient are small, and right to the last digits but few */
    CHECK_SAY(fabs((double)loss[5] - tl.want[5]) <= 4e-6 * tl.want[5] &&
                  fabs(get(grad, 5, 0, targets[5]) - tg.want[5 * v + targets[5]]) <=
                      4e-6 * fabs(tg.want[5 * v + targets[5]]),
              "%d columns, sure: loss %.9g, not %.9g; gradient %.9g, not %.9g", v, (double)loss[5],
              tl.want[5], get(grad, 5, 0, targets[5]), tg.want[5 * v + targets[5]]);
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
    for (int i = 0; i < 2; ++i) {
        upipe_view part = upipe_view_rows(halves, 3 * i, 3 + 2 * i);
        CHECK_STATUS(cross_entropy(c, part, part, loss2 + 3 * i, targets + 3 * i, scale), UPIPE_OK, c->err);
    }
    CHECK(same(halves, grad));
    CHECK_BYTES(loss2, loss, sizeof loss);
    buffers_free(0);
}

/* A NaN, an infinite logit or nothing but -inf: the loss is a NaN, wherever it stands. A target of -inf costs
 * infinitely much. */
static inline void check_cross_entropy_ends(upipe_ctx *c)
{
    static const float spoils[] = {NAN, INFINITY};
    enum { COLUMNS = 21 };
    float logits[COLUMNS], grad[COLUMNS], loss;
    upipe_view x = upipe_view_packed(logits, UPIPE_F32, 1, 1, COLUMNS), g = x;
    int32_t target;
    g.data = grad;
    for (int which = 0; which < 2; ++which)
        for (int at = 0; at < COLUMNS; ++at)
            for (target = 0; target < COLUMNS; target += 5) {
                for (int k = 0; k < COLUMNS; ++k) logits[k] = (float)(k * 7 % 5);
                logits[at] = spoils[which];
                CHECK_STATUS(cross_entropy(c, x, g, &loss, &target, 1), UPIPE_OK, c->err);
                CHECK_SAY(isnan(loss) && isnan(grad[0]) && isnan(grad[COLUMNS - 1]) && isnan(grad[target]),
                          "a logit of %g in column %d, target %d: loss %g", (double)spoils[which], at,
                          (int)target, (double)loss);
            }
    target = 9;
    for (int k = 0; k < COLUMNS; ++k) logits[k] = -INFINITY;
    CHECK_STATUS(cross_entropy(c, x, g, &loss, &target, 1), UPIPE_OK, c->err);
    CHECK(isnan(loss));
    logits[3] = -20000;
    CHECK_STATUS(cross_entropy(c, x, g, &loss, &target, 0.5f), UPIPE_OK, c->err);
    CHECK(isinf(loss) && loss > 0);
    for (int k = 0; k < COLUMNS; ++k) CHECK(grad[k] == (k == 3 ? 0.5f : k == 9 ? -0.5f : 0.0f));
    target = 3;
    CHECK_STATUS(cross_entropy(c, x, g, &loss, &target, 1), UPIPE_OK, c->err);
    CHECK(loss == 0);
    for (int k = 0; k < COLUMNS; ++k) CHECK(grad[k] == 0);
}

/* Under a soft-cap: near the truth, the same bits in place, narrow, in two calls and without a gradient. */
static inline void check_cross_entropy_capped(test_rng *r, upipe_ctx *c, int v, upipe_dtype narrow_type,
                                              float softcap)
{
    const float scale = 0.037f;
    upipe_view logits = empty(UPIPE_F32, CE_ROWS, 1, v, HEADS_OUTER), in_place, again, halves, alone;
    upipe_view grad = empty(UPIPE_F32, CE_ROWS, 1, v, HEADS_INNER),
               narrow = empty(narrow_type, CE_ROWS, 1, v, HEADS_INNER);
    float loss[CE_ROWS], loss2[CE_ROWS], *squashed = floats(v);
    int32_t targets[CE_ROWS];
    double *row = (double *)buffer((size_t)v * sizeof *row),
           *capped = (double *)buffer((size_t)v * sizeof *row);
    const double cap = (double)softcap, step = 1e-5;
    upipe_view rows = upipe_view_packed(loss, UPIPE_F32, CE_ROWS, 1, 1);
    judged tl = judge_begin(CE_ROWS), tg = judge_begin(elements(logits));
    upipe_cross_entropy x;
    int ok = 1;
    ce_fill(r, logits, targets);
    for (int i = 0; i < CE_ROWS; ++i) {
        tl.want[i] = 0;
        memset(tg.want + i * v, 0, (size_t)v * sizeof *tg.want);
        for (int way = 0; way < NAIVE_WAYS; ++way) {
            tl.naive[way][i] = 0;
            memset(tg.naive[way] + i * v, 0, (size_t)v * sizeof(float));
        }
        if (targets[i] < 0) continue;
        for (int k = 0; k < v; ++k) {
            row[k] = get(logits, i, 0, k);
            capped[k] = cap * tanh(row[k] / cap);
            squashed[k] = softcap * tanhf((float)row[k] / softcap);
        }
        tl.want[i] = loss64(capped, v, targets[i]);
        grad64(tg.want + i * v, capped, v, targets[i]);
        for (int k = 0; k < v; ++k) tg.want[i * v + k] *= 1 - capped[k] / cap * capped[k] / cap;
        for (int k = 0; k < v; k += 1 + v / 9) {
            const double old = capped[k];
            double up, down;
            if (isinf(row[k])) continue;
            capped[k] = cap * tanh((row[k] + step) / cap);
            up = loss64(capped, v, targets[i]);
            capped[k] = cap * tanh((row[k] - step) / cap);
            down = loss64(capped, v, targets[i]);
            capped[k] = old;
            ok = ok && is_slope(tg.want[i * v + k], up, down, step);
        }
        for (int k = 0; k < v; ++k) tg.want[i * v + k] *= (double)scale;
        for (int way = 0; way < NAIVE_WAYS; ++way) {
            naive_loss(&tl.naive[way][i], tg.naive[way] + i * v, squashed, v, targets[i], scale, way);
            for (int k = 0; k < v; ++k) {
                const float t = squashed[k] / softcap;
                tg.naive[way][i * v + k] *= 1 - t * t;
            }
        }
    }
    CHECK_SAY(ok, "capped cross entropy's f64 gradient is not its slope, %d columns", v);
    in_place = twin(logits);
    again = twin(logits);
    halves = twin(logits);
    alone = twin(logits);
    x = cross_entropy_of(logits, grad, loss, targets, scale);
    x.softcap = softcap;
    CHECK_OP(cross_entropy(c, &x));
    judge(&tl, rows, "capped cross entropy");
    judge(&tg, grad, "capped cross entropy's gradient");
    CHECK(gaps_whole(grad) && gaps_whole(logits) && loss[6] == 0);
    x.loss = loss2;
    x.logits = x.grad = in_place;
    CHECK_OP(cross_entropy(c, &x));
    CHECK(same(in_place, grad) && gaps_whole(in_place));
    CHECK_BYTES(loss2, loss, sizeof loss);
    x.logits = again;
    x.grad = narrow;
    CHECK_OP(cross_entropy(c, &x));
    CHECK(same_rounded(narrow, grad) && gaps_whole(narrow));
    for (int i = 0; i < 2; ++i) {
        x.logits = x.grad = upipe_view_rows(halves, 3 * i, 3 + 2 * i);
        x.loss = loss2 + 3 * i;
        x.targets = targets + 3 * i;
        CHECK_OP(cross_entropy(c, &x));
    }
    CHECK(same(halves, grad));
    CHECK_BYTES(loss2, loss, sizeof loss);
    x = cross_entropy_of(alone, (upipe_view){0}, loss2, targets, scale);
    x.softcap = softcap;
    memset(loss2, 0xff, sizeof loss2);
    CHECK_OP(cross_entropy(c, &x));
    CHECK_BYTES(loss2, loss, sizeof loss);
    x.softcap = -1;
    CHECK(c->ops->cross_entropy(c, &x) == UPIPE_ERR_ARG && strstr(c->err.text, "soft-cap -1") != NULL);
    buffers_free(0);
}

/* ---- embedding ---- */

static inline void check_embed(test_rng *r, upipe_ctx *c, int d, upipe_dtype x_type, upipe_dtype table_type,
                               int layout)
{
    enum { TOKENS = 9, VOCAB = 5 };
    upipe_view table = tensor(r, table_type, VOCAB, 1, d, layout, 1), keep = twin(table);
    upipe_view x = empty(x_type, TOKENS, 1, d, (layout + 1) % FEW);
    upipe_view dx = tensor(r, x_type, TOKENS, 1, d, layout, 1),
               grad = tensor(r, UPIPE_F32, VOCAB, 1, d, layout, 1);
    upipe_view grad2 = moved(grad, UPIPE_F32, PACKED), want = moved(grad, UPIPE_F32, PACKED);
    int32_t tokens[TOKENS];
    int ok = 1;
    for (int i = 0; i < TOKENS; ++i) tokens[i] = i == 0 ? 0 : i == 1 ? VOCAB - 1 : test_below(r, VOCAB);
    CHECK_OP(embed(c, x, table, tokens));
    CHECK_OP(embed_bwd(c, grad, dx, tokens));
    CHECK_OP(embed_bwd(c, grad2, upipe_view_rows(dx, 0, 4), tokens));
    CHECK_OP(embed_bwd(c, grad2, upipe_view_rows(dx, 4, TOKENS - 4), tokens + 4));
    for (int i = 0; i < TOKENS; ++i)
        for (int k = 0; k < d; ++k) {
            volatile float sum = (float)get(want, tokens[i], 0, k) + (float)get(dx, i, 0, k);
            if ((float)get(x, i, 0, k) != naive_store(x_type, (float)get(table, tokens[i], 0, k))) ok = 0;
            put_at(want, (int64_t)tokens[i] * d + k, (double)sum);
        }
    CHECK_SAY(ok, "embed %s from %s, d %d, layout %d", upipe_dtype_name(x_type), upipe_dtype_name(table_type),
              d, layout);
    CHECK_SAY(same(grad, want), "embed_bwd of %s, d %d, layout %d", upipe_dtype_name(x_type), d, layout);
    CHECK(same(grad2, grad));
    CHECK(gaps_whole(x) && gaps_whole(grad));
    CHECK_BYTES(table.data, keep.data, view_bytes(table));
    buffers_free(0);
}

/* ---- the gradient of a bias ---- */

/* The sums to the bit: parts of UPIPE_SUM_ROWS tokens, each one chain, in order; the same for a call that is cut
 * between two parts. */
static inline void check_bias_bwd(test_rng *r, upipe_ctx *c, int d, upipe_dtype dtype, int layout)
{
    enum { HEADS = 3, MORE = 2 * UPIPE_SUM_ROWS + 5 };
    const int64_t n =
        d > 16 ? MORE : 9 * UPIPE_SUM_ROWS + 1; /* more parts than a block of a device sums at once */
    upipe_view dy = tensor(r, dtype, n, HEADS, d, layout, 1), keep = twin(dy);
    upipe_view got = tensor(r, UPIPE_F32, 1, HEADS, d, PACKED, 1), cut = twin(got), want = twin(got);
    for (int64_t k = 0; k < HEADS * d; ++k) {
        volatile float sum = get_at(want, k), part = 0;
        for (int64_t i = 0; i < n; ++i) {
            part = part + (float)get(dy, i, (int)(k / d), k % d);
            if (i % UPIPE_SUM_ROWS != UPIPE_SUM_ROWS - 1 && i != n - 1) continue;
            sum = sum + part;
            part = 0;
        }
        put_at(want, k, (double)sum);
    }
    CHECK_OP(bias_bwd(c, (float *)got.data, dy));
    CHECK_OP(bias_bwd(c, (float *)cut.data, upipe_view_rows(dy, 0, UPIPE_SUM_ROWS)));
    CHECK_OP(bias_bwd(c, (float *)cut.data, upipe_view_rows(dy, UPIPE_SUM_ROWS, n - UPIPE_SUM_ROWS)));
    CHECK_OP(bias_bwd(c, (float *)cut.data, upipe_view_rows(dy, 0, 0)));
    CHECK_SAY(same(got, want), "bias_bwd of %s, d %d, layout %d", upipe_dtype_name(dtype), d, layout);
    CHECK(same(cut, want));
    CHECK_BYTES(dy.data, keep.data, view_bytes(dy));
    buffers_free(0);
}

/* A bias: one row of f32, added to all rows. */
static inline void check_bias(test_rng *r, upipe_ctx *c, int d, upipe_dtype dtype, int layout)
{
    upipe_view y = tensor(r, dtype, 5, 3, d, layout, 1), want = twin(y),
               b = tensor(r, UPIPE_F32, 1, 3, d, PACKED, 1);
    for (int64_t at = 0; at < elements(y); ++at)
        put_at(want, at, (double)(get_at(y, at) + get_at(b, at % (3 * d))));
    CHECK_STATUS(upipe_bias_add(c, y, (const float *)b.data, d), UPIPE_OK, c->err);
    CHECK_SAY(same(y, want), "bias of %s, d %d, layout %d", upipe_dtype_name(dtype), d, layout);
    buffers_free(0);
}

/* ---- total ---- */

static inline void check_total(test_rng *r, upipe_ctx *c, int d, upipe_dtype dtype, int layout)
{
    upipe_view x = tensor(r, dtype, 5, 3, d, layout, 1), other = moved(x, dtype, (layout + 1) % FEW), v;
    double got, again, want, size;
    for (int squares = 0; squares < 2; ++squares) {
        want = size = 0;
        for (int64_t at = 0; at < elements(x); ++at) {
            double one = (double)get_at(x, at);
            one = squares ? one * one : one;
            want += one;
            size += fabs(one);
        }
        got = again = NAN;
        CHECK_OP(total(c, &got, x, squares));
        CHECK_OP(total(c, &again, other, squares));
        CHECK_SAY(fabs(got - want) <= 1e-15 * (double)elements(x) * size, "total %.17g, not %.17g", got,
                  want);
        CHECK_BYTES(&again, &got, sizeof got);
    }
    v = upipe_view_rows(x, 0, 0);
    CHECK_OP(total(c, &got, v, 0));
    CHECK(got == 0);
    put_at(x, elements(x) - 1, NAN);
    CHECK_OP(total(c, &got, x, 1));
    CHECK(isnan(got));
    buffers_free(0);
}

/* Numbers that f32 cannot add: 2^24 ones after 2^24, and the square of the greatest f32. */
static inline void check_total_range(upipe_ctx *c)
{
    float x[3] = {16777216, 1, 3e38f};
    double got;
    CHECK_OP(total(c, &got, upipe_view_packed(x, UPIPE_F32, 1, 1, 2), 0));
    CHECK(got == 16777217);
    CHECK_OP(total(c, &got, upipe_view_packed(x, UPIPE_F32, 1, 1, 3), 1));
    CHECK(fabs(got / 9e76 - 1) < 1e-6);
}

/* ---- adamw ---- */

static inline upipe_adamw adamw_of(int64_t n, int64_t step, int which)
{
    static const double rate[] = {1e-3, 0.5, 3e-4}, beta1[] = {0.9, 0, 0.8}, beta2[] = {0.999, 0.95, 0.5},
                        eps[] = {1e-8, 1e-2, 1e-6}, decay[] = {0, 0.1, 1.5}, grad_scale[] = {1, 0.125, -3};
    upipe_adamw a = {.n = n,
                     .step = step,
                     .rate = rate[which],
                     .beta1 = beta1[which],
                     .beta2 = beta2[which],
                     .eps = eps[which],
                     .decay = decay[which],
                     .grad_scale = grad_scale[which]};
    return a;
}

/* The formula of the textbook: in f64, and in f32 with the constants rounded. */
static inline void adamw64(const upipe_adamw *a, double *w, double *m, double *v, const float *g)
{
    for (int64_t i = 0; i < a->n; ++i) {
        double grad = (double)g[i] * a->grad_scale, m_hat, v_hat;
        m[i] = a->beta1 * m[i] + (1 - a->beta1) * grad;
        v[i] = a->beta2 * v[i] + (1 - a->beta2) * grad * grad;
        m_hat = m[i] / (1 - pow(a->beta1, (double)a->step));
        v_hat = v[i] / (1 - pow(a->beta2, (double)a->step));
        w[i] = w[i] - a->rate * (m_hat / (sqrt(v_hat) + a->eps) + a->decay * w[i]);
    }
}

static inline void naive_adamw(const upipe_adamw *a, float *w, float *m, float *v, const float *g, int way)
{
    float b1 = (float)a->beta1, b2 = (float)a->beta2, m_all = (float)(1 - pow(a->beta1, (double)a->step));
    float v_all = (float)(1 - pow(a->beta2, (double)a->step));
    for (int64_t i = 0; i < a->n; ++i) {
        float grad = g[i] * (float)a->grad_scale;
        m[i] = naive_add((float)(1 - a->beta1) * grad, b1, m[i], way);
        v[i] = naive_add((float)(1 - a->beta2) * grad * grad, b2, v[i], way);
        w[i] = naive_add(
            w[i], -(float)a->rate,
            naive_add(m[i] / m_all / (sqrtf(v[i] / v_all) + (float)a->eps), (float)a->decay, w[i], way), way);
    }
}

/* Thirty steps, the last two of them late ones; from w = 0 too, where nothing hides the update. The numbers after each
 * step are judged together. */
static inline void check_adamw(test_rng *r, upipe_ctx *c, int n, int which, int from_zero)
{
    enum { STEPS = 30 };
    upipe_view w = tensor(r, UPIPE_F32, STEPS + 1, 1, n, PACKED, from_zero ? 0 : 1);
    upipe_view m = tensor(r, UPIPE_F32, STEPS + 1, 1, n, PACKED, 0), v = twin(m), w1 = twin(w), m1 = twin(m),
               v1 = twin(m), copy = empty(UPIPE_BF16, STEPS + 1, 1, n, PACKED);
    judged tw = judge_begin(elements(w)), tm = judge_begin(elements(w)), tv = judge_begin(elements(w));
    int each = 1 + n / 16;
    for (int i = 0; i < n; ++i) {
        tw.want[i] = (double)get_at(w, i);
        tm.want[i] = tv.want[i] = 0;
        for (int way = 0; way < NAIVE_WAYS; ++way) {
            tw.naive[way][i] = get_at(w, i);
            tm.naive[way][i] = tv.naive[way][i] = 0;
        }
    }
    for (int step = 1; step <= STEPS; ++step) {
        upipe_view g = tensor(r, UPIPE_F32, 1, 1, n, PACKED, step % 7 == 0 ? 100 : 1), keep = twin(g);
        upipe_view wide = upipe_view_rows(w, step, 1), narrow = upipe_view_rows(copy, step, 1);
        const float *grad = (const float *)g.data;
        const int64_t late = step == STEPS ? 3000000000 : 1000;
        upipe_adamw a = adamw_of(n, step < STEPS - 1 ? step : late, which);
        int64_t at = (int64_t)step * n, old = at - n;
        size_t floats = (size_t)n * sizeof(float), doubles = (size_t)n * sizeof(double);
        memcpy(tw.want + at, tw.want + old, doubles);
        memcpy(tm.want + at, tm.want + old, doubles);
        memcpy(tv.want + at, tv.want + old, doubles);
        adamw64(&a, tw.want + at, tm.want + at, tv.want + at, grad);
        for (int way = 0; way < NAIVE_WAYS; ++way) {
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
        a.copy_dtype = UPIPE_BF16;
        CHECK_OP(adamw(c, &a));
        CHECK_BYTES(g.data, keep.data, view_bytes(g));
        CHECK(step % 2 == 0 || same_rounded(narrow, wide));
        /* in sixteen calls or so, in place all along: the same bits */
        for (int i = 0; i < n; i += each) {
            float apart[200];
            a.n = i + each < n ? each : n - i;
            a.w = (float *)w1.data + i;
            a.m = (float *)m1.data + i;
            a.v = (float *)v1.data + i;
            a.g = grad + i;
            a.copy = apart;
            a.copy_dtype = UPIPE_F32;
            CHECK_OP(adamw(c, &a));
            CHECK_BYTES(apart, a.w, (size_t)a.n * sizeof *apart);
        }
        CHECK(same(wide, upipe_view_rows(w1, 0, 1)) &&
              same(upipe_view_rows(m, step, 1), upipe_view_rows(m1, 0, 1)) &&
              same(upipe_view_rows(v, step, 1), upipe_view_rows(v1, 0, 1)));
    }
    judge(&tw, w, "adamw w");
    judge(&tm, m, "adamw m");
    judge(&tv, v, "adamw v");
    buffers_free(0);
}

/* The first step is rate * sign(g), however small or great g is, and decay is not part of the moments. */
static inline void check_adamw_first(upipe_ctx *c)
{
    static const float grads[] = {1e-12f, -1e-12f, 1, -1, 1e12f, 0};
    float w[6], m[6], v[6], g[6];
    upipe_adamw a = adamw_of(6, 1, 0);
    a.eps = 1e-30;
    a.decay = 0.25;
    a.rate = 0.125;
    a.w = w;
    a.m = m;
    a.v = v;
    a.g = g;
    memset(m, 0, sizeof m);
    memset(v, 0, sizeof v);
    for (int i = 0; i < 6; ++i) {
        g[i] = grads[i];
        w[i] = 8;
    }
    CHECK_OP(adamw(c, &a));
    for (int i = 0; i < 6; ++i) {
        double want = 8 - 0.125 * ((g[i] > 0) - (g[i] < 0) + 0.25 * 8);
        CHECK_SAY(fabs((double)w[i] - want) <= 2e-6, "w %.9g after a gradient of %g, not %.9g", (double)w[i],
                  (double)g[i], want);
    }
    CHECK(m[5] == 0 && v[5] == 0);
}

/* ---- refusals ---- */

#define REFUSED(call, status, words) CHECK_REFUSED(c->ops->call, UPIPE_ERR_##status, c->err, words)
/* The view x with one thing changed. */
#define WITH(change) (v = x, (change), v)

static inline void check_pointwise_statuses(upipe_ctx *c)
{
    float buf[96];
    upipe_view x = upipe_view_packed(buf, UPIPE_F32, 2, 2, 8), y = x, z = x, v;
    double out;
    y.data = buf + 32;
    z.data = buf + 64;
    memset(buf, 0, sizeof buf);
    REFUSED(add(c, x, WITH((v.data = y.data, v.d = 7))), ARG, "x is [2][2][7], not [2][2][8]");
    REFUSED(add(c, WITH(v.h_stride = 4), x), ARG, "y (f32, strides 16, 4) lies over x (f32, strides 16, 8)");
    REFUSED(add(c, WITH(v.dtype = (upipe_dtype)9), y), UNSUPPORTED, "storage type 9");
    REFUSED(add(c, x, WITH(v.data = NULL)), ARG, "x is NULL");
    REFUSED(scale(c, x, WITH((v.data = y.data, v.d = 7)), 2), ARG, "x is [2][2][7], not [2][2][8]");
    REFUSED(scale(c, WITH(v.h_stride = 4), x, 2), ARG,
            "y (f32, strides 16, 4) lies over x (f32, strides 16, 8)");
    REFUSED(scale(c, WITH(v.dtype = (upipe_dtype)9), y, 2), UNSUPPORTED, "storage type 9");
    REFUSED(scale(c, x, y, INFINITY), ARG, "factor inf");
    REFUSED(gate(c, UPIPE_GATE_SILU, WITH(v.data = NULL), x, y), ARG, "y is NULL");
    REFUSED(gate(c, UPIPE_GATE_SILU, x, WITH(v.data = NULL), y), ARG, "gate is NULL");
    REFUSED(gate(c, UPIPE_GATE_SILU, x, y, WITH(v.data = NULL)), ARG, "up is NULL");
    REFUSED(gate(c, UPIPE_GATE_SILU, WITH(v.dtype = UPIPE_BF16), x, y), ARG, "lies over gate");
    REFUSED(gate(c, UPIPE_GATE_SILU, WITH(v.dtype = UPIPE_BF16), y, x), ARG, "lies over up");
    REFUSED(gate_bwd(c, UPIPE_GATE_SILU, x, x, y), ARG, "gate and up are the same memory");
    REFUSED(gate_bwd(c, UPIPE_GATE_SILU, x, y, x), ARG, "gate and dy are the same memory");
    REFUSED(gate_bwd(c, UPIPE_GATE_SILU, x, y, y), ARG, "up and dy are the same memory");
    REFUSED(gate_bwd(c, UPIPE_GATE_SILU, x, y, (v = z, v.n = 1, v)), ARG, "gate is [2][2][8], not [1][2][8]");
    REFUSED(gate(c, (upipe_gate_kind)3, x, y, z), ARG, "gate: kind 3 is none of silu, gelu and sigmoid");
    REFUSED(gate_bwd(c, (upipe_gate_kind)3, x, y, z), ARG, "gate_bwd: kind 3 is none of");
    REFUSED(total(c, NULL, x, 0), ARG, "out is NULL");
    REFUSED(total(c, &out, (v = z, v.n = 1, v.data = NULL, v), 0), ARG, "x is NULL");
    /* no rows: no memory needed */
    v.n = 0;
    CHECK_OP(add(c, v, v));
    CHECK_OP(scale(c, v, v, 2));
    CHECK_OP(gate(c, UPIPE_GATE_SILU, v, v, v));
    CHECK_OP(gate_bwd(c, UPIPE_GATE_SILU, v, v, v));
}

static inline void check_token_statuses(upipe_ctx *c)
{
    float buf[64], loss[2];
    int32_t ids[2] = {1, 0};
    upipe_view x = upipe_view_packed(buf, UPIPE_F32, 2, 1, 8), y = x, none, v;
    upipe_cross_entropy a;
    memset(buf, 0, sizeof buf);
    memset(&none, 0, sizeof none);
    y.data = buf + 32;
#define LOSS(logits, grad, losses, targets) \
    cross_entropy(c, (a = cross_entropy_of(logits, grad, losses, targets, 1), &a))
    REFUSED(LOSS(x, none, NULL, ids), ARG, "loss is NULL");
    REFUSED(LOSS(x, none, loss, NULL), ARG, "targets is NULL");
    REFUSED(LOSS(none, none, loss, ids), ARG, "logits");
    REFUSED(LOSS(WITH(v.dtype = UPIPE_BF16), none, loss, ids), ARG, "logits are bf16 [2][1][8]");
    REFUSED(LOSS(x, WITH(v.dtype = UPIPE_BF16), loss, ids), ARG,
            "grad (bf16, strides 8, 8) lies over logits (f32, strides 8, 8)");
    REFUSED(LOSS(upipe_view_packed(buf, UPIPE_F32, 1, 2, 8), none, loss, ids), ARG, "[1][2][8]");
    REFUSED(LOSS(x, (v = y, v.d = 7, v), loss, ids), ARG, "grad is [2][1][7], not [2][1][8]");
    v = x;
    v.n = 0;
    v.data = NULL;
    CHECK_OP(LOSS(v, none, NULL, NULL));
    CHECK_OP(embed(c, v, y, NULL));
    CHECK_OP(embed_bwd(c, y, v, NULL));
#undef LOSS
    REFUSED(embed(c, x, y, NULL), ARG, "tokens is NULL");
    REFUSED(embed(c, x, (v = y, v.d = 7, v), ids), ARG, "rows [2][1][8] of a table [2][1][7]");
    REFUSED(embed_bwd(c, (v = y, v.dtype = UPIPE_BF16, v), x, ids), ARG, "is bf16, not f32");
}

#undef WITH

static inline void check_adamw_statuses(upipe_ctx *c)
{
    float buf[32];
    upipe_adamw good = adamw_of(4, 1, 0), a;
    int i;
    for (i = 0; i < 32; ++i) buf[i] = 1;
    good.w = buf;
    good.m = buf + 4;
    good.v = buf + 8;
    good.g = buf + 12;
#define REFUSED_WITH(field, value, words)                                 \
    do {                                                                  \
        REFUSED(adamw(c, (a = good, a.field = (value), &a)), ARG, words); \
        for (i = 0; i < 32; ++i) CHECK(buf[i] == 1);                      \
    } while (0)
    REFUSED_WITH(w, NULL, "w is NULL");
    REFUSED_WITH(m, NULL, "m is NULL");
    REFUSED_WITH(v, NULL, "v is NULL");
    REFUSED_WITH(g, NULL, "g is NULL");
    REFUSED_WITH(n, -3, "-3 elements");
    REFUSED_WITH(step, 0, "step 0");
    REFUSED_WITH(beta1, 1, "betas 1, 0.999");
    REFUSED_WITH(beta1, NAN, "betas nan");
    REFUSED_WITH(beta2, -0.5, "betas 0.9, -0.5");
    REFUSED_WITH(beta2, 1, "betas 0.9, 1");
    REFUSED_WITH(rate, -1, "rate -1");
    REFUSED_WITH(eps, -1e-8, "eps -1e-08");
    REFUSED_WITH(decay, -2, "decay -2");
    REFUSED_WITH(rate, INFINITY, "rate inf");
    REFUSED_WITH(grad_scale, NAN, "gradients times nan");
    REFUSED_WITH(grad_scale, INFINITY, "gradients times inf");
    REFUSED_WITH(grad_scale, 1e300, "gradients times 1e+300");
    REFUSED_WITH(copy, buf, "w and copy are the same memory");
    REFUSED_WITH(v, buf + 4, "m and v are the same memory");
    REFUSED_WITH(g, buf, "w and g are the same memory");
#undef REFUSED_WITH
    REFUSED(adamw(c, (a = good, a.copy = buf + 16, a.copy_dtype = (upipe_dtype)7, &a)), UNSUPPORTED,
            "storage type 7");
    CHECK_OP(adamw(c, (a = good, a.n = 0, a.w = NULL, &a)));
}

#undef REFUSED

static inline void check_train_statuses(upipe_ctx *c)
{
    check_pointwise_statuses(c);
    check_token_statuses(c);
    check_adamw_statuses(c);
}

static inline void check_train_ops(test_rng *r, upipe_ctx *c, int most_columns)
{
    static const int columns[] = {1, 7, 8, 9, 63, 200, 1003, 32003};
    const int all = TYPES;
    for (int pick = 0; pick < TRAIN_DIMS; ++pick)
        for (int which = 0; which < all * all * FEW; ++which) {
            int d = train_dims[pick], layout = which / (all * all), one = which % all,
                two = which / all % all;
            /* each three of types in one of the layouts */
            check_gated(r, c, (upipe_gate_kind)((which + which / all + pick) % GATES), d, (upipe_dtype)one,
                        (upipe_dtype)two, (upipe_dtype)((one + two + layout) % all), layout);
            check_add(r, c, d, (upipe_dtype)one, (upipe_dtype)two, layout);
            check_scale(r, c, d, (upipe_dtype)one, (upipe_dtype)two, layout);
            check_embed(r, c, d, (upipe_dtype)one, (upipe_dtype)two, layout);
            if (two != UPIPE_F32) continue;
            check_total(r, c, d, (upipe_dtype)one, layout);
            check_bias_bwd(r, c, d, (upipe_dtype)one, layout);
            check_bias(r, c, d, (upipe_dtype)one, layout);
        }
    for (int pick = 0; pick < TRAIN_DIMS; ++pick)
        for (int which = 0; which < 6; ++which) check_adamw(r, c, train_dims[pick], which % 3, which / 3);
    for (int pick = 0; pick < (int)(sizeof columns / sizeof *columns) && columns[pick] <= most_columns;
         ++pick)
        for (int which = 0; which < 3; ++which)
            check_cross_entropy(r, c, columns[pick], UPIPE_BF16,
                                which == 0   ? 1.0f
                                : which == 1 ? 0.037f
                                             : -2.0f);
    for (int pick = 0; pick < (int)(sizeof columns / sizeof *columns) && columns[pick] <= most_columns;
         ++pick)
        check_cross_entropy_capped(r, c, columns[pick], UPIPE_BF16, pick % 2 ? 4.0f : 30.0f);
    check_rmsnorm_long(r, c, 6);
    check_rmsnorm_long(r, c, 9);
    check_rmsnorm_long(r, c, 2051);
    for (int kind = 0; kind < GATES; ++kind) check_gated_ends(c, (upipe_gate_kind)kind);
    check_cross_entropy_ends(c);
    check_total_range(c);
    check_adamw_first(c);
}

#endif

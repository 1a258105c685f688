/* test_linear -- the rules of linear attention against f64, token by token: out, state and every gradient; their bits over
 * cuts, packed documents, threads and ranks; gates at both ends, and long sequences
 */
#include "upipe/net/upipe_net_threads.h"
#include "upipe/upipe.h"
#include "upipe/cpu/upipe_cpu_linear.h"

#include "lib/context.h"
#include "lib/workers.h"

/* What a call has: inputs, results and gradients, f32, packed, on the list of memory.h. */
typedef struct linear {
    int64_t n;
    int key_heads, heads, key_dim, value_dim, chunk, delta;
    upipe_borders borders;
    float *q, *k, *v, *g, *beta, *state; /* inputs */
    float *dout, *dend;                  /* gradients of o and of the state behind the last token */
    float *o, *end, *dq, *dk, *dv, *dg, *dbeta, *dstate;
} linear;

enum { INPUTS = 8, RESULTS = 8, DG = 5, DBETA = 6, SIZES = 2 };

static int64_t count_of(const linear *x, int i)
{
    const int64_t key = x->n * x->key_heads * x->key_dim, value = x->n * x->heads * x->value_dim,
                  gate = x->n * x->heads, state = (int64_t)x->heads * x->key_dim * x->value_dim;
    const int64_t counts[INPUTS + RESULTS] = {key,   key,   value, gate, gate,  state, value, state,
                                              value, state, key,   key,  value, gate,  gate,  state};
    return counts[i];
}

static float **field_of(linear *x, int i)
{
    float **const fields[INPUTS + RESULTS] = {&x->q,    &x->k,    &x->v,     &x->g,     &x->beta, &x->state,
                                              &x->dout, &x->dend, &x->o,     &x->end,   &x->dq,   &x->dk,
                                              &x->dv,   &x->dg,   &x->dbeta, &x->dstate};
    return fields[i];
}

static const char *const result_names[RESULTS] = {"o", "end", "dq", "dk", "dv", "dg", "dbeta", "dstate"};

/* Rows of q and k of length 1, as the models have them; gates by `gate`: the mean logarithm of a decay. */
static void draw(linear *x, test_rng *r, double gate)
{
    for (int i = 0; i < INPUTS + RESULTS; ++i) *field_of(x, i) = floats(count_of(x, i));
    for (int i = 0; i < INPUTS; ++i)
        for (int64_t j = 0; j < count_of(x, i); ++j) (*field_of(x, i))[j] = (float)test_normal(r);
    for (int64_t j = 0; j < count_of(x, 3); ++j) {
        x->g[j] = (float)(-gate * (double)(test_below(r, 1000) + 1) / 500);
        x->beta[j] = (float)(test_below(r, 1001)) / 1000;
    }
    for (int64_t row = 0; row < x->n * x->key_heads; ++row) {
        double q = 0, k = 0;
        for (int e = 0; e < x->key_dim; ++e) {
            q += pow((double)x->q[row * x->key_dim + e], 2);
            k += pow((double)x->k[row * x->key_dim + e], 2);
        }
        for (int e = 0; e < x->key_dim; ++e) {
            x->q[row * x->key_dim + e] /= (float)sqrt(q);
            x->k[row * x->key_dim + e] /= (float)sqrt(k);
        }
    }
}

/* ---- the oracle ---- */

static int begins(const linear *x, int64_t pos)
{
    for (int64_t i = 0; x->borders.cu_seqlens != NULL && i <= x->borders.cu_seqlens_n; ++i)
        if (x->borders.cu_seqlens[i] == pos) return 1;
    return 0;
}

/* What is left of the state when token t comes. */
static double decay_of(const linear *x, int64_t t, int h)
{
    return begins(x, t) ? 0 : exp((double)x->g[t * x->heads + h]);
}

/* One head, token by token: results in f64, at the places of the f32 ones. Behind them the sizes of dg and dbeta, which are
 * sums of products over a whole state, or a row of it: the root of the sum of their squares. */
static void oracle_head(const linear *x, int h, double *const *out)
{
    const int K = x->key_dim, V = x->value_dim, kh = h / (x->heads / x->key_heads);
    const double scale = 1 / sqrt(K);
    double *S = (double *)zeroed((size_t)((x->n + 1) * K * V) * 8),
           *u = (double *)zeroed((size_t)(x->n * V) * 8), *dS = (double *)zeroed((size_t)(K * V) * 8),
           *du = (double *)zeroed((size_t)V * 8);
    for (int e = 0; e < K * V; ++e) S[e] = (double)x->state[h * K * V + e];
    for (int64_t t = 0; t < x->n; ++t) {
        const float *q = x->q + (t * x->key_heads + kh) * K, *k = x->k + (t * x->key_heads + kh) * K,
                    *v = x->v + (t * x->heads + h) * V;
        const double decay = decay_of(x, t, h), beta = (double)x->beta[t * x->heads + h];
        const double *was = S + t * K * V;
        double *now = S + (t + 1) * K * V;
        for (int b = 0; b < V; ++b) {
            double seen = 0, o = 0;
            for (int a = 0; a < K; ++a) seen += decay * was[a * V + b] * (double)k[a];
            u[t * V + b] = x->delta ? beta * ((double)v[b] - seen) : (double)v[b];
            for (int a = 0; a < K; ++a) {
                now[a * V + b] = decay * was[a * V + b] + (double)k[a] * u[t * V + b];
                o += now[a * V + b] * (double)q[a];
            }
            out[0][(t * x->heads + h) * V + b] = scale * o;
        }
    }
    for (int e = 0; e < K * V; ++e) {
        out[1][h * K * V + e] = S[x->n * K * V + e];
        dS[e] = (double)x->dend[h * K * V + e];
    }
    for (int64_t t = x->n - 1; t >= 0; --t) {
        const float *q = x->q + (t * x->key_heads + kh) * K, *k = x->k + (t * x->key_heads + kh) * K,
                    *v = x->v + (t * x->heads + h) * V, *dout = x->dout + (t * x->heads + h) * V;
        double *dq = out[2] + (t * x->key_heads + kh) * K, *dk = out[3] + (t * x->key_heads + kh) * K;
        const double decay = decay_of(x, t, h), beta = (double)x->beta[t * x->heads + h];
        const double *was = S + t * K * V, *now = was + K * V;
        double dg = 0, dbeta = 0, dg_size = 0, dbeta_size = 0;
        for (int b = 0; b < V; ++b) {
            double seen = 0;
            du[b] = 0;
            for (int a = 0; a < K; ++a) {
                dS[a * V + b] += scale * (double)q[a] * (double)dout[b];
                dq[a] += scale * now[a * V + b] * (double)dout[b];
                du[b] += dS[a * V + b] * (double)k[a];
                dk[a] += dS[a * V + b] * u[t * V + b];
                seen += decay * was[a * V + b] * (double)k[a];
            }
            out[4][(t * x->heads + h) * V + b] = x->delta ? beta * du[b] : du[b];
            dbeta += du[b] * ((double)v[b] - seen);
            dbeta_size += pow(du[b] * ((double)v[b] - seen), 2);
            for (int a = 0; a < K; ++a) {
                if (x->delta) {
                    dS[a * V + b] -= beta * (double)k[a] * du[b];
                    dk[a] -= beta * decay * was[a * V + b] * du[b];
                }
                dg += decay * was[a * V + b] * dS[a * V + b];
                dg_size += pow(decay * was[a * V + b] * dS[a * V + b], 2);
                dS[a * V + b] *= decay;
            }
        }
        out[DG][t * x->heads + h] = dg;
        out[DBETA][t * x->heads + h] = x->delta ? dbeta : 0;
        out[RESULTS][t * x->heads + h] = sqrt(dg_size);
        out[RESULTS + 1][t * x->heads + h] = sqrt(dbeta_size);
    }
    for (int e = 0; e < K * V; ++e) out[7][h * K * V + e] = dS[e];
}

static void oracle(linear *x, double **out)
{
    for (int i = 0; i < RESULTS + SIZES; ++i)
        out[i] = (double *)zeroed((size_t)count_of(x, INPUTS + (i < RESULTS ? i : DG)) * 8);
    for (int h = 0; h < x->heads; ++h) oracle_head(x, h, out);
}

/* ---- the library ---- */

/* Rows [first, first + n) of heads [head, head + heads), key heads likewise, as a call. */
static upipe_linear_grad call_of(const linear *x, int64_t first, int64_t n, int64_t pos)
{
    const int K = x->key_dim, V = x->value_dim, H = x->heads, Hk = x->key_heads;
    upipe_linear_grad c = {0};
    upipe_linear *a = &c.a;
#define ROWS(p, h, d) upipe_view_packed((p) + first * (h) * (d), UPIPE_F32, n, h, d)
    a->q = ROWS(x->q, Hk, K), a->k = ROWS(x->k, Hk, K), a->v = ROWS(x->v, H, V), a->o = ROWS(x->o, H, V);
    a->g = ROWS(x->g, H, 1);
    if (x->delta) a->beta = ROWS(x->beta, H, 1);
    a->pos = pos, a->borders = x->borders, a->chunk = x->chunk;
    c.dout = ROWS(x->dout, H, V), c.dq = ROWS(x->dq, Hk, K), c.dk = ROWS(x->dk, Hk, K),
    c.dv = ROWS(x->dv, H, V);
    c.dg = ROWS(x->dg, H, 1), c.dbeta = ROWS(x->dbeta, H, 1);
#undef ROWS
    return c;
}

static upipe_linear_ops rules;

static void work_begin(upipe_ctx *c, upipe_linear *a, upipe_linear_pass pass)
{
    a->work_bytes = upipe_linear_bytes(c, &rules, a, pass);
    a->work = slab_of(a->work_bytes);
}

/* Forward and backward in these parts, [0, cuts[0]), [cuts[0], cuts[1]) and so on, the last of them ends at n. */
static void run(linear *x, upipe_ctx *c, const int64_t *cuts, int parts)
{
    float *states = floats(count_of(x, 5) * (parts + 1));
    memcpy(states, x->state, (size_t)count_of(x, 5) * 4);
    for (int i = 0; i < parts; ++i) {
        const int64_t first = i > 0 ? cuts[i - 1] : 0;
        upipe_linear_grad g = call_of(x, first, cuts[i] - first, first);
        g.a.state = states + i * count_of(x, 5);
        g.a.out = states + (i + 1) * count_of(x, 5);
        work_begin(c, &g.a, UPIPE_LINEAR_FWD);
        CHECK_STATUS(upipe_linear_fwd(c, &rules, &g.a), UPIPE_OK, c->err);
    }
    memcpy(x->end, states + parts * count_of(x, 5), (size_t)count_of(x, 5) * 4);
    memcpy(x->dstate, x->dend, (size_t)count_of(x, 5) * 4);
    for (int i = parts - 1; i >= 0; --i) {
        const int64_t first = i > 0 ? cuts[i - 1] : 0;
        upipe_linear_grad g = call_of(x, first, cuts[i] - first, first);
        g.a.state = states + i * count_of(x, 5);
        g.dstate = x->dstate;
        work_begin(c, &g.a, UPIPE_LINEAR_BWD);
        CHECK_STATUS(upipe_linear_bwd(c, &rules, &g), UPIPE_OK, c->err);
    }
}

/* No result is further from f64 than 16 units in the last place of its largest number, or size, however long the sequence
 * is. */
static void check_close(linear *x, const char *what)
{
    const double bound = 16 * 0x1p-23;
    double *want[RESULTS + SIZES];
    oracle(x, want);
    for (int i = 0; i < RESULTS; ++i) {
        double far = 0, most = 1e-30;
        for (int64_t j = 0; j < count_of(x, INPUTS + i); ++j) {
            const double d = fabs((double)(*field_of(x, INPUTS + i))[j] - want[i][j]);
            if (!(d <= far)) far = d;
            most = fmax(most, fabs(want[i][j]));
            if (i == DG || i == DBETA) most = fmax(most, want[i - DG + RESULTS][j]);
        }
        CHECK_SAY(far <= bound * most, "%s: %s is %.3g away of at most %.3g: %.3g, not %.3g", what,
                  result_names[i], far, most, far / most, bound);
    }
}

static void test_close(upipe_ctx *c)
{
    test_rng r = {7};
    for (int i = 0; i < 60; ++i) {
        static const int dims[] = {1, 7, 16, 24, 40, 64};
        static const double gates[] = {1e-4, 0.02, 0.5, 5};
        linear x = {.n = 1 + test_below(&r, 150), .delta = i % 2};
        int64_t cu[6], cuts[3];
        char what[100];
        x.key_heads = 1 + test_below(&r, 2);
        x.heads = x.key_heads * (1 + test_below(&r, 2));
        x.key_dim = dims[test_below(&r, 6)], x.value_dim = dims[test_below(&r, 6)];
        x.chunk = test_below(&r, 3) ? 1 + test_below(&r, 70) : 0;
        for (int j = 0; j < 6; ++j) cu[j] = j == 0 ? test_below(&r, 9) : cu[j - 1] + test_below(&r, 40);
        if (i % 3 == 0) x.borders = (upipe_borders){cu, 5};
        for (int j = 0; j < 3; ++j)
            cuts[j] = j == 2 ? x.n : (j > 0 ? cuts[0] : 0) + test_below(&r, (int)x.n / 2 + 1);
        draw(&x, &r, gates[i % 4]);
        snprintf(what, sizeof what, "%lld tokens, %d/%d heads of %d x %d, chunk %d, %s%s", (long long)x.n,
                 x.heads, x.key_heads, x.key_dim, x.value_dim, x.chunk, x.delta ? "delta" : "decay",
                 x.borders.cu_seqlens ? ", borders" : "");
        run(&x, c, i % 5 < 3 ? &x.n : cuts, i % 5 < 3 ? 1 : 3);
        check_close(&x, what);
        buffers_free(0);
    }
}

/* The oracle's gradients are those of its results: sum o dout + sum end dend, whose inputs are moved one by one. */
static double oracle_loss(linear *x)
{
    double *out[RESULTS + SIZES], sum = 0;
    oracle(x, out);
    for (int64_t j = 0; j < count_of(x, 2); ++j) sum += out[0][j] * (double)x->dout[j];
    for (int64_t j = 0; j < count_of(x, 5); ++j) sum += out[1][j] * (double)x->dend[j];
    return sum;
}

static void test_oracle(void)
{
    static const int gradient[6] = {2, 3, 4, 5, 6, 7}; /* of q, k, v, g, beta, state */
    const int64_t cu[] = {3, 9};
    test_rng r = {3};
    for (int delta = 0; delta < 2; ++delta) {
        linear x = {.n = 12, .key_heads = 1, .heads = 2, .key_dim = 3, .value_dim = 2, .delta = delta};
        double *out[RESULTS + SIZES];
        x.borders = (upipe_borders){cu, 1};
        draw(&x, &r, 0.3);
        oracle(&x, out);
        for (int i = 0; i < 5 + delta; ++i) {
            const int field = delta || i < 4 ? i : 5;
            for (int64_t j = 0; j < count_of(&x, field); ++j) {
                float *at = *field_of(&x, field) + j, was = *at;
                double high, low, step;
                *at = was + 0x1p-10f, high = oracle_loss(&x), step = (double)*at;
                *at = was - 0x1p-10f, low = oracle_loss(&x), step -= (double)*at;
                *at = was;
                CHECK_SAY(fabs((high - low) / step - out[gradient[field]][j]) < 1e-5,
                          "gradient %s[%lld] is %g, not %g", result_names[gradient[field]], (long long)j,
                          out[gradient[field]][j], (high - low) / step);
            }
        }
        buffers_free(0);
    }
}

/* ---- bits ---- */

/* The same inputs, results of its own. */
static linear twin_of(linear *x)
{
    linear y = *x;
    for (int i = INPUTS; i < INPUTS + RESULTS; ++i) *field_of(&y, i) = floats(count_of(&y, i));
    return y;
}

static void check_bits(linear *x, linear *y, const char *what)
{
    for (int i = INPUTS; i < INPUTS + RESULTS; ++i)
        CHECK_SAY(memcmp(*field_of(x, i), *field_of(y, i), (size_t)count_of(x, i) * 4) == 0,
                  "%s: %s has other bits", what, result_names[i - INPUTS]);
}

/* Cuts at multiples of the chunk, and the host's threads. */
static void test_bits(upipe_ctx *c, upipe_ops *ops)
{
    static const int64_t cuts[] = {32, 64, 160, 171}, borders[] = {10, 33, 100, 171};
    test_rng r = {11};
    for (int i = 0; i < 4; ++i) {
        linear x = {.n = 171,
                    .key_heads = 3,
                    .heads = 6,
                    .key_dim = 24,
                    .value_dim = 40,
                    .chunk = 32,
                    .delta = i % 2},
               y;
        if (i / 2) x.borders = (upipe_borders){borders, 3};
        draw(&x, &r, 0.05);
        run(&x, c, &x.n, 1);
        y = twin_of(&x);
        run(&y, c, cuts, 4);
        check_bits(&x, &y, "cuts");
        for (int kind = 0; kind < WORKERS_KINDS; ++kind) {
            host_threads w;
            workers_begin(&w, kind);
            ops->par = &w.par;
            y = twin_of(&x);
            run(&y, c, &y.n, 1);
            check_bits(&x, &y, "threads");
            workers_end(&w);
            ops->par = NULL;
        }
        buffers_free(0);
    }
}

/* Rows [first, first + n) as a sequence of their own. */
static linear rows_of(linear *x, int64_t first, int64_t n)
{
    linear y = *x;
    y.n = n;
    for (int i = 0; i < INPUTS + RESULTS; ++i)
        if (i != 5 && i != 7 && i != INPUTS + 1 && i != INPUTS + 7)
            *field_of(&y, i) += first * (count_of(x, i) / x->n);
    return y;
}

/* Packed documents have the bits of the documents alone, where borders are multiples of the chunk. */
static void test_documents(upipe_ctx *c)
{
    static const int64_t borders[] = {0, 32, 96, 96, 128, 150};
    test_rng r = {13};
    for (int delta = 0; delta < 2; ++delta) {
        linear x = {.n = 150,
                    .key_heads = 1,
                    .heads = 2,
                    .key_dim = 16,
                    .value_dim = 24,
                    .chunk = 32,
                    .delta = delta},
               y;
        float *zeros;
        x.borders = (upipe_borders){borders, 5};
        draw(&x, &r, 0.05);
        run(&x, c, &x.n, 1);
        y = twin_of(&x);
        y.borders = (upipe_borders){0};
        zeros = floats(count_of(&x, 5));
        for (int i = 0; i < 5; ++i) {
            linear z = rows_of(&y, borders[i], borders[i + 1] - borders[i]);
            z.state = zeros;
            if (i < 4) z.dend = zeros;
            if (z.n > 0) run(&z, c, &z.n, 1);
        }
        memset(y.dstate, 0, (size_t)count_of(&y, 5) * 4);
        check_bits(&x, &y, "documents");
        buffers_free(0);
    }
}

/* Elements of two bytes: the bits of f32 with the same inputs, rounded once. */
static void test_types(upipe_ctx *c)
{
    test_rng r = {17};
    linear x = {.n = 70, .key_heads = 2, .heads = 4, .key_dim = 24, .value_dim = 40, .delta = 1};
    draw(&x, &r, 0.05);
    for (upipe_dtype t = UPIPE_BF16; t <= UPIPE_F16; ++t) {
        upipe_linear_grad g = call_of(&x, 0, x.n, 0), h;
        upipe_view *views[8] = {&h.a.q, &h.a.k, &h.a.v, &h.dout, &h.a.o, &h.dq, &h.dk, &h.dv};
        h = g;
        for (int i = 0; i < 8; ++i) {
            const int64_t n = views[i]->n * views[i]->h * views[i]->d;
            float *wide = (float *)views[i]->data;
            views[i]->data = zeroed((size_t)n * 2);
            views[i]->dtype = t;
            for (int64_t j = 0; i < 4 && j < n; ++j) {
                upipe_cpu_put(views[i]->data, t, j, wide[j]);
                wide[j] = upipe_cpu_get(views[i]->data, t, j);
            }
        }
        for (int way = 0; way < 2; ++way) {
            upipe_linear_grad *p = way ? &h : &g;
            p->a.state = x.state, p->a.out = x.end, p->dstate = x.dstate;
            memcpy(x.dstate, x.dend, (size_t)count_of(&x, 5) * 4);
            work_begin(c, &p->a, UPIPE_LINEAR_FWD);
            CHECK_STATUS(upipe_linear_fwd(c, &rules, &p->a), UPIPE_OK, c->err);
            work_begin(c, &p->a, UPIPE_LINEAR_BWD);
            CHECK_STATUS(upipe_linear_bwd(c, &rules, p), UPIPE_OK, c->err);
        }
        for (int i = 4; i < 8; ++i) {
            const upipe_view wide = i == 4 ? g.a.o : i == 5 ? g.dq : i == 6 ? g.dk : g.dv;
            for (int64_t j = 0; j < wide.n * wide.h * wide.d; ++j) {
                uint16_t want;
                upipe_cpu_put(&want, t, 0, ((const float *)wide.data)[j]);
                CHECK_BYTES((const uint16_t *)views[i]->data + j, &want, 2);
            }
        }
    }
}

/* ---- the numbers ---- */

/* Gates that close, -inf among them, beside gates that are open; a state that lasts for thousands of tokens. */
static void test_gates(upipe_ctx *c)
{
    static const float ends[] = {0, -0.0f, -1e-30f, -1e-7f, -90, -1e4f, -1e30f, -INFINITY};
    test_rng r = {19};
    for (int delta = 0; delta < 2; ++delta) {
        linear x = {.n = 200, .key_heads = 1, .heads = 2, .key_dim = 16, .value_dim = 24, .delta = delta};
        draw(&x, &r, 0.05);
        for (int64_t j = 0; j < x.n * x.heads; ++j)
            if (test_below(&r, 3) == 0)
                x.g[j] = ends[test_below(&r, 8)], x.beta[j] = (float)test_below(&r, 2);
        run(&x, c, &x.n, 1);
        check_close(&x, "gates at their ends");
        x.n = 200;
        for (int64_t j = 0; j < x.n * x.heads; ++j) x.g[j] = j % 2 ? 0 : -INFINITY;
        run(&x, c, &x.n, 1);
        check_close(&x, "one head with closed gates, one with open ones");
        buffers_free(0);
    }
}

/* The error does not grow with the length: gates of 1 - 1e-4, so that the state is that of ten thousand tokens. */
static void test_long(upipe_ctx *c)
{
    test_rng r = {23};
    for (int delta = 0; delta < 2; ++delta) {
        linear x = {.n = 8192, .key_heads = 1, .heads = 1, .key_dim = 8, .value_dim = 8, .delta = delta};
        draw(&x, &r, 1e-4);
        run(&x, c, &x.n, 1);
        check_close(&x, "8192 tokens");
        buffers_free(0);
    }
}

/* ---- over ranks ---- */

typedef struct pass {
    upipe_threads team;
    upipe_ops ops;
    linear *x;
    int64_t tokens;
    int stage_heads;
} pass;

typedef struct pass_rank {
    const pass *p;
    upipe_plan plan;
} pass_rank;

/* Heads first .. first + heads - 1, whose key heads are theirs alone. */
static upipe_linear_grad stage_of(const pass_rank *r, int first, int heads)
{
    const linear *x = r->p->x;
    upipe_linear_grad g =
        call_of(x, upipe_shard_pos(&r->plan.shard, 0), r->plan.local, upipe_shard_pos(&r->plan.shard, 0));
    const int group = x->heads / x->key_heads;
    upipe_view *const values[] = {&g.a.v, &g.a.o, &g.a.g, &g.a.beta, &g.dout, &g.dv, &g.dg, &g.dbeta};
    upipe_view *const keys[] = {&g.a.q, &g.a.k, &g.dq, &g.dk};
    for (int i = 0; i < 8; ++i) {
        if (values[i]->data == NULL) continue;
        values[i]->data = upipe_view_at(*values[i], 0, first);
        values[i]->h = heads;
    }
    for (int i = 0; i < 4; ++i) {
        keys[i]->data = upipe_view_at(*keys[i], 0, first / group);
        keys[i]->h = heads / group;
    }
    return g;
}

static upipe_status pass_fwd(upipe_ctx *c, void *user, int first, int heads, const float *in, float *out)
{
    upipe_linear_grad g = stage_of((const pass_rank *)user, first, heads);
    g.a.state = in, g.a.out = out;
    work_begin(c, &g.a, UPIPE_LINEAR_FWD);
    return upipe_linear_fwd(c, &rules, &g.a);
}

static upipe_status pass_bwd(upipe_ctx *c, void *user, int first, int heads, const float *state,
                             float *dstate)
{
    upipe_linear_grad g = stage_of((const pass_rank *)user, first, heads);
    g.a.state = state, g.dstate = dstate;
    work_begin(c, &g.a, UPIPE_LINEAR_BWD);
    return upipe_linear_bwd(c, &rules, &g);
}

static upipe_status pass_body(void *user, int rank)
{
    pass *p = (pass *)user;
    pass_rank r = {.p = p};
    upipe_plan_desc d = {
        .tokens = p->tokens, .ranks = p->team.ranks, .rank = rank, .heads = 8, .head_dim = 32};
    upipe_scan s = {
        .plan = &r.plan, .borders = p->x->borders, .heads = p->x->heads, .stage_heads = p->stage_heads};
    const size_t bytes = (size_t)count_of(p->x, 5) * 4;
    const int last = rank == p->team.ranks - 1;
    float *states = (float *)zeroed(bytes), *carry = (float *)zeroed(bytes);
    upipe_mem mem;
    upipe_ctx c = {.team = upipe_threads_comm(&p->team, rank)};
    context_pool(&c, &mem, &p->ops, 1 << 20, 8);
    UPIPE_TRY(upipe_plan_init(&r.plan, &d, &c.err));
    s.key_dim = p->x->key_dim, s.value_dim = p->x->value_dim;
    s.fwd = pass_fwd, s.bwd = pass_bwd, s.user = &r;
    if (rank == 0) memcpy(carry, p->x->state, bytes);
    UPIPE_TRY(upipe_scan_fwd(&c, c.team, &s, states, carry));
    if (rank == 0) memcpy(p->x->end, carry, bytes);
    if (last) memcpy(carry, p->x->dend, bytes);
    UPIPE_TRY(upipe_scan_bwd(&c, c.team, &s, states, carry));
    if (last) memcpy(p->x->dstate, carry, bytes);
    upipe_mem_destroy(&mem, NULL);
    return UPIPE_OK;
}

/* The pass has the bits of one rank where cuts are multiples of the chunk, for every number of ranks and heads of a stage. */
static void test_pass(void)
{
    static const int64_t borders[] = {20, 64, 100, 140};
    test_rng r = {29};
    for (int i = 0; i < 8; ++i) {
        linear x = {.n = 192,
                    .key_heads = 2,
                    .heads = 4,
                    .key_dim = 16,
                    .value_dim = 24,
                    .chunk = 16,
                    .delta = i % 2},
               y;
        upipe_err e;
        pass p = {.ops = cpu_table(), .x = &y, .tokens = 192, .stage_heads = i / 4 * 2};
        upipe_ctx c = {.ops = &p.ops};
        if (i / 2 % 2) x.borders = (upipe_borders){borders, 3};
        draw(&x, &r, 0.05);
        run(&x, &c, &x.n, 1);
        for (int ranks = 1; ranks <= 4; ++ranks) {
            y = twin_of(&x);
            CHECK_STATUS(upipe_threads_init(&p.team, ranks, 20, &e), UPIPE_OK, e);
            CHECK_STATUS(upipe_threads_run(&p.team, pass_body, &p, NULL, &e), UPIPE_OK, e);
            upipe_threads_free(&p.team);
            check_bits(&x, &y, "a pass over ranks");
        }
        buffers_free(0);
    }
}

/* ---- refusals ---- */

static void test_refusals(upipe_ctx *c)
{
    test_rng r = {31};
    linear x = {.n = 9, .key_heads = 1, .heads = 2, .key_dim = 8, .value_dim = 16, .delta = 1};
    upipe_linear_grad g, t;
    draw(&x, &r, 0.05);
    g = call_of(&x, 0, 9, 0);
    g.a.state = x.state, g.a.out = x.end, g.dstate = x.dstate;
    work_begin(c, &g.a, UPIPE_LINEAR_BWD);
#define REFUSED(change, status, words)                                                       \
    do {                                                                                     \
        t = g;                                                                               \
        change;                                                                              \
        CHECK_REFUSED(upipe_linear_fwd(c, &rules, &t.a), UPIPE_ERR_##status, c->err, words); \
        CHECK_REFUSED(upipe_linear_bwd(c, &rules, &t), UPIPE_ERR_##status, c->err, words);   \
    } while (0)
    REFUSED(t.a.q.d = 257, UNSUPPORTED, "a state of 257 x 16; 1 to 256 each are built");
    REFUSED(t.a.q.h = 3, ARG, "9 tokens, 2 heads over 3 key heads");
    REFUSED(t.a.k.n = 8, ARG, "k is [8][1][8], not [9][1][8]");
    REFUSED(t.a.v.dtype = UPIPE_BF16, ARG, "v is bf16, not f32");
    REFUSED(t.a.g.d = 2, ARG, "g is [9][2][2], not [9][2][1]");
    REFUSED(t.a.beta.n = 3, ARG, "beta is [3][2][1]");
    REFUSED(t.a.chunk = 257, ARG, "chunks of 257 tokens (at most 256)");
    REFUSED(t.a.pos = -1, ARG, "position -1");
    REFUSED(t.a.state = NULL, ARG, "the state is NULL");
    REFUSED(t.a.work_bytes = 64, ARG, "64 bytes of scratch");
    REFUSED(t.a.borders.cu_seqlens_n = 1, ARG, "1 packed documents");
#undef REFUSED
    t = g;
    CHECK_REFUSED((t.a.out = NULL, upipe_linear_fwd(c, &rules, &t.a)), UPIPE_ERR_ARG, c->err, "out is NULL");
    CHECK_REFUSED((t.a.o.h = 1, upipe_linear_fwd(c, &rules, &t.a)), UPIPE_ERR_ARG, c->err, "o is [9][1][16]");
    CHECK_REFUSED((t.dstate = NULL, upipe_linear_bwd(c, &rules, &t)), UPIPE_ERR_ARG, c->err,
                  "dstate is NULL");
    CHECK_REFUSED((t.dk.n = 1, upipe_linear_bwd(c, &rules, &t)), UPIPE_ERR_ARG, c->err, "dk is [1][1][8]");
    CHECK_REFUSED(upipe_linear_fwd(c, NULL, &t.a), UPIPE_ERR_ARG, c->err, "the rules or the call are NULL");
    CHECK_REFUSED(upipe_linear_bwd(c, &rules, NULL), UPIPE_ERR_ARG, c->err, "the rules or the call are NULL");
}

int main(void)
{
    upipe_ops ops = cpu_table();
    upipe_ctx c = {.ops = &ops};
    upipe_cpu_linear(&rules);
    test_oracle();
    test_close(&c);
    test_bits(&c, &ops);
    test_documents(&c);
    TEST(test_types(&c));
    test_gates(&c);
    test_long(&c);
    test_pass();
    TEST(test_refusals(&c));
    return test_end("linear");
}

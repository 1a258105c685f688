/* linear.h -- what the rules of linear attention promise, on any place: out, state and gradients against f64, token by
 *             token; bits over cuts, packed documents and layouts; types; gates at both ends, long sequences
 *
 *     upipe_cpu_linear(&rules);
 *     check_linear_drawn(c, 60, 150, 70);     c: a context whose calls the rules take; draws, tokens, tokens of a chunk
 *     check_linear_cuts(c, 3);                key heads
 *     check_linear_documents(c);
 *     check_linear_strides(c);
 *     check_linear_repeated(c);
 *     check_linear_types(c);
 *     check_linear_gates(c);
 *     check_linear_long(c);
 *     check_linear_small(c);
 *
 * Tensors lie in host memory, on the list of memory.h; rules of a device are staged.
 */
#ifndef UPIPE_TEST_LINEAR_H
#define UPIPE_TEST_LINEAR_H

#include "upipe/upipe_linear.h"
#include "upipe/cpu/upipe_cpu_simd.h"

#include "memory.h"
#include "test.h"

/* What a call has: inputs, results and gradients, f32, packed, on the list of memory.h. */
typedef struct linear {
    int64_t n, pos; /* tokens, and the position of the first one; not 0: for run alone */
    int key_heads, heads, key_dim, value_dim, chunk, delta;
    upipe_borders borders;
    float *q, *k, *v, *g, *beta, *state; /* inputs */
    float *dout, *dend;                  /* gradients of o and of the state behind the last token */
    float *o, *end, *dq, *dk, *dv, *dg, *dbeta, *dstate;
} linear;

enum { INPUTS = 8, RESULTS = 8, DG = 5, DBETA = 6, SIZES = 2 };

static inline int64_t count_of(const linear *x, int i)
{
    const int64_t key = x->n * x->key_heads * x->key_dim, value = x->n * x->heads * x->value_dim,
                  gate = x->n * x->heads, state = (int64_t)x->heads * x->key_dim * x->value_dim;
    const int64_t counts[INPUTS + RESULTS] = {key,   key,   value, gate, gate,  state, value, state,
                                              value, state, key,   key,  value, gate,  gate,  state};
    return counts[i];
}

static inline float **field_of(linear *x, int i)
{
    float **const fields[INPUTS + RESULTS] = {&x->q,    &x->k,    &x->v,     &x->g,     &x->beta, &x->state,
                                              &x->dout, &x->dend, &x->o,     &x->end,   &x->dq,   &x->dk,
                                              &x->dv,   &x->dg,   &x->dbeta, &x->dstate};
    return fields[i];
}

static const char *const result_names[RESULTS] = {"o", "end", "dq", "dk", "dv", "dg", "dbeta", "dstate"};

/* Rows of q and k of length 1, as the models have them; gates by `gate`: the mean logarithm of a decay. */
static inline void draw(linear *x, test_rng *r, double gate)
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

static inline int begins(const linear *x, int64_t pos)
{
    for (int64_t i = 0; x->borders.cu_seqlens != NULL && i <= x->borders.cu_seqlens_n; ++i)
        if (x->borders.cu_seqlens[i] == pos) return 1;
    return 0;
}

/* What is left of the state when token t comes. */
static inline double decay_of(const linear *x, int64_t t, int h)
{
    return begins(x, t) ? 0 : exp((double)x->g[t * x->heads + h]);
}

/* One head, token by token: results in f64, at the places of the f32 ones. Behind them the sizes of dg and dbeta, which are
 * sums of products over a whole state, or a row of it: the root of the sum of their squares. */
static inline void oracle_head(const linear *x, int h, double *const *out)
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

static inline void oracle(linear *x, double **out)
{
    for (int i = 0; i < RESULTS + SIZES; ++i)
        out[i] = (double *)zeroed((size_t)count_of(x, INPUTS + (i < RESULTS ? i : DG)) * 8);
    for (int h = 0; h < x->heads; ++h) oracle_head(x, h, out);
}

/* ---- the library ---- */

/* Rows [first, first + n) of heads [head, head + heads), key heads likewise, as a call. */
static inline upipe_linear_grad call_of(const linear *x, int64_t first, int64_t n, int64_t pos)
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

static inline void work_begin(upipe_ctx *c, upipe_linear *a, upipe_linear_direction pass)
{
    a->work_bytes = upipe_linear_bytes(c, &rules, a, pass);
    a->work = slab_of(a->work_bytes);
}

/* More chunks never take less scratch: those of the last rows, or of borders. */
static inline void check_linear_bytes(const upipe_ops *ops)
{
    static const int dims[][3] = {{1, 8, 8}, {1, 256, 256}, {64, 256, 256}, {64, 128, 128}, {64, 3, 5}};
    float beta = 0;
    for (int i = 0; i < 5 * 2 * 2 * 2; ++i) {
        const int *of = dims[i % 5], delta = i / 5 % 2, chunk = i / 10 % 2 ? 64 : 3;
        const upipe_linear_direction pass = i / 20 ? UPIPE_LINEAR_BWD : UPIPE_LINEAR_FWD;
        upipe_linear_grad g = {.a = {.chunk = chunk}};
        size_t before = 0;
        g.a.q = g.a.k = upipe_view_packed(NULL, UPIPE_BF16, 0, of[0], of[1]);
        g.a.v = g.a.o = upipe_view_packed(NULL, UPIPE_BF16, 0, of[0], of[2]);
        if (delta) g.a.beta.data = &beta;
        for (int64_t n = 1; n <= (of[0] == 64 ? 1500 : 600); ++n) {
            size_t bytes;
            g.a.q.n = g.a.k.n = g.a.v.n = g.a.o.n = n * chunk;
            bytes = rules.bytes(ops, &g.a, pass);
            CHECK(bytes >= before);
            before = bytes;
        }
    }
}

/* Forward and backward in these parts, [0, cuts[0]), [cuts[0], cuts[1]) and so on, the last of them ends at n. */
static inline void run(linear *x, upipe_ctx *c, const int64_t *cuts, int parts)
{
    float *states = floats(count_of(x, 5) * (parts + 1));
    memcpy(states, x->state, (size_t)count_of(x, 5) * 4);
    for (int i = 0; i < parts; ++i) {
        const int64_t first = i > 0 ? cuts[i - 1] : 0;
        upipe_linear_grad g = call_of(x, first, cuts[i] - first, x->pos + first);
        g.a.state = states + i * count_of(x, 5);
        g.a.out = states + (i + 1) * count_of(x, 5);
        work_begin(c, &g.a, UPIPE_LINEAR_FWD);
        CHECK_STATUS(upipe_linear_fwd(c, &rules, &g.a), UPIPE_OK, c->err);
    }
    memcpy(x->end, states + parts * count_of(x, 5), (size_t)count_of(x, 5) * 4);
    memcpy(x->dstate, x->dend, (size_t)count_of(x, 5) * 4);
    for (int i = parts - 1; i >= 0; --i) {
        const int64_t first = i > 0 ? cuts[i - 1] : 0;
        upipe_linear_grad g = call_of(x, first, cuts[i] - first, x->pos + first);
        g.a.state = states + i * count_of(x, 5);
        g.dstate = x->dstate;
        work_begin(c, &g.a, UPIPE_LINEAR_BWD);
        CHECK_STATUS(upipe_linear_bwd(c, &rules, &g), UPIPE_OK, c->err);
    }
}

/* No result is further from f64 than 16 units in the last place of its largest number, or size, however long the sequence
 * is. */
static inline void check_close(linear *x, const char *what)
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

/* ---- close to f64 ---- */

/* Random shapes: so many draws, of tokens and of tokens of a chunk at most. */
static inline void check_linear_drawn(upipe_ctx *c, int draws, int tokens, int chunk)
{
    test_rng r = {7};
    for (int i = 0; i < draws; ++i) {
        static const int dims[] = {1, 7, 16, 24, 40, 64};
        static const double gates[] = {1e-4, 0.02, 0.5, 5};
        linear x = {.n = 1 + test_below(&r, tokens), .delta = i % 2};
        int64_t cu[8] = {-1, [7] = 1000}, cuts[3]; /* the first document began before, the last one goes on */
        char what[100];
        x.key_heads = 1 + test_below(&r, 2);
        x.heads = x.key_heads * (1 + test_below(&r, 2));
        x.key_dim = dims[test_below(&r, 6)], x.value_dim = dims[test_below(&r, 6)];
        x.chunk = test_below(&r, 3) ? 1 + test_below(&r, chunk) : 0;
        for (int j = 0; j < 6; ++j) cu[1 + j] = j == 0 ? test_below(&r, 9) : cu[j] + test_below(&r, 40);
        if (i % 3 == 0) x.borders = (upipe_borders){cu, 7};
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

/* Gates that close, -inf among them, beside gates that are open; a state that lasts for thousands of tokens. */
static inline void check_linear_gates(upipe_ctx *c)
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
static inline void check_linear_long(upipe_ctx *c)
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

/* Nor do chunks of a token, nor states of few numbers, whose errors do not cancel out in sums. Decays are so near 1 that a
 * token's is less than a unit in the last place, or a few thousand of them. Numbers of one sign: none is a small difference. */
static inline void check_linear_small(upipe_ctx *c)
{
    test_rng r = {41};
    for (int i = 0; i < 24; ++i) {
        linear x = {.n = 700, .key_heads = 1, .heads = 2, .delta = i / 8 == 2};
        char what[100];
        x.key_dim = 1 + i % 2, x.value_dim = 1 + i / 2 % 2, x.chunk = i / 8 == 1 ? 16 : 1;
        draw(&x, &r, i / 4 % 2 ? 2e-8 : 1e-4);
        for (int f = 0; f < INPUTS; ++f)
            for (int64_t j = 0; f != 3 && j < count_of(&x, f); ++j)
                (*field_of(&x, f))[j] = fabsf((*field_of(&x, f))[j]);
        snprintf(what, sizeof what, "%d x %d, chunk %d, %s, g %g", x.key_dim, x.value_dim, x.chunk,
                 x.delta ? "delta" : "decay", (double)x.g[0]);
        run(&x, c, &x.n, 1);
        check_close(&x, what);
        buffers_free(0);
    }
}

/* ---- bits ---- */

/* The same inputs, results of its own. */
static inline linear twin_of(linear *x)
{
    linear y = *x;
    for (int i = INPUTS; i < INPUTS + RESULTS; ++i) *field_of(&y, i) = floats(count_of(&y, i));
    return y;
}

static inline void check_bits(linear *x, linear *y, const char *what)
{
    for (int i = INPUTS; i < INPUTS + RESULTS; ++i)
        CHECK_SAY(memcmp(*field_of(x, i), *field_of(y, i), (size_t)count_of(x, i) * 4) == 0,
                  "%s: %s has other bits", what, result_names[i - INPUTS]);
}

/* A shape that is cut at multiples of the chunk, i of LINEAR_CUTS. */
enum { LINEAR_CUTS = 4 };

static inline linear cut_shape(test_rng *r, int i, int key_heads)
{
    static const int64_t borders[] = {-1, 10, 33, 100, 171};
    linear x = {.n = 171,
                .key_heads = key_heads,
                .heads = 2 * key_heads,
                .key_dim = 24,
                .value_dim = 40,
                .chunk = 32,
                .delta = i % 2};
    if (i / 2) x.borders = (upipe_borders){borders, 4};
    draw(&x, r, 0.05);
    return x;
}

/* Cuts at multiples of the chunk change no bit, wherever among them the first token is. */
static inline void check_linear_cuts(upipe_ctx *c, int key_heads)
{
    static const int64_t cuts[][4] = {{32, 64, 160, 171}, {27, 59, 155, 171}}, pos[] = {0, 5},
                         borders[] = {-1, 10, 33, 100, 176};
    test_rng r = {11};
    for (int i = 0; i < 2 * LINEAR_CUTS; ++i) {
        linear x = cut_shape(&r, i % LINEAR_CUTS, key_heads), y;
        const int late = i / LINEAR_CUTS;
        x.pos = pos[late];
        if (late && x.borders.cu_seqlens != NULL) x.borders.cu_seqlens = borders;
        run(&x, c, &x.n, 1);
        y = twin_of(&x);
        run(&y, c, cuts[late], 4);
        check_bits(&x, &y, "cuts");
        buffers_free(0);
    }
}

/* Rows [first, first + n) as a sequence of their own. */
static inline linear rows_of(linear *x, int64_t first, int64_t n)
{
    linear y = *x;
    y.n = n;
    for (int i = 0; i < INPUTS + RESULTS; ++i)
        if (i != 5 && i != 7 && i != INPUTS + 1 && i != INPUTS + 7)
            *field_of(&y, i) += first * (count_of(x, i) / x->n);
    return y;
}

/* Packed documents have the bits of the documents alone, where borders are multiples of the chunk. */
static inline void check_linear_documents(upipe_ctx *c)
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

/* The views of a call: inputs, then as many results. */
enum { LINEAR_VIEWS = 12 };

static inline upipe_view *view_of(upipe_linear_grad *g, int i)
{
    upipe_view *const views[LINEAR_VIEWS] = {&g->a.q, &g->a.k, &g->a.v, &g->dout, &g->a.g, &g->a.beta,
                                             &g->a.o, &g->dq,  &g->dk,  &g->dv,   &g->dg,  &g->dbeta};
    return views[i];
}

/* A forward and a backward of one call. */
static inline void both_calls(upipe_ctx *c, upipe_linear_grad *g)
{
    work_begin(c, &g->a, UPIPE_LINEAR_FWD);
    CHECK_STATUS(upipe_linear_fwd(c, &rules, &g->a), UPIPE_OK, c->err);
    work_begin(c, &g->a, UPIPE_LINEAR_BWD);
    CHECK_STATUS(upipe_linear_bwd(c, &rules, g), UPIPE_OK, c->err);
}

/* Heads outside, and gaps behind every row: the bits of packed tensors, and what lies in gaps stays. */
static inline void check_linear_strides(upipe_ctx *c)
{
    enum { GAP = 3 };
    test_rng r = {37};
    for (int delta = 0; delta < 2; ++delta) {
        linear x = {.n = 70, .key_heads = 2, .heads = 4, .key_dim = 24, .value_dim = 40, .delta = delta};
        upipe_linear_grad g, apart;
        draw(&x, &r, 0.05);
        run(&x, c, &x.n, 1);
        apart = g = call_of(&x, 0, x.n, 0);
        for (int i = 0; i < LINEAR_VIEWS; ++i) {
            const upipe_view from = *view_of(&g, i);
            upipe_view *to = view_of(&apart, i);
            const int64_t step = from.d + GAP;
            if (from.data == NULL) continue;
            *to = upipe_view_make(buffer((size_t)(from.n * from.h * step) * 4), UPIPE_F32, from.n, step,
                                  from.h, from.n * step, from.d);
            for (int64_t j = 0; i < LINEAR_VIEWS / 2 && j < from.n * from.h; ++j)
                memcpy(upipe_view_at(*to, j / from.h, (int)(j % from.h)),
                       upipe_view_at(from, j / from.h, (int)(j % from.h)), (size_t)from.d * 4);
        }
        apart.a.state = x.state, apart.a.out = floats(count_of(&x, 5));
        apart.dstate = (float *)copy_of(x.dend, (size_t)count_of(&x, 5) * 4);
        both_calls(c, &apart);
        CHECK_BYTES(apart.a.out, x.end, count_of(&x, 5) * 4);
        CHECK_BYTES(apart.dstate, x.dstate, count_of(&x, 5) * 4);
        for (int i = LINEAR_VIEWS / 2; i < LINEAR_VIEWS - !delta; ++i) {
            const upipe_view want = *view_of(&g, i), got = *view_of(&apart, i);
            for (int64_t j = 0; j < want.n * want.h; ++j) {
                const float *row = (const float *)upipe_view_at(got, j / want.h, (int)(j % want.h));
                int whole = 1;
                for (int e = 0; e < GAP * 4; ++e) whole &= ((const unsigned char *)(row + want.d))[e] == 0xff;
                CHECK_BYTES(row, upipe_view_at(want, j / want.h, (int)(j % want.h)), want.d * 4);
                CHECK_SAY(whole, "view %d: what lies behind row %lld is written", i, (long long)j);
            }
        }
        buffers_free(0);
    }
}

/* Strides of 0 in what is read: the bits of tensors in which the same row is written out. */
static inline void check_linear_repeated(upipe_ctx *c)
{
    test_rng r = {71};
    for (int i = 0; i < 4; ++i) {
        linear x = {.n = 70, .key_heads = 2, .heads = 4, .key_dim = 24, .value_dim = 40, .delta = i % 2}, y;
        upipe_linear_grad g;
        draw(&x, &r, 0.05);
        y = twin_of(&x);
        g = call_of(&y, 0, y.n, 0);
        for (int j = 0; j < LINEAR_VIEWS / 2; ++j) {
            upipe_view *v = view_of(&g, j);
            const upipe_view packed = *v;
            if (v->data == NULL) continue;
            v->data = copy_of(packed.data, (size_t)(packed.n * packed.h * packed.d) * 4);
            v->n_stride = 0;
            if (i / 2) v->h_stride = 0;
            for (int64_t row = 0; row < packed.n * packed.h; ++row)
                memcpy(upipe_view_at(packed, row / packed.h, (int)(row % packed.h)),
                       upipe_view_at(*v, row / packed.h, (int)(row % packed.h)), (size_t)packed.d * 4);
        }
        run(&x, c, &x.n, 1);
        g.a.state = y.state, g.a.out = y.end, g.dstate = y.dstate;
        memcpy(y.dstate, y.dend, (size_t)count_of(&y, 5) * 4);
        both_calls(c, &g);
        check_bits(&x, &y, "strides of 0");
        buffers_free(0);
    }
}

/* Elements of two bytes: the bits of f32 with the same inputs, rounded once. */
static inline void check_linear_types(upipe_ctx *c)
{
    test_rng r = {17};
    for (int delta = 0; delta < 2; ++delta) {
        linear x = {.n = 70, .key_heads = 2, .heads = 4, .key_dim = 24, .value_dim = 40, .delta = delta};
        upipe_linear_grad g, h;
        upipe_view *views[8] = {&h.a.q, &h.a.k, &h.a.v, &h.dout, &h.a.o, &h.dq, &h.dk, &h.dv};
        draw(&x, &r, 0.05);
        h = g = call_of(&x, 0, x.n, 0);
        for (int i = 0; i < 8; ++i) {
            const int64_t n = views[i]->n * views[i]->h * views[i]->d;
            float *wide = (float *)views[i]->data;
            views[i]->data = zeroed((size_t)n * 2);
            views[i]->dtype = UPIPE_BF16;
            for (int64_t j = 0; i < 4 && j < n; ++j) {
                upipe_cpu_put(views[i]->data, UPIPE_BF16, j, wide[j]);
                wide[j] = upipe_cpu_get(views[i]->data, UPIPE_BF16, j);
            }
        }
        for (int way = 0; way < 2; ++way) {
            upipe_linear_grad *p = way ? &h : &g;
            p->a.state = x.state, p->a.out = x.end, p->dstate = x.dstate;
            memcpy(x.dstate, x.dend, (size_t)count_of(&x, 5) * 4);
            both_calls(c, p);
        }
        for (int i = 4; i < 8; ++i) {
            const upipe_view wide = i == 4 ? g.a.o : i == 5 ? g.dq : i == 6 ? g.dk : g.dv;
            for (int64_t j = 0; j < wide.n * wide.h * wide.d; ++j) {
                uint16_t want;
                upipe_cpu_put(&want, UPIPE_BF16, 0, ((const float *)wide.data)[j]);
                CHECK_BYTES((const uint16_t *)views[i]->data + j, &want, 2);
            }
        }
        buffers_free(0);
    }
}

#endif

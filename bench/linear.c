/* linear.c -- what bench/linear.py and bench/states.py call: the rules of linear attention, and the same in f64
 *
 * With kernels.c, so that the peak is measured with the same vectors, on the same threads:
 *
 *     bench *b = bench_open(threads);
 *     p.work_bytes = bench_linear_bytes(b, &p);
 *     const char *why = bench_linear(b, &p, 0);    forward; 1: backward; NULL: done
 */
#include "kernels.c"

#include "upipe/cpu/upipe_cpu_linear.h"

/* bench_rule -- one call of a rule, f32, packed
 *   q k dq dk         [tokens][key_heads][key_dim]
 *   v o dout dv       [tokens][heads][value_dim]
 *   g beta dg dbeta   [tokens][heads]; beta NULL: scalar decay
 *   state out         [heads][key_dim][value_dim]: before the first token, behind the last one
 *   dend dstate       likewise: their gradients
 *   work              work_bytes of bench_linear_bytes, 64-byte aligned
 *   first             position of the first token
 */
typedef struct bench_rule {
    float *q, *k, *v, *g, *beta, *state, *dout, *dend;
    float *o, *out, *dq, *dk, *dv, *dg, *dbeta, *dstate;
    void *work;
    int64_t work_bytes, tokens, first;
    int32_t key_heads, heads, key_dim, value_dim;
} bench_rule;

static upipe_linear_grad rule_of(const bench_rule *p)
{
    upipe_linear_grad g;
    memset(&g, 0, sizeof g);
#define ROWS(x, h, d) upipe_view_packed(p->x, UPIPE_F32, p->tokens, p->h, d)
    g.a.q = ROWS(q, key_heads, p->key_dim), g.a.k = ROWS(k, key_heads, p->key_dim);
    g.a.v = ROWS(v, heads, p->value_dim), g.a.o = ROWS(o, heads, p->value_dim);
    g.a.g = ROWS(g, heads, 1), g.a.beta = ROWS(beta, heads, 1);
    g.dout = ROWS(dout, heads, p->value_dim), g.dv = ROWS(dv, heads, p->value_dim);
    g.dq = ROWS(dq, key_heads, p->key_dim), g.dk = ROWS(dk, key_heads, p->key_dim);
    g.dg = ROWS(dg, heads, 1), g.dbeta = ROWS(dbeta, heads, 1);
#undef ROWS
    g.a.state = p->state, g.a.out = p->out, g.dstate = p->dstate;
    g.a.pos = p->first;
    g.a.work = p->work, g.a.work_bytes = (size_t)p->work_bytes;
    return g;
}

/* Scratch that serves the forward and the backward. */
int64_t bench_linear_bytes(bench *b, const bench_rule *p)
{
    const upipe_linear_grad g = rule_of(p);
    upipe_linear_ops rules;
    upipe_cpu_linear(&rules);
    return (int64_t)upipe_max_bytes(upipe_linear_bytes(&b->ctx, &rules, &g.a, UPIPE_LINEAR_FWD),
                                    upipe_linear_bytes(&b->ctx, &rules, &g.a, UPIPE_LINEAR_BWD));
}

/* The forward reads `state`, the backward `state` and `dend`. */
const char *bench_linear(bench *b, const bench_rule *p, int32_t backward)
{
    const upipe_linear_grad g = rule_of(p);
    const size_t bytes = (size_t)p->heads * (size_t)p->key_dim * (size_t)p->value_dim * sizeof(float);
    upipe_linear_ops rules;
    upipe_status status;
    upipe_cpu_linear(&rules);
    if (backward) memcpy(p->dstate, p->dend, bytes);
    status = backward ? upipe_linear_bwd(&b->ctx, &rules, &g) : upipe_linear_fwd(&b->ctx, &rules, &g.a);
    return status ? b->ctx.err.text : NULL;
}

/* ---- the products of a call, without what is between them ---- */

static struct bench_product {
    upipe_view out, a, b;
    int flags;
} * bench_list;
static int64_t bench_listed, bench_capacity;
static upipe_status (*bench_gemm)(upipe_ctx *, upipe_view, upipe_view, upipe_view, int, void *, size_t);

static upipe_status bench_note(upipe_ctx *c, upipe_view out, upipe_view a, upipe_view b, int flags,
                               void *work, size_t work_bytes)
{
    if (bench_listed == bench_capacity) {
        const int64_t capacity = bench_capacity * 2 + 1024;
        void *more = realloc(bench_list, (size_t)capacity * sizeof *bench_list);
        if (more == NULL) return upipe_fail(&c->err, UPIPE_ERR_MEMORY, "no memory for the list of products");
        bench_list = (struct bench_product *)more;
        bench_capacity = capacity;
    }
    bench_list[bench_listed++] = (struct bench_product){out, a, b, flags};
    return bench_gemm(c, out, a, b, flags, work, work_bytes);
}

/* Notes the products of a call on one thread, in place of those of the call before. */
const char *bench_products(bench *b, const bench_rule *p, int32_t backward)
{
    const char *why;
    bench_listed = 0;
    bench_gemm = b->ops.gemm;
    b->ops.gemm = bench_note;
    why = bench_linear(b, p, backward);
    b->ops.gemm = bench_gemm;
    return why;
}

/* Makes them again, where the call has left its buffers. */
const char *bench_products_run(bench *b, void *work, int64_t work_bytes)
{
    int64_t i;
    for (i = 0; i < bench_listed; ++i) {
        const struct bench_product *p = bench_list + i;
        if (b->ops.gemm(&b->ctx, p->out, p->a, p->b, p->flags, work, (size_t)work_bytes))
            return b->ctx.err.text;
    }
    return NULL;
}

/* ---- f64, token by token ---- */

/* One head: o [tokens][value_dim]; state [key_dim][value_dim] goes from before the first token to behind the last. */
void bench_linear_f64(const bench_rule *p, double *state, double *o)
{
    const int K = p->key_dim, V = p->value_dim;
    const double scale = 1 / sqrt((double)K);
    double seen[UPIPE_LINEAR_DIM_MAX];
    int64_t t;
    int a, b;
    for (t = 0; t < p->tokens; ++t) {
        const float *q = p->q + t * K, *k = p->k + t * K, *v = p->v + t * V;
        const double decay = exp((double)p->g[t]);
        double *out = o + t * V;
        for (b = 0; b < V; ++b) seen[b] = out[b] = 0;
        for (a = 0; a < K; ++a)
            for (b = 0; b < V; ++b) seen[b] += (state[a * V + b] *= decay) * (double)k[a];
        for (b = 0; b < V; ++b)
            seen[b] = p->beta != NULL ? (double)p->beta[t] * ((double)v[b] - seen[b]) : (double)v[b];
        for (a = 0; a < K; ++a)
            for (b = 0; b < V; ++b)
                out[b] += (state[a * V + b] += (double)k[a] * seen[b]) * scale * (double)q[a];
    }
}

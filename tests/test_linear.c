/* test_linear -- the rules of linear attention on the CPU: lib/linear.h and lib/linear_rows.h, the oracle's own gradients, bits
 * over threads and ranks
 */
#include "upipe/net/upipe_net_threads.h"
#include "upipe/upipe.h"
#include "upipe/cpu/upipe_cpu_linear.h"

#include "lib/context.h"
#include "lib/linear_rows.h"
#include "lib/workers.h"

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
    const int64_t cu[] = {-1, 3, 9, 20};
    test_rng r = {3};
    for (int delta = 0; delta < 2; ++delta) {
        linear x = {.n = 12, .key_heads = 1, .heads = 2, .key_dim = 3, .value_dim = 2, .delta = delta};
        double *out[RESULTS + SIZES];
        x.borders = (upipe_borders){cu, 3};
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

/* The host's threads. */
static void test_threads(upipe_ctx *c, upipe_ops *ops)
{
    test_rng r = {11};
    for (int i = 0; i < LINEAR_CUTS; ++i) {
        linear x = cut_shape(&r, i, 3), y;
        run(&x, c, &x.n, 1);
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
    upipe_states states = {.data = (float *)zeroed(bytes)};
    float *carry = (float *)zeroed(bytes);
    upipe_mem mem;
    upipe_ctx c = {.team = upipe_threads_comm(&p->team, rank)};
    context_pool(&c, &mem, &p->ops, 1 << 20, 8);
    UPIPE_TRY(upipe_plan_init(&r.plan, &d, &c.err));
    s.size = (int64_t)p->x->key_dim * p->x->value_dim;
    s.fwd = pass_fwd, s.bwd = pass_bwd, s.user = &r;
    if (rank == 0) memcpy(carry, p->x->state, bytes);
    UPIPE_TRY(upipe_scan_fwd(&c, c.team, &s, &states, carry));
    if (rank == 0) memcpy(p->x->end, carry, bytes);
    if (last) memcpy(carry, p->x->dend, bytes);
    UPIPE_TRY(upipe_scan_bwd(&c, c.team, &s, &states, carry));
    if (last) memcpy(p->x->dstate, carry, bytes);
    upipe_mem_destroy(&mem, NULL);
    return UPIPE_OK;
}

/* The pass has the bits of one rank where cuts are multiples of the chunk, for every number of ranks and heads of a stage. */
static void test_pass(void)
{
    static const int64_t borders[] = {-1, 20, 64, 100, 140, 200};
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
        if (i / 2 % 2) x.borders = (upipe_borders){borders, 5};
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

/* ---- failures ---- */

static int products, bad_product;
static upipe_status (*real_gemm)(upipe_ctx *c, upipe_view out, upipe_view a, upipe_view b, int flags,
                                 void *work, size_t work_bytes);

static upipe_status broken_gemm(upipe_ctx *c, upipe_view out, upipe_view a, upipe_view b, int flags,
                                void *work, size_t work_bytes)
{
    if (products++ == bad_product)
        return upipe_fail(&c->err, UPIPE_ERR_BACKEND, "product %d breaks", bad_product);
    return real_gemm(c, out, a, b, flags, work, work_bytes);
}

/* Each product of a call fails once: the call fails, with its sentence. */
static void test_products_fail(void)
{
    test_rng r = {41};
    upipe_ops ops = cpu_table();
    upipe_ctx c = {.ops = &ops};
    real_gemm = ops.gemm;
    ops.gemm = broken_gemm;
    for (int way = 0; way < 4; ++way) {
        const upipe_linear_direction of = way / 2 == 0 ? UPIPE_LINEAR_FWD : UPIPE_LINEAR_BWD;
        linear x = {
            .n = 9, .key_heads = 1, .heads = 2, .key_dim = 8, .value_dim = 16, .chunk = 4, .delta = way % 2};
        upipe_linear_grad g;
        draw(&x, &r, 0.05);
        g = call_of(&x, 0, x.n, 0);
        g.a.state = x.state, g.a.out = x.end, g.dstate = x.dstate;
        work_begin(&c, &g.a, of);
        for (bad_product = 0;; ++bad_product) {
            products = 0;
            const upipe_status s = of == UPIPE_LINEAR_FWD ? upipe_linear_fwd(&c, &rules, &g.a)
                                                          : upipe_linear_bwd(&c, &rules, &g);
            char breaks[40];
            if (products <= bad_product) break;
            snprintf(breaks, sizeof breaks, "product %d breaks", bad_product);
            CHECK_REFUSED(s, UPIPE_ERR_BACKEND, c.err, breaks);
        }
        CHECK(bad_product > 4 * (int)x.heads);
        buffers_free(0);
    }
}

/* ---- refusals ---- */

static size_t no_bytes(const upipe_ops *ops, const upipe_linear *a, upipe_linear_direction of)
{
    (void)ops, (void)a, (void)of;
    return 0;
}

static upipe_status no_scratch(upipe_ctx *c, const upipe_linear *a)
{
    (void)c;
    CHECK(a->work == NULL);
    return UPIPE_OK;
}

/* Rules that say 0 bytes of a call, as those of CUDA do of one without tokens, take none. */
static void test_no_scratch(upipe_ctx *c)
{
    const upipe_linear_ops none = {
        .name = "none", .chunk_max = UPIPE_LINEAR_CHUNK, .fwd = no_scratch, .bytes = no_bytes};
    test_rng r = {37};
    linear x = {.n = 9, .key_heads = 1, .heads = 2, .key_dim = 8, .value_dim = 16, .delta = 1};
    upipe_linear_grad g;
    draw(&x, &r, 0.05);
    g = call_of(&x, 0, 0, 0);
    g.a.state = x.state, g.a.out = x.end;
    CHECK_STATUS(upipe_linear_fwd(c, &none, &g.a), UPIPE_OK, c->err);
    buffers_free(0);
}

static void test_refusals(upipe_ctx *c)
{
    test_rng r = {31};
    linear x = {.n = 9, .key_heads = 1, .heads = 2, .key_dim = 8, .value_dim = 16, .delta = 1};
    upipe_linear_grad g, t;
    upipe_linear_ops small = rules;
    draw(&x, &r, 0.05);
    g = call_of(&x, 0, 9, 0);
    g.a.state = x.state, g.a.out = x.end, g.dstate = x.dstate;
    work_begin(c, &g.a, UPIPE_LINEAR_BWD);
    small.name = "small", small.chunk_max = 63;
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
    t = g, t.a.chunk = 0; /* 64 */
    CHECK_REFUSED(upipe_linear_fwd(c, &small, &t.a), UPIPE_ERR_UNSUPPORTED, c->err,
                  "the rules small have at most 63");
    CHECK_REFUSED(upipe_linear_bwd(c, &small, &t), UPIPE_ERR_UNSUPPORTED, c->err,
                  "the rules small have at most 63");
    CHECK_INT(upipe_linear_bytes(c, &small, &t.a, UPIPE_LINEAR_FWD), 0);
    CHECK_REFUSED(upipe_linear_fwd(c, NULL, &t.a), UPIPE_ERR_ARG, c->err, "the rules or the call are NULL");
    CHECK_REFUSED(upipe_linear_bwd(c, &rules, NULL), UPIPE_ERR_ARG, c->err, "the rules or the call are NULL");
}

int main(int argc, char **argv)
{
    upipe_ops ops = cpu_table();
    upipe_ctx c = {.ops = &ops};
    upipe_cpu_linear(&rules);
    test_begin(argc, argv);
    TEST(test_oracle());
    TEST(check_linear_bytes(&ops));
    TEST(check_linear_drawn(&c, 60, 150, 70));
    TEST(check_linear_cuts(&c, 3));
    TEST(check_linear_documents(&c));
    TEST(check_linear_strides(&c));
    TEST(check_linear_repeated(&c));
    TEST(check_linear_types(&c));
    TEST(check_linear_gates(&c));
    TEST(check_linear_long(&c));
    TEST(check_conv_drawn(&c, 60));
    TEST(check_conv_long(&c, 24700));
    TEST(check_gates(&c, 16500));
    TEST(check_linear_small(&c));
    TEST(test_threads(&c, &ops));
    TEST(test_pass());
    TEST(test_products_fail());
    TEST(test_refusals(&c));
    TEST(test_no_scratch(&c));
    return test_end("linear");
}

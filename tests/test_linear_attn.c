/* test_linear_attn -- linear attention over ranks in its three ways: out, final state and every gradient against f64 token by
 * token, over ranks, heads, stages, borders, chunks and segments; bits of one rank; bytes, and what a dry run says; refusals
 */
#include "upipe/net/upipe_net_threads.h"
#include "upipe/upipe.h"
#include "upipe/cpu/upipe_cpu_linear.h"

#include "lib/context.h"
#include "lib/linear.h"

enum { RANKS_MAX = 8, SEGMENTS_MAX = 2 };

typedef struct world {
    upipe_threads team;
    upipe_ops ops;
    linear *x;
    upipe_way way;
    int ranks, ring, segments, stage_heads, carried;
    int fault; /* of rank 2: FAULT_... */
    double seconds[RANKS_MAX];
} world;

static size_t states_bytes(const world *w)
{
    return (size_t)count_of(w->x, 5) * 4;
}

/* One rank's part of a segment. */
static upipe_status part_of(const world *w, int rank, int segment, upipe_plan *plan,
                            upipe_linear_attn_grad *g, upipe_err *e)
{
    const int64_t first = upipe_cut(w->x->n, w->segments, segment);
    upipe_plan_desc d = {.ranks = w->ranks / w->ring, .ring = w->ring, .heads = 8, .head_dim = 32};
    upipe_linear_grad c;
    int64_t pos;
    d.rank = rank % d.ranks;
    d.ring_rank = rank / d.ranks;
    d.tokens = upipe_cut(w->x->n, w->segments, segment + 1) - first;
    UPIPE_TRY(upipe_plan_init(plan, &d, e));
    pos = first + upipe_shard_pos(&plan->shard, 0);
    c = call_of(w->x, pos, plan->local, pos);
    *g = (upipe_linear_attn_grad){.a = {.way = w->way, .plan = plan, .rules = &rules}};
    g->a.q = c.a.q, g->a.k = c.a.k, g->a.v = c.a.v, g->a.o = c.a.o, g->a.g = c.a.g, g->a.beta = c.a.beta;
    g->a.first = first;
    g->a.borders = w->x->borders;
    g->a.stage_heads = w->stage_heads;
    g->a.chunk = w->x->chunk;
    g->dout = c.dout, g->dq = c.dq, g->dk = c.dk, g->dv = c.dv, g->dg = c.dg, g->dbeta = c.dbeta;
    return UPIPE_OK;
}

/* A call holds and sends what the plan says. */
typedef struct counts {
    int64_t sent;
} counts;

static void counts_begin(upipe_ctx *c, const upipe_comm *comm, counts *n)
{
    n->sent = comm->sent_bytes;
    c->mem->peak = c->mem->live;
}

static void counts_end(upipe_ctx *c, const upipe_comm *comm, const counts *n, int64_t sent, size_t bytes)
{
    CHECK_INT(comm->sent_bytes - n->sent, sent);
    CHECK_INT(c->mem->peak, bytes);
    CHECK_INT(c->mem->live, 0);
}

/* Both directions of a segment, on a rank or in a dry run. */
static upipe_status fwd_of(upipe_ctx *c, upipe_comm *comm, const upipe_linear_attn *a, upipe_states *states,
                           float *carry)
{
    counts n;
    counts_begin(c, comm, &n);
    UPIPE_TRY(upipe_linear_attn_fwd(c, comm, a, states, carry));
    counts_end(c, comm, &n, upipe_linear_attn_fwd_sent(a, carry != NULL),
               upipe_linear_attn_fwd_bytes(c, a, carry != NULL));
    return UPIPE_OK;
}

static upipe_status bwd_of(upipe_ctx *c, upipe_comm *comm, const upipe_linear_attn_grad *g,
                           upipe_states *states, float *carry)
{
    counts n;
    counts_begin(c, comm, &n);
    UPIPE_TRY(upipe_linear_attn_bwd(c, comm, g, states, carry));
    counts_end(c, comm, &n, upipe_linear_attn_bwd_sent(&g->a, carry != NULL),
               upipe_linear_attn_bwd_bytes(c, &g->a, carry != NULL));
    return UPIPE_OK;
}

static upipe_status dry_of(const upipe_linear_attn_grad *g, const upipe_ops *ops, int carried)
{
    upipe_status s;
    upipe_dry *dry = dry_begin(g->a.plan, ops, &s);
    float *none = (float *)dry->mem.slab;
    upipe_states states = {.data = none};
    UPIPE_TRY(s);
    UPIPE_TRY(fwd_of(&dry->ctx, &dry->team, &g->a, &states, carried ? none : NULL));
    return bwd_of(&dry->ctx, &dry->team, g, &states, carried ? none : NULL);
}

static upipe_status body(void *user, int rank)
{
    world *w = (world *)user;
    const size_t bytes = states_bytes(w);
    const int last = rank == w->ranks - 1;
    upipe_comm *comm = upipe_threads_comm(&w->team, rank);
    upipe_comm_self_state alone;
    upipe_comm self;
    upipe_mem mem;
    upipe_ctx c = {0};
    upipe_plan plans[SEGMENTS_MAX];
    upipe_linear_attn_grad g[SEGMENTS_MAX];
    upipe_states states[SEGMENTS_MAX];
    float *buffer = (float *)zeroed(bytes), *carry = w->carried ? buffer : NULL;
    context_pool(&c, &mem, &w->ops, 1 << 22, 8);
    upipe_comm_self(&self, &alone, w->ops.copy);
    c.team = w->ring > 1 ? &self : comm;
    if (rank == 0) memcpy(buffer, w->x->state, bytes);
    for (int s = 0; s < w->segments; ++s) {
        UPIPE_TRY(part_of(w, rank, s, &plans[s], &g[s], &c.err));
        states[s] = (upipe_states){.data = (float *)slab_of(bytes)};
        if (w->ring == 1) UPIPE_TRY(dry_of(&g[s], &w->ops, w->carried));
        UPIPE_TRY(fwd_of(&c, comm, &g[s].a, &states[s], carry));
    }
    if (w->carried && rank == 0) memcpy(w->x->end, carry, bytes);
    memset(buffer, 0, bytes);
    if (last) memcpy(buffer, w->x->dend, bytes);
    for (int s = w->segments - 1; s >= 0; --s) UPIPE_TRY(bwd_of(&c, comm, &g[s], &states[s], carry));
    if (w->carried && last) memcpy(w->x->dstate, carry, bytes);
    upipe_mem_destroy(&mem, NULL);
    return UPIPE_OK;
}

static void run_ways(world *w, const char *what, upipe_status (*of)(void *user, int rank))
{
    upipe_err e = {0};
    CHECK_STATUS(upipe_threads_init(&w->team, w->ranks, 20, &e), UPIPE_OK, e);
    CHECK_SAY(upipe_threads_run(&w->team, of, w, NULL, &e) == UPIPE_OK, "%s: %s", what, e.text);
    upipe_threads_free(&w->team);
}

/* What a call without a carry does not tell, and what a border at the first token makes of it. */
static void fill(const world *w, linear *y, linear *one)
{
    if (!w->carried) memcpy(y->end, one->end, states_bytes(w));
    if (!w->carried || begins(y, 0)) memcpy(y->dstate, one->dstate, states_bytes(w));
}

/* Results are written, and nothing is read of what was there. */
static void spoil(linear *y)
{
    for (int i = 0; i < RESULTS; ++i)
        for (int64_t j = 0; (i != DBETA || y->delta) && j < count_of(y, INPUTS + i); ++j)
            (*field_of(y, INPUTS + i))[j] = NAN;
}

static void test_drawn(void)
{
    static const int dims[] = {4, 7, 16, 24};
    static const double gates[] = {1e-3, 0.05, 0.5, 5};
    test_rng r = {41};
    for (int i = 0; i < 36; ++i) {
        linear x = {.n = 16 + test_below(&r, 110), .delta = i % 2}, one;
        world w = {.ops = cpu_table(), .ranks = 1 + i % RANKS_MAX, .ring = 1, .segments = 1 + (i % 5 == 4)};
        upipe_ctx c = {.ops = &w.ops};
        int64_t cu[7] = {-1, [6] = 1000},
                cuts[SEGMENTS_MAX]; /* the first document began before, the last one goes on */
        char what[200];
        const int group = 1 + test_below(&r, 4);
        x.key_heads = 1 + test_below(&r, 4);
        x.heads = x.key_heads * group;
        x.key_dim = dims[test_below(&r, 4)], x.value_dim = dims[test_below(&r, 4)];
        x.chunk = test_below(&r, 3) ? 1 + test_below(&r, 40) : 0;
        for (int j = 0; j < 5; ++j) cu[1 + j] = (j > 0 ? cu[j] : 0) + test_below(&r, (int)x.n / 5);
        if (i % 3 == 0) cu[2 + test_below(&r, 2)] = upipe_cut(x.n, w.ranks, w.ranks / 2);
        for (int j = 2; j < 6; ++j) cu[j] = cu[j] < cu[j - 1] ? cu[j - 1] : cu[j];
        if (i % 3 < 2) x.borders = (upipe_borders){cu, 6};
        w.stage_heads = group * test_below(&r, x.key_heads + 1);
        w.carried = i % 4 > 0;
        if (w.segments > 1 || i % 7 == 0) w.carried = 1;
        draw(&x, &r, gates[i / 2 % 4]);
        if (!w.carried) {
            memset(x.state, 0, (size_t)count_of(&x, 5) * 4);
            memset(x.dend, 0, (size_t)count_of(&x, 7) * 4);
        }
        for (int s = 0; s < w.segments; ++s) cuts[s] = upipe_cut(x.n, w.segments, s + 1);
        one = twin_of(&x);
        run(&one, &c, cuts, w.segments);
        for (int way = 0; way < UPIPE_WAYS; ++way) {
            linear y = twin_of(&x);
            spoil(&y);
            w.x = &y;
            w.way = (upipe_way)way;
            w.ring = w.way != UPIPE_WAY_HEADS && i % 6 == 5 && w.ranks % 2 == 0 ? 2 : 1;
            snprintf(what, sizeof what,
                     "draw %d, %s: %lld tokens, %d ranks, %d/%d heads of %d x %d, %d a stage, chunk %d, %s",
                     i, upipe_way_name(w.way), (long long)x.n, w.ranks, x.heads, x.key_heads, x.key_dim,
                     x.value_dim, w.stage_heads, x.chunk, x.delta ? "delta" : "decay");
            run_ways(&w, what, body);
            fill(&w, &y, &one);
            check_close(&y, what);
            /* ranks that share a key head add up its gradients */
            if (w.way == UPIPE_WAY_HEADS && w.ranks > x.key_heads && group > 1)
                for (int k = 2; k < 4; ++k)
                    memcpy(*field_of(&y, INPUTS + k), *field_of(&one, INPUTS + k),
                           (size_t)count_of(&x, INPUTS + k) * 4);
            if (w.way == UPIPE_WAY_HEADS || (w.ranks == 1 && w.way == UPIPE_WAY_PASS))
                check_bits(&one, &y, what);
        }
        buffers_free(0);
    }
}

/* ---- types ---- */

typedef struct types {
    world *w;
    upipe_dtype type;
    uint16_t *const *data; /* q, k, v, dout, o, dq, dk, dv of all tokens */
} types;

static upipe_status types_body(void *user, int rank)
{
    const types *job = (const types *)user;
    world *w = job->w;
    upipe_linear_attn_grad g;
    upipe_view *views[8] = {&g.a.q, &g.a.k, &g.a.v, &g.dout, &g.a.o, &g.dq, &g.dk, &g.dv};
    upipe_plan plan;
    upipe_mem mem;
    upipe_ctx c = {.team = upipe_threads_comm(&w->team, rank)};
    upipe_states states = {.data = floats(count_of(w->x, 5))};
    context_pool(&c, &mem, &w->ops, 1 << 22, 8);
    UPIPE_TRY(part_of(w, rank, 0, &plan, &g, &c.err));
    for (int i = 0; i < 8; ++i) {
        views[i]->dtype = job->type;
        views[i]->data = job->data[i] + upipe_shard_pos(&plan.shard, 0) * views[i]->h * views[i]->d;
    }
    UPIPE_TRY(fwd_of(&c, c.team, &g.a, &states, NULL));
    UPIPE_TRY(bwd_of(&c, c.team, &g, &states, NULL));
    upipe_mem_destroy(&mem, NULL);
    return UPIPE_OK;
}

/* Elements of two bytes. The all-to-all has the bits of one rank; the scan rounds o once more, and keeps Q~ and a state in
 * them for one product. */
static void test_types(void)
{
    test_rng r = {43};
    for (upipe_dtype t = UPIPE_BF16; t <= UPIPE_F16; ++t)
        for (int way = 0; way < UPIPE_WAYS; ++way) {
            linear x = {
                .n = 96, .key_heads = 4, .heads = 8, .key_dim = 16, .value_dim = 24, .chunk = 8, .delta = 1};
            upipe_linear_attn_grad one;
            upipe_plan plan;
            upipe_view *views[8] = {&one.a.q, &one.a.k, &one.a.v, &one.dout,
                                    &one.a.o, &one.dq,  &one.dk,  &one.dv};
            world w = {
                .ops = cpu_table(), .x = &x, .way = (upipe_way)way, .ranks = 1, .ring = 1, .segments = 1};
            uint16_t *data[8], *alone[8];
            upipe_err e;
            draw(&x, &r, 0.05);
            CHECK_STATUS(part_of(&w, 0, 0, &plan, &one, &e), UPIPE_OK, e);
            for (int i = 0; i < 8; ++i) {
                const int64_t n = views[i]->n * views[i]->h * views[i]->d;
                data[i] = (uint16_t *)zeroed((size_t)n * 2), alone[i] = (uint16_t *)zeroed((size_t)n * 2);
                for (int64_t j = 0; i < 4 && j < n; ++j)
                    upipe_cpu_put(data[i], t, j, ((const float *)views[i]->data)[j]);
            }
            for (int ranks = 1; ranks <= 4; ranks += 3) {
                types job = {&w, t, data};
                w.ranks = ranks;
                CHECK_STATUS(upipe_threads_init(&w.team, ranks, 20, &e), UPIPE_OK, e);
                CHECK_STATUS(upipe_threads_run(&w.team, types_body, &job, NULL, &e), UPIPE_OK, e);
                upipe_threads_free(&w.team);
                for (int i = 4; i < 8; ++i) {
                    const int64_t n = views[i]->n * views[i]->h * views[i]->d;
                    double most = 0, far = 0;
                    for (int64_t j = 0; j < n; ++j) {
                        const double got = (double)upipe_cpu_get(data[i], t, j),
                                     want = (double)upipe_cpu_get(alone[i], t, j);
                        most = fmax(most, fabs(want));
                        if (!(fabs(got - want) <= far)) far = fabs(got - want);
                    }
                    if (ranks == 1)
                        memcpy(alone[i], data[i], (size_t)n * 2);
                    else
                        CHECK_SAY(
                            far <= (way == UPIPE_WAY_SCAN ? most * (t == UPIPE_BF16 ? 0x1p-7 : 0x1p-10) : 0),
                            "%s, %s: %s is %g away of at most %g", upipe_way_name(w.way), upipe_dtype_name(t),
                            result_names[i - 4 + (i > 4)], far, most);
                }
            }
            buffers_free(0);
        }
}

/* ---- bytes ---- */

/* What each of four ranks sends, in units: a state, A, q or k of a rank's tokens and a key head, ... */
static void test_sent(void)
{
    enum { K = 8, V = 24, N = 40, STATE = K * V * 4, MATRIX = K * K * 4 };
    static const int64_t borders[] = {0, 13, 40};
    test_rng r = {47};
    for (int delta = 0; delta < 2; ++delta) {
        linear x = {.n = N, .key_heads = 3, .heads = 6, .key_dim = K, .value_dim = V, .delta = delta};
        const int64_t a = delta ? MATRIX : 4, gates = delta ? 8 : 4;
        /* no borders: rank 0 is the first of all chains, and the others send A to all but the next one's neighbour */
        const int64_t plain[4] = {3 * STATE, 2 * (STATE + a), STATE + a, 0};
        const int64_t plain_bwd[4] = {0, STATE + a, 2 * (STATE + a), 3 * STATE};
        /* a document begins among rank 1's tokens: rank 0 goes to rank 1 alone, and so do ranks 2 and 3 in the backward;
         * with a carry the borders at both ends keep it as it is */
        const int64_t packed[4] = {STATE, 2 * STATE, STATE + a, 0},
                      packed_bwd[4] = {0, STATE, STATE + a, 2 * STATE};
        world w = {.ops = cpu_table(), .x = &x, .way = UPIPE_WAY_SCAN, .ranks = 4, .ring = 1, .segments = 1};
        draw(&x, &r, 0.05);
        for (int rank = 0; rank < 4; ++rank) {
            /* the heads of each of 3 key heads are shared out, so that 4 ranks have some */
            const int64_t mine = 1 + rank % 2, others = 6 - mine;
            const int64_t key = 2 * K * 4, value = V * 4, gate = gates;
            upipe_linear_attn_grad g;
            upipe_plan plan;
            upipe_err e;
            w.way = UPIPE_WAY_SCAN;
            x.borders = (upipe_borders){0};
            CHECK_STATUS(part_of(&w, rank, 0, &plan, &g, &e), UPIPE_OK, e);
            CHECK_INT(upipe_linear_attn_fwd_sent(&g.a, 0), 6 * plain[rank]);
            CHECK_INT(upipe_linear_attn_bwd_sent(&g.a, 0), 6 * plain_bwd[rank]);
            CHECK_INT(upipe_linear_attn_fwd_sent(&g.a, 1), 6 * (plain[rank] + (rank > 0) * (STATE + a)));
            CHECK_INT(upipe_linear_attn_bwd_sent(&g.a, 1), 6 * (plain_bwd[rank] + (rank < 3) * (STATE + a)));
            g.a.borders = (upipe_borders){borders, 2};
            CHECK_INT(upipe_linear_attn_fwd_sent(&g.a, 1), 6 * packed[rank]);
            CHECK_INT(upipe_linear_attn_bwd_sent(&g.a, 1), 6 * packed_bwd[rank]);
            g.a.way = UPIPE_WAY_HEADS;
            CHECK_INT(upipe_linear_attn_fwd_sent(&g.a, 1),
                      10 * others * (key + value + gate) + 30 * mine * value);
            CHECK_INT(upipe_linear_attn_bwd_sent(&g.a, 1),
                      10 * others * (key + 2 * value + gate) + 30 * mine * (key + value + gate));
            g.a.borders = (upipe_borders){0};
            CHECK_INT(upipe_linear_attn_fwd_sent(&g.a, 1), 10 * others * (key + value + gate) +
                                                               30 * mine * value +
                                                               STATE * (rank == 0 ? 5 : mine));
        }
        buffers_free(0);
    }
}

/* ---- refusals and failures ---- */

static void test_refusals(void)
{
    test_rng r = {53};
    linear x = {.n = 30, .key_heads = 2, .heads = 4, .key_dim = 8, .value_dim = 16, .delta = 1};
    world w = {.ops = cpu_table(), .x = &x, .ranks = 1, .ring = 1, .segments = 1};
    upipe_linear_attn_grad g, t;
    upipe_comm_self_state alone, other_alone;
    upipe_comm self, other_team;
    upipe_mem mem;
    upipe_plan plan, other;
    upipe_plan_desc d;
    upipe_ctx c = {0};
    upipe_states states = {0};
    draw(&x, &r, 0.05);
    states.data = floats(count_of(&x, 5));
    context_pool(&c, &mem, &w.ops, 1 << 20, 8);
    upipe_comm_self(&self, &alone, w.ops.copy);
    upipe_comm_self(&other_team, &other_alone, w.ops.copy);
    c.team = &self;
    CHECK_STATUS(part_of(&w, 0, 0, &plan, &g, &c.err), UPIPE_OK, c.err);
#define REFUSED(change, status, words)                                                                  \
    do {                                                                                                \
        t = g;                                                                                          \
        change;                                                                                         \
        CHECK_REFUSED(upipe_linear_attn_fwd(&c, &self, &t.a, &states, NULL), UPIPE_ERR_##status, c.err, \
                      words);                                                                           \
        CHECK_REFUSED(upipe_linear_attn_bwd(&c, &self, &t, &states, NULL), UPIPE_ERR_##status, c.err,   \
                      words);                                                                           \
    } while (0)
    REFUSED(t.a.plan = NULL, ARG, "its plan or its rules are NULL");
    REFUSED(t.a.rules = NULL, ARG, "its plan or its rules are NULL");
    REFUSED(t.a.way = (upipe_way)3, ARG, "way 3 is none of pass, scan and heads");
    REFUSED(t.a.q.n = 29, ARG, "q has 29 tokens, this rank 30");
    REFUSED(t.a.v.n = 29, ARG, "v is [29][4][16], not [30][4][16]");
    REFUSED(t.a.q.d = t.a.k.d = 257, UNSUPPORTED, "a state of 257 x 16; 1 to 256 each are built");
    REFUSED(t.a.chunk = 257, ARG, "chunks of 257 tokens");
    REFUSED(t.a.first = -1, ARG, "position -1");
    REFUSED(t.a.borders.cu_seqlens_n = 1, ARG, "1 packed documents");
    REFUSED(t.a.stage_heads = -2, ARG, "in stages of -2 heads");
    REFUSED(t.a.stage_heads = 3, UNSUPPORTED,
            "stages of 3 heads, where 2 share a key head: a stage has all of them");
    d = plan.desc;
    d.batch = 2;
    CHECK_STATUS(upipe_plan_init(&other, &d, &c.err), UPIPE_OK, c.err);
    REFUSED(t.a.plan = &other, UNSUPPORTED, "a scan of 2 sequences: each has a call of its own");
    d.batch = 1, d.ring = 2, d.layout = UPIPE_ZIGZAG;
    CHECK_STATUS(upipe_plan_init(&other, &d, &c.err), UPIPE_OK, c.err);
    REFUSED(t.a.plan = &other, UNSUPPORTED, "neighbours of a zigzag ring hold no neighbouring tokens");
    d.layout = UPIPE_CONTIGUOUS;
    CHECK_STATUS(upipe_plan_init(&other, &d, &c.err), UPIPE_OK, c.err);
    REFUSED(t.a.plan = &other, ARG, "a plan whose tokens are those of rank 0 of 2");
    c.team = &other_team;
    REFUSED(t.a.way = UPIPE_WAY_HEADS, UNSUPPORTED, "the all-to-all goes over ctx->team");
    c.team = &self;
    t = g;
    CHECK_REFUSED((t.a.o.h = 1, upipe_linear_attn_fwd(&c, &self, &t.a, &states, NULL)), UPIPE_ERR_ARG, c.err,
                  "o is [30][1][16]");
    CHECK_REFUSED((t.dk.n = 1, upipe_linear_attn_bwd(&c, &self, &t, &states, NULL)), UPIPE_ERR_ARG, c.err,
                  "dk is [1][2][8]");
    CHECK_REFUSED(upipe_linear_attn_fwd(&c, &self, &g.a, NULL, NULL), UPIPE_ERR_ARG, c.err, "NULL");
    CHECK_REFUSED(upipe_linear_attn_bwd(&c, &self, NULL, &states, NULL), UPIPE_ERR_ARG, c.err, "NULL");
#undef REFUSED
    CHECK_INT(mem.live, 0);
    CHECK_STATUS(upipe_linear_attn_fwd(&c, &self, &g.a, &states, NULL), UPIPE_OK, c.err);
    upipe_mem_destroy(&mem, NULL);
}

static upipe_status failing_rule(upipe_ctx *c, const upipe_linear *a)
{
    (void)a;
    return upipe_fail(&c->err, UPIPE_ERR_BACKEND, "the rule fails");
}

enum { FAULT_RULE, FAULT_WAY, FAULT_POOL, FAULT_NONE, FAULTS };

static const char *const fault_words[FAULTS] = {"the rule fails", "way of linear attention is ", "do not fit",
                                                ""};

/* One rank's call differs, its rule fails, or its pool is too small: all are told, and none waits for the deadline. One that
 * says the number of all heads where others say 0 makes the same call. */
static upipe_status failing_body(void *user, int rank)
{
    world *w = (world *)user;
    upipe_linear_ops broken = rules;
    upipe_linear_attn_grad g;
    upipe_plan plan;
    upipe_mem mem;
    upipe_ctx c = {.team = upipe_threads_comm(&w->team, rank)};
    const double began = test_seconds();
    upipe_status s;
    upipe_states states = {.data = floats(count_of(w->x, 5))};
    context_pool(&c, &mem, &w->ops, rank == 2 && w->fault == FAULT_POOL ? 64 : 1 << 20, 8);
    UPIPE_TRY(part_of(w, rank, 0, &plan, &g, &c.err));
    broken.fwd = failing_rule;
    if (rank == 2 && w->fault == FAULT_RULE) g.a.rules = &broken;
    if (rank == 2 && w->fault == FAULT_NONE) g.a.stage_heads = g.a.v.h;
    if (rank == 2 && w->fault == FAULT_WAY) g.a.way = (upipe_way)((w->way + 1) % UPIPE_WAYS);
    s = upipe_linear_attn_fwd(&c, c.team, &g.a, &states, NULL);
    w->seconds[rank] = test_seconds() - began;
    CHECK_INT(mem.live, 0);
    CHECK_SAY(strstr(c.err.text, fault_words[w->fault]) != NULL, "rank %d: %s", rank, c.err.text);
    upipe_mem_destroy(&mem, NULL);
    return s;
}

static void test_released(void)
{
    test_rng r = {59};
    linear x = {.n = 40, .key_heads = 4, .heads = 4, .key_dim = 8, .value_dim = 8, .delta = 1};
    draw(&x, &r, 0.05);
    for (int way = 0; way < UPIPE_WAYS; ++way)
        for (int fault = 0; fault < FAULTS; ++fault) {
            world w = {
                .ops = cpu_table(), .x = &x, .way = (upipe_way)way, .ranks = 4, .ring = 1, .segments = 1};
            upipe_status statuses[4];
            upipe_err e;
            w.fault = fault;
            CHECK_STATUS(upipe_threads_init(&w.team, 4, 60, &e), UPIPE_OK, e);
            upipe_threads_run(&w.team, failing_body, &w, statuses, &e);
            for (int rank = 0; rank < 4; ++rank) {
                CHECK_SAY((statuses[rank] == UPIPE_OK) == (fault == FAULT_NONE),
                          "rank %d, fault %d: status %d", rank, fault, (int)statuses[rank]);
                CHECK_SAY(w.seconds[rank] < 30, "rank %d waited for %g s", rank, w.seconds[rank]);
            }
            upipe_threads_free(&w.team);
        }
}

int main(int argc, char **argv)
{
    upipe_cpu_linear(&rules);
    test_begin(argc, argv);
    TEST(test_drawn());
    TEST(test_types());
    TEST(test_sent());
    TEST(test_refusals());
    TEST(test_released());
    return test_end("linear_attn");
}

/* test_scan -- a state over ranks with a rule of whole numbers, bit by bit: stages, borders, segments, bytes
 *
 * The rule: a token multiplies a head's state by 1, -1 or 0 and adds a row of small numbers. One walk over the whole
 * sequence is the oracle, and ranks must agree with it exactly, wherever tokens and heads are cut.
 */
#include "upipe/net/upipe_net_threads.h"
#include "upipe/upipe.h"

#include "lib/context.h"

enum {
    TOKENS_MAX = 64,
    HEADS_MAX = 5,
    SIZE = 6, /* elements of a head's state */
    SEGMENTS_MAX = 3
};

typedef float state[SIZE];

typedef struct world {
    upipe_threads team;
    upipe_ops ops;
    int64_t tokens;
    int ranks, ring, segments, heads, stage_heads;
    upipe_borders borders;
    /* the sequence, its states and their gradients: before each token, and behind it */
    float times[TOKENS_MAX][HEADS_MAX];
    state add[TOKENS_MAX][HEADS_MAX], dout[TOKENS_MAX][HEADS_MAX];
    state before[TOKENS_MAX][HEADS_MAX], out[TOKENS_MAX][HEADS_MAX];
    state dbefore[TOKENS_MAX][HEADS_MAX], dadd[TOKENS_MAX][HEADS_MAX];
    /* faults: this rank's step of a stage fails, or the rank leaves */
    int bad_rank, bad_stage, leaves;
    int differs; /* which field of the call rank 1 has another value of */
    double seconds[8];
} world;

/* One rank's part of a segment. */
typedef struct part {
    world *w;
    upipe_plan plan;
    upipe_scan scan;
    int64_t pos;
    int calls;
} part;

static int begins(const world *w, int64_t pos)
{
    for (int64_t i = 0; w->borders.cu_seqlens != NULL && i <= w->borders.cu_seqlens_n; ++i)
        if (w->borders.cu_seqlens[i] == pos) return 1;
    return 0;
}

static void check_state(const float *got, const float *want, const char *what, int64_t pos, int head)
{
    for (int e = 0; e < SIZE; ++e)
        CHECK_SAY(got[e] == want[e], "%s at token %lld, head %d: element %d is %g, not %g", what,
                  (long long)pos, head, e, (double)got[e], (double)want[e]);
}

/* ---- the rule, and its walk over the sequence ---- */

static upipe_status step_fwd(upipe_ctx *c, void *user, int first, int heads, const float *in, float *out)
{
    part *p = (part *)user;
    const world *w = p->w;
    if (w->bad_stage == p->calls++ && w->bad_rank == p->plan.desc.rank)
        return upipe_fail(&c->err, UPIPE_ERR_BACKEND, "the rule fails");
    if (c->mem->dry) return UPIPE_OK;
    memcpy(out, in, (size_t)heads * sizeof(state));
    for (int j = 0; j < heads; ++j, out += SIZE) {
        check_state(out, w->before[p->pos][first + j], "the state", p->pos, first + j);
        for (int64_t pos = p->pos; pos < p->pos + p->plan.local; ++pos) {
            if (begins(w, pos)) memset(out, 0, sizeof(state));
            for (int e = 0; e < SIZE; ++e)
                out[e] = out[e] * w->times[pos][first + j] + w->add[pos][first + j][e];
            check_state(out, w->out[pos][first + j], "out", pos, first + j);
        }
    }
    return UPIPE_OK;
}

static upipe_status step_bwd(upipe_ctx *c, void *user, int first, int heads, const float *in, float *d)
{
    part *p = (part *)user;
    const world *w = p->w;
    if (w->bad_stage == p->calls++ && w->bad_rank == p->plan.desc.rank)
        return upipe_fail(&c->err, UPIPE_ERR_BACKEND, "the rule fails");
    if (c->mem->dry) return UPIPE_OK;
    for (int j = 0; j < heads; ++j, in += SIZE, d += SIZE) {
        check_state(in, w->before[p->pos][first + j], "the kept state", p->pos, first + j);
        for (int64_t pos = p->pos + p->plan.local - 1; pos >= p->pos; --pos) {
            if (begins(w, pos + 1)) memset(d, 0, sizeof(state));
            for (int e = 0; e < SIZE; ++e) d[e] += w->dout[pos][first + j][e];
            check_state(d, w->dadd[pos][first + j], "the gradient", pos, first + j);
            for (int e = 0; e < SIZE; ++e) d[e] *= w->times[pos][first + j];
        }
        check_state(d, w->dbefore[p->pos][first + j], "the state's gradient", p->pos, first + j);
    }
    return UPIPE_OK;
}

static void draw(world *w, uint64_t seed)
{
    test_rng r = {seed};
    for (int64_t t = 0; t < w->tokens; ++t) {
        for (int h = 0; h < w->heads; ++h) {
            w->times[t][h] = (float)(test_below(&r, 8) == 0 ? 0 : test_below(&r, 2) ? 1 : -1);
            for (int e = 0; e < SIZE; ++e) {
                const float last = t > 0 && !begins(w, t) ? w->out[t - 1][h][e] : 0;
                w->add[t][h][e] = (float)(test_below(&r, 19) - 9);
                w->dout[t][h][e] = (float)(test_below(&r, 19) - 9);
                w->before[t][h][e] = last;
                w->out[t][h][e] = last * w->times[t][h] + w->add[t][h][e];
            }
        }
    }
    for (int64_t t = w->tokens - 1; t >= 0; --t)
        for (int h = 0; h < w->heads; ++h)
            for (int e = 0; e < SIZE; ++e) {
                const float next = t + 1 < w->tokens && !begins(w, t + 1) ? w->dbefore[t + 1][h][e] : 0;
                w->dadd[t][h][e] = next + w->dout[t][h][e];
                w->dbefore[t][h][e] = w->dadd[t][h][e] * w->times[t][h];
            }
}

/* ---- a rank ---- */

static upipe_status part_init(world *w, int rank, int segment, part *p, upipe_err *e)
{
    const int64_t first = upipe_cut(w->tokens, w->segments, segment);
    upipe_plan_desc d = {.ranks = w->ranks / w->ring, .ring = w->ring, .heads = 8, .head_dim = 32};
    d.rank = rank % d.ranks;
    d.ring_rank = rank / d.ranks;
    d.tokens = upipe_cut(w->tokens, w->segments, segment + 1) - first;
    memset(p, 0, sizeof *p);
    UPIPE_TRY(upipe_plan_init(&p->plan, &d, e));
    p->w = w;
    p->pos = first + upipe_shard_pos(&p->plan.shard, 0);
    p->scan = (upipe_scan){.plan = &p->plan,
                           .first = first,
                           .borders = w->borders,
                           .heads = w->heads,
                           .size = SIZE,
                           .stage_heads = w->stage_heads,
                           .fwd = step_fwd,
                           .bwd = step_bwd,
                           .user = p};
    if (w->stage_heads == 0 && rank % 2) p->scan.stage_heads = w->heads; /* the same call as with 0 */
    return UPIPE_OK;
}

/* A forward or a backward, and its bytes: all states are sent unless a document or nobody's token follows, and the pool holds
 * those of a stage, in a backward of two. */
static upipe_status pass_run(upipe_ctx *c, upipe_comm *comm, const part *p, int backward,
                             upipe_states *states, float *carry)
{
    const world *w = p->w;
    const int last = backward ? comm->rank == 0 : comm->rank == comm->ranks - 1;
    const int on = (!last || (carry != NULL && comm->ranks > 1)) &&
                   !begins(w, backward ? p->pos : p->pos + p->plan.local);
    const int stage = w->stage_heads > 0 && w->stage_heads < w->heads ? w->stage_heads : w->heads;
    const int64_t sent = comm->sent_bytes;
    c->mem->peak = c->mem->live;
    UPIPE_TRY(backward ? upipe_scan_bwd(c, comm, &p->scan, states, carry)
                       : upipe_scan_fwd(c, comm, &p->scan, states, carry));
    CHECK_INT(comm->sent_bytes - sent, on ? (int64_t)sizeof(state) * w->heads : 0);
    CHECK_INT(c->mem->peak, sizeof(state) * (size_t)(backward ? 2 * stage : stage));
    CHECK_INT(c->mem->live, 0);
    return UPIPE_OK;
}

static upipe_status passes_dry(part *p, const upipe_ops *ops, int rank, int carried)
{
    upipe_status s;
    upipe_dry *dry = dry_begin(&p->plan, ops, &s);
    upipe_states states = {.data = (float *)dry->mem.slab};
    upipe_comm comm;
    UPIPE_TRY(s);
    upipe_comm_dry(&comm, rank, p->w->ranks, dry->list, dry->gathered);
    UPIPE_TRY(pass_run(&dry->ctx, &comm, p, 0, &states, carried ? states.data : NULL));
    return pass_run(&dry->ctx, &comm, p, 1, &states, carried ? states.data : NULL);
}

static upipe_status passes_body(void *user, int rank)
{
    world *w = (world *)user;
    const int carried = w->segments > 1;
    upipe_comm *comm = upipe_threads_comm(&w->team, rank);
    upipe_comm_self_state alone;
    upipe_comm self;
    upipe_mem mem;
    upipe_ctx c = {0};
    part parts[SEGMENTS_MAX];
    upipe_states states[SEGMENTS_MAX];
    float *carry;
    test_rank = rank;
    context_pool(&c, &mem, &w->ops, 1 << 16, 8);
    upipe_comm_self(&self, &alone, w->ops.copy);
    c.team = w->ring > 1 ? &self : comm;
    carry = (float *)zeroed(sizeof(state) * HEADS_MAX);
    for (int s = 0; s < w->segments; ++s) {
        part *p = &parts[s];
        UPIPE_TRY(part_init(w, rank, s, p, &c.err));
        UPIPE_TRY(passes_dry(p, &w->ops, rank, carried));
        states[s] = (upipe_states){.data = (float *)buffer(sizeof(state) * HEADS_MAX)};
        UPIPE_TRY(pass_run(&c, comm, p, 0, &states[s], carried ? carry : NULL));
    }
    memset(carry, 0, sizeof(state) * HEADS_MAX);
    for (int s = w->segments - 1; s >= 0; --s)
        UPIPE_TRY(pass_run(&c, comm, &parts[s], 1, &states[s], carried ? carry : NULL));
    upipe_mem_destroy(&mem, NULL);
    return UPIPE_OK;
}

static void run(world *w, double deadline, upipe_status (*body)(void *user, int rank), upipe_status *statuses)
{
    upipe_err e = {0};
    upipe_status s;
    test_at("%d ranks, %d rings, %d segments, %d heads, %d a stage", w->ranks, w->ring, w->segments, w->heads,
            w->stage_heads);
    CHECK_STATUS(upipe_threads_init(&w->team, w->ranks, deadline, &e), UPIPE_OK, e);
    s = upipe_threads_run(&w->team, body, w, statuses, &e);
    if (statuses == NULL) CHECK_SAY(s == UPIPE_OK, "%s", e.text);
    upipe_threads_free(&w->team);
    buffers_free(0);
}

/* Ranks, rings, segments, stages and borders: on a rank's first token, inside a rank, empty documents, at both ends. */
static void test_passes(world *w)
{
    static const int64_t inside[] = {0, 3, 12, 12, 30, 43}, at_ranks[] = {-1, 5, 14, 22, 29, 100};
    uint64_t draws = 0;
    for (int ranks = 1; ranks <= 4; ++ranks)
        for (int heads = 1; heads <= HEADS_MAX; heads += 2)
            for (int i = 0; i < 27; ++i) {
                const int stage_heads = i / 9, kind = i / 3 % 3, way = i % 3;
                *w = (world){.ops = w->ops, .tokens = 43, .ranks = ranks, .ring = 1, .segments = 1};
                w->bad_stage = -1;
                w->heads = heads;
                w->stage_heads = stage_heads;
                if (kind == 1) w->borders = (upipe_borders){inside, 5};
                if (kind == 2) w->borders = (upipe_borders){at_ranks, 5};
                if (way == 1) w->segments = SEGMENTS_MAX;
                if (way == 2 && ranks == 4) w->ring = 2;
                draw(w, ++draws);
                run(w, 20, passes_body, NULL);
            }
}

/* ---- failures ---- */

enum { DEADLINE = 1 };

/* Both passes; one rank's rule fails in a stage, or the rank leaves before the pass. */
static upipe_status failing_body(void *user, int rank)
{
    world *w = (world *)user;
    upipe_mem mem;
    upipe_ctx c = {.team = upipe_threads_comm(&w->team, rank)};
    part p;
    upipe_states states = {.data = floats(SIZE * HEADS_MAX)};
    double began;
    upipe_status s;
    test_rank = rank;
    context_pool(&c, &mem, &w->ops, 1 << 16, 8);
    UPIPE_TRY(part_init(w, rank, 0, &p, &c.err));
    if (w->leaves && rank == w->bad_rank) return UPIPE_OK;
    began = test_seconds();
    s = upipe_scan_fwd(&c, c.team, &p.scan, &states, NULL);
    if (s == UPIPE_OK) {
        p.calls = HEADS_MAX; /* stages of the backward are counted on */
        s = upipe_scan_bwd(&c, c.team, &p.scan, &states, NULL);
    } else {
        const upipe_err first = c.err;
        CHECK_REFUSED(upipe_scan_bwd(&c, c.team, &p.scan, &states, NULL), UPIPE_ERR_ARG, c.err,
                      "the states are of no forward");
        c.err = first;
    }
    w->seconds[rank] = test_seconds() - began;
    CHECK_INT(mem.live, 0);
    if (rank == w->bad_rank) CHECK_TEXT(c.err.text, "the rule fails");
    upipe_mem_destroy(&mem, NULL);
    return s;
}

/* A rank that fails in a stage, or is not there, releases the others. */
static void test_faults(world *w)
{
    upipe_status statuses[8];
    *w = (world){.ops = w->ops,
                 .tokens = 40,
                 .ranks = 4,
                 .ring = 1,
                 .segments = 1,
                 .heads = HEADS_MAX,
                 .stage_heads = 1};
    draw(w, 1);
    for (int stage = 0; stage <= 2 * HEADS_MAX; stage += 2)
        for (w->bad_rank = 0; w->bad_rank < 4; w->bad_rank += 3) {
            w->bad_stage = stage;
            w->leaves = stage == 2 * HEADS_MAX;
            run(w, DEADLINE, failing_body, statuses);
            for (int r = 0; r < w->ranks; ++r) {
                const upipe_status want = r != w->bad_rank ? w->leaves ? statuses[r] : UPIPE_ERR_ABORTED
                                          : w->leaves      ? UPIPE_OK
                                                           : UPIPE_ERR_BACKEND;
                CHECK_SAY(statuses[r] == want && (statuses[r] != UPIPE_OK || r == w->bad_rank),
                          "rank %d leaves with %s", r, upipe_status_name(statuses[r]));
                CHECK_SAY(w->seconds[r] < 4 * DEADLINE, "rank %d leaves after %.1f s", r, w->seconds[r]);
            }
        }
}

/* ---- refusals ---- */

static void test_refusals(world *w)
{
    upipe_comm_self_state alone;
    upipe_comm self;
    upipe_mem mem;
    upipe_ctx c = {.team = &self};
    float data[SIZE * 2];
    upipe_states states = {.data = data};
    const int64_t down[] = {3, 1};
    upipe_plan_desc d = {.tokens = 9, .heads = 8, .head_dim = 32};
    upipe_plan plan, zigzag, batch;
    upipe_scan s = {.plan = &plan, .heads = 2, .size = SIZE}, t;
    context_pool(&c, &mem, &w->ops, 1 << 16, 8);
    upipe_comm_self(&self, &alone, w->ops.copy);
    CHECK_STATUS(upipe_plan_init(&plan, &d, &c.err), UPIPE_OK, c.err);
    d.batch = 2;
    CHECK_STATUS(upipe_plan_init(&batch, &d, &c.err), UPIPE_OK, c.err);
    d.batch = 1, d.ring = 2, d.layout = UPIPE_ZIGZAG;
    CHECK_STATUS(upipe_plan_init(&zigzag, &d, &c.err), UPIPE_OK, c.err);
#define REFUSED(change, status, words)                                                                 \
    do {                                                                                               \
        t = s, change;                                                                                 \
        CHECK_REFUSED(upipe_scan_fwd(&c, &self, &t, &states, NULL), UPIPE_ERR_##status, c.err, words); \
        CHECK_REFUSED(upipe_scan_bwd(&c, &self, &t, &states, NULL), UPIPE_ERR_##status, c.err, words); \
    } while (0)
    REFUSED(t.plan = NULL, ARG, "the scan or its plan is NULL");
    REFUSED(t.plan = &zigzag, UNSUPPORTED, "neighbours of a zigzag ring hold no neighbouring tokens");
    REFUSED(t.plan = &batch, UNSUPPORTED, "a scan of 2 sequences");
    REFUSED(t.heads = 0, ARG, "a state of 0 heads of 6 elements");
    REFUSED(t.stage_heads = -1, ARG, "in stages of -1 heads");
    REFUSED((t.size = INT64_C(1) << 60, t.heads = 1 << 30), OVERFLOW, "a state of 1073741824 heads");
    REFUSED((t.borders = (upipe_borders){down, 1}), ARG, "packed document 0 is [3, 1)");
    REFUSED(t.borders.cu_seqlens_n = 1, ARG, "1 packed documents, cu_seqlens is NULL");
    REFUSED(t.user = NULL, ARG, "wd is NULL");
#undef REFUSED
    t = s;
    CHECK_REFUSED(upipe_scan_fwd(&c, &self, &t, NULL, NULL), UPIPE_ERR_ARG, c.err, "the states are NULL");
    CHECK_REFUSED(upipe_scan_fwd(&c, NULL, &t, &states, NULL), UPIPE_ERR_ARG, c.err, "communicator is NULL");
    d.ring = 3, d.layout = UPIPE_CONTIGUOUS;
    CHECK_STATUS(upipe_plan_init(&zigzag, &d, &c.err), UPIPE_OK, c.err);
    t.plan = &zigzag;
    CHECK_REFUSED(upipe_scan_fwd(&c, &self, &t, &states, NULL), UPIPE_ERR_ARG, c.err,
                  "rank 0 of 3, on rank 0 of a communicator of 1");
    upipe_mem_destroy(&mem, NULL);
}

/* Fields of a call, and what is said where rank 1 has another value. */
static const char *const differing[] = {"position of its first token is 0",
                                        "heads of its state is 3",
                                        "size of a head's state is 6",
                                        "stage_heads is 1",
                                        "carry is 0",
                                        "cu_seqlens_n is 1",
                                        "cu_seqlens (hash) is"};

/* Ranks that do not agree say on what. */
static upipe_status differing_body(void *user, int rank)
{
    world *w = (world *)user;
    upipe_mem mem;
    upipe_ctx c = {.team = upipe_threads_comm(&w->team, rank)};
    static const int64_t documents[] = {0, 20, 100, -1, 100};
    float *carry = NULL;
    part p;
    context_pool(&c, &mem, &w->ops, 1 << 16, 8);
    UPIPE_TRY(part_init(w, rank, 0, &p, &c.err));
    if (rank == 1 && w->differs == 0) p.scan.first = 1;
    if (rank == 1 && w->differs == 1) p.scan.heads = 4;
    if (rank == 1 && w->differs == 2) p.scan.size = 1;
    if (rank == 1 && w->differs == 3) p.scan.stage_heads = 2;
    if (rank == 1 && w->differs == 4) carry = floats(SIZE * HEADS_MAX);
    if (rank == 1 && w->differs == 5) p.scan.borders = (upipe_borders){documents, 2};
    if (rank == 1 && w->differs == 6) p.scan.borders = (upipe_borders){documents + 3, 1};
    CHECK_REFUSED(
        upipe_scan_fwd(&c, c.team, &p.scan, &(upipe_states){.data = floats(SIZE * HEADS_MAX)}, carry),
        UPIPE_ERR_MISMATCH, c.err, differing[w->differs]);
    upipe_mem_destroy(&mem, NULL);
    return UPIPE_OK;
}

/* One rank goes forward, the other one back. */
static upipe_status crossing_body(void *user, int rank)
{
    world *w = (world *)user;
    upipe_mem mem;
    upipe_ctx c = {.team = upipe_threads_comm(&w->team, rank)};
    upipe_states states = {.data = floats(SIZE * HEADS_MAX)};
    upipe_status s;
    upipe_dry *dry;
    part p;
    context_pool(&c, &mem, &w->ops, 1 << 16, 8);
    UPIPE_TRY(part_init(w, rank, 0, &p, &c.err));
    dry = dry_begin(&p.plan, &w->ops, &s);
    if (s == UPIPE_OK && rank > 0) s = upipe_scan_fwd(&dry->ctx, &dry->team, &p.scan, &states, NULL);
    CHECK_STATUS(s, UPIPE_OK, dry->ctx.err); /* the record of a forward */
    CHECK_REFUSED(rank > 0 ? upipe_scan_bwd(&c, c.team, &p.scan, &states, NULL)
                           : upipe_scan_fwd(&c, c.team, &p.scan, &states, NULL),
                  UPIPE_ERR_MISMATCH, c.err, "its direction (1: backward) is 0 on rank 0 and 1 on rank 1");
    upipe_mem_destroy(&mem, NULL);
    return UPIPE_OK;
}

static void test_disagreements(world *w)
{
    static const int64_t document[] = {0, 100};
    *w = (world){
        .ops = w->ops, .tokens = 40, .ranks = 2, .ring = 1, .segments = 1, .heads = 3, .stage_heads = 1};
    w->borders = (upipe_borders){document, 1};
    for (w->differs = 0; w->differs < (int)(sizeof differing / sizeof *differing); ++w->differs)
        run(w, 20, differing_body, NULL);
    run(w, 20, crossing_body, NULL);
}

int main(int argc, char **argv)
{
    world *w = (world *)calloc(1, sizeof *w);
    w->ops = cpu_table();
    test_begin(argc, argv);
    TEST(test_passes(w));
    TEST(test_faults(w));
    TEST(test_refusals(w));
    TEST(test_disagreements(w));
    free(w);
    return test_end("scan");
}

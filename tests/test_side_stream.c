/* test_side_stream.c -- stages that overlap on a side stream: bits, bytes, order, failures of both */
#include "lib/block_checks.h"

static run_case make_case(int h, int hkv, int ranks, int chunk, upipe_dtype dtype)
{
    run_case t = run_of(6 * ranks, h, hkv, 32, 24, ranks, chunk, dtype);
    t.shape.batch = 2;
    t.shape.rope = 1;
    t.overlap = 1;
    t.deadline = 60;
    return t;
}

/* ---- bits and bytes ---- */

/* One line, a side stream on it, and a side stream that is a thread: the same bits, in every schedule;
 * run_block holds the bytes against the plan. */
static void test_same(int h, int hkv, int ranks, int chunk, int naive, int normed, upipe_dtype dtype)
{
    run_case t = make_case(h, hkv, ranks, chunk, dtype);
    run_result a, b;
    f32_block in;
    t.naive = naive;
    t.shape.normed = normed;
    t.shape.projected = normed;
    block_inputs(&t.shape, 7, &in);
    t.overlap = 0;
    CHECK(check_case(&t, 7, &a));
    t.overlap = 1;
    for (int side_stream = 0; side_stream < 2; ++side_stream) {
        t.side_stream_inline = side_stream == 0;
        CHECK(run_block(&t, &in, &b) == UPIPE_OK);
        CHECK(b.plan.overlap);
        CHECK_SAY(b.bytes.peak > a.bytes.peak, "stages that overlap hold %zu bytes, without %zu",
                  b.bytes.peak, a.bytes.peak);
        same_bits(&t.shape, &a, &b, NULL);
    }
}

/* Llama3-8B's attention on 8 ranks, 131,072 tokens on each: two stages hold more than one, and less than
 * all. */
static void test_peak(void)
{
    static const double units[] = {4.036, 4.540, 5.547};
    for (int i = 0; i < 3; ++i) {
        upipe_plan p;
        upipe_layer l = {0};
        const upipe_ops ops = cpu_table();
        upipe_dry *dry;
        upipe_status s;
        float none = 0;
        double held;
        upipe_plan_desc d = {.tokens = 1 << 20, .ranks = 8, .heads = 32, .kv_heads = 8, .head_dim = 128};
        d.dtype = UPIPE_BF16;
        d.chunk = i == 2 ? 32 : 8;
        d.overlap = i == 1;
        CHECK(upipe_plan_init(&p, &d, NULL) == UPIPE_OK);
        l.plan = &p;
        l.wq = l.wk = l.wv = &none;
        l.mask.causal = 1;
        dry = dry_begin(&p, &ops, &s);
        CHECK(s == UPIPE_OK);
        CHECK(upipe_dry_layer(dry, &l, 1) == UPIPE_OK);
        held = (double)upipe_dry_bytes(dry).peak / (double)upipe_plan_unit_bytes(&p);
        CHECK_SAY(fabs(held - units[i]) < 2e-3, /* scratch is the instruction set's */
                  "%g units, not %g", held, units[i]);
    }
}

/* ---- what happens beside what ---- */

enum { NOTES = 64 };

/* Two lines that do nothing until they are told to: what was posted is run by hand. */
typedef struct slow_side_stream {
    void (*task[NOTES])(void *arg);
    void *arg[NOTES];
    int posted, run;
} slow_side_stream;

static upipe_status slow_post(upipe_ctx *c, upipe_side_stream *side_stream, void (*task)(void *arg),
                              void *arg)
{
    slow_side_stream *s = (slow_side_stream *)side_stream->self;
    (void)c;
    s->task[s->posted] = task;
    s->arg[s->posted++] = arg;
    return UPIPE_OK;
}

static void slow_run(slow_side_stream *s, int upto)
{
    for (; s->run < upto; ++s->run) s->task[s->run](s->arg[s->run]);
}

/* The side stream is as late as it may be: it runs what comes up to preparation n, when that is asked for. */
static upipe_status slow_meet(upipe_ctx *c, upipe_side_stream *side_stream, int point, int64_t n)
{
    slow_side_stream *s = (slow_side_stream *)side_stream->self;
    (void)c;
    if (point == UPIPE_SIDE_READY) slow_run(s, n == 1 ? 1 : 2 * (int)n - 2);
    return UPIPE_OK;
}

static upipe_status slow_join(upipe_ctx *c, upipe_side_stream *side_stream)
{
    slow_side_stream *s = (slow_side_stream *)side_stream->self;
    (void)c;
    slow_run(s, s->posted);
    return UPIPE_OK;
}

typedef struct tale {
    char text[256];
    int fails; /* the note at which a step fails; 0 = none */
    int notes;
} tale;

static upipe_status tell(tale *t, upipe_ctx *c, char what, int i)
{
    size_t used = strlen(t->text);
    snprintf(t->text + used, sizeof t->text - used, "%c%d ", what, i);
    if (++t->notes == t->fails) return upipe_fail(&c->err, UPIPE_ERR_MEMORY, "note %d", t->notes);
    return UPIPE_OK;
}

static upipe_status tell_load(upipe_ctx *c, void *arg, int i)
{
    return tell((tale *)arg, c, 'p', i);
}

static upipe_status tell_store(upipe_ctx *c, void *arg, int i)
{
    return tell((tale *)arg, c, 'f', i);
}

static upipe_status tell_attend(upipe_ctx *c, void *arg, int i)
{
    return tell((tale *)arg, c, 'a', i);
}

static upipe_status tell_all(tale *t, upipe_side_stream *side_stream, int n, upipe_err *e)
{
    upipe_comm team;
    upipe_comm_self_state buf;
    const upipe_ops ops = cpu_table();
    upipe_status s;
    upipe_ctx c = {.ops = &ops, .team = &team};
    upipe_comm_self(&team, &buf, ops.copy);
    s = upi_pipeline_run(&c, side_stream, n, tell_load, tell_attend, tell_store, t);
    *e = c.err;
    return s;
}

static void test_order(void)
{
    static const int told[] = {1, 3, 3, 6, 5, 6, 9, 8, 9, 11, 11, 12};
    upipe_side_stream side_stream;
    slow_side_stream slow = {0};
    upipe_err e;
    tale t = {0};
    /* a side stream that runs tasks at once, and one that is as late as it may be: with both, every
     * preparation but the first lies before the attention of the stage before, or beside it */
    upipe_side_stream_inline(&side_stream, NULL);
    CHECK(tell_all(&t, &side_stream, 3, &e) == UPIPE_OK);
    CHECK_TEXT(t.text, "p0 p1 a0 f0 p2 a1 f1 a2 f2 ");
    memset(&t, 0, sizeof t);
    side_stream.self = &slow;
    side_stream.post = slow_post;
    side_stream.mark = upi_side_stream_inline_point;
    side_stream.meet = slow_meet;
    side_stream.join = slow_join;
    CHECK(tell_all(&t, &side_stream, 4, &e) == UPIPE_OK);
    CHECK_TEXT(t.text, "p0 a0 p1 a1 f0 p2 a2 f1 p3 a3 f2 f3 ");
    /* one step fails, on either line: the rank's own line stops, and so does the side stream, but for what it
     * had been given before the attention that broke; the sentence is that of the failure */
    for (int i = 1; i <= 12; ++i) {
        memset(&t, 0, sizeof t);
        memset(&slow, 0, sizeof slow);
        t.fails = i;
        CHECK(tell_all(&t, &side_stream, 4, &e) == UPIPE_ERR_MEMORY);
        CHECK_SAY(strstr(e.text, "note") != NULL, "note %d fails: '%s' after %s", i, e.text, t.text);
        CHECK_SAY(t.notes == told[i - 1], "note %d fails, %s", i, t.text);
        CHECK(slow.run == slow.posted);
    }
}

enum { TASKS = 3 * UPI_CPU_SIDE_STREAM_TASKS };

typedef struct task {
    struct task *all;
    int *ran; /* how many have */
    int turn; /* the place in which it ran */
} task;

static void note_turn(void *arg)
{
    task *t = (task *)arg;
    if (t == t->all) test_nap(0.05); /* the others are posted meanwhile, until there is no place */
    t->turn = (*t->ran)++;
}

/* More tasks than a side stream has places for wait for one: each runs once, in the order in which they were posted. */
static void test_places(void)
{
    upipe_cpu_side_stream buf;
    upipe_side_stream side;
    upipe_ctx c = {0};
    task tasks[TASKS];
    int ran = 0;
    CHECK_STATUS(upipe_cpu_side_stream_init(&buf, &side, &c.err), UPIPE_OK, c.err);
    for (int i = 0; i < TASKS; ++i) {
        tasks[i] = (task){tasks, &ran, -1};
        CHECK_STATUS(side.post(&c, &side, note_turn, &tasks[i]), UPIPE_OK, c.err);
    }
    CHECK_STATUS(side.join(&c, &side), UPIPE_OK, c.err);
    for (int i = 0; i < TASKS; ++i)
        CHECK_SAY(tasks[i].turn == i, "task %d ran in place %d", i, tasks[i].turn);
    CHECK_INT(ran, TASKS);
    upipe_cpu_side_stream_free(&buf);
}

/* ---- failures ---- */

/* Most allocations are the side stream's. */
static void test_out_of_memory(int h, int hkv, int naive)
{
    run_case t = make_case(h, hkv, 2, 2, UPIPE_BF16);
    t.naive = naive;
    t.shape.normed = 1;
    check_out_of_memory(&t, 0, 30);
}

static int attended, attend_fails; /* on rank 1; one test at a time */
static upipe_status (*real_fwd)(upipe_ctx *c, const upipe_attn *a);
static upipe_status (*real_bwd)(upipe_ctx *c, const upipe_attn_grad *g);

static int attention_breaks(upipe_ctx *c)
{
    if (c->team->rank != 1 || ++attended != attend_fails) return 0;
    upipe_fail(&c->err, UPIPE_ERR_BACKEND, "attention %d breaks", attended);
    return 1;
}

static upipe_status broken_fwd(upipe_ctx *c, const upipe_attn *a)
{
    return attention_breaks(c) ? UPIPE_ERR_BACKEND : real_fwd(c, a);
}

static upipe_status broken_bwd(upipe_ctx *c, const upipe_attn_grad *g)
{
    return attention_breaks(c) ? UPIPE_ERR_BACKEND : real_bwd(c, g);
}

static void break_attention(upipe_ops *ops)
{
    real_fwd = ops->attn_fwd;
    real_bwd = ops->attn_bwd;
    ops->attn_fwd = broken_fwd;
    ops->attn_bwd = broken_bwd;
}

/* Attention fails on one rank, forward or backward, while its side stream is in another stage's all-to-all: the
 * team is told, not left to the deadline. */
static void test_attention_fails(void)
{
    run_case t = make_case(8, 4, 2, 2, UPIPE_F32);
    f32_block in;
    t.shape.batch = 1;
    t.table = break_attention;
    t.expect_failure = 1;
    t.deadline = 500;
    block_inputs(&t.shape, 5, &in);
    for (attend_fails = 1; attend_fails <= 8; ++attend_fails) {
        run_result r;
        attended = 0;
        CHECK(run_block(&t, &in, &r) != UPIPE_OK);
        CHECK_REFUSED(r.statuses[1], UPIPE_ERR_BACKEND, r.errors[1], "breaks");
        CHECK_REFUSED(r.statuses[0], UPIPE_ERR_ABORTED, r.errors[0], "breaks");
    }
}

enum { NOT_YET, ATTENDING, FAILED };
static int slow_state; /* of rank 1, atomic */

static upipe_status slow_fwd(upipe_ctx *c, const upipe_attn *a)
{
    if (c->team->rank == 1) {
        int before = NOT_YET;
        __atomic_compare_exchange_n(&slow_state, &before, ATTENDING, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
        for (int i = 0; i < 50 && __atomic_load_n(&slow_state, __ATOMIC_SEQ_CST) != FAILED; ++i)
            test_nap(0.01);
        if (__atomic_load_n(&slow_state, __ATOMIC_SEQ_CST) == FAILED) test_nap(4);
    }
    return real_fwd(c, a);
}

static void slow_attention(upipe_ops *ops)
{
    real_fwd = ops->attn_fwd;
    ops->attn_fwd = slow_fwd;
}

static upipe_status guard_beside(void *user, size_t bytes, int use, const char *tag)
{
    int attending = ATTENDING;
    (void)bytes;
    (void)use, (void)tag;
    if (user == NULL) return UPIPE_OK;
    return __atomic_compare_exchange_n(&slow_state, &attending, FAILED, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)
               ? UPIPE_ERR_MEMORY
               : UPIPE_OK;
}

/* The side stream fails beside a long attention: the others learn of it before their deadline, not after the
 * attention. */
static void test_side_stream_fails_early(void)
{
    run_case t = make_case(8, 4, 2, 2, UPIPE_F32);
    f32_block in;
    run_result r;
    t.shape.batch = 1;
    t.table = slow_attention;
    t.guard = guard_beside;
    t.guard_user[1] = &slow_state;
    t.expect_failure = 1;
    t.deadline = 2;
    slow_state = NOT_YET;
    block_inputs(&t.shape, 5, &in);
    CHECK(run_block(&t, &in, &r) != UPIPE_OK);
    CHECK_STATUS(r.statuses[1], UPIPE_ERR_MEMORY, r.errors[1]);
    CHECK_REFUSED(r.statuses[0], UPIPE_ERR_ABORTED, r.errors[0], "guard refused");
}

/* ---- what is refused ---- */

static void test_refused(void)
{
    upipe_plan p;
    upipe_layer l = {0};
    upipe_saved save;
    upipe_mem mem;
    upipe_mem_block blocks[32];
    upipe_comm team;
    upipe_comm_self_state buf;
    const upipe_ops ops = cpu_table();
    upipe_ctx c = {.ops = &ops, .mem = &mem, .team = &team};
    upipe_err e;
    upipe_fpdt f = {0};
    float *w = f32_buf(128 * 64);
    upipe_plan_desc d = {.tokens = 16, .heads = 4, .head_dim = 32, .overlap = 1, .ring = 2};
    CHECK_REFUSED(upipe_plan_init(&p, &d, &e), UPIPE_ERR_UNSUPPORTED, e, "a ring of 2");
    d.ring = 1, d.ranks = 3, d.heads = 8, d.chunk = 3;
    CHECK_REFUSED(upipe_plan_init(&p, &d, &e), UPIPE_ERR_UNSUPPORTED, e, "cannot overlap");
    d.chunk = 8; /* one stage: nothing to overlap, and no side stream is asked for */
    CHECK_STATUS(upipe_plan_init(&p, &d, &e), UPIPE_OK, e);
    CHECK(!p.overlap);
    d.ranks = 1;
    d.chunk = 2;
    f.desc = d;
    f.segments = 2;
    CHECK_STATUS(upipe_fpdt_plan(&f, 0, &p, &e), UPIPE_OK, e);
    CHECK(!p.overlap); /* copies do */
    CHECK_STATUS(upipe_plan_init(&p, &d, &e), UPIPE_OK, e);
    CHECK(p.overlap);
    upipe_comm_self(&team, &buf, ops.copy);
    upipe_mem_init_dry(&mem, blocks, 32);
    l.plan = &p;
    l.mask.causal = 1;
    l.wq = l.wk = l.wv = w;
    CHECK_REFUSED(upipe_layer_fwd(&c, &l, &save, upipe_view_packed(w, UPIPE_F32, 16, 1, 256)), UPIPE_ERR_ARG,
                  c.err, "ctx->side_stream is NULL");
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    TEST(test_order());
    TEST(test_places());
    TEST(test_refused());
    TEST(test_peak());
    TEST(test_same(8, 8, 2, 2, 0, 0, UPIPE_F32));
    TEST(test_same(16, 8, 2, 2, 0, 1, UPIPE_BF16));
    TEST(test_same(16, 4, 4, 4, 0, 0, UPIPE_F32));
    TEST(test_same(8, 1, 2, 2, 0, 1, UPIPE_F32));
    TEST(test_same(12, 6, 2, 4, 0, 0, UPIPE_BF16));
    TEST(test_same(8, 4, 2, 2, 1, 0, UPIPE_F32));
    TEST(test_same(4, 2, 1, 1, 0, 1, UPIPE_F32));
    TEST(test_out_of_memory(8, 4, 0));
    TEST(test_out_of_memory(4, 1, 0));
    TEST(test_out_of_memory(8, 4, 1));
    TEST(test_attention_fails());
    TEST(test_side_stream_fails_early());
    return test_end("side stream");
}

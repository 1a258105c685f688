/* test_linear_parts -- a layer of linear attention in two calls, and scratch that does not depend on documents
 *
 * A forward that leaves y out, and the output from what it has saved, also in x's place, have the bits of one call; so has
 * the backward behind them. With `capacity` a pool holds the same bytes whatever the borders are, and no bit is another.
 */
#include "upipe/cpu/upipe_cpu_linear.h"
#include "upipe/upipe.h"

#include "lib/context.h"
#include "lib/test.h"

enum {
    N = 150,
    MODEL = 12,
    HEADS = 4,
    KEYS = 2,
    KEY = 6,
    VALUE = 5,
    TAPS = 4,
    QKV = 2 * KEYS * KEY + HEADS * VALUE,
    WIDE = HEADS * VALUE,
    SLAB = 4 << 20,
    BLOCKS = 64
};

typedef struct weights {
    float qkv[QKV * MODEL], z[WIDE * MODEL], b[HEADS * MODEL], a[HEADS * MODEL], out[MODEL * WIDE];
    float conv[QKV * TAPS], a_log[HEADS], dt_bias[HEADS], norm[VALUE];
} weights;

typedef struct bench {
    upipe_ops ops;
    upipe_linear_ops rules;
    upipe_plan plan;
    upipe_linear_layer l;
    upipe_mem mem;
    upipe_ctx c;
    upipe_comm self;
    upipe_comm_self_state alone;
    weights w;
    float x[N * MODEL], dy[N * MODEL];
} bench;

/* What a forward and a backward give. */
typedef struct result {
    float y[N * MODEL], dx[N * MODEL];
    weights grads;
} result;

static upipe_view rows_of(float *data)
{
    return upipe_view_packed(data, UPIPE_F32, N, 1, MODEL);
}

static void bench_begin(bench *q)
{
    test_rng r = {35};
    float *w = (float *)&q->w;
    upipe_plan_desc d = {.tokens = N, .heads = 8, .head_dim = 32, .model_dim = MODEL};
    memset(q, 0, sizeof *q);
    q->ops = cpu_table();
    upipe_cpu_linear(&q->rules);
    context_pool(&q->c, &q->mem, &q->ops, SLAB, BLOCKS);
    upipe_comm_self(&q->self, &q->alone, q->ops.copy);
    q->c.team = &q->self;
    CHECK_STATUS(upipe_plan_init(&q->plan, &d, &q->c.err), UPIPE_OK, q->c.err);
    for (size_t i = 0; i < sizeof q->w / sizeof *w; ++i) w[i] = (float)test_normal(&r) / 2;
    for (int i = 0; i < N * MODEL; ++i) {
        q->x[i] = (float)test_normal(&r);
        q->dy[i] = (float)test_normal(&r);
    }
    q->l = (upipe_linear_layer){.plan = &q->plan,
                                .rules = &q->rules,
                                .heads = HEADS,
                                .key_heads = KEYS,
                                .key_dim = KEY,
                                .value_dim = VALUE,
                                .taps = TAPS,
                                .chunk = 16,
                                .stage_keys = 1,
                                .tile_rows = 64,
                                .norm_eps = 1e-5f};
    q->l.w_qkv = q->w.qkv, q->l.w_z = q->w.z, q->l.w_b = q->w.b, q->l.w_a = q->w.a, q->l.w_out = q->w.out;
    q->l.conv = q->w.conv, q->l.a_log = q->w.a_log, q->l.dt_bias = q->w.dt_bias, q->l.norm_weight = q->w.norm;
}

static upipe_status backward(bench *q, upipe_linear_layer_saved *saved, result *to)
{
    weights *g = &to->grads;
    const upipe_linear_layer_grads grads = {g->qkv,  g->z,     g->b,       g->a,   g->out,
                                            g->conv, g->a_log, g->dt_bias, g->norm};
    return upipe_linear_layer_bwd(&q->c, &q->self, &q->l, rows_of(to->dx), &grads, saved, rows_of(q->dy),
                                  rows_of(q->x), NULL);
}

/* Bytes of a dry run: what a forward holds at most, what it leaves, what both directions hold at most. */
static void dry_bytes(const bench *q, size_t *forward, size_t *left, size_t *both)
{
    upipe_status s;
    upipe_dry *dry = dry_begin(&q->plan, &q->ops, &s);
    float *none = (float *)dry->mem.slab;
    const upipe_linear_layer_grads grads = {none, none, none, none, none, none, none, none, none};
    const upipe_view x = rows_of(none), y = rows_of(none + 1);
    upipe_linear_layer_saved saved;
    CHECK_STATUS(s, UPIPE_OK, dry->ctx.err);
    CHECK_STATUS(upipe_linear_layer_fwd(&dry->ctx, &dry->team, &q->l, &saved, y, x, NULL), UPIPE_OK,
                 dry->ctx.err);
    *forward = dry->mem.peak, *left = dry->mem.live;
    CHECK_STATUS(upipe_linear_layer_bwd(&dry->ctx, &dry->team, &q->l, y, &grads, &saved, y, x, NULL),
                 UPIPE_OK, dry->ctx.err);
    *both = dry->mem.peak;
}

/* In one call. */
static void whole(bench *q, result *to)
{
    upipe_linear_layer_saved saved;
    memset(to, 0, sizeof *to);
    q->mem.peak = 0;
    CHECK_STATUS(upipe_linear_layer_fwd(&q->c, &q->self, &q->l, &saved, rows_of(to->y), rows_of(q->x), NULL),
                 UPIPE_OK, q->c.err);
    CHECK_STATUS(backward(q, &saved, to), UPIPE_OK, q->c.err);
    CHECK_INT(q->mem.live, 0);
}

/* The third block finds no memory. */
static upipe_status full(void *user, size_t bytes, int use, const char *tag)
{
    static int blocks;
    (void)user, (void)bytes, (void)use, (void)tag;
    return ++blocks % 3 == 0 ? UPIPE_ERR_MEMORY : UPIPE_OK;
}

static void test_parts(void)
{
    static bench q;
    static result one, two;
    upipe_linear_layer_saved saved, none = {0};
    upipe_view nothing = rows_of(NULL);
    size_t held, forward, left, both;
    bench_begin(&q);
    dry_bytes(&q, &forward, &left, &both);
    whole(&q, &one);
    memset(&two, 0, sizeof two);
    CHECK_STATUS(upipe_linear_layer_fwd(&q.c, &q.self, &q.l, &saved, nothing, rows_of(q.x), NULL), UPIPE_OK,
                 q.c.err);
    held = q.mem.live;
    CHECK_INT(held, left);
    q.mem.peak = held;
    CHECK_STATUS(upipe_linear_layer_out_fwd(&q.c, &q.self, &q.l, &saved, rows_of(two.y), rows_of(q.x)),
                 UPIPE_OK, q.c.err);
    CHECK_BYTES(two.y, one.y, sizeof one.y);
    CHECK(q.mem.peak > held && q.mem.peak <= forward);
    CHECK_INT(q.mem.live, held);
    memcpy(two.y, q.x, sizeof two.y); /* in x's place */
    CHECK_STATUS(upipe_linear_layer_out_fwd(&q.c, &q.self, &q.l, &saved, rows_of(two.y), rows_of(two.y)),
                 UPIPE_OK, q.c.err);
    CHECK_BYTES(two.y, one.y, sizeof one.y);
#define OUT(save, y) upipe_linear_layer_out_fwd(&q.c, &q.self, &q.l, save, y, rows_of(q.x))
    CHECK_REFUSED(OUT(NULL, rows_of(two.y)), UPIPE_ERR_ARG, q.c.err, "save is NULL, or not there any more");
    CHECK_REFUSED(OUT(&none, rows_of(two.y)), UPIPE_ERR_ARG, q.c.err, "save is NULL, or not there any more");
    CHECK_REFUSED(OUT(&saved, nothing), UPIPE_ERR_ARG, q.c.err, "y is NULL");
    q.l.chunk = 8;
    CHECK_REFUSED(OUT(&saved, rows_of(two.y)), UPIPE_ERR_ARG, q.c.err,
                  "its chunk is not that of the forward");
    q.l.chunk = 16;
#undef OUT
    CHECK_STATUS(backward(&q, &saved, &two), UPIPE_OK, q.c.err);
    CHECK_BYTES(&two, &one, sizeof one);
    CHECK_INT(q.mem.live, 0);
    /* without memory for the output the pool is as before */
    CHECK_STATUS(upipe_linear_layer_fwd(&q.c, &q.self, &q.l, &saved, nothing, rows_of(q.x), NULL), UPIPE_OK,
                 q.c.err);
    q.mem.guard = full;
    CHECK(upipe_linear_layer_out_fwd(&q.c, &q.self, &q.l, &saved, rows_of(two.y), rows_of(q.x)) ==
          UPIPE_ERR_MEMORY);
    CHECK_INT(q.mem.live, held);
    q.mem.guard = NULL;
    CHECK_STATUS(upipe_linear_layer_saved_free(&q.c, &saved), UPIPE_OK, q.c.err);
    upipe_mem_destroy(&q.mem, NULL);
    buffers_free(0);
}

/* The same bytes for all documents, and the same bits as without. */
static void test_capacity(void)
{
    static const int64_t few[] = {0, 70, 150}, many[] = {0, 1, 2, 3, 40, 41, 90, 91, 92, 93, 150},
                         down[] = {3, 1};
    static const upipe_borders borders[] = {{NULL, 0}, {few, 2}, {many, 10}};
    static bench q;
    static result one, two;
    int64_t capacity[N + 1];
    size_t peak = 0, least = SIZE_MAX, forward, left, both;
    bench_begin(&q);
    for (int i = 0; i <= N; ++i) capacity[i] = i;
    for (int i = 0; i < 3; ++i) {
        q.l.borders = borders[i];
        q.l.capacity = (upipe_borders){NULL, 0};
        whole(&q, &one);
        if (q.mem.peak < least) least = q.mem.peak;
        dry_bytes(&q, &forward, &left, &both);
        CHECK_INT(q.mem.peak, both);
        q.l.capacity = (upipe_borders){capacity, 12};
        whole(&q, &two);
        CHECK_BYTES(&two, &one, sizeof one);
        if (i > 0) CHECK_INT(q.mem.peak, peak);
        peak = q.mem.peak;
    }
    CHECK(peak > least);
    q.l.capacity = (upipe_borders){down, 1};
    CHECK_REFUSED(upipe_linear_layer_fwd(&q.c, &q.self, &q.l, &(upipe_linear_layer_saved){0}, rows_of(one.y),
                                         rows_of(q.x), NULL),
                  UPIPE_ERR_ARG, q.c.err, "packed document 0 is [3, 1)");
    upipe_mem_destroy(&q.mem, NULL);
    buffers_free(0);
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    TEST(test_parts());
    TEST(test_capacity());
    return test_end("linear_parts");
}

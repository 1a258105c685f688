/* test_activations -- what the trainer keeps for its backward: exact bytes at Llama3-8B's shape, and for random models,
 * methods, settings and stages of ZeRO the planned bytes on every rank and the bits that keeping every input in the rank's
 * pool gives, with ZeRO 1, no weights gathered ahead and the optimizer's states there; a rank that fails while others gather ahead
 *
 * Draws as lib/test.h has them; a failing one prints the line that replays it.
 */
#include "upipe/net/upipe_net_threads_grid.h"
#include "upipe/cuda/upipe_cuda_bytes.h"
#include "upipe/upipe.h"

#define PROGRAM "test_activations"
#include "../examples/train/model/lora_flag.h"
#include "../examples/train/state/memory.h"
#include "../examples/plan/exact.h"
#include "lib/context.h"
#include "lib/test.h"

/* ---- exact bytes ---- */

/* What more tokens add to a rank, in units: a rank's share of x; and the slab's bytes that do not depend on them. */
typedef struct slope {
    double peak, slab, host, host_slab, constant;
} slope;

/* Llama3-8B */
static const llama_config llama = {.layers = 32,
                                   .dim = 4096,
                                   .hidden = 14336,
                                   .vocab = 128256,
                                   .heads = 32,
                                   .kv_heads = 8,
                                   .head_dim = 128,
                                   .rope_theta = 500000,
                                   .norm_eps = 1e-5};

static activations_setting kept_of(int kind, int64_t k, int grad)
{
    activations_setting a;
    a.kind = kind;
    a.k = k;
    a.grad = grad;
    return a;
}

/* A training in bf16, everything sharded, of one replica and one sequence. */
static setting setting_for(const llama_layout *layout, int method, int ranks, int64_t tokens,
                           activations_setting kept)
{
    setting s = {.layout = layout, .replicas = 1, .batch = 1, .accumulate = 1, .dtype = UPIPE_BF16};
    s.how.method = method;
    s.how.ranks = ranks;
    CHECK(method_resolve(&s.how, 1) == 0);
    s.tokens = tokens;
    s.activations = kept;
    s.zero = 3;
    return s;
}

static memory_plan planned(model *m, const setting *s, int rank, const upipe_ops *ops)
{
    memory_plan plan = {0};
    upipe_err e;
    CHECK_STATUS(setting_model(m, s, rank, &e), UPIPE_OK, e);
    CHECK_STATUS(memory_plan_make(&plan, m, ops, NULL, NULL, &e), UPIPE_OK, e);
    return plan;
}

/* Of the largest rank of eight. segments: 0 for the whole sequence at once */
static slope slope_of(const llama_config *config, int method, int segments, activations_setting kept,
                      int prefetch, const upipe_ops *ops)
{
    enum { RANKS = 8, TOKENS = 1 << 20, LARGE = 5 };
    memory_plan most[2] = {0};
    llama_layout layout;
    slope s = {0};
    double unit = (double)(TOKENS / RANKS) * (LARGE - 1) * (double)config->dim * 2;
    CHECK(llama_layout_init(&layout, config) == 0);
    for (int i = 0; i < 2; ++i)
        for (int rank = 0; rank < RANKS; rank += rank == 0 && config->heads % RANKS == 0 ? RANKS - 1 : 1) {
            setting of = setting_for(&layout, method, RANKS, (int64_t)(i == 0 ? 1 : LARGE) * TOKENS, kept);
            memory_plan plan;
            model m;
            of.how.segments = segments;
            of.prefetch = prefetch;
            plan = planned(&m, &of, rank, ops);
            most[i].peak = upipe_max_bytes(most[i].peak, plan.peak);
            most[i].need = upipe_max_bytes(most[i].need, plan.need);
            most[i].host = upipe_max_bytes(most[i].host, plan.host);
            most[i].host_need = upipe_max_bytes(most[i].host_need, plan.host_need);
        }
    s.peak = (double)(most[1].peak - most[0].peak) / unit;
    s.slab = (double)(most[1].need - most[0].need) / unit;
    s.host = (double)(most[1].host - most[0].host) / unit;
    s.host_slab = (double)(most[1].host_need - most[0].host_need) / unit;
    s.constant = (double)most[0].need - (double)(most[1].need - most[0].need) / (LARGE - 1);
    llama_layout_free(&layout);
    return s;
}

/* What docs/memory.md says of a GPU of 80 GB a rank, in slabs: holes count. */
static void test_slopes(void)
{
    enum {
        ULYSSES = METHOD_ULYSSES,
        UPIPE = METHOD_UPIPE,
        FPDT = METHOD_FPDT,
        UPIPE_FPDT = METHOD_UPIPE_FPDT
    };
    static const struct {
        int method, segments, kind, k, grad, prefetch;
        double slab_cpu, slab_cuda, host; /* at most */
    } rows[] = {{UPIPE, 0, ACTIVATIONS_OFFLOAD, 0, 0, 0, 5.1, 5.35, 32.1},
                {UPIPE, 0, ACTIVATIONS_OFFLOAD, 0, 1, 0, 4.15, 4.55, 33.1},
                {ULYSSES, 0, ACTIVATIONS_OFFLOAD, 0, 0, 0, 6.6, 7.6, 32.1},
                {ULYSSES, 0, ACTIVATIONS_OFFLOAD, 0, 1, 0, 5.6, 6.6, 33.1},
                {UPIPE_FPDT, 16, ACTIVATIONS_OFFLOAD, 0, 0, 0, 1.25, 1.25, 40.1},
                {FPDT, 16, ACTIVATIONS_OFFLOAD, 0, 0, 0, 1.65, 1.65, 39.1},
                {UPIPE, 0, ACTIVATIONS_SAC, 0, 0, 0, 5.1, 5.35, 64.6},
                {UPIPE, 0, ACTIVATIONS_SAC, 0, 1, 0, 4.15, 4.55, 65.6},
                {UPIPE, 0, ACTIVATIONS_SAC, 8, 0, 0, 5.1, 5.35, 40.2},
                {UPIPE, 0, ACTIVATIONS_BLOCKS, 2, 0, 0, 5.1, 5.35, 18.1},
                {UPIPE, 0, ACTIVATIONS_BLOCKS, 4, 0, 0, 5.1, 5.35, 14.1},
                {UPIPE, 0, ACTIVATIONS_BLOCKS, 2, 1, 0, 4.15, 4.55, 19.1},
                {UPIPE, 0, ACTIVATIONS_OFFLOAD, 0, 0, 1, 5.1, 5.35, 32.1},
                {UPIPE_FPDT, 16, ACTIVATIONS_OFFLOAD, 0, 0, 1, 1.25, 1.25, 40.1},
                {UPIPE, 0, ACTIVATIONS_SAO, 4, 0, 0, 13.1, 13.35, 24.1}};
    upipe_ops ops[2];
    upipe_cpu_ops(&ops[0]);
    upipe_cuda_plan_ops(&ops[1]);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; ++i)
        for (int table = 0; table < 2; ++table) {
            const double most = table == 0 ? rows[i].slab_cpu : rows[i].slab_cuda;
            const slope s =
                slope_of(&llama, rows[i].method, rows[i].segments,
                         kept_of(rows[i].kind, rows[i].k, rows[i].grad), rows[i].prefetch, &ops[table]);
            CHECK_SAY(s.peak <= most, "row %zu, %s: a peak's slope of %.4f, at most %.2f", i, ops[table].name,
                      s.peak, most);
            /* the unit that is there earlier leaves a hole, which does not grow */
#ifndef UPI_MEM_ASAN /* red zones keep blocks from taking each other's places */
            CHECK_SAY(s.slab <= most && (rows[i].prefetch || s.peak <= s.slab),
                      "row %zu, %s: a slab's slope of %.4f, at most %.2f; peak %.4f", i, ops[table].name,
                      s.slab, most, s.peak);
#endif
            CHECK_SAY(s.constant <= (table == 1 && rows[i].prefetch ? 18.9 : 18.6) * (1 << 30),
                      "row %zu, %s: %.3f GiB of a slab are constant with ZeRO 3", i, ops[table].name,
                      s.constant / (1 << 30));
            CHECK_SAY(s.host_slab <= rows[i].host && s.host <= s.host_slab,
                      "row %zu, %s: a second pool's slope of %.4f, at most %.2f; peak %.4f", i,
                      ops[table].name, s.host_slab, rows[i].host, s.host);
        }
}

/* By plan: 5M tokens with one copy a layer, 8M and 10M with blocks of two layers, on 8 GPUs with 75 usable GiB each and
 * 1.9 TiB of host memory, everything sharded. */
static void test_far(void)
{
    static const struct {
        int64_t tokens;
        int kind, k;
    } rows[] = {{5, ACTIVATIONS_OFFLOAD, 0}, {8, ACTIVATIONS_BLOCKS, 2}, {10, ACTIVATIONS_BLOCKS, 2}};
    const double gib = 1 << 30;
    memory_plan plan[3];
    llama_layout layout;
    upipe_ops ops;
    double grows;
    model m;
    upipe_cuda_plan_ops(&ops);
    CHECK(llama_layout_init(&layout, &llama) == 0);
    for (int i = 0; i < 3; ++i) {
        const setting s =
            setting_for(&layout, METHOD_UPIPE, 8, rows[i].tokens << 20, kept_of(rows[i].kind, rows[i].k, 0));
        plan[i] = planned(&m, &s, 0, &ops);
        CHECK_SAY((double)plan[i].need <= 75 * gib && 8.0 * (double)plan[i].host_need <= 1.9 * 1024 * gib,
                  "%lldM tokens: %.2f GiB a GPU, %.2f of the host", (long long)rows[i].tokens,
                  (double)plan[i].need / gib, 8 * (double)plan[i].host_need / gib);
    }
    grows = (double)(plan[2].need - plan[1].need) / 2; /* blocks hold as much of a GPU as one copy a layer */
    CHECK_SAY((double)plan[0].need - 5 * grows <= 18.6 * gib, "the constant part is %.2f GiB",
              ((double)plan[0].need - 5 * grows) / gib);
    llama_layout_free(&layout);
}

/* By plan: one and two GPUs of 80 GiB, of which 5 are left free, train Llama3-8B in full on 1M and 4M tokens without
 * segments, within 1.5 TiB of the host's memory, where they would hold twice what there is without --offload-optimizer. */
static void test_few(void)
{
    static const struct {
        int64_t tokens;
        int ranks;
        size_t slab[3], host[3]; /* with nothing, the optimizer, and weights too in the second pool */
    } rows[] = {{1, 1, {177024925952, 48545005824, 32485015808}, {274877906944, 403357827072, 419417817088}},
                {4, 2, {140749619456, 76509659392, 68479664384}, {549755813888, 613995773952, 622025768960}}};
    const double gib = 1 << 30;
    llama_layout layout;
    upipe_ops ops;
    upipe_cuda_plan_ops(&ops);
    CHECK(llama_layout_init(&layout, &llama) == 0);
    for (int i = 0; i < 2; ++i)
        for (int moved = 0; moved < 3; ++moved) {
            setting s = setting_for(&layout, METHOD_UPIPE, rows[i].ranks, rows[i].tokens << 20,
                                    kept_of(ACTIVATIONS_OFFLOAD, 0, 0));
            memory_plan plan;
            model m;
            s.offload_optimizer = moved > 0;
            s.offload_weights = moved > 1;
            plan = planned(&m, &s, 0, &ops);
#ifndef UPI_MEM_ASAN
            CHECK_INT(plan.need, rows[i].slab[moved]);
            CHECK_INT(plan.host_need, rows[i].host[moved]);
#endif
            CHECK(((double)plan.need <= 75 * gib) == (moved > 0));
            CHECK(rows[i].ranks * (double)plan.host_need <= 1536 * gib);
        }
    llama_layout_free(&layout);
}

/* By plan: Llama3-8B with adapters of rank 16 on cards of 24 GiB, of which 5 are left free, at these tokens and at twice as
 * many. With the optimizer there, and then weights too, in the second pool. */
static void test_adapters(void)
{
    enum { ONE = 1 << 18, NOTHING = 0, OPTIMIZER = 1, WEIGHTS = 2 };
    static const char all[] = "16:32:q,k,v,o,gate,up,down", qkvo[] = "16:32:q,k,v,o";
    static const struct {
        const char *lora;
        int ranks, zero, method, away;
        int64_t tokens;
        size_t slab[2], host[2];
    } rows[] = {
        {all, 1, 3, METHOD_UPIPE, WEIGHTS, 2 * ONE, {16453714176, 32568262912}, {154253918208, 291692871680}},
        {all,
         1,
         2,
         METHOD_UPIPE_FPDT,
         OPTIMIZER,
         ONE,
         {19991773184, 23484579840},
         {84792049664, 168913010688}},
        {qkvo,
         1,
         2,
         METHOD_UPIPE_FPDT,
         NOTHING,
         ONE,
         {20153253888, 23646060544},
         {84120961024, 168241922048}},
        {all, 4, 3, METHOD_UPIPE, NOTHING, 4 * ONE, {14012662016, 23482417408}, {68719476736, 137438953472}},
        {all, 4, 3, METHOD_UPIPE, WEIGHTS, 4 * ONE, {9808920832, 19278676224}, {72923217920, 141642694656}}};
    upipe_ops ops;
    upipe_err e;
    upipe_cuda_plan_ops(&ops);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; ++i) {
        llama_layout layout;
        setting s =
            setting_for(&layout, rows[i].method, rows[i].ranks, 0, kept_of(ACTIVATIONS_OFFLOAD, 0, 0));
        CHECK_STATUS(llama_layout_trained(&layout, &llama, NULL, rows[i].lora, &e), UPIPE_OK, e);
        s.zero = rows[i].zero;
        s.offload_optimizer = rows[i].away >= OPTIMIZER;
        s.offload_weights = rows[i].away >= WEIGHTS;
        for (int twice = 0; twice < 2; ++twice) {
            memory_plan plan;
            model m;
            s.tokens = rows[i].tokens << twice;
            plan = planned(&m, &s, 0, &ops);
#ifndef UPI_MEM_ASAN
            CHECK_INT(plan.need, rows[i].slab[twice]);
            CHECK_INT(plan.host_need, rows[i].host[twice]);
#endif
            if (twice == 0) CHECK((double)plan.need <= 19.0 * (1 << 30));
        }
        llama_layout_free(&layout);
    }
}

/* 28/4 heads on 8 ranks: some ranks have four heads, and hold more than rank 0. */
static void test_largest(void)
{
    const llama_config qwen = {.layers = 28,
                               .dim = 3584,
                               .hidden = 18944,
                               .vocab = 152064,
                               .heads = 28,
                               .kv_heads = 4,
                               .head_dim = 128,
                               .attention_bias = LLAMA_BIAS_QKV,
                               .rope_theta = 1000000,
                               .norm_eps = 1e-6};
    const upipe_ops ops = cpu_table();
    slope s;
    s = slope_of(&qwen, METHOD_ULYSSES, 0, kept_of(ACTIVATIONS_OFFLOAD, 0, 0), 0, &ops);
    CHECK_SAY(s.peak > 7.5 && s.peak <= 8, "the largest rank's slope is %.4f", s.peak);
}

/* ---- what is sent and copied ---- */

static int transfers; /* of the team */

static upipe_status count_start(upipe_ctx *c, upipe_comm *comm, const upipe_msg *list, int n)
{
    ++transfers;
    return upi_dry_start(c, comm, list, n);
}

/* All-to-alls of a layer's attention, forward and backward: the table of docs/memory.md. */
static void test_transfers(void)
{
    static const struct {
        int chunk, forward, backward;
    } rows[] = {{8, 10, 20}, {32, 4, 8}};
    const float weight = 0;
    const upipe_ops ops = cpu_table();
    for (size_t i = 0; i < sizeof rows / sizeof *rows; ++i) {
        upipe_layer l = {0};
        upipe_plan p;
        upipe_saved saved;
        upipe_status s;
        upipe_err e;
        upipe_dry *dry;
        void *x;
        upipe_plan_desc d = {.tokens = 4096, .ranks = 8, .heads = 32, .kv_heads = 8, .head_dim = 128};
        d.model_dim = 4096, d.chunk = rows[i].chunk, d.dtype = UPIPE_BF16;
        CHECK_STATUS(upipe_plan_init(&p, &d, &e), UPIPE_OK, e);
        dry = dry_begin(&p, &ops, &s);
        l.plan = &p;
        l.wq = l.wk = l.wv = l.wo = &weight;
        CHECK_STATUS(s, UPIPE_OK, dry->ctx.err);
        dry->team.ops.start = count_start;
        transfers = 0;
        CHECK_STATUS(upipe_alloc(&dry->ctx, &x, upipe_plan_unit_bytes(&p), UPIPE_USE_OTHER, "x"), UPIPE_OK,
                     dry->ctx.err);
        CHECK_STATUS(
            upipe_layer_fwd(&dry->ctx, &l, &saved, upipe_view_packed(x, UPIPE_BF16, p.rows, 1, 4096)),
            UPIPE_OK, dry->ctx.err);
        CHECK_INT(transfers, rows[i].forward);
        CHECK_STATUS(upipe_saved_free(&dry->ctx, &saved), UPIPE_OK, dry->ctx.err);
        transfers = 0;
        CHECK_STATUS(upipe_dry_layer(dry, &l, 1), UPIPE_OK, dry->ctx.err);
        CHECK_INT(transfers, rows[i].forward + rows[i].backward);
    }
}

/* A step's copies between the pools in units, and what attention sends, of the same table. */
static void test_moved(void)
{
    const double o = 1 + 1.0 / 64; /* O and lse */
    const struct {
        int kind, k, grad, attention; /* layers of which the backward runs attention's forward again */
        double moved;
    } rows[] = {{ACTIVATIONS_AC, 0, 0, 32, 0},
                {ACTIVATIONS_OFFLOAD, 0, 0, 32, 32 * 5},
                {ACTIVATIONS_OFFLOAD, 0, 1, 32, 32 * 7},
                {ACTIVATIONS_SAO, 4, 0, 32, 24 * 5},
                {ACTIVATIONS_SAC, 0, 0, 0, 32 * (4 + 2 * o)},
                {ACTIVATIONS_SAC, 8, 0, 24, 8 * (4 + 2 * o) + 24 * 5},
                {ACTIVATIONS_BLOCKS, 2, 0, 32, 16 * (2 + 1 + 2 * o + 7)},
                {ACTIVATIONS_BLOCKS, 4, 0, 32, 8 * (2 + 3 * (1 + 2 * o) + 13)}};
    llama_layout layout;
    const upipe_ops ops = cpu_table();
    int64_t all = 0;
    CHECK(llama_layout_init(&layout, &llama) == 0);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; ++i) {
        setting s =
            setting_for(&layout, METHOD_UPIPE, 8, 1 << 20, kept_of(rows[i].kind, rows[i].k, rows[i].grad));
        memory_plan plan;
        model m;
        s.zero = 0;
        plan = planned(&m, &s, 0, &ops);
        CHECK((double)(32 * (2 * upipe_plan_sent(&m.plan, 0) + upipe_plan_sent(&m.plan, 1))) ==
              252.4375 * (1 << 30));
        CHECK_SAY((double)plan.moved == rows[i].moved * (1 << 30),
                  "row %zu: %.6f units between the pools, not %.6f", i, (double)plan.moved / (1 << 30),
                  rows[i].moved);
        if (i == 0) all = plan.sent;
        CHECK_INT(all - plan.sent, (32 - rows[i].attention) * upipe_plan_sent(&m.plan, 0));
    }
    llama_layout_free(&layout);
}

/* ---- states in the second pool ---- */

enum { LATE_MAX = 8, TILED = 2 * OFFLOAD_TILE + 17 };

static struct {
    void *dst;
    const void *src;
    size_t bytes;
} late[LATE_MAX];
static int late_n;

/* A device's copies that run as late as they may: when the host waits for them. */
static upipe_status late_copy(upipe_ctx *c, void *dst, const void *src, size_t bytes)
{
    (void)c;
    if (!CHECK(late_n < LATE_MAX)) exit(1);
    late[late_n].dst = dst;
    late[late_n].src = src;
    late[late_n++].bytes = bytes;
    return UPIPE_OK;
}

static upipe_status late_sync(upipe_ctx *c)
{
    (void)c;
    for (int i = 0; i < late_n; ++i) memcpy(late[i].dst, late[i].src, late[i].bytes);
    late_n = 0;
    return UPIPE_OK;
}

/* Three tiles of an update: what adamw gives at once, from and to either pool, with copies that run at once and late. */
static void test_tiles(void)
{
    enum { W, M, V, G, ARRAYS };
    const upipe_ops cpu = cpu_table();
    float *start[ARRAYS], *at[ARRAYS], *want[ARRAYS];
    uint16_t *copy = (uint16_t *)zeroed(TILED * 2), *want_copy = (uint16_t *)zeroed(TILED * 2);
    test_rng rng = {.state = 5};
    for (int i = 0; i < ARRAYS; ++i) {
        start[i] = floats(TILED), at[i] = floats(TILED), want[i] = floats(TILED);
        for (int64_t k = 0; k < TILED; ++k)
            start[i][k] = (float)(test_below(&rng, 2001) - 1000 * (i != V)) / 1000;
    }
    for (int way = 0; way < 16; ++way) {
        const int half = way & 1, weights_here = way >> 1 & 1, grads_here = way >> 2 & 1;
        upipe_adamw a = {
            .n = TILED, .step = 3, .rate = 1e-2, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .decay = 0.1};
        upipe_ops ops = cpu;
        upipe_mem host;
        upipe_ctx c = {.ops = &cpu};
        activations kept = {.second = &host};
        int64_t moved = 0;
        a.grad_scale = 0.5;
        a.copy_dtype = UPIPE_BF16;
        for (int i = 0; i < ARRAYS; ++i)
            memcpy(want[i], start[i], TILED * 4), memcpy(at[i], start[i], TILED * 4);
        a.w = want[W], a.m = want[M], a.v = want[V], a.g = want[G], a.copy = half ? want_copy : NULL;
        CHECK_STATUS(cpu.adamw(&c, &a), UPIPE_OK, c.err);
        if (way & 8) ops.copy = late_copy, ops.sync = late_sync;
        c.ops = &ops;
        pool_begin(&host, 4 * OFFLOAD_TILE * sizeof(float) + 1024, 2); /* and red zones */
        a.w = at[W], a.m = at[M], a.v = at[V], a.g = at[G], a.copy = half ? copy : NULL;
        CHECK_STATUS(offload_update(&c, &kept, &cpu, &a, weights_here, grads_here, &moved), UPIPE_OK, c.err);
        CHECK(late_n == 0 && host.live == 0);
        CHECK_INT(moved, (int64_t)TILED * (weights_here * (half ? 2 : 8) + 4 * grads_here));
        CHECK_INT(host.peak,
                  (size_t)OFFLOAD_TILE * 2 * (size_t)(weights_here * (half ? 2 : 4) + 4 * grads_here));
        for (int i = 0; i < G; ++i)
            CHECK_SAY(memcmp(at[i], want[i], TILED * 4) == 0, "way %d: array %d differs", way, i);
        CHECK_SAY(!half || memcmp(copy, want_copy, TILED * 2) == 0, "way %d: rounded weights differ", way);
        upipe_mem_destroy(&host, NULL);
    }
    buffers_free(0);
}

/* ---- random models ---- */

enum { RANKS_MAX = 4, STEPS = 2 };

typedef struct drawn {
    llama_layout layout;
    setting of; /* without the layout, as a draw is copied */
    int small;  /* 1 + the rank whose pool is too small; 0: none */
    float *weights;
} drawn;

/* One training of a draw. */
typedef struct life {
    const drawn *d;
    upipe_threads_grid net;
    upipe_threads side_world;
    upipe_ops ops;
    trainer_result result[STEPS]; /* rank 0's */
    float *after[3];              /* weights of either type, and moments */
    upipe_status statuses[RANKS_MAX];
    model m[RANKS_MAX];
    memory_plan plan[RANKS_MAX];
} life;

static upipe_status life_steps(life *w, trainer *t, const memory_plan *plan, upipe_mem *host)
{
    enum { IDS_MAX = 2048 };
    const drawn *d = w->d;
    const llama_layout *l = &d->layout;
    upipe_ctx *c = t->r.c;
    const int rank = model_world_rank(&t->m);
    const int64_t n = t->m.rows * t->m.accumulate;
    const upipe_zero *z = &t->state.zero[LLAMA_WEIGHTS];
    int32_t ids[IDS_MAX];
    test_rng rng;
    UPIPE_TRY(trainer_alloc(t));
    for (int unit = 0; unit < z->units; ++unit) {
        const upipe_zero_part p = upipe_zero_part_of(z, UPIPE_ZERO_WEIGHTS, unit),
                              states = upipe_zero_part_of(z, UPIPE_ZERO_STATES, unit);
        upipe_view to = upipe_view_packed(NULL, z->dtype, 1, 1, (int32_t)p.n);
        to.data = (char *)z->weights + (size_t)p.at * upipe_dtype_bytes(z->dtype);
        if (p.n > 0)
            UPIPE_TRY(c->ops->cast(c, to, upipe_view_packed(d->weights + p.first, UPIPE_F32, 1, 1, to.d)));
        if (t->state.master != NULL)
            memcpy(t->state.master + states.at, d->weights + states.first, (size_t)states.n * 4);
    }
    for (int64_t i = 0; i < l->vectors; ++i) ((float *)t->state.zero[LLAMA_VECTORS].weights)[i] = 1;
    for (int step = 0; step < STEPS; ++step) {
        const trainer_rates rates = {step + 1, 1e-2, 0.9, 0.95, 1e-8, 0.1, 1};
        const int64_t moved = trainer_moved(t), sent = trainer_sent(t);
        const trainer_batch batch = {.inputs = ids, .targets = ids, .valid = n};
        trainer_result result;
        rng.state = (uint64_t)(rank + 1 + 100 * step);
        for (int64_t i = 0; i < n; ++i) ids[i] = test_below(&rng, (int)l->config.vocab);
        UPIPE_TRY(trainer_step(t, &batch, &rates, &result));
        CHECK_INT(trainer_moved(t) - moved, plan->moved);
        if (step == 0) CHECK_INT(trainer_sent(t) - sent, plan->sent);
        if (step == 0) CHECK_INT(c->mem->events_lost, plan->events_max);
        if (rank == 0) w->result[step] = result;
    }
    for (int phase = 0; phase < MODEL_PHASES; ++phase)
        CHECK_SAY(c->mem->phase_peak[phase] == plan->phase[phase],
                  "%s of rank %d held %zu bytes, the plan says %zu", model_phase_name(phase), rank,
                  c->mem->phase_peak[phase], plan->phase[phase]);
    CHECK_INT(c->mem->peak, plan->peak);
    CHECK_INT(host->peak, plan->host);
    for (int unit = 0; unit < z->units; ++unit) {
        const upipe_zero_part p = upipe_zero_slice(z, unit);
        const int64_t at = upipe_zero_part_of(z, UPIPE_ZERO_STATES, unit).at +
                           (upipe_zero_sharded(z, UPIPE_ZERO_STATES) ? 0 : p.first - z->first[unit]);
        memcpy(w->after[0] + p.first, upipe_zero_owned(z, UPIPE_ZERO_WEIGHTS, unit),
               (size_t)p.n * upipe_dtype_bytes(z->dtype));
        memcpy(w->after[1] + p.first, t->state.m[LLAMA_WEIGHTS] + at, (size_t)p.n * 4);
        memcpy(w->after[2] + p.first, t->state.v[LLAMA_WEIGHTS] + at, (size_t)p.n * 4);
    }
    return trainer_free_block(t);
}

/* In slabs of exactly the planned bytes. */
static upipe_status life_main(void *user, int rank)
{
    life *w = (life *)user;
    setting of = w->d->of;
    upipe_mem mem, host;
    side_thread side;
    upipe_mem_event none;
    memory_plan plan;
    trainer t = {0};
    model m;
    upipe_status s;
    upipe_ctx c = {0};
    upipe_threads_grid_use(&w->net, rank, &c);
    of.layout = &w->d->layout;
    UPIPE_TRY(setting_model(&m, &of, rank, &c.err));
    UPIPE_TRY(memory_plan_make(&plan, &m, &w->ops, NULL, NULL, &c.err));
    w->m[rank] = m;
    w->plan[rank] = plan;
    context_pool(&c, &mem, &w->ops, w->d->small == rank + 1 ? plan.need - 256 : plan.need, plan.blocks_max);
    pool_begin(&host, plan.host_need, plan.blocks_max);
    mem.events = &none; /* space for none: all are counted as lost */
    s = trainer_open(&t, &m, &c, upipe_threads_comm(&w->net.world, rank), &host);
    if (m.prefetch) {
        side_begin(&c, &side, 0);
        t.side = c.side_stream;
        c.side_stream = NULL;
        t.side_world = upipe_threads_comm(&w->side_world, rank);
    }
    if (s == UPIPE_OK) s = life_steps(w, &t, &plan, &host);
    if (w->d->small == 0) {
        CHECK_STATUS(s, UPIPE_OK, c.err);
        CHECK(mem.live == 0 && host.live == 0);
    }
    if (s != UPIPE_OK) {
        trainer_stop(&t);
        upipe_comm_abort(t.side_world, c.err.text);
    }
    if (m.prefetch) side_end(&side);
    trainer_close(&t);
    upipe_mem_destroy(&mem, NULL);
    upipe_mem_destroy(&host, NULL);
    return s;
}

/* Ranks that memory_same takes for one have one plan: those who plan for many ranks plan one of them. */
static int life_same(const life *w, int ranks)
{
    int pairs = 0;
    for (int a = 0; a < ranks; ++a)
        for (int b = 0; b < a; ++b) {
            const memory_plan *p = &w->plan[a], *q = &w->plan[b];
            if (!memory_same(&w->m[a], &w->m[b])) continue;
            ++pairs;
            CHECK_SAY(memcmp(p->phase, q->phase, sizeof p->phase) == 0 &&
                          memcmp(p->at_peak, q->at_peak, sizeof p->at_peak) == 0 && p->host == q->host &&
                          p->need == q->need && p->host_need == q->host_need && p->sent == q->sent &&
                          p->moved == q->moved && p->blocks_max == q->blocks_max &&
                          p->events_max == q->events_max,
                      "ranks %d and %d are not the same: %zu and %zu bytes, %lld and %lld sent", a, b,
                      p->need, q->need, (long long)p->sent, (long long)q->sent);
        }
    return pairs;
}

static void life_run(life *w, const drawn *d)
{
    const int ring = d->of.how.ring;
    const upipe_grid grid = {
        .ranks = setting_ranks(&d->of), .in_team = d->of.how.ranks / ring, .in_ring = ring};
    upipe_err e;
    int mark;
    *w = (life){.d = d, .ops = cpu_table()};
    for (int i = 0; i < 3; ++i) w->after[i] = floats(d->layout.weights);
    mark = buffers_n;
    CHECK_STATUS(upipe_threads_grid_init(&w->net, &grid, 60, &e), UPIPE_OK, e);
    CHECK_STATUS(upipe_threads_init(&w->side_world, grid.ranks, 60, &e), UPIPE_OK, e);
    CHECK((upipe_threads_run(&w->net.world, life_main, w, w->statuses, NULL) == UPIPE_OK) == (d->small == 0));
    upipe_threads_grid_free(&w->net);
    upipe_threads_free(&w->side_world);
    buffers_free(mark);
}

static void draw(test_rng *rng, drawn *d)
{
    llama_config c = {.head_dim = 32, .qk_norm = 1, .rope_theta = 10000, .norm_eps = 1e-5};
    setting *s = &d->of;
    memset(d, 0, sizeof *d);
    c.layers = 1 + test_below(rng, 6);
    c.dim = 32 + 8 * test_below(rng, 12);
    c.hidden = 32 + test_below(rng, 64);
    c.vocab = 20 + test_below(rng, 100);
    c.kv_heads = 1 + test_below(rng, 3);
    c.heads = c.kv_heads * (1 + test_below(rng, 3));
    c.qk_norm = test_below(rng, 4) == 0;
    c.attention_bias = (llama_bias)test_below(rng, 3);
    c.tied = test_below(rng, 2);
    s->how.method = METHOD_UPIPE;
    s->how.ranks = 1 + test_below(rng, RANKS_MAX);
    s->how.ring = 1;
    s->tokens = 16 + test_below(rng, 200);
    s->batch = 1 + (test_below(rng, 4) == 0);
    s->how.chunk = test_below(rng, 3) == 0 ? c.heads : 0;
    s->dtype = test_below(rng, 3) == 0 ? UPIPE_BF16 : UPIPE_F32;
    if (test_below(rng, 5) == 0) {
        s->how.method = METHOD_UPIPE_RING;
        s->how.ranks = 2 * (1 + test_below(rng, 2));
        s->how.ring = 2;
        s->how.chunk = c.heads;
    } else if (test_below(rng, 4) == 0) {
        s->how.method = METHOD_UPIPE_FPDT;
        s->how.segments = 1 + test_below(rng, 4);
        if (c.heads % s->how.ranks != 0) s->how.chunk = c.heads; /* uneven heads have one stage */
        if (c.kv_heads % s->how.ranks != 0) s->how.chunk = c.heads;
    }
    s->activations.kind = test_below(rng, ACTIVATIONS_KINDS);
    if (s->activations.kind >= ACTIVATIONS_SAO) s->activations.k = 1 + test_below(rng, (int)c.layers);
    if (s->activations.kind == ACTIVATIONS_SAC && test_below(rng, 2)) s->activations.k = 0;
    s->activations.grad = test_below(rng, 3) == 0;
    s->zero = test_below(rng, UPIPE_ZERO_STAGES);
    s->prefetch = s->zero == 3 && test_below(rng, 2);
    s->reduce = test_below(rng, 4) == 0 ? UPIPE_BF16 : UPIPE_F32;
    s->offload_optimizer = test_below(rng, 2);
    s->offload_weights = s->zero == 3 && s->offload_optimizer && test_below(rng, 2);
    s->accumulate = test_below(rng, 3) == 0 ? 2 + test_below(rng, 2) : 1;
    s->replicas = s->how.ranks <= RANKS_MAX / 2 ? 1 + test_below(rng, 2) : 1;
    CHECK(llama_layout_init(&d->layout, &c) == 0);
    d->weights = floats(d->layout.weights);
    for (int64_t i = 0; i < d->layout.weights; ++i) d->weights[i] = (float)(0.1 * test_normal(rng));
}

/* A rank whose pool is too small, in steps that gather ahead: it says so, and the others end at once, not at the
 * deadline. */
static void test_small_pool(void)
{
    test_rng rng;
    drawn d;
    life w;
    int64_t start;
    int small, draws;
    for (draws = small = 0, rng.state = 7; small < 3; ++draws) {
        draw(&rng, &d);
        if (d.of.prefetch && setting_ranks(&d.of) > 1) {
            d.small = 1 + small++ % 2;
            start = upipe_net_now();
            life_run(&w, &d);
            CHECK_INT(w.statuses[d.small - 1], UPIPE_ERR_MEMORY);
            for (int r = 0; r < setting_ranks(&d.of); ++r)
                CHECK(r == d.small - 1 || w.statuses[r] == UPIPE_ERR_ABORTED);
            CHECK(upipe_net_now() - start < INT64_C(30000000000));
        }
        llama_layout_free(&d.layout);
        buffers_free(0);
    }
}

/* ---- plans of many ranks ---- */

static long asked; /* scratch of products */

static size_t count_gemm_bytes(const upipe_ops *ops, upipe_view out, upipe_view a, upipe_view b, int flags)
{
    (void)ops, (void)out, (void)a, (void)b, (void)flags;
    ++asked;
    return 0;
}

/* A ring of contiguous tokens is planned once where all ranks hold the same, by the rank that computes the most. */
static void test_rings(void)
{
    llama_config c = {.layers = 2,
                      .dim = 64,
                      .hidden = 64,
                      .vocab = 100,
                      .heads = 4,
                      .kv_heads = 2,
                      .head_dim = 32,
                      .rope_theta = 10000,
                      .norm_eps = 1e-5};
    llama_layout layout;
    long steps[2];
    int i, r, zero;
    upipe_ops ops;
    machine box;
    CHECK(llama_layout_init(&layout, &c) == 0);
    CHECK(machine_preset(&box, "h100x8") == 0);
    upipe_cpu_ops(&ops);
    ops.gemm_bytes = count_gemm_bytes;
    for (zero = 0; zero < 2; ++zero)
        for (i = 0; i < 2; ++i) {
            const int ranks = i == 0 ? 4 : 64;
            setting s;
            estimate e;
            double most = 0;
            memset(&s, 0, sizeof s);
            s.layout = &layout;
            s.how.method = METHOD_RING;
            s.how.ranks = s.how.ring = ranks;
            s.replicas = 1;
            s.tokens = 64 * (int64_t)ranks;
            s.batch = 1000000;
            s.dtype = UPIPE_BF16;
            s.zero = 3 * zero;
            asked = 0;
            exact_estimate(&e, &s, &ops, &box);
            CHECK_TEXT(e.why, "");
            steps[i] = asked;
            for (r = 0; r < ranks; ++r) {
                model m;
                const memory_plan plan = planned(&m, &s, r, &ops);
                CHECK(plan.need == (size_t)e.gpu && plan.peak == (size_t)e.live);
                most = fmax(most, exact_flops(&plan));
            }
            CHECK(most == e.work.attn_fwd + e.work.attn_bwd + e.work.products);
        }
    CHECK_INT(steps[1], steps[0]);
    llama_layout_free(&layout);
}

static void test_random(test_draws draws)
{
    long kinds[ACTIVATIONS_KINDS] = {0}, same = 0;
    draws.least /= 8; /* each is a training of several ranks */
    for (; test_draws_more(&draws); ++draws.done) {
        const long failures = test_failures, seed = draws.seed + draws.done;
        test_rng rng;
        drawn d, plain;
        life one, other;
        rng.state = (uint64_t)seed;
        draw(&rng, &d);
        plain = d;
        plain.of.activations = kept_of(ACTIVATIONS_AC, 0, 0);
        plain.of.zero = d.of.accumulate > 1 && d.of.zero > 1 ? 2 : 1; /* whose sums have one order */
        plain.of.prefetch = plain.of.offload_optimizer = plain.of.offload_weights = 0;
        life_run(&one, &plain);
        life_run(&other, &d);
        same += life_same(&other, setting_ranks(&d.of));
        for (int i = 0; i < STEPS; ++i)
            CHECK_SAY(one.result[i].loss == other.result[i].loss &&
                          one.result[i].norm == other.result[i].norm,
                      "step %d: loss %.17g, norm %.17g, not %.17g, %.17g", i, other.result[i].loss,
                      other.result[i].norm, one.result[i].loss, one.result[i].norm);
        for (int i = 0; i < 3; ++i)
            CHECK_SAY(memcmp(one.after[i], other.after[i], (size_t)d.layout.weights * 4) == 0,
                      "other %s after the last step", i == 0 ? "weights" : "moments");
        CHECK(one.result[0].finite && one.result[1].loss != one.result[0].loss);
        ++kinds[d.of.activations.kind];
        if (test_shown_since(failures))
            fprintf(
                stderr,
                "replay: UPIPE_SEED=%ld UPIPE_DRAWS=1 (%lld layers, %d ranks, rings of %d, %d segments, H %d/%d, U %d, S %lld, %s, "
                "%s:%lld grad %d, ZeRO %d, prefetch %d, offloaded: optimizer %d, weights %d, %lld micro-batches, %d replicas, sums of %s)\n",
                seed, (long long)d.layout.config.layers, d.of.how.ranks, d.of.how.ring, d.of.how.segments,
                d.layout.config.heads, d.layout.config.kv_heads, d.of.how.chunk, (long long)d.of.tokens,
                upipe_dtype_name(d.of.dtype), activations_names[d.of.activations.kind],
                (long long)d.of.activations.k, d.of.activations.grad, d.of.zero, d.of.prefetch,
                d.of.offload_optimizer, d.of.offload_weights, (long long)d.of.accumulate, d.of.replicas,
                upipe_dtype_name(d.of.reduce));
        llama_layout_free(&d.layout);
        buffers_free(0);
    }
    test_draws_end(&draws);
    for (int i = 0; i < ACTIVATIONS_KINDS && draws.done >= 50; ++i) CHECK(kinds[i] > 2);
    CHECK(draws.done < 50 || same > 0);
}

int main(int argc, char **argv)
{
    test_draws draws = test_draws_begin(4);
    test_begin(argc, argv);
    TEST(test_slopes());
    TEST(test_far());
    TEST(test_few());
    TEST(test_adapters());
    TEST(test_largest());
    TEST(test_transfers());
    TEST(test_moved());
    TEST(test_tiles());
    TEST(test_small_pool());
    TEST(test_rings());
    TEST(test_random(draws));
    return test_end("activations");
}

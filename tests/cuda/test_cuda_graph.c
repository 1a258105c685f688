/* test_cuda_graph.c -- a block's forward and backward captured into a CUDA graph, and launched with other inputs
 *
 * The same bits come out as of the calls themselves. On a device: one rank. On the fake one also two ranks over NCCL, and
 * what cannot be captured: calls that make the host wait are refused before the capture is spoilt, and nobody hangs.
 */
#include <cuda_runtime_api.h>

#ifdef FAKE_CUDA_RUNTIME_API_H
#include "upipe/net/upipe_net_nccl.h"

#include "fake/fake.h"
#endif

#include "upipe/cuda/upipe_cuda_side_stream.h"
#include "upipe/net/upipe_net_threads.h"
#include "upipe/upipe.h"

#include "cuda/device.h"

enum { RANKS = 2, TOKENS = 32, DIM = 64, HEADS = 4, KV_HEADS = 2, HEAD_DIM = 32, BLOCKS = 64 };
enum { WQ = HEADS * HEAD_DIM * DIM, WK = KV_HEADS * HEAD_DIM * DIM, WEIGHTS = 2 * WQ + 2 * WK };

typedef struct graph_case {
    upipe_dtype dtype;
    int ranks, chunk, full, overlap;
} graph_case;

/* What a rank holds on the device. Inputs lie in front, then what a pass writes. */
typedef struct graph_rank {
    device d;
    upipe_mem mem;
    upipe_mem_block blocks[BLOCKS];
    upipe_cuda_copy_stream side;
    device line; /* where stages overlap */
    upipe_side_stream side_stream;
    upipe_cuda_side_stream side_stream_state;
    void *slab, *weights, *io, *pinned;
    size_t slab_bytes, x_bytes, in_bytes, out_bytes;
    char *host; /* [out_bytes] */
    upipe_layer layer;
    upipe_plan plan;
} graph_rank;

static void *part(const graph_rank *me, int i)
{
    return (char *)me->io + (size_t)i * me->x_bytes;
}

/* x, dy -> y, dx, gradients of the weights. Everything is enqueued; x leaves for the host's memory and comes back on the
 * side stream. */
static upipe_status pass(upipe_ctx *c, graph_rank *me)
{
    float *grad = (float *)part(me, 4);
    upipe_grads g = {.wq = grad, .wk = grad + WQ, .wv = grad + WQ + WK, .wo = grad + WQ + 2 * WK};
    upipe_saved saved;
    upipe_view x, y;
    void *data, *out;
    UPIPE_TRY(c->ops->zero(c, grad, WEIGHTS * sizeof *grad));
    UPIPE_TRY(upipe_mem_alloc(c->mem, &data, me->x_bytes, UPIPE_USE_OTHER, "x", &c->err));
    x = upipe_view_packed(data, me->plan.desc.dtype, me->plan.rows, 1, DIM);
    UPIPE_TRY(c->ops->copy(c, data, part(me, 0), me->x_bytes));
    UPIPE_TRY(upipe_cuda_copy_stream_start(c, &me->side, me->pinned, data, me->x_bytes));
    UPIPE_TRY(upipe_layer_fwd(c, &me->layer, &saved, x));
    UPIPE_TRY(upipe_cuda_copy_stream_wait(c, &me->side));
    UPIPE_TRY(c->ops->zero(c, data, me->x_bytes));
    UPIPE_TRY(upipe_cuda_copy_stream_start(c, &me->side, data, me->pinned, me->x_bytes));
    UPIPE_TRY(upipe_mem_alloc(c->mem, &out, me->x_bytes, UPIPE_USE_OTHER, "y", &c->err));
    y = upipe_view_packed(out, me->plan.desc.dtype, me->plan.rows, 1, DIM);
    UPIPE_TRY(upipe_layer_out_fwd(c, &me->layer, y, &saved));
    UPIPE_TRY(c->ops->copy(c, part(me, 2), out, me->x_bytes));
    UPIPE_TRY(c->ops->copy(c, out, part(me, 1), me->x_bytes));
    UPIPE_TRY(upipe_layer_out_bwd(c, &me->layer, &g, &saved, y));
    UPIPE_TRY(upipe_mem_free(c->mem, out, &c->err));
    UPIPE_TRY(upipe_cuda_copy_stream_wait(c, &me->side));
    UPIPE_TRY(upipe_layer_bwd(c, &me->layer, x, &g, &saved, &saved.out, x));
    UPIPE_TRY(upipe_saved_free(c, &saved));
    UPIPE_TRY(c->ops->copy(c, part(me, 3), data, me->x_bytes));
    return upipe_mem_free(c->mem, data, &c->err);
}

/* Numbers of the case's type; the same for the same seed. */
static void fill(const graph_rank *me, void *to, size_t bytes, int seed)
{
    int narrow = me->plan.desc.dtype == UPIPE_BF16;
    size_t i, n = bytes / (narrow ? 2 : 4);
    for (i = 0; i < n; ++i) {
        float v = (float)((int)((i * 53 + (size_t)seed * 17) % 89) - 44) / 64;
        uint32_t bits;
        memcpy(&bits, &v, sizeof bits);
        if (narrow)
            ((uint16_t *)to)[i] = (uint16_t)(bits >> 16); /* exact */
        else
            ((float *)to)[i] = v;
    }
}

/* Other inputs, in the same place; all that a pass writes is NaN again. */
static void set_inputs(graph_rank *me, int seed)
{
    char *in = (char *)malloc(me->in_bytes);
    fill(me, in, me->in_bytes, seed + 7 * me->plan.desc.rank);
    device_put(&me->d, me->io, in, me->in_bytes);
    DEVICE_CHECK(cudaMemsetAsync(part(me, 2), 0xff, me->out_bytes, me->d.stream));
    DEVICE_CHECK(cudaMemsetAsync(me->slab, 0xff, me->slab_bytes, me->d.stream));
    DEVICE_CHECK(cudaStreamSynchronize(me->d.stream));
    free(in);
}

static void check_outputs(graph_rank *me, const char *want, const char *when)
{
    device_get(&me->d, me->host, part(me, 2), me->out_bytes);
    CHECK_SAY(memcmp(me->host, want, me->out_bytes) == 0, "rank %d: other bits %s", me->plan.desc.rank, when);
}

static upipe_status rank_plan(graph_rank *me, const graph_case *g, int rank)
{
    static const float there; /* addresses are not followed in a dry run */
    upipe_dry *dry = (upipe_dry *)malloc(sizeof *dry);
    upipe_plan_desc d = {0};
    upipe_status s;
    d.tokens = TOKENS, d.ranks = g->ranks, d.rank = rank, d.heads = HEADS, d.kv_heads = KV_HEADS;
    d.head_dim = HEAD_DIM, d.model_dim = DIM, d.chunk = g->chunk, d.dtype = g->dtype;
    d.overlap = g->overlap;
    s = upipe_plan_init(&me->plan, &d, &me->d.c.err);
    me->layer.plan = &me->plan;
    me->layer.rope_theta = 10000;
    me->layer.mask.causal = !g->full;
    me->layer.wq = me->layer.wk = me->layer.wv = me->layer.wo = &there;
    if (s == UPIPE_OK) s = upipe_dry_init(dry, &me->plan, &me->d.ops);
    if (s == UPIPE_OK) s = upipe_dry_block(dry, &me->layer, 1);
    me->slab_bytes = dry->mem.need;
    CHECK(s != UPIPE_OK || dry->mem.blocks_peak <= BLOCKS);
    me->x_bytes = upipe_plan_unit_bytes(&me->plan);
    me->in_bytes = 2 * me->x_bytes;
    me->out_bytes = 2 * me->x_bytes + WEIGHTS * sizeof(float);
    free(dry);
    return s;
}

static int rank_open(graph_rank *me, const graph_case *g, int rank)
{
    const size_t each = upipe_dtype_bytes(g->dtype);
    char *w = (char *)malloc(WEIGHTS * each), *there;
    memset(me, 0, sizeof *me);
    if (!device_open(&me->d)) return 0;
    CHECK_STATUS(rank_plan(me, g, rank), UPIPE_OK, me->d.c.err);
    me->slab = device_new(&me->d, me->slab_bytes);
    me->io = device_new(&me->d, me->in_bytes + me->out_bytes);
    me->weights = there = (char *)device_new(&me->d, WEIGHTS * each);
    fill(me, w, WEIGHTS * each, 3);
    device_put(&me->d, me->weights, w, WEIGHTS * each);
    me->layer.wq = there, me->layer.wk = there + WQ * each, me->layer.wv = there + (WQ + WK) * each;
    me->layer.wo = there + (WQ + 2 * WK) * each;
    CHECK_STATUS(upipe_cuda_host_slab(&me->pinned, me->x_bytes, &me->d.c.err), UPIPE_OK, me->d.c.err);
    CHECK_STATUS(upipe_cuda_copy_stream_init(&me->side, &me->d.c.err), UPIPE_OK, me->d.c.err);
    if (me->plan.overlap) {
        if (!device_open(&me->line)) return 0;
        CHECK_STATUS(upipe_cuda_side_stream_init(&me->side_stream_state, &me->side_stream, me->line.stream,
                                                 &me->line.ops, &me->d.c.err),
                     UPIPE_OK, me->d.c.err);
        me->d.c.side_stream = &me->side_stream;
    }
    me->host = (char *)malloc(me->out_bytes);
    upipe_mem_init(&me->mem, me->slab, me->slab_bytes, me->blocks, BLOCKS);
    me->d.c.mem = &me->mem;
    free(w);
    return 1;
}

static void rank_close(graph_rank *me)
{
    CHECK_INT(me->mem.live, 0);
    upipe_mem_destroy(&me->mem, NULL);
    CHECK_STATUS(upipe_cuda_copy_stream_free(&me->side, &me->d.c.err), UPIPE_OK, me->d.c.err);
    CHECK_STATUS(upipe_cuda_host_slab_free(me->pinned, &me->d.c.err), UPIPE_OK, me->d.c.err);
    if (me->plan.overlap) {
        CHECK_STATUS(upipe_cuda_side_stream_free(&me->side_stream_state, &me->d.c.err), UPIPE_OK,
                     me->d.c.err);
        device_close(&me->line);
    }
    device_free(&me->d, me->slab);
    device_free(&me->d, me->io);
    device_free(&me->d, me->weights);
    device_close(&me->d);
    free(me->host);
}

/* The calls between begin and end of a capture; its graph, or NULL. */
static cudaGraphExec_t capture(graph_rank *me, upipe_status want)
{
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    DEVICE_CHECK(cudaStreamBeginCapture(me->d.stream, cudaStreamCaptureModeThreadLocal));
    CHECK_STATUS(pass(&me->d.c, me), want, me->d.c.err);
    if (!DEVICE_CHECK(cudaStreamEndCapture(me->d.stream, &graph))) return NULL;
    if (want == UPIPE_OK) DEVICE_CHECK(cudaGraphInstantiate(&exec, graph, 0));
    DEVICE_CHECK(cudaGraphDestroy(graph));
    return exec;
}

/* Runs the pass for two inputs, captures it, and launches it for both; `wait` ends a launch. */
static void run_rank(graph_rank *me, upipe_status (*wait)(upipe_ctx *c))
{
    upipe_ctx *c = &me->d.c;
    char *want[2];
    cudaGraphExec_t exec;
    int i;
    for (i = 0; i < 2; ++i) {
        set_inputs(me, 10 + i);
        CHECK_STATUS(pass(c, me), UPIPE_OK, c->err);
        want[i] = (char *)malloc(me->out_bytes);
        device_get(&me->d, want[i], part(me, 2), me->out_bytes);
    }
    CHECK(memcmp(want[0], want[1], me->out_bytes) != 0);
    set_inputs(me, 99);
    exec = capture(me, UPIPE_OK);
    device_get(&me->d, me->host, part(me, 2), me->out_bytes);
    for (i = 0; i < (int)me->out_bytes && me->host[i] == (char)0xff;) ++i;
    CHECK_SAY(i == (int)me->out_bytes, "the capture itself has written byte %d", i);
    for (int turn = 0; turn < 4 && exec != NULL; ++turn) {
        set_inputs(me, 10 + turn % 2);
        DEVICE_CHECK(cudaGraphLaunch(exec, me->d.stream));
        CHECK_STATUS(wait(c), UPIPE_OK, c->err);
        check_outputs(me, want[turn % 2], "from the graph");
    }
    /* and the calls themselves, afterwards */
    set_inputs(me, 11);
    CHECK_STATUS(pass(c, me), UPIPE_OK, c->err);
    check_outputs(me, want[1], "after the graph");
    if (exec != NULL) DEVICE_CHECK(cudaGraphExecDestroy(exec));
    for (i = 0; i < 2; ++i) free(want[i]);
}

static upipe_status wait_ops(upipe_ctx *c)
{
    return c->ops->sync(c);
}

static void test_one(const graph_case *g)
{
    graph_rank *me = (graph_rank *)malloc(sizeof *me);
    upipe_comm_self_state buf;
    upipe_comm self;
    if (rank_open(me, g, 0)) {
        upipe_comm_self(&self, &buf, me->d.ops.copy);
        me->d.c.team = &self;
        run_rank(me, wait_ops);
        rank_close(me);
    }
    free(me);
}

/* A side stream that shared the rank's cuBLAS handle would be on the rank's stream. */
static void test_no_table(void)
{
    upipe_cuda_side_stream buf;
    upipe_side_stream side_stream;
    upipe_err e;
    CHECK_STATUS(upipe_cuda_side_stream_init(&buf, &side_stream, NULL, NULL, &e), UPIPE_ERR_ARG, e);
    CHECK_TEXT(e.text, "a cuBLAS handle of its own");
    CHECK(side_stream.post == NULL);
}

/* Refused with a sentence, and the capture goes on: it has a graph in the end. */
static void test_waits(void)
{
    const graph_case g = {UPIPE_F32, 1, HEADS, 0, 0};
    graph_rank *me = (graph_rank *)malloc(sizeof *me);
    upipe_ctx *c;
    cudaGraph_t graph = NULL;
    float host = 1;
    if (!rank_open(me, &g, 0)) return;
    c = &me->d.c;
    DEVICE_CHECK(cudaStreamBeginCapture(me->d.stream, cudaStreamCaptureModeThreadLocal));
    CHECK_STATUS(c->ops->zero(c, me->io, 4), UPIPE_OK, c->err);
    CHECK_STATUS(c->ops->sync(c), UPIPE_ERR_UNSUPPORTED, c->err);
    CHECK_TEXT(c->err.text, "sync waits for the stream, which is captured into a graph");
    CHECK_STATUS(c->ops->copy(c, me->io, &host, sizeof host), UPIPE_ERR_UNSUPPORTED, c->err);
    CHECK_TEXT(c->err.text, "a copy of ordinary host memory waits for the stream");
    CHECK_STATUS(c->ops->copy(c, &host, me->io, sizeof host), UPIPE_ERR_UNSUPPORTED, c->err);
    CHECK_STATUS(c->ops->copy(c, me->pinned, me->io, sizeof host), UPIPE_OK, c->err);
    DEVICE_CHECK(cudaStreamEndCapture(me->d.stream, &graph));
    if (graph != NULL) DEVICE_CHECK(cudaGraphDestroy(graph));
    rank_close(me);
    free(me);
}

#ifdef FAKE_CUDA_RUNTIME_API_H

/* ---- two ranks ---- */

enum { OVER_NCCL, OVER_THREADS, COLD };

typedef struct graph_team {
    const graph_case *g;
    int how;
    graph_rank ranks[RANKS];
    upipe_nccl nccl[RANKS];
    upipe_threads threads;
} graph_team;

static upipe_status wait_nccl(upipe_ctx *c)
{
    return upipe_nccl_sync(c, (upipe_nccl *)c->team->impl);
}

static _Thread_local int waits_ended;

/* With a host that waits, what was begun has ended when wait returns. */
static upipe_status wait_ended(upipe_ctx *c, upipe_comm *comm)
{
    const upipe_nccl *team = (const upipe_nccl *)comm->impl;
    const upipe_status s = upi_nccl_wait(c, comm);
    CHECK_INT(team->begun - team->ended, 0);
    ++waits_ended;
    return s;
}

/* A layer's forward and backward in which the host waits for no device: everything is in the stream's order. NCCL is
 * called once for each transfer (docs/transports.md): K, V and Q, O; K, V again and dO, delta, Q, dQ; dK, dV. */
static void run_ahead(graph_rank *me)
{
    upipe_ctx *c = &me->d.c;
    upipe_nccl *team = (upipe_nccl *)c->team->impl;
    const int rank = c->team->rank, transfers = me->plan.rounds * (2 + 2 + 2) + me->plan.stages * (2 + 4);
    int64_t before;
    char *want = (char *)malloc(me->out_bytes);
    set_inputs(me, 10);
    CHECK_STATUS(pass(c, me), UPIPE_OK, c->err);
    device_get(&me->d, want, part(me, 2), me->out_bytes);
    set_inputs(me, 10);
    (void)fake_waits(rank);
    before = team->begun;
    CHECK_STATUS(pass(c, me), UPIPE_OK, c->err);
    CHECK_INT(fake_waits(rank), 0);
    CHECK_INT(team->begun - before, transfers);
    CHECK_STATUS(c->ops->sync(c), UPIPE_OK, c->err);
    check_outputs(me, want, "ahead");
    team->ahead = 0;
    c->team->ops.wait = wait_ended;
    waits_ended = 0;
    set_inputs(me, 10);
    CHECK_STATUS(pass(c, me), UPIPE_OK, c->err);
    CHECK_INT(waits_ended, transfers);
    check_outputs(me, want, "with a host that waits");
    c->team->ops.wait = upi_nccl_wait;
    team->ahead = 1;
    free(want);
}

static upipe_status team_rank(void *user, int rank)
{
    graph_team *t = (graph_team *)user;
    graph_rank *me = &t->ranks[rank];
    upipe_ctx *c = &me->d.c;
    DEVICE_CHECK(cudaSetDevice(me->d.cuda.device));
    fake_rank(rank);
    if (t->how == OVER_NCCL) {
        c->team = &t->nccl[rank].comm;
        run_rank(me, wait_nccl);
        run_ahead(me);
    } else if (t->how == OVER_THREADS) {
        /* the host copies, so nothing is left for a graph: every rank is told, each by its own stream or by the other */
        c->team = upipe_threads_comm(&t->threads, rank);
        set_inputs(me, 10);
        DEVICE_CHECK(cudaStreamBeginCapture(me->d.stream, cudaStreamCaptureModeThreadLocal));
        CHECK(pass(c, me) != UPIPE_OK);
        CHECK_TEXT(c->err.text, "sync waits for the stream, which is captured into a graph");
    } else {
        /* ranks have not been compared yet */
        c->team = &t->nccl[rank].comm;
        DEVICE_CHECK(cudaStreamBeginCapture(me->d.stream, cudaStreamCaptureModeThreadLocal));
        CHECK_STATUS(pass(c, me), UPIPE_ERR_UNSUPPORTED, c->err);
        CHECK_TEXT(c->err.text, "an all-gather waits for the stream, which is captured into a graph");
    }
    if (t->how != OVER_NCCL) {
        cudaGraph_t graph = NULL;
        CHECK_STATUS(upipe_cuda_copy_stream_wait(c, &me->side), UPIPE_OK,
                     c->err); /* what a pass without an end forked */
        DEVICE_CHECK(cudaStreamEndCapture(me->d.stream, &graph));
        if (graph != NULL) DEVICE_CHECK(cudaGraphDestroy(graph));
        upipe_mem_rewind(&me->mem, 0);
    }
    return UPIPE_OK;
}

static void nccl_open(graph_team *t, ncclComm_t *comms)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclUniqueId id;
    upipe_err err;
    config.blocking = 0;
    CHECK(ncclGetUniqueId(&id) == ncclSuccess);
    for (int r = 0; r < RANKS; ++r) {
        ncclResult_t made;
        DEVICE_CHECK(cudaSetDevice(r));
        made = ncclCommInitRankConfig(&comms[r], RANKS, id, r, &config);
        CHECK(made == ncclSuccess || made == ncclInProgress);
    }
    for (int r = 0; r < RANKS; ++r) {
        DEVICE_CHECK(cudaSetDevice(r));
        CHECK_STATUS(upipe_nccl_init(&t->nccl[r], comms[r], 20, &err), UPIPE_OK, err);
    }
}

static void test_team(const graph_case *g, int how)
{
    graph_team *t = (graph_team *)calloc(1, sizeof *t);
    ncclComm_t comms[RANKS];
    upipe_err err;
    t->g = g;
    t->how = how;
    for (int r = 0; r < RANKS; ++r) {
        DEVICE_CHECK(cudaSetDevice(how == OVER_THREADS ? 0 : r));
        if (!rank_open(&t->ranks[r], g, r)) return;
    }
    if (how != OVER_THREADS) nccl_open(t, comms);
    CHECK_STATUS(upipe_threads_init(&t->threads, RANKS, 20, &err), UPIPE_OK, err);
    CHECK_STATUS(upipe_threads_run(&t->threads, team_rank, t, NULL, NULL), UPIPE_OK, err);
    upipe_threads_free(&t->threads);
    for (int r = 0; r < RANKS; ++r) {
        DEVICE_CHECK(cudaSetDevice(t->ranks[r].d.cuda.device));
        if (how != OVER_THREADS) {
            CHECK_STATUS(upipe_nccl_free(&t->nccl[r], &err), UPIPE_OK, err);
            if (t->nccl[r].nccl != NULL) CHECK(ncclCommDestroy(comms[r]) == ncclSuccess);
        }
        rank_close(&t->ranks[r]);
    }
    DEVICE_CHECK(cudaSetDevice(0));
    free(t);
    CHECK(fake_check_clean());
}

static void test_teams(void)
{
    static const graph_case cases[] = {
        {UPIPE_BF16, RANKS, RANKS, 0, 0}, {UPIPE_BF16, RANKS, HEADS, 1, 0}, {UPIPE_BF16, RANKS, RANKS, 0, 1}};
    for (uint64_t seed = 0; seed < 4; ++seed) {
        fake_seed(seed);
        for (int i = 0; i < 3; ++i) test_team(&cases[i], OVER_NCCL);
        test_team(&cases[0], OVER_THREADS);
        test_team(&cases[0], COLD);
    }
}

#endif

int main(int argc, char **argv)
{
    static const graph_case cases[] = {{UPIPE_BF16, 1, HEADS, 0, 0},
                                       {UPIPE_BF16, 1, 2, 0, 0},
                                       {UPIPE_BF16, 1, 1, 1, 0},
                                       {UPIPE_F32, 1, 2, 0, 0},
                                       {UPIPE_BF16, 1, 1, 0, 1}};
    test_begin(argc, argv);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; ++i) TEST(test_one(&cases[i]));
    TEST(test_no_table());
    TEST(test_waits());
#ifdef FAKE_CUDA_RUNTIME_API_H
    TEST(test_teams());
#endif
    return test_end("cuda_graph");
}

/* runner_cuda.h -- the library's block on C thread ranks with the CUDA table; results as lib/runner.h's
 *
 *     cuda_case test = {{shape, ranks, chunk, naive}};          the rest 0: ranks meet through memory
 *     run_result r;
 *     if (cuda_block(&test, &in, &r) == UPIPE_OK) ...
 *
 * Each rank has a plan, a stream, a cuBLAS handle and a slab of exactly the bytes that its dry run asked for,
 * all on one device; over NCCL it has a device of its own. The device memory in use is compared with what the
 * runner itself asked for: the library takes none.
 */
#ifndef UPIPE_TEST_RUNNER_CUDA_H
#define UPIPE_TEST_RUNNER_CUDA_H

#include "fake/fake_pool.h"

#include "../lib/runner.h"

#include "upipe/cuda/upipe_cuda_side_stream.h"
#include "upipe/net/upipe_net_nccl.h"

#include "cuda/device.h"

typedef struct cuda_case {
    run_case run;
    int nccl;       /* ranks meet over NCCL, each on a device of its own; else through the memory of one */
    int margin;     /* multiprocessors that attention leaves free */
    int side_later; /* the side stream's kernels have no greater priority */
    /* of a rank whose stages overlap: before it runs, and with opened = 0 when it has */
    void (*watch)(upipe_side_stream *side, int rank, int opened);
    long fail_at; /* the call of rank `fail_rank` that fails, see fake_fail_at; 0: none */
    int fail_rank, fail_sticky;
    char failed[64];     /* written: the call that failed, if any */
    long calls[RUN_MAX]; /* written: calls of each rank */
} cuda_case;

typedef struct cuda_rank {
    device d, side; /* side: of a side stream */
    upipe_cuda_side_stream side_stream_state;
    upipe_side_stream side_stream;
    upipe_mem mem;
    upipe_mem_block *blocks;
    void *slab, *stage, *wg, *weights[RUN_WEIGHTS];
    float *vectors[RUN_GRADS - RUN_WEIGHTS],
        *grads[RUN_GRADS]; /* vectors: q_norm_weight k_norm_weight sinks bq bk bv bo */
    run_own *own;
    upipe_ops ops; /* the device's, with cuda_cast */
    upipe_nccl nccl;
    ncclComm_t comm;
} cuda_rank;

typedef struct cuda_state {
    cuda_case *test;
    run_state run;
    int opened; /* ranks that hold something */
    int64_t moved[RUN_MAX];
    cuda_rank ranks[RUN_MAX];
} cuda_state;

/* The widest row of f32 that goes through `stage`. */
static int64_t cuda_width(const upipe_plan *p)
{
    const upipe_plan_desc *d = &p->desc;
    int64_t heads = (int64_t)d->heads * (d->v_dim > d->head_dim ? d->v_dim : d->head_dim);
    return heads > d->model_dim ? heads : d->model_dim;
}

/* The device's cast; rows of own->host go through `stage`, packed, f32. */
static upipe_status cuda_cast(upipe_ctx *c, upipe_view dst, upipe_view src)
{
    const cuda_rank *me = (const cuda_rank *)(const void *)((const char *)c->ops - offsetof(cuda_rank, ops));
    const uintptr_t first = (uintptr_t)me->own->host,
                    end = first + (uintptr_t)me->own->host_n * sizeof(float);
    const int out = (uintptr_t)dst.data >= first && (uintptr_t)dst.data < end,
              in = (uintptr_t)src.data >= first && (uintptr_t)src.data < end;
    const upipe_view host = out ? dst : src,
                     there = upipe_view_packed(me->stage, UPIPE_F32, host.n, host.h, host.d);
    const size_t row = (size_t)host.h * (size_t)host.d * sizeof(float), bytes = (size_t)host.n * row;
    upipe_status s = UPIPE_OK;
    char *rows;
    if (!out && !in) return me->d.ops.cast(c, dst, src);
    rows = (char *)malloc(bytes + 1);
    if (rows == NULL || (host.h > 1 && host.h_stride != host.d)) exit(2); /* rows have no gaps inside */
    for (int64_t i = 0; in && i < host.n; ++i)
        memcpy(rows + (size_t)i * row, (const float *)host.data + i * host.n_stride, row);
    if (in) s = c->ops->copy(c, me->stage, rows, bytes);
    if (s == UPIPE_OK) s = me->d.ops.cast(c, out ? there : dst, out ? src : there);
    if (s == UPIPE_OK && out) s = c->ops->copy(c, rows, me->stage, bytes);
    for (int64_t i = 0; s == UPIPE_OK && out && i < host.n; ++i)
        memcpy((float *)host.data + i * host.n_stride, rows + (size_t)i * row, row);
    free(rows);
    return s;
}

static upipe_status cuda_rank_main(void *user, int rank)
{
    cuda_state *s = (cuda_state *)user;
    cuda_rank *me = &s->ranks[rank];
    upipe_ctx c = me->d.c;
    upipe_status status;
    (void)cudaSetDevice(me->d.cuda.device); /* fails where another rank has ended the context already */
    fake_rank(rank);                        /* the runner's own call above does not count */
    c.mem = &me->mem;
    c.side_stream = s->test->run.overlap ? &me->side_stream : NULL;
    c.ops = &me->ops;
    c.team = s->test->nccl ? &me->nccl.comm : upipe_threads_comm(&s->run.grid.world, rank);
    status = run_rank(&c, &s->run, rank, me->grads, s->moved);
    s->run.r->errors[rank] = c.err;
    s->run.r->live[rank] = me->mem.live;
    if (status == UPIPE_OK) {
        CHECK_INT(me->mem.live, 0);
    } else {
        upipe_comm_abort(c.team, c.err.text); /* the host's own calls do not */
        run_left(&me->mem, rank, c.team->quarantine);
        upipe_mem_rewind(&me->mem, 0);
    }
    s->test->calls[rank] = fake_calls(rank);
    return status;
}

/* ---- what a rank holds, made and released by the main thread ---- */

static void *cuda_buf(size_t *bytes, size_t n)
{
    void *p = NULL;
    DEVICE_CHECK(cudaMalloc(&p, n > 0 ? n : 1));
    *bytes += n > 0 ? n : 1;
    return p;
}

static size_t cuda_slab_bytes(const cuda_state *s, const cuda_rank *me)
{
    size_t sum = (size_t)s->test->run.ranks * UPIPE_REDUCE_STRIP * 4 + 4096;
    return me->own->need > sum ? me->own->need : sum;
}

static void cuda_rank_open(cuda_state *s, cuda_rank *me, size_t *bytes)
{
    const block_shape *shape = &s->test->run.shape;
    const float *weights[] = {s->run.in->wq, s->run.in->wk, s->run.in->wv, s->run.in->wo};
    const float *vectors[] = {s->run.in->q_norm_weight,
                              s->run.in->k_norm_weight,
                              s->run.in->sinks,
                              s->run.in->bq,
                              s->run.in->bk,
                              s->run.in->bv,
                              s->run.in->bo};
    const size_t slab_bytes = cuda_slab_bytes(s, me);
    upipe_layer *l = &me->own->layer;
    size_t n;
    device_open(&me->d);
    me->ops = me->d.ops;
    me->ops.cast = cuda_cast;
    *bytes += UPIPE_CUDA_SCRATCH + WORKSPACE;
    if (s->test->run.overlap) {
        device_open_as(&me->side, !s->test->side_later);
        *bytes += UPIPE_CUDA_SCRATCH + WORKSPACE;
        CHECK_STATUS(upipe_cuda_side_stream_init(&me->side_stream_state, &me->side_stream, me->side.stream,
                                                 &me->side.ops, &me->d.c.err),
                     UPIPE_OK, me->d.c.err);
        if (s->test->watch != NULL) s->test->watch(&me->side_stream, (int)(me - s->ranks), 1);
    }
    me->d.cuda.margin = s->test->margin;
    me->slab = cuda_buf(bytes, slab_bytes);
    me->stage = cuda_buf(bytes, (size_t)(me->own->plan.rows * cuda_width(&me->own->plan)) * 4);
    me->blocks = (upipe_mem_block *)malloc((size_t)me->own->blocks_max * sizeof *me->blocks);
    upipe_mem_init(&me->mem, me->slab, slab_bytes, me->blocks, me->own->blocks_max);
    for (int j = 0; j < RUN_WEIGHTS; ++j) {
        const int64_t count = block_count(shape, run_grads[j]);
        void *narrow = run_narrow(shape->dtype, weights[j], count);
        n = (size_t)count * upipe_dtype_bytes(shape->dtype);
        me->weights[j] = n > 0 ? cuda_buf(bytes, n) : NULL;
        if (n > 0) device_put(&me->d, me->weights[j], narrow, n);
    }
    for (int j = 0; j < RUN_GRADS - RUN_WEIGHTS; ++j) {
        n = (size_t)block_count(shape, run_grads[RUN_WEIGHTS + j]) * 4;
        me->vectors[j] = n > 0 ? (float *)cuda_buf(bytes, n) : NULL;
        device_put(&me->d, me->vectors[j], vectors[j], n);
    }
    for (int j = 0; j < RUN_GRADS; ++j) {
        n = (size_t)block_count(shape, run_grads[j]) * 4;
        me->grads[j] = (float *)cuda_buf(bytes, n);
        if (n > 0) CHECK_STATUS(me->d.ops.zero(&me->d.c, me->grads[j], n), UPIPE_OK, me->d.c.err);
    }
    n = (size_t)block_count(shape, "wg");
    if (n > 0) {
        l->wg = me->wg = cuda_buf(bytes, n * upipe_dtype_bytes(shape->dtype));
        me->own->dwg = (float *)cuda_buf(bytes, n * 4);
        device_put(&me->d, me->wg, run_narrow(shape->dtype, s->run.in->wg, (int64_t)n),
                   n * upipe_dtype_bytes(shape->dtype));
        CHECK_STATUS(me->d.ops.zero(&me->d.c, me->own->dwg, n * 4), UPIPE_OK, me->d.c.err);
    }
    l->wq = me->weights[0];
    l->wk = me->weights[1];
    l->wv = me->weights[2];
    l->wo = shape->projected ? me->weights[3] : NULL;
    l->q_norm_weight = me->vectors[0];
    l->k_norm_weight = me->vectors[1];
    l->mask.sinks = me->vectors[2];
    l->bq = me->vectors[3];
    l->bk = me->vectors[4];
    l->bv = me->vectors[5];
    l->bo = me->vectors[6];
    DEVICE_CHECK(cudaStreamSynchronize(me->d.stream));
}

static void cuda_rank_close(cuda_state *s, cuda_rank *me)
{
    if (s->test->watch != NULL) s->test->watch(&me->side_stream, (int)(me - s->ranks), 0);
    CHECK_STATUS(upipe_cuda_side_stream_free(&me->side_stream_state, &me->d.c.err), UPIPE_OK, me->d.c.err);
    if (me->side.stream != NULL) device_close(&me->side);
    upipe_mem_destroy(&me->mem, NULL);
    for (int j = 0; j < RUN_WEIGHTS; ++j) DEVICE_CHECK(cudaFree(me->weights[j]));
    for (int j = 0; j < RUN_GRADS - RUN_WEIGHTS; ++j) DEVICE_CHECK(cudaFree(me->vectors[j]));
    for (int j = 0; j < RUN_GRADS; ++j) DEVICE_CHECK(cudaFree(me->grads[j]));
    DEVICE_CHECK(cudaFree(me->wg));
    DEVICE_CHECK(cudaFree(me->own->dwg));
    DEVICE_CHECK(cudaFree(me->stage));
    DEVICE_CHECK(cudaFree(me->slab));
    device_close(&me->d);
    free(me->blocks);
}

/* The communicators come together, then the teams. */
static void cuda_nccl_open(cuda_state *s, size_t *bytes)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclUniqueId id;
    upipe_err err;
    int ranks = s->test->run.ranks;
    config.blocking = 0;
    CHECK(ncclGetUniqueId(&id) == ncclSuccess);
    for (int i = 0; i < ranks; ++i) {
        ncclResult_t r;
        DEVICE_CHECK(cudaSetDevice(i));
        r = ncclCommInitRankConfig(&s->ranks[i].comm, ranks, id, i, &config);
        CHECK(r == ncclSuccess || r == ncclInProgress);
    }
    for (int i = 0; i < ranks; ++i) {
        DEVICE_CHECK(cudaSetDevice(i));
        CHECK_STATUS(upipe_nccl_init(&s->ranks[i].nccl, s->ranks[i].comm, s->test->run.deadline, &err),
                     UPIPE_OK, err);
        *bytes += UPI_NCCL_ROW * sizeof(int64_t) * (1 + (size_t)ranks);
    }
}

static void cuda_nccl_close(cuda_state *s, int failed)
{
    upipe_err err;
    for (int i = 0; i < s->test->run.ranks; ++i) {
        cuda_rank *me = &s->ranks[i];
        DEVICE_CHECK(cudaSetDevice(i));
        CHECK_STATUS(upipe_nccl_free(&me->nccl, &err), UPIPE_OK, err);
        if (me->nccl.nccl == NULL) continue; /* freed by the failure */
        CHECK((failed ? ncclCommAbort : ncclCommDestroy)(me->comm) == ncclSuccess);
    }
}

/* What a rank is to run, and how much memory it takes. Addresses are not followed in a dry run: any that are
 * not NULL will do. */
static upipe_status cuda_rank_plan(cuda_state *s, cuda_rank *me, int rank, const upipe_ops *ops)
{
    const run_case *test = &s->test->run;
    const f32_block *in = s->run.in;
    const upipe_plan_desc d = run_desc(test, rank, 0);
    void *const there[RUN_WEIGHTS] = {in->x, in->x, in->x, in->x};
    upipe_layer *l = &me->own->layer;
    UPIPE_TRY(upipe_plan_init(&me->own->plan, &d, &s->run.r->errors[0]));
    *l = run_layer_with(test, there, in);
    l->plan = &me->own->plan;
    return run_dry(test, ops, me->own, &s->run.r->errors[0]);
}

/* Runs the case; a refusal of the plan or of the dry run, a ring's among them, is returned as it is. */
static upipe_status cuda_block(cuda_case *test, const f32_block *in, run_result *r)
{
    cuda_state *s = (cuda_state *)calloc(1, sizeof *s);
    const int ranks = test->run.ranks;
    device probe;
    upipe_status status = UPIPE_OK;
    int64_t moved = 0, sent = 0;
    size_t bytes = 0;
    upipe_err err;
    int mark;
    (void)run_block; /* the CPU's way, of the same header */
    *r = (run_result){0};
    f32_block_make(&test->run.shape, &r->out);
    mark = buffers_n;
    s->test = test;
    s->run.test = &test->run, s->run.in = in, s->run.r = r;
    device_open(&probe);
    for (int i = 0; i < ranks && status == UPIPE_OK; ++i) {
        const upipe_plan *p = &s->run.own[i].plan;
        s->ranks[i].own = &s->run.own[i];
        status = cuda_rank_plan(s, &s->ranks[i], i, &probe.ops);
        if (status == UPIPE_OK) sent += upipe_plan_sent(p, 0) + upipe_plan_sent(p, 1);
    }
    device_close(&probe);
    r->plan = s->run.own[0].plan;
    r->bytes = s->run.own[0].bytes;
    r->need = s->run.own[0].need;
    if (status == UPIPE_OK) {
        size_t before = fake_device_live();
        fake_peak_reset();
        for (; s->opened < ranks; ++s->opened) {
            if (test->nccl) DEVICE_CHECK(cudaSetDevice(s->opened));
            cuda_rank_open(s, &s->ranks[s->opened], &bytes);
        }
        status = grid_apart(&s->run.grid, &(upipe_grid){ranks, ranks, 1, 0},
                            test->run.deadline > 0 ? test->run.deadline : 60, &err);
        if (status == UPIPE_OK) {
            if (test->nccl) cuda_nccl_open(s, &bytes);
            fake_fail_at(test->fail_at, test->fail_rank, test->fail_sticky);
            status = upipe_threads_run(&s->run.grid.world, cuda_rank_main, s, r->statuses, NULL);
        }
        upipe_threads_grid_free(&s->run.grid);
        CHECK_INT(fake_device_peak() - before, bytes);
        for (int i = 0; i < ranks; ++i) moved += s->moved[i];
        if (status == UPIPE_OK) CHECK_INT(moved, sent);
        if (!test->run.expect_failure)
            for (int i = 0; i < ranks; ++i)
                CHECK_SAY(r->statuses[i] == UPIPE_OK, "rank %d: %s: %s", i, upipe_status_name(r->statuses[i]),
                          r->errors[i].text);
    }
    snprintf(test->failed, sizeof test->failed, "%s", fake_failed() != NULL ? fake_failed() : "");
    fake_fail_at(0, -1, FAKE_ONCE);
    if (test->nccl && s->opened > 0) cuda_nccl_close(s, status != UPIPE_OK);
    while (s->opened > 0) cuda_rank_close(s, &s->ranks[--s->opened]);
    DEVICE_CHECK(cudaSetDevice(0));
    free(s);
    buffers_free(mark);
    CHECK(fake_check_clean());
    return status;
}

#endif

/* runner_cuda.h -- devices as the place of lib/runner.h: ranks are threads of the host with the CUDA table
 *
 *     cuda_case test = {.run = run_of(...)};          the rest 0: ranks meet through memory
 *     run_result r;
 *     if (cuda_block(&test, &in, &r) == UPIPE_OK) ...
 *
 * Each rank has a stream and a cuBLAS handle, all on one device; over NCCL it has a device of its own. The device memory in
 * use is compared with what the runner itself asked for: the library takes none.
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
    size_t before;       /* bytes of the device before the ranks came */
} cuda_case;

enum { CUDA_HELD = 48 };

typedef struct cuda_rank {
    device d, side; /* side: of a side stream */
    upipe_cuda_side_stream side_stream_state;
    upipe_side_stream side_stream;
    void *held[CUDA_HELD], *stage;
    int held_n;
    size_t bytes; /* that the runner has asked for */
    upipe_nccl nccl;
    ncclComm_t comm;
} cuda_rank;

static cuda_case *cuda_case_of(const run_state *s)
{
    return (cuda_case *)(void *)(uintptr_t)s->test; /* its first member */
}

/* The device's cast; rows of own->host go through `stage`, packed, f32. */
static upipe_status cuda_cast(upipe_ctx *c, upipe_view dst, upipe_view src)
{
    const run_own *own = (const run_own *)(const void *)((const char *)c->ops - offsetof(run_own, ops));
    const cuda_rank *me = (const cuda_rank *)own->device;
    const uintptr_t first = (uintptr_t)own->host, end = first + (uintptr_t)own->host_n * sizeof(float);
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

static void *cuda_memory(run_state *s, run_own *own, const void *data, size_t bytes)
{
    cuda_rank *me = (cuda_rank *)own->device;
    void *p = device_new(&me->d, bytes);
    (void)s;
    if (me->held_n == CUDA_HELD) abort();
    me->held[me->held_n++] = p;
    me->bytes += bytes > 0 ? bytes : 1;
    if (data != NULL) device_put(&me->d, p, data, bytes);
    return p;
}

/* ---- a rank ---- */

static void cuda_enter(run_state *s, run_own *own, upipe_ctx *c)
{
    const cuda_case *test = cuda_case_of(s);
    cuda_rank *me = (cuda_rank *)own->device;
    upipe_mem *mem = c->mem;
    (void)cudaSetDevice(me->d.cuda.device); /* fails where another rank has ended the context already */
    fake_rank(own->rank);                   /* the runner's own call above does not count */
    *c = me->d.c;
    c->mem = mem;
    c->ops = &own->ops;
    c->side_stream = test->run.overlap ? &me->side_stream : NULL;
    upipe_threads_grid_use(&s->grid, own->rank, c);
    if (test->nccl) c->team = &me->nccl.comm;
}

static void cuda_leave(run_state *s, run_own *own, upipe_ctx *c)
{
    (void)c;
    cuda_case_of(s)->calls[own->rank] = fake_calls(own->rank);
}

/* ---- what a rank holds, made and released by the main thread ---- */

static void cuda_rank_open(run_state *s, run_own *own)
{
    const cuda_case *test = cuda_case_of(s);
    cuda_rank *me = (cuda_rank *)own->device;
    if (test->nccl) DEVICE_CHECK(cudaSetDevice(own->rank));
    device_open(&me->d);
    own->ops = me->d.ops;
    if (test->run.table != NULL) test->run.table(&own->ops);
    own->ops.cast = cuda_cast;
    me->bytes = UPIPE_CUDA_SCRATCH + WORKSPACE;
    if (test->run.overlap) {
        device_open_as(&me->side, !test->side_later);
        me->bytes += UPIPE_CUDA_SCRATCH + WORKSPACE;
        CHECK_STATUS(upipe_cuda_side_stream_init(&me->side_stream_state, &me->side_stream, me->side.stream,
                                                 &me->side.ops, &me->d.c.err),
                     UPIPE_OK, me->d.c.err);
        if (test->watch != NULL) test->watch(&me->side_stream, own->rank, 1);
    }
    me->d.cuda.margin = test->margin;
    run_fill(s, own);
    me->stage = cuda_memory(s, own, NULL, (size_t)own->host_n * sizeof(float));
    DEVICE_CHECK(cudaStreamSynchronize(me->d.stream));
}

static void cuda_rank_close(const cuda_case *test, run_own *own)
{
    cuda_rank *me = (cuda_rank *)own->device;
    if (me->side.stream != NULL) {
        if (test->watch != NULL) test->watch(&me->side_stream, own->rank, 0);
        CHECK_STATUS(upipe_cuda_side_stream_free(&me->side_stream_state, &me->d.c.err), UPIPE_OK,
                     me->d.c.err);
        device_close(&me->side);
    }
    while (me->held_n > 0) DEVICE_CHECK(cudaFree(me->held[--me->held_n]));
    device_close(&me->d);
}

/* The communicators come together, then the teams. */
static void cuda_nccl_open(run_state *s)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclUniqueId id;
    upipe_err err;
    config.blocking = 0;
    CHECK(ncclGetUniqueId(&id) == ncclSuccess);
    for (int i = 0; i < s->ranks; ++i) {
        cuda_rank *me = (cuda_rank *)s->own[i].device;
        ncclResult_t r;
        DEVICE_CHECK(cudaSetDevice(i));
        r = ncclCommInitRankConfig(&me->comm, s->ranks, id, i, &config);
        CHECK(r == ncclSuccess || r == ncclInProgress);
    }
    for (int i = 0; i < s->ranks; ++i) {
        cuda_rank *me = (cuda_rank *)s->own[i].device;
        DEVICE_CHECK(cudaSetDevice(i));
        CHECK_STATUS(upipe_nccl_init(&me->nccl, me->comm, s->test->deadline, &err), UPIPE_OK, err);
        me->bytes += UPI_NCCL_ROW * sizeof(int64_t) * (1 + (size_t)s->ranks);
    }
}

static void cuda_nccl_close(run_state *s, int failed)
{
    upipe_err err;
    for (int i = 0; i < s->ranks; ++i) {
        cuda_rank *me = (cuda_rank *)s->own[i].device;
        if (me->comm == NULL) continue;
        DEVICE_CHECK(cudaSetDevice(i));
        CHECK_STATUS(upipe_nccl_free(&me->nccl, &err), UPIPE_OK, err);
        if (me->nccl.nccl == NULL) continue; /* freed by the failure */
        CHECK((failed ? ncclCommAbort : ncclCommDestroy)(me->comm) == ncclSuccess);
    }
}

/* ---- all ranks ---- */

/* Rank 0's device says what the table asks for, and is opened anew. */
static void cuda_begin(run_state *s)
{
    cuda_rank *first;
    for (int i = 0; i < s->ranks; ++i) s->own[i].device = zeroed(sizeof(cuda_rank));
    first = (cuda_rank *)s->own[0].device;
    device_open(&first->d);
    s->ops = first->d.ops;
}

static void cuda_open(run_state *s)
{
    cuda_case *test = cuda_case_of(s);
    device_close(&((cuda_rank *)s->own[0].device)->d);
    test->before = fake_device_live();
    fake_peak_reset();
    for (int i = 0; i < s->ranks; ++i) cuda_rank_open(s, &s->own[i]);
    if (test->nccl) cuda_nccl_open(s);
    fake_fail_at(test->fail_at, test->fail_rank, test->fail_sticky);
}

static void cuda_close(run_state *s, upipe_status status)
{
    cuda_case *test = cuda_case_of(s);
    const int ran = ((cuda_rank *)s->own[0].device)->held_n > 0;
    size_t bytes = 0;
    for (int i = 0; i < s->ranks; ++i) bytes += ((cuda_rank *)s->own[i].device)->bytes;
    if (ran) CHECK_INT(fake_device_peak() - test->before, bytes);
    snprintf(test->failed, sizeof test->failed, "%s", fake_failed() != NULL ? fake_failed() : "");
    fake_fail_at(0, -1, FAKE_ONCE);
    cuda_nccl_close(s, status != UPIPE_OK);
    for (int i = s->ranks; i-- > 0;)
        if (ran || i == 0) cuda_rank_close(test, &s->own[i]);
    DEVICE_CHECK(cudaSetDevice(0));
    CHECK(fake_check_clean());
}

static const run_place cuda_place = {.begin = cuda_begin,
                                     .open = cuda_open,
                                     .memory = cuda_memory,
                                     .enter = cuda_enter,
                                     .leave = cuda_leave,
                                     .world = run_host_world,
                                     .run = run_host_run,
                                     .close = cuda_close};

/* As run_block. */
static upipe_status cuda_block(cuda_case *test, const f32_block *in, run_result *r)
{
    test->run.place = &cuda_place;
    return run_block(&test->run, in, r);
}

#endif

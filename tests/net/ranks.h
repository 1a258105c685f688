/* ranks.h -- ranks over NCCL that are threads, each with a device and a stream of its own, on tests/fake   tests
 *
 * A crew of ranks that runs a body, with a call of one rank made to fail, and transfers with exact data.
 */
#ifndef UPIPE_TEST_RANKS_H
#define UPIPE_TEST_RANKS_H

#include <pthread.h>

#include "upipe/net/upipe_net_nccl.h"
#include "upipe/upipe_reduce.h"

#include "fake.h"
#include "../lib/memory.h"
#include "../lib/transfers.h"

enum { RANKS_MAX = 8, WORDS = 8 };
enum { BUF = 96 * 1024, SLAB = 2 * BUF * 4 };

struct crew;

/* One rank. The host's part (device, stream, memory) is made and ended without faults. */
typedef struct rank_buf {
    struct crew *crew;
    int rank, ranks;
    pthread_t thread;
    cudaStream_t stream;
    upipe_ops ops;
    upipe_ctx ctx;
    uint32_t *slab;        /* 2 * BUF words of the device */
    uint32_t *send, *recv; /* the first and the second BUF */
    upipe_msg list[2 * RANKS_MAX];
    upipe_status status, freed;
    ncclComm_t nccl; /* the host's */
    upipe_nccl team;
} rank_buf;

typedef struct crew {
    rank_buf rank[RANKS_MAX];
    pthread_barrier_t door;
    upipe_status (*body)(rank_buf *k);
    double deadline;
    uint64_t seed;
    int ranks;
    int ahead; /* wait orders the stream of the rank, and no more */
    int victim, what;
    char failed[64]; /* the call that failed in the last run; empty: none */
    ncclUniqueId id, more;
    int blocking, grouped;
} crew;

static crew the_crew;

#define OK(call) CHECK_SAY((call) == cudaSuccess, "%s", #call)

static upipe_status test_check_cuda(upipe_ctx *c, cudaError_t r, const char *what)
{
    if (r == cudaSuccess) return UPIPE_OK;
    (void)cudaGetLastError();
    return upipe_fail(&c->err, UPIPE_ERR_BACKEND, "%s: %s", what, cudaGetErrorString(r));
}

static upipe_status test_copy(upipe_ctx *c, void *dst, const void *src, size_t bytes)
{
    return test_check_cuda(c, cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, (cudaStream_t)c->stream),
                           "cudaMemcpyAsync");
}

/* As a compute table's: a stream that a transfer holds up is waited for within the deadline. */
static upipe_status test_sync(upipe_ctx *c)
{
    UPIPE_TRY(upi_comm_settle(c));
    return test_check_cuda(c, cudaStreamSynchronize((cudaStream_t)c->stream), "cudaStreamSynchronize");
}

/* Between the host's memory and the device, on the stream. */
static void put(void *user, void *device, const void *host, size_t bytes)
{
    rank_buf *k = (rank_buf *)user;
    OK(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, k->stream));
}

static void get(void *user, void *host, const void *device, size_t bytes)
{
    rank_buf *k = (rank_buf *)user;
    OK(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, k->stream));
    OK(cudaStreamSynchronize(k->stream));
}

/* The host's part: the slab, and the communicator. */
static void rank_begin(rank_buf *k)
{
    const crew *all = k->crew;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclResult_t r;
    config.blocking = all->blocking;
    OK(cudaMalloc((void **)&k->slab, SLAB));
    r = ncclCommInitRankConfig(&k->nccl, all->ranks, all->id, k->rank, &config);
    CHECK(r == ncclSuccess || (!all->blocking && r == ncclInProgress));
}

/* The team, and ctx.team; where it fails there is nothing to free. */
static upipe_status rank_make(rank_buf *k)
{
    upipe_status s = upipe_nccl_init(&k->team, k->nccl, k->crew->deadline, &k->ctx.err);
    if (s != UPIPE_OK) { /* the host's to end */
        CHECK(k->team.buf == NULL && k->team.row == NULL && k->team.rows == NULL);
        (void)ncclCommAbort(k->nccl);
        k->nccl = NULL;
    }
    CHECK(s != UPIPE_OK || k->team.ahead); /* the default */
    k->team.grouped = k->crew->grouped;
    k->team.ahead = k->crew->ahead;
    k->ctx.team = &k->team.comm;
    return s;
}

static upipe_status rank_free(rank_buf *k)
{
    upipe_status s;
    CHECK(k->team.nccl == k->nccl || k->team.nccl == NULL);
    s = upipe_nccl_free(&k->team, &k->ctx.err);
    k->nccl = k->team.nccl; /* NULL: a failure has freed it, perhaps one that free has found */
    return s;
}

static void rank_end(rank_buf *k)
{
    if (k->nccl != NULL) CHECK(ncclCommAbort(k->nccl) == ncclSuccess);
    (void)cudaFree(k->slab);
}

static void *rank_main(void *p)
{
    rank_buf *k = (rank_buf *)p;
    crew *all = k->crew;
    fake_rank(k->rank);
    OK(cudaSetDevice(k->rank));
    OK(cudaStreamCreateWithFlags(&k->stream, cudaStreamNonBlocking));
    rank_begin(k);
    k->send = k->slab;
    k->recv = k->slab + BUF;
    k->ops.copy = test_copy;
    k->ops.sync = test_sync;
    k->ctx.ops = &k->ops;
    k->ctx.stream = k->stream;

    pthread_barrier_wait(&all->door); /* faults are set */
    pthread_barrier_wait(&all->door);
    k->status = rank_make(k);
    if (k->status == UPIPE_OK) {
        k->status = all->body(k);
        k->freed = rank_free(k);
    }
    pthread_barrier_wait(&all->door);
    pthread_barrier_wait(&all->door); /* faults are off */

    rank_end(k);
    (void)cudaStreamDestroy(k->stream);
    return NULL;
}

/* Runs body on every rank. fail_at: that call of rank fail_rank fails, 0: none. Returns the calls it made. */
static long crew_run(crew *all, int ranks, double deadline, upipe_status (*body)(rank_buf *), long fail_at,
                     int fail_rank, int sticky)
{
    double began;
    long calls;
    memset(all->rank, 0, sizeof all->rank);
    all->ranks = ranks;
    all->deadline = deadline;
    all->body = body;
    pthread_barrier_init(&all->door, NULL, (unsigned)ranks + 1);
    CHECK(ncclGetUniqueId(&all->id) == ncclSuccess);
    CHECK(ncclGetUniqueId(&all->more) == ncclSuccess);
    for (int r = 0; r < ranks; ++r) {
        all->rank[r].crew = all;
        all->rank[r].rank = r;
        all->rank[r].ranks = ranks;
        CHECK(pthread_create(&all->rank[r].thread, NULL, rank_main, &all->rank[r]) == 0);
    }
    pthread_barrier_wait(&all->door);
    fake_fail_at(fail_at, fail_rank, sticky);
    began = test_seconds();
    pthread_barrier_wait(&all->door);
    pthread_barrier_wait(&all->door);
    CHECK(test_seconds() - began < 15);
    calls = fake_calls(fail_rank);
    snprintf(all->failed, sizeof all->failed, "%s", fake_failed() != NULL ? fake_failed() : "");
    fake_fail_at(0, -1, FAKE_ONCE);
    pthread_barrier_wait(&all->door);
    for (int r = 0; r < ranks; ++r) pthread_join(all->rank[r].thread, NULL);
    pthread_barrier_destroy(&all->door);
    buffers_free(0);
    CHECK(fake_check_clean());
    return calls;
}

static void crew_good(crew *all, int ranks, upipe_status (*body)(rank_buf *))
{
    crew_run(all, ranks, 20, body, 0, -1, FAKE_ONCE);
    for (int r = 0; r < ranks; ++r) {
        CHECK_STATUS(all->rank[r].status, UPIPE_OK, all->rank[r].ctx.err);
        CHECK_STATUS(all->rank[r].freed, UPIPE_OK, all->rank[r].ctx.err);
    }
}

/* ---- a stream that does not go on ---- */

/* From here on the rank's stream waits, for a message that nobody sends. */
static void stall(rank_buf *k, ncclComm_t two[2])
{
    const int devices[2] = {k->rank, RANKS_MAX + k->rank};
    CHECK(ncclCommInitAll(two, 2, devices) == ncclSuccess);
    CHECK(ncclRecv(k->send + BUF - 1, 4, ncclInt8, 1, two[0], k->stream) == ncclSuccess);
}

/* It goes on. */
static void stall_end(ncclComm_t two[2])
{
    CHECK(ncclCommAbort(two[0]) == ncclSuccess);
    CHECK(ncclCommAbort(two[1]) == ncclSuccess);
}

/* ---- exact data ---- */

/* An all-to-all of `count` blocks of WORDS words a pair, without gaps. */
static upipe_status all_to_all(rank_buf *k, int count)
{
    uint32_t host[RANKS_MAX * 4 * WORDS];
    upipe_ctx *c = &k->ctx;
    const int n = count * WORDS;
    const size_t bytes = (size_t)(k->ranks * n) * 4;
    all_fill(host, k->rank, k->ranks, n);
    put(k, k->send, host, bytes);
    memset(host, 0xee, sizeof host);
    put(k, k->recv, host, bytes);
    memset(k->list, 0, sizeof k->list);
    all_messages(k->list, k->ranks, k->send, k->recv, count, WORDS);
    UPIPE_TRY(upipe_comm_start(c, c->team, k->list, k->ranks));
    UPIPE_TRY(upipe_comm_wait(c, c->team));
    UPIPE_TRY(upi_comm_settle(c));
    get(k, host, k->recv, bytes);
    all_check(host, k->rank, k->ranks, n);
    return UPIPE_OK;
}

static upipe_status all_body(rank_buf *k)
{
    const int64_t sent = (int64_t)(k->ranks - 1) * 6 * WORDS * 4;
    UPIPE_TRY(all_to_all(k, 1));
    UPIPE_TRY(all_to_all(k, 4));
    UPIPE_TRY(all_to_all(k, 1));
    CHECK_INT(k->ctx.team->sent_bytes, sent);
    CHECK_INT(k->ctx.team->moved_bytes, sent);
    return UPIPE_OK;
}

static upipe_status shift_body(rank_buf *k)
{
    int64_t sent = 0;
    return shift_all(&k->ctx, k->send, k, put, get, &sent);
}

static upipe_status meet_body(rank_buf *k)
{
    upipe_ctx *c = &k->ctx;
    int64_t mine[UPIPE_ALL_GATHER_MAX + 1] = {0};
    for (int round = 0; round < 9; ++round) {
        UPIPE_TRY(gather_some(c, round));
        if (round % 3 == 0) UPIPE_TRY(all_to_all(k, 1));
        if (round % k->ranks == k->rank) test_nap(0.002);
        UPIPE_TRY(barrier_holds(c));
    }
    CHECK_STATUS(upipe_comm_all_gather(c, c->team, c->team->gathered, mine, UPIPE_ALL_GATHER_MAX + 1),
                 UPIPE_ERR_ARG, c->err);
    return UPIPE_OK;
}

static upipe_status random_body(rank_buf *k)
{
    upipe_ctx *c = &k->ctx;
    lists t = {.seed = k->crew->seed, .rank = k->rank, .ranks = k->ranks, .most = 3, .longest = 150};
    const size_t bytes = words_in_lists(&t) * 4;
    uint32_t *host = (uint32_t *)buffer(bytes);
    upipe_msg *list = (upipe_msg *)zeroed((size_t)(6 * k->ranks) * sizeof *list);
    CHECK(bytes <= BUF * 4);
    lists_begin(&t);
    for (int round = 0; round < 12; ++round) {
        cudaStream_t other = k->stream;
        int n;
        memset(host, 0xee, bytes);
        put(k, k->recv, host, bytes);
        n = lists_next(&t, list, host, k->send, k->recv);
        put(k, k->send, host, bytes);
        UPIPE_TRY(upipe_comm_start(c, c->team, list, n));
        if (test_below(&t.rng, 4) == 0) test_nap(0.0003);
        UPIPE_TRY(upipe_comm_wait(c, c->team));
        /* complete on the device: another stream may read what has come and write over what was sent */
        if (!k->crew->ahead) OK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
        OK(cudaMemsetAsync(k->send, 0xdd, bytes, other));
        OK(cudaMemcpyAsync(host, k->recv, bytes, cudaMemcpyDeviceToHost, other));
        OK(cudaStreamSynchronize(other));
        if (!k->crew->ahead) OK(cudaStreamDestroy(other));
        lists_check(&t, host);
    }
    CHECK_INT(c->team->sent_bytes, t.sent);
    CHECK_INT(c->team->moved_bytes, t.moved);
    return UPIPE_OK;
}

/* After a failure every call must fail at once, with the first reason. */
static void check_dead(rank_buf *k)
{
    CHECK(k->team.nccl == NULL);
    check_dead_calls(&k->ctx, NULL);
}

enum { AT_TRANSFER, AT_BARRIER, AT_GATHER, AT_COUNT };

static upipe_status call(rank_buf *k, int what)
{
    int64_t mine = k->rank, all[RANKS_MAX];
    upipe_ctx *c = &k->ctx;
    return what == AT_BARRIER  ? upipe_comm_barrier(c, c->team)
           : what == AT_GATHER ? upipe_comm_all_gather(c, c->team, all, &mine, 1)
                               : all_to_all(k, 1);
}

/* Each fault of `whats`, `times` times, on a victim after the other. */
static void crew_fails(crew *all, upipe_status (*body)(rank_buf *), int times, int whats)
{
    for (int i = 0; i < times * whats; ++i) {
        all->victim = i % 3;
        all->what = i / times;
        crew_run(all, 3, 20, body, 0, -1, FAKE_ONCE);
    }
}

/* ---- a call that fails ---- */

/* A bit of everything, for a fault at any call of it. */
static upipe_status every_call(rank_buf *k)
{
    upipe_ctx *c = &k->ctx;
    const upi_fields fields = fields_of("heads", 32);
    memset(k->list, 0, sizeof k->list);
    UPIPE_TRY(upi_agree(c, c->team, &fields));
    for (int distance = 1; distance >= 0; --distance) {
        UPIPE_TRY(shift_start(c, c->team, k->recv, k->send, 64, distance));
        UPIPE_TRY(upipe_comm_wait(c, c->team));
    }
    for (int p = 0; p < k->ranks; ++p) {
        upipe_msg *s = &k->list[p];
        *s = (upipe_msg){.peer = p, .count = 1, .send_bytes = 4, .recv_bytes = 4};
        s->send = k->send + p;
        s->recv = k->recv + 2 * p;
    }
    UPIPE_TRY(upipe_comm_start(c, c->team, k->list, k->ranks));
    UPIPE_TRY(upipe_comm_wait(c, c->team));
    UPIPE_TRY(upi_slices_gather(c, c->team, k->recv, k->send, k->ranks * WORDS, 4));
    return upipe_comm_barrier(c, c->team);
}

static upipe_status every_body(rank_buf *k)
{
    const upipe_status s = every_call(k);
    if (s != UPIPE_OK) {
        CHECK_INT(k->ctx.err.status, s);
        CHECK(k->ctx.err.text[0] != 0);
        check_dead(k);
    }
    return s;
}

/* What a failed call may give: it may go unneeded. */
static int may_fail_with(upipe_status s)
{
    return s == UPIPE_OK || s == UPIPE_ERR_BACKEND || s == UPIPE_ERR_MEMORY;
}

/* Calls of one rank fail in turn, some sixty of them, init's too, other ones with other seeds; sticky: and all later
 * ones of every rank. A run makes more than `least`. */
static void test_injected(crew *all, int sticky, long least)
{
    enum { RANKS = 3, VICTIM = 1 };
    const rank_buf *victim = &all->rank[VICTIM];
    long apart, calls = crew_run(all, RANKS, 20, every_body, 0, VICTIM, FAKE_ONCE);
    CHECK(calls > least);
    apart = calls / 60 + 1; /* most are polls, more of them on a slow machine */
    for (long k = 1 + (long)all->seed % apart; k <= calls; k += apart) {
        int failures = 0;
        crew_run(all, RANKS, 1, every_body, k, VICTIM, sticky);
        if (all->failed[0] == 0) continue; /* polls vary in number: the last calls may not be reached */
        for (int r = 0; r < RANKS; ++r) {
            const rank_buf *at = &all->rank[r];
            CHECK_SAY(may_fail_with(at->status) || at->status == UPIPE_ERR_ABORTED ||
                          at->status == UPIPE_ERR_TIMEOUT,
                      "call %ld fails: rank %d: %s", k, r, at->ctx.err.text);
            failures += at->status != UPIPE_OK || at->freed != UPIPE_OK;
        }
        CHECK_SAY(victim->status != UPIPE_OK || victim->freed != UPIPE_OK, "call %ld (%s) fails, unnoticed",
                  k, all->failed);
        if (!sticky) CHECK(may_fail_with(victim->status));
        CHECK(failures >= 1);
    }
}

#endif

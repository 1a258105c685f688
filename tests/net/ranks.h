/* ranks.h -- ranks that are threads, each with a device and a stream of its own, on tests/fake   tests
 *
 * What the tests of the device transports share: a crew of ranks that runs a body, with a call of one rank
 * made to fail, and transfers with exact data. A test says first what a rank of its transport has, and
 * defines the functions declared below:
 *
 *     #define RANK_FIELDS upipe_nccl team; ...
 *     #define CREW_FIELDS int blocking; ...
 *     #define RANK_DEAD(k) what holds of a team that has failed
 *     #include "ranks.h"
 */
#ifndef UPIPE_TEST_RANKS_H
#define UPIPE_TEST_RANKS_H

#include <nccl.h>
#include <pthread.h>

#include "fake.h"
#include "../lib/test.h"

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
    RANK_FIELDS
} rank_buf;

typedef struct crew {
    rank_buf rank[RANKS_MAX];
    pthread_barrier_t door;
    upipe_status (*body)(rank_buf *k);
    double deadline;
    uint64_t seed;
    int ranks;
    int shared; /* all are on device 0 */
    int ahead;  /* wait orders the stream of the rank, and no more */
    int victim, what;
    char failed[64]; /* the call that failed in the last run; empty: none */
    CREW_FIELDS
} crew;

static crew the_crew;

/* The transport's part. begin and end: the slab, and what the host makes. make: the team, and ctx.team; where
 * it fails there is nothing to free. ready: what a body wants of the team. free: the team. */
static void rank_begin(rank_buf *k);
static upipe_status rank_make(rank_buf *k);
static upipe_status rank_ready(rank_buf *k);
static upipe_status rank_free(rank_buf *k);
static void rank_end(rank_buf *k, int made);
/* Before the threads start, and when they have ended. */
static void crew_begin(crew *all);
static void crew_end(crew *all);

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
    UPIPE_TRY(upipe_comm_settle(c));
    return test_check_cuda(c, cudaStreamSynchronize((cudaStream_t)c->stream), "cudaStreamSynchronize");
}

/* Between the host's memory and the device, on the stream. */
static void put(rank_buf *k, void *device, const void *host, size_t bytes)
{
    OK(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, k->stream));
}

static void get(rank_buf *k, void *host, const void *device, size_t bytes)
{
    OK(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, k->stream));
    OK(cudaStreamSynchronize(k->stream));
}

static double now(void)
{
    return (double)upipe_net_now() * 1e-9;
}

static void nap(double seconds)
{
    struct timespec t;
    t.tv_sec = (time_t)seconds;
    t.tv_nsec = (long)((seconds - (double)t.tv_sec) * 1e9);
    nanosleep(&t, NULL);
}

static void *rank_main(void *p)
{
    rank_buf *k = (rank_buf *)p;
    crew *all = k->crew;
    int made;
    fake_rank(k->rank);
    OK(cudaSetDevice(all->shared ? 0 : k->rank));
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
    made = k->status == UPIPE_OK;
    if (made) {
        k->status = rank_ready(k);
        if (k->status == UPIPE_OK) k->status = all->body(k);
        k->freed = rank_free(k);
    }
    pthread_barrier_wait(&all->door);
    pthread_barrier_wait(&all->door); /* faults are off */

    rank_end(k, made);
    (void)cudaStreamDestroy(k->stream);
    return NULL;
}

/* Runs body on every rank. fail_at: that call of rank fail_rank fails, 0: none. Returns the calls it made. */
static long crew_run(crew *all, int ranks, double deadline, upipe_status (*body)(rank_buf *), long fail_at,
                     int fail_rank, int sticky)
{
    double began;
    long calls;
    int r;
    memset(all->rank, 0, sizeof all->rank);
    all->ranks = ranks;
    all->deadline = deadline;
    all->body = body;
    pthread_barrier_init(&all->door, NULL, (unsigned)ranks + 1);
    crew_begin(all);
    for (r = 0; r < ranks; ++r) {
        all->rank[r].crew = all;
        all->rank[r].rank = r;
        all->rank[r].ranks = ranks;
        CHECK(pthread_create(&all->rank[r].thread, NULL, rank_main, &all->rank[r]) == 0);
    }
    pthread_barrier_wait(&all->door);
    fake_fail_at(fail_at, fail_rank, sticky);
    began = now();
    pthread_barrier_wait(&all->door);
    pthread_barrier_wait(&all->door);
    CHECK(now() - began < 15);
    calls = fake_calls(fail_rank);
    snprintf(all->failed, sizeof all->failed, "%s", fake_failed() != NULL ? fake_failed() : "");
    fake_fail_at(0, -1, FAKE_ONCE);
    pthread_barrier_wait(&all->door);
    for (r = 0; r < ranks; ++r) pthread_join(all->rank[r].thread, NULL);
    pthread_barrier_destroy(&all->door);
    crew_end(all);
    CHECK(fake_check_clean());
    return calls;
}

static void crew_good(crew *all, int ranks, upipe_status (*body)(rank_buf *))
{
    int r;
    crew_run(all, ranks, 20, body, 0, -1, FAKE_ONCE);
    for (r = 0; r < ranks; ++r) {
        CHECK_STATUS(all->rank[r].status, UPIPE_OK, all->rank[r].ctx.err);
        CHECK_STATUS(all->rank[r].freed, UPIPE_OK, all->rank[r].ctx.err);
    }
}

/* ---- a stream that does not go on ---- */

/* From here on the rank's stream waits, for a message that nobody sends. */
static void stall(rank_buf *k, ncclComm_t two[2])
{
    int devices[2] = {k->crew->shared ? 0 : k->rank, RANKS_MAX + k->rank};
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

static uint32_t word_of(int source, int dest, int index)
{
    return (uint32_t)source << 24 | (uint32_t)dest << 16 | (uint32_t)index;
}

/* An all-to-all of `count` blocks of WORDS words a pair, without gaps. */
static upipe_status all_to_all(rank_buf *k, int count)
{
    uint32_t host[RANKS_MAX * 4 * WORDS];
    upipe_ctx *c = &k->ctx;
    int p, i, n = count * WORDS, wrong = 0;
    for (p = 0; p < k->ranks; ++p)
        for (i = 0; i < n; ++i) host[p * n + i] = word_of(k->rank, p, i);
    put(k, k->send, host, (size_t)(k->ranks * n) * 4);
    memset(host, 0xee, sizeof host);
    put(k, k->recv, host, (size_t)(k->ranks * n) * 4);
    memset(k->list, 0, sizeof k->list);
    for (p = 0; p < k->ranks; ++p) {
        upipe_msg *s = &k->list[p];
        s->peer = p;
        s->count = count;
        s->send = k->send + p * n;
        s->recv = k->recv + p * n;
        s->send_bytes = s->recv_bytes = s->send_step = s->recv_step = WORDS * 4;
    }
    UPIPE_TRY(upipe_comm_start(c, c->team, k->list, k->ranks));
    UPIPE_TRY(upipe_comm_wait(c, c->team));
    UPIPE_TRY(upipe_comm_settle(c));
    get(k, host, k->recv, (size_t)(k->ranks * n) * 4);
    for (p = 0; p < k->ranks; ++p)
        for (i = 0; i < n; ++i) wrong += host[p * n + i] != word_of(p, k->rank, i);
    CHECK_INT(wrong, 0);
    return UPIPE_OK;
}

static upipe_status shift_body(rank_buf *k)
{
    static const int steps[] = {-1, 0, 1, 2, 7, -6};
    upipe_ctx *c = &k->ctx;
    int i, w, ranks = k->ranks;
    for (i = 0; i < (int)(sizeof steps / sizeof *steps); ++i) {
        uint32_t from[WORDS], to[WORDS];
        int forth = ((k->rank + steps[i]) % ranks + ranks) % ranks;
        int back = ((k->rank - steps[i]) % ranks + ranks) % ranks;
        for (w = 0; w < WORDS; ++w) from[w] = word_of(k->rank, forth, w + i);
        put(k, k->send, from, sizeof from);
        UPIPE_TRY(upipe_comm_shift_start(c, c->team, k->recv, k->send, sizeof to, steps[i]));
        UPIPE_TRY(upipe_comm_wait(c, c->team));
        get(k, to, k->recv, sizeof to);
        for (w = 0; w < WORDS; ++w) CHECK_INT(to[w], word_of(back, k->rank, w + i));
    }
    return UPIPE_OK;
}

static upipe_status meet_body(rank_buf *k)
{
    upipe_ctx *c = &k->ctx;
    int64_t mine[UPIPE_ALL_GATHER_MAX], *all = c->team->gathered, entered, left;
    int round, r, i, n;
    for (round = 0; round < 9; ++round) {
        n = round == 3 ? 0 : round == 5 ? UPIPE_ALL_GATHER_MAX : 1 + round % 4;
        for (i = 0; i < n; ++i) mine[i] = (int64_t)word_of(k->rank, round, i) * -3;
        UPIPE_TRY(upipe_comm_all_gather(c, c->team, all, mine, n));
        for (r = 0; r < k->ranks; ++r)
            for (i = 0; i < n; ++i) CHECK_INT(all[r * n + i], (int64_t)word_of(r, round, i) * -3);
        if (round % 3 == 0) UPIPE_TRY(all_to_all(k, 1));
        if (round % k->ranks == k->rank) nap(0.002);
        entered = upipe_net_now();
        UPIPE_TRY(upipe_comm_barrier(c, c->team));
        left = upipe_net_now();
        UPIPE_TRY(upipe_comm_all_gather(c, c->team, all, &entered, 1));
        for (r = 0; r < k->ranks; ++r) CHECK(all[r] <= left);
    }
    CHECK_STATUS(upipe_comm_all_gather(c, c->team, all, mine, UPIPE_ALL_GATHER_MAX + 1), UPIPE_ERR_ARG,
                 c->err);
    return UPIPE_OK;
}

/* Random transfers: 0 to 3 messages from every rank to every rank, blocks with gaps, in any order. */
enum { PARTS_MAX = 3, PART_BUF = 4 * 200 };

typedef struct part {
    int64_t count;
    int words, send_step, recv_step;
} part;

static part part_of(uint64_t seed, int round, int source, int dest, int index)
{
    test_rng rng;
    part p;
    rng.state = seed ^ (uint64_t)round << 40 ^ (uint64_t)source << 24 ^ (uint64_t)dest << 8 ^ (uint64_t)index;
    test_u64(&rng);
    p.count = 1 + test_below(&rng, 4);
    p.words = 1 + test_below(&rng, test_below(&rng, 8) == 0 ? 150 : 24);
    p.send_step = p.words + test_below(&rng, 3);
    p.recv_step = p.words + test_below(&rng, 3);
    return p;
}

static int parts_of(uint64_t seed, int round, int source, int dest)
{
    return part_of(seed, round, source, dest, 99).words % (PARTS_MAX + 1);
}

static uint32_t part_word(int round, int source, int dest, int index, int at)
{
    return word_of(source << 4 | dest, (round & 31) << 3 | index, at);
}

static upipe_status random_body(rank_buf *k)
{
    upipe_ctx *c = &k->ctx;
    uint64_t seed = k->crew->seed;
    int ranks = k->ranks, most = ranks * PARTS_MAX, round, p, i, b, w;
    size_t words = (size_t)most * PART_BUF;
    uint32_t *host = (uint32_t *)malloc(words * sizeof *host);
    upipe_msg *list = (upipe_msg *)malloc(2 * (size_t)most * sizeof *list);
    int64_t sent = 0, moved = 0;
    upipe_status s = UPIPE_OK;
    test_rng rng;
    CHECK(words <= BUF);
    rng.state = seed + (uint64_t)k->rank * 1000003;
    for (round = 0; round < 12 && s == UPIPE_OK; ++round) {
        int n = 0, first = test_below(&rng, ranks), sends_first = test_below(&rng, 2);
        size_t send_at = 0, recv_at = 0;
        memset(host, 0xee, words * sizeof *host);
        put(k, k->recv, host, words * sizeof *host);
        for (p = 0; p < ranks; ++p) {
            int peer = (first + p) % ranks, pass;
            for (pass = 0; pass < 2; ++pass) {
                int sending = pass == sends_first;
                int from = sending ? k->rank : peer, to = sending ? peer : k->rank;
                for (i = 0; i < parts_of(seed, round, from, to); ++i) {
                    part q = part_of(seed, round, from, to, i);
                    upipe_msg *msg = &list[n++];
                    memset(msg, 0, sizeof *msg);
                    msg->peer = peer;
                    msg->count = q.count;
                    if (sending) {
                        msg->send = k->send + send_at;
                        msg->send_bytes = (size_t)q.words * 4;
                        msg->send_step = (size_t)q.send_step * 4;
                        for (b = 0; b < q.count; ++b)
                            for (w = 0; w < q.words; ++w)
                                host[send_at + (size_t)(b * q.send_step + w)] =
                                    part_word(round, from, to, i, b * q.words + w);
                        send_at += PART_BUF;
                        if (peer != k->rank) sent += q.count * q.words * 4;
                    } else {
                        msg->recv = k->recv + recv_at;
                        msg->recv_bytes = (size_t)q.words * 4;
                        msg->recv_step = (size_t)q.recv_step * 4;
                        recv_at += PART_BUF;
                        if (peer != k->rank) moved += q.count * q.words * 4;
                    }
                }
            }
        }
        put(k, k->send, host, words * sizeof *host);
        s = upipe_comm_start(c, c->team, list, n);
        if (s != UPIPE_OK) break;
        if (test_below(&rng, 4) == 0) nap(0.0003);
        s = upipe_comm_wait(c, c->team);
        if (s != UPIPE_OK) break;
        /* complete on the device: another stream may read what has come and write over what was sent */
        {
            cudaStream_t other = k->stream;
            if (!k->crew->ahead) OK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
            OK(cudaMemsetAsync(k->send, 0xdd, words * 4, other));
            OK(cudaMemcpyAsync(host, k->recv, words * 4, cudaMemcpyDeviceToHost, other));
            OK(cudaStreamSynchronize(other));
            if (!k->crew->ahead) OK(cudaStreamDestroy(other));
        }
        recv_at = 0;
        for (p = 0; p < ranks; ++p) {
            int peer = (first + p) % ranks;
            for (i = 0; i < parts_of(seed, round, peer, k->rank); ++i) {
                part q = part_of(seed, round, peer, k->rank, i);
                int wrong = 0;
                for (b = 0; b < q.count; ++b)
                    for (w = 0; w < q.recv_step; ++w)
                        wrong +=
                            host[recv_at + (size_t)(b * q.recv_step + w)] !=
                            (w < q.words ? part_word(round, peer, k->rank, i, b * q.words + w) : 0xeeeeeeeeu);
                CHECK_SAY(wrong == 0,
                          "seed %llu, %d ranks, transfer %d, part %d of %d to %d: %d words differ",
                          (unsigned long long)seed, ranks, round, i, peer, k->rank, wrong);
                recv_at += PART_BUF;
            }
        }
    }
    CHECK_INT(c->team->sent_bytes, sent);
    CHECK_INT(c->team->moved_bytes, moved);
    free(host);
    free(list);
    return s;
}

/* After a failure every call must fail at once, with the first reason. */
static void check_dead(rank_buf *k)
{
    upipe_ctx *c = &k->ctx;
    upipe_field field = {"never compared", 99, 0};
    int64_t one = 1, all[RANKS_MAX];
    char reason[256];
    RANK_DEAD(k);
    c->team->deadline = 60;
    CHECK_STATUS(upipe_comm_barrier(c, c->team), UPIPE_ERR_ABORTED, c->err);
    snprintf(reason, sizeof reason, "%s", c->err.text);
    CHECK_STATUS(upipe_comm_start(c, c->team, k->list, 0), UPIPE_ERR_ABORTED, c->err);
    CHECK(strcmp(c->err.text, reason) == 0);
    CHECK_STATUS(upipe_comm_all_gather(c, c->team, all, &one, 1), UPIPE_ERR_ABORTED, c->err);
    CHECK_STATUS(upipe_comm_agree(c, c->team, &field, 1), UPIPE_ERR_ABORTED, c->err);
    CHECK(strcmp(c->err.text, reason) == 0);
    CHECK(!c->team->started);
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

#endif

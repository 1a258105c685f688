/* test_peer.c -- the transport of copy engines: ranks that are threads, or stand for processes
 *
 * Runs on tests/fake, whose streams are lazy, and whose handles for other processes are opened by other
 * ranks. Exact data: every element names where it comes from and where it must land. Faults: a rank stays
 * away, aborts, disagrees or has a device that does not go on, and each call to CUDA fails in turn, once or
 * for good. Every rank must get a status in time, and nothing may be left behind.
 */
#define _POSIX_C_SOURCE 200809L
#include <sys/types.h>
#include <unistd.h>

/* Ranks that stand for processes have a number each. */
static __thread pid_t process;

static pid_t test_getpid(void)
{
    return process;
}

#define getpid test_getpid
#include "upipe/net/upipe_net_peer.h"
#undef getpid
#include "upipe/upipe_a2a.h"
#include "upipe/upipe_reduce.h"

#define RANK_FIELDS upipe_peer team;
#define CREW_FIELDS                         \
    int processes;                          \
    int past; /* atomic: ranks behind it */ \
    void *buf;
#define RANK_DEAD(k) CHECK(upi_peer_broken(&(k)->team) > 0)
#define MAY_FAIL_WITH(s) \
    ((s) == UPIPE_OK || (s) == UPIPE_ERR_BACKEND || (s) == UPIPE_ERR_MEMORY || (s) == UPIPE_ERR_UNSUPPORTED)
enum { EVERY_BLOCKS = 2 };
#include "ranks.h"

static void crew_begin(crew *all)
{
    size_t bytes = (upipe_peer_bytes(RANKS_MAX) + 127) / 128 * 128;
    all->past = 0;
    all->buf = aligned_alloc(128, bytes);
    memset(all->buf, 0, bytes);
}

static void crew_end(crew *all)
{
    free(all->buf);
}

static void rank_begin(rank_buf *k)
{
    OK(cudaMalloc((void **)&k->slab, SLAB));
}

static upipe_peer_desc desc_of(const rank_buf *k, upipe_peer_slab *slab)
{
    upipe_peer_desc d = {0};
    /* threads may share parts of an allocation */
    slab[0].data = k->slab;
    slab[0].bytes = k->crew->processes ? SLAB : BUF * 4;
    slab[1].data = k->slab + BUF;
    slab[1].bytes = BUF * 4;
    d.buf = k->crew->buf;
    d.slabs = slab;
    d.slabs_n = k->crew->processes ? 1 : 2;
    d.rank = k->rank;
    d.ranks = k->ranks;
    d.processes = k->crew->processes;
    d.deadline_s = k->crew->deadline;
    process = (pid_t)(100 + (d.processes ? k->rank : 0));
    return d;
}

static upipe_status rank_make(rank_buf *k)
{
    upipe_peer_slab slabs[2];
    upipe_peer_desc d = desc_of(k, slabs);
    upipe_status s = upipe_peer_init(&k->team, &d, &k->ctx.err);
    k->ctx.team = &k->team.comm;
    if (s != UPIPE_OK) CHECK(k->team.memory == NULL && k->team.stream == NULL);
    return s;
}

static upipe_status rank_ready(rank_buf *k)
{
    k->team.ahead = k->crew->ahead;
    return UPIPE_OK;
}

static upipe_status rank_free(rank_buf *k)
{
    return upipe_peer_free(&k->team, &k->ctx.err);
}

static void rank_end(rank_buf *k, int made)
{
    (void)made;
    (void)cudaFree(k->slab);
}

/* ---- ranks that behave ---- */

/* One block, three times: no rows of a matrix. */
static upipe_status repeat_body(rank_buf *k)
{
    uint32_t host[3 * WORDS];
    upipe_ctx *c = &k->ctx;
    int next = (k->rank + 1) % k->ranks, back = (k->rank + k->ranks - 1) % k->ranks, i, wrong = 0;
    for (i = 0; i < WORDS; ++i) host[i] = word_of(k->rank, next, i);
    put(k, k->send, host, WORDS * 4);
    memset(k->list, 0, sizeof k->list);
    k->list[0].peer = next;
    k->list[0].send = k->send;
    k->list[0].send_bytes = WORDS * 4;
    k->list[1].peer = back;
    k->list[1].recv = k->recv;
    k->list[1].recv_bytes = k->list[1].recv_stride = WORDS * 4;
    k->list[0].count = k->list[1].count = 3;
    UPIPE_TRY(upipe_comm_start(c, c->team, k->list, 2));
    UPIPE_TRY(upipe_comm_wait(c, c->team));
    get(k, host, k->recv, sizeof host);
    for (i = 0; i < 3 * WORDS; ++i) wrong += host[i] != word_of(back, k->rank, i % WORDS);
    CHECK_INT(wrong, 0);
    return UPIPE_OK;
}

/* What streams are given between start and wait, here work without end, is not waited for. */
static upipe_status beside_body(rank_buf *k)
{
    uint32_t host[RANKS_MAX * WORDS];
    upipe_ctx *c = &k->ctx;
    cudaStream_t other;
    ncclComm_t two[2];
    int wrong = 0;
    UPIPE_TRY(all_to_all(k, 1));
    memset(host, 0x55, sizeof host);
    put(k, k->send, host, sizeof host);
    UPIPE_TRY(upipe_comm_start(c, c->team, k->list, k->ranks));
    stall(k, two);
    UPIPE_TRY(upipe_comm_wait(c, c->team));
    if (k->crew->ahead) { /* behind the stall now; the deadline is upipe_peer_sync's */
        c->team->deadline = 0.1;
        if (k->rank == 0) CHECK_STATUS(upipe_peer_sync(c, &k->team), UPIPE_ERR_TIMEOUT, c->err);
        stall_end(two);
        return UPIPE_OK;
    }
    OK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    OK(cudaMemcpyAsync(host, k->recv, sizeof host, cudaMemcpyDeviceToHost, other));
    OK(cudaStreamSynchronize(other));
    OK(cudaStreamDestroy(other));
    for (int p = 0; p < k->ranks; ++p)
        for (int i = 0; i < WORDS; ++i) wrong += host[p * WORDS + i] != 0x55555555u;
    CHECK_INT(wrong, 0);
    stall_end(two);
    return UPIPE_OK;
}

/* With `ahead` no host waits for a device: all of it runs behind streams that do not go on yet. */
static upipe_status ahead_body(rank_buf *k)
{
    uint32_t host[WORDS];
    upipe_ctx *c = &k->ctx;
    ncclComm_t two[2];
    int back = (k->rank + k->ranks - 1) % k->ranks, wrong = 0;
    for (int w = 0; w < WORDS; ++w) host[w] = word_of(k->rank, 0, w);
    put(k, k->recv, host, sizeof host);
    stall(k, two);
    for (int i = 0; i < k->ranks - 1; ++i) { /* round the team, through both halves of the slab */
        uint32_t *from = i % 2 == 0 ? k->recv : k->send, *to = i % 2 == 0 ? k->send : k->recv;
        UPIPE_TRY(shift_start(c, c->team, to, from, sizeof host, 1));
        UPIPE_TRY(upipe_comm_wait(c, c->team));
    }
    UPIPE_TRY(upipe_comm_barrier(c, c->team));
    CHECK(cudaStreamQuery(k->stream) == cudaErrorNotReady);
    stall_end(two);
    UPIPE_TRY(upipe_peer_sync(c, &k->team));
    get(k, host, (k->ranks - 1) % 2 == 0 ? k->recv : k->send, sizeof host);
    for (int w = 0; w < WORDS; ++w) wrong += host[w] != word_of((back + 2) % k->ranks, 0, w);
    CHECK_INT(wrong, 0);
    return UPIPE_OK;
}

/* ---- faults ---- */

enum { AT_WAIT = AT_COUNT, ABSENCES };

static upipe_status absent_body(rank_buf *k)
{
    upipe_ctx *c = &k->ctx;
    int what = k->crew->what;
    upipe_status s;
    char name[32];
    UPIPE_TRY(all_to_all(k, 1));
    UPIPE_TRY(upipe_comm_barrier(c, c->team));
    c->team->deadline = 0.2;
    if (k->rank == k->crew->victim) {
        if (what == AT_WAIT) CHECK_STATUS(upipe_comm_start(c, c->team, k->list, k->ranks), UPIPE_OK, c->err);
        while (!upi_peer_broken(&k->team)) test_nap(0.01);
        s = what == AT_WAIT ? upipe_comm_wait(c, c->team) : call(k, what);
        CHECK_STATUS(s, UPIPE_ERR_ABORTED, c->err);
    } else {
        s = call(k, what == AT_WAIT ? AT_TRANSFER : what);
        CHECK(s == UPIPE_ERR_TIMEOUT || s == UPIPE_ERR_ABORTED); /* one is first */
    }
    snprintf(name, sizeof name, "for rank %d to %s", k->crew->victim, what == AT_WAIT ? "send" : "come");
    CHECK_TEXT(c->err.text, name);
    CHECK_TEXT(c->err.text, "waited 0.2 s in ");
    CHECK_INT(c->team->quarantine, 0);
    check_dead(k);
    return s;
}

enum { UP_FRONT, BETWEEN, ABORTS };

static upipe_status abort_body(rank_buf *k)
{
    upipe_ctx *c = &k->ctx;
    upipe_status s;
    UPIPE_TRY(all_to_all(k, 1));
    UPIPE_TRY(upipe_comm_barrier(c, c->team));
    if (k->rank == k->crew->victim) {
        if (k->crew->what == BETWEEN)
            CHECK_STATUS(upipe_comm_start(c, c->team, k->list, k->ranks), UPIPE_OK, c->err);
        upipe_comm_abort(c->team, "the host has had enough");
        upipe_comm_abort(c->team, "and says it again");
        s = k->crew->what == BETWEEN ? upipe_comm_wait(c, c->team) : upipe_comm_barrier(c, c->team);
    } else {
        s = all_to_all(k, 1);
    }
    CHECK_REFUSED(s, UPIPE_ERR_ABORTED, c->err, "had enough");
    CHECK_INT(c->team->quarantine, 0);
    check_dead(k);
    return s;
}

/* The team is broken; the rank whose stream stalls lets it go when all others have found out. */
static void outlast(rank_buf *k, ncclComm_t *two)
{
    __atomic_fetch_add(&k->crew->past, 1, __ATOMIC_ACQ_REL);
    while (two != NULL && __atomic_load_n(&k->crew->past, __ATOMIC_ACQUIRE) < k->ranks) test_nap(0.001);
    check_dead(k);
    k->ctx.team->deadline = 20; /* of upipe_peer_free */
    if (two != NULL) stall_end(two);
}

/* A rank's stream never comes to the transfer: nobody's copies to it begin, none of its own do. */
static upipe_status stalled_body(rank_buf *k)
{
    upipe_ctx *c = &k->ctx;
    int odd = k->rank == k->crew->victim;
    ncclComm_t two[2];
    upipe_status s;
    UPIPE_TRY(all_to_all(k, 1));
    c->team->deadline = 0.2;
    if (odd) stall(k, two);
    UPIPE_TRY(upipe_comm_start(c, c->team, k->list, k->ranks));
    s = upipe_comm_wait(c, c->team);
    CHECK(s == UPIPE_ERR_ABORTED || (!odd && s == UPIPE_ERR_TIMEOUT));
    CHECK_TEXT(c->err.text, "for the devices' copies to end");
    CHECK_INT(c->team->quarantine, 1);
    outlast(k, odd ? two : NULL);
    return s;
}

/* The host has run ahead of a transfer that a rank's stream never comes to, and that rank never comes to the next
 * one: the others find out by the deadline, although their streams don't come to it either, and unwind without
 * their streams. */
static upipe_status stalled_before_body(rank_buf *k)
{
    upipe_ctx *c = &k->ctx;
    int odd = k->rank == k->crew->victim;
    upipe_mem_block blocks[4];
    upipe_mem mem;
    ncclComm_t two[2];
    upipe_status s = UPIPE_ERR_ABORTED;
    UPIPE_TRY(all_to_all(k, 1));
    c->team->deadline = 0.2;
    if (odd) stall(k, two);
    UPIPE_TRY(upipe_comm_start(c, c->team, k->list, k->ranks));
    UPIPE_TRY(upipe_comm_wait(c, c->team));
    if (!odd) {
        UPIPE_TRY(upipe_comm_start(c, c->team, k->list, k->ranks));
        s = upipe_comm_wait(c, c->team);
        CHECK(s == UPIPE_ERR_ABORTED || s == UPIPE_ERR_TIMEOUT);
        CHECK_TEXT(c->err.text, "to come");
        CHECK(c->team->quarantine && c->team->stuck);
        upipe_mem_init_dry(&mem, blocks, 4);
        c->mem = &mem;
        CHECK(upipe_unwind(c, s, 0, NULL) == s);
        c->mem = NULL;
    }
    outlast(k, odd ? two : NULL);
    return s;
}

enum { KIND, COUNT, DRIFT, FIELD, ITSELF, BYTES, FEWER, MORE, MISMATCHES };

static upipe_status mismatch_body(rank_buf *k)
{
    static const char *const words[] = {"in a",
                                        "gathers 2",
                                        "in a transfer",
                                        "heads is",
                                        "does not receive",
                                        "blocks of 64 bytes to",
                                        "sends 0 messages to",
                                        "sends 2 messages to"};
    upipe_ctx *c = &k->ctx;
    int64_t mine[2] = {1, 2}, all[2 * RANKS_MAX];
    int odd = k->rank == k->crew->victim, what = k->crew->what, n = k->ranks;
    const upipe_fields fields = fields_of("heads", 32 + odd);
    upipe_msg *more = &k->list[n];
    upipe_status s;
    UPIPE_TRY(all_to_all(k, 1));
    *more = (upipe_msg){.peer = what == ITSELF ? k->rank : (k->rank + 1) % n,
                        .count = 1,
                        .send = k->send,
                        .send_bytes = WORDS * 4};
    if (what == KIND && odd) {
        s = upipe_comm_barrier(c, c->team);
    } else if (what == FIELD) {
        s = upipe_comm_agree(c, c->team, &fields);
    } else if (what == KIND || what == COUNT) {
        s = upipe_comm_all_gather(c, c->team, all, mine, what == COUNT && odd ? 2 : 1);
    } else {
        if (odd && what == BYTES) k->list[more->peer].send_bytes = 64;
        if (odd && what == FEWER) k->list[more->peer].send_bytes = 0;
        s = upipe_comm_start(c, c->team, k->list,
                             what == DRIFT ? 0 : n + (odd && (what == ITSELF || what == MORE)));
        if (what == DRIFT && !odd) { /* one transfer with nobody fewer */
            UPIPE_TRY(s);
            UPIPE_TRY(upipe_comm_wait(c, c->team));
            s = upipe_comm_barrier(c, c->team);
        } else if (what == DRIFT) {
            UPIPE_TRY(s);
            UPIPE_TRY(upipe_comm_wait(c, c->team));
            s = upipe_comm_start(c, c->team, k->list, 0);
        }
        if (s == UPIPE_OK && c->team->started) s = upipe_comm_wait(c, c->team);
        if (s == UPIPE_OK) s = upipe_comm_barrier(c, c->team);
    }
    CHECK_REFUSED(s, UPIPE_ERR_MISMATCH, c->err, words[what]);
    CHECK_INT(c->team->quarantine, 0);
    check_dead(k);
    return s;
}

/* What cannot be is refused before anything has happened: the next transfer goes well. */
static upipe_status refused_body(rank_buf *k)
{
    upipe_ctx *c = &k->ctx;
    upipe_msg *list = (upipe_msg *)zeroed(((size_t)k->ranks * UPIPE_PEER_RECVS + 1) * sizeof *list);
    cudaGraph_t graph;
    void *outside;
    int n = k->ranks * UPIPE_PEER_RECVS;
    OK(cudaMalloc(&outside, 64));
    for (int i = 0; i <= n; ++i) {
        list[i].peer = (k->rank + 1) % k->ranks;
        list[i].count = 1;
        list[i].recv = k->recv;
        list[i].recv_bytes = 4;
    }
    CHECK_REFUSED(upipe_comm_start(c, c->team, list, n + 1), UPIPE_ERR_UNSUPPORTED, c->err,
                  "messages in one transfer");
    list[0].recv = outside;
    CHECK_REFUSED(upipe_comm_start(c, c->team, list, 1), UPIPE_ERR_UNSUPPORTED, c->err, "outside the slabs");
    OK(cudaStreamBeginCapture(k->stream, cudaStreamCaptureModeThreadLocal));
    CHECK_REFUSED(upipe_comm_start(c, c->team, list, 0), UPIPE_ERR_UNSUPPORTED, c->err, "graph");
    c->err.text[0] = 0;
    CHECK_REFUSED(upipe_peer_sync(c, &k->team), UPIPE_ERR_UNSUPPORTED, c->err, "graph");
    OK(cudaStreamEndCapture(k->stream, &graph));
    OK(cudaGraphDestroy(graph));
    CHECK(!c->team->started);
    OK(cudaFree(outside));
    return all_to_all(k, 1);
}

/* ---- init ---- */

static void test_desc(void)
{
    upipe_peer team;
    upipe_peer_slab slabs[UPIPE_PEER_SLABS + 1];
    upipe_peer_desc d;
    upipe_err e;
    void *slab, *host = malloc(4096), *buf = aligned_alloc(128, (upipe_peer_bytes(1) + 127) / 128 * 128);
    memset(buf, 0, upipe_peer_bytes(1));
    OK(cudaSetDevice(1));
    OK(cudaMalloc(&slab, 4096));
    for (int what = 0; what < 10; ++what) {
        memset(&d, 0, sizeof d);
        memset(slabs, 0, sizeof slabs);
        slabs[0].data = slab;
        slabs[0].bytes = 4096;
        d.buf = buf;
        d.slabs = slabs;
        d.slabs_n = d.ranks = 1;
        if (what == 0) d.ranks = 0;
        if (what == 1) d.ranks = UPIPE_PEER_MAX + 1;
        if (what == 2) d.rank = 1;
        if (what == 3) d.deadline_s = -1;
        if (what == 4) d.buf = (char *)buf + 64;
        if (what == 5) d.slabs_n = UPIPE_PEER_SLABS + 1;
        if (what == 6) d.slabs_n = 0;
        if (what == 7) slabs[0].bytes = UPIPE_PEER_LEAST - 1;
        if (what == 8) slabs[0].data = host;
        if (what == 9) OK(cudaSetDevice(0));
        CHECK_STATUS(upipe_peer_init(&team, &d, &e), UPIPE_ERR_ARG, e);
        CHECK_STATUS(upipe_peer_free(&team, &e), UPIPE_OK, e);
    }
    OK(cudaSetDevice(1));
    CHECK_STATUS(upipe_peer_init(&team, &d, &e), UPIPE_OK, e);
    CHECK(team.comm.deadline == UPIPE_DEADLINE_DEFAULT);
    CHECK_STATUS(upipe_peer_free(&team, &e), UPIPE_OK, e);
    CHECK_STATUS(upipe_peer_free(&team, &e), UPIPE_OK, e);
    CHECK_STATUS(upipe_peer_init(&team, &d, &e), UPIPE_ERR_ARG, e); /* the same buffer */
    CHECK_TEXT(e.text, "before");
    OK(cudaFree(slab));
    OK(cudaSetDevice(0));
    free(buf);
    free(host);
    CHECK(fake_check_clean());
}

enum { NO_WAY, NO_SHARING, ALONE, ONE_PROCESS, OTHER_RANKS, OTHER_KIND, INSIDE, INITS };

/* Instead of rank_make's: one thing is wrong. */
static void *init_main(void *p)
{
    rank_buf *k = (rank_buf *)p;
    crew *all = k->crew;
    int odd = k->rank == all->victim, what = all->what;
    upipe_peer_slab slabs[2];
    upipe_peer_desc d;
    fake_rank(k->rank);
    OK(cudaSetDevice(k->rank));
    rank_begin(k);
    d = desc_of(k, slabs);
    if (what == ALONE && odd) k->status = UPIPE_ERR_TIMEOUT;
    if (what == ONE_PROCESS) process = 7;
    if (what == OTHER_RANKS && odd) d.ranks = 2;
    if (what == OTHER_KIND && odd) d.processes = !d.processes;
    if (what == INSIDE && odd) slabs[0].data = k->slab + 64, slabs[0].bytes -= 256;
    if (!(what == ALONE && odd)) {
        k->status = upipe_peer_init(&k->team, &d, &k->ctx.err);
        CHECK(k->team.memory == NULL && k->team.stream == NULL);
    }
    pthread_barrier_wait(&all->door);
    OK(cudaFree(k->slab));
    return NULL;
}

static void test_refusals(crew *all)
{
    static const char *const words[] = {"cannot reach the memory of device",
                                        "does not share memory and events",
                                        "for rank 1 to come to init",
                                        "in one process",
                                        "threads and rank",
                                        "processes",
                                        "does not arrive at its beginning"};
    static const upipe_status want[] = {UPIPE_ERR_UNSUPPORTED, UPIPE_ERR_UNSUPPORTED, UPIPE_ERR_TIMEOUT,
                                        UPIPE_ERR_UNSUPPORTED, UPIPE_ERR_MISMATCH,    UPIPE_ERR_MISMATCH,
                                        UPIPE_ERR_UNSUPPORTED};
    for (int what = 0; what < INITS; ++what) {
        all->processes = what == NO_SHARING || what == ONE_PROCESS || what == INSIDE || what == OTHER_KIND;
        all->what = what;
        all->victim = 1;
        all->deadline = what == ALONE ? 0.2 : 20;
        memset(all->rank, 0, sizeof all->rank);
        fake_peers(what > NO_SHARING);
        crew_begin(all);
        pthread_barrier_init(&all->door, NULL, 3);
        for (int r = 0; r < 3; ++r) {
            all->rank[r].crew = all;
            all->rank[r].rank = r;
            all->rank[r].ranks = 3;
            CHECK(pthread_create(&all->rank[r].thread, NULL, init_main, &all->rank[r]) == 0);
        }
        for (int r = 0; r < 3; ++r) pthread_join(all->rank[r].thread, NULL);
        for (int r = 0; r < 3; ++r) {
            const rank_buf *k = &all->rank[r];
            if (what == ALONE && r == 1) continue;
            CHECK_SAY(k->status == want[what] || (what == ALONE && k->status == UPIPE_ERR_ABORTED),
                      "case %d: rank %d: %s: %s", what, r, upipe_status_name(k->status), k->ctx.err.text);
            CHECK_TEXT(k->ctx.err.text, words[what]);
        }
        pthread_barrier_destroy(&all->door);
        crew_end(all);
        fake_peers(1);
        CHECK(fake_check_clean());
    }
    all->processes = 0;
}

/* Which slab holds a message: to the byte. */
static void test_place(void)
{
    static char a[1000], b[500];
    upipe_msg s = {0};
    int64_t at = 0;
    upipe_peer m = {0};
    m.slabs_n = 2;
    m.slabs[0].data = a, m.slabs[0].bytes = 1000;
    m.slabs[1].data = b, m.slabs[1].bytes = 500;
    s.recv = b + 100, s.recv_bytes = 100, s.count = 1;
    CHECK_INT(upi_peer_place(&m, &s, &at), 1);
    CHECK_INT(at, 100);
    s.recv_bytes = 400;
    CHECK_INT(upi_peer_place(&m, &s, &at), 1);
    s.recv_bytes = 401;
    CHECK_INT(upi_peer_place(&m, &s, &at), -1);
    s.recv = a, s.recv_bytes = 10, s.recv_stride = 110, s.count = 10;
    CHECK_INT(upi_peer_place(&m, &s, &at), 0);
    s.recv_bytes = 11;
    CHECK_INT(upi_peer_place(&m, &s, &at), -1);
    s.recv_bytes = 10, s.count = 11;
    CHECK_INT(upi_peer_place(&m, &s, &at), -1);
    s.count = INT64_MAX, s.recv_stride = SIZE_MAX / 2;
    CHECK_INT(upi_peer_place(&m, &s, &at), -1);
    s.recv = a + 1000, s.recv_bytes = 1, s.count = 1;
    CHECK(upi_peer_place(&m, &s, &at) != 0);
}

int main(int argc, char **argv)
{
    static const int teams[] = {1, 2, 3, 8};
    crew *all = &the_crew;
    test_begin(argc, argv);
    TEST(test_place());
    for (int seed = 0; seed < 6; ++seed) {
        fake_seed((uint64_t)seed);
        fake_eager(seed == 5);
        all->processes = seed & 1;
        all->shared = seed % 3 == 2;
        all->ahead = seed == 2 || seed == 3;
        all->seed = (uint64_t)test_env("UPIPE_SEED", 1) + (uint64_t)seed;
        TEST(test_desc());
        for (int i = 0; i < 4; ++i) {
            TEST_OF("all", crew_good(all, teams[i], all_body));
            TEST_OF("shift", crew_good(all, teams[i], shift_body));
            TEST_OF("meet", crew_good(all, teams[i], meet_body));
            TEST_OF("random", crew_good(all, teams[i], random_body));
            TEST_OF("repeat", crew_good(all, teams[i], repeat_body));
        }
        if (all->ahead) TEST_OF("ahead", crew_good(all, 3, ahead_body));
        TEST_OF("refused", crew_good(all, 3, refused_body));
        if (!all->ahead) TEST_OF("beside", crew_good(all, 3, beside_body));
        TEST_OF("stalled", crew_fails(all, all->ahead ? stalled_before_body : stalled_body, 1, 1));
        TEST_OF("absent", crew_fails(all, absent_body, 1, ABSENCES));
        TEST_OF("abort", crew_fails(all, abort_body, 2, ABORTS));
        TEST_OF("mismatch", crew_fails(all, mismatch_body, 2, MISMATCHES));
        TEST(test_injected(all, FAKE_ONCE, 40));
        TEST(test_injected(all, FAKE_STICKY, 40));
    }
    TEST(test_refusals(all));
    return test_end("peer");
}

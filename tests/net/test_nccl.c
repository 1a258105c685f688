/* test_nccl.c -- the transport over NCCL: ranks that are threads, each with a device and a stream of its own
 *
 * Runs on tests/fake, whose streams are lazy and whose communicators fail when told to. Exact data: every
 * element names where it comes from and where it must land. Faults: a rank stays away, gives up or disagrees,
 * and each call to NCCL and CUDA fails in turn, once or for good. Every rank must get a status in time, and
 * nothing may be left behind.
 */
#define _POSIX_C_SOURCE 200809L
#include "upipe/net/upipe_net_nccl.h"

#include <pthread.h>

#include "fake.h"
#include "test.h"

enum { RANKS_MAX = 8, WORDS = 8 };

struct crew;

/* One rank. The host's part (device, stream, communicator) is made and ended without faults. */
typedef struct rank_room {
    struct crew *crew;
    int rank, ranks;
    pthread_t thread;
    ncclComm_t nccl; /* the host's */
    cudaStream_t stream;
    upipe_nccl team;
    upipe_ops ops;
    upipe_ctx ctx;
    uint32_t *send, *recv; /* device, ROOM words each */
    upipe_seg list[2 * RANKS_MAX];
    upipe_status status, freed;
} rank_room;

typedef struct crew {
    rank_room rank[RANKS_MAX];
    ncclUniqueId id;
    pthread_barrier_t door;
    upipe_status (*body)(rank_room *k);
    double deadline;
    uint64_t seed;
    int ranks, blocking, grouped;
    int victim, what;
    int all_ready; /* init succeeded everywhere: atomic count */
} crew;

static crew the_crew;

enum { ROOM = 96 * 1024 };

#define OK(call) CHECK_SAY((call) == cudaSuccess, "%s", #call)

static upipe_status test_copy(upipe_ctx *c, void *dst, const void *src, size_t bytes)
{
    return upi_nccl_check_cuda(&c->err,
                               cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, (cudaStream_t)c->stream),
                               "cudaMemcpyAsync(");
}

static upipe_status test_sync(upipe_ctx *c)
{
    return upi_nccl_check_cuda(&c->err, cudaStreamSynchronize((cudaStream_t)c->stream),
                               "cudaStreamSynchronize(");
}

/* Between the host's memory and the device, on the stream. */
static void put(rank_room *k, void *device, const void *host, size_t bytes)
{
    OK(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, k->stream));
}

static void get(rank_room *k, void *host, const void *device, size_t bytes)
{
    OK(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, k->stream));
    OK(cudaStreamSynchronize(k->stream));
}

static double now(void)
{
    return (double)upi_net_now() * 1e-9;
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
    rank_room *k = (rank_room *)p;
    crew *all = k->crew;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclResult_t r;
    config.blocking = all->blocking;
    fake_rank(k->rank);
    OK(cudaSetDevice(k->rank));
    OK(cudaStreamCreateWithFlags(&k->stream, cudaStreamNonBlocking));
    OK(cudaMalloc((void **)&k->send, ROOM * 4));
    OK(cudaMalloc((void **)&k->recv, ROOM * 4));
    r = ncclCommInitRankConfig(&k->nccl, all->ranks, all->id, k->rank, &config);
    CHECK(r == ncclSuccess || (!all->blocking && r == ncclInProgress));
    k->ops.copy = test_copy;
    k->ops.sync = test_sync;
    k->ctx.ops = &k->ops;
    k->ctx.stream = k->stream;
    k->ctx.team = &k->team.comm;

    pthread_barrier_wait(&all->door); /* faults are set */
    pthread_barrier_wait(&all->door);
    k->status = upipe_nccl_init(&k->team, k->nccl, all->deadline, &k->ctx.err);
    if (k->status == UPIPE_OK) {
        k->team.grouped = all->grouped;
        k->status = all->body(k);
        k->nccl = k->team.nccl;
        k->freed = upipe_nccl_free(&k->team, &k->ctx.err);
        CHECK(k->team.nccl == k->nccl);
    } else { /* the host's to end */
        CHECK(k->team.room == NULL && k->team.row == NULL && k->team.rows == NULL);
        (void)ncclCommAbort(k->nccl);
        k->nccl = NULL;
    }
    pthread_barrier_wait(&all->door);
    pthread_barrier_wait(&all->door); /* faults are off */

    if (k->nccl != NULL) CHECK(ncclCommAbort(k->nccl) == ncclSuccess);
    (void)cudaFree(k->send);
    (void)cudaFree(k->recv);
    (void)cudaStreamDestroy(k->stream);
    return NULL;
}

/* Runs body on every rank. fail_at: that call of rank fail_rank fails, 0: none. Returns the calls it made. */
static long crew_run(crew *all, int ranks, double deadline, upipe_status (*body)(rank_room *), long fail_at,
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
    CHECK(ncclGetUniqueId(&all->id) == ncclSuccess);
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
    fake_fail_at(0, -1, FAKE_ONCE);
    pthread_barrier_wait(&all->door);
    for (r = 0; r < ranks; ++r) pthread_join(all->rank[r].thread, NULL);
    pthread_barrier_destroy(&all->door);
    CHECK(fake_check_clean());
    return calls;
}

static void crew_good(crew *all, int ranks, upipe_status (*body)(rank_room *))
{
    int r;
    crew_run(all, ranks, 20, body, 0, -1, FAKE_ONCE);
    for (r = 0; r < ranks; ++r) {
        CHECK_STATUS(all->rank[r].status, UPIPE_OK, all->rank[r].ctx.err);
        CHECK_STATUS(all->rank[r].freed, UPIPE_OK, all->rank[r].ctx.err);
    }
}

/* ---- exact data ---- */

static uint32_t word_of(int source, int dest, int index)
{
    return (uint32_t)source << 24 | (uint32_t)dest << 16 | (uint32_t)index;
}

/* An all-to-all of `count` blocks of WORDS words a pair, without gaps. */
static upipe_status all_to_all(rank_room *k, int count)
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
        upipe_seg *s = &k->list[p];
        s->peer = p;
        s->count = count;
        s->send = k->send + p * n;
        s->recv = k->recv + p * n;
        s->send_bytes = s->recv_bytes = s->send_step = s->recv_step = WORDS * 4;
    }
    UPIPE_TRY(upipe_comm_start(c, c->team, k->list, k->ranks));
    UPIPE_TRY(upipe_comm_wait(c, c->team));
    get(k, host, k->recv, (size_t)(k->ranks * n) * 4);
    for (p = 0; p < k->ranks; ++p)
        for (i = 0; i < n; ++i) wrong += host[p * n + i] != word_of(p, k->rank, i);
    CHECK_INT(wrong, 0);
    return UPIPE_OK;
}

static upipe_status all_body(rank_room *k)
{
    int64_t sent;
    UPIPE_TRY(all_to_all(k, 1));
    UPIPE_TRY(all_to_all(k, 4));
    UPIPE_TRY(all_to_all(k, 1));
    sent = (int64_t)(k->ranks - 1) * 6 * WORDS * 4;
    CHECK_INT(k->ctx.team->sent_bytes, sent);
    CHECK_INT(k->ctx.team->moved_bytes, sent);
    return UPIPE_OK;
}

static upipe_status shift_body(rank_room *k)
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

static upipe_status meet_body(rank_room *k)
{
    upipe_ctx *c = &k->ctx;
    int64_t mine[UPIPE_GATHER_MAX], *all = c->team->gathered, entered, left;
    int round, r, i, n;
    for (round = 0; round < 9; ++round) {
        n = round == 3 ? 0 : round == 5 ? UPIPE_GATHER_MAX : 1 + round % 4;
        for (i = 0; i < n; ++i) mine[i] = (int64_t)word_of(k->rank, round, i) * -3;
        UPIPE_TRY(c->team->ops.gather(c, c->team, all, mine, n));
        for (r = 0; r < k->ranks; ++r)
            for (i = 0; i < n; ++i) CHECK_INT(all[r * n + i], (int64_t)word_of(r, round, i) * -3);
        if (round % 3 == 0) UPIPE_TRY(all_to_all(k, 1));
        if (round % k->ranks == k->rank) nap(0.002);
        entered = upi_net_now();
        UPIPE_TRY(upipe_comm_barrier(c, c->team));
        left = upi_net_now();
        UPIPE_TRY(upipe_comm_gather(c, c->team, all, &entered, 1));
        for (r = 0; r < k->ranks; ++r) CHECK(all[r] <= left);
    }
    CHECK_STATUS(c->team->ops.gather(c, c->team, all, mine, UPIPE_GATHER_MAX + 1), UPIPE_ERR_ARG, c->err);
    return UPIPE_OK;
}

/* Random exchanges: 0 to 3 segments from every rank to every rank, blocks with gaps, in any order. */
enum { PARTS_MAX = 3, PART_ROOM = 4 * 200 };

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

static upipe_status random_body(rank_room *k)
{
    upipe_ctx *c = &k->ctx;
    uint64_t seed = k->crew->seed;
    int ranks = k->ranks, most = ranks * PARTS_MAX, round, p, i, b, w;
    size_t words = (size_t)most * PART_ROOM;
    uint32_t *host = (uint32_t *)malloc(words * sizeof *host);
    upipe_seg *list = (upipe_seg *)malloc(2 * (size_t)most * sizeof *list);
    int64_t sent = 0, moved = 0;
    upipe_status s = UPIPE_OK;
    test_rng rng;
    CHECK(words <= ROOM);
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
                    upipe_seg *seg = &list[n++];
                    memset(seg, 0, sizeof *seg);
                    seg->peer = peer;
                    seg->count = q.count;
                    if (sending) {
                        seg->send = k->send + send_at;
                        seg->send_bytes = (size_t)q.words * 4;
                        seg->send_step = (size_t)q.send_step * 4;
                        for (b = 0; b < q.count; ++b)
                            for (w = 0; w < q.words; ++w)
                                host[send_at + (size_t)(b * q.send_step + w)] =
                                    part_word(round, from, to, i, b * q.words + w);
                        send_at += PART_ROOM;
                        if (peer != k->rank) sent += q.count * q.words * 4;
                    } else {
                        seg->recv = k->recv + recv_at;
                        seg->recv_bytes = (size_t)q.words * 4;
                        seg->recv_step = (size_t)q.recv_step * 4;
                        recv_at += PART_ROOM;
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
            cudaStream_t other;
            OK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
            OK(cudaMemsetAsync(k->send, 0xdd, words * 4, other));
            OK(cudaMemcpyAsync(host, k->recv, words * 4, cudaMemcpyDeviceToHost, other));
            OK(cudaStreamSynchronize(other));
            OK(cudaStreamDestroy(other));
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
                          "seed %llu, %d ranks, exchange %d, part %d of %d to %d: %d words differ",
                          (unsigned long long)seed, ranks, round, i, peer, k->rank, wrong);
                recv_at += PART_ROOM;
            }
        }
    }
    CHECK_INT(c->team->sent_bytes, sent);
    CHECK_INT(c->team->moved_bytes, moved);
    free(host);
    free(list);
    return s;
}

/* ---- faults ---- */

/* After a failure every call must fail at once, with the first reason. */
static void check_dead(rank_room *k)
{
    upipe_ctx *c = &k->ctx;
    upipe_field field = {"never compared", 99, 0};
    int64_t one = 1, all[RANKS_MAX];
    char reason[256];
    CHECK(k->team.nccl == NULL);
    c->team->deadline = 60;
    CHECK_STATUS(upipe_comm_barrier(c, c->team), UPIPE_ERR_ABORTED, c->err);
    snprintf(reason, sizeof reason, "%s", c->err.text);
    CHECK_STATUS(upipe_comm_start(c, c->team, k->list, 0), UPIPE_ERR_ABORTED, c->err);
    CHECK(strcmp(c->err.text, reason) == 0);
    CHECK_STATUS(upipe_comm_gather(c, c->team, all, &one, 1), UPIPE_ERR_ABORTED, c->err);
    CHECK_STATUS(upipe_comm_agree(c, c->team, &field, 1), UPIPE_ERR_ABORTED, c->err);
    CHECK(strcmp(c->err.text, reason) == 0);
    CHECK(!c->team->started);
}

enum { AT_EXCHANGE, AT_BARRIER, AT_GATHER, AT_COUNT };

static upipe_status call(rank_room *k, int what)
{
    int64_t mine = k->rank, all[RANKS_MAX];
    upipe_ctx *c = &k->ctx;
    return what == AT_BARRIER  ? upipe_comm_barrier(c, c->team)
           : what == AT_GATHER ? upipe_comm_gather(c, c->team, all, &mine, 1)
                               : all_to_all(k, 1);
}

static upipe_status absent_body(rank_room *k)
{
    upipe_ctx *c = &k->ctx;
    upipe_status s;
    UPIPE_TRY(all_to_all(k, 1));
    UPIPE_TRY(upipe_comm_barrier(c, c->team));
    c->team->deadline = 0.2;
    if (k->rank == k->crew->victim) {
        nap(0.5);
        c->team->deadline = 10;
        s = call(k, k->crew->what); /* all others have gone */
        CHECK_STATUS(s, UPIPE_ERR_ABORTED, c->err);
        CHECK_TEXT(c->err.text, "given up");
    } else {
        s = call(k, k->crew->what);
        /* one is first, and the others may learn of it before their own deadline */
        CHECK(s == UPIPE_ERR_TIMEOUT || s == UPIPE_ERR_ABORTED);
        if (s == UPIPE_ERR_TIMEOUT) CHECK_TEXT(c->err.text, "waited 0.2 s in ");
        CHECK_INT(c->team->quarantine, k->crew->what == AT_EXCHANGE);
    }
    check_dead(k);
    return s;
}

enum { UP_FRONT, BETWEEN, GIVE_UPS };

static upipe_status give_up_body(rank_room *k)
{
    upipe_ctx *c = &k->ctx;
    upipe_status s;
    UPIPE_TRY(all_to_all(k, 1));
    if (k->rank == k->crew->victim) {
        if (k->crew->what == BETWEEN)
            CHECK_STATUS(upipe_comm_start(c, c->team, k->list, k->ranks), UPIPE_OK, c->err);
        upipe_comm_abort(c->team, "the host has had enough");
        upipe_comm_abort(c->team, "and says it again");
        s = k->crew->what == BETWEEN ? upipe_comm_wait(c, c->team) : upipe_comm_barrier(c, c->team);
        CHECK_STATUS(s, UPIPE_ERR_ABORTED, c->err);
        CHECK_TEXT(c->err.text, "had enough");
        CHECK_INT(c->team->quarantine, k->crew->what == BETWEEN);
    } else {
        s = all_to_all(k, 1);
        if (s == UPIPE_OK && k->crew->what == BETWEEN) s = all_to_all(k, 1); /* its part was under way */
        CHECK_STATUS(s, UPIPE_ERR_ABORTED, c->err);
        CHECK_TEXT(c->err.text, "given up");
    }
    check_dead(k);
    return s;
}

enum { KIND, COUNT, DRIFT, FIELD, ITSELF, MISMATCHES };

static upipe_status mismatch_body(rank_room *k)
{
    static const char *const words[] = {"in a", "gathers 2", "is in its", "heads is", "does not receive"};
    upipe_ctx *c = &k->ctx;
    int64_t mine[2] = {1, 2}, all[2 * RANKS_MAX];
    int odd = k->rank == k->crew->victim, what = k->crew->what;
    upipe_field field = {"heads", 32, 0};
    upipe_seg own;
    upipe_status s;
    UPIPE_TRY(all_to_all(k, 1));
    memset(&own, 0, sizeof own);
    own.peer = k->rank;
    own.count = 1;
    own.send = k->send;
    own.recv = k->recv;
    own.send_bytes = 4;
    own.recv_bytes = 8;
    field.value += odd;
    if (what == DRIFT && odd) { /* one exchange with nobody too many */
        UPIPE_TRY(upipe_comm_start(c, c->team, k->list, 0));
        UPIPE_TRY(upipe_comm_wait(c, c->team));
    }
    if (what == ITSELF) {
        if (odd) {
            s = upipe_comm_start(c, c->team, &own, 1);
        } else { /* hears of it */
            s = upipe_comm_barrier(c, c->team);
            CHECK_STATUS(s, UPIPE_ERR_ABORTED, c->err);
            check_dead(k);
            return s;
        }
    } else if (what == KIND && odd) {
        s = upipe_comm_barrier(c, c->team);
    } else if (what == FIELD) {
        s = upipe_comm_agree(c, c->team, &field, 1);
    } else {
        s = upipe_comm_gather(c, c->team, all, mine, what == COUNT && odd ? 2 : 1);
    }
    CHECK_STATUS(s, UPIPE_ERR_MISMATCH, c->err);
    CHECK_TEXT(c->err.text, words[what]);
    check_dead(k);
    return s;
}

/* A bit of everything, for a fault at any call of it. */
static upipe_status every_body(rank_room *k)
{
    upipe_ctx *c = &k->ctx;
    upipe_field field = {"heads", 32, 0};
    upipe_status s;
    memset(k->list, 0, sizeof k->list);
    s = upipe_comm_agree(c, c->team, &field, 1);
    if (s == UPIPE_OK) s = upipe_comm_shift_start(c, c->team, k->recv, k->send, 64, 1);
    if (s == UPIPE_OK) s = upipe_comm_wait(c, c->team);
    if (s == UPIPE_OK) s = upipe_comm_shift_start(c, c->team, k->recv, k->send, 64, 0);
    if (s == UPIPE_OK) s = upipe_comm_wait(c, c->team);
    if (s == UPIPE_OK) {
        int p;
        for (p = 0; p < k->ranks; ++p) {
            k->list[p].peer = p;
            k->list[p].count = 1;
            k->list[p].send = k->send + p;
            k->list[p].recv = k->recv + p;
            k->list[p].send_bytes = k->list[p].recv_bytes = 4;
        }
        s = upipe_comm_start(c, c->team, k->list, k->ranks);
    }
    if (s == UPIPE_OK) s = upipe_comm_wait(c, c->team);
    if (s == UPIPE_OK) s = upipe_comm_barrier(c, c->team);
    if (s != UPIPE_OK) {
        CHECK_INT(c->err.status, s);
        CHECK(c->err.text[0] != 0);
        check_dead(k);
    }
    return s;
}

/* Calls of one rank fail in turn, some sixty of them, other ones with other seeds; sticky: and all later ones of
 * every rank. */
static void test_injected(crew *all, int sticky)
{
    enum { RANKS = 3, VICTIM = 1 };
    long k, apart, calls = crew_run(all, RANKS, 20, every_body, 0, VICTIM, FAKE_ONCE);
    int r, failures;
    CHECK(calls > 20);
    apart = calls / 60 + 1; /* most are polls, more of them on a slow machine */
    for (k = 1 + (long)all->seed % apart; k <= calls; k += apart) {
        const rank_room *victim = &all->rank[VICTIM];
        crew_run(all, RANKS, 1, every_body, k, VICTIM, sticky);
        /* Polls vary in number: the last calls may not be reached. */
        if (fake_failed() == NULL) continue;
        failures = 0;
        for (r = 0; r < RANKS; ++r) {
            const rank_room *at = &all->rank[r];
            CHECK_SAY(at->status == UPIPE_OK || at->status == UPIPE_ERR_BACKEND ||
                          at->status == UPIPE_ERR_ABORTED || at->status == UPIPE_ERR_MEMORY ||
                          at->status == UPIPE_ERR_TIMEOUT,
                      "call %ld fails: rank %d: %s", k, r, at->ctx.err.text);
            failures += at->status != UPIPE_OK || at->freed != UPIPE_OK;
        }
        CHECK_SAY(victim->status != UPIPE_OK || victim->freed != UPIPE_OK, "call %ld (%s) fails, unnoticed",
                  k, fake_failed());
        if (!sticky)
            CHECK(victim->status == UPIPE_OK || victim->status == UPIPE_ERR_BACKEND ||
                  victim->status == UPIPE_ERR_MEMORY);
        CHECK(failures >= 1);
    }
}

static void test_init(void)
{
    upipe_nccl team;
    upipe_err e;
    ncclComm_t nccl;
    int other = 1;
    CHECK_STATUS(upipe_nccl_init(&team, NULL, 0, &e), UPIPE_ERR_ARG, e);
    CHECK_STATUS(upipe_nccl_free(&team, &e), UPIPE_OK, e);
    CHECK(ncclCommInitAll(&nccl, 1, &other) == ncclSuccess);
    OK(cudaSetDevice(0));
    CHECK_STATUS(upipe_nccl_init(&team, nccl, -1, &e), UPIPE_ERR_ARG, e);
    CHECK_STATUS(upipe_nccl_init(&team, nccl, 0, &e), UPIPE_ERR_ARG, e);
    CHECK_TEXT(e.text, "device 1, and device 0 is current");
    OK(cudaSetDevice(1));
    CHECK_STATUS(upipe_nccl_init(&team, nccl, 0, &e), UPIPE_OK, e);
    CHECK(team.comm.deadline == UPIPE_DEADLINE_DEFAULT);
    CHECK_STATUS(upipe_nccl_free(&team, &e), UPIPE_OK, e);
    CHECK_STATUS(upipe_nccl_free(&team, &e), UPIPE_OK, e);
    CHECK(ncclCommDestroy(nccl) == ncclSuccess);
    OK(cudaSetDevice(0));
    CHECK(fake_check_clean());
}

/* Which lists are one ncclAlltoAll: a mistake there would go unseen where a group does the same. */
static void test_all_to_all_list(void)
{
    static char from[1000], to[1000];
    upipe_nccl team;
    upipe_seg list[3];
    size_t bytes;
    int p, what;
    memset(&team, 0, sizeof team);
    team.comm.ranks = 3;
    for (what = 0; what < 12; ++what) {
        upipe_seg *s = &list[1];
        memset(list, 0, sizeof list);
        for (p = 0; p < 3; ++p) {
            list[p].peer = p;
            list[p].count = what == 1 ? 1 : 4;
            list[p].send = from + p * list[p].count * 8;
            list[p].recv = to + p * list[p].count * 8;
            list[p].send_bytes = list[p].recv_bytes = 8;
            list[p].send_step = list[p].recv_step = what == 1 ? 0 : 8; /* of one block: no matter */
        }
        bytes = 0;
        if (what == 2) s->send_step = 9;
        if (what == 3) s->recv_step = 9;
        if (what == 4) s->send = from + 33;
        if (what == 5) s->recv = to + 33;
        if (what == 6) s->count = 3;
        if (what == 7) s->send_bytes = 7;
        if (what == 8) s->recv_bytes = 7;
        if (what == 9) s->peer = 2;
        if (what == 10) list[0].send_bytes = 0;
        team.grouped = what == 11;
        CHECK_SAY(upi_nccl_is_all_to_all(&team, list, 3, &bytes) == (what < 2), "list %d", what);
        if (what < 2) CHECK_INT(bytes, what == 1 ? 8 : 32);
        CHECK(!upi_nccl_is_all_to_all(&team, list, 2, &bytes));
    }
}

/* A communicator whose other rank never comes. */
static void test_alone(void)
{
    upipe_nccl team;
    upipe_err e;
    ncclUniqueId id;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t nccl;
    config.blocking = 0;
    OK(cudaSetDevice(0));
    CHECK(ncclGetUniqueId(&id) == ncclSuccess);
    CHECK(ncclCommInitRankConfig(&nccl, 2, id, 0, &config) == ncclInProgress);
    CHECK_STATUS(upipe_nccl_init(&team, nccl, 0.1, &e), UPIPE_ERR_TIMEOUT, e);
    CHECK_TEXT(e.text, "0.1 s");
    CHECK(ncclCommAbort(nccl) == ncclSuccess);
    CHECK(fake_check_clean());
}

int main(void)
{
    static const int teams[] = {1, 2, 3, 8};
    crew *all = &the_crew;
    int seed, i;
    test_all_to_all_list();
    for (seed = 0; seed < 4; ++seed) {
        fake_seed((uint64_t)seed);
        fake_eager(seed == 3);
        all->blocking = seed & 1;
        all->grouped = seed == 2;
        all->seed = (uint64_t)test_env("UPIPE_SEED", 1) + (uint64_t)seed;
        test_init();
        test_alone();
        for (i = 0; i < 4; ++i) {
            crew_good(all, teams[i], all_body);
            crew_good(all, teams[i], shift_body);
            crew_good(all, teams[i], meet_body);
            crew_good(all, teams[i], random_body);
        }
        for (i = 0; i < AT_COUNT; ++i) {
            all->victim = i % 3;
            all->what = i;
            crew_run(all, 3, 20, absent_body, 0, -1, FAKE_ONCE);
        }
        for (i = 0; i < 3 * GIVE_UPS; ++i) {
            all->victim = i % 3;
            all->what = i % GIVE_UPS;
            crew_run(all, 3, 20, give_up_body, 0, -1, FAKE_ONCE);
        }
        for (i = 0; i < 3 * MISMATCHES; ++i) {
            all->victim = i % 3;
            all->what = i / 3;
            crew_run(all, 3, 20, mismatch_body, 0, -1, FAKE_ONCE);
        }
        test_injected(all, FAKE_ONCE);
        test_injected(all, FAKE_STICKY);
    }
    return test_end("nccl");
}

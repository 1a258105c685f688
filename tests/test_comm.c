/* test_comm.c -- the transports that need no library: one rank alone, the dry team, ranks that are threads
 *
 * Exact data: every element names its origin and its destination, so that a misrouted one shows.
 * Faults: each rank in turn stays away, fails or disagrees. Asked are the exact status of every rank, the
 * words of the reason, that nobody waits much longer than the deadline, and that nothing is left behind.
 */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <stdlib.h>

/* ---- the transport's own calls, counted: `alive` must come back to 0; call number `fail_at` fails ---- */

static int alive, calls, fail_at;

static int fails_now(void)
{
    return ++calls == fail_at;
}

static void *test_calloc(size_t n, size_t bytes)
{
    if (fails_now()) return NULL;
    ++alive;
    return calloc(n, bytes);
}

static void test_free(void *p)
{
    --alive;
    free(p);
}

#define COUNTED(init, destroy, type, attributes)           \
    static int test_##init(type *x, const attributes *how) \
    {                                                      \
        if (fails_now()) return 11;                        \
        ++alive;                                           \
        return pthread_##init(x, how);                     \
    }                                                      \
    static int test_##destroy(type *x)                     \
    {                                                      \
        --alive;                                           \
        return pthread_##destroy(x);                       \
    }
COUNTED(mutex_init, mutex_destroy, pthread_mutex_t, pthread_mutexattr_t)
COUNTED(cond_init, cond_destroy, pthread_cond_t, pthread_condattr_t)

static int test_create(pthread_t *t, const pthread_attr_t *how, void *(*body)(void *), void *p)
{
    if (fails_now()) return 11;
    ++alive;
    return pthread_create(t, how, body, p);
}

static int test_join(pthread_t t, void **out)
{
    --alive;
    return pthread_join(t, out);
}

#define calloc                test_calloc
#define free                  test_free
#define pthread_mutex_init    test_mutex_init
#define pthread_mutex_destroy test_mutex_destroy
#define pthread_cond_init     test_cond_init
#define pthread_cond_destroy  test_cond_destroy
#define pthread_create        test_create
#define pthread_join          test_join
#include "../upipe/net/upipe_net_threads.h"
#undef calloc
#undef free
#undef pthread_mutex_init
#undef pthread_mutex_destroy
#undef pthread_cond_init
#undef pthread_cond_destroy
#undef pthread_create
#undef pthread_join

#include "../upipe/net/upipe_net_threads_grid.h"
#include "lib/lost.h"
#include "lib/memory.h"
#include "lib/transfers.h"

/* ---- a crew: a team with one context a rank, and buffers that outlive every call ---- */

enum { RANKS_MAX = 64, WORDS = 8 };

typedef struct crew {
    int left; /* ranks that have left line_up's transfer */
    upipe_threads team;
    upipe_ops ops;
    upipe_ctx ctx[RANKS_MAX];
    upipe_status status[RANKS_MAX];
    uint32_t send[RANKS_MAX][RANKS_MAX][WORDS], recv[RANKS_MAX][RANKS_MAX][WORDS];
    upipe_msg list[RANKS_MAX][RANKS_MAX];
    int gathers[RANKS_MAX]; /* each rank counts its own */
    int ranks;
    int victim, what;           /* of a fault */
    int inside, copies, let_go; /* atomic, of the copy entries below */
    uint64_t seed;
    int64_t began; /* ns */
} crew;

static crew the_crew; /* one test at a time uses it */

static crew *crew_begin(int ranks, double deadline)
{
    crew *k = &the_crew;
    upipe_err e;
    *k = (crew){.ranks = ranks, .ops.copy = plain_copy, .ops.sync = plain_sync};
    CHECK_INT(alive, 0);
    CHECK_STATUS(upipe_threads_init(&k->team, ranks, deadline, &e), UPIPE_OK, e);
    for (int r = 0; r < ranks; ++r) {
        k->ctx[r].ops = &k->ops;
        k->ctx[r].user = k;
        k->ctx[r].team = upipe_threads_comm(&k->team, r);
    }
    k->began = upipe_net_now();
    return k;
}

/* Ends a test: nothing may be left, and no deadline overrun by much. They are below a second, or else long
 * and not to be met. (Valgrind on a busy machine needs half a minute.) */
static void crew_end(crew *k)
{
    CHECK(upipe_net_now() - k->began < (int64_t)50 * 1000000000);
    upipe_threads_free(&k->team);
    CHECK_INT(alive, 0);
}

/* Runs a body on every rank, with a fault of one of them, and ends the test. */
static void crew_test(int ranks, double deadline, upipe_status (*body)(void *user, int rank), int victim,
                      int what)
{
    crew *k = crew_begin(ranks, deadline);
    k->victim = victim;
    k->what = what;
    CHECK_INT(upipe_threads_run(&k->team, body, k, NULL, NULL), UPIPE_OK);
    crew_end(k);
}

static void until_broken(crew *k)
{
    while (!upi_threads_is_broken(&k->team)) test_nap(0.001);
}

/* Lists an all-to-all of WORDS words a pair, the rank itself included; returns the number of messages. */
static int all_list(crew *k, int rank)
{
    all_fill(k->send[rank][0], rank, k->ranks, WORDS);
    memset(k->recv[rank], 0xee, sizeof k->recv[rank]);
    return all_messages(k->list[rank], k->ranks, k->send[rank][0], k->recv[rank][0], 1, WORDS);
}

static void all_come(crew *k, int rank)
{
    all_check(k->recv[rank][0], rank, k->ranks, WORDS);
}

static upipe_status all_to_all(crew *k, int rank)
{
    upipe_ctx *c = &k->ctx[rank];
    UPIPE_TRY(upipe_comm_start(c, c->team, k->list[rank], all_list(k, rank)));
    UPIPE_TRY(upipe_comm_wait(c, c->team));
    all_come(k, rank);
    return UPIPE_OK;
}

/* All meet with patience, so that a short deadline that follows times the fault, not the start of threads. */
static void line_up(crew *k, int rank, double deadline)
{
    upipe_ctx *c = &k->ctx[rank];
    int left;
    c->team->deadline = 20;
    CHECK_STATUS(upipe_comm_barrier(c, c->team), UPIPE_OK, c->err);
    CHECK_STATUS(all_to_all(k, rank), UPIPE_OK, c->err);
    c->team->deadline = deadline;
    /* A rank that is still inside that transfer would hear of the fault there: all leave it first, by other
     * means than the team's. */
    left = __atomic_add_fetch(&k->left, 1, __ATOMIC_ACQ_REL);
    left = (left + k->ranks - 1) / k->ranks * k->ranks;
    while (__atomic_load_n(&k->left, __ATOMIC_ACQUIRE) < left) sched_yield();
}

/* After a failure every call must fail at once, with the first reason. */
static void check_dead(crew *k, int rank)
{
    check_dead_calls(&k->ctx[rank], k->team.failure.text);
}

static int count_status(const crew *k, upipe_status s)
{
    int n = 0;
    for (int r = 0; r < k->ranks; ++r) n += k->status[r] == s;
    return n;
}

/* ---- one rank alone, dry ---- */

static void test_self(void)
{
    upipe_comm comm;
    upipe_comm_self_state buf;
    upipe_msg s[2] = {0};
    upi_fields fields = fields_of("tokens", 3);
    static upi_fields guarded[2];
    uint32_t from[12], to[12];
    int64_t mine[2] = {5, -7}, all[2] = {0, 0};
    upipe_ctx c = {0};
    upipe_comm_self(&comm, &buf, plain_copy);
    for (int i = 0; i < 12; ++i) from[i] = word_of(0, 0, i);
    memset(to, 0xee, sizeof to);
    s[0].send = from; /* 3 blocks of 2 words, from every 4th word to every 3rd, as two messages */
    s[0].send_bytes = 8;
    s[0].send_stride = 16;
    s[0].count = s[1].count = 3;
    s[1].recv = to;
    s[1].recv_bytes = 8;
    s[1].recv_stride = 12;
    CHECK_STATUS(upipe_comm_start(&c, &comm, s, 2), UPIPE_OK, c.err);
    CHECK_STATUS(upipe_comm_start(&c, &comm, s, 2), UPIPE_ERR_ARG, c.err);
    CHECK_STATUS(upipe_comm_wait(&c, &comm), UPIPE_OK, c.err);
    for (int i = 0; i < 9; ++i) CHECK_INT(to[i], i % 3 == 2 ? 0xeeeeeeee : word_of(0, 0, i / 3 * 4 + i % 3));
    CHECK_INT(comm.sent_bytes, 0);
    CHECK_STATUS(upipe_comm_wait(&c, &comm), UPIPE_ERR_ARG, c.err);

    for (int i = 0; i < 3; ++i) { /* fewer bytes, fewer blocks, sent and never received */
        upipe_comm_self(&comm, &buf, plain_copy);
        s[1].recv_bytes = i == 0 ? 4 : 8;
        s[1].count = i == 1 ? 2 : 3;
        CHECK_STATUS(upipe_comm_start(&c, &comm, s, i == 2 ? 1 : 2), UPIPE_OK, c.err);
        CHECK_STATUS(upipe_comm_wait(&c, &comm), UPIPE_ERR_MISMATCH, c.err);
        CHECK_STATUS(upipe_comm_start(&c, &comm, s, 2), UPIPE_ERR_ABORTED, c.err); /* for good */
        CHECK_TEXT(c.err.text, "does not receive");
    }
    upipe_comm_self(&comm, &buf, plain_copy);
    upipe_comm_abort(&comm, "enough");
    upipe_comm_abort(&comm, "more");
    CHECK_REFUSED(upipe_comm_barrier(&c, &comm), UPIPE_ERR_ABORTED, c.err, "enough");
    CHECK_STATUS(upipe_comm_all_gather(&c, &comm, all, mine, 2), UPIPE_ERR_ABORTED, c.err);

    upipe_comm_self(&comm, &buf, plain_copy);
    s[0].peer = 1;
    CHECK_STATUS(upipe_comm_start(&c, &comm, s, 1), UPIPE_ERR_ARG, c.err);
    s[0].peer = 0;
    s[0].count = 0;
    CHECK_STATUS(upipe_comm_start(&c, &comm, s, 1), UPIPE_ERR_ARG, c.err);

    upipe_comm_self(&comm, &buf, plain_copy);
    CHECK_STATUS(upipe_comm_barrier(&c, &comm), UPIPE_OK, c.err);
    CHECK_STATUS(upipe_comm_all_gather(&c, &comm, all, mine, 2), UPIPE_OK, c.err);
    CHECK(all[0] == 5 && all[1] == -7);
    CHECK_STATUS(upi_agree(&c, &comm, &fields), UPIPE_OK, c.err);
    fields.n = 0;
    CHECK_STATUS(upi_agree(&c, &comm, &fields), UPIPE_ERR_ARG, c.err);
    fields.n = UPIPE_ALL_GATHER_MAX + 1;
    CHECK_STATUS(upi_agree(&c, &comm, &fields), UPIPE_ERR_ARG, c.err);
    /* fields beyond the last are not written */
    memset(guarded, 0, sizeof guarded);
    for (int i = 0; i < UPIPE_ALL_GATHER_MAX + 3; ++i) upi_field_real(&guarded[0], "field", i);
    CHECK_INT(guarded[0].n, UPIPE_ALL_GATHER_MAX + 3);
    CHECK(upi_field_value(guarded[0].list[UPIPE_ALL_GATHER_MAX - 1].value) == UPIPE_ALL_GATHER_MAX - 1);
    CHECK(guarded[1].n == 0 && guarded[1].list[0].name == NULL);
    CHECK_REFUSED(upi_agree(&c, &comm, guarded), UPIPE_ERR_ARG, c.err, "43 fields; 1 to 40");
    CHECK_STATUS(shift_start(&c, &comm, to, from, sizeof to, -3), UPIPE_OK, c.err);
    CHECK_STATUS(upipe_comm_wait(&c, &comm), UPIPE_OK, c.err);
    CHECK_BYTES(to, from, sizeof to);
}

static upipe_status burning_copy(upipe_ctx *c, void *dst, const void *src, size_t bytes)
{
    (void)dst;
    (void)src;
    return upipe_fail(&c->err, UPIPE_ERR_BACKEND, "the engine burns after %zu bytes", bytes);
}

/* A copy that fails breaks a team of one too. */
static void test_self_copy(void)
{
    upipe_comm comm;
    upipe_comm_self_state state;
    char from[8] = {0}, to[8];
    upipe_ctx c = {0};
    upipe_comm_self(&comm, &state, burning_copy);
    CHECK_STATUS(shift_start(&c, &comm, to, from, sizeof to, 1), UPIPE_OK, c.err);
    CHECK_REFUSED(upipe_comm_wait(&c, &comm), UPIPE_ERR_BACKEND, c.err, "the engine burns after 8 bytes");
    CHECK_REFUSED(upipe_comm_barrier(&c, &comm), UPIPE_ERR_ABORTED, c.err, "the engine burns after 8 bytes");
}

/* A communicator that the host has not set: a sentence from every call. */
static void test_null(void)
{
    upipe_msg s = {0};
    const upi_fields fields = fields_of("tokens", 1);
    int64_t all[1] = {0}, mine = 1;
    upipe_ctx c = {0};
    for (int call = 0; call < 6; ++call) {
        upipe_status status;
        memset(&c.err, 0, sizeof c.err);
        status = call == 0   ? upipe_comm_start(&c, c.team, &s, 1)
                 : call == 1 ? upipe_comm_wait(&c, c.team)
                 : call == 2 ? upipe_comm_barrier(&c, c.team)
                 : call == 3 ? upipe_comm_all_gather(&c, c.team, all, &mine, 1)
                 : call == 4 ? upi_agree(&c, c.team, &fields)
                             : shift_start(&c, c.team, all, &mine, 8, 1);
        CHECK_STATUS(status, UPIPE_ERR_ARG, c.err);
        CHECK_REFUSED(c.err.status, UPIPE_ERR_ARG, c.err, "the communicator is NULL");
    }
    upipe_comm_abort(NULL, "nobody hears it");
    CHECK_INT(all[0], 0);
}

static void test_dry(void)
{
    upipe_comm comm;
    upipe_msg list[2 * 4], s[2] = {0};
    int64_t gathered[4 * UPIPE_ALL_GATHER_MAX], mine = 9, all[4];
    const upi_fields fields = fields_of("heads", 8);
    char byte = 1;
    upipe_ctx c = {0};
    upipe_comm_dry(&comm, 2, 4, list, gathered);
    s[0].send = s[1].send = &byte; /* far less than the bytes that it claims: nothing may be touched */
    s[0].recv = s[1].recv = &byte;
    s[0].send_bytes = s[1].send_bytes = s[0].recv_bytes = s[1].recv_bytes = 1 << 20;
    s[0].count = s[1].count = 3;
    s[0].peer = 1;
    s[1].peer = 2; /* itself: not counted */
    CHECK_STATUS(upipe_comm_start(&c, &comm, s, 2), UPIPE_OK, c.err);
    CHECK_STATUS(upipe_comm_wait(&c, &comm), UPIPE_OK, c.err);
    CHECK_INT(comm.sent_bytes, 3 << 20);
    CHECK_INT(comm.moved_bytes, 0);
    CHECK_STATUS(shift_start(&c, &comm, &byte, &byte, 1000, -1), UPIPE_OK, c.err);
    CHECK_STATUS(upipe_comm_wait(&c, &comm), UPIPE_OK, c.err);
    CHECK_INT(comm.sent_bytes, (3 << 20) + 1000);
    CHECK_INT(byte, 1);
    CHECK_STATUS(upipe_comm_barrier(&c, &comm), UPIPE_OK, c.err);
    CHECK_STATUS(upipe_comm_all_gather(&c, &comm, all, &mine, 1), UPIPE_OK, c.err);
    CHECK(all[0] == 9 && all[3] == 9);
    CHECK_STATUS(upi_agree(&c, &comm, &fields), UPIPE_OK, c.err);
}

/* ---- thread ranks that behave ---- */

static upipe_status shift_body(void *user, int rank)
{
    upipe_ctx *c = &((crew *)user)->ctx[rank];
    int64_t sent = 0;
    UPIPE_TRY(shift_all(c, NULL, NULL, NULL, NULL, &sent));
    CHECK_INT(c->team->sent_bytes, sent);
    CHECK_INT(c->team->moved_bytes, sent);
    return UPIPE_OK;
}

static void test_shift(void)
{
    static const int teams[] = {1, 2, 3, 5};
    for (int i = 0; i < 4; ++i) crew_test(teams[i], 20, shift_body, 0, 0);
}

static upipe_status meet_body(void *user, int rank)
{
    crew *k = (crew *)user;
    upipe_ctx *c = &k->ctx[rank];
    for (int round = 0; round < 12; ++round) {
        UPIPE_TRY(gather_some(c, round));
        if (round % 3 == 0) UPIPE_TRY(all_to_all(k, rank));
        __atomic_fetch_add(&k->copies, 1, __ATOMIC_RELAXED);
        UPIPE_TRY(upipe_comm_barrier(c, c->team));
        CHECK(__atomic_load_n(&k->copies, __ATOMIC_RELAXED) >= (round + 1) * k->ranks);
    }
    return UPIPE_OK;
}

static void test_meet(void)
{
    static const int teams[] = {1, 2, 5, 64};
    for (int i = 0; i < 4; ++i) {
        crew *k = crew_begin(teams[i], 0);
        CHECK(k->ctx[0].team->deadline == UPIPE_DEADLINE_DEFAULT);
        CHECK_INT(upipe_threads_run(&k->team, meet_body, k, NULL, NULL), UPIPE_OK);
        k->copies = 0; /* a team may run again */
        CHECK_INT(upipe_threads_run(&k->team, meet_body, k, NULL, NULL), UPIPE_OK);
        crew_end(k);
    }
}

/* ---- random transfers ---- */

static void idle(int yields)
{
    while (yields-- > 0) sched_yield();
}

static upipe_status random_body(void *user, int rank)
{
    crew *k = (crew *)user;
    upipe_ctx *c = &k->ctx[rank];
    lists t = {.seed = k->seed, .rank = rank, .ranks = k->ranks, .most = 3, .longest = 1000};
    const size_t bytes = words_in_lists(&t) * 4;
    uint32_t *send = (uint32_t *)buffer(bytes), *recv = (uint32_t *)buffer(bytes);
    upipe_msg *list = (upipe_msg *)zeroed((size_t)(6 * k->ranks) * sizeof *list);
    lists_begin(&t);
    for (int round = 0; round < k->what; ++round) {
        int n;
        memset(recv, 0xee, bytes);
        n = lists_next(&t, list, send, send, recv);
        idle(test_below(&t.rng, 4) == 0 ? test_below(&t.rng, 100) : 0);
        UPIPE_TRY(upipe_comm_start(c, c->team, list, n));
        idle(test_below(&t.rng, 4) == 0 ? test_below(&t.rng, 100) : 0);
        UPIPE_TRY(upipe_comm_wait(c, c->team));
        /* The transport is done with the send buffers: what is written here must reach nobody. */
        memset(send, 0xdd, t.sent_words * 4);
        lists_check(&t, recv);
    }
    CHECK_INT(c->team->sent_bytes, t.sent);
    CHECK_INT(c->team->moved_bytes, t.moved);
    return UPIPE_OK;
}

static void test_random(void)
{
    static const int teams[] = {1, 2, 3, 4, 8};
    for (int i = 0; i < 5; ++i) {
        crew *k = crew_begin(teams[i], 20);
        int64_t sent = 0, moved = 0;
        k->seed = (uint64_t)test_env("UPIPE_SEED", 1);
        k->what = (int)(test_draws_wanted() / 10);
        CHECK_INT(upipe_threads_run(&k->team, random_body, k, NULL, NULL), UPIPE_OK);
        for (int r = 0; r < teams[i]; ++r) {
            sent += k->ctx[r].team->sent_bytes;
            moved += k->ctx[r].team->moved_bytes;
        }
        CHECK_INT(moved, sent);
        CHECK(teams[i] == 1 || sent > 0);
        crew_end(k);
        buffers_free(0);
    }
}

/* ---- agreement ---- */

static upipe_status counted_gather(upipe_ctx *c, upipe_comm *comm, int64_t *all, const int64_t *mine, int n)
{
    crew *k = (crew *)c->user;
    ++k->gathers[comm->rank];
    return upi_threads_all_gather(c, comm, all, mine, n);
}

static upipe_status agree_body(void *user, int rank)
{
    crew *k = (crew *)user;
    upipe_ctx *c = &k->ctx[rank];
    const int odd = rank == k->victim;
    upi_fields f;
    c->team->ops.all_gather = counted_gather;
    for (int i = 0; i < 12; ++i) { /* compared when it changes, free while it stays */
        f = fields_of_block(32, "chunk", i / 3);
        UPIPE_TRY(upi_agree(c, c->team, &f));
        CHECK_INT(k->gathers[rank], i / 3 + 1);
    }
    f = fields_of_block(32, "chunk", 2); /* known from before, but others may not be back */
    UPIPE_TRY(upi_agree(c, c->team, &f));
    f = fields_of_block(32, "stages", 2); /* another description with the same numbers */
    UPIPE_TRY(upi_agree(c, c->team, &f));
    CHECK_INT(k->gathers[rank], 6);
    if (k->what == 0) {
        f = fields_of_block(odd ? 31 : 32, "stages", 77);
        CHECK_REFUSED(upi_agree(c, c->team, &f), UPIPE_ERR_MISMATCH, c->err, "heads is 3");
        CHECK_TEXT(c->err.text, "31");
        CHECK_TEXT(c->err.text, "32");
    } else if (k->what == 1) {
        f = fields_of_real(odd ? 500000 : 0.5, 32, "stages", 2);
        CHECK_REFUSED(upi_agree(c, c->team, &f), UPIPE_ERR_MISMATCH, c->err, "500000");
        CHECK_TEXT(c->err.text, "0.5");
    } else { /* one rank goes back to what all agreed on once, the others stay: nobody gets through */
        upipe_status s;
        if (odd) f = fields_of_block(32, "chunk", 2);
        s = upi_agree(c, c->team, &f);
        if (s == UPIPE_OK) s = upipe_comm_barrier(c, c->team);
        CHECK_REFUSED(s, UPIPE_ERR_MISMATCH, c->err, "all-gather");
        CHECK_TEXT(c->err.text, "barrier");
    }
    check_dead(k, rank);
    return UPIPE_OK;
}

static void test_agree(void)
{
    for (int victim = 0; victim < 4; ++victim)
        for (int again = 0; again < 10; ++again) /* who reads the gather first is chance */
            crew_test(4, 20, agree_body, victim, again % 3);
}

/* Descriptions that alternate are compared while their order is new. */
static upipe_status alternate_body(void *user, int rank)
{
    /* two in turn; runs of one between another, which grow longer; more than are kept */
    static const char *const orders[] = {"ABABABABAB", "AAAAABAAAAABAAAAAB", "AABAABAAAABAAAAB",
                                         "ABCDEABCDE"};
    static const int gathers[] = {3, 3, 5, 10};
    crew *k = (crew *)user;
    upipe_ctx *c = &k->ctx[rank];
    upi_fields f;
    const char *at;
    c->team->ops.all_gather = counted_gather;
    for (size_t i = 0; i < sizeof orders / sizeof *orders; ++i) {
        const int before = k->gathers[rank];
        for (at = orders[i]; *at != 0; ++at) {
            f = fields_of("window", (int64_t)(100 * i) + *at);
            UPIPE_TRY(upi_agree(c, c->team, &f));
        }
        CHECK_SAY(k->gathers[rank] - before == gathers[i], "%s: %d gathers, not %d", orders[i],
                  k->gathers[rank] - before, gathers[i]);
    }
    return UPIPE_OK;
}

enum { CHANGED, BEHIND, AHEAD, LONGER, STEP_COUNT };

/* A rank that alone has changed one of them, that skips one, repeats one, or takes them in another order is
 * found, though all of them are known. */
static upipe_status step_body(void *user, int rank)
{
    crew *k = (crew *)user;
    upipe_ctx *c = &k->ctx[rank];
    const int odd = rank == k->victim;
    upipe_status s = UPIPE_OK;
    upi_fields f;
    int i;
    for (i = 0; i < 24; ++i) { /* A A B, A A B, ... */
        f = fields_of("window", i % 3 == 2);
        UPIPE_TRY(upi_agree(c, c->team, &f));
    }
    for (i = 0; i < 6 && s == UPIPE_OK; ++i) {
        int at = i + (odd && k->what == AHEAD) + (odd && k->what == BEHIND ? 2 : 0);
        if (odd && k->what == LONGER && i >= 2) at = i - 1;
        f = fields_of("window", at % 3 != 2 ? 0 : odd && k->what == CHANGED ? 7 : 1);
        s = upi_agree(c, c->team, &f);
        if (s == UPIPE_OK) s = upipe_comm_barrier(c, c->team);
    }
    CHECK_STATUS(s, UPIPE_ERR_MISMATCH, c->err);
    CHECK(i <= 3);
    check_dead(k, rank);
    return UPIPE_OK;
}

static void test_alternate(void)
{
    crew_test(3, 20, alternate_body, 0, 0);
    for (int what = CHANGED; what < STEP_COUNT; ++what) crew_test(3, 20, step_body, what % 3, what);
}

/* ---- faults: a rank that stays away ---- */

enum { AT_START, AT_WAIT, AT_BARRIER, AT_GATHER, AT_COUNT };

static upipe_status absent_body(void *user, int rank)
{
    crew *k = (crew *)user;
    upipe_ctx *c = &k->ctx[rank];
    int64_t mine = rank, all[RANKS_MAX];
    upipe_status s;
    char name[32];
    line_up(k, rank, 0.25);
    if (rank == k->victim) {
        if (k->what == AT_WAIT)
            CHECK_STATUS(upipe_comm_start(c, c->team, k->list[rank], all_list(k, rank)), UPIPE_OK, c->err);
        until_broken(k);
        if (k->what == AT_WAIT) CHECK_STATUS(upipe_comm_wait(c, c->team), UPIPE_ERR_ABORTED, c->err);
        check_dead(k, rank);
        return UPIPE_OK;
    }
    if (k->what == AT_BARRIER)
        s = upipe_comm_barrier(c, c->team);
    else if (k->what == AT_GATHER)
        s = upipe_comm_all_gather(c, c->team, all, &mine, 1);
    else {
        CHECK_STATUS(upipe_comm_start(c, c->team, k->list[rank], all_list(k, rank)), UPIPE_OK, c->err);
        s = upipe_comm_wait(c, c->team);
    }
    CHECK(s == UPIPE_ERR_TIMEOUT || s == UPIPE_ERR_ABORTED);
    CHECK_INT(c->err.status, s);
    snprintf(name, sizeof name, "for rank %d to %s", k->victim, k->what == AT_WAIT ? "finish" : "come");
    CHECK_TEXT(c->err.text, name);
    CHECK_TEXT(c->err.text, "0.25 s");
    CHECK_INT(c->team->quarantine, 0);
    check_dead(k, rank);
    return s;
}

static void test_absent(void)
{
    for (int what = 0; what < AT_COUNT; ++what) {
        for (int victim = 0; victim < 3; ++victim) {
            crew *k = crew_begin(3, 0.25);
            k->victim = victim;
            k->what = what;
            CHECK_INT(upipe_threads_run(&k->team, absent_body, k, k->status, NULL), UPIPE_ERR_TIMEOUT);
            CHECK_INT(count_status(k, UPIPE_ERR_TIMEOUT), 1);
            CHECK_INT(count_status(k, UPIPE_ERR_ABORTED), 1);
            crew_end(k);
        }
    }
}

/* More seconds than the clock counts are patience. */
static upipe_status patient_body(void *user, int rank)
{
    upipe_ctx *c = &((crew *)user)->ctx[rank];
    c->team->deadline = INFINITY;
    if (rank == 1) test_nap(0.05);
    return upipe_comm_barrier(c, c->team);
}

static void test_patient(void)
{
    crew_test(2, 20, patient_body, 0, 0);
}

/* Most of the team returns without a word. */
static upipe_status deserted_body(void *user, int rank)
{
    crew *k = (crew *)user;
    upipe_ctx *c = &k->ctx[rank];
    line_up(k, rank, 0.2);
    return rank < 2 ? upipe_comm_barrier(c, c->team) : UPIPE_OK;
}

static void test_deserted(void)
{
    crew *k = crew_begin(12, 0.2);
    CHECK_INT(upipe_threads_run(&k->team, deserted_body, k, k->status, NULL), UPIPE_ERR_TIMEOUT);
    CHECK_INT(count_status(k, UPIPE_ERR_ABORTED), 1);
    CHECK_TEXT(k->team.failure.text, "for ranks 2, 3, 4, 5, 6, 7, 8, 9 and 2 more to come");
    crew_end(k);
}

/* ---- faults: a rank that fails, or aborts ---- */

enum { BEFORE_START, BEFORE_WAIT, AFTER_WAIT, IN_COPY, ABORT_COUNT };

static upipe_status abort_body(void *user, int rank)
{
    crew *k = (crew *)user;
    upipe_ctx *c = &k->ctx[rank];
    upipe_status s;
    upipe_ops mine = k->ops;
    line_up(k, rank, 60);
    if (rank != k->victim) {
        s = all_to_all(k, rank);
        if (s == UPIPE_OK) s = upipe_comm_barrier(c, c->team);
        CHECK_REFUSED(s, UPIPE_ERR_ABORTED, c->err,
                      k->what == IN_COPY       ? "the engine burns"
                      : k->what == BEFORE_WAIT ? "ill"
                                               : "failed: ");
        CHECK_INT(c->team->quarantine, 0);
        check_dead(k, rank);
        return s;
    }
    if (k->what == BEFORE_WAIT) {
        UPIPE_TRY(upipe_comm_start(c, c->team, k->list[rank], all_list(k, rank)));
        upipe_comm_abort(c->team, "rank is ill");
        CHECK_STATUS(upipe_comm_wait(c, c->team), UPIPE_ERR_ABORTED, c->err);
        memset(k->send[rank], 0xdd, sizeof k->send[rank]); /* its own again: a reader now would be a race */
        check_dead(k, rank);
    } else if (k->what == AFTER_WAIT) {
        UPIPE_TRY(all_to_all(k, rank));
    } else if (k->what == IN_COPY) {
        mine.copy = burning_copy;
        c->ops = &mine;
        s = all_to_all(k, rank);
        CHECK_TEXT(c->err.text, "the engine burns after 32 bytes");
        check_dead(k, rank);
        return s;
    }
    return UPIPE_ERR_ARG;
}

static void test_abort_call(void)
{
    for (int what = 0; what < ABORT_COUNT; ++what) {
        for (int victim = 0; victim < 3; ++victim) {
            upipe_status want = what == IN_COPY ? UPIPE_ERR_BACKEND : UPIPE_ERR_ARG;
            crew *k = crew_begin(3, 60);
            upipe_err e;
            k->victim = victim;
            k->what = what;
            CHECK_STATUS(upipe_threads_run(&k->team, abort_body, k, k->status, &e), want, e);
            CHECK_INT(e.status, want);
            CHECK_TEXT(e.text, what == IN_COPY       ? "the engine burns after 32 bytes"
                               : what == BEFORE_WAIT ? "rank is ill"
                                                     : "failed: invalid argument");
            CHECK_INT(k->status[victim], want);
            CHECK_INT(count_status(k, UPIPE_ERR_ABORTED), 2);
            crew_end(k);
        }
    }
}

/* The host's own threads; the host aborts while all sleep, two of them for a third that never was. */
typedef struct sleeper {
    crew *k;
    int rank;
} sleeper;

static void *sleeper_main(void *p)
{
    sleeper *z = (sleeper *)p;
    crew *k = z->k;
    upipe_ctx *c = &k->ctx[z->rank];
    __atomic_fetch_add(&k->inside, 1, __ATOMIC_RELAXED);
    if (z->rank == 0) {
        k->status[0] = upipe_comm_barrier(c, c->team);
    } else {
        CHECK_STATUS(upipe_comm_barrier(c, c->team), UPIPE_ERR_ABORTED, c->err);
        k->status[z->rank] = c->err.status;
    }
    CHECK_TEXT(c->err.text, "the host closes");
    check_dead(k, z->rank);
    return NULL;
}

static void test_abort_outside(void)
{
    crew *k = crew_begin(3, 60);
    sleeper z[2];
    pthread_t t[2];
    for (int i = 0; i < 2; ++i) {
        z[i].k = k;
        z[i].rank = i;
        CHECK_INT(pthread_create(&t[i], NULL, sleeper_main, &z[i]), 0);
    }
    while (__atomic_load_n(&k->inside, __ATOMIC_RELAXED) < 2) test_nap(0.001);
    for (int i = 0; i < 20; ++i) test_nap(0.001); /* most likely asleep by now; right either way */
    upipe_comm_abort(k->ctx[2].team, "the host closes");
    upipe_comm_abort(k->ctx[0].team, "a later reason");
    upipe_comm_abort(k->ctx[1].team, NULL);
    for (int i = 0; i < 2; ++i) {
        pthread_join(t[i], NULL);
        CHECK_INT(k->status[i], UPIPE_ERR_ABORTED);
    }
    check_dead(k, 2); /* a late comer */
    CHECK_TEXT(k->ctx[2].err.text, "the host closes");
    crew_end(k);

    k = crew_begin(1, 60);
    upipe_comm_abort(k->ctx[0].team, NULL);
    check_dead(k, 0);
    CHECK_TEXT(k->ctx[0].err.text, "aborted by the host");
    crew_end(k);
}

/* ---- faults: ranks that disagree ---- */

enum {
    MORE_BYTES,
    MORE_BLOCKS,
    HALF_BLOCKS,
    NO_SEND,
    NO_RECV,
    TWO_SENDS,
    OTHER_LENGTH,
    KINDS,
    KINDS_END = KINDS + 6
};

/* Kinds of call of the victim and of the others: every pair. 0 transfer, 1 barrier, 2 all-gather. */
static const int odd_kinds[6][2] = {{0, 1}, {0, 2}, {1, 0}, {1, 2}, {2, 0}, {2, 1}};

static upipe_status call_of_kind(crew *k, int rank, int kind, int numbers)
{
    upipe_ctx *c = &k->ctx[rank];
    int64_t mine[4] = {1, 2, 3, 4}, all[4 * 4];
    if (kind == 0) return all_to_all(k, rank);
    if (kind == 1) return upipe_comm_barrier(c, c->team);
    return upipe_comm_all_gather(c, c->team, all, mine, numbers);
}

static upipe_status odd_body(void *user, int rank)
{
    crew *k = (crew *)user;
    upipe_ctx *c = &k->ctx[rank];
    int other = (k->victim + 1) % k->ranks, is_odd = rank == k->victim, n;
    upipe_status s;
    char words[96];
    line_up(k, rank, 60);
    if (k->what >= KINDS) {
        static const char *const names[] = {"a transfer", "a barrier", "an all-gather"};
        const int *kinds = odd_kinds[k->what - KINDS];
        s = call_of_kind(k, rank, kinds[is_odd ? 0 : 1], 2);
        CHECK_REFUSED(s, UPIPE_ERR_MISMATCH, c->err, names[kinds[0]]);
        CHECK_TEXT(c->err.text, names[kinds[1]]);
        snprintf(words, sizeof words, "rank %d is in", k->victim);
        if (!strstr(c->err.text, words)) snprintf(words, sizeof words, "and rank %d in", k->victim);
        CHECK_TEXT(c->err.text, words);
    } else if (k->what == OTHER_LENGTH) {
        s = call_of_kind(k, rank, 2, is_odd ? 3 : 4);
        CHECK_STATUS(s, UPIPE_ERR_MISMATCH, c->err);
        snprintf(words, sizeof words, "rank %d gathers 3", k->victim);
        CHECK_TEXT(c->err.text, words);
        CHECK_TEXT(c->err.text, "gathers 4");
    } else {
        upipe_msg list[RANKS_MAX], *odd = &list[other];
        n = all_list(k, rank);
        memcpy(list, k->list[rank], sizeof list);
        words[0] = 0;
        if (k->what == MORE_BYTES) {
            if (is_odd) odd->send_bytes -= 4;
            snprintf(words, sizeof words,
                     "rank %d sends 1 blocks of 28 bytes to rank %d, which receives 1 of 32", k->victim,
                     other);
        } else if (k->what == MORE_BLOCKS || k->what == HALF_BLOCKS) {
            const int bytes = k->what == MORE_BLOCKS ? 32 : 16; /* halves: as many bytes in all */
            if (is_odd) { /* two blocks sent, and one received as before */
                list[n] = *odd;
                list[n].recv_bytes = odd->send_bytes = 0;
                list[n].send_bytes = list[n].send_stride = (size_t)bytes;
                list[n++].count = 2;
            }
            snprintf(words, sizeof words,
                     "rank %d sends 2 blocks of %d bytes to rank %d, which receives 1 of 32", k->victim,
                     bytes, other);
        } else if (k->what == NO_SEND) {
            if (is_odd) odd->send_bytes = 0;
            snprintf(words, sizeof words, "rank %d sends 0 messages to rank %d, which receives 1", k->victim,
                     other);
        } else if (k->what == NO_RECV) {
            if (is_odd) odd->recv_bytes = 0;
            snprintf(words, sizeof words, "rank %d sends 1 messages to rank %d, which receives 0", other,
                     k->victim);
        } else {
            if (is_odd) {
                list[n] = *odd;
                list[n++].recv_bytes = 0;
            }
            snprintf(words, sizeof words, "rank %d sends 2 messages to rank %d, which receives 1", k->victim,
                     other);
        }
        s = upipe_comm_start(c, c->team, list, n); /* fails if the others have found it already */
        if (s == UPIPE_OK) s = upipe_comm_wait(c, c->team);
        CHECK_REFUSED(s, UPIPE_ERR_MISMATCH, c->err, words);
        CHECK_INT(c->team->quarantine, 0);
        memset(list, 0xdd, sizeof list); /* nobody may read it any more */
    }
    check_dead(k, rank);
    return UPIPE_OK;
}

static void test_odd(void)
{
    for (int ranks = 2; ranks <= 4; ++ranks) {
        for (int what = 0; what < KINDS_END; ++what)
            for (int victim = 0; victim < ranks; ++victim) crew_test(ranks, 60, odd_body, victim, what);
    }
}

/* Ranks 0 and 1 disagree; 2 and 3 have nothing to do with them, and may complete: their next call tells. */
static upipe_status bystander_body(void *user, int rank)
{
    crew *k = (crew *)user;
    upipe_ctx *c = &k->ctx[rank];
    upipe_msg *msg = &k->list[rank][rank ^ 1];
    upipe_status s;
    line_up(k, rank, 60);
    all_list(k, rank);
    if (rank == 0) msg->send_bytes = 12;
    s = upipe_comm_start(c, c->team, msg, 1);
    if (s == UPIPE_OK) s = upipe_comm_wait(c, c->team);
    CHECK(rank > 1 || s == UPIPE_ERR_MISMATCH);
    if (s == UPIPE_OK) s = upipe_comm_barrier(c, c->team);
    CHECK_REFUSED(s, UPIPE_ERR_MISMATCH, c->err,
                  "rank 0 sends 1 blocks of 12 bytes to rank 1, which receives 1 of 32");
    check_dead(k, rank);
    return UPIPE_OK;
}

static void test_bystander(void)
{
    for (int again = 0; again < 20; ++again) crew_test(4, 60, bystander_body, 0, 0);
}

/* ---- a table that only enqueues ---- */

/* Each rank's queue of copies, as a device's stream holds them: sync runs it. */
static struct queue {
    void *dst[2 * RANKS_MAX];
    const void *src[2 * RANKS_MAX];
    size_t bytes[2 * RANKS_MAX];
    int n, syncs;
} queues[RANKS_MAX];

static upipe_status queued_copy(upipe_ctx *c, void *dst, const void *src, size_t bytes)
{
    struct queue *q = &queues[c->team->rank];
    q->dst[q->n] = dst;
    q->src[q->n] = src;
    q->bytes[q->n++] = bytes;
    return UPIPE_OK;
}

static upipe_status queued_sync(upipe_ctx *c)
{
    crew *k = (crew *)c->user;
    struct queue *q = &queues[c->team->rank];
    ++q->syncs;
    for (int i = 0; i < q->n; ++i) memcpy(q->dst[i], q->src[i], q->bytes[i]);
    q->n = 0;
    if (k->what == q->syncs && k->victim == c->team->rank)
        return upipe_fail(&c->err, UPIPE_ERR_BACKEND, "the stream burns");
    return UPIPE_OK;
}

/* What a rank sends is made on its own queue, and spoilt as soon as the transfer is over. */
static upipe_status queued_body(void *user, int rank)
{
    crew *k = (crew *)user;
    upipe_ctx *c = &k->ctx[rank];
    uint32_t made[RANKS_MAX][WORDS];
    int n;
    for (int round = 0; round < 20; ++round) {
        n = all_list(k, rank);
        memcpy(made, k->send[rank], sizeof made);
        memset(k->send[rank], 0xdd, sizeof k->send[rank]);
        UPIPE_TRY(queued_copy(c, k->send[rank], made, sizeof made));
        UPIPE_TRY(upipe_comm_start(c, c->team, k->list[rank], n));
        if (round % k->ranks == rank) test_nap(0.001); /* the others read what start has left to the queue */
        UPIPE_TRY(upipe_comm_wait(c, c->team));
        all_come(k, rank);
        memset(k->send[rank], 0xdd, sizeof k->send[rank]);
    }
    return UPIPE_OK;
}

/* Syncs that fail: before a transfer, and behind the copies of one. */
static void test_queued(void)
{
    static const int failing[] = {0, 1, 2, 5, 8};
    for (size_t i = 0; i < sizeof failing / sizeof *failing; ++i) {
        crew *k = crew_begin(3, 60);
        int backend = 0;
        memset(queues, 0, sizeof queues);
        k->ops.copy = queued_copy;
        k->ops.sync = queued_sync;
        k->what = failing[i];
        k->victim = 1;
        CHECK_INT(upipe_threads_run(&k->team, queued_body, k, k->status, NULL),
                  failing[i] ? UPIPE_ERR_BACKEND : UPIPE_OK);
        for (int r = 0; r < k->ranks && failing[i]; ++r) {
            CHECK_INT(k->status[r], r == 1 ? UPIPE_ERR_BACKEND : UPIPE_ERR_ABORTED);
            CHECK_TEXT(k->ctx[r].err.text, "the stream burns");
            CHECK_INT(k->ctx[r].team->quarantine, 0);
            backend += k->status[r] == UPIPE_ERR_BACKEND;
        }
        CHECK_INT(backend, failing[i] != 0);
        crew_end(k);
    }
}

/* ---- faults: a reader that is slow, and one that never ends ---- */

static upipe_status slow_copy(upipe_ctx *c, void *dst, const void *src, size_t bytes)
{
    crew *k = (crew *)c->user;
    if (__atomic_fetch_add(&k->copies, 1, __ATOMIC_SEQ_CST) > 0) return plain_copy(c, dst, src, bytes);
    __atomic_store_n(&k->inside, 1, __ATOMIC_SEQ_CST);
    until_broken(k);
    for (int i = 0; i < 30; ++i) test_nap(0.001);
    plain_copy(c, dst, src, bytes);
    __atomic_store_n(&k->inside, 0, __ATOMIC_SEQ_CST);
    return UPIPE_OK;
}

static upipe_status stuck_copy(upipe_ctx *c, void *dst, const void *src, size_t bytes)
{
    crew *k = (crew *)c->user;
    __atomic_fetch_add(&k->copies, 1, __ATOMIC_SEQ_CST);
    while (!__atomic_load_n(&k->let_go, __ATOMIC_SEQ_CST)) test_nap(0.001);
    return plain_copy(c, dst, src, bytes);
}

enum { STUCK = 1, TWO_MESSAGES = 2 };

/* Rank 0 sends two blocks to rank 1, which is in no hurry. */
static upipe_status slow_body(void *user, int rank)
{
    crew *k = (crew *)user;
    upipe_ctx *c = &k->ctx[rank];
    upipe_ops mine = k->ops;
    upipe_msg list[2] = {0};
    upipe_status s;
    int stuck = k->what & STUCK, n = k->what & TWO_MESSAGES ? 2 : 1, i;
    char sentence[96];
    snprintf(sentence, sizeof sentence, "rank %d waited 0.4 s in a transfer for rank %d to finish receiving",
             upi_comm_called(c->team, 0), upi_comm_called(c->team, 1));
    line_up(k, rank, rank == 0 ? 0.4 : 60);
    for (i = 0; i < n; ++i) {
        list[i].peer = 1 - rank;
        list[i].count = 2 / n;
        if (rank == 0) {
            list[i].send = k->send[0][1] + 4 * i;
            list[i].send_bytes = list[i].send_stride = 16;
        } else {
            list[i].recv = k->recv[1][0] + 4 * i;
            list[i].recv_bytes = list[i].recv_stride = 16;
        }
    }
    if (rank == 1) {
        mine.copy = stuck ? stuck_copy : slow_copy;
        c->ops = &mine;
    }
    CHECK_STATUS(upipe_comm_start(c, c->team, list, n), UPIPE_OK, c->err);
    s = upipe_comm_wait(c, c->team);
    CHECK_REFUSED(s, rank == 0 ? UPIPE_ERR_TIMEOUT : UPIPE_ERR_ABORTED, c->err, sentence);
    CHECK_INT(c->team->quarantine, rank == 0 && stuck);
    CHECK_INT(__atomic_load_n(&k->copies, __ATOMIC_SEQ_CST), 1); /* no block was begun after the failure */
    if (rank == 0) {
        CHECK_INT(__atomic_load_n(&k->inside, __ATOMIC_SEQ_CST), 0);
        if (!stuck) memset(k->send[0][1], 0xdd, sizeof k->send[0][1]); /* free again: nobody reads */
        memset(list, 0xdd, sizeof list);                               /* so is the list, in either case */
        __atomic_store_n(&k->let_go, 1, __ATOMIC_SEQ_CST);
    }
    check_dead(k, rank);
    c->ops = &k->ops;
    return s;
}

/* With two messages the two ranks are the last of a world of four. */
static void test_slow(void)
{
    for (int what = 0; what <= (STUCK | TWO_MESSAGES); ++what) {
        crew *k = crew_begin(2, 60);
        upipe_threads world = {0};
        upipe_err e;
        k->what = what;
        if (what & TWO_MESSAGES) {
            CHECK_STATUS(upipe_threads_init(&world, 4, 60, &e), UPIPE_OK, e);
            for (int r = 0; r < 2; ++r)
                upipe_comm_part(k->ctx[r].team, upipe_threads_comm(&world, 2 + r), 2, 1);
        }
        CHECK_INT(upipe_threads_run(&k->team, slow_body, k, k->status, NULL), UPIPE_ERR_TIMEOUT);
        CHECK_INT(k->status[1], UPIPE_ERR_ABORTED);
        upipe_threads_free(&k->team); /* before its world */
        upipe_threads_free(&world);
        crew_end(k);
    }
}

/* ---- arguments, resources ---- */

static upipe_status argument_body(void *user, int rank)
{
    crew *k = (crew *)user;
    upipe_ctx *c = &k->ctx[rank];
    upipe_msg bad;
    const upi_fields fields = fields_of("tokens", 1);
    int64_t mine[UPIPE_ALL_GATHER_MAX + 1] = {0}, *all = c->team->gathered;
    CHECK_STATUS(upipe_comm_wait(c, c->team), UPIPE_ERR_ARG, c->err);
    bad = (upipe_msg){.peer = k->ranks, .count = 1};
    CHECK_STATUS(upipe_comm_start(c, c->team, &bad, 1), UPIPE_ERR_ARG, c->err);
    bad.peer = -1;
    CHECK_STATUS(upipe_comm_start(c, c->team, &bad, 1), UPIPE_ERR_ARG, c->err);
    bad.peer = 0;
    bad.count = 0;
    CHECK_STATUS(upipe_comm_start(c, c->team, &bad, 1), UPIPE_ERR_ARG, c->err);
    CHECK_STATUS(upipe_comm_all_gather(c, c->team, all, mine, UPIPE_ALL_GATHER_MAX + 1), UPIPE_ERR_ARG,
                 c->err);
    CHECK_STATUS(upipe_comm_all_gather(c, c->team, all, mine, -1), UPIPE_ERR_ARG, c->err);

    CHECK_STATUS(upipe_comm_start(c, c->team, k->list[rank], all_list(k, rank)), UPIPE_OK, c->err);
    CHECK_STATUS(upipe_comm_start(c, c->team, k->list[rank], k->ranks), UPIPE_ERR_ARG, c->err);
    CHECK_STATUS(upipe_comm_barrier(c, c->team), UPIPE_ERR_ARG, c->err); /* nothing in between */
    CHECK_STATUS(upi_agree(c, c->team, &fields), UPIPE_ERR_ARG, c->err);
    CHECK_REFUSED(shift_start(c, c->team, mine, all, 8, 1), UPIPE_ERR_ARG, c->err,
                  "upipe_comm_wait comes first");
    CHECK_STATUS(upipe_comm_wait(c, c->team), UPIPE_OK, c->err); /* none of this has hurt the team */
    all_come(k, rank);
    CHECK_STATUS(upipe_comm_start(c, c->team, k->list[rank], 0), UPIPE_OK,
                 c->err); /* nothing to say is legal */
    CHECK_STATUS(upipe_comm_wait(c, c->team), UPIPE_OK, c->err);
    return UPIPE_OK;
}

static void test_arguments(void)
{
    upipe_threads team;
    upipe_err e;
    crew_test(2, 20, argument_body, 0, 0);
    CHECK_STATUS(upipe_threads_init(&team, 0, 0, &e), UPIPE_ERR_ARG, e);
    CHECK_STATUS(upipe_threads_init(&team, -1, 0, &e), UPIPE_ERR_ARG, e);
    CHECK_REFUSED(upipe_threads_init(&team, UPIPE_THREADS_MAX + 1, 0, &e), UPIPE_ERR_ARG, e, "257");
    CHECK_STATUS(upipe_threads_init(&team, 2, -1, &e), UPIPE_ERR_ARG, e);
    CHECK_STATUS(upipe_threads_init(&team, 2, NAN, &e), UPIPE_ERR_ARG, e);
    upipe_threads_free(&team); /* a failed init leaves nothing, and free may be called all the same */
    CHECK_INT(alive, 0);
}

/* A team of one whose rank disagrees with itself, and one whose patience is nil. */
static void test_alone(void)
{
    crew *k = crew_begin(1, 20);
    upipe_ctx *c = &k->ctx[0];
    c->team->deadline = 0;
    CHECK_STATUS(all_to_all(k, 0), UPIPE_OK, c->err);
    CHECK_INT(c->team->sent_bytes, 0);
    CHECK_INT(c->team->moved_bytes, 0);
    all_list(k, 0);
    k->list[0][0].recv_bytes = 4;
    CHECK_STATUS(upipe_comm_start(c, c->team, k->list[0], 1), UPIPE_OK, c->err);
    CHECK_STATUS(upipe_comm_wait(c, c->team), UPIPE_ERR_MISMATCH, c->err);
    check_dead(k, 0);
    crew_end(k);

    k = crew_begin(2, 20);
    c = &k->ctx[1];
    c->team->deadline = 0;
    CHECK_REFUSED(upipe_comm_barrier(c, c->team), UPIPE_ERR_TIMEOUT, c->err, "for rank 0 to come");
    check_dead(k, 1);
    check_dead(k, 0);
    crew_end(k);
}

static void test_resources(void)
{
    upipe_threads team;
    upipe_err e;
    int ranks = 3;
    for (int at = 1; at <= 2 + 2 * ranks; ++at) { /* one allocation, the team's lock, two things a rank */
        calls = 0;
        fail_at = at;
        CHECK_STATUS(upipe_threads_init(&team, ranks, 0, &e), at == 1 ? UPIPE_ERR_MEMORY : UPIPE_ERR_BACKEND,
                     e);
        CHECK_INT(alive, 0);
        upipe_threads_free(&team);
        CHECK_INT(alive, 0);
    }
    for (int at = 1; at <= ranks; ++at) { /* the thread of rank at - 1 cannot start */
        crew *k = crew_begin(ranks, 60);
        calls = 0;
        fail_at = at;
        CHECK_REFUSED(upipe_threads_run(&k->team, meet_body, k, k->status, &e), UPIPE_ERR_BACKEND, e,
                      "did not start: Resource temporarily unavailable");
        for (int r = 0; r < ranks; ++r)
            CHECK_INT(k->status[r], r < at - 1 ? UPIPE_ERR_ABORTED : UPIPE_ERR_BACKEND);
        CHECK_TEXT(k->team.failure.text, "did not start: Resource temporarily unavailable");
        check_dead(k, 0);
        fail_at = 0;
        crew_end(k);
    }
    fail_at = 0;
}

/* ---- parts of a world ---- */

/* A world knows those that have come and not left, in whatever order. */
static void test_parts(void)
{
    static upipe_comm world, of[3];
    for (int i = 0; i < 3; ++i) upipe_comm_part(&of[i], &world, 0, 1);
    CHECK(world.part == &of[2] && of[2].part == &of[1] && of[1].part == &of[0] && of[0].part == NULL);
    upi_comm_leave(&of[1]);
    CHECK(world.part == &of[2] && of[2].part == &of[0]);
    upi_comm_leave(&of[2]);
    CHECK(world.part == &of[0]);
    upi_comm_leave(&of[0]);
    CHECK(world.part == NULL && upi_comm_world(&of[0]) == &of[0]);
}

static const upipe_grid two_by_two = {.ranks = 4, .in_team = 2, .in_ring = 2};

/* Ranks of a part that disagree are named as the job calls them, over whole numbers and real ones. Of four ranks 2 and 3 are
 * a team, 1 and 3 a ring. */
static upipe_status named_body(void *user, int rank)
{
    upipe_threads_grid *g = (upipe_threads_grid *)user;
    const upipe_ops ops = {0};
    for (int kind = 0; kind < 4; ++kind) {
        const int real = kind % 2, in_ring = kind / 2, other = in_ring ? 1 : 2;
        upi_fields f = real ? fields_of_real(rank + 0.5, 32, "chunk", 1) : fields_of("tokens", rank);
        upipe_ctx c = {.ops = &ops};
        char words[96];
        if (rank != other && rank != 3) continue;
        snprintf(words, sizeof words, "tokens is %d%s on rank %d and 3%s on rank 3", other, real ? ".5" : "",
                 other, real ? ".5" : "");
        upipe_threads_grid_use(&g[kind], rank, &c);
        CHECK_REFUSED(upi_agree(&c, in_ring ? c.ring : c.team, &f), UPIPE_ERR_MISMATCH, c.err, words);
    }
    return UPIPE_OK;
}

static void test_named(void)
{
    upipe_threads_grid g[4];
    upipe_err e;
    for (int kind = 0; kind < 4; ++kind)
        CHECK_STATUS(upipe_threads_grid_init(&g[kind], &two_by_two, 20, &e), UPIPE_OK, e);
    CHECK_STATUS(upipe_threads_run(&g[0].world, named_body, g, NULL, &e), UPIPE_OK, e);
    for (int kind = 0; kind < 4; ++kind) upipe_threads_grid_free(&g[kind]);
}

typedef struct lost_grid {
    upipe_threads_grid grid;
    upipe_threads side;
    int victim, in_side;
} lost_grid;

static upipe_status lost_body(void *user, int rank)
{
    lost_grid *g = (lost_grid *)user;
    const upipe_ops ops = {0};
    upipe_ctx c;
    upipe_threads_grid_use(&g->grid, rank, &c);
    lost_run(&(lost_rank){.world = upipe_threads_comm(&g->grid.world, rank),
                          .team = c.team,
                          .ring = c.ring,
                          .side = upipe_threads_comm(&g->side, rank),
                          .ops = &ops,
                          .rank = rank,
                          .victim = g->victim,
                          .in_side = g->in_side});
    return UPIPE_OK;
}

static void test_lost(int victim, int in_side)
{
    lost_grid g = {.victim = victim, .in_side = in_side};
    upipe_err e;
    CHECK_STATUS(upipe_threads_grid_init(&g.grid, &two_by_two, 20, &e), UPIPE_OK, e);
    CHECK_STATUS(upipe_threads_init(&g.side, 4, 20, &e), UPIPE_OK, e);
    for (int r = 0; r < 4; ++r)
        upipe_comm_part(upipe_threads_comm(&g.side, r), upipe_threads_comm(&g.grid.world, r), 0, 1);
    CHECK_STATUS(upipe_threads_run(&g.grid.world, lost_body, &g, NULL, &e), UPIPE_OK, e);
    upipe_threads_free(&g.side);
    upipe_threads_grid_free(&g.grid);
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    TEST(test_self());
    TEST(test_self_copy());
    TEST(test_null());
    TEST(test_dry());
    TEST(test_shift());
    TEST(test_meet());
    TEST(test_random());
    TEST(test_agree());
    TEST(test_alternate());
    TEST(test_absent());
    TEST(test_patient());
    TEST(test_deserted());
    TEST(test_abort_call());
    TEST(test_abort_outside());
    TEST(test_odd());
    TEST(test_bystander());
    TEST(test_queued());
    TEST(test_slow());
    TEST(test_arguments());
    TEST(test_alone());
    TEST(test_resources());
    TEST(test_parts());
    TEST(test_named());
    for (int i = 0; i < 2; ++i) TEST(test_lost(3 * i, i));
    return test_end("comm");
}

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

static int alive, calls_made, fail_at;

static int fails_now(void)
{
    return ++calls_made == fail_at;
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

#include "net/conformance.h"

/* ---- the row ---- */

static void threads_open(crew *all)
{
    upipe_err e;
    all->own = zeroed(sizeof(upipe_threads));
    CHECK_STATUS(upipe_threads_init((upipe_threads *)all->own, all->ranks, all->deadline, &e), UPIPE_OK, e);
}

static upipe_status threads_join(member *k)
{
    k->ctx.team = upipe_threads_comm((upipe_threads *)k->all->own, k->rank);
    return UPIPE_OK;
}

static void threads_close(crew *all)
{
    upipe_threads_free((upipe_threads *)all->own);
}

static void threads_clean(void)
{
    CHECK_INT(alive, 0);
}

static const int teams[] = {1, 2, 3, 8, 0}, crews[] = {3, 2, 4, 0};

static const transport threads = {
    .name = "threads",
    .can = NAMES_RANKS | TELLS_WHY | COMPARES_LISTS | USES_TABLE | ANY_THREAD | SHARED | PARTS_FAIL,
    .teams = teams,
    .crews = crews,
    .victims = 4,
    .most = 3,
    .longest = 1000,
    .draws_a_round = 10,
    .large = 1000,
    .late = WORDS,
    .open = threads_open,
    .join = threads_join,
    .close = threads_close,
    .clean = threads_clean,
    .each = each_thread,
    .sum = threads_sum,
};

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

/* ---- a run of the team's own ---- */

enum { AT_ONCE, LATE, ILL, OWN_FAULTS };

typedef struct own_run {
    upipe_threads team;
    int victim, what; /* -1: none fails */
} own_run;

static upipe_status own_body(void *user, int rank)
{
    own_run *o = (own_run *)user;
    upipe_ctx c = {.team = upipe_threads_comm(&o->team, rank)};
    if (rank == o->victim && o->what == AT_ONCE) return UPIPE_ERR_ARG;
    if (o->victim < 0 || o->what != AT_ONCE) UPIPE_TRY(upipe_comm_barrier(&c, c.team));
    if (o->victim < 0) return UPIPE_OK;
    if (rank == o->victim && o->what == ILL) upipe_comm_abort(c.team, "rank is ill");
    if (rank == o->victim) return UPIPE_ERR_ARG;
    CHECK_STATUS(upipe_comm_barrier(&c, c.team), UPIPE_ERR_ABORTED, c.err);
    return c.err.status;
}

/* A body that fails breaks the team, before it meets the others or after, and the run says why. A team that is whole may run
 * again. */
static void test_run(void)
{
    enum { RANKS = 3 };
    own_run o = {.victim = -1};
    upipe_status status[RANKS];
    upipe_err e;
    CHECK_STATUS(upipe_threads_init(&o.team, RANKS, 60, &e), UPIPE_OK, e);
    for (int i = 0; i < 2; ++i)
        CHECK_STATUS(upipe_threads_run(&o.team, own_body, &o, status, &e), UPIPE_OK, e);
    upipe_threads_free(&o.team);
    for (int i = 0; i < OWN_FAULTS * RANKS; ++i) {
        CHECK_STATUS(upipe_threads_init(&o.team, RANKS, 60, &e), UPIPE_OK, e);
        o.victim = i % RANKS;
        o.what = i / RANKS;
        CHECK_REFUSED(upipe_threads_run(&o.team, own_body, &o, status, &e), UPIPE_ERR_ARG, e,
                      o.what == ILL ? "rank is ill" : "failed: invalid argument");
        CHECK_INT(e.status, UPIPE_ERR_ARG);
        for (int r = 0; r < RANKS; ++r)
            CHECK_INT(status[r], r == o.victim ? UPIPE_ERR_ARG : UPIPE_ERR_ABORTED);
        upipe_threads_free(&o.team);
    }
    CHECK_INT(alive, 0);
}

/* ---- faults ---- */

/* Most of the team returns without a word. */
static void deserted(member *k)
{
    upipe_ctx *c = &k->ctx;
    upipe_status s = UPIPE_OK;
    line_up(k, 0.2);
    if (k->rank < 2) {
        s = upipe_comm_barrier(c, c->team);
        CHECK(s == UPIPE_ERR_TIMEOUT || s == UPIPE_ERR_ABORTED);
        CHECK_TEXT(c->err.text, "for ranks 2, 3, 4, 5, 6, 7, 8, 9 and 2 more to come");
    }
    CHECK_INT(threads_sum(k, s == UPIPE_ERR_TIMEOUT), 1);
}

/* A team of one whose rank disagrees with itself. */
static void alone(member *k)
{
    upipe_ctx *c = &k->ctx;
    c->team->deadline = 0;
    CHECK_STATUS(all_to_all(k, 1), UPIPE_OK, c->err);
    CHECK_INT(c->team->sent_bytes, 0);
    CHECK_INT(c->team->moved_bytes, 0);
    all_list(k, 1);
    k->list[0].recv_bytes = 4;
    CHECK_STATUS(transfer(k, k->list, 1), UPIPE_ERR_MISMATCH, c->err);
    check_dead(k);
}

/* A rank whose patience is nil. */
static void impatient(member *k)
{
    upipe_ctx *c = &k->ctx;
    c->team->deadline = 0;
    if (k->rank == 1)
        CHECK_REFUSED(upipe_comm_barrier(c, c->team), UPIPE_ERR_TIMEOUT, c->err, "for rank 0 to come");
    meet(k);
    check_dead(k);
}

/* ---- a table that only enqueues ---- */

enum { QUEUED = 3 }; /* ranks */

/* Each rank's queue of copies, as a device's stream holds them: sync runs it. */
static struct queue {
    void *dst[2 * QUEUED];
    const void *src[2 * QUEUED];
    size_t bytes[2 * QUEUED];
    int n, syncs;
} queues[QUEUED];

static upipe_status queued_copy(upipe_ctx *c, void *dst, const void *src, size_t bytes)
{
    struct queue *q = &queues[c->team->rank];
    q->dst[q->n] = dst;
    q->src[q->n] = src;
    q->bytes[q->n++] = bytes;
    return UPIPE_OK;
}

/* Sync number `what` of the victim fails. */
static upipe_status queued_sync(upipe_ctx *c)
{
    const member *k = (const member *)c->user;
    struct queue *q = &queues[k->rank];
    ++q->syncs;
    for (int i = 0; i < q->n; ++i) memcpy(q->dst[i], q->src[i], q->bytes[i]);
    q->n = 0;
    if (k->what == q->syncs && k->rank == k->victim)
        return upipe_fail(&c->err, UPIPE_ERR_BACKEND, "the stream burns");
    return UPIPE_OK;
}

/* What a rank sends is made on its own queue, and spoilt as soon as the transfer is over. */
static void queued(member *k)
{
    upipe_ctx *c = &k->ctx;
    const size_t bytes = QUEUED * WORDS * 4;
    uint32_t made[QUEUED * WORDS];
    upipe_status s = UPIPE_OK;
    memset(&queues[k->rank], 0, sizeof queues[k->rank]);
    k->ops.copy = queued_copy;
    k->ops.sync = queued_sync;
    for (int round = 0; round < 20 && s == UPIPE_OK; ++round) {
        const int n = all_list(k, 1);
        memcpy(made, k->send, bytes);
        memset(k->send, 0xdd, bytes);
        CHECK_INT(queued_copy(c, k->send, made, bytes), UPIPE_OK);
        s = upipe_comm_start(c, c->team, k->list, n);
        if (round % k->ranks == k->rank)
            test_nap(0.001); /* the others read what start has left to the queue */
        if (s == UPIPE_OK) s = upipe_comm_wait(c, c->team);
        if (s == UPIPE_OK) all_come(k, 1);
        memset(k->send, 0xdd, bytes);
    }
    CHECK_INT(s, k->what == 0 ? UPIPE_OK : k->rank == k->victim ? UPIPE_ERR_BACKEND : UPIPE_ERR_ABORTED);
    if (k->what > 0) CHECK_TEXT(c->err.text, "the stream burns");
    CHECK_INT(c->team->quarantine, 0);
}

/* Syncs that fail: before a transfer, and behind the copies of one. */
static void test_queued(void)
{
    static const int failing[] = {0, 1, 2, 5, 8};
    for (size_t i = 0; i < sizeof failing / sizeof *failing; ++i)
        run_ranks(&threads, queued, QUEUED, 60, 1, failing[i]);
}

/* ---- faults: a reader that is slow, and one that never ends ---- */

static struct {
    int inside, copies, let_go; /* atomic, of the copy entries below */
} reader;

static upipe_status slow_copy(upipe_ctx *c, void *dst, const void *src, size_t bytes)
{
    if (__atomic_fetch_add(&reader.copies, 1, __ATOMIC_SEQ_CST) > 0) return plain_copy(c, dst, src, bytes);
    __atomic_store_n(&reader.inside, 1, __ATOMIC_SEQ_CST);
    while (c->team->ops.failure(c->team) == NULL) test_nap(0.001);
    test_nap(0.03);
    plain_copy(c, dst, src, bytes);
    __atomic_store_n(&reader.inside, 0, __ATOMIC_SEQ_CST);
    return UPIPE_OK;
}

static upipe_status stuck_copy(upipe_ctx *c, void *dst, const void *src, size_t bytes)
{
    __atomic_fetch_add(&reader.copies, 1, __ATOMIC_SEQ_CST);
    while (!__atomic_load_n(&reader.let_go, __ATOMIC_SEQ_CST)) test_nap(0.001);
    return plain_copy(c, dst, src, bytes);
}

enum { STUCK = 1, TWO_MESSAGES = 2 };

/* Rank 0 sends two blocks to rank 1, which is in no hurry. */
static void slow(member *k)
{
    upipe_ctx *c = &k->ctx;
    upipe_msg list[2] = {0};
    const int stuck = k->what & STUCK, n = k->what & TWO_MESSAGES ? 2 : 1;
    char sentence[96];
    snprintf(sentence, sizeof sentence, "rank %d waited 0.4 s in a transfer for rank %d to finish receiving",
             upi_comm_called(c->team, 0), upi_comm_called(c->team, 1));
    line_up(k, k->rank == 0 ? 0.4 : 60);
    for (int i = 0; i < n; ++i) {
        list[i].peer = 1 - k->rank;
        list[i].count = 2 / n;
        if (k->rank == 0) {
            list[i].send = k->send + 4 * i;
            list[i].send_bytes = list[i].send_stride = 16;
        } else {
            list[i].recv = k->recv + 4 * i;
            list[i].recv_bytes = list[i].recv_stride = 16;
        }
    }
    if (k->rank == 1) k->ops.copy = stuck ? stuck_copy : slow_copy;
    CHECK_STATUS(upipe_comm_start(c, c->team, list, n), UPIPE_OK, c->err);
    CHECK_REFUSED(upipe_comm_wait(c, c->team), k->rank == 0 ? UPIPE_ERR_TIMEOUT : UPIPE_ERR_ABORTED, c->err,
                  sentence);
    CHECK_INT(c->team->quarantine, k->rank == 0 && stuck);
    CHECK_INT(__atomic_load_n(&reader.copies, __ATOMIC_SEQ_CST),
              1); /* no block was begun after the failure */
    if (k->rank == 0) {
        CHECK_INT(__atomic_load_n(&reader.inside, __ATOMIC_SEQ_CST), 0);
        if (!stuck) memset(k->send, 0xdd, 32); /* free again: nobody reads */
        memset(list, 0xdd, sizeof list);       /* so is the list, in either case */
        __atomic_store_n(&reader.let_go, 1, __ATOMIC_SEQ_CST);
    }
    check_dead(k);
}

static upipe_status slow_part(int rank)
{
    member *k = part_member(TEAM, rank);
    k->what = the_parts.what;
    if (rank >= 2) slow(k);
    return UPIPE_OK;
}

/* With two messages the two ranks are the last of a world of four. */
static void test_slow(void)
{
    for (int what = 0; what <= (STUCK | TWO_MESSAGES); ++what) {
        memset(&reader, 0, sizeof reader);
        if (what & TWO_MESSAGES)
            run_parts(&threads, slow_part, what, -1);
        else
            run_ranks(&threads, slow, 2, 60, -1, what);
    }
}

/* ---- arguments, resources ---- */

static void test_arguments(void)
{
    upipe_threads none;
    upipe_err e;
    CHECK_STATUS(upipe_threads_init(&none, 0, 0, &e), UPIPE_ERR_ARG, e);
    CHECK_STATUS(upipe_threads_init(&none, -1, 0, &e), UPIPE_ERR_ARG, e);
    CHECK_REFUSED(upipe_threads_init(&none, UPIPE_THREADS_MAX + 1, 0, &e), UPIPE_ERR_ARG, e, "257");
    CHECK_STATUS(upipe_threads_init(&none, 2, -1, &e), UPIPE_ERR_ARG, e);
    CHECK_STATUS(upipe_threads_init(&none, 2, NAN, &e), UPIPE_ERR_ARG, e);
    upipe_threads_free(&none); /* a failed init leaves nothing, and free may be called all the same */
    CHECK_INT(alive, 0);
}

/* Each thing that init or run asks for fails in turn: nothing is left. */
static void test_resources(void)
{
    enum { RANKS = 3 };
    own_run o = {.victim = -1};
    upipe_status status[RANKS];
    upipe_ctx c = {0};
    upipe_err e;
    for (int at = 1; at <= 2 + 2 * RANKS; ++at) { /* one allocation, the team's lock, two things a rank */
        calls_made = 0;
        fail_at = at;
        CHECK_STATUS(upipe_threads_init(&o.team, RANKS, 0, &e),
                     at == 1 ? UPIPE_ERR_MEMORY : UPIPE_ERR_BACKEND, e);
        CHECK_INT(alive, 0);
        upipe_threads_free(&o.team);
        CHECK_INT(alive, 0);
    }
    for (int at = 1; at <= RANKS; ++at) { /* the thread of rank at - 1 cannot start */
        fail_at = 0;
        CHECK_STATUS(upipe_threads_init(&o.team, RANKS, 60, &e), UPIPE_OK, e);
        calls_made = 0;
        fail_at = at;
        CHECK_REFUSED(upipe_threads_run(&o.team, own_body, &o, status, &e), UPIPE_ERR_BACKEND, e,
                      "did not start: Resource temporarily unavailable");
        for (int r = 0; r < RANKS; ++r)
            CHECK_INT(status[r], r < at - 1 ? UPIPE_ERR_ABORTED : UPIPE_ERR_BACKEND);
        c.team = upipe_threads_comm(&o.team, 0);
        CHECK_TEXT(o.team.failure.text, "did not start: Resource temporarily unavailable");
        check_dead_calls(&c, o.team.failure.text);
        upipe_threads_free(&o.team);
        CHECK_INT(alive, 0);
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

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    TEST(test_self());
    TEST(test_self_copy());
    TEST(test_null());
    TEST(test_dry());
    TEST(test_parts());
    conform(&threads, 1);
    TEST_OF("calls", run_ranks(&threads, calls, RANKS_MAX, 0, -1, 0));
    TEST(test_run());
    TEST_OF("deserted", run_ranks(&threads, deserted, 12, 20, -1, 0));
    TEST_OF("alone", run_ranks(&threads, alone, 1, 20, -1, 0));
    TEST_OF("impatient", run_ranks(&threads, impatient, 2, 20, -1, 0));
    TEST(test_queued());
    TEST(test_slow());
    TEST(test_arguments());
    TEST(test_resources());
    return test_end("comm");
}

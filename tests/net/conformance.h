/* conformance.h -- what every transport promises, each property written once: a transport is a row of calls
 *
 *     static const transport tcp = {.name = "tcp", .can = NAMES_RANKS | ..., .open = ..., .join = ..., ...};
 *     conform(&tcp, 1);                        every property that the row can have, over its teams
 *
 * A body runs on every rank of a team, which may be a thread or a process: k is that rank. Every element names where it
 * comes from and where it must land, so that a misrouted one shows. Faults: a rank in turn stays away, fails, aborts or
 * disagrees. Asked are the status of every rank, the words of the reason, that nobody waits much longer than the
 * deadline, and that nothing is left behind. What one transport alone has is in its own program.
 */
#ifndef UPIPE_TEST_CONFORMANCE_H
#define UPIPE_TEST_CONFORMANCE_H

#include <pthread.h>
#include <signal.h>
#include <sys/time.h>
#include <unistd.h>

#include "upipe/net/upipe_net_threads.h"
#include "upipe/upipe_reduce.h"

#include "../lib/memory.h"
#include "../lib/transfers.h"

enum { WORDS = 8, RANKS_MAX = 64 };

/* What a transport can do. What it cannot is no promise of it. */
enum {
    NAMES_RANKS = 1 << 0,    /* a sentence of a deadline names those that have not come */
    TELLS_WHY = 1 << 1,      /* every rank hears the first reason */
    COMPARES_LISTS = 1 << 2, /* lists that do not match, and a transfer and another call, are MISMATCH */
    USES_TABLE = 1 << 3, /* sync before a transfer and copies of what stays here are the compute table's */
    ANY_THREAD = 1 << 4, /* any thread of a rank may abort */
    FREES_TOGETHER = 1 << 5, /* a rank frees its team when the others do */
    ENDS_ALONE = 1 << 6,     /* a transfer may end without the wait of a rank that has started it */
    EXPOSED = 1 << 7,        /* peers may access the buffers of a transfer that has failed */
    SHARED = 1 << 8,         /* a failure is known to all ranks at once; a run costs little */
    SEES_DEATH = 1 << 9,     /* the end of a process is a failure at once, not at the deadline */
    PARTS_FAIL = 1 << 10     /* the parts of a world fail together */
};

typedef struct transport transport;
typedef struct crew crew;

/* One rank of a team. */
typedef struct member {
    crew *all;
    const transport *t;
    int rank, ranks;
    int victim, what;      /* of a fault */
    upipe_ctx ctx;         /* ctx.user is this member */
    upipe_ops ops;         /* ctx.ops, where the transport has no table of its own */
    uint32_t *send, *recv; /* [words] each, of the table's memory */
    uint32_t *host;        /* [words], on their way */
    upipe_msg *list;       /* [20 * ranks + 12] */
    int fault;             /* SYNC, COPY: from now on the table fails so */
    int gathers;           /* all-gathers that it has made since count_gathers */
    upipe_status (*gather)(upipe_ctx *c, upipe_comm *comm, int64_t *all, const int64_t *mine, int n);
    int left;                   /* it has freed its team */
    upipe_status status, freed; /* of join, then what a body may say; of leave */
    void *own;                  /* the transport's */
} member;

/* A team, and what its ranks share where they are threads. */
struct crew {
    const transport *t;
    void (*body)(member *k);
    int ranks, victim, what;
    int first, step; /* rank i is process first + i * step, where ranks are processes */
    double deadline;
    int may_fail; /* calls are made to fail: nothing is asked of join and leave */
    void *own;    /* the transport's */
    pthread_barrier_t door;
    int said[RANKS_MAX]; /* threads_sum's */
    member member[RANKS_MAX];
};

/* Calls that are NULL do nothing. Those with a member are made by its rank. */
struct transport {
    const char *name;
    unsigned can;
    const int *teams, *crews; /* numbers of ranks, up to 0: those that behave, and those with a fault */
    int victims;              /* a case has so many, one after the other */
    int most, longest;        /* random lists: messages of a pair, words of a block */
    int rounds, draws_a_round;
    int large; /* words of a block that is long for it */
    int late;  /* words of a message that does not end without the receiver */
    uint64_t seed;
    void (*open)(crew *all);          /* before its ranks begin */
    void (*begin)(member *k);         /* the host's part */
    upipe_status (*join)(member *k);  /* this rank's end of the team: ctx.team */
    upipe_status (*leave)(member *k); /* frees it */
    void (*end)(member *k);
    void (*close)(crew *all); /* when all have ended */
    void (*clean)(void);      /* checks that nothing is left of all crews */
    void (*each)(int ranks, upipe_status (*body)(void *user, int rank), void *user);
    int (*sum)(member *k, int mine); /* over all ranks, which meet there by other means than the team's */
    void *(*memory)(member *k, size_t bytes); /* of the table; NULL: the host's */
    void (*put)(member *k, void *device, const void *host, size_t bytes);
    void (*get)(member *k, void *host, const void *device, size_t bytes);
    void (*merge)(void *words, int64_t bytes); /* ORs over processes; NULL: there is one */
};

enum { UP_FRONT, NO_REASON, BETWEEN, SYNC, COPY };

/* ---- ranks that are threads ---- */

__attribute__((unused)) static void each_thread(int ranks, upipe_status (*body)(void *user, int rank),
                                                void *user)
{
    upipe_threads starts;
    upipe_err e;
    CHECK_STATUS(upipe_threads_init(&starts, ranks, 0, &e), UPIPE_OK, e);
    CHECK_STATUS(upipe_threads_run(&starts, body, user, NULL, &e), UPIPE_OK, e);
    upipe_threads_free(&starts);
}

__attribute__((unused)) static int threads_sum(member *k, int mine)
{
    int sum = 0;
    k->all->said[k->rank] = mine;
    pthread_barrier_wait(&k->all->door);
    for (int r = 0; r < k->ranks; ++r) sum += k->all->said[r];
    pthread_barrier_wait(&k->all->door);
    return sum;
}

/* ---- a member ---- */

static void meet(member *k)
{
    (void)k->t->sum(k, 0);
}

static void put(member *k, void *device, const void *host, size_t bytes)
{
    if (k->t->put != NULL)
        k->t->put(k, device, host, bytes);
    else
        memcpy(device, host, bytes);
}

static void get(member *k, void *host, const void *device, size_t bytes)
{
    if (k->t->get != NULL)
        k->t->get(k, host, device, bytes);
    else
        memcpy(host, device, bytes);
}

static void fill(member *k, uint32_t *device, int byte, size_t bytes)
{
    memset(k->host, byte, bytes);
    put(k, device, k->host, bytes);
}

/* Buffers of so many words, in place of those it has. */
static void member_words(member *k, size_t words)
{
    k->host = (uint32_t *)zeroed(words * 4);
    k->send = (uint32_t *)(k->t->memory != NULL ? k->t->memory(k, words * 4) : zeroed(words * 4));
    k->recv = (uint32_t *)(k->t->memory != NULL ? k->t->memory(k, words * 4) : zeroed(words * 4));
}

static upipe_status table_sync(upipe_ctx *c)
{
    return ((member *)c->user)->fault == SYNC ? upipe_fail(&c->err, UPIPE_ERR_BACKEND, "the device is lost")
                                              : UPIPE_OK;
}

static upipe_status table_copy(upipe_ctx *c, void *dst, const void *src, size_t bytes)
{
    if (((member *)c->user)->fault == COPY) return upipe_fail(&c->err, UPIPE_ERR_BACKEND, "the copy is lost");
    memcpy(dst, src, bytes);
    return UPIPE_OK;
}

/* The end of a rank's team, by a body or after it. */
static void member_leave(member *k)
{
    if (!k->all->may_fail) k->ctx.team->deadline = 20;
    k->freed = k->t->leave != NULL ? k->t->leave(k) : UPIPE_OK;
    k->left = 1;
    if (!k->all->may_fail) CHECK_STATUS(k->freed, UPIPE_OK, k->ctx.err);
}

static void member_begin(member *k, crew *all, int rank)
{
    *k = (member){.all = all, .t = all->t, .rank = rank, .ranks = all->ranks, .victim = all->victim};
    k->what = all->what;
    k->ops.copy = table_copy;
    k->ops.sync = table_sync;
    k->ctx.ops = &k->ops;
    k->ctx.user = k;
    if (k->t->begin != NULL) k->t->begin(k);
    k->list = (upipe_msg *)zeroed((size_t)(20 * k->ranks + 12) * sizeof *k->list);
    member_words(k, (size_t)(k->ranks * 4 * WORDS));
}

static upipe_status member_main(void *user, int rank)
{
    crew *all = (crew *)user;
    member *k = &all->member[rank];
    test_rank = rank;
    member_begin(k, all, rank);
    k->status = k->t->join(k);
    if (!all->may_fail) CHECK_STATUS(k->status, UPIPE_OK, k->ctx.err);
    if (k->status == UPIPE_OK) {
        all->body(k);
        if (!k->left) member_leave(k);
    }
    if (k->t->end != NULL) k->t->end(k);
    test_rank = -1;
    return UPIPE_OK;
}

static void crew_open(crew *all)
{
    pthread_barrier_init(&all->door, NULL, (unsigned)all->ranks);
    if (all->t->open != NULL) all->t->open(all);
}

static void crew_close(crew *all)
{
    if (all->t->close != NULL) all->t->close(all);
    pthread_barrier_destroy(&all->door);
}

/* Runs a body on every rank of a team. No deadline may be overrun by much: they are below a second, or else long and not to be
 * met. (Valgrind on a busy machine needs half a minute.) */
static void crew_run(crew *all)
{
    const double began = test_seconds();
    test_at("%s, %d ranks, victim %d, case %d", all->t->name, all->ranks, all->victim, all->what);
    crew_open(all);
    all->t->each(all->ranks, member_main, all);
    crew_close(all);
    if (all->t->clean != NULL) all->t->clean();
    CHECK(test_seconds() - began < 50);
}

static crew the_crew; /* one at a time uses it */

static void run_ranks(const transport *t, void (*body)(member *k), int ranks, double deadline, int victim,
                      int what)
{
    the_crew = (crew){.t = t, .body = body, .ranks = ranks, .deadline = deadline, .victim = victim};
    the_crew.what = what;
    the_crew.step = 1;
    crew_run(&the_crew);
}

/* ---- calls of a member ---- */

/* Lists an all-to-all of `count` blocks of WORDS words a pair, the rank itself included; returns the number of messages. */
static int all_list(member *k, int count)
{
    const size_t bytes = (size_t)(k->ranks * count * WORDS) * 4;
    all_fill(k->host, k->rank, k->ranks, count * WORDS);
    put(k, k->send, k->host, bytes);
    fill(k, k->recv, 0xee, bytes);
    return all_messages(k->list, k->ranks, k->send, k->recv, count, WORDS);
}

/* A transfer of n messages, to its end. */
static upipe_status transfer(member *k, const upipe_msg *list, int n)
{
    upipe_ctx *c = &k->ctx;
    UPIPE_TRY(upipe_comm_start(c, c->team, list, n));
    UPIPE_TRY(upipe_comm_wait(c, c->team));
    return upi_comm_settle(c);
}

static void all_come(member *k, int count)
{
    get(k, k->host, k->recv, (size_t)(k->ranks * count * WORDS) * 4);
    all_check(k->host, k->rank, k->ranks, count * WORDS);
}

static upipe_status all_to_all(member *k, int count)
{
    UPIPE_TRY(transfer(k, k->list, all_list(k, count)));
    all_come(k, count);
    return UPIPE_OK;
}

enum { AT_TRANSFER, AT_BARRIER, AT_GATHER, AT_WAIT, CALLS };

static upipe_status call(member *k, int what)
{
    upipe_ctx *c = &k->ctx;
    int64_t mine = k->rank, all[RANKS_MAX];
    if (what == AT_BARRIER) return upipe_comm_barrier(c, c->team);
    if (what == AT_GATHER) return upipe_comm_all_gather(c, c->team, all, &mine, 1);
    if (!c->team->started) return all_to_all(k, 1);
    UPIPE_TRY(upipe_comm_wait(c, c->team));
    return upi_comm_settle(c);
}

/* All meet with patience, so that a short deadline that follows times the fault. A rank that is still inside that transfer
 * would hear of the fault there: all leave it first, by other means than the team's. */
static void line_up(member *k, double deadline)
{
    upipe_ctx *c = &k->ctx;
    c->team->deadline = 30;
    CHECK_STATUS(all_to_all(k, 1), UPIPE_OK, c->err);
    CHECK_STATUS(upipe_comm_barrier(c, c->team), UPIPE_OK, c->err);
    meet(k);
    c->team->deadline = deadline;
}

/* After a failure every call must fail at once, with the first reason. */
static void check_dead(member *k)
{
    const double began = test_seconds();
    const upipe_err *first = k->ctx.team->ops.failure(k->ctx.team);
    if (!CHECK(first != NULL)) return;
    check_dead_calls(&k->ctx, first->text);
    CHECK(test_seconds() - began < 5);
}

/* ---- ranks that behave ---- */

/* Shifts of several distances round a ring; adds up what is sent to others. */
static void shift_all(member *k, int64_t *sent)
{
    static const int steps[] = {-1, 0, 1, 2, 7, -6};
    upipe_ctx *c = &k->ctx;
    for (int i = 0; i < 6; ++i) {
        const int forth = ((k->rank + steps[i]) % k->ranks + k->ranks) % k->ranks;
        const int back = ((k->rank - steps[i]) % k->ranks + k->ranks) % k->ranks;
        for (int w = 0; w < WORDS; ++w) k->host[w] = word_of(k->rank, forth, w + i);
        put(k, k->send, k->host, WORDS * 4);
        fill(k, k->recv, 0xee, WORDS * 4);
        CHECK_STATUS(shift_start(c, c->team, k->recv, k->send, WORDS * 4, steps[i]), UPIPE_OK, c->err);
        CHECK_STATUS(upipe_comm_wait(c, c->team), UPIPE_OK, c->err);
        get(k, k->host, k->recv, WORDS * 4);
        for (int w = 0; w < WORDS; ++w) CHECK_INT(k->host[w], word_of(back, k->rank, w + i));
        if (forth != k->rank) *sent += WORDS * 4;
    }
}

static void calls(member *k)
{
    upipe_ctx *c = &k->ctx;
    int64_t mine[UPIPE_ALL_GATHER_MAX + 1] = {0}, sent = 0;
    CHECK(c->team->deadline == UPIPE_DEADLINE_DEFAULT);
    shift_all(k, &sent);
    for (int round = 0; round < 12; ++round) {
        CHECK_STATUS(gather_some(c, round), UPIPE_OK, c->err);
        if (round % 3 == 0) {
            CHECK_STATUS(all_to_all(k, 1 + round / 3), UPIPE_OK, c->err);
            sent += (int64_t)(k->ranks - 1) * (1 + round / 3) * WORDS * 4;
        }
        if (round % k->ranks == k->rank) test_nap(0.002);
        CHECK_STATUS(barrier_holds(c), UPIPE_OK, c->err);
    }
    CHECK_INT(c->team->sent_bytes, sent);
    CHECK_INT(c->team->moved_bytes, sent);
    CHECK_STATUS(upipe_comm_all_gather(c, c->team, c->team->gathered, mine, UPIPE_ALL_GATHER_MAX + 1),
                 UPIPE_ERR_ARG, c->err);
    CHECK_STATUS(upipe_comm_all_gather(c, c->team, c->team->gathered, mine, -1), UPIPE_ERR_ARG, c->err);
    CHECK_STATUS(upipe_comm_barrier(c, c->team), UPIPE_OK, c->err);
}

/* Wrong arguments are refused, and none of them hurts the team. */
static void arguments(member *k)
{
    upipe_ctx *c = &k->ctx;
    const upi_fields fields = fields_of("tokens", 1);
    upipe_msg bad = {.peer = k->ranks, .count = 1};
    int n;
    CHECK_STATUS(upipe_comm_wait(c, c->team), UPIPE_ERR_ARG, c->err);
    CHECK_STATUS(upipe_comm_start(c, c->team, &bad, 1), UPIPE_ERR_ARG, c->err);
    bad.peer = -1;
    CHECK_STATUS(upipe_comm_start(c, c->team, &bad, 1), UPIPE_ERR_ARG, c->err);
    bad.peer = 0;
    bad.count = 0;
    CHECK_STATUS(upipe_comm_start(c, c->team, &bad, 1), UPIPE_ERR_ARG, c->err);

    n = all_list(k, 1);
    CHECK_STATUS(upipe_comm_start(c, c->team, k->list, n), UPIPE_OK, c->err);
    CHECK_STATUS(upipe_comm_start(c, c->team, k->list, n), UPIPE_ERR_ARG, c->err);
    CHECK_STATUS(upipe_comm_barrier(c, c->team), UPIPE_ERR_ARG, c->err); /* nothing in between */
    CHECK_STATUS(upi_agree(c, c->team, &fields), UPIPE_ERR_ARG, c->err);
    CHECK_REFUSED(shift_start(c, c->team, k->recv, k->send, 8, 1), UPIPE_ERR_ARG, c->err,
                  "upipe_comm_wait comes first");
    CHECK_STATUS(upipe_comm_wait(c, c->team), UPIPE_OK, c->err);
    CHECK_STATUS(upi_comm_settle(c), UPIPE_OK, c->err);
    all_come(k, 1);
    CHECK_STATUS(transfer(k, k->list, 0), UPIPE_OK, c->err); /* nothing to say is legal */
}

/* Some messages, or none, from every rank to every rank, blocks with gaps, in any order. */
static void random_lists(member *k)
{
    upipe_ctx *c = &k->ctx;
    lists t = {.rank = k->rank, .ranks = k->ranks, .most = k->t->most, .longest = k->t->longest};
    const size_t bytes = words_in_lists(&t) * 4;
    const int rounds = k->t->rounds + (int)(test_draws_wanted() / k->t->draws_a_round);
    t.seed = (uint64_t)test_env("UPIPE_SEED", 1) + k->t->seed;
    member_words(k, bytes / 4);
    lists_begin(&t);
    for (int round = 0; round < rounds; ++round) {
        int n;
        fill(k, k->recv, 0xee, bytes);
        n = lists_next(&t, k->list, k->host, k->send, k->recv);
        put(k, k->send, k->host, t.sent_words * 4);
        if (test_below(&t.rng, 8) == 0) test_nap(0.0003);
        CHECK_STATUS(upipe_comm_start(c, c->team, k->list, n), UPIPE_OK, c->err);
        if (test_below(&t.rng, 8) == 0) test_nap(0.0003);
        CHECK_STATUS(upipe_comm_wait(c, c->team), UPIPE_OK, c->err);
        /* The transport is done with the send buffers: what is written here must reach nobody. */
        fill(k, k->send, 0xdd, t.sent_words * 4);
        get(k, k->host, k->recv, bytes);
        lists_check(&t, k->host);
    }
    CHECK(k->ranks == 1 || t.sent > 0);
    CHECK_INT(c->team->sent_bytes, t.sent);
    CHECK_INT(c->team->moved_bytes, t.moved);
}

/* Blocks that are long for the transport, with and without gaps on either side. */
static void large(member *k)
{
    enum { BLOCKS = 3, GAP = 16 }; /* words */
    upipe_ctx *c = &k->ctx;
    const int block = k->t->large, each = BLOCKS * (block + GAP);
    const size_t bytes = (size_t)k->ranks * (size_t)each * 4;
    int wrong = 0;
    member_words(k, bytes / 4);
    for (int kind = 0; kind < 4; ++kind) {
        const int from = block + (kind & 1 ? GAP : 0), to = block + (kind & 2 ? GAP : 0);
        const int words = (BLOCKS - 1) * to + block; /* from a rank, with the gaps between its blocks */
        fill(k, k->recv, 0xee, bytes);
        all_messages(k->list, k->ranks, k->send, k->recv, BLOCKS, block);
        for (int p = 0; p < k->ranks; ++p) {
            k->list[p].send = k->send + p * each;
            k->list[p].recv = k->recv + p * each;
            k->list[p].send_stride = (size_t)from * 4;
            k->list[p].recv_stride = (size_t)to * 4;
            for (int i = 0; i < BLOCKS * block; ++i)
                k->host[p * each + i / block * from + i % block] = word_of(k->rank, p, 0) + (uint32_t)i;
        }
        put(k, k->send, k->host, bytes);
        CHECK_STATUS(transfer(k, k->list, k->ranks), UPIPE_OK, c->err);
        get(k, k->host, k->recv, bytes);
        for (int p = 0; p < k->ranks; ++p)
            for (int i = 0; i < words; ++i) {
                const uint32_t came = word_of(p, k->rank, 0) + (uint32_t)(i / to * block + i % to);
                wrong += k->host[p * each + i] != (i % to < block ? came : 0xeeeeeeeeu);
            }
        CHECK_INT(wrong, 0);
    }
    CHECK_INT(c->team->moved_bytes, (int64_t)4 * (k->ranks - 1) * BLOCKS * block * 4);
}

/* One block, three times: no rows of a matrix. */
static void repeat(member *k)
{
    upipe_ctx *c = &k->ctx;
    const int next = (k->rank + 1) % k->ranks, back = (k->rank + k->ranks - 1) % k->ranks;
    int wrong = 0;
    for (int i = 0; i < WORDS; ++i) k->host[i] = word_of(k->rank, next, i);
    put(k, k->send, k->host, WORDS * 4);
    k->list[0] = (upipe_msg){.peer = next, .count = 3, .send = k->send, .send_bytes = WORDS * 4};
    k->list[1] = (upipe_msg){.peer = back, .count = 3, .recv = k->recv, .recv_bytes = WORDS * 4};
    k->list[1].recv_stride = WORDS * 4;
    CHECK_STATUS(transfer(k, k->list, 2), UPIPE_OK, c->err);
    get(k, k->host, k->recv, 3 * WORDS * 4);
    for (int i = 0; i < 3 * WORDS; ++i) wrong += k->host[i] != word_of(back, k->rank, i % WORDS);
    CHECK_INT(wrong, 0);
}

/* Slices of all ranks, equal or not, gathered in place and from elsewhere. */
static void slices(member *k)
{
    upipe_ctx *c = &k->ctx;
    const int n = k->ranks * WORDS - k->what;
    const size_t bytes = (size_t)n * 4;
    int64_t first, at, mine = upipe_reduce_slice(n, k->rank, k->ranks, &first);
    for (int apart = 0; apart < 2; ++apart) {
        uint32_t *own = apart ? k->send : k->recv + first;
        int wrong = 0;
        fill(k, k->recv, 0xee, bytes);
        for (int i = 0; i < mine; ++i) k->host[i] = word_of(k->rank, apart, i);
        put(k, own, k->host, (size_t)mine * 4);
        CHECK_STATUS(upi_slices_gather(c, c->team, k->recv, own, n, 4), UPIPE_OK, c->err);
        CHECK_STATUS(upi_comm_settle(c), UPIPE_OK, c->err);
        get(k, k->host, k->recv, bytes);
        for (int r = 0; r < k->ranks; ++r) {
            const int64_t theirs = upipe_reduce_slice(n, r, k->ranks, &at);
            for (int i = 0; i < theirs; ++i) wrong += k->host[at + i] != word_of(r, apart, i);
        }
        CHECK_INT(wrong, 0);
    }
    CHECK_INT(c->team->sent_bytes, 2 * (k->ranks - 1) * mine * 4);
    CHECK_INT(c->team->moved_bytes, 2 * (n - mine) * 4);
}

/* More seconds than the clock counts are patience. */
static void patient(member *k)
{
    k->ctx.team->deadline = INFINITY;
    if (k->rank == 1) test_nap(0.05);
    CHECK_STATUS(upipe_comm_barrier(&k->ctx, k->ctx.team), UPIPE_OK, k->ctx.err);
}

/* ---- descriptions ---- */

static upipe_status counted_gather(upipe_ctx *c, upipe_comm *comm, int64_t *all, const int64_t *mine, int n)
{
    member *k = (member *)c->user;
    ++k->gathers;
    return k->gather(c, comm, all, mine, n);
}

static void count_gathers(member *k)
{
    k->gather = k->ctx.team->ops.all_gather;
    k->ctx.team->ops.all_gather = counted_gather;
}

/* Compared when it changes, free while it stays. Then one rank differs: in a whole number, in a real one, or it goes back to
 * what all agreed on once while the others stay, and nobody gets through. */
static void agree(member *k)
{
    upipe_ctx *c = &k->ctx;
    const int odd = k->rank == k->victim;
    upi_fields f;
    upipe_status s;
    count_gathers(k);
    for (int i = 0; i < 12; ++i) {
        f = fields_of_block(32, "chunk", i / 3);
        CHECK_STATUS(upi_agree(c, c->team, &f), UPIPE_OK, c->err);
        CHECK_INT(k->gathers, i / 3 + 1);
    }
    f = fields_of_block(32, "chunk", 2); /* known from before, but others may not be back */
    CHECK_STATUS(upi_agree(c, c->team, &f), UPIPE_OK, c->err);
    f = fields_of_block(32, "stages", 2); /* another description with the same numbers */
    CHECK_STATUS(upi_agree(c, c->team, &f), UPIPE_OK, c->err);
    CHECK_INT(k->gathers, 6);
    if (k->what == 0) {
        f = fields_of_block(odd ? 31 : 32, "stages", 77);
        CHECK_REFUSED(upi_agree(c, c->team, &f), UPIPE_ERR_MISMATCH, c->err, "heads is 3");
        CHECK_TEXT(c->err.text, "31");
        CHECK_TEXT(c->err.text, "32");
    } else if (k->what == 1) {
        f = fields_of_real(odd ? 500000 : 0.5, 32, "stages", 2);
        CHECK_REFUSED(upi_agree(c, c->team, &f), UPIPE_ERR_MISMATCH, c->err, "500000");
        CHECK_TEXT(c->err.text, "0.5");
    } else {
        if (odd) f = fields_of_block(32, "chunk", 2);
        s = upi_agree(c, c->team, &f);
        if (s == UPIPE_OK) s = upipe_comm_barrier(c, c->team);
        CHECK_REFUSED(s, UPIPE_ERR_MISMATCH, c->err, "all-gather");
        CHECK_TEXT(c->err.text, "barrier");
    }
    check_dead(k);
}

/* Descriptions that alternate are compared while their order is new: two in turn; runs of one between another, which grow
 * longer; more than are kept. */
static void alternate(member *k)
{
    static const char *const orders[] = {"ABABABABAB", "AAAAABAAAAABAAAAAB", "AABAABAAAABAAAAB",
                                         "ABCDEABCDE"};
    static const int gathers[] = {3, 3, 5, 10};
    upipe_ctx *c = &k->ctx;
    count_gathers(k);
    for (size_t i = 0; i < sizeof orders / sizeof *orders; ++i) {
        const int before = k->gathers;
        for (const char *at = orders[i]; *at != 0; ++at) {
            const upi_fields f = fields_of("window", (int64_t)(100 * i) + *at);
            CHECK_STATUS(upi_agree(c, c->team, &f), UPIPE_OK, c->err);
        }
        CHECK_SAY(k->gathers - before == gathers[i], "%s: %d gathers, not %d", orders[i], k->gathers - before,
                  gathers[i]);
    }
}

enum { CHANGED, BEHIND, AHEAD, LONGER, STEPS };

/* A rank that alone has changed one of them, that skips one, repeats one, or takes them in another order is
 * found, though all of them are known. */
static void step(member *k)
{
    upipe_ctx *c = &k->ctx;
    const int odd = k->rank == k->victim;
    upipe_status s = UPIPE_OK;
    upi_fields f;
    int i;
    for (i = 0; i < 24; ++i) { /* A A B, A A B, ... */
        f = fields_of("window", i % 3 == 2);
        CHECK_STATUS(upi_agree(c, c->team, &f), UPIPE_OK, c->err);
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
    check_dead(k);
}

/* ---- faults: a rank that stays away ---- */

static void check_absent(member *k, upipe_status s)
{
    const unsigned can = k->t->can;
    const char *said = k->ctx.err.text;
    char name[48];
    CHECK_INT(k->ctx.err.status, s);
    if (k->rank == k->victim)
        CHECK_STATUS(s, UPIPE_ERR_ABORTED, k->ctx.err);
    else
        CHECK(s == UPIPE_ERR_TIMEOUT || s == UPIPE_ERR_ABORTED);
    if (can & NAMES_RANKS) {
        snprintf(name, sizeof name, "for rank %d to %s", k->victim, k->what == AT_WAIT ? "finish" : "come");
        if (k->what == AT_WAIT && can & ENDS_ALONE) snprintf(name, sizeof name, "for rank");
        CHECK_TEXT(said, name);
        CHECK_TEXT(said, "0.25 s");
    } else {
        CHECK_TEXT(said, s == UPIPE_ERR_TIMEOUT ? "waited 0.25 s in " : "has aborted");
    }
    /* one that comes when another has given up already has nothing in flight */
    if (!(can & EXPOSED) || s == UPIPE_ERR_TIMEOUT)
        CHECK_INT(k->ctx.team->quarantine, (can & EXPOSED) && k->what == AT_TRANSFER);
}

/* The victim comes when all others have given up; AT_WAIT: has begun, and comes to the end then. */
static void absent(member *k)
{
    const transport *t = k->t;
    upipe_ctx *c = &k->ctx;
    const int away = k->rank == k->victim, words = t->late > 4 * WORDS ? t->late : 4 * WORDS;
    upipe_status s;
    double began;
    int timeouts;
    member_words(k, (size_t)(k->ranks * words));
    line_up(k, 0.25);
    all_messages(k->list, k->ranks, k->send, k->recv, 1, t->late);
    if (k->what == AT_WAIT) CHECK_STATUS(upipe_comm_start(c, c->team, k->list, k->ranks), UPIPE_OK, c->err);
    meet(k);
    began = test_seconds();
    if (away) meet(k);
    if (away) c->team->deadline = 10;
    s = call(k, k->what);
    if (s == UPIPE_OK && (t->can & ENDS_ALONE) && (away || k->what == AT_WAIT))
        s = upipe_comm_barrier(c, c->team);
    if (!away) meet(k);
    CHECK(test_seconds() - began < 5);
    check_absent(k, s);
    check_dead(k);
    timeouts = t->sum(k, s == UPIPE_ERR_TIMEOUT);
    CHECK(timeouts >= 1 && (timeouts == 1 || !(t->can & SHARED)));
}

/* ---- faults: a rank that aborts, or whose device fails ---- */

static void check_failing(member *k, int what, const char *why)
{
    upipe_ctx *c = &k->ctx;
    upipe_status s;
    k->fault = what;
    if (what == UP_FRONT || what == NO_REASON) {
        test_nap(0.02);
        upipe_comm_abort(c->team, what == UP_FRONT ? why : NULL);
        upipe_comm_abort(c->team, "and says it again");
        s = upipe_comm_barrier(c, c->team);
    } else {
        s = upipe_comm_start(c, c->team, k->list, all_list(k, 1));
        if (what == BETWEEN) upipe_comm_abort(c->team, why);
        if (s == UPIPE_OK) s = upipe_comm_wait(c, c->team);
        /* between processes it is complete if all were there */
        if (s == UPIPE_OK && what == BETWEEN && !(k->t->can & (SHARED | EXPOSED)))
            s = upipe_comm_barrier(c, c->team);
    }
    CHECK_REFUSED(s, what == SYNC || what == COPY ? UPIPE_ERR_BACKEND : UPIPE_ERR_ABORTED, c->err, why);
    if (!c->team->quarantine) fill(k, k->send, 0xdd, (size_t)k->ranks * WORDS * 4); /* its own again */
}

static void failing(member *k, int what)
{
    static const char *const whys[] = {"the host has had enough", "aborted by the host",
                                       "the host has had enough", "the device is lost", "the copy is lost"};
    upipe_ctx *c = &k->ctx;
    double began;
    upipe_status s;
    line_up(k, 20);
    began = test_seconds();
    if (k->rank == k->victim) {
        check_failing(k, what, whys[what]);
    } else {
        s = all_to_all(k, 1);
        if (s == UPIPE_OK && (what == BETWEEN || what == COPY)) /* its part was under way */
            s = upipe_comm_barrier(c, c->team);
        CHECK_REFUSED(s, UPIPE_ERR_ABORTED, c->err, k->t->can & TELLS_WHY ? whys[what] : "has aborted");
    }
    CHECK(test_seconds() - began < 10);
    if (!(k->t->can & EXPOSED) || (k->rank == k->victim && what != BETWEEN))
        CHECK_INT(c->team->quarantine, 0);
    check_dead(k);
}

static void aborts(member *k)
{
    failing(k, k->what);
}

static void engine(member *k)
{
    failing(k, SYNC + k->what);
}

static void *abort_main(void *comm)
{
    test_nap(0.05);
    upipe_comm_abort((upipe_comm *)comm, "another thread has had enough");
    return NULL;
}

/* Another thread of the victim's aborts while all wait for the last rank, which comes when they have heard of it. */
static void other_thread(member *k)
{
    upipe_ctx *c = &k->ctx;
    const int last = k->rank == k->ranks - 1;
    double began;
    pthread_t other;
    line_up(k, 20);
    began = test_seconds();
    if (k->rank == k->victim) CHECK_INT(pthread_create(&other, NULL, abort_main, c->team), 0);
    if (last) meet(k);
    CHECK_REFUSED(upipe_comm_barrier(c, c->team), UPIPE_ERR_ABORTED, c->err, "another thread has had enough");
    if (!last) meet(k);
    if (k->rank == k->victim) pthread_join(other, NULL);
    CHECK(test_seconds() - began < 10);
    check_dead(k);
}

/* ---- faults: ranks that disagree ---- */

/* Another number of numbers, or another call: of the victim, and of the others. COMPARES_LISTS: transfers too. */
static void odd_call(member *k, int what)
{
    static const int kinds[][2] = {{AT_GATHER, AT_GATHER},   {AT_BARRIER, AT_GATHER},
                                   {AT_GATHER, AT_BARRIER},  {AT_TRANSFER, AT_BARRIER},
                                   {AT_TRANSFER, AT_GATHER}, {AT_BARRIER, AT_TRANSFER},
                                   {AT_GATHER, AT_TRANSFER}};
    static const char *const names[] = {"a transfer", "a barrier", "an all-gather"};
    upipe_ctx *c = &k->ctx;
    int64_t mine[4] = {1, 2, 3, 4}, all[4 * RANKS_MAX];
    const int odd = k->rank == k->victim;
    upipe_status s;
    char words[48];
    line_up(k, 20);
    if (what == 0) {
        s = upipe_comm_all_gather(c, c->team, all, mine, odd ? 3 : 4);
        CHECK_REFUSED(s, UPIPE_ERR_MISMATCH, c->err, "gathers 4");
        snprintf(words, sizeof words, "rank %d gathers 3", k->victim);
    } else {
        s = call(k, kinds[what][!odd]);
        CHECK_REFUSED(s, UPIPE_ERR_MISMATCH, c->err, names[kinds[what][0]]);
        CHECK_TEXT(c->err.text, names[kinds[what][1]]);
        snprintf(words, sizeof words, "rank %d is in", k->victim);
        if (!strstr(c->err.text, words)) snprintf(words, sizeof words, "and rank %d in", k->victim);
    }
    CHECK_TEXT(c->err.text, words);
    check_dead(k);
}

static void odd_meeting(member *k)
{
    odd_call(k, k->what);
}

static void odd_kind(member *k)
{
    odd_call(k, 3 + k->what);
}

enum { BYTES, BLOCKS, HALF_BLOCKS, NO_SEND, NO_RECV, TWO_SENDS, NINTH, ITSELF, MISMATCHES };

/* Changes an all-to-all of n messages: what the victim does to its message to `other`. NINTH: of many messages between the two
 * the last differs, behind what a header spells out. Returns the number of messages. */
static int odd_list(member *k, upipe_msg *list, int n, int what)
{
    const int other = (k->victim + 1) % k->ranks, is_odd = k->rank == k->victim;
    upipe_msg *odd = &list[other];
    if (what == NINTH)
        for (int i = 0; i < 11; ++i, ++n) {
            list[n] = list[is_odd ? other : k->victim];
            list[n].send_bytes = list[n].recv_bytes = is_odd || k->rank == other ? 4 : 0;
            if (i == 10 && is_odd) list[n].send_bytes = 8;
        }
    if (!is_odd) return n;
    if (what == BYTES) odd->send_bytes -= 4;
    if (what == BLOCKS || what == HALF_BLOCKS) { /* two blocks sent, and one received as before */
        list[n] = *odd;
        list[n].recv_bytes = odd->send_bytes = 0;
        list[n].send_bytes = list[n].send_stride =
            what == BLOCKS ? 32 : 16; /* halves: as many bytes in all */
        list[n++].count = 2;
    }
    if (what == NO_SEND) odd->send_bytes = 0;
    if (what == NO_RECV) odd->recv_bytes = 0;
    if (what == TWO_SENDS) {
        list[n] = *odd;
        list[n++].recv_bytes = 0;
    }
    if (what == ITSELF) list[k->victim].recv_bytes = 0;
    return n;
}

/* The sentence: "rank ... sends ... to rank ..., which receives ...". Where headers spell out less, it is another one. */
static int says_mismatch(const member *k, int what)
{
    static const char *const sends[] = {
        "1 blocks of 28 bytes", "2 blocks of 32 bytes", "2 blocks of 16 bytes", "0 messages",
        "1 messages",           "2 messages",           "1 blocks of 8 bytes",  "1 messages"};
    static const char *const receives[] = {"1 of 32", "1 of 32", "1 of 32", "1", "0", "1", "1 of 4", "0"};
    const int other = (k->victim + 1) % k->ranks;
    const int from = what == NO_RECV ? other : k->victim;
    const int to = what == NO_RECV || what == ITSELF ? k->victim : other;
    char words[96];
    snprintf(words, sizeof words, "rank %d sends %s to rank %d, which receives %s", from, sends[what], to,
             receives[what]);
    return strstr(k->ctx.err.text, words) != NULL ||
           (what == NINTH && strstr(k->ctx.err.text, "in other blocks") != NULL) ||
           (what == ITSELF && strstr(k->ctx.err.text, "that it does not receive") != NULL);
}

/* Every case twice: in any order, and with the victim first, so that the others find it in their start, which leaves it to
 * wait. */
static void mismatch(member *k)
{
    upipe_ctx *c = &k->ctx;
    const int what = k->what / 2, victim_first = k->what % 2, is_odd = k->rank == k->victim;
    upipe_status s;
    int n;
    line_up(k, 20);
    n = odd_list(k, k->list, all_list(k, 1), what);
    if (victim_first && !is_odd) meet(k);
    s = upipe_comm_start(c, c->team, k->list, n); /* fails if the others have found it already */
    if (victim_first && is_odd) meet(k);
    if (s == UPIPE_OK) s = upipe_comm_wait(c, c->team);
    /* A rank that has no part in it may complete; it hears of it in its next call. */
    if (s == UPIPE_OK) s = upipe_comm_barrier(c, c->team);
    CHECK_STATUS(s, UPIPE_ERR_MISMATCH, c->err);
    CHECK_SAY(says_mismatch(k, what), "case %d: \"%s\"", what, c->err.text);
    CHECK_INT(c->team->quarantine, 0);
    memset(k->list, 0xdd, (size_t)n * sizeof *k->list); /* nobody may read it any more */
    check_dead(k);
}

/* Ranks 0 and 1 disagree; the others have nothing to do with them, and may complete: their next call tells. */
static void bystander(member *k)
{
    upipe_ctx *c = &k->ctx;
    const int peer = (k->rank ^ 1) < k->ranks ? k->rank ^ 1 : k->rank;
    upipe_msg *msg = &k->list[peer];
    upipe_status s;
    line_up(k, 20);
    all_list(k, 1);
    if (k->rank == 0) msg->send_bytes = 12;
    s = upipe_comm_start(c, c->team, msg, 1);
    if (s == UPIPE_OK) s = upipe_comm_wait(c, c->team);
    CHECK(k->rank > 1 || s == UPIPE_ERR_MISMATCH);
    if (s == UPIPE_OK) s = upipe_comm_barrier(c, c->team);
    CHECK_REFUSED(s, UPIPE_ERR_MISMATCH, c->err,
                  "rank 0 sends 1 blocks of 12 bytes to rank 1, which receives 1 of 32");
    check_dead(k);
}

/* ---- faults: a rank that frees its team late, or dies ---- */

/* The victim frees its team after the others have given it up. */
static void late_free(member *k)
{
    char name[48];
    snprintf(name, sizeof name, "for rank %d to free the team", k->victim);
    line_up(k, 0.2);
    if (k->rank == k->victim) {
        meet(k);
        return;
    }
    CHECK_REFUSED(k->t->leave(k), UPIPE_ERR_BACKEND, k->ctx.err, name);
    k->left = 1;
    meet(k);
}

static void die(int signal)
{
    (void)signal;
    raise(SIGKILL);
}

enum { BEFORE, STARTED, WITHIN, AFTER, IN_BARRIER, DEATHS, STOPPED = DEATHS, ENDURE };

/* The victim's last deeds. Returns whether it goes on with calls. */
static int doomed(member *k, int what, const upipe_msg *list, int round)
{
    struct itimerval t = {.it_value.tv_usec = 40000};
    if (k->rank != k->victim || what == ENDURE) return 1;
    if (what == STOPPED) {
        raise(SIGSTOP); /* another process continues it */
        return 0;
    }
    if (what == BEFORE || (what == AFTER && round == 1)) die(0);
    if (what == STARTED) {
        upipe_comm_start(&k->ctx, k->ctx.team, list, k->ranks);
        die(0);
    }
    if (round == 0 && what != AFTER) {
        signal(SIGALRM, die);
        setitimer(ITIMER_REAL, &t, NULL);
    }
    return 1;
}

/* Ranks that are processes. The victim dies, or stops for longer than the deadline; the others make transfers, or barriers,
 * which must return in time and say who is missing. ENDURE: all live, and a script cuts the link between them, or stops one. */
__attribute__((unused)) static void death(member *k)
{
    upipe_ctx *c = &k->ctx;
    const int what = k->what, words = what == ENDURE ? 1 << 12 : k->t->large;
    const int at_once = k->t->can & SEES_DEATH && what < DEATHS;
    upipe_status s = UPIPE_OK;
    double last = 0;
    char name[16];
    CHECK_STATUS(all_to_all(k, 1), UPIPE_OK, c->err);
    CHECK_STATUS(upipe_comm_barrier(c, c->team), UPIPE_OK, c->err);
    member_words(k, (size_t)k->ranks * (size_t)words);
    all_messages(k->list, k->ranks, k->send, k->recv, 1, words);
    c->team->deadline = at_once ? 20 : 1;
    if (what == ENDURE) printf("running, process %d\n", (int)getpid()), fflush(stdout);
    for (int round = 0; s == UPIPE_OK; ++round) {
        if (!doomed(k, what, k->list, round)) {
            CHECK_REFUSED(upipe_comm_barrier(c, c->team), UPIPE_ERR_ABORTED, c->err, "for rank");
            return;
        }
        last = test_seconds();
        s = what == IN_BARRIER ? upipe_comm_barrier(c, c->team) : transfer(k, k->list, k->ranks);
    }
    last = test_seconds() - last;
    CHECK_SAY(last < 7, "case %d: returned after %g s", what, last);
    CHECK_SAY(s == (at_once ? UPIPE_ERR_BACKEND : UPIPE_ERR_TIMEOUT) || s == UPIPE_ERR_ABORTED,
              "case %d: %s: %s", what, upipe_status_name(s), c->err.text);
    snprintf(name, sizeof name, " %d ", k->victim);
    if (what != ENDURE) CHECK_TEXT(c->err.text, name);
    check_dead(k);
}

/* ---- parts of a world: neighbours are a team, ranks at the same place of all teams a ring ---- */

enum { WORLD, SIDE, TEAM, RING, PARTS }; /* SIDE: of all, beside the world */

static struct {
    const transport *t;
    int team, rings; /* ranks of a team, and of a ring */
    int what, victim;
    upipe_status (*body)(int rank);
    crew crews[8]; /* the world, the side communicator, the teams, the rings */
} the_parts;

static member *part_member(int which, int rank)
{
    const int team = rank / the_parts.team, place = rank % the_parts.team;
    if (which == TEAM) return &the_parts.crews[TEAM + team].member[place];
    if (which == RING) return &the_parts.crews[TEAM + the_parts.rings + place].member[team];
    return &the_parts.crews[which].member[rank];
}

static upipe_comm *part_comm(int which, int rank)
{
    return part_member(which, rank)->ctx.team;
}

static upipe_status part_join(void *user, int rank)
{
    (void)user;
    for (int which = 0; which < PARTS; ++which) {
        member *k = part_member(which, rank);
        crew *all = &the_parts.crews[which < TEAM    ? which
                                     : which == TEAM ? TEAM + rank / the_parts.team
                                                     : TEAM + the_parts.rings + rank % the_parts.team];
        member_begin(k, all, (int)(k - all->member));
        CHECK_STATUS(the_parts.t->join(k), UPIPE_OK, k->ctx.err);
        if (which != WORLD) upipe_comm_part(k->ctx.team, part_comm(WORLD, rank), all->first, all->step);
    }
    return UPIPE_OK;
}

/* The body, and the end of all parts, the world last. */
static upipe_status part_main(void *user, int rank)
{
    (void)user;
    if (the_parts.body != NULL) CHECK_INT(the_parts.body(rank), UPIPE_OK);
    for (int which = PARTS; which-- > 0;) {
        member_leave(part_member(which, rank));
        if (the_parts.t->end != NULL) the_parts.t->end(part_member(which, rank));
    }
    return UPIPE_OK;
}

static void parts_open(const transport *t, int team, int rings)
{
    the_parts.t = t;
    the_parts.team = team;
    the_parts.rings = rings;
    for (int i = 0; i < TEAM + rings + team; ++i) {
        crew *all = &the_parts.crews[i];
        *all = (crew){.t = t, .ranks = team * rings, .step = 1, .deadline = 60};
        if (i >= TEAM + rings)
            all->ranks = rings, all->first = i - TEAM - rings, all->step = team;
        else if (i >= TEAM)
            all->ranks = team, all->first = (i - TEAM) * team;
        crew_open(all);
    }
    t->each(team * rings, part_join, NULL);
}

static void parts_close(upipe_status (*body)(int rank))
{
    the_parts.body = body;
    the_parts.t->each(the_parts.team * the_parts.rings, part_main, NULL);
    for (int i = TEAM + the_parts.rings + the_parts.team; i-- > 0;) crew_close(&the_parts.crews[i]);
    if (the_parts.t->clean != NULL) the_parts.t->clean();
}

static void run_parts(const transport *t, upipe_status (*body)(int rank), int what, int victim)
{
    parts_open(t, 2, 2);
    the_parts.what = what;
    the_parts.victim = victim;
    test_at("%s, parts, victim %d, case %d", t->name, victim, what);
    parts_close(body);
}

/* Ranks of a part that disagree are named as the job calls them, over whole numbers and real ones: 2 and 3 are a team, 1 and
 * 3 a ring. */
static upipe_status named(int rank)
{
    const int real = the_parts.what % 2, in_ring = the_parts.what / 2, other = in_ring ? 1 : 2;
    const upi_fields f = real ? fields_of_real(rank + 0.5, 32, "chunk", 1) : fields_of("tokens", rank);
    upipe_ctx *c = &part_member(in_ring ? RING : TEAM, rank)->ctx;
    char words[96];
    if (rank != other && rank != 3) return UPIPE_OK;
    snprintf(words, sizeof words, "tokens is %d%s on rank %d and 3%s on rank 3", other, real ? ".5" : "",
             other, real ? ".5" : "");
    CHECK_REFUSED(upi_agree(c, c->team, &f), UPIPE_ERR_MISMATCH, c->err, words);
    return UPIPE_OK;
}

/* The victim frees its ring, and is named as the job calls it to the other one, which goes on. */
static upipe_status early_free(int rank)
{
    member *k = part_member(RING, rank);
    const double began = test_seconds();
    char name[48];
    snprintf(name, sizeof name, "rank %d has freed its team", the_parts.victim);
    k->ctx.team->deadline = 20;
    if (rank != (the_parts.victim ^ 2)) return UPIPE_OK; /* the victim too */
    CHECK_REFUSED(upipe_comm_barrier(&k->ctx, k->ctx.team), UPIPE_ERR_MISMATCH, k->ctx.err, name);
    CHECK(test_seconds() - began < 10);
    check_dead(k);
    return UPIPE_OK;
}

/* The world loses a rank. Its mate waits for it in their team; who is across from the mate waits for the mate, in their ring or
 * in the side communicator of all; the last one for that one, in their team, and its deadline is over first. All say which
 * rank is lost, and all parts have failed. */
static upipe_status lost(int rank)
{
    const int mate = the_parts.victim ^ 1, across = mate ^ 2;
    const upipe_ops ops = {0};
    upipe_ctx c = {.ops = &ops};
    upipe_comm *of[PARTS], *comm;
    char name[48], text[sizeof c.err.text];
    upipe_status s;
    for (int i = 0; i < PARTS; ++i) {
        of[i] = part_comm(i, rank);
        CHECK_INT(upi_comm_called(of[i], of[i]->rank), rank);
        of[i]->deadline = 20;
        CHECK_STATUS(upipe_comm_barrier(&c, of[i]), UPIPE_OK, c.err);
    }
    snprintf(name, sizeof name, " for rank %d to come", the_parts.victim);
    comm = of[rank == across ? the_parts.what : TEAM];
    if (rank == the_parts.victim) {
        test_nap(1.3);
    } else {
        comm->deadline = rank == mate ? 1.2 : rank == across ? 1 : 0.8;
        s = upipe_comm_barrier(&c, comm);
        CHECK(s == UPIPE_ERR_TIMEOUT || s == UPIPE_ERR_ABORTED);
        CHECK_TEXT(c.err.text, name);
        memcpy(text, c.err.text, sizeof text);
        CHECK_REFUSED(upipe_comm_barrier(&c, of[SIDE]), UPIPE_ERR_ABORTED, c.err, text);
    }
    /* nobody comes to the world's barrier, so that it ends by the failure; to the team's the victim's mate has come */
    CHECK_REFUSED(upipe_comm_barrier(&c, of[WORLD]), UPIPE_ERR_ABORTED, c.err, name);
    CHECK_REFUSED(upipe_comm_barrier(&c, of[TEAM]), UPIPE_ERR_ABORTED, c.err, name);
    return UPIPE_OK;
}

/* ---- all of them ---- */

enum { TEAMS, CREW, CREWS }; /* of the row: all teams, the first crew, all crews */

typedef struct property {
    const char *name;
    void (*body)(member *k);
    int ranks, cases;
    int again;      /* who is first is chance: so often where a run costs little */
    unsigned needs; /* of the transport */
} property;

static const property properties[] = {
    {"calls", calls, TEAMS, 1, 1, 0},
    {"arguments", arguments, TEAMS, 1, 1, 0},
    {"random_lists", random_lists, TEAMS, 1, 1, 0},
    {"large", large, TEAMS, 1, 1, 0},
    {"repeat", repeat, TEAMS, 1, 1, 0},
    {"slices", slices, TEAMS, 2, 1, 0},
    {"patient", patient, CREW, 1, 1, 0},
    {"alternate", alternate, CREW, 1, 1, 0},
    {"agree", agree, CREW, 3, 3, 0},
    {"step", step, CREW, STEPS, 1, 0},
    {"absent", absent, CREW, CALLS, 1, 0},
    {"aborts", aborts, CREW, BETWEEN + 1, 1, 0},
    {"engine", engine, CREW, 2, 1, USES_TABLE},
    {"other_thread", other_thread, CREW, 1, 1, ANY_THREAD},
    {"odd_meeting", odd_meeting, CREWS, 3, 1, 0},
    {"odd_kind", odd_kind, CREWS, 4, 1, COMPARES_LISTS},
    {"mismatch", mismatch, CREWS, 2 * MISMATCHES, 1, COMPARES_LISTS},
    {"bystander", bystander, CREW, 1, 7, COMPARES_LISTS},
    {"late_free", late_free, CREW, 1, 1, FREES_TOGETHER},
};

static void conform_to(const transport *t, const property *p, int ranks)
{
    static int turn; /* of victims */
    const int faulty = p->ranks != TEAMS, victims = ranks < t->victims ? ranks : t->victims;
    const int times = (faulty ? victims : 1) * (t->can & SHARED ? p->again : 1);
    ++turn;
    for (int i = 0; i < times; ++i)
        for (int what = 0; what < p->cases; ++what)
            TEST_OF(p->name, run_ranks(t, p->body, ranks, faulty ? 20 : 0, (turn + i + what) % ranks, what));
}

/* Holds a transport to every property that it can have; `faults`: to those of ranks that fail too. */
static void conform(const transport *t, int faults)
{
    for (size_t i = 0; i < sizeof properties / sizeof *properties; ++i) {
        const property *p = &properties[i];
        const int *ranks = p->ranks == TEAMS ? t->teams : t->crews;
        if ((p->needs & ~t->can) != 0 || (p->ranks != TEAMS && !faults)) continue;
        for (; *ranks > 0; ++ranks) {
            conform_to(t, p, *ranks);
            if (p->ranks == CREW) break;
        }
    }
    if (!(t->can & PARTS_FAIL) || !faults) return;
    for (int i = 0; i < 4; ++i) TEST_OF("named", run_parts(t, named, i, -1));
    for (int i = 0; i < 2; ++i) TEST_OF("lost", run_parts(t, lost, i ? SIDE : RING, 3 * i));
    if (t->can & FREES_TOGETHER) TEST_OF("early_free", run_parts(t, early_free, 0, 3));
}

#endif

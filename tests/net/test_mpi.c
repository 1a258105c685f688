/* test_mpi.c -- the transport over MPI, one process a rank; run_mpi.py starts it under mpirun
 *
 *     test_mpi all       every rank stays alive: exact data, agreement, faults that a host can make
 *     test_mpi kill      ranks die one after the other: before, within and after a call
 *     test_mpi data      the part of `all` without faults, for a link that is slow and loses packets
 *     test_mpi endure    ranks make transfers until a script cuts the link between them, or stops a rank
 *
 * Every element names where it comes from and where it must land. Each part has a communicator of its own. A
 * rank prints its verdict; the script counts them.
 */
#define _POSIX_C_SOURCE 200809L
#define _XOPEN_SOURCE   700
#include "upipe/net/upipe_net_mpi.h"
#include "upipe/net/upipe_net_threads.h"
#include "upipe/upipe_session.h"

#include <signal.h>
#include <sys/time.h>
#include <unistd.h>

#include "../lib/grid.h"
#include "../lib/lost.h"

/* The block's runner, with this process as one rank where over_mpi, the world, is set. */
static upipe_comm *over_mpi, *team_mpi, *ring_mpi;

static upipe_comm *world_comm(upipe_threads *world, int rank)
{
    return over_mpi != NULL ? over_mpi : upipe_threads_comm(world, rank);
}

static void grid_use(upipe_threads_grid *g, int rank, upipe_ctx *c)
{
    upipe_threads_grid_use(g, rank, c);
    if (over_mpi != NULL) c->team = team_mpi, c->ring = ring_mpi;
}

static upipe_status world_run(upipe_threads *world, upipe_status (*body)(void *user, int rank), void *user,
                              upipe_status *statuses, upipe_err *e);
#define upipe_threads_comm     world_comm
#define upipe_threads_run      world_run
#define upipe_threads_grid_use grid_use
#include "../lib/runner.h"
#include "../lib/transfers.h"
#undef upipe_threads_comm
#undef upipe_threads_run
#undef upipe_threads_grid_use

static upipe_status world_run(upipe_threads *world, upipe_status (*body)(void *user, int rank), void *user,
                              upipe_status *statuses, upipe_err *e)
{
    run_state *state = (run_state *)user;
    upipe_status s;
    int rank;
    if (over_mpi == NULL) return upipe_threads_run(world, body, user, statuses, e);
    rank = over_mpi->rank;
    s = body(user, rank);
    for (int r = 0; r < over_mpi->ranks; ++r) {
        MPI_Allreduce(MPI_IN_PLACE, &state->own[r].moved, 1, MPI_INT64_T, MPI_SUM, MPI_COMM_WORLD);
        statuses[r] = s;
    }
    return s;
}

/* ---- a rank: a communicator of its own for each part ---- */

enum { RANKS_MAX = 16, WORDS = 8 };

typedef struct part_buf {
    MPI_Comm mpi;
    upipe_mpi team;
    upipe_ops ops;
    upipe_ctx ctx;
    int rank, ranks;
    uint32_t send[RANKS_MAX][WORDS], recv[RANKS_MAX][WORDS];
    upipe_msg list[2 * RANKS_MAX];
} part_buf;

static part_buf the_buf;
static int sync_fails, copy_fails;

static upipe_status test_sync(upipe_ctx *c)
{
    return sync_fails ? upipe_fail(&c->err, UPIPE_ERR_BACKEND, "the device is lost") : UPIPE_OK;
}

static upipe_status test_copy(upipe_ctx *c, void *dst, const void *src, size_t bytes)
{
    if (copy_fails) return upipe_fail(&c->err, UPIPE_ERR_BACKEND, "the copy is lost");
    memcpy(dst, src, bytes);
    return UPIPE_OK;
}

static part_buf *part_on(MPI_Comm mpi, double deadline)
{
    part_buf *k = &the_buf;
    upipe_err e;
    *k = (part_buf){.mpi = mpi};
    MPI_Comm_set_errhandler(k->mpi, MPI_ERRORS_RETURN);
    CHECK_STATUS(upipe_mpi_init(&k->team, k->mpi, 7, deadline, &e), UPIPE_OK, e);
    k->ops.copy = test_copy;
    k->ops.sync = test_sync;
    k->ctx.ops = &k->ops;
    k->ctx.team = &k->team.comm;
    k->rank = k->team.comm.rank;
    k->ranks = k->team.comm.ranks;
    sync_fails = copy_fails = 0;
    return k;
}

static part_buf *part_begin(double deadline)
{
    MPI_Comm mpi;
    MPI_Comm_dup(MPI_COMM_WORLD, &mpi);
    return part_on(mpi, deadline);
}

static void part_end(part_buf *k)
{
    upipe_err e;
    CHECK_STATUS(upipe_mpi_free(&k->team, &e), UPIPE_OK, e);
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Comm_free(&k->mpi);
}

/* Lists an all-to-all of WORDS words a pair, the rank itself included; returns the number of messages. */
static int all_list(part_buf *k)
{
    all_fill(k->send[0], k->rank, k->ranks, WORDS);
    memset(k->recv, 0xee, sizeof k->recv);
    return all_messages(k->list, k->ranks, k->send[0], k->recv[0], 1, WORDS);
}

static upipe_status all_to_all(part_buf *k)
{
    upipe_ctx *c = &k->ctx;
    UPIPE_TRY(upipe_comm_start(c, c->team, k->list, all_list(k)));
    UPIPE_TRY(upipe_comm_wait(c, c->team));
    all_check(k->recv[0], k->rank, k->ranks, WORDS);
    return UPIPE_OK;
}

/* All meet with patience, so that a short deadline that follows times the fault. */
static void line_up(part_buf *k, double deadline)
{
    upipe_ctx *c = &k->ctx;
    c->team->deadline = 30;
    CHECK_STATUS(all_to_all(k), UPIPE_OK, c->err);
    MPI_Barrier(k->mpi);
    c->team->deadline = deadline;
}

/* After a failure every call must fail at once, with the first reason. */
static void check_dead(part_buf *k)
{
    upipe_ctx *c = &k->ctx;
    double began = test_seconds();
    check_dead_calls(c, NULL);
    CHECK(test_seconds() - began < 5);
    c->team->deadline = 5; /* of free: a rank that sleeps receives its headers late */
}

/* ---- ranks that behave ---- */

/* 0 to 10 messages from every rank to every rank, blocks with gaps, in any order. */
static void test_random(int64_t fragment)
{
    part_buf *k = part_begin(20);
    upipe_ctx *c = &k->ctx;
    lists t = {.rank = k->rank, .ranks = k->ranks, .most = 10, .longest = 1000};
    const size_t bytes = words_in_lists(&t) * 4;
    uint32_t *send = (uint32_t *)buffer(bytes), *recv = (uint32_t *)buffer(bytes);
    upipe_msg *list = (upipe_msg *)zeroed((size_t)(20 * k->ranks) * sizeof *list);
    k->team.fragment = fragment;
    t.seed = (uint64_t)test_env("UPIPE_SEED", 1) + (uint64_t)fragment;
    lists_begin(&t);
    for (int round = 0; round < (int)(18 + test_draws_wanted() / 1000); ++round) {
        int n;
        memset(recv, 0xee, bytes);
        n = lists_next(&t, list, send, send, recv);
        if (test_below(&t.rng, 8) == 0) test_nap(0.0005);
        CHECK_STATUS(upipe_comm_start(c, c->team, list, n), UPIPE_OK, c->err);
        if (test_below(&t.rng, 8) == 0) test_nap(0.0005);
        CHECK_STATUS(upipe_comm_wait(c, c->team), UPIPE_OK, c->err);
        /* The transport is done with the send buffers: what is written here must reach nobody. */
        memset(send, 0xdd, t.sent_words * 4);
        lists_check(&t, recv);
    }
    CHECK_INT(c->team->sent_bytes, t.sent);
    CHECK_INT(c->team->moved_bytes, t.moved);
    part_end(k);
}

/* Megabytes, with and without gaps on either side, in fragments of any length. */
static void test_large(int64_t fragment)
{
    enum { BLOCKS = 3, BLOCK = 50000, GAP = 16 }; /* words */
    part_buf *k = part_begin(30);
    upipe_ctx *c = &k->ctx;
    size_t buf = (size_t)k->ranks * BLOCKS * (BLOCK + GAP);
    uint32_t *send = (uint32_t *)zeroed(buf * sizeof *send), *recv = (uint32_t *)zeroed(buf * sizeof *recv);
    int wrong = 0;
    k->team.fragment = fragment;
    for (int kind = 0; kind < 4; ++kind) {
        int from = BLOCK + (kind & 1 ? GAP : 0), to = BLOCK + (kind & 2 ? GAP : 0);
        memset(recv, 0xee, buf * sizeof *recv);
        memset(k->list, 0, sizeof k->list);
        for (int p = 0; p < k->ranks; ++p) {
            upipe_msg *s = &k->list[p];
            uint32_t *out = send + (size_t)p * BLOCKS * (BLOCK + GAP);
            for (int b = 0; b < BLOCKS; ++b)
                for (int w = 0; w < BLOCK; ++w)
                    out[b * from + w] = word_of(k->rank, p, 0) + (uint32_t)(b * BLOCK + w);
            s->send = out;
            s->recv = recv + (size_t)p * BLOCKS * (BLOCK + GAP);
            s->send_bytes = s->recv_bytes = BLOCK * 4;
            s->send_stride = (size_t)from * 4;
            s->recv_stride = (size_t)to * 4;
            s->count = BLOCKS;
            s->peer = p;
        }
        CHECK_STATUS(upipe_comm_start(c, c->team, k->list, k->ranks), UPIPE_OK, c->err);
        CHECK_STATUS(upipe_comm_wait(c, c->team), UPIPE_OK, c->err);
        for (int p = 0; p < k->ranks; ++p) {
            const uint32_t *in = recv + (size_t)p * BLOCKS * (BLOCK + GAP);
            for (int b = 0; b < BLOCKS; ++b)
                for (int w = 0; w < to; ++w)
                    wrong += (w < BLOCK || b + 1 < BLOCKS) &&
                             in[b * to + w] != (w < BLOCK ? word_of(p, k->rank, 0) + (uint32_t)(b * BLOCK + w)
                                                          : 0xeeeeeeeeu);
        }
        CHECK_INT(wrong, 0);
    }
    CHECK_INT(c->team->moved_bytes, (int64_t)4 * (k->ranks - 1) * BLOCKS * BLOCK * 4);
    part_end(k);
}

static void test_shift(void)
{
    part_buf *k = part_begin(20);
    upipe_ctx *c = &k->ctx;
    int64_t sent = 0;
    CHECK_STATUS(shift_all(c, NULL, NULL, NULL, NULL, &sent), UPIPE_OK, c->err);
    CHECK_INT(c->team->sent_bytes, sent);
    CHECK_INT(c->team->moved_bytes, sent);
    part_end(k);
}

static void test_meet(void)
{
    part_buf *k = part_begin(0);
    upipe_ctx *c = &k->ctx;
    int64_t mine[UPIPE_ALL_GATHER_MAX + 1] = {0};
    CHECK(c->team->deadline == UPIPE_DEADLINE_DEFAULT);
    for (int round = 0; round < 12; ++round) {
        CHECK_STATUS(gather_some(c, round), UPIPE_OK, c->err);
        if (round % 3 == 0) CHECK_STATUS(all_to_all(k), UPIPE_OK, c->err);
        if (round % k->ranks == k->rank) test_nap(0.003);
        CHECK_STATUS(barrier_holds(c), UPIPE_OK, c->err);
    }
    CHECK_STATUS(upipe_comm_all_gather(c, c->team, c->team->gathered, mine, UPIPE_ALL_GATHER_MAX + 1),
                 UPIPE_ERR_ARG, c->err);
    CHECK_STATUS(upipe_comm_barrier(c, c->team), UPIPE_OK, c->err);
    part_end(k);
}

static void test_agree(int victim, int what)
{
    part_buf *k = part_begin(20);
    upipe_ctx *c = &k->ctx;
    const int odd = k->rank == victim;
    upi_fields f;
    upipe_status s;
    for (int i = 0; i < 6; ++i) {
        f = fields_of_block(32, "chunk", i / 3);
        CHECK_STATUS(upi_agree(c, c->team, &f), UPIPE_OK, c->err);
    }
    CHECK_INT(k->team.call, 2);
    if (what == 0) {
        f = fields_of_block(odd ? 31 : 32, "chunk", 77);
        CHECK_REFUSED(upi_agree(c, c->team, &f), UPIPE_ERR_MISMATCH, c->err, "heads is 3");
        CHECK_TEXT(c->err.text, "31");
        CHECK_TEXT(c->err.text, "32");
    } else if (what == 1) {
        f = fields_of_real(odd ? 500000 : 0.5, 32, "chunk", 1);
        CHECK_REFUSED(upi_agree(c, c->team, &f), UPIPE_ERR_MISMATCH, c->err, "500000");
        CHECK_TEXT(c->err.text, "0.5");
    } else { /* one rank compares while the others go on: nobody gets through */
        if (odd) f = fields_of_block(32, "chunk", 5);
        s = upi_agree(c, c->team, &f);
        if (s == UPIPE_OK) s = upipe_comm_barrier(c, c->team);
        CHECK_REFUSED(s, UPIPE_ERR_MISMATCH, c->err, "all-gather");
        CHECK_TEXT(c->err.text, "barrier");
    }
    check_dead(k);
    part_end(k);
}

/* ---- faults: a rank that stays away ---- */

enum { AT_START, AT_WAIT, AT_BARRIER, AT_GATHER, AT_COUNT };

static upipe_status one_call(part_buf *k, int what)
{
    upipe_ctx *c = &k->ctx;
    int64_t mine = k->rank, all[RANKS_MAX];
    if (what == AT_BARRIER) return upipe_comm_barrier(c, c->team);
    if (what == AT_GATHER) return upipe_comm_all_gather(c, c->team, all, &mine, 1);
    if (!c->team->started) UPIPE_TRY(upipe_comm_start(c, c->team, k->list, all_list(k)));
    return upipe_comm_wait(c, c->team);
}

static void test_absent(int victim, int what)
{
    part_buf *k = part_begin(20);
    upipe_ctx *c = &k->ctx;
    upipe_status s;
    double began;
    char name[32];
    int timeouts, i_did = 0;
    line_up(k, 0.25);
    began = test_seconds();
    if (k->rank == victim) {
        if (what == AT_WAIT)
            CHECK_STATUS(upipe_comm_start(c, c->team, k->list, all_list(k)), UPIPE_OK, c->err);
        test_nap(0.25 + 0.35);
        /* What the others sent before they failed may be enough for it, once. */
        s = one_call(k, what);
        CHECK(s == UPIPE_OK || s == UPIPE_ERR_ABORTED);
    } else {
        s = one_call(k, what);
        snprintf(name, sizeof name, "for rank %d to %s", victim, what == AT_WAIT ? "finish" : "come");
        if (s == UPIPE_OK && what == AT_WAIT) { /* its start has served those who were there before it */
            snprintf(name, sizeof name, "for rank");
            s = upipe_comm_barrier(c, c->team);
        }
        CHECK(s == UPIPE_ERR_TIMEOUT || s == UPIPE_ERR_ABORTED);
        CHECK_INT(c->err.status, s);
        i_did = s == UPIPE_ERR_TIMEOUT;
        CHECK_TEXT(c->err.text, name);
        CHECK_TEXT(c->err.text, "0.25 s");
        CHECK_INT(c->team->quarantine, 0);
        CHECK(test_seconds() - began < 5);
    }
    check_dead(k);
    MPI_Allreduce(&i_did, &timeouts, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    CHECK(timeouts >= 1);
    part_end(k);
}

/* Long messages to a rank that never waits for them: their buffers may yet be read. */
static void test_quarantine(void)
{
    enum { LONG = 1 << 20 };
    part_buf *k = part_begin(20);
    upipe_ctx *c = &k->ctx;
    char *send = (char *)zeroed(2 * LONG), *recv = send + LONG;
    upipe_status s = UPIPE_OK;
    line_up(k, 0.25);
    memset(k->list, 0, sizeof k->list);
    for (int p = 0; p < k->ranks; ++p) {
        k->list[p].peer = p;
        k->list[p].count = 1;
        if ((k->rank == 0) == (p == 0)) continue; /* rank 0 gets one from each */
        if (k->rank == 0) {
            k->list[p].recv = recv;
            k->list[p].recv_bytes = LONG;
        } else {
            k->list[p].send = send;
            k->list[p].send_bytes = LONG;
        }
    }
    if (k->rank == 0) {
        CHECK_STATUS(upipe_comm_start(c, c->team, k->list, k->ranks), UPIPE_OK, c->err);
        MPI_Barrier(MPI_COMM_WORLD);
        test_nap(0.25 + 0.6);
        s = upipe_comm_wait(c, c->team);
        CHECK(s == UPIPE_OK || s == UPIPE_ERR_ABORTED);
    } else {
        MPI_Barrier(MPI_COMM_WORLD);
        s = upipe_comm_start(c, c->team, k->list, k->ranks);
        if (s == UPIPE_OK) s = upipe_comm_wait(c, c->team);
        CHECK(s == UPIPE_ERR_TIMEOUT || s == UPIPE_ERR_ABORTED);
        CHECK_INT(c->team->quarantine, 1);
    }
    check_dead(k);
    part_end(k);
}

/* ---- faults: ranks that disagree ---- */

enum { KIND, COUNT, NUMBER, BLOCKS, BYTES, NINTH, ITSELF, FRAGMENT, MISMATCHES };

static void test_mismatch(int victim, int what)
{
    static const char *const words[] = {"in a",   "gathers 2",    "messages",         "blocks of 8",
                                        " of 28", "other blocks", "does not receive", "at most"};
    part_buf *k = part_begin(20);
    upipe_ctx *c = &k->ctx;
    int64_t mine[2] = {1, 2}, all[2 * RANKS_MAX];
    int peer = (victim + 1) % k->ranks, odd = k->rank == victim, n, i;
    upipe_msg list[RANKS_MAX + 12] = {0};
    upipe_status s;
    line_up(k, 20);
    n = all_list(k);
    memcpy(list, k->list, (size_t)n * sizeof *list);
    if (what == KIND) {
        s = odd ? upipe_comm_barrier(c, c->team) : upipe_comm_all_gather(c, c->team, all, mine, 1);
    } else if (what == COUNT) {
        s = upipe_comm_all_gather(c, c->team, all, mine, odd ? 2 : 1);
    } else {
        if (what == NUMBER && odd) list[peer].send_bytes = 0;
        if (what == BLOCKS) /* two blocks for one */
            for (i = 0; i < n; ++i)
                list[i].send_stride = list[i].recv_stride = 4, list[i].send_bytes = 8, list[i].recv_bytes = 8,
                list[i].count = 1 + (odd && i == peer);
        if (what == BYTES && odd) list[peer].recv_bytes = 28;
        if (what == NINTH) { /* a difference behind what a header spells out */
            for (i = 0; i < 11; ++i) {
                upipe_msg *x = &list[n++];
                *x = k->list[k->rank == victim ? peer : victim];
                x->send_bytes = x->recv_bytes = 4;
                if (k->rank != victim && k->rank != peer) x->send_bytes = x->recv_bytes = 0;
                if (i == 10 && odd) x->send_bytes = 8;
            }
        }
        if (what == ITSELF && odd) list[victim].recv_bytes = 0;
        if (what == FRAGMENT && odd) k->team.fragment = 4096;
        if (!odd) MPI_Barrier(k->mpi); /* found in start, which leaves it to wait */
        s = upipe_comm_start(c, c->team, list, n);
        if (odd) MPI_Barrier(k->mpi);
        if (s == UPIPE_OK) s = upipe_comm_wait(c, c->team);
    }
    /* A rank that has no part in it may complete; it hears of it in its next call. */
    if (s == UPIPE_OK) s = upipe_comm_barrier(c, c->team);
    CHECK_REFUSED(s, UPIPE_ERR_MISMATCH, c->err, words[what]);
    CHECK_INT(c->team->quarantine, 0);
    check_dead(k);
    part_end(k);
}

/* Somebody else's message on the team's tag. */
static void test_stranger(void)
{
    part_buf *k = part_begin(20);
    upipe_ctx *c = &k->ctx;
    for (int kind = 0; kind < 2; ++kind) {
        char noise[sizeof(upi_header)];
        memset(noise, 0x55, sizeof noise);
        if (kind == 1) {
            upipe_err e;
            CHECK_STATUS(upipe_mpi_free(&k->team, &e), UPIPE_OK, e);
            MPI_Barrier(MPI_COMM_WORLD);
            MPI_Comm_free(&k->mpi);
            k = part_begin(20);
            c = &k->ctx;
        }
        line_up(k, 20);
        if (k->rank == 1) MPI_Send(noise, kind == 0 ? 33 : (int)sizeof noise, MPI_BYTE, 0, 7, k->mpi);
        MPI_Barrier(k->mpi);
        CHECK_REFUSED(upipe_comm_barrier(c, c->team), UPIPE_ERR_MISMATCH, c->err, "with tag 7");
        check_dead(k);
    }
    part_end(k);
}

/* ---- faults: a rank that aborts, or whose device fails ---- */

enum { UP_FRONT, BETWEEN, SYNC, COPY, ABORTS };

static void test_abort_call(int victim, int what)
{
    part_buf *k = part_begin(20);
    upipe_ctx *c = &k->ctx;
    upipe_status s = UPIPE_OK;
    double began = test_seconds();
    line_up(k, 20);
    if (k->rank == victim) {
        sync_fails = what == SYNC;
        copy_fails = what == COPY;
        if (what == UP_FRONT) {
            test_nap(0.02);
            upipe_comm_abort(c->team, "the host has had enough");
            upipe_comm_abort(c->team, "and says it again");
        }
        if (what != UP_FRONT) s = upipe_comm_start(c, c->team, k->list, all_list(k));
        if (what == BETWEEN) upipe_comm_abort(c->team, "the host has had enough");
        if (what != UP_FRONT && s == UPIPE_OK) s = upipe_comm_wait(c, c->team);
        if (what == BETWEEN) CHECK(s == UPIPE_ERR_ABORTED || s == UPIPE_OK); /* complete, if all were there */
        if (what == SYNC || what == COPY) {
            CHECK_REFUSED(s, UPIPE_ERR_BACKEND, c->err,
                          what == SYNC ? "the device is lost" : "the copy is lost");
        }
    } else {
        s = upipe_comm_start(c, c->team, k->list, all_list(k));
        if (s == UPIPE_OK) s = upipe_comm_wait(c, c->team);
        if (what == BETWEEN || what == COPY) { /* its header was out before: its data may arrive */
            CHECK(s == UPIPE_OK || s == UPIPE_ERR_ABORTED);
            if (s == UPIPE_OK) s = upipe_comm_barrier(c, c->team);
        }
        CHECK_REFUSED(s, UPIPE_ERR_ABORTED, c->err,
                      what == SYNC   ? "the device is lost"
                      : what == COPY ? "the copy is lost"
                                     : "had enough");
    }
    CHECK(test_seconds() - began < 10);
    CHECK_INT(c->team->quarantine, 0);
    check_dead(k);
    part_end(k);
}

static void test_init(void)
{
    upipe_mpi team;
    upipe_err e;
    MPI_Comm mpi;
    void *bound = NULL;
    int there = 0;
    MPI_Comm_dup(MPI_COMM_WORLD, &mpi);
    MPI_Comm_set_errhandler(mpi, MPI_ERRORS_ARE_FATAL);
    CHECK_REFUSED(upipe_mpi_init(&team, mpi, 0, 0, &e), UPIPE_ERR_ARG, e, "MPI_ERRORS_RETURN");
    MPI_Comm_set_errhandler(mpi, MPI_ERRORS_RETURN);
    CHECK_STATUS(upipe_mpi_init(&team, mpi, -1, 0, &e), UPIPE_ERR_ARG, e);
    CHECK_STATUS(upipe_mpi_init(&team, mpi, 0, -1, &e), UPIPE_ERR_ARG, e);
    CHECK_STATUS(upipe_mpi_init(&team, MPI_COMM_NULL, 0, 0, &e), UPIPE_ERR_ARG, e);
    MPI_Comm_get_attr(mpi, MPI_TAG_UB, &bound, &there);
    if (there) CHECK_STATUS(upipe_mpi_init(&team, mpi, *(int *)bound, 0, &e), UPIPE_ERR_ARG, e);
    CHECK_STATUS(upipe_mpi_free(&team, &e), UPIPE_OK, e); /* after a failed init */
    CHECK_STATUS(upipe_mpi_init(&team, mpi, 0, 0, &e), UPIPE_OK, e);
    CHECK_STATUS(upipe_mpi_free(&team, &e), UPIPE_OK, e);
    CHECK_STATUS(upipe_mpi_free(&team, &e), UPIPE_OK, e);
    MPI_Comm_free(&mpi);
}

/* ---- a host ---- */

/* Attention both ways and a sum in a host's slab. */
static void test_host(void)
{
    enum { HEADS = 4, DIM = 32, ROWS_MAX = 8 };
    static upipe_session h;
    static float qkv[ROWS_MAX * 3 * HEADS * DIM], o[ROWS_MAX * HEADS * DIM];
    upipe_ctx *c = &h.ctx;
    upipe_session_desc d;
    upipe_qkv a;
    upipe_qkv_grads g;
    upipe_saved saved;
    upipe_mpi team;
    upipe_ops ops;
    upipe_err e;
    MPI_Comm mpi;
    void *slab;
    float *sums;
    double one = 1;
    MPI_Comm_dup(MPI_COMM_WORLD, &mpi);
    CHECK_STATUS(upipe_mpi_init(&team, mpi, 0, 20, &e), UPIPE_OK, e);
    upipe_cpu_ops(&ops);
    c->ops = &ops, c->team = &team.comm;
    memset(&d, 0, sizeof d);
    d.plan.tokens = ROWS_MAX * team.comm.ranks, d.plan.heads = HEADS, d.plan.head_dim = DIM, d.layers = 1;
    CHECK_STATUS(upipe_session_open(&h, &d), UPIPE_OK, c->err);
    slab = aligned_alloc(UPIPE_MEM_ALIGN, upipe_session_slab_bytes(&h));
    CHECK_STATUS(upipe_session_slab(&h, slab), UPIPE_OK, c->err);
    a = upipe_qkv_fused(&h.call, qkv, o, UPIPE_F32);
    g = upipe_qkv_grads_of(&a);
    CHECK_STATUS(upipe_qkv_fwd(c, &a, &saved), UPIPE_OK, c->err);
    CHECK_STATUS(upipe_qkv_bwd(c, &a, &g, &saved), UPIPE_OK, c->err);
    sums = (float *)calloc((size_t)team.comm.ranks, UPIPE_REDUCE_STRIP * sizeof *sums);
    if (!CHECK(sums != NULL)) return;
    CHECK_STATUS(upipe_all_reduce(c, c->team, sums, (int64_t)UPIPE_REDUCE_STRIP * team.comm.ranks), UPIPE_OK,
                 c->err);
    free(sums);
    CHECK_INT(h.mem.peak, h.dry.mem.peak);
    CHECK_STATUS(upipe_scalars_sum(c, c->team, &one, 1), UPIPE_OK, c->err);
    CHECK_INT(one, team.comm.ranks);
    CHECK_STATUS(upipe_session_close(&h), UPIPE_OK, c->err);
    CHECK_STATUS(upipe_mpi_free(&team, &e), UPIPE_OK, e);
    free(slab);
    MPI_Comm_free(&mpi);
}

/* ---- one team after the other ---- */

/* Frees the team and makes the next one with the same tags: on the same communicator, or on one to which MPI
 * may give the context of the old one. */
static part_buf *part_again(part_buf *k, int fresh)
{
    upipe_err e;
    MPI_Comm mpi = k->mpi;
    CHECK_STATUS(upipe_mpi_free(&k->team, &e), UPIPE_OK, e);
    if (!fresh) return part_on(mpi, 20);
    MPI_Comm_free(&mpi);
    return part_begin(20);
}

/* A number that rank 0 has never asked for must not be gathered by the next team. */
static void test_late_header(int fresh)
{
    part_buf *k = part_begin(0.05);
    int64_t mine = 111, all[RANKS_MAX];
    if (k->rank != 0) {
        upipe_status s = upipe_comm_all_gather(&k->ctx, k->ctx.team, all, &mine, 1);
        CHECK(s == UPIPE_ERR_TIMEOUT || s == UPIPE_ERR_ABORTED);
    }
    k->ctx.team->deadline = 20;
    MPI_Barrier(MPI_COMM_WORLD);
    k = part_again(k, fresh);
    mine = 222;
    CHECK_STATUS(upipe_comm_all_gather(&k->ctx, k->ctx.team, all, &mine, 1), UPIPE_OK, k->ctx.err);
    for (int r = 0; r < k->ranks; ++r) CHECK_INT(all[r], 222);
    part_end(k);
}

/* Data that rank 0 has asked for, and not received when it aborts, must not be received by the next team. */
static void test_late_data(int fresh)
{
    enum { LONG = 1 << 14 }; /* words */
    part_buf *k = part_begin(20);
    uint32_t *data = (uint32_t *)zeroed((size_t)k->ranks * LONG * sizeof *data);
    int wrong = 0;
    for (int again = 0; again < 2; ++again) {
        upipe_comm *team = k->ctx.team;
        line_up(k, 20);
        k->team.fragment = 256;
        memset(k->list, 0, sizeof k->list);
        for (int p = 0; p < k->ranks; ++p) {
            upipe_msg *s = &k->list[p];
            s->peer = p;
            s->count = 1;
            if (k->rank == 0 && p != 0) s->recv = data + p * LONG, s->recv_bytes = LONG * sizeof *data;
            if (k->rank != 0 && p == 0) s->send = data, s->send_bytes = LONG * sizeof *data;
            for (int w = 0; w < LONG; ++w) data[p * LONG + w] = word_of(k->rank, again, w);
        }
        CHECK_STATUS(upipe_comm_start(&k->ctx, team, k->list, k->ranks), UPIPE_OK, k->ctx.err);
        if (k->rank != 0) CHECK_STATUS(upipe_comm_wait(&k->ctx, team), UPIPE_OK, k->ctx.err);
        MPI_Barrier(MPI_COMM_WORLD); /* MPI has the data */
        if (again) break;
        if (k->rank == 0) {
            upipe_comm_abort(team, "data are missing");
            team->deadline = 0;
            CHECK_STATUS(upipe_comm_wait(&k->ctx, team), UPIPE_ERR_ABORTED, k->ctx.err);
            team->deadline = 20;
        }
        k = part_again(k, fresh);
    }
    if (k->rank == 0) {
        CHECK_STATUS(upipe_comm_wait(&k->ctx, k->ctx.team), UPIPE_OK, k->ctx.err);
        for (int p = 1; p < k->ranks; ++p)
            for (int w = 0; w < LONG; ++w) wrong += data[p * LONG + w] != word_of(p, 1, w);
    }
    CHECK_INT(wrong, 0);
    part_end(k);
}

/* The victim leaves a transfer in which the others have asked for its data: they get its goodbye instead. */
static void test_no_data(int victim)
{
    part_buf *k = part_begin(20);
    upipe_ctx *c = &k->ctx;
    line_up(k, 20);
    copy_fails = k->rank == victim;
    if (k->rank == victim) {
        CHECK_STATUS(upipe_comm_start(c, c->team, k->list, all_list(k)), UPIPE_OK, c->err);
        MPI_Barrier(MPI_COMM_WORLD);
        test_nap(0.1);
        c->team->deadline = 0;
        CHECK_STATUS(upipe_comm_wait(c, c->team), UPIPE_ERR_BACKEND, c->err);
        c->team->deadline = 20;
    } else {
        MPI_Barrier(MPI_COMM_WORLD);
        CHECK_STATUS(upipe_comm_start(c, c->team, k->list, all_list(k)), UPIPE_OK, c->err);
        CHECK_REFUSED(upipe_comm_wait(c, c->team), UPIPE_ERR_ABORTED, c->err, "the copy is lost");
    }
    k = part_again(k, 1);
    CHECK_STATUS(all_to_all(k), UPIPE_OK, k->ctx.err);
    part_end(k);
}

/* The victim frees its team after the others have given it up. */
static void test_late_free(int victim)
{
    part_buf *k = part_begin(20);
    char name[48];
    upipe_err e;
    snprintf(name, sizeof name, "for rank %d to free the team", victim);
    line_up(k, 20);
    if (k->rank == victim) {
        MPI_Barrier(MPI_COMM_WORLD);
        CHECK_STATUS(upipe_mpi_free(&k->team, &e), UPIPE_OK, e);
    } else {
        k->ctx.team->deadline = 0.2;
        CHECK_REFUSED(upipe_mpi_free(&k->team, &e), UPIPE_ERR_BACKEND, e, name);
        MPI_Barrier(MPI_COMM_WORLD);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Comm_free(&k->mpi);
    k = part_begin(20);
    CHECK_STATUS(all_to_all(k), UPIPE_OK, k->ctx.err);
    part_end(k);
}

/* The victim frees its team, a part of a world in which the ranks are numbered the other way round; the others go on. */
static void test_early_free(int victim)
{
    MPI_Comm mpi, reversed;
    upipe_mpi world;
    upipe_err e;
    part_buf *k;
    upipe_ctx *c;
    char name[48];
    double began;
    int rank;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_dup(MPI_COMM_WORLD, &mpi);
    MPI_Comm_set_errhandler(mpi, MPI_ERRORS_RETURN);
    CHECK_STATUS(upipe_mpi_init(&world, mpi, 7, 20, &e), UPIPE_OK, e);
    MPI_Comm_split(MPI_COMM_WORLD, 0, -rank, &reversed);
    k = part_on(reversed, 20);
    c = &k->ctx;
    upipe_comm_part(c->team, &world.comm, k->ranks - 1, -1);
    line_up(k, 20);
    began = test_seconds();
    snprintf(name, sizeof name, "rank %d has freed its team", victim);
    if (rank != victim) {
        CHECK_REFUSED(upipe_comm_barrier(c, c->team), UPIPE_ERR_MISMATCH, c->err, name);
        check_dead(k);
    }
    CHECK(test_seconds() - began < 10);
    part_end(k);
    CHECK_STATUS(upipe_mpi_free(&world, &e), UPIPE_OK, e);
    MPI_Comm_free(&mpi);
}

/* ---- the attention block: the same bits as on ranks that are threads ---- */

#define SAME(tensor)                                                                                  \
    do {                                                                                              \
        int64_t n_ = block_count(&t->shape, #tensor);                                                 \
        if (n_ == 0) break;                                                                           \
        /* each rank has filled in its own part of zeros */                                           \
        MPI_Allreduce(MPI_IN_PLACE, mine.out.tensor, (int)n_, MPI_UINT32_T, MPI_BOR, MPI_COMM_WORLD); \
        CHECK_SAY(memcmp(mine.out.tensor, threads.out.tensor, (size_t)n_ * 4) == 0,                   \
                  "%s differs from the thread ranks', %d x %d ranks, %s", #tensor, t->ranks,          \
                  t->ring > 0 ? t->ring : 1, upipe_dtype_name(t->shape.dtype));                       \
    } while (0);

/* The runner itself holds the bytes that are sent, and what the pool holds, to each rank's plan. */
static void check_layer(const run_case *t, part_buf *k)
{
    run_result threads, mine;
    f32_block in;
    upipe_status s;
    block_inputs(&t->shape, 42, &in);
    CHECK(run_block(t, &in, &threads) == UPIPE_OK);
    check_block(&t->shape, &in, &threads.out);
    over_mpi = k->ctx.team;
    s = run_block(t, &in, &mine);
    over_mpi = NULL;
    CHECK_SAY(s == UPIPE_OK, "%s: %s", upipe_status_name(s), mine.errors[k->rank].text);
    BLOCK_RESULTS(SAME)
}
#undef SAME

static run_case make_layer(int dtype, int projected)
{
    run_case t = run_of(48, 8, 4, 32, 40, 0, 0, (upipe_dtype)dtype);
    t.shape.batch = 2;
    t.shape.rope = t.shape.normed = 1;
    t.shape.projected = projected;
    t.tile_rows = 7;
    return t;
}

/* overlap: the transfers come from a side stream's thread. */
static void test_layer(int dtype, int projected, int overlap)
{
    part_buf *k = part_begin(60);
    run_case t = make_layer(dtype, projected);
    t.ranks = t.chunk = k->ranks;
    t.overlap = overlap;
    team_mpi = k->ctx.team;
    ring_mpi = NULL;
    check_layer(&t, k);
    part_end(k);
}

/* Teams of two, and rings of two between them, each a communicator split off the world. */
static void test_ring(int dtype, int projected, upipe_ring_mode mode)
{
    enum { TEAM = 2, RING = 2 };
    part_buf *k = part_begin(60);
    run_case t = make_layer(dtype, projected);
    upipe_mpi team, ring;
    MPI_Comm of_team, of_ring;
    upipe_err e;
    t.ranks = t.chunk = TEAM;
    t.ring = RING;
    t.ring_mode = mode;
    t.layout = UPIPE_ZIGZAG;
    t.shape.tokens = 45; /* each rank has a number of its own */
    t.shape.window = projected ? 20 : 0;
    t.shape.sinks = projected;
    MPI_Comm_split(k->mpi, k->rank / TEAM, k->rank, &of_team);
    MPI_Comm_split(k->mpi, k->rank % TEAM, k->rank, &of_ring);
    CHECK_STATUS(upipe_mpi_init(&team, of_team, 7, 60, &e), UPIPE_OK, e);
    CHECK_STATUS(upipe_mpi_init(&ring, of_ring, 7, 60, &e), UPIPE_OK, e);
    team_mpi = &team.comm;
    ring_mpi = &ring.comm;
    check_layer(&t, k);
    CHECK_STATUS(upipe_mpi_free(&team, &e), UPIPE_OK, e);
    CHECK_STATUS(upipe_mpi_free(&ring, &e), UPIPE_OK, e);
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Comm_free(&of_team);
    MPI_Comm_free(&of_ring);
    part_end(k);
}

/* ---- parts of a world: the first four ranks ---- */

static void test_lost(int victim, int in_side)
{
    const upipe_ops ops = {0};
    upipe_mpi end[4]; /* world, team, ring, side */
    MPI_Comm mpi[4];
    upipe_err e;
    int rank;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_split(MPI_COMM_WORLD, rank < 4 ? 0 : MPI_UNDEFINED, rank, &mpi[0]);
    if (rank >= 4) return;
    MPI_Comm_split(mpi[0], rank / 2, rank, &mpi[1]);
    MPI_Comm_split(mpi[0], rank % 2, rank, &mpi[2]);
    MPI_Comm_dup(mpi[0], &mpi[3]);
    for (int i = 0; i < 4; ++i) {
        MPI_Comm_set_errhandler(mpi[i], MPI_ERRORS_RETURN);
        CHECK_STATUS(upipe_mpi_init(&end[i], mpi[i], 0, 20, &e), UPIPE_OK, e);
    }
    const lost_rank k = {.world = &end[0].comm,
                         .team = &end[1].comm,
                         .ring = &end[2].comm,
                         .side = &end[3].comm,
                         .ops = &ops,
                         .rank = rank,
                         .victim = victim,
                         .in_side = in_side};
    lost_parts(&k);
    lost_run(&k);
    for (int i = 4; i-- > 0;) {
        CHECK_STATUS(upipe_mpi_free(&end[i], &e), UPIPE_OK, e);
        MPI_Comm_free(&mpi[i]);
    }
}

/* ---- ranks that die ---- */

static void die(int signal)
{
    (void)signal;
    kill(getpid(), SIGKILL);
}

enum { BEFORE, STARTED, WITHIN, AFTER, IN_BARRIER, DEATHS, ENDURE = DEATHS };

/* Rank `victim` of this communicator, its last one, is killed; the others must return in time. ENDURE: all live,
 * and a script cuts the link between them, or stops one for longer than the deadline. */
static void test_kill(MPI_Comm mpi, int what)
{
    const int mark = buffers_n, words = what == ENDURE ? 1 << 12 : 1 << 18;
    const double deadline = 1.0;
    part_buf *k = part_on(mpi, 30);
    upipe_ctx *c = &k->ctx;
    int victim = what == ENDURE ? -1 : k->ranks - 1, p, n, quarantine;
    int rounds = what == WITHIN || what == ENDURE ? 1000000 : what == AFTER;
    uint32_t *data = (uint32_t *)zeroed((size_t)(k->ranks * 2 * words) * 4);
    char name[16], reason[256];
    double last;
    upipe_status s = UPIPE_OK;
    CHECK_STATUS(all_to_all(k), UPIPE_OK, c->err);
    CHECK_STATUS(upipe_comm_barrier(c, c->team), UPIPE_OK, c->err);
    n = all_messages(k->list, k->ranks, data, data + (size_t)k->ranks * (size_t)words, 1, words);
    c->team->deadline = deadline;
    if (what == ENDURE) printf("running, process %d\n", (int)getpid()), fflush(stdout);
    if (k->rank == victim) {
        if (what == BEFORE) die(0);
        if (what == STARTED) {
            upipe_comm_start(c, c->team, k->list, n);
            die(0);
        }
        if (what == WITHIN || what == IN_BARRIER) {
            struct itimerval t = {.it_value.tv_usec = 40000};
            signal(SIGALRM, die);
            setitimer(ITIMER_REAL, &t, NULL);
        }
    }
    last = test_seconds();
    while (s == UPIPE_OK && what == IN_BARRIER) {
        last = test_seconds();
        s = upipe_comm_barrier(c, c->team);
    }
    while (s == UPIPE_OK && rounds-- > 0) {
        last = test_seconds();
        s = upipe_comm_start(c, c->team, k->list, n);
        if (s == UPIPE_OK) s = upipe_comm_wait(c, c->team);
    }
    if (k->rank == victim) die(0); /* after */
    /* a transfer that the victim has started may come to its end without it, and then the next one does not */
    for (p = 0; s == UPIPE_OK && p < (what == STARTED ? 2 : 1); ++p) {
        last = test_seconds();
        s = upipe_comm_start(c, c->team, k->list, n);
        if (s == UPIPE_OK) s = upipe_comm_wait(c, c->team);
    }
    last = test_seconds() - last;
    CHECK_SAY(s == UPIPE_ERR_TIMEOUT || s == UPIPE_ERR_ABORTED, "case %d: %s: %s", what, upipe_status_name(s),
              c->err.text);
    snprintf(name, sizeof name, " %d ", victim);
    if (what != ENDURE) CHECK_TEXT(c->err.text, name);
    snprintf(reason, sizeof reason, "%s", c->err.text);
    CHECK_SAY(last < deadline + 1 + 5, "case %d: returned after %g s", what, last);
    check_dead(k);
    quarantine = c->team->quarantine;
    CHECK(what != BEFORE || !quarantine); /* who never came was never sent anything */
    c->team->deadline = 0.2;
    s = upipe_mpi_free(&k->team, &c->err);
    CHECK(s == UPIPE_OK || s == UPIPE_ERR_BACKEND); /* headers to the dead may stay with MPI */
    if (test_env("UPIPE_VERBOSE", 0))
        printf("case %d, rank %d of %d: %.3f s, quarantine %d, free: %s; %s\n", what, k->rank, k->ranks, last,
               quarantine, upipe_status_name(s), reason);
    if (s == UPIPE_OK) buffers_free(mark); /* else a late rank may read it, and MPI ends one that cannot */
}

int main(int argc, char **argv)
{
    const char *what = argc > 1 ? argv[1] : "all";
    char name[64];
    int rank, ranks, level, i;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &level);
    CHECK(level >= MPI_THREAD_SERIALIZED);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    snprintf(name, sizeof name, "mpi, rank %d of %d", rank, ranks);
    if (ranks > RANKS_MAX) return 2;
    if (strcmp(what, "kill") == 0) {
        MPI_Comm comms[RANKS_MAX]; /* made while all live: comms[i] lacks the last i ranks */
        for (i = 0; ranks - i >= 2; ++i)
            MPI_Comm_split(MPI_COMM_WORLD, rank < ranks - i ? 0 : MPI_UNDEFINED, rank, &comms[i]);
        for (i = 0; ranks - i >= 2; ++i) /* freed by nobody: who is killed may be reading it */
            if (test_wanted("kill")) test_kill(comms[i], i % DEATHS);
        i = test_end(name);
        fflush(stdout);
        _exit(i); /* MPI_Finalize would wait for the dead */
    }
    if (strcmp(what, "endure") == 0) {
        MPI_Comm mpi;
        MPI_Comm_dup(MPI_COMM_WORLD, &mpi);
        if (test_wanted("kill")) test_kill(mpi, ENDURE); /* frees nothing: the late rank still reads it */
        i = test_end(name);
        fflush(stdout);
        test_nap(5); /* an MPI library may end a late rank when its peers have left */
        _exit(i);
    }
    TEST(test_init());
    TEST(test_host());
    TEST(test_shift());
    TEST(test_meet());
    TEST(test_random(UPIPE_MPI_FRAGMENT));
    TEST(test_random(100));
    TEST(test_large(UPIPE_MPI_FRAGMENT));
    TEST(test_large(30000));
    if (ranks > 1 && strcmp(what, "data") != 0) {
        for (i = 0; i < 6; ++i) TEST(test_agree(i % ranks, i % 3));
        for (i = 0; i < AT_COUNT; ++i) TEST(test_absent(i % ranks, i));
        TEST(test_quarantine());
        for (i = 0; i < MISMATCHES; ++i) TEST(test_mismatch((i + 1) % ranks, i));
        TEST(test_stranger());
        for (i = 0; i < 2 * ABORTS; ++i) TEST(test_abort_call(i / 2 % ranks, i % ABORTS));
        for (i = 0; i < 2; ++i) TEST(test_late_header(i));
        for (i = 0; i < 2; ++i) TEST(test_late_data(i));
        TEST(test_no_data(0));
        for (i = 0; i < 2; ++i) TEST(test_late_free(i * (ranks - 1)));
        TEST(test_early_free(ranks - 1));
    }
    if (ranks >= 4)
        for (i = 0; i < 2; ++i) TEST(test_lost(3 * i, i));
    if (ranks == 2 || ranks == 4)
        for (i = 0; i < 8; ++i) TEST(test_layer(i & 1, i >> 1 & 1, i >> 2));
    if (ranks == 4)
        for (i = 0; i < 8; ++i)
            TEST(test_ring(i & 1, i >> 1 & 1, i & 4 ? UPIPE_RING_ALL_GATHER : UPIPE_RING_P2P));
    i = test_end(name);
    fflush(stdout);
    MPI_Finalize();
    return i;
}

/* test_tcp.c -- the transport over connected sockets: exact data, faults, ranks that die, the block's bits
 *
 * Ranks are threads, each with its own sockets, or processes where they die. Sockets of one machine hold little data
 * here, so that transfers meet full ones. Every element names where it comes from and where it must land.
 */
#define _POSIX_C_SOURCE 200809L
#define _XOPEN_SOURCE   700
#include "upipe/net/upipe_net_header.h"

#include <stdlib.h>

/* The transport's own allocations, counted: nothing of a team may be left. */
static int allocated;

#define calloc(n, bytes) (__atomic_add_fetch(&allocated, 1, __ATOMIC_RELAXED), calloc(n, bytes))
#define free(p)          (__atomic_sub_fetch(&allocated, 1, __ATOMIC_RELAXED), free(p))
#include "upipe/net/upipe_net_tcp.h"
#undef calloc
#undef free

#include "upipe/net/upipe_net_threads.h"

#include <signal.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../lib/grid.h"
#include "../lib/lost.h"

/* The block's runner, over these where they are set: [rank of the world]. */
static upipe_tcp *world_tcp, *team_tcp, *ring_tcp;

static upipe_comm *world_comm(upipe_threads *world, int rank)
{
    return world_tcp != NULL ? &world_tcp[rank].comm : upipe_threads_comm(world, rank);
}

static void grid_use(upipe_threads_grid *g, int rank, upipe_ctx *c)
{
    upipe_threads_grid_use(g, rank, c);
    if (world_tcp != NULL) c->team = &(ring_tcp != NULL ? team_tcp : world_tcp)[rank].comm;
    if (ring_tcp != NULL) c->ring = &ring_tcp[rank].comm;
}

#define upipe_threads_comm     world_comm
#define upipe_threads_grid_use grid_use
#include "../lib/runner.h"
#include "../lib/transfers.h"
#undef upipe_threads_comm
#undef upipe_threads_grid_use

/* ---- sockets ---- */

enum { RANKS_MAX = 8, WORDS = 8, SMALL = 4096 };

typedef struct mesh {
    int fds[RANKS_MAX][2][RANKS_MAX]; /* of rank, for headers and for data, to rank */
} mesh;

/* Two ends of a TCP connection, or of a socket of one machine. */
static void connect_two(int inet, int fds[2])
{
    struct sockaddr_in at = {.sin_family = AF_INET};
    socklen_t size = sizeof at;
    int listening;
    if (!inet) {
        CHECK_INT(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
        return;
    }
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    listening = socket(AF_INET, SOCK_STREAM, 0);
    CHECK_INT(bind(listening, (struct sockaddr *)&at, size), 0);
    CHECK_INT(listen(listening, 1), 0);
    CHECK_INT(getsockname(listening, (struct sockaddr *)&at, &size), 0);
    fds[0] = socket(AF_INET, SOCK_STREAM, 0);
    CHECK_INT(connect(fds[0], (struct sockaddr *)&at, size), 0);
    fds[1] = accept(listening, NULL, NULL);
    CHECK(fds[1] >= 0);
    close(listening);
}

static void mesh_open(mesh *m, int ranks, int inet)
{
    memset(m, 0xff, sizeof *m);
    for (int r = 0; r < ranks; ++r)
        for (int p = r + 1; p < ranks; ++p)
            for (int which = 0; which < 2; ++which) {
                int two[2], small = SMALL;
                connect_two(inet, two);
                for (int end = 0; which == 1 && !inet && end < 2; ++end) { /* TCP would creep */
                    setsockopt(two[end], SOL_SOCKET, SO_SNDBUF, &small, sizeof small);
                    setsockopt(two[end], SOL_SOCKET, SO_RCVBUF, &small, sizeof small);
                }
                m->fds[r][which][p] = two[0];
                m->fds[p][which][r] = two[1];
            }
}

static void mesh_close_rank(mesh *m, int rank)
{
    for (int which = 0; which < 2; ++which)
        for (int p = 0; p < RANKS_MAX; ++p)
            if (m->fds[rank][which][p] >= 0) close(m->fds[rank][which][p]);
    memset(m->fds[rank], 0xff, sizeof m->fds[rank]);
}

static void mesh_close(mesh *m)
{
    for (int r = 0; r < RANKS_MAX; ++r) mesh_close_rank(m, r);
}

/* ---- a crew: ranks that are threads ---- */

typedef struct crew {
    mesh mesh;
    upipe_tcp team[RANKS_MAX];
    upipe_ops ops;
    upipe_ctx ctx[RANKS_MAX];
    uint32_t send[RANKS_MAX][RANKS_MAX][WORDS], recv[RANKS_MAX][RANKS_MAX][WORDS];
    upipe_msg list[RANKS_MAX][RANKS_MAX + 12];
    pthread_barrier_t door;
    int fails[RANKS_MAX]; /* SYNC or COPY */
    int ranks, victim, what;
} crew;

enum { UP_FRONT, BETWEEN, SYNC, COPY, ABORTS };

static crew the_crew;
static upipe_status test_sync(upipe_ctx *c)
{
    return *(int *)c->user == SYNC ? upipe_fail(&c->err, UPIPE_ERR_BACKEND, "the device is lost") : UPIPE_OK;
}

static upipe_status test_copy(upipe_ctx *c, void *dst, const void *src, size_t bytes)
{
    if (*(int *)c->user == COPY) return upipe_fail(&c->err, UPIPE_ERR_BACKEND, "the copy is lost");
    memcpy(dst, src, bytes);
    return UPIPE_OK;
}

/* This rank's end, on sockets of the crew's mesh. */
static void join(crew *k, int r, double deadline)
{
    upipe_err e;
    CHECK_STATUS(upipe_tcp_init(&k->team[r], k->mesh.fds[r][0], k->mesh.fds[r][1], r, k->ranks, deadline, &e),
                 UPIPE_OK, e);
    k->ctx[r] = (upipe_ctx){.ops = &k->ops, .team = &k->team[r].comm, .user = &k->fails[r]};
}

/* Runs a body on every rank; the teams end together, and the sockets. */
static void crew_run(int ranks, int inet, double deadline, upipe_status (*body)(void *user, int rank),
                     int victim, int what)
{
    crew *k = &the_crew;
    upipe_threads threads; /* only start the ranks */
    upipe_err e;
    *k = (crew){.ranks = ranks, .ops.copy = test_copy, .ops.sync = test_sync, .victim = victim, .what = what};
    mesh_open(&k->mesh, ranks, inet);
    for (int r = 0; r < ranks; ++r) join(k, r, deadline);
    pthread_barrier_init(&k->door, NULL, (unsigned)ranks);
    CHECK_STATUS(upipe_threads_init(&threads, ranks, 0, &e), UPIPE_OK, e);
    CHECK_STATUS(upipe_threads_run(&threads, body, k, NULL, &e), UPIPE_OK, e);
    upipe_threads_free(&threads);
    pthread_barrier_destroy(&k->door);
    mesh_close(&k->mesh);
    CHECK_INT(allocated, 0);
}

/* The end of every body. */
static upipe_status leave(crew *k, int r)
{
    upipe_err e;
    k->team[r].comm.deadline = 20;
    CHECK_STATUS(upipe_tcp_free(&k->team[r], &e), UPIPE_OK, e);
    CHECK_STATUS(upipe_tcp_free(&k->team[r], &e), UPIPE_OK, e);
    return UPIPE_OK;
}

static int all_list(crew *k, int r)
{
    all_fill(k->send[r][0], r, k->ranks, WORDS);
    memset(k->recv[r], 0xee, sizeof k->recv[r]);
    return all_messages(k->list[r], k->ranks, k->send[r][0], k->recv[r][0], 1, WORDS);
}

static upipe_status all_to_all(crew *k, int r)
{
    upipe_ctx *c = &k->ctx[r];
    UPIPE_TRY(upipe_comm_start(c, c->team, k->list[r], all_list(k, r)));
    UPIPE_TRY(upipe_comm_wait(c, c->team));
    all_check(k->recv[r][0], r, k->ranks, WORDS);
    return UPIPE_OK;
}

/* All meet with patience, so that a short deadline that follows times the fault. */
static void line_up(crew *k, int r, double deadline)
{
    upipe_ctx *c = &k->ctx[r];
    c->team->deadline = 30;
    CHECK_STATUS(all_to_all(k, r), UPIPE_OK, c->err);
    pthread_barrier_wait(&k->door);
    c->team->deadline = deadline;
}

static void check_dead(crew *k, int r)
{
    const double began = test_seconds();
    check_dead_calls(&k->ctx[r], NULL);
    CHECK(test_seconds() - began < 5);
    CHECK_INT(k->team[r].comm.quarantine, 0);
}

/* ---- ranks that behave ---- */

static upipe_status calls_body(void *user, int r)
{
    crew *k = (crew *)user;
    upipe_ctx *c = &k->ctx[r];
    int64_t mine[UPIPE_ALL_GATHER_MAX + 1] = {0}, sent = 0;
    CHECK(c->team->deadline == UPIPE_DEADLINE_DEFAULT);
    CHECK_STATUS(shift_all(c, NULL, NULL, NULL, NULL, &sent), UPIPE_OK, c->err);
    CHECK_INT(c->team->sent_bytes, sent);
    CHECK_INT(c->team->moved_bytes, sent);
    for (int round = 0; round < 12; ++round) {
        CHECK_STATUS(gather_some(c, round), UPIPE_OK, c->err);
        if (round % 3 == 0) CHECK_STATUS(all_to_all(k, r), UPIPE_OK, c->err);
        if (round % k->ranks == r) test_nap(0.003);
        CHECK_STATUS(barrier_holds(c), UPIPE_OK, c->err);
    }
    CHECK_STATUS(upipe_comm_all_gather(c, c->team, c->team->gathered, mine, UPIPE_ALL_GATHER_MAX + 1),
                 UPIPE_ERR_ARG, c->err);
    for (int i = 0; i < 6; ++i) {
        const upi_fields f = fields_of_block(32, "chunk", i / 3);
        CHECK_STATUS(upi_agree(c, c->team, &f), UPIPE_OK, c->err);
    }
    return leave(k, r);
}

/* 0 to 10 messages from every rank to every rank, blocks with gaps, in any order. */
static upipe_status random_body(void *user, int r)
{
    crew *k = (crew *)user;
    upipe_ctx *c = &k->ctx[r];
    lists t = {.rank = r, .ranks = k->ranks, .most = 10, .longest = 3000};
    const size_t bytes = words_in_lists(&t) * 4;
    uint32_t *send = (uint32_t *)malloc(bytes), *recv = (uint32_t *)malloc(bytes);
    upipe_msg *list = (upipe_msg *)calloc((size_t)(20 * k->ranks), sizeof *list);
    t.seed = (uint64_t)test_env("UPIPE_SEED", 1);
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
    free(send);
    free(recv);
    free(list);
    return leave(k, r);
}

static int interrupts;

static void on_alarm(int signal)
{
    (void)signal;
    __atomic_add_fetch(&interrupts, 1, __ATOMIC_RELAXED);
}

static void interrupt_every(int microseconds)
{
    struct sigaction act = {.sa_handler = on_alarm}; /* no SA_RESTART */
    struct itimerval t = {{0, microseconds}, {0, microseconds}};
    sigaction(SIGALRM, &act, NULL);
    setitimer(ITIMER_REAL, &t, NULL);
}

/* Everybody sends everybody a megabyte at once, more than a socket holds, while signals interrupt the calls. */
static upipe_status large_body(void *user, int r)
{
    enum { LONG = 1 << 18 };
    crew *k = (crew *)user;
    upipe_ctx *c = &k->ctx[r];
    const size_t words = (size_t)k->ranks * LONG;
    uint32_t *send = (uint32_t *)malloc(words * 4), *recv = (uint32_t *)malloc(words * 4);
    all_fill(send, r, k->ranks, LONG);
    pthread_barrier_wait(&k->door);
    if (r == 0) interrupt_every(500);
    CHECK_STATUS(
        upipe_comm_start(c, c->team, k->list[r], all_messages(k->list[r], k->ranks, send, recv, 2, LONG / 2)),
        UPIPE_OK, c->err);
    CHECK_STATUS(upipe_comm_wait(c, c->team), UPIPE_OK, c->err);
    if (r == 0) interrupt_every(0);
    all_check(recv, r, k->ranks, LONG);
    CHECK(r > 0 || __atomic_load_n(&interrupts, __ATOMIC_RELAXED) > 0);
    free(send);
    free(recv);
    return leave(k, r);
}

/* ---- faults ---- */

enum { AT_TRANSFER, AT_WAIT, AT_BARRIER, AT_GATHER, AT_COUNT };

static upipe_status one_call(crew *k, int r, int what)
{
    upipe_ctx *c = &k->ctx[r];
    int64_t mine = r, all[RANKS_MAX];
    if (what == AT_BARRIER) return upipe_comm_barrier(c, c->team);
    if (what == AT_GATHER) return upipe_comm_all_gather(c, c->team, all, &mine, 1);
    if (!c->team->started) UPIPE_TRY(upipe_comm_start(c, c->team, k->list[r], all_list(k, r)));
    return upipe_comm_wait(c, c->team);
}

/* The victim comes too late. AT_WAIT: to more than the sockets hold. */
static upipe_status absent_body(void *user, int r)
{
    enum { LONG = 1 << 16 };
    static uint32_t send[RANKS_MAX][RANKS_MAX * LONG], recv[RANKS_MAX][RANKS_MAX * LONG];
    crew *k = (crew *)user;
    upipe_ctx *c = &k->ctx[r];
    upipe_status s;
    char name[48];
    double began;
    line_up(k, r, 0.25);
    if (k->what == AT_WAIT)
        CHECK_STATUS(upipe_comm_start(c, c->team, k->list[r],
                                      all_messages(k->list[r], k->ranks, send[r], recv[r], 1, LONG)),
                     UPIPE_OK, c->err);
    pthread_barrier_wait(&k->door);
    began = test_seconds();
    if (r == k->victim) test_nap(0.25 + 0.35);
    s = one_call(k, r, k->what);
    if (r == k->victim) {
        CHECK_STATUS(s, UPIPE_ERR_ABORTED, c->err);
    } else {
        CHECK(s == UPIPE_ERR_TIMEOUT || s == UPIPE_ERR_ABORTED);
        CHECK(test_seconds() - began < 5);
    }
    snprintf(name, sizeof name, "for rank %d to %s", k->victim, k->what == AT_WAIT ? "finish" : "come");
    CHECK_TEXT(c->err.text, name);
    CHECK_TEXT(c->err.text, "0.25 s");
    check_dead(k, r);
    return leave(k, r);
}

/* Rank 0 is lost to rank 1, and still reaches rank 2, which then waits for rank 1 in the next call, and not as long. All
 * name rank 0. */
static upipe_status chain_body(void *user, int r)
{
    crew *k = (crew *)user;
    upipe_ctx *c = &k->ctx[r];
    upipe_tcp *t = &k->team[r];
    line_up(k, r, r == 2 ? 0.28 : 0.3);
    for (int i = 1; r == 0 && i <= 2; ++i) {
        while (i == 2 && !__atomic_load_n(&k->what, __ATOMIC_ACQUIRE)) test_nap(0.001);
        upi_header_fill(t->out, k->ranks, t->call + i, UPI_TEAM_BARRIER, NULL, NULL, 0);
        CHECK_INT(upi_tcp_send_header(t, 2, &t->out[2]), 0);
    }
    if (r == 2) CHECK_STATUS(upipe_comm_barrier(c, c->team), UPIPE_OK, c->err);
    if (r == 2) __atomic_store_n(&k->what, 1, __ATOMIC_RELEASE); /* a peer is a call ahead at most */
    if (r > 0) {
        const upipe_status s = upipe_comm_barrier(c, c->team);
        CHECK(s == UPIPE_ERR_TIMEOUT || s == UPIPE_ERR_ABORTED);
        CHECK_TEXT(c->err.text, "for rank 0 to come");
        check_dead(k, r);
    }
    pthread_barrier_wait(&k->door);
    return leave(k, r);
}

/* Rank 1 has once said that it waits for rank 2. It does not any more when rank 0 alone is in the next call. */
static upipe_status old_answer_body(void *user, int r)
{
    crew *k = (crew *)user;
    upipe_ctx *c = &k->ctx[r];
    upipe_tcp *t = &k->team[r];
    int news = 0;
    line_up(k, r, 20);
    if (r == 0) {
        const int64_t question = upi_tcp_ask(t);
        while (t->watch.answers[1].call != question && upi_tcp_hear(c, t, &news) == UPIPE_OK) test_nap(0.001);
        CHECK_INT(t->watch.answers[1].n, 2);
        __atomic_store_n(&k->what, 1, __ATOMIC_RELEASE);
    }
    while (r == 2 && !__atomic_load_n(&k->what, __ATOMIC_ACQUIRE)) test_nap(0.001);
    CHECK_STATUS(upipe_comm_barrier(c, c->team), UPIPE_OK, c->err);
    pthread_barrier_wait(&k->door);
    c->team->deadline = 0.3;
    if (r > 0) pthread_barrier_wait(&k->door);
    CHECK_REFUSED(upipe_comm_barrier(c, c->team), r == 0 ? UPIPE_ERR_TIMEOUT : UPIPE_ERR_ABORTED, c->err,
                  "for ranks 1, 2 to come");
    if (r == 0) pthread_barrier_wait(&k->door);
    check_dead(k, r);
    return leave(k, r);
}

enum { KIND, COUNT, NUMBER, BLOCKS, BYTES, NINTH, ITSELF, MISMATCHES };

static upipe_status mismatch_body(void *user, int r)
{
    static const char *const words[] = {"in a",   "gathers 2",    "messages",        "blocks of 8",
                                        " of 28", "other blocks", "does not receive"};
    crew *k = (crew *)user;
    upipe_ctx *c = &k->ctx[r];
    upipe_msg *list = k->list[r], first;
    int64_t mine[2] = {1, 2}, all[2 * RANKS_MAX];
    const int what = k->what, victim = k->victim, peer = (victim + 1) % k->ranks, odd = r == victim;
    int n, i;
    upipe_status s;
    line_up(k, r, 20);
    n = all_list(k, r);
    first = list[odd ? peer : victim];
    if (what == KIND) {
        s = odd ? upipe_comm_barrier(c, c->team) : upipe_comm_all_gather(c, c->team, all, mine, 1);
    } else if (what == COUNT) {
        s = upipe_comm_all_gather(c, c->team, all, mine, odd ? 2 : 1);
    } else {
        if (what == NUMBER && odd) list[peer].send_bytes = 0;
        for (i = 0; what == BLOCKS && i < n; ++i) /* two blocks for one */
            list[i].send_stride = list[i].recv_stride = 4, list[i].send_bytes = list[i].recv_bytes = 8,
            list[i].count = 1 + (odd && i == peer);
        if (what == BYTES && odd) list[peer].recv_bytes = 28;
        for (i = 0; what == NINTH && i < 11; ++i) { /* a difference behind what a header spells out */
            list[n] = first;
            list[n].send_bytes = list[n].recv_bytes = odd || r == peer ? 4 : 0;
            if (i == 10 && odd) list[n].send_bytes = 8;
            ++n;
        }
        if (what == ITSELF && odd) list[victim].recv_bytes = 0;
        s = upipe_comm_start(c, c->team, list, n);
        if (s == UPIPE_OK) s = upipe_comm_wait(c, c->team);
    }
    /* A rank that has no part in it may complete; it hears of it in its next call. */
    if (s == UPIPE_OK) s = upipe_comm_barrier(c, c->team);
    CHECK_REFUSED(s, UPIPE_ERR_MISMATCH, c->err, words[what]);
    check_dead(k, r);
    return leave(k, r);
}

static upipe_status abort_body(void *user, int r)
{
    crew *k = (crew *)user;
    upipe_ctx *c = &k->ctx[r];
    const int what = k->what;
    const double began = test_seconds();
    upipe_status s = UPIPE_OK;
    line_up(k, r, 20);
    if (r == k->victim) {
        k->fails[r] = what;
        if (what == UP_FRONT) test_nap(0.02);
        if (what != UP_FRONT) s = upipe_comm_start(c, c->team, k->list[r], all_list(k, r));
        if (what == UP_FRONT || what == BETWEEN) upipe_comm_abort(c->team, "the host has had enough");
        if (what == UP_FRONT) upipe_comm_abort(c->team, "and says it again");
        if (what != UP_FRONT && s == UPIPE_OK) s = upipe_comm_wait(c, c->team);
        if (what == SYNC || what == COPY)
            CHECK_REFUSED(s, UPIPE_ERR_BACKEND, c->err,
                          what == SYNC ? "the device is lost" : "the copy is lost");
    } else {
        s = upipe_comm_start(c, c->team, k->list[r], all_list(k, r));
        if (s == UPIPE_OK) s = upipe_comm_wait(c, c->team);
        if (s == UPIPE_OK && (what == BETWEEN || what == COPY)) /* its data were out before */
            s = upipe_comm_barrier(c, c->team);
        CHECK_REFUSED(s, UPIPE_ERR_ABORTED, c->err,
                      what == SYNC   ? "the device is lost"
                      : what == COPY ? "the copy is lost"
                                     : "had enough");
    }
    CHECK(test_seconds() - began < 10);
    check_dead(k, r);
    return leave(k, r);
}

static void *abort_main(void *comm)
{
    test_nap(0.05);
    upipe_comm_abort((upipe_comm *)comm, "another thread has had enough");
    return NULL;
}

/* Another thread of the victim's aborts while all wait for the last rank, which comes when they have heard of it. */
static upipe_status other_thread_body(void *user, int r)
{
    crew *k = (crew *)user;
    upipe_ctx *c = &k->ctx[r];
    const double began = test_seconds();
    const int last = r == k->ranks - 1;
    pthread_t other;
    line_up(k, r, 20);
    if (r == k->victim) CHECK_INT(pthread_create(&other, NULL, abort_main, c->team), 0);
    if (last) pthread_barrier_wait(&k->door);
    CHECK_REFUSED(upipe_comm_barrier(c, c->team), UPIPE_ERR_ABORTED, c->err, "another thread has had enough");
    if (!last) pthread_barrier_wait(&k->door);
    if (r == k->victim) pthread_join(other, NULL);
    CHECK(test_seconds() - began < 10);
    return leave(k, r);
}

enum { TOO_EARLY, CLOSED, DATA_CLOSED, STRANGER, SKIPS, HALF, DATA_LOST, ENDS };

/* The victim frees its team, loses its sockets, or sends something else; half a header is none. */
static upipe_status end_body(void *user, int r)
{
    static const char *const words[] = {"has freed its team", "has ended", "has freed its team",
                                        "something else",     "expects 2", "has ended",
                                        "has ended"};
    crew *k = (crew *)user;
    upipe_ctx *c = &k->ctx[r];
    const double began = test_seconds();
    upipe_status s;
    char noise[sizeof(upi_header)];
    memset(noise, 0x55, sizeof noise);
    line_up(k, r, 20);
    if (r == k->victim && k->what == TOO_EARLY) {
        leave(k, r);
        return UPIPE_OK;
    }
    if (r == k->victim) {
        const int data = k->what == DATA_CLOSED || k->what == DATA_LOST;
        if (k->what == SKIPS) { /* a header of the call behind the next one */
            upi_header_fill(k->team[r].out, k->ranks, k->team[r].call + 2, UPI_TEAM_TRANSFER, NULL, NULL, 0);
            memcpy(noise, k->team[r].out, sizeof noise);
        }
        for (int p = 0; p < k->ranks; ++p) {
            if (p == r) continue;
            if (k->what >= STRANGER && k->what <= HALF)
                CHECK(send(k->mesh.fds[r][0][p], noise, sizeof noise / (k->what == HALF ? 2 : 1), 0) > 0);
            if (k->what != STRANGER && k->what != SKIPS && !data) shutdown(k->mesh.fds[r][0][p], SHUT_RDWR);
            if (data) shutdown(k->mesh.fds[r][1][p], SHUT_RDWR);
        }
        pthread_barrier_wait(&k->door);
        if (k->what == DATA_LOST) { /* it lives, and says so */
            s = one_call(k, r, AT_TRANSFER);
            CHECK(s == UPIPE_ERR_BACKEND || s == UPIPE_ERR_ABORTED);
            CHECK_TEXT(k->ctx[r].err.text, words[k->what]);
        }
        k->team[r].comm.deadline = 0.01;
        (void)upipe_tcp_free(&k->team[r], NULL);
        return UPIPE_OK;
    }
    if (k->what != TOO_EARLY) pthread_barrier_wait(&k->door);
    s = one_call(k, r, AT_TRANSFER);
    if (k->what == DATA_CLOSED) { /* its goodbye comes, which says it all */
        CHECK_REFUSED(s, UPIPE_ERR_MISMATCH, c->err, words[k->what]);
    } else {
        CHECK(s == UPIPE_ERR_MISMATCH || s == UPIPE_ERR_BACKEND || s == UPIPE_ERR_ABORTED);
        CHECK_TEXT(c->err.text, words[k->what]);
    }
    CHECK(test_seconds() - began < 10);
    check_dead(k, r);
    k->team[r].comm.deadline = 0.2; /* the victim may have left without a goodbye */
    s = upipe_tcp_free(&k->team[r], &c->err);
    CHECK(s == UPIPE_OK || s == UPIPE_ERR_BACKEND);
    return UPIPE_OK;
}

/* The victim tells rank 1 alone that it fails. Rank 1 frees its team or loses its connections, and rank 2 hears why. */
static upipe_status passed_on_body(void *user, int r)
{
    crew *k = (crew *)user;
    upipe_ctx *c = &k->ctx[r];
    upi_header notice;
    line_up(k, r, 20);
    if (r == k->victim) {
        upi_first_report(&notice, UPIPE_ERR_BACKEND, k->team[r].met, "the device is lost");
        CHECK_INT(upi_tcp_send_header(&k->team[r], 1, &notice), 0);
    }
    if (r == 1) {
        CHECK_REFUSED(upipe_comm_barrier(c, c->team), UPIPE_ERR_ABORTED, c->err, "the device is lost");
        c->team->deadline = 0.01;
        if (k->what == 0) CHECK_INT(upipe_tcp_free(&k->team[r], NULL), UPIPE_ERR_BACKEND);
        for (int p = 0; k->what == 1 && p < k->ranks; ++p)
            if (p != r) shutdown(k->mesh.fds[r][0][p], SHUT_RDWR);
    }
    pthread_barrier_wait(&k->door);
    if (r == 2) CHECK_REFUSED(one_call(k, r, AT_TRANSFER), UPIPE_ERR_ABORTED, c->err, "the device is lost");
    pthread_barrier_wait(&k->door);
    k->team[r].comm.deadline = 0.2;
    (void)upipe_tcp_free(&k->team[r], NULL);
    return UPIPE_OK;
}

/* Rank 0 has read an all-gather, and aborts. Rank 1 hears of it before it has all, and reads it all the same. */
static upipe_status read_first_body(void *user, int r)
{
    crew *k = (crew *)user;
    upipe_tcp *t = &k->team[r];
    const int64_t mine = r;
    line_up(k, r, 20);
    if (r < 2) CHECK_STATUS(one_call(k, r, AT_GATHER), UPIPE_OK, k->ctx[r].err);
    if (r == 0) upipe_comm_abort(k->ctx[r].team, "these numbers are bad");
    for (int to = 0; r == 2 && to < 2; ++to) {
        upi_header_fill(t->out, k->ranks, t->call + 1, UPI_TEAM_ALL_GATHER, NULL, &mine, 1);
        while (to == 1 && !upi_first_is_broken(&k->team[1].first)) test_nap(0.001);
        CHECK_INT(upi_tcp_send_header(t, to, &t->out[to]), 0);
    }
    pthread_barrier_wait(&k->door);
    if (r < 2) check_dead(k, r);
    return leave(k, r);
}

/* The victim frees its team after the others have given it up. */
static upipe_status late_free_body(void *user, int r)
{
    crew *k = (crew *)user;
    upipe_err e;
    line_up(k, r, 0.2);
    if (r == k->victim) {
        pthread_barrier_wait(&k->door);
        return leave(k, r);
    }
    CHECK_REFUSED(upipe_tcp_free(&k->team[r], &e), UPIPE_ERR_BACKEND, e, "to free the team");
    pthread_barrier_wait(&k->door);
    return UPIPE_OK;
}

static void test_init(void)
{
    upipe_tcp t;
    upipe_err e;
    int two[2], plain[2], none[2] = {-1, -1}, udp;
    connect_two(0, two);
    udp = socket(AF_INET, SOCK_DGRAM, 0);
    plain[0] = -1, plain[1] = two[0];
    CHECK_STATUS(upipe_tcp_init(&t, plain, plain, 0, 0, 0, &e), UPIPE_ERR_ARG, e);
    CHECK_STATUS(upipe_tcp_init(&t, plain, plain, 2, 2, 0, &e), UPIPE_ERR_ARG, e);
    CHECK_STATUS(upipe_tcp_init(&t, plain, plain, 0, UPIPE_TCP_MAX + 1, 0, &e), UPIPE_ERR_ARG, e);
    CHECK_STATUS(upipe_tcp_init(&t, plain, plain, 0, 2, -1, &e), UPIPE_ERR_ARG, e);
    CHECK_REFUSED(upipe_tcp_init(&t, plain, none, 0, 2, 0, &e), UPIPE_ERR_ARG, e, "no stream socket");
    none[1] = udp;
    CHECK_REFUSED(upipe_tcp_init(&t, plain, none, 0, 2, 0, &e), UPIPE_ERR_ARG, e, "no stream socket");
    close(udp);
    none[1] = socket(AF_INET, SOCK_STREAM, 0);
    CHECK_REFUSED(upipe_tcp_init(&t, plain, none, 0, 2, 0, &e), UPIPE_ERR_ARG, e, "is not connected");
    CHECK_STATUS(upipe_tcp_free(&t, &e), UPIPE_OK, e); /* after a failed init */
    close(none[1]);
    close(two[0]);
    close(two[1]);
}

/* ---- ranks that are processes, and die or stop ---- */

enum { BEFORE, STARTED, WITHIN, IN_BARRIER, STOPPED, DEATHS };

static void die(int signal)
{
    (void)signal;
    raise(SIGKILL);
}

/* A process. The victim dies, or stops for longer than the deadline; the others return, and say who is missing. */
static int death_main(crew *k, int r, int what)
{
    enum { LONG = 1 << 16 };
    const int victim = k->victim;
    upipe_ctx *c = &k->ctx[r];
    uint32_t *data = (uint32_t *)calloc((size_t)k->ranks * 2 * LONG, 4);
    upipe_status s = UPIPE_OK;
    double last = 0;
    char name[16];
    int n = all_messages(k->list[r], k->ranks, data, data + (size_t)k->ranks * LONG, 1, LONG);
    for (int p = 0; p < k->ranks; ++p)
        if (p != r) mesh_close_rank(&k->mesh, p);
    join(k, r, what == STOPPED ? 0.5 : 20);
    CHECK_STATUS(upipe_comm_barrier(c, c->team), UPIPE_OK, c->err);
    if (r == victim && what == BEFORE) die(0);
    if (r == victim && what == STOPPED) {
        raise(SIGSTOP); /* the parent continues it */
        CHECK_REFUSED(upipe_comm_barrier(c, c->team), UPIPE_ERR_ABORTED, c->err, "to come");
        return test_end("a stopped rank");
    }
    if (r == victim && what == STARTED) {
        upipe_comm_start(c, c->team, k->list[r], n);
        die(0);
    }
    if (r == victim) {
        struct itimerval t = {.it_value.tv_usec = 30000};
        signal(SIGALRM, die);
        setitimer(ITIMER_REAL, &t, NULL);
    }
    while (s == UPIPE_OK) {
        last = test_seconds();
        if (what == IN_BARRIER) {
            s = upipe_comm_barrier(c, c->team);
            continue;
        }
        s = upipe_comm_start(c, c->team, k->list[r], n);
        if (s == UPIPE_OK) s = upipe_comm_wait(c, c->team);
    }
    CHECK(test_seconds() - last < 5); /* the deadline is 20 s: a connection ends at once */
    CHECK(s == (what == STOPPED ? UPIPE_ERR_TIMEOUT : UPIPE_ERR_BACKEND) || s == UPIPE_ERR_ABORTED);
    snprintf(name, sizeof name, "rank %d ", victim);
    CHECK_TEXT(c->err.text, name);
    check_dead(k, r);
    c->team->deadline = 10;
    s = upipe_tcp_free(&k->team[r], &c->err);
    CHECK_STATUS(s, UPIPE_OK, c->err);
    free(data);
    return test_end("a survivor");
}

static void test_death(int victim, int what)
{
    enum { RANKS = 4 };
    crew *k = &the_crew;
    pid_t pids[RANKS];
    int status;
    *k = (crew){.ranks = RANKS, .ops.copy = test_copy, .ops.sync = test_sync, .victim = victim};
    mesh_open(&k->mesh, RANKS, what % 2);
    fflush(NULL);
    for (int r = 0; r < RANKS; ++r) {
        pids[r] = fork();
        if (pids[r] == 0) _exit(freopen("/dev/null", "w", stdout) == NULL ? 9 : death_main(k, r, what));
    }
    mesh_close(&k->mesh);
    if (what == STOPPED) {
        CHECK_INT(waitpid(pids[victim], &status, WUNTRACED), pids[victim]);
        test_nap(0.9);
        kill(pids[victim], SIGCONT);
    }
    for (int r = 0; r < RANKS; ++r) {
        CHECK_INT(waitpid(pids[r], &status, 0), pids[r]);
        if (r == victim && what != STOPPED)
            CHECK(WIFSIGNALED(status));
        else
            CHECK_SAY(status == 0, "case %d, rank %d without rank %d: status %x", what, r, victim, status);
    }
}

/* ---- the attention block: the same bits as on ranks that share memory ---- */

static void teams_open(mesh *meshes, upipe_tcp *ends, int ranks, int groups, int across)
{
    for (int g = 0; g < groups; ++g) {
        mesh_open(&meshes[g], ranks, 0);
        for (int i = 0; i < ranks; ++i) {
            upipe_err e;
            CHECK_STATUS(upipe_tcp_init(&ends[across ? i * groups + g : g * ranks + i], meshes[g].fds[i][0],
                                        meshes[g].fds[i][1], i, ranks, 60, &e),
                         UPIPE_OK, e);
        }
    }
}

static void test_block(int dtype, int rings)
{
    enum { TEAM = 2 };
    static mesh meshes[3 * TEAM];
    static upipe_tcp ends[3 * 2 * TEAM];
    run_case t = run_of(48, 8, 4, 32, 40, TEAM, TEAM, (upipe_dtype)dtype);
    run_result threads, got;
    f32_block in;
    const int ranks = TEAM * rings;
    t.shape.batch = 2;
    t.shape.rope = t.shape.normed = t.shape.projected = 1;
    if (rings > 1) t.ring = rings, t.layout = UPIPE_ZIGZAG, t.shape.tokens = 45;
    block_inputs(&t.shape, 42, &in);
    CHECK(run_block(&t, &in, &threads) == UPIPE_OK);
    check_block(&t.shape, &in, &threads.out);
    teams_open(meshes, ends, ranks, 1, 0);
    world_tcp = ends;
    if (rings > 1) {
        teams_open(meshes + TEAM, team_tcp = ends + 2 * TEAM, TEAM, rings, 0);
        teams_open(meshes + 2 * TEAM, ring_tcp = ends + 4 * TEAM, rings, TEAM, 1);
    }
    CHECK(run_block(&t, &in, &got) == UPIPE_OK);
    world_tcp = team_tcp = ring_tcp = NULL;
    same_bits(&t.shape, &threads, &got, NULL);
    for (int i = 0; i < 3 * 2 * TEAM; ++i) {
        ends[i].comm.deadline = 0; /* they say goodbye one after the other */
        (void)upipe_tcp_free(&ends[i], NULL);
    }
    for (int i = 0; i < 3 * TEAM; ++i) mesh_close(&meshes[i]);
}

/* ---- parts of a world ---- */

static struct {
    upipe_tcp end[4][4]; /* world, team, ring, side; of each rank */
    int victim, in_side;
} lost;

static upipe_status lost_body(void *user, int r)
{
    const upipe_ops ops = {0};
    const lost_rank k = {.world = &lost.end[0][r].comm,
                         .team = &lost.end[1][r].comm,
                         .ring = &lost.end[2][r].comm,
                         .side = &lost.end[3][r].comm,
                         .ops = &ops,
                         .rank = r,
                         .victim = lost.victim,
                         .in_side = lost.in_side};
    (void)user;
    lost_parts(&k);
    lost_run(&k);
    for (int i = 4; i-- > 0;) CHECK_INT(upipe_tcp_free(&lost.end[i][r], NULL), UPIPE_OK);
    return UPIPE_OK;
}

static void test_lost(int victim, int in_side)
{
    mesh meshes[6];
    upipe_threads threads;
    upipe_err e;
    lost.victim = victim;
    lost.in_side = in_side;
    teams_open(meshes, lost.end[0], 4, 1, 0);
    teams_open(meshes + 1, lost.end[1], 2, 2, 0);
    teams_open(meshes + 3, lost.end[2], 2, 2, 1);
    teams_open(meshes + 5, lost.end[3], 4, 1, 0);
    CHECK_STATUS(upipe_threads_init(&threads, 4, 0, &e), UPIPE_OK, e);
    CHECK_STATUS(upipe_threads_run(&threads, lost_body, NULL, NULL, &e), UPIPE_OK, e);
    upipe_threads_free(&threads);
    for (int i = 0; i < 6; ++i) mesh_close(&meshes[i]);
}

int main(int argc, char **argv)
{
    int i;
    test_begin(argc, argv);
    for (i = 0; i < 2 * DEATHS; ++i) TEST(test_death(i % 4, i % DEATHS)); /* before there are threads */
    TEST(test_init());
    for (i = 0; i < 2; ++i) {
        TEST_OF("calls", crew_run(1, i, 0, calls_body, -1, 0));
        TEST_OF("calls", crew_run(2 + 3 * i, i, 0, calls_body, -1, 0));
        TEST_OF("random", crew_run(3 + i, i, 20, random_body, -1, 0));
        TEST_OF("large", crew_run(4, i, 30, large_body, -1, 0));
    }
    for (i = 0; i < AT_COUNT; ++i) TEST_OF("absent", crew_run(3, i / 2, 20, absent_body, i % 3, i));
    TEST_OF("chain", crew_run(3, 0, 20, chain_body, 0, 0));
    TEST_OF("old_answer", crew_run(3, 0, 20, old_answer_body, 0, 0));
    for (i = 0; i < MISMATCHES; ++i) TEST_OF("mismatch", crew_run(3, i % 2, 20, mismatch_body, i % 3, i));
    for (i = 0; i < 2 * ABORTS; ++i) TEST_OF("abort", crew_run(3, i % 2, 20, abort_body, i % 3, i / 2));
    for (i = 0; i < 2; ++i) TEST_OF("other_thread", crew_run(3, i, 20, other_thread_body, i, 0));
    for (i = 0; i < ENDS; ++i) TEST_OF("end", crew_run(3, i % 2, 20, end_body, i % 3, i));
    TEST_OF("read_first", crew_run(3, 0, 20, read_first_body, 0, 0));
    TEST_OF("late_free", crew_run(3, 0, 20, late_free_body, 1, 0));
    for (i = 0; i < 2; ++i) TEST_OF("passed_on", crew_run(3, i, 20, passed_on_body, 0, i));
    for (i = 0; i < 2; ++i) TEST(test_lost(3 * i, i));
    for (i = 0; i < 2; ++i) TEST(test_block(i, 1));
    for (i = 0; i < 2; ++i) TEST(test_block(i, 2));
    return test_end("tcp");
}

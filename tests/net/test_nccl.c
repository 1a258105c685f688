/* test_nccl.c -- the transport over NCCL: ranks that are threads, each with a device and a stream of its own
 *
 * Runs on tests/fake, whose streams are lazy and whose communicators fail when told to. Exact data: every
 * element names where it comes from and where it must land. Faults: a rank stays away, aborts or disagrees,
 * and each call to NCCL and CUDA fails in turn, once or for good. Every rank must get a status in time, and
 * nothing may be left behind.
 */
#define _POSIX_C_SOURCE 200809L
#include "fake/fake_pool.h"

#include "upipe/net/upipe_net_nccl_copy.h"
#include "upipe/net/upipe_net_nccl.h"
#include "upipe/cuda/upipe_cuda_device.h"

#define RANK_FIELDS                   \
    ncclComm_t nccl; /* the host's */ \
    upipe_nccl team;
#define CREW_FIELDS                                \
    ncclUniqueId id, more;                         \
    int blocking, grouped;                         \
    int zero_sm;  /* copy engines are asked for */ \
    int per_call; /* by each call: the communicator's policy does not */
#define RANK_DEAD(k)     CHECK((k)->team.nccl == NULL)
#define MAY_FAIL_WITH(s) ((s) == UPIPE_OK || (s) == UPIPE_ERR_BACKEND || (s) == UPIPE_ERR_MEMORY)
enum { EVERY_BLOCKS = 1 };
#include <sys/resource.h>

#include "upipe/upipe_unwind.h"
#include "ranks.h"

enum { PLAIN, ASKED, LATER }; /* LATER: the body asks */

static void crew_begin(crew *all)
{
    fake_engine_calls();
    CHECK(ncclGetUniqueId(&all->id) == ncclSuccess);
    CHECK(ncclGetUniqueId(&all->more) == ncclSuccess);
}

static void crew_end(crew *all)
{
    (void)all;
}

static void rank_begin(rank_buf *k)
{
    crew *all = k->crew;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclResult_t r;
    config.blocking = all->blocking;
    if (all->zero_sm && !all->per_call) config.CTAPolicy = NCCL_CTA_POLICY_ZERO;
    if (all->zero_sm)
        CHECK_STATUS(upipe_nccl_slab((void **)&k->slab, SLAB, &k->ctx.err), UPIPE_OK, k->ctx.err);
    else
        OK(cudaMalloc((void **)&k->slab, SLAB));
    r = ncclCommInitRankConfig(&k->nccl, all->ranks, all->id, k->rank, &config);
    CHECK(r == ncclSuccess || (!all->blocking && r == ncclInProgress));
}

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

static upipe_status rank_ready(rank_buf *k)
{
    return k->crew->zero_sm == ASKED ? upipe_nccl_zero_sm(&k->ctx, &k->team, k->slab, SLAB) : UPIPE_OK;
}

static upipe_status rank_free(rank_buf *k)
{
    upipe_status s;
    CHECK(k->team.nccl == k->nccl || k->team.nccl == NULL);
    s = upipe_nccl_free(&k->team, &k->ctx.err);
    k->nccl = k->team.nccl; /* NULL: a failure has freed it, perhaps one that free has found */
    return s;
}

static void rank_end(rank_buf *k, int made)
{
    (void)made;
    if (k->nccl != NULL) CHECK(ncclCommAbort(k->nccl) == ncclSuccess);
    if (k->crew->zero_sm)
        CHECK_STATUS(upipe_nccl_slab_free(k->slab, &k->ctx.err), UPIPE_OK, k->ctx.err);
    else
        (void)cudaFree(k->slab);
}

static upipe_status engines_body(rank_buf *k)
{
    UPIPE_TRY(all_body(k));
    CHECK_INT(k->team.engine_transfers, k->crew->zero_sm && !k->crew->grouped ? 3 : 0);
    return UPIPE_OK;
}

/* Slices of `n` words, gathered in place and from elsewhere. */
static upipe_status slices(rank_buf *k, int n)
{
    uint32_t host[RANKS_MAX * WORDS];
    upipe_ctx *c = &k->ctx;
    const int64_t before = c->team->sent_bytes, moved = c->team->moved_bytes;
    const size_t bytes = (size_t)n * 4;
    int64_t first, mine = upipe_reduce_slice(n, k->rank, k->ranks, &first);
    for (int apart = 0; apart < 2; ++apart) {
        uint32_t *own = apart ? k->send : k->recv + first;
        int wrong = 0;
        memset(host, 0xee, bytes);
        put(k, k->recv, host, bytes);
        for (int i = 0; i < mine; ++i) host[i] = word_of(k->rank, apart, i);
        put(k, own, host, (size_t)mine * 4);
        UPIPE_TRY(upipe_slices_gather(c, c->team, k->recv, own, n, 4));
        UPIPE_TRY(upipe_comm_settle(c));
        get(k, host, k->recv, bytes);
        for (int r = 0; r < k->ranks; ++r) {
            const int64_t theirs = upipe_reduce_slice(n, r, k->ranks, &first);
            for (int i = 0; i < theirs; ++i) wrong += host[first + i] != word_of(r, apart, i);
        }
        CHECK_INT(wrong, 0);
    }
    CHECK_INT(c->team->sent_bytes - before, 2 * (k->ranks - 1) * mine * 4);
    CHECK_INT(c->team->moved_bytes - moved, 2 * (n - mine) * 4);
    return UPIPE_OK;
}

static upipe_status slices_body(rank_buf *k)
{
    return slices(k, k->ranks * WORDS);
}

static upipe_status odd_slices_body(rank_buf *k)
{
    return slices(k, k->ranks * WORDS - 1);
}

/* ---- faults ---- */

static upipe_status absent_body(rank_buf *k)
{
    upipe_ctx *c = &k->ctx;
    upipe_status s;
    UPIPE_TRY(all_to_all(k, 1));
    UPIPE_TRY(upipe_comm_barrier(c, c->team));
    c->team->deadline = 0.2;
    if (k->rank == k->crew->victim) {
        test_nap(0.5);
        c->team->deadline = 10;
        s = call(k, k->crew->what); /* all others have gone */
        CHECK_REFUSED(s, UPIPE_ERR_ABORTED, c->err, "has aborted");
    } else {
        s = call(k, k->crew->what);
        /* one is first, and the others may learn of it before their own deadline */
        CHECK(s == UPIPE_ERR_TIMEOUT || s == UPIPE_ERR_ABORTED);
        if (s == UPIPE_ERR_TIMEOUT) CHECK_TEXT(c->err.text, "waited 0.2 s in ");
        /* one that comes when another has given up already has nothing in flight */
        if (s == UPIPE_ERR_TIMEOUT) /* with copy engines hosts compare first: nothing is in flight */
            CHECK_INT(c->team->quarantine, k->crew->what == AT_TRANSFER && !k->crew->zero_sm);
        if (s == UPIPE_ERR_TIMEOUT && k->crew->zero_sm) CHECK_TEXT(c->err.text, "to come");
    }
    check_dead(k);
    return s;
}

enum { UP_FRONT, BETWEEN, ABORTS };

static upipe_status abort_body(rank_buf *k)
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
        CHECK_REFUSED(s, UPIPE_ERR_ABORTED, c->err, "had enough");
        /* BETWEEN: unless the transfer has ended meanwhile; with copy engines none has begun */
        if (k->crew->what != BETWEEN || k->crew->zero_sm) CHECK_INT(c->team->quarantine, 0);
    } else {
        s = all_to_all(k, 1);
        if (s == UPIPE_OK && k->crew->what == BETWEEN) s = all_to_all(k, 1); /* its part was under way */
        CHECK_REFUSED(s, UPIPE_ERR_ABORTED, c->err, "has aborted");
    }
    check_dead(k);
    return s;
}

enum { KIND, COUNT, DRIFT, FIELD, ITSELF, MISMATCHES };

static upipe_status mismatch_body(rank_buf *k)
{
    static const char *const words[] = {"in a", "gathers 2", "is in its", "heads is", "does not receive"};
    upipe_ctx *c = &k->ctx;
    int64_t mine[2] = {1, 2}, all[2 * RANKS_MAX];
    int odd = k->rank == k->crew->victim, what = k->crew->what;
    const upipe_fields fields = fields_of("heads", 32 + odd);
    upipe_msg own;
    upipe_status s;
    UPIPE_TRY(all_to_all(k, 1));
    own = (upipe_msg){
        .peer = k->rank, .count = 1, .send = k->send, .recv = k->recv, .send_bytes = 4, .recv_bytes = 8};
    if (what == DRIFT && odd) { /* one transfer with nobody too many */
        UPIPE_TRY(upipe_comm_start(c, c->team, k->list, 0));
        s = upipe_comm_wait(c, c->team);
        if (k->crew->zero_sm) { /* compared at once */
            CHECK_REFUSED(s, UPIPE_ERR_MISMATCH, c->err, "in an all-gather");
            check_dead(k);
            return s;
        }
        UPIPE_TRY(s);
    }
    if (what == ITSELF) {
        if (odd) {
            s = upipe_comm_start(c, c->team, &own, 1);
            if (s == UPIPE_OK && k->crew->zero_sm) s = upipe_comm_wait(c, c->team);
        } else if (k->crew->zero_sm) {
            s = upipe_comm_start(c, c->team, &own, 0); /* the same call: else its number is found first */
            if (s == UPIPE_OK) s = upipe_comm_wait(c, c->team);
            if (s == UPIPE_OK) s = upipe_comm_barrier(c, c->team);
            CHECK_STATUS(s, UPIPE_ERR_ABORTED, c->err);
            check_dead(k);
            return s;
        } else { /* hears of it */
            s = upipe_comm_barrier(c, c->team);
            CHECK_STATUS(s, UPIPE_ERR_ABORTED, c->err);
            check_dead(k);
            return s;
        }
    } else if (what == KIND && odd) {
        s = upipe_comm_barrier(c, c->team);
    } else if (what == FIELD) {
        s = upipe_comm_agree(c, c->team, &fields);
    } else {
        s = upipe_comm_all_gather(c, c->team, all, mine, what == COUNT && odd ? 2 : 1);
    }
    CHECK_REFUSED(s, UPIPE_ERR_MISMATCH, c->err,
                  what == DRIFT && k->crew->zero_sm ? "in a transfer" : words[what]);
    check_dead(k);
    return s;
}

/* ---- copy engines ---- */

enum { PLACES, OUTSIDE, PARTS, CAPTURED, BESIDE, ODD_LISTS };

/* One transfer in which a rank is unlike the others, and one that goes by engines again: both bytes right. */
static upipe_status odd_list_body(rank_buf *k)
{
    uint32_t host[RANKS_MAX * 2 * WORDS], *outside = NULL;
    upipe_ctx *c = &k->ctx;
    ncclComm_t two[2];
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    int odd = k->rank == k->crew->victim, what = k->crew->what, p, i, wrong = 0, n = k->ranks * WORDS;
    memset(k->list, 0, sizeof k->list);
    memset(host, 0xee, sizeof host);
    for (p = 0; p < k->ranks; ++p)
        for (i = 0; i < WORDS; ++i) host[p * WORDS + i] = word_of(k->rank, p, i);
    if (what == OUTSIDE && odd) OK(cudaMalloc((void **)&outside, sizeof host));
    put(k, outside != NULL ? outside : k->send, host, sizeof host);
    for (p = 0; p < k->ranks; ++p) {
        upipe_msg *s = &k->list[p];
        s->peer = p;
        s->count = 1;
        s->send = (outside != NULL ? outside : k->send) + p * WORDS;
        s->recv = k->recv + p * WORDS + (odd && (what == PLACES || what == CAPTURED) ? 64 : 0);
        s->send_bytes = s->recv_bytes = WORDS * 4;
        /* of three ranks, two send each other half, and one with itself */
        if (what == PARTS && !odd && p != k->crew->victim) s->send_bytes = s->recv_bytes = WORDS * 2;
    }
    if (what == CAPTURED) OK(cudaStreamBeginCapture(k->stream, cudaStreamCaptureModeThreadLocal));
    UPIPE_TRY(upipe_comm_start(c, c->team, k->list, k->ranks));
    CHECK_STATUS(upipe_nccl_sync(c, &k->team), UPIPE_ERR_ARG, c->err);
    /* what the host enqueues meanwhile is neither waited for nor in the way */
    if (what == BESIDE) stall(k, two);
    (void)fake_waits(k->rank);
    UPIPE_TRY(upipe_comm_wait(c, c->team));
    /* hosts compare, and meet, without a device */
    if (what == BESIDE) {
        CHECK(!k->team.ahead || fake_waits(k->rank) == 0);
        UPIPE_TRY(upipe_comm_barrier(c, c->team));
        CHECK(cudaStreamQuery(k->stream) == cudaErrorNotReady);
        stall_end(two);
    }
    if (what == CAPTURED) { /* nobody can compare places in a graph: grouped */
        OK(cudaStreamEndCapture(k->stream, &graph));
        OK(cudaGraphInstantiate(&exec, graph, 0));
        OK(cudaGraphLaunch(exec, k->stream));
        UPIPE_TRY(upipe_nccl_sync(c, &k->team));
        OK(cudaGraphExecDestroy(exec));
        OK(cudaGraphDestroy(graph));
    }
    get(k, host, k->list[0].recv, (size_t)n * 4);
    for (p = 0; p < k->ranks; ++p)
        for (i = 0; i < (int)k->list[p].recv_bytes / 4; ++i)
            wrong += host[p * WORDS + i] != word_of(p, k->rank, i);
    CHECK_INT(wrong, 0);
    CHECK_INT(k->team.engine_transfers, what == BESIDE);
    if (outside != NULL) OK(cudaFree(outside));
    UPIPE_TRY(all_to_all(k, 1));
    CHECK_INT(k->team.engine_transfers, 1 + (what == BESIDE));
    return UPIPE_OK;
}

enum { NO_WINDOW, ONE_WITHOUT, DRIVER, OLD, SIZES, NO_SLAB, DOMAIN_OF_ONE, NO_MEMORY, REFUSALS };

/* Copy engines are asked for and not there: every rank says why, alike, and goes on without. */
static upipe_status refused_body(rank_buf *k)
{
    static const char *const words[] = {"no symmetric window",
                                        "no symmetric window for rank 0",
                                        "rank 1 has a driver for CUDA 12040",
                                        "rank 1 has NCCL 22707, copy engines need 22800",
                                        "on rank 1, which needs NCCL 23007, and a rank has 23004",
                                        "rank 1 has no slab",
                                        "1 of 3 ranks",
                                        "rank 0 cannot make a file in /dev/shm: Too many open files"};
    upipe_ctx *c = &k->ctx;
    int odd = k->rank == 1, what = k->crew->what;
    CHECK_STATUS(upipe_nccl_zero_sm(c, &k->team, what == NO_SLAB && odd ? NULL : k->slab,
                                    (size_t)(what == SIZES && odd ? SLAB / 2 : SLAB)),
                 UPIPE_OK, c->err);
    CHECK_INT(k->team.zero_sm, 0);
    CHECK_TEXT(k->team.zero_sm_text, words[what]);
    CHECK_TEXT(k->team.zero_sm_text, "grouped");
    CHECK_STATUS(upipe_nccl_zero_sm(c, &k->team, k->slab, SLAB), UPIPE_ERR_ARG, c->err);
    UPIPE_TRY(all_to_all(k, 2));
    CHECK_INT(k->team.engine_transfers, 0);
    return UPIPE_OK;
}

/* Slabs of unequal sizes, where NCCL has windows of these; and calls that ask for the engines by themselves where every rank
 * can make them. What lies inside every rank's is moved by engines. */
static upipe_status unequal_body(rank_buf *k)
{
    const size_t bytes = SLAB - 4096 * (size_t)k->rank;
    UPIPE_TRY(upipe_nccl_zero_sm(&k->ctx, &k->team, k->slab, bytes));
    CHECK_INT(k->team.zero_sm, 1);
    CHECK_INT(k->team.per_call, k->crew->per_call);
    CHECK_TEXT(k->team.zero_sm_text,
               k->crew->per_call ? "by each call" : "by the communicator's CTAPolicy, if");
    UPIPE_TRY(all_to_all(k, 1));
    CHECK_INT(k->team.engine_transfers, 1);
    return UPIPE_OK;
}

/* Memory that NCCL cannot show to others ends the team: on one rank, and so on all. */
static upipe_status foreign_body(rank_buf *k)
{
    upipe_status s = upipe_nccl_zero_sm(&k->ctx, &k->team,
                                        k->rank == 1 ? (char *)k->slab + 4096 : (char *)k->slab, SLAB / 2);
    CHECK(s == (k->rank == 1 ? UPIPE_ERR_BACKEND : UPIPE_ERR_ABORTED));
    CHECK_TEXT(k->ctx.err.text, k->rank == 1 ? "ncclCommWindowRegister" : "has aborted");
    CHECK_INT(k->team.zero_sm, 0);
    check_dead(k);
    return s;
}

/* NCCL does not know its domain, which it says with no rank in it. */
static upipe_status no_domain_body(rank_buf *k)
{
    upipe_status s = upipe_nccl_zero_sm(&k->ctx, &k->team, k->slab, SLAB);
    CHECK(s == UPIPE_ERR_BACKEND || s == UPIPE_ERR_ABORTED);
    CHECK_TEXT(k->ctx.err.text, s == UPIPE_ERR_BACKEND ? "ncclTeamLsa has failed" : "has aborted");
    CHECK_INT(k->team.zero_sm, 0);
    check_dead(k);
    return s;
}

/* Whether the process may open another file. */
static void files_left(int yes)
{
    static struct rlimit before;
    struct rlimit now;
    if (before.rlim_max == 0) CHECK(getrlimit(RLIMIT_NOFILE, &before) == 0);
    now = before;
    if (!yes) now.rlim_cur = 0;
    CHECK(setrlimit(RLIMIT_NOFILE, &now) == 0);
}

/* The hosts' memory is found by the number of a process and of its file. What else may lie under these is left alone: a file
 * without the mark is not written to, what is no file is not opened. */
static void test_board(void)
{
    enum { HOSTS = 2 };
    const int64_t here = (int64_t)getpid() << 32, mark = 5;
    int64_t rows[(1 + HOSTS) * UPI_NCCL_ROW] = {0}, *made = rows + UPI_NCCL_ROW + UPI_NCCL_HEAD;
    upipe_nccl m[HOSTS];
    upipe_err e;
    int fd = upi_nccl_board_make(mark), small = upi_nccl_board_make(mark), ends[2], again;
    memset(m, 0, sizeof m);
    for (int r = 0; r < HOSTS; ++r) m[r].comm.rank = r, m[r].comm.ranks = HOSTS;
    CHECK_INT(upi_nccl_board_map(&m[0], fd, mark), 0);
    again = upi_nccl_board_open(here + fd);
    CHECK_INT(upi_nccl_board_map(&m[1], again, mark + 2), ENOENT);
    CHECK_INT(m[0].cards[0].row[0][0], mark);
    CHECK_INT(upi_nccl_board_map(&m[1], small, mark), ENOENT);
    CHECK(m[1].cards == NULL);
    CHECK_INT(upi_nccl_board_map(&m[1], again, mark), 0);
    m[0].cards[1].turn = 7;
    CHECK_INT(m[1].cards[1].turn, 7);
    CHECK(pipe(ends) == 0);
    CHECK_INT(upi_nccl_board_open(here + ends[0]), -1);
    for (int i = 0; i < 2; ++i) (void)close(ends[i]);
    CHECK_INT(upi_nccl_board_open(here + ends[0]), -1);
    CHECK_INT(upi_nccl_board_map(&m[1], -1, mark), ENOENT);
    for (int r = 0; r < HOSTS; ++r) CHECK_STATUS(upi_nccl_leave(&m[r], &e), UPIPE_OK, e);
    (void)close(fd), (void)close(small), (void)close(again);
    /* of the ranks that have a window one does not reach the memory */
    m[0].rows = rows;
    for (int r = 0; r < HOSTS; ++r) {
        made[r * UPI_NCCL_ROW + UPI_NCCL_WINDOW] = 1;
        made[r * UPI_NCCL_ROW + UPI_NCCL_DOMAIN] = HOSTS;
        made[r * UPI_NCCL_ROW + UPI_NCCL_CARDS] = r == 0;
    }
    CHECK_TEXT(upi_nccl_incomplete(&m[0]), "rank 1 does not reach rank 0's files in /proc");
}

static void test_engines(crew *all)
{
    all->zero_sm = ASKED;
    for (int i = 0; i < ODD_LISTS; ++i) {
        all->victim = i % 3;
        all->what = i;
        crew_good(all, 3, odd_list_body);
        CHECK_INT(fake_engine_calls(), 3 * (1 + (i == BESIDE)));
    }
    all->zero_sm = LATER;
    for (int i = 0; i < REFUSALS; ++i) {
        all->what = i;
        fake_symmetric(i == NO_WINDOW ? 0 : i == ONE_WITHOUT ? 1 : 2);
        fake_driver(1, i == DRIVER ? 12040 : 0);
        fake_nccl_version(1, i == OLD ? 22707 : i == SIZES ? 23004 : 0);
        fake_domain(i == DOMAIN_OF_ONE);
        files_left(i != NO_MEMORY);
        crew_good(all, 3, refused_body);
        files_left(1);
        CHECK_INT(fake_engine_calls(), 0);
        fake_symmetric(2);
        fake_driver(1, 0);
        fake_nccl_version(1, 0);
        fake_domain(0);
    }
    /* the newest everywhere; one rank that has no policy of a call; none that has */
    for (int i = 0; i < 3; ++i) {
        all->per_call = i == 0;
        fake_nccl_version(i == 1 ? 1 : -1, i == 0 ? 0 : 23007);
        crew_good(all, 3, unequal_body);
        CHECK_INT(fake_engine_calls(), 3);
        fake_nccl_version(i == 1 ? 1 : -1, 0);
    }
    all->per_call = 0;
    if (!all->blocking) { /* else NCCL waits for ever */
        crew_run(all, 3, 20, foreign_body, 0, -1, FAKE_ONCE);
        fake_domain(-1);
        crew_run(all, 3, 20, no_domain_body, 0, -1, FAKE_ONCE);
        fake_domain(0);
    }
    all->zero_sm = PLAIN;
}

/* ---- in the stream's order ---- */

/* No host waits for a device: all of it runs behind streams that do not go on yet. */
static upipe_status ahead_body(rank_buf *k)
{
    uint32_t host[WORDS];
    upipe_ctx *c = &k->ctx;
    ncclComm_t two[2];
    int wrong = 0;
    UPIPE_TRY(all_to_all(k, 1));
    for (int w = 0; w < WORDS; ++w) host[w] = word_of(k->rank, 0, w);
    put(k, k->recv, host, sizeof host);
    stall(k, two);
    (void)fake_waits(k->rank);
    for (int i = 0; i < 2 * k->ranks - 1; ++i) { /* round the team, through both halves of the slab */
        uint32_t *from = i % 2 == 0 ? k->recv : k->send, *to = i % 2 == 0 ? k->send : k->recv;
        UPIPE_TRY(shift_start(c, c->team, to, from, sizeof host, 1));
        UPIPE_TRY(upipe_comm_wait(c, c->team));
        OK(cudaMemsetAsync(from, 0xdd, sizeof host, k->stream)); /* freed, and used for something else */
    }
    CHECK_INT(fake_waits(k->rank), 0);
    CHECK(cudaStreamQuery(k->stream) == cudaErrorNotReady);
    stall_end(two);
    UPIPE_TRY(c->ops->sync(c));
    get(k, host, k->send, sizeof host);
    for (int w = 0; w < WORDS; ++w) wrong += host[w] != word_of((k->rank + 1) % k->ranks, 0, w);
    CHECK_INT(wrong, 0);
    return UPIPE_OK;
}

/* What is a rank's own: what its stream has before a transfer, which the deadline does not count, and a sync. */
static upipe_status own_body(rank_buf *k)
{
    upipe_ctx *c = &k->ctx;
    ncclComm_t two[2];
    c->team->deadline = 0.02;
    stall(k, two);
    for (int i = 0; i < 3; ++i) { /* each call looks at the stream */
        UPIPE_TRY(shift_start(c, c->team, k->recv, k->send, 64, 1));
        UPIPE_TRY(upipe_comm_wait(c, c->team));
        test_nap(0.03);
    }
    c->team->deadline = 20;
    stall_end(two);
    if (k->rank == 0) UPIPE_TRY(upipe_nccl_sync(c, &k->team));
    return upipe_comm_barrier(c, c->team);
}

/* More than fit: the host waits for the oldest, whose peers are there. */
static upipe_status full_body(rank_buf *k)
{
    upipe_ctx *c = &k->ctx;
    int64_t left;
    for (int i = 0; i < 3 * UPIPE_NCCL_AHEAD; ++i) {
        UPIPE_TRY(shift_start(c, c->team, k->recv, k->send, 64, 1));
        UPIPE_TRY(upipe_comm_wait(c, c->team));
        CHECK(k->team.begun - k->team.ended <= UPIPE_NCCL_AHEAD);
    }
    /* one that NCCL has not enqueued yet is in flight, although its event was passed by an earlier one */
    UPIPE_TRY(upi_nccl_drain(c, &k->team, 0));
    UPIPE_TRY(upi_nccl_begin(c, &k->team, UPI_TEAM_TRANSFER));
    UPIPE_TRY(upi_nccl_open(c, &k->team));
    for (int i = 0; i < 20; ++i) {
        UPIPE_TRY(upi_nccl_look(c, &k->team, &left));
        CHECK_INT(left, 1);
    }
    UPIPE_TRY(upi_nccl_close(c, &k->team));
    return upi_nccl_drain(c, &k->team, 0);
}

enum { BY_CALLS, BY_SYNC, BY_NCCL_SYNC, BY_GATHER, BY_FREE, BY_WAYS };

/* A rank never comes. The others' hosts have run ahead, and freed the buffers: they learn of it in time by whatever
 * they do next, and their pools give out nothing of what the rank may still access. */
static upipe_status never_body(rank_buf *k)
{
    upipe_ctx *c = &k->ctx;
    int what = k->crew->what, i;
    upipe_mem_block blocks[4];
    upipe_mem mem;
    void *from, *to, *again;
    upipe_status s = UPIPE_OK;
    double began;
    UPIPE_TRY(all_to_all(k, 1));
    UPIPE_TRY(upipe_comm_barrier(c, c->team));
    if (k->rank == k->crew->victim) {
        test_nap(0.6);
        return UPIPE_ERR_ABORTED;
    }
    c->team->deadline = 0.2;
    upipe_mem_init(&mem, k->slab, SLAB, blocks, 4);
    c->mem = &mem;
    UPIPE_TRY(upipe_alloc(c, &from, 64, UPIPE_USE_OTHER, "from"));
    UPIPE_TRY(upipe_alloc(c, &to, 64, UPIPE_USE_OTHER, "to"));
    UPIPE_TRY(shift_start(c, c->team, to, from, 64, 1));
    UPIPE_TRY(upipe_comm_wait(c, c->team));
    UPIPE_TRY(upipe_free(c, from));
    UPIPE_TRY(upipe_free(c, to));
    began = test_seconds();
    if (what == BY_FREE) {
        s = upipe_nccl_free(&k->team, &c->err);
        CHECK(s == UPIPE_ERR_TIMEOUT || s == UPIPE_ERR_ABORTED);
        CHECK(k->team.nccl == NULL && test_seconds() - began < 3);
        CHECK_INT(k->team.comm.quarantine, 1); /* the host's pool has what the transfer was for */
        upipe_mem_destroy(&mem, NULL);
        return s;
    }
    for (i = 0; what == BY_CALLS && s == UPIPE_OK && test_seconds() - began < 5; ++i) {
        s = upipe_comm_start(c, c->team, k->list, 0);
        if (s == UPIPE_OK) s = upipe_comm_wait(c, c->team);
        test_nap(0.005);
    }
    if (what == BY_SYNC) s = c->ops->sync(c);
    if (what == BY_NCCL_SYNC) s = upipe_nccl_sync(c, &k->team);
    if (what == BY_GATHER) s = call(k, AT_GATHER);
    CHECK(s == UPIPE_ERR_TIMEOUT || s == UPIPE_ERR_ABORTED);
    CHECK(test_seconds() - began < 3); /* of 20, were it not this team's deadline */
    CHECK_INT(c->team->quarantine, 1);
    CHECK(upipe_unwind(c, s, 0, NULL) == s); /* the stream goes on: it does not hang here */
    CHECK_STATUS(upipe_alloc(c, &again, 64, UPIPE_USE_OTHER, "again"), UPIPE_ERR_ARG, c->err);
    CHECK_STATUS(upipe_mem_destroy(&mem, &c->err), UPIPE_OK, c->err);
    check_dead(k);
    return s;
}

/* What the team knows nothing of, a graph's transfers or another communicator's, is in its way. */
static upipe_status behind_body(rank_buf *k)
{
    upipe_ctx *c = &k->ctx;
    ncclComm_t two[2];
    upipe_status s;
    double began;
    UPIPE_TRY(all_to_all(k, 1));
    c->team->deadline = 0.2;
    stall(k, two);
    UPIPE_TRY(shift_start(c, c->team, k->recv, k->send, 64, 1));
    UPIPE_TRY(upipe_comm_wait(c, c->team));
    began = test_seconds();
    s = upipe_nccl_sync(c, &k->team);
    CHECK(s == UPIPE_ERR_TIMEOUT || s == UPIPE_ERR_ABORTED);
    CHECK(test_seconds() - began < 3);
    stall_end(two);
    check_dead(k);
    return s;
}

/* ---- two communicators of one rank ---- */

enum { SERIALISED, DISORDER, OTHER_GONE, JOINED };

upipe_status app_ops(upipe_ops *ops, upipe_cuda *device, upipe_err *e); /* ../cuda/table.cpp */

/* The team has failed, and with it a transfer into k->recv: the host gets no number of it, and waits for its device
 * as before. */
static void check_no_result(rank_buf *k)
{
    float host[4] = {0};
    upipe_ctx c = k->ctx;
    upipe_cuda device;
    upipe_ops ops;
    cublasHandle_t blas;
    CHECK(cublasCreate(&blas) == CUBLAS_STATUS_SUCCESS);
    CHECK_STATUS(upipe_cuda_init(&device, blas, &c.err), UPIPE_OK, c.err);
    CHECK_STATUS(app_ops(&ops, &device, &c.err), UPIPE_OK, c.err);
    c.ops = &ops;
    CHECK_REFUSED(ops.copy(&c, host, k->recv, sizeof host), UPIPE_ERR_ABORTED, c.err,
                  upi_nccl_failure(c.team)->text);
    CHECK_STATUS(ops.copy(&c, k->recv, host, sizeof host), UPIPE_OK, c.err);
    CHECK_STATUS(ops.sync(&c), UPIPE_OK, c.err);
    CHECK_STATUS(upipe_cuda_free(&device, &c.err), UPIPE_OK, c.err);
    CHECK(cublasDestroy(blas) == CUBLAS_STATUS_SUCCESS);
}

/* Transfers of both in turn, on a stream each. DISORDER: one rank begins with the other one. OTHER_GONE: one rank never
 * comes to the second one, and the first one fails with it. */
static upipe_status pair_body(rank_buf *k, upipe_nccl *second, upipe_ctx *other)
{
    upipe_ctx *c = &k->ctx;
    int odd = k->rank == k->crew->victim, what = k->crew->what, i, w, wrong = 0;
    uint32_t host[2 * WORDS];
    upipe_status s = UPIPE_OK;
    CHECK_STATUS(upipe_nccl_join(&k->team, second, &c->err), UPIPE_OK, c->err);
    CHECK_STATUS(upipe_nccl_join(second, &k->team, &c->err), UPIPE_ERR_ARG, c->err);
    c->team->deadline = other->team->deadline = what == SERIALISED ? 20 : 0.2;
    for (i = 0; i < 6 && s == UPIPE_OK && !(what == OTHER_GONE && odd); ++i) {
        int turn = what == SERIALISED ? i % 2 : odd ? (i + 1) % 2 : i % 2, next = (k->rank + 1) % k->ranks;
        upipe_ctx *at = turn ? other : c;
        for (w = 0; w < WORDS; ++w) host[w] = word_of(k->rank, next, w + i);
        OK(cudaMemcpyAsync(k->send + 64 * turn, host, WORDS * 4, cudaMemcpyHostToDevice,
                           (cudaStream_t)at->stream));
        s = shift_start(at, at->team, k->recv + 64 * turn, k->send + 64 * turn, WORDS * 4, 1);
        if (s == UPIPE_OK) s = upipe_comm_wait(at, at->team);
        if (s != UPIPE_OK) *c = *at;
    }
    if (s == UPIPE_OK && what == OTHER_GONE && odd) test_nap(0.6), s = UPIPE_ERR_ABORTED;
    if (s == UPIPE_OK) s = c->ops->sync(c); /* of one stream: and all transfers have ended */
    if (what != SERIALISED) {
        CHECK(s == UPIPE_ERR_TIMEOUT || s == UPIPE_ERR_ABORTED);
        if (what == OTHER_GONE && odd) return s;
        CHECK(k->team.nccl == NULL && second->nccl == NULL);
        check_no_result(k);
        return s;
    }
    UPIPE_TRY(s);
    OK(cudaMemcpy(host, k->recv, WORDS * 4, cudaMemcpyDeviceToHost));
    OK(cudaMemcpy(host + WORDS, k->recv + 64, WORDS * 4, cudaMemcpyDeviceToHost));
    for (w = 0; w < 2 * WORDS; ++w)
        wrong += host[w] != word_of((k->rank + k->ranks - 1) % k->ranks, k->rank, w % WORDS + 4 + w / WORDS);
    CHECK_INT(wrong, 0);
    return UPIPE_OK;
}

static upipe_status joined_body(rank_buf *k)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    upipe_nccl second;
    upipe_ctx other = k->ctx;
    upipe_err err;
    ncclComm_t nccl;
    cudaStream_t stream;
    ncclResult_t r;
    upipe_status s;
    config.blocking = k->crew->blocking;
    r = ncclCommInitRankConfig(&nccl, k->ranks, k->crew->more, k->rank, &config);
    CHECK(r == ncclSuccess || r == ncclInProgress);
    CHECK_STATUS(upipe_nccl_init(&second, nccl, 20, &err), UPIPE_OK, err);
    OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    other.stream = stream;
    other.team = &second.comm;
    s = pair_body(k, &second, &other);
    nccl = second.nccl;
    (void)upipe_nccl_free(&second, &err);
    if (nccl != NULL) CHECK(ncclCommAbort(nccl) == ncclSuccess);
    OK(cudaStreamDestroy(stream));
    return s;
}

static void test_ahead(crew *all)
{
    crew_good(all, 3, full_body);
    if (all->ahead) crew_good(all, 3, ahead_body);
    if (all->ahead) crew_good(all, 3, own_body);
    if (all->ahead) crew_fails(all, never_body, 1, BY_WAYS);
    if (all->ahead) crew_run(all, 3, 20, behind_body, 0, -1, FAKE_ONCE);
    for (int i = 0; i < JOINED; ++i) {
        all->victim = 1;
        all->what = i;
        fake_one_at_a_time(i == SERIALISED);
        if (i == SERIALISED)
            crew_good(all, 3, joined_body);
        else
            crew_run(all, 3, 20, joined_body, 0, -1, FAKE_ONCE);
        fake_one_at_a_time(0);
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
    CHECK_REFUSED(upipe_nccl_init(&team, nccl, 0, &e), UPIPE_ERR_ARG, e, "device 1, and device 0 is current");
    OK(cudaSetDevice(1));
    CHECK_STATUS(upipe_nccl_init(&team, nccl, 0, &e), UPIPE_OK, e);
    CHECK(team.comm.deadline == UPIPE_DEADLINE_DEFAULT);
    CHECK_STATUS(upipe_nccl_free(&team, &e), UPIPE_OK, e);
    CHECK_STATUS(upipe_nccl_free(&team, &e), UPIPE_OK, e);
    CHECK(ncclCommDestroy(nccl) == ncclSuccess);
    OK(cudaSetDevice(0));
    CHECK(fake_check_clean());
}

static void check_says(const char *path, const char *want)
{
    static char text[1 << 16];
    FILE *file = fopen(path, "rb");
    CHECK(file != NULL);
    if (file == NULL) return;
    text[fread(text, 1, sizeof text - 1, file)] = 0;
    fclose(file);
    CHECK_SAY(strstr(text, want) != NULL, "%s does not say \"%s\"", path, want);
}

/* What init allocates, and the pages that say so: the header, then nccl.md, then copy_engines.md. */
static void test_bytes(int pages, char **page)
{
    enum { TEAM = 3 };
    const size_t row = UPI_NCCL_ROW * sizeof(int64_t);
    const size_t ordinary = 2 * sizeof(upipe_msg) + UPIPE_ALL_GATHER_MAX * sizeof(int64_t);
    char says[5][100];
    upipe_nccl team[TEAM];
    ncclComm_t nccl[TEAM];
    upipe_err e;
    CHECK(ncclCommInitAll(nccl, TEAM, NULL) == ncclSuccess);
    for (int r = 0; r < TEAM; ++r) {
        const size_t device = fake_device_live(), pinned = fake_pinned_live();
        const long events = fake_live_handles();
        OK(cudaSetDevice(r));
        CHECK_STATUS(upipe_nccl_init(&team[r], nccl[r], 0, &e), UPIPE_OK, e);
        CHECK_INT(fake_device_live() - device, row * (1 + TEAM));
        CHECK_INT(fake_pinned_live() - pinned, row * (1 + TEAM));
        CHECK_INT(fake_live_handles() - events, 2 * UPIPE_NCCL_AHEAD + 1);
    }
    for (int r = 0; r < TEAM; ++r) {
        OK(cudaSetDevice(r));
        CHECK_STATUS(upipe_nccl_free(&team[r], &e), UPIPE_OK, e);
        CHECK(ncclCommDestroy(nccl[r]) == ncclSuccess);
    }
    OK(cudaSetDevice(0));
    CHECK(fake_check_clean());
    (void)snprintf(says[0], sizeof says[0], "of %zu bytes a rank through memory", row);
    (void)snprintf(says[1], sizeof says[1], "%zu * (1 + ranks) on the device and as many pinned, %zu * ranks",
                   row, ordinary);
    (void)snprintf(says[2], sizeof says[2], "%zu * (1 + ranks) bytes of device memory", row);
    (void)snprintf(says[3], sizeof says[3], "pinned memory, and %d events", 2 * UPIPE_NCCL_AHEAD + 1);
    (void)snprintf(says[4], sizeof says[4], "shared memory of %zu bytes a rank", sizeof(upi_nccl_card));
    for (int i = 0; i < 5 && pages == 3; ++i) check_says(page[i < 2 ? 0 : i < 4 ? 1 : 2], says[i]);
}

/* Which lists are one ncclAlltoAll: a mistake there would go unseen where a group does the same. */
static void test_all_to_all_list(void)
{
    static char from[1000], to[1000];
    upipe_msg list[3];
    size_t bytes;
    upipe_nccl team = {.comm.ranks = 3};
    for (int what = 0; what < 12; ++what) {
        upipe_msg *s = &list[1];
        memset(list, 0, sizeof list);
        for (int p = 0; p < 3; ++p) {
            list[p].peer = p;
            list[p].count = what == 1 ? 1 : 4;
            list[p].send = from + p * list[p].count * 8;
            list[p].recv = to + p * list[p].count * 8;
            list[p].send_bytes = list[p].recv_bytes = 8;
            list[p].send_stride = list[p].recv_stride = what == 1 ? 0 : 8; /* of one block: no matter */
        }
        bytes = 0;
        if (what == 2) s->send_stride = 9;
        if (what == 3) s->recv_stride = 9;
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
    CHECK_REFUSED(upipe_nccl_init(&team, nccl, 0.1, &e), UPIPE_ERR_TIMEOUT, e, "0.1 s");
    CHECK(ncclCommAbort(nccl) == ncclSuccess);
    CHECK(fake_check_clean());
}

/* What holds for every team, with copy engines and without. */
static void test_team(crew *all)
{
    static const int teams[] = {1, 2, 3, 8};
    for (int i = 0; i < 4; ++i) {
        crew_good(all, teams[i], engines_body);
        crew_good(all, teams[i], shift_body);
        crew_good(all, teams[i], meet_body);
        crew_good(all, teams[i], random_body);
        (void)fake_gather_calls();
        crew_good(all, teams[i], slices_body);
        CHECK_INT(fake_gather_calls(), all->zero_sm ? 0 : 2 * teams[i]); /* one for each gather and rank */
        if (teams[i] > 1) crew_good(all, teams[i], odd_slices_body);
        CHECK_INT(fake_gather_calls(), 0);
    }
    crew_fails(all, absent_body, 1, AT_COUNT);
    crew_fails(all, abort_body, 3, ABORTS);
    crew_fails(all, mismatch_body, 3, MISMATCHES);
    test_injected(all, FAKE_ONCE, 20);
    test_injected(all, FAKE_STICKY, 20);
}

int main(int argc, char **argv)
{
    crew *all = &the_crew;
    TEST(test_bytes(argc - 1, argv + 1));
    TEST(test_all_to_all_list());
    TEST(test_board());
    for (int seed = 0; seed < 4; ++seed) {
        fake_seed((uint64_t)seed);
        fake_eager(seed == 3);
        all->blocking = seed & 1;
        all->ahead = seed != 1;
        all->grouped = seed == 2;
        all->seed = (uint64_t)test_env("UPIPE_SEED", 1) + (uint64_t)seed;
        TEST(test_init());
        TEST(test_alone());
        TEST(test_team(all));
        TEST(test_ahead(all));
        if (!all->grouped) TEST(test_engines(all));
        all->zero_sm = ASKED;
        all->per_call = seed % 2 == 0;
        fake_nccl_version(-1, all->per_call ? 0 : 22809);
        TEST(test_team(all));
        fake_nccl_version(-1, 0);
        all->per_call = 0;
        all->zero_sm = PLAIN;
    }
    return test_end("nccl");
}

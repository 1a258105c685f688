/* test_mpi.c -- the transport over MPI, one process a rank; run_mpi.py starts it under mpirun
 *
 *     test_mpi all       every rank stays alive: the properties of conformance.h, and what MPI alone has
 *     test_mpi kill      ranks die one after the other: before, within and after a call
 *     test_mpi data      the part of `all` without faults, for a link that is slow and loses packets
 *     test_mpi endure    ranks make transfers until a script cuts the link between them, or stops a rank
 *
 * Each run has a communicator of its own. A rank prints its verdict; the script counts them.
 */
#define _POSIX_C_SOURCE 200809L
#define _XOPEN_SOURCE   700
#include "upipe/net/upipe_net_mpi.h"
#include "upipe/upipe_session.h"

#include "same_block.h"

/* ---- the row ---- */

enum { MPI_RANKS = 16, TAG = 7 };

static MPI_Comm the_mpi, given = MPI_COMM_NULL; /* that of a run; given: there is one already */
static upipe_mpi end, part_end[PARTS];
static MPI_Comm part_mpi[PARTS];
static int64_t fragment = UPIPE_MPI_FRAGMENT;

static void mpi_begin(member *k)
{
    (void)k;
    the_mpi = given;
    if (given == MPI_COMM_NULL) MPI_Comm_dup(MPI_COMM_WORLD, &the_mpi);
    MPI_Comm_set_errhandler(the_mpi, MPI_ERRORS_RETURN);
}

static upipe_status mpi_join(member *k)
{
    UPIPE_TRY(upipe_mpi_init(&end, the_mpi, TAG, k->all->deadline, &k->ctx.err));
    end.fragment = fragment;
    k->ctx.team = &end.comm;
    k->rank = end.comm.rank; /* `given` may number them otherwise */
    return UPIPE_OK;
}

static upipe_status mpi_leave(member *k)
{
    return upipe_mpi_free(&end, &k->ctx.err);
}

static void mpi_end(member *k)
{
    (void)k;
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Comm_free(&the_mpi);
}

/* Of the first so many processes, this one. */
static void each_process(int ranks, upipe_status (*body)(void *user, int rank), void *user)
{
    int rank;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    if (rank < ranks) CHECK_INT(body(user, rank), UPIPE_OK);
}

static int mpi_sum(member *k, int mine)
{
    int sum;
    (void)k;
    MPI_Allreduce(&mine, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    return sum;
}

static void mpi_split(int team, int rings)
{
    int rank;
    upipe_err e;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_split(MPI_COMM_WORLD, rank < team * rings ? 0 : MPI_UNDEFINED, rank, &part_mpi[WORLD]);
    if (rank >= team * rings) return;
    MPI_Comm_split(part_mpi[WORLD], rank / team, rank, &part_mpi[TEAM]);
    MPI_Comm_split(part_mpi[WORLD], rank % team, rank, &part_mpi[RING]);
    MPI_Comm_dup(part_mpi[WORLD], &part_mpi[SIDE]);
    for (int i = 0; i < PARTS; ++i) {
        MPI_Comm_set_errhandler(part_mpi[i], MPI_ERRORS_RETURN);
        CHECK_STATUS(upipe_mpi_init(&part_end[i], part_mpi[i], 0, 60, &e), UPIPE_OK, e);
    }
}

static upipe_comm *mpi_part(int which, int rank)
{
    CHECK_INT(part_end[WORLD].comm.rank, rank);
    return &part_end[which].comm;
}

static void mpi_leave_parts(int rank)
{
    upipe_err e;
    (void)rank;
    for (int i = PARTS; i-- > 0;) {
        CHECK_STATUS(upipe_mpi_free(&part_end[i], &e), UPIPE_OK, e);
        MPI_Comm_free(&part_mpi[i]);
    }
}

static void mpi_merge(void *words, int64_t bytes)
{
    MPI_Allreduce(MPI_IN_PLACE, words, (int)(bytes / 4), MPI_UINT32_T, MPI_BOR, MPI_COMM_WORLD);
}

static int teams[2], crews[2]; /* all processes; one alone has no faults of others */

static transport over_mpi = {
    .name = "mpi",
    .can = NAMES_RANKS | TELLS_WHY | COMPARES_LISTS | USES_TABLE | FREES_TOGETHER | ENDS_ALONE,
    .teams = teams,
    .crews = crews,
    .victims = 1,
    .most = 10,
    .longest = 1000,
    .rounds = 18,
    .draws_a_round = 1000,
    .large = 50000,
    .late = WORDS,
    .begin = mpi_begin,
    .join = mpi_join,
    .leave = mpi_leave,
    .end = mpi_end,
    .each = each_process,
    .sum = mpi_sum,
    .split = mpi_split,
    .part = mpi_part,
    .leave_parts = mpi_leave_parts,
    .merge = mpi_merge,
};

/* ---- messages that MPI holds ---- */

/* Long messages to a rank that never waits for them: their buffers may yet be read. */
static void quarantine(member *k)
{
    enum { LONG = 1 << 18 }; /* words */
    upipe_ctx *c = &k->ctx;
    upipe_status s = UPIPE_OK;
    member_words(k, LONG);
    line_up(k, 0.25);
    for (int p = 0; p < k->ranks; ++p) {
        k->list[p] = (upipe_msg){.peer = p, .count = 1};
        if ((k->rank == 0) == (p == 0)) continue; /* rank 0 gets one from each */
        if (k->rank == 0) {
            k->list[p].recv = k->recv;
            k->list[p].recv_bytes = LONG * 4;
        } else {
            k->list[p].send = k->send;
            k->list[p].send_bytes = LONG * 4;
        }
    }
    if (k->rank == 0) {
        CHECK_STATUS(upipe_comm_start(c, c->team, k->list, k->ranks), UPIPE_OK, c->err);
        meet(k);
        test_nap(0.25 + 0.6);
        s = upipe_comm_wait(c, c->team);
        CHECK(s == UPIPE_OK || s == UPIPE_ERR_ABORTED);
    } else {
        meet(k);
        s = transfer(k, k->list, k->ranks);
        CHECK(s == UPIPE_ERR_TIMEOUT || s == UPIPE_ERR_ABORTED);
        CHECK_INT(c->team->quarantine, 1);
    }
    if (s == UPIPE_OK) CHECK_STATUS(upipe_comm_barrier(c, c->team), UPIPE_ERR_ABORTED, c->err);
    check_dead(k);
}

/* The victim splits its messages differently. */
static void fragments(member *k)
{
    upipe_ctx *c = &k->ctx;
    upipe_status s;
    line_up(k, 20);
    if (k->rank == k->victim) end.fragment = 4096;
    s = all_to_all(k, 1);
    if (s == UPIPE_OK) s = upipe_comm_barrier(c, c->team);
    CHECK_REFUSED(s, UPIPE_ERR_MISMATCH, c->err, "at most");
    CHECK_INT(c->team->quarantine, 0);
    check_dead(k);
}

/* Somebody else's message on the team's tag: of another length than a header has, or of the same. */
static void stranger(member *k)
{
    upipe_ctx *c = &k->ctx;
    char noise[sizeof(upi_header)];
    memset(noise, 0x55, sizeof noise);
    line_up(k, 20);
    if (k->rank == 1) MPI_Send(noise, k->what == 0 ? 33 : (int)sizeof noise, MPI_BYTE, 0, TAG, the_mpi);
    meet(k);
    CHECK_REFUSED(upipe_comm_barrier(c, c->team), UPIPE_ERR_MISMATCH, c->err, "with tag 7");
    check_dead(k);
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
static void again(member *k, int fresh)
{
    CHECK_STATUS(mpi_leave(k), UPIPE_OK, k->ctx.err);
    if (fresh) {
        MPI_Comm_free(&the_mpi);
        mpi_begin(k);
    }
    k->all->deadline = 20;
    CHECK_STATUS(mpi_join(k), UPIPE_OK, k->ctx.err);
}

/* A number that rank 0 has never asked for must not be gathered by the next team. */
static void late_header(member *k)
{
    upipe_ctx *c = &k->ctx;
    int64_t mine = 111, all[MPI_RANKS];
    c->team->deadline = 0.05;
    if (k->rank != 0) {
        const upipe_status s = upipe_comm_all_gather(c, c->team, all, &mine, 1);
        CHECK(s == UPIPE_ERR_TIMEOUT || s == UPIPE_ERR_ABORTED);
    }
    c->team->deadline = 20;
    meet(k);
    again(k, k->what);
    mine = 222;
    CHECK_STATUS(upipe_comm_all_gather(c, c->team, all, &mine, 1), UPIPE_OK, c->err);
    for (int r = 0; r < k->ranks; ++r) CHECK_INT(all[r], 222);
}

enum { LATE_WORDS = 1 << 14 };

/* Rank 0 asks for data of all others, which have sent it to MPI when this returns. Data say which transfer it is. */
static void ask_late(member *k, int which)
{
    upipe_ctx *c = &k->ctx;
    line_up(k, 20);
    end.fragment = 256;
    for (int i = 0; i < k->ranks * LATE_WORDS; ++i) k->send[i] = word_of(k->rank, which, i % LATE_WORDS);
    for (int p = 0; p < k->ranks; ++p) {
        upipe_msg *s = &k->list[p];
        *s = (upipe_msg){.peer = p, .count = 1};
        if (k->rank == 0 && p != 0) s->recv = k->recv + p * LATE_WORDS, s->recv_bytes = LATE_WORDS * 4;
        if (k->rank != 0 && p == 0) s->send = k->send, s->send_bytes = LATE_WORDS * 4;
    }
    CHECK_STATUS(upipe_comm_start(c, c->team, k->list, k->ranks), UPIPE_OK, c->err);
    if (k->rank != 0) CHECK_STATUS(upipe_comm_wait(c, c->team), UPIPE_OK, c->err);
    meet(k);
}

/* Data that rank 0 has asked for, and not received when it aborts, must not be received by the next team. */
static void late_data(member *k)
{
    upipe_ctx *c = &k->ctx;
    int wrong = 0;
    member_words(k, (size_t)(k->ranks * LATE_WORDS));
    ask_late(k, 0);
    if (k->rank == 0) {
        upipe_comm_abort(c->team, "data are missing");
        c->team->deadline = 0;
        CHECK_STATUS(upipe_comm_wait(c, c->team), UPIPE_ERR_ABORTED, c->err);
        c->team->deadline = 20;
    }
    again(k, k->what);
    ask_late(k, 1);
    if (k->rank != 0) return;
    CHECK_STATUS(upipe_comm_wait(c, c->team), UPIPE_OK, c->err);
    for (int p = 1; p < k->ranks; ++p)
        for (int w = 0; w < LATE_WORDS; ++w) wrong += k->recv[p * LATE_WORDS + w] != word_of(p, 1, w);
    CHECK_INT(wrong, 0);
}

/* The victim leaves a transfer in which the others have asked for its data: they get its goodbye instead. */
static void no_data(member *k)
{
    upipe_ctx *c = &k->ctx;
    const int n = all_list(k, 1);
    line_up(k, 20);
    if (k->rank == k->victim) {
        k->fault = COPY;
        CHECK_STATUS(upipe_comm_start(c, c->team, k->list, n), UPIPE_OK, c->err);
        meet(k);
        test_nap(0.1);
        c->team->deadline = 0;
        CHECK_STATUS(upipe_comm_wait(c, c->team), UPIPE_ERR_BACKEND, c->err);
        c->team->deadline = 20;
        k->fault = 0;
    } else {
        meet(k);
        CHECK_STATUS(upipe_comm_start(c, c->team, k->list, n), UPIPE_OK, c->err);
        CHECK_REFUSED(upipe_comm_wait(c, c->team), UPIPE_ERR_ABORTED, c->err, "the copy is lost");
    }
    again(k, 1);
    CHECK_STATUS(all_to_all(k, 1), UPIPE_OK, c->err);
}

/* The victim frees its team, a part of a world in which the ranks are numbered the other way round; the others go on. */
static void early_free(member *k)
{
    upipe_ctx *c = &k->ctx;
    upipe_mpi world;
    upipe_err e;
    MPI_Comm all;
    char name[48];
    double began;
    MPI_Comm_dup(MPI_COMM_WORLD, &all);
    MPI_Comm_set_errhandler(all, MPI_ERRORS_RETURN);
    CHECK_STATUS(upipe_mpi_init(&world, all, TAG, 20, &e), UPIPE_OK, e);
    upipe_comm_part(c->team, &world.comm, k->ranks - 1, -1);
    line_up(k, 20);
    began = test_seconds();
    snprintf(name, sizeof name, "rank %d has freed its team", k->ranks - 1 - k->victim);
    if (k->rank != k->victim) {
        CHECK_REFUSED(upipe_comm_barrier(c, c->team), UPIPE_ERR_MISMATCH, c->err, name);
        check_dead(k);
    }
    CHECK(test_seconds() - began < 10);
    member_leave(k);
    CHECK_STATUS(upipe_mpi_free(&world, &e), UPIPE_OK, e);
    MPI_Comm_free(&all);
}

static void test_early_free(int ranks)
{
    int rank;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_split(MPI_COMM_WORLD, 0, -rank, &given);
    run_ranks(&over_mpi, early_free, ranks, 20, 0, 0);
    given = MPI_COMM_NULL;
}

/* ---- ranks that die ---- */

/* Rank `victim` of this communicator, its last one, is killed; the others must return in time. ENDURE: all live,
 * and a script cuts the link between them, or stops one for longer than the deadline. */
static void test_kill(MPI_Comm comm, int what)
{
    const int mark = buffers_n;
    crew *all = &the_crew;
    member *k;
    upipe_status s;
    int rank;
    *all = (crew){.t = &over_mpi, .what = what, .deadline = 30};
    MPI_Comm_size(comm, &all->ranks);
    MPI_Comm_rank(comm, &rank);
    all->victim = what == ENDURE ? -1 : all->ranks - 1;
    given = comm;
    k = &all->member[rank];
    member_begin(k, all, rank);
    CHECK_STATUS(mpi_join(k), UPIPE_OK, k->ctx.err);
    death(k);
    CHECK(what != BEFORE || !k->ctx.team->quarantine); /* who never came was never sent anything */
    k->ctx.team->deadline = 0.2;
    s = mpi_leave(k);
    CHECK(s == UPIPE_OK || s == UPIPE_ERR_BACKEND); /* headers to the dead may stay with MPI */
    if (s == UPIPE_OK) buffers_free(mark); /* else a late rank may read it, and MPI ends one that cannot */
}

static void run_kills(const char *what, int rank, int ranks)
{
    MPI_Comm comms[MPI_RANKS]; /* made while all live: comms[i] lacks the last i ranks */
    if (strcmp(what, "endure") == 0) {
        MPI_Comm_dup(MPI_COMM_WORLD, &comms[0]);
        if (test_wanted("kill"))
            test_kill(comms[0], ENDURE); /* frees nothing: the late rank still reads it */
        return;
    }
    for (int i = 0; ranks - i >= 2; ++i)
        MPI_Comm_split(MPI_COMM_WORLD, rank < ranks - i ? 0 : MPI_UNDEFINED, rank, &comms[i]);
    for (int i = 0; ranks - i >= 2; ++i) /* freed by nobody: who is killed may be reading it */
        if (test_wanted("kill")) test_kill(comms[i], i % DEATHS);
}

static void run_faults(int ranks)
{
    int i;
    TEST_OF("quarantine", run_ranks(&over_mpi, quarantine, ranks, 20, -1, 0));
    TEST_OF("fragments", run_ranks(&over_mpi, fragments, ranks, 20, 1, 0));
    for (i = 0; i < 2; ++i) TEST_OF("stranger", run_ranks(&over_mpi, stranger, ranks, 20, -1, i));
    for (i = 0; i < 2; ++i) TEST_OF("late_header", run_ranks(&over_mpi, late_header, ranks, 20, -1, i));
    for (i = 0; i < 2; ++i) TEST_OF("late_data", run_ranks(&over_mpi, late_data, ranks, 20, -1, i));
    TEST_OF("no_data", run_ranks(&over_mpi, no_data, ranks, 20, 0, 0));
    TEST(test_early_free(ranks));
}

int main(int argc, char **argv)
{
    const char *what = argc > 1 ? argv[1] : "all";
    char name[64];
    int rank, ranks, level, i, faults;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &level);
    CHECK(level >= MPI_THREAD_SERIALIZED);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    snprintf(name, sizeof name, "mpi, rank %d of %d", rank, ranks);
    if (ranks > MPI_RANKS) return 2;
    if (strcmp(what, "kill") == 0 || strcmp(what, "endure") == 0) {
        run_kills(what, rank, ranks);
        i = test_end(name);
        fflush(stdout);
        if (strcmp(what, "endure") == 0)
            test_nap(5); /* an MPI library may end a late rank when its peers have left */
        _exit(i);        /* MPI_Finalize would wait for the dead */
    }
    faults = strcmp(what, "data") != 0;
    teams[0] = ranks;
    if (ranks > 1) crews[0] = ranks;
    if (ranks >= 4) over_mpi.can |= GRIDS;
    TEST(test_init());
    TEST(test_host());
    conform(&over_mpi, faults);
    over_mpi.seed = 100;
    fragment = 100;
    TEST_OF("random_lists", run_ranks(&over_mpi, random_lists, ranks, 20, -1, 0));
    fragment = 30000;
    TEST_OF("large", run_ranks(&over_mpi, large, ranks, 30, -1, 0));
    fragment = UPIPE_MPI_FRAGMENT;
    if (ranks > 1 && faults) run_faults(ranks);
    if (ranks == 2 || ranks == 4) same_blocks(&over_mpi, ranks, 1);
    if (ranks == 4) same_blocks(&over_mpi, 2, 2);
    i = test_end(name);
    fflush(stdout);
    MPI_Finalize();
    return i;
}

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

/* A rank's end. */
typedef struct mpi_end_of {
    MPI_Comm mpi;
    upipe_mpi team;
} mpi_end_of;

static int64_t fragment = UPIPE_MPI_FRAGMENT;

static mpi_end_of *end_of(const member *k)
{
    return (mpi_end_of *)k->own;
}

/* Called by the crew's processes alone. */
static void mpi_begin(member *k)
{
    MPI_Group all, mine;
    int ranks[MPI_RANKS];
    k->own = zeroed(sizeof(mpi_end_of));
    for (int i = 0; i < k->ranks; ++i) ranks[i] = k->all->first + i * k->all->step;
    MPI_Comm_group(MPI_COMM_WORLD, &all);
    MPI_Group_incl(all, k->ranks, ranks, &mine);
    MPI_Comm_create_group(MPI_COMM_WORLD, mine, 0, &end_of(k)->mpi);
    MPI_Group_free(&mine);
    MPI_Group_free(&all);
    MPI_Comm_set_errhandler(end_of(k)->mpi, MPI_ERRORS_RETURN);
}

static upipe_status mpi_join(member *k)
{
    mpi_end_of *d = end_of(k);
    UPIPE_TRY(upipe_mpi_init(&d->team, d->mpi, TAG, k->all->deadline, &k->ctx.err));
    d->team.fragment = fragment;
    k->ctx.team = &d->team.comm;
    return UPIPE_OK;
}

static upipe_status mpi_leave(member *k)
{
    return upipe_mpi_free(&end_of(k)->team, &k->ctx.err);
}

static void mpi_end(member *k)
{
    MPI_Barrier(end_of(k)->mpi);
    MPI_Comm_free(&end_of(k)->mpi);
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
    MPI_Allreduce(&mine, &sum, 1, MPI_INT, MPI_SUM, end_of(k)->mpi);
    return sum;
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
    if (k->rank == k->victim) end_of(k)->team.fragment = 4096;
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
    if (k->rank == 1)
        MPI_Send(noise, k->what == 0 ? 33 : (int)sizeof noise, MPI_BYTE, 0, TAG, end_of(k)->mpi);
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
        MPI_Comm_free(&end_of(k)->mpi);
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
    end_of(k)->team.fragment = 256;
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
    int n;
    line_up(k, 20);
    n = all_list(k, 1);
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

/* ---- ranks that die ---- */

/* The last rank of the crew is killed; the others must return in time. ENDURE: all live, and a script cuts the link between
 * them, or stops one for longer than the deadline. Nobody frees the communicator: who is killed may be reading it. */
static void test_kill(member *k)
{
    const int mark = buffers_n;
    upipe_status s;
    CHECK_STATUS(mpi_join(k), UPIPE_OK, k->ctx.err);
    death(k);
    CHECK(k->what != BEFORE || !k->ctx.team->quarantine); /* who never came was never sent anything */
    k->ctx.team->deadline = 0.2;
    s = mpi_leave(k);
    CHECK(s == UPIPE_OK || s == UPIPE_ERR_BACKEND); /* headers to the dead may stay with MPI */
    if (s == UPIPE_OK) buffers_free(mark); /* else a late rank may read it, and MPI ends one that cannot */
}

/* One after the other, from the last rank on. All begin while all live. */
static void run_kills(int endure, int rank, int ranks)
{
    static crew crews_of[MPI_RANKS];
    const int n = endure ? 1 : ranks - 1;
    for (int i = 0; i < n && rank < ranks - i; ++i) {
        crews_of[i] = (crew){.t = &over_mpi, .ranks = ranks - i, .step = 1, .deadline = 30};
        crews_of[i].victim = endure ? -1 : ranks - i - 1;
        crews_of[i].what = endure ? ENDURE : i % DEATHS;
        member_begin(&crews_of[i].member[rank], &crews_of[i], rank);
    }
    for (int i = 0; i < n; ++i)
        if (test_wanted("kill")) test_kill(&crews_of[i].member[rank]);
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
        run_kills(strcmp(what, "endure") == 0, rank, ranks);
        i = test_end(name);
        fflush(stdout);
        if (strcmp(what, "endure") == 0)
            test_nap(5); /* an MPI library may end a late rank when its peers have left */
        _exit(i);        /* MPI_Finalize would wait for the dead */
    }
    faults = strcmp(what, "data") != 0;
    teams[0] = ranks;
    if (ranks > 1) crews[0] = ranks;
    if (ranks >= 4) over_mpi.can |= PARTS_FAIL;
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

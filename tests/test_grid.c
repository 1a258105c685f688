/* test_grid.c -- ranks that are threads in grids: who is where, what a failure releases, and what a failed init leaves */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <stdlib.h>

/* ---- the grid's own calls, counted: `alive` must come back to 0; call number `fail_at` fails ---- */

static int alive, calls, fail_at;

static void *test_calloc(size_t n, size_t bytes)
{
    if (++calls == fail_at) return NULL;
    ++alive;
    return calloc(n, bytes);
}

static void test_free(void *p)
{
    alive -= p != NULL;
    free(p);
}

static int test_create(pthread_t *t, const pthread_attr_t *how, void *(*body)(void *), void *p)
{
    return ++calls == fail_at ? 11 : pthread_create(t, how, body, p);
}

#define calloc         test_calloc
#define free           test_free
#define pthread_create test_create
#include "../upipe/net/upipe_net_threads_grid.h"
#undef calloc
#undef free
#undef pthread_create

#include "lib/test.h"

static const upipe_grid two_by_two = {.ranks = 4, .in_team = 2, .in_ring = 2};

/* ---- which ranks ---- */

static void check_part(upipe_grid_part got, upipe_grid_part want)
{
    CHECK_INT(got.first, want.first);
    CHECK_INT(got.step, want.step);
    CHECK_INT(got.ranks, want.ranks);
    CHECK_INT(got.rank, want.rank);
}

static void test_parts(void)
{
    static const struct {
        upipe_grid grid;
        int rank;
        upipe_grid_part team, ring;
    } rows[] = {
        {{12, 3, 2, 0}, 7, {6, 1, 3, 1}, {7, 3, 2, 0}}, {{12, 3, 2, 0}, 11, {9, 1, 3, 2}, {8, 3, 2, 1}},
        {{12, 3, 2, 1}, 7, {7, 2, 3, 0}, {6, 1, 2, 1}}, {{12, 3, 2, 1}, 10, {6, 2, 3, 2}, {10, 1, 2, 0}},
        {{4, 4, 1, 0}, 2, {0, 1, 4, 2}, {2, 4, 1, 0}},  {{3, 1, 3, 0}, 2, {2, 1, 1, 0}, {0, 1, 3, 2}},
        {{4, 2, 1, 0}, 3, {2, 1, 2, 1}, {3, 2, 1, 0}},  {{1, 1, 1, 1}, 0, {0, 1, 1, 0}, {0, 1, 1, 0}},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; ++i) {
        test_at("row %zu", i);
        check_part(upipe_grid_team(&rows[i].grid, rows[i].rank), rows[i].team);
        check_part(upipe_grid_ring(&rows[i].grid, rows[i].rank), rows[i].ring);
    }
}

/* ---- who is where ---- */

/* Each rank of the part brings its number in the world. */
static void check_members(upipe_comm *comm, upipe_comm *world, upipe_grid_part part)
{
    upipe_ctx c = {0};
    const int64_t mine = world->rank;
    CHECK_STATUS(upipe_comm_all_gather(&c, comm, comm->gathered, &mine, 1), UPIPE_OK, c.err);
    CHECK_INT(comm->ranks, part.ranks);
    CHECK_INT(comm->rank, part.rank);
    CHECK(upi_comm_world(comm) == world);
    for (int i = 0; i < part.ranks; ++i) {
        CHECK_INT(comm->gathered[i], part.first + i * part.step);
        CHECK_INT(upi_comm_called(comm, i), part.first + i * part.step);
    }
}

static upipe_status members_body(void *user, int rank)
{
    upipe_threads_grid *g = (upipe_threads_grid *)user;
    upipe_comm *world = upipe_threads_comm(&g->world, rank);
    const upipe_grid_part all = {0, 1, g->grid.ranks, rank};
    upipe_ctx c;
    test_rank = rank;
    upipe_threads_grid_use(g, rank, &c);
    CHECK_INT(c.team == world, g->grid.in_team == g->grid.ranks);
    CHECK_INT(c.ring == NULL, g->grid.in_ring == 1);
    check_members(world, world, all);
    check_members(c.team, world, upipe_grid_team(&g->grid, rank));
    if (c.ring != NULL) check_members(c.ring, world, upipe_grid_ring(&g->grid, rank));
    return UPIPE_OK;
}

static void test_members(void)
{
    static const upipe_grid grids[] = {{1, 1, 1, 0}, {4, 4, 1, 0}, {6, 2, 1, 0},  {3, 1, 3, 0}, {4, 2, 2, 0},
                                       {6, 3, 2, 0}, {6, 3, 2, 1}, {12, 3, 2, 0}, {12, 2, 3, 1}};
    for (size_t i = 0; i < sizeof grids / sizeof *grids; ++i) {
        upipe_threads_grid g;
        upipe_err e;
        test_at("grid %zu", i);
        CHECK_STATUS(upipe_threads_grid_init(&g, &grids[i], 20, &e), UPIPE_OK, e);
        CHECK_STATUS(upipe_threads_run(&g.world, members_body, &g, NULL, &e), UPIPE_OK, e);
        upipe_threads_grid_free(&g);
        CHECK_INT(alive, 0);
    }
}

/* ---- failures ---- */

typedef struct failing {
    upipe_threads_grid grid;
    int odd; /* the rank that gathers more numbers than the others of its team; -1: none */
    upipe_err errors[4];
} failing;

/* Gathers in the team, then in the ring. */
static upipe_status failing_body(void *user, int rank)
{
    failing *f = (failing *)user;
    const int64_t mine[2] = {0};
    upipe_ctx c = {0};
    upipe_status s;
    upipe_threads_grid_use(&f->grid, rank, &c);
    s = upipe_comm_all_gather(&c, c.team, c.team->gathered, mine, rank == f->odd ? 2 : 1);
    if (s == UPIPE_OK) s = upipe_comm_all_gather(&c, c.ring, c.ring->gathered, mine, 1);
    f->errors[rank] = c.err;
    return s;
}

/* Ranks of one team disagree: the others wait in their rings for these, and hear why, in numbers of the world. */
static void test_mismatch(void)
{
    failing f = {.odd = 3};
    upipe_status statuses[4];
    upipe_err e;
    CHECK_STATUS(upipe_threads_grid_init(&f.grid, &two_by_two, 20, &e), UPIPE_OK, e);
    CHECK_STATUS(upipe_threads_run(&f.grid.world, failing_body, &f, statuses, &e), UPIPE_ERR_MISMATCH, e);
    for (int rank = 0; rank < 4; ++rank) {
        CHECK_STATUS(statuses[rank], UPIPE_ERR_MISMATCH, f.errors[rank]);
        CHECK_TEXT(f.errors[rank].text, "rank 2");
        CHECK_TEXT(f.errors[rank].text, "rank 3");
    }
    upipe_threads_grid_free(&f.grid);
    CHECK_INT(alive, 0);
}

/* The thread of a rank does not start: those that wait in teams and rings hear of it. */
static void test_not_started(int lost)
{
    failing f = {.odd = -1};
    upipe_status statuses[4];
    char words[64];
    upipe_err e;
    snprintf(words, sizeof words, "the thread of rank %d did not start", lost);
    CHECK_STATUS(upipe_threads_grid_init(&f.grid, &two_by_two, 20, &e), UPIPE_OK, e);
    calls = 0;
    fail_at = lost + 1;
    CHECK_REFUSED(upipe_threads_run(&f.grid.world, failing_body, &f, statuses, &e), UPIPE_ERR_BACKEND, e,
                  words);
    fail_at = 0;
    for (int rank = 0; rank < 4; ++rank)
        CHECK_STATUS(statuses[rank], rank < lost ? UPIPE_ERR_ABORTED : UPIPE_ERR_BACKEND, f.errors[rank]);
    for (int rank = 0; rank < lost; ++rank) CHECK_TEXT(f.errors[rank].text, words);
    upipe_threads_grid_free(&f.grid);
    CHECK_INT(alive, 0);
}

/* ---- an init that fails ---- */

/* A world, a list of two teams, these, a list of two rings, these: each allocation fails once. */
static void test_memory(void)
{
    enum { ALLOCATIONS = 7 };
    for (int at = 1; at <= ALLOCATIONS + 1; ++at) {
        upipe_threads_grid g;
        upipe_err e;
        test_at("allocation %d", at);
        calls = 0;
        fail_at = at;
        CHECK_STATUS(upipe_threads_grid_init(&g, &two_by_two, 20, &e),
                     at <= ALLOCATIONS ? UPIPE_ERR_MEMORY : UPIPE_OK, e);
        fail_at = 0;
        CHECK_INT(alive, at <= ALLOCATIONS ? 0 : ALLOCATIONS);
        upipe_threads_grid_free(&g);
        upipe_threads_grid_free(&g);
        CHECK_INT(alive, 0);
    }
}

static void test_refused(void)
{
    static const struct {
        upipe_grid grid;
        double deadline;
        const char *words;
    } rows[] = {
        {{0, 1, 1, 0}, 20, "0 ranks are no grids"},
        {{4, 0, 1, 0}, 20, "0 ranks a team"},
        {{4, 2, 0, 0}, 20, "and 0 a ring"},
        {{4, -2, -2, 0}, 20, "-2 ranks a team"},
        {{6, 2, 2, 0}, 20, "6 ranks are no grids of 2 ranks a team and 2 a ring"},
        {{4, 8, 1, 0}, 20, "8 ranks a team"},
        {{4, 65536, 65536, 0}, 20, "65536 ranks a team"}, /* whose product is 0 in 32 bits */
        {{UPIPE_THREADS_MAX + 1, 1, 1, 0}, 20, "257 ranks"},
        {{4, 2, 2, 0}, -1, "a deadline of -1 s"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; ++i) {
        upipe_threads_grid g;
        upipe_err e;
        test_at("row %zu", i);
        CHECK_REFUSED(upipe_threads_grid_init(&g, &rows[i].grid, rows[i].deadline, &e), UPIPE_ERR_ARG, e,
                      rows[i].words);
        upipe_threads_grid_free(&g);
        CHECK_INT(alive, 0);
    }
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    TEST(test_parts());
    TEST(test_members());
    TEST(test_mismatch());
    for (int lost = 0; lost < 4; ++lost) TEST_OF("not_started", test_not_started(lost));
    TEST(test_memory());
    TEST(test_refused());
    return test_end("grid");
}

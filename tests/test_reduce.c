/* test_reduce.c -- sums over a communicator that is not the team, and whom a failure of one releases
 *
 * Four ranks are two teams and two rings. test_a2a has the bits and bytes of a sum, test_zero those of sharded states.
 */
#include "../upipe/net/upipe_net_threads.h"
#include "../upipe/upipe.h"
#include "lib/context.h"
#include "lib/grid.h"
#include "lib/test.h"

enum { TEAM = 2, RING = 2, RANKS = TEAM * RING, ELEMENTS = 1000, POOL = 1 << 20, BLOCKS = 8 };

/* What rank 0 calls, whose pool is empty. */
typedef enum call { BY_SCATTER, BY_ALL_REDUCE, BY_TEAM, BY_RING, BY_ZERO, CALLS } call;

typedef struct job {
    upipe_threads_grid grid;
    upipe_ops ops;
    call call;
} job;

static void use(job *j, int rank, upipe_ctx *c, upipe_mem *mem)
{
    *c = (upipe_ctx){.ops = &j->ops, .mem = mem};
    upipe_threads_grid_use(&j->grid, rank, c);
}

/* ---- whose sum it is ---- */

/* Every rank brings 1, 10, 100 or 1000. */
static float brought(int rank)
{
    static const float values[RANKS] = {1, 10, 100, 1000};
    return values[rank];
}

static void check_sum(upipe_ctx *c, int rank, upipe_comm *comm, float want)
{
    upipe_comm *const team = c->team, *const ring = c->ring;
    float data[ELEMENTS];
    int wrong = 0;
    for (int i = 0; i < ELEMENTS; ++i) data[i] = brought(rank);
    CHECK_STATUS(upipe_all_reduce(c, comm, data, ELEMENTS), UPIPE_OK, c->err);
    for (int i = 0; i < ELEMENTS; ++i) wrong += data[i] != want;
    CHECK_SAY(wrong == 0, "rank %d has %g, not %g", rank, (double)data[0], (double)want);
    CHECK(c->team == team && c->ring == ring);
    CHECK_INT(c->mem->live, 0);
}

/* Numbers of the host: none, one, and as many as a gather can have. */
static void check_scalars(upipe_ctx *c, int rank, upipe_comm *comm, double want)
{
    static const int counts[] = {0, 1, UPIPE_ALL_GATHER_MAX};
    double values[UPIPE_ALL_GATHER_MAX + 1];
    for (int k = 0; k < 3; ++k) {
        for (int i = 0; i <= UPIPE_ALL_GATHER_MAX; ++i) values[i] = (double)brought(rank) * (i + 1);
        CHECK_STATUS(upipe_scalars_sum(c, comm, values, counts[k]), UPIPE_OK, c->err);
        for (int i = 0; i <= UPIPE_ALL_GATHER_MAX; ++i)
            CHECK_SAY(values[i] == (i < counts[k] ? want : (double)brought(rank)) * (i + 1),
                      "rank %d, number %d of %d is %g", rank, i, counts[k], values[i]);
    }
    CHECK_REFUSED(upipe_scalars_sum(c, comm, values, UPIPE_ALL_GATHER_MAX + 1), UPIPE_ERR_ARG, c->err,
                  "numbers, at most");
}

static upipe_status sums_body(void *user, int rank)
{
    job *j = (job *)user;
    upipe_comm *const world = upipe_threads_comm(&j->grid.world, rank);
    const int first = rank / TEAM * TEAM;
    upipe_mem mem;
    upipe_ctx c;
    pool_begin(&mem, POOL, BLOCKS);
    use(j, rank, &c, &mem);
    check_sum(&c, rank, world, 1111);
    check_sum(&c, rank, c.team, brought(first) + brought(first + 1));
    check_sum(&c, rank, c.ring, brought(rank % TEAM) + brought(rank % TEAM + TEAM));
    check_scalars(&c, rank, world, 1111);
    check_scalars(&c, rank, c.team, (double)(brought(first) + brought(first + 1)));
    check_scalars(&c, rank, c.ring, (double)(brought(rank % TEAM) + brought(rank % TEAM + TEAM)));
    c.team = NULL;
    check_sum(&c, rank, world, 1111);
    CHECK_REFUSED(upipe_all_reduce(&c, NULL, NULL, 0), UPIPE_ERR_ARG, c.err, "the communicator is NULL");
    CHECK_STATUS(upipe_reduce_scatter(&c, NULL, NULL, 0), UPIPE_ERR_ARG, c.err);
    CHECK_STATUS(upipe_all_gather(&c, NULL, NULL, 0, 4), UPIPE_ERR_ARG, c.err);
    upipe_mem_destroy(&mem, NULL);
    return UPIPE_OK;
}

/* ---- whom a failure releases ---- */

/* Rank 0 fails before it communicates. */
static upipe_status fail_alone(job *j, upipe_ctx *c, upipe_comm *world)
{
    static const int64_t first[2] = {0, ELEMENTS};
    float data[ELEMENTS] = {0}, *g;
    upipe_zero z;
    if (j->call == BY_SCATTER) return upipe_reduce_scatter(c, world, data, ELEMENTS);
    if (j->call == BY_ALL_REDUCE) return upipe_all_reduce(c, world, data, ELEMENTS);
    if (j->call == BY_TEAM) return upipe_all_reduce(c, c->team, data, ELEMENTS);
    if (j->call == BY_RING) return upipe_all_reduce(c, c->ring, data, ELEMENTS);
    z = (upipe_zero){.world = world, .ranks = RANKS, .stage = 2, .units = 1, .first = first, .grads = data};
    return upipe_zero_grads_begin(c, &z, 0, &g);
}

static upipe_status failure_body(void *user, int rank)
{
    job *j = (job *)user;
    upipe_mem_block blocks[BLOCKS];
    upipe_comm *const world = upipe_threads_comm(&j->grid.world, rank);
    upipe_mem mem;
    upipe_ctx c;
    upipe_mem_init(&mem, NULL, 0, blocks, BLOCKS);
    use(j, rank, &c, &mem);
    if (rank == 0) {
        CHECK_STATUS(fail_alone(j, &c, world), UPIPE_ERR_MEMORY, c.err);
        CHECK(c.team->ops.failure(c.team) != NULL);
        CHECK(c.ring->ops.failure(c.ring) != NULL);
        CHECK_INT(world->ops.failure(world) != NULL, j->call != BY_TEAM && j->call != BY_RING);
        return UPIPE_OK;
    }
    /* rank 1 is its neighbour in the team, rank 2 in the ring */
    if (rank == 3 && (j->call == BY_TEAM || j->call == BY_RING)) return UPIPE_OK;
    CHECK_REFUSED(upipe_comm_barrier(&c, rank == 1   ? c.team
                                         : rank == 2 ? c.ring
                                                     : world),
                  UPIPE_ERR_ABORTED, c.err, "do not fit");
    return UPIPE_OK;
}

/* ---- a transport that gathers by itself ---- */

static upipe_status own_gather(upipe_ctx *c, upipe_comm *comm, void *all, const void *mine, size_t bytes)
{
    (void)c;
    CHECK(mine == upipe_offset(all, (size_t)comm->rank * bytes));
    CHECK_INT(bytes, 40);
    return UPIPE_OK;
}

/* It gathers equal slices alone, which are sent to each of the others either way. */
static void test_own_gather(void)
{
    upipe_msg list[2 * RANKS];
    int64_t gathered[RANKS * UPIPE_ALL_GATHER_MAX];
    float data[RANKS * 10 + 1] = {0};
    upipe_ops ops = cpu_table();
    upipe_comm comm;
    upipe_mem mem;
    upipe_ctx c = {.ops = &ops, .mem = &mem, .team = &comm};
    pool_begin(&mem, POOL, BLOCKS);
    upipe_comm_dry(&comm, 1, RANKS, list, gathered);
    comm.ops.gather = own_gather;
    CHECK_STATUS(upipe_all_gather(&c, &comm, data, RANKS * 10, sizeof *data), UPIPE_OK, c.err);
    CHECK_INT(comm.sent_bytes, 3 * 40);
    CHECK_STATUS(upipe_all_gather(&c, &comm, data, RANKS * 10 + 1, sizeof *data), UPIPE_OK, c.err);
    CHECK_INT(comm.sent_bytes, 3 * 40 + 3 * 44); /* slices of 11, 11, 11 and 8 elements */
    upipe_mem_destroy(&mem, NULL);
    buffers_free(0);
}

static void run(job *j, upipe_status (*body)(void *user, int rank))
{
    const upipe_grid g = {.ranks = RANKS, .in_team = TEAM, .in_ring = RING};
    upipe_err e;
    CHECK_STATUS(grid_apart(&j->grid, &g, 20, &e), UPIPE_OK, e);
    CHECK_STATUS(upipe_threads_run(&j->grid.world, body, j, NULL, &e), UPIPE_OK, e);
    upipe_threads_grid_free(&j->grid);
    buffers_free(0);
}

int main(int argc, char **argv)
{
    static job j;
    j.ops = cpu_table();
    test_begin(argc, argv);
    TEST(test_own_gather());
    TEST_OF("sums", run(&j, sums_body));
    for (int i = 0; i < CALLS; ++i) {
        j.call = (call)i;
        TEST_OF("failure", run(&j, failure_body));
    }
    return test_end("reduce");
}

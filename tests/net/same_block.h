/* same_block.h -- the attention block over a transport: the same bits as on ranks that share memory
 *
 *     same_blocks(&tcp, 2, 2);                 teams of 2, rings of 2 between them; 1: no ring
 *
 * The runner itself holds the bytes that are sent, and what the pool holds, to each rank's plan.
 */
#ifndef UPIPE_TEST_SAME_BLOCK_H
#define UPIPE_TEST_SAME_BLOCK_H

#include "conformance.h"

#include "../lib/grid.h"

/* The runner's ranks, over this transport where it is set. */
static const transport *over;
static int over_rings;

static upipe_comm *world_comm(upipe_threads *world, int rank)
{
    return over != NULL ? part_comm(WORLD, rank) : upipe_threads_comm(world, rank);
}

static void grid_use(upipe_threads_grid *g, int rank, upipe_ctx *c)
{
    upipe_threads_grid_use(g, rank, c);
    if (over == NULL) return;
    c->team = part_comm(TEAM, rank);
    c->ring = over_rings > 1 ? part_comm(RING, rank) : NULL;
}

static upipe_status world_run(upipe_threads *world, upipe_status (*body)(void *user, int rank), void *user,
                              upipe_status *statuses, upipe_err *e);
#define upipe_threads_comm     world_comm
#define upipe_threads_run      world_run
#define upipe_threads_grid_use grid_use
#include "../lib/runner.h"
#undef upipe_threads_comm
#undef upipe_threads_run
#undef upipe_threads_grid_use

typedef struct over_run {
    upipe_status (*body)(void *user, int rank);
    void *user;
    upipe_status *statuses, worst;
} over_run;

static upipe_status over_main(void *user, int rank)
{
    over_run *o = (over_run *)user;
    o->statuses[rank] = o->body(o->user, rank);
    return UPIPE_OK;
}

static upipe_status world_run(upipe_threads *world, upipe_status (*body)(void *user, int rank), void *user,
                              upipe_status *statuses, upipe_err *e)
{
    over_run o = {body, user, statuses, UPIPE_OK};
    if (over == NULL) return upipe_threads_run(world, body, user, statuses, e);
    for (int r = 0; r < world->ranks; ++r) statuses[r] = UPIPE_OK;
    over->each(world->ranks, over_main, &o);
    for (int r = 0; r < world->ranks; ++r) {
        if (over->merge != NULL) over->merge(&((run_state *)user)->own[r].moved, sizeof(int64_t));
        if (o.worst == UPIPE_OK) o.worst = statuses[r];
    }
    return o.worst;
}

/* Each rank has filled in its own part of zeros. */
#define MERGE(tensor)                                  \
    if (over->merge != NULL && got.out.tensor != NULL) \
        over->merge(got.out.tensor, block_count(&t->shape, #tensor) * (int64_t)sizeof *got.out.tensor);

static void same_block(const transport *way, const run_case *t)
{
    const int rings = t->ring > 0 ? t->ring : 1;
    run_result threads, got;
    f32_block in;
    block_inputs(&t->shape, 42, &in);
    CHECK(run_block(t, &in, &threads) == UPIPE_OK);
    check_block(&t->shape, &in, &threads.out);
    parts_open(way, t->ranks, rings);
    over = way;
    over_rings = rings;
    CHECK(run_block(t, &in, &got) == UPIPE_OK);
    BLOCK_RESULTS(MERGE)
    over = NULL;
    same_bits(&t->shape, &threads, &got, NULL);
    parts_close(NULL);
}
#undef MERGE

/* Both types, with and without projections. Without a ring also on a side stream's thread; with one in both modes. */
static void same_blocks(const transport *way, int team, int rings)
{
    for (int i = 0; i < 8; ++i) {
        run_case t = run_of(48, 8, 4, 32, 40, team, team, (upipe_dtype)(i & 1));
        t.shape.batch = 2;
        t.shape.rope = t.shape.normed = 1;
        t.shape.projected = i >> 1 & 1;
        t.tile_rows = 7;
        t.overlap = rings == 1 && i >> 2;
        if (rings > 1) {
            t.ring = rings;
            t.ring_mode = i >> 2 ? UPIPE_RING_ALL_GATHER : UPIPE_RING_P2P;
            t.layout = UPIPE_ZIGZAG;
            t.shape.tokens = 45; /* each rank has a number of its own */
            t.shape.window = t.shape.projected ? 20 : 0;
            t.shape.sinks = t.shape.projected;
        }
        TEST_OF(rings > 1 ? "ring" : "layer", same_block(way, &t));
    }
}

#endif

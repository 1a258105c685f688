/* same_block.h -- the attention block over a transport: the same bits as on ranks that share memory
 *
 *     same_blocks(&tcp, 2, 2);                 teams of 2, rings of 2 between them; 1: no ring
 *
 * The runner itself holds the bytes that are sent, and what the pool holds, to each rank's plan.
 */
#ifndef UPIPE_TEST_SAME_BLOCK_H
#define UPIPE_TEST_SAME_BLOCK_H

#include "conformance.h"

#include "../lib/runner.h"

/* The transport of the place below. */
static const transport *over;

static void over_enter(run_state *s, run_own *own, upipe_ctx *c)
{
    c->ops = &own->ops;
    c->team = part_comm(TEAM, own->rank);
    c->ring = s->grid.grid.in_ring > 1 ? part_comm(RING, own->rank) : NULL;
    if (s->test->overlap) side_begin(c, &own->side, s->test->side_stream_inline);
}

static upipe_comm *over_world(run_state *s, int rank)
{
    (void)s;
    return part_comm(WORLD, rank);
}

static upipe_status over_main(void *user, int rank)
{
    run_state *s = (run_state *)user;
    s->r->statuses[rank] = run_body(s, rank);
    return UPIPE_OK;
}

static upipe_status over_run(run_state *s)
{
    upipe_status worst = UPIPE_OK;
    for (int r = 0; r < s->ranks; ++r) s->r->statuses[r] = UPIPE_OK; /* of ranks that are other processes */
    over->each(s->ranks, over_main, s);
    for (int r = 0; r < s->ranks; ++r) {
        if (over->merge != NULL) over->merge(&s->own[r].moved, sizeof(int64_t));
        if (worst == UPIPE_OK) worst = s->r->statuses[r];
    }
    return worst;
}

static const run_place run_over = {.begin = run_host_begin,
                                   .open = run_host_open,
                                   .memory = run_host_memory,
                                   .enter = over_enter,
                                   .leave = run_host_leave,
                                   .world = over_world,
                                   .run = over_run,
                                   .close = run_host_close};

/* Each rank has filled in its own part of zeros. */
#define MERGE(tensor)                                  \
    if (over->merge != NULL && got.out.tensor != NULL) \
        over->merge(got.out.tensor, block_count(&t->shape, #tensor) * (int64_t)sizeof *got.out.tensor);

static void same_block(const transport *way, const run_case *t)
{
    const int rings = t->ring > 0 ? t->ring : 1;
    run_case there = *t;
    run_result threads, got;
    f32_block in;
    block_inputs(&t->shape, 42, &in);
    CHECK(run_block(t, &in, &threads) == UPIPE_OK);
    check_block(&t->shape, &in, &threads.out);
    parts_open(way, t->ranks, rings);
    over = way;
    there.place = &run_over;
    CHECK(run_block(&there, &in, &got) == UPIPE_OK);
    BLOCK_RESULTS(MERGE)
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

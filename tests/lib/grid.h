/* grid.h -- C x R thread ranks: all of them as one world, and each one's team (C ranks) and ring (R ranks)
 *
 *     grid g;
 *     grid_init(&g, C, R, ring_first, deadline, &err);
 *     upipe_threads_run(&g.world, body, user, statuses, NULL);        body(user, rank of the world)
 *     grid_free(&g);
 *
 *     in body:  c.team = grid_team(&g, rank);  c.ring = grid_ring(&g, rank);     NULL without a ring
 *
 * Neighbours in the world are a team; with ring_first they are a ring. Where there is no ring, the team is
 * the world.
 */
#ifndef UPIPE_TEST_GRID_H
#define UPIPE_TEST_GRID_H

#include "upipe/net/upipe_net_threads.h"

enum { GRID_MAX = 16 };

typedef struct grid {
    int ranks, rings, ring_first;
    upipe_threads world, team[GRID_MAX], ring[GRID_MAX];
    int teams_n, rings_n; /* made so far */
} grid;

static inline int grid_team_rank(const grid *g, int rank)
{
    return g->ring_first ? rank / g->rings : rank % g->ranks;
}

static inline int grid_ring_rank(const grid *g, int rank)
{
    return g->ring_first ? rank % g->rings : rank / g->ranks;
}

static inline void grid_free(grid *g)
{
    while (g->teams_n > 0) upipe_threads_free(&g->team[--g->teams_n]);
    while (g->rings_n > 0) upipe_threads_free(&g->ring[--g->rings_n]);
    upipe_threads_free(&g->world);
}

static inline upipe_status grid_init(grid *g, int ranks, int rings, int ring_first, double deadline,
                                     upipe_err *e)
{
    upipe_status s;
    *g = (grid){.ranks = ranks, .rings = rings, .ring_first = ring_first};
    s = upipe_threads_init(&g->world, ranks * rings, deadline, e);
    while (s == UPIPE_OK && rings > 1 && g->teams_n < rings)
        s = upipe_threads_init(&g->team[g->teams_n++], ranks, deadline, e);
    while (s == UPIPE_OK && rings > 1 && g->rings_n < ranks)
        s = upipe_threads_init(&g->ring[g->rings_n++], rings, deadline, e);
    return s;
}

static inline upipe_comm *grid_team(grid *g, int rank)
{
    if (g->rings == 1) return upipe_threads_comm(&g->world, rank);
    return upipe_threads_comm(&g->team[grid_ring_rank(g, rank)], grid_team_rank(g, rank));
}

static inline upipe_comm *grid_ring(grid *g, int rank)
{
    if (g->rings == 1) return NULL;
    return upipe_threads_comm(&g->ring[grid_team_rank(g, rank)], grid_ring_rank(g, rank));
}

#endif

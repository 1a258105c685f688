/* upipe_net_threads_grid.h -- ranks that are threads in grids: all are a world, each is in a team and in a ring
 *
 *     upipe_status body(void *user, int rank)      one rank: its own upipe_ctx
 *     {
 *         upipe_threads_grid_use(&g, rank, &ctx);  ctx.team, and ctx.ring, NULL where rings have one rank
 *         ...                                      upipe_threads_comm(&g.world, rank) for sums over every rank
 *     }
 *
 *     upipe_threads_grid g;
 *     upipe_status s = upipe_threads_grid_init(&g, &grid, 0, &err);
 *     if (s == UPIPE_OK) s = upipe_threads_run(&g.world, body, user, NULL, &err);
 *     upipe_threads_grid_free(&g);
 *
 * Teams and rings are parts of the world (upipe_comm_part): sentences have its numbers, and a failure anywhere breaks
 * all of them. That is so of a body that does not return UPIPE_OK, and of a rank whose thread could not be started.
 *
 * Strict ISO C hides the clock: include this file first, or define _POSIX_C_SOURCE=200809L.
 */
#ifndef UPIPE_NET_THREADS_GRID_H
#define UPIPE_NET_THREADS_GRID_H

#include "upipe_net_threads.h"

#include "upipe_net_grid.h"

/* The host's; must not move between init and free. */
typedef struct upipe_threads_grid {
    upipe_grid grid;
    upipe_threads world;
    upipe_threads *teams; /* [ranks / in_team]; NULL where the world is the team */
    upipe_threads *rings; /* [ranks / in_ring]; NULL without rings */
} upipe_threads_grid;

/* upipe_threads_grid_free -- releases everything that init allocated; legal after a failure and a failed init, and twice
 *   order  no rank is inside a call, and none makes another one
 */
UPIPE_API void upipe_threads_grid_free(upipe_threads_grid *g)
{
    int i;
    for (i = 0; g->teams != NULL && i < g->grid.ranks / g->grid.in_team; ++i)
        upipe_threads_free(&g->teams[i]);
    for (i = 0; g->rings != NULL && i < g->grid.ranks / g->grid.in_ring; ++i)
        upipe_threads_free(&g->rings[i]);
    upipe_threads_free(&g->world); /* behind its parts */
    free(g->teams);
    free(g->rings);
    memset(g, 0, sizeof *g);
}

/* n communicators of `ranks` each. */
UPIPE_API upipe_status upi_threads_grid_parts(upipe_threads **parts, int n, int ranks, double deadline_s,
                                              upipe_err *e)
{
    int i;
    *parts = (upipe_threads *)calloc((size_t)n, sizeof **parts);
    if (*parts == NULL) return upipe_fail(e, UPIPE_ERR_MEMORY, "no memory for %d teams or rings", n);
    for (i = 0; i < n; ++i) UPIPE_TRY(upipe_threads_init(*parts + i, ranks, deadline_s, e));
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_threads_grid_make(upipe_threads_grid *g, double deadline_s, upipe_err *e)
{
    const int ranks = g->grid.ranks, in_team = g->grid.in_team, in_ring = g->grid.in_ring;
    UPIPE_TRY(upipe_threads_init(&g->world, ranks, deadline_s, e));
    if (in_team < ranks)
        UPIPE_TRY(upi_threads_grid_parts(&g->teams, ranks / in_team, in_team, deadline_s, e));
    if (in_ring > 1) UPIPE_TRY(upi_threads_grid_parts(&g->rings, ranks / in_ring, in_ring, deadline_s, e));
    return UPIPE_OK;
}

/* upipe_threads_grid_use -- the team and the ring of a rank of the world. A team of all ranks is the world itself */
UPIPE_API void upipe_threads_grid_use(upipe_threads_grid *g, int rank, upipe_ctx *c)
{
    const upipe_grid_part team = upipe_grid_team(&g->grid, rank), ring = upipe_grid_ring(&g->grid, rank);
    const int block = rank / (team.ranks * ring.ranks); /* which of the grids */
    c->team = g->teams == NULL ? upipe_threads_comm(&g->world, rank)
                               : upipe_threads_comm(&g->teams[block * ring.ranks + ring.rank], team.rank);
    c->ring =
        g->rings == NULL ? NULL : upipe_threads_comm(&g->rings[block * team.ranks + team.rank], ring.rank);
}

/* upipe_threads_grid_init -- makes the world, its teams and its rings
 *   grid        copied
 *   deadline_s  as upipe_threads_init, of each
 *   errors      ARG, MEMORY, BACKEND (the error number of a pthread call); then there is nothing to free
 */
UPIPE_API upipe_status upipe_threads_grid_init(upipe_threads_grid *g, const upipe_grid *grid,
                                               double deadline_s, upipe_err *e)
{
    upipe_status s;
    int r;
    memset(g, 0, sizeof *g);
    UPIPE_TRY(upipe_grid_check(grid, e));
    g->grid = *grid;
    s = upi_threads_grid_make(g, deadline_s, e);
    if (s != UPIPE_OK) upipe_threads_grid_free(g);
    for (r = 0; s == UPIPE_OK && r < grid->ranks; ++r) {
        const upipe_grid_part team = upipe_grid_team(grid, r), ring = upipe_grid_ring(grid, r);
        upipe_comm *world = upipe_threads_comm(&g->world, r);
        upipe_ctx c;
        upipe_threads_grid_use(g, r, &c);
        if (c.team != world) upipe_comm_part(c.team, world, team.first, team.step);
        if (c.ring != NULL) upipe_comm_part(c.ring, world, ring.first, ring.step);
    }
    return s;
}

#endif

/* grid.h -- ranks as threads in grids: all N of them are a world, each is in a team of C and in a ring of R
 *
 *     grid g;
 *     grid_init(&g, N, C, R, deadline, &err);
 *     upipe_threads_run(&g.world, body, user, statuses, NULL);        body(user, rank of the world), a thread each
 *     grid_free(&g);
 *
 *     in body:  grid_use(&g, rank, &ctx);      ctx.team, and ctx.ring, NULL where R = 1
 *               grid_world(&g, rank)           the communicator of all, for sums over every rank
 *     after it: grid_why(&g, &ctx.err)         the sentence of a rank that failed
 *
 * C * R neighbours are a grid; N is a multiple of it. Rank w is rank w % C of team w / C, a team's ranks are
 * neighbours, and rank w / C % R of the ring of those at its place of the grid's teams. A team of all ranks is the
 * world; the others are its parts. Before a body uses its team or ring it passes a barrier of the world: these do not
 * learn of a rank whose thread could not be started.
 */
#ifndef COMMON_GRID_H
#define COMMON_GRID_H

#include "upipe/net/upipe_net_threads.h"
#include "upipe/upipe_comm.h"

typedef struct grid {
    int ranks, in_team, in_ring; /* N, C, R */
    upipe_threads world;
    upipe_threads *teams, *rings; /* [N / C], NULL where the world is the team; [N / R], NULL where R = 1 */
} grid;

/* May be called after a failed grid_init, and twice. */
static inline void grid_free(grid *g)
{
    int i;
    for (i = 0; g->teams != NULL && i < g->ranks / g->in_team; ++i) upipe_threads_free(&g->teams[i]);
    for (i = 0; g->rings != NULL && i < g->ranks / g->in_ring; ++i) upipe_threads_free(&g->rings[i]);
    upipe_threads_free(&g->world);
    free(g->teams);
    free(g->rings);
    memset(g, 0, sizeof *g);
}

/* n communicators of `ranks` each. */
static inline upipe_status grid_split(upipe_threads **out, int n, int ranks, double deadline, upipe_err *e)
{
    int i;
    *out = (upipe_threads *)calloc((size_t)n, sizeof **out);
    if (*out == NULL) return upipe_fail(e, UPIPE_ERR_MEMORY, "no memory for %d teams or rings", n);
    for (i = 0; i < n; ++i) UPIPE_TRY(upipe_threads_init(*out + i, ranks, deadline, e));
    return UPIPE_OK;
}

/* The first rank of the ring of rank w, whose ranks are in_team apart. */
static inline int grid_ring_first(int w, int in_team, int in_ring)
{
    const int ranks = in_team * in_ring;
    return w / ranks * ranks + w % in_team;
}

static inline upipe_comm *grid_world(grid *g, int rank)
{
    return upipe_threads_comm(&g->world, rank);
}

static inline void grid_use(grid *g, int rank, upipe_ctx *c)
{
    const int team = rank / g->in_team, place = rank % g->in_team;
    c->team = g->teams != NULL ? upipe_threads_comm(&g->teams[team], place) : grid_world(g, rank);
    c->ring = NULL;
    if (g->rings == NULL) return;
    c->ring = upipe_threads_comm(&g->rings[team / g->in_ring * g->in_team + place], team % g->in_ring);
}

static inline upipe_status grid_init(grid *g, int ranks, int in_team, int in_ring, double deadline,
                                     upipe_err *e)
{
    upipe_status s;
    int r;
    memset(g, 0, sizeof *g);
    g->ranks = ranks;
    g->in_team = in_team;
    g->in_ring = in_ring;
    s = upipe_threads_init(&g->world, ranks, deadline, e);
    if (s == UPIPE_OK && in_team < ranks) s = grid_split(&g->teams, ranks / in_team, in_team, deadline, e);
    if (s == UPIPE_OK && in_ring > 1) s = grid_split(&g->rings, ranks / in_ring, in_ring, deadline, e);
    if (s != UPIPE_OK) {
        grid_free(g);
        return s;
    }
    for (r = 0; r < ranks; ++r) {
        upipe_ctx c;
        grid_use(g, r, &c);
        if (c.team != grid_world(g, r)) upipe_comm_part(c.team, grid_world(g, r), r / in_team * in_team, 1);
        if (c.ring != NULL)
            upipe_comm_part(c.ring, grid_world(g, r), grid_ring_first(r, in_team, in_ring), in_team);
    }
    return s;
}

/* Why a rank failed: its own sentence, or the world's where its thread never ran. */
static inline const char *grid_why(grid *g, const upipe_err *own)
{
    const upipe_comm *world = grid_world(g, 0);
    const upipe_err *first = world->ops.failure(world);
    return own->text[0] != '\0' || first == NULL ? own->text : first->text;
}

#endif

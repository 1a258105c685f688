/* upipe_net_grid.h -- which ranks of a world are a team, and which a ring, whatever the transport
 *
 *     upipe_grid grid;
 *     grid.ranks = 16, grid.in_team = 4, grid.in_ring = 2, grid.ring_first = 0;
 *     upipe_grid_part ring = upipe_grid_ring(&grid, rank);       { first, step, ranks, rank }
 *
 * Such a part is what upipe_comm_part and MPI_Comm_split (ring.first is the colour, rank the key) ask for. The number in
 * the team and that in the ring are rank and ring_rank of a plan.
 */
#ifndef UPIPE_NET_GRID_H
#define UPIPE_NET_GRID_H

#include "../upipe_base.h"

/* upipe_grid -- all ranks as grids of in_team * in_ring ranks in a row
 *   ranks       of the world: one grid, or several with the same work, of other data for example
 *   in_team     ranks of a team (all-to-all)
 *   in_ring     ranks of a ring; 1: there are none
 *   ring_first  0: the ranks of a team are neighbours in the world, and those of a ring in_team apart. 1: those of a
 *               ring are neighbours, and those of a team in_ring apart
 */
typedef struct upipe_grid {
    int ranks, in_team, in_ring, ring_first;
} upipe_grid;

/* upipe_grid_part -- a team or a ring: its rank i, of `ranks`, is rank first + i * step of the world
 *   rank  the number there of the rank that was asked for
 */
typedef struct upipe_grid_part {
    int first, step, ranks, rank;
} upipe_grid_part;

/* upipe_grid_check -- ARG unless the world is a whole number of grids */
UPIPE_API upipe_status upipe_grid_check(const upipe_grid *grid, upipe_err *e)
{
    if (grid->ranks < 1 || grid->in_team < 1 || grid->in_ring < 1 ||
        grid->ranks % ((int64_t)grid->in_team * grid->in_ring) != 0)
        return upipe_fail(e, UPIPE_ERR_ARG, "%d ranks are no grids of %d ranks a team and %d a ring",
                          grid->ranks, grid->in_team, grid->in_ring);
    return UPIPE_OK;
}

UPIPE_API upipe_grid_part upi_grid_part(int rank, int step, int ranks)
{
    upipe_grid_part part;
    part.rank = rank / step % ranks;
    part.first = rank - part.rank * step;
    part.step = step;
    part.ranks = ranks;
    return part;
}

/* upipe_grid_team -- the team of a rank of the world */
UPIPE_API upipe_grid_part upipe_grid_team(const upipe_grid *grid, int rank)
{
    return upi_grid_part(rank, grid->ring_first ? grid->in_ring : 1, grid->in_team);
}

/* upipe_grid_ring -- the ring of a rank of the world */
UPIPE_API upipe_grid_part upipe_grid_ring(const upipe_grid *grid, int rank)
{
    return upi_grid_part(rank, grid->ring_first ? 1 : grid->in_team, grid->in_ring);
}

#endif

/* grid.h -- a grid of thread ranks whose teams and rings are no parts of the world
 *
 * What fails in one of them breaks the others only where the library's calls say so, as over a transport that does not
 * know what belongs together.
 */
#ifndef UPIPE_TEST_GRID_H
#define UPIPE_TEST_GRID_H

#include "upipe/net/upipe_net_threads_grid.h"

static inline upipe_status grid_apart(upipe_threads_grid *g, const upipe_grid *grid, double deadline,
                                      upipe_err *e)
{
    UPIPE_TRY(upipe_threads_grid_init(g, grid, deadline, e));
    for (int rank = 0; rank < grid->ranks; ++rank) {
        upipe_ctx c;
        upipe_threads_grid_use(g, rank, &c);
        upi_comm_leave(c.team);
        if (c.ring != NULL) upi_comm_leave(c.ring);
    }
    return UPIPE_OK;
}

#endif

/* part_mpi.h -- a communicator of a part of MPI's processes, and this process's end of it */
#ifndef COMMON_PART_MPI_H
#define COMMON_PART_MPI_H

#include "upipe/net/upipe_net_grid.h"
#include "upipe/net/upipe_net_mpi.h"

typedef struct part_mpi {
    MPI_Comm comm;
    upipe_mpi end;
} part_mpi;

/* All processes of `of` call it together, each with its part. What has been made before a failure stays in m. */
static inline upipe_status part_mpi_make(part_mpi *m, MPI_Comm of, upipe_grid_part part, double deadline,
                                         upipe_err *e)
{
    if (MPI_Comm_split(of, part.first, part.rank, &m->comm) != MPI_SUCCESS ||
        MPI_Comm_set_errhandler(m->comm, MPI_ERRORS_RETURN) != MPI_SUCCESS)
        return upipe_fail(e, UPIPE_ERR_BACKEND, "MPI makes no communicator");
    return upipe_mpi_init(&m->end, m->comm, 0, deadline, e);
}

#endif

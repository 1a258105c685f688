/* team_mpi.h -- ranks that are processes of MPI        part of upipe_abi.c
 *
 * Team and ring have communicators of their own, so that the caller's carries none of their messages.
 */
#ifndef ABI_TEAM_MPI_H
#define ABI_TEAM_MPI_H

#include "team.h"

#ifdef UPIPE_WITH_MPI

#include "../../common/part_mpi.h"

static void abi_team_mpi_end(abi_team *t)
{
    part_mpi *m = (part_mpi *)t->own; /* of the team, of the ring */
    int i;
    for (i = 0; i < 2; ++i) {
        const int quarantine = m[i].end.comm.quarantine;
        const upipe_status s = upipe_mpi_free(&m[i].end, NULL);
        t->kept |= s != UPIPE_OK || quarantine; /* a rank that is dead or late: MPI may use the slab */
        if (s == UPIPE_OK && m[i].comm != MPI_COMM_NULL) MPI_Comm_free(&m[i].comm);
    }
    free(m);
}

static upipe_status abi_team_mpi(abi_team *t, const abi_given *given, upipe_err *e)
{
    int running = 0, ended = 0, rank = 0, ranks = 0, i;
    upipe_grid_part part[2] = {{0}};
    MPI_Comm of;
    part_mpi *m;
    MPI_Initialized(&running);
    MPI_Finalized(&ended);
    if (!running || ended) return upipe_fail(e, UPIPE_ERR_ARG, "MPI is not running");
    of = given->mpi != NULL ? *(const MPI_Comm *)given->mpi : MPI_COMM_WORLD;
    if (of == MPI_COMM_NULL) return upipe_fail(e, UPIPE_ERR_ARG, "the communicator is MPI_COMM_NULL");
    if (MPI_Comm_size(of, &ranks) != MPI_SUCCESS || MPI_Comm_rank(of, &rank) != MPI_SUCCESS)
        return upipe_fail(e, UPIPE_ERR_BACKEND, "MPI does not know the communicator");
    if (ranks != t->grid.ranks)
        return upipe_fail(e, UPIPE_ERR_ARG, "a communicator of %d ranks, and a description of %d", ranks,
                          t->grid.ranks);
    UPIPE_TRY(abi_team_one(t, rank, part, e));
    t->own = m = (part_mpi *)calloc(2, sizeof *m);
    if (m == NULL) return upipe_fail(e, UPIPE_ERR_MEMORY, "memory is out");
    t->end = abi_team_mpi_end;
    m[0].comm = m[1].comm = MPI_COMM_NULL;
    for (i = 0; i < (t->grid.in_ring > 1 ? 2 : 1); ++i) {
        UPIPE_TRY(part_mpi_make(&m[i], of, part[i], ABI_DEADLINE, e));
        *(i ? &t->ring : &t->team) = &m[i].end.comm;
    }
    return UPIPE_OK;
}

#else

static upipe_status abi_team_mpi(abi_team *t, const abi_given *given, upipe_err *e)
{
    (void)t, (void)given;
    return upipe_fail(e, UPIPE_ERR_UNSUPPORTED, "this library was built without MPI");
}

#endif
#endif

/* team_mpi.h -- ranks that are processes of MPI        part of upipe_abi.c
 *
 * Team and ring have communicators of their own, so that the caller's carries none of their messages.
 */
#ifndef ABI_TEAM_MPI_H
#define ABI_TEAM_MPI_H

#include "team.h"

#ifdef UPIPE_WITH_MPI

#include "upipe/net/upipe_net_mpi.h"

typedef struct abi_mpi {
    upipe_mpi end[2]; /* of team and ring */
    MPI_Comm comm[2];
} abi_mpi;

static void abi_team_mpi_end(abi_team *t)
{
    abi_mpi *m = (abi_mpi *)t->own;
    int i;
    for (i = 0; i < 2; ++i) {
        const int quarantine = m->end[i].comm.quarantine;
        const upipe_status s = upipe_mpi_free(&m->end[i], NULL);
        t->kept |= s != UPIPE_OK || quarantine; /* a rank that is dead or late: MPI may use the slab */
        if (s == UPIPE_OK && m->comm[i] != MPI_COMM_NULL) MPI_Comm_free(&m->comm[i]);
    }
    free(m);
}

/* comm: an MPI_Comm; NULL: MPI_COMM_WORLD. */
static upipe_status abi_team_mpi(abi_team *t, int in_team, int in_ring, const void *comm, upipe_err *e)
{
    int running = 0, ended = 0, rank = 0, ranks = 0, i;
    MPI_Comm of;
    abi_mpi *m;
    MPI_Initialized(&running);
    MPI_Finalized(&ended);
    if (!running || ended) return upipe_fail(e, UPIPE_ERR_ARG, "MPI is not running");
    of = comm != NULL ? *(const MPI_Comm *)comm : MPI_COMM_WORLD;
    if (of == MPI_COMM_NULL) return upipe_fail(e, UPIPE_ERR_ARG, "the communicator is MPI_COMM_NULL");
    if (MPI_Comm_size(of, &ranks) != MPI_SUCCESS || MPI_Comm_rank(of, &rank) != MPI_SUCCESS)
        return upipe_fail(e, UPIPE_ERR_BACKEND, "MPI does not know the communicator");
    if (ranks != in_team * in_ring)
        return upipe_fail(e, UPIPE_ERR_ARG, "a communicator of %d ranks, and a description of %d", ranks,
                          in_team * in_ring);
    UPIPE_TRY(abi_team_one(t, in_team, in_ring, rank, e));
    t->own = m = (abi_mpi *)calloc(1, sizeof *m);
    if (m == NULL) return upipe_fail(e, UPIPE_ERR_MEMORY, "memory is out");
    t->end = abi_team_mpi_end;
    m->comm[0] = m->comm[1] = MPI_COMM_NULL;
    for (i = 0; i < (in_ring > 1 ? 2 : 1); ++i) {
        const int colour = i ? rank % in_team : rank / in_team;
        if (MPI_Comm_split(of, colour, rank, &m->comm[i]) != MPI_SUCCESS ||
            MPI_Comm_set_errhandler(m->comm[i], MPI_ERRORS_RETURN) != MPI_SUCCESS)
            return upipe_fail(e, UPIPE_ERR_BACKEND, "MPI makes no communicator");
        UPIPE_TRY(upipe_mpi_init(&m->end[i], m->comm[i], 0, ABI_DEADLINE, e));
        *(i ? &t->ring : &t->team) = &m->end[i].comm;
    }
    return UPIPE_OK;
}

#else

static upipe_status abi_team_mpi(abi_team *t, int in_team, int in_ring, const void *comm, upipe_err *e)
{
    (void)t, (void)in_team, (void)in_ring, (void)comm;
    return upipe_fail(e, UPIPE_ERR_UNSUPPORTED, "this library was built without MPI");
}

#endif
#endif

/* team.h -- the ranks of a handle: threads of this process, or this process as one rank of several  part of upipe_abi.c
 *
 *     t.grid = ...                               one grid of all ranks
 *     s = abi_team_threads(&t, &given, &err);    or another abi_meet: abi_team_sockets, or those of team_mpi.h, team_nccl.h
 *     abi_team_use(&t, rank, &ctx);              ctx.team, and ctx.ring, NULL where R = 1
 *     abi_team_free(&t);                         no rank is in a call; after a failed open too
 */
#ifndef ABI_TEAM_H
#define ABI_TEAM_H

#include "upipe/net/upipe_net_threads_grid.h"
#include "upipe/net/upipe_net_tcp.h"

#include "compute.h"

#include <sys/stat.h>

enum {
    ABI_DEADLINE = 60,              /* seconds */
    ABI_SOCKETS = 4 * UPIPE_TCP_MAX /* of team and ring, two a rank */
};

typedef struct abi_team {
    upipe_grid grid;
    int first, here; /* this process has the ranks first .. first + here - 1 */
    upipe_threads_grid threads;
    upipe_comm *team, *ring; /* of a process; ring: NULL where there is none */
    upipe_tcp tcp[2];
    void *own; /* of MPI or NCCL */
    void (*end)(struct abi_team *t);
    int kept; /* after abi_team_free: others may still read the slab */
} abi_team;

/* What the caller gives for its processes to meet. */
typedef struct abi_given {
    int rank;                  /* of this process, where no communicator says it */
    const int *headers, *data; /* [ranks] sockets */
    const void *mpi;           /* an MPI_Comm; NULL: MPI_COMM_WORLD */
    void *nccl;                /* an ncclComm_t; NULL: there is the id */
    const void *nccl_id;
} abi_given;

typedef upipe_status abi_meet(abi_team *t, const abi_given *given, upipe_err *e);

static upipe_status abi_team_threads(abi_team *t, const abi_given *given, upipe_err *e)
{
    (void)given;
    t->here = t->grid.ranks;
    return upipe_threads_grid_init(&t->threads, &t->grid, ABI_DEADLINE, e);
}

/* This process alone is here. part[0]: its team; part[1]: its ring. */
static upipe_status abi_team_one(abi_team *t, int rank, upipe_grid_part *part, upipe_err *e)
{
    if (rank < 0 || rank >= t->grid.ranks)
        return upipe_fail(e, UPIPE_ERR_ARG, "rank %d of %d", rank, t->grid.ranks);
    t->first = rank;
    t->here = 1;
    part[0] = upipe_grid_team(&t->grid, rank);
    part[1] = upipe_grid_ring(&t->grid, rank);
    return UPIPE_OK;
}

static void abi_team_tcp_end(abi_team *t)
{
    (void)upipe_tcp_free(&t->tcp[0], NULL);
    (void)upipe_tcp_free(&t->tcp[1], NULL);
}

/* ARG if two of these are one socket, whose ranks would wait for each other until the deadline. What is none is not this
 * function's business. */
static upipe_status abi_sockets_differ(const int *fds, int n, upipe_err *e)
{
    uint64_t device[ABI_SOCKETS], number[ABI_SOCKETS];
    struct stat at;
    int i, j;
    for (i = 0; i < n; ++i) {
        const int is_one = fstat(fds[i], &at) == 0 && S_ISSOCK(at.st_mode);
        device[i] = is_one ? (uint64_t)at.st_dev : UINT64_MAX, number[i] = (uint64_t)at.st_ino;
        for (j = 0; is_one && j < i; ++j)
            if (device[i] == device[j] && number[i] == number[j])
                return upipe_fail(e, UPIPE_ERR_ARG,
                                  "%d and %d are the same socket; there are two to each rank", fds[j],
                                  fds[i]);
    }
    return UPIPE_OK;
}

/* No two communicators share a socket, as a rank of the team is none of the ring. */
static upipe_status abi_team_sockets(abi_team *t, const abi_given *given, upipe_err *e)
{
    const int *headers = given->headers, *data = given->data;
    const int in_team = t->grid.in_team, in_ring = t->grid.in_ring;
    int fds[2][2][UPIPE_TCP_MAX], all[ABI_SOCKETS], sockets = 0, which, i;
    const int groups = in_ring > 1 ? 2 : 1;
    upipe_grid_part part[2] = {{0}};
    if (headers == NULL || data == NULL) return upipe_fail(e, UPIPE_ERR_ARG, "the sockets are NULL");
    UPIPE_TRY(abi_compute_by_host(e));
    if (in_team > UPIPE_TCP_MAX || in_ring > UPIPE_TCP_MAX)
        return upipe_fail(e, UPIPE_ERR_ARG,
                          "a team of %d ranks and a ring of %d over sockets, at most %d each", in_team,
                          in_ring, (int)UPIPE_TCP_MAX);
    UPIPE_TRY(abi_team_one(t, given->rank, part, e));
    for (which = 0; which < groups; ++which)
        for (i = 0; i < part[which].ranks; ++i) {
            const int member = part[which].first + i * part[which].step;
            fds[which][0][i] = headers[member];
            fds[which][1][i] = data[member];
            if (member != given->rank) all[sockets++] = headers[member], all[sockets++] = data[member];
        }
    UPIPE_TRY(abi_sockets_differ(all, sockets, e)); /* before an end that would say goodbye to them */
    t->end = abi_team_tcp_end;
    for (which = 0; which < groups; ++which) {
        UPIPE_TRY(upipe_tcp_init(&t->tcp[which], fds[which][0], fds[which][1], part[which].rank,
                                 part[which].ranks, ABI_DEADLINE, e));
        *(which ? &t->ring : &t->team) = &t->tcp[which].comm;
    }
    return UPIPE_OK;
}

static void abi_team_use(abi_team *t, int rank, upipe_ctx *c)
{
    c->team = t->team;
    c->ring = t->ring;
    if (t->team == NULL) upipe_threads_grid_use(&t->threads, rank, c);
}

static void abi_team_free(abi_team *t)
{
    if (t->end != NULL) t->end(t);
    upipe_threads_grid_free(&t->threads);
}

#endif

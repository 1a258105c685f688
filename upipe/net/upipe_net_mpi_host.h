/* upipe_net_mpi_host.h -- a rank that is a process of MPI, with a host: team, slab and pool        backend
 *
 *     static upipe_mpi_host h;
 *     upipe_mpi_host_open(&h, mpi, 0, 0, &desc, &ops, &err);     mpi, tag and deadline as upipe_mpi_init
 *     upipe_qkv_fwd(&h.host.ctx, &a, &saved);  ...
 *     upipe_mpi_host_close(&h, &err);                            before MPI_Comm_free and MPI_Finalize
 *
 * The slab is this process's memory. A table that computes in a device's memory has a slab there: such a host calls
 * upipe_mpi_init and upipe_host_open itself.
 */
#ifndef UPIPE_NET_MPI_HOST_H
#define UPIPE_NET_MPI_HOST_H

#include "upipe_net_mpi.h"

#include "../upipe_host.h"

typedef struct upipe_mpi_host {
    upipe_host host;
    upipe_mpi team;
    void *slab;
} upipe_mpi_host;

/* upipe_mpi_host_close -- ends pool and team; legal after a failed open too
 *   errors  those of upipe_host_close; those of upipe_mpi_free, and then the slab is not freed, as MPI may use it
 */
UPIPE_API upipe_status upipe_mpi_host_close(upipe_mpi_host *h, upipe_err *e)
{
    upipe_status s, left;
    if (h == NULL) return upipe_fail(e, UPIPE_ERR_ARG, "the host is NULL");
    s = upipe_host_close(&h->host);
    if (s != UPIPE_OK && e != NULL) *e = h->host.ctx.err;
    left = upipe_mpi_free(&h->team, s == UPIPE_OK ? e : NULL);
    if (left == UPIPE_OK) free(h->slab);
    memset(h, 0, sizeof *h);
    return s != UPIPE_OK ? s : left;
}

/* The host and its slab, once there is a team. */
UPIPE_API upipe_status upi_mpi_host(upipe_mpi_host *h, const upipe_host_desc *desc)
{
    UPIPE_TRY(upipe_host_open(&h->host, desc));
    if (posix_memalign(&h->slab, UPIPE_MEM_ALIGN, upipe_host_slab_bytes(&h->host)) != 0) h->slab = NULL;
    return upipe_host_slab(&h->host, h->slab);
}

/* upipe_mpi_host_open -- a team of all ranks of an MPI communicator, and this rank's host in it
 *   mpi, tag, deadline_s  as upipe_mpi_init
 *   desc, ops             as upipe_host_open; ops is kept until the close
 *   errors                those of both, MEMORY. The team's other ranks then fail with the same sentence, and there
 *                         is nothing to close
 */
UPIPE_API upipe_status upipe_mpi_host_open(upipe_mpi_host *h, MPI_Comm mpi, int tag, double deadline_s,
                                           const upipe_host_desc *desc, const upipe_ops *ops, upipe_err *e)
{
    upipe_status s;
    memset(h, 0, sizeof *h);
    UPIPE_TRY(upipe_mpi_init(&h->team, mpi, tag, deadline_s, e));
    h->host.ctx.ops = ops;
    h->host.ctx.team = &h->team.comm;
    s = upi_mpi_host(h, desc);
    if (s == UPIPE_OK) return s;
    if (e != NULL) *e = h->host.ctx.err;
    upipe_comm_abort(&h->team.comm, h->host.ctx.err.text);
    upipe_mpi_host_close(h, NULL);
    return s;
}

#endif

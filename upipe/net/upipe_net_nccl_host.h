/* upipe_net_nccl_host.h -- a rank with a GPU of its own, over NCCL, with a host: team, slab and pool        backend
 *
 *     static upipe_nccl_host h;
 *     upipe_nccl_host_open(&h, nccl, stream, 0, &desc, &ops, &err);     ops: of CUDA, see cuda/upipe_cuda.h
 *     upipe_qkv_fwd(&h.host.ctx, &a, &saved);  ...
 *     upipe_nccl_host_close(&h, &err);
 *     if (h.team.nccl != NULL) ncclCommDestroy(nccl);                   as after upipe_nccl_free
 */
#ifndef UPIPE_NET_NCCL_HOST_H
#define UPIPE_NET_NCCL_HOST_H

#include "upipe_net_nccl.h"

#include "../upipe_host.h"

typedef struct upipe_nccl_host {
    upipe_host host;
    upipe_nccl team;
    void *slab; /* of the device */
} upipe_nccl_host;

/* upipe_nccl_host_close -- ends pool and team; legal after a failed open too. team.nccl keeps its value
 *   order   as upipe_nccl_free. Where team.comm.quarantine is set afterwards, peers may access the slab, which is not
 *           freed
 *   errors  those of upipe_host_close and upipe_nccl_free; BACKEND
 */
UPIPE_API upipe_status upipe_nccl_host_close(upipe_nccl_host *h, upipe_err *e)
{
    upipe_status s;
    if (h == NULL) return upipe_fail(e, UPIPE_ERR_ARG, "the host is NULL");
    s = upipe_host_close(&h->host);
    if (s != UPIPE_OK && e != NULL) *e = h->host.ctx.err;
    s = upi_nccl_first(s, upipe_nccl_free(&h->team, s == UPIPE_OK ? e : NULL));
    if (h->slab != NULL && !h->team.comm.quarantine)
        s = upi_nccl_first(s,
                           upipe_nccl_check_cuda(s == UPIPE_OK ? e : NULL, cudaFree(h->slab), "cudaFree("));
    h->slab = NULL;
    h->host.ctx.team = NULL;
    return s;
}

/* The host and its slab, once there is a team. */
UPIPE_API upipe_status upi_nccl_host(upipe_nccl_host *h, const upipe_host_desc *desc)
{
    UPIPE_TRY(upipe_host_open(&h->host, desc));
    UPIPE_TRY(upipe_nccl_check_cuda(&h->host.ctx.err, cudaMalloc(&h->slab, upipe_host_slab_bytes(&h->host)),
                                    "cudaMalloc("));
    return upipe_host_slab(&h->host, h->slab);
}

/* upipe_nccl_host_open -- a team of all ranks of an NCCL communicator, and this rank's host in it
 *   nccl, deadline_s  as upipe_nccl_init
 *   stream            of all calls
 *   desc, ops         as upipe_host_open; ops is kept until the close
 *   errors            those of both, MEMORY, BACKEND. The team's other ranks then fail with the same sentence, and
 *                     there is nothing to close
 */
UPIPE_API upipe_status upipe_nccl_host_open(upipe_nccl_host *h, ncclComm_t nccl, cudaStream_t stream,
                                            double deadline_s, const upipe_host_desc *desc,
                                            const upipe_ops *ops, upipe_err *e)
{
    upipe_status s;
    memset(h, 0, sizeof *h);
    UPIPE_TRY(upipe_nccl_init(&h->team, nccl, deadline_s, e));
    h->host.ctx.ops = ops;
    h->host.ctx.team = &h->team.comm;
    h->host.ctx.stream = stream;
    s = upi_nccl_host(h, desc);
    if (s == UPIPE_OK) return s;
    if (e != NULL) *e = h->host.ctx.err;
    upipe_comm_abort(&h->team.comm, h->host.ctx.err.text);
    upipe_nccl_host_close(h, NULL);
    return s;
}

#endif

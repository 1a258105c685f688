/* part_nccl.h -- a communicator of a part of NCCL's ranks, and this process's end of it */
#ifndef COMMON_PART_NCCL_H
#define COMMON_PART_NCCL_H

#include "upipe/net/upipe_net_grid.h"
#include "upipe/net/upipe_net_nccl.h"

typedef struct part_nccl {
    upipe_nccl end;
    ncclComm_t comm; /* NULL: there is none, or it is another's */
} part_nccl;

/* Rank part.rank of those that bring this id. */
static inline upipe_status part_nccl_make(part_nccl *n, ncclUniqueId id, upipe_grid_part part,
                                          double deadline, upipe_err *e)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    upipe_status s;
    ncclResult_t r;
    config.blocking = 0; /* else NCCL waits for missing ranks without a limit */
    r = ncclCommInitRankConfig(&n->comm, part.ranks, id, part.rank, &config);
    if (r != ncclSuccess && r != ncclInProgress)
        return upipe_nccl_check(e, NULL, r, "ncclCommInitRankConfig(");
    s = upipe_nccl_init(&n->end, n->comm, deadline, e);
    if (s == UPIPE_OK) return s;
    (void)ncclCommAbort(n->comm);
    n->comm = NULL;
    return s;
}

/* All ranks of `all` call it together, each with its part, whose first rank draws the id. */
static inline upipe_status part_nccl_split(part_nccl *n, upipe_comm *all, upipe_grid_part part,
                                           double deadline, upipe_err *e)
{
    enum { NUMBERS = sizeof(ncclUniqueId) / sizeof(int64_t) };
    int64_t mine[NUMBERS];
    ncclUniqueId id;
    upipe_ctx c;
    memset(&c, 0, sizeof c);
    memset(&id, 0, sizeof id);
    if (part.rank == 0) UPIPE_TRY(upipe_nccl_check(e, NULL, ncclGetUniqueId(&id), "ncclGetUniqueId("));
    memcpy(mine, &id, sizeof id);
    if (upipe_comm_all_gather(&c, all, all->gathered, mine, NUMBERS) != UPIPE_OK)
        return *e = c.err, e->status;
    memcpy(&id, all->gathered + (size_t)part.first * NUMBERS, sizeof id);
    return part_nccl_make(n, id, part, deadline, e);
}

/* Ends a communicator with the others, or alone if they do not come in time. */
static inline int part_nccl_finalize(ncclComm_t nccl, double deadline)
{
    const int64_t until = upipe_net_now() + (int64_t)(deadline * 1e9);
    ncclResult_t r = ncclCommFinalize(nccl);
    while (r == ncclSuccess || r == ncclInProgress) {
        const struct timespec nap = {0, 100000};
        if (ncclCommGetAsyncError(nccl, &r) != ncclSuccess || r == ncclSuccess) break;
        if (upipe_net_now() > until) r = ncclSystemError;
        nanosleep(&nap, NULL);
    }
    if (r == ncclSuccess) return ncclCommDestroy(nccl) == ncclSuccess ? 0 : -1;
    (void)ncclCommAbort(nccl);
    return -1;
}

/* Ends n of them, the last one first. OK, or what went wrong first. */
static inline upipe_status part_nccl_end(part_nccl *parts, int n, double deadline, upipe_err *e)
{
    upipe_status s = UPIPE_OK;
    int i;
    for (i = n; i-- > 0;) {
        upipe_err why;
        if (upipe_nccl_free(&parts[i].end, &why) != UPIPE_OK && s == UPIPE_OK) *e = why, s = why.status;
    }
    for (i = n; i-- > 0;) {
        part_nccl *part = &parts[i];
        if (part->comm == NULL || part->end.nccl == NULL) continue; /* none, or a failure has ended it */
        if (part_nccl_finalize(part->comm, deadline) != 0 && s == UPIPE_OK)
            s = upipe_fail(e, UPIPE_ERR_BACKEND, "NCCL does not end");
    }
    return s;
}

#endif

/* team_nccl.h -- ranks with a GPU each, over NCCL        part of upipe_abi.c
 *
 * Team and ring have communicators of their own, whose ids go through that of all ranks: the caller's stays the
 * caller's.
 */
#ifndef ABI_TEAM_NCCL_H
#define ABI_TEAM_NCCL_H

#include "team.h"

#ifdef UPIPE_WITH_NCCL

#include "upipe/net/upipe_net_nccl.h"

_Static_assert((int)UPIPE_ABI_NCCL_ID_BYTES == (int)sizeof(ncclUniqueId), "as long as NCCL's id");

enum { ABI_NCCL_ALL, ABI_NCCL_TEAM, ABI_NCCL_RING, ABI_NCCL_COMMS };

typedef struct abi_nccl {
    upipe_nccl end[ABI_NCCL_COMMS];
    ncclComm_t comm[ABI_NCCL_COMMS]; /* those that end with the handle */
} abi_nccl;

/* Ends a communicator with the others, or alone if they do not come in time. */
static void abi_nccl_finalize(ncclComm_t nccl)
{
    const int64_t until = upipe_net_now() + ABI_DEADLINE * INT64_C(1000000000);
    ncclResult_t r = ncclCommFinalize(nccl);
    while (r == ncclSuccess || r == ncclInProgress) {
        const struct timespec nap = {0, 100000};
        if (ncclCommGetAsyncError(nccl, &r) != ncclSuccess || r == ncclSuccess) break;
        if (upipe_net_now() > until) r = ncclSystemError;
        nanosleep(&nap, NULL);
    }
    (void)(r == ncclSuccess ? ncclCommDestroy(nccl) : ncclCommAbort(nccl));
}

static void abi_team_nccl_end(abi_team *t)
{
    abi_nccl *n = (abi_nccl *)t->own;
    int i;
    for (i = 0; i < ABI_NCCL_COMMS; ++i) {
        (void)upipe_nccl_free(&n->end[i], NULL);
        t->kept |= n->end[i].comm.quarantine;
    }
    for (i = ABI_NCCL_COMMS; i-- > 0;) /* a failure has ended one whose end has none */
        if (n->comm[i] != NULL && n->end[i].nccl != NULL) abi_nccl_finalize(n->comm[i]);
    free(n);
}

/* A communicator of the handle's own, and this rank's end of it. */
static upipe_status abi_nccl_make(abi_nccl *n, int which, ncclUniqueId id, int rank, int ranks, upipe_err *e)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    upipe_status s;
    ncclResult_t r;
    config.blocking = 0; /* else NCCL waits for missing ranks without a limit */
    r = ncclCommInitRankConfig(&n->comm[which], ranks, id, rank, &config);
    if (r != ncclSuccess && r != ncclInProgress)
        return upipe_nccl_check(e, NULL, r, "ncclCommInitRankConfig(");
    s = upipe_nccl_init(&n->end[which], n->comm[which], ABI_DEADLINE, e);
    if (s != UPIPE_OK) {
        (void)ncclCommAbort(n->comm[which]);
        n->comm[which] = NULL;
    }
    return s;
}

/* The team's, or the ring's; its rank 0 tells the others the id. */
static upipe_status abi_nccl_group(abi_team *t, int which, upipe_err *e)
{
    enum { NUMBERS = sizeof(ncclUniqueId) / sizeof(int64_t) };
    abi_nccl *n = (abi_nccl *)t->own;
    upipe_comm *all = &n->end[ABI_NCCL_ALL].comm;
    const int of_ring = which == ABI_NCCL_RING,
              rank = of_ring ? t->first / t->in_team : t->first % t->in_team;
    int64_t mine[NUMBERS] = {0};
    ncclUniqueId id;
    upipe_ctx c;
    memset(&c, 0, sizeof c);
    if (rank == 0) {
        UPIPE_TRY(upipe_nccl_check(e, NULL, ncclGetUniqueId(&id), "ncclGetUniqueId("));
        memcpy(mine, &id, sizeof id);
    }
    if (upipe_comm_all_gather(&c, all, all->gathered, mine, NUMBERS) != UPIPE_OK)
        return *e = c.err, e->status;
    memcpy(&id, all->gathered + (size_t)abi_team_member(t, of_ring, 0) * NUMBERS, sizeof id);
    return abi_nccl_make(n, which, id, rank, of_ring ? t->in_ring : t->in_team, e);
}

/* comm: an ncclComm_t, or NULL: then one is made of the id, where this process is `rank`. */
static upipe_status abi_team_nccl(abi_team *t, int in_team, int in_ring, int rank, void *comm, const void *id,
                                  upipe_err *e)
{
    upipe_nccl *all, *team, *ring;
    abi_nccl *n;
    UPIPE_TRY(abi_team_one(t, in_team, in_ring, rank, e));
    t->own = n = (abi_nccl *)calloc(1, sizeof *n);
    if (n == NULL) return upipe_fail(e, UPIPE_ERR_MEMORY, "memory is out");
    t->end = abi_team_nccl_end;
    all = &n->end[ABI_NCCL_ALL], team = &n->end[ABI_NCCL_TEAM], ring = &n->end[ABI_NCCL_RING];
    if (comm != NULL) {
        UPIPE_TRY(upipe_nccl_init(all, (ncclComm_t)comm, ABI_DEADLINE, e));
        if (all->comm.ranks != in_team * in_ring)
            return upipe_fail(e, UPIPE_ERR_ARG, "a communicator of %d ranks, and a description of %d",
                              all->comm.ranks, in_team * in_ring);
        t->first = all->comm.rank;
    } else {
        ncclUniqueId whole;
        memcpy(&whole, id, sizeof whole);
        UPIPE_TRY(abi_nccl_make(n, ABI_NCCL_ALL, whole, rank, in_team * in_ring, e));
    }
    t->team = &all->comm;
    if (comm == NULL && in_ring == 1) return UPIPE_OK;
    UPIPE_TRY(abi_nccl_group(t, ABI_NCCL_TEAM, e));
    t->team = &team->comm;
    if (in_ring > 1) {
        UPIPE_TRY(abi_nccl_group(t, ABI_NCCL_RING, e));
        UPIPE_TRY(upipe_nccl_join(team, ring, e));
        t->ring = &ring->comm;
    }
    return upipe_nccl_free(all, e);
}

static upipe_status abi_nccl_id(void *id, upipe_err *e)
{
    return upipe_nccl_check(e, NULL, ncclGetUniqueId((ncclUniqueId *)id), "ncclGetUniqueId(");
}

#else

static upipe_status abi_nccl_lacks(upipe_err *e)
{
    return upipe_fail(e, UPIPE_ERR_UNSUPPORTED, "this library was built without NCCL");
}

static upipe_status abi_team_nccl(abi_team *t, int in_team, int in_ring, int rank, void *comm, const void *id,
                                  upipe_err *e)
{
    (void)t, (void)in_team, (void)in_ring, (void)rank, (void)comm, (void)id;
    return abi_nccl_lacks(e);
}

static upipe_status abi_nccl_id(void *id, upipe_err *e)
{
    (void)id;
    return abi_nccl_lacks(e);
}

#endif
#endif

/* team_nccl.h -- ranks with a GPU each, over NCCL        part of upipe_abi.c
 *
 * Team and ring have communicators of their own, whose ids go through that of all ranks: the caller's stays the
 * caller's.
 */
#ifndef ABI_TEAM_NCCL_H
#define ABI_TEAM_NCCL_H

#include "team.h"

#ifdef UPIPE_WITH_NCCL

#include "../../common/part_nccl.h"

_Static_assert((int)UPIPE_ABI_NCCL_ID_BYTES == (int)sizeof(ncclUniqueId), "as long as NCCL's id");

enum { ABI_NCCL_ALL, ABI_NCCL_TEAM, ABI_NCCL_RING, ABI_NCCL_COMMS };

static void abi_team_nccl_end(abi_team *t)
{
    part_nccl *n = (part_nccl *)t->own;
    upipe_err e;
    int i;
    (void)part_nccl_end(n, ABI_NCCL_COMMS, ABI_DEADLINE, &e);
    for (i = 0; i < ABI_NCCL_COMMS; ++i) t->kept |= n[i].end.comm.quarantine;
    free(n);
}

/* Communicators of the handle's own in place of that of all. */
static upipe_status abi_team_nccl_split(abi_team *t, const upipe_grid_part *part, upipe_err *e)
{
    part_nccl *n = (part_nccl *)t->own, *team = &n[ABI_NCCL_TEAM], *ring = &n[ABI_NCCL_RING];
    upipe_nccl *all = &n[ABI_NCCL_ALL].end;
    UPIPE_TRY(part_nccl_split(team, &all->comm, part[0], ABI_DEADLINE, e));
    t->team = &team->end.comm;
    if (t->grid.in_ring > 1) {
        UPIPE_TRY(part_nccl_split(ring, &all->comm, part[1], ABI_DEADLINE, e));
        UPIPE_TRY(upipe_nccl_join(&team->end, &ring->end, e));
        t->ring = &ring->end.comm;
    }
    return upipe_nccl_free(all, e);
}

static upipe_status abi_team_nccl_by(abi_team *t, const abi_given *given, upipe_err *e)
{
    const upipe_grid_part whole = {0, 1, t->grid.ranks, given->rank};
    upipe_grid_part part[2] = {{0}};
    ncclUniqueId id;
    part_nccl *n;
    UPIPE_TRY(abi_team_one(t, given->rank, part, e));
    t->own = n = (part_nccl *)calloc(ABI_NCCL_COMMS, sizeof *n);
    if (n == NULL) return upipe_fail(e, UPIPE_ERR_MEMORY, "memory is out");
    t->end = abi_team_nccl_end;
    if (given->nccl != NULL) {
        upipe_comm *all = &n[ABI_NCCL_ALL].end.comm;
        UPIPE_TRY(upipe_nccl_init(&n[ABI_NCCL_ALL].end, (ncclComm_t)given->nccl, ABI_DEADLINE, e));
        if (all->ranks != whole.ranks)
            return upipe_fail(e, UPIPE_ERR_ARG, "a communicator of %d ranks, and a description of %d",
                              all->ranks, whole.ranks);
        UPIPE_TRY(abi_team_one(t, all->rank, part, e));
        return abi_team_nccl_split(t, part, e);
    }
    memcpy(&id, given->nccl_id, sizeof id);
    UPIPE_TRY(part_nccl_make(&n[ABI_NCCL_ALL], id, whole, ABI_DEADLINE, e));
    t->team = &n[ABI_NCCL_ALL].end.comm;
    return t->grid.in_ring > 1 ? abi_team_nccl_split(t, part, e) : UPIPE_OK;
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

static upipe_status abi_team_nccl_by(abi_team *t, const abi_given *given, upipe_err *e)
{
    (void)t, (void)given;
    return abi_nccl_lacks(e);
}

static upipe_status abi_nccl_id(void *id, upipe_err *e)
{
    (void)id;
    return abi_nccl_lacks(e);
}

#endif

static upipe_status abi_team_nccl(abi_team *t, const abi_given *given, upipe_err *e)
{
    if (given->nccl == NULL && given->nccl_id == NULL)
        return upipe_fail(e, UPIPE_ERR_ARG, "the communicator, or its id, is NULL");
    return abi_team_nccl_by(t, given, e);
}

#endif

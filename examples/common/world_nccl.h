/* world_nccl.h -- a world whose ranks are processes with a device each, over NCCL; world.h includes it
 *
 * The launcher's environment says who a process is (rendezvous.h), and its rank on the machine which device is its.
 * Rank 0 of the launcher sends the id of the first communicator by TCP; later ids go through that one. The host's own
 * numbers and sentences go through NCCL too, by the all-gathers of upipe_comm. After a failure there is no such way:
 * a rank that fails says itself why, and the others end by the deadline or by the launcher.
 *
 * The communicators of a process are joined: they fail together, and their operations never meet on the device.
 */
#ifndef COMMON_WORLD_NCCL_H
#define COMMON_WORLD_NCCL_H

#include "part_nccl.h"

typedef struct world_nccl {
    part_nccl part[WORLD_COMMS];
} world_nccl;

static upipe_status world_nccl_make(struct world *w, int which, upipe_grid_part part, upipe_comm **comm,
                                    upipe_err *e)
{
    part_nccl *all = ((world_nccl *)w->own)->part, *n = &all[which];
    UPIPE_TRY(part_nccl_split(n, w->all, part, w->deadline, e));
    *comm = &n->end.comm;
    return upipe_nccl_join(&all[WORLD_LAUNCHED].end, &n->end, e);
}

static int world_nccl_end(struct world *w)
{
    world_nccl *n = (world_nccl *)w->own;
    upipe_err e;
    const int bad = part_nccl_end(n->part, WORLD_COMMS, w->deadline, &e) != UPIPE_OK;
    free(n);
    w->own = NULL;
    return bad ? cli_fail("%s", e.text) : 0;
}

/* Machines, and the communicator of all in their order. */
static upipe_status world_nccl_place(struct world *w, const launch *l, int node_ranks, upipe_err *e)
{
    world_nccl *n = (world_nccl *)w->own;
    int64_t node = node_ranks > 0 ? l->rank / node_ranks : upipe_nccl_node();
    upipe_ctx c;
    upipe_status s;
    int r, unlike = 0;
    memset(&c, 0, sizeof c);
    w->all = &n->part[WORLD_LAUNCHED].end.comm;
    s = upipe_comm_all_gather(&c, w->all, w->all->gathered, &node, 1);
    if (s != UPIPE_OK) return *e = c.err, s;
    w->first = world_place(w->all->gathered, l->ranks, l->rank, &w->near_first, &w->near);
    for (r = 0; r < l->ranks; ++r) {
        int first, near;
        unlike |= world_place(w->all->gathered, l->ranks, r, &first, &near) != r;
    }
    if (!unlike) return UPIPE_OK;
    return world_nccl_make(w, WORLD_ALL, world_whole(w), &w->all, e);
}

static upipe_status world_nccl_open(struct world *w, const launch *l, int node_ranks, upipe_err *e)
{
    world_nccl *n = (world_nccl *)w->own;
    ncclUniqueId id;
    int devices = 0;
    memset(&id, 0, sizeof id);
    UPIPE_TRY(upipe_nccl_check_cuda(e, cudaGetDeviceCount(&devices), "cudaGetDeviceCount("));
    /* launchers may show each process all devices of its machine, or its own alone */
    if (devices > 1 && l->local >= devices)
        return upipe_fail(e, UPIPE_ERR_ARG, "process %d of this machine, which has %d devices", l->local,
                          devices);
    UPIPE_TRY(upipe_nccl_check_cuda(e, cudaSetDevice(l->local % devices), "cudaSetDevice("));
    if (l->rank == 0) UPIPE_TRY(upipe_nccl_check(e, NULL, ncclGetUniqueId(&id), "ncclGetUniqueId("));
    if (rendezvous(l, &id, sizeof id, w->deadline) != 0)
        return upipe_fail(e, UPIPE_ERR_TIMEOUT, "%s", ""); /* the sentence is out */
    UPIPE_TRY(part_nccl_make(&n->part[WORLD_LAUNCHED], id, world_whole(w), w->deadline, e));
    return world_nccl_place(w, l, node_ranks, e);
}

/* What has been made of a world that comes to nothing. */
static void world_nccl_drop(struct world *w, const char *why)
{
    world_nccl *n = (world_nccl *)w->own;
    int i;
    for (i = 0; i < WORLD_COMMS; ++i) upipe_comm_abort(&n->part[i].end.comm, why);
    for (i = WORLD_COMMS; i-- > 0;) (void)upipe_nccl_free(&n->part[i].end, NULL);
    free(n);
    w->own = NULL;
}

/* 0, or -1 with the sentence out. */
static int world_nccl_begin(struct world *w, const options *o)
{
    static const world_kind kind = {world_nccl_make, world_nccl_end, world_flush, world_stop};
    launch l;
    upipe_err e;
    upipe_status s;
    w->kind = &kind;
    if (launch_read(&l) != 0) return -1;
    if (l.ranks > UPIPE_THREADS_MAX)
        return cli_fail("%d processes; a run has at most %d ranks", l.ranks, UPIPE_THREADS_MAX);
    w->own = calloc(1, sizeof(world_nccl));
    if (w->own == NULL) return cli_fail("out of memory");
    w->ranks = l.ranks;
    w->first = l.rank; /* until machines are known */
    w->here = 1;
    s = world_nccl_open(w, &l, o->node_ranks, &e);
    if (s == UPIPE_OK) return 0;
    if (e.text[0] != 0) cli_fail("rank %d: %s%s", l.rank, cli_status(s), e.text);
    world_nccl_drop(w, e.text);
    return -1;
}

#endif

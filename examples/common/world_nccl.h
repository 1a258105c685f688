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

#include "upipe/net/upipe_net_nccl.h"

/* LAUNCHED: of all ranks in the launcher's order; ALL: by machine, where that is another one; TEAM, RING: of the first
 * shape, and two more of each other one. */
enum {
    WORLD_NCCL_LAUNCHED,
    WORLD_NCCL_ALL,
    WORLD_NCCL_SIDE,
    WORLD_NCCL_TEAM,
    WORLD_NCCL_RING,
    WORLD_NCCL_COMMS = WORLD_NCCL_TEAM + 2 * WORLD_SHAPES
};

typedef struct world_nccl {
    upipe_nccl end[WORLD_NCCL_COMMS];
    ncclComm_t comm[WORLD_NCCL_COMMS];
} world_nccl;

/* Joins a communicator; rank `rank` of `ranks`. */
static upipe_status world_nccl_make(struct world *w, int which, ncclUniqueId id, int rank, int ranks,
                                    upipe_err *e)
{
    world_nccl *n = (world_nccl *)w->own;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclResult_t r;
    upipe_status s;
    config.blocking = 0; /* else NCCL waits for missing ranks without a limit */
    r = ncclCommInitRankConfig(&n->comm[which], ranks, id, rank, &config);
    if (r != ncclSuccess && r != ncclInProgress)
        return upipe_nccl_check(e, NULL, r, "ncclCommInitRankConfig(");
    s = upipe_nccl_init(&n->end[which], n->comm[which], w->deadline, e);
    if (s == UPIPE_OK && which != WORLD_NCCL_LAUNCHED)
        return upipe_nccl_join(&n->end[WORLD_NCCL_LAUNCHED], &n->end[which], e);
    if (s != UPIPE_OK) {
        (void)ncclCommAbort(n->comm[which]);
        n->comm[which] = NULL;
    }
    return s;
}

/* The same for groups of the world, all at once: the rank `leader` of the world is rank 0 of this process's group. */
static upipe_status world_nccl_group(struct world *w, int which, int leader, int rank, int ranks,
                                     upipe_err *e)
{
    enum { NUMBERS = sizeof(ncclUniqueId) / sizeof(int64_t) };
    int64_t mine[NUMBERS];
    ncclUniqueId id;
    upipe_ctx c;
    upipe_status s;
    memset(&c, 0, sizeof c);
    memset(&id, 0, sizeof id);
    if (rank == 0) UPIPE_TRY(upipe_nccl_check(e, NULL, ncclGetUniqueId(&id), "ncclGetUniqueId("));
    memcpy(mine, &id, sizeof id);
    s = upipe_comm_all_gather(&c, w->all, w->all->gathered, mine, NUMBERS);
    if (s != UPIPE_OK) return *e = c.err, s;
    memcpy(&id, w->all->gathered + (size_t)leader * NUMBERS, sizeof id);
    return world_nccl_make(w, which, id, rank, ranks, e);
}

static upipe_status world_nccl_split(struct world *w, upipe_err *e)
{
    world_nccl *n = (world_nccl *)w->own;
    const int team = w->first / w->in_team, place = w->first % w->in_team, at = 2 * w->shapes_n;
    if (w->with_side && w->side == NULL) {
        UPIPE_TRY(world_nccl_group(w, WORLD_NCCL_SIDE, 0, w->first, w->ranks, e));
        w->side = &n->end[WORLD_NCCL_SIDE].comm;
    }
    w->team = w->all;
    if (w->in_team == w->ranks) return UPIPE_OK;
    UPIPE_TRY(world_nccl_group(w, WORLD_NCCL_TEAM + at, team * w->in_team, place, w->in_team, e));
    w->team = &n->end[WORLD_NCCL_TEAM + at].comm;
    if (w->in_ring == 1) return UPIPE_OK;
    UPIPE_TRY(
        world_nccl_group(w, WORLD_NCCL_RING + at, world_ring_first(w), team % w->in_ring, w->in_ring, e));
    w->ring = &n->end[WORLD_NCCL_RING + at].comm;
    return UPIPE_OK;
}

/* Ends a communicator with the others, or alone if they do not come in time. */
static int world_nccl_finalize(ncclComm_t nccl, double deadline)
{
    const double until = cli_clock(NULL) + deadline;
    ncclResult_t r = ncclCommFinalize(nccl);
    while (r == ncclSuccess || r == ncclInProgress) {
        struct timespec nap = {0, 100000};
        if (ncclCommGetAsyncError(nccl, &r) != ncclSuccess || r == ncclSuccess) break;
        if (cli_clock(NULL) > until) r = ncclSystemError;
        nanosleep(&nap, NULL);
    }
    if (r == ncclSuccess) return ncclCommDestroy(nccl) == ncclSuccess ? 0 : -1;
    (void)ncclCommAbort(nccl);
    return -1;
}

static int world_nccl_end(struct world *w)
{
    world_nccl *n = (world_nccl *)w->own;
    upipe_err e;
    int i, bad = 0;
    for (i = WORLD_NCCL_COMMS; i-- > 0;) /* parts before their world */
        if (upipe_nccl_free(&n->end[i], &e) != UPIPE_OK && !bad) bad = cli_fail("%s", e.text);
    for (i = WORLD_NCCL_COMMS; i-- > 0;)
        if (n->end[i].nccl != NULL && world_nccl_finalize(n->comm[i], w->deadline) != 0 && !bad)
            bad = cli_fail("NCCL does not end");
    free(n);
    w->own = NULL;
    return bad;
}

static void world_nccl_flush(double seconds)
{
    struct timespec nap = {0, (long)(seconds * 1e9)};
    nanosleep(&nap, NULL);
}

/* The launcher ends the others when one has failed; NCCL cannot. */
static void world_nccl_stop(void)
{
    _exit(EXIT_RUN);
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
    w->all = &n->end[WORLD_NCCL_LAUNCHED].comm;
    s = upipe_comm_all_gather(&c, w->all, w->all->gathered, &node, 1);
    if (s != UPIPE_OK) return *e = c.err, s;
    w->first = world_place(w->all->gathered, l->ranks, l->rank, &w->near_first, &w->near);
    for (r = 0; r < l->ranks; ++r) {
        int first, near;
        unlike |= world_place(w->all->gathered, l->ranks, r, &first, &near) != r;
    }
    if (!unlike) return UPIPE_OK;
    UPIPE_TRY(world_nccl_group(w, WORLD_NCCL_ALL, 0, w->first, l->ranks, e));
    w->all = &n->end[WORLD_NCCL_ALL].comm;
    return UPIPE_OK;
}

static upipe_status world_nccl_open(struct world *w, const launch *l, int node_ranks, upipe_err *e)
{
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
    UPIPE_TRY(world_nccl_make(w, WORLD_NCCL_LAUNCHED, id, l->rank, l->ranks, e));
    return world_nccl_place(w, l, node_ranks, e);
}

/* What has been made of a world that comes to nothing. */
static void world_nccl_drop(struct world *w, const char *why)
{
    world_nccl *n = (world_nccl *)w->own;
    int i;
    for (i = 0; i < WORLD_NCCL_COMMS; ++i) upipe_comm_abort(&n->end[i].comm, why);
    for (i = WORLD_NCCL_COMMS; i-- > 0;) (void)upipe_nccl_free(&n->end[i], NULL);
    free(n);
    w->own = NULL;
}

/* 0, or -1 with the sentence out. */
static int world_nccl_begin(struct world *w, const options *o)
{
    static const world_kind kind = {world_nccl_split, world_nccl_end, world_nccl_flush, world_nccl_stop};
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
    w->here = 1;
    s = world_nccl_open(w, &l, o->node_ranks, &e);
    if (s == UPIPE_OK) return 0;
    if (e.text[0] != 0) cli_fail("rank %d: %s%s", l.rank, cli_status(s), e.text);
    world_nccl_drop(w, e.text);
    return -1;
}

#endif

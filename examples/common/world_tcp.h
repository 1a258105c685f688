/* world_tcp.h -- a world whose ranks are processes on CPUs, over TCP; world.h includes it
 *
 * The launcher's environment says who a process is. All meet rank 0 of the launcher at MASTER_ADDR (rendezvous.h),
 * which tells them at what address each of them listens. For a communicator each rank in turn is met by those behind
 * it, twice: once for headers, once for data. So whoever connects proves the secret.
 */
#ifndef COMMON_WORLD_TCP_H
#define COMMON_WORLD_TCP_H

#include "upipe/net/upipe_net_tcp.h"

enum { WORLD_TCP_SOCKETS = 2 }; /* of a pair: headers, data */

/* Where a rank listens for a communicator. */
typedef struct world_tcp_door {
    char host[64]; /* a number */
    int32_t port[WORLD_TCP_SOCKETS];
    int64_t node; /* of its machine */
} world_tcp_door;

typedef struct world_tcp {
    upipe_tcp end[WORLD_COMMS];
    int fds[WORLD_COMMS][WORLD_TCP_SOCKETS][UPIPE_TCP_MAX];
    int listening[WORLD_TCP_SOCKETS]; /* of the communicator that is being made */
    world_tcp_door door;              /* this rank's */
    world_tcp_door doors[UPIPE_TCP_MAX];
} world_tcp;

static inline void world_tcp_close(int *fds, int n)
{
    int i;
    for (i = 0; i < n; ++i) {
        if (fds[i] >= 0) close(fds[i]);
        fds[i] = -1;
    }
}

/* Opens this rank's door, at ports that are free. */
static inline int world_tcp_listen(world_tcp *t)
{
    struct addrinfo hints, *all = NULL;
    struct sockaddr_storage at;
    rendezvous_call k;
    char where[64], port[16];
    int i, bad;
    memset(&k, 0, sizeof k);
    memset(&hints, 0, sizeof hints);
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_NUMERICHOST;
    bad = getaddrinfo(t->door.host, "0", &hints, &all) != 0;
    k.all = all;
    for (i = 0; i < WORLD_TCP_SOCKETS && !bad; ++i) {
        socklen_t size = sizeof at;
        t->listening[i] = rendezvous_listen(&k, where, sizeof where);
        bad = t->listening[i] < 0 || getsockname(t->listening[i], (struct sockaddr *)&at, &size) != 0 ||
              getnameinfo((struct sockaddr *)&at, size, NULL, 0, port, sizeof port, NI_NUMERICSERV) != 0;
        if (!bad) t->door.port[i] = atoi(port);
    }
    if (all != NULL) freeaddrinfo(all);
    return bad ? cli_fail("no socket listens at %s: %s", t->door.host, strerror(errno)) : 0;
}

/* All doors are known. Connects a part, and makes this rank's end. */
static inline int world_tcp_connect(struct world *w, int which, upipe_grid_part part)
{
    world_tcp *t = (world_tcp *)w->own;
    upipe_err e;
    char byte = 0;
    int p, i;
    for (p = 0; p <= part.rank && p < part.ranks - 1; ++p) {
        const world_tcp_door *door = &t->doors[part.first + p * part.step];
        for (i = 0; i < WORLD_TCP_SOCKETS; ++i) {
            launch l;
            memset(&l, 0, sizeof l);
            l.address = door->host;
            l.port = door->port[i];
            l.rank = part.rank - p;
            l.ranks = part.ranks - p;
            l.first = part.first + p * part.step;
            l.step = part.step;
            if (rendezvous_connect_all(&l, p == part.rank ? t->listening[i] : -1, &byte, 1, w->deadline,
                                       t->fds[which][i] + p) != 0)
                return -1;
        }
    }
    world_tcp_close(t->listening, WORLD_TCP_SOCKETS);
    if (upipe_tcp_init(&t->end[which], t->fds[which][0], t->fds[which][1], part.rank, part.ranks, w->deadline,
                       &e) != UPIPE_OK)
        return cli_fail("%s", e.text);
    return 0;
}

/* A sentence is out, or held, and is the only one. */
static inline upipe_status world_tcp_reported(const struct world *w, upipe_err *e)
{
    cli_mute = !cli_holds;
    return upipe_fail(e, UPIPE_ERR_TIMEOUT, "rank %d has no connections", w->first);
}

/* The same for a later communicator: the doors go through that of all. */
static inline upipe_status world_tcp_make(struct world *w, int which, upipe_grid_part part, upipe_comm **comm,
                                          upipe_err *e)
{
    enum { NUMBERS = sizeof(world_tcp_door) / sizeof(int64_t) };
    world_tcp *t = (world_tcp *)w->own;
    int64_t mine[NUMBERS];
    upipe_ctx c;
    memset(&c, 0, sizeof c);
    if (world_tcp_listen(t) != 0) return world_tcp_reported(w, e);
    memcpy(mine, &t->door, sizeof mine);
    if (upipe_comm_all_gather(&c, w->all, w->all->gathered, mine, NUMBERS) != UPIPE_OK)
        return *e = c.err, e->status;
    memcpy(t->doors, w->all->gathered, (size_t)w->ranks * sizeof *t->doors);
    if (world_tcp_connect(w, which, part) != 0) return world_tcp_reported(w, e);
    *comm = &t->end[which].comm;
    return UPIPE_OK;
}

/* Closes what there is. */
static inline void world_tcp_drop(struct world *w)
{
    world_tcp *t = (world_tcp *)w->own;
    int i;
    for (i = 0; i < WORLD_COMMS * WORLD_TCP_SOCKETS; ++i)
        world_tcp_close(t->fds[i / WORLD_TCP_SOCKETS][i % WORLD_TCP_SOCKETS], UPIPE_TCP_MAX);
    world_tcp_close(t->listening, WORLD_TCP_SOCKETS);
    free(t);
    w->own = NULL;
}

static inline int world_tcp_end(struct world *w)
{
    world_tcp *t = (world_tcp *)w->own;
    upipe_err e;
    int i, bad = 0;
    for (i = WORLD_COMMS; i-- > 0;) /* parts before their world */
        if (upipe_tcp_free(&t->end[i], &e) != UPIPE_OK && !bad) bad = cli_fail("%s", e.text);
    world_tcp_drop(w);
    return bad;
}

/* Every rank's door comes to rank 0, over the connections at which all have met, and from there to all, unless a rank is
 * missed. Returns that rank, or -1. lost: rank 0 misses that one already. */
static inline int world_tcp_all_gather(world_tcp *t, const launch *l, int *star, int lost, double until)
{
    const size_t all = (size_t)l->ranks * sizeof *t->doors;
    int32_t missed = -1;
    int r;
    t->doors[l->rank] = t->door;
    if (l->rank > 0) {
        if (rendezvous_move(star[0], &t->door, sizeof t->door, 1, until) != 0 ||
            rendezvous_move(star[0], &missed, sizeof missed, 0, until) != 0 ||
            (missed < 0 && rendezvous_move(star[0], t->doors, all, 0, until) != 0))
            return 0;
        return missed;
    }
    for (r = 1; r < l->ranks && lost < 0; ++r)
        if (rendezvous_move(star[r], &t->doors[r], sizeof *t->doors, 0, until) != 0) lost = r;
    missed = lost;
    for (r = 1; r < l->ranks; ++r)
        if (star[r] >= 0 &&
            (rendezvous_move(star[r], &missed, sizeof missed, 1, until) != 0 ||
             (missed < 0 && rendezvous_move(star[r], t->doors, all, 1, until) != 0)) &&
            lost < 0)
            lost = r;
    return lost;
}

/* This rank's door is where it has met the others.
 *
 * Rank 0 has one deadline for the meeting and the doors. Whom it misses then, the others hear from it. So theirs is
 * later, by more than a busy machine takes to give rank 0 its turn. */
static inline int world_tcp_meet(struct world *w, const launch *l, int *star, int node_ranks)
{
    world_tcp *t = (world_tcp *)w->own;
    struct sockaddr_storage at;
    socklen_t size = sizeof at;
    char name[256] = "", byte = 0;
    const double turn = 0.5, begun = cli_clock(NULL);
    double until;
    int lost;
    if (rendezvous_connect_all(l, -1, &byte, 1, w->deadline, star) != 0) { /* which has said who is missing */
        for (lost = 1; l->rank == 0 && lost < l->ranks && star[lost] >= 0;) ++lost;
        if (l->rank == 0 && lost < l->ranks) world_tcp_all_gather(t, l, star, lost, cli_clock(NULL) + 0.1);
        return -1;
    }
    until = (l->rank == 0 ? begun + turn / 2 : cli_clock(NULL) + turn) + w->deadline;
    snprintf(t->door.host, sizeof t->door.host, "127.0.0.1");
    if (l->ranks > 1 && getsockname(star[l->rank == 0], (struct sockaddr *)&at, &size) == 0)
        rendezvous_where(t->door.host, sizeof t->door.host, (struct sockaddr *)&at, size);
    (void)gethostname(name, sizeof name - 1);
    t->door.node = node_ranks > 0 ? l->rank / node_ranks : (int64_t)upipe_hash_bytes(0, name, strlen(name));
    if (world_tcp_listen(t) != 0) return -1;
    lost = world_tcp_all_gather(t, l, star, -1, until);
    if (lost < 0) return 0;
    if (l->rank > 0 && lost > 0)
        return cli_fail("rank %d has met rank 0, and rank %d has not come to it within %g s", l->rank, lost,
                        w->deadline);
    if (cli_clock(NULL) < until)
        return cli_fail("rank %d has met rank %d, and their connection has ended", l->rank, lost);
    return cli_fail("rank %d has met rank %d, and has no answer within %g s", l->rank, lost, w->deadline);
}

/* Machines in the order of their first process, and on each the processes in theirs. */
static inline void world_tcp_order(struct world *w, const launch *l)
{
    world_tcp *t = (world_tcp *)w->own;
    world_tcp_door doors[UPIPE_TCP_MAX];
    int64_t node[UPIPE_TCP_MAX];
    int r, first, near;
    for (r = 0; r < l->ranks; ++r) node[r] = t->doors[r].node;
    for (r = 0; r < l->ranks; ++r) doors[world_place(node, l->ranks, r, &first, &near)] = t->doors[r];
    w->first = world_place(node, l->ranks, l->rank, &w->near_first, &w->near);
    memcpy(t->doors, doors, (size_t)l->ranks * sizeof *doors);
}

/* 0, or -1 with the sentence out. */
static inline int world_tcp_begin(struct world *w, const options *o)
{
    static const world_kind kind = {world_tcp_make, world_tcp_end, world_flush, world_stop};
    int star[UPIPE_TCP_MAX], bad;
    launch l;
    world_tcp *t;
    w->kind = &kind;
    if (launch_read(&l) != 0) return -1;
    if (l.ranks > UPIPE_TCP_MAX)
        return cli_fail("%d processes; a run has at most %d ranks", l.ranks, UPIPE_TCP_MAX);
    if (strchr(l.address, '/') != NULL)
        return cli_fail("--transport tcp needs an address in MASTER_ADDR, and %.200s is a file", l.address);
    w->own = t = (world_tcp *)calloc(1, sizeof *t);
    if (t == NULL) return cli_fail("out of memory");
    memset(t->fds, 0xff, sizeof t->fds);
    memset(t->listening, 0xff, sizeof t->listening);
    memset(star, 0xff, sizeof star);
    w->ranks = l.ranks;
    w->here = 1;
    bad = world_tcp_meet(w, &l, star, o->node_ranks) != 0;
    world_tcp_close(star, UPIPE_TCP_MAX);
    if (!bad) {
        world_tcp_order(w, &l);
        bad = world_tcp_connect(w, WORLD_ALL, world_whole(w)) != 0;
    }
    w->all = &t->end[WORLD_ALL].comm;
    if (bad) world_tcp_drop(w);
    return bad ? -1 : 0;
}

#endif

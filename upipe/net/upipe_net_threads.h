/* upipe_net_threads.h -- a team of ranks that are threads of one process
 *
 *     upipe_status body(void *user, int rank)      one rank: its own upipe_ctx with ctx.ops and
 *     { ... }                                      ctx.team = upipe_threads_comm(team, rank)
 *
 *     upipe_threads team;
 *     upipe_status s = upipe_threads_init(&team, 4, 0, &err);
 *     if (s == UPIPE_OK) s = upipe_threads_run(&team, body, user, NULL, &err);
 *     upipe_threads_free(&team);
 *
 * A body ends with
 *
 *     if (s != UPIPE_OK) upipe_comm_abort(ctx.team, ctx.err.text);    its sentence, if no call has left one
 *     return s;
 *
 * A host with threads of its own does not call upipe_threads_run: each thread uses the communicator of its
 * rank. A thread that fails elsewhere calls upipe_comm_abort: else the others wait for the deadline.
 *
 * Data. start publishes the address of the list. wait copies every block from the peer's memory with
 * ctx->ops->copy. Nothing is packed or staged, and only the rank itself writes to its buffers. The entries of
 * a device's table only enqueue, and each rank may have a stream of its own. So start synchronizes, that the
 * send buffers are complete, and wait synchronizes behind the copies from each group of peers that have come
 * together. Ranks on one device run there in turn: a deadline must exceed the time that all of them need for
 * the work between two transfers.
 *
 * Order. Every rank makes the same sequence of calls (transfer, barrier, all-gather). A transfer is complete
 * on a rank when all ranks have started it, all its blocks have arrived, and all that it sends has been read.
 *
 * Failures. The rank that detects the first one returns its status: TIMEOUT, MISMATCH, or that of an entry of
 * the table. The others return ABORTED, but a MISMATCH once, in their next call if they had completed a
 * transfer in which others disagree. All sleeping ranks are woken, also in the other parts of the world
 * (upipe_comm_part). The sentence of TIMEOUT names the rank for which the others wait in the end. After
 * upipe_comm_abort between start and wait, upipe_comm_wait is still called: it returns when no peer reads the
 * send buffers, or sets comm->quarantine. After a failure only upipe_threads_free is legal, once no rank is
 * inside a call.
 *
 * Strict ISO C hides the clock: include this file first, or define _POSIX_C_SOURCE=200809L (on macOS
 * _DARWIN_C_SOURCE too).
 */
#ifndef UPIPE_NET_THREADS_H
#define UPIPE_NET_THREADS_H

#include "upipe_net_team.h"

#include <pthread.h>
#include <stdlib.h>

enum {
    UPIPE_THREADS_MAX = 256, /* ranks of one team */
    UPI_THREADS_YIELDS = 50, /* before a wait sleeps: best, or near it, with fewer cores than ranks too */
    UPI_THREADS_APART = 128  /* bytes between words that different ranks write, against false sharing */
};

/* What a rank publishes with one call. */
typedef struct upi_threads_post {
    const upipe_msg *list; /* [n], the rank's own memory: others read it only while counted in its readers */
    int n;                 /* messages of a transfer, numbers of an all-gather */
    int kind;              /* UPI_TEAM_... */
    int64_t values[UPIPE_ALL_GATHER_MAX];
} upi_threads_post;

typedef struct upi_threads_rank {
    /* Written by the rank, read by all. Call number n lies in post[n & 1]: a rank overwrites it at call
     * n + 2. By then it has completed n + 1, so that every rank has come to n + 1 and has finished n. */
    uint64_t posted; /* atomic: number of the last call published */
    uint64_t done;   /* atomic: number of the last transfer whose blocks have all arrived here */
    uint64_t waits;  /* atomic: number of the call in which the rank waits, or 0 */
    upi_threads_post post[2];
    char apart_0[UPI_THREADS_APART];
    /* Written by the other ranks. */
    uint64_t events; /* atomic: counts changes elsewhere that this rank may be waiting for */
    int readers;     /* atomic: peers that may be reading this rank's list and send buffers now */
    int asleep;      /* atomic: the rank sleeps on wake, or is about to */
    pthread_mutex_t lock;
    pthread_cond_t wake;
    char apart_1[UPI_THREADS_APART];
    /* The rank's own. */
    upipe_comm comm;
    uint64_t *pulled; /* [ranks]: number of the last transfer in which all from this peer has arrived */
    /* upipe_threads_run's */
    pthread_t thread;
    upipe_status (*body)(void *user, int rank);
    void *user;
    upipe_status status;
    char apart_2[UPI_THREADS_APART];
} upi_threads_rank;

/* A team. The host's; must not move between init and free. */
typedef struct upipe_threads {
    upi_threads_rank *all; /* [ranks], and behind it the rest of the one allocation */
    int *counts;           /* [2][2][ranks][ranks], see upi_threads_sends and upi_threads_receives */
    pthread_mutex_t lock;  /* held while a failure becomes the first */
    upipe_err failure;     /* the first one, constant once broken */
    int broken;            /* atomic */
    int ranks;
} upipe_threads;

/* ---- waiting: each rank sleeps on a count of events of its own ---- */

/* Wakes a rank, if it sleeps. What it is to find must be stored before. The count and `asleep` are in one
 * total order with those of upi_threads_await: either the sleeper sees the new count, or this call sees the
 * sleeper. */
UPIPE_API void upi_threads_notify(upi_threads_rank *rank)
{
    __atomic_fetch_add(&rank->events, 1, __ATOMIC_SEQ_CST);
    if (!__atomic_load_n(&rank->asleep, __ATOMIC_SEQ_CST)) return;
    pthread_mutex_lock(&rank->lock);
    pthread_cond_signal(&rank->wake);
    pthread_mutex_unlock(&rank->lock);
}

UPIPE_API void upi_threads_sleep(upi_threads_rank *me, int64_t until)
{
    struct timespec t;
#ifdef __APPLE__
    int64_t left = until - upipe_net_now();
    if (left < 0) left = 0;
    t.tv_sec = (time_t)(left / 1000000000);
    t.tv_nsec = (long)(left % 1000000000);
    pthread_cond_timedwait_relative_np(&me->wake, &me->lock, &t);
#else
    t.tv_sec = (time_t)(until / 1000000000);
    t.tv_nsec = (long)(until % 1000000000);
    pthread_cond_timedwait(&me->wake, &me->lock, &t);
#endif
}

/* Returns 1 when the count of events is no longer `seen`, 0 when the time `until` (ns) has passed before. */
UPIPE_API int upi_threads_await(upi_threads_rank *me, uint64_t seen, int64_t until)
{
    int i, events;
    for (i = 0; i < UPI_THREADS_YIELDS; ++i) {
        if (__atomic_load_n(&me->events, __ATOMIC_ACQUIRE) != seen) return 1;
        sched_yield();
    }
    pthread_mutex_lock(&me->lock);
    __atomic_store_n(&me->asleep, 1, __ATOMIC_SEQ_CST);
    while (!(events = __atomic_load_n(&me->events, __ATOMIC_SEQ_CST) != seen) && upipe_net_now() < until)
        upi_threads_sleep(me, until);
    __atomic_store_n(&me->asleep, 0, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&me->lock);
    return events;
}

/* ---- failure ---- */

UPIPE_API int upi_threads_is_broken(const upipe_threads *team)
{
    return __atomic_load_n(&team->broken, __ATOMIC_SEQ_CST);
}

UPIPE_API const upipe_err *upi_threads_failure(const upipe_comm *comm)
{
    const upipe_threads *team = (const upipe_threads *)comm->impl;
    return upi_threads_is_broken(team) ? &team->failure : NULL;
}

UPIPE_API int upi_threads_break(upipe_threads *team, upipe_status s, const char *why)
{
    int first, r;
    pthread_mutex_lock(&team->lock);
    first = !team->broken;
    if (first) {
        upipe_fail(&team->failure, s, "%s", why);
        __atomic_store_n(&team->broken, 1, __ATOMIC_SEQ_CST);
    }
    pthread_mutex_unlock(&team->lock);
    for (r = 0; first && r < team->ranks; ++r) upi_threads_notify(&team->all[r]);
    return first;
}

/* Breaks all communicators of the world. */
UPIPE_API int upi_threads_fail(upipe_comm *comm, upipe_status s, const char *why)
{
    const upipe_threads *world = (const upipe_threads *)upi_comm_world(comm)->impl;
    const upipe_comm *part;
    int r;
    if (!upi_threads_break((upipe_threads *)comm->impl, s, why)) return 0;
    for (r = 0; r < world->ranks; ++r)
        for (part = &world->all[r].comm; part != NULL; part = part->part)
            upi_threads_break((upipe_threads *)part->impl, s, why);
    return 1;
}

/* ---- posts ---- */

/* Row [ranks] of this transfer: how many messages `rank` sends to each. The rows belong to the team: unlike the
 * lists they may be read long after their rank has completed the call. */
UPIPE_API int *upi_threads_sends(const upipe_threads *team, uint64_t call, int rank)
{
    size_t ranks = (size_t)team->ranks;
    return team->counts + ((size_t)(call & 1) * 2 * ranks + (size_t)rank) * ranks;
}

/* Row [ranks] of this transfer: how many messages `rank` receives from each. */
UPIPE_API int *upi_threads_receives(const upipe_threads *team, uint64_t call, int rank)
{
    size_t ranks = (size_t)team->ranks;
    return upi_threads_sends(team, call, rank) + ranks * ranks;
}

UPIPE_API int upi_threads_has_posted(const upi_threads_rank *rank, uint64_t call)
{
    return __atomic_load_n(&rank->posted, __ATOMIC_ACQUIRE) >= call;
}

UPIPE_API int upi_threads_is_done(const upi_threads_rank *rank, uint64_t call)
{
    return __atomic_load_n(&rank->done, __ATOMIC_ACQUIRE) >= call;
}

/* Makes the post of upi_threads_next, which the caller has filled in, visible to all. */
UPIPE_API void upi_threads_publish(upipe_threads *team, upi_threads_rank *me)
{
    int r;
    __atomic_store_n(&me->posted, me->posted + 1, __ATOMIC_RELEASE);
    for (r = 0; r < team->ranks; ++r)
        if (r != me->comm.rank) upi_threads_notify(&team->all[r]);
}

/* The post that this rank's next call is to fill in. */
UPIPE_API upi_threads_post *upi_threads_next(upi_threads_rank *me)
{
    return &me->post[(me->posted + 1) & 1];
}

/* Compares what rank r has posted as this call with what this rank has. */
UPIPE_API upipe_status upi_threads_same(upipe_ctx *c, upipe_comm *comm, uint64_t call, int r)
{
    const upipe_threads *team = (const upipe_threads *)comm->impl;
    const upi_threads_post *mine = &team->all[comm->rank].post[call & 1],
                           *theirs = &team->all[r].post[call & 1];
    return upi_team_same(&c->err, comm, mine->kind, mine->n, r, theirs->kind, theirs->n);
}

/* upi_team_waits of a rank of the world: those that have not come to its calls. */
UPIPE_API int upi_threads_waits(void *user, int rank, char *marks)
{
    const upipe_threads *world = (const upipe_threads *)user;
    const upipe_comm *part;
    int r, waits = 0;
    for (part = &world->all[rank].comm; part != NULL; part = part->part) {
        const upipe_threads *team = (const upipe_threads *)part->impl;
        const uint64_t call = __atomic_load_n(&team->all[part->rank].waits, __ATOMIC_ACQUIRE);
        for (r = 0; call > 0 && r < team->ranks; ++r) {
            char *mark = &marks[upi_comm_called(part, r)];
            if (upi_threads_has_posted(&team->all[r], call)) continue;
            if (*mark == UPI_TEAM_APART) *mark = UPI_TEAM_MISSED;
            waits = 1;
        }
    }
    return waits;
}

/* The deadline of this call has passed: names the ranks that have not come, or else those that have not read.
 * Returns OK if the last of them has just come. */
UPIPE_API upipe_status upi_threads_late(upipe_ctx *c, upipe_comm *comm, uint64_t call)
{
    const upipe_threads *team = (const upipe_threads *)comm->impl;
    const int kind = team->all[comm->rank].post[call & 1].kind;
    const int *sends = upi_threads_sends(team, call, comm->rank);
    char marks[UPIPE_THREADS_MAX] = {0};
    upi_team_names absent, reading = {"", 0, 0, 0};
    int r;
    for (r = 0; r < team->ranks; ++r) {
        const upi_threads_rank *rank = &team->all[r];
        if (!upi_threads_has_posted(rank, call))
            marks[upi_comm_called(comm, r)] = UPI_TEAM_MISSED;
        else if (kind == UPI_TEAM_TRANSFER && sends[r] && !upi_threads_is_done(rank, call))
            upi_team_name(&reading, comm, upi_comm_called(comm, r));
    }
    (void)upi_team_blame(comm, marks, upi_threads_waits, upi_comm_world(comm)->impl, &absent);
    if (absent.count > 0) return upi_team_late_for(&c->err, comm, kind, &absent, "come");
    if (reading.count > 0) return upi_team_late_for(&c->err, comm, kind, &reading, "finish receiving");
    return UPIPE_OK;
}

/* ---- transfers ---- */

UPIPE_API upipe_status upi_threads_start(upipe_ctx *c, upipe_comm *comm, const upipe_msg *list, int n)
{
    upipe_threads *team = (upipe_threads *)comm->impl;
    upi_threads_rank *me = &team->all[comm->rank];
    upi_threads_post *post = upi_threads_next(me);
    int *sends = upi_threads_sends(team, me->posted + 1, comm->rank);
    int *receives = upi_threads_receives(team, me->posted + 1, comm->rank);
    int i;
    upipe_status status;
    UPIPE_TRY(upi_comm_whole(c, comm));
    status = c->ops->sync(c);
    if (status != UPIPE_OK)
        return upipe_comm_fail(&c->err, comm, status, "rank %d before a transfer: %s",
                               upi_comm_called(comm, comm->rank), c->err.text);
    post->kind = UPI_TEAM_TRANSFER;
    post->list = list;
    post->n = n;
    memset(sends, 0, (size_t)team->ranks * sizeof *sends);
    memset(receives, 0, (size_t)team->ranks * sizeof *receives);
    for (i = 0; i < n; ++i) {
        sends[list[i].peer] += list[i].send_bytes != 0;
        receives[list[i].peer] += list[i].recv_bytes != 0;
    }
    upi_threads_publish(team, me);
    return UPIPE_OK;
}

/* Copies what rank `from` sends here in this transfer. The number of messages matches, and this rank is counted
 * in the owner's readers. An owner that has failed (the team is broken) may stop waiting for this rank during
 * a long copy, and use its list and buffers again: so `broken` is read before each access. */
UPIPE_API upipe_status upi_threads_copy(upipe_ctx *c, upipe_comm *comm, uint64_t call, int from)
{
    upipe_threads *team = (upipe_threads *)comm->impl;
    const upi_threads_post *mine = &team->all[comm->rank].post[call & 1],
                           *theirs = &team->all[from].post[call & 1];
    int i = -1, k = -1;
    while ((i = upi_msg_next(mine->list, mine->n, from, UPIPE_MSG_RECV, i + 1)) < mine->n) {
        const upipe_msg *to = &mine->list[i];
        upipe_msg src;
        int64_t block;
        UPIPE_TRY(upi_comm_whole(c, comm));
        k = upi_msg_next(theirs->list, theirs->n, comm->rank, UPIPE_MSG_SEND, k + 1);
        src = theirs->list[k];
        UPIPE_TRY(upi_team_fit_blocks(&c->err, comm, from, src.count, (int64_t)src.send_bytes, comm->rank,
                                      to->count, (int64_t)to->recv_bytes));
        for (block = 0; block < src.count; ++block) {
            upipe_status status;
            UPIPE_TRY(upi_comm_whole(c, comm));
            status = c->ops->copy(c, (char *)to->recv + (size_t)block * to->recv_stride,
                                  (const char *)src.send + (size_t)block * src.send_stride, src.send_bytes);
            if (status != UPIPE_OK) {
                upi_fail_reason(&c->err, status);
                return upipe_comm_fail(&c->err, comm, status, "rank %d copying from rank %d: %s",
                                       upi_comm_called(comm, comm->rank), upi_comm_called(comm, from),
                                       c->err.text);
            }
            if (from != comm->rank) comm->moved_bytes += (int64_t)src.send_bytes;
        }
    }
    return UPIPE_OK;
}

/* Compares the number of messages from rank `from` to rank `to`, as each of them lists it. */
UPIPE_API upipe_status upi_threads_fit(upipe_ctx *c, upipe_comm *comm, uint64_t call, int from, int to)
{
    const upipe_threads *team = (const upipe_threads *)comm->impl;
    return upi_team_fit_count(&c->err, comm, from, upi_threads_sends(team, call, from)[to], to,
                              upi_threads_receives(team, call, to)[from]);
}

/* Rank `from` has come to this transfer: checks it, and copies what it sends here. *reading: this rank is counted
 * in the owner's readers, as the copies may only be enqueued. */
UPIPE_API upipe_status upi_threads_pull(upipe_ctx *c, upipe_comm *comm, uint64_t call, int from, int *reading)
{
    upipe_threads *team = (upipe_threads *)comm->impl;
    UPIPE_TRY(upi_threads_same(c, comm, call, from));
    UPIPE_TRY(upi_threads_fit(c, comm, call, from, comm->rank));
    UPIPE_TRY(upi_threads_fit(c, comm, call, comm->rank, from)); /* else this rank might see nothing wrong */
    if (upi_threads_sends(team, call, from)[comm->rank] == 0) return UPIPE_OK;
    /* Counts first and reads `broken` second; a failing owner breaks first and reads the count second. So one
     * of the two sees the other, and no reader begins unseen. */
    __atomic_fetch_add(&team->all[from].readers, 1, __ATOMIC_SEQ_CST);
    *reading = 1;
    return upi_threads_copy(c, comm, call, from);
}

/* Waits for the copies enqueued so far; the ranks whose buffers they read may continue. */
UPIPE_API upipe_status upi_threads_release(upipe_ctx *c, upipe_comm *comm, const int *reading,
                                           upipe_status status)
{
    upipe_threads *team = (upipe_threads *)comm->impl;
    upipe_err first = c->err;
    upipe_status synced = c->ops->sync(c);
    int k;
    if (status != UPIPE_OK) c->err = first;
    for (k = 0; k < team->ranks; ++k) {
        if (!reading[k]) continue;
        __atomic_fetch_sub(&team->all[k].readers, 1, __ATOMIC_SEQ_CST);
        if (upi_threads_is_broken(team)) upi_threads_notify(&team->all[k]);
    }
    if (status != UPIPE_OK || synced == UPIPE_OK) return status;
    return upipe_comm_fail(&c->err, comm, synced, "rank %d receiving: %s", upi_comm_called(comm, comm->rank),
                           c->err.text);
}

/* Copies from the ranks that have come to this transfer since the last call. *complete: nothing is left. */
UPIPE_API upipe_status upi_threads_progress(upipe_ctx *c, upipe_comm *comm, uint64_t call, int *complete)
{
    upipe_threads *team = (upipe_threads *)comm->impl;
    upi_threads_rank *me = &team->all[comm->rank];
    const int *sends = upi_threads_sends(team, call, comm->rank);
    int reading[UPIPE_THREADS_MAX] = {0}, any = 0;
    upipe_status status = UPIPE_OK;
    int k, missing = 0;
    for (k = 0; k < team->ranks && status == UPIPE_OK; ++k) {
        int from =
            (comm->rank + k) % team->ranks; /* each rank begins with itself, which spreads the sources */
        if (me->pulled[from] == call) continue;
        if (!upi_threads_has_posted(&team->all[from], call)) {
            ++missing;
            continue;
        }
        status = upi_threads_pull(c, comm, call, from, &reading[from]);
        any |= reading[from];
        if (status == UPIPE_OK) me->pulled[from] = call;
    }
    if (any) status = upi_threads_release(c, comm, reading, status);
    UPIPE_TRY(status);
    *complete = 0;
    if (missing > 0) return UPIPE_OK;
    if (!upi_threads_is_done(me, call)) {
        __atomic_store_n(&me->done, call, __ATOMIC_RELEASE);
        for (k = 0; k < team->ranks; ++k)
            if (k != comm->rank && upi_threads_sends(team, call, k)[comm->rank])
                upi_threads_notify(&team->all[k]);
    }
    for (k = 0; k < team->ranks; ++k) missing += sends[k] && !upi_threads_is_done(&team->all[k], call);
    *complete = missing == 0;
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_threads_transfer(upipe_ctx *c, upipe_comm *comm)
{
    upipe_threads *team = (upipe_threads *)comm->impl;
    upi_threads_rank *me = &team->all[comm->rank];
    uint64_t call = me->posted;
    int64_t until = upi_net_until(comm->deadline);
    for (;;) {
        uint64_t seen = __atomic_load_n(&me->events, __ATOMIC_ACQUIRE);
        int complete;
        UPIPE_TRY(upi_threads_progress(c, comm, call, &complete));
        if (complete) return UPIPE_OK;
        UPIPE_TRY(upi_comm_whole(c, comm));
        if (!upi_threads_await(me, seen, until)) UPIPE_TRY(upi_threads_late(c, comm, call));
    }
}

/* A call that waits for other ranks: for those of the world to see. */
UPIPE_API upipe_status upi_threads_finish(upipe_ctx *c, upipe_comm *comm,
                                          upipe_status (*call)(upipe_ctx *c, upipe_comm *comm))
{
    upi_threads_rank *me = &((upipe_threads *)comm->impl)->all[comm->rank];
    upipe_status s;
    __atomic_store_n(&me->waits, me->posted, __ATOMIC_RELEASE);
    s = call(c, comm);
    __atomic_store_n(&me->waits, 0, __ATOMIC_RELEASE);
    return s;
}

/* After a failure: waits until no peer reads this rank's send buffers. None begins to, since the team is
 * broken. Returns 0 if one still reads. */
UPIPE_API int upi_threads_unread(upi_threads_rank *me)
{
    int64_t until = upi_team_grace(&me->comm);
    for (;;) {
        uint64_t seen = __atomic_load_n(&me->events, __ATOMIC_ACQUIRE);
        if (__atomic_load_n(&me->readers, __ATOMIC_SEQ_CST) == 0) return 1;
        if (!upi_threads_await(me, seen, until)) return __atomic_load_n(&me->readers, __ATOMIC_SEQ_CST) == 0;
    }
}

UPIPE_API upipe_status upi_threads_wait(upipe_ctx *c, upipe_comm *comm)
{
    upipe_threads *team = (upipe_threads *)comm->impl;
    upipe_status s = upi_threads_finish(c, comm, upi_threads_transfer);
    if (s != UPIPE_OK && !upi_threads_unread(&team->all[comm->rank])) comm->quarantine = 1;
    return s;
}

/* ---- barrier, all-gather ---- */

/* Waits until every rank has come to the call that this one has published. Once all have
 * come the call succeeds, even if the team is broken meanwhile: a rank that reads an all-gather first, and
 * aborts because of what it finds, must not keep the others from finding it. */
UPIPE_API upipe_status upi_threads_meet(upipe_ctx *c, upipe_comm *comm)
{
    upipe_threads *team = (upipe_threads *)comm->impl;
    upi_threads_rank *me = &team->all[comm->rank];
    int64_t until = upi_net_until(comm->deadline);
    uint64_t call = me->posted;
    for (;;) {
        uint64_t seen = __atomic_load_n(&me->events, __ATOMIC_ACQUIRE);
        int r, missing = 0;
        for (r = 0; r < team->ranks; ++r) {
            if (!upi_threads_has_posted(&team->all[r], call))
                ++missing;
            else
                UPIPE_TRY(upi_threads_same(c, comm, call, r));
        }
        if (missing == 0) return UPIPE_OK;
        UPIPE_TRY(upi_comm_whole(c, comm));
        if (!upi_threads_await(me, seen, until)) UPIPE_TRY(upi_threads_late(c, comm, call));
    }
}

UPIPE_API upipe_status upi_threads_barrier(upipe_ctx *c, upipe_comm *comm)
{
    upipe_threads *team = (upipe_threads *)comm->impl;
    UPIPE_TRY(upi_comm_whole(c, comm));
    upi_threads_next(&team->all[comm->rank])->kind = UPI_TEAM_BARRIER;
    upi_threads_publish(team, &team->all[comm->rank]);
    return upi_threads_finish(c, comm, upi_threads_meet);
}

UPIPE_API upipe_status upi_threads_all_gather(upipe_ctx *c, upipe_comm *comm, int64_t *all,
                                              const int64_t *mine, int n)
{
    upipe_threads *team = (upipe_threads *)comm->impl;
    upi_threads_rank *me = &team->all[comm->rank];
    upi_threads_post *post = upi_threads_next(me);
    int r;
    UPIPE_TRY(upi_comm_whole(c, comm));
    post->kind = UPI_TEAM_ALL_GATHER;
    post->n = n;
    memcpy(post->values, mine, (size_t)n * sizeof *mine);
    upi_threads_publish(team, me);
    UPIPE_TRY(upi_threads_finish(c, comm, upi_threads_meet));
    for (r = 0; r < team->ranks; ++r)
        memcpy(all + (size_t)r * (size_t)n, team->all[r].post[me->posted & 1].values,
               (size_t)n * sizeof *all);
    return UPIPE_OK;
}

/* ---- the team ---- */

/* upipe_threads_free -- releases everything that init allocated; legal after a failure and a failed init too
 *   order  no rank is inside a call, and none makes another one
 */
UPIPE_API void upipe_threads_free(upipe_threads *team)
{
    int r;
    if (team == NULL || team->all == NULL) return;
    for (r = 0; r < team->ranks; ++r) {
        upi_comm_leave(&team->all[r].comm);
        pthread_cond_destroy(&team->all[r].wake);
        pthread_mutex_destroy(&team->all[r].lock);
    }
    pthread_mutex_destroy(&team->lock);
    free(team->all);
    memset(team, 0, sizeof *team);
}

UPIPE_API int upi_threads_init_wake(pthread_cond_t *wake)
{
    int error = 0;
#ifdef __APPLE__
    error = pthread_cond_init(wake, NULL); /* sleeps are relative there */
#else
    pthread_condattr_t how;
    error = pthread_condattr_init(&how);
    if (error) return error;
    error = pthread_condattr_setclock(&how, CLOCK_MONOTONIC);
    if (!error) error = pthread_cond_init(wake, &how);
    pthread_condattr_destroy(&how);
#endif
    return error;
}

UPIPE_API int upi_threads_init_rank(upi_threads_rank *rank)
{
    int error = pthread_mutex_init(&rank->lock, NULL);
    if (error) return error;
    error = upi_threads_init_wake(&rank->wake);
    if (error) pthread_mutex_destroy(&rank->lock);
    return error;
}

/* upipe_threads_init -- makes a team of `ranks` ranks
 *   deadline_s  seconds that one call may wait for its peers; 0 = UPIPE_DEADLINE_DEFAULT. Each call reads
 *               comm->deadline, which each rank may change
 *   bytes       one allocation: ranks^2 * (2 * sizeof(upipe_msg) + 8 * UPIPE_ALL_GATHER_MAX + 24), and
 *               sizeof(upi_threads_rank), about 1.5 KB, a rank
 *   errors      ARG, MEMORY, BACKEND (the error number of a pthread call); then there is nothing to free
 */
UPIPE_API upipe_status upipe_threads_init(upipe_threads *team, int ranks, double deadline_s, upipe_err *e)
{
    size_t n = (size_t)ranks, square = n * n;
    size_t msgs = 2 * square * sizeof(upipe_msg), gathered = square * UPIPE_ALL_GATHER_MAX * sizeof(int64_t);
    static const upipe_comm_ops ops = {"threads",
                                       upi_threads_start,
                                       upi_threads_wait,
                                       upi_threads_barrier,
                                       upi_threads_all_gather,
                                       upi_threads_failure,
                                       upi_threads_fail,
                                       NULL,
                                       NULL};
    size_t pulled = square * sizeof(uint64_t), counts = 4 * square * sizeof(int);
    char *buf;
    int r, error;
    memset(team, 0, sizeof *team);
    if (ranks < 1 || ranks > UPIPE_THREADS_MAX)
        return upipe_fail(e, UPIPE_ERR_ARG, "a team of %d ranks; 1 to %d", ranks, UPIPE_THREADS_MAX);
    UPIPE_TRY(upi_team_deadline(e, deadline_s));
    buf = (char *)calloc(1, n * sizeof *team->all + msgs + gathered + pulled + counts);
    if (buf == NULL) return upipe_fail(e, UPIPE_ERR_MEMORY, "no memory for a team of %d ranks", ranks);
    team->all = (upi_threads_rank *)(void *)buf;
    buf += n * sizeof *team->all;
    error = pthread_mutex_init(&team->lock, NULL);
    if (error) {
        free(team->all);
        memset(team, 0, sizeof *team);
        return upipe_fail(e, UPIPE_ERR_BACKEND, "error %d making a lock", error);
    }
    for (r = 0; r < ranks; ++r) {
        upi_threads_rank *rank = &team->all[r];
        upipe_comm *comm = &rank->comm;
        error = upi_threads_init_rank(rank);
        if (error) {
            upipe_threads_free(team);
            return upipe_fail(e, UPIPE_ERR_BACKEND, "error %d making the locks of rank %d", error, r);
        }
        team->ranks = r + 1; /* what upipe_threads_free has to destroy */
        rank->pulled = (uint64_t *)(void *)(buf + msgs + gathered) + (size_t)r * n;
        upi_team_init(comm, &ops, team, deadline_s);
        comm->list = (upipe_msg *)(void *)buf + 2 * (size_t)r * n;
        comm->gathered = (int64_t *)(void *)(buf + msgs) + (size_t)r * n * UPIPE_ALL_GATHER_MAX;
        comm->rank = r;
        comm->ranks = ranks;
    }
    team->counts = (int *)(void *)(buf + msgs + gathered + pulled);
    return UPIPE_OK;
}

/* upipe_threads_comm -- the communicator of a rank, which the team owns. One thread at a time may use it; any
 *                       thread may call upipe_comm_abort */
UPIPE_API upipe_comm *upipe_threads_comm(upipe_threads *team, int rank)
{
    assert(rank >= 0 && rank < team->ranks);
    return &team->all[rank].comm;
}

UPIPE_API void *upi_threads_main(void *p)
{
    upi_threads_rank *rank = (upi_threads_rank *)p;
    rank->status = rank->body(rank->user, rank->comm.rank);
    if (rank->status != UPIPE_OK) {
        char why[64];
        snprintf(why, sizeof why, "rank %d failed: %s", rank->comm.rank, upipe_status_name(rank->status));
        upipe_comm_abort(&rank->comm, why);
    }
    return NULL;
}

/* upipe_threads_run -- calls body(user, rank) for every rank, each on a new thread, and joins the threads
 *   body      one that does not return UPIPE_OK breaks the team; the others then leave their calls at once
 *   statuses  [ranks] what each body returned; NULL = not wanted
 *   e         NULL, or where the sentence of the first failure goes: that of the call that broke the team, or what
 *             the body itself gave to upipe_comm_abort
 *   errors    the first rank's status that is neither OK nor ABORTED; else ABORTED, if any; BACKEND for ranks
 *             whose thread could not be started (calls of the other ranks return the sentence)
 */
UPIPE_API upipe_status upipe_threads_run(upipe_threads *team, upipe_status (*body)(void *user, int rank),
                                         void *user, upipe_status *statuses, upipe_err *e)
{
    upipe_status worst = UPIPE_OK;
    int r, started = 0, error = 0;
    while (started < team->ranks && !error) {
        upi_threads_rank *rank = &team->all[started];
        rank->body = body;
        rank->user = user;
        error = pthread_create(&rank->thread, NULL, upi_threads_main, rank);
        if (!error) ++started;
    }
    if (error) {
        char why[128];
        snprintf(why, sizeof why, "the thread of rank %d did not start: %s", started, strerror(error));
        upipe_comm_abort(&team->all[0].comm, why);
        for (r = started; r < team->ranks; ++r) team->all[r].status = UPIPE_ERR_BACKEND;
    }
    for (r = 0; r < started; ++r) pthread_join(team->all[r].thread, NULL);
    for (r = 0; r < team->ranks; ++r) {
        upipe_status s = team->all[r].status;
        if (worst == UPIPE_OK || (worst == UPIPE_ERR_ABORTED && s != UPIPE_OK)) worst = s;
        if (statuses != NULL) statuses[r] = s;
    }
    return worst == UPIPE_OK ? worst : upipe_fail(e, worst, "%s", team->failure.text);
}

#endif

/* upipe_net_threads.h -- a team of ranks that are threads of one process   backend, includes base, ops, comm
 *
 *     upipe_status body(void *user, int rank)      one rank: its own upipe_ctx with ctx.ops and
 *     { ... }                                      ctx.team = upipe_threads_comm(team, rank)
 *
 *     upipe_threads team;
 *     upipe_status s = upipe_threads_init(&team, 4, 0, &err);
 *     if (s == UPIPE_OK) s = upipe_threads_run(&team, body, user, NULL);
 *     upipe_threads_free(&team);
 *
 * A host with threads of its own leaves upipe_threads_run out: each thread uses the communicator of its rank,
 * and one that gives up calls upipe_comm_abort, so that the others do not sit out the deadline.
 *
 * How bytes move: start publishes the address of the list, wait pulls every block from the peer's memory with
 * ctx->ops->copy. Nothing is packed or staged, and nobody but the rank itself writes into its buffers. Where
 * entries of the table only enqueue (a device), each rank may have a stream of its own: it syncs before it
 * publishes a list, so that its send buffers are complete, and syncs again behind the copies it has pulled,
 * before it calls them done. So the host waits for the device once before an exchange, and once behind the
 * copies from each group of peers that have come together. Ranks on one device take turns there: a deadline
 * must exceed the time that all of them need for what lies between two exchanges.
 *
 * Every rank makes the same sequence of calls (exchange, barrier, gather). An exchange is complete on a rank
 * when all ranks have started it, all its blocks have arrived, and all that it sends has been read.
 *
 * Failures. The first one breaks the team: its sentence is every rank's reason from then on, and all sleepers
 * are woken. The rank that finds it returns its status: TIMEOUT, MISMATCH or the copy entry's own. The others
 * return ABORTED, except that each rank returns a MISMATCH once, at its next call if it had already completed
 * an exchange in which others disagree. A rank that gives up between start and wait calls upipe_comm_abort,
 * then upipe_comm_wait, which does not return while a peer reads its send buffers, for at most the deadline
 * or a second, whichever is less; after that comm->quarantine is set. Afterwards only upipe_threads_free is
 * legal, once no rank is inside a call.
 *
 * Strict ISO C hides the clock: include this file first, or define _POSIX_C_SOURCE=200809L (on macOS
 * _DARWIN_C_SOURCE too).
 */
#ifndef UPIPE_NET_THREADS_H
#define UPIPE_NET_THREADS_H

#include "upipe_net_clock.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <time.h>

#include "../upipe_base.h"
#include "../upipe_comm.h"
#include "../upipe_ops.h"

enum {
    UPIPE_THREADS_MAX = 256, /* ranks of one team */
    UPI_THREADS_YIELDS = 50, /* before a wait sleeps: best, or near it, with fewer cores than ranks too */
    UPI_THREADS_APART = 128  /* bytes between words that different ranks write, against false sharing */
};

typedef enum upi_threads_kind {
    UPI_THREADS_TRANSFER,
    UPI_THREADS_BARRIER,
    UPI_THREADS_GATHER
} upi_threads_kind;

/* What a rank publishes with one call. */
typedef struct upi_threads_post {
    const upipe_msg *list; /* [n], the rank's own memory: others read it while counted in its readers alone */
    int n;                 /* segments of an exchange, numbers of a gather */
    upi_threads_kind kind;
    int64_t values[UPIPE_ALL_GATHER_MAX];
} upi_threads_post;

typedef struct upi_threads_rank {
    /* Written by the rank, read by all. Call number s lies in post[s & 1]: a rank overwrites it at call
     * s + 2, when it has completed s + 1, so that every rank has come to s + 1 and is done with s. */
    uint64_t posted; /* atomic: number of the last call published */
    uint64_t done;   /* atomic: number of the last exchange whose blocks have all arrived here */
    upi_threads_post post[2];
    char apart_0[UPI_THREADS_APART];
    /* Written by the other ranks. */
    uint64_t news; /* atomic: counts the changes elsewhere that this rank may be waiting for */
    int readers;   /* atomic: peers that may be reading this rank's list and send buffers now */
    int asleep;    /* atomic: the rank sleeps on wake, or is about to */
    pthread_mutex_t lock;
    pthread_cond_t wake;
    char apart_1[UPI_THREADS_APART];
    /* The rank's own. */
    upipe_comm comm;
    uint64_t *fetched; /* [ranks]: number of the last exchange in which all from this peer has arrived */
    int told;          /* this rank has returned the team's failure before */
    /* upipe_threads_run's */
    pthread_t thread;
    struct upipe_threads *team;
    upipe_status (*body)(void *user, int rank);
    void *user;
    upipe_status status;
    char apart_2[UPI_THREADS_APART];
} upi_threads_rank;

/* A team. Plain, the host's; must not move between init and free. */
typedef struct upipe_threads {
    upi_threads_rank *all; /* [ranks], and behind it the rest of the one allocation */
    int *counts;           /* [2][2][ranks][ranks], see upi_threads_sends and upi_threads_receives */
    pthread_mutex_t lock;  /* makes one failure the first */
    upipe_err reason;      /* constant once broken */
    int broken;            /* atomic */
    int ranks;
} upipe_threads;

/* ---- waiting: each rank sleeps on a count of news of its own ---- */

/* Tells a rank to look again. What it is to find must be stored before. The count and `asleep` are in one
 * total order with upi_threads_await's: either the sleeper sees the new count, or this sees the sleeper. */
UPIPE_API void upi_threads_ring(upi_threads_rank *rank)
{
    __atomic_fetch_add(&rank->news, 1, __ATOMIC_SEQ_CST);
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

/* Returns 1 when the count of news is no longer `seen`, 0 when the instant `until` (ns) has passed before. */
UPIPE_API int upi_threads_await(upi_threads_rank *me, uint64_t seen, int64_t until)
{
    int i, news;
    for (i = 0; i < UPI_THREADS_YIELDS; ++i) {
        if (__atomic_load_n(&me->news, __ATOMIC_ACQUIRE) != seen) return 1;
        sched_yield();
    }
    pthread_mutex_lock(&me->lock);
    __atomic_store_n(&me->asleep, 1, __ATOMIC_SEQ_CST);
    while (!(news = __atomic_load_n(&me->news, __ATOMIC_SEQ_CST) != seen) && upipe_net_now() < until)
        upi_threads_sleep(me, until);
    __atomic_store_n(&me->asleep, 0, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&me->lock);
    return news;
}

/* ---- failure ---- */

UPIPE_API int upi_threads_is_broken(const upipe_threads *team)
{
    return __atomic_load_n(&team->broken, __ATOMIC_SEQ_CST);
}

/* Breaks the team, if it is whole: then returns 1, and this is the reason for ever. */
UPIPE_API int upi_threads_break(upipe_threads *team, upipe_status s, const char *why)
{
    int first, r;
    pthread_mutex_lock(&team->lock);
    first = !team->broken;
    if (first) {
        upipe_fail(&team->reason, s, "%s", why);
        __atomic_store_n(&team->broken, 1, __ATOMIC_SEQ_CST);
    }
    pthread_mutex_unlock(&team->lock);
    for (r = 0; first && r < team->ranks; ++r) upi_threads_ring(&team->all[r]);
    return first;
}

/* Returns a broken team's failure on one rank; own = its status, if this rank found it, else UPIPE_OK. */
UPIPE_API upipe_status upi_threads_tell(upipe_ctx *c, upipe_comm *comm, upipe_status own)
{
    upipe_threads *team = (upipe_threads *)comm->impl;
    upi_threads_rank *me = &team->all[comm->rank];
    upipe_status s = UPIPE_ERR_ABORTED;
    if (own != UPIPE_OK)
        s = own;
    else if (!me->told && team->reason.status == UPIPE_ERR_MISMATCH)
        s = UPIPE_ERR_MISMATCH;
    me->told = 1;
    return upipe_fail(&c->err, s, "%s", team->reason.text);
}

/* Breaks the team with this sentence, unless another failure was first; returns what the rank must return. */
__attribute__((unused, format(printf, 4, 5))) static inline upipe_status upi_threads_fail(
    upipe_ctx *c, upipe_comm *comm, upipe_status s, const char *format, ...)
{
    upipe_err e;
    va_list args;
    va_start(args, format);
    vsnprintf(e.text, sizeof e.text, format, args);
    va_end(args);
    return upi_threads_tell(c, comm,
                            upi_threads_break((upipe_threads *)comm->impl, s, e.text) ? s : UPIPE_OK);
}

UPIPE_API void upi_threads_abort(upipe_comm *comm, const char *why)
{
    upi_threads_break((upipe_threads *)comm->impl, UPIPE_ERR_ABORTED,
                      why != NULL ? why : "aborted by the host");
}

/* ---- posts ---- */

UPIPE_API const char *upi_threads_kind_name(upi_threads_kind kind)
{
    return kind == UPI_THREADS_TRANSFER  ? "an transfer"
           : kind == UPI_THREADS_BARRIER ? "a barrier"
                                         : "a gather";
}

/* Row [ranks] of the exchange with number s: how many segments `rank` lists that it sends to each. The rows
 * are the team's: unlike the lists they may be read long after their rank has completed the call. */
UPIPE_API int *upi_threads_sends(const upipe_threads *team, uint64_t s, int rank)
{
    size_t ranks = (size_t)team->ranks;
    return team->counts + ((size_t)(s & 1) * 2 * ranks + (size_t)rank) * ranks;
}

/* ... and how many it receives from each. */
UPIPE_API int *upi_threads_receives(const upipe_threads *team, uint64_t s, int rank)
{
    size_t ranks = (size_t)team->ranks;
    return upi_threads_sends(team, s, rank) + ranks * ranks;
}

UPIPE_API int upi_threads_has_posted(const upi_threads_rank *rank, uint64_t s)
{
    return __atomic_load_n(&rank->posted, __ATOMIC_ACQUIRE) >= s;
}

UPIPE_API int upi_threads_is_done(const upi_threads_rank *rank, uint64_t s)
{
    return __atomic_load_n(&rank->done, __ATOMIC_ACQUIRE) >= s;
}

/* Makes the post of upi_threads_next, which the caller has filled in, visible to all. Returns its number. */
UPIPE_API uint64_t upi_threads_publish(upipe_threads *team, upi_threads_rank *me)
{
    uint64_t s = me->posted + 1;
    int r;
    __atomic_store_n(&me->posted, s, __ATOMIC_RELEASE);
    for (r = 0; r < team->ranks; ++r)
        if (r != me->comm.rank) upi_threads_ring(&team->all[r]);
    return s;
}

/* The post that this rank's next call is to fill in. */
UPIPE_API upi_threads_post *upi_threads_next(upi_threads_rank *me)
{
    return &me->post[(me->posted + 1) & 1];
}

/* Compares what rank r has posted as call s with what this rank has. */
UPIPE_API upipe_status upi_threads_same(upipe_ctx *c, upipe_comm *comm, uint64_t s, int r)
{
    const upipe_threads *team = (const upipe_threads *)comm->impl;
    const upi_threads_post *mine = &team->all[comm->rank].post[s & 1], *theirs = &team->all[r].post[s & 1];
    if (mine->kind != theirs->kind)
        return upi_threads_fail(c, comm, UPIPE_ERR_MISMATCH, "rank %d is in %s and rank %d in %s", comm->rank,
                                upi_threads_kind_name(mine->kind), r, upi_threads_kind_name(theirs->kind));
    if (mine->kind == UPI_THREADS_GATHER && mine->n != theirs->n)
        return upi_threads_fail(c, comm, UPIPE_ERR_MISMATCH,
                                "rank %d gathers %d numbers and rank %d gathers %d", comm->rank, mine->n, r,
                                theirs->n);
    return UPIPE_OK;
}

/* The deadline of call s has passed: names those waited for. Returns OK if the last of them came just now. */
UPIPE_API upipe_status upi_threads_late(upipe_ctx *c, upipe_comm *comm, uint64_t s)
{
    const upipe_threads *team = (const upipe_threads *)comm->impl;
    const upi_threads_post *mine = &team->all[comm->rank].post[s & 1];
    const int *sends = upi_threads_sends(team, s, comm->rank);
    char names[96];
    int reading, r, count = 0, at = 0; /* first those who have not come, then those who have not read */
    for (reading = 0; reading < 2; ++reading) {
        for (r = 0; r < team->ranks; ++r) {
            if (!reading && upi_threads_has_posted(&team->all[r], s)) continue;
            if (reading &&
                (mine->kind != UPI_THREADS_TRANSFER || !sends[r] || upi_threads_is_done(&team->all[r], s)))
                continue;
            if (++count <= 8)
                at += snprintf(names + at, sizeof names - (size_t)at, count > 1 ? ", %d" : "%d", r);
        }
        if (count > 0) break;
    }
    if (count == 0) return UPIPE_OK;
    if (count > 8) snprintf(names + at, sizeof names - (size_t)at, " and %d more", count - 8);
    return upi_threads_fail(c, comm, UPIPE_ERR_TIMEOUT, "rank %d waited %g s in %s for rank%s %s to %s",
                            comm->rank, comm->deadline, upi_threads_kind_name(mine->kind),
                            count > 1 ? "s" : "", names, reading ? "finish receiving" : "come");
}

/* ---- exchange ---- */

UPIPE_API upipe_status upi_threads_start(upipe_ctx *c, upipe_comm *comm, const upipe_msg *list, int n)
{
    upipe_threads *team = (upipe_threads *)comm->impl;
    upi_threads_rank *me = &team->all[comm->rank];
    upi_threads_post *post = upi_threads_next(me);
    int *sends = upi_threads_sends(team, me->posted + 1, comm->rank);
    int *receives = upi_threads_receives(team, me->posted + 1, comm->rank);
    int i;
    upipe_status status;
    if (upi_threads_is_broken(team)) return upi_threads_tell(c, comm, UPIPE_OK);
    status = c->ops->sync(c);
    if (status != UPIPE_OK)
        return upi_threads_fail(c, comm, status, "rank %d before an transfer: %s", comm->rank, c->err.text);
    post->kind = UPI_THREADS_TRANSFER;
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

/* Fetches the segments that rank `from` sends here in call s; their number fits, and this rank is counted in
 * the owner's readers. An owner that has given up (the team is broken) may stop waiting for this rank in the
 * middle of a long copy, and take its list and buffers back: so look before each touch. */
UPIPE_API upipe_status upi_threads_copy(upipe_ctx *c, upipe_comm *comm, uint64_t s, int from)
{
    upipe_threads *team = (upipe_threads *)comm->impl;
    const upi_threads_post *mine = &team->all[comm->rank].post[s & 1], *theirs = &team->all[from].post[s & 1];
    int i, at = 0;
    for (i = 0; i < mine->n; ++i) {
        const upipe_msg *to = &mine->list[i];
        upipe_msg src;
        int64_t block;
        if (to->peer != from || to->recv_bytes == 0) continue;
        if (upi_threads_is_broken(team)) return upi_threads_tell(c, comm, UPIPE_OK);
        while (theirs->list[at].peer != comm->rank || theirs->list[at].send_bytes == 0) ++at;
        src = theirs->list[at++];
        if (src.send_bytes != to->recv_bytes || src.count != to->count)
            return upi_threads_fail(
                c, comm, UPIPE_ERR_MISMATCH,
                "rank %d sends %lld blocks of %zu bytes to rank %d, which receives %lld of %zu", from,
                (long long)src.count, src.send_bytes, comm->rank, (long long)to->count, to->recv_bytes);
        for (block = 0; block < src.count; ++block) {
            upipe_status status;
            if (upi_threads_is_broken(team)) return upi_threads_tell(c, comm, UPIPE_OK);
            status = c->ops->copy(c, (char *)to->recv + (size_t)block * to->recv_step,
                                  (const char *)src.send + (size_t)block * src.send_step, src.send_bytes);
            if (status != UPIPE_OK) {
                upipe_fail_reason(&c->err, status);
                return upi_threads_fail(c, comm, status, "rank %d copying from rank %d: %s", comm->rank, from,
                                        c->err.text);
            }
            if (from != comm->rank) comm->moved_bytes += (int64_t)src.send_bytes;
        }
    }
    return UPIPE_OK;
}

/* Compares the number of segments from rank `from` to rank `to`, as each of them lists it. */
UPIPE_API upipe_status upi_threads_fit(upipe_ctx *c, upipe_comm *comm, uint64_t s, int from, int to)
{
    const upipe_threads *team = (const upipe_threads *)comm->impl;
    int sends = upi_threads_sends(team, s, from)[to], receives = upi_threads_receives(team, s, to)[from];
    if (sends == receives) return UPIPE_OK;
    return upi_threads_fail(c, comm, UPIPE_ERR_MISMATCH,
                            "rank %d sends %d segments to rank %d, which receives %d", from, sends, to,
                            receives);
}

/* Rank `from` has come to call s: checks it, and fetches what it sends here. *held: this rank is counted in
 * the owner's readers, as the copies may only be enqueued. */
UPIPE_API upipe_status upi_threads_fetch(upipe_ctx *c, upipe_comm *comm, uint64_t s, int from, int *held)
{
    upipe_threads *team = (upipe_threads *)comm->impl;
    UPIPE_TRY(upi_threads_same(c, comm, s, from));
    UPIPE_TRY(upi_threads_fit(c, comm, s, from, comm->rank));
    UPIPE_TRY(upi_threads_fit(c, comm, s, comm->rank, from)); /* else this rank might see nothing wrong */
    if (upi_threads_sends(team, s, from)[comm->rank] == 0) return UPIPE_OK;
    /* Count first, look at `broken` second; a failing owner breaks first and looks at the count second. So
     * one of the two sees the other, and nobody starts to read behind the owner's back. */
    __atomic_fetch_add(&team->all[from].readers, 1, __ATOMIC_SEQ_CST);
    *held = 1;
    return upi_threads_copy(c, comm, s, from);
}

/* The copies enqueued so far have arrived; those whose buffers they read may go on. */
UPIPE_API upipe_status upi_threads_release(upipe_ctx *c, upipe_comm *comm, const int *held,
                                           upipe_status status)
{
    upipe_threads *team = (upipe_threads *)comm->impl;
    upipe_err first = c->err;
    upipe_status synced = c->ops->sync(c);
    int k;
    if (status != UPIPE_OK) c->err = first;
    for (k = 0; k < team->ranks; ++k) {
        if (!held[k]) continue;
        __atomic_fetch_sub(&team->all[k].readers, 1, __ATOMIC_SEQ_CST);
        if (upi_threads_is_broken(team)) upi_threads_ring(&team->all[k]);
    }
    if (status != UPIPE_OK || synced == UPIPE_OK) return status;
    return upi_threads_fail(c, comm, synced, "rank %d receiving: %s", comm->rank, c->err.text);
}

/* One look at the team in call s: fetches from those who came since the last. *complete: nothing is left. */
UPIPE_API upipe_status upi_threads_look(upipe_ctx *c, upipe_comm *comm, uint64_t s, int *complete)
{
    upipe_threads *team = (upipe_threads *)comm->impl;
    upi_threads_rank *me = &team->all[comm->rank];
    const int *sends = upi_threads_sends(team, s, comm->rank);
    int held[UPIPE_THREADS_MAX] = {0}, any = 0;
    upipe_status status = UPIPE_OK;
    int k, missing = 0;
    for (k = 0; k < team->ranks && status == UPIPE_OK; ++k) {
        int from = (comm->rank + k) % team->ranks; /* each rank begins with itself: the sources are spread */
        if (me->fetched[from] == s) continue;
        if (!upi_threads_has_posted(&team->all[from], s)) {
            ++missing;
            continue;
        }
        status = upi_threads_fetch(c, comm, s, from, &held[from]);
        any |= held[from];
        if (status == UPIPE_OK) me->fetched[from] = s;
    }
    if (any) status = upi_threads_release(c, comm, held, status);
    UPIPE_TRY(status);
    *complete = 0;
    if (missing > 0) return UPIPE_OK;
    if (!upi_threads_is_done(me, s)) {
        __atomic_store_n(&me->done, s, __ATOMIC_RELEASE);
        for (k = 0; k < team->ranks; ++k)
            if (k != comm->rank && upi_threads_sends(team, s, k)[comm->rank]) upi_threads_ring(&team->all[k]);
    }
    for (k = 0; k < team->ranks; ++k) missing += sends[k] && !upi_threads_is_done(&team->all[k], s);
    *complete = missing == 0;
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_threads_finish(upipe_ctx *c, upipe_comm *comm)
{
    upipe_threads *team = (upipe_threads *)comm->impl;
    upi_threads_rank *me = &team->all[comm->rank];
    uint64_t s = me->posted;
    int64_t until = upi_net_until(comm->deadline);
    for (;;) {
        uint64_t seen = __atomic_load_n(&me->news, __ATOMIC_ACQUIRE);
        int complete;
        UPIPE_TRY(upi_threads_look(c, comm, s, &complete));
        if (complete) return UPIPE_OK;
        if (upi_threads_is_broken(team)) return upi_threads_tell(c, comm, UPIPE_OK);
        if (!upi_threads_await(me, seen, until)) UPIPE_TRY(upi_threads_late(c, comm, s));
    }
}

/* After a failure: waits until no peer reads this rank's send buffers, for `seconds` or one second at most.
 * Nobody begins to any more, since the team is broken. Returns 0 if one is still at it. */
UPIPE_API int upi_threads_vacated(upi_threads_rank *me, double seconds)
{
    int64_t until = upi_net_until(seconds < 1 ? seconds : 1);
    for (;;) {
        uint64_t seen = __atomic_load_n(&me->news, __ATOMIC_ACQUIRE);
        if (__atomic_load_n(&me->readers, __ATOMIC_SEQ_CST) == 0) return 1;
        if (!upi_threads_await(me, seen, until)) return __atomic_load_n(&me->readers, __ATOMIC_SEQ_CST) == 0;
    }
}

UPIPE_API upipe_status upi_threads_wait(upipe_ctx *c, upipe_comm *comm)
{
    upipe_threads *team = (upipe_threads *)comm->impl;
    upipe_status s = upi_threads_finish(c, comm);
    if (s != UPIPE_OK && !upi_threads_vacated(&team->all[comm->rank], comm->deadline)) comm->quarantine = 1;
    return s;
}

/* ---- barrier, gather ---- */

/* Publishes the post of upi_threads_next and waits until every rank has come to the same call. Once all have
 * come the call succeeds, even if the team broke meanwhile: else a rank that reads a gather first, and aborts
 * over what it finds, would keep the others from finding it. */
UPIPE_API upipe_status upi_threads_meet(upipe_ctx *c, upipe_comm *comm)
{
    upipe_threads *team = (upipe_threads *)comm->impl;
    upi_threads_rank *me = &team->all[comm->rank];
    int64_t until = upi_net_until(comm->deadline);
    uint64_t s = upi_threads_publish(team, me);
    for (;;) {
        uint64_t seen = __atomic_load_n(&me->news, __ATOMIC_ACQUIRE);
        int r, missing = 0;
        for (r = 0; r < team->ranks; ++r) {
            if (!upi_threads_has_posted(&team->all[r], s))
                ++missing;
            else
                UPIPE_TRY(upi_threads_same(c, comm, s, r));
        }
        if (missing == 0) return UPIPE_OK;
        if (upi_threads_is_broken(team)) return upi_threads_tell(c, comm, UPIPE_OK);
        if (!upi_threads_await(me, seen, until)) UPIPE_TRY(upi_threads_late(c, comm, s));
    }
}

UPIPE_API upipe_status upi_threads_barrier(upipe_ctx *c, upipe_comm *comm)
{
    upipe_threads *team = (upipe_threads *)comm->impl;
    if (upi_threads_is_broken(team)) return upi_threads_tell(c, comm, UPIPE_OK);
    upi_threads_next(&team->all[comm->rank])->kind = UPI_THREADS_BARRIER;
    return upi_threads_meet(c, comm);
}

UPIPE_API upipe_status upi_threads_gather(upipe_ctx *c, upipe_comm *comm, int64_t *all, const int64_t *mine,
                                          int n)
{
    upipe_threads *team = (upipe_threads *)comm->impl;
    upi_threads_rank *me = &team->all[comm->rank];
    upi_threads_post *post = upi_threads_next(me);
    int r;
    if (n < 0 || n > UPIPE_ALL_GATHER_MAX)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "%d numbers to gather, at most %d", n, UPIPE_ALL_GATHER_MAX);
    if (upi_threads_is_broken(team)) return upi_threads_tell(c, comm, UPIPE_OK);
    post->kind = UPI_THREADS_GATHER;
    post->n = n;
    memcpy(post->values, mine, (size_t)n * sizeof *mine);
    UPIPE_TRY(upi_threads_meet(c, comm));
    for (r = 0; r < team->ranks; ++r)
        memcpy(all + (size_t)r * (size_t)n, team->all[r].post[me->posted & 1].values,
               (size_t)n * sizeof *all);
    return UPIPE_OK;
}

/* ---- the team ---- */

/* upipe_threads_free -- releases everything that init took; after success, failure or a failed init alike
 *   order  no rank is inside a call, and none makes one any more
 */
UPIPE_API void upipe_threads_free(upipe_threads *team)
{
    int r;
    if (team == NULL || team->all == NULL) return;
    for (r = 0; r < team->ranks; ++r) {
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

/* upipe_threads_init -- a team of `ranks` ranks
 *   deadline_s  seconds that one call may wait for its peers; 0 = UPIPE_DEADLINE_DEFAULT. Each rank may
 *               change its comm->deadline later; it is read at each call
 *   bytes       one allocation: ranks^2 * (2 * sizeof(upipe_msg) + 8 * UPIPE_ALL_GATHER_MAX + 24), and
 *               sizeof(upi_threads_rank), about 1.5 KB, a rank
 *   errors      ARG, MEMORY, BACKEND (a pthread call's own error); there is then nothing to free
 */
UPIPE_API upipe_status upipe_threads_init(upipe_threads *team, int ranks, double deadline_s, upipe_err *e)
{
    size_t n = (size_t)ranks, square = n * n;
    size_t msgs = 2 * square * sizeof(upipe_msg), gathered = square * UPIPE_ALL_GATHER_MAX * sizeof(int64_t);
    size_t fetched = square * sizeof(uint64_t), counts = 4 * square * sizeof(int);
    char *buf;
    int r, error;
    memset(team, 0, sizeof *team);
    if (ranks < 1 || ranks > UPIPE_THREADS_MAX)
        return upipe_fail(e, UPIPE_ERR_ARG, "a team of %d ranks; 1 to %d", ranks, UPIPE_THREADS_MAX);
    if (!(deadline_s >= 0)) return upipe_fail(e, UPIPE_ERR_ARG, "a deadline of %g s", deadline_s);
    buf = (char *)calloc(1, n * sizeof *team->all + msgs + gathered + fetched + counts);
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
        rank->team = team;
        rank->fetched = (uint64_t *)(void *)(buf + msgs + gathered) + (size_t)r * n;
        comm->ops.name = "threads";
        comm->ops.start = upi_threads_start;
        comm->ops.wait = upi_threads_wait;
        comm->ops.barrier = upi_threads_barrier;
        comm->ops.gather = upi_threads_gather;
        comm->ops.abort = upi_threads_abort;
        comm->impl = team;
        comm->list = (upipe_msg *)(void *)buf + 2 * (size_t)r * n;
        comm->gathered = (int64_t *)(void *)(buf + msgs) + (size_t)r * n * UPIPE_ALL_GATHER_MAX;
        comm->deadline = deadline_s > 0 ? deadline_s : UPIPE_DEADLINE_DEFAULT;
        comm->rank = r;
        comm->ranks = ranks;
    }
    team->counts = (int *)(void *)(buf + msgs + gathered + fetched);
    return UPIPE_OK;
}

/* upipe_threads_comm -- a rank's communicator, owned by the team: for one thread at a time, but for abort */
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
        snprintf(why, sizeof why, "rank %d aborted: %s", rank->comm.rank, upipe_status_name(rank->status));
        upi_threads_break(rank->team, UPIPE_ERR_ABORTED, why);
    }
    return NULL;
}

/* upipe_threads_run -- calls body(user, rank) for every rank, each on a thread of its own, and joins them
 *   body      one that does not return UPIPE_OK breaks the team; the others then leave their calls at once
 *   statuses  [ranks] what each body returned; NULL = not wanted
 *   errors    the first rank's status that is neither OK nor ABORTED; else ABORTED, if any; BACKEND for ranks
 *             whose thread could not be started (the reason is in what the other ranks' calls return)
 */
UPIPE_API upipe_status upipe_threads_run(upipe_threads *team, upipe_status (*body)(void *user, int rank),
                                         void *user, upipe_status *statuses)
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
        char why[64];
        snprintf(why, sizeof why, "error %d starting the thread of rank %d", error, started);
        upi_threads_break(team, UPIPE_ERR_ABORTED, why);
        for (r = started; r < team->ranks; ++r) team->all[r].status = UPIPE_ERR_BACKEND;
    }
    for (r = 0; r < started; ++r) pthread_join(team->all[r].thread, NULL);
    for (r = 0; r < team->ranks; ++r) {
        upipe_status s = team->all[r].status;
        if (worst == UPIPE_OK || (worst == UPIPE_ERR_ABORTED && s != UPIPE_OK)) worst = s;
        if (statuses != NULL) statuses[r] = s;
    }
    return worst;
}

#endif

/* upipe_net_nccl.h -- a team of ranks with a GPU each, over NCCL        backend, includes base, ops, comm
 *
 *     ncclCommInitRankConfig(&nccl, ranks, id, rank, &config);     the host's; config.blocking = 0, see below
 *     upipe_nccl team;
 *     upipe_status s = upipe_nccl_init(&team, nccl, 0, &err);      on the communicator's device
 *     ctx.team = &team.comm;                                       ctx.stream: where everything is enqueued
 *     ...
 *     upipe_nccl_free(&team, &err);
 *     if (team.nccl != NULL) ncclCommDestroy(nccl);                NULL: a failure has freed it already
 *
 * How bytes move. An exchange is one group of ncclSend and ncclRecv on ctx->stream, one pair a block, or one
 * ncclAlltoAll where the list is an all-to-all of equal parts that lie one behind the other in both buffers.
 * Blocks are never merged: NCCL matches messages by size, and the peer's blocks may have gaps where these
 * have none. What a rank sends itself is a copy of the compute table. A gather, and a barrier, is an
 * ncclAllGather of 288 bytes a rank through memory that init has taken. wait returns when the exchange is
 * complete on the device, not before: so a failure has one place.
 *
 * Every rank makes the same sequence of calls, from one thread at a time, abort included. NCCL does not
 * compare what ranks ask for: lists that do not fit, or different calls, end in TIMEOUT at best. A gather
 * tells: it carries the number and kind of the call, and gives MISMATCH on all ranks.
 *
 * The deadline counts from the moment that the stream comes to the exchange: work that was enqueued ahead of
 * it is this rank's own. In a blocking communicator NCCL itself waits for peers without a deadline, when two
 * ranks first meet: where a peer may be missing from the start, make it non-blocking.
 *
 * Failures. TIMEOUT: no rank is named, as NCCL does not tell who is missing. ABORTED: a rank has given up, or
 * NCCL reports a remote error. BACKEND: NCCL's text, or the CUDA runtime's. The communicator is then freed
 * with ncclCommAbort, which ends what is under way on this rank; every later call returns ABORTED. Other ranks
 * are not told by NCCL: each one's own deadline, or an asynchronous error, ends its call, and it aborts too.
 * comm->quarantine is set by a failed exchange: peers that have not aborted yet may touch its buffers.
 * ncclCommAbort itself may wait for work of the device: a call that fails may return that much later than its
 * deadline.
 */
#ifndef UPIPE_NET_NCCL_H
#define UPIPE_NET_NCCL_H

#include "upipe_net_clock.h"

#include <cuda_runtime_api.h>
#include <nccl.h>
#include <stdlib.h>

#include "../upipe_base.h"
#include "../upipe_comm.h"
#include "../upipe_ops.h"

enum {
    UPI_NCCL_YIELDS = 2000, /* fruitless looks before a waiting rank naps */
    UPI_NCCL_NAP = 20000,   /* ns */
    UPI_NCCL_HEAD = 4,      /* numbers before those of a gather: mark, call, kind, n */
    UPI_NCCL_ROW = UPI_NCCL_HEAD + UPIPE_GATHER_MAX
};

#define UPI_NCCL_MARK INT64_C(0x316c63636e697075) /* "upinccl1" in memory, low byte first */

typedef enum upi_nccl_kind { UPI_NCCL_EXCHANGE = 1, UPI_NCCL_BARRIER, UPI_NCCL_GATHER } upi_nccl_kind;

/* A rank's end of a team. Plain, the host's; must not move between init and free. */
typedef struct upipe_nccl {
    upipe_comm comm;
    ncclComm_t nccl; /* the host's; NULL once a failure has freed it */
    /* Never ncclAlltoAll, set right after init and on all ranks alike: for a host whose own lists are laid out
     * without gaps on one rank and with gaps on another. */
    int grouped;
    /* the rest is the transport's */
    int64_t call;          /* calls begun */
    upi_nccl_kind kind;    /* of the call under way */
    const upipe_seg *list; /* [n], of an exchange */
    int n;
    int pending;   /* NCCL has not yet enqueued it all: what comes behind it is not enqueued either */
    int64_t *row;  /* device: [1 + ranks][UPI_NCCL_ROW], own and all */
    int64_t *rows; /* pinned: the same */
    cudaEvent_t reached, done; /* on ctx->stream, before and behind the call */
    upipe_err reason;          /* constant once broken */
    int broken;
    void *room;
} upipe_nccl;

/* ---- failure ---- */

/* NCCL's own text behind the call's name. `what` is the call as written; nccl may be NULL. */
UPIPE_API upipe_status upi_nccl_check(upipe_err *e, ncclComm_t nccl, ncclResult_t r, const char *what)
{
    const char *more;
    if (r == ncclSuccess) return UPIPE_OK;
    more = ncclGetLastError(nccl);
    return upi_fail(e, r == ncclRemoteError ? UPIPE_ERR_ABORTED : UPIPE_ERR_BACKEND, "%.*s: %s%s%s",
                    (int)strcspn(what, "("), what, ncclGetErrorString(r),
                    more != NULL && more[0] != 0 ? "; " : "", more != NULL ? more : "");
}

/* The CUDA runtime's own text behind the call's name. */
UPIPE_API upipe_status upi_nccl_check_cuda(upipe_err *e, cudaError_t r, const char *what)
{
    if (r == cudaSuccess) return UPIPE_OK;
    (void)cudaGetLastError(); /* what can be forgotten is: the next call must not report it again */
    return upi_fail(e, r == cudaErrorMemoryAllocation ? UPIPE_ERR_MEMORY : UPIPE_ERR_BACKEND, "%.*s: %s (%s)",
                    (int)strcspn(what, "("), what, cudaGetErrorString(r), cudaGetErrorName(r));
}

/* Breaks this rank's end, if it is whole: this is the reason for ever, and NCCL's work under way is ended. */
UPIPE_API void upi_nccl_break(upipe_nccl *m, upipe_status s, const char *why)
{
    if (m->broken) return;
    m->broken = 1;
    upi_fail(&m->reason, s, "%s", why);
    if (m->nccl != NULL) (void)ncclCommAbort(m->nccl); /* frees it whatever it returns */
    m->nccl = NULL;
}

UPIPE_API upipe_status upi_nccl_tell(upipe_ctx *c, const upipe_nccl *m)
{
    return upi_fail(&c->err, UPIPE_ERR_ABORTED, "%s", m->reason.text);
}

/* Breaks the team with this sentence; returns s. */
__attribute__((unused, format(printf, 4, 5))) static inline upipe_status upi_nccl_fail(
    upipe_ctx *c, upipe_nccl *m, upipe_status s, const char *format, ...)
{
    upipe_err e;
    va_list args;
    if (m->broken) return upi_nccl_tell(c, m);
    va_start(args, format);
    vsnprintf(e.text, sizeof e.text, format, args);
    va_end(args);
    upi_nccl_break(m, s, e.text);
    return upi_fail(&c->err, s, "%s", m->reason.text);
}

UPIPE_API upipe_status upi_nccl_checked(upipe_ctx *c, upipe_nccl *m, ncclResult_t r, const char *what)
{
    upipe_err e;
    upipe_status s = upi_nccl_check(&e, m->nccl, r, what);
    if (s == UPIPE_OK) return s;
    return upi_nccl_fail(c, m, s, "rank %d: %s", m->comm.rank, e.text);
}

UPIPE_API upipe_status upi_nccl_checked_cuda(upipe_ctx *c, upipe_nccl *m, cudaError_t r, const char *what)
{
    upipe_err e;
    upipe_status s = upi_nccl_check_cuda(&e, r, what);
    if (s == UPIPE_OK) return s;
    return upi_nccl_fail(c, m, s, "rank %d: %s", m->comm.rank, e.text);
}

#define UPI_NCCL(c, m, call)      UPIPE_TRY(upi_nccl_checked((c), (m), (call), #call))
#define UPI_NCCL_CUDA(c, m, call) UPIPE_TRY(upi_nccl_checked_cuda((c), (m), (call), #call))

UPIPE_API void upi_nccl_abort(upipe_comm *comm, const char *why)
{
    upi_nccl_break((upipe_nccl *)comm->impl, UPIPE_ERR_ABORTED, why != NULL ? why : "aborted by the host");
}

/* ---- a call, from its first operation to its end ---- */

UPIPE_API const char *upi_nccl_kind_name(int64_t kind)
{
    return kind == UPI_NCCL_EXCHANGE  ? "an exchange"
           : kind == UPI_NCCL_BARRIER ? "a barrier"
           : kind == UPI_NCCL_GATHER  ? "a gather"
                                      : "an unknown call";
}

/* The communicator's state: UPIPE_OK, with *busy where NCCL is not through with what it was given. */
UPIPE_API upipe_status upi_nccl_state(upipe_ctx *c, upipe_nccl *m, int *busy)
{
    ncclResult_t state = ncclSuccess;
    UPI_NCCL(c, m, ncclCommGetAsyncError(m->nccl, &state));
    *busy = state == ncclInProgress;
    return *busy ? UPIPE_OK : upi_nccl_checked(c, m, state, upi_nccl_kind_name(m->kind));
}

UPIPE_API upipe_status upi_nccl_ready(upipe_ctx *c, upipe_nccl *m)
{
    int busy;
    if (m->broken) return upi_nccl_tell(c, m);
    return upi_nccl_state(c, m, &busy);
}

UPIPE_API upipe_status upi_nccl_begin(upipe_ctx *c, upipe_nccl *m, upi_nccl_kind kind)
{
    ++m->call;
    m->kind = kind;
    m->pending = 0;
    UPI_NCCL_CUDA(c, m, cudaEventRecord(m->reached, (cudaStream_t)c->stream));
    return UPIPE_OK;
}

/* NCCL has enqueued the call: what comes behind it. */
UPIPE_API upipe_status upi_nccl_close(upipe_ctx *c, upipe_nccl *m)
{
    size_t bytes = (size_t)m->comm.ranks * UPI_NCCL_ROW * sizeof *m->row;
    cudaStream_t stream = (cudaStream_t)c->stream;
    if (m->kind != UPI_NCCL_EXCHANGE)
        UPI_NCCL_CUDA(c, m,
                      cudaMemcpyAsync(m->rows + UPI_NCCL_ROW, m->row + UPI_NCCL_ROW, bytes,
                                      cudaMemcpyDeviceToHost, stream));
    UPI_NCCL_CUDA(c, m, cudaEventRecord(m->done, stream));
    m->pending = 0;
    return UPIPE_OK;
}

/* What the last of a call's NCCL functions returned; a non-blocking communicator may be at it still. */
UPIPE_API upipe_status upi_nccl_enqueued(upipe_ctx *c, upipe_nccl *m, ncclResult_t r, const char *what)
{
    if (r == ncclInProgress) {
        m->pending = 1;
        return UPIPE_OK;
    }
    UPIPE_TRY(upi_nccl_checked(c, m, r, what));
    return upi_nccl_close(c, m);
}

/* Is the event past? */
UPIPE_API upipe_status upi_nccl_passed(upipe_ctx *c, upipe_nccl *m, cudaEvent_t event, int *yes)
{
    cudaError_t r = cudaEventQuery(event);
    *yes = r == cudaSuccess;
    if (r != cudaErrorNotReady) return upi_nccl_checked_cuda(c, m, r, "cudaEventQuery(");
    (void)cudaGetLastError(); /* not an error, though some runtimes remember it as one */
    return UPIPE_OK;
}

/* Waits until the call is complete on the device. */
UPIPE_API upipe_status upi_nccl_finish(upipe_ctx *c, upipe_nccl *m)
{
    int64_t until = 0;
    int idle = 0, reached = 0;
    for (;;) {
        int busy, passed = 0, late = reached && upi_net_now() >= until;
        UPIPE_TRY(upi_nccl_state(c, m, &busy));
        if (m->pending && !busy) UPIPE_TRY(upi_nccl_close(c, m));
        if (!m->pending) UPIPE_TRY(upi_nccl_passed(c, m, m->done, &passed));
        if (passed) return UPIPE_OK;
        if (late)
            return upi_nccl_fail(c, m, UPIPE_ERR_TIMEOUT, "rank %d waited %g s in %s for other ranks",
                                 m->comm.rank, m->comm.deadline, upi_nccl_kind_name(m->kind));
        if (!reached) {
            UPIPE_TRY(upi_nccl_passed(c, m, m->reached, &reached));
            if (reached) until = upi_net_until(m->comm.deadline);
        }
        upi_net_rest(&idle, UPI_NCCL_YIELDS, UPI_NCCL_NAP);
    }
}

/* ---- exchange ---- */

/* All parts the same, one behind the other in rank order, on both sides? *part: bytes for one rank. */
UPIPE_API int upi_nccl_is_all_to_all(const upipe_nccl *m, const upipe_seg *list, int n, size_t *part)
{
    int p;
    if (m->grouped || n != m->comm.ranks || list[0].send_bytes == 0) return 0;
    *part = list[0].send_bytes * (size_t)list[0].count;
    for (p = 0; p < n; ++p) {
        const upipe_seg *s = &list[p];
        if (s->peer != p || s->send_bytes != list[0].send_bytes || s->recv_bytes != s->send_bytes ||
            s->count != list[0].count)
            return 0;
        if (s->count > 1 && (s->send_step != s->send_bytes || s->recv_step != s->recv_bytes)) return 0;
        if ((const char *)s->send != (const char *)list[0].send + (size_t)p * *part ||
            (const char *)s->recv != (const char *)list[0].recv + (size_t)p * *part)
            return 0;
    }
    return 1;
}

/* What a rank sends to itself. */
UPIPE_API upipe_status upi_nccl_copy_own(upipe_ctx *c, upipe_nccl *m, const upipe_seg *list, int n)
{
    int rank = m->comm.rank, from = 0, to = 0;
    for (;; ++from, ++to) {
        int64_t i;
        while (from < n && (list[from].peer != rank || list[from].send_bytes == 0)) ++from;
        while (to < n && (list[to].peer != rank || list[to].recv_bytes == 0)) ++to;
        if (from == n && to == n) return UPIPE_OK;
        if (from == n || to == n || list[from].send_bytes != list[to].recv_bytes ||
            list[from].count != list[to].count)
            return upi_nccl_fail(c, m, UPIPE_ERR_MISMATCH,
                                 "rank %d sends itself blocks that it does not receive", rank);
        for (i = 0; i < list[from].count; ++i) {
            upipe_status s = c->ops->copy(c, (char *)list[to].recv + (size_t)i * list[to].recv_step,
                                          (const char *)list[from].send + (size_t)i * list[from].send_step,
                                          list[from].send_bytes);
            if (s != UPIPE_OK) return upi_nccl_fail(c, m, s, "rank %d copying: %s", rank, c->err.text);
        }
    }
}

/* Inside a group: its sends and receives. Returns the first that fails. */
UPIPE_API ncclResult_t upi_nccl_list(upipe_ctx *c, const upipe_nccl *m, const upipe_seg *list, int n,
                                     const char **what)
{
    cudaStream_t stream = (cudaStream_t)c->stream;
    int i;
    for (i = 0; i < n; ++i) {
        const upipe_seg *s = &list[i];
        int64_t b;
        if (s->peer == m->comm.rank) continue;
        for (b = 0; b < s->count; ++b) {
            ncclResult_t r = ncclSuccess;
            *what = "ncclSend(";
            if (s->send_bytes > 0)
                r = ncclSend((const char *)s->send + (size_t)b * s->send_step, s->send_bytes, ncclInt8,
                             s->peer, m->nccl, stream);
            if (r != ncclSuccess && r != ncclInProgress) return r;
            *what = "ncclRecv(";
            if (s->recv_bytes > 0)
                r = ncclRecv((char *)s->recv + (size_t)b * s->recv_step, s->recv_bytes, ncclInt8, s->peer,
                             m->nccl, stream);
            if (r != ncclSuccess && r != ncclInProgress) return r;
        }
    }
    return ncclSuccess;
}

UPIPE_API upipe_status upi_nccl_post(upipe_ctx *c, upipe_nccl *m, const upipe_seg *list, int n)
{
    const char *what = "";
    ncclResult_t inside, end;
    int i, others = 0;
    UPIPE_TRY(upi_nccl_begin(c, m, UPI_NCCL_EXCHANGE));
#if NCCL_VERSION_CODE >= 22800
    {
        size_t part;
        if (m->comm.ranks > 1 && upi_nccl_is_all_to_all(m, list, n, &part))
            return upi_nccl_enqueued(
                c, m,
                ncclAlltoAll(list[0].send, list[0].recv, part, ncclInt8, m->nccl, (cudaStream_t)c->stream),
                "ncclAlltoAll(");
    }
#endif
    UPIPE_TRY(upi_nccl_copy_own(c, m, list, n));
    for (i = 0; i < n; ++i)
        others += list[i].peer != m->comm.rank && (list[i].send_bytes > 0 || list[i].recv_bytes > 0);
    if (others == 0) return upi_nccl_close(c, m);
    UPI_NCCL(c, m, ncclGroupStart());
    inside = upi_nccl_list(c, m, list, n, &what);
    end = ncclGroupEnd(); /* the thread's group must be closed even so */
    UPIPE_TRY(upi_nccl_checked(c, m, inside, what));
    return upi_nccl_enqueued(c, m, end, "ncclGroupEnd(");
}

UPIPE_API upipe_status upi_nccl_start(upipe_ctx *c, upipe_comm *comm, const upipe_seg *list, int n)
{
    upipe_nccl *m = (upipe_nccl *)comm->impl;
    upipe_status s;
    UPIPE_TRY(upi_nccl_ready(c, m));
    m->list = list;
    m->n = n;
    s = upi_nccl_post(c, m, list, n);
    if (s != UPIPE_OK) comm->quarantine = 1; /* some of it may be under way */
    return s;
}

UPIPE_API upipe_status upi_nccl_wait(upipe_ctx *c, upipe_comm *comm)
{
    upipe_nccl *m = (upipe_nccl *)comm->impl;
    upipe_status s = m->broken ? upi_nccl_tell(c, m) : upi_nccl_finish(c, m);
    int i;
    if (s != UPIPE_OK) {
        comm->quarantine = 1;
        return s;
    }
    for (i = 0; i < m->n; ++i)
        if (m->list[i].peer != comm->rank)
            comm->moved_bytes += (int64_t)m->list[i].recv_bytes * m->list[i].count;
    return UPIPE_OK;
}

/* ---- barrier, gather ---- */

/* Every rank's row comes to every rank: m->rows + (1 + r) * UPI_NCCL_ROW. */
UPIPE_API upipe_status upi_nccl_meet(upipe_ctx *c, upipe_nccl *m, upi_nccl_kind kind, const int64_t *values,
                                     int n)
{
    cudaStream_t stream = (cudaStream_t)c->stream;
    int r;
    UPIPE_TRY(upi_nccl_ready(c, m));
    UPIPE_TRY(upi_nccl_begin(c, m, kind));
    memset(m->rows, 0, UPI_NCCL_ROW * sizeof *m->rows);
    m->rows[0] = UPI_NCCL_MARK;
    m->rows[1] = m->call;
    m->rows[2] = kind;
    m->rows[3] = n;
    if (n > 0) memcpy(m->rows + UPI_NCCL_HEAD, values, (size_t)n * sizeof *values);
    UPI_NCCL_CUDA(
        c, m,
        cudaMemcpyAsync(m->row, m->rows, UPI_NCCL_ROW * sizeof *m->row, cudaMemcpyHostToDevice, stream));
    UPIPE_TRY(upi_nccl_enqueued(
        c, m, ncclAllGather(m->row, m->row + UPI_NCCL_ROW, UPI_NCCL_ROW, ncclInt64, m->nccl, stream),
        "ncclAllGather("));
    UPIPE_TRY(upi_nccl_finish(c, m));
    for (r = 0; r < m->comm.ranks; ++r) {
        const int64_t *theirs = m->rows + (size_t)(1 + r) * UPI_NCCL_ROW;
        if (theirs[0] != UPI_NCCL_MARK)
            return upi_nccl_fail(c, m, UPIPE_ERR_MISMATCH, "rank %d gathers something else than rank %d", r,
                                 m->comm.rank);
        if (theirs[2] != kind)
            return upi_nccl_fail(c, m, UPIPE_ERR_MISMATCH, "rank %d is in %s and rank %d in %s", m->comm.rank,
                                 upi_nccl_kind_name(kind), r, upi_nccl_kind_name(theirs[2]));
        if (theirs[3] != n)
            return upi_nccl_fail(c, m, UPIPE_ERR_MISMATCH,
                                 "rank %d gathers %d numbers and rank %d gathers %lld", m->comm.rank, n, r,
                                 (long long)theirs[3]);
        if (theirs[1] != m->call)
            return upi_nccl_fail(c, m, UPIPE_ERR_MISMATCH,
                                 "rank %d is in its call %lld and rank %d in its %lld", m->comm.rank,
                                 (long long)m->call, r, (long long)theirs[1]);
    }
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_nccl_barrier(upipe_ctx *c, upipe_comm *comm)
{
    return upi_nccl_meet(c, (upipe_nccl *)comm->impl, UPI_NCCL_BARRIER, NULL, 0);
}

UPIPE_API upipe_status upi_nccl_gather(upipe_ctx *c, upipe_comm *comm, int64_t *all, const int64_t *mine,
                                       int n)
{
    upipe_nccl *m = (upipe_nccl *)comm->impl;
    int r;
    if (n < 0 || n > UPIPE_GATHER_MAX)
        return upi_fail(&c->err, UPIPE_ERR_ARG, "%d numbers to gather, at most %d", n, UPIPE_GATHER_MAX);
    UPIPE_TRY(upi_nccl_meet(c, m, UPI_NCCL_GATHER, mine, n));
    for (r = 0; r < comm->ranks; ++r)
        memcpy(all + (size_t)r * (size_t)n, m->rows + (size_t)(1 + r) * UPI_NCCL_ROW + UPI_NCCL_HEAD,
               (size_t)n * sizeof *all);
    return UPIPE_OK;
}

/* ---- the team ---- */

UPIPE_API upipe_status upi_nccl_first(upipe_status s, upipe_status t)
{
    return s != UPIPE_OK ? s : t;
}

/* upipe_nccl_free -- releases what init took; after success, failure or a failed init alike
 *   order   no call is under way, and the team's device is the current one. Waits for the device. m->nccl
 *           keeps its value: the host destroys its communicator unless that is NULL
 *   errors  BACKEND: the runtime's text; everything that can be released is
 */
UPIPE_API upipe_status upipe_nccl_free(upipe_nccl *m, upipe_err *e)
{
    upipe_status s = UPIPE_OK;
    ncclComm_t nccl;
    if (m == NULL) return s;
    nccl = m->nccl;
    if (m->row != NULL) s = upi_nccl_first(s, upi_nccl_check_cuda(e, cudaFree(m->row), "cudaFree("));
    if (m->rows != NULL)
        s = upi_nccl_first(s, upi_nccl_check_cuda(e, cudaFreeHost(m->rows), "cudaFreeHost("));
    if (m->reached != NULL)
        s = upi_nccl_first(s, upi_nccl_check_cuda(e, cudaEventDestroy(m->reached), "cudaEventDestroy("));
    if (m->done != NULL)
        s = upi_nccl_first(s, upi_nccl_check_cuda(e, cudaEventDestroy(m->done), "cudaEventDestroy("));
    free(m->room);
    memset(m, 0, sizeof *m);
    m->nccl = nccl;
    return s;
}

/* A communicator that is made without blocking is waited for, until the deadline. */
UPIPE_API upipe_status upi_nccl_made(ncclComm_t nccl, double deadline_s, upipe_err *e)
{
    int64_t until = upi_net_until(deadline_s);
    int idle = 0;
    for (;;) {
        ncclResult_t state = ncclSuccess;
        UPIPE_TRY(upi_nccl_check(e, nccl, ncclCommGetAsyncError(nccl, &state), "ncclCommGetAsyncError("));
        if (state != ncclInProgress) return upi_nccl_check(e, nccl, state, "the communicator(");
        if (upi_net_now() >= until)
            return upi_fail(e, UPIPE_ERR_TIMEOUT,
                            "NCCL has not made the communicator in %g s: ranks are missing", deadline_s);
        upi_net_rest(&idle, UPI_NCCL_YIELDS, UPI_NCCL_NAP);
    }
}

UPIPE_API upipe_status upi_nccl_take(upipe_nccl *m, upipe_err *e)
{
    size_t ranks = (size_t)m->comm.ranks, segs = 2 * ranks * sizeof(upipe_seg);
    size_t bytes = (1 + ranks) * UPI_NCCL_ROW * sizeof *m->row;
    void *device = NULL, *pinned = NULL;
    m->room = calloc(1, segs + ranks * UPIPE_GATHER_MAX * sizeof(int64_t));
    if (m->room == NULL) return upi_fail(e, UPIPE_ERR_MEMORY, "no memory for a team of %zu ranks", ranks);
    m->comm.list = (upipe_seg *)m->room;
    m->comm.gathered = (int64_t *)(void *)((char *)m->room + segs);
    UPIPE_TRY(upi_nccl_check_cuda(e, cudaMalloc(&device, bytes), "cudaMalloc("));
    m->row = (int64_t *)device;
    UPIPE_TRY(upi_nccl_check_cuda(e, cudaHostAlloc(&pinned, bytes, cudaHostAllocDefault), "cudaHostAlloc("));
    m->rows = (int64_t *)pinned;
    UPIPE_TRY(upi_nccl_check_cuda(e, cudaEventCreateWithFlags(&m->reached, cudaEventDisableTiming),
                                  "cudaEventCreateWithFlags("));
    return upi_nccl_check_cuda(e, cudaEventCreateWithFlags(&m->done, cudaEventDisableTiming),
                               "cudaEventCreateWithFlags(");
}

/* upipe_nccl_init -- this rank's end of a team of all ranks of an NCCL communicator
 *   nccl        the host's; its device is the current one. Waits for a non-blocking one to be made
 *   deadline_s  seconds that one call may wait for its peers; 0 = UPIPE_DEADLINE_DEFAULT. Each rank may change
 *               comm.deadline later; it is read at each call
 *   bytes       288 * (1 + ranks) on the device and as many pinned, 384 * ranks of ordinary memory
 *   errors      ARG, TIMEOUT, ABORTED, MEMORY, BACKEND (NCCL's or the runtime's text). There is then nothing to
 *               free here, and the communicator is the host's to end: ncclCommAbort, not ncclCommDestroy
 */
UPIPE_API upipe_status upipe_nccl_init(upipe_nccl *m, ncclComm_t nccl, double deadline_s, upipe_err *e)
{
    int device = -1, current = -1;
    upipe_status s;
    memset(m, 0, sizeof *m);
    if (!(deadline_s >= 0)) return upi_fail(e, UPIPE_ERR_ARG, "a deadline of %g s", deadline_s);
    if (nccl == NULL) return upi_fail(e, UPIPE_ERR_ARG, "a team without a communicator");
    if (!(deadline_s > 0)) deadline_s = UPIPE_DEADLINE_DEFAULT;
    UPIPE_TRY(upi_nccl_made(nccl, deadline_s, e));
    UPIPE_TRY(upi_nccl_check(e, nccl, ncclCommCount(nccl, &m->comm.ranks), "ncclCommCount("));
    UPIPE_TRY(upi_nccl_check(e, nccl, ncclCommUserRank(nccl, &m->comm.rank), "ncclCommUserRank("));
    UPIPE_TRY(upi_nccl_check(e, nccl, ncclCommCuDevice(nccl, &device), "ncclCommCuDevice("));
    UPIPE_TRY(upi_nccl_check_cuda(e, cudaGetDevice(&current), "cudaGetDevice("));
    if (device != current)
        return upi_fail(e, UPIPE_ERR_ARG, "the communicator is on device %d, and device %d is current",
                        device, current);
    s = upi_nccl_take(m, e);
    if (s != UPIPE_OK) {
        upipe_nccl_free(m, NULL);
        return s;
    }
    m->nccl = nccl;
    m->comm.ops.name = "nccl";
    m->comm.ops.start = upi_nccl_start;
    m->comm.ops.wait = upi_nccl_wait;
    m->comm.ops.barrier = upi_nccl_barrier;
    m->comm.ops.gather = upi_nccl_gather;
    m->comm.ops.abort = upi_nccl_abort;
    m->comm.impl = m;
    m->comm.deadline = deadline_s;
    return UPIPE_OK;
}

#endif

/* upipe_net_nccl_stream.h -- what upipe_net_nccl.h has on its streams
 *
 * A rank's end of a team, and its operations: each is enqueued between two events, so that the host can ask how
 * far the stream has come. The deadline of an operation counts from the moment when the host sees that the
 * stream has reached it. Operations of all teams of a rank are looked at together, because one that waits for a
 * peer holds up the streams behind it.
 */
#ifndef UPIPE_NET_NCCL_STREAM_H
#define UPIPE_NET_NCCL_STREAM_H

#include "upipe_net_team.h"

#include <cuda_runtime_api.h>
#include <nccl.h>

enum {
    UPIPE_NCCL_AHEAD = 32,  /* operations of a team in flight; with more the host waits for the oldest */
    UPI_NCCL_YIELDS = 2000, /* fruitless tests before a waiting rank sleeps */
    UPI_NCCL_LOOKS = 16,    /* tests of NCCL's enqueuing between two looks at the stream */
    UPI_NCCL_NAP = 20000,   /* ns */
    UPI_NCCL_HEAD = 4,      /* numbers before those of an all-gather: mark, call, kind, n */
    UPI_NCCL_ROW = UPI_NCCL_HEAD + UPIPE_ALL_GATHER_MAX,
    UPI_NCCL_SYNC = UPI_TEAM_KINDS /* upipe_nccl_sync */
};

/* One operation of a stream. */
typedef struct upi_nccl_op {
    cudaEvent_t reached, done; /* before and behind it */
    cudaStream_t stream;
    int64_t until; /* its deadline; 0: the stream has not been seen to reach it */
    int kind;      /* UPI_TEAM_..., UPI_NCCL_SYNC */
} upi_nccl_op;

/* A rank's end of a team. The host's; must not move between init and free. */
typedef struct upipe_nccl {
    upipe_comm comm;
    ncclComm_t nccl; /* the host's; NULL once a failure has freed it */
    /* Never ncclAlltoAll, set right after init and on all ranks alike: for a host whose own lists have gaps
     * on one rank and none on another. */
    int grouped;
    int ahead; /* wait orders ctx->stream, and the host runs ahead: 1 after init; 0: wait waits */
    /* the rest belongs to the transport */
    struct upipe_nccl *next; /* the teams of this rank, in a circle */
    int64_t call;            /* calls begun */
    int kind;                /* of the current call */
    const upipe_msg *list;   /* [n], of a transfer */
    int n;
    upi_nccl_op op[UPIPE_NCCL_AHEAD]; /* number i at i % UPIPE_NCCL_AHEAD */
    int64_t begun, ended;             /* operations ended .. begun - 1 are in flight */
    int64_t issued;                   /* the newest one's place among those of all teams of this rank */
    int pending;   /* NCCL has not yet enqueued all of the newest, so nothing behind it is enqueued either */
    int rows_come; /* the newest ends with the rows of all ranks */
    cudaStream_t stream; /* of the call: ctx->stream */
    int captured;        /* it is captured: there is nothing to wait for */
    int64_t *row;        /* device: [1 + ranks][UPI_NCCL_ROW], own and all */
    int64_t *rows;       /* pinned: the same */
    upipe_err failure;   /* the first one, constant once broken */
    int broken;
    void *buf;
} upipe_nccl;

/* ---- failure ---- */

/* NCCL's own text behind the call's name. `what` is the call as written; nccl may be NULL. */
UPIPE_API upipe_status upipe_nccl_check(upipe_err *e, ncclComm_t nccl, ncclResult_t r, const char *what)
{
    const char *more;
    if (r == ncclSuccess) return UPIPE_OK;
    more = ncclGetLastError(nccl);
    return upipe_fail(e, r == ncclRemoteError ? UPIPE_ERR_ABORTED : UPIPE_ERR_BACKEND, "%.*s: %s%s%s",
                      (int)strcspn(what, "("), what, ncclGetErrorString(r),
                      more != NULL && more[0] != 0 ? "; " : "", more != NULL ? more : "");
}

/* The CUDA runtime's own text behind the call's name. */
UPIPE_API upipe_status upipe_nccl_check_cuda(upipe_err *e, cudaError_t r, const char *what)
{
    if (r == cudaSuccess) return UPIPE_OK;
    (void)cudaGetLastError(); /* clears the error: the next call must not report it again */
    return upipe_fail(e, r == cudaErrorMemoryAllocation ? UPIPE_ERR_MEMORY : UPIPE_ERR_BACKEND,
                      "%.*s: %s (%s)", (int)strcspn(what, "("), what, cudaGetErrorString(r),
                      cudaGetErrorName(r));
}

UPIPE_API const upipe_err *upi_nccl_failure(const upipe_comm *comm)
{
    const upipe_nccl *m = (const upipe_nccl *)comm->impl;
    return m->broken ? &m->failure : NULL;
}

UPIPE_API upi_nccl_op *upi_nccl_op_at(upipe_nccl *m, int64_t i)
{
    return &m->op[i % UPIPE_NCCL_AHEAD];
}

/* Whether peers may still access buffers of this team: a transfer is in flight. */
UPIPE_API int upi_nccl_exposed(upipe_nccl *m)
{
    int64_t i;
    int kind, yes = 0;
    for (i = m->ended; i < m->begun; ++i) {
        kind = upi_nccl_op_at(m, i)->kind;
        if (kind != UPI_TEAM_TRANSFER && kind != UPI_NCCL_SYNC) continue;
        if (m->pending || cudaEventQuery(upi_nccl_op_at(m, i)->done) != cudaSuccess) yes = 1;
    }
    (void)cudaGetLastError();
    return yes;
}

/* Breaks all teams of this rank. Their communicators are freed, so that no stream waits for a peer any more. */
UPIPE_API int upi_nccl_fail(upipe_comm *comm, upipe_status s, const char *why)
{
    upipe_nccl *m = (upipe_nccl *)comm->impl, *t = m;
    int exposed = 0;
    if (m->broken) return 0;
    do exposed |= upi_nccl_exposed(t);
    while ((t = t->next) != m);
    do {
        t->comm.quarantine |= exposed;
        t->begun = t->ended;
        t->pending = 0;
        if (t->broken) continue;
        t->broken = 1;
        upipe_fail(&t->failure, s, "%s", why);
        if (t->nccl != NULL) (void)ncclCommAbort(t->nccl); /* frees it whatever it returns */
        t->nccl = NULL;
    } while ((t = t->next) != m);
    return 1;
}

UPIPE_API upipe_status upi_nccl_checked(upipe_ctx *c, upipe_nccl *m, ncclResult_t r, const char *what)
{
    upipe_err e;
    upipe_status s = upipe_nccl_check(&e, m->nccl, r, what);
    if (s == UPIPE_OK) return s;
    return upipe_comm_fail(&c->err, &m->comm, s, "rank %d: %s", upi_comm_called(&m->comm, m->comm.rank),
                           e.text);
}

UPIPE_API upipe_status upi_nccl_checked_cuda(upipe_ctx *c, upipe_nccl *m, cudaError_t r, const char *what)
{
    upipe_err e;
    upipe_status s = upipe_nccl_check_cuda(&e, r, what);
    if (s == UPIPE_OK) return s;
    return upipe_comm_fail(&c->err, &m->comm, s, "rank %d: %s", upi_comm_called(&m->comm, m->comm.rank),
                           e.text);
}

#define UPI_NCCL(c, m, call)      UPIPE_TRY(upi_nccl_checked((c), (m), (call), #call))
#define UPI_NCCL_CUDA(c, m, call) UPIPE_TRY(upi_nccl_checked_cuda((c), (m), (call), #call))

/* ---- how far the streams have come ---- */

UPIPE_API const char *upi_nccl_kind(int64_t kind)
{
    return kind == UPI_NCCL_SYNC ? "upipe_nccl_sync" : upi_team_kind(kind);
}

/* The communicator's state: UPIPE_OK, with *busy while NCCL has not enqueued everything. */
UPIPE_API upipe_status upi_nccl_state(upipe_ctx *c, upipe_nccl *m, int *busy)
{
    ncclResult_t state = ncclSuccess;
    UPI_NCCL(c, m, ncclCommGetAsyncError(m->nccl, &state));
    *busy = state == ncclInProgress;
    return *busy ? UPIPE_OK : upi_nccl_checked(c, m, state, upi_nccl_kind(m->kind));
}

/* Whether the stream has passed the event. */
UPIPE_API upipe_status upi_nccl_passed(upipe_ctx *c, upipe_nccl *m, cudaEvent_t event, int *yes)
{
    cudaError_t r = cudaEventQuery(event);
    *yes = r == cudaSuccess;
    if (r != cudaErrorNotReady) return upi_nccl_checked_cuda(c, m, r, "cudaEventQuery(");
    (void)cudaGetLastError(); /* not an error, though some runtimes remember it as one */
    return UPIPE_OK;
}

/* Counts the operations of one team that have ended. TIMEOUT if the oldest of the others is late. */
UPIPE_API upipe_status upi_nccl_sweep(upipe_ctx *c, upipe_nccl *m)
{
    while (m->ended < m->begun) {
        upi_nccl_op *o = upi_nccl_op_at(m, m->ended);
        int late = o->until != 0 && upipe_net_now() >= o->until, passed = 0;
        if (!m->pending || m->ended + 1 < m->begun) UPIPE_TRY(upi_nccl_passed(c, m, o->done, &passed));
        if (passed) {
            ++m->ended;
            continue;
        }
        if (late) return upi_team_late(&c->err, &m->comm, "in %s for other ranks", upi_nccl_kind(o->kind));
        if (o->until == 0) {
            UPIPE_TRY(upi_nccl_passed(c, m, o->reached, &passed));
            if (passed) o->until = upi_net_until(m->comm.deadline);
        }
        return UPIPE_OK;
    }
    return UPIPE_OK;
}

/* The same for all teams of the rank, and the communicators' errors. *left: operations that have not ended. */
UPIPE_API upipe_status upi_nccl_look(upipe_ctx *c, upipe_nccl *m, int64_t *left)
{
    upipe_nccl *t = m;
    int busy;
    *left = 0;
    do {
        UPIPE_TRY(upi_comm_whole(c, &t->comm));
        UPIPE_TRY(upi_nccl_state(c, t, &busy));
        UPIPE_TRY(upi_nccl_sweep(c, t));
        *left += t->begun - t->ended;
    } while ((t = t->next) != m);
    return UPIPE_OK;
}

/* Waits until no operation of any team of the rank is in flight.
 *   until   TIMEOUT then, whatever the operations wait for; 0: each has its own deadline
 */
UPIPE_API upipe_status upi_nccl_drain(upipe_ctx *c, upipe_nccl *m, int64_t until)
{
    int64_t left;
    int idle = 0;
    for (;;) {
        const int late = until != 0 && upipe_net_now() >= until;
        UPIPE_TRY(upi_nccl_look(c, m, &left));
        if (left == 0) return UPIPE_OK;
        if (late) return upi_team_late(&c->err, &m->comm, "in %s for the stream", upi_nccl_kind(m->kind));
        upi_net_rest(&idle, UPI_NCCL_YIELDS, UPI_NCCL_NAP);
    }
}

/* ---- an operation ---- */

/* A call begins: its stream is looked at, and what the other teams of the rank have enqueued before. */
UPIPE_API upipe_status upi_nccl_begin(upipe_ctx *c, upipe_nccl *m, int kind)
{
    enum cudaStreamCaptureStatus state;
    int64_t left;
    int busy;
    UPIPE_TRY(upi_comm_whole(c, &m->comm));
    UPI_NCCL_CUDA(c, m, cudaStreamIsCapturing((cudaStream_t)c->stream, &state));
    if (state != cudaStreamCaptureStatusNone && kind != UPI_TEAM_TRANSFER)
        return upipe_fail(
            &c->err, UPIPE_ERR_UNSUPPORTED,
            "rank %d: %s waits for the stream, which is captured into a graph and runs nothing yet",
            upi_comm_called(&m->comm, m->comm.rank), upi_nccl_kind(kind));
    m->call += kind != UPI_NCCL_SYNC; /* other ranks need not make that call */
    m->kind = kind;
    m->pending = m->rows_come = 0;
    m->stream = (cudaStream_t)c->stream;
    m->captured = state != cudaStreamCaptureStatusNone;
    return m->captured ? upi_nccl_state(c, m, &busy) : upi_nccl_look(c, m, &left);
}

/* An operation begins on m->stream, behind the newest one of any team of the rank: NCCL's operations of several
 * communicators must not meet on a device in another order than on other ranks'. */
UPIPE_API upipe_status upi_nccl_open(upipe_ctx *c, upipe_nccl *m)
{
    upipe_nccl *t = m, *last = m;
    upi_nccl_op *o;
    int64_t left;
    int idle = 0;
    if (m->captured) return UPIPE_OK;
    while (m->begun - m->ended == UPIPE_NCCL_AHEAD) {
        UPIPE_TRY(upi_nccl_look(c, m, &left));
        upi_net_rest(&idle, UPI_NCCL_YIELDS, UPI_NCCL_NAP);
    }
    while ((t = t->next) != m)
        if (t->issued > last->issued) last = t;
    if (last->begun > last->ended) {
        o = upi_nccl_op_at(last, last->begun - 1);
        if (o->stream != m->stream) UPI_NCCL_CUDA(c, m, cudaStreamWaitEvent(m->stream, o->done, 0));
    }
    o = upi_nccl_op_at(m, m->begun);
    UPI_NCCL_CUDA(c, m, cudaEventRecord(o->reached, m->stream));
    o->stream = m->stream;
    o->kind = m->kind;
    o->until = 0;
    m->issued = last->issued + 1;
    m->pending = 1;
    ++m->begun;
    return UPIPE_OK;
}

/* NCCL has enqueued the operation: enqueues what comes behind it. */
UPIPE_API upipe_status upi_nccl_close(upipe_ctx *c, upipe_nccl *m)
{
    size_t bytes = (size_t)m->comm.ranks * UPI_NCCL_ROW * sizeof *m->row;
    if (m->rows_come)
        UPI_NCCL_CUDA(c, m,
                      cudaMemcpyAsync(m->rows + UPI_NCCL_ROW, m->row + UPI_NCCL_ROW, bytes,
                                      cudaMemcpyDeviceToHost, m->stream));
    if (!m->captured) UPI_NCCL_CUDA(c, m, cudaEventRecord(upi_nccl_op_at(m, m->begun - 1)->done, m->stream));
    m->pending = 0;
    return UPIPE_OK;
}

/* r: what the last of an operation's NCCL functions returned. Returns when NCCL has enqueued it all: only then
 * may anything be enqueued behind it. Non-blocking communicators may take a moment, or wait here for ranks with
 * which they have not communicated before. */
UPIPE_API upipe_status upi_nccl_enqueued(upipe_ctx *c, upipe_nccl *m, ncclResult_t r, const char *what)
{
    int64_t until = upi_net_until(m->comm.deadline), left;
    int idle = 0, busy = r == ncclInProgress, late;
    if (!busy) UPIPE_TRY(upi_nccl_checked(c, m, r, what));
    while (busy) {
        late = upipe_net_now() >= until;
        UPIPE_TRY(upi_nccl_state(c, m, &busy));
        if (busy && m->captured && late)
            return upi_team_late(&c->err, &m->comm, "in %s for other ranks", upi_nccl_kind(m->kind));
        if (busy && !m->captured && idle > 0 && idle % UPI_NCCL_LOOKS == 0)
            UPIPE_TRY(upi_nccl_look(c, m, &left));
        if (busy) upi_net_rest(&idle, UPI_NCCL_YIELDS, UPI_NCCL_NAP);
    }
    return upi_nccl_close(c, m);
}

#endif

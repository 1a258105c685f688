/* upipe_net_nccl.h -- a team of ranks with a GPU each, over NCCL
 *
 *     ncclCommInitRankConfig(&nccl, ranks, id, rank, &config);     the host's; config.blocking = 0, see below
 *     upipe_nccl team;
 *     upipe_status s = upipe_nccl_init(&team, nccl, 0, &err);      on the communicator's device
 *     ctx.team = &team.comm;                                       ctx.stream: where everything is enqueued
 *     ...
 *     upipe_nccl_free(&team, &err);
 *     if (team.nccl != NULL) ncclCommDestroy(nccl);                NULL: a failure has freed it already
 *
 * Data. A transfer is one group of ncclSend and ncclRecv on ctx->stream, one pair a block, or one
 * ncclAlltoAll where the list is an all-to-all of equal parts that are contiguous in both buffers. Blocks are
 * never merged: NCCL matches messages by size, and the peer's blocks may have gaps where these have none.
 * What a rank sends itself is a copy of the compute table. An all-gather of numbers, or a barrier, is an ncclAllGather
 * of 352 bytes a rank through memory that init has allocated. One of equal slices (upi_slices_gather) is an
 * ncclAllGather too. No buffer of a transfer may lie in a symmetric window of NCCL's (ncclCommWindowRegister with
 * NCCL_WIN_COLL_SYMMETRIC): NCCL would write at the same offset of each rank's window, and these ranks' may differ.
 *
 * In the stream's order. wait returns when the transfer is enqueued: what the host enqueues on ctx->stream
 * afterwards comes behind it, and the host runs ahead of the device by up to UPIPE_NCCL_AHEAD operations. A block
 * of a pool may be freed at once, as its next use is enqueued behind the transfer. A failure shows in a later call
 * of the team, in ops.sync and what else of the table waits for the stream (upi_comm_settle), or in
 * upipe_nccl_sync: the one that detects it returns it. After that ops.sync waits for the device alone, while
 * copies to ordinary host memory return the failure (upi_comm_results). A host that makes such a call itself
 * unwinds after a failure (upi_unwind), which locks the pool. cudaStreamSynchronize would wait for a dead peer for
 * ever. With team.ahead = 0, set right after init, wait returns when the transfer is complete on the device.
 *
 * Several communicators. A rank may be in a team, a ring and a world. NCCL requires that the operations of all
 * communicators of a device are issued in the same order on all ranks, or that none waits for another: otherwise
 * ranks wait for each other, which ends in TIMEOUT. Ranks that make the same calls issue them in the same order.
 * upipe_nccl_join tells the teams of one rank of each other, and is required where a rank has several and runs ahead:
 * a call of one team knows nothing of transfers of another one that is not joined, and would wait behind them without
 * a deadline. Then operations on several streams of the rank run one after the other, in the order of the calls (in a
 * graph keep them on one stream); a wait for one team watches all; and a failure of one breaks all, as a stream that is
 * stuck in one holds up the others.
 *
 * Graphs. Where ctx->stream is captured, a transfer is captured with it. An all-gather and a barrier make the host
 * wait, and are refused: calls that compare ranks (upi_agree) come before the capture, in one pass, or in two
 * where layers of several kinds alternate. All ranks launch their graphs in the same order; upipe_nccl_sync
 * waits for them under the deadline. The counts of bytes are those of the capture.
 *
 * Order. Every rank makes the same sequence of calls, from one thread at a time, abort included. NCCL does
 * not compare what ranks request: lists that do not match, or different calls, end in TIMEOUT at best. An
 * all-gather detects it: it carries number and kind of the call, and returns MISMATCH on all ranks.
 *
 * Deadline. It counts from the moment when a call sees that the stream has reached the transfer: work that was
 * enqueued before is this rank's own. In a blocking communicator NCCL itself waits for peers without a deadline, when
 * two ranks first communicate: where a peer may be missing from the start, make it non-blocking.
 *
 * Failures. TIMEOUT names no rank, as NCCL does not report which one is missing. ABORTED: a rank has aborted,
 * or NCCL reports a remote error. BACKEND: NCCL's text, or the CUDA runtime's. The communicator is then freed
 * with ncclCommAbort, which ends this rank's operations; every later call returns ABORTED. NCCL does not
 * inform the other ranks: each one's own deadline, or an asynchronous error, ends its call, and it aborts
 * too. Transfers in flight set comm->quarantine: peers that have not aborted yet may access their buffers, also
 * those that the host has freed, so that upi_unwind locks the whole pool.
 * ncclCommAbort itself may wait for work of the device: a call that fails may return that much later than its
 * deadline.
 */
#ifndef UPIPE_NET_NCCL_H
#define UPIPE_NET_NCCL_H

#include "upipe_net_nccl_stream.h"

#include <stdlib.h>
#include <unistd.h>

#define UPI_NCCL_MARK INT64_C(0x316c63636e697075) /* "upinccl1" in memory, low byte first */

/* Brings this rank's row, m->rows, to all ranks, on m->stream, and waits for theirs. */
UPIPE_API upipe_status upi_nccl_share(upipe_ctx *c, upipe_nccl *m)
{
    UPIPE_TRY(upi_nccl_open(c, m));
    m->rows_come = 1;
    UPI_NCCL_CUDA(
        c, m,
        cudaMemcpyAsync(m->row, m->rows, UPI_NCCL_ROW * sizeof *m->row, cudaMemcpyHostToDevice, m->stream));
    UPIPE_TRY(upi_nccl_enqueued(
        c, m, ncclAllGather(m->row, m->row + UPI_NCCL_ROW, UPI_NCCL_ROW, ncclInt64, m->nccl, m->stream),
        "ncclAllGather("));
    UPIPE_TRY(upi_nccl_drain(c, m, 0));
    m->rows_come = 0;
    return UPIPE_OK;
}

/* A barrier, or an all-gather of one row a rank to m->rows + (1 + r) * UPI_NCCL_ROW. */
UPIPE_API upipe_status upi_nccl_meet(upipe_ctx *c, upipe_nccl *m, int kind, const int64_t *values, int n)
{
    int r;
    UPIPE_TRY(upi_nccl_begin(c, m, kind));
    memset(m->rows, 0, UPI_NCCL_ROW * sizeof *m->rows);
    m->rows[0] = UPI_NCCL_MARK;
    m->rows[1] = m->call;
    m->rows[2] = m->kind;
    m->rows[3] = n;
    if (n > 0) memcpy(m->rows + UPI_NCCL_HEAD, values, (size_t)n * sizeof *values);
    UPIPE_TRY(upi_nccl_share(c, m));
    for (r = 0; r < m->comm.ranks; ++r) {
        const int64_t *theirs = m->rows + (size_t)(1 + r) * UPI_NCCL_ROW;
        if (theirs[0] != UPI_NCCL_MARK)
            return upipe_comm_fail(&c->err, &m->comm, UPIPE_ERR_MISMATCH,
                                   "rank %d gathers something else than rank %d",
                                   upi_comm_called(&m->comm, r), upi_comm_called(&m->comm, m->comm.rank));
        UPIPE_TRY(upi_team_same(&c->err, &m->comm, m->kind, n, r, theirs[2], theirs[3]));
        if (theirs[1] != m->call)
            return upipe_comm_fail(&c->err, &m->comm, UPIPE_ERR_MISMATCH,
                                   "rank %d is in its call %lld and rank %d in its %lld",
                                   upi_comm_called(&m->comm, m->comm.rank), (long long)m->call,
                                   upi_comm_called(&m->comm, r), (long long)theirs[1]);
    }
    return UPIPE_OK;
}

/* ---- transfers ---- */

/* Whether all ranks are sent equal bytes, contiguous in rank order in both buffers. *rank_bytes: of one rank. */
UPIPE_API int upi_nccl_is_all_to_all(const upipe_nccl *m, const upipe_msg *list, int n, size_t *rank_bytes)
{
    int p;
    if (m->grouped || n != m->comm.ranks || list[0].send_bytes == 0) return 0;
    *rank_bytes = list[0].send_bytes * (size_t)list[0].count;
    for (p = 0; p < n; ++p) {
        const upipe_msg *msg = &list[p];
        if (msg->peer != p || msg->send_bytes != list[0].send_bytes || msg->recv_bytes != msg->send_bytes ||
            msg->count != list[0].count)
            return 0;
        if (msg->count > 1 && (msg->send_stride != msg->send_bytes || msg->recv_stride != msg->recv_bytes))
            return 0;
        if ((const char *)msg->send != (const char *)list[0].send + (size_t)p * *rank_bytes ||
            (const char *)msg->recv != (const char *)list[0].recv + (size_t)p * *rank_bytes)
            return 0;
    }
    return 1;
}

/* Inside a group: sends and receives of the list. Returns the first result that is a failure. */
UPIPE_API ncclResult_t upi_nccl_list(upipe_ctx *c, const upipe_nccl *m, const upipe_msg *list, int n,
                                     const char **what)
{
    cudaStream_t stream = (cudaStream_t)c->stream;
    int i;
    for (i = 0; i < n; ++i) {
        const upipe_msg *msg = &list[i];
        int64_t b;
        if (msg->peer == m->comm.rank) continue;
        for (b = 0; b < msg->count; ++b) {
            ncclResult_t r = ncclSuccess;
            *what = "ncclSend(";
            if (msg->send_bytes > 0)
                r = ncclSend((const char *)msg->send + (size_t)b * msg->send_stride, msg->send_bytes,
                             ncclInt8, msg->peer, m->nccl, stream);
            if (r != ncclSuccess && r != ncclInProgress) return r;
            *what = "ncclRecv(";
            if (msg->recv_bytes > 0)
                r = ncclRecv((char *)msg->recv + (size_t)b * msg->recv_stride, msg->recv_bytes, ncclInt8,
                             msg->peer, m->nccl, stream);
            if (r != ncclSuccess && r != ncclInProgress) return r;
        }
    }
    return ncclSuccess;
}

/* One group on ctx->stream. */
UPIPE_API upipe_status upi_nccl_post_group(upipe_ctx *c, upipe_nccl *m, const upipe_msg *list, int n)
{
    const char *what = "";
    ncclResult_t inside, end;
    int i, others = 0;
    UPIPE_TRY(upi_comm_copy_own(c, &m->comm, list, n, c->ops->copy));
    UPIPE_TRY(upi_nccl_open(c, m));
    for (i = 0; i < n; ++i)
        others += list[i].peer != m->comm.rank && (list[i].send_bytes > 0 || list[i].recv_bytes > 0);
    if (others == 0) return upi_nccl_close(c, m);
    UPI_NCCL(c, m, ncclGroupStart());
    inside = upi_nccl_list(c, m, list, n, &what);
    end = ncclGroupEnd(); /* the thread's group is closed in either case */
    UPIPE_TRY(upi_nccl_checked(c, m, inside, what));
    return upi_nccl_enqueued(c, m, end, "ncclGroupEnd(");
}

UPIPE_API upipe_status upi_nccl_start(upipe_ctx *c, upipe_comm *comm, const upipe_msg *list, int n)
{
    upipe_nccl *m = (upipe_nccl *)comm->impl;
    UPIPE_TRY(upi_nccl_begin(c, m, UPI_TEAM_TRANSFER));
    m->list = list;
    m->n = n;
#if NCCL_VERSION_CODE >= 22800 /* nccl.h declares ncclAlltoAll */
    {
        size_t rank_bytes;
        if (comm->ranks > 1 && upi_nccl_is_all_to_all(m, list, n, &rank_bytes)) {
            UPIPE_TRY(upi_nccl_open(c, m));
            return upi_nccl_enqueued(
                c, m, ncclAlltoAll(list[0].send, list[0].recv, rank_bytes, ncclInt8, m->nccl, m->stream),
                "ncclAlltoAll(");
        }
    }
#endif
    return upi_nccl_post_group(c, m, list, n);
}

UPIPE_API upipe_status upi_nccl_wait(upipe_ctx *c, upipe_comm *comm)
{
    upipe_nccl *m = (upipe_nccl *)comm->impl;
    int i;
    UPIPE_TRY(upi_comm_whole(c, comm));
    if (!m->ahead && !m->captured) UPIPE_TRY(upi_nccl_drain(c, m, 0));
    for (i = 0; i < m->n; ++i)
        if (m->list[i].peer != comm->rank)
            comm->moved_bytes += (int64_t)m->list[i].recv_bytes * m->list[i].count;
    return UPIPE_OK;
}

/* Of equal parts: rings, trees and switches of NCCL's own carry them, and not each rank's link once for each of the
 * others. */
UPIPE_API upipe_status upi_nccl_gather(upipe_ctx *c, upipe_comm *comm, void *all, const void *mine,
                                       size_t bytes)
{
    upipe_nccl *m = (upipe_nccl *)comm->impl;
    UPIPE_TRY(upi_nccl_begin(c, m, UPI_TEAM_TRANSFER));
    UPIPE_TRY(upi_nccl_open(c, m));
    UPIPE_TRY(upi_nccl_enqueued(c, m, ncclAllGather(mine, all, bytes, ncclInt8, m->nccl, m->stream),
                                "ncclAllGather("));
    if (!m->ahead && !m->captured) UPIPE_TRY(upi_nccl_drain(c, m, 0));
    comm->moved_bytes += (int64_t)bytes * (comm->ranks - 1);
    return UPIPE_OK;
}

/* Before the host waits for a stream. A team that has failed holds up none. */
UPIPE_API upipe_status upi_nccl_settle(upipe_ctx *c, upipe_comm *comm)
{
    upipe_nccl *m = (upipe_nccl *)comm->impl;
    return m->broken ? UPIPE_OK : upi_nccl_drain(c, m, 0);
}

/* ---- barrier, all-gather ---- */

UPIPE_API upipe_status upi_nccl_barrier(upipe_ctx *c, upipe_comm *comm)
{
    return upi_nccl_meet(c, (upipe_nccl *)comm->impl, UPI_TEAM_BARRIER, NULL, 0);
}

UPIPE_API upipe_status upi_nccl_all_gather(upipe_ctx *c, upipe_comm *comm, int64_t *all, const int64_t *mine,
                                           int n)
{
    upipe_nccl *m = (upipe_nccl *)comm->impl;
    int r;
    UPIPE_TRY(upi_nccl_meet(c, m, UPI_TEAM_ALL_GATHER, mine, n));
    for (r = 0; r < comm->ranks; ++r)
        memcpy(all + (size_t)r * (size_t)n, m->rows + (size_t)(1 + r) * UPI_NCCL_ROW + UPI_NCCL_HEAD,
               (size_t)n * sizeof *all);
    return UPIPE_OK;
}

/* upipe_nccl_sync -- waits for ctx->stream, no longer than the deadline, and detects NCCL's errors meanwhile:
 *                    for transfers in a graph, of which ops.sync knows nothing
 *   order   the deadline counts from the call; it covers all that is enqueued now, computing included. After the
 *           launch of a graph this call comes before any other: those know nothing of the graph's transfers
 *           either, and wait behind them without a deadline
 *   errors  as upipe_comm_wait; UNSUPPORTED where the stream is captured; ARG while a transfer is in progress
 */
UPIPE_API upipe_status upipe_nccl_sync(upipe_ctx *c, upipe_nccl *m)
{
    const int64_t until = upi_net_until(m->comm.deadline);
    UPIPE_TRY(upipe_comm_idle(c, &m->comm));
    UPIPE_TRY(upi_nccl_begin(c, m, UPI_NCCL_SYNC));
    UPIPE_TRY(upi_nccl_drain(c, m, until));
    UPIPE_TRY(upi_nccl_open(c, m));
    UPIPE_TRY(upi_nccl_close(c, m));
    return upi_nccl_drain(c, m, until);
}

/* upipe_nccl_join -- these two are teams of one rank, and so are those joined to either before: a failure of one
 *                    breaks all, every wait watches all of them, and their operations are serialised where they
 *                    are on several streams
 *   order   after init, before a transfer of either. Teams that are joined are called from one thread at a time
 *   errors  ARG: they are joined already, or have operations in flight
 */
UPIPE_API upipe_status upipe_nccl_join(upipe_nccl *m, upipe_nccl *other, upipe_err *e)
{
    upipe_nccl *t = m;
    do
        if (t == other) return upipe_fail(e, UPIPE_ERR_ARG, "these teams are joined already");
    while ((t = t->next) != m);
    if (m->begun > m->ended || other->begun > other->ended)
        return upipe_fail(e, UPIPE_ERR_ARG, "a team with operations in flight is joined to another one");
    t = m->next;
    m->next = other->next;
    other->next = t;
    return UPIPE_OK;
}

/* ---- the team ---- */

/* This machine, as NCCL tells machines apart: by name and by boot. */
UPIPE_API int64_t upipe_nccl_node(void)
{
    char name[256] = "", boot[64] = "";
    uint64_t hash;
    FILE *f = fopen("/proc/sys/kernel/random/boot_id", "r");
    if (f != NULL) {
        boot[fread(boot, 1, sizeof boot - 1, f)] = 0;
        fclose(f);
    }
    (void)gethostname(name, sizeof name - 1);
    hash = upipe_hash_bytes(UPIPE_HASH, name, strlen(name));
    return (int64_t)upipe_hash_bytes(hash, boot, strlen(boot));
}

UPIPE_API upipe_status upi_nccl_first(upipe_status s, upipe_status t)
{
    return s != UPIPE_OK ? s : t;
}

/* The team's events: 0 .. 2 * UPIPE_NCCL_AHEAD - 1. */
UPIPE_API cudaEvent_t *upi_nccl_event(upipe_nccl *m, int i)
{
    return i % 2 == 0 ? &m->op[i / 2].reached : &m->op[i / 2].done;
}

/* upipe_nccl_free -- releases what init allocated; legal after a failure and a failed init too
 *   order   no call is in progress, and the team's device is the current one. Waits for what is in flight, within
 *           the deadline, and then for the device. m->nccl keeps its value: the host destroys its communicator
 *           unless that is NULL. Teams that are joined are all freed before one is used again
 *   errors  TIMEOUT, ABORTED: a transfer does not end; BACKEND: the runtime's text. Everything that can be
 *           released is. m->comm.quarantine keeps its value: where it is set, peers may still access buffers of the
 *           pool (upi_mem_quarantine)
 */
UPIPE_API upipe_status upipe_nccl_free(upipe_nccl *m, upipe_err *e)
{
    upipe_status s = UPIPE_OK;
    upipe_nccl *before = m;
    upipe_ctx c;
    ncclComm_t nccl;
    int i, quarantine;
    if (m == NULL) return s;
    memset(&c, 0, sizeof c);
    if (m->next != NULL) s = upi_nccl_settle(&c, &m->comm);
    upi_comm_leave(&m->comm);
    if (s != UPIPE_OK && e != NULL) *e = c.err;
    while (before->next != NULL && before->next != m) before = before->next;
    before->next = m->next;
    nccl = m->nccl;
    if (m->row != NULL) s = upi_nccl_first(s, upipe_nccl_check_cuda(e, cudaFree(m->row), "cudaFree("));
    if (m->rows != NULL)
        s = upi_nccl_first(s, upipe_nccl_check_cuda(e, cudaFreeHost(m->rows), "cudaFreeHost("));
    for (i = 0; i < 2 * UPIPE_NCCL_AHEAD; ++i) {
        cudaEvent_t event = *upi_nccl_event(m, i);
        if (event != NULL)
            s = upi_nccl_first(s, upipe_nccl_check_cuda(e, cudaEventDestroy(event), "cudaEventDestroy("));
    }
    free(m->buf);
    quarantine = m->comm.quarantine;
    memset(m, 0, sizeof *m);
    m->nccl = nccl;
    m->comm.quarantine = quarantine;
    return s;
}

/* Waits until a non-blocking communicator is made. */
UPIPE_API upipe_status upi_nccl_made(ncclComm_t nccl, double deadline_s, upipe_err *e)
{
    int64_t until = upi_net_until(deadline_s);
    int idle = 0;
    for (;;) {
        ncclResult_t state = ncclSuccess;
        UPIPE_TRY(upipe_nccl_check(e, nccl, ncclCommGetAsyncError(nccl, &state), "ncclCommGetAsyncError("));
        if (state != ncclInProgress) return upipe_nccl_check(e, nccl, state, "the communicator(");
        if (upipe_net_now() >= until)
            return upipe_fail(e, UPIPE_ERR_TIMEOUT,
                              "NCCL has not made the communicator in %g s: ranks are missing", deadline_s);
        upi_net_rest(&idle, UPI_NCCL_YIELDS, UPI_NCCL_NAP);
    }
}

UPIPE_API upipe_status upi_nccl_claim(upipe_nccl *m, upipe_err *e)
{
    size_t ranks = (size_t)m->comm.ranks, msgs = 2 * ranks * sizeof(upipe_msg);
    size_t bytes = (1 + ranks) * UPI_NCCL_ROW * sizeof *m->row;
    void *rows = NULL, *pinned = NULL;
    int i;
    m->buf = calloc(1, msgs + ranks * UPIPE_ALL_GATHER_MAX * sizeof(int64_t));
    if (m->buf == NULL) return upipe_fail(e, UPIPE_ERR_MEMORY, "no memory for a team of %zu ranks", ranks);
    m->comm.list = (upipe_msg *)m->buf;
    m->comm.gathered = (int64_t *)(void *)((char *)m->buf + msgs);
    UPIPE_TRY(upipe_nccl_check_cuda(e, cudaMalloc(&rows, bytes), "cudaMalloc("));
    m->row = (int64_t *)rows;
    UPIPE_TRY(
        upipe_nccl_check_cuda(e, cudaHostAlloc(&pinned, bytes, cudaHostAllocDefault), "cudaHostAlloc("));
    m->rows = (int64_t *)pinned;
    for (i = 0; i < 2 * UPIPE_NCCL_AHEAD; ++i)
        UPIPE_TRY(
            upipe_nccl_check_cuda(e, cudaEventCreateWithFlags(upi_nccl_event(m, i), cudaEventDisableTiming),
                                  "cudaEventCreateWithFlags("));
    return UPIPE_OK;
}

/* upipe_nccl_init -- makes this rank's end of a team of all ranks of an NCCL communicator
 *   nccl        the host's; its device is the current one. Waits for a non-blocking one to be made
 *   deadline_s  seconds that one call may wait for its peers; 0 = UPIPE_DEADLINE_DEFAULT. Each call reads
 *               comm.deadline, which each rank may change
 *   bytes       352 * (1 + ranks) on the device and as many pinned, 448 * ranks of ordinary memory
 *   errors      ARG, TIMEOUT, ABORTED, MEMORY, BACKEND (NCCL's or the runtime's text). Then there is nothing
 *               to free here, and the host ends its communicator: ncclCommAbort, not ncclCommDestroy
 */
UPIPE_API upipe_status upipe_nccl_init(upipe_nccl *m, ncclComm_t nccl, double deadline_s, upipe_err *e)
{
    static const upipe_comm_ops ops = {"nccl",           upi_nccl_start,      upi_nccl_wait,
                                       upi_nccl_barrier, upi_nccl_all_gather, upi_nccl_failure,
                                       upi_nccl_fail,    upi_nccl_settle,     upi_nccl_gather};
    int theirs = -1, current = -1;
    upipe_status s;
    memset(m, 0, sizeof *m);
    UPIPE_TRY(upi_team_deadline(e, deadline_s));
    if (nccl == NULL) return upipe_fail(e, UPIPE_ERR_ARG, "a team without a communicator");
    if (!(deadline_s > 0)) deadline_s = UPIPE_DEADLINE_DEFAULT;
    UPIPE_TRY(upi_nccl_made(nccl, deadline_s, e));
    UPIPE_TRY(upipe_nccl_check(e, nccl, ncclCommCount(nccl, &m->comm.ranks), "ncclCommCount("));
    UPIPE_TRY(upipe_nccl_check(e, nccl, ncclCommUserRank(nccl, &m->comm.rank), "ncclCommUserRank("));
    UPIPE_TRY(upipe_nccl_check(e, nccl, ncclCommCuDevice(nccl, &theirs), "ncclCommCuDevice("));
    UPIPE_TRY(upipe_nccl_check_cuda(e, cudaGetDevice(&current), "cudaGetDevice("));
    if (theirs != current)
        return upipe_fail(e, UPIPE_ERR_ARG, "the communicator is on device %d, and device %d is current",
                          theirs, current);
    s = upi_nccl_claim(m, e);
    if (s != UPIPE_OK) {
        upipe_nccl_free(m, NULL);
        return s;
    }
    m->nccl = nccl;
    m->next = m;
    m->ahead = 1;
    upi_team_init(&m->comm, &ops, m, deadline_s);
    return UPIPE_OK;
}

#endif

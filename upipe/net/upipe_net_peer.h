/* upipe_net_peer.h -- a team whose copy engines write into each other's memory   backend, includes team, comm
 *
 *     upipe_peer_desc d = {0};
 *     d.buf = buf;                                     upipe_peer_bytes(ranks) zeros that all ranks see
 *     d.slabs = slabs, d.slabs_n = 1;                  device memory that may receive: the pool's
 *     d.rank = rank, d.ranks = 8;
 *     upipe_peer team;
 *     upipe_status s = upipe_peer_init(&team, &d, &err);
 *     ctx.team = &team.comm;                           ctx.stream: the host's
 *     ...
 *     upipe_peer_free(&team, &err);                    before the slabs
 *
 * Ranks are threads of a process or, with d.processes, processes of a machine: a GPU each, or several on one.
 * The buffer is any memory of a process, or shared memory (shm_open, memfd_create, or mapped before fork);
 * each rank may see it at another address. Through it the hosts communicate, without a library. Receive
 * buffers lie in the slabs, send buffers anywhere on the device.
 *
 * Data. start records an event on ctx->stream: behind it this rank's buffers may be read and written. In wait
 * each rank, on a stream of its own, waits for the receiver's event and copies every message to its place
 * with cudaMemcpyAsync or cudaMemcpy2DAsync; the receivers' streams wait for an event behind these copies.
 * Hosts publish addresses, and which events are recorded; they do not wait for the device in between, and no
 * kernel is launched. So the data need no multiprocessors, and move while ctx->stream runs what it is given
 * between start and wait. (A driver may copy with a kernel what a rank sends itself.) Ranks synchronize with
 * events rather than with words in memory: a wait is enqueued only after what it waits for, so no order of
 * calls can hang a device, also where ranks share one, and the runtime knows every dependence.
 *
 * wait returns when the transfer is complete on the device. With team.ahead it returns when the transfer is
 * enqueued and ctx->stream waits for it: the host runs ahead, and a failure of the device shows in a later
 * call or in ops.sync, which upipe_peer_sync replaces under the deadline.
 *
 * Order. Every rank makes the same sequence of calls (transfer, barrier, all-gather), from one thread at a
 * time, abort included. Ranks may set `ahead` independently.
 *
 * Failures. The rank that detects the first one returns its status: TIMEOUT (naming the ranks), MISMATCH,
 * BACKEND. The others return ABORTED, but a MISMATCH once. The deadline counts from the moment when
 * ctx->stream reaches the transfer; with `ahead`, from the call while the transfer before has not ended. A
 * rank that fails then waits until its own copies and copies to it have ended; if they do not,
 * comm->quarantine is set. The deadline detects a process that dies. With `ahead` ctx->stream may be behind
 * its copies for ever: then comm->stuck is set too.
 */
#ifndef UPIPE_NET_PEER_H
#define UPIPE_NET_PEER_H

#include "upipe_net_peer_memory.h"

#include <unistd.h>

/* ---- transfers ---- */

/* `count` blocks on the transport's stream. */
UPIPE_API upipe_status upi_peer_copy(upipe_err *e, upipe_peer *m, char *dst, size_t dst_stride,
                                     const char *src, size_t src_stride, size_t bytes, int64_t count)
{
    int64_t i;
    if (count > 1 && dst_stride == bytes && src_stride == bytes) {
        bytes *= (size_t)count;
        count = 1;
    }
    if (count > 1 && dst_stride >= bytes && src_stride >= bytes && dst_stride <= UPI_PEER_PITCH &&
        src_stride <= UPI_PEER_PITCH) {
        UPI_PEER_CUDA(e, m,
                      cudaMemcpy2DAsync(dst, dst_stride, src, src_stride, bytes, (size_t)count,
                                        cudaMemcpyDefault, m->stream));
        return UPIPE_OK;
    }
    for (i = 0; i < count; ++i)
        UPI_PEER_CUDA(e, m,
                      cudaMemcpyAsync(dst + (size_t)i * dst_stride, src + (size_t)i * src_stride, bytes,
                                      cudaMemcpyDefault, m->stream));
    return UPIPE_OK;
}

/* Copies what a rank sends to itself. */
UPIPE_API upipe_status upi_peer_copy_own(upipe_err *e, upipe_peer *m, const upipe_msg *list, int n)
{
    int from = -1, to = -1;
    for (;;) {
        UPIPE_TRY(upipe_msg_own(e, &m->comm, list, n, &from, &to));
        if (from == n) return UPIPE_OK;
        UPIPE_TRY(upi_peer_copy(e, m, (char *)list[to].recv, list[to].recv_stride,
                                (const char *)list[from].send, list[from].send_stride, list[from].send_bytes,
                                list[from].count));
    }
}

/* The slab that holds all blocks of a receive, and their offset in it; -1: none. */
UPIPE_API int upi_peer_place(const upipe_peer *m, const upipe_msg *msg, int64_t *offset)
{
    uintptr_t p = (uintptr_t)msg->recv;
    int i;
    for (i = 0; i < m->slabs_n; ++i) {
        uintptr_t first = (uintptr_t)m->slabs[i].data;
        size_t bytes = m->slabs[i].bytes, left;
        if (p < first || p - first > bytes) continue;
        left = bytes - (p - first);
        if (msg->recv_bytes > left) continue;
        if (msg->count > 1 && msg->recv_stride > 0 &&
            (uint64_t)(msg->count - 1) > (left - msg->recv_bytes) / msg->recv_stride)
            continue;
        *offset = (int64_t)(p - first);
        return i;
    }
    return -1;
}

/* Fills in the post: what this rank receives. One that is not possible is refused without side effects. */
UPIPE_API upipe_status upi_peer_offer(upipe_err *e, upipe_peer *m, const upipe_msg *list, int n,
                                      uint64_t call)
{
    upi_peer_post *post = upi_peer_post_of(m, m->comm.rank, call);
    upi_peer_recv *recv = upi_peer_recvs_of(m, m->comm.rank, call);
    int i, used = 0;
    for (i = 0; i < n; ++i) {
        if (list[i].peer == m->comm.rank || list[i].recv_bytes == 0) continue;
        if (used == m->comm.ranks * UPIPE_PEER_RECVS)
            return upipe_fail(e, UPIPE_ERR_UNSUPPORTED,
                              "rank %d receives more than %d messages in one transfer", m->comm.rank, used);
        recv->slab = upi_peer_place(m, &list[i], &recv->offset);
        if (recv->slab < 0)
            return upipe_fail(
                e, UPIPE_ERR_UNSUPPORTED,
                "rank %d receives message %d, from rank %d, outside the slabs that peers can reach",
                m->comm.rank, i, list[i].peer);
        recv->bytes = (int64_t)list[i].recv_bytes;
        recv->stride = (int64_t)list[i].recv_stride;
        recv->count = list[i].count;
        recv->from = list[i].peer;
        ++recv;
        ++used;
    }
    post->kind = UPI_TEAM_TRANSFER;
    post->n = used;
    return UPIPE_OK;
}

/* The first receive at or after number i that comes from this rank; n: there is none. */
UPIPE_API int upi_peer_next_recv(const upi_peer_recv *recv, int n, int from, int i)
{
    while (i < n && recv[i].from != from) ++i;
    return i;
}

/* Compares what this rank sends to rank `to` with what that one receives. *any: there is something. */
UPIPE_API upipe_status upi_peer_fit(upipe_err *e, upipe_peer *m, uint64_t call, int to, int *any)
{
    const upi_peer_recv *recv = upi_peer_recvs_of(m, to, call);
    int n = upi_peer_post_of(m, to, call)->n, rank = m->comm.rank, sends = 0, receives = 0, i, k = -1;
    for (i = 0; i < m->n; ++i) sends += m->list[i].peer == to && m->list[i].send_bytes > 0;
    for (i = 0; i < n; ++i) receives += recv[i].from == rank;
    UPIPE_TRY(upi_team_fit_count(e, &m->comm, rank, sends, to, receives));
    for (i = -1; (i = upipe_msg_next(m->list, m->n, to, UPIPE_MSG_SEND, i + 1)) < m->n;) {
        k = upi_peer_next_recv(recv, n, rank, k + 1);
        UPIPE_TRY(upi_team_fit_blocks(e, &m->comm, rank, m->list[i].count, (int64_t)m->list[i].send_bytes, to,
                                      recv[k].count, recv[k].bytes));
    }
    *any = sends > 0;
    return UPIPE_OK;
}

UPIPE_API int32_t *upi_peer_busy(const upipe_peer *m, int to, int from)
{
    return &m->busy[to * m->comm.ranks + from];
}

/* Rank `to` has come to this transfer: enqueues the copies of what it receives from here, behind its event. */
UPIPE_API upipe_status upi_peer_push(upipe_err *e, upipe_peer *m, uint64_t call, int to)
{
    const upi_peer_recv *recv = upi_peer_recvs_of(m, to, call);
    int n = upi_peer_post_of(m, to, call)->n, any = 0, i = -1, k = -1;
    UPIPE_TRY(upi_peer_same(e, m, call, to));
    UPIPE_TRY(upi_peer_fit(e, m, call, to, &any));
    if (!any) return UPIPE_OK;
    /* Sets first and reads `broken` second; a failing receiver breaks first and reads the word second. So one
     * of the two sees the other, and no copy begins unseen. */
    __atomic_store_n(upi_peer_busy(m, to, m->comm.rank), 1, __ATOMIC_SEQ_CST);
    m->busy_set = 1;
    if (upi_peer_broken(m)) return upipe_comm_report(e, &m->comm, UPIPE_OK);
    UPI_PEER_CUDA(e, m, cudaStreamWaitEvent(m->stream, m->link[to].event[UPI_PEER_READY][call & 1], 0));
    while ((i = upipe_msg_next(m->list, m->n, to, UPIPE_MSG_SEND, i + 1)) < m->n) {
        k = upi_peer_next_recv(recv, n, m->comm.rank, k + 1);
        UPIPE_TRY(upi_peer_copy(e, m, m->link[to].slab[recv[k].slab] + recv[k].offset, (size_t)recv[k].stride,
                                (const char *)m->list[i].send, m->list[i].send_stride, m->list[i].send_bytes,
                                m->list[i].count));
    }
    return UPIPE_OK;
}

/* This rank's copies have ended. */
UPIPE_API void upi_peer_release(upipe_peer *m)
{
    int r;
    for (r = 0; r < m->comm.ranks && m->busy_set; ++r)
        __atomic_store_n(upi_peer_busy(m, r, m->comm.rank), 0, __ATOMIC_SEQ_CST);
    m->busy_set = 0;
}

/* Copies of a transfer that the host has run ahead of may have ended since. */
UPIPE_API upipe_status upi_peer_catch_up(upipe_err *e, upipe_peer *m)
{
    int passed;
    if (!m->busy_set) return UPIPE_OK;
    UPIPE_TRY(upi_peer_passed(e, m, m->done, &passed));
    if (passed) upi_peer_release(m);
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_peer_progress_pushing(upipe_err *e, upipe_peer *m, uint64_t call)
{
    int ranks = m->comm.ranks, rank = m->comm.rank, k, missing = 0;
    for (k = 1; k < ranks; ++k) {
        int to = (rank + k) % ranks; /* each rank begins with its neighbour, which spreads the receivers */
        if (m->link[to].pushed == call) continue;
        if (!upi_peer_has_posted(m, to, call)) {
            ++missing;
            continue;
        }
        UPIPE_TRY(upi_peer_push(e, m, call, to));
        m->link[to].pushed = call;
    }
    if (missing > 0) return UPIPE_OK;
    UPI_PEER_CUDA(e, m, cudaEventRecord(m->link[rank].event[UPI_PEER_SENT][call & 1], m->stream));
    __atomic_store_n(&m->slot[rank].sent, call, __ATOMIC_RELEASE);
    m->stage = UPI_PEER_RECEIVING;
    return UPIPE_OK;
}

/* The stream waits for the ranks' events only when all have recorded theirs: a rank that comes to the next
 * transfer knows that none waits any more for those of the transfer before this one. */
UPIPE_API upipe_status upi_peer_progress_receiving(upipe_err *e, upipe_peer *m, uint64_t call)
{
    int r;
    for (r = 0; r < m->comm.ranks; ++r)
        if (!upi_peer_has_sent(m, r, call)) return UPIPE_OK;
    for (r = 0; r < m->comm.ranks; ++r) {
        if (r == m->comm.rank || upipe_msg_next(m->list, m->n, r, UPIPE_MSG_RECV, 0) == m->n) continue;
        UPI_PEER_CUDA(e, m, cudaStreamWaitEvent(m->stream, m->link[r].event[UPI_PEER_SENT][call & 1], 0));
    }
    UPI_PEER_CUDA(e, m, cudaEventRecord(m->done, m->stream));
    m->stage = UPI_PEER_LANDING;
    return UPIPE_OK;
}

/* Advances this transfer as far as the other ranks allow. *complete: nothing is left to do here. */
UPIPE_API upipe_status upi_peer_progress(upipe_ctx *c, upipe_peer *m, uint64_t call, int *complete)
{
    *complete = 0;
    if (m->stage == UPI_PEER_PUSHING) UPIPE_TRY(upi_peer_progress_pushing(&c->err, m, call));
    if (m->stage == UPI_PEER_RECEIVING) UPIPE_TRY(upi_peer_progress_receiving(&c->err, m, call));
    if (m->stage != UPI_PEER_LANDING) return UPIPE_OK;
    if (!m->ahead) return upi_peer_passed(&c->err, m, m->done, complete);
    UPI_PEER_CUDA(&c->err, m, cudaStreamWaitEvent((cudaStream_t)c->stream, m->done, 0));
    *complete = 1;
    return UPIPE_OK;
}

/* The deadline is for peers. Until ctx->stream has reached the transfer it does not count, unless the host
 * has run ahead of the transfer before, and that has not ended: then peers are waited for. */
UPIPE_API upipe_status upi_peer_finish(upipe_ctx *c, upipe_peer *m)
{
    uint64_t call = m->call;
    int64_t until = upi_net_until(m->comm.deadline);
    int idle = 0, before = !m->ahead, reached = 0, complete;
    for (;;) {
        int late = (reached || !before) && upipe_net_now() >= until;
        UPIPE_TRY(upi_peer_progress(c, m, call, &complete));
        if (complete) return UPIPE_OK;
        UPIPE_TRY(upipe_comm_whole(c, &m->comm));
        if (late) UPIPE_TRY(upi_peer_late(&c->err, m, call));
        if (late && !before)
            return upi_team_late(&c->err, &m->comm, "for the copies of the transfer before to end");
        if (!before) UPIPE_TRY(upi_peer_passed(&c->err, m, m->done, &before));
        if (before && !reached) {
            UPIPE_TRY(
                upi_peer_passed(&c->err, m, m->link[m->comm.rank].event[UPI_PEER_READY][call & 1], &reached));
            if (reached) until = upi_net_until(m->comm.deadline);
        }
        upi_net_rest(&idle, UPI_PEER_YIELDS, UPI_PEER_NAP);
    }
}

/* Waits until this rank's copies have ended: returns 1. 0: the time `until` (ns) has passed before; -1: the
 * runtime returns an error, which does not say whether they have ended. */
UPIPE_API int upi_peer_ended(upipe_peer *m, int64_t until)
{
    int idle = 0;
    for (;;) {
        int over = upipe_net_now() >= until;
        cudaError_t r = cudaStreamQuery(m->stream);
        if (r == cudaSuccess) {
            upi_peer_release(m);
            return 1;
        }
        (void)cudaGetLastError();
        if (r != cudaErrorNotReady) return -1;
        if (over) return 0;
        upi_net_rest(&idle, UPI_PEER_YIELDS, UPI_PEER_NAP);
    }
}

/* After a failure: waits until this rank's copies and copies to it have ended. None begins, since the team is
 * broken. Returns 0 if one may still run. */
UPIPE_API int upi_peer_settled(upipe_peer *m)
{
    int64_t until = upi_team_grace(&m->comm);
    int idle = 0, over, r;
    if (upi_peer_ended(m, until) != 1) return 0;
    for (;;) {
        over = upipe_net_now() >= until;
        for (r = 0; r < m->comm.ranks; ++r)
            if (__atomic_load_n(upi_peer_busy(m, m->comm.rank, r), __ATOMIC_SEQ_CST)) break;
        if (r == m->comm.ranks) return 1;
        if (over) return 0;
        upi_net_rest(&idle, UPI_PEER_YIELDS, UPI_PEER_NAP);
    }
}

/* After a failure: sets quarantine, and stuck, unless all copies have ended. */
UPIPE_API void upi_peer_settle(upipe_peer *m)
{
    if (upi_peer_settled(m)) return;
    m->comm.quarantine = 1;
    m->comm.stuck = m->ahead;
}

/* The hosts take part in each transfer, which a graph cannot hold. */
UPIPE_API upipe_status upi_peer_uncaptured(upipe_ctx *c, upipe_peer *m)
{
    enum cudaStreamCaptureStatus state;
    UPI_PEER_CUDA(&c->err, m, cudaStreamIsCapturing((cudaStream_t)c->stream, &state));
    if (state == cudaStreamCaptureStatusNone) return UPIPE_OK;
    return upipe_fail(&c->err, UPIPE_ERR_UNSUPPORTED,
                      "rank %d: the hosts take part in each transfer, which a graph cannot hold",
                      m->comm.rank);
}

UPIPE_API upipe_status upi_peer_start(upipe_ctx *c, upipe_comm *comm, const upipe_msg *list, int n)
{
    upipe_peer *m = (upipe_peer *)comm->impl;
    upipe_err *e = &c->err;
    uint64_t call = m->call + 1;
    cudaEvent_t ready = m->link[comm->rank].event[UPI_PEER_READY][call & 1];
    upipe_status status;
    if (upi_peer_broken(m)) return upipe_comm_report(e, &m->comm, UPIPE_OK);
    UPIPE_TRY(upi_peer_uncaptured(c, m));
    UPIPE_TRY(upi_peer_catch_up(e, m));
    UPIPE_TRY(upi_peer_offer(e, m, list, n, call));
    m->list = list;
    m->n = n;
    m->stage = UPI_PEER_PUSHING;
    UPI_PEER_CUDA(e, m, cudaEventRecord(ready, (cudaStream_t)c->stream));
    UPI_PEER_CUDA(e, m, cudaStreamWaitEvent(m->stream, ready, 0));
    status = upi_peer_copy_own(e, m, list, n);
    if (status != UPIPE_OK) {
        upi_peer_settle(m);
        return status;
    }
    upi_peer_publish(m, call);
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_peer_wait(upipe_ctx *c, upipe_comm *comm)
{
    upipe_peer *m = (upipe_peer *)comm->impl;
    upipe_status s = upi_peer_finish(c, m);
    if (s != UPIPE_OK) {
        upi_peer_settle(m);
        return s;
    }
    if (!m->ahead) upi_peer_release(m);
    upi_team_count(comm, m->list, m->n);
    return UPIPE_OK;
}

/* upipe_peer_sync -- waits for ctx->stream, no longer than the deadline: for a host that runs ahead
 *   order   the deadline counts from the call; it covers all that is enqueued now, computing included
 *   errors  TIMEOUT, ABORTED, BACKEND; UNSUPPORTED (the stream is being captured: nothing happens)
 */
UPIPE_API upipe_status upipe_peer_sync(upipe_ctx *c, upipe_peer *m)
{
    int64_t until = upi_net_until(m->comm.deadline);
    int idle = 0;
    UPIPE_TRY(upi_peer_uncaptured(c, m));
    for (;;) {
        int late = upipe_net_now() >= until;
        cudaError_t r = cudaStreamQuery((cudaStream_t)c->stream);
        if (r == cudaSuccess) return upi_peer_catch_up(&c->err, m);
        if (r != cudaErrorNotReady) return upi_peer_checked(&c->err, m, r, "cudaStreamQuery(");
        (void)cudaGetLastError();
        if (upi_peer_broken(m) || late) {
            upipe_status s = late ? upi_team_late(&c->err, &m->comm, "for its stream")
                                  : upipe_comm_report(&c->err, &m->comm, UPIPE_OK);
            upi_peer_settle(m);
            return s;
        }
        upi_net_rest(&idle, UPI_PEER_YIELDS, UPI_PEER_NAP);
    }
}

/* ---- barrier, all-gather: hosts only ---- */

/* Publishes this rank's post and waits until every rank has come to the same call. Once all have come the
 * call succeeds, even if the team is broken meanwhile: a rank that reads an all-gather first, and aborts
 * because of what it finds, must not keep the others from finding it. */
UPIPE_API upipe_status upi_peer_meet(upipe_ctx *c, upipe_peer *m, int kind, const int64_t *values, int n)
{
    uint64_t call = m->call + 1;
    upi_peer_post *post = upi_peer_post_of(m, m->comm.rank, call);
    int64_t until = upi_net_until(m->comm.deadline);
    int idle = 0;
    UPIPE_TRY(upipe_comm_whole(c, &m->comm));
    UPIPE_TRY(upi_peer_catch_up(&c->err, m));
    post->kind = (int32_t)kind;
    post->n = n;
    if (n > 0) memcpy(post->values, values, (size_t)n * sizeof *values);
    upi_peer_publish(m, call);
    for (;;) {
        int r, missing = 0, late = upipe_net_now() >= until;
        for (r = 0; r < m->comm.ranks; ++r) {
            if (!upi_peer_has_posted(m, r, call))
                ++missing;
            else
                UPIPE_TRY(upi_peer_same(&c->err, m, call, r));
        }
        if (missing == 0) return UPIPE_OK;
        UPIPE_TRY(upipe_comm_whole(c, &m->comm));
        if (late) UPIPE_TRY(upi_peer_late(&c->err, m, call));
        upi_net_rest(&idle, UPI_PEER_YIELDS, UPI_PEER_NAP);
    }
}

UPIPE_API upipe_status upi_peer_barrier(upipe_ctx *c, upipe_comm *comm)
{
    return upi_peer_meet(c, (upipe_peer *)comm->impl, UPI_TEAM_BARRIER, NULL, 0);
}

UPIPE_API upipe_status upi_peer_all_gather(upipe_ctx *c, upipe_comm *comm, int64_t *all, const int64_t *mine,
                                           int n)
{
    upipe_peer *m = (upipe_peer *)comm->impl;
    int r;
    UPIPE_TRY(upi_peer_meet(c, m, UPI_TEAM_ALL_GATHER, mine, n));
    for (r = 0; r < comm->ranks; ++r)
        memcpy(all + (size_t)r * (size_t)n, upi_peer_post_of(m, r, m->call)->values, (size_t)n * sizeof *all);
    return UPIPE_OK;
}

/* ---- the team ---- */

/* Publishes that this rank has reached a phase of init, and waits for the others. */
UPIPE_API upipe_status upi_peer_phase(upipe_err *e, upipe_peer *m, int phase)
{
    static const char *const names[] = {"", "come to init", "show their slabs", "try the others' slabs",
                                        "check"};
    int64_t until = upi_net_until(m->comm.deadline);
    int idle = 0, r;
    __atomic_store_n(&m->slot[m->comm.rank].phase, phase, __ATOMIC_RELEASE);
    for (;;) {
        int late = upipe_net_now() >= until;
        for (r = 0; r < m->comm.ranks; ++r)
            if (__atomic_load_n(&m->slot[r].phase, __ATOMIC_ACQUIRE) < phase) break;
        if (r == m->comm.ranks) return UPIPE_OK;
        if (upi_peer_broken(m)) return upipe_comm_report(e, &m->comm, UPIPE_OK);
        if (late) return upi_team_late(e, &m->comm, "for rank %d to %s", r, names[phase]);
        upi_net_rest(&idle, UPI_PEER_YIELDS, UPI_PEER_NAP);
    }
}

/* Compares what ranks must share, and enables access to the others' devices. */
UPIPE_API upipe_status upi_peer_meet_all(upipe_err *e, upipe_peer *m)
{
    const upi_peer_slot *mine = &m->slot[m->comm.rank];
    int r, can;
    for (r = 0; r < m->comm.ranks; ++r) {
        const upi_peer_slot *slot = &m->slot[r];
        if (r == m->comm.rank) continue;
        if (slot->ranks != mine->ranks || slot->processes != mine->processes)
            return upipe_comm_fail(e, &m->comm, UPIPE_ERR_MISMATCH,
                                   "rank %d is of %d %s and rank %d of %d %s", m->comm.rank, mine->ranks,
                                   mine->processes ? "processes" : "threads", r, slot->ranks,
                                   slot->processes ? "processes" : "threads");
        if ((slot->pid == mine->pid) == (mine->processes != 0))
            return upipe_comm_fail(e, &m->comm, UPIPE_ERR_UNSUPPORTED,
                                   "ranks %d and %d are %s, and init says %s", m->comm.rank, r,
                                   mine->processes ? "in one process" : "two processes",
                                   mine->processes ? "processes" : "threads");
        if (m->processes || slot->device == mine->device) continue;
        UPI_PEER_CUDA(e, m, cudaDeviceCanAccessPeer(&can, m->device, slot->device));
        if (!can)
            return upipe_comm_fail(e, &m->comm, UPIPE_ERR_UNSUPPORTED,
                                   "device %d of rank %d cannot reach the memory of device %d of rank %d",
                                   m->device, m->comm.rank, slot->device, r);
        {
            cudaError_t on = cudaDeviceEnablePeerAccess(slot->device, 0);
            if (on == cudaErrorPeerAccessAlreadyEnabled)
                (void)cudaGetLastError();
            else
                UPI_PEER_CUDA(e, m, on);
        }
    }
    return UPIPE_OK;
}

/* Publishes this rank's slabs and events. */
UPIPE_API upipe_status upi_peer_show(upipe_err *e, upipe_peer *m)
{
    upi_peer_slot *mine = &m->slot[m->comm.rank];
    upi_peer_link *own = &m->link[m->comm.rank];
    upipe_err why;
    unsigned how = cudaEventDisableTiming | (m->processes ? (unsigned)cudaEventInterprocess : 0u);
    int i, k, least, greatest;
    UPI_PEER_CUDA(e, m, cudaDeviceGetStreamPriorityRange(&least, &greatest));
    UPI_PEER_CUDA(e, m, cudaStreamCreateWithPriority(&m->stream, cudaStreamNonBlocking, greatest));
    UPI_PEER_CUDA(e, m, cudaEventCreateWithFlags(&m->done, cudaEventDisableTiming));
    for (k = 0; k < UPI_PEER_EVENTS; ++k)
        for (i = 0; i < 2; ++i) {
            UPI_PEER_CUDA(e, m, cudaEventCreateWithFlags(&own->event[k][i], how));
            mine->event[k][i] = (uint64_t)(uintptr_t)own->event[k][i];
            if (m->processes)
                UPI_PEER_CUDA(e, m, cudaIpcGetEventHandle(&mine->event_handle[k][i], own->event[k][i]));
        }
    for (i = 0; i < m->slabs_n; ++i) {
        own->slab[i] = (char *)m->slabs[i].data;
        if (!m->processes) continue;
        if (upi_peer_check(&why, cudaIpcGetMemHandle(&mine->slab_handle[i], own->slab[i]),
                           "cudaIpcGetMemHandle(") != UPIPE_OK)
            return upipe_comm_fail(e, &m->comm, UPIPE_ERR_UNSUPPORTED, "rank %d cannot share slab %d: %s",
                                   m->comm.rank, i, why.text);
    }
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_peer_open(upipe_err *e, upipe_peer *m, int r)
{
    const upi_peer_slot *slot = &m->slot[r];
    upi_peer_link *link = &m->link[r];
    upipe_err mine;
    int i, k;
    for (i = 0; i < slot->slabs_n; ++i) {
        void *p = (void *)(uintptr_t)slot->slab[i];
        if (m->processes &&
            upi_peer_check(&mine,
                           cudaIpcOpenMemHandle(&p, slot->slab_handle[i], cudaIpcMemLazyEnablePeerAccess),
                           "cudaIpcOpenMemHandle(") != UPIPE_OK)
            return upipe_comm_fail(e, &m->comm, UPIPE_ERR_UNSUPPORTED,
                                   "rank %d cannot reach slab %d of rank %d: %s", m->comm.rank, i, r,
                                   mine.text);
        link->slab[i] = (char *)p;
    }
    for (k = 0; k < UPI_PEER_EVENTS; ++k)
        for (i = 0; i < 2; ++i)
            if (m->processes)
                UPI_PEER_CUDA(e, m, cudaIpcOpenEventHandle(&link->event[k][i], slot->event_handle[k][i]));
            else
                link->event[k][i] = (cudaEvent_t)(uintptr_t)slot->event[k][i];
    return UPIPE_OK;
}

/* What rank `from` writes to slab i of rank `to` in init. */
UPIPE_API uint64_t upi_peer_word(int from, int to, int i)
{
    return UPI_PEER_MARK + ((uint64_t)from << 32 | (uint64_t)to << 8 | (uint64_t)i);
}

/* Waits until all that is enqueued has ended. */
UPIPE_API upipe_status upi_peer_drain(upipe_err *e, upipe_peer *m)
{
    int64_t until = upi_net_until(m->comm.deadline);
    int idle = 0, passed, late;
    UPI_PEER_CUDA(e, m, cudaEventRecord(m->done, m->stream));
    for (;;) {
        late = upipe_net_now() >= until;
        UPIPE_TRY(upi_peer_passed(e, m, m->done, &passed));
        if (passed) return UPIPE_OK;
        if (late) return upi_team_late(e, &m->comm, "for its copies to end");
        upi_net_rest(&idle, UPI_PEER_YIELDS, UPI_PEER_NAP);
    }
}

/* Writes word [rank] of every slab of the others, as a transfer would: the words are staged behind the ranks'
 * own in slab 0. */
UPIPE_API upipe_status upi_peer_try(upipe_err *e, upipe_peer *m)
{
    uint64_t words[UPIPE_PEER_SLABS];
    char *stage = m->link[m->comm.rank].slab[0] + sizeof *words * (size_t)m->comm.ranks;
    int rank = m->comm.rank, r, i;
    for (r = 0; r < m->comm.ranks; ++r) {
        if (r == rank) continue;
        for (i = 0; i < m->slot[r].slabs_n; ++i) words[i] = upi_peer_word(rank, r, i);
        UPI_PEER_CUDA(e, m,
                      cudaMemcpyAsync(stage, words, sizeof *words * (size_t)m->slot[r].slabs_n,
                                      cudaMemcpyHostToDevice, m->stream));
        for (i = 0; i < m->slot[r].slabs_n; ++i)
            UPIPE_TRY(upi_peer_copy(e, m, m->link[r].slab[i] + sizeof *words * (size_t)rank, 0,
                                    stage + sizeof *words * (size_t)i, 0, sizeof *words, 1));
    }
    return upi_peer_drain(e, m);
}

UPIPE_API upipe_status upi_peer_tried(upipe_err *e, upipe_peer *m)
{
    uint64_t words[UPIPE_PEER_MAX];
    int rank = m->comm.rank, r, i;
    for (i = 0; i < m->slabs_n; ++i) {
        UPI_PEER_CUDA(e, m,
                      cudaMemcpyAsync(words, m->slabs[i].data, sizeof *words * (size_t)m->comm.ranks,
                                      cudaMemcpyDeviceToHost, m->stream));
        UPIPE_TRY(upi_peer_drain(e, m));
        for (r = 0; r < m->comm.ranks; ++r)
            if (r != rank && words[r] != upi_peer_word(r, rank, i))
                return upipe_comm_fail(
                    e, &m->comm, UPIPE_ERR_UNSUPPORTED,
                    "what rank %d writes to slab %d of rank %d does not arrive at its beginning: "
                    "is it what cudaMalloc returned?",
                    r, i, rank);
    }
    return UPIPE_OK;
}

/* Publishes whether this rank has left the others' slabs, and waits until they have left its own. */
UPIPE_API upipe_status upi_peer_leave(upipe_err *e, upipe_peer *m, int left)
{
    int64_t until = upi_peer_broken(m) ? upi_team_grace(&m->comm) : upi_net_until(m->comm.deadline);
    int idle = 0, r;
    __atomic_store_n(&m->slot[m->comm.rank].left, left, __ATOMIC_RELEASE);
    for (;;) {
        int late = upipe_net_now() >= until;
        for (r = 0; r < m->comm.ranks; ++r)
            if (__atomic_load_n(&m->slot[r].phase, __ATOMIC_ACQUIRE) > 0 &&
                !__atomic_load_n(&m->slot[r].left, __ATOMIC_ACQUIRE))
                break;
        if (r == m->comm.ranks) return UPIPE_OK;
        if (late)
            return upipe_fail(e, UPIPE_ERR_TIMEOUT, "rank %d may still use the slabs of rank %d", r,
                              m->comm.rank);
        upi_net_rest(&idle, UPI_PEER_YIELDS, UPI_PEER_NAP);
    }
}

UPIPE_API upipe_status upi_peer_first(upipe_status s, upipe_status t)
{
    return s != UPIPE_OK ? s : t;
}

UPIPE_API upipe_status upi_peer_close(upipe_err *e, const upipe_peer *m, upi_peer_link *link, int mine)
{
    upipe_status s = UPIPE_OK;
    int i, k;
    for (k = 0; k < UPI_PEER_EVENTS && (mine || m->processes); ++k)
        for (i = 0; i < 2; ++i)
            if (link->event[k][i] != NULL)
                s = upi_peer_first(s,
                                   upi_peer_check(s == UPIPE_OK ? e : NULL,
                                                  cudaEventDestroy(link->event[k][i]), "cudaEventDestroy("));
    for (i = 0; i < UPIPE_PEER_SLABS && !mine && m->processes; ++i)
        if (link->slab[i] != NULL)
            s = upi_peer_first(s,
                               upi_peer_check(s == UPIPE_OK ? e : NULL, cudaIpcCloseMemHandle(link->slab[i]),
                                              "cudaIpcCloseMemHandle("));
    return s;
}

/* upipe_peer_free -- releases what init allocated; legal after a failure and a failed init too
 *   order   every rank calls it, on its own thread, with the team's device current; it returns when no rank
 *           uses this one's slabs and events any more, or after the deadline (half a second, after a failure)
 *   errors  TIMEOUT: copies of this rank do not end, or a rank does not come, and may still use the slabs;
 *           BACKEND. What can be released is: the others' slabs stay mapped while copies to them do not end,
 *           and events stay that a rank may wait for
 */
UPIPE_API upipe_status upipe_peer_free(upipe_peer *m, upipe_err *e)
{
    upipe_status s = UPIPE_OK, t;
    int r, ended = 1;
    if (m == NULL || m->memory == NULL) return s;
    upipe_comm_leave(&m->comm);
    if (m->stream != NULL) ended = upi_peer_ended(m, upi_net_until(m->comm.deadline));
    if (ended == 0) s = upipe_fail(e, UPIPE_ERR_TIMEOUT, "copies of rank %d do not end", m->comm.rank);
    if (ended < 0)
        s = upipe_fail(e, UPIPE_ERR_BACKEND, "cudaStreamQuery fails for copies of rank %d", m->comm.rank);
    for (r = 0; r < m->comm.ranks && ended != 0; ++r)
        if (r != m->comm.rank)
            s = upi_peer_first(s, upi_peer_close(s == UPIPE_OK ? e : NULL, m, &m->link[r], 0));
    t = upi_peer_leave(s == UPIPE_OK ? e : NULL, m, ended != 0);
    if (t == UPIPE_OK) t = upi_peer_close(s == UPIPE_OK ? e : NULL, m, &m->link[m->comm.rank], 1);
    s = upi_peer_first(s, t);
    if (m->done != NULL)
        s = upi_peer_first(
            s, upi_peer_check(s == UPIPE_OK ? e : NULL, cudaEventDestroy(m->done), "cudaEventDestroy("));
    if (m->stream != NULL)
        s = upi_peer_first(
            s, upi_peer_check(s == UPIPE_OK ? e : NULL, cudaStreamDestroy(m->stream), "cudaStreamDestroy("));
    free(m->memory);
    memset(m, 0, sizeof *m);
    return s;
}

/* The arguments, and this rank's own device. */
UPIPE_API upipe_status upi_peer_check_desc(const upipe_peer_desc *d, int device, upipe_err *e)
{
    int i, can = 1;
    if (d->ranks < 1 || d->ranks > UPIPE_PEER_MAX || d->rank < 0 || d->rank >= d->ranks)
        return upipe_fail(e, UPIPE_ERR_ARG, "rank %d of %d; teams of 1 to %d", d->rank, d->ranks,
                          UPIPE_PEER_MAX);
    UPIPE_TRY(upi_team_deadline(e, d->deadline_s));
    if (d->buf == NULL || (uintptr_t)d->buf % 128 != 0)
        return upipe_fail(e, UPIPE_ERR_ARG, "the buffer at %p is not aligned to 128 bytes", d->buf);
    if (d->slabs_n < 1 || d->slabs_n > UPIPE_PEER_SLABS)
        return upipe_fail(e, UPIPE_ERR_ARG, "%d slabs; 1 to %d", d->slabs_n, UPIPE_PEER_SLABS);
    for (i = 0; i < d->slabs_n; ++i) {
        struct cudaPointerAttributes about;
        size_t least = (size_t)(i == 0 ? UPIPE_PEER_LEAST : UPIPE_PEER_LEAST_MORE) * (size_t)d->ranks;
        if (d->slabs[i].data == NULL || d->slabs[i].bytes < least)
            return upipe_fail(e, UPIPE_ERR_ARG, "slab %d is of %zu bytes, not of %zu at least", i,
                              d->slabs[i].bytes, least);
        UPIPE_TRY(upi_peer_check(e, cudaPointerGetAttributes(&about, d->slabs[i].data),
                                 "cudaPointerGetAttributes("));
        if (about.type != cudaMemoryTypeDevice || about.device != device)
            return upipe_fail(e, UPIPE_ERR_ARG, "slab %d is not memory of device %d, which is current", i,
                              device);
    }
    if (!d->processes) return UPIPE_OK;
    UPIPE_TRY(upi_peer_check(e, cudaDeviceGetAttribute(&can, cudaDevAttrIpcEventSupport, device),
                             "cudaDeviceGetAttribute("));
    if (can) return UPIPE_OK;
    return upipe_fail(e, UPIPE_ERR_UNSUPPORTED,
                      "device %d does not share memory and events between processes", device);
}

UPIPE_API upipe_status upi_peer_claim(upipe_peer *m, const upipe_peer_desc *d, upipe_err *e)
{
    size_t n = (size_t)d->ranks, msgs = 2 * n * sizeof(upipe_msg), links = n * sizeof(upi_peer_link);
    char *buf = (char *)d->buf, *memory;
    memory = (char *)calloc(1, links + msgs + n * UPIPE_ALL_GATHER_MAX * sizeof(int64_t));
    if (memory == NULL) return upipe_fail(e, UPIPE_ERR_MEMORY, "no memory for a team of %d ranks", d->ranks);
    m->memory = memory;
    m->link = (upi_peer_link *)(void *)memory;
    m->comm.list = (upipe_msg *)(void *)(memory + links);
    m->comm.gathered = (int64_t *)(void *)(memory + links + msgs);
    m->head = (upi_peer_head *)(void *)buf;
    buf += sizeof *m->head;
    m->slot = (upi_peer_slot *)(void *)buf;
    buf += n * sizeof *m->slot;
    m->recvs = (upi_peer_recv *)(void *)buf;
    buf += 2 * n * n * UPIPE_PEER_RECVS * sizeof *m->recvs;
    m->busy = (int32_t *)(void *)buf;
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_peer_join(upipe_peer *m, upipe_err *e)
{
    upi_peer_slot *mine = &m->slot[m->comm.rank];
    int r, i;
    mine->ranks = m->comm.ranks;
    mine->processes = m->processes != 0;
    mine->slabs_n = m->slabs_n;
    mine->device = m->device;
    mine->pid = (int64_t)getpid();
    for (i = 0; i < m->slabs_n; ++i) {
        mine->slab[i] = m->processes ? 0 : (uint64_t)(uintptr_t)m->slabs[i].data;
        mine->bytes[i] = m->slabs[i].bytes;
    }
    UPIPE_TRY(upi_peer_phase(e, m, UPI_PEER_CAME));
    UPIPE_TRY(upi_peer_meet_all(e, m));
    UPIPE_TRY(upi_peer_show(e, m));
    UPIPE_TRY(upi_peer_phase(e, m, UPI_PEER_SHOWN));
    for (r = 0; r < m->comm.ranks; ++r)
        if (r != m->comm.rank) UPIPE_TRY(upi_peer_open(e, m, r));
    UPIPE_TRY(upi_peer_try(e, m));
    UPIPE_TRY(upi_peer_phase(e, m, UPI_PEER_TRIED));
    UPIPE_TRY(upi_peer_tried(e, m));
    return upi_peer_phase(e, m, UPI_PEER_DONE);
}

/* upipe_peer_init -- makes this rank's end of a team; every rank calls it, and it returns when all have
 *   d       is not kept; the buffer and the slabs are, until upipe_peer_free. init writes to the first
 *           bytes of the slabs
 *   bytes   on the host some 700 a rank; on the device five events and a stream
 *   errors  ARG; UNSUPPORTED on every rank where one cannot reach another's slab, with which and why;
 *           MISMATCH, TIMEOUT, ABORTED, MEMORY, BACKEND (the runtime's text). Then there is nothing to free.
 *           Access between devices that was enabled stays enabled
 */
UPIPE_API upipe_status upipe_peer_init(upipe_peer *m, const upipe_peer_desc *d, upipe_err *e)
{
    static const upipe_comm_ops ops = {
        "peer",        upi_peer_start, upi_peer_wait, upi_peer_barrier, upi_peer_all_gather, upi_peer_failure,
        upi_peer_fail, NULL,           NULL};
    int device = -1, i;
    const upipe_err *first;
    upipe_status s;
    memset(m, 0, sizeof *m);
    UPIPE_TRY(upi_peer_check(e, cudaGetDevice(&device), "cudaGetDevice("));
    UPIPE_TRY(upi_peer_check_desc(d, device, e));
    UPIPE_TRY(upi_peer_claim(m, d, e));
    m->comm.rank = d->rank;
    m->comm.ranks = d->ranks;
    if (m->slot[d->rank].phase != 0) {
        free(m->memory);
        memset(m, 0, sizeof *m);
        return upipe_fail(e, UPIPE_ERR_ARG, "rank %d has used this buffer before", d->rank);
    }
    upi_team_init(&m->comm, &ops, m, d->deadline_s);
    m->processes = d->processes;
    m->device = device;
    m->slabs_n = d->slabs_n;
    for (i = 0; i < d->slabs_n; ++i) m->slabs[i] = d->slabs[i];
    s = upi_peer_join(m, e);
    if (s == UPIPE_OK) return s;
    first = upi_peer_failure(&m->comm); /* these two hold for all ranks, whoever detects them */
    if (first->status == UPIPE_ERR_UNSUPPORTED || first->status == UPIPE_ERR_MISMATCH)
        s = upipe_fail(e, first->status, "%s", first->text);
    upipe_peer_free(m, NULL);
    return s;
}

#endif

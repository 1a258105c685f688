/* upipe_net_nccl.h -- a team of ranks with a GPU each, over NCCL        backend, includes team, comm
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
 * What a rank sends itself is a copy of the compute table. An all-gather or a barrier is an ncclAllGather of
 * 288 bytes a rank through memory that init has allocated.
 *
 * In the stream's order. wait returns when the transfer is enqueued: what the host enqueues on ctx->stream
 * afterwards comes behind it, and the host runs ahead of the device by up to UPIPE_NCCL_AHEAD operations. A block
 * of a pool may be freed at once, as its next use is enqueued behind the transfer. A failure shows in a later call
 * of the team, in ops.sync and what else of the table waits for the stream (upipe_comm_settle), or in
 * upipe_nccl_sync: the one that detects it returns it. After that ops.sync waits for the device alone, while ops.total
 * and copies to ordinary host memory return the failure (upipe_comm_results). A host that makes such a call itself
 * unwinds after a failure (upipe_unwind), which locks the pool. cudaStreamSynchronize would wait for a dead peer for
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
 * Copy engines. NCCL 2.28 moves an all-to-all of equal parts with copy engines, without multiprocessors,
 * where both buffers lie in a symmetric window of a communicator of one machine with CTAPolicy =
 * NCCL_CTA_POLICY_ZERO. The host requests it once, on all ranks, after init:
 *
 *     config.CTAPolicy = NCCL_CTA_POLICY_ZERO;              NCCL cannot report it: the host must set it
 *     upipe_nccl_slab(&slab, bytes, &err);                  as many bytes on every rank, for the pool
 *     upipe_nccl_zero_sm(&ctx, &team, slab, bytes);         team.zero_sm, team.zero_sm_says
 *
 * Each rank writes into the others' windows at the offset of its own receive buffer, and NCCL does not check
 * that the offsets are equal. So the ranks compare shapes and offsets in every transfer before data move,
 * with the ncclAllGather of an all-gather; it needs one block of one multiprocessor for a moment, the data
 * none. If any differ, all ranks send and receive in a group. All of this happens in wait, on a stream of the
 * transport: what the host enqueues on ctx->stream between start and wait runs at the same time. In wait the host
 * waits for the comparison, and not for the data. The comparison is an operation like others: it comes behind the
 * transfers of joined teams that were issued before, and the host waits for those with it. ncclCommAbort does not
 * end a copy engine that waits for a peer's; after the comparison that can happen only if a rank dies, or its
 * device fails, at that moment. In a graph every transfer is a group.
 *
 * Graphs. Where ctx->stream is captured, a transfer is captured with it. An all-gather and a barrier make the host wait, and
 * are refused: calls that compare ranks (upipe_comm_agree) come before the capture, in one pass, or in two
 * where layers of several kinds alternate. All ranks launch their graphs in the same order; upipe_nccl_sync
 * waits for them under the deadline. The counts of bytes are those of the capture.
 *
 * Order. Every rank makes the same sequence of calls, from one thread at a time, abort included. NCCL does
 * not compare what ranks request: lists that do not match, or different calls, end in TIMEOUT at best. An
 * all-gather detects it: it carries number and kind of the call, and returns MISMATCH on all ranks.
 *
 * Deadline. It counts from the moment when a call sees that the stream has reached the transfer: work that was
 * enqueued before is this rank's own. In a blocking communicator NCCL itself waits for peers without a deadline, when two ranks
 * first communicate: where a peer may be missing from the start, make it non-blocking.
 *
 * Failures. TIMEOUT names no rank, as NCCL does not report which one is missing. ABORTED: a rank has aborted,
 * or NCCL reports a remote error. BACKEND: NCCL's text, or the CUDA runtime's. The communicator is then freed
 * with ncclCommAbort, which ends this rank's operations; every later call returns ABORTED. NCCL does not
 * inform the other ranks: each one's own deadline, or an asynchronous error, ends its call, and it aborts
 * too. Transfers in flight set comm->quarantine: peers that have not aborted yet may access their buffers, also
 * those that the host has freed, so that upipe_unwind locks the whole pool.
 * ncclCommAbort itself may wait for work of the device: a call that fails may return that much later than its
 * deadline.
 */
#ifndef UPIPE_NET_NCCL_H
#define UPIPE_NET_NCCL_H

#include "upipe_net_nccl_stream.h"

#include <stdlib.h>
#include <unistd.h>

enum {
    UPIPE_NCCL_ENGINES_NCCL = 22800,  /* NCCL's version at run time, at least */
    UPIPE_NCCL_ENGINES_DRIVER = 12050 /* the driver's, as cudaDriverGetVersion counts */
};

#define UPI_NCCL_MARK INT64_C(0x316c63636e697075) /* "upinccl1" in memory, low byte first */

/* All-gathers one row a rank to m->rows + (1 + r) * UPI_NCCL_ROW, on m->stream, and waits for it. */
UPIPE_API upipe_status upi_nccl_gather_rows(upipe_ctx *c, upipe_nccl *m, const int64_t *values, int n)
{
    int r;
    UPIPE_TRY(upi_nccl_open(c, m));
    m->rows_come = 1;
    memset(m->rows, 0, UPI_NCCL_ROW * sizeof *m->rows);
    m->rows[0] = UPI_NCCL_MARK;
    m->rows[1] = m->call;
    m->rows[2] = m->kind;
    m->rows[3] = n;
    if (n > 0) memcpy(m->rows + UPI_NCCL_HEAD, values, (size_t)n * sizeof *values);
    UPI_NCCL_CUDA(
        c, m,
        cudaMemcpyAsync(m->row, m->rows, UPI_NCCL_ROW * sizeof *m->row, cudaMemcpyHostToDevice, m->stream));
    UPIPE_TRY(upi_nccl_enqueued(
        c, m, ncclAllGather(m->row, m->row + UPI_NCCL_ROW, UPI_NCCL_ROW, ncclInt64, m->nccl, m->stream),
        "ncclAllGather("));
    UPIPE_TRY(upi_nccl_drain(c, m, 0));
    m->rows_come = 0;
    for (r = 0; r < m->comm.ranks; ++r) {
        const int64_t *theirs = m->rows + (size_t)(1 + r) * UPI_NCCL_ROW;
        if (theirs[0] != UPI_NCCL_MARK)
            return upi_comm_fail(&c->err, &m->comm, UPIPE_ERR_MISMATCH,
                                 "rank %d gathers something else than rank %d", r, m->comm.rank);
        UPIPE_TRY(upi_team_same(&c->err, &m->comm, m->kind, n, r, theirs[2], theirs[3]));
        if (theirs[1] != m->call)
            return upi_comm_fail(&c->err, &m->comm, UPIPE_ERR_MISMATCH,
                                 "rank %d is in its call %lld and rank %d in its %lld", m->comm.rank,
                                 (long long)m->call, r, (long long)theirs[1]);
    }
    return UPIPE_OK;
}

/* Value i of rank r, of the last upi_nccl_gather_rows. */
UPIPE_API int64_t upi_nccl_value(const upipe_nccl *m, int r, int i)
{
    return m->rows[(size_t)(1 + r) * UPI_NCCL_ROW + UPI_NCCL_HEAD + (size_t)i];
}

/* ---- transfers ---- */

/* Whether all parts are equal, and contiguous in rank order in both buffers. *part: bytes for one rank. */
UPIPE_API int upi_nccl_is_all_to_all(const upipe_nccl *m, const upipe_msg *list, int n, size_t *part)
{
    int p;
    if (m->grouped || n != m->comm.ranks || list[0].send_bytes == 0) return 0;
    *part = list[0].send_bytes * (size_t)list[0].count;
    for (p = 0; p < n; ++p) {
        const upipe_msg *s = &list[p];
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

/* Inside a group: sends and receives of the list. Returns the first result that is a failure. */
UPIPE_API ncclResult_t upi_nccl_list(upipe_ctx *c, const upipe_nccl *m, const upipe_msg *list, int n,
                                     const char **what)
{
    cudaStream_t stream = (cudaStream_t)c->stream;
    int i;
    for (i = 0; i < n; ++i) {
        const upipe_msg *s = &list[i];
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

/* One group on ctx->stream. */
UPIPE_API upipe_status upi_nccl_post_group(upipe_ctx *c, upipe_nccl *m, const upipe_msg *list, int n)
{
    const char *what = "";
    ncclResult_t inside, end;
    int i, others = 0;
    m->stream = (cudaStream_t)c->stream;
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

#if UPI_NCCL_ENGINES
UPIPE_API upipe_status upi_nccl_post_all(upipe_ctx *c, upipe_nccl *m, const upipe_msg *list, size_t part)
{
    UPIPE_TRY(upi_nccl_open(c, m));
    return upi_nccl_enqueued(
        c, m, ncclAlltoAll(list[0].send, list[0].recv, part, ncclInt8, m->nccl, m->stream), "ncclAlltoAll(");
}
#endif

UPIPE_API upipe_status upi_nccl_post(upipe_ctx *c, upipe_nccl *m, const upipe_msg *list, int n)
{
#if UPI_NCCL_ENGINES
    size_t part;
    /* with zero_sm NCCL would use copy engines, and the ranks have not compared offsets */
    int grouped = m->zero_sm || m->comm.ranks == 1;
    if (!grouped && upi_nccl_is_all_to_all(m, list, n, &part)) return upi_nccl_post_all(c, m, list, part);
#endif
    return upi_nccl_post_group(c, m, list, n);
}

/* The offset in the slab of `bytes` bytes at p; -1: they are not inside. */
UPIPE_API int64_t upi_nccl_offset(const upipe_nccl *m, const void *p, size_t bytes)
{
    size_t at = (size_t)((uintptr_t)p - (uintptr_t)m->slab);
    return (uintptr_t)p >= (uintptr_t)m->slab && at <= m->slab_bytes && bytes <= m->slab_bytes - at
               ? (int64_t)at
               : -1;
}

/* A transfer of a team with copy engines, in wait: all ranks see the same rows, and decide alike. */
UPIPE_API upipe_status upi_nccl_move(upipe_ctx *c, upipe_nccl *m)
{
#if UPI_NCCL_ENGINES
    int64_t mine[2] = {0, -1}; /* bytes of a part, 0: not for copy engines; offset of the receive buffer */
    size_t part = 0;
    int r, same = 1;
    if (upi_nccl_is_all_to_all(m, m->list, m->n, &part) &&
        upi_nccl_offset(m, m->list[0].send, part * (size_t)m->n) >= 0 &&
        (mine[1] = upi_nccl_offset(m, m->list[0].recv, part * (size_t)m->n)) >= 0)
        mine[0] = (int64_t)part;
    m->stream = m->side;
    UPIPE_TRY(upi_nccl_gather_rows(c, m, mine, 2));
    for (r = 0; r < m->comm.ranks; ++r)
        same = same && upi_nccl_value(m, r, 0) == mine[0] && upi_nccl_value(m, r, 1) == mine[1];
    if (same && mine[0] > 0) {
        UPI_NCCL_CUDA(c, m, cudaStreamWaitEvent(m->side, m->ready, 0));
        ++m->engine_transfers;
        UPIPE_TRY(upi_nccl_post_all(c, m, m->list, part));
        UPI_NCCL_CUDA(c, m,
                      cudaStreamWaitEvent((cudaStream_t)c->stream, upi_nccl_op_at(m, m->begun - 1)->done, 0));
        return UPIPE_OK;
    }
#endif
    return upi_nccl_post_group(c, m, m->list, m->n);
}

UPIPE_API upipe_status upi_nccl_start(upipe_ctx *c, upipe_comm *comm, const upipe_msg *list, int n)
{
    upipe_nccl *m = (upipe_nccl *)comm->impl;
    UPIPE_TRY(upi_nccl_begin(c, m, UPI_TEAM_TRANSFER));
    m->list = list;
    m->n = n;
    if (!m->zero_sm || m->captured) return upi_nccl_post(c, m, list, n);
    UPI_NCCL_CUDA(c, m, cudaEventRecord(m->ready, m->stream));
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_nccl_wait(upipe_ctx *c, upipe_comm *comm)
{
    upipe_nccl *m = (upipe_nccl *)comm->impl;
    UPIPE_TRY(upi_comm_whole(c, comm));
    if (m->zero_sm && !m->captured) UPIPE_TRY(upi_nccl_move(c, m));
    if (!m->ahead && !m->captured) UPIPE_TRY(upi_nccl_drain(c, m, 0));
    upi_team_count(comm, m->list, m->n);
    return UPIPE_OK;
}

/* Before the host waits for a stream. A team that has failed holds up none. */
UPIPE_API upipe_status upi_nccl_settle(upipe_ctx *c, upipe_comm *comm)
{
    upipe_nccl *m = (upipe_nccl *)comm->impl;
    return m->broken ? UPIPE_OK : upi_nccl_drain(c, m, 0);
}

/* ---- barrier, all-gather ---- */

UPIPE_API upipe_status upi_nccl_meet(upipe_ctx *c, upipe_nccl *m, int kind, const int64_t *values, int n)
{
    UPIPE_TRY(upi_nccl_begin(c, m, kind));
    return upi_nccl_gather_rows(c, m, values, n);
}

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

/* ---- copy engines ---- */

/* upipe_nccl_slab -- allocates device memory that copy engines can reach, for a pool; on the current device,
 *                    which is the team's
 *   errors  MEMORY or BACKEND with NCCL's text; UNSUPPORTED before NCCL 2.28
 */
UPIPE_API upipe_status upipe_nccl_slab(void **out, size_t bytes, upipe_err *e)
{
    *out = NULL;
    if (bytes == 0) return UPIPE_OK;
#if UPI_NCCL_ENGINES
    {
        size_t left = 0, total = 0;
        ncclResult_t r = ncclMemAlloc(out, bytes);
        if (r == ncclSuccess) return UPIPE_OK;
        *out = NULL;
        if (cudaMemGetInfo(&left, &total) == cudaSuccess && bytes > left)
            return upipe_fail(e, UPIPE_ERR_MEMORY,
                              "a slab of %zu bytes, and %zu of the device's %zu are free", bytes, left,
                              total);
        return upi_nccl_check(e, NULL, r, "ncclMemAlloc(");
    }
#else
    return upipe_fail(e, UPIPE_ERR_UNSUPPORTED, "a slab for copy engines needs NCCL 2.28");
#endif
}

/* upipe_nccl_slab_free -- frees it, after upipe_nccl_free; nothing for NULL
 *   errors  BACKEND: NCCL's text
 */
UPIPE_API upipe_status upipe_nccl_slab_free(void *slab, upipe_err *e)
{
#if UPI_NCCL_ENGINES
    if (slab != NULL) return upi_nccl_check(e, NULL, ncclMemFree(slab), "ncclMemFree(");
#endif
    (void)slab;
    (void)e;
    return UPIPE_OK;
}

#if UPI_NCCL_ENGINES

enum { UPI_NCCL_SLAB, UPI_NCCL_VERSION, UPI_NCCL_DRIVER, UPI_NCCL_NODE, UPI_NCCL_NUMBERS };
enum { UPI_NCCL_WINDOW, UPI_NCCL_DOMAIN, UPI_NCCL_RESULTS }; /* of the registration */

/* ncclTeamLsa: the ranks whose memory NCCL reaches by loads and stores; 0 of them where it fails. Its header,
 * nccl_device/core.h, is for device code, and compiles with warnings in C. */
typedef struct upi_nccl_domain {
    int ranks, rank, stride;
} upi_nccl_domain;
#ifdef __cplusplus
extern "C" {
#endif
upi_nccl_domain upi_nccl_domain_of(ncclComm_t comm) __asm__("ncclTeamLsa");
#ifdef __cplusplus
}
#endif

/* This machine, as NCCL tells machines apart: by name and by boot. */
UPIPE_API int64_t upi_nccl_node(void)
{
    char name[256] = "", boot[64] = "";
    uint64_t hash;
    FILE *f = fopen("/proc/sys/kernel/random/boot_id", "r");
    if (f != NULL) {
        boot[fread(boot, 1, sizeof boot - 1, f)] = 0;
        fclose(f);
    }
    (void)gethostname(name, sizeof name - 1);
    hash = upi_hash_bytes(UPI_HASH, name, strlen(name));
    return (int64_t)upi_hash_bytes(hash, boot, strlen(boot));
}

/* What prevents copy engines, from the numbers of all ranks: the same on all. NULL: nothing. */
UPIPE_API const char *upi_nccl_objection(upipe_nccl *m)
{
    char *text = m->zero_sm_says;
    size_t buf = sizeof m->zero_sm_says;
    int r;
    for (r = 0; r < m->comm.ranks; ++r) {
        int64_t bytes = upi_nccl_value(m, r, UPI_NCCL_SLAB), version = upi_nccl_value(m, r, UPI_NCCL_VERSION);
        int64_t driver = upi_nccl_value(m, r, UPI_NCCL_DRIVER);
        if (version < UPIPE_NCCL_ENGINES_NCCL)
            snprintf(text, buf, "grouped sends and receives: rank %d has NCCL %lld, copy engines need %d", r,
                     (long long)version, UPIPE_NCCL_ENGINES_NCCL);
        else if (driver < UPIPE_NCCL_ENGINES_DRIVER)
            snprintf(text, buf,
                     "grouped sends and receives: rank %d has a driver for CUDA %lld, copy engines need %d",
                     r, (long long)driver, UPIPE_NCCL_ENGINES_DRIVER);
        else if (bytes <= 0)
            snprintf(text, buf, "grouped sends and receives: rank %d has no slab", r);
        else if (bytes != upi_nccl_value(m, 0, UPI_NCCL_SLAB))
            snprintf(text, buf,
                     "grouped sends and receives: the slab is of %lld bytes on rank 0 and of %lld on rank %d",
                     (long long)upi_nccl_value(m, 0, UPI_NCCL_SLAB), (long long)bytes, r);
        else if (upi_nccl_value(m, r, UPI_NCCL_NODE) != upi_nccl_value(m, 0, UPI_NCCL_NODE))
            snprintf(text, buf, "grouped sends and receives: ranks 0 and %d are on two machines", r);
        else
            continue;
        return text;
    }
    return NULL;
}

/* What prevents them after the registration, from its results on all ranks. */
UPIPE_API const char *upi_nccl_incomplete(upipe_nccl *m)
{
    char *text = m->zero_sm_says;
    size_t buf = sizeof m->zero_sm_says;
    int r;
    for (r = 0; r < m->comm.ranks; ++r) {
        const int64_t ranks = upi_nccl_value(m, r, UPI_NCCL_DOMAIN);
        if (!upi_nccl_value(m, r, UPI_NCCL_WINDOW))
            snprintf(text, buf, "grouped sends and receives: NCCL makes no symmetric window for rank %d", r);
        else if (ranks != m->comm.ranks)
            snprintf(text, buf,
                     "grouped sends and receives: for NCCL %lld of %d ranks reach the memory of rank %d by "
                     "loads and stores",
                     (long long)ranks, m->comm.ranks, r);
        else
            continue;
        return text;
    }
    return NULL;
}

/* Registers the slab; NCCL may leave the window NULL, and call it success. */
UPIPE_API upipe_status upi_nccl_register(upipe_ctx *c, upipe_nccl *m)
{
    ncclResult_t r;
    int idle = 0, busy = 1;
    int64_t until = upi_net_until(m->comm.deadline);
    m->window = NULL;
    r = ncclCommWindowRegister(m->nccl, m->slab, m->slab_bytes, &m->window, NCCL_WIN_COLL_SYMMETRIC);
    if (r != ncclInProgress) return upi_nccl_checked(c, m, r, "ncclCommWindowRegister(");
    while (busy) {
        UPIPE_TRY(upi_nccl_state(c, m, &busy));
        if (busy && upipe_net_now() >= until)
            return upi_team_late(&c->err, &m->comm, "for ranks to register their slabs");
        if (busy) upi_net_rest(&idle, UPI_NCCL_YIELDS, UPI_NCCL_NAP);
    }
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_nccl_request(upipe_ctx *c, upipe_nccl *m, void *slab, size_t bytes)
{
    int64_t mine[UPI_NCCL_NUMBERS], made[UPI_NCCL_RESULTS];
    int version = 0, driver = 0, least = 0, most = 0;
    UPI_NCCL(c, m, ncclGetVersion(&version));
    UPI_NCCL_CUDA(c, m, cudaDriverGetVersion(&driver));
    UPI_NCCL_CUDA(c, m, cudaDeviceGetStreamPriorityRange(&least, &most));
    /* highest priority: the one block of the comparison must not queue behind those of attention */
    UPI_NCCL_CUDA(c, m, cudaStreamCreateWithPriority(&m->side, cudaStreamNonBlocking, most));
    mine[UPI_NCCL_SLAB] = slab != NULL ? (int64_t)bytes : 0;
    mine[UPI_NCCL_VERSION] = version;
    mine[UPI_NCCL_DRIVER] = driver;
    mine[UPI_NCCL_NODE] = upi_nccl_node();
    UPIPE_TRY(upi_nccl_meet(c, m, UPI_TEAM_ALL_GATHER, mine, UPI_NCCL_NUMBERS));
    if (upi_nccl_objection(m) != NULL) return UPIPE_OK;
    m->slab = (char *)slab;
    m->slab_bytes = bytes;
    UPIPE_TRY(upi_nccl_register(c, m));
    made[UPI_NCCL_WINDOW] = m->window != NULL;
    made[UPI_NCCL_DOMAIN] = m->window != NULL ? upi_nccl_domain_of(m->nccl).ranks : 0;
    if (m->window != NULL && made[UPI_NCCL_DOMAIN] < 1)
        return upi_comm_fail(&c->err, &m->comm, UPIPE_ERR_BACKEND, "rank %d: ncclTeamLsa has failed",
                             m->comm.rank);
    UPIPE_TRY(upi_nccl_meet(c, m, UPI_TEAM_ALL_GATHER, made, UPI_NCCL_RESULTS));
    if (upi_nccl_incomplete(m) != NULL) {
        m->grouped = 1; /* or ranks that have a window would use copy engines */
        return UPIPE_OK;
    }
    snprintf(
        m->zero_sm_says, sizeof m->zero_sm_says,
        "all-to-alls inside the slabs of %zu bytes are asked of the copy engines, the rest is grouped; NCCL "
        "%d, driver for CUDA %d",
        bytes, version, driver);
    m->zero_sm = 1;
    return UPIPE_OK;
}

#endif

/* upipe_nccl_zero_sm -- requests transfers by copy engines; m->zero_sm and m->zero_sm_says hold the outcome
 *                       and are the same on all ranks
 *   slab    of upipe_nccl_slab, the same number of bytes on all ranks, kept until upipe_nccl_free; NCCL
 *           refuses other memory (BACKEND)
 *   order   all ranks, once, before or between transfers; the communicator was made with CTAPolicy =
 *           NCCL_CTA_POLICY_ZERO, which NCCL cannot report
 *   errors  UPIPE_OK also where copy engines are not available, and transfers stay as before. ARG if
 *           requested twice; others as upipe_comm_wait
 */
UPIPE_API upipe_status upipe_nccl_zero_sm(upipe_ctx *c, upipe_nccl *m, void *slab, size_t bytes)
{
    UPIPE_TRY(upi_comm_idle(c, &m->comm));
    if (m->zero_sm_says[0] != 0)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "copy engines are requested twice");
    UPIPE_TRY(upi_comm_whole(c, &m->comm));
#if UPI_NCCL_ENGINES
    return upi_nccl_request(c, m, slab, bytes);
#else
    (void)slab;
    (void)bytes;
    snprintf(m->zero_sm_says, sizeof m->zero_sm_says,
             "grouped sends and receives: built with NCCL %d, copy engines need %d", NCCL_VERSION_CODE,
             UPIPE_NCCL_ENGINES_NCCL);
    return UPIPE_OK;
#endif
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
    UPIPE_TRY(upi_comm_idle(c, &m->comm));
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

UPIPE_API upipe_status upi_nccl_first(upipe_status s, upipe_status t)
{
    return s != UPIPE_OK ? s : t;
}

/* The team's events: 0 .. 2 * UPIPE_NCCL_AHEAD. */
UPIPE_API cudaEvent_t *upi_nccl_event(upipe_nccl *m, int i)
{
    if (i == 2 * UPIPE_NCCL_AHEAD) return &m->ready;
    return i % 2 == 0 ? &m->op[i / 2].reached : &m->op[i / 2].done;
}

/* upipe_nccl_free -- releases what init allocated; legal after a failure and a failed init too
 *   order   no call is in progress, and the team's device is the current one. Waits for what is in flight, within
 *           the deadline, and then for the device. m->nccl keeps its value: the host destroys its communicator
 *           unless that is NULL. Teams that are joined are all freed before one is used again
 *   errors  TIMEOUT, ABORTED: a transfer does not end; BACKEND: the runtime's text. Everything that can be
 *           released is. m->comm.quarantine keeps its value: where it is set, peers may still access buffers of the
 *           pool (upipe_mem_quarantine)
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
    if (s != UPIPE_OK && e != NULL) *e = c.err;
    while (before->next != NULL && before->next != m) before = before->next;
    before->next = m->next;
    nccl = m->nccl;
#if UPI_NCCL_ENGINES
    if (m->window != NULL && nccl != NULL) /* else the abort has freed it */
        s = upi_nccl_check(e, nccl, ncclCommWindowDeregister(nccl, m->window), "ncclCommWindowDeregister(");
#endif
    if (m->side != NULL)
        s = upi_nccl_first(s, upi_nccl_check_cuda(e, cudaStreamDestroy(m->side), "cudaStreamDestroy("));
    if (m->row != NULL) s = upi_nccl_first(s, upi_nccl_check_cuda(e, cudaFree(m->row), "cudaFree("));
    if (m->rows != NULL)
        s = upi_nccl_first(s, upi_nccl_check_cuda(e, cudaFreeHost(m->rows), "cudaFreeHost("));
    for (i = 0; i <= 2 * UPIPE_NCCL_AHEAD; ++i) {
        cudaEvent_t event = *upi_nccl_event(m, i);
        if (event != NULL)
            s = upi_nccl_first(s, upi_nccl_check_cuda(e, cudaEventDestroy(event), "cudaEventDestroy("));
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
        UPIPE_TRY(upi_nccl_check(e, nccl, ncclCommGetAsyncError(nccl, &state), "ncclCommGetAsyncError("));
        if (state != ncclInProgress) return upi_nccl_check(e, nccl, state, "the communicator(");
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
    UPIPE_TRY(upi_nccl_check_cuda(e, cudaMalloc(&rows, bytes), "cudaMalloc("));
    m->row = (int64_t *)rows;
    UPIPE_TRY(upi_nccl_check_cuda(e, cudaHostAlloc(&pinned, bytes, cudaHostAllocDefault), "cudaHostAlloc("));
    m->rows = (int64_t *)pinned;
    for (i = 0; i <= 2 * UPIPE_NCCL_AHEAD; ++i)
        UPIPE_TRY(upi_nccl_check_cuda(e,
                                      cudaEventCreateWithFlags(upi_nccl_event(m, i), cudaEventDisableTiming),
                                      "cudaEventCreateWithFlags("));
    return UPIPE_OK;
}

/* upipe_nccl_init -- makes this rank's end of a team of all ranks of an NCCL communicator
 *   nccl        the host's; its device is the current one. Waits for a non-blocking one to be made
 *   deadline_s  seconds that one call may wait for its peers; 0 = UPIPE_DEADLINE_DEFAULT. Each call reads
 *               comm.deadline, which each rank may change
 *   bytes       288 * (1 + ranks) on the device and as many pinned, 384 * ranks of ordinary memory
 *   errors      ARG, TIMEOUT, ABORTED, MEMORY, BACKEND (NCCL's or the runtime's text). Then there is nothing
 *               to free here, and the host ends its communicator: ncclCommAbort, not ncclCommDestroy
 */
UPIPE_API upipe_status upipe_nccl_init(upipe_nccl *m, ncclComm_t nccl, double deadline_s, upipe_err *e)
{
    static const upipe_comm_ops ops = {"nccl",           upi_nccl_start,      upi_nccl_wait,
                                       upi_nccl_barrier, upi_nccl_all_gather, upi_nccl_failure,
                                       upi_nccl_fail,    upi_nccl_settle};
    int theirs = -1, current = -1;
    upipe_status s;
    memset(m, 0, sizeof *m);
    UPIPE_TRY(upi_team_deadline(e, deadline_s));
    if (nccl == NULL) return upipe_fail(e, UPIPE_ERR_ARG, "a team without a communicator");
    if (!(deadline_s > 0)) deadline_s = UPIPE_DEADLINE_DEFAULT;
    UPIPE_TRY(upi_nccl_made(nccl, deadline_s, e));
    UPIPE_TRY(upi_nccl_check(e, nccl, ncclCommCount(nccl, &m->comm.ranks), "ncclCommCount("));
    UPIPE_TRY(upi_nccl_check(e, nccl, ncclCommUserRank(nccl, &m->comm.rank), "ncclCommUserRank("));
    UPIPE_TRY(upi_nccl_check(e, nccl, ncclCommCuDevice(nccl, &theirs), "ncclCommCuDevice("));
    UPIPE_TRY(upi_nccl_check_cuda(e, cudaGetDevice(&current), "cudaGetDevice("));
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

/* upipe_comm.h -- the transport table: transfers, failures, agreement of ranks; teams without a transport
 *
 * A transfer is a batch of point-to-point sends and receives. Each rank passes a list of messages: what it
 * sends to which peer, and what it receives from which. An all-to-all, a shift round a ring and an all-gather
 * of tensors are such lists.
 *
 *     upipe_comm_start(ctx, ctx->team, list, n);   every rank of the team, in the same order
 *     ...                                          the buffers of the list belong to the transport
 *     upipe_comm_wait(ctx, ctx->team);             the transfer is complete
 *
 * The k-th send from rank r to rank p fills the k-th receive at rank p from rank r:
 *
 *     recv[i * recv_stride + j] at p  =  send[i * send_stride + j] at r      0 <= i < count, 0 <= j < bytes
 *
 * Deadline. No call waits for its peers longer than comm->deadline. A call that fails may then wait until its
 * buffers are no longer accessed, for the deadline or half a second, whichever is less.
 *
 * Failures. The first failure of any rank breaks the team for good. The rank that detects it returns its
 * status; every later call on every rank fails at once with the same sentence, most with UPIPE_ERR_ABORTED.
 *
 * Parts. A rank that has several communicators, of all ranks, a team, a ring, says how they belong together
 * (upipe_comm_part): then sentences name ranks by their number among all, and a rank that is missed by others, and
 * itself waits in another communicator, is not the one to be named.
 *
 * Quarantine. Where a peer may still access the buffers of a failed transfer, comm->quarantine is set: their
 * memory must neither be used again nor freed before the peers have ended. A pool keeps it (upi_mem_quarantine).
 *
 * The host makes and frees communicators with the headers in net/. The library only uses them.
 */
#ifndef UPIPE_COMM_H
#define UPIPE_COMM_H

#include "upipe_mem.h"
#include "upipe_ops.h"

/* upipe_msg -- what a rank sends to one peer, receives from it, or both, in one transfer
 *   send  `count` blocks of send_bytes; block i begins at send + i * send_stride. NULL with 0 bytes: no send
 *   recv  the same with recv_bytes and recv_stride
 *   peer  a rank of the team; the rank itself means a local copy
 */
typedef struct upipe_msg {
    const void *send;
    void *recv;
    size_t send_bytes, recv_bytes;   /* of one block */
    size_t send_stride, recv_stride; /* bytes between blocks */
    int64_t count;                   /* blocks, the same on both ranks */
    int peer;
} upipe_msg;

/* upipe_msg_add -- appends one peer's messages to a list of n; appends nothing if both sizes are 0
 *   count   blocks, sent and received
 */
UPIPE_API void upipe_msg_add(upipe_msg *list, int *n, int peer, int64_t count, const void *send,
                             size_t send_bytes, size_t send_stride, void *recv, size_t recv_bytes,
                             size_t recv_stride)
{
    upipe_msg *msg = list + *n;
    if (send_bytes == 0 && recv_bytes == 0) return;
    ++*n;
    msg->peer = peer;
    msg->count = count;
    msg->send = send_bytes > 0 ? send : NULL;
    msg->recv = recv_bytes > 0 ? recv : NULL;
    msg->send_bytes = send_bytes;
    msg->recv_bytes = recv_bytes;
    msg->send_stride = send_stride;
    msg->recv_stride = recv_stride;
}

struct upipe_comm;

/* What a transport implements. Hosts call the upipe_comm_* functions, which check arguments and count bytes.
 *   failure  the team's first failure, as far as this rank knows; NULL if there is none
 *   fail     makes this the team's first failure, informs the other ranks and returns nonzero. If there is
 *            one already, it does nothing and returns 0. A NULL entry: the team cannot fail
 *   settle   returns when no transfer that `wait` has left to the streams is in progress; a NULL entry: `wait`
 *            leaves none. What waits for a stream calls it first (upi_comm_settle)
 *   gather   a whole transfer, start and wait: `bytes` from `mine` of each rank come to `all`, in rank order, on every rank.
 *            mine is this rank's place in `all`, or elsewhere. A NULL entry: upi_slices_gather sends messages
 */
typedef struct upipe_comm_ops {
    const char *name;
    upipe_status (*start)(upipe_ctx *c, struct upipe_comm *comm, const upipe_msg *list, int n);
    upipe_status (*wait)(upipe_ctx *c, struct upipe_comm *comm);
    upipe_status (*barrier)(upipe_ctx *c, struct upipe_comm *comm);
    upipe_status (*all_gather)(upipe_ctx *c, struct upipe_comm *comm, int64_t *all, const int64_t *mine,
                               int n);
    const upipe_err *(*failure)(const struct upipe_comm *comm);
    int (*fail)(struct upipe_comm *comm, upipe_status s, const char *why);
    upipe_status (*settle)(upipe_ctx *c, struct upipe_comm *comm);
    upipe_status (*gather)(upipe_ctx *c, struct upipe_comm *comm, void *all, const void *mine, size_t bytes);
} upipe_comm_ops;

enum {
    UPIPE_ALL_GATHER_MAX = 40,
    UPIPE_AGREED_MAX = 4,
    UPIPE_COMM_HOST = 64 /* bytes of a machine's name */
};

/* A change of descriptions that all ranks have compared: behind the row with hash `after` came `next`. */
typedef struct upipe_agreed {
    uint64_t after, next;
} upipe_agreed;

typedef struct upipe_comm {
    upipe_comm_ops ops;
    void *impl;          /* the transport's own state */
    upipe_msg *list;     /* space for 2 * ranks messages, for the calls that build lists */
    int64_t *gathered;   /* space for ranks * UPIPE_ALL_GATHER_MAX numbers, for upi_agree */
    int64_t sent_bytes;  /* sent to other ranks so far; copies to the rank itself do not count */
    int64_t moved_bytes; /* received from other ranks so far, counted by the transport */
    double deadline;     /* seconds that one call may wait for its peers */
    upipe_agreed agreed[UPIPE_AGREED_MAX]; /* the latest changes, the newest first */
    uint64_t agreed_last, agreed_after; /* hashes of the last description, and of all in a row that it ends */
    int rank, ranks;
    struct upipe_comm *world; /* the communicator of which this one is a part, or NULL */
    struct upipe_comm *part;  /* of a world the first part, of a part the next one, or NULL */
    int first, step;          /* of a part: its rank i has the number first + i * step in its world */
    const char (*hosts)[UPIPE_COMM_HOST]; /* of a world [ranks]: machines, for sentences; or NULL */
    int started;                          /* a transfer is in progress: between start and wait */
    int reported;                         /* this rank has returned the team's failure before */
    int quarantine;                       /* peers may still access the buffers of a failed transfer */
} upipe_comm;

#define UPIPE_DEADLINE_DEFAULT 30.0

/* ---- communicators of one rank ---- */

/* upipe_comm_part -- rank i of `part` is rank first + i * step of `world`, which is of the same transport
 *
 * Over threads, sockets and MPI a failure of one of them breaks all, and the deadline's sentence names the rank for which the
 * others wait in the end. NCCL has upipe_nccl_join for failures, and does not know who is missing.
 *
 *   order   after the init of both, by all ranks of `part`, while neither is in a call. The transport's free of a part takes
 *           it out, and comes before that of the world
 */
UPIPE_API void upipe_comm_part(upipe_comm *part, upipe_comm *world, int first, int step)
{
    part->world = world;
    part->first = first;
    part->step = step;
    part->part = world->part;
    world->part = part;
}

/* The end of a part, or of no part. */
UPIPE_API void upi_comm_leave(upipe_comm *part)
{
    upipe_comm *before = part->world;
    while (before != NULL && before->part != part) before = before->part;
    if (before != NULL) before->part = part->part;
    part->world = NULL;
}

/* The communicator of which this one is a part, or itself; its parts follow it by `part`. */
UPIPE_API upipe_comm *upi_comm_world(const upipe_comm *comm)
{
    return comm->world != NULL ? comm->world : (upipe_comm *)(uintptr_t)comm;
}

/* What rank r is called in a sentence. */
UPIPE_API int upi_comm_called(const upipe_comm *comm, int r)
{
    return comm->world != NULL ? comm->first + r * comm->step : r;
}

/* ---- failures, of every transport alike ---- */

/* Returns the failure of a broken team. own: the status, if this call has detected the failure, else
 * UPIPE_OK. Then a MISMATCH is returned once, as any rank may have caused it, and ABORTED otherwise. */
UPIPE_API upipe_status upi_comm_report(upipe_err *e, upipe_comm *comm, upipe_status own)
{
    const upipe_err *first = comm->ops.failure(comm);
    int mismatch = !comm->reported && first->status == UPIPE_ERR_MISMATCH;
    if (own == UPIPE_OK) own = mismatch ? UPIPE_ERR_MISMATCH : UPIPE_ERR_ABORTED;
    comm->reported = 1;
    return upipe_fail(e, own, "%s", first->text);
}

/* UPIPE_OK while the team is whole. */
UPIPE_API upipe_status upi_comm_whole(upipe_ctx *c, upipe_comm *comm)
{
    return comm->ops.failure(comm) == NULL ? UPIPE_OK : upi_comm_report(&c->err, comm, UPIPE_OK);
}

/* Breaks the team with this sentence, unless it is broken already; returns what the rank must return. */
__attribute__((unused, format(printf, 4, 5))) static inline upipe_status upipe_comm_fail(
    upipe_err *e, upipe_comm *comm, upipe_status s, const char *format, ...)
{
    upipe_err mine;
    va_list args;
    va_start(args, format);
    vsnprintf(mine.text, sizeof mine.text, format, args);
    va_end(args);
    return upi_comm_report(e, comm, comm->ops.fail(comm, s, mine.text) ? s : UPIPE_OK);
}

/* upipe_comm_abort -- breaks the team: current and later calls of every rank fail with the sentence `why` */
UPIPE_API void upipe_comm_abort(upipe_comm *comm, const char *why)
{
    if (comm != NULL && comm->ops.fail != NULL)
        comm->ops.fail(comm, UPIPE_ERR_ABORTED, why != NULL ? why : "aborted by the host");
}

/* ---- messages: the k-th send meets the k-th receive ---- */

enum { UPIPE_MSG_SEND, UPIPE_MSG_RECV };

/* The first message, of number i or a later one, that sends to `peer`, or receives from it; n: there is none. */
UPIPE_API int upi_msg_next(const upipe_msg *list, int n, int peer, int way, int i)
{
    while (i < n &&
           (list[i].peer != peer || (way == UPIPE_MSG_SEND ? list[i].send_bytes : list[i].recv_bytes) == 0))
        ++i;
    return i;
}

/* How bytes move: the compute table's copy entry, or one of its form. */
typedef upipe_status (*upipe_copy)(upipe_ctx *c, void *dst, const void *src, size_t bytes);

/* The next message that a rank sends to itself: *from is its send, *to its receive; both begin at -1. Sets
 * *from to n behind the last one. Fails if the two do not match. */
UPIPE_API upipe_status upi_msg_own(upipe_err *e, upipe_comm *comm, const upipe_msg *list, int n, int *from,
                                   int *to)
{
    *from = upi_msg_next(list, n, comm->rank, UPIPE_MSG_SEND, *from + 1);
    *to = upi_msg_next(list, n, comm->rank, UPIPE_MSG_RECV, *to + 1);
    if (*from == n && *to == n) return UPIPE_OK;
    if (*from < n && *to < n && list[*from].send_bytes == list[*to].recv_bytes &&
        list[*from].count == list[*to].count)
        return UPIPE_OK;
    return upipe_comm_fail(e, comm, UPIPE_ERR_MISMATCH,
                           "rank %d sends itself blocks that it does not receive",
                           upi_comm_called(comm, comm->rank));
}

/* Copies what a rank sends to itself, block by block. */
UPIPE_API upipe_status upi_comm_copy_own(upipe_ctx *c, upipe_comm *comm, const upipe_msg *list, int n,
                                         upipe_copy copy)
{
    int from = -1, to = -1;
    for (;;) {
        int64_t i;
        UPIPE_TRY(upi_msg_own(&c->err, comm, list, n, &from, &to));
        if (from == n) return UPIPE_OK;
        for (i = 0; i < list[from].count; ++i) {
            const void *src = upipe_offset(list[from].send, (size_t)i * list[from].send_stride);
            void *dst = upipe_offset(list[to].recv, (size_t)i * list[to].recv_stride);
            upipe_status s = copy(c, dst, src, list[from].send_bytes);
            if (s == UPIPE_OK) continue;
            upi_fail_reason(&c->err, s);
            return upipe_comm_fail(&c->err, comm, s, "rank %d copying: %s", upi_comm_called(comm, comm->rank),
                                   c->err.text);
        }
    }
}

/* ---- calls ---- */

/* Between start and wait no other call is made on the communicator, and comm->list is not rebuilt. */
UPIPE_API upipe_status upipe_comm_idle(upipe_ctx *c, const upipe_comm *comm)
{
    if (comm == NULL) return upipe_fail(&c->err, UPIPE_ERR_ARG, "the communicator is NULL");
    if (!comm->started) return UPIPE_OK;
    return upipe_fail(&c->err, UPIPE_ERR_ARG, "a transfer is in progress: upipe_comm_wait comes first");
}

/* upipe_comm_start -- begins a transfer and returns; upipe_comm_wait completes it
 *   list    n messages, not changed before upipe_comm_wait returns. What rank r sends to rank p equals, in
 *           number, block size and count, what rank p receives from rank r
 *   order   send buffers are complete on ctx->stream before the call. One transfer at a time
 *   errors  ARG (comm is NULL, a peer outside the team, a transfer in progress), MISMATCH, TIMEOUT, ABORTED
 */
UPIPE_API upipe_status upipe_comm_start(upipe_ctx *c, upipe_comm *comm, const upipe_msg *list, int n)
{
    int i;
    int64_t bytes = 0;
    UPIPE_TRY(upipe_comm_idle(c, comm));
    for (i = 0; i < n; ++i) {
        if (list[i].peer < 0 || list[i].peer >= comm->ranks)
            return upipe_fail(&c->err, UPIPE_ERR_ARG, "message %d names rank %d of a team of %d", i,
                              list[i].peer, comm->ranks);
        if (list[i].count < 1)
            return upipe_fail(&c->err, UPIPE_ERR_ARG, "message %d has %lld blocks", i,
                              (long long)list[i].count);
        if (list[i].peer != comm->rank) bytes += (int64_t)list[i].send_bytes * list[i].count;
    }
    UPIPE_TRY(comm->ops.start(c, comm, list, n));
    comm->sent_bytes += bytes;
    comm->started = 1;
    return UPIPE_OK;
}

/* upipe_comm_wait -- completes the transfer: everything is received, and the send buffers may be written, for
 *                    what comes behind on ctx->stream. A transport may return while the transfer is still in
 *                    progress on the stream (net/upipe_net_nccl.h): a failure then shows in a later call
 *   errors  ARG (comm is NULL, no transfer in progress); TIMEOUT (the sentence names the missing ranks if the
 *           transport knows them); MISMATCH (lists do not match); ABORTED
 */
UPIPE_API upipe_status upipe_comm_wait(upipe_ctx *c, upipe_comm *comm)
{
    if (comm == NULL) return upipe_comm_idle(c, comm);
    if (!comm->started) return upipe_fail(&c->err, UPIPE_ERR_ARG, "no transfer is in progress");
    comm->started = 0;
    return comm->ops.wait(c, comm);
}

/* upi_comm_settle -- before the host waits for ctx->stream: where `wait` only orders the stream, waits until the
 *                    transfers of team and ring have ended, under the deadline. ops.sync and copies
 *                    to and from ordinary host memory do so
 *   errors  as upipe_comm_wait. UPIPE_OK for a team that has failed: it holds up no stream
 */
UPIPE_API upipe_status upi_comm_settle(upipe_ctx *c)
{
    if (c->team != NULL && c->team->ops.settle != NULL) UPIPE_TRY(c->team->ops.settle(c, c->team));
    return c->ring != NULL && c->ring->ops.settle != NULL ? c->ring->ops.settle(c, c->ring) : UPIPE_OK;
}

/* upi_comm_results -- before the host takes what it has from ctx->stream: the failure of a team or ring whose
 *                     transfers are left to the stream, as it has cut them off. upi_comm_settle tells it once
 */
UPIPE_API upipe_status upi_comm_results(upipe_ctx *c)
{
    if (c->team != NULL && c->team->ops.settle != NULL) UPIPE_TRY(upi_comm_whole(c, c->team));
    return c->ring != NULL && c->ring->ops.settle != NULL ? upi_comm_whole(c, c->ring) : UPIPE_OK;
}

/* upipe_comm_barrier -- returns when every rank of the team has called it
 *   errors  ARG (comm is NULL, a transfer in progress); others as upipe_comm_wait
 */
UPIPE_API upipe_status upipe_comm_barrier(upipe_ctx *c, upipe_comm *comm)
{
    UPIPE_TRY(upipe_comm_idle(c, comm));
    return comm->ops.barrier(c, comm);
}

/* upipe_comm_all_gather -- all[r * n + i] = mine[i] of rank r, on every rank
 *   mine    [n], 0 <= n <= UPIPE_ALL_GATHER_MAX; n is the same on all ranks
 *   all     [ranks][n], host memory
 *   errors  ARG (comm is NULL, a transfer in progress, n out of range); others as upipe_comm_wait
 */
UPIPE_API upipe_status upipe_comm_all_gather(upipe_ctx *c, upipe_comm *comm, int64_t *all,
                                             const int64_t *mine, int n)
{
    UPIPE_TRY(upipe_comm_idle(c, comm));
    if (n < 0 || n > UPIPE_ALL_GATHER_MAX)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "an all-gather of %d numbers; 0 to %d are possible", n,
                          UPIPE_ALL_GATHER_MAX);
    return comm->ops.all_gather(c, comm, all, mine, n);
}

/* ---- teams without a transport ---- */

/* What a team of one rank needs besides its upipe_comm; the host keeps both as long as it uses the team. */
typedef struct upipe_comm_self_state {
    upipe_msg list[2];
    int64_t gathered[UPIPE_ALL_GATHER_MAX];
    upipe_copy copy;
    const upipe_msg *posted;
    int posted_n;
    upipe_err failure; /* the first one; its status is UPIPE_OK while there is none */
} upipe_comm_self_state;

UPIPE_API const upipe_err *upi_self_failure(const upipe_comm *comm)
{
    const upipe_comm_self_state *state = (const upipe_comm_self_state *)comm->impl;
    return state->failure.status != UPIPE_OK ? &state->failure : NULL;
}

UPIPE_API int upi_self_fail(upipe_comm *comm, upipe_status s, const char *why)
{
    upipe_comm_self_state *state = (upipe_comm_self_state *)comm->impl;
    if (upi_self_failure(comm) != NULL) return 0;
    upipe_fail(&state->failure, s, "%s", why);
    return 1;
}

UPIPE_API upipe_status upi_self_start(upipe_ctx *c, upipe_comm *comm, const upipe_msg *list, int n)
{
    upipe_comm_self_state *state = (upipe_comm_self_state *)comm->impl;
    UPIPE_TRY(upi_comm_whole(c, comm));
    state->posted = list;
    state->posted_n = n;
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_self_wait(upipe_ctx *c, upipe_comm *comm)
{
    const upipe_comm_self_state *state = (const upipe_comm_self_state *)comm->impl;
    UPIPE_TRY(upi_comm_whole(c, comm));
    return upi_comm_copy_own(c, comm, state->posted, state->posted_n, state->copy);
}

UPIPE_API upipe_status upi_self_all_gather(upipe_ctx *c, upipe_comm *comm, int64_t *all, const int64_t *mine,
                                           int n)
{
    UPIPE_TRY(upi_comm_whole(c, comm));
    memcpy(all, mine, (size_t)n * sizeof *all);
    return UPIPE_OK;
}

/* upipe_comm_self -- a team of one rank
 *   state  the caller's, kept as long as comm
 *   copy   the compute table's
 */
UPIPE_API void upipe_comm_self(upipe_comm *comm, upipe_comm_self_state *state, upipe_copy copy)
{
    static const upipe_comm_ops ops = {
        "self",        upi_self_start, upi_self_wait, upi_comm_whole, upi_self_all_gather, upi_self_failure,
        upi_self_fail, NULL,           NULL};
    memset(comm, 0, sizeof *comm);
    memset(state, 0, sizeof *state);
    comm->ops = ops;
    comm->impl = state;
    comm->deadline = UPIPE_DEADLINE_DEFAULT;
    state->copy = copy;
    comm->list = state->list;
    comm->gathered = state->gathered;
    comm->ranks = 1;
}

UPIPE_API upipe_status upi_dry_start(upipe_ctx *c, upipe_comm *comm, const upipe_msg *list, int n)
{
    (void)c, (void)comm, (void)list, (void)n;
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_dry_meet(upipe_ctx *c, upipe_comm *comm)
{
    (void)c, (void)comm;
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_dry_all_gather(upipe_ctx *c, upipe_comm *comm, int64_t *all, const int64_t *mine,
                                          int n)
{
    int r;
    (void)c;
    for (r = 0; r < comm->ranks; ++r) memcpy(all + (size_t)r * (size_t)n, mine, (size_t)n * sizeof *all);
    return UPIPE_OK;
}

/* upipe_comm_dry -- one rank of a team for dry runs: counts bytes sent, moves nothing and cannot fail
 *   list, gathered  space for 2 * ranks messages and for ranks * UPIPE_ALL_GATHER_MAX numbers
 */
UPIPE_API void upipe_comm_dry(upipe_comm *comm, int rank, int ranks, upipe_msg *list, int64_t *gathered)
{
    static const upipe_comm_ops ops = {"dry", upi_dry_start, upi_dry_meet, upi_dry_meet, upi_dry_all_gather,
                                       NULL,  NULL,          NULL,         NULL};
    memset(comm, 0, sizeof *comm);
    comm->ops = ops;
    comm->deadline = UPIPE_DEADLINE_DEFAULT;
    comm->list = list;
    comm->gathered = gathered;
    comm->rank = rank;
    comm->ranks = ranks;
}

enum { UPIPE_WEIGHTS_MAX = 12 };

/* upipe_given -- what a forward was given: its backward must be given the same
 *   plan     the plan's seal; 0: there was no forward
 *   id       the layer's; 0: addresses of weights tell it
 *   weights  marks of their addresses
 *   numbers  marks of those that all ranks have compared
 * A mark is 32 bits of a hash: another value has the same one once in 4 billion.
 */
typedef struct upipe_given {
    uint64_t plan;
    int64_t id;
    uint32_t weights[UPIPE_WEIGHTS_MAX], numbers[UPIPE_ALL_GATHER_MAX];
} upipe_given;

#include "parts/agree.h"

/* ---- the end of a call that fails ---- */

/*     int64_t mark = upipe_mem_mark(ctx->mem);
 *     upipe_status s = my_pass(ctx);                         several calls; any of them may fail
 *     return s == UPIPE_OK ? s : upi_unwind(ctx, s, mark, NULL);
 */

/* upi_unwind -- after a failure: aborts ctx->team, ctx->ring and comm, drains the stream, frees what was allocated
 *               since the mark
 *   s       the failure; returned
 *   mark    from upipe_mem_mark, before the pass
 *   comm    another communicator that the pass has used: this rank does not come to its team or ring either. NULL: none
 *
 * A transfer that the failure left between start and wait is ended first. Draining the stream leaves no work of
 * this rank that accesses the pool. Where a peer may still read this rank's memory (comm->quarantine), every
 * block of the pool is quarantined: any of them may be a send buffer.
 */
UPIPE_API upipe_status upi_unwind(upipe_ctx *c, upipe_status s, int64_t mark, upipe_comm *comm)
{
    upipe_comm *const comms[3] = {c->team, c->ring, comm};
    int i, quarantine = 0;
    upipe_err first; /* the failure to report, whatever fails below */
    upi_fail_reason(&c->err, s);
    first = c->err;
    for (i = 0; i < 3; ++i) upipe_comm_abort(comms[i], first.text);
    for (i = 0; i < 3; ++i)
        if (comms[i] != NULL && comms[i]->started) upipe_comm_wait(c, comms[i]);
    c->ops->sync(c);
    c->err = first;
    for (i = 0; i < 3; ++i) quarantine |= comms[i] != NULL && comms[i]->quarantine;
    if (quarantine)
        upi_mem_quarantine(c->mem, 0);
    else
        upipe_mem_rewind(c->mem, mark);
    return s;
}

#endif

/* upipe_comm.h -- the transport table, and the one-rank team        layer 1, includes upipe_base.h
 *
 * One verb moves data: an exchange of segments. Rank r lists what it sends to and receives from whom; k-th
 * send from r to p meets k-th receive at p from r. All-to-all, shift and gather are lists.
 *
 *     upipe_comm_start(ctx, ctx->team, segments, n);   every rank of the team, in the same order
 *     ...                                              buffers of the list are the transport's until
 *     upipe_comm_wait(ctx, ctx->team);                 ... it returns
 *
 * No call waits for its peers past the deadline (a failing one may then wait for a reader, see the
 * transport). After the first failure the communicator is poisoned on every rank: later
 * calls return UPIPE_ERR_ABORTED at once, with the first failure's reason. The library adopts communicators;
 * the transport's header makes and frees them (net/).
 */
#ifndef UPIPE_COMM_H
#define UPIPE_COMM_H

#include "upipe_base.h"

/* upipe_msg -- one peer's part of an exchange: `count` blocks each way
 *   send  block i at send + i * send_step; recv likewise. Steps and bytes in bytes. NULL with 0 bytes: no
 *         such part.
 *   peer  may be the rank itself: a local copy.
 */
typedef struct upipe_msg {
    const void *send;
    void *recv;
    size_t send_bytes, recv_bytes; /* of one block */
    size_t send_step, recv_step;   /* between blocks */
    int64_t count;                 /* blocks, the same on both sides */
    int peer;
} upipe_msg;

/* upipe_msg_add -- appends one peer's part to a list of n messages; nothing where there is none
 *   batch   blocks each way
 */
UPIPE_API void upipe_msg_add(upipe_msg *list, int *n, int peer, int64_t batch, const void *send,
                             size_t send_bytes, size_t send_step, void *recv, size_t recv_bytes,
                             size_t recv_step)
{
    upipe_msg *s = list + *n;
    if (send_bytes == 0 && recv_bytes == 0) return;
    ++*n;
    s->peer = peer;
    s->count = batch;
    s->send = send_bytes > 0 ? send : NULL;
    s->recv = recv_bytes > 0 ? recv : NULL;
    s->send_bytes = send_bytes;
    s->recv_bytes = recv_bytes;
    s->send_step = send_step;
    s->recv_step = recv_step;
}

struct upipe_comm;

/* What a transport implements; use the upipe_comm_* functions, which check and count. */
typedef struct upipe_comm_ops {
    const char *name;
    upipe_status (*start)(upipe_ctx *c, struct upipe_comm *comm, const upipe_msg *list, int n);
    upipe_status (*wait)(upipe_ctx *c, struct upipe_comm *comm);
    upipe_status (*barrier)(upipe_ctx *c, struct upipe_comm *comm);
    /* all[r * n + i] = value i of rank r; host memory, n <= UPIPE_ALL_GATHER_MAX. */
    upipe_status (*gather)(upipe_ctx *c, struct upipe_comm *comm, int64_t *all, const int64_t *mine, int n);
    void (*abort)(struct upipe_comm *comm, const char *why);
} upipe_comm_ops;

enum { UPIPE_ALL_GATHER_MAX = 32 };

/* A description that all ranks agreed on: it came `run` times in a row, then the one with the print `next`.
 * While next is 0 it may go on. */
typedef struct upi_agreed {
    uint64_t hash, next; /* hash, never 0 */
    int64_t run;
} upi_agreed;

enum { UPI_AGREED_MAX = 4 };

typedef struct upipe_comm {
    upipe_comm_ops ops;
    void *impl;          /* the transport's own */
    upipe_msg *list;     /* space for 2 * ranks segments, for the calls that build lists */
    int64_t *gathered;   /* space for ranks * UPIPE_ALL_GATHER_MAX numbers, for upipe_comm_agree */
    int64_t sent_bytes;  /* handed to other ranks so far; a copy to the rank itself does not count */
    int64_t moved_bytes; /* counted by the transport as it receives from other ranks */
    double deadline;     /* seconds that one call may wait for its peers */
    upi_agreed agreed[UPI_AGREED_MAX]; /* descriptions that came of late */
    int64_t agreed_run;                /* how many times in a row the last one has come ... */
    int agreed_at, agreed_oldest;      /* ... where it is, and what gives way to a new one */
    int rank, ranks;
    int started;    /* an exchange is between start and wait */
    int quarantine; /* a peer may still touch the buffers of a failed exchange: do not recycle them */
    int stuck;      /* and ctx->stream may be behind that exchange for ever: do not wait for it */
} upipe_comm;

#define UPIPE_DEADLINE_DEFAULT 30.0

/* upipe_comm_abort -- give up on behalf of the whole team; every rank's present and later calls fail with
 *                     `why` */
UPIPE_API void upipe_comm_abort(upipe_comm *comm, const char *why)
{
    if (comm != NULL && comm->ops.abort != NULL) comm->ops.abort(comm, why);
}

/* Between start and wait nothing else may run on the team, nor may its list be built anew. */
UPIPE_API upipe_status upi_comm_idle(upipe_ctx *c, const upipe_comm *comm)
{
    if (!comm->started) return UPIPE_OK;
    return upipe_fail(&c->err, UPIPE_ERR_ARG,
                    "a transfer is in progress on this communicator: upipe_comm_wait comes first");
}

/* upipe_comm_start -- post an exchange and return; the lists of all ranks must fit each other
 *   list    n segments; read until upipe_comm_wait returns
 *   order   one exchange at a time; send buffers must be complete on ctx->stream before
 *   errors  ARG (a peer outside the team, an exchange already started), ABORTED, TIMEOUT
 */
UPIPE_API upipe_status upipe_comm_start(upipe_ctx *c, upipe_comm *comm, const upipe_msg *list, int n)
{
    int i;
    int64_t bytes = 0;
    UPIPE_TRY(upi_comm_idle(c, comm));
    for (i = 0; i < n; ++i) {
        if (list[i].peer < 0 || list[i].peer >= comm->ranks)
            return upipe_fail(&c->err, UPIPE_ERR_ARG, "segment %d names rank %d of a team of %d", i,
                            list[i].peer, comm->ranks);
        if (list[i].count < 1)
            return upipe_fail(&c->err, UPIPE_ERR_ARG, "segment %d has %lld blocks", i,
                            (long long)list[i].count);
        if (list[i].peer != comm->rank) bytes += (int64_t)list[i].send_bytes * list[i].count;
    }
    UPIPE_TRY(comm->ops.start(c, comm, list, n));
    comm->sent_bytes += bytes;
    comm->started = 1;
    return UPIPE_OK;
}

/* upipe_comm_wait -- the started exchange is complete: all received, all sent buffers free again
 *   errors  TIMEOUT (the sentence names the rank that is missing), MISMATCH (lists that do not fit), ABORTED;
 *           comm->quarantine is then set if a peer may still read the send buffers, and comm->stuck too if ctx->stream
 *           may never be through with the exchange
 */
UPIPE_API upipe_status upipe_comm_wait(upipe_ctx *c, upipe_comm *comm)
{
    if (!comm->started) return upipe_fail(&c->err, UPIPE_ERR_ARG, "no transfer is in progress on this communicator");
    comm->started = 0;
    return comm->ops.wait(c, comm);
}

/* upipe_comm_barrier -- returns when every rank of the team has called it
 *   errors  ARG between start and wait; others as upipe_comm_wait
 */
UPIPE_API upipe_status upipe_comm_barrier(upipe_ctx *c, upipe_comm *comm)
{
    UPIPE_TRY(upi_comm_idle(c, comm));
    return comm->ops.barrier(c, comm);
}

/* upipe_comm_all_gather -- every rank gets n whole numbers of every rank
 *   all     [ranks][n], host memory;  mine [n], n <= UPIPE_ALL_GATHER_MAX, the same n on all ranks
 *   errors  ARG; others as upipe_comm_wait
 */
UPIPE_API upipe_status upipe_comm_all_gather(upipe_ctx *c, upipe_comm *comm, int64_t *all, const int64_t *mine,
                                         int n)
{
    if (n < 1 || n > UPIPE_ALL_GATHER_MAX)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "%d numbers to gather, 1 to %d", n, UPIPE_ALL_GATHER_MAX);
    UPIPE_TRY(upi_comm_idle(c, comm));
    return comm->ops.gather(c, comm, all, mine, n);
}

/* upipe_comm_shift_start -- send `bytes` at src to rank + step, receive as many into dst from rank - step
 *   step    any whole number, taken modulo the ranks; a step of 0 copies locally
 *   order   complete after upipe_comm_wait
 */
UPIPE_API upipe_status upipe_comm_shift_start(upipe_ctx *c, upipe_comm *comm, void *dst, const void *src,
                                              size_t bytes, int step)
{
    upipe_msg *s = comm->list;
    int ranks = comm->ranks, forth = ((comm->rank + step) % ranks + ranks) % ranks;
    int back = ((comm->rank - step) % ranks + ranks) % ranks;
    UPIPE_TRY(upi_comm_idle(c, comm));
    memset(s, 0, 2 * sizeof *s);
    s[0].send = src;
    s[0].send_bytes = bytes;
    s[1].recv = dst;
    s[1].recv_bytes = bytes;
    s[0].count = s[1].count = 1;
    s[0].peer = forth;
    s[1].peer = back;
    return upipe_comm_start(c, comm, s, 2);
}

/* One line of a description that all ranks must share: a whole number, or the bits of a double. */
typedef struct upipe_field {
    const char *name;
    int64_t value;
    int real; /* value holds the bits of a double */
} upipe_field;

UPIPE_API double upipe_field_value(int64_t bits)
{
    double v;
    memcpy(&v, &bits, sizeof v);
    return v;
}

/* A description while it is written down: n of at most UPIPE_ALL_GATHER_MAX fields. */
typedef struct upipe_fields {
    upipe_field at[UPIPE_ALL_GATHER_MAX];
    int n;
} upipe_fields;

/* upipe_field_int, upipe_field_real -- one more field; the name must outlive the description */
UPIPE_API void upipe_field_int(upipe_fields *f, const char *name, int64_t value)
{
    assert(f->n < UPIPE_ALL_GATHER_MAX);
    f->at[f->n].name = name;
    f->at[f->n].value = value;
    f->at[f->n++].real = 0;
}

UPIPE_API void upipe_field_real(upipe_fields *f, const char *name, double value)
{
    upipe_field_int(f, name, 0);
    f->at[f->n - 1].real = 1;
    memcpy(&f->at[f->n - 1].value, &value, sizeof value);
}

/* FNV-1a over names and values; never 0. */
UPIPE_API uint64_t upi_hash(const upipe_field *fields, int n)
{
    uint64_t hash = 1469598103934665603u;
    int i, b;
    for (i = 0; i < n; ++i) {
        const char *name = fields[i].name;
        do hash = (hash ^ (unsigned char)*name) * 1099511628211u;
        while (*name++ != 0);
        for (b = 0; b < 64; b += 8)
            hash = (hash ^ (((uint64_t)fields[i].value >> b) & 255)) * 1099511628211u;
    }
    return hash != 0 ? hash : 1;
}

/* Whether the last description goes on, or is followed, as it was when the ranks last compared: so do all of
 * them, or one that does not compares, and is found. A rank that is out of step must never take one for
 * another that is known. */
UPIPE_API int upi_agree_expected(const upipe_comm *comm, uint64_t hash)
{
    const upi_agreed *last = &comm->agreed[comm->agreed_at];
    return hash == (last->next == 0 || comm->agreed_run < last->run ? last->hash : last->next);
}

/* It has come on all ranks, which have the same notes for that. */
UPIPE_API void upi_agree_note(upipe_comm *comm, uint64_t hash, int expected)
{
    upi_agreed *last = &comm->agreed[comm->agreed_at];
    int i = 0;
    if (hash == last->hash) {
        if (!expected) last->next = 0; /* it goes on for longer than before */
        ++comm->agreed_run;
        return;
    }
    if (!expected) {
        last->next = hash;
        last->run = comm->agreed_run;
    }
    while (i < UPI_AGREED_MAX && comm->agreed[i].hash != hash) ++i;
    if (i == UPI_AGREED_MAX) {
        i = comm->agreed_oldest;
        comm->agreed_oldest = (i + 1) % UPI_AGREED_MAX;
        memset(&comm->agreed[i], 0, sizeof comm->agreed[i]);
        comm->agreed[i].hash = hash;
    }
    comm->agreed_at = i;
    comm->agreed_run = 1;
}

/* upipe_comm_agree -- all ranks compare descriptions; free where this one comes as it came before: after the
 *                     same one, which had come as many times in a row. So blocks that alternate in a model
 *                     are compared in its first layers
 *   fields  n <= UPIPE_ALL_GATHER_MAX named numbers
 *   errors  MISMATCH on every rank where any rank differs: the sentence names the field, the rank and both
 *           values. Where one rank alone comes with another description than it did before, it compares while
 *           the others go on: the transport's MISMATCH names the two calls instead. ARG; others as
 *           upipe_comm_wait
 */
UPIPE_API upipe_status upipe_comm_agree(upipe_ctx *c, upipe_comm *comm, const upipe_field *fields, int n)
{
    int64_t mine[UPIPE_ALL_GATHER_MAX], *all = comm->gathered;
    uint64_t hash;
    int i, r;
    if (n < 1 || n > UPIPE_ALL_GATHER_MAX)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "%d fields to compare, 1 to %d", n, UPIPE_ALL_GATHER_MAX);
    UPIPE_TRY(upi_comm_idle(c, comm));
    hash = upi_hash(fields, n);
    if (upi_agree_expected(comm, hash)) {
        upi_agree_note(comm, hash, 1);
        return UPIPE_OK;
    }
    for (i = 0; i < n; ++i) mine[i] = fields[i].value;
    UPIPE_TRY(comm->ops.gather(c, comm, all, mine, n));
    for (r = 1; r < comm->ranks; ++r) {
        for (i = 0; i < n; ++i) {
            int64_t first = all[i], other = all[r * n + i];
            if (other == first) continue;
            if (fields[i].real)
                upipe_fail(&c->err, UPIPE_ERR_MISMATCH, "%s is %g on rank 0 and %g on rank %d", fields[i].name,
                         upipe_field_value(first), upipe_field_value(other), r);
            else
                upipe_fail(&c->err, UPIPE_ERR_MISMATCH, "%s is %lld on rank 0 and %lld on rank %d",
                         fields[i].name, (long long)first, (long long)other, r);
            upipe_comm_abort(comm, c->err.text);
            return UPIPE_ERR_MISMATCH;
        }
    }
    upi_agree_note(comm, hash, 0);
    return UPIPE_OK;
}

/* ---- teams without a transport ---- */

/* What a team of one needs besides its upipe_comm; the host keeps both alive. */
typedef struct upipe_comm_self_state {
    upipe_msg list[2];
    int64_t gathered[UPIPE_ALL_GATHER_MAX];
    upipe_status (*copy)(upipe_ctx *c, void *dst, const void *src, size_t bytes);
    const upipe_msg *posted;
    int posted_n;
    int broken;
    char why[200]; /* the first failure's sentence */
} upipe_comm_self_state;

UPIPE_API void upi_self_abort(upipe_comm *comm, const char *why)
{
    upipe_comm_self_state *buf = (upipe_comm_self_state *)comm->impl;
    if (buf->broken) return;
    buf->broken = 1;
    snprintf(buf->why, sizeof buf->why, "%s", why);
}

UPIPE_API upipe_status upi_self_ready(upipe_ctx *c, upipe_comm *comm)
{
    upipe_comm_self_state *buf = (upipe_comm_self_state *)comm->impl;
    return buf->broken ? upipe_fail(&c->err, UPIPE_ERR_ABORTED, "%s", buf->why) : UPIPE_OK;
}

UPIPE_API upipe_status upi_self_start(upipe_ctx *c, upipe_comm *comm, const upipe_msg *list, int n)
{
    upipe_comm_self_state *buf = (upipe_comm_self_state *)comm->impl;
    UPIPE_TRY(upi_self_ready(c, comm));
    buf->posted = list;
    buf->posted_n = n;
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_self_wait(upipe_ctx *c, upipe_comm *comm)
{
    upipe_comm_self_state *buf = (upipe_comm_self_state *)comm->impl;
    const upipe_msg *list = buf->posted;
    int n = buf->posted_n, from = 0, to = 0;
    UPIPE_TRY(upi_self_ready(c, comm));
    for (;;) {
        int64_t i;
        while (from < n && list[from].send_bytes == 0) ++from;
        while (to < n && list[to].recv_bytes == 0) ++to;
        if (from == n && to == n) return UPIPE_OK;
        if (from == n || to == n || list[from].send_bytes != list[to].recv_bytes ||
            list[from].count != list[to].count) {
            upipe_fail(&c->err, UPIPE_ERR_MISMATCH, "rank 0 sends itself blocks that it does not receive");
            upi_self_abort(comm, c->err.text);
            return UPIPE_ERR_MISMATCH;
        }
        for (i = 0; i < list[from].count; ++i)
            UPIPE_TRY(buf->copy(c, (char *)list[to].recv + (size_t)i * list[to].recv_step,
                                 (const char *)list[from].send + (size_t)i * list[from].send_step,
                                 list[from].send_bytes));
        ++from;
        ++to;
    }
}

UPIPE_API upipe_status upi_self_gather(upipe_ctx *c, upipe_comm *comm, int64_t *all, const int64_t *mine,
                                       int n)
{
    UPIPE_TRY(upi_self_ready(c, comm));
    memcpy(all, mine, (size_t)n * sizeof *all);
    return UPIPE_OK;
}

/* upipe_comm_self -- a team of one rank
 *   buffer    caller's, kept as long as comm
 *   copy    how bytes move: the compute table's copy entry
 */
UPIPE_API void upipe_comm_self(upipe_comm *comm, upipe_comm_self_state *buf,
                               upipe_status (*copy)(upipe_ctx *c, void *dst, const void *src, size_t bytes))
{
    memset(comm, 0, sizeof *comm);
    memset(buf, 0, sizeof *buf);
    buf->copy = copy;
    comm->ops.name = "self";
    comm->ops.start = upi_self_start;
    comm->ops.wait = upi_self_wait;
    comm->ops.barrier = upi_self_ready;
    comm->ops.gather = upi_self_gather;
    comm->ops.abort = upi_self_abort;
    comm->impl = buf;
    comm->list = buf->list;
    comm->gathered = buf->gathered;
    comm->deadline = UPIPE_DEADLINE_DEFAULT;
    comm->ranks = 1;
}

UPIPE_API upipe_status upi_dry_start(upipe_ctx *c, upipe_comm *comm, const upipe_msg *list, int n)
{
    (void)c;
    (void)comm;
    (void)list;
    (void)n;
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_dry_meet(upipe_ctx *c, upipe_comm *comm)
{
    (void)c;
    (void)comm;
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_dry_gather(upipe_ctx *c, upipe_comm *comm, int64_t *all, const int64_t *mine,
                                      int n)
{
    int r;
    (void)c;
    for (r = 0; r < comm->ranks; ++r) memcpy(all + (size_t)r * (size_t)n, mine, (size_t)n * sizeof *all);
    return UPIPE_OK;
}

/* upipe_comm_dry -- rank `rank` of a team that moves nothing, agrees with everything and cannot fail: for dry
 *                   runs, which count bytes sent and memory
 *   list      space for 2 * ranks segments
 *   gathered  space for ranks * UPIPE_ALL_GATHER_MAX numbers
 */
UPIPE_API void upipe_comm_dry(upipe_comm *comm, int rank, int ranks, upipe_msg *list, int64_t *gathered)
{
    memset(comm, 0, sizeof *comm);
    comm->ops.name = "dry";
    comm->ops.start = upi_dry_start;
    comm->ops.wait = upi_dry_meet;
    comm->ops.barrier = upi_dry_meet;
    comm->ops.gather = upi_dry_gather;
    comm->list = list;
    comm->gathered = gathered;
    comm->deadline = UPIPE_DEADLINE_DEFAULT;
    comm->rank = rank;
    comm->ranks = ranks;
}

#endif

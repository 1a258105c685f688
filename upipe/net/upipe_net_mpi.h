/* upipe_net_mpi.h -- a team of ranks that are processes, over MPI
 *
 *     MPI_Comm_dup(MPI_COMM_WORLD, &mine);                      the host makes it, and frees it
 *     MPI_Comm_set_errhandler(mine, MPI_ERRORS_RETURN);
 *     upipe_mpi team;
 *     upipe_status s = upipe_mpi_init(&team, mine, 0, 0, &err); tags 0 and 1, the default deadline
 *     ctx.team = &team.comm;
 *     ...
 *     upipe_mpi_free(&team, &err);                              before MPI_Comm_free and MPI_Finalize
 *
 * Data. Every call begins with a header to each peer: number and kind of the call, and what this rank sends
 * to the peer and receives from it. A barrier and an all-gather consist of their headers. The data of a
 * transfer move between two ranks once each has the other's header and both match: before that no buffer is
 * handed to MPI. A message of a list is one MPI message, of a vector type where its blocks have gaps; a
 * longer one is split into fragments. Buffers may be device memory if MPI can read it; start waits for
 * ctx->stream.
 *
 * Progress. No blocking collective and no blocking wait is used: requests are tested, and between two tests
 * the rank yields or sleeps, so that ranks may outnumber cores. Between start and wait data move only if MPI
 * makes progress by itself.
 *
 * Order. Every rank makes the same sequence of calls (transfer, barrier, all-gather). All calls on a
 * communicator come from one thread at a time: MPI_THREAD_SINGLE is enough for a process without other
 * threads, FUNNELED for calls from the main thread, SERIALIZED where the host keeps its own MPI calls apart.
 * With MPI_THREAD_MULTIPLE each communicator may have a thread, and any thread may call upipe_comm_abort.
 *
 * Failures. The rank that detects one informs the others by a header, and returns its status: TIMEOUT,
 * MISMATCH, BACKEND (with MPI's own text). The others pass it on, and return ABORTED with its sentence, but a MISMATCH
 * once. It breaks all parts of the world (upipe_comm_part), and the sentence of TIMEOUT names the rank for which the
 * others wait in the end, as in upipe_net_tcp.h.
 * A failed transfer goes on between ranks whose headers match until nothing is in flight, for at most the
 * deadline or half a second; receives that are left are cancelled; and if MPI may still access a buffer,
 * comm->quarantine is set. Afterwards only upipe_mpi_free is legal.
 *
 * The end. An MPI library may give the context of a freed communicator to the next one, with the messages
 * that nobody has received. So upipe_mpi_free sends each peer an empty message with either tag, its goodbye,
 * and throws away what comes before the peer's. No message of a team can then reach another one.
 *
 * What MPI does when a process dies depends on MPI, and often ends the job. Open MPI 4 keeps the survivors
 * under mpirun --enable-recovery; they must not call MPI_Finalize, which waits for all ranks.
 *
 * Strict ISO C hides the clock: include this file first, or define _POSIX_C_SOURCE=200809L.
 */
#ifndef UPIPE_NET_MPI_H
#define UPIPE_NET_MPI_H

#include "upipe_net_header.h"

#include <mpi.h>
#include <stdlib.h>

enum {
    UPIPE_MPI_TAGS = 2,           /* tags that a team uses, from its base: headers, data */
    UPIPE_MPI_FRAGMENT = 1 << 30, /* bytes of one MPI message at most: MPI counts in int */
    UPI_MPI_WINDOW = 4,           /* fragments in flight at a time, each way, with each peer */
    UPI_MPI_YIELDS = 2000,        /* fruitless tests before a waiting rank sleeps */
    UPI_MPI_NAP = 50000,          /* ns */
    UPI_MPI_HEADERS = 0,          /* the team's tags, from its base */
    UPI_MPI_DATA = 1,
    UPI_MPI_LEFT = (1 << UPIPE_MPI_TAGS) - 1,
    UPI_MPI_OTHERS = 1 + UPIPE_MPI_TAGS + 2 /* requests of a rank beside those of calls */
};

/* One way of one peer: what is to be posted next, and the fragments in flight. */
typedef struct upi_mpi_flow {
    size_t offset; /* within the block */
    int64_t block;
    int msg;       /* of the list */
    int in_flight; /* fragments */
    size_t bytes[UPI_MPI_WINDOW];
} upi_mpi_flow;

typedef struct upi_mpi_peer {
    int64_t come; /* number of the last header that has arrived from it */
    int open;     /* its header of this call matches: data move */
    int left;     /* bit t: its goodbye with the team's tag t has come */
    upi_mpi_flow flow[2];
} upi_mpi_peer;

/* A rank's end of a team. The host's; must not move between init and free. */
typedef struct upipe_mpi {
    upipe_comm comm;
    int64_t fragment; /* bytes of an MPI message at most, the same on all ranks; set right after init */
    /* the rest belongs to the transport */
    MPI_Comm mpi; /* the host's */
    int tag;
    int64_t call, met; /* number of the last call begun here, and of the last that all ranks have come to */
    int kind;          /* UPI_TEAM_..., of the current call */
    const upipe_msg *list; /* [n] */
    int n;
    upi_mpi_peer *peer;    /* [ranks] */
    upi_header *out;       /* [ranks]: this call's headers */
    upi_header *in;        /* [2][ranks]: those of call s at [s & 1], as peers may be one call ahead */
    MPI_Request *requests; /* [2][ranks][UPI_MPI_WINDOW] data, then [ranks] headers */
    /* [ranks] sends of `notice`, [UPIPE_MPI_TAGS][ranks] goodbyes, [2][ranks] questions and answers */
    MPI_Request *notices;
    upi_header *words;    /* [2][ranks]: questions and answers that are on their way */
    MPI_Status *statuses; /* [requests_n] */
    int *done;            /* [requests_n] */
    int requests_n;
    upi_header notice; /* of the failure */
    upi_first first;   /* the failure */
    upipe_status owed; /* found by start, returned by wait */
    int busy;  /* upi_watch_try; who makes MPI calls for this end, or looks for whom its call waits, has it */
    int waits; /* in a call that waits */
    upi_watch watch; /* of a world */
    void *buf;
} upipe_mpi;

/* ---- failure ---- */

/* MPI's own text behind the call's name. `what` is the call as written. */
UPIPE_API upipe_status upi_mpi_check(upipe_err *e, int code, const char *what)
{
    char text[MPI_MAX_ERROR_STRING] = "no text";
    int n = 0;
    if (code == MPI_SUCCESS) return UPIPE_OK;
    MPI_Error_string(code, text, &n);
    return upipe_fail(e, UPIPE_ERR_BACKEND, "%.*s: %s", (int)strcspn(what, "("), what, text);
}

UPIPE_API const upipe_err *upi_mpi_failure(const upipe_comm *comm)
{
    const upipe_mpi *m = (const upipe_mpi *)comm->impl;
    return upi_first_is_broken(&m->first) ? &m->first.err : NULL;
}

UPIPE_API upipe_mpi *upi_mpi_world(const upipe_mpi *m)
{
    return (upipe_mpi *)upi_comm_world(&m->comm)->impl;
}

/* Breaks this end, where ranks had come to call `met`, and all of this rank's others. What a rank has heard it passes on:
 * who hears that it has left must know why. One that the header cannot be sent to reaches its own deadline. */
UPIPE_API int upi_mpi_break(upipe_mpi *m, upipe_status s, int64_t met, const char *why)
{
    const int ranks = m->comm.ranks;
    upipe_comm *part;
    int k;
    if (!upi_first_break(&m->first, s, met, why)) return 0;
    upi_first_report(&m->notice, s, met, why);
    for (k = 1; k < ranks; ++k) {
        int p = (m->comm.rank + k) % ranks;
        if (MPI_Isend(&m->notice, (int)sizeof m->notice, MPI_BYTE, p, m->tag, m->mpi, &m->notices[p]) !=
            MPI_SUCCESS)
            m->notices[p] = MPI_REQUEST_NULL;
    }
    for (part = upi_comm_world(&m->comm); part != NULL; part = part->part) {
        upipe_mpi *other = (upipe_mpi *)part->impl;
        upi_mpi_break(other, s, __atomic_load_n(&other->met, __ATOMIC_RELAXED), why);
    }
    return 1;
}

UPIPE_API int upi_mpi_fail(upipe_comm *comm, upipe_status s, const char *why)
{
    upipe_mpi *m = (upipe_mpi *)comm->impl;
    return upi_mpi_break(m, s, __atomic_load_n(&m->met, __ATOMIC_RELAXED), why);
}

UPIPE_API upipe_status upi_mpi_checked(upipe_ctx *c, upipe_mpi *m, int code, const char *what)
{
    upipe_err e;
    if (code == MPI_SUCCESS) return UPIPE_OK;
    upi_mpi_check(&e, code, what);
    return upipe_comm_fail(&c->err, &m->comm, UPIPE_ERR_BACKEND, "rank %d: %s",
                           upi_comm_called(&m->comm, m->comm.rank), e.text);
}

#define UPI_MPI(c, m, call) UPIPE_TRY(upi_mpi_checked((c), (m), (call), #call))

/* ---- headers ---- */

UPIPE_API upipe_status upi_mpi_send_headers(upipe_ctx *c, upipe_mpi *m, int kind, const upipe_msg *list,
                                            const int64_t *values, int n)
{
    int ranks = m->comm.ranks, k, p;
    ++m->call;
    m->kind = kind;
    m->list = list;
    m->n = list != NULL ? n : 0;
    upi_header_fill(m->out, ranks, m->call, kind, list, values, n);
    for (p = 0; p < ranks; ++p) {
        memset(m->peer[p].flow, 0, sizeof m->peer[p].flow);
        m->peer[p].open = 0;
        m->out[p].fragment = m->fragment;
    }
    for (k = 1; k < ranks; ++k) { /* each rank begins with its neighbour, which spreads the targets */
        p = (m->comm.rank + k) % ranks;
        UPI_MPI(c, m,
                MPI_Isend(&m->out[p], (int)sizeof m->out[p], MPI_BYTE, p, m->tag, m->mpi,
                          &m->requests[2 * ranks * UPI_MPI_WINDOW + p]));
    }
    return UPIPE_OK;
}

/* Begins a call: sends a header to every peer. */
UPIPE_API upipe_status upi_mpi_begin(upipe_ctx *c, upipe_mpi *m, int kind, const upipe_msg *list,
                                     const int64_t *values, int n)
{
    upipe_status s;
    upi_watch_lock(&m->busy);
    s = upi_mpi_send_headers(c, m, kind, list, values, n);
    upi_watch_unlock(&m->busy);
    return s;
}

/* Stores a header from rank p. */
UPIPE_API upipe_status upi_mpi_accept(upipe_ctx *c, upipe_mpi *m, int p, const upi_header *header)
{
    if (header->magic != UPI_HEADER_MAGIC)
        return upipe_comm_fail(&c->err, &m->comm, UPIPE_ERR_MISMATCH,
                               "rank %d sends rank %d something else with tag %d",
                               upi_comm_called(&m->comm, p), upi_comm_called(&m->comm, m->comm.rank), m->tag);
    if (header->kind == UPI_HEADER_QUESTION || header->kind == UPI_HEADER_ANSWER) {
        upi_watch_hear(&m->watch, p, header);
        return UPIPE_OK;
    }
    if (header->kind == UPI_HEADER_FAILURE) {
        const upipe_err heard = upi_first_heard(header);
        upi_mpi_break(m, heard.status, header->call, heard.text);
        return UPIPE_OK;
    }
    if (header->call != m->peer[p].come + 1 || header->call > m->call + 1)
        return upipe_comm_fail(&c->err, &m->comm, UPIPE_ERR_MISMATCH,
                               "rank %d sends call %lld where rank %d expects %lld",
                               upi_comm_called(&m->comm, p), (long long)header->call,
                               upi_comm_called(&m->comm, m->comm.rank), (long long)m->peer[p].come + 1);
    m->in[(header->call & 1) * m->comm.ranks + p] = *header;
    m->peer[p].come = header->call;
    return UPIPE_OK;
}

/* Receives the headers that have arrived. */
UPIPE_API upipe_status upi_mpi_poll(upipe_ctx *c, upipe_mpi *m, int *news)
{
    for (;;) {
        MPI_Status status;
        upi_header header;
        int there = 0, bytes = 0;
        UPI_MPI(c, m, MPI_Iprobe(MPI_ANY_SOURCE, m->tag, m->mpi, &there, &status));
        if (!there) return UPIPE_OK;
        UPI_MPI(c, m, MPI_Get_count(&status, MPI_BYTE, &bytes));
        if (bytes != 0 && bytes != (int)sizeof header)
            return upipe_comm_fail(&c->err, &m->comm, UPIPE_ERR_MISMATCH,
                                   "rank %d sends rank %d %d bytes with tag %d, where a header has %zu",
                                   upi_comm_called(&m->comm, status.MPI_SOURCE),
                                   upi_comm_called(&m->comm, m->comm.rank), bytes, m->tag, sizeof header);
        UPI_MPI(c, m,
                MPI_Recv(&header, (int)sizeof header, MPI_BYTE, status.MPI_SOURCE, m->tag, m->mpi, &status));
        if (bytes == 0)
            m->peer[status.MPI_SOURCE].left |= 1 << UPI_MPI_HEADERS;
        else
            UPIPE_TRY(upi_mpi_accept(c, m, status.MPI_SOURCE, &header));
        *news = 1;
    }
}

/* Compares this call's header of rank p with what this rank does. */
UPIPE_API upipe_status upi_mpi_fit(upipe_ctx *c, upipe_mpi *m, int p)
{
    return upi_header_fit(&c->err, &m->comm, &m->out[p], p, &m->in[(m->call & 1) * m->comm.ranks + p]);
}

/* ---- data ---- */

/* `blocks` blocks of `bytes` bytes, `stride` apart, of message `msg` of the list. */
typedef struct upi_mpi_fragment {
    size_t offset, bytes, stride; /* offset: bytes behind the message's address */
    int blocks, msg;
} upi_mpi_fragment;

/* The next fragment of a flow; 0: all are posted. How a message is split depends on the size and number of
 * its blocks alone, which both ranks know; gaps are each rank's own. */
UPIPE_API int upi_mpi_next(const upipe_mpi *m, int peer, int way, upi_mpi_flow *f, upi_mpi_fragment *out)
{
    size_t most = (size_t)m->fragment;
    for (; f->msg < m->n; ++f->msg, f->block = 0) {
        const upipe_msg *msg = &m->list[f->msg];
        size_t bytes = way == UPIPE_MSG_SEND ? msg->send_bytes : msg->recv_bytes;
        if (msg->peer != peer || bytes == 0 || f->block == msg->count) continue;
        out->msg = f->msg;
        out->stride = way == UPIPE_MSG_SEND ? msg->send_stride : msg->recv_stride;
        out->offset = (size_t)f->block * out->stride + f->offset;
        if (bytes > most) { /* a piece of one block */
            out->blocks = 1;
            out->bytes = bytes - f->offset < most ? bytes - f->offset : most;
            f->offset += out->bytes;
            if (f->offset < bytes) return 1;
            f->offset = 0;
            ++f->block;
        } else {
            int64_t fits = (int64_t)(most / bytes), left = msg->count - f->block;
            out->blocks = (int)(left < fits ? left : fits);
            out->bytes = bytes;
            f->block += out->blocks;
        }
        return 1;
    }
    return 0;
}

/* Posts one fragment. A single block, or blocks without gaps, are plain bytes. */
UPIPE_API upipe_status upi_mpi_post(upipe_ctx *c, upipe_mpi *m, int peer, int way, const upi_mpi_fragment *x,
                                    MPI_Request *request)
{
    const upipe_msg *msg = &m->list[x->msg];
    MPI_Datatype type = MPI_BYTE;
    int packed = x->blocks == 1 || x->stride == x->bytes,
        n = packed ? (int)(x->bytes * (size_t)x->blocks) : 1;
    int code;
    if (!packed) {
        UPI_MPI(c, m,
                MPI_Type_create_hvector(x->blocks, (int)x->bytes, (MPI_Aint)x->stride, MPI_BYTE, &type));
        code = MPI_Type_commit(&type);
        if (code != MPI_SUCCESS) {
            MPI_Type_free(&type);
            return upi_mpi_checked(c, m, code, "MPI_Type_commit(");
        }
    }
    if (way == UPIPE_MSG_SEND)
        code = MPI_Isend((const char *)msg->send + x->offset, n, type, peer, m->tag + 1, m->mpi, request);
    else
        code = MPI_Irecv((char *)msg->recv + x->offset, n, type, peer, m->tag + 1, m->mpi, request);
    if (!packed) MPI_Type_free(&type); /* the fragment keeps it as long as it needs it */
    if (code != MPI_SUCCESS) *request = MPI_REQUEST_NULL;
    return upi_mpi_checked(c, m, code, way == UPIPE_MSG_SEND ? "MPI_Isend(" : "MPI_Irecv(");
}

/* Fills the window of one way of one peer. */
UPIPE_API upipe_status upi_mpi_fill(upipe_ctx *c, upipe_mpi *m, int peer, int way)
{
    upi_mpi_flow *f = &m->peer[peer].flow[way];
    MPI_Request *window = m->requests + (way * m->comm.ranks + peer) * UPI_MPI_WINDOW;
    upi_mpi_fragment next;
    int i;
    for (i = 0; i < UPI_MPI_WINDOW && f->msg < m->n; ++i) {
        if (window[i] != MPI_REQUEST_NULL) continue;
        if (!upi_mpi_next(m, peer, way, f, &next)) return UPIPE_OK;
        UPIPE_TRY(upi_mpi_post(c, m, peer, way, &next, &window[i]));
        f->bytes[i] = next.bytes * (size_t)next.blocks;
        ++f->in_flight;
    }
    return UPIPE_OK;
}

/* Accounts for request i, which is complete. */
UPIPE_API upipe_status upi_mpi_complete(upipe_ctx *c, upipe_mpi *m, int i, MPI_Status *status)
{
    int data = 2 * m->comm.ranks * UPI_MPI_WINDOW, slot = i % UPI_MPI_WINDOW, bytes = -1;
    int peer = i / UPI_MPI_WINDOW % m->comm.ranks, way = i / UPI_MPI_WINDOW / m->comm.ranks;
    upi_mpi_flow *f;
    if (i >= data) return UPIPE_OK;
    f = &m->peer[peer].flow[way];
    if (way == UPIPE_MSG_RECV) UPI_MPI(c, m, MPI_Get_count(status, MPI_BYTE, &bytes));
    if (bytes == 0) { /* a goodbye: the peer has failed, its header says why, and the data do not come */
        m->peer[peer].left |= 1 << UPI_MPI_DATA;
        return UPIPE_OK;
    }
    --f->in_flight;
    if (way == UPIPE_MSG_SEND) return UPIPE_OK;
    if ((size_t)bytes != f->bytes[slot])
        return upipe_comm_fail(&c->err, &m->comm, UPIPE_ERR_MISMATCH,
                               "rank %d sends an MPI message of %d bytes to rank %d, not %zu",
                               upi_comm_called(&m->comm, peer), bytes,
                               upi_comm_called(&m->comm, m->comm.rank), f->bytes[slot]);
    m->comm.moved_bytes += bytes;
    return UPIPE_OK;
}

/* Tests the requests, and posts fragments where a window is not full. *left: those not complete, or not
 * posted. */
UPIPE_API upipe_status upi_mpi_advance(upipe_ctx *c, upipe_mpi *m, int *news, int *left)
{
    int i, p, way, n = 0, code;
    code = MPI_Testsome(m->requests_n, m->requests, &n, m->done, m->statuses);
    if (code != MPI_SUCCESS && code != MPI_ERR_IN_STATUS) return upi_mpi_checked(c, m, code, "MPI_Testsome(");
    for (i = 0; n != MPI_UNDEFINED && i < n; ++i) {
        if (code == MPI_ERR_IN_STATUS)
            UPIPE_TRY(upi_mpi_checked(c, m, m->statuses[i].MPI_ERROR, "MPI_Testsome("));
        UPIPE_TRY(upi_mpi_complete(c, m, m->done[i], &m->statuses[i]));
        *news = 1;
    }
    *left = 0;
    for (p = 0; p < m->comm.ranks; ++p) {
        for (way = 0; way < 2 && m->peer[p].open; ++way) {
            upi_mpi_flow *f = &m->peer[p].flow[way];
            UPIPE_TRY(upi_mpi_fill(c, m, p, way));
            *left += f->in_flight + (f->msg < m->n);
        }
    }
    return UPIPE_OK;
}

/* ---- a call, from its headers to its end ---- */

/* *missing: ranks whose header has not come; *left: fragments of the others. */
UPIPE_API upipe_status upi_mpi_progress(upipe_ctx *c, upipe_mpi *m, int *news, int *missing, int *left)
{
    int p, i, data = 2 * m->comm.ranks * UPI_MPI_WINDOW;
    char text[UPI_TEAM_NAMES];
    UPIPE_TRY(upi_mpi_poll(c, m, news));
    *missing = 0;
    for (p = 0; p < m->comm.ranks; ++p) {
        upi_mpi_peer *peer = &m->peer[p];
        if (p == m->comm.rank || peer->open) continue;
        if (peer->come < m->call && peer->left)
            return upipe_comm_fail(&c->err, &m->comm, UPIPE_ERR_MISMATCH,
                                   "rank %d is in %s and %s has freed its team",
                                   upi_comm_called(&m->comm, m->comm.rank), upi_team_kind(m->kind),
                                   upi_team_rank(&m->comm, p, text));
        if (peer->come < m->call) {
            ++*missing;
            continue;
        }
        UPIPE_TRY(upi_mpi_fit(c, m, p));
        peer->open = 1;
    }
    if (*missing == 0) __atomic_store_n(&m->met, m->call, __ATOMIC_RELAXED);
    UPIPE_TRY(upi_mpi_advance(c, m, news, left));
    for (i = data; i < m->requests_n; ++i) *left += m->requests[i] != MPI_REQUEST_NULL;
    return UPIPE_OK;
}

/* Marks for whom the call waits: ranks that have not come, or else those whose data are in flight. Returns whether there
 * are ranks that have not come. */
UPIPE_API int upi_mpi_mark(const upipe_mpi *m, char *marks)
{
    int p, missing = 0;
    for (p = 0; p < m->comm.ranks; ++p) missing |= p != m->comm.rank && m->peer[p].come < m->call;
    for (p = 0; p < m->comm.ranks; ++p) {
        const upi_mpi_peer *peer = &m->peer[p];
        const int late = missing
                             ? peer->come < m->call
                             : peer->flow[0].in_flight > 0 || peer->flow[1].in_flight > 0 ||
                                   m->requests[2 * m->comm.ranks * UPI_MPI_WINDOW + p] != MPI_REQUEST_NULL;
        if (p != m->comm.rank && late) marks[upi_comm_called(&m->comm, p)] = UPI_TEAM_MISSED;
    }
    return missing;
}

/* Sends a rank of the world a question (0) or an answer (1), unless the last one is still on its way. */
UPIPE_API void upi_mpi_send_word(upipe_mpi *world, int which, int p, const upi_header *header)
{
    const int at = which * world->comm.ranks + p;
    MPI_Request *request = &world->notices[(1 + UPIPE_MPI_TAGS) * world->comm.ranks + at];
    int done = 0;
    if (*request != MPI_REQUEST_NULL) (void)MPI_Test(request, &done, MPI_STATUS_IGNORE);
    if (*request != MPI_REQUEST_NULL) return;
    world->words[at] = *header;
    if (MPI_Isend(&world->words[at], (int)sizeof *header, MPI_BYTE, p, world->tag, world->mpi, request) !=
        MPI_SUCCESS)
        *request = MPI_REQUEST_NULL;
}

/* Answers those that have asked, from a call that waits: m and its world are this thread's. */
UPIPE_API void upi_mpi_answer(upipe_mpi *m, upipe_mpi *world)
{
    upi_watch *w = &world->watch;
    upipe_comm *part;
    upi_header answer;
    int p = 0;
    while (p < w->ranks && w->asked[p] == 0) ++p;
    if (p == w->ranks) return;
    memset(w->marks, 0, (size_t)w->ranks);
    for (part = &world->comm; part != NULL; part = part->part) {
        upipe_mpi *other = (upipe_mpi *)part->impl;
        const int held = other == m || other == world;
        if (!held && !upi_watch_try(&other->busy)) continue;
        if (other->waits) (void)upi_mpi_mark(other, w->marks);
        if (!held) upi_watch_unlock(&other->busy);
    }
    for (; p < w->ranks; ++p)
        if (w->asked[p] != 0 && upi_watch_answer(w, p, &answer)) upi_mpi_send_word(world, 1, p, &answer);
}

/* Between two tests: hears the world, and lets the rank's other threads have this end. */
UPIPE_API void upi_mpi_rest(upipe_ctx *c, upipe_mpi *m, int *idle)
{
    upipe_mpi *world = upi_mpi_world(m);
    int news = 0;
    if (world == m) {
        upi_mpi_answer(m, world);
    } else if (upi_watch_try(&world->busy)) {
        (void)upi_mpi_poll(c, world, &news);
        upi_mpi_answer(m, world);
        upi_watch_unlock(&world->busy);
    }
    upi_watch_unlock(&m->busy);
    upi_net_rest(idle, UPI_MPI_YIELDS, UPI_MPI_NAP);
    upi_watch_lock(&m->busy);
}

/* Asks the ranks of the world for whom they wait; returns the question's number. */
UPIPE_API int64_t upi_mpi_ask(upipe_mpi *m)
{
    upipe_mpi *world = upi_mpi_world(m);
    upi_header question;
    int p;
    if (world != m) upi_watch_lock(&world->busy);
    question = upi_watch_question(&world->watch);
    for (p = 0; p < world->comm.ranks; ++p)
        if (p != world->comm.rank) upi_mpi_send_word(world, 0, p, &question);
    if (world != m) upi_watch_unlock(&world->busy);
    return question.call;
}

/* The answers to a question have had their time: names for whom the call waits in the end. */
UPIPE_API upipe_status upi_mpi_late(upipe_ctx *c, upipe_mpi *m, int64_t question)
{
    upipe_mpi *world = upi_mpi_world(m);
    upi_watch *w = &world->watch;
    upi_team_names names;
    int come;
    if (world != m) upi_watch_lock(&world->busy);
    memset(w->marks, 0, (size_t)w->ranks);
    w->since = question;
    come = upi_mpi_mark(m, w->marks);
    come |= upi_team_blame(&m->comm, w->marks, upi_watch_waits, w, &names);
    if (world != m) upi_watch_unlock(&world->busy);
    return upi_team_late_for(&c->err, &m->comm, m->kind, &names, come ? "come" : "finish");
}

/* From the headers of a call to its end. */
UPIPE_API upipe_status upi_mpi_call(upipe_ctx *c, upipe_mpi *m)
{
    const int64_t grace = upi_watch_grace(m->comm.deadline);
    int64_t until = upi_net_until(m->comm.deadline) - grace, question = 0;
    int idle = 0;
    for (;;) {
        int news = 0, missing, left;
        UPIPE_TRY(upi_mpi_progress(c, m, &news, &missing, &left));
        if (missing == 0 && left == 0) return UPIPE_OK;
        if (!upi_first_spares(&m->first, m->kind, m->call)) UPIPE_TRY(upi_comm_whole(c, &m->comm));
        if (news) {
            idle = 0;
            continue;
        }
        if (upipe_net_now() >= until) {
            if (question > 0) return upi_mpi_late(c, m, question);
            question = upi_mpi_ask(m);
            until = upipe_net_now() + grace;
        }
        upi_mpi_rest(c, m, &idle);
    }
}

UPIPE_API upipe_status upi_mpi_finish(upipe_ctx *c, upipe_mpi *m)
{
    upipe_status s;
    upi_watch_lock(&m->busy);
    m->waits = 1;
    s = upi_mpi_call(c, m);
    m->waits = 0;
    upi_watch_unlock(&m->busy);
    return s;
}

/* Is request i in flight? A receive that was not cancelled in time may have met its peer's goodbye. */
UPIPE_API int upi_mpi_flies(upipe_mpi *m, int i)
{
    int size = m->comm.ranks * UPI_MPI_WINDOW, done = 0, cancelled = 0, bytes = -1;
    MPI_Status status;
    if (m->requests[i] == MPI_REQUEST_NULL) return 0;
    if (MPI_Test(&m->requests[i], &done, &status) != MPI_SUCCESS || !done)
        return m->requests[i] != MPI_REQUEST_NULL;
    if (i < size || i >= 2 * size) return 0;
    if (MPI_Test_cancelled(&status, &cancelled) == MPI_SUCCESS && !cancelled &&
        MPI_Get_count(&status, MPI_BYTE, &bytes) == MPI_SUCCESS && bytes == 0)
        m->peer[i / UPI_MPI_WINDOW - m->comm.ranks].left |= 1 << UPI_MPI_DATA;
    return 0;
}

/* Tests the data requests of one way until none is left or the time has passed; returns those left. */
UPIPE_API int upi_mpi_drain(upipe_mpi *m, int way, int64_t until)
{
    int size = m->comm.ranks * UPI_MPI_WINDOW, idle = 0, i, left;
    for (;;) {
        for (i = way * size, left = 0; i < (way + 1) * size; ++i) left += upi_mpi_flies(m, i);
        if (left == 0 || upipe_net_now() >= until) return left;
        upi_net_rest(&idle, UPI_MPI_YIELDS, UPI_MPI_NAP);
    }
}

/* After a failed transfer. A peer that has this rank's header may have sent already, if both match. So the
 * transfer goes on between ranks that have both come, without reporting what goes wrong. */
UPIPE_API void upi_mpi_settle(upipe_ctx *c, upipe_mpi *m)
{
    int64_t until = upi_team_grace(&m->comm);
    upipe_err kept = c->err;
    int idle = 0, left = 1, i, size = m->comm.ranks * UPI_MPI_WINDOW;
    while (left > 0 && upipe_net_now() < until) {
        int news = 0, p;
        if (upi_mpi_poll(c, m, &news) != UPIPE_OK) break;
        for (p = 0; p < m->comm.ranks; ++p)
            if (p != m->comm.rank && m->peer[p].come >= m->call && upi_mpi_fit(c, m, p) == UPIPE_OK)
                m->peer[p].open = 1;
        if (upi_mpi_advance(c, m, &news, &left) != UPIPE_OK) break;
        if (left > 0) upi_net_rest(&idle, UPI_MPI_YIELDS, UPI_MPI_NAP);
    }
    for (i = size; i < 2 * size; ++i)
        if (m->requests[i] != MPI_REQUEST_NULL) MPI_Cancel(&m->requests[i]);
    if (upi_mpi_drain(m, UPIPE_MSG_RECV, upi_net_until(0.01)) > 0 || upi_mpi_drain(m, UPIPE_MSG_SEND, 0) > 0)
        m->comm.quarantine = 1;
    c->err = kept;
}

/* ---- the table's entries ---- */

/* A broken team, or one whose failure arrives now, begins no call. */
UPIPE_API upipe_status upi_mpi_ready(upipe_ctx *c, upipe_mpi *m)
{
    int news;
    upipe_status s = UPIPE_OK;
    upi_watch_lock(&m->busy);
    if (!upi_first_is_broken(&m->first)) s = upi_mpi_poll(c, m, &news);
    upi_watch_unlock(&m->busy);
    return s != UPIPE_OK ? s : upi_comm_whole(c, &m->comm);
}

UPIPE_API upipe_status upi_mpi_start(upipe_ctx *c, upipe_comm *comm, const upipe_msg *list, int n)
{
    upipe_mpi *m = (upipe_mpi *)comm->impl;
    upipe_status s;
    int news = 0, missing, left;
    UPIPE_TRY(upi_mpi_ready(c, m));
    s = c->ops->sync(c); /* MPI reads the buffers now: it knows no stream */
    if (s != UPIPE_OK)
        return upipe_comm_fail(&c->err, comm, s, "rank %d waiting for its device: %s",
                               upi_comm_called(comm, comm->rank), c->err.text);
    UPIPE_TRY(upi_mpi_begin(c, m, UPI_TEAM_TRANSFER, list, NULL, n));
    /* Data begin to move between ranks that have come. What goes wrong now is returned by wait. */
    upi_watch_lock(&m->busy);
    m->owed = upi_mpi_progress(c, m, &news, &missing, &left);
    upi_watch_unlock(&m->busy);
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_mpi_wait(upipe_ctx *c, upipe_comm *comm)
{
    upipe_mpi *m = (upipe_mpi *)comm->impl;
    upipe_status s = m->owed;
    m->owed = UPIPE_OK;
    if (s != UPIPE_OK)
        upi_comm_report(&c->err, comm, s);
    else if (!upi_first_is_broken(&m->first))
        s = upi_comm_copy_own(c, comm, m->list, m->n, c->ops->copy);
    if (s == UPIPE_OK) s = upi_mpi_finish(c, m);
    if (s == UPIPE_OK) return s;
    upi_watch_lock(&m->busy);
    upi_mpi_settle(c, m);
    upi_watch_unlock(&m->busy);
    return s;
}

UPIPE_API upipe_status upi_mpi_barrier(upipe_ctx *c, upipe_comm *comm)
{
    upipe_mpi *m = (upipe_mpi *)comm->impl;
    UPIPE_TRY(upi_mpi_ready(c, m));
    UPIPE_TRY(upi_mpi_begin(c, m, UPI_TEAM_BARRIER, NULL, NULL, 0));
    return upi_mpi_finish(c, m);
}

UPIPE_API upipe_status upi_mpi_all_gather(upipe_ctx *c, upipe_comm *comm, int64_t *all, const int64_t *mine,
                                          int n)
{
    upipe_mpi *m = (upipe_mpi *)comm->impl;
    int r;
    UPIPE_TRY(upi_mpi_ready(c, m));
    UPIPE_TRY(upi_mpi_begin(c, m, UPI_TEAM_ALL_GATHER, NULL, mine, n));
    UPIPE_TRY(upi_mpi_finish(c, m));
    for (r = 0; r < comm->ranks; ++r) {
        const upi_header *of = r == comm->rank ? &m->out[r] : &m->in[(m->call & 1) * comm->ranks + r];
        memcpy(all + (size_t)r * (size_t)n, of->values, (size_t)n * sizeof *all);
    }
    return UPIPE_OK;
}

/* ---- the team ---- */

/* The next bytes of the buffer, aligned for anything; NULL if there is no buffer yet. *used: bytes so far. */
UPIPE_API void *upi_mpi_carve(char *buf, size_t *used, size_t bytes)
{
    char *next = buf != NULL ? buf + *used : NULL;
    *used += (bytes + 15) & ~(size_t)15;
    return next;
}

/* Lays out the buffer; returns its bytes. buf may be NULL. */
UPIPE_API size_t upi_mpi_lay_out(upipe_mpi *m, char *buf)
{
    size_t n = (size_t)m->comm.ranks, used = 0;
    size_t requests = (2 * UPI_MPI_WINDOW + 1) * n, others = UPI_MPI_OTHERS * n;
    m->requests_n = (int)requests;
    m->watch.ranks = m->comm.ranks;
    m->peer = (upi_mpi_peer *)upi_mpi_carve(buf, &used, n * sizeof *m->peer);
    m->out = (upi_header *)upi_mpi_carve(buf, &used, n * sizeof *m->out);
    m->in = (upi_header *)upi_mpi_carve(buf, &used, 2 * n * sizeof *m->in);
    m->words = (upi_header *)upi_mpi_carve(buf, &used, 2 * n * sizeof *m->words);
    m->watch.answers = (upi_header *)upi_mpi_carve(buf, &used, n * sizeof *m->watch.answers);
    m->watch.asked = (int64_t *)upi_mpi_carve(buf, &used, n * sizeof *m->watch.asked);
    m->watch.marks = (char *)upi_mpi_carve(buf, &used, n);
    m->requests = (MPI_Request *)upi_mpi_carve(buf, &used, (requests + others) * sizeof *m->requests);
    m->notices = buf != NULL ? m->requests + requests : NULL;
    m->statuses = (MPI_Status *)upi_mpi_carve(buf, &used, requests * sizeof *m->statuses);
    m->done = (int *)upi_mpi_carve(buf, &used, requests * sizeof *m->done);
    m->comm.list = (upipe_msg *)upi_mpi_carve(buf, &used, 2 * n * sizeof *m->comm.list);
    m->comm.gathered =
        (int64_t *)upi_mpi_carve(buf, &used, n * UPIPE_ALL_GATHER_MAX * sizeof *m->comm.gathered);
    return used;
}

/* A message that free throws away. */
typedef struct upi_mpi_rubbish {
    MPI_Request request;
    void *data;
} upi_mpi_rubbish;

/* Receives from rank p what precedes its goodbyes, and these. What follows them is another team's. */
UPIPE_API void upi_mpi_discard(upipe_mpi *m, int p, upi_mpi_rubbish *rubbish)
{
    int t, there = 0, bytes = 0;
    if (rubbish->request != MPI_REQUEST_NULL) {
        (void)MPI_Test(&rubbish->request, &there, MPI_STATUS_IGNORE);
        if (rubbish->request != MPI_REQUEST_NULL) return;
        free(rubbish->data);
    }
    for (t = 0; t < UPIPE_MPI_TAGS && rubbish->request == MPI_REQUEST_NULL; ++t) {
        int tag = m->tag + t;
        MPI_Status status;
        if (m->peer[p].left & 1 << t || MPI_Iprobe(p, tag, m->mpi, &there, &status) != MPI_SUCCESS ||
            !there || MPI_Get_count(&status, MPI_BYTE, &bytes) != MPI_SUCCESS)
            continue;
        if (bytes == 0) {
            if (MPI_Recv(NULL, 0, MPI_BYTE, p, tag, m->mpi, &status) == MPI_SUCCESS)
                m->peer[p].left |= 1 << t;
            continue;
        }
        rubbish->data = malloc((size_t)bytes);
        if (rubbish->data == NULL ||
            MPI_Irecv(rubbish->data, bytes, MPI_BYTE, p, tag, m->mpi, &rubbish->request) != MPI_SUCCESS) {
            free(rubbish->data);
            rubbish->request = MPI_REQUEST_NULL;
        }
    }
}

/* Says goodbye to the peers and waits for theirs. *late: those that are missed when the deadline has passed,
 * and those to which messages are in flight. */
UPIPE_API void upi_mpi_part_ways(upipe_mpi *m, upi_team_names *late)
{
    int ranks = m->comm.ranks, data = 2 * ranks * UPI_MPI_WINDOW, idle = 0, i, p, t;
    int64_t until = upi_net_until(m->comm.deadline);
    upi_mpi_rubbish rubbish = {MPI_REQUEST_NULL, NULL};
    for (p = 0; p < ranks; ++p) {
        for (t = 0; t < UPIPE_MPI_TAGS && p != m->comm.rank; ++t) {
            MPI_Request *r = &m->notices[(1 + t) * ranks + p];
            if (MPI_Isend(NULL, 0, MPI_BYTE, p, m->tag + t, m->mpi, r) != MPI_SUCCESS) *r = MPI_REQUEST_NULL;
        }
    }
    for (;;) {
        memset(late, 0, sizeof *late);
        for (p = 0; p < ranks; ++p) {
            int left = 0;
            upi_mpi_discard(m, p, &rubbish);
            for (i = 0; i < 2 * UPI_MPI_WINDOW; ++i)
                left += upi_mpi_flies(m, (i % 2 * ranks + p) * UPI_MPI_WINDOW + i / 2);
            for (i = data + p; i < data + (1 + UPI_MPI_OTHERS) * ranks; i += ranks)
                left += upi_mpi_flies(m, i);
            if (left > 0 || m->peer[p].left != UPI_MPI_LEFT)
                upi_team_name(late, &m->comm, upi_comm_called(&m->comm, p));
        }
        if (late->count == 0 || upipe_net_now() >= until) return;
        upi_net_rest(&idle, UPI_MPI_YIELDS, UPI_MPI_NAP);
    }
}

/* upipe_mpi_free -- ends this rank's part; legal after a failure and a failed init too
 *   order   no call is in progress. Returns when every peer has called it, or at the deadline, and then no
 *           message of the team is left: the MPI_Comm and the tags may serve another team, and buffers of a
 *           failed transfer are the host's again. The host keeps the MPI_Comm
 *   errors  BACKEND, with the ranks that have not come, or that are dead: MPI may still read messages of this
 *           team, and write such buffers. One allocation is not freed, and MPI keeps the MPI_Comm when the
 *           host has freed it, so that no other one gets what is late
 */
UPIPE_API upipe_status upipe_mpi_free(upipe_mpi *m, upipe_err *e)
{
    char names[UPI_TEAM_NAMES];
    upi_team_names late;
    MPI_Request hold;
    double deadline;
    int i, rank, called;
    if (m == NULL || m->buf == NULL) return UPIPE_OK;
    rank = m->comm.rank;
    called = upi_comm_called(&m->comm, rank);
    deadline = m->comm.deadline;
    upi_watch_lock(&m->busy);
    (void)upi_first_break(&m->first, UPIPE_ERR_ABORTED, m->met,
                          "the team has been freed"); /* nothing follows a goodbye */
    upi_mpi_part_ways(m, &late);
    upi_comm_leave(&m->comm);
    if (late.count == 0) {
        free(m->buf);
        memset(m, 0, sizeof *m);
        return UPIPE_OK;
    }
    for (i = 0; i < 2 * m->comm.ranks * UPI_MPI_WINDOW; ++i)
        if (m->requests[i] != MPI_REQUEST_NULL) MPI_Request_free(&m->requests[i]);
    (void)MPI_Recv_init(NULL, 0, MPI_BYTE, rank, m->tag, m->mpi, &hold); /* never started: a reference */
    memset(m, 0, sizeof *m);
    return upipe_fail(
        e, UPIPE_ERR_BACKEND,
        "rank %d waited %g s for %s to free the team: messages may be in flight, and keep their "
        "memory",
        called, deadline, upi_team_names_text(&late, names));
}

/* The host's communicator must be able to report errors, and the tags must exist. */
UPIPE_API upipe_status upi_mpi_fit_comm(MPI_Comm mpi, int tag, upipe_err *e)
{
    MPI_Errhandler handler;
    void *bound = NULL;
    int there = 0, inter = 0, fatal;
    UPIPE_TRY(upi_mpi_check(e, MPI_Comm_test_inter(mpi, &inter), "MPI_Comm_test_inter("));
    if (inter) return upipe_fail(e, UPIPE_ERR_ARG, "a team on an inter-communicator");
    UPIPE_TRY(upi_mpi_check(e, MPI_Comm_get_errhandler(mpi, &handler), "MPI_Comm_get_errhandler("));
    fatal = handler == MPI_ERRORS_ARE_FATAL;
    MPI_Errhandler_free(&handler);
    if (fatal)
        return upipe_fail(e, UPIPE_ERR_ARG,
                          "the communicator ends the program at any error: "
                          "MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN)");
    UPIPE_TRY(upi_mpi_check(e, MPI_Comm_get_attr(mpi, MPI_TAG_UB, &bound, &there), "MPI_Comm_get_attr("));
    if (tag < 0 || (there && tag > *(int *)bound - (UPIPE_MPI_TAGS - 1)))
        return upipe_fail(e, UPIPE_ERR_ARG, "tags %lld and %lld; MPI has 0 to %d", (long long)tag,
                          (long long)tag + 1, there ? *(int *)bound : 32767);
    return UPIPE_OK;
}

/* upipe_mpi_init -- makes this rank's end of a team of all ranks of an MPI communicator; does not communicate
 *   mpi         the host's, an intra-communicator whose errors return; kept until upipe_mpi_free
 *   tag         the team uses tag and tag + 1, and nobody else does meanwhile; the same on all ranks
 *   deadline_s  seconds that one call may wait for its peers; 0 = UPIPE_DEADLINE_DEFAULT. Each call reads
 *               comm.deadline, which each rank may change
 *   bytes       one allocation, about 4 KB a rank of the team
 *   errors      ARG, MEMORY, BACKEND (MPI's own text); then there is nothing to free
 */
UPIPE_API upipe_status upipe_mpi_init(upipe_mpi *m, MPI_Comm mpi, int tag, double deadline_s, upipe_err *e)
{
    static const upipe_comm_ops ops = {
        "mpi",        upi_mpi_start, upi_mpi_wait, upi_mpi_barrier, upi_mpi_all_gather, upi_mpi_failure,
        upi_mpi_fail, NULL,          NULL};
    int running = 0, ended = 0, i;
    memset(m, 0, sizeof *m);
    UPIPE_TRY(upi_team_deadline(e, deadline_s));
    MPI_Initialized(&running);
    MPI_Finalized(&ended);
    if (!running || ended) return upipe_fail(e, UPIPE_ERR_ARG, "MPI is not running");
    if (mpi == MPI_COMM_NULL) return upipe_fail(e, UPIPE_ERR_ARG, "a team on MPI_COMM_NULL");
    UPIPE_TRY(upi_mpi_fit_comm(mpi, tag, e));
    UPIPE_TRY(upi_mpi_check(e, MPI_Comm_size(mpi, &m->comm.ranks), "MPI_Comm_size("));
    UPIPE_TRY(upi_mpi_check(e, MPI_Comm_rank(mpi, &m->comm.rank), "MPI_Comm_rank("));
    m->buf = calloc(1, upi_mpi_lay_out(m, NULL));
    if (m->buf == NULL)
        return upipe_fail(e, UPIPE_ERR_MEMORY, "no memory for a team of %d ranks", m->comm.ranks);
    upi_mpi_lay_out(m, (char *)m->buf);
    for (i = 0; i < m->requests_n; ++i) m->requests[i] = MPI_REQUEST_NULL;
    for (i = 0; i < UPI_MPI_OTHERS * m->comm.ranks; ++i) m->notices[i] = MPI_REQUEST_NULL;
    m->peer[m->comm.rank].left = UPI_MPI_LEFT; /* it sends itself nothing */
    m->mpi = mpi;
    m->tag = tag;
    m->fragment = UPIPE_MPI_FRAGMENT;
    upi_team_init(&m->comm, &ops, m, deadline_s);
    return UPIPE_OK;
}

#endif

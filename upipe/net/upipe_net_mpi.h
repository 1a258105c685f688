/* upipe_net_mpi.h -- a team of ranks that are processes, over MPI        backend, includes base, ops, comm
 *
 *     MPI_Comm_dup(MPI_COMM_WORLD, &mine);                      the host makes it, and frees it
 *     MPI_Comm_set_errhandler(mine, MPI_ERRORS_RETURN);
 *     upipe_mpi team;
 *     upipe_status s = upipe_mpi_init(&team, mine, 0, 0, &err); tags 0 and 1, the usual deadline
 *     ctx.team = &team.comm;
 *     ...
 *     upipe_mpi_free(&team, &err);                              before MPI_Comm_free and MPI_Finalize
 *
 * How bytes move. Every call begins with a note to each peer: number and kind of the call, and what this rank
 * sends to the peer and receives from it. A barrier and a gather are their notes. The data of an exchange
 * flow between two ranks once each has the other's note and finds that it fits: nobody is handed a buffer who
 * has not come, or who disagrees. A segment is one message, through a vector type where its blocks have gaps;
 * longer ones are split. No blocking collective and no blocking wait is used: requests are tested, and
 * between looks the rank yields or naps, so that ranks may outnumber cores. Nothing moves between start and
 * wait unless MPI makes progress by itself. Buffers may be device memory if MPI can read it; start waits for
 * ctx->stream.
 *
 * Every rank makes the same sequence of calls (exchange, barrier, gather). All calls on a communicator, abort
 * too, come from one thread at a time: MPI_THREAD_SINGLE is enough for a process without other threads,
 * FUNNELED for calls from the main thread, SERIALIZED for any where the host keeps its MPI calls apart.
 *
 * Failures. The rank that finds one tells the others by a note, and returns its status: TIMEOUT, MISMATCH,
 * BACKEND (with MPI's own text). The others return ABORTED with its sentence, except that each returns a
 * MISMATCH once. A failed exchange goes on between ranks that have agreed on it until nothing is under way,
 * for at most the deadline or a second, whichever is less; receives that are left are cancelled; and if MPI
 * may still touch a buffer, comm->quarantine is set. Afterwards only upipe_mpi_free is legal, and neither the
 * MPI_Comm nor the tags may serve another team: late notes may be under way.
 *
 * What MPI itself does about a process that dies is its own affair, and often ends the job. Open MPI 4 lets
 * the survivors live under mpirun --enable-recovery; they must not call MPI_Finalize, which waits for all.
 *
 * Strict ISO C hides the clock: include this file first, or define _POSIX_C_SOURCE=200809L.
 */
#ifndef UPIPE_NET_MPI_H
#define UPIPE_NET_MPI_H

#include "upipe_net_clock.h"

#include <mpi.h>
#include <stdlib.h>

#include "../upipe_base.h"
#include "../upipe_comm.h"
#include "../upipe_ops.h"

enum {
    UPIPE_MPI_TAGS = 2,                   /* tags that a team uses, from its base: notes, data */
    UPIPE_MPI_MESSAGE = 1 << 30,          /* bytes of one message at most: MPI counts in int */
    UPI_MPI_WINDOW = 4,                   /* messages under way at a time, each way, with each peer */
    UPI_MPI_SHOWN = UPIPE_ALL_GATHER_MAX / 4, /* segments, each way, whose shape a note spells out */
    UPI_MPI_YIELDS = 2000,                /* fruitless looks before a waiting rank naps */
    UPI_MPI_NAP = 50000                   /* ns */
};

#define UPI_MPI_MAGIC UINT64_C(0x3169706d65706975) /* "uipempi1" in memory, low byte first */

typedef enum upi_mpi_kind {
    UPI_MPI_TRANSFER = 1,
    UPI_MPI_BARRIER,
    UPI_MPI_GATHER,
    UPI_MPI_FAILURE
} upi_mpi_kind;

enum { UPI_MPI_SEND, UPI_MPI_RECEIVE };

/* What goes one way between two ranks, as one of them lists it. */
typedef struct upi_mpi_load {
    int64_t segments, bytes;
    uint64_t print; /* hash of all block sizes and counts */
} upi_mpi_load;

/* The same bytes on all machines of the team: one architecture. */
typedef struct upi_mpi_note {
    uint64_t magic;
    int64_t call;    /* number, from 1; in a FAILURE the last call that every rank had come to */
    int64_t message; /* the sender's upipe_mpi.message */
    int32_t kind, n; /* n: numbers of a gather, status of a failure */
    upi_mpi_load
        load[2]; /* of an exchange, UPI_MPI_SEND and UPI_MPI_RECEIVE as the note's sender sees them */
    /* A gather's numbers; of an exchange [way][UPI_MPI_SHOWN][bytes, count]; of a failure its sentence. */
    int64_t values[UPIPE_ALL_GATHER_MAX];
} upi_mpi_note;

/* One way of one peer: what is to be posted next, and the messages under way. */
typedef struct upi_mpi_flow {
    size_t offset; /* within the block */
    int64_t block;
    int segment;   /* of the list */
    int under_way; /* messages */
    size_t bytes[UPI_MPI_WINDOW];
} upi_mpi_flow;

typedef struct upi_mpi_peer {
    int64_t come; /* number of the last note that has arrived from it */
    int open;     /* its note of this call fits: data flow */
    upi_mpi_flow flow[2];
} upi_mpi_peer;

/* A rank's end of a team. Plain, the host's; must not move between init and free. */
typedef struct upipe_mpi {
    upipe_comm comm;
    int64_t
        message; /* bytes of one message at most, the same on all ranks; may be changed right after init */
    /* the rest is the transport's */
    MPI_Comm mpi; /* the host's */
    int tag;
    int64_t call, met; /* number of the last call begun here, and of the last that all ranks have come to */
    upi_mpi_kind kind; /* of the call under way */
    const upipe_msg *list; /* [n] */
    int n;
    upi_mpi_peer *peer;    /* [ranks] */
    upi_mpi_note *out;     /* [ranks]: this call's notes */
    upi_mpi_note *in;      /* [2][ranks]: those of call s at [s & 1], as peers may be one call ahead */
    MPI_Request *requests; /* [2][ranks][UPI_MPI_WINDOW] data, then [ranks] notes */
    MPI_Request *notices;  /* [ranks]: the failure, told */
    MPI_Status *statuses;  /* [requests_n] */
    int *done;             /* [requests_n] */
    int requests_n;
    upi_mpi_note notice;
    upipe_err reason; /* constant once broken */
    int64_t reason_met;
    upipe_status owed; /* found by start, to be returned by wait */
    int broken, told;  /* told: this rank has returned the failure before */
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

/* Breaks this rank's end, if it is whole: this is the reason for ever, and the others are told. A note that
 * cannot be sent is left out: its rank then meets its own deadline. */
UPIPE_API void upi_mpi_break(upipe_mpi *m, upipe_status s, const char *why)
{
    int k;
    if (m->broken) return;
    m->broken = 1;
    m->reason_met = m->met;
    upipe_fail(&m->reason, s, "%s", why);
    m->notice.magic = UPI_MPI_MAGIC;
    m->notice.kind = UPI_MPI_FAILURE;
    m->notice.call = m->met;
    m->notice.n = (int32_t)s;
    snprintf((char *)m->notice.values, sizeof m->notice.values, "%s", why);
    for (k = 1; k < m->comm.ranks; ++k) {
        int p = (m->comm.rank + k) % m->comm.ranks;
        if (MPI_Isend(&m->notice, (int)sizeof m->notice, MPI_BYTE, p, m->tag, m->mpi, &m->notices[p]) !=
            MPI_SUCCESS)
            m->notices[p] = MPI_REQUEST_NULL;
    }
}

/* Returns a broken team's failure; own = its status, if this call has found it, else UPIPE_OK. */
UPIPE_API upipe_status upi_mpi_tell(upipe_ctx *c, upipe_mpi *m, upipe_status own)
{
    upipe_status s = UPIPE_ERR_ABORTED;
    if (own != UPIPE_OK)
        s = own;
    else if (m->owed != UPIPE_OK)
        s = m->owed;
    else if (!m->told && m->reason.status == UPIPE_ERR_MISMATCH)
        s = UPIPE_ERR_MISMATCH;
    m->told = 1;
    m->owed = UPIPE_OK;
    return upipe_fail(&c->err, s, "%s", m->reason.text);
}

/* Breaks the team with this sentence, unless another failure was first; returns what the rank must return. */
__attribute__((unused, format(printf, 4, 5))) static inline upipe_status upi_mpi_fail(upipe_ctx *c,
                                                                                      upipe_mpi *m,
                                                                                      upipe_status s,
                                                                                      const char *format, ...)
{
    upipe_err e;
    va_list args;
    if (m->broken) return upi_mpi_tell(c, m, UPIPE_OK);
    va_start(args, format);
    vsnprintf(e.text, sizeof e.text, format, args);
    va_end(args);
    upi_mpi_break(m, s, e.text);
    return upi_mpi_tell(c, m, s);
}

UPIPE_API upipe_status upi_mpi_checked(upipe_ctx *c, upipe_mpi *m, int code, const char *what)
{
    upipe_err e;
    if (code == MPI_SUCCESS) return UPIPE_OK;
    upi_mpi_check(&e, code, what);
    return upi_mpi_fail(c, m, UPIPE_ERR_BACKEND, "rank %d: %s", m->comm.rank, e.text);
}

#define UPI_MPI(c, m, call) UPIPE_TRY(upi_mpi_checked((c), (m), (call), #call))

UPIPE_API void upi_mpi_abort(upipe_comm *comm, const char *why)
{
    upi_mpi_break((upipe_mpi *)comm->impl, UPIPE_ERR_ABORTED, why != NULL ? why : "aborted by the host");
}

/* ---- notes ---- */

UPIPE_API const char *upi_mpi_kind_name(int kind)
{
    return kind == UPI_MPI_TRANSFER  ? "an transfer"
           : kind == UPI_MPI_BARRIER ? "a barrier"
           : kind == UPI_MPI_GATHER  ? "a gather"
                                     : "an unknown call";
}

UPIPE_API void upi_mpi_load_add(upi_mpi_note *note, int way, size_t bytes, int64_t count)
{
    upi_mpi_load *load = &note->load[way];
    int64_t *shown = note->values + way * 2 * UPI_MPI_SHOWN;
    uint64_t word[2];
    int i;
    if (bytes == 0) return;
    if (load->segments < UPI_MPI_SHOWN) {
        shown[2 * load->segments] = (int64_t)bytes;
        shown[2 * load->segments + 1] = count;
    }
    ++load->segments;
    load->bytes += (int64_t)bytes * count;
    word[0] = bytes;
    word[1] = (uint64_t)count;
    for (i = 0; i < 128; i += 8) /* FNV-1a */
        load->print = (load->print ^ ((word[i / 64] >> (i % 64)) & 255)) * 1099511628211u;
}

/* Begins a call: a note to every peer. */
UPIPE_API upipe_status upi_mpi_begin(upipe_ctx *c, upipe_mpi *m, upi_mpi_kind kind, const upipe_msg *list,
                                     const int64_t *values, int n)
{
    int ranks = m->comm.ranks, i, k, p;
    ++m->call;
    m->kind = kind;
    m->list = list;
    m->n = list != NULL ? n : 0;
    for (p = 0; p < ranks; ++p) {
        upi_mpi_note *note = &m->out[p];
        memset(note, 0, sizeof *note);
        memset(m->peer[p].flow, 0, sizeof m->peer[p].flow);
        m->peer[p].open = 0;
        note->magic = UPI_MPI_MAGIC;
        note->call = m->call;
        note->message = m->message;
        note->kind = (int32_t)kind;
        if (kind == UPI_MPI_GATHER) {
            note->n = n;
            memcpy(note->values, values, (size_t)n * sizeof *values);
        }
    }
    for (i = 0; i < m->n; ++i) {
        upi_mpi_load_add(&m->out[list[i].peer], UPI_MPI_SEND, list[i].send_bytes, list[i].count);
        upi_mpi_load_add(&m->out[list[i].peer], UPI_MPI_RECEIVE, list[i].recv_bytes, list[i].count);
    }
    for (k = 1; k < ranks; ++k) { /* each rank begins with its neighbour: the targets are spread */
        p = (m->comm.rank + k) % ranks;
        UPI_MPI(c, m,
                MPI_Isend(&m->out[p], (int)sizeof m->out[p], MPI_BYTE, p, m->tag, m->mpi,
                          &m->requests[2 * ranks * UPI_MPI_WINDOW + p]));
    }
    return UPIPE_OK;
}

/* Files a note of rank p. */
UPIPE_API upipe_status upi_mpi_file(upipe_ctx *c, upipe_mpi *m, int p, const upi_mpi_note *note)
{
    if (note->magic != UPI_MPI_MAGIC)
        return upi_mpi_fail(c, m, UPIPE_ERR_MISMATCH, "rank %d sends rank %d something else with tag %d", p,
                            m->comm.rank, m->tag);
    if (note->kind == UPI_MPI_FAILURE) {
        if (m->broken) return UPIPE_OK;
        m->broken = 1; /* the others hear it from p */
        m->reason_met = note->call;
        upipe_fail(&m->reason, note->n > 0 ? (upipe_status)note->n : UPIPE_ERR_ABORTED, "%.*s",
                 (int)sizeof m->reason.text - 1, (const char *)note->values);
        return UPIPE_OK;
    }
    if (note->call != m->peer[p].come + 1 || note->call > m->call + 1)
        return upi_mpi_fail(c, m, UPIPE_ERR_MISMATCH, "rank %d sends call %lld where rank %d expects %lld", p,
                            (long long)note->call, m->comm.rank, (long long)m->peer[p].come + 1);
    m->in[(note->call & 1) * m->comm.ranks + p] = *note;
    m->peer[p].come = note->call;
    return UPIPE_OK;
}

/* Takes in the notes that have arrived. */
UPIPE_API upipe_status upi_mpi_listen(upipe_ctx *c, upipe_mpi *m, int *news)
{
    for (;;) {
        MPI_Status status;
        upi_mpi_note note;
        int there = 0, bytes = 0;
        UPI_MPI(c, m, MPI_Iprobe(MPI_ANY_SOURCE, m->tag, m->mpi, &there, &status));
        if (!there) return UPIPE_OK;
        UPI_MPI(c, m, MPI_Get_count(&status, MPI_BYTE, &bytes));
        if (bytes != (int)sizeof note)
            return upi_mpi_fail(c, m, UPIPE_ERR_MISMATCH,
                                "rank %d sends rank %d %d bytes with tag %d, where a note has %zu",
                                status.MPI_SOURCE, m->comm.rank, bytes, m->tag, sizeof note);
        UPI_MPI(c, m,
                MPI_Recv(&note, (int)sizeof note, MPI_BYTE, status.MPI_SOURCE, m->tag, m->mpi, &status));
        UPIPE_TRY(upi_mpi_file(c, m, status.MPI_SOURCE, &note));
        *news = 1;
    }
}

/* Compares one way between two ranks: what `from` sends and what `to` receives, by the note of each. */
UPIPE_API upipe_status upi_mpi_fit_load(upipe_err *e, const upi_mpi_note *sender, int from,
                                        const upi_mpi_note *receiver, int to)
{
    const upi_mpi_load *out = &sender->load[UPI_MPI_SEND], *in = &receiver->load[UPI_MPI_RECEIVE];
    const int64_t *gives = sender->values, *takes = receiver->values + 2 * UPI_MPI_SHOWN;
    int64_t i;
    if (out->segments != in->segments)
        return upipe_fail(e, UPIPE_ERR_MISMATCH, "rank %d sends %lld segments to rank %d, which receives %lld",
                        from, (long long)out->segments, to, (long long)in->segments);
    for (i = 0; i < out->segments && i < UPI_MPI_SHOWN; ++i, gives += 2, takes += 2)
        if (gives[0] != takes[0] || gives[1] != takes[1])
            return upipe_fail(e, UPIPE_ERR_MISMATCH,
                            "rank %d sends %lld blocks of %lld bytes to rank %d, which receives %lld of %lld",
                            from, (long long)gives[1], (long long)gives[0], to, (long long)takes[1],
                            (long long)takes[0]);
    if (out->print == in->print) return UPIPE_OK;
    return upipe_fail(e, UPIPE_ERR_MISMATCH,
                    "rank %d sends %lld segments of %lld bytes in all to rank %d, which receives %lld in "
                    "other blocks",
                    from, (long long)out->segments, (long long)out->bytes, to, (long long)in->bytes);
}

/* Compares this call's note of rank p with what this rank does. */
UPIPE_API upipe_status upi_mpi_fit(const upipe_mpi *m, int p, upipe_err *e)
{
    const upi_mpi_note *mine = &m->out[p], *theirs = &m->in[(m->call & 1) * m->comm.ranks + p];
    int rank = m->comm.rank;
    if (mine->kind != theirs->kind)
        return upipe_fail(e, UPIPE_ERR_MISMATCH, "rank %d is in %s and rank %d in %s", rank,
                        upi_mpi_kind_name(mine->kind), p, upi_mpi_kind_name(theirs->kind));
    if (mine->n != theirs->n)
        return upipe_fail(e, UPIPE_ERR_MISMATCH, "rank %d gathers %d numbers and rank %d gathers %d", rank,
                        mine->n, p, theirs->n);
    if (mine->message != theirs->message)
        return upipe_fail(e, UPIPE_ERR_MISMATCH,
                        "rank %d sends at most %lld bytes in a message and rank %d at most %lld", rank,
                        (long long)mine->message, p, (long long)theirs->message);
    if (m->kind != UPI_MPI_TRANSFER) return UPIPE_OK;
    UPIPE_TRY(upi_mpi_fit_load(e, theirs, p, mine, rank));
    return upi_mpi_fit_load(e, mine, rank, theirs, p);
}

/* ---- data ---- */

/* One message: `blocks` blocks of `bytes` bytes, `step` apart; segment = its place in the list. */
typedef struct upi_mpi_message {
    size_t at, bytes, step; /* at: bytes behind the segment's address */
    int blocks, segment;
} upi_mpi_message;

/* The next message of a flow, or 0 when all are posted. How a segment is split depends on the size and number
 * of its blocks alone, which both ranks know; gaps are each rank's own. */
UPIPE_API int upi_mpi_next(const upipe_mpi *m, int peer, int way, upi_mpi_flow *f, upi_mpi_message *out)
{
    size_t most = (size_t)m->message;
    for (; f->segment < m->n; ++f->segment, f->block = 0) {
        const upipe_msg *s = &m->list[f->segment];
        size_t bytes = way == UPI_MPI_SEND ? s->send_bytes : s->recv_bytes;
        if (s->peer != peer || bytes == 0 || f->block == s->count) continue;
        out->segment = f->segment;
        out->step = way == UPI_MPI_SEND ? s->send_step : s->recv_step;
        out->at = (size_t)f->block * out->step + f->offset;
        if (bytes > most) { /* part of one block */
            out->blocks = 1;
            out->bytes = bytes - f->offset < most ? bytes - f->offset : most;
            f->offset += out->bytes;
            if (f->offset < bytes) return 1;
            f->offset = 0;
            ++f->block;
        } else {
            int64_t fits = (int64_t)(most / bytes), left = s->count - f->block;
            out->blocks = (int)(left < fits ? left : fits);
            out->bytes = bytes;
            f->block += out->blocks;
        }
        return 1;
    }
    return 0;
}

/* Posts one message. A block alone, or blocks without gaps, are plain bytes. */
UPIPE_API upipe_status upi_mpi_post(upipe_ctx *c, upipe_mpi *m, int peer, int way, const upi_mpi_message *x,
                                    MPI_Request *request)
{
    const upipe_msg *s = &m->list[x->segment];
    MPI_Datatype type = MPI_BYTE;
    int packed = x->blocks == 1 || x->step == x->bytes, n = packed ? (int)(x->bytes * (size_t)x->blocks) : 1;
    int code;
    if (!packed) {
        UPI_MPI(c, m, MPI_Type_create_hvector(x->blocks, (int)x->bytes, (MPI_Aint)x->step, MPI_BYTE, &type));
        code = MPI_Type_commit(&type);
        if (code != MPI_SUCCESS) {
            MPI_Type_free(&type);
            return upi_mpi_checked(c, m, code, "MPI_Type_commit(");
        }
    }
    if (way == UPI_MPI_SEND)
        code = MPI_Isend((const char *)s->send + x->at, n, type, peer, m->tag + 1, m->mpi, request);
    else
        code = MPI_Irecv((char *)s->recv + x->at, n, type, peer, m->tag + 1, m->mpi, request);
    if (!packed) MPI_Type_free(&type); /* the message keeps it as long as it needs it */
    if (code != MPI_SUCCESS) *request = MPI_REQUEST_NULL;
    return upi_mpi_checked(c, m, code, way == UPI_MPI_SEND ? "MPI_Isend(" : "MPI_Irecv(");
}

/* Fills the window of one way of one peer. */
UPIPE_API upipe_status upi_mpi_pump(upipe_ctx *c, upipe_mpi *m, int peer, int way)
{
    upi_mpi_flow *f = &m->peer[peer].flow[way];
    MPI_Request *window = m->requests + (way * m->comm.ranks + peer) * UPI_MPI_WINDOW;
    upi_mpi_message message;
    int i;
    for (i = 0; i < UPI_MPI_WINDOW && f->segment < m->n; ++i) {
        if (window[i] != MPI_REQUEST_NULL) continue;
        if (!upi_mpi_next(m, peer, way, f, &message)) return UPIPE_OK;
        UPIPE_TRY(upi_mpi_post(c, m, peer, way, &message, &window[i]));
        f->bytes[i] = message.bytes * (size_t)message.blocks;
        ++f->under_way;
    }
    return UPIPE_OK;
}

/* Files request i, which is complete. */
UPIPE_API upipe_status upi_mpi_complete(upipe_ctx *c, upipe_mpi *m, int i, MPI_Status *status)
{
    int data = 2 * m->comm.ranks * UPI_MPI_WINDOW, slot = i % UPI_MPI_WINDOW, bytes = -1, cancelled = 0;
    int peer = i / UPI_MPI_WINDOW % m->comm.ranks, way = i / UPI_MPI_WINDOW / m->comm.ranks;
    upi_mpi_flow *f;
    if (i >= data) return UPIPE_OK;
    f = &m->peer[peer].flow[way];
    --f->under_way;
    if (way == UPI_MPI_SEND) return UPIPE_OK;
    UPI_MPI(c, m, MPI_Test_cancelled(status, &cancelled));
    if (cancelled) return UPIPE_OK;
    UPI_MPI(c, m, MPI_Get_count(status, MPI_BYTE, &bytes));
    if ((size_t)bytes != f->bytes[slot])
        return upi_mpi_fail(c, m, UPIPE_ERR_MISMATCH,
                            "rank %d sends a message of %d bytes to rank %d, not %zu", peer, bytes,
                            m->comm.rank, f->bytes[slot]);
    m->comm.moved_bytes += bytes;
    return UPIPE_OK;
}

/* Tests the requests, and posts what there is space for. *left: data messages not complete, or not posted. */
UPIPE_API upipe_status upi_mpi_move(upipe_ctx *c, upipe_mpi *m, int *news, int *left)
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
            UPIPE_TRY(upi_mpi_pump(c, m, p, way));
            *left += f->under_way + (f->segment < m->n);
        }
    }
    return UPIPE_OK;
}

/* ---- a call, from its notes to its end ---- */

/* One look. *missing: ranks whose note has not come; *left: messages of those who have. */
UPIPE_API upipe_status upi_mpi_look(upipe_ctx *c, upipe_mpi *m, int *news, int *missing, int *left)
{
    upipe_err e;
    int p, i, data = 2 * m->comm.ranks * UPI_MPI_WINDOW;
    UPIPE_TRY(upi_mpi_listen(c, m, news));
    *missing = 0;
    for (p = 0; p < m->comm.ranks; ++p) {
        upi_mpi_peer *peer = &m->peer[p];
        if (p == m->comm.rank || peer->open) continue;
        if (peer->come < m->call) {
            ++*missing;
            continue;
        }
        if (upi_mpi_fit(m, p, &e) != UPIPE_OK) return upi_mpi_fail(c, m, UPIPE_ERR_MISMATCH, "%s", e.text);
        peer->open = 1;
    }
    if (*missing == 0) m->met = m->call;
    UPIPE_TRY(upi_mpi_move(c, m, news, left));
    for (i = data; i < m->requests_n; ++i) *left += m->requests[i] != MPI_REQUEST_NULL;
    return UPIPE_OK;
}

/* The deadline has passed: names those waited for. */
UPIPE_API upipe_status upi_mpi_late(upipe_ctx *c, upipe_mpi *m, int missing)
{
    char names[96] = "";
    int p, count = 0, at = 0; /* first those who have not come, then those whose messages are not through */
    for (p = 0; p < m->comm.ranks; ++p) {
        const upi_mpi_peer *peer = &m->peer[p];
        int late = missing > 0 ? peer->come < m->call
                               : peer->flow[0].under_way > 0 || peer->flow[1].under_way > 0 ||
                                     m->requests[2 * m->comm.ranks * UPI_MPI_WINDOW + p] != MPI_REQUEST_NULL;
        if (p == m->comm.rank || !late) continue;
        if (++count <= 8) at += snprintf(names + at, sizeof names - (size_t)at, count > 1 ? ", %d" : "%d", p);
    }
    if (count > 8) snprintf(names + at, sizeof names - (size_t)at, " and %d more", count - 8);
    return upi_mpi_fail(c, m, UPIPE_ERR_TIMEOUT, "rank %d waited %g s in %s for rank%s %s to %s",
                        m->comm.rank, m->comm.deadline, upi_mpi_kind_name((int)m->kind), count > 1 ? "s" : "",
                        names, missing > 0 ? "come" : "finish");
}

UPIPE_API upipe_status upi_mpi_finish(upipe_ctx *c, upipe_mpi *m)
{
    int64_t until = upi_net_until(m->comm.deadline);
    int idle = 0;
    for (;;) {
        int news = 0, missing, left, certain;
        UPIPE_TRY(upi_mpi_look(c, m, &news, &missing, &left));
        if (missing == 0 && left == 0) return UPIPE_OK;
        /* A gather that the failing rank has seen whole is on its way to all: else a rank that reads it
         * first, and aborts over what it finds, would keep the others from finding it. */
        certain = m->kind != UPI_MPI_TRANSFER && m->reason_met >= m->call;
        if (m->broken && !certain) return upi_mpi_tell(c, m, UPIPE_OK);
        if (news) {
            idle = 0;
            continue;
        }
        if (upipe_net_now() >= until) return upi_mpi_late(c, m, missing);
        upi_net_rest(&idle, UPI_MPI_YIELDS, UPI_MPI_NAP);
    }
}

/* Tests the data requests of one way until none is left or the instant has passed; returns those left. */
UPIPE_API int upi_mpi_drain(upipe_mpi *m, int way, int64_t until)
{
    int size = m->comm.ranks * UPI_MPI_WINDOW, idle = 0, i, left;
    MPI_Request *requests = m->requests + way * size;
    for (;;) {
        for (i = left = 0; i < size; ++i) {
            int done = 0;
            if (requests[i] == MPI_REQUEST_NULL) continue;
            if (MPI_Test(&requests[i], &done, MPI_STATUS_IGNORE) != MPI_SUCCESS || !done)
                left += requests[i] != MPI_REQUEST_NULL;
        }
        if (left == 0 || upipe_net_now() >= until) return left;
        upi_net_rest(&idle, UPI_MPI_YIELDS, UPI_MPI_NAP);
    }
}

/* After a failed exchange. To a peer that has this rank's note and fits, this rank is bound: it may have sent
 * already. So the exchange goes on, quietly, where both have come, for `seconds` or one second at most. */
UPIPE_API void upi_mpi_vacate(upipe_ctx *c, upipe_mpi *m, double seconds)
{
    int64_t until = upi_net_until(seconds < 1 ? seconds : 1);
    upipe_err kept = c->err, e;
    int idle = 0, left = 1, i, size = m->comm.ranks * UPI_MPI_WINDOW;
    while (left > 0 && upipe_net_now() < until) {
        int news = 0, p;
        if (upi_mpi_listen(c, m, &news) != UPIPE_OK) break;
        for (p = 0; p < m->comm.ranks; ++p)
            if (p != m->comm.rank && m->peer[p].come >= m->call && upi_mpi_fit(m, p, &e) == UPIPE_OK)
                m->peer[p].open = 1;
        if (upi_mpi_move(c, m, &news, &left) != UPIPE_OK) break;
        if (left > 0) upi_net_rest(&idle, UPI_MPI_YIELDS, UPI_MPI_NAP);
    }
    for (i = size; i < 2 * size; ++i)
        if (m->requests[i] != MPI_REQUEST_NULL) MPI_Cancel(&m->requests[i]);
    if (upi_mpi_drain(m, UPI_MPI_RECEIVE, upi_net_until(0.01)) > 0 || upi_mpi_drain(m, UPI_MPI_SEND, 0) > 0)
        m->comm.quarantine = 1;
    c->err = kept;
}

/* ---- the table's entries ---- */

/* A poisoned rank, or one that finds now that another has failed, goes no further. */
UPIPE_API upipe_status upi_mpi_ready(upipe_ctx *c, upipe_mpi *m)
{
    int news;
    if (!m->broken) UPIPE_TRY(upi_mpi_listen(c, m, &news));
    return m->broken ? upi_mpi_tell(c, m, UPIPE_OK) : UPIPE_OK;
}

/* What a rank sends to itself. */
UPIPE_API upipe_status upi_mpi_copy_own(upipe_ctx *c, upipe_mpi *m, const upipe_msg *list, int n)
{
    int rank = m->comm.rank, from = 0, to = 0;
    for (;; ++from, ++to) {
        int64_t i;
        while (from < n && (list[from].peer != rank || list[from].send_bytes == 0)) ++from;
        while (to < n && (list[to].peer != rank || list[to].recv_bytes == 0)) ++to;
        if (from == n && to == n) return UPIPE_OK;
        if (from == n || to == n || list[from].send_bytes != list[to].recv_bytes ||
            list[from].count != list[to].count)
            return upi_mpi_fail(c, m, UPIPE_ERR_MISMATCH,
                                "rank %d sends itself blocks that it does not receive", rank);
        for (i = 0; i < list[from].count; ++i) {
            upipe_status s = c->ops->copy(c, (char *)list[to].recv + (size_t)i * list[to].recv_step,
                                          (const char *)list[from].send + (size_t)i * list[from].send_step,
                                          list[from].send_bytes);
            if (s != UPIPE_OK) return upi_mpi_fail(c, m, s, "rank %d copying: %s", rank, c->err.text);
        }
    }
}

UPIPE_API upipe_status upi_mpi_start(upipe_ctx *c, upipe_comm *comm, const upipe_msg *list, int n)
{
    upipe_mpi *m = (upipe_mpi *)comm->impl;
    upipe_status s;
    int news = 0, missing, left;
    UPIPE_TRY(upi_mpi_ready(c, m));
    s = c->ops->sync(c); /* MPI reads the buffers now: it knows no stream */
    if (s != UPIPE_OK)
        return upi_mpi_fail(c, m, s, "rank %d waiting for its device: %s", comm->rank, c->err.text);
    UPIPE_TRY(upi_mpi_begin(c, m, UPI_MPI_TRANSFER, list, NULL, n));
    /* Those who are here already need not wait for this rank's wait, which returns what goes wrong now. */
    m->owed = upi_mpi_look(c, m, &news, &missing, &left);
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_mpi_wait(upipe_ctx *c, upipe_comm *comm)
{
    upipe_mpi *m = (upipe_mpi *)comm->impl;
    upipe_status s = m->broken ? UPIPE_OK : upi_mpi_copy_own(c, m, m->list, m->n);
    if (s == UPIPE_OK) s = upi_mpi_finish(c, m);
    if (s != UPIPE_OK) upi_mpi_vacate(c, m, comm->deadline);
    return s;
}

UPIPE_API upipe_status upi_mpi_barrier(upipe_ctx *c, upipe_comm *comm)
{
    upipe_mpi *m = (upipe_mpi *)comm->impl;
    UPIPE_TRY(upi_mpi_ready(c, m));
    UPIPE_TRY(upi_mpi_begin(c, m, UPI_MPI_BARRIER, NULL, NULL, 0));
    return upi_mpi_finish(c, m);
}

UPIPE_API upipe_status upi_mpi_gather(upipe_ctx *c, upipe_comm *comm, int64_t *all, const int64_t *mine,
                                      int n)
{
    upipe_mpi *m = (upipe_mpi *)comm->impl;
    const upi_mpi_note *in;
    int r;
    if (n < 0 || n > UPIPE_ALL_GATHER_MAX)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "%d numbers to gather, at most %d", n, UPIPE_ALL_GATHER_MAX);
    UPIPE_TRY(upi_mpi_ready(c, m));
    UPIPE_TRY(upi_mpi_begin(c, m, UPI_MPI_GATHER, NULL, mine, n));
    UPIPE_TRY(upi_mpi_finish(c, m));
    in = m->in + (m->call & 1) * comm->ranks;
    for (r = 0; r < comm->ranks; ++r)
        memcpy(all + (size_t)r * (size_t)n, r == comm->rank ? m->out[r].values : in[r].values,
               (size_t)n * sizeof *all);
    return UPIPE_OK;
}

/* ---- the team ---- */

/* The next piece of the buffer, aligned for anything; NULL where there is no buffer yet. *at: its bytes so far. */
UPIPE_API void *upi_mpi_piece(char *buf, size_t *at, size_t bytes)
{
    char *piece = buf != NULL ? buf + *at : NULL;
    *at += (bytes + 15) & ~(size_t)15;
    return piece;
}

/* Lays the buffer out; returns the bytes that it takes. buffer may be NULL. */
UPIPE_API size_t upi_mpi_lay_out(upipe_mpi *m, char *buf)
{
    size_t n = (size_t)m->comm.ranks, requests = (2 * UPI_MPI_WINDOW + 1) * n, at = 0;
    m->requests_n = (int)requests;
    m->peer = (upi_mpi_peer *)upi_mpi_piece(buf, &at, n * sizeof *m->peer);
    m->out = (upi_mpi_note *)upi_mpi_piece(buf, &at, n * sizeof *m->out);
    m->in = (upi_mpi_note *)upi_mpi_piece(buf, &at, 2 * n * sizeof *m->in);
    m->requests = (MPI_Request *)upi_mpi_piece(buf, &at, requests * sizeof *m->requests);
    m->notices = (MPI_Request *)upi_mpi_piece(buf, &at, n * sizeof *m->notices);
    m->statuses = (MPI_Status *)upi_mpi_piece(buf, &at, requests * sizeof *m->statuses);
    m->done = (int *)upi_mpi_piece(buf, &at, requests * sizeof *m->done);
    m->comm.list = (upipe_msg *)upi_mpi_piece(buf, &at, 2 * n * sizeof *m->comm.list);
    m->comm.gathered = (int64_t *)upi_mpi_piece(buf, &at, n * UPIPE_ALL_GATHER_MAX * sizeof *m->comm.gathered);
    return at;
}

/* upipe_mpi_free -- ends this rank's part; after success, failure or a failed init alike
 *   order   no call is under way. Waits until peers have taken the notes sent to them, at most the deadline:
 *           after a failure only. The MPI_Comm stays the host's
 *   errors  BACKEND: MPI may still read notes of this team (to a rank that is dead, or stopped), and so their
 *           memory, one allocation, is not given back
 */
UPIPE_API upipe_status upipe_mpi_free(upipe_mpi *m, upipe_err *e)
{
    int64_t until;
    int left, idle = 0, i, data, rank;
    if (m == NULL || m->buf == NULL) return UPIPE_OK;
    rank = m->comm.rank;
    data = 2 * m->comm.ranks * UPI_MPI_WINDOW;
    until = upi_net_until(m->comm.deadline);
    for (i = 0; i < data; ++i) /* an exchange's: its buffers are the host's, see comm->quarantine */
        if (m->requests[i] != MPI_REQUEST_NULL) MPI_Request_free(&m->requests[i]);
    for (;;) {
        left = 0;
        for (i = 0; i < 2 * m->comm.ranks; ++i) {
            MPI_Request *r = i < m->comm.ranks ? &m->requests[data + i] : &m->notices[i - m->comm.ranks];
            int done = 0;
            if (*r == MPI_REQUEST_NULL) continue;
            if (MPI_Test(r, &done, MPI_STATUS_IGNORE) == MPI_SUCCESS && !done) ++left;
        }
        if (left == 0 || upipe_net_now() >= until) break;
        upi_net_rest(&idle, UPI_MPI_YIELDS, UPI_MPI_NAP);
    }
    if (left == 0) free(m->buf);
    memset(m, 0, sizeof *m);
    if (left == 0) return UPIPE_OK;
    return upipe_fail(e, UPIPE_ERR_BACKEND, "rank %d: %d notes are still under way, and keep their memory",
                    rank, left);
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

/* upipe_mpi_init -- this rank's end of a team of all ranks of an MPI communicator; talks to nobody
 *   mpi         the host's, an intra-communicator whose errors return; kept alive until upipe_mpi_free
 *   tag         the team uses tag and tag + 1 on it, nobody else does meanwhile; the same on all ranks
 *   deadline_s  seconds that one call may wait for its peers; 0 = UPIPE_DEADLINE_DEFAULT. Each rank may
 *               change comm.deadline later; it is read at each call
 *   bytes       one allocation, about 2.5 KB a rank of the team
 *   errors      ARG, MEMORY, BACKEND (MPI's own text); there is then nothing to free
 */
UPIPE_API upipe_status upipe_mpi_init(upipe_mpi *m, MPI_Comm mpi, int tag, double deadline_s, upipe_err *e)
{
    int running = 0, ended = 0, i;
    memset(m, 0, sizeof *m);
    if (!(deadline_s >= 0)) return upipe_fail(e, UPIPE_ERR_ARG, "a deadline of %g s", deadline_s);
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
    for (i = 0; i < m->comm.ranks; ++i) m->notices[i] = MPI_REQUEST_NULL;
    m->mpi = mpi;
    m->tag = tag;
    m->message = UPIPE_MPI_MESSAGE;
    m->comm.ops.name = "mpi";
    m->comm.ops.start = upi_mpi_start;
    m->comm.ops.wait = upi_mpi_wait;
    m->comm.ops.barrier = upi_mpi_barrier;
    m->comm.ops.gather = upi_mpi_gather;
    m->comm.ops.abort = upi_mpi_abort;
    m->comm.impl = m;
    m->comm.deadline = deadline_s > 0 ? deadline_s : UPIPE_DEADLINE_DEFAULT;
    return UPIPE_OK;
}

#endif

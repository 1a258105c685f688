/* upipe_net_tcp.h -- a team of ranks that are processes, over connected sockets
 *
 *     int headers[4], data[4];                         two stream sockets a peer, which the host has connected
 *     upipe_tcp team;
 *     upipe_status s = upipe_tcp_init(&team, headers, data, rank, 4, 0, &err);
 *     ctx.team = &team.comm;
 *     ...
 *     upipe_tcp_free(&team, &err);                     the host closes the sockets
 *
 * Who may connect is the host's affair: a rank believes its sockets.
 *
 * Data. Every call begins with a header to each peer. The data of a transfer follow on the other socket,
 * blocks in the order of the list, without gaps. They are sent as soon as the socket takes them, and received
 * once the sender's header has come and fits. Buffers are host memory; start waits for ctx->ops->sync.
 *
 * Progress. No call blocks in a send or a receive. All sockets of a team are polled at once, so that ranks
 * may send each other more than the sockets hold, and ranks may outnumber cores. Between start and wait
 * nothing moves but what the kernel holds.
 *
 * Order. Every rank makes the same sequence of calls (transfer, barrier, all-gather). One thread at a time
 * uses a communicator; any thread may call upipe_comm_abort.
 *
 * Failures. The rank that detects one informs the others by a header, and returns its status: TIMEOUT,
 * MISMATCH, BACKEND (a rank has died, its connection has ended; or the kernel's own text). The others pass it on, so
 * that it comes before anything that they do then, and return ABORTED with its sentence, but a MISMATCH once. It breaks
 * all parts of the world (upipe_comm_part). Where ranks wait for each other in a row, the sentence of TIMEOUT names the
 * last one: a rank asks those of its world for whom they wait, a tenth of a second before its deadline.
 * The kernel has a copy of what is on its way: nobody accesses a buffer once a call has failed, and comm->quarantine is
 * never set. Afterwards only upipe_tcp_free is legal.
 *
 * Strict ISO C hides sockets: include this file first, or define _POSIX_C_SOURCE=200809L.
 */
#ifndef UPIPE_NET_TCP_H
#define UPIPE_NET_TCP_H

#include "upipe_net_header.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/uio.h>

enum {
    UPIPE_TCP_MAX = 256, /* ranks of one team */
    UPI_TCP_PIECES = 64, /* that one system call moves */
    UPI_TCP_SLICE = 20,  /* ms: how soon a rank that waits sees that another of its threads has aborted */
    UPI_TCP_FREED = 1,   /* a peer's goodbye has come */
    UPI_TCP_ENDED = 2    /* its connection has ended without one */
};

/* One way of one peer: what moves next. */
typedef struct upi_tcp_flow {
    size_t offset; /* within the piece */
    int64_t piece; /* of the message */
    int msg;       /* of the list; its length: all has moved */
} upi_tcp_flow;

typedef struct upi_tcp_peer {
    int headers, data; /* the host's sockets */
    int64_t come;      /* number of the last header that has arrived */
    int open;          /* its header of this call fits: its data are received */
    int left;          /* 0, UPI_TCP_... */
    int64_t cut;       /* 0; the connection for data has ended: until then the headers may say why */
    size_t got;        /* bytes of `next` */
    upi_header next;   /* arrives */
    upi_tcp_flow flow[2];
} upi_tcp_peer;

/* A rank's end of a team. The host's; must not move between init and free. */
typedef struct upipe_tcp {
    upipe_comm comm;
    /* the rest belongs to the transport */
    int64_t call, met; /* number of the last call begun here, and of the last that all ranks have come to */
    int kind;          /* UPI_TEAM_..., of the current call */
    const upipe_msg *list; /* [n] */
    int n;
    upi_tcp_peer *peer; /* [ranks] */
    upi_header *out;    /* [ranks]: this call's headers */
    upi_header *in;     /* [2][ranks]: those of call s at [s & 1], as peers may be one call ahead */
    upi_first first;    /* the failure */
    upipe_status owed;  /* found by start, returned by wait */
    int busy;           /* upi_watch_try; what moves data, hears, or looks for whom the call waits has it */
    int waits;          /* in a call that waits */
    upi_watch watch;    /* of a world */
    void *buf;
} upipe_tcp;

/* ---- failure ---- */

UPIPE_API const upipe_err *upi_tcp_failure(const upipe_comm *comm)
{
    const upipe_tcp *t = (const upipe_tcp *)comm->impl;
    return upi_first_is_broken(&t->first) ? &t->first.err : NULL;
}

/* Sends a header; 0 or the error's number. Peers take what they are sent but for the headers of two calls, a failure
 * and a goodbye: a socket that has no space for these is as good as none. */
UPIPE_API int upi_tcp_send_header(const upipe_tcp *t, int p, const upi_header *header)
{
    ssize_t n;
    do n = send(t->peer[p].headers, header, sizeof *header, MSG_NOSIGNAL | MSG_DONTWAIT);
    while (n < 0 && errno == EINTR);
    if (n == (ssize_t)sizeof *header) return 0;
    if (n >= 0) errno = ENOBUFS;
    n = errno;
    shutdown(t->peer[p].headers, SHUT_WR); /* half a header is none */
    return (int)n;
}

UPIPE_API void upi_tcp_send_all(const upipe_tcp *t, const upi_header *header)
{
    int p;
    for (p = 0; p < t->comm.ranks; ++p)
        if (p != t->comm.rank) upi_tcp_send_header(t, p, header);
}

UPIPE_API upipe_tcp *upi_tcp_world(const upipe_tcp *t)
{
    return (upipe_tcp *)upi_comm_world(&t->comm)->impl;
}

/* Breaks this end, where ranks had come to call `met`, and all of this rank's others. What a rank has heard it passes on:
 * who hears that it has left must know why. A rank that the header cannot be sent to finds that the connection has ended. */
UPIPE_API int upi_tcp_break(upipe_tcp *t, upipe_status s, int64_t met, const char *why)
{
    upi_header notice;
    upipe_comm *part;
    if (!upi_first_break(&t->first, s, met, why)) return 0;
    upi_first_report(&notice, s, met, why);
    upi_tcp_send_all(t, &notice);
    for (part = upi_comm_world(&t->comm); part != NULL; part = part->part) {
        upipe_tcp *other = (upipe_tcp *)part->impl;
        upi_tcp_break(other, s, __atomic_load_n(&other->met, __ATOMIC_RELAXED), why);
    }
    return 1;
}

UPIPE_API int upi_tcp_fail(upipe_comm *comm, upipe_status s, const char *why)
{
    upipe_tcp *t = (upipe_tcp *)comm->impl;
    return upi_tcp_break(t, s, __atomic_load_n(&t->met, __ATOMIC_RELAXED), why);
}

/* ---- headers ---- */

/* Begins a call: sends a header to every peer. One that is gone is found where it is missed. */
UPIPE_API void upi_tcp_begin(upipe_tcp *t, int kind, const upipe_msg *list, const int64_t *values, int n)
{
    const int ranks = t->comm.ranks;
    int k, p, way;
    upi_watch_lock(&t->busy);
    ++t->call;
    t->kind = kind;
    t->list = list;
    t->n = list != NULL ? n : 0;
    upi_header_fill(t->out, ranks, t->call, kind, list, values, n);
    for (k = 1; k < ranks; ++k) { /* each rank begins with its neighbour, which spreads the targets */
        upi_tcp_peer *peer = &t->peer[p = (t->comm.rank + k) % ranks];
        peer->open = 0;
        for (way = 0; way < 2; ++way) {
            memset(&peer->flow[way], 0, sizeof peer->flow[way]);
            peer->flow[way].msg = upi_msg_next(t->list, t->n, p, way, 0);
        }
        upi_tcp_send_header(t, p, &t->out[p]);
    }
    upi_watch_unlock(&t->busy);
}

/* Stores the header that has come from rank p. */
UPIPE_API upipe_status upi_tcp_accept(upipe_ctx *c, upipe_tcp *t, int p)
{
    upi_tcp_peer *peer = &t->peer[p];
    const upi_header *header = &peer->next;
    if (header->magic != UPI_HEADER_MAGIC)
        return upipe_comm_fail(&c->err, &t->comm, UPIPE_ERR_MISMATCH,
                               "rank %d sends rank %d something else than headers",
                               upi_comm_called(&t->comm, p), upi_comm_called(&t->comm, t->comm.rank));
    if (header->kind == UPI_HEADER_GOODBYE) {
        peer->left = UPI_TCP_FREED;
        return UPIPE_OK;
    }
    if (header->kind == UPI_HEADER_QUESTION || header->kind == UPI_HEADER_ANSWER) {
        upi_watch_hear(&t->watch, p, header);
        return UPIPE_OK;
    }
    if (header->kind == UPI_HEADER_FAILURE) {
        const upipe_err heard = upi_first_heard(header);
        upi_tcp_break(t, heard.status, header->call, heard.text);
        return UPIPE_OK;
    }
    if (header->call != peer->come + 1 || header->call > t->call + 1)
        return upipe_comm_fail(&c->err, &t->comm, UPIPE_ERR_MISMATCH,
                               "rank %d sends call %lld where rank %d expects %lld",
                               upi_comm_called(&t->comm, p), (long long)header->call,
                               upi_comm_called(&t->comm, t->comm.rank), (long long)peer->come + 1);
    t->in[(header->call & 1) * t->comm.ranks + p] = *header;
    peer->come = header->call;
    return UPIPE_OK;
}

/* Receives the headers that have arrived. */
UPIPE_API upipe_status upi_tcp_hear(upipe_ctx *c, upipe_tcp *t, int *news)
{
    int p;
    for (p = 0; p < t->comm.ranks; ++p) {
        upi_tcp_peer *peer = &t->peer[p];
        while (p != t->comm.rank && !peer->left) {
            const ssize_t n = recv(peer->headers, (char *)&peer->next + peer->got,
                                   sizeof peer->next - peer->got, MSG_DONTWAIT);
            if (n < 0 && errno == EINTR) continue;
            if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
            *news = 1;
            if (n <= 0) {
                peer->left = UPI_TCP_ENDED;
                break;
            }
            peer->got += (size_t)n;
            if (peer->got < sizeof peer->next) continue;
            peer->got = 0;
            UPIPE_TRY(upi_tcp_accept(c, t, p));
        }
    }
    return UPIPE_OK;
}

/* ---- data ---- */

/* A message in one way: `count` pieces of `bytes` bytes. Blocks without gaps are one piece. */
typedef struct upi_tcp_message {
    char *data;
    size_t bytes, stride;
    int64_t count;
} upi_tcp_message;

UPIPE_API upi_tcp_message upi_tcp_message_of(const upipe_msg *msg, int way)
{
    upi_tcp_message m;
    m.data = way == UPIPE_MSG_SEND ? (char *)(uintptr_t)msg->send : (char *)msg->recv;
    m.bytes = way == UPIPE_MSG_SEND ? msg->send_bytes : msg->recv_bytes;
    m.stride = way == UPIPE_MSG_SEND ? msg->send_stride : msg->recv_stride;
    m.count = msg->count;
    if (m.stride != m.bytes) return m;
    m.bytes *= (size_t)m.count;
    m.count = 1;
    return m;
}

/* Moves a flow past so many bytes, which lie in its current message. */
UPIPE_API void upi_tcp_pass(const upipe_tcp *t, int p, int way, upi_tcp_flow *f, size_t moved)
{
    while (moved > 0) {
        const upi_tcp_message m = upi_tcp_message_of(&t->list[f->msg], way);
        const size_t left = m.bytes - f->offset, step = moved < left ? moved : left;
        moved -= step;
        f->offset += step;
        if (step < left) return;
        f->offset = 0;
        if (++f->piece < m.count) continue;
        f->piece = 0;
        f->msg = upi_msg_next(t->list, t->n, p, way, f->msg + 1);
    }
}

/* What a flow moves next, some pieces at once; returns their number. */
UPIPE_API int upi_tcp_pieces(const upipe_tcp *t, int p, int way, struct iovec *pieces)
{
    upi_tcp_flow f = t->peer[p].flow[way];
    int n;
    for (n = 0; n < UPI_TCP_PIECES && f.msg < t->n; ++n) {
        const upi_tcp_message m = upi_tcp_message_of(&t->list[f.msg], way);
        pieces[n].iov_base = m.data + (size_t)f.piece * m.stride + f.offset;
        pieces[n].iov_len = m.bytes - f.offset;
        upi_tcp_pass(t, p, way, &f, pieces[n].iov_len);
    }
    return n;
}

/* Moves of one way of one peer what its socket takes or has now. */
UPIPE_API void upi_tcp_move(upipe_tcp *t, int p, int way, int *news)
{
    upi_tcp_peer *peer = &t->peer[p];
    struct iovec pieces[UPI_TCP_PIECES];
    struct msghdr what;
    ssize_t n;
    memset(&what, 0, sizeof what);
    what.msg_iov = pieces;
    what.msg_iovlen = (size_t)upi_tcp_pieces(t, p, way, pieces);
    do
        n = way == UPIPE_MSG_SEND ? sendmsg(peer->data, &what, MSG_NOSIGNAL | MSG_DONTWAIT)
                                  : recvmsg(peer->data, &what, MSG_DONTWAIT);
    while (n < 0 && errno == EINTR);
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    *news = 1;
    if (n <= 0) {
        peer->cut = upi_team_grace(&t->comm);
        return;
    }
    if (way == UPIPE_MSG_RECV) t->comm.moved_bytes += n;
    upi_tcp_pass(t, p, way, &peer->flow[way], (size_t)n);
}

/* Does data move this way, now that the peer's header has come or has not? */
UPIPE_API int upi_tcp_moves(const upipe_tcp *t, int p, int way)
{
    const upi_tcp_peer *peer = &t->peer[p];
    return peer->flow[way].msg < t->n && (way == UPIPE_MSG_SEND || peer->open);
}

/* ---- a call, from its headers to its end ---- */

/* Rank p has left, and this call needs it. */
UPIPE_API upipe_status upi_tcp_lost(upipe_ctx *c, upipe_tcp *t, int p)
{
    const int me = upi_comm_called(&t->comm, t->comm.rank);
    char text[UPI_TEAM_NAMES];
    if (t->peer[p].left == UPI_TCP_FREED)
        return upipe_comm_fail(&c->err, &t->comm, UPIPE_ERR_MISMATCH,
                               "rank %d is in %s and %s has freed its team", me, upi_team_kind(t->kind),
                               upi_team_rank(&t->comm, p, text));
    return upipe_comm_fail(&c->err, &t->comm, UPIPE_ERR_BACKEND,
                           "rank %d is in %s and its connection to %s has ended", me, upi_team_kind(t->kind),
                           upi_team_rank(&t->comm, p, text));
}

/* *missing: ranks whose header has not come; *left: flows of the others that have not ended. */
UPIPE_API upipe_status upi_tcp_progress(upipe_ctx *c, upipe_tcp *t, int *news, int *missing, int *left)
{
    int p, way;
    UPIPE_TRY(upi_tcp_hear(c, t, news));
    *missing = *left = 0;
    for (p = 0; p < t->comm.ranks; ++p) {
        upi_tcp_peer *peer = &t->peer[p];
        int flows = 0;
        if (p == t->comm.rank) continue;
        if (!peer->open && peer->come >= t->call) {
            UPIPE_TRY(
                upi_header_fit(&c->err, &t->comm, &t->out[p], p, &t->in[(t->call & 1) * t->comm.ranks + p]));
            peer->open = 1;
        }
        for (way = 0; way < 2; ++way) {
            if (!peer->cut && upi_tcp_moves(t, p, way)) upi_tcp_move(t, p, way, news);
            flows += upi_tcp_moves(t, p, way);
        }
        /* a failure that the peer has told before it left comes first */
        if ((peer->left && !peer->open) ||
            (peer->cut && flows && (peer->left || upipe_net_now() >= peer->cut))) {
            UPIPE_TRY(upi_comm_whole(c, &t->comm));
            return upi_tcp_lost(c, t, p);
        }
        *missing += !peer->open;
        *left += peer->open ? flows : 0;
    }
    if (*missing == 0) __atomic_store_n(&t->met, t->call, __ATOMIC_RELAXED);
    return UPIPE_OK;
}

/* Marks for whom the call waits: ranks that have not come, or else those whose data are on their way. Returns whether
 * there are ranks that have not come. */
UPIPE_API int upi_tcp_mark(const upipe_tcp *t, char *marks)
{
    int p, missing = 0;
    for (p = 0; p < t->comm.ranks; ++p) missing |= p != t->comm.rank && !t->peer[p].open;
    for (p = 0; p < t->comm.ranks; ++p)
        if (p != t->comm.rank &&
            (missing ? !t->peer[p].open
                     : upi_tcp_moves(t, p, UPIPE_MSG_SEND) + upi_tcp_moves(t, p, UPIPE_MSG_RECV)))
            marks[upi_comm_called(&t->comm, p)] = UPI_TEAM_MISSED;
    return missing;
}

/* Answers those that have asked, from a call that waits: t and its world are this thread's. */
UPIPE_API void upi_tcp_answer(upipe_tcp *t, upipe_tcp *world)
{
    upi_watch *w = &world->watch;
    upipe_comm *part;
    upi_header answer;
    int p = 0;
    while (p < w->ranks && w->asked[p] == 0) ++p;
    if (p == w->ranks) return;
    memset(w->marks, 0, (size_t)w->ranks);
    for (part = &world->comm; part != NULL; part = part->part) {
        upipe_tcp *other = (upipe_tcp *)part->impl;
        const int held = other == t || other == world;
        if (!held && !upi_watch_try(&other->busy)) continue;
        if (other->waits) (void)upi_tcp_mark(other, w->marks);
        if (!held) upi_watch_unlock(&other->busy);
    }
    for (; p < w->ranks; ++p)
        if (w->asked[p] != 0 && upi_watch_answer(w, p, &answer)) upi_tcp_send_header(world, p, &answer);
}

/* The sockets that may bring something; returns their number. */
UPIPE_API nfds_t upi_tcp_polls(const upipe_tcp *t, int with_data, struct pollfd *polls)
{
    nfds_t n = 0;
    int p;
    for (p = 0; p < t->comm.ranks; ++p) {
        const upi_tcp_peer *peer = &t->peer[p];
        int out, in;
        if (p == t->comm.rank) continue;
        if (!peer->left) {
            polls[n].fd = peer->headers;
            polls[n++].events = POLLIN;
        }
        if (!with_data || peer->cut) continue;
        out = upi_tcp_moves(t, p, UPIPE_MSG_SEND);
        in = upi_tcp_moves(t, p, UPIPE_MSG_RECV);
        if (!out && !in) continue;
        polls[n].fd = peer->data;
        polls[n++].events = (short)((out ? POLLOUT : 0) | (in ? POLLIN : 0));
    }
    return n;
}

/* Sleeps until a socket is ready, for a slice at most, and lets the rank's other threads have this end meanwhile. What
 * comes through the world is heard first. */
UPIPE_API void upi_tcp_rest(upipe_ctx *c, upipe_tcp *t, int64_t until)
{
    struct pollfd polls[3 * UPIPE_TCP_MAX];
    upipe_tcp *world = upi_tcp_world(t);
    const int64_t left = (until - upipe_net_now()) / 1000000 + 1;
    nfds_t n = upi_tcp_polls(t, 1, polls);
    int news = 0;
    if (world == t) {
        upi_tcp_answer(t, world);
    } else if (upi_watch_try(&world->busy)) {
        (void)upi_tcp_hear(c, world, &news);
        upi_tcp_answer(t, world);
        n += upi_tcp_polls(world, 0, polls + n);
        upi_watch_unlock(&world->busy);
    }
    upi_watch_unlock(&t->busy);
    if (!news) (void)poll(polls, n, left < 0 ? 0 : left < UPI_TCP_SLICE ? (int)left : UPI_TCP_SLICE);
    upi_watch_lock(&t->busy);
}

/* Asks the ranks of the world for whom they wait; returns the question's number. */
UPIPE_API int64_t upi_tcp_ask(upipe_tcp *t)
{
    upipe_tcp *world = upi_tcp_world(t);
    upi_header question;
    if (world != t) upi_watch_lock(&world->busy);
    question = upi_watch_question(&world->watch);
    upi_tcp_send_all(world, &question);
    if (world != t) upi_watch_unlock(&world->busy);
    return question.call;
}

/* The answers to a question have had their time: names for whom the call waits in the end. */
UPIPE_API upipe_status upi_tcp_late(upipe_ctx *c, upipe_tcp *t, int64_t question)
{
    upipe_tcp *world = upi_tcp_world(t);
    upi_watch *w = &world->watch;
    upi_team_names names;
    int come;
    if (world != t) upi_watch_lock(&world->busy);
    memset(w->marks, 0, (size_t)w->ranks);
    w->since = question;
    come = upi_tcp_mark(t, w->marks);
    come |= upi_team_blame(&t->comm, w->marks, upi_watch_waits, w, &names);
    if (world != t) upi_watch_unlock(&world->busy);
    return upi_team_late_for(&c->err, &t->comm, t->kind, &names, come ? "come" : "finish");
}

/* From the headers of a call to its end. */
UPIPE_API upipe_status upi_tcp_call(upipe_ctx *c, upipe_tcp *t)
{
    const int64_t grace = upi_watch_grace(t->comm.deadline);
    int64_t until = upi_net_until(t->comm.deadline) - grace, question = 0;
    for (;;) {
        int news = 0, missing, left;
        UPIPE_TRY(upi_tcp_progress(c, t, &news, &missing, &left));
        if (missing == 0 && left == 0) return UPIPE_OK;
        if (!upi_first_spares(&t->first, t->kind, t->call)) UPIPE_TRY(upi_comm_whole(c, &t->comm));
        if (upipe_net_now() >= until) {
            if (question > 0) return upi_tcp_late(c, t, question);
            question = upi_tcp_ask(t);
            until = upipe_net_now() + grace;
        }
        if (!news) upi_tcp_rest(c, t, until);
    }
}

UPIPE_API upipe_status upi_tcp_finish(upipe_ctx *c, upipe_tcp *t)
{
    upipe_status s;
    upi_watch_lock(&t->busy);
    t->waits = 1;
    s = upi_tcp_call(c, t);
    t->waits = 0;
    upi_watch_unlock(&t->busy);
    return s;
}

/* ---- the table's entries ---- */

/* A broken team, or one whose failure arrives now, begins no call. */
UPIPE_API upipe_status upi_tcp_ready(upipe_ctx *c, upipe_tcp *t)
{
    int news;
    upipe_status s = UPIPE_OK;
    upi_watch_lock(&t->busy);
    if (!upi_first_is_broken(&t->first)) s = upi_tcp_hear(c, t, &news);
    upi_watch_unlock(&t->busy);
    return s != UPIPE_OK ? s : upi_comm_whole(c, &t->comm);
}

UPIPE_API upipe_status upi_tcp_start(upipe_ctx *c, upipe_comm *comm, const upipe_msg *list, int n)
{
    upipe_tcp *t = (upipe_tcp *)comm->impl;
    upipe_status s;
    int news, missing, left;
    UPIPE_TRY(upi_tcp_ready(c, t));
    s = c->ops->sync(c); /* the kernel reads the buffers now: it knows no stream */
    if (s != UPIPE_OK)
        return upipe_comm_fail(&c->err, comm, s, "rank %d before a transfer: %s",
                               upi_comm_called(comm, comm->rank), c->err.text);
    upi_tcp_begin(t, UPI_TEAM_TRANSFER, list, NULL, n);
    upi_watch_lock(&t->busy);
    /* What goes wrong now is returned by wait. */
    t->owed = upi_tcp_progress(c, t, &news, &missing, &left);
    upi_watch_unlock(&t->busy);
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_tcp_wait(upipe_ctx *c, upipe_comm *comm)
{
    upipe_tcp *t = (upipe_tcp *)comm->impl;
    const upipe_status owed = t->owed;
    t->owed = UPIPE_OK;
    if (owed != UPIPE_OK) return upi_comm_report(&c->err, comm, owed);
    UPIPE_TRY(upi_comm_copy_own(c, comm, t->list, t->n, c->ops->copy));
    return upi_tcp_finish(c, t);
}

UPIPE_API upipe_status upi_tcp_barrier(upipe_ctx *c, upipe_comm *comm)
{
    upipe_tcp *t = (upipe_tcp *)comm->impl;
    UPIPE_TRY(upi_tcp_ready(c, t));
    upi_tcp_begin(t, UPI_TEAM_BARRIER, NULL, NULL, 0);
    return upi_tcp_finish(c, t);
}

UPIPE_API upipe_status upi_tcp_all_gather(upipe_ctx *c, upipe_comm *comm, int64_t *all, const int64_t *mine,
                                          int n)
{
    upipe_tcp *t = (upipe_tcp *)comm->impl;
    int r;
    UPIPE_TRY(upi_tcp_ready(c, t));
    upi_tcp_begin(t, UPI_TEAM_ALL_GATHER, NULL, mine, n);
    UPIPE_TRY(upi_tcp_finish(c, t));
    for (r = 0; r < comm->ranks; ++r) {
        const upi_header *of = r == comm->rank ? &t->out[r] : &t->in[(t->call & 1) * comm->ranks + r];
        memcpy(all + (size_t)r * (size_t)n, of->values, (size_t)n * sizeof *all);
    }
    return UPIPE_OK;
}

/* ---- the team ---- */

/* upipe_tcp_free -- ends this rank's part; legal after a failure and a failed init too
 *   order   no call is in progress. Returns when every peer has called it or is gone, or at the deadline. The
 *           host then closes the sockets; a socket that is closed before may take with it what is on its way
 *   errors  BACKEND, with the ranks that have not come; all memory is free
 */
UPIPE_API upipe_status upipe_tcp_free(upipe_tcp *t, upipe_err *e)
{
    char text[UPI_TEAM_NAMES];
    upi_team_names late;
    upipe_ctx c;
    int64_t until;
    int p, news, rank, called;
    double deadline;
    if (t == NULL || t->buf == NULL) return UPIPE_OK;
    rank = t->comm.rank;
    called = upi_comm_called(&t->comm, rank);
    deadline = t->comm.deadline;
    until = upi_net_until(deadline);
    upi_watch_lock(&t->busy);
    /* nothing follows a goodbye */
    (void)upi_first_break(&t->first, UPIPE_ERR_ABORTED, t->met, "the team has been freed");
    t->n = 0; /* no data move */
    memset(&c, 0, sizeof c);
    for (p = 0; p < t->comm.ranks; ++p) {
        t->out[p].magic = UPI_HEADER_MAGIC;
        t->out[p].kind = UPI_HEADER_GOODBYE;
        if (p != rank) upi_tcp_send_header(t, p, &t->out[p]);
    }
    for (;;) {
        (void)upi_tcp_hear(&c, t, &news);
        memset(&late, 0, sizeof late);
        for (p = 0; p < t->comm.ranks; ++p)
            if (p != rank && !t->peer[p].left) upi_team_name(&late, &t->comm, upi_comm_called(&t->comm, p));
        if (late.count == 0 || upipe_net_now() >= until) break;
        upi_tcp_rest(&c, t, until);
    }
    upi_comm_leave(&t->comm);
    free(t->buf);
    memset(t, 0, sizeof *t);
    if (late.count == 0) return UPIPE_OK;
    return upipe_fail(e, UPIPE_ERR_BACKEND, "rank %d waited %g s for %s to free the team", called, deadline,
                      upi_team_names_text(&late, text));
}

/* A stream socket that is connected; sends what it has at once. */
UPIPE_API upipe_status upi_tcp_fit_socket(upipe_err *e, int fd, int p)
{
    struct sockaddr_storage peer;
    socklen_t size = sizeof peer, one = sizeof(int);
    int kind = 0, now = 1;
    if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &kind, &one) != 0 || kind != SOCK_STREAM)
        return upipe_fail(e, UPIPE_ERR_ARG, "%d is no stream socket to rank %d", fd, p);
    if (getpeername(fd, (struct sockaddr *)&peer, &size) != 0)
        return upipe_fail(e, UPIPE_ERR_ARG, "the socket %d to rank %d is not connected", fd, p);
    if (peer.ss_family != AF_UNIX) (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &now, sizeof now);
    return UPIPE_OK;
}

/* upipe_tcp_init -- makes this rank's end of a team of `ranks` ranks; does not communicate
 *   headers     [ranks] stream sockets, each connected to the `headers` socket of that rank; TCP, or AF_UNIX on one
 *               machine. Nothing else has been sent or read but in pairs. That of the rank itself is not looked at
 *   data        [ranks] the same, others
 *   deadline_s  seconds that one call may wait for its peers; 0 = UPIPE_DEADLINE_DEFAULT. Each call reads
 *               comm.deadline, which each rank may change
 *   bytes       one allocation, about 2.5 KB a rank of the team
 *   errors      ARG, MEMORY; then there is nothing to free
 */
UPIPE_API upipe_status upipe_tcp_init(upipe_tcp *t, const int *headers, const int *data, int rank, int ranks,
                                      double deadline_s, upipe_err *e)
{
    static const upipe_comm_ops ops = {
        "tcp",        upi_tcp_start, upi_tcp_wait, upi_tcp_barrier, upi_tcp_all_gather, upi_tcp_failure,
        upi_tcp_fail, NULL,          NULL};
    const size_t n = (size_t)(ranks > 0 ? ranks : 0);
    const size_t gathered = n * UPIPE_ALL_GATHER_MAX * sizeof(int64_t);
    char *buf;
    int p;
    memset(t, 0, sizeof *t);
    if (ranks < 1 || ranks > UPIPE_TCP_MAX || rank < 0 || rank >= ranks)
        return upipe_fail(e, UPIPE_ERR_ARG, "rank %d of a team of %d; 1 to %d ranks", rank, ranks,
                          UPIPE_TCP_MAX);
    UPIPE_TRY(upi_team_deadline(e, deadline_s));
    for (p = 0; p < ranks; ++p) {
        if (p == rank) continue;
        UPIPE_TRY(upi_tcp_fit_socket(e, headers[p], p));
        UPIPE_TRY(upi_tcp_fit_socket(e, data[p], p));
    }
    buf = (char *)calloc(
        1,
        n * (sizeof *t->peer + 4 * sizeof *t->out + 2 * sizeof(upipe_msg) + sizeof(int64_t) + 1) + gathered);
    if (buf == NULL) return upipe_fail(e, UPIPE_ERR_MEMORY, "no memory for a team of %d ranks", ranks);
    t->buf = buf;
    t->peer = (upi_tcp_peer *)(void *)buf;
    t->out = (upi_header *)(void *)(t->peer + n);
    t->in = t->out + n;
    t->watch.answers = t->in + 2 * n;
    t->watch.asked = (int64_t *)(void *)(t->watch.answers + n);
    t->comm.list = (upipe_msg *)(void *)(t->watch.asked + n);
    t->comm.gathered = (int64_t *)(void *)(t->comm.list + 2 * n);
    t->watch.marks = (char *)(t->comm.gathered + n * UPIPE_ALL_GATHER_MAX);
    t->watch.ranks = ranks;
    t->comm.rank = rank;
    t->comm.ranks = ranks;
    for (p = 0; p < ranks; ++p) {
        t->peer[p].headers = p != rank ? headers[p] : -1;
        t->peer[p].data = p != rank ? data[p] : -1;
    }
    upi_team_init(&t->comm, &ops, t, deadline_s);
    return UPIPE_OK;
}

#endif

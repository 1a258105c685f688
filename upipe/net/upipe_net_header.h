/* upipe_net_header.h -- what ranks that are processes tell each other
 *
 * Every call begins with a header to each peer: number and kind of the call, and what this rank sends to the
 * peer and receives from it. A barrier and an all-gather consist of their headers. A failure is a header too.
 */
#ifndef UPIPE_NET_HEADER_H
#define UPIPE_NET_HEADER_H

#include "upipe_net_team.h"

enum {
    UPI_HEADER_SHOWN = UPIPE_ALL_GATHER_MAX / 4, /* messages, each way, whose shape a header spells out */
    UPI_HEADER_FAILURE = UPI_TEAM_KINDS,
    UPI_HEADER_GOODBYE,
    UPI_HEADER_QUESTION, /* for whom does the receiver wait? */
    UPI_HEADER_ANSWER,
    UPI_FIRST_BREAKS = 1,
    UPI_FIRST_BROKEN = 2
};

#define UPI_HEADER_MAGIC UINT64_C(0x3174656e70697075) /* "upipnet1" in memory, low byte first */

/* What a rank sends to a peer, or receives from it, in one transfer. */
typedef struct upi_volume {
    int64_t messages, bytes;
    uint64_t hash; /* of all block sizes and counts */
} upi_volume;

/* The same bytes on all machines of the team: one architecture. */
typedef struct upi_header {
    uint64_t magic;
    int64_t call;     /* number, from 1, or that of a question; of a failure the last to which all had come */
    int64_t fragment; /* bytes of one message of the transport at most, where it splits them */
    int32_t kind, n;  /* UPI_TEAM_..., UPI_HEADER_...; n: of the values; of a failure its status */
    upi_volume volume[2]; /* of a transfer: UPIPE_MSG_SEND and UPIPE_MSG_RECV of the header's sender */
    /* An all-gather's numbers; of a transfer [way][UPI_HEADER_SHOWN][bytes, count]; a failure's sentence; an answer's
     * ranks, the first ones. */
    int64_t values[UPIPE_ALL_GATHER_MAX];
} upi_header;

UPIPE_API void upi_header_add(upi_header *header, int way, size_t bytes, int64_t count)
{
    upi_volume *volume = &header->volume[way];
    int64_t shape[2];
    if (bytes == 0) return;
    shape[0] = (int64_t)bytes;
    shape[1] = count;
    if (volume->messages < UPI_HEADER_SHOWN)
        memcpy(header->values + 2 * (way * UPI_HEADER_SHOWN + volume->messages), shape, sizeof shape);
    ++volume->messages;
    volume->bytes += shape[0] * count;
    volume->hash = upipe_hash_bytes(volume->hash, shape, sizeof shape);
}

/* The headers [ranks] of a call. list: of a transfer, with n messages; values: n numbers of an all-gather. */
UPIPE_API void upi_header_fill(upi_header *out, int ranks, int64_t call, int kind, const upipe_msg *list,
                               const int64_t *values, int n)
{
    int i, p;
    for (p = 0; p < ranks; ++p) {
        memset(&out[p], 0, sizeof out[p]);
        out[p].magic = UPI_HEADER_MAGIC;
        out[p].call = call;
        out[p].kind = (int32_t)kind;
        if (kind == UPI_TEAM_ALL_GATHER) {
            out[p].n = n;
            memcpy(out[p].values, values, (size_t)n * sizeof *values);
        }
    }
    for (i = 0; list != NULL && i < n; ++i) {
        upi_header_add(&out[list[i].peer], UPIPE_MSG_SEND, list[i].send_bytes, list[i].count);
        upi_header_add(&out[list[i].peer], UPIPE_MSG_RECV, list[i].recv_bytes, list[i].count);
    }
}

/* Compares what `from` sends with what `to` receives, by the header of each. */
UPIPE_API upipe_status upi_header_fit_way(upipe_err *e, upipe_comm *comm, const upi_header *sender, int from,
                                          const upi_header *receiver, int to)
{
    const upi_volume *out = &sender->volume[UPIPE_MSG_SEND], *in = &receiver->volume[UPIPE_MSG_RECV];
    const int64_t *sent = sender->values, *due = receiver->values + 2 * UPI_HEADER_SHOWN;
    int64_t i;
    UPIPE_TRY(upi_team_fit_count(e, comm, from, out->messages, to, in->messages));
    for (i = 0; i < out->messages && i < UPI_HEADER_SHOWN; ++i, sent += 2, due += 2)
        UPIPE_TRY(upi_team_fit_blocks(e, comm, from, sent[1], sent[0], to, due[1], due[0]));
    if (out->hash == in->hash) return UPIPE_OK;
    return upipe_comm_fail(
        e, comm, UPIPE_ERR_MISMATCH,
        "rank %d sends %lld messages of %lld bytes in all to rank %d, which receives %lld in "
        "other blocks",
        upi_comm_called(comm, from), (long long)out->messages, (long long)out->bytes,
        upi_comm_called(comm, to), (long long)in->bytes);
}

/* Compares this rank's header of a call with that of rank p. */
UPIPE_API upipe_status upi_header_fit(upipe_err *e, upipe_comm *comm, const upi_header *mine, int p,
                                      const upi_header *theirs)
{
    UPIPE_TRY(upi_team_same(e, comm, mine->kind, mine->n, p, theirs->kind, theirs->n));
    if (mine->fragment != theirs->fragment)
        return upipe_comm_fail(e, comm, UPIPE_ERR_MISMATCH,
                               "rank %d sends at most %lld bytes in an MPI message and rank %d at most %lld",
                               upi_comm_called(comm, comm->rank), (long long)mine->fragment,
                               upi_comm_called(comm, p), (long long)theirs->fragment);
    if (mine->kind != UPI_TEAM_TRANSFER) return UPIPE_OK;
    UPIPE_TRY(upi_header_fit_way(e, comm, theirs, p, mine, comm->rank));
    return upi_header_fit_way(e, comm, mine, comm->rank, theirs, p);
}

/* ---- the first failure ---- */

typedef struct upi_first {
    upipe_err err; /* constant once broken */
    int64_t met;   /* the last call that all ranks had come to before it */
    int broken;    /* atomic: UPI_FIRST_BROKEN once the failure is written; between, a thread writes it */
} upi_first;

UPIPE_API int upi_first_is_broken(const upi_first *first)
{
    return __atomic_load_n(&first->broken, __ATOMIC_ACQUIRE) == UPI_FIRST_BROKEN;
}

/* Writes the first failure, after which all ranks had come to call `met`; 0: there is one already. */
UPIPE_API int upi_first_break(upi_first *first, upipe_status s, int64_t met, const char *why)
{
    int whole = 0;
    if (!__atomic_compare_exchange_n(&first->broken, &whole, UPI_FIRST_BREAKS, 0, __ATOMIC_ACQ_REL,
                                     __ATOMIC_ACQUIRE)) {
        while (!upi_first_is_broken(first)) sched_yield(); /* another thread is writing it */
        return 0;
    }
    first->met = met;
    upipe_fail(&first->err, s, "%s", why);
    __atomic_store_n(&first->broken, UPI_FIRST_BROKEN, __ATOMIC_RELEASE);
    return 1;
}

/* Does a call go on despite the failure? An all-gather that the failing rank has completed reaches all: a rank that
 * reads it first, and aborts because of what it finds, must not keep the others from finding it. */
UPIPE_API int upi_first_spares(const upi_first *first, int kind, int64_t call)
{
    return kind != UPI_TEAM_TRANSFER && upi_first_is_broken(first) && first->met >= call;
}

/* The header that reports it to the others. */
UPIPE_API void upi_first_report(upi_header *notice, upipe_status s, int64_t met, const char *why)
{
    memset(notice, 0, sizeof *notice);
    notice->magic = UPI_HEADER_MAGIC;
    notice->kind = UPI_HEADER_FAILURE;
    notice->call = met;
    notice->n = (int32_t)s;
    snprintf((char *)notice->values, sizeof notice->values, "%s", why);
}

/* What such a header says. */
UPIPE_API upipe_err upi_first_heard(const upi_header *notice)
{
    upipe_err e;
    e.status = notice->n > 0 ? (upipe_status)notice->n : UPIPE_ERR_ABORTED;
    snprintf(e.text, sizeof e.text, "%.*s", (int)sizeof e.text - 1, (const char *)notice->values);
    return e;
}

/* ---- who waits for whom ----
 *
 * A rank whose deadline is near asks all ranks of its world. Those that wait in a call of any of their communicators
 * answer for whom. One that does not answer is the one to be named. */

/* The last of a deadline, in ns: for the answers. */
UPIPE_API int64_t upi_watch_grace(double deadline)
{
    return (int64_t)((deadline > 0.2 ? 0.1 : deadline > 0 ? deadline / 2 : 0) * 1e9);
}

/* Of a world; other ends use that of theirs. */
typedef struct upi_watch {
    int ranks;
    int64_t questions;   /* of this rank, so far */
    int64_t since;       /* of upi_watch_waits: answers to this one and later ones count */
    int64_t *asked;      /* [ranks]: the number of a rank's question that has no answer yet, or 0 */
    upi_header *answers; /* [ranks]: the last ones; `call` is the question's number */
    char *marks;         /* [ranks]: of upi_team_blame */
} upi_watch;

/* One thread at a time reads what comes to an end, and its state: that of its call, or one that waits in another end of
 * this rank. */
UPIPE_API int upi_watch_try(int *busy)
{
    int idle = 0;
    return __atomic_compare_exchange_n(busy, &idle, 1, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED);
}

UPIPE_API void upi_watch_lock(int *busy)
{
    while (!upi_watch_try(busy)) sched_yield();
}

UPIPE_API void upi_watch_unlock(int *busy)
{
    __atomic_store_n(busy, 0, __ATOMIC_RELEASE);
}

UPIPE_API upi_header upi_watch_question(upi_watch *w)
{
    upi_header h;
    memset(&h, 0, sizeof h);
    h.magic = UPI_HEADER_MAGIC;
    h.kind = UPI_HEADER_QUESTION;
    h.call = ++w->questions;
    return h;
}

/* A question or an answer has come from rank p. */
UPIPE_API void upi_watch_hear(upi_watch *w, int p, const upi_header *h)
{
    if (h->kind == UPI_HEADER_QUESTION)
        w->asked[p] = h->call;
    else
        w->answers[p] = *h;
}

/* The answer to rank p, by the marks of those for whom this rank waits; 0: it does not wait. */
UPIPE_API int upi_watch_answer(upi_watch *w, int p, upi_header *h)
{
    int r;
    memset(h, 0, sizeof *h);
    h->magic = UPI_HEADER_MAGIC;
    h->kind = UPI_HEADER_ANSWER;
    h->call = w->asked[p];
    for (r = 0; r < w->ranks && h->n < UPIPE_ALL_GATHER_MAX; ++r)
        if (w->marks[r] == UPI_TEAM_MISSED) h->values[h->n++] = r;
    if (h->n > 0) w->asked[p] = 0;
    return h->n > 0;
}

/* upi_team_waits: those that the rank's answer names. */
UPIPE_API int upi_watch_waits(void *user, int rank, char *marks)
{
    const upi_watch *w = (const upi_watch *)user;
    const upi_header *h = &w->answers[rank];
    int i;
    if (h->call < w->since) return 0;
    for (i = 0; i < h->n && i < UPIPE_ALL_GATHER_MAX; ++i)
        if (h->values[i] >= 0 && h->values[i] < w->ranks && marks[h->values[i]] == UPI_TEAM_APART)
            marks[h->values[i]] = UPI_TEAM_MISSED;
    return 1;
}

#endif

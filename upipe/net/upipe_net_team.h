/* upipe_net_team.h -- what the transports share        backend, includes clock, comm, ops
 *
 * Calls and their names, the sentences of a deadline that has passed and of ranks that do not match, and how
 * long a failed call waits for its buffers. How ranks reach each other is each transport's own.
 */
#ifndef UPIPE_NET_TEAM_H
#define UPIPE_NET_TEAM_H

#include "upipe_net_clock.h"

#include "../upipe_comm.h"
#include "../upipe_ops.h"

enum { UPI_TEAM_TRANSFER = 1, UPI_TEAM_BARRIER, UPI_TEAM_ALL_GATHER, UPI_TEAM_KINDS };

UPIPE_API const char *upi_team_kind(int64_t kind)
{
    return kind == UPI_TEAM_TRANSFER     ? "a transfer"
           : kind == UPI_TEAM_BARRIER    ? "a barrier"
           : kind == UPI_TEAM_ALL_GATHER ? "an all-gather"
                                         : "an unknown call";
}

/* ---- making a team ---- */

UPIPE_API upipe_status upi_team_deadline(upipe_err *e, double seconds)
{
    return seconds >= 0 ? UPIPE_OK : upipe_fail(e, UPIPE_ERR_ARG, "a deadline of %g s", seconds);
}

/* Rank, ranks, list and gathered are the transport's to set. deadline_s: 0 = UPIPE_DEADLINE_DEFAULT. */
UPIPE_API void upi_team_init(upipe_comm *comm, const upipe_comm_ops *ops, void *impl, double deadline_s)
{
    comm->ops = *ops;
    comm->impl = impl;
    comm->deadline = deadline_s > 0 ? deadline_s : UPIPE_DEADLINE_DEFAULT;
}

/* ---- deadlines ---- */

/* Ranks in a sentence: the first eight by number. */
typedef struct upi_team_names {
    char text[96];
    int count, at;
} upi_team_names;

UPIPE_API void upi_team_name(upi_team_names *names, int rank)
{
    if (++names->count <= 8)
        names->at += snprintf(names->text + names->at, sizeof names->text - (size_t)names->at,
                              names->count > 1 ? ", %d" : "%d", rank);
}

enum { UPI_TEAM_NAMES = 128 };

/* "rank 3", "ranks 0, 2": returns text. */
UPIPE_API const char *upi_team_names_text(const upi_team_names *names, char *text)
{
    int n = snprintf(text, UPI_TEAM_NAMES, "rank%s %s", names->count > 1 ? "s" : "", names->text);
    if (names->count > 8) snprintf(text + n, (size_t)(UPI_TEAM_NAMES - n), " and %d more", names->count - 8);
    return text;
}

/* Fails with TIMEOUT. The sentence begins with this rank and how long it has waited. */
__attribute__((unused, format(printf, 3, 4))) static inline upipe_status upi_team_late(upipe_err *e,
                                                                                       upipe_comm *comm,
                                                                                       const char *format,
                                                                                       ...)
{
    char text[200];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return upipe_comm_fail(e, comm, UPIPE_ERR_TIMEOUT, "rank %d waited %g s %s", comm->rank, comm->deadline,
                           text);
}

/* Fails with TIMEOUT in a call of this kind; what: "come", "finish", which the named ranks have not done. */
UPIPE_API upipe_status upi_team_late_for(upipe_err *e, upipe_comm *comm, int64_t kind,
                                         const upi_team_names *names, const char *what)
{
    char text[UPI_TEAM_NAMES];
    return upi_team_late(e, comm, "in %s for %s to %s", upi_team_kind(kind), upi_team_names_text(names, text),
                         what);
}

/* How long a failed call waits until its buffers are no longer accessed. */
UPIPE_API int64_t upi_team_grace(const upipe_comm *comm)
{
    return upi_net_until(comm->deadline < 0.5 ? comm->deadline : 0.5);
}

/* ---- ranks that do not match ---- */

/* Compares this rank's call with that of a peer; n: the numbers of an all-gather. */
UPIPE_API upipe_status upi_team_same(upipe_err *e, upipe_comm *comm, int64_t kind, int64_t n, int peer,
                                     int64_t peer_kind, int64_t peer_n)
{
    if (kind != peer_kind)
        return upipe_comm_fail(e, comm, UPIPE_ERR_MISMATCH, "rank %d is in %s and rank %d in %s", comm->rank,
                               upi_team_kind(kind), peer, upi_team_kind(peer_kind));
    if (kind == UPI_TEAM_ALL_GATHER && n != peer_n)
        return upipe_comm_fail(e, comm, UPIPE_ERR_MISMATCH,
                               "rank %d gathers %lld numbers and rank %d gathers %lld", comm->rank,
                               (long long)n, peer, (long long)peer_n);
    return UPIPE_OK;
}

/* Compares how many messages rank `from` sends to rank `to` with how many that one receives. */
UPIPE_API upipe_status upi_team_fit_count(upipe_err *e, upipe_comm *comm, int from, int64_t sends, int to,
                                          int64_t receives)
{
    if (sends == receives) return UPIPE_OK;
    return upipe_comm_fail(e, comm, UPIPE_ERR_MISMATCH,
                           "rank %d sends %lld messages to rank %d, which receives %lld", from,
                           (long long)sends, to, (long long)receives);
}

/* Compares the blocks of one message, as its sender and as its receiver list them. */
UPIPE_API upipe_status upi_team_fit_blocks(upipe_err *e, upipe_comm *comm, int from, int64_t count,
                                           int64_t bytes, int to, int64_t recv_count, int64_t recv_bytes)
{
    if (count == recv_count && bytes == recv_bytes) return UPIPE_OK;
    return upipe_comm_fail(e, comm, UPIPE_ERR_MISMATCH,
                           "rank %d sends %lld blocks of %lld bytes to rank %d, which receives %lld of %lld",
                           from, (long long)count, (long long)bytes, to, (long long)recv_count,
                           (long long)recv_bytes);
}

/* ---- bytes ---- */

/* The transfer is complete: counts what has come from other ranks. */
UPIPE_API void upi_team_count(upipe_comm *comm, const upipe_msg *list, int n)
{
    int i;
    for (i = 0; i < n; ++i)
        if (list[i].peer != comm->rank) comm->moved_bytes += (int64_t)list[i].recv_bytes * list[i].count;
}

#endif

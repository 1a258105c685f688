/* upipe_net_team.h -- what the transports share
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

/* Ranks in a sentence: the first eight by number, if there is space for their machines' names. */
typedef struct upi_team_names {
    char text[128];
    int count, shown, at;
} upi_team_names;

/* One more rank, by its number in the world of comm. */
UPIPE_API void upi_team_name(upi_team_names *names, const upipe_comm *comm, int called)
{
    const upipe_comm *world = upi_comm_world(comm);
    const char *host = world->hosts != NULL ? world->hosts[called] : "";
    char one[UPIPE_COMM_HOST + 24];
    const int n = snprintf(one, sizeof one, "%s%d%s%s%s", names->count > 0 ? ", " : "", called,
                           host[0] != '\0' ? " (" : "", host, host[0] != '\0' ? ")" : "");
    if (names->shown == names->count++ && names->shown < 8 && names->at + n < (int)sizeof names->text) {
        memcpy(names->text + names->at, one, (size_t)n + 1);
        names->at += n;
        ++names->shown;
    }
}

enum { UPI_TEAM_NAMES = 160 };

/* "rank 3", "ranks 0, 2", "rank 1 (node7)": returns text. */
UPIPE_API const char *upi_team_names_text(const upi_team_names *names, char *text)
{
    const int more = names->count - names->shown;
    int n = snprintf(text, UPI_TEAM_NAMES, "rank%s %s", names->count > 1 ? "s" : "", names->text);
    if (more > 0) snprintf(text + n, (size_t)(UPI_TEAM_NAMES - n), " and %d more", more);
    return text;
}

/* "rank 3", for a sentence about one rank of comm. */
UPIPE_API const char *upi_team_rank(const upipe_comm *comm, int rank, char *text)
{
    upi_team_names one = {"", 0, 0, 0};
    upi_team_name(&one, comm, upi_comm_called(comm, rank));
    return upi_team_names_text(&one, text);
}

/* Fails with TIMEOUT. The sentence begins with this rank and how long it has waited. */
__attribute__((unused, format(printf, 3, 4))) static inline upipe_status upi_team_late(upipe_err *e,
                                                                                       upipe_comm *comm,
                                                                                       const char *format,
                                                                                       ...)
{
    char text[224];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return upipe_comm_fail(e, comm, UPIPE_ERR_TIMEOUT, "rank %d waited %g s %s",
                           upi_comm_called(comm, comm->rank), comm->deadline, text);
}

/* Fails with TIMEOUT in a call of this kind; what: "come", "finish", which the named ranks have not done. */
UPIPE_API upipe_status upi_team_late_for(upipe_err *e, upipe_comm *comm, int64_t kind,
                                         const upi_team_names *names, const char *what)
{
    char text[UPI_TEAM_NAMES];
    return upi_team_late(e, comm, "in %s for %s to %s", upi_team_kind(kind), upi_team_names_text(names, text),
                         what);
}

/* ---- who waits for whom ---- */

/* What a rank of the world is to one that waits. */
enum { UPI_TEAM_APART, UPI_TEAM_MISSED, UPI_TEAM_WAITS };

/* Those for whom a rank of the world waits are marked as missed, unless they are marked; 0: it does not wait. */
typedef int upi_team_waits(void *user, int rank, char *marks);

/* Of the ranks that are missed those that wait are replaced by those for whom they wait, and so on. Returns how many are
 * missed in the end; 0: they all wait for each other, and marks says nothing. */
UPIPE_API int upi_team_follow(char *marks, int ranks, upi_team_waits *waits, void *user)
{
    int r, missed, more = 1;
    while (more) {
        for (r = missed = more = 0; r < ranks; ++r) {
            if (marks[r] != UPI_TEAM_MISSED) continue;
            if (waits(user, r, marks)) marks[r] = UPI_TEAM_WAITS;
            more |= marks[r] == UPI_TEAM_WAITS;
            missed += marks[r] == UPI_TEAM_MISSED;
        }
    }
    return missed;
}

/* marks: of the world, those for whom this rank of comm waits. Names for whom it waits in the end; returns whether these are
 * others. */
UPIPE_API int upi_team_blame(const upipe_comm *comm, char *marks, upi_team_waits *waits, void *user,
                             upi_team_names *names)
{
    const upipe_comm *world = upi_comm_world(comm);
    const int me = upi_comm_called(comm, comm->rank);
    int r, others = 0, turn;
    for (turn = 0; turn < 2; ++turn) {
        upi_team_names now = {"", 0, 0, 0};
        for (r = 0; r < world->ranks; ++r)
            if (marks[r] == UPI_TEAM_MISSED) upi_team_name(&now, world, r);
        *names = now;
        if (turn == 1) break;
        marks[me] = UPI_TEAM_WAITS;
        if (upi_team_follow(marks, world->ranks, waits, user) == 0) return 0;
    }
    for (r = 0; r < world->ranks; ++r) others |= r != me && marks[r] == UPI_TEAM_WAITS;
    return others;
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
        return upipe_comm_fail(e, comm, UPIPE_ERR_MISMATCH, "rank %d is in %s and rank %d in %s",
                               upi_comm_called(comm, comm->rank), upi_team_kind(kind),
                               upi_comm_called(comm, peer), upi_team_kind(peer_kind));
    if (kind == UPI_TEAM_ALL_GATHER && n != peer_n)
        return upipe_comm_fail(
            e, comm, UPIPE_ERR_MISMATCH, "rank %d gathers %lld numbers and rank %d gathers %lld",
            upi_comm_called(comm, comm->rank), (long long)n, upi_comm_called(comm, peer), (long long)peer_n);
    return UPIPE_OK;
}

/* Compares how many messages rank `from` sends to rank `to` with how many that one receives. */
UPIPE_API upipe_status upi_team_fit_count(upipe_err *e, upipe_comm *comm, int from, int64_t sends, int to,
                                          int64_t receives)
{
    if (sends == receives) return UPIPE_OK;
    return upipe_comm_fail(
        e, comm, UPIPE_ERR_MISMATCH, "rank %d sends %lld messages to rank %d, which receives %lld",
        upi_comm_called(comm, from), (long long)sends, upi_comm_called(comm, to), (long long)receives);
}

/* Compares the blocks of one message, as its sender and as its receiver list them. */
UPIPE_API upipe_status upi_team_fit_blocks(upipe_err *e, upipe_comm *comm, int from, int64_t count,
                                           int64_t bytes, int to, int64_t recv_count, int64_t recv_bytes)
{
    if (count == recv_count && bytes == recv_bytes) return UPIPE_OK;
    return upipe_comm_fail(e, comm, UPIPE_ERR_MISMATCH,
                           "rank %d sends %lld blocks of %lld bytes to rank %d, which receives %lld of %lld",
                           upi_comm_called(comm, from), (long long)count, (long long)bytes,
                           upi_comm_called(comm, to), (long long)recv_count, (long long)recv_bytes);
}

#endif

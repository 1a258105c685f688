/* upipe_net_threads_session.h -- ranks that are threads, each with a session: team, slabs and pools
 *
 *     static upipe_status body(void *user, upipe_session *h)        one rank: h->ctx.team->rank, h->plan, &h->ctx
 *     { ... }
 *
 *     upipe_session_desc desc = {0};                                desc.plan.ranks threads
 *     upipe_threads_sessions(&desc, &ops, 0, body, &err);
 *
 * Strict ISO C hides the clock: include this file first, or define _POSIX_C_SOURCE=200809L.
 */
#ifndef UPIPE_NET_THREADS_SESSION_H
#define UPIPE_NET_THREADS_SESSION_H

#include "upipe_net_threads.h"

#include "../upipe_session.h"

/* What the ranks share, and each one's session and slab. */
typedef struct upi_threads_session_all {
    upipe_threads team;
    const upipe_session_desc *desc;
    const upipe_ops *ops;
    upipe_status (*body)(void *user, upipe_session *h);
    upipe_session *sessions; /* [ranks] */
    void **slabs;            /* [ranks] */
} upi_threads_session_all;

UPIPE_API upipe_status upi_threads_session(upi_threads_session_all *t, upipe_session *h, void **slab)
{
    UPIPE_TRY(upipe_session_open(h, t->desc));
    if (posix_memalign(slab, UPIPE_MEM_ALIGN, upipe_session_slab_bytes(h)) != 0) *slab = NULL;
    UPIPE_TRY(upipe_session_slab(h, *slab));
    UPIPE_TRY(t->body(t->desc->user, h));
    return upipe_session_close(h);
}

UPIPE_API upipe_status upi_threads_session_main(void *user, int rank)
{
    upi_threads_session_all *t = (upi_threads_session_all *)user;
    upipe_session *h = &t->sessions[rank];
    upipe_status s;
    h->ctx.ops = t->ops;
    h->ctx.team = upipe_threads_comm(&t->team, rank);
    s = upi_threads_session(t, h, &t->slabs[rank]);
    if (s != UPIPE_OK)
        upipe_comm_abort(h->ctx.team, h->ctx.err.text); /* its sentence, if no call has left one */
    return s;
}

/* upipe_threads_sessions -- runs body once for each rank, at the same time, and returns when all have
 *   desc        plan.ranks threads; 0 is one. user is for body too
 *   ops         shared by all ranks
 *   deadline_s  as upipe_threads_init
 *   body        the rank's work: returns a status, with its sentence in h->ctx.err. All that it has taken from
 *               the pool is free then
 *   bytes       a upipe_session and a slab a rank, freed when no rank reads them any more
 *   errors      that of the first rank that failed, with its sentence in e; MEMORY; those of upipe_threads_init
 */
UPIPE_API upipe_status upipe_threads_sessions(const upipe_session_desc *desc, const upipe_ops *ops,
                                              double deadline_s,
                                              upipe_status (*body)(void *user, upipe_session *h),
                                              upipe_err *e)
{
    upi_threads_session_all t;
    int ranks, i;
    upipe_status s;
    memset(&t, 0, sizeof t);
    if (desc == NULL || body == NULL)
        return upipe_fail(e, UPIPE_ERR_ARG, "%s is NULL", desc == NULL ? "the description" : "the body");
    ranks = desc->plan.ranks != 0 ? desc->plan.ranks : 1;
    t.desc = desc, t.ops = ops, t.body = body;
    UPIPE_TRY(upipe_threads_init(&t.team, ranks, deadline_s, e));
    t.sessions = (upipe_session *)calloc((size_t)ranks, sizeof *t.sessions);
    t.slabs = (void **)calloc((size_t)ranks, sizeof *t.slabs);
    s = t.sessions != NULL && t.slabs != NULL
            ? upipe_threads_run(&t.team, upi_threads_session_main, &t, NULL, e)
            : upipe_fail(e, UPIPE_ERR_MEMORY, "no memory for %d ranks", ranks);
    for (i = 0; t.slabs != NULL && i < ranks; ++i) free(t.slabs[i]);
    free(t.slabs);
    free(t.sessions);
    upipe_threads_free(&t.team);
    return s;
}

#endif

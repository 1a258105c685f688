/* upipe_unwind.h -- what a failed pass leaves: peers that know, a drained stream, a pool as before
 *
 *     int64_t mark = upipe_mem_mark(ctx->mem);
 *     upipe_status s = my_pass(ctx);                         several calls; any of them may fail
 *     return s == UPIPE_OK ? s : upipe_unwind(ctx, s, mark);
 */
#ifndef UPIPE_UNWIND_H
#define UPIPE_UNWIND_H

#include "upipe_comm.h"
#include "upipe_mem.h"
#include "upipe_ops.h"

/* An exchange between start and wait ends with the failure: then nobody reads its buffers any more, or comm->quarantine
 * says so. */
UPIPE_API void upi_abandon(upipe_ctx *c, upipe_comm *comm)
{
    const upipe_err first = c->err; /* the first failure is the one that tells */
    if (comm != NULL && comm->started) upipe_comm_wait(c, comm);
    c->err = first;
}

/* upipe_unwind -- after a failure: team and ring learn of it, the stream is drained, so that no work of this rank
 *               is left that touches the pool, and the pool goes back to the mark. A stream that may be stuck
 *               behind a peer is not waited for: then everything in the pool stays
 *
 * Where a peer may still be reading, no block of this pool may be used again before upipe_mem_release: any of
 * them may be a send buffer.
 */
UPIPE_API upipe_status upipe_unwind(upipe_ctx *c, upipe_status s, int64_t mark)
{
    upipe_err first;
    upipe_fail_reason(&c->err, s);
    upipe_comm_abort(c->team, c->err.text);
    upipe_comm_abort(c->ring, c->err.text);
    upi_abandon(c, c->team);
    upi_abandon(c, c->ring);
    first = c->err;
    if (!((c->team != NULL && c->team->stuck) || (c->ring != NULL && c->ring->stuck)) &&
        c->ops->sync(c) != UPIPE_OK)
        c->err = first;
    if ((c->team != NULL && c->team->quarantine) || (c->ring != NULL && c->ring->quarantine))
        upipe_mem_quarantine(c->mem, 0);
    else
        upipe_mem_rewind(c->mem, mark);
    return s;
}

#endif

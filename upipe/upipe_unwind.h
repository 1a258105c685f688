/* upipe_unwind.h -- the end of a failed pass: informed peers, a drained stream, the pool as before    layer 2
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

/* Ends a transfer that the failure left between start and wait. Then no rank accesses its buffers any more,
 * or comm->quarantine is set. */
UPIPE_API void upi_abandon(upipe_ctx *c, upipe_comm *comm)
{
    const upipe_err first = c->err; /* the first failure is the one to report */
    if (comm != NULL && comm->started) upipe_comm_wait(c, comm);
    c->err = first;
}

/* upipe_unwind -- after a failure: aborts team and ring, drains the stream, frees what was allocated since
 *                 the mark
 *   s       the failure; returned
 *   mark    from upipe_mem_mark, before the pass
 *
 * Draining the stream leaves no work of this rank that accesses the pool. A stream that may be stuck behind a
 * peer (comm->stuck) is not waited for: then nothing is freed. Where a peer may still read this rank's
 * memory, every block of the pool is quarantined until upipe_mem_release: any of them may be a send buffer.
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

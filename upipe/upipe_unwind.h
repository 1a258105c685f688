/* upipe_unwind.h -- the end of a failed pass: informed peers, a drained stream, the pool as before    layer 2
 *
 *     int64_t mark = upipe_mem_mark(ctx->mem);
 *     upipe_status s = my_pass(ctx);                         several calls; any of them may fail
 *     return s == UPIPE_OK ? s : upipe_unwind(ctx, s, mark, NULL);
 */
#ifndef UPIPE_UNWIND_H
#define UPIPE_UNWIND_H

#include "upipe_comm.h"
#include "upipe_mem.h"
#include "upipe_ops.h"

/* upipe_unwind -- after a failure: aborts ctx->team, ctx->ring and comm, drains the stream, frees what was allocated
 *                 since the mark
 *   s       the failure; returned
 *   mark    from upipe_mem_mark, before the pass
 *   comm    another communicator that the pass has used: this rank does not come to its team or ring either. NULL: none
 *
 * A transfer that the failure left between start and wait is ended first. Draining the stream leaves no work of
 * this rank that accesses the pool. Where a peer may still read this rank's memory (comm->quarantine), every
 * block of the pool is quarantined: any of them may be a send buffer.
 */
UPIPE_API upipe_status upipe_unwind(upipe_ctx *c, upipe_status s, int64_t mark, upipe_comm *comm)
{
    upipe_comm *const comms[3] = {c->team, c->ring, comm};
    int i, quarantine = 0;
    upipe_err first; /* the failure to report, whatever fails below */
    upipe_fail_reason(&c->err, s);
    first = c->err;
    for (i = 0; i < 3; ++i) upipe_comm_abort(comms[i], first.text);
    for (i = 0; i < 3; ++i)
        if (comms[i] != NULL && comms[i]->started) upipe_comm_wait(c, comms[i]);
    c->ops->sync(c);
    c->err = first;
    for (i = 0; i < 3; ++i) quarantine |= comms[i] != NULL && comms[i]->quarantine;
    if (quarantine)
        upipe_mem_quarantine(c->mem, 0);
    else
        upipe_mem_rewind(c->mem, mark);
    return s;
}

#endif

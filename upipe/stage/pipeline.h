/* pipeline.h -- the stage loop with two stages in flight: the same three calls        part of upipe_stage.h
 *
 *     side stream       load 0   load 1   store 0   load 2   store 1   ...   store n-1
 *     compute stream    attend 0          attend 1           attend 2  ...
 *
 * The all-to-alls of stages i + 1 (load) and i - 1 (store) run beside the attention of stage i. They, all
 * allocations and all sums but attention's own stay on one stream in one order, so the bits are those of the
 * plain loop.
 */
#ifndef UPIPE_STAGE_PIPELINE_H
#define UPIPE_STAGE_PIPELINE_H

#include "types.h"

/* Scratch of attention (work bytes) is kept through all stages, so that the compute stream never touches the pool. */
UPIPE_API upipe_status upi_pipelined(upipe_ctx *c, upipe_pass *f, size_t work, upipe_stage_call *load,
                                     upipe_stage_call *attend, upipe_stage_call *store)
{
    UPIPE_TRY(upipe_alloc(c, &f->attn_work, work, UPIPE_USE_SCRATCH, "attn_work"));
    UPIPE_TRY(upipe_pipeline_run(c, c->side_stream, f->plan->stages, load, attend, store, f));
    return upipe_free(c, f->attn_work);
}

#endif

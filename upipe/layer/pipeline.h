/* pipeline.h -- the stage loop with two stages in flight: the same three calls        part of upipe_layer.h
 *
 *     side stream       load 0   load 1   store 0   load 2   store 1   ...   store n-1
 *     compute stream    attend 0          attend 1           attend 2  ...
 *
 * The all-to-alls of stages i + 1 (load) and i - 1 (store) run beside the attention of stage i. They, all
 * allocations and all sums but attention's own stay on one stream in one order, so the bits are those of the
 * plain loop.
 */
#ifndef UPIPE_LAYER_H
#include "../upipe_layer.h"
#elif !defined(UPIPE_LAYER_PIPELINE_H)
#define UPIPE_LAYER_PIPELINE_H

#include "bwd.h"

/* Load and store of a layer, on the side stream. */
UPIPE_API upipe_status upi_side_call(upipe_ctx *side, void *pass, int store, int i)
{
    upi_pass *f = (upi_pass *)pass;
    if (f->run.grads == NULL) return store ? upi_fwd_store(side, f, i) : upi_fwd_load(side, f, i);
    return store ? upi_bwd_store(side, f, i) : upi_bwd_load(side, f, i);
}

/* Scratch of attention is held through all stages, so that the compute stream never touches the pool.
 *   call    loads or stores a stage of `pass`, of which f is a part
 */
UPIPE_API upipe_status upi_pipelined(upipe_ctx *c, upi_pass *f,
                                     upipe_status (*call)(upipe_ctx *side, void *pass, int store, int i),
                                     void *pass)
{
    const upi_scratch *scratch = &f->run.scratch;
    const int n = f->run.p->stages, backward = f->run.grads != NULL;
    upipe_pipeline q;
    upipe_status s;
    int i;
    UPIPE_TRY(
        upipe_alloc(c, &f->run.attn_work, backward ? scratch->attn_bwd : scratch->attn_fwd, "attn_work"));
    s = upipe_pipeline_begin(&q, c, c->side_stream, call, pass);
    if (s == UPIPE_OK) s = upipe_pipeline_load(&q, c, 0);
    for (i = 0; i < n && s == UPIPE_OK; ++i) {
        if (i + 1 < n) s = upipe_pipeline_load(&q, c, i + 1);
        if (s == UPIPE_OK) s = upipe_pipeline_wait(&q, c, i);
        if (s == UPIPE_OK) s = backward ? upi_bwd_attend(c, f, i) : upi_fwd_attend(c, f, i);
        if (s == UPIPE_OK) s = upipe_pipeline_store(&q, c, i);
    }
    UPIPE_TRY(upipe_pipeline_end(&q, c, s));
    return upipe_free(c, f->run.attn_work);
}

#endif

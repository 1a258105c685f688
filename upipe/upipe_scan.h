/* upipe_scan.h -- a state that goes over ranks in the order of their tokens: linear attention
 *
 * A layer of linear attention keeps a state instead of keys: a matrix a head, which every token changes. A rank begins
 * with the state that the rank before it ends with. This is communication alone: the rule that takes a rank's tokens
 * from one state to the next one is the host's, a function a direction (upipe_linear.h has two).
 *
 * States go in stages of some heads, so that rank r works on stage i while rank r + 1 works on stage i - 1:
 *
 *     step       0  1  2  3  4  5            4 stages, 3 ranks; a transfer behind each step
 *     rank 0     0  1  2  3  .  .
 *     rank 1     .  0  1  2  3  .
 *     rank 2     .  .  0  1  2  3
 *
 * The backward has the same stages, from the last rank to the first. A border of packed documents ends a state: a rank
 * whose first token begins a document starts from zeros, receives nothing and waits for nobody.
 *
 *     upipe_scan s = {0};
 *     s.plan = &plan; s.heads = 32; s.size = 128 * 128; s.stage_heads = 4;
 *     s.fwd = my_rule_fwd; s.bwd = my_rule_bwd; s.user = &my;
 *     upipe_scan_fwd(&ctx, ctx.team, &s, &states, NULL);            states at this rank's first token, for the backward
 *     upipe_scan_bwd(&ctx, ctx.team, &s, &states, NULL);
 *
 * Which ranks: neighbours hold neighbouring tokens, so the layout is contiguous. The communicator is the team, the
 * ring, or both as one world, where ranks of a team are neighbours. Sequences of a batch: a call each.
 *
 * Segments of a sequence (upipe_fpdt.h): a call each, with the plan of the segment, its first token's position in
 * s.first, and a carry, which brings what one call ends with to the rank where the next one begins.
 */
#ifndef UPIPE_SCAN_H
#define UPIPE_SCAN_H

#include "upipe_attn.h"
#include "upipe_comm.h"
#include "upipe_plan.h"

/* The host's rule on this rank's tokens, for heads first .. first + heads - 1; enqueued on ctx->stream.
 *   in     f32 [heads][size]: the state before the first token
 *   out    likewise: the state behind the last one, written */
typedef upipe_status upipe_scan_fwd_step(upipe_ctx *c, void *user, int first, int heads, const float *in,
                                         float *out);
/* Its backward.
 *   state   what the forward has begun with
 *   dstate  the gradient of the state behind the last token; becomes that of the state before the first one */
typedef upipe_status upipe_scan_bwd_step(upipe_ctx *c, void *user, int first, int heads, const float *state,
                                         float *dstate);

/* upipe_scan -- what goes over the ranks. All but fwd, bwd and user is the same on all of them
 *   plan         says which tokens a rank has; contiguous, of one sequence. Its heads and head dims are not read
 *   first        position of the plan's first token among the borders; 0, or where a segment begins
 *   borders      of packed documents
 *   heads size   of the state, f32 [heads][size]: a matrix, say, and what else goes over with it
 *   stage_heads  heads of a stage; 0 = all
 */
typedef struct upipe_scan {
    const upipe_plan *plan;
    int64_t first;
    upipe_borders borders;
    int64_t size;
    int heads, stage_heads;
    upipe_scan_fwd_step *fwd;
    upipe_scan_bwd_step *bwd;
    void *user;
} upipe_scan;

/* upipe_states -- what a forward leaves for its backward
 *   given  written by the forward; see upipe_given
 *   data   the host's, f32 [heads][size]: the state before this rank's first token
 */
typedef struct upipe_states {
    upipe_given given;
    float *data;
} upipe_states;

/* upipe_scan_state_bytes -- of the states of all heads, and of a carry of them */
UPIPE_API size_t upipe_scan_state_bytes(const upipe_scan *s)
{
    return (size_t)(s->heads * s->size) * 4;
}

#include "linear/scan.h"

/* upipe_scan_fwd -- the state over all ranks
 *   comm    its ranks hold the plan's tokens in their order
 *   states  written: the state before this rank's first token
 *   carry   NULL, or on rank 0 as large as states: the state before the first token of all, which becomes that behind the
 *           last one (where a document begins there it stays as it was). On other ranks it is not accessed, and NULL
 *           where rank 0's is
 *   bytes   a stage's states; sends upipe_scan_state_bytes to the next rank, with a carry the last one to rank 0, unless a
 *           document begins there
 *   errors  ARG, UNSUPPORTED (layout, batch), OVERFLOW: nothing happens. MISMATCH, MEMORY, the step's, others as
 *           upipe_comm_wait: team, ring and comm are aborted, and the pool is as before
 */
UPIPE_API upipe_status upipe_scan_fwd(upipe_ctx *c, upipe_comm *comm, const upipe_scan *s,
                                      upipe_states *states, float *carry)
{
    upipe_status status;
    if (states != NULL) memset(&states->given, 0, sizeof states->given);
    status = upi_scan_fwd(c, comm, s, states != NULL ? states->data : NULL, carry,
                          states != NULL ? &states->given : NULL);
    if (status != UPIPE_OK && states != NULL) states->given.plan = 0;
    return status;
}

/* upipe_scan_bwd -- the state's gradient, from the last rank to the first
 *   states  what the forward of the same scan has written
 *   carry   NULL, or on the last rank as large as states: the gradient of the state behind the last token of all, which
 *           becomes that of the state before the first one (where a document begins there it stays as it was). On other
 *           ranks it is not accessed, and NULL where the last rank's is
 *   bytes   twice as many, as the next gradient comes meanwhile; sends as many the other way
 *   errors  as upipe_scan_fwd
 */
UPIPE_API upipe_status upipe_scan_bwd(upipe_ctx *c, upipe_comm *comm, const upipe_scan *s,
                                      upipe_states *states, float *carry)
{
    return upi_scan_bwd(c, comm, s, states != NULL ? states->data : NULL, carry,
                        states != NULL ? &states->given : NULL);
}

#endif

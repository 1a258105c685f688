/* types.h -- what goes over the ranks, who waits for whom        part of upipe_scan.h */
#ifndef UPIPE_SCAN_TYPES_H
#define UPIPE_SCAN_TYPES_H

#include "../upipe_agree.h"
#include "../upipe_borders.h"
#include "../upipe_plan.h"

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

/* ---- who waits for whom ---- */

UPIPE_API int upi_scan_ranks(const upipe_scan *s)
{
    return s->plan->desc.ranks * s->plan->desc.ring;
}

UPIPE_API int upi_scan_rank(const upipe_scan *s)
{
    return s->plan->desc.ring_rank * s->plan->desc.ranks + s->plan->desc.rank;
}

/* Position of a rank's first token. Behind the last rank: of the next segment's. */
UPIPE_API int64_t upi_scan_pos(const upipe_scan *s, int rank)
{
    const upipe_plan_desc *d = &s->plan->desc;
    const upipe_shard held = upipe_shard_ring(UPIPE_CONTIGUOUS, d->tokens, d->ring, rank / d->ranks);
    if (rank == d->ranks * d->ring) return s->first + d->tokens;
    return s->first + held.piece[0].pos + upipe_cut(held.n, d->ranks, rank % d->ranks);
}

/* Whether a state goes on into this rank's first token: no document begins there. */
UPIPE_API int upi_scan_joined(const upipe_scan *s, int rank)
{
    const int64_t pos = upi_scan_pos(s, rank);
    return upipe_border_before(&s->borders, pos) != pos;
}

/* Ranks that a rank waits for, one behind the other, in the forward. */
UPIPE_API int upi_scan_fwd_depth(const upipe_scan *s, int rank)
{
    int depth = 0;
    while (depth < rank && upi_scan_joined(s, rank - depth)) ++depth;
    return depth;
}

/* The same in the backward. */
UPIPE_API int upi_scan_bwd_depth(const upipe_scan *s, int rank)
{
    int depth = 0;
    while (rank + depth + 1 < upi_scan_ranks(s) && upi_scan_joined(s, rank + depth + 1)) ++depth;
    return depth;
}

/* The largest depth: a chain of ranks is as long in both directions. */
UPIPE_API int upi_scan_depth(const upipe_scan *s)
{
    int rank, depth = 0, longest = 0;
    for (rank = 1; rank < upi_scan_ranks(s); ++rank) {
        depth = upi_scan_joined(s, rank) ? depth + 1 : 0;
        if (depth > longest) longest = depth;
    }
    return longest;
}

UPIPE_API int upi_scan_stage_heads(const upipe_scan *s)
{
    return s->stage_heads > 0 && s->stage_heads < s->heads ? s->stage_heads : s->heads;
}

/* upipe_scan_stages -- stages of a pass */
UPIPE_API int upipe_scan_stages(const upipe_scan *s)
{
    return (s->heads - 1) / upi_scan_stage_heads(s) + 1;
}

/* upipe_scan_state_bytes -- of the states of all heads, and of a carry of them */
UPIPE_API size_t upipe_scan_state_bytes(const upipe_scan *s)
{
    return (size_t)(s->heads * s->size) * 4;
}

/* Bytes of a stage's states. */
UPIPE_API size_t upi_scan_stage_bytes(const upipe_scan *s)
{
    return (size_t)(upi_scan_stage_heads(s) * s->size) * 4;
}

#endif

/* types.h -- a block in segments, and what its forward leaves        part of upipe_fpdt.h */
#ifndef UPIPE_FPDT_TYPES_H
#define UPIPE_FPDT_TYPES_H

#include "../upipe_stage.h"

enum { UPIPE_SEGMENTS_MAX = 1 << 16 };

/* upipe_fpdt
 *   layer     weights and mask; its plan is not read
 *   desc      of the whole sequence, without a ring, and of this rank: desc.rank must be the team's. chunk =
 *             heads: FPDT; smaller: stages of heads in segments of the sequence. overlap: streamed segments
 *             are copied on ctx->side_stream while another segment attends
 *   segments  pi; at most tokens / ranks, and UPIPE_SEGMENTS_MAX
 *   host      pool of the host's memory
 */
typedef struct upipe_fpdt {
    upipe_layer layer;
    upipe_plan_desc desc;
    int segments;
    upipe_mem *host;
} upipe_fpdt;

/* upipe_fpdt_saved -- what the forward leaves, in the host's memory; blocks of all segments have the size of
 *                     the largest
 *   given    as in upipe_saved, of a segment's plan
 *   out      [segment] slots of final_out: [stage][rank][batch][T][n][v_dim]
 *   q k v    [segment][stage] Q', [segment][round] K', V'
 *   lse      f32 [segment][stage]
 *   delta    rowsum(dO * O), the caller's: f32 [segment][stage][rank][batch][T][n], of upipe_fpdt_delta_bytes, from
 *            the host's pool; NULL: the backward computes it from out and dout
 *   moved    bytes between host and device so far
 */
typedef struct upipe_fpdt_saved {
    upipe_given given;
    char *out, *q, *k, *v, *lse, *delta;
    int64_t moved;
} upipe_fpdt_saved;

#endif

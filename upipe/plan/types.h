/* types.h -- the description of a run, and the plan that is made of it        part of upipe_plan.h */
#ifndef UPIPE_PLAN_TYPES_H
#define UPIPE_PLAN_TYPES_H

#include "../upipe_shard.h"

typedef enum upipe_schedule {
    UPIPE_GROUP,
    UPIPE_WHOLE,
    UPIPE_SPLIT,
    UPIPE_IN_ORDER,
    UPIPE_UNEVEN
} upipe_schedule;

/* upipe_ring_mode -- how K and V of the ring's other ranks reach a rank's queries
 *   P2P         they are sent round while a round's stages attend together: Q', O of all its stages are held
 *               at once
 *   ALL_GATHER  those of a round are gathered and held: R times K' and V'
 *   AUTO        the mode that holds less in the backward
 */
typedef enum upipe_ring_mode { UPIPE_RING_AUTO, UPIPE_RING_P2P, UPIPE_RING_ALL_GATHER } upipe_ring_mode;

enum {
    UPIPE_STAGES_MAX = 256,
    UPIPE_RANKS_MAX = 1024 /* of a team, and of a ring: functions of a plan walk all of them */
};

/* upipe_plan_desc -- what to run. Zero means the default, which stands behind the semicolon
 *   tokens         S, of the whole sequence; any number >= ranks * ring (2 * ring with ZIGZAG)
 *   batch          sequences side by side; 1
 *   ranks          C, of the all-to-all; 1
 *   rank           this rank of them: each rank has a plan of its own
 *   ring           R, ranks of the ring; 1
 *   ring_rank      this rank of them
 *   ring_inner     ranks of an inner ring, neighbours in the ring (those of a node): a double ring; 0 = none
 *   ring_mode      see upipe_ring_mode
 *   ring_prefetch  nonzero, with ALL_GATHER alone: the next round's K and V are gathered while the last stage
 *                  of a round attends (a second buffer). Needs rounds that all ranks share. No effect with
 *                  one round
 *   overlap        nonzero: while a stage attends, ctx->side_stream loads the next stage and stores the
 *                  previous one (a second set of a stage's buffers). Not with a ring, nor with uneven heads
 *                  in several stages. In segments: see upipe_fpdt
 *   layout         how the ring shares tokens
 *   heads          H
 *   kv_heads       Hkv; heads
 *   head_dim       d, of Q and K
 *   v_dim          of V and O; head_dim
 *   model_dim      D; heads * head_dim
 *   chunk          U, query heads a stage over all ranks, a multiple of ranks, or all heads; ranks
 *   naive          nonzero: heads in their order, K and V sent again in every stage (the paper's strawman)
 *   dtype          storage of activations and weights
 */
typedef struct upipe_plan_desc {
    int64_t tokens, batch;
    int64_t model_dim;
    int ranks, rank, ring, ring_rank, ring_inner, ring_prefetch, overlap;
    int heads, kv_heads, head_dim, v_dim, chunk, naive;
    upipe_ring_mode ring_mode;
    upipe_layout layout;
    upipe_dtype dtype;
} upipe_plan_desc;

/* upipe_buffers -- the block's buffers in bytes, the largest over stages, in the storage type if not said otherwise
 *   slot           of final_out, and of its gradient: Q', O, dO or dQ of a stage
 *   send           a stage's Q before its all-to-all; O' and dQ' before theirs
 *   q o stat       Q', dQ'; O', dO'; lse, delta (f32) of this rank's heads of a stage
 *   k v            K', V' of this rank's heads
 *   kv_send        K or V before its all-to-all
 *   dk dv          gradients of K', V', f32
 *   token_dk token_dv  gradients of K, V of a stage's heads at their tokens
 *   partial        the same for several ranks' shares of them, f32
 *   kv_grad        on the way from dK', dV' to there: partial, or their cast to the storage type; 0 in f32
 *   lse delta      of all stages, f32
 * With a ring:
 *   all_k all_v    K', V' of the whole sequence;  all_dk, all_dv  their gradients, f32
 *   hop_k hop_v    K', V' of another ring rank
 *   sum_o sum_q    sums of O', dQ' of a stage, f32
 */
/* clang-format off */
#define UPI_BUFFERS(X)                                                                                   \
    X(slot)                                                                                              \
    X(send) X(q) X(o) X(stat) X(k) X(v) X(kv_send) X(dk) X(dv) X(token_dk) X(token_dv) X(partial) X(kv_grad) X(lse) \
        X(delta) X(all_k) X(all_v) X(all_dk) X(all_dv) X(hop_k) X(hop_v) X(sum_o) X(sum_q)
/* clang-format on */
typedef struct upipe_buffers {
#define UPI_BUFFERS_FIELD(name) size_t name;
    UPI_BUFFERS(UPI_BUFFERS_FIELD)
#undef UPI_BUFFERS_FIELD
} upipe_buffers;

typedef struct upipe_plan {
    upipe_plan_desc desc;     /* with the defaults filled in; ring_mode is never AUTO */
    upipe_shard team_shard;   /* tokens of a sequence that this rank's team holds */
    upipe_shard shard;        /* of these, this rank's */
    int64_t local;            /* T: tokens of one sequence on this rank */
    int64_t rows;             /* batch * T */
    int64_t team_tokens;      /* tokens of a sequence that the team holds: S/R */
    int64_t team_tokens_most; /* the same of the ring rank that holds most */
    int group;                /* G */
    int stages;               /* nu */
    int per_rank;             /* m: query heads a rank and stage, at most */
    int kv_per_rank;          /* key/value heads a rank and round, at most */
    int rounds, steps;        /* stages = rounds * steps */
    int width;                /* stages that attend together: steps in a P2P ring, otherwise 1 */
    int overlap;              /* stages overlap: asked for, and there are several */
    /* traits: what the code of the stages asks of a plan, whatever schedule or ring mode is behind it */
    int kv_rounds_shared;    /* by all ranks; otherwise K', V' have one buffer for all stages */
    int kv_grads_partial;    /* ranks or stages share kv heads: gradients are sums of partial ones */
    int kv_grads_accumulate; /* these sums continue over stages, in f32, until the last one */
    int kv_gathered;         /* K', V' of all ranks of the ring are held */
    int kv_prefetched; /* those of the next round are gathered while the last stage of a round attends */
    upipe_schedule schedule;
    upipe_buffers buffers; /* bytes of this rank */
    uint64_t seal;         /* hash of all that stands above: what upipe_plan_init made is not changed */
} upipe_plan;

typedef struct upipe_stage {
    int round, step;
    int kv_fresh; /* K and V are fetched before this stage's attention, on some rank */
    int kv_last;  /* no later stage reads them */
} upipe_stage;

/* Heads first .. first + count - 1. */
typedef struct upipe_head_range {
    int first, count;
} upipe_head_range;

/* What an all-to-all of a stage moves: Q (and O, dO, dQ); K and V that are fetched; their gradients, sent
 * back. */
typedef enum upipe_a2a_heads { UPIPE_A2A_Q, UPIPE_A2A_KV, UPIPE_A2A_DKV } upipe_a2a_heads;

#endif

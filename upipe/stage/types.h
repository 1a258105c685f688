/* types.h -- the attention block, what its forward leaves, and a pass over its stages        part of upipe_stage.h */
#ifndef UPIPE_STAGE_TYPES_H
#define UPIPE_STAGE_TYPES_H

#include "../upipe_a2a.h"
#include "../upipe_agree.h"
#include "../upipe_ring.h"
#include "../upipe_side_stream.h"

enum { UPIPE_TILE_ROWS = 256 }; /* default tile of the output projection and of dX, in rows */

/* upipe_layer -- one attention block; zero fields are defaults
 *   plan        from upipe_plan_init, of this rank
 *   id          0: the weights' addresses tell this layer from the others, and are the same in all calls of a pass.
 *               Otherwise its number, by which it is told: for weights that lie elsewhere in the backward, as those
 *               that are gathered for each use
 *   wq wk wv wo weights in the plan's storage type, heads in natural order as in published Llama checkpoints:
 *               [H*d][D], [Hkv*d][D], [Hkv*v_dim][D], [D][H*v_dim]
 *   wg          [H*v_dim][D], of a gated output (upipe_out_gate.h); NULL = none
 *   bq bk bv bo f32 biases, [H*d], [Hkv*d], [Hkv*v_dim], [D]; each may be NULL = none. Those of Q, K, V are added
 *               to stored products, bo to the f32 sum
 *               wo, wg and bo are read by the out calls alone, and are those that upipe_layer_fwd was given
 *   q_norm_weight k_norm_weight  f32 [d]: RMS norm of every head of Q and K before RoPE; both NULL = none
 *   norm_eps    of these norms, added to the mean square; 0 without them. With 0 a head of zeros gives NaN
 *   rope_theta  base of the rotary embedding of Q and K; 0 = none
 *   rope_rates  f64 [dims/2], host memory: radians a position of each pair, in place of theta's; NULL = by rope_theta.
 *               All ranks have the same, and a backward its forward's
 *   rope_factor Q and K are multiplied by it where they are rotated; 0 = 1
 *   rope_dims   the first ones of a head are rotated, an even number; 0 = all
 *   rope_interleaved  pairs (2p, 2p+1); otherwise (p, p + dims/2)
 *   scale       of the scores; 0 = 1/sqrt(d)
 *   mask        zero: every token sees all tokens of its sequence. mask.causal = 1: those up to its own.
 *               cu_seqlens are positions in the flattened batch, [0, batch * S]: sequence b begins at b * S.
 *               Every sequence of the batch is separate without them too
 *   tile_rows   rows of a tile of y and dX; 0 = UPIPE_TILE_ROWS. On a GPU model_dim, the paper's square tile, is better.
 *               A tile holds its sum in f32, and its heads side by side where stages or ranks have them apart
 */
typedef struct upipe_layer {
    const upipe_plan *plan;
    int64_t id;
    const void *wq, *wk, *wv, *wo, *wg;
    const float *bq, *bk, *bv, *bo, *q_norm_weight, *k_norm_weight;
    double rope_theta, rope_factor;
    const double *rope_rates;
    float norm_eps, scale;
    int rope_dims, rope_interleaved;
    upipe_mask mask;
    int64_t tile_rows;
} upipe_layer;

/* upipe_grads -- gradients of the weights over this rank's tokens (of sinks: over its heads): f32, shapes of the
 *                weights, +=; NULL = not wanted. Sum them over team and ring: upipe_all_reduce */
typedef struct upipe_grads {
    float *wq, *wk, *wv, *wo, *wg;
    float *q_norm_weight, *k_norm_weight, *sinks, *bq, *bk, *bv, *bo;
} upipe_grads;

/* upipe_saved -- what the forward leaves for the backward, in the pool
 *   given  see upipe_given; who keeps out and lse elsewhere meanwhile keeps it beside them
 *   out    final_out in slots; after upipe_layer_out_bwd its gradient
 *   lse    f32 [stage][batch][S/R][n], of this rank's n heads of the stage
 *   delta  f32 [stage][rank][batch][T][n]: rowsum(dO * O); NULL until the backward
 *   o      O, as out held it, once that holds its gradient or was consumed; NULL unless upipe_ops.attn_reads_o
 */
typedef struct upipe_saved {
    upipe_given given;
    upipe_slots out;
    float *lse, *delta;
    void *o;
} upipe_saved;

/* Which of the three tensors a stage loads; arrays of a pass are indexed by it. */
typedef enum upipe_proj { UPIPE_PROJ_Q, UPIPE_PROJ_K, UPIPE_PROJ_V } upipe_proj;

/* upipe_scratch -- bytes: of any of the block's products, of attention, of the f32 sum of a tile (0 where y and dX are
 *                  summed in place), and of a tile's heads side by side (0 where they lie so). dq_sum: of dQ' in f32, to
 *                  which attention adds instead of asking for scratch; 0 where it does not */
typedef struct upipe_scratch {
    size_t gemm, attn_fwd, attn_bwd, tile, heads, dq_sum;
} upipe_scratch;

/* K' and V' of a rank's heads, or their gradients. */
typedef struct upipe_kv_pair {
    void *k, *v;
} upipe_kv_pair;

/* What a stage holds between load and store. Stages that attend together (plan->width of them) count as one, and
 * their buffers lie one behind the other. */
typedef struct upi_stage_buffers {
    upipe_kv_pair kv, dkv;
    void *send, *dout, *sums; /* sums: O' or dQ', in send where they are not summed in f32 */
    void *o;                  /* O' in the backward, where attention reads it */
    float *delta;
} upi_stage_buffers;

/* upipe_pass -- one pass through the stages of a block, forward or backward; a door fills it (upipe_pass_init), and the
 *               calls of upipe_stage.h read it
 *   layer  weights, mask and scale; plan is its plan
 *   fill   writes all heads of a stage's Q, K or V into a send buffer, in the send layout of upipe_a2a.h: the layer
 *          projects x, others pack the host's tensors
 *   grad   backward: the gradient of a run of heads, in g, at this rank's tokens: into dW, or the host's tensors
 *   x      [rows][1][D], of the layer;  heads, dheads: [3] views of the host's Q, K, V and of their gradients, whose data
 *          may be NULL
 *   o      backward, where attention reads O: upipe_saved.o; NULL: it is packed from out, the host's O
 *   grads  backward: gradients of the weights
 *   slots  forward: of final_out; backward: of dO, then dQ
 *   lse delta  as in upipe_saved
 */
typedef struct upipe_pass {
    const upipe_layer *layer;
    const upipe_plan *plan;
    upipe_status (*fill)(upipe_ctx *c, const struct upipe_pass *f, upipe_proj which, int stage, void *dst);
    upipe_status (*grad)(upipe_ctx *c, const struct upipe_pass *f, upipe_proj which, upipe_head_run h,
                         void *g);
    upipe_view x;
    const upipe_view *heads, *dheads;
    upipe_view out;
    const void *o;
    const upipe_grads *grads;
    upipe_slots *slots;
    float *lse, *delta;
    upipe_scratch scratch;
    upipe_shard rows;        /* positions of x */
    int64_t tile_rows;       /* of a tile of y and dX */
    const void *w[3];        /* wq, wk, wv */
    const float *bias[3];    /* bq, bk, bv; NULL without */
    const float *norm[3];    /* QK norm weights; NULL without */
    int dim[3];              /* elements of a head */
    upipe_a2a_heads sent[3]; /* whose heads a stage's all-to-all moves */
    size_t token_bytes[3];   /* of a head */
    float *dnorm;    /* backward with QK norm: f32 [H + Hkv][d], the norm weights' gradients by head */
    void *attn_work; /* scratch of attention, if it is held through all stages; otherwise NULL */
    int in_flight;   /* stages between load and store: 2 in a pipeline, otherwise 1 */
    upi_stage_buffers stage[2]; /* those of stage i are at i % in_flight */
    upipe_kv_pair kv, dkv;      /* of the stage that was loaded last */
    upipe_kv_pair
        dkv_tokens; /* at their tokens: of the latest round, linked to those before; shared heads: of all */
    int dkv_rounds[3];       /* how many are linked */
    upipe_kv_pair next, own; /* all-gather ring: K', V' being gathered for stage `coming`; this rank's part */
    int coming;              /* 0: none is being gathered */
} upipe_pass;

#endif

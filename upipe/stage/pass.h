/* pass.h -- the state of a call of the attention block */
#ifndef UPIPE_STAGE_PASS_H
#define UPIPE_STAGE_PASS_H

/* Which of the three tensors a stage loads; arrays of a pass are indexed by it. */
typedef enum upi_proj { UPI_PROJ_Q, UPI_PROJ_K, UPI_PROJ_V } upi_proj;

/* upi_scratch -- bytes: of any of the block's products, of attention, of the f32 sum of a tile (0 where y and dX are
 *                summed in place), and of a tile's heads side by side (0 where they lie so). dq_sum: of dQ' in f32, to
 *                which attention adds instead of asking for scratch; 0 where it does not */
typedef struct upi_scratch {
    size_t gemm, attn_fwd, attn_bwd, tile, heads, dq_sum;
} upi_scratch;

/* K' and V' of a rank's heads, or their gradients. */
typedef struct upi_kv_pair {
    void *k, *v;
} upi_kv_pair;

/* What a stage holds between load and store. Stages that attend together (plan->width of them) count as one, and
 * their buffers lie one behind the other. */
typedef struct upi_stage_buffers {
    upi_kv_pair kv, dkv;
    void *send, *dout, *sums; /* sums: O' or dQ', in send where they are not summed in f32 */
    void *o;                  /* O' in the backward, where attention reads it */
    float *delta;
} upi_stage_buffers;

/* upi_pass -- one pass through the stages of a block, forward or backward; a door fills it (upi_pass_init), and the
 *             calls of upipe_layer.h read it
 *   layer  weights, mask and scale; plan is its plan
 *   fill   writes all heads of a stage's Q, K or V into a send buffer, in the send layout of upipe_a2a.h: the layer
 *          projects x, others pack the host's tensors
 *   fetch  K' and V' of this rank's heads: upi_kv_fetch, or from what all ranks hold (latent/expand.h)
 *   grad   backward: the gradient of a run of heads, in g, at this rank's tokens: into dW, or the host's tensors
 *   x      [rows][1][D], of the layer;  heads, dheads: [3] views of the host's Q, K, V and of their gradients, whose data
 *          may be NULL
 *   o      backward, where attention reads O: upipe_saved.o; NULL: it is packed from out, the host's O
 *   grads  backward: gradients of the weights
 *   slots  forward: of final_out; backward: of dO, then dQ
 *   lse delta  as in upipe_saved
 */
typedef struct upi_pass {
    const upipe_layer *layer;
    const upipe_plan *plan;
    upipe_status (*fill)(upipe_ctx *c, const struct upi_pass *f, upi_proj which, int stage, void *dst);
    upipe_status (*fetch)(upipe_ctx *c, const struct upi_pass *f, int stage, const upi_kv_pair *kv);
    upipe_status (*grad)(upipe_ctx *c, const struct upi_pass *f, upi_proj which, upi_head_run h, void *g);
    upipe_view x;
    const upipe_view *heads, *dheads;
    struct upi_latent *latent; /* of latent/expand.h; NULL: K and V are the layer's or the host's */
    upipe_view out;
    const void *o;
    const upipe_grads *grads;
    upipe_slots *slots;
    float *lse, *delta;
    upi_scratch scratch;
    upipe_shard rows;        /* positions of x */
    int64_t tile_rows;       /* of a tile of y and dX */
    int64_t in_dim;          /* elements of a row of x: model_dim, but for upipe_latent_layer.h */
    int rope_from;           /* elements of a head before those that are rotated */
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
    upi_kv_pair kv, dkv;        /* of the stage that was loaded last */
    upi_kv_pair
        dkv_tokens; /* at their tokens: of the latest round, linked to those before; shared heads: of all */
    int dkv_rounds[3];     /* how many are linked */
    upi_kv_pair next, own; /* all-gather ring: K', V' being gathered for stage `coming`; this rank's part */
    int coming;            /* 0: none is being gathered */
} upi_pass;

#endif

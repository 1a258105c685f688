/* upipe_layer.h -- the attention block, forward and backward: the paper's stages
 *
 * x (already normed) -> Q, K, V -> [QK norm] -> [RoPE] -> inp_all_to_all -> attention -> out_all_to_all ->
 * slots of final_out, stage by stage (the paper's Figure (b)). chunk = heads in the plan is DeepSpeed-Ulysses.
 *
 *     upipe_layer_fwd(&ctx, &layer, &saved, x);                            saved: final_out, lse
 *     upipe_layer_out_fwd(&ctx, &layer, y, &saved);                        y = O * Wo^T + bo
 *     ...
 *     upipe_layer_out_bwd(&ctx, &layer, &grads, &saved, dy);               O becomes dO, in place
 *     upipe_layer_bwd(&ctx, &layer, dx, &grads, &saved, &saved.out, x);    dx may be x itself
 *     upipe_saved_free(&ctx, &saved);                                      the slots, which hold dQ now
 *
 * What the loops below call is in stage/. A failed call frees what it allocated and aborts the team, so that no rank
 * waits for this one. Where a peer may still read this rank's memory (team->quarantine), the pool is locked instead
 * (upi_mem_quarantine).
 */
#ifndef UPIPE_LAYER_H
#define UPIPE_LAYER_H

#include "upipe_a2a.h"
#include "upipe_ring.h"

enum { UPIPE_TILE_ROWS = 256 }; /* default tile of the output projection and of dX, in rows */

/* upipe_layer -- one attention block; zero fields are defaults
 *   plan        from upipe_plan_init, of this rank
 *   id          0: the weights' addresses tell this layer from the others, and are the same in all calls of a pass.
 *               Otherwise its number, by which it is told: for weights that lie elsewhere in the backward, as those
 *               that are gathered for each use
 *   wq wk wv wo weights in the plan's storage type, heads in natural order as in published Llama checkpoints:
 *               [H*d][D], [Hkv*d][D], [Hkv*v_dim][D], [D][H*v_dim]
 *   wg          [H*v_dim][D], of a gated output (upipe_layer_gated_out_fwd); NULL = none
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

/* upipe_saved_free -- frees what is left of the forward's results
 *   errors  ARG for blocks that a failed transfer has quarantined
 */
UPIPE_API upipe_status upipe_saved_free(upipe_ctx *c, upipe_saved *save)
{
    if (save == NULL) return upipe_fail(&c->err, UPIPE_ERR_ARG, "save is NULL");
    UPIPE_TRY(upipe_free(c, save->out.data));
    UPIPE_TRY(upipe_free(c, save->lse));
    UPIPE_TRY(upipe_free(c, save->delta));
    UPIPE_TRY(upipe_free(c, save->o));
    memset(save, 0, sizeof *save);
    return UPIPE_OK;
}

#include "stage/pass.h"
#include "stage/check.h"
#include "stage/attend.h"
#include "stage/scratch.h"
#include "stage/project.h"
#include "stage/kv.h"
#include "stage/kv_grad.h"
#include "stage/out.h"
#include "stage/pipeline.h"
#include "stage/stage.h"
#include "stage/out_gate.h"

/* ---- both loops ---- */

UPIPE_API upipe_status upi_layer_fwd(upipe_ctx *c, upi_pass *f, upipe_saved *save)
{
    const upipe_plan *p = f->plan;
    void *lse;
    int i;
    upi_phase_set(c, UPIPE_FWD_IN);
    UPIPE_TRY(upipe_slots_alloc(c, p, &save->out, UPIPE_SLOT_EMPTY, "final_out"));
    UPIPE_TRY(upipe_alloc(c, &lse, p->buffers.lse, UPIPE_USE_STAT, "lse"));
    f->lse = save->lse = (float *)lse;
    if (p->overlap) /* the same three calls, with two stages in flight */
        return upi_pipelined(c, f, f->scratch.attn_fwd, upi_fwd_load, upi_fwd_attend, upi_fwd_store);
    for (i = 0; i < p->stages; i += p->width) {
        UPIPE_TRY(upi_fwd_load(c, f, i));   /* Q', K', V': inp_all_to_all */
        UPIPE_TRY(upi_fwd_attend(c, f, i)); /* O' */
        UPIPE_TRY(upi_fwd_store(c, f, i));  /* out_all_to_all, into slot i of final_out */
    }
    return UPIPE_OK;
}

/* store: upi_bwd_store, and what a door does after it */
UPIPE_API upipe_status upi_layer_bwd(upipe_ctx *c, upi_pass *f, upipe_saved *save, upipe_view dx,
                                     upipe_status (*store)(upipe_ctx *c, void *pass, int i))
{
    const upipe_plan *p = f->plan;
    int i;
    if (save->delta == NULL) UPIPE_TRY(upi_delta_all(c, p, save, f->slots));
    f->lse = save->lse;
    f->delta = save->delta;
    f->o = save->o;
    upi_phase_set(c, UPIPE_BWD_IN);
    if (f->layer->q_norm_weight != NULL) UPIPE_TRY(upi_norm_grads_begin(c, f));
    if (p->overlap) {
        UPIPE_TRY(upi_pipelined(c, f, f->scratch.attn_bwd, upi_bwd_load, upi_bwd_attend, store));
    } else {
        for (i = 0; i < p->stages; i += p->width) {
            UPIPE_TRY(upi_bwd_load(c, f, i));   /* Q', K', V' again; dO' and delta out of slot i */
            UPIPE_TRY(upi_bwd_attend(c, f, i)); /* dQ', dK', dV' */
            UPIPE_TRY(store(c, f, i));          /* dQ' into slot i; dK', dV' after their round; dW */
        }
    }
    UPIPE_TRY(upipe_free(c, save->o));
    save->o = NULL;
    UPIPE_TRY(upipe_free(c, save->delta));
    save->delta = NULL;
    UPIPE_TRY(upipe_free(c, save->lse));
    save->lse = NULL;
    if (p->kv_grads_accumulate) UPIPE_TRY(upi_kv_grad_end(c, f));
    if (f->layer->q_norm_weight != NULL) UPIPE_TRY(upi_norm_grads_end(c, f));
    UPIPE_TRY(upi_grad_x(c, f, dx, f->slots));
    return upi_kv_grad_free(c, f);
}

/* ---- public calls ---- */

UPIPE_API upipe_status upi_layer_begin(upipe_ctx *c, upi_pass *f, const upipe_layer *l, upipe_saved *save,
                                       upipe_view x, upipe_phase phase)
{
    upi_phase_set(c, phase);
    if (save == NULL || (phase == UPIPE_BWD_BEFORE && (save->given.plan == 0 || save->lse == NULL)))
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "save is NULL, or not there any more (consumed?)");
    UPIPE_TRY(upi_check_layer(c, l, x));
    UPIPE_TRY(upi_stage_agree(c, l, 0, 0, NULL, &save->given));
    upi_pass_init(c->ops, f, l, &save->out);
    f->fill = upi_project;
    f->x = x;
    return UPIPE_OK;
}

/* upipe_layer_fwd -- attention of x: projections, all-to-alls, attention, stage by stage
 *   save    written: slots full of O, and lse; from the pool, upipe_saved_free frees them
 *   x       [rows][1][D] view of this rank's tokens, the plan's type
 *   bytes   phases FWD_* of upipe_dry_layer; sends upipe_plan_sent(plan, 0), to the ring upipe_ring_sent(plan, &mask, 0)
 *   errors  ARG, UNSUPPORTED, MEMORY, MISMATCH, TIMEOUT, ABORTED; the team is aborted, and the pool as before
 *   paper   section 3.3 and Figure (b)
 */
UPIPE_API upipe_status upipe_layer_fwd(upipe_ctx *c, const upipe_layer *l, upipe_saved *save, upipe_view x)
{
    upi_pass pass;
    upipe_status s;
    int64_t mark;
    if (save != NULL) memset(save, 0, sizeof *save);
    UPIPE_TRY(upi_ctx_check(c));
    mark = upipe_mem_mark(c->mem);
    s = upi_layer_begin(c, &pass, l, save, x, UPIPE_FWD_BEFORE);
    if (s == UPIPE_OK) s = upi_layer_fwd(c, &pass, save);
    if (s != UPIPE_OK && save != NULL) memset(save, 0, sizeof *save);
    return upi_pass_end(c, s, mark);
}

/* upipe_layer_bwd -- gradients of x and of the weights; Q, K, V are recomputed and sent again
 *   dx      [rows][1][D] view, the plan's type, written; its data may be x's, which is read for the last time before
 *   grads   all but wo and bo: +=
 *   save    consumed: lse, delta and o are freed, and so is final_out, unless it is dout
 *   dout    slots full of the gradient of O; they hold dQ afterwards and stay the caller's. &save->out after out_bwd
 *   x       the forward's
 *   bytes   phases BWD_* of upipe_dry_layer; sends upipe_plan_sent(plan, 1), or (plan, 2) with upipe_ops.attn_reads_o,
 *           to the ring upipe_ring_sent(plan, &mask, 1)
 *   errors  as upipe_layer_fwd; save is then valid for upipe_saved_free alone, and grads hold part of a sum
 *   paper   Appendix A, with the changes that docs/memory.md explains
 */
UPIPE_API upipe_status upipe_layer_bwd(upipe_ctx *c, const upipe_layer *l, upipe_view dx,
                                       const upipe_grads *grads, upipe_saved *save, upipe_slots *dout,
                                       upipe_view x)
{
    const float *delta = save != NULL ? save->delta : NULL;
    upi_pass pass;
    upipe_status s;
    int64_t mark;
    UPIPE_TRY(upi_ctx_check(c));
    mark = upipe_mem_mark(c->mem);
    s = upi_layer_begin(c, &pass, l, save, x, UPIPE_BWD_BEFORE);
    pass.slots = dout;
    pass.grad = upi_project_grad;
    pass.grads = grads;
    if (s == UPIPE_OK) s = upi_check_rows(c, l->plan, "dx", dx, l->plan->desc.model_dim);
    if (s == UPIPE_OK) s = upi_check_grads(c, l, grads, save, dout);
    if (s == UPIPE_OK) s = upi_layer_bwd(c, &pass, save, dx, upi_bwd_store);
    if (s != UPIPE_OK && save != NULL && delta == NULL) save->delta = NULL; /* upi_pass_end frees it */
    return upi_pass_end(c, s, mark);
}

/* upipe_layer_out_fwd -- y = O * Wo^T + bo; sends nothing
 *   y       [rows][1][D] view, the plan's type, written
 *   bytes   one tile in f32 (none for f32 storage), its heads side by side (none where they lie so) and the scratch of a
 *           product
 *   errors  ARG, MEMORY; the team is then aborted
 */
UPIPE_API upipe_status upipe_layer_out_fwd(upipe_ctx *c, const upipe_layer *l, upipe_view y,
                                           const upipe_saved *save)
{
    upi_pass pass;
    upipe_status s;
    int64_t mark;
    UPIPE_TRY(upi_ctx_check(c));
    mark = upipe_mem_mark(c->mem);
    s = upi_out_begin(c, &pass, l, y, save);
    if (s == UPIPE_OK) s = upi_out_fwd(c, &pass, y, &save->out);
    return s == UPIPE_OK ? UPIPE_OK : upi_unwind(c, s, mark, NULL);
}

/* upipe_layer_out_bwd -- from the gradient of y: dWo, dbo, delta, and the gradient of O in O's place
 *   grads   wo += dy^T * O, bo += sums of dy
 *   save    consumes out: its slots (new ones, with attn_reads_o) hold the gradient of O then; delta is allocated
 *   dy      [rows][1][D] view, the plan's type; may be freed afterwards
 *   bytes   delta (rows * H * 4), one stage and rank's block of O, and the scratch of a product
 *   errors  ARG, MEMORY; the team is then aborted, and save is valid for upipe_saved_free alone
 */
UPIPE_API upipe_status upipe_layer_out_bwd(upipe_ctx *c, const upipe_layer *l, const upipe_grads *grads,
                                           upipe_saved *save, upipe_view dy)
{
    const float *delta = save != NULL ? save->delta : NULL;
    upi_pass pass;
    upipe_status s;
    int64_t mark;
    UPIPE_TRY(upi_ctx_check(c));
    mark = upipe_mem_mark(c->mem);
    s = upi_out_begin(c, &pass, l, dy, save);
    pass.grads = grads;
    if (s == UPIPE_OK) s = upi_check_grads(c, l, grads, NULL, NULL);
    if (s == UPIPE_OK) s = upi_out_bwd(c, &pass, save, dy);
    if (s != UPIPE_OK && save != NULL && delta == NULL) save->delta = NULL; /* upi_unwind frees it */
    return s == UPIPE_OK ? UPIPE_OK : upi_unwind(c, s, mark, NULL);
}

/* ---- a gated output ---- */

/*     y = (O * sigmoid(x * Wg^T)) * Wo^T + bo
 *
 * Two calls in place of upipe_layer_out_fwd and upipe_layer_out_bwd, around the same attention:
 *
 *     upipe_layer_fwd(&ctx, &layer, &saved, x);
 *     upipe_layer_gated_out_fwd(&ctx, &layer, y, &saved, x);                     y may be x
 *     ...
 *     upipe_layer_gated_out_bwd(&ctx, &layer, &grads, &saved, dg, dy, x);        dg may be dy: the gate's part of dx
 *     upipe_layer_bwd(&ctx, &layer, dx, &grads, &saved, &saved.out, x);    the rest; dx += dg is the host's
 *
 * They go by tiles of rows. A tile has the gate of all heads in natural order: one product makes it, and one adds up the
 * heads. The slots' order matters where the gate meets O alone. So an element's additions, and its bits, are the same
 * for every chunk and number of ranks. Those of gradients of weights are the same for every tile too: in the backward a
 * tile has a multiple of UPIPE_SUM_ROWS rows.
 */

/* upipe_layer_gated_out_fwd -- y = (O * sigmoid(x * Wg^T)) * Wo^T + bo, in place of upipe_layer_out_fwd; sends nothing
 *   y       [rows][1][D] view, the plan's type, written; may be x
 *   save    of upipe_layer_fwd; O is read, and stays
 *   x       the forward's
 *   bytes   a tile's gate (tile rows * H * v_dim), one tile in f32 (none for f32 storage) and the scratch of a product
 *   errors  ARG, MEMORY, the table's. The team is then aborted, and the pool as before
 */
UPIPE_API upipe_status upipe_layer_gated_out_fwd(upipe_ctx *c, const upipe_layer *l, upipe_view y,
                                                 const upipe_saved *save, upipe_view x)
{
    upi_gated g;
    upipe_status s;
    int64_t mark;
    UPIPE_TRY(upi_ctx_check(c));
    mark = upipe_mem_mark(c->mem);
    s = upi_gated_check(c, &g, l, y, save, x);
    if (s == UPIPE_OK) s = upi_gated_check_alias(c, "y", y, "x", x);
    if (s == UPIPE_OK) s = upi_gated_fwd(c, &g, y, &save->out, x);
    return s == UPIPE_OK ? UPIPE_OK : upi_unwind(c, s, mark, NULL);
}

/* upipe_layer_gated_out_bwd -- from the gradient of y: dWo, dbo, dWg, delta, the gradient of O in O's place, and the gate's part
 *                              of the gradient of x; in place of upipe_layer_out_bwd
 *   grads   wo += dy^T * (O * sigmoid(x * Wg^T)), wg +=, bo += sums of dy
 *   save    consumes out: its slots (new ones, with attn_reads_o) hold the gradient of O then; delta is allocated
 *   dx      [rows][1][D] view, the plan's type, written: what comes through the gate. The host adds it to what
 *           upipe_layer_bwd gives. May be dy
 *   dy      [rows][1][D] view, the plan's type; may be freed afterwards
 *   x       the forward's
 *   bytes   delta (rows * H * 4), two tiles (rows * H * v_dim) and one of a stage and rank's heads (with attn_reads_o
 *           the new slots instead), one in f32 (none for f32 storage) and the scratch of a product. A tile has the
 *           layer's rows, rounded up to UPIPE_SUM_ROWS
 *   errors  ARG, MEMORY, the table's. The team is then aborted, and save is valid for
 *           upipe_saved_free alone
 */
UPIPE_API upipe_status upipe_layer_gated_out_bwd(upipe_ctx *c, const upipe_layer *l, const upipe_grads *grads,
                                                 upipe_saved *save, upipe_view dx, upipe_view dy,
                                                 upipe_view x)
{
    const float *delta = save != NULL ? save->delta : NULL;
    upi_gated g;
    upipe_status s;
    int64_t mark;
    UPIPE_TRY(upi_ctx_check(c));
    mark = upipe_mem_mark(c->mem);
    s = upi_gated_check(c, &g, l, dy, save, x);
    if (s == UPIPE_OK) s = upi_check_rows(c, l->plan, "dx", dx, l->plan->desc.model_dim);
    if (s == UPIPE_OK) s = upi_gated_check_alias(c, "dx", dx, "dy", dy);
    if (s == UPIPE_OK) s = upi_gated_check_alias(c, "dx", dx, "x", x);
    if (s == UPIPE_OK) s = upi_check_grads(c, l, grads, NULL, NULL);
    if (s == UPIPE_OK) {
        const int64_t rows = g.pass.tile_rows + UPIPE_SUM_ROWS - 1;
        g.pass.grads = grads;
        g.pass.tile_rows = rows / UPIPE_SUM_ROWS * UPIPE_SUM_ROWS;
        if (g.pass.tile_rows > l->plan->rows) g.pass.tile_rows = l->plan->rows;
        s = upi_gated_bwd(c, &g, save, dx, dy, x);
    }
    if (s != UPIPE_OK && save != NULL && delta == NULL) save->delta = NULL; /* upi_unwind frees it */
    return s == UPIPE_OK ? UPIPE_OK : upi_unwind(c, s, mark, NULL);
}

#endif

/* upipe_layer.h -- the attention block, forward and backward: the paper's stages        layer 6
 *
 * x (already normed) -> Q, K, V -> [QK norm] -> [RoPE] -> inp_all_to_all -> attention -> out_all_to_all ->
 * slots of final_out, stage by stage (the paper's Figure (b)). With chunk = heads in the plan it is
 * DeepSpeed-Ulysses.
 *
 *     upipe_layer_fwd(&ctx, &layer, &saved, x);                            saved: final_out, lse
 *     upipe_layer_out_fwd(&ctx, &layer, y, &saved);                        y = O * Wo^T + bo
 *     ...
 *     upipe_layer_out_bwd(&ctx, &layer, &grads, &saved, dy);               O becomes dO, in place
 *     upipe_layer_bwd(&ctx, &layer, dx, &grads, &saved, &saved.out, x);    dx may be x itself
 *     upipe_saved_free(&ctx, &saved);                                      the slots, which hold dQ now
 *
 * Both loops are below: upi_layer_fwd and upi_layer_bwd. A failed call frees what it allocated and aborts the
 * team, so that no rank waits for this one. Where a peer may still read this rank's memory
 * (team->quarantine), the pool is locked instead until upipe_mem_release.
 */
#ifndef UPIPE_LAYER_H
#define UPIPE_LAYER_H

#include "upipe_agree.h"
#include "upipe_check.h"
#include "upipe_reduce.h"
#include "upipe_ring.h"
#include "upipe_side_stream.h"

enum { UPIPE_TILE_ROWS = 256 }; /* default tile of the output projection and of dX, in rows */

/* upipe_layer -- one attention block; zero fields are defaults
 *   plan        from upipe_plan_init
 *   wq wk wv wo weights in the plan's storage type, heads in natural order as in published Llama checkpoints:
 *               [H*d][D], [Hkv*d][D], [Hkv*v_dim][D], [D][H*v_dim]. wo is read by the out calls alone
 *   bq bk bv bo f32 biases, [H*d], [Hkv*d], [Hkv*v_dim], [D]; each may be NULL = none. Those of Q, K, V are added
 *               to stored products, bo to the f32 sum. bo is read by the out calls alone
 *   q_norm_weight k_norm_weight  f32 [d]: RMS norm of every head of Q and K before RoPE; both NULL = none
 *   norm_eps    of these norms, added to the mean square; 0 without them. With 0 a head of zeros gives NaN
 *   rope_theta  base of the rotary embedding; 0 = none
 *   rope_interleaved  pairs (2p, 2p+1); otherwise (p, p + d/2)
 *   scale       of the scores; 0 = 1/sqrt(d)
 *   mask        zero: every token sees all tokens of its sequence. mask.causal = 1: those up to its own.
 *               cu_seqlens are positions in the flattened batch, [0, batch * S]: sequence b begins at b * S.
 *               Every sequence of the batch is separate without them too
 *   tile_rows   rows of a tile of y and dX; 0 = UPIPE_TILE_ROWS. On a GPU model_dim, the paper's square tile,
 *               is better
 *   grad_dtype  of the gradients of wq, wk, wv and wo; 0 = f32. Others are rounded once a call (in segments once a
 *               segment), and take scratch for the f32 product of a stage
 */
typedef struct upipe_layer {
    const upipe_plan *plan;
    const void *wq, *wk, *wv, *wo;
    const float *bq, *bk, *bv, *bo, *q_norm_weight, *k_norm_weight;
    double rope_theta;
    float norm_eps, scale;
    int rope_interleaved;
    upipe_mask mask;
    int64_t tile_rows;
    upipe_dtype grad_dtype;
} upipe_layer;

/* upipe_grads -- gradients of the weights over this rank's tokens (of sinks: over its heads): f32 (those of wq, wk,
 *                wv, wo in the layer's grad_dtype), shapes of the weights, +=; NULL = not wanted. Sum them over
 *                team and ring: upipe_all_reduce, where they are f32 */
typedef struct upipe_grads {
    void *wq, *wk, *wv, *wo;
    float *q_norm_weight, *k_norm_weight, *sinks, *bq, *bk, *bv, *bo;
} upipe_grads;

/* upipe_saved -- what the forward leaves for the backward, in the pool
 *   out    final_out in slots; after upipe_layer_out_bwd its gradient
 *   lse    f32 [stage][batch][S/R][n], of this rank's n heads of the stage
 *   delta  f32 [stage][rank][batch][T][n]: rowsum(dO * O); NULL until the backward
 */
typedef struct upipe_saved {
    upipe_slots out;
    float *lse, *delta;
} upipe_saved;

/* The parts: layer/kv.h owns K and V, layer/kv_grad.h their gradients; layer/fwd.h and layer/bwd.h have load,
 * attend and store. */
#include "layer/pipeline.h"
#include "layer/out.h"
#include "layer/check.h"

/* ---- both loops ---- */

UPIPE_API upipe_status upi_layer_fwd(upipe_ctx *c, upi_pass *f)
{
    const upipe_plan *p = f->run.p;
    void *lse;
    int i;
    upipe_phase_set(c, UPIPE_FWD_IN);
    UPIPE_TRY(upipe_slots_alloc(c, p, &f->save->out, UPIPE_SLOT_EMPTY, "final_out"));
    UPIPE_TRY(upipe_alloc(c, &lse, f->run.buffers.lse, "lse"));
    f->save->lse = (float *)lse;
    UPIPE_TRY(upi_kv_begin(c, &f->run, &f->kv));
    for (i = 0; i < p->stages && !p->overlap; i += p->width) {
        UPIPE_TRY(upi_fwd_load(c, f, i));   /* Q', K', V': inp_all_to_all */
        UPIPE_TRY(upi_fwd_attend(c, f, i)); /* O' */
        UPIPE_TRY(upi_fwd_store(c, f, i));  /* out_all_to_all, into slot i of final_out */
    }
    if (p->overlap)
        UPIPE_TRY(upi_pipelined(c, f, upi_side_call, f)); /* the same three calls, two stages in flight */
    return upi_kv_end(c, &f->run, &f->kv);
}

UPIPE_API upipe_status upi_layer_bwd(upipe_ctx *c, upi_pass *f, upipe_view dx)
{
    const upipe_plan *p = f->run.p;
    upipe_saved *save = f->save;
    int i;
    if (save->delta == NULL) UPIPE_TRY(upi_delta_all(c, &f->run, save, f->dout));
    upipe_phase_set(c, UPIPE_BWD_IN);
    UPIPE_TRY(upi_norm_grads_begin(c, &f->run));
    UPIPE_TRY(upi_kv_grad_begin(c, &f->run, &f->dkv));
    UPIPE_TRY(upi_kv_begin(c, &f->run, &f->kv));
    for (i = 0; i < p->stages && !p->overlap; i += p->width) {
        UPIPE_TRY(upi_bwd_load(c, f, i));   /* Q', K', V' again; dO' and delta out of slot i */
        UPIPE_TRY(upi_bwd_attend(c, f, i)); /* dQ', dK', dV' */
        UPIPE_TRY(upi_bwd_store(c, f, i));  /* dQ' into slot i; dK', dV' after their round; dW */
    }
    if (p->overlap) UPIPE_TRY(upi_pipelined(c, f, upi_side_call, f));
    UPIPE_TRY(upi_kv_end(c, &f->run, &f->kv));
    UPIPE_TRY(upipe_free(c, save->delta));
    save->delta = NULL;
    UPIPE_TRY(upipe_free(c, save->lse));
    save->lse = NULL;
    UPIPE_TRY(upi_kv_grad_end(c, &f->run, &f->dkv));
    UPIPE_TRY(upi_norm_grads(c, &f->run));
    UPIPE_TRY(upi_grad_x(c, &f->run, dx, f->dout, &f->dkv));
    return upi_kv_grad_free(c, &f->run, &f->dkv);
}

/* ---- public calls ---- */

UPIPE_API upipe_status upi_layer_begin(upipe_ctx *c, upi_pass *f, const upipe_layer *l, upipe_saved *save,
                                       upipe_view x, upipe_phase phase)
{
    memset(f, 0, sizeof *f);
    upipe_phase_set(c, phase);
    UPIPE_TRY(upi_layer_check_own(c, l, x));
    UPIPE_TRY(upi_layer_agree(c, l, 0, 0));
    f->save = save;
    f->run = upi_run_make(c, l, x);
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_layer_end(upipe_ctx *c, upipe_status s, int64_t mark)
{
    upipe_phase_set(c, UPIPE_PHASE_OTHER);
    return s == UPIPE_OK ? UPIPE_OK : upipe_unwind(c, s, mark);
}

/* upipe_layer_fwd -- attention of x: projections, all-to-alls, attention, stage by stage
 *   save    written: slots full of O, and lse; from the pool, upipe_saved_free frees them
 *   x       [rows][1][D] view of this rank's tokens, the plan's type
 *   bytes   phases FWD_* of upipe_dry_layer; sends upipe_plan_sent(plan, 0), to the ring
 *           upipe_plan_sent_ring(plan, 0)
 *   errors  ARG, UNSUPPORTED, MEMORY, MISMATCH, TIMEOUT, ABORTED; the team is aborted, and the pool as before
 *   paper   section 3.3 and Figure (b)
 */
UPIPE_API upipe_status upipe_layer_fwd(upipe_ctx *c, const upipe_layer *l, upipe_saved *save, upipe_view x)
{
    upi_pass pass;
    upipe_status s;
    int64_t mark;
    memset(save, 0, sizeof *save);
    UPIPE_TRY(upipe_ctx_check(c));
    mark = upipe_mem_mark(c->mem);
    s = upi_layer_begin(c, &pass, l, save, x, UPIPE_FWD_BEFORE);
    if (s == UPIPE_OK) s = upi_layer_fwd(c, &pass);
    if (s != UPIPE_OK) memset(save, 0, sizeof *save);
    return upi_layer_end(c, s, mark);
}

/* upipe_layer_bwd -- gradients of x and of the weights; Q, K, V are recomputed and sent again
 *   dx      [rows][1][D] view, the plan's type, written; its data may be x's: x is read for the last time
 *           before
 *   grads   all but wo and bo: +=
 *   save    consumed: lse and delta are freed, and so is final_out, unless it is dout
 *   dout    slots full of the gradient of O; consumed: they hold dQ afterwards and stay the caller's.
 *           &save->out after upipe_layer_out_bwd
 *   x       the forward's
 *   bytes   phases BWD_* of upipe_dry_layer; sends upipe_plan_sent(plan, 1), to the ring
 *           upipe_plan_sent_ring(plan, 1)
 *   errors  as upipe_layer_fwd; save is then valid for upipe_saved_free alone, and grads hold part of a sum
 *   paper   Appendix A, with the changes that docs/memory.md explains
 */
UPIPE_API upipe_status upipe_layer_bwd(upipe_ctx *c, const upipe_layer *l, upipe_view dx, upipe_grads *grads,
                                       upipe_saved *save, upipe_slots *dout, upipe_view x)
{
    const float *delta = save->delta;
    upi_pass pass;
    upipe_status s;
    int64_t mark;
    UPIPE_TRY(upipe_ctx_check(c));
    mark = upipe_mem_mark(c->mem);
    s = upi_layer_begin(c, &pass, l, save, x, UPIPE_BWD_BEFORE);
    pass.run.grads = grads;
    pass.dout = dout;
    if (s == UPIPE_OK) s = upi_layer_check_rows(c, l->plan, "dx", dx);
    if (s == UPIPE_OK) s = upi_layer_check_bwd(c, l, grads, save, dout);
    if (s == UPIPE_OK) s = upi_layer_bwd(c, &pass, dx);
    if (s != UPIPE_OK && delta == NULL) save->delta = NULL; /* upi_layer_end has freed it */
    return upi_layer_end(c, s, mark);
}

/* upipe_layer_out_fwd -- y = O * Wo^T + bo; sends nothing
 *   y       [rows][1][D] view, the plan's type, written
 *   bytes   one tile in f32 (none for f32 storage) and the scratch of a product
 *   errors  ARG, MEMORY; the team is then aborted
 */
UPIPE_API upipe_status upipe_layer_out_fwd(upipe_ctx *c, const upipe_layer *l, upipe_view y,
                                           const upipe_saved *save)
{
    upi_run run;
    upipe_status s;
    int64_t mark;
    UPIPE_TRY(upipe_ctx_check(c));
    mark = upipe_mem_mark(c->mem);
    run = upi_run_make(c, l, y);
    s = upi_out_check(c, l, y, save);
    if (s == UPIPE_OK) s = upi_out_fwd(c, &run, y, save);
    return s == UPIPE_OK ? UPIPE_OK : upipe_unwind(c, s, mark);
}

/* upipe_layer_out_bwd -- from the gradient of y: dWo, dbo, delta, and the gradient of O in O's place
 *   grads   wo += dy^T * O, bo += sums of dy
 *   save    consumes out: its slots hold the gradient of O afterwards; delta is allocated
 *   dy      [rows][1][D] view, the plan's type; may be freed afterwards
 *   bytes   delta (rows * H * 4), one stage and rank's block of O, and the scratch of a product
 *   errors  ARG, MEMORY; the team is then aborted, and save is valid for upipe_saved_free alone
 */
UPIPE_API upipe_status upipe_layer_out_bwd(upipe_ctx *c, const upipe_layer *l, upipe_grads *grads,
                                           upipe_saved *save, upipe_view dy)
{
    const float *delta = save->delta;
    upi_run run;
    upipe_status s;
    int64_t mark;
    UPIPE_TRY(upipe_ctx_check(c));
    mark = upipe_mem_mark(c->mem);
    run = upi_run_make(c, l, dy);
    run.grads = grads;
    s = upi_out_check(c, l, dy, save);
    if (s == UPIPE_OK && grads->bo != NULL && l->bo == NULL)
        s = upipe_fail(&c->err, UPIPE_ERR_ARG, "a gradient of bo is wanted without it");
    if (s == UPIPE_OK) s = upi_out_bwd(c, &run, save, dy);
    if (s == UPIPE_OK) return UPIPE_OK;
    if (delta == NULL) save->delta = NULL; /* upi_layer_end has freed it */
    return upipe_unwind(c, s, mark);
}

/* upipe_saved_free -- frees what is left of the forward's results
 *   errors  ARG for blocks that a failed transfer has quarantined: upipe_mem_release first
 */
UPIPE_API upipe_status upipe_saved_free(upipe_ctx *c, upipe_saved *save)
{
    UPIPE_TRY(upipe_free(c, save->out.data));
    UPIPE_TRY(upipe_free(c, save->lse));
    UPIPE_TRY(upipe_free(c, save->delta));
    memset(save, 0, sizeof *save);
    return UPIPE_OK;
}

#endif

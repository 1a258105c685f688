/* upipe_layer.h -- the attention block, forward and backward: the paper's stages        layer 7
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
 * stage/types.h describes upipe_layer, upipe_grads and upipe_saved; upipe_stage.h has what the loops below call. A
 * failed call frees what it allocated and aborts the team, so that no rank waits for this one. Where a peer may still
 * read this rank's memory (team->quarantine), the pool is locked instead (upipe_mem_quarantine).
 */
#ifndef UPIPE_LAYER_H
#define UPIPE_LAYER_H

#include "upipe_stage.h"

/* ---- both loops ---- */

UPIPE_API upipe_status upi_layer_fwd(upipe_ctx *c, upipe_pass *f, upipe_saved *save)
{
    const upipe_plan *p = f->plan;
    void *lse;
    int i;
    upipe_phase_set(c, UPIPE_FWD_IN);
    UPIPE_TRY(upipe_slots_alloc(c, p, &save->out, UPIPE_SLOT_EMPTY, "final_out"));
    UPIPE_TRY(upipe_alloc(c, &lse, p->buffers.lse, UPIPE_USE_STAT, "lse"));
    f->lse = save->lse = (float *)lse;
    if (p->overlap) /* the same three calls, with two stages in flight */
        return upi_pipelined(c, f, f->scratch.attn_fwd, upipe_fwd_load, upipe_fwd_attend, upipe_fwd_store);
    for (i = 0; i < p->stages; i += p->width) {
        UPIPE_TRY(upipe_fwd_load(c, f, i));   /* Q', K', V': inp_all_to_all */
        UPIPE_TRY(upipe_fwd_attend(c, f, i)); /* O' */
        UPIPE_TRY(upipe_fwd_store(c, f, i));  /* out_all_to_all, into slot i of final_out */
    }
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_layer_bwd(upipe_ctx *c, upipe_pass *f, upipe_saved *save, upipe_view dx)
{
    const upipe_plan *p = f->plan;
    int i;
    if (save->delta == NULL) UPIPE_TRY(upi_delta_all(c, p, save, f->slots));
    f->lse = save->lse;
    f->delta = save->delta;
    f->o = save->o;
    upipe_phase_set(c, UPIPE_BWD_IN);
    if (f->layer->q_norm_weight != NULL) UPIPE_TRY(upi_norm_grads_begin(c, f));
    if (p->overlap) {
        UPIPE_TRY(
            upi_pipelined(c, f, f->scratch.attn_bwd, upipe_bwd_load, upipe_bwd_attend, upipe_bwd_store));
    } else {
        for (i = 0; i < p->stages; i += p->width) {
            UPIPE_TRY(upipe_bwd_load(c, f, i));   /* Q', K', V' again; dO' and delta out of slot i */
            UPIPE_TRY(upipe_bwd_attend(c, f, i)); /* dQ', dK', dV' */
            UPIPE_TRY(upipe_bwd_store(c, f, i));  /* dQ' into slot i; dK', dV' after their round; dW */
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

UPIPE_API upipe_status upi_layer_begin(upipe_ctx *c, upipe_pass *f, const upipe_layer *l, upipe_saved *save,
                                       upipe_view x, upipe_phase phase)
{
    upipe_phase_set(c, phase);
    if (save == NULL || (phase == UPIPE_BWD_BEFORE && (save->given.plan == 0 || save->lse == NULL)))
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "save is NULL, or not there any more (consumed?)");
    UPIPE_TRY(upi_check_layer(c, l, x));
    UPIPE_TRY(upi_stage_agree(c, l, 0, 0, &save->given));
    upipe_pass_init(c->ops, f, l, &save->out);
    f->fill = upi_project;
    f->x = x;
    return UPIPE_OK;
}

/* upipe_layer_fwd -- attention of x: projections, all-to-alls, attention, stage by stage
 *   save    written: slots full of O, and lse; from the pool, upipe_saved_free frees them
 *   x       [rows][1][D] view of this rank's tokens, the plan's type
 *   bytes   phases FWD_* of upipe_dry_layer; sends upipe_plan_sent(plan, 0), to the ring upipe_plan_sent_ring(plan, &mask, 0)
 *   errors  ARG, UNSUPPORTED, MEMORY, MISMATCH, TIMEOUT, ABORTED; the team is aborted, and the pool as before
 *   paper   section 3.3 and Figure (b)
 */
UPIPE_API upipe_status upipe_layer_fwd(upipe_ctx *c, const upipe_layer *l, upipe_saved *save, upipe_view x)
{
    upipe_pass pass;
    upipe_status s;
    int64_t mark;
    if (save != NULL) memset(save, 0, sizeof *save);
    UPIPE_TRY(upipe_ctx_check(c));
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
 *           to the ring upipe_plan_sent_ring(plan, &mask, 1)
 *   errors  as upipe_layer_fwd; save is then valid for upipe_saved_free alone, and grads hold part of a sum
 *   paper   Appendix A, with the changes that docs/memory.md explains
 */
UPIPE_API upipe_status upipe_layer_bwd(upipe_ctx *c, const upipe_layer *l, upipe_view dx,
                                       const upipe_grads *grads, upipe_saved *save, upipe_slots *dout,
                                       upipe_view x)
{
    const float *delta = save != NULL ? save->delta : NULL;
    upipe_pass pass;
    upipe_status s;
    int64_t mark;
    UPIPE_TRY(upipe_ctx_check(c));
    mark = upipe_mem_mark(c->mem);
    s = upi_layer_begin(c, &pass, l, save, x, UPIPE_BWD_BEFORE);
    pass.slots = dout;
    pass.grad = upi_project_grad;
    pass.grads = grads;
    if (s == UPIPE_OK) s = upi_check_rows(c, l->plan, "dx", dx);
    if (s == UPIPE_OK) s = upi_check_grads(c, l, grads, save, dout);
    if (s == UPIPE_OK) s = upi_layer_bwd(c, &pass, save, dx);
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
    upipe_pass pass;
    upipe_status s;
    int64_t mark;
    UPIPE_TRY(upipe_ctx_check(c));
    mark = upipe_mem_mark(c->mem);
    s = upi_out_begin(c, &pass, l, y, save);
    if (s == UPIPE_OK) s = upi_out_fwd(c, &pass, y, &save->out);
    return s == UPIPE_OK ? UPIPE_OK : upipe_unwind(c, s, mark, NULL);
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
    upipe_pass pass;
    upipe_status s;
    int64_t mark;
    UPIPE_TRY(upipe_ctx_check(c));
    mark = upipe_mem_mark(c->mem);
    s = upi_out_begin(c, &pass, l, dy, save);
    pass.grads = grads;
    if (s == UPIPE_OK) s = upi_check_grads(c, l, grads, NULL, NULL);
    if (s == UPIPE_OK) s = upi_out_bwd(c, &pass, save, dy);
    if (s != UPIPE_OK && save != NULL && delta == NULL) save->delta = NULL; /* upipe_unwind frees it */
    return s == UPIPE_OK ? UPIPE_OK : upipe_unwind(c, s, mark, NULL);
}

#endif

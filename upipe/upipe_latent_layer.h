/* upipe_latent_layer.h -- the attention block of a model whose K and V come from a latent: Q by stages, O in slots
 *
 * What is small at a token is the host's: c and kr of upipe_latent.h, and xq, of which Q is projected (x, or the norm of
 * x Wdq^T). What is large comes by stages: Q, K and V of all heads are never held. Slots hold heads of max(d, v_dim), as Q is
 * received in them, and after a backward all of dQ.
 *
 *     upipe_latent_layer_fwd(&ctx, &layer, &saved, xq, &kv);             saved: final_out, lse
 *     upipe_layer_out_fwd(&ctx, &layer, y, &saved);                      y = O * Wo^T + bo
 *     ...
 *     upipe_layer_out_bwd(&ctx, &layer, &grads, &saved, dy);             O becomes dO, in place
 *     upipe_latent_layer_bwd(&ctx, &layer, dxq, &dkv, &grads, &saved, &saved.out, xq, &kv);
 *     upipe_saved_free(&ctx, &saved);
 *
 * Of upipe_layer are read: plan, id, mask, scale, tile_rows, wo and bo, and
 *
 *     wq     [H * d][Dq] of the plan's type: q_proj, or q_b_proj of published checkpoints
 *     wk     [H * (dn + v_dim)][r]: kv_b_proj, of each head Wuk's rows, then Wuv's
 *     rope   theta or rates, factor, interleaved: of the last dr elements of each head of Q
 */
#ifndef UPIPE_LATENT_LAYER_H
#define UPIPE_LATENT_LAYER_H

#include "upipe_latent.h"

/* A pass: its state, and the latent's. */
typedef struct upi_latent_layer_pass {
    upi_pass pass;
    upi_latent latent;
} upi_latent_layer_pass;

/* upi_pass.fill and .grad */
UPIPE_API upipe_status upi_latent_project(upipe_ctx *c, const upi_pass *f, upi_proj which, int stage,
                                          void *dst)
{
    return which == UPI_PROJ_Q ? upi_project(c, f, which, stage, dst)
                               : upi_latent_fill(c, f, which, stage, dst);
}

UPIPE_API upipe_status upi_latent_project_grad(upipe_ctx *c, const upi_pass *f, upi_proj which,
                                               upi_head_run h, void *g)
{
    return which == UPI_PROJ_Q ? upi_project_grad(c, f, which, h, g) : upi_latent_grad(c, f, which, h, g);
}

/* The engine's store; dK and dV are in the sums after their round, and not needed afterwards. */
UPIPE_API upipe_status upi_latent_bwd_store(upipe_ctx *c, void *pass, int i)
{
    upi_pass *f = (upi_pass *)pass;
    UPIPE_TRY(upi_bwd_store(c, f, i));
    return upi_kv_grad_free(c, f);
}

/* Checks of this rank's arguments; nothing is sent. */
UPIPE_API upipe_status upi_latent_check_layer(upipe_ctx *c, const upipe_layer *l, upipe_view xq, int32_t dr)
{
    const int rotates = l->rope_theta != 0 || l->rope_rates != NULL;
    upipe_rope rope;
    int64_t all;
    UPIPE_TRY(upi_check_rows(c, l->plan, "xq", xq, xq.d < 1 ? 1 : xq.d));
    if (xq.data == NULL && xq.n > 0) return upipe_fail(&c->err, UPIPE_ERR_ARG, "xq is NULL");
    if (!upipe_mul(&all, xq.n, xq.d) || !upipe_mul(&all, all, 4))
        return upipe_fail(&c->err, UPIPE_ERR_OVERFLOW, "xq is [%lld][1][%d]", (long long)xq.n, xq.d);
    if (l->wq == NULL) return upipe_fail(&c->err, UPIPE_ERR_ARG, "wq is NULL");
    if (l->wv != NULL || l->bq != NULL || l->bk != NULL || l->bv != NULL || l->q_norm_weight != NULL ||
        l->k_norm_weight != NULL || l->norm_eps != 0 || l->wg != NULL)
        return upipe_fail(&c->err, UPIPE_ERR_UNSUPPORTED,
                          "wv, wg, bq, bk, bv or norms of heads in a layer whose K and V come from a latent");
    if (l->rope_dims != 0 || (!rotates && (l->rope_interleaved || l->rope_factor != 0)))
        return upipe_fail(&c->err, UPIPE_ERR_ARG,
                          "rope_dims is not read, as kr says it; or rope_interleaved or rope_factor without "
                          "rope_theta or rope_rates");
    if (!(l->rope_theta >= 0) || !__builtin_isfinite(l->rope_theta) || l->tile_rows < 0)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "rope theta %g, tile rows %lld", l->rope_theta,
                          (long long)l->tile_rows);
    if (!rotates) return UPIPE_OK;
    memset(&rope, 0, sizeof rope);
    rope.x = upipe_view_packed(xq.data, l->plan->desc.dtype, 0, 1, dr);
    rope.theta = l->rope_theta;
    rope.rates = l->rope_rates;
    rope.factor = l->rope_factor;
    return upi_check_rope(c, &rope);
}

UPIPE_API upipe_status upi_latent_layer_open(upipe_ctx *c, upi_latent_layer_pass *f, const upipe_layer *l,
                                             upipe_saved *save, upipe_slots *slots, upipe_view xq,
                                             const upipe_latent_kv *kv)
{
    if (kv == NULL) return upipe_fail(&c->err, UPIPE_ERR_ARG, "the latent is NULL");
    UPIPE_TRY(upi_check_stages(c, l));
    UPIPE_TRY(upi_latent_begin(c, &f->latent, l->plan, "wk", l->wk, kv));
    UPIPE_TRY(upi_latent_check_layer(c, l, xq, f->latent.dr));
    UPIPE_TRY(upi_latent_agree(c, &f->pass, &f->latent, l, xq.d, slots, &save->given));
    f->pass.rope_from = f->latent.dn;
    f->pass.fill = upi_latent_project;
    f->pass.x = xq;
    f->pass.w[UPI_PROJ_K] = f->pass.w[UPI_PROJ_V] = NULL;
    return UPIPE_OK;
}

/* upipe_latent_layer_fwd -- attention of Q = xq * Wq^T over K and V of the latent, stage by stage
 *   save    written: slots full of O, and lse; from the pool, upipe_saved_free frees them
 *   xq      [rows][1][Dq] view of this rank's tokens, the plan's type
 *   kv      form, c and kr
 *   bytes   sends upipe_latent_sent(plan, kv, 0), to the ring upipe_ring_sent(plan, &mask, 0)
 *   errors  as upipe_layer_fwd; UNSUPPORTED for a gathered latent in a ring
 */
UPIPE_API upipe_status upipe_latent_layer_fwd(upipe_ctx *c, const upipe_layer *l, upipe_saved *save,
                                              upipe_view xq, const upipe_latent_kv *kv)
{
    upi_latent_layer_pass f;
    upipe_status s = UPIPE_OK;
    int64_t mark;
    memset(&f, 0, sizeof f);
    if (save != NULL) memset(save, 0, sizeof *save);
    UPIPE_TRY(upi_ctx_check(c));
    mark = upipe_mem_mark(c->mem);
    upi_phase_set(c, UPIPE_FWD_BEFORE);
    if (save == NULL) s = upipe_fail(&c->err, UPIPE_ERR_ARG, "save is NULL");
    if (s == UPIPE_OK) s = upi_latent_layer_open(c, &f, l, save, &save->out, xq, kv);
    if (s == UPIPE_OK) s = upi_latent_load(c, &f.pass, &f.latent, UPIPE_FWD_IN);
    if (s == UPIPE_OK) s = upi_layer_fwd(c, &f.pass, save);
    if (s == UPIPE_OK) s = upi_latent_release(c, &f.pass, &f.latent);
    if (s != UPIPE_OK && save != NULL) memset(save, 0, sizeof *save);
    return upi_pass_end(c, s, mark);
}

/* upipe_latent_layer_bwd -- gradients of xq, of the latent and of the weights; Q, K' and V' come again
 *   dxq     [rows][1][Dq] view, the plan's type, written; its data may be xq's, which is read for the last time before
 *   dkv     the latent's gradients, =; data NULL: not wanted
 *   grads   wq, wk (of kv_b_proj) and sinks: +=
 *   save    consumed: lse, delta and o are freed, and so is final_out, unless it is dout
 *   dout    slots full of the gradient of O; they hold dQ afterwards and stay the caller's. &save->out after out_bwd
 *   bytes   sends upipe_latent_sent(plan, kv, 1), or (.., 2) with upipe_ops.attn_reads_o, to the ring
 *           upipe_ring_sent(plan, &mask, 1)
 *   errors  as upipe_layer_bwd
 */
UPIPE_API upipe_status upipe_latent_layer_bwd(upipe_ctx *c, const upipe_layer *l, upipe_view dxq,
                                              const upipe_latent_kv *dkv, const upipe_grads *grads,
                                              upipe_saved *save, upipe_slots *dout, upipe_view xq,
                                              const upipe_latent_kv *kv)
{
    const float *delta = save != NULL ? save->delta : NULL;
    upi_latent_layer_pass f;
    upipe_status s = UPIPE_OK;
    int64_t mark;
    memset(&f, 0, sizeof f);
    UPIPE_TRY(upi_ctx_check(c));
    mark = upipe_mem_mark(c->mem);
    upi_phase_set(c, UPIPE_BWD_BEFORE);
    if (save == NULL || save->given.plan == 0 || save->lse == NULL)
        s = upipe_fail(&c->err, UPIPE_ERR_ARG, "save is NULL, or not there any more (consumed?)");
    if (s == UPIPE_OK) s = upi_latent_layer_open(c, &f, l, save, dout, xq, kv);
    if (s == UPIPE_OK) s = upi_check_rows(c, l->plan, "dxq", dxq, xq.d);
    if (s == UPIPE_OK) s = upi_check_grads(c, l, grads, save, dout);
    if (s == UPIPE_OK && grads->wv != NULL)
        s = upipe_fail(&c->err, UPIPE_ERR_ARG, "a gradient of wv is wanted without it");
    if (s == UPIPE_OK) s = upi_latent_begin_bwd(c, &f.latent, l->plan, dkv, grads->wk);
    f.pass.grad = upi_latent_project_grad;
    f.pass.grads = grads;
    if (s == UPIPE_OK && delta == NULL)
        s = upi_delta_all(c, l->plan, save, dout); /* O goes before the latents come */
    if (s == UPIPE_OK) s = upi_latent_load_bwd(c, &f.pass, &f.latent);
    if (s == UPIPE_OK) s = upi_layer_bwd(c, &f.pass, save, dxq, upi_latent_bwd_store);
    if (s == UPIPE_OK) s = upi_latent_release(c, &f.pass, &f.latent);
    if (s != UPIPE_OK && save != NULL && delta == NULL) save->delta = NULL; /* upi_pass_end frees it */
    return upi_pass_end(c, s, mark);
}

#endif

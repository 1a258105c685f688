/* upipe_latent.h -- context-parallel attention whose K and V come from a latent (MLA: DeepSeek-V3, Kimi K2, MiniCPM3)
 *
 * A token has a latent c of r numbers and a rotated key kr of dr numbers, which all heads share. K and V of head h are
 * expanded from them: K_h = [c Wuk_h^T, kr], V_h = c Wuv_h^T. The door is upipe_qkv.h's with c and kr in place of K and V:
 *
 *     upipe_latent a = {&plan, id, mask, 0, wkv, q, o, {UPIPE_LATENT_AUTO, c, kr}};
 *     upipe_latent_grads g = {dout, dq, {UPIPE_LATENT_AUTO, dc, dkr}, dwkv, NULL};
 *     upipe_latent_fwd(&ctx, &a, &saved);                  o; saved: lse
 *     ...
 *     upipe_latent_bwd(&ctx, &a, &g, &saved);              dq, dc, dkr, dwkv; lse is freed
 *
 * K' and V' of a stage's heads reach the rank that attends with them in one of two forms, of the same numbers:
 *
 *     HEADS      every rank expands all heads of its tokens, and the stage's all-to-all sends them, as K and V of any
 *                attention: H (d + v_dim) / C numbers a token and peer
 *     GATHERED   c and kr of all tokens come to all ranks once a pass, r + dr numbers a token and peer. A stage's heads are
 *                expanded by their rank, for all tokens, where they are read. What was gathered is held through the pass
 *
 * Either way each token and head is expanded once. In the backward K' and V' come again, in the same form; dK' and dV' go to
 * their tokens by the stage's all-to-all, in both. There they become gradients of c and kr, head by head in natural order, in
 * f32: with the built-in CPU table their bits depend neither on the form nor on chunk and ranks of the team.
 */
#ifndef UPIPE_LATENT_H
#define UPIPE_LATENT_H

#include "upipe_qkv.h"

/* AUTO: GATHERED where it sends at most half the bytes of HEADS for K and V, otherwise HEADS (upipe_latent_gathers) */
typedef enum upipe_latent_form {
    UPIPE_LATENT_AUTO,
    UPIPE_LATENT_HEADS,
    UPIPE_LATENT_GATHERED
} upipe_latent_form;

/* upipe_latent_kv -- what K and V are expanded from
 *   form     how K' and V' come; all ranks have the same. In a ring heads are sent
 *   c        [rows][1][r]: after its norm
 *   kr       [rows][1][dr]: rotated; dr < head_dim
 * Views have any strides, and any type that the compute table casts. What is sent is in the plan's type. Of gradients form
 * is not read, and data NULL is not wanted; dc may be c, and dkr kr.
 */
typedef struct upipe_latent_kv {
    upipe_latent_form form;
    upipe_view c, kr;
} upipe_latent_kv;

/* upipe_latent_gathers -- whether K' and V' are expanded from a gathered latent, by the form and, with AUTO, the plan */
UPIPE_API int upipe_latent_gathers(const upipe_plan *p, const upipe_latent_kv *kv)
{
    const upipe_plan_desc *d = &p->desc;
    const int64_t latent = d->ranks * ((int64_t)kv->c.d + kv->kr.d),
                  heads = (int64_t)d->heads * ((int64_t)d->head_dim + d->v_dim);
    if (kv->form != UPIPE_LATENT_AUTO) return kv->form == UPIPE_LATENT_GATHERED;
    return d->ring == 1 && d->ranks > 1 && 2 * latent <= heads;
}

/* upipe_latent_sent -- bytes that this rank sends to its team in a call; backward as in upipe_plan_sent */
UPIPE_API int64_t upipe_latent_sent(const upipe_plan *p, const upipe_latent_kv *kv, int backward)
{
    const int64_t e = (int64_t)upipe_dtype_bytes(p->desc.dtype);
    int64_t sum = upipe_plan_sent(p, backward);
    int i;
    if (!upipe_latent_gathers(p, kv)) return sum;
    for (i = 0; i < p->stages; ++i)
        sum -= upi_plan_sent_heads(p, UPIPE_A2A_KV, i, 0, ((int64_t)p->desc.head_dim + p->desc.v_dim) * e);
    return sum + (p->desc.ranks - 1) * p->rows * ((int64_t)kv->c.d + kv->kr.d) * e;
}

#include "latent/expand.h"

/* upipe_latent -- one call
 *   plan     from upipe_plan_init: kv_heads = heads, head_dim d = dn + dr, v_dim
 *   id       0, or the layer's number: a backward with another one is refused
 *   mask     as in upipe_layer
 *   scale    of the scores; 0 = 1/sqrt(d)
 *   wkv      [H][dn + v_dim][r] of the plan's type: of each head Wuk's rows, then Wuv's, as kv_b_proj of published
 *            checkpoints
 *   q        [rows][H][d]: a head's last dr elements are rotated; read
 *   o        [rows][H][v_dim]: written by the forward, read by the backward
 */
typedef struct upipe_latent {
    const upipe_plan *plan;
    int64_t id;
    upipe_mask mask;
    float scale;
    const void *wkv;
    upipe_view q, o;
    upipe_latent_kv kv;
} upipe_latent;

/* upipe_latent_grads -- of the backward; views of any strides and type
 *   dout     [rows][H][v_dim]: the gradient of o, read
 *   dq dkv   shapes of q, c, kr, written (=); dq may be q itself. data NULL: not wanted
 *   dwkv     f32, shape of wkv, += over this rank's tokens: sum it over the team. NULL: not wanted
 *   dsinks   f32 [H], +=, over this rank's heads. NULL: not wanted
 */
typedef struct upipe_latent_grads {
    upipe_view dout, dq;
    upipe_latent_kv dkv;
    float *dwkv, *dsinks;
} upipe_latent_grads;

/* The door's own part of a pass: Q, O and their gradients go as upipe_qkv.h's. */
typedef struct upi_latent_pass {
    upi_qkv_pass qkv;
    upipe_qkv call;
    upi_latent latent;
} upi_latent_pass;

/* upi_pass.fill and .grad */
UPIPE_API upipe_status upi_latent_pack(upipe_ctx *c, const upi_pass *f, upi_proj which, int stage, void *dst)
{
    return which == UPI_PROJ_Q ? upi_pack(c, f, which, stage, dst) : upi_latent_fill(c, f, which, stage, dst);
}

UPIPE_API upipe_status upi_latent_unpack(upipe_ctx *c, const upi_pass *f, upi_proj which, upi_head_run h,
                                         void *g)
{
    return which == UPI_PROJ_Q ? upi_unpack_grad(c, f, which, h, g) : upi_latent_grad(c, f, which, h, g);
}

/* Checks of this rank's arguments, and agreement of all ranks.
 *   g   NULL: of a forward */
UPIPE_API upipe_status upi_latent_open(upipe_ctx *c, upi_latent_pass *f, const upipe_latent *a,
                                       const upipe_latent_grads *g, upipe_given *given)
{
    upi_qkv_pass *q = &f->qkv;
    const upipe_plan_desc *d;
    if (a == NULL) return upipe_fail(&c->err, UPIPE_ERR_ARG, "the host's tensors are NULL");
    f->call.plan = q->layer.plan = a->plan;
    f->call.o = a->o;
    q->a = &f->call;
    q->layer.id = a->id;
    q->layer.mask = a->mask;
    q->layer.scale = a->scale;
    q->layer.wk = a->wkv; /* compared with the forward's */
    q->heads[UPI_PROJ_Q] = a->q;
    UPIPE_TRY(upi_check_stages(c, &q->layer));
    d = &a->plan->desc;
    UPIPE_TRY(upi_latent_begin(c, &f->latent, a->plan, "wkv", a->wkv, &a->kv));
    UPIPE_TRY(upi_qkv_check(c, a->plan, "q", a->q, d->heads, d->head_dim));
    UPIPE_TRY(upi_qkv_check(c, a->plan, "o", a->o, d->heads, d->v_dim));
    if (g != NULL) {
        q->dheads[UPI_PROJ_Q] = g->dq;
        q->dout = g->dout;
        q->grads.sinks = g->dsinks;
        if (g->dq.data != NULL) UPIPE_TRY(upi_qkv_check(c, a->plan, "dq", g->dq, d->heads, d->head_dim));
        UPIPE_TRY(upi_qkv_check(c, a->plan, "dout", g->dout, d->heads, d->v_dim));
        UPIPE_TRY(upi_latent_begin_bwd(c, &f->latent, a->plan, &g->dkv, g->dwkv));
        UPIPE_TRY(upi_check_grads(c, &q->layer, &q->grads, NULL, NULL));
    }
    UPIPE_TRY(upi_latent_agree(c, &q->pass, &f->latent, &q->layer, 0, &q->slots, given));
    q->pass.fill = upi_latent_pack;
    q->pass.grad = upi_latent_unpack;
    q->pass.heads = q->heads;
    q->pass.dheads = q->dheads;
    q->pass.grads = &q->grads;
    q->pass.out = a->o;
    return UPIPE_OK;
}

/* ---- public calls ---- */

/* upipe_latent_fwd -- o = attention of q over the K and V of c and kr, of the whole sequence
 *   save    written: lse alone, in the pool; upipe_saved_free or the backward frees it
 *   bytes   phases FWD_* of upipe_dry_latent; sends upipe_latent_sent(plan, &kv, 0), to the ring
 *           upipe_ring_sent(plan, &mask, 0)
 *   errors  as upipe_qkv_fwd; OVERFLOW for sizes beyond 63 bits; UNSUPPORTED for a gathered latent in a ring
 */
UPIPE_API upipe_status upipe_latent_fwd(upipe_ctx *c, const upipe_latent *a, upipe_saved *save)
{
    upi_latent_pass f;
    upipe_status s = UPIPE_OK;
    int64_t mark;
    memset(&f, 0, sizeof f);
    if (save != NULL) memset(save, 0, sizeof *save);
    UPIPE_TRY(upi_ctx_check(c));
    mark = upipe_mem_mark(c->mem);
    upi_phase_set(c, UPIPE_FWD_BEFORE);
    if (save == NULL) s = upipe_fail(&c->err, UPIPE_ERR_ARG, "save is NULL");
    if (s == UPIPE_OK) s = upi_latent_open(c, &f, a, NULL, &save->given);
    if (s == UPIPE_OK) s = upi_latent_load(c, &f.qkv.pass, &f.latent, UPIPE_FWD_IN);
    if (s == UPIPE_OK) s = upi_qkv_fwd(c, &f.qkv, save);
    if (s == UPIPE_OK) s = upi_latent_release(c, &f.qkv.pass, &f.latent);
    if (s != UPIPE_OK && save != NULL) memset(save, 0, sizeof *save);
    return upi_pass_end(c, s, mark);
}

/* upipe_latent_bwd -- the gradients of q, c, kr and wkv; K' and V' come again
 *   a       the forward's, o included; its tensors may lie elsewhere
 *   save    consumed
 *   bytes   phases BWD_* of upipe_dry_latent; sends upipe_latent_sent(plan, &kv, 1), or (.., 2) with
 *           upipe_ops.attn_reads_o, to the ring upipe_ring_sent(plan, &mask, 1)
 *   errors  as upipe_latent_fwd; save is then valid for upipe_saved_free alone, and gradients hold parts
 */
UPIPE_API upipe_status upipe_latent_bwd(upipe_ctx *c, const upipe_latent *a, const upipe_latent_grads *g,
                                        upipe_saved *save)
{
    upi_latent_pass f;
    upipe_status s = UPIPE_OK;
    int64_t mark;
    memset(&f, 0, sizeof f);
    UPIPE_TRY(upi_ctx_check(c));
    mark = upipe_mem_mark(c->mem);
    upi_phase_set(c, UPIPE_BWD_BEFORE);
    if (save == NULL || save->given.plan == 0 || save->lse == NULL || save->out.data != NULL)
        s = upipe_fail(&c->err, UPIPE_ERR_ARG, "save is not upipe_latent_fwd's (consumed before?)");
    if (s == UPIPE_OK && g == NULL) s = upipe_fail(&c->err, UPIPE_ERR_ARG, "grads is NULL");
    if (s == UPIPE_OK) s = upi_latent_open(c, &f, a, g, &save->given);
    if (s == UPIPE_OK) f.qkv.pass.lse = save->lse;
    if (s == UPIPE_OK) s = upi_latent_load_bwd(c, &f.qkv.pass, &f.latent);
    if (s == UPIPE_OK) s = upi_qkv_bwd(c, &f.qkv);
    if (s == UPIPE_OK) s = upi_latent_release(c, &f.qkv.pass, &f.latent);
    if (s == UPIPE_OK) s = upipe_free(c, save->lse);
    if (s == UPIPE_OK) memset(save, 0, sizeof *save);
    return upi_pass_end(c, s, mark);
}

#endif

/* upipe_qkv.h -- context-parallel attention of Q, K and V that the host has made        layer 7
 *
 * For a trainer with projections of its own: Megatron, PyTorch, a fused product with biases. Each stage's heads
 * are packed into the send layout as they leave, and its results are unpacked into the host's tensors as they
 * arrive. So one stage has buffers, whatever the method, and no stage has a slot of its own.
 *
 *     upipe_qkv a = {&plan, id, mask, 0, q, k, v, o};      views of [rows][heads][dim], any strides
 *     upipe_qkv_grads g = {dout, dq, dk, dv, NULL};
 *     upipe_qkv_fwd(&ctx, &a, &saved);                     o; saved: lse
 *     ...
 *     upipe_qkv_bwd(&ctx, &a, &g, &saved);                 dq, dk, dv; lse is freed
 *
 * Row r is token r % T of this rank's part of sequence r / T, in the positions of upipe_plan.shard. Rotary
 * embeddings are the host's business. The views of a fused product have constructors, in qkv/types.h:
 *
 *     upipe_qkv call = {&plan, id, mask};
 *     a = upipe_qkv_fused(&call, qkv, o, UPIPE_F32);       [B][T][H + 2 Hkv][d], and so [B][T][3][H][d]
 *     a = upipe_qkv_sbh3d(&call, qkv, o, UPIPE_F32, B, b); [T][B][H][3][d]: sequence b
 *     g = upipe_qkv_grads_of(&d);                          d: the same constructor, over dqkv and dout
 *
 * upipe_qkv and upipe_qkv_grads are described there too. The stages are those of upipe_stage.h: load, attend,
 * store. Both loops are below.
 */
#ifndef UPIPE_QKV_H
#define UPIPE_QKV_H

#include "qkv/pass.h"

/* ---- both loops ---- */

/* Slots of the stages in flight: those that attend together, or two in a pipeline. */
UPIPE_API upipe_status upi_qkv_slots(upipe_ctx *c, const upipe_plan *p, upipe_slots *slots)
{
    const int buffers = p->overlap ? 2 : p->width;
    void *data;
    UPIPE_TRY(upipe_alloc(c, &data, p->buffers.slot * (size_t)buffers, UPIPE_USE_OUT, "slots"));
    upipe_slots_init(slots, data, p->buffers.slot, p->stages, UPIPE_SLOT_EMPTY);
    slots->buffers = buffers;
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_qkv_fwd(upipe_ctx *c, upi_qkv_pass *f, upipe_saved *save)
{
    const upipe_plan *p = f->a->plan;
    void *lse;
    int i;
    upipe_phase_set(c, UPIPE_FWD_IN);
    UPIPE_TRY(upipe_alloc(c, &lse, p->buffers.lse, UPIPE_USE_STAT, "lse"));
    f->pass.lse = save->lse = (float *)lse;
    UPIPE_TRY(upi_qkv_slots(c, p, &f->slots));
    if (p->overlap) {
        UPIPE_TRY(upi_pipelined(c, &f->pass, f->pass.scratch.attn_fwd, upipe_fwd_load, upipe_fwd_attend,
                                upi_qkv_fwd_store));
    } else {
        for (i = 0; i < p->stages; i += p->width) {
            UPIPE_TRY(upipe_fwd_load(c, f, i));    /* Q', K', V': packed, inp_all_to_all */
            UPIPE_TRY(upipe_fwd_attend(c, f, i));  /* O' */
            UPIPE_TRY(upi_qkv_fwd_store(c, f, i)); /* out_all_to_all, unpacked into o */
        }
    }
    return upipe_free(c, f->slots.data);
}

UPIPE_API upipe_status upi_qkv_bwd(upipe_ctx *c, upi_qkv_pass *f)
{
    const upipe_plan *p = f->a->plan;
    void *delta;
    int i;
    upipe_phase_set(c, UPIPE_BWD_IN);
    UPIPE_TRY(upipe_alloc(c, &delta, p->buffers.delta, UPIPE_USE_STAT, "delta"));
    f->pass.delta = (float *)delta;
    UPIPE_TRY(upi_qkv_slots(c, p, &f->slots));
    if (p->overlap) {
        UPIPE_TRY(upi_pipelined(c, &f->pass, f->pass.scratch.attn_bwd, upi_qkv_bwd_load, upipe_bwd_attend,
                                upi_qkv_bwd_store));
    } else {
        for (i = 0; i < p->stages; i += p->width) {
            UPIPE_TRY(upi_qkv_bwd_load(c, f, i));  /* dO packed, delta; Q', K', V' again */
            UPIPE_TRY(upipe_bwd_attend(c, f, i));  /* dQ', dK', dV' */
            UPIPE_TRY(upi_qkv_bwd_store(c, f, i)); /* unpacked into dq, and after a round into dk and dv */
        }
    }
    UPIPE_TRY(upipe_free(c, f->slots.data));
    UPIPE_TRY(upipe_free(c, delta));
    if (p->kv_grads_accumulate) UPIPE_TRY(upi_kv_grad_end(c, &f->pass));
    return upi_kv_grad_free(c, &f->pass);
}

/* ---- public calls ---- */

/* upipe_qkv_fwd -- o = attention of q, k and v over the whole sequence
 *   save    written: lse alone, in the pool; upipe_saved_free or the backward frees it
 *   bytes   phases FWD_* of upipe_dry_qkv; sends upipe_plan_sent(plan, 0), to the ring
 *           upipe_plan_sent_ring(plan, &mask, 0)
 *   errors  ARG, UNSUPPORTED, MEMORY, MISMATCH, TIMEOUT, ABORTED; the team is aborted, and the pool as before
 *   paper   section 3.3 and Figure (b)
 */
UPIPE_API upipe_status upipe_qkv_fwd(upipe_ctx *c, const upipe_qkv *a, upipe_saved *save)
{
    upi_qkv_pass f;
    upipe_status s;
    int64_t mark;
    if (save != NULL) memset(save, 0, sizeof *save);
    UPIPE_TRY(upipe_ctx_check(c));
    mark = upipe_mem_mark(c->mem);
    s = upi_qkv_begin(c, &f, a, UPIPE_FWD_BEFORE);
    if (s == UPIPE_OK && save == NULL) s = upipe_fail(&c->err, UPIPE_ERR_ARG, "save is NULL");
    if (s == UPIPE_OK) s = upi_qkv_agree(c, &f, &save->given);
    if (s == UPIPE_OK) s = upi_qkv_fwd(c, &f, save);
    if (s != UPIPE_OK && save != NULL) memset(save, 0, sizeof *save);
    return upi_pass_end(c, s, mark);
}

/* upipe_qkv_eval -- upipe_qkv_fwd without a backward: nothing is left in the pool
 *   bytes, errors  as upipe_qkv_fwd
 */
UPIPE_API upipe_status upipe_qkv_eval(upipe_ctx *c, const upipe_qkv *a)
{
    upipe_saved save;
    UPIPE_TRY(upipe_qkv_fwd(c, a, &save));
    return upipe_saved_free(c, &save);
}

/* upipe_qkv_bwd -- the gradients of q, k and v; these are sent again
 *   a       the forward's, o included; its tensors may lie elsewhere
 *   save    consumed
 *   bytes   phases BWD_* of upipe_dry_qkv; sends upipe_plan_sent(plan, 1), or (plan, 2) with upipe_ops.attn_reads_o,
 *           to the ring upipe_plan_sent_ring(plan, &mask, 1)
 *   errors  as upipe_qkv_fwd; save is then valid for upipe_saved_free alone, and dq, dk, dv hold parts
 *   paper   Appendix A
 */
UPIPE_API upipe_status upipe_qkv_bwd(upipe_ctx *c, const upipe_qkv *a, const upipe_qkv_grads *g,
                                     upipe_saved *save)
{
    upi_qkv_pass f;
    upipe_status s;
    int64_t mark;
    UPIPE_TRY(upipe_ctx_check(c));
    mark = upipe_mem_mark(c->mem);
    s = upi_qkv_begin(c, &f, a, UPIPE_BWD_BEFORE);
    if (s == UPIPE_OK &&
        (save == NULL || save->given.plan == 0 || save->lse == NULL || save->out.data != NULL))
        s = upipe_fail(&c->err, UPIPE_ERR_ARG, "save is not upipe_qkv_fwd's (consumed before?)");
    if (s == UPIPE_OK) s = upi_qkv_begin_bwd(c, &f, g);
    if (s == UPIPE_OK) s = upi_qkv_agree(c, &f, &save->given);
    f.pass.grad = upi_unpack_grad;
    f.pass.dheads = f.dheads;
    f.pass.grads = &f.grads;
    f.pass.lse = save != NULL ? save->lse : NULL;
    if (s == UPIPE_OK) s = upi_qkv_bwd(c, &f);
    if (s == UPIPE_OK) s = upipe_free(c, save->lse);
    if (s == UPIPE_OK) memset(save, 0, sizeof *save);
    return upi_pass_end(c, s, mark);
}

#endif

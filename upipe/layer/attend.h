/* attend.h -- the attention of a stage, or of several that share a pass round the ring
 *                                                                                 part of upipe_layer.h
 */
#ifndef UPIPE_LAYER_H
#include "../upipe_layer.h"
#elif !defined(UPIPE_LAYER_ATTEND_H)
#define UPIPE_LAYER_ATTEND_H

#include "kv_grad.h"

/* Where attention writes its results: with a ring, f32 sums that several calls add to; otherwise the send
 * buffer, where dQ' may be in f32 too (upi_scratch).
 *   bytes   of a sum; 0: sums[t] = send
 */
UPIPE_API upipe_status upi_sums_alloc(upipe_ctx *c, const upi_run *r, void **sums, size_t bytes, void *send,
                                      const char *tag)
{
    int t;
    for (t = 0; t < r->p->width; ++t) {
        sums[t] = send;
        if (bytes > 0) UPIPE_TRY(upipe_alloc(c, &sums[t], bytes, tag));
    }
    return UPIPE_OK;
}

/* Sends the results of the stages i .. i + width - 1 through out_all_to_all into their slots, where Q' is not
 * needed any more; f32 sums are cast into `send` first. Frees sums and send.
 *   parts   each one's q is in its slot
 */
UPIPE_API upipe_status upi_sums_store(upipe_ctx *c, const upi_run *r, upipe_slots *slots,
                                      const upipe_ring_part *parts, void *send, void **sums, int i, int dim)
{
    const upipe_plan *p = r->p;
    const int64_t rows = p->seq * p->desc.batch;
    int t;
    for (t = 0; t < p->width; ++t) {
        const int32_t width = upipe_plan_q(p, i + t, c->team->rank).count * dim;
        if (sums[t] != send && width > 0)
            UPIPE_TRY(c->ops->cast(c, upipe_view_packed(send, p->desc.dtype, rows, 1, width),
                                   upipe_view_packed(sums[t], UPIPE_F32, rows, 1, width)));
        UPIPE_TRY(upipe_a2a_to_tokens(c, (void *)(uintptr_t)parts[t].q, send, p, i + t, UPIPE_A2A_Q,
                                      (size_t)dim * upipe_dtype_bytes(p->desc.dtype)));
        UPIPE_TRY(upipe_slot_fill(slots, i + t, &c->err));
    }
    for (t = 0; t < p->width && sums[t] != send; ++t) UPIPE_TRY(upipe_free(c, sums[t]));
    return upipe_free(c, send);
}

/* The query heads of the stages i .. i + width - 1 on this rank.
 *   parts   q and o, or q, dout, delta and dq, are set
 *   dkv     backward; NULL in the forward
 */
UPIPE_API upipe_status upi_attend(upipe_ctx *c, const upi_run *r, const upipe_saved *save,
                                  upipe_ring_part *parts, int i, const upi_kv_pair *kv,
                                  const upi_kv_pair *dkv, float *dsinks)
{
    const upipe_plan *p = r->p;
    const int rank = c->team->rank;
    const size_t bytes = dkv != NULL ? r->scratch.attn_bwd : r->scratch.attn_fwd;
    void *work = r->attn_work;
    upipe_ring_call call;
    int t;
    memset(&call, 0, sizeof call);
    for (t = 0; t < p->width; ++t) {
        upipe_span mine = upipe_plan_q(p, i + t, rank);
        parts[t].heads = mine.count;
        parts[t].first = mine.first;
        parts[t].lse = save->lse + upipe_plan_before(p, i + t, rank) * p->seq * p->desc.batch;
    }
    if (r->attn_work == NULL) UPIPE_TRY(upipe_alloc(c, &work, bytes, "attn_work"));
    call.plan = p;
    call.mask = r->l->mask;
    call.scale = r->l->scale;
    call.work = work;
    call.work_bytes = bytes;
    call.dsinks = dsinks;
    call.parts = parts;
    call.count = p->width;
    call.kv_heads = upipe_plan_kv(p, i, rank).count;
    call.k = kv->k;
    call.v = kv->v;
    call.sums = p->desc.ring > 1 || (dkv != NULL && r->scratch.dq_sum > 0) ? UPIPE_F32 : p->desc.dtype;
    if (dkv != NULL) {
        call.dk = (float *)dkv->k;
        call.dv = (float *)dkv->v;
    }
    UPIPE_TRY(dkv != NULL ? upipe_ring_bwd(c, &call) : upipe_ring_fwd(c, &call));
    return r->attn_work == NULL ? upipe_free(c, work) : UPIPE_OK;
}

#endif

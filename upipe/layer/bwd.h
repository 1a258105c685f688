/* bwd.h -- load, attend, store of a backward stage; Q, K, V are recomputed and sent again
 *                                                                                 part of upipe_layer.h
 */
#ifndef UPIPE_LAYER_H
#include "../upipe_layer.h"
#elif !defined(UPIPE_LAYER_BWD_H)
#define UPIPE_LAYER_BWD_H

#include "fwd.h"

/* Loads Q', K', V' again, dO' and delta; dK' and dV', which are zero in a new round. dO leaves its slot first:
 * Q' is received into it, as in the forward. */
UPIPE_API upipe_status upi_bwd_load(upipe_ctx *c, upi_pass *f, int i)
{
    const upi_run *r = &f->run;
    const upipe_plan *p = r->p;
    const upipe_buffers *b = &r->buffers;
    upi_stage *st = upi_stage_at(f, i);
    void *slot;
    int t;
    upipe_phase_set(c, UPIPE_BWD_IN);
    UPIPE_TRY(upi_kv_grad_load(c, r, &f->dkv, i, &st->dkv));
    UPIPE_TRY(upi_kv_load(c, r, &f->kv, i, &st->kv));
    UPIPE_TRY(upipe_alloc(c, &st->send, upipe_max_bytes(b->send, r->scratch.dq_sum), "q_send"));
    for (t = 0; t < p->width; ++t) {
        const float *from = f->save->delta + upipe_plan_before(p, i + t, -1) * p->rows;
        void *dout;
        float *delta;
        UPIPE_TRY(upi_project(c, r, UPI_PROJ_Q, i + t, st->send));
        upipe_phase_set(c, UPIPE_BWD_OUT);
        if (t == 0) {
            UPIPE_TRY(upipe_alloc(c, &st->dout, b->o * (size_t)p->width, "dout_heads"));
            UPIPE_TRY(upipe_alloc(c, &st->delta, b->stat * (size_t)p->width, "delta_heads"));
        }
        st->parts[t].dout = dout = upipe_offset(st->dout, (size_t)t * b->o);
        st->parts[t].delta = delta = (float *)upipe_offset(st->delta, (size_t)t * b->stat);
        UPIPE_TRY(upipe_slot_drain(f->dout, i + t, &slot, &c->err));
        UPIPE_TRY(upipe_a2a_to_heads(c, dout, slot, p, i + t, UPIPE_A2A_Q, r->each[UPI_PROJ_V]));
        UPIPE_TRY(upipe_a2a_to_heads(c, delta, from, p, i + t, UPIPE_A2A_Q, 4));
        upipe_phase_set(c, UPIPE_BWD_IN);
        UPIPE_TRY(upipe_slot_lend(f->dout, i + t, &slot, &c->err));
        UPIPE_TRY(upipe_a2a_to_heads(c, slot, st->send, p, i + t, UPIPE_A2A_Q, r->each[UPI_PROJ_Q]));
        st->parts[t].q = slot;
    }
    return upi_kv_prefetch(c, r, &f->kv, i, UPIPE_BWD_IN);
}

/* dQ' into the send buffer; dK' and dV' +=. */
UPIPE_API upipe_status upi_bwd_attend(upipe_ctx *c, upi_pass *f, int i)
{
    const upi_run *r = &f->run;
    const size_t zero = r->scratch.dq_sum > 0 ? r->scratch.dq_sum : r->buffers.sum_q;
    upi_stage *st = upi_stage_at(f, i);
    int t;
    if (!r->p->overlap) upipe_phase_set(c, UPIPE_BWD_ATTN);
    UPIPE_TRY(upi_sums_alloc(c, r, st->sums, r->buffers.sum_q, st->send, "dq_sum"));
    for (t = 0; t < r->p->width; ++t) {
        st->parts[t].dq = st->sums[t];
        if (zero > 0) UPIPE_TRY(c->ops->zero(c, st->sums[t], zero));
    }
    return upi_attend(c, r, f->save, st->parts, i, &st->kv, &st->dkv, r->grads->sinks);
}

/* Sends dQ' into the slot that held Q', and adds to dWq. After a round's last stage: dK, dV, dWk and dWv. */
UPIPE_API upipe_status upi_bwd_store(upipe_ctx *c, upi_pass *f, int i)
{
    const upi_run *r = &f->run;
    upi_stage *st = upi_stage_at(f, i);
    int t;
    upipe_phase_set(c, UPIPE_BWD_ATTN);
    UPIPE_TRY(upipe_free(c, st->delta));
    if (r->scratch.dq_sum > 0) { /* dO' is not read any more: the sum is cast into its place */
        st->send = st->dout;
        st->dout = NULL;
    }
    UPIPE_TRY(upipe_free(c, st->dout));
    UPIPE_TRY(upi_kv_release(c, r, &f->kv, i, &st->kv));
    upipe_phase_set(c, UPIPE_BWD_IN);
    UPIPE_TRY(upi_sums_store(c, r, f->dout, st->parts, st->send, st->sums, i, r->p->desc.head_dim));
    for (t = 0; t < r->p->width; ++t)
        UPIPE_TRY(upi_project_bwd(c, r, UPI_PROJ_Q, i + t, upi_slot_at(f->dout, i + t)));
    return upi_kv_grad_store(c, r, &f->dkv, i, &st->dkv);
}

#endif

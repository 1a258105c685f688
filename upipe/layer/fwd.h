/* fwd.h -- load, attend, store of a forward stage        part of upipe_layer.h */
#ifndef UPIPE_LAYER_H
#include "../upipe_layer.h"
#elif !defined(UPIPE_LAYER_FWD_H)
#define UPIPE_LAYER_FWD_H

#include "attend.h"

/* What a stage holds between load and store. `width` stages that share a pass round a P2P ring count as
 * one. */
typedef struct upi_stage {
    upi_kv_pair kv, dkv;
    void *send, *dout, *delta;
    upipe_ring_part *parts; /* [width] */
    void **sums;            /* [width] of O' or dQ' */
} upi_stage;

/* One pass through the stages; in a pipeline two of them are in flight. */
typedef struct upi_pass {
    upi_run run;
    upipe_saved *save;
    upipe_slots *dout; /* backward: dO, then dQ */
    upi_kv kv;
    upi_kv_grad dkv;
    upi_stage stage[2];
    upipe_ring_part parts[UPIPE_STAGES_MAX];
    void *sums[UPIPE_STAGES_MAX];
} upi_pass;

UPIPE_API upi_stage *upi_stage_at(upi_pass *f, int i)
{
    const int n = f->run.p->overlap ? i % 2 : 0;
    f->stage[n].parts = f->parts + n;
    f->stage[n].sums = f->sums + n;
    return &f->stage[n];
}

/* Loads Q', and in a new round K' and V': projections, then inp_all_to_all. Q' is received into its slot. */
UPIPE_API upipe_status upi_fwd_load(upipe_ctx *c, upi_pass *f, int i)
{
    const upi_run *r = &f->run;
    upi_stage *st = upi_stage_at(f, i);
    int t;
    upipe_phase_set(c, UPIPE_FWD_IN);
    UPIPE_TRY(upi_kv_load(c, r, &f->kv, i, &st->kv));
    UPIPE_TRY(upipe_alloc(c, &st->send, r->buffers.send, "q_send"));
    for (t = 0; t < r->p->width; ++t) {
        void *q;
        UPIPE_TRY(upipe_slot_lend(&f->save->out, i + t, &q, &c->err));
        UPIPE_TRY(upi_project(c, r, UPI_PROJ_Q, i + t, st->send));
        UPIPE_TRY(upipe_a2a_to_heads(c, q, st->send, r->p, i + t, UPIPE_A2A_Q, r->each[UPI_PROJ_Q]));
        st->parts[t].q = q;
    }
    return upi_kv_prefetch(c, r, &f->kv, i, UPIPE_FWD_IN);
}

/* O' into the send buffer of Q, which is free again. */
UPIPE_API upipe_status upi_fwd_attend(upipe_ctx *c, upi_pass *f, int i)
{
    const upi_run *r = &f->run;
    upi_stage *st = upi_stage_at(f, i);
    int t;
    if (!r->p->overlap) upipe_phase_set(c, UPIPE_FWD_ATTN);
    UPIPE_TRY(upi_sums_alloc(c, r, st->sums, r->buffers.sum_o, st->send, "o_sum"));
    for (t = 0; t < r->p->width; ++t) st->parts[t].o = st->sums[t];
    return upi_attend(c, r, f->save, st->parts, i, &st->kv, NULL, NULL);
}

/* Sends O' through out_all_to_all into its slot. Q' is not needed any more. */
UPIPE_API upipe_status upi_fwd_store(upipe_ctx *c, upi_pass *f, int i)
{
    const upi_run *r = &f->run;
    upi_stage *st = upi_stage_at(f, i);
    upipe_phase_set(c, UPIPE_FWD_ATTN);
    UPIPE_TRY(upi_kv_release(c, r, &f->kv, i, &st->kv));
    upipe_phase_set(c, UPIPE_FWD_OUT);
    return upi_sums_store(c, r, &f->save->out, st->parts, st->send, st->sums, i, r->p->desc.v_dim);
}

#endif

/* stage.h -- the engine: what a stage loads, attends and stores
 *
 * One stage in words. Forward: slot i of final_out is lent; Q goes through inp_all_to_all into it, and in a new round
 * K and V into their buffers; attention writes O' into Q's send buffer, which is free again; out_all_to_all sends O'
 * into the same slot. Backward: the same load, and dO and delta out of slot i (and O, where the compute table's
 * attention reads it); dQ' goes into the slot; dK' and dV' go back to their tokens after their round.
 *
 *     upi_pass f;                                     a door fills it: upipe_layer.h, upipe_qkv.h, upipe_latent.h
 *     upi_pass_init(ctx.ops, &f, &layer, &slots);     of the layer: plan, mask and scale
 *     f.fill = my_heads, f.lse = lse;                   my_heads: a stage's Q, K or V in the send layout
 *     for (i = 0; i < plan.stages; i += plan.width) {
 *         UPIPE_TRY(upi_fwd_load(&ctx, &f, i));       Q', K', V'
 *         UPIPE_TRY(upi_fwd_attend(&ctx, &f, i));     O'
 *         UPIPE_TRY(upi_fwd_store(&ctx, &f, i));      O, in slots i .. i + width - 1
 *     }
 *
 * Stages i .. i + width - 1 attend together: width is 1 but in a P2P ring. The calls have the form of a pipeline's
 * (upipe_ops.h), so that load and store can run beside another stage's attention. After a failure the pass is
 * over: upi_unwind.
 */
#ifndef UPIPE_STAGE_STAGE_H
#define UPIPE_STAGE_STAGE_H

/* upi_pass_init -- a pass over the stages of l->plan; fill, x or heads, and what else is read, are the door's to set
 *   ops      the compute table, which says how much scratch it needs; NULL: f->scratch is the caller's to set
 *   slots    see upi_pass
 */
UPIPE_API void upi_pass_init(const upipe_ops *ops, upi_pass *f, const upipe_layer *l, upipe_slots *slots)
{
    const upipe_plan *p = l->plan;
    const size_t e = upipe_dtype_bytes(p->desc.dtype);
    int i;
    memset(f, 0, sizeof *f);
    f->layer = l;
    f->plan = p;
    f->slots = slots;
    f->fetch = upi_kv_fetch;
    f->rows = p->shard;
    f->in_flight = p->overlap ? 2 : 1;
    f->in_dim = p->desc.model_dim;
    f->tile_rows = l->tile_rows > 0 ? l->tile_rows : (int64_t)UPIPE_TILE_ROWS;
    if (f->tile_rows > p->rows) f->tile_rows = p->rows;
    f->w[UPI_PROJ_Q] = l->wq;
    f->w[UPI_PROJ_K] = l->wk;
    f->w[UPI_PROJ_V] = l->wv;
    f->bias[UPI_PROJ_Q] = l->bq;
    f->bias[UPI_PROJ_K] = l->bk;
    f->bias[UPI_PROJ_V] = l->bv;
    f->norm[UPI_PROJ_Q] = l->q_norm_weight;
    f->norm[UPI_PROJ_K] = l->k_norm_weight;
    for (i = 0; i < 3; ++i) {
        f->dim[i] = i == UPI_PROJ_V ? p->desc.v_dim : p->desc.head_dim;
        f->token_bytes[i] = (size_t)f->dim[i] * e;
        f->sent[i] = i == UPI_PROJ_Q ? UPIPE_A2A_Q : UPIPE_A2A_KV;
    }
    if (ops != NULL) upi_scratch_add(ops, f, p->desc.ring > 1);
}

/* A pass for the output projection, forward or backward. */
UPIPE_API upipe_status upi_out_begin(upipe_ctx *c, upi_pass *f, const upipe_layer *l, upipe_view y,
                                     const upipe_saved *save)
{
    memset(f, 0, sizeof *f);
    UPIPE_TRY(upi_check_out(c, l, y, save));
    if (l->wg != NULL)
        return upipe_fail(&c->err, UPIPE_ERR_ARG,
                          "a layer with wg: its output is gated, by upipe_layer_gated_out_fwd");
    upi_pass_init(c->ops, f, l, NULL);
    return UPIPE_OK;
}

/* The end of a door's call with status s: a failed one frees what it has allocated since the mark, and aborts team and
 * ring. */
UPIPE_API upipe_status upi_pass_end(upipe_ctx *c, upipe_status s, int64_t mark)
{
    upi_phase_set(c, UPIPE_PHASE_OTHER);
    return s == UPIPE_OK ? UPIPE_OK : upi_unwind(c, s, mark, NULL);
}

/* ---- forward ---- */

/* upi_fwd_load -- Q', received into its slot, and in a new round K' and V'
 *   errors  of upi_fwd_load, _attend, _store and their backward forms: MEMORY, the table's, and those of the
 *           all-to-all
 */
UPIPE_API upipe_status upi_fwd_load(upipe_ctx *c, void *pass, int i)
{
    upi_pass *f = (upi_pass *)pass;
    const upipe_plan *p = f->plan;
    upi_stage_buffers *st = &f->stage[i % f->in_flight];
    void *q;
    int t;
    upi_phase_set(c, UPIPE_FWD_IN);
    UPIPE_TRY(upi_kv_load(c, f, i, &st->kv));
    UPIPE_TRY(upipe_alloc(c, &st->send, p->buffers.send, UPIPE_USE_QKV, "q_send"));
    for (t = 0; t < p->width; ++t) {
        UPIPE_TRY(upi_slot_lend(f->slots, i + t, &q, &c->err));
        UPIPE_TRY(f->fill(c, f, UPI_PROJ_Q, i + t, st->send));
        UPIPE_TRY(upipe_a2a_to_heads(c, q, st->send, p, i + t, UPIPE_A2A_Q, f->token_bytes[UPI_PROJ_Q]));
    }
    return p->kv_prefetched ? upi_kv_prefetch(c, f, i, UPIPE_FWD_IN) : UPIPE_OK;
}

/* upi_fwd_attend -- O' into the send buffer of Q, which is free again; in a ring into f32 sums */
UPIPE_API upipe_status upi_fwd_attend(upipe_ctx *c, void *pass, int i)
{
    upi_pass *f = (upi_pass *)pass;
    const upipe_plan *p = f->plan;
    upi_stage_buffers *st = &f->stage[i % f->in_flight];
    upipe_attend a;
    upipe_kv_block own;
    if (!p->overlap) upi_phase_set(c, UPIPE_FWD_ATTN);
    UPIPE_TRY(upi_attend_begin(c, &a, &own, f, i, st, p->buffers.sum_o, f->scratch.attn_fwd));
    a.o = st->sums;
    UPIPE_TRY(p->desc.ring > 1 ? upipe_ring_fwd(c, &a, &own) : upipe_attend_fwd(c, &a, &own, 1));
    return f->attn_work == NULL ? upipe_free(c, a.work) : UPIPE_OK;
}

/* upi_fwd_store -- O' through out_all_to_all into its slot */
UPIPE_API upipe_status upi_fwd_store(upipe_ctx *c, void *pass, int i)
{
    upi_pass *f = (upi_pass *)pass;
    upi_stage_buffers *st = &f->stage[i % f->in_flight];
    upi_phase_set(c, UPIPE_FWD_ATTN);
    UPIPE_TRY(upi_kv_release(c, f, i, &st->kv));
    upi_phase_set(c, UPIPE_FWD_OUT);
    return upi_results_store(c, f, i, st, UPI_PROJ_V);
}

/* ---- backward: Q, K, V are recomputed and sent again ---- */

/* upi_bwd_load -- Q', K', V' again, dO' and delta; dK' and dV', which are zero in a new round. dO leaves its slot
 *                 first: Q' is received into it, as in the forward */
UPIPE_API upipe_status upi_bwd_load(upipe_ctx *c, void *pass, int i)
{
    upi_pass *f = (upi_pass *)pass;
    const upipe_plan *p = f->plan;
    const upipe_buffers *b = &p->buffers;
    upi_stage_buffers *st = &f->stage[i % f->in_flight];
    void *slot, *delta;
    int t;
    upi_phase_set(c, UPIPE_BWD_IN);
    UPIPE_TRY(upi_kv_grad_load(c, f, i, &st->dkv));
    UPIPE_TRY(upi_kv_load(c, f, i, &st->kv));
    UPIPE_TRY(
        upipe_alloc(c, &st->send, upipe_max_bytes(b->send, f->scratch.dq_sum), UPIPE_USE_QKV, "q_send"));
    for (t = 0; t < p->width; ++t) {
        UPIPE_TRY(f->fill(c, f, UPI_PROJ_Q, i + t, st->send));
        upi_phase_set(c, UPIPE_BWD_OUT);
        if (t == 0) {
            UPIPE_TRY(upipe_alloc(c, &st->dout, (size_t)p->width * b->o, UPIPE_USE_ACT_GRAD, "dout_heads"));
            UPIPE_TRY(upipe_alloc(c, &delta, (size_t)p->width * b->stat, UPIPE_USE_STAT, "delta_heads"));
            UPIPE_TRY(upipe_alloc(c, &st->o, c->ops->attn_reads_o ? (size_t)p->width * b->o : 0,
                                  UPIPE_USE_OUT, "out_heads"));
            st->delta = (float *)delta;
        }
        UPIPE_TRY(upi_slot_drain(f->slots, i + t, &slot, &c->err));
        UPIPE_TRY(upipe_a2a_to_heads(c, upipe_offset(st->dout, (size_t)t * b->o), slot, p, i + t, UPIPE_A2A_Q,
                                     f->token_bytes[UPI_PROJ_V]));
        UPIPE_TRY(upipe_a2a_to_heads(c, upipe_offset(st->delta, (size_t)t * b->stat),
                                     f->delta + upipe_plan_before(p, i + t, -1) * p->rows, p, i + t,
                                     UPIPE_A2A_Q, 4));
        if (c->ops->attn_reads_o)
            UPIPE_TRY(upi_o_load(c, f, i + t, slot, upipe_offset(st->o, (size_t)t * b->o)));
        upi_phase_set(c, UPIPE_BWD_IN);
        UPIPE_TRY(upi_slot_lend(f->slots, i + t, &slot, &c->err));
        UPIPE_TRY(upipe_a2a_to_heads(c, slot, st->send, p, i + t, UPIPE_A2A_Q, f->token_bytes[UPI_PROJ_Q]));
    }
    return p->kv_prefetched ? upi_kv_prefetch(c, f, i, UPIPE_BWD_IN) : UPIPE_OK;
}

/* upi_bwd_attend -- dQ' into the send buffer, or into f32 sums; dK' and dV' += */
UPIPE_API upipe_status upi_bwd_attend(upipe_ctx *c, void *pass, int i)
{
    upi_pass *f = (upi_pass *)pass;
    const upipe_plan *p = f->plan;
    const size_t sum = f->scratch.dq_sum > 0 ? f->scratch.dq_sum : (size_t)p->width * p->buffers.sum_q;
    upi_stage_buffers *st = &f->stage[i % f->in_flight];
    upipe_attend a;
    upipe_kv_block own;
    if (!p->overlap) upi_phase_set(c, UPIPE_BWD_ATTN);
    UPIPE_TRY(upi_attend_begin(c, &a, &own, f, i, st, p->buffers.sum_q, f->scratch.attn_bwd));
    if (sum > 0) UPIPE_TRY(c->ops->zero(c, st->sums, sum));
    a.dq = st->sums;
    a.merge_dq = p->desc.ring > 1 || f->scratch.dq_sum > 0;
    if (a.merge_dq) a.sums = UPIPE_F32;
    a.dout = st->dout;
    a.o = st->o;
    a.delta = st->delta;
    a.dsinks = f->grads->sinks;
    own.dk = (float *)st->dkv.k;
    own.dv = (float *)st->dkv.v;
    UPIPE_TRY(p->desc.ring > 1 ? upipe_ring_bwd(c, &a, &own) : upipe_attend_bwd(c, &a, &own, 1));
    return f->attn_work == NULL ? upipe_free(c, a.work) : UPIPE_OK;
}

/* upi_bwd_store -- dQ' into the slot that held Q', and into dWq. After a round's last stage: dK, dV, dWk and dWv */
UPIPE_API upipe_status upi_bwd_store(upipe_ctx *c, void *pass, int i)
{
    upi_pass *f = (upi_pass *)pass;
    upi_stage_buffers *st = &f->stage[i % f->in_flight];
    int t;
    upi_phase_set(c, UPIPE_BWD_ATTN);
    UPIPE_TRY(upipe_free(c, st->o));
    UPIPE_TRY(upipe_free(c, st->delta));
    if (f->scratch.dq_sum > 0) { /* dO' is not read any more: the sum is cast into its place */
        st->send = st->dout;
        st->dout = NULL;
    }
    UPIPE_TRY(upipe_free(c, st->dout));
    UPIPE_TRY(upi_kv_release(c, f, i, &st->kv));
    upi_phase_set(c, UPIPE_BWD_IN);
    UPIPE_TRY(upi_results_store(c, f, i, st, UPI_PROJ_Q));
    for (t = 0; t < f->plan->width; ++t)
        UPIPE_TRY(upi_stage_grad(c, f, UPI_PROJ_Q, i + t, upi_slot_at(f->slots, i + t)));
    return upi_kv_grad_store(c, f, i, &st->dkv);
}

#endif

/* bwd.h -- the steps of a backward over segments */
#ifndef UPIPE_FPDT_BWD_H
#define UPIPE_FPDT_BWD_H

/* Sends dO and delta of a segment's stage through inp_all_to_all and offloads them. O, which is read where delta
 * is not there yet, is not needed afterwards. */
UPIPE_API upipe_status upi_fpdt_offload_dout(upipe_ctx *c, upi_fpdt_pass *s, const char *dout, int i,
                                             int stage)
{
    const upi_segments *z = &s->z;
    const upipe_plan *p = upi_segment_plan(z, i);
    const int32_t sent = upipe_plan_heads_sent(p, UPIPE_A2A_Q, stage), dim = p->desc.v_dim;
    const size_t bytes = upipe_plan_rows_bytes(p, sent, dim), e = upipe_dtype_bytes(p->desc.dtype);
    const size_t before = (size_t)(upipe_plan_before(p, stage, -1) * p->rows) * 4;
    const int64_t mark = upipe_mem_mark(c->mem);
    void *o, *grad, *delta, *heads;
    upipe_slots out_slot, dout_slot; /* one buffer: that of this stage */
    upi_phase_set(c, UPIPE_BWD_OUT);
    UPIPE_TRY(upipe_alloc(c, &o, s->save->delta == NULL ? z->b.slot : 0, UPIPE_USE_OUT, "slot"));
    UPIPE_TRY(upipe_alloc(c, &grad, z->b.slot, UPIPE_USE_ACT_GRAD, "dout"));
    UPIPE_TRY(upipe_alloc(c, &delta, z->delta, UPIPE_USE_STAT, "delta"));
    UPIPE_TRY(upipe_alloc(c, &heads, upipe_max_bytes(z->b.o, z->b.stat), UPIPE_USE_ACT_GRAD, "dout_heads"));
    UPIPE_TRY(upi_fpdt_copy(c, s, grad, upi_fpdt_at(dout, z->b.slot, z->stages, i, stage), bytes));
    if (s->save->delta == NULL) {
        UPIPE_TRY(upi_fpdt_copy(c, s, o, upi_fpdt_at(s->save->out, z->b.slot, z->stages, i, stage), bytes));
        upipe_slots_init(&out_slot, o, z->b.slot, p->stages, UPIPE_SLOT_FULL);
        upipe_slots_init(&dout_slot, grad, z->b.slot, p->stages, UPIPE_SLOT_FULL);
        out_slot.buffers = dout_slot.buffers = 1;
        UPIPE_TRY(upi_delta_stage(c, p, (float *)delta, stage, &out_slot, &dout_slot));
    } else {
        UPIPE_TRY(upi_fpdt_copy(c, s, delta, upi_fpdt_at(s->save->delta, z->b.delta, 1, i, 0) + before,
                                (size_t)(p->rows * sent) * 4));
    }
    UPIPE_TRY(upipe_a2a_to_heads(c, heads, grad, p, stage, UPIPE_A2A_Q, (size_t)dim * e));
    UPIPE_TRY(upi_fpdt_copy(c, s, upi_fpdt_at(s->host.dout, z->b.o, z->stages, i, stage), heads,
                            upi_fpdt_q_bytes(p, stage, dim, e)));
    UPIPE_TRY(upipe_a2a_to_heads(c, heads, delta, p, stage, UPIPE_A2A_Q, 4));
    UPIPE_TRY(upi_fpdt_copy(c, s, upi_fpdt_at(s->host.delta, z->b.stat, z->stages, i, stage), heads,
                            upi_fpdt_q_bytes(p, stage, 1, 4)));
    upipe_mem_rewind(c->mem, mark);
    return UPIPE_OK;
}

/* dK' and dV' of a round of segment j in f32, before a stage adds to them: one buffer, dK' first. */
UPIPE_API upipe_status upi_fpdt_load_dkv(upipe_ctx *c, upi_fpdt_pass *s, int j, int stage, void **dkv)
{
    const size_t bytes = s->z.b.dk + s->z.b.dv;
    UPIPE_TRY(upipe_alloc(c, dkv, bytes, UPIPE_USE_ACT_GRAD, "dkv"));
    if (stage % s->z.steps == 0) return c->ops->zero(c, *dkv, bytes);
    return upi_fpdt_copy(c, s, *dkv, upi_fpdt_at(s->host.dkv, bytes, 1, j, 0), bytes);
}

/* dK' and dV' of segment j: the queries of a stage that see its keys are streamed. */
UPIPE_API upipe_status upi_fpdt_attend_bwd(upipe_ctx *c, upi_fpdt_pass *s, int j, int stage, void *dkv)
{
    const upi_segments *z = &s->z;
    upi_stream v;
    upi_kv_pair kv;
    UPIPE_TRY(upipe_alloc(c, &kv.k, z->b.k + z->b.v, UPIPE_USE_QKV, "kv"));
    kv.v = upipe_offset(kv.k, z->b.k);
    UPIPE_TRY(upi_stream_begin(c, &v, s, j, stage, upi_stream_q_bytes(z), z->scratch.attn_bwd, "host_q"));
    UPIPE_TRY(upi_fpdt_fetch_kv(c, s, j, stage, kv));
    v.a.dsinks = s->grads->sinks;
    v.own.k = kv.k;
    v.own.v = kv.v;
    v.own.dk = (float *)dkv;
    v.own.dv = (float *)upipe_offset(dkv, z->b.dk);
    UPIPE_TRY(upi_stream_run(c, &v, upi_segment_count(z->f, j, 0), upi_stream_bwd_fetch,
                             upi_stream_bwd_attend, upi_stream_bwd_offload));
    UPIPE_TRY(upipe_free(c, v.a.work));
    UPIPE_TRY(upipe_free(c, v.bufs));
    return upipe_free(c, kv.k);
}

/* Sends dK' or dV' of a round of segment j back to its tokens, adds to dW, and offloads it until dX is formed.
 *   last    the round's last stage
 */
UPIPE_API upipe_status upi_fpdt_store_dkv(upipe_ctx *c, upi_fpdt_pass *s, const upi_pass *f, upi_proj which,
                                          int j, int last, void *grad)
{
    const upi_segments *z = &s->z;
    const upipe_plan *p = f->plan;
    const int is_k = which == UPI_PROJ_K, first = last - z->steps + 1, dim = f->dim[which];
    const size_t size = is_k ? z->b.token_dk : z->b.token_dv;
    const int64_t heads = upi_plan_heads_at_tokens(p, last), rows = p->rows * heads;
    char *host = upi_fpdt_at(is_k ? s->host.dk : s->host.dv, z->kv_tokens * (size_t)dim, 1, j, 0);
    void *tokens, *buf, *sum = NULL;
    UPIPE_TRY(upipe_alloc(c, &tokens, size, UPIPE_USE_ACT_GRAD, "tokens_grad"));
    if (p->kv_grads_accumulate) { /* uneven heads in groups: summed in f32 first */
        UPIPE_TRY(
            upipe_alloc(c, &sum, size / upipe_dtype_bytes(p->desc.dtype) * 4, UPIPE_USE_ACT_GRAD, "dkv_sum"));
        UPIPE_TRY(c->ops->zero(c, sum, (size_t)(rows * dim) * 4));
    }
    UPIPE_TRY(upipe_alloc(c, &buf, z->b.kv_grad, UPIPE_USE_ACT_GRAD, "kv_grad"));
    UPIPE_TRY(upi_kv_grad_to_tokens(c, f, last, which, grad, sum != NULL ? sum : tokens, buf));
    UPIPE_TRY(upipe_free(c, buf));
    if (sum != NULL) {
        UPIPE_TRY(c->ops->cast(c, upipe_view_packed(tokens, p->desc.dtype, rows, 1, dim),
                               upipe_view_packed(sum, UPIPE_F32, rows, 1, dim)));
        UPIPE_TRY(upipe_free(c, sum));
        UPIPE_TRY(f->grad(c, f, which, upi_head_run_all_kv(p), tokens));
    } else {
        UPIPE_TRY(upi_stage_grad(c, f, which, first, tokens));
    }
    if (!p->kv_grads_partial)
        host += upipe_plan_rows_bytes(p, first / z->steps * heads, dim); /* the round's */
    UPIPE_TRY(upi_fpdt_copy(c, s, host, tokens, (size_t)rows * f->token_bytes[which]));
    return upipe_free(c, tokens);
}

/* After a round's last stage dK', dV' of segment j are sent back to their tokens; before, they are
 * offloaded. */
UPIPE_API upipe_status upi_fpdt_store_kv_grads(upipe_ctx *c, upi_fpdt_pass *s, const char *x, int j,
                                               int stage, void *dkv)
{
    const upi_segments *z = &s->z;
    const size_t bytes = z->b.dk + z->b.dv;
    upi_phase_set(c, UPIPE_BWD_IN);
    if (stage % z->steps == z->steps - 1) {
        upi_pass f;
        upi_fpdt_segment_pass(s, j, &f);
        UPIPE_TRY(upi_fpdt_fetch_x(c, s, &f, x, j));
        UPIPE_TRY(upi_fpdt_store_dkv(c, s, &f, UPI_PROJ_K, j, stage, dkv));
        UPIPE_TRY(upi_fpdt_store_dkv(c, s, &f, UPI_PROJ_V, j, stage, upipe_offset(dkv, z->b.dk)));
        UPIPE_TRY(upipe_free(c, f.x.data));
    } else {
        UPIPE_TRY(upi_fpdt_copy(c, s, upi_fpdt_at(s->host.dkv, bytes, 1, j, 0), dkv, bytes));
    }
    return upipe_free(c, dkv);
}

/* Sends the complete dQ' of a segment back to its tokens and adds to dWq. The slots of dout then hold dQ. */
UPIPE_API upipe_status upi_fpdt_store_dq(upipe_ctx *c, upi_fpdt_pass *s, const char *x, char *dout, int i,
                                         int stage)
{
    const upi_segments *z = &s->z;
    const upipe_plan *p = upi_segment_plan(z, i);
    const int32_t d = p->desc.head_dim;
    const int64_t rows = (int64_t)upi_fpdt_q_bytes(p, stage, 1, 1);
    void *dq, *send, *slot;
    upi_pass f;
    upi_fpdt_segment_pass(s, i, &f);
    UPIPE_TRY(upipe_alloc(c, &dq, z->b.sum_q, UPIPE_USE_ACT_GRAD, "dq_sum"));
    UPIPE_TRY(upi_fpdt_copy(c, s, dq, upi_fpdt_at(s->host.dq, z->b.sum_q, z->stages, i, stage),
                            upi_fpdt_q_bytes(p, stage, d, 4)));
    UPIPE_TRY(upi_fpdt_fetch_x(c, s, &f, x, i));
    UPIPE_TRY(upipe_alloc(c, &send, z->b.q, UPIPE_USE_ACT_GRAD, "dq_send"));
    if (rows > 0)
        UPIPE_TRY(c->ops->cast(c, upipe_view_packed(send, p->desc.dtype, rows, 1, d),
                               upipe_view_packed(dq, UPIPE_F32, rows, 1, d)));
    UPIPE_TRY(upipe_alloc(c, &slot, z->b.slot, UPIPE_USE_OUT, "slot"));
    UPIPE_TRY(upipe_a2a_to_tokens(c, slot, send, p, stage, UPIPE_A2A_Q, f.token_bytes[UPI_PROJ_Q]));
    UPIPE_TRY(upipe_free(c, send));
    UPIPE_TRY(upi_stage_grad(c, &f, UPI_PROJ_Q, stage, slot));
    UPIPE_TRY(upi_fpdt_copy(c, s, upi_fpdt_at(dout, z->b.slot, z->stages, i, stage), slot,
                            upipe_plan_rows_bytes(p, upipe_plan_heads_sent(p, UPIPE_A2A_Q, stage), d)));
    UPIPE_TRY(upipe_free(c, slot));
    UPIPE_TRY(upipe_free(c, f.x.data));
    return upipe_free(c, dq);
}

/* dK or dV of segment i, from the host: as upi_grad_x reads it. */
UPIPE_API upipe_status upi_fpdt_fetch_dkv(upipe_ctx *c, upi_fpdt_pass *s, upi_pass *f, upi_proj which, int i)
{
    const upipe_plan *p = f->plan;
    const int is_k = which == UPI_PROJ_K;
    const size_t bytes = is_k ? p->buffers.token_dk : p->buffers.token_dv;
    const char *host =
        upi_fpdt_at(is_k ? s->host.dk : s->host.dv, s->z.kv_tokens * (size_t)f->dim[which], 1, i, 0);
    void *tokens;
    int n;
    for (n = 0; n < (p->kv_grads_partial ? 1 : p->rounds); ++n, host += bytes) {
        UPIPE_TRY(upi_kv_grad_alloc(c, f, which, (n + 1) * p->steps - 1, &tokens));
        UPIPE_TRY(upi_fpdt_copy(c, s, tokens, host, bytes));
    }
    return UPIPE_OK;
}

/* dX of segment i, from its dQ, dK and dV. */
UPIPE_API upipe_status upi_fpdt_grad_x(upipe_ctx *c, upi_fpdt_pass *s, char *dx, const char *dout, int i)
{
    const upi_segments *z = &s->z;
    const upipe_plan *p = upi_segment_plan(z, i);
    const size_t row = (size_t)(p->desc.batch * p->desc.model_dim) * upipe_dtype_bytes(p->desc.dtype);
    const size_t dq = z->b.slot * (size_t)z->stages;
    const int64_t mark = upipe_mem_mark(c->mem);
    upipe_slots slots;
    upi_pass f;
    void *q, *out;
    upi_fpdt_segment_pass(s, i, &f);
    UPIPE_TRY(upipe_alloc(c, &q, dq, UPIPE_USE_ACT_GRAD, "dq"));
    UPIPE_TRY(upi_fpdt_fetch_dkv(c, s, &f, UPI_PROJ_K, i));
    UPIPE_TRY(upi_fpdt_fetch_dkv(c, s, &f, UPI_PROJ_V, i));
    UPIPE_TRY(upipe_alloc(c, &out, z->x, UPIPE_USE_OTHER, "dx"));
    UPIPE_TRY(upi_fpdt_copy(c, s, q, upi_fpdt_at(dout, z->b.slot, z->stages, i, 0), dq));
    upipe_slots_init(&slots, q, z->b.slot, z->stages, UPIPE_SLOT_FULL);
    UPIPE_TRY(upi_grad_x(c, &f, upipe_view_packed(out, p->desc.dtype, p->rows, 1, (int32_t)p->desc.model_dim),
                         &slots));
    UPIPE_TRY(
        upi_fpdt_copy(c, s, dx + (size_t)upi_segment_rows_before(z, i) * row, out, (size_t)p->local * row));
    upipe_mem_rewind(c->mem, mark);
    return UPIPE_OK;
}

#endif

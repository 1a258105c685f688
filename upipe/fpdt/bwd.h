/* bwd.h -- the steps of a backward over segments        part of upipe_fpdt.h */
#ifndef UPIPE_FPDT_H
#include "../upipe_fpdt.h"
#elif !defined(UPIPE_FPDT_BWD_H)
#define UPIPE_FPDT_BWD_H

#include "stream.h"

/* Sends dO and delta of a segment's stage through inp_all_to_all and offloads them. O, which is read where delta
 * is not there yet, is not needed afterwards. */
UPIPE_API upipe_status upi_fpdt_offload_dout(upipe_ctx *c, upi_fpdt_pass *s, const char *dout, int i,
                                             int stage)
{
    const upi_segments *z = &s->z;
    const upipe_plan *p = upi_segment_plan(z, i);
    const int32_t sent = upipe_plan_buffer(p, UPIPE_A2A_Q, stage), dim = p->desc.v_dim;
    const size_t bytes = upipe_plan_rows_bytes(p, sent, dim), e = upipe_dtype_bytes(p->desc.dtype);
    const size_t before = (size_t)(upipe_plan_before(p, stage, -1) * p->rows) * 4;
    void *o, *grad, *delta, *heads;
    upipe_phase_set(c, UPIPE_BWD_OUT);
    UPIPE_TRY(upipe_alloc(c, &o, s->save->delta == NULL ? z->b.slot : 0, "slot"));
    UPIPE_TRY(upipe_alloc(c, &grad, z->b.slot, "dout"));
    UPIPE_TRY(upipe_alloc(c, &delta, z->delta, "delta"));
    UPIPE_TRY(upipe_alloc(c, &heads, upipe_max_bytes(z->b.o, z->b.stat), "dout_heads"));
    UPIPE_TRY(upi_fpdt_copy(c, s, grad, upi_fpdt_at(dout, z->b.slot, z->stages, i, stage), bytes));
    if (s->save->delta == NULL) {
        UPIPE_TRY(upi_fpdt_copy(c, s, o, upi_fpdt_at(s->save->out, z->b.slot, z->stages, i, stage), bytes));
        UPIPE_TRY(c->ops->rowdot(c, upipe_view_packed(delta, UPIPE_F32, p->rows * sent, 1, 1),
                                 upipe_view_packed(o, p->desc.dtype, p->rows * sent, 1, dim),
                                 upipe_view_packed(grad, p->desc.dtype, p->rows * sent, 1, dim)));
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
    UPIPE_TRY(upipe_free(c, heads));
    UPIPE_TRY(upipe_free(c, delta));
    UPIPE_TRY(upipe_free(c, grad));
    return upipe_free(c, o);
}

/* dK' and dV' of a round of segment j in f32, before a stage adds to them: one buffer, dK' first. */
UPIPE_API upipe_status upi_fpdt_load_dkv(upipe_ctx *c, upi_fpdt_pass *s, int j, int stage, void **dkv)
{
    const size_t bytes = s->z.b.dk + s->z.b.dv;
    UPIPE_TRY(upipe_alloc(c, dkv, bytes, "dkv"));
    if (stage % s->z.steps == 0) return c->ops->zero(c, *dkv, bytes);
    return upi_fpdt_copy(c, s, *dkv, upi_fpdt_at(s->host.dkv, bytes, 1, j, 0), bytes);
}

/* dK' and dV' of segment j: the queries of a stage that see its keys are streamed. */
UPIPE_API upipe_status upi_fpdt_attend_bwd(upipe_ctx *c, upi_fpdt_pass *s, int j, int stage, void *dkv)
{
    const upi_segments *z = &s->z;
    upi_fpdt_stream v;
    upi_kv_pair kv;
    UPIPE_TRY(upipe_alloc(c, &kv.k, z->b.k + z->b.v, "kv"));
    kv.v = (char *)kv.k + z->b.k;
    UPIPE_TRY(upi_fpdt_stream_begin(c, &v, s, j, stage, upi_fpdt_stream_q_bytes(z), "host_q"));
    UPIPE_TRY(upi_fpdt_fetch_kv(c, s, j, stage, kv));
    v.own.k = kv.k;
    v.own.v = kv.v;
    v.own.dk = (float *)dkv;
    v.own.dv = v.own.dk + z->b.dk / 4;
    UPIPE_TRY(upi_fpdt_stream_run(c, &v));
    UPIPE_TRY(upi_fpdt_stream_end(c, &v));
    return upipe_free(c, kv.k);
}

/* Sends dK' or dV' of a round of segment j through out_all_to_all, sums it where ranks share heads, adds to
 * dW, and offloads it until dX is formed.
 *   last    the round's last stage
 */
UPIPE_API upipe_status upi_fpdt_store_dkv(upipe_ctx *c, upi_fpdt_pass *s, const upi_run *r, upi_proj which,
                                          int j, int last, void *grad)
{
    const upi_segments *z = &s->z;
    const upipe_plan *p = r->p;
    const int is_k = which == UPI_PROJ_K, stage = last - z->steps + 1, round = stage / z->steps,
              dim = upi_dim(p, which);
    const size_t size = is_k ? z->b.token_dk : z->b.token_dv;
    const int64_t heads = p->kv_grads_partial ? p->desc.kv_heads : p->desc.ranks * p->kv_per_rank;
    const int64_t rows = p->rows * heads, mine = (int64_t)upi_fpdt_kv_bytes(p, stage, 1, 1);
    char *host = upi_fpdt_at(is_k ? s->host.dk : s->host.dv, z->kv_tokens * (size_t)dim, 1, j, 0);
    void *tokens, *buf, *sum;
    UPIPE_TRY(upipe_alloc(c, &tokens, size, "tokens_grad"));
    sum = tokens;
    if (p->kv_grads_partial) { /* in the storage type; uneven heads in f32 first */
        if (p->kv_grads_accumulate) {
            UPIPE_TRY(upipe_alloc(c, &sum, size / upipe_dtype_bytes(p->desc.dtype) * 4, "dkv_sum"));
            UPIPE_TRY(c->ops->zero(c, sum, (size_t)(rows * dim) * 4));
        }
        UPIPE_TRY(upipe_alloc(c, &buf, z->b.partial, "kv_partial"));
        UPIPE_TRY(upi_kv_grad_sum(c, r, last, which, grad, sum, buf));
        UPIPE_TRY(upipe_free(c, buf));
    } else {
        UPIPE_TRY(upipe_alloc(c, &buf, is_k ? z->b.k : z->b.v, "kv_cast"));
        UPIPE_TRY(c->ops->cast(c, upipe_view_packed(buf, p->desc.dtype, mine, 1, dim),
                               upipe_view_packed(grad, UPIPE_F32, mine, 1, dim)));
        UPIPE_TRY(upipe_a2a_to_tokens(c, tokens, buf, p, last, UPIPE_A2A_DKV, r->each[which]));
        UPIPE_TRY(upipe_free(c, buf));
        host += upipe_plan_rows_bytes(p, round * heads, dim); /* a round's heads of a rank are contiguous */
    }
    if (sum != tokens) {
        UPIPE_TRY(c->ops->cast(c, upipe_view_packed(tokens, p->desc.dtype, rows, 1, dim),
                               upipe_view_packed(sum, UPIPE_F32, rows, 1, dim)));
        UPIPE_TRY(upipe_free(c, sum));
        UPIPE_TRY(upi_project_heads_bwd(c, r, which, upipe_head_run_all_kv(p), tokens));
    } else {
        UPIPE_TRY(upi_project_bwd(c, r, which, stage, tokens));
    }
    UPIPE_TRY(upi_fpdt_copy(c, s, host, tokens, (size_t)rows * r->each[which]));
    return upipe_free(c, tokens);
}

/* After a round's last stage dK', dV' of segment j are sent back to their tokens; before, they are
 * offloaded. */
UPIPE_API upipe_status upi_fpdt_store_kv_grads(upipe_ctx *c, upi_fpdt_pass *s, const char *x, int j,
                                               int stage, void *dkv)
{
    const upi_segments *z = &s->z;
    const size_t bytes = z->b.dk + z->b.dv;
    upipe_phase_set(c, UPIPE_BWD_IN);
    if (stage % z->steps == z->steps - 1) {
        upi_run r = upi_fpdt_run(s, j);
        UPIPE_TRY(upi_fpdt_fetch_x(c, s, &r, x, j));
        UPIPE_TRY(upi_fpdt_store_dkv(c, s, &r, UPI_PROJ_K, j, stage, dkv));
        UPIPE_TRY(upi_fpdt_store_dkv(c, s, &r, UPI_PROJ_V, j, stage, (float *)dkv + z->b.dk / 4));
        UPIPE_TRY(upipe_free(c, r.x.data));
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
    upi_run r = upi_fpdt_run(s, i);
    const upipe_plan *p = r.p;
    const int32_t d = p->desc.head_dim;
    const int64_t rows = (int64_t)upi_fpdt_q_bytes(p, stage, 1, 1);
    void *dq, *send, *slot;
    UPIPE_TRY(upipe_alloc(c, &dq, z->b.sum_q, "dq_sum"));
    UPIPE_TRY(upi_fpdt_copy(c, s, dq, upi_fpdt_at(s->host.dq, z->b.sum_q, z->stages, i, stage),
                            upi_fpdt_q_bytes(p, stage, d, 4)));
    UPIPE_TRY(upi_fpdt_fetch_x(c, s, &r, x, i));
    UPIPE_TRY(upipe_alloc(c, &send, z->b.q, "dq_send"));
    if (rows > 0)
        UPIPE_TRY(c->ops->cast(c, upipe_view_packed(send, p->desc.dtype, rows, 1, d),
                               upipe_view_packed(dq, UPIPE_F32, rows, 1, d)));
    UPIPE_TRY(upipe_alloc(c, &slot, z->b.slot, "slot"));
    UPIPE_TRY(upipe_a2a_to_tokens(c, slot, send, p, stage, UPIPE_A2A_Q, r.each[UPI_PROJ_Q]));
    UPIPE_TRY(upipe_free(c, send));
    UPIPE_TRY(upi_project_bwd(c, &r, UPI_PROJ_Q, stage, slot));
    UPIPE_TRY(upi_fpdt_copy(c, s, upi_fpdt_at(dout, z->b.slot, z->stages, i, stage), slot,
                            upipe_plan_rows_bytes(p, upipe_plan_buffer(p, UPIPE_A2A_Q, stage), d)));
    UPIPE_TRY(upipe_free(c, slot));
    UPIPE_TRY(upipe_free(c, r.x.data));
    return upipe_free(c, dq);
}

/* dX of segment i, from its dQ, dK and dV. */
UPIPE_API upipe_status upi_fpdt_grad_x(upipe_ctx *c, upi_fpdt_pass *s, char *dx, const char *dout, int i)
{
    const upi_segments *z = &s->z;
    upi_run r = upi_fpdt_run(s, i);
    const upipe_plan *p = r.p;
    const size_t dk = z->kv_tokens * (size_t)p->desc.head_dim, dv = z->kv_tokens * (size_t)p->desc.v_dim;
    const size_t round = upipe_plan_rows_bytes(p, (int64_t)p->desc.ranks * p->kv_per_rank, 1);
    const size_t row = (size_t)(p->desc.batch * p->desc.model_dim) * upipe_dtype_bytes(p->desc.dtype);
    const size_t dq = z->b.slot * (size_t)z->stages;
    upipe_slots slots;
    upi_kv_grad grads;
    void *q, *k, *v, *out;
    int n;
    UPIPE_TRY(upipe_alloc(c, &q, dq, "dq"));
    UPIPE_TRY(upipe_alloc(c, &k, dk, "dk"));
    UPIPE_TRY(upipe_alloc(c, &v, dv, "dv"));
    UPIPE_TRY(upipe_alloc(c, &out, z->x, "dx"));
    UPIPE_TRY(upi_fpdt_copy(c, s, q, upi_fpdt_at(dout, z->b.slot, z->stages, i, 0), dq));
    UPIPE_TRY(upi_fpdt_copy(c, s, k, upi_fpdt_at(s->host.dk, dk, 1, i, 0), dk));
    UPIPE_TRY(upi_fpdt_copy(c, s, v, upi_fpdt_at(s->host.dv, dv, 1, i, 0), dv));
    upipe_slots_init(&slots, q, z->b.slot, z->stages, UPIPE_SLOT_FULL);
    for (n = 0; n < z->rounds; ++n) {
        grads.tokens[n].k = (char *)k + round * (size_t)(n * p->desc.head_dim);
        grads.tokens[n].v = (char *)v + round * (size_t)(n * p->desc.v_dim);
    }
    UPIPE_TRY(upi_grad_x(c, &r, upipe_view_packed(out, p->desc.dtype, p->rows, 1, (int32_t)p->desc.model_dim),
                         &slots, &grads));
    UPIPE_TRY(
        upi_fpdt_copy(c, s, dx + (size_t)upi_segment_rows_before(z, i) * row, out, (size_t)p->local * row));
    UPIPE_TRY(upipe_free(c, out));
    UPIPE_TRY(upipe_free(c, v));
    UPIPE_TRY(upipe_free(c, k));
    return upipe_free(c, q);
}

#endif

/* fwd.h -- load, attend, store of a stage of one segment, forward */
#ifndef UPIPE_FPDT_FWD_H
#define UPIPE_FPDT_FWD_H

/* What a stage of one segment holds on the device. */
typedef struct upi_fpdt_stage {
    upi_kv_pair kv;
    void *q, *sum, *lse; /* sum: O' in f32 */
} upi_fpdt_stage;

UPIPE_API upipe_status upi_fpdt_alloc_qkv(upipe_ctx *c, const upi_fpdt_pass *s, upi_fpdt_stage *st)
{
    upi_phase_set(c, UPIPE_FWD_IN);
    UPIPE_TRY(upi_kv_alloc(c, &st->kv, s->z.b.k, s->z.b.v, UPIPE_USE_QKV));
    return upipe_alloc(c, &st->q, s->z.b.q, UPIPE_USE_QKV, "q");
}

UPIPE_API upipe_status upi_fpdt_free_qkv(upipe_ctx *c, upi_fpdt_stage *st)
{
    UPIPE_TRY(upi_kv_free(c, &st->kv));
    return upipe_free(c, st->q);
}

/* K' or V' of a new round: projected, through inp_all_to_all, offloaded. */
UPIPE_API upipe_status upi_fpdt_load_kv(upipe_ctx *c, upi_fpdt_pass *s, const upi_pass *f, upi_proj which,
                                        int i, int stage, void *send, void *to)
{
    const upi_segments *z = &s->z;
    const int is_k = which == UPI_PROJ_K;
    const size_t block = is_k ? z->b.k : z->b.v;
    UPIPE_TRY(f->fill(c, f, which, stage, send));
    UPIPE_TRY(upipe_a2a_to_heads(c, to, send, f->plan, stage, UPIPE_A2A_KV, f->token_bytes[which]));
    return upi_fpdt_copy(c, s,
                         upi_fpdt_at(is_k ? s->save->k : s->save->v, block, z->rounds, i, stage / z->steps),
                         to, upi_fpdt_kv_bytes(f->plan, stage, 1, f->token_bytes[which]));
}

/* Q', and in a new round K' and V': from x, through inp_all_to_all, offloaded. */
UPIPE_API upipe_status upi_fpdt_load(upipe_ctx *c, upi_fpdt_pass *s, const char *x, int i, int stage,
                                     upi_fpdt_stage *st)
{
    const upi_segments *z = &s->z;
    upi_pass f;
    void *send;
    upi_fpdt_segment_pass(s, i, &f);
    UPIPE_TRY(upi_fpdt_alloc_qkv(c, s, st));
    UPIPE_TRY(upi_fpdt_fetch_x(c, s, &f, x, i));
    UPIPE_TRY(upipe_alloc(c, &send, upipe_max_bytes(z->b.kv_send, z->b.send), UPIPE_USE_QKV, "send"));
    if (stage % z->steps == 0) {
        UPIPE_TRY(upi_fpdt_load_kv(c, s, &f, UPI_PROJ_K, i, stage, send, st->kv.k));
        UPIPE_TRY(upi_fpdt_load_kv(c, s, &f, UPI_PROJ_V, i, stage, send, st->kv.v));
    }
    UPIPE_TRY(f.fill(c, &f, UPI_PROJ_Q, stage, send));
    UPIPE_TRY(upipe_a2a_to_heads(c, st->q, send, f.plan, stage, UPIPE_A2A_Q, f.token_bytes[UPI_PROJ_Q]));
    UPIPE_TRY(upi_fpdt_copy(c, s, upi_fpdt_at(s->save->q, z->b.q, z->stages, i, stage), st->q,
                            upi_fpdt_q_bytes(f.plan, stage, 1, f.token_bytes[UPI_PROJ_Q])));
    UPIPE_TRY(upipe_free(c, send));
    return upipe_free(c, f.x.data);
}

/* The same, where all of it has been offloaded: fetched. */
UPIPE_API upipe_status upi_fpdt_fetch(upipe_ctx *c, upi_fpdt_pass *s, int i, int stage, upi_fpdt_stage *st)
{
    const upi_segments *z = &s->z;
    const upipe_plan *p = upi_segment_plan(z, i);
    UPIPE_TRY(upi_fpdt_alloc_qkv(c, s, st));
    UPIPE_TRY(upi_fpdt_copy(c, s, st->q, upi_fpdt_at(s->save->q, z->b.q, z->stages, i, stage),
                            upi_fpdt_q_bytes(p, stage, p->desc.head_dim, upipe_dtype_bytes(p->desc.dtype))));
    return upi_fpdt_fetch_kv(c, s, i, stage, st->kv);
}

/* O' and lse of the stage's queries of segment i: over its own keys and values, then over those of other
 * segments, which are streamed. */
UPIPE_API upipe_status upi_fpdt_attend(upipe_ctx *c, upi_fpdt_pass *s, int i, int stage, upi_fpdt_stage *st)
{
    const upi_segments *z = &s->z;
    upi_stream v;
    upi_phase_set(c, UPIPE_FWD_ATTN);
    UPIPE_TRY(upipe_alloc(c, &st->sum, z->b.sum_o, UPIPE_USE_SCRATCH, "o_sum"));
    UPIPE_TRY(upipe_alloc(c, &st->lse, z->b.stat, UPIPE_USE_STAT, "lse"));
    UPIPE_TRY(upi_stream_begin(c, &v, s, i, stage, z->b.k + z->b.v, z->scratch.attn_fwd, "host_kv"));
    v.a.q = st->q;
    v.a.o = st->sum;
    v.a.lse = (float *)st->lse;
    v.own.k = st->kv.k;
    v.own.v = st->kv.v;
    UPIPE_TRY(upi_stream_run(c, &v, upi_segment_count(z->f, i, 1), upi_stream_fwd_fetch,
                             upi_stream_fwd_attend, NULL));
    UPIPE_TRY(upipe_free(c, v.a.work));
    UPIPE_TRY(upipe_free(c, v.bufs));
    return upi_fpdt_free_qkv(c, st);
}

/* Sends O' through out_all_to_all and offloads it, with lse. */
UPIPE_API upipe_status upi_fpdt_store(upipe_ctx *c, upi_fpdt_pass *s, int i, int stage, upi_fpdt_stage *st)
{
    const upi_segments *z = &s->z;
    const upipe_plan *p = upi_segment_plan(z, i);
    const int dim = p->desc.v_dim, sent = upipe_plan_heads_sent(p, UPIPE_A2A_Q, stage);
    const int64_t rows = (int64_t)upi_fpdt_q_bytes(p, stage, 1, 1);
    void *send, *slot;
    upi_phase_set(c, UPIPE_FWD_OUT);
    UPIPE_TRY(upipe_alloc(c, &send, z->b.o, UPIPE_USE_SCRATCH, "o_send"));
    if (rows > 0)
        UPIPE_TRY(c->ops->cast(c, upipe_view_packed(send, p->desc.dtype, rows, 1, dim),
                               upipe_view_packed(st->sum, UPIPE_F32, rows, 1, dim)));
    UPIPE_TRY(upipe_alloc(c, &slot, z->b.slot, UPIPE_USE_OUT, "slot"));
    UPIPE_TRY(upipe_a2a_to_tokens(c, slot, send, p, stage, UPIPE_A2A_Q,
                                  (size_t)dim * upipe_dtype_bytes(p->desc.dtype)));
    UPIPE_TRY(upi_fpdt_copy(c, s, upi_fpdt_at(s->save->out, z->b.slot, z->stages, i, stage), slot,
                            upipe_plan_rows_bytes(p, sent, dim)));
    UPIPE_TRY(upi_fpdt_copy(c, s, upi_fpdt_at(s->save->lse, z->b.stat, z->stages, i, stage), st->lse,
                            upi_fpdt_q_bytes(p, stage, 1, 4)));
    UPIPE_TRY(upipe_free(c, slot));
    UPIPE_TRY(upipe_free(c, send));
    UPIPE_TRY(upipe_free(c, st->lse));
    return upipe_free(c, st->sum);
}

#endif

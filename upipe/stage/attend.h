/* attend.h -- what attention reads in a stage, and where its results go */
#ifndef UPIPE_STAGE_ATTEND_H
#define UPIPE_STAGE_ATTEND_H

/* What attention reads and needs, forward and backward: the queries of stages i .. i + width - 1 in their slots, K',
 * V', scratch, and the place of its results, st->sums.
 *   sum   bytes of a stage's results in f32, in a ring; 0: they replace Q in the send buffer */
UPIPE_API upipe_status upi_attend_begin(upipe_ctx *c, upipe_attend *a, upipe_kv_block *own, const upi_pass *f,
                                        int i, upi_stage_buffers *st, size_t sum, size_t work)
{
    const upipe_plan *p = f->plan;
    const int rank = p->desc.rank;
    const upipe_head_range mine = upipe_plan_q(p, i, rank);
    memset(a, 0, sizeof *a);
    memset(own, 0, sizeof *own);
    a->plan = p;
    a->mask = f->layer->mask;
    a->scale = f->layer->scale;
    a->rows = own->rows = p->team_shard;
    a->tokens = p->desc.tokens;
    a->stages = p->width;
    a->heads = mine.count;
    a->first = mine.first;
    a->kv_heads = upipe_plan_kv(p, i, rank).count;
    a->q = upi_slot_at(f->slots, i);
    a->q_stride = f->slots->slot_bytes;
    a->lse = f->lse + upipe_plan_before(p, i, rank) * p->team_tokens * p->desc.batch;
    a->sums = p->desc.ring > 1 ? UPIPE_F32 : p->desc.dtype;
    own->k = st->kv.k;
    own->v = st->kv.v;
    st->sums = st->send;
    if (sum > 0) UPIPE_TRY(upipe_alloc(c, &st->sums, (size_t)p->width * sum, UPIPE_USE_SCRATCH, "sums"));
    a->work = f->attn_work;
    a->work_bytes = work;
    return a->work != NULL ? UPIPE_OK : upipe_alloc(c, &a->work, work, UPIPE_USE_SCRATCH, "attn_work");
}

/* O' of a stage, which attention reads in the backward.
 *   slot   that of the stage, free meanwhile: O of the host's own is packed into it */
UPIPE_API upipe_status upi_o_load(upipe_ctx *c, const upi_pass *f, int stage, void *slot, void *dst)
{
    const void *from = slot;
    if (f->o != NULL)
        from = upipe_offset(f->o, (size_t)stage * f->slots->slot_bytes);
    else
        UPIPE_TRY(upipe_a2a_pack(c, slot, f->plan, stage, UPIPE_A2A_Q, f->out));
    return upipe_a2a_to_heads(c, dst, from, f->plan, stage, UPIPE_A2A_Q, f->token_bytes[UPI_PROJ_V]);
}

/* Sends the results of the stages i .. i + width - 1 through out_all_to_all into their slots, where Q' is not needed
 * any more. Results that lie in st->sums and not in the send buffer are f32, and are cast into it first. Frees both.
 *   which   whose dim the results have: Q's those of dQ', V's those of O' */
UPIPE_API upipe_status upi_results_store(upipe_ctx *c, upi_pass *f, int i, upi_stage_buffers *st,
                                         upi_proj which)
{
    const upipe_plan *p = f->plan;
    const int64_t rows = p->team_tokens * p->desc.batch;
    const size_t sum = which == UPI_PROJ_Q ? p->buffers.sum_q : p->buffers.sum_o;
    int t;
    for (t = 0; t < p->width; ++t) {
        const int32_t width = upipe_plan_q(p, i + t, p->desc.rank).count * f->dim[which];
        if (st->sums != st->send && width > 0)
            UPIPE_TRY(c->ops->cast(
                c, upipe_view_packed(st->send, p->desc.dtype, rows, 1, width),
                upipe_view_packed(upipe_offset(st->sums, (size_t)t * sum), UPIPE_F32, rows, 1, width)));
        UPIPE_TRY(upipe_a2a_to_tokens(c, upi_slot_at(f->slots, i + t), st->send, p, i + t, UPIPE_A2A_Q,
                                      f->token_bytes[which]));
        UPIPE_TRY(upi_slot_fill(f->slots, i + t, &c->err));
    }
    if (st->sums != st->send) UPIPE_TRY(upipe_free(c, st->sums));
    return upipe_free(c, st->send);
}

#endif

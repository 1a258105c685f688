/* upipe_fpdt.h -- the attention block in segments of the sequence, with the host's memory behind it        layer 9
 *
 * FPDT: the sequence is cut into segments, and every segment over all ranks; a rank holds its part of each. A segment's
 * Q', K', V' are parked in the host's memory, and come back, one block ahead, where another segment needs them. With
 * chunk < heads in the plan heads dout_t in stages too (UPipe x FPDT): what lives on the device is a stage of a segment.
 *
 *     forward    for each stage, for each segment i:    project, exchange and park; attend segments j <= i; send O home
 *     backward   for each stage, for each segment j:    its K', V', and dK', dV' in f32 stay; segments i >= j pass by,
 *                their dQ' in f32 with them. Nothing is projected or exchanged again but dO, dQ, dK and dV
 *
 *     upipe_fpdt f = {layer, desc, segments, host};
 *     upipe_fpdt_fwd(&ctx, &f, &saved, x);               x in the host's memory, [segment][batch][T/segments][D]
 *     upipe_fpdt_bwd(&ctx, &f, dx, &grads, &saved, dout, x);
 *     upipe_fpdt_free(&f, &saved, &ctx.err);
 *
 * Pairs of segments that the mask hides cost nothing. What passes by is fetched one block ahead of its attention, and
 * dQ' sent back behind it: with desc.overlap on ctx->side_stream, beside the attention of others; otherwise on ctx->stream.
 * The host waits for none of these copies. Its pool must be memory that the device copies to and from without waiting
 * (pinned).
 */
#ifndef UPIPE_FPDT_H
#define UPIPE_FPDT_H

#include "upipe_layer.h"
#include "upipe_visit.h"

/* ---- the ends of a segment ---- */

/* x of the segment at hand, from the host's. */
UPIPE_API upipe_status upi_fpdt_alloc_x(upi_fpdt_pass *s, const char *x, int i)
{
    const upipe_plan *p = &s->plan;
    const upipe_shard mine = s->run.shard;
    size_t row = (size_t)(p->desc.batch * p->desc.model_dim) * upipe_dtype_bytes(p->desc.dtype), before = 0;
    void *data;
    int k;
    for (k = 0; k < i; ++k) before += (size_t)upipe_fpdt_shard(s->f, k).n * row;
    UPIPE_TRY(upi_alloc(&s->run, &data, s->z.x, "x"));
    s->run.x = upipe_view_packed(data, p->desc.dtype, p->rows, 1, (int32_t)p->desc.model_dim);
    return upi_fpdt_copy(s, data, x + before, (size_t)mine.n * row);
}

UPIPE_API upipe_status upi_fpdt_free_x(upi_fpdt_pass *s)
{
    return upi_free(&s->run, s->run.x.data);
}

/* ---- forward ---- */

/* Q' of a stage and segment, with K', V' where a round begins: projected, exchanged, parked. */
UPIPE_API upipe_status upi_fpdt_project(upi_fpdt_pass *s, const char *x, int i, int stage, const upi_kv *kv,
                                        void *q)
{
    upi_run *r = &s->run;
    const upipe_plan *p = &s->plan;
    const upi_fpdt_sizes *z = &s->z;
    const size_t e = upipe_dtype_bytes(p->desc.dtype);
    const int round = stage / z->steps;
    void *send;
    UPIPE_TRY(upi_fpdt_alloc_x(s, x, i));
    UPIPE_TRY(upi_alloc(r, &send, upipe_max_bytes(z->b.kv_send, z->b.send), "send"));
    if (stage % z->steps == 0) {
        UPIPE_TRY(upi_project(r, UPI_PROJ_K, stage, send));
        UPIPE_TRY(upipe_a2a_to_heads(r->c, kv->k, send, p, stage, UPIPE_A2A_KV, upi_each(r, UPI_PROJ_K)));
        UPIPE_TRY(upi_project(r, UPI_PROJ_V, stage, send));
        UPIPE_TRY(upipe_a2a_to_heads(r->c, kv->v, send, p, stage, UPIPE_A2A_KV, upi_each(r, UPI_PROJ_V)));
        UPIPE_TRY(upi_fpdt_copy(s, upi_fpdt_at(s->save->k, z->b.k, z->rounds, i, round), kv->k,
                                upi_fpdt_kv_bytes(s, stage, p->desc.head_dim, e)));
        UPIPE_TRY(upi_fpdt_copy(s, upi_fpdt_at(s->save->v, z->b.v, z->rounds, i, round), kv->v,
                                upi_fpdt_kv_bytes(s, stage, p->desc.v_dim, e)));
    }
    UPIPE_TRY(upi_project(r, UPI_PROJ_Q, stage, send));
    UPIPE_TRY(upipe_a2a_to_heads(r->c, q, send, p, stage, UPIPE_A2A_Q, upi_each(r, UPI_PROJ_Q)));
    UPIPE_TRY(upi_fpdt_copy(s, upi_fpdt_at(s->save->q, z->b.q, z->stages, i, stage), q,
                            upi_fpdt_q_bytes(s, stage, p->desc.head_dim, e)));
    UPIPE_TRY(upi_free(r, send));
    return upi_fpdt_free_x(s);
}

/* O' of a stage, summed in f32, goes home and is parked there, and lse here. */
UPIPE_API upipe_status upi_fpdt_finish(upi_fpdt_pass *s, int i, int stage, void *sum, const float *lse)
{
    upi_run *r = &s->run;
    const upipe_plan *p = &s->plan;
    const upi_fpdt_sizes *z = &s->z;
    const size_t bytes = upi_fpdt_q_bytes(s, stage, p->desc.v_dim, 1);
    const int sent = upipe_plan_buffer(p, UPIPE_A2A_Q, stage);
    void *send, *slot;
    UPIPE_TRY(upi_alloc(r, &send, z->b.o, "o_send"));
    if (bytes > 0)
        UPIPE_TRY(r->c->ops->cast(
            r->c, upipe_view_packed(send, p->desc.dtype, (int64_t)bytes / p->desc.v_dim, 1, p->desc.v_dim),
            upipe_view_packed(sum, UPIPE_F32, (int64_t)bytes / p->desc.v_dim, 1, p->desc.v_dim)));
    UPIPE_TRY(upi_alloc(r, &slot, z->b.slot, "slot"));
    UPIPE_TRY(upipe_a2a_to_tokens(r->c, slot, send, p, stage, UPIPE_A2A_Q, upi_each(r, UPI_PROJ_V)));
    UPIPE_TRY(upi_fpdt_copy(s, upi_fpdt_at(s->save->out, z->b.slot, z->stages, i, stage), slot,
                            upipe_plan_rows_bytes(p, sent, p->desc.v_dim)));
    UPIPE_TRY(upi_fpdt_copy(s, upi_fpdt_at(s->save->lse, z->b.stat, z->stages, i, stage), lse,
                            upi_fpdt_q_bytes(s, stage, 1, 4)));
    UPIPE_TRY(upi_free(r, slot));
    return upi_free(r, send);
}

/* Attends a stage's queries of segment i, which are here with their own keys, and sends O home. */
UPIPE_API upipe_status upi_fpdt_attend_all(upi_fpdt_pass *s, int i, int stage, upi_kv *kv, void *q)
{
    upi_run *r = &s->run;
    const upi_fpdt_sizes *z = &s->z;
    void *sum, *lse, *hop;
    upi_fpdt_visits fetches;
    upi_stages all;
    memset(&fetches, 0, sizeof fetches);
    memset(&all, 0, sizeof all);
    upi_phase(r, UPIPE_FWD_ATTN);
    UPIPE_TRY(upi_alloc(r, &sum, z->b.sum_o, "o_sum"));
    UPIPE_TRY(upi_alloc(r, &lse, z->b.stat, "lse"));
    UPIPE_TRY(upi_alloc(r, &hop, 2 * (z->b.k + z->b.v), "host_kv"));
    UPIPE_TRY(upi_fpdt_part(s, stage, 0));
    s->part.q = q;
    s->part.o = sum;
    s->part.lse = (float *)lse;
    fetches.s = s;
    fetches.own.k = kv->k;
    fetches.own.v = kv->v;
    fetches.bufs = (char *)hop;
    fetches.at = i;
    fetches.stage = stage;
    all.prepare = upi_fpdt_fwd_fetch;
    all.attend = upi_fpdt_fwd_attend;
    all.finish = upi_fpdt_fwd_leave;
    UPIPE_TRY(upi_fpdt_visit_all(&fetches, &all));
    UPIPE_TRY(upi_free(r, s->call.work));
    UPIPE_TRY(upi_free(r, hop));
    UPIPE_TRY(upi_free_kv(r, kv));
    UPIPE_TRY(upi_free(r, q));
    upi_phase(r, UPIPE_FWD_OUT);
    UPIPE_TRY(upi_fpdt_finish(s, i, stage, sum, (const float *)lse));
    UPIPE_TRY(upi_free(r, lse));
    return upi_free(r, sum);
}

/* A stage of segment i: projected (1), attended (2), or both (3). Without a causal mask all keys must be parked first. */
UPIPE_API upipe_status upi_fpdt_segment(upi_fpdt_pass *s, const char *x, int i, int stage, int what)
{
    upi_run *r = &s->run;
    const upi_fpdt_sizes *z = &s->z;
    void *q;
    upi_kv kv;
    upi_phase(r, UPIPE_FWD_IN);
    UPIPE_TRY(upi_fpdt_turn(s, i));
    UPIPE_TRY(upi_alloc_kv(r, &kv, z->b.k, z->b.v));
    UPIPE_TRY(upi_alloc(r, &q, z->b.q, "q"));
    if (what & 1) UPIPE_TRY(upi_fpdt_project(s, x, i, stage, &kv, q));
    if (what == 2)
        UPIPE_TRY(upi_fpdt_copy(
            s, q, upi_fpdt_at(s->save->q, z->b.q, z->stages, i, stage),
            upi_fpdt_q_bytes(s, stage, s->plan.desc.head_dim, upipe_dtype_bytes(s->plan.desc.dtype))));
    if (what == 2 || (what == 3 && stage % z->steps != 0)) UPIPE_TRY(upi_fpdt_load(s, i, stage, kv.k, kv.v));
    if (what & 2) return upi_fpdt_attend_all(s, i, stage, &kv, q);
    UPIPE_TRY(upi_free(r, q));
    return upi_free_kv(r, &kv);
}

/* ---- checks, begin and end ---- */

UPIPE_API upipe_status upi_fpdt_alloc_host(upi_fpdt_pass *s, char **out, size_t bytes, int n, const char *tag)
{
    void *data;
    UPIPE_TRY(
        upipe_mem_alloc(s->f->host, &data, bytes * (size_t)n * (size_t)s->f->segments, tag, &s->run.c->err));
    *out = (char *)data;
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_fpdt_begin(upi_fpdt_pass *s, upipe_ctx *c, const upipe_fpdt *f,
                                      upipe_fpdt_saved *save, const void *x)
{
    upipe_view first;
    memset(s, 0, sizeof *s);
    s->f = f;
    s->layer = f->layer;
    s->save = save;
    s->run.c = c;
    s->run.l = &s->layer;
    if (f->host == NULL) return upipe_fail(&c->err, UPIPE_ERR_ARG, "segments need a pool of the host's memory");
    if (x == NULL) return upipe_fail(&c->err, UPIPE_ERR_ARG, "x is NULL");
    if (f->desc.overlap && f->segments > 1 && c->side_stream == NULL)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "copies are to overlap, but ctx->side_stream is NULL");
    UPIPE_TRY(upi_fpdt_measure(f, c->ops, &s->z, &c->err));
    /* its rows are those of desc.rank in every segment, whether tokens divide or not */
    if (f->desc.rank != c->team->rank)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "segments of rank %d on rank %d of the team", f->desc.rank,
                        c->team->rank);
    UPIPE_TRY(upi_fpdt_turn(s, 0));
    if ((c->ops->attn_can & UPIPE_ATTN_ADD_DQ) == 0)
        return upipe_fail(&c->err, UPIPE_ERR_UNSUPPORTED, "%s adds to no gradient of q, as segments need",
                        c->ops->name);
    first = upipe_view_packed((void *)(uintptr_t)x, s->plan.desc.dtype, s->plan.rows, 1,
                              (int32_t)s->plan.desc.model_dim);
    UPIPE_TRY(upi_layer_check_own(c, &s->layer, first));
    return upi_layer_agree(c, &s->layer, f->desc.tokens, f->segments);
}

UPIPE_API upipe_status upi_fpdt_fwd(upi_fpdt_pass *s, const void *x)
{
    const upi_fpdt_sizes *z = &s->z;
    const int full = !s->f->layer.mask.causal;
    int stage, i;
    UPIPE_TRY(upi_fpdt_alloc_host(s, &s->save->out, z->b.slot, z->stages, "final_out"));
    UPIPE_TRY(upi_fpdt_alloc_host(s, &s->save->q, z->b.q, z->stages, "q"));
    UPIPE_TRY(upi_fpdt_alloc_host(s, &s->save->k, z->b.k, z->rounds, "k"));
    UPIPE_TRY(upi_fpdt_alloc_host(s, &s->save->v, z->b.v, z->rounds, "v"));
    UPIPE_TRY(upi_fpdt_alloc_host(s, &s->save->lse, z->b.stat, z->stages, "lse"));
    for (stage = 0; stage < z->stages; ++stage) {
        for (i = 0; i < s->f->segments; ++i)
            UPIPE_TRY(upi_fpdt_segment(s, (const char *)x, i, stage, full ? 1 : 3));
        for (i = 0; full && i < s->f->segments; ++i)
            UPIPE_TRY(upi_fpdt_segment(s, (const char *)x, i, stage, 2));
    }
    return UPIPE_OK;
}

/* A failed pass gives back what it took, of both pools: the host's once this rank's own copies are done, for no peer
 * reads there. Where they may never be, behind a peer that is gone, it stays. */
UPIPE_API upipe_status upi_fpdt_end(upipe_ctx *c, const upipe_fpdt *f, upipe_status s, int64_t mark,
                                    int64_t host_mark)
{
    s = upi_layer_end(c, s, mark);
    if (s == UPIPE_OK || f->host == NULL) return s;
    if (c->team != NULL && c->team->stuck)
        upipe_mem_quarantine(f->host, host_mark);
    else
        upipe_mem_rewind(f->host, host_mark);
    return s;
}

/* upipe_fpdt_fwd -- attention of x, as upipe_layer_fwd, with x and the results in the host's memory
 *   save    written, from the host's pool: upipe_fpdt_free
 *   x       [segment][batch][T][D] of this rank, the plan's type; upipe_fpdt_shard says the positions
 *   bytes   phases FWD_* of upipe_fpdt_bytes
 *   errors  as upipe_layer_fwd, and upipe_fpdt_plan's; the host's pool is then as before, too, or quarantined where
 *           copies may be stuck behind a peer
 *   paper   section 2 (FPDT); its composition with UPipe is the future work of section 6
 */
UPIPE_API upipe_status upipe_fpdt_fwd(upipe_ctx *c, const upipe_fpdt *f, upipe_fpdt_saved *save,
                                      const void *x)
{
    int64_t mark = upipe_mem_mark(c->mem), host_mark = f->host != NULL ? upipe_mem_mark(f->host) : 0;
    upi_fpdt_pass pass;
    upipe_status s;
    memset(save, 0, sizeof *save);
    upipe_mem_phase(c->mem, UPIPE_FWD_BEFORE, upipe_phase_name(UPIPE_FWD_BEFORE));
    s = upi_fpdt_begin(&pass, c, f, save, x);
    if (s == UPIPE_OK) s = upi_fpdt_fwd(&pass, x);
    if (s != UPIPE_OK) memset(save, 0, sizeof *save);
    return upi_fpdt_end(c, f, s, mark, host_mark);
}

/* ---- backward ---- */

/* dO and delta of a segment's stage dout_t to the heads: O is not needed after that. */
UPIPE_API upipe_status upi_fpdt_send_dout(upi_fpdt_pass *s, const upi_fpdt_offloaded *grads_at_tokens, const char *dout,
                                        int i, int stage)
{
    upi_run *r = &s->run;
    const upipe_plan *p = &s->plan;
    const upi_fpdt_sizes *z = &s->z;
    const int32_t sent = upipe_plan_buffer(p, UPIPE_A2A_Q, stage), v_dim = p->desc.v_dim;
    const size_t bytes = upipe_plan_rows_bytes(p, sent, v_dim);
    void *o, *dout_t, *delta, *to;
    upi_phase(r, UPIPE_BWD_OUT);
    UPIPE_TRY(upi_alloc(r, &o, z->b.slot, "slot"));
    UPIPE_TRY(upi_alloc(r, &dout_t, z->b.slot, "dout"));
    UPIPE_TRY(upi_alloc(r, &delta, z->delta, "delta"));
    UPIPE_TRY(upi_alloc(r, &to, upipe_max_bytes(z->b.o, z->b.stat), "dout"));
    UPIPE_TRY(upi_fpdt_copy(s, o, upi_fpdt_at(s->save->out, z->b.slot, z->stages, i, stage), bytes));
    UPIPE_TRY(
        upi_fpdt_copy(s, dout_t, upi_fpdt_at((char *)(uintptr_t)dout, z->b.slot, z->stages, i, stage), bytes));
    UPIPE_TRY(r->c->ops->rowdot(r->c, upipe_view_packed(delta, UPIPE_F32, p->rows * sent, 1, 1),
                                upipe_view_packed(o, p->desc.dtype, p->rows * sent, 1, v_dim),
                                upipe_view_packed(dout_t, p->desc.dtype, p->rows * sent, 1, v_dim)));
    UPIPE_TRY(upipe_a2a_to_heads(r->c, to, dout_t, p, stage, UPIPE_A2A_Q, upi_each(r, UPI_PROJ_V)));
    UPIPE_TRY(upi_fpdt_copy(s, upi_fpdt_at(grads_at_tokens->dout, z->b.o, z->stages, i, stage), to,
                            upi_fpdt_q_bytes(s, stage, v_dim, upipe_dtype_bytes(p->desc.dtype))));
    UPIPE_TRY(upipe_a2a_to_heads(r->c, to, delta, p, stage, UPIPE_A2A_Q, 4));
    UPIPE_TRY(upi_fpdt_copy(s, upi_fpdt_at(grads_at_tokens->delta, z->b.stat, z->stages, i, stage), to,
                            upi_fpdt_q_bytes(s, stage, 1, 4)));
    UPIPE_TRY(upi_free(r, to));
    UPIPE_TRY(upi_free(r, delta));
    UPIPE_TRY(upi_free(r, dout_t));
    return upi_free(r, o);
}

/* dQ' of a segment that has seen all: home, then dWq. Its dout's slots hold dQ afterwards. */
UPIPE_API upipe_status upi_fpdt_send_dq(upi_fpdt_pass *s, const char *x, char *dout, int i, int stage,
                                        void *dq, float *dw)
{
    upi_run *r = &s->run;
    const upi_fpdt_sizes *z = &s->z;
    const upipe_plan *p;
    const int32_t d = s->f->desc.head_dim;
    void *send, *slot;
    int64_t rows;
    UPIPE_TRY(upi_fpdt_turn(s, i));
    p = &s->plan;
    rows = (int64_t)(upi_fpdt_q_bytes(s, stage, d, 1) / (size_t)d);
    UPIPE_TRY(upi_fpdt_alloc_x(s, x, i));
    UPIPE_TRY(upi_alloc(r, &send, z->b.q, "dq_send"));
    if (rows > 0)
        UPIPE_TRY(r->c->ops->cast(r->c, upipe_view_packed(send, p->desc.dtype, rows, 1, d),
                                  upipe_view_packed(dq, UPIPE_F32, rows, 1, d)));
    UPIPE_TRY(upi_alloc(r, &slot, z->b.slot, "slot"));
    UPIPE_TRY(upipe_a2a_to_tokens(r->c, slot, send, p, stage, UPIPE_A2A_Q, upi_each(r, UPI_PROJ_Q)));
    UPIPE_TRY(upi_free(r, send));
    UPIPE_TRY(upi_project_bwd(r, UPI_PROJ_Q, stage, slot, dw));
    UPIPE_TRY(upi_fpdt_copy(s, upi_fpdt_at(dout, z->b.slot, z->stages, i, stage), slot,
                            upipe_plan_rows_bytes(p, upipe_plan_buffer(p, UPIPE_A2A_Q, stage), d)));
    UPIPE_TRY(upi_free(r, slot));
    return upi_fpdt_free_x(s);
}

/* dK' or dV' of the segment at hand goes home, is summed where ranks share heads, gives dW, and is parked. */
UPIPE_API upipe_status upi_fpdt_send_dkv(upi_fpdt_pass *s, upi_proj which, int j, int last, float *g,
                                         char *grads_at_tokens, float *dw)
{
    upi_run *r = &s->run;
    const upi_fpdt_sizes *z = &s->z;
    const upipe_plan *p = &s->plan;
    const int stage = last - z->steps + 1, round = stage / z->steps, dim = upi_dim(p, which),
              all = p->desc.kv_heads;
    const size_t e = upipe_dtype_bytes(p->desc.dtype), size = which == UPI_PROJ_K ? z->b.token_dk : z->b.token_dv;
    const int64_t rows = p->rows * (p->kv_partial ? all : p->desc.ranks * p->kv_per_rank);
    const int64_t mine = (int64_t)upi_fpdt_kv_bytes(s, stage, 1, 1);
    char *host = upi_fpdt_at(grads_at_tokens, z->kv_tokens * (size_t)dim, 1, j, 0);
    void *tokens_grad, *buf, *sum;
    UPIPE_TRY(upi_alloc(r, &tokens_grad, size, "home"));
    if (p->kv_partial) {
        /* in the storage type, or where a rank's heads are uneven, in f32 first */
        sum = tokens_grad;
        if (upi_dkv_accumulates(p)) {
            UPIPE_TRY(upi_alloc(r, &sum, size / e * 4, "dkv_sum"));
            UPIPE_TRY(r->c->ops->zero(r->c, sum, (size_t)(rows * dim) * 4));
        }
        UPIPE_TRY(upi_alloc(r, &buf, z->b.partial, "kv_partial"));
        UPIPE_TRY(upi_send_partial(r, last, which, g, sum, buf));
        UPIPE_TRY(upi_free(r, buf));
        if (sum != tokens_grad) {
            UPIPE_TRY(r->c->ops->cast(r->c, upipe_view_packed(tokens_grad, p->desc.dtype, rows, 1, dim),
                                      upipe_view_packed(sum, UPIPE_F32, rows, 1, dim)));
            UPIPE_TRY(upi_free(r, sum));
        }
    } else {
        UPIPE_TRY(upi_alloc(r, &buf, which == UPI_PROJ_K ? z->b.k : z->b.v, "kv_cast"));
        UPIPE_TRY(r->c->ops->cast(r->c, upipe_view_packed(buf, p->desc.dtype, mine, 1, dim),
                                  upipe_view_packed(g, UPIPE_F32, mine, 1, dim)));
        UPIPE_TRY(upipe_a2a_to_tokens(r->c, tokens_grad, buf, p, last, UPIPE_A2A_DKV, upi_each(r, which)));
        UPIPE_TRY(upi_free(r, buf));
    }
    if (upi_dkv_accumulates(p))
        UPIPE_TRY(upi_project_heads_bwd(r, which, upi_all_kv_heads(p), tokens_grad, dw));
    else
        UPIPE_TRY(upi_project_bwd(r, which, stage, tokens_grad, dw));
    /* [Hkv][batch][T][dim]; a round's heads of a rank lie together */
    host +=
        p->kv_partial ? 0 : upipe_plan_rows_bytes(p, (int64_t)round * p->desc.ranks * p->kv_per_rank, dim);
    UPIPE_TRY(upi_fpdt_copy(s, host, tokens_grad, (size_t)(rows * dim) * e));
    return upi_free(r, tokens_grad);
}

/* A round's dK', dV' of segment j, before a stage adds to them. */
UPIPE_API upipe_status upi_fpdt_alloc_dkv(upi_fpdt_pass *s, const upi_fpdt_offloaded *grads_at_tokens, int j, int stage,
                                         void **g)
{
    const size_t bytes = s->z.b.dk + s->z.b.dv;
    UPIPE_TRY(upi_alloc(&s->run, g, bytes, "dkv"));
    if (stage % s->z.steps == 0) return s->run.c->ops->zero(s->run.c, *g, bytes);
    return upi_fpdt_copy(s, *g, upi_fpdt_at(grads_at_tokens->dkv, bytes, 1, j, 0), bytes);
}

/* Segment j's keys and values: a stage's queries that see them pass by. */
UPIPE_API upipe_status upi_fpdt_host(upi_fpdt_pass *s, const upi_fpdt_offloaded *grads_at_tokens, int j, int stage,
                                     void *g)
{
    upi_run *r = &s->run;
    const upi_fpdt_sizes *z = &s->z;
    void *kv, *bufs;
    upi_fpdt_visits fetches;
    upi_stages all;
    memset(&fetches, 0, sizeof fetches);
    memset(&all, 0, sizeof all);
    UPIPE_TRY(upi_alloc(r, &kv, z->b.k + z->b.v, "kv"));
    UPIPE_TRY(upi_alloc(r, &bufs, 2 * upi_fpdt_fetch_bytes(z), "visitors"));
    UPIPE_TRY(upi_fpdt_part(s, stage, 1));
    UPIPE_TRY(upi_fpdt_load(s, j, stage, kv, (char *)kv + z->b.k));
    fetches.s = s;
    fetches.grads_at_tokens = grads_at_tokens;
    fetches.own.k = kv;
    fetches.own.v = (char *)kv + z->b.k;
    fetches.own.dk = (float *)g;
    fetches.own.dv = fetches.own.dk + z->b.dk / 4;
    fetches.bufs = (char *)bufs;
    fetches.at = j;
    fetches.stage = stage;
    fetches.backward = 1;
    all.prepare = upi_fpdt_bwd_fetch;
    all.attend = upi_fpdt_bwd_attend;
    all.finish = upi_fpdt_bwd_leave;
    UPIPE_TRY(upi_fpdt_visit_all(&fetches, &all));
    UPIPE_TRY(upi_free(r, s->call.work));
    UPIPE_TRY(upi_free(r, bufs));
    return upi_free(r, kv);
}

/* A stage of segment j as keys and values, and what is complete then: dK, dV after a round's last stage, dQ of the
 * segments that have seen all that they see (their own last; without a causal mask all, with the last keys). */
UPIPE_API upipe_status upi_fpdt_segment_bwd(upi_fpdt_pass *s, const upi_fpdt_offloaded *grads_at_tokens, const char *x,
                                            char *dout, int j, int stage, upipe_grads *grads)
{
    const upipe_fpdt *f = s->f;
    upi_run *r = &s->run;
    const upi_fpdt_sizes *z = &s->z;
    const int full = !f->layer.mask.causal;
    const size_t bytes = z->b.dk + z->b.dv;
    void *g, *dq;
    int i;
    upi_phase(r, UPIPE_BWD_ATTN);
    UPIPE_TRY(upi_fpdt_turn(s, j));
    UPIPE_TRY(upi_fpdt_alloc_dkv(s, grads_at_tokens, j, stage, &g));
    UPIPE_TRY(upi_fpdt_host(s, grads_at_tokens, j, stage, g));
    upi_phase(r, UPIPE_BWD_IN);
    if (stage % z->steps == z->steps - 1) {
        UPIPE_TRY(upi_fpdt_turn(s, j));
        UPIPE_TRY(upi_fpdt_alloc_x(s, x, j));
        UPIPE_TRY(upi_fpdt_send_dkv(s, UPI_PROJ_K, j, stage, (float *)g, grads_at_tokens->dk, grads->wk));
        UPIPE_TRY(upi_fpdt_send_dkv(s, UPI_PROJ_V, j, stage, (float *)g + z->b.dk / 4, grads_at_tokens->dv, grads->wv));
        UPIPE_TRY(upi_fpdt_free_x(s));
    } else {
        UPIPE_TRY(upi_fpdt_copy(s, upi_fpdt_at(grads_at_tokens->dkv, bytes, 1, j, 0), g, bytes));
    }
    UPIPE_TRY(upi_free(r, g));
    for (i = full ? 0 : j; i <= j && (!full || j == f->segments - 1); ++i) {
        UPIPE_TRY(upi_alloc(r, &dq, z->b.sum_q, "dq_sum"));
        UPIPE_TRY(upi_fpdt_turn(s, i));
        UPIPE_TRY(upi_fpdt_copy(s, dq, upi_fpdt_at(grads_at_tokens->dq, z->b.sum_q, z->stages, i, stage),
                                upi_fpdt_q_bytes(s, stage, f->desc.head_dim, 4)));
        UPIPE_TRY(upi_fpdt_send_dq(s, x, dout, i, stage, dq, grads->wq));
        UPIPE_TRY(upi_free(r, dq));
    }
    return UPIPE_OK;
}

/* dX of segment i, from its dQ, dK and dV. */
UPIPE_API upipe_status upi_fpdt_grad_x(upi_fpdt_pass *s, const upi_fpdt_offloaded *grads_at_tokens, char *dx,
                                       const char *dout, int i)
{
    upi_run *r = &s->run;
    const upi_fpdt_sizes *z = &s->z;
    const upipe_plan *p = &s->plan;
    const size_t dk = z->kv_tokens * (size_t)s->f->desc.head_dim, dv = z->kv_tokens * (size_t)upi_dim(p, UPI_PROJ_V);
    const size_t round = upipe_plan_rows_bytes(p, (int64_t)p->desc.ranks * p->kv_per_rank, 1);
    size_t before = 0, row;
    upipe_slots slots;
    upi_dkv_sums grads;
    void *q, *k, *v, *out;
    int n;
    row = (size_t)(p->desc.batch * p->desc.model_dim) * upipe_dtype_bytes(p->desc.dtype);
    for (n = 0; n < i; ++n) before += (size_t)upipe_fpdt_shard(s->f, n).n * row;
    UPIPE_TRY(upi_alloc(r, &q, z->b.slot * (size_t)z->stages, "dq"));
    UPIPE_TRY(upi_alloc(r, &k, dk, "dk"));
    UPIPE_TRY(upi_alloc(r, &v, dv, "dv"));
    UPIPE_TRY(upi_alloc(r, &out, z->x, "dx"));
    UPIPE_TRY(upi_fpdt_copy(s, q, upi_fpdt_at((char *)(uintptr_t)dout, z->b.slot, z->stages, i, 0),
                            z->b.slot * (size_t)z->stages));
    UPIPE_TRY(upi_fpdt_copy(s, k, upi_fpdt_at(grads_at_tokens->dk, dk, 1, i, 0), dk));
    UPIPE_TRY(upi_fpdt_copy(s, v, upi_fpdt_at(grads_at_tokens->dv, dv, 1, i, 0), dv));
    upipe_slots_init(&slots, q, z->b.slot, z->stages, UPIPE_SLOT_FULL);
    for (n = 0; n < z->rounds; ++n) {
        grads.k[n] = (char *)k + round * (size_t)(n * p->desc.head_dim);
        grads.v[n] = (char *)v + round * (size_t)(n * p->desc.v_dim);
    }
    UPIPE_TRY(upi_grad_x(r, upipe_view_packed(out, p->desc.dtype, p->rows, 1, (int32_t)p->desc.model_dim),
                         &slots, &grads));
    UPIPE_TRY(upi_fpdt_copy(s, dx + before, out, (size_t)s->run.shard.n * row));
    UPIPE_TRY(upi_free(r, out));
    UPIPE_TRY(upi_free(r, v));
    UPIPE_TRY(upi_free(r, k));
    return upi_free(r, q);
}

UPIPE_API upipe_status upi_fpdt_bwd(upi_fpdt_pass *s, char *dx, upipe_grads *grads, char *dout, const char *x)
{
    const upi_fpdt_sizes *z = &s->z;
    upi_run *r = &s->run;
    upipe_ctx *c = r->c;
    upipe_mem *host = s->f->host;
    upi_fpdt_offloaded grads_at_tokens;
    void *norm;
    int i, stage;
    if (z->s.qk_norm) {
        size_t bytes =
            (size_t)(s->plan.desc.heads + s->plan.desc.kv_heads) * (size_t)s->plan.desc.head_dim * 4;
        UPIPE_TRY(upi_alloc(r, &norm, bytes, "norm_grad"));
        UPIPE_TRY(c->ops->zero(c, norm, bytes));
        r->norm = (float *)norm;
    }
    UPIPE_TRY(upi_fpdt_alloc_host(s, &grads_at_tokens.dout, z->b.o, z->stages, "dout"));
    UPIPE_TRY(upi_fpdt_alloc_host(s, &grads_at_tokens.delta, z->b.stat, z->stages, "delta"));
    UPIPE_TRY(upi_fpdt_alloc_host(s, &grads_at_tokens.dq, z->b.sum_q, z->stages, "dq"));
    UPIPE_TRY(upi_fpdt_alloc_host(s, &grads_at_tokens.dk, z->kv_tokens * (size_t)s->plan.desc.head_dim, 1, "dk"));
    UPIPE_TRY(upi_fpdt_alloc_host(s, &grads_at_tokens.dkv, z->steps > 1 ? z->b.dk + z->b.dv : 0, 1, "dkv"));
    UPIPE_TRY(upi_fpdt_alloc_host(s, &grads_at_tokens.dv, z->kv_tokens * (size_t)s->plan.desc.v_dim, 1, "dv"));
    for (i = 0; i < s->f->segments; ++i) {
        UPIPE_TRY(upi_fpdt_turn(s, i));
        for (stage = 0; stage < z->stages; ++stage) UPIPE_TRY(upi_fpdt_send_dout(s, &grads_at_tokens, dout, i, stage));
    }
    for (stage = 0; stage < z->stages; ++stage)
        for (i = 0; i < s->f->segments; ++i)
            UPIPE_TRY(upi_fpdt_segment_bwd(s, &grads_at_tokens, x, dout, i, stage, grads));
    UPIPE_TRY(upi_grad_weights(r, grads));
    for (i = 0; i < s->f->segments; ++i) {
        UPIPE_TRY(upi_fpdt_turn(s, i));
        UPIPE_TRY(upi_fpdt_grad_x(s, &grads_at_tokens, dx, dout, i));
    }
    UPIPE_TRY(c->ops->sync(c)); /* the host's blocks are still being read */
    UPIPE_TRY(upipe_mem_free(host, grads_at_tokens.dout, &c->err));
    UPIPE_TRY(upipe_mem_free(host, grads_at_tokens.delta, &c->err));
    UPIPE_TRY(upipe_mem_free(host, grads_at_tokens.dq, &c->err));
    UPIPE_TRY(upipe_mem_free(host, grads_at_tokens.dk, &c->err));
    UPIPE_TRY(upipe_mem_free(host, grads_at_tokens.dkv, &c->err));
    return upipe_mem_free(host, grads_at_tokens.dv, &c->err);
}

/* upipe_fpdt_bwd -- gradients of x and of the weights
 *   dx      host, of x's shape, written; may be x itself
 *   grads   +=, as in upipe_layer_bwd
 *   save    read; stays the caller's
 *   dout    the gradient of O in save->out's layout (upipe_fpdt_scatter); holds dQ afterwards
 *   x       the forward's
 *   bytes   phases BWD_* of upipe_fpdt_bytes
 *   errors  as upipe_fpdt_fwd
 */
UPIPE_API upipe_status upipe_fpdt_bwd(upipe_ctx *c, const upipe_fpdt *f, void *dx, upipe_grads *grads,
                                      upipe_fpdt_saved *save, void *dout, const void *x)
{
    int64_t mark = upipe_mem_mark(c->mem), host_mark = f->host != NULL ? upipe_mem_mark(f->host) : 0;
    upi_fpdt_pass pass;
    upipe_status s;
    upipe_mem_phase(c->mem, UPIPE_BWD_BEFORE, upipe_phase_name(UPIPE_BWD_BEFORE));
    s = upi_fpdt_begin(&pass, c, f, save, x);
    if (s == UPIPE_OK && (save->out == NULL || dout == NULL || dx == NULL))
        s = upipe_fail(&c->err, UPIPE_ERR_ARG, "%s is not there",
                     save->out == NULL ? "the forward's result" : "dout or dx");
    if (s == UPIPE_OK && f->layer.q_norm_weight == NULL && (grads->q_norm_weight != NULL || grads->k_norm_weight != NULL))
        s = upipe_fail(&c->err, UPIPE_ERR_ARG, "gradients of norm weights are wanted without a QK norm");
    if (s == UPIPE_OK && f->layer.mask.sinks == NULL && grads->sinks != NULL)
        s = upipe_fail(&c->err, UPIPE_ERR_ARG, "a gradient of sinks is wanted without sinks");
    pass.run.dsinks = grads->sinks;
    if (s == UPIPE_OK) s = upi_fpdt_bwd(&pass, (char *)dx, grads, (char *)dout, (const char *)x);
    return upi_fpdt_end(c, f, s, mark, host_mark);
}

#endif

/* upipe_layer.h -- the attention block, forward and backward: composition of the primitives        layer 7
 *
 * x (already normed) -> Q, K, V -> [QK norm] -> [RoPE] -> exchange -> attention -> exchange -> slots of
 * final_out, stage by stage (the paper's Figure (b)). With chunk = heads in the plan the same code is
 * DeepSpeed-Ulysses.
 *
 *     upipe_layer_fwd(&ctx, &layer, &saved, x);              saved: final_out and lse, in the pool
 *     upipe_layer_bwd(&ctx, &layer, dx, &grads, &saved, &dout, x);     dx may be x itself
 *
 * A failed call gives back what it took, and aborts the team so that no rank waits for this one. Where a peer
 * may still read this rank's memory (team->quarantine), the pool is locked instead until upipe_mem_release.
 */
#ifndef UPIPE_LAYER_H
#define UPIPE_LAYER_H

#include "upipe_step.h"

/* ---- forward ---- */

/* f32 sums of what attention gives, where a ring adds to them; in the storage type otherwise, in `send`. */
UPIPE_API upipe_status upi_alloc_sums(upi_run *r, void **sums, size_t bytes, void *send, const char *tag,
                                     int zero)
{
    int t;
    for (t = 0; t < r->p->width; ++t) {
        sums[t] = send;
        if (bytes == 0) continue;
        UPIPE_TRY(upi_alloc(r, &sums[t], bytes, tag));
        if (zero) UPIPE_TRY(r->c->ops->zero(r->c, sums[t], bytes));
    }
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_free_sums(upi_run *r, void **sums, const void *send)
{
    int t;
    for (t = 0; t < r->p->width && sums[t] != send; ++t) UPIPE_TRY(upi_free(r, sums[t]));
    return UPIPE_OK;
}

/* The sums of a stage in the storage type, in the send buffer. */
UPIPE_API upipe_status upi_round_sums(upi_run *r, void *send, void *sums, int stage, int dim)
{
    const upipe_plan *p = r->p;
    const int64_t rows = p->seq * p->desc.batch;
    const int32_t width = upipe_plan_q(p, stage, r->c->team->rank).count * dim;
    if (sums == send || width == 0) return UPIPE_OK;
    return r->c->ops->cast(r->c, upipe_view_packed(send, p->desc.dtype, rows, 1, width),
                           upipe_view_packed(sums, UPIPE_F32, rows, 1, width));
}

/* lse of a stage's heads on this rank. */
UPIPE_API float *upi_lse(const upi_run *r, const upipe_saved *save, int stage)
{
    return save->lse + upipe_plan_before(r->p, stage, r->c->team->rank) * r->p->seq * r->p->desc.batch;
}

/* What a stage, or `width` of them that attend together, has: two are under way where stages overlap. */
typedef struct upi_stage_buf {
    upi_kv kv, next, own; /* next, own: fetched ahead */
    upi_kv g;             /* backward */
    void *send, *q, *dout, *delta;
    upipe_ring_part *parts;
    void **sums;
    int ahead;
} upi_stage_buf;

/* One pass through the stages. */
typedef struct upi_pass {
    upi_run run, other; /* `other` is the side stream's */
    upipe_saved *save;
    upi_stage_buf buf[2];
    upipe_ring_part parts[UPIPE_STAGES_MAX];
    void *sums[UPIPE_STAGES_MAX];
    upipe_ring_call call;
    upi_kv kv; /* kept through all stages */
    /* backward */
    upi_kv g;
    upipe_slots *dout;
    upipe_grads *grads;
    struct upi_dkv_sums *grads_at_tokens;
} upi_pass;

UPIPE_API upi_run *upi_pass_run(upi_pass *s, const upipe_ctx *c)
{
    return c == s->run.c ? &s->run : &s->other;
}

/* The buffer of stage i, and that of the one before. Overlapping stages are one wide. */
UPIPE_API upi_stage_buf *upi_pass_buf(upi_pass *s, int i)
{
    return &s->buf[s->run.p->overlap ? i % 2 : 0];
}

/* Runs the stages; scratch of attention that overlaps is taken before, and no other line touches the pool. */
UPIPE_API upipe_status upi_pass_stages(upi_pass *s, upi_stages *all, int backward)
{
    upi_run *r = &s->run;
    const upipe_plan *p = r->p;
    void *work = NULL;
    int i;
    for (i = 0; i < 2; ++i) {
        s->buf[i].parts = s->parts + i;
        s->buf[i].sums = s->sums + i;
        s->buf[i].kv = s->kv;
        s->buf[i].g = s->g;
    }
    all->arg = s;
    all->n = p->stages;
    all->step = p->width;
    all->side_stream = p->overlap ? r->c->side_stream : NULL;
    if (p->overlap)
        UPIPE_TRY(upi_alloc(r, &work, backward ? r->bytes.attn_bwd : r->bytes.attn_fwd, "attn_work"));
    r->attn_work = work;
    s->other = *r;
    if (p->overlap) s->other.c = &r->c->side_stream->ctx;
    UPIPE_TRY(upi_stages_run(all, r->c));
    s->kv = upi_pass_buf(s, p->stages - 1)->kv;
    s->g = upi_pass_buf(s, p->stages - 1)->g;
    return p->overlap ? upi_free(r, work) : UPIPE_OK;
}

/* Q', K' and V' of a stage. */
UPIPE_API upipe_status upi_fwd_prepare(void *arg, upipe_ctx *c, int i)
{
    upi_pass *s = (upi_pass *)arg;
    upi_run *r = upi_pass_run(s, c);
    upi_stage_buf *m = upi_pass_buf(s, i);
    int t;
    upi_phase(r, UPIPE_FWD_IN);
    if (i > 0) m->kv = upi_pass_buf(s, i - 1)->kv;
    if (upipe_plan_stage(r->p, i).kv_fresh) UPIPE_TRY(upi_fetch_kv(r, i, &m->kv));
    UPIPE_TRY(upi_alloc(r, &m->send, r->buffers.send, "q_send"));
    for (t = 0; t < r->p->width; ++t) {
        void *q;
        UPIPE_TRY(upipe_slot_lend(&s->save->out, i + t, &q, &c->err));
        UPIPE_TRY(upi_project(r, UPI_PROJ_Q, i + t, m->send));
        UPIPE_TRY(upipe_a2a_to_heads(c, q, m->send, r->p, i + t, UPIPE_A2A_Q, upi_each(r, UPI_PROJ_Q)));
        m->parts[t].q = q;
        m->parts[t].lse = upi_lse(r, s->save, i + t);
    }
    memset(&m->next, 0, sizeof m->next);
    m->ahead = upi_ahead(r->p, i);
    return m->ahead ? upi_fetch_begin(r, m->ahead, &m->next, &m->own) : UPIPE_OK;
}

UPIPE_API upipe_status upi_fwd_attend(void *arg, upipe_ctx *c, int i)
{
    upi_pass *s = (upi_pass *)arg;
    upi_run *r = upi_pass_run(s, c);
    upi_stage_buf *m = upi_pass_buf(s, i);
    int t;
    if (!r->p->overlap) upi_phase(r, UPIPE_FWD_ATTN);
    UPIPE_TRY(upi_alloc_sums(r, m->sums, r->buffers.sum_o, m->send, "o_sum", 0));
    for (t = 0; t < r->p->width; ++t) m->parts[t].o = m->sums[t];
    return upi_attend(r, &s->call, m->parts, i, m->kv, 0);
}

/* O' goes home, into its slot. */
UPIPE_API upipe_status upi_fwd_finish(void *arg, upipe_ctx *c, int i)
{
    upi_pass *s = (upi_pass *)arg;
    upi_run *r = upi_pass_run(s, c);
    upi_stage_buf *m = upi_pass_buf(s, i);
    const upipe_plan *p = r->p;
    int t;
    if (p->overlap) upi_phase(r, UPIPE_FWD_ATTN);
    if (p->schedule != UPIPE_UNEVEN && upipe_plan_stage(p, i + p->width - 1).kv_last)
        UPIPE_TRY(upi_free_kv(r, &m->kv));
    if (m->ahead) {
        UPIPE_TRY(upi_fetch_end(r, m->ahead, &m->own));
        m->kv = m->next;
    }

    upi_phase(r, UPIPE_FWD_OUT);
    for (t = 0; t < p->width; ++t) {
        UPIPE_TRY(upi_round_sums(r, m->send, m->sums[t], i + t, p->desc.v_dim));
        UPIPE_TRY(upipe_a2a_to_tokens(c, (void *)(uintptr_t)m->parts[t].q, m->send, p, i + t, UPIPE_A2A_Q,
                                      upi_each(r, UPI_PROJ_V)));
        UPIPE_TRY(upipe_slot_fill(&s->save->out, i + t, &c->err));
    }
    UPIPE_TRY(upi_free_sums(r, m->sums, m->send));
    return upi_free(r, m->send);
}

UPIPE_API upipe_status upi_layer_fwd(upi_pass *s)
{
    upi_run *r = &s->run;
    upi_stages all;
    void *lse;
    memset(&all, 0, sizeof all);
    all.prepare = upi_fwd_prepare;
    all.attend = upi_fwd_attend;
    all.finish = upi_fwd_finish;
    upi_phase(r, UPIPE_FWD_IN);
    UPIPE_TRY(upipe_layer_slots_alloc(r->c, r->l, &s->save->out, UPIPE_SLOT_EMPTY, "final_out"));
    UPIPE_TRY(upi_alloc(r, &lse, r->buffers.lse, "lse"));
    s->save->lse = (float *)lse;
    if (r->p->schedule == UPIPE_UNEVEN) UPIPE_TRY(upi_alloc_kept(r, &s->kv));
    UPIPE_TRY(upi_pass_stages(s, &all, 0));
    return r->p->schedule == UPIPE_UNEVEN ? upi_free_kv(r, &s->kv) : UPIPE_OK;
}

/* upipe_layer_fwd -- attention of x: projections, exchange, attention, stage by stage
 *   save    written: slots full of O, and lse; from the pool, upipe_saved_free gives them back
 *   x       [rows][1][D] view of this rank's tokens, the plan's type
 *   bytes   phases FWD_* of upipe_plan_bytes; sends upipe_plan_sent(plan, 0), to the ring upipe_plan_sent_ring(plan, 0)
 *   errors  ARG, UNSUPPORTED, MEMORY, MISMATCH, TIMEOUT, ABORTED; the team is then aborted, the pool as
 *           before
 *   paper   section 3.3 and Figure (b)
 */
UPIPE_API upipe_status upipe_layer_fwd(upipe_ctx *c, const upipe_layer *l, upipe_saved *save, upipe_view x)
{
    int64_t mark = upipe_mem_mark(c->mem);
    upi_pass pass;
    upipe_status s;
    memset(&pass, 0, sizeof pass);
    memset(save, 0, sizeof *save);
    pass.save = save;
    upipe_mem_phase(c->mem, UPIPE_FWD_BEFORE, upipe_phase_name(UPIPE_FWD_BEFORE));
    s = upi_layer_begin(&pass.run, c, l, x);
    if (s == UPIPE_OK) s = upi_layer_fwd(&pass);
    if (s != UPIPE_OK) memset(save, 0, sizeof *save);
    return upi_layer_end(c, s, mark);
}

/* ---- backward ---- */

/* Gradients of K and V on their way to dX. By rounds in storage type,
 * [round][rank][batch][T][kv_per_rank][dim]; where ranks or stages share a head, one buffer [Hkv][batch][T][dim],
 * which is a sum in f32 until the last stage where rounds are not common. */
typedef struct upi_dkv_sums {
    void *k[UPIPE_STAGES_MAX], *v[UPIPE_STAGES_MAX];
} upi_dkv_sums;

/* A round is over: dK' (or dV'), f32 by head, goes home to the tokens; consumes grad. */
UPIPE_API upipe_status upi_dkv_to_tokens(upi_run *r, int stage, upi_proj which, float *grad, void **grads_at_tokens,
                                     const char *tag, void *buf)
{
    const upipe_plan *p = r->p;
    const int64_t rows = p->seq * p->desc.batch;
    const int32_t width = p->kv_per_rank * upi_dim(p, which);
    void *send = grad;
    UPIPE_TRY(upi_alloc(r, grads_at_tokens, which == UPI_PROJ_K ? r->buffers.token_dk : r->buffers.token_dv, tag));
    if (buf != NULL) {
        send = buf;
        UPIPE_TRY(r->c->ops->cast(r->c, upipe_view_packed(buf, p->desc.dtype, rows, 1, width),
                                  upipe_view_packed(grad, UPIPE_F32, rows, 1, width)));
    }
    UPIPE_TRY(upipe_a2a_to_tokens(r->c, *grads_at_tokens, send, p, stage, UPIPE_A2A_DKV, upi_each(r, which)));
    return upi_free(r, grad);
}

/* Partial gradients of shared heads meet at their tokens in f32 and are summed in rank order.
 *   sum   [Hkv][batch][T][dim]: =, or f32 and += where rounds are not common
 *   buffer  f32 [rank][batch][T][n][dim]
 */
UPIPE_API upipe_status upi_send_partial(upi_run *r, int stage, upi_proj which, float *grad, void *sum,
                                        void *buf)
{
    const upipe_plan *p = r->p;
    const int more = upi_dkv_accumulates(p), dim = upi_dim(p, which);
    const upipe_dtype type = more ? UPIPE_F32 : p->desc.dtype;
    const int64_t head = p->rows * dim;
    const size_t e = upipe_dtype_bytes(type);
    int64_t at = 0;
    int rank = 0, same, j;
    UPIPE_TRY(upipe_a2a_to_tokens(r->c, buf, grad, p, stage, UPIPE_A2A_DKV, (size_t)dim * 4));
    while (rank < p->desc.ranks) {
        const upipe_span s = upipe_plan_part(p, UPIPE_A2A_DKV, stage, rank);
        /* neighbours that had the same heads are one sum */
        for (same = 1; rank + same < p->desc.ranks; ++same) {
            upipe_span next = upipe_plan_part(p, UPIPE_A2A_DKV, stage, rank + same);
            if (next.first != s.first || next.count != s.count || s.count == 0) break;
        }
        for (j = 0; j < s.count; ++j) {
            /* head j of [batch][T][n][dim] */
            const float *from = (const float *)buf + at + (int64_t)j * dim;
            upipe_view to =
                upipe_view_packed((char *)sum + (size_t)((s.first + j) * head) * e, type, p->rows, 1, dim);
            if (s.count == 1) {
                UPIPE_TRY(r->c->ops->sum(r->c, to, from, head, same, more));
            } else {
                upipe_view part = upipe_view_make((void *)(uintptr_t)from, UPIPE_F32, p->rows,
                                                  (int64_t)s.count * dim, 1, dim, dim);
                int i;
                for (i = 0; i < same; ++i, part.data = (float *)part.data + head * s.count)
                    UPIPE_TRY(r->c->ops->add(r->c, to, part));
            }
        }
        at += same * head * s.count;
        rank += same;
    }
    return UPIPE_OK;
}

/* With a ring that gathers: gradients of all its ranks' K' (or V') come home; consumes all of them where they are not
 * kept through all stages. */
UPIPE_API upipe_status upi_dkv_reduce(upi_run *r, int stage, upi_proj which, float *own, float *all,
                                          float *buf)
{
    const int heads = upipe_plan_part(r->p, UPIPE_A2A_DKV, stage, r->c->team->rank).count;
    if (heads == 0) return UPIPE_OK;
    return upipe_ring_reduce_scatter(r->c, r->p, heads, upi_dim(r->p, which), own, all, buf);
}

/* The last stage of a round: dK' and dV' leave, dWk and dWv are formed. dk, dv are given back, or kept where rounds are
 * not common. */
UPIPE_API upipe_status upi_end_round(upi_run *r, int stage, upi_kv *g, upi_dkv_sums *grads_at_tokens, upipe_grads *grads)
{
    const upipe_plan *p = r->p;
    const upipe_buffers *b = &r->buffers;
    const int keep = p->schedule == UPIPE_UNEVEN, first = stage - p->steps + 1;
    int round = upipe_plan_stage(p, stage).round;
    upi_kv own = *g;
    void *buf;
    if (upi_gathers(p)) {
        UPIPE_TRY(upi_alloc(r, &own.k, b->dk, "dk"));
        UPIPE_TRY(upi_alloc(r, &own.v, b->dv, "dv"));
        UPIPE_TRY(upi_alloc(r, &buf, (size_t)p->desc.ring * upipe_max_bytes(b->dk, b->dv), "ring_partial"));
        UPIPE_TRY(upi_dkv_reduce(r, stage, UPI_PROJ_K, (float *)own.k, (float *)g->k, (float *)buf));
        UPIPE_TRY(upi_dkv_reduce(r, stage, UPI_PROJ_V, (float *)own.v, (float *)g->v, (float *)buf));
        UPIPE_TRY(upi_free(r, buf));
        if (!keep) UPIPE_TRY(upi_free_kv(r, g));
    }
    if (p->kv_partial) {
        const int sums = upi_dkv_accumulates(p);
        UPIPE_TRY(upi_alloc(r, &buf, b->partial, "kv_partial"));
        if (!sums) UPIPE_TRY(upi_alloc(r, &grads_at_tokens->k[0], b->token_dk, "dk"));
        UPIPE_TRY(upi_send_partial(r, stage, UPI_PROJ_K, (float *)own.k, grads_at_tokens->k[0], buf));
        if (!keep) UPIPE_TRY(upi_free(r, own.k));
        if (!sums) UPIPE_TRY(upi_alloc(r, &grads_at_tokens->v[0], b->token_dv, "dv"));
        UPIPE_TRY(upi_send_partial(r, stage, UPI_PROJ_V, (float *)own.v, grads_at_tokens->v[0], buf));
        if (!keep) UPIPE_TRY(upi_free(r, own.v));
        UPIPE_TRY(upi_free(r, buf));
        if (keep && upi_gathers(p)) UPIPE_TRY(upi_free_kv(r, &own));
        if (sums) return UPIPE_OK; /* they are complete after the last stage */
        round = 0;
    } else {
        UPIPE_TRY(upi_alloc(r, &buf, p->desc.dtype != UPIPE_F32 ? upipe_max_bytes(b->k, b->v) : 0, "kv_cast"));
        UPIPE_TRY(upi_dkv_to_tokens(r, stage, UPI_PROJ_K, (float *)own.k, &grads_at_tokens->k[round], "dk", buf));
        UPIPE_TRY(upi_dkv_to_tokens(r, stage, UPI_PROJ_V, (float *)own.v, &grads_at_tokens->v[round], "dv", buf));
        UPIPE_TRY(upi_free(r, buf));
    }
    UPIPE_TRY(upi_project_bwd(r, UPI_PROJ_K, first, grads_at_tokens->k[round], grads->wk));
    return upi_project_bwd(r, UPI_PROJ_V, first, grads_at_tokens->v[round], grads->wv);
}

/* f32 sums over rounds take the storage type; then dWk and dWv. */
UPIPE_API upipe_status upi_end_sums(upi_run *r, upi_dkv_sums *grads_at_tokens, upipe_grads *g)
{
    const upipe_plan *p = r->p;
    int64_t n = p->rows * p->desc.kv_heads;
    void **sums[2], *narrow;
    int i;
    sums[0] = &grads_at_tokens->k[0];
    sums[1] = &grads_at_tokens->v[0];
    for (i = 0; i < 2 && p->desc.dtype != UPIPE_F32; ++i) {
        int dim = upi_dim(p, i == 0 ? UPI_PROJ_K : UPI_PROJ_V);
        UPIPE_TRY(upi_alloc(r, &narrow, i == 0 ? r->buffers.token_dk : r->buffers.token_dv, i == 0 ? "dk" : "dv"));
        UPIPE_TRY(r->c->ops->cast(r->c, upipe_view_packed(narrow, p->desc.dtype, n, 1, dim),
                                  upipe_view_packed(*sums[i], UPIPE_F32, n, 1, dim)));
        UPIPE_TRY(upi_free(r, *sums[i]));
        *sums[i] = narrow;
    }
    UPIPE_TRY(upi_project_heads_bwd(r, UPI_PROJ_K, upi_all_kv_heads(p), grads_at_tokens->k[0], g->wk));
    return upi_project_heads_bwd(r, UPI_PROJ_V, upi_all_kv_heads(p), grads_at_tokens->v[0], g->wv);
}

/* dK or dV of the neighbouring heads from `head` on that lie together: a matrix [rows][n * dim]. */
UPIPE_API upipe_view upi_dkv_matrix(const upipe_plan *p, void *const *grads_at_tokens, int head, upi_proj which)
{
    int stage = 0, rank = 0, n = p->kv_partial ? 1 : p->kv_per_rank;
    size_t block = upipe_plan_rows_bytes(p, n, upi_dim(p, which));
    char *data;
    if (p->kv_partial) {
        data = (char *)grads_at_tokens[0] + (size_t)head * block;
    } else {
        upipe_plan_q_place(p, head * p->group, &stage, &rank);
        data = (char *)grads_at_tokens[upipe_plan_stage(p, stage).round] + (size_t)rank * block;
    }
    return upipe_view_packed(data, p->desc.dtype, p->rows, 1, n * upi_dim(p, which));
}

/* dX = dQ * Wq + dK * Wk + dV * Wv, heads in natural order. */
UPIPE_API upipe_status upi_grad_x(upi_run *r, upipe_view dx, const upipe_slots *dq, const upi_dkv_sums *grads_at_tokens)
{
    const upipe_plan *p = r->p;
    upipe_dtype type = p->desc.dtype;
    void *buf;
    int64_t row;
    UPIPE_TRY(upi_alloc(r, &buf, upi_tile_buf(r), "tile"));
    for (row = 0; row < p->rows; row += upi_tile_rows(r->l)) {
        upi_tile tile = upi_tile_at(r, dx, buf, row);
        int head, stage, rank, n;
        upi_proj which;
        for (head = 0; head < p->desc.heads; head += n) {
            n = upipe_plan_q_place(p, head, &stage, &rank).count;
            UPIPE_TRY(upi_tile_add(
                r, &tile, upi_slot_matrix(p, dq, stage, rank, p->desc.head_dim),
                upi_weight_rows(p, (void *)(uintptr_t)r->l->wq, type, upi_heads_make(1, n, head, 0), UPI_PROJ_Q),
                0));
        }
        for (which = UPI_PROJ_K; which <= UPI_PROJ_V; which = (upi_proj)(which + 1)) {
            const void *w = which == UPI_PROJ_K ? r->l->wk : r->l->wv;
            void *const *from = which == UPI_PROJ_K ? grads_at_tokens->k : grads_at_tokens->v;
            for (head = 0; head < p->desc.kv_heads; head += n) {
                n = p->kv_partial ? 1 : p->kv_per_rank;
                UPIPE_TRY(upi_tile_add(
                    r, &tile, upi_dkv_matrix(p, from, head, which),
                    upi_weight_rows(p, (void *)(uintptr_t)w, type, upi_heads_make(1, n, head, 0), which), 0));
            }
        }
        UPIPE_TRY(upi_tile_store(r, &tile, dx, buf));
    }
    return upi_free(r, buf);
}

/* Gradients of the norms' norm weights: the heads' rows are summed in natural order, whatever order they came in. */
UPIPE_API upipe_status upi_grad_weights(upi_run *r, upipe_grads *g)
{
    int32_t d = r->p->desc.head_dim;
    int heads = r->p->desc.heads, kv_heads = r->p->desc.kv_heads;
    if (r->norm == NULL) return UPIPE_OK;
    if (g->q_norm_weight != NULL)
        UPIPE_TRY(
            r->c->ops->sum(r->c, upipe_view_packed(g->q_norm_weight, UPIPE_F32, 1, 1, d), r->norm, d, heads, 1));
    if (g->k_norm_weight != NULL)
        UPIPE_TRY(r->c->ops->sum(r->c, upipe_view_packed(g->k_norm_weight, UPIPE_F32, 1, 1, d),
                                 r->norm + (int64_t)heads * d, d, kv_heads, 1));
    return upi_free(r, r->norm);
}

/* delta = rowsum(dO * O), where both lie; O is not needed after that. */
UPIPE_API upipe_status upi_drop_out(upi_run *r, upipe_saved *save, const upipe_slots *dout)
{
    int stage, rank;
    UPIPE_TRY(upi_alloc_delta(r, save));
    for (stage = 0; stage < r->p->stages; ++stage)
        for (rank = 0; rank < r->p->desc.ranks; ++rank)
            UPIPE_TRY(
                upi_delta(r, save, stage, rank, upi_slot_matrix(r->p, dout, stage, rank, r->p->desc.v_dim)));
    UPIPE_TRY(upi_free(r, save->out.data));
    save->out.data = NULL;
    return UPIPE_OK;
}

/* The gradients of K' and V' of a round, zero. */
UPIPE_API upipe_status upi_alloc_kv_grad(upi_run *r, upi_kv *g)
{
    const upipe_buffers *b = &r->buffers;
    const size_t k = upi_gathers(r->p) ? b->all_dk : b->dk, v = upi_gathers(r->p) ? b->all_dv : b->dv;
    UPIPE_TRY(upi_alloc(r, &g->k, k, "dk"));
    return upi_alloc(r, &g->v, v, "dv");
}

UPIPE_API upipe_status upi_zero_kv_grad(upi_run *r, const upi_kv *g)
{
    const upipe_buffers *b = &r->buffers;
    UPIPE_TRY(r->c->ops->zero(r->c, g->k, upi_gathers(r->p) ? b->all_dk : b->dk));
    return r->c->ops->zero(r->c, g->v, upi_gathers(r->p) ? b->all_dv : b->dv);
}

/* What the stages need that lives through all of them. */
UPIPE_API upipe_status upi_begin_stages(upi_run *r, upi_dkv_sums *grads_at_tokens, upi_kv *kv, upi_kv *g)
{
    const upipe_plan *p = r->p;
    void *norm;
    if (r->bytes.qk_norm) {
        size_t bytes = (size_t)(p->desc.heads + p->desc.kv_heads) * (size_t)p->desc.head_dim * 4;
        UPIPE_TRY(upi_alloc(r, &norm, bytes, "norm_grad"));
        UPIPE_TRY(r->c->ops->zero(r->c, norm, bytes));
        r->norm = (float *)norm;
    }
    if (upi_dkv_accumulates(p)) {
        size_t e = upipe_dtype_bytes(p->desc.dtype), k = r->buffers.token_dk / e * 4,
               v = r->buffers.token_dv / e * 4;
        UPIPE_TRY(upi_alloc(r, &grads_at_tokens->k[0], k, "dk"));
        UPIPE_TRY(upi_alloc(r, &grads_at_tokens->v[0], v, "dv"));
        UPIPE_TRY(r->c->ops->zero(r->c, grads_at_tokens->k[0], k));
        UPIPE_TRY(r->c->ops->zero(r->c, grads_at_tokens->v[0], v));
    }
    if (p->schedule != UPIPE_UNEVEN) return UPIPE_OK;
    UPIPE_TRY(upi_alloc_kv_grad(r, g));
    return upi_alloc_kept(r, kv);
}

/* Q', K', V' of a stage, computed again, and zeros for the gradients of a round's K' and V'. */
UPIPE_API upipe_status upi_bwd_fetch(upi_run *r, upi_stage_buf *m, int i)
{
    const upipe_plan *p = r->p;
    int t;
    if (upipe_plan_stage(p, i).kv_fresh) {
        if (p->schedule != UPIPE_UNEVEN) UPIPE_TRY(upi_alloc_kv_grad(r, &m->g));
        if (upipe_plan_kv_fresh(p, i, r->c->team->rank)) UPIPE_TRY(upi_zero_kv_grad(r, &m->g));
        UPIPE_TRY(upi_fetch_kv(r, i, &m->kv));
    }
    UPIPE_TRY(upi_alloc(r, &m->send, r->buffers.send, "q_send"));
    for (t = 0; t < p->width; ++t) {
        void *q_t;
        UPIPE_TRY(upi_project(r, UPI_PROJ_Q, i + t, m->send));
        if (t == 0) UPIPE_TRY(upi_alloc(r, &m->q, r->buffers.q * (size_t)p->width, "q"));
        q_t = upipe_offset(m->q, (size_t)t * r->buffers.q);
        m->parts[t].q = q_t;
        UPIPE_TRY(upipe_a2a_to_heads(r->c, q_t, m->send, p, i + t, UPIPE_A2A_Q, upi_each(r, UPI_PROJ_Q)));
    }
    return UPIPE_OK;
}

/* dO and delta of a stage go to its heads. */
UPIPE_API upipe_status upi_bwd_out(upi_run *r, upi_pass *s, upi_stage_buf *m, int i)
{
    const upipe_plan *p = r->p;
    const upipe_buffers *b = &r->buffers;
    const upipe_saved *save = s->save;
    void *slot;
    int t;
    UPIPE_TRY(upi_alloc(r, &m->dout, b->o * (size_t)p->width, "dout"));
    UPIPE_TRY(upi_alloc(r, &m->delta, b->stat * (size_t)p->width, "delta_heads"));
    for (t = 0; t < p->width; ++t) {
        void *dout = upipe_offset(m->dout, (size_t)t * b->o), *delta = upipe_offset(m->delta, (size_t)t * b->stat);
        UPIPE_TRY(upipe_slot_drain(s->dout, i + t, &slot, &r->c->err));
        UPIPE_TRY(upipe_a2a_to_heads(r->c, dout, slot, p, i + t, UPIPE_A2A_Q, upi_each(r, UPI_PROJ_V)));
        UPIPE_TRY(upipe_a2a_to_heads(r->c, delta, save->delta + upipe_plan_before(p, i + t, -1) * p->rows, p,
                                     i + t, UPIPE_A2A_Q, 4));
        m->parts[t].dout = dout;
        m->parts[t].delta = (float *)delta;
        m->parts[t].lse = upi_lse(r, save, i + t);
    }
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_bwd_prepare(void *arg, upipe_ctx *c, int i)
{
    upi_pass *s = (upi_pass *)arg;
    upi_run *r = upi_pass_run(s, c);
    upi_stage_buf *m = upi_pass_buf(s, i);
    upi_phase(r, UPIPE_BWD_IN);
    if (i > 0) {
        m->kv = upi_pass_buf(s, i - 1)->kv;
        m->g = upi_pass_buf(s, i - 1)->g;
    }
    UPIPE_TRY(upi_bwd_fetch(r, m, i));
    upi_phase(r, UPIPE_BWD_OUT);
    UPIPE_TRY(upi_bwd_out(r, s, m, i));
    memset(&m->next, 0, sizeof m->next);
    m->ahead = upi_ahead(r->p, i);
    if (!m->ahead) return UPIPE_OK;
    upi_phase(r, UPIPE_BWD_IN);
    return upi_fetch_begin(r, m->ahead, &m->next, &m->own);
}

UPIPE_API upipe_status upi_bwd_attend(void *arg, upipe_ctx *c, int i)
{
    upi_pass *s = (upi_pass *)arg;
    upi_run *r = upi_pass_run(s, c);
    upi_stage_buf *m = upi_pass_buf(s, i);
    int t;
    if (!r->p->overlap) upi_phase(r, UPIPE_BWD_ATTN);
    UPIPE_TRY(upi_alloc_sums(r, m->sums, r->buffers.sum_q, m->send, "dq_sum", 1));
    for (t = 0; t < r->p->width; ++t) m->parts[t].dq = m->sums[t];
    s->call.dk = (float *)m->g.k;
    s->call.dv = (float *)m->g.v;
    return upi_attend(r, &s->call, m->parts, i, m->kv, 1);
}

/* dQ goes home, into the slot that dO has left; after a round so do dK and dV. Gradients of the weights. */
UPIPE_API upipe_status upi_bwd_finish(void *arg, upipe_ctx *c, int i)
{
    upi_pass *s = (upi_pass *)arg;
    upi_run *r = upi_pass_run(s, c);
    upi_stage_buf *m = upi_pass_buf(s, i);
    const upipe_plan *p = r->p;
    const int last = upipe_plan_stage(p, i + p->width - 1).kv_last;
    upipe_slots *dout = s->dout;
    void *slot;
    int t;
    if (p->overlap) upi_phase(r, UPIPE_BWD_ATTN);
    UPIPE_TRY(upi_free(r, m->delta));
    UPIPE_TRY(upi_free(r, m->dout));
    UPIPE_TRY(upi_free(r, m->q));
    if (p->schedule != UPIPE_UNEVEN && last) UPIPE_TRY(upi_free_kv(r, &m->kv));
    if (m->ahead) {
        UPIPE_TRY(upi_fetch_end(r, m->ahead, &m->own));
        m->kv = m->next;
    }

    upi_phase(r, UPIPE_BWD_IN);
    for (t = 0; t < p->width; ++t) {
        UPIPE_TRY(upi_round_sums(r, m->send, m->sums[t], i + t, p->desc.head_dim));
        UPIPE_TRY(upipe_slot_lend(dout, i + t, &slot, &c->err));
        UPIPE_TRY(upipe_a2a_to_tokens(c, slot, m->send, p, i + t, UPIPE_A2A_Q, upi_each(r, UPI_PROJ_Q)));
        UPIPE_TRY(upipe_slot_fill(dout, i + t, &c->err));
    }
    UPIPE_TRY(upi_free_sums(r, m->sums, m->send));
    UPIPE_TRY(upi_free(r, m->send));
    for (t = 0; t < p->width; ++t)
        UPIPE_TRY(
            upi_project_bwd(r, UPI_PROJ_Q, i + t, dout->data + (size_t)(i + t) * dout->slot_bytes, s->grads->wq));
    return last ? upi_end_round(r, i + p->width - 1, &m->g, s->grads_at_tokens, s->grads) : UPIPE_OK;
}

UPIPE_API upipe_status upi_layer_bwd(upi_pass *s, upipe_view dx)
{
    upi_run *r = &s->run;
    const upipe_plan *p = r->p;
    upipe_saved *save = s->save;
    upi_dkv_sums grads_at_tokens;
    upi_stages all;
    int i;
    memset(&all, 0, sizeof all);
    all.prepare = upi_bwd_prepare;
    all.attend = upi_bwd_attend;
    all.finish = upi_bwd_finish;
    s->grads_at_tokens = &grads_at_tokens;
    if (save->delta == NULL) UPIPE_TRY(upi_drop_out(r, save, s->dout));

    upi_phase(r, UPIPE_BWD_IN);
    UPIPE_TRY(upi_begin_stages(r, &grads_at_tokens, &s->kv, &s->g));
    UPIPE_TRY(upi_pass_stages(s, &all, 1));
    if (p->schedule == UPIPE_UNEVEN) {
        UPIPE_TRY(upi_free_kv(r, &s->kv));
        UPIPE_TRY(upi_free_kv(r, &s->g));
    }
    UPIPE_TRY(upi_free(r, save->delta));
    save->delta = NULL;
    UPIPE_TRY(upi_free(r, save->lse));
    save->lse = NULL;
    if (upi_dkv_accumulates(p)) UPIPE_TRY(upi_end_sums(r, &grads_at_tokens, s->grads));
    UPIPE_TRY(upi_grad_weights(r, s->grads));
    UPIPE_TRY(upi_grad_x(r, dx, s->dout, &grads_at_tokens));
    for (i = 0; i < (p->kv_partial ? 1 : p->rounds); ++i) {
        UPIPE_TRY(upi_free(r, grads_at_tokens.k[i]));
        UPIPE_TRY(upi_free(r, grads_at_tokens.v[i]));
    }
    return UPIPE_OK;
}

/* upipe_layer_bwd -- gradients of x and of the weights; Q, K, V are recomputed and exchanged again
 *   dx      [rows][1][D] view, the plan's type, written; its data may be x's: x is read for the last time
 *           before
 *   grads   wq wk wv, the norm weights and the sinks: +=, over this rank's tokens (sinks: over its heads)
 *   save    consumed: lse and delta go back to the pool, and so does final_out, unless it is dout
 *   dout    slots full of the gradient of O; consumed: they hold dQ afterwards and stay the caller's.
 *           &save->out after upipe_layer_out_bwd
 *   x       the forward's
 *   bytes   phases BWD_* of upipe_plan_bytes; sends upipe_plan_sent(plan, 1), to the ring upipe_plan_sent_ring(plan, 1)
 *   errors  as upipe_layer_fwd; save is then good for upipe_saved_free alone, and grads hold part of a sum
 *   paper   Appendix A, with the changes that docs/memory.md explains
 */
UPIPE_API upipe_status upipe_layer_bwd(upipe_ctx *c, const upipe_layer *l, upipe_view dx, upipe_grads *grads,
                                       upipe_saved *save, upipe_slots *dout, upipe_view x)
{
    int64_t mark = upipe_mem_mark(c->mem);
    float *delta = save->delta;
    upi_pass pass;
    upipe_status s;
    memset(&pass, 0, sizeof pass);
    pass.save = save;
    pass.dout = dout;
    pass.grads = grads;
    upipe_mem_phase(c->mem, UPIPE_BWD_BEFORE, upipe_phase_name(UPIPE_BWD_BEFORE));
    s = upi_layer_begin(&pass.run, c, l, x);
    if (s == UPIPE_OK && (dx.n != x.n || dx.h != 1 || dx.d != x.d || dx.dtype != x.dtype))
        s = upipe_fail(&c->err, UPIPE_ERR_ARG, "dx is %s [%lld][%d][%d], not of the shape of x",
                     upipe_dtype_name(dx.dtype), (long long)dx.n, dx.h, dx.d);
    if (s == UPIPE_OK && save->lse == NULL)
        s = upipe_fail(&c->err, UPIPE_ERR_ARG, "the forward's results are not there (consumed before?)");
    if (s == UPIPE_OK) s = upi_slots_check(c, l, dout, "dout");
    if (s == UPIPE_OK && delta == NULL && dout->data == save->out.data)
        s = upipe_fail(&c->err, UPIPE_ERR_ARG,
                     "dout is final_out, not its gradient: upipe_layer_out_bwd was not called");
    if (s == UPIPE_OK && delta == NULL) s = upi_slots_check(c, l, &save->out, "final_out");
    if (s == UPIPE_OK && pass.run.bytes.qk_norm == 0 && (grads->q_norm_weight != NULL || grads->k_norm_weight != NULL))
        s = upipe_fail(&c->err, UPIPE_ERR_ARG, "gradients of norm weights are wanted without a QK norm");
    if (s == UPIPE_OK && l->mask.sinks == NULL && grads->sinks != NULL)
        s = upipe_fail(&c->err, UPIPE_ERR_ARG, "a gradient of sinks is wanted without sinks");
    pass.run.dsinks = grads->sinks;
    if (s == UPIPE_OK) s = upi_layer_bwd(&pass, dx);
    if (s != UPIPE_OK && delta == NULL) save->delta = NULL; /* taken after the mark: the pool has it back */
    return upi_layer_end(c, s, mark);
}

#endif

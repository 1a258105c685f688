/* upipe_layer.h -- the attention block, forward and backward: composition of the primitives        layer 4
 *
 * x (already normed) -> Q, K, V -> [QK norm] -> [RoPE] -> exchange -> attention -> exchange -> slots of
 * final_out, stage by stage (the paper's Figure (b)). With chunk = heads in the plan the same code is
 * DeepSpeed-Ulysses.
 *
 *     upipe_layer_fwd(&ctx, &layer, &saved, x);              saved: final_out and lse, in the pool
 *     upipe_layer_bwd(&ctx, &layer, gx, &grads, &saved, &gout, x);     gx may be x itself
 *
 * A failed call gives back what it took, and aborts the team so that no rank waits for this one. Where a peer
 * may still read this rank's memory (team->quarantine), the pool is locked instead until upipe_mem_release.
 */
#ifndef UPIPE_LAYER_H
#define UPIPE_LAYER_H

#include "upipe_block.h"

/* ---- forward ---- */

UPIPE_API upipe_status upi_layer_fwd(upi_run *r, upipe_saved *save)
{
    const upipe_plan *p = r->p;
    upipe_ctx *c = r->c;
    size_t stat = (size_t)(p->rows * p->desc.heads) * 4;
    size_t block = upi_block_bytes(p, p->per_rank, upipe_dtype_bytes(p->desc.dtype));
    void *k = NULL, *v = NULL, *q, *send, *lse;
    int i;
    upi_phase(r, UPIPE_FWD_IN);
    UPIPE_TRY(upipe_layer_slots_take(c, r->l, &save->out, UPIPE_SLOT_EMPTY, "final_out"));
    UPIPE_TRY(upi_take(r, &lse, stat, "lse"));
    save->lse = (float *)lse;
    for (i = 0; i < p->stages; ++i) {
        upipe_stage stage = upipe_plan_stage(p, i);
        upi_heads heads = upi_q_heads(p, i);
        upi_phase(r, UPIPE_FWD_IN);
        UPIPE_TRY(upipe_slot_lend(&save->out, i, &q, &c->err));
        if (stage.kv_fresh) UPIPE_TRY(upi_fetch_kv(r, i, &k, &v));
        UPIPE_TRY(upi_take(r, &send, upi_heads_bytes(p, heads), "q_send"));
        UPIPE_TRY(upi_project(r, UPI_Q, heads, send));
        UPIPE_TRY(upipe_a2a_to_heads(c, q, send, block, p->desc.batch, upi_each_its_own()));

        upi_phase(r, UPIPE_FWD_ATTN);
        UPIPE_TRY(upi_attend(r, q, k, v, send, save->lse + i * (p->rows * p->desc.chunk)));
        if (stage.kv_last) {
            UPIPE_TRY(upi_give(r, v));
            UPIPE_TRY(upi_give(r, k));
        }
        upi_phase(r, UPIPE_FWD_OUT);
        UPIPE_TRY(upipe_a2a_to_tokens(c, q, send, block, p->desc.batch));
        UPIPE_TRY(upipe_slot_fill(&save->out, i, &c->err));
        UPIPE_TRY(upi_give(r, send));
    }
    return UPIPE_OK;
}

/* upipe_layer_fwd -- attention of x: projections, exchange, attention, stage by stage
 *   save    written: slots full of O, and lse; from the pool, upipe_saved_free gives them back
 *   x       [rows][1][D] view of this rank's tokens, the plan's type
 *   bytes   phases FWD_* of upipe_plan_bytes; sends upipe_plan_sent(plan, 0)
 *   errors  ARG, UNSUPPORTED, MEMORY, MISMATCH, TIMEOUT, ABORTED; the team is then aborted, the pool as
 *           before
 *   paper   section 3.3 and Figure (b)
 */
UPIPE_API upipe_status upipe_layer_fwd(upipe_ctx *c, const upipe_layer *l, upipe_saved *save, upipe_view x)
{
    int64_t mark = upipe_mem_mark(c->mem);
    upi_run run;
    upipe_status s;
    memset(save, 0, sizeof *save);
    upipe_mem_phase(c->mem, UPIPE_FWD_BEFORE, upipe_phase_name(UPIPE_FWD_BEFORE));
    s = upi_layer_begin(&run, c, l, x);
    if (s == UPIPE_OK) s = upi_layer_fwd(&run, save);
    if (s != UPIPE_OK) memset(save, 0, sizeof *save);
    return upi_layer_end(c, s, mark);
}

/* ---- backward ---- */

/* Gradients of K and V on their way to dX. By rounds in storage type,
 * [round][rank][batch][T][kv_per_rank][d]; where ranks or stages share a head, one buffer [Hkv][batch][T][d],
 * which the naive order sums in f32. */
typedef struct upi_parked {
    void *k[UPIPE_STAGES_MAX], *v[UPIPE_STAGES_MAX];
} upi_parked;

/* A round is over: dK' (or dV'), f32 by head, goes home to the tokens; consumes grad. */
UPIPE_API upipe_status upi_send_home(upi_run *r, float *grad, void **parked, const char *tag, void *room)
{
    const upipe_plan *p = r->p;
    size_t e = upipe_dtype_bytes(p->desc.dtype);
    int64_t n = p->rows * p->desc.ranks;
    int32_t width = p->kv_per_rank * p->desc.head_dim;
    void *send = grad;
    UPIPE_TRY(upi_take(r, parked, (size_t)(n * width) * e, tag));
    if (room != NULL) {
        send = room;
        UPIPE_TRY(r->c->ops->cast(r->c, upipe_view_packed(room, p->desc.dtype, n, 1, width),
                                  upipe_view_packed(grad, UPIPE_F32, n, 1, width)));
    }
    UPIPE_TRY(upipe_a2a_to_tokens(r->c, *parked, send, upi_block_bytes(p, p->kv_per_rank, e), p->desc.batch));
    return upi_give(r, grad);
}

/* Partial gradients of shared heads meet at their tokens in f32 and are summed in rank order; consumes grad.
 *   sum   [Hkv][batch][T][d]: =, or f32 and += in the naive order
 *   room  f32 [ranks][batch][T][d]
 */
UPIPE_API upipe_status upi_send_partial(upi_run *r, int stage, float *grad, void *sum, void *room)
{
    const upipe_plan *p = r->p;
    int naive = p->schedule == UPIPE_ORDER, rank = 0;
    upipe_dtype type = naive ? UPIPE_F32 : p->desc.dtype;
    int64_t block = p->rows * p->desc.head_dim;
    UPIPE_TRY(upipe_a2a_to_tokens(r->c, room, grad, upi_block_bytes(p, 1, 4), p->desc.batch));
    while (rank < p->desc.ranks) {
        int first = rank, head = upipe_plan_kv_head(p, stage, rank, 0);
        while (rank < p->desc.ranks && upipe_plan_kv_head(p, stage, rank, 0) == head) ++rank;
        UPIPE_TRY(
            r->c->ops->sum(r->c,
                           upipe_view_packed((char *)sum + (size_t)(head * block) * upipe_dtype_bytes(type),
                                             type, p->rows, 1, p->desc.head_dim),
                           (const float *)room + first * block, block, rank - first, naive));
    }
    return upi_give(r, grad);
}

/* The last stage of a round: dK' and dV' leave, dWk and dWv are formed. */
UPIPE_API upipe_status upi_end_round(upi_run *r, int stage, float *gk, float *gv, upi_parked *parked,
                                     upipe_grads *g)
{
    const upipe_plan *p = r->p;
    int round = upipe_plan_stage(p, stage).round;
    size_t e = upipe_dtype_bytes(p->desc.dtype);
    size_t mine = upipe_plan_rows_bytes(p, (int64_t)p->desc.ranks * p->kv_per_rank);
    upi_heads heads = upi_kv_heads(p, stage);
    void *room;
    if (p->kv_partial) {
        size_t all = p->schedule == UPIPE_SPLIT ? upipe_plan_rows_bytes(p, p->desc.kv_heads) : 0;
        UPIPE_TRY(upi_take(r, &room, mine / e * 4, "kv_partial"));
        if (all > 0) UPIPE_TRY(upi_take(r, &parked->k[0], all, "dk"));
        UPIPE_TRY(upi_send_partial(r, stage, gk, parked->k[0], room));
        if (all > 0) UPIPE_TRY(upi_take(r, &parked->v[0], all, "dv"));
        UPIPE_TRY(upi_send_partial(r, stage, gv, parked->v[0], room));
        UPIPE_TRY(upi_give(r, room));
        if (p->schedule == UPIPE_ORDER) return UPIPE_OK; /* the sums are complete after the last stage */
        round = 0;
    } else {
        UPIPE_TRY(upi_take(r, &room, e < 4 ? mine : 0, "kv_cast"));
        UPIPE_TRY(upi_send_home(r, gk, &parked->k[round], "dk", room));
        UPIPE_TRY(upi_send_home(r, gv, &parked->v[round], "dv", room));
        UPIPE_TRY(upi_give(r, room));
    }
    UPIPE_TRY(upi_project_bwd(r, UPI_K, heads, parked->k[round], g->wk));
    return upi_project_bwd(r, UPI_V, heads, parked->v[round], g->wv);
}

/* The naive order's f32 sums take the storage type; then dWk and dWv. */
UPIPE_API upipe_status upi_end_naive(upi_run *r, upi_parked *parked, upipe_grads *g)
{
    const upipe_plan *p = r->p;
    int64_t n = p->rows * p->desc.kv_heads;
    void **sums[2], *narrow;
    int i;
    sums[0] = &parked->k[0];
    sums[1] = &parked->v[0];
    for (i = 0; i < 2 && p->desc.dtype != UPIPE_F32; ++i) {
        UPIPE_TRY(upi_take(r, &narrow, upipe_plan_rows_bytes(p, p->desc.kv_heads), i == 0 ? "dk" : "dv"));
        UPIPE_TRY(r->c->ops->cast(r->c, upipe_view_packed(narrow, p->desc.dtype, n, 1, p->desc.head_dim),
                                  upipe_view_packed(*sums[i], UPIPE_F32, n, 1, p->desc.head_dim)));
        UPIPE_TRY(upi_give(r, *sums[i]));
        *sums[i] = narrow;
    }
    UPIPE_TRY(upi_project_bwd(r, UPI_K, upi_all_kv_heads(p), parked->k[0], g->wk));
    return upi_project_bwd(r, UPI_V, upi_all_kv_heads(p), parked->v[0], g->wv);
}

/* dK or dV of the kv_per_rank neighbouring heads from `head` on: a matrix [rows][kv_per_rank * d]. */
UPIPE_API upipe_view upi_parked_matrix(const upipe_plan *p, void *const *parked, int head)
{
    int stage = 0, rank = 0;
    size_t block = upipe_plan_rows_bytes(p, p->kv_per_rank);
    char *data;
    if (p->kv_partial) {
        data = (char *)parked[0] + (size_t)head * block;
    } else {
        upipe_plan_q_place(p, head * p->group, &stage, &rank);
        data = (char *)parked[upipe_plan_stage(p, stage).round] + (size_t)rank * block;
    }
    return upipe_view_packed(data, p->desc.dtype, p->rows, 1, p->kv_per_rank * p->desc.head_dim);
}

/* dX = dQ * Wq + dK * Wk + dV * Wv, heads in natural order. */
UPIPE_API upipe_status upi_grad_x(upi_run *r, upipe_view gx, const upipe_slots *gq, const upi_parked *parked)
{
    const upipe_plan *p = r->p;
    upipe_dtype type = p->desc.dtype;
    void *room;
    int64_t row;
    UPIPE_TRY(upi_take(r, &room, upi_tile_room(r), "tile"));
    for (row = 0; row < p->rows; row += upi_tile_rows(r->l)) {
        upi_tile tile = upi_tile_at(r, gx, room, row);
        int head, stage, rank, which;
        for (head = 0; head < p->desc.heads; head += p->per_rank) {
            upi_heads one = upi_heads_make(1, p->per_rank, head, 0);
            upipe_plan_q_place(p, head, &stage, &rank);
            UPIPE_TRY(upi_tile_add(r, &tile, upi_slot_matrix(p, gq, stage, rank),
                                   upi_weight_rows(p, (void *)(uintptr_t)r->l->wq, type, one), 0));
        }
        for (which = UPI_K; which <= UPI_V; ++which) {
            const void *w = which == UPI_K ? r->l->wk : r->l->wv;
            void *const *from = which == UPI_K ? parked->k : parked->v;
            for (head = 0; head < p->desc.kv_heads; head += p->kv_per_rank) {
                upi_heads one = upi_heads_make(1, p->kv_per_rank, head, 0);
                UPIPE_TRY(upi_tile_add(r, &tile, upi_parked_matrix(p, from, head),
                                       upi_weight_rows(p, (void *)(uintptr_t)w, type, one), 0));
            }
        }
        UPIPE_TRY(upi_tile_store(r, &tile, gx, room));
    }
    return upi_give(r, room);
}

/* Gradients of the norms' gains: the heads' rows are summed in natural order, whatever order they came in. */
UPIPE_API upipe_status upi_grad_gains(upi_run *r, upipe_grads *g)
{
    int32_t d = r->p->desc.head_dim;
    int heads = r->p->desc.heads, kv_heads = r->p->desc.kv_heads;
    if (r->norm == NULL) return UPIPE_OK;
    if (g->q_gain != NULL)
        UPIPE_TRY(
            r->c->ops->sum(r->c, upipe_view_packed(g->q_gain, UPIPE_F32, 1, 1, d), r->norm, d, heads, 1));
    if (g->k_gain != NULL)
        UPIPE_TRY(r->c->ops->sum(r->c, upipe_view_packed(g->k_gain, UPIPE_F32, 1, 1, d),
                                 r->norm + (int64_t)heads * d, d, kv_heads, 1));
    return upi_give(r, r->norm);
}

/* delta = rowsum(dO * O), where both lie; O is not needed after that. */
UPIPE_API upipe_status upi_drop_out(upi_run *r, upipe_saved *save, const upipe_slots *gout)
{
    int stage, rank;
    UPIPE_TRY(upi_take_delta(r, save));
    for (stage = 0; stage < r->p->stages; ++stage)
        for (rank = 0; rank < r->p->desc.ranks; ++rank)
            UPIPE_TRY(upi_delta(r, save, stage, rank, upi_slot_matrix(r->p, gout, stage, rank)));
    UPIPE_TRY(upi_give(r, save->out.data));
    save->out.data = NULL;
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_layer_bwd(upi_run *r, upipe_view gx, upipe_grads *g, upipe_saved *save,
                                     upipe_slots *gout)
{
    const upipe_plan *p = r->p;
    upipe_ctx *c = r->c;
    size_t e = upipe_dtype_bytes(p->desc.dtype), block = upi_block_bytes(p, p->per_rank, e);
    size_t kv_f32 = upipe_plan_rows_bytes(p, (int64_t)p->desc.ranks * p->kv_per_rank) / e * 4;
    size_t sums = upipe_plan_rows_bytes(p, p->desc.kv_heads) / e * 4;
    int64_t stat = p->rows * p->desc.chunk;
    void *k = NULL, *v = NULL, *gk = NULL, *gv = NULL, *q, *send, *go, *delta, *slot, *norm;
    upi_parked parked;
    int i;
    if (save->delta == NULL) UPIPE_TRY(upi_drop_out(r, save, gout));

    upi_phase(r, UPIPE_BWD_IN);
    if (r->bytes.qk_norm) {
        size_t bytes = (size_t)(p->desc.heads + p->desc.kv_heads) * (size_t)p->desc.head_dim * 4;
        UPIPE_TRY(upi_take(r, &norm, bytes, "norm_grad"));
        UPIPE_TRY(c->ops->zero(c, norm, bytes));
        r->norm = (float *)norm;
    }
    if (p->schedule == UPIPE_ORDER) {
        UPIPE_TRY(upi_take(r, &parked.k[0], sums, "dk"));
        UPIPE_TRY(upi_take(r, &parked.v[0], sums, "dv"));
        UPIPE_TRY(c->ops->zero(c, parked.k[0], sums));
        UPIPE_TRY(c->ops->zero(c, parked.v[0], sums));
    }
    for (i = 0; i < p->stages; ++i) {
        upipe_stage stage = upipe_plan_stage(p, i);
        upi_heads heads = upi_q_heads(p, i);
        upi_phase(r, UPIPE_BWD_IN);
        if (stage.kv_fresh) {
            UPIPE_TRY(upi_take(r, &gk, kv_f32, "gk"));
            UPIPE_TRY(upi_take(r, &gv, kv_f32, "gv"));
            UPIPE_TRY(c->ops->zero(c, gk, kv_f32));
            UPIPE_TRY(c->ops->zero(c, gv, kv_f32));
            UPIPE_TRY(upi_fetch_kv(r, i, &k, &v));
        }
        UPIPE_TRY(upi_take(r, &send, upi_heads_bytes(p, heads), "q_send"));
        UPIPE_TRY(upi_project(r, UPI_Q, heads, send));
        UPIPE_TRY(upi_take(r, &q, upi_heads_bytes(p, heads), "q"));
        UPIPE_TRY(upipe_a2a_to_heads(c, q, send, block, p->desc.batch, upi_each_its_own()));

        upi_phase(r, UPIPE_BWD_OUT);
        UPIPE_TRY(upi_take(r, &go, upi_heads_bytes(p, heads), "go"));
        UPIPE_TRY(upi_take(r, &delta, (size_t)stat * 4, "delta_heads"));
        UPIPE_TRY(upipe_slot_drain(gout, i, &slot, &c->err));
        UPIPE_TRY(upipe_a2a_to_heads(c, go, slot, block, p->desc.batch, upi_each_its_own()));
        UPIPE_TRY(upipe_a2a_to_heads(c, delta, save->delta + i * stat, (size_t)(p->local * p->per_rank) * 4,
                                     p->desc.batch, upi_each_its_own()));

        upi_phase(r, UPIPE_BWD_ATTN);
        UPIPE_TRY(upi_attend_bwd(r, q, k, v, go, save->lse + i * stat, (float *)delta, send, (float *)gk,
                                 (float *)gv));
        UPIPE_TRY(upi_give(r, delta));
        UPIPE_TRY(upi_give(r, go));
        UPIPE_TRY(upi_give(r, q));
        if (stage.kv_last) {
            UPIPE_TRY(upi_give(r, v));
            UPIPE_TRY(upi_give(r, k));
        }

        upi_phase(r, UPIPE_BWD_IN);
        UPIPE_TRY(upipe_slot_lend(gout, i, &slot, &c->err));
        UPIPE_TRY(upipe_a2a_to_tokens(c, slot, send, block, p->desc.batch));
        UPIPE_TRY(upipe_slot_fill(gout, i, &c->err));
        UPIPE_TRY(upi_give(r, send));
        UPIPE_TRY(upi_project_bwd(r, UPI_Q, heads, slot, g->wq));
        if (stage.kv_last) UPIPE_TRY(upi_end_round(r, i, (float *)gk, (float *)gv, &parked, g));
    }
    UPIPE_TRY(upi_give(r, save->delta));
    save->delta = NULL;
    UPIPE_TRY(upi_give(r, save->lse));
    save->lse = NULL;
    if (p->schedule == UPIPE_ORDER) UPIPE_TRY(upi_end_naive(r, &parked, g));
    UPIPE_TRY(upi_grad_gains(r, g));
    UPIPE_TRY(upi_grad_x(r, gx, gout, &parked));
    for (i = 0; i < (p->kv_partial ? 1 : p->rounds); ++i) {
        UPIPE_TRY(upi_give(r, parked.k[i]));
        UPIPE_TRY(upi_give(r, parked.v[i]));
    }
    return UPIPE_OK;
}

/* upipe_layer_bwd -- gradients of x and of the weights; Q, K, V are recomputed and exchanged again
 *   gx      [rows][1][D] view, the plan's type, written; its data may be x's: x is read for the last time
 *           before
 *   grads   wq wk wv, and the gains: +=, over this rank's tokens
 *   save    consumed: lse and delta go back to the pool, and so does final_out, unless it is gout
 *   gout    slots full of the gradient of O; consumed: they hold dQ afterwards and stay the caller's.
 *           &save->out after upipe_layer_out_bwd
 *   x       the forward's
 *   bytes   phases BWD_* of upipe_plan_bytes; sends upipe_plan_sent(plan, 1)
 *   errors  as upipe_layer_fwd; save is then good for upipe_saved_free alone, and grads hold part of a sum
 *   paper   Appendix A, with the changes that docs/memory.md explains
 */
UPIPE_API upipe_status upipe_layer_bwd(upipe_ctx *c, const upipe_layer *l, upipe_view gx, upipe_grads *grads,
                                       upipe_saved *save, upipe_slots *gout, upipe_view x)
{
    int64_t mark = upipe_mem_mark(c->mem);
    float *delta = save->delta;
    upi_run run;
    upipe_status s;
    upipe_mem_phase(c->mem, UPIPE_BWD_BEFORE, upipe_phase_name(UPIPE_BWD_BEFORE));
    s = upi_layer_begin(&run, c, l, x);
    if (s == UPIPE_OK && (gx.n != x.n || gx.h != 1 || gx.d != x.d || gx.dtype != x.dtype))
        s = upi_fail(&c->err, UPIPE_ERR_ARG, "gx is %s [%lld][%d][%d], not of the shape of x",
                     upipe_dtype_name(gx.dtype), (long long)gx.n, gx.h, gx.d);
    if (s == UPIPE_OK && save->lse == NULL)
        s = upi_fail(&c->err, UPIPE_ERR_ARG, "the forward's results are not there (consumed before?)");
    if (s == UPIPE_OK) s = upi_slots_check(c, l, gout, "gout");
    if (s == UPIPE_OK && delta == NULL && gout->data == save->out.data)
        s = upi_fail(&c->err, UPIPE_ERR_ARG,
                     "gout is final_out, not its gradient: upipe_layer_out_bwd was not called");
    if (s == UPIPE_OK && delta == NULL) s = upi_slots_check(c, l, &save->out, "final_out");
    if (s == UPIPE_OK && run.bytes.qk_norm == 0 && (grads->q_gain != NULL || grads->k_gain != NULL))
        s = upi_fail(&c->err, UPIPE_ERR_ARG, "gradients of gains are wanted without a QK norm");
    if (s == UPIPE_OK) s = upi_layer_bwd(&run, gx, grads, save, gout);
    if (s != UPIPE_OK && delta == NULL) save->delta = NULL; /* taken after the mark: the pool has it back */
    return upi_layer_end(c, s, mark);
}

#endif

/* kv_grad.h -- the owner of dK' and dV', and of dK and dV until dX is formed        part of upipe_layer.h
 *
 * The stages of a round add to dK' and dV' in f32. After the last one they are sent back to the ranks of
 * their tokens, where dWk and dWv are formed, and held until dX is formed:
 *
 *     a rank's own heads      in the storage type, [round][rank][batch][T][kv_per_rank][dim]
 *     shared heads (partial)  summed over ranks in rank order, one buffer [Hkv][batch][T][dim]. Where sums
 *                             continue over stages (in order, uneven heads): in f32 until the last stage
 */
#ifndef UPIPE_LAYER_H
#include "../upipe_layer.h"
#elif !defined(UPIPE_LAYER_KV_GRAD_H)
#define UPIPE_LAYER_KV_GRAD_H

#include "kv.h"

typedef struct upi_kv_grad {
    upi_kv_pair now;                      /* dK', dV' of the stage that was loaded last */
    upi_kv_pair tokens[UPIPE_STAGES_MAX]; /* dK, dV by tokens, one pair a round; partial ones: [0] alone */
} upi_kv_grad;

/* Allocates what is held through all stages. */
UPIPE_API upipe_status upi_kv_grad_begin(upipe_ctx *c, const upi_run *r, upi_kv_grad *g)
{
    const upipe_plan *p = r->p;
    const size_t e = upipe_dtype_bytes(p->desc.dtype);
    const size_t sums[3] = {0, r->buffers.token_dk / e * 4, r->buffers.token_dv / e * 4};
    if (p->kv_grads_accumulate) {
        UPIPE_TRY(upi_kv_alloc(c, &g->tokens[0], sums, "dk", "dv"));
        UPIPE_TRY(c->ops->zero(c, g->tokens[0].k, sums[UPI_PROJ_K]));
        UPIPE_TRY(c->ops->zero(c, g->tokens[0].v, sums[UPI_PROJ_V]));
    }
    if (p->kv_rounds_shared) return UPIPE_OK;
    return upi_kv_alloc(c, &g->now, r->dheld, "dk_heads", "dv_heads");
}

/* dK' and dV' that stage i adds to: zero where its K' and V' are new. */
UPIPE_API upipe_status upi_kv_grad_load(upipe_ctx *c, const upi_run *r, upi_kv_grad *g, int i,
                                        upi_kv_pair *out)
{
    if (upipe_plan_stage(r->p, i).kv_fresh && r->p->kv_rounds_shared)
        UPIPE_TRY(upi_kv_alloc(c, &g->now, r->dheld, "dk_heads", "dv_heads"));
    if (upipe_plan_kv_fresh(r->p, i, c->team->rank)) {
        UPIPE_TRY(c->ops->zero(c, g->now.k, r->dheld[UPI_PROJ_K]));
        UPIPE_TRY(c->ops->zero(c, g->now.v, r->dheld[UPI_PROJ_V]));
    }
    *out = g->now;
    return UPIPE_OK;
}

/* Sends dK' (or dV') of a round, whose heads are this rank's alone, to the ranks of its tokens; frees grad.
 *   cast    as large as grad in the storage type; NULL where that is f32
 */
UPIPE_API upipe_status upi_kv_grad_to_tokens(upipe_ctx *c, const upi_run *r, int stage, upi_proj which,
                                             void *grad, void **tokens, void *cast)
{
    const upipe_plan *p = r->p;
    const int64_t rows = p->seq * p->desc.batch;
    const int32_t width = p->kv_per_rank * upi_dim(p, which);
    const int is_k = which == UPI_PROJ_K;
    UPIPE_TRY(upipe_alloc(c, tokens, is_k ? r->buffers.token_dk : r->buffers.token_dv, is_k ? "dk" : "dv"));
    if (cast != NULL)
        UPIPE_TRY(c->ops->cast(c, upipe_view_packed(cast, p->desc.dtype, rows, 1, width),
                               upipe_view_packed(grad, UPIPE_F32, rows, 1, width)));
    UPIPE_TRY(
        upipe_a2a_to_tokens(c, *tokens, cast != NULL ? cast : grad, p, stage, UPIPE_A2A_DKV, r->each[which]));
    return upipe_free(c, grad);
}

/* Receives partial gradients of shared heads in f32 and sums them in rank order.
 *   sum      [Hkv][batch][T][dim]: =, or f32 and += where sums continue over stages
 *   partial  f32 [rank][batch][T][n][dim], scratch
 */
UPIPE_API upipe_status upi_kv_grad_sum(upipe_ctx *c, const upi_run *r, int stage, upi_proj which,
                                       const void *grad, void *sum, void *partial)
{
    const upipe_plan *p = r->p;
    const int more = p->kv_grads_accumulate, dim = upi_dim(p, which);
    const upipe_dtype type = more ? UPIPE_F32 : p->desc.dtype;
    const int64_t head = p->rows * dim;
    const size_t e = upipe_dtype_bytes(type);
    int64_t at = 0;
    int rank = 0, same, i, j;
    UPIPE_TRY(upipe_a2a_to_tokens(c, partial, grad, p, stage, UPIPE_A2A_DKV, (size_t)dim * 4));
    while (rank < p->desc.ranks) {
        const upipe_span s = upipe_plan_part(p, UPIPE_A2A_DKV, stage, rank);
        for (same = 1; rank + same < p->desc.ranks; ++same) { /* neighbours with the same heads: one sum */
            upipe_span next = upipe_plan_part(p, UPIPE_A2A_DKV, stage, rank + same);
            if (next.first != s.first || next.count != s.count || s.count == 0) break;
        }
        for (j = 0; j < s.count; ++j) {
            float *from = (float *)partial + at + (int64_t)j * dim; /* head j of [batch][T][n][dim] */
            upipe_view to =
                upipe_view_packed((char *)sum + (size_t)((s.first + j) * head) * e, type, p->rows, 1, dim);
            upipe_view part = upipe_view_make(from, UPIPE_F32, p->rows, (int64_t)s.count * dim, 1, dim, dim);
            if (s.count == 1) UPIPE_TRY(c->ops->sum(c, to, from, head, same, more));
            for (i = 0; s.count > 1 && i < same; ++i, part.data = (float *)part.data + head * s.count)
                UPIPE_TRY(c->ops->add(c, to, part));
        }
        at += same * head * s.count;
        rank += same;
    }
    return UPIPE_OK;
}

/* In an all-gather ring: *own = the sums over its ranks, for this rank's tokens. */
UPIPE_API upipe_status upi_kv_grad_reduce(upipe_ctx *c, const upi_run *r, int stage, const upi_kv_pair *all,
                                          upi_kv_pair *own)
{
    const upipe_plan *p = r->p;
    const size_t mine[3] = {0, r->buffers.dk, r->buffers.dv};
    const size_t wide = upipe_max_bytes(r->buffers.dk, r->buffers.dv);
    const int heads = upipe_plan_part(p, UPIPE_A2A_DKV, stage, c->team->rank).count;
    void *partial;
    UPIPE_TRY(upi_kv_alloc(c, own, mine, "dk_heads", "dv_heads"));
    UPIPE_TRY(upipe_alloc(c, &partial, (size_t)p->desc.ring * wide, "ring_partial"));
    if (heads > 0) {
        UPIPE_TRY(upipe_ring_reduce_scatter(c, p, heads, p->desc.head_dim, (float *)own->k,
                                            (const float *)all->k, (float *)partial));
        UPIPE_TRY(upipe_ring_reduce_scatter(c, p, heads, p->desc.v_dim, (float *)own->v,
                                            (const float *)all->v, (float *)partial));
    }
    return upipe_free(c, partial);
}

/* After a round's last stage i: sends dK' and dV' to the ranks of their tokens, and forms dWk and dWv unless
 * the sums continue. */
UPIPE_API upipe_status upi_kv_grad_store(upipe_ctx *c, const upi_run *r, upi_kv_grad *g, int i,
                                         upi_kv_pair *round)
{
    const upipe_plan *p = r->p;
    const upipe_buffers *b = &r->buffers;
    const int stage = i + p->width - 1, first = stage - p->steps + 1;
    upi_kv_pair own = *round,
                *tokens = &g->tokens[p->kv_grads_partial ? 0 : upipe_plan_stage(p, stage).round];
    void *buf;
    if (!upipe_plan_stage(p, stage).kv_last) return UPIPE_OK;
    if (p->kv_gathered) {
        UPIPE_TRY(upi_kv_grad_reduce(c, r, stage, round, &own));
        if (p->kv_rounds_shared) UPIPE_TRY(upi_kv_free(c, round));
    }
    if (p->kv_grads_partial) {
        UPIPE_TRY(upipe_alloc(c, &buf, b->partial, "kv_partial"));
        if (!p->kv_grads_accumulate) UPIPE_TRY(upipe_alloc(c, &tokens->k, b->token_dk, "dk"));
        UPIPE_TRY(upi_kv_grad_sum(c, r, stage, UPI_PROJ_K, own.k, tokens->k, buf));
        if (p->kv_rounds_shared) UPIPE_TRY(upipe_free(c, own.k));
        if (!p->kv_grads_accumulate) UPIPE_TRY(upipe_alloc(c, &tokens->v, b->token_dv, "dv"));
        UPIPE_TRY(upi_kv_grad_sum(c, r, stage, UPI_PROJ_V, own.v, tokens->v, buf));
        if (p->kv_rounds_shared) UPIPE_TRY(upipe_free(c, own.v));
        UPIPE_TRY(upipe_free(c, buf));
        if (!p->kv_rounds_shared && p->kv_gathered) UPIPE_TRY(upi_kv_free(c, &own));
        if (p->kv_grads_accumulate) return UPIPE_OK; /* complete after the last stage: upi_kv_grad_end */
    } else {
        UPIPE_TRY(
            upipe_alloc(c, &buf, p->desc.dtype != UPIPE_F32 ? upipe_max_bytes(b->k, b->v) : 0, "kv_cast"));
        UPIPE_TRY(upi_kv_grad_to_tokens(c, r, stage, UPI_PROJ_K, own.k, &tokens->k, buf));
        UPIPE_TRY(upi_kv_grad_to_tokens(c, r, stage, UPI_PROJ_V, own.v, &tokens->v, buf));
        UPIPE_TRY(upipe_free(c, buf));
    }
    UPIPE_TRY(upi_project_bwd(c, r, UPI_PROJ_K, first, tokens->k));
    return upi_project_bwd(c, r, UPI_PROJ_V, first, tokens->v);
}

/* After the last stage: sums over stages are cast to the storage type, then dWk and dWv are formed. */
UPIPE_API upipe_status upi_kv_grad_end(upipe_ctx *c, const upi_run *r, upi_kv_grad *g)
{
    const upipe_plan *p = r->p;
    const int64_t n = p->rows * p->desc.kv_heads;
    void **sums[2], *narrow;
    int i;
    sums[0] = &g->tokens[0].k;
    sums[1] = &g->tokens[0].v;
    if (!p->kv_rounds_shared) UPIPE_TRY(upi_kv_free(c, &g->now));
    if (!p->kv_grads_accumulate) return UPIPE_OK;
    for (i = 0; i < 2 && p->desc.dtype != UPIPE_F32; ++i) {
        int dim = upi_dim(p, i == 0 ? UPI_PROJ_K : UPI_PROJ_V);
        UPIPE_TRY(upipe_alloc(c, &narrow, i == 0 ? r->buffers.token_dk : r->buffers.token_dv,
                              i == 0 ? "dk" : "dv"));
        UPIPE_TRY(c->ops->cast(c, upipe_view_packed(narrow, p->desc.dtype, n, 1, dim),
                               upipe_view_packed(*sums[i], UPIPE_F32, n, 1, dim)));
        UPIPE_TRY(upipe_free(c, *sums[i]));
        *sums[i] = narrow;
    }
    UPIPE_TRY(upi_project_heads_bwd(c, r, UPI_PROJ_K, upipe_head_run_all_kv(p), g->tokens[0].k));
    return upi_project_heads_bwd(c, r, UPI_PROJ_V, upipe_head_run_all_kv(p), g->tokens[0].v);
}

/* Frees dK and dV that are not read any more. */
UPIPE_API upipe_status upi_kv_grad_free(upipe_ctx *c, const upi_run *r, upi_kv_grad *g)
{
    int i;
    for (i = 0; i < (r->p->kv_grads_partial ? 1 : r->p->rounds); ++i)
        UPIPE_TRY(upi_kv_free(c, &g->tokens[i]));
    return UPIPE_OK;
}

/* dK or dV of the neighbouring heads from `head` on that are contiguous: a matrix [rows][n * dim]. */
UPIPE_API upipe_view upi_kv_grad_matrix(const upipe_plan *p, const upi_kv_grad *g, int head, upi_proj which)
{
    int stage = 0, rank = 0, n = p->kv_grads_partial ? 1 : p->kv_per_rank, at = head;
    const upi_kv_pair *tokens = &g->tokens[0];
    if (!p->kv_grads_partial) {
        upipe_plan_q_place(p, head * p->group, &stage, &rank);
        tokens = &g->tokens[upipe_plan_stage(p, stage).round];
        at = rank;
    }
    return upipe_view_packed((char *)(which == UPI_PROJ_K ? tokens->k : tokens->v) +
                                 (size_t)at * upipe_plan_rows_bytes(p, n, upi_dim(p, which)),
                             p->desc.dtype, p->rows, 1, n * upi_dim(p, which));
}

#endif

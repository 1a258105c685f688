/* kv_grad.h -- the owner of dK' and dV', and of dK and dV until dX is formed
 *
 * The stages of a round add to dK' and dV' in f32. After the last one they are sent back to the ranks of
 * their tokens, where dWk and dWv are formed, and kept until dX is formed:
 *
 *     a rank's own heads      in the storage type, [rank][batch][T][n][dim] of its n heads, for each round: a list
 *     shared heads (partial)  summed over ranks in rank order, one buffer [Hkv][batch][T][dim]. Where sums continue over
 *                             stages (in order, uneven heads in groups): in f32 until the last stage
 */
#ifndef UPIPE_STAGE_KV_GRAD_H
#define UPIPE_STAGE_KV_GRAD_H

/* Sums that continue over all stages, allocated before the first one. */
UPIPE_API upipe_status upi_kv_grad_sums(upipe_ctx *c, upi_pass *f)
{
    const upipe_buffers *b = &f->plan->buffers;
    const size_t e = upipe_dtype_bytes(f->plan->desc.dtype), dk = b->token_dk / e * 4,
                 dv = b->token_dv / e * 4;
    upi_kv_pair *sum = &f->dkv_tokens;
    UPIPE_TRY(upipe_alloc(c, &sum->k, dk, UPIPE_USE_DK, "dk"));
    UPIPE_TRY(upipe_alloc(c, &sum->v, dv, UPIPE_USE_DV, "dv"));
    UPIPE_TRY(c->ops->zero(c, sum->k, dk));
    return c->ops->zero(c, sum->v, dv);
}

/* dK' and dV' that stage i adds to: zero where its K' and V' are new. Ranks without common rounds use one pair of
 * buffers in all stages. */
UPIPE_API upipe_status upi_kv_grad_load(upipe_ctx *c, upi_pass *f, int i, upi_kv_pair *out)
{
    const upipe_plan *p = f->plan;
    const upipe_buffers *b = &p->buffers;
    const size_t dk = p->kv_gathered ? b->all_dk : b->dk, dv = p->kv_gathered ? b->all_dv : b->dv;
    if (i == 0 && p->kv_grads_accumulate) UPIPE_TRY(upi_kv_grad_sums(c, f));
    if (p->kv_rounds_shared ? upipe_plan_stage(p, i).kv_fresh : i == 0)
        UPIPE_TRY(upi_kv_alloc(c, &f->dkv, dk, dv, UPIPE_USE_ACT_GRAD));
    if (upipe_plan_kv_fresh(p, i, c->team->rank)) {
        UPIPE_TRY(c->ops->zero(c, f->dkv.k, dk));
        UPIPE_TRY(c->ops->zero(c, f->dkv.v, dv));
    }
    *out = f->dkv;
    return UPIPE_OK;
}

/* Receives partial gradients of shared heads in f32 and sums them in rank order.
 *   sum      [Hkv][batch][T][dim]: =, or f32 and += where sums continue over stages
 *   partial  f32 [rank][batch][T][n][dim], scratch
 */
UPIPE_API upipe_status upi_kv_grad_sum(upipe_ctx *c, const upi_pass *f, int stage, upi_proj which,
                                       const void *grad, void *sum, void *partial)
{
    const upipe_plan *p = f->plan;
    const int more = p->kv_grads_accumulate, dim = f->dim[which];
    const upipe_dtype type = more ? UPIPE_F32 : p->desc.dtype;
    const int64_t head = p->rows * dim;
    const size_t e = upipe_dtype_bytes(type);
    int64_t at = 0;
    int rank = 0, same, i, j;
    UPIPE_TRY(upipe_a2a_to_tokens(c, partial, grad, p, stage, UPIPE_A2A_DKV, (size_t)dim * 4));
    while (rank < p->desc.ranks) {
        const upipe_head_range mine = upipe_plan_part(p, UPIPE_A2A_DKV, stage, rank);
        for (same = 1; rank + same < p->desc.ranks; ++same) { /* neighbours with the same heads: one sum */
            upipe_head_range next = upipe_plan_part(p, UPIPE_A2A_DKV, stage, rank + same);
            if (next.first != mine.first || next.count != mine.count || mine.count == 0) break;
        }
        for (j = 0; j < mine.count; ++j) {
            float *from = (float *)partial + at + (int64_t)j * dim; /* head j of [batch][T][n][dim] */
            upipe_view to =
                upipe_view_packed((char *)sum + (size_t)((mine.first + j) * head) * e, type, p->rows, 1, dim);
            upipe_view part =
                upipe_view_make(from, UPIPE_F32, p->rows, (int64_t)mine.count * dim, 1, dim, dim);
            if (mine.count == 1) UPIPE_TRY(c->ops->sum(c, to, from, head, same, more));
            for (i = 0; mine.count > 1 && i < same; ++i, part.data = (float *)part.data + head * mine.count)
                UPIPE_TRY(c->ops->add(c, to, part));
        }
        at += same * head * mine.count;
        rank += same;
    }
    return UPIPE_OK;
}

/* Sends dK' or dV' of a round to the ranks of its tokens.
 *   stage   the round's last
 *   grad    f32 [batch][S][n][dim] of this rank's n heads
 *   tokens  a rank's own heads: [rank][batch][T][n][dim] in the storage type; shared heads: as upi_kv_grad_sum
 *   buf     of upipe_buffers.kv_grad bytes: as `partial` of upi_kv_grad_sum; own heads: for grad in the storage type,
 *           NULL where that is f32
 */
UPIPE_API upipe_status upi_kv_grad_to_tokens(upipe_ctx *c, const upi_pass *f, int stage, upi_proj which,
                                             const void *grad, void *tokens, void *buf)
{
    const upipe_plan *p = f->plan;
    const int64_t rows = p->team_tokens * p->desc.batch;
    const int32_t width = upipe_plan_part(p, UPIPE_A2A_DKV, stage, p->desc.rank).count * f->dim[which];
    if (p->kv_grads_partial) return upi_kv_grad_sum(c, f, stage, which, grad, tokens, buf);
    if (buf != NULL && width > 0)
        UPIPE_TRY(c->ops->cast(c, upipe_view_packed(buf, p->desc.dtype, rows, 1, width),
                               upipe_view_packed((void *)(uintptr_t)grad, UPIPE_F32, rows, 1, width)));
    return upipe_a2a_to_tokens(c, tokens, buf != NULL ? buf : grad, p, stage, UPIPE_A2A_DKV,
                               f->token_bytes[which]);
}

/* In an all-gather ring: *own = the sums over its ranks, for this rank's tokens. */
UPIPE_API upipe_status upi_kv_grad_reduce(upipe_ctx *c, const upi_pass *f, int stage, const upi_kv_pair *all,
                                          upi_kv_pair *own)
{
    const upipe_plan *p = f->plan;
    const upipe_buffers *b = &p->buffers;
    const int heads = upipe_plan_part(p, UPIPE_A2A_DKV, stage, c->team->rank).count;
    void *partial;
    UPIPE_TRY(upi_kv_alloc(c, own, b->dk, b->dv, UPIPE_USE_ACT_GRAD));
    UPIPE_TRY(upipe_alloc(c, &partial, (size_t)p->desc.ring * upipe_max_bytes(b->dk, b->dv),
                          UPIPE_USE_ACT_GRAD, "ring_partial"));
    if (heads > 0) {
        UPIPE_TRY(upi_ring_reduce_scatter(c, p, heads, p->desc.head_dim, (float *)own->k,
                                          (const float *)all->k, (float *)partial));
        UPIPE_TRY(upi_ring_reduce_scatter(c, p, heads, p->desc.v_dim, (float *)own->v, (const float *)all->v,
                                          (float *)partial));
    }
    return upipe_free(c, partial);
}

/* dK or dV of a round at its tokens. */
UPIPE_API void *upi_kv_grad_at(const upipe_ctx *c, const upi_pass *f, upi_proj which, int round)
{
    void *at = which == UPI_PROJ_K ? f->dkv_tokens.k : f->dkv_tokens.v;
    int n;
    for (n = f->dkv_rounds[which] - 1; at != NULL && n > round; --n) at = *upi_mem_link(c->mem, at);
    return at;
}

/* Allocates that of the next round, whose last stage this is. */
UPIPE_API upipe_status upi_kv_grad_alloc(upipe_ctx *c, upi_pass *f, upi_proj which, int stage, void **tokens)
{
    const int is_k = which == UPI_PROJ_K;
    const size_t bytes =
        upipe_plan_rows_bytes(f->plan, upi_plan_heads_at_tokens(f->plan, stage), f->dim[which]);
    void **latest = is_k ? &f->dkv_tokens.k : &f->dkv_tokens.v;
    UPIPE_TRY(upipe_alloc(c, tokens, bytes, is_k ? UPIPE_USE_DK : UPIPE_USE_DV, is_k ? "dk" : "dv"));
    if (*tokens == NULL) return UPIPE_OK; /* a rank without tokens */
    *upi_mem_link(c->mem, *tokens) = *latest;
    *latest = *tokens;
    ++f->dkv_rounds[which];
    return UPIPE_OK;
}

/* After a round's last stage i: sends dK' and dV' to the ranks of their tokens, and forms dWk and dWv unless
 * the sums continue. */
UPIPE_API upipe_status upi_kv_grad_store(upipe_ctx *c, upi_pass *f, int i, upi_kv_pair *round)
{
    const upipe_plan *p = f->plan;
    const int stage = i + p->width - 1;
    upi_kv_pair own = *round;
    void *grads[2], *tokens[2], *buf;
    int k;
    if (!upipe_plan_stage(p, stage).kv_last) return UPIPE_OK;
    if (p->kv_gathered) {
        UPIPE_TRY(upi_kv_grad_reduce(c, f, stage, round, &own));
        if (p->kv_rounds_shared) UPIPE_TRY(upi_kv_free(c, round));
    }
    grads[0] = own.k;
    grads[1] = own.v;
    UPIPE_TRY(upipe_alloc(c, &buf, p->buffers.kv_grad, UPIPE_USE_ACT_GRAD, "kv_grad"));
    for (k = 0; k < 2; ++k) {
        const upi_proj which = k == 0 ? UPI_PROJ_K : UPI_PROJ_V;
        if (p->kv_grads_accumulate)
            tokens[k] = upi_kv_grad_at(c, f, which, 0);
        else
            UPIPE_TRY(upi_kv_grad_alloc(c, f, which, stage, &tokens[k]));
        UPIPE_TRY(upi_kv_grad_to_tokens(c, f, stage, which, grads[k], tokens[k], buf));
        if (p->kv_rounds_shared) UPIPE_TRY(upipe_free(c, grads[k]));
    }
    UPIPE_TRY(upipe_free(c, buf));
    if (!p->kv_rounds_shared && p->kv_gathered) UPIPE_TRY(upi_kv_free(c, &own));
    if (p->kv_grads_accumulate) return UPIPE_OK; /* complete after the last stage: upi_kv_grad_end */
    UPIPE_TRY(upi_stage_grad(c, f, UPI_PROJ_K, stage - p->steps + 1, tokens[0]));
    return upi_stage_grad(c, f, UPI_PROJ_V, stage - p->steps + 1, tokens[1]);
}

/* Casts sums over stages to the storage type: *sum becomes a new block. */
UPIPE_API upipe_status upi_kv_grad_narrow(upipe_ctx *c, const upi_pass *f, upi_proj which, void **sum)
{
    const upipe_plan *p = f->plan;
    const int64_t n = p->rows * p->desc.kv_heads;
    const int is_k = which == UPI_PROJ_K;
    void *narrow;
    if (p->desc.dtype == UPIPE_F32) return UPIPE_OK;
    UPIPE_TRY(upipe_alloc(c, &narrow, is_k ? p->buffers.token_dk : p->buffers.token_dv,
                          is_k ? UPIPE_USE_DK : UPIPE_USE_DV, is_k ? "dk" : "dv"));
    UPIPE_TRY(c->ops->cast(c, upipe_view_packed(narrow, p->desc.dtype, n, 1, f->dim[which]),
                           upipe_view_packed(*sum, UPIPE_F32, n, 1, f->dim[which])));
    UPIPE_TRY(upipe_free(c, *sum));
    *sum = narrow;
    return UPIPE_OK;
}

/* After the last stage, where sums have continued over stages: dWk and dWv. Ranks without common rounds are among them:
 * their one pair of dK' and dV' is freed. */
UPIPE_API upipe_status upi_kv_grad_end(upipe_ctx *c, upi_pass *f)
{
    const upi_head_run all = upi_head_run_all_kv(f->plan);
    upi_kv_pair *sum = &f->dkv_tokens;
    if (!f->plan->kv_rounds_shared) UPIPE_TRY(upi_kv_free(c, &f->dkv));
    UPIPE_TRY(upi_kv_grad_narrow(c, f, UPI_PROJ_K, &sum->k));
    UPIPE_TRY(upi_kv_grad_narrow(c, f, UPI_PROJ_V, &sum->v));
    UPIPE_TRY(f->grad(c, f, UPI_PROJ_K, all, sum->k));
    return f->grad(c, f, UPI_PROJ_V, all, sum->v);
}

/* Frees dK and dV that are not read any more. */
UPIPE_API upipe_status upi_kv_grad_free(upipe_ctx *c, upi_pass *f)
{
    void **const latest[] = {&f->dkv_tokens.v, &f->dkv_tokens.k};
    int i;
    for (i = 0; i < 2; ++i)
        while (*latest[i] != NULL) {
            void *before = *upi_mem_link(c->mem, *latest[i]);
            UPIPE_TRY(upipe_free(c, *latest[i]));
            *latest[i] = before;
        }
    return UPIPE_OK;
}

/* dK or dV of the neighbouring heads from `head` on that are contiguous: a matrix [rows][n * dim]. */
UPIPE_API upipe_view upi_kv_grad_matrix(const upipe_ctx *c, const upi_pass *f, int head, upi_proj which)
{
    const upipe_plan *p = f->plan;
    int stage = 0, rank = 0, at = head, n = 1;
    if (!p->kv_grads_partial) { /* a round has neighbouring heads, in the order of ranks */
        upipe_plan_q_place(p, head * p->group, &stage, &rank);
        at -= upipe_plan_kv(p, stage, 0).first;
        n = upipe_plan_kv(p, stage, rank).count;
    }
    return upipe_view_packed((char *)upi_kv_grad_at(c, f, which, stage / p->steps) +
                                 upipe_plan_rows_bytes(p, at, f->dim[which]),
                             p->desc.dtype, p->rows, 1, n * f->dim[which]);
}

#endif

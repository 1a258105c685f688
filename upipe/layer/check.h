/* check.h -- what a pass checks before it sends: this rank's arguments, and agreement of all ranks
 *                                                                                 part of upipe_layer.h
 */
#ifndef UPIPE_LAYER_H
#include "../upipe_layer.h"
#elif !defined(UPIPE_LAYER_CHECK_H)
#define UPIPE_LAYER_CHECK_H

/* Compares the block with all ranks: everything but the data and the rows of a tile, which each rank may
 * choose.
 *   tokens, segments  of the whole sequence in segments (the plan's tokens are one segment's); 0 without
 *                     segments
 */
UPIPE_API upipe_status upi_layer_agree(upipe_ctx *c, const upipe_layer *l, int64_t tokens, int segments)
{
    const upipe_plan_desc *d = &l->plan->desc;
    const size_t borders = l->mask.cu_seqlens != NULL ? (size_t)(l->mask.cu_seqlens_n + 1) : 0;
    const uint64_t hash = upi_hash_bytes(UPI_HASH, l->mask.cu_seqlens, borders * sizeof *l->mask.cu_seqlens);
    upipe_fields f;
    f.n = 0;
    upipe_field_int(&f, "tokens", d->tokens);
    upipe_field_int(&f, "tokens of all segments", tokens);
    upipe_field_int(&f, "segments", segments);
    upipe_field_int(&f, "from x (0: Q, K, V of the host's own)", l->wq != NULL);
    upipe_field_int(&f, "batch", d->batch);
    upipe_field_int(&f, "model_dim", d->model_dim);
    upipe_field_int(&f, "ranks", d->ranks);
    upipe_field_int(&f, "heads", d->heads);
    upipe_field_int(&f, "kv_heads", d->kv_heads);
    upipe_field_int(&f, "head_dim", d->head_dim);
    upipe_field_int(&f, "chunk", d->chunk);
    upipe_field_int(&f, "naive", d->naive != 0);
    upipe_field_int(&f, "dtype (0 f32, 1 bf16, 2 f16)", (int64_t)d->dtype);
    upipe_field_int(&f, "v_dim", d->v_dim);
    upipe_field_int(&f, "ring", d->ring);
    upipe_field_int(&f, "ring_inner", d->ring_inner);
    upipe_field_int(&f, "ring_mode (1 p2p, 2 all-gather)", (int64_t)d->ring_mode);
    upipe_field_int(&f, "ring_prefetch", d->ring_prefetch != 0);
    upipe_field_int(&f, "overlap", d->overlap != 0);
    upipe_field_int(&f, "layout (0 contiguous, 1 zigzag, 2 striped)", (int64_t)d->layout);
    upipe_field_int(&f, "causal", l->mask.causal != 0);
    upipe_field_int(&f, "window", l->mask.window);
    upipe_field_int(&f, "sinks", l->mask.sinks != NULL);
    upipe_field_int(&f, "cu_seqlens_n", l->mask.cu_seqlens_n);
    upipe_field_int(&f, "cu_seqlens (hash)", (int64_t)(hash >> 1));
    upipe_field_real(&f, "softcap", l->mask.softcap);
    upipe_field_int(&f, "qk_norm", l->q_norm_weight != NULL);
    upipe_field_int(&f, "biases (1 bq, 2 bk, 4 bv)",
                    (l->bq != NULL) + 2 * (l->bk != NULL) + 4 * (l->bv != NULL));
    upipe_field_int(&f, "rope_interleaved", l->rope_interleaved != 0);
    upipe_field_real(&f, "scale", l->scale);
    upipe_field_real(&f, "norm_eps", l->norm_eps);
    upipe_field_real(&f, "rope_theta", l->rope_theta);
    UPIPE_TRY(upipe_comm_agree(c, c->team, f.at, f.n));
    return d->ring > 1 ? upipe_comm_agree(c, c->ring, f.at, f.n) : UPIPE_OK;
}

/* x, or another matrix of its shape: [rows][1][D] of the plan's type. */
UPIPE_API upipe_status upi_layer_check_rows(upipe_ctx *c, const upipe_plan *p, const char *name, upipe_view x)
{
    const int same = upi_enum_number(&x.dtype, sizeof x.dtype) == (int)p->desc.dtype;
    if (x.n == p->rows && x.h == 1 && x.d == p->desc.model_dim && same) return UPIPE_OK;
    return upipe_fail(&c->err, UPIPE_ERR_ARG, "%s is %s [%lld][%d][%d], the plan says %s [%lld][1][%lld]",
                      name, upi_dtype_name_of(&x.dtype), (long long)x.n, x.h, x.d,
                      upipe_dtype_name(p->desc.dtype), (long long)p->rows, (long long)p->desc.model_dim);
}

/* Checks slots and y, or dy, of an output projection. */
UPIPE_API upipe_status upi_out_check(upipe_ctx *c, const upipe_layer *l, upipe_view y,
                                     const upipe_saved *save)
{
    if (l->wo == NULL) return upipe_fail(&c->err, UPIPE_ERR_ARG, "wo is NULL");
    UPIPE_TRY(upipe_slots_check(c, l->plan, &save->out, "final_out"));
    if (save->lse == NULL || save->delta != NULL)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "final_out is consumed already: its slots hold a gradient");
    return upi_layer_check_rows(c, l->plan, "y", y);
}

/* Checks plan, mask and context of this rank; nothing is sent. */
UPIPE_API upipe_status upi_check_attends(upipe_ctx *c, const upipe_layer *l)
{
    const upipe_plan_desc *d = &l->plan->desc;
    const int dims[2] = {d->head_dim, d->v_dim};
    upipe_attn a;
    const int ring = c->ring != NULL ? c->ring->ranks : 1, ring_rank = c->ring != NULL ? c->ring->rank : 0;
    int i;
    if (ring != d->ring || (ring > 1 && ring_rank != d->ring_rank))
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "a plan for ring rank %d of %d on rank %d of a ring of %d",
                          d->ring_rank, d->ring, ring_rank, ring);
    if (c->team->ranks != d->ranks)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "a plan for %d ranks on a team of %d", d->ranks,
                          c->team->ranks);
    if (c->team->rank != d->rank && !upipe_plan_even(l->plan))
        return upipe_fail(
            &c->err, UPIPE_ERR_ARG,
            "a plan for rank %d on rank %d: where tokens or heads do not divide, each rank has its own",
            d->rank, c->team->rank);
    if (l->plan->overlap && c->side_stream == NULL)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "stages are to overlap, but ctx->side_stream is NULL");
    for (i = 0; i < 2; ++i)
        if (dims[i] < UPIPE_HEAD_DIM_MIN || dims[i] > UPIPE_HEAD_DIM_MAX ||
            dims[i] % UPIPE_HEAD_DIM_STEP != 0)
            return upipe_fail(
                &c->err, UPIPE_ERR_UNSUPPORTED, "head dim %d%s; %d to %d in steps of %d are built", dims[i],
                i == 1 ? " of V" : "", UPIPE_HEAD_DIM_MIN, UPIPE_HEAD_DIM_MAX, UPIPE_HEAD_DIM_STEP);
    if (!(l->scale >= 0) || !__builtin_isfinite(l->scale))
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "scale %g", (double)l->scale);
    memset(&a, 0, sizeof a);
    a.mask = l->mask;
    a.scale = l->scale;
    a.q.d = d->head_dim;
    a.v.d = d->v_dim;
    a.merge = d->ring > 1;
    UPIPE_TRY(upi_attn_check_masks(c, &a));
    return upi_attn_check_can(c, &a, 1);
}

/* Checks this rank's arguments; nothing is sent. */
UPIPE_API upipe_status upi_layer_check_own(upipe_ctx *c, const upipe_layer *l, upipe_view x)
{
    const double sizes[2] = {l->rope_theta, l->norm_eps};
    int i;
    UPIPE_TRY(upi_check_attends(c, l));
    UPIPE_TRY(upi_layer_check_rows(c, l->plan, "x", x));
    if (!upi_dtype_built(c->ops, &l->grad_dtype))
        return upipe_fail(&c->err, UPIPE_ERR_UNSUPPORTED, "gradients of weights in %s",
                          upi_dtype_name_of(&l->grad_dtype));
    if (l->wq == NULL || l->wk == NULL || l->wv == NULL)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "wq, wk or wv is NULL");
    if ((l->q_norm_weight == NULL) != (l->k_norm_weight == NULL))
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "QK norm needs both norm weights or none");
    if (l->q_norm_weight == NULL && l->norm_eps != 0)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "norm_eps %g without the norm weights of a QK norm",
                          l->norm_eps);
    if (l->rope_theta == 0 && l->rope_interleaved)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "rope_interleaved without rope_theta");
    for (i = 0; i < 2; ++i)
        if (!(sizes[i] >= 0) || !__builtin_isfinite(sizes[i]) || l->tile_rows < 0)
            return upipe_fail(&c->err, UPIPE_ERR_ARG, "rope theta %g, norm eps %g, tile rows %lld",
                              l->rope_theta, l->norm_eps, (long long)l->tile_rows);
    return UPIPE_OK;
}

/* ARG if a gradient is wanted of what the layer does not have. */
UPIPE_API upipe_status upi_layer_check_grads(upipe_ctx *c, const upipe_layer *l, const upipe_grads *grads)
{
    const float *const biases[4] = {l->bq, l->bk, l->bv, l->bo};
    const float *const db[4] = {grads->bq, grads->bk, grads->bv, grads->bo};
    static const char *const names[] = {"bq", "bk", "bv", "bo"};
    int i;
    if (l->q_norm_weight == NULL && (grads->q_norm_weight != NULL || grads->k_norm_weight != NULL))
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "gradients of norm weights are wanted without a QK norm");
    if (l->mask.sinks == NULL && grads->sinks != NULL)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "a gradient of sinks is wanted without sinks");
    for (i = 0; i < 4; ++i)
        if (biases[i] == NULL && db[i] != NULL)
            return upipe_fail(&c->err, UPIPE_ERR_ARG, "a gradient of %s is wanted without it", names[i]);
    return UPIPE_OK;
}

/* Checks what a backward needs of the forward, and its gradients. */
UPIPE_API upipe_status upi_layer_check_bwd(upipe_ctx *c, const upipe_layer *l, const upipe_grads *grads,
                                           const upipe_saved *save, const upipe_slots *dout)
{
    if (dout == NULL) return upipe_fail(&c->err, UPIPE_ERR_ARG, "dout is NULL");
    if (save->lse == NULL)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "the forward's results are not there (consumed before?)");
    UPIPE_TRY(upipe_slots_check(c, l->plan, dout, "dout"));
    if (save->delta == NULL && dout->data == save->out.data)
        return upipe_fail(&c->err, UPIPE_ERR_ARG,
                          "dout is final_out, not its gradient: upipe_layer_out_bwd was not called");
    if (save->delta == NULL) UPIPE_TRY(upipe_slots_check(c, l->plan, &save->out, "final_out"));
    return upi_layer_check_grads(c, l, grads);
}

#endif

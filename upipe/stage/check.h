/* check.h -- what a pass checks before it sends: this rank's arguments, and agreement of all ranks */
#ifndef UPIPE_STAGE_CHECK_H
#define UPIPE_STAGE_CHECK_H

/* Compares a call with its forward; that one records what it is given.
 *   f   what ranks compare; NULL: a projection of the results, which reads none of it, and all weights
 */
UPIPE_API upipe_status upi_stage_given(upipe_ctx *c, const upipe_layer *l, const upi_fields *f,
                                       upipe_given *given)
{
    const upi_weight weights[] = {
        {"wq", l->wq},
        {l->wq != NULL ? "wk" : "wkv", l->wk}, /* without wq it is upipe_latent.h's */
        {"wv", l->wv},
        {"bq", l->bq},
        {"bk", l->bk},
        {"bv", l->bv},
        {"q_norm_weight", l->q_norm_weight},
        {"k_norm_weight", l->k_norm_weight},
        {"sinks", l->mask.sinks},
        {"wo", l->wo},
        {"wg", l->wg},
        {"bo", l->bo}};
    enum { ALL = sizeof weights / sizeof *weights, PROJECTION = 3 };
    const int n = f == NULL || given->plan == 0 ? ALL : ALL - PROJECTION;
    return upi_given_same(&c->err, given, l->plan->seal, l->id, f, weights, n);
}

/* Compares with all ranks, and a backward's with its forward's, what they must share: everything but the data and the rows
 * of a tile, which each rank may choose. Borders of packed sequences must be those of all tokens.
 *   tokens, segments  of the whole sequence in segments (the plan's tokens are one segment's); 0 without
 *                     segments
 *   more              whole numbers that a door adds; NULL: none
 */
UPIPE_API upipe_status upi_stage_agree(upipe_ctx *c, const upipe_layer *l, int64_t tokens, int segments,
                                       const upi_fields *more, upipe_given *given)
{
    const upipe_plan_desc *d = &l->plan->desc;
    const size_t pairs =
        l->rope_rates != NULL ? (size_t)(l->rope_dims > 0 ? l->rope_dims : d->head_dim) / 2 : 0;
    const uint64_t rates = upipe_hash_bytes(UPIPE_HASH, l->rope_rates, pairs * sizeof *l->rope_rates);
    upi_fields f;
    int i;
    if (!l->mask.padded)
        UPIPE_TRY(
            upi_borders_cover(&c->err, &l->mask.borders, 0, d->batch * (tokens > 0 ? tokens : d->tokens)));
    f.n = 0;
    upi_field_int(&f, "tokens", d->tokens);
    upi_field_int(&f, "tokens of all segments", tokens);
    upi_field_int(&f, "segments", segments);
    upi_field_int(&f, "from x (0: Q, K, V of the host's own)", l->wq != NULL);
    upi_field_int(&f, "batch", d->batch);
    upi_field_int(&f, "model_dim", d->model_dim);
    upi_field_int(&f, "heads", d->heads);
    upi_field_int(&f, "kv_heads", d->kv_heads);
    upi_field_int(&f, "head_dim", d->head_dim);
    upi_field_int(&f, "chunk", d->chunk);
    upi_field_int(&f, "naive", d->naive != 0);
    upi_field_int(&f, "dtype (0 f32, 1 bf16)", (int64_t)d->dtype);
    upi_field_int(&f, "v_dim", d->v_dim);
    upi_field_int(&f, "ring", d->ring);
    upi_field_int(&f, "ring_inner", d->ring_inner);
    upi_field_int(&f, "ring_mode (1 p2p, 2 all-gather)", (int64_t)d->ring_mode);
    upi_field_int(&f, "ring_prefetch", d->ring_prefetch != 0);
    upi_field_int(&f, "overlap", d->overlap != 0);
    upi_field_int(&f, "layout (0 contiguous, 1 zigzag, 2 striped)", (int64_t)d->layout);
    upi_field_int(&f, "causal", l->mask.causal != 0);
    upi_field_int(&f, "window", l->mask.window);
    upi_field_int(&f, "sinks", l->mask.sinks != NULL);
    upi_field_int(&f, "cu_seqlens_n", l->mask.borders.cu_seqlens_n);
    upi_field_int(&f, "cu_seqlens (hash)", (int64_t)(upi_borders_hash(&l->mask.borders) >> 1));
    upi_field_real(&f, "softcap", l->mask.softcap);
    upi_field_int(&f, "biases and norm (1 bq, 2 bk, 4 bv, 8 qk_norm)",
                  (l->bq != NULL) + 2 * (l->bk != NULL) + 4 * (l->bv != NULL) +
                      8 * (l->q_norm_weight != NULL));
    upi_field_int(&f, "attn_reads_o of the compute table", c->ops->attn_reads_o != 0);
    upi_field_int(&f, "rope_interleaved", l->rope_interleaved != 0);
    upi_field_int(&f, "rope_dims", l->rope_dims);
    upi_field_int(&f, "rope_rates (hash)", (int64_t)(rates >> 1));
    upi_field_real(&f, "rope_factor", l->rope_factor);
    upi_field_real(&f, "scale", l->scale);
    upi_field_real(&f, "norm_eps", l->norm_eps);
    upi_field_real(&f, "rope_theta", l->rope_theta);
    for (i = 0; more != NULL && i < more->n; ++i) upi_field_int(&f, more->list[i].name, more->list[i].value);
    UPIPE_TRY(upi_stage_given(c, l, &f, given));
    UPIPE_TRY(upi_agree(c, c->team, &f));
    return d->ring > 1 ? upi_agree(c, c->ring, &f) : UPIPE_OK;
}

/* x, or another matrix of its rows: [rows][1][dim] of the plan's type. */
UPIPE_API upipe_status upi_check_rows(upipe_ctx *c, const upipe_plan *p, const char *name, upipe_view x,
                                      int64_t dim)
{
    const int same = upi_enum_number(&x.dtype, sizeof x.dtype) == (int)p->desc.dtype;
    if (x.n == p->rows && x.h == 1 && x.d == dim && same) return UPIPE_OK;
    return upipe_fail(&c->err, UPIPE_ERR_ARG, "%s is %s [%lld][%d][%d], the plan says %s [%lld][1][%lld]",
                      name, upi_dtype_name_of(&x.dtype), (long long)x.n, x.h, x.d,
                      upipe_dtype_name(p->desc.dtype), (long long)p->rows, (long long)dim);
}

/* Checks plan, mask and context of this rank; nothing is sent. */
UPIPE_API upipe_status upi_check_stages(upipe_ctx *c, const upipe_layer *l)
{
    const upipe_plan_desc *d = l != NULL && l->plan != NULL ? &l->plan->desc : NULL;
    upipe_attn a;
    if (d == NULL) return upipe_fail(&c->err, UPIPE_ERR_ARG, "the layer or its plan is NULL");
    UPIPE_TRY(upi_plan_check(
        c, l->plan, UPI_PLAN_WHOLE | UPI_PLAN_TEAM | (d->ring > 1 || c->ring != NULL ? UPI_PLAN_RING : 0)));
    if (l->plan->overlap && c->side_stream == NULL)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "stages are to overlap, but ctx->side_stream is NULL");
    UPIPE_TRY(upi_attn_check_dims(c, d->head_dim, d->v_dim));
    memset(&a, 0, sizeof a);
    a.mask = l->mask;
    a.scale = l->scale;
    a.q.d = d->head_dim;
    a.v.d = d->v_dim;
    UPIPE_TRY(upi_attn_check_masks(c, &a));
    return upi_attn_check_can(c, &a, d->ring > 1);
}

/* Checks slots and y, or dy, of an output projection. */
UPIPE_API upipe_status upi_check_out(upipe_ctx *c, const upipe_layer *l, upipe_view y,
                                     const upipe_saved *save)
{
    UPIPE_TRY(upi_check_stages(c, l));
    if (l->wo == NULL) return upipe_fail(&c->err, UPIPE_ERR_ARG, "wo is NULL");
    if (save == NULL || save->given.plan == 0)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "save is NULL, or not there any more (consumed?)");
    UPIPE_TRY(upi_slots_check(c, l->plan, &save->out, "final_out"));
    if (save->lse == NULL || save->delta != NULL)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "final_out is consumed already: its slots hold a gradient");
    UPIPE_TRY(upi_check_rows(c, l->plan, "y", y, l->plan->desc.model_dim));
    return upi_stage_given(c, l, NULL, (upipe_given *)(uintptr_t)&save->given);
}

/* Checks this rank's arguments; nothing is sent. */
UPIPE_API upipe_status upi_check_layer(upipe_ctx *c, const upipe_layer *l, upipe_view x)
{
    upipe_rope rope;
    int rotates;
    UPIPE_TRY(upi_check_stages(c, l));
    UPIPE_TRY(upi_check_rows(c, l->plan, "x", x, l->plan->desc.model_dim));
    if (l->wq == NULL || l->wk == NULL || l->wv == NULL)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "wq, wk or wv is NULL");
    if ((l->q_norm_weight == NULL) != (l->k_norm_weight == NULL))
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "QK norm needs both norm weights or none");
    if (l->q_norm_weight == NULL && l->norm_eps != 0)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "norm_eps %g without the norm weights of a QK norm",
                          l->norm_eps);
    rotates = l->rope_theta != 0 || l->rope_rates != NULL;
    if (!rotates && (l->rope_interleaved || l->rope_factor != 0 || l->rope_dims != 0))
        return upipe_fail(&c->err, UPIPE_ERR_ARG,
                          "rope_interleaved, rope_factor or rope_dims without rope_theta or rope_rates");
    if (!(l->rope_theta >= 0) || !__builtin_isfinite(l->rope_theta) || !(l->norm_eps >= 0) ||
        !__builtin_isfinite(l->norm_eps) || l->tile_rows < 0)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "rope theta %g, norm eps %g, tile rows %lld", l->rope_theta,
                          l->norm_eps, (long long)l->tile_rows);
    if (!rotates) return UPIPE_OK;
    memset(&rope, 0, sizeof rope);
    rope.x = upipe_view_packed(x.data, l->plan->desc.dtype, 0, 1, l->plan->desc.head_dim);
    rope.theta = l->rope_theta;
    rope.rates = l->rope_rates;
    rope.factor = l->rope_factor;
    rope.dims = l->rope_dims;
    return upi_check_rope(c, &rope);
}

/* Checks the gradients that a backward is asked for, and those that it is given in slots.
 *   save dout   NULL: they are not given in slots
 */
UPIPE_API upipe_status upi_check_grads(upipe_ctx *c, const upipe_layer *l, const upipe_grads *grads,
                                       const upipe_saved *save, const upipe_slots *dout)
{
    const void *const optional[] = {l->bq, l->bk, l->bv, l->bo, l->wg};
    static const char *const names[] = {"bq", "bk", "bv", "bo", "wg"};
    int i;
    if (save != NULL) {
        UPIPE_TRY(upi_slots_check(c, l->plan, dout, "dout"));
        if (save->delta == NULL && dout->data == save->out.data)
            return upipe_fail(&c->err, UPIPE_ERR_ARG,
                              "dout is final_out, not its gradient: upipe_layer_out_bwd was not called");
        if (save->delta == NULL) UPIPE_TRY(upi_slots_check(c, l->plan, &save->out, "final_out"));
    }
    if (grads == NULL) return upipe_fail(&c->err, UPIPE_ERR_ARG, "grads is NULL");
    if (l->q_norm_weight == NULL && (grads->q_norm_weight != NULL || grads->k_norm_weight != NULL))
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "gradients of norm weights are wanted without a QK norm");
    if (l->mask.sinks == NULL && grads->sinks != NULL)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "a gradient of sinks is wanted without sinks");
    for (i = 0; i < (int)(sizeof optional / sizeof *optional); ++i) {
        const void *const given[] = {grads->bq, grads->bk, grads->bv, grads->bo, grads->wg};
        if (optional[i] == NULL && given[i] != NULL)
            return upipe_fail(&c->err, UPIPE_ERR_ARG, "a gradient of %s is wanted without it", names[i]);
    }
    return UPIPE_OK;
}

#endif

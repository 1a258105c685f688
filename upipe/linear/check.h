/* check.h -- what a layer of linear attention refuses */
#ifndef UPIPE_LINEAR_CHECK_H
#define UPIPE_LINEAR_CHECK_H

UPIPE_API upipe_status upi_lin_check_shape(upipe_ctx *c, const upipe_linear_layer *l)
{
    const int chunk = l->chunk > 0 ? l->chunk : UPIPE_LINEAR_CHUNK;
    int64_t size, all;
    UPIPE_TRY(upi_borders_check(&c->err, &l->capacity));
    if (l->heads < 1 || l->key_heads < 1 || l->heads % l->key_heads != 0 || l->stage_keys < 0 ||
        l->tile_rows < 0)
        return upipe_fail(
            &c->err, UPIPE_ERR_ARG,
            "linear layer: %d heads over %d key heads, stages of %d key heads, tiles of %lld rows", l->heads,
            l->key_heads, l->stage_keys, (long long)l->tile_rows);
    if (l->tile_rows % UPIPE_SUM_ROWS != 0)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "linear layer: tiles of %lld rows, no multiple of %d",
                          (long long)l->tile_rows, UPIPE_SUM_ROWS);
    if (l->key_dim < 1 || l->key_dim > UPIPE_LINEAR_DIM_MAX || l->value_dim < 1 ||
        l->value_dim > UPIPE_LINEAR_DIM_MAX)
        return upipe_fail(&c->err, UPIPE_ERR_UNSUPPORTED,
                          "linear layer: a state of %d x %d; 1 to %d each are built", l->key_dim,
                          l->value_dim, UPIPE_LINEAR_DIM_MAX);
    if (l->taps < 2 || l->taps > UPIPE_LINEAR_TAPS_MAX)
        return upipe_fail(&c->err, UPIPE_ERR_UNSUPPORTED,
                          "linear layer: a convolution of %d taps; 2 to %d are built", l->taps,
                          UPIPE_LINEAR_TAPS_MAX);
    if (l->chunk < 0 || l->chunk > UPIPE_LINEAR_CHUNK_MAX || !(l->norm_eps >= 0) ||
        !__builtin_isfinite(l->norm_eps))
        return upipe_fail(&c->err, UPIPE_ERR_ARG,
                          "linear layer: chunks of %d tokens (at most %d), norm_eps %g", l->chunk,
                          UPIPE_LINEAR_CHUNK_MAX, (double)l->norm_eps);
    if (chunk > l->rules->chunk_max)
        return upipe_fail(&c->err, UPIPE_ERR_UNSUPPORTED,
                          "linear layer: chunks of %d tokens; the rules %s have at most %d", chunk,
                          l->rules->name, l->rules->chunk_max);
    if (!upipe_mul(&size, upi_lin_states(l, 1) + (l->taps - 1) * upi_lin_channels(l, 1),
                   4 * (int64_t)l->key_heads) ||
        size / 4 > INT32_MAX || !upipe_mul(&all, l->plan->local, 4 * upi_lin_channels(l, l->key_heads)))
        return upipe_fail(&c->err, UPIPE_ERR_OVERFLOW, "linear layer: %d heads of %d x %d", l->heads,
                          l->key_dim, l->value_dim);
    return UPIPE_OK;
}

/* A matrix of this rank's tokens, [n][1][D]. */
UPIPE_API upipe_status upi_lin_check_rows(upipe_ctx *c, const upipe_linear_layer *l, const char *name,
                                          upipe_view v)
{
    const upipe_plan *p = l->plan;
    if (v.data != NULL && v.n == p->local && v.h == 1 && v.d == p->desc.model_dim &&
        upi_enum_number(&v.dtype, sizeof v.dtype) == (int)p->desc.dtype)
        return UPIPE_OK;
    return upipe_fail(&c->err, UPIPE_ERR_ARG,
                      "linear layer: %s is %s%s [%lld][%d][%d], not %s [%lld][1][%lld]", name,
                      v.data == NULL ? "NULL, " : "", upi_dtype_name_of(&v.dtype), (long long)v.n, v.h, v.d,
                      upipe_dtype_name(p->desc.dtype), (long long)p->local, (long long)p->desc.model_dim);
}

/* What a backward must have as its forward had it, and all ranks alike. */
UPIPE_API upi_fields upi_lin_fields(const upipe_linear_layer *l)
{
    upi_fields f;
    f.n = 0;
    upi_field_int(&f, "a linear layer's model_dim", l->plan->desc.model_dim);
    upi_field_int(&f, "its storage type", l->plan->desc.dtype);
    upi_field_int(&f, "its heads", l->heads);
    upi_field_int(&f, "its key heads", l->key_heads);
    upi_field_int(&f, "its key_dim", l->key_dim);
    upi_field_int(&f, "its value_dim", l->value_dim);
    upi_field_int(&f, "taps of its convolution", l->taps);
    upi_field_int(&f, "its chunk", l->chunk > 0 ? l->chunk : UPIPE_LINEAR_CHUNK);
    upi_field_int(&f, "key heads of its stages", upi_lin_stage_keys(l));
    upi_field_real(&f, "its norm_eps", (double)l->norm_eps);
    upi_field_int(&f, "position of its first token", l->first);
    upi_field_int(&f, "cu_seqlens_n", l->borders.cu_seqlens_n);
    upi_field_int(&f, "cu_seqlens (hash)", (int64_t)(upi_borders_hash(&l->borders) >> 1));
    return f;
}

/* Compares a call with its forward; that one records what it is given. */
UPIPE_API upipe_status upi_lin_given(upipe_ctx *c, const upipe_linear_layer *l, const upi_fields *f,
                                     upipe_given *given)
{
    const upi_weight weights[] = {
        {"w_qkv", l->w_qkv}, {"w_z", l->w_z},         {"w_b", l->w_b},
        {"w_a", l->w_a},     {"w_out", l->w_out},     {"conv", l->conv},
        {"a_log", l->a_log}, {"dt_bias", l->dt_bias}, {"norm_weight", l->norm_weight}};
    return upi_given_same(&c->err, given, l->plan->seal, l->id, f, weights,
                          (int)(sizeof weights / sizeof *weights));
}

/* Compares a call with all ranks, for the scan too.
 *   backward   which call it is */
UPIPE_API upipe_status upi_lin_agree(upipe_ctx *c, upipe_comm *comm, const upipe_linear_layer *l,
                                     upi_fields *f, int64_t backward, int carried)
{
    upi_field_int(f, "its direction (1: backward)", backward);
    upi_field_int(f, "tokens of the scan", l->plan->desc.tokens);
    upi_field_int(f, "its ranks in a ring", l->plan->desc.ring);
    upi_field_int(f, "carry", carried);
    return upi_agree(c, comm, f);
}

/* The same of a call that reads what the forward has saved. */
UPIPE_API upipe_status upi_lin_check_save(upipe_ctx *c, const upipe_linear_layer *l, const upi_fields *f,
                                          const upipe_linear_layer_saved *save)
{
    upipe_given given;
    if (save == NULL || save->given.plan == 0)
        return upipe_fail(&c->err, UPIPE_ERR_ARG,
                          "linear layer: save is NULL, or not there any more (consumed?)");
    given = save->given;
    return upi_lin_given(c, l, f, &given);
}

/* A layer and x. */
UPIPE_API upipe_status upi_lin_check(upipe_ctx *c, const upipe_comm *comm, const upipe_linear_layer *l,
                                     upipe_view x)
{
    upipe_linear_ops rules;
    upipe_scan scan;
    UPIPE_TRY(upi_ctx_check(c));
    if (l == NULL || l->plan == NULL || l->rules == NULL)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "linear layer: it, its plan or its rules are NULL");
    rules = upi_linear_rules(c, l->rules);
    if (rules.conv == NULL || rules.conv_bwd == NULL || rules.gates == NULL || rules.gates_bwd == NULL)
        return upipe_fail(&c->err, UPIPE_ERR_UNSUPPORTED,
                          "linear layer: the rules %s have no convolution and no gates, which a layer needs",
                          rules.name);
    if (l->w_qkv == NULL || l->w_z == NULL || l->w_b == NULL || l->w_a == NULL || l->w_out == NULL ||
        l->conv == NULL || l->a_log == NULL || l->dt_bias == NULL || l->norm_weight == NULL)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "linear layer: a weight is NULL");
    UPIPE_TRY(upi_lin_check_shape(c, l));
    scan = upi_lin_scan(l);
    UPIPE_TRY(upi_scan_check(c, comm, &scan, l->a_log)); /* of the states that they are not NULL */
    return upi_lin_check_rows(c, l, "x", x);
}

#endif

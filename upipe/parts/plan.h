/* plan.h -- from a description to a plan: schedule, ring, buffers */
#ifndef UPIPE_PARTS_PLAN_H
#define UPIPE_PARTS_PLAN_H

UPIPE_API upipe_status upi_plan_sizes(const upipe_plan *p, upipe_err *e)
{
    const upipe_plan_desc *d = &p->desc;
    int64_t dim = d->v_dim > d->head_dim ? d->v_dim : d->head_dim, width = (int64_t)d->heads * dim, all;
    /* The largest product is a sum of a few tensors of tokens x (widest row) x 4 bytes: 16 of them are an
     * upper bound. */
    if (d->model_dim > width) width = d->model_dim;
    if ((int64_t)d->ranks * p->per_rank * dim > width) width = (int64_t)d->ranks * p->per_rank * dim;
    if (!upipe_mul(&all, d->tokens, d->batch) || !upipe_mul(&all, all, width) || !upipe_mul(&all, all, 64) ||
        !upipe_mul(&all, all, p->group > 1 ? 2 : 6))
        return upipe_fail(e, UPIPE_ERR_OVERFLOW,
                          "%lld tokens x %lld sequences x %lld elements overflow 63 bits",
                          (long long)d->tokens, (long long)d->batch, (long long)width);
    return UPIPE_OK;
}

/* More stages than a plan may have are not all counted. */
UPIPE_API void upi_plan_uneven(upipe_plan *p)
{
    int rank;
    p->schedule = UPIPE_UNEVEN;
    p->kv_grads_partial = p->group > 1;
    p->stages = 0;
    p->kv_per_rank = 1;
    for (rank = 0; rank < p->desc.ranks && p->stages <= UPIPE_STAGES_MAX; ++rank) {
        int stage = 0;
        for (; stage <= UPIPE_STAGES_MAX; ++stage) {
            const int kv = upipe_plan_kv(p, stage, rank).count;
            if (kv == 0) break;
            if (kv > p->kv_per_rank) p->kv_per_rank = kv;
        }
        if (stage > p->stages) p->stages = stage;
    }
    p->rounds = p->stages;
    p->steps = 1;
}

/* The schedule of a description whose numbers make sense. */
UPIPE_API upipe_status upi_plan_schedule(upipe_plan *p, upipe_err *e)
{
    const upipe_plan_desc *d = &p->desc;
    const int more = d->chunk % d->ranks != 0; /* all heads in one stage, where some ranks have one more */
    const int group = p->group, m = d->chunk / d->ranks + more;
    const int even = !more && d->heads % d->chunk == 0;
    p->per_rank = m;
    p->stages = even ? d->heads / (m * d->ranks) : 0;
    p->kv_per_rank = m > group ? m / group : 1;
    p->rounds = p->stages;
    p->steps = 1;
    if (even && m % group == 0) {
        p->schedule = UPIPE_WHOLE; /* the naive order is the same one here */
    } else if (d->naive) {
        if (!even || group % m != 0)
            return upipe_fail(e, UPIPE_ERR_UNSUPPORTED,
                              "%d heads in chunks of %d over %d ranks do not fit groups of %d in order",
                              d->heads, d->chunk, d->ranks, group);
        p->schedule = UPIPE_IN_ORDER;
        p->kv_grads_partial = 1;
    } else if (even && d->kv_heads % d->ranks == 0 && group % m == 0) {
        p->schedule = UPIPE_GROUP;
        p->rounds = d->kv_heads / d->ranks;
        p->steps = group / m;
    } else if (even && d->ranks % d->kv_heads == 0) {
        p->schedule = UPIPE_SPLIT;
        p->rounds = 1;
        p->steps = p->stages;
        p->kv_grads_partial = 1;
    } else {
        upi_plan_uneven(p);
    }
    if (p->stages > UPIPE_STAGES_MAX)
        return upipe_fail(e, UPIPE_ERR_UNSUPPORTED, "%d heads in chunks of %d are more than %d stages",
                          d->heads, d->chunk, UPIPE_STAGES_MAX);
    return UPIPE_OK;
}

/* AUTO: whether a ring holds less with K and V gathered. R times K', V' and their gradients in f32, against
 * Q', dO', dQ' and delta of the round's other stages and the buffers of the P2P ring. */
UPIPE_API upipe_ring_mode upi_plan_ring_mode(const upipe_plan *p)
{
    const upipe_plan_desc *d = &p->desc;
    int64_t e = (int64_t)upipe_dtype_bytes(d->dtype), both = (int64_t)d->head_dim + d->v_dim;
    int64_t kv = p->kv_per_rank * both * (e + 4), q = p->per_rank * (both * e + d->head_dim * (int64_t)4 + 8);
    if (p->schedule == UPIPE_UNEVEN) return UPIPE_RING_ALL_GATHER;
    return (d->ring - 1) * kv < (p->steps - 1) * q + 2 * kv ? UPIPE_RING_ALL_GATHER : UPIPE_RING_P2P;
}

/* What the ring adds to a plan: which rank holds which tokens, and how K and V are sent. */
UPIPE_API upipe_status upi_plan_ring(upipe_plan *p, upipe_err *e)
{
    upipe_plan_desc *d = &p->desc;
    int64_t least = (int64_t)d->ranks * d->ring * (d->layout == UPIPE_ZIGZAG && d->ring > 1 ? 2 : 1);
    int r;
    if (d->tokens < least)
        return upipe_fail(e, UPIPE_ERR_ARG,
                          "%lld tokens are fewer than %lld, one for each part of %d ranks%s",
                          (long long)d->tokens, (long long)least, d->ranks * d->ring,
                          d->layout == UPIPE_ZIGZAG && d->ring > 1 ? ", two parts a rank" : "");
    if (d->ring == 1 && (d->ring_inner > 1 || d->ring_mode != UPIPE_RING_AUTO))
        return upipe_fail(e, UPIPE_ERR_ARG, "an inner ring of %d or ring mode %d without a ring",
                          d->ring_inner, (int)d->ring_mode);
    if (d->ring % (d->ring_inner > 0 ? d->ring_inner : 1) != 0)
        return upipe_fail(e, UPIPE_ERR_ARG, "a ring of %d does not divide into inner rings of %d", d->ring,
                          d->ring_inner);
    if (d->ring > 1 && d->ring_mode == UPIPE_RING_AUTO && d->ring_inner <= 1)
        d->ring_mode = upi_plan_ring_mode(p);
    if (d->ring_inner > 1 && d->ring_mode == UPIPE_RING_AUTO) d->ring_mode = UPIPE_RING_P2P;
    if (d->ring_inner > 1 && d->ring_mode == UPIPE_RING_ALL_GATHER)
        return upipe_fail(e, UPIPE_ERR_ARG, "an inner ring of %d, but K and V are gathered", d->ring_inner);
    if (d->ring > 1 && d->ring_mode == UPIPE_RING_P2P && p->schedule == UPIPE_UNEVEN && p->stages > 1)
        return upipe_fail(e, UPIPE_ERR_UNSUPPORTED,
                          "%d/%d heads over %d ranks in %d stages are uneven: K and V cannot shift round a "
                          "ring, but can be gathered",
                          d->heads, d->kv_heads, d->ranks, p->stages);
    if (d->ring_prefetch && (d->ring == 1 || d->ring_mode != UPIPE_RING_ALL_GATHER))
        return upipe_fail(e, UPIPE_ERR_ARG, "K and V are to be gathered ahead, but are not gathered");
    if (d->ring_prefetch && p->schedule == UPIPE_UNEVEN)
        return upipe_fail(e, UPIPE_ERR_UNSUPPORTED,
                          "%d/%d heads over %d ranks in %d stages are uneven: K and V are not gathered ahead",
                          d->heads, d->kv_heads, d->ranks, p->stages);
    if (d->overlap && d->ring > 1)
        return upipe_fail(e, UPIPE_ERR_UNSUPPORTED, "stages are to overlap, but there is a ring of %d ranks",
                          d->ring);
    if (d->overlap && p->schedule == UPIPE_UNEVEN && p->stages > 1)
        return upipe_fail(e, UPIPE_ERR_UNSUPPORTED,
                          "%d/%d heads over %d ranks in %d stages are uneven: stages cannot overlap",
                          d->heads, d->kv_heads, d->ranks, p->stages);
    p->overlap = d->overlap && p->stages > 1;
    p->kv_rounds_shared = p->schedule != UPIPE_UNEVEN || p->group == 1;
    p->kv_grads_accumulate = p->schedule == UPIPE_IN_ORDER || !p->kv_rounds_shared;
    p->kv_gathered = d->ring > 1 && d->ring_mode == UPIPE_RING_ALL_GATHER;
    p->kv_prefetched = d->ring_prefetch && p->rounds > 1;
    p->width = d->ring > 1 && d->ring_mode == UPIPE_RING_P2P ? p->steps : 1;
    p->team_shard = upipe_shard_ring(d->layout, d->tokens, d->ring, d->ring_rank);
    p->shard = upi_shard_team(&p->team_shard, d->ranks, d->rank);
    p->team_tokens = p->team_shard.n;
    for (r = 0; r < d->ring; ++r) {
        const int64_t n = upipe_shard_ring(d->layout, d->tokens, d->ring, r).n;
        if (n > p->team_tokens_most) p->team_tokens_most = n;
    }
    p->local = p->shard.n;
    p->rows = p->local * d->batch;
    return UPIPE_OK;
}

/* The fields that are enums: nothing loads them before. */
UPIPE_API upipe_status upi_plan_enums(const upipe_plan_desc *d, upipe_err *e)
{
    const int dtype = upi_enum_number(&d->dtype, sizeof d->dtype);
    const int layout = upi_enum_number(&d->layout, sizeof d->layout);
    const int mode = upi_enum_number(&d->ring_mode, sizeof d->ring_mode);
    if (dtype < 0 || dtype > UPIPE_BF16)
        return upipe_fail(e, UPIPE_ERR_ARG, "data type %d is neither f32 nor bf16", dtype);
    if (layout < 0 || layout >= UPIPE_LAYOUTS)
        return upipe_fail(e, UPIPE_ERR_ARG, "layout %d is none of contiguous, zigzag and striped", layout);
    if (mode < 0 || mode > UPIPE_RING_ALL_GATHER)
        return upipe_fail(e, UPIPE_ERR_ARG, "ring mode %d is none of auto, p2p and all-gather", mode);
    return UPIPE_OK;
}

/* Bytes of this rank's buffers. */
UPIPE_API upipe_buffers upi_plan_buffers(const upipe_plan *p)
{
    const int d = p->desc.head_dim, v_dim = p->desc.v_dim, wide = d > v_dim ? d : v_dim, me = p->desc.rank;
    const size_t e = upipe_dtype_bytes(p->desc.dtype);
    const size_t hop = (size_t)(p->team_tokens_most * p->desc.batch),
                 all = (size_t)(p->desc.tokens * p->desc.batch);
    const int stages = p->schedule == UPIPE_UNEVEN ? p->stages : p->steps;
    size_t kv = (size_t)p->kv_per_rank;
    upipe_buffers b;
    int i;
    memset(&b, 0, sizeof b);
    for (i = 0; i < stages; ++i) {
        int sent = upipe_plan_heads_sent(p, UPIPE_A2A_Q, i), mine = upipe_plan_q(p, i, me).count;
        b.send = upipe_max_bytes(b.send, upipe_plan_rows_bytes(p, sent, d));
        b.slot = upipe_max_bytes(b.slot, upipe_plan_rows_bytes(p, sent, wide));
        b.q = upipe_max_bytes(b.q, upi_plan_team_bytes(p, mine, d));
        b.o = upipe_max_bytes(b.o, upi_plan_team_bytes(p, mine, v_dim));
        b.partial = upipe_max_bytes(
            b.partial, upipe_plan_rows_bytes(p, upipe_plan_heads_sent(p, UPIPE_A2A_DKV, i), wide) / e * 4);
        b.token_dk = upipe_max_bytes(b.token_dk, upipe_plan_rows_bytes(p, upi_plan_heads_at_tokens(p, i), d));
    }
    /* the naive order may need one block more or less in later stages */
    for (i = 0; i < p->stages; ++i)
        if (p->schedule >= UPIPE_IN_ORDER || i == 0)
            b.kv_send = upipe_max_bytes(
                b.kv_send, upipe_plan_rows_bytes(p, upipe_plan_heads_sent(p, UPIPE_A2A_KV, i), wide));
    b.send = upipe_max_bytes(b.send, upipe_max_bytes(b.q, b.o));
    b.slot = upipe_max_bytes(b.slot, b.q);
    b.stat = b.q / e / (size_t)d * 4;
    b.k = upi_plan_team_bytes(p, p->kv_per_rank, d);
    b.v = upi_plan_team_bytes(p, p->kv_per_rank, v_dim);
    b.kv_grad = p->kv_grads_partial ? b.partial : e < 4 ? upipe_max_bytes(b.k, b.v) : 0;
    b.dk = b.k / e * 4;
    b.dv = b.v / e * 4;
    b.token_dv = b.token_dk / (size_t)d * (size_t)v_dim;
    b.lse = (size_t)(upipe_plan_before(p, p->stages, me) * p->team_tokens * p->desc.batch) * 4;
    if (b.lse == 0) b.lse = 4; /* a rank without heads: NULL would mean consumed */
    b.delta = (size_t)(p->rows * p->desc.heads) * 4;
    if (p->desc.ring == 1) return b;
    b.sum_o = b.o / e * 4;
    b.sum_q = b.q / e * 4;
    b.all_k = all * kv * (size_t)d * e;
    b.all_v = all * kv * (size_t)v_dim * e;
    b.all_dk = b.all_k / e * 4;
    b.all_dv = b.all_v / e * 4;
    b.hop_k = hop * kv * (size_t)d * e;
    b.hop_v = hop * kv * (size_t)v_dim * e;
    if (p->desc.ring_mode == UPIPE_RING_P2P) {
        /* those of other ranks are formed there too */
        b.dk = b.hop_k / e * 4;
        b.dv = b.hop_v / e * 4;
    }
    return b;
}

#endif

/* scan.h -- the steps of a pass, and what it checks before it sends */
#ifndef UPIPE_LINEAR_SCAN_H
#define UPIPE_LINEAR_SCAN_H

/* ---- who waits for whom ---- */

UPIPE_API int upi_scan_ranks(const upipe_scan *s)
{
    return s->plan->desc.ranks * s->plan->desc.ring;
}

UPIPE_API int upi_scan_rank(const upipe_scan *s)
{
    return s->plan->desc.ring_rank * s->plan->desc.ranks + s->plan->desc.rank;
}

/* Position of a rank's first token. Behind the last rank: of the next segment's. */
UPIPE_API int64_t upi_scan_pos(const upipe_scan *s, int rank)
{
    const upipe_plan_desc *d = &s->plan->desc;
    const upipe_shard held = upipe_shard_ring(UPIPE_CONTIGUOUS, d->tokens, d->ring, rank / d->ranks);
    if (rank == d->ranks * d->ring) return s->first + d->tokens;
    return s->first + held.piece[0].pos + upipe_cut(held.n, d->ranks, rank % d->ranks);
}

/* Whether a state goes on into this rank's first token: no document begins there. */
UPIPE_API int upi_scan_joined(const upipe_scan *s, int rank)
{
    const int64_t pos = upi_scan_pos(s, rank);
    return upi_border_before(&s->borders, pos) != pos;
}

/* Ranks that a rank waits for, one behind the other, in the forward. */
UPIPE_API int upi_scan_fwd_depth(const upipe_scan *s, int rank)
{
    int depth = 0;
    while (depth < rank && upi_scan_joined(s, rank - depth)) ++depth;
    return depth;
}

/* The same in the backward. */
UPIPE_API int upi_scan_bwd_depth(const upipe_scan *s, int rank)
{
    int depth = 0;
    while (rank + depth + 1 < upi_scan_ranks(s) && upi_scan_joined(s, rank + depth + 1)) ++depth;
    return depth;
}

/* The largest depth: a chain of ranks is as long in both directions. */
UPIPE_API int upi_scan_depth(const upipe_scan *s)
{
    int rank, depth = 0, longest = 0;
    for (rank = 1; rank < upi_scan_ranks(s); ++rank) {
        depth = upi_scan_joined(s, rank) ? depth + 1 : 0;
        if (depth > longest) longest = depth;
    }
    return longest;
}

UPIPE_API int upi_scan_stage_heads(const upipe_scan *s)
{
    return s->stage_heads > 0 && s->stage_heads < s->heads ? s->stage_heads : s->heads;
}

/* upi_scan_stages -- stages of a pass */
UPIPE_API int upi_scan_stages(const upipe_scan *s)
{
    return (s->heads - 1) / upi_scan_stage_heads(s) + 1;
}

/* Bytes of a stage's states. */
UPIPE_API size_t upi_scan_stage_bytes(const upipe_scan *s)
{
    return (size_t)(upi_scan_stage_heads(s) * s->size) * 4;
}

/* ---- checks ---- */

/* Plan and communicator of this rank; nothing is sent. */
UPIPE_API upipe_status upi_scan_check_plan(upipe_ctx *c, const upipe_comm *comm, const upipe_scan *s)
{
    const upipe_plan_desc *d = s != NULL && s->plan != NULL ? &s->plan->desc : NULL;
    UPIPE_TRY(upi_ctx_check(c));
    if (d == NULL) return upipe_fail(&c->err, UPIPE_ERR_ARG, "the scan or its plan is NULL");
    UPIPE_TRY(upipe_comm_idle(c, comm));
    if (d->ring > 1 && d->layout != UPIPE_CONTIGUOUS)
        return upipe_fail(
            &c->err, UPIPE_ERR_UNSUPPORTED,
            "a state goes from token to token, and neighbours of a %s ring hold no neighbouring "
            "tokens: contiguous is supported",
            upipe_layout_name(d->layout));
    if (d->batch != 1)
        return upipe_fail(&c->err, UPIPE_ERR_UNSUPPORTED,
                          "a scan of %lld sequences: each has a call of its own", (long long)d->batch);
    if (comm->ranks != upi_scan_ranks(s) || comm->rank != upi_scan_rank(s))
        return upipe_fail(
            &c->err, UPIPE_ERR_ARG,
            "a plan whose tokens are those of rank %d of %d, on rank %d of a communicator of %d",
            upi_scan_rank(s), upi_scan_ranks(s), comm->rank, comm->ranks);
    UPIPE_TRY(upi_borders_check(&c->err, &s->borders));
    return upi_borders_cover(&c->err, &s->borders, s->first, s->first + d->tokens);
}

UPIPE_API upipe_status upi_scan_check(upipe_ctx *c, const upipe_comm *comm, const upipe_scan *s,
                                      const float *states)
{
    int64_t all;
    UPIPE_TRY(upi_scan_check_plan(c, comm, s));
    if (s->heads < 1 || s->size < 1 || s->stage_heads < 0)
        return upipe_fail(&c->err, UPIPE_ERR_ARG,
                          "a state of %d heads of %lld elements, in stages of %d heads", s->heads,
                          (long long)s->size, s->stage_heads);
    if (!upipe_mul(&all, s->size, 4 * (int64_t)s->heads))
        return upipe_fail(&c->err, UPIPE_ERR_OVERFLOW, "a state of %d heads of %lld elements", s->heads,
                          (long long)s->size);
    if (states == NULL) return upipe_fail(&c->err, UPIPE_ERR_ARG, "the states are NULL");
    return UPIPE_OK;
}

enum { UPI_SCAN_FWD, UPI_SCAN_BWD }; /* what a call is */

/* Compares a call, and which it is, with all ranks; and with its forward, which records what it is given.
 *   given   NULL: a layer's call, which has compared all of it */
UPIPE_API upipe_status upi_scan_agree(upipe_ctx *c, upipe_comm *comm, const upipe_scan *s, int call,
                                      int carried, upipe_given *given)
{
    upi_fields f;
    if (given == NULL) return UPIPE_OK;
    f.n = 0;
    upi_field_int(&f, "tokens of the scan", s->plan->desc.tokens);
    upi_field_int(&f, "its ranks in a ring", s->plan->desc.ring);
    upi_field_int(&f, "position of its first token", s->first);
    upi_field_int(&f, "heads of its state", s->heads);
    upi_field_int(&f, "size of a head's state", s->size);
    upi_field_int(&f, "stage_heads", upi_scan_stage_heads(s));
    upi_field_int(&f, "carry", carried);
    upi_field_int(&f, "cu_seqlens_n", s->borders.cu_seqlens_n);
    upi_field_int(&f, "cu_seqlens (hash)", (int64_t)(upi_borders_hash(&s->borders) >> 1));
    UPIPE_TRY(upi_given_same(&c->err, given, s->plan->seal, 0, &f, NULL, 0));
    upi_field_int(&f, "its direction (1: backward)", call);
    return upi_agree(c, comm, &f);
}

/* ---- passes ---- */

enum { UPI_SCAN_MESSAGES = 3 }; /* of one step: to the next rank, from the one before, into the carry */

/* A pass of one rank. The message list outlives upi_unwind. */
typedef struct upi_scan_pass {
    const upipe_scan *s;
    upipe_comm *comm;
    upipe_msg list[UPI_SCAN_MESSAGES];
    int used, rank, last;
} upi_scan_pass;

UPIPE_API void upi_scan_begin(upi_scan_pass *p, upipe_comm *comm, const upipe_scan *s)
{
    memset(p, 0, sizeof *p);
    p->s = s;
    p->comm = comm;
    p->rank = upi_scan_rank(s);
    p->last = upi_scan_ranks(s) - 1;
}

/* Heads of stage i; 0: there is no such stage. *first: the first one. */
UPIPE_API int upi_scan_stage(const upi_scan_pass *p, int i, int *first)
{
    const int most = upi_scan_stage_heads(p->s);
    *first = i * most;
    if (i < 0 || i >= upi_scan_stages(p->s)) return 0;
    return p->s->heads - *first < most ? p->s->heads - *first : most;
}

/* Lists a stage's state: what is sent to a peer, or where what comes from it lies. */
UPIPE_API void upi_scan_move(upi_scan_pass *p, int peer, int heads, const float *send, float *recv)
{
    const size_t bytes = (size_t)(heads * p->s->size) * 4;
    upipe_msg_add(p->list, &p->used, peer, 1, send, send != NULL ? bytes : 0, 0, recv,
                  recv != NULL ? bytes : 0, 0);
}

/* The listed transfer. All ranks take part in it, with messages or without. */
UPIPE_API upipe_status upi_scan_transfer(upipe_ctx *c, upi_scan_pass *p)
{
    const int used = p->used;
    p->used = 0;
    UPIPE_TRY(upipe_comm_start(c, p->comm, p->list, used));
    return upipe_comm_wait(c, p->comm);
}

UPIPE_API upipe_status upi_scan_fwd_run(upipe_ctx *c, upi_scan_pass *p, float *states, float *carry)
{
    const upipe_scan *s = p->s;
    const int on = upi_scan_joined(s, p->rank + 1) && (p->rank < p->last || carry != NULL);
    const int back = p->rank == 0 && carry != NULL && upi_scan_joined(s, p->last + 1);
    const int depth = upi_scan_fwd_depth(s, p->rank), away = upi_scan_fwd_depth(s, p->last);
    const int64_t size = s->size;
    const int steps = upi_scan_stages(s) + upi_scan_depth(s);
    int step, first, n;
    void *out;
    UPIPE_TRY(upipe_alloc(c, &out, upi_scan_stage_bytes(s), UPIPE_USE_SCRATCH, "scan_state"));
    if (depth == 0 && p->rank == 0 && carry != NULL && upi_scan_joined(s, 0))
        UPIPE_TRY(c->ops->copy(c, states, carry, upipe_scan_state_bytes(s)));
    else if (depth == 0)
        UPIPE_TRY(c->ops->zero(c, states, upipe_scan_state_bytes(s)));
    for (step = 0; step < steps; ++step) {
        n = upi_scan_stage(p, step - depth, &first);
        if (n > 0) UPIPE_TRY(s->fwd(c, s->user, first, n, states + first * size, (float *)out));
        if (n > 0 && on) upi_scan_move(p, p->rank < p->last ? p->rank + 1 : 0, n, (float *)out, NULL);
        n = upi_scan_stage(p, step + 1 - depth, &first);
        if (n > 0 && depth > 0) upi_scan_move(p, p->rank - 1, n, NULL, states + first * size);
        n = upi_scan_stage(p, step - away, &first);
        if (n > 0 && back) upi_scan_move(p, p->last, n, NULL, carry + first * size);
        UPIPE_TRY(upi_scan_transfer(c, p));
    }
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_scan_bwd_run(upipe_ctx *c, upi_scan_pass *p, const float *states, float *carry)
{
    const upipe_scan *s = p->s;
    const int on = upi_scan_joined(s, p->rank) && (p->rank > 0 || carry != NULL);
    const int end = p->rank == p->last && carry != NULL, from = end && upi_scan_joined(s, p->last + 1);
    const int back = end && upi_scan_joined(s, 0);
    const int depth = upi_scan_bwd_depth(s, p->rank), away = upi_scan_bwd_depth(s, 0);
    const int64_t size = s->size;
    const int steps = upi_scan_stages(s) + upi_scan_depth(s);
    int step, first, n;
    void *buf;
    float *now, *next, *other;
    UPIPE_TRY(upipe_alloc(c, &buf, 2 * upi_scan_stage_bytes(s), UPIPE_USE_ACT_GRAD, "scan_dstate"));
    now = (float *)buf;
    next = now + upi_scan_stage_bytes(s) / 4;
    for (step = 0; step < steps; ++step, other = now, now = next, next = other) {
        n = upi_scan_stage(p, step - depth, &first);
        if (n > 0 && from)
            UPIPE_TRY(c->ops->copy(c, now, carry + first * size, (size_t)(n * size) * 4));
        else if (n > 0 && depth == 0)
            UPIPE_TRY(c->ops->zero(c, now, (size_t)(n * size) * 4));
        if (n > 0) UPIPE_TRY(s->bwd(c, s->user, first, n, states + first * size, now));
        if (n > 0 && on) upi_scan_move(p, p->rank > 0 ? p->rank - 1 : p->last, n, now, NULL);
        n = upi_scan_stage(p, step + 1 - depth, &first);
        if (n > 0 && depth > 0) upi_scan_move(p, p->rank + 1, n, NULL, next);
        n = upi_scan_stage(p, step - away, &first);
        if (n > 0 && back) upi_scan_move(p, 0, n, NULL, carry + first * size);
        UPIPE_TRY(upi_scan_transfer(c, p));
    }
    return UPIPE_OK;
}

/* The end of a pass: its buffers go back to the pool, and after a failure the others are released. */
UPIPE_API upipe_status upi_scan_end(upipe_ctx *c, upipe_status s, int64_t mark, upipe_comm *comm)
{
    if (s != UPIPE_OK) return upi_unwind(c, s, mark, comm);
    upipe_mem_rewind(c->mem, mark);
    return UPIPE_OK;
}

/* The two directions.
 *   given   see upi_scan_agree */
UPIPE_API upipe_status upi_scan_fwd(upipe_ctx *c, upipe_comm *comm, const upipe_scan *s, float *states,
                                    float *carry, upipe_given *given)
{
    upi_scan_pass p;
    int64_t mark;
    upipe_status status;
    UPIPE_TRY(upi_scan_check(c, comm, s, states));
    if (s->fwd == NULL) return upipe_fail(&c->err, UPIPE_ERR_ARG, "the scan's fwd is NULL");
    mark = upipe_mem_mark(c->mem);
    upi_scan_begin(&p, comm, s);
    status = upi_scan_agree(c, comm, s, UPI_SCAN_FWD, carry != NULL, given);
    if (status == UPIPE_OK) status = upi_scan_fwd_run(c, &p, states, carry);
    return upi_scan_end(c, status, mark, comm);
}

UPIPE_API upipe_status upi_scan_bwd(upipe_ctx *c, upipe_comm *comm, const upipe_scan *s, const float *states,
                                    float *carry, upipe_given *given)
{
    upi_scan_pass p;
    int64_t mark;
    upipe_status status;
    UPIPE_TRY(upi_scan_check(c, comm, s, states));
    if (s->bwd == NULL) return upipe_fail(&c->err, UPIPE_ERR_ARG, "the scan's bwd is NULL");
    if (given != NULL && given->plan == 0)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "the states are of no forward");
    mark = upipe_mem_mark(c->mem);
    upi_scan_begin(&p, comm, s);
    status = upi_scan_agree(c, comm, s, UPI_SCAN_BWD, carry != NULL, given);
    if (status == UPIPE_OK) status = upi_scan_bwd_run(c, &p, states, carry);
    return upi_scan_end(c, status, mark, comm);
}

#endif

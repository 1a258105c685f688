/* upipe_linear_attn.h -- linear attention over ranks: three ways, one call        layer 5
 *
 * A rank has its tokens' q, k, v, gates, and gets their o. The way says how ranks share the work:
 *
 *     way      a rank works on               sends                       time                   bits of one rank
 *     PASS     its tokens, when the state    a state a head              a pipeline of stages   where cuts are multiples
 *              before them has come                                      of heads               of the chunk
 *     SCAN     its tokens, at once           a state and a matrix a      twice the products     no
 *              and twice                     head to each later rank
 *     HEADS    all tokens of its heads       q, k, v, gates, o           the products           yes; of dq and dk where no
 *                                                                                               ranks share a key head
 *
 * All but the way is the same for the host:
 *
 *     upipe_linear_ops rules;  upipe_cpu_linear(&rules);
 *     upipe_linear_attn a = {0};
 *     a.way = UPIPE_WAY_HEADS; a.plan = &plan; a.rules = &rules; a.stage_heads = 4;
 *     a.q = q; a.k = k; a.v = v; a.o = o; a.g = g; a.beta = beta;
 *     upipe_linear_attn_fwd(&ctx, ctx.team, &a, &states, NULL);
 *     upipe_linear_attn_grad d = {0};  d.a = a; d.dout = dout; d.dq = dq; ...
 *     upipe_linear_attn_bwd(&ctx, ctx.team, &d, &states, NULL);
 *
 * Which ranks, segments and their carry: as in upipe_scan.h. HEADS goes over ctx->team alone. Sequences of a batch: a call
 * each. The short convolution comes before: upipe_scan_halo_fwd.
 */
#ifndef UPIPE_LINEAR_ATTN_H
#define UPIPE_LINEAR_ATTN_H

#include "way/heads.h"
#include "way/pass.h"
#include "way/scan.h"
#include "way/types.h"

/* ---- checks ---- */

/* What both directions read; `call` is the rule's call on this rank's tokens. */
UPIPE_API upipe_status upi_way_check(upipe_ctx *c, const upipe_comm *comm, const upipe_linear_attn *a,
                                     const float *states, upipe_linear_grad *call)
{
    const int way = a != NULL ? upipe_enum_number(&a->way, sizeof a->way) : 0;
    upipe_scan s;
    upipe_plan heads;
    UPIPE_TRY(upipe_ctx_check(c));
    if (a == NULL || a->plan == NULL || a->rules == NULL)
        return upipe_fail(&c->err, UPIPE_ERR_ARG,
                          "linear attention: the call, its plan or its rules are NULL");
    if (way < 0 || way >= UPIPE_WAYS)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "linear attention: way %d is none of pass, scan and heads",
                          way);
    s = upi_way_scan(a);
    UPIPE_TRY(upi_scan_check_plan(c, comm, &s));
    if (a->q.n != a->plan->local)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "linear attention: q has %lld tokens, this rank %lld",
                          (long long)a->q.n, (long long)a->plan->local);
    *call = upi_way_call(a, NULL);
    call->a.state = states;
    UPIPE_TRY(upi_linear_check(c, a->rules, &call->a));
    UPIPE_TRY(upi_scan_check(c, comm, &s, states));
    if (a->stage_heads % upi_way_group(a) != 0)
        return upipe_fail(
            &c->err, UPIPE_ERR_UNSUPPORTED,
            "linear attention: stages of %d heads, where %d share a key head: a stage has all of them",
            a->stage_heads, upi_way_group(a));
    if (way != UPIPE_WAY_HEADS) return UPIPE_OK;
    if (a->plan->desc.ring > 1 || comm != c->team)
        return upipe_fail(&c->err, UPIPE_ERR_UNSUPPORTED,
                          "linear attention: the all-to-all goes over ctx->team; this is a ring of %d, or "
                          "another communicator",
                          a->plan->desc.ring);
    return upi_heads_plan(&heads, a, &c->err);
}

/* Compares a call with all ranks, and with its forward, which records what it is given. */
UPIPE_API upipe_status upi_way_agree(upipe_ctx *c, upipe_comm *comm, const upipe_linear_attn *a,
                                     const upipe_linear *call, upipe_linear_pass pass, int carried,
                                     upipe_given *given)
{
    const upipe_scan stages = upi_way_scan(a);
    upipe_fields f;
    f.n = 0;
    upipe_field_int(&f, "way of linear attention", a->way);
    upipe_field_int(&f, "its tokens", a->plan->desc.tokens);
    upipe_field_int(&f, "its ranks in a ring", a->plan->desc.ring);
    upipe_field_int(&f, "position of its first token", a->first);
    upipe_field_int(&f, "heads", a->v.h);
    upipe_field_int(&f, "key heads", a->q.h);
    upipe_field_int(&f, "key_dim", a->q.d);
    upipe_field_int(&f, "value_dim", a->v.d);
    upipe_field_int(&f, "data type", a->q.dtype);
    upipe_field_int(&f, "beta (0: scalar decay)", a->beta.data != NULL);
    upipe_field_int(&f, "stage_heads", upi_scan_stage_heads(&stages));
    upipe_field_int(&f, "tokens of a chunk", call->chunk);
    upipe_field_real(&f, "scale", (double)call->scale);
    upipe_field_int(&f, "carry", carried);
    upipe_field_int(&f, "cu_seqlens_n", a->borders.cu_seqlens_n);
    upipe_field_int(&f, "cu_seqlens (hash)", (int64_t)(upipe_borders_hash(&a->borders) >> 1));
    UPIPE_TRY(upipe_given_same(&c->err, given, a->plan->seal, 0, &f, NULL, 0));
    upipe_field_int(&f, "its direction (1: backward)", pass);
    return upipe_comm_agree(c, comm, &f);
}

/* ---- bytes ---- */

/* upipe_linear_attn_fwd_bytes -- what a forward of this rank allocates in the pool. Arguments as a call takes
 * them; data are not read, but are not NULL where they must not be
 *   carried  whether there is a carry */
UPIPE_API size_t upipe_linear_attn_fwd_bytes(upipe_ctx *c, const upipe_linear_attn *a, int carried)
{
    if (a->way == UPIPE_WAY_PASS) return upi_pass_fwd_bytes(c, a);
    return a->way == UPIPE_WAY_SCAN ? upi_maps_fwd_bytes(c, a, carried) : upi_heads_fwd_bytes(c, a);
}

/* The same in the backward. */
UPIPE_API size_t upipe_linear_attn_bwd_bytes(upipe_ctx *c, const upipe_linear_attn *a, int carried)
{
    if (a->way == UPIPE_WAY_PASS) return upi_pass_bwd_bytes(c, a);
    return a->way == UPIPE_WAY_SCAN ? upi_maps_bwd_bytes(c, a, carried) : upi_heads_bwd_bytes(c, a);
}

/* upipe_linear_attn_fwd_sent -- bytes that this rank sends in a forward */
UPIPE_API int64_t upipe_linear_attn_fwd_sent(const upipe_linear_attn *a, int carried)
{
    const upipe_scan s = upi_way_scan(a);
    if (a->way == UPIPE_WAY_PASS) return upipe_scan_fwd_sent(&s, carried);
    return a->way == UPIPE_WAY_SCAN ? upi_maps_fwd_sent(a, carried) : upi_heads_fwd_sent(a, carried);
}

/* The same in the backward. */
UPIPE_API int64_t upipe_linear_attn_bwd_sent(const upipe_linear_attn *a, int carried)
{
    const upipe_scan s = upi_way_scan(a);
    if (a->way == UPIPE_WAY_PASS) return upipe_scan_bwd_sent(&s, carried);
    return a->way == UPIPE_WAY_SCAN ? upi_maps_bwd_sent(a, carried) : upi_heads_bwd_sent(a, carried);
}

/* upipe_linear_attn_heads -- heads on which this rank works: of all its tokens, or with HEADS of all tokens */
UPIPE_API int upipe_linear_attn_heads(const upipe_linear_attn *a)
{
    return a->way == UPIPE_WAY_HEADS ? upi_heads_own(a) : a->v.h;
}

/* ---- calls ---- */

/* upipe_linear_attn_fwd -- o of this rank's tokens
 *   comm    its ranks hold the plan's tokens in their order
 *   states  for the backward. PASS and SCAN: the state before this rank's first token.
 *           HEADS: that before the first token of all, of this rank's heads; others are not written
 *   carry   NULL, or on rank 0 as large as states: the state before the first token of all, which becomes that behind the
 *           last one (where a document begins there it stays as it was). On other ranks it is not accessed, and NULL
 *           where rank 0's is
 *   bytes   upipe_linear_attn_fwd_bytes of the pool; sends upipe_linear_attn_fwd_sent
 *   errors  ARG, UNSUPPORTED (layout, batch, dims, stages), OVERFLOW: nothing happens. MISMATCH, MEMORY, the rule's, others
 *           as upipe_comm_wait: team, ring and comm are aborted, and the pool is as before
 */
UPIPE_API upipe_status upipe_linear_attn_fwd(upipe_ctx *c, upipe_comm *comm, const upipe_linear_attn *a,
                                             upipe_states *states, float *carry)
{
    upipe_linear_grad call;
    int64_t mark;
    upipe_status s;
    UPIPE_TRY(upi_way_check(c, comm, a, states != NULL ? states->data : NULL, &call));
    UPIPE_TRY(upi_linear_like(c, "o", a->o, a->q.n, a->v.h, a->v.d, a->q.dtype));
    mark = upipe_mem_mark(c->mem);
    memset(&states->given, 0, sizeof states->given);
    s = upi_way_agree(c, comm, a, &call.a, UPIPE_LINEAR_FWD, carry != NULL, &states->given);
    if (s == UPIPE_OK && a->way == UPIPE_WAY_PASS) s = upi_pass_fwd_run(c, comm, a, states->data, carry);
    if (s == UPIPE_OK && a->way == UPIPE_WAY_SCAN) s = upi_maps_fwd_run(c, comm, a, states->data, carry);
    if (s == UPIPE_OK && a->way == UPIPE_WAY_HEADS) s = upi_heads_fwd_run(c, comm, a, states->data, carry);
    if (s != UPIPE_OK) states->given.plan = 0;
    return upi_scan_end(c, s, mark, comm);
}

/* upipe_linear_attn_bwd -- gradients of q, k, v, g and beta
 *   states  what the forward of the same call has written
 *   carry   NULL, or on the last rank as large as states: the gradient of the state behind the last token of all, which
 *           becomes that of the state before the first one (where a document begins there it stays as it was). On other
 *           ranks it is not accessed, and NULL where the last rank's is
 *   bytes   upipe_linear_attn_bwd_bytes of the pool; sends upipe_linear_attn_bwd_sent
 *   errors  as upipe_linear_attn_fwd
 */
UPIPE_API upipe_status upipe_linear_attn_bwd(upipe_ctx *c, upipe_comm *comm, const upipe_linear_attn_grad *g,
                                             upipe_states *states, float *carry)
{
    const upipe_linear_attn *a = g != NULL ? &g->a : NULL;
    upipe_linear_grad call;
    int64_t mark;
    upipe_status s;
    UPIPE_TRY(upi_way_check(c, comm, a, states != NULL ? states->data : NULL, &call));
    UPIPE_TRY(upi_linear_like(c, "dout", g->dout, a->q.n, a->v.h, a->v.d, a->q.dtype));
    UPIPE_TRY(upi_linear_like(c, "dq", g->dq, a->q.n, a->q.h, a->q.d, a->q.dtype));
    UPIPE_TRY(upi_linear_like(c, "dk", g->dk, a->q.n, a->q.h, a->q.d, a->q.dtype));
    UPIPE_TRY(upi_linear_like(c, "dv", g->dv, a->q.n, a->v.h, a->v.d, a->q.dtype));
    UPIPE_TRY(upi_linear_like(c, "dg", g->dg, a->q.n, a->v.h, 1, UPIPE_F32));
    if (a->beta.data != NULL) UPIPE_TRY(upi_linear_like(c, "dbeta", g->dbeta, a->q.n, a->v.h, 1, UPIPE_F32));
    UPIPE_TRY(upi_scan_check_given(c, &states->given));
    mark = upipe_mem_mark(c->mem);
    s = upi_way_agree(c, comm, a, &call.a, UPIPE_LINEAR_BWD, carry != NULL, &states->given);
    if (s == UPIPE_OK && a->way == UPIPE_WAY_PASS) s = upi_pass_bwd_run(c, comm, g, states->data, carry);
    if (s == UPIPE_OK && a->way == UPIPE_WAY_SCAN) s = upi_maps_bwd_run(c, comm, g, states->data, carry);
    if (s == UPIPE_OK && a->way == UPIPE_WAY_HEADS) s = upi_heads_bwd_run(c, comm, g, states->data, carry);
    return upi_scan_end(c, s, mark, comm);
}

#endif

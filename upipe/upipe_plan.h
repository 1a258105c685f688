/* upipe_plan.h -- the schedule in closed form: which heads in which stage        layer 3
 *
 * A description of the run goes in, numbers come out. Nothing is allocated and nothing runs.
 *
 *     upipe_plan_desc d = {0};
 *     d.tokens = 1 << 20; d.ranks = 8; d.heads = 32; d.kv_heads = 8; d.head_dim = 128;     rest: defaults
 *     upipe_plan p;
 *     upipe_plan_init(&p, &d, &err);                    p.stages = 4: UPipe with the smallest chunk, U = C
 *
 * DeepSpeed-Ulysses is the plan with chunk = heads: one stage. Ring attention is the plan with one rank in
 * its team and R in its ring, in one stage. C ranks in the team and R in the ring make USP, or UPipe over a
 * ring.
 *
 * Letters of the paper: S tokens, C ranks, R ring, H heads, Hkv kv_heads, G = H/Hkv, U chunk, m = U/C heads a
 * rank and stage, nu = H/U stages, gamma = 1 + 2/G. T = S/(C*R) tokens of a sequence on a rank. rows =
 * batch * T. A unit is rows * model_dim elements.
 */
#ifndef UPIPE_PLAN_H
#define UPIPE_PLAN_H

#include "plan/make.h"

/* Each buffer as large as the larger one of two plans'. */
UPIPE_API upipe_buffers upipe_buffers_max(upipe_buffers a, upipe_buffers b)
{
#define UPI_BUFFERS_MAX(name) a.name = upipe_max_bytes(a.name, b.name);
    UPI_BUFFERS(UPI_BUFFERS_MAX)
#undef UPI_BUFFERS_MAX
    return a;
}

/* upipe_plan_init -- checks the description, fills in its defaults, derives the schedule
 *   p       written; not changed afterwards, or the calls refuse it
 *   errors  ARG (NULL; sizes that make no sense, which the sentence names; an inner ring, a ring mode or
 *           ring_prefetch that does not fit the others), UNSUPPORTED (heads that have no naive order; too
 *           many stages or ranks; a P2P ring, ring_prefetch or overlap without common rounds; overlap with a
 *           ring), OVERFLOW
 *   paper   sections 3.3 and 4.1
 */
UPIPE_API upipe_status upipe_plan_init(upipe_plan *p, const upipe_plan_desc *desc, upipe_err *e)
{
    upipe_plan_desc d;
    if (p == NULL || desc == NULL) return upipe_fail(e, UPIPE_ERR_ARG, "the plan or desc is NULL");
    d = *desc;
    memset(p, 0, sizeof *p);
    if (d.batch == 0) d.batch = 1;
    if (d.ranks == 0) d.ranks = 1;
    if (d.ring == 0) d.ring = 1;
    if (d.kv_heads == 0) d.kv_heads = d.heads;
    if (d.v_dim == 0) d.v_dim = d.head_dim;
    if (d.chunk == 0) d.chunk = d.ranks < d.heads ? d.ranks : d.heads;
    if (d.tokens < 1 || d.batch < 1 || d.ranks < 1 || d.ring < 1 || d.heads < 1 || d.kv_heads < 1 ||
        d.head_dim < 1 || d.v_dim < 1 || d.chunk < 1 || d.model_dim < 0 || d.ring_inner < 0)
        return upipe_fail(
            e, UPIPE_ERR_ARG,
            "a plan needs positive sizes: tokens %lld, batch %lld, ranks %d, ring %d (inner %d), heads %d, kv heads %d, "
            "head dim %d, v dim %d, chunk %d, model dim %lld",
            (long long)d.tokens, (long long)d.batch, d.ranks, d.ring, d.ring_inner, d.heads, d.kv_heads,
            d.head_dim, d.v_dim, d.chunk, (long long)d.model_dim);
    if (d.rank < 0 || d.rank >= d.ranks || d.ring_rank < 0 || d.ring_rank >= d.ring)
        return upipe_fail(e, UPIPE_ERR_ARG, "rank %d of %d, ring rank %d of %d", d.rank, d.ranks, d.ring_rank,
                          d.ring);
    UPIPE_TRY(upi_plan_enums(desc, e));
    if (d.ranks > UPIPE_RANKS_MAX || d.ring > UPIPE_RANKS_MAX)
        return upipe_fail(e, UPIPE_ERR_UNSUPPORTED, "a team of %d ranks and a ring of %d, at most %d each",
                          d.ranks, d.ring, UPIPE_RANKS_MAX);
    if ((int64_t)d.heads * (d.head_dim > d.v_dim ? d.head_dim : d.v_dim) > INT32_MAX ||
        d.model_dim > INT32_MAX)
        return upipe_fail(e, UPIPE_ERR_OVERFLOW,
                          "rows of %d heads of %d elements, or of model dim %lld leave 31 bits", d.heads,
                          d.head_dim > d.v_dim ? d.head_dim : d.v_dim, (long long)d.model_dim);
    if (d.model_dim == 0) d.model_dim = (int64_t)d.heads * d.head_dim;
    if (d.heads % d.kv_heads != 0)
        return upipe_fail(e, UPIPE_ERR_ARG, "%d query heads are no multiple of %d key/value heads", d.heads,
                          d.kv_heads);
    if (d.chunk != d.heads && d.chunk % d.ranks != 0)
        return upipe_fail(e, UPIPE_ERR_ARG, "a chunk of %d heads does not divide into %d ranks", d.chunk,
                          d.ranks);
    if (d.chunk > d.heads) return upipe_fail(e, UPIPE_ERR_ARG, "a chunk of %d of %d heads", d.chunk, d.heads);
    p->desc = d;
    p->group = d.heads / d.kv_heads;
    UPIPE_TRY(upi_plan_schedule(p, e));
    UPIPE_TRY(upi_plan_sizes(p, e)); /* before any product is formed */
    UPIPE_TRY(upi_plan_ring(p, e));
    p->buffers = upi_plan_buffers(p);
    p->seal = upipe_hash_bytes(UPIPE_HASH, p, offsetof(upipe_plan, seal));
    return UPIPE_OK;
}

#endif

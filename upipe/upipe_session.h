/* upipe_session.h -- a trainer's rank in five calls: plan, dry run, slab, pool and context
 *
 *     upipe_session h = {0};                             about 970 KB: too much for some stacks
 *     h.ctx.ops = &ops;  h.ctx.team = team;              any communicator of net/; ring, stream, side_stream too, if any
 *     upipe_session_open(&h, &desc);                     the plan, and a dry run: nothing is allocated
 *     upipe_session_slab(&h, slab);                      slab: upipe_session_slab_bytes(&h) bytes, the host's own
 *     a = upipe_qkv_fused(&h.call, qkv, o, UPIPE_F32);   h.call has plan and mask
 *     upipe_qkv_fwd(&h.ctx, &a, &saved);  ...
 *     upipe_session_close(&h);                           the slab is the host's again
 *
 * A call that fails leaves its sentence in h.ctx.err, which upipe_comm_abort brings to the other ranks. The slab is freed
 * after the team, and not where peers may still access it: where its free fails, or team->quarantine is set. For ranks that
 * are threads net/upipe_net_threads_session.h makes teams and slabs too.
 */
#ifndef UPIPE_SESSION_H
#define UPIPE_SESSION_H

#include "upipe_dry.h"

/* upipe_session_desc -- what a rank will run
 *   plan    what to run. ranks, rank, ring and ring_rank are those of ctx.team and ctx.ring: ranks and ring may be 0,
 *           and rank and ring_rank are not read
 *   call    mask, scale and id of the rank's calls; its plan and views are not read
 *   layers  forwards of upipe_qkv that wait for their backwards at a time, at least 1. The slab holds them, or an
 *           upipe_all_reduce over team and ring
 *   dry     the host's own dry run, in place of these: any calls with &h->dry.ctx and h->plan, such as
 *           upipe_dry_block(&h->dry, &layer, 1). NULL: none
 *   user    the host's own, for dry
 */
struct upipe_session;
typedef struct upipe_session_desc {
    upipe_plan_desc plan;
    upipe_qkv call;
    int layers;
    upipe_status (*dry)(void *user, struct upipe_session *h);
    void *user;
} upipe_session_desc;

/* upipe_session -- a rank's; it must not move between open and close
 *   ctx     for all calls; its mem is NULL without a slab
 *   plan    this rank's
 *   call    the description's, with the plan: for the constructors of upipe_qkv.h
 *   mem     the pool over the slab
 *   dry     the dry run's result; its table of blocks is the pool's when there is a slab
 */
typedef struct upipe_session {
    upipe_ctx ctx;
    upipe_plan plan;
    upipe_qkv call;
    upipe_mem mem;
    upipe_dry dry;
} upipe_session;

/* The description of this rank's plan. */
UPIPE_API upipe_status upi_session_plan(upipe_session *h, upipe_plan_desc d)
{
    const upipe_comm *team = h->ctx.team, *ring = h->ctx.ring;
    const int ring_ranks = ring != NULL ? ring->ranks : 1;
    if ((d.ranks != 0 && d.ranks != team->ranks) || (d.ring != 0 && d.ring != ring_ranks))
        return upipe_fail(&h->ctx.err, UPIPE_ERR_ARG,
                          "a description of %d ranks in a ring of %d, for a team of %d in a ring of %d",
                          d.ranks != 0 ? d.ranks : team->ranks, d.ring != 0 ? d.ring : ring_ranks,
                          team->ranks, ring_ranks);
    d.ranks = team->ranks;
    d.rank = team->rank;
    d.ring = ring_ranks;
    d.ring_rank = ring != NULL ? ring->rank : 0;
    return upipe_plan_init(&h->plan, &d, &h->ctx.err);
}

/* The layers in flight, dry: all but one have only their lse in the pool. Then a sum over all ranks, of any length. */
UPIPE_API upipe_status upi_session_dry(upipe_session *h, int layers)
{
    upipe_ctx *c = &h->dry.ctx;
    const int ranks = h->plan.desc.ranks * h->plan.desc.ring;
    void *block;
    int i;
    for (i = 1; i < layers; ++i)
        UPIPE_TRY(upipe_alloc(c, &block, h->plan.buffers.lse, UPIPE_USE_STAT, "lse"));
    UPIPE_TRY(upipe_dry_qkv(&h->dry, &h->call));
    upipe_mem_rewind(c->mem, 0);
    UPIPE_TRY(upipe_alloc(c, &block, upipe_reduce_bytes((int64_t)UPIPE_REDUCE_STRIP * ranks, ranks),
                          UPIPE_USE_REDUCE, "terms"));
    return upipe_free(c, block);
}

/* upipe_session_open -- the plan of this rank, and what it needs
 *   h       h->ctx has table and team, and what else the plan asks for
 *   errors  ARG (no table or team, a description of other ranks or without layers, a session with a slab), those of
 *           upipe_plan_init and of the dry run. There is nothing to close then. Without a slab a session may be opened
 *           again, for another plan
 */
UPIPE_API upipe_status upipe_session_open(upipe_session *h, const upipe_session_desc *d)
{
    upipe_ctx *c = h != NULL ? &h->ctx : NULL;
    upipe_status s;
    if (c == NULL) return UPIPE_ERR_ARG;
    if (d == NULL) return upipe_fail(&c->err, UPIPE_ERR_ARG, "the description is NULL");
    if (d->dry == NULL && d->layers < 1)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "a session of %d layers in flight, at least 1", d->layers);
    if (c->mem != NULL)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "the session has a slab: upipe_session_close comes first");
    memset(&h->dry.ctx, 0, sizeof h->dry.ctx); /* an open that fails leaves nothing of an earlier one */
    c->mem = &h->mem;                          /* the last member that upi_ctx_check asks for */
    s = upi_ctx_check(c);
    c->mem = NULL;
    if (s == UPIPE_OK) s = upi_session_plan(h, d->plan);
    if (s != UPIPE_OK) return s;
    h->call = d->call;
    h->call.plan = &h->plan;
    s = upipe_dry_init(&h->dry, &h->plan, c->ops);
    if (s == UPIPE_OK) s = d->dry != NULL ? d->dry(d->user, h) : upi_session_dry(h, d->layers);
    if (s == UPIPE_OK) return s;
    c->err = h->dry.ctx.err;
    upi_fail_reason(&c->err, s);
    memset(&h->dry.ctx, 0, sizeof h->dry.ctx);
    return s;
}

/* upipe_session_slab_bytes -- what the dry run needs */
UPIPE_API size_t upipe_session_slab_bytes(const upipe_session *h)
{
    return h->dry.mem.need;
}

/* upipe_session_slab -- the pool over the host's slab; h->ctx is ready
 *   slab    upipe_session_slab_bytes(h) bytes, aligned to UPIPE_MEM_ALIGN, of the memory that the table computes in
 *   errors  ARG (a session that is not open, or has a slab), MEMORY (slab is NULL)
 */
UPIPE_API upipe_status upipe_session_slab(upipe_session *h, void *slab)
{
    const size_t bytes = upipe_session_slab_bytes(h);
    if (h->dry.ctx.ops == NULL || h->ctx.mem != NULL)
        return upipe_fail(&h->ctx.err, UPIPE_ERR_ARG,
                          h->ctx.mem != NULL ? "the session has a slab" : "the session is not open");
    if (slab == NULL && bytes > 0)
        return upipe_fail(&h->ctx.err, UPIPE_ERR_MEMORY, "no slab of %zu bytes", bytes);
    upipe_mem_init(&h->mem, slab, bytes, h->dry.blocks, UPIPE_DRY_BLOCKS_MAX);
    h->ctx.mem = &h->mem;
    return UPIPE_OK;
}

/* upipe_session_close -- ends the pool: the slab is the host's again, once no peer reads it
 *   errors  ARG: a session without a slab, or one that is closed; blocks that are live (the first one's name), after
 *           which it is closed all the same
 */
UPIPE_API upipe_status upipe_session_close(upipe_session *h)
{
    if (h == NULL) return UPIPE_ERR_ARG;
    if (h->ctx.mem == NULL)
        return upipe_fail(&h->ctx.err, UPIPE_ERR_ARG, "the session has no slab, or is closed");
    h->ctx.mem = NULL;
    memset(&h->plan, 0, sizeof h->plan);
    memset(&h->dry.ctx, 0, sizeof h->dry.ctx);
    return upipe_mem_destroy(&h->mem, &h->ctx.err);
}

#endif

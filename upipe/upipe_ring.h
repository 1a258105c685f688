/* upipe_ring.h -- attention over a ring of ranks that share the sequence        layer 5
 *
 * Every rank keeps its queries. Keys and values reach them in one of three ways, each a loop around the same call of
 * attention (upipe_attend.h), in a file of its own:
 *
 *     ring/p2p.h         K and V are sent round, r -> r + 1, while the block on the rank is attended. Gradients of K
 *                        and V follow one step behind in f32, and are back on their own rank after R sends
 *     ring/double.h      the same within each node; the first block of a turn is also sent to the next node
 *     ring/all_gather.h  every rank receives all K and V of a round first: upipe_ring_all_gather_start,
 *                        upipe_ring_reduce_scatter
 *
 * The plan's ring_mode and ring_inner choose. Its layout says which rank holds which tokens; contiguous, zigzag and
 * striped rings differ in nothing else. O and dQ are summed in f32.
 *
 *     upipe_attend a = {...};                         queries of this rank, with sums = UPIPE_F32
 *     upipe_kv_block own = {plan.team_shard, k, v, dk, dv};
 *     upipe_ring_fwd(&ctx, &a, &own);                 o, lse
 *     upipe_ring_bwd(&ctx, &a, &own);                 dq, dk, dv
 */
#ifndef UPIPE_RING_H
#define UPIPE_RING_H

#include "ring/all_gather.h"
#include "ring/double.h"
#include "ring/p2p.h"
#include "upipe_a2a.h"
#include "upipe_unwind.h"

/* A pass of a ring round `a`, if the call makes sense. With an all-gather, the transfer of the next round may be in
 * progress. */
UPIPE_API upipe_status upi_ring_begin(upipe_ctx *c, upi_ring *r, const upipe_attend *a,
                                      const upipe_kv_block *own)
{
    if (a == NULL || own == NULL) return upipe_fail(&c->err, UPIPE_ERR_ARG, "the queries or block are NULL");
    UPIPE_TRY(upi_plan_check(c, a->plan, UPI_PLAN_RING));
    memset(r, 0, sizeof *r);
    r->a = a;
    r->d = &a->plan->desc;
    if (!a->plan->kv_gathered) UPIPE_TRY(upipe_comm_idle(c, c->ring));
    if (a->sums == UPIPE_F32) return UPIPE_OK;
    return upipe_fail(&c->err, UPIPE_ERR_ARG, "a ring sums O and dQ in f32, not in %s",
                      upipe_dtype_name(a->sums));
}

/* upipe_ring_fwd -- o and lse of the queries over the keys of all ranks of the ring
 *   a       the queries of this rank; sums = UPIPE_F32
 *   own     K and V of this rank; ALL_GATHER: those of the whole sequence, rank by rank, and rows is not read
 *   bytes   P2P: allocates two blocks of K and V at most (four in a double ring); sends R - 1 of them, and fewer
 *           where the mask hides them from all ranks further on (upipe_plan_sent_ring)
 *   errors  ARG for another ring's plan, sums that are not f32, or a transfer in progress: nothing happens.
 *           ARG, UNSUPPORTED (a mask that the backend lacks), MEMORY, others as upipe_comm_wait: these abort ring and
 *           team, and the pool is as before
 */
UPIPE_API upipe_status upipe_ring_fwd(upipe_ctx *c, const upipe_attend *a, const upipe_kv_block *own)
{
    const int64_t mark = upipe_mem_mark(c->mem);
    upipe_status s;
    upi_ring r; /* holds the message list: it outlives upipe_unwind */
    UPIPE_TRY(upi_ring_begin(c, &r, a, own));
    s = a->plan->kv_gathered  ? upi_all_gather_fwd(c, &r, own)
        : r.d->ring_inner > 1 ? upi_double_fwd(c, &r, own)
                              : upi_p2p_fwd(c, &r, own);
    if (s == UPIPE_OK) upipe_mem_rewind(c->mem, mark); /* its buffers */
    return s == UPIPE_OK ? UPIPE_OK : upipe_unwind(c, s, mark, NULL);
}

/* upipe_ring_bwd -- dq, dk and dv, from dout, lse and delta
 *   own     dk, dv: P2P: overwritten, of the size for the rank with the most tokens (upipe_buffers.dk, dv).
 *           ALL_GATHER: those of all ranks, +=
 *   bytes   P2P: allocates as the forward, and two pairs of f32 gradients (four in a double ring); sends
 *           the forward's blocks again, and R of their gradients (a double ring one more for each node)
 *   errors  as upipe_ring_fwd
 */
UPIPE_API upipe_status upipe_ring_bwd(upipe_ctx *c, const upipe_attend *a, const upipe_kv_block *own)
{
    const int64_t mark = upipe_mem_mark(c->mem);
    upipe_status s;
    upi_ring r;
    UPIPE_TRY(upi_ring_begin(c, &r, a, own));
    s = a->plan->kv_gathered  ? upi_all_gather_bwd(c, &r, own)
        : r.d->ring_inner > 1 ? upi_double_bwd(c, &r, own)
                              : upi_p2p_bwd(c, &r, own);
    if (s == UPIPE_OK) upipe_mem_rewind(c->mem, mark); /* its buffers */
    return s == UPIPE_OK ? UPIPE_OK : upipe_unwind(c, s, mark, NULL);
}

/* upipe_ring_all_gather_start -- begins the all-gather of K and V over the ring
 *   all_k all_v  [ring rank][batch][tokens of that rank][kv_heads][d], [v_dim]
 *   k v          this rank's
 *   kv_heads     of this rank, the same on all ranks of the ring
 *   mask         that of the attention: a block that a rank's queries do not see is not sent there, and not written
 *   bytes        sends k and v to each of the others that see them
 *   order        complete after upipe_comm_wait(ctx, ctx->ring)
 *   errors       ARG (another ring's plan, or a transfer in progress: nothing happens); others as
 *                upipe_comm_start, and for these ring and team are aborted
 */
UPIPE_API upipe_status upipe_ring_all_gather_start(upipe_ctx *c, const upipe_plan *p, const upipe_mask *mask,
                                                   int kv_heads, void *all_k, void *all_v, const void *k,
                                                   const void *v)
{
    const int64_t mark = upipe_mem_mark(c->mem);
    upipe_comm *ring = c->ring;
    const upipe_plan_desc *d = p != NULL ? &p->desc : NULL;
    upipe_status s;
    size_t before = 0;
    int r, used = 0;
    UPIPE_TRY(upi_plan_check(c, p, UPI_PLAN_RING));
    UPIPE_TRY(upipe_comm_idle(c, ring));
    for (r = 0; r < d->ring; ++r) {
        const size_t e = upipe_dtype_bytes(d->dtype), row_k = (size_t)(d->batch * kv_heads * d->head_dim) * e;
        const size_t row_v = (size_t)(d->batch * kv_heads * d->v_dim) * e;
        const size_t n = (size_t)upipe_shard_ring(d->layout, d->tokens, d->ring, r).n;
        const int own = r == ring->rank;
        const size_t sent = own || upipe_ring_sees(d, mask, r, ring->rank) ? (size_t)p->team_tokens : 0;
        const size_t received = own || upipe_ring_sees(d, mask, ring->rank, r) ? n : 0;
        upipe_msg_add(ring->list, &used, r, 1, k, sent * row_k, 0, (char *)all_k + before * row_k,
                      received * row_k, 0);
        upipe_msg_add(ring->list, &used, r, 1, v, sent * row_v, 0, (char *)all_v + before * row_v,
                      received * row_v, 0);
        before += n;
    }
    s = upipe_comm_start(c, ring, ring->list, used);
    return s == UPIPE_OK ? UPIPE_OK : upipe_unwind(c, s, mark, NULL);
}

/* upipe_ring_reduce_scatter -- gradients of K or V of every rank's block, summed in rank order on that rank
 *   all       f32 [ring rank][batch][tokens of that rank][kv_heads][d]
 *   sum       f32 [batch][S/R][kv_heads][d], written
 *   buf       f32, R times the size of sum: scratch
 *   kv_heads  of this rank, the same on all ranks of the ring
 *   d         elements of a head
 *   errors    ARG (another ring's plan, or a transfer in progress: nothing happens); others as
 *             upipe_comm_wait, and for these ring and team are aborted
 */
UPIPE_API upipe_status upipe_ring_reduce_scatter(upipe_ctx *c, const upipe_plan *p, int kv_heads, int d,
                                                 float *sum, const float *all, float *buf)
{
    const int64_t mark = upipe_mem_mark(c->mem);
    upipe_comm *ring = c->ring;
    const upipe_plan_desc *desc = p != NULL ? &p->desc : NULL;
    const size_t row = p != NULL ? (size_t)(desc->batch * kv_heads * d) : 0;
    const size_t mine = p != NULL ? (size_t)p->team_tokens * row : 0;
    upipe_status s;
    size_t before = 0;
    int r, used = 0;
    UPIPE_TRY(upi_plan_check(c, p, UPI_PLAN_RING));
    UPIPE_TRY(upipe_comm_idle(c, ring));
    for (r = 0; r < desc->ring; ++r) {
        size_t n = (size_t)upipe_shard_ring(desc->layout, desc->tokens, desc->ring, r).n;
        upipe_msg_add(ring->list, &used, r, 1, all + before * row, n * row * 4, 0, buf + (size_t)r * mine,
                      mine * 4, 0);
        before += n;
    }
    s = upipe_comm_start(c, ring, ring->list, used);
    if (s == UPIPE_OK) s = upipe_comm_wait(c, ring);
    if (s == UPIPE_OK)
        s = c->ops->sum(c, upipe_view_packed(sum, UPIPE_F32, p->team_tokens * desc->batch * kv_heads, 1, d),
                        buf, (int64_t)mine, desc->ring, 0);
    return s == UPIPE_OK ? UPIPE_OK : upipe_unwind(c, s, mark, NULL);
}

#endif

/* upipe_sent.h -- bytes that a rank sends: in a stage, in a pass, round a ring        layer 4
 *
 *     upipe_plan_sent(&plan, 0)            to the team in a forward; equals what comm->sent_bytes counts
 */
#ifndef UPIPE_SENT_H
#define UPIPE_SENT_H

#include "upipe_attn.h"
#include "upipe_plan.h"

/* Bytes that a rank sends to the others in one all-to-all, to heads or to tokens; `each`: bytes of a token
 * and head. */
UPIPE_API int64_t upi_plan_sent_heads(const upipe_plan *p, upipe_a2a_heads which, int stage, int to_tokens,
                                      int64_t each)
{
    const int me = p->desc.rank, mine = upipe_plan_part(p, which, stage, me).count;
    int64_t sum = 0, first;
    int rank;
    for (rank = 0; rank < p->desc.ranks; ++rank) {
        if (rank == me) continue;
        if (to_tokens)
            sum += mine * upipe_plan_tokens(p, rank, &first);
        else
            sum += upipe_plan_part(p, which, stage, rank).count * p->local;
    }
    return sum * p->desc.batch * each;
}

/* upipe_plan_sent_stage -- bytes that this rank sends to its team in a stage
 *   backward  0: Q, K, V, O.  1: Q, K, V again (they are recomputed), dO, delta, dQ, dK, dV.  2: and O, for a
 *             compute table with attn_reads_o
 * Gradients of a key/value head that several ranks share are sent in f32, since they are summed afterwards.
 */
UPIPE_API int64_t upipe_plan_sent_stage(const upipe_plan *p, int stage, int backward)
{
    int64_t e = (int64_t)upipe_dtype_bytes(p->desc.dtype), d = p->desc.head_dim, v_dim = p->desc.v_dim, sum;
    sum = upi_plan_sent_heads(p, UPIPE_A2A_Q, stage, 0, d * e);
    sum += upi_plan_sent_heads(p, UPIPE_A2A_KV, stage, 0, (d + v_dim) * e);
    if (!backward) return sum + upi_plan_sent_heads(p, UPIPE_A2A_Q, stage, 1, v_dim * e);
    sum += upi_plan_sent_heads(p, UPIPE_A2A_Q, stage, 0, backward * v_dim * e + 4) +
           upi_plan_sent_heads(p, UPIPE_A2A_Q, stage, 1, d * e);
    return sum + upi_plan_sent_heads(p, UPIPE_A2A_DKV, stage, 1, (d + v_dim) * (p->kv_grads_partial ? 4 : e));
}

/* Bytes that this rank sends to its team in all stages; backward as in upipe_plan_sent_stage. */
UPIPE_API int64_t upipe_plan_sent(const upipe_plan *p, int backward)
{
    int64_t sum = 0;
    int i;
    for (i = 0; i < p->stages; ++i) sum += upipe_plan_sent_stage(p, i, backward);
    return sum;
}

/* ---- rings: a block of K and V is sent no further than there is a query that sees it ---- */

/* upipe_ring_sees -- whether queries of ring rank `to` may see keys of ring rank `block`. The answer is the same on every
 *                    rank, and never no where one sees: of striped tokens it is also yes for a window that is narrower than
 *                    the ring */
UPIPE_API int upipe_ring_sees(const upipe_plan_desc *d, const upipe_mask *mask, int to, int block)
{
    const upipe_shard q = upipe_shard_ring(d->layout, d->tokens, d->ring, to),
                      k = upipe_shard_ring(d->layout, d->tokens, d->ring, block);
    const int64_t sequences = upipe_mask_reads_positions(mask) ? d->batch : 1; /* else all see the same */
    upipe_attn a;
    int64_t b;
    int i, j;
    memset(&a, 0, sizeof a);
    a.mask = *mask;
    a.pos_step = q.step;
    for (b = 0; b < sequences; ++b)
        for (i = 0; i < q.pieces; ++i)
            for (j = 0; j < k.pieces; ++j) {
                a.q.n = q.piece[i].n;
                a.k.n = k.piece[j].n;
                a.q_pos = b * d->tokens + q.piece[i].pos;
                a.k_pos = b * d->tokens + k.piece[j].pos;
                if (a.q.n > 0 && upipe_attn_sees(&a)) return 1;
            }
    return 0;
}

/* upipe_ring_needed -- whether a block goes on to the rank that is `step` places ahead of `place`, among the ranks
 *                      [first, first + size): that one or one behind it may see it */
UPIPE_API int upipe_ring_needed(const upipe_plan_desc *d, const upipe_mask *mask, int block, int first,
                                int size, int place, int step)
{
    for (; step < size; ++step)
        if (upipe_ring_sees(d, mask, first + (place + step) % size, block)) return 1;
    return 0;
}

/* upipe_ring_needed_by_node -- the same of the node that is `turn` nodes ahead of the block's own */
UPIPE_API int upipe_ring_needed_by_node(const upipe_plan_desc *d, const upipe_mask *mask, int block, int turn)
{
    const int inner = d->ring_inner, nodes = d->ring / inner;
    for (; turn < nodes; ++turn)
        if (upipe_ring_needed(d, mask, block, (block / inner + turn) % nodes * inner, inner, 0, 0)) return 1;
    return 0;
}

/* Tokens whose K and V (or gradients) this rank sends in one pass round its ring. In a P2P ring it forwards
 * those of other ranks; in an all-gather it sends its own to each of the others. */
UPIPE_API int64_t upi_plan_ring_tokens(const upipe_plan *p, const upipe_mask *mask, int grads)
{
    const upipe_plan_desc *d = &p->desc;
    int inner = d->ring_inner > 1 ? d->ring_inner : d->ring, outer = d->ring / inner,
        node = d->ring_rank / inner;
    int place = d->ring_rank % inner, i, o;
    int64_t sum = 0;
    if (d->ring_mode == UPIPE_RING_ALL_GATHER && grads) return d->tokens - p->team_tokens;
    for (i = 0; d->ring_mode == UPIPE_RING_ALL_GATHER && i < d->ring; ++i)
        if (i != d->ring_rank && upipe_ring_sees(d, mask, i, d->ring_rank)) sum += p->team_tokens;
    if (d->ring_mode == UPIPE_RING_ALL_GATHER) return sum;
    for (o = 0; o < outer; ++o) {
        int from = (node - o + outer) % outer * inner;
        /* step i sends the block that came from i ranks back; a gradient needs one step more to reach its own
         * rank */
        for (i = 0; i < (grads && inner > 1 ? inner : inner - 1); ++i) {
            const int start = (place - i + inner) % inner;
            if (grads || upipe_ring_needed(d, mask, from + start, node * inner, inner, start, i + 1))
                sum += upipe_shard_ring(d->layout, d->tokens, d->ring, from + start).n;
        }
        if (outer > 1 && (grads || upipe_ring_needed_by_node(d, mask, from + place, o + 1)))
            sum += upipe_shard_ring(d->layout, d->tokens, d->ring, from + place).n;
    }
    return sum;
}

/* upipe_plan_sent_ring -- bytes that this rank sends to its ring
 *   mask      that of the calls. K and V that no query further on sees are not sent; gradients always go back
 *   backward  0: K, V.  1: K, V again, and their gradients in f32
 */
UPIPE_API int64_t upipe_plan_sent_ring(const upipe_plan *p, const upipe_mask *mask, int backward)
{
    const upipe_plan_desc *d = &p->desc;
    int64_t e = (int64_t)upipe_dtype_bytes(d->dtype), both = (int64_t)d->head_dim + d->v_dim, heads = 0;
    int stage;
    if (d->ring == 1) return 0;
    for (stage = 0; stage < p->stages; ++stage)
        heads += upipe_plan_part(p, UPIPE_A2A_KV, stage, d->rank).count;
    return heads * both * d->batch *
           (upi_plan_ring_tokens(p, mask, 0) * e + (backward ? upi_plan_ring_tokens(p, mask, 1) * 4 : 0));
}

#endif

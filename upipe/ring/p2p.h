/* p2p.h -- the P2P ring: K and V are sent round, their gradients follow one step behind
 *
 *     step 0      attend own K, V             while they are sent to the rank ahead
 *     step i      attend those of rank - i    while these are sent on
 *
 * A block goes no further than to the last rank whose queries see one of its keys. Its gradients go all the way round.
 * A turn is once round: all ranks of the ring, or those of a node (ring/double.h).
 */
#ifndef UPIPE_RING_P2P_H
#define UPIPE_RING_P2P_H

UPIPE_API int upi_turn_place(const upi_ring *r, int ahead)
{
    return ((r->place + ahead) % r->size + r->size) % r->size;
}

/* Whether the block that began at this place still goes on to the rank `step` places ahead of it. */
UPIPE_API int upi_turn_needed(const upi_ring *r, int place, int step)
{
    return upi_ring_needed(r->d, &r->a->mask, r->blocks + place, r->first, r->size, place, step);
}

/* Lists K and V of step i: `now` to the rank ahead, *next from the rank behind. */
UPIPE_API void upi_turn_move(upi_ring *r, int i, const upipe_kv_block *now, upipe_kv_block *next)
{
    const int here = upi_turn_place(r, -i), behind = upi_turn_place(r, -i - 1);
    if (i < r->size - 1)
        upi_ring_move(r, now, r->first + upi_turn_place(r, 1), upi_turn_needed(r, here, i + 1),
                      r->first + upi_turn_place(r, -1), upi_turn_needed(r, behind, i + 1), r->blocks + behind,
                      r->kv[i % 2], next);
}

/* The forward of a turn that begins with the block `now`. What the caller has listed goes with the first step.
 *   fresh   nonzero: the queries have attended no keys yet */
UPIPE_API upipe_status upi_turn_fwd(upipe_ctx *c, upi_ring *r, upipe_kv_block now, int fresh)
{
    upipe_kv_block next = now;
    int i;
    for (i = 0; i < r->size; ++i, now = next) {
        upi_turn_move(r, i, &now, &next);
        UPIPE_TRY(upi_ring_start(c, r));
        UPIPE_TRY(upipe_attend_fwd(c, r->a, &now, fresh && i == 0));
        UPIPE_TRY(upi_ring_wait(c, r));
    }
    return UPIPE_OK;
}

/* The backward of a turn. Three gradients at a time: one is computed (`here`), one is sent (`done`: that of the block
 * before), one is received (`comes`: what the ranks before have summed for the block that is computed). At the end
 * those of the first block are back: *sum, in one of r->grad. */
UPIPE_API upipe_status upi_turn_bwd(upipe_ctx *c, upi_ring *r, upipe_kv_block now, int fresh,
                                    upi_ring_grad *sum)
{
    const int ahead = r->first + upi_turn_place(r, 1), behind = r->first + upi_turn_place(r, -1);
    const upipe_shard start = now.rows;
    upipe_shard before = start;
    upipe_kv_block next = now;
    upi_ring_grad done = r->grad[0];
    int i;
    for (i = 0; i < r->size; ++i, now = next) {
        const upi_ring_grad here = r->grad[i > 0], comes = r->grad[i % 2 * 2];
        upi_turn_move(r, i, &now, &next);
        if (i > 0) upi_ring_move_grad(r, done, &before, ahead, behind, &now.rows, comes);
        UPIPE_TRY(upi_ring_start(c, r));
        now.dk = here.k;
        now.dv = here.v;
        UPIPE_TRY(upi_ring_zero(c, r, &now));
        UPIPE_TRY(upipe_attend_bwd(c, r->a, &now, fresh && i == 0));
        UPIPE_TRY(upi_ring_wait(c, r));
        if (i > 0) UPIPE_TRY(upi_ring_add(c, r, comes, here, &now.rows));
        done = i > 0 ? comes : here;
        before = now.rows;
    }
    /* the last block is that of the rank ahead: its gradients are sent there, and the first block's come back */
    *sum = done.k != r->grad[0].k ? r->grad[0] : r->grad[1];
    upi_ring_move_grad(r, done, &before, ahead, behind, &start, *sum);
    UPIPE_TRY(upi_ring_start(c, r));
    return upi_ring_wait(c, r);
}

/* Buffers of turns round `size` ranks. */
UPIPE_API upipe_status upi_turn_begin(upipe_ctx *c, upi_ring *r, int size)
{
    r->size = size;
    r->place = r->d->ring_rank % size;
    r->first = r->blocks = r->d->ring_rank - r->place;
    UPIPE_TRY(upi_ring_alloc_kv(c, r, size > 1, &r->kv[0]));
    return upi_ring_alloc_kv(c, r, size > 2, &r->kv[1]);
}

UPIPE_API upipe_status upi_turn_begin_grads(upipe_ctx *c, upi_ring *r, const upipe_kv_block *own)
{
    r->grad[0].k = own->dk;
    r->grad[0].v = own->dv;
    UPIPE_TRY(upi_ring_alloc_grad(c, r, &r->grad[1]));
    return upi_ring_alloc_grad(c, r, &r->grad[2]);
}

/* ---- one turn over all ranks ---- */

UPIPE_API upipe_status upi_p2p_fwd(upipe_ctx *c, upi_ring *r, const upipe_kv_block *own)
{
    UPIPE_TRY(upi_turn_begin(c, r, r->d->ring));
    return upi_turn_fwd(c, r, *own, 1);
}

UPIPE_API upipe_status upi_p2p_bwd(upipe_ctx *c, upi_ring *r, const upipe_kv_block *own)
{
    upi_ring_grad sum;
    UPIPE_TRY(upi_turn_begin(c, r, r->d->ring));
    UPIPE_TRY(upi_turn_begin_grads(c, r, own));
    UPIPE_TRY(upi_turn_bwd(c, r, *own, 1, &sum));
    return upi_ring_own_grad(c, r, own, sum);
}

#endif

/* double.h -- the double ring: P2P within each node, and from node to node
 *
 * Rank = node * inner + place. A turn sends K and V once round the node. The block that a turn begins with is also
 * sent to the same place of the next node, in the transfer of the turn's first step, and begins the next turn there.
 * Gradients go round the node in each turn; their sums over nodes follow from node to node.
 */
#ifndef UPIPE_RING_DOUBLE_H
#define UPIPE_RING_DOUBLE_H

/* The rank at this rank's place, so many nodes ahead. */
UPIPE_API int upi_double_peer(const upi_ring *r, int nodes)
{
    const int ring = r->d->ring;
    return ((r->d->ring_rank + nodes * r->d->ring_inner) % ring + ring) % ring;
}

/* Lists what goes from node to node in a turn: `now` to the next one, *far from the one before. Sets whose blocks are
 * sent round. */
UPIPE_API void upi_double_move(upi_ring *r, int turn, int turns, const upipe_kv_block *now, void *buf,
                               upipe_kv_block *far)
{
    const int here = upi_double_peer(r, -turn), behind = upi_double_peer(r, -turn - 1);
    const upipe_mask *mask = &r->a->mask;
    r->blocks = here - r->place;
    if (turn < turns - 1)
        upi_ring_move(r, now, upi_double_peer(r, 1), upi_ring_needed_by_node(r->d, mask, here, turn + 1),
                      upi_double_peer(r, -1), upi_ring_needed_by_node(r->d, mask, behind, turn + 1), behind,
                      buf, far);
}

UPIPE_API upipe_status upi_double_fwd(upipe_ctx *c, upi_ring *r, const upipe_kv_block *own)
{
    const int turns = r->d->ring / r->d->ring_inner;
    upipe_kv_block now = *own, far = now;
    void *buf[2];
    int turn;
    UPIPE_TRY(upi_turn_begin(c, r, r->d->ring_inner));
    for (turn = 0; turn < 2; ++turn) UPIPE_TRY(upi_ring_alloc_kv(c, r, turn < turns - 1, &buf[turn]));
    for (turn = 0; turn < turns; ++turn, now = far) {
        upi_double_move(r, turn, turns, &now, buf[turn % 2], &far);
        UPIPE_TRY(upi_turn_fwd(c, r, now, turn == 0));
    }
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_double_bwd(upipe_ctx *c, upi_ring *r, const upipe_kv_block *own)
{
    const int turns = r->d->ring / r->d->ring_inner, ahead = upi_double_peer(r, 1),
              behind = upi_double_peer(r, -1);
    upipe_kv_block now = *own, far = now;
    upi_ring_grad sum, nodes[2] = {{NULL, NULL}, {NULL, NULL}}; /* sums over the nodes so far */
    void *buf[2];
    int turn;
    UPIPE_TRY(upi_turn_begin(c, r, r->d->ring_inner));
    UPIPE_TRY(upi_turn_begin_grads(c, r, own));
    for (turn = 0; turn < 2; ++turn) {
        UPIPE_TRY(upi_ring_alloc_kv(c, r, turn < turns - 1, &buf[turn]));
        if (turns > 1) UPIPE_TRY(upi_ring_alloc_grad(c, r, &nodes[turn]));
    }
    for (turn = 0; turn < turns; ++turn, now = far) {
        upi_double_move(r, turn, turns, &now, buf[turn % 2], &far);
        UPIPE_TRY(upi_turn_bwd(c, r, now, turn == 0, &sum));
        if (turns == 1) break;
        if (turn > 0) { /* what came from the node before belongs to this turn's block */
            UPIPE_TRY(upi_ring_add(c, r, nodes[(turn - 1) % 2], sum, &now.rows));
            sum = nodes[(turn - 1) % 2];
        }
        far.rows = upi_ring_shard(r, upi_double_peer(r, -turn - 1));
        upi_ring_move_grad(r, sum, &now.rows, ahead, behind, &far.rows, nodes[turn % 2]);
        UPIPE_TRY(upi_ring_start(c, r));
        UPIPE_TRY(upi_ring_wait(c, r));
        sum = nodes[turn % 2];
    }
    return upi_ring_own_grad(c, r, own, sum);
}

#endif

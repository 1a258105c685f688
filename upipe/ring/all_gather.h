/* all_gather.h -- K and V of all ranks of the ring are held: this rank's own first, then those of the ranks behind */
#ifndef UPIPE_RING_ALL_GATHER_H
#define UPIPE_RING_ALL_GATHER_H

/* The block of the rank that is `step` places behind, in buffers [ring rank][batch][tokens of that rank][...]. */
UPIPE_API upipe_kv_block upi_gathered_block(const upi_ring *r, const upipe_kv_block *all, int step)
{
    const size_t e = upipe_dtype_bytes(r->d->dtype), d = (size_t)r->d->head_dim, v_dim = (size_t)r->d->v_dim;
    const int src = (r->d->ring_rank - step + r->d->ring) % r->d->ring;
    upipe_kv_block b = *all;
    size_t before = 0;
    int rank;
    for (rank = 0; rank < src; ++rank) {
        upipe_shard tokens = upi_ring_shard(r, rank);
        before += (size_t)upi_ring_rows(r, &tokens);
    }
    b.rows = upi_ring_shard(r, src);
    b.k = upipe_offset(all->k, before * d * e);
    b.v = upipe_offset(all->v, before * v_dim * e);
    b.dk = (float *)upipe_offset(all->dk, before * d * 4);
    b.dv = (float *)upipe_offset(all->dv, before * v_dim * 4);
    return b;
}

UPIPE_API upipe_status upi_all_gather_fwd(upipe_ctx *c, const upi_ring *r, const upipe_kv_block *all)
{
    int step;
    for (step = 0; step < r->d->ring; ++step) {
        const upipe_kv_block block = upi_gathered_block(r, all, step);
        UPIPE_TRY(upipe_attend_fwd(c, r->a, &block, step == 0));
    }
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_all_gather_bwd(upipe_ctx *c, const upi_ring *r, const upipe_kv_block *all)
{
    int step;
    for (step = 0; step < r->d->ring; ++step) {
        const upipe_kv_block block = upi_gathered_block(r, all, step);
        UPIPE_TRY(upipe_attend_bwd(c, r->a, &block, step == 0));
    }
    return UPIPE_OK;
}

#endif

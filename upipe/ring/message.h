/* message.h -- blocks of K and V, and their gradients, from rank to rank of a ring */
#ifndef UPIPE_RING_MESSAGE_H
#define UPIPE_RING_MESSAGE_H

enum { UPI_RING_MESSAGES = 12 }; /* of one transfer: three tensor pairs, each sent and received */

/* A pair of gradients in f32. */
typedef struct upi_ring_grad {
    float *k, *v;
} upi_ring_grad;

/* One pass round a ring.
 *   list   messages of the next transfer; moves: there is one. All ranks take part in it, with messages or without
 *   size   of the ring that K and V are sent round: all ranks, or those of a node; place: this rank's
 *   first  rank of place 0;  blocks: that of place 0 of the node whose blocks are sent round
 *   kv     two buffers for K and V
 *   grad   the caller's gradients of its own block, and two more */
typedef struct upi_ring {
    const upipe_attend *a;
    const upipe_plan_desc *d;
    upipe_msg list[UPI_RING_MESSAGES];
    int used, moves;
    int size, place, first, blocks;
    void *kv[2];
    upi_ring_grad grad[3];
} upi_ring;

/* The tokens of a sequence that a ring rank has. */
UPIPE_API upipe_shard upi_ring_shard(const upi_ring *r, int rank)
{
    return upipe_shard_ring(r->d->layout, r->d->tokens, r->d->ring, rank);
}

/* Rows of a block of these tokens: batch x tokens x heads. */
UPIPE_API int64_t upi_ring_rows(const upi_ring *r, const upipe_shard *tokens)
{
    return tokens->n * r->d->batch * r->a->kv_heads;
}

/* Lists a pair of tensors of these tokens, of elements of `e` bytes: to be sent to a peer, or received from it. */
UPIPE_API void upi_ring_send(upi_ring *r, int peer, const upipe_shard *tokens, const void *k, const void *v,
                             size_t e)
{
    const size_t rows = (size_t)upi_ring_rows(r, tokens) * e, d = (size_t)r->d->head_dim,
                 v_dim = (size_t)r->d->v_dim;
    upipe_msg_add(r->list, &r->used, peer, 1, k, rows * d, 0, NULL, 0, 0);
    upipe_msg_add(r->list, &r->used, peer, 1, v, rows * v_dim, 0, NULL, 0, 0);
}

UPIPE_API void upi_ring_receive(upi_ring *r, int peer, const upipe_shard *tokens, void *k, void *v, size_t e)
{
    const size_t rows = (size_t)upi_ring_rows(r, tokens) * e, d = (size_t)r->d->head_dim,
                 v_dim = (size_t)r->d->v_dim;
    upipe_msg_add(r->list, &r->used, peer, 1, NULL, 0, 0, k, rows * d, 0);
    upipe_msg_add(r->list, &r->used, peer, 1, NULL, 0, 0, v, rows * v_dim, 0);
}

/* Lists K and V of a block to rank `to`, and those of rank src from rank `from` into `buf`: *next.
 *   send, receive   zero: nobody sees that block from there on (upi_ring_needed) */
UPIPE_API void upi_ring_move(upi_ring *r, const upipe_kv_block *block, int to, int send, int from,
                             int receive, int src, void *buf, upipe_kv_block *next)
{
    const size_t e = upipe_dtype_bytes(r->d->dtype);
    upipe_kv_block b;
    memset(&b, 0, sizeof b);
    b.rows = upi_ring_shard(r, src);
    b.k = buf;
    b.v = (char *)buf + (size_t)upi_ring_rows(r, &b.rows) * (size_t)r->d->head_dim * e;
    r->moves = 1;
    if (send) upi_ring_send(r, to, &block->rows, block->k, block->v, e);
    if (receive) upi_ring_receive(r, from, &b.rows, buf, (void *)(uintptr_t)b.v, e);
    *next = b;
}

/* Lists gradients: g, of the tokens `sent`, to rank `to`, and those of `received` from rank `from` into `into`. */
UPIPE_API void upi_ring_move_grad(upi_ring *r, upi_ring_grad g, const upipe_shard *sent, int to, int from,
                                  const upipe_shard *received, upi_ring_grad into)
{
    r->moves = 1;
    upi_ring_send(r, to, sent, g.k, g.v, 4);
    upi_ring_receive(r, from, received, into.k, into.v, 4);
}

/* Starts the listed transfer, if there is one. */
UPIPE_API upipe_status upi_ring_start(upipe_ctx *c, upi_ring *r)
{
    return r->moves ? upipe_comm_start(c, c->ring, r->list, r->used) : UPIPE_OK;
}

UPIPE_API upipe_status upi_ring_wait(upipe_ctx *c, upi_ring *r)
{
    const int moves = r->moves;
    r->used = r->moves = 0;
    return moves ? upipe_comm_wait(c, c->ring) : UPIPE_OK;
}

/* sum += g, of these tokens. */
UPIPE_API upipe_status upi_ring_add(upipe_ctx *c, const upi_ring *r, upi_ring_grad sum, upi_ring_grad g,
                                    const upipe_shard *tokens)
{
    const int64_t rows = upi_ring_rows(r, tokens);
    UPIPE_TRY(c->ops->add(c, upipe_view_packed(sum.k, UPIPE_F32, rows, 1, r->d->head_dim),
                          upipe_view_packed(g.k, UPIPE_F32, rows, 1, r->d->head_dim)));
    return c->ops->add(c, upipe_view_packed(sum.v, UPIPE_F32, rows, 1, r->d->v_dim),
                       upipe_view_packed(g.v, UPIPE_F32, rows, 1, r->d->v_dim));
}

/* A block's gradients = 0. */
UPIPE_API upipe_status upi_ring_zero(upipe_ctx *c, const upi_ring *r, const upipe_kv_block *block)
{
    const size_t rows = (size_t)upi_ring_rows(r, &block->rows);
    UPIPE_TRY(c->ops->zero(c, block->dk, rows * (size_t)r->d->head_dim * 4));
    return c->ops->zero(c, block->dv, rows * (size_t)r->d->v_dim * 4);
}

/* Gradients of this rank's own block that have come back in g: copied to where the caller wants them. */
UPIPE_API upipe_status upi_ring_own_grad(upipe_ctx *c, const upi_ring *r, const upipe_kv_block *own,
                                         upi_ring_grad g)
{
    const size_t rows = (size_t)upi_ring_rows(r, &own->rows);
    if (g.k == own->dk) return UPIPE_OK;
    UPIPE_TRY(c->ops->copy(c, own->dk, g.k, rows * (size_t)r->d->head_dim * 4));
    return c->ops->copy(c, own->dv, g.v, rows * (size_t)r->d->v_dim * 4);
}

/* A buffer for K and V of any ring rank, where one is needed; otherwise NULL. */
UPIPE_API upipe_status upi_ring_alloc_kv(upipe_ctx *c, const upi_ring *r, int needed, void **buf)
{
    const upipe_buffers *b = &r->a->plan->buffers;
    return upipe_alloc(c, buf, needed ? b->hop_k + b->hop_v : 0, UPIPE_USE_SCRATCH, "ring_kv");
}

/* Gradients of K and V of any ring rank: one block of the pool, that of g->k. */
UPIPE_API upipe_status upi_ring_alloc_grad(upipe_ctx *c, const upi_ring *r, upi_ring_grad *g)
{
    const upipe_buffers *b = &r->a->plan->buffers;
    void *data;
    UPIPE_TRY(upipe_alloc(c, &data, b->dk + b->dv, UPIPE_USE_ACT_GRAD, "ring_grad"));
    g->k = (float *)data;
    g->v = g->k + b->dk / 4;
    return UPIPE_OK;
}

#endif

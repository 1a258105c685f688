/* p2p.h -- the P2P ring: K and V are sent round, their gradients follow one step behind
 *                                                                                  part of upipe_ring.h
 */
#ifndef UPIPE_RING_H
#include "../upipe_ring.h"
#elif !defined(UPIPE_RING_P2P_H)
#define UPIPE_RING_P2P_H

enum { UPI_RING_MESSAGES = 16 };

/* One pass round the ring: this rank's place, and the messages of the next transfer. */
typedef struct upi_ring_pass {
    upipe_ctx *c;
    const upipe_ring_call *r;
    upipe_msg list[UPI_RING_MESSAGES];
    int used;
    int inner, outer, place, node; /* rank = node * inner + place */
} upi_ring_pass;

UPIPE_API upi_ring_pass upi_ring_begin(upipe_ctx *c, const upipe_ring_call *r)
{
    const upipe_plan_desc *d = &r->plan->desc;
    upi_ring_pass s;
    memset(&s, 0, sizeof s);
    s.c = c;
    s.r = r;
    s.inner = d->ring_inner > 1 ? d->ring_inner : d->ring;
    s.outer = d->ring / s.inner;
    s.place = d->ring_rank % s.inner;
    s.node = d->ring_rank / s.inner;
    return s;
}

/* The rank that is so many nodes and places ahead. */
UPIPE_API int upi_ring_peer(const upi_ring_pass *s, int nodes, int places)
{
    int node = ((s->node + nodes) % s->outer + s->outer) % s->outer;
    return node * s->inner + ((s->place + places) % s->inner + s->inner) % s->inner;
}

/* Rows of the block of rank src: batch x tokens x heads. */
UPIPE_API int64_t upi_ring_rows(const upipe_ring_call *r, int src)
{
    const upipe_plan_desc *d = &r->plan->desc;
    return upipe_shard_ring(d->layout, d->tokens, d->ring, src).n * d->batch * r->kv_heads;
}

UPIPE_API void upi_ring_send(upi_ring_pass *s, int peer, const void *data, size_t bytes)
{
    upipe_msg_add(s->list, &s->used, peer, 1, data, bytes, bytes, NULL, 0, 0);
}

UPIPE_API void upi_ring_receive(upi_ring_pass *s, int peer, void *data, size_t bytes)
{
    upipe_msg_add(s->list, &s->used, peer, 1, NULL, 0, 0, data, bytes, bytes);
}

/* Lists two messages: K and V to rank `to`, and those of rank src from rank `from` into `buf`. */
UPIPE_API void upi_ring_move(upi_ring_pass *s, const upi_ring_block *b, int to, int from, int src, char *buf,
                             upi_ring_block *next)
{
    const upipe_plan_desc *d = &s->r->plan->desc;
    size_t e = upipe_dtype_bytes(d->dtype);
    size_t k = (size_t)(upi_ring_rows(s->r, b->src) * d->head_dim) * e,
           v = k / (size_t)d->head_dim * (size_t)d->v_dim;
    size_t next_k = (size_t)(upi_ring_rows(s->r, src) * d->head_dim) * e;
    size_t next_v = next_k / (size_t)d->head_dim * (size_t)d->v_dim;
    memset(next, 0, sizeof *next);
    next->k = buf;
    next->v = buf + next_k;
    next->src = src;
    upi_ring_send(s, to, b->k, k);
    upi_ring_send(s, to, b->v, v);
    upi_ring_receive(s, from, buf, next_k);
    upi_ring_receive(s, from, buf + next_k, next_v);
}

/* A pair of gradients in f32. */
typedef struct upi_ring_grad {
    float *k, *v;
} upi_ring_grad;

/* The same for gradients: those of the block of rank `src` are sent, those of rank `next` received. */
UPIPE_API void upi_ring_move_grad(upi_ring_pass *s, upi_ring_grad g, int src, int to, int from, int next,
                                  upi_ring_grad into)
{
    const upipe_plan_desc *d = &s->r->plan->desc;
    size_t rows = (size_t)upi_ring_rows(s->r, src), more = (size_t)upi_ring_rows(s->r, next);
    upi_ring_send(s, to, g.k, rows * (size_t)d->head_dim * 4);
    upi_ring_send(s, to, g.v, rows * (size_t)d->v_dim * 4);
    upi_ring_receive(s, from, into.k, more * (size_t)d->head_dim * 4);
    upi_ring_receive(s, from, into.v, more * (size_t)d->v_dim * 4);
}

UPIPE_API upipe_status upi_ring_start(upi_ring_pass *s)
{
    return s->used > 0 ? upipe_comm_start(s->c, s->c->ring, s->list, s->used) : UPIPE_OK;
}

UPIPE_API upipe_status upi_ring_wait(upi_ring_pass *s)
{
    int used = s->used;
    s->used = 0;
    return used > 0 ? upipe_comm_wait(s->c, s->c->ring) : UPIPE_OK;
}

/* sum += g, for the block of rank src. */
UPIPE_API upipe_status upi_ring_add(upi_ring_pass *s, upi_ring_grad sum, upi_ring_grad g, int src)
{
    const upipe_plan_desc *d = &s->r->plan->desc;
    const int64_t rows = upi_ring_rows(s->r, src);
    UPIPE_TRY(s->c->ops->add(s->c, upipe_view_packed(sum.k, UPIPE_F32, rows, 1, d->head_dim),
                             upipe_view_packed(g.k, UPIPE_F32, rows, 1, d->head_dim)));
    return s->c->ops->add(s->c, upipe_view_packed(sum.v, UPIPE_F32, rows, 1, d->v_dim),
                          upipe_view_packed(g.v, UPIPE_F32, rows, 1, d->v_dim));
}

UPIPE_API upipe_status upi_ring_zero(upi_ring_pass *s, upi_ring_grad g, int src)
{
    const upipe_plan_desc *d = &s->r->plan->desc;
    const size_t rows = (size_t)upi_ring_rows(s->r, src);
    UPIPE_TRY(s->c->ops->zero(s->c, g.k, rows * (size_t)d->head_dim * 4));
    return s->c->ops->zero(s->c, g.v, rows * (size_t)d->v_dim * 4);
}

/* Buffers of a pass. hop: K and V in the inner ring. far: K and V between nodes. grad: the caller's gradients
 * and two more. node: sums of gradients over nodes. */
typedef struct upi_ring_buf {
    char *hop[2], *far[2];
    upi_ring_grad grad[3], node[2];
} upi_ring_buf;

UPIPE_API upipe_status upi_ring_alloc_grad(upipe_ctx *c, const upipe_buffers *b, upi_ring_grad *g)
{
    void *data;
    UPIPE_TRY(upipe_mem_alloc(c->mem, &data, b->dk + b->dv, "ring_grad", &c->err));
    g->k = (float *)data;
    g->v = g->k + b->dk / 4;
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_ring_alloc(upi_ring_pass *s, upi_ring_buf *buf, int backward)
{
    upipe_ctx *c = s->c;
    const upipe_buffers b = upipe_plan_buffers(s->r->plan);
    void *data;
    int i;
    memset(buf, 0, sizeof *buf);
    for (i = 0; i < 2; ++i) {
        if (i < s->inner - 1) {
            UPIPE_TRY(upipe_mem_alloc(c->mem, &data, b.hop_k + b.hop_v, "ring_kv", &c->err));
            buf->hop[i] = (char *)data;
        }
        if (i < s->outer - 1) {
            UPIPE_TRY(upipe_mem_alloc(c->mem, &data, b.hop_k + b.hop_v, "ring_kv", &c->err));
            buf->far[i] = (char *)data;
        }
        if (!backward) continue;
        UPIPE_TRY(upi_ring_alloc_grad(c, &b, &buf->grad[i + 1]));
        if (s->outer > 1) UPIPE_TRY(upi_ring_alloc_grad(c, &b, &buf->node[i]));
    }
    buf->grad[0].k = s->r->dk;
    buf->grad[0].v = s->r->dv;
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_ring_free(upi_ring_pass *s, upi_ring_buf *buf)
{
    upipe_ctx *c = s->c;
    int i;
    for (i = 0; i < 2; ++i) {
        UPIPE_TRY(upipe_mem_free(c->mem, buf->hop[i], &c->err));
        UPIPE_TRY(upipe_mem_free(c->mem, buf->far[i], &c->err));
        UPIPE_TRY(upipe_mem_free(c->mem, buf->grad[i + 1].k, &c->err));
        UPIPE_TRY(upipe_mem_free(c->mem, buf->node[i].k, &c->err));
    }
    return UPIPE_OK;
}

/* One turn of the inner ring, from the block `start` on. That block is also sent to the next node, unless
 * this is the last turn. Backward: *grad is the node's gradient of that block, in one of buf->grad. */
UPIPE_API upipe_status upi_ring_turn(upi_ring_pass *s, upi_ring_buf *buf, int turn, upi_ring_block *start,
                                     upi_ring_grad *grad, int backward)
{
    upi_ring_block now = *start, next, far;
    upi_ring_grad out = buf->grad[0]; /* gradient of the previous block, to be sent */
    int i;
    far = next = now;
    for (i = 0; i < s->inner; ++i) {
        /* three gradients at a time: one is sent, one received, one computed */
        const upi_ring_grad here = buf->grad[i > 0], comes = buf->grad[i % 2 * 2];
        if (i < s->inner - 1)
            upi_ring_move(s, &now, upi_ring_peer(s, 0, 1), upi_ring_peer(s, 0, -1),
                          upi_ring_peer(s, -turn, -i - 1), buf->hop[i % 2], &next);
        if (i == 0 && turn < s->outer - 1)
            upi_ring_move(s, start, upi_ring_peer(s, 1, 0), upi_ring_peer(s, -1, 0),
                          upi_ring_peer(s, -turn - 1, 0), buf->far[turn % 2], &far);
        if (backward && i > 0)
            upi_ring_move_grad(s, out, upi_ring_peer(s, -turn, -i + 1), upi_ring_peer(s, 0, 1),
                               upi_ring_peer(s, 0, -1), now.src, comes);
        UPIPE_TRY(upi_ring_start(s));
        if (backward) UPIPE_TRY(upi_ring_zero(s, here, now.src));
        now.dk = here.k;
        now.dv = here.v;
        UPIPE_TRY(upi_ring_attend(s->c, s->r, &now, turn == 0 && i == 0, backward));
        UPIPE_TRY(upi_ring_wait(s));
        out = here;
        if (backward && i > 0) {
            UPIPE_TRY(upi_ring_add(s, comes, here, now.src));
            out = comes;
        }
        if (i < s->inner - 1) now = next;
    }
    *start = far;
    if (!backward) return UPIPE_OK;
    *grad = out;
    if (s->inner == 1) return UPIPE_OK;
    /* the gradient of the last block is sent on to the rank that the block belongs to */
    *grad = out.k != buf->grad[0].k ? buf->grad[0] : buf->grad[1];
    upi_ring_move_grad(s, out, now.src, upi_ring_peer(s, 0, 1), upi_ring_peer(s, 0, -1),
                       upi_ring_peer(s, -turn, 0), *grad);
    UPIPE_TRY(upi_ring_start(s));
    return upi_ring_wait(s);
}

/* Copies the gradients of this rank's block to the caller's. */
UPIPE_API upipe_status upi_ring_own_grad(upi_ring_pass *s, upi_ring_grad g)
{
    const upipe_plan_desc *d = &s->r->plan->desc;
    const size_t rows = (size_t)upi_ring_rows(s->r, d->ring_rank);
    if (g.k == s->r->dk) return UPIPE_OK;
    UPIPE_TRY(s->c->ops->copy(s->c, s->r->dk, g.k, rows * (size_t)d->head_dim * 4));
    return s->c->ops->copy(s->c, s->r->dv, g.v, rows * (size_t)d->v_dim * 4);
}

/* All turns: the blocks of this node's inner ring, then those of the previous node's, and so on. */
UPIPE_API upipe_status upi_ring_shift(upi_ring_pass *s, int backward)
{
    upi_ring_buf buf;
    upi_ring_block start;
    upi_ring_grad grad, sum;
    int turn;
    UPIPE_TRY(upi_ring_alloc(s, &buf, backward));
    memset(&start, 0, sizeof start);
    memset(&grad, 0, sizeof grad);
    start.k = s->r->k;
    start.v = s->r->v;
    start.src = upi_ring_peer(s, 0, 0);
    for (turn = 0; turn < s->outer; ++turn) {
        UPIPE_TRY(upi_ring_turn(s, &buf, turn, &start, &grad, backward));
        if (!backward || s->outer == 1) continue;
        /* the sum over the nodes so far is sent to the next node; the one received belongs to the next turn's
         * block */
        sum = grad;
        if (turn > 0) {
            sum = buf.node[(turn - 1) % 2];
            UPIPE_TRY(upi_ring_add(s, sum, grad, upi_ring_peer(s, -turn, 0)));
        }
        upi_ring_move_grad(s, sum, upi_ring_peer(s, -turn, 0), upi_ring_peer(s, 1, 0),
                           upi_ring_peer(s, -1, 0), upi_ring_peer(s, -turn - 1, 0), buf.node[turn % 2]);
        UPIPE_TRY(upi_ring_start(s));
        UPIPE_TRY(upi_ring_wait(s));
        grad = buf.node[turn % 2];
    }
    if (backward) UPIPE_TRY(upi_ring_own_grad(s, grad));
    return upi_ring_free(s, &buf);
}

#endif

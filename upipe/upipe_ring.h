/* upipe_ring.h -- attention over a ring of ranks that share the sequence        layer 4, includes a2a, attn, bytes
 *
 * Every rank keeps its queries; keys and values come to them, in one of two ways:
 *
 *     P2P   K and V go round, r -> r + 1, while the block that is here is attended. Gradients of K and V
 *             follow one step behind in f32, and are home after R sends. In a double ring they go round
 *             within a node; a turn's first block also goes to the next node, in the exchange of the first
 *             step, and begins the next turn there
 *     ALL_GATHER  every rank gets all K and V of a round, and keeps them: upipe_ring_all_gather_start, upipe_ring_reduce_scatter
 *
 * Who holds which tokens is the plan's layout; the mask is a statement about positions, so that one code serves
 * contiguous, zigzag and striped rings, and pairs of blocks that do not see each other cost nothing. O, and dQ, are
 * summed in f32. With one rank in the ring the same calls are plain attention.
 *
 *     upipe_ring_call call = {plan, mask, scale, work, work_bytes, parts, ...};
 *     upipe_ring_fwd(&ctx, &call);            o, lse
 *     upipe_ring_bwd(&ctx, &call);            dq, dk, dv
 */
#ifndef UPIPE_RING_H
#define UPIPE_RING_H

#include "upipe_a2a.h"
#include "upipe_attn.h"
#include "upipe_unwind.h"

/* upipe_ring_part -- the query heads of one stage; all parts of a call read the same K and V
 *   q dout    [batch][S/R][heads][d], [v_dim] in the storage type
 *   o dq    [batch][S/R][heads][v_dim], [d] of the call's type of sums. dq must be zero before, where that is f32
 *   lse delta  f32 [batch][S/R][heads]
 *   first   the first of these heads, counted over all H. K and V of the call begin with the key/value head of its
 *           group: head j reads head (first % G + j) / G of them
 */
typedef struct upipe_ring_part {
    const void *q, *dout;
    void *o, *dq;
    float *lse, *delta;
    int heads, first;
} upipe_ring_part;

/* upipe_ring_call
 *   plan     sizes, layout and ranks of the ring
 *   mask     of the whole sequence: cu_seqlens are positions in the flattened batch, where sequence b begins at b * S,
 *            and sinks are those of all H heads
 *   scale work work_bytes  as in upipe_attn, of every attention call
 *   parts    count of them
 *   k v      this rank's, [batch][S/R][kv_heads][d], [v_dim]; of the whole sequence, rank by rank, where the mode is ALL_GATHER
 *   dk dv    backward: their gradients in f32. P2P: overwritten, space for the rank that holds most tokens
 *            (upipe_buffers.dk, dv). ALL_GATHER, and without a ring: +=
 *   dsinks   backward: f32 [H], +=, the gradients of the sinks of the parts' heads; NULL = not wanted
 *   sums     type of o and dq: f32 with a ring
 */
typedef struct upipe_ring_call {
    const upipe_plan *plan;
    upipe_mask mask;
    float scale;
    void *work;
    size_t work_bytes;
    const upipe_ring_part *parts;
    int count, kv_heads;
    const void *k, *v;
    float *dk, *dv, *dsinks;
    upipe_dtype sums;
} upipe_ring_call;

/* ---- one block of K and V ---- */

/* Query heads j .. of a part that one attention call can take, and the key/value heads that they read: whole groups,
 * or a part of one. Returns 0 after the last. */
UPIPE_API int upi_ring_heads(const upipe_ring_part *part, int group, int j, upipe_span *q, upipe_span *kv)
{
    int left = part->heads - j, in_group = (part->first + j) % group, n = group - in_group;
    if (left <= 0) return 0;
    if (in_group == 0 && left >= group) n = left / group * group;
    *q = upi_span_make(j, n < left ? n : left);
    *kv = upi_span_make((part->first % group + j) / group, n > group ? n / group : 1);
    return 1;
}

/* Some rows and heads of a packed tensor [batch][n][heads][d]. */
UPIPE_API upipe_view upi_ring_view(const void *data, upipe_dtype type, int64_t n, int heads, int d,
                                   int64_t sequence, int64_t row, int64_t rows, upipe_span span)
{
    upipe_view v = upipe_view_packed((void *)(uintptr_t)data, type, n, heads, d);
    size_t at = (size_t)(((sequence * n + row) * heads + span.first) * d) * upipe_dtype_bytes(type);
    v.data = (char *)v.data + at;
    v.n = rows;
    v.h = span.count;
    return v;
}

/* A block of K and V: that of ring rank src. */
typedef struct upi_ring_block {
    const void *k, *v;
    float *dk, *dv;
    int src;
} upi_ring_block;

/* Where a call stands: rows of a sequence, and heads. */
typedef struct upi_ring_at {
    int64_t sequence, q_all, k_all; /* of so many queries and keys in a sequence's buffers ... */
    int64_t q_row, k_row;           /* ... those from here on */
    upipe_piece q, k;
    upipe_span heads, kv;
    int first; /* no call has seen these rows */
    int add;   /* backward: to dq, which is f32 */
} upi_ring_at;

/* Whether any of the queries may see any of the keys. */
UPIPE_API int upi_ring_sees(const upipe_attn *a)
{
    int64_t first, end, other;
    upipe_attn_visible(a, 0, &first, &other);
    upipe_attn_visible(a, a->q.n - 1, &other, &end);
    return first < end;
}

/* tokens: of the whole sequence */
UPIPE_API upipe_status upi_ring_call_one(upipe_ctx *c, const upipe_ring_call *r, const upipe_ring_part *part,
                                         const upi_ring_block *block, const upi_ring_at *at, int64_t tokens,
                                         int backward)
{
    const upipe_plan *p = r->plan;
    const int d = p->desc.head_dim, v_dim = p->desc.v_dim, n = part->heads, kv = r->kv_heads;
    const upipe_dtype type = p->desc.dtype;
    const int64_t b = at->sequence, q0 = at->q_row, k0 = at->k_row;
    const int head = part->first + at->heads.first;
    upipe_attn_grad g;
    upipe_attn *a = &g.a;
    memset(&g, 0, sizeof g);
    a->mask = r->mask;
    a->scale = r->scale;
    a->work = r->work;
    a->work_bytes = r->work_bytes;
    a->q = upi_ring_view(part->q, type, at->q_all, n, d, b, q0, at->q.n, at->heads);
    a->k = upi_ring_view(block->k, type, at->k_all, kv, d, b, k0, at->k.n, at->kv);
    a->v = upi_ring_view(block->v, type, at->k_all, kv, v_dim, b, k0, at->k.n, at->kv);
    a->lse = upi_ring_view(part->lse, UPIPE_F32, at->q_all, n, 1, b, q0, at->q.n, at->heads);
    a->q_pos = b * tokens + at->q.pos;
    a->k_pos = b * tokens + at->k.pos;
    a->pos_step = p->held.step;
    a->mask.sinks = at->first && r->mask.sinks != NULL ? r->mask.sinks + head : NULL;
    if (!at->first && !upi_ring_sees(a)) return UPIPE_OK;
    if (!backward) {
        a->o = upi_ring_view(part->o, r->sums, at->q_all, n, v_dim, b, q0, at->q.n, at->heads);
        a->merge = !at->first;
        return upipe_attn_fwd(c, a);
    }
    a->merge = at->add;
    g.dout = upi_ring_view(part->dout, type, at->q_all, n, v_dim, b, q0, at->q.n, at->heads);
    g.delta = upi_ring_view(part->delta, UPIPE_F32, at->q_all, n, 1, b, q0, at->q.n, at->heads);
    g.dq = upi_ring_view(part->dq, r->sums, at->q_all, n, d, b, q0, at->q.n, at->heads);
    g.dk = upi_ring_view(block->dk, UPIPE_F32, at->k_all, kv, d, b, k0, at->k.n, at->kv);
    g.dv = upi_ring_view(block->dv, UPIPE_F32, at->k_all, kv, v_dim, b, k0, at->k.n, at->kv);
    g.dsinks = a->mask.sinks != NULL && r->dsinks != NULL ? r->dsinks + head : NULL;
    return upipe_attn_bwd(c, &g);
}

/* The query heads at `at` against the pieces of one block. */
UPIPE_API upipe_status upi_ring_pieces(upipe_ctx *c, const upipe_ring_call *r, const upipe_ring_part *part,
                                       const upi_ring_block *block, upi_ring_at *at, int first, int backward)
{
    const upipe_plan *p = r->plan;
    const upipe_shard keys = upipe_shard_ring(p->desc.layout, p->desc.tokens, p->desc.ring, block->src);
    int i, j;
    at->k_all = keys.n;
    for (i = 0, at->q_row = 0; i < p->held.pieces; at->q_row += p->held.piece[i++].n)
        for (j = 0, at->k_row = 0; j < keys.pieces; at->k_row += keys.piece[j++].n) {
            at->q = p->held.piece[i];
            at->k = keys.piece[j];
            at->first = first && j == 0;
            UPIPE_TRY(upi_ring_call_one(c, r, part, block, at, p->desc.tokens, backward));
        }
    return UPIPE_OK;
}

/* All parts against one block; `first`: their rows have seen nothing yet. An element of dK or dV is a chain over heads,
 * and in a head over queries, however heads come in parts: so where queries lie in two pieces, one head at a time is
 * taken over both. */
UPIPE_API upipe_status upi_ring_attend(upipe_ctx *c, const upipe_ring_call *r, const upi_ring_block *block,
                                       int first, int backward)
{
    const upipe_plan *p = r->plan;
    const int alone = backward && p->held.pieces > 1;
    upipe_span heads;
    upi_ring_at at;
    int part, head, j;
    memset(&at, 0, sizeof at);
    at.q_all = p->held.n;
    at.add = p->desc.ring > 1;
    for (part = 0; part < r->count; ++part)
        for (at.sequence = 0; at.sequence < p->desc.batch; ++at.sequence)
            for (head = 0; upi_ring_heads(&r->parts[part], p->group, head, &heads, &at.kv);
                 head += heads.count) {
                const int n = alone ? heads.count : 1, group = heads.count / at.kv.count;
                const upipe_span kv = at.kv;
                for (j = 0; j < n; ++j) {
                    at.heads = alone ? upi_span_make(heads.first + j, 1) : heads;
                    at.kv = alone ? upi_span_make(kv.first + j / group, 1) : kv;
                    UPIPE_TRY(upi_ring_pieces(c, r, &r->parts[part], block, &at, first, backward));
                }
            }
    return UPIPE_OK;
}

/* ---- K and V go round ---- */

enum { UPI_RING_MESSAGES = 16 };

/* One pass round the ring: who this rank is, and the exchange that is being listed. */
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

/* The rank that is so many nodes and places further. */
UPIPE_API int upi_ring_peer(const upi_ring_pass *s, int nodes, int places)
{
    int node = ((s->node + nodes) % s->outer + s->outer) % s->outer;
    return node * s->inner + ((s->place + places) % s->inner + s->inner) % s->inner;
}

/* Elements a head dim of the block of rank src: batch x tokens x heads. */
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

/* Lists the move of K and V from here to rank `to`, and of those of rank src from rank `from` into `buffer`. */
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

/* The same for gradients of the block of rank `src`; what comes is that of rank `next`. */
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

/* sum += g, of the block of rank src */
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

/* Buffers of a pass. K and V: two that go round the inner ring, two for the outer one. Gradients: `grad` holds the
 * caller's and two more; two for sums over nodes. */
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

/* One turn of the inner ring, from the block `start` on, which also goes to the next node if there is a turn
 * after this one. Backward: *grad is the node's gradient of that block, in one of the buffers of `buffer`. */
UPIPE_API upipe_status upi_ring_turn(upi_ring_pass *s, upi_ring_buf *buf, int turn, upi_ring_block *start,
                                     upi_ring_grad *grad, int backward)
{
    upi_ring_block now = *start, next, far;
    upi_ring_grad out = buf->grad[0]; /* of the block before, on its way */
    int i;
    far = next = now;
    for (i = 0; i < s->inner; ++i) {
        /* gradients: one leaves, one comes, one is formed */
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
    /* the last block's gradient goes on to where the block came from */
    *grad = out.k != buf->grad[0].k ? buf->grad[0] : buf->grad[1];
    upi_ring_move_grad(s, out, now.src, upi_ring_peer(s, 0, 1), upi_ring_peer(s, 0, -1),
                       upi_ring_peer(s, -turn, 0), *grad);
    UPIPE_TRY(upi_ring_start(s));
    return upi_ring_wait(s);
}

/* The caller's gradients = g, those of this rank's block. */
UPIPE_API upipe_status upi_ring_own_grad(upi_ring_pass *s, upi_ring_grad g)
{
    const upipe_plan_desc *d = &s->r->plan->desc;
    const size_t rows = (size_t)upi_ring_rows(s->r, d->ring_rank);
    if (g.k == s->r->dk) return UPIPE_OK;
    UPIPE_TRY(s->c->ops->copy(s->c, s->r->dk, g.k, rows * (size_t)d->head_dim * 4));
    return s->c->ops->copy(s->c, s->r->dv, g.v, rows * (size_t)d->v_dim * 4);
}

/* All turns: the inner ring's blocks, then those of the node before, and so on. */
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
        /* with the nodes before added, on to the next one; what comes belongs to the next turn's block */
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

/* ---- public ---- */

/* The plan is this rank's of this ring, whose list has space for as many segments as the plan's ring needs. */
UPIPE_API upipe_status upi_ring_place(upipe_ctx *c, const upipe_plan *p)
{
    const upipe_plan_desc *d = &p->desc;
    if (c->ring != NULL && c->ring->ranks == d->ring && c->ring->rank == d->ring_rank) return UPIPE_OK;
    return upipe_fail(&c->err, UPIPE_ERR_ARG, "a plan for ring rank %d of %d on rank %d of a ring of %d",
                    d->ring_rank, d->ring, c->ring != NULL ? c->ring->rank : 0,
                    c->ring != NULL ? c->ring->ranks : 0);
}

/* The same, and an exchange may start. */
UPIPE_API upipe_status upi_ring_check(upipe_ctx *c, const upipe_plan *p)
{
    UPIPE_TRY(upi_ring_place(c, p));
    return upi_comm_idle(c, c->ring);
}

/* All blocks of the ring, which are here: the own one first, then as they would come round. */
UPIPE_API upipe_status upi_ring_held(upipe_ctx *c, const upipe_ring_call *r, int backward)
{
    const upipe_plan_desc *d = &r->plan->desc;
    const size_t e = upipe_dtype_bytes(d->dtype);
    int i, j;
    for (i = 0; i < d->ring; ++i) {
        upi_ring_block b;
        size_t before = 0;
        memset(&b, 0, sizeof b);
        b.src = (d->ring_rank - i + d->ring) % d->ring;
        for (j = 0; j < b.src; ++j) before += (size_t)upi_ring_rows(r, j);
        b.k = (const char *)r->k + before * (size_t)d->head_dim * e;
        b.v = (const char *)r->v + before * (size_t)d->v_dim * e;
        if (backward) {
            b.dk = r->dk + before * (size_t)d->head_dim;
            b.dv = r->dv + before * (size_t)d->v_dim;
        }
        UPIPE_TRY(upi_ring_attend(c, r, &b, i == 0, backward));
    }
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_ring_run(upipe_ctx *c, const upipe_ring_call *r, int backward)
{
    const upipe_plan_desc *d = &r->plan->desc;
    const int shift = d->ring_mode == UPIPE_RING_P2P;
    upi_ring_pass pass;
    upipe_status s;
    int64_t mark;
    if (d->ring == 1) return upi_ring_held(c, r, backward); /* nobody waits for this rank */
    /* what is gathered for the next round may be on its way */
    UPIPE_TRY(shift ? upi_ring_check(c, r->plan) : upi_ring_place(c, r->plan));
    if (r->sums != UPIPE_F32)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "a ring sums O and dQ in f32, not in %s",
                        upipe_dtype_name(r->sums));
    mark = upipe_mem_mark(c->mem);
    pass = upi_ring_begin(c, r); /* holds the list of an exchange, which a failure ends while it is there */
    s = shift ? upi_ring_shift(&pass, backward) : upi_ring_held(c, r, backward);
    return s == UPIPE_OK ? UPIPE_OK : upipe_unwind(c, s, mark);
}

/* upipe_ring_fwd -- o and lse of every part over the keys of all ranks of the ring
 *   bytes   P2P: takes two blocks of K and V at most (four in a double ring); sends (R - 1) of them
 *   errors  ARG for another ring's plan, sums that are not f32, or an exchange that is under way: nothing
 *           happens. ARG, UNSUPPORTED (a mask that the backend lacks), MEMORY, others as upipe_comm_wait: in
 *           a ring these abort it and the team, and what was taken goes back to the pool
 */
UPIPE_API upipe_status upipe_ring_fwd(upipe_ctx *c, const upipe_ring_call *r)
{
    return upi_ring_run(c, r, 0);
}

/* upipe_ring_bwd -- dq, dk and dv, from go, lse and delta
 *   bytes   P2P: takes as the forward, and two pairs of f32 gradients (four in a double ring); sends R - 1 blocks of
 *           K and V, and R of their gradients (a double ring one more for each node)
 *   errors  as upipe_ring_fwd
 */
UPIPE_API upipe_status upipe_ring_bwd(upipe_ctx *c, const upipe_ring_call *r)
{
    return upi_ring_run(c, r, 1);
}

/* upipe_ring_all_gather_start -- this rank's K and V to all ranks of the ring
 *   all_k all_v  [ring rank][batch][tokens of that rank][kv_heads][d], [v_dim]
 *   k v          this rank's
 *   kv_heads     of this rank, the same on all ranks of the ring
 *   bytes        sends k and v to each of the others
 *   order        complete after upipe_comm_wait(ctx, ctx->ring)
 *   errors       ARG (another ring's plan, or an exchange is under way: nothing happens); others as
 *                upipe_comm_start, and for these ring and team are aborted
 */
UPIPE_API upipe_status upipe_ring_all_gather_start(upipe_ctx *c, const upipe_plan *p, int kv_heads, void *all_k,
                                               void *all_v, const void *k, const void *v)
{
    const upipe_plan_desc *d = &p->desc;
    const size_t e = upipe_dtype_bytes(d->dtype), row_k = (size_t)(d->batch * kv_heads * d->head_dim) * e;
    const size_t row_v = (size_t)(d->batch * kv_heads * d->v_dim) * e, mine = (size_t)p->seq;
    const int64_t mark = upipe_mem_mark(c->mem);
    upipe_comm *ring = c->ring;
    upipe_status s;
    size_t before = 0;
    int r, used = 0;
    UPIPE_TRY(upi_ring_check(c, p));
    for (r = 0; r < d->ring; ++r) {
        size_t n = (size_t)upipe_shard_ring(d->layout, d->tokens, d->ring, r).n;
        upipe_msg_add(ring->list, &used, r, 1, k, mine * row_k, 0, (char *)all_k + before * row_k,
                        n * row_k, 0);
        upipe_msg_add(ring->list, &used, r, 1, v, mine * row_v, 0, (char *)all_v + before * row_v,
                        n * row_v, 0);
        before += n;
    }
    s = upipe_comm_start(c, ring, ring->list, used);
    return s == UPIPE_OK ? UPIPE_OK : upipe_unwind(c, s, mark);
}

/* upipe_ring_reduce_scatter -- the way back: gradients of every rank's block, from all ranks, summed at home in rank order
 *   all     f32 [ring rank][batch][tokens of that rank][kv_heads][d]
 *   sum     f32 [batch][S/R][kv_heads][d], written
 *   buffer    f32 of the size of sum, R times
 *   d       elements of a head
 *   errors  ARG (another ring's plan, or an exchange is under way: nothing happens); others as
 *           upipe_comm_wait, and for these ring and team are aborted
 */
UPIPE_API upipe_status upipe_ring_reduce_scatter(upipe_ctx *c, const upipe_plan *p, int kv_heads, int d, float *sum,
                                         const float *all, float *buf)
{
    const upipe_plan_desc *desc = &p->desc;
    const size_t row = (size_t)(desc->batch * kv_heads * d), mine = (size_t)p->seq * row;
    const int64_t mark = upipe_mem_mark(c->mem);
    upipe_comm *ring = c->ring;
    upipe_status s;
    size_t before = 0;
    int r, used = 0;
    UPIPE_TRY(upi_ring_check(c, p));
    for (r = 0; r < desc->ring; ++r) {
        size_t n = (size_t)upipe_shard_ring(desc->layout, desc->tokens, desc->ring, r).n;
        upipe_msg_add(ring->list, &used, r, 1, all + before * row, n * row * 4, 0, buf + (size_t)r * mine,
                        mine * 4, 0);
        before += n;
    }
    s = upipe_comm_start(c, ring, ring->list, used);
    if (s == UPIPE_OK) s = upipe_comm_wait(c, ring);
    if (s == UPIPE_OK)
        s = c->ops->sum(c, upipe_view_packed(sum, UPIPE_F32, p->seq * desc->batch * kv_heads, 1, d), buf,
                        (int64_t)mine, desc->ring, 0);
    return s == UPIPE_OK ? UPIPE_OK : upipe_unwind(c, s, mark);
}

#endif

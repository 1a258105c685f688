/* upipe_ring.h -- attention over a ring of ranks that share the sequence        layer 5
 *
 * Every rank keeps its queries. Keys and values reach them in one of two ways:
 *
 *     P2P         K and V are sent round, r -> r + 1, while the block on the rank is attended to. Gradients
 *                 of K and V follow one step behind in f32, and are back on their own rank after R sends. In
 *                 a double ring K and V are sent round within a node. The first block of a turn is also sent
 *                 to the next node, in the transfer of the first step, and begins the next turn there
 *     ALL_GATHER  every rank receives all K and V of a round, and holds them: upipe_ring_all_gather_start,
 *                 upipe_ring_reduce_scatter
 *
 * The plan's layout says which rank holds which tokens. The mask is a statement about positions, so one code
 * serves contiguous, zigzag and striped rings, and pairs of blocks that do not see each other cost nothing. O
 * and dQ are summed in f32. With one rank in the ring the same calls are plain attention.
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
 *   q dout     [batch][S/R][heads][d], [v_dim] in the storage type
 *   o dq       [batch][S/R][heads][v_dim], [d] of the type call.sums. A dq that is added to must be zero before the call
 *   lse delta  f32 [batch][S/R][heads]
 *   first      the first of these heads, counted over all H. K and V of the call begin with the key/value
 *              head of its group: head j reads head (first % G + j) / G of them
 */
typedef struct upipe_ring_part {
    const void *q, *dout;
    void *o, *dq;
    float *lse, *delta;
    int heads, first;
} upipe_ring_part;

/* upipe_ring_call
 *   plan     sizes, layout and ranks of the ring
 *   mask     of the whole sequence: cu_seqlens are positions in the flattened batch, where sequence b begins
 *            at b * S, and sinks are those of all H heads
 *   scale work work_bytes  as in upipe_attn, of every attention call
 *   parts    count of them
 *   k v      this rank's, [batch][S/R][kv_heads][d], [v_dim]. ALL_GATHER: those of the whole sequence, rank
 *            by rank
 *   dk dv    backward: their gradients in f32. P2P: overwritten, space for the rank with the most tokens
 *            (upipe_buffers.dk, dv). ALL_GATHER, and without a ring: +=
 *   dsinks   backward: f32 [H], +=, the gradients of the sinks of the parts' heads; NULL = not wanted
 *   sums     type of o and dq: f32 with a ring; without one the plan's, or f32 for a dq that is added to
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

/* Query heads j .. of a part that one attention call can serve, and the key/value heads that they read: whole
 * groups, or a part of one. Returns 0 after the last. */
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

/* Which rows of a sequence, and which heads, an attention call reads. */
typedef struct upi_ring_at {
    int64_t sequence, q_all, k_all; /* queries and keys of a sequence in the buffers */
    int64_t q_row, k_row;           /* the first of them for this call */
    upipe_piece q, k;
    upipe_span heads, kv;
    int first; /* no earlier call has seen these rows */
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

/* The largest scratch of the attention calls of a rank's stage, as upi_ring_call_one makes them.
 *   merge   1: a row attends its keys in several calls, as in a ring and in segments. The first one of the
 *           forward does not merge
 */
UPIPE_API size_t upi_ring_scratch(const upipe_ops *ops, const upipe_plan *p, const upipe_mask *mask,
                                  float scale, int stage, int merge, int backward)
{
    const upipe_span mine = upipe_plan_q(p, stage, p->desc.rank);
    const int64_t keys = upipe_plan_seq_most(p);
    const upipe_dtype type = p->desc.dtype;
    upipe_ring_part part;
    upipe_attn a;
    upipe_span q, kv;
    size_t most = 0;
    int head;
    float none[1]; /* only shapes are asked for, but a null pointer must not be offset */
    memset(&a, 0, sizeof a);
    memset(&part, 0, sizeof part);
    a.mask = *mask;
    a.scale = scale;
    part.heads = mine.count;
    part.first = mine.first;
    for (head = 0; upi_ring_heads(&part, p->group, head, &q, &kv); head += q.count) {
        a.q = upipe_view_packed(none, type, p->seq, q.count, p->desc.head_dim);
        a.k = upipe_view_packed(none, type, keys, kv.count, p->desc.head_dim);
        a.v = upipe_view_packed(none, type, keys, kv.count, p->desc.v_dim);
        a.o = upipe_view_packed(none, merge ? UPIPE_F32 : type, p->seq, q.count, p->desc.v_dim);
        a.lse = upipe_view_packed(none, UPIPE_F32, p->seq, q.count, 1);
        for (a.merge = merge && backward; a.merge <= merge; ++a.merge)
            most = upipe_max_bytes(most, ops->attn_bytes(ops, &a, backward));
    }
    return most;
}

/* All parts against one block. first: their rows have seen no keys yet. An element of dK or dV is one chain
 * of sums over heads, and within a head over queries, whichever parts the heads come in. So where queries lie
 * in two pieces, each head is done over both pieces before the next one. */
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
    at.add = p->desc.ring > 1 || (backward && r->sums != p->desc.dtype);
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

#include "ring/p2p.h"

/* ---- public ---- */

/* The plan is that of this rank of this ring. */
UPIPE_API upipe_status upi_ring_place(upipe_ctx *c, const upipe_plan *p)
{
    const upipe_plan_desc *d = &p->desc;
    if (c->ring != NULL && c->ring->ranks == d->ring && c->ring->rank == d->ring_rank) return UPIPE_OK;
    return upipe_fail(&c->err, UPIPE_ERR_ARG, "a plan for ring rank %d of %d on rank %d of a ring of %d",
                      d->ring_rank, d->ring, c->ring != NULL ? c->ring->rank : 0,
                      c->ring != NULL ? c->ring->ranks : 0);
}

/* The same, and no transfer is in progress. */
UPIPE_API upipe_status upi_ring_check(upipe_ctx *c, const upipe_plan *p)
{
    UPIPE_TRY(upi_ring_place(c, p));
    return upi_comm_idle(c, c->ring);
}

/* The blocks of all ranks are held: this rank's own first, then the others in the order of a P2P ring. */
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
    if (d->ring == 1) return upi_ring_held(c, r, backward); /* no other rank waits for this one */
    /* with an all-gather, the transfer of the next round may be in progress */
    UPIPE_TRY(shift ? upi_ring_check(c, r->plan) : upi_ring_place(c, r->plan));
    if (r->sums != UPIPE_F32)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "a ring sums O and dQ in f32, not in %s",
                          upipe_dtype_name(r->sums));
    mark = upipe_mem_mark(c->mem);
    pass = upi_ring_begin(c, r); /* holds the message list: it must outlive upipe_unwind */
    s = shift ? upi_ring_shift(&pass, backward) : upi_ring_held(c, r, backward);
    return s == UPIPE_OK ? UPIPE_OK : upipe_unwind(c, s, mark);
}

/* upipe_ring_fwd -- o and lse of every part over the keys of all ranks of the ring
 *   bytes   P2P: allocates two blocks of K and V at most (four in a double ring); sends R - 1 of them
 *   errors  ARG for another ring's plan, sums that are not f32, or a transfer in progress: nothing happens.
 *           ARG, UNSUPPORTED (a mask that the backend lacks), MEMORY, others as upipe_comm_wait: with a ring
 *           these abort ring and team, and the pool is as before
 */
UPIPE_API upipe_status upipe_ring_fwd(upipe_ctx *c, const upipe_ring_call *r)
{
    return upi_ring_run(c, r, 0);
}

/* upipe_ring_bwd -- dq, dk and dv, from dout, lse and delta
 *   bytes   P2P: allocates as the forward, and two pairs of f32 gradients (four in a double ring); sends
 *           R - 1 blocks of K and V, and R of their gradients (a double ring one more for each node)
 *   errors  as upipe_ring_fwd
 */
UPIPE_API upipe_status upipe_ring_bwd(upipe_ctx *c, const upipe_ring_call *r)
{
    return upi_ring_run(c, r, 1);
}

/* upipe_ring_all_gather_start -- begins the all-gather of K and V over the ring
 *   all_k all_v  [ring rank][batch][tokens of that rank][kv_heads][d], [v_dim]
 *   k v          this rank's
 *   kv_heads     of this rank, the same on all ranks of the ring
 *   bytes        sends k and v to each of the others
 *   order        complete after upipe_comm_wait(ctx, ctx->ring)
 *   errors       ARG (another ring's plan, or a transfer in progress: nothing happens); others as
 *                upipe_comm_start, and for these ring and team are aborted
 */
UPIPE_API upipe_status upipe_ring_all_gather_start(upipe_ctx *c, const upipe_plan *p, int kv_heads,
                                                   void *all_k, void *all_v, const void *k, const void *v)
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
        upipe_msg_add(ring->list, &used, r, 1, k, mine * row_k, 0, (char *)all_k + before * row_k, n * row_k,
                      0);
        upipe_msg_add(ring->list, &used, r, 1, v, mine * row_v, 0, (char *)all_v + before * row_v, n * row_v,
                      0);
        before += n;
    }
    s = upipe_comm_start(c, ring, ring->list, used);
    return s == UPIPE_OK ? UPIPE_OK : upipe_unwind(c, s, mark);
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

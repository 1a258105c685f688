/* upipe_ring.h -- attention with blocks of keys and values, of this rank and of the others in its ring
 *
 * Every rank keeps its queries. Keys and values reach them in one of three ways, each a loop around the same
 * call, upipe_attend_fwd or _bwd, in a file of its own:
 *
 *     ring/p2p.h         K and V are sent round, r -> r + 1, while the block on the rank is attended. Gradients of K
 *                        and V follow one step behind in f32, and are back on their own rank after R sends
 *     ring/double.h      the same within each node; the first block of a turn is also sent to the next node
 *     ring/all_gather.h  every rank receives all K and V of a round first: upi_ring_all_gather_start,
 *                        upi_ring_reduce_scatter
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

#include "upipe_a2a.h"
#include "upipe_attn.h"

/* ---- attention with one block of keys and values ---- */

/* What a stage attends is more than one attention call can take: several sequences of a batch, heads of several
 * groups, and tokens in two pieces (zigzag). A call here walks them, and ends in upipe_attn_fwd or upipe_attn_bwd.
 * A ring, or a host with a transport of its own, calls it once for each block of keys and values:
 *
 *     upipe_attend a = {&plan, mask, scale, work, work_bytes, plan.team_shard, plan.desc.tokens, ...};
 *     upipe_kv_block block = {plan.team_shard, k, v};
 *     upipe_attend_fwd(&ctx, &a, &block, 1);          o, lse: the first block that these queries attend
 *     upipe_attend_fwd(&ctx, &a, &other, 0);          merged into o, which is f32 then
 *
 * The mask is a statement about positions. Pairs of pieces that do not see each other cost nothing.
 */

/* upipe_attend -- the query heads of `stages` stages, which read the same keys and values
 *   plan       head dims, storage type, batch and group
 *   mask       of the whole sequence: cu_seqlens are positions in the flattened batch, where sequence b begins at
 *              b * tokens, and sinks are those of all H heads
 *   scale work work_bytes  as in upipe_attn, of every attention call
 *   rows       positions of the queries, in a sequence of `tokens`
 *   heads      of a stage;  first: the first of them, counted over all H. Those of the next stage follow
 *   kv_heads   of k and v, which begin with the key/value head of the group of `first`
 *   q          [batch][rows][heads][d]; that of the next stage begins q_stride bytes behind
 *   dout       [stages][batch][rows][heads][v_dim] in the storage type
 *   o dq       [stages][batch][rows][heads][v_dim], [d] of type `sums`: the storage type, or f32 where results of
 *              several blocks are merged. A dq that is added to must be zero before the first block. The
 *              backward's o is that of the forward in the storage type; NULL unless upipe_ops.attn_reads_o
 *   lse delta  f32 [stages][batch][rows][heads]
 *   dsinks     f32 [H], +=, the gradients of the sinks of these heads; NULL = not wanted
 *   merge_dq   nonzero: dq is f32 and +=
 */
typedef struct upipe_attend {
    const upipe_plan *plan;
    upipe_mask mask;
    float scale;
    void *work;
    size_t work_bytes;
    upipe_shard rows;
    int64_t tokens;
    int stages, heads, first, kv_heads;
    const void *q, *dout;
    size_t q_stride;
    void *o, *dq;
    float *lse, *delta, *dsinks;
    upipe_dtype sums;
    int merge_dq;
} upipe_attend;

/* upipe_kv_block -- keys and values that queries attend
 *   rows   their positions
 *   k v    [batch][rows][kv_heads][d], [v_dim] in the storage type
 *   dk dv  backward: f32, +=
 */
typedef struct upipe_kv_block {
    upipe_shard rows;
    const void *k, *v;
    float *dk, *dv;
} upipe_kv_block;

/* One attention call of the walk: sequence, heads and pieces. */
typedef struct upi_attend_call {
    upipe_mem_tiles sequence;          /* its row: which one of the batch */
    int stage, head, q_piece, k_piece; /* head: the first of the stage's */
    int64_t q_row, k_row;              /* of a sequence, in the buffers */
    upipe_head_range heads, kv;        /* heads.count = 0 before the first call */
} upi_attend_call;

/* The next attention call; 0 after the last. A call has whole groups of heads, or a part of one.
 *   m        the pool, whether it is a dry one
 *   single   one head a call */
UPIPE_API int upi_attend_next(upipe_mem *m, const upipe_attend *a, const upipe_kv_block *block,
                              upi_attend_call *at, int single)
{
    const int group = a->plan->group;
    int in_group, count;
    if (at->heads.count > 0) {
        at->k_row += block->rows.piece[at->k_piece].n;
        if (++at->k_piece < block->rows.pieces) return 1;
        at->q_row += a->rows.piece[at->q_piece].n;
        at->k_piece = 0;
        at->k_row = 0;
        if (++at->q_piece < a->rows.pieces) return 1;
        at->q_piece = 0;
        at->q_row = 0;
        at->head += at->heads.count;
        if (at->head == a->heads) {
            at->head = 0;
            if (++at->stage == a->stages) at->stage = at->heads.count = 0;
        }
    }
    if (a->stages == 0 || a->heads == 0 || a->rows.n == 0 || block->rows.n == 0) return 0;
    /* where the sequences of a batch differ a dry run goes through each */
    if (at->heads.count == 0 && !upipe_mem_tiles_next(upi_mask_reads_positions(&a->mask) ? NULL : m,
                                                      &at->sequence, a->plan->desc.batch, 1))
        return 0;
    in_group = (a->first % group + at->head) % group;
    count = group - in_group;
    if (in_group == 0 && a->heads - at->head >= group) count = (a->heads - at->head) / group * group;
    if (count > a->heads - at->head) count = a->heads - at->head;
    if (single) count = 1;
    at->heads = upi_head_range_make(at->head, count);
    at->kv = upi_head_range_make((a->first % group + at->head) / group, count > group ? count / group : 1);
    return 1;
}

/* Some rows and heads of sequence b of a packed tensor [stage][batch][all][heads][d]. */
UPIPE_API upipe_view upi_attend_view(const void *data, upipe_dtype type, int64_t sequence, int64_t all,
                                     int heads, int d, int64_t row, int64_t rows, upipe_head_range range)
{
    upipe_view v = upipe_view_packed((void *)(uintptr_t)data, type, rows, heads, d);
    v.data = upipe_view_at(v, sequence * all + row, range.first);
    v.h = range.count;
    return v;
}

/* The arguments that forward and backward share. Only the first call of a row adds the sinks. */
UPIPE_API void upi_attend_args(upipe_attn *out, const upipe_attend *a, const upipe_kv_block *block,
                               const upi_attend_call *at, int first)
{
    const upipe_plan_desc *d = &a->plan->desc;
    const upipe_piece *q = &a->rows.piece[at->q_piece], *k = &block->rows.piece[at->k_piece];
    const int64_t b = at->sequence.row, statistics = at->stage * d->batch + b;
    memset(out, 0, sizeof *out);
    out->mask = a->mask;
    if (!first || a->mask.sinks == NULL)
        out->mask.sinks = NULL;
    else
        out->mask.sinks += a->first + at->stage * a->heads + at->heads.first;
    out->scale = a->scale;
    out->work = a->work;
    out->work_bytes = a->work_bytes;
    out->q = upi_attend_view((const char *)a->q + (size_t)at->stage * a->q_stride, d->dtype, b, a->rows.n,
                             a->heads, d->head_dim, at->q_row, q->n, at->heads);
    out->k = upi_attend_view(block->k, d->dtype, b, block->rows.n, a->kv_heads, d->head_dim, at->k_row, k->n,
                             at->kv);
    out->v =
        upi_attend_view(block->v, d->dtype, b, block->rows.n, a->kv_heads, d->v_dim, at->k_row, k->n, at->kv);
    out->lse =
        upi_attend_view(a->lse, UPIPE_F32, statistics, a->rows.n, a->heads, 1, at->q_row, q->n, at->heads);
    out->q_pos = b * a->tokens + q->pos;
    out->k_pos = b * a->tokens + k->pos;
    out->pos_step = a->rows.step;
}

/* upipe_attend_fwd -- o and lse of the queries over the keys of a block
 *   first   nonzero: they have attended no keys yet. Otherwise o is f32, and the results are merged
 *   errors  as upipe_attn_fwd
 *   order   enqueued on ctx->stream
 */
UPIPE_API upipe_status upipe_attend_fwd(upipe_ctx *c, const upipe_attend *a, const upipe_kv_block *block,
                                        int first)
{
    const upipe_plan_desc *d = a != NULL && a->plan != NULL ? &a->plan->desc : NULL;
    upi_attend_call at;
    upipe_attn call;
    if (d == NULL || block == NULL)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "attend: plan or block is NULL");
    memset(&at, 0, sizeof at);
    while (upi_attend_next(c->mem, a, block, &at, 0)) {
        const int fresh = first && at.k_piece == 0;
        upi_attend_args(&call, a, block, &at, fresh);
        if (!fresh && !upi_attn_sees(&call)) continue;
        call.o = upi_attend_view(a->o, a->sums, at.stage * d->batch + at.sequence.row, a->rows.n, a->heads,
                                 d->v_dim, at.q_row, call.q.n, at.heads);
        call.merge = !fresh;
        UPIPE_TRY(upipe_attn_fwd(c, &call));
    }
    return UPIPE_OK;
}

/* upipe_attend_bwd -- dq, and the block's dk and dv, which are added to; from dout, lse and delta, and perhaps o
 *   first, errors, order  as upipe_attend_fwd
 *
 * An element of dK or dV is one chain of sums over heads, and within a head over queries, however heads are shared
 * out to calls. So where queries lie in two pieces, each head is done over both pieces before the next one.
 */
UPIPE_API upipe_status upipe_attend_bwd(upipe_ctx *c, const upipe_attend *a, const upipe_kv_block *block,
                                        int first)
{
    const upipe_plan_desc *d = a != NULL && a->plan != NULL ? &a->plan->desc : NULL;
    upi_attend_call at;
    upipe_attn_grad g;
    if (d == NULL || block == NULL)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "attend: plan or block is NULL");
    memset(&at, 0, sizeof at);
    memset(&g, 0, sizeof g);
    while (upi_attend_next(c->mem, a, block, &at, a->rows.pieces > 1)) {
        const int fresh = first && at.k_piece == 0;
        const int64_t b = at.stage * d->batch + at.sequence.row, keys = block->rows.n;
        upi_attend_args(&g.a, a, block, &at, fresh);
        if (!fresh && !upi_attn_sees(&g.a)) continue;
        g.a.merge = a->merge_dq;
        g.dout =
            upi_attend_view(a->dout, d->dtype, b, a->rows.n, a->heads, d->v_dim, at.q_row, g.a.q.n, at.heads);
        if (a->o != NULL)
            g.a.o = upi_attend_view(a->o, d->dtype, b, a->rows.n, a->heads, d->v_dim, at.q_row, g.a.q.n,
                                    at.heads);
        g.delta =
            upi_attend_view(a->delta, UPIPE_F32, b, a->rows.n, a->heads, 1, at.q_row, g.a.q.n, at.heads);
        g.dq =
            upi_attend_view(a->dq, a->sums, b, a->rows.n, a->heads, d->head_dim, at.q_row, g.a.q.n, at.heads);
        g.dk = upi_attend_view(block->dk, UPIPE_F32, at.sequence.row, keys, a->kv_heads, d->head_dim,
                               at.k_row, g.a.k.n, at.kv);
        g.dv = upi_attend_view(block->dv, UPIPE_F32, at.sequence.row, keys, a->kv_heads, d->v_dim, at.k_row,
                               g.a.k.n, at.kv);
        g.dsinks = NULL;
        if (g.a.mask.sinks != NULL && a->dsinks != NULL)
            g.dsinks = a->dsinks + (g.a.mask.sinks - a->mask.sinks);
        UPIPE_TRY(upipe_attn_bwd(c, &g));
    }
    return UPIPE_OK;
}

/* upipe_attend_bytes -- the largest scratch of the attention calls of this rank's stage
 *   merge     1: a row attends its keys in several calls, as in a ring and in segments. The first one of the
 *             forward does not merge
 *   backward  0: of the forward's calls; 1: of the backward's
 */
UPIPE_API size_t upipe_attend_bytes(const upipe_ops *ops, const upipe_plan *p, const upipe_mask *mask,
                                    float scale, int stage, int merge, int backward)
{
    const upipe_head_range mine = upipe_plan_q(p, stage, p->desc.rank);
    const upipe_dtype type = p->desc.dtype;
    float none[1]; /* only shapes are asked for, but a null pointer must not be offset */
    upipe_attend a;
    upipe_kv_block block;
    upi_attend_call at;
    upipe_attn call;
    size_t most = 0;
    memset(&a, 0, sizeof a);
    memset(&block, 0, sizeof block);
    memset(&at, 0, sizeof at);
    memset(&call, 0, sizeof call);
    a.plan = p;
    a.heads = mine.count;
    a.first = mine.first;
    a.stages = 1;
    a.rows.n = a.rows.piece[0].n = a.rows.pieces = 1; /* one call for each run of heads */
    block.rows = a.rows;
    call.mask = *mask;
    call.scale = scale;
    while (upi_attend_next(NULL, &a, &block, &at, 0) && at.sequence.row == 0) {
        call.q = upipe_view_packed(none, type, p->team_tokens, at.heads.count, p->desc.head_dim);
        call.k = upipe_view_packed(none, type, p->team_tokens_most, at.kv.count, p->desc.head_dim);
        call.v = upipe_view_packed(none, type, p->team_tokens_most, at.kv.count, p->desc.v_dim);
        call.o =
            upipe_view_packed(none, merge ? UPIPE_F32 : type, p->team_tokens, at.heads.count, p->desc.v_dim);
        call.lse = upipe_view_packed(none, UPIPE_F32, p->team_tokens, at.heads.count, 1);
        for (call.merge = merge && backward; call.merge <= merge; ++call.merge)
            most = upipe_max_bytes(most, ops->attn_bytes(ops, &call, backward));
    }
    return most;
}

/* ---- rings: a block of K and V is sent no further than there is a query that sees it ---- */

/* upipe_ring_sees -- whether queries of ring rank `to` may see keys of ring rank `block`. The answer is the same on every
 *                    rank, and never no where one sees: of striped tokens it is also yes for a window that is narrower than
 *                    the ring */
UPIPE_API int upipe_ring_sees(const upipe_plan_desc *d, const upipe_mask *mask, int to, int block)
{
    const upipe_shard q = upipe_shard_ring(d->layout, d->tokens, d->ring, to),
                      k = upipe_shard_ring(d->layout, d->tokens, d->ring, block);
    const int64_t sequences = upi_mask_reads_positions(mask) ? d->batch : 1; /* else all see the same */
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
                if (a.q.n > 0 && upi_attn_sees(&a)) return 1;
            }
    return 0;
}

/* upi_ring_needed -- whether a block goes on to the rank that is `step` places ahead of `place`, among the ranks
 *                    [first, first + size): that one or one behind it may see it */
UPIPE_API int upi_ring_needed(const upipe_plan_desc *d, const upipe_mask *mask, int block, int first,
                              int size, int place, int step)
{
    for (; step < size; ++step)
        if (upipe_ring_sees(d, mask, first + (place + step) % size, block)) return 1;
    return 0;
}

/* upi_ring_needed_by_node -- the same of the node that is `turn` nodes ahead of the block's own */
UPIPE_API int upi_ring_needed_by_node(const upipe_plan_desc *d, const upipe_mask *mask, int block, int turn)
{
    const int inner = d->ring_inner, nodes = d->ring / inner;
    for (; turn < nodes; ++turn)
        if (upi_ring_needed(d, mask, block, (block / inner + turn) % nodes * inner, inner, 0, 0)) return 1;
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
            if (grads || upi_ring_needed(d, mask, from + start, node * inner, inner, start, i + 1))
                sum += upipe_shard_ring(d->layout, d->tokens, d->ring, from + start).n;
        }
        if (outer > 1 && (grads || upi_ring_needed_by_node(d, mask, from + place, o + 1)))
            sum += upipe_shard_ring(d->layout, d->tokens, d->ring, from + place).n;
    }
    return sum;
}

/* upipe_ring_sent -- bytes that this rank sends to its ring
 *   mask      that of the calls. K and V that no query further on sees are not sent; gradients always go back
 *   backward  0: K, V.  1: K, V again, and their gradients in f32
 */
UPIPE_API int64_t upipe_ring_sent(const upipe_plan *p, const upipe_mask *mask, int backward)
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

#include "ring/message.h"
#include "ring/p2p.h"
#include "ring/double.h"
#include "ring/all_gather.h"

/* ---- a ring ---- */

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
 *           where the mask hides them from all ranks further on (upipe_ring_sent)
 *   errors  ARG for another ring's plan, sums that are not f32, or a transfer in progress: nothing happens.
 *           ARG, UNSUPPORTED (a mask that the backend lacks), MEMORY, others as upipe_comm_wait: these abort ring and
 *           team, and the pool is as before
 */
UPIPE_API upipe_status upipe_ring_fwd(upipe_ctx *c, const upipe_attend *a, const upipe_kv_block *own)
{
    const int64_t mark = upipe_mem_mark(c->mem);
    upipe_status s;
    upi_ring r; /* holds the message list: it outlives upi_unwind */
    UPIPE_TRY(upi_ring_begin(c, &r, a, own));
    s = a->plan->kv_gathered  ? upi_all_gather_fwd(c, &r, own)
        : r.d->ring_inner > 1 ? upi_double_fwd(c, &r, own)
                              : upi_p2p_fwd(c, &r, own);
    if (s == UPIPE_OK) upipe_mem_rewind(c->mem, mark); /* its buffers */
    return s == UPIPE_OK ? UPIPE_OK : upi_unwind(c, s, mark, NULL);
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
    return s == UPIPE_OK ? UPIPE_OK : upi_unwind(c, s, mark, NULL);
}

/* upi_ring_all_gather_start -- begins the all-gather of K and V over the ring
 *   all_k all_v  [ring rank][batch][tokens of that rank][kv_heads][d], [v_dim]
 *   k v          this rank's
 *   kv_heads     of this rank, the same on all ranks of the ring
 *   mask         that of the attention: a block that a rank's queries do not see is not sent there, and not written
 *   bytes        sends k and v to each of the others that see them
 *   order        complete after upipe_comm_wait(ctx, ctx->ring)
 *   errors       ARG (another ring's plan, or a transfer in progress: nothing happens); others as
 *                upipe_comm_start, and for these ring and team are aborted
 */
UPIPE_API upipe_status upi_ring_all_gather_start(upipe_ctx *c, const upipe_plan *p, const upipe_mask *mask,
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
    return s == UPIPE_OK ? UPIPE_OK : upi_unwind(c, s, mark, NULL);
}

/* upi_ring_reduce_scatter -- gradients of K or V of every rank's block, summed in rank order on that rank
 *   all       f32 [ring rank][batch][tokens of that rank][kv_heads][d]
 *   sum       f32 [batch][S/R][kv_heads][d], written
 *   buf       f32, R times the size of sum: scratch
 *   kv_heads  of this rank, the same on all ranks of the ring
 *   d         elements of a head
 *   errors    ARG (another ring's plan, or a transfer in progress: nothing happens); others as
 *             upipe_comm_wait, and for these ring and team are aborted
 */
UPIPE_API upipe_status upi_ring_reduce_scatter(upipe_ctx *c, const upipe_plan *p, int kv_heads, int d,
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
    return s == UPIPE_OK ? UPIPE_OK : upi_unwind(c, s, mark, NULL);
}

#endif

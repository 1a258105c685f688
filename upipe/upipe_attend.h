/* upipe_attend.h -- attention of a rank's query heads with one block of keys and values        layer 3
 *
 * What a stage attends is more than one attention call can take: several sequences of a batch, heads of several
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
#ifndef UPIPE_ATTEND_H
#define UPIPE_ATTEND_H

#include "upipe_attn.h"
#include "upipe_mem.h"
#include "upipe_schedule.h"

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
    upipe_tiles sequence;              /* its row: which one of the batch */
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
    if (at->heads.count == 0 && !upipe_tiles_next(upipe_mask_reads_positions(&a->mask) ? NULL : m,
                                                  &at->sequence, a->plan->desc.batch, 1))
        return 0;
    in_group = (a->first % group + at->head) % group;
    count = group - in_group;
    if (in_group == 0 && a->heads - at->head >= group) count = (a->heads - at->head) / group * group;
    if (count > a->heads - at->head) count = a->heads - at->head;
    if (single) count = 1;
    at->heads = upipe_head_range_make(at->head, count);
    at->kv = upipe_head_range_make((a->first % group + at->head) / group, count > group ? count / group : 1);
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
        if (!fresh && !upipe_attn_sees(&call)) continue;
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
        if (!fresh && !upipe_attn_sees(&g.a)) continue;
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

#endif

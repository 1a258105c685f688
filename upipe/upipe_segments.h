/* upipe_segments.h -- segments of the sequence: plans, positions, and slots in the host's memory        layer 7
 *
 *     upipe_fpdt f = {layer, desc, segments, host};
 *     upipe_fpdt_plan(&f, i, &plan, &err);               of segment i
 *     upipe_shard rows = upipe_fpdt_shard(&f, i);        this rank's tokens of it
 *     upipe_fpdt_scatter(&ctx, &f, dout, src, dtype);    heads in natural order -> slots
 */
#ifndef UPIPE_SEGMENTS_H
#define UPIPE_SEGMENTS_H

#include "fpdt/types.h"

/* upipe_fpdt_plan -- the plan of segment i, which begins at token upipe_cut(S, segments, i)
 *   errors  as upipe_plan_init, of the segment's numbers; ARG for fewer tokens than ranks in a segment, or no
 *           such segment; UNSUPPORTED for a ring, the naive order, several stages of uneven heads, and too many
 *           segments
 */
UPIPE_API upipe_status upipe_fpdt_plan(const upipe_fpdt *f, int i, upipe_plan *p, upipe_err *e)
{
    const int ranks = f != NULL && f->desc.ranks > 0 ? f->desc.ranks : 1;
    upipe_plan_desc d;
    if (f == NULL) return upipe_fail(e, UPIPE_ERR_ARG, "the segments are NULL");
    d = f->desc;
    if (f->segments < 1 || d.tokens / f->segments < ranks)
        return upipe_fail(e, UPIPE_ERR_ARG,
                          "%lld tokens in %d segments over %d ranks: a segment needs a token for each rank",
                          (long long)d.tokens, f->segments, ranks);
    if (f->segments > UPIPE_SEGMENTS_MAX)
        return upipe_fail(e, UPIPE_ERR_UNSUPPORTED, "%d segments, at most %d", f->segments,
                          UPIPE_SEGMENTS_MAX);
    if (i < 0 || i >= f->segments) return upipe_fail(e, UPIPE_ERR_ARG, "segment %d of %d", i, f->segments);
    if (d.ring > 1 || d.naive)
        return upipe_fail(e, UPIPE_ERR_UNSUPPORTED, "segments with %s",
                          d.ring > 1 ? "a ring" : "the naive order");
    d.overlap = 0; /* of stages: segments overlap instead */
    d.tokens = upipe_cut(f->desc.tokens, f->segments, i + 1) - upipe_cut(f->desc.tokens, f->segments, i);
    UPIPE_TRY(upipe_plan_init(p, &d, e));
    if (!p->kv_rounds_shared && p->stages > 1)
        return upipe_fail(e, UPIPE_ERR_UNSUPPORTED,
                          "segments in %d stages of %d/%d heads over %d ranks, which have no common rounds",
                          p->stages, d.heads, d.kv_heads, d.ranks);
    return UPIPE_OK;
}

/* upipe_fpdt_shard -- this rank's tokens of segment i: positions in the sequence */
UPIPE_API upipe_shard upipe_fpdt_shard(const upipe_fpdt *f, int i)
{
    const int64_t first = upipe_cut(f->desc.tokens, f->segments, i);
    const upipe_shard all = upipe_shard_range(first, upipe_cut(f->desc.tokens, f->segments, i + 1) - first);
    return upipe_shard_team(&all, f->desc.ranks > 0 ? f->desc.ranks : 1, f->desc.rank);
}

/* ---- slots in the host's memory ---- */

/* The buffers of the largest segment; zeros for what upipe_fpdt_plan refuses. */
UPIPE_API upipe_buffers upi_fpdt_buffers(const upipe_fpdt *f, upipe_plan *last)
{
    upipe_buffers b;
    upipe_plan first;
    upipe_err e;
    memset(&b, 0, sizeof b);
    memset(last, 0, sizeof *last);
    if (upipe_fpdt_plan(f, 0, &first, &e) != UPIPE_OK ||
        upipe_fpdt_plan(f, f->segments - 1, last, &e) != UPIPE_OK)
        return b;
    return upipe_buffers_max(first.buffers, last->buffers);
}

/* upipe_fpdt_out_bytes -- bytes of save->out, and of its gradient; 0 for what upipe_fpdt_plan refuses */
UPIPE_API size_t upipe_fpdt_out_bytes(const upipe_fpdt *f)
{
    upipe_plan p;
    const upipe_buffers b = upi_fpdt_buffers(f, &p);
    return f != NULL ? b.slot * (size_t)p.stages * (size_t)f->segments : 0;
}

/* upipe_fpdt_delta_bytes -- bytes of save->delta; 0 for what upipe_fpdt_plan refuses */
UPIPE_API size_t upipe_fpdt_delta_bytes(const upipe_fpdt *f)
{
    upipe_plan p;
    return f != NULL ? upi_fpdt_buffers(f, &p).delta * (size_t)f->segments : 0;
}

UPIPE_API upipe_status upi_fpdt_reorder(upipe_ctx *c, const upipe_fpdt *f, void *slots, void *natural,
                                        upipe_dtype type, int to_slots)
{
    const size_t segment = upipe_fpdt_out_bytes(f) / (size_t)(f != NULL && f->segments > 0 ? f->segments : 1);
    char *at = (char *)natural;
    upipe_plan p;
    int i, stage, rank;
    if (slots == NULL || natural == NULL)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "%s NULL",
                          slots == NULL ? "the slots are" : "the heads are");
    UPIPE_TRY(upipe_fpdt_plan(f, 0, &p, &c->err));
    for (i = 0; i < f->segments; ++i) {
        const int32_t dim = p.desc.v_dim, width = p.desc.heads * dim;
        upipe_slots s;
        UPIPE_TRY(upipe_fpdt_plan(f, i, &p, &c->err));
        upipe_slots_init(&s, (char *)slots + (size_t)i * segment, segment / (size_t)p.stages, p.stages,
                         UPIPE_SLOT_FULL);
        for (stage = 0; stage < p.stages; ++stage)
            for (rank = 0; rank < p.desc.ranks; ++rank) {
                upipe_view heads = upipe_slots_matrix(&p, &s, stage, rank, dim);
                upipe_view columns = upipe_view_packed(at, type, p.rows, 1, width);
                if (heads.d == 0) continue;
                columns.data =
                    at + (size_t)(upipe_plan_q(&p, stage, rank).first * dim) * upipe_dtype_bytes(type);
                columns.d = heads.d;
                UPIPE_TRY(c->ops->cast(c, to_slots ? heads : columns, to_slots ? columns : heads));
            }
        at += (size_t)(p.rows * width) * upipe_dtype_bytes(type);
    }
    return UPIPE_OK;
}

/* upipe_fpdt_gather -- dst = the contents of slots in the host's memory, heads in natural order
 *   dst     host, [segment][batch][T][H*v_dim] of the given type
 *   slots   save->out, or its gradient
 *   errors  as upipe_fpdt_plan; ARG for NULL
 */
UPIPE_API upipe_status upipe_fpdt_gather(upipe_ctx *c, const upipe_fpdt *f, void *dst, upipe_dtype type,
                                         const void *slots)
{
    return upi_fpdt_reorder(c, f, (void *)(uintptr_t)slots, dst, type, 0);
}

/* upipe_fpdt_scatter -- the reverse: slots (of upipe_fpdt_out_bytes) = src. Errors as upipe_fpdt_gather */
UPIPE_API upipe_status upipe_fpdt_scatter(upipe_ctx *c, const upipe_fpdt *f, void *slots, const void *src,
                                          upipe_dtype type)
{
    return upi_fpdt_reorder(c, f, slots, (void *)(uintptr_t)src, type, 1);
}

#endif

/* segments.h -- the table of segments, made once: plans, positions, sizes        part of upipe_fpdt.h */
#ifndef UPIPE_FPDT_H
#include "../upipe_fpdt.h"
#elif !defined(UPIPE_FPDT_SEGMENTS_H)
#define UPIPE_FPDT_SEGMENTS_H

/* All segments. Lengths differ by at most one token, so two plans serve all; buffers have the sizes of the
 * longer. */
typedef struct upi_segments {
    const upipe_fpdt *f;
    upipe_plan plan[2];   /* of tokens / segments tokens, and of one more */
    upipe_layer layer[2]; /* with these plans */
    upi_run run[2];       /* all but x and shard */
    upipe_buffers b;      /* bytes */
    upi_scratch scratch;
    size_t x, delta;  /* bytes of x, and of delta of a stage; b.delta: of all stages */
    size_t kv_tokens; /* bytes of all key/value heads by tokens, for one element of a head each */
    int stages, rounds, steps;
} upi_segments;

/* The first token of segment i. */
UPIPE_API int64_t upi_segment_first(const upipe_fpdt *f, int i)
{
    return upipe_cut(f->desc.tokens, f->segments, i);
}

/* Whether segment i is one of the longer ones: 0 or 1. */
UPIPE_API int upi_segment_long(const upipe_fpdt *f, int i)
{
    return upi_segment_first(f, i + 1) - upi_segment_first(f, i) > f->desc.tokens / f->segments;
}

UPIPE_API const upipe_plan *upi_segment_plan(const upi_segments *z, int i)
{
    return &z->plan[upi_segment_long(z->f, i)];
}

/* Rows of one sequence that this rank has in the segments before i. */
UPIPE_API int64_t upi_segment_rows_before(const upi_segments *z, int i)
{
    const int64_t more = upi_segment_first(z->f, i) - z->f->desc.tokens / z->f->segments * i;
    return (i - more) * z->plan[0].local + more * z->plan[1].local;
}

/* What the block's steps read of segment i; x is the caller's to set. */
UPIPE_API upi_run upi_segment_run(const upi_segments *z, int i)
{
    upi_run r = z->run[upi_segment_long(z->f, i)];
    r.shard = upipe_fpdt_shard(z->f, i);
    return r;
}

UPIPE_API upipe_status upi_segments_make(upi_segments *z, upipe_ctx *c, const upipe_fpdt *f)
{
    int k, stage;
    memset(z, 0, sizeof *z);
    z->f = f;
    UPIPE_TRY(upipe_fpdt_plan(f, 0, &z->plan[0], &c->err));               /* one of the shortest */
    UPIPE_TRY(upipe_fpdt_plan(f, f->segments - 1, &z->plan[1], &c->err)); /* one of the longest */
    for (k = 0; k < 2; ++k) {
        const upipe_plan *p = &z->plan[k];
        upi_scratch s;
        upipe_view none;
        memset(&none, 0, sizeof none);
        z->layer[k] = f->layer;
        z->layer[k].plan = p;
        z->run[k] = upi_run_make(c, &z->layer[k], none);
        z->b = upipe_buffers_max(z->b, z->run[k].buffers);
        s = upi_layer_scratch(c->ops, &z->layer[k], 1);
        z->scratch.gemm = upipe_max_bytes(z->scratch.gemm, s.gemm);
        z->scratch.attn_fwd = upipe_max_bytes(z->scratch.attn_fwd, s.attn_fwd);
        z->scratch.attn_bwd = upipe_max_bytes(z->scratch.attn_bwd, s.attn_bwd);
        z->scratch.tile = upipe_max_bytes(z->scratch.tile, s.tile);
        for (stage = 0; stage < p->stages; ++stage)
            z->delta =
                upipe_max_bytes(z->delta, (size_t)(p->rows * upipe_plan_buffer(p, UPIPE_A2A_Q, stage)) * 4);
        z->x = upipe_max_bytes(z->x, upipe_plan_unit_bytes(p));
        z->kv_tokens = upipe_max_bytes(z->kv_tokens, upipe_plan_rows_bytes(p, p->desc.kv_heads, 1));
    }
    z->b.sum_o = z->b.o / upipe_dtype_bytes(f->desc.dtype) * 4;
    z->b.sum_q = z->b.q / upipe_dtype_bytes(f->desc.dtype) * 4;
    z->stages = z->plan[0].stages;
    z->rounds = z->plan[0].rounds;
    z->steps = z->plan[0].steps;
    for (k = 0; k < 2; ++k) {
        z->run[k].buffers = z->b;
        z->run[k].scratch = z->scratch;
    }
    return UPIPE_OK;
}

/* ---- which segments attend to which ---- */

/* Whether a query of segment i may see a key of segment j. */
UPIPE_API int upi_segment_sees(const upipe_fpdt *f, int i, int j)
{
    upipe_attn a;
    int64_t b, batch = f->desc.batch > 0 ? f->desc.batch : 1;
    const int64_t tokens = f->desc.tokens, q0 = upi_segment_first(f, i), k0 = upi_segment_first(f, j);
    memset(&a, 0, sizeof a);
    a.mask = f->layer.mask;
    a.q.n = upi_segment_first(f, i + 1) - q0;
    a.k.n = upi_segment_first(f, j + 1) - k0;
    for (b = 0; b < batch; ++b) {
        a.q_pos = b * tokens + q0;
        a.k_pos = b * tokens + k0;
        if (upi_ring_sees(&a)) return 1;
    }
    return 0;
}

/* The next segment after `j` of those that `i` sees (of_keys), or that see `i`; -1 after the last. Segment i
 * itself is the first: j = -1. */
UPIPE_API int upi_segment_next(const upipe_fpdt *f, int i, int j, int of_keys)
{
    if (j < 0) return i;
    for (j = j == i ? 0 : j + 1; j < f->segments; ++j)
        if (j != i && upi_segment_sees(f, of_keys ? i : j, of_keys ? j : i)) return j;
    return -1;
}

/* Whether dQ' of segment i has a term before segment j is done. */
UPIPE_API int upi_segment_begun(const upipe_fpdt *f, int i, int j)
{
    int k;
    for (k = 0; k < j; ++k)
        if (k == i || upi_segment_sees(f, i, k)) return 1;
    return 0;
}

#endif

/* segments.h -- the table of segments, made once: plans, positions, sizes */
#ifndef UPIPE_FPDT_SEGMENTS_H
#define UPIPE_FPDT_SEGMENTS_H

/* All segments. Lengths differ by at most one token, so two plans serve all; buffers have the sizes of the
 * longer. */
typedef struct upi_segments {
    const upipe_fpdt *f;
    upipe_plan plan[2];   /* of tokens / segments tokens, and of one more */
    upipe_layer layer[2]; /* with these plans */
    upipe_buffers b;      /* bytes, of the larger plan */
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

UPIPE_API upipe_status upi_segments_make(upi_segments *z, upipe_ctx *c, const upipe_fpdt *f)
{
    upi_pass pass;
    int k, stage;
    memset(z, 0, sizeof *z);
    z->f = f;
    UPIPE_TRY(upipe_fpdt_plan(f, 0, &z->plan[0], &c->err));               /* one of the shortest */
    UPIPE_TRY(upipe_fpdt_plan(f, f->segments - 1, &z->plan[1], &c->err)); /* one of the longest */
    for (k = 0; k < 2; ++k) {
        const upipe_plan *p = &z->plan[k];
        z->layer[k] = f->layer;
        z->layer[k].plan = p;
        z->b = upi_buffers_max(z->b, p->buffers);
        upi_pass_init(NULL, &pass, &z->layer[k], NULL);
        pass.scratch = z->scratch;
        upi_scratch_add(c->ops, &pass, 1);
        z->scratch = pass.scratch;
        for (stage = 0; stage < p->stages; ++stage)
            z->delta = upipe_max_bytes(z->delta,
                                       (size_t)(p->rows * upipe_plan_heads_sent(p, UPIPE_A2A_Q, stage)) * 4);
        z->x = upipe_max_bytes(z->x, upipe_plan_unit_bytes(p));
        z->kv_tokens = upipe_max_bytes(z->kv_tokens, upipe_plan_rows_bytes(p, p->desc.kv_heads, 1));
    }
    z->b.sum_o = z->b.o / upipe_dtype_bytes(f->desc.dtype) * 4;
    z->b.sum_q = z->b.q / upipe_dtype_bytes(f->desc.dtype) * 4;
    z->stages = z->plan[0].stages;
    z->rounds = z->plan[0].rounds;
    z->steps = z->plan[0].steps;
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
        if (upi_attn_sees(&a)) return 1;
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

/* How many segments that is, itself included. */
UPIPE_API int upi_segment_count(const upipe_fpdt *f, int i, int of_keys)
{
    int j, n = 0;
    for (j = i; j >= 0; j = upi_segment_next(f, i, j, of_keys)) ++n;
    return n;
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

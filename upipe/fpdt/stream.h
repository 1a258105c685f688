/* stream.h -- the segments that are streamed for one that stays
 *
 * Segment `at` of a stage stays on the device. The segments that it attends with are streamed, itself first: in the
 * forward their keys and values, in the backward their queries. Two of them have buffers. The fetch of the next one
 * is started before the attention of each.
 */
#ifndef UPIPE_FPDT_STREAM_H
#define UPIPE_FPDT_STREAM_H

typedef struct upi_stream {
    upi_fpdt_pass *s;
    upipe_attend a;     /* of the queries: those that stay, or the streamed ones */
    upipe_kv_block own; /* keys and values that stay */
    char *bufs;
    int at, stage;
    int segment[4]; /* the n-th that is streamed is at n % 4 */
} upi_stream;

/* Heads, scratch and buffers of a stage; the caller frees v->a.work, then v->bufs. */
UPIPE_API upipe_status upi_stream_begin(upipe_ctx *c, upi_stream *v, upi_fpdt_pass *s, int at, int stage,
                                        size_t buf_bytes, size_t work, const char *tag)
{
    const upipe_plan *p = upi_segment_plan(&s->z, at);
    const upipe_head_range mine = upipe_plan_q(p, stage, p->desc.rank);
    void *bufs;
    memset(v, 0, sizeof *v);
    v->s = s;
    v->at = at;
    v->stage = stage;
    UPIPE_TRY(upipe_alloc(c, &bufs, 2 * buf_bytes, UPIPE_USE_SCRATCH, tag));
    v->bufs = (char *)bufs;
    v->a.plan = p;
    v->a.mask = s->z.f->layer.mask;
    v->a.scale = s->z.f->layer.scale;
    v->a.tokens = s->z.f->desc.tokens;
    v->a.stages = 1;
    v->a.heads = mine.count;
    v->a.first = mine.first;
    v->a.kv_heads = upipe_plan_kv(p, stage, p->desc.rank).count;
    v->a.sums = UPIPE_F32;
    v->a.merge_dq = 1;
    v->a.work_bytes = work;
    return upipe_alloc(c, &v->a.work, work, UPIPE_USE_SCRATCH, "attn_work");
}

/* The tokens of segment i: the whole team's. */
UPIPE_API upipe_shard upi_segment_tokens(const upipe_fpdt *f, int i)
{
    return upi_shard_range(upi_segment_first(f, i), upi_segment_first(f, i + 1) - upi_segment_first(f, i));
}

/* ---- forward: keys and values are streamed ---- */

/* Where the keys and values of the n-th segment lie. */
UPIPE_API upi_kv_pair upi_stream_kv(const upi_stream *v, int n)
{
    const upipe_buffers *b = &v->s->z.b;
    upi_kv_pair kv;
    kv.k = upipe_offset(v->bufs, (size_t)(n % 2) * (b->k + b->v));
    kv.v = upipe_offset(kv.k, b->k);
    return kv;
}

UPIPE_API upipe_status upi_stream_fwd_fetch(upipe_ctx *c, void *stream, int n)
{
    upi_stream *v = (upi_stream *)stream;
    v->segment[n % 4] = upi_segment_next(v->s->z.f, v->at, n > 0 ? v->segment[(n - 1) % 4] : -1, 1);
    return n > 0 ? upi_fpdt_fetch_kv(c, v->s, v->segment[n % 4], v->stage, upi_stream_kv(v, n)) : UPIPE_OK;
}

/* The queries that stay, and the keys of the n-th segment. */
UPIPE_API upipe_status upi_stream_fwd_attend(upipe_ctx *c, void *stream, int n)
{
    upi_stream *v = (upi_stream *)stream;
    upipe_kv_block block = v->own;
    if (n > 0) {
        block.k = upi_stream_kv(v, n).k;
        block.v = upi_stream_kv(v, n).v;
    }
    v->a.rows = upi_segment_tokens(v->s->z.f, v->at);
    block.rows = upi_segment_tokens(v->s->z.f, v->segment[n % 4]);
    return upipe_attend_fwd(c, &v->a, &block, n == 0);
}

/* ---- backward: queries are streamed, with their dQ' ---- */

/* Bytes of Q', dO', dQ', lse and delta of a stage and a segment. */
UPIPE_API size_t upi_stream_q_bytes(const upi_segments *z)
{
    return z->b.q + z->b.o + z->b.sum_q + 2 * z->b.stat;
}

/* The buffers of the n-th segment. lse and delta of both buffers come last, so that rows of the others stay
 * at multiples of 16 bytes, as kernels need them. */
UPIPE_API void upi_stream_q(const upi_stream *v, int n, upipe_attend *a)
{
    const upipe_buffers *b = &v->s->z.b;
    const size_t rows = b->q + b->o + b->sum_q;
    a->q = upipe_offset(v->bufs, (size_t)(n % 2) * rows);
    a->dout = upipe_offset(a->q, b->q);
    a->dq = upipe_offset(a->dout, b->o);
    a->lse = (float *)upipe_offset(v->bufs, 2 * (rows + (size_t)(n % 2) * b->stat));
    a->delta = (float *)upipe_offset(a->lse, b->stat);
}

UPIPE_API upipe_status upi_stream_bwd_fetch(upipe_ctx *c, void *stream, int n)
{
    upi_stream *v = (upi_stream *)stream;
    upi_fpdt_pass *s = v->s;
    const upi_segments *z = &s->z;
    const int i = upi_segment_next(z->f, v->at, n > 0 ? v->segment[(n - 1) % 4] : -1, 0), stage = v->stage;
    const upipe_plan *p = upi_segment_plan(z, i);
    const size_t e = upipe_dtype_bytes(p->desc.dtype), dq = upi_fpdt_q_bytes(p, stage, p->desc.head_dim, 4),
                 stat = upi_fpdt_q_bytes(p, stage, 1, 4);
    upipe_attend to;
    v->segment[n % 4] = i;
    upi_stream_q(v, n, &to);
    UPIPE_TRY(upi_fpdt_copy(c, s, (void *)(uintptr_t)to.q,
                            upi_fpdt_at(s->save->q, z->b.q, z->stages, i, stage), dq / 4 * e));
    UPIPE_TRY(upi_fpdt_copy(c, s, (void *)(uintptr_t)to.dout,
                            upi_fpdt_at(s->host.dout, z->b.o, z->stages, i, stage),
                            upi_fpdt_q_bytes(p, stage, p->desc.v_dim, e)));
    UPIPE_TRY(upi_fpdt_copy(c, s, to.lse, upi_fpdt_at(s->save->lse, z->b.stat, z->stages, i, stage), stat));
    UPIPE_TRY(
        upi_fpdt_copy(c, s, to.delta, upi_fpdt_at(s->host.delta, z->b.stat, z->stages, i, stage), stat));
    if (upi_segment_begun(z->f, i, v->at))
        return upi_fpdt_copy(c, s, to.dq, upi_fpdt_at(s->host.dq, z->b.sum_q, z->stages, i, stage), dq);
    return c->ops->zero(c, to.dq, dq);
}

/* The queries of the n-th segment, and the keys that stay. */
UPIPE_API upipe_status upi_stream_bwd_attend(upipe_ctx *c, void *stream, int n)
{
    upi_stream *v = (upi_stream *)stream;
    upi_stream_q(v, n, &v->a);
    v->a.rows = upi_segment_tokens(v->s->z.f, v->segment[n % 4]);
    v->own.rows = upi_segment_tokens(v->s->z.f, v->at);
    return upipe_attend_bwd(c, &v->a, &v->own, n == 0);
}

/* dQ' of the n-th segment, back to the host. */
UPIPE_API upipe_status upi_stream_bwd_offload(upipe_ctx *c, void *stream, int n)
{
    upi_stream *v = (upi_stream *)stream;
    const upi_segments *z = &v->s->z;
    const int i = v->segment[n % 4];
    upipe_attend from;
    upi_stream_q(v, n, &from);
    return upi_fpdt_copy(c, v->s, upi_fpdt_at(v->s->host.dq, z->b.sum_q, z->stages, i, v->stage), from.dq,
                         upi_fpdt_q_bytes(upi_segment_plan(z, i), v->stage, z->f->desc.head_dim, 4));
}

/* Whether all others than the segment that stays are as long, and show all of their pairs. */
UPIPE_API int upi_stream_alike(const upi_stream *v)
{
    const upipe_fpdt *f = v->s->z.f;
    return !upi_mask_reads_positions(&f->layer.mask) && f->layer.mask.window == 0 &&
           f->desc.tokens % f->segments == 0;
}

/* In a dry pool the second segment counts for all behind it too. */
UPIPE_API upipe_status upi_stream_rest(upipe_ctx *c, upi_stream *v, int64_t times, upi_stage_call *fetch,
                                       upi_stage_call *attend, upi_stage_call *offload)
{
    c->mem->times *= times;
    UPIPE_TRY(fetch(c, v, 1));
    UPIPE_TRY(attend(c, v, 1));
    if (offload != NULL) UPIPE_TRY(offload(c, v, 1));
    c->mem->times /= times;
    return UPIPE_OK;
}

/* n segments are streamed: `fetch` and `offload` (NULL: nothing is copied back) run on the side stream, or on
 * ctx->stream. */
UPIPE_API upipe_status upi_stream_run(upipe_ctx *c, upi_stream *v, int n, upi_stage_call *fetch,
                                      upi_stage_call *attend, upi_stage_call *offload)
{
    const int once = c->mem->dry > 0 && n > 2 && upi_stream_alike(v);
    upipe_side_stream none;
    upipe_side_stream_inline(&none, c->stream);
    UPIPE_TRY(upi_pipeline_run(c, v->s->z.f->desc.overlap && n > 1 ? c->side_stream : &none, once ? 1 : n,
                               fetch, attend, offload, v));
    return once ? upi_stream_rest(c, v, n - 1, fetch, attend, offload) : UPIPE_OK;
}

#endif

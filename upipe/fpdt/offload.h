/* offload.h -- one pass over segments: copies between host and device, and attention with streamed segments
 *                                                                                  part of upipe_fpdt.h
 */
#ifndef UPIPE_FPDT_H
#include "../upipe_fpdt.h"
#elif !defined(UPIPE_FPDT_OFFLOAD_H)
#define UPIPE_FPDT_OFFLOAD_H

#include "segments.h"

/* What the backward offloads to the host: dO', delta and dQ' by heads, dK and dV by tokens. dkv: dK', dV' in
 * f32, between the stages of a round. */
typedef struct upi_fpdt_grads {
    char *dout, *delta, *dq, *dk, *dv, *dkv;
} upi_fpdt_grads;

/* One pass. */
typedef struct upi_fpdt_pass {
    upi_segments z;
    upipe_fpdt_saved *save;
    upipe_grads *grads;  /* backward; NULL in the forward */
    upi_fpdt_grads host; /* backward */
    float *dnorm;        /* backward with QK norm: upi_run.dnorm */
} upi_fpdt_pass;

UPIPE_API upi_run upi_fpdt_run(const upi_fpdt_pass *s, int i)
{
    upi_run r = upi_segment_run(&s->z, i);
    r.dnorm = s->dnorm;
    r.grads = s->grads;
    return r;
}

UPIPE_API upipe_status upi_fpdt_copy(upipe_ctx *c, upi_fpdt_pass *s, void *dst, const void *src, size_t bytes)
{
    s->save->moved += (int64_t)bytes;
    return bytes > 0 ? c->ops->copy(c, dst, src, bytes) : UPIPE_OK;
}

/* Block k of the n blocks of segment i in a buffer in the host's memory; NULL where a rank has no heads. */
UPIPE_API char *upi_fpdt_at(const char *base, size_t bytes, int n, int i, int k)
{
    return (char *)upipe_offset(base, ((size_t)i * (size_t)n + (size_t)k) * bytes);
}

/* Bytes of this rank's query heads, or key/value heads, of a stage, dim elements of e bytes each. */
UPIPE_API size_t upi_fpdt_q_bytes(const upipe_plan *p, int stage, int dim, size_t e)
{
    return (size_t)(p->seq * p->desc.batch * upipe_plan_q(p, stage, p->desc.rank).count * dim) * e;
}

UPIPE_API size_t upi_fpdt_kv_bytes(const upipe_plan *p, int stage, int dim, size_t e)
{
    return (size_t)(p->seq * p->desc.batch * upipe_plan_kv(p, stage, p->desc.rank).count * dim) * e;
}

/* x of segment i, from the host; free it with upipe_free(c, r->x.data). */
UPIPE_API upipe_status upi_fpdt_fetch_x(upipe_ctx *c, upi_fpdt_pass *s, upi_run *r, const char *x, int i)
{
    const upipe_plan *p = r->p;
    const size_t row = (size_t)(p->desc.batch * p->desc.model_dim) * upipe_dtype_bytes(p->desc.dtype);
    void *data;
    UPIPE_TRY(upipe_alloc(c, &data, s->z.x, "x"));
    r->x = upipe_view_packed(data, p->desc.dtype, p->rows, 1, (int32_t)p->desc.model_dim);
    return upi_fpdt_copy(c, s, data, x + (size_t)upi_segment_rows_before(&s->z, i) * row,
                         (size_t)p->local * row);
}

/* Fetches K', V' of segment j for a stage. */
UPIPE_API upipe_status upi_fpdt_fetch_kv(upipe_ctx *c, upi_fpdt_pass *s, int j, int stage, upi_kv_pair to)
{
    const upi_segments *z = &s->z;
    const upipe_plan *p = upi_segment_plan(z, j);
    const size_t e = upipe_dtype_bytes(p->desc.dtype);
    const int round = stage / z->steps;
    UPIPE_TRY(upi_fpdt_copy(c, s, to.k, upi_fpdt_at(s->save->k, z->b.k, z->rounds, j, round),
                            upi_fpdt_kv_bytes(p, stage, p->desc.head_dim, e)));
    return upi_fpdt_copy(c, s, to.v, upi_fpdt_at(s->save->v, z->b.v, z->rounds, j, round),
                         upi_fpdt_kv_bytes(p, stage, p->desc.v_dim, e));
}

/* ---- the segments that are streamed for one that stays ---- */

/* Segment `at` of a stage stays on the device. The segments that it attends with are streamed, itself first:
 * in the forward their keys and values, in the backward their queries. Two of them have buffers. */
typedef struct upi_fpdt_stream {
    upi_fpdt_pass *s;
    upipe_ring_call call;
    upipe_ring_part part;
    upi_ring_block own;
    char *bufs;
    int at, stage;
    int segment[4]; /* the n-th that is streamed is at n % 4 */
} upi_fpdt_stream;

/* Heads, scratch and buffers of a stage; frees are in upi_fpdt_stream_end. */
UPIPE_API upipe_status upi_fpdt_stream_begin(upipe_ctx *c, upi_fpdt_stream *v, upi_fpdt_pass *s, int at,
                                             int stage, size_t buf_bytes, const char *tag)
{
    const upi_segments *z = &s->z;
    const upipe_plan *p = upi_segment_plan(z, at);
    const upipe_layer *l = &s->z.f->layer;
    const upipe_span mine = upipe_plan_q(p, stage, p->desc.rank);
    void *bufs;
    memset(v, 0, sizeof *v);
    v->s = s;
    v->at = at;
    v->stage = stage;
    UPIPE_TRY(upipe_alloc(c, &bufs, 2 * buf_bytes, tag));
    v->bufs = (char *)bufs;
    v->part.heads = mine.count;
    v->part.first = mine.first;
    v->call.plan = p;
    v->call.mask = l->mask;
    v->call.scale = l->scale;
    v->call.dsinks = s->grads != NULL ? s->grads->sinks : NULL;
    v->call.work_bytes = s->grads != NULL ? z->scratch.attn_bwd : z->scratch.attn_fwd;
    UPIPE_TRY(upipe_alloc(c, &v->call.work, v->call.work_bytes, "attn_work"));
    v->call.parts = &v->part;
    v->call.count = 1;
    v->call.kv_heads = upipe_plan_kv(p, stage, p->desc.rank).count;
    v->call.sums = UPIPE_F32;
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_fpdt_stream_end(upipe_ctx *c, upi_fpdt_stream *v)
{
    UPIPE_TRY(upipe_free(c, v->call.work));
    return upipe_free(c, v->bufs);
}

/* The queries of segment i, in v->part, against the keys and values of segment j. */
UPIPE_API upipe_status upi_fpdt_pair(upipe_ctx *c, const upi_fpdt_stream *v, const upi_ring_block *block,
                                     int i, int j)
{
    const upipe_fpdt *f = v->s->z.f;
    const upipe_plan *p = v->call.plan;
    upi_ring_at at;
    int head;
    memset(&at, 0, sizeof at);
    at.q.pos = upi_segment_first(f, i);
    at.q.n = at.q_all = upi_segment_first(f, i + 1) - at.q.pos;
    at.k.pos = upi_segment_first(f, j);
    at.k.n = at.k_all = upi_segment_first(f, j + 1) - at.k.pos;
    at.first = i == j;
    at.add = 1;
    for (; at.sequence < p->desc.batch; ++at.sequence)
        for (head = 0; upi_ring_heads(&v->part, p->group, head, &at.heads, &at.kv); head += at.heads.count)
            UPIPE_TRY(
                upi_ring_call_one(c, &v->call, &v->part, block, &at, f->desc.tokens, v->s->grads != NULL));
    return UPIPE_OK;
}

#endif

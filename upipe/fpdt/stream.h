/* stream.h -- the loop over the segments that are streamed for one that stays        part of upipe_fpdt.h */
#ifndef UPIPE_FPDT_H
#include "../upipe_fpdt.h"
#elif !defined(UPIPE_FPDT_STREAM_H)
#define UPIPE_FPDT_STREAM_H

#include "offload.h"

/* ---- forward: keys and values are streamed ---- */

/* Where the keys and values of the n-th segment lie. */
UPIPE_API upi_kv_pair upi_fpdt_stream_kv(const upi_fpdt_stream *v, int n)
{
    const upipe_buffers *b = &v->s->z.b;
    upi_kv_pair kv;
    kv.k = upipe_offset(v->bufs, (size_t)(n % 2) * (b->k + b->v));
    kv.v = upipe_offset(kv.k, b->k);
    return kv;
}

UPIPE_API upipe_status upi_fpdt_fwd_pair(upipe_ctx *c, upi_fpdt_stream *v, int n)
{
    upi_ring_block block = v->own;
    if (n > 0) {
        block.k = upi_fpdt_stream_kv(v, n).k;
        block.v = upi_fpdt_stream_kv(v, n).v;
    }
    return upi_fpdt_pair(c, v, &block, v->at, v->segment[n % 4]);
}

/* ---- backward: queries are streamed, with their dQ' ---- */

/* Bytes of Q', dO', dQ', lse and delta of a stage and a segment. */
UPIPE_API size_t upi_fpdt_stream_q_bytes(const upi_segments *z)
{
    return z->b.q + z->b.o + z->b.sum_q + 2 * z->b.stat;
}

/* The buffers of the n-th segment. lse and delta of both buffers come last, so that rows of the others stay
 * at multiples of 16 bytes, as kernels need them. */
UPIPE_API void upi_fpdt_stream_q(const upi_fpdt_stream *v, int n, upipe_ring_part *part)
{
    const upipe_buffers *b = &v->s->z.b;
    const size_t rows = b->q + b->o + b->sum_q;
    part->q = upipe_offset(v->bufs, (size_t)(n % 2) * rows);
    part->dout = upipe_offset(part->q, b->q);
    part->dq = upipe_offset(part->dout, b->o);
    part->lse = (float *)upipe_offset(v->bufs, 2 * (rows + (size_t)(n % 2) * b->stat));
    part->delta = (float *)upipe_offset(part->lse, b->stat);
}

UPIPE_API upipe_status upi_fpdt_bwd_fetch(upipe_ctx *c, upi_fpdt_stream *v, int n)
{
    upi_fpdt_pass *s = v->s;
    const upi_segments *z = &s->z;
    const int i = v->segment[n % 4], stage = v->stage;
    const upipe_plan *p = upi_segment_plan(z, i);
    const size_t e = upipe_dtype_bytes(p->desc.dtype), dq = upi_fpdt_q_bytes(p, stage, p->desc.head_dim, 4),
                 stat = upi_fpdt_q_bytes(p, stage, 1, 4);
    upipe_ring_part to;
    upi_fpdt_stream_q(v, n, &to);
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

UPIPE_API upipe_status upi_fpdt_bwd_pair(upipe_ctx *c, upi_fpdt_stream *v, int n)
{
    upi_fpdt_stream_q(v, n, &v->part);
    return upi_fpdt_pair(c, v, &v->own, v->segment[n % 4], v->at);
}

UPIPE_API upipe_status upi_fpdt_bwd_offload(upipe_ctx *c, upi_fpdt_stream *v, int n)
{
    const upi_segments *z = &v->s->z;
    const int i = v->segment[n % 4];
    upipe_ring_part from;
    upi_fpdt_stream_q(v, n, &from);
    return upi_fpdt_copy(c, v->s, upi_fpdt_at(v->s->host.dq, z->b.sum_q, z->stages, i, v->stage), from.dq,
                         upi_fpdt_q_bytes(upi_segment_plan(z, i), v->stage, z->f->desc.head_dim, 4));
}

/* ---- the loop ---- */

/* Copies of the n-th segment, to the device or back: on the side stream, or on ctx->stream. */
UPIPE_API upipe_status upi_fpdt_side_call(upipe_ctx *side, void *stream, int store, int n)
{
    upi_fpdt_stream *v = (upi_fpdt_stream *)stream;
    const int backward = v->s->grads != NULL;
    if (store) return backward ? upi_fpdt_bwd_offload(side, v, n) : UPIPE_OK;
    v->segment[n % 4] = upi_segment_next(v->s->z.f, v->at, n > 0 ? v->segment[(n - 1) % 4] : -1, !backward);
    if (backward) return upi_fpdt_bwd_fetch(side, v, n);
    return n > 0 ? upi_fpdt_fetch_kv(side, v->s, v->segment[n % 4], v->stage, upi_fpdt_stream_kv(v, n))
                 : UPIPE_OK;
}

/* Attention of segment v->at with all that it meets. The fetch of the next segment is started before the
 * attention of each. */
UPIPE_API upipe_status upi_fpdt_stream_run(upipe_ctx *c, upi_fpdt_stream *v)
{
    const upipe_fpdt *f = v->s->z.f;
    const int backward = v->s->grads != NULL;
    upipe_side_stream none, *side;
    upipe_pipeline q;
    upipe_status s;
    int i, n = 0;
    for (i = v->at; i >= 0; i = upi_segment_next(f, v->at, i, !backward)) ++n;
    upipe_side_stream_inline(&none, c->stream);
    side = f->desc.overlap && n > 1 ? c->side_stream : &none;
    s = upipe_pipeline_begin(&q, c, side, upi_fpdt_side_call, v);
    if (s == UPIPE_OK) s = upipe_pipeline_load(&q, c, 0);
    for (i = 0; i < n && s == UPIPE_OK; ++i) {
        if (i + 1 < n) s = upipe_pipeline_load(&q, c, i + 1);
        if (s == UPIPE_OK) s = upipe_pipeline_wait(&q, c, i);
        if (s == UPIPE_OK) s = backward ? upi_fpdt_bwd_pair(c, v, i) : upi_fpdt_fwd_pair(c, v, i);
        if (s == UPIPE_OK) s = upipe_pipeline_store(&q, c, i);
    }
    return upipe_pipeline_end(&q, c, s);
}

#endif

/* upipe_visit.h -- what passes by a segment, out of the host's memory and back, and is attended        layer 8
 *
 * Of a pass through the segments (upipe_fpdt.h) one is at hand. Forward: its queries stay, keys and values of the
 * others pass by. Backward: its keys and values stay, queries pass by with their dQ. The copies of one visit come ahead
 * of the attention of the one before: on ctx->side_stream, beside it, or on the rank's own line.
 */
#ifndef UPIPE_VISIT_H
#define UPIPE_VISIT_H

#include "upipe_segment.h"

/* ---- one pass ---- */

typedef struct upi_fpdt_pass {
    const upipe_fpdt *f;
    upi_fpdt_sizes z;
    upi_run run; /* of the segment that is at hand */
    upipe_layer layer;
    upipe_plan plan;
    upipe_fpdt_saved *save;
    upipe_ring_call call;
    upipe_ring_part part;
} upi_fpdt_pass;

/* Segment i is at hand. */
UPIPE_API upipe_status upi_fpdt_turn(upi_fpdt_pass *s, int i)
{
    UPIPE_TRY(upipe_fpdt_plan(s->f, i, &s->plan, &s->run.c->err));
    s->layer.plan = &s->plan;
    s->run.l = &s->layer;
    s->run.p = &s->plan;
    s->run.bytes = s->z.s;
    s->run.buffers = s->z.b;
    s->run.shard = upipe_fpdt_shard(s->f, i);
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_fpdt_copy(upi_fpdt_pass *s, void *dst, const void *src, size_t bytes)
{
    s->save->moved += (int64_t)bytes;
    return bytes > 0 ? s->run.c->ops->copy(s->run.c, dst, src, bytes) : UPIPE_OK;
}

/* Bytes of x, Q', O', K', V', statistics of the segment at hand; of a stage, of a round. */
UPIPE_API size_t upi_fpdt_q_bytes(const upi_fpdt_pass *s, int stage, int dim, size_t e)
{
    const upipe_plan *p = &s->plan;
    return (size_t)(p->seq * p->desc.batch * upipe_plan_q(p, stage, p->desc.rank).count * dim) * e;
}

UPIPE_API size_t upi_fpdt_kv_bytes(const upi_fpdt_pass *s, int stage, int dim, size_t e)
{
    const upipe_plan *p = &s->plan;
    return (size_t)(p->seq * p->desc.batch * upipe_plan_kv(p, stage, p->desc.rank).count * dim) * e;
}

/* The part's queries, of segment i, against the block of segment j. */
UPIPE_API upipe_status upi_fpdt_attend(upi_fpdt_pass *s, const upi_ring_block *block, int i, int j,
                                       int backward)
{
    const upipe_fpdt *f = s->f;
    const int64_t q0 = upipe_cut(f->desc.tokens, f->segments, i),
                  k0 = upipe_cut(f->desc.tokens, f->segments, j);
    upi_ring_at at;
    int head;
    memset(&at, 0, sizeof at);
    at.q.pos = q0;
    at.q.n = at.q_all = upipe_cut(f->desc.tokens, f->segments, i + 1) - q0;
    at.k.pos = k0;
    at.k.n = at.k_all = upipe_cut(f->desc.tokens, f->segments, j + 1) - k0;
    at.first = i == j;
    at.add = 1;
    for (; at.sequence < s->plan.desc.batch; ++at.sequence)
        for (head = 0; upi_ring_heads(&s->part, s->plan.group, head, &at.heads, &at.kv);
             head += at.heads.count)
            UPIPE_TRY(upi_ring_call_one(s->run.c, &s->call, &s->part, block, &at, f->desc.tokens, backward));
    return UPIPE_OK;
}

/* The query heads of a stage; work is taken. */
UPIPE_API upipe_status upi_fpdt_part(upi_fpdt_pass *s, int stage, int backward)
{
    const upipe_plan *p = &s->plan;
    const upi_run *r = &s->run;
    const upipe_span mine = upipe_plan_q(p, stage, p->desc.rank);
    void *work;
    memset(&s->part, 0, sizeof s->part);
    s->part.heads = mine.count;
    s->part.first = mine.first;
    s->call.plan = p;
    s->call.mask = r->l->mask;
    s->call.scale = r->l->scale;
    s->call.dsinks = r->dsinks;
    s->call.work_bytes = backward ? s->z.s.attn_bwd : s->z.s.attn_fwd;
    UPIPE_TRY(upi_alloc(&s->run, &work, s->call.work_bytes, "attn_work"));
    s->call.work = work;
    s->call.parts = &s->part;
    s->call.count = 1;
    s->call.kv_heads = upipe_plan_kv(p, stage, p->desc.rank).count;
    s->call.sums = UPIPE_F32;
    return UPIPE_OK;
}

/* K', V' of a segment, as a stage reads them, from the host. */
UPIPE_API upipe_status upi_fpdt_load(upi_fpdt_pass *s, int j, int stage, void *k, void *v)
{
    const upipe_fpdt *f = s->f;
    const upipe_plan_desc *d = &s->plan.desc;
    const int round = stage / s->z.steps, heads = upipe_plan_kv(&s->plan, stage, d->rank).count;
    const size_t n =
        (size_t)(upipe_cut(f->desc.tokens, f->segments, j + 1) - upipe_cut(f->desc.tokens, f->segments, j));
    const size_t row = n * (size_t)(d->batch * heads) * upipe_dtype_bytes(d->dtype);
    UPIPE_TRY(upi_fpdt_copy(s, k, upi_fpdt_at(s->save->k, s->z.b.k, s->z.rounds, j, round),
                            row * (size_t)d->head_dim));
    return upi_fpdt_copy(s, v, upi_fpdt_at(s->save->v, s->z.b.v, s->z.rounds, j, round),
                         row * (size_t)d->v_dim);
}

/* ---- what passes by ---- */

/* What the backward parks in the host's memory: dO', delta, dQ' by heads; dK and dV by tokens. */
typedef struct upi_fpdt_offloaded {
    char *dout, *delta, *dq, *dk, *dv, *dkv; /* dkv: dK', dV' in f32, between the stages of a round */
} upi_fpdt_offloaded;

/* The segments that segment `at` meets in a stage, itself first: keys and values that pass its queries, or in the
 * backward queries that pass its keys and values. */
typedef struct upi_fpdt_visits {
    upi_fpdt_pass *s;
    upi_fpdt_pass side_stream; /* another segment is at hand there */
    const upi_fpdt_offloaded *grads_at_tokens;
    upi_ring_block own;
    char *bufs; /* two */
    int at, stage, backward;
    int segment[4]; /* of visit n, at n % 4 */
} upi_fpdt_visits;

/* Visit n is the next one that comes. */
UPIPE_API int upi_fpdt_visitor(upi_fpdt_visits *v, int n)
{
    v->segment[n % 4] = n == 0 ? v->at : upi_fpdt_next(v->s->f, v->at, v->segment[(n - 1) % 4], !v->backward);
    return v->segment[n % 4];
}

/* Runs them, the next one's copies ahead of the attention of each. */
UPIPE_API upipe_status upi_fpdt_visit_all(upi_fpdt_visits *v, upi_stages *all)
{
    upipe_ctx *c = v->s->run.c;
    upipe_side_stream line;
    upipe_side_stream_inline(&line, c->stream);
    all->arg = v;
    all->step = 1;
    for (all->n = 0; upi_fpdt_visitor(v, all->n) >= 0;) ++all->n;
    all->side_stream = v->s->f->desc.overlap && all->n > 1 ? c->side_stream : &line;
    v->side_stream = *v->s;
    v->side_stream.run.c = &all->side_stream->ctx;
    return upi_stages_run(all, c);
}

/* ---- forward: keys and values pass ---- */

/* Where the keys and values of visit n > 0 lie. */
UPIPE_API char *upi_fpdt_buf(const upi_fpdt_visits *v, int n)
{
    return v->bufs + (size_t)(n % 2) * (v->s->z.b.k + v->s->z.b.v);
}

UPIPE_API upipe_status upi_fpdt_fwd_fetch(void *arg, upipe_ctx *c, int n)
{
    upi_fpdt_visits *v = (upi_fpdt_visits *)arg;
    const int j = upi_fpdt_visitor(v, n);
    char *buf = upi_fpdt_buf(v, n);
    (void)c;
    return n == 0 ? UPIPE_OK : upi_fpdt_load(&v->side_stream, j, v->stage, buf, buf + v->s->z.b.k);
}

UPIPE_API upipe_status upi_fpdt_fwd_attend(void *arg, upipe_ctx *c, int n)
{
    upi_fpdt_visits *v = (upi_fpdt_visits *)arg;
    upi_ring_block block = v->own;
    (void)c;
    if (n > 0) block.k = upi_fpdt_buf(v, n), block.v = upi_fpdt_buf(v, n) + v->s->z.b.k;
    return upi_fpdt_attend(v->s, &block, v->at, v->segment[n % 4], 0);
}

UPIPE_API upipe_status upi_fpdt_fwd_leave(void *arg, upipe_ctx *c, int n)
{
    (void)arg;
    (void)c;
    (void)n;
    return UPIPE_OK;
}

/* ---- backward: queries pass ---- */

/* A stage's queries of segment i come to visit segment j, as visitor `which`. */
UPIPE_API upipe_status upi_fpdt_come(upi_fpdt_pass *s, const upi_fpdt_offloaded *grads_at_tokens, int i, int j, int stage,
                                     char *bufs, int which)
{
    const upi_fpdt_sizes *z = &s->z;
    const upipe_plan *p = &s->plan;
    const size_t e = upipe_dtype_bytes(p->desc.dtype);
    upipe_ring_part part;
    size_t dq, stat;
    UPIPE_TRY(upi_fpdt_turn(s, i));
    dq = upi_fpdt_q_bytes(s, stage, p->desc.head_dim, 4);
    stat = upi_fpdt_q_bytes(s, stage, 1, 4);
    upi_fpdt_fetched(z, bufs, which, &part);
    UPIPE_TRY(upi_fpdt_copy(s, (void *)(uintptr_t)part.q,
                            upi_fpdt_at(s->save->q, z->b.q, z->stages, i, stage), dq / 4 * e));
    UPIPE_TRY(upi_fpdt_copy(s, (void *)(uintptr_t)part.dout,
                            upi_fpdt_at(grads_at_tokens->dout, z->b.o, z->stages, i, stage),
                            upi_fpdt_q_bytes(s, stage, p->desc.v_dim, e)));
    UPIPE_TRY(upi_fpdt_copy(s, part.lse, upi_fpdt_at(s->save->lse, z->b.stat, z->stages, i, stage), stat));
    UPIPE_TRY(upi_fpdt_copy(s, part.delta, upi_fpdt_at(grads_at_tokens->delta, z->b.stat, z->stages, i, stage), stat));
    if (upi_fpdt_begun(s->f, i, j))
        return upi_fpdt_copy(s, part.dq, upi_fpdt_at(grads_at_tokens->dq, z->b.sum_q, z->stages, i, stage), dq);
    return s->run.c->ops->zero(s->run.c, part.dq, dq);
}

UPIPE_API upipe_status upi_fpdt_bwd_fetch(void *arg, upipe_ctx *c, int n)
{
    upi_fpdt_visits *v = (upi_fpdt_visits *)arg;
    (void)c;
    return upi_fpdt_come(&v->side_stream, v->grads_at_tokens, upi_fpdt_visitor(v, n), v->at, v->stage, v->bufs, n % 2);
}

UPIPE_API upipe_status upi_fpdt_bwd_attend(void *arg, upipe_ctx *c, int n)
{
    upi_fpdt_visits *v = (upi_fpdt_visits *)arg;
    (void)c;
    UPIPE_TRY(upi_fpdt_turn(v->s, v->segment[n % 4]));
    upi_fpdt_fetched(&v->s->z, v->bufs, n % 2, &v->s->part);
    return upi_fpdt_attend(v->s, &v->own, v->segment[n % 4], v->at, 1);
}

UPIPE_API upipe_status upi_fpdt_bwd_leave(void *arg, upipe_ctx *c, int n)
{
    upi_fpdt_visits *v = (upi_fpdt_visits *)arg;
    upi_fpdt_pass *s = &v->side_stream;
    const int i = v->segment[n % 4];
    upipe_ring_part part;
    (void)c;
    UPIPE_TRY(upi_fpdt_turn(s, i));
    upi_fpdt_fetched(&s->z, v->bufs, n % 2, &part);
    return upi_fpdt_copy(s, upi_fpdt_at(v->grads_at_tokens->dq, s->z.b.sum_q, s->z.stages, i, v->stage), part.dq,
                         upi_fpdt_q_bytes(s, v->stage, s->f->desc.head_dim, 4));
}

#endif

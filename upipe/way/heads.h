/* heads.h -- heads for tokens: all-to-alls in stages of heads        part of upipe_linear_attn.h
 *
 * A rank has whole key heads, with all heads that read them, and of these the whole sequence; so a key head is sent once.
 * Where there are fewer key heads than ranks, the heads that read one are shared out: then several ranks have it, and their
 * gradients of it are added up at its tokens. One stage's tensors are held at a time. */
#ifndef UPIPE_WAY_HEADS_H
#define UPIPE_WAY_HEADS_H

#include "types.h"

/* A direction of one rank.
 *   plan  of key heads, each `split` times: which rank has which in which stage; each is read by `group` heads
 *   at    the stage's call on the whole sequence, of as many heads as this rank has at most
 *   send  this rank's tokens of a stage's heads of all ranks: one tensor
 *   state behind the last token; in the backward its gradient */
typedef struct upi_heads {
    const upipe_linear_attn *a;
    upipe_comm *comm;
    upipe_plan plan;
    upipe_linear_grad own, at;
    upipe_view *in[UPI_WAY_VIEWS], *out[UPI_WAY_VIEWS], *at_in[UPI_WAY_VIEWS], *at_out[UPI_WAY_VIEWS];
    int ins, outs, split, group, most; /* most: key heads of this rank in a stage */
    upipe_linear_pass pass;
    void *send;
    float *state;
} upi_heads;

/* Into how many parts the heads of a key head are shared out, so that all ranks have some. */
UPIPE_API int upi_heads_split(const upipe_linear_attn *a)
{
    const int group = upi_way_group(a);
    int split = 1;
    while (split < group && (group % split != 0 || a->q.h * split < a->plan->desc.ranks)) ++split;
    return split;
}

UPIPE_API upipe_status upi_heads_plan(upipe_plan *p, const upipe_linear_attn *a, upipe_err *e)
{
    const upipe_plan_desc *have = &a->plan->desc;
    const int split = upi_heads_split(a), heads = a->q.h * split, stage = a->stage_heads / (a->v.h / heads);
    upipe_plan_desc d;
    memset(&d, 0, sizeof d);
    d.tokens = have->tokens;
    d.ranks = have->ranks;
    d.rank = have->rank;
    d.heads = heads;
    d.head_dim = a->q.d;
    d.dtype = a->q.dtype;
    d.chunk = stage == 0 || stage > heads / have->ranks ? heads : stage * have->ranks;
    return upipe_plan_init(p, &d, e);
}

/* Heads of a view to one of the plan; those of a key head that is split are it itself. */
UPIPE_API int upi_heads_each(const upi_heads *w, upipe_view v)
{
    return v.h > w->plan.desc.heads ? v.h / w->plan.desc.heads : 1;
}

/* Bytes of a token and a head of the plan: its group's heads lie side by side. */
UPIPE_API size_t upi_heads_token(const upi_heads *w, upipe_view v)
{
    return (size_t)(upi_heads_each(w, v) * v.d) * upipe_dtype_bytes(v.dtype);
}

/* A rank's call: its own tokens, and what a stage has of all. */
UPIPE_API upipe_status upi_heads_begin(upipe_ctx *c, upi_heads *w, upipe_comm *comm,
                                       const upipe_linear_attn *a, const upipe_linear_attn_grad *grad)
{
    int i;
    memset(w, 0, sizeof *w);
    w->a = a;
    w->comm = comm;
    w->split = upi_heads_split(a);
    w->group = upi_way_group(a) / w->split;
    UPIPE_TRY(upi_heads_plan(&w->plan, a, &c->err));
    for (i = 0; i < w->plan.stages; ++i)
        if (upipe_plan_q(&w->plan, i, w->plan.desc.rank).count > w->most)
            w->most = upipe_plan_q(&w->plan, i, w->plan.desc.rank).count;
    w->own = w->at = upi_way_call(a, grad);
    w->at.a.pos = a->first;
    w->pass = grad != NULL ? UPIPE_LINEAR_BWD : UPIPE_LINEAR_FWD;
    if (grad == NULL) {
        w->ins = upi_way_fwd_views(&w->own, w->in, w->out, &w->outs);
        upi_way_fwd_views(&w->at, w->at_in, w->at_out, &w->outs);
    } else {
        w->ins = upi_way_bwd_views(&w->own, w->in, w->out, &w->outs);
        upi_way_bwd_views(&w->at, w->at_in, w->at_out, &w->outs);
    }
    return UPIPE_OK;
}

/* One tensor of the whole sequence. */
UPIPE_API void upi_heads_tensor(upi_heads *w, upi_way_layout *p, upipe_view own, upipe_view *at)
{
    const size_t bytes = (size_t)(w->plan.team_tokens * w->most) * upi_heads_token(w, own);
    void *const data = upi_way_place(p, bytes);
    at->data = p->base != NULL ? data : own.data; /* sizes alone: any address */
}

/* Lays out a direction's buffers at `base`, NULL: none; returns their bytes. */
UPIPE_API size_t upi_heads_layout(upipe_ctx *c, upi_heads *w, void *base)
{
    const int rank = w->plan.desc.rank;
    upi_way_layout p = upi_way_layout_make(base);
    size_t token = 0;
    upipe_linear x;
    int i, n, sent = 0, before = 0;
    w->at.a.work_bytes = 0;
    for (i = 0; i < w->ins; ++i) {
        upi_heads_tensor(w, &p, *w->in[i], w->at_in[i]);
        token = upipe_max_bytes(token, upi_heads_token(w, *w->in[i]));
    }
    for (i = 0; i < w->outs; ++i) {
        upi_heads_tensor(w, &p, *w->out[i], w->at_out[i]);
        token = upipe_max_bytes(token, upi_heads_token(w, *w->out[i]));
    }
    x = w->at.a;
    w->state = (float *)upi_way_place(&p, (size_t)(w->most * w->group * upi_way_size(w->a)) * 4);
    x.q.n = x.k.n = x.v.n = x.g.n = w->plan.team_tokens;
    if (x.beta.data != NULL) x.beta.n = w->plan.team_tokens;
    x.q.h = x.k.h = w->plan.desc.heads;
    for (i = 0; i < w->plan.stages; ++i, before = n) {
        const int all = upipe_plan_heads_sent(&w->plan, UPIPE_A2A_Q, i);
        if (all > sent) sent = all;
        n = upipe_plan_q(&w->plan, i, rank).count;
        if (n != before)
            w->at.a.work_bytes =
                upipe_max_bytes(w->at.a.work_bytes, upi_way_work(c, w->a->rules, x, n * w->group, w->pass));
    }
    w->send = upi_way_place(&p, (size_t)(w->plan.local * sent) * token);
    w->at.a.work = upi_way_place(&p, w->at.a.work_bytes);
    return p.bytes;
}

UPIPE_API upipe_status upi_heads_alloc(upipe_ctx *c, upi_heads *w)
{
    void *base;
    UPIPE_TRY(upipe_alloc(c, &base, upi_heads_layout(c, w, NULL), UPIPE_USE_SCRATCH, "linear_heads"));
    upi_heads_layout(c, w, base);
    return UPIPE_OK;
}

/* ---- a stage ---- */

/* `heads` heads of a view, from `first` on. */
UPIPE_API upipe_view upi_heads_some(upipe_view v, int first, int heads)
{
    v.data = upipe_view_at(v, 0, first);
    v.h = heads;
    return v;
}

/* The stage's heads of a tensor go into the send buffer, [rank][T][heads][d]. */
UPIPE_API upipe_status upi_heads_pack(upipe_ctx *c, const upi_heads *w, int stage, upipe_view own)
{
    const int each = upi_heads_each(w, own), same = own.h < w->plan.desc.heads ? w->split : 1;
    void *to = w->send;
    int r, i;
    for (r = 0; r < w->plan.desc.ranks; ++r) {
        const upipe_head_range part = upipe_plan_q(&w->plan, stage, r);
        const upipe_view block = upipe_view_packed(to, own.dtype, own.n, part.count * each, own.d);
        for (i = 0; i < part.count; i += same == 1 ? part.count : 1)
            UPIPE_TRY(
                c->ops->cast(c, upi_heads_some(block, i * each, same == 1 ? block.h : 1),
                             upi_heads_some(own, (part.first + i) / same * each, same == 1 ? block.h : 1)));
        to = upipe_view_at(block, own.n, 0);
    }
    return UPIPE_OK;
}

/* The reverse, of what has come back: gradients of a key head that is split are added up. */
UPIPE_API upipe_status upi_heads_unpack(upipe_ctx *c, const upi_heads *w, int stage, upipe_view own)
{
    const int each = upi_heads_each(w, own), same = own.h < w->plan.desc.heads ? w->split : 1;
    void *from = w->send;
    int r, i;
    for (r = 0; r < w->plan.desc.ranks; ++r) {
        const upipe_head_range part = upipe_plan_q(&w->plan, stage, r);
        const upipe_view block = upipe_view_packed(from, own.dtype, own.n, part.count * each, own.d);
        if (same == 1 && part.count > 0)
            UPIPE_TRY(c->ops->cast(c, upi_heads_some(own, part.first * each, block.h), block));
        for (i = 0; same > 1 && i < part.count; ++i)
            UPIPE_TRY(
                c->ops->add(c, upi_heads_some(own, (part.first + i) / same, 1), upi_heads_some(block, i, 1)));
        from = upipe_view_at(block, own.n, 0);
    }
    return UPIPE_OK;
}

/* Gradients that are added up begin with zeros. */
UPIPE_API upipe_status upi_heads_clear(upipe_ctx *c, const upi_heads *w, upipe_view own)
{
    if (own.h >= w->plan.desc.heads) return UPIPE_OK;
    UPIPE_TRY(c->ops->zero(c, w->send, (size_t)own.d * upipe_dtype_bytes(own.dtype)));
    return c->ops->cast(c, own, upipe_view_make(w->send, own.dtype, own.n, 0, own.h, 0, own.d));
}

/* What a stage reads comes to its heads; the views of the stage's call. */
UPIPE_API upipe_status upi_heads_load(upipe_ctx *c, upi_heads *w, int stage)
{
    const int n = upipe_plan_q(&w->plan, stage, w->plan.desc.rank).count;
    int i;
    for (i = 0; i < w->ins; ++i) {
        const upipe_view own = *w->in[i];
        UPIPE_TRY(upi_heads_pack(c, w, stage, own));
        UPIPE_TRY(upipe_a2a_to_heads(c, w->at_in[i]->data, w->send, &w->plan, stage, UPIPE_A2A_Q,
                                     upi_heads_token(w, own)));
        *w->at_in[i] = upipe_view_packed(w->at_in[i]->data, own.dtype, w->plan.team_tokens,
                                         n * upi_heads_each(w, own), own.d);
    }
    for (i = 0; i < w->outs; ++i)
        *w->at_out[i] = upipe_view_packed(w->at_out[i]->data, w->out[i]->dtype, w->plan.team_tokens,
                                          n * upi_heads_each(w, *w->out[i]), w->out[i]->d);
    return UPIPE_OK;
}

/* What a stage has written goes back to its tokens. */
UPIPE_API upipe_status upi_heads_store(upipe_ctx *c, upi_heads *w, int stage)
{
    int i;
    for (i = 0; i < w->outs; ++i) {
        UPIPE_TRY(upipe_a2a_to_tokens(c, w->send, w->at_out[i]->data, &w->plan, stage, UPIPE_A2A_Q,
                                      upi_heads_token(w, *w->out[i])));
        UPIPE_TRY(upi_heads_unpack(c, w, stage, *w->out[i]));
    }
    return UPIPE_OK;
}

/* A stage's states come from a carry, which lies on rank `root`, or go there. */
UPIPE_API upipe_status upi_heads_carry(upipe_ctx *c, upi_heads *w, int stage, int root, float *carry,
                                       float *state, int from_root)
{
    const int me = w->comm->rank;
    const size_t head = (size_t)(w->group * upi_way_size(w->a)) * 4;
    const size_t bytes = (size_t)upipe_plan_q(&w->plan, stage, me).count * head;
    upipe_msg *const list = w->comm->list;
    int r, used = 0;
    for (r = 0; me == root && r < w->comm->ranks; ++r) {
        const upipe_head_range part = upipe_plan_q(&w->plan, stage, r);
        void *const there = upipe_offset(carry, (size_t)part.first * head);
        const size_t size = (size_t)part.count * head, back = r == root ? size : 0;
        if (from_root)
            upipe_msg_add(list, &used, r, 1, there, size, 0, state, back, 0);
        else
            upipe_msg_add(list, &used, r, 1, state, back, 0, there, size, 0);
    }
    if (me != root && from_root) upipe_msg_add(list, &used, root, 1, NULL, 0, 0, state, bytes, 0);
    if (me != root && !from_root) upipe_msg_add(list, &used, root, 1, state, bytes, 0, NULL, 0, 0);
    UPIPE_TRY(upipe_comm_start(c, w->comm, list, used));
    return upipe_comm_wait(c, w->comm);
}

/* The state that a stage begins with: the carry's, or zeros. */
UPIPE_API upipe_status upi_heads_state(upipe_ctx *c, upi_heads *w, int stage, int root, float *carry,
                                       float *state)
{
    const int n = upipe_plan_q(&w->plan, stage, w->comm->rank).count * w->group;
    if (carry != NULL) return upi_heads_carry(c, w, stage, root, carry, state, 1);
    return n > 0 ? c->ops->zero(c, state, (size_t)(n * upi_way_size(w->a)) * 4) : UPIPE_OK;
}

/* ---- both directions ---- */

UPIPE_API upipe_status upi_heads_fwd_run(upipe_ctx *c, upipe_comm *comm, const upipe_linear_attn *a,
                                         float *states, float *carry)
{
    const upipe_scan s = upi_way_scan(a);
    const int on = carry != NULL && upi_scan_joined(&s, comm->ranks);
    int stage;
    upi_heads w;
    UPIPE_TRY(upi_heads_begin(c, &w, comm, a, NULL));
    UPIPE_TRY(upi_heads_alloc(c, &w));
    for (stage = 0; stage < w.plan.stages; ++stage) {
        const upipe_head_range part = upipe_plan_q(&w.plan, stage, comm->rank);
        float *const state = states + part.first * w.group * upi_way_size(a);
        UPIPE_TRY(upi_heads_load(c, &w, stage));
        UPIPE_TRY(upi_heads_state(c, &w, stage, 0, upi_scan_joined(&s, 0) ? carry : NULL, state));
        w.at.a.state = state;
        w.at.a.out = w.state;
        if (part.count > 0) UPIPE_TRY(upi_way_fwd_rule(c, a, &w.at.a));
        if (on) UPIPE_TRY(upi_heads_carry(c, &w, stage, 0, carry, w.state, 0));
        UPIPE_TRY(upi_heads_store(c, &w, stage));
    }
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_heads_bwd_run(upipe_ctx *c, upipe_comm *comm, const upipe_linear_attn_grad *g,
                                         const float *states, float *carry)
{
    const upipe_linear_attn *a = &g->a;
    const upipe_scan s = upi_way_scan(a);
    const int last = comm->ranks - 1, on = carry != NULL && upi_scan_joined(&s, 0);
    int stage;
    upi_heads w;
    UPIPE_TRY(upi_heads_begin(c, &w, comm, a, g));
    UPIPE_TRY(upi_heads_alloc(c, &w));
    UPIPE_TRY(upi_heads_clear(c, &w, g->dq));
    UPIPE_TRY(upi_heads_clear(c, &w, g->dk));
    for (stage = 0; stage < w.plan.stages; ++stage) {
        const upipe_head_range part = upipe_plan_q(&w.plan, stage, comm->rank);
        UPIPE_TRY(upi_heads_load(c, &w, stage));
        UPIPE_TRY(upi_heads_state(c, &w, stage, last, upi_scan_joined(&s, last + 1) ? carry : NULL, w.state));
        w.at.a.state = states + part.first * w.group * upi_way_size(a);
        w.at.dstate = w.state;
        if (part.count > 0) UPIPE_TRY(upi_way_bwd_rule(c, a, &w.at));
        if (on) UPIPE_TRY(upi_heads_carry(c, &w, stage, last, carry, w.state, 0));
        UPIPE_TRY(upi_heads_store(c, &w, stage));
    }
    return UPIPE_OK;
}

/* ---- bytes ---- */

UPIPE_API size_t upi_heads_fwd_bytes(upipe_ctx *c, const upipe_linear_attn *a)
{
    upi_heads w;
    return upi_heads_begin(c, &w, NULL, a, NULL) == UPIPE_OK ? upi_heads_layout(c, &w, NULL) : 0;
}

/* A backward's gradients have the shapes of what they are of. */
UPIPE_API size_t upi_heads_bwd_bytes(upipe_ctx *c, const upipe_linear_attn *a)
{
    upipe_linear_attn_grad g;
    upi_heads w;
    memset(&g, 0, sizeof g);
    g.a = *a;
    g.dout = g.dv = a->v, g.dq = a->q, g.dk = a->k, g.dg = a->g, g.dbeta = a->beta;
    return upi_heads_begin(c, &w, NULL, a, &g) == UPIPE_OK ? upi_heads_layout(c, &w, NULL) : 0;
}

/* Heads that this rank has in all stages. */
UPIPE_API int upi_heads_own(const upipe_linear_attn *a)
{
    upipe_err e;
    upipe_plan p;
    if (upi_heads_plan(&p, a, &e) != UPIPE_OK) return 0;
    return upipe_plan_before(&p, p.stages, p.desc.rank) * (a->v.h / p.desc.heads);
}

/* Bytes to other ranks: their heads of the plan of this rank's tokens, `to_heads` bytes a token, and this rank's heads of
 * theirs, `to_tokens`; and states between a carry on rank `root` and all others, each way where it goes on. */
UPIPE_API int64_t upi_heads_sent(const upipe_linear_attn *a, int64_t to_heads, int64_t to_tokens, int root,
                                 int out_of_root, int into_root)
{
    const int64_t head = upi_way_group(a) / upi_heads_split(a) * upi_way_size(a) * 4;
    upipe_err e;
    upipe_plan p;
    int64_t mine, others;
    if (upi_heads_plan(&p, a, &e) != UPIPE_OK) return 0;
    mine = upipe_plan_before(&p, p.stages, p.desc.rank);
    others = p.desc.heads - mine;
    return others * p.local * to_heads + mine * (p.team_tokens - p.local) * to_tokens +
           (p.desc.rank == root ? (out_of_root ? others * head : 0)
            : into_root         ? mine * head
                                : 0);
}

/* Bytes of a token and head of the plan: q and k, or their gradients; v or o; gates. */
typedef struct upi_heads_row {
    int64_t keys, value, gates;
} upi_heads_row;

UPIPE_API upi_heads_row upi_heads_row_of(const upipe_linear_attn *a)
{
    const int64_t e = (int64_t)upipe_dtype_bytes(a->q.dtype), group = upi_way_group(a) / upi_heads_split(a);
    upi_heads_row r;
    r.keys = 2 * a->q.d * e;
    r.value = group * a->v.d * e;
    r.gates = group * (a->beta.data != NULL ? 8 : 4);
    return r;
}

UPIPE_API int64_t upi_heads_fwd_sent(const upipe_linear_attn *a, int carried)
{
    const upipe_scan s = upi_way_scan(a);
    const upi_heads_row r = upi_heads_row_of(a);
    return upi_heads_sent(a, r.keys + r.value + r.gates, r.value, 0, carried && upi_scan_joined(&s, 0),
                          carried && upi_scan_joined(&s, upi_scan_ranks(&s)));
}

UPIPE_API int64_t upi_heads_bwd_sent(const upipe_linear_attn *a, int carried)
{
    const upipe_scan s = upi_way_scan(a);
    const upi_heads_row r = upi_heads_row_of(a);
    const int ranks = upi_scan_ranks(&s);
    return upi_heads_sent(a, r.keys + 2 * r.value + r.gates, r.keys + r.value + r.gates, ranks - 1,
                          carried && upi_scan_joined(&s, ranks), carried && upi_scan_joined(&s, 0));
}

#endif

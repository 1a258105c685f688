/* scan.h -- all ranks at once from a zero state, then corrected        part of upipe_linear_attn.h
 *
 * What a rank's tokens do to a state is a map, S -> A S + B; A is [key_dim][key_dim] a head, and with a scalar decay one
 * number. Both come from the rule: B is the state behind the last token from zeros, A that from the unit matrix with
 * v = 0, whose output is Q~. Maps go to all later ranks, and each makes the state before its first token of those before
 * it. Its output is that from zeros, plus Q~ S.
 *
 * In the backward D = Q~^T dO is the gradient of the state before a rank's first token, as far as its own output reads
 * it; (A, D) go to all earlier ranks, and dS -> A^T dS + D is the map. With the state's gradient behind its last token
 * a rank then runs the rule's backward.
 *
 * A border of documents among a rank's tokens makes A = 0: nobody behind it asks the ranks before it. Names begin with
 * upi_maps_: those of upi_scan_ are the pass's, upipe_scan.h. */
#ifndef UPIPE_WAY_SCAN_H
#define UPIPE_WAY_SCAN_H

#include "types.h"

/* ---- whose maps make a state ---- */

/* Whether a document begins among a rank's tokens: the state behind them does not depend on the one before them. */
UPIPE_API int upi_maps_cut(const upipe_scan *s, int rank)
{
    return upipe_border_before(&s->borders, upi_scan_pos(s, rank + 1) - 1) >= upi_scan_pos(s, rank);
}

/* The state before rank `to` (the number of ranks: behind the last one) is made of the maps of ranks from .. to - 1, of the
 * first of which B alone is read. Returns from; `to`: of none. */
UPIPE_API int upi_maps_from(const upipe_scan *s, int to)
{
    int from = to;
    while (from > 0 && upi_scan_joined(s, from))
        if (upi_maps_cut(s, --from)) break;
    return from;
}

/* The same in the backward: the gradient behind rank `to` (-1: before the first one) is made of ranks to + 1 .. */
UPIPE_API int upi_maps_until(const upipe_scan *s, int to)
{
    int until = to;
    while (until + 1 < upi_scan_ranks(s) && upi_scan_joined(s, until + 1))
        if (upi_maps_cut(s, ++until)) break;
    return until;
}

/* ---- a direction of one rank ---- */

/* Buffers, of as many heads as a stage has.
 *   map    [heads] B or D, then [heads] A: what this rank sends
 *   maps   the same of each rank that this one, or its carry, asks
 *   square [heads][key_dim][key_dim]: A before it is one number
 *   q      [T][heads][key_dim]: Q~;  sum f32 [T][value_dim]: Q~ S of a head;  state of a head, in the storage type
 *   zero   a row of zeros: v;  row  f32 [key_dim + 1]: with what a unit matrix begins */
typedef struct upi_maps {
    const upipe_linear_attn *a;
    upipe_comm *comm;
    upipe_scan s;
    upipe_linear_grad call;
    int rank, last, heads, carried; /* heads: of a stage at most */
    int asks, most, applies; /* maps come for the state of rank `asks`, so many; applies: Q~ is wanted */
    float *map, *maps, *square, *sum, *row;
    void *q, *state, *zero, *work;
    size_t work_bytes;
} upi_maps;

/* Elements of A of a head that are sent. */
UPIPE_API int64_t upi_maps_a(const upipe_linear_attn *a)
{
    return a->beta.data != NULL ? (int64_t)a->q.d * a->q.d : 1;
}

UPIPE_API int64_t upi_maps_size(const upi_maps *w, int heads)
{
    return heads * (upi_way_size(w->a) + upi_maps_a(w->a));
}

UPIPE_API void upi_maps_begin(upi_maps *w, upipe_comm *comm, const upipe_linear_attn *a,
                              const upipe_linear_attn_grad *grad, int carried)
{
    memset(w, 0, sizeof *w);
    w->a = a;
    w->comm = comm;
    w->s = upi_way_scan(a);
    w->call = upi_way_call(a, grad);
    w->rank = upi_scan_rank(&w->s);
    w->last = upi_scan_ranks(&w->s) - 1;
    w->heads = upi_scan_stage_heads(&w->s);
    w->carried = carried;
}

/* Heads of a stage. */
UPIPE_API int upi_maps_stage(const upi_maps *w, int stage, int *first)
{
    *first = stage * w->heads;
    return w->s.heads - *first < w->heads ? w->s.heads - *first : w->heads;
}

/* ---- products ---- */

/* Matrices of `heads` heads, [rows][columns] each, one behind the other. */
UPIPE_API upipe_view upi_maps_view(const float *p, int heads, int64_t rows, int64_t columns)
{
    return upipe_view_make((void *)(uintptr_t)p, UPIPE_F32, rows, columns, heads, rows * columns,
                           (int32_t)columns);
}

/* A state as a map sees it: columns are states of their own, and with one number for A all elements are. */
UPIPE_API upipe_view upi_maps_state(const upi_maps *w, const float *p, int heads)
{
    const int64_t rows = w->a->beta.data != NULL ? w->a->q.d : 1;
    return upi_maps_view(p, heads, rows, upi_way_size(w->a) / rows);
}

UPIPE_API upipe_view upi_maps_matrix(const upi_maps *w, const float *p, int heads)
{
    const int64_t rows = w->a->beta.data != NULL ? w->a->q.d : 1;
    return upi_maps_view(p, heads, rows, rows);
}

/* Q~, [T][heads][key_dim] */
UPIPE_API upipe_view upi_maps_q(const upi_maps *w, int heads)
{
    return upipe_view_packed(w->q, w->a->q.dtype, w->a->q.n, heads, w->a->q.d);
}

/* One head of a view, as a matrix. */
UPIPE_API upipe_view upi_maps_head(upipe_view v, int head)
{
    v.data = upipe_view_at(v, 0, head);
    v.h = 1;
    return v;
}

UPIPE_API upipe_status upi_maps_gemm(upipe_ctx *c, const upi_maps *w, upipe_view out, upipe_view x,
                                     upipe_view y, int flags)
{
    return c->ops->gemm(c, out, x, y, flags, w->work, w->work_bytes);
}

/* The call that makes A and Q~ of a stage: v = 0. */
UPIPE_API upipe_linear upi_maps_unit(const upi_maps *w, upipe_linear_grad call)
{
    upipe_linear x = call.a;
    x.v = upipe_view_make(w->zero, x.q.dtype, x.q.n, 0, x.v.h, 0, x.q.d);
    x.o = upi_maps_q(w, x.v.h);
    x.state = x.out = w->square;
    x.work = w->work;
    x.work_bytes = w->work_bytes;
    return x;
}

/* Scratch: of the rule on both calls and a backward, and of the products. */
UPIPE_API size_t upi_maps_work(upipe_ctx *c, upi_maps *w, upipe_linear_pass pass)
{
    const upipe_linear_attn *a = w->a;
    const upipe_ops *ops = c->ops;
    const upipe_view state = upi_maps_state(w, NULL, w->heads), head = upi_maps_view(NULL, 1, a->q.d, a->v.d);
    const upipe_view sum = upi_maps_view(NULL, 1, a->q.n, a->v.d);
    upipe_view cast = head, out = a->v;
    upipe_linear unit = upi_way_call(a, NULL).a;
    size_t bytes;
    unit.v.d = a->q.d;
    bytes = upipe_max_bytes(upi_way_stages_work(c, a, upi_way_call(a, NULL).a, pass),
                            upi_way_stages_work(c, a, unit, UPIPE_LINEAR_FWD));
    cast.dtype = a->q.dtype;
    out.h = w->heads;
    bytes = upipe_max_bytes(bytes, ops->gemm_bytes(ops, state, upi_maps_matrix(w, NULL, w->heads), state,
                                                   UPIPE_GEMM_ACCUMULATE | UPIPE_GEMM_TRANS_A));
    bytes = upipe_max_bytes(
        bytes, ops->gemm_bytes(ops, state, upi_maps_matrix(w, NULL, w->heads), state, UPIPE_GEMM_ACCUMULATE));
    bytes =
        upipe_max_bytes(bytes, ops->gemm_bytes(ops, sum, upi_maps_head(upi_maps_q(w, w->heads), 0), cast, 0));
    return upipe_max_bytes(bytes, ops->gemm_bytes(ops, upi_maps_view(NULL, w->heads, a->q.d, a->v.d),
                                                  upi_maps_q(w, w->heads), out, UPIPE_GEMM_TRANS_A));
}

/* ---- maps ---- */

/* Unit matrices: their elements repeat after key_dim + 1, so ever longer beginnings are copied behind themselves. */
UPIPE_API upipe_status upi_maps_units(upipe_ctx *c, float *out, const float *row, int heads, int64_t dim)
{
    const int64_t matrix = dim * dim;
    int64_t have = dim + 1 < matrix ? dim + 1 : matrix, end = have < matrix ? matrix : heads * matrix;
    UPIPE_TRY(c->ops->copy(c, out, row, (size_t)have * 4));
    while (have < heads * matrix) {
        const int64_t n = have < end - have ? have : end - have;
        UPIPE_TRY(c->ops->copy(c, out + have, out, (size_t)n * 4));
        have += n;
        if (have == matrix) end = heads * matrix; /* from here on whole matrices */
    }
    return UPIPE_OK;
}

/* A and Q~ of a stage; A goes behind B or D. */
UPIPE_API upipe_status upi_maps_apply(upipe_ctx *c, upi_maps *w, upipe_linear_grad call)
{
    const upipe_linear x = upi_maps_unit(w, call);
    const int heads = x.v.h;
    const int64_t dim = x.q.d, n = upi_maps_a(w->a);
    float *const to = w->map + heads * upi_way_size(w->a);
    UPIPE_TRY(upi_maps_units(c, w->square, w->row, heads, dim));
    UPIPE_TRY(upi_way_fwd_rule(c, w->a, &x));
    if (n > 1) return c->ops->copy(c, to, w->square, (size_t)(heads * n) * 4);
    return c->ops->cast(c, upipe_view_packed(to, UPIPE_F32, heads, 1, 1),
                        upipe_view_make(w->square, UPIPE_F32, heads, dim * dim, 1, 1, 1));
}

/* The i-th map that came. */
UPIPE_API float *upi_maps_at(const upi_maps *w, int heads, int i)
{
    return w->maps + i * upi_maps_size(w, heads);
}

/* The bytes of a map, B or D alone, or with A. */
UPIPE_API size_t upi_maps_bytes(const upi_maps *w, int heads, int whole)
{
    return (size_t)(whole ? upi_maps_size(w, heads) : heads * upi_way_size(w->a)) * 4;
}

/* Bytes from this rank for the state before rank `to`, and in the backward for the gradient behind it. */
UPIPE_API size_t upi_maps_fwd_part(const upi_maps *w, int heads, int to)
{
    const int from = upi_maps_from(&w->s, to);
    return from <= w->rank ? upi_maps_bytes(w, heads, w->rank > from) : 0;
}

UPIPE_API size_t upi_maps_bwd_part(const upi_maps *w, int heads, int to)
{
    const int until = upi_maps_until(&w->s, to);
    return until >= w->rank ? upi_maps_bytes(w, heads, w->rank < until) : 0;
}

/* Forward: maps go to later ranks, and with a carry to rank 0, which asks for the state behind the last one. */
UPIPE_API upipe_status upi_maps_trade_fwd(upipe_ctx *c, upi_maps *w, int heads)
{
    const int ranks = w->last + 1, from = w->asks - w->most;
    upipe_msg *const list = w->comm->list;
    int used = 0, to, i;
    for (to = w->rank + 1; to < ranks + w->carried; ++to)
        upipe_msg_add(list, &used, to % ranks, 1, w->map, upi_maps_fwd_part(w, heads, to), 0, NULL, 0, 0);
    for (i = from; i < w->asks; ++i)
        upipe_msg_add(list, &used, i, 1, NULL, 0, 0, upi_maps_at(w, heads, i - from),
                      upi_maps_bytes(w, heads, i > from), 0);
    UPIPE_TRY(upipe_comm_start(c, w->comm, list, used));
    return upipe_comm_wait(c, w->comm);
}

/* Backward: to earlier ranks, and with a carry to the last one, which asks for the gradient before the first one. */
UPIPE_API upipe_status upi_maps_trade_bwd(upipe_ctx *c, upi_maps *w, int heads)
{
    const int ranks = w->last + 1, until = w->asks + w->most;
    upipe_msg *const list = w->comm->list;
    int used = 0, to, i;
    for (to = w->rank - 1; to >= -w->carried; --to)
        upipe_msg_add(list, &used, (to + ranks) % ranks, 1, w->map, upi_maps_bwd_part(w, heads, to), 0, NULL,
                      0, 0);
    for (i = until; i > w->asks; --i)
        upipe_msg_add(list, &used, i, 1, NULL, 0, 0, upi_maps_at(w, heads, until - i),
                      upi_maps_bytes(w, heads, i < until), 0);
    UPIPE_TRY(upipe_comm_start(c, w->comm, list, used));
    return upipe_comm_wait(c, w->comm);
}

/* The maps that came, one after the other; `out` becomes the state, or its gradient, that they make. */
UPIPE_API upipe_status upi_maps_join(upipe_ctx *c, const upi_maps *w, int heads, int n, int flags, float *out)
{
    const int64_t size = upi_way_size(w->a);
    int i;
    for (i = 1; i < n; ++i) {
        const float *const a = upi_maps_at(w, heads, i) + heads * size;
        UPIPE_TRY(upi_maps_gemm(
            c, w, upi_maps_state(w, upi_maps_at(w, heads, i), heads), upi_maps_matrix(w, a, heads),
            upi_maps_state(w, upi_maps_at(w, heads, i - 1), heads), flags | UPIPE_GEMM_ACCUMULATE));
    }
    return c->ops->copy(c, out, upi_maps_at(w, heads, n - 1), (size_t)(heads * size) * 4);
}

/* ---- buffers ---- */

/* Lays out a direction's buffers at `base`, NULL: none; returns their bytes. */
UPIPE_API size_t upi_maps_layout(upipe_ctx *c, upi_maps *w, upipe_linear_pass pass, void *base)
{
    const upipe_linear_attn *a = w->a;
    const size_t e = upipe_dtype_bytes(a->q.dtype), n = (size_t)a->q.n, heads = (size_t)w->heads;
    const size_t map = upi_maps_bytes(w, w->heads, 1), dim = (size_t)a->q.d, state = (size_t)upi_way_size(a);
    upi_way_layout p = upi_way_layout_make(base);
    w->map = (float *)upi_way_place(&p, map);
    w->maps = (float *)upi_way_place(&p, (size_t)w->most * map);
    if (w->applies) {
        w->square = (float *)upi_way_place(&p, heads * dim * dim * 4);
        w->q = upi_way_place(&p, n * heads * dim * e);
        w->zero = upi_way_place(&p, dim * e);
        w->row = (float *)upi_way_place(&p, (dim + 1) * 4);
    }
    if (w->applies && pass == UPIPE_LINEAR_FWD) {
        w->sum = (float *)upi_way_place(&p, n * (size_t)a->v.d * 4);
        w->state = upi_way_place(&p, state * e);
    }
    w->work_bytes = upi_maps_work(c, w, pass);
    w->work = upi_way_place(&p, w->work_bytes);
    return p.bytes;
}

UPIPE_API upipe_status upi_maps_alloc(upipe_ctx *c, upi_maps *w, upipe_linear_pass pass)
{
    const float row[UPIPE_LINEAR_DIM_MAX + 1] = {1};
    const size_t dim = (size_t)w->a->q.d;
    void *base;
    UPIPE_TRY(upipe_alloc(c, &base, upi_maps_layout(c, w, pass, NULL), UPIPE_USE_SCRATCH, "linear_maps"));
    upi_maps_layout(c, w, pass, base);
    if (!w->applies) return UPIPE_OK;
    UPIPE_TRY(c->ops->copy(c, w->row, row, (dim + 1) * 4));
    return c->ops->zero(c, w->zero, dim * upipe_dtype_bytes(w->a->q.dtype));
}

/* What a forward of this rank needs: it applies its map where a state comes from before it. */
UPIPE_API void upi_maps_begin_fwd(upi_maps *w, upipe_comm *comm, const upipe_linear_attn *a, int carried)
{
    upi_maps_begin(w, comm, a, NULL, carried);
    w->asks = w->rank > 0 ? w->rank : carried ? w->last + 1 : 0;
    w->most = w->asks - upi_maps_from(&w->s, w->asks);
    w->applies = w->rank > 0 && w->most > 0;
}

/* What a backward needs: where a state came from before it, or from a carry, somebody asks for its gradient. */
UPIPE_API void upi_maps_begin_bwd(upi_maps *w, upipe_comm *comm, const upipe_linear_attn *a,
                                  const upipe_linear_attn_grad *grad, int carried)
{
    upi_maps_begin(w, comm, a, grad, carried);
    w->asks = w->rank < w->last ? w->rank : carried ? -1 : w->last;
    w->most = upi_maps_until(&w->s, w->asks) - w->asks;
    w->applies = upi_scan_joined(&w->s, w->rank) && (w->rank > 0 || carried);
}

/* ---- both directions ---- */

/* o += Q~ S */
UPIPE_API upipe_status upi_maps_correct(upipe_ctx *c, const upi_maps *w, upipe_view o, const float *states)
{
    const upipe_linear_attn *a = w->a;
    const upipe_view sum = upi_maps_view(w->sum, 1, o.n, o.d);
    const upipe_view state = upipe_view_packed(w->state, o.dtype, a->q.d, 1, a->v.d);
    int head;
    for (head = 0; head < o.h; ++head) {
        const float *const s = states + head * upi_way_size(a);
        UPIPE_TRY(c->ops->cast(c, state, upi_maps_view(s, 1, a->q.d, a->v.d)));
        UPIPE_TRY(upi_maps_gemm(c, w, sum, upi_maps_head(upi_maps_q(w, o.h), head), state, 0));
        UPIPE_TRY(c->ops->add(c, upi_maps_head(o, head), sum));
    }
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_maps_stage_fwd(upipe_ctx *c, upi_maps *w, int first, int heads, float *states,
                                          float *carry)
{
    const size_t bytes = upi_maps_bytes(w, heads, 0);
    upipe_linear_grad g = upi_way_stage(w->call, first, heads);
    if (w->rank == 0 && carry != NULL && upi_scan_joined(&w->s, 0))
        UPIPE_TRY(c->ops->copy(c, states, carry, bytes));
    else
        UPIPE_TRY(c->ops->zero(c, states, bytes));
    g.a.state = states, g.a.out = w->map;
    g.a.work = w->work, g.a.work_bytes = w->work_bytes;
    UPIPE_TRY(upi_way_fwd_rule(c, w->a, &g.a));
    if (w->applies) UPIPE_TRY(upi_maps_apply(c, w, g));
    UPIPE_TRY(upi_maps_trade_fwd(c, w, heads));
    if (w->most == 0) return UPIPE_OK;
    if (w->rank == 0) return upi_maps_join(c, w, heads, w->most, 0, carry);
    UPIPE_TRY(upi_maps_join(c, w, heads, w->most, 0, states));
    return upi_maps_correct(c, w, g.a.o, states);
}

UPIPE_API upipe_status upi_maps_fwd_run(upipe_ctx *c, upipe_comm *comm, const upipe_linear_attn *a,
                                        float *states, float *carry)
{
    int stage, first, n;
    upi_maps w;
    upi_maps_begin_fwd(&w, comm, a, carry != NULL);
    UPIPE_TRY(upi_maps_alloc(c, &w, UPIPE_LINEAR_FWD));
    for (stage = 0; stage < upipe_scan_stages(&w.s); ++stage) {
        n = upi_maps_stage(&w, stage, &first);
        UPIPE_TRY(upi_maps_stage_fwd(c, &w, first, n, states + first * upi_way_size(a),
                                     carry != NULL ? carry + first * upi_way_size(a) : NULL));
    }
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_maps_stage_bwd(upipe_ctx *c, upi_maps *w, int first, int heads,
                                          const float *states, float *carry)
{
    const size_t bytes = upi_maps_bytes(w, heads, 0);
    const int64_t size = upi_way_size(w->a);
    const int end = w->rank == w->last && carry != NULL && upi_scan_joined(&w->s, w->last + 1);
    upipe_linear_grad g = upi_way_stage(w->call, first, heads);
    if (w->applies) {
        UPIPE_TRY(upi_maps_apply(c, w, g));
        UPIPE_TRY(upi_maps_gemm(c, w, upi_maps_view(w->map, heads, w->a->q.d, w->a->v.d),
                                upi_maps_q(w, heads), g.dout, UPIPE_GEMM_TRANS_A));
        if (end)
            UPIPE_TRY(upi_maps_gemm(
                c, w, upi_maps_state(w, w->map, heads), upi_maps_matrix(w, w->map + heads * size, heads),
                upi_maps_state(w, carry, heads), UPIPE_GEMM_ACCUMULATE | UPIPE_GEMM_TRANS_A));
    }
    UPIPE_TRY(upi_maps_trade_bwd(c, w, heads));
    if (end)
        UPIPE_TRY(c->ops->copy(c, w->map, carry, bytes));
    else if (w->rank < w->last && w->most > 0)
        UPIPE_TRY(upi_maps_join(c, w, heads, w->most, UPIPE_GEMM_TRANS_A, w->map));
    else
        UPIPE_TRY(c->ops->zero(c, w->map, bytes));
    if (w->rank == w->last && w->most > 0)
        UPIPE_TRY(upi_maps_join(c, w, heads, w->most, UPIPE_GEMM_TRANS_A, carry));
    g.a.state = states, g.dstate = w->map;
    g.a.work = w->work, g.a.work_bytes = w->work_bytes;
    return upi_way_bwd_rule(c, w->a, &g);
}

UPIPE_API upipe_status upi_maps_bwd_run(upipe_ctx *c, upipe_comm *comm, const upipe_linear_attn_grad *g,
                                        const float *states, float *carry)
{
    int stage, first, n;
    upi_maps w;
    upi_maps_begin_bwd(&w, comm, &g->a, g, carry != NULL);
    UPIPE_TRY(upi_maps_alloc(c, &w, UPIPE_LINEAR_BWD));
    for (stage = 0; stage < upipe_scan_stages(&w.s); ++stage) {
        n = upi_maps_stage(&w, stage, &first);
        UPIPE_TRY(upi_maps_stage_bwd(c, &w, first, n, states + first * upi_way_size(&g->a),
                                     carry != NULL ? carry + first * upi_way_size(&g->a) : NULL));
    }
    return UPIPE_OK;
}

/* ---- bytes ---- */

UPIPE_API size_t upi_maps_fwd_bytes(upipe_ctx *c, const upipe_linear_attn *a, int carried)
{
    upi_maps w;
    upi_maps_begin_fwd(&w, NULL, a, carried);
    return upi_maps_layout(c, &w, UPIPE_LINEAR_FWD, NULL);
}

UPIPE_API size_t upi_maps_bwd_bytes(upipe_ctx *c, const upipe_linear_attn *a, int carried)
{
    upi_maps w;
    upi_maps_begin_bwd(&w, NULL, a, NULL, carried);
    return upi_maps_layout(c, &w, UPIPE_LINEAR_BWD, NULL);
}

UPIPE_API int64_t upi_maps_fwd_sent(const upipe_linear_attn *a, int carried)
{
    int64_t bytes = 0;
    int to;
    upi_maps w;
    upi_maps_begin(&w, NULL, a, NULL, carried);
    for (to = w.rank + 1; to <= w.last + carried; ++to)
        if (to % (w.last + 1) != w.rank) bytes += (int64_t)upi_maps_fwd_part(&w, a->v.h, to);
    return bytes;
}

UPIPE_API int64_t upi_maps_bwd_sent(const upipe_linear_attn *a, int carried)
{
    int64_t bytes = 0;
    int to;
    upi_maps w;
    upi_maps_begin(&w, NULL, a, NULL, carried);
    for (to = w.rank - 1; to >= -carried; --to)
        if ((to + w.last + 1) % (w.last + 1) != w.rank) bytes += (int64_t)upi_maps_bwd_part(&w, a->v.h, to);
    return bytes;
}

#endif

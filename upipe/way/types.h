/* types.h -- a call of linear attention over ranks, and what its ways share        part of upipe_linear_attn.h */
#ifndef UPIPE_WAY_TYPES_H
#define UPIPE_WAY_TYPES_H

#include "../upipe_a2a.h"
#include "../upipe_agree.h"
#include "../upipe_linear.h"
#include "../upipe_scan.h"

/* upipe_way -- how ranks share the work
 *   PASS   the state goes from rank to rank in stages of heads (upipe_scan.h)
 *   SCAN   all ranks work at once from a zero state, then add what the state before them changes
 *   HEADS  all-to-alls in stages of heads: a rank has all tokens of its heads */
typedef enum upipe_way { UPIPE_WAY_PASS, UPIPE_WAY_SCAN, UPIPE_WAY_HEADS, UPIPE_WAYS } upipe_way;

/* upipe_linear_attn -- forward. All but the data is the same on all ranks
 *   plan         says which tokens a rank has; contiguous, of one sequence. Its heads and head dims are not read
 *   rules        of the rank's device, the same ones everywhere
 *   first        position of the plan's first token among the borders; 0, or where a segment begins
 *   borders      of packed documents, in host memory
 *   q k          [tokens of this rank][key_heads][key_dim]
 *   v o          [tokens of this rank][heads][value_dim]; one storage type. o is written and does not overlap the others
 *   g beta       f32 [tokens of this rank][heads][1]; beta.data NULL: scalar decay
 *   stage_heads  heads that a rank works on at a time, whole groups of a key head; 0 = all
 *   chunk scale  as in upipe_linear
 */
typedef struct upipe_linear_attn {
    upipe_way way;
    const upipe_plan *plan;
    const upipe_linear_ops *rules;
    upipe_view q, k, v, o, g, beta;
    int64_t first;
    upipe_borders borders;
    int stage_heads, chunk;
    float scale;
} upipe_linear_attn;

/* upipe_linear_attn_grad -- backward; everything between is computed again
 *   a         the forward's arguments; o is not read
 *   dout      gradient of o, shape and type of v
 *   dq dk dv  shape and type of q, k, v, written
 *   dg dbeta  f32, written; dbeta is not accessed without beta
 */
typedef struct upipe_linear_attn_grad {
    upipe_linear_attn a;
    upipe_view dout, dq, dk, dv, dg, dbeta;
} upipe_linear_attn_grad;

/* upipe_way_name -- for tables and sentences */
UPIPE_API const char *upipe_way_name(upipe_way way)
{
    static const char *const names[UPIPE_WAYS] = {"pass", "scan", "heads"};
    return names[way];
}

/* ---- shapes ---- */

/* Heads that read one key head. */
UPIPE_API int upi_way_group(const upipe_linear_attn *a)
{
    return a->v.h / a->q.h;
}

/* Elements of a state of one head. */
UPIPE_API int64_t upi_way_size(const upipe_linear_attn *a)
{
    return (int64_t)a->q.d * a->v.d;
}

/* What goes over ranks, as upipe_scan.h says it: positions, borders, stages. */
UPIPE_API upipe_scan upi_way_scan(const upipe_linear_attn *a)
{
    upipe_scan s;
    memset(&s, 0, sizeof s);
    s.plan = a->plan;
    s.first = a->first;
    s.borders = a->borders;
    s.heads = a->v.h;
    s.key_dim = a->q.d;
    s.value_dim = a->v.d;
    s.stage_heads = a->stage_heads;
    return s;
}

/* The rule's call on this rank's tokens and all heads, but for states and scratch; `views` gives a backward's as well. */
UPIPE_API upipe_linear_grad upi_way_call(const upipe_linear_attn *a, const upipe_linear_attn_grad *views)
{
    upipe_linear_grad g;
    memset(&g, 0, sizeof g);
    g.a.q = a->q, g.a.k = a->k, g.a.v = a->v, g.a.o = a->o, g.a.g = a->g, g.a.beta = a->beta;
    g.a.pos = a->first + upipe_shard_pos(&a->plan->shard, 0);
    g.a.borders = a->borders;
    g.a.chunk = a->chunk;
    g.a.scale = a->scale;
    if (views == NULL) return g;
    g.dout = views->dout, g.dq = views->dq, g.dk = views->dk, g.dv = views->dv;
    g.dg = views->dg, g.dbeta = views->dbeta;
    return g;
}

enum { UPI_WAY_VIEWS = 6 };

/* A call's views: what a direction reads, and what it writes. Returns how many are read; *outs: written. */
UPIPE_API int upi_way_fwd_views(upipe_linear_grad *g, upipe_view **in, upipe_view **out, int *outs)
{
    in[0] = &g->a.q, in[1] = &g->a.k, in[2] = &g->a.v, in[3] = &g->a.g, in[4] = &g->a.beta;
    out[0] = &g->a.o;
    *outs = 1;
    return g->a.beta.data != NULL ? 5 : 4;
}

UPIPE_API int upi_way_bwd_views(upipe_linear_grad *g, upipe_view **in, upipe_view **out, int *outs)
{
    const int delta = g->a.beta.data != NULL;
    in[0] = &g->a.q, in[1] = &g->a.k, in[2] = &g->a.v, in[3] = &g->a.g, in[4] = &g->dout, in[5] = &g->a.beta;
    out[0] = &g->dq, out[1] = &g->dk, out[2] = &g->dv, out[3] = &g->dg, out[4] = &g->dbeta;
    *outs = delta ? 5 : 4;
    return delta ? 6 : 5;
}

/* Heads first .. first + heads - 1 of a view that has `all`, or the key heads that these read. */
UPIPE_API void upi_way_cut(upipe_view *v, int all, int first, int heads)
{
    const int group = all / v->h;
    v->data = v->data != NULL ? upipe_view_at(*v, 0, first / group) : NULL;
    v->h = heads / group;
}

/* A call on some heads: whole groups. */
UPIPE_API upipe_linear_grad upi_way_stage(upipe_linear_grad g, int first, int heads)
{
    upipe_view *in[UPI_WAY_VIEWS], *out[UPI_WAY_VIEWS];
    const int all = g.a.v.h, backward = g.dout.data != NULL;
    int i, outs,
        ins = backward ? upi_way_bwd_views(&g, in, out, &outs) : upi_way_fwd_views(&g, in, out, &outs);
    for (i = 0; i < ins; ++i) upi_way_cut(in[i], all, first, heads);
    for (i = 0; i < outs; ++i) upi_way_cut(out[i], all, first, heads);
    return g;
}

/* ---- buffers: sizes and addresses by one walk ---- */

typedef struct upi_way_layout {
    char *base; /* NULL: sizes alone */
    size_t bytes;
} upi_way_layout;

UPIPE_API void *upi_way_place(upi_way_layout *p, size_t bytes)
{
    void *const at = upipe_offset(p->base, p->bytes);
    p->bytes += (bytes + UPIPE_MEM_ALIGN - 1) / UPIPE_MEM_ALIGN * UPIPE_MEM_ALIGN;
    return at;
}

UPIPE_API upi_way_layout upi_way_layout_make(void *base)
{
    upi_way_layout p;
    p.base = (char *)base;
    p.bytes = 0;
    return p;
}

/* ---- the rule ---- */

/* Scratch of the rule on the tokens of `x` and this many of its heads. */
UPIPE_API size_t upi_way_work(upipe_ctx *c, const upipe_linear_ops *rules, upipe_linear x, int heads,
                              upipe_linear_pass pass)
{
    const float state = 0;
    const int group = x.v.h / x.q.h;
    if (heads == 0) return 0;
    x.q.h = x.k.h = heads / group;
    x.v.h = x.g.h = heads;
    if (x.beta.data != NULL) x.beta.h = heads;
    x.state = &state;
    return upipe_linear_bytes(c, rules, &x, pass);
}

/* Scratch of the rule in stages of heads: the first one's or the last one's. */
UPIPE_API size_t upi_way_stages_work(upipe_ctx *c, const upipe_linear_attn *a, upipe_linear x,
                                     upipe_linear_pass pass)
{
    const upipe_scan s = upi_way_scan(a);
    const int n = upi_scan_stage_heads(&s), last = s.heads - (upipe_scan_stages(&s) - 1) * n;
    return upipe_max_bytes(upi_way_work(c, a->rules, x, n, pass), upi_way_work(c, a->rules, x, last, pass));
}

UPIPE_API upipe_status upi_way_fwd_rule(upipe_ctx *c, const upipe_linear_attn *a, const upipe_linear *call)
{
    const upipe_linear_ops rules = upipe_linear_rules(c, a->rules);
    return upipe_linear_fwd(c, &rules, call);
}

UPIPE_API upipe_status upi_way_bwd_rule(upipe_ctx *c, const upipe_linear_attn *a,
                                        const upipe_linear_grad *call)
{
    const upipe_linear_ops rules = upipe_linear_rules(c, a->rules);
    return upipe_linear_bwd(c, &rules, call);
}

#endif

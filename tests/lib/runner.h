/* runner.h -- the library's attention on C x R ranks, with results in oracle_block.h's natural layouts
 *
 *     run_case test = run_of(tokens, heads, kv_heads, d, D, ranks, chunk, dtype);      upipe_plan_init says what is legal
 *     test.ring = 2, test.layout = UPIPE_ZIGZAG;
 *     run_result r;
 *     if (run_block(&test, &in, &r) == UPIPE_OK) ...     r.out: as f32_block; r.bytes, r.plan, ...
 *
 * Doors are upipe_layer.h with its projections, upipe_qkv.h (shape.bare), upipe_latent_layer.h and upipe_latent.h (the same
 * with shape.latent), and upipe_fpdt.h (segments). Ranks are threads, on the host or where test.place says. r.out is on the list of memory.h. Each rank has a plan of its own, and a slab of
 * exactly the bytes that its dry run asked for, filled with NaN. Rows are scattered and gathered by the plan's positions.
 * On every rank the peak of each phase is checked against the dry run's, bytes sent and moved against the plan's, and
 * live bytes at the end. Gradients of weights are summed over the world.
 */
#ifndef UPIPE_TEST_RUNNER_H
#define UPIPE_TEST_RUNNER_H

#include "upipe/net/upipe_net_threads.h"
#include "upipe/upipe.h"

#include "close.h"
#include "context.h"
#include "grid.h"

enum { RUN_MAX = 16, RUN_WEIGHTS = 6, RUN_GRADS = 13 };

typedef struct run_own run_own;
typedef struct run_state run_state;

/* Where ranks run. */
typedef struct run_place {
    void (*begin)(run_state *s); /* s->ops: the table that dry runs ask */
    void (*open)(run_state *s);  /* each rank's own->ops, and what it holds: run_fill */
    /* of a rank, these data, or NaNs (NULL) */
    void *(*memory)(run_state *s, run_own *own, const void *data, size_t bytes);
    /* in the rank's thread: its team, ring and streams */
    void (*enter)(run_state *s, run_own *own, upipe_ctx *c);
    void (*leave)(run_state *s, run_own *own, upipe_ctx *c);
    upipe_comm *(*world)(run_state *s, int rank); /* of all ranks */
    upipe_status (*run)(run_state *s);            /* run_body on each, whose statuses it leaves; the worst */
    void (*close)(run_state *s, upipe_status status);
} run_place;

typedef struct run_case {
    block_shape shape;
    int ranks, chunk, naive;
    int overlap, side_stream_inline;    /* on a thread of its own, or on the rank's line */
    int ring, inner, ahead, ring_first; /* ring_first: neighbours in the world are a ring's, not a team's */
    upipe_layout layout;
    upipe_ring_mode ring_mode;
    int segments; /* of the sequence; 0: in one piece */
    upipe_latent_form form;
    int unwanted;              /* of upipe_latent_layer.h: 1 dc, 2 dkr, 4 the gradient of kv_b_proj */
    int fused, wide, in_place; /* bare: q, k, v in one tensor; f32 whatever is sent; dq over q and so on */
    int dx_apart;              /* dX beside x instead of in its place */
    int64_t tile_rows;
    float begun;            /* what lies where a rank adds its gradients */
    const run_place *place; /* NULL: the host */
    /* faults: a pool guard, asked on every rank */
    upipe_status (*guard)(void *user, size_t bytes, int use, const char *tag);
    void *guard_user[RUN_MAX];
    void (*table)(upipe_ops *ops); /* changes the compute table; NULL = none */
    /* changes what a rank is to run, and once more, with d = NULL, before it runs; NULL = none */
    void (*differ)(int odd, run_own *own, upipe_plan_desc *d);
    int odd;
    double deadline;
    int expect_failure; /* the checks of a good run are left out */
} run_case;

typedef struct run_result {
    f32_block out;
    upipe_plan plan;   /* of rank 0, as are the next two */
    upipe_bytes bytes; /* the dry run's */
    size_t need;
    int gathers; /* of rank 0: whether it gathers latents */
    upipe_status statuses[RUN_MAX];
    upipe_err errors[RUN_MAX];
    int64_t sent[RUN_MAX]; /* bytes to others of the team and of the ring */
} run_result;

/* What each rank has of its own. */
struct run_own {
    int rank, team_rank, ring_rank; /* rank: of the world */
    int away;                       /* it does not run */
    upipe_plan plan;                /* of the first segment */
    int64_t rows;                   /* of all segments */
    upipe_layer layer;
    upipe_fpdt segments; /* all but its layer */
    upipe_qkv qkv;       /* its views */
    upipe_qkv_grads qkv_grads;
    upipe_latent latent;
    upipe_latent_grads latent_grads;
    upipe_ops ops;
    upipe_bytes bytes;
    size_t need, host_need, host_peak, slab_bytes;
    int blocks_max;          /* exactly what the dry run says */
    int64_t sent, ring_sent; /* bytes that the plan says */
    int64_t moved;
    void *slab, *tensors[RUN_GRADS]; /* tensors: weights in the storage type */
    float *grads[RUN_GRADS];
    void *x, *dout; /* of segments */
    upipe_mem mem, host_mem;
    side_thread side;
    /* its rows on their way, [host_n], in memory of the host wherever it runs; NULL in a dry run */
    float *host;
    int64_t host_n;
    void *device; /* the place's */
};

struct run_state {
    const run_case *test;
    const run_place *place;
    const f32_block *in;
    run_result *r;
    upipe_threads_grid grid;
    int ranks; /* of the world */
    upipe_ops ops;
    run_own own[RUN_MAX];
};

#define RUN_NAME(name)   #name,
#define RUN_INPUT(name)  s->in->name,
#define RUN_RESULT(name) s->r->out.name,
static const char *const run_grads[RUN_GRADS] = {BLOCK_WEIGHTS(RUN_NAME)};

/* The most ranks of a team that read one key/value head. */
static inline int run_sharers(const upipe_plan *p)
{
    int most = 0, kv, h, stage, rank;
    for (kv = 0; kv < p->desc.kv_heads; ++kv) {
        int before = -1, n = 0;
        for (h = kv * p->group; h < (kv + 1) * p->group; ++h, before = rank) {
            upipe_plan_q_place(p, h, &stage, &rank);
            n += rank != before;
        }
        if (n > most) most = n;
    }
    return most;
}

/* Whether gradients of K and V are sums in the same order for every chunk of a team: chains over query heads,
 * then queries, whose ends are added in rank order. Not so in the naive order, and where three ranks or more
 * that share a head are not done with it in the same stage. */
static inline int run_same_chains(const upipe_plan *p)
{
    if (p->schedule == UPIPE_IN_ORDER) return 0;
    return p->schedule != UPIPE_UNEVEN || p->stages == 1 || run_sharers(p) <= 2;
}

/* n values in the storage type. */
static inline void *run_narrow(upipe_dtype dtype, const float *v, int64_t n)
{
    char *p = (char *)zeroed((size_t)n * upipe_dtype_bytes(dtype));
    for (int64_t i = 0; v != NULL && i < n; ++i) upipe_cpu_put(p, dtype, i, v[i]);
    return p;
}

/* n times one value. */
static inline float *run_filled(float value, int64_t n)
{
    float *values = floats(n);
    for (int64_t i = 0; i < n; ++i) values[i] = value;
    return values;
}

/* ---- rows ---- */

/* Rows of a rank, [segment][batch][its tokens][width], <-> natural order, [batch][S][width]. */
static inline void run_rows(const run_own *own, float *natural, float *mine, int64_t width, int out)
{
    const int segments = own->segments.segments;
    const upipe_plan_desc *d = &own->segments.desc;
    for (int i = 0; i < (segments > 0 ? segments : 1); ++i) {
        const upipe_shard shard = segments > 0 ? upipe_fpdt_shard(&own->segments, i) : own->plan.shard;
        for (int64_t b = 0; b < d->batch; ++b)
            for (int64_t t = 0; t < shard.n; ++t, mine += width) {
                float *at = natural + (b * d->tokens + upipe_shard_pos(&shard, t)) * width;
                memcpy(out ? at : mine, out ? mine : at, (size_t)width * sizeof *at);
            }
    }
}

/* Rows of this rank in natural order <-> a tensor of its own. */
static inline upipe_status run_move(upipe_ctx *c, const run_own *own, float *natural, upipe_view v, int out)
{
    const int64_t width = (int64_t)v.h * v.d;
    const upipe_view host = upipe_view_packed(own->host, UPIPE_F32, v.n, v.h, v.d);
    if (own->host == NULL) return UPIPE_OK;
    if (!out) run_rows(own, natural, own->host, width, 0);
    UPIPE_TRY(c->ops->cast(c, out ? host : v, out ? v : host));
    if (out) run_rows(own, natural, own->host, width, 1);
    return UPIPE_OK;
}

/* The same of O or its gradient in slots. */
static inline upipe_status run_move_slots(upipe_ctx *c, const run_own *own, float *natural,
                                          upipe_slots *slots, int out)
{
    const upipe_plan *p = &own->plan;
    const int32_t width = p->desc.heads * p->desc.v_dim;
    const upipe_view host = upipe_view_packed(own->host, UPIPE_F32, p->rows, 1, width);
    if (own->host == NULL) return UPIPE_OK;
    if (!out) run_rows(own, natural, own->host, width, 0);
    UPIPE_TRY(out ? upipe_slots_gather(c, p, host, slots) : upipe_slots_scatter(c, p, slots, host));
    if (out) run_rows(own, natural, own->host, width, 1);
    return UPIPE_OK;
}

/* dQ in slots, heads of d elements in place of O's of v_dim. */
static inline upipe_status run_move_q(upipe_ctx *c, const run_own *own, float *natural,
                                      const upipe_slots *slots)
{
    const upipe_plan *p = &own->plan;
    const int32_t d = p->desc.head_dim, width = p->desc.heads * d;
    if (own->host == NULL) return UPIPE_OK;
    for (int stage = 0; stage < p->stages; ++stage)
        for (int rank = 0; rank < p->desc.ranks; ++rank) {
            const upipe_view heads = upipe_slots_matrix(p, slots, stage, rank, d);
            upipe_view columns = upipe_view_packed(own->host, UPIPE_F32, p->rows, 1, width);
            if (heads.d == 0) continue;
            columns.data = own->host + upipe_plan_q(p, stage, rank).first * d;
            columns.d = heads.d;
            UPIPE_TRY(c->ops->cast(c, columns, heads));
        }
    run_rows(own, natural, own->host, width, 1);
    return UPIPE_OK;
}

/* lse of this rank's heads, f32 [stage][batch][S/R][heads of the stage], to [batch][S][H]. */
static inline upipe_status run_move_lse(upipe_ctx *c, const run_own *own, float *natural, const float *lse)
{
    const upipe_plan *p = &own->plan;
    const int64_t n = upipe_plan_before(p, p->stages, p->desc.rank) * p->team_tokens * p->desc.batch;
    const float *mine = own->host;
    if (own->host == NULL) return UPIPE_OK;
    UPIPE_TRY(c->ops->copy(c, own->host, lse, (size_t)n * sizeof *lse));
    for (int stage = 0; stage < p->stages; ++stage) {
        const upipe_head_range q = upipe_plan_q(p, stage, p->desc.rank);
        for (int64_t b = 0; b < p->desc.batch; ++b)
            for (int64_t t = 0; t < p->team_tokens; ++t)
                for (int j = 0; j < q.count; ++j)
                    natural[(b * p->desc.tokens + upipe_shard_pos(&p->team_shard, t)) * p->desc.heads +
                            q.first + j] = *mine++;
    }
    return UPIPE_OK;
}

/* ---- what a rank runs ---- */

static inline upipe_grads run_grads_of(const run_own *own)
{
    upipe_grads g = {0};
    int j = 1; /* behind wkv's */
#define RUN_GRAD(name) g.name = own->grads[j++];
    BLOCK_LAYER_WEIGHTS(RUN_GRAD)
#undef RUN_GRAD
    return g;
}

/* [rows][D] of the pool. */
static inline upipe_status run_alloc(upipe_ctx *c, const upipe_plan *p, upipe_view *v, const char *tag)
{
    *v = upipe_view_packed(NULL, p->desc.dtype, p->rows, 1, (int32_t)p->desc.model_dim);
    return upipe_alloc(c, &v->data, upipe_plan_unit_bytes(p), UPIPE_USE_OTHER, tag);
}

/* upipe_layer.h: from x to dX. */
static inline upipe_status run_layer(upipe_ctx *c, const run_state *s, const run_own *own)
{
    const upipe_plan *p = &own->plan;
    const upipe_layer *l = &own->layer;
    const block_shape *shape = &s->test->shape;
    const upipe_grads g = run_grads_of(own);
    f32_block *out = &s->r->out;
    upipe_saved save = {0};
    upipe_slots dout = {0}, *final = shape->projected ? &save.out : &dout;
    upipe_view x, y, dx;
    UPIPE_TRY(run_alloc(c, p, &x, "x"));
    dx = x;
    UPIPE_TRY(run_move(c, own, s->in->x, x, 0));
    UPIPE_TRY(upipe_layer_fwd(c, l, &save, x));
    UPIPE_TRY(run_move_slots(c, own, out->o, &save.out, 1));
    UPIPE_TRY(run_move_lse(c, own, out->lse, save.lse));
    if (shape->projected) {
        UPIPE_TRY(run_alloc(c, p, &y, "y"));
        UPIPE_TRY(shape->gated ? upipe_layer_gated_out_fwd(c, l, y, &save, x)
                               : upipe_layer_out_fwd(c, l, y, &save));
        UPIPE_TRY(run_move(c, own, out->y, y, 1));
        UPIPE_TRY(run_move(c, own, s->in->dy, y, 0));
        UPIPE_TRY(shape->gated ? upipe_layer_gated_out_bwd(c, l, &g, &save, y, y, x)
                               : upipe_layer_out_bwd(c, l, &g, &save, y));
        if (!shape->gated) UPIPE_TRY(upipe_free(c, y.data));
    } else {
        UPIPE_TRY(upipe_slots_alloc(c, p, &dout, UPIPE_SLOT_FULL, "dout"));
        UPIPE_TRY(run_move_slots(c, own, s->in->dout, &dout, 0));
    }
    if (s->test->dx_apart) UPIPE_TRY(run_alloc(c, p, &dx, "dx"));
    UPIPE_TRY(upipe_layer_bwd(c, l, dx, &g, &save, final, x));
    UPIPE_TRY(run_move_q(c, own, out->q, final));
    if (shape->gated) { /* the gate's part of the gradient of x is in y's place */
        UPIPE_TRY(c->ops->add(c, dx, y));
        UPIPE_TRY(upipe_free(c, y.data));
    }
    UPIPE_TRY(run_move(c, own, out->x, dx, 1));
    CHECK(save.lse == NULL && save.delta == NULL && save.o == NULL);
    UPIPE_TRY(upipe_free(c, dout.data));
    UPIPE_TRY(upipe_saved_free(c, &save));
    if (s->test->dx_apart) UPIPE_TRY(upipe_free(c, dx.data));
    return upipe_free(c, x.data);
}

/* upipe_qkv.h: from Q, K and V to their gradients. */
static inline upipe_status run_qkv(upipe_ctx *c, const run_state *s, const run_own *own)
{
    const upipe_qkv *a = &own->qkv;
    const upipe_qkv_grads *g = &own->qkv_grads;
    f32_block *out = &s->r->out;
    upipe_saved save;
    UPIPE_TRY(run_move(c, own, s->in->q, a->q, 0));
    UPIPE_TRY(run_move(c, own, s->in->k, a->k, 0));
    UPIPE_TRY(run_move(c, own, s->in->v, a->v, 0));
    UPIPE_TRY(upipe_qkv_fwd(c, a, &save));
    UPIPE_TRY(run_move_lse(c, own, out->lse, save.lse));
    UPIPE_TRY(run_move(c, own, out->o, a->o, 1));
    UPIPE_TRY(run_move(c, own, s->in->dout, g->dout, 0));
    UPIPE_TRY(upipe_qkv_bwd(c, a, g, &save));
    UPIPE_TRY(run_move(c, own, out->q, g->dq, 1));
    UPIPE_TRY(run_move(c, own, out->k, g->dk, 1));
    return run_move(c, own, out->v, g->dv, 1);
}

/* upipe_latent.h: from Q, latent and shared key to their gradients. */
static inline upipe_status run_latent(upipe_ctx *c, const run_state *s, const run_own *own)
{
    const upipe_latent *a = &own->latent;
    const upipe_latent_grads *g = &own->latent_grads;
    f32_block *out = &s->r->out;
    upipe_saved save;
    UPIPE_TRY(run_move(c, own, s->in->q, a->q, 0));
    UPIPE_TRY(run_move(c, own, s->in->c, a->kv.c, 0));
    UPIPE_TRY(run_move(c, own, s->in->kr, a->kv.kr, 0));
    UPIPE_TRY(upipe_latent_fwd(c, a, &save));
    UPIPE_TRY(run_move_lse(c, own, out->lse, save.lse));
    UPIPE_TRY(run_move(c, own, out->o, a->o, 1));
    UPIPE_TRY(run_move(c, own, s->in->dout, g->dout, 0));
    UPIPE_TRY(upipe_latent_bwd(c, a, g, &save));
    UPIPE_TRY(run_move(c, own, out->q, g->dq, 1));
    UPIPE_TRY(run_move(c, own, out->c, g->dkv.c, 1));
    return run_move(c, own, out->kr, g->dkv.kr, 1);
}

/* upipe_latent_layer.h: from xq, latent and shared key to their gradients. */
static inline upipe_status run_latent_layer(upipe_ctx *c, const run_state *s, const run_own *own)
{
    const upipe_plan *p = &own->plan;
    const upipe_layer *l = &own->layer;
    const block_shape *shape = &s->test->shape;
    const upipe_latent_kv *kv = &own->latent.kv;
    upipe_latent_kv dkv = own->latent_grads.dkv;
    upipe_grads g = run_grads_of(own);
    f32_block *out = &s->r->out;
    upipe_saved save = {0};
    upipe_slots dout = {0};
    upipe_view x = upipe_view_packed(NULL, p->desc.dtype, p->rows, 1, shape->q_dim), dx, y;
    const size_t bytes = upipe_plan_rows_bytes(p, 1, shape->q_dim);
    if ((s->test->unwanted & 1) != 0) dkv.c.data = NULL;
    if ((s->test->unwanted & 2) != 0) dkv.kr.data = NULL;
    if ((s->test->unwanted & 4) == 0) g.wk = own->grads[0];
    UPIPE_TRY(upipe_alloc(c, &x.data, bytes, UPIPE_USE_OTHER, "x"));
    dx = x;
    UPIPE_TRY(run_move(c, own, s->in->x, x, 0));
    UPIPE_TRY(run_move(c, own, s->in->c, kv->c, 0));
    UPIPE_TRY(run_move(c, own, s->in->kr, kv->kr, 0));
    UPIPE_TRY(upipe_latent_layer_fwd(c, l, &save, x, kv));
    UPIPE_TRY(run_move_slots(c, own, out->o, &save.out, 1));
    UPIPE_TRY(run_move_lse(c, own, out->lse, save.lse));
    if (shape->projected) {
        UPIPE_TRY(run_alloc(c, p, &y, "y"));
        UPIPE_TRY(upipe_layer_out_fwd(c, l, y, &save));
        UPIPE_TRY(run_move(c, own, out->y, y, 1));
        UPIPE_TRY(run_move(c, own, s->in->dy, y, 0));
        UPIPE_TRY(upipe_layer_out_bwd(c, l, &g, &save, y));
        UPIPE_TRY(upipe_free(c, y.data));
    } else {
        UPIPE_TRY(upipe_slots_alloc(c, p, &dout, UPIPE_SLOT_FULL, "dout"));
        UPIPE_TRY(run_move_slots(c, own, s->in->dout, &dout, 0));
    }
    if (s->test->dx_apart) UPIPE_TRY(upipe_alloc(c, &dx.data, bytes, UPIPE_USE_OTHER, "dx"));
    UPIPE_TRY(upipe_latent_layer_bwd(c, l, dx, &dkv, &g, &save, shape->projected ? &save.out : &dout, x, kv));
    UPIPE_TRY(run_move_q(c, own, out->q, shape->projected ? &save.out : &dout));
    UPIPE_TRY(run_move(c, own, out->x, dx, 1));
    if (dkv.c.data != NULL) UPIPE_TRY(run_move(c, own, out->c, dkv.c, 1));
    if (dkv.kr.data != NULL) UPIPE_TRY(run_move(c, own, out->kr, dkv.kr, 1));
    CHECK(save.lse == NULL && save.delta == NULL && save.o == NULL);
    UPIPE_TRY(upipe_free(c, dout.data));
    UPIPE_TRY(upipe_saved_free(c, &save));
    if (s->test->dx_apart) UPIPE_TRY(upipe_free(c, dx.data));
    return upipe_free(c, x.data);
}

/* lse of this rank's heads, and dQ of its tokens, which lies in the slots of dout. Buffers of all segments are as large as
 * the largest. */
static inline upipe_status run_segment_stats(upipe_ctx *c, const run_state *s, const upipe_fpdt *f,
                                             const upipe_fpdt_saved *save, const char *dout)
{
    const size_t slots = upipe_fpdt_out_bytes(f) / (size_t)f->segments;
    upipe_plan p;
    const upipe_buffers largest = upi_fpdt_buffers(f, &p);
    for (int i = 0; i < f->segments; ++i) {
        const upipe_shard mine = upipe_fpdt_shard(f, i);
        UPIPE_TRY(upipe_fpdt_plan(f, i, &p, &c->err));
        for (int stage = 0; stage < p.stages; ++stage) {
            const float *lse =
                (const float *)upipe_offset(save->lse, largest.stat * (size_t)(i * p.stages + stage));
            upipe_head_range q = upipe_plan_q(&p, stage, p.desc.rank);
            for (int64_t b = 0; b < p.desc.batch; ++b)
                for (int64_t t = 0; t < p.team_tokens; ++t)
                    for (int j = 0; j < q.count; ++j) {
                        const int64_t row =
                            b * f->desc.tokens + upipe_cut(f->desc.tokens, f->segments, i) + t;
                        s->r->out.lse[row * p.desc.heads + q.first + j] = *lse++;
                    }
            for (int rank = 0; rank < p.desc.ranks; ++rank) {
                int64_t at =
                    (int64_t)upipe_plan_offset(&p, UPIPE_A2A_Q, stage, rank) * p.rows * p.desc.head_dim;
                const char *from = dout + slots * (size_t)i + largest.slot * (size_t)stage;
                q = upipe_plan_q(&p, stage, rank);
                for (int64_t b = 0; b < p.desc.batch; ++b)
                    for (int64_t t = 0; t < p.local; ++t) {
                        const int64_t row = b * f->desc.tokens + upipe_shard_pos(&mine, t);
                        float *to = s->r->out.q + (row * p.desc.heads + q.first) * p.desc.head_dim;
                        for (int k = 0; k < q.count * p.desc.head_dim; ++k, ++at)
                            to[k] = upipe_cpu_get(from, p.desc.dtype, at);
                    }
            }
        }
    }
    return UPIPE_OK;
}

/* upipe_fpdt.h: from x to dX, which are the host's. */
static inline upipe_status run_segments(upipe_ctx *c, const run_state *s, const run_own *own)
{
    const int64_t dim = s->test->shape.dim, heads = (int64_t)own->plan.desc.heads * own->plan.desc.v_dim;
    const upipe_dtype dtype = own->plan.desc.dtype;
    const upipe_grads g = run_grads_of(own);
    upipe_fpdt f = own->segments;
    upipe_fpdt_saved save;
    void *const x = own->x, *const dout = own->dout;
    const upipe_view rows = upipe_view_packed(x, dtype, own->rows, 1, (int32_t)dim);
    f.layer = own->layer;
    UPIPE_TRY(run_move(c, own, s->in->x, rows, 0));
    UPIPE_TRY(upipe_fpdt_fwd(c, &f, &save, x));
    UPIPE_TRY(upipe_fpdt_gather(c, &f, own->host, UPIPE_F32, save.out));
    run_rows(own, s->r->out.o, own->host, heads, 1);
    run_rows(own, s->in->dout, own->host, heads, 0);
    UPIPE_TRY(upipe_fpdt_scatter(c, &f, dout, own->host, UPIPE_F32));
    UPIPE_TRY(upipe_fpdt_bwd(c, &f, x, &g, &save, dout, x));
    UPIPE_TRY(run_move(c, own, s->r->out.x, rows, 1));
    UPIPE_TRY(run_segment_stats(c, s, &f, &save, (const char *)dout));
    return upipe_fpdt_free(&f, &save, &c->err);
}

static inline upipe_status run_door(upipe_ctx *c, const run_state *s, const run_own *own)
{
    return s->test->segments != 0                             ? run_segments(c, s, own)
           : s->test->shape.latent > 0 && s->test->shape.bare ? run_latent(c, s, own)
           : s->test->shape.latent > 0                        ? run_latent_layer(c, s, own)
           : s->test->shape.bare                              ? run_qkv(c, s, own)
                                                              : run_layer(c, s, own);
}

/* ---- a rank ---- */

/* What was held and sent, against the dry run and the plan. */
static inline void run_check(const upipe_ctx *c, run_own *own, int projected)
{
    for (int phase = 0; phase < UPIPE_PHASES; ++phase)
        CHECK_SAY(c->mem->phase_peak[phase] == own->bytes.phase[phase],
                  "rank %d: %s holds %zu bytes, its dry run %zu", own->rank, upipe_phase_name(phase),
                  c->mem->phase_peak[phase], own->bytes.phase[phase]);
    /* a dry block also sums gradients, which the run does later */
    CHECK(projected ? c->mem->need <= own->need : c->mem->need == own->need);
    CHECK(projected ? c->mem->peak <= own->bytes.peak : c->mem->peak == own->bytes.peak);
    CHECK_INT(c->mem->live, 0);
    if (own->segments.segments > 0) {
        CHECK_INT(own->host_mem.peak, own->host_peak);
        CHECK_INT(own->host_mem.live, 0);
    }
    CHECK_INT(c->team->sent_bytes, own->sent);
    own->moved = c->team->moved_bytes;
    if (c->ring == NULL) return;
    CHECK_INT(c->ring->sent_bytes, own->ring_sent);
    own->moved += c->ring->moved_bytes;
}

/* Every rank of the world has tokens of its own. */
static inline upipe_status run_sums(upipe_ctx *c, run_state *s, const run_own *own)
{
    upipe_comm *world = c->ring != NULL ? s->place->world(s, own->rank) : c->team;
    float *const result[] = {BLOCK_WEIGHTS(RUN_RESULT)};
    for (int j = 0; j < RUN_GRADS; ++j) {
        const int64_t n = block_count(&s->test->shape, run_grads[j]);
        UPIPE_TRY(upipe_all_reduce(c, world, own->grads[j], n));
        if (own->rank == 0 && n > 0)
            UPIPE_TRY(c->ops->copy(c, result[j], own->grads[j], (size_t)n * sizeof(float)));
    }
    return c->ops->sync(c);
}

static inline upipe_status run_rank(upipe_ctx *c, run_state *s, run_own *own)
{
    UPIPE_TRY(run_door(c, s, own));
    run_check(c, own, s->test->shape.projected);
    return run_sums(c, s, own);
}

/* What a failed call took for itself is back; what the host holds, or the forward left it, may be live. */
static inline void run_left(const upipe_mem *mem, int rank, int locked)
{
    static const char *const kept[] = {"x", "y", "dx", "dout", "final_out", "lse", "delta"};
    for (int j = 0; j < mem->blocks_n; ++j) {
        int k = 0;
        while (k < 7 && strcmp(mem->blocks[j].tag, kept[k]) != 0) ++k;
        CHECK_SAY(k < 7 || locked, "rank %d: '%s' is still live after the failure", rank, mem->blocks[j].tag);
    }
}

static inline upipe_status run_body(void *user, int rank)
{
    run_state *s = (run_state *)user;
    run_own *own = &s->own[rank];
    upipe_ctx c = {.mem = &own->mem};
    upipe_status status;
    test_rank = rank;
    if (own->away) return UPIPE_OK;
    upipe_mem_init(&own->mem, own->slab, own->slab_bytes,
                   (upipe_mem_block *)zeroed((size_t)own->blocks_max * sizeof(upipe_mem_block)),
                   own->blocks_max);
    own->mem.guard = s->test->guard;
    own->mem.user = s->test->guard_user[rank];
    if (own->host_need > 0) pool_begin(&own->host_mem, own->host_need, UPIPE_DRY_HOST_BLOCKS_MAX);
    own->segments.host = &own->host_mem;
    s->place->enter(s, own, &c);
    status = run_rank(&c, s, own);
    s->place->leave(s, own, &c);
    s->r->errors[rank] = c.err;
    s->r->sent[rank] = c.team->sent_bytes + (c.ring != NULL ? c.ring->sent_bytes : 0);
    if (status != UPIPE_OK) {
        run_left(&own->mem, rank, c.team->quarantine);
        /* for the team and the ring too: upipe_threads_run tells the world alone */
        upipe_comm_abort(c.team, c.err.text);
        upipe_comm_abort(c.ring, c.err.text);
        upipe_mem_rewind(&own->mem, 0);
        upipe_mem_rewind(&own->host_mem, 0);
    } else {
        CHECK_INT(own->mem.live, 0);
    }
    upipe_mem_destroy(&own->mem, NULL);
    upipe_mem_destroy(&own->host_mem, NULL);
    return status;
}

/* ---- the host as the place ---- */

static inline void run_host_begin(run_state *s)
{
    s->ops = cpu_table();
}

static inline void run_fill(run_state *s, run_own *own);

static inline void run_host_open(run_state *s)
{
    for (int i = 0; i < s->ranks; ++i) {
        s->own[i].ops = s->ops;
        run_fill(s, &s->own[i]);
    }
}

static inline void *run_host_memory(run_state *s, run_own *own, const void *data, size_t bytes)
{
    void *p = slab_of(bytes);
    (void)s, (void)own;
    return data != NULL ? memcpy(p, data, bytes) : p;
}

static inline void run_host_enter(run_state *s, run_own *own, upipe_ctx *c)
{
    c->ops = &own->ops;
    upipe_threads_grid_use(&s->grid, own->rank, c);
    if (s->test->overlap) side_begin(c, &own->side, s->test->side_stream_inline);
}

static inline void run_host_leave(run_state *s, run_own *own, upipe_ctx *c)
{
    (void)c;
    if (s->test->overlap) side_end(&own->side);
}

static inline upipe_comm *run_host_world(run_state *s, int rank)
{
    return upipe_threads_comm(&s->grid.world, rank);
}

static inline upipe_status run_host_run(run_state *s)
{
    return upipe_threads_run(&s->grid.world, run_body, s, s->r->statuses, NULL);
}

static inline void run_host_close(run_state *s, upipe_status status)
{
    (void)s, (void)status;
}

static const run_place run_host = {.begin = run_host_begin,
                                   .open = run_host_open,
                                   .memory = run_host_memory,
                                   .enter = run_host_enter,
                                   .leave = run_host_leave,
                                   .world = run_host_world,
                                   .run = run_host_run,
                                   .close = run_host_close};

/* ---- before the ranks run ---- */

/* What a rank is to run. */
static inline upipe_plan_desc run_desc(const run_case *test, const run_own *own)
{
    const block_shape *shape = &test->shape;
    upipe_plan_desc d = {.tokens = shape->tokens,
                         .batch = shape->batch,
                         .model_dim = shape->dim,
                         .ranks = test->ranks,
                         .rank = own->team_rank,
                         .ring = test->ring,
                         .ring_rank = own->ring_rank,
                         .ring_inner = test->inner,
                         .ring_prefetch = test->ahead,
                         .overlap = test->overlap,
                         .ring_mode = test->ring_mode,
                         .layout = test->layout,
                         .heads = shape->h,
                         .kv_heads = shape->hkv,
                         .head_dim = shape->d,
                         .v_dim = shape->v_dim,
                         .chunk = test->chunk,
                         .naive = test->naive,
                         .dtype = shape->dtype};
    return d;
}

/* The layer but for its plan and its tensors. */
static inline upipe_layer run_layer_of(const run_case *test)
{
    const block_shape *shape = &test->shape;
    upipe_layer l = {.rope_theta = shape->rope ? shape->theta : 0,
                     .rope_rates = shape->rope ? shape->rope_rates : NULL,
                     .rope_factor = shape->rope ? shape->rope_factor : 0,
                     .rope_dims = shape->rope ? shape->rope_dims : 0,
                     .rope_interleaved = shape->rope == 2,
                     .norm_eps = shape->normed ? (float)shape->eps : 0,
                     .scale = (float)shape->scale,
                     .mask.causal = !shape->full,
                     .mask.window = shape->window,
                     .mask.borders.cu_seqlens = shape->cu_seqlens,
                     .mask.borders.cu_seqlens_n = shape->cu_seqlens_n,
                     .mask.padded = shape->cu_seqlens != NULL,
                     .mask.softcap = (float)shape->softcap,
                     .tile_rows = test->tile_rows};
    return l;
}

/* The call's tensors are the rank's. */
static inline void run_point(run_own *own)
{
    void *const *t = own->tensors;
    upipe_layer *l = &own->layer;
    l->wq = t[1], l->wk = t[2], l->wv = t[3], l->wo = t[4], l->wg = t[5];
    l->q_norm_weight = (const float *)t[6], l->k_norm_weight = (const float *)t[7];
    l->mask.sinks = (const float *)t[8];
    l->bq = (const float *)t[9], l->bk = (const float *)t[10], l->bv = (const float *)t[11];
    l->bo = (const float *)t[12];
    own->qkv.plan = own->latent.plan = &own->plan;
    own->qkv.mask = own->latent.mask = l->mask;
    own->qkv.scale = own->latent.scale = l->scale;
    own->qkv_grads.dsinks = own->latent_grads.dsinks = own->grads[8];
    own->latent.wkv = t[0];
    if (t[2] == NULL) l->wk = t[0]; /* of a latent */
    own->latent_grads.dwkv = own->grads[0];
}

/* Q, K, V (or latent and shared key) and O of the host, side by side at each token or apart with gaps of three elements
 * between rows; their gradients in the same places, or in packed ones. */
static inline void run_fill_qkv(run_state *s, run_own *own)
{
    const upipe_plan_desc *d = &own->plan.desc;
    const upipe_dtype type = s->test->wide ? UPIPE_F32 : d->dtype;
    const size_t e = upipe_dtype_bytes(type);
    const int64_t rows = own->plan.rows;
    const int latent = s->test->shape.latent, shared = latent > 0;
    const int heads[4] = {d->heads, shared ? 1 : d->kv_heads, shared ? 1 : d->kv_heads, d->heads};
    const int dims[4] = {d->head_dim, shared ? latent : d->head_dim, shared ? s->test->shape.key : d->v_dim,
                         d->v_dim};
    upipe_view *const views[4] = {&own->qkv.q, &own->qkv.k, &own->qkv.v, &own->qkv.o};
    upipe_view *const grads[4] = {&own->qkv_grads.dq, &own->qkv_grads.dk, &own->qkv_grads.dv,
                                  &own->qkv_grads.dout};
    int64_t all = 0, at = 0;
    char *fused;
    for (int i = 0; i < 3; ++i) all += (int64_t)heads[i] * dims[i];
    fused = s->test->fused ? (char *)s->place->memory(s, own, NULL, (size_t)(rows * all) * e) : NULL;
    for (int i = 0; i < 4; ++i) {
        const int64_t width = (int64_t)heads[i] * dims[i], step = i == 3           ? width
                                                                  : s->test->fused ? all
                                                                                   : width + 3;
        char *data = i < 3 && s->test->fused
                         ? fused + (size_t)at * e
                         : (char *)s->place->memory(s, own, NULL, (size_t)(rows * step) * e);
        *grads[i] = *views[i] = upipe_view_make(data, type, rows, step, heads[i], dims[i], dims[i]);
        at += width;
        if (i < 3 && s->test->in_place) continue;
        *grads[i] = upipe_view_packed(s->place->memory(s, own, NULL, (size_t)(rows * width) * e), type, rows,
                                      heads[i], dims[i]);
    }
    own->latent.q = own->qkv.q, own->latent.o = own->qkv.o;
    own->latent.kv.c = own->qkv.k, own->latent.kv.kr = own->qkv.v;
    own->latent_grads.dq = own->qkv_grads.dq, own->latent_grads.dout = own->qkv_grads.dout;
    own->latent_grads.dkv.c = own->qkv_grads.dk, own->latent_grads.dkv.kr = own->qkv_grads.dv;
}

/* What a rank holds, of the place's memory. */
static inline void run_fill(run_state *s, run_own *own)
{
    float *const from[RUN_GRADS] = {BLOCK_WEIGHTS(RUN_INPUT)};
    const block_shape *shape = &s->test->shape;
    const int64_t heads =
        (int64_t)own->plan.desc.heads *
        (own->plan.desc.v_dim > own->plan.desc.head_dim ? own->plan.desc.v_dim : own->plan.desc.head_dim);
    for (int j = 0; j < RUN_GRADS; ++j) {
        const upipe_dtype dtype = j < RUN_WEIGHTS ? shape->dtype : UPIPE_F32;
        const int64_t n = block_count(shape, run_grads[j]);
        own->tensors[j] = own->grads[j] = NULL;
        if (n == 0) continue;
        own->tensors[j] =
            s->place->memory(s, own, run_narrow(dtype, from[j], n), (size_t)n * upipe_dtype_bytes(dtype));
        own->grads[j] = (float *)s->place->memory(s, own, run_filled(s->test->begun, n), (size_t)n * 4);
    }
    own->slab = s->place->memory(s, own, NULL, own->slab_bytes);
    own->host_n = own->rows * (heads > shape->dim ? heads : shape->dim);
    if (own->host_n < own->rows * shape->q_dim) own->host_n = own->rows * shape->q_dim;
    if (own->host_n < own->rows * shape->latent) own->host_n = own->rows * shape->latent;
    if (own->host_n < own->plan.team_tokens * shape->batch * shape->h)
        own->host_n = own->plan.team_tokens * shape->batch * shape->h;
    own->host = floats(own->host_n);
    run_point(own);
    if (shape->bare || shape->latent > 0) run_fill_qkv(s, own);
    if (s->test->segments == 0) return;
    own->x =
        s->place->memory(s, own, NULL, (size_t)(own->rows * shape->dim) * upipe_dtype_bytes(shape->dtype));
    own->dout = s->place->memory(s, own, NULL, upipe_fpdt_out_bytes(&own->segments));
}

/* The bytes that the plan says. Q, K and V of segments are sent once. */
static inline upipe_status run_sent(const run_state *s, run_own *own, upipe_err *err)
{
    const int segments = own->segments.segments, e = (int)upipe_dtype_bytes(s->test->shape.dtype);
    upipe_plan p = own->plan;
    for (int i = 0; i < (segments > 0 ? segments : 1); ++i) {
        if (segments > 0) UPIPE_TRY(upipe_fpdt_plan(&own->segments, i, &p, err));
        own->rows += p.rows;
        own->sent += upipe_plan_sent(&p, 0) + upipe_plan_sent(&p, 1 + s->ops.attn_reads_o);
        for (int stage = 0; segments > 0 && stage < p.stages; ++stage)
            own->sent -= upi_plan_sent_heads(&p, UPIPE_A2A_Q, stage, 0, p.desc.head_dim * e) +
                         upi_plan_sent_heads(&p, UPIPE_A2A_KV, stage, 0,
                                             (p.desc.head_dim + p.desc.v_dim) * (int64_t)e);
    }
    if (s->test->shape.latent > 0)
        own->sent = upipe_latent_sent(&own->plan, &own->latent.kv, 0) +
                    upipe_latent_sent(&own->plan, &own->latent.kv, 1 + s->ops.attn_reads_o);
    own->ring_sent = upipe_ring_sent(&p, &own->layer.mask, 0) + upipe_ring_sent(&p, &own->layer.mask, 1);
    return UPIPE_OK;
}

/* The same sequence of allocations, dry, finds the size of a rank's slab. Addresses are not followed in it. */
static inline upipe_status run_dry(run_state *s, run_own *own, upipe_err *err)
{
    const block_shape *shape = &s->test->shape;
    const size_t sum_bytes = (size_t)s->ranks * UPIPE_REDUCE_STRIP * 4 + 4096;
    upipe_status status;
    upipe_dry *dry = dry_begin(&own->plan, &s->ops, &status);
    for (int j = 0; j < RUN_GRADS; ++j) {
        const int there = block_count(shape, run_grads[j]) > 0;
        own->tensors[j] = there ? own : NULL;
        own->grads[j] = there ? (float *)(void *)own : NULL;
    }
    run_point(own);
    own->segments.layer = own->layer;
    if (status == UPIPE_OK)
        status = s->test->segments != 0             ? upipe_dry_fpdt(dry, &own->segments)
                 : shape->latent > 0 && shape->bare ? upipe_dry_latent(dry, &own->latent)
                 : shape->latent > 0                ? run_latent_layer(&dry->ctx, s, own)
                 : shape->bare                      ? upipe_dry_qkv(dry, &own->qkv)
                 : shape->gated                     ? run_layer(&dry->ctx, s, own)
                 : shape->projected                 ? upipe_dry_block(dry, &own->layer, !s->test->dx_apart)
                                                    : upipe_dry_layer(dry, &own->layer, !s->test->dx_apart);
    *err = dry->ctx.err;
    if (status == UPIPE_OK) CHECK_INT(dry->mem.live, 0);
    own->bytes = upipe_dry_bytes(dry);
    own->need = dry->mem.need;
    own->host_need = dry->host.need;
    own->host_peak = dry->host.peak;
    own->blocks_max = dry->mem.blocks_peak;
    own->slab_bytes = own->need > sum_bytes ? own->need : sum_bytes;
    return status;
}

static inline upipe_status run_plan(run_state *s, run_own *own, upipe_err *err)
{
    const run_case *test = s->test;
    upipe_plan_desc d = run_desc(test, own);
    own->segments.segments = test->segments;
    if (test->differ != NULL) test->differ(test->odd, own, &d);
    own->segments.desc = d;
    UPIPE_TRY(test->segments != 0 ? upipe_fpdt_plan(&own->segments, 0, &own->plan, err)
                                  : upipe_plan_init(&own->plan, &d, err));
    own->layer = run_layer_of(test);
    own->layer.plan = &own->plan;
    own->latent.kv.form = test->form;
    own->latent.kv.c = upipe_view_packed(own, d.dtype, own->plan.rows, 1, test->shape.latent);
    own->latent.kv.kr = upipe_view_packed(own, d.dtype, own->plan.rows, 1, test->shape.key);
    own->latent_grads.dkv = own->latent.kv;
    UPIPE_TRY(run_dry(s, own, err));
    return run_sent(s, own, err);
}

/* Runs the case; a refusal of the plan or of the dry run is returned as it is. */
static inline upipe_status run_block(const run_case *test, const f32_block *in, run_result *r)
{
    const int rings = test->ring > 0 ? test->ring : 1;
    const upipe_grid g = {test->ranks * rings, test->ranks, rings, test->ring_first};
    const double deadline = test->deadline > 0 ? test->deadline : 60;
    run_state *s;
    upipe_status status;
    int64_t moved = 0, sent = 0;
    int mark;
    *r = (run_result){0};
    f32_block_make(&test->shape, &r->out);
    mark = buffers_n;
    test_at("S %lld/%d C %d R %d/%d %s mode %d H %d/%d U %d %s%s%s%s", (long long)test->shape.tokens,
            test->segments, test->ranks, test->ring, test->inner, upipe_layout_name(test->layout),
            (int)test->ring_mode, test->shape.h, test->shape.hkv, test->chunk,
            upipe_dtype_name(test->shape.dtype), test->shape.bare ? " bare" : "",
            test->overlap ? " overlap" : "", test->ring_first ? " ring first" : "");
    s = (run_state *)zeroed(sizeof *s);
    s->test = test, s->in = in, s->r = r, s->ranks = g.ranks;
    s->place = test->place != NULL ? test->place : &run_host;
    if (s->ranks > RUN_MAX) abort();
    s->place->begin(s);
    if (test->table != NULL) test->table(&s->ops);
    status = grid_apart(&s->grid, &g, deadline, &r->errors[0]);
    for (int i = 0; i < s->ranks && status == UPIPE_OK; ++i) {
        run_own *own = &s->own[i];
        own->rank = i;
        own->team_rank = upipe_grid_team(&g, i).rank;
        own->ring_rank = upipe_grid_ring(&g, i).rank;
        status = run_plan(s, own, &r->errors[0]);
        sent += own->sent + own->ring_sent;
    }
    r->plan = s->own[0].plan;
    r->bytes = s->own[0].bytes;
    r->need = s->own[0].need;
    r->gathers =
        status == UPIPE_OK && test->shape.latent > 0 && upipe_latent_gathers(&r->plan, &s->own[0].latent.kv);
    if (status == UPIPE_OK) {
        s->place->open(s);
        for (int i = 0; test->differ != NULL && i < s->ranks; ++i) test->differ(test->odd, &s->own[i], NULL);
        status = s->place->run(s);
        for (int i = 0; i < s->ranks; ++i) moved += s->own[i].moved;
        if (status == UPIPE_OK) CHECK_INT(moved, sent);
        for (int i = 0; !test->expect_failure && i < s->ranks; ++i)
            CHECK_SAY(r->statuses[i] == UPIPE_OK, "rank %d: %s: %s", i, upipe_status_name(r->statuses[i]),
                      r->errors[i].text);
    }
    s->place->close(s, status);
    upipe_threads_grid_free(&s->grid);
    buffers_free(mark);
    return status;
}

/* ---- cases, and what is said of results ---- */

/* A causal block of one sequence; scale 1 / sqrt(d). */
static inline run_case run_of(int64_t tokens, int h, int hkv, int d, int64_t dim, int ranks, int chunk,
                              upipe_dtype dtype)
{
    run_case t = {
        .shape = {.tokens = tokens, .batch = 1, .dim = dim, .h = h, .hkv = hkv, .d = d, .dtype = dtype},
        .ranks = ranks,
        .chunk = chunk};
    t.shape.scale = (double)(float)(1 / sqrt((double)d));
    t.shape.theta = 10000;
    t.shape.eps = 1e-5;
    return t;
}

/* A case is right to the tolerance rule. */
static inline int check_case(const run_case *t, uint64_t seed, run_result *r)
{
    f32_block in;
    block_inputs(&t->shape, seed, &in);
    if (!CHECK_SAY(run_block(t, &in, r) == UPIPE_OK, "%s", r->errors[0].text)) return 0;
    check_block(&t->shape, &in, &r->out);
    return 1;
}

/* Is the word in the list "o lse q"? */
static inline int run_listed(const char *list, const char *word)
{
    const size_t n = strlen(word);
    for (const char *at = list; (at = strstr(at, word)) != NULL; at += n)
        if ((at == list || at[-1] == ' ') && (at[n] == 0 || at[n] == ' ')) return 1;
    return 0;
}

/* The same bits of two results in these tensors, or (NULL) in all, of those that the shape has. */
static inline void same_bits(const block_shape *s, const run_result *a, const run_result *b,
                             const char *tensors)
{
    int known = 0, words = tensors != NULL;
    for (const char *at = tensors; at != NULL && *at; ++at) words += *at == ' ';
#define SAME(tensor)                                                                                       \
    known += tensors != NULL && run_listed(tensors, #tensor);                                              \
    if (block_count(s, #tensor) > 0 && (tensors == NULL || run_listed(tensors, #tensor)))                  \
        CHECK_SAY(memcmp(a->out.tensor, b->out.tensor, (size_t)block_count(s, #tensor) * sizeof(float)) == \
                      0,                                                                                   \
                  "%s differs: C %d U %d against C %d U %d", #tensor, a->plan.desc.ranks,                  \
                  a->plan.desc.chunk, b->plan.desc.ranks, b->plan.desc.chunk);
    BLOCK_RESULTS(SAME)
#undef SAME
    CHECK_INT(known, words);
}

#endif

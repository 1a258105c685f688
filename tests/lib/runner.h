/* runner.h -- the library's block on C x R thread ranks, with results in oracle_block.h's natural layouts
 *
 *     run_case test = {shape, ranks, chunk, naive};      upipe_plan_init decides whether it is legal
 *     test.ring = 2, test.layout = UPIPE_ZIGZAG;         0: no ring
 *     run_result r;
 *     if (run_block(&test, &in, &r) == UPIPE_OK) ...     r.out: as f32_block; r.bytes, r.plan, ...
 *
 * r.out is on the list of memory.h. Each rank has a plan of its own, and a slab of exactly the bytes that its dry run asked for, filled with
 * NaN. Rows are scattered and gathered by the plan's positions. On every rank the peak of each phase is checked against
 * the dry run's, bytes sent and moved against the plan's, and live bytes at the end. Gradients of weights are summed over the world.
 */
#ifndef UPIPE_TEST_RUNNER_H
#define UPIPE_TEST_RUNNER_H

#include "upipe/net/upipe_net_threads.h"
#include "upipe/upipe.h"

#include "context.h"
#include "grid.h"
#include "oracle_block.h"

enum { RUN_MAX = 16, RUN_WEIGHTS = 4, RUN_GRADS = 11 };

typedef struct run_case {
    block_shape shape;
    int ranks, chunk, naive;
    int overlap, side_stream_inline;    /* on a thread of its own, or on the rank's line */
    int ring, inner, ahead, ring_first; /* ring_first: neighbours in the world are a ring's, not a team's */
    upipe_layout layout;
    upipe_ring_mode ring_mode;
    int dx_apart; /* dX beside x instead of in its place */
    int64_t tile_rows;
    float begun; /* what lies where a rank adds its gradients */
    /* faults: a pool guard, asked on every rank */
    upipe_status (*guard)(void *user, size_t bytes, int use, const char *tag);
    void *guard_user[RUN_MAX];
    void (*table)(upipe_ops *ops); /* changes the compute table; NULL = none */
    double deadline;
    int expect_failure; /* the checks of a good run are left out */
} run_case;

typedef struct run_result {
    f32_block out;
    upipe_plan plan;   /* of rank 0, as are the next three */
    upipe_bytes bytes; /* the dry run's */
    size_t need;
    upipe_status statuses[RUN_MAX];
    upipe_err errors[RUN_MAX];
    size_t live[RUN_MAX]; /* bytes at the end, of each rank */
} run_result;

/* What each rank has of its own. */
typedef struct run_own {
    upipe_plan plan;
    upipe_layer layer;
    upipe_bytes bytes;
    size_t need;
    int blocks_max; /* exactly what the dry run says */
    float *host;    /* [host_n], its rows on their way, in memory of the host whatever the table */
    int64_t host_n;
    float *dwg; /* where the output is gated: the weight's gradient */
} run_own;

typedef struct run_state {
    const run_case *test;
    const f32_block *in;
    run_result *r;
    upipe_threads_grid grid;
    upipe_ops ops;
    run_own own[RUN_MAX];
    void *weights[RUN_WEIGHTS]; /* wq wk wv wo in the storage type */
} run_state;

/* Gradients in the order of every list of them. */
#define RUN_GRADIENTS(X) \
    X(wq) X(wk) X(wv) X(wo) X(q_norm_weight) X(k_norm_weight) X(sinks) X(bq) X(bk) X(bv) X(bo)
#define RUN_NAME(name)   #name,
#define RUN_RESULT(name) s->r->out.name,
static const char *const run_grads[RUN_GRADS] = {RUN_GRADIENTS(RUN_NAME)};

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

/* Rows of a rank: [batch][S][width] in natural order <-> [batch][T][width] of the rank. */
static inline void run_rows(const upipe_plan *p, float *natural, float *mine, int64_t width, int out)
{
    for (int64_t b = 0; b < p->desc.batch; ++b)
        for (int64_t t = 0; t < p->local; ++t) {
            float *at = natural + (b * p->desc.tokens + upipe_shard_pos(&p->shard, t)) * width;
            float *row = mine + (b * p->local + t) * width;
            memcpy(out ? at : row, out ? row : at, (size_t)width * sizeof *at);
        }
}

/* dQ in slots, heads of d elements in place of O's of v_dim, to natural order [rows][H*d]. */
static inline upipe_status run_gather_q(upipe_ctx *c, const upipe_plan *p, upipe_view dst,
                                        const upipe_slots *slots)
{
    for (int stage = 0; stage < p->stages; ++stage)
        for (int rank = 0; rank < p->desc.ranks; ++rank) {
            upipe_view heads = upipe_slots_matrix(p, slots, stage, rank, p->desc.head_dim), columns = dst;
            size_t first = (size_t)upipe_plan_q(p, stage, rank).first * (size_t)p->desc.head_dim;
            if (heads.d == 0) continue;
            columns.data = (char *)dst.data + first * upipe_dtype_bytes(dst.dtype);
            columns.d = heads.d;
            UPIPE_TRY(c->ops->cast(c, columns, heads));
        }
    return UPIPE_OK;
}

/* lse of this rank's heads, [stage][batch][S/R][heads of the stage], to [batch][S][H]. */
static inline void run_lse(const upipe_plan *p, float *natural, const float *mine)
{
    for (int stage = 0; stage < p->stages; ++stage) {
        upipe_head_range q = upipe_plan_q(p, stage, p->desc.rank);
        for (int64_t b = 0; b < p->desc.batch; ++b)
            for (int64_t t = 0; t < p->team_tokens; ++t)
                for (int j = 0; j < q.count; ++j)
                    natural[(b * p->desc.tokens + upipe_shard_pos(&p->team_shard, t)) * p->desc.heads +
                            q.first + j] = *mine++;
    }
}

/* A rank from x to the sums of the gradients. The table may be a device's: then `grads` lie there, and its cast takes
 * rows of own->host too. */
static inline upipe_status run_rank(upipe_ctx *c, run_state *s, int rank, float *const *grads, int64_t *moved)
{
    run_own *own = &s->own[rank];
    const upipe_plan *p = &own->plan;
    const upipe_layer *l = &own->layer;
    const block_shape *shape = &s->test->shape;
    upipe_dtype dtype = p->desc.dtype;
    int64_t hd = (int64_t)p->desc.heads * p->desc.head_dim, ho = (int64_t)p->desc.heads * p->desc.v_dim;
    int64_t dim = p->desc.model_dim;
    int64_t lse_n = upipe_plan_before(p, p->stages, p->desc.rank) * p->team_tokens * p->desc.batch;
    float *host = floats(own->host_n = p->rows * (hd + ho + dim) + lse_n);
    upipe_comm *world = c->ring != NULL ? upipe_threads_comm(&s->grid.world, rank) : c->team;
    float *const result[] = {RUN_GRADIENTS(RUN_RESULT)};
    size_t unit = upipe_plan_unit_bytes(p);
    upipe_saved save = {0};
    upipe_slots dout = {0};
    upipe_grads g = {0};
    upipe_view x, y = {0}, dx, wide = upipe_view_packed(host, UPIPE_F32, p->rows, 1, (int32_t)dim);
    upipe_view q = upipe_view_packed(host, UPIPE_F32, p->rows, 1, (int32_t)hd);
    upipe_view o = upipe_view_packed(host, UPIPE_F32, p->rows, 1, (int32_t)ho);
    void *data;
    const int64_t wg_n = block_count(shape, "wg");
    int j = 0;
    own->host = host;
#define RUN_GRAD(name) g.name = j < RUN_WEIGHTS || block_count(shape, #name) > 0 ? grads[j] : NULL, ++j;
    RUN_GRADIENTS(RUN_GRAD)
    g.wg = shape->gated ? own->dwg : NULL;

    UPIPE_TRY(upipe_mem_alloc(c->mem, &data, unit, UPIPE_USE_OTHER, "x", &c->err));
    x = dx = upipe_view_packed(data, dtype, p->rows, 1, (int32_t)dim);
    run_rows(p, s->in->x, host, dim, 0);
    UPIPE_TRY(c->ops->cast(c, x, wide));
    UPIPE_TRY(upipe_layer_fwd(c, l, &save, x));
    UPIPE_TRY(upipe_slots_gather(c, l->plan, o, &save.out));
    run_rows(p, s->r->out.o, host, ho, 1);
    UPIPE_TRY(c->ops->copy(c, host, save.lse, (size_t)lse_n * sizeof *host));
    run_lse(p, s->r->out.lse, host);
    if (shape->projected) {
        UPIPE_TRY(upipe_mem_alloc(c->mem, &data, unit, UPIPE_USE_OTHER, "y", &c->err));
        y = upipe_view_packed(data, dtype, p->rows, 1, (int32_t)dim);
        UPIPE_TRY(shape->gated ? upipe_layer_gated_out_fwd(c, l, y, &save, x)
                               : upipe_layer_out_fwd(c, l, y, &save));
        UPIPE_TRY(c->ops->cast(c, wide, y));
        run_rows(p, s->r->out.y, host, dim, 1);
        run_rows(p, s->in->dy, host, dim, 0);
        UPIPE_TRY(c->ops->cast(c, y, wide));
        UPIPE_TRY(shape->gated ? upipe_layer_gated_out_bwd(c, l, &g, &save, y, y, x)
                               : upipe_layer_out_bwd(c, l, &g, &save, y));
        if (!shape->gated) UPIPE_TRY(upipe_mem_free(c->mem, y.data, &c->err));
    } else {
        UPIPE_TRY(upipe_slots_alloc(c, l->plan, &dout, UPIPE_SLOT_FULL, "dout"));
        run_rows(p, s->in->dout, host, ho, 0);
        UPIPE_TRY(upipe_slots_scatter(c, l->plan, &dout, o));
    }
    if (s->test->dx_apart) UPIPE_TRY(upipe_mem_alloc(c->mem, &dx.data, unit, UPIPE_USE_OTHER, "dx", &c->err));
    UPIPE_TRY(upipe_layer_bwd(c, l, dx, &g, &save, shape->projected ? &save.out : &dout, x));
    UPIPE_TRY(run_gather_q(c, p, q, shape->projected ? &save.out : &dout));
    run_rows(p, s->r->out.q, host, hd, 1);
    if (shape->gated) {
        UPIPE_TRY(c->ops->add(c, dx, y));
        UPIPE_TRY(upipe_mem_free(c->mem, y.data, &c->err));
    }
    UPIPE_TRY(c->ops->cast(c, wide, dx));
    run_rows(p, s->r->out.x, host, dim, 1);

    CHECK(save.lse == NULL && save.delta == NULL && save.o == NULL);
    for (int phase = 0; phase < UPIPE_PHASES; ++phase)
        CHECK_SAY(c->mem->phase_peak[phase] == own->bytes.phase[phase],
                  "rank %d: %s holds %zu bytes, its dry run %zu", rank, upipe_phase_name(phase),
                  c->mem->phase_peak[phase], own->bytes.phase[phase]);
    /* the dry block also sums gradients, which the run does later */
    CHECK(shape->projected ? c->mem->need <= own->need : c->mem->need == own->need);
    CHECK(shape->projected ? c->mem->peak <= own->bytes.peak : c->mem->peak == own->bytes.peak);
    CHECK_INT(c->team->sent_bytes, upipe_plan_sent(p, 0) + upipe_plan_sent(p, 1 + c->ops->attn_reads_o));
    moved[rank] = c->team->moved_bytes;
    if (c->ring != NULL) {
        CHECK_INT(c->ring->sent_bytes, upipe_ring_sent(p, &l->mask, 0) + upipe_ring_sent(p, &l->mask, 1));
        moved[rank] += c->ring->moved_bytes;
    }
    UPIPE_TRY(upipe_mem_free(c->mem, dout.data, &c->err));
    UPIPE_TRY(upipe_saved_free(c, &save));
    if (s->test->dx_apart) UPIPE_TRY(upipe_mem_free(c->mem, dx.data, &c->err));
    UPIPE_TRY(upipe_mem_free(c->mem, x.data, &c->err));

    for (j = 0; j < RUN_GRADS; ++j) {
        int64_t n = block_count(shape, run_grads[j]);
        /* every rank of the world has tokens of its own */
        UPIPE_TRY(upipe_all_reduce(c, world, grads[j], n));
        if (rank == 0 && n > 0) UPIPE_TRY(c->ops->copy(c, result[j], grads[j], (size_t)n * sizeof(float)));
    }
    if (shape->gated) {
        UPIPE_TRY(upipe_all_reduce(c, world, own->dwg, wg_n));
        if (rank == 0) UPIPE_TRY(c->ops->copy(c, s->r->out.wg, own->dwg, (size_t)wg_n * sizeof *own->dwg));
    }
    return c->ops->sync(c);
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

typedef struct run_user {
    run_state *s;
    int64_t moved[RUN_MAX];
} run_user;

/* Ends for the team and the ring too: upipe_threads_run tells the world alone. */
static inline void run_abort(upipe_ctx *c)
{
    upipe_comm_abort(c->team, c->err.text);
    upipe_comm_abort(c->ring, c->err.text);
}

static inline upipe_status run_body(void *user, int rank)
{
    run_user *u = (run_user *)user;
    run_state *s = u->s;
    const run_own *own = &s->own[rank];
    size_t sum_bytes = (size_t)s->grid.world.ranks * UPIPE_REDUCE_STRIP * 4 + 4096;
    size_t slab_bytes = own->need > sum_bytes ? own->need : sum_bytes;
    upipe_mem mem;
    side_thread side;
    float *grads[RUN_GRADS];
    upipe_status status;
    upipe_ctx c = {0};
    test_rank = rank;
    for (int j = 0; j < RUN_GRADS; ++j)
        grads[j] = run_filled(s->test->begun, block_count(&s->test->shape, run_grads[j]));
    context_pool(&c, &mem, &s->ops, slab_bytes, own->blocks_max);
    mem.guard = s->test->guard;
    mem.user = s->test->guard_user[rank];
    upipe_threads_grid_use(&s->grid, rank, &c);
    if (s->test->overlap) side_begin(&c, &side, s->test->side_stream_inline);
    status = run_rank(&c, s, rank, grads, u->moved);
    if (s->test->overlap) side_end(&side);
    s->r->errors[rank] = c.err;
    s->r->live[rank] = mem.live;
    if (status != UPIPE_OK) {
        run_left(&mem, rank, 0);
        run_abort(&c);
        upipe_mem_rewind(&mem, 0);
    }
    if (status == UPIPE_OK) CHECK_INT(mem.live, 0);
    upipe_mem_destroy(&mem, NULL);
    return status;
}

static inline upipe_grid run_grid(const run_case *test)
{
    const int rings = test->ring > 0 ? test->ring : 1;
    return (upipe_grid){test->ranks * rings, test->ranks, rings, test->ring_first};
}

/* What a rank is to run. */
static inline upipe_plan_desc run_desc(const run_case *test, int team_rank, int ring_rank)
{
    const block_shape *shape = &test->shape;
    upipe_plan_desc d = {.tokens = shape->tokens,
                         .batch = shape->batch,
                         .model_dim = shape->dim,
                         .ranks = test->ranks,
                         .rank = team_rank,
                         .ring = test->ring,
                         .ring_rank = ring_rank,
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
static inline upipe_layer run_layer(const run_case *test)
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

/* The same with its tensors; weights in the storage type. */
static inline upipe_layer run_layer_with(const run_case *test, void *const *weights, const f32_block *in)
{
    upipe_layer l = run_layer(test);
    l.wq = weights[0], l.wk = weights[1], l.wv = weights[2];
    l.wo = test->shape.projected ? weights[3] : NULL;
    l.bq = in->bq, l.bk = in->bk, l.bv = in->bv, l.bo = in->bo;
    l.q_norm_weight = in->q_norm_weight, l.k_norm_weight = in->k_norm_weight;
    l.mask.sinks = in->sinks;
    return l;
}

/* Weights in the storage type. */
static inline void run_weights(const block_shape *shape, const f32_block *in, void *weights[RUN_WEIGHTS])
{
    const float *const from[RUN_WEIGHTS] = {in->wq, in->wk, in->wv, in->wo};
    for (int i = 0; i < RUN_WEIGHTS; ++i)
        weights[i] = run_narrow(shape->dtype, from[i], block_count(shape, run_grads[i]));
}

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

/* The same bits in a tensor of two results. */
#define SAME_BITS(a, b, tensor, shape)                                                                       \
    CHECK_SAY(memcmp((a).out.tensor, (b).out.tensor, (size_t)block_count(shape, #tensor) * sizeof(float)) == \
                  0,                                                                                         \
              "%s differs: C %d U %d against C %d U %d", #tensor, (a).plan.desc.ranks, (a).plan.desc.chunk,  \
              (b).plan.desc.ranks, (b).plan.desc.chunk)

/* As upipe_dry_block, of a block with an output gate: the gate's part of the gradient of x takes y's place, which goes back
 * to the pool at the end. */
static inline upipe_status run_dry_gated(upipe_dry *dry, const upipe_layer *layer, int dx_in_place)
{
    upipe_ctx *c = &dry->ctx;
    upipe_layer l = *layer;
    const size_t unit = upipe_plan_unit_bytes(l.plan);
    const int64_t wq = (int64_t)l.plan->desc.heads * l.plan->desc.head_dim * l.plan->desc.model_dim;
    upipe_saved save;
    upipe_grads grads;
    upipe_view x, y, dx;
    l.wg = dry->mem.slab; /* never touched */
    grads = upi_dry_grads(dry, &l);
    x = upipe_view_packed(NULL, l.plan->desc.dtype, l.plan->rows, 1, (int32_t)l.plan->desc.model_dim);
    UPIPE_TRY(upipe_alloc(c, &x.data, unit, UPIPE_USE_OTHER, "x"));
    y = dx = x;
    UPIPE_TRY(upipe_layer_fwd(c, &l, &save, x));
    UPIPE_TRY(upipe_alloc(c, &y.data, unit, UPIPE_USE_OTHER, "y"));
    UPIPE_TRY(upipe_layer_gated_out_fwd(c, &l, y, &save, x));
    UPIPE_TRY(upipe_layer_gated_out_bwd(c, &l, &grads, &save, y, y, x));
    if (!dx_in_place) UPIPE_TRY(upipe_alloc(c, &dx.data, unit, UPIPE_USE_OTHER, "dx"));
    UPIPE_TRY(upipe_layer_bwd(c, &l, dx, &grads, &save, &save.out, x));
    UPIPE_TRY(c->ops->add(c, dx, y));
    if (!dx_in_place) UPIPE_TRY(upipe_free(c, dx.data));
    UPIPE_TRY(upipe_free(c, y.data));
    UPIPE_TRY(upipe_saved_free(c, &save));
    UPIPE_TRY(upipe_all_reduce(c, c->team, (float *)grads.wq, wq));
    return upipe_free(c, x.data);
}

/* The same sequence of allocations, dry, finds the size of a rank's slab. */
static inline upipe_status run_dry(const run_case *test, const upipe_ops *ops, run_own *own, upipe_err *err)
{
    upipe_status status;
    upipe_dry *dry = dry_begin(&own->plan, ops, &status);
    if (status == UPIPE_OK)
        status = test->shape.gated       ? run_dry_gated(dry, &own->layer, !test->dx_apart)
                 : test->shape.projected ? upipe_dry_block(dry, &own->layer, !test->dx_apart)
                                         : upipe_dry_layer(dry, &own->layer, !test->dx_apart);
    *err = dry->ctx.err;
    if (status == UPIPE_OK) CHECK_INT(dry->mem.live, 0);
    own->bytes = upipe_dry_bytes(dry);
    own->need = dry->mem.need;
    own->blocks_max = dry->mem.blocks_peak;
    return status;
}

/* Runs the case; the plan's refusal is returned as it is. */
static inline upipe_status run_block(const run_case *test, const f32_block *in, run_result *r)
{
    const block_shape *shape = &test->shape;
    const upipe_grid g = run_grid(test);
    int i;
    run_state *s;
    run_user u = {0};
    upipe_status status;
    int64_t moved = 0, sent = 0;
    upipe_err err;
    int mark;
    *r = (run_result){0};
    f32_block_make(shape, &r->out);
    mark = buffers_n;
    test_at("S %lld C %d R %d/%d %s mode %d H %d/%d U %d %s%s%s", (long long)shape->tokens, test->ranks,
            test->ring, test->inner, upipe_layout_name(test->layout), (int)test->ring_mode, shape->h,
            shape->hkv, test->chunk, upipe_dtype_name(shape->dtype), test->overlap ? " overlap" : "",
            test->ring_first ? " ring first" : "");
    u.s = s = (run_state *)zeroed(sizeof *s);
    *s = (run_state){.test = test, .in = in, .r = r, .ops = cpu_table()};
    if (test->table != NULL) test->table(&s->ops);
    run_weights(shape, in, s->weights);
    if (g.ranks > RUN_MAX) abort();
    status = grid_apart(&s->grid, &g, test->deadline > 0 ? test->deadline : 60, &err);
    for (i = 0; i < g.ranks && status == UPIPE_OK; ++i) {
        run_own *own = &s->own[i];
        upipe_plan_desc d = run_desc(test, upipe_grid_team(&g, i).rank, upipe_grid_ring(&g, i).rank);
        status = upipe_plan_init(&own->plan, &d, &r->errors[0]);
        if (status != UPIPE_OK) break;
        own->layer = run_layer_with(test, s->weights, in);
        own->layer.plan = &own->plan;
        if (shape->gated) own->layer.wg = run_narrow(shape->dtype, in->wg, block_count(shape, "wg"));
        own->dwg = run_filled(test->begun, block_count(shape, "wg"));
        status = run_dry(test, &s->ops, own, &r->errors[0]);
        sent += upipe_plan_sent(&own->plan, 0) + upipe_plan_sent(&own->plan, 1 + s->ops.attn_reads_o);
        sent += upipe_ring_sent(&own->plan, &own->layer.mask, 0) +
                upipe_ring_sent(&own->plan, &own->layer.mask, 1);
    }
    r->plan = s->own[0].plan;
    r->bytes = s->own[0].bytes;
    r->need = s->own[0].need;
    if (status == UPIPE_OK) {
        status = upipe_threads_run(&s->grid.world, run_body, &u, r->statuses, NULL);
        for (i = 0; i < g.ranks; ++i) moved += u.moved[i];
        if (status == UPIPE_OK) CHECK_INT(moved, sent);
        if (!test->expect_failure)
            for (i = 0; i < g.ranks; ++i)
                CHECK_SAY(r->statuses[i] == UPIPE_OK, "rank %d: %s: %s", i, upipe_status_name(r->statuses[i]),
                          r->errors[i].text);
    }
    upipe_threads_grid_free(&s->grid);
    buffers_free(mark);
    return status;
}

#endif

/* runner.h -- the library's block on C x R thread ranks, with results in oracle_block.h's natural layouts
 *
 *     run_case test = {shape, ranks, chunk, naive};      upipe_plan_init decides whether it is legal
 *     test.ring = 2, test.layout = UPIPE_ZIGZAG;         0: no ring
 *     run_result r;
 *     if (run_block(&test, &in, &r) == UPIPE_OK) ...     r.out: as f32_block; r.bytes, r.plan, ...
 *     run_free(&r);
 *
 * Each rank has a plan of its own, and a slab of exactly the bytes that its dry run asked for, filled with
 * NaN. Rows are scattered and gathered by the plan's positions. On every rank the peak of each phase is checked against
 * the dry run's, bytes sent and moved against the plan's, and live bytes at the end. Gradients of weights are summed over the world.
 */
#ifndef UPIPE_TEST_RUNNER_H
#define UPIPE_TEST_RUNNER_H

#include "upipe/net/upipe_net_threads.h"
#include "upipe/cpu/upipe_cpu.h"
#include "upipe/cpu/upipe_cpu_side_stream.h"
#include "upipe/upipe.h"

#include "grid.h"
#include "oracle_block.h"

enum { RUN_MAX = GRID_MAX, RUN_WEIGHTS = 4, RUN_GRADS = 11 };

typedef struct run_case {
    block_shape shape;
    int ranks, chunk, naive;
    int overlap, side_stream_inline;    /* on a thread of its own, or on the rank's line */
    int ring, inner, ahead, ring_first; /* ring_first: neighbours in the world are a ring's, not a team's */
    upipe_layout layout;
    upipe_ring_mode ring_mode;
    int dx_apart; /* dX beside x instead of in its place */
    int64_t tile_rows;
    upipe_dtype grad_dtype; /* of the weights; results are f32 */
    /* faults: a pool guard, asked on every rank */
    upipe_status (*guard)(void *user, size_t bytes, const char *tag);
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
} run_own;

typedef struct run_state {
    const run_case *test;
    const f32_block *in;
    run_result *r;
    grid grid;
    upipe_ops ops;
    run_own own[RUN_MAX];
    void *weights[RUN_WEIGHTS]; /* wq wk wv wo in the storage type */
} run_state;

static const char *const run_grads[RUN_GRADS] = {
    "wq", "wk", "wv", "wo", "q_norm_weight", "k_norm_weight", "sinks", "bq", "bk", "bv", "bo"};

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

/* n values in the storage type; freed by the caller. */
static inline void *run_narrow(upipe_dtype dtype, const float *v, int64_t n)
{
    char *p = (char *)malloc((size_t)n * upipe_dtype_bytes(dtype) + 1);
    int64_t i;
    for (i = 0; v != NULL && i < n; ++i) upipe_cpu_put(p, dtype, i, v[i]);
    return p;
}

/* Rows of a rank: [batch][S][width] in natural order <-> [batch][T][width] of the rank. */
static inline void run_rows(const upipe_plan *p, float *natural, float *mine, int64_t width, int out)
{
    int64_t b, t;
    for (b = 0; b < p->desc.batch; ++b)
        for (t = 0; t < p->local; ++t) {
            float *at = natural + (b * p->desc.tokens + upipe_shard_pos(&p->shard, t)) * width;
            float *row = mine + (b * p->local + t) * width;
            memcpy(out ? at : row, out ? row : at, (size_t)width * sizeof *at);
        }
}

/* dQ in slots, heads of d elements in place of O's of v_dim, to natural order [rows][H*d]. */
static inline upipe_status run_gather_q(upipe_ctx *c, const upipe_plan *p, upipe_view dst,
                                        const upipe_slots *slots)
{
    int stage, rank;
    for (stage = 0; stage < p->stages; ++stage)
        for (rank = 0; rank < p->desc.ranks; ++rank) {
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
    int64_t b, t;
    int stage, j;
    for (stage = 0; stage < p->stages; ++stage) {
        upipe_span q = upipe_plan_q(p, stage, p->desc.rank);
        for (b = 0; b < p->desc.batch; ++b)
            for (t = 0; t < p->seq; ++t)
                for (j = 0; j < q.count; ++j)
                    natural[(b * p->desc.tokens + upipe_shard_pos(&p->held, t)) * p->desc.heads + q.first +
                            j] = *mine++;
    }
}

static inline upipe_status run_rank(upipe_ctx *c, run_state *s, int rank, float *const *grads, int64_t *moved)
{
    const run_own *own = &s->own[rank];
    const upipe_plan *p = &own->plan;
    const upipe_layer *l = &own->layer;
    const block_shape *shape = &s->test->shape;
    upipe_dtype dtype = p->desc.dtype;
    int64_t hd = (int64_t)p->desc.heads * p->desc.head_dim, ho = (int64_t)p->desc.heads * p->desc.v_dim;
    int64_t dim = p->desc.model_dim;
    float *host = (float *)malloc((size_t)(p->rows * (hd + ho + dim)) * sizeof *host);
    float *const result[] = {s->r->out.wq,
                             s->r->out.wk,
                             s->r->out.wv,
                             s->r->out.wo,
                             s->r->out.q_norm_weight,
                             s->r->out.k_norm_weight,
                             s->r->out.sinks,
                             s->r->out.bq,
                             s->r->out.bk,
                             s->r->out.bv,
                             s->r->out.bo};
    size_t unit = upipe_plan_unit_bytes(p);
    upipe_saved save;
    upipe_slots dout;
    upipe_grads g;
    upipe_view x, y, dx, wide = upipe_view_packed(host, UPIPE_F32, p->rows, 1, (int32_t)dim);
    upipe_view q = upipe_view_packed(host, UPIPE_F32, p->rows, 1, (int32_t)hd);
    upipe_view o = upipe_view_packed(host, UPIPE_F32, p->rows, 1, (int32_t)ho);
    void *data, *narrow[4];
    int phase, j;
    int64_t i;
    upipe_status status = UPIPE_OK;
#define RUN_TRY(call)                      \
    do {                                   \
        status = (call);                   \
        if (status != UPIPE_OK) goto done; \
    } while (0)
    memset(&g, 0, sizeof g);
    for (j = 0; j < 4; ++j) {
        const size_t bytes =
            (size_t)block_count(shape, run_grads[j]) * upipe_dtype_bytes(s->test->grad_dtype);
        narrow[j] = s->test->grad_dtype != UPIPE_F32 ? calloc(bytes + 1, 1) : NULL;
    }
    g.wq = narrow[0] != NULL ? narrow[0] : grads[0];
    g.wk = narrow[1] != NULL ? narrow[1] : grads[1];
    g.wv = narrow[2] != NULL ? narrow[2] : grads[2];
    g.wo = narrow[3] != NULL ? narrow[3] : grads[3];
    g.bq = shape->biased ? grads[7] : NULL;
    g.bk = shape->biased ? grads[8] : NULL;
    g.bv = shape->biased ? grads[9] : NULL;
    g.bo = shape->biased && shape->projected ? grads[10] : NULL;
    g.q_norm_weight = shape->normed ? grads[4] : NULL;
    g.k_norm_weight = shape->normed ? grads[5] : NULL;
    g.sinks = shape->sinks ? grads[6] : NULL;
    memset(&save, 0, sizeof save);
    memset(&dout, 0, sizeof dout);

    RUN_TRY(upipe_mem_alloc(c->mem, &data, unit, "x", &c->err));
    x = dx = upipe_view_packed(data, dtype, p->rows, 1, (int32_t)dim);
    run_rows(p, s->in->x, host, dim, 0);
    RUN_TRY(c->ops->cast(c, x, wide));
    RUN_TRY(upipe_layer_fwd(c, l, &save, x));
    RUN_TRY(upipe_slots_gather(c, l->plan, o, &save.out));
    run_rows(p, s->r->out.o, host, ho, 1);
    run_lse(p, s->r->out.lse, save.lse);
    if (shape->projected) {
        RUN_TRY(upipe_mem_alloc(c->mem, &data, unit, "y", &c->err));
        y = upipe_view_packed(data, dtype, p->rows, 1, (int32_t)dim);
        RUN_TRY(upipe_layer_out_fwd(c, l, y, &save));
        RUN_TRY(c->ops->cast(c, wide, y));
        run_rows(p, s->r->out.y, host, dim, 1);
        run_rows(p, s->in->dy, host, dim, 0);
        RUN_TRY(c->ops->cast(c, y, wide));
        RUN_TRY(upipe_layer_out_bwd(c, l, &g, &save, y));
        RUN_TRY(upipe_mem_free(c->mem, y.data, &c->err));
    } else {
        RUN_TRY(upipe_slots_alloc(c, l->plan, &dout, UPIPE_SLOT_FULL, "dout"));
        run_rows(p, s->in->dout, host, ho, 0);
        RUN_TRY(upipe_slots_scatter(c, l->plan, &dout, o));
    }
    if (s->test->dx_apart) {
        RUN_TRY(upipe_mem_alloc(c->mem, &dx.data, unit, "dx", &c->err));
    }
    RUN_TRY(upipe_layer_bwd(c, l, dx, &g, &save, shape->projected ? &save.out : &dout, x));
    RUN_TRY(run_gather_q(c, p, q, shape->projected ? &save.out : &dout));
    run_rows(p, s->r->out.q, host, hd, 1);
    RUN_TRY(c->ops->cast(c, wide, dx));
    run_rows(p, s->r->out.x, host, dim, 1);

    CHECK(save.lse == NULL && save.delta == NULL);
    for (phase = 0; phase < UPIPE_PHASES; ++phase)
        CHECK_SAY(c->mem->phase_peak[phase] == own->bytes.phase[phase],
                  "rank %d: %s holds %zu bytes, its dry run %zu", rank, upipe_phase_name(phase),
                  c->mem->phase_peak[phase], own->bytes.phase[phase]);
    /* the dry block also sums gradients, which the run does later */
    CHECK(shape->projected ? c->mem->need <= own->need : c->mem->need == own->need);
    CHECK(shape->projected ? c->mem->peak <= own->bytes.peak : c->mem->peak == own->bytes.peak);
    CHECK_INT(c->team->sent_bytes, upipe_plan_sent(p, 0) + upipe_plan_sent(p, 1));
    moved[rank] = c->team->moved_bytes;
    if (c->ring != NULL) {
        CHECK_INT(c->ring->sent_bytes, upipe_plan_sent_ring(p, 0) + upipe_plan_sent_ring(p, 1));
        moved[rank] += c->ring->moved_bytes;
    }
    RUN_TRY(upipe_mem_free(c->mem, dout.data, &c->err));
    RUN_TRY(upipe_saved_free(c, &save));
    if (s->test->dx_apart) RUN_TRY(upipe_mem_free(c->mem, dx.data, &c->err));
    RUN_TRY(upipe_mem_free(c->mem, x.data, &c->err));

    /* every rank of the world has tokens of its own */
    c->team = upipe_threads_comm(&s->grid.world, rank);
    for (j = 0; j < RUN_GRADS; ++j) {
        int64_t n = block_count(shape, run_grads[j]);
        for (i = 0; j < 4 && narrow[j] != NULL && i < n; ++i)
            grads[j][i] = upipe_cpu_get(narrow[j], s->test->grad_dtype, i);
        RUN_TRY(upipe_all_reduce(c, grads[j], n));
        if (rank == 0 && n > 0) memcpy(result[j], grads[j], (size_t)n * sizeof(float));
    }
done:
    for (j = 0; j < 4; ++j) free(narrow[j]);
    free(host);
    return status;
#undef RUN_TRY
}

typedef struct run_user {
    run_state *s;
    int64_t moved[RUN_MAX];
} run_user;

/* Gives up for the team and the ring too: upipe_threads_run tells the world alone. */
static inline void run_abort(upipe_ctx *c, grid *g, int rank)
{
    upipe_comm_abort(grid_team(g, rank), c->err.text);
    upipe_comm_abort(grid_ring(g, rank), c->err.text);
}

static inline upipe_status run_body(void *user, int rank)
{
    run_user *u = (run_user *)user;
    run_state *s = u->s;
    const run_own *own = &s->own[rank];
    size_t sum_bytes = (size_t)s->grid.world.ranks * UPIPE_REDUCE_STRIP * 4 + 4096;
    size_t slab_bytes = own->need > sum_bytes ? own->need : sum_bytes;
    void *slab = NULL;
    upipe_mem_block *blocks = (upipe_mem_block *)malloc((size_t)own->blocks_max * sizeof *blocks);
    upipe_mem mem;
    upipe_ctx c;
    upipe_cpu_side_stream buf;
    upipe_side_stream side_stream;
    float *grads[RUN_GRADS];
    int j, threaded = s->test->overlap && !s->test->side_stream_inline;
    upipe_status status;
    memset(&c, 0, sizeof c);
    if (posix_memalign(&slab, 256, slab_bytes) != 0) abort();
    memset(slab, 0xff, slab_bytes); /* NaN in all types */
    for (j = 0; j < RUN_GRADS; ++j) grads[j] = f32_buf(block_count(&s->test->shape, run_grads[j]));
    upipe_mem_init(&mem, slab, slab_bytes, blocks, own->blocks_max);
    mem.guard = s->test->guard;
    mem.user = s->test->guard_user[rank];
    c.ops = &s->ops;
    c.mem = &mem;
    c.team = grid_team(&s->grid, rank);
    c.ring = grid_ring(&s->grid, rank);
    if (threaded && upipe_cpu_side_stream_init(&buf, &side_stream, &c.err) != UPIPE_OK) abort();
    if (s->test->side_stream_inline) upipe_side_stream_inline(&side_stream, NULL);
    if (s->test->overlap) c.side_stream = &side_stream;
    status = run_rank(&c, s, rank, grads, u->moved);
    if (threaded) upipe_cpu_side_stream_free(&buf);
    s->r->errors[rank] = c.err;
    s->r->live[rank] = mem.live;
    if (status != UPIPE_OK) {
        /* what a failed call took for itself is back; what the host holds, or the forward left it, may be
         * live */
        static const char *const kept[] = {"x", "y", "dx", "dout", "final_out", "lse", "delta"};
        for (j = 0; j < mem.blocks_n; ++j) {
            int k = 0;
            while (k < 7 && strcmp(mem.blocks[j].tag, kept[k]) != 0) ++k;
            CHECK_SAY(k < 7, "rank %d: '%s' is still live after the failure", rank, mem.blocks[j].tag);
        }
        run_abort(&c, &s->grid, rank);
        upipe_mem_rewind(&mem, 0);
    }
    if (status == UPIPE_OK) CHECK_INT(mem.live, 0);
    upipe_mem_destroy(&mem, NULL);
    for (j = 0; j < RUN_GRADS; ++j) free(grads[j]);
    free(blocks);
    free(slab);
    return status;
}

/* What a rank is to run. */
static inline upipe_plan_desc run_desc(const run_case *test, int team_rank, int ring_rank)
{
    const block_shape *shape = &test->shape;
    upipe_plan_desc d;
    memset(&d, 0, sizeof d);
    d.tokens = shape->tokens;
    d.batch = shape->batch;
    d.model_dim = shape->dim;
    d.ranks = test->ranks;
    d.rank = team_rank;
    d.ring = test->ring;
    d.ring_rank = ring_rank;
    d.ring_inner = test->inner;
    d.ring_prefetch = test->ahead;
    d.overlap = test->overlap;
    d.ring_mode = test->ring_mode;
    d.layout = test->layout;
    d.heads = shape->h;
    d.kv_heads = shape->hkv;
    d.head_dim = shape->d;
    d.v_dim = shape->v_dim;
    d.chunk = test->chunk;
    d.naive = test->naive;
    d.dtype = shape->dtype;
    return d;
}

/* The layer but for its plan and its tensors. */
static inline upipe_layer run_layer(const run_case *test)
{
    const block_shape *shape = &test->shape;
    upipe_layer l;
    memset(&l, 0, sizeof l);
    l.rope_theta = shape->rope ? shape->theta : 0;
    l.rope_interleaved = shape->rope == 2;
    l.norm_eps = shape->normed ? (float)shape->eps : 0;
    l.scale = (float)shape->scale;
    l.mask.causal = !shape->full;
    l.mask.window = shape->window;
    l.mask.cu_seqlens = shape->cu_seqlens;
    l.mask.cu_seqlens_n = shape->cu_seqlens_n;
    l.mask.softcap = (float)shape->softcap;
    l.tile_rows = test->tile_rows;
    l.grad_dtype = test->grad_dtype;
    return l;
}

/* The same sequence of allocations, dry, finds the size of a rank's slab. */
static inline upipe_status run_dry(const run_case *test, const upipe_ops *ops, run_own *own, upipe_err *err)
{
    upipe_dry *dry = (upipe_dry *)malloc(sizeof *dry);
    upipe_status status = upipe_dry_init(dry, &own->plan, ops);
    if (status == UPIPE_OK)
        status = test->shape.projected ? upipe_dry_block(dry, &own->layer, !test->dx_apart)
                                       : upipe_dry_layer(dry, &own->layer, !test->dx_apart);
    *err = dry->ctx.err;
    if (status == UPIPE_OK) CHECK_INT(dry->mem.live, 0);
    own->bytes = upipe_dry_bytes(dry);
    own->need = dry->mem.need;
    own->blocks_max = dry->mem.blocks_peak;
    free(dry);
    return status;
}

/* Runs the case; the plan's refusal is returned as it is. */
static inline upipe_status run_block(const run_case *test, const f32_block *in, run_result *r)
{
    const block_shape *shape = &test->shape;
    int rings = test->ring > 0 ? test->ring : 1, ranks = test->ranks * rings, i;
    run_state *s = (run_state *)calloc(1, sizeof *s);
    grid *g = &s->grid;
    run_user u;
    upipe_status status;
    int64_t moved = 0, sent = 0;
    upipe_err err;
    memset(r, 0, sizeof *r);
    memset(&u, 0, sizeof u);
    f32_block_make(shape, &r->out);
    upipe_cpu_ops(&s->ops);
    if (test->table != NULL) test->table(&s->ops);
    s->test = test;
    s->in = in;
    s->r = r;
    u.s = s;
    s->weights[0] = run_narrow(shape->dtype, in->wq, block_count(shape, "wq"));
    s->weights[1] = run_narrow(shape->dtype, in->wk, block_count(shape, "wk"));
    s->weights[2] = run_narrow(shape->dtype, in->wv, block_count(shape, "wv"));
    s->weights[3] = run_narrow(shape->dtype, in->wo, block_count(shape, "wo"));
    if (ranks > RUN_MAX) abort();
    status =
        grid_init(g, test->ranks, rings, test->ring_first, test->deadline > 0 ? test->deadline : 60, &err);
    for (i = 0; i < ranks && status == UPIPE_OK; ++i) {
        run_own *own = &s->own[i];
        upipe_plan_desc d = run_desc(test, grid_team_rank(g, i), grid_ring_rank(g, i));
        status = upipe_plan_init(&own->plan, &d, &r->errors[0]);
        if (status != UPIPE_OK) break;
        own->layer = run_layer(test);
        own->layer.plan = &own->plan;
        own->layer.wq = s->weights[0];
        own->layer.wk = s->weights[1];
        own->layer.wv = s->weights[2];
        own->layer.wo = shape->projected ? s->weights[3] : NULL;
        own->layer.bq = in->bq;
        own->layer.bk = in->bk;
        own->layer.bv = in->bv;
        own->layer.bo = in->bo;
        own->layer.q_norm_weight = in->q_norm_weight;
        own->layer.k_norm_weight = in->k_norm_weight;
        own->layer.mask.sinks = in->sinks;
        status = run_dry(test, &s->ops, own, &r->errors[0]);
        sent += upipe_plan_sent(&own->plan, 0) + upipe_plan_sent(&own->plan, 1);
        sent += upipe_plan_sent_ring(&own->plan, 0) + upipe_plan_sent_ring(&own->plan, 1);
    }
    r->plan = s->own[0].plan;
    r->bytes = s->own[0].bytes;
    r->need = s->own[0].need;
    if (status == UPIPE_OK) {
        status = upipe_threads_run(&g->world, run_body, &u, r->statuses, NULL);
        for (i = 0; i < ranks; ++i) moved += u.moved[i];
        if (status == UPIPE_OK) CHECK_INT(moved, sent);
        if (!test->expect_failure)
            for (i = 0; i < ranks; ++i)
                CHECK_SAY(r->statuses[i] == UPIPE_OK, "rank %d: %s: %s", i, upipe_status_name(r->statuses[i]),
                          r->errors[i].text);
    }
    grid_free(g);
    for (i = 0; i < RUN_WEIGHTS; ++i) free(s->weights[i]);
    free(s);
    return status;
}

static inline void run_free(run_result *r)
{
    f32_block_free(&r->out);
}

#endif

/* runner.h -- the library's block on C thread ranks, with results in oracle_block.h's natural layouts
 *
 *     run_case test = {shape, ranks, chunk, naive};      upipe_plan_init decides whether it is legal
 *     run_result r;
 *     if (run_block(&test, &in, &r) == UPIPE_OK) ...     r.out: as f32_block; r.peak, r.sent, ...
 *     run_free(&r);
 *
 * Each rank's slab has exactly the bytes that the dry run asked for, filled with NaN. Peaks, bytes sent and
 * moved, and live bytes at the end are checked against the plan on every rank.
 */
#ifndef UPIPE_TEST_RUNNER_H
#define UPIPE_TEST_RUNNER_H

#include "upipe/net/upipe_net_threads.h"
#include "upipe/cpu/upipe_cpu.h"
#include "upipe/upipe.h"

#include "oracle_block.h"

typedef struct run_case {
    block_shape shape;
    int ranks, chunk, naive;
    int gx_apart; /* dX beside x instead of in its place */
    int64_t tile_rows;
    /* faults: a pool guard, asked on every rank */
    upipe_status (*guard)(void *user, size_t bytes, const char *tag);
    void *guard_user[16];
    double deadline;
    int expect_failure; /* the checks of a good run are left out */
} run_case;

typedef struct run_result {
    f32_block out;
    upipe_plan plan;
    upipe_bytes bytes; /* the plan's */
    size_t peak, need;
    upipe_status statuses[16];
    upipe_err errors[16];
    size_t live[16]; /* bytes at the end, of each rank */
} run_result;

typedef struct run_state {
    const run_case *test;
    const f32_block *in;
    run_result *r;
    upipe_threads team;
    upipe_ops ops;
    upipe_layer layer;
    size_t slab_bytes;
    int blocks_max;   /* exactly what the dry run says */
    void *weights[4]; /* wq wk wv wo in the storage type */
} run_state;

/* n values in the storage type; freed by the caller. */
static void *run_narrow(upipe_dtype dtype, const float *v, int64_t n)
{
    char *p = (char *)malloc((size_t)n * upipe_dtype_bytes(dtype) + 1);
    int64_t i;
    for (i = 0; v != NULL && i < n; ++i) upi_f1_put(p, dtype, i, v[i]);
    return p;
}

/* Tokens of a rank: [batch][S][width] in natural order <-> [batch][T][width] of the rank. */
static void run_rows(const upipe_plan *p, int rank, float *natural, float *mine, int64_t width, int out)
{
    int64_t b, t = p->local * width;
    for (b = 0; b < p->desc.batch; ++b) {
        float *at = natural + (b * p->desc.tokens + rank * p->local) * width;
        memcpy(out ? at : mine + b * t, out ? mine + b * t : at, (size_t)t * sizeof *at);
    }
}

static upipe_status run_rank(upipe_ctx *c, run_state *s, int rank, float *const *grads, int64_t *moved)
{
    const upipe_plan *p = &s->r->plan;
    const block_shape *shape = &s->test->shape;
    upipe_dtype dtype = p->desc.dtype;
    int64_t hd = (int64_t)p->desc.heads * p->desc.head_dim, dim = p->desc.model_dim, b, t;
    float *host = (float *)malloc((size_t)(p->rows * (hd + dim)) * sizeof *host);
    size_t unit = upipe_plan_unit_bytes(p);
    upipe_saved save;
    upipe_slots gout;
    upipe_grads g;
    upipe_view x, y, gx, wide = upipe_view_packed(host, UPIPE_F32, p->rows, 1, (int32_t)dim);
    upipe_view heads = upipe_view_packed(host, UPIPE_F32, p->rows, 1, (int32_t)hd);
    void *data;
    int stage, phase, j;
    upipe_status status = UPIPE_OK;
#define RUN_TRY(call)                      \
    do {                                   \
        status = (call);                   \
        if (status != UPIPE_OK) goto done; \
    } while (0)
    g.wq = grads[0];
    g.wk = grads[1];
    g.wv = grads[2];
    g.wo = grads[3];
    g.q_gain = shape->normed ? grads[4] : NULL;
    g.k_gain = shape->normed ? grads[5] : NULL;
    memset(&save, 0, sizeof save);
    memset(&gout, 0, sizeof gout);

    RUN_TRY(upipe_mem_take(c->mem, &data, unit, "x", &c->err));
    x = gx = upipe_view_packed(data, dtype, p->rows, 1, (int32_t)dim);
    run_rows(p, rank, s->in->x, host, dim, 0);
    RUN_TRY(c->ops->cast(c, x, wide));
    RUN_TRY(upipe_layer_fwd(c, &s->layer, &save, x));
    RUN_TRY(upipe_layer_gather(c, &s->layer, heads, &save.out));
    run_rows(p, rank, s->r->out.o, host, hd, 1);
    for (stage = 0; stage < p->stages; ++stage)
        for (b = 0; b < p->desc.batch; ++b)
            for (t = 0; t < p->desc.tokens; ++t)
                for (j = 0; j < p->per_rank; ++j)
                    s->r->out.lse[(b * p->desc.tokens + t) * p->desc.heads +
                                  upipe_plan_q_head(p, stage, rank, j)] =
                        save.lse[((stage * p->desc.batch + b) * p->desc.tokens + t) * p->per_rank + j];
    if (shape->projected) {
        RUN_TRY(upipe_mem_take(c->mem, &data, unit, "y", &c->err));
        y = upipe_view_packed(data, dtype, p->rows, 1, (int32_t)dim);
        RUN_TRY(upipe_layer_out_fwd(c, &s->layer, y, &save));
        RUN_TRY(c->ops->cast(c, wide, y));
        run_rows(p, rank, s->r->out.y, host, dim, 1);
        run_rows(p, rank, s->in->gy, host, dim, 0);
        RUN_TRY(c->ops->cast(c, y, wide));
        RUN_TRY(upipe_layer_out_bwd(c, &s->layer, &g, &save, y));
        RUN_TRY(upipe_mem_give(c->mem, y.data, &c->err));
    } else {
        RUN_TRY(upipe_layer_slots_take(c, &s->layer, &gout, UPIPE_SLOT_FULL, "gout"));
        run_rows(p, rank, s->in->go, host, hd, 0);
        RUN_TRY(upipe_layer_scatter(c, &s->layer, &gout, heads));
    }
    if (s->test->gx_apart) {
        RUN_TRY(upipe_mem_take(c->mem, &gx.data, unit, "gx", &c->err));
    }
    RUN_TRY(upipe_layer_bwd(c, &s->layer, gx, &g, &save, shape->projected ? &save.out : &gout, x));
    RUN_TRY(upipe_layer_gather(c, &s->layer, heads, shape->projected ? &save.out : &gout));
    run_rows(p, rank, s->r->out.go, host, hd, 1);
    RUN_TRY(c->ops->cast(c, wide, gx));
    run_rows(p, rank, s->r->out.x, host, dim, 1);

    CHECK(save.lse == NULL && save.delta == NULL);
    for (phase = 0; phase < UPIPE_PHASES && !shape->projected; ++phase)
        CHECK_SAY(c->mem->phase_peak[phase] == s->r->bytes.phase[phase],
                  "rank %d: %s holds %zu bytes, the plan says %zu", rank, upipe_phase_name(phase),
                  c->mem->phase_peak[phase], s->r->bytes.phase[phase]);
    if (!shape->projected) CHECK_INT(c->mem->peak, s->r->bytes.peak);
    /* the dry block also sums gradients, which the run does later */
    CHECK(shape->projected ? c->mem->need <= s->r->need : c->mem->need == s->r->need);
    CHECK_INT(c->team->sent_bytes, upipe_plan_sent(p, 0) + upipe_plan_sent(p, 1));
    moved[rank] = c->team->moved_bytes;
    RUN_TRY(upipe_mem_give(c->mem, gout.data, &c->err));
    RUN_TRY(upipe_saved_free(c, &save));
    if (s->test->gx_apart) RUN_TRY(upipe_mem_give(c->mem, gx.data, &c->err));
    RUN_TRY(upipe_mem_give(c->mem, x.data, &c->err));

    for (j = 0; j < 6; ++j) {
        static const char *const names[] = {"wq", "wk", "wv", "wo", "q_gain", "k_gain"};
        int64_t n = block_count(shape, names[j]);
        float *const result[] = {s->r->out.wq, s->r->out.wk,     s->r->out.wv,
                                 s->r->out.wo, s->r->out.q_gain, s->r->out.k_gain};
        RUN_TRY(upipe_a2a_sum(c, grads[j], n));
        if (rank == 0 && n > 0) memcpy(result[j], grads[j], (size_t)n * sizeof(float));
    }
done:
    free(host);
    return status;
#undef RUN_TRY
}

typedef struct run_user {
    run_state *s;
    int64_t moved[16];
} run_user;

static upipe_status run_body(void *user, int rank)
{
    run_user *u = (run_user *)user;
    run_state *s = u->s;
    static const char *const names[] = {"wq", "wk", "wv", "wo", "q_gain", "k_gain"};
    void *slab = NULL;
    upipe_block *blocks = (upipe_block *)malloc((size_t)s->blocks_max * sizeof *blocks);
    upipe_mem mem;
    upipe_ctx c;
    float *grads[6];
    int j;
    upipe_status status;
    memset(&c, 0, sizeof c);
    if (posix_memalign(&slab, 256, s->slab_bytes) != 0) abort();
    memset(slab, 0xff, s->slab_bytes); /* NaN in both types */
    for (j = 0; j < 6; ++j) grads[j] = f32_room(block_count(&s->test->shape, names[j]));
    upipe_mem_init(&mem, slab, s->slab_bytes, blocks, s->blocks_max);
    mem.guard = s->test->guard;
    mem.user = s->test->guard_user[rank];
    c.ops = &s->ops;
    c.mem = &mem;
    c.team = upipe_threads_comm(&s->team, rank);
    status = run_rank(&c, s, rank, grads, u->moved);
    s->r->errors[rank] = c.err;
    s->r->live[rank] = mem.live;
    if (status != UPIPE_OK) {
        /* what a failed call took for itself is back; what the host holds, or the forward left it, may be
         * live */
        static const char *const kept[] = {"x", "y", "gx", "gout", "final_out", "lse", "delta"};
        for (j = 0; j < mem.blocks_n; ++j) {
            int k = 0;
            while (k < 7 && strcmp(mem.blocks[j].tag, kept[k]) != 0) ++k;
            CHECK_SAY(k < 7, "rank %d: '%s' is still live after the failure", rank, mem.blocks[j].tag);
        }
        upipe_mem_rewind(&mem, 0);
    }
    if (status == UPIPE_OK) CHECK_INT(mem.live, 0);
    upipe_mem_free(&mem, NULL);
    for (j = 0; j < 6; ++j) free(grads[j]);
    free(blocks);
    free(slab);
    return status;
}

/* Runs the case; the plan's refusal is returned as it is. */
static upipe_status run_block(const run_case *test, const f32_block *in, run_result *r)
{
    const block_shape *shape = &test->shape;
    upipe_plan_desc d;
    upipe_plan_scratch scratch;
    upipe_dry *dry;
    run_state s;
    run_user u;
    upipe_status status;
    int64_t sum_bytes, moved = 0, i;
    upipe_err err;
    memset(r, 0, sizeof *r);
    memset(&s, 0, sizeof s);
    memset(&u, 0, sizeof u);
    memset(&d, 0, sizeof d);
    d.tokens = shape->tokens;
    d.batch = shape->batch;
    d.model_dim = shape->dim;
    d.ranks = test->ranks;
    d.heads = shape->h;
    d.kv_heads = shape->hkv;
    d.head_dim = shape->d;
    d.chunk = test->chunk;
    d.naive = test->naive;
    d.dtype = shape->dtype;
    f32_block_make(shape, &r->out);
    status = upipe_plan_init(&r->plan, &d, &r->errors[0]);
    if (status != UPIPE_OK) return status;
    upipe_cpu_ops(&s.ops);
    s.test = test;
    s.in = in;
    s.r = r;
    u.s = &s;
    s.weights[0] = run_narrow(shape->dtype, in->wq, block_count(shape, "wq"));
    s.weights[1] = run_narrow(shape->dtype, in->wk, block_count(shape, "wk"));
    s.weights[2] = run_narrow(shape->dtype, in->wv, block_count(shape, "wv"));
    s.weights[3] = run_narrow(shape->dtype, in->wo, block_count(shape, "wo"));
    s.layer.plan = &r->plan;
    s.layer.wq = s.weights[0];
    s.layer.wk = s.weights[1];
    s.layer.wv = s.weights[2];
    s.layer.wo = shape->projected ? s.weights[3] : NULL;
    s.layer.q_gain = in->q_gain;
    s.layer.k_gain = in->k_gain;
    s.layer.rope_theta = shape->rope ? shape->theta : 0;
    s.layer.rope_interleaved = shape->rope == 2;
    s.layer.norm_eps = shape->normed ? (float)shape->eps : 0;
    s.layer.scale = (float)shape->scale;
    s.layer.full = shape->full;
    s.layer.tile_rows = test->tile_rows;
    scratch = upipe_layer_scratch(&s.ops, &s.layer, !test->gx_apart);
    r->bytes = upipe_plan_bytes(&r->plan, &scratch);

    /* the same sequence of takes, dry, says how large the slab must be */
    dry = (upipe_dry *)malloc(sizeof *dry);
    if (upipe_dry_init(dry, 0, test->ranks, &s.ops) != UPIPE_OK) abort();
    status = shape->projected ? upipe_dry_block(dry, &s.layer, !test->gx_apart)
                              : upipe_dry_layer(dry, &s.layer, !test->gx_apart);
    r->errors[0] = dry->ctx.err;
    if (status == UPIPE_OK) CHECK_INT(dry->mem.live, 0);
    r->peak = dry->mem.peak;
    r->need = dry->mem.need;
    s.blocks_max = dry->mem.blocks_peak;
    free(dry);
    if (status == UPIPE_OK) {
        sum_bytes = (int64_t)test->ranks * UPIPE_SUM_PIECE * 4 + 4096;
        s.slab_bytes = r->need > (size_t)sum_bytes ? r->need : (size_t)sum_bytes;
        status = upipe_threads_init(&s.team, test->ranks, test->deadline > 0 ? test->deadline : 60, &err);
        if (status == UPIPE_OK) {
            status = upipe_threads_run(&s.team, run_body, &u, r->statuses);
            upipe_threads_free(&s.team);
        }
        for (i = 0; i < test->ranks; ++i) moved += u.moved[i];
        if (status == UPIPE_OK)
            CHECK_INT(moved, test->ranks * (upipe_plan_sent(&r->plan, 0) + upipe_plan_sent(&r->plan, 1)));
        if (!test->expect_failure)
            for (i = 0; i < test->ranks; ++i)
                CHECK_SAY(r->statuses[i] == UPIPE_OK, "rank %d: %s: %s", (int)i,
                          upipe_status_name(r->statuses[i]), r->errors[i].text);
    }
    for (i = 0; i < 4; ++i) free(s.weights[i]);
    return status;
}

static void run_free(run_result *r)
{
    f32_block_free(&r->out);
}

#endif

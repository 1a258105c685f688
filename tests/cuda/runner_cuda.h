/* runner_cuda.h -- the library's block on C thread ranks with the CUDA table; results as runner.h's
 *
 *     cuda_case test = {{shape, ranks, chunk, naive}};          the rest 0: ranks meet through memory
 *     run_result r;
 *     if (cuda_block(&test, &in, &r) == UPIPE_OK) ...
 *     run_free(&r);
 *
 * Each rank has a stream, a cuBLAS handle and a slab of exactly the bytes that the dry run asked for, all on
 * one device; over NCCL it has a device of its own. The device memory in use is compared with what the runner
 * itself asked for: the library takes none.
 */
#ifndef UPIPE_TEST_RUNNER_CUDA_H
#define UPIPE_TEST_RUNNER_CUDA_H

#include "fake/fake.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#undef __asan_poison_memory_region
#define __asan_poison_memory_region(p, bytes) fake_poison((p), (bytes))
#endif

#include "runner.h"

#include "upipe/net/upipe_net_nccl.h"

#include "cuda/device.h"

typedef struct cuda_case {
    run_case run;
    int nccl;     /* ranks meet over NCCL, each on a device of its own; else through the memory of one */
    long fail_at; /* the call of rank `fail_rank` that fails, see fake_fail_at; 0: none */
    int fail_rank, fail_sticky;
    char failed[64]; /* written: the call that failed, if any */
    long calls[16];  /* written: calls of each rank */
} cuda_case;

typedef struct cuda_rank {
    device d;
    upipe_mem mem;
    upipe_block *blocks;
    void *slab, *stage, *weights[4];
    float *gains[2], *grads[6];
    upipe_layer layer;
    upipe_nccl nccl;
    ncclComm_t comm;
    int64_t moved;
} cuda_rank;

typedef struct cuda_state {
    cuda_case *test;
    const f32_block *in;
    run_result *r;
    upipe_threads team;
    size_t slab_bytes;
    int blocks_max;
    cuda_rank ranks[16];
} cuda_state;

static const char *const cuda_grad_names[] = {"wq", "wk", "wv", "wo", "q_gain", "k_gain"};

/* One rank from x to the sums of the gradients; host tensors go through `stage`, f32 on the device. */
static upipe_status cuda_rank_run(upipe_ctx *c, cuda_state *s, cuda_rank *me, int rank)
{
    const upipe_plan *p = &s->r->plan;
    const block_shape *shape = &s->test->run.shape;
    upipe_dtype dtype = p->desc.dtype;
    int64_t hd = (int64_t)p->desc.heads * p->desc.head_dim, dim = p->desc.model_dim, b, t;
    size_t unit = upipe_plan_unit_bytes(p), wide_bytes = (size_t)(p->rows * dim) * 4;
    size_t heads_bytes = (size_t)(p->rows * hd) * 4, lse_bytes = (size_t)(p->rows * p->desc.heads) * 4;
    float *host = (float *)malloc((size_t)(p->rows * (hd + dim)) * sizeof *host);
    upipe_saved save;
    upipe_slots gout;
    upipe_grads g;
    upipe_view x, y, gx, wide = upipe_view_packed(me->stage, UPIPE_F32, p->rows, 1, (int32_t)dim);
    upipe_view heads = upipe_view_packed(me->stage, UPIPE_F32, p->rows, 1, (int32_t)hd);
    void *data;
    int stage, phase, j;
    upipe_status status = UPIPE_OK;
#define RUN_TRY(call)                      \
    do {                                   \
        status = (call);                   \
        if (status != UPIPE_OK) goto done; \
    } while (0)
    g.wq = me->grads[0];
    g.wk = me->grads[1];
    g.wv = me->grads[2];
    g.wo = me->grads[3];
    g.q_gain = shape->normed ? me->grads[4] : NULL;
    g.k_gain = shape->normed ? me->grads[5] : NULL;
    memset(&save, 0, sizeof save);
    memset(&gout, 0, sizeof gout);

    RUN_TRY(upipe_mem_take(c->mem, &data, unit, "x", &c->err));
    x = gx = upipe_view_packed(data, dtype, p->rows, 1, (int32_t)dim);
    run_rows(p, rank, s->in->x, host, dim, 0);
    RUN_TRY(c->ops->copy(c, me->stage, host, wide_bytes));
    RUN_TRY(c->ops->cast(c, x, wide));
    RUN_TRY(upipe_layer_fwd(c, &me->layer, &save, x));
    RUN_TRY(upipe_layer_gather(c, &me->layer, heads, &save.out));
    RUN_TRY(c->ops->copy(c, host, me->stage, heads_bytes));
    run_rows(p, rank, s->r->out.o, host, hd, 1);
    RUN_TRY(c->ops->copy(c, host, save.lse, lse_bytes));
    for (stage = 0; stage < p->stages; ++stage)
        for (b = 0; b < p->desc.batch; ++b)
            for (t = 0; t < p->desc.tokens; ++t)
                for (j = 0; j < p->per_rank; ++j)
                    s->r->out.lse[(b * p->desc.tokens + t) * p->desc.heads +
                                  upipe_plan_q(p, stage, rank).first + j] =
                        host[((stage * p->desc.batch + b) * p->desc.tokens + t) * p->per_rank + j];
    if (shape->projected) {
        RUN_TRY(upipe_mem_take(c->mem, &data, unit, "y", &c->err));
        y = upipe_view_packed(data, dtype, p->rows, 1, (int32_t)dim);
        RUN_TRY(upipe_layer_out_fwd(c, &me->layer, y, &save));
        RUN_TRY(c->ops->cast(c, wide, y));
        RUN_TRY(c->ops->copy(c, host, me->stage, wide_bytes));
        run_rows(p, rank, s->r->out.y, host, dim, 1);
        run_rows(p, rank, s->in->gy, host, dim, 0);
        RUN_TRY(c->ops->copy(c, me->stage, host, wide_bytes));
        RUN_TRY(c->ops->cast(c, y, wide));
        RUN_TRY(upipe_layer_out_bwd(c, &me->layer, &g, &save, y));
        RUN_TRY(upipe_mem_give(c->mem, y.data, &c->err));
    } else {
        RUN_TRY(upipe_layer_slots_take(c, &me->layer, &gout, UPIPE_SLOT_FULL, "gout"));
        run_rows(p, rank, s->in->go, host, hd, 0);
        RUN_TRY(c->ops->copy(c, me->stage, host, heads_bytes));
        RUN_TRY(upipe_layer_scatter(c, &me->layer, &gout, heads));
    }
    if (s->test->run.gx_apart) RUN_TRY(upipe_mem_take(c->mem, &gx.data, unit, "gx", &c->err));
    RUN_TRY(upipe_layer_bwd(c, &me->layer, gx, &g, &save, shape->projected ? &save.out : &gout, x));
    RUN_TRY(upipe_layer_gather(c, &me->layer, heads, shape->projected ? &save.out : &gout));
    RUN_TRY(c->ops->copy(c, host, me->stage, heads_bytes));
    run_rows(p, rank, s->r->out.go, host, hd, 1);
    RUN_TRY(c->ops->cast(c, wide, gx));
    RUN_TRY(c->ops->copy(c, host, me->stage, wide_bytes));
    run_rows(p, rank, s->r->out.x, host, dim, 1);

    CHECK(save.lse == NULL && save.delta == NULL);
    for (phase = 0; phase < UPIPE_PHASES && !shape->projected; ++phase)
        CHECK_SAY(c->mem->phase_peak[phase] == s->r->bytes.phase[phase],
                  "rank %d: %s holds %zu bytes, the plan says %zu", rank, upipe_phase_name(phase),
                  c->mem->phase_peak[phase], s->r->bytes.phase[phase]);
    if (!shape->projected) CHECK_INT(c->mem->peak, s->r->bytes.peak);
    CHECK(shape->projected ? c->mem->need <= s->r->need : c->mem->need == s->r->need);
    CHECK_INT(c->team->sent_bytes, upipe_plan_sent(p, 0) + upipe_plan_sent(p, 1));
    me->moved = c->team->moved_bytes;
    RUN_TRY(upipe_mem_give(c->mem, gout.data, &c->err));
    RUN_TRY(upipe_saved_free(c, &save));
    if (s->test->run.gx_apart) RUN_TRY(upipe_mem_give(c->mem, gx.data, &c->err));
    RUN_TRY(upipe_mem_give(c->mem, x.data, &c->err));

    for (j = 0; j < 6; ++j) {
        int64_t n = block_count(shape, cuda_grad_names[j]);
        float *const result[] = {s->r->out.wq, s->r->out.wk,     s->r->out.wv,
                                 s->r->out.wo, s->r->out.q_gain, s->r->out.k_gain};
        RUN_TRY(upipe_a2a_sum(c, me->grads[j], n));
        if (rank == 0 && n > 0) RUN_TRY(c->ops->copy(c, result[j], me->grads[j], (size_t)n * sizeof(float)));
    }
    RUN_TRY(c->ops->sync(c));
done:
    free(host);
    return status;
#undef RUN_TRY
}

static upipe_status cuda_rank_main(void *user, int rank)
{
    cuda_state *s = (cuda_state *)user;
    cuda_rank *me = &s->ranks[rank];
    upipe_ctx c = me->d.c;
    upipe_status status;
    int j;
    (void)cudaSetDevice(me->d.cuda.device); /* fails where another rank has ended the context already */
    fake_rank(rank);                        /* the runner's own call above does not count */
    c.mem = &me->mem;
    c.team = s->test->nccl ? &me->nccl.comm : upipe_threads_comm(&s->team, rank);
    status = cuda_rank_run(&c, s, me, rank);
    s->r->errors[rank] = c.err;
    s->r->live[rank] = me->mem.live;
    if (status == UPIPE_OK) {
        CHECK_INT(me->mem.live, 0);
    } else {
        upipe_comm_abort(c.team, c.err.text); /* the host's own calls do not */
        /* as on the CPU: what a failed call took for itself is back */
        static const char *const kept[] = {"x", "y", "gx", "gout", "final_out", "lse", "delta"};
        for (j = 0; j < me->mem.blocks_n; ++j) {
            int k = 0;
            while (k < 7 && strcmp(me->mem.blocks[j].tag, kept[k]) != 0) ++k;
            CHECK_SAY(k < 7 || c.team->quarantine, "rank %d: '%s' is still live after the failure", rank,
                      me->mem.blocks[j].tag);
        }
        upipe_mem_rewind(&me->mem, 0);
    }
    s->test->calls[rank] = fake_calls(rank);
    return status;
}

/* ---- what a rank holds, made and released by the main thread ---- */

static void *cuda_room(size_t *bytes, size_t n)
{
    void *p = NULL;
    DEVICE_CHECK(cudaMalloc(&p, n > 0 ? n : 1));
    *bytes += n > 0 ? n : 1;
    return p;
}

static void cuda_rank_open(cuda_state *s, cuda_rank *me, size_t *bytes)
{
    const block_shape *shape = &s->test->run.shape;
    const run_result *r = s->r;
    const float *weights[] = {s->in->wq, s->in->wk, s->in->wv, s->in->wo};
    const float *gains[] = {s->in->q_gain, s->in->k_gain};
    size_t n, hd = (size_t)shape->h * (size_t)shape->d,
              width = hd > (size_t)shape->dim ? hd : (size_t)shape->dim;
    int j;
    device_open(&me->d);
    *bytes += UPIPE_CUDA_SCRATCH + WORKSPACE;
    me->slab = cuda_room(bytes, s->slab_bytes);
    me->stage = cuda_room(bytes, (size_t)r->plan.rows * width * 4);
    me->blocks = (upipe_block *)malloc((size_t)s->blocks_max * sizeof *me->blocks);
    upipe_mem_init(&me->mem, me->slab, s->slab_bytes, me->blocks, s->blocks_max);
    for (j = 0; j < 4; ++j) {
        void *narrow = run_narrow(shape->dtype, weights[j], block_count(shape, cuda_grad_names[j]));
        n = (size_t)block_count(shape, cuda_grad_names[j]) * upipe_dtype_bytes(shape->dtype);
        me->weights[j] = cuda_room(bytes, n);
        device_put(&me->d, me->weights[j], narrow, n);
        free(narrow);
    }
    for (j = 0; j < 2; ++j) {
        n = (size_t)block_count(shape, cuda_grad_names[4 + j]) * 4;
        me->gains[j] = n > 0 ? (float *)cuda_room(bytes, n) : NULL;
        device_put(&me->d, me->gains[j], gains[j], n);
    }
    for (j = 0; j < 6; ++j) {
        n = (size_t)block_count(shape, cuda_grad_names[j]) * 4;
        me->grads[j] = (float *)cuda_room(bytes, n);
        if (n > 0) CHECK_STATUS(me->d.ops.zero(&me->d.c, me->grads[j], n), UPIPE_OK, me->d.c.err);
    }
    me->layer.plan = &r->plan;
    me->layer.wq = me->weights[0];
    me->layer.wk = me->weights[1];
    me->layer.wv = me->weights[2];
    me->layer.wo = shape->projected ? me->weights[3] : NULL;
    me->layer.q_gain = me->gains[0];
    me->layer.k_gain = me->gains[1];
    DEVICE_CHECK(cudaStreamSynchronize(me->d.stream));
}

static void cuda_rank_close(cuda_rank *me)
{
    int j;
    upipe_mem_free(&me->mem, NULL);
    for (j = 0; j < 4; ++j) DEVICE_CHECK(cudaFree(me->weights[j]));
    for (j = 0; j < 2; ++j) DEVICE_CHECK(cudaFree(me->gains[j]));
    for (j = 0; j < 6; ++j) DEVICE_CHECK(cudaFree(me->grads[j]));
    DEVICE_CHECK(cudaFree(me->stage));
    DEVICE_CHECK(cudaFree(me->slab));
    device_close(&me->d);
    free(me->blocks);
}

/* The communicators come together, then the teams. */
static void cuda_nccl_open(cuda_state *s, size_t *bytes)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclUniqueId id;
    upipe_err err;
    int i, ranks = s->test->run.ranks;
    config.blocking = 0;
    CHECK(ncclGetUniqueId(&id) == ncclSuccess);
    for (i = 0; i < ranks; ++i) {
        ncclResult_t r;
        DEVICE_CHECK(cudaSetDevice(i));
        r = ncclCommInitRankConfig(&s->ranks[i].comm, ranks, id, i, &config);
        CHECK(r == ncclSuccess || r == ncclInProgress);
    }
    for (i = 0; i < ranks; ++i) {
        DEVICE_CHECK(cudaSetDevice(i));
        CHECK_STATUS(upipe_nccl_init(&s->ranks[i].nccl, s->ranks[i].comm, s->test->run.deadline, &err),
                     UPIPE_OK, err);
        *bytes += 288 * (1 + (size_t)ranks);
    }
}

static void cuda_nccl_close(cuda_state *s, int failed)
{
    upipe_err err;
    int i;
    for (i = 0; i < s->test->run.ranks; ++i) {
        cuda_rank *me = &s->ranks[i];
        DEVICE_CHECK(cudaSetDevice(i));
        CHECK_STATUS(upipe_nccl_free(&me->nccl, &err), UPIPE_OK, err);
        if (me->nccl.nccl == NULL) continue; /* freed by the failure */
        CHECK((failed ? ncclCommAbort : ncclCommDestroy)(me->comm) == ncclSuccess);
    }
}

/* Scalars of the layer, for the dry run too. */
static void cuda_layer(const run_case *test, upipe_layer *layer)
{
    const block_shape *shape = &test->shape;
    layer->rope_theta = shape->rope ? shape->theta : 0;
    layer->rope_interleaved = shape->rope == 2;
    layer->norm_eps = shape->normed ? (float)shape->eps : 0;
    layer->scale = (float)shape->scale;
    layer->full = shape->full;
    layer->tile_rows = test->tile_rows;
}

/* Runs the case; the plan's refusal is returned as it is. */
static upipe_status cuda_block(cuda_case *test, const f32_block *in, run_result *r)
{
    const block_shape *shape = &test->run.shape;
    upipe_plan_desc desc;
    upipe_plan_scratch scratch;
    upipe_dry *dry;
    cuda_state *s = (cuda_state *)calloc(1, sizeof *s);
    upipe_layer layer;
    upipe_ops ops;
    device probe;
    upipe_status status;
    int64_t sum_bytes, moved = 0, i;
    size_t bytes = 0;
    upipe_err err;
    (void)run_block; /* the CPU's way, of the same header */
    memset(r, 0, sizeof *r);
    memset(&layer, 0, sizeof layer);
    memset(&desc, 0, sizeof desc);
    desc.tokens = shape->tokens;
    desc.batch = shape->batch;
    desc.model_dim = shape->dim;
    desc.ranks = test->run.ranks;
    desc.heads = shape->h;
    desc.kv_heads = shape->hkv;
    desc.head_dim = shape->d;
    desc.chunk = test->run.chunk;
    desc.naive = test->run.naive;
    desc.dtype = shape->dtype;
    f32_block_make(shape, &r->out);
    status = upipe_plan_init(&r->plan, &desc, &r->errors[0]);
    if (status != UPIPE_OK) {
        free(s);
        return status;
    }
    s->test = test;
    s->in = in;
    s->r = r;

    /* addresses are not followed in a dry run: any that are not NULL will do */
    device_open(&probe);
    ops = probe.ops;
    cuda_layer(&test->run, &layer);
    layer.plan = &r->plan;
    layer.wq = layer.wk = layer.wv = in->x;
    layer.wo = shape->projected ? in->x : NULL;
    layer.q_gain = in->q_gain;
    layer.k_gain = in->k_gain;
    scratch = upipe_layer_scratch(&ops, &layer, !test->run.gx_apart);
    r->bytes = upipe_plan_bytes(&r->plan, &scratch);
    dry = (upipe_dry *)malloc(sizeof *dry);
    if (upipe_dry_init(dry, &r->plan, &ops) != UPIPE_OK) abort();
    status = shape->projected ? upipe_dry_block(dry, &layer, !test->run.gx_apart)
                              : upipe_dry_layer(dry, &layer, !test->run.gx_apart);
    r->errors[0] = dry->ctx.err;
    if (status == UPIPE_OK) CHECK_INT(dry->mem.live, 0);
    r->peak = dry->mem.peak;
    r->need = dry->mem.need;
    s->blocks_max = dry->mem.blocks_peak;
    free(dry);
    device_close(&probe);
    if (status == UPIPE_OK) {
        size_t before = fake_device_live();
        fake_peak_reset();
        sum_bytes = (int64_t)test->run.ranks * UPIPE_SUM_PIECE * 4 + 4096;
        s->slab_bytes = r->need > (size_t)sum_bytes ? r->need : (size_t)sum_bytes;
        for (i = 0; i < test->run.ranks; ++i) {
            if (test->nccl) DEVICE_CHECK(cudaSetDevice((int)i));
            cuda_rank_open(s, &s->ranks[i], &bytes);
            cuda_layer(&test->run, &s->ranks[i].layer);
        }
        status = upipe_threads_init(&s->team, test->run.ranks,
                                    test->run.deadline > 0 ? test->run.deadline : 60, &err);
        if (status == UPIPE_OK) {
            if (test->nccl) cuda_nccl_open(s, &bytes);
            fake_fail_at(test->fail_at, test->fail_rank, test->fail_sticky);
            status = upipe_threads_run(&s->team, cuda_rank_main, s, r->statuses);
            upipe_threads_free(&s->team);
        }
        CHECK_INT(fake_device_peak() - before, bytes);
        for (i = 0; i < test->run.ranks; ++i) moved += s->ranks[i].moved;
        if (status == UPIPE_OK)
            CHECK_INT(moved, test->run.ranks * (upipe_plan_sent(&r->plan, 0) + upipe_plan_sent(&r->plan, 1)));
        if (!test->run.expect_failure) {
            for (i = 0; i < test->run.ranks; ++i)
                CHECK_SAY(r->statuses[i] == UPIPE_OK, "rank %d: %s: %s", (int)i,
                          upipe_status_name(r->statuses[i]), r->errors[i].text);
        }
    }
    snprintf(test->failed, sizeof test->failed, "%s", fake_failed() != NULL ? fake_failed() : "");
    fake_fail_at(0, -1, FAKE_ONCE);
    if (test->nccl && s->slab_bytes > 0) cuda_nccl_close(s, status != UPIPE_OK);
    for (i = 0; i < test->run.ranks && s->slab_bytes > 0; ++i) cuda_rank_close(&s->ranks[i]);
    DEVICE_CHECK(cudaSetDevice(0));
    free(s);
    CHECK(fake_check_clean());
    return status;
}

#endif

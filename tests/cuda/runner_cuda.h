/* runner_cuda.h -- the library's block on C thread ranks with the CUDA table; results as lib/runner.h's
 *
 *     cuda_case test = {{shape, ranks, chunk, naive}};          the rest 0: ranks meet through memory
 *     run_result r;
 *     if (cuda_block(&test, &in, &r) == UPIPE_OK) ...
 *     run_free(&r);
 *
 * Each rank has a plan, a stream, a cuBLAS handle and a slab of exactly the bytes that its dry run asked for,
 * all on one device; over NCCL it has a device of its own. The device memory in use is compared with what the
 * runner itself asked for: the library takes none.
 */
#ifndef UPIPE_TEST_RUNNER_CUDA_H
#define UPIPE_TEST_RUNNER_CUDA_H

#include "fake/fake_pool.h"

#include "../lib/runner.h"

#include "upipe/cuda/upipe_cuda_side_stream.h"
#include "upipe/net/upipe_net_nccl.h"
#include "upipe/net/upipe_net_peer.h"

#include "cuda/device.h"

typedef struct cuda_case {
    run_case run;
    int nccl; /* ranks meet over NCCL, each on a device of its own; else through the memory of one */
    int peer; /* ranks' copy engines write into each other's memory, of a device each; 2: the host runs ahead */
    long fail_at; /* the call of rank `fail_rank` that fails, see fake_fail_at; 0: none */
    int fail_rank, fail_sticky;
    char failed[64];     /* written: the call that failed, if any */
    long calls[RUN_MAX]; /* written: calls of each rank */
} cuda_case;

typedef struct cuda_rank {
    device d, side; /* side: of a side stream */
    upipe_cuda_side_stream side_stream_state;
    upipe_side_stream side_stream;
    upipe_mem mem;
    upipe_mem_block *blocks;
    void *slab, *stage, *weights[RUN_WEIGHTS];
    float *vectors[RUN_GRADS - RUN_WEIGHTS],
        *grads[RUN_GRADS]; /* vectors: q_norm_weight k_norm_weight sinks bq bk bv bo */
    run_own own;
    upipe_nccl nccl;
    ncclComm_t comm;
    upipe_peer peer;
    int64_t moved;
} cuda_rank;

typedef struct cuda_state {
    cuda_case *test;
    const f32_block *in;
    run_result *r;
    upipe_threads team;
    int opened; /* ranks that hold something */
    void *buf;  /* of upipe_peer */
    cuda_rank ranks[RUN_MAX];
} cuda_state;

/* The widest row of f32 that goes through `stage`. */
static int64_t cuda_width(const upipe_plan *p)
{
    const upipe_plan_desc *d = &p->desc;
    int64_t heads = (int64_t)d->heads * (d->v_dim > d->head_dim ? d->v_dim : d->head_dim);
    return heads > d->model_dim ? heads : d->model_dim;
}

/* One rank from x to the sums of the gradients; host tensors go through `stage`, f32 on the device. */
static upipe_status cuda_rank_run(upipe_ctx *c, cuda_state *s, cuda_rank *me, int rank)
{
    const run_own *own = &me->own;
    const upipe_plan *p = &own->plan;
    const upipe_layer *l = &own->layer;
    const block_shape *shape = &s->test->run.shape;
    upipe_dtype dtype = p->desc.dtype;
    int64_t hd = (int64_t)p->desc.heads * p->desc.head_dim, ho = (int64_t)p->desc.heads * p->desc.v_dim;
    int64_t dim = p->desc.model_dim, lse_n = upipe_plan_before(p, p->stages, rank) * p->seq * p->desc.batch;
    size_t unit = upipe_plan_unit_bytes(p), wide_bytes = (size_t)(p->rows * dim) * 4;
    size_t q_bytes = (size_t)(p->rows * hd) * 4, o_bytes = (size_t)(p->rows * ho) * 4;
    float *host = (float *)malloc((size_t)(p->rows * cuda_width(p) + lse_n) * sizeof *host);
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
    upipe_saved save;
    upipe_slots dout;
    upipe_grads g;
    upipe_view x, y, dx, wide = upipe_view_packed(me->stage, UPIPE_F32, p->rows, 1, (int32_t)dim);
    upipe_view q = upipe_view_packed(me->stage, UPIPE_F32, p->rows, 1, (int32_t)hd);
    upipe_view o = upipe_view_packed(me->stage, UPIPE_F32, p->rows, 1, (int32_t)ho);
    void *data;
    int phase, j;
    upipe_status status = UPIPE_OK;
#define RUN_TRY(call)                      \
    do {                                   \
        status = (call);                   \
        if (status != UPIPE_OK) goto done; \
    } while (0)
    memset(&g, 0, sizeof g);
    g.wq = me->grads[0];
    g.wk = me->grads[1];
    g.wv = me->grads[2];
    g.wo = me->grads[3];
    g.q_norm_weight = shape->normed ? me->grads[4] : NULL;
    g.k_norm_weight = shape->normed ? me->grads[5] : NULL;
    g.sinks = shape->sinks ? me->grads[6] : NULL;
    g.bq = shape->biased ? me->grads[7] : NULL;
    g.bk = shape->biased ? me->grads[8] : NULL;
    g.bv = shape->biased ? me->grads[9] : NULL;
    g.bo = shape->biased && shape->projected ? me->grads[10] : NULL;
    memset(&save, 0, sizeof save);
    memset(&dout, 0, sizeof dout);

    RUN_TRY(upipe_mem_alloc(c->mem, &data, unit, "x", &c->err));
    x = dx = upipe_view_packed(data, dtype, p->rows, 1, (int32_t)dim);
    run_rows(p, s->in->x, host, dim, 0);
    RUN_TRY(c->ops->copy(c, me->stage, host, wide_bytes));
    RUN_TRY(c->ops->cast(c, x, wide));
    RUN_TRY(upipe_layer_fwd(c, l, &save, x));
    RUN_TRY(upipe_slots_gather(c, l->plan, o, &save.out));
    RUN_TRY(c->ops->copy(c, host, me->stage, o_bytes));
    run_rows(p, s->r->out.o, host, ho, 1);
    RUN_TRY(c->ops->copy(c, host, save.lse, (size_t)lse_n * 4));
    run_lse(p, s->r->out.lse, host);
    if (shape->projected) {
        RUN_TRY(upipe_mem_alloc(c->mem, &data, unit, "y", &c->err));
        y = upipe_view_packed(data, dtype, p->rows, 1, (int32_t)dim);
        RUN_TRY(upipe_layer_out_fwd(c, l, y, &save));
        RUN_TRY(c->ops->cast(c, wide, y));
        RUN_TRY(c->ops->copy(c, host, me->stage, wide_bytes));
        run_rows(p, s->r->out.y, host, dim, 1);
        run_rows(p, s->in->dy, host, dim, 0);
        RUN_TRY(c->ops->copy(c, me->stage, host, wide_bytes));
        RUN_TRY(c->ops->cast(c, y, wide));
        RUN_TRY(upipe_layer_out_bwd(c, l, &g, &save, y));
        RUN_TRY(upipe_mem_free(c->mem, y.data, &c->err));
    } else {
        RUN_TRY(upipe_slots_alloc(c, l->plan, &dout, UPIPE_SLOT_FULL, "dout"));
        run_rows(p, s->in->dout, host, ho, 0);
        RUN_TRY(c->ops->copy(c, me->stage, host, o_bytes));
        RUN_TRY(upipe_slots_scatter(c, l->plan, &dout, o));
    }
    if (s->test->run.dx_apart) RUN_TRY(upipe_mem_alloc(c->mem, &dx.data, unit, "dx", &c->err));
    RUN_TRY(upipe_layer_bwd(c, l, dx, &g, &save, shape->projected ? &save.out : &dout, x));
    RUN_TRY(run_gather_q(c, p, q, shape->projected ? &save.out : &dout));
    RUN_TRY(c->ops->copy(c, host, me->stage, q_bytes));
    run_rows(p, s->r->out.q, host, hd, 1);
    RUN_TRY(c->ops->cast(c, wide, dx));
    RUN_TRY(c->ops->copy(c, host, me->stage, wide_bytes));
    run_rows(p, s->r->out.x, host, dim, 1);

    CHECK(save.lse == NULL && save.delta == NULL);
    for (phase = 0; phase < UPIPE_PHASES; ++phase)
        CHECK_SAY(c->mem->phase_peak[phase] == own->bytes.phase[phase],
                  "rank %d: %s holds %zu bytes, its dry run %zu", rank, upipe_phase_name(phase),
                  c->mem->phase_peak[phase], own->bytes.phase[phase]);
    CHECK(shape->projected ? c->mem->need <= own->need : c->mem->need == own->need);
    CHECK(shape->projected ? c->mem->peak <= own->bytes.peak : c->mem->peak == own->bytes.peak);
    CHECK_INT(c->team->sent_bytes, upipe_plan_sent(p, 0) + upipe_plan_sent(p, 1));
    me->moved = c->team->moved_bytes;
    RUN_TRY(upipe_mem_free(c->mem, dout.data, &c->err));
    RUN_TRY(upipe_saved_free(c, &save));
    if (s->test->run.dx_apart) RUN_TRY(upipe_mem_free(c->mem, dx.data, &c->err));
    RUN_TRY(upipe_mem_free(c->mem, x.data, &c->err));

    for (j = 0; j < RUN_GRADS; ++j) {
        int64_t n = block_count(shape, run_grads[j]);
        RUN_TRY(upipe_all_reduce(c, me->grads[j], n));
        if (rank == 0 && n > 0) RUN_TRY(c->ops->copy(c, result[j], me->grads[j], (size_t)n * sizeof(float)));
    }
    RUN_TRY(c->ops->sync(c));
done:
    free(host);
    return status;
#undef RUN_TRY
}

static size_t cuda_slab_bytes(const cuda_state *s, const cuda_rank *me);

/* Slab and gradients are what peers write to; what init has written there is zero again. */
static upipe_status cuda_peer_open(upipe_ctx *c, cuda_state *s, cuda_rank *me, int rank)
{
    upipe_peer_slab slabs[1 + RUN_GRADS];
    upipe_peer_desc d;
    int j;
    memset(&d, 0, sizeof d);
    d.buf = s->buf;
    d.slabs = slabs;
    d.rank = rank;
    d.ranks = s->test->run.ranks;
    slabs[d.slabs_n].data = me->slab;
    slabs[d.slabs_n++].bytes = cuda_slab_bytes(s, me);
    for (j = 0; j < RUN_GRADS; ++j) {
        slabs[d.slabs_n].data = me->grads[j];
        slabs[d.slabs_n].bytes = (size_t)block_count(&s->test->run.shape, run_grads[j]) * 4;
        d.slabs_n += slabs[d.slabs_n].bytes > 0;
    }
    UPIPE_TRY(upipe_peer_init(&me->peer, &d, &c->err));
    for (j = 1; j < d.slabs_n; ++j) UPIPE_TRY(c->ops->zero(c, slabs[j].data, (size_t)d.ranks * 8));
    me->peer.ahead = s->test->peer == 2;
    c->team = &me->peer.comm;
    return UPIPE_OK;
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
    c.side_stream = s->test->run.overlap ? &me->side_stream : NULL;
    c.team = s->test->nccl ? &me->nccl.comm : upipe_threads_comm(&s->team, rank);
    status = s->test->peer ? cuda_peer_open(&c, s, me, rank) : UPIPE_OK;
    if (status == UPIPE_OK) status = cuda_rank_run(&c, s, me, rank);
    s->r->errors[rank] = c.err;
    s->r->live[rank] = me->mem.live;
    if (status == UPIPE_OK) {
        CHECK_INT(me->mem.live, 0);
    } else {
        upipe_comm_abort(c.team, c.err.text); /* the host's own calls do not */
        /* as on the CPU: what a failed call took for itself is back */
        static const char *const kept[] = {"x", "y", "dx", "dout", "final_out", "lse", "delta"};
        for (j = 0; j < me->mem.blocks_n; ++j) {
            int k = 0;
            while (k < 7 && strcmp(me->mem.blocks[j].tag, kept[k]) != 0) ++k;
            CHECK_SAY(k < 7 || c.team->quarantine, "rank %d: '%s' is still live after the failure", rank,
                      me->mem.blocks[j].tag);
        }
        upipe_mem_rewind(&me->mem, 0);
    }
    s->test->calls[rank] = fake_calls(rank);
    if (s->test->peer) CHECK_STATUS(upipe_peer_free(&me->peer, &c.err), UPIPE_OK, c.err);
    return status;
}

/* ---- what a rank holds, made and released by the main thread ---- */

static void *cuda_buf(size_t *bytes, size_t n)
{
    void *p = NULL;
    DEVICE_CHECK(cudaMalloc(&p, n > 0 ? n : 1));
    *bytes += n > 0 ? n : 1;
    return p;
}

static size_t cuda_slab_bytes(const cuda_state *s, const cuda_rank *me)
{
    size_t sum = (size_t)s->test->run.ranks * UPIPE_REDUCE_STRIP * 4 + 4096;
    return me->own.need > sum ? me->own.need : sum;
}

static void cuda_rank_open(cuda_state *s, cuda_rank *me, size_t *bytes)
{
    const block_shape *shape = &s->test->run.shape;
    const float *weights[] = {s->in->wq, s->in->wk, s->in->wv, s->in->wo};
    const float *vectors[] = {
        s->in->q_norm_weight, s->in->k_norm_weight, s->in->sinks, s->in->bq, s->in->bk, s->in->bv, s->in->bo};
    const size_t slab_bytes = cuda_slab_bytes(s, me);
    upipe_layer *l = &me->own.layer;
    size_t n;
    int j;
    device_open(&me->d);
    *bytes += UPIPE_CUDA_SCRATCH + WORKSPACE;
    if (s->test->run.overlap) {
        device_open(&me->side);
        *bytes += UPIPE_CUDA_SCRATCH + WORKSPACE;
        CHECK_STATUS(upipe_cuda_side_stream_init(&me->side_stream_state, &me->side_stream, me->side.stream,
                                                 &me->side.ops, &me->d.c.err),
                     UPIPE_OK, me->d.c.err);
    }
    me->slab = cuda_buf(bytes, slab_bytes);
    me->stage = cuda_buf(bytes, (size_t)(me->own.plan.rows * cuda_width(&me->own.plan)) * 4);
    me->blocks = (upipe_mem_block *)malloc((size_t)me->own.blocks_max * sizeof *me->blocks);
    upipe_mem_init(&me->mem, me->slab, slab_bytes, me->blocks, me->own.blocks_max);
    for (j = 0; j < RUN_WEIGHTS; ++j) {
        const int64_t count = block_count(shape, run_grads[j]);
        void *narrow = run_narrow(shape->dtype, weights[j], count);
        n = (size_t)count * upipe_dtype_bytes(shape->dtype);
        me->weights[j] = n > 0 ? cuda_buf(bytes, n) : NULL;
        if (n > 0) device_put(&me->d, me->weights[j], narrow, n);
        free(narrow);
    }
    for (j = 0; j < RUN_GRADS - RUN_WEIGHTS; ++j) {
        n = (size_t)block_count(shape, run_grads[RUN_WEIGHTS + j]) * 4;
        me->vectors[j] = n > 0 ? (float *)cuda_buf(bytes, n) : NULL;
        device_put(&me->d, me->vectors[j], vectors[j], n);
    }
    for (j = 0; j < RUN_GRADS; ++j) {
        n = (size_t)block_count(shape, run_grads[j]) * 4;
        me->grads[j] = (float *)cuda_buf(bytes, n);
        if (n > 0) CHECK_STATUS(me->d.ops.zero(&me->d.c, me->grads[j], n), UPIPE_OK, me->d.c.err);
    }
    l->wq = me->weights[0];
    l->wk = me->weights[1];
    l->wv = me->weights[2];
    l->wo = shape->projected ? me->weights[3] : NULL;
    l->q_norm_weight = me->vectors[0];
    l->k_norm_weight = me->vectors[1];
    l->mask.sinks = me->vectors[2];
    l->bq = me->vectors[3];
    l->bk = me->vectors[4];
    l->bv = me->vectors[5];
    l->bo = me->vectors[6];
    DEVICE_CHECK(cudaStreamSynchronize(me->d.stream));
}

static void cuda_rank_close(cuda_rank *me)
{
    int j;
    CHECK_STATUS(upipe_cuda_side_stream_free(&me->side_stream_state, &me->d.c.err), UPIPE_OK, me->d.c.err);
    if (me->side.stream != NULL) device_close(&me->side);
    upipe_mem_destroy(&me->mem, NULL);
    for (j = 0; j < RUN_WEIGHTS; ++j) DEVICE_CHECK(cudaFree(me->weights[j]));
    for (j = 0; j < RUN_GRADS - RUN_WEIGHTS; ++j) DEVICE_CHECK(cudaFree(me->vectors[j]));
    for (j = 0; j < RUN_GRADS; ++j) DEVICE_CHECK(cudaFree(me->grads[j]));
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

/* What a rank is to run, and how much memory it takes. Addresses are not followed in a dry run: any that are
 * not NULL will do. */
static upipe_status cuda_rank_plan(cuda_state *s, cuda_rank *me, int rank, const upipe_ops *ops)
{
    const run_case *test = &s->test->run;
    const f32_block *in = s->in;
    const upipe_plan_desc d = run_desc(test, rank, 0);
    upipe_layer *l = &me->own.layer;
    UPIPE_TRY(upipe_plan_init(&me->own.plan, &d, &s->r->errors[0]));
    *l = run_layer(test);
    l->plan = &me->own.plan;
    l->wq = l->wk = l->wv = in->x;
    l->wo = test->shape.projected ? in->x : NULL;
    l->q_norm_weight = in->q_norm_weight;
    l->k_norm_weight = in->k_norm_weight;
    l->mask.sinks = in->sinks;
    return run_dry(test, ops, &me->own, &s->r->errors[0]);
}

/* Runs the case; a refusal of the plan or of the dry run, a ring's among them, is returned as it is. */
static upipe_status cuda_block(cuda_case *test, const f32_block *in, run_result *r)
{
    cuda_state *s = (cuda_state *)calloc(1, sizeof *s);
    const int ranks = test->run.ranks;
    device probe;
    upipe_status status = UPIPE_OK;
    int64_t moved = 0, sent = 0;
    size_t bytes = 0;
    upipe_err err;
    int i;
    (void)run_block; /* the CPU's way, of the same header */
    memset(r, 0, sizeof *r);
    f32_block_make(&test->run.shape, &r->out);
    s->test = test;
    s->in = in;
    s->r = r;
    device_open(&probe);
    for (i = 0; i < ranks && status == UPIPE_OK; ++i) {
        const upipe_plan *p = &s->ranks[i].own.plan;
        status = cuda_rank_plan(s, &s->ranks[i], i, &probe.ops);
        if (status == UPIPE_OK) sent += upipe_plan_sent(p, 0) + upipe_plan_sent(p, 1);
    }
    device_close(&probe);
    s->buf = aligned_alloc(128, (upipe_peer_bytes(ranks) + 127) / 128 * 128);
    memset(s->buf, 0, upipe_peer_bytes(ranks));
    r->plan = s->ranks[0].own.plan;
    r->bytes = s->ranks[0].own.bytes;
    r->need = s->ranks[0].own.need;
    if (status == UPIPE_OK) {
        size_t before = fake_device_live();
        fake_peak_reset();
        for (; s->opened < ranks; ++s->opened) {
            if (test->nccl || test->peer) DEVICE_CHECK(cudaSetDevice(s->opened));
            cuda_rank_open(s, &s->ranks[s->opened], &bytes);
        }
        status = upipe_threads_init(&s->team, ranks, test->run.deadline > 0 ? test->run.deadline : 60, &err);
        if (status == UPIPE_OK) {
            if (test->nccl) cuda_nccl_open(s, &bytes);
            fake_fail_at(test->fail_at, test->fail_rank, test->fail_sticky);
            status = upipe_threads_run(&s->team, cuda_rank_main, s, r->statuses, NULL);
            upipe_threads_free(&s->team);
        }
        CHECK_INT(fake_device_peak() - before, bytes);
        for (i = 0; i < ranks; ++i) moved += s->ranks[i].moved;
        if (status == UPIPE_OK) CHECK_INT(moved, sent);
        if (!test->run.expect_failure)
            for (i = 0; i < ranks; ++i)
                CHECK_SAY(r->statuses[i] == UPIPE_OK, "rank %d: %s: %s", i, upipe_status_name(r->statuses[i]),
                          r->errors[i].text);
    }
    snprintf(test->failed, sizeof test->failed, "%s", fake_failed() != NULL ? fake_failed() : "");
    fake_fail_at(0, -1, FAKE_ONCE);
    if (test->nccl && s->opened > 0) cuda_nccl_close(s, status != UPIPE_OK);
    while (s->opened > 0) cuda_rank_close(&s->ranks[--s->opened]);
    DEVICE_CHECK(cudaSetDevice(0));
    free(s->buf);
    free(s);
    CHECK(fake_check_clean());
    return status;
}

#endif

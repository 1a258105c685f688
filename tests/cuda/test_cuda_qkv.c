/* test_cuda_qkv -- attention of the host's own Q, K, V (upipe_qkv.h) over the CUDA table, on the fake device
 *
 * Q, K, V are one fused tensor [rows][H*d + Hkv*d + Hkv*dv] outside of the pool, and their gradients lie over them.
 * Each rank has a slab of exactly the bytes of its dry run. Results are held to the truth; then other orders of the
 * streams, and a side stream, must give the same bits.
 */
#include "fake/fake_pool.h"

#include "../lib/runner.h"

#include "../lib/qkv.h"

#include "upipe/cuda/upipe_cuda_side_stream.h"

#include "cuda/device.h"

typedef struct job {
    run_case t;
    int wide; /* the host's tensors are f32, whatever is sent */
    const tensors *in;
    const float *sinks;
    tensors *out;
    upipe_threads team;
    upipe_err errors[RUN_MAX];
    float *dsinks[RUN_MAX];
} job;

/* What a rank holds on the device. */
typedef struct host {
    device d, side;
    upipe_cuda_side_stream stream;
    upipe_side_stream side_stream;
    upipe_plan plan;
    upipe_qkv a;
    upipe_qkv_grads g;
    char *fused, *o, *dout, *stage;
    float *sinks, *dsinks;
} host;

static void host_open(host *h, const job *j)
{
    const upipe_plan_desc *d = &h->plan.desc;
    const upipe_dtype type = j->wide ? UPIPE_F32 : d->dtype;
    const size_t e = upipe_dtype_bytes(type);
    const int64_t rows = h->plan.rows, q = (int64_t)d->heads * d->head_dim,
                  k = (int64_t)d->kv_heads * d->head_dim;
    const int64_t o = (int64_t)d->heads * d->v_dim, all = q + k + (int64_t)d->kv_heads * d->v_dim;
    upipe_qkv grads;
    h->fused = (char *)device_new(&h->d, (size_t)(rows * all) * e);
    h->o = (char *)device_new(&h->d, (size_t)(rows * o) * e);
    h->dout = (char *)device_new(&h->d, (size_t)(rows * o) * e);
    h->stage = (char *)device_new(&h->d, (size_t)(rows * (q > o ? q : o)) * 4);
    h->a.plan = &h->plan, h->a.mask = run_layer(&j->t).mask, h->a.scale = (float)j->t.shape.scale;
    h->a = upipe_qkv_fused(&h->a, h->fused, h->o, type);
    grads = upipe_qkv_fused(&h->a, h->fused, h->dout, type);
    h->g = upipe_qkv_grads_of(&grads);
    if (j->sinks == NULL) return;
    h->sinks = (float *)device_new(&h->d, (size_t)d->heads * 4);
    h->dsinks = (float *)device_new(&h->d, (size_t)d->heads * 4);
    device_put(&h->d, h->sinks, j->sinks, (size_t)d->heads * 4);
    device_put(&h->d, h->dsinks, j->out->dsinks, (size_t)d->heads * 4); /* zeros */
    h->a.mask.sinks = h->sinks, h->g.dsinks = h->dsinks;
}

static void host_close(host *h, int overlap)
{
    void *const held[] = {h->fused, h->o, h->dout, h->stage, h->sinks, h->dsinks};
    for (int i = 0; i < 6; ++i) device_free(&h->d, held[i]);
    if (overlap) CHECK_STATUS(upipe_cuda_side_stream_free(&h->stream, &h->d.c.err), UPIPE_OK, h->d.c.err);
    if (overlap) device_close(&h->side);
    device_close(&h->d);
}

/* Rows of this rank, natural order <-> a view on the device. */
static upipe_status move(host *h, upipe_view v, float *natural, int out)
{
    const int64_t w = (int64_t)v.h * v.d;
    const size_t bytes = (size_t)(v.n * w) * 4;
    const upipe_view wide = upipe_view_packed(h->stage, UPIPE_F32, v.n, v.h, v.d);
    float *rows = f32_buf(v.n * w);
    upipe_status s;
    if (!out) run_rows(&h->plan, natural, rows, w, 0);
    if (!out) device_put(&h->d, h->stage, rows, bytes);
    s = h->d.ops.cast(&h->d.c, out ? wide : v, out ? v : wide);
    device_get(&h->d, rows, h->stage, bytes); /* after the cast */
    if (out) run_rows(&h->plan, natural, rows, w, 1);
    return s;
}

static upipe_status steps(host *h, const job *j)
{
    upipe_ctx *c = &h->d.c;
    const int64_t lse_n = upipe_plan_before(&h->plan, h->plan.stages, h->plan.desc.rank) *
                          h->plan.team_tokens * h->plan.desc.batch;
    float *lse = f32_buf(lse_n);
    upipe_saved save;
    upipe_status s = move(h, h->a.q, j->in->at[Q], 0);
    if (s == UPIPE_OK) s = move(h, h->a.k, j->in->at[K], 0);
    if (s == UPIPE_OK) s = move(h, h->a.v, j->in->at[V], 0);
    if (s == UPIPE_OK) s = move(h, h->g.dout, j->in->at[DOUT], 0);
    if (s == UPIPE_OK) s = upipe_qkv_fwd(c, &h->a, &save);
    if (s == UPIPE_OK) device_get(&h->d, lse, save.lse, (size_t)lse_n * 4);
    if (s == UPIPE_OK) run_lse(&h->plan, j->out->at[LSE], lse);
    if (s == UPIPE_OK) s = upipe_qkv_bwd(c, &h->a, &h->g, &save);
    if (s == UPIPE_OK) s = move(h, h->a.o, j->out->at[O], 1);
    if (s == UPIPE_OK) s = move(h, h->g.dq, j->out->at[DQ], 1);
    if (s == UPIPE_OK) s = move(h, h->g.dk, j->out->at[DK], 1);
    if (s == UPIPE_OK) s = move(h, h->g.dv, j->out->at[DV], 1);
    return s;
}

/* Against the dry run, phase by phase, and against the plan. */
static void check_bytes(const upipe_ctx *c, const upipe_plan *p, const upipe_dry *dry)
{
    const upipe_bytes bytes = upipe_dry_bytes(dry);
    for (int phase = 0; phase < UPIPE_PHASES; ++phase)
        CHECK_SAY(c->mem->phase_peak[phase] == bytes.phase[phase], "%s holds %zu bytes, its dry run %zu",
                  upipe_phase_name(phase), c->mem->phase_peak[phase], bytes.phase[phase]);
    CHECK_INT(c->mem->peak, bytes.peak);
    CHECK_INT(c->mem->need, dry->mem.need);
    CHECK_INT(c->mem->live, 0);
    CHECK_INT(c->team->sent_bytes, upipe_plan_sent(p, 0) + upipe_plan_sent(p, 1));
}

static upipe_status body(void *user, int rank)
{
    job *j = (job *)user;
    const upipe_plan_desc desc = run_desc(&j->t, rank, 0);
    upipe_dry *dry = (upipe_dry *)malloc(sizeof *dry);
    upipe_mem_block *blocks;
    upipe_status s;
    upipe_mem mem;
    host h;
    void *slab;
    memset(&h, 0, sizeof h);
    if (!device_open(&h.d)) return UPIPE_ERR_BACKEND;
    if (j->t.overlap && device_open(&h.side))
        CHECK_STATUS(
            upipe_cuda_side_stream_init(&h.stream, &h.side_stream, h.side.stream, &h.side.ops, &h.d.c.err),
            UPIPE_OK, h.d.c.err);
    CHECK_STATUS(upipe_plan_init(&h.plan, &desc, &h.d.c.err), UPIPE_OK, h.d.c.err);
    host_open(&h, j);
    CHECK_STATUS(upipe_dry_init(dry, &h.plan, &h.d.ops), UPIPE_OK, dry->ctx.err);
    CHECK_STATUS(upipe_dry_qkv(dry, &h.a), UPIPE_OK, dry->ctx.err);
    blocks = (upipe_mem_block *)malloc((size_t)dry->mem.blocks_peak * sizeof *blocks);
    slab = device_new(&h.d, dry->mem.need);
    upipe_mem_init(&mem, slab, dry->mem.need, blocks, dry->mem.blocks_peak);
    h.d.c.mem = &mem;
    h.d.c.team = upipe_threads_comm(&j->team, rank);
    if (j->t.overlap) h.d.c.side_stream = &h.side_stream;
    s = steps(&h, j);
    if (s == UPIPE_OK) check_bytes(&h.d.c, &h.plan, dry);
    if (j->sinks != NULL) device_get(&h.d, j->dsinks[rank], h.dsinks, (size_t)desc.heads * 4);
    j->errors[rank] = h.d.c.err;
    upipe_mem_rewind(&mem, 0);
    upipe_mem_destroy(&mem, NULL);
    device_free(&h.d, slab);
    host_close(&h, j->t.overlap);
    free(blocks);
    free(dry);
    return s;
}

static void run(job *j)
{
    const int heads = j->t.shape.h;
    upipe_err err;
    tensors_make(&j->t.shape, j->out);
    for (int rank = 0; rank < j->t.ranks; ++rank) j->dsinks[rank] = f32_buf(heads);
    CHECK_STATUS(upipe_threads_init(&j->team, j->t.ranks, 60, &err), UPIPE_OK, err);
    CHECK_STATUS(upipe_threads_run(&j->team, body, j, NULL, &err), UPIPE_OK, err);
    upipe_threads_free(&j->team);
    for (int rank = 0; rank < j->t.ranks; ++rank)
        for (int i = 0; i < heads; ++i) j->out->dsinks[i] += j->dsinks[rank][i];
    CHECK(fake_check_clean());
}

typedef struct qkv_case {
    int64_t tokens;
    int batch, h, hkv, d, v_dim, ranks, chunk, wide, masked;
    upipe_dtype dtype;
} qkv_case;

static void test_case(const qkv_case *q)
{
    float sinks[64];
    tensors in, first, again;
    test_rng rng = {31};
    job j;
    block_shape *s = &j.t.shape;
    memset(&j, 0, sizeof j);
    s->tokens = q->tokens, s->batch = q->batch, s->h = q->h, s->hkv = q->hkv, s->d = q->d,
    s->v_dim = q->v_dim;
    s->dim = 32, s->dtype = q->dtype, s->scale = 1 / sqrt((double)q->d);
    s->window = q->masked ? 9 : 0, s->sinks = q->masked;
    j.t.ranks = q->ranks, j.t.chunk = q->chunk, j.wide = q->wide;
    for (int i = 0; i < q->h; ++i) sinks[i] = (float)(test_below(&rng, 2048) - 1024) / 512;
    tensors_draw(s, &rng, &in);
    j.in = &in, j.out = &first, j.sinks = q->masked ? sinks : NULL;
    fake_seed(0);
    run(&j);
    check_oracle(s, &in, j.sinks, NAIVE_NARROW, &first);
    j.out = &again;
    for (int round = 1; round < 6;
         ++round) { /* from 3 on with a side stream, where there are stages and common rounds */
        j.t.overlap = round >= 3;
        if (j.t.overlap && (q->chunk == q->h || q->h % q->ranks != 0)) break;
        fake_seed((uint64_t)round);
        fake_eager(round == 2 || round == 5);
        run(&j);
        for (int i = O; i < TENSORS; ++i)
            if (i != DOUT) CHECK_BYTES(again.at[i], first.at[i], (size_t)count(s, i) * 4);
        CHECK_BYTES(again.dsinks, first.dsinks, (size_t)s->h * 4);
    }
    fake_eager(0);
}

int main(int argc, char **argv)
{
    static const qkv_case cases[] = {
        {24, 1, 4, 2, 32, 0, 1, 2, 0, 0, UPIPE_BF16}, /* one rank, in stages */
        {24, 2, 4, 4, 32, 0, 2, 4, 0, 0, UPIPE_BF16}, /* Ulysses */
        {24, 1, 8, 4, 32, 0, 2, 2, 1, 0, UPIPE_BF16}, /* UPipe; the host's tensors in f32 */
        {20, 1, 8, 2, 40, 0, 4, 4, 0, 1,
         UPIPE_BF16}, /* ranks share key and value heads; a window and sinks */
        {21, 1, 8, 4, 32, 48, 2, 4, 0, 0,
         UPIPE_F32}, /* lengths that do not divide; values of another width */
        {19, 2, 9, 3, 32, 0, 2, 2, 0, 0, UPIPE_BF16}, /* heads that do not */
    };
    test_begin(argc, argv);
    for (int i = 0; i < (int)(sizeof cases / sizeof *cases); ++i) TEST(test_case(&cases[i]));
    return test_end("cuda_qkv");
}

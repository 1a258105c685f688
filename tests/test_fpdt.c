/* test_fpdt -- the block in segments of the sequence, against the oracle: with all heads at once (FPDT), and
 * in head chunks (UPipe x FPDT); bytes of device, host and transfers; copies beside attention; refusals
 *
 * Draws as lib/test.h has them, a tenth of their number and seconds.
 */
#include "lib/reads_o.h"
#include "lib/runner.h"
#include "lib/close.h"

typedef struct segments_state {
    const run_case *test;
    const f32_block *in;
    f32_block out;
    int segments;
    upipe_threads team;
    upipe_ops ops;
    void *weights[RUN_WEIGHTS];
    upipe_err errors[RUN_MAX];
} segments_state;

/* A table whose copy fails at number `at` of one rank's (0: never), with a sentence or without. */
typedef struct frail {
    upipe_status (*copy)(upipe_ctx *c, void *dst, const void *src, size_t bytes);
    int at, rank, mute;
    int calls, on_side_stream; /* so far; of these, for the context `side stream` */
    const upipe_ctx *side_stream;
} frail;

static frail the_frail;

static upipe_status frail_copy(upipe_ctx *c, void *dst, const void *src, size_t bytes)
{
    if (c->team->rank != the_frail.rank) return the_frail.copy(c, dst, src, bytes);
    if (c == the_frail.side_stream) __atomic_add_fetch(&the_frail.on_side_stream, 1, __ATOMIC_ACQ_REL);
    if (__atomic_add_fetch(&the_frail.calls, 1, __ATOMIC_ACQ_REL) != the_frail.at)
        return the_frail.copy(c, dst, src, bytes);
    return the_frail.mute ? UPIPE_ERR_BACKEND
                          : upipe_fail(&c->err, UPIPE_ERR_BACKEND, "copy %d fails", the_frail.at);
}

/* Rows of a rank, [segment][batch][T], <-> natural order. */
static void segment_rows(const upipe_fpdt *f, float *natural, float *mine, int64_t width, int out)
{
    for (int i = 0; i < f->segments; ++i) {
        upipe_shard s = upipe_fpdt_shard(f, i);
        for (int64_t b = 0; b < f->desc.batch; ++b)
            for (int64_t t = 0; t < s.n; ++t, mine += width) {
                float *at = natural + (b * f->desc.tokens + upipe_shard_pos(&s, t)) * width;
                memcpy(out ? at : mine, out ? mine : at, (size_t)width * sizeof *at);
            }
    }
}

static int64_t segment_tokens(const upipe_fpdt *f)
{
    int64_t n = 0;
    for (int i = 0; i < f->segments; ++i) n += upipe_fpdt_shard(f, i).n;
    return n * f->desc.batch;
}

/* lse of this rank's heads, and dQ of its tokens, which lies in the slots of dout. */
static void segment_stats(segments_state *s, upipe_ctx *c, const upipe_fpdt *f, const upipe_fpdt_saved *save,
                          const char *dout)
{
    const size_t slot = upipe_fpdt_out_bytes(f) / (size_t)f->segments;
    upipe_plan ends[2];
    upipe_buffers largest;
    if (upipe_fpdt_plan(f, 0, &ends[0], &c->err) != UPIPE_OK ||
        upipe_fpdt_plan(f, f->segments - 1, &ends[1], &c->err) != UPIPE_OK)
        return;
    largest = upi_buffers_max(ends[0].buffers, ends[1].buffers);
    for (int i = 0; i < f->segments; ++i) {
        const int64_t first = upipe_cut(f->desc.tokens, f->segments, i);
        upipe_shard mine = upipe_fpdt_shard(f, i);
        upipe_plan p;
        if (upipe_fpdt_plan(f, i, &p, &c->err) != UPIPE_OK) return;
        for (int stage = 0; stage < p.stages; ++stage) {
            const float *lse =
                (const float *)upipe_offset(save->lse, largest.stat * (size_t)(i * p.stages + stage));
            upipe_head_range q = upipe_plan_q(&p, stage, p.desc.rank);
            for (int64_t b = 0; b < p.desc.batch; ++b)
                for (int64_t t = 0; t < p.team_tokens; ++t)
                    for (int j = 0; j < q.count; ++j)
                        s->out.lse[(b * f->desc.tokens + first + t) * p.desc.heads + q.first + j] = *lse++;
            for (int rank = 0; rank < p.desc.ranks; ++rank) {
                int64_t at =
                    (int64_t)upipe_plan_offset(&p, UPIPE_A2A_Q, stage, rank) * p.rows * p.desc.head_dim;
                const char *from = dout + slot * (size_t)i + largest.slot * (size_t)stage;
                q = upipe_plan_q(&p, stage, rank);
                for (int64_t b = 0; b < p.desc.batch; ++b)
                    for (int64_t t = 0; t < p.local; ++t)
                        for (int j = 0; j < q.count; ++j)
                            for (int k = 0; k < p.desc.head_dim; ++k, ++at)
                                s->out.q[((b * f->desc.tokens + upipe_shard_pos(&mine, t)) * p.desc.heads +
                                          q.first + j) *
                                             p.desc.head_dim +
                                         k] = upipe_cpu_get(from, p.desc.dtype, at);
            }
        }
    }
}

/* x, dx, dout and results are the host's; both pools hold what the dry run says. */
static upipe_status segment_rank(upipe_ctx *c, segments_state *s, upipe_fpdt *f, upipe_dry *dry,
                                 float *const *grads)
{
    const block_shape *shape = &s->test->shape;
    const int64_t rows = segment_tokens(f), dim = shape->dim,
                  wide = (int64_t)shape->h * (shape->v_dim ? shape->v_dim : shape->d);
    const size_t e = upipe_dtype_bytes(shape->dtype);
    float *host = f32_buf(rows * (dim > wide ? dim : wide));
    char *x = (char *)buffer((size_t)(rows * dim) * e), *dout = (char *)buffer(upipe_fpdt_out_bytes(f));
    const upipe_view x32 = upipe_view_packed(host, UPIPE_F32, rows, 1, (int32_t)dim);
    const upipe_view x16 = upipe_view_packed(x, shape->dtype, rows, 1, (int32_t)dim);
    const upipe_bytes bytes = upipe_dry_bytes(dry);
    upipe_fpdt_saved save;
    upipe_plan p;
    int64_t sent = 0;
    upipe_grads g = {.wq = grads[0],
                     .wk = grads[1],
                     .wv = grads[2],
                     .q_norm_weight = shape->normed ? grads[4] : NULL,
                     .k_norm_weight = shape->normed ? grads[5] : NULL,
                     .sinks = shape->sinks ? grads[6] : NULL,
                     .bq = shape->biased ? grads[7] : NULL,
                     .bk = shape->biased ? grads[8] : NULL,
                     .bv = shape->biased ? grads[9] : NULL};
    segment_rows(f, s->in->x, host, dim, 0);
    UPIPE_TRY(c->ops->cast(c, x16, x32));
    UPIPE_TRY(upipe_fpdt_fwd(c, f, &save, x));
    UPIPE_TRY(upipe_fpdt_gather(c, f, host, UPIPE_F32, save.out));
    segment_rows(f, s->out.o, host, wide, 1);
    segment_rows(f, s->in->dout, host, wide, 0);
    UPIPE_TRY(upipe_fpdt_scatter(c, f, dout, host, UPIPE_F32));
    UPIPE_TRY(upipe_fpdt_bwd(c, f, x, &g, &save, dout, x));
    UPIPE_TRY(c->ops->cast(c, x32, x16));
    segment_rows(f, s->out.x, host, dim, 1);
    segment_stats(s, c, f, &save, dout);
    UPIPE_TRY(upipe_fpdt_free(f, &save, &c->err));
    for (int phase = 0; phase < UPIPE_PHASES; ++phase)
        CHECK_SAY(c->mem->phase_peak[phase] == bytes.phase[phase], "%s holds %zu bytes, its dry run %zu",
                  upipe_phase_name(phase), c->mem->phase_peak[phase], bytes.phase[phase]);
    CHECK_INT(c->mem->peak, bytes.peak);
    CHECK_INT(c->mem->need, dry->mem.need);
    CHECK_INT(f->host->peak, dry->host.peak);
    CHECK_INT(c->mem->live, 0);
    CHECK_INT(f->host->live, 0);
    /* Q, K, V are sent once */
    for (int i = 0; i < f->segments; ++i) {
        UPIPE_TRY(upipe_fpdt_plan(f, i, &p, &c->err));
        sent += upipe_plan_sent(&p, 0) + upipe_plan_sent(&p, 1);
        for (int phase = 0; phase < p.stages; ++phase)
            sent -= upi_plan_sent_heads(&p, UPIPE_A2A_Q, phase, 0, shape->d * (int64_t)e) +
                    upi_plan_sent_heads(&p, UPIPE_A2A_KV, phase, 0,
                                        (p.desc.head_dim + p.desc.v_dim) * (int64_t)e);
    }
    CHECK_INT(c->team->sent_bytes, sent);
    return UPIPE_OK;
}

static upipe_status segment_body(void *user, int rank)
{
    segments_state *s = (segments_state *)user;
#define SEGMENT_RESULT(name) s->out.name,
    float *const result[] = {RUN_GRADIENTS(SEGMENT_RESULT)};
    upipe_dry *dry;
    size_t sum = (size_t)s->team.ranks * UPIPE_REDUCE_STRIP * 4 + 4096;
    float *grads[RUN_GRADS];
    upipe_mem mem, host;
    upipe_fpdt f = {0};
    upipe_plan p;
    side_thread side;
    upipe_status status;
    upipe_ctx c = {0};
    if (s->test->overlap) side_begin(&c, &side, s->test->side_stream_inline);
    for (int j = 0; j < RUN_GRADS; ++j) grads[j] = f32_buf(block_count(&s->test->shape, run_grads[j]));
    f.desc = run_desc(s->test, rank, 0);
    f.segments = s->segments;
    f.layer = run_layer_with(s->test, s->weights, s->in);
    c.ops = &s->ops;
    c.team = upipe_threads_comm(&s->team, rank);
    status = upipe_fpdt_plan(&f, 0, &p, &c.err);
    if (status == UPIPE_OK) {
        dry = dry_begin(&p, &s->ops, &status);
        if (status == UPIPE_OK) status = upipe_dry_fpdt(dry, &f);
        if (status != UPIPE_OK) c.err = dry->ctx.err;
    }
    if (status == UPIPE_OK) {
        size_t need = dry->mem.need > sum ? dry->mem.need : sum;
        context_pool(&c, &mem, &s->ops, need, 64);
        pool_begin(&host, dry->host.need, 16);
        f.host = &host;
        status = segment_rank(&c, s, &f, dry, grads);
        for (int j = 0; j < RUN_GRADS && status == UPIPE_OK; ++j) {
            int64_t n = block_count(&s->test->shape, run_grads[j]);
            if (result[j] == NULL || n == 0) continue;
            status = upipe_all_reduce(&c, c.team, grads[j], n);
            if (rank == 0) memcpy(result[j], grads[j], (size_t)n * sizeof(float));
        }
        if (status != UPIPE_OK) {
            upipe_comm_abort(c.team, c.err.text);
            upipe_mem_rewind(&mem, 0);
            upipe_mem_rewind(&host, 0);
        }
        upipe_mem_destroy(&mem, NULL);
        upipe_mem_destroy(&host, NULL);
    }
    if (s->test->overlap) side_end(&side);
    s->errors[rank] = c.err;
    return status;
}

/* Runs a case in segments; results in out. */
static upipe_status run_segments(const run_case *test, int segments, const f32_block *in, f32_block *out,
                                 upipe_err *err)
{
    const block_shape *shape = &test->shape;
    segments_state *s;
    upipe_status status;
    int mark;
    f32_block_make(shape, out);
    mark = buffers_n;
    s = (segments_state *)zeroed(sizeof *s);
    *s = (segments_state){.test = test, .in = in, .segments = segments, .out = *out, .ops = cpu_table()};
    if (test->table != NULL) test->table(&s->ops);
    the_frail.copy = s->ops.copy;
    if (the_frail.at > 0) s->ops.copy = frail_copy;
    run_weights(shape, in, s->weights);
    status = upipe_threads_init(&s->team, test->ranks, 60, err);
    if (status == UPIPE_OK) status = upipe_threads_run(&s->team, segment_body, s, NULL, NULL);
    upipe_threads_free(&s->team);
    *err = s->errors[0];
    buffers_free(mark);
    return status;
}

/* The bits that copies on the rank's own line give. */
static void check_alone(const run_case *t, int segments, const f32_block *in, const f32_block *got)
{
    run_case alone = *t;
    f32_block out;
    upipe_err err;
    alone.overlap = alone.side_stream_inline = 0;
    CHECK_STATUS(run_segments(&alone, segments, in, &out, &err), UPIPE_OK, err);
#define SAME(tensor)                                                                                       \
    CHECK_SAY(got->tensor == NULL || memcmp(got->tensor, out.tensor,                                       \
                                            (size_t)block_count(&t->shape, #tensor) * sizeof(float)) == 0, \
              "%s differs where copies overlap", #tensor);
    BLOCK_RESULTS(SAME)
#undef SAME
}

static void test_random(void)
{
    static const int heads[][2] = {{4, 4}, {4, 2}, {8, 2}, {8, 1}, {6, 3}, {5, 5}, {8, 8}, {12, 4}};
    test_draws draws = test_draws_begin(10);
    long legal = 0, overlapped = 0;
    for (; test_draws_more(&draws); ++draws.done) {
        long failures = test_failures, seed = draws.seed + draws.done;
        test_rng rng;
        run_case t;
        f32_block in, out;
        upipe_err err;
        upipe_status status;
        int64_t cu_seqlens[4];
        int pair, segments, ranks, tokens;
        rng.state = (uint64_t)seed;
        pair = test_below(&rng, 8);
        ranks = 1 << test_below(&rng, 3);
        tokens = ranks + test_below(&rng, 40);
        t = run_of(tokens, heads[pair][0], heads[pair][1], 8 * (4 + test_below(&rng, 3)), 24, ranks, 0,
                   UPIPE_F32);
        segments = 1 + test_below(&rng, 5);
        t.shape.tokens += t.ranks * segments; /* most are legal */
        t.chunk = test_below(&rng, 3) == 0 || t.shape.h % t.ranks != 0 ? t.shape.h : t.ranks;
        t.shape.batch = 1 + (test_below(&rng, 4) == 0);
        t.shape.dtype = (upipe_dtype)test_below(&rng, 2);
        t.shape.full = test_below(&rng, 3) == 0;
        t.shape.rope = test_below(&rng, 3);
        t.shape.normed = test_below(&rng, 3) == 0;
        t.shape.window = test_below(&rng, 4) == 0 ? 1 + test_below(&rng, 12) : 0;
        t.shape.softcap = test_below(&rng, 6) == 0 ? 2.5 : 0;
        t.shape.sinks = test_below(&rng, 4) == 0;
        t.shape.biased = test_below(&rng, 3) == 0;
        t.shape.v_dim = test_below(&rng, 4) == 0 ? 8 * (4 + test_below(&rng, 3)) : 0;
        if (test_below(&rng, 4) == 0) {
            cu_seqlens[0] = 0;
            cu_seqlens[1] = test_below(&rng, (int)t.shape.tokens + 1);
            cu_seqlens[2] = cu_seqlens[1] + test_below(&rng, 5);
            cu_seqlens[3] = t.shape.tokens * t.shape.batch;
            if (cu_seqlens[2] > cu_seqlens[3]) cu_seqlens[2] = cu_seqlens[3];
            t.shape.cu_seqlens = cu_seqlens;
            t.shape.cu_seqlens_n = 3;
        }
        t.overlap = test_below(&rng, 2);
        t.side_stream_inline = t.overlap && test_below(&rng, 4) == 0;
        if (test_below(&rng, 3) == 0) block_rope_own(&t.shape, 2 * test_below(&rng, t.shape.d / 2 + 1));
        block_inputs(&t.shape, (uint64_t)seed, &in);
        status = run_segments(&t, segments, &in, &out, &err);
        CHECK_SAY(status == UPIPE_OK || status == UPIPE_ERR_UNSUPPORTED ||
                      t.shape.tokens / segments < t.ranks,
                  "%s: %s", upipe_status_name(status), err.text);
        if (status == UPIPE_OK) {
            ++legal;
            check_block(&t.shape, &in, &out);
            overlapped += t.overlap;
            if (t.overlap && test_below(&rng, 3) == 0) check_alone(&t, segments, &in, &out);
        }
        buffers_free(0);
        if (test_shown_since(failures))
            fprintf(
                stderr,
                "replay: UPIPE_SEED=%ld UPIPE_DRAWS=10 (S %lld/%d B %lld C %d H %d/%d d %d/%d U %d %s%s%s)\n",
                seed, (long long)t.shape.tokens, segments, (long long)t.shape.batch, t.ranks, t.shape.h,
                t.shape.hkv, t.shape.d, t.shape.v_dim, t.chunk, upipe_dtype_name(t.shape.dtype),
                t.shape.full ? " full" : "", t.overlap ? " overlap" : "");
    }
    test_draws_end(&draws);
    printf("%ld legal, %ld of them with copies that overlap\n", legal, overlapped);
    if (draws.done >= 50) {
        CHECK_SAY(legal * 2 > draws.done, "only %ld of %ld draws were legal", legal, draws.done);
        CHECK_SAY(overlapped * 4 > legal, "copies of only %ld of %ld overlap", overlapped, legal);
    }
}

/* Head chunks in sequence chunks hold less than either alone. */
static void test_memory(void)
{
    const upipe_ops ops = cpu_table();
    size_t peak[4];
    float none = 0;
    for (int i = 0; i < 4; ++i) {
        upipe_plan p;
        upipe_status status;
        upipe_dry *dry;
        upipe_fpdt f = {.desc.tokens = 1 << 20,
                        .desc.ranks = 8,
                        .desc.heads = 32,
                        .desc.kv_heads = 8,
                        .desc.head_dim = 128,
                        .desc.dtype = UPIPE_BF16,
                        .desc.chunk = i % 2 == 0 ? 32 : 8,
                        .segments = i < 2 ? 1 : 8,
                        .layer.mask.causal = 1};
        f.layer.wq = f.layer.wk = f.layer.wv = &none;
        CHECK(upipe_fpdt_plan(&f, 0, &p, NULL) == UPIPE_OK);
        dry = dry_begin(&p, &ops, &status);
        CHECK_STATUS(status, UPIPE_OK, dry->ctx.err);
        CHECK_STATUS(upipe_dry_fpdt(dry, &f), UPIPE_OK, dry->ctx.err);
        peak[i] = upipe_dry_bytes(dry).peak;
    }
    CHECK(peak[3] < peak[2] && peak[3] < peak[1] && peak[2] < peak[0]);
}

/* More ranks than heads: some have no head, and nothing to stream; where they stand may be NULL. */
static void test_without_heads(void)
{
    f32_block in, out;
    upipe_err e;
    run_case t = run_of(24, 2, 1, 32, 24, 4, 2, UPIPE_F32);
    block_inputs(&t.shape, 1, &in);
    CHECK_STATUS(run_segments(&t, 3, &in, &out, &e), UPIPE_OK, e);
    check_block(&t.shape, &in, &out);
}

/* Documents hide the first sequence's segments from each other, and not the second's; the scale is not 1 / sqrt(d). */
static void test_second_sequence(void)
{
    static const int64_t cu_seqlens[] = {0, 8, 16, 24, 48};
    f32_block in, out;
    upipe_err e;
    run_case t = run_of(24, 4, 2, 32, 24, 2, 2, UPIPE_F32);
    t.shape.batch = 2;
    t.shape.scale = 0.25;
    t.shape.cu_seqlens = cu_seqlens;
    t.shape.cu_seqlens_n = 4;
    block_inputs(&t.shape, 1, &in);
    CHECK_STATUS(run_segments(&t, 3, &in, &out, &e), UPIPE_OK, e);
    check_block(&t.shape, &in, &out);
}

static void test_refusals(void)
{
    f32_block in, out;
    upipe_err e;
    run_case t = run_of(16, 4, 2, 32, 24, 2, 0, UPIPE_F32);
    block_inputs(&t.shape, 1, &in);
    CHECK_STATUS(run_segments(&t, 9, &in, &out, &e), UPIPE_ERR_ARG,
                 e); /* fewer tokens than ranks in a segment */
    CHECK_STATUS(run_segments(&t, 0, &in, &out, &e), UPIPE_ERR_ARG, e);
    t.table = table_reads_o;
    CHECK_REFUSED(run_segments(&t, 2, &in, &out, &e), UPIPE_ERR_UNSUPPORTED, e,
                  "reads O in its backward, which segments do not keep");
    t.table = NULL;
    t.ring = 2;
    CHECK_STATUS(run_segments(&t, 2, &in, &out, &e), UPIPE_ERR_UNSUPPORTED, e);
    t.ring = 0;
    t.naive = 1;
    CHECK_STATUS(run_segments(&t, 2, &in, &out, &e), UPIPE_ERR_UNSUPPORTED, e);
    t.naive = 0;
    t.ranks = 3; /* 4/2 heads in stages have no common rounds */
    CHECK_STATUS(run_segments(&t, 2, &in, &out, &e), UPIPE_ERR_UNSUPPORTED, e);
}

/* ---- ranks that do not agree ---- */

typedef struct odd_segments {
    upipe_threads team;
    upipe_ops ops;
    int odd; /* what rank 1 does differently */
    upipe_err errors[2];
} odd_segments;

enum { ODD_NOTHING, ODD_RANK, ODD_TOKENS, ODD_SEGMENTS };

static upipe_status odd_body(void *user, int rank)
{
    enum { BYTES = 1 << 18, BLOCKS = 64 };
    odd_segments *o = (odd_segments *)user;
    const int odd = rank == 1 ? o->odd : ODD_NOTHING;
    float *w = f32_buf(2 * 32 * 16), *x = f32_buf(16 * 16);
    upipe_mem mem, host;
    upipe_fpdt_saved save;
    upipe_fpdt f = {0};
    upipe_status s;
    upipe_ctx c = {0};
    context_pool(&c, &mem, &o->ops, BYTES, BLOCKS);
    pool_begin(&host, BYTES, 16);
    f.desc.tokens = o->odd == ODD_RANK ? 20 : odd == ODD_TOKENS ? 14 : 13; /* 20: all divides */
    f.desc.ranks = 2, f.desc.rank = odd == ODD_RANK ? 0 : rank;
    f.desc.heads = 2, f.desc.head_dim = 32, f.desc.model_dim = 16;
    f.segments = odd == ODD_SEGMENTS ? 6 : 5; /* the first of either has two tokens */
    f.layer.wq = f.layer.wk = f.layer.wv = w;
    f.layer.mask.causal = 1;
    f.host = &host;
    c.team = upipe_threads_comm(&o->team, rank);
    s = upipe_fpdt_fwd(&c, &f, &save, x);
    if (s == UPIPE_OK)
        s = upipe_fpdt_free(&f, &save, &c.err);
    else
        CHECK_INT(c.team->sent_bytes, 0);
    CHECK_INT(mem.live, 0);
    CHECK_INT(host.live, 0);
    o->errors[rank] = c.err;
    return s;
}

/* A rank that is another in its description, though tokens and heads divide; ranks whose first segments are
 * the same, but not the whole, or not their number. */
static void test_odd_segments(void)
{
    static const struct {
        int odd;
        upipe_status status;
        const char *words;
    } cases[] = {
        {ODD_NOTHING, UPIPE_OK, ""},
        {ODD_RANK, UPIPE_ERR_ARG, "a plan for rank 0 of 2 on rank 1 of a team of 2"},
        {ODD_TOKENS, UPIPE_ERR_MISMATCH, "tokens of all segments is 13 on rank 0 and 14 on rank 1"},
        {ODD_SEGMENTS, UPIPE_ERR_MISMATCH, "segments is 5 on rank 0 and 6 on rank 1"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; ++i) {
        odd_segments *o = (odd_segments *)zeroed(sizeof *o);
        upipe_status statuses[2] = {UPIPE_OK, UPIPE_OK};
        upipe_err e;
        o->odd = cases[i].odd;
        o->ops = cpu_table();
        CHECK_STATUS(upipe_threads_init(&o->team, 2, 20, &e), UPIPE_OK, e);
        upipe_threads_run(&o->team, odd_body, o, statuses, NULL);
        CHECK_SAY(statuses[1] == cases[i].status, "case %d: %s (%s)", cases[i].odd,
                  upipe_status_name(statuses[1]), o->errors[1].text);
        CHECK_TEXT(o->errors[1].text, cases[i].words);
        upipe_threads_free(&o->team);
    }
}

/* ---- one rank alone ---- */

enum { LONE_BYTES = 1 << 20, LONE_BLOCKS = 64 };

typedef struct lone {
    upipe_ops ops;
    upipe_ctx c;
    upipe_comm team;
    upipe_comm_self_state buf;
    upipe_mem mem, host;
    upipe_fpdt f;
    upipe_fpdt_saved save;
    upipe_grads grads;
    float *w, *x, *dout;
} lone;

/* A failure breaks a team for good: another one, with the same pools. */
static void lone_again(lone *l)
{
    upipe_comm_self(&l->team, &l->buf, l->ops.copy);
    memset(&l->grads, 0, sizeof l->grads);
    l->mem.guard = NULL;
}

static lone *lone_begin(void)
{
    lone *l = (lone *)zeroed(sizeof *l);
    l->ops = cpu_table();
    context_pool(&l->c, &l->mem, &l->ops, LONE_BYTES, LONE_BLOCKS);
    pool_begin(&l->host, LONE_BYTES, 16);
    l->c.team = &l->team;
    l->f.desc.tokens = 64;
    l->f.desc.heads = 2;
    l->f.desc.head_dim = 32;
    l->f.segments = 2;
    l->f.host = &l->host;
    l->w = f32_buf(64 * 64);
    l->x = f32_buf(64 * 64);
    l->dout = f32_buf(64 * 64);
    l->f.layer.wq = l->f.layer.wk = l->f.layer.wv = l->w;
    l->f.layer.mask.causal = 1;
    lone_again(l);
    return l;
}

static void lone_end(lone *l)
{
    upipe_mem_destroy(&l->mem, NULL);
    upipe_mem_destroy(&l->host, NULL);
}

static upipe_status refuse_tag(void *user, size_t bytes, int use, const char *tag)
{
    (void)bytes, (void)use;
    return strcmp(tag, (const char *)user) != 0 ? UPIPE_OK : UPIPE_ERR_MEMORY;
}

/* The host's pool gets back what a failed pass took, and no more, also where a peer may still read the
 * device's. */
static void test_failed_passes(void)
{
    static char fetched[] = "host_q", lse[] = "lse"; /* allocated last in each pass */
    for (int quarantine = 0; quarantine < 2; ++quarantine) {
        lone *l = lone_begin();
        upipe_mem failed;
        size_t before;
        l->mem.guard = refuse_tag;
        l->mem.user = lse;
        l->team.quarantine = quarantine;
        CHECK_STATUS(upipe_fpdt_fwd(&l->c, &l->f, &l->save, l->x), UPIPE_ERR_MEMORY, l->c.err);
        CHECK_INT(l->host.live, 0);
        CHECK((l->mem.live != 0) == quarantine);
        failed = l->mem;
        CHECK_INT(upipe_mem_destroy(&l->mem, NULL), quarantine ? UPIPE_ERR_ARG : UPIPE_OK);
        upipe_mem_init(&l->mem, failed.slab, failed.slab_bytes, failed.blocks, failed.blocks_max);
        lone_again(l);
        CHECK_STATUS(upipe_fpdt_fwd(&l->c, &l->f, &l->save, l->x), UPIPE_OK, l->c.err);
        before = l->host.live;
        CHECK(before > 0);
        l->mem.guard = refuse_tag;
        l->mem.user = fetched;
        l->team.quarantine = quarantine;
        CHECK_STATUS(upipe_fpdt_bwd(&l->c, &l->f, l->x, &l->grads, &l->save, l->dout, l->x), UPIPE_ERR_MEMORY,
                     l->c.err);
        CHECK_INT(l->host.live, before);
        CHECK_STATUS(upipe_fpdt_free(&l->f, &l->save, &l->c.err), UPIPE_OK, l->c.err);
        CHECK_INT(l->host.live, 0);
        lone_end(l);
    }
}

/* Every copy fails once, those of the side stream among them: the pass ends with its sentence, and both pools
 * are as before.
 */
static void test_failed_copies(void)
{
    side_thread side;
    lone *l = lone_begin();
    side_begin(&l->c, &side, 0);
    l->c.side_stream = NULL;
    the_frail.copy = l->ops.copy;
    the_frail.side_stream = &side.stream.ctx;
    l->ops.copy = frail_copy;
    l->f.segments = 4;
    l->f.desc.overlap = 1;
    CHECK_REFUSED(upipe_fpdt_fwd(&l->c, &l->f, &l->save, l->x), UPIPE_ERR_ARG, l->c.err,
                  "ctx->side_stream is NULL");
    l->c.side_stream = &side.stream;
    for (int backward = 0; backward < 2; ++backward) {
        upipe_status s = UPIPE_ERR_BACKEND;
        for (the_frail.at = 1; s != UPIPE_OK; ++the_frail.at) {
            const size_t host = l->host.live;
            char want[64];
            lone_again(l);
            the_frail.calls = the_frail.on_side_stream = 0;
            s = backward ? upipe_fpdt_bwd(&l->c, &l->f, l->x, &l->grads, &l->save, l->dout, l->x)
                         : upipe_fpdt_fwd(&l->c, &l->f, &l->save, l->x);
            if (s == UPIPE_OK) break;
            CHECK_STATUS(s, UPIPE_ERR_BACKEND, l->c.err);
            snprintf(want, sizeof want, "copy %d fails", the_frail.at);
            CHECK_TEXT(l->c.err.text, want);
            CHECK_INT(l->host.live, host);
            CHECK_INT(l->mem.live, 0);
        }
        /* In each of two stages K and V of 6 pairs of segments; Q, dO, lse and delta of 9 fetches, partial dQ
         * of 5, and dQ of 9 copied back. The last segment's keys meet one segment of queries, whose copies overlap
         * nothing. */
        CHECK_INT(the_frail.on_side_stream, 2 * (backward ? 4 * 9 + 5 + 9 : 2 * 6));
    }
    CHECK_STATUS(upipe_fpdt_free(&l->f, &l->save, &l->c.err), UPIPE_OK, l->c.err);
    the_frail.at = 0;
    the_frail.side_stream = NULL;
    side_end(&side);
    lone_end(l);
}

/* A copy of rank 1 fails: rank 0 is told why, at once, or that there was no reason. */
static void test_told(void)
{
    run_case t = run_of(24, 8, 2, 32, 24, 2, 2, UPIPE_F32);
    for (int i = 0; i < 24; ++i) {
        f32_block in, out;
        upipe_err e;
        char want[64];
        block_inputs(&t.shape, 5, &in);
        t.overlap = i % 2;
        the_frail.at = 1 + 5 * i;
        the_frail.rank = 1;
        the_frail.mute = i % 3 == 0;
        the_frail.calls = 0;
        CHECK(run_segments(&t, 3, &in, &out, &e) != UPIPE_OK);
        snprintf(want, sizeof want, "copy %d fails", the_frail.at);
        CHECK_TEXT(e.text, the_frail.mute ? "failed without a reason" : want);
    }
    the_frail.at = the_frail.rank = the_frail.mute = 0;
}

/* Gradients that nobody can give, tensors that are not there, and descriptions without a segment. */
static void test_arguments(void)
{
    lone *l = lone_begin();
    upipe_fpdt *f = &l->f;
    upipe_ctx *c = &l->c;
    upipe_plan p;
    CHECK_REFUSED(upipe_fpdt_fwd(c, f, &l->save, NULL), UPIPE_ERR_ARG, c->err, "x is NULL");
    lone_again(l);
    CHECK_STATUS(upipe_fpdt_fwd(c, f, &l->save, l->x), UPIPE_OK, c->err);
    for (int i = 0; i < 5; ++i) {
        lone_again(l);
        if (i == 3) l->grads.q_norm_weight = l->w;
        if (i == 4) l->grads.k_norm_weight = l->w;
        CHECK_REFUSED(upipe_fpdt_bwd(c, f, i == 0 ? NULL : l->x, &l->grads, &l->save, i == 1 ? NULL : l->dout,
                                     i == 2 ? NULL : l->x),
                      UPIPE_ERR_ARG, c->err,
                      i >= 3   ? "without a QK norm"
                      : i == 2 ? "x is NULL"
                               : "dout or dx");
        CHECK_INT(l->mem.live, 0);
    }
    lone_again(l);
    l->grads.q_norm_weight = l->grads.k_norm_weight = NULL;
    CHECK_REFUSED(upipe_fpdt_bwd(c, f, l->x, &l->grads, &l->save, l->save.out, l->x), UPIPE_ERR_ARG, c->err,
                  "delta is not there");
    CHECK_STATUS(upipe_fpdt_gather(c, f, NULL, UPIPE_F32, l->dout), UPIPE_ERR_ARG, c->err);
    CHECK_STATUS(upipe_fpdt_scatter(c, f, NULL, l->x, UPIPE_F32), UPIPE_ERR_ARG, c->err);
    CHECK_STATUS(upipe_fpdt_free(f, &l->save, &c->err), UPIPE_OK, c->err);
    CHECK_REFUSED(upipe_fpdt_plan(f, 2, &p, &c->err), UPIPE_ERR_ARG, c->err, "segment 2 of 2");
    CHECK_STATUS(upipe_fpdt_plan(f, -1, &p, &c->err), UPIPE_ERR_ARG, c->err);
    f->desc.tokens = INT64_C(1) << 32;
    f->segments = UPIPE_SEGMENTS_MAX + 1;
    CHECK_REFUSED(upipe_fpdt_plan(f, 0, &p, &c->err), UPIPE_ERR_UNSUPPORTED, c->err,
                  "65537 segments, at most 65536");
    CHECK_INT(upipe_fpdt_out_bytes(f), 0);
    f->desc.tokens = 64;
    f->segments = 65;
    CHECK_REFUSED(upipe_fpdt_plan(f, 0, &p, &c->err), UPIPE_ERR_ARG, c->err,
                  "64 tokens in 65 segments over 1 ranks: a segment needs a token for each rank");
    for (f->segments = 0; f->segments >= -1; --f->segments) {
        lone_again(l);
        CHECK_STATUS(upipe_fpdt_fwd(c, f, &l->save, l->x), UPIPE_ERR_ARG, c->err);
        CHECK_STATUS(upipe_fpdt_gather(c, f, l->x, UPIPE_F32, l->dout), UPIPE_ERR_ARG, c->err);
        CHECK_STATUS(upipe_fpdt_scatter(c, f, l->dout, l->x, UPIPE_F32), UPIPE_ERR_ARG, c->err);
        CHECK_REFUSED(upipe_fpdt_plan(f, 0, &p, &c->err), UPIPE_ERR_ARG, c->err, "64 tokens in");
        CHECK_INT(upipe_fpdt_out_bytes(f), 0);
    }
    lone_end(l);
}

int main(int argc, char **argv)
{
    (void)run_block; /* the block in one piece, of the same header */
    test_begin(argc, argv);
    TEST(test_memory());
    TEST(test_without_heads());
    TEST(test_second_sequence());
    TEST(test_refusals());
    TEST(test_odd_segments());
    TEST(test_failed_passes());
    TEST(test_failed_copies());
    TEST(test_told());
    TEST(test_arguments());
    TEST(test_random());
    return test_end("fpdt");
}

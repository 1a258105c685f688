/* test_fpdt -- the block in segments of the sequence, against the oracle: with all heads at once (FPDT), and
 * in head chunks (UPipe x FPDT); bytes of device, host and transfers; copies beside attention; refusals
 *
 * Draws as lib/test.h has them, a tenth of their number and seconds.
 */
#include "lib/block_checks.h"
#include "lib/reads_o.h"

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

static void table_frail(upipe_ops *ops)
{
    the_frail.copy = ops->copy;
    ops->copy = frail_copy;
}

/* The bits that copies on the rank's own line give. */
static void check_alone(const run_case *t, const f32_block *in, const run_result *got)
{
    run_case alone = *t;
    run_result r;
    alone.overlap = alone.side_stream_inline = 0;
    CHECK_STATUS(run_block(&alone, in, &r), UPIPE_OK, r.errors[0]);
    same_bits(&t->shape, got, &r, NULL);
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
        run_result r;
        f32_block in;
        upipe_status status;
        int64_t cu_seqlens[4];
        int pair, ranks, tokens;
        rng.state = (uint64_t)seed;
        pair = test_below(&rng, 8);
        ranks = 1 << test_below(&rng, 3);
        tokens = ranks + test_below(&rng, 40);
        t = run_of(tokens, heads[pair][0], heads[pair][1], 8 * (4 + test_below(&rng, 3)), 24, ranks, 0,
                   UPIPE_F32);
        t.segments = 1 + test_below(&rng, 5);
        t.shape.tokens += t.ranks * t.segments; /* most are legal */
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
        status = run_block(&t, &in, &r);
        CHECK_SAY(status == UPIPE_OK || status == UPIPE_ERR_UNSUPPORTED ||
                      t.shape.tokens / t.segments < t.ranks,
                  "%s: %s", upipe_status_name(status), r.errors[0].text);
        if (status == UPIPE_OK) {
            ++legal;
            check_block(&t.shape, &in, &r.out);
            overlapped += t.overlap;
            if (t.overlap && test_below(&rng, 3) == 0) check_alone(&t, &in, &r);
        }
        buffers_free(0);
        if (test_shown_since(failures))
            fprintf(
                stderr,
                "replay: UPIPE_SEED=%ld UPIPE_DRAWS=10 (S %lld/%d B %lld C %d H %d/%d d %d/%d U %d %s%s%s)\n",
                seed, (long long)t.shape.tokens, t.segments, (long long)t.shape.batch, t.ranks, t.shape.h,
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
    run_case t = run_of(24, 2, 1, 32, 24, 4, 2, UPIPE_F32);
    run_result r;
    t.segments = 3;
    check_case(&t, 1, &r);
}

/* Documents hide the first sequence's segments from each other, and not the second's; the scale is not 1 / sqrt(d). */
static void test_second_sequence(void)
{
    static const int64_t cu_seqlens[] = {0, 8, 16, 24, 48};
    run_case t = run_of(24, 4, 2, 32, 24, 2, 2, UPIPE_F32);
    run_result r;
    t.segments = 3;
    t.shape.batch = 2;
    t.shape.scale = 0.25;
    t.shape.cu_seqlens = cu_seqlens;
    t.shape.cu_seqlens_n = 4;
    check_case(&t, 1, &r);
}

static void refuse(const run_case *t, upipe_status want, const char *words)
{
    run_result r;
    f32_block in;
    block_inputs(&t->shape, 1, &in);
    CHECK_REFUSED(run_block(t, &in, &r), want, r.errors[0], words);
}

static void test_refusals(void)
{
    run_case t = run_of(16, 4, 2, 32, 24, 2, 0, UPIPE_F32);
    t.segments = 9;
    refuse(&t, UPIPE_ERR_ARG, "a segment needs a token for each rank");
    t.segments = -1;
    refuse(&t, UPIPE_ERR_ARG, "16 tokens in -1 segments");
    t.segments = 2;
    t.table = table_reads_o;
    refuse(&t, UPIPE_ERR_UNSUPPORTED, "reads O in its backward, which segments do not keep");
    t.table = NULL;
    t.ring = 2;
    refuse(&t, UPIPE_ERR_UNSUPPORTED, "segments with a ring");
    t.ring = 0;
    t.naive = 1;
    refuse(&t, UPIPE_ERR_UNSUPPORTED, "segments with the naive order");
    t.naive = 0;
    t.ranks = 3;
    refuse(&t, UPIPE_ERR_UNSUPPORTED, "which are uneven");
}

/* ---- ranks that do not agree ---- */

/* What rank 1 does differently. */
enum { ODD_NOTHING, ODD_RANK, ODD_TOKENS, ODD_SEGMENTS };

static void differ(int odd, run_own *own, upipe_plan_desc *d)
{
    if (d == NULL || own->rank != 1) return;
    if (odd == ODD_RANK) d->rank = 0;
    if (odd == ODD_TOKENS) d->tokens = 14;
    if (odd == ODD_SEGMENTS) own->segments.segments = 6; /* the first of either has two tokens */
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
        run_case t = run_of(cases[i].odd == ODD_RANK ? 20 : 13, 2, 2, 32, 16, 2, 0, UPIPE_F32);
        t.segments = 5;
        t.differ = differ;
        t.odd = cases[i].odd;
        check_differ(&t, 1, cases[i].status, cases[i].status, cases[i].words);
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
    f32_block in;
    t.segments = 3;
    t.table = table_frail;
    t.expect_failure = 1;
    block_inputs(&t.shape, 5, &in);
    for (int i = 0; i < 24; ++i) {
        run_result r;
        char want[64];
        t.overlap = i % 2;
        the_frail.at = 1 + 5 * i;
        the_frail.rank = 1;
        the_frail.mute = i % 3 == 0;
        the_frail.calls = 0;
        CHECK(run_block(&t, &in, &r) != UPIPE_OK);
        snprintf(want, sizeof want, "copy %d fails", the_frail.at);
        CHECK_TEXT(r.errors[0].text, the_frail.mute ? "failed without a reason" : want);
    }
    the_frail.at = the_frail.rank = the_frail.mute = 0;
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    TEST(test_memory());
    TEST(test_without_heads());
    TEST(test_second_sequence());
    TEST(test_refusals());
    TEST(test_odd_segments());
    TEST(test_failed_passes());
    TEST(test_failed_copies());
    TEST(test_told());
    TEST(test_random());
    return test_end("fpdt");
}

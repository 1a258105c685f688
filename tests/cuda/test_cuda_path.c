/* test_cuda_path.c -- the whole CUDA path on thread ranks: slabs, pinned memory, side stream, the block
 *
 * Runs on the fake device of tests/fake: a wait that is missing anywhere shows as wrong data, device memory
 * is counted to the byte, and whatever is left over is a failure.
 */
#include "cuda/runner_cuda.h"

/* ---- slabs and the side stream ---- */

enum { SIDE_INTS = 512 };

static void fill_ints(int *p, int value)
{
    for (int i = 0; i < SIDE_INTS; ++i) p[i] = value * 1000 + i;
}

static void test_slabs(void)
{
    upipe_err err;
    void *slab = &err, *host = &err;
    CHECK_STATUS(upipe_cuda_slab(&slab, 0, &err), UPIPE_OK, err);
    CHECK(slab == NULL);
    CHECK_STATUS(upipe_cuda_host_slab(&host, 0, &err), UPIPE_OK, err);
    CHECK(host == NULL);
    CHECK_STATUS(upipe_cuda_slab(&slab, 12345, &err), UPIPE_OK, err);
    CHECK((uintptr_t)slab % 256 == 0);
    CHECK_INT(fake_device_live(), 12345);
    CHECK_STATUS(upipe_cuda_host_slab(&host, 777, &err), UPIPE_OK, err);
    CHECK_INT(fake_pinned_live(), 777);
    memset(host, 0, 777);
    CHECK_STATUS(upipe_cuda_slab_free(slab, &err), UPIPE_OK, err);
    CHECK_STATUS(upipe_cuda_slab_free(NULL, &err), UPIPE_OK, err);
    CHECK_STATUS(upipe_cuda_host_slab_free(host, &err), UPIPE_OK, err);
    fake_device_limit(1000);
    CHECK_STATUS(upipe_cuda_slab(&slab, 1001, &err), UPIPE_ERR_MEMORY, err);
    CHECK_TEXT(err.text, "cudaMalloc: out of memory (cudaErrorMemoryAllocation)");
    CHECK(slab == NULL);
    fake_device_limit(0);
    CHECK(fake_check_clean());
}

/* A block goes to the host and another comes, beside computing that needs neither: device memory a is
 * computed, leaves, is computed anew at once after the wait, while b comes. */
static void test_side(uint64_t seed, int eager)
{
    device d;
    upipe_cuda_copy_stream side;
    int *a, *b, *from, *host_a, *host_b, got[SIDE_INTS], want[SIDE_INTS];
    const size_t bytes = sizeof got;
    fake_seed(seed);
    fake_eager(eager);
    if (!device_open(&d)) return;
    CHECK_STATUS(upipe_cuda_copy_stream_init(&side, &d.c.err), UPIPE_OK, d.c.err);
    a = (int *)device_new(&d, bytes);
    b = (int *)device_new(&d, bytes);
    from = (int *)device_new(&d, bytes);
    CHECK_STATUS(upipe_cuda_host_slab((void **)&host_a, bytes, &d.c.err), UPIPE_OK, d.c.err);
    CHECK_STATUS(upipe_cuda_host_slab((void **)&host_b, bytes, &d.c.err), UPIPE_OK, d.c.err);
    for (int round = 0; round < 3; ++round) {
        fill_ints(host_b, round);
        fill_ints(want, round + 10);
        CHECK_STATUS(d.ops.copy(&d.c, from, want, bytes), UPIPE_OK, d.c.err);
        CHECK_STATUS(d.ops.copy(&d.c, a, from, bytes), UPIPE_OK, d.c.err); /* enqueued, not done */
        CHECK_STATUS(upipe_cuda_copy_stream_start(&d.c, &side, host_a, a, bytes), UPIPE_OK, d.c.err);
        CHECK_STATUS(upipe_cuda_copy_stream_start(&d.c, &side, b, host_b, bytes), UPIPE_OK, d.c.err);
        CHECK_STATUS(upipe_cuda_copy_stream_wait(&d.c, &side), UPIPE_OK, d.c.err);
        CHECK_STATUS(d.ops.zero(&d.c, a, bytes), UPIPE_OK, d.c.err); /* not before a has left */
        CHECK_STATUS(d.ops.copy(&d.c, got, b, bytes), UPIPE_OK, d.c.err);
        CHECK_BYTES(host_a, want, bytes);
        CHECK_BYTES(got, host_b, bytes);
        CHECK_STATUS(d.ops.copy(&d.c, got, a, bytes), UPIPE_OK, d.c.err);
        CHECK_INT(got[SIDE_INTS - 1], 0);
    }
    CHECK_STATUS(upipe_cuda_copy_stream_free(&side, &d.c.err), UPIPE_OK, d.c.err);
    CHECK_STATUS(upipe_cuda_host_slab_free(host_a, &d.c.err), UPIPE_OK, d.c.err);
    CHECK_STATUS(upipe_cuda_host_slab_free(host_b, &d.c.err), UPIPE_OK, d.c.err);
    device_free(&d, a);
    device_free(&d, b);
    device_free(&d, from);
    device_close(&d);
    CHECK(fake_check_clean());
    fake_eager(0);
}

/* The same without the wait: the fake must show it, or the test above shows nothing. */
static void test_side_unordered(void)
{
    device d;
    upipe_cuda_copy_stream side;
    int *a, *host, want[SIDE_INTS];
    const size_t bytes = sizeof want;
    fake_seed(0);
    if (!device_open(&d)) return;
    CHECK_STATUS(upipe_cuda_copy_stream_init(&side, &d.c.err), UPIPE_OK, d.c.err);
    a = (int *)device_new(&d, bytes);
    CHECK_STATUS(upipe_cuda_host_slab((void **)&host, bytes, &d.c.err), UPIPE_OK, d.c.err);
    fill_ints(want, 1);
    CHECK_STATUS(d.ops.copy(&d.c, a, want, bytes), UPIPE_OK, d.c.err);
    CHECK_STATUS(upipe_cuda_copy_stream_start(&d.c, &side, host, a, bytes), UPIPE_OK, d.c.err);
    CHECK_STATUS(d.ops.zero(&d.c, a, bytes), UPIPE_OK, d.c.err);
    CHECK_STATUS(d.ops.sync(&d.c), UPIPE_OK, d.c.err);
    CHECK_STATUS(upipe_cuda_copy_stream_wait(&d.c, &side), UPIPE_OK, d.c.err);
    CHECK_STATUS(d.ops.sync(&d.c), UPIPE_OK, d.c.err);
    CHECK(memcmp(host, want, bytes) != 0);
    CHECK_STATUS(upipe_cuda_copy_stream_free(&side, &d.c.err), UPIPE_OK, d.c.err);
    CHECK_STATUS(upipe_cuda_host_slab_free(host, &d.c.err), UPIPE_OK, d.c.err);
    device_free(&d, a);
    device_close(&d);
    CHECK(fake_check_clean());
}

/* ---- the block ---- */

typedef struct path_case {
    int64_t tokens;
    int batch, h, hkv, d, full, rope, normed, projected, gated;
    int ranks, chunk;
} path_case;

static run_case case_of(const path_case *p)
{
    run_case t = run_of(p->tokens, p->h, p->hkv, p->d, 32, p->ranks, p->chunk, UPIPE_BF16);
    t.shape.batch = p->batch;
    t.shape.full = p->full;
    t.shape.rope = p->rope;
    t.shape.normed = p->normed;
    t.shape.projected = t.shape.biased = p->projected;
    t.shape.gated = p->gated;
    t.shape.eps = 1e-6;
    t.tile_rows = 16;
    return t;
}

/* Against the truth once, and then the same bits for other orders, all or every second, over NCCL, and with stages that
 * overlap. */
static void check_orders(const run_case *t, int step)
{
    int last;
    cuda_case test = {.run = *t};
    f32_block in;
    run_result first, again;
    block_inputs(&t->shape, 17, &in);
    fake_seed(0);
    CHECK_STATUS(cuda_block(&test, &in, &first), UPIPE_OK, first.errors[0]);
    check_block(&t->shape, &in, &first.out);
    last = first.plan.stages > 1 && first.plan.schedule != UPIPE_UNEVEN ? 10 : 5;
    for (int seed = 1; seed <= last; seed += step) {
        fake_seed((uint64_t)seed % 5);
        fake_eager(seed == 3);
        test.run.overlap = seed > 5;
        test.nccl = seed > 3 && seed < 9;
        CHECK_STATUS(cuda_block(&test, &in, &again), UPIPE_OK, again.errors[0]);
        same_bits(&t->shape, &first, &again, NULL);
    }
    fake_eager(0);
}

static void test_blocks(void)
{
    static const path_case cases[] = {
        {32, 1, 4, 4, 64, 0, 0, 0, 0, 0, 1, 4}, /* one rank, all heads at once */
        {32, 1, 4, 2, 64, 0, 1, 1, 1, 0, 1, 2}, /* in stages */
        {32, 1, 4, 4, 64, 0, 0, 0, 0, 0, 2, 4}, /* Ulysses */
        {32, 1, 4, 2, 64, 0, 1, 1, 1, 0, 2, 2}, /* UPipe */
        {32, 1, 4, 4, 64, 0, 0, 0, 0, 0, 4, 4}, /* Ulysses */
        {32, 1, 8, 4, 64, 0, 1, 0, 1, 0, 4, 4}, /* UPipe */
        {24, 2, 8, 2, 32, 1, 2, 0, 1, 0, 4, 4}, /* ranks share key and value heads */
        {33, 1, 8, 4, 32, 0, 1, 0, 1, 1, 2, 2}, /* the output is gated */
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; ++i) {
        const run_case t = case_of(&cases[i]);
        check_orders(&t, 1);
    }
}

/* Heads and lengths that do not divide: each rank has a plan of its own, and perhaps no heads in a stage, or
 * none at all. UPipe and Ulysses. */
static void test_uneven(void)
{
    static const path_case cases[] = {
        {33, 1, 9, 3, 32, 0, 1, 1, 0, 0, 2,
         2}, /* five heads on one rank, four on the other; a group lies on both */
        {33, 1, 9, 3, 32, 0, 1, 1, 0, 0, 2, 9},
        {37, 1, 6, 1, 32, 0, 1, 0, 1, 0, 4, 4}, /* two ranks have one head, two have two */
        {37, 1, 6, 1, 32, 0, 1, 0, 1, 0, 4, 6},
        {21, 2, 14, 2, 40, 0, 2, 0, 0, 0, 4, 4}, /* 28 heads over 8 ranks, halved */
        {20, 1, 2, 1, 32, 1, 0, 0, 0, 0, 3, 2},  /* a rank without heads */
        {35, 2, 8, 4, 32, 0, 1, 1, 1, 0, 4, 4},
        {35, 2, 8, 4, 32, 0, 1, 1, 1, 0, 4, 8},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; ++i) {
        const run_case t = case_of(&cases[i]);
        check_orders(&t, 1);
    }
}

/* Q, K and V of the host in one tensor outside of the pool, and their gradients over them. */
static void test_qkv(void)
{
    static const struct {
        int64_t tokens;
        int batch, h, hkv, d, v_dim, ranks, chunk, wide, masked;
        upipe_dtype dtype;
    } cases[] = {
        {24, 1, 4, 2, 32, 0, 1, 2, 0, 0, UPIPE_BF16}, /* one rank, in stages */
        {24, 2, 4, 4, 32, 0, 2, 4, 0, 0, UPIPE_BF16}, /* Ulysses */
        {24, 1, 8, 4, 32, 0, 2, 2, 1, 0, UPIPE_BF16}, /* UPipe; the host's tensors in f32 */
        {20, 1, 8, 2, 40, 0, 4, 4, 0, 1,
         UPIPE_BF16}, /* ranks share key and value heads; a window and sinks */
        {21, 1, 8, 4, 32, 48, 2, 4, 0, 0,
         UPIPE_F32}, /* lengths that do not divide; values of another width */
        {19, 2, 9, 3, 32, 0, 2, 2, 0, 0, UPIPE_BF16}, /* heads that do not */
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; ++i) {
        run_case t = run_of(cases[i].tokens, cases[i].h, cases[i].hkv, cases[i].d, 32, cases[i].ranks,
                            cases[i].chunk, cases[i].dtype);
        t.shape.bare = t.fused = t.in_place = 1;
        t.shape.naive = NAIVE_NARROW;
        t.shape.batch = cases[i].batch;
        t.shape.v_dim = cases[i].v_dim;
        t.shape.window = cases[i].masked ? 9 : 0;
        t.shape.sinks = cases[i].masked;
        t.wide = cases[i].wide;
        check_orders(&t, 2);
    }
}

/* K and V of a latent, sent as heads or gathered, with Q of the host and with Q by stages. */
static void test_latent(void)
{
    static const struct {
        int h, ranks, chunk, bare;
        upipe_latent_form form;
        upipe_dtype dtype;
    } cases[] = {
        {4, 1, 2, 0, UPIPE_LATENT_HEADS, UPIPE_BF16},    {4, 2, 2, 0, UPIPE_LATENT_GATHERED, UPIPE_BF16},
        {8, 4, 4, 1, UPIPE_LATENT_GATHERED, UPIPE_F32},  {4, 2, 4, 1, UPIPE_LATENT_HEADS, UPIPE_BF16},
        {5, 2, 2, 0, UPIPE_LATENT_GATHERED, UPIPE_BF16},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; ++i) {
        run_case t =
            run_of(21, cases[i].h, cases[i].h, 40, 32, cases[i].ranks, cases[i].chunk, cases[i].dtype);
        t.shape.latent = 24;
        t.shape.key = 16;
        t.shape.v_dim = 32;
        t.shape.batch = 1 + (int)i % 2;
        t.shape.bare = cases[i].bare;
        t.shape.naive = NAIVE_NARROW;
        if (!cases[i].bare) t.shape.q_dim = 20, t.shape.rope = 2, t.shape.projected = 1;
        t.form = cases[i].form;
        t.tile_rows = 16;
        check_orders(&t, 2);
    }
}

/* Every mask through the block, on one rank and on several, in stages: against the truth, in the plan's bytes. */
static void test_masked(void)
{
    /* heads enough for the sinks' gradients, a number each, to have a mean */
    static const path_case plain = {40, 1, 16, 8, 32, 0, 1, 0, 0, 0, 1, 2},
                           batch = {20, 2, 12, 3, 32, 1, 0, 1, 1, 0, 1, 2};
    static const int64_t cu_seqlens[] = {0, 3, 11, 11, 26, 40};
    for (int kind = 0; kind < 8; ++kind) {
        cuda_case test = {.run = case_of(kind % 3 < 2 ? &plain : &batch)};
        run_result r;
        f32_block in;
        block_shape *shape = &test.run.shape;
        test.run.ranks = 1 + kind % 2;
        if (kind != 1) shape->window = 9;
        if (kind & 1) shape->cu_seqlens = cu_seqlens, shape->cu_seqlens_n = 5;
        if (kind & 2) shape->softcap = 5;
        if (kind & 4) shape->sinks = 1;
        if (kind == 3 || kind == 6) shape->v_dim = 48;
        block_inputs(shape, 23, &in);
        fake_seed((uint64_t)kind);
        CHECK_STATUS(cuda_block(&test, &in, &r), UPIPE_OK, r.errors[0]);
        check_block(shape, &in, &r.out);
    }
}

/* ---- what a table's attention does not know ---- */

enum { WINDOW, CU_SEQLENS, SOFTCAP, SINKS, V_DIM, RING_P2P, RING_ALL_GATHER, SEGMENTS, REFUSALS };

/* Behind the dry run, which would refuse it too. */
static void plain_attention(int odd, run_own *own, upipe_plan_desc *d)
{
    (void)odd;
    if (d == NULL) own->ops.attn_can = 0;
}

/* Every rank refuses by itself, in a sentence, before anything is sent. */
static void test_refusals(void)
{
    static const char *const words[REFUSALS] = {"cuda does not know a sliding window yet",
                                                "cuda does not know packed sequences (cu_seqlens) yet",
                                                "cuda does not know a soft-cap yet",
                                                "cuda does not know sinks yet",
                                                "cuda does not know a head dim of v that is not q's yet",
                                                "cuda does not know a gradient of q that is added to yet",
                                                "cuda does not know a gradient of q that is added to yet",
                                                "cuda adds to no gradient of q, as segments need"};
    static const int64_t cu_seqlens[] = {0, 7, 16};
    for (int what = 0; what < REFUSALS; ++what) {
        cuda_case test = {.run = run_of(16, 4, 4, 32, 64, 2, 0, UPIPE_BF16)};
        run_case *t = &test.run;
        run_result r;
        f32_block in;
        t->ring = what == RING_P2P || what == RING_ALL_GATHER ? 2 : 1;
        t->ring_mode = what == RING_P2P          ? UPIPE_RING_P2P
                       : what == RING_ALL_GATHER ? UPIPE_RING_ALL_GATHER
                                                 : UPIPE_RING_AUTO;
        t->segments = what == SEGMENTS ? 2 : 0;
        t->shape.window = what == WINDOW ? 5 : 0;
        t->shape.cu_seqlens = what == CU_SEQLENS ? cu_seqlens : NULL;
        t->shape.cu_seqlens_n = what == CU_SEQLENS ? 2 : 0;
        t->shape.softcap = what == SOFTCAP ? 30 : 0;
        t->shape.sinks = what == SINKS;
        t->shape.v_dim = what == V_DIM ? 40 : 32;
        t->differ = plain_attention;
        t->expect_failure = 1;
        block_inputs(&t->shape, 1, &in);
        CHECK(cuda_block(&test, &in, &r) != UPIPE_OK);
        for (int rank = 0; rank < 2 * t->ring; ++rank) {
            CHECK_REFUSED(r.statuses[rank], UPIPE_ERR_UNSUPPORTED, r.errors[rank], words[what]);
            CHECK_INT(r.sent[rank], 0);
        }
    }
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    TEST(test_slabs());
    for (uint64_t seed = 0; seed < 24; ++seed) TEST(test_side(seed, seed == 23));
    TEST(test_side_unordered());
    TEST(test_blocks());
    TEST(test_qkv());
    TEST(test_latent());
    TEST(test_uneven());
    TEST(test_masked());
    TEST(test_refusals());
    return test_end("cuda_path");
}

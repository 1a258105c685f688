/* test_cuda_path.c -- the whole CUDA path on thread ranks: slabs, pinned memory, side stream, the block
 *
 * Runs on the fake device of tests/fake: a wait that is missing anywhere shows as wrong data, device memory
 * is counted to the byte, and whatever is left over is a failure.
 */
#include "cuda/runner_cuda.h"

#include "../lib/close.h"

static void make_team(run_case *test, int ranks, int chunk)
{
    memset(test, 0, sizeof *test);
    test->ranks = ranks;
    test->chunk = chunk;
}

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
} path_case;

static void shape_of(const path_case *p, block_shape *s)
{
    memset(s, 0, sizeof *s);
    s->tokens = p->tokens;
    s->batch = p->batch;
    s->dim = 32;
    s->h = p->h;
    s->hkv = p->hkv;
    s->d = p->d;
    s->full = p->full;
    s->rope = p->rope;
    s->normed = p->normed;
    s->projected = s->biased = p->projected;
    s->gated = p->gated;
    s->dtype = UPIPE_BF16;
    s->scale = 1 / sqrt((double)p->d);
    s->theta = 10000;
    s->eps = 1e-6;
}

static int same_block(const block_shape *s, const f32_block *a, const f32_block *b)
{
    int same = 1;
#define PATH_SAME(name)  \
    if (a->name != NULL) \
        same = same && memcmp(a->name, b->name, (size_t)block_count(s, #name) * sizeof(float)) == 0;
    BLOCK_RESULTS(PATH_SAME)
#undef PATH_SAME
    return same;
}

/* Against the truth once, and then the same bits for other orders, over NCCL, and with stages that overlap. */
static void test_block(const path_case *p, int ranks, int chunk)
{
    cuda_case test;
    block_shape shape;
    f32_block in;
    run_result first, again;
    memset(&test, 0, sizeof test);
    shape_of(p, &shape);
    make_team(&test.run, ranks, chunk);
    test.run.shape = shape;
    test.run.tile_rows = 16;
    block_inputs(&shape, 17, &in);
    fake_seed(0);
    CHECK_STATUS(cuda_block(&test, &in, &first), UPIPE_OK, first.errors[0]);
    check_block(&shape, &in, &first.out);
    for (uint64_t seed = 1; seed <= (first.plan.stages > 1 && first.plan.schedule != UPIPE_UNEVEN ? 10 : 5);
         ++seed) {
        fake_seed(seed % 5);
        fake_eager(seed == 3);
        test.run.overlap = seed > 5;
        test.nccl = seed > 3 && seed < 9;
        CHECK_STATUS(cuda_block(&test, &in, &again), UPIPE_OK, again.errors[0]);
        CHECK_SAY(same_block(&shape, &first.out, &again.out), "%d ranks, seed %d, %s%s: other bits", ranks,
                  (int)seed, test.nccl ? "NCCL" : "threads", test.run.overlap ? ", overlap" : "");
    }
    fake_eager(0);
}

/* Heads and lengths that do not divide: each rank has a plan of its own, and perhaps no heads in a stage, or
 * none at all. UPipe and Ulysses. */
static void test_uneven(void)
{
    static const path_case nine = {33, 1, 9, 3, 32, 0, 1, 1, 0, 0}, six = {37, 1, 6, 1, 32, 0, 1, 0, 1, 0};
    static const path_case groups = {21, 2, 14, 2, 40, 0, 2, 0, 0, 0}, few = {20, 1, 2, 1, 32, 1, 0, 0, 0, 0};
    static const path_case lengths = {35, 2, 8, 4, 32, 0, 1, 1, 1, 0};
    test_block(&nine, 2, 2); /* five heads on one rank, four on the other; a group lies on both */
    test_block(&nine, 2, 9);
    test_block(&six, 4, 4); /* two ranks have one head, two have two */
    test_block(&six, 4, 6);
    test_block(&groups, 4, 4); /* 28 heads over 8 ranks, halved */
    test_block(&few, 3, 2);    /* a rank without heads */
    test_block(&lengths, 4, 4);
    test_block(&lengths, 4, 8);
}

/* Every mask through the block, on one rank and on several, in stages: against the truth, in the plan's bytes. */
static void test_masked(void)
{
    /* heads enough for the sinks' gradients, a number each, to have a mean */
    static const path_case plain = {40, 1, 16, 8, 32, 0, 1, 0, 0, 0},
                           batch = {20, 2, 12, 3, 32, 1, 0, 1, 1, 0};
    static const int64_t cu_seqlens[] = {0, 3, 11, 11, 26, 40};
    for (int kind = 0; kind < 8; ++kind) {
        cuda_case test;
        run_result r;
        f32_block in;
        block_shape *shape = &test.run.shape;
        memset(&test, 0, sizeof test);
        make_team(&test.run, 1 + kind % 2, 2);
        shape_of(kind % 3 < 2 ? &plain : &batch, shape);
        test.run.tile_rows = 16;
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

typedef struct refusal {
    int what;
    upipe_threads_grid grid;
    upipe_err errors[RUN_MAX];
} refusal;

/* A forward; addresses are not followed. */
static upipe_status refused_body(void *user, int rank)
{
    enum { BYTES = 4096, BLOCKS = 8, DIM = 64 };
    static const int64_t cu_seqlens[] = {0, 7, 16};
    refusal *f = (refusal *)user;
    const int what = f->what;
    upipe_mem_block blocks[BLOCKS], host_blocks[BLOCKS];
    upipe_mem mem, host;
    upipe_fpdt segments;
    upipe_fpdt_saved grads_at_tokens;
    upipe_layer *l = &segments.layer;
    upipe_plan_desc *d = &segments.desc;
    upipe_plan p;
    upipe_saved save;
    device dev;
    void *buf;
    upipe_status s;
    if (!device_open(&dev)) return UPIPE_ERR_BACKEND;
    dev.ops.attn_can = 0;
    memset(&segments, 0, sizeof segments);
    buf = device_new(&dev, BYTES);
    upipe_mem_init(&mem, buf, BYTES, blocks, BLOCKS);
    upipe_mem_init(&host, buf, BYTES, host_blocks, BLOCKS);
    d->tokens = 16;
    d->ranks = 2;
    d->rank = rank % 2;
    d->ring = f->grid.grid.in_ring;
    d->ring_rank = rank / 2;
    d->ring_mode = what == RING_P2P          ? UPIPE_RING_P2P
                   : what == RING_ALL_GATHER ? UPIPE_RING_ALL_GATHER
                                             : UPIPE_RING_AUTO;
    d->heads = d->kv_heads = 4;
    d->head_dim = 32;
    d->v_dim = what == V_DIM ? 40 : 32;
    d->model_dim = DIM;
    d->dtype = UPIPE_BF16;
    l->wq = l->wk = l->wv = buf;
    l->mask.causal = 1;
    l->mask.window = what == WINDOW ? 5 : 0;
    l->mask.borders.cu_seqlens = what == CU_SEQLENS ? cu_seqlens : NULL;
    l->mask.borders.cu_seqlens_n = what == CU_SEQLENS ? 2 : 0;
    l->mask.softcap = what == SOFTCAP ? 30 : 0;
    l->mask.sinks = what == SINKS ? (const float *)buf : NULL;
    segments.segments = 2;
    segments.host = &host;
    dev.c.mem = &mem;
    upipe_threads_grid_use(&f->grid, rank, &dev.c);
    s = upipe_plan_init(&p, d, &dev.c.err);
    l->plan = &p;
    if (s == UPIPE_OK && what == SEGMENTS) s = upipe_fpdt_fwd(&dev.c, &segments, &grads_at_tokens, buf);
    if (s == UPIPE_OK && what != SEGMENTS)
        s = upipe_layer_fwd(&dev.c, l, &save, upipe_view_packed(buf, UPIPE_BF16, p.rows, 1, DIM));
    CHECK_INT(mem.live, 0);
    CHECK_INT(host.live, 0);
    CHECK_INT(dev.c.team->sent_bytes + dev.c.team->moved_bytes, 0);
    if (dev.c.ring != NULL) CHECK_INT(dev.c.ring->sent_bytes + dev.c.ring->moved_bytes, 0);
    f->errors[rank] = dev.c.err;
    upipe_mem_destroy(&mem, NULL);
    upipe_mem_destroy(&host, NULL);
    device_free(&dev, buf);
    device_close(&dev);
    return s;
}

/* Every rank refuses by itself, in a sentence, before anything is sent; and so does a dry run. */
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
    refusal *f = (refusal *)calloc(1, sizeof *f);
    for (f->what = 0; f->what < REFUSALS; ++f->what) {
        const int rings = f->what == RING_P2P || f->what == RING_ALL_GATHER ? 2 : 1;
        upipe_status statuses[RUN_MAX];
        upipe_err e;
        CHECK_STATUS(grid_apart(&f->grid, &(upipe_grid){2 * rings, 2, rings, 0}, 20, &e), UPIPE_OK, e);
        upipe_threads_run(&f->grid.world, refused_body, f, statuses, NULL);
        for (int rank = 0; rank < 2 * rings; ++rank) {
            CHECK_STATUS(statuses[rank], UPIPE_ERR_UNSUPPORTED, f->errors[rank]);
            CHECK_TEXT(f->errors[rank].text, words[f->what]);
        }
        upipe_threads_grid_free(&f->grid);
        CHECK(fake_check_clean());
    }
    free(f);
}

int main(int argc, char **argv)
{
    static const path_case plain = {32, 1, 4, 4, 64, 0, 0, 0, 0, 0}, rich = {32, 1, 4, 2, 64, 0, 1, 1, 1, 0};
    static const path_case grouped = {24, 2, 8, 2, 32, 1, 2, 0, 1, 0},
                           stages = {32, 1, 8, 4, 64, 0, 1, 0, 1, 0};
    static const path_case gated = {33, 1, 8, 4, 32, 0, 1, 0, 1, 1};
    test_begin(argc, argv);
    TEST(test_slabs());
    for (uint64_t seed = 0; seed < 24; ++seed) TEST(test_side(seed, seed == 23));
    TEST(test_side_unordered());
    TEST(test_block(&plain, 1, 4));   /* one rank, all heads at once */
    TEST(test_block(&rich, 1, 2));    /* in stages */
    TEST(test_block(&plain, 2, 4));   /* Ulysses */
    TEST(test_block(&rich, 2, 2));    /* UPipe */
    TEST(test_block(&plain, 4, 4));   /* Ulysses */
    TEST(test_block(&stages, 4, 4));  /* UPipe */
    TEST(test_block(&grouped, 4, 4)); /* ranks share key and value heads */
    TEST(test_block(&gated, 2, 2));   /* the output is gated */
    TEST(test_uneven());
    TEST(test_masked());
    TEST(test_refusals());
    return test_end("cuda_path");
}

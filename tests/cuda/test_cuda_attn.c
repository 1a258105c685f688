/* test_cuda_attn.c -- the CUDA attention kernels on bf16 against dense attention in f64
 *
 * Causal masks and none; test_cuda_attn_masks.c has the others. Emulated, a case of 300 x 300 takes tenths of a
 * second: shapes are small, and lie around the edges of tiles (16 rows, 32 and 64 keys forward; 32 and 64
 * queries, 64 and 128 keys backward).
 */
#include "cuda/attn_place.h"

static void test_head_dims(void)
{
    static const int dims[] = {32, 40, 64, 72, 96, 128, 136, 200, 256};
    test_rng r = {1};
    for (int i = 0; i < COUNT_OF(dims); i += here.brief && dims[i] > 40 ? 3 : 1) {
        const oracle_attn t = shape(77, 150, 2, 1, dims[i], i % 2, 80, 0);
        check_drawn(&t, here.types[0], i % ATTN_LAYOUTS, &r, 1);
    }
}

static void test_lengths(void)
{
    /* clang-format off */
    static const int64_t cases[][7] = { /* sq, sk, causal, q_pos, k_pos, query heads, key/value heads */
        {1, 1, 0, 0, 0, 1, 1}, {1, 1, 1, 0, 0, 2, 2}, {1, 1, 1, 0, 1, 1, 1},
        {1, 200, 1, 199, 0, 8, 1}, {200, 1, 0, 0, 0, 1, 1}, {0, 5, 0, 0, 0, 1, 1},
        {5, 0, 0, 0, 0, 2, 1}, {70, 0, 1, 0, 0, 1, 1}, {0, 0, 1, 0, 0, 1, 1},
        {63, 127, 1, 64, 0, 1, 1}, {64, 128, 1, 64, 0, 4, 1}, {65, 129, 1, 64, 0, 1, 1},
        {128, 128, 1, 0, 0, 2, 2}, {129, 66, 1, 0, 61, 1, 1}, {127, 257, 0, 0, 0, 1, 1},
        {300, 300, 1, 0, 0, 1, 1}, {200, 100, 1, 0, 90, 6, 3}, {100, 200, 1, 500, 0, 2, 1},
        {50, 70, 1, 0, 1000, 2, 1}, {150, 280, 1, 5, 300, 1, 1},
        {140, 190, 1, 1000000000000, 999999999970, 4, 2}, {40, 90, 1, 0, 39, 1, 1},
        {40, 90, 1, 0, 40, 1, 1}, {300, 140, 1, -100, 30, 1, 1},
    };
    /* clang-format on */
    check_lengths(cases, COUNT_OF(cases), 104);
}

static void test_extreme_scores(void)
{
    static const double sizes[] = {1, 30, 300};
    test_rng r = {3};
    for (int i = 0; i < 3; ++i)
        for (int grow = 0; grow < 2; ++grow) {
            const oracle_attn t = shape(150, 170, 2, 1, 64, grow == 0 || i > 1, 0, i > 1 ? 60 : 0);
            check_extreme(&t, here.types[0], &r, sizes[i], grow);
        }
}

static void test_random(void)
{
    static const draw_limits most = {7, 300, 1, 300, INT64_MAX, 320};
    check_random(8 + test_env("UPIPE_DRAWS", 2000) / 2000, &most, 0);
}

/* ---- merging ---- */

static void test_merge(void)
{
    /* clang-format off */
    static const int64_t cases[][7] = { /* sq, causal, q_pos, then keys of up to three parts */
        {90, 0, 0, 70, 50, 0},   {90, 1, 30, 40, 40, 40}, {70, 1, 0, 64, 1, 64}, /* late parts hidden from early rows */
        {40, 1, -20, 30, 0, 30}, {200, 1, 0, 0, 0, 0},    {17, 0, 0, 0, 33, 0}, /* rows, and parts, that see nothing */
        {140, 1, 0, 64, 64, 12},
    };
    /* clang-format on */
    static const int dims[] = {64, 104, 200};
    const upipe_dtype storage = here.types[0];
    test_rng r = {10};
    for (int i = 0; i < COUNT_OF(cases); ++i)
        for (int narrow = here.brief ? i % 2 : 0; narrow < 2; narrow += here.brief ? 2 : 1) {
            const int64_t *x = cases[i];
            const oracle_attn t = shape(x[0], x[3] + x[4] + x[5], 2, 1, dims[i % 3], (int)x[1], x[2], 0);
            const values in = inputs_make(&t, storage, &r, 2);
            check_merge(&t, storage, narrow ? storage : UPIPE_F32, i % ATTN_LAYOUTS, (i + 1) % 2, &in, x + 3,
                        3);
            buffers_free(0);
        }
}

/* ---- the same bits ---- */

static void test_same_bits(void)
{
    static const int dims[] = {64, 128, 168};
    test_rng r = {4};
    for (int i = 0; i < 3; ++i) {
        const oracle_attn t = shape(140, 210, 4, 1, dims[i], i != 1, 90, 20);
        check_same_bits(&t, here.types[0], &r, 1, i);
    }
}

/* On a device more blocks than run at once, and a fill that takes as long as they do. */
#ifdef FAKE_CUDA_RUNTIME_API_H
enum { RUNS = 3, LENGTH = 150, MANY = 256, BUSY = 1 << 16 };
#else
enum { RUNS = 1000, LENGTH = 1024, MANY = 2560, BUSY = 1 << 29 };
#endif

/* Packed values in memory of the device; NULL: NaNs. */
static upipe_view on_device(upipe_dtype dtype, int64_t n, int h, int d, const float *from)
{
    upipe_view v = placed(dtype, n, h, d, PACKED, from), there = v;
    there.data = device_new(&dev, view_bytes(v));
    device_put(&dev, there.data, v.data, view_bytes(v));
    return there;
}

/* Gradients run after run, every second time while another stream fills memory. */
static void run_often(const oracle_attn *t, int runs)
{
    const upipe_dtype storage = here.types[0];
    test_rng r = {8};
    const values in = inputs_make(t, storage, &r, 1);
    const upipe_view o = on_device(storage, t->sq, t->h, t->d, NULL);
    const size_t of_q = (size_t)q_count(t) * 2, of_k = (size_t)k_count(t) * 4, bytes = of_q + 2 * of_k;
    char *grads = (char *)device_new(&dev, bytes), *busy = (char *)device_new(&dev, BUSY);
    void *first, *got;
    upipe_attn_grad g;
    cudaStream_t other;
    int others = 0;
    if (upipe_cuda_host_slab(&first, bytes, &dev.c.err) || upipe_cuda_host_slab(&got, bytes, &dev.c.err) ||
        !DEVICE_CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking)))
        exit(2);
    memset(&g, 0, sizeof g);
    attn_set(&g.a, t);
    g.a.q = on_device(storage, t->sq, t->h, t->d, in.q), g.a.o = o;
    g.a.k = on_device(storage, t->sk, t->hkv, t->d, in.k),
    g.a.v = on_device(storage, t->sk, t->hkv, t->d, in.v);
    g.a.lse = on_device(UPIPE_F32, t->sq, t->h, 1, NULL);
    g.a.work_bytes = dev.ops.attn_bytes(&dev.ops, &g.a, 1);
    g.a.work = device_new(&dev, g.a.work_bytes);
    g.dout = on_device(storage, t->sq, t->h, t->d, in.dout),
    g.delta = on_device(UPIPE_F32, t->sq, t->h, 1, NULL);
    CHECK_STATUS(upipe_attn_fwd(&dev.c, &g.a), UPIPE_OK, dev.c.err);
    CHECK_STATUS(dev.ops.rowdot(&dev.c, g.delta, o, g.dout), UPIPE_OK, dev.c.err);
    g.dq = upipe_view_packed(grads, storage, t->sq, t->h, t->d);
    g.dk = upipe_view_packed(grads + of_q, UPIPE_F32, t->sk, t->hkv, t->d);
    g.dv = upipe_view_packed(grads + of_q + of_k, UPIPE_F32, t->sk, t->hkv, t->d);
    for (int run = 0; run < runs; ++run) {
        CHECK_STATUS(dev.ops.zero(&dev.c, grads, bytes), UPIPE_OK, dev.c.err);
        if (run % 2) DEVICE_CHECK(cudaMemsetAsync(busy, run, BUSY, other));
        CHECK_STATUS(upipe_attn_bwd(&dev.c, &g), UPIPE_OK, dev.c.err);
        device_get(&dev, run == 0 ? first : got, grads, bytes);
        others += run > 0 && memcmp(first, got, bytes) != 0;
    }
    CHECK_SAY(others == 0, "d %d: %d of %d runs have other bits than the first", t->d, others, runs);
    DEVICE_CHECK(cudaStreamSynchronize(other));
    DEVICE_CHECK(cudaStreamDestroy(other));
    device_free(&dev, g.a.work), device_free(&dev, grads), device_free(&dev, busy);
    device_free(&dev, g.a.q.data), device_free(&dev, g.a.k.data), device_free(&dev, g.a.v.data);
    device_free(&dev, o.data), device_free(&dev, g.a.lse.data);
    device_free(&dev, g.dout.data), device_free(&dev, g.delta.data);
    CHECK_STATUS(upipe_cuda_host_slab_free(first, &dev.c.err), UPIPE_OK, dev.c.err);
    CHECK_STATUS(upipe_cuda_host_slab_free(got, &dev.c.err), UPIPE_OK, dev.c.err);
    buffers_free(0);
}

/* A thousand times on a device, but for slow instruments, which set UPIPE_DRAWS to 0. */
static void test_many_runs(void)
{
    const int runs = test_env("UPIPE_DRAWS", 1) == 0 ? 3 : RUNS;
    for (int d = 64; d <= 256; d *= 2) {
        const oracle_attn t = shape(LENGTH, LENGTH, 2 * (MANY / d), MANY / d, d, d != 128, 0, 0);
        run_often(&t, runs);
    }
}

static void test_one_key(void)
{
    static const int dims[] = {40, 128, 256};
    for (int k = 0; k < COUNT_OF(dims); ++k) {
        const oracle_attn t = shape(1, 1, 2, 2, dims[k], k & 1, 0, 0);
        test_rng r = {(uint64_t)dims[k]};
        check_one_key(&t, here.types[0], &r, 30, 0);
    }
}

/* ---- what is refused, and scratch ---- */

static void test_refusals(void)
{
    const size_t bytes = 8 * 4 * 64 * 4;
    char *block = (char *)device_new(&dev, bytes), *image = (char *)malloc(bytes);
    size_t need, at;
    upipe_attn_grad g;
    void *work;
    if (image == NULL) exit(2);
    valid_call(&g, UPIPE_BF16, block, NULL, 0);
    need = dev.ops.attn_bytes(&dev.ops, &g.a, 1);
    work = device_new(&dev, need);

#define REFUSED_FWD(change, word)                                                            \
    do {                                                                                     \
        valid_call(&g, UPIPE_BF16, block, work, need);                                       \
        change;                                                                              \
        CHECK_REFUSED(upipe_attn_fwd(&dev.c, &g.a), UPIPE_ERR_UNSUPPORTED, dev.c.err, word); \
    } while (0)
#define REFUSED_BWD(change, word)                                                          \
    do {                                                                                   \
        valid_call(&g, UPIPE_BF16, block, work, need);                                     \
        change;                                                                            \
        CHECK_REFUSED(upipe_attn_bwd(&dev.c, &g), UPIPE_ERR_UNSUPPORTED, dev.c.err, word); \
    } while (0)
#define REFUSED(change, word)      \
    do {                           \
        REFUSED_FWD(change, word); \
        REFUSED_BWD(change, word); \
    } while (0)
    REFUSED(g.a.q.data = block + 8, "q at");
    REFUSED(g.a.q.n_stride = 260, "strides of 260 and 64 bf16");
    REFUSED(g.a.k.h_stride = 68, "k at");
    REFUSED(g.a.v.data = block + 2, "v at");
    REFUSED_FWD(g.a.o.h_stride = 70, "o at");
    REFUSED_FWD((g.a.merge = 1, g.a.o.dtype = UPIPE_F32, g.a.o.n_stride = 258), "258 and 64 f32");
    REFUSED_BWD(g.dout.data = block + 4, "dout at");
    REFUSED_BWD(g.dq.n_stride = 257, "dq at");
    REFUSED_BWD(g.dk.n_stride = 130, "dk at");
    REFUSED_BWD(g.dv.data = block + 4, "dv at");
    REFUSED_BWD((g.a.merge = 1, g.dq.dtype = UPIPE_F32, g.dq.n_stride = 258), "dq at");
    REFUSED_FWD((g.a.mask.window = 3, g.a.k.n = INT32_MAX, g.a.v.n = INT32_MAX), "at most 2147483646");
#undef REFUSED
#undef REFUSED_FWD
#undef REFUSED_BWD
    valid_call(&g, UPIPE_BF16, block, work, need - 1);
    CHECK_STATUS(upipe_attn_bwd(&dev.c, &g), UPIPE_ERR_ARG, dev.c.err);
    CHECK_TEXT(dev.c.err.text, "scratch");
    /* steps that are never taken may be anything */
    valid_call(&g, UPIPE_BF16, block, work, need);
    g.a.q.n = g.a.o.n = g.a.lse.n = 0;
    g.a.q.n_stride = g.a.o.n_stride = 1;
    CHECK_STATUS(upipe_attn_fwd(&dev.c, &g.a), UPIPE_OK, dev.c.err);
    device_get(&dev, image, block, bytes);
    for (at = 0; at < bytes; ++at)
        if (!CHECK(image[at] == (char)0xff)) break;
    free(image);
    device_free(&dev, work);
    device_free(&dev, block);
}

/* None forward; backward f32 sums of dQ, but for merge, and a counter for each tile, whatever the keys. With a
 * mask 8 bytes more a query forward, and a key backward; for packed sequences 4 a block of 128 queries forward. */
static void test_scratch(void)
{
    static const int dims[] = {64, 128, 256};
    for (size_t i = 0; i < 3; ++i) {
        upipe_attn_grad g;
        size_t sums, need;
        valid_call(&g, UPIPE_BF16, NULL, NULL, 0);
        g.a.q.d = g.a.v.d = dims[i];
        g.a.q.n = 1 << 20;
        sums = (size_t)(4 << 20) * (size_t)dims[i] * 4;
        CHECK_INT(dev.ops.attn_bytes(&dev.ops, &g.a, 0), 0);
        need = dev.ops.attn_bytes(&dev.ops, &g.a, 1);
        CHECK_SAY(need > sums && need - sums <= ((4 << 20) / 32 + 16) * 4, "%zu bytes over %zu", need, sums);
        CHECK_INT(need % 64, 0);
        g.a.k.n = 1 << 22;
        g.a.mask.causal = 1;
        CHECK_INT(dev.ops.attn_bytes(&dev.ops, &g.a, 1), need);
        g.a.mask.window = 100;
        CHECK_INT(dev.ops.attn_bytes(&dev.ops, &g.a, 0), 8 << 20);
        CHECK_INT(dev.ops.attn_bytes(&dev.ops, &g.a, 1), need + (8 << 22));
        g.a.mask.borders.cu_seqlens = &g.a.q.n;
        CHECK_INT(dev.ops.attn_bytes(&dev.ops, &g.a, 0), (8 << 20) + 64 * ((1 << 20) / 128 / 16 + 1));
        CHECK_INT(dev.ops.attn_bytes(&dev.ops, &g.a, 1), need + (8 << 22));
        g.a.merge = 1;
        CHECK_INT(dev.ops.attn_bytes(&dev.ops, &g.a, 1), need + (8 << 22) - sums);
        g.a.merge = 0;
        g.a.q.n = INT64_C(1) << 60;
        CHECK(dev.ops.attn_bytes(&dev.ops, &g.a, 0) == SIZE_MAX);
        CHECK(dev.ops.attn_bytes(&dev.ops, &g.a, 1) == SIZE_MAX);
    }
}

int main(int argc, char **argv)
{
    static const int64_t longer[] = {1, 40, 129};
    test_begin(argc, argv);
    if (!place_open()) return test_end("cuda_attn");
    TEST(test_refusals());
    TEST(test_scratch());
    for (int i = 0; i < 2; ++i) { /* other kernels each */
        place_types(i == 0 ? UPIPE_BF16 : UPIPE_F32);
        if (same_as_before(here.types[0])) break;
        TEST(test_head_dims());
        TEST(test_lengths());
        TEST(check_pos_steps());
        TEST(test_merge());
        TEST(check_merge_nothing());
        TEST(check_prefix(longer, COUNT_OF(longer)));
        TEST(test_one_key());
        if (here.brief) continue; /* the same code with other numbers */
        TEST(check_low_scores(64));
        TEST(check_nan(128, 64));
        if (BRIEF) continue;
        TEST(test_extreme_scores());
        TEST(test_same_bits());
        TEST(test_random());
        if (i == 0) TEST(test_many_runs());
    }
    return place_close("cuda_attn");
}

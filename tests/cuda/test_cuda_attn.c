/* test_cuda_attn.c -- the CUDA attention kernels on bf16 against dense attention in f64
 *
 * Causal masks and none; test_cuda_attn_masks.c has the others. Emulated, a case of 300 x 300 takes tenths of a
 * second: shapes are small, and lie around the edges of tiles (16 rows, 32 and 64 keys forward; 32 and 64
 * queries, 64 and 128 keys backward).
 */
#include "cuda/attn_device.h"

static void test_head_dims(void)
{
    static const int dims[] = {32, 40, 64, 72, 96, 128, 136, 200, 256};
    test_rng r = {1};
    int i;
    for (i = 0; i < 9; i += brief() && dims[i] > 40 ? 3 : 1) {
        oracle_attn t = shape(77, 150, 2, 1, dims[i], i % 2, 80, 0);
        values in = inputs_make(&t, &r, 1);
        check_case(&t, i % LAYOUTS, &in);
        values_free(&in);
    }
}

/* Block edges, no rows, no keys, rows that see nothing, groups of heads. */
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
    test_rng r = {2};
    size_t i;
    for (i = 0; i < sizeof cases / sizeof *cases; ++i) {
        const int64_t *x = cases[i];
        oracle_attn t;
        values in;
        if (brief() && i % 4 != 3) continue;
        t = shape(x[0], x[1], (int)x[5], (int)x[6],
                  i % 5 == 4 ? 104
                  : i % 3    ? 64
                             : 40,
                  (int)x[2], x[3], x[4]);
        in = inputs_make(&t, &r, 1);
        check_case(&t, (int)i % LAYOUTS, &in);
        values_free(&in);
    }
}

/* Rows that lie some positions apart, as those of a striped ring: keys ahead of the queries by less than a
 * step, by one and by several, and behind them. */
static void test_pos_steps(void)
{
    /* clang-format off */
    static const int64_t cases[][3] = { /* step, q_pos, k_pos */
        {2, 0, 1}, {2, 1, 0}, {3, 2, 0}, {3, 0, 2}, {3, 0, 3}, {5, 204, 1}, {7, 0, 300}, {1000, 70001, 0},
    };
    /* clang-format on */
    test_rng r = {12};
    size_t i;
    for (i = (size_t)brief(); i < sizeof cases / sizeof *cases; i += brief() ? 4 : 1) {
        oracle_attn t = shape(75, 140, 2, 1, i % 2 ? 64 : 40, 1, cases[i][1], cases[i][2]);
        values in = inputs_make(&t, &r, 1);
        t.pos_step = cases[i][0];
        check_case(&t, (int)i % LAYOUTS, &in);
        values_free(&in);
    }
}

/* Scores up to tens of thousands, keys that grow so that every tile moves the maximum, rows that see nothing.
 * The scores are whole numbers, which f32 sums exactly: rounding one of 10,000 would change its weight by
 * 1e-3, and the result would tell more about luck than about the kernel. */
static void test_extreme_scores(void)
{
    static const double sizes[] = {1, 30, 300};
    test_rng r = {3};
    int i, grow;
    for (i = 0; i < 3; ++i)
        for (grow = 0; grow < 2; ++grow) {
            oracle_attn t = shape(150, 170, 2, 1, 64, grow == 0 || i > 1, 0, i > 1 ? 60 : 0);
            values in = inputs_make(&t, &r, 1);
            int64_t e;
            for (e = 0; e < q_count(&t); ++e)
                in.q[e] = naive_store(storage, rintf((float)(sizes[i] * test_normal(&r))));
            for (e = 0; e < k_count(&t); ++e) {
                in.k[e] = rintf((float)(4 * test_normal(&r)));
                if (grow) in.k[e] = naive_store(storage, in.k[e] * (float)(1 + e / t.d / 5));
            }
            check_case(&t, PACKED, &in);
            values_free(&in);
        }
}

/* All scores are so far below zero that the zeros beyond the last key would outweigh every key, and overflow. */
static void test_low_scores(void)
{
    oracle_attn t = shape(70, 150, 2, 1, 64, 0, 0, 0);
    test_rng r = {5};
    values in = inputs_make(&t, &r, 1);
    int64_t e;
    for (e = 0; e < q_count(&t); ++e) in.q[e] = 4;
    for (e = 0; e < k_count(&t); ++e) in.k[e] = naive_store(storage, (float)(-5 - 0.25 * test_normal(&r)));
    check_case(&t, PACKED, &in);
    values_free(&in);
}

static void test_random(void)
{
    static const int groups[][2] = {{1, 1}, {2, 2}, {2, 1}, {4, 2}, {3, 1}, {8, 1}};
    long seed = test_env("UPIPE_SEED", 1), draws = 8 + test_env("UPIPE_DRAWS", 2000) / 2000, i;
    for (i = 0; i < draws; ++i) {
        test_rng r = {(uint64_t)(seed + i)};
        const int *g = groups[test_below(&r, 6)];
        int layout = test_below(&r, LAYOUTS), d = 32 + 8 * test_below(&r, 29);
        int64_t sq = 1 + test_below(&r, 300 / g[0]), sk = 1 + test_below(&r, 300);
        oracle_attn t =
            shape(sq, sk, g[0], g[1], d, test_below(&r, 4) > 0, test_below(&r, 320), test_below(&r, 320));
        long failed = test_failures;
        values in;
        t.scale = (double)(float)(t.scale * 0.25 * (1 + test_below(&r, 8)));
        in = inputs_make(&t, &r, 1);
        check_case(&t, layout, &in);
        values_free(&in);
        if (test_failures != failed) fprintf(stderr, "  replay: UPIPE_SEED=%ld UPIPE_DRAWS=1\n", seed + i);
    }
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
    test_rng r = {10};
    size_t i;
    int narrow;
    for (i = 0; i < sizeof cases / sizeof *cases; ++i)
        for (narrow = brief() ? (int)i % 2 : 0; narrow < 2; narrow += brief() ? 2 : 1) {
            const int64_t *x = cases[i];
            oracle_attn t = shape(x[0], x[3] + x[4] + x[5], 2, 1, dims[i % 3], (int)x[1], x[2], 0);
            values in = inputs_make(&t, &r, 2);
            check_merge(&t, narrow ? storage : UPIPE_F32, (int)i % LAYOUTS, (int)(i + 1) % 2, &in, x + 3, 3);
            values_free(&in);
        }
}

/* What is merged with keys that it doesn't see stays as it is, to the bit. */
static void test_merge_nothing(void)
{
    oracle_attn t = shape(30, 20, 2, 1, 40, 1, 0, 100);
    test_rng r = {11};
    values in = inputs_make(&t, &r, 1);
    int keys, narrow;
    for (keys = 0; keys <= 20; keys += 20)
        for (narrow = 0; narrow < 2; ++narrow) {
            tensor q = tensor_make(storage, t.sq, t.h, t.d, GAPS, in.q);
            tensor k = tensor_make(storage, keys, t.hkv, t.d, GAPS, in.k);
            tensor o = tensor_make(narrow ? storage : UPIPE_F32, t.sq, t.h, t.d, GAPS, in.dout);
            tensor lse = tensor_make(UPIPE_F32, t.sq, t.h, 1, GAPS, in.q);
            float *got_o = floats(q_count(&t)), *got_lse = floats(t.sq * t.h);
            upipe_attn a;
            attn_set(&a, &t, NULL);
            a.q = q.v, a.k = a.v = k.v, a.o = o.v, a.lse = lse.v;
            a.merge = 1;
            work_make(&a, 0);
            CHECK_STATUS(upipe_attn_fwd(&dev.c, &a), UPIPE_OK, dev.c.err);
            device_free(&dev, a.work);
            tensor_read(&q, NULL), tensor_read(&k, NULL), tensor_read(&o, got_o), tensor_read(&lse, got_lse);
            CHECK_BYTES(got_o, in.dout, q_count(&t) * 4);
            CHECK_BYTES(got_lse, in.q, t.sq * t.h * 4);
            free(got_o), free(got_lse);
        }
    values_free(&in);
}

/* ---- the same bits ---- */

/* Layouts, a group's heads in one call or in several, and one run after another, from a start that is not
 * zero. */
static void test_same_bits(void)
{
    static const int dims[] = {64, 128, 168};
    test_rng r = {4};
    int i;
    for (i = 0; i < 3; ++i) {
        oracle_attn t = shape(140, 210, 4, 1, dims[i], i != 1, 90, 20);
        values in = inputs_make(&t, &r, 3), one = values_make(&t), first, other;
        int calls;
        fill(&r, one.dk, k_count(&t), UPIPE_F32, 1);
        fill(&r, one.dv, k_count(&t), UPIPE_F32, 1);
        first = start_from(&t, &one);
        run_kernels(&t, PACKED, t.h, &in, &first);
        for (calls = 1; calls <= 4; calls *= 2) {
            other = start_from(&t, &one);
            run_kernels(&t, (i + calls) % LAYOUTS, t.h / calls, &in, &other);
            check_same(&t, &first, &other);
            values_free(&other);
        }
        values_free(&in), values_free(&one), values_free(&first);
    }
}

/* On a device more blocks than run at once, and a fill that takes as long as they do. */
#ifdef FAKE_CUDA_RUNTIME_API_H
enum { RUNS = 3, LENGTH = 150, MANY = 256, BUSY = 1 << 16 };
#else
enum { RUNS = 1000, LENGTH = 1024, MANY = 2560, BUSY = 1 << 29 };
#endif

/* Gradients run after run, every second time while another stream fills memory. */
static void run_often(const oracle_attn *t, int runs)
{
    test_rng r = {8};
    values in = inputs_make(t, &r, 1);
    tensor q = tensor_make(storage, t->sq, t->h, t->d, PACKED, in.q);
    tensor k = tensor_make(storage, t->sk, t->hkv, t->d, PACKED, in.k);
    tensor v = tensor_make(storage, t->sk, t->hkv, t->d, PACKED, in.v);
    tensor dout = tensor_make(storage, t->sq, t->h, t->d, PACKED, in.dout);
    tensor o = tensor_make(storage, t->sq, t->h, t->d, PACKED, NULL);
    tensor lse = tensor_make(UPIPE_F32, t->sq, t->h, 1, PACKED, NULL);
    tensor delta = tensor_make(UPIPE_F32, t->sq, t->h, 1, PACKED, NULL);
    const size_t of_q = (size_t)q_count(t) * 2, of_k = (size_t)k_count(t) * 4, bytes = of_q + 2 * of_k;
    char *grads = (char *)device_new(&dev, bytes), *busy = (char *)device_new(&dev, BUSY);
    void *first, *got;
    upipe_attn_grad g;
    cudaStream_t other;
    int run, others = 0;
    if (upipe_cuda_host_slab(&first, bytes, &dev.c.err) || upipe_cuda_host_slab(&got, bytes, &dev.c.err) ||
        !DEVICE_CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking)))
        exit(2);
    memset(&g, 0, sizeof g);
    attn_set(&g.a, t, NULL);
    g.a.q = q.v, g.a.k = k.v, g.a.v = v.v, g.a.o = o.v, g.a.lse = lse.v;
    work_make(&g.a, 0);
    CHECK_STATUS(upipe_attn_fwd(&dev.c, &g.a), UPIPE_OK, dev.c.err);
    CHECK_STATUS(dev.ops.rowdot(&dev.c, delta.v, o.v, dout.v), UPIPE_OK, dev.c.err);
    device_free(&dev, g.a.work);
    work_make(&g.a, 1);
    g.dout = dout.v, g.delta = delta.v;
    g.dq = upipe_view_packed(grads, storage, t->sq, t->h, t->d);
    g.dk = upipe_view_packed(grads + of_q, UPIPE_F32, t->sk, t->hkv, t->d);
    g.dv = upipe_view_packed(grads + of_q + of_k, UPIPE_F32, t->sk, t->hkv, t->d);
    for (run = 0; run < runs; ++run) {
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
    tensor_read(&q, NULL), tensor_read(&k, NULL), tensor_read(&v, NULL), tensor_read(&dout, NULL);
    tensor_read(&o, NULL), tensor_read(&lse, NULL), tensor_read(&delta, NULL);
    CHECK_STATUS(upipe_cuda_host_slab_free(first, &dev.c.err), UPIPE_OK, dev.c.err);
    CHECK_STATUS(upipe_cuda_host_slab_free(got, &dev.c.err), UPIPE_OK, dev.c.err);
    values_free(&in);
}

/* A thousand times on a device, but for slow instruments, which set UPIPE_DRAWS to 0. */
static void test_many_runs(void)
{
    const int runs = test_env("UPIPE_DRAWS", 1) == 0 ? 3 : RUNS;
    int d;
    for (d = 64; d <= 256; d *= 2) {
        const oracle_attn t = shape(LENGTH, LENGTH, 2 * (MANY / d), MANY / d, d, d != 128, 0, 0);
        run_often(&t, runs);
    }
}

/* Keys that come after every query's position change nothing, to the bit, and get gradients of 0. */
static void test_prefix(void)
{
    static const int64_t longer[] = {1, 40, 129};
    oracle_attn t = shape(150, 150, 2, 1, 64, 1, 0, 0);
    test_rng r = {6};
    int64_t e;
    size_t i;
    for (i = brief() ? 2 : 0; i < sizeof longer / sizeof *longer; ++i) {
        oracle_attn more = t;
        values in, out, got, less = values_make(&t);
        more.sk += longer[i];
        in = inputs_make(&more, &r, 1);
        out = values_make(&more);
        got = values_make(&t);
        memcpy(less.q, in.q, (size_t)q_count(&t) * 4), memcpy(less.dout, in.dout, (size_t)q_count(&t) * 4);
        memcpy(less.k, in.k, (size_t)k_count(&t) * 4), memcpy(less.v, in.v, (size_t)k_count(&t) * 4);
        run_kernels(&more, PACKED, t.h, &in, &out);
        run_kernels(&t, PACKED, t.h, &less, &got);
        check_same(&t, &got, &out);
        for (e = k_count(&t); e < k_count(&more); ++e) CHECK(out.dk[e] == 0 && out.dv[e] == 0);
        values_free(&in), values_free(&out), values_free(&got), values_free(&less);
    }
}

/* A NaN in a row of q is not swallowed, and stays in its row. */
static void test_nan(void)
{
    int kind;
    for (kind = 0; kind < 4; ++kind) {
        oracle_attn t = shape(40, 70, 1, 1, kind & 1 ? 64 : 128, kind >> 1, 30, 0);
        test_rng r = {8};
        values in = inputs_make(&t, &r, 1), out = values_make(&t);
        int64_t i;
        int e;
        for (e = 0; e < (kind & 1 ? t.d : 1); ++e) in.q[17 * t.d + e] = NAN;
        run_kernels(&t, PACKED, 1, &in, &out);
        for (i = 0; i < t.sq; ++i) {
            int all = 1, any = 0;
            for (e = 0; e < t.d; ++e) {
                int nan_o = isnan(out.o[i * t.d + e]) != 0, nan_q = isnan(out.dq[i * t.d + e]) != 0;
                all &= nan_o && nan_q;
                any |= nan_o || nan_q;
            }
            CHECK_SAY(i == 17 ? all : !any, "kind %d: row %d of o and dq", kind, (int)i);
            CHECK_INT(isnan(out.lse[i]) != 0, i == 17);
        }
        for (i = 0; i < 48 * t.d; ++i) CHECK(isnan(out.dk[i])); /* what row 17 saw */
        values_free(&in), values_free(&out);
    }
}

/* A query that sees one key: o is v and dv is dO, bit for bit. */
static void test_one_key(void)
{
    static const int dims[] = {40, 128, 256};
    size_t k;
    for (k = 0; k < sizeof dims / sizeof *dims; ++k) {
        oracle_attn t = shape(1, 1, 2, 2, dims[k], (int)k & 1, 0, 0);
        test_rng r = {(uint64_t)dims[k]};
        values in = inputs_make(&t, &r, 30), out = values_make(&t);
        run_kernels(&t, PACKED, 2, &in, &out);
        CHECK_BYTES(out.o, in.v, 2 * dims[k] * 4);
        CHECK_BYTES(out.dv, in.dout, 2 * dims[k] * 4);
        values_free(&in), values_free(&out);
    }
}

/* ---- what is refused, and scratch ---- */

/* A call that would work: 8 queries, 8 keys, 4 heads over 2, d 64; every pointer into one block. */
static void valid_call(upipe_attn_grad *g, void *block, void *work, size_t work_bytes)
{
    upipe_view q = upipe_view_packed(block, UPIPE_BF16, 8, 4, 64),
               k = upipe_view_packed(block, UPIPE_BF16, 8, 2, 64);
    upipe_view row = upipe_view_packed(block, UPIPE_F32, 8, 4, 1),
               sum = upipe_view_packed(block, UPIPE_F32, 8, 2, 64);
    memset(g, 0, sizeof *g);
    g->a.q = g->a.o = g->dout = g->dq = q;
    g->a.k = g->a.v = k;
    g->a.lse = g->delta = row;
    g->dk = g->dv = sum;
    g->a.work = work;
    g->a.work_bytes = work_bytes;
}

static void test_refusals(void)
{
    const size_t bytes = 8 * 4 * 64 * 4;
    char *block = (char *)device_new(&dev, bytes), *image = (char *)malloc(bytes);
    size_t need, at;
    upipe_attn_grad g;
    void *work;
    if (image == NULL) exit(2);
    valid_call(&g, block, NULL, 0);
    need = dev.ops.attn_bytes(&dev.ops, &g.a, 1);
    work = device_new(&dev, need);

#define REFUSED_FWD(change, word)                                                     \
    do {                                                                              \
        valid_call(&g, block, work, need);                                            \
        change;                                                                       \
        CHECK_STATUS(upipe_attn_fwd(&dev.c, &g.a), UPIPE_ERR_UNSUPPORTED, dev.c.err); \
        CHECK_TEXT(dev.c.err.text, word);                                             \
    } while (0)
#define REFUSED_BWD(change, word)                                                   \
    do {                                                                            \
        valid_call(&g, block, work, need);                                          \
        change;                                                                     \
        CHECK_STATUS(upipe_attn_bwd(&dev.c, &g), UPIPE_ERR_UNSUPPORTED, dev.c.err); \
        CHECK_TEXT(dev.c.err.text, word);                                           \
    } while (0)
#define REFUSED(change, word)      \
    do {                           \
        REFUSED_FWD(change, word); \
        REFUSED_BWD(change, word); \
    } while (0)
    REFUSED(g.a.q.data = block + 8, "q at");
    REFUSED(g.a.q.n_step = 260, "steps of 260 and 64 bf16");
    REFUSED(g.a.k.h_step = 68, "k at");
    REFUSED(g.a.v.data = block + 2, "v at");
    REFUSED_FWD(g.a.o.h_step = 70, "o at");
    REFUSED_FWD((g.a.merge = 1, g.a.o.dtype = UPIPE_F32, g.a.o.n_step = 258), "258 and 64 f32");
    REFUSED_BWD(g.dout.data = block + 4, "dout at");
    REFUSED_BWD(g.dq.n_step = 257, "dq at");
    REFUSED_BWD(g.dk.n_step = 130, "dk at");
    REFUSED_BWD(g.dv.data = block + 4, "dv at");
    REFUSED_BWD((g.a.merge = 1, g.dq.dtype = UPIPE_F32, g.dq.n_step = 258), "dq at");
    REFUSED_FWD((g.a.mask.window = 3, g.a.k.n = INT32_MAX, g.a.v.n = INT32_MAX), "at most 2147483646");
#undef REFUSED
#undef REFUSED_FWD
#undef REFUSED_BWD
    valid_call(&g, block, work, need - 1);
    CHECK_STATUS(upipe_attn_bwd(&dev.c, &g), UPIPE_ERR_ARG, dev.c.err);
    CHECK_TEXT(dev.c.err.text, "scratch");
    /* steps that are never taken may be anything */
    valid_call(&g, block, work, need);
    g.a.q.n = g.a.o.n = g.a.lse.n = 0;
    g.a.q.n_step = g.a.o.n_step = 1;
    CHECK_STATUS(upipe_attn_fwd(&dev.c, &g.a), UPIPE_OK, dev.c.err);
    device_get(&dev, image, block, bytes);
    for (at = 0; at < bytes; ++at)
        if (!CHECK(image[at] == (char)0xff)) break;
    free(image);
    device_free(&dev, work);
    device_free(&dev, block);
}

/* None forward; backward f32 sums of dQ, but for merge, and a counter for each tile, whatever the keys. With a
 * mask 8 bytes more a query forward, and a key backward. */
static void test_scratch(void)
{
    static const int dims[] = {64, 128, 256};
    size_t i;
    for (i = 0; i < 3; ++i) {
        upipe_attn_grad g;
        size_t sums, need;
        valid_call(&g, NULL, NULL, 0);
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
        g.a.merge = 1;
        CHECK_INT(dev.ops.attn_bytes(&dev.ops, &g.a, 1), need + (8 << 22) - sums);
        g.a.merge = 0;
        g.a.q.n = INT64_C(1) << 60;
        CHECK(dev.ops.attn_bytes(&dev.ops, &g.a, 0) == SIZE_MAX);
        CHECK(dev.ops.attn_bytes(&dev.ops, &g.a, 1) == SIZE_MAX);
    }
}

int main(void)
{
    int i;
    if (!device_open(&dev)) return test_end("cuda_attn");
    test_refusals();
    test_scratch();
    for (i = 0; i < 2; ++i) { /* other kernels each */
        storage = i == 0 ? UPIPE_BF16 : UPIPE_F32;
        if (same_as_before(storage)) break;
        test_head_dims();
        test_lengths();
        test_pos_steps();
        test_merge();
        test_merge_nothing();
        test_prefix();
        test_one_key();
        if (brief()) continue; /* the same code with other numbers */
        test_low_scores();
        test_nan();
        if (BRIEF) continue;
        test_extreme_scores();
        test_same_bits();
        test_random();
        if (storage == UPIPE_BF16) test_many_runs();
    }
    printf("digest %016llx\n", (unsigned long long)digest);
    device_close(&dev);
    return test_end("cuda_attn");
}

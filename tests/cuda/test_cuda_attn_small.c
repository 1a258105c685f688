/* test_cuda_attn_small.c -- the attention backward where a block may have 99 KiB of shared memory: 8.6, 8.9, 12.0
 *
 * Above head dim 64 it takes half as many keys a block as elsewhere, and dO has one slot. The fake plays such a device;
 * another one is told that it gives no more. Edges of tiles, groups of heads, masks, and keys in parts against f64, and
 * what has the bits that other devices compute.
 */
#include "cuda/attn_place.h"

enum { SMALL = 99 << 10 };

static int most; /* of the device itself */

/* What a block may have: 99 KiB, or what the larger tiles need. */
static void limit(int small)
{
    setenv("FAKE_CAPABILITY", small ? "86" : "80", 1);
    dev.cuda.shared_most = small ? SMALL : most;
}

static void run_case(const oracle_attn *t, int i, uint64_t seed)
{
    test_rng r = {seed};
    check_drawn(t, UPIPE_BF16, i % ATTN_LAYOUTS, &r, 1);
}

/* Around the edges of blocks (64 and 32 keys) and tiles (64 and 32 queries); groups of heads, many blocks that wait for one
 * another; rows, and keys, that nobody sees. */
static void test_shapes(void)
{
    /* clang-format off */
    static const int64_t cases[][8] = { /* sq, sk, d, query heads, key/value heads, causal, q_pos, v */
        {65, 63, 128, 1, 1, 0, 0}, {33, 31, 256, 1, 1, 1, 10}, {140, 210, 72, 2, 1, 1, 70}, {70, 100, 136, 2, 1, 1, 40},
        {128, 129, 128, 4, 2, 1, 1}, {64, 65, 256, 3, 1, 0, 0}, {63, 64, 96, 1, 1, 1, 20}, {31, 32, 192, 1, 1, 1, 0},
        {1, 200, 128, 8, 1, 1, 199}, {200, 1, 256, 1, 1, 0, 0}, {150, 40, 128, 2, 1, 1, -130}, {90, 50, 256, 2, 2, 1, -60},
        {100, 500, 104, 2, 2, 1, 400}, {40, 300, 200, 4, 1, 1, 260}, {0, 5, 128, 1, 1, 0, 0}, {5, 0, 256, 2, 1, 0, 0},
        {70, 100, 192, 2, 1, 1, 40, 128}, {40, 130, 136, 2, 1, 0, 0, 104},
    };
    /* clang-format on */
    for (int i = 0; i < COUNT_OF(cases); i += here.brief ? 2 : 1) {
        const int64_t *x = cases[i / 2 * 2 + (i + i / 2) % 2];
        oracle_attn t = shape(x[0], x[1], (int)x[3], (int)x[4], (int)x[2], (int)x[5], x[6], 0);
        t.v_dim = (int)x[7];
        run_case(&t, i, (uint64_t)(100 + i));
    }
}

/* Masks that come from tables, alone and together; their tiles of queries begin and end anywhere. */
static void test_masked(void)
{
    static const int64_t packed[] = {3, 40, 40, 64, 67, 120, 170}, gaps[] = {-9, 10, 32, 32, 101, 130};
    static const float sinks[] = {0.5f, -2};
    for (int i = 0; i < 8; i += here.brief ? 3 : 1) {
        oracle_attn t = shape(110, 160, 2, 1, i % 2 ? 128 : 256, i != 4, 30, 0);
        if (i % 4 != 1) t.window = i == 5 ? 5 : 50;
        if (i % 3 != 2) t.cu_seqlens = i % 2 ? gaps : packed, t.cu_seqlens_n = i % 2 ? 5 : 6;
        if (i % 3 == 1) t.softcap = 3, t.v_dim = i % 2 ? 72 : 128, t.pos_step = 2;
        if (i > 4) t.sinks = sinks;
        run_case(&t, i, (uint64_t)(300 + i));
    }
}

/* A ring's steps: keys in parts, whose dQ is added up in f32. */
static void test_merge(void)
{
    static const int64_t lengths[] = {64, 1, 75};
    for (int i = 0; i < 2; ++i) {
        const oracle_attn t = shape(90, 140, 2, 1, i ? 256 : 128, 1, 50, 0);
        test_rng r = {(uint64_t)(450 + i)};
        const values in = inputs_make(&t, UPIPE_BF16, &r, 1);
        check_merge_bwd(&t, UPIPE_BF16, i, &in, lengths, 3);
        buffers_free(0);
    }
}

/* A group's heads in one call or in several, and layouts. dK and dV also have the bits of the larger tiles: their sums are
 * over queries, in the same order. dQ's are over keys, block by block. */
static void test_same_bits(void)
{
    for (int i = 0; i < 4; i += here.brief ? 3 : 1) {
        oracle_attn t = shape(100, 150, 4, 1, i % 2 ? 256 : 128, 1, 60, 20);
        test_rng r = {(uint64_t)(500 + i)};
        const values in = inputs_make(&t, UPIPE_BF16, &r, 1);
        values ours = values_make(&t), theirs = values_make(&t);
        if (i > 1) t.window = 40;
        run_kernels(&t, UPIPE_BF16, PACKED, t.h, &in, &ours);
        limit(0);
        run_kernels(&t, UPIPE_BF16, PACKED, t.h, &in, &theirs);
        limit(1);
        CHECK_BYTES(ours.dk, theirs.dk, k_count(&t) * 4);
        CHECK_BYTES(ours.dv, theirs.dv, v_count(&t) * 4);
        buffers_free(0);
        if (!here.brief) check_same_bits(&t, UPIPE_BF16, &r, 4, i);
    }
}

/* Less than even these tiles need. */
static void test_refused(void)
{
    upipe_attn_grad g;
    char *block = (char *)device_new(&dev, 1 << 20), *work = block + (1 << 19);
    for (int d = 128; d <= 256; d *= 2) {
        valid_call(&g, UPIPE_BF16, block, work, 1 << 19);
        g.a.q.d = g.a.k.d = g.a.v.d = g.a.o.d = g.dout.d = g.dq.d = g.dk.d = g.dv.d = d;
        dev.cuda.shared_most = 64 << 10;
        CHECK_REFUSED(upipe_attn_bwd(&dev.c, &g), UPIPE_ERR_UNSUPPORTED, dev.c.err, "device 0 has 65536");
    }
    limit(1);
    device_free(&dev, block);
}

int main(int argc, char **argv)
{
    setenv("FAKE_CAPABILITY", "86", 1);
    test_begin(argc, argv);
    if (!place_open()) return test_end("cuda_attn_small");
#ifdef FAKE_CUDA_RUNTIME_API_H
    CHECK_INT(dev.cuda.shared_most, SMALL);
    most = 163 << 10;
#else
    most = dev.cuda.shared_most;
    dev.cuda.capability = 80; /* the kernels for 9.0 need more */
    limit(1);
#endif
    /* All shapes where they are compared, and not for bits alone: but for what is small this is the kernel of
     * test_cuda_attn. */
    if (!test_full() || !here.compares || test_env("TEST_BRIEF", 0) != 0) here.brief = 1;
    TEST(test_refused());
    TEST(test_shapes());
    TEST(test_masked());
    TEST(test_merge());
    TEST(test_same_bits());
    return place_close("cuda_attn_small");
}

/* test_cuda_attn90_bwd.c -- what the attention backward for compute capability 9.0 does otherwise than that for 8.0
 *
 * The fake is told to be such a device; test_cuda_attn and test_cuda_attn_masks run there too, and hold these
 * kernels to everything that they know. Here is what depends on their shapes and on their two launches: edges of
 * tiles (64 keys a warpgroup, 128 a block, above head dim 128 64 of both; 64 or 128 queries), chains of many blocks
 * of keys, sums of dQ that are added to, calls that they leave to the others.
 */
#include "cuda/attn_place.h"

/* ---- which kernel ---- */

/* Whether the call's kernel is one for 9.0, where that can be seen: its launch is made to fail, and says its name. */
static void check_accepts(const upipe_attn_grad *g, int want)
{
#ifdef FAKE_CUDA_RUNTIME_API_H
    for (long k = 1; k < 20; ++k) {
        upipe_status s;
        dev.c.err.text[0] = 0;
        fake_fail_at(k, -1, FAKE_ONCE);
        s = upipe_attn_bwd(&dev.c, g);
        fake_fail_at(0, -1, FAKE_ONCE);
        if (s == UPIPE_OK || strstr(dev.c.err.text, "bwd90_kernel") != NULL ||
            strstr(dev.c.err.text, "attn_bwd_kernel") != NULL)
            break;
    }
    CHECK_TEXT(dev.c.err.text, want ? "bwd90_kernel" : "attn_bwd_kernel");
#else
    (void)want;
    if (dev.cuda.choice != NULL) CHECK_STATUS(upipe_attn_bwd(&dev.c, g), UPIPE_OK, dev.c.err);
#endif
}

static void look(const upipe_attn_grad *g)
{
    check_accepts(g, 1);
}

/* What tensor maps can't say goes to the other kernels. */
static void test_left_to_others(void)
{
    const size_t bytes = 8 * 4 * 256 * 4, buf = 1 << 17;
    char *block = (char *)device_new(&dev, bytes), choice[UPIPE_CUDA_CHOICE] = "";
    void *work = device_new(&dev, buf);
    upipe_attn_grad g;
#define LEFT(change, want)                            \
    do {                                              \
        valid_call(&g, UPIPE_BF16, block, work, buf); \
        change;                                       \
        check_accepts(&g, want);                      \
    } while (0)
    LEFT(g.a.scale = 1, 1);
    LEFT(g.a.q.d = g.dq.d = g.a.k.d = g.dk.d = 128, 1);
    LEFT(g.a.q.d = g.dq.d = g.a.k.d = g.dk.d = 136, 1);
    LEFT(g.a.v.d = g.dv.d = g.dout.d = g.a.o.d = 256, 1);
    LEFT(g.a.mask.window = 3, 1);
    LEFT((g.a.merge = 1, g.dq.dtype = UPIPE_F32), 1);
    LEFT((g.a.merge = 1, g.dq.dtype = UPIPE_F32, g.dq.h_stride = 0), 0);
    LEFT(g.a.k.n_stride = 0, 0);
    LEFT(g.dout.n_stride = 0, 0);
    LEFT(g.a.k.n = g.a.v.n = g.dk.n = g.dv.n = 0, 0);
    LEFT(dev.cuda.avoid = UPIPE_CUDA_AVOID_FWD90, 1); /* of the other direction */
    dev.cuda.choice = choice;
    LEFT(dev.cuda.avoid = UPIPE_CUDA_AVOID_BWD90, 0);
    CHECK_TEXT(choice, "backward: kernels for 8.0, as the host avoids those for 9.0");
    dev.cuda.choice = NULL;
    dev.cuda.avoid = 0;
    LEFT(dev.cuda.capability = 100, 0); /* has other code for all this */
#undef LEFT
    dev.cuda.capability = 90;
    device_free(&dev, work);
    device_free(&dev, block);
}

/* ---- against the oracle ---- */

static void run_case(const oracle_attn *t, int layout, uint64_t seed)
{
    test_rng r = {seed};
    check_drawn(t, UPIPE_BF16, layout, &r, 1);
}

/* Around the edges of blocks and tiles, of all kernels. */
static void test_edges(void)
{
    static const int dims[] = {64, 128, 40, 96, 256, 136, 192}, v_dims[] = {0, 0, 0, 0, 0, 0, 128};
    static const int64_t queries[] = {64, 1, 63, 129, 65, 128, 191};
    static const int64_t keys[] = {128, 127, 65, 1, 64, 129, 193};
    for (int i = 0; i < 7; ++i)
        for (int j = 0; j < 7; j += BRIEF ? 2 : 1) {
            oracle_attn t = shape(queries[(i + j) % 7], keys[j], 1, 1, dims[i], (i + j) % 2, keys[j] / 2, 0);
            t.v_dim = v_dims[i];
            if (!here.brief || (i + j) % 3 == 0) run_case(&t, j % ATTN_LAYOUTS, (uint64_t)(100 + 10 * i + j));
        }
}

/* Groups of heads and many blocks of keys, that wait for one another; rows, and keys, that nobody sees. */
static void test_chains(void)
{
    /* clang-format off */
    static const int64_t cases[][8] = { /* sq, sk, d, query heads, key/value heads, causal, q_pos, v */
        {70, 1100, 64, 3, 3, 0, 0}, {300, 700, 64, 4, 2, 1, 400}, {150, 900, 128, 2, 1, 1, 600},
        {260, 300, 128, 6, 2, 1, -130}, {500, 200, 64, 2, 1, 1, -150}, {100, 600, 96, 2, 2, 1, 100},
        {140, 500, 256, 2, 1, 1, 300}, {200, 250, 200, 3, 1, 0, 0},
        {140, 500, 192, 2, 1, 1, 300}, {260, 300, 160, 6, 2, 1, -130}, {260, 300, 192, 6, 2, 1, -130, 128},
        {140, 500, 136, 2, 2, 0, 0, 104},
    };
    /* clang-format on */
    for (size_t i = 0; i < sizeof cases / sizeof *cases; ++i) {
        const int64_t *x = cases[i];
        oracle_attn t = shape(x[0], x[1], (int)x[3], (int)x[4], (int)x[2], (int)x[5], x[6], 0);
        t.v_dim = (int)x[7];
        if (!here.brief || i == 1 || i == 3 || i == 8) run_case(&t, (int)i % ATTN_LAYOUTS, 200 + i);
    }
}

/* Masks that come from tables, alone and together; their tiles of queries begin and end anywhere. */
static void test_masked(void)
{
    static const int64_t cu_seqlens[] = {3, 60, 60, 128, 131, 260, 300};
    static const float sinks[] = {0.5f, -2};
    for (int i = 0; i < 10; ++i) {
        const int mask = i % 6, wide = i >= 6;
        oracle_attn t = shape(210, 280, 2, 1,
                              wide && mask != 1 ? (mask == 0 ? 256 : 192)
                              : mask == 5       ? 96
                              : mask % 2        ? 64
                                                : 128,
                              mask != 4, 30, 0);
        if (mask != 1) t.window = mask == 5 ? 5 : 100;
        if (mask % 3 == 1) t.cu_seqlens = cu_seqlens, t.cu_seqlens_n = 6;
        if (wide && mask == 1) t.v_dim = 256;
        if (mask >= 2) t.sinks = sinks;
        if (mask == 2 || mask == 3) t.softcap = 3;
        if (mask == 3) t.v_dim = wide ? 128 : 104, t.pos_step = 2;
        if (!here.brief || i % 3 == 1) run_case(&t, i % ATTN_LAYOUTS, (uint64_t)(300 + i));
    }
}

/* ---- the sums of dQ ---- */

/* What is merged into zeros is, rounded, what another call writes; and a start that one block of keys adds to is
 * added to once. Rows that see no key stay as they are. */
static void test_merge(void)
{
    static const int dims[] = {64, 64, 128, 128, 56, 64, 256, 256, 96, 96, 192, 192, 192, 192};
    static const int64_t keys[] = {100, 400, 100, 400, 100, 400, 60,
                                   150, 100, 400, 60,  150, 60,  150}; /* one block, or several */
    for (int i = here.brief; i < 14; i += here.brief ? 3 : 1) {
        oracle_attn t = shape(150, keys[i], 2, 1, dims[i], i != 2, -20, 0);
        t.v_dim = i < 12 ? 0 : 128;
        test_rng r = {(uint64_t)(400 + i)};
        const values in = inputs_make(&t, UPIPE_BF16, &r, 1);
        values all = values_make(&t), sum = values_make(&t), got = values_make(&t);
        float *start = floats(q_count(&t));
        int64_t e, wrong = 0;
        run_kernels(&t, UPIPE_BF16, i % ATTN_LAYOUTS, t.h, &in, &all);
        staged.look = look;
        merge_bwd(&t, UPIPE_BF16, i % ATTN_LAYOUTS, &in, &all, &t.sk, 1, &sum);
        for (e = 0; e < q_count(&t); ++e) wrong += naive_store(UPIPE_BF16, sum.dq[e]) != all.dq[e];
        fill(&r, start, q_count(&t), UPIPE_F32, 1);
        memcpy(got.dq, start, (size_t)q_count(&t) * sizeof *start);
        merge_bwd(&t, UPIPE_BF16, (i + 1) % ATTN_LAYOUTS, &in, &all, &t.sk, 1, &got);
        staged.look = NULL;
        for (e = 0; e < q_count(&t); ++e)
            if (i % 2 == 0 || (t.causal && e < 20 * t.h * t.d)) wrong += got.dq[e] != start[e] + sum.dq[e];
        CHECK_INT(wrong, 0);
        buffers_free(0);
    }
}

static const int dims[] = {64, 128, 256, 96, 192, 192}, v_dims[] = {0, 0, 0, 0, 0, 128}; /* of each kernel */
enum { DIMS = 6 };

/* The steps of a ring before a backward: keys in parts, merged by the forward kernels of this device. */
static void test_parts(void)
{
    static const int64_t lengths[] = {128, 1, 71};
    for (int i = here.brief; i < DIMS; i += here.brief ? 2 : 1) {
        oracle_attn t = shape(140, 200, 2, 1, dims[i], i == 1, 60, 0);
        t.v_dim = v_dims[i];
        test_rng r = {(uint64_t)(450 + i)};
        const values in = inputs_make(&t, UPIPE_BF16, &r, 1);
        check_merge(&t, UPIPE_BF16, i == 1 ? UPIPE_BF16 : UPIPE_F32, i % ATTN_LAYOUTS, i == 1, &in, lengths,
                    3);
        buffers_free(0);
    }
}

static void test_same_bits(void)
{
    for (int i = 0; i < DIMS; ++i) {
        oracle_attn t = shape(200, 270, 4, 1, dims[i], i > 0, 90, 20);
        test_rng r = {(uint64_t)(500 + i)};
        t.v_dim = v_dims[i];
        check_same_bits(&t, UPIPE_BF16, &r, here.brief ? 4 : 1, i);
    }
}

static void test_watched(void)
{
    for (int i = here.brief; i < DIMS; i += here.brief ? 2 : 1) {
        oracle_attn t = shape(200, 270, 4, 2, dims[i], i % 2, 90, 0);
        t.v_dim = v_dims[i];
        check_watched(&t, 600 + (uint64_t)i, 2);
    }
}

int main(int argc, char **argv)
{
    int i;
    setenv("FAKE_CAPABILITY", "90", 1);
    test_begin(argc, argv);
    if (!place_open()) return test_end("cuda_attn90_bwd");
    if (dev.cuda.capability / 10 == 9) {
        TEST(test_left_to_others());
        TEST(test_edges());
        TEST(test_chains());
        TEST(test_masked());
        for (i = 0; i < DIMS && !here.brief; ++i) TEST(check_low_scores(dims[i]));
        TEST(test_merge());
        TEST(test_parts());
        TEST(test_same_bits());
        TEST(test_watched());
    } else
        printf("device of compute capability %d.%d: nothing to test\n", dev.cuda.capability / 10,
               dev.cuda.capability % 10);
    return place_close("cuda_attn90_bwd");
}

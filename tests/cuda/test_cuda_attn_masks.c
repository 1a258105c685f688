/* test_cuda_attn_masks.c -- sliding windows, packed sequences, soft-caps, sinks, head dims of v, and gradients of q
 * that are added to, in the CUDA attention kernels, against dense attention in f64
 *
 * Each mask alone and any of them together; parts of the keys against all at once; the same bits in any layout and
 * by the kernels without masks; where NaNs show.
 */
#include "cuda/attn_place.h"

/* ---- against the oracle ---- */

static void test_alone(void)
{
    const int last = here.types[0] == UPIPE_F32 || test_full() ? 1 : 0;
    for (int variant = here.types[0] == UPIPE_F32; variant <= last; ++variant)
        check_alone(here.types[0], variant ? 104 : 64, variant == 0, variant == 0, variant ? 30 : 0);
}

/* Blocks of keys and tiles of queries without anything to do between others that have, and rows of more blocks. */
static void test_long(void)
{
    static const int64_t gaps[] = {-9, 10, 60, 60, 200, 201, 430, 480};
    /* clang-format off */
    static const int64_t cases[][6] = { /* sq, sk, window, q_pos, k_pos, cu_seqlens */
        {500, 500, 40, 0, 0, 0}, {300, 700, 150, 390, 0, 0}, {420, 300, 33, 100, 0, 0}, {500, 500, 0, 0, 0, 7},
        {290, 400, 90, 100, 0, 7}, {330, 330, 1, 0, 0, 0}, {200, 260, 30, 0, 250, 0}, {280, 200, 10, 300, 0, 0},
    };
    /* clang-format on */
    static const int dims[] = {64, 40, 128, 168};
    test_rng r = {28};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; ++i) {
        const int64_t *x = cases[i];
        oracle_attn t = shape(x[0], x[1], 2, 1 + (int)i % 2, dims[i % 4], i != 5, x[3], x[4]);
        t.window = x[2];
        if (x[5] > 0) t.cu_seqlens = gaps, t.cu_seqlens_n = x[5];
        if (!here.brief || i % 2 == 1) check_drawn(&t, here.types[0], (int)i % ATTN_LAYOUTS, &r, 1);
    }
}

/* More packed sequences than a launch has space for: some of a row, some of several, many far from here. */
static void test_many_documents(void)
{
    enum { N = 1300 };
    static int64_t cu_seqlens[N + 1];
    oracle_attn t = shape(210, 230, 1, 1, 64, 0, 1000, 990);
    test_rng r = {29};
    values in;
    for (int64_t i = 0; i < N; ++i)
        cu_seqlens[i + 1] = cu_seqlens[i] + (i % 7 == 3 ? 0 : i % 5 == 1 ? 6 : 1 + i % 2);
    t.cu_seqlens = cu_seqlens, t.cu_seqlens_n = N;
    in = inputs_make(&t, here.types[0], &r, 1);
    check_case(&t, here.types[0], PACKED, &in);
    t.pos_step = 2;
    check_case(&t, here.types[0], GAPS, &in);
    buffers_free(0);
}

/* Values of fewer dims than queries and keys, where a kernel has two head dims. */
static void test_two_dims(void)
{
    static const int64_t cu_seqlens[] = {0, 100, 260};
    static const int dims[][2] = {{192, 128}, {136, 104}, {192, 32}, {168, 128}};
    test_rng r = {31};
    for (int i = 0; i < 4; ++i) {
        oracle_attn t = shape(130, 260, 4, 2, dims[i][0], i != 1, 130, 0);
        t.v_dim = dims[i][1];
        if (i == 2) t.cu_seqlens = cu_seqlens, t.cu_seqlens_n = 2;
        if (i == 3) t.softcap = 3, t.window = 60;
        check_drawn(&t, here.types[0], i % ATTN_LAYOUTS, &r, 1);
    }
}

static void test_random(void)
{
    static const draw_limits most = {6, 400, 1, 300, INT64_MAX, 220};
    check_random(8 + test_env("UPIPE_DRAWS", 2000) / 2000, &most, 1);
}

static void test_parts(void)
{
    /* The bits of a kind are masks. The full run has every kind, and of f32 every third; the ordinary one has every fifth,
     * which set each bit, and of f32 the first, which has no mask. */
    const int f32 = here.types[0] == UPIPE_F32;
    check_parts(test_full() ? (f32 ? 3 : 1) : (f32 ? 32 : 5), 104, 0);
}

/* ---- the same bits ---- */

static void test_same_bits(void)
{
    static const int64_t cu_seqlens[] = {-5, 100, 100, 101, 190, 240, 250, 1200};
    static const float sinks[] = {0.5f, -2, 3, 1};
    static const int dims[] = {64, 128, 168};
    test_rng r = {4};
    for (int i = 0; i < 3; ++i) {
        oracle_attn t = shape(140, 210, 4, 1, dims[i], i != 1, 90, 20);
        if (i != 1) t.window = 50;
        if (i > 0) t.cu_seqlens = cu_seqlens, t.cu_seqlens_n = 7;
        t.sinks = sinks;
        check_same_bits(&t, here.types[0], &r, 2, i);
    }
}

static void test_one_key(void)
{
    test_rng r = {25};
    for (int round = 0; round < 4; ++round) {
        oracle_attn t = shape(90, 90, 1, 1, round < 2 ? 64 : 128, 1, 0, 0);
        t.window = 1;
        t.softcap = round % 2 ? 3 : 0;
        check_one_key(&t, here.types[0], &r, 3, 0);
    }
}

/* ---- what is left out ---- */

enum { BLOCK = 128 }; /* keys of the largest block */

static void test_far_keys(void)
{
    for (int d = 64; d <= 256; d *= 2) {
        oracle_attn t = shape(130, 1000, 2, 1, d, 1, 500, 0);
        t.window = 100;
        check_far_keys(&t, (500 - 99) / BLOCK * BLOCK, (630 + BLOCK - 1) / BLOCK * BLOCK);
    }
}

/* What the kernels take of rows and keys at once, at most: for 9.0, for others 128 of each, and in f32 one. */
static void test_nan_reach(void)
{
    static const nan_reach reach = {128, 128, 128, 128}, reach90 = {192, 128, 192, 128}, exact = {1, 1, 1, 1};
    check_nan_reach(here.types[0] == UPIPE_F32      ? &exact
                    : dev.cuda.capability / 10 == 9 ? &reach90
                                                    : &reach,
                    1);
}

/* Padding is not read. In f32 a NaN shows where it is seen, and nowhere else. */
static void test_nan_apart(void)
{
    check_nan_apart(here.types[0] == UPIPE_F32, test_full() ? 1 : 3);
}

/* Packed sequences of whole tiles: what is NaN in one does not show in another, in either direction. */
static void test_far_documents(void)
{
    static const int dims[] = {64, 128, 256};
    /* multiples of what the kernels take of queries and keys at once; for 9.0 of 192 and 128, 128, 128 and 80 */
    static const int64_t whole[] = {128, 128, 128}, whole90[] = {384, 128, 640};
    for (int k = 0; k < 3; ++k) {
        const int64_t one = dev.cuda.capability / 10 == 9 ? whole90[k] : whole[k];
        const int64_t cu_seqlens[] = {0, one, 2 * one, 3 * one};
        oracle_attn t = shape(3 * one, 3 * one, 1, 1, dims[k], 0, 0, 0);
        test_rng r = {30};
        values in = inputs_make(&t, here.types[0], &r, 1), out = values_make(&t);
        int64_t i, wrong = 0;
        t.cu_seqlens = cu_seqlens, t.cu_seqlens_n = 3;
        for (i = one * t.d; i < 2 * one * t.d; ++i) in.q[i] = in.k[i] = in.v[i] = in.dout[i] = NAN;
        run_kernels(&t, here.types[0], PACKED, t.h, &in, &out);
        for (i = 0; i < q_count(&t); ++i) {
            const int bad = isnan(out.o[i]) + isnan(out.dq[i]) + isnan(out.dk[i]) + isnan(out.dv[i]);
            wrong += bad != (i >= one * t.d && i < 2 * one * t.d ? 4 : 0);
        }
        CHECK_INT(wrong, 0);
        buffers_free(0);
    }
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    if (!place_open()) return test_end("cuda_attn_masks");
    for (int i = 0; i < 2; ++i) { /* other kernels each */
        place_types(i == 0 ? UPIPE_BF16 : UPIPE_F32);
        if (same_as_before(here.types[0])) break;
        TEST(test_long());
        TEST(test_many_documents());
        TEST(test_two_dims());
        TEST(test_one_key());
        TEST(check_saturated(here.types[0], i == 0 ? 64 : 40));
        TEST(test_nan_apart());
        TEST(test_random());
        if (!here.brief && !BRIEF) TEST(test_parts());
        if (here.brief || (i == 1 && !test_full())) break;
        TEST(check_wide_masks());
        TEST(test_far_keys());
        TEST(test_far_documents());
        TEST(test_nan_reach());
        if (BRIEF) break; /* the same code with other numbers, and loops that test_cuda_attn has in f32 too */
        TEST(test_alone());
        TEST(test_same_bits());
    }
    return place_close("cuda_attn_masks");
}

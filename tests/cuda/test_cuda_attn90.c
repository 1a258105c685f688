/* test_cuda_attn90.c -- what the attention kernels for compute capability 9.0 do otherwise than those for 8.0
 *
 * The fake is told to be such a device; test_cuda_attn runs there too, and holds these kernels to everything
 * that it knows. Here is what depends on their shapes: edges of their tiles (64 queries a warpgroup, two or
 * three of them a block; 80 to 176 keys), several items a block, lists in sections, calls that they leave to
 * the others. The fake has an H100's processors too, so what has few items here has few there.
 */
#include "cuda/attn_place.h"

/* ---- which kernel ---- */

static char choice[UPIPE_CUDA_CHOICE]; /* of the last call */

/* Runs the call; its sentence about kernels must say `want`. */
static void check_chosen(upipe_attn_grad *g, const char *want)
{
    call_kernel(g, 0);
    CHECK_TEXT(choice, want);
}

/* ---- against the oracle ---- */

/* Forward of random values. `keys` of t->sk hold values, the rest NaNs that nobody may see. */
static void check_forward(const oracle_attn *t, uint64_t seed, int64_t keys)
{
    const long failed = test_failures;
    oracle_attn seen = *t;
    values in, out;
    test_rng r = {seed};
    memset(&in, 0, sizeof in), memset(&out, 0, sizeof out);
    seen.sk = keys;
    in.q = floats(q_count(t)), in.k = floats(k_count(t)), in.v = floats(v_count(t));
    out.o = floats(o_count(t)), out.lse = floats(t->sq * t->h), out.dsinks = floats(t->h);
    fill(&r, in.q, q_count(t), UPIPE_BF16, 1);
    fill(&r, in.k, k_count(&seen), UPIPE_BF16, 1);
    fill(&r, in.v, v_count(&seen), UPIPE_BF16, 1);
    for (int64_t i = k_count(&seen); i < k_count(t); ++i) in.k[i] = NAN;
    for (int64_t i = v_count(&seen); i < v_count(t); ++i) in.v[i] = NAN;
    run_directions(t, UPIPE_BF16, PACKED, t->h, &in, &out, 1);
    CHECK_TEXT(choice, "forward: kernels for 9.0");
    if (here.compares) {
        answers x = answers_make(&seen, UPIPE_BF16, UPIPE_BF16, &in, 1);
        check_answers(&seen, &out, &x);
    }
    if (test_shown_since(failed)) say_case(t, UPIPE_BF16, PACKED);
    buffers_free(0);
}

static const int dims[] = {64, 96, 128, 192, 256, 192}, v_dims[] = {0, 0, 0, 0, 0, 128}; /* of each kernel */
enum { DIMS = 6 };

/* Around the edges of blocks and tiles, for each of the kernels. */
static void test_edges(void)
{
    static const int64_t queries[] = {1, 63, 65, 128, 129, 192, 193};
    static const int64_t keys[] = {79, 80, 111, 112, 113, 128, 129, 257};
    uint64_t seed = 100;
    for (int i = 0; i < DIMS; ++i)
        for (int j = 0; j < 8; j += BRIEF ? 3 : 1) {
            oracle_attn t = shape(queries[(i + j) % 7], keys[j], 1, 1, dims[i], j % 2, keys[j] / 2, 0);
            t.v_dim = v_dims[i];
            check_forward(&t, ++seed, t.sk);
        }
}

/* Tiles of 176 keys, around their edges: where every query sees every key and little of the last one is wasted. */
static void test_wide_tiles(void)
{
    static const int64_t cases[][5] = {
        /* sq, sk, d, q_pos where causal, keys of a tile */
        {129, 176, 128, -1, 176}, {64, 175, 72, -1, 176},   {65, 140, 128, -1, 176},  {10, 177, 128, -1, 128},
        {130, 352, 96, -1, 176},  {70, 520, 128, 600, 176}, {70, 520, 128, 518, 128}, {70, 520, 64, -1, 128},
        {64, 100, 128, -1, 128},  {20, 345, 128, 344, 176}, {64, 160, 136, -1, 112},  {64, 160, 200, -1, 80},
        {65, 300, 96, 299, 176},  {65, 300, 72, 200, 128},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; ++i) {
        const int64_t *x = cases[i];
        oracle_attn t = shape(x[0], x[1], 1, 1, (int)x[2], x[3] >= 0, x[3] >= 0 ? x[3] : 0, 0);
        char want[64];
        check_forward(&t, 150 + i, t.sk);
        snprintf(want, sizeof want, "tiles of %d keys", (int)x[4]);
        CHECK_TEXT(choice, want);
    }
}

/* Values of other head dims than queries and keys: the kernel for 192 and 128, and what is beside it. */
static void test_two_dims(void)
{
    static const int cases[][3] = {/* d, v, keys of a tile */
                                   {192, 128, 128}, {136, 128, 128}, {192, 32, 128}, {168, 104, 128},
                                   {192, 136, 112}, {128, 192, 112}, {200, 128, 80}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; ++i) {
        oracle_attn t = shape(150, 300, 2, 1, cases[i][0], i % 2, 150, 0);
        char want[64];
        t.v_dim = cases[i][1];
        check_forward(&t, 170 + i, t.sk);
        snprintf(want, sizeof want, "tiles of %d keys", cases[i][2]);
        CHECK_TEXT(choice, want);
    }
}

/* Blocks that stay for a call, whatever the device: fewer than there are items, so that some have several. */
enum { FEW = 4 };

static void check_several(const oracle_attn *t, uint64_t seed, int64_t keys)
{
    const int64_t items = (t->sq + 191) / 192 * t->h; /* at least: a block of queries has 192 at most */
    const int blocks = dev.cuda.processors - dev.cuda.margin;
    CHECK_SAY(items > blocks, "%lld items or more on %d blocks", (long long)items, blocks);
    check_forward(t, seed, keys);
}

/* More items than blocks, with and without keys to see, of each kernel. */
static void test_items(void)
{
    /* clang-format off */
    static const int64_t cases[][8] = { /* sq, sk, d, query heads, key/value heads, causal, q_pos, v */
        {400, 150, 64, 6, 2, 1, -200}, {300, 140, 128, 6, 3, 1, -140}, {300, 100, 256, 4, 1, 1, -150},
        {150, 300, 256, 7, 7, 0, 0}, {200, 300, 128, 9, 3, 1, 100}, {64, 64, 40, 40, 8, 1, 0},
        {300, 140, 96, 6, 3, 1, -140}, {300, 100, 192, 4, 1, 1, -150}, {150, 300, 160, 7, 7, 0, 0},
        {150, 350, 96, 7, 7, 0, 0}, {150, 350, 128, 7, 7, 0, 0}, /* tiles of 176 keys */
        {300, 140, 192, 6, 3, 1, -140, 128}, {150, 300, 192, 7, 7, 0, 0, 128},
    };
    /* clang-format on */
    for (size_t i = 0; i < sizeof cases / sizeof *cases; ++i) {
        const int64_t *x = cases[i];
        oracle_attn t = shape(x[0], x[1], (int)x[3], (int)x[4], (int)x[2], (int)x[5], x[6], 0);
        t.v_dim = (int)x[7];
        check_several(&t, 200 + i, t.sk);
    }
}

/* Keys and values of one or two heads that fill the cache alone: heads come in sections, the last one smaller,
 * and behind items without keys come others that have some. Most keys are hidden from everybody. */
static void test_sections(void)
{
    oracle_attn odd = shape(300, 16000, 5, 5, 256, 1, -150, 0);
    oracle_attn pairs = shape(140, 70000, 6, 3, 128, 1, 30, 0);
    check_several(&odd, 300, 160);
    check_several(&pairs, 301, 256);
}

/* Packed sequences, whose longest blocks of queries come first, wherever they lie. */
static void test_packed(void)
{
    static const int64_t cu_seqlens[] = {0, 130, 390, 400, 700};
    int i;
    for (i = 0; i < DIMS; ++i) {
        oracle_attn t = shape(700, 700, 3, 3, dims[i], 1, 0, 0);
        t.v_dim = v_dims[i];
        t.cu_seqlens = cu_seqlens, t.cu_seqlens_n = 4;
        check_several(&t, 400 + (uint64_t)i, t.sk);
    }
}

/* With fewer blocks than processors the same bits; a margin that leaves no processor to the call is refused. */
static void test_margin(void)
{
    const oracle_attn t = shape(400, 150, 6, 2, 64, 1, -20, 0);
    const int margins[] = {0, 1, dev.cuda.processors - 1};
    const size_t bytes = (size_t)q_count(&t) * sizeof(float);
    values in, out[3];
    test_rng r = {500};
    upipe_view x;
    upipe_attn a;
    memset(&in, 0, sizeof in), memset(out, 0, sizeof out);
    in.q = floats(q_count(&t)), in.k = floats(k_count(&t)), in.v = floats(k_count(&t));
    fill(&r, in.q, q_count(&t), UPIPE_BF16, 1);
    fill(&r, in.k, k_count(&t), UPIPE_BF16, 1);
    fill(&r, in.v, k_count(&t), UPIPE_BF16, 1);
    for (int i = 0; i < 3; ++i) {
        out[i].o = floats(q_count(&t)), out[i].lse = floats(t.sq * t.h), out[i].dsinks = floats(t.h);
        dev.cuda.margin = margins[i];
        run_directions(&t, UPIPE_BF16, PACKED, t.h, &in, &out[i], 1);
        CHECK_BYTES(out[i].o, out[0].o, bytes);
        CHECK_BYTES(out[i].lse, out[0].lse, (size_t)(t.sq * t.h) * sizeof(float));
    }
    x = placed(UPIPE_BF16, 64, 1, 64, PACKED, normals(&r, 64 * 64));
    memset(&a, 0, sizeof a);
    a.q = a.k = a.v = x;
    a.o = twin(x);
    a.lse = empty(UPIPE_F32, 64, 1, 1, PACKED);
    for (int i = 0; i < 2; ++i) {
        dev.cuda.margin = i == 0 ? -1 : dev.cuda.processors;
        CHECK_REFUSED(dev.ops.attn_fwd(&dev.c, &a), UPIPE_ERR_ARG, dev.c.err, "of them are left free");
    }
    dev.cuda.margin = 0;
    buffers_free(0);
}

static void test_watched(void)
{
    for (int i = 0; i < DIMS; ++i) {
        const oracle_attn t = shape(300, 300, 3, 1, dims[i], i % 2, 0, 0);
        check_watched(&t, 600 + (uint64_t)i, 1);
    }
}

/* What tensor maps can't say goes to the other kernels. */
static void test_left_to_others(void)
{
    const upipe_view x = placed(UPIPE_BF16, 64, 1, 64, PACKED, normals(&(test_rng){1}, 64 * 64));
    upipe_attn_grad g;
    upipe_attn *a = &g.a;
    memset(&g, 0, sizeof g);
    a->q = a->k = a->v = x;
    a->o = twin(x);
    a->lse = empty(UPIPE_F32, 64, 1, 1, PACKED);
    check_chosen(&g, "kernels for 9.0, tiles of 128 keys");
    a->k.n_stride = 0; /* every key the same */
    check_chosen(&g, "kernels for 8.0, as no tensor map has these strides");
    a->k.n_stride = 64;
    a->k.n = a->v.n = 0;
    check_chosen(&g, "kernels for 8.0, as no tensor map has these strides");
    a->k.n = a->v.n = 64;
    dev.cuda.shared_most -= 120 << 10;
    check_chosen(&g, "kernels for 8.0, as the device has too little shared memory for them");
    dev.cuda.shared_most += 120 << 10;
    dev.cuda.capability = 100; /* has other code for all this */
    check_chosen(&g, "kernels for 8.0, as the device is of another generation");
    dev.cuda.capability = 90;
    dev.cuda.avoid = UPIPE_CUDA_AVOID_FWD90 | UPIPE_CUDA_AVOID_BWD90;
    check_chosen(&g, "forward: kernels for 8.0, as the host avoids those for 9.0");
    dev.cuda.avoid = UPIPE_CUDA_AVOID_BWD90; /* of the other direction */
    check_chosen(&g, "forward: kernels for 9.0, tiles of 128 keys");
    dev.cuda.avoid = 0;
    dev.cuda.choice = NULL; /* nobody asks */
    choice[0] = 0;
    check_chosen(&g, "");
    CHECK_INT(choice[0], 0);
    dev.cuda.choice = choice;
    buffers_free(0);
}

int main(int argc, char **argv)
{
    setenv("FAKE_CAPABILITY", "90", 1);
    test_begin(argc, argv);
    if (!place_open()) return test_end("cuda_attn90");
    dev.cuda.choice = choice;
#ifdef FAKE_CUDA_RUNTIME_API_H
    dev.cuda.processors = 132;
#endif
    if (dev.cuda.capability / 10 == 9) {
        TEST(test_edges());
        TEST(test_wide_tiles());
        TEST(test_two_dims());
        dev.cuda.margin = dev.cuda.processors - FEW;
        TEST(test_items());
        TEST(test_sections());
        TEST(test_packed());
        dev.cuda.margin = 0;
        TEST(test_margin());
        TEST(test_watched());
        TEST(test_left_to_others());
    } else
        printf("device of compute capability %d.%d: nothing to test\n", dev.cuda.capability / 10,
               dev.cuda.capability % 10);
    return place_close("cuda_attn90");
}

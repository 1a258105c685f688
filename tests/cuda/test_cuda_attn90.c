/* test_cuda_attn90.c -- what the attention kernels for compute capability 9.0 do otherwise than those for 8.0
 *
 * The fake is told to be such a device; test_cuda_attn runs there too, and holds these kernels to everything
 * that it knows. Here is what depends on their shapes: edges of their tiles (64 queries a warpgroup, two or
 * three of them a block; 128 or 80 keys), several items a block, lists in sections, calls that they leave to
 * the others.
 */
#include "../lib/oracle.h"
#include "../lib/tolerance.h"
#include "upipe/upipe_attn.h"
#include "cuda/device.h"

static device dev;
static uint64_t digest; /* of all results: runs with other schedules must repeat it */

static void *buf(size_t bytes)
{
    void *p = calloc(bytes > 0 ? bytes : 1, 1);
    if (p == NULL) exit(2);
    return p;
}

/* A packed tensor of bf16 or f32 on the device; `from`: its values as f32, or NULL. */
static upipe_view put(upipe_dtype dtype, int64_t n, int h, int d, const float *from)
{
    upipe_view v = upipe_view_packed(NULL, dtype, n, h, d);
    size_t count = (size_t)n * (size_t)h * (size_t)d, bytes = count * upipe_dtype_bytes(dtype), i;
    char *image = (char *)buf(bytes);
    v.data = device_new(&dev, bytes);
    for (i = 0; from != NULL && i < count; ++i) upipe_cpu_put(image, dtype, (int64_t)i, from[i]);
    if (from != NULL) device_put(&dev, v.data, image, bytes);
    free(image);
    return v;
}

/* Back as f32, and freed. */
static void accept(upipe_view v, float *to)
{
    size_t count = (size_t)v.n * (size_t)v.h * (size_t)v.d, bytes = count * upipe_dtype_bytes(v.dtype), i;
    char *image = (char *)buf(bytes);
    device_get(&dev, image, v.data, bytes);
    for (i = 0; i < bytes; ++i) digest = (digest ^ (unsigned char)image[i]) * 0x100000001b3u;
    for (i = 0; i < count; ++i) to[i] = upipe_cpu_get(image, v.dtype, (int64_t)i);
    free(image);
    device_free(&dev, v.data);
}

/* ---- which kernel ---- */

static char choice[UPIPE_CUDA_CHOICE]; /* of the last call */

/* Runs the call; its sentence about kernels must say `want`. */
static void check_chosen(const upipe_attn *a, const char *want)
{
    CHECK_STATUS(upipe_attn_fwd(&dev.c, a), UPIPE_OK, dev.c.err);
    CHECK_TEXT(choice, want);
}

/* ---- against the oracle ---- */

/* Forward of random values. `keys` of t->sk hold values, the rest NaNs that nobody may see. */
static void check_case(const oracle_attn *t, uint64_t seed, int64_t keys)
{
    int64_t nq = t->sq * t->h * t->d, nk = keys * t->hkv * t->d, rows = t->sq * t->h, i;
    float *q = (float *)buf((size_t)nq * 4), *k = (float *)buf((size_t)(t->sk * t->hkv * t->d) * 4),
          *v = (float *)buf((size_t)(t->sk * t->hkv * t->d) * 4), *o = (float *)buf((size_t)nq * 4),
          *lse = (float *)buf((size_t)rows * 4);
    double *dq = (double *)buf((size_t)nq * 8), *dk = (double *)buf((size_t)nk * 8),
           *dv = (double *)buf((size_t)nk * 8), *want_o = (double *)buf((size_t)nq * 8),
           *want_lse = (double *)buf((size_t)rows * 8);
    float *naive_o[NAIVE_WAYS], *naive_lse[NAIVE_WAYS];
    const float *runs_o[NAIVE_WAYS], *runs_lse[NAIVE_WAYS];
    oracle_attn seen = *t;
    upipe_attn a;
    test_rng r = {seed};
    long failed = test_failures;
    int way, ways = 0;
    for (i = 0; i < nq; ++i) dq[i] = (double)(q[i] = naive_store(UPIPE_BF16, (float)test_normal(&r)));
    for (i = 0; i < nk; ++i) dk[i] = (double)(k[i] = naive_store(UPIPE_BF16, (float)test_normal(&r)));
    for (i = 0; i < nk; ++i) dv[i] = (double)(v[i] = naive_store(UPIPE_BF16, (float)test_normal(&r)));
    for (; i < t->sk * t->hkv * t->d; ++i) k[i] = v[i] = NAN;
    memset(&a, 0, sizeof a);
    a.q = put(UPIPE_BF16, t->sq, t->h, t->d, q);
    a.k = put(UPIPE_BF16, t->sk, t->hkv, t->d, k);
    a.v = put(UPIPE_BF16, t->sk, t->hkv, t->d, v);
    a.o = put(UPIPE_BF16, t->sq, t->h, t->d, NULL);
    a.lse = put(UPIPE_F32, t->sq, t->h, 1, NULL);
    a.q_pos = t->q_pos, a.k_pos = t->k_pos;
    a.mask.causal = t->causal;
    a.scale = (float)t->scale;
    check_chosen(&a, "forward: kernels for 9.0");
    accept(a.o, o);
    accept(a.lse, lse);
    device_free(&dev, a.q.data), device_free(&dev, a.k.data), device_free(&dev, a.v.data);
    seen.sk = keys;
    if (compares()) oracle_attn_fwd(&seen, dq, dk, dv, want_o, want_lse);
    for (way = 0; way < NAIVE_WAYS && compares(); ++way) {
        tolerance_error own, of_o, of_lse;
        double floor;
        runs_o[way] = naive_o[way] = (float *)buf((size_t)nq * 4);
        runs_lse[way] = naive_lse[way] = (float *)buf((size_t)rows * 4);
        seen.naive = way | NAIVE_NARROW;
        naive_attn_fwd(&seen, UPIPE_BF16, q, k, v, naive_o[way], naive_lse[way]);
        of_o = tolerance_naive(runs_o, way + 1, want_o, nq);
        of_lse = tolerance_naive(runs_lse, way + 1, want_lse, rows);
        ways = way + 1;
        /* the bounds only grow with more runs */
        if (ways < NAIVE_WAYS && !(tolerance_holds(o, of_o, want_o, nq, &own, &floor) &&
                                   tolerance_holds(lse, of_lse, want_lse, rows, &own, &floor)))
            continue;
        CHECK_CLOSE_TO(o, of_o, want_o, nq, "o");
        CHECK_CLOSE_TO(lse, of_lse, want_lse, rows, "lse");
        break;
    }
    if (test_failures != failed)
        fprintf(stderr, "  sq %lld sk %lld h %d hkv %d d %d causal %d q_pos %lld k_pos %lld\n",
                (long long)t->sq, (long long)t->sk, t->h, t->hkv, t->d, t->causal, (long long)t->q_pos,
                (long long)t->k_pos);
    for (way = 0; way < ways; ++way) free(naive_o[way]), free(naive_lse[way]);
    free(q), free(k), free(v), free(o), free(lse);
    free(dq), free(dk), free(dv), free(want_o), free(want_lse);
}

static oracle_attn shape(int64_t sq, int64_t sk, int h, int hkv, int d, int causal, int64_t q_pos,
                         int64_t k_pos)
{
    oracle_attn t;
    memset(&t, 0, sizeof t);
    t.sq = sq, t.sk = sk, t.q_pos = q_pos, t.k_pos = k_pos;
    t.h = h, t.hkv = hkv, t.d = d, t.causal = causal;
    t.scale = (double)(float)(1 / sqrt((double)d));
    return t;
}

/* Around the edges of blocks and tiles, for each of the kernels. */
static void test_edges(void)
{
    static const int dims[] = {64, 128, 256};
    static const int64_t queries[] = {1, 63, 65, 128, 129, 192, 193};
    static const int64_t keys[] = {79, 80, 81, 127, 128, 129, 160, 257};
    uint64_t seed = 100;
    int i, j;
    for (i = 0; i < 3; ++i)
        for (j = 0; j < 8; ++j) {
            oracle_attn t = shape(queries[(i + j) % 7], keys[j], 1, 1, dims[i], j % 2, keys[j] / 2, 0);
            check_case(&t, ++seed, t.sk);
        }
}

/* Tiles of 176 keys, around their edges: where every query sees every key and little of the last one is wasted. */
static void test_wide_tiles(void)
{
    static const int64_t cases[][5] = {
        /* sq, sk, d, q_pos where causal, keys of a tile */
        {129, 176, 128, -1, 176}, {64, 175, 72, -1, 176},   {65, 140, 128, -1, 176},  {10, 177, 128, -1, 128},
        {130, 352, 96, -1, 176},  {70, 520, 128, 600, 176}, {70, 520, 128, 518, 128}, {70, 520, 64, -1, 128},
        {64, 100, 128, -1, 128},  {20, 345, 128, 344, 176}, {64, 160, 136, -1, 80},
    };
    size_t i;
    for (i = 0; i < sizeof cases / sizeof *cases; ++i) {
        const int64_t *x = cases[i];
        oracle_attn t = shape(x[0], x[1], 1, 1, (int)x[2], x[3] >= 0, x[3] >= 0 ? x[3] : 0, 0);
        char want[64];
        check_case(&t, 150 + i, t.sk);
        snprintf(want, sizeof want, "tiles of %d keys", (int)x[4]);
        CHECK_TEXT(choice, want);
    }
}

/* More items than processors, so that a block has several, with and without keys to see. */
static void test_items(void)
{
    /* clang-format off */
    static const int64_t cases[][7] = { /* sq, sk, d, query heads, key/value heads, causal, q_pos */
        {400, 150, 64, 6, 2, 1, -200}, {300, 140, 128, 6, 3, 1, -140}, {300, 100, 256, 4, 1, 1, -150},
        {150, 300, 256, 7, 7, 0, 0}, {200, 300, 128, 9, 3, 1, 100}, {64, 64, 40, 40, 8, 1, 0},
    };
    /* clang-format on */
    size_t i;
    for (i = 0; i < sizeof cases / sizeof *cases; ++i) {
        const int64_t *x = cases[i];
        oracle_attn t = shape(x[0], x[1], (int)x[3], (int)x[4], (int)x[2], (int)x[5], x[6], 0);
        check_case(&t, 200 + i, t.sk);
    }
}

/* Keys and values of one or two heads that fill the cache alone: heads come in sections, the last one smaller,
 * and behind items without keys come others that have some. Most keys are hidden from everybody. */
static void test_sections(void)
{
    oracle_attn odd = shape(300, 16000, 5, 5, 256, 1, -150, 0);
    oracle_attn pairs = shape(140, 70000, 6, 3, 128, 1, 30, 0);
    check_case(&odd, 300, 160);
    check_case(&pairs, 301, 256);
}

/* What tensor maps can't say goes to the other kernels. */
static void test_left_to_others(void)
{
    float x[64 * 64];
    upipe_attn a;
    int i;
    for (i = 0; i < 64 * 64; ++i) x[i] = 1;
    memset(&a, 0, sizeof a);
    a.q = put(UPIPE_BF16, 64, 1, 64, x);
    a.k = put(UPIPE_BF16, 64, 1, 64, x);
    a.v = put(UPIPE_BF16, 64, 1, 64, x);
    a.o = put(UPIPE_BF16, 64, 1, 64, NULL);
    a.lse = put(UPIPE_F32, 64, 1, 1, NULL);
    check_chosen(&a, "kernels for 9.0, tiles of 128 keys");
    a.k.n_step = 0; /* every key the same */
    check_chosen(&a, "kernels for 8.0, as no tensor map has these steps");
    a.k.n_step = 64;
    a.k.n = a.v.n = 0;
    check_chosen(&a, "kernels for 8.0, as no tensor map has these steps");
    a.k.n = a.v.n = 64;
    dev.cuda.shared_most -= 120 << 10;
    check_chosen(&a, "kernels for 8.0, as the device has too little shared memory for them");
    dev.cuda.shared_most += 120 << 10;
    dev.cuda.capability = 100; /* has other code for all this */
    check_chosen(&a, "kernels for 8.0, as the device is of another generation");
    dev.cuda.capability = 90;
    dev.cuda.choice = NULL; /* nobody asks */
    choice[0] = 0;
    check_chosen(&a, "");
    CHECK_INT(choice[0], 0);
    dev.cuda.choice = choice;
    accept(a.o, x), accept(a.lse, x);
    device_free(&dev, a.q.data), device_free(&dev, a.k.data), device_free(&dev, a.v.data);
}

int main(void)
{
    setenv("FAKE_CAPABILITY", "90", 1);
    if (!device_open(&dev)) return test_end("cuda_attn90");
    dev.cuda.choice = choice;
    if (dev.cuda.capability / 10 == 9) {
        test_edges();
        test_wide_tiles();
        test_items();
        test_sections();
        test_left_to_others();
    } else
        printf("device of compute capability %d.%d: nothing to test\n", dev.cuda.capability / 10,
               dev.cuda.capability % 10);
    printf("digest %016llx\n", (unsigned long long)digest);
    device_close(&dev);
    return test_end("cuda_attn90");
}

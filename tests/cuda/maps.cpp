/* maps.cpp -- every tensor map that the kernels for 9.0 may ask for is encoded: first of all tests on a device
 *
 * The driver has rules of its own for tensor maps, which no emulator can show. Of what upi_tensor_map_fits accepts it
 * must refuse nothing: boxes of every kernel, every head dim, tensors from one row to as many as 32 bits count, heads
 * inside of tokens, tokens inside of heads, and steps as long as they may be. What a call may have comes before extremes, and a refusal hides
 * no other: each kind has a count at the end, and its first refusal. Nothing is read or launched. nvcc compiles it for
 * devices, and a host compiler for the emulator, whose rules are NVIDIA's in words.
 */
#ifdef UPIPE_CUDA_SEAMS
#include "upipe/cuda/upipe_cuda_attn_bwd.h"
#else
#include "upipe/cuda/upipe_cuda_hopper.h" /* nvcc would compile every kernel */
#endif

#include "../lib/test.h"

enum { BOXES = 7 };

enum {
    INSIDE_TOKENS,
    GAPS,
    INSIDE_HEADS,
    NEVER_TAKEN,
    MOST_ROWS,
    MOST_ROWS_INSIDE_HEADS,
    LONGEST_STEPS,
    KINDS
};

static const char *const kinds[KINDS] = {"heads inside of tokens",
                                         "heads inside of tokens, with gaps",
                                         "tokens inside of heads",
                                         "steps that are never taken",
                                         "2^31 - 2 rows, heads inside of tokens",
                                         "2^31 - 2 rows, tokens inside of heads",
                                         "steps of nearly 2^37 bytes"};

typedef struct box {
    upipe_dtype dtype;
    int rows;
} box;

/* What the launches pass to upi_tensor_map_make. */
static const box boxes[BOXES] = {{UPIPE_BF16, 64},  {UPIPE_BF16, 80},  {UPIPE_BF16, 112}, {UPIPE_BF16, 128},
                                 {UPIPE_BF16, 176}, {UPIPE_BF16, 192}, {UPIPE_F32, 64}};

#ifdef UPIPE_CUDA_SEAMS
static void has_rows(int rows)
{
    int i = 0;
    while (i < BOXES && boxes[i].rows != rows) ++i;
    CHECK_SAY(i < BOXES, "no box of %d rows", rows);
}

/* The kernels ask for no others. */
static void test_boxes(void)
{
    has_rows(upi_cuda_fwd90_shape<64, 64, 128>::ROWS), has_rows(128);
    has_rows(upi_cuda_fwd90_shape<96, 96, 128>::ROWS), has_rows(128);
    has_rows(upi_cuda_fwd90_shape<96, 96, 176>::ROWS), has_rows(176);
    has_rows(upi_cuda_fwd90_shape<128, 128, 128>::ROWS), has_rows(128);
    has_rows(upi_cuda_fwd90_shape<128, 128, 176>::ROWS), has_rows(176);
    has_rows(upi_cuda_fwd90_shape<192, 192, 112>::ROWS), has_rows(112);
    has_rows(upi_cuda_fwd90_shape<192, 128, 128>::ROWS), has_rows(128);
    has_rows(upi_cuda_fwd90_shape<256, 256, 80>::ROWS), has_rows(80);
    has_rows(upi_cuda_bwd90_shape<64, 64>::ROWS), has_rows(upi_cuda_bwd90_shape<64, 64>::KEYS);
    has_rows(upi_cuda_bwd90_shape<96, 96>::ROWS), has_rows(upi_cuda_bwd90_shape<96, 96>::KEYS);
    has_rows(upi_cuda_bwd90_shape<128, 128>::ROWS), has_rows(upi_cuda_bwd90_shape<128, 128>::KEYS);
    has_rows(upi_cuda_bwd90_shape<192, 192>::ROWS), has_rows(upi_cuda_bwd90_shape<192, 192>::KEYS);
    has_rows(upi_cuda_bwd90_shape<192, 128>::ROWS), has_rows(upi_cuda_bwd90_shape<192, 128>::KEYS);
    has_rows(upi_cuda_bwd90_shape<256, 256>::ROWS), has_rows(upi_cuda_bwd90_shape<256, 256>::KEYS);
}
#else
static void test_boxes(void)
{
}
#endif

/* The view of n rows of h heads, its steps of the given kind, from the address; 0: one that does not occur. */
static int view_make(upipe_view *v, void *base, upipe_dtype dtype, int64_t n, int h, int d, int kind)
{
    const int64_t each = 16 / (int64_t)upipe_dtype_bytes(dtype), row = (d + each - 1) / each * each;
    const int64_t longest = (INT64_C(1) << 36) - each;
    *v = upipe_view_packed(base, dtype, n, h, d);
    v->h_stride = row + (kind == GAPS ? each : 0);
    v->n_stride = h * v->h_stride + (kind == GAPS ? each : 0);
    if (kind == INSIDE_HEADS || kind == MOST_ROWS_INSIDE_HEADS) v->n_stride = row, v->h_stride = n * row;
    if (kind == LONGEST_STEPS) v->n_stride = v->h_stride = longest;
    if (kind == NEVER_TAKEN) {
        if (n == 1) v->n_stride = 0;
        if (h == 1) v->h_stride = 0;
    }
    return upi_tensor_map_fits(*v);
}

typedef struct count {
    int64_t tried, refused;
    char first[416]; /* refusal */
} count;

typedef upipe_status map_make(upipe_ctx *c, upi_tensor_map *map, upipe_view v, int rows);

/* Every map of a kind. */
static void count_maps(count *x, int kind, void *base, map_make *make)
{
    static const int64_t rows[] = {1, 2, 63, 64, 1000, 1 << 20, INT32_MAX - 1};
    static const int heads[] = {1, 3, 128};
    const int from = kind == MOST_ROWS || kind == MOST_ROWS_INSIDE_HEADS ? 6 : 0,
              to = kind < MOST_ROWS ? 6 : 7;
    upipe_ctx c;
    memset(&c, 0, sizeof c);
    memset(x, 0, sizeof *x);
    for (const box *b = boxes; b < boxes + BOXES; ++b)
        for (int d = 1; d <= 256; ++d)
            for (int i = from; i < to; ++i)
                for (int h : heads) {
                    upi_tensor_map map;
                    upipe_view v;
                    if (!view_make(&v, base, b->dtype, rows[i], h, d, kind)) continue;
                    ++x->tried;
                    if (make(&c, &map, v, b->rows) == UPIPE_OK || x->refused++ > 0) continue;
                    snprintf(x->first, sizeof x->first,
                             "%s: boxes of %d rows of %lld x %d x %d %s, steps of %lld and %lld", c.err.text,
                             b->rows, (long long)rows[i], h, d, upipe_dtype_name(b->dtype),
                             (long long)v.n_stride, (long long)v.h_stride);
                }
}

static void test_maps(void *base)
{
    for (int kind = 0; kind < KINDS; ++kind) {
        count x;
        count_maps(&x, kind, base, upi_tensor_map_make);
        printf("%s: %lld maps, %lld refused\n", kinds[kind], (long long)x.tried, (long long)x.refused);
        CHECK(x.tried > 0);
        CHECK_SAY(x.refused == 0, "%s: %lld of %lld are refused, first %s", kinds[kind], (long long)x.refused,
                  (long long)x.tried, x.first);
    }
}

/* A driver that takes no long steps. */
static upipe_status refuse_long(upipe_ctx *c, upi_tensor_map *map, upipe_view v, int rows)
{
    if (v.n_stride < INT64_C(1) << 35) return upi_tensor_map_make(c, map, v, rows);
    return upipe_fail(&c->err, UPIPE_ERR_BACKEND, "too long");
}

/* A refusal ends no count, and is one of its own kind alone. */
static void test_counts(void *base)
{
    for (int kind = 0; kind < KINDS; ++kind) {
        count good, bad;
        count_maps(&good, kind, base, upi_tensor_map_make);
        count_maps(&bad, kind, base, refuse_long);
        CHECK_INT(bad.tried, good.tried);
        CHECK_INT(bad.refused - good.refused, kind == LONGEST_STEPS ? bad.tried : 0);
        if (kind == LONGEST_STEPS) CHECK_TEXT(bad.first, "too long: boxes of 64 rows of 1 x 1 x 1 bf16");
    }
}

int main(int argc, char **argv)
{
    int major = 0;
    void *base = NULL;
    setenv("FAKE_CAPABILITY", "90", 1);
    CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) == cudaSuccess);
    test_begin(argc, argv);
    if (major != 9) {
        printf("device of compute capability %d: nothing to test\n", major);
        return test_end("cuda_maps");
    }
    TEST(test_boxes());
    if (CHECK(cudaMalloc(&base, 256) == cudaSuccess)) {
        TEST(test_maps(base));
        TEST(test_counts(base));
    }
    CHECK(cudaFree(base) == cudaSuccess);
    return test_end("cuda_maps");
}

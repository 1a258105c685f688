/* test_long.c -- sums over 16,384 keys, queries, columns and tokens: their errors against those of blocked sums
 *
 * One chain of additions breaks the tolerance rule at these lengths, whether terms have any sign or, as with equal
 * scores, one. Few rows look at many, so that the oracle costs little.
 */
#include "lib/context.h"
#include "lib/attn_cpu.h"
#include "lib/oracle_tile.h"
#include "lib/close.h"

#include "upipe/upipe_mlp.h"

enum { LONG = 16384, FEW = 16, SIDE = 8 };

/* Values about `mean`, of deviation 1. */
static void fill_about(test_rng *r, float *x, int64_t n, double mean)
{
    for (int64_t i = 0; i < n; ++i) x[i] = (float)(mean + test_normal(r));
}

/* Few queries over many keys: o, lse, dq. Many queries over few keys: dk, dv. Scores that are
 * random, or equal for every eighth key, with values of one sign. */
static void test_attention(void)
{
    test_rng r = {1};
    for (int kind = 0; kind < 4; ++kind) {
        oracle_attn t = kind & 1 ? shape(LONG, FEW, 1, 1, 32, 0, 0, 0) : shape(FEW, LONG, 1, 1, 32, 0, 0, 0);
        values in = inputs_make(&t, UPIPE_F32, &r, 1);
        for (int64_t i = SIDE * t.d; kind >= 2 && i < k_count(&t); ++i) in.k[i] = in.k[i % (SIDE * t.d)];
        if (kind >= 2) fill_about(&r, in.v, v_count(&t), 2);
        if (kind >= 2) fill_about(&r, in.dout, o_count(&t), 2);
        check_case(&t, UPIPE_F32, PACKED, &in);
        buffers_free(0);
    }
}

/* out [SIDE][SIDE] of a depth, as a row of each operand by the other, however they are stored. */
static void check_product(test_rng *r, int flags, double mean)
{
    const int trans_a = flags & UPIPE_GEMM_TRANS_A, trans_b = flags & UPIPE_GEMM_TRANS_B;
    float *a = floats(SIDE * LONG), *b = floats(SIDE * LONG), got[SIDE * SIDE],
          naive[NAIVE_WAYS][SIDE * SIDE];
    const float *runs[NAIVE_WAYS];
    double want[SIDE * SIDE];
    upipe_view va = upipe_view_packed(a, UPIPE_F32, trans_a ? LONG : SIDE, 1, trans_a ? SIDE : LONG);
    upipe_view vb = upipe_view_packed(b, UPIPE_F32, trans_b ? SIDE : LONG, 1, trans_b ? LONG : SIDE);
    upipe_view out = upipe_view_packed(got, UPIPE_F32, SIDE, 1, SIDE);
    upipe_ops ops;
    size_t bytes;
    void *work;
    upipe_ctx c = {0};
    upipe_cpu_ops(&ops);
    c.ops = &ops;
    fill_about(r, a, SIDE * LONG, mean);
    fill_about(r, b, SIDE * LONG, mean);
    bytes = ops.gemm_bytes(&ops, out, va, vb, flags);
    work = aligned_alloc(64, bytes + 64 - bytes % 64);
    CHECK_STATUS(ops.gemm(&c, out, va, vb, flags, work, bytes), UPIPE_OK, c.err);
    for (int i = 0; i < SIDE; ++i)
        for (int j = 0; j < SIDE; ++j) {
            float sum[NAIVE_WAYS][NAIVE_LEVELS] = {{0}};
            double exact = 0;
            for (int64_t k = 0; k < LONG; ++k)
                exact += (double)a[trans_a ? k * SIDE + i : i * LONG + k] *
                         (double)b[trans_b ? j * LONG + k : k * SIDE + j];
            want[i * SIDE + j] = exact;
            for (int way = 0; way < NAIVE_WAYS; ++way) {
                for (int64_t k = 0; k < LONG; naive_carry(sum[way], 1, ++k)) {
                    int64_t at = naive_term(k, LONG, way);
                    sum[way][0] = naive_add(sum[way][0], a[trans_a ? at * SIDE + i : i * LONG + at],
                                            b[trans_b ? j * LONG + at : at * SIDE + j], way);
                }
                naive_total(sum[way], 1, LONG);
                naive[way][i * SIDE + j] = sum[way][0];
            }
        }
    for (int way = 0; way < NAIVE_WAYS; ++way) runs[way] = naive[way];
    CHECK_CLOSE(got, runs, NAIVE_WAYS, want, SIDE * SIDE,
                trans_a   ? "a product of columns"
                : trans_b ? "a product of rows"
                          : "a product");
    free(work);
    buffers_free(0);
}

static void test_products(void)
{
    static const int flags[] = {0, UPIPE_GEMM_TRANS_A, UPIPE_GEMM_TRANS_B};
    test_rng r = {2};
    for (int i = 0; i < 6; ++i) check_product(&r, flags[i % 3], i / 3);
}

/* The loss and its gradients: sums over the vocabulary, over model dims, or over tokens are long. */
static void check_loss(int64_t rows, int64_t dim, int64_t vocab)
{
    int32_t *targets = (int32_t *)zeroed((size_t)rows * sizeof *targets);
    tile_shape s = {
        .rows = rows, .dim = dim, .wide = vocab, .targets = targets, .normed = 1, .eps = 1e-5, .scale = 1};
    f32_tile in, got;
    upipe_mem mem;
    const upipe_ops ops = cpu_table();
    upipe_ctx c = {0};
    upipe_loss head = {.vocab = vocab, .norm_eps = 1e-5f, .scale = 1};
    upipe_loss_grads grads = {0};
    upipe_view x, dx;
    test_rng r = {3};
    for (int64_t i = 0; i < rows; ++i) targets[i] = test_below(&r, (int)vocab);
    tile_inputs(&s, 4, &in);
    f32_tile_make(&s, &got);
    context_pool(&c, &mem, &ops, (size_t)64 << 20, 16);
    head.w = in.head, head.norm_weight = in.norm_weight;
    grads.w = got.head, grads.norm_weight = got.norm_weight;
    x = upipe_view_packed(in.x, UPIPE_F32, rows, 1, (int32_t)dim);
    dx = upipe_view_packed(got.x, UPIPE_F32, rows, 1, (int32_t)dim);
    CHECK_STATUS(upipe_loss_bwd(&c, &head, dx, &grads, got.loss, x, targets), UPIPE_OK, c.err);
    check_tile(&s, &in, &got);
    buffers_free(0);
}

int main(int argc, char **argv)
{
    cpu_place();
    test_begin(argc, argv);
    TEST(test_attention());
    TEST(test_products());
    TEST(check_loss(FEW, SIDE, LONG));
    TEST(check_loss(FEW, LONG, SIDE));
    TEST(check_loss(LONG, SIDE, FEW));
    return test_end("test_long");
}

/* test_cuda_train_ops.c -- the CUDA operations around attention: lib/train_ops.h, ids that the host cannot check,
 *                          and sums over more than a block takes
 */
#include "../lib/train_ops.h"
#include "cuda/staged.h"

/* A target beyond the last column: that row is NaN, and no other. A token that the table lacks: the same, and
 * its gradient goes nowhere. The table is the middle of five rows. */
static void check_ranges(upipe_ctx *c)
{
    enum { ROWS = 4, COLUMNS = 40, TABLE = 3 };
    float logits[ROWS * COLUMNS], grad[ROWS * COLUMNS], loss[ROWS], five[5 * COLUMNS], before[5 * COLUMNS];
    static const int32_t targets[ROWS] = {3, COLUMNS, INT32_MAX, 39}, tokens[ROWS] = {2, TABLE, -1, 0};
    upipe_view x = upipe_view_packed(logits, UPIPE_F32, ROWS, 1, COLUMNS), g = x;
    upipe_view all = upipe_view_packed(five, UPIPE_F32, 5, 1, COLUMNS),
               rows = upipe_view_packed(before, UPIPE_F32, 5, 1, COLUMNS);
    upipe_view table = upipe_view_rows(all, 1, TABLE);
    for (int i = 0; i < ROWS * COLUMNS; ++i) logits[i] = (float)(i % 7);
    for (int i = 0; i < 5 * COLUMNS; ++i) five[i] = before[i] = (float)i;
    g.data = grad;
    CHECK_STATUS(cross_entropy(c, x, g, loss, targets, 1), UPIPE_OK, c->err);
    for (int i = 0; i < ROWS; ++i) {
        int bad = i == 1 || i == 2;
        CHECK_INT(isnan(loss[i]) != 0, bad);
        for (int k = 0; k < COLUMNS; ++k) CHECK_INT(isnan(grad[i * COLUMNS + k]) != 0, bad);
    }
    /* the device sees all five, so that a row too far is no NaN */
    memcpy(grad, logits, sizeof grad);
    staged_reach_view(all);
    CHECK_OP(embed(c, g, table, tokens));
    for (int i = 0; i < ROWS; ++i)
        for (int k = 0; k < COLUMNS; ++k) {
            float got = grad[i * COLUMNS + k];
            CHECK(i == 1 || i == 2 ? isnan(got) : got == (float)get(rows, 1 + tokens[i], 0, k));
        }
    staged_reach_view(all);
    CHECK_OP(embed_bwd(c, table, x, tokens));
    for (int i = 0; i < 5; ++i)
        for (int k = 0; k < COLUMNS; ++k) {
            float added = i == 3 ? logits[k] : i == 1 ? logits[3 * COLUMNS + k] : 0;
            CHECK(five[i * COLUMNS + k] == (float)get(rows, i, 0, k) + added);
        }
}

/* Many tokens, most of them a few: each sum is one chain in their order. */
static void check_embed_many(test_rng *r, upipe_ctx *c, int n, int vocab, int d, upipe_dtype dtype)
{
    upipe_view table = tensor(r, UPIPE_F32, vocab, 1, d, HEADS_INNER, 1), want = twin(table);
    upipe_view dx = tensor(r, dtype, n, 1, d, PACKED, 1);
    int32_t *tokens = (int32_t *)buffer((size_t)n * sizeof *tokens);
    for (int i = 0; i < n; ++i) tokens[i] = test_below(r, 2) ? 8 : test_below(r, vocab);
    for (int i = 0; i < n; ++i)
        for (int k = 0; k < d; ++k) {
            volatile float sum = (float)get(want, tokens[i], 0, k) + (float)get(dx, i, 0, k);
            put_at(want, (int64_t)tokens[i] * d + k, (double)sum);
        }
    CHECK_OP(embed_bwd(c, table, dx, tokens));
    CHECK_SAY(same(table, want) && gaps_whole(table), "embed_bwd of %d tokens, %d of a table, d %d, %s", n,
              vocab, d, upipe_dtype_name(dtype));
    buffers_free(0);
}

/* More tokens than one launch sums. Whole numbers, whose sums are exact in any order. */
static void check_bias_many(upipe_ctx *c)
{
    enum { TOKENS = 70001 };
    upipe_view dy = empty(UPIPE_BF16, TOKENS, 1, 1, PACKED);
    float db = 3, want = db;
    for (int64_t at = 0; at < TOKENS; ++at) {
        put_at(dy, at, (double)(at % 61));
        want += (float)(at % 61);
    }
    CHECK_OP(bias_bwd(c, &db, dy));
    CHECK_SAY(db == want, "bias_bwd of %d tokens: %.9g, not %.9g", TOKENS, (double)db, (double)want);
    buffers_free(0);
}

/* Whole numbers: their sum is exact in any order, and no element is left out or counted twice. */
static void check_total_many(upipe_ctx *c, int64_t n, int h, int d, int layout)
{
    upipe_view x = empty(UPIPE_F32, n, h, d, layout);
    double got, again, want = 0, square = 0;
    for (int64_t at = 0; at < elements(x); ++at) {
        double one = (double)(at % 1009);
        put_at(x, at, one);
        want += one;
        square += one * one;
    }
    CHECK_OP(total(c, &got, x, 0));
    CHECK_OP(total(c, &again, x, 1));
    CHECK_SAY(got == want && again == square, "totals of [%lld][%d][%d]: %.17g, %.17g, not %.17g, %.17g",
              (long long)n, h, d, got, again, want, square);
    buffers_free(0);
}

/* More rows than a grid has blocks, so that they take turns: as in calls of a few. */
static void check_cross_entropy_many(test_rng *r, upipe_ctx *c, int n, int few, int v)
{
    upipe_view x = tensor(r, UPIPE_F32, n, 1, v, PACKED, 3), all = twin(x), parts = twin(x);
    float *loss = floats(n), *loss_parts = floats(n);
    int32_t *targets = (int32_t *)buffer((size_t)n * sizeof *targets);
    for (int i = 0; i < n; ++i) targets[i] = test_below(r, v);
    CHECK_STATUS(cross_entropy(c, x, all, loss, targets, 1), UPIPE_OK, c->err);
    for (int i = 0; i < n; i += few)
        CHECK_STATUS(cross_entropy(c, upipe_view_rows(x, i, few), upipe_view_rows(parts, i, few),
                                   loss_parts + i, targets + i, 1),
                     UPIPE_OK, c->err);
    CHECK(same(all, parts));
    CHECK_BYTES(loss, loss_parts, (size_t)n * sizeof *loss);
    buffers_free(0);
}

int main(int argc, char **argv)
{
    test_rng r;
    device d;
    r.state = (uint64_t)test_env("UPIPE_SEED", 1);
    test_begin(argc, argv);
    if (device_open(&d)) {
        const int processors = d.cuda.processors;
        printf("test_cuda_train_ops: %s, seed %llu\n", d.ops.name, (unsigned long long)r.state);
        staged_open(&d);
        TEST(check_train_ops(&r, &staged.c, 1003));
        TEST(check_ranges(&staged.c));
        TEST(check_cross_entropy_many(&r, &staged.c, 300, 50, 70));
        TEST(check_embed_many(&r, &staged.c, 300, 40, 70, UPIPE_F32));
        TEST(check_embed_many(&r, &staged.c, 97, 1000, 33, UPIPE_BF16));
        TEST(check_embed_many(&r, &staged.c, 40, 9, 264, UPIPE_BF16)); /* columns of two warps */
        TEST(check_bias_many(&staged.c));
        TEST(check_cross_entropy(&r, &staged.c, 20011, UPIPE_BF16, 1.0f)); /* a row in three pieces */
        TEST(check_cross_entropy_many(&r, &staged.c, 8, 2, 8200));
        d.cuda.processors = 1; /* which holds fewer pieces: they are longer than what registers hold */
        TEST(check_cross_entropy(&r, &staged.c, 25003, UPIPE_BF16, 1.0f));
        TEST(check_cross_entropy_many(&r, &staged.c, 40, 20, 9));
        d.cuda.processors = processors;
        TEST(check_total_many(&staged.c, 3, 2, 20011, HEADS_INNER));
        TEST(check_total_many(&staged.c, 700, 1, 64, PACKED));
        TEST(check_total_many(&staged.c, 1, 1, 1, PACKED));
        TEST(check_total_many(&staged.c, 40000, 1, 9, HEADS_OUTER));
        TEST(check_total_many(&staged.c, 9, 1, 250000, PACKED));
        TEST(check_train_statuses(&d.c));
        staged_close();
    }
    device_close(&d);
    return test_end("test_cuda_train_ops");
}

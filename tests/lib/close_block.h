/* close_block.h -- the tolerance rule for every tensor of a block's result
 *
 *     check_block(&shape, &in, &result.out);
 */
#ifndef UPIPE_TEST_CLOSE_BLOCK_H
#define UPIPE_TEST_CLOSE_BLOCK_H

#include "oracle_block.h"
#include "tolerance.h"

/* Results of a block: all but the inputs dout and dy. */
#define BLOCK_RESULTS(X) \
    X(o)                 \
    X(lse)               \
    X(y) X(q) X(x) X(wq) X(wk) X(wv) X(wo) X(q_norm_weight) X(k_norm_weight) X(sinks) X(bq) X(bk) X(bv) X(bo)

/* The naive ways that are slow to run are asked only where the others do not settle it: more can but raise
 * the bound. */
static void check_block(const block_shape *s, const f32_block *in, const f32_block *got)
{
    f32_block naive[NAIVE_WAYS];
    f64_block in64, want;
    block_shape t = *s;
    int ways = 0, holds = 0, i;
    f64_block_widen(s, in, &in64);
    f64_block_make(s, &want);
    f64_block_run(s, &in64, &want);
    while (ways < NAIVE_WAYS && !holds) {
        for (i = 0; i < 2; ++i, ++ways) {
            t.naive = ways;
            f32_block_make(&t, &naive[ways]);
            f32_block_run(&t, in, &naive[ways]);
        }
        holds = 1;
#define BLOCK_HOLDS(tensor)                                                                                 \
    if (want.tensor != NULL) {                                                                              \
        const float *runs[NAIVE_WAYS];                                                                      \
        tolerance_error g;                                                                                  \
        double floor;                                                                                       \
        for (i = 0; i < ways; ++i) runs[i] = naive[i].tensor;                                               \
        holds = holds && tolerance_holds(got->tensor,                                                       \
                                         tolerance_naive(runs, ways, want.tensor, block_count(s, #tensor)), \
                                         want.tensor, block_count(s, #tensor), &g, &floor);                 \
    }
        BLOCK_RESULTS(BLOCK_HOLDS)
#undef BLOCK_HOLDS
    }
#define BLOCK_CHECK(tensor)                                                                  \
    if (want.tensor != NULL) {                                                               \
        const float *runs[NAIVE_WAYS];                                                       \
        for (i = 0; i < ways; ++i) runs[i] = naive[i].tensor;                                \
        CHECK_CLOSE(got->tensor, runs, ways, want.tensor, block_count(s, #tensor), #tensor); \
    }
    BLOCK_RESULTS(BLOCK_CHECK)
#undef BLOCK_CHECK
    for (i = 0; i < ways; ++i) f32_block_free(&naive[i]);
    f64_block_free(&in64);
    f64_block_free(&want);
}

#endif

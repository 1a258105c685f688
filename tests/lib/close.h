/* close.h -- the tolerance rule for every tensor of a result of oracle_block.h or oracle_tile.h
 *
 *     check_block(&shape, &in, &result.out);
 *     check_tile(&shape, &in, &got);                     where oracle_tile.h is included
 *
 * shape.naive: 0, or NAIVE_NARROW for kernels on matrix units. The naive ways that are slow to run are asked only where
 * the others do not settle it: more can but raise the bound.
 */
#ifndef UPIPE_TEST_CLOSE_H
#define UPIPE_TEST_CLOSE_H

#include "oracle_block.h"
#include "tolerance.h"

/* Results of a tile: all tensors but the gradient that comes in. */
#define TILE_RESULTS(X) X(x) X(gate) X(up) X(down) X(head) X(norm_weight) X(post_norm_weight) X(y) X(loss)

/* In the function below, for a tensor that the shape has: do the runs so far settle it, and the check. */
#define CLOSE_RUNS(tensor) \
    for (int i = 0; want.tensor != NULL && i < ways; ++i) runs[i] = naive[i].tensor;
#define CLOSE_HOLDS(tensor)                                                                               \
    CLOSE_RUNS(tensor)                                                                                    \
    if (want.tensor != NULL && holds)                                                                     \
        holds = tolerance_holds(got->tensor, tolerance_naive(runs, ways, want.tensor, count(s, #tensor)), \
                                want.tensor, count(s, #tensor), &g, &floor);
#define CLOSE_CHECK(tensor) \
    CLOSE_RUNS(tensor)      \
    if (want.tensor != NULL) CHECK_CLOSE(got->tensor, runs, ways, want.tensor, count(s, #tensor), #tensor);

#define CLOSE_FUNCTION(kind, RESULTS)                                                             \
    __attribute__((unused)) static void check_##kind(const kind##_shape *s, const f32_##kind *in, \
                                                     const f32_##kind *got)                       \
    {                                                                                             \
        int64_t (*const count)(const kind##_shape *, const char *) = kind##_count;                \
        const int mark = buffers_n;                                                               \
        const float *runs[NAIVE_WAYS];                                                            \
        f32_##kind naive[NAIVE_WAYS];                                                             \
        f64_##kind in64, want;                                                                    \
        kind##_shape t = *s;                                                                      \
        tolerance_error g;                                                                        \
        double floor;                                                                             \
        int ways = 0, holds = 0;                                                                  \
        f64_##kind##_widen(s, in, &in64);                                                         \
        f64_##kind##_make(s, &want);                                                              \
        f64_##kind##_run(s, &in64, &want);                                                        \
        while (ways < NAIVE_WAYS && !holds) {                                                     \
            for (int pair = 0; pair < 2; ++pair, ++ways) {                                        \
                t.naive = s->naive | ways;                                                        \
                f32_##kind##_make(&t, &naive[ways]);                                              \
                f32_##kind##_run(&t, in, &naive[ways]);                                           \
            }                                                                                     \
            holds = 1;                                                                            \
            RESULTS(CLOSE_HOLDS)                                                                  \
        }                                                                                         \
        RESULTS(CLOSE_CHECK)                                                                      \
        buffers_free(mark);                                                                       \
    }

CLOSE_FUNCTION(block, BLOCK_RESULTS)
#ifdef UPIPE_TEST_ORACLE_TILE_H
CLOSE_FUNCTION(tile, TILE_RESULTS)
#endif

#endif

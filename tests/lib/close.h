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

/* A bare block's gradient of a sink is a sum over all queries of terms that cancel, and there are few sinks: the naive runs'
 * largest error is a random number. The bound has 4 eps of the terms' magnitudes more. */
static inline double close_cancelled(const block_shape *s, const f64_block *in, const f64_block *want)
{
    const int64_t v_dim = s->v_dim > 0 ? s->v_dim : s->d;
    double most = 0;
    for (int h = 0; s->bare && s->sinks && h < s->h; ++h) {
        double sum = 0;
        for (int64_t i = h; i < s->batch * s->tokens * s->h; i += s->h) {
            double delta = 0;
            for (int64_t k = i * v_dim; k < (i + 1) * v_dim; ++k) delta += in->dout[k] * want->o[k];
            sum += exp(in->sinks[h] - want->lse[i]) * fabs(delta);
        }
        most = fmax(most, sum);
    }
    return most;
}

static inline tolerance_error close_naive(const float *const *runs, int ways, const double *want, int64_t n,
                                          double cancelled)
{
    tolerance_error m = tolerance_naive(runs, ways, want, n);
    m.max += 2 * (double)FLT_EPSILON * cancelled; /* which the rule doubles */
    return m;
}

/* In the function below, for a tensor that the shape has: do the runs so far settle it, and the check. */
#define CLOSE_RUNS(tensor)                                         \
    const int64_t n = count(s, #tensor);                           \
    const double more = !strcmp(#tensor, "sinks") ? cancelled : 0; \
    for (int i = 0; i < ways; ++i) runs[i] = naive[i].tensor;
#define CLOSE_HOLDS(tensor)                                                                                 \
    if (want.tensor != NULL && holds) {                                                                     \
        CLOSE_RUNS(tensor)                                                                                  \
        holds = tolerance_holds(got->tensor, close_naive(runs, ways, want.tensor, n, more), want.tensor, n, \
                                &g, &floor);                                                                \
    }
#define CLOSE_CHECK(tensor)                                                                                  \
    if (want.tensor != NULL) {                                                                               \
        CLOSE_RUNS(tensor)                                                                                   \
        CHECK_CLOSE_TO(got->tensor, close_naive(runs, ways, want.tensor, n, more), want.tensor, n, #tensor); \
    }

#define CLOSE_FUNCTION(kind, RESULTS, CANCELLED)                                                  \
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
        double floor, cancelled;                                                                  \
        int ways = 0, holds = 0;                                                                  \
        f64_##kind##_widen(s, in, &in64);                                                         \
        f64_##kind##_make(s, &want);                                                              \
        f64_##kind##_run(s, &in64, &want);                                                        \
        cancelled = CANCELLED;                                                                    \
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

CLOSE_FUNCTION(block, BLOCK_RESULTS, close_cancelled(s, &in64, &want))
#ifdef UPIPE_TEST_ORACLE_TILE_H
CLOSE_FUNCTION(tile, TILE_RESULTS, 0)
#endif

#endif

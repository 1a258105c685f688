/* golden.h -- numbers of another program's tensors, in f64, and tensors that both programs draw (golden/README.md)
 *
 *     golden_draw(x, n, "x", mean, scale);               as the scripts of golden/ draw it
 *     check_golden(&golden_rows[i], got, n);
 */
#ifndef UPIPE_TEST_GOLDEN_H
#define UPIPE_TEST_GOLDEN_H

#include <float.h>

#include "test.h"

/* Of a tensor, or of its gradient: its sum with random signs, its norm, the norm of the error in f32. */
typedef struct golden_row {
    const char *name;
    double sum, norm, error;
} golden_row;

/* A stream of the name's own. */
static inline test_rng golden_stream(const char *before, const char *name)
{
    test_rng r = {0};
    for (; *before != '\0'; ++before) r.state = 31 * r.state + (unsigned char)*before;
    for (; *name != '\0'; ++name) r.state = 31 * r.state + (unsigned char)*name;
    return r;
}

/* Eleven bits each. */
static inline void golden_draw(float *x, int64_t n, const char *name, double mean, double scale)
{
    test_rng r = golden_stream("", name);
    for (int64_t j = 0; j < n; ++j) x[j] = (float)(mean + scale * ((double)(test_u64(&r) >> 53) / 1024 - 1));
}

/* A sum with random signs: its error is a random walk along the tensor's, which stays within four times its length. The
 * rule of tolerance.h allows 1.5 times that of the naive one. */
static inline void check_golden(const golden_row *g, const float *got, int64_t n)
{
    const double limit = 4 * (1.5 * g->error + (double)FLT_EPSILON * g->norm);
    test_rng r = golden_stream("signs of ", g->name);
    double sum = 0;
    for (int64_t j = 0; j < n; ++j) sum += test_u64(&r) >> 63 ? -(double)got[j] : (double)got[j];
    CHECK_SAY(fabs(sum - g->sum) <= limit, "%s, with signs, sums up to %.9g, not %.9g; at most %.3g off",
              g->name, sum, g->sum, limit);
}

#endif

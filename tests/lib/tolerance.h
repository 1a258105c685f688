/* tolerance.h -- the one rule that says how far a result may be from the truth
 *
 *     max error  <= 2   * max error of the naive implementation  + floor
 *     mean error <= 1.5 * mean error of the naive implementation + floor
 *     floor       = 4 eps of f32, the accumulation type, * the largest finite reference value
 *
 * Both errors are taken against the same f64 reference, over the whole array. The naive implementation has
 * the same storage type and sums in f32, in plain loops whose long sums are blocked, so that the rule does not
 * loosen with their length (oracle.h). Such loops may run upwards or downwards, and be compiled with multiply
 * and add fused or not: the largest error of these runs counts, because the
 * maximum over an array in which one short row decides is a random number, which in a single run may happen
 * to be near zero. Where the reference is infinite, the result must be equal to it. A NaN is always wrong.
 *
 *     CHECK_CLOSE(got, naive, ways, reference, n, "dk");      float, ways x float, double; n elements
 */
#ifndef UPIPE_TEST_TOLERANCE_H
#define UPIPE_TEST_TOLERANCE_H

#include <float.h>

#include "test.h"

#define CHECK_CLOSE(got, naive, ways, reference, n, name)                                                \
    tolerance_check((got), tolerance_naive((naive), (ways), (reference), (n)), (reference), (n), (name), \
                    __FILE__, __LINE__)
/* The same where the naive runs' errors are known. */
#define CHECK_CLOSE_TO(got, errors, reference, n, name) \
    tolerance_check((got), (errors), (reference), (n), (name), __FILE__, __LINE__)

typedef struct tolerance_error {
    double max, mean;
    int64_t worst;      /* element with the greatest error */
    int64_t impossible; /* elements that are NaN, or not equal to an infinite reference */
} tolerance_error;

static inline tolerance_error tolerance_measure(const float *x, const double *reference, int64_t n)
{
    tolerance_error e = {0};
    for (int64_t i = 0; i < n; ++i) {
        double error = isinf(reference[i]) ? 0 : fabs((double)x[i] - reference[i]);
        if (isnan(x[i]) || isinf(error) || (isinf(reference[i]) && (double)x[i] != reference[i])) {
            ++e.impossible;
            e.worst = i;
            continue;
        }
        e.mean += error / (double)n;
        if (error > e.max) {
            e.max = error;
            e.worst = e.impossible ? e.worst : i;
        }
    }
    return e;
}

/* The largest errors of some naive runs. */
static inline tolerance_error tolerance_naive(const float *const *naive, int ways, const double *reference,
                                              int64_t n)
{
    tolerance_error m = {0};
    for (int way = 0; way < ways; ++way) {
        tolerance_error e = tolerance_measure(naive[way], reference, n);
        if (e.max > m.max) m.max = e.max;
        if (e.mean > m.mean) m.mean = e.mean;
        m.impossible += e.impossible;
    }
    return m;
}

/* The rule, given the errors of the naive runs; the result's own and the floor are left in g and floor. */
static inline int tolerance_holds(const float *got, tolerance_error m, const double *reference, int64_t n,
                                  tolerance_error *g, double *floor)
{
    double largest = 0;
    *g = tolerance_measure(got, reference, n);
    for (int64_t i = 0; i < n; ++i)
        if (!isinf(reference[i]) && fabs(reference[i]) > largest) largest = fabs(reference[i]);
    *floor = 4 * (double)FLT_EPSILON * largest;
    return g->impossible == 0 && m.impossible == 0 && g->max <= 2 * m.max + *floor &&
           g->mean <= 1.5 * m.mean + *floor;
}

static inline int tolerance_check(const float *got, tolerance_error m, const double *reference, int64_t n,
                                  const char *name, const char *file, int line)
{
    tolerance_error g;
    double floor;
    int ok = tolerance_holds(got, m, reference, n, &g, &floor);
    return test_check(ok, file, line,
                      "%s: error max %.3g mean %.3g, naive max %.3g mean %.3g, floor %.3g; %lld impossible; "
                      "element %lld is %.9g, not %.9g",
                      name, g.max, g.mean, m.max, m.mean, floor, (long long)g.impossible, (long long)g.worst,
                      n > 0 ? (double)got[g.worst] : 0.0, n > 0 ? reference[g.worst] : 0.0);
}

#endif

/* pairs.h -- pairs of a query and a key that a mask shows, without a step for each        part of upipe_dry.h */
#ifndef UPIPE_DRY_PAIRS_H
#define UPIPE_DRY_PAIRS_H

#include "../upipe_attn.h"

/* The sum over i < n of i + ahead + 1, each at least 0 and at most `most`. */
UPIPE_API double upi_dry_ramp(int64_t n, int64_t ahead, int64_t most)
{
    const int64_t first = upipe_clamp(-ahead, 0, n), full = upipe_clamp(most - ahead - 1, first, n);
    const double rising = (double)(full - first);
    return rising * ((double)(first + ahead + 1) + (double)(full + ahead)) / 2 +
           (double)(n - full) * (double)most;
}

/* Pairs of a call without borders. */
UPIPE_API double upi_dry_plain_pairs(const upipe_attn *a)
{
    const int64_t step = a->pos_step > 0 ? a->pos_step : 1, last = a->mask.window - 1 - (a->q_pos - a->k_pos);
    double pairs =
        a->mask.causal ? upi_dry_ramp(a->q.n, upipe_attn_ahead(a), a->k.n) : (double)a->q.n * (double)a->k.n;
    if (a->mask.window > 0) pairs -= upi_dry_ramp(a->q.n, -upipe_floor_div(last, step) - 1, a->k.n);
    return pairs;
}

/* The rows of n, the first at pos and each `step` further, that lie in [from, to): their number and, in *pos, the first's
 * position. */
UPIPE_API int64_t upi_dry_between(int64_t *pos, int64_t n, int64_t step, int64_t from, int64_t to)
{
    const int64_t first = upipe_clamp(-upipe_floor_div(*pos - from, step), 0, n),
                  end = upipe_clamp(-upipe_floor_div(*pos - to, step), first, n);
    *pos += first * step;
    return end - first;
}

#endif

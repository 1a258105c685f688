/* uneven.h -- the schedule of heads that do not divide evenly        part of upipe_plan.h */
#ifndef UPIPE_PLAN_H
#include "../upipe_plan.h"
#elif !defined(UPIPE_PLAN_UNEVEN_H)
#define UPIPE_PLAN_UNEVEN_H

/* The number of query heads in a rank's next stage, from head `first` on; the rank has begin .. end - 1. They
 * are a part of one group, the rest of it, or several groups, the last of which `end` may cut. */
UPIPE_API int upi_uneven_next(int begin, int first, int end, int m, int group)
{
    int left = end - first, n = group - first % group;
    if (n > left) n = left;
    if (n > m) return m;
    if (first % group != 0 && first != begin) return n; /* K and V of this group were fetched before */
    while (n < left) {
        int more = left - n < group ? left - n : group;
        if (n + more > m) break;
        n += more;
    }
    return n;
}

/* Query heads of a rank in a stage; count 0 after its last one. *fresh: their K and V must be fetched. */
UPIPE_API upipe_span upi_uneven_stage(const upipe_plan *p, int stage, int rank, int *fresh)
{
    const int begin = (int)upipe_cut(p->desc.heads, p->desc.ranks, rank);
    const int end = (int)upipe_cut(p->desc.heads, p->desc.ranks, rank + 1);
    int first = begin, n = 0, i;
    for (i = 0; i <= stage; ++i) {
        first += n;
        n = first < end ? upi_uneven_next(begin, first, end, p->per_rank, p->group) : 0;
    }
    *fresh = n > 0 && (first == begin || first % p->group == 0);
    return upi_span_make(first, n);
}

/* Key/value heads that these query heads read. */
UPIPE_API upipe_span upi_kv_of(const upipe_plan *p, upipe_span q)
{
    int first = q.first / p->group;
    return upi_span_make(first, q.count > 0 ? (q.first + q.count - 1) / p->group + 1 - first : 0);
}

UPIPE_API void upi_plan_uneven(upipe_plan *p)
{
    int rank, fresh;
    p->schedule = UPIPE_UNEVEN;
    p->kv_grads_partial = 1;
    p->stages = 0;
    p->kv_per_rank = 1;
    for (rank = 0; rank < p->desc.ranks; ++rank) {
        int stage = 0;
        for (;; ++stage) {
            upipe_span q = upi_uneven_stage(p, stage, rank, &fresh), kv = upi_kv_of(p, q);
            if (q.count == 0) break;
            if (kv.count > p->kv_per_rank) p->kv_per_rank = kv.count;
        }
        if (stage > p->stages) p->stages = stage;
    }
    p->rounds = p->stages;
    p->steps = 1;
}

#endif

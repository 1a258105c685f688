/* uneven.h -- the schedule of heads that do not divide evenly        part of upipe_plan.h */
#ifndef UPIPE_PLAN_H
#include "../upipe_plan.h"
#elif !defined(UPIPE_PLAN_UNEVEN_H)
#define UPIPE_PLAN_UNEVEN_H

/* Whole numbers from 1: a / b, rounded up. */
UPIPE_API int64_t upi_div_up(int64_t a, int64_t b)
{
    return a / b + (a % b != 0);
}

/* Query heads of a rank in a stage; count 0 after its last one. *fresh: their K and V must be fetched.
 *
 * The rank has the heads begin .. end - 1. They fall into blocks: as many whole groups as fit into a stage, or one group,
 * in parts of m heads, where none does. The first block, `lead`, begins with the rest of the group that `begin` cuts.
 * What is left at the start of a block is one stage if it fits. */
UPIPE_API upipe_span upi_uneven_stage(const upipe_plan *p, int stage, int rank, int *fresh)
{
    const int64_t m = p->per_rank, group = p->group;
    const int64_t begin = upipe_cut(p->desc.heads, p->desc.ranks, rank);
    const int64_t end = upipe_cut(p->desc.heads, p->desc.ranks, rank + 1);
    const int64_t rest = group - begin % group;
    const int64_t lead = m < group ? rest : rest + (m - rest) / group * group;
    const int64_t block = m < group ? group : m / group * group;
    const int64_t lead_parts = upi_div_up(lead, m), parts = upi_div_up(block, m);
    const int64_t after = stage - lead_parts, n = after / parts; /* stages and blocks after the lead */
    const int64_t at = after < 0 ? begin : begin + lead + n * block;
    const int64_t part = after < 0 ? stage : after % parts, left = end - at;
    const int64_t full = after < 0 ? lead : block, size = left <= m || left < full ? left : full;
    const int done =
        after >= 0 && left + (n > 0 ? block : lead) <= m; /* the block before was all that was left */
    const int64_t first = at + part * m, count = size - part * m < m ? size - part * m : m;
    *fresh = 0;
    if (done || count <= 0) return upi_span_make((int)end, 0);
    *fresh = first == begin || first % group == 0;
    return upi_span_make((int)first, (int)count);
}

/* Key/value heads that these query heads read. */
UPIPE_API upipe_span upi_kv_of(const upipe_plan *p, upipe_span q)
{
    int first = q.first / p->group;
    return upi_span_make(first, q.count > 0 ? (q.first + q.count - 1) / p->group + 1 - first : 0);
}

/* More stages than a plan may have are not all counted. */
UPIPE_API void upi_plan_uneven(upipe_plan *p)
{
    int rank, fresh;
    p->schedule = UPIPE_UNEVEN;
    p->kv_grads_partial = 1;
    p->stages = 0;
    p->kv_per_rank = 1;
    for (rank = 0; rank < p->desc.ranks && p->stages <= UPIPE_STAGES_MAX; ++rank) {
        int stage = 0;
        for (; stage <= UPIPE_STAGES_MAX; ++stage) {
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

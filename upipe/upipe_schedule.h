/* upipe_schedule.h -- which heads a rank attends in which stage, in closed form        layer 2
 *
 * Schedules (section 4.1 of the paper), with the first head of each run. Query head h always reads key/value
 * head h/G; weights stay in their order:
 *
 *     GROUP    C <= Hkv, m divides G  round j, step t: kv head j*C + r,           q heads (j*C + r)*G + t*m
 *     WHOLE    m a multiple of G      stage i:         kv heads (i*C + r)*m/G,    q heads (i*C + r)*m
 *     SPLIT    C > Hkv                all stages:      kv head r / (C/Hkv),       q heads r*(H/C) + t*m
 *     IN_ORDER the naive order        stage i:         the kv heads it needs,     q heads i*U + r*m
 *     UNEVEN   all other numbers      rank r has the q heads r*H/C .. (r+1)*H/C - 1, rounded down; a stage
 *                                     has up to m of them: the rest of a group, or whole groups
 *
 * A round is the stages that share K and V; they are sent in its first stage only. In UNEVEN each rank has
 * rounds of its own: a stage sends K and V to those ranks alone that need other heads than before.
 */
#ifndef UPIPE_SCHEDULE_H
#define UPIPE_SCHEDULE_H

#include "plan/types.h"

/* The heads first .. first + count - 1. */
UPIPE_API upipe_head_range upipe_head_range_make(int first, int count)
{
    upipe_head_range s;
    s.first = first;
    s.count = count;
    return s;
}

/* Whole numbers from 1: a / b, rounded up. */
UPIPE_API int64_t upi_div_up(int64_t a, int64_t b)
{
    return a / b + (a % b != 0);
}

/* Query heads of a rank in a stage; count 0 after its last one. *fresh: their K and V must be fetched.
 *
 * The rank has the heads begin .. end - 1. They fall into blocks: as many whole groups as fit into a stage, or one
 * group, in parts of m heads, where none does. The first block, `lead`, begins with the rest of the group that `begin`
 * cuts. What is left at the start of a block is one stage if it fits. */
UPIPE_API upipe_head_range upi_uneven_stage(const upipe_plan *p, int stage, int rank, int *fresh)
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
    if (done || count <= 0) return upipe_head_range_make((int)end, 0);
    *fresh = first == begin || first % group == 0;
    return upipe_head_range_make((int)first, (int)count);
}

/* Query heads of a rank in a stage. Every head comes in exactly one stage of one rank. */
UPIPE_API upipe_head_range upipe_plan_q(const upipe_plan *p, int stage, int rank)
{
    int ranks = p->desc.ranks, m = p->per_rank, fresh;
    if (p->schedule == UPIPE_UNEVEN) return upi_uneven_stage(p, stage, rank, &fresh);
    if (p->schedule == UPIPE_GROUP)
        return upipe_head_range_make((stage / p->steps * ranks + rank) * p->group + stage % p->steps * m, m);
    if (p->schedule == UPIPE_SPLIT)
        return upipe_head_range_make(rank * (p->desc.heads / ranks) + stage * m, m);
    return upipe_head_range_make((stage * ranks + rank) * m, m);
}

/* Key/value heads that a rank's query heads of a stage read. */
UPIPE_API upipe_head_range upipe_plan_kv(const upipe_plan *p, int stage, int rank)
{
    const upipe_head_range q = upipe_plan_q(p, stage, rank);
    const int first = q.first / p->group;
    return upipe_head_range_make(first, q.count > 0 ? (q.first + q.count - 1) / p->group + 1 - first : 0);
}

/* Whether a rank fetches K and V in a stage; otherwise it has them, or needs none. */
UPIPE_API int upipe_plan_kv_fresh(const upipe_plan *p, int stage, int rank)
{
    int fresh;
    if (p->schedule != UPIPE_UNEVEN) return stage % p->steps == 0;
    upi_uneven_stage(p, stage, rank, &fresh);
    return fresh;
}

/* Whether no later stage of this rank reads the K and V that it has in this one. */
UPIPE_API int upipe_plan_kv_last(const upipe_plan *p, int stage, int rank)
{
    if (p->schedule != UPIPE_UNEVEN) return stage % p->steps == p->steps - 1;
    if (upipe_plan_q(p, stage, rank).count == 0) return 0;
    return upipe_plan_q(p, stage + 1, rank).count == 0 || upipe_plan_kv_fresh(p, stage + 1, rank);
}

/* The heads that a rank receives (Q, KV), or sends back (DKV), in a stage's all-to-all; may be none. */
UPIPE_API upipe_head_range upipe_plan_part(const upipe_plan *p, upipe_a2a_heads which, int stage, int rank)
{
    if (which == UPIPE_A2A_Q) return upipe_plan_q(p, stage, rank);
    if (which == UPIPE_A2A_KV ? upipe_plan_kv_fresh(p, stage, rank) : upipe_plan_kv_last(p, stage, rank))
        return upipe_plan_kv(p, stage, rank);
    return upipe_head_range_make(0, 0);
}

/* Whether a rank reads the same block of the send buffer as the rank before: K and V that several ranks need
 * are projected once. */
UPIPE_API int upipe_plan_same_block(upipe_a2a_heads which, upipe_head_range before, upipe_head_range s)
{
    return which == UPIPE_A2A_KV && s.count > 0 && s.count == before.count && s.first == before.first;
}

/* Heads in a stage's buffer for all ranks: the send buffer, or for DKV the buffer that receives. */
UPIPE_API int upipe_plan_heads_sent(const upipe_plan *p, upipe_a2a_heads which, int stage)
{
    upipe_head_range before = upipe_head_range_make(0, 0);
    int rank, sum = 0;
    for (rank = 0; rank < p->desc.ranks; ++rank) {
        upipe_head_range s = upipe_plan_part(p, which, stage, rank);
        if (!upipe_plan_same_block(which, before, s)) sum += s.count;
        before = s;
    }
    return sum;
}

/* Round and step of a stage, and whether K and V are sent in it. */
UPIPE_API upipe_stage upipe_plan_stage(const upipe_plan *p, int stage)
{
    upipe_stage s;
    int rank;
    s.round = stage / p->steps;
    s.step = stage % p->steps;
    s.kv_fresh = s.step == 0;
    s.kv_last = s.step == p->steps - 1;
    if (p->schedule == UPIPE_UNEVEN) {
        s.kv_fresh = s.kv_last = 0;
        for (rank = 0; rank < p->desc.ranks; ++rank) {
            s.kv_fresh |= upipe_plan_kv_fresh(p, stage, rank);
            s.kv_last |= upipe_plan_kv_last(p, stage, rank);
        }
    }
    return s;
}

/* Query heads of a rank (rank < 0: of all ranks) in the stages before this one. */
UPIPE_API int upipe_plan_before(const upipe_plan *p, int stage, int rank)
{
    int sum = 0, i;
    if (p->schedule != UPIPE_UNEVEN) return stage * p->per_rank * (rank < 0 ? p->desc.ranks : 1);
    for (i = 0; i < stage; ++i)
        sum += rank < 0 ? upipe_plan_heads_sent(p, UPIPE_A2A_Q, i) : upipe_plan_q(p, i, rank).count;
    return sum;
}

/* The inverse of upipe_plan_q: which stage and rank own a query head. Returns the heads of that stage and rank. */
UPIPE_API upipe_head_range upipe_plan_q_place(const upipe_plan *p, int head, int *stage, int *rank)
{
    int ranks = p->desc.ranks, m = p->per_rank;
    if (p->schedule == UPIPE_GROUP) {
        int kv = head / p->group;
        *rank = kv % ranks;
        *stage = kv / ranks * p->steps + head % p->group / m;
    } else if (p->schedule == UPIPE_SPLIT) {
        int each = p->desc.heads / ranks;
        *rank = head / each;
        *stage = head % each / m;
    } else if (p->schedule == UPIPE_UNEVEN) {
        upipe_head_range q;
        *rank = (int)(((int64_t)head * ranks + ranks - 1) / p->desc.heads);
        while (*rank >= ranks || upipe_cut(p->desc.heads, ranks, *rank) > head) --*rank;
        for (*stage = 0;; ++*stage) {
            q = upipe_plan_q(p, *stage, *rank);
            if (head < q.first + q.count) return q;
        }
    } else {
        *rank = head / m % ranks;
        *stage = head / m / ranks;
    }
    return upipe_plan_q(p, *stage, *rank);
}

/* Heads in a stage's buffer of all ranks before a rank's own. */
UPIPE_API int upipe_plan_offset(const upipe_plan *p, upipe_a2a_heads which, int stage, int rank)
{
    upipe_head_range before = upipe_head_range_make(0, 0), s;
    int sum = 0, r;
    if (which == UPIPE_A2A_Q && p->schedule != UPIPE_UNEVEN) return rank * p->per_rank;
    for (r = 0; r <= rank; ++r) {
        s = upipe_plan_part(p, which, stage, r);
        if (r > 0 && !upipe_plan_same_block(which, before, s)) sum += before.count;
        before = s;
    }
    return sum;
}

/* Tokens of a sequence on a rank of the team, and the first of them among the team's. */
UPIPE_API int64_t upipe_plan_tokens(const upipe_plan *p, int rank, int64_t *first)
{
    *first = upipe_cut(p->team_tokens, p->desc.ranks, rank);
    return upipe_cut(p->team_tokens, p->desc.ranks, rank + 1) - *first;
}

/* Bytes of this rank's tokens x heads x dim, in the storage type. */
UPIPE_API size_t upipe_plan_rows_bytes(const upipe_plan *p, int64_t heads, int dim)
{
    return (size_t)(p->rows * heads * dim) * upipe_dtype_bytes(p->desc.dtype);
}

/* Bytes of the team's tokens x heads x dim, in the storage type. */
UPIPE_API size_t upipe_plan_team_bytes(const upipe_plan *p, int64_t heads, int dim)
{
    return (size_t)(p->team_tokens * p->desc.batch * heads * dim) * upipe_dtype_bytes(p->desc.dtype);
}

/* One unit of the paper's tables: rows * model_dim elements of the storage type, in bytes. */
UPIPE_API size_t upipe_plan_unit_bytes(const upipe_plan *p)
{
    return (size_t)(p->rows * p->desc.model_dim) * upipe_dtype_bytes(p->desc.dtype);
}

#endif

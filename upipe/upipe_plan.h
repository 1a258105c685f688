/* upipe_plan.h -- the schedule in closed form: which heads in which stage        layer 2, includes shard
 *
 * A description of the run goes in, numbers come out. Nothing is allocated and nothing runs.
 *
 *     upipe_plan_desc d = {0};
 *     d.tokens = 1 << 20; d.ranks = 8; d.heads = 32; d.kv_heads = 8; d.head_dim = 128;     rest: defaults
 *     upipe_plan p;
 *     upipe_plan_init(&p, &d, &err);                    p.stages = 4: UPipe with the smallest chunk, U = C
 *
 * DeepSpeed-Ulysses is the plan with chunk = heads: one stage. Ring attention is the plan with one rank in
 * its team and R in its ring, in one stage. C ranks in the team and R in the ring make USP, or UPipe over a
 * ring.
 *
 * Letters of the paper: S tokens, C ranks, R ring, H heads, Hkv kv_heads, G = H/Hkv, U chunk, m = U/C heads a
 * rank and stage, nu = H/U stages, gamma = 1 + 2/G. T = S/(C*R) tokens of a sequence on a rank. rows =
 * batch * T. A unit is rows * model_dim elements.
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
#ifndef UPIPE_PLAN_H
#define UPIPE_PLAN_H

#include "upipe_shard.h"

typedef enum upipe_schedule {
    UPIPE_GROUP,
    UPIPE_WHOLE,
    UPIPE_SPLIT,
    UPIPE_IN_ORDER,
    UPIPE_UNEVEN
} upipe_schedule;

/* upipe_ring_mode -- how K and V of the ring's other ranks reach a rank's queries
 *   P2P         they are sent round while a round's stages attend together: Q', O of all its stages are held
 *               at once
 *   ALL_GATHER  those of a round are gathered and held: R times K' and V'
 *   AUTO        the mode that holds less in the backward
 */
typedef enum upipe_ring_mode { UPIPE_RING_AUTO, UPIPE_RING_P2P, UPIPE_RING_ALL_GATHER } upipe_ring_mode;

enum {
    UPIPE_STAGES_MAX = 256,
    UPIPE_RANKS_MAX = 1024 /* of a team, and of a ring: functions of a plan walk all of them */
};

/* upipe_plan_desc -- what to run. Zero means the default, which stands behind the semicolon
 *   tokens         S, of the whole sequence; any number >= ranks * ring (2 * ring with ZIGZAG)
 *   batch          sequences side by side; 1
 *   ranks          C, of the all-to-all; 1
 *   rank           this rank of them. Matters where tokens or heads do not divide, or with a ring: then each
 *                  rank has a plan of its own
 *   ring           R, ranks of the ring; 1
 *   ring_rank      this rank of them
 *   ring_inner     ranks of an inner ring, neighbours in the ring (those of a node): a double ring; 0 = none
 *   ring_mode      see upipe_ring_mode
 *   ring_prefetch  nonzero, with ALL_GATHER alone: the next round's K and V are gathered while the last stage
 *                  of a round attends (a second buffer). Needs rounds that all ranks share. No effect with
 *                  one round
 *   overlap        nonzero: while a stage attends, ctx->side_stream loads the next stage and stores the
 *                  previous one (a second set of a stage's buffers). Not with a ring, nor with uneven heads
 *                  in several stages. In segments: see upipe_fpdt
 *   layout         how the ring shares tokens
 *   heads          H
 *   kv_heads       Hkv; heads
 *   head_dim       d, of Q and K
 *   v_dim          of V and O; head_dim
 *   model_dim      D; heads * head_dim
 *   chunk          U, query heads a stage over all ranks, a multiple of ranks, or all heads; ranks
 *   naive          nonzero: heads in their order, K and V sent again in every stage (the paper's strawman)
 *   dtype          storage of activations and weights
 */
typedef struct upipe_plan_desc {
    int64_t tokens, batch;
    int64_t model_dim;
    int ranks, rank, ring, ring_rank, ring_inner, ring_prefetch, overlap;
    int heads, kv_heads, head_dim, v_dim, chunk, naive;
    upipe_ring_mode ring_mode;
    upipe_layout layout;
    upipe_dtype dtype;
} upipe_plan_desc;

typedef struct upipe_plan {
    upipe_plan_desc desc; /* with the defaults filled in; ring_mode is never AUTO */
    upipe_shard held;     /* tokens of a sequence that this rank's team holds */
    upipe_shard shard;    /* of these, this rank's */
    int64_t local;        /* T: tokens of one sequence on this rank */
    int64_t rows;         /* batch * T */
    int64_t seq;          /* tokens of a sequence that the team holds: S/R */
    int group;            /* G */
    int stages;           /* nu */
    int per_rank;         /* m: query heads a rank and stage, at most */
    int kv_per_rank;      /* key/value heads a rank and round, at most */
    int rounds, steps;    /* stages = rounds * steps */
    int width;            /* stages that attend together: steps in a P2P ring, otherwise 1 */
    int overlap;          /* stages overlap: asked for, and there are several */
    /* traits: what the code of the stages asks of a plan, whatever schedule or ring mode is behind it */
    int kv_rounds_shared;    /* by all ranks; otherwise K', V' have one buffer for all stages */
    int kv_grads_partial;    /* ranks or stages share kv heads: gradients are sums of partial ones */
    int kv_grads_accumulate; /* these sums continue over stages, in f32, until the last one */
    int kv_gathered;         /* K', V' of all ranks of the ring are held */
    int kv_prefetched; /* those of the next round are gathered while the last stage of a round attends */
    upipe_schedule schedule;
} upipe_plan;

typedef struct upipe_stage {
    int round, step;
    int kv_fresh; /* K and V are fetched before this stage's attention, on some rank */
    int kv_last;  /* no later stage reads them */
} upipe_stage;

/* Heads first .. first + count - 1. */
typedef struct upipe_span {
    int first, count;
} upipe_span;

/* What an all-to-all of a stage moves: Q (and O, dO, dQ); K and V that are fetched; their gradients, sent
 * back. */
typedef enum upipe_a2a_heads { UPIPE_A2A_Q, UPIPE_A2A_KV, UPIPE_A2A_DKV } upipe_a2a_heads;

UPIPE_API upipe_span upi_span_make(int first, int count)
{
    upipe_span s;
    s.first = first;
    s.count = count;
    return s;
}

UPIPE_API upipe_status upi_plan_sizes(const upipe_plan *p, upipe_err *e)
{
    const upipe_plan_desc *d = &p->desc;
    int64_t dim = d->v_dim > d->head_dim ? d->v_dim : d->head_dim, width = (int64_t)d->heads * dim, all;
    /* The largest product is a sum of a few tensors of tokens x (widest row) x 4 bytes: 16 of them are an
     * upper bound. */
    if (d->model_dim > width) width = d->model_dim;
    if ((int64_t)d->ranks * p->per_rank * dim > width) width = (int64_t)d->ranks * p->per_rank * dim;
    if (!upipe_mul(&all, d->tokens, d->batch) || !upipe_mul(&all, all, width) || !upipe_mul(&all, all, 64) ||
        !upipe_mul(&all, all, p->group > 1 ? 2 : 6))
        return upipe_fail(e, UPIPE_ERR_OVERFLOW,
                          "%lld tokens x %lld sequences x %lld elements overflow 63 bits",
                          (long long)d->tokens, (long long)d->batch, (long long)width);
    return UPIPE_OK;
}

#include "plan/uneven.h"

/* ---- making a plan ---- */

/* The schedule of a description whose numbers make sense. */
UPIPE_API upipe_status upi_plan_schedule(upipe_plan *p, upipe_err *e)
{
    const upipe_plan_desc *d = &p->desc;
    const int more = d->chunk % d->ranks != 0; /* all heads in one stage, where some ranks have one more */
    const int group = p->group, m = d->chunk / d->ranks + more;
    const int even = !more && d->heads % d->chunk == 0;
    p->per_rank = m;
    p->stages = even ? d->heads / (m * d->ranks) : 0;
    p->kv_per_rank = m > group ? m / group : 1;
    p->rounds = p->stages;
    p->steps = 1;
    if (even && m % group == 0) {
        p->schedule = UPIPE_WHOLE; /* the naive order is the same one here */
    } else if (d->naive) {
        if (!even || group % m != 0)
            return upipe_fail(e, UPIPE_ERR_UNSUPPORTED,
                              "%d heads in chunks of %d over %d ranks do not fit groups of %d in order",
                              d->heads, d->chunk, d->ranks, group);
        p->schedule = UPIPE_IN_ORDER;
        p->kv_grads_partial = 1;
    } else if (even && d->kv_heads % d->ranks == 0 && group % m == 0) {
        p->schedule = UPIPE_GROUP;
        p->rounds = d->kv_heads / d->ranks;
        p->steps = group / m;
    } else if (even && d->ranks % d->kv_heads == 0) {
        p->schedule = UPIPE_SPLIT;
        p->rounds = 1;
        p->steps = p->stages;
        p->kv_grads_partial = 1;
    } else {
        upi_plan_uneven(p);
    }
    if (p->stages > UPIPE_STAGES_MAX)
        return upipe_fail(e, UPIPE_ERR_UNSUPPORTED, "%d heads in chunks of %d are more than %d stages",
                          d->heads, d->chunk, UPIPE_STAGES_MAX);
    return UPIPE_OK;
}

/* AUTO: whether a ring holds less with K and V gathered. R times K', V' and their gradients in f32, against
 * Q', dO', dQ' and delta of the round's other stages and the buffers of the P2P ring. */
UPIPE_API upipe_ring_mode upi_plan_ring_mode(const upipe_plan *p)
{
    const upipe_plan_desc *d = &p->desc;
    int64_t e = (int64_t)upipe_dtype_bytes(d->dtype), both = (int64_t)d->head_dim + d->v_dim;
    int64_t kv = p->kv_per_rank * both * (e + 4), q = p->per_rank * (both * e + d->head_dim * (int64_t)4 + 8);
    if (p->schedule == UPIPE_UNEVEN) return UPIPE_RING_ALL_GATHER;
    return (d->ring - 1) * kv < (p->steps - 1) * q + 2 * kv ? UPIPE_RING_ALL_GATHER : UPIPE_RING_P2P;
}

/* What the ring adds to a plan: which rank holds which tokens, and how K and V are sent. */
UPIPE_API upipe_status upi_plan_ring(upipe_plan *p, upipe_err *e)
{
    upipe_plan_desc *d = &p->desc;
    int64_t least = (int64_t)d->ranks * d->ring * (d->layout == UPIPE_ZIGZAG && d->ring > 1 ? 2 : 1);
    if (d->tokens < least)
        return upipe_fail(e, UPIPE_ERR_ARG,
                          "%lld tokens are fewer than %lld, one for each part of %d ranks%s",
                          (long long)d->tokens, (long long)least, d->ranks * d->ring,
                          d->layout == UPIPE_ZIGZAG && d->ring > 1 ? ", two parts a rank" : "");
    if (d->ring == 1 && (d->ring_inner > 1 || d->ring_mode != UPIPE_RING_AUTO))
        return upipe_fail(e, UPIPE_ERR_ARG, "an inner ring of %d or ring mode %d without a ring",
                          d->ring_inner, (int)d->ring_mode);
    if (d->ring % (d->ring_inner > 0 ? d->ring_inner : 1) != 0)
        return upipe_fail(e, UPIPE_ERR_ARG, "a ring of %d does not divide into inner rings of %d", d->ring,
                          d->ring_inner);
    if (d->ring > 1 && d->ring_mode == UPIPE_RING_AUTO && d->ring_inner <= 1)
        d->ring_mode = upi_plan_ring_mode(p);
    if (d->ring_inner > 1 && d->ring_mode == UPIPE_RING_AUTO) d->ring_mode = UPIPE_RING_P2P;
    if (d->ring_inner > 1 && d->ring_mode == UPIPE_RING_ALL_GATHER)
        return upipe_fail(e, UPIPE_ERR_ARG, "an inner ring of %d, but K and V are gathered", d->ring_inner);
    if (d->ring > 1 && d->ring_mode == UPIPE_RING_P2P && p->schedule == UPIPE_UNEVEN && p->stages > 1)
        return upipe_fail(
            e, UPIPE_ERR_UNSUPPORTED,
            "%d/%d heads over %d ranks in %d stages have no common rounds: K and V cannot shift round a "
            "ring, but be gathered",
            d->heads, d->kv_heads, d->ranks, p->stages);
    if (d->ring_prefetch && (d->ring == 1 || d->ring_mode != UPIPE_RING_ALL_GATHER))
        return upipe_fail(e, UPIPE_ERR_ARG, "K and V are to be gathered ahead, but are not gathered");
    if (d->ring_prefetch && p->schedule == UPIPE_UNEVEN)
        return upipe_fail(
            e, UPIPE_ERR_UNSUPPORTED,
            "%d/%d heads over %d ranks in %d stages have no common rounds to gather K and V ahead", d->heads,
            d->kv_heads, d->ranks, p->stages);
    if (d->overlap && d->ring > 1)
        return upipe_fail(e, UPIPE_ERR_UNSUPPORTED, "stages are to overlap, but there is a ring of %d ranks",
                          d->ring);
    if (d->overlap && p->schedule == UPIPE_UNEVEN && p->stages > 1)
        return upipe_fail(
            e, UPIPE_ERR_UNSUPPORTED,
            "%d/%d heads over %d ranks in %d stages have no common rounds: stages cannot overlap", d->heads,
            d->kv_heads, d->ranks, p->stages);
    p->overlap = d->overlap && p->stages > 1;
    p->kv_rounds_shared = p->schedule != UPIPE_UNEVEN;
    p->kv_grads_accumulate = p->schedule == UPIPE_IN_ORDER || p->schedule == UPIPE_UNEVEN;
    p->kv_gathered = d->ring > 1 && d->ring_mode == UPIPE_RING_ALL_GATHER;
    p->kv_prefetched = d->ring_prefetch && p->rounds > 1;
    p->width = d->ring > 1 && d->ring_mode == UPIPE_RING_P2P ? p->steps : 1;
    p->held = upipe_shard_ring(d->layout, d->tokens, d->ring, d->ring_rank);
    p->shard = upipe_shard_team(&p->held, d->ranks, d->rank);
    p->seq = p->held.n;
    p->local = p->shard.n;
    p->rows = p->local * d->batch;
    return UPIPE_OK;
}

/* The fields that are enums: nothing loads them before. */
UPIPE_API upipe_status upi_plan_enums(const upipe_plan_desc *d, upipe_err *e)
{
    const int dtype = upi_enum_number(&d->dtype, sizeof d->dtype);
    const int layout = upi_enum_number(&d->layout, sizeof d->layout);
    const int mode = upi_enum_number(&d->ring_mode, sizeof d->ring_mode);
    if (dtype < 0 || dtype > UPIPE_F16)
        return upipe_fail(e, UPIPE_ERR_ARG, "data type %d is none of f32, bf16 and f16", dtype);
    if (layout < 0 || layout >= UPIPE_LAYOUTS)
        return upipe_fail(e, UPIPE_ERR_ARG, "layout %d is none of contiguous, zigzag and striped", layout);
    if (mode < 0 || mode > UPIPE_RING_ALL_GATHER)
        return upipe_fail(e, UPIPE_ERR_ARG, "ring mode %d is none of auto, p2p and all-gather", mode);
    return UPIPE_OK;
}

/* upipe_plan_init -- checks the description, fills in its defaults, derives the schedule
 *   errors  ARG (sizes that make no sense, which the sentence names; an inner ring, a ring mode or
 *           ring_prefetch that does not fit the others), UNSUPPORTED (heads that have no naive order; too
 *           many stages or ranks; a P2P ring, ring_prefetch or overlap without common rounds; overlap with a
 *           ring), OVERFLOW
 *   paper   sections 3.3 and 4.1
 */
UPIPE_API upipe_status upipe_plan_init(upipe_plan *p, const upipe_plan_desc *desc, upipe_err *e)
{
    upipe_plan_desc d = *desc;
    memset(p, 0, sizeof *p);
    if (d.batch == 0) d.batch = 1;
    if (d.ranks == 0) d.ranks = 1;
    if (d.ring == 0) d.ring = 1;
    if (d.kv_heads == 0) d.kv_heads = d.heads;
    if (d.v_dim == 0) d.v_dim = d.head_dim;
    if (d.chunk == 0) d.chunk = d.ranks < d.heads ? d.ranks : d.heads;
    if (d.tokens < 1 || d.batch < 1 || d.ranks < 1 || d.ring < 1 || d.heads < 1 || d.kv_heads < 1 ||
        d.head_dim < 1 || d.v_dim < 1 || d.chunk < 1 || d.model_dim < 0 || d.ring_inner < 0)
        return upipe_fail(
            e, UPIPE_ERR_ARG,
            "a plan needs positive sizes: tokens %lld, batch %lld, ranks %d, ring %d (inner %d), heads %d, kv heads %d, "
            "head dim %d, v dim %d, chunk %d, model dim %lld",
            (long long)d.tokens, (long long)d.batch, d.ranks, d.ring, d.ring_inner, d.heads, d.kv_heads,
            d.head_dim, d.v_dim, d.chunk, (long long)d.model_dim);
    if (d.rank < 0 || d.rank >= d.ranks || d.ring_rank < 0 || d.ring_rank >= d.ring)
        return upipe_fail(e, UPIPE_ERR_ARG, "rank %d of %d, ring rank %d of %d", d.rank, d.ranks, d.ring_rank,
                          d.ring);
    UPIPE_TRY(upi_plan_enums(desc, e));
    if (d.ranks > UPIPE_RANKS_MAX || d.ring > UPIPE_RANKS_MAX)
        return upipe_fail(e, UPIPE_ERR_UNSUPPORTED, "a team of %d ranks and a ring of %d, at most %d each",
                          d.ranks, d.ring, UPIPE_RANKS_MAX);
    if ((int64_t)d.heads * (d.head_dim > d.v_dim ? d.head_dim : d.v_dim) > INT32_MAX ||
        d.model_dim > INT32_MAX)
        return upipe_fail(e, UPIPE_ERR_OVERFLOW,
                          "rows of %d heads of %d elements, or of model dim %lld leave 31 bits", d.heads,
                          d.head_dim > d.v_dim ? d.head_dim : d.v_dim, (long long)d.model_dim);
    if (d.model_dim == 0) d.model_dim = (int64_t)d.heads * d.head_dim;
    if (d.heads % d.kv_heads != 0)
        return upipe_fail(e, UPIPE_ERR_ARG, "%d query heads are no multiple of %d key/value heads", d.heads,
                          d.kv_heads);
    if (d.chunk != d.heads && d.chunk % d.ranks != 0)
        return upipe_fail(e, UPIPE_ERR_ARG, "a chunk of %d heads does not divide into %d ranks", d.chunk,
                          d.ranks);
    if (d.chunk > d.heads) return upipe_fail(e, UPIPE_ERR_ARG, "a chunk of %d of %d heads", d.chunk, d.heads);
    p->desc = d;
    p->group = d.heads / d.kv_heads;
    UPIPE_TRY(upi_plan_schedule(p, e));
    UPIPE_TRY(upi_plan_sizes(p, e)); /* before any product is formed */
    return upi_plan_ring(p, e);
}

/* ---- heads ---- */

/* Query heads of a rank in a stage. Every head comes in exactly one stage of one rank. */
UPIPE_API upipe_span upipe_plan_q(const upipe_plan *p, int stage, int rank)
{
    int ranks = p->desc.ranks, m = p->per_rank, fresh;
    if (p->schedule == UPIPE_UNEVEN) return upi_uneven_stage(p, stage, rank, &fresh);
    if (p->schedule == UPIPE_GROUP)
        return upi_span_make((stage / p->steps * ranks + rank) * p->group + stage % p->steps * m, m);
    if (p->schedule == UPIPE_SPLIT) return upi_span_make(rank * (p->desc.heads / ranks) + stage * m, m);
    return upi_span_make((stage * ranks + rank) * m, m);
}

/* Key/value heads that a rank's query heads of a stage read. */
UPIPE_API upipe_span upipe_plan_kv(const upipe_plan *p, int stage, int rank)
{
    return upi_kv_of(p, upipe_plan_q(p, stage, rank));
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
UPIPE_API upipe_span upipe_plan_part(const upipe_plan *p, upipe_a2a_heads which, int stage, int rank)
{
    if (which == UPIPE_A2A_Q) return upipe_plan_q(p, stage, rank);
    if (which == UPIPE_A2A_KV ? upipe_plan_kv_fresh(p, stage, rank) : upipe_plan_kv_last(p, stage, rank))
        return upipe_plan_kv(p, stage, rank);
    return upi_span_make(0, 0);
}

/* Whether a rank reads the same block of the send buffer as the rank before: K and V that several ranks need
 * are projected once. */
UPIPE_API int upi_same_block(upipe_a2a_heads which, upipe_span before, upipe_span s)
{
    return which == UPIPE_A2A_KV && s.count > 0 && s.count == before.count && s.first == before.first;
}

/* Heads in a stage's buffer of all ranks: the send buffer, or for DKV the receive buffer. */
UPIPE_API int upipe_plan_buffer(const upipe_plan *p, upipe_a2a_heads which, int stage)
{
    upipe_span before = upi_span_make(0, 0);
    int rank, sum = 0;
    for (rank = 0; rank < p->desc.ranks; ++rank) {
        upipe_span s = upipe_plan_part(p, which, stage, rank);
        if (!upi_same_block(which, before, s)) sum += s.count;
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
        sum += rank < 0 ? upipe_plan_buffer(p, UPIPE_A2A_Q, i) : upipe_plan_q(p, i, rank).count;
    return sum;
}

/* The inverse of upipe_plan_q: which stage and rank own a query head. Returns their span. */
UPIPE_API upipe_span upipe_plan_q_place(const upipe_plan *p, int head, int *stage, int *rank)
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
        upipe_span q;
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
    upipe_span before = upi_span_make(0, 0), s;
    int sum = 0, r;
    if (which == UPIPE_A2A_Q && p->schedule != UPIPE_UNEVEN) return rank * p->per_rank;
    for (r = 0; r <= rank; ++r) {
        s = upipe_plan_part(p, which, stage, r);
        if (r > 0 && !upi_same_block(which, before, s)) sum += before.count;
        before = s;
    }
    return sum;
}

/* Tokens of a sequence on a rank of the team, and the first of them among the team's. */
UPIPE_API int64_t upipe_plan_tokens(const upipe_plan *p, int rank, int64_t *first)
{
    *first = upipe_cut(p->seq, p->desc.ranks, rank);
    return upipe_cut(p->seq, p->desc.ranks, rank + 1) - *first;
}

/* Whether the plan of any rank serves all of them. */
UPIPE_API int upipe_plan_even(const upipe_plan *p)
{
    return p->desc.ring == 1 && p->desc.tokens % p->desc.ranks == 0 && p->schedule != UPIPE_UNEVEN;
}

/* Bytes of this rank's tokens x heads x dim, in the storage type. */
UPIPE_API size_t upipe_plan_rows_bytes(const upipe_plan *p, int64_t heads, int dim)
{
    return (size_t)(p->rows * heads * dim) * upipe_dtype_bytes(p->desc.dtype);
}

/* Bytes of the team's tokens x heads x dim, in the storage type. */
UPIPE_API size_t upipe_plan_seq_bytes(const upipe_plan *p, int64_t heads, int dim)
{
    return (size_t)(p->seq * p->desc.batch * heads * dim) * upipe_dtype_bytes(p->desc.dtype);
}

/* One unit of the paper's tables: rows * model_dim elements of the storage type, in bytes. */
UPIPE_API size_t upipe_plan_unit_bytes(const upipe_plan *p)
{
    return (size_t)(p->rows * p->desc.model_dim) * upipe_dtype_bytes(p->desc.dtype);
}

#endif

/* upipe_plan.h -- from a description of a run to its plan: tokens, stages, heads and bytes of a rank
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
 */
#ifndef UPIPE_PLAN_H
#define UPIPE_PLAN_H

#include "upipe_base.h"

/* ---- which tokens of a sequence a rank holds ---- */

/* First the ring's ranks share the sequence, in one of three ways:
 *
 *     CONTIGUOUS  rank r has part r of R
 *     ZIGZAG      of 2R parts rank r has parts r and 2R-1-r: under a causal mask all ranks have equal work
 *     STRIPED     rank r has every R-th token from r on: equal work too
 *
 * Then the all-to-all's ranks cut what their ring rank holds into C parts, in order. Parts differ by one
 * token where the number does not divide: part i of n tokens begins at upipe_cut(n, parts, i).
 *
 *     for (r = 0; r < plan.rows; ++r) input[r] = batch[upipe_plan_row(&plan, r)];
 *
 * A host that loads its data like this is the sharder; nothing is ever permuted over the network.
 */

typedef enum upipe_layout { UPIPE_CONTIGUOUS, UPIPE_ZIGZAG, UPIPE_STRIPED, UPIPE_LAYOUTS } upipe_layout;

/* "contiguous" and so on. */
UPIPE_API const char *upipe_layout_name(upipe_layout layout)
{
    return layout == UPIPE_CONTIGUOUS ? "contiguous" : layout == UPIPE_ZIGZAG ? "zigzag" : "striped";
}

enum { UPIPE_PIECES_MAX = 2 };

/* n rows whose positions are pos, pos + step, ... with the shard's step */
typedef struct upipe_piece {
    int64_t pos, n;
} upipe_piece;

/* upipe_shard -- n rows: those of piece 0, then those of piece 1. Pieces have one row at least. All numbers are of one
 *                size: a plan, which has two shards, is hashed without gaps */
typedef struct upipe_shard {
    int64_t n, step;
    upipe_piece piece[UPIPE_PIECES_MAX];
    int64_t pieces;
} upipe_shard;

/* A piece more: n positions from pos on. None are no piece. */
UPIPE_API void upi_shard_add(upipe_shard *s, int64_t pos, int64_t n)
{
    if (n <= 0) return;
    s->piece[s->pieces].pos = pos;
    s->piece[s->pieces].n = n;
    ++s->pieces;
    s->n += n;
}

/* n neighbouring positions from pos on. */
UPIPE_API upipe_shard upi_shard_range(int64_t pos, int64_t n)
{
    upipe_shard s;
    memset(&s, 0, sizeof s);
    s.step = 1;
    upi_shard_add(&s, pos, n);
    return s;
}

/* What rank r of a ring holds of a sequence of `tokens`. */
UPIPE_API upipe_shard upipe_shard_ring(upipe_layout layout, int64_t tokens, int ranks, int rank)
{
    upipe_shard s;
    memset(&s, 0, sizeof s);
    s.step = 1;
    if (layout == UPIPE_STRIPED) {
        s.step = ranks;
        upi_shard_add(&s, rank, tokens / ranks + (rank < tokens % ranks));
    } else if (layout == UPIPE_ZIGZAG && ranks > 1) {
        int parts = 2 * ranks, mirror = parts - 1 - rank;
        int64_t low = upipe_cut(tokens, parts, rank), high = upipe_cut(tokens, parts, mirror);
        upi_shard_add(&s, low, upipe_cut(tokens, parts, rank + 1) - low);
        upi_shard_add(&s, high, upipe_cut(tokens, parts, mirror + 1) - high);
    } else {
        int64_t low = upipe_cut(tokens, ranks, rank);
        upi_shard_add(&s, low, upipe_cut(tokens, ranks, rank + 1) - low);
    }
    return s;
}

/* Rows first .. first + n - 1 of a shard. */
UPIPE_API upipe_shard upi_shard_rows(const upipe_shard *of, int64_t first, int64_t n)
{
    upipe_shard s;
    int i;
    memset(&s, 0, sizeof s);
    s.step = of->step;
    for (i = 0; i < of->pieces; ++i) {
        int64_t skip = first > 0 ? first : 0, left = of->piece[i].n - skip;
        int64_t count = left < n - s.n ? left : n - s.n;
        upi_shard_add(&s, of->piece[i].pos + skip * of->step, count);
        first -= of->piece[i].n;
    }
    return s;
}

/* Part `rank` of what a ring rank holds. */
UPIPE_API upipe_shard upi_shard_team(const upipe_shard *held, int ranks, int rank)
{
    int64_t first = upipe_cut(held->n, ranks, rank);
    return upi_shard_rows(held, first, upipe_cut(held->n, ranks, rank + 1) - first);
}

/* The position of row i < n. */
UPIPE_API int64_t upipe_shard_pos(const upipe_shard *s, int64_t i)
{
    int piece = s->pieces > 1 && i >= s->piece[0].n;
    return s->piece[piece].pos + (i - (piece ? s->piece[0].n : 0)) * s->step;
}

/* ---- a description, and the plan of it ---- */

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
 *   rank           this rank of them: each rank has a plan of its own
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

/* upipe_buffers -- the block's buffers in bytes, the largest over stages, in the storage type if not said otherwise
 *   slot           of final_out, and of its gradient: Q', O, dO or dQ of a stage
 *   send           a stage's Q before its all-to-all; O' and dQ' before theirs
 *   q o stat       Q', dQ'; O', dO'; lse, delta (f32) of this rank's heads of a stage
 *   k v            K', V' of this rank's heads
 *   kv_send        K or V before its all-to-all
 *   dk dv          gradients of K', V', f32
 *   token_dk token_dv  gradients of K, V of a stage's heads at their tokens
 *   partial        the same for several ranks' shares of them, f32
 *   kv_grad        on the way from dK', dV' to there: partial, or their cast to the storage type; 0 in f32
 *   lse delta      of all stages, f32
 * With a ring:
 *   all_k all_v    K', V' of the whole sequence;  all_dk, all_dv  their gradients, f32
 *   hop_k hop_v    K', V' of another ring rank
 *   sum_o sum_q    sums of O', dQ' of a stage, f32
 */
/* clang-format off */
#define UPI_BUFFERS(X)                                                                                   \
    X(slot)                                                                                              \
    X(send) X(q) X(o) X(stat) X(k) X(v) X(kv_send) X(dk) X(dv) X(token_dk) X(token_dv) X(partial) X(kv_grad) X(lse) \
        X(delta) X(all_k) X(all_v) X(all_dk) X(all_dv) X(hop_k) X(hop_v) X(sum_o) X(sum_q)
/* clang-format on */
typedef struct upipe_buffers {
#define UPI_BUFFERS_FIELD(name) size_t name;
    UPI_BUFFERS(UPI_BUFFERS_FIELD)
#undef UPI_BUFFERS_FIELD
} upipe_buffers;

typedef struct upipe_plan {
    upipe_plan_desc desc;     /* with the defaults filled in; ring_mode is never AUTO */
    upipe_shard team_shard;   /* tokens of a sequence that this rank's team holds */
    upipe_shard shard;        /* of these, this rank's */
    int64_t local;            /* T: tokens of one sequence on this rank */
    int64_t rows;             /* batch * T */
    int64_t team_tokens;      /* tokens of a sequence that the team holds: S/R */
    int64_t team_tokens_most; /* the same of the ring rank that holds most */
    int group;                /* G */
    int stages;               /* nu */
    int per_rank;             /* m: query heads a rank and stage, at most */
    int kv_per_rank;          /* key/value heads a rank and round, at most */
    int rounds, steps;        /* stages = rounds * steps */
    int width;                /* stages that attend together: steps in a P2P ring, otherwise 1 */
    int overlap;              /* stages overlap: asked for, and there are several */
    /* traits: what the code of the stages asks of a plan, whatever schedule or ring mode is behind it */
    int kv_rounds_shared;    /* by all ranks; otherwise K', V' have one buffer for all stages */
    int kv_grads_partial;    /* ranks or stages share kv heads: gradients are sums of partial ones */
    int kv_grads_accumulate; /* these sums continue over stages, in f32, until the last one */
    int kv_gathered;         /* K', V' of all ranks of the ring are held */
    int kv_prefetched; /* those of the next round are gathered while the last stage of a round attends */
    upipe_schedule schedule;
    upipe_buffers buffers; /* bytes of this rank */
    uint64_t seal;         /* hash of all that stands above: what upipe_plan_init made is not changed */
} upipe_plan;

typedef struct upipe_stage {
    int round, step;
    int kv_fresh; /* K and V are fetched before this stage's attention, on some rank */
    int kv_last;  /* no later stage reads them */
} upipe_stage;

/* Heads first .. first + count - 1. */
typedef struct upipe_head_range {
    int first, count;
} upipe_head_range;

/* What an all-to-all of a stage moves: Q (and O, dO, dQ); K and V that are fetched; their gradients, sent
 * back. */
typedef enum upipe_a2a_heads { UPIPE_A2A_Q, UPIPE_A2A_KV, UPIPE_A2A_DKV } upipe_a2a_heads;

/* upipe_plan_row -- the row of the whole batch, [batch][tokens], that is row r of this rank
 *   r        0 <= r < p->rows: token r % T of this rank's part of sequence r / T
 *   returns  b * tokens + the token's position in sequence b: % desc.tokens is the position, / desc.tokens is b
 */
UPIPE_API int64_t upipe_plan_row(const upipe_plan *p, int64_t r)
{
    return r / p->local * p->desc.tokens + upipe_shard_pos(&p->shard, r % p->local);
}

/* ---- which heads a rank attends in which stage ---- */

/* Schedules (section 4.1 of the paper), with the first head of each run. Query head h always reads key/value
 * head h/G; weights stay in their order:
 *
 *     GROUP    C <= Hkv, m divides G  round j, step t: kv head j*C + r,           q heads (j*C + r)*G + t*m
 *     WHOLE    m a multiple of G      stage i:         kv heads (i*C + r)*m/G,    q heads (i*C + r)*m
 *     SPLIT    C > Hkv                all stages:      kv head r / (C/Hkv),       q heads r*(H/C) + t*m
 *     IN_ORDER the naive order        stage i:         the kv heads it needs,     q heads i*U + r*m
 *     UNEVEN   all other numbers      rank r has the q heads r*H/C .. (r+1)*H/C - 1, rounded down; a stage
 *                                     has up to m of them: the rest of a group, or whole groups
 *              G = 1                  stage i has the heads from i*C*m on, C*m of them or the n that are left; rank r
 *                                     has those from r*n/C on, rounded down
 *
 * A round is the stages that share K and V; they are sent in its first stage only. In UNEVEN each rank has
 * rounds of its own: a stage sends K and V to those ranks alone that need other heads than before. With G = 1 each
 * stage is a round.
 */

/* The heads first .. first + count - 1. */
UPIPE_API upipe_head_range upi_head_range_make(int first, int count)
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

/* Uneven heads that the ranks share in order: all, or with G = 1 those of the stage, none after the last one. */
UPIPE_API upipe_head_range upi_uneven_shared(const upipe_plan *p, int stage)
{
    const int64_t all = p->desc.heads, n = (int64_t)p->desc.ranks * p->per_rank, first = stage * n;
    if (p->group > 1) return upi_head_range_make(0, (int)all);
    if (first >= all) return upi_head_range_make((int)all, 0);
    return upi_head_range_make((int)first, (int)(n < all - first ? n : all - first));
}

/* Query heads of a rank in a stage; count 0 after its last one. *fresh: their K and V must be fetched.
 *
 * The rank has the heads begin .. end - 1; with G = 1 in one stage. Otherwise they come in blocks: as many whole groups
 * as fit into a stage, or one group, in parts of m heads, where none does. The first block has what is left of the group
 * that `begin` cuts, and whole groups if they fit. Of 48 heads in groups of 6 rank 1 of 6 has 8 .. 15; with m = 3 its
 * stages are 8 9 10 | 11 | 12 13 14 | 15. */
UPIPE_API upipe_head_range upi_uneven_stage(const upipe_plan *p, int stage, int rank, int *fresh)
{
    const int64_t m = p->per_rank, group = p->group;
    const upipe_head_range shared = upi_uneven_shared(p, stage);
    const int64_t begin = shared.first + upipe_cut(shared.count, p->desc.ranks, rank);
    const int64_t end = shared.first + upipe_cut(shared.count, p->desc.ranks, rank + 1);
    const int64_t rest = group - begin % group;
    const int64_t first_block = m < group ? rest : rest + (m - rest) / group * group;
    const int64_t block = m < group ? group : m / group * group;
    const int64_t first_parts = upi_div_up(first_block, m), parts = upi_div_up(block, m);
    const int64_t after = stage - first_parts,
                  n = after / parts; /* stages and blocks after the first block */
    const int64_t at = after < 0 ? begin : begin + first_block + n * block;
    const int64_t part = after < 0 ? stage : after % parts, left = end - at;
    const int64_t full = after < 0 ? first_block : block, size = left <= m || left < full ? left : full;
    const int done =
        after >= 0 && left + (n > 0 ? block : first_block) <= m; /* the block before was all that was left */
    const int64_t first = at + part * m, count = size - part * m < m ? size - part * m : m;
    *fresh = group == 1 && end > begin;
    if (group == 1) return upi_head_range_make((int)begin, (int)(end - begin));
    if (done || count <= 0) return upi_head_range_make((int)end, 0);
    *fresh = first == begin || first % group == 0;
    return upi_head_range_make((int)first, (int)count);
}

/* Query heads of a rank in a stage. Every head comes in exactly one stage of one rank. */
UPIPE_API upipe_head_range upipe_plan_q(const upipe_plan *p, int stage, int rank)
{
    int ranks = p->desc.ranks, m = p->per_rank, fresh;
    if (p->schedule == UPIPE_UNEVEN) return upi_uneven_stage(p, stage, rank, &fresh);
    if (p->schedule == UPIPE_GROUP)
        return upi_head_range_make((stage / p->steps * ranks + rank) * p->group + stage % p->steps * m, m);
    if (p->schedule == UPIPE_SPLIT) return upi_head_range_make(rank * (p->desc.heads / ranks) + stage * m, m);
    return upi_head_range_make((stage * ranks + rank) * m, m);
}

/* Key/value heads that a rank's query heads of a stage read. */
UPIPE_API upipe_head_range upipe_plan_kv(const upipe_plan *p, int stage, int rank)
{
    const upipe_head_range q = upipe_plan_q(p, stage, rank);
    const int first = q.first / p->group;
    return upi_head_range_make(first, q.count > 0 ? (q.first + q.count - 1) / p->group + 1 - first : 0);
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
    return upi_head_range_make(0, 0);
}

/* Whether a rank reads the same block of the send buffer as the rank before: K and V that several ranks need
 * are projected once. */
UPIPE_API int upi_plan_same_block(upipe_a2a_heads which, upipe_head_range before, upipe_head_range s)
{
    return which == UPIPE_A2A_KV && s.count > 0 && s.count == before.count && s.first == before.first;
}

/* Heads in a stage's buffer for all ranks: the send buffer, or for DKV the buffer that receives. */
UPIPE_API int upipe_plan_heads_sent(const upipe_plan *p, upipe_a2a_heads which, int stage)
{
    upipe_head_range before = upi_head_range_make(0, 0);
    int rank, sum = 0;
    for (rank = 0; rank < p->desc.ranks; ++rank) {
        upipe_head_range s = upipe_plan_part(p, which, stage, rank);
        if (!upi_plan_same_block(which, before, s)) sum += s.count;
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
        upipe_head_range q, shared;
        *stage = p->group > 1 ? 0 : (int)(head / ((int64_t)m * ranks));
        shared = upi_uneven_shared(p, *stage);
        *rank = (int)(((int64_t)(head - shared.first) * ranks + ranks - 1) / shared.count);
        while (*rank >= ranks || shared.first + upipe_cut(shared.count, ranks, *rank) > head) --*rank;
        for (;; ++*stage) {
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
    upipe_head_range before = upi_head_range_make(0, 0), s;
    int sum = 0, r;
    if (which == UPIPE_A2A_Q && p->schedule != UPIPE_UNEVEN) return rank * p->per_rank;
    for (r = 0; r <= rank; ++r) {
        s = upipe_plan_part(p, which, stage, r);
        if (r > 0 && !upi_plan_same_block(which, before, s)) sum += before.count;
        before = s;
    }
    return sum;
}

/* K/V heads whose gradients a round's last stage leaves at the tokens: its own, or all where they are shared. */
UPIPE_API int upi_plan_heads_at_tokens(const upipe_plan *p, int stage)
{
    return p->kv_grads_partial ? p->desc.kv_heads : upipe_plan_heads_sent(p, UPIPE_A2A_DKV, stage);
}

/* Tokens of a sequence on a rank of the team, and the first of them among the team's. */
UPIPE_API int64_t upi_plan_tokens(const upipe_plan *p, int rank, int64_t *first)
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
UPIPE_API size_t upi_plan_team_bytes(const upipe_plan *p, int64_t heads, int dim)
{
    return (size_t)(p->team_tokens * p->desc.batch * heads * dim) * upipe_dtype_bytes(p->desc.dtype);
}

/* One unit of the paper's tables: rows * model_dim elements of the storage type, in bytes. */
UPIPE_API size_t upipe_plan_unit_bytes(const upipe_plan *p)
{
    return (size_t)(p->rows * p->desc.model_dim) * upipe_dtype_bytes(p->desc.dtype);
}

/* ---- bytes that a rank sends to its team ---- */

/* Bytes that a rank sends to the others in one all-to-all, to heads or to tokens; `each`: bytes of a token
 * and head. */
UPIPE_API int64_t upi_plan_sent_heads(const upipe_plan *p, upipe_a2a_heads which, int stage, int to_tokens,
                                      int64_t each)
{
    const int me = p->desc.rank, mine = upipe_plan_part(p, which, stage, me).count;
    int64_t sum = 0, first;
    int rank;
    for (rank = 0; rank < p->desc.ranks; ++rank) {
        if (rank == me) continue;
        if (to_tokens)
            sum += mine * upi_plan_tokens(p, rank, &first);
        else
            sum += upipe_plan_part(p, which, stage, rank).count * p->local;
    }
    return sum * p->desc.batch * each;
}

/* upi_plan_sent_stage -- bytes that this rank sends to its team in a stage
 *   backward  0: Q, K, V, O.  1: Q, K, V again (they are recomputed), dO, delta, dQ, dK, dV.  2: and O, for a
 *             compute table with attn_reads_o
 * Gradients of a key/value head that several ranks share are sent in f32, since they are summed afterwards.
 */
UPIPE_API int64_t upi_plan_sent_stage(const upipe_plan *p, int stage, int backward)
{
    int64_t e = (int64_t)upipe_dtype_bytes(p->desc.dtype), d = p->desc.head_dim, v_dim = p->desc.v_dim, sum;
    sum = upi_plan_sent_heads(p, UPIPE_A2A_Q, stage, 0, d * e);
    sum += upi_plan_sent_heads(p, UPIPE_A2A_KV, stage, 0, (d + v_dim) * e);
    if (!backward) return sum + upi_plan_sent_heads(p, UPIPE_A2A_Q, stage, 1, v_dim * e);
    sum += upi_plan_sent_heads(p, UPIPE_A2A_Q, stage, 0, backward * v_dim * e + 4) +
           upi_plan_sent_heads(p, UPIPE_A2A_Q, stage, 1, d * e);
    return sum + upi_plan_sent_heads(p, UPIPE_A2A_DKV, stage, 1, (d + v_dim) * (p->kv_grads_partial ? 4 : e));
}

/* Bytes that this rank sends to its team in all stages; backward as in upi_plan_sent_stage. */
UPIPE_API int64_t upipe_plan_sent(const upipe_plan *p, int backward)
{
    int64_t sum = 0;
    int i;
    for (i = 0; i < p->stages; ++i) sum += upi_plan_sent_stage(p, i, backward);
    return sum;
}

#include "parts/plan.h"

/* Each buffer as large as the larger one of two plans'. */
UPIPE_API upipe_buffers upi_buffers_max(upipe_buffers a, upipe_buffers b)
{
#define UPI_BUFFERS_MAX(name) a.name = upipe_max_bytes(a.name, b.name);
    UPI_BUFFERS(UPI_BUFFERS_MAX)
#undef UPI_BUFFERS_MAX
    return a;
}

/* upipe_plan_init -- checks the description, fills in its defaults, derives the schedule
 *   p       written; not changed afterwards, or the calls refuse it
 *   errors  ARG (NULL; sizes that make no sense, which the sentence names; an inner ring, a ring mode or
 *           ring_prefetch that does not fit the others), UNSUPPORTED (heads that have no naive order; too
 *           many stages or ranks; a P2P ring, ring_prefetch or overlap with uneven heads; overlap with a
 *           ring), OVERFLOW
 *   paper   sections 3.3 and 4.1
 */
UPIPE_API upipe_status upipe_plan_init(upipe_plan *p, const upipe_plan_desc *desc, upipe_err *e)
{
    upipe_plan_desc d;
    if (p == NULL || desc == NULL) return upipe_fail(e, UPIPE_ERR_ARG, "the plan or desc is NULL");
    d = *desc;
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
    UPIPE_TRY(upi_plan_ring(p, e));
    p->buffers = upi_plan_buffers(p);
    p->seal = upipe_hash_bytes(UPIPE_HASH, p, offsetof(upipe_plan, seal));
    return UPIPE_OK;
}

#endif

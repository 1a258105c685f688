/* upipe_plan.h -- which heads when, how many bytes: the schedule in closed form        layer 1, includes base
 *
 * A description of the run goes in, numbers come out; nothing is allocated and nothing runs.
 *
 *     upipe_plan_desc d = {0};
 *     d.tokens = 1 << 20; d.ranks = 8; d.heads = 32; d.kv_heads = 8; d.head_dim = 128;     rest: defaults
 *     upipe_plan p;
 *     upipe_plan_init(&p, &d, &err);                    p.stages = 4: UPipe with the smallest chunk, U = C
 *
 * DeepSpeed-Ulysses is the plan with chunk = heads: one stage.
 *
 * Letters of the paper: S tokens, C ranks, H heads, Hkv kv_heads, G = H/Hkv, U chunk, m = U/C heads a rank
 * and stage, nu = H/U stages, gamma = 1 + 2/G. T = S/C. rows = batch * T. A unit is rows * model_dim
 * elements.
 *
 * Schedules (section 4.1 of the paper; query head h always reads key/value head h/G, weights stay in their
 * order):
 *
 *     GROUP  C <= Hkv, m divides G  round j, step t: kv head j*C + r,        query heads (j*C + r)*G + t*m ..
 *     WHOLE  m a multiple of G      stage i:         kv heads (i*C + r)*m/G .., query heads (i*C + r)*m ..
 *     SPLIT  C > Hkv                all stages:      kv head r / (C/Hkv),    query heads r*(H/C) + t*m ..
 *     ORDER  the naive order        stage i:         the kv heads it needs,  query heads i*U + r*m ..
 *
 * A round is the stages over which K and V stay; they travel in its first stage only.
 */
#ifndef UPIPE_PLAN_H
#define UPIPE_PLAN_H

#include "upipe_base.h"

typedef enum upipe_schedule { UPIPE_GROUP, UPIPE_WHOLE, UPIPE_SPLIT, UPIPE_ORDER } upipe_schedule;

enum { UPIPE_STAGES_MAX = 256 };

/* upipe_plan_desc -- what to run. Zero means the default.
 *   tokens      S, of the whole sequence; a multiple of ranks
 *   batch       sequences side by side; 1
 *   ranks       C, of the all-to-all; 1
 *   heads       H
 *   kv_heads    Hkv; heads
 *   head_dim    d
 *   model_dim   D; heads * head_dim
 *   chunk       U, query heads a stage over all ranks; ranks
 *   naive       nonzero: heads in their order, K and V sent again in every stage (the paper's strawman)
 *   dtype       storage of activations and weights
 */
typedef struct upipe_plan_desc {
    int64_t tokens, batch;
    int64_t model_dim;
    int ranks, heads, kv_heads, head_dim, chunk, naive;
    upipe_dtype dtype;
} upipe_plan_desc;

typedef struct upipe_plan {
    upipe_plan_desc desc; /* with the defaults filled in */
    int64_t local;        /* T: tokens of one sequence on a rank */
    int64_t rows;         /* batch * T */
    int group;            /* G */
    int stages;           /* nu */
    int per_rank;         /* m: query heads a rank and stage */
    int kv_per_rank;      /* key/value heads a rank and round */
    int rounds, steps;    /* stages = rounds * steps */
    int kv_partial;       /* several ranks or stages share a kv head: its gradient is a sum of partial ones */
    upipe_schedule schedule;
} upipe_plan;

typedef struct upipe_stage {
    int round, step;
    int kv_fresh; /* K and V are fetched before this stage's attention */
    int kv_last;  /* no later stage reads them */
} upipe_stage;

UPIPE_API upipe_status upi_plan_sizes(const upipe_plan *p, upipe_err *e)
{
    const upipe_plan_desc *d = &p->desc;
    int64_t width = (int64_t)d->heads * d->head_dim, all;
    /* The largest product is a sum of a few tensors of tokens x (widest row) x 4 bytes: 16 of them are an
     * upper bound. */
    if (d->model_dim > width) width = d->model_dim;
    if ((int64_t)d->ranks * d->head_dim > width) width = (int64_t)d->ranks * d->head_dim;
    if (!upi_mul(&all, d->tokens, d->batch) || !upi_mul(&all, all, width) || !upi_mul(&all, all, 64) ||
        !upi_mul(&all, all, p->group > 1 ? 2 : 6))
        return upi_fail(e, UPIPE_ERR_OVERFLOW,
                        "%lld tokens x %lld sequences x %lld elements overflow 63 bits", (long long)d->tokens,
                        (long long)d->batch, (long long)width);
    return UPIPE_OK;
}

/* upipe_plan_init -- checks the description, fills in its defaults, derives the schedule
 *   errors  ARG (numbers that make no sense or do not divide: the sentence has them), UNSUPPORTED (ragged
 *           head counts), OVERFLOW
 *   paper   sections 3.3 and 4.1
 */
UPIPE_API upipe_status upipe_plan_init(upipe_plan *p, const upipe_plan_desc *desc, upipe_err *e)
{
    upipe_plan_desc d = *desc;
    int m, group;
    memset(p, 0, sizeof *p);
    if (d.batch == 0) d.batch = 1;
    if (d.ranks == 0) d.ranks = 1;
    if (d.kv_heads == 0) d.kv_heads = d.heads;
    if (d.chunk == 0) d.chunk = d.ranks;
    if (d.tokens < 1 || d.batch < 1 || d.ranks < 1 || d.heads < 1 || d.kv_heads < 1 || d.head_dim < 1 ||
        d.chunk < 1 || d.model_dim < 0)
        return upi_fail(
            e, UPIPE_ERR_ARG,
            "a plan needs positive sizes: tokens %lld, batch %lld, ranks %d, heads %d, kv heads %d, "
            "head dim %d, chunk %d, model dim %lld",
            (long long)d.tokens, (long long)d.batch, d.ranks, d.heads, d.kv_heads, d.head_dim, d.chunk,
            (long long)d.model_dim);
    if (d.dtype != UPIPE_F32 && d.dtype != UPIPE_BF16 && d.dtype != UPIPE_F16)
        return upi_fail(e, UPIPE_ERR_ARG, "data type %d is none of f32, bf16 and f16", (int)d.dtype);
    if ((int64_t)d.heads * d.head_dim > INT32_MAX || d.model_dim > INT32_MAX)
        return upi_fail(e, UPIPE_ERR_OVERFLOW,
                        "rows of %d heads of %d elements, or of model dim %lld, leave 31 bits", d.heads,
                        d.head_dim, (long long)d.model_dim);
    if (d.model_dim == 0) d.model_dim = (int64_t)d.heads * d.head_dim;
    if (d.tokens % d.ranks != 0)
        return upi_fail(e, UPIPE_ERR_ARG, "%lld tokens do not divide into %d ranks", (long long)d.tokens,
                        d.ranks);
    if (d.heads % d.kv_heads != 0)
        return upi_fail(e, UPIPE_ERR_ARG, "%d query heads are no multiple of %d key/value heads", d.heads,
                        d.kv_heads);
    if (d.heads % d.ranks != 0)
        return upi_fail(e, UPIPE_ERR_UNSUPPORTED, "%d heads do not divide into %d ranks", d.heads, d.ranks);
    if (d.chunk % d.ranks != 0)
        return upi_fail(e, UPIPE_ERR_ARG, "a chunk of %d heads does not divide into %d ranks", d.chunk,
                        d.ranks);
    if (d.heads % d.chunk != 0)
        return upi_fail(e, UPIPE_ERR_ARG, "%d heads do not divide into chunks of %d", d.heads, d.chunk);
    if (d.heads / d.chunk > UPIPE_STAGES_MAX)
        return upi_fail(e, UPIPE_ERR_UNSUPPORTED, "%d stages, at most %d", d.heads / d.chunk,
                        UPIPE_STAGES_MAX);
    m = d.chunk / d.ranks;
    group = d.heads / d.kv_heads;
    p->local = d.tokens / d.ranks;
    p->rows = p->local * d.batch;
    p->group = group;
    p->stages = d.heads / d.chunk;
    p->per_rank = m;
    p->kv_per_rank = m > group ? m / group : 1;
    p->rounds = p->stages;
    p->steps = 1;
    if (m % group == 0) {
        p->schedule = UPIPE_WHOLE; /* the naive order is the same one here */
    } else if (d.naive) {
        if (m > group || group % m != 0)
            return upi_fail(e, UPIPE_ERR_UNSUPPORTED, "%d heads a rank do not fit groups of %d in order", m,
                            group);
        p->schedule = UPIPE_ORDER;
        p->kv_partial = 1;
    } else if (d.kv_heads % d.ranks == 0) {
        if (group % m != 0)
            return upi_fail(e, UPIPE_ERR_UNSUPPORTED,
                            "%d heads a rank and stage neither divide groups of %d nor "
                            "hold whole ones",
                            m, group);
        p->schedule = UPIPE_GROUP;
        p->rounds = d.kv_heads / d.ranks;
        p->steps = group / m;
    } else if (d.ranks % d.kv_heads == 0) {
        p->schedule = UPIPE_SPLIT;
        p->rounds = 1;
        p->steps = p->stages;
        p->kv_partial = 1;
    } else {
        return upi_fail(e, UPIPE_ERR_UNSUPPORTED,
                        "%d key/value heads and %d ranks: neither divides the other", d.kv_heads, d.ranks);
    }
    p->desc = d;
    return upi_plan_sizes(p, e);
}

/* Round and step of a stage, and whether K and V travel in it. */
UPIPE_API upipe_stage upipe_plan_stage(const upipe_plan *p, int stage)
{
    upipe_stage s;
    s.round = stage / p->steps;
    s.step = stage % p->steps;
    s.kv_fresh = s.step == 0;
    s.kv_last = s.step == p->steps - 1;
    return s;
}

/* Query head j < m of a rank and stage; heads j = 0 .. m-1 are neighbours. */
UPIPE_API int upipe_plan_q_head(const upipe_plan *p, int stage, int rank, int j)
{
    int ranks = p->desc.ranks, m = p->per_rank;
    if (p->schedule == UPIPE_GROUP)
        return (stage / p->steps * ranks + rank) * p->group + stage % p->steps * m + j;
    if (p->schedule == UPIPE_SPLIT) return rank * (p->desc.heads / ranks) + stage * m + j;
    return (stage * ranks + rank) * m + j;
}

/* Heads between the first query head of rank r and that of rank r + 1, in any stage. */
UPIPE_API int upipe_plan_q_step(const upipe_plan *p)
{
    if (p->schedule == UPIPE_GROUP) return p->group;
    if (p->schedule == UPIPE_SPLIT) return p->desc.heads / p->desc.ranks;
    return p->per_rank;
}

/* The inverse: which stage and rank own the m neighbouring heads that begin at `head`, a multiple of m. */
UPIPE_API void upipe_plan_q_place(const upipe_plan *p, int head, int *stage, int *rank)
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
    } else {
        *rank = head / m % ranks;
        *stage = head / m / ranks;
    }
}

/* Key/value head j < kv_per_rank that a rank holds in a stage. */
UPIPE_API int upipe_plan_kv_head(const upipe_plan *p, int stage, int rank, int j)
{
    return upipe_plan_q_head(p, stage, rank, 0) / p->group + j;
}

/* upipe_share -- which block of a send buffer a rank reads: (offset + rank * step) / span
 *
 * With one block a rank that is the rank itself (0, 1, 1). Where ranks share key/value heads, one block
 * serves several.
 */
typedef struct upipe_share {
    int offset, step, span;
} upipe_share;

/* The block of the send buffer that goes to this rank. */
UPIPE_API int upipe_share_block(upipe_share s, int rank)
{
    return (s.offset + rank * s.step) / s.span;
}

/* Who reads which block of the K (or V) send buffer in a stage. */
UPIPE_API upipe_share upipe_plan_kv_share(const upipe_plan *p, int stage)
{
    upipe_share s;
    s.offset = 0;
    s.step = s.span = 1;
    if (p->schedule == UPIPE_SPLIT) {
        s.span = p->desc.ranks / p->desc.kv_heads;
    } else if (p->schedule == UPIPE_ORDER) {
        s.offset = stage * p->desc.chunk % p->group;
        s.step = p->per_rank;
        s.span = p->group;
    }
    return s;
}

/* Blocks of the K send buffer of a stage; each holds kv_per_rank heads, block 0 begins at kv head of rank
 * 0. */
UPIPE_API int upipe_plan_kv_blocks(const upipe_plan *p, int stage)
{
    return upipe_share_block(upipe_plan_kv_share(p, stage), p->desc.ranks - 1) + 1;
}

/* Bytes of n tokens-on-this-rank x heads, in the storage type. */
UPIPE_API size_t upipe_plan_rows_bytes(const upipe_plan *p, int64_t heads)
{
    return (size_t)(p->rows * heads * p->desc.head_dim) * upipe_dtype_bytes(p->desc.dtype);
}

/* One unit of the paper's tables: rows * model_dim elements of the storage type, in bytes. */
UPIPE_API size_t upipe_plan_unit_bytes(const upipe_plan *p)
{
    return (size_t)(p->rows * p->desc.model_dim) * upipe_dtype_bytes(p->desc.dtype);
}

/* ---- bytes sent ---- */

/* upipe_plan_sent_stage -- bytes that one rank hands to the others in a stage
 *   backward  0: Q, K, V, O.  1: Q, K, V again (they are recomputed), dO, delta, dQ, dK, dV
 * Gradients of a key/value head that several ranks share travel as f32, since they are still to be summed.
 */
UPIPE_API int64_t upipe_plan_sent_stage(const upipe_plan *p, int stage, int backward)
{
    upipe_stage s = upipe_plan_stage(p, stage);
    int64_t head = p->rows * p->desc.head_dim, e = (int64_t)upipe_dtype_bytes(p->desc.dtype), sum;
    sum = 2 * head * p->per_rank * e;
    if (s.kv_fresh) sum += 2 * head * p->kv_per_rank * e;
    if (backward) sum += p->per_rank * (head * e + p->rows * 4);
    if (backward && s.kv_last) sum += 2 * head * p->kv_per_rank * (p->kv_partial ? 4 : e);
    return sum * (p->desc.ranks - 1);
}

/* Bytes that one rank hands to the others in all stages. */
UPIPE_API int64_t upipe_plan_sent(const upipe_plan *p, int backward)
{
    int64_t sum = 0;
    int i;
    for (i = 0; i < p->stages; ++i) sum += upipe_plan_sent_stage(p, i, backward);
    return sum;
}

/* ---- bytes held ---- */

/* The columns of the paper's tables; peaks are kept for each. Everything else counts as OTHER. */
typedef enum upipe_phase {
    UPIPE_FWD_BEFORE,
    UPIPE_FWD_IN,   /* inp_all_to_all, with projection, QK norm and RoPE */
    UPIPE_FWD_ATTN, /* the attention kernel */
    UPIPE_FWD_OUT,  /* out_all_to_all */
    UPIPE_BWD_BEFORE,
    UPIPE_BWD_OUT,  /* dO and delta to heads */
    UPIPE_BWD_ATTN, /* the attention backward kernel */
    UPIPE_BWD_IN,   /* recomputed Q, K, V; dQ, dK, dV to tokens; weight gradients; dX */
    UPIPE_PHASES,
    UPIPE_PHASE_OTHER = UPIPE_PHASES
} upipe_phase;

/* "fwd_in" and so on. */
UPIPE_API const char *upipe_phase_name(int phase)
{
    static const char *const names[] = {"fwd_before", "fwd_in",   "fwd_attn", "fwd_out", "bwd_before",
                                        "bwd_out",    "bwd_attn", "bwd_in",   "other"};
    return names[phase >= 0 && phase < UPIPE_PHASES ? phase : UPIPE_PHASES];
}

/* upipe_plan_scratch -- what the exact count needs besides the plan
 *   gemm attn_fwd attn_bwd  scratch bytes of the compute table (upipe_layer_scratch fills them)
 *   tile_rows               rows of the tile in which dX is summed; 0 when dX is summed in place (f32
 *                           storage)
 *   gx                      bytes of the gradient of x; 0 when it takes x's place
 *   qk_norm                 nonzero: per-head norms of Q and K
 */
typedef struct upipe_plan_scratch {
    size_t gemm, attn_fwd, attn_bwd;
    size_t gx;
    int64_t tile_rows;
    int qk_norm;
} upipe_plan_scratch;

/* Exact live bytes of one rank, x included: the largest of each phase, of all, and of Q, K, V chunks and
 * exchange buffers in the forward (the paper's "intermediate tensors"). */
typedef struct upipe_bytes {
    size_t phase[UPIPE_PHASES];
    size_t peak;
    size_t intermediate_fwd;
} upipe_bytes;

UPIPE_API size_t upi_most(size_t a, size_t b)
{
    return a > b ? a : b;
}

/* upipe_plan_bytes -- what the attention block of upipe_layer.h holds, by phase
 *
 * The sum is spelled out in docs/memory.md. A dry pool under the layer's code, and the real run, must agree
 * to the byte.
 *   paper  Appendix A; where this count differs from its tables, docs/memory.md says why
 */
UPIPE_API upipe_bytes upipe_plan_bytes(const upipe_plan *p, const upipe_plan_scratch *s)
{
    const upipe_plan_desc *d = &p->desc;
    size_t e = upipe_dtype_bytes(d->dtype), rows = (size_t)p->rows, dim = (size_t)d->head_dim;
    size_t x = upipe_plan_unit_bytes(p),
           both = x + s->gx;                         /* the caller's; gx is there throughout the backward */
    size_t out = upipe_plan_rows_bytes(p, d->heads); /* final_out, or its gradient */
    size_t stat = rows * (size_t)d->heads * 4;       /* lse; delta */
    size_t q = upipe_plan_rows_bytes(p, d->chunk);   /* a stage's Q, each side */
    size_t kv = upipe_plan_rows_bytes(p, (int64_t)d->ranks * p->kv_per_rank); /* K' or V' */
    size_t kv_f32 = kv / e * 4;                                               /* dK' or dV' */
    size_t kv_all = upipe_plan_rows_bytes(p, d->kv_heads); /* dK or dV of all heads, by token */
    size_t norm = s->qk_norm ? ((size_t)d->heads + (size_t)d->kv_heads) * dim * 4 : 0;
    size_t kv_send = 0, hold, stage, parked, end, last;
    upipe_bytes b;
    int i;
    for (i = 0; i < p->stages; ++i)
        if (upipe_plan_stage(p, i).kv_fresh)
            kv_send = upi_most(
                kv_send, upipe_plan_rows_bytes(p, (int64_t)upipe_plan_kv_blocks(p, i) * p->kv_per_rank));

    b.intermediate_fwd = 2 * kv + upi_most(kv_send, q);
    hold = x + out + stat;
    b.phase[UPIPE_FWD_BEFORE] = x;
    b.phase[UPIPE_FWD_IN] = hold + b.intermediate_fwd + s->gemm;
    b.phase[UPIPE_FWD_ATTN] = hold + 2 * kv + q + s->attn_fwd;
    b.phase[UPIPE_FWD_OUT] = hold + (p->steps > 1 ? 2 * kv : 0) + q;

    b.phase[UPIPE_BWD_BEFORE] = both + 2 * out + 2 * stat;
    /* dK and dV of finished rounds wait for dX; sums over ranks and stages wait in f32 where the order is
     * naive. */
    if (p->schedule == UPIPE_ORDER)
        parked = 2 * (kv_all / e * 4);
    else
        parked = (size_t)(p->rounds - 1) * 2 * kv;
    hold = both + out + 2 * stat + norm + parked;
    stage = 2 * kv + 2 * kv_f32 + 2 * q + q + (size_t)d->chunk * rows * 4; /* with dO' and delta' */
    b.phase[UPIPE_BWD_OUT] = hold + stage;
    b.phase[UPIPE_BWD_ATTN] = hold + stage + s->attn_bwd;

    /* within the stages: fetch, projection, and the way home of a finished round's dK and dV */
    last = 2 * kv + 2 * kv_f32 + upi_most(kv_send + s->gemm, upi_most(q + s->gemm, 2 * q));
    end = both + out + 2 * kv_all; /* after them: dQ, dK and dV of all heads */
    if (p->schedule == UPIPE_ORDER) {
        size_t sums = parked + (e < 4 ? kv_all : 0); /* f32 sums, and the first of them in the storage type */
        last = hold + upi_most(last, 3 * kv_f32);    /* with the partial gradients of all ranks */
        last = upi_most(last, both + out + norm + sums);
        last = upi_most(last, end + norm + (s->qk_norm ? kv_all : 0) + s->gemm);
    } else if (p->schedule == UPIPE_SPLIT) {
        last = upi_most(last, kv_all + 3 * kv_f32);
        last = upi_most(last, 2 * kv_all + 2 * kv_f32);
        last = hold + upi_most(last, 2 * kv_all + (s->qk_norm ? kv_all : 0) + s->gemm);
    } else {
        size_t cast = e < 4 ? kv : 0;
        last = upi_most(last, kv + cast + 2 * kv_f32);
        last = upi_most(last, 2 * kv + cast + kv_f32);
        last = hold + upi_most(last, 2 * kv + (s->qk_norm ? kv : 0) + s->gemm);
    }
    end += (size_t)s->tile_rows * (size_t)d->model_dim * 4 + s->gemm;
    b.phase[UPIPE_BWD_IN] = upi_most(last, end);

    b.peak = 0;
    for (i = 0; i < UPIPE_PHASES; ++i) b.peak = upi_most(b.peak, b.phase[i]);
    return b;
}

/* ---- the paper's own formulas ---- */

typedef enum upipe_paper_row {
    UPIPE_PAPER_ULYSSES,
    UPIPE_PAPER_ULYSSES_OFFLOAD,
    UPIPE_PAPER_FPDT,
    UPIPE_PAPER_UPIPE
} upipe_paper_row;

/* upipe_paper_units -- a cell of the paper's two tables of peak activation memory, in units
 *   row     method
 *   phase   column: the forward table's four, then the backward table's four
 *   group   G;  stages  nu (UPipe's row);  chunks  pi (FPDT's row);  layers  L (Ulysses' row)
 *   paper   tables "Peak activation memory within the forward attention block" (section 2) and "... during
 *           the backward pass" (Appendix A)
 */
UPIPE_API double upipe_paper_units(upipe_paper_row row, upipe_phase phase, double group, double stages,
                                   double chunks, double layers)
{
    double gamma = 1 + 2 / group, nu = stages, pi = chunks, before = 2 * (nu - 1) / nu;
    double attn0 = 3 + 2 * gamma / nu, attn1 = 2 + 2 * gamma / nu + before;
    double cell[4][UPIPE_PHASES];
    int k;
    const double ulysses[] = {0, gamma + 1, gamma + 1, 2, 2, 3, 2 * gamma + 2, gamma + 1};
    const double offload[] = {1, gamma + 2, gamma + 2, 3, 3, 4, 2 * gamma + 3, gamma + 2};
    const double fpdt[] = {1, gamma + 2, 2 * gamma + 1, 2, 1, 3, 2 * gamma + 4, gamma + 2};
    const double upipe[] = {1,
                            2 + gamma / nu,
                            2 + gamma / nu,
                            2 + 1 / nu,
                            3,
                            3 + 1 / nu,
                            attn0 > attn1 ? attn0 : attn1,
                            2 + gamma / nu + before};
    for (k = 0; k < UPIPE_PHASES; ++k) {
        cell[UPIPE_PAPER_ULYSSES][k] = layers + ulysses[k];
        cell[UPIPE_PAPER_ULYSSES_OFFLOAD][k] = offload[k];
        cell[UPIPE_PAPER_FPDT][k] = fpdt[k] / pi;
        cell[UPIPE_PAPER_UPIPE][k] = upipe[k];
    }
    return phase < UPIPE_PHASES ? cell[row][phase] : 0;
}

#endif

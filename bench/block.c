/* block.c -- measures the attention block on thread ranks: Ulysses, Ulysses written plainly, and UPipe over U
 *
 *     block --tokens N [flags]                            --help lists them
 *
 * The block is a trainer's: x -> Q, K, V -> RoPE -> all-to-all -> causal attention -> all-to-all ->
 * output projection, y; and back from the gradient of y to those of x and of the four weights, with Q, K, V
 * recomputed from x.
 *
 *     ulysses             upipe_layer with U = H, one stage. Each projection of Q, K, V and each of their
 *                         weights' gradients is one call of the table's product. Those of y, dO, dWo and dX
 *                         are several, by ranks' heads and tiles of rows: an order of sums that holds for
 *                         every U
 *     ulysses_plain_gemm  Ulysses from the primitives, without the layer: each projection, gradient of its
 *                         input and gradient of its weight is one call. Where that needs heads in natural
 *                         order they are brought there, as DeepSpeed's transposes do
 *     upipe               upipe_layer with U = C, 2C, 4C, ... below H
 *
 * All run in one process over the same data, in turn within each round; every round begins with another one.
 * Round 0 warms up and checks. In f32 with the built-in product all results must have the bits that ulysses gives
 * (docs/numerics.md), but for y and dX of ulysses_plain_gemm: the layer cuts their sums at heads, a plain product
 * does not. No element may be farther apart than roundings can take two sums of the same terms. In other cases
 * results must agree within rounding. The pool's peak must be what a dry run of the same calls found.
 *
 * Prints one JSON object a method on stdout. Seconds are the host's clock from a barrier until the slowest
 * rank is done, one number a round. cpu_s are seconds of processor time of all ranks together, by part: they
 * leave out waits and other programs, which matters where ranks outnumber cores. bench/block.py runs this and
 * keeps the results.
 */
#define PROGRAM "block"

#include "upipe/net/upipe_net_threads.h"
#include "upipe/upipe.h"

#include "../examples/common/flags.h"
#include "../examples/common/products.h"
#include "../examples/common/rounding.h"

#define BUILT_IN (strcmp(PRODUCTS, "built-in") == 0)

enum { RANKS_MAX = 64, METHODS_MAX = 12, ROUNDS_MAX = 100, DEADLINE = 600, WEIGHTS = 4 };

/* Parts of the processor time, as in the paper's runtime table; what is left of PART_ALL is its "other". */
typedef enum part { PART_ALL_TO_ALL, PART_ATTN_FWD, PART_ATTN_BWD, PART_PRODUCTS, PART_ALL, PARTS } part;

static const char *const part_names[] = {"transfer", "attn_fwd", "attn_bwd", "products", "all"};

/* What is checked; weights' gradients in the order of bench.weights. */
typedef enum result {
    RESULT_O,
    RESULT_LSE,
    RESULT_Y,
    RESULT_DQ,
    RESULT_DX,
    RESULT_DW,
    RESULTS = RESULT_DW + WEIGHTS
} result;

static const char *const result_names[] = {"O", "lse", "y", "dQ", "dX", "dWq", "dWk", "dWv", "dWo"};

/* What one rank measures in one pass. */
typedef struct sample {
    double seconds[2]; /* forward, backward */
    double cpu[PARTS];
    int products[2]; /* calls */
} sample;

/* A result of one rank against the first method's. */
typedef struct outcome {
    int other;          /* has other bits */
    double apart, size; /* squares of the difference and of the first method's */
    double rounded;     /* the largest difference, in what roundings can make it; where check_product looks */
} outcome;

typedef struct method {
    const char *name;
    int plain;
    upipe_plan plan;    /* rank 0's */
    size_t peak;        /* of the dry run */
    int other[RESULTS]; /* has other bits than the first method's */
    double distance;    /* the largest relative L2 distance of a result of a rank */
} method;

/* One rank: what it reads, its memory, and what it finds. */
typedef struct rank_state {
    struct bench *b;
    upipe_mem mem;
    upipe_mem_block *blocks;
    void *slab, *x, *dy;      /* x, dy [T][D], storage type */
    float *grads;             /* of all weights */
    int checks, which;        /* whether results are checked, and of which method */
    float *expected[RESULTS]; /* the first method's; lse: [S][H], rank 0 has all */
    float *wide;              /* y, dX, O or dQ in f32 */
    double *squares[RESULTS]; /* of y and dX [T + D]: of the terms of a row, of a column */
    size_t peak[METHODS_MAX];
    outcome found[METHODS_MAX][RESULTS];
    sample now, samples[METHODS_MAX][ROUNDS_MAX];
} rank_state;

typedef struct bench {
    upipe_plan_desc desc;     /* without a chunk */
    int rounds, dtype;        /* dtype: upipe_dtype, of the flag */
    upipe_ops plain_ops, ops; /* the backend's, and the same with its calls timed */
    upipe_threads team;
    method methods[METHODS_MAX];
    int methods_n, blocks_max;
    void *weights[WEIGHTS]; /* wq wk wv wo, storage type */
    int64_t weight_n[WEIGHTS], grads_n;
    size_t slab_bytes;
    rank_state *ranks;
    int lacks; /* memory */
} bench;

/* Forward and backward of either kind of method on one rank. */
typedef struct pass {
    upipe_ctx *c;
    const method *m;
    rank_state *rank;
    upipe_plan plan;
    upipe_layer layer;
    upipe_view x, y; /* x becomes dX, y its gradient */
    float *grads[WEIGHTS];
    upipe_saved saved; /* what the layer's forward leaves for its backward */
    /* and what that without the layer does */
    void *o;     /* [T][H][d] */
    void *lse;   /* f32 [S][m] */
    void *dout;  /* [C][T][m][d], after the output projection's backward; then dQ */
    void *delta; /* f32 [C][T][m] */
} pass;

/* ---- the table, with its calls timed by the calling thread's processor time ---- */

static double cpu_clock(void)
{
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static const upipe_ops *timed_table(const upipe_ctx *c)
{
    return &((const rank_state *)c->user)->b->plain_ops;
}

static upipe_status timed_end(upipe_ctx *c, part which, double start, upipe_status s)
{
    ((rank_state *)c->user)->now.cpu[which] += cpu_clock() - start;
    return s;
}

/* Ranks that are threads send by copies; the layer also copies each block of dO into O's place. */
static upipe_status timed_copy(upipe_ctx *c, void *dst, const void *src, size_t bytes)
{
    double start = cpu_clock();
    return timed_end(c, PART_ALL_TO_ALL, start, timed_table(c)->copy(c, dst, src, bytes));
}

static upipe_status timed_gemm(upipe_ctx *c, upipe_view out, upipe_view a, upipe_view b, int flags,
                               void *work, size_t work_bytes)
{
    double start = cpu_clock();
    sample *now = &((rank_state *)c->user)->now;
    ++now->products[now->seconds[0] > 0]; /* known once the forward is over */
    return timed_end(c, PART_PRODUCTS, start, timed_table(c)->gemm(c, out, a, b, flags, work, work_bytes));
}

static upipe_status timed_attn_fwd(upipe_ctx *c, const upipe_attn *a)
{
    double start = cpu_clock();
    return timed_end(c, PART_ATTN_FWD, start, timed_table(c)->attn_fwd(c, a));
}

static upipe_status timed_attn_bwd(upipe_ctx *c, const upipe_attn_grad *g)
{
    double start = cpu_clock();
    return timed_end(c, PART_ATTN_BWD, start, timed_table(c)->attn_bwd(c, g));
}

static void timed_ops(bench *b)
{
    products_ops(&b->plain_ops);
    b->ops = b->plain_ops;
    b->ops.copy = timed_copy;
    b->ops.gemm = timed_gemm;
    b->ops.attn_fwd = timed_attn_fwd;
    b->ops.attn_bwd = timed_attn_bwd;
}

/* ---- results against the first method's, in round 0 ---- */

/* Whether bits are promised. */
static int is_exact(const bench *b)
{
    return b->desc.dtype == UPIPE_F32 && BUILT_IN;
}

/* Elements that a rank has. */
static int64_t result_elements(const bench *b, int which)
{
    if (which == RESULT_LSE) return b->desc.tokens * b->desc.heads;
    if (which >= RESULT_DW) return b->weight_n[which - RESULT_DW];
    return b->methods[0].plan.rows * (which == RESULT_Y || which == RESULT_DX
                                          ? b->desc.model_dim
                                          : (int64_t)b->desc.heads * b->desc.head_dim);
}

/* Adds a part of a result. */
static void compare(outcome *found, const float *got, const float *expected, int64_t n)
{
    int64_t i;
    found->other |= memcmp(got, expected, (size_t)n * sizeof *got) != 0;
    for (i = 0; i < n; ++i) {
        const double a = (double)got[i], b = (double)expected[i];
        found->apart += (a - b) * (a - b);
        found->size += b * b;
    }
}

/* The first method's result is kept, that of the others compared. */
static void check_f32(rank_state *rank, int which, const float *got)
{
    const int64_t n = result_elements(rank->b, which);
    if (rank->which == 0)
        memcpy(rank->expected[which], got, (size_t)n * sizeof *got);
    else
        compare(&rank->found[rank->which][which], got, rank->expected[which], n);
}

/* Of the storage type. */
static upipe_status check(upipe_ctx *c, rank_state *rank, int which, upipe_view got)
{
    if (!rank->checks) return UPIPE_OK;
    UPIPE_TRY(c->ops->cast(c, upipe_view_packed(rank->wide, UPIPE_F32, got.n, 1, got.d), got));
    check_f32(rank, which, rank->wide);
    return UPIPE_OK;
}

/* O or dQ. */
static upipe_status check_slots(upipe_ctx *c, rank_state *rank, const upipe_plan *p, int which,
                                const upipe_slots *slots)
{
    const upipe_view wide =
        upipe_view_packed(rank->wide, UPIPE_F32, p->rows, 1, p->desc.heads * p->desc.head_dim);
    if (!rank->checks) return UPIPE_OK;
    UPIPE_TRY(upipe_slots_gather(c, p, wide, slots));
    check_f32(rank, which, rank->wide);
    return UPIPE_OK;
}

/* [stage][S][n] of this rank's heads. Another rank may have attended them in the first method, so that all ranks
 * share what is expected. */
static void check_lse(rank_state *rank, const upipe_plan *p, const float *lse)
{
    int64_t t;
    int stage;
    for (stage = 0; rank->checks && stage < p->stages; ++stage) {
        const upipe_head_range q = upipe_plan_q(p, stage, (int)(rank - rank->b->ranks));
        for (t = 0; t < p->desc.tokens; ++t, lse += q.count) {
            float *expected = rank->b->ranks[0].expected[RESULT_LSE] + t * p->desc.heads + q.first;
            if (rank->which == 0)
                memcpy(expected, lse, (size_t)q.count * sizeof *lse);
            else
                compare(&rank->found[rank->which][RESULT_LSE], lse, expected, q.count);
        }
    }
}

/* Adds to the sums of each row, or of each column. */
static void add_squares(double *sums, upipe_view matrix, int of_columns)
{
    const float *v = (const float *)matrix.data;
    int64_t i;
    int32_t j;
    for (i = 0; i < matrix.n; ++i)
        for (j = 0; j < matrix.d; ++j, ++v) sums[of_columns ? j : i] += (double)*v * (double)*v;
}

/* Some terms of y or dX in f32: tokens [T][width], and their weight, [D][width] or [width][D]. */
static void check_terms(rank_state *rank, int which, upipe_view tokens, upipe_view weight)
{
    if (!rank->checks || !is_exact(rank->b)) return;
    add_squares(rank->squares[which], tokens, 0);
    add_squares(rank->squares[which] + tokens.n, weight, which == RESULT_DX);
}

/* y or dX, sums of n terms that check_terms has seen, by plain products, in parts of 320 or 640, in at most three
 * calls. The layer adds the same terms in parts of a head. A term goes through the additions of its part and those of
 * the parts, and is rounded as a product where there is no FMA. By Cauchy and Schwarz the norms of a row and a column
 * bound the sum of the terms' magnitudes. */
static void check_product(rank_state *rank, int which, upipe_view got, int64_t n)
{
    const double head = (double)rank->b->desc.head_dim, terms = (double)n;
    const double layer = head + terms / head + 1;
    const double plain = fmin(terms, ROUNDING_PART_MOST) + terms / ROUNDING_PART_LEAST + 3 + 1;
    const double bound = rounding_bound(layer + plain);
    const double *squares = rank->squares[which];
    const float *a = (const float *)got.data, *b = rank->expected[which];
    outcome *found = &rank->found[rank->which][which];
    int64_t i;
    int32_t j;
    if (!rank->checks || !is_exact(rank->b)) return;
    for (i = 0; i < got.n; ++i) {
        for (j = 0; j < got.d; ++j, ++a, ++b) {
            const double most = bound * sqrt(squares[i] * squares[got.n + j]);
            const double apart = fabs((double)*a - (double)*b);
            if (apart > found->rounded * most) found->rounded = apart / most;
        }
    }
}

/* ---- Ulysses, written straight down: one stage, where heads divide evenly ---- */

static upipe_status plain_alloc(pass *s, void **out, int64_t elements, upipe_dtype dtype, const char *tag)
{
    return upipe_alloc(s->c, out, (size_t)elements * upipe_dtype_bytes(dtype), UPIPE_USE_OTHER, tag);
}

static upipe_status plain_gemm(pass *s, upipe_view out, upipe_view a, upipe_view b, int flags)
{
    size_t bytes = s->c->ops->gemm_bytes(s->c->ops, out, a, b, flags);
    void *work;
    UPIPE_TRY(upipe_alloc(s->c, &work, bytes, UPIPE_USE_SCRATCH, "gemm_work"));
    UPIPE_TRY(s->c->ops->gemm(s->c, out, a, b, flags, work, bytes));
    return upipe_free(s->c, work);
}

/* Query heads, or key/value heads, of a rank. */
static int plain_n(const pass *s, int kv)
{
    return kv ? s->plan.kv_per_rank : s->plan.per_rank;
}

static int64_t plain_elements(const pass *s, int kv)
{
    return s->plan.desc.tokens * plain_n(s, kv) * s->plan.desc.head_dim;
}

/* Bytes of one token and head. */
static size_t plain_each(const pass *s)
{
    return (size_t)s->plan.desc.head_dim * upipe_dtype_bytes(s->plan.desc.dtype);
}

/* What is sent, [C][T][width], as a tensor [T][C][width]. */
static upipe_view plain_blocks(const pass *s, void *data, int kv)
{
    int32_t width = plain_n(s, kv) * s->plan.desc.head_dim;
    return upipe_view_make(data, s->plan.desc.dtype, s->plan.rows, width, s->plan.desc.ranks,
                           s->plan.rows * width, width);
}

/* All heads of a token side by side: [T][H*d]. */
static upipe_view plain_tokens(const pass *s, void *data, int kv)
{
    return upipe_view_packed(data, s->plan.desc.dtype, s->plan.rows, 1,
                             (kv ? s->plan.desc.kv_heads : s->plan.desc.heads) * s->plan.desc.head_dim);
}

/* All tokens of this rank's heads. */
static upipe_view plain_heads(const pass *s, void *data, int kv, upipe_dtype dtype)
{
    return upipe_view_packed(data, dtype, s->plan.desc.tokens, plain_n(s, kv), s->plan.desc.head_dim);
}

/* wq, wk, wv, wo or its gradient, whole. */
static upipe_view plain_weight(const pass *s, void *w, upipe_dtype dtype, int which)
{
    int32_t dim = (int32_t)s->plan.desc.model_dim, width = plain_tokens(s, NULL, which == 1 || which == 2).d;
    return which == 3 ? upipe_view_packed(w, dtype, dim, 1, width)
                      : upipe_view_packed(w, dtype, width, 1, dim);
}

static upipe_view plain_stored(const pass *s, int which)
{
    return plain_weight(s, s->rank->b->weights[which], s->plan.desc.dtype, which);
}

/* The gradient of a weight += dy^T * x */
static upipe_status plain_grad_weight(pass *s, int which, upipe_view dy, upipe_view x)
{
    return plain_gemm(s, plain_weight(s, s->grads[which], UPIPE_F32, which), dy, x,
                      UPIPE_GEMM_TRANS_A | UPIPE_GEMM_ACCUMULATE);
}

/* blocks [C][T][m*d] = tokens [T][H*d] */
static upipe_status plain_scatter(pass *s, void *blocks, void *tokens, int kv)
{
    upipe_view to = plain_blocks(s, blocks, kv);
    return s->c->ops->cast(s->c, to, upipe_view_packed(tokens, to.dtype, to.n, to.h, to.d));
}

/* tokens [T][H*d] = blocks [C][T][m*d] */
static upipe_status plain_gather(pass *s, void *tokens, void *blocks, int kv)
{
    upipe_view from = plain_blocks(s, blocks, kv);
    return s->c->ops->cast(s->c, upipe_view_packed(tokens, from.dtype, from.n, from.h, from.d), from);
}

/* The built-in product writes its columns in C blocks, where the all-to-all sends them from. BLAS would take C
 * calls for that, each of which packs x: there it is one call into a buffer of send's size, and a scatter, which
 * is faster. */
static upipe_status plain_project(pass *s, int which, void *send, void *buf)
{
    int kv = which > 0;
    upipe_view w = plain_stored(s, which), to = plain_blocks(s, send, kv);
    if (!BUILT_IN) {
        UPIPE_TRY(plain_gemm(s, plain_tokens(s, buf, kv), s->x, w, UPIPE_GEMM_TRANS_B));
        return plain_scatter(s, send, buf, kv);
    }
    w = upipe_view_make(w.data, w.dtype, to.d, w.d, to.h, (int64_t)to.d * w.d, w.d);
    return plain_gemm(s, to, s->x, w, UPIPE_GEMM_TRANS_B);
}

/* Blocks of dO, in the same way. */
static upipe_status plain_out_project(pass *s, void *dout, upipe_view dy)
{
    upipe_view w = plain_stored(s, 3), to = plain_blocks(s, dout, 0);
    void *buf;
    if (!BUILT_IN) {
        UPIPE_TRY(plain_alloc(s, &buf, plain_elements(s, 0), w.dtype, "dout_tokens"));
        UPIPE_TRY(plain_gemm(s, plain_tokens(s, buf, 0), dy, w, 0));
        UPIPE_TRY(plain_scatter(s, dout, buf, 0));
        return upipe_free(s->c, buf);
    }
    w = upipe_view_make(w.data, w.dtype, w.n, w.n_stride, to.h, to.d, to.d);
    return plain_gemm(s, to, dy, w, 0);
}

static upipe_status plain_rope(pass *s, void *blocks, int kv, int inverse)
{
    upipe_rope rope;
    memset(&rope, 0, sizeof rope);
    rope.x =
        upipe_view_packed(blocks, s->plan.desc.dtype, s->plan.rows, plain_n(s, kv), s->plan.desc.head_dim);
    rope.count = s->plan.desc.ranks;
    rope.step = plain_blocks(s, blocks, kv).h_stride;
    rope.pos0 = s->c->team->rank * s->plan.rows;
    rope.theta = s->layer.rope_theta;
    rope.inverse = inverse;
    return s->c->ops->rope(s->c, &rope);
}

/* Q, K, V of this rank's heads and all tokens; send is the larger of what is sent. */
static upipe_status plain_fetch(pass *s, void **qkv, void *send)
{
    int which;
    for (which = 0; which < 3; ++which) {
        UPIPE_TRY(plain_project(s, which, send, qkv[which]));
        if (which < 2) UPIPE_TRY(plain_rope(s, send, which > 0, 0));
        UPIPE_TRY(upipe_a2a_to_heads(s->c, qkv[which], send, &s->plan, 0,
                                     which > 0 ? UPIPE_A2A_KV : UPIPE_A2A_Q, plain_each(s)));
    }
    return UPIPE_OK;
}

/* Arguments of attention, with its scratch from the pool. */
static upipe_status plain_attn(pass *s, upipe_attn *a, void **qkv, void *o, int backward)
{
    const upipe_dtype dtype = s->plan.desc.dtype;
    memset(a, 0, sizeof *a);
    a->q = plain_heads(s, qkv[0], 0, dtype);
    a->k = plain_heads(s, qkv[1], 1, dtype);
    a->v = plain_heads(s, qkv[2], 1, dtype);
    a->o = plain_heads(s, o, 0, dtype);
    a->lse = upipe_view_packed(s->lse, UPIPE_F32, a->q.n, a->q.h, 1);
    a->mask.causal = 1;
    a->work_bytes = s->c->ops->attn_bytes(s->c->ops, a, backward);
    return upipe_alloc(s->c, &a->work, a->work_bytes, UPIPE_USE_SCRATCH, "attn_work");
}

static upipe_status plain_forward(pass *s)
{
    const upipe_dtype dtype = s->plan.desc.dtype;
    int64_t q = plain_elements(s, 0), kv = plain_elements(s, 1);
    void *qkv[3];
    upipe_attn a;
    UPIPE_TRY(plain_alloc(s, &s->lse, s->plan.desc.tokens * plain_n(s, 0), UPIPE_F32, "lse"));
    UPIPE_TRY(plain_alloc(s, &qkv[0], q, dtype, "q"));
    UPIPE_TRY(plain_alloc(s, &qkv[1], kv, dtype, "k"));
    UPIPE_TRY(plain_alloc(s, &qkv[2], kv, dtype, "v"));
    UPIPE_TRY(plain_alloc(s, &s->o, q, dtype, "send"));
    UPIPE_TRY(plain_fetch(s, qkv, s->o));
    UPIPE_TRY(plain_attn(s, &a, qkv, s->o, 0));
    UPIPE_TRY(upipe_attn_fwd(s->c, &a));
    UPIPE_TRY(upipe_free(s->c, a.work));
    UPIPE_TRY(upipe_free(s->c, qkv[2]));
    UPIPE_TRY(upipe_free(s->c, qkv[1]));
    UPIPE_TRY(upipe_a2a_to_tokens(s->c, qkv[0], s->o, &s->plan, 0, UPIPE_A2A_Q, plain_each(s)));
    UPIPE_TRY(plain_gather(s, s->o, qkv[0], 0));
    return upipe_free(s->c, qkv[0]);
}

static upipe_status plain_out_forward(pass *s, upipe_view y)
{
    const upipe_view o = plain_tokens(s, s->o, 0), w = plain_stored(s, 3);
    UPIPE_TRY(plain_gemm(s, y, o, w, UPIPE_GEMM_TRANS_B));
    check_terms(s->rank, RESULT_Y, o, w);
    check_product(s->rank, RESULT_Y, y, o.d);
    return UPIPE_OK;
}

/* dO, delta and dWo. */
static upipe_status plain_out_backward(pass *s, upipe_view dy)
{
    const upipe_plan *p = &s->plan;
    const int32_t m = p->per_rank, d = p->desc.head_dim;
    int rank;
    UPIPE_TRY(plain_alloc(s, &s->delta, p->rows * p->desc.heads, UPIPE_F32, "delta"));
    UPIPE_TRY(plain_alloc(s, &s->dout, plain_elements(s, 0), p->desc.dtype, "dout"));
    UPIPE_TRY(plain_out_project(s, s->dout, dy));
    for (rank = 0; rank < p->desc.ranks; ++rank) {
        upipe_view o = upipe_view_packed(s->o, p->desc.dtype, p->rows, p->desc.heads, d);
        void *dout = upipe_view_at(plain_blocks(s, s->dout, 0), 0, rank);
        float *delta = (float *)s->delta + rank * p->rows * m;
        o.data = upipe_view_at(o, 0, rank * m);
        o.h = m;
        UPIPE_TRY(s->c->ops->rowdot(s->c, upipe_view_packed(delta, UPIPE_F32, p->rows, m, 1), o,
                                    upipe_view_packed(dout, p->desc.dtype, p->rows, m, d)));
    }
    UPIPE_TRY(plain_grad_weight(s, 3, dy, plain_tokens(s, s->o, 0)));
    return upipe_free(s->c, s->o);
}

/* grad = dQ, dK or dV of this rank's tokens, heads in natural order, from blocks, which RoPE's inverse goes
 * over; and the weight's gradient. */
static upipe_status plain_grad(pass *s, int which, void *grad, void *blocks)
{
    int kv = which > 0;
    if (which < 2) UPIPE_TRY(plain_rope(s, blocks, kv, 1));
    UPIPE_TRY(plain_gather(s, grad, blocks, kv));
    return plain_grad_weight(s, which, plain_tokens(s, grad, kv), s->x);
}

/* From f32 gradients of K or V by heads to those of the tokens; consumes heads. */
static upipe_status plain_grad_kv(pass *s, int which, void **grad, void *heads)
{
    const upipe_dtype dtype = s->plan.desc.dtype;
    int64_t kv = plain_elements(s, 1);
    void *send = heads, *blocks;
    if (dtype != UPIPE_F32) {
        UPIPE_TRY(plain_alloc(s, &send, kv, dtype, "kv_cast"));
        UPIPE_TRY(s->c->ops->cast(s->c, plain_heads(s, send, 1, dtype), plain_heads(s, heads, 1, UPIPE_F32)));
        UPIPE_TRY(upipe_free(s->c, heads));
    }
    UPIPE_TRY(plain_alloc(s, &blocks, kv, dtype, "kv_blocks"));
    UPIPE_TRY(upipe_a2a_to_tokens(s->c, blocks, send, &s->plan, 0, UPIPE_A2A_DKV, plain_each(s)));
    UPIPE_TRY(plain_grad(s, which, send, blocks)); /* nobody reads send any more */
    *grad = send;
    return upipe_free(s->c, blocks);
}

/* dX = dQ * Wq + dK * Wk + dV * Wv, into dx. */
static upipe_status plain_grad_x(pass *s, upipe_view dx, void **grads)
{
    upipe_view sum = dx;
    int64_t terms = 0;
    int which;
    void *buf = NULL;
    if (dx.dtype != UPIPE_F32) {
        UPIPE_TRY(plain_alloc(s, &buf, dx.n * dx.d, UPIPE_F32, "dx_sum"));
        sum = upipe_view_packed(buf, UPIPE_F32, dx.n, 1, dx.d);
    }
    for (which = 0; which < 3; ++which) {
        const upipe_view grad = plain_tokens(s, grads[which], which > 0), w = plain_stored(s, which);
        UPIPE_TRY(plain_gemm(s, sum, grad, w, which > 0 ? UPIPE_GEMM_ACCUMULATE : 0));
        check_terms(s->rank, RESULT_DX, grad, w);
        terms += grad.d;
    }
    check_product(s->rank, RESULT_DX, sum, terms);
    if (buf != NULL) UPIPE_TRY(s->c->ops->cast(s->c, dx, sum));
    return upipe_free(s->c, buf);
}

static upipe_status plain_backward(pass *s, upipe_view dx)
{
    const upipe_dtype dtype = s->plan.desc.dtype;
    int64_t q = plain_elements(s, 0), kv = plain_elements(s, 1);
    upipe_attn_grad g;
    void *qkv[3], *dout, *delta, *dkv[2], *grads[3];
    int i;
    memset(&g, 0, sizeof g);
    for (i = 0; i < 2; ++i) {
        UPIPE_TRY(plain_alloc(s, &dkv[i], kv, UPIPE_F32, "dkv"));
        UPIPE_TRY(s->c->ops->zero(s->c, dkv[i], (size_t)kv * 4));
    }
    for (i = 0; i < 3; ++i) UPIPE_TRY(plain_alloc(s, &qkv[i], i == 0 ? q : kv, dtype, "qkv"));
    UPIPE_TRY(plain_alloc(s, &grads[0], q, dtype, "send"));
    UPIPE_TRY(plain_fetch(s, qkv, grads[0]));
    UPIPE_TRY(plain_alloc(s, &dout, q, dtype, "dout_heads"));
    UPIPE_TRY(plain_alloc(s, &delta, s->plan.desc.tokens * plain_n(s, 0), UPIPE_F32, "delta_heads"));
    UPIPE_TRY(upipe_a2a_to_heads(s->c, dout, s->dout, &s->plan, 0, UPIPE_A2A_Q, plain_each(s)));
    UPIPE_TRY(upipe_a2a_to_heads(s->c, delta, s->delta, &s->plan, 0, UPIPE_A2A_Q, 4));

    UPIPE_TRY(plain_attn(s, &g.a, qkv, dout, 1));
    g.dout = g.a.o;
    g.dq = plain_heads(s, grads[0], 0, dtype);
    g.dk = plain_heads(s, dkv[0], 1, UPIPE_F32);
    g.dv = plain_heads(s, dkv[1], 1, UPIPE_F32);
    g.delta = upipe_view_packed(delta, UPIPE_F32, g.dq.n, g.dq.h, 1);
    UPIPE_TRY(upipe_attn_bwd(s->c, &g));
    UPIPE_TRY(upipe_free(s->c, g.a.work));
    UPIPE_TRY(upipe_free(s->c, delta));
    UPIPE_TRY(upipe_free(s->c, dout));
    for (i = 0; i < 3; ++i) UPIPE_TRY(upipe_free(s->c, qkv[i]));

    UPIPE_TRY(upipe_a2a_to_tokens(s->c, s->dout, grads[0], &s->plan, 0, UPIPE_A2A_Q, plain_each(s)));
    UPIPE_TRY(plain_grad(s, 0, grads[0], s->dout)); /* dQ has taken the place of dO */
    UPIPE_TRY(upipe_free(s->c, s->dout));
    UPIPE_TRY(check(s->c, s->rank, RESULT_DQ, plain_tokens(s, grads[0], 0)));
    for (i = 0; i < 2; ++i) UPIPE_TRY(plain_grad_kv(s, 1 + i, &grads[1 + i], dkv[i]));
    UPIPE_TRY(plain_grad_x(s, dx, grads));
    for (i = 0; i < 3; ++i) UPIPE_TRY(upipe_free(s->c, grads[i]));
    UPIPE_TRY(upipe_free(s->c, s->delta));
    return upipe_free(s->c, s->lse);
}

/* ---- one pass ---- */

/* y is allocated when the all-to-alls are over. */
static upipe_status pass_forward(pass *s)
{
    if (s->m->plain) {
        UPIPE_TRY(plain_forward(s));
        UPIPE_TRY(check(s->c, s->rank, RESULT_O, plain_tokens(s, s->o, 0)));
        check_lse(s->rank, &s->plan, (const float *)s->lse);
    } else {
        UPIPE_TRY(upipe_layer_fwd(s->c, &s->layer, &s->saved, s->x));
        UPIPE_TRY(check_slots(s->c, s->rank, &s->plan, RESULT_O, &s->saved.out));
        check_lse(s->rank, &s->plan, s->saved.lse);
    }
    s->y = s->x;
    UPIPE_TRY(upipe_alloc(s->c, &s->y.data, upipe_plan_unit_bytes(&s->plan), UPIPE_USE_OTHER, "y"));
    return s->m->plain ? plain_out_forward(s, s->y) : upipe_layer_out_fwd(s->c, &s->layer, s->y, &s->saved);
}

/* y, which holds its gradient, goes back to the pool as soon as it is read; dX takes the place of x. */
static upipe_status pass_backward(pass *s)
{
    upipe_grads grads;
    memset(&grads, 0, sizeof grads);
    grads.wq = s->grads[0];
    grads.wk = s->grads[1];
    grads.wv = s->grads[2];
    grads.wo = s->grads[3];
    UPIPE_TRY(s->m->plain ? plain_out_backward(s, s->y)
                          : upipe_layer_out_bwd(s->c, &s->layer, &grads, &s->saved, s->y));
    UPIPE_TRY(upipe_free(s->c, s->y.data));
    if (s->m->plain) return plain_backward(s, s->x);
    UPIPE_TRY(upipe_layer_bwd(s->c, &s->layer, s->x, &grads, &s->saved, &s->saved.out, s->x));
    UPIPE_TRY(check_slots(s->c, s->rank, &s->plan, RESULT_DQ, &s->saved.out));
    return upipe_saved_free(s->c, &s->saved);
}

static upipe_status pass_timed(pass *s, int way)
{
    sample *now = &s->rank->now;
    double start, cpu;
    UPIPE_TRY(upipe_comm_barrier(s->c, s->c->team));
    cpu = cpu_clock();
    start = cli_clock(NULL);
    UPIPE_TRY(way == 0 ? pass_forward(s) : pass_backward(s));
    UPIPE_TRY(s->c->ops->sync(s->c));
    now->seconds[way] = cli_clock(NULL) - start;
    now->cpu[PART_ALL] += cpu_clock() - cpu;
    return UPIPE_OK;
}

/* One forward and backward; also run dry, so nothing but the table's entries touches the pool's memory. */
static upipe_status pass_run(upipe_ctx *c, rank_state *rank, const method *m)
{
    const size_t unit = upipe_plan_unit_bytes(&m->plan);
    void *const *w = rank->b->weights;
    upipe_plan_desc desc = m->plan.desc;
    float *grad = rank->grads;
    double transfer;
    void *data;
    pass s;
    int i;
    memset(&s, 0, sizeof s);
    s.c = c;
    s.m = m;
    s.rank = rank;
    desc.rank = c->team->rank;
    UPIPE_TRY(upipe_plan_init(&s.plan, &desc, &c->err));
    s.layer.plan = &s.plan;
    s.layer.rope_theta = 500000;
    s.layer.mask.causal = 1;
    s.layer.wq = w[0];
    s.layer.wk = w[1];
    s.layer.wv = w[2];
    s.layer.wo = w[3];
    for (i = 0; i < WEIGHTS; grad += rank->b->weight_n[i], ++i) s.grads[i] = grad;
    UPIPE_TRY(upipe_alloc(c, &data, unit, UPIPE_USE_OTHER, "x"));
    s.x = upipe_view_packed(data, desc.dtype, s.plan.rows, 1, (int32_t)desc.model_dim);
    UPIPE_TRY(c->ops->copy(c, data, rank->x, unit));
    memset(&rank->now, 0, sizeof rank->now);
    UPIPE_TRY(pass_timed(&s, 0));
    UPIPE_TRY(check(c, rank, RESULT_Y, s.y));
    transfer = rank->now.cpu[PART_ALL_TO_ALL]; /* what is copied for the measurement does not count */
    UPIPE_TRY(c->ops->copy(c, s.y.data, rank->dy, unit));
    rank->now.cpu[PART_ALL_TO_ALL] = transfer;
    UPIPE_TRY(pass_timed(&s, 1));
    UPIPE_TRY(check(c, rank, RESULT_DX, s.x));
    for (i = 0; rank->checks && i < WEIGHTS; ++i) check_f32(rank, RESULT_DW + i, s.grads[i]);
    return upipe_free(c, s.x.data);
}

/* ---- a rank ---- */

static upipe_status rank_round(upipe_ctx *c, rank_state *rank, int round)
{
    const bench *b = rank->b;
    int i;
    rank->checks = round == 0;
    for (i = 0; i < b->methods_n; ++i) {
        const int which = rank->which = (i + round) % b->methods_n;
        upipe_mem_init(&rank->mem, rank->slab, b->slab_bytes, rank->blocks, b->blocks_max);
        memset(rank->grads, 0, (size_t)b->grads_n * sizeof(float));
        UPIPE_TRY(pass_run(c, rank, &b->methods[which]));
        rank->peak[which] = rank->mem.peak;
        UPIPE_TRY(upipe_mem_destroy(&rank->mem, &c->err));
        if (round > 0) rank->samples[which][round - 1] = rank->now;
    }
    return UPIPE_OK;
}

static upipe_status rank_main(void *user, int r)
{
    bench *b = (bench *)user;
    upipe_status s = UPIPE_OK;
    upipe_ctx c;
    int round;
    memset(&c, 0, sizeof c);
    c.ops = &b->ops;
    c.mem = &b->ranks[r].mem;
    c.team = upipe_threads_comm(&b->team, r);
    c.user = &b->ranks[r];
    for (round = 0; round <= b->rounds && s == UPIPE_OK; ++round) {
        s = rank_round(&c, &b->ranks[r], round);
        if (s == UPIPE_OK) s = upipe_comm_barrier(&c, c.team);
        if (r == 0 && s == UPIPE_OK)
            fprintf(stderr, PROGRAM ": %lld tokens, %s%d of %d\n", (long long)b->desc.tokens,
                    round == 0 ? "checked; round " : "round ", round, b->rounds);
    }
    if (s != UPIPE_OK) upipe_comm_abort(c.team, c.err.text); /* its sentence, if no call has left one */
    return s;
}

/* ---- set up ---- */

static int fail_with(const char *what, upipe_status s, const char *text)
{
    return cli_fail("%s: %s%s", what, cli_status(s), text);
}

/* What the method's calls hold, from a dry run of them. */
static upipe_status method_dry(bench *b, method *m, upipe_err *e)
{
    static rank_state rank;
    static upipe_dry dry;
    upipe_status s;
    rank.b = b;
    rank.grads = (float *)b->weights[0]; /* asked for addresses alone */
    s = upipe_dry_init(&dry, &m->plan, &b->ops);
    dry.ctx.user = &rank;
    if (s == UPIPE_OK) s = pass_run(&dry.ctx, &rank, m);
    m->peak = dry.mem.peak;
    b->slab_bytes = upipe_max_bytes(b->slab_bytes, dry.mem.need);
    if (dry.mem.blocks_peak > b->blocks_max) b->blocks_max = dry.mem.blocks_peak;
    *e = dry.ctx.err;
    return s;
}

/* One more method. A chunk that the schedule has no stages for is left out; every other failure is one. */
static int bench_method(bench *b, const char *name, int plain, int chunk)
{
    method *m = &b->methods[b->methods_n];
    upipe_plan_desc d = b->desc;
    upipe_err err;
    upipe_status s;
    m->name = name;
    m->plain = plain;
    d.chunk = chunk;
    s = upipe_plan_init(&m->plan, &d, &err);
    if (s == UPIPE_ERR_UNSUPPORTED && chunk < d.heads) return 0;
    if (s == UPIPE_OK && (d.tokens % d.ranks != 0 || m->plan.schedule == UPIPE_UNEVEN))
        return cli_fail("%s: %lld tokens and %d/%d heads do not divide evenly into %d ranks", name,
                        (long long)d.tokens, d.heads, d.kv_heads, d.ranks);
    if (s == UPIPE_OK) s = method_dry(b, m, &err);
    if (s != UPIPE_OK) return fail_with(name, s, err.text);
    ++b->methods_n;
    return 0;
}

static int bench_methods(bench *b)
{
    int chunk;
    if (bench_method(b, "ulysses", 0, b->desc.heads)) return -1;
    /* where ranks share key/value heads, there is no plain way */
    if (b->desc.kv_heads % b->desc.ranks == 0 && bench_method(b, "ulysses_plain_gemm", 1, b->desc.heads))
        return -1;
    for (chunk = b->desc.ranks; chunk < b->desc.heads && b->methods_n < METHODS_MAX; chunk *= 2)
        if (b->desc.heads % chunk == 0 && bench_method(b, "upipe", 0, chunk)) return -1;
    return 0;
}

/* Zeros for the whole run, whose pages are there before the clock runs; NULL without memory. */
static void *bench_alloc(bench *b, size_t bytes)
{
    const size_t whole = (bytes + UPIPE_MEM_ALIGN - 1) / UPIPE_MEM_ALIGN * UPIPE_MEM_ALIGN;
    void *p = aligned_alloc(UPIPE_MEM_ALIGN, whole);
    if (p != NULL) return memset(p, 0, whole);
    b->lacks = 1;
    return NULL;
}

/* n elements of the storage type, uniform with this standard deviation; the same for the same seed. */
static void *noise(bench *b, int64_t n, double deviation, uint64_t seed)
{
    size_t element_bytes = upipe_dtype_bytes(b->desc.dtype);
    char *v = (char *)bench_alloc(b, (size_t)n * element_bytes);
    uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;
    int64_t i;
    for (i = 0; v != NULL && i < n; ++i) {
        float f;
        uint32_t bits;
        uint16_t high;
        state = state * 6364136223846793005u + 1442695040888963407u;
        f = (float)(((double)(state >> 11) * 0x1p-53 - 0.5) * deviation * 3.4641016151377544);
        memcpy(&bits, &f, sizeof f);
        high = (uint16_t)(bits >> 16);
        memcpy(v + (size_t)i * element_bytes, element_bytes == 2 ? (void *)&high : (void *)&f, element_bytes);
    }
    return v;
}

static void bench_weights(bench *b)
{
    int64_t wide = (int64_t)b->desc.heads * b->desc.head_dim,
            narrow = (int64_t)b->desc.kv_heads * b->desc.head_dim;
    int i;
    for (i = 0; i < WEIGHTS; ++i) {
        b->weight_n[i] = (i == 1 || i == 2 ? narrow : wide) * b->desc.model_dim;
        b->grads_n += b->weight_n[i];
        b->weights[i] =
            noise(b, b->weight_n[i], 1 / sqrt((double)(i == 3 ? wide : b->desc.model_dim)), (uint64_t)i + 1);
    }
}

static void bench_rank(bench *b, rank_state *rank, uint64_t seed)
{
    const int64_t rows = b->methods[0].plan.rows, wide = (int64_t)b->desc.heads * b->desc.head_dim;
    const int64_t most = rows * (wide > b->desc.model_dim ? wide : b->desc.model_dim);
    int i;
    rank->b = b;
    rank->slab = bench_alloc(b, b->slab_bytes);
    rank->blocks = (upipe_mem_block *)bench_alloc(b, (size_t)b->blocks_max * sizeof *rank->blocks);
    rank->x = noise(b, rows * b->desc.model_dim, 1, seed + 100);
    rank->dy = noise(b, rows * b->desc.model_dim, 1, seed + 1000);
    rank->grads = (float *)bench_alloc(b, (size_t)b->grads_n * sizeof(float));
    rank->wide = (float *)bench_alloc(b, (size_t)most * sizeof(float));
    for (i = 0; i < RESULTS; ++i)
        if (i != RESULT_LSE || rank == b->ranks)
            rank->expected[i] = (float *)bench_alloc(b, (size_t)result_elements(b, i) * sizeof(float));
    for (i = RESULT_Y; i <= RESULT_DX; i += RESULT_DX - RESULT_Y)
        rank->squares[i] = (double *)bench_alloc(b, (size_t)(rows + b->desc.model_dim) * sizeof(double));
}

static int bench_ranks(bench *b)
{
    int r;
    b->ranks = (rank_state *)bench_alloc(b, (size_t)b->desc.ranks * sizeof *b->ranks);
    for (r = 0; !b->lacks && r < b->desc.ranks; ++r) bench_rank(b, &b->ranks[r], (uint64_t)r);
    return b->lacks ? cli_fail("no memory left for %d ranks of %zu bytes", b->desc.ranks, b->slab_bytes) : 0;
}

static int bench_run(bench *b)
{
    upipe_err err;
    upipe_status s = upipe_threads_init(&b->team, b->desc.ranks, DEADLINE, &err);
    if (s != UPIPE_OK) return fail_with("the team", s, err.text);
    s = upipe_threads_run(&b->team, rank_main, b, NULL, &err);
    upipe_threads_free(&b->team);
    return s == UPIPE_OK ? 0 : fail_with("the run", s, err.text);
}

/* One result of a method on one rank. */
static int verify_result(const bench *b, method *m, int which, const outcome *found)
{
    const int promised = is_exact(b) && !(m->plain && (which == RESULT_Y || which == RESULT_DX));
    const double limit = rounding_block(&m->plan.desc); /* most roundings are the same in both methods */
    const double distance = found->apart == 0 ? 0 : sqrt(found->apart / found->size);
    const char *name = result_names[which];
    m->other[which] |= found->other;
    if (distance > m->distance) m->distance = distance;
    if (promised && found->other)
        return cli_fail("%s with U = %d: %s has other bits than ulysses gives; it is %.3g away, relative",
                        m->name, m->plan.desc.chunk, name, distance);
    if (!(found->rounded <= 1))
        return cli_fail("%s with U = %d: an element of %s is %.3g times as far from what ulysses gives as "
                        "roundings can take it",
                        m->name, m->plan.desc.chunk, name, found->rounded);
    if (!(distance <= limit))
        return cli_fail("%s with U = %d: %s is %.3g from what ulysses gives, relative; at most %.1e is sound",
                        m->name, m->plan.desc.chunk, name, distance, limit);
    return 0;
}

/* No figure without these. */
static int bench_verify(bench *b)
{
    int i, r, k;
    for (i = 0; i < b->methods_n; ++i) {
        method *m = &b->methods[i];
        for (r = 0; r < b->desc.ranks; ++r) {
            if (b->ranks[r].peak[i] != m->peak)
                return cli_fail("%s: rank %d held %zu bytes, the plan says %zu", m->name, r,
                                b->ranks[r].peak[i], m->peak);
            for (k = 0; k < RESULTS; ++k)
                if (verify_result(b, m, k, &b->ranks[r].found[i][k])) return -1;
        }
    }
    return 0;
}

/* ---- results ---- */

/* One number of every round: [0, 2) the slowest rank's seconds, from 2 on the sum of the ranks' parts. */
static void print_rounds(const bench *b, int which, const char *name, int value)
{
    int i, r;
    printf("\"%s\": [", name);
    for (i = 0; i < b->rounds; ++i) {
        double all = 0;
        for (r = 0; r < b->desc.ranks; ++r) {
            const sample *s = &b->ranks[r].samples[which][i];
            if (value >= 2)
                all += s->cpu[value - 2];
            else if (s->seconds[value] > all)
                all = s->seconds[value];
        }
        printf("%s%.6g", i > 0 ? ", " : "", all);
    }
    printf("]");
}

static void print_method(const bench *b, int which)
{
    const method *m = &b->methods[which];
    const upipe_plan_desc *o = &m->plan.desc;
    const sample *s = &b->ranks[0].samples[which][0];
    int k, other;
    printf("{\"method\": \"%s\", \"ranks\": %d, \"chunk\": %d, \"stages\": %d, ", m->name, o->ranks,
           m->plan.desc.chunk, m->plan.stages);
    printf("\"heads\": %d, \"kv_heads\": %d, \"head_dim\": %d, \"model_dim\": %lld, ", o->heads, o->kv_heads,
           o->head_dim, (long long)o->model_dim);
    printf("\"tokens\": %lld, \"dtype\": \"%s\", \"kernels\": \"%s\", \"products\": \"%s\", ",
           (long long)o->tokens, upipe_dtype_name(o->dtype), b->plain_ops.name, PRODUCTS);
    for (k = 0, other = 0; k < RESULTS; ++k) other += m->other[k];
    printf("\"same_bits\": %s, \"other_bits\": [", other == 0 ? "true" : "false");
    for (k = 0, other = 0; k < RESULTS; ++k)
        if (m->other[k]) printf("%s\"%s\"", other++ > 0 ? ", " : "", result_names[k]);
    printf("], \"distance\": %.3g, ", m->distance);
    printf("\"unit_bytes\": %zu, \"peak_bytes\": %zu, \"plan_bytes\": %zu, ", upipe_plan_unit_bytes(&m->plan),
           b->ranks[0].peak[which], m->peak);
    printf("\"product_calls\": [%d, %d], ", s->products[0], s->products[1]);
    print_rounds(b, which, "forward_s", 0);
    printf(", ");
    print_rounds(b, which, "backward_s", 1);
    printf(", \"cpu_s\": {");
    for (k = 0; k < PARTS; ++k) {
        if (k > 0) printf(", ");
        print_rounds(b, which, part_names[k], 2 + k);
    }
    printf("}}\n");
}

/* ---- the command line ---- */

static const char usage_text[] =
    "usage: block --tokens N [flags]\n"
    "\n"
    "Forward and backward of one attention block on thread ranks with Ulysses, with Ulysses of one product\n"
    "a projection, and with UPipe for U = C, 2C, ... below H. Prints one JSON object a method.\n";

#define AT(member) offsetof(bench, member)

/* clang-format off */
static const flag_row flag_rows[] = {
    {"tokens", "N", 1, "", FLAG_WHOLE, AT(desc.tokens), 1, 1 << 30, NULL, 0, "tokens of the sequence; needed"},
    {"ranks", "N", 1, "", FLAG_INT, AT(desc.ranks), 1, RANKS_MAX, "4", 0, "C"},
    {"heads", "N", 1, "", FLAG_INT, AT(desc.heads), 1, 1024, "16", 0, "H, query heads"},
    {"kv-heads", "N", 1, "", FLAG_INT, AT(desc.kv_heads), 1, 1024, "4", 0, "key/value heads"},
    {"head-dim", "N", 1, "", FLAG_INT, AT(desc.head_dim), 1, 256, "64", 0, "elements of a head"},
    {"model-dim", "N", 1, "", FLAG_WHOLE, AT(desc.model_dim), 1, 1 << 20, NULL, 0, "elements of a token (heads * head dim)"},
    {"dtype", "f32|bf16", 1, "", FLAG_CHOICE, AT(dtype), 0, 0, "f32", 0, "storage of activations and weights"},
    {"rounds", "N", 1, "", FLAG_INT, AT(rounds), 1, ROUNDS_MAX, "5", 0, "rounds that are timed, after one that is checked"},
    {"help", NULL, 1, "", FLAG_HELP, 0, 0, 0, NULL, 0, "this text"}};
/* clang-format on */

#undef AT

enum { FLAGS = sizeof flag_rows / sizeof *flag_rows };

static const char *const usage_more[] = {NULL};
static const flag_set option_flags = {flag_rows, FLAGS, 1, usage_text, usage_more, ""};

int main(int argc, char **argv)
{
    static bench b;
    int given[FLAGS] = {0}, i, status;
    cli_start();
    status = flags_read(&option_flags, &b, given, argc, argv);
    if (status != 0) return status - 1;
    if (b.desc.tokens == 0) return cli_refuse("--tokens is needed") - 1;
    if (b.desc.model_dim == 0) b.desc.model_dim = (int64_t)b.desc.heads * b.desc.head_dim;
    b.desc.dtype = (upipe_dtype)b.dtype;
    timed_ops(&b);
    bench_weights(&b);
    status = bench_methods(&b) || bench_ranks(&b) || bench_run(&b) || bench_verify(&b);
    for (i = 0; !status && i < b.methods_n; ++i) print_method(&b, i);
    if (!status) status = cli_flush("the table");
    return status ? EXIT_RUN : 0;
}

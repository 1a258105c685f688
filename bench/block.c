/* block.c -- measures the attention block on thread ranks: Ulysses, Ulysses written plainly, and UPipe over U
 *
 *     block --tokens N [--ranks N] [--heads N] [--kv-heads N] [--head-dim N] [--model-dim N] [--dtype TYPE]
 *           [--rounds N]
 *
 * The block is a trainer's: x -> Q, K, V -> RoPE -> exchange -> causal attention -> exchange -> output
 * projection, y; and back from the gradient of y to those of x and of the four weights, with Q, K, V
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
 * Round 0 warms up and checks: results of all methods against those of ulysses. In f32 with the built-in
 * product they must be the same bits, otherwise agree within rounding; and the pool's peak must be what a dry
 * run of the same calls found.
 *
 * Prints one JSON object a method on stdout. Seconds are the host's clock from a barrier until the slowest
 * rank is done, one number a round. cpu_s are seconds of processor time of all ranks together, by part: they
 * leave out waits and other programs, which matters where ranks outnumber cores. bench/block.py runs this and
 * keeps the results.
 */
#define PROGRAM "block"

#include "upipe/net/upipe_net_threads.h"
#include "upipe/upipe.h"

#include "../examples/common/cli.h"
#include "../examples/common/products.h"

#define BUILT_IN (strcmp(PRODUCTS, "built-in") == 0)

enum { RANKS_MAX = 64, METHODS_MAX = 12, ROUNDS_MAX = 100, DEADLINE = 600, WEIGHTS = 4 };

/* Parts of the processor time, as in the paper's runtime table; what is left of PART_ALL is its "other". */
typedef enum part { PART_ALL_TO_ALL, PART_ATTN_FWD, PART_ATTN_BWD, PART_PRODUCTS, PART_ALL, PARTS } part;

static const char *const part_names[] = {"transfer", "attn_fwd", "attn_bwd", "products", "all"};

typedef struct options {
    int64_t tokens, model_dim;
    int ranks, heads, kv_heads, head_dim, rounds;
    upipe_dtype dtype;
} options;

/* What one rank measures in one pass. */
typedef struct sample {
    double seconds[2]; /* forward, backward */
    double cpu[PARTS];
    int products[2]; /* calls */
} sample;

typedef struct method {
    const char *name;
    int plain;
    upipe_plan plan;
    upipe_layer layer;
    size_t peak, slab_bytes; /* of the dry run */
    int blocks_max;
    int same;        /* bits of all results those of the first method */
    double distance; /* else the largest relative L2 distance of a result */
} method;

/* One rank: what it reads, where its results go, its memory. */
typedef struct rank_state {
    struct bench *b;
    upipe_mem mem;
    upipe_err err;
    upipe_mem_block *blocks;
    void *slab, *x, *dy;      /* x, dy [T][D], storage type */
    void *results, *expected; /* y, dX, storage type; while results are checked */
    float *grads, *expected_grads;
    size_t peak[METHODS_MAX];
    int same[METHODS_MAX];
    double distance[METHODS_MAX];
    sample now, samples[METHODS_MAX][ROUNDS_MAX];
} rank_state;

typedef struct bench {
    options o;
    upipe_ops plain_ops, ops; /* the backend's, and the same with its calls timed */
    upipe_threads team;
    method methods[METHODS_MAX];
    int methods_n, blocks_max;
    void *weights[WEIGHTS]; /* wq wk wv wo, storage type */
    int64_t weight_n[WEIGHTS], grads_n;
    size_t slab_bytes, unit_bytes;
    rank_state *ranks;
    upipe_plan blocks; /* one token and one head a rank */
} bench;

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

/* Ranks that are threads exchange by copies; the layer also copies each block of dO into O's place. */
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

/* ---- Ulysses, written straight down ---- */

/* What the forward leaves for the backward. */
typedef struct plain_saved {
    void *o;     /* [T][H][d] */
    void *lse;   /* f32 [S][m] */
    void *dout;  /* [C][T][m][d], after the output projection's backward; then dQ */
    void *delta; /* f32 [C][T][m] */
} plain_saved;

typedef struct plain_run {
    upipe_ctx *c;
    const method *m;
    upipe_plan_desc d;
    int64_t rows;
    int heads[2];      /* of a rank: query, key/value */
    upipe_plan blocks; /* one token and one head a rank: exchanges of blocks of any size */
    upipe_view x;
    float *grads[WEIGHTS];
} plain_run;

static upipe_status plain_alloc(plain_run *r, void **out, int64_t elements, upipe_dtype dtype,
                                const char *tag)
{
    return upipe_mem_alloc(r->c->mem, out, (size_t)elements * upipe_dtype_bytes(dtype), tag, &r->c->err);
}

static upipe_status plain_free(plain_run *r, void *p)
{
    return upipe_mem_free(r->c->mem, p, &r->c->err);
}

static upipe_status plain_gemm(plain_run *r, upipe_view out, upipe_view a, upipe_view b, int flags)
{
    size_t bytes = r->c->ops->gemm_bytes(r->c->ops, out, a, b, flags);
    void *work;
    UPIPE_TRY(upipe_mem_alloc(r->c->mem, &work, bytes, "gemm_work", &r->c->err));
    UPIPE_TRY(r->c->ops->gemm(r->c, out, a, b, flags, work, bytes));
    return plain_free(r, work);
}

static int64_t plain_elements(const plain_run *r, int kv)
{
    return r->rows * r->d.ranks * r->heads[kv] * r->d.head_dim;
}

/* What is exchanged, [C][T][width], as a tensor [T][C][width]. */
static upipe_view plain_blocks(const plain_run *r, void *data, int kv)
{
    int32_t width = r->heads[kv] * r->d.head_dim;
    return upipe_view_make(data, r->d.dtype, r->rows, width, r->d.ranks, r->rows * width, width);
}

/* All heads of a token side by side: [T][H*d]. */
static upipe_view plain_tokens(const plain_run *r, void *data, int kv)
{
    return upipe_view_packed(data, r->d.dtype, r->rows, 1, r->d.ranks * r->heads[kv] * r->d.head_dim);
}

/* wq, wk, wv, wo or its gradient, whole. */
static upipe_view plain_weight(const plain_run *r, void *w, upipe_dtype dtype, int which)
{
    int32_t dim = (int32_t)r->d.model_dim,
            width = (which == 1 || which == 2 ? r->d.kv_heads : r->d.heads) * r->d.head_dim;
    return which == 3 ? upipe_view_packed(w, dtype, dim, 1, width)
                      : upipe_view_packed(w, dtype, width, 1, dim);
}

static void *plain_stored(const plain_run *r, int which)
{
    return ((const rank_state *)r->c->user)->b->weights[which];
}

/* blocks [C][T][m*d] = tokens [T][H*d] */
static upipe_status plain_scatter(plain_run *r, void *blocks, void *tokens, int kv)
{
    upipe_view to = plain_blocks(r, blocks, kv);
    return r->c->ops->cast(r->c, to, upipe_view_packed(tokens, r->d.dtype, r->rows, to.h, to.d));
}

/* The built-in product writes its columns in C blocks, where the exchange sends them from. BLAS would take C
 * calls for that, each of which packs x: there it is one call into a buffer of send's size, and a scatter, which
 * is faster. */
static upipe_status plain_project(plain_run *r, int which, void *send, void *buf)
{
    int kv = which > 0;
    int64_t width = (int64_t)r->heads[kv] * r->d.head_dim, dim = r->d.model_dim;
    upipe_view w = plain_weight(r, plain_stored(r, which), r->d.dtype, which);
    if (!BUILT_IN) {
        UPIPE_TRY(plain_gemm(r, plain_tokens(r, buf, kv), r->x, w, UPIPE_GEMM_TRANS_B));
        return plain_scatter(r, send, buf, kv);
    }
    w = upipe_view_make(w.data, r->d.dtype, width, dim, r->d.ranks, width * dim, (int32_t)dim);
    return plain_gemm(r, plain_blocks(r, send, kv), r->x, w, UPIPE_GEMM_TRANS_B);
}

/* Blocks of dO, in the same way. */
static upipe_status plain_out_project(plain_run *r, void *dout, upipe_view dy)
{
    int32_t width = r->heads[0] * r->d.head_dim;
    upipe_view w = plain_weight(r, plain_stored(r, 3), r->d.dtype, 3);
    void *buf;
    if (!BUILT_IN) {
        UPIPE_TRY(plain_alloc(r, &buf, plain_elements(r, 0), r->d.dtype, "dout_tokens"));
        UPIPE_TRY(plain_gemm(r, plain_tokens(r, buf, 0), dy, w, 0));
        UPIPE_TRY(plain_scatter(r, dout, buf, 0));
        return plain_free(r, buf);
    }
    w = upipe_view_make(w.data, r->d.dtype, w.n, w.n_step, r->d.ranks, width, width);
    return plain_gemm(r, plain_blocks(r, dout, 0), dy, w, 0);
}

static upipe_status plain_rope(plain_run *r, void *blocks, int kv, int inverse)
{
    upipe_rope rope;
    memset(&rope, 0, sizeof rope);
    rope.x = upipe_view_packed(blocks, r->d.dtype, r->rows, r->heads[kv], r->d.head_dim);
    rope.count = r->d.ranks;
    rope.step = r->rows * r->heads[kv] * r->d.head_dim;
    rope.pos0 = r->c->team->rank * r->rows;
    rope.theta = r->m->layer.rope_theta;
    rope.inverse = inverse;
    return r->c->ops->rope(r->c, &rope);
}

/* Bytes that go to one rank. */
static size_t plain_block_bytes(const plain_run *r, int kv, int64_t width)
{
    return (size_t)(r->rows * r->heads[kv] * width);
}

static upipe_status plain_to_heads(plain_run *r, void *dst, const void *src, int kv)
{
    size_t bytes = plain_block_bytes(r, kv, r->d.head_dim * (int64_t)upipe_dtype_bytes(r->d.dtype));
    return upipe_a2a_to_heads(r->c, dst, src, &r->blocks, 0, UPIPE_A2A_Q, bytes);
}

static upipe_status plain_to_tokens(plain_run *r, void *dst, const void *src, int kv)
{
    size_t bytes = plain_block_bytes(r, kv, r->d.head_dim * (int64_t)upipe_dtype_bytes(r->d.dtype));
    return upipe_a2a_to_tokens(r->c, dst, src, &r->blocks, 0, UPIPE_A2A_Q, bytes);
}

/* dst [T][H*d] = what has arrived, [C][T][m*d]. */
static upipe_status plain_gather(plain_run *r, void *dst, void *blocks, int kv)
{
    upipe_view from = plain_blocks(r, blocks, kv);
    return r->c->ops->cast(r->c, upipe_view_packed(dst, r->d.dtype, r->rows, from.h, from.d), from);
}

/* Q, K, V of this rank's heads and all tokens; send is the larger of what is sent. */
static upipe_status plain_fetch(plain_run *r, void **qkv, void *send)
{
    int which;
    for (which = 0; which < 3; ++which) {
        UPIPE_TRY(plain_project(r, which, send, qkv[which]));
        if (which < 2) UPIPE_TRY(plain_rope(r, send, which > 0, 0));
        UPIPE_TRY(plain_to_heads(r, qkv[which], send, which > 0));
    }
    return UPIPE_OK;
}

static upipe_view plain_heads(const plain_run *r, void *data, int kv, upipe_dtype dtype)
{
    return upipe_view_packed(data, dtype, r->d.tokens, r->heads[kv], r->d.head_dim);
}

/* Arguments of attention, with its scratch from the pool. */
static upipe_status plain_attn(plain_run *r, upipe_attn *a, void **qkv, void *o, void *lse, int backward)
{
    memset(a, 0, sizeof *a);
    a->q = plain_heads(r, qkv[0], 0, r->d.dtype);
    a->k = plain_heads(r, qkv[1], 1, r->d.dtype);
    a->v = plain_heads(r, qkv[2], 1, r->d.dtype);
    a->o = plain_heads(r, o, 0, r->d.dtype);
    a->lse = upipe_view_packed(lse, UPIPE_F32, r->d.tokens, r->heads[0], 1);
    a->mask.causal = 1;
    a->work_bytes = r->c->ops->attn_bytes(r->c->ops, a, backward);
    return upipe_mem_alloc(r->c->mem, &a->work, a->work_bytes, "attn_work", &r->c->err);
}

static upipe_status plain_forward(plain_run *r, plain_saved *save)
{
    int64_t q = plain_elements(r, 0), kv = plain_elements(r, 1);
    void *qkv[3], *send;
    upipe_attn a;
    UPIPE_TRY(plain_alloc(r, &save->lse, r->d.tokens * r->heads[0], UPIPE_F32, "lse"));
    UPIPE_TRY(plain_alloc(r, &qkv[0], q, r->d.dtype, "q"));
    UPIPE_TRY(plain_alloc(r, &qkv[1], kv, r->d.dtype, "k"));
    UPIPE_TRY(plain_alloc(r, &qkv[2], kv, r->d.dtype, "v"));
    UPIPE_TRY(plain_alloc(r, &send, q, r->d.dtype, "send"));
    UPIPE_TRY(plain_fetch(r, qkv, send));
    UPIPE_TRY(plain_attn(r, &a, qkv, send, save->lse, 0));
    UPIPE_TRY(upipe_attn_fwd(r->c, &a));
    UPIPE_TRY(plain_free(r, a.work));
    UPIPE_TRY(plain_free(r, qkv[2]));
    UPIPE_TRY(plain_free(r, qkv[1]));
    UPIPE_TRY(plain_to_tokens(r, qkv[0], send, 0));
    UPIPE_TRY(plain_gather(r, send, qkv[0], 0));
    UPIPE_TRY(plain_free(r, qkv[0]));
    save->o = send;
    return UPIPE_OK;
}

static upipe_status plain_out_forward(plain_run *r, upipe_view y, const plain_saved *save)
{
    return plain_gemm(r, y, plain_tokens(r, save->o, 0), plain_weight(r, plain_stored(r, 3), r->d.dtype, 3),
                      UPIPE_GEMM_TRANS_B);
}

/* dO, delta and dWo. */
static upipe_status plain_out_backward(plain_run *r, plain_saved *save, upipe_view dy)
{
    int32_t m = r->heads[0], d = r->d.head_dim;
    int rank;
    UPIPE_TRY(plain_alloc(r, &save->delta, r->rows * r->d.heads, UPIPE_F32, "delta"));
    UPIPE_TRY(plain_alloc(r, &save->dout, plain_elements(r, 0), r->d.dtype, "dout"));
    UPIPE_TRY(plain_out_project(r, save->dout, dy));
    for (rank = 0; rank < r->d.ranks; ++rank) {
        upipe_view o = upipe_view_packed(save->o, r->d.dtype, r->rows, r->d.heads, d), dout = o;
        o.data = upipe_view_at(o, 0, rank * m);
        o.h = m;
        dout = upipe_view_packed(upipe_view_at(plain_blocks(r, save->dout, 0), 0, rank), r->d.dtype, r->rows,
                                 m, d);
        UPIPE_TRY(r->c->ops->rowdot(
            r->c, upipe_view_packed((float *)save->delta + rank * r->rows * m, UPIPE_F32, r->rows, m, 1), o,
            dout));
    }
    UPIPE_TRY(plain_gemm(r, plain_weight(r, r->grads[3], UPIPE_F32, 3), dy, plain_tokens(r, save->o, 0),
                         UPIPE_GEMM_TRANS_A | UPIPE_GEMM_ACCUMULATE));
    return plain_free(r, save->o);
}

/* grad = dQ, dK or dV of this rank's tokens, heads in natural order, from blocks, which RoPE's inverse goes
 * over; and the weight's gradient. */
static upipe_status plain_grad(plain_run *r, int which, void *grad, void *blocks)
{
    int kv = which > 0;
    if (which < 2) UPIPE_TRY(plain_rope(r, blocks, kv, 1));
    UPIPE_TRY(plain_gather(r, grad, blocks, kv));
    return plain_gemm(r, plain_weight(r, r->grads[which], UPIPE_F32, which), plain_tokens(r, grad, kv), r->x,
                      UPIPE_GEMM_TRANS_A | UPIPE_GEMM_ACCUMULATE);
}

/* From f32 gradients of K or V by heads to those of the tokens; consumes heads. */
static upipe_status plain_grad_kv(plain_run *r, int which, void **grad, void *heads)
{
    int64_t kv = plain_elements(r, 1);
    void *send = heads, *blocks;
    if (r->d.dtype != UPIPE_F32) {
        UPIPE_TRY(plain_alloc(r, &send, kv, r->d.dtype, "kv_cast"));
        UPIPE_TRY(
            r->c->ops->cast(r->c, plain_heads(r, send, 1, r->d.dtype), plain_heads(r, heads, 1, UPIPE_F32)));
        UPIPE_TRY(plain_free(r, heads));
    }
    UPIPE_TRY(plain_alloc(r, &blocks, kv, r->d.dtype, "kv_blocks"));
    UPIPE_TRY(plain_to_tokens(r, blocks, send, 1));
    UPIPE_TRY(plain_grad(r, which, send, blocks)); /* nobody reads send any more */
    *grad = send;
    return plain_free(r, blocks);
}

/* dX = dQ * Wq + dK * Wk + dV * Wv, into dx. */
static upipe_status plain_grad_x(plain_run *r, upipe_view dx, void **grads)
{
    upipe_view sum = dx;
    int which;
    void *buf = NULL;
    if (r->d.dtype != UPIPE_F32) {
        UPIPE_TRY(plain_alloc(r, &buf, r->rows * r->d.model_dim, UPIPE_F32, "dx_sum"));
        sum = upipe_view_packed(buf, UPIPE_F32, dx.n, 1, dx.d);
    }
    for (which = 0; which < 3; ++which)
        UPIPE_TRY(plain_gemm(r, sum, plain_tokens(r, grads[which], which > 0),
                             plain_weight(r, plain_stored(r, which), r->d.dtype, which),
                             which > 0 ? UPIPE_GEMM_ACCUMULATE : 0));
    if (buf != NULL) UPIPE_TRY(r->c->ops->cast(r->c, dx, sum));
    return plain_free(r, buf);
}

static upipe_status plain_backward(plain_run *r, plain_saved *save, upipe_view dx)
{
    int64_t q = plain_elements(r, 0), kv = plain_elements(r, 1);
    size_t stat = plain_block_bytes(r, 0, 4);
    upipe_attn_grad g;
    void *qkv[3], *dout, *delta, *send, *dkv[2], *grads[3];
    int i;
    memset(&g, 0, sizeof g);
    for (i = 0; i < 2; ++i) {
        UPIPE_TRY(plain_alloc(r, &dkv[i], kv, UPIPE_F32, "dkv"));
        UPIPE_TRY(r->c->ops->zero(r->c, dkv[i], (size_t)kv * 4));
    }
    for (i = 0; i < 3; ++i) UPIPE_TRY(plain_alloc(r, &qkv[i], i == 0 ? q : kv, r->d.dtype, "qkv"));
    UPIPE_TRY(plain_alloc(r, &send, q, r->d.dtype, "send"));
    UPIPE_TRY(plain_fetch(r, qkv, send));
    UPIPE_TRY(plain_alloc(r, &dout, q, r->d.dtype, "dout_heads"));
    UPIPE_TRY(plain_alloc(r, &delta, r->d.tokens * r->heads[0], UPIPE_F32, "delta_heads"));
    UPIPE_TRY(plain_to_heads(r, dout, save->dout, 0));
    UPIPE_TRY(upipe_a2a_to_heads(r->c, delta, save->delta, &r->blocks, 0, UPIPE_A2A_Q, stat));

    UPIPE_TRY(plain_attn(r, &g.a, qkv, dout, save->lse, 1));
    g.dout = g.a.o;
    g.dq = plain_heads(r, send, 0, r->d.dtype);
    g.dk = plain_heads(r, dkv[0], 1, UPIPE_F32);
    g.dv = plain_heads(r, dkv[1], 1, UPIPE_F32);
    g.delta = upipe_view_packed(delta, UPIPE_F32, r->d.tokens, r->heads[0], 1);
    UPIPE_TRY(upipe_attn_bwd(r->c, &g));
    UPIPE_TRY(plain_free(r, g.a.work));
    UPIPE_TRY(plain_free(r, delta));
    UPIPE_TRY(plain_free(r, dout));
    for (i = 0; i < 3; ++i) UPIPE_TRY(plain_free(r, qkv[i]));

    UPIPE_TRY(plain_to_tokens(r, save->dout, send, 0)); /* dQ takes the place of dO */
    UPIPE_TRY(plain_grad(r, 0, send, save->dout));
    grads[0] = send;
    UPIPE_TRY(plain_free(r, save->dout));
    for (i = 0; i < 2; ++i) UPIPE_TRY(plain_grad_kv(r, 1 + i, &grads[1 + i], dkv[i]));
    UPIPE_TRY(plain_grad_x(r, dx, grads));
    for (i = 0; i < 3; ++i) UPIPE_TRY(plain_free(r, grads[i]));
    UPIPE_TRY(plain_free(r, save->delta));
    return plain_free(r, save->lse);
}

/* ---- one pass ---- */

/* Both ways of either kind of method, between the same calls of the clock. */
typedef struct pass {
    const method *m;
    plain_run plain;
    plain_saved plain_left;
    upipe_saved saved;
    upipe_grads grads;
} pass;

/* y is taken from the pool when the exchanges are over. */
static upipe_status pass_forward(upipe_ctx *c, pass *s, upipe_view *y, upipe_view x)
{
    if (s->m->plain)
        UPIPE_TRY(plain_forward(&s->plain, &s->plain_left));
    else
        UPIPE_TRY(upipe_layer_fwd(c, &s->m->layer, &s->saved, x));
    *y = x;
    UPIPE_TRY(upipe_mem_alloc(c->mem, &y->data, upipe_plan_unit_bytes(&s->m->plan), "y", &c->err));
    if (s->m->plain) return plain_out_forward(&s->plain, *y, &s->plain_left);
    return upipe_layer_out_fwd(c, &s->m->layer, *y, &s->saved);
}

/* y, which holds its gradient, goes back to the pool as soon as it is read; dX takes the place of x. */
static upipe_status pass_backward(upipe_ctx *c, pass *s, upipe_view y, upipe_view x)
{
    if (s->m->plain) {
        UPIPE_TRY(plain_out_backward(&s->plain, &s->plain_left, y));
        UPIPE_TRY(upipe_mem_free(c->mem, y.data, &c->err));
        return plain_backward(&s->plain, &s->plain_left, x);
    }
    UPIPE_TRY(upipe_layer_out_bwd(c, &s->m->layer, &s->grads, &s->saved, y));
    UPIPE_TRY(upipe_mem_free(c->mem, y.data, &c->err));
    UPIPE_TRY(upipe_layer_bwd(c, &s->m->layer, x, &s->grads, &s->saved, &s->saved.out, x));
    return upipe_saved_free(c, &s->saved);
}

static void pass_begin(pass *s, const method *m, upipe_ctx *c, rank_state *rank, upipe_view x)
{
    const bench *b = rank->b;
    float *at = rank->grads;
    int i;
    memset(s, 0, sizeof *s);
    s->m = m;
    s->plain.c = c;
    s->plain.m = m;
    s->plain.d = m->plan.desc;
    s->plain.rows = m->plan.rows;
    s->plain.heads[0] = b->o.heads / b->o.ranks;
    s->plain.heads[1] = b->o.kv_heads / b->o.ranks;
    s->plain.blocks = b->blocks;
    s->plain.x = x;
    for (i = 0; i < WEIGHTS; at += b->weight_n[i], ++i) s->plain.grads[i] = at;
    s->grads.wq = s->plain.grads[0];
    s->grads.wk = s->plain.grads[1];
    s->grads.wv = s->plain.grads[2];
    s->grads.wo = s->plain.grads[3];
}

/* One forward and backward; also run dry, so nothing but the table's entries touches the pool's memory. */
static upipe_status pass_run(upipe_ctx *c, rank_state *rank, const method *m)
{
    const bench *b = rank->b;
    sample *now = &rank->now;
    int32_t dim = (int32_t)b->o.model_dim;
    upipe_view x, y;
    void *data;
    double start, cpu, transfer;
    pass s;
    UPIPE_TRY(upipe_mem_alloc(c->mem, &data, b->unit_bytes, "x", &c->err));
    x = upipe_view_packed(data, b->o.dtype, m->plan.rows, 1, dim);
    UPIPE_TRY(c->ops->copy(c, x.data, rank->x, b->unit_bytes));
    pass_begin(&s, m, c, rank, x);
    memset(now, 0, sizeof *now);

    UPIPE_TRY(upipe_comm_barrier(c, c->team));
    cpu = cpu_clock();
    start = cli_clock(NULL);
    UPIPE_TRY(pass_forward(c, &s, &y, x));
    UPIPE_TRY(c->ops->sync(c));
    now->seconds[0] = cli_clock(NULL) - start;
    now->cpu[PART_ALL] = cpu_clock() - cpu;

    transfer = now->cpu[PART_ALL_TO_ALL]; /* what is copied for the measurement does not count */
    if (rank->results != NULL) UPIPE_TRY(c->ops->copy(c, rank->results, y.data, b->unit_bytes));
    UPIPE_TRY(c->ops->copy(c, y.data, rank->dy, b->unit_bytes));
    now->cpu[PART_ALL_TO_ALL] = transfer;

    UPIPE_TRY(upipe_comm_barrier(c, c->team));
    cpu = cpu_clock();
    start = cli_clock(NULL);
    UPIPE_TRY(pass_backward(c, &s, y, x));
    UPIPE_TRY(c->ops->sync(c));
    now->seconds[1] = cli_clock(NULL) - start;
    now->cpu[PART_ALL] += cpu_clock() - cpu;

    transfer = now->cpu[PART_ALL_TO_ALL];
    if (rank->results != NULL)
        UPIPE_TRY(c->ops->copy(c, (char *)rank->results + b->unit_bytes, x.data, b->unit_bytes));
    now->cpu[PART_ALL_TO_ALL] = transfer;
    return upipe_mem_free(c->mem, x.data, &c->err);
}

/* ---- a rank ---- */

static double element(const void *v, upipe_dtype dtype, int64_t i)
{
    uint32_t bits;
    float f;
    if (dtype == UPIPE_F32) return (double)((const float *)v)[i];
    bits = (uint32_t)((const uint16_t *)v)[i] << 16;
    memcpy(&f, &bits, sizeof f);
    return (double)f;
}

/* Notes equal bits, and otherwise the relative L2 distance; one that is no number counts as infinite. */
static void compare(rank_state *rank, int which, const void *got, const void *want, int64_t n,
                    upipe_dtype dtype)
{
    double apart = 0, size = 0;
    int64_t i;
    if (memcmp(got, want, (size_t)n * upipe_dtype_bytes(dtype)) == 0) return;
    rank->same[which] = 0;
    for (i = 0; i < n; ++i) {
        double a = element(got, dtype, i), b = element(want, dtype, i);
        apart += (a - b) * (a - b);
        size += b * b;
    }
    apart = sqrt(apart / size);
    if (!(apart <= rank->distance[which])) rank->distance[which] = isnan(apart) ? INFINITY : apart;
}

/* Results of a method against those of method 0, which come first and are kept. */
static void check(rank_state *rank, int which)
{
    const bench *b = rank->b;
    int64_t acts = (int64_t)(b->unit_bytes / upipe_dtype_bytes(b->o.dtype)), at = 0;
    int i;
    rank->same[which] = 1;
    rank->distance[which] = 0;
    if (which == 0) {
        memcpy(rank->expected, rank->results, 2 * b->unit_bytes);
        memcpy(rank->expected_grads, rank->grads, (size_t)b->grads_n * sizeof(float));
        return;
    }
    for (i = 0; i < 2; ++i)
        compare(rank, which, (char *)rank->results + (size_t)i * b->unit_bytes,
                (char *)rank->expected + (size_t)i * b->unit_bytes, acts, b->o.dtype);
    for (i = 0; i < WEIGHTS; at += b->weight_n[i], ++i)
        compare(rank, which, rank->grads + at, rank->expected_grads + at, b->weight_n[i], UPIPE_F32);
}

static upipe_status rank_round(upipe_ctx *c, rank_state *rank, int round)
{
    bench *b = rank->b;
    int i;
    for (i = 0; i < b->methods_n; ++i) {
        int which = (i + round) % b->methods_n;
        upipe_mem_init(&rank->mem, rank->slab, b->slab_bytes, rank->blocks, b->blocks_max);
        memset(rank->grads, 0, (size_t)b->grads_n * sizeof(float));
        UPIPE_TRY(pass_run(c, rank, &b->methods[which]));
        rank->peak[which] = rank->mem.peak;
        UPIPE_TRY(upipe_mem_destroy(&rank->mem, &c->err));
        if (round == 0)
            check(rank, which);
        else
            rank->samples[which][round - 1] = rank->now;
    }
    return UPIPE_OK;
}

static upipe_status rank_main(void *user, int r)
{
    bench *b = (bench *)user;
    rank_state *rank = &b->ranks[r];
    upipe_status s = UPIPE_OK;
    upipe_ctx c;
    int round;
    memset(&c, 0, sizeof c);
    c.ops = &b->ops;
    c.mem = &rank->mem;
    c.team = upipe_threads_comm(&b->team, r);
    c.user = rank;
    for (round = 0; round <= b->o.rounds && s == UPIPE_OK; ++round) {
        s = rank_round(&c, rank, round);
        if (s == UPIPE_OK) s = upipe_comm_barrier(&c, c.team);
        if (round == 0) { /* nothing is checked from here on */
            free(rank->results);
            rank->results = NULL;
        }
        if (r == 0 && s == UPIPE_OK)
            fprintf(stderr, PROGRAM ": %lld tokens, %s%d of %d\n", (long long)b->o.tokens,
                    round == 0 ? "checked; round " : "round ", round, b->o.rounds);
    }
    rank->err = c.err;
    return s;
}

/* ---- set up ---- */

static int fail_with(const char *what, upipe_status s, const char *text)
{
    return cli_fail("%s: %s%s", what, cli_status(s), text);
}

/* What the method's calls hold, from a dry run of them. */
static upipe_status method_dry(bench *b, method *m, upipe_dry *dry, upipe_err *e)
{
    static rank_state rank;
    upipe_status s;
    rank.b = b;
    rank.grads = (float *)b->weights[0]; /* asked for addresses alone */
    s = upipe_dry_init(dry, &m->plan, &b->ops);
    dry->ctx.user = &rank;
    if (s == UPIPE_OK) s = pass_run(&dry->ctx, &rank, m);
    if (s != UPIPE_OK) return *e = dry->ctx.err, s;
    m->peak = dry->mem.peak;
    m->slab_bytes = dry->mem.need;
    m->blocks_max = dry->mem.blocks_peak;
    return UPIPE_OK;
}

static upipe_status method_plan(bench *b, method *m, int chunk, upipe_err *e)
{
    upipe_dry *dry;
    upipe_plan_desc d;
    upipe_status s;
    memset(&d, 0, sizeof d);
    d.tokens = b->o.tokens;
    d.model_dim = b->o.model_dim;
    d.ranks = b->o.ranks;
    d.heads = b->o.heads;
    d.kv_heads = b->o.kv_heads;
    d.head_dim = b->o.head_dim;
    d.dtype = b->o.dtype;
    d.chunk = chunk;
    UPIPE_TRY(upipe_plan_init(&m->plan, &d, e));
    memset(&d, 0, sizeof d);
    d.tokens = d.ranks = d.heads = b->o.ranks;
    d.head_dim = 1;
    UPIPE_TRY(upipe_plan_init(&b->blocks, &d, e));
    m->layer.plan = &m->plan;
    m->layer.rope_theta = 500000;
    m->layer.mask.causal = 1;
    m->layer.wq = b->weights[0];
    m->layer.wk = b->weights[1];
    m->layer.wv = b->weights[2];
    m->layer.wo = b->weights[3];
    b->unit_bytes = upipe_plan_unit_bytes(&m->plan);
    dry = (upipe_dry *)malloc(sizeof *dry);
    if (dry == NULL) return upipe_fail(e, UPIPE_ERR_MEMORY, "no entry left for a dry run");
    s = method_dry(b, m, dry, e);
    free(dry);
    return s;
}

/* One more method. A chunk that the schedule has no stages for is left out; every other failure is one. */
static int bench_method(bench *b, const char *name, int plain, int chunk)
{
    method *m = &b->methods[b->methods_n];
    upipe_err err;
    upipe_status s;
    m->name = name;
    m->plain = plain;
    s = method_plan(b, m, chunk, &err);
    if (s == UPIPE_ERR_UNSUPPORTED && chunk < b->o.heads) return 0;
    if (s != UPIPE_OK) return fail_with(name, s, err.text);
    if (m->slab_bytes > b->slab_bytes) b->slab_bytes = m->slab_bytes;
    if (m->blocks_max > b->blocks_max) b->blocks_max = m->blocks_max;
    ++b->methods_n;
    return 0;
}

static int bench_methods(bench *b)
{
    int chunk;
    if (bench_method(b, "ulysses", 0, b->o.heads)) return -1;
    /* where ranks share key/value heads, there is no plain way */
    if (b->o.kv_heads % b->o.ranks == 0 && bench_method(b, "ulysses_plain_gemm", 1, b->o.heads)) return -1;
    for (chunk = b->o.ranks; chunk < b->o.heads && b->methods_n < METHODS_MAX; chunk *= 2)
        if (b->o.heads % chunk == 0 && bench_method(b, "upipe", 0, chunk)) return -1;
    return 0;
}

/* n elements of the storage type, uniform with this standard deviation; the same for the same seed. */
static void *noise(const bench *b, int64_t n, double deviation, uint64_t seed)
{
    size_t element_bytes = upipe_dtype_bytes(b->o.dtype);
    char *v = (char *)malloc((size_t)n * element_bytes);
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

static int bench_weights(bench *b)
{
    int64_t wide = (int64_t)b->o.heads * b->o.head_dim, narrow = (int64_t)b->o.kv_heads * b->o.head_dim;
    int i;
    for (i = 0; i < WEIGHTS; ++i) {
        b->weight_n[i] = (i == 1 || i == 2 ? narrow : wide) * b->o.model_dim;
        b->grads_n += b->weight_n[i];
        b->weights[i] =
            noise(b, b->weight_n[i], 1 / sqrt((double)(i == 3 ? wide : b->o.model_dim)), (uint64_t)i + 1);
        if (b->weights[i] == NULL) return cli_fail("no entry left for the weights");
    }
    return 0;
}

static int bench_ranks(bench *b)
{
    int64_t n = (int64_t)(b->unit_bytes / upipe_dtype_bytes(b->o.dtype));
    size_t slab = (b->slab_bytes + UPIPE_MEM_ALIGN - 1) / UPIPE_MEM_ALIGN * UPIPE_MEM_ALIGN;
    int r;
    b->ranks = (rank_state *)calloc((size_t)b->o.ranks, sizeof *b->ranks);
    if (b->ranks == NULL) return cli_fail("no entry left for %d ranks", b->o.ranks);
    for (r = 0; r < b->o.ranks; ++r) {
        rank_state *rank = &b->ranks[r];
        rank->b = b;
        rank->slab = aligned_alloc(UPIPE_MEM_ALIGN, slab);
        rank->blocks = (upipe_mem_block *)calloc((size_t)b->blocks_max, sizeof *rank->blocks);
        rank->x = noise(b, n, 1, (uint64_t)r + 100);
        rank->dy = noise(b, n, 1, (uint64_t)r + 1000);
        rank->results = malloc(2 * b->unit_bytes);
        rank->expected = malloc(2 * b->unit_bytes);
        rank->grads = (float *)malloc((size_t)b->grads_n * sizeof(float));
        rank->expected_grads = (float *)malloc((size_t)b->grads_n * sizeof(float));
        if (rank->slab == NULL || rank->blocks == NULL || rank->x == NULL || rank->dy == NULL ||
            rank->results == NULL || rank->expected == NULL || rank->grads == NULL ||
            rank->expected_grads == NULL)
            return cli_fail("no entry left for %d ranks of %zu bytes", b->o.ranks, b->slab_bytes);
        memset(rank->slab, 0, slab); /* its pages, before the clock runs */
    }
    return 0;
}

static void bench_free(bench *b)
{
    int r, i;
    for (r = 0; b->ranks != NULL && r < b->o.ranks; ++r) {
        rank_state *rank = &b->ranks[r];
        free(rank->slab);
        free(rank->blocks);
        free(rank->x);
        free(rank->dy);
        free(rank->results);
        free(rank->expected);
        free(rank->grads);
        free(rank->expected_grads);
    }
    free(b->ranks);
    for (i = 0; i < WEIGHTS; ++i) free(b->weights[i]);
}

static int bench_run(bench *b)
{
    upipe_status statuses[RANKS_MAX], s;
    upipe_err err;
    s = upipe_threads_init(&b->team, b->o.ranks, DEADLINE, &err);
    if (s != UPIPE_OK) return fail_with("the team", s, err.text);
    s = upipe_threads_run(&b->team, rank_main, b, statuses, NULL);
    upipe_threads_free(&b->team);
    if (s == UPIPE_OK) return 0;
    return fail_with("the run", s, b->ranks[cli_reason(statuses, b->o.ranks, s)].err.text);
}

/* No figure without these. */
static int bench_verify(bench *b)
{
    int exact = b->o.dtype == UPIPE_F32 && BUILT_IN;
    double most = b->o.dtype == UPIPE_F32 ? 1e-5 : 2e-2;
    int i, r;
    for (i = 0; i < b->methods_n; ++i) {
        method *m = &b->methods[i];
        m->same = 1;
        for (r = 0; r < b->o.ranks; ++r) {
            const rank_state *rank = &b->ranks[r];
            m->same &= rank->same[i];
            if (rank->distance[i] > m->distance) m->distance = rank->distance[i];
            if (rank->peak[i] != m->peak)
                return cli_fail("%s: rank %d held %zu bytes, the plan says %zu", m->name, r, rank->peak[i],
                                m->peak);
        }
        if ((exact && !m->same) || m->distance > most)
            return cli_fail("%s with U = %d differs from ulysses, by %.3g", m->name, m->plan.desc.chunk,
                            m->distance);
    }
    return 0;
}

/* ---- results ---- */

/* One number of every round: [0, 2) the slowest rank's seconds, from 2 on the sum of the ranks' parts. */
static void print_rounds(const bench *b, int which, const char *name, int value)
{
    int i, r;
    printf("\"%s\": [", name);
    for (i = 0; i < b->o.rounds; ++i) {
        double all = 0;
        for (r = 0; r < b->o.ranks; ++r) {
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
    const options *o = &b->o;
    const sample *s = &b->ranks[0].samples[which][0];
    int k;
    printf("{\"method\": \"%s\", \"ranks\": %d, \"chunk\": %d, \"stages\": %d, ", m->name, o->ranks,
           m->plan.desc.chunk, m->plan.stages);
    printf("\"heads\": %d, \"kv_heads\": %d, \"head_dim\": %d, \"model_dim\": %lld, ", o->heads, o->kv_heads,
           o->head_dim, (long long)o->model_dim);
    printf("\"tokens\": %lld, \"dtype\": \"%s\", \"kernels\": \"%s\", \"products\": \"%s\", ",
           (long long)o->tokens, upipe_dtype_name(o->dtype), b->plain_ops.name, PRODUCTS);
    printf("\"same_bits\": %s, \"distance\": %.3g, ", m->same ? "true" : "false", m->distance);
    printf("\"unit_bytes\": %zu, \"peak_bytes\": %zu, \"plan_bytes\": %zu, ", b->unit_bytes,
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

/* clang-format off */
enum { FLAG_TOKENS, FLAG_RANKS, FLAG_HEADS, FLAG_KV_HEADS, FLAG_HEAD_DIM, FLAG_MODEL_DIM, FLAG_DTYPE,
       FLAG_ROUNDS, FLAG_HELP, FLAGS };

static const struct option option_list[] = {
    {"tokens",    required_argument, NULL, FLAG_TOKENS},
    {"ranks",     required_argument, NULL, FLAG_RANKS},
    {"heads",     required_argument, NULL, FLAG_HEADS},
    {"kv-heads",  required_argument, NULL, FLAG_KV_HEADS},
    {"head-dim",  required_argument, NULL, FLAG_HEAD_DIM},
    {"model-dim", required_argument, NULL, FLAG_MODEL_DIM},
    {"dtype",     required_argument, NULL, FLAG_DTYPE},
    {"rounds",    required_argument, NULL, FLAG_ROUNDS},
    {"help",      no_argument,       NULL, FLAG_HELP},
    {NULL, 0, NULL, 0}};

static const char usage_text[] =
    "usage: block --tokens N [flags]\n"
    "\n"
    "Forward and backward of one attention block on thread ranks with Ulysses, with Ulysses of one product\n"
    "a projection, and with UPipe for U = C, 2C, ... below H. Prints one JSON object a method.\n"
    "\n"
    "  --tokens N     tokens of the sequence; needed\n"
    "  --ranks N      C (4)\n"
    "  --heads N      H, query heads (16)\n"
    "  --kv-heads N   key/value heads (4)\n"
    "  --head-dim N   (64)\n"
    "  --model-dim N  (heads * head dim)\n"
    "  --dtype TYPE   f32 or bf16 (f32)\n"
    "  --rounds N     rounds that are timed, after one that is checked (5)\n"
    "  --help         this text\n";
/* clang-format on */

static int options_flag(void *user, int flag, const char *text)
{
    options *o = (options *)user;
    const char *name = option_list[flag].name;
    switch (flag) {
    case FLAG_TOKENS:
        return cli_number(name, text, 1, INT64_C(1) << 30, &o->tokens);
    case FLAG_RANKS:
        return cli_int(name, text, RANKS_MAX, &o->ranks);
    case FLAG_HEADS:
        return cli_int(name, text, 1024, &o->heads);
    case FLAG_KV_HEADS:
        return cli_int(name, text, 1024, &o->kv_heads);
    case FLAG_HEAD_DIM:
        return cli_int(name, text, 256, &o->head_dim);
    case FLAG_MODEL_DIM:
        return cli_number(name, text, 1, 1 << 20, &o->model_dim);
    case FLAG_DTYPE:
        return cli_dtype(name, text, &o->dtype);
    case FLAG_ROUNDS:
        return cli_int(name, text, ROUNDS_MAX, &o->rounds);
    default:
        return cli_print(name, usage_text);
    }
}

int main(int argc, char **argv)
{
    static bench b;
    int given[FLAGS] = {0}, i, status;
    b.o.ranks = 4;
    b.o.heads = 16;
    b.o.kv_heads = 4;
    b.o.head_dim = 64;
    b.o.rounds = 5;
    status = cli_read(option_list, argc, argv, given, -1, options_flag, &b.o);
    if (status != 0) return status - 1;
    if (!given[FLAG_TOKENS]) return cli_refuse("--tokens is needed") - 1;
    if (!given[FLAG_MODEL_DIM]) b.o.model_dim = (int64_t)b.o.heads * b.o.head_dim;
    timed_ops(&b);
    status = bench_weights(&b) || bench_methods(&b) || bench_ranks(&b) || bench_run(&b) || bench_verify(&b);
    for (i = 0; !status && i < b.methods_n; ++i) print_method(&b, i);
    bench_free(&b);
    if (!status && (fflush(stdout) != 0 || ferror(stdout))) status = cli_fail("stdout: %s", strerror(errno));
    return status ? EXIT_RUN : 0;
}

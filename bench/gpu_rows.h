/* gpu_rows.h -- gpu.c's command rows: the kernels that are no attention, beside the bytes that must pass the memory
 *
 * Rows have model_dim elements of bf16, as a layer of the trainer has them; a head's tile of logits has one row for 16
 * tokens and 32 * model_dim columns of f32. Numbers are the tests' affair.
 */
#ifndef GPU_ROWS_H
#define GPU_ROWS_H

#include "gpu_common.h"

enum { ROWS_BUFS = 5, ROWS_PER_LOGITS = 16, LOGITS_PER_DIM = 32 };

typedef struct rows_bench {
    int64_t tokens, logits; /* rows of model_dim, and of logits */
    int32_t dim, vocab;
    int head_dim;
    char *bufs[ROWS_BUFS]; /* tokens * dim elements of bf16 each */
    float *weight;         /* [dim] */
    char *logits_at;       /* f32 [logits][vocab] */
    char *table;           /* bf16 [vocab][dim] */
    float *loss;           /* [logits] */
    int32_t *targets;      /* [logits] */
} rows_bench;

static upipe_view rows_view(const rows_bench *b, int buf)
{
    return upipe_view_packed(b->bufs[buf], UPIPE_BF16, b->tokens, 1, b->dim);
}

static upipe_status rows_rmsnorm(upipe_ctx *c, void *user)
{
    rows_bench *b = (rows_bench *)user;
    return c->ops->rmsnorm(c, rows_view(b, 1), rows_view(b, 0), b->weight, 1e-5f);
}

static upipe_status rows_rope(upipe_ctx *c, void *user)
{
    rows_bench *b = (rows_bench *)user;
    upipe_rope r;
    memset(&r, 0, sizeof r);
    r.x = upipe_view_packed(b->bufs[0], UPIPE_BF16, b->tokens, b->dim / b->head_dim, b->head_dim);
    r.count = 1;
    r.theta = 500000;
    return c->ops->rope(c, &r);
}

static upipe_status rows_swiglu(upipe_ctx *c, void *user)
{
    rows_bench *b = (rows_bench *)user;
    return c->ops->gate(c, UPIPE_GATE_SILU, rows_view(b, 2), rows_view(b, 0), rows_view(b, 1));
}

static upipe_status rows_swiglu_bwd(upipe_ctx *c, void *user)
{
    rows_bench *b = (rows_bench *)user;
    return c->ops->gate_bwd(c, UPIPE_GATE_SILU, rows_view(b, 0), rows_view(b, 1), rows_view(b, 2));
}

static upipe_status rows_cross_entropy(upipe_ctx *c, void *user)
{
    rows_bench *b = (rows_bench *)user;
    upipe_cross_entropy x;
    memset(&x, 0, sizeof x);
    x.logits = x.grad = upipe_view_packed(b->logits_at, UPIPE_F32, b->logits, 1, b->vocab);
    x.loss = b->loss;
    x.targets = b->targets;
    x.scale = 1;
    return c->ops->cross_entropy(c, &x);
}

static upipe_status rows_logits(upipe_ctx *c, void *user)
{
    rows_bench *b = (rows_bench *)user;
    return c->ops->gemm(c, upipe_view_packed(b->logits_at, UPIPE_F32, b->logits, 1, b->vocab),
                        upipe_view_packed(b->bufs[0], UPIPE_BF16, b->logits, 1, b->dim),
                        upipe_view_packed(b->table, UPIPE_BF16, b->vocab, 1, b->dim), UPIPE_GEMM_TRANS_B,
                        NULL, 0);
}

/* w, m, v and g are the buffers, as f32, and the copy is the last one. */
static upipe_status rows_adamw(upipe_ctx *c, void *user)
{
    rows_bench *b = (rows_bench *)user;
    upipe_adamw a;
    memset(&a, 0, sizeof a);
    a.w = (float *)b->bufs[0], a.m = (float *)b->bufs[1], a.v = (float *)b->bufs[2];
    a.g = (const float *)b->bufs[3];
    a.copy = b->bufs[4];
    a.copy_dtype = UPIPE_BF16;
    a.n = b->tokens * b->dim / 2;
    a.step = 1, a.rate = 1e-4, a.beta1 = 0.9, a.beta2 = 0.95, a.eps = 1e-8, a.decay = 0.1, a.grad_scale = 1;
    return c->ops->adamw(c, &a);
}

static upipe_status measure_rows(upipe_ctx *c, const options *o)
{
    const double n = (double)o->tokens * (double)o->model_dim;
    const double logits = (double)(o->tokens / ROWS_PER_LOGITS) * (double)o->model_dim * LOGITS_PER_DIM;
    /* what each passes through the memory at least once */
    const struct {
        const char *name;
        timed_call *call;
        double bytes, flop;
    } ops[] = {
        {"rmsnorm", rows_rmsnorm, 4 * n, 0},
        {"rope", rows_rope, 4 * n, 0},
        {"swiglu", rows_swiglu, 6 * n, 0},
        {"swiglu_bwd", rows_swiglu_bwd, 10 * n, 0},
        {"logits", rows_logits,
         4 * logits + 2 * n / ROWS_PER_LOGITS +
             2.0 * LOGITS_PER_DIM * (double)o->model_dim * (double)o->model_dim,
         2 * logits * (double)o->model_dim},
        {"cross_entropy", rows_cross_entropy, 8 * logits, 0},
        {"adamw", rows_adamw, n / 2 * (7 * 4 + 2), 0},
    };
    rows_bench b;
    void *p[ROWS_BUFS + 5];
    int i;
    memset(&b, 0, sizeof b);
    b.tokens = o->tokens, b.logits = o->tokens / ROWS_PER_LOGITS;
    b.dim = (int32_t)o->model_dim, b.vocab = (int32_t)o->model_dim * LOGITS_PER_DIM;
    b.head_dim = o->head_dim;
    for (i = 0; i < ROWS_BUFS; ++i) {
        UPIPE_TRY(buf(c, &p[i], b.tokens * b.dim, UPIPE_BF16));
        UPIPE_TRY(fill(c, p[i], b.tokens * b.dim, (uint64_t)i + 1));
        b.bufs[i] = (char *)p[i];
    }
    UPIPE_TRY(buf(c, &p[i], b.dim, UPIPE_F32));
    b.weight = (float *)p[i++];
    UPIPE_TRY(buf(c, &p[i], b.logits * b.vocab, UPIPE_F32));
    b.logits_at = (char *)p[i++];
    UPIPE_TRY(buf(c, &p[i], (int64_t)b.vocab * b.dim, UPIPE_BF16));
    UPIPE_TRY(fill(c, p[i], (int64_t)b.vocab * b.dim, 9));
    b.table = (char *)p[i++];
    UPIPE_TRY(buf(c, &p[i], b.logits, UPIPE_F32));
    b.loss = (float *)p[i++];
    UPIPE_TRY(buf(c, &p[i], b.logits, UPIPE_F32));
    b.targets = (int32_t *)p[i++];
    UPIPE_TRY(c->ops->zero(c, b.weight, (size_t)b.dim * sizeof *b.weight));
    UPIPE_TRY(c->ops->zero(c, b.targets, (size_t)b.logits * sizeof *b.targets));
    printf("{\"tokens\": %lld, \"model_dim\": %d, \"logits_rows\": %lld, \"logits_columns\": %d, \"ops\": [",
           (long long)b.tokens, b.dim, (long long)b.logits, b.vocab);
    for (i = 0; i < (int)(sizeof ops / sizeof *ops); ++i) {
        double seconds;
        UPIPE_TRY(timed(c, ops[i].call, &b, &seconds));
        printf(
            "%s{\"name\": \"%s\", \"seconds\": %.6g, \"bytes\": %.0f, \"bytes_per_s\": %.4g, \"flop_per_s\": %.4g}",
            i > 0 ? ", " : "", ops[i].name, seconds, ops[i].bytes, ops[i].bytes / seconds,
            ops[i].flop / seconds);
    }
    puts("]}");
    for (i = 0; i < ROWS_BUFS + 5; ++i) UPIPE_TRY(upipe_cuda_slab_free(p[i], &c->err));
    return UPIPE_OK;
}

#endif

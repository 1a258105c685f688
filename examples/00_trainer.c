/* 00_trainer.c -- the attention block in a trainer of four ranks, with Ulysses and with UPipe: the same bits, less memory.
 *                 What does not begin with upipe_ is the trainer's own.
 *
 *     cc -O2 -march=native -c upipe/cpu/upipe_cpu.c && \
 *         cc -DUPIPE_CPU_DECLARE -I . examples/00_trainer.c upipe_cpu.o -lm -pthread && ./a.out
 */
#include "upipe/net/upipe_net_threads_session.h" /* ranks as threads; needs POSIX clocks: include it first */
#include "upipe/cpu/upipe_cpu.h"                 /* the CPU's compute table */
#include "upipe/upipe.h"

enum {
    RANKS = 4,
    TOKENS = 256,
    HEADS = 8,
    KV_HEADS = 4,
    DIM = 32,
    MODEL = HEADS * DIM,
    ROWS = TOKENS / RANKS,
    STEPS = 3
};
enum { WQ = MODEL * MODEL, WK = KV_HEADS * DIM * MODEL, WEIGHTS = 2 * WQ + 2 * WK, X = ROWS * MODEL };

typedef struct trainer {
    float weights[RANKS][WEIGHTS];  /* all equal: wq, wk, wv, wo, each [out][in] as in a Llama checkpoint */
    float sums[RANKS][WEIGHTS + 1]; /* their gradients, and the loss */
    float loss[STEPS];
    size_t peak; /* of rank 0 */
} trainer;

static void embed(float *x, int rank) /* the network before the block, which ends with a norm */
{
    for (int i = 0; i < X; ++i) x[i] = (float)((rank * X + i) * 53 % 89 - 44) / 25;
}

static void loss_and_backward(float *y, float *loss) /* the rest of the network: y becomes its gradient */
{
    for (int i = 0; i < X; ++i) *loss += y[i] * y[i] / (2 * TOKENS), y[i] /= TOKENS;
}

/* Each rank, in each step. x and y are [ROWS][MODEL], this rank's tokens; gradients accumulate (+=). */
static upipe_status step(upipe_ctx *ctx, const upipe_layer *layer, float *grad)
{
    upipe_grads grads = {0};
    upipe_saved saved;
    upipe_view x, y;
    void *data;
    grads.wq = grad, grads.wk = grad + WQ, grads.wv = grad + WQ + WK, grads.wo = grad + WQ + 2 * WK;
    UPIPE_TRY(upipe_mem_alloc(ctx->mem, &data, X * sizeof(float), UPIPE_USE_OTHER, "x", &ctx->err));
    x = upipe_view_packed(data, UPIPE_F32, ROWS, 1, MODEL);
    embed((float *)x.data, ctx->team->rank);
    UPIPE_TRY(upipe_layer_fwd(ctx, layer, &saved, x));
    UPIPE_TRY(upipe_mem_alloc(ctx->mem, &data, X * sizeof(float), UPIPE_USE_OTHER, "y", &ctx->err));
    y = upipe_view_packed(data, UPIPE_F32, ROWS, 1, MODEL);
    UPIPE_TRY(upipe_layer_out_fwd(ctx, layer, y, &saved));
    loss_and_backward((float *)y.data, grad + WEIGHTS);
    UPIPE_TRY(upipe_layer_out_bwd(ctx, layer, &grads, &saved, y));
    UPIPE_TRY(upipe_mem_free(ctx->mem, y.data, &ctx->err));
    UPIPE_TRY(upipe_layer_bwd(ctx, layer, x, &grads, &saved, &saved.out, x)); /* x becomes dx */
    UPIPE_TRY(upipe_saved_free(ctx, &saved));
    UPIPE_TRY(upipe_mem_free(ctx->mem, x.data, &ctx->err));
    return upipe_all_reduce(ctx, ctx->team, grad, WEIGHTS + 1); /* and the loss; sums in rank order */
}

/* The block with a rank's weights and plan. */
static upipe_layer block(const float *weights, const upipe_plan *plan)
{
    upipe_layer layer = {0};
    layer.plan = plan, layer.mask.causal = 1, layer.rope_theta = 500000;
    layer.wq = weights, layer.wk = weights + WQ, layer.wv = weights + WQ + WK;
    layer.wo = weights + WQ + 2 * WK;
    return layer;
}

/* A dry run of the real code says how large a rank's slab must be. */
static upipe_status dry_main(void *user, upipe_session *h)
{
    const upipe_layer layer = block(((const trainer *)user)->weights[0], &h->plan);
    return upipe_dry_block(&h->dry, &layer, 1);
}

static upipe_status rank_main(void *user, upipe_session *h)
{
    trainer *t = (trainer *)user;
    const int rank = h->ctx.team->rank;
    float *weights = t->weights[rank], *grad = t->sums[rank];
    const upipe_layer layer = block(weights, &h->plan);
    for (int n = 0; n < STEPS; ++n) {
        memset(grad, 0, sizeof t->sums[rank]);
        UPIPE_TRY(step(&h->ctx, &layer, grad));
        for (int i = 0; i < WEIGHTS; ++i) weights[i] -= 1e-3f * grad[i]; /* the optimizer */
        if (rank == 0) t->loss[n] = grad[WEIGHTS];
    }
    if (h->mem.peak != h->dry.mem.peak) /* never */
        return upipe_fail(&h->ctx.err, UPIPE_ERR_MISMATCH, "a peak of %zu bytes", h->mem.peak);
    if (rank == 0) t->peak = h->mem.peak;
    return UPIPE_OK;
}

/* chunk: heads of a stage. All of them at once are Ulysses; UPipe takes as few as one a rank, the default. */
static upipe_status train(trainer *t, int chunk, upipe_err *err)
{
    upipe_session_desc desc = {0};
    upipe_ops ops;
    for (int i = 0; i < RANKS * WEIGHTS; ++i)
        t->weights[i / WEIGHTS][i % WEIGHTS] = (float)(i % WEIGHTS * 37 % 101 - 50) / 400;
    desc.plan.tokens = TOKENS, desc.plan.ranks = RANKS;
    desc.plan.heads = HEADS, desc.plan.kv_heads = KV_HEADS;
    desc.plan.head_dim = DIM, desc.plan.chunk = chunk;
    desc.dry = dry_main, desc.user = t;
    upipe_cpu_ops(&ops);
    return upipe_threads_sessions(&desc, &ops, 0, rank_main, err);
}

int main(void)
{
    static trainer ulysses, upipe; /* zeros, as every struct begins */
    upipe_err err;
    int same;
    if (train(&ulysses, HEADS, &err) || train(&upipe, RANKS, &err))
        return fprintf(stderr, "%s\n", err.text), 1;
    for (int n = 0; n < STEPS; ++n) printf("step %d: loss %.6f\n", n, (double)upipe.loss[n]);
    same = memcmp(upipe.weights, ulysses.weights, sizeof upipe.weights) == 0;
    printf("weights by UPipe and by Ulysses: %s bits\n", same ? "the same" : "different");
    printf("a peak of %zu bytes with UPipe and of %zu with Ulysses, as planned\n", upipe.peak, ulysses.peak);
    return fflush(stdout) != 0 || !same || !(upipe.loss[STEPS - 1] < upipe.loss[0]) ||
           upipe.peak >= ulysses.peak;
}

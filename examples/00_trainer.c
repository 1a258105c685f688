/* 00_trainer.c -- the attention block in a trainer of four ranks. What does not begin with upipe_ is the trainer's own.
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
    ROWS = TOKENS / RANKS
};
enum { WQ = MODEL * MODEL, WK = KV_HEADS * DIM * MODEL, WEIGHTS = 2 * WQ + 2 * WK, X = ROWS * MODEL };

typedef struct trainer {
    float weights[WEIGHTS]; /* wq, wk, wv, wo, each [out][in] as in a Llama checkpoint */
    float grads[RANKS][WEIGHTS];
    size_t peak; /* of rank 0 */
} trainer;

static void embed(float *x, int rank) /* the network before the block, which ends with a norm */
{
    for (int i = 0; i < X; ++i) x[i] = (float)((rank * X + i) * 53 % 89 - 44) / 25;
}

static void loss_and_backward(float *y) /* the rest of the network: y becomes its gradient */
{
    for (int i = 0; i < X; ++i) y[i] /= TOKENS;
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
    loss_and_backward((float *)y.data);
    UPIPE_TRY(upipe_layer_out_bwd(ctx, layer, &grads, &saved, y));
    UPIPE_TRY(upipe_mem_free(ctx->mem, y.data, &ctx->err));
    UPIPE_TRY(upipe_layer_bwd(ctx, layer, x, &grads, &saved, &saved.out, x)); /* x becomes dx */
    UPIPE_TRY(upipe_saved_free(ctx, &saved));
    UPIPE_TRY(upipe_mem_free(ctx->mem, x.data, &ctx->err));
    return upipe_all_reduce(ctx, ctx->team, grad, WEIGHTS); /* of all four weights; sums in rank order */
}

/* The block, with the plan of a rank. */
static upipe_layer block(const trainer *t, const upipe_plan *plan)
{
    upipe_layer layer = {0};
    layer.plan = plan, layer.mask.causal = 1, layer.rope_theta = 500000;
    layer.wq = t->weights, layer.wk = t->weights + WQ, layer.wv = t->weights + WQ + WK;
    layer.wo = t->weights + WQ + 2 * WK;
    return layer;
}

/* A dry run of the real code says how large a rank's slab must be. */
static upipe_status dry_main(void *user, upipe_session *h)
{
    const upipe_layer layer = block((const trainer *)user, &h->plan);
    return upipe_dry_block(&h->dry, &layer, 1);
}

static upipe_status rank_main(void *user, upipe_session *h)
{
    trainer *t = (trainer *)user;
    const upipe_layer layer = block(t, &h->plan);
    const int rank = h->ctx.team->rank;
    for (int i = 0; i < 3; ++i) UPIPE_TRY(step(&h->ctx, &layer, t->grads[rank])); /* and the optimizer */
    if (h->mem.peak != h->dry.mem.peak)                                           /* never */
        return upipe_fail(&h->ctx.err, UPIPE_ERR_MISMATCH, "a peak of %zu bytes", h->mem.peak);
    if (rank == 0) t->peak = h->mem.peak;
    return UPIPE_OK;
}

int main(void)
{
    static trainer t; /* zeros, as every struct begins */
    upipe_session_desc desc = {0};
    upipe_ops ops;
    upipe_err err;
    for (int i = 0; i < WEIGHTS; ++i) t.weights[i] = (float)(i * 37 % 101 - 50) / 400;
    desc.plan.tokens = TOKENS, desc.plan.ranks = RANKS;
    desc.plan.heads = HEADS, desc.plan.kv_heads = KV_HEADS;
    desc.plan.head_dim = DIM; /* plan.chunk = 0: UPipe with the smallest chunk; = heads: Ulysses */
    desc.dry = dry_main, desc.user = &t;
    upipe_cpu_ops(&ops);
    if (upipe_threads_sessions(&desc, &ops, 0, rank_main, &err)) return fprintf(stderr, "%s\n", err.text), 1;
    printf("a peak of %zu bytes, as planned; gradients of wq begin with %g\n", t.peak, (double)t.grads[0][0]);
    return fflush(stdout) != 0;
}

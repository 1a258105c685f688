/* 00_trainer.c -- the attention block in a trainer of four ranks. What does not begin with upipe_ is the trainer's own.
 *
 *     cc -O2 -march=native -I . examples/00_trainer.c -lm -pthread && ./a.out
 */
#include "upipe/net/upipe_net_threads.h" /* ranks as threads of this process; needs POSIX clocks: include it first */
#include "upipe/cpu/upipe_cpu.h"         /* the CPU's compute table */
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
    upipe_plan plans[RANKS]; /* a rank has its own, and a layer that points to it */
    upipe_layer layers[RANKS];
    upipe_ops ops;
    upipe_dry dry;
    upipe_threads team;
    float weights[WEIGHTS]; /* wq, wk, wv, wo, each [out][in] as in a Llama checkpoint */
    float grads[RANKS][WEIGHTS];
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

static upipe_status rank_main(void *user, int rank)
{
    trainer *t = (trainer *)user;
    upipe_mem_block blocks[64]; /* dry.mem.blocks_peak of them are used */
    upipe_mem mem;
    upipe_ctx ctx = {0};
    void *slab = aligned_alloc(UPIPE_MEM_ALIGN, t->dry.mem.need);
    upipe_status s = UPIPE_OK;
    upipe_mem_init(&mem, slab, slab != NULL ? t->dry.mem.need : 0, blocks, 64);
    ctx.ops = &t->ops, ctx.mem = &mem, ctx.team = upipe_threads_comm(&t->team, rank);
    for (int i = 0; i < 3 && s == UPIPE_OK; ++i) /* and the optimizer */
        s = step(&ctx, &t->layers[rank], t->grads[rank]);
    if (s == UPIPE_OK && mem.peak != t->dry.mem.peak) /* never */
        s = upipe_fail(&ctx.err, UPIPE_ERR_MISMATCH, "a peak of %zu bytes", mem.peak);
    if (s != UPIPE_OK) upipe_comm_abort(ctx.team, ctx.err.text); /* its sentence, if no call has left one */
    free(slab);
    return s;
}

int main(void)
{
    static trainer t; /* zeros, as every struct begins */
    upipe_plan_desc desc = {0};
    upipe_layer layer = {0};
    upipe_err err = {0};
    desc.tokens = TOKENS, desc.ranks = RANKS, desc.heads = HEADS, desc.kv_heads = KV_HEADS;
    desc.head_dim = DIM; /* desc.chunk = 0: UPipe with the smallest chunk; = heads: Ulysses */
    upipe_cpu_ops(&t.ops);
    for (int i = 0; i < WEIGHTS; ++i) t.weights[i] = (float)(i * 37 % 101 - 50) / 400;
    layer.mask.causal = 1, layer.rope_theta = 500000;
    layer.wq = t.weights, layer.wk = t.weights + WQ, layer.wv = t.weights + WQ + WK;
    layer.wo = t.weights + WQ + 2 * WK;
    for (int rank = 0; rank < RANKS; ++rank) {
        desc.rank = rank;
        if (upipe_plan_init(&t.plans[rank], &desc, &err)) return fprintf(stderr, "%s\n", err.text), 1;
        t.layers[rank] = layer, t.layers[rank].plan = &t.plans[rank];
    }
    /* A dry run of the real code says how large the slab must be: here, where all divides, the same on every rank. */
    if (upipe_dry_init(&t.dry, &t.plans[0], &t.ops) || upipe_dry_block(&t.dry, &t.layers[0], 1))
        return fprintf(stderr, "%s\n", t.dry.ctx.err.text), 1;
    if (upipe_threads_init(&t.team, RANKS, 0, &err) || upipe_threads_run(&t.team, rank_main, &t, NULL, &err))
        return fprintf(stderr, "%s\n", err.text), 1;
    printf("a peak of %zu bytes, as planned; gradients of wq begin with %g\n", t.dry.mem.peak,
           (double)t.grads[0][0]);
    upipe_threads_free(&t.team);
    return fflush(stdout) != 0;
}

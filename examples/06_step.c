/* 06_step.c -- training steps on two ranks: the block with its output projection, summed gradients,
 * updated weights
 *
 *     cc -O2 -march=native -I . examples/06_step.c -lm -pthread && ./a.out
 */
#include "upipe/net/upipe_net_threads.h"
#include "upipe/cpu/upipe_cpu.h"
#include "upipe/upipe.h"

enum { RANKS = 2, TOKENS = 64, HEADS = 4, KV_HEADS = 2, DIM = 32, MODEL = 48, STEPS = 3 };
enum { ROWS = TOKENS / RANKS, Q = HEADS * DIM * MODEL, KV = KV_HEADS * DIM * MODEL, ALL = 2 * Q + 2 * KV };

typedef struct shared {
    upipe_threads team;
    upipe_ops ops;
    upipe_plan plans[RANKS]; /* a rank has its own, and a layer that points to it */
    upipe_layer layers[RANKS];
    size_t slab_bytes;
    float x[TOKENS * MODEL], y[TOKENS * MODEL];
    float w[ALL], grad[RANKS][ALL]; /* wq, wk, wv, wo; each rank has its own gradients */
    float loss[RANKS][STEPS];
} shared;

/* One step of one rank: loss = |y|^2 / (2 TOKENS), so the gradient of y is y / TOKENS. */
static upipe_status step(upipe_ctx *c, shared *all, float *grad, float *loss)
{
    const upipe_layer *layer = &all->layers[c->team->rank];
    const int at = c->team->rank * ROWS * MODEL;
    float *value = all->y + at;
    upipe_grads g = {0};
    upipe_saved saved;
    upipe_view x, y;
    void *data;
    UPIPE_TRY(upipe_mem_alloc(c->mem, &data, ROWS * MODEL * sizeof(float), UPIPE_USE_OTHER, "x", &c->err));
    memcpy(data, all->x + at, ROWS * MODEL * sizeof(float));
    x = upipe_view_packed(data, UPIPE_F32, ROWS, 1, MODEL);
    UPIPE_TRY(upipe_layer_fwd(c, layer, &saved, x));
    y = upipe_view_packed(value, UPIPE_F32, ROWS, 1, MODEL);
    UPIPE_TRY(upipe_layer_out_fwd(c, layer, y, &saved));
    *loss = 0;
    for (int i = 0; i < ROWS * MODEL; ++i) {
        *loss += value[i] * value[i] / (2 * TOKENS);
        value[i] /= TOKENS;
    }
    memset(grad, 0, ALL * sizeof *grad); /* gradients accumulate */
    g.wq = grad, g.wk = grad + Q, g.wv = grad + Q + KV, g.wo = grad + Q + 2 * KV;
    UPIPE_TRY(upipe_layer_out_bwd(c, layer, &g, &saved, y));
    UPIPE_TRY(upipe_layer_bwd(c, layer, x, &g, &saved, &saved.out, x)); /* x becomes its gradient */
    UPIPE_TRY(upipe_saved_free(c, &saved));
    UPIPE_TRY(upipe_mem_free(c->mem, x.data, &c->err));
    UPIPE_TRY(upipe_all_reduce(c, c->team, loss, 1));
    return upipe_all_reduce(c, c->team, grad, ALL);
}

static upipe_status rank_main(void *user, int rank)
{
    shared *all = (shared *)user;
    upipe_mem_block blocks[64]; /* dry.mem.blocks_peak of them are used */
    upipe_mem mem;
    upipe_ctx c = {0};
    upipe_status s = UPIPE_OK;
    void *slab = aligned_alloc(UPIPE_MEM_ALIGN, all->slab_bytes);
    upipe_mem_init(&mem, slab, slab != NULL ? all->slab_bytes : 0, blocks, 64);
    c.ops = &all->ops, c.mem = &mem, c.team = upipe_threads_comm(&all->team, rank);
    for (int n = 0; n < STEPS && s == UPIPE_OK; ++n) {
        s = step(&c, all, all->grad[rank], &all->loss[rank][n]);
        if (s == UPIPE_OK) s = upipe_comm_barrier(&c, c.team); /* no rank reads the weights any more */
        for (int i = 0; rank == 0 && i < ALL; ++i) all->w[i] -= 0.05f * all->grad[0][i];
        if (s == UPIPE_OK) s = upipe_comm_barrier(&c, c.team);
    }
    if (s == UPIPE_OK) s = upipe_mem_destroy(&mem, &c.err);  /* nothing may be left in it */
    if (s != UPIPE_OK) upipe_comm_abort(c.team, c.err.text); /* its sentence, if no call has left one */
    free(slab);
    return s;
}

int main(void)
{
    static shared all;
    static upipe_dry dry; /* too large for some stacks */
    upipe_plan_desc d = {0};
    upipe_err err;
    for (int i = 0; i < ALL; ++i) all.w[i] = (float)((i * 37 % 101) - 50) / 400;
    for (int i = 0; i < TOKENS * MODEL; ++i) all.x[i] = (float)((i * 53 % 89) - 44) / 25;
    upipe_cpu_ops(&all.ops);
    d.tokens = TOKENS, d.ranks = RANKS, d.heads = HEADS, d.kv_heads = KV_HEADS, d.head_dim = DIM;
    d.model_dim = MODEL;
    for (d.rank = 0; d.rank < RANKS; ++d.rank) {
        upipe_layer *layer = &all.layers[d.rank];
        if (upipe_plan_init(&all.plans[d.rank], &d, &err)) return fprintf(stderr, "%s\n", err.text), 1;
        layer->plan = &all.plans[d.rank], layer->rope_theta = 10000, layer->mask.causal = 1;
        layer->wq = all.w, layer->wk = all.w + Q, layer->wv = all.w + Q + KV;
        layer->wo = all.w + Q + 2 * KV;
    }
    if (upipe_dry_init(&dry, &all.plans[0], &all.ops) || upipe_dry_block(&dry, &all.layers[0], 1))
        return fprintf(stderr, "%s\n", dry.ctx.err.text), 1;
    all.slab_bytes = dry.mem.need; /* the same on both ranks: heads and tokens divide */
    if (upipe_threads_init(&all.team, RANKS, 60, &err) ||
        upipe_threads_run(&all.team, rank_main, &all, NULL, &err))
        return fprintf(stderr, "%s\n", err.text), 1;
    upipe_threads_free(&all.team);
    for (int i = 0; i < STEPS; ++i) printf("step %d: loss %.6f\n", i, (double)all.loss[0][i]);
    return fflush(stdout) != 0 || !(all.loss[0][STEPS - 1] < all.loss[0][0]);
}

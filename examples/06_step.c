/* 06_step.c -- training steps on two ranks: the block with its output projection, summed gradients,
 * updated weights */
#include "upipe/net/upipe_net_threads.h"
#include "upipe/upipe.h"

#include "common/device.h"

enum { RANKS = 2, TOKENS = 64, HEADS = 4, KV_HEADS = 2, DIM = 32, MODEL = 48, STEPS = 3 };
enum { ROWS = TOKENS / RANKS, Q = HEADS * DIM * MODEL, KV = KV_HEADS * DIM * MODEL, ALL = 2 * Q + 2 * KV };

typedef struct shared { /* in memory that the device reaches */
    upipe_threads team;
    int kind; /* of device */
    upipe_plan plan;
    upipe_layer layer;
    size_t slab_bytes;
    float x[TOKENS * MODEL], y[TOKENS * MODEL];
    float w[ALL], grad[RANKS][ALL]; /* wq, wk, wv, wo; each rank has its own gradients */
    float loss[RANKS][STEPS];
} shared;

/* One step of one rank: loss = |y|^2 / (2 TOKENS), so the gradient of y is y / TOKENS. */
static upipe_status step(upipe_ctx *c, shared *all, float *grad, float *loss)
{
    const int at = c->team->rank * ROWS * MODEL;
    upipe_grads g = {grad, grad + Q, grad + Q + KV, grad + Q + 2 * KV, NULL, NULL, NULL, NULL,
                     NULL, NULL,     NULL};
    upipe_saved saved;
    upipe_view x, y;
    void *data;
    float *value = all->y + at;
    int i;
    UPIPE_TRY(upipe_mem_alloc(c->mem, &data, ROWS * MODEL * sizeof(float), "x", &c->err));
    UPIPE_TRY(c->ops->copy(c, data, all->x + at, ROWS * MODEL * sizeof(float)));
    x = upipe_view_packed(data, UPIPE_F32, ROWS, 1, MODEL);
    UPIPE_TRY(upipe_layer_fwd(c, &all->layer, &saved, x));
    y = upipe_view_packed(value, UPIPE_F32, ROWS, 1, MODEL);
    UPIPE_TRY(upipe_layer_out_fwd(c, &all->layer, y, &saved));
    UPIPE_TRY(c->ops->sync(c)); /* only then may the host look */
    for (*loss = 0, i = 0; i < ROWS * MODEL; ++i) {
        *loss += value[i] * value[i] / (2 * TOKENS);
        value[i] /= TOKENS;
    }
    memset(grad, 0, ALL * sizeof *grad);
    UPIPE_TRY(upipe_layer_out_bwd(c, &all->layer, &g, &saved, y));
    UPIPE_TRY(upipe_layer_bwd(c, &all->layer, x, &g, &saved, &saved.out, x)); /* x becomes its gradient */
    UPIPE_TRY(upipe_saved_free(c, &saved));
    UPIPE_TRY(upipe_mem_free(c->mem, x.data, &c->err));
    UPIPE_TRY(upipe_all_reduce(c, loss, 1));
    UPIPE_TRY(upipe_all_reduce(c, grad, ALL));
    return c->ops->sync(c);
}

static upipe_status rank_main(void *user, int rank)
{
    shared *all = (shared *)user;
    void *slab = NULL;
    upipe_mem_block blocks[64]; /* dry.mem.blocks_peak of them are used */
    upipe_status s;
    upipe_mem mem;
    upipe_ctx c = {0};
    device d;
    int i, n;
    c.mem = &mem, c.team = upipe_threads_comm(&all->team, rank);
    s = device_open(&d, all->kind, &c.err);
    if (s == UPIPE_OK) s = device_slab(&d, &slab, all->slab_bytes, &c.err);
    upipe_mem_init(&mem, slab, all->slab_bytes, blocks, 64);
    device_use(&d, &c);
    for (n = 0; n < STEPS && s == UPIPE_OK; ++n) {
        s = step(&c, all, all->grad[rank], &all->loss[rank][n]);
        if (s == UPIPE_OK) s = upipe_comm_barrier(&c, c.team); /* no rank reads the weights any more */
        for (i = 0; rank == 0 && i < ALL; ++i) all->w[i] -= 0.05f * all->grad[0][i];
        if (s == UPIPE_OK) s = upipe_comm_barrier(&c, c.team);
    }
    if (s != UPIPE_OK) upipe_comm_abort(c.team, c.err.text); /* its sentence, if no call has left one */
    upipe_mem_destroy(&mem, NULL);
    device_slab_free(&d, slab);
    device_close(&d, NULL);
    return s;
}

int main(int argc, char **argv)
{
    shared *all;
    void *buf;
    static upipe_dry dry;
    upipe_plan_desc d = {0};
    upipe_err err = {{0}, UPIPE_OK};
    upipe_ops ops;
    int i, kind, bad = device_args(argc, argv, &kind);
    if (bad) return bad;
    if (device_shared(kind, &buf, sizeof *all, &err)) return fprintf(stderr, "%s\n", err.text), 1;
    all = (shared *)buf;
    all->kind = kind;
    for (i = 0; i < ALL; ++i) all->w[i] = (float)((i * 37 % 101) - 50) / 400;
    for (i = 0; i < TOKENS * MODEL; ++i) all->x[i] = (float)((i * 53 % 89) - 44) / 25;
    d.tokens = TOKENS, d.ranks = RANKS, d.heads = HEADS, d.kv_heads = KV_HEADS, d.head_dim = DIM,
    d.model_dim = MODEL;
    device_table(kind, &ops);
    all->layer.plan = &all->plan, all->layer.rope_theta = 10000, all->layer.mask.causal = 1;
    all->layer.wq = all->w, all->layer.wk = all->w + Q, all->layer.wv = all->w + Q + KV,
    all->layer.wo = all->w + Q + 2 * KV;
    if (upipe_plan_init(&all->plan, &d, &err) || upipe_dry_init(&dry, &all->plan, &ops) ||
        upipe_dry_block(&dry, &all->layer, 1))
        return fprintf(stderr, "%s%s\n", err.text, dry.ctx.err.text), 1;
    all->slab_bytes = dry.mem.need;
    if (upipe_threads_init(&all->team, RANKS, 60, &err) ||
        upipe_threads_run(&all->team, rank_main, all, NULL, &err))
        return fprintf(stderr, "%s\n", err.text), 1;
    upipe_threads_free(&all->team);
    for (i = 0; i < STEPS; ++i) printf("step %d: loss %.6f\n", i, (double)all->loss[0][i]);
    bad = !(all->loss[0][STEPS - 1] < all->loss[0][0]);
    device_shared_free(kind, buf);
    return bad;
}

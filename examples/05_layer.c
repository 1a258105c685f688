/* 05_layer.c -- the attention block on two ranks, Ulysses and UPipe: equal gradients, another slab
 *
 *     cc -O2 -march=native -I . examples/05_layer.c -lm -pthread && ./a.out
 */
#include "upipe/net/upipe_net_threads.h"
#include "upipe/cpu/upipe_cpu.h"
#include "upipe/upipe.h"

#include <math.h>

enum { RANKS = 2, TOKENS = 128, HEADS = 8, DIM = 32, BLOCKS = 64 };
enum { MODEL = HEADS * DIM, LOCAL = TOKENS / RANKS };

typedef struct shared {
    upipe_threads team;
    upipe_ops ops;
    upipe_plan plans[RANKS]; /* a rank has its own, and a layer that points to it */
    upipe_layer layers[RANKS];
    size_t slab_bytes;
    float w[MODEL * MODEL], x[TOKENS * MODEL], dx[TOKENS * MODEL];
} shared;

/* Forward and backward of one rank; the loss is |out|^2 / 2, so the gradient of out is out. */
static upipe_status step(upipe_ctx *c, const upipe_layer *layer, const float *from, float *dx)
{
    size_t bytes = upipe_plan_unit_bytes(layer->plan);
    upipe_grads grads = {0}; /* those of the weights are not wanted here */
    upipe_saved saved;
    upipe_slots dout;
    upipe_view x;
    void *data;
    UPIPE_TRY(upipe_mem_alloc(c->mem, &data, bytes, UPIPE_USE_OTHER, "x", &c->err));
    memcpy(data, from, bytes);
    x = upipe_view_packed(data, UPIPE_F32, LOCAL, 1, MODEL);
    UPIPE_TRY(upipe_layer_fwd(c, layer, &saved, x));
    UPIPE_TRY(upipe_slots_alloc(c, layer->plan, &dout, UPIPE_SLOT_FULL, "dout"));
    memcpy(dout.data, saved.out.data, upipe_plan_rows_bytes(layer->plan, HEADS, DIM));
    UPIPE_TRY(upipe_layer_bwd(c, layer, x, &grads, &saved, &dout, x)); /* x becomes its gradient */
    memcpy(dx, data, bytes);
    UPIPE_TRY(upipe_mem_free(c->mem, dout.data, &c->err));
    return upipe_mem_free(c->mem, data, &c->err);
}

static upipe_status rank_main(void *user, int rank)
{
    shared *all = (shared *)user;
    upipe_mem_block blocks[BLOCKS]; /* dry.mem.blocks_peak would do */
    upipe_mem mem;
    upipe_ctx c = {0};
    upipe_status s;
    void *slab = aligned_alloc(UPIPE_MEM_ALIGN, all->slab_bytes);
    upipe_mem_init(&mem, slab, slab != NULL ? all->slab_bytes : 0, blocks, BLOCKS);
    c.ops = &all->ops, c.mem = &mem, c.team = upipe_threads_comm(&all->team, rank);
    s = step(&c, &all->layers[rank], all->x + rank * LOCAL * MODEL, all->dx + rank * LOCAL * MODEL);
    if (s == UPIPE_OK) s = upipe_mem_destroy(&mem, &c.err); /* nothing may be left in it */
    if (s != UPIPE_OK) upipe_comm_abort(c.team, c.err.text);
    free(slab);
    return s;
}

static upipe_status run(shared *all, int chunk, upipe_err *err)
{
    static upipe_dry dry; /* too large for some stacks */
    upipe_plan_desc d = {0};
    upipe_status s;
    for (int i = 0; i < MODEL * MODEL; ++i) all->w[i] = (float)sin(i * 0.37) / 16;
    for (int i = 0; i < TOKENS * MODEL; ++i) all->x[i] = (float)cos(i * 0.11);
    upipe_cpu_ops(&all->ops);
    d.tokens = TOKENS, d.ranks = RANKS, d.heads = HEADS, d.head_dim = DIM, d.chunk = chunk;
    for (d.rank = 0; d.rank < RANKS; ++d.rank) {
        upipe_layer *layer = &all->layers[d.rank];
        UPIPE_TRY(upipe_plan_init(&all->plans[d.rank], &d, err));
        layer->plan = &all->plans[d.rank], layer->mask.causal = 1;
        layer->wq = layer->wk = layer->wv = all->w; /* one matrix will do here */
    }
    if (upipe_dry_init(&dry, &all->plans[0], &all->ops) || upipe_dry_layer(&dry, &all->layers[0], 1))
        return *err = dry.ctx.err, dry.ctx.err.status;
    all->slab_bytes = dry.mem.need; /* known before anything is allocated, and the same on both ranks here */
    UPIPE_TRY(upipe_threads_init(&all->team, RANKS, 60, err));
    s = upipe_threads_run(&all->team, rank_main, all, NULL, err);
    upipe_threads_free(&all->team);
    return s;
}

int main(void)
{
    static shared all[2];
    int same;
    for (int i = 0; i < 2; ++i) {
        upipe_err err;
        upipe_status s = run(&all[i], i == 0 ? HEADS : RANKS, &err);
        if (s != UPIPE_OK) return fprintf(stderr, "%s: %s\n", upipe_status_name(s), err.text), 1;
        printf("%s, stages: %d, slab of a rank: %zu bytes\n", i == 0 ? "Ulysses" : "UPipe  ",
               all[i].plans[0].stages, all[i].slab_bytes);
    }
    same = memcmp(all[0].dx, all[1].dx, sizeof all->dx) == 0;
    printf("gradient of x: %s bits\n", same ? "the same" : "different");
    return fflush(stdout) != 0 || !same;
}

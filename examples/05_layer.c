/* 05_layer.c -- the attention block on two ranks, Ulysses and UPipe: equal gradients, another slab */
#include "upipe/net/upipe_net_threads.h"
#include "upipe/upipe.h"

#include <math.h>

#include "common/device.h"

enum { RANKS = 2, TOKENS = 128, HEADS = 8, DIM = 32, BLOCKS = 64 };
enum { MODEL = HEADS * DIM, LOCAL = TOKENS / RANKS };

typedef struct shared { /* in memory that the device reaches */
    upipe_threads team;
    int kind; /* of device */
    upipe_plan plan;
    upipe_layer layer;
    size_t slab_bytes;
    upipe_err errors[RANKS];
    float w[MODEL * MODEL], x[TOKENS * MODEL], dx[TOKENS * MODEL];
} shared;

/* Forward and backward of one rank; the loss is |out|^2 / 2, so the gradient of out is out. */
static upipe_status step(upipe_ctx *c, shared *all)
{
    size_t bytes = sizeof all->x / RANKS;
    int at = c->team->rank * LOCAL * MODEL;
    upipe_grads grads = {0}; /* those of the weights are not wanted here */
    upipe_saved saved;
    upipe_slots dout;
    upipe_view x;
    void *data;
    UPIPE_TRY(upipe_mem_alloc(c->mem, &data, bytes, "x", &c->err));
    UPIPE_TRY(c->ops->copy(c, data, all->x + at, bytes));
    x = upipe_view_packed(data, UPIPE_F32, LOCAL, 1, MODEL);
    UPIPE_TRY(upipe_layer_fwd(c, &all->layer, &saved, x));
    UPIPE_TRY(upipe_slots_alloc(c, all->layer.plan, &dout, UPIPE_SLOT_FULL, "dout"));
    UPIPE_TRY(c->ops->copy(c, dout.data, saved.out.data, upipe_plan_rows_bytes(&all->plan, HEADS, DIM)));
    UPIPE_TRY(upipe_layer_bwd(c, &all->layer, x, &grads, &saved, &dout, x)); /* x becomes its gradient */
    UPIPE_TRY(c->ops->copy(c, all->dx + at, data, bytes));
    UPIPE_TRY(c->ops->sync(c)); /* only then may the host look */
    UPIPE_TRY(upipe_mem_free(c->mem, dout.data, &c->err));
    return upipe_mem_free(c->mem, data, &c->err);
}

static upipe_status rank_main(void *user, int rank)
{
    shared *all = (shared *)user;
    void *slab = NULL;
    upipe_mem_block blocks[BLOCKS];
    upipe_status s;
    upipe_mem mem;
    upipe_ctx c = {0};
    device d;
    s = device_open(&d, all->kind, &c.err);
    if (s == UPIPE_OK) s = device_slab(&d, &slab, all->slab_bytes, &c.err);
    upipe_mem_init(&mem, slab, all->slab_bytes, blocks, BLOCKS); /* dry.mem.blocks_peak would do */
    device_use(&d, &c);
    c.mem = &mem, c.team = upipe_threads_comm(&all->team, rank);
    if (s == UPIPE_OK) s = step(&c, all);
    all->errors[rank] = c.err;
    upipe_mem_destroy(&mem, NULL);
    device_slab_free(&d, slab);
    device_close(&d, NULL);
    return s;
}

static upipe_status run(shared *all, int chunk, upipe_err *err)
{
    static upipe_dry dry; /* too large for some stacks */
    upipe_ops ops;
    upipe_plan_desc d = {0};
    upipe_status s;
    int i;
    for (i = 0; i < MODEL * MODEL; ++i) all->w[i] = (float)sin(i * 0.37) / 16;
    for (i = 0; i < TOKENS * MODEL; ++i) all->x[i] = (float)cos(i * 0.11);
    d.tokens = TOKENS, d.ranks = RANKS, d.heads = HEADS, d.head_dim = DIM, d.chunk = chunk;
    device_table(all->kind, &ops);
    all->layer.plan = &all->plan, all->layer.mask.causal = 1;
    all->layer.wq = all->layer.wk = all->layer.wv = all->w; /* one matrix will do here */
    UPIPE_TRY(upipe_plan_init(&all->plan, &d, err));
    if (upipe_dry_init(&dry, &all->plan, &ops) || upipe_dry_layer(&dry, &all->layer, 1))
        return *err = dry.ctx.err, dry.ctx.err.status;
    all->slab_bytes = dry.mem.need; /* known before anything is allocated */
    UPIPE_TRY(upipe_threads_init(&all->team, RANKS, 60, err));
    s = upipe_threads_run(&all->team, rank_main, all, NULL, NULL);
    upipe_threads_free(&all->team);
    for (i = 0; i < RANKS && err->text[0] == 0; ++i) *err = all->errors[i];
    return s;
}

int main(int argc, char **argv)
{
    shared *all;
    void *buf;
    upipe_err err = {{0}, UPIPE_OK};
    int i, same, kind, bad = device_args(argc, argv, &kind);
    if (bad) return bad;
    if (device_shared(kind, &buf, 2 * sizeof *all, &err)) return fprintf(stderr, "%s\n", err.text), 1;
    all = (shared *)buf;
    all[0].kind = all[1].kind = kind;
    for (i = 0; i < 2; ++i) {
        upipe_status s = run(&all[i], i == 0 ? HEADS : RANKS, &err);
        if (s != UPIPE_OK) return fprintf(stderr, "%s: %s\n", upipe_status_name(s), err.text) > 0;
        printf("%s, stages: %d, slab of a rank: %zu bytes\n", i == 0 ? "Ulysses" : "UPipe  ",
               all[i].plan.stages, all[i].slab_bytes);
    }
    same = memcmp(all[0].dx, all[1].dx, sizeof all->dx) == 0;
    printf("gradient of x: %s bits\n", same ? "the same" : "different");
    device_shared_free(kind, buf);
    return kind == DEVICE_CPU && !same; /* a BLAS promises no bits */
}

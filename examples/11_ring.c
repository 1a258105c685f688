/* 11_ring.c -- four ranks as a grid of teams (all-to-all) and rings (ring attention), against one rank alone
 *
 * A rank is in a team (all-to-all) and in a ring, each a communicator of its own. The ring's layout says
 * which tokens it holds: here zigzag, equal work for all under a causal mask. Nothing divides: 101 tokens.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "common/grid.h"
#include "upipe/cpu/upipe_cpu.h"
#include "upipe/upipe.h"

enum { RANKS = 4, TOKENS = 101, HEADS = 8, KV_HEADS = 2, DIM = 32, MODEL = 64, BLOCKS = 64 };
enum { X = TOKENS * MODEL, W = HEADS * DIM * MODEL };

typedef struct shared {
    grid grid;
    upipe_plan_desc desc; /* but for the rank */
    upipe_ops ops;
    float w[W], x[X], dx[X], dw[RANKS][W]; /* each rank has its own gradients of weights */
    upipe_plan plans[RANKS];
    size_t slab_bytes[RANKS];
    upipe_err errors[RANKS];
} shared;

/* Forward and backward of one rank; the loss is |out|^2 / 2, so the gradient of out is out. */
static upipe_status step(upipe_ctx *c, const upipe_layer *l, shared *all, float *dw)
{
    const upipe_shard *mine = &l->plan->shard;
    upipe_grads grads = {0};
    upipe_saved saved;
    upipe_slots dout;
    upipe_view x;
    void *data;
    int64_t i;
    UPIPE_TRY(upipe_mem_alloc(c->mem, &data, upipe_plan_unit_bytes(l->plan), "x", &c->err));
    x = upipe_view_packed(data, UPIPE_F32, mine->n, 1, MODEL);
    for (i = 0; i < mine->n; ++i)
        memcpy((float *)data + i * MODEL, all->x + upipe_shard_pos(mine, i) * MODEL, MODEL * sizeof(float));
    UPIPE_TRY(upipe_layer_fwd(c, l, &saved, x));
    UPIPE_TRY(upipe_slots_alloc(c, l->plan, &dout, UPIPE_SLOT_FULL, "dout"));
    UPIPE_TRY(c->ops->copy(c, dout.data, saved.out.data, dout.slot_bytes * (size_t)dout.n));
    grads.wq = dw;
    UPIPE_TRY(upipe_layer_bwd(c, l, x, &grads, &saved, &dout, x)); /* x becomes its gradient */
    for (i = 0; i < mine->n; ++i)
        memcpy(all->dx + upipe_shard_pos(mine, i) * MODEL, (float *)data + i * MODEL, MODEL * sizeof(float));
    UPIPE_TRY(upipe_mem_free(c->mem, dout.data, &c->err));
    return upipe_mem_free(c->mem, data, &c->err);
}

/* A rank's plan is its own, and so is the size of its slab. */
static upipe_status prepare(upipe_ctx *c, shared *all, int rank, upipe_layer *l)
{
    upipe_plan_desc d = all->desc;
    upipe_dry *dry = (upipe_dry *)malloc(sizeof *dry); /* too large for some stacks */
    upipe_status s;
    if (dry == NULL) return upipe_fail(&c->err, UPIPE_ERR_MEMORY, "no entry left for a dry run");
    d.rank = c->team->rank;
    d.ring_rank = c->ring != NULL ? c->ring->rank : 0;
    s = upipe_plan_init(&all->plans[rank], &d, &c->err);
    l->plan = &all->plans[rank], l->rope_theta = 10000, l->mask.causal = 1;
    l->wq = l->wk = l->wv = all->w; /* one matrix will do here */
    if (s == UPIPE_OK && (upipe_dry_init(dry, l->plan, &all->ops) || upipe_dry_layer(dry, l, 1)))
        c->err = dry->ctx.err, s = c->err.status;
    if (s == UPIPE_OK)
        all->slab_bytes[rank] = upipe_max_bytes(dry->mem.need, upipe_reduce_bytes(W, all->grid.world.ranks));
    free(dry);
    return s;
}

static upipe_status rank_main(void *user, int rank)
{
    shared *all = (shared *)user;
    upipe_mem_block blocks[BLOCKS];
    upipe_layer l = {0};
    upipe_ctx c = {0};
    upipe_status s;
    upipe_mem mem;
    void *slab = NULL;
    c.ops = &all->ops;
    c.team = grid_world(&all->grid, rank);
    s = upipe_comm_barrier(&c, c.team); /* all ranks are here */
    grid_use(&all->grid, rank, &c);
    if (s == UPIPE_OK) s = prepare(&c, all, rank, &l);
    if (s == UPIPE_OK && posix_memalign(&slab, UPIPE_MEM_ALIGN, all->slab_bytes[rank]) != 0)
        s = upipe_fail(&c.err, UPIPE_ERR_MEMORY, "no slab of %zu bytes", all->slab_bytes[rank]);
    if (s == UPIPE_OK) {
        upipe_mem_init(&mem, slab, all->slab_bytes[rank], blocks, BLOCKS);
        c.mem = &mem;
        s = step(&c, &l, all, all->dw[rank]);
        c.team = grid_world(&all->grid, rank); /* weights are everybody's: team and ring */
        if (s == UPIPE_OK) s = upipe_all_reduce(&c, all->dw[rank], W);
        upipe_mem_destroy(&mem, NULL);
    }
    all->errors[rank] = c.err;
    free(slab);
    return s;
}

static upipe_status run(shared *all, int ranks, int ring, int chunk, upipe_ring_mode mode, upipe_err *err)
{
    upipe_status statuses[RANKS] = {UPIPE_OK}, s;
    upipe_plan_desc d = {0};
    int i;
    d.tokens = TOKENS, d.heads = HEADS, d.kv_heads = KV_HEADS, d.head_dim = DIM, d.model_dim = MODEL;
    d.ranks = ranks, d.ring = ring, d.chunk = chunk, d.ring_mode = mode, d.layout = UPIPE_ZIGZAG;
    all->desc = d;
    for (i = 0; i < W; ++i) all->w[i] = (float)sin(i * 0.37) / 16;
    for (i = 0; i < X; ++i) all->x[i] = (float)cos(i * 0.11);
    upipe_cpu_ops(&all->ops);
    UPIPE_TRY(grid_init(&all->grid, ranks, ring, 60, err));
    s = grid_run(&all->grid, rank_main, all, statuses);
    for (i = 0; i < ranks * ring; ++i)
        if (statuses[i] == s) *err = all->errors[i];
    grid_free(&all->grid);
    return s;
}

static double distance(const float *a, const float *b, int n)
{
    double most = 0;
    int i;
    for (i = 0; i < n; ++i) most = fmax(most, fabs((double)a[i] - (double)b[i]));
    return most;
}

int main(void)
{
    static const struct {
        const char *name;
        int ranks, ring, chunk;
        upipe_ring_mode mode;
    } cases[] = {{"one rank alone", 1, 1, HEADS, UPIPE_RING_AUTO},
                 {"USP", 2, 2, HEADS, UPIPE_RING_P2P},
                 {"UPipe x ring, shifting", 2, 2, 2, UPIPE_RING_P2P},
                 {"UPipe x ring, gathering", 2, 2, 2, UPIPE_RING_ALL_GATHER}};
    static shared alone, grids;
    double worst = 0;
    int i;
    for (i = 0; i < 4; ++i) {
        shared *all = i == 0 ? &alone : &grids;
        const upipe_plan *p = &all->plans[0];
        upipe_err err = {{0}, UPIPE_OK};
        upipe_status s;
        double dx, dw;
        memset(all, 0, sizeof *all);
        s = run(all, cases[i].ranks, cases[i].ring, cases[i].chunk, cases[i].mode, &err);
        if (s != UPIPE_OK) return fprintf(stderr, "%s: %s\n", upipe_status_name(s), err.text), 1;
        dx = distance(all->dx, alone.dx, X), dw = distance(all->dw[0], alone.dw[0], W);
        worst = fmax(worst, fmax(dx, dw));
        printf("%-24s slab of rank 0: %7zu bytes; sent to its team %6lld, to its ring %6lld\n", cases[i].name,
               all->slab_bytes[0], (long long)(upipe_plan_sent(p, 0) + upipe_plan_sent(p, 1)),
               (long long)(upipe_plan_sent_ring(p, 0) + upipe_plan_sent_ring(p, 1)));
        if (i > 0) printf("%-24s furthest from one rank: dX %.1e, dWq %.1e\n", "", dx, dw);
    }
    return !(worst <= 1e-4);
}

/* 11_ring.c -- four ranks as a grid of teams (all-to-all) and rings (ring attention), against one rank alone
 *
 *     cc -O2 -march=native -I . examples/11_ring.c -lm -pthread && ./a.out
 *
 * A rank is in a team (all-to-all) and in a ring, each a communicator of its own. The ring's layout says
 * which tokens it holds: here zigzag, equal work for all under a causal mask. Nothing divides: 101 tokens.
 */
#include "upipe/net/upipe_net_threads_grid.h"
#include "upipe/cpu/upipe_cpu.h"
#include "upipe/upipe.h"

#include <math.h>

enum { RANKS = 4, TOKENS = 101, HEADS = 8, KV_HEADS = 2, DIM = 32, MODEL = 64, BLOCKS = 64 };
enum { X = TOKENS * MODEL, W = HEADS * DIM * MODEL };

typedef struct shared {
    upipe_threads_grid threads;
    upipe_plan_desc desc; /* but for the rank */
    upipe_ops ops;
    float w[W], x[X], dx[X], dw[RANKS][W]; /* each rank has its own gradients of weights */
    upipe_plan plans[RANKS];
    upipe_dry dry[RANKS];
    size_t slab_bytes[RANKS];
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
    UPIPE_TRY(upipe_mem_alloc(c->mem, &data, upipe_plan_unit_bytes(l->plan), UPIPE_USE_OTHER, "x", &c->err));
    x = upipe_view_packed(data, UPIPE_F32, mine->n, 1, MODEL);
    for (int64_t i = 0; i < mine->n; ++i)
        memcpy((float *)data + i * MODEL, all->x + upipe_shard_pos(mine, i) * MODEL, MODEL * sizeof(float));
    UPIPE_TRY(upipe_layer_fwd(c, l, &saved, x));
    UPIPE_TRY(upipe_slots_alloc(c, l->plan, &dout, UPIPE_SLOT_FULL, "dout"));
    memcpy(dout.data, saved.out.data, dout.slot_bytes * (size_t)dout.n);
    grads.wq = dw;
    UPIPE_TRY(upipe_layer_bwd(c, l, x, &grads, &saved, &dout, x)); /* x becomes its gradient */
    for (int64_t i = 0; i < mine->n; ++i)
        memcpy(all->dx + upipe_shard_pos(mine, i) * MODEL, (float *)data + i * MODEL, MODEL * sizeof(float));
    UPIPE_TRY(upipe_mem_free(c->mem, dout.data, &c->err));
    return upipe_mem_free(c->mem, data, &c->err);
}

/* A rank's plan is its own, and so is the size of its slab. */
static upipe_status prepare(upipe_ctx *c, shared *all, int rank, upipe_layer *l)
{
    upipe_plan_desc d = all->desc;
    upipe_dry *dry = &all->dry[rank];
    d.rank = upipe_grid_team(&all->threads.grid, rank).rank;
    d.ring_rank = upipe_grid_ring(&all->threads.grid, rank).rank;
    UPIPE_TRY(upipe_plan_init(&all->plans[rank], &d, &c->err));
    l->plan = &all->plans[rank], l->rope_theta = 10000, l->mask.causal = 1;
    l->wq = l->wk = l->wv = all->w; /* one matrix will do here */
    if (upipe_dry_init(dry, l->plan, &all->ops) || upipe_dry_layer(dry, l, 1))
        return c->err = dry->ctx.err, c->err.status;
    all->slab_bytes[rank] = upipe_max_bytes(dry->mem.need, upipe_reduce_bytes(W, d.ranks * d.ring));
    return UPIPE_OK;
}

static upipe_status rank_main(void *user, int rank)
{
    shared *all = (shared *)user;
    upipe_comm *world = upipe_threads_comm(&all->threads.world, rank);
    upipe_mem_block blocks[BLOCKS];
    upipe_mem mem;
    upipe_layer layer = {0};
    upipe_ctx c = {0};
    upipe_status s;
    void *slab;
    c.ops = &all->ops, c.mem = &mem;
    upipe_threads_grid_use(&all->threads, rank, &c);
    s = prepare(&c, all, rank, &layer);
    slab = aligned_alloc(UPIPE_MEM_ALIGN, all->slab_bytes[rank]);
    upipe_mem_init(&mem, slab, slab != NULL ? all->slab_bytes[rank] : 0, blocks, BLOCKS);
    if (s == UPIPE_OK) s = step(&c, &layer, all, all->dw[rank]);
    /* weights are everybody's: team and ring */
    if (s == UPIPE_OK) s = upipe_all_reduce(&c, world, all->dw[rank], W);
    if (s != UPIPE_OK) upipe_comm_abort(world, c.err.text); /* with its teams and rings */
    free(slab);
    return s;
}

typedef struct method {
    const char *name;
    int ranks, ring, chunk;
    upipe_ring_mode mode;
} method;

static upipe_status run(shared *all, const method *m, upipe_err *err)
{
    const upipe_grid grid = {.ranks = m->ranks * m->ring, .in_team = m->ranks, .in_ring = m->ring};
    upipe_plan_desc d = {0};
    upipe_status s;
    d.tokens = TOKENS, d.heads = HEADS, d.kv_heads = KV_HEADS, d.head_dim = DIM, d.model_dim = MODEL;
    d.ranks = m->ranks, d.ring = m->ring, d.chunk = m->chunk, d.ring_mode = m->mode, d.layout = UPIPE_ZIGZAG;
    memset(all, 0, sizeof *all);
    all->desc = d;
    for (int i = 0; i < W; ++i) all->w[i] = (float)sin(i * 0.37) / 16;
    for (int i = 0; i < X; ++i) all->x[i] = (float)cos(i * 0.11);
    upipe_cpu_ops(&all->ops);
    UPIPE_TRY(upipe_threads_grid_init(&all->threads, &grid, 60, err));
    s = upipe_threads_run(&all->threads.world, rank_main, all, NULL, err);
    upipe_threads_grid_free(&all->threads);
    return s;
}

static double distance(const float *a, const float *b, int n)
{
    double most = 0;
    for (int i = 0; i < n && !isnan(most); ++i) /* a NaN is the most */
        if (!(fabs((double)a[i] - (double)b[i]) <= most)) most = fabs((double)a[i] - (double)b[i]);
    return most;
}

int main(void)
{
    static const method methods[] = {{"one rank alone", 1, 1, HEADS, UPIPE_RING_AUTO},
                                     {"USP", 2, 2, HEADS, UPIPE_RING_P2P},
                                     {"UPipe x ring, P2P", 2, 2, 2, UPIPE_RING_P2P},
                                     {"UPipe x ring, all-gather", 2, 2, 2, UPIPE_RING_ALL_GATHER}};
    static shared alone, grids;
    const upipe_mask causal = {.causal = 1};
    int bad = 0;
    for (int i = 0; i < 4; ++i) {
        shared *all = i == 0 ? &alone : &grids;
        const upipe_plan *p = &all->plans[0];
        upipe_err err;
        double dx, dw;
        if (run(all, &methods[i], &err)) return fprintf(stderr, "%s: %s\n", methods[i].name, err.text), 1;
        dx = distance(all->dx, alone.dx, X), dw = distance(all->dw[0], alone.dw[0], W);
        bad |= !(dx <= 1e-4 && dw <= 1e-4);
        printf("%-24s slab of rank 0: %7zu bytes; sent to its team %6lld, to its ring %6lld\n",
               methods[i].name, all->slab_bytes[0],
               (long long)(upipe_plan_sent(p, 0) + upipe_plan_sent(p, 1)),
               (long long)(upipe_ring_sent(p, &causal, 0) + upipe_ring_sent(p, &causal, 1)));
        if (i > 0) printf("%-24s furthest from one rank: dX %.1e, dWq %.1e\n", "", dx, dw);
    }
    return fflush(stdout) != 0 || bad;
}

/* 05_methods.c -- one block by methods for longer sequences: rings of teams, and segments offloaded to the host
 *
 *     cc -O2 -march=native -I . examples/05_methods.c -lm -pthread && ./a.out
 *
 * A rank is in a team (all-to-all) and in a ring. The ring's layout says which tokens it holds: here zigzag, equal work for
 * all under a causal mask. FPDT cuts the sequence into segments, which wait in the host's memory; here the device is the CPU
 * too. Nothing divides: 1001 tokens. Gradients are compared with those of one rank alone, and memory with a dry run.
 */
#include "upipe/net/upipe_net_threads_grid.h"
#include "upipe/cpu/upipe_cpu.h"
#include "upipe/upipe.h"

enum { RANKS = 4, TOKENS = 1001, HEADS = 8, KV_HEADS = 4, DIM = 32, MODEL = HEADS * DIM };
enum { X = TOKENS * MODEL, W = HEADS * DIM * MODEL, SEGMENTS = 4, BLOCKS = 64 };

typedef struct method {
    const char *name;
    int ranks, ring, chunk; /* of a team, of a ring; heads of a stage */
    upipe_ring_mode mode;
    int segments; /* 0: upipe_layer.h */
} method;

typedef struct shared {
    upipe_threads_grid threads;
    upipe_ops ops;
    const method *how;
    float w[W], x[X], dx[X], dw[RANKS][W]; /* each rank has its own gradients of weights, */
    float rows[RANKS][X];                  /* and its rows of x in the host's memory */
    upipe_session sessions[RANKS];
    void *slabs[RANKS];
    int64_t team, ring; /* bytes that rank 0 sends */
} shared;

/* One matrix will do for Q, K and V. The loss is |out|^2 / 2, so the gradient of out is out. */
static upipe_layer block(const shared *all, const upipe_plan *plan)
{
    upipe_layer l = {0};
    l.plan = plan, l.rope_theta = 10000, l.mask.causal = 1, l.wq = l.wk = l.wv = all->w;
    return l;
}

/* A rank's rows from the sequence, or back to it, of all these shards. */
static void place(const upipe_shard *shards, int n, float *mine, float *sequence, int back)
{
    for (int s = 0; s < n; ++s)
        for (int64_t i = 0; i < shards[s].n; ++i, mine += MODEL) {
            float *at = sequence + upipe_shard_pos(&shards[s], i) * MODEL;
            memcpy(back ? at : mine, back ? mine : at, MODEL * sizeof *at);
        }
}

/* Forward and backward of a rank in one piece: Ulysses, UPipe, and both with a ring. */
static upipe_status by_layer(upipe_ctx *c, shared *all, const upipe_plan *p, upipe_grads *grads)
{
    const upipe_layer l = block(all, p);
    upipe_saved saved;
    upipe_slots dout;
    upipe_view x;
    void *data;
    UPIPE_TRY(upipe_mem_alloc(c->mem, &data, upipe_plan_unit_bytes(p), UPIPE_USE_OTHER, "x", &c->err));
    place(&p->shard, 1, (float *)data, all->x, 0);
    x = upipe_view_packed(data, UPIPE_F32, p->rows, 1, MODEL);
    UPIPE_TRY(upipe_layer_fwd(c, &l, &saved, x));
    UPIPE_TRY(upipe_slots_alloc(c, p, &dout, UPIPE_SLOT_FULL, "dout"));
    memcpy(dout.data, saved.out.data, dout.slot_bytes * (size_t)dout.n);
    UPIPE_TRY(upipe_layer_bwd(c, &l, x, grads, &saved, &dout, x)); /* x becomes its gradient */
    place(&p->shard, 1, (float *)data, all->dx, 1);
    UPIPE_TRY(upipe_mem_free(c->mem, dout.data, &c->err));
    return upipe_mem_free(c->mem, data, &c->err);
}

static upipe_fpdt segments(const shared *all, const upipe_plan *p, upipe_mem *host)
{
    const upipe_fpdt f = {block(all, NULL), p->desc, all->how->segments, host};
    return f;
}

/* The same in segments. x, dout and what waits are in the host's memory. */
static upipe_status by_segments(upipe_session *h, shared *all, float *x, upipe_grads *grads)
{
    const size_t bytes = h->dry.host.need;
    void *slab = aligned_alloc(UPIPE_MEM_ALIGN, bytes), *dout;
    upipe_mem_block blocks[BLOCKS];
    upipe_mem host;
    const upipe_fpdt f = segments(all, &h->plan, &host);
    upipe_fpdt_saved saved;
    upipe_shard shards[SEGMENTS];
    upipe_status s;
    for (int i = 0; i < f.segments; ++i) shards[i] = upipe_fpdt_shard(&f, i);
    place(shards, f.segments, x, all->x, 0);
    upipe_mem_init(&host, slab, slab != NULL ? bytes : 0, blocks, BLOCKS);
    s = upipe_fpdt_fwd(&h->ctx, &f, &saved, x);
    dout = malloc(upipe_fpdt_out_bytes(&f));
    if (s == UPIPE_OK && dout == NULL) s = upipe_fail(&h->ctx.err, UPIPE_ERR_MEMORY, "no memory for dout");
    if (s == UPIPE_OK) memcpy(dout, saved.out, upipe_fpdt_out_bytes(&f));
    if (s == UPIPE_OK) s = upipe_fpdt_bwd(&h->ctx, &f, x, grads, &saved, dout, x); /* x: its gradient */
    place(shards, f.segments, x, all->dx, 1);
    if (s == UPIPE_OK) s = upipe_fpdt_free(&f, &saved, &h->ctx.err);
    if (s == UPIPE_OK && host.peak != h->dry.host.peak) /* never */
        s = upipe_fail(&h->ctx.err, UPIPE_ERR_MISMATCH, "the host held %zu bytes", host.peak);
    free(dout), free(slab);
    return s;
}

/* The same dry: what the device and the host will hold. Weights are everybody's, of team and ring: a sum over all. */
static upipe_status dry_main(void *user, upipe_session *h)
{
    const shared *all = (const shared *)user;
    const upipe_layer l = block(all, &h->plan);
    const upipe_fpdt f = segments(all, &h->plan, NULL);
    void *terms;
    UPIPE_TRY(f.segments > 0 ? upipe_dry_fpdt(&h->dry, &f) : upipe_dry_layer(&h->dry, &l, 1));
    UPIPE_TRY(upipe_alloc(&h->dry.ctx, &terms, upipe_reduce_bytes(W, all->threads.world.ranks),
                          UPIPE_USE_REDUCE, "terms"));
    return upipe_free(&h->dry.ctx, terms);
}

static upipe_status rank_main(void *user, int rank)
{
    shared *all = (shared *)user;
    upipe_session *h = &all->sessions[rank];
    upipe_ctx *c = &h->ctx;
    upipe_session_desc d = {0};
    upipe_grads grads = {0};
    d.plan.tokens = TOKENS, d.plan.heads = HEADS, d.plan.kv_heads = KV_HEADS, d.plan.head_dim = DIM;
    d.plan.chunk = all->how->chunk, d.plan.ring_mode = all->how->mode, d.plan.layout = UPIPE_ZIGZAG;
    d.dry = dry_main, d.user = all;
    c->ops = &all->ops;
    upipe_threads_grid_use(&all->threads, rank, c); /* the description's ranks are those of team and ring */
    UPIPE_TRY(upipe_session_open(h, &d));
    all->slabs[rank] = aligned_alloc(UPIPE_MEM_ALIGN, upipe_session_slab_bytes(h)); /* a size of its own */
    UPIPE_TRY(upipe_session_slab(h, all->slabs[rank]));
    grads.wq = all->dw[rank];
    UPIPE_TRY(all->how->segments > 0 ? by_segments(h, all, all->rows[rank], &grads)
                                     : by_layer(c, all, &h->plan, &grads));
    if (rank == 0) all->team = c->team->sent_bytes, all->ring = c->ring != NULL ? c->ring->sent_bytes : 0;
    UPIPE_TRY(upipe_all_reduce(c, upipe_threads_comm(&all->threads.world, rank), grads.wq, W));
    if (h->mem.peak != h->dry.mem.peak) /* never */
        return upipe_fail(&c->err, UPIPE_ERR_MISMATCH, "a peak of %zu bytes", h->mem.peak);
    return upipe_session_close(h);
}

static upipe_status run(shared *all, const method *how, upipe_err *err)
{
    const upipe_grid grid = {how->ranks * how->ring, how->ranks, how->ring, 0};
    upipe_status s;
    memset(all, 0, sizeof *all);
    all->how = how;
    for (int i = 0; i < W; ++i) all->w[i] = (float)sin(i * 0.37) / 16;
    for (int i = 0; i < X; ++i) all->x[i] = (float)cos(i * 0.11);
    upipe_cpu_ops(&all->ops);
    UPIPE_TRY(upipe_threads_grid_init(&all->threads, &grid, 0, err));
    s = upipe_threads_run(&all->threads.world, rank_main, all, NULL, err);
    upipe_threads_grid_free(&all->threads);
    for (int i = 0; i < RANKS; ++i) free(all->slabs[i]);
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
    static const method methods[] = {{"one rank alone", 1, 1, HEADS, UPIPE_RING_AUTO, 0},
                                     {"USP", 2, 2, HEADS, UPIPE_RING_P2P, 0},
                                     {"UPipe x ring, P2P", 2, 2, 2, UPIPE_RING_P2P, 0},
                                     {"UPipe x ring, all-gather", 2, 2, 2, UPIPE_RING_ALL_GATHER, 0},
                                     {"FPDT", 4, 1, HEADS, UPIPE_RING_AUTO, SEGMENTS},
                                     {"UPipe x FPDT", 4, 1, 4, UPIPE_RING_AUTO, SEGMENTS}};
    static shared alone, ranks;
    int bad = 0;
    for (int i = 0; i < 6; ++i) {
        shared *all = i == 0 ? &alone : &ranks;
        upipe_err err;
        double dx, dw;
        if (run(all, &methods[i], &err)) return fprintf(stderr, "%s: %s\n", methods[i].name, err.text), 1;
        dx = distance(all->dx, alone.dx, X), dw = distance(all->dw[0], alone.dw[0], W);
        bad |= !(dx <= 1e-4 && dw <= 1e-4);
        printf("%-24s device %7zu bytes, host %7zu; to its team %7lld, to its ring %7lld; dX off by %.0e, "
               "dWq by %.0e\n",
               methods[i].name, all->sessions[0].dry.mem.peak, all->sessions[0].dry.host.peak,
               (long long)all->team, (long long)all->ring, dx, dw);
    }
    return fflush(stdout) != 0 || bad;
}

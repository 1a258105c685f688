/* 12_segments.c -- the sequence in segments, offloaded to the host: FPDT, and UPipe in segments
 *
 *     cc -O2 -march=native -I . examples/12_segments.c -lm -pthread && ./a.out
 *
 * A dry run of the same code says before what device and host will hold. Here the device is the CPU too, so both are
 * pools in the same memory.
 */
#include "upipe/net/upipe_net_threads.h"
#include "upipe/cpu/upipe_cpu.h"
#include "upipe/upipe.h"

#include <math.h>

enum { RANKS = 2, TOKENS = 1024, HEADS = 8, KV_HEADS = 2, DIM = 32, MODEL = HEADS * DIM, BLOCKS = 64 };
enum { X = TOKENS * MODEL, W = HEADS * DIM * MODEL };

/* What a rank has of its own: bytes of the device and of the host, by the dry run and used. */
typedef struct own {
    upipe_dry dry;
    size_t peak, host_peak;
    int64_t moved;
} own;

typedef struct shared {
    upipe_threads team;
    upipe_fpdt fpdt; /* but for the rank and its host pool */
    upipe_ops ops;
    float w[W], x[X], dx[X];
    own ranks[RANKS];
} shared;

/* This rank's rows, [segment][T][D], from the sequence, or back to it. */
static void place(const upipe_fpdt *f, float *sequence, float *mine, int back)
{
    int64_t t;
    int i;
    for (i = 0; i < f->segments; ++i) {
        upipe_shard s = upipe_fpdt_shard(f, i);
        for (t = 0; t < s.n; ++t, mine += MODEL) {
            float *at = sequence + upipe_shard_pos(&s, t) * MODEL;
            memcpy(back ? at : mine, back ? mine : at, MODEL * sizeof *at);
        }
    }
}

/* Forward and backward of one rank; the loss is |out|^2 / 2, so the gradient of out is out. x and dout are
 * the host's. */
static upipe_status step(upipe_ctx *c, shared *all, const upipe_fpdt *f, float *x, void *dout, own *mine)
{
    upipe_grads grads = {0}; /* those of the weights are not wanted here */
    upipe_fpdt_saved saved;
    place(f, all->x, x, 0);
    UPIPE_TRY(upipe_fpdt_fwd(c, f, &saved, x));
    memcpy(dout, saved.out, upipe_fpdt_out_bytes(f));
    UPIPE_TRY(upipe_fpdt_bwd(c, f, x, &grads, &saved, dout, x)); /* x becomes its gradient */
    place(f, all->dx, x, 1);
    mine->peak = c->mem->peak, mine->host_peak = f->host->peak, mine->moved = saved.moved;
    return upipe_fpdt_free(f, &saved, &c->err);
}

/* The same, dry. */
static upipe_status count(upipe_ctx *c, const upipe_fpdt *f, upipe_dry *dry)
{
    upipe_plan plan;
    UPIPE_TRY(upipe_fpdt_plan(f, 0, &plan, &c->err));
    if (upipe_dry_init(dry, &plan, c->ops) || upipe_dry_fpdt(dry, f)) c->err = dry->ctx.err;
    return dry->ctx.err.status;
}

static upipe_status rank_main(void *user, int rank)
{
    shared *all = (shared *)user;
    own *mine = &all->ranks[rank];
    upipe_mem_block blocks[BLOCKS], host_blocks[BLOCKS];
    upipe_mem mem, host;
    upipe_fpdt f = all->fpdt;
    upipe_ctx c = {0};
    upipe_status s;
    void *slab = NULL, *host_slab = NULL, *x = malloc(sizeof all->x), *dout = NULL;
    c.ops = &all->ops, c.mem = &mem, c.team = upipe_threads_comm(&all->team, rank);
    f.desc.rank = rank, f.host = &host;
    s = count(&c, &f, &mine->dry);
    if (s == UPIPE_OK && (x == NULL || posix_memalign(&slab, UPIPE_MEM_ALIGN, mine->dry.mem.need) != 0 ||
                          posix_memalign(&host_slab, UPIPE_MEM_ALIGN, mine->dry.host.need) != 0 ||
                          (dout = malloc(upipe_fpdt_out_bytes(&f))) == NULL))
        s = upipe_fail(&c.err, UPIPE_ERR_MEMORY, "no memory for slabs of %zu and %zu bytes",
                       mine->dry.mem.need, mine->dry.host.need);
    if (s == UPIPE_OK) {
        upipe_mem_init(&mem, slab, mine->dry.mem.need, blocks, BLOCKS);
        upipe_mem_init(&host, host_slab, mine->dry.host.need, host_blocks, BLOCKS);
        s = step(&c, all, &f, (float *)x, dout, mine);
    }
    if (s != UPIPE_OK) upipe_comm_abort(c.team, c.err.text);
    free(dout), free(x), free(host_slab), free(slab);
    return s;
}

static upipe_status run(shared *all, int segments, int chunk, upipe_err *err)
{
    upipe_fpdt *f = &all->fpdt;
    upipe_status s;
    memset(all, 0, sizeof *all);
    for (int i = 0; i < W; ++i) all->w[i] = (float)sin(i * 0.37) / 16;
    for (int i = 0; i < X; ++i) all->x[i] = (float)cos(i * 0.11);
    f->desc.tokens = TOKENS, f->desc.ranks = RANKS, f->desc.heads = HEADS, f->desc.kv_heads = KV_HEADS;
    f->desc.head_dim = DIM, f->desc.chunk = chunk, f->segments = segments;
    f->layer.wq = f->layer.wk = f->layer.wv = all->w; /* one matrix will do here */
    f->layer.rope_theta = 10000, f->layer.mask.causal = 1;
    upipe_cpu_ops(&all->ops);
    UPIPE_TRY(upipe_threads_init(&all->team, RANKS, 60, err));
    s = upipe_threads_run(&all->team, rank_main, all, NULL, err);
    upipe_threads_free(&all->team);
    return s;
}

int main(void)
{
    static const struct {
        const char *name;
        int segments, chunk;
    } cases[] = {{"one segment", 1, HEADS}, {"FPDT", 4, HEADS}, {"UPipe x FPDT", 4, RANKS}};
    static shared all;
    static float dx[X]; /* of one segment */
    double worst = 0;
    int kept = 1;
    for (int i = 0; i < 3; ++i) {
        upipe_err err;
        upipe_status s = run(&all, cases[i].segments, cases[i].chunk, &err);
        const own *r = &all.ranks[0];
        if (s != UPIPE_OK) return fprintf(stderr, "%s: %s\n", upipe_status_name(s), err.text), 1;
        printf(
            "%-12s %d segment%s  device: %7zu bytes before, %7zu used   host: %7zu, %7zu   between: %8lld\n",
            cases[i].name, cases[i].segments, cases[i].segments > 1 ? "s" : " ", r->dry.mem.peak, r->peak,
            r->dry.host.peak, r->host_peak, (long long)r->moved);
        for (int j = 0; j < RANKS; ++j, ++r)
            kept = kept && r->peak == r->dry.mem.peak && r->host_peak == r->dry.host.peak;
        if (i == 0) memcpy(dx, all.dx, sizeof dx);
        for (int j = 0; j < X && !isnan(worst); ++j) /* a NaN is the most */
            if (!(fabs((double)all.dx[j] - (double)dx[j]) <= worst))
                worst = fabs((double)all.dx[j] - (double)dx[j]);
    }
    printf("gradient of x: at most %.1e away from that in one segment\n", worst);
    if (!kept) fprintf(stderr, "the pools held something else than the dry run says\n");
    return fflush(stdout) != 0 || !(kept && worst <= 1e-4);
}

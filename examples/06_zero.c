/* 06_zero.c -- a model's states sharded over four ranks: the same weights in every stage of ZeRO, with fewer bytes
 *
 *     cc -O2 -march=native -I . examples/06_zero.c -lm -pthread && ./a.out
 *
 * The model is a row of units of weights w. Each rank has targets t of its own, and the loss is the sum over ranks of
 * |w - t|^2 / 2: so a rank's gradient is w - t. A unit's weights are there between begin and end alone, and so are its
 * gradients. Nothing divides: units have odd numbers of weights.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "upipe/net/upipe_net_threads.h"
#include "upipe/cpu/upipe_cpu.h"
#include "upipe/upipe.h"

enum { RANKS = 4, UNITS = 5, STEPS = 20, SLAB = 1 << 20, BLOCKS = 16 };

static const int64_t first[UNITS + 1] = {0, 1001, 4004, 4005, 9009, 11011};

typedef struct shared {
    upipe_threads world;
    upipe_ops ops;
    int stage;
    float weights[11011];            /* at the end */
    size_t held[RANKS], peak[RANKS]; /* bytes */
    int64_t sent[RANKS];
} shared;

static float target(int64_t i, int rank)
{
    return (float)sin((double)i * 0.01 + rank);
}

/* Forward and backward of all units, then AdamW of what this rank has states of. */
static upipe_status step(upipe_ctx *c, upipe_zero *z, float *m, float *v, int number)
{
    UPIPE_TRY(upipe_zero_grads_clear(c, z));
    for (int unit = 0; unit < UNITS; ++unit) {
        const int64_t n = first[unit + 1] - first[unit];
        const void *w;
        float *g;
        UPIPE_TRY(upipe_zero_weights_begin(c, z, unit, &w));
        UPIPE_TRY(upipe_zero_grads_begin(c, z, unit, &g));
        for (int64_t i = 0; i < n; ++i) g[i] += ((const float *)w)[i] - target(first[unit] + i, z->rank);
        UPIPE_TRY(upipe_zero_weights_end(c, z, w));
        UPIPE_TRY(upipe_zero_grads_end(c, z, unit, g));
    }
    UPIPE_TRY(upipe_zero_grads_sum(c, z));
    for (int unit = 0; unit < UNITS; ++unit) {
        const upipe_zero_part p = upipe_zero_part_of(z, UPIPE_ZERO_STATES, unit);
        upipe_adamw a = {0};
        a.w = (float *)z->weights + (upipe_zero_sharded(z, UPIPE_ZERO_WEIGHTS) ? p.at : p.first);
        a.g = z->grads + (upipe_zero_sharded(z, UPIPE_ZERO_GRADS) ? p.at : p.first);
        a.m = m + p.at, a.v = v + p.at, a.n = p.n;
        a.step = number, a.rate = 0.1, a.beta1 = 0.9, a.beta2 = 0.95, a.eps = 1e-8, a.grad_scale = 1;
        if (p.n > 0) UPIPE_TRY(c->ops->adamw(c, &a));
    }
    return upipe_zero_weights_gather(c, z);
}

/* What a rank holds of one kind, in f32, as zeros. */
static upipe_status hold(upipe_ctx *c, const upipe_zero *z, upipe_zero_what kind, upipe_use use, void **data)
{
    const size_t bytes = (size_t)upipe_zero_held(z, kind) * 4;
    UPIPE_TRY(upipe_alloc(c, data, bytes, use, "held"));
    return c->ops->zero(c, *data, bytes);
}

static upipe_status rank_life(upipe_ctx *c, upipe_zero *z, shared *all)
{
    void *grads, *m, *v;
    UPIPE_TRY(upipe_zero_check(c, z));
    UPIPE_TRY(hold(c, z, UPIPE_ZERO_WEIGHTS, UPIPE_USE_WEIGHTS, &z->weights));
    UPIPE_TRY(hold(c, z, UPIPE_ZERO_GRADS, UPIPE_USE_WEIGHT_GRAD, &grads));
    UPIPE_TRY(hold(c, z, UPIPE_ZERO_STATES, UPIPE_USE_STATES, &m));
    UPIPE_TRY(hold(c, z, UPIPE_ZERO_STATES, UPIPE_USE_STATES, &v));
    z->grads = (float *)grads;
    all->held[z->rank] = c->mem->live;
    for (int i = 1; i <= STEPS; ++i) UPIPE_TRY(step(c, z, (float *)m, (float *)v, i));
    for (int unit = 0; unit < UNITS; ++unit) { /* each rank shows its own slices */
        const upipe_zero_part p = upipe_zero_slice(z, unit);
        UPIPE_TRY(c->ops->copy(c, all->weights + p.first, upipe_zero_owned(z, UPIPE_ZERO_WEIGHTS, unit),
                               (size_t)p.n * 4));
    }
    all->peak[z->rank] = c->mem->peak;
    all->sent[z->rank] = z->world->sent_bytes;
    UPIPE_TRY(upipe_free(c, v));
    UPIPE_TRY(upipe_free(c, m));
    UPIPE_TRY(upipe_free(c, grads));
    return upipe_free(c, z->weights);
}

static upipe_status rank_main(void *user, int rank)
{
    shared *all = (shared *)user;
    upipe_mem_block blocks[BLOCKS];
    void *slab = aligned_alloc(UPIPE_MEM_ALIGN, SLAB);
    upipe_mem mem;
    upipe_zero z = {0};
    upipe_ctx c = {0};
    upipe_status s;
    upipe_mem_init(&mem, slab, slab != NULL ? SLAB : 0, blocks, BLOCKS);
    c.ops = &all->ops, c.mem = &mem;
    c.team = z.world = upipe_threads_comm(&all->world, rank);
    z.rank = rank, z.ranks = RANKS, z.stage = all->stage, z.first = first, z.units = UNITS;
    z.strip = 1024; /* bytes to a rank at a time: the default is some MiB */
    s = rank_life(&c, &z, all);
    if (s != UPIPE_OK) upipe_comm_abort(c.team, c.err.text);
    upipe_mem_destroy(&mem, NULL);
    free(slab);
    return s;
}

int main(void)
{
    static shared all[UPIPE_ZERO_STAGES];
    int same = 1;
    for (int stage = 0; stage < UPIPE_ZERO_STAGES; ++stage) {
        shared *a = &all[stage];
        upipe_err err;
        upipe_status s = upipe_threads_init(&a->world, RANKS, 60, &err);
        a->stage = stage;
        upipe_cpu_ops(&a->ops);
        if (s == UPIPE_OK) s = upipe_threads_run(&a->world, rank_main, a, NULL, &err);
        upipe_threads_free(&a->world);
        if (s != UPIPE_OK) return fprintf(stderr, "%s: %s\n", upipe_status_name(s), err.text), 1;
        same &= memcmp(a->weights, all[0].weights, sizeof a->weights) == 0;
        printf("ZeRO %d: rank 0 holds %zu bytes, at most %zu in a step, and sends %lld a step\n", stage,
               a->held[0], a->peak[0], (long long)(a->sent[0] / STEPS));
    }
    printf("weights after %d steps: %s bits in every stage\n", STEPS, same ? "the same" : "different");
    return fflush(stdout) != 0 || !same;
}

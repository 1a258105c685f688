/* 04_mlp.c -- MLP and loss by tiles of tokens, alone and by threads of the host: always the same bits
 *
 *     cc -O2 -march=native -fopenmp -I . examples/04_mlp.c -lm -pthread && ./a.out
 *
 * A tile bounds the memory. The library starts no threads: it calls ops.par, which is the host's, here POSIX threads, and
 * OpenMP's where the compiler has them. Scratch grows with the threads.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "upipe/cpu/upipe_cpu.h"
#include "upipe/upipe.h"

enum { ROWS = 512, DIM = 64, HIDDEN = 192, VOCAB = 1000, W = HIDDEN * DIM, WORKERS = 4 };
enum { BLOCKS = 16, SLAB = 16 << 20, SOME = 384 << 10, ALL = 8 << 20 };

typedef struct weights {
    float gate[W], up[W], down[W], norm_weight[DIM], table[VOCAB * DIM];
} weights;

typedef struct tensors {
    weights w, grads;
    float x[ROWS * DIM], stream[ROWS * DIM], losses[ROWS];
    int32_t targets[ROWS];
} tensors;

/* ---- threads that a call starts and joins. A trainer keeps them from call to call: common/pool.h does ---- */

typedef struct work {
    void (*task)(void *arg, int32_t i);
    void *arg;
    int32_t count, next; /* next: atomic */
} work;

static void *work_main(void *arg)
{
    work *w = (work *)arg;
    int32_t i;
    while ((i = __atomic_fetch_add(&w->next, 1, __ATOMIC_RELAXED)) < w->count) w->task(w->arg, i);
    return NULL;
}

static void posix_run(void *self, int32_t count, void (*task)(void *arg, int32_t i), void *arg)
{
    pthread_t threads[WORKERS];
    work w = {task, arg, count, 0};
    int started = 0;
    (void)self;
    while (started < WORKERS - 1 && pthread_create(&threads[started], NULL, work_main, &w) == 0) ++started;
    work_main(&w); /* the caller is one of them, and does it all if the system has no threads */
    while (started > 0) pthread_join(threads[--started], NULL);
}

/* All that OpenMP needs: it has threads of its own. */
static void openmp_run(void *self, int32_t count, void (*task)(void *arg, int32_t i), void *arg)
{
    (void)self;
#ifdef _OPENMP
#pragma omp parallel for schedule(static, 1) num_threads(count)
#endif
    for (int32_t i = 0; i < count; ++i) task(arg, i);
}

/* ---- forward, loss and backward of ROWS tokens ---- */

static upipe_status pass(upipe_ctx *c, tensors *t, size_t tile_bytes)
{
    const weights *w = &t->w;
    weights *grad = &t->grads;
    upipe_view x = upipe_view_packed(t->x, UPIPE_F32, ROWS, 1, DIM);
    upipe_view y = upipe_view_packed(t->stream, UPIPE_F32, ROWS, 1, DIM);
    upipe_mlp mlp = {0};
    upipe_loss head = {0};
    upipe_mlp_grads mlp_grads = {grad->gate, grad->up, grad->down, grad->norm_weight, NULL};
    upipe_loss_grads head_grads = {grad->table, NULL};
    mlp.w_gate = w->gate, mlp.w_up = w->up, mlp.w_down = w->down, mlp.hidden = HIDDEN;
    mlp.norm_weight = w->norm_weight, mlp.norm_eps = 1e-5f, mlp.residual = 1, mlp.tile_bytes = tile_bytes;
    head.w = w->table, head.vocab = VOCAB, head.scale = 1.0f / ROWS, head.tile_bytes = tile_bytes;
    UPIPE_TRY(upipe_mlp_fwd(c, &mlp, y, x));                                       /* y = x + mlp(norm(x)) */
    UPIPE_TRY(upipe_loss_bwd(c, &head, y, &head_grads, t->losses, y, t->targets)); /* y: its gradient */
    return upipe_mlp_bwd(c, &mlp, y, &mlp_grads, y, x);                            /* ... that of x */
}

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* In a pool of its own; prints what it took. */
static upipe_status run(const char *name, const upipe_par *par, size_t tile_bytes, void *slab, tensors *t,
                        upipe_err *err)
{
    upipe_mem_block blocks[BLOCKS];
    double begin, loss = 0;
    upipe_mem mem;
    upipe_ops ops;
    upipe_ctx c = {0};
    upipe_status s;
    upipe_cpu_ops(&ops);
    ops.par = par; /* before scratch is asked for */
    upipe_mem_init(&mem, slab, SLAB, blocks, BLOCKS);
    c.ops = &ops, c.mem = &mem;
    begin = seconds();
    s = pass(&c, t, tile_bytes);
    for (int i = 0; i < ROWS; ++i) loss += (double)t->losses[i] / ROWS;
    printf("%-6s tiles of %7zu bytes, and scratch: peak of the pool %zu bytes, %4.1f ms, loss %.6f\n", name,
           tile_bytes, mem.peak, 1e3 * (seconds() - begin), loss);
    if (s == UPIPE_OK) s = upipe_mem_destroy(&mem, &c.err); /* nothing may be left in it */
    *err = c.err;
    return s;
}

int main(void)
{
    static const upipe_par posix = {posix_run, NULL, WORKERS}, openmp = {openmp_run, NULL, WORKERS};
    static const struct {
        const char *name;
        const upipe_par *par;
        size_t tile_bytes;
    } ways[] = {
        {"alone", NULL, ALL}, {"alone", NULL, SOME}, {"POSIX", &posix, SOME}, {"OpenMP", &openmp, SOME}};
    static tensors t[4];
    float *w = (float *)(void *)&t->w;
    void *slab = aligned_alloc(UPIPE_MEM_ALIGN, SLAB);
    upipe_err err;
    int same = 1;
    if (slab == NULL) return fprintf(stderr, "no memory\n"), 1;
    for (int i = 0; i < (int)(sizeof t->w / sizeof *w); ++i) w[i] = (float)(i * 37 % 101 - 50) / 400;
    for (int i = 0; i < ROWS * DIM; ++i) t->x[i] = (float)(i * 53 % 89 - 44) / 25;
    for (int i = 0; i < ROWS; ++i) t->targets[i] = i % 10 == 0 ? -1 : i * 7 % VOCAB; /* -1: ignored */
    for (int i = 1; i < 4; ++i) t[i] = t[0];
    for (int i = 0; i < 4; ++i) {
        if (run(ways[i].name, ways[i].par, ways[i].tile_bytes, slab, &t[i], &err))
            return fprintf(stderr, "%s\n", err.text), 1;
        same &= memcmp(&t[0], &t[i], sizeof t[i]) == 0;
    }
    printf("losses and gradients: %s bits\n", same ? "the same" : "different");
    free(slab);
    return fflush(stdout) != 0 || !same;
}

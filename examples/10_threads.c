/* 10_threads.c -- the host's threads compute inside a rank: POSIX threads, and OpenMP's
 *
 *     cc -O2 -march=native -fopenmp -I . examples/10_threads.c -lm -pthread && ./a.out
 *
 * The library starts no threads: it calls ops.par, which is the host's. Scratch grows with the threads, the
 * results stay bit for bit as they are.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "upipe/cpu/upipe_cpu.h"
#include "upipe/upipe.h"

enum { TOKENS = 1024, HEADS = 8, KV_HEADS = 2, DIM = 64, WORKERS_MAX = 64 };
enum { QUERIES = TOKENS * HEADS * DIM, KEYS = TOKENS * KV_HEADS * DIM };

typedef struct tensors {
    float q[QUERIES], k[KEYS], v[KEYS], dout[QUERIES], delta[TOKENS * HEADS];
    struct {
        float o[QUERIES], lse[TOKENS * HEADS], dq[QUERIES], dk[KEYS], dv[KEYS];
    } results;
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

static void threads_run(void *self, int32_t count, void (*task)(void *arg, int32_t i), void *arg)
{
    const int32_t workers = *(const int32_t *)self;
    pthread_t threads[WORKERS_MAX];
    work w = {task, arg, count, 0};
    int32_t started = 0;
    while (started < workers - 1 && pthread_create(&threads[started], NULL, work_main, &w) == 0) ++started;
    work_main(&w); /* the caller is one of them, and does it all if the system has no threads */
    while (started > 0) pthread_join(threads[--started], NULL);
}

#ifdef _OPENMP
/* All that OpenMP needs: it has threads of its own. */
static void openmp_run(void *self, int32_t count, void (*task)(void *arg, int32_t i), void *arg)
{
    (void)self;
#pragma omp parallel for schedule(static, 1) num_threads(count)
    for (int32_t i = 0; i < count; ++i) task(arg, i);
}
#endif

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* One causal attention call, forward and backward, with these threads. */
static upipe_status step(const char *name, const upipe_par *par, tensors *x, upipe_err *err)
{
    upipe_ops ops;
    upipe_ctx c = {0};
    upipe_attn_grad g;
    upipe_status s;
    double start;
    upipe_cpu_ops(&ops);
    ops.par = par; /* before scratch is asked for */
    c.ops = &ops;
    memset(&g, 0, sizeof g);
    memset(&x->results, 0, sizeof x->results); /* gradients of keys and values are += */
    g.a.q = upipe_view_packed(x->q, UPIPE_F32, TOKENS, HEADS, DIM);
    g.a.k = upipe_view_packed(x->k, UPIPE_F32, TOKENS, KV_HEADS, DIM);
    g.a.v = upipe_view_packed(x->v, UPIPE_F32, TOKENS, KV_HEADS, DIM);
    g.a.o = upipe_view_packed(x->results.o, UPIPE_F32, TOKENS, HEADS, DIM);
    g.a.lse = upipe_view_packed(x->results.lse, UPIPE_F32, TOKENS, HEADS, 1);
    g.a.mask.causal = 1;
    g.dout = upipe_view_packed(x->dout, UPIPE_F32, TOKENS, HEADS, DIM);
    g.delta = upipe_view_packed(x->delta, UPIPE_F32, TOKENS, HEADS, 1);
    g.dq = upipe_view_packed(x->results.dq, UPIPE_F32, TOKENS, HEADS, DIM);
    g.dk = upipe_view_packed(x->results.dk, UPIPE_F32, TOKENS, KV_HEADS, DIM);
    g.dv = upipe_view_packed(x->results.dv, UPIPE_F32, TOKENS, KV_HEADS, DIM);
    g.a.work_bytes = upipe_max_bytes(ops.attn_bytes(&ops, &g.a, 0), ops.attn_bytes(&ops, &g.a, 1));
    if (posix_memalign(&g.a.work, UPIPE_MEM_ALIGN, g.a.work_bytes) != 0)
        return upipe_fail(err, UPIPE_ERR_MEMORY, "no %zu bytes for scratch", g.a.work_bytes);

    start = seconds();
    s = upipe_attn_fwd(&c, &g.a);
    if (s == UPIPE_OK) s = ops.rowdot(&c, g.delta, g.dout, g.a.o);
    if (s == UPIPE_OK) s = upipe_attn_bwd(&c, &g);
    printf("%-8s threads: %d, %8zu bytes of scratch, %6.1f ms\n", name, par != NULL ? par->workers : 1,
           g.a.work_bytes, 1e3 * (seconds() - start));
    free(g.a.work);
    *err = c.err;
    return s;
}

int main(void)
{
    static tensors alone, shared;
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    int32_t workers = cores < 2 ? 2 : cores > WORKERS_MAX ? WORKERS_MAX : (int32_t)cores;
    upipe_par par = {threads_run, &workers, workers};
    upipe_err err;
    upipe_status s;
    int same;
    for (int i = 0; i < QUERIES; ++i)
        alone.q[i] = (float)(i * 37 % 101) / 50 - 1, alone.dout[i] = (float)(i * 23 % 89) / 44 - 1;
    for (int i = 0; i < KEYS; ++i)
        alone.k[i] = (float)(i * 29 % 97) / 48 - 1, alone.v[i] = (float)(i * 31 % 103) / 51 - 1;
    shared = alone;

    s = step("alone", NULL, &alone, &err);
    if (s == UPIPE_OK) s = step("POSIX", &par, &shared, &err);
    same = memcmp(&alone.results, &shared.results, sizeof alone.results) == 0;
#ifdef _OPENMP
    par.run = openmp_run, par.self = NULL;
    if (s == UPIPE_OK) s = step("OpenMP", &par, &shared, &err);
    same = same && memcmp(&alone.results, &shared.results, sizeof alone.results) == 0;
#endif
    if (s != UPIPE_OK) return fprintf(stderr, "%s: %s\n", upipe_status_name(s), err.text), 1;
    printf("output and gradients: %s bits\n", same ? "the same" : "different");
    return fflush(stdout) != 0 || !same;
}

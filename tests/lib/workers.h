/* workers.h -- hosts' threads of several kinds, for checks that they change no bit
 *
 *     for (kind = 0; kind < WORKERS_KINDS; ++kind) {
 *         host_threads w;
 *         workers_begin(&w, kind);
 *         ops.par = &w.par;
 *         ...
 *         workers_end(&w);
 *     }
 */
#ifndef UPIPE_TEST_WORKERS_H
#define UPIPE_TEST_WORKERS_H

#include "test.h"

#include "../examples/common/pool.h"

enum { WORKERS_KINDS = 5 };

typedef struct host_threads {
    pool p;
    upipe_par par;
    int kind;
} host_threads;

/* Every task on the calling thread, the last one first: no task may wait for one with a lower number. */
static void workers_backwards(void *self, int32_t count, void (*task)(void *arg, int32_t i), void *arg)
{
    (void)self;
    while (count-- > 0) task(arg, count);
}

__attribute__((unused)) static void workers_begin(host_threads *w, int kind)
{
    static const int32_t counts[WORKERS_KINDS] = {1, 2, 3, 7, 3};
    w->kind = kind;
    if (kind == WORKERS_KINDS - 1) {
        w->par.run = workers_backwards;
        w->par.self = NULL;
        w->par.workers = counts[kind];
        return;
    }
    CHECK_INT(pool_init(&w->p, counts[kind]), 0);
    w->par = pool_par(&w->p);
}

__attribute__((unused)) static void workers_end(host_threads *w)
{
    if (w->kind != WORKERS_KINDS - 1) pool_free(&w->p);
}

#endif

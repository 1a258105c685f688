/* pool.h -- a small pool of threads for one rank: what upipe_ops.par wants, on POSIX threads
 *
 *     pool p;
 *     pool_init(&p, 4);               three threads, and the one that calls
 *     upipe_par par = pool_par(&p);
 *     ops.par = &par;                 this rank's own table
 *     ...
 *     pool_free(&p);
 *
 * With OpenMP no pool is needed:
 *
 *     static void run(void *self, int32_t count, void (*task)(void *arg, int32_t i), void *arg)
 *     {
 *         #pragma omp parallel for schedule(static, 1) num_threads(count)
 *         for (int32_t i = 0; i < count; ++i) task(arg, i);
 *     }
 *
 * Calls come one at a time, from the rank's thread. A waiting thread looks for work for a while before it
 * sleeps: the library's calls follow each other within microseconds, and waking a sleeper takes as long.
 */
#ifndef EXAMPLES_POOL_H
#define EXAMPLES_POOL_H

#include <pthread.h>
#include <sched.h>

#include "upipe/upipe_ops.h"

enum { POOL_MAX = 256, POOL_LOOKS = 200 };

typedef struct pool {
    pthread_t threads[POOL_MAX];
    pthread_mutex_t lock;
    pthread_cond_t wake, all_done;
    void (*task)(void *arg, int32_t i);
    void *arg;
    int64_t call;          /* calls made so far; guards the fields above */
    int32_t count, next;   /* tasks of this call, and the first that no thread has begun */
    int32_t open;          /* tasks that have not returned */
    int32_t workers, stop; /* threads, the caller's included */
} pool;

/* Runs tasks of the call until none is left. Holds the lock on entry and exit. */
static inline void pool_work(pool *p)
{
    while (p->next < p->count) {
        int32_t i = p->next++;
        void (*task)(void *arg, int32_t i) = p->task;
        void *arg = p->arg;
        pthread_mutex_unlock(&p->lock);
        task(arg, i);
        pthread_mutex_lock(&p->lock);
        if (--p->open == 0) pthread_cond_signal(&p->all_done);
    }
}

static inline void *pool_thread(void *arg)
{
    pool *p = (pool *)arg;
    int64_t seen = 0;
    pthread_mutex_lock(&p->lock);
    while (!p->stop) {
        int looks;
        if (p->call != seen) {
            seen = p->call;
            pool_work(p);
            continue;
        }
        pthread_mutex_unlock(&p->lock);
        for (looks = 0; looks < POOL_LOOKS && __atomic_load_n(&p->call, __ATOMIC_RELAXED) == seen; ++looks)
            sched_yield();
        pthread_mutex_lock(&p->lock);
        if (p->call == seen && !p->stop) pthread_cond_wait(&p->wake, &p->lock);
    }
    pthread_mutex_unlock(&p->lock);
    return NULL;
}

static inline void pool_run(void *self, int32_t count, void (*task)(void *arg, int32_t i), void *arg)
{
    pool *p = (pool *)self;
    int looks;
    pthread_mutex_lock(&p->lock);
    p->task = task;
    p->arg = arg;
    p->count = p->open = count;
    p->next = 0;
    __atomic_store_n(&p->call, p->call + 1, __ATOMIC_RELAXED);
    pthread_cond_broadcast(&p->wake);
    pool_work(p);
    for (looks = 0; looks < POOL_LOOKS && p->open > 0; ++looks) {
        pthread_mutex_unlock(&p->lock);
        sched_yield();
        pthread_mutex_lock(&p->lock);
    }
    while (p->open > 0) pthread_cond_wait(&p->all_done, &p->lock);
    pthread_mutex_unlock(&p->lock);
}

/* Ends the threads. */
static inline void pool_free(pool *p)
{
    int32_t i;
    pthread_mutex_lock(&p->lock);
    p->stop = 1;
    __atomic_store_n(&p->call, p->call + 1, __ATOMIC_RELAXED);
    p->count = p->next = 0;
    pthread_cond_broadcast(&p->wake);
    pthread_mutex_unlock(&p->lock);
    for (i = 1; i < p->workers; ++i) pthread_join(p->threads[i], NULL);
    pthread_cond_destroy(&p->wake);
    pthread_cond_destroy(&p->all_done);
    pthread_mutex_destroy(&p->lock);
}

/* Starts workers - 1 threads, 1 <= workers <= POOL_MAX. Nonzero, and nothing to free, if the system has
 * none. */
static inline int pool_init(pool *p, int32_t workers)
{
    memset(p, 0, sizeof *p);
    if (workers < 1 || workers > POOL_MAX) return -1;
    if (pthread_mutex_init(&p->lock, NULL) != 0) return -1;
    if (pthread_cond_init(&p->wake, NULL) != 0 || pthread_cond_init(&p->all_done, NULL) != 0) return -1;
    for (p->workers = 1; p->workers < workers; ++p->workers)
        if (pthread_create(&p->threads[p->workers], NULL, pool_thread, p) != 0) {
            pool_free(p);
            return -1;
        }
    return 0;
}

static inline upipe_par pool_par(pool *p)
{
    upipe_par par;
    par.run = pool_run;
    par.self = p;
    par.workers = p->workers;
    return par;
}

#endif

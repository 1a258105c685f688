/* upipe_cpu_par.h -- sharing a kernel's work among the host's threads
 *
 *     static void item(void *arg, int64_t i, int32_t worker) { ... }
 *
 *     upi_par_each(ops, count, item, &job);
 *
 * The workers of the table's upipe_par fetch items in order, one by one; each worker has a number for its
 * part of scratch. So long items come first, and an item may wait for an earlier one: that one is running, or
 * has finished, even if the host's pool runs its tasks one after another. The result of an item must not
 * depend on its worker.
 */
#ifndef UPIPE_CPU_PAR_H
#define UPIPE_CPU_PAR_H

#include <sched.h>

#include "upipe_cpu_simd.h"
#include "../upipe_ops.h"

enum {
    UPI_PAR_SPINS = 64,       /* looks at a gate before the thread offers its core to others */
    UPI_PAR_ROW_BYTES = 65536 /* of rows in one item: a few microseconds, what waking a thread costs */
};

typedef void (*upi_par_item)(void *arg, int64_t i, int32_t worker);

typedef struct upi_par_job {
    upi_par_item item;
    void *arg;
    int64_t count, next;
} upi_par_job;

/* Threads of the table, which size its scratch. */
UPI_INLINE int32_t upi_par_workers(const upipe_ops *ops)
{
    return ops != NULL && ops->par != NULL && ops->par->workers > 1 ? ops->par->workers : 1;
}

UPIPE_API void upi_par_task(void *arg, int32_t worker)
{
    upi_par_job *job = (upi_par_job *)arg;
    int64_t i;
    while ((i = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED)) < job->count)
        job->item(job->arg, i, worker);
}

/* Calls item(arg, i, worker) for i in 0 .. count - 1; worker is below upi_par_workers(ops). */
UPIPE_API void upi_par_each(const upipe_ops *ops, int64_t count, upi_par_item item, void *arg)
{
    int32_t workers = upi_par_workers(ops);
    upi_par_job job;
    job.item = item;
    job.arg = arg;
    job.count = count;
    job.next = 0;
    if (workers > count) workers = (int32_t)count;
    if (workers > 1)
        ops->par->run(ops->par->self, workers, upi_par_task, &job);
    else
        upi_par_task(&job, 0);
}

/* Waits until *gate is `turn`, which an earlier item brings about with upi_par_open. */
UPI_INLINE void upi_par_wait(const int64_t *gate, int64_t turn)
{
    int spins = 0;
    while (__atomic_load_n(gate, __ATOMIC_ACQUIRE) != turn)
        if (++spins > UPI_PAR_SPINS) sched_yield();
}

UPI_INLINE void upi_par_open(int64_t *gate, int64_t turn)
{
    __atomic_store_n(gate, turn, __ATOMIC_RELEASE);
}

#endif

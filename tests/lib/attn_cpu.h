/* attn_cpu.h -- the CPU as the place whose attention is checked: the table that programs link
 *
 *     cpu_place();            cpu_ops.par: the threads that kernels run on
 */
#ifndef UPIPE_TEST_ATTN_CPU_H
#define UPIPE_TEST_ATTN_CPU_H

#include "upipe/cpu/upipe_cpu.h"
#include "attn_checks.h"
#include "workers.h"

static upipe_ops cpu_ops;
static upipe_ctx cpu_ctx;

static inline void cpu_place(void)
{
    static const upipe_dtype types[] = {UPIPE_F32, UPIPE_BF16, UPIPE_BF16};
    static const int layouts[ATTN_LAYOUTS] = {PACKED, HEAD_MAJOR, HEADS_INNER};
    upipe_cpu_ops(&cpu_ops);
    cpu_ops.name = "this table";
    memset(&cpu_ctx, 0, sizeof cpu_ctx);
    cpu_ctx.ops = &cpu_ops;
    memset(&here, 0, sizeof here);
    here.c = &cpu_ctx;
    for (int i = 0; i < 3; ++i) {
        here.types[i] = types[i];
        here.layouts[i] = layouts[i];
    }
    here.compares = 1;
}

/* Any number of threads, tasks in any order, and head by head: the bits of one thread and one call. `start`: of
 * dsinks[0]. */
static inline void check_workers(const oracle_attn *t, upipe_dtype dtype, const values *in, float start)
{
    const int mark = buffers_n;
    values one = values_make(t), got;
    one.dsinks[0] = start;
    run_kernels(t, dtype, PACKED, t->h, in, &one);
    for (int kind = 0; kind <= WORKERS_KINDS; ++kind) {
        host_threads w;
        got = values_make(t);
        got.dsinks[0] = start;
        if (kind < WORKERS_KINDS) {
            workers_begin(&w, kind);
            cpu_ops.par = &w.par;
        }
        run_kernels(t, dtype, kind % ATTN_LAYOUTS, kind < WORKERS_KINDS ? t->h : 1, in, &got);
        cpu_ops.par = NULL;
        if (kind < WORKERS_KINDS) workers_end(&w);
        check_same(t, &one, &got);
    }
    buffers_free(mark);
}

#endif

/* attn_cpu.h -- the CPU as the place whose attention is checked: its vector kernels, or those over bf16 instructions
 *
 *     cpu_place(NULL);            cpu_ops.par: the threads that kernels run on
 */
#ifndef UPIPE_TEST_ATTN_CPU_H
#define UPIPE_TEST_ATTN_CPU_H

#include "upipe/cpu/upipe_cpu_attn_bf16.h"
#include "upipe/cpu/upipe_cpu_rows.h"
#include "attn_checks.h"
#include "bf16.h"
#include "workers.h"

/* What takes the products of bf16, where that is what is tested: then all types are bf16. NULL: vectors. */
static const upi_bf16_unit *attn_unit;

static upipe_ops cpu_ops;
static upipe_ctx cpu_ctx;

static upipe_status unit_fwd(upipe_ctx *c, const upipe_attn *a)
{
    return upi_attn_bf16_fwd(c, a, attn_unit);
}

static upipe_status unit_bwd(upipe_ctx *c, const upipe_attn_grad *g)
{
    return upi_attn_bf16_bwd(c, g, attn_unit);
}

static inline void cpu_place(const upi_bf16_unit *unit)
{
    static const upipe_dtype types[] = {UPIPE_F32, UPIPE_BF16, UPIPE_BF16};
    static const int layouts[ATTN_LAYOUTS] = {PACKED, HEAD_MAJOR, HEADS_INNER};
    attn_unit = unit;
    memset(&cpu_ops, 0, sizeof cpu_ops);
    memset(&cpu_ctx, 0, sizeof cpu_ctx);
    cpu_ops.name = "this table";
    cpu_ops.attn_fwd = unit != NULL ? unit_fwd : upi_cpu_attn_fwd;
    cpu_ops.attn_bwd = unit != NULL ? unit_bwd : upi_cpu_attn_bwd;
    cpu_ops.attn_bytes = unit != NULL ? upi_attn_bf16_bytes : upi_cpu_attn_bytes;
    cpu_ops.rowdot = upi_cpu_rowdot;
    cpu_ops.attn_can = UPI_ATTN_CAN;
    cpu_ctx.ops = &cpu_ops;
    memset(&here, 0, sizeof here);
    here.c = &cpu_ctx;
    for (int i = 0; i < 3; ++i) {
        here.types[i] = unit != NULL ? UPIPE_BF16 : types[i];
        here.layouts[i] = layouts[i];
    }
    here.naive = unit != NULL ? NAIVE_NARROW | NAIVE_LATE : 0;
    here.compares = 1;
}

/* Of a program's words: bf16 tests the processor's bf16 instructions, in plain C and where it has them, and all
 * behind it leaves nothing out, which in plain C is slow. Returns 0 for other words. */
static inline int attn_units(int argc, char **argv, void (*test)(int all))
{
    const int is_unit = argc > 1 && strcmp(argv[1], "bf16") == 0,
              all = argc > 2 && strcmp(argv[2], "all") == 0;
    cpu_place(NULL);
    if (!is_unit) return 0;
    cpu_place(&plain_units[0]);
    TEST_OF("unit", test(0));
    cpu_place(&plain_units[1]);
    TEST_OF("unit", test(all));
    if (upi_bf16_here() != NULL) cpu_place(upi_bf16_here());
    if (upi_bf16_here() != NULL) TEST_OF("unit", test(1));
    return 1;
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

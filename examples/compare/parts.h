/* parts.h -- processor time of a rank's passes, by parts as in the paper's runtime table
 *
 *     parts_table(&parts, &ops);      from now on the table's entries add what they take
 *     parts_begin(&parts);
 *     ...                             a pass, on this thread
 *     parts_end(&parts);
 *
 * Seconds of the calling thread: they leave out waits and other programs, which matters where ranks outnumber cores.
 * Ranks that are threads send by copies; the layer also copies each block of dO into O's place.
 */
#ifndef COMPARE_PARTS_H
#define COMPARE_PARTS_H

#include <time.h>

#include "upipe/upipe.h"

enum { PART_TRANSFER, PART_ATTN_FWD, PART_ATTN_BWD, PART_PRODUCTS, PART_ALL, PARTS };

static const char *const part_names[PARTS] = {"transfer", "attn_fwd", "attn_bwd", "products", "all"};

typedef struct part_times {
    upipe_ops plain; /* the entries without a clock */
    int counts;      /* a pass runs */
    double seconds[PARTS];
} part_times;

static double parts_clock(void)
{
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static part_times *parts_of(const upipe_ctx *c)
{
    return (part_times *)c->ops->user;
}

static upipe_status parts_add(part_times *p, int which, double start, upipe_status s)
{
    if (p->counts) p->seconds[which] += parts_clock() - start;
    return s;
}

static upipe_status parts_copy(upipe_ctx *c, void *dst, const void *src, size_t bytes)
{
    part_times *p = parts_of(c);
    const double start = parts_clock();
    return parts_add(p, PART_TRANSFER, start, p->plain.copy(c, dst, src, bytes));
}

static upipe_status parts_gemm(upipe_ctx *c, upipe_view out, upipe_view a, upipe_view b, int flags,
                               void *work, size_t work_bytes)
{
    part_times *p = parts_of(c);
    const double start = parts_clock();
    return parts_add(p, PART_PRODUCTS, start, p->plain.gemm(c, out, a, b, flags, work, work_bytes));
}

static upipe_status parts_attn_fwd(upipe_ctx *c, const upipe_attn *a)
{
    part_times *p = parts_of(c);
    const double start = parts_clock();
    return parts_add(p, PART_ATTN_FWD, start, p->plain.attn_fwd(c, a));
}

static upipe_status parts_attn_bwd(upipe_ctx *c, const upipe_attn_grad *g)
{
    part_times *p = parts_of(c);
    const double start = parts_clock();
    return parts_add(p, PART_ATTN_BWD, start, p->plain.attn_bwd(c, g));
}

/* The table's copy, gemm, attn_fwd and attn_bwd add their seconds, between parts_begin and parts_end; both must stay
 * where they are. Of a table that computes on the host. */
static void parts_table(part_times *p, upipe_ops *ops)
{
    memset(p, 0, sizeof *p);
    p->plain = *ops;
    ops->user = p;
    ops->copy = parts_copy;
    ops->gemm = parts_gemm;
    ops->attn_fwd = parts_attn_fwd;
    ops->attn_bwd = parts_attn_bwd;
}

static void parts_begin(part_times *p)
{
    p->counts = 1;
    p->seconds[PART_ALL] -= parts_clock();
}

static void parts_end(part_times *p)
{
    p->counts = 0;
    p->seconds[PART_ALL] += parts_clock();
}

#endif

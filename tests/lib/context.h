/* context.h -- what a call of the library needs: a table, a pool in memory that is full of NaNs, a side stream
 *
 *     upipe_ctx c = {0};
 *     upipe_mem mem;
 *     context_pool(&c, &mem, &ops, bytes, blocks);
 */
#ifndef UPIPE_TEST_CONTEXT_H
#define UPIPE_TEST_CONTEXT_H

#include "upipe/upipe_dry.h"
#include "upipe/cpu/upipe_cpu.h"
#include "upipe/cpu/upipe_cpu_side_stream.h"

#include "memory.h"
#include "test.h"

__attribute__((unused)) static upipe_ops cpu_table(void)
{
    upipe_ops ops;
    upipe_cpu_ops(&ops);
    return ops;
}

/* A pool of these bytes, which lie on the list of memory.h with the pool's blocks. */
static inline void pool_begin(upipe_mem *mem, size_t bytes, int blocks)
{
    upipe_mem_init(mem, slab_of(bytes), bytes,
                   (upipe_mem_block *)zeroed((size_t)blocks * sizeof(upipe_mem_block)), blocks);
}

static inline void context_pool(upipe_ctx *c, upipe_mem *mem, const upipe_ops *ops, size_t bytes, int blocks)
{
    pool_begin(mem, bytes, blocks);
    c->ops = ops;
    c->mem = mem;
}

/* A dry run of a plan, or of none. */
static inline upipe_dry *dry_begin(const upipe_plan *plan, const upipe_ops *ops, upipe_status *status)
{
    upipe_dry *dry = (upipe_dry *)zeroed(sizeof *dry);
    *status = upipe_dry_init(dry, plan, ops);
    return dry;
}

/* A side stream: a thread of its own, or on the rank's own line. */
typedef struct side_thread {
    upipe_cpu_side_stream state;
    upipe_side_stream stream;
    int threaded;
} side_thread;

static inline void side_begin(upipe_ctx *c, side_thread *s, int on_line)
{
    upipe_status status = UPIPE_OK;
    s->threaded = !on_line;
    if (on_line)
        upipe_side_stream_inline(&s->stream, NULL);
    else
        status = upipe_cpu_side_stream_init(&s->state, &s->stream, &c->err);
    CHECK_STATUS(status, UPIPE_OK, c->err);
    if (status != UPIPE_OK) abort();
    c->side_stream = &s->stream;
}

static inline void side_end(side_thread *s)
{
    if (s->threaded) upipe_cpu_side_stream_free(&s->state);
}

#endif

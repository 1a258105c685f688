/* pools.h -- a rank's device, and its two pools there: slabs, tables of blocks, and a side stream where something overlaps
 *
 *     pools_open(&p, &ctx, device, &how, need, host_need, blocks_max);        ctx.mem, ctx.side_stream
 *     ...
 *     pools_destroy(&p, &err);                     nothing is left in them
 *     pools_close(&p, &err);                       when no peer can reach them any more; after a failure too
 */
#ifndef LLAMA_POOLS_H
#define LLAMA_POOLS_H

#include "../../common/methods.h"
#include "../../common/side_stream.h"

typedef struct pools {
    device d;
    side_stream line;
    void *slab, *host_slab;
    upipe_mem_block *blocks, *host_blocks;
    upipe_mem mem, host;
} pools;

static inline upipe_status pools_open(pools *p, upipe_ctx *c, int kind, const method_choice *how, size_t need,
                                      size_t host_need, int blocks_max)
{
    const size_t bytes = upipe_mem_span(need), host_bytes = upipe_mem_span(host_need);
    UPIPE_TRY(device_open(&p->d, kind, &c->err));
    device_use(&p->d, c);
    /* segments overlap copies alone */
    if (how->overlap) UPIPE_TRY(side_stream_open(&p->line, &p->d, how->segments == 0, c));
    UPIPE_TRY(device_slab(&p->d, &p->slab, bytes, &c->err));
    UPIPE_TRY(device_host_slab(&p->d, &p->host_slab, host_bytes, &c->err));
    p->blocks = (upipe_mem_block *)calloc((size_t)blocks_max, sizeof *p->blocks);
    p->host_blocks = (upipe_mem_block *)calloc((size_t)blocks_max, sizeof *p->host_blocks);
    if (p->blocks == NULL || p->host_blocks == NULL)
        return upipe_fail(&c->err, UPIPE_ERR_MEMORY, "no memory for the tables of a rank's pools");
    upipe_mem_init(&p->mem, p->slab, bytes, p->blocks, blocks_max);
    upipe_mem_init(&p->host, p->host_slab, host_bytes, p->host_blocks, blocks_max);
    c->mem = &p->mem;
    return UPIPE_OK;
}

static inline upipe_status pools_destroy(pools *p, upipe_err *e)
{
    UPIPE_TRY(upipe_mem_destroy(&p->host, e));
    return upipe_mem_destroy(&p->mem, e);
}

static inline upipe_status pools_close(pools *p, upipe_err *e)
{
    upipe_status s, closed;
    device_slab_free(&p->d, p->slab);
    device_host_slab_free(&p->d, p->host_slab);
    free(p->blocks);
    free(p->host_blocks);
    s = side_stream_close(&p->line, e);
    closed = device_close(&p->d, s == UPIPE_OK ? e : NULL);
    return s != UPIPE_OK ? s : closed;
}

#endif

/* lane.h -- a rank's second line of execution, where something overlaps: a thread on the CPU, a stream on a CUDA device
 *
 *     second_line l;
 *     lane_open(&l, DEVICE_CPU, &ctx);               ctx.lane is set
 *     ...
 *     lane_close(&l, &ctx.err);                      after a failed open too
 */
#ifndef COMMON_LANE_H
#define COMMON_LANE_H

#include "upipe/cpu/upipe_cpu_lane.h"

#include "device.h"

#ifdef UPIPE_WITH_CUDA
#include "upipe/cuda/upipe_cuda_lane.h"
#endif

typedef struct second_line {
    device d; /* its stream and, on a CUDA device, its table */
    upipe_lane lane;
    upipe_cpu_lane thread;
    int open;
#ifdef UPIPE_WITH_CUDA
    upipe_cuda_lane cuda;
#endif
} second_line;

static inline upipe_status lane_open(second_line *l, int kind, upipe_ctx *c)
{
    upipe_status s;
    memset(l, 0, sizeof *l);
    UPIPE_TRY(device_open(&l->d, kind, &c->err));
    l->open = 1;
#ifdef UPIPE_WITH_CUDA
    if (kind == DEVICE_CUDA) {
        s = upipe_cuda_lane_init(&l->cuda, &l->lane, (cudaStream_t)l->d.stream, &l->d.ops, &c->err);
        if (s == UPIPE_OK) c->lane = &l->lane;
        return s;
    }
#endif
    s = upipe_cpu_lane_init(&l->thread, &l->lane, &c->err);
    if (s == UPIPE_OK) c->lane = &l->lane;
    return s;
}

static inline upipe_status lane_close(second_line *l, upipe_err *e)
{
    upipe_status s = UPIPE_OK, closed;
    if (!l->open) return UPIPE_OK;
#ifdef UPIPE_WITH_CUDA
    if (l->d.kind == DEVICE_CUDA) s = upipe_cuda_lane_free(&l->cuda, e);
#endif
    if (l->d.kind == DEVICE_CPU && l->lane.self != NULL) upipe_cpu_lane_free(&l->thread);
    closed = device_close(&l->d, s == UPIPE_OK ? e : NULL);
    l->open = 0;
    return s != UPIPE_OK ? s : closed;
}

#endif

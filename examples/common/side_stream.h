/* side_stream.h -- a rank's side stream, for plans that overlap: a CPU thread or a CUDA stream
 *
 *     side_stream l;
 *     side_stream_open(&l, &device, kernels, &ctx);         beside an open device's stream, see device_open_beside;
 *                                                           sets ctx.side_stream, which side_stream_make does not
 *     ...
 *     side_stream_close(&l, &ctx.err);                      after a failed open too
 */
#ifndef COMMON_SIDE_STREAM_H
#define COMMON_SIDE_STREAM_H

#include "upipe/cpu/upipe_cpu_side_stream.h"

#include "device.h"

#ifdef UPIPE_WITH_CUDA
#include "upipe/cuda/upipe_cuda_side_stream.h"
#endif

typedef struct side_stream {
    device d; /* its stream and, on a CUDA device, its table */
    upipe_side_stream side_stream;
    upipe_cpu_side_stream thread;
    int open;
#ifdef UPIPE_WITH_CUDA
    upipe_cuda_side_stream cuda;
#endif
} side_stream;

static inline upipe_status side_stream_make(side_stream *l, device *beside, int kernels, upipe_err *e)
{
    memset(l, 0, sizeof *l);
    UPIPE_TRY(device_open_beside(&l->d, beside, kernels, e));
    l->open = 1;
#ifdef UPIPE_WITH_CUDA
    if (l->d.kind == DEVICE_CUDA)
        return upipe_cuda_side_stream_init(&l->cuda, &l->side_stream, (cudaStream_t)l->d.stream, &l->d.ops,
                                           e);
#endif
    return upipe_cpu_side_stream_init(&l->thread, &l->side_stream, e);
}

static inline upipe_status side_stream_open(side_stream *l, device *beside, int kernels, upipe_ctx *c)
{
    UPIPE_TRY(side_stream_make(l, beside, kernels, &c->err));
    c->side_stream = &l->side_stream;
    return UPIPE_OK;
}

static inline upipe_status side_stream_close(side_stream *l, upipe_err *e)
{
    upipe_status s = UPIPE_OK, closed;
    if (!l->open) return UPIPE_OK;
#ifdef UPIPE_WITH_CUDA
    if (l->d.kind == DEVICE_CUDA) s = upipe_cuda_side_stream_free(&l->cuda, e);
#endif
    if (l->d.kind == DEVICE_CPU && l->side_stream.self != NULL) upipe_cpu_side_stream_free(&l->thread);
    closed = device_close(&l->d, s == UPIPE_OK ? e : NULL);
    l->open = 0;
    return s != UPIPE_OK ? s : closed;
}

#endif

/* upipe_cuda_side_stream.h -- a side stream on a device: a second CUDA stream
 *
 *     cudaStream_t stream;
 *     upipe_cuda_stream_first(&stream, &ctx.err);
 *     upipe_cuda_side_stream state;
 *     upipe_side_stream side;
 *     upipe_cuda_side_stream_init(&state, &side, stream, &ops, &ctx.err);     one a rank
 *     ctx.side_stream = &side;
 *     ...
 *     upipe_cuda_side_stream_free(&state, &ctx.err);
 *
 * Tasks run on the host's thread, as late as possible: the load of a stage is enqueued behind the attention
 * of the previous stage. So it overlaps with that attention even if the transport's wait blocks the host. The
 * two streams synchronize by events alone, so all of it can be captured into a graph.
 *
 * What overlaps needs free multiprocessors. A stream of the greatest priority gets what blocks of attention leave as
 * they end; blocks that stay for the whole call, of the forward on 9.0, leave nothing but upipe_cuda.margin.
 */
#ifndef UPIPE_CUDA_SIDE_STREAM_H
#define UPIPE_CUDA_SIDE_STREAM_H

#include "../upipe_ops.h"
#include "upipe_cuda_device.h"

enum { UPI_CUDA_SIDE_STREAM_TASKS = 8 }; /* posted and not run; a pipeline has four */

typedef struct upi_cuda_side_stream_task {
    void (*run)(void *arg);
    void *arg;
} upi_cuda_side_stream_task;

/* upipe_cuda_side_stream -- the host's, kept as long as the side stream */
typedef struct upipe_cuda_side_stream {
    cudaEvent_t event[UPIPE_SIDE_POINTS]
                     [2]; /* of odd and even numbers: two of a kind are waited for at most */
    cudaEvent_t joined;
    upi_cuda_side_stream_task tasks[UPI_CUDA_SIDE_STREAM_TASKS];
    int64_t posted, run;
    int64_t point[UPIPE_SIDE_POINTS]; /* reached, by what the host has enqueued */
} upipe_cuda_side_stream;

UPIPE_API void upi_cuda_side_stream_turn(upipe_cuda_side_stream *buf)
{
    const upi_cuda_side_stream_task task = buf->tasks[buf->run++ % UPI_CUDA_SIDE_STREAM_TASKS];
    task.run(task.arg);
}

UPIPE_API upipe_status upi_cuda_side_stream_post(upipe_ctx *c, upipe_side_stream *side_stream,
                                                 void (*task)(void *arg), void *arg)
{
    upipe_cuda_side_stream *buf = (upipe_cuda_side_stream *)side_stream->self;
    upi_cuda_side_stream_task *t;
    (void)c;
    while (buf->posted - buf->run == UPI_CUDA_SIDE_STREAM_TASKS) upi_cuda_side_stream_turn(buf);
    t = &buf->tasks[buf->posted++ % UPI_CUDA_SIDE_STREAM_TASKS];
    t->run = task;
    t->arg = arg;
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_cuda_side_stream_mark(upipe_ctx *c, upipe_side_stream *side_stream, int point,
                                                 int64_t n)
{
    upipe_cuda_side_stream *buf = (upipe_cuda_side_stream *)side_stream->self;
    buf->point[point] = n; /* reached even without the event, so that no stream waits for ever */
    UPIPE_CUDA_TRY(&c->err, cudaEventRecord(buf->event[point][n % 2], (cudaStream_t)c->stream));
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_cuda_side_stream_meet(upipe_ctx *c, upipe_side_stream *side_stream, int point,
                                                 int64_t n)
{
    upipe_cuda_side_stream *buf = (upipe_cuda_side_stream *)side_stream->self;
    while (buf->point[point] < n && buf->run < buf->posted) upi_cuda_side_stream_turn(buf);
    UPIPE_CUDA_TRY(&c->err, cudaStreamWaitEvent((cudaStream_t)c->stream, buf->event[point][n % 2], 0));
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_cuda_side_stream_join(upipe_ctx *c, upipe_side_stream *side_stream)
{
    upipe_cuda_side_stream *buf = (upipe_cuda_side_stream *)side_stream->self;
    while (buf->run < buf->posted) upi_cuda_side_stream_turn(buf);
    memset(buf->point, 0, sizeof buf->point);
    UPIPE_CUDA_TRY(&c->err, cudaEventRecord(buf->joined, (cudaStream_t)side_stream->ctx.stream));
    UPIPE_CUDA_TRY(&c->err, cudaStreamWaitEvent((cudaStream_t)c->stream, buf->joined, 0));
    return UPIPE_OK;
}

/* upipe_cuda_side_stream_free -- waits for nothing: the stream is the host's; after a failed init too */
UPIPE_API upipe_status upipe_cuda_side_stream_free(upipe_cuda_side_stream *buf, upipe_err *e)
{
    upipe_status s = UPIPE_OK, t;
    int i;
    for (i = 0; i <= 2 * UPIPE_SIDE_POINTS; ++i) {
        cudaEvent_t event = i < 2 * UPIPE_SIDE_POINTS ? buf->event[i / 2][i % 2] : buf->joined;
        if (event == NULL) continue;
        t = upipe_cuda_check(e, cudaEventDestroy(event), "cudaEventDestroy");
        if (s == UPIPE_OK) s = t;
    }
    memset(buf, 0, sizeof *buf);
    return s;
}

/* upipe_cuda_side_stream_init -- events on the current device, and the side stream
 *   buf     the host's, kept until upipe_cuda_side_stream_free
 *   stream  the host's, for this side stream alone: not the default stream, which would wait for all others. Of
 *           upipe_cuda_stream_first, or its kernels wait behind all blocks of attention
 *   ops     a table over a upipe_cuda of its own, whose cuBLAS handle is this stream's: a handle and its
 *           workspace belong to one stream
 *   errors  ARG (no table), BACKEND; there is then nothing to free
 */
UPIPE_API upipe_status upipe_cuda_side_stream_init(upipe_cuda_side_stream *buf,
                                                   upipe_side_stream *side_stream, cudaStream_t stream,
                                                   const struct upipe_ops *ops, upipe_err *e)
{
    upipe_status s = UPIPE_OK;
    int i;
    memset(buf, 0, sizeof *buf);
    memset(side_stream, 0, sizeof *side_stream);
    if (ops == NULL)
        return upipe_fail(e, UPIPE_ERR_ARG, "a side stream needs a table over a cuBLAS handle of its own");
    for (i = 0; i <= 2 * UPIPE_SIDE_POINTS && s == UPIPE_OK; ++i)
        s = upipe_cuda_check(
            e,
            cudaEventCreateWithFlags(i < 2 * UPIPE_SIDE_POINTS ? &buf->event[i / 2][i % 2] : &buf->joined,
                                     cudaEventDisableTiming),
            "cudaEventCreateWithFlags");
    if (s != UPIPE_OK) {
        upipe_cuda_side_stream_free(buf, NULL);
        return s;
    }
    side_stream->self = buf;
    side_stream->ctx.stream = stream;
    side_stream->ops = ops;
    side_stream->post = upi_cuda_side_stream_post;
    side_stream->mark = upi_cuda_side_stream_mark;
    side_stream->meet = upi_cuda_side_stream_meet;
    side_stream->join = upi_cuda_side_stream_join;
    return UPIPE_OK;
}

#endif

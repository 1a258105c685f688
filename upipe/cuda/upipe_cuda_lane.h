/* upipe_cuda_lane.h -- a lane that is a stream: stages overlap on one device        backend cuda, includes upipe_lane.h
 *
 *     upipe_cuda_lane room;
 *     upipe_lane lane;
 *     upipe_cuda_lane_init(&room, &lane, stream, &ops, &ctx.err);     one a rank
 *     ctx.lane = &lane;
 *     ...
 *     upipe_cuda_lane_free(&room, &ctx.err);
 *
 * Tasks run on the host's thread as late as they may: what a stage is prepared by is enqueued behind the attention
 * before, so that a transport whose wait is the host's overlaps with it too. Lines meet by events alone, so all of it
 * may be captured into a graph.
 */
#ifndef UPIPE_CUDA_LANE_H
#define UPIPE_CUDA_LANE_H

#include "../upipe_lane.h"
#include "upipe_cuda_device.h"

enum { UPI_CUDA_LANE_TASKS = 8 }; /* posted and not run; stages have four */

typedef struct upi_cuda_lane_task {
    void (*run)(void *arg);
    void *arg;
} upi_cuda_lane_task;

/* upipe_cuda_lane -- the host's, kept as long as the lane */
typedef struct upipe_cuda_lane {
    cudaEvent_t event[UPIPE_LANE_POINTS]
                     [2]; /* of odd and even numbers: two of a kind are waited for at most */
    cudaEvent_t joined;
    upi_cuda_lane_task tasks[UPI_CUDA_LANE_TASKS];
    int64_t posted, run;
    int64_t point[UPIPE_LANE_POINTS]; /* reached, by what the host has enqueued */
} upipe_cuda_lane;

UPIPE_API void upi_cuda_lane_turn(upipe_cuda_lane *room)
{
    const upi_cuda_lane_task task = room->tasks[room->run++ % UPI_CUDA_LANE_TASKS];
    task.run(task.arg);
}

UPIPE_API upipe_status upi_cuda_lane_post(upipe_ctx *c, upipe_lane *lane, void (*task)(void *arg), void *arg)
{
    upipe_cuda_lane *room = (upipe_cuda_lane *)lane->self;
    upi_cuda_lane_task *t;
    (void)c;
    while (room->posted - room->run == UPI_CUDA_LANE_TASKS) upi_cuda_lane_turn(room);
    t = &room->tasks[room->posted++ % UPI_CUDA_LANE_TASKS];
    t->run = task;
    t->arg = arg;
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_cuda_lane_mark(upipe_ctx *c, upipe_lane *lane, int point, int64_t n)
{
    upipe_cuda_lane *room = (upipe_cuda_lane *)lane->self;
    room->point[point] = n; /* reached all the same if the event cannot be recorded: nobody waits for ever */
    UPI_CUDA(&c->err, cudaEventRecord(room->event[point][n % 2], (cudaStream_t)c->stream));
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_cuda_lane_meet(upipe_ctx *c, upipe_lane *lane, int point, int64_t n)
{
    upipe_cuda_lane *room = (upipe_cuda_lane *)lane->self;
    while (room->point[point] < n && room->run < room->posted) upi_cuda_lane_turn(room);
    UPI_CUDA(&c->err, cudaStreamWaitEvent((cudaStream_t)c->stream, room->event[point][n % 2], 0));
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_cuda_lane_join(upipe_ctx *c, upipe_lane *lane)
{
    upipe_cuda_lane *room = (upipe_cuda_lane *)lane->self;
    while (room->run < room->posted) upi_cuda_lane_turn(room);
    memset(room->point, 0, sizeof room->point);
    UPI_CUDA(&c->err, cudaEventRecord(room->joined, (cudaStream_t)lane->ctx.stream));
    UPI_CUDA(&c->err, cudaStreamWaitEvent((cudaStream_t)c->stream, room->joined, 0));
    return UPIPE_OK;
}

/* upipe_cuda_lane_free -- waits for nothing: the stream is the host's; after a failed init too */
UPIPE_API upipe_status upipe_cuda_lane_free(upipe_cuda_lane *room, upipe_err *e)
{
    upipe_status s = UPIPE_OK, t;
    int i;
    for (i = 0; i <= 2 * UPIPE_LANE_POINTS; ++i) {
        cudaEvent_t event = i < 2 * UPIPE_LANE_POINTS ? room->event[i / 2][i % 2] : room->joined;
        if (event == NULL) continue;
        t = upi_cuda_check(e, cudaEventDestroy(event), "cudaEventDestroy");
        if (s == UPIPE_OK) s = t;
    }
    memset(room, 0, sizeof *room);
    return s;
}

/* upipe_cuda_lane_init -- events on the current device, and the lane
 *   room    the host's, kept until upipe_cuda_lane_free
 *   stream  the host's, for this lane alone: not the default stream, which would wait for all others
 *   ops     a table over a upipe_cuda of its own, whose cuBLAS handle is this stream's: a handle, and its workspace,
 *           belong to one line
 *   errors  ARG (no table), BACKEND; there is then nothing to free
 */
UPIPE_API upipe_status upipe_cuda_lane_init(upipe_cuda_lane *room, upipe_lane *lane, cudaStream_t stream,
                                            const struct upipe_ops *ops, upipe_err *e)
{
    upipe_status s = UPIPE_OK;
    int i;
    memset(room, 0, sizeof *room);
    memset(lane, 0, sizeof *lane);
    if (ops == NULL)
        return upi_fail(e, UPIPE_ERR_ARG, "a lane needs a table over a cuBLAS handle of its own");
    for (i = 0; i <= 2 * UPIPE_LANE_POINTS && s == UPIPE_OK; ++i)
        s = upi_cuda_check(
            e,
            cudaEventCreateWithFlags(i < 2 * UPIPE_LANE_POINTS ? &room->event[i / 2][i % 2] : &room->joined,
                                     cudaEventDisableTiming),
            "cudaEventCreateWithFlags");
    if (s != UPIPE_OK) {
        upipe_cuda_lane_free(room, NULL);
        return s;
    }
    lane->self = room;
    lane->ctx.stream = stream;
    lane->ops = ops;
    lane->post = upi_cuda_lane_post;
    lane->mark = upi_cuda_lane_mark;
    lane->meet = upi_cuda_lane_meet;
    lane->join = upi_cuda_lane_join;
    return UPIPE_OK;
}

#endif

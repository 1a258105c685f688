/* upipe_side_stream.h -- a second stream of a rank, and a pipeline over both        layer 2, includes comm
 *
 * A rank has a compute stream: ctx->stream, or the calling thread. A side stream runs beside it: on a device
 * it is a second stream, on a CPU a thread. The host makes it (cuda/upipe_cuda_side_stream.h,
 * cpu/upipe_cpu_side_stream.h) and passes it in ctx->side_stream. Plans with desc.overlap use it.
 *
 *     ctx.side_stream = &side;
 */
#ifndef UPIPE_SIDE_STREAM_H
#define UPIPE_SIDE_STREAM_H

#include "upipe_comm.h"

/* Kinds of points: one stream reaches a point, the other one waits for it. */
enum { UPIPE_SIDE_BEGIN, UPIPE_SIDE_READY, UPIPE_SIDE_DONE, UPIPE_SIDE_POINTS };

/* upipe_side_stream -- what a side stream implements; c is the context of the calling stream, compute or side
 *   ctx    the side stream's context; its maker sets ctx.stream, upipe_pipeline_begin the rest
 *   ops    the side stream's compute table; NULL: the rank's own, which is then called from both streams.
 *          Scratch sizes are those of the rank's own table for both
 *   self   the maker's
 *   post   runs task(arg) on the side stream, after all tasks posted before; it may run before post returns.
 *          Tasks call the team, upipe_comm_abort included; the compute stream does not until it has joined
 *   mark   records point number n of this kind behind the work that c's stream has so far: n = 1, 2, ...
 *   meet   later work of c's stream waits until the other stream has reached that point. The host calls it
 *          after the mark, or on another thread
 *   join   returns when all tasks have run; what they enqueued precedes later work of c's stream. Points
 *          count from 1 again
 */
typedef struct upipe_side_stream {
    upipe_ctx ctx;
    const struct upipe_ops *ops;
    void *self;
    upipe_status (*post)(upipe_ctx *c, struct upipe_side_stream *side_stream, void (*task)(void *arg),
                         void *arg);
    upipe_status (*mark)(upipe_ctx *c, struct upipe_side_stream *side_stream, int point, int64_t n);
    upipe_status (*meet)(upipe_ctx *c, struct upipe_side_stream *side_stream, int point, int64_t n);
    upipe_status (*join)(upipe_ctx *c, struct upipe_side_stream *side_stream);
} upipe_side_stream;

/* ---- a side stream that is the compute stream ---- */

UPIPE_API upipe_status upi_side_stream_inline_post(upipe_ctx *c, upipe_side_stream *side_stream,
                                                   void (*task)(void *arg), void *arg)
{
    (void)c, (void)side_stream;
    task(arg);
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_side_stream_inline_point(upipe_ctx *c, upipe_side_stream *side_stream, int point,
                                                    int64_t n)
{
    (void)c, (void)side_stream, (void)point, (void)n;
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_side_stream_inline_join(upipe_ctx *c, upipe_side_stream *side_stream)
{
    (void)c, (void)side_stream;
    return UPIPE_OK;
}

/* upipe_side_stream_inline -- a side stream that is the compute stream: each task runs where it is posted
 *   stream  the stream of the tasks
 * Nothing overlaps. For dry runs, and for a pipeline on one stream.
 */
UPIPE_API void upipe_side_stream_inline(upipe_side_stream *side_stream, void *stream)
{
    memset(side_stream, 0, sizeof *side_stream);
    side_stream->ctx.stream = stream;
    side_stream->post = upi_side_stream_inline_post;
    side_stream->mark = side_stream->meet = upi_side_stream_inline_point;
    side_stream->join = upi_side_stream_inline_join;
}

/* ---- a pipeline: loads and stores on the side stream, the work between them on the compute stream ---- */

struct upipe_pipeline;

typedef struct upi_pipeline_task {
    struct upipe_pipeline *q;
    int i, store;
    upipe_status status; /* of a load: read by the compute stream once it has met READY */
} upi_pipeline_task;

/* upipe_pipeline -- stages 0, 1, ... with two of them in flight; caller-owned, used for one pass
 *
 *     upipe_pipeline_begin(&q, c, side, call, arg);       call loads or stores a stage
 *     s = upipe_pipeline_load(&q, c, 0);
 *     for (i = 0; i < n && s == UPIPE_OK; ++i) {
 *         if (i + 1 < n) s = upipe_pipeline_load(&q, c, i + 1);
 *         if (s == UPIPE_OK) s = upipe_pipeline_wait(&q, c, i);       stage i is loaded
 *         if (s == UPIPE_OK) s = my_work(c, i);
 *         if (s == UPIPE_OK) s = upipe_pipeline_store(&q, c, i);
 *     }
 *     return upipe_pipeline_end(&q, c, s);
 */
typedef struct upipe_pipeline {
    upipe_side_stream *side;
    upipe_status (*call)(upipe_ctx *c, void *arg, int store, int i);
    void *arg;
    upi_pipeline_task task[4]; /* loads and stores of two stages: no more are in flight */
    upipe_status failed;       /* the side stream's first failure; it alone accesses this before join */
    int seen;                  /* the compute stream has stopped for that failure, */
    const char *why;           /* or for a failure of its own */
} upipe_pipeline;

/* The first failure on the side stream. It aborts the team now, as the compute stream may still work for
 * long. */
UPIPE_API void upi_pipeline_failed(upipe_pipeline *q, upipe_status s)
{
    if (s == UPIPE_OK || q->failed != UPIPE_OK) return;
    q->failed = s;
    upipe_fail_reason(&q->side->ctx.err, s);
    upipe_comm_abort(q->side->ctx.team, q->side->ctx.err.text);
}

/* A failure of the compute stream, posted as a task: a transport accepts calls from one thread at a time, and
 * the side stream may be in one. */
UPIPE_API void upi_pipeline_abort(void *arg)
{
    upipe_pipeline *q = (upipe_pipeline *)arg;
    upipe_comm_abort(q->side->ctx.team, q->why);
}

/* On the side stream. After a failure a task does nothing but reach its point, so that no stream waits for
 * ever. */
UPIPE_API void upi_pipeline_run(void *arg)
{
    upi_pipeline_task *t = (upi_pipeline_task *)arg;
    upipe_pipeline *q = t->q;
    upipe_side_stream *side = q->side;
    upipe_ctx *c = &side->ctx;
    upipe_status s = UPIPE_OK;
    if (t->store)
        s = side->meet(c, side, UPIPE_SIDE_DONE, t->i + 1);
    else if (t->i == 0)
        s = side->meet(c, side, UPIPE_SIDE_BEGIN, 1);
    if (q->failed == UPIPE_OK && s == UPIPE_OK) s = q->call(c, q->arg, t->store, t->i);
    upi_pipeline_failed(q, s);
    if (t->store) return;
    t->status = q->failed;
    upi_pipeline_failed(q, side->mark(c, side, UPIPE_SIDE_READY, t->i + 1));
}

UPIPE_API upipe_status upi_pipeline_post(upipe_pipeline *q, upipe_ctx *c, int i, int store)
{
    upi_pipeline_task *t = &q->task[2 * store + i % 2];
    t->q = q;
    t->i = i;
    t->store = store;
    t->status = UPIPE_OK;
    return q->side->post(c, q->side, upi_pipeline_run, t);
}

/* upipe_pipeline_begin -- passes table, pool and team of c to the side stream; see upipe_pipeline
 *   errors  the side stream's; call upipe_pipeline_end all the same
 */
UPIPE_API upipe_status upipe_pipeline_begin(upipe_pipeline *q, upipe_ctx *c, upipe_side_stream *side,
                                            upipe_status (*call)(upipe_ctx *c, void *arg, int store, int i),
                                            void *arg)
{
    upipe_ctx *other = &side->ctx;
    memset(q, 0, sizeof *q);
    q->side = side;
    q->call = call;
    q->arg = arg;
    q->why = c->err.text;
    other->ops = side->ops != NULL ? side->ops : c->ops;
    other->mem = c->mem;
    other->team = c->team;
    other->user = c->user;
    memset(&other->err, 0, sizeof other->err);
    return side->mark(c, side, UPIPE_SIDE_BEGIN, 1);
}

/* upipe_pipeline_load -- posts the load of stage i, behind all loads and stores posted before */
UPIPE_API upipe_status upipe_pipeline_load(upipe_pipeline *q, upipe_ctx *c, int i)
{
    return upi_pipeline_post(q, c, i, 0);
}

/* upipe_pipeline_wait -- later work of the compute stream waits until stage i is loaded; returns the load's
 *                        status */
UPIPE_API upipe_status upipe_pipeline_wait(upipe_pipeline *q, upipe_ctx *c, int i)
{
    UPIPE_TRY(q->side->meet(c, q->side, UPIPE_SIDE_READY, i + 1));
    q->seen = q->task[i % 2].status != UPIPE_OK;
    return q->task[i % 2].status;
}

/* upipe_pipeline_store -- posts the store of stage i, behind the work that the compute stream has so far */
UPIPE_API upipe_status upipe_pipeline_store(upipe_pipeline *q, upipe_ctx *c, int i)
{
    UPIPE_TRY(q->side->mark(c, q->side, UPIPE_SIDE_DONE, i + 1));
    return upi_pipeline_post(q, c, i, 1);
}

/* upipe_pipeline_end -- waits for everything posted; s is the status of the loop
 * Returns the first failure of either stream, with its sentence in c->err.
 */
UPIPE_API upipe_status upipe_pipeline_end(upipe_pipeline *q, upipe_ctx *c, upipe_status s)
{
    upipe_status joined;
    if (s != UPIPE_OK && !q->seen) {
        upipe_fail_reason(&c->err, s);
        /* if the side stream accepts no task, the caller aborts the team after the join */
        (void)q->side->post(c, q->side, upi_pipeline_abort, q);
    }
    joined = q->side->join(c, q->side);
    if (q->failed != UPIPE_OK && (s == UPIPE_OK || q->seen)) {
        c->err = q->side->ctx.err;
        return q->failed;
    }
    return s != UPIPE_OK ? s : joined;
}

#endif

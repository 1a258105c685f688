/* upipe_cpu_side_stream.h -- a side stream that is a thread, for CPU ranks
 *
 *     upipe_cpu_side_stream state;
 *     upipe_side_stream side;
 *     upipe_cpu_side_stream_init(&state, &side, &ctx.err);          one a rank
 *     ctx.side_stream = &side;
 *     ...
 *     upipe_cpu_side_stream_free(&state);
 *
 * Two threads then call the table's upipe_par, if there is one. Both also call the team and the pool's guard
 * and clock, though one at a time. Over MPI that needs MPI_THREAD_SERIALIZED.
 */
#ifndef UPIPE_CPU_SIDE_STREAM_H
#define UPIPE_CPU_SIDE_STREAM_H

#include <pthread.h>

#include "../upipe_ops.h"

enum { UPI_CPU_SIDE_STREAM_TASKS = 8 }; /* posted and not begun; a pipeline has four */

typedef struct upi_cpu_side_stream_task {
    void (*run)(void *arg);
    void *arg;
} upi_cpu_side_stream_task;

/* upipe_cpu_side_stream -- the host's, kept as long as the side stream */
typedef struct upipe_cpu_side_stream {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t change;
    upi_cpu_side_stream_task tasks[UPI_CPU_SIDE_STREAM_TASKS];
    int64_t posted, done; /* tasks so far */
    int64_t point[UPIPE_SIDE_POINTS];
    int stop;
} upipe_cpu_side_stream;

UPIPE_API void *upi_cpu_side_stream_thread(void *arg)
{
    upipe_cpu_side_stream *buf = (upipe_cpu_side_stream *)arg;
    pthread_mutex_lock(&buf->lock);
    for (;;) {
        upi_cpu_side_stream_task task;
        while (buf->done == buf->posted && !buf->stop) pthread_cond_wait(&buf->change, &buf->lock);
        if (buf->done == buf->posted) break;
        task = buf->tasks[buf->done % UPI_CPU_SIDE_STREAM_TASKS];
        pthread_mutex_unlock(&buf->lock);
        task.run(task.arg);
        pthread_mutex_lock(&buf->lock);
        ++buf->done;
        pthread_cond_broadcast(&buf->change);
    }
    pthread_mutex_unlock(&buf->lock);
    return NULL;
}

UPIPE_API upipe_status upi_cpu_side_stream_post(upipe_ctx *c, upipe_side_stream *side_stream,
                                                void (*task)(void *arg), void *arg)
{
    upipe_cpu_side_stream *buf = (upipe_cpu_side_stream *)side_stream->self;
    upi_cpu_side_stream_task *t;
    (void)c;
    pthread_mutex_lock(&buf->lock);
    while (buf->posted - buf->done == UPI_CPU_SIDE_STREAM_TASKS) pthread_cond_wait(&buf->change, &buf->lock);
    t = &buf->tasks[buf->posted++ % UPI_CPU_SIDE_STREAM_TASKS];
    t->run = task;
    t->arg = arg;
    pthread_cond_broadcast(&buf->change);
    pthread_mutex_unlock(&buf->lock);
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_cpu_side_stream_mark(upipe_ctx *c, upipe_side_stream *side_stream, int point,
                                                int64_t n)
{
    upipe_cpu_side_stream *buf = (upipe_cpu_side_stream *)side_stream->self;
    (void)c;
    pthread_mutex_lock(&buf->lock);
    buf->point[point] = n;
    pthread_cond_broadcast(&buf->change);
    pthread_mutex_unlock(&buf->lock);
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_cpu_side_stream_meet(upipe_ctx *c, upipe_side_stream *side_stream, int point,
                                                int64_t n)
{
    upipe_cpu_side_stream *buf = (upipe_cpu_side_stream *)side_stream->self;
    (void)c;
    pthread_mutex_lock(&buf->lock);
    while (buf->point[point] < n) pthread_cond_wait(&buf->change, &buf->lock);
    pthread_mutex_unlock(&buf->lock);
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_cpu_side_stream_join(upipe_ctx *c, upipe_side_stream *side_stream)
{
    upipe_cpu_side_stream *buf = (upipe_cpu_side_stream *)side_stream->self;
    (void)c;
    pthread_mutex_lock(&buf->lock);
    while (buf->done != buf->posted) pthread_cond_wait(&buf->change, &buf->lock);
    memset(buf->point, 0, sizeof buf->point);
    pthread_mutex_unlock(&buf->lock);
    return UPIPE_OK;
}

/* upipe_cpu_side_stream_init -- starts the thread and fills in the side stream
 *   buf     the host's, kept until upipe_cpu_side_stream_free
 *   errors  MEMORY (no thread)
 */
UPIPE_API upipe_status upipe_cpu_side_stream_init(upipe_cpu_side_stream *buf, upipe_side_stream *side_stream,
                                                  upipe_err *e)
{
    memset(buf, 0, sizeof *buf);
    memset(side_stream, 0, sizeof *side_stream);
    side_stream->self = buf;
    side_stream->post = upi_cpu_side_stream_post;
    side_stream->mark = upi_cpu_side_stream_mark;
    side_stream->meet = upi_cpu_side_stream_meet;
    side_stream->join = upi_cpu_side_stream_join;
    pthread_mutex_init(&buf->lock, NULL);
    pthread_cond_init(&buf->change, NULL);
    if (pthread_create(&buf->thread, NULL, upi_cpu_side_stream_thread, buf) == 0) return UPIPE_OK;
    pthread_cond_destroy(&buf->change);
    pthread_mutex_destroy(&buf->lock);
    side_stream->self = NULL;
    return upipe_fail(e, UPIPE_ERR_MEMORY, "no thread for a side stream");
}

/* upipe_cpu_side_stream_free -- ends the thread. No call may be in progress, and init must have succeeded */
UPIPE_API void upipe_cpu_side_stream_free(upipe_cpu_side_stream *buf)
{
    pthread_mutex_lock(&buf->lock);
    buf->stop = 1;
    pthread_cond_broadcast(&buf->change);
    pthread_mutex_unlock(&buf->lock);
    pthread_join(buf->thread, NULL);
    pthread_cond_destroy(&buf->change);
    pthread_mutex_destroy(&buf->lock);
}

#endif

/* upipe_cpu_lane.h -- a lane that is a thread, for ranks that compute on a CPU        backend cpu, includes upipe_lane.h
 *
 *     upipe_cpu_lane room;
 *     upipe_lane lane;
 *     upipe_cpu_lane_init(&room, &lane, &ctx.err);          one a rank
 *     ctx.lane = &lane;
 *     ...
 *     upipe_cpu_lane_free(&room);
 *
 * The table's upipe_par, if there is one, is then called from two threads; so is the team, though by one at a time,
 * and so are the pool's guard and clock. Over MPI that needs MPI_THREAD_SERIALIZED.
 */
#ifndef UPIPE_CPU_LANE_H
#define UPIPE_CPU_LANE_H

#include <pthread.h>

#include "../upipe_lane.h"

enum { UPI_CPU_LANE_TASKS = 8 }; /* posted and not begun; stages have four */

typedef struct upi_cpu_lane_task {
    void (*run)(void *arg);
    void *arg;
} upi_cpu_lane_task;

/* upipe_cpu_lane -- the host's, kept as long as the lane */
typedef struct upipe_cpu_lane {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t change;
    upi_cpu_lane_task tasks[UPI_CPU_LANE_TASKS];
    int64_t posted, done; /* tasks so far */
    int64_t point[UPIPE_LANE_POINTS];
    int stop;
} upipe_cpu_lane;

UPIPE_API void *upi_cpu_lane_thread(void *arg)
{
    upipe_cpu_lane *room = (upipe_cpu_lane *)arg;
    pthread_mutex_lock(&room->lock);
    for (;;) {
        upi_cpu_lane_task task;
        while (room->done == room->posted && !room->stop) pthread_cond_wait(&room->change, &room->lock);
        if (room->done == room->posted) break;
        task = room->tasks[room->done % UPI_CPU_LANE_TASKS];
        pthread_mutex_unlock(&room->lock);
        task.run(task.arg);
        pthread_mutex_lock(&room->lock);
        ++room->done;
        pthread_cond_broadcast(&room->change);
    }
    pthread_mutex_unlock(&room->lock);
    return NULL;
}

UPIPE_API upipe_status upi_cpu_lane_post(upipe_ctx *c, upipe_lane *lane, void (*task)(void *arg), void *arg)
{
    upipe_cpu_lane *room = (upipe_cpu_lane *)lane->self;
    upi_cpu_lane_task *t;
    (void)c;
    pthread_mutex_lock(&room->lock);
    while (room->posted - room->done == UPI_CPU_LANE_TASKS) pthread_cond_wait(&room->change, &room->lock);
    t = &room->tasks[room->posted++ % UPI_CPU_LANE_TASKS];
    t->run = task;
    t->arg = arg;
    pthread_cond_broadcast(&room->change);
    pthread_mutex_unlock(&room->lock);
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_cpu_lane_mark(upipe_ctx *c, upipe_lane *lane, int point, int64_t n)
{
    upipe_cpu_lane *room = (upipe_cpu_lane *)lane->self;
    (void)c;
    pthread_mutex_lock(&room->lock);
    room->point[point] = n;
    pthread_cond_broadcast(&room->change);
    pthread_mutex_unlock(&room->lock);
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_cpu_lane_meet(upipe_ctx *c, upipe_lane *lane, int point, int64_t n)
{
    upipe_cpu_lane *room = (upipe_cpu_lane *)lane->self;
    (void)c;
    pthread_mutex_lock(&room->lock);
    while (room->point[point] < n) pthread_cond_wait(&room->change, &room->lock);
    pthread_mutex_unlock(&room->lock);
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_cpu_lane_join(upipe_ctx *c, upipe_lane *lane)
{
    upipe_cpu_lane *room = (upipe_cpu_lane *)lane->self;
    (void)c;
    pthread_mutex_lock(&room->lock);
    while (room->done != room->posted) pthread_cond_wait(&room->change, &room->lock);
    memset(room->point, 0, sizeof room->point);
    pthread_mutex_unlock(&room->lock);
    return UPIPE_OK;
}

/* upipe_cpu_lane_init -- starts the thread and fills in the lane
 *   room    the host's, kept until upipe_cpu_lane_free
 *   errors  MEMORY (no thread)
 */
UPIPE_API upipe_status upipe_cpu_lane_init(upipe_cpu_lane *room, upipe_lane *lane, upipe_err *e)
{
    memset(room, 0, sizeof *room);
    memset(lane, 0, sizeof *lane);
    lane->self = room;
    lane->post = upi_cpu_lane_post;
    lane->mark = upi_cpu_lane_mark;
    lane->meet = upi_cpu_lane_meet;
    lane->join = upi_cpu_lane_join;
    pthread_mutex_init(&room->lock, NULL);
    pthread_cond_init(&room->change, NULL);
    if (pthread_create(&room->thread, NULL, upi_cpu_lane_thread, room) == 0) return UPIPE_OK;
    pthread_cond_destroy(&room->change);
    pthread_mutex_destroy(&room->lock);
    lane->self = NULL;
    return upi_fail(e, UPIPE_ERR_MEMORY, "no thread for a lane");
}

/* upipe_cpu_lane_free -- the thread ends; no call may be under way, and upipe_cpu_lane_init has succeeded */
UPIPE_API void upipe_cpu_lane_free(upipe_cpu_lane *room)
{
    pthread_mutex_lock(&room->lock);
    room->stop = 1;
    pthread_cond_broadcast(&room->change);
    pthread_mutex_unlock(&room->lock);
    pthread_join(room->thread, NULL);
    pthread_cond_destroy(&room->change);
    pthread_mutex_destroy(&room->lock);
}

#endif

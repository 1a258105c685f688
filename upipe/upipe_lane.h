/* upipe_lane.h -- a second line of execution of a rank, and stages that overlap on it        layer 2, includes comm
 *
 * A stage is prepared, attended and finished. With a lane, a plan with `overlap` prepares and finishes there, while the
 * rank's own line attends and does nothing else:
 *
 *     lane      prepare 0   prepare 1   finish 0   prepare 2   finish 1   ...   finish n-1
 *     the rank's           attend 0    attend 1               attend 2   ...
 *
 * so the exchange before stage i + 1 and the one after stage i - 1 run beside the attention of stage i. All exchanges
 * stay on one line, in one order; so do all takes from the pool, and all sums but attention's own: the bits are those
 * of one line. In segments (upipe_fpdt.h) a stage is a block that comes from the host's memory. On a device a lane is
 * a second stream; on a CPU a thread that the host provides. The makers are upipe_cuda_lane.h and upipe_cpu_lane.h.
 *
 *     ctx.lane = &lane;       plan with desc.overlap; then as without
 */
#ifndef UPIPE_LANE_H
#define UPIPE_LANE_H

#include "upipe_comm.h"

/* Points that one line reaches and the other one waits for. */
enum { UPIPE_LANE_BEGIN, UPIPE_LANE_READY, UPIPE_LANE_DONE, UPIPE_LANE_POINTS };

/* upipe_lane -- the second line. `c` is the context of the line that calls: the rank's own, or lane->ctx
 *   ctx    the lane's context; its stream is the maker's, the rest is filled in from the rank's own
 *   ops    the lane's compute table; NULL: the rank's own, which is then called on both lines. Scratch is asked of the
 *          rank's own for both: they need the same
 *   self   the maker's
 *   post   task(arg) runs on the lane, after all that were posted before; may run before this returns. Tasks call the
 *          team, abort included, and the rank's own line does not until it has joined: one thread at a time
 *   mark   what c's line has been given so far reaches point number n of this kind: 1, 2, ...
 *   meet   c's line goes on when the other one has reached that point; the host calls it after the mark, or
 *          on another thread
 *   join   all tasks have run, and what they enqueued comes before what c's line is given from now on; points count
 *          from 1 again
 */
typedef struct upipe_lane {
    upipe_ctx ctx;
    const struct upipe_ops *ops;
    void *self;
    upipe_status (*post)(upipe_ctx *c, struct upipe_lane *lane, void (*task)(void *arg), void *arg);
    upipe_status (*mark)(upipe_ctx *c, struct upipe_lane *lane, int point, int64_t n);
    upipe_status (*meet)(upipe_ctx *c, struct upipe_lane *lane, int point, int64_t n);
    upipe_status (*join)(upipe_ctx *c, struct upipe_lane *lane);
} upipe_lane;

/* ---- a lane without a line of its own ---- */

UPIPE_API upipe_status upi_lane_inline_post(upipe_ctx *c, upipe_lane *lane, void (*task)(void *arg),
                                            void *arg)
{
    (void)c;
    (void)lane;
    task(arg);
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_lane_inline_point(upipe_ctx *c, upipe_lane *lane, int point, int64_t n)
{
    (void)c;
    (void)lane;
    (void)point;
    (void)n;
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_lane_inline_join(upipe_ctx *c, upipe_lane *lane)
{
    (void)c;
    (void)lane;
    return UPIPE_OK;
}

/* upipe_lane_inline -- runs every task where it is posted, on the stream of the rank's own line: nothing overlaps. For
 *                      dry runs, and to compare with
 */
UPIPE_API void upipe_lane_inline(upipe_lane *lane, void *stream)
{
    memset(lane, 0, sizeof *lane);
    lane->ctx.stream = stream;
    lane->post = upi_lane_inline_post;
    lane->mark = lane->meet = upi_lane_inline_point;
    lane->join = upi_lane_inline_join;
}

/* ---- stages ---- */

struct upi_stages;

typedef struct upi_stage_task {
    struct upi_stages *all;
    int i, finish;
    upipe_status status; /* of a preparation: read by the rank's own line once it has met READY */
} upi_stage_task;

/* upi_stages -- what is done n times, in steps of `step`
 *   prepare attend finish   of stage i on the line of c
 *   lane   NULL: on one line, stage after stage; otherwise steps are 1
 */
typedef struct upi_stages {
    void *arg;
    int n, step;
    upipe_status (*prepare)(void *arg, upipe_ctx *c, int i);
    upipe_status (*attend)(void *arg, upipe_ctx *c, int i);
    upipe_status (*finish)(void *arg, upipe_ctx *c, int i);
    upipe_lane *lane;
    upi_stage_task task[4]; /* preparations and finishes of two stages: no more are under way */
    upipe_status failed;    /* the first failure on the lane, which alone touches it until join */
    int told;               /* the rank's own line stopped for that, */
    const char *why;        /* or for a failure of its own */
} upi_stages;

/* The first failure on the lane: the team hears of it now, however long the rank's own line attends. */
UPIPE_API void upi_stages_note(upi_stages *all, upipe_status s)
{
    if (s == UPIPE_OK || all->failed != UPIPE_OK) return;
    all->failed = s;
    upi_reason(&all->lane->ctx.err, s);
    upipe_comm_abort(all->lane->ctx.team, all->lane->ctx.err.text);
}

/* A failure of the rank's own line: a transport takes calls from one thread at a time, and the lane may be in one. */
UPIPE_API void upi_stages_abort(void *arg)
{
    upi_stages *all = (upi_stages *)arg;
    upipe_comm_abort(all->lane->ctx.team, all->why);
}

/* On the lane. After a failure nothing is done, but points are reached, so that nobody waits. */
UPIPE_API void upi_stages_task(void *arg)
{
    upi_stage_task *t = (upi_stage_task *)arg;
    upi_stages *all = t->all;
    upipe_lane *lane = all->lane;
    upipe_ctx *c = &lane->ctx;
    upipe_status s = UPIPE_OK;
    if (t->finish)
        s = lane->meet(c, lane, UPIPE_LANE_DONE, t->i + 1);
    else if (t->i == 0)
        s = lane->meet(c, lane, UPIPE_LANE_BEGIN, 1);
    if (all->failed == UPIPE_OK && s == UPIPE_OK)
        s = t->finish ? all->finish(all->arg, c, t->i) : all->prepare(all->arg, c, t->i);
    upi_stages_note(all, s);
    if (t->finish) return;
    t->status = all->failed;
    upi_stages_note(all, lane->mark(c, lane, UPIPE_LANE_READY, t->i + 1));
}

UPIPE_API upipe_status upi_stages_post(upi_stages *all, upipe_ctx *c, int i, int finish)
{
    upi_stage_task *t = &all->task[2 * finish + i % 2];
    t->all = all;
    t->i = i;
    t->finish = finish;
    t->status = UPIPE_OK;
    return all->lane->post(c, all->lane, upi_stages_task, t);
}

/* One stage of the rank's own line. */
UPIPE_API upipe_status upi_stages_turn(upi_stages *all, upipe_ctx *c, int i)
{
    upipe_lane *lane = all->lane;
    if (i + 1 < all->n) UPIPE_TRY(upi_stages_post(all, c, i + 1, 0));
    UPIPE_TRY(lane->meet(c, lane, UPIPE_LANE_READY, i + 1));
    all->told = all->task[i % 2].status != UPIPE_OK;
    UPIPE_TRY(all->task[i % 2].status);
    UPIPE_TRY(all->attend(all->arg, c, i));
    UPIPE_TRY(lane->mark(c, lane, UPIPE_LANE_DONE, i + 1));
    return upi_stages_post(all, c, i, 1);
}

UPIPE_API upipe_status upi_stages_overlap(upi_stages *all, upipe_ctx *c)
{
    upipe_lane *lane = all->lane;
    upipe_ctx *other = &lane->ctx;
    upipe_status s, joined;
    int i;
    other->ops = lane->ops != NULL ? lane->ops : c->ops;
    other->mem = c->mem;
    other->team = c->team;
    other->user = c->user;
    memset(&other->err, 0, sizeof other->err);
    all->failed = UPIPE_OK;
    all->told = 0;
    all->why = c->err.text;
    s = lane->mark(c, lane, UPIPE_LANE_BEGIN, 1);
    if (s == UPIPE_OK) s = upi_stages_post(all, c, 0, 0);
    for (i = 0; i < all->n && s == UPIPE_OK; ++i) s = upi_stages_turn(all, c, i);
    if (s != UPIPE_OK && !all->told) {
        upi_reason(&c->err, s);
        /* a lane that takes no task leaves it to the caller, who gives up on the team after the join */
        (void)lane->post(c, lane, upi_stages_abort, all);
    }
    joined = lane->join(c, lane);
    if (all->failed != UPIPE_OK && (s == UPIPE_OK || all->told)) {
        c->err = other->err;
        return all->failed;
    }
    return s != UPIPE_OK ? s : joined;
}

/* All stages. */
UPIPE_API upipe_status upi_stages_run(upi_stages *all, upipe_ctx *c)
{
    int i;
    if (all->lane != NULL) return upi_stages_overlap(all, c);
    for (i = 0; i < all->n; i += all->step) {
        UPIPE_TRY(all->prepare(all->arg, c, i));
        UPIPE_TRY(all->attend(all->arg, c, i));
        UPIPE_TRY(all->finish(all->arg, c, i));
    }
    return UPIPE_OK;
}

#endif

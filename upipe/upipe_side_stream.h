/* upipe_side_stream.h -- a second line of execution of a rank, and stages that overlap on it        layer 2, includes comm
 *
 * A stage is prepared, attended and finished. With a side stream, a plan with `overlap` prepares and finishes there, while the
 * rank's own line attends and does nothing else:
 *
 *     side stream      prepare 0   prepare 1   finish 0   prepare 2   finish 1   ...   finish n-1
 *     the rank's           attend 0    attend 1               attend 2   ...
 *
 * so the exchange before stage i + 1 and the one after stage i - 1 run beside the attention of stage i. All exchanges
 * stay on one line, in one order; so do all takes from the pool, and all sums but attention's own: the bits are those
 * of one line. In segments (upipe_fpdt.h) a stage is a block that comes from the host's memory. On a device a side stream is
 * a second stream; on a CPU a thread that the host provides. The makers are upipe_cuda_side_stream.h and upipe_cpu_side_stream.h.
 *
 *     ctx.side stream = &side stream;       plan with desc.overlap; then as without
 */
#ifndef UPIPE_SIDE_STREAM_H
#define UPIPE_SIDE_STREAM_H

#include "upipe_comm.h"

/* Points that one line reaches and the other one waits for. */
enum { UPIPE_SIDE_BEGIN, UPIPE_SIDE_READY, UPIPE_SIDE_DONE, UPIPE_SIDE_POINTS };

/* upipe_side_stream -- the second line. `c` is the context of the line that calls: the rank's own, or side stream->ctx
 *   ctx    the side stream's context; its stream is the maker's, the rest is filled in from the rank's own
 *   ops    the side stream's compute table; NULL: the rank's own, which is then called on both lines. Scratch is asked of the
 *          rank's own for both: they need the same
 *   self   the maker's
 *   post   task(arg) runs on the side stream, after all that were posted before; may run before this returns. Tasks call the
 *          team, abort included, and the rank's own line does not until it has joined: one thread at a time
 *   mark   what c's line has been given so far reaches point number n of this kind: 1, 2, ...
 *   meet   c's line goes on when the other one has reached that point; the host calls it after the mark, or
 *          on another thread
 *   join   all tasks have run, and what they enqueued comes before what c's line is given from now on; points count
 *          from 1 again
 */
typedef struct upipe_side_stream {
    upipe_ctx ctx;
    const struct upipe_ops *ops;
    void *self;
    upipe_status (*post)(upipe_ctx *c, struct upipe_side_stream *side_stream, void (*task)(void *arg), void *arg);
    upipe_status (*mark)(upipe_ctx *c, struct upipe_side_stream *side_stream, int point, int64_t n);
    upipe_status (*meet)(upipe_ctx *c, struct upipe_side_stream *side_stream, int point, int64_t n);
    upipe_status (*join)(upipe_ctx *c, struct upipe_side_stream *side_stream);
} upipe_side_stream;

/* ---- a side stream without a line of its own ---- */

UPIPE_API upipe_status upi_side_stream_inline_post(upipe_ctx *c, upipe_side_stream *side_stream, void (*task)(void *arg),
                                            void *arg)
{
    (void)c;
    (void)side_stream;
    task(arg);
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_side_stream_inline_point(upipe_ctx *c, upipe_side_stream *side_stream, int point, int64_t n)
{
    (void)c;
    (void)side_stream;
    (void)point;
    (void)n;
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_side_stream_inline_join(upipe_ctx *c, upipe_side_stream *side_stream)
{
    (void)c;
    (void)side_stream;
    return UPIPE_OK;
}

/* upipe_side_stream_inline -- runs every task where it is posted, on the stream of the rank's own line: nothing overlaps. For
 *                      dry runs, and to compare with
 */
UPIPE_API void upipe_side_stream_inline(upipe_side_stream *side_stream, void *stream)
{
    memset(side_stream, 0, sizeof *side_stream);
    side_stream->ctx.stream = stream;
    side_stream->post = upi_side_stream_inline_post;
    side_stream->mark = side_stream->meet = upi_side_stream_inline_point;
    side_stream->join = upi_side_stream_inline_join;
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
 *   side stream   NULL: on one line, stage after stage; otherwise steps are 1
 */
typedef struct upi_stages {
    void *arg;
    int n, step;
    upipe_status (*prepare)(void *arg, upipe_ctx *c, int i);
    upipe_status (*attend)(void *arg, upipe_ctx *c, int i);
    upipe_status (*finish)(void *arg, upipe_ctx *c, int i);
    upipe_side_stream *side_stream;
    upi_stage_task task[4]; /* preparations and finishes of two stages: no more are under way */
    upipe_status failed;    /* the first failure on the side stream, which alone touches it until join */
    int told;               /* the rank's own line stopped for that, */
    const char *why;        /* or for a failure of its own */
} upi_stages;

/* The first failure on the side stream: the team hears of it now, however long the rank's own line attends. */
UPIPE_API void upi_stages_note(upi_stages *all, upipe_status s)
{
    if (s == UPIPE_OK || all->failed != UPIPE_OK) return;
    all->failed = s;
    upipe_fail_reason(&all->side_stream->ctx.err, s);
    upipe_comm_abort(all->side_stream->ctx.team, all->side_stream->ctx.err.text);
}

/* A failure of the rank's own line: a transport takes calls from one thread at a time, and the side stream may be in one. */
UPIPE_API void upi_stages_abort(void *arg)
{
    upi_stages *all = (upi_stages *)arg;
    upipe_comm_abort(all->side_stream->ctx.team, all->why);
}

/* On the side stream. After a failure nothing is done, but points are reached, so that nobody waits. */
UPIPE_API void upi_stages_task(void *arg)
{
    upi_stage_task *t = (upi_stage_task *)arg;
    upi_stages *all = t->all;
    upipe_side_stream *side_stream = all->side_stream;
    upipe_ctx *c = &side_stream->ctx;
    upipe_status s = UPIPE_OK;
    if (t->finish)
        s = side_stream->meet(c, side_stream, UPIPE_SIDE_DONE, t->i + 1);
    else if (t->i == 0)
        s = side_stream->meet(c, side_stream, UPIPE_SIDE_BEGIN, 1);
    if (all->failed == UPIPE_OK && s == UPIPE_OK)
        s = t->finish ? all->finish(all->arg, c, t->i) : all->prepare(all->arg, c, t->i);
    upi_stages_note(all, s);
    if (t->finish) return;
    t->status = all->failed;
    upi_stages_note(all, side_stream->mark(c, side_stream, UPIPE_SIDE_READY, t->i + 1));
}

UPIPE_API upipe_status upi_stages_post(upi_stages *all, upipe_ctx *c, int i, int finish)
{
    upi_stage_task *t = &all->task[2 * finish + i % 2];
    t->all = all;
    t->i = i;
    t->finish = finish;
    t->status = UPIPE_OK;
    return all->side_stream->post(c, all->side_stream, upi_stages_task, t);
}

/* One stage of the rank's own line. */
UPIPE_API upipe_status upi_stages_turn(upi_stages *all, upipe_ctx *c, int i)
{
    upipe_side_stream *side_stream = all->side_stream;
    if (i + 1 < all->n) UPIPE_TRY(upi_stages_post(all, c, i + 1, 0));
    UPIPE_TRY(side_stream->meet(c, side_stream, UPIPE_SIDE_READY, i + 1));
    all->told = all->task[i % 2].status != UPIPE_OK;
    UPIPE_TRY(all->task[i % 2].status);
    UPIPE_TRY(all->attend(all->arg, c, i));
    UPIPE_TRY(side_stream->mark(c, side_stream, UPIPE_SIDE_DONE, i + 1));
    return upi_stages_post(all, c, i, 1);
}

UPIPE_API upipe_status upi_stages_overlap(upi_stages *all, upipe_ctx *c)
{
    upipe_side_stream *side_stream = all->side_stream;
    upipe_ctx *other = &side_stream->ctx;
    upipe_status s, joined;
    int i;
    other->ops = side_stream->ops != NULL ? side_stream->ops : c->ops;
    other->mem = c->mem;
    other->team = c->team;
    other->user = c->user;
    memset(&other->err, 0, sizeof other->err);
    all->failed = UPIPE_OK;
    all->told = 0;
    all->why = c->err.text;
    s = side_stream->mark(c, side_stream, UPIPE_SIDE_BEGIN, 1);
    if (s == UPIPE_OK) s = upi_stages_post(all, c, 0, 0);
    for (i = 0; i < all->n && s == UPIPE_OK; ++i) s = upi_stages_turn(all, c, i);
    if (s != UPIPE_OK && !all->told) {
        upipe_fail_reason(&c->err, s);
        /* a side stream that takes no task leaves it to the caller, who gives up on the team after the join */
        (void)side_stream->post(c, side_stream, upi_stages_abort, all);
    }
    joined = side_stream->join(c, side_stream);
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
    if (all->side_stream != NULL) return upi_stages_overlap(all, c);
    for (i = 0; i < all->n; i += all->step) {
        UPIPE_TRY(all->prepare(all->arg, c, i));
        UPIPE_TRY(all->attend(all->arg, c, i));
        UPIPE_TRY(all->finish(all->arg, c, i));
    }
    return UPIPE_OK;
}

#endif

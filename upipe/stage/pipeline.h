/* pipeline.h -- the stage loop with two stages in flight: the same three calls
 *
 *     side stream       load 0   load 1   store 0   load 2   store 1   ...   store n-1
 *     compute stream    attend 0          attend 1           attend 2  ...
 *
 * The all-to-alls of stages i + 1 (load) and i - 1 (store) run beside the attention of stage i. They, all
 * allocations and all sums but attention's own stay on one stream in one order, so the bits are those of the
 * plain loop.
 */
#ifndef UPIPE_STAGE_PIPELINE_H
#define UPIPE_STAGE_PIPELINE_H

/* ---- a pipeline: loads and stores on the side stream, the work between them on the compute stream ---- */

/* Load, work or store of stage i. */
typedef upipe_status upi_stage_call(upipe_ctx *c, void *arg, int i);

struct upi_pipeline;

typedef struct upi_pipeline_task {
    struct upi_pipeline *q;
    int i;
    upipe_status status; /* of a load: read by the compute stream once it has met READY */
} upi_pipeline_task;

typedef struct upi_pipeline {
    upipe_side_stream *side;
    upi_stage_call *load, *store;
    void *arg;
    upi_pipeline_task loads[2], stores[2]; /* of two stages: no more are in flight */
    upipe_status failed; /* the side stream's first failure; it alone accesses this before join */
    const char *why;     /* of a failure of the compute stream */
} upi_pipeline;

/* The first failure on the side stream. It aborts the team now, as the compute stream may still work for
 * long. */
UPIPE_API void upi_pipeline_failed(upi_pipeline *q, upipe_status s)
{
    if (s == UPIPE_OK || q->failed != UPIPE_OK) return;
    q->failed = s;
    upi_fail_reason(&q->side->ctx.err, s);
    upipe_comm_abort(q->side->ctx.team, q->side->ctx.err.text);
}

/* A failure of the compute stream, posted as a task: a transport accepts calls from one thread at a time, and
 * the side stream may be in one. */
UPIPE_API void upi_pipeline_abort(void *arg)
{
    upi_pipeline *q = (upi_pipeline *)arg;
    upipe_comm_abort(q->side->ctx.team, q->why);
}

/* A load, on the side stream. After a failure loads and stores do nothing but reach their points, so that no
 * stream waits for ever. */
UPIPE_API void upi_pipeline_load(void *arg)
{
    upi_pipeline_task *t = (upi_pipeline_task *)arg;
    upi_pipeline *q = t->q;
    upipe_side_stream *side = q->side;
    upipe_ctx *c = &side->ctx;
    if (t->i == 0) upi_pipeline_failed(q, side->meet(c, side, UPIPE_SIDE_BEGIN, 1));
    if (q->failed == UPIPE_OK) upi_pipeline_failed(q, q->load(c, q->arg, t->i));
    t->status = q->failed;
    upi_pipeline_failed(q, side->mark(c, side, UPIPE_SIDE_READY, t->i + 1));
}

/* A store. Without a function for it the side stream waits all the same: the next load may write what the compute
 * stream has read. */
UPIPE_API void upi_pipeline_store(void *arg)
{
    upi_pipeline_task *t = (upi_pipeline_task *)arg;
    upi_pipeline *q = t->q;
    upipe_side_stream *side = q->side;
    upi_pipeline_failed(q, side->meet(&side->ctx, side, UPIPE_SIDE_DONE, t->i + 1));
    if (q->failed == UPIPE_OK && q->store != NULL) upi_pipeline_failed(q, q->store(&side->ctx, q->arg, t->i));
}

UPIPE_API upipe_status upi_pipeline_post(upi_pipeline *q, upipe_ctx *c, upi_pipeline_task *t, int i,
                                         void (*run)(void *arg))
{
    t->q = q;
    t->i = i;
    t->status = UPIPE_OK;
    return q->side->post(c, q->side, run, t);
}

/* The side stream gets table, pool and team of c. */
UPIPE_API upipe_status upi_pipeline_begin(upi_pipeline *q, upipe_ctx *c)
{
    upipe_ctx *other = &q->side->ctx;
    q->why = c->err.text;
    other->ops = q->side->ops != NULL ? q->side->ops : c->ops;
    other->mem = c->mem;
    other->team = c->team;
    other->user = c->user;
    memset(&other->err, 0, sizeof other->err);
    return q->side->mark(c, q->side, UPIPE_SIDE_BEGIN, 1);
}

/* Waits for everything posted; s is the status of the loop, and stopped says that the side stream has caused it. */
UPIPE_API upipe_status upi_pipeline_end(upi_pipeline *q, upipe_ctx *c, upipe_status s, int stopped)
{
    upipe_status joined;
    if (s != UPIPE_OK && !stopped) {
        upi_fail_reason(&c->err, s);
        /* if the side stream accepts no task, the caller aborts the team after the join */
        (void)q->side->post(c, q->side, upi_pipeline_abort, q);
    }
    joined = q->side->join(c, q->side);
    if (q->failed != UPIPE_OK && (s == UPIPE_OK || stopped)) {
        c->err = q->side->ctx.err;
        return q->failed;
    }
    return s != UPIPE_OK ? s : joined;
}

/* upi_pipeline_run -- load, work and store of stages 0 .. n - 1, with two of them in flight
 *   load store  run on the side stream, whose context they get: load i + 1 beside work i, store i after it. store
 *               NULL: there is nothing to store
 *   work        runs on the compute stream: c is that of the call
 *   arg         theirs
 *   errors      the first failure of either stream, with its sentence in c->err; the team is aborted
 */
UPIPE_API upipe_status upi_pipeline_run(upipe_ctx *c, upipe_side_stream *side, int n, upi_stage_call *load,
                                        upi_stage_call *work, upi_stage_call *store, void *arg)
{
    upi_pipeline q;
    upipe_status s;
    int i, stopped = 0;
    memset(&q, 0, sizeof q);
    q.side = side;
    q.load = load;
    q.store = store;
    q.arg = arg;
    s = upi_pipeline_begin(&q, c);
    if (s == UPIPE_OK) s = upi_pipeline_post(&q, c, &q.loads[0], 0, upi_pipeline_load);
    for (i = 0; i < n && s == UPIPE_OK; ++i) {
        if (i + 1 < n) s = upi_pipeline_post(&q, c, &q.loads[(i + 1) % 2], i + 1, upi_pipeline_load);
        if (s == UPIPE_OK) s = side->meet(c, side, UPIPE_SIDE_READY, i + 1);
        if (s == UPIPE_OK) stopped = (s = q.loads[i % 2].status) != UPIPE_OK;
        if (s == UPIPE_OK) s = work(c, arg, i);
        if (s == UPIPE_OK) s = side->mark(c, side, UPIPE_SIDE_DONE, i + 1);
        if (s == UPIPE_OK) s = upi_pipeline_post(&q, c, &q.stores[i % 2], i, upi_pipeline_store);
    }
    return upi_pipeline_end(&q, c, s, stopped);
}

/* Scratch of attention (work bytes) is kept through all stages, so that the compute stream never touches the pool. */
UPIPE_API upipe_status upi_pipelined(upipe_ctx *c, upi_pass *f, size_t work, upi_stage_call *load,
                                     upi_stage_call *attend, upi_stage_call *store)
{
    UPIPE_TRY(upipe_alloc(c, &f->attn_work, work, UPIPE_USE_SCRATCH, "attn_work"));
    UPIPE_TRY(upi_pipeline_run(c, c->side_stream, f->plan->stages, load, attend, store, f));
    return upipe_free(c, f->attn_work);
}

#endif

/* method.h -- one method: planned, run dry, run on thread ranks, measured
 *
 *     method m = {...which, name, o, ops...};
 *     method_plan(&m);              0, or -1 with the sentence out
 *     method_dry(&m);               likewise
 *     method_run(&m, &inputs);      likewise
 *     method_free(&m);
 *
 * Each rank has a slab of its own, of exactly the size that the dry run found (or what the sum of the
 * weights' gradients needs afterwards, if that is more); its pages are touched before the clock runs.
 */
#ifndef COMPARE_METHOD_H
#define COMPARE_METHOD_H

#include "upipe/net/upipe_net_threads.h"
#include "upipe/upipe.h"

#include "inputs.h"

/* What one rank measured, and its memory. */
typedef struct method_rank {
    upipe_mem mem;
    upipe_err err;
    upipe_block *blocks;
    upipe_mem_event *events;
    int64_t events_n; /* of the block; the sum of the weights' gradients comes after */
    device d;
    void *slab;
    float *grads[3]; /* of wq wk wv: the sums over ranks */
    void *sums[3];   /* where they are formed: on the device */
    float *host;     /* [rows][max(D, H*d)]; reached by the device too */
    size_t peak[UPIPE_PHASES], intermediate;
    int64_t sent[2];   /* forward, backward */
    double seconds[2]; /* forward, backward */
} method_rank;

typedef struct method {
    int which;
    const char *name;
    const options *o;
    const inputs *in;
    const upipe_ops *ops;
    upipe_plan plan;
    upipe_bytes bytes; /* the plan's */
    upipe_layer layer;
    upipe_threads team;
    method_rank *ranks;
    void *weights[3]; /* on the device */
    float *out, *dx;  /* [R][H*d], [R][D], natural order; gradients of the weights are rank 0's */
    size_t slab_bytes, pool_bytes;
    int blocks_max; /* live blocks at most */
    int64_t events_max;
    /* the largest over ranks */
    size_t peak[UPIPE_PHASES], intermediate;
    int64_t sent[2];
    double seconds[2];
    /* against the reference and the first method; errors are NaN where nothing was checked */
    double err_out, err_dx, err_dw;
    int same_out, same_dx, same_dw;
} method;

static int method_fail(const method *m, const char *part, upipe_status s, const char *text)
{
    return cli_fail("%s: %s%s: %s", m->name, part, upipe_status_name(s), text);
}

/* The plan and its bytes in closed form. */
static int method_plan(method *m)
{
    const options *o = m->o;
    upipe_plan_scratch scratch;
    upipe_plan_desc d;
    upipe_err err;
    upipe_status s;
    memset(&d, 0, sizeof d);
    d.tokens = o->tokens;
    d.batch = o->batch;
    d.model_dim = o->model_dim;
    d.ranks = o->ranks;
    d.heads = o->heads;
    d.kv_heads = o->kv_heads;
    d.head_dim = o->head_dim;
    d.chunk = m->which == METHOD_ULYSSES ? o->heads : o->chunk;
    d.naive = m->which == METHOD_NAIVE;
    d.dtype = o->dtype;
    s = upipe_plan_init(&m->plan, &d, &err);
    if (s != UPIPE_OK) return method_fail(m, "", s, err.text);
    m->layer.plan = &m->plan;
    m->layer.rope_theta = o->rope ? rope_theta : 0;
    m->layer.full = o->full;
    scratch = upipe_layer_scratch(m->ops, &m->layer, 1);
    m->bytes = upipe_plan_bytes(&m->plan, &scratch);
    return 0;
}

/* The slab that the real sequence of takes needs, and the length of its trace. */
static int method_dry(method *m)
{
    size_t sum = (size_t)m->o->ranks * UPIPE_SUM_PIECE * 4 + UPIPE_MEM_ALIGN;
    upipe_dry *dry = (upipe_dry *)malloc(sizeof *dry);
    upipe_mem_event none;
    upipe_status s;
    if (dry == NULL) return method_fail(m, "", UPIPE_ERR_MEMORY, "no room for the dry run");
    m->layer.wq = m->layer.wk = m->layer.wv = &none; /* must be there, and is not read */
    s = upipe_dry_init(dry, &m->plan, m->ops);
    dry->mem.events = &none; /* room for none: all are counted as lost */
    if (s == UPIPE_OK) s = upipe_dry_layer(dry, &m->layer, 1);
    if (s != UPIPE_OK) method_fail(m, "", s, dry->ctx.err.text);
    m->slab_bytes = dry->mem.need;
    m->blocks_max = dry->mem.blocks_peak;
    m->pool_bytes = m->slab_bytes > sum ? m->slab_bytes : sum;
    m->events_max = dry->mem.events_lost + 64;
    free(dry);
    return s == UPIPE_OK ? 0 : -1;
}

/* Host bytes that the ranks hold while they run, and those that their results hold until the end;
 * floating-point numbers, so that nothing overflows. */
static double method_run_bytes(const method *m)
{
    const upipe_plan_desc *d = &m->plan.desc;
    double dim = (double)d->model_dim, wide = (double)d->heads * d->head_dim;
    double host = (double)d->tokens * (double)d->batch * (dim > wide ? dim : wide) * 4;
    return host + (double)m->bytes.peak * d->ranks;
}

static double method_kept_bytes(const method *m)
{
    const upipe_plan_desc *d = &m->plan.desc;
    double dim = (double)d->model_dim, wide = (double)d->heads * d->head_dim;
    double weights = (wide + 2.0 * d->kv_heads * d->head_dim) * dim;
    return (double)d->tokens * (double)d->batch * (dim + wide) * 4 + weights * 4 * d->ranks;
}

/* Gives back what only the run needs; results and traces stay. */
static upipe_status method_release(method *m, upipe_err *e)
{
    upipe_status s = UPIPE_OK, closed;
    int r, j;
    for (r = 0; m->ranks != NULL && r < m->o->ranks; ++r) {
        method_rank *rank = &m->ranks[r];
        for (j = 0; j < 3; ++j) {
            device_resident_free(m->o->device, rank->sums[j], rank->grads[j]);
            rank->sums[j] = NULL;
        }
        device_slab_free(&rank->d, rank->slab);
        closed = device_close(&rank->d, s == UPIPE_OK ? e : NULL);
        if (s == UPIPE_OK) s = closed;
        rank->slab = NULL;
        free(rank->blocks);
        device_shared_free(m->o->device, rank->host);
        rank->blocks = NULL;
        rank->host = NULL;
    }
    for (j = 0; j < 3; ++j) {
        if (m->in != NULL) device_resident_free(m->o->device, m->weights[j], m->in->stored[j]);
        m->weights[j] = NULL;
    }
    return s;
}

static void method_free(method *m)
{
    int r, j;
    method_release(m, NULL);
    for (r = 0; m->ranks != NULL && r < m->o->ranks; ++r) {
        free(m->ranks[r].events);
        for (j = 0; j < 3; ++j) free(m->ranks[r].grads[j]);
    }
    free(m->ranks);
    free(m->out);
    free(m->dx);
    m->ranks = NULL;
    m->out = m->dx = NULL;
}

/* Zeros that the device reaches too. */
static upipe_status method_room(const method *m, float **out, int64_t rows, int64_t cols, upipe_err *e)
{
    void *room = NULL;
    UPIPE_TRY(device_shared(m->o->device, &room, (size_t)(rows * cols) * sizeof(float), e));
    *out = (float *)room;
    return UPIPE_OK;
}

/* A rank's tables, and where its results go. */
static upipe_status method_allocate_rank(method *m, method_rank *rank, upipe_err *e)
{
    const inputs *in = m->in;
    int64_t widest = in->dim > in->width[0] ? in->dim : in->width[0];
    int j;
    rank->blocks = (upipe_block *)calloc((size_t)m->blocks_max, sizeof *rank->blocks);
    rank->events = (upipe_mem_event *)calloc((size_t)m->events_max, sizeof *rank->events);
    if (rank->blocks == NULL || rank->events == NULL)
        return upi_fail(e, UPIPE_ERR_MEMORY, "no room for a pool's tables");
    UPIPE_TRY(method_room(m, &rank->host, m->plan.rows, widest, e));
    for (j = 0; j < 3; ++j) {
        size_t bytes = (size_t)(in->width[j] * in->dim) * sizeof(float);
        rank->grads[j] = inputs_room(in->width[j], in->dim);
        if (rank->grads[j] == NULL)
            return upi_fail(e, UPIPE_ERR_MEMORY, "no room for %zu bytes of gradients", bytes);
        /* on the CPU they are formed in place */
        UPIPE_TRY(device_resident(m->o->device, &rank->sums[j], bytes,
                                  m->o->device == DEVICE_CPU ? rank->grads[j] : NULL, e));
    }
    return UPIPE_OK;
}

static upipe_status method_allocate(method *m, upipe_err *e)
{
    const inputs *in = m->in;
    int r, j;
    for (j = 0; j < 3; ++j)
        UPIPE_TRY(device_resident(m->o->device, &m->weights[j],
                                  (size_t)(in->width[j] * in->dim) * upipe_dtype_bytes(m->o->dtype),
                                  in->stored[j], e));
    m->layer.wq = m->weights[0];
    m->layer.wk = m->weights[1];
    m->layer.wv = m->weights[2];
    m->out = inputs_room(in->rows, in->width[0]);
    m->dx = inputs_room(in->rows, in->dim);
    m->ranks = (method_rank *)calloc((size_t)m->o->ranks, sizeof *m->ranks);
    if (m->out == NULL || m->dx == NULL || m->ranks == NULL)
        return upi_fail(e, UPIPE_ERR_MEMORY, "no room for the results of %d ranks", m->o->ranks);
    for (r = 0; r < m->o->ranks; ++r) UPIPE_TRY(method_allocate_rank(m, &m->ranks[r], e));
    return UPIPE_OK;
}

/* A rank's tokens, [batch][T][width], from or into the natural order [batch][S][width]. */
static void method_rows(const method *m, int rank, float *natural, float *mine, int64_t width, int out)
{
    const upipe_plan *p = &m->plan;
    int64_t b, n = p->local * width;
    for (b = 0; b < p->desc.batch; ++b) {
        float *at = natural + (b * p->desc.tokens + rank * p->local) * width;
        memcpy(out ? at : mine + b * n, out ? mine + b * n : at, (size_t)n * sizeof *at);
    }
}

static upipe_status method_block(method *m, upipe_ctx *c, method_rank *rank, int r)
{
    static const char *const intermediate[] = {"k", "v", "kv_send", "q_send"};
    const upipe_plan *p = &m->plan;
    const inputs *in = m->in;
    upipe_view tokens = upipe_view_packed(rank->host, UPIPE_F32, p->rows, 1, (int32_t)in->dim);
    upipe_view heads = upipe_view_packed(rank->host, UPIPE_F32, p->rows, 1, (int32_t)in->width[0]);
    upipe_saved saved;
    upipe_slots gout;
    upipe_grads grads;
    upipe_view x;
    void *data;
    double start;
    int64_t sent;
    memset(&grads, 0, sizeof grads);
    grads.wq = (float *)rank->sums[0];
    grads.wk = (float *)rank->sums[1];
    grads.wv = (float *)rank->sums[2];

    UPIPE_TRY(upipe_mem_take(c->mem, &data, upipe_plan_unit_bytes(p), "x", &c->err));
    x = upipe_view_packed(data, p->desc.dtype, p->rows, 1, (int32_t)in->dim);
    method_rows(m, r, in->x, rank->host, in->dim, 0);
    UPIPE_TRY(c->ops->cast(c, x, tokens));
    UPIPE_TRY(c->ops->sync(c));

    UPIPE_TRY(upipe_comm_barrier(c, c->team));
    start = cli_clock(NULL);
    sent = c->team->sent_bytes;
    UPIPE_TRY(upipe_layer_fwd(c, &m->layer, &saved, x));
    UPIPE_TRY(c->ops->sync(c));
    rank->seconds[0] = cli_clock(NULL) - start;
    rank->sent[0] = c->team->sent_bytes - sent;
    rank->intermediate = upipe_mem_largest(c->mem, intermediate, 4);
    UPIPE_TRY(upipe_layer_gather(c, &m->layer, heads, &saved.out));
    UPIPE_TRY(c->ops->sync(c));
    method_rows(m, r, m->out, rank->host, in->width[0], 1);

    UPIPE_TRY(upipe_layer_slots_take(c, &m->layer, &gout, UPIPE_SLOT_FULL, "gout"));
    method_rows(m, r, in->dout, rank->host, in->width[0], 0);
    UPIPE_TRY(upipe_layer_scatter(c, &m->layer, &gout, heads));
    UPIPE_TRY(c->ops->sync(c));

    UPIPE_TRY(upipe_comm_barrier(c, c->team));
    start = cli_clock(NULL);
    sent = c->team->sent_bytes;
    UPIPE_TRY(upipe_layer_bwd(c, &m->layer, x, &grads, &saved, &gout, x));
    UPIPE_TRY(c->ops->sync(c));
    rank->seconds[1] = cli_clock(NULL) - start;
    rank->sent[1] = c->team->sent_bytes - sent;
    UPIPE_TRY(c->ops->cast(c, tokens, x));
    UPIPE_TRY(c->ops->sync(c));
    method_rows(m, r, m->dx, rank->host, in->dim, 1);
    UPIPE_TRY(upipe_mem_give(c->mem, gout.data, &c->err));
    UPIPE_TRY(upipe_mem_give(c->mem, x.data, &c->err));
    return UPIPE_OK;
}

static upipe_status method_rank_run(method *m, upipe_ctx *c, method_rank *rank, int r)
{
    upipe_status s;
    int j;
    upipe_mem_init(&rank->mem, rank->slab, m->pool_bytes, rank->blocks, m->blocks_max);
    rank->mem.events = rank->events;
    rank->mem.events_max = m->events_max;
    rank->mem.clock = cli_clock;
    c->mem = &rank->mem;
    s = method_block(m, c, rank, r);
    for (j = 0; j < UPIPE_PHASES; ++j) rank->peak[j] = rank->mem.phase_peak[j];
    rank->events_n = rank->mem.events_n;
    if (s == UPIPE_OK && rank->mem.events_lost > 0) {
        s = UPIPE_ERR_MEMORY;
        snprintf(c->err.text, sizeof c->err.text, "the pool's trace had no room for %lld events",
                 (long long)rank->mem.events_lost);
    }
    for (j = 0; j < 3 && s == UPIPE_OK; ++j)
        s = upipe_a2a_sum(c, (float *)rank->sums[j], m->in->width[j] * m->in->dim);
    for (j = 0; j < 3 && s == UPIPE_OK && rank->sums[j] != rank->grads[j]; ++j)
        s = c->ops->copy(c, rank->grads[j], rank->sums[j],
                         (size_t)(m->in->width[j] * m->in->dim) * sizeof(float));
    if (s == UPIPE_OK)
        s = upipe_mem_free(&rank->mem, &c->err);
    else
        upipe_mem_free(&rank->mem, NULL);
    return s;
}

/* The slab and the device stay until no rank runs any more: after a failure others may still read there. */
static upipe_status method_rank_main(void *user, int r)
{
    method *m = (method *)user;
    method_rank *rank = &m->ranks[r];
    upipe_ctx c;
    upipe_status s;
    memset(&c, 0, sizeof c);
    c.team = upipe_threads_comm(&m->team, r);
    s = device_open(&rank->d, m->o->device, &c.err);
    device_use(&rank->d, &c);
    if (s == UPIPE_OK) s = device_slab(&rank->d, &rank->slab, m->pool_bytes, &c.err);
    if (s == UPIPE_OK) s = method_rank_run(m, &c, rank, r);
    rank->err = c.err;
    return s;
}

static void method_largest(method *m)
{
    int r, j;
    for (r = 0; r < m->o->ranks; ++r) {
        const method_rank *rank = &m->ranks[r];
        for (j = 0; j < UPIPE_PHASES; ++j)
            if (rank->peak[j] > m->peak[j]) m->peak[j] = rank->peak[j];
        if (rank->intermediate > m->intermediate) m->intermediate = rank->intermediate;
        for (j = 0; j < 2; ++j) {
            if (rank->sent[j] > m->sent[j]) m->sent[j] = rank->sent[j];
            if (rank->seconds[j] > m->seconds[j]) m->seconds[j] = rank->seconds[j];
        }
    }
}

/* After method_plan: memory, threads, the run itself. */
static int method_run(method *m, const inputs *in)
{
    upipe_status *statuses;
    upipe_status s;
    upipe_err err;
    char who[32];
    int r;
    m->in = in;
    statuses = (upipe_status *)calloc((size_t)m->o->ranks, sizeof *statuses);
    memset(&err, 0, sizeof err);
    s = statuses != NULL ? method_allocate(m, &err)
                         : upi_fail(&err, UPIPE_ERR_MEMORY, "%d ranks", m->o->ranks);
    if (s != UPIPE_OK) {
        free(statuses);
        return method_fail(m, "", s, err.text);
    }
    s = upipe_threads_init(&m->team, m->o->ranks, m->o->deadline, &err);
    if (s != UPIPE_OK) {
        method_fail(m, "", s, err.text);
    } else {
        s = upipe_threads_run(&m->team, method_rank_main, m, statuses);
        upipe_threads_free(&m->team);
        if (s == UPIPE_OK) {
            method_largest(m);
        } else {
            r = cli_reason(statuses, m->o->ranks, s);
            snprintf(who, sizeof who, "rank %d: ", r);
            method_fail(m, who, s, m->ranks[r].err.text);
        }
    }
    free(statuses);
    if (s != UPIPE_OK) return -1;
    s = method_release(m, &err);
    return s == UPIPE_OK ? 0 : method_fail(m, "", s, err.text);
}

#endif

/* setup.h -- one method: planned, run dry, run on the ranks of a world, measured
 *
 *     method m = {...kind, name, o, ops, net...};
 *     method_plan(&m);              0, or -1 with the sentence out
 *     method_dry(&m);               likewise
 *     method_run(&m, &inputs);      likewise
 *     method_free(&m);
 *
 * Each rank has a plan of its own, and a slab of exactly the size that its dry run found (or what the sum of
 * the weights' gradients needs afterwards, if that is more); its pages are touched before the clock runs. A
 * process plans for all ranks and runs its own.
 */
#ifndef COMPARE_SETUP_H
#define COMPARE_SETUP_H

#include "passes.h"

/* ---- before anything runs ---- */

/* The plan of one rank of the world. */
static upipe_plan_desc method_desc(const method *m, int rank)
{
    const method_kind *k = m->kind;
    const options *o = m->o;
    upipe_plan_desc d = method_schedule(k, o->how.ranks, o->how.ring, o->heads, o->kv_heads, o->how.chunk);
    method_place(&d, rank);
    d.tokens = o->tokens;
    d.batch = o->batch;
    d.model_dim = o->model_dim;
    if (d.ring > 1 && d.ring_mode == UPIPE_RING_AUTO) d.ring_mode = (upipe_ring_mode)o->ring_mode;
    d.ring_inner = k->inner ? o->how.inner : 0;
    d.head_dim = o->head_dim;
    d.v_dim = o->v_dim;
    d.overlap = o->how.overlap && method_overlaps(k);
    d.dtype = (upipe_dtype)o->dtype;
    return d;
}

static void method_most(method_bytes *most, const method_bytes *b)
{
    int i, j;
    for (i = 0; i < UPIPE_PHASES; ++i) most->phase[i] = upipe_max_bytes(most->phase[i], b->phase[i]);
    most->intermediate = upipe_max_bytes(most->intermediate, b->intermediate);
    most->host = upipe_max_bytes(most->host, b->host);
    for (i = 0; i < SENT_WAYS; ++i)
        for (j = 0; j < 2; ++j)
            if (b->sent[i][j] > most->sent[i][j]) most->sent[i][j] = b->sent[i][j];
}

static void method_weights(method_rank *rank, const void *wq, const void *wk, const void *wv,
                           const void *sinks)
{
    rank->layer.wq = wq;
    rank->layer.wk = wk;
    rank->layer.wv = wv;
    rank->layer.mask.sinks = (const float *)sinks;
    rank->fpdt.layer = rank->layer;
}

static upipe_layer method_layer(const options *o, const method_rank *rank)
{
    static const float sink = 0; /* that there are some is all that a plan asks */
    upipe_layer l;
    memset(&l, 0, sizeof l);
    l.plan = &rank->plan;
    l.rope_theta = o->rope ? o->rope_theta : 0;
    l.rope_rates = rank->rates.own ? rank->rates.value : NULL;
    l.rope_factor = rank->rates.factor;
    l.mask.causal = !o->full;
    l.mask.window = o->window;
    l.mask.borders.cu_seqlens = o->borders;
    l.mask.borders.cu_seqlens_n = o->borders_n;
    l.mask.softcap = (float)o->softcap;
    l.mask.sinks = o->sinks ? &sink : NULL;
    return l;
}

/* After the plan: the block in segments. */
static upipe_status method_plan_segments(const method *m, method_rank *rank, upipe_err *e)
{
    const options *o = m->o;
    upipe_plan first;
    int i;
    rank->fpdt.layer = rank->layer;
    rank->fpdt.host = &rank->second;
    rank->fpdt.desc = rank->plan.desc;
    rank->fpdt.segments = o->how.segments;
    UPIPE_TRY(upipe_fpdt_plan(&rank->fpdt, 0, &first, e));
    for (i = 0, rank->rows = 0; i < o->how.segments; ++i)
        rank->rows += upipe_fpdt_shard(&rank->fpdt, i).n * o->batch;
    return UPIPE_OK;
}

/* A rank's plan. Bytes: those that stay around the block; method_dry adds its own. */
static upipe_status method_plan_rank(const method *m, method_rank *rank, int r, upipe_err *e)
{
    upipe_plan_desc d = method_desc(m, r);
    int64_t all;
    int pass, k;
    UPIPE_TRY(upipe_plan_init(&rank->plan, &d, e));
    rank->rows = rank->plan.rows;
    if (!upipe_mul(&all, m->o->layers, method_layer_bytes(rank)))
        return upipe_fail(e, UPIPE_ERR_OVERFLOW, "the inputs of %d layers", m->o->layers);
    if (d.head_dim <= 2 * LLAMA_ROPE_PAIRS) { /* larger ones are refused by the dry run */
        const llama_config c = options_rope_config(m->o);
        llama_rates_make(&rank->rates, &c, d.tokens);
    }
    rank->layer = method_layer(m->o, rank);
    for (pass = 0; pass < 2; ++pass) {
        rank->planned.sent[SENT_TEAM][pass] = upipe_plan_sent(&rank->plan, pass);
        rank->planned.sent[SENT_RING][pass] = upipe_ring_sent(&rank->plan, &rank->layer.mask, pass);
    }
    if (m->kind->segmented) UPIPE_TRY(method_plan_segments(m, rank, e));
    rank->planned.host = method_kept_host(m, rank);
    for (pass = 0; method_offloads(m) && pass < 2; ++pass)
        rank->planned.sent[SENT_HOST][pass] = (int64_t)upipe_plan_unit_bytes(&rank->plan);
    for (k = 0; k < UPIPE_PHASES; ++k) rank->planned.phase[k] = method_kept_device(m, rank);
    return UPIPE_OK;
}

/* The plans. */
static int method_plan(method *m)
{
    upipe_status s = UPIPE_OK;
    upipe_err err;
    int r;
    m->ranks = (method_rank *)calloc((size_t)m->o->how.ranks, sizeof *m->ranks);
    if (m->ranks == NULL)
        return method_fail(m, "", UPIPE_ERR_MEMORY, "no entry left for the plans of the ranks");
    for (r = 0; r < m->o->how.ranks && s == UPIPE_OK; ++r) s = method_plan_rank(m, &m->ranks[r], r, &err);
    return s == UPIPE_OK ? 0 : method_fail(m, "", s, err.text);
}

/* In segments: what a rank sends, moves to the host and back, and holds there. */
static upipe_status method_dry_segments(method_rank *rank, upipe_dry *dry)
{
    upipe_fpdt f = rank->fpdt;
    upipe_fpdt_saved saved;
    upipe_grads grads;
    float *const none = (float *)dry->mem.slab; /* never touched */
    float *const dout = none + 16;              /* likewise; it is not the forward's result */
    memset(&grads, 0, sizeof grads);
    grads.wq = grads.wk = grads.wv = none;
    grads.sinks = f.layer.mask.sinks != NULL ? none : NULL;
    f.host = &dry->host;
    UPIPE_TRY(upipe_fpdt_fwd(&dry->ctx, &f, &saved, none));
    rank->planned.sent[SENT_TEAM][0] = dry->team.sent_bytes;
    rank->planned.sent[SENT_HOST][0] = saved.moved;
    UPIPE_TRY(upipe_fpdt_bwd(&dry->ctx, &f, none, &grads, &saved, dout, none));
    rank->planned.sent[SENT_TEAM][1] = dry->team.sent_bytes - rank->planned.sent[SENT_TEAM][0];
    rank->planned.sent[SENT_HOST][1] = saved.moved - rank->planned.sent[SENT_HOST][0];
    UPIPE_TRY(upipe_fpdt_free(&f, &saved, &dry->ctx.err));
    rank->second_bytes = upipe_mem_span(dry->host.need);
    rank->planned.host += dry->host.peak;
    return UPIPE_OK;
}

/* The bytes of each rank, the slab that they need, and the length of the trace. */
static int method_dry(method *m)
{
    size_t sum = (size_t)m->o->how.ranks * UPIPE_REDUCE_STRIP * 4 + UPIPE_MEM_ALIGN;
    upipe_dry *dry = (upipe_dry *)malloc(sizeof *dry);
    upipe_mem_event none;
    upipe_status s = UPIPE_OK;
    int r, k;
    if (dry == NULL) return method_fail(m, "", UPIPE_ERR_MEMORY, "no entry left for the dry run");
    for (r = 0; r < m->o->how.ranks && s == UPIPE_OK; ++r) {
        method_rank *rank = &m->ranks[r];
        upipe_bytes bytes;
        method_weights(rank, &none, &none, &none,
                       rank->layer.mask.sinks); /* must be there, and are not read */
        s = upipe_dry_init(dry, &rank->plan, m->ops);
        dry->mem.events = &none; /* space for none: all are counted as lost */
        if (s == UPIPE_OK)
            s = m->kind->segmented ? method_dry_segments(rank, dry) : upipe_dry_layer(dry, &rank->layer, 1);
        if (s != UPIPE_OK) method_fail(m, "", s, dry->ctx.err.text);
        bytes = upipe_dry_bytes(dry);
        for (k = 0; k < UPIPE_PHASES; ++k) rank->planned.phase[k] += bytes.phase[k];
        rank->planned.intermediate = bytes.intermediate_fwd;
        rank->slab_bytes = dry->mem.need + method_kept_span(method_kept_device(m, rank));
        rank->second_bytes += method_kept_span(method_kept_host(m, rank));
        rank->blocks_max = dry->mem.blocks_peak + (method_kept_device(m, rank) > 0);
        rank->pool_bytes = upipe_max_bytes(rank->slab_bytes, sum);
        rank->events_max = dry->mem.events_lost + 64;
        m->slab_bytes = upipe_max_bytes(m->slab_bytes, rank->slab_bytes);
        method_most(&m->planned, &rank->planned);
    }
    free(dry);
    return s == UPIPE_OK ? 0 : -1;
}

/* Rows of the rank that has most: rank 0 receives them. */
static int64_t method_most_rows(const method *m)
{
    int64_t most = 0;
    int r;
    for (r = 0; r < m->o->how.ranks; ++r)
        if (m->ranks[r].rows > most) most = m->ranks[r].rows;
    return most;
}

/* Host bytes that this machine's ranks hold while they run; a floating-point number, so that nothing overflows, as in
 * what follows. */
static double method_run_bytes(const method *m)
{
    const upipe_plan_desc *d = &method_plan_of(m)->desc;
    double dim = (double)d->model_dim, wide = (double)d->heads * d->v_dim, bytes = 0;
    int r, i;
    for (r = m->net->near_first; r < m->net->near_first + m->net->near; ++r) {
        const method_rank *rank = &m->ranks[r];
        size_t peak = 0;
        for (i = 0; i < UPIPE_PHASES; ++i) peak = upipe_max_bytes(peak, rank->planned.phase[i]);
        bytes += (double)peak + (double)rank->planned.host;
        bytes += (double)method_most_rows(m) * (dim > wide ? dim : wide) * 4;
        if (m->kind->segmented)
            bytes += (double)rank->rows * (dim + wide) * (double)upipe_dtype_bytes(d->dtype);
    }
    return bytes;
}

/* The weights of a rank, or their gradients, and the block's x and dout, or out and dx. */
static double method_weight_bytes(const method *m)
{
    const upipe_plan_desc *d = &method_plan_of(m)->desc;
    return ((double)d->heads * d->head_dim + (double)d->kv_heads * (d->head_dim + d->v_dim)) *
           (double)d->model_dim * 4;
}

static double method_token_bytes(const method *m)
{
    const upipe_plan_desc *d = &method_plan_of(m)->desc;
    return (double)d->tokens * (double)d->batch * ((double)d->model_dim + (double)d->heads * d->v_dim) * 4;
}

/* What the results hold until the end. */
static double method_kept_bytes(const method *m)
{
    return (m->net->near_first == 0 ? method_token_bytes(m) : 0) + method_weight_bytes(m) * m->net->near;
}

/* ---- memory ---- */

/* Gives back what only the run needs; results and traces stay. */
static upipe_status method_release(method *m, upipe_err *e)
{
    upipe_status s = UPIPE_OK, closed;
    int r, j;
    for (r = 0; m->ranks != NULL && r < m->o->how.ranks; ++r) {
        method_rank *rank = &m->ranks[r];
        for (j = 0; j < METHOD_GRADS; ++j) {
            device_resident_free(m->o->device, rank->sums[j], rank->grads[j]);
            rank->sums[j] = NULL;
        }
        device_slab_free(&rank->d, rank->slab);
        device_host_slab_free(&rank->d, rank->second_slab);
        rank->second_slab = NULL;
        closed = side_stream_close(&rank->line, s == UPIPE_OK ? e : NULL);
        if (s == UPIPE_OK) s = closed;
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
    if (m->in != NULL) device_resident_free(m->o->device, m->sinks, m->in->sinks);
    m->sinks = NULL;
    return s;
}

static void method_free(method *m)
{
    int r, j;
    method_release(m, NULL);
    for (r = 0; m->ranks != NULL && r < m->o->how.ranks; ++r) {
        free(m->ranks[r].events);
        for (j = 0; j < METHOD_GRADS; ++j) free(m->ranks[r].grads[j]);
    }
    free(m->ranks);
    free(m->out);
    free(m->dx);
    m->ranks = NULL;
    m->out = m->dx = NULL;
}

/* A rank's tables, and where its results go. */
static upipe_status method_allocate_rank(method *m, method_rank *rank, upipe_err *e)
{
    const inputs *in = m->in;
    int64_t widest = in->dim > in->out_width ? in->dim : in->out_width;
    void *host = NULL;
    int j;
    method_weights(rank, m->weights[0], m->weights[1], m->weights[2], m->sinks);
    rank->blocks = (upipe_mem_block *)calloc((size_t)rank->blocks_max, sizeof *rank->blocks);
    rank->events = (upipe_mem_event *)calloc((size_t)rank->events_max, sizeof *rank->events);
    if (rank->blocks == NULL || rank->events == NULL)
        return upipe_fail(e, UPIPE_ERR_MEMORY, "no entry left for a pool's tables");
    UPIPE_TRY(device_shared(m->o->device, &host, (size_t)(method_most_rows(m) * widest) * sizeof(float), e));
    rank->host = (float *)host;
    for (j = 0; j < METHOD_GRADS; ++j) {
        int64_t n = method_grad_size(m, j);
        if (n == 0) continue;
        rank->grads[j] = inputs_buf(1, n);
        if (rank->grads[j] == NULL)
            return upipe_fail(e, UPIPE_ERR_MEMORY, "no entry left for %lld elements of gradients",
                              (long long)n);
        /* on the CPU they are formed in place */
        UPIPE_TRY(device_resident(m->o->device, &rank->sums[j], (size_t)n * sizeof(float),
                                  m->o->device == DEVICE_CPU ? rank->grads[j] : NULL, e));
    }
    return UPIPE_OK;
}

static upipe_status method_allocate(method *m, upipe_err *e)
{
    const inputs *in = m->in;
    int r, j;
    for (j = 0; j < 3; ++j)
        UPIPE_TRY(
            device_resident(m->o->device, &m->weights[j],
                            (size_t)(in->width[j] * in->dim) * upipe_dtype_bytes((upipe_dtype)m->o->dtype),
                            in->stored[j], e));
    if (in->sinks != NULL)
        UPIPE_TRY(
            device_resident(m->o->device, &m->sinks, (size_t)m->o->heads * sizeof(float), in->sinks, e));
    for (r = m->net->first; r < m->net->first + m->net->here; ++r)
        UPIPE_TRY(method_allocate_rank(m, &m->ranks[r], e));
    if (!world_is_root(m->net)) return UPIPE_OK;
    m->out = inputs_buf(in->rows, in->out_width);
    m->dx = inputs_buf(in->rows, in->dim);
    if (m->out != NULL && m->dx != NULL) return UPIPE_OK;
    return upipe_fail(e, UPIPE_ERR_MEMORY, "no entry left for the results of %lld rows", (long long)in->rows);
}

/* ---- a rank's run ---- */

/* Sums the gradients of the weights over all ranks. */
static upipe_status method_sum(method *m, upipe_ctx *c, method_rank *rank, int r)
{
    int j;
    for (j = 0; j < METHOD_GRADS; ++j) {
        int64_t n = method_grad_size(m, j);
        UPIPE_TRY(upipe_all_reduce(c, world_all(m->net, r), (float *)rank->sums[j], n));
        if (rank->sums[j] != rank->grads[j])
            UPIPE_TRY(c->ops->copy(c, rank->grads[j], rank->sums[j], (size_t)n * sizeof(float)));
    }
    return UPIPE_OK;
}

static upipe_status method_rank_run(method *m, upipe_ctx *c, method_rank *rank, int r)
{
    upipe_status s;
    int j;
    upipe_mem_init(&rank->mem, rank->slab, rank->pool_bytes, rank->blocks, rank->blocks_max);
    rank->mem.events = rank->events;
    rank->mem.events_max = rank->events_max;
    rank->mem.clock = cli_clock;
    c->mem = &rank->mem;
    s = m->kind->segmented ? method_segments(m, c, rank, r) : method_block(m, c, rank, r);
    if (s != UPIPE_OK) upipe_mem_destroy(&rank->second, NULL);
    for (j = 0; j < UPIPE_PHASES; ++j) rank->measured.phase[j] = rank->mem.phase_peak[j];
    rank->events_n = rank->mem.events_n;
    if (s == UPIPE_OK && rank->mem.events_lost > 0) {
        s = UPIPE_ERR_MEMORY;
        snprintf(c->err.text, sizeof c->err.text, "the pool's trace had no entry left for %lld events",
                 (long long)rank->mem.events_lost);
    }
    if (s == UPIPE_OK) s = method_sum(m, c, rank, r);
    if (s == UPIPE_OK)
        s = upipe_mem_destroy(&rank->mem, &c->err);
    else
        upipe_mem_destroy(&rank->mem, NULL);
    return s;
}

/* The host's memory of a rank: the second pool, and in segments x and dout. */
static upipe_status method_second_slab(const method *m, method_rank *rank, upipe_ctx *c)
{
    size_t bytes = rank->second_bytes;
    void *slab = NULL;
    if (m->kind->segmented) bytes += method_x_bytes(rank) + upipe_fpdt_out_bytes(&rank->fpdt);
    if (bytes == 0) return UPIPE_OK;
    UPIPE_TRY(device_host_slab(&rank->d, &slab, bytes, &c->err));
    memset(slab, 0xff, bytes);
    rank->second_slab = (char *)slab;
    return UPIPE_OK;
}

/* Whether something overlaps: there are several stages, or segments. */
static int method_on_side_stream(const method *m, const method_rank *rank)
{
    return m->kind->segmented ? rank->fpdt.desc.overlap && rank->fpdt.segments > 1 : rank->plan.overlap;
}

/* Whether the rank's own thread computes everything, so that its processor time says what a pass takes. */
static int method_counts(const method *m)
{
    return m->o->device == DEVICE_CPU && !method_on_side_stream(m, &m->ranks[0]);
}

/* The slab and the device stay until no rank runs any more: after a failure others may still read there. */
static upipe_status method_rank_main(void *user, int r, upipe_err *why)
{
    method *m = (method *)user;
    method_rank *rank = &m->ranks[r];
    upipe_ctx c;
    upipe_status s;
    memset(&c, 0, sizeof c);
    world_use(m->net, r, &c);
    s = device_open(&rank->d, m->o->device, &c.err);
    device_avoid(&rank->d, m->o->avoid);
    device_use(&rank->d, &c);
    if (s == UPIPE_OK && method_counts(m)) parts_table(&rank->cpu, &rank->d.ops);
    if (s == UPIPE_OK) s = device_slab(&rank->d, &rank->slab, rank->pool_bytes, &c.err);
    if (s == UPIPE_OK) s = method_second_slab(m, rank, &c);
    if (s == UPIPE_OK && method_on_side_stream(m, rank))
        s = side_stream_open(&rank->line, &rank->d, !m->kind->segmented, &c);
    if (s == UPIPE_OK) s = method_rank_run(m, &c, rank, r);
    *why = c.err;
    return s;
}

/* Every process learns what each rank has measured. */
static upipe_status method_broadcast(method *m, upipe_err *e)
{
    int r, pass, part;
    for (r = 0; r < m->o->how.ranks; ++r) {
        method_rank *rank = &m->ranks[r];
        double *const cpu = rank->cpu.seconds;
        if (m->net->all != NULL) {
            UPIPE_TRY(world_broadcast(m->net, r, &rank->measured, sizeof rank->measured, e));
            UPIPE_TRY(world_broadcast(m->net, r, rank->seconds, sizeof rank->seconds, e));
            UPIPE_TRY(world_broadcast(m->net, r, cpu, sizeof rank->cpu.seconds, e));
        }
        method_most(&m->measured, &rank->measured);
        for (pass = 0; pass < 2; ++pass)
            if (rank->seconds[pass] > m->seconds[pass]) m->seconds[pass] = rank->seconds[pass];
        for (part = 0; part < PARTS; ++part) m->cpu[part] += cpu[part];
    }
    return UPIPE_OK;
}

/* After method_dry: memory, teams, the run itself. All processes together. */
static int method_run(method *m, const inputs *in)
{
    const upipe_plan_desc *d = &method_plan_of(m)->desc;
    upipe_status s;
    upipe_err err;
    char what[32];
    int bad;
    m->in = in;
    memset(&err, 0, sizeof err);
    s = method_allocate(m, &err);
    bad = s == UPIPE_OK ? 0 : method_fail(m, "", s, err.text);
    if (world_agree(m->net, bad) != 0) return -1;
    s = world_split(m->net, d->ranks, d->ring, &err);
    if (s != UPIPE_OK) return method_fail(m, "", s, err.text);
    snprintf(what, sizeof what, "%s: ", m->name);
    bad = world_run(m->net, method_rank_main, m, what);
    world_join(m->net);
    if (bad != 0) return -1; /* other processes may still access the slabs: world_end comes first */
    s = method_broadcast(m, &err);
    if (s == UPIPE_OK) s = method_release(m, &err);
    return world_agree(m->net, s == UPIPE_OK ? 0 : method_fail(m, "", s, err.text));
}

#endif

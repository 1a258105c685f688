/* passes.h -- a method's forward and backward on one rank, measured
 *
 *     method_block(m, &ctx, rank, r)        the block of upipe_layer.h
 *     method_segments(m, &ctx, rank, r)     that of upipe_fpdt.h, where the kind is segmented
 *
 * Inputs come from, and results go to, the natural order of m->in, m->out and m->dx; the results are rank 0's.
 */
#ifndef COMPARE_PASSES_H
#define COMPARE_PASSES_H

#include "upipe/net/upipe_net_threads.h"
#include "upipe/upipe.h"

#include "../common/side_stream.h"
#include "../common/world.h"
#include "../train/model/rope.h"
#include "inputs.h"
#include "parts.h"

enum {
    METHOD_GRADS = 4, /* of wq wk wv and the sinks */
    METHOD_SECOND_BLOCKS = UPIPE_DRY_HOST_BLOCKS_MAX + 1
};

/* Bytes that a rank sends to its team and to its ring, and moves between device and host. */
enum { SENT_TEAM, SENT_RING, SENT_HOST, SENT_WAYS };

typedef enum result {
    RESULT_OUT,
    RESULT_DX,
    RESULT_DWQ, /* from here on in the order of method_rank.grads */
    RESULT_DWK,
    RESULT_DWV,
    RESULT_DSINKS,
    RESULTS
} result;

static const char *const result_names[RESULTS] = {"out", "dx", "dwq", "dwk", "dwv", "dsinks"};

/* What has an error of its own: one result, or the gradients of weights together, of which one may be near zero. */
typedef enum measure { MEASURE_OUT, MEASURE_DX, MEASURE_DW, MEASURE_DSINKS, MEASURES } measure;

static const char *const measure_names[MEASURES] = {"out", "dx", "dw", "dsinks"};

static measure result_measure(result which)
{
    return which < RESULT_DWQ ? (measure)which : which < RESULT_DSINKS ? MEASURE_DW : MEASURE_DSINKS;
}

/* What is planned and measured alike; of a method, the largest of a rank
 *   intermediate  Q, K, V and their buffers in the forward
 *   host          of the second pool, in the host's memory; the block's own x and the gradient of O, which
 *                 segments have there too, are not counted
 */
typedef struct method_bytes {
    size_t phase[UPIPE_PHASES], intermediate, host;
    int64_t sent[SENT_WAYS][2]; /* forward, backward */
} method_bytes;

/* What one rank plans and measures, and its memory, which a process has of its own rank alone. */
typedef struct method_rank {
    upipe_plan plan;
    llama_rates rates;
    upipe_layer layer;
    upipe_fpdt fpdt; /* of a segmented kind */
    int64_t rows;
    method_bytes planned, measured;
    size_t slab_bytes, pool_bytes, second_bytes;
    int blocks_max; /* live blocks at most */
    int64_t events_max;
    upipe_mem mem, second;
    upipe_mem_block *blocks, second_blocks[METHOD_SECOND_BLOCKS];
    upipe_mem_event *events;
    int64_t events_n; /* of the block; the sum of the weights' gradients comes after */
    device d;
    side_stream line; /* where something overlaps */
    void *slab;
    char *second_slab;          /* the second pool's, then x and dout of a segmented kind; NULL: none */
    float *grads[METHOD_GRADS]; /* the sums over ranks */
    void *sums[METHOD_GRADS];   /* where they are formed: on the device */
    float *host;                /* [most rows of a rank][max(D, H*v_dim)]; reached by the device too */
    double seconds[2];          /* forward, backward */
    part_times cpu;
} method_rank;

typedef struct method {
    const method_kind *kind;
    const char *name;
    const options *o;
    const inputs *in;
    const upipe_ops *ops;
    struct world *net;
    method_rank *ranks;
    void *weights[3]; /* on the device */
    void *sinks;
    /* [R][H*v_dim], [R][D], natural order, where rank 0 is; gradients of the weights are its too */
    float *out, *dx;
    /* the largest over ranks */
    method_bytes planned, measured;
    size_t slab_bytes;
    double seconds[2];
    double cpu[PARTS]; /* of all ranks together */
    /* relative L2 distances from the reference, NaN where nothing was checked, and from the first method */
    double err[MEASURES], apart[MEASURES];
    int same[RESULTS]; /* has the first method's bits; so has what is not there */
} method;

static int method_fail(const method *m, const char *part, upipe_status s, const char *text)
{
    return cli_fail("%s: %s%s: %s", m->name, part, upipe_status_name(s), text);
}

/* Elements of the gradient of wq, wk, wv or the sinks; 0 for sinks that are not there. */
static int64_t method_grad_size(const method *m, int which)
{
    if (which < 3) return m->in->width[which] * m->in->dim;
    return m->o->sinks ? m->o->heads : 0;
}

/* The elements of a result, and how many there are. */
static const float *method_result(const method *m, result which, int64_t *n)
{
    *n = which == RESULT_OUT  ? m->in->rows * m->in->out_width
         : which == RESULT_DX ? m->in->rows * m->in->dim
                              : method_grad_size(m, (int)which - RESULT_DWQ);
    return which == RESULT_OUT  ? m->out
           : which == RESULT_DX ? m->dx
                                : m->ranks[0].grads[(int)which - RESULT_DWQ];
}

/* Whether all gradients of weights have the bits of the first method's. */
static int method_same_dw(const method *m)
{
    return m->same[RESULT_DWQ] && m->same[RESULT_DWK] && m->same[RESULT_DWV] && m->same[RESULT_DSINKS];
}

static const upipe_plan *method_plan_of(const method *m)
{
    return &m->ranks[0].plan;
}

/* ---- what all passes share ---- */

/* A rank's tokens, [batch][T][width] of each segment, from or into the natural order [batch][S][width]. */
static void method_rows(const method_rank *rank, float *natural, float *mine, int64_t width, int out)
{
    const upipe_plan_desc *d = &rank->plan.desc;
    int64_t b, t;
    int i = 0;
    do {
        upipe_shard s = rank->fpdt.segments > 0 ? upipe_fpdt_shard(&rank->fpdt, i) : rank->plan.shard;
        for (b = 0; b < d->batch; ++b)
            for (t = 0; t < s.n; ++t, mine += width) {
                float *at = natural + (b * d->tokens + upipe_shard_pos(&s, t)) * width;
                memcpy(out ? at : mine, out ? mine : at, (size_t)width * sizeof *at);
            }
    } while (++i < rank->fpdt.segments);
}

/* This rank's rows of a result, in rank->host, into their places at rank 0. Processes send them, one after the
 * other. */
static upipe_status method_deliver(method *m, upipe_ctx *c, method_rank *rank, int r, float *natural,
                                   int64_t width)
{
    upipe_comm *all = world_all(m->net, r);
    int from, n;
    if (natural != NULL) method_rows(rank, natural, rank->host, width, 1);
    if (m->net->all == NULL) return UPIPE_OK;
    for (from = 1; from < all->ranks; ++from) {
        const size_t bytes = (size_t)(m->ranks[from].rows * width) * sizeof *natural;
        n = 0;
        if (r == 0) upipe_msg_add(all->list, &n, from, 1, NULL, 0, 0, rank->host, bytes, bytes);
        if (r == from) upipe_msg_add(all->list, &n, 0, 1, rank->host, bytes, bytes, NULL, 0, 0);
        UPIPE_TRY(upipe_comm_start(c, all, all->list, n));
        UPIPE_TRY(upipe_comm_wait(c, all));
        UPIPE_TRY(c->ops->sync(c));
        if (r == 0) method_rows(&m->ranks[from], natural, rank->host, width, 1);
    }
    return UPIPE_OK;
}

static upipe_grads method_grads(const method_rank *rank)
{
    upipe_grads g;
    memset(&g, 0, sizeof g);
    g.wq = (float *)rank->sums[0];
    g.wk = (float *)rank->sums[1];
    g.wv = (float *)rank->sums[2];
    g.sinks = (float *)rank->sums[3];
    return g;
}

/* A pass begins on all ranks at once. */
static upipe_status method_pass_begin(method *m, upipe_ctx *c, method_rank *rank, int r, int pass)
{
    UPIPE_TRY(upipe_comm_barrier(c, world_all(m->net, r)));
    rank->seconds[pass] = -cli_clock(NULL);
    rank->measured.sent[SENT_TEAM][pass] = -c->team->sent_bytes;
    rank->measured.sent[SENT_RING][pass] = c->ring != NULL ? -c->ring->sent_bytes : 0;
    parts_begin(&rank->cpu);
    return UPIPE_OK;
}

static upipe_status method_pass_end(upipe_ctx *c, method_rank *rank, int pass)
{
    UPIPE_TRY(c->ops->sync(c));
    parts_end(&rank->cpu);
    rank->seconds[pass] += cli_clock(NULL);
    rank->measured.sent[SENT_TEAM][pass] += c->team->sent_bytes;
    rank->measured.sent[SENT_RING][pass] += c->ring != NULL ? c->ring->sent_bytes : 0;
    return UPIPE_OK;
}

/* Live bytes of Q, K and V so far, at most. */
static size_t method_intermediate(const upipe_ctx *c)
{
    return upipe_mem_largest(c->mem, UPIPE_USE_QKV);
}

/* Bytes of x behind the second pool, and of dout behind x. */
static size_t method_x_bytes(const method_rank *rank)
{
    const upipe_plan_desc *d = &rank->plan.desc;
    return upipe_mem_span((size_t)(rank->rows * d->model_dim) * upipe_dtype_bytes(d->dtype));
}

/* ---- inputs of the model's other layers, which its backward will need ---- */

static int method_offloads(const method *m)
{
    return m->o->offload && !m->kind->segmented;
}

/* The input of a layer among others. */
static int64_t method_layer_bytes(const method_rank *rank)
{
    const int64_t align = UPIPE_MEM_ALIGN;
    return ((int64_t)upipe_plan_unit_bytes(&rank->plan) + align - 1) / align * align;
}

/* Bytes of the inputs that wait on the device, and in the host's memory: there the block's own too, which
 * goes in its forward and comes in its backward. */
static size_t method_kept_device(const method *m, const method_rank *rank)
{
    if (m->kind->segmented || m->o->offload) return 0;
    return (size_t)((m->o->layers - 1) * method_layer_bytes(rank));
}

static size_t method_kept_host(const method *m, const method_rank *rank)
{
    if (m->kind->segmented) return (size_t)(m->o->layers - 1) * method_x_bytes(rank);
    return m->o->offload ? (size_t)(m->o->layers * method_layer_bytes(rank)) : 0;
}

/* What such a block occupies of its pool. */
static size_t method_kept_span(size_t bytes)
{
    return bytes > 0 ? upipe_mem_span(bytes) : 0;
}

/* A block of a pool, if it is one. */
static upipe_status method_keep(upipe_mem *pool, void **data, size_t bytes, upipe_err *e)
{
    *data = NULL;
    return bytes > 0 ? upipe_mem_alloc(pool, data, bytes, UPIPE_USE_OTHER, "layers_x", e) : UPIPE_OK;
}

static upipe_status method_keep_end(upipe_mem *pool, void *data, upipe_err *e)
{
    return data != NULL ? upipe_mem_free(pool, data, e) : UPIPE_OK;
}

static void method_second_init(method_rank *rank)
{
    upipe_mem_init(&rank->second, rank->second_slab, rank->second_bytes, rank->second_blocks,
                   METHOD_SECOND_BLOCKS);
}

/* x is offloaded to the host's memory in the forward, and fetched in the backward. */
static upipe_status method_offload(method *m, upipe_ctx *c, method_rank *rank, void *x, void *kept_there,
                                   int pass)
{
    const size_t bytes = upipe_plan_unit_bytes(&rank->plan);
    if (!method_offloads(m)) return UPIPE_OK;
    rank->measured.sent[SENT_HOST][pass] = (int64_t)bytes;
    return pass == 0 ? c->ops->copy(c, kept_there, x, bytes) : c->ops->copy(c, x, kept_there, bytes);
}

/* ---- the passes ---- */

static upipe_status method_block(method *m, upipe_ctx *c, method_rank *rank, int r)
{
    const upipe_plan *p = &rank->plan;
    const upipe_layer *l = &rank->layer;
    const inputs *in = m->in;
    upipe_view tokens = upipe_view_packed(rank->host, UPIPE_F32, p->rows, 1, (int32_t)in->dim);
    upipe_view heads = upipe_view_packed(rank->host, UPIPE_F32, p->rows, 1, (int32_t)in->out_width);
    upipe_grads grads = method_grads(rank);
    upipe_saved saved;
    upipe_slots dout;
    upipe_view x;
    void *data, *kept, *kept_there;
    method_second_init(rank);
    UPIPE_TRY(method_keep(c->mem, &kept, method_kept_device(m, rank), &c->err));
    UPIPE_TRY(method_keep(&rank->second, &kept_there, method_kept_host(m, rank), &c->err));
    UPIPE_TRY(upipe_mem_alloc(c->mem, &data, upipe_plan_unit_bytes(p), UPIPE_USE_OTHER, "x", &c->err));
    x = upipe_view_packed(data, p->desc.dtype, p->rows, 1, (int32_t)in->dim);
    method_rows(rank, in->x, rank->host, in->dim, 0);
    UPIPE_TRY(c->ops->cast(c, x, tokens));
    UPIPE_TRY(c->ops->sync(c));

    UPIPE_TRY(method_pass_begin(m, c, rank, r, 0));
    UPIPE_TRY(method_offload(m, c, rank, data, kept_there, 0));
    UPIPE_TRY(upipe_layer_fwd(c, l, &saved, x));
    UPIPE_TRY(method_pass_end(c, rank, 0));
    rank->measured.intermediate = method_intermediate(c);
    UPIPE_TRY(upipe_slots_gather(c, l->plan, heads, &saved.out));
    UPIPE_TRY(c->ops->sync(c));
    UPIPE_TRY(method_deliver(m, c, rank, r, m->out, in->out_width));

    UPIPE_TRY(upipe_slots_alloc(c, l->plan, &dout, UPIPE_SLOT_FULL, "dout"));
    method_rows(rank, in->dout, rank->host, in->out_width, 0);
    UPIPE_TRY(upipe_slots_scatter(c, l->plan, &dout, heads));
    UPIPE_TRY(c->ops->sync(c));

    UPIPE_TRY(method_pass_begin(m, c, rank, r, 1));
    UPIPE_TRY(method_offload(m, c, rank, data, kept_there, 1));
    UPIPE_TRY(upipe_layer_bwd(c, l, x, &grads, &saved, &dout, x));
    UPIPE_TRY(method_pass_end(c, rank, 1));
    UPIPE_TRY(c->ops->cast(c, tokens, x));
    UPIPE_TRY(c->ops->sync(c));
    UPIPE_TRY(method_deliver(m, c, rank, r, m->dx, in->dim));
    UPIPE_TRY(upipe_mem_free(c->mem, dout.data, &c->err));
    UPIPE_TRY(upipe_mem_free(c->mem, x.data, &c->err));
    UPIPE_TRY(method_keep_end(c->mem, kept, &c->err));
    rank->measured.host = rank->second.peak;
    UPIPE_TRY(method_keep_end(&rank->second, kept_there, &c->err));
    return upipe_mem_destroy(&rank->second, &c->err);
}

static upipe_status method_segments(method *m, upipe_ctx *c, method_rank *rank, int r)
{
    const upipe_fpdt *f = &rank->fpdt;
    const inputs *in = m->in;
    char *const data = rank->second_slab + rank->second_bytes, *const dout = data + method_x_bytes(rank);
    upipe_view x = upipe_view_packed(data, rank->plan.desc.dtype, rank->rows, 1, (int32_t)in->dim);
    upipe_view tokens = upipe_view_packed(rank->host, UPIPE_F32, rank->rows, 1, (int32_t)in->dim);
    upipe_grads grads = method_grads(rank);
    upipe_fpdt_saved saved;
    void *kept;
    method_second_init(rank);
    UPIPE_TRY(method_keep(&rank->second, &kept, method_kept_host(m, rank), &c->err));
    method_rows(rank, in->x, rank->host, in->dim, 0);
    UPIPE_TRY(c->ops->cast(c, x, tokens));
    UPIPE_TRY(c->ops->sync(c));

    UPIPE_TRY(method_pass_begin(m, c, rank, r, 0));
    UPIPE_TRY(upipe_fpdt_fwd(c, f, &saved, data));
    UPIPE_TRY(method_pass_end(c, rank, 0));
    rank->measured.sent[SENT_HOST][0] = saved.moved;
    rank->measured.intermediate = method_intermediate(c);
    UPIPE_TRY(upipe_fpdt_gather(c, f, rank->host, UPIPE_F32, saved.out));
    UPIPE_TRY(c->ops->sync(c));
    UPIPE_TRY(method_deliver(m, c, rank, r, m->out, in->out_width));

    method_rows(rank, in->dout, rank->host, in->out_width, 0);
    UPIPE_TRY(upipe_fpdt_scatter(c, f, dout, rank->host, UPIPE_F32));
    UPIPE_TRY(c->ops->sync(c));

    UPIPE_TRY(method_pass_begin(m, c, rank, r, 1));
    UPIPE_TRY(upipe_fpdt_bwd(c, f, data, &grads, &saved, dout, data));
    UPIPE_TRY(method_pass_end(c, rank, 1));
    rank->measured.sent[SENT_HOST][1] = saved.moved - rank->measured.sent[SENT_HOST][0];
    UPIPE_TRY(c->ops->cast(c, tokens, x));
    UPIPE_TRY(c->ops->sync(c));
    UPIPE_TRY(method_deliver(m, c, rank, r, m->dx, in->dim));
    rank->measured.host = rank->second.peak;
    UPIPE_TRY(upipe_fpdt_free(f, &saved, &c->err));
    UPIPE_TRY(method_keep_end(&rank->second, kept, &c->err));
    return upipe_mem_destroy(&rank->second, &c->err);
}

#endif

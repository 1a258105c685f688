/* upipe_dry.h -- what will a run need? The real code over a pool and a team that only count
 *
 *     upipe_dry *dry = malloc(sizeof *dry);              about 970 KB: too much for some stacks
 *     if (upipe_dry_init(dry, &plan, &ops)) ...             then any code may run with &dry->ctx
 *     upipe_dry_block(dry, &layer, 1);                   one block, forward and backward
 *     dry->mem.need, dry->mem.blocks_peak                slab bytes, with alignment and holes; live blocks
 *     upipe_bytes bytes = upipe_dry_bytes(dry);          live bytes, by phase: a real run holds the same, to the byte
 *     dry->team.sent_bytes, dry->ring.sent_bytes
 *
 * This is how the library knows its bytes. Sizes are those of the given compute table: its *_bytes entries are asked as
 * in the real run. Of tiles with the same number of rows, and of the sequences of a batch, the code goes through one,
 * which counts for all (upipe_mem_tiles_next). So its time grows with heads, stages and ranks, and not with tokens or the
 * batch.
 */
#ifndef UPIPE_DRY_H
#define UPIPE_DRY_H

#include "upipe_fpdt.h"
#include "upipe_latent_layer.h"
#include "upipe_reduce.h"

enum { UPIPE_DRY_BLOCKS_MAX = 1024, UPIPE_DRY_HOST_BLOCKS_MAX = 16, UPIPE_DRY_SEEN = 61 };

/* Live bytes of one rank, x included: the largest of each phase, of all, and of Q, K, V chunks and all-to-all buffers
 * in the forward (the paper's "intermediate tensors"). */
typedef struct upipe_bytes {
    size_t phase[UPIPE_PHASES];
    size_t peak;
    size_t intermediate_fwd;
} upipe_bytes;

/* What the calls of compute would have done: FLOPs, a multiplication and an addition each, of products, and of
 * attention over the keys that its mask shows (forward 4, backward 10 a query, key and element of head_dim). */
typedef struct upipe_dry_work {
    double products, attn_fwd, attn_bwd;
    double merged; /* bytes: f32 results that a call reads and writes again */
    int64_t attn_calls;
} upipe_dry_work;

/* Pairs of rows under a mask: q_pos, rows of q, k_pos, rows of k, step. */
typedef struct upi_dry_seen {
    int64_t rows[5];
    upipe_mask mask;
    double pairs;
} upi_dry_seen;

typedef struct upipe_dry {
    upipe_ctx ctx;
    upipe_mem mem, host; /* the device's memory, and the host's behind it */
    upipe_comm team, ring;
    upipe_side_stream side_stream;
    upipe_ops ops;
    upipe_mem_block blocks[UPIPE_DRY_BLOCKS_MAX], host_blocks[UPIPE_DRY_HOST_BLOCKS_MAX];
    upipe_msg list[2 * UPIPE_RANKS_MAX], ring_list[2 * UPIPE_RANKS_MAX];
    int64_t gathered[(int)UPIPE_RANKS_MAX * (int)UPIPE_ALL_GATHER_MAX],
        ring_gathered[(int)UPIPE_RANKS_MAX * (int)UPIPE_ALL_GATHER_MAX];
    size_t intermediate_fwd; /* as in upipe_bytes */
    upipe_dry_work work;
    upi_dry_seen seen[UPIPE_DRY_SEEN];
} upipe_dry;

UPIPE_API upipe_status upi_dry_sync(upipe_ctx *c)
{
    (void)c;
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_dry_copy(upipe_ctx *c, void *dst, const void *src, size_t bytes)
{
    (void)c, (void)dst, (void)src, (void)bytes;
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_dry_zero(upipe_ctx *c, void *dst, size_t bytes)
{
    (void)c, (void)dst, (void)bytes;
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_dry_cast(upipe_ctx *c, upipe_view dst, upipe_view src)
{
    (void)c, (void)dst, (void)src;
    return UPIPE_OK;
}

/* Whose context it is: its table lies in the upipe_dry. */
UPIPE_API upipe_dry *upi_dry_of(const upipe_ctx *c)
{
    return (upipe_dry *)((uintptr_t)c->ops - offsetof(upipe_dry, ops));
}

/* Pairs that the call's mask shows, of all heads, as often as the call counts. Heads and layers ask for the same again. */
UPIPE_API double upi_dry_pairs(const upipe_ctx *c, const upipe_attn *a)
{
    upi_dry_seen call = {{a->q_pos, a->q.n, a->k_pos, a->k.n, a->pos_step}, a->mask, 0}, *seen;
    call.mask.sinks = NULL; /* those of other heads show the same */
    seen = &upi_dry_of(c)->seen[(uint64_t)(a->q_pos + 3 * a->k_pos + a->mask.window) % UPIPE_DRY_SEEN];
    if (memcmp(seen, &call, offsetof(upi_dry_seen, mask) + offsetof(upipe_mask, padded)) != 0) {
        *seen = call;
        seen->pairs = upipe_attn_pairs(a);
    }
    return (double)c->mem->times * a->q.h * seen->pairs;
}

UPIPE_API upipe_status upi_dry_gemm(upipe_ctx *c, upipe_view out, upipe_view a, upipe_view b, int flags,
                                    void *work, size_t work_bytes)
{
    size_t need = c->ops->gemm_bytes(c->ops, out, a, b, flags);
    const int32_t count = a.h > b.h ? a.h : b.h;
    upi_dry_of(c)->work.products += 2.0 * (double)c->mem->times * (double)out.n * (double)out.d *
                                    (double)(count > out.h ? count : out.h) *
                                    (double)(flags & UPIPE_GEMM_TRANS_A ? a.n : a.d);
    (void)work;
    if (work_bytes < need)
        return upipe_fail(
            &c->err, UPIPE_ERR_ARG,
            "a product [%d][%lld][%d] of [%lld][%d] and [%lld][%d], flags %d, needs %zu bytes of scratch, not "
            "%zu",
            out.h, (long long)out.n, out.d, (long long)a.n, a.d, (long long)b.n, b.d, flags, need,
            work_bytes);
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_dry_attn_fwd(upipe_ctx *c, const upipe_attn *a)
{
    upipe_dry_work *w = &upi_dry_of(c)->work;
    if (a->merge) w->merged += 8.0 * (double)c->mem->times * (double)a->q.n * a->q.h * a->v.d;
    w->attn_fwd += 2.0 * upi_dry_pairs(c, a) * ((double)a->q.d + a->v.d);
    w->attn_calls += c->mem->times;
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_dry_attn_bwd(upipe_ctx *c, const upipe_attn_grad *g)
{
    upipe_dry_work *w = &upi_dry_of(c)->work;
    if (g->a.merge) w->merged += 8.0 * (double)c->mem->times * (double)g->a.q.n * g->a.q.h * g->a.q.d;
    w->attn_bwd += upi_dry_pairs(c, &g->a) * (6.0 * g->a.q.d + 4.0 * g->a.v.d);
    w->attn_calls += c->mem->times;
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_dry_rope(upipe_ctx *c, const upipe_rope *r)
{
    (void)c, (void)r;
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_dry_rmsnorm(upipe_ctx *c, upipe_view y, upipe_view x, const float *weight,
                                       float eps)
{
    (void)weight, (void)eps;
    return upi_dry_cast(c, y, x);
}

UPIPE_API upipe_status upi_dry_rmsnorm_bwd(upipe_ctx *c, upipe_view dx, upipe_view dy, upipe_view x,
                                           const float *weight, float eps, float *dweight, int accumulate)
{
    (void)dy, (void)dweight, (void)accumulate;
    return upi_dry_rmsnorm(c, dx, x, weight, eps);
}

UPIPE_API upipe_status upi_dry_bias_bwd(upipe_ctx *c, float *db, upipe_view dy)
{
    (void)c, (void)db, (void)dy;
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_dry_scale(upipe_ctx *c, upipe_view y, upipe_view x, float factor)
{
    (void)factor;
    return upi_dry_cast(c, y, x);
}

UPIPE_API upipe_status upi_dry_rowdot(upipe_ctx *c, upipe_view out, upipe_view a, upipe_view b)
{
    (void)out;
    return upi_dry_cast(c, a, b);
}

UPIPE_API upipe_status upi_dry_sum(upipe_ctx *c, upipe_view dst, const float *src, int64_t step, int count,
                                   int accumulate)
{
    (void)c, (void)dst, (void)src, (void)step, (void)count, (void)accumulate;
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_dry_gate(upipe_ctx *c, upipe_gate_kind kind, upipe_view y, upipe_view gate,
                                    upipe_view up)
{
    (void)kind, (void)y;
    return upi_dry_cast(c, gate, up);
}

UPIPE_API upipe_status upi_dry_cross_entropy(upipe_ctx *c, const upipe_cross_entropy *x)
{
    (void)c, (void)x;
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_dry_embed(upipe_ctx *c, upipe_view x, upipe_view table, const int32_t *tokens)
{
    (void)tokens;
    return upi_dry_cast(c, x, table);
}

UPIPE_API upipe_status upi_dry_total(upipe_ctx *c, double *out, upipe_view x, int squares)
{
    (void)out, (void)squares;
    return upi_dry_cast(c, x, x);
}

UPIPE_API upipe_status upi_dry_adamw(upipe_ctx *c, const upipe_adamw *a)
{
    (void)c, (void)a;
    return UPIPE_OK;
}

/* The pool's guard: asked before each allocation. It never refuses; it counts Q, K, V and their buffers in a forward. */
UPIPE_API upipe_status upi_dry_guard(void *user, size_t bytes, int use, const char *tag)
{
    upipe_dry *dry = (upipe_dry *)user;
    const upipe_mem *m = &dry->mem;
    int i;
    (void)tag;
    if (use != UPIPE_USE_QKV || m->phase >= (int)UPIPE_BWD_BEFORE) return UPIPE_OK;
    for (i = 0; i < m->blocks_n; ++i)
        if (m->blocks[i].use == UPIPE_USE_QKV) bytes += m->blocks[i].bytes;
    dry->intermediate_fwd = upipe_max_bytes(dry->intermediate_fwd, bytes);
    return UPIPE_OK;
}

/* upipe_dry_init -- the plan's rank of its team and ring, with the sizes of the given table, which may have no others. Borders
 *                   that code reads under dry->ctx stay as they are until the next upipe_dry_init: their pairs are counted once
 *   plan    NULL: a rank alone
 *   errors  ARG for a NULL table
 */
UPIPE_API upipe_status upipe_dry_init(upipe_dry *dry, const upipe_plan *plan, const upipe_ops *ops)
{
    upipe_plan_desc d;
    memset(dry, 0, sizeof *dry);
    memset(&d, 0, sizeof d);
    d.ranks = d.ring = 1;
    if (plan != NULL) d = plan->desc;
    if (ops == NULL) return upipe_fail(&dry->ctx.err, UPIPE_ERR_ARG, "the compute table is NULL");
    upipe_mem_init_dry(&dry->mem, dry->blocks, UPIPE_DRY_BLOCKS_MAX);
    dry->mem.guard = upi_dry_guard;
    dry->mem.user = dry;
    upipe_mem_init_dry(&dry->host, dry->host_blocks, UPIPE_DRY_HOST_BLOCKS_MAX);
    dry->host.slab = (char *)(UINTPTR_MAX / 2 + 1); /* no address is of both pools: they are compared */
    upipe_comm_dry(&dry->team, d.rank, d.ranks, dry->list, dry->gathered);
    upipe_comm_dry(&dry->ring, d.ring_rank, d.ring, dry->ring_list, dry->ring_gathered);
    dry->ops = *ops;
    dry->ops.sync = upi_dry_sync;
    dry->ops.copy = upi_dry_copy;
    dry->ops.zero = upi_dry_zero;
    dry->ops.cast = upi_dry_cast;
    dry->ops.gemm = upi_dry_gemm;
    dry->ops.attn_fwd = upi_dry_attn_fwd;
    dry->ops.attn_bwd = upi_dry_attn_bwd;
    dry->ops.rope = upi_dry_rope;
    dry->ops.rmsnorm = upi_dry_rmsnorm;
    dry->ops.rmsnorm_bwd = upi_dry_rmsnorm_bwd;
    dry->ops.bias_bwd = upi_dry_bias_bwd;
    dry->ops.rowdot = upi_dry_rowdot;
    dry->ops.sum = upi_dry_sum;
    dry->ops.add = upi_dry_cast;
    dry->ops.scale = upi_dry_scale;
    dry->ops.gate = upi_dry_gate;
    dry->ops.gate_bwd = upi_dry_gate;
    dry->ops.cross_entropy = upi_dry_cross_entropy;
    dry->ops.embed = upi_dry_embed;
    dry->ops.embed_bwd = upi_dry_embed;
    dry->ops.total = upi_dry_total;
    dry->ops.adamw = upi_dry_adamw;
    dry->ctx.ops = &dry->ops;
    dry->ctx.mem = &dry->mem;
    dry->ctx.team = &dry->team;
    dry->ctx.ring = d.ring > 1 ? &dry->ring : NULL;
    upipe_side_stream_inline(&dry->side_stream, NULL);
    dry->ctx.side_stream = &dry->side_stream;
    return UPIPE_OK;
}

/* upipe_dry_bytes -- live bytes of all that has run so far: the peak of each phase, and of all */
UPIPE_API upipe_bytes upipe_dry_bytes(const upipe_dry *dry)
{
    upipe_bytes b;
    memcpy(b.phase, dry->mem.phase_peak, sizeof b.phase);
    b.peak = dry->mem.peak;
    b.intermediate_fwd = dry->intermediate_fwd;
    return b;
}

/* Gradients of all that the layer has: asked for, never touched. */
UPIPE_API upipe_grads upi_dry_grads(const upipe_dry *dry, const upipe_layer *l)
{
    float *const weight = (float *)dry->mem.slab;
    upipe_grads g;
    g.wq = g.wk = g.wv = g.wo = weight;
    g.wg = l->wg != NULL ? weight : NULL;
    g.bq = l->bq != NULL ? weight : NULL;
    g.bk = l->bk != NULL ? weight : NULL;
    g.bv = l->bv != NULL ? weight : NULL;
    g.bo = l->bo != NULL ? weight : NULL;
    g.q_norm_weight = g.k_norm_weight = l->q_norm_weight != NULL ? weight : NULL;
    g.sinks = l->mask.sinks != NULL ? weight : NULL;
    return g;
}

/* What the host does around a block, dry: x, and whatever lies between forward and backward. */
UPIPE_API upipe_status upi_dry_pass(upipe_dry *dry, const upipe_layer *l, int projected, int dx_in_place)
{
    upipe_ctx *c = &dry->ctx;
    const size_t unit = l != NULL && l->plan != NULL ? upipe_plan_unit_bytes(l->plan) : 0;
    const int32_t dim = unit > 0 ? (int32_t)l->plan->desc.model_dim : 0;
    upipe_saved save;
    upipe_slots dout;
    upipe_grads grads;
    void *data, *between;
    upipe_view x, y, dx;
    if (c->ops == NULL) return upipe_fail(&c->err, UPIPE_ERR_ARG, "upipe_dry_init failed, or was not called");
    if (unit == 0) return upipe_fail(&c->err, UPIPE_ERR_ARG, "the layer or its plan is NULL, or empty");
    grads = upi_dry_grads(dry, l);
    if (!projected) grads.bo = NULL;
    UPIPE_TRY(upipe_mem_alloc(c->mem, &data, unit, UPIPE_USE_OTHER, "x", &c->err));
    x = dx = upipe_view_packed(data, l->plan->desc.dtype, l->plan->rows, 1, dim);
    UPIPE_TRY(upipe_layer_fwd(c, l, &save, x));
    if (projected) {
        UPIPE_TRY(upipe_mem_alloc(c->mem, &between, unit, UPIPE_USE_OTHER, "y", &c->err));
        y = upipe_view_packed(between, l->plan->desc.dtype, l->plan->rows, 1, dim);
        UPIPE_TRY(upipe_layer_out_fwd(c, l, y, &save));
        UPIPE_TRY(upipe_layer_out_bwd(c, l, &grads, &save, y));
        UPIPE_TRY(upipe_mem_free(c->mem, between, &c->err));
    } else {
        UPIPE_TRY(upipe_slots_alloc(c, l->plan, &dout, UPIPE_SLOT_FULL, "dout"));
    }
    if (!dx_in_place) UPIPE_TRY(upipe_mem_alloc(c->mem, &dx.data, unit, UPIPE_USE_OTHER, "dx", &c->err));
    UPIPE_TRY(upipe_layer_bwd(c, l, dx, &grads, &save, projected ? &save.out : &dout, x));
    if (!dx_in_place) UPIPE_TRY(upipe_mem_free(c->mem, dx.data, &c->err));
    if (projected) {
        UPIPE_TRY(upipe_saved_free(c, &save));
        UPIPE_TRY(upipe_all_reduce(c, c->team, (float *)grads.wq,
                                   (int64_t)l->plan->desc.heads * l->plan->desc.head_dim * dim));
    } else {
        UPIPE_TRY(upipe_mem_free(c->mem, dout.data, &c->err));
    }
    return upipe_mem_free(c->mem, data, &c->err);
}

/* upipe_dry_layer -- x, one forward, a gradient of O, one backward: the setting of the paper's tables. Pool,
 *                    bytes sent and phase peaks are in dry afterwards.
 *   dx_in_place  nonzero: dX takes x's place; otherwise a tensor of its own, taken before the backward
 *   errors       those of upipe_layer_fwd and upipe_layer_bwd but for transport and memory
 */
UPIPE_API upipe_status upipe_dry_layer(upipe_dry *dry, const upipe_layer *l, int dx_in_place)
{
    return upi_dry_pass(dry, l, 0, dx_in_place);
}

/* upipe_dry_block -- a training step: x, forward, output projection into y, its gradient in y's place, both
 *                    backwards, the gradient of wq summed over ranks. y goes back to the pool before
 *                    upipe_layer_bwd. A host that keeps more counts its own sequence of calls under dry->ctx.
 *   dx_in_place, errors  as upipe_dry_layer; ARG without wo
 */
UPIPE_API upipe_status upipe_dry_block(upipe_dry *dry, const upipe_layer *l, int dx_in_place)
{
    return upi_dry_pass(dry, l, 1, dx_in_place);
}

/* upipe_dry_qkv -- attention of the host's own Q, K and V, forward and backward: the pool's peaks and bytes sent are in
 *                  dry afterwards
 *   a       plan, mask and scale; its views are not read. q, k, v, o and gradients, which are the host's, are not
 *           counted
 *   errors  those of upipe_qkv_fwd and upipe_qkv_bwd but for transport and memory
 */
UPIPE_API upipe_status upipe_dry_qkv(upipe_dry *dry, const upipe_qkv *a)
{
    upipe_ctx *c = &dry->ctx;
    void *const none = dry->mem.slab; /* never touched */
    const upipe_plan_desc *d = a != NULL && a->plan != NULL ? &a->plan->desc : NULL;
    upipe_qkv own;
    upipe_qkv_grads g;
    upipe_saved save;
    if (c->ops == NULL) return upipe_fail(&c->err, UPIPE_ERR_ARG, "upipe_dry_init failed, or was not called");
    if (d == NULL) return upipe_fail(&c->err, UPIPE_ERR_ARG, "the call or its plan is NULL");
    own = *a;
    own.q = g.dq = upipe_view_packed(none, d->dtype, a->plan->rows, d->heads, d->head_dim);
    own.k = g.dk = upipe_view_packed(none, d->dtype, a->plan->rows, d->kv_heads, d->head_dim);
    own.v = g.dv = upipe_view_packed(none, d->dtype, a->plan->rows, d->kv_heads, d->v_dim);
    own.o = g.dout = upipe_view_packed(none, d->dtype, a->plan->rows, d->heads, d->v_dim);
    g.dsinks = a->mask.sinks != NULL ? (float *)none : NULL;
    UPIPE_TRY(upipe_qkv_fwd(c, &own, &save));
    return upipe_qkv_bwd(c, &own, &g, &save);
}

/* upipe_dry_latent -- the same where K and V come from a latent
 *   a       plan, mask, scale and form; of its views the widths of c and kr are read. The host's tensors are not counted
 *   errors  those of upipe_latent_fwd and upipe_latent_bwd but for transport and memory
 */
UPIPE_API upipe_status upipe_dry_latent(upipe_dry *dry, const upipe_latent *a)
{
    upipe_ctx *c = &dry->ctx;
    void *const none = dry->mem.slab; /* never touched */
    const upipe_plan_desc *d = a != NULL && a->plan != NULL ? &a->plan->desc : NULL;
    upipe_latent own;
    upipe_latent_grads g;
    upipe_saved save;
    if (c->ops == NULL) return upipe_fail(&c->err, UPIPE_ERR_ARG, "upipe_dry_init failed, or was not called");
    if (d == NULL) return upipe_fail(&c->err, UPIPE_ERR_ARG, "the call or its plan is NULL");
    own = *a;
    own.wkv = none;
    own.q = g.dq = upipe_view_packed(none, d->dtype, a->plan->rows, d->heads, d->head_dim);
    own.o = g.dout = upipe_view_packed(none, d->dtype, a->plan->rows, d->heads, d->v_dim);
    own.kv.c = upipe_view_packed(none, d->dtype, a->plan->rows, 1, a->kv.c.d);
    own.kv.kr = upipe_view_packed(none, d->dtype, a->plan->rows, 1, a->kv.kr.d);
    g.dkv = own.kv;
    g.dwkv = (float *)none;
    g.dsinks = a->mask.sinks != NULL ? (float *)none : NULL;
    UPIPE_TRY(upipe_latent_fwd(c, &own, &save));
    return upipe_latent_bwd(c, &own, &g, &save);
}

/* upipe_dry_fpdt -- the same in segments: forward and backward of upipe_fpdt.h, with dry->host as the host's pool. x,
 *                   dx and dout, which are the caller's, are not counted.
 *   f       its pool is not read. dry must come from upipe_dry_init with a plan of f->desc's ranks and rank
 *   errors  those of upipe_fpdt_fwd and upipe_fpdt_bwd but for transport and memory
 */
UPIPE_API upipe_status upipe_dry_fpdt(upipe_dry *dry, const upipe_fpdt *f)
{
    upipe_ctx *c = &dry->ctx;
    float *const weight = (float *)dry->mem.slab; /* asked for its gradient, never touched */
    float *const dout = weight + 16;              /* likewise; it is not the forward's result */
    upipe_fpdt local;
    upipe_fpdt_saved save;
    upipe_grads grads;
    if (c->ops == NULL) return upipe_fail(&c->err, UPIPE_ERR_ARG, "upipe_dry_init failed, or was not called");
    if (f == NULL) return upipe_fail(&c->err, UPIPE_ERR_ARG, "the segments are NULL");
    local = *f;
    local.host = &dry->host;
    grads = upi_dry_grads(dry, &f->layer);
    UPIPE_TRY(upipe_fpdt_fwd(c, &local, &save, weight));
    UPIPE_TRY(upipe_fpdt_bwd(c, &local, weight, &grads, &save, dout, weight));
    return upipe_fpdt_free(&local, &save, &c->err);
}

#endif

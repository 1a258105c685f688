/* upipe_step.h -- the steps that the block's passes are made of        layer 6, includes block
 *
 * One pass holds a upi_run. Its steps are the paper's: project, exchange, attend, and the same backwards; each takes what
 * it needs from the pool and gives it back.
 */
#ifndef UPIPE_STEP_H
#define UPIPE_STEP_H

#include "upipe_block.h"

/* One pass over the block: the arguments that every step needs. */
typedef struct upi_run {
    upipe_ctx *c;
    const upipe_layer *l;
    const upipe_plan *p;
    upipe_view x;             /* [rows][D] */
    upipe_plan_scratch bytes; /* of scratch */
    upipe_buffers buffers;    /* bytes */
    upipe_shard shard;        /* positions of this rank's rows */
    float *norm;              /* backward with QK norm: gradient of the norm weights by head, [H + Hkv][d] */
    float *dsinks;            /* backward: the caller's, or NULL */
    void *attn_work;          /* attention's scratch, where it is held through all stages */
} upi_run;

/* What a run derives from its layer. */
UPIPE_API void upi_run_sizes(upi_run *r)
{
    r->bytes = upipe_layer_scratch(r->c->ops, r->l, 1);
    r->buffers = upipe_plan_buffers(r->p);
    r->shard = upipe_shard_team(&r->p->held, r->p->desc.ranks, r->c->team->rank);
}

UPIPE_API upipe_status upi_layer_begin(upi_run *r, upipe_ctx *c, const upipe_layer *l, upipe_view x)
{
    memset(r, 0, sizeof *r);
    r->c = c;
    r->l = l;
    r->p = l->plan;
    r->x = x;
    UPIPE_TRY(upi_layer_check(c, l, x));
    upi_run_sizes(r);
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_alloc(upi_run *r, void **out, size_t bytes, const char *tag)
{
    return upipe_mem_alloc(r->c->mem, out, bytes, tag, &r->c->err);
}

UPIPE_API upipe_status upi_free(upi_run *r, void *p)
{
    return upipe_mem_free(r->c->mem, p, &r->c->err);
}

UPIPE_API void upi_phase(upi_run *r, upipe_phase phase)
{
    upipe_mem_phase(r->c->mem, (int)phase, upipe_phase_name((int)phase));
}

UPIPE_API upipe_status upi_gemm(upi_run *r, upipe_view out, upipe_view a, upipe_view b, int flags)
{
    void *work;
    UPIPE_TRY(upi_alloc(r, &work, r->bytes.gemm, "gemm_work"));
    UPIPE_TRY(r->c->ops->gemm(r->c, out, a, b, flags, work, r->bytes.gemm));
    return upi_free(r, work);
}

/* Turns these heads of a buffer in send layout: piece by piece of the rank's tokens. */
UPIPE_API upipe_status upi_rope(upi_run *r, void *data, upi_heads h, int inverse)
{
    const upipe_plan *p = r->p;
    const int64_t width = (int64_t)h.each * p->desc.head_dim;
    const size_t row = (size_t)width * upipe_dtype_bytes(p->desc.dtype);
    upipe_rope rope;
    int64_t at = 0;
    int i;
    if (r->l->rope_theta == 0) return UPIPE_OK;
    memset(&rope, 0, sizeof rope);
    rope.count = h.blocks * p->desc.batch;
    rope.step = p->local * width;
    rope.pos_step = r->shard.step;
    rope.theta = r->l->rope_theta;
    rope.interleaved = r->l->rope_interleaved;
    rope.inverse = inverse;
    for (i = 0; i < r->shard.pieces; at += r->shard.piece[i++].n) {
        char *from = (char *)upi_heads_at(p, data, h, UPI_PROJ_Q) + (size_t)at * row;
        rope.x = upipe_view_packed(from, p->desc.dtype, r->shard.piece[i].n, h.each, p->desc.head_dim);
        rope.pos0 = r->shard.piece[i].pos;
        UPIPE_TRY(r->c->ops->rope(r->c, &rope));
    }
    return UPIPE_OK;
}

/* The projection alone: these heads of dst [block][batch][T][n][dim] = x * W^T. */
UPIPE_API upipe_status upi_project_raw(upi_run *r, upi_proj which, upi_heads h, void *dst)
{
    const void *weights[3];
    weights[UPI_PROJ_Q] = r->l->wq;
    weights[UPI_PROJ_K] = r->l->wk;
    weights[UPI_PROJ_V] = r->l->wv;
    return upi_gemm(r, upi_block_matrix(r->p, dst, h, which), r->x,
                    upi_weight_rows(r->p, (void *)(uintptr_t)weights[which], r->p->desc.dtype, h, which),
                    UPIPE_GEMM_TRANS_B);
}

UPIPE_API const float *upi_weight(const upi_run *r, upi_proj which)
{
    return which == UPI_PROJ_Q ? r->l->q_norm_weight : which == UPI_PROJ_K ? r->l->k_norm_weight : NULL;
}

/* Projection, norm and rotation. */
UPIPE_API upipe_status upi_project_heads(upi_run *r, upi_proj which, upi_heads h, void *dst)
{
    const upipe_plan *p = r->p;
    const float *weight = upi_weight(r, which);
    UPIPE_TRY(upi_project_raw(r, which, h, dst));
    if (weight != NULL) {
        upipe_view x = upipe_view_packed(upi_heads_at(p, dst, h, which), p->desc.dtype, h.blocks * p->rows,
                                         h.each, p->desc.head_dim);
        UPIPE_TRY(r->c->ops->rmsnorm(r->c, x, x, weight, r->l->norm_eps));
    }
    return which == UPI_PROJ_V ? UPIPE_OK : upi_rope(r, dst, h, 0);
}

/* What the exchange of a stage sends. */
UPIPE_API upipe_status upi_project(upi_run *r, upi_proj which, int stage, void *dst)
{
    upi_heads h;
    int rank = 0;
    while (upi_next_heads(r->p, which == UPI_PROJ_Q ? UPIPE_A2A_Q : UPIPE_A2A_KV, stage, &rank, &h))
        UPIPE_TRY(upi_project_heads(r, which, h, dst));
    return UPIPE_OK;
}

/* The backward of upi_project_heads: these heads of g become the gradient of x * W^T, and dW += g^T * x. */
UPIPE_API upipe_status upi_project_heads_bwd(upi_run *r, upi_proj which, upi_heads h, void *g, float *dw)
{
    const upipe_plan *p = r->p;
    const float *weight = upi_weight(r, which);
    if (which != UPI_PROJ_V) UPIPE_TRY(upi_rope(r, g, h, 1));
    if (weight != NULL) {
        int64_t d = p->desc.head_dim;
        int64_t block = p->rows * h.each * d * (int64_t)upipe_dtype_bytes(p->desc.dtype), b;
        upi_heads own = h;
        void *raw;
        own.at = 0;
        UPIPE_TRY(upi_alloc(r, &raw, upi_heads_bytes(p, h, which), "norm_input"));
        UPIPE_TRY(upi_project_raw(r, which, own, raw));
        for (b = 0; b < h.blocks; ++b) {
            int64_t head = h.first + b * h.step + (which == UPI_PROJ_K ? p->desc.heads : 0);
            upipe_view dy = upipe_view_packed((char *)upi_heads_at(p, g, h, which) + b * block, p->desc.dtype,
                                              p->rows, h.each, (int32_t)d);
            upipe_view in = dy;
            in.data = (char *)raw + b * block;
            UPIPE_TRY(r->c->ops->rmsnorm_bwd(r->c, dy, dy, in, weight, r->l->norm_eps, r->norm + head * d, 0));
        }
        UPIPE_TRY(upi_free(r, raw));
    }
    if (dw == NULL) return UPIPE_OK;
    return upi_gemm(r, upi_weight_rows(p, dw, UPIPE_F32, h, which), upi_block_matrix(p, g, h, which), r->x,
                    UPIPE_GEMM_TRANS_A | UPIPE_GEMM_ACCUMULATE);
}

/* The same for all heads of a stage's Q, or of a finished round's K or V. */
UPIPE_API upipe_status upi_project_bwd(upi_run *r, upi_proj which, int stage, void *g, float *dw)
{
    upi_heads h;
    int rank = 0;
    while (upi_next_heads(r->p, which == UPI_PROJ_Q ? UPIPE_A2A_Q : UPIPE_A2A_KV, stage, &rank, &h))
        UPIPE_TRY(upi_project_heads_bwd(r, which, h, g, dw));
    return UPIPE_OK;
}

/* Bytes of one token and head in an exchange. */
UPIPE_API size_t upi_each(const upi_run *r, upi_proj which)
{
    return (size_t)upi_dim(r->p, which) * upipe_dtype_bytes(r->p->desc.dtype);
}

/* K and V of a rank's heads; with a ring that gathers them, those of all its ranks. */
typedef struct upi_kv {
    void *k, *v;
} upi_kv;

UPIPE_API int upi_gathers(const upipe_plan *p)
{
    return p->desc.ring > 1 && p->desc.ring_mode == UPIPE_RING_ALL_GATHER;
}

UPIPE_API upipe_status upi_alloc_kv(upi_run *r, upi_kv *kv, size_t k, size_t v)
{
    UPIPE_TRY(upi_alloc(r, &kv->k, k, "k"));
    return upi_alloc(r, &kv->v, v, "v");
}

UPIPE_API upipe_status upi_free_kv(upi_run *r, upi_kv *kv)
{
    UPIPE_TRY(upi_free(r, kv->v));
    UPIPE_TRY(upi_free(r, kv->k));
    kv->k = kv->v = NULL;
    return UPIPE_OK;
}

/* Room for K and V that is kept through all stages, where rounds are not common. */
UPIPE_API upipe_status upi_alloc_kept(upi_run *r, upi_kv *kv)
{
    const upipe_buffers *b = &r->buffers;
    const int gather = upi_gathers(r->p);
    return upi_alloc_kv(r, kv, gather ? b->all_k : b->k, gather ? b->all_v : b->v);
}

/* K, then V, of the ranks that need others in this stage: projected into one send buffer, exchanged. Where rounds are
 * not common, kv is kept through all stages; otherwise it is taken here. With a ring that gathers, *own is what this
 * rank has, and on its way into kv: upi_fetch_end. */
UPIPE_API upipe_status upi_fetch_begin(upi_run *r, int stage, upi_kv *kv, upi_kv *own)
{
    const upipe_plan *p = r->p;
    const upipe_buffers *b = &r->buffers;
    const int keep = p->schedule == UPIPE_UNEVEN, gather = upi_gathers(p);
    const upipe_span mine = upipe_plan_part(p, UPIPE_A2A_KV, stage, r->c->team->rank);
    void *send;
    *own = *kv;
    if (!keep || gather) UPIPE_TRY(upi_alloc_kv(r, own, b->k, b->v));
    UPIPE_TRY(upi_alloc(r, &send, b->kv_send, "kv_send"));
    UPIPE_TRY(upi_project(r, UPI_PROJ_K, stage, send));
    UPIPE_TRY(upipe_a2a_to_heads(r->c, own->k, send, p, stage, UPIPE_A2A_KV, upi_each(r, UPI_PROJ_K)));
    UPIPE_TRY(upi_project(r, UPI_PROJ_V, stage, send));
    UPIPE_TRY(upipe_a2a_to_heads(r->c, own->v, send, p, stage, UPIPE_A2A_KV, upi_each(r, UPI_PROJ_V)));
    UPIPE_TRY(upi_free(r, send));
    if (!gather) {
        *kv = *own;
        return UPIPE_OK;
    }
    if (!keep) UPIPE_TRY(upi_alloc_kv(r, kv, b->all_k, b->all_v));
    return mine.count > 0 ? upipe_ring_all_gather_start(r->c, p, mine.count, kv->k, kv->v, own->k, own->v)
                          : UPIPE_OK;
}

UPIPE_API upipe_status upi_fetch_end(upi_run *r, int stage, upi_kv *own)
{
    if (!upi_gathers(r->p)) return UPIPE_OK;
    if (upipe_plan_part(r->p, UPIPE_A2A_KV, stage, r->c->team->rank).count > 0)
        UPIPE_TRY(upipe_comm_wait(r->c, r->c->ring));
    return upi_free_kv(r, own);
}

/* Both, where a round begins whose K and V were not fetched ahead. */
UPIPE_API upipe_status upi_fetch_kv(upi_run *r, int stage, upi_kv *kv)
{
    upi_kv own;
    if (r->p->desc.ring_prefetch && stage > 0) return UPIPE_OK;
    UPIPE_TRY(upi_fetch_begin(r, stage, kv, &own));
    return upi_fetch_end(r, stage, &own);
}

/* The stage whose K and V are to be fetched while the stages from this one on attend; 0 = none. */
UPIPE_API int upi_ahead(const upipe_plan *p, int stage)
{
    const int next = stage + p->width;
    return p->desc.ring_prefetch && next < p->stages && upipe_plan_stage(p, next).kv_fresh ? next : 0;
}

/* The attention of `width` stages from `stage` on: their query heads on this rank. */
UPIPE_API upipe_status upi_attend(upi_run *r, upipe_ring_call *call, upipe_ring_part *parts, int stage,
                                  upi_kv kv, int backward)
{
    const upipe_plan *p = r->p;
    const size_t bytes = backward ? r->bytes.attn_bwd : r->bytes.attn_fwd;
    void *work = r->attn_work;
    int t;
    for (t = 0; t < p->width; ++t) {
        upipe_span mine = upipe_plan_q(p, stage + t, r->c->team->rank);
        parts[t].heads = mine.count;
        parts[t].first = mine.first;
    }
    if (!p->overlap) UPIPE_TRY(upi_alloc(r, &work, bytes, "attn_work"));
    call->plan = p;
    call->mask = r->l->mask;
    call->scale = r->l->scale;
    call->work = work;
    call->work_bytes = bytes;
    call->dsinks = r->dsinks;
    call->parts = parts;
    call->count = p->width;
    call->kv_heads = upipe_plan_kv(p, stage, r->c->team->rank).count;
    call->k = kv.k;
    call->v = kv.v;
    call->sums = p->desc.ring > 1 ? UPIPE_F32 : p->desc.dtype;
    UPIPE_TRY(backward ? upipe_ring_bwd(r->c, call) : upipe_ring_fwd(r->c, call));
    return p->overlap ? UPIPE_OK : upi_free(r, work);
}

/* ---- sums over heads: y and dX, by tiles of rows ---- */

/* Where a tile of rows is summed: in f32, in place if the result is f32. */
typedef struct upi_tile {
    upipe_view sum; /* [n][D], f32 */
    int64_t row, n;
    int begun; /* something has been added */
} upi_tile;

UPIPE_API upi_tile upi_tile_at(const upi_run *r, upipe_view out, void *buf, int64_t row)
{
    int64_t rows = upi_tile_rows(r->l), left = r->p->rows - row;
    upi_tile t;
    t.row = row;
    t.n = left < rows ? left : rows;
    t.begun = 0;
    t.sum = buf != NULL ? upipe_view_packed(buf, UPIPE_F32, t.n, 1, out.d) : upipe_view_rows(out, row, t.n);
    return t;
}

UPIPE_API size_t upi_tile_buf(const upi_run *r)
{
    return (size_t)(r->bytes.tile_rows * r->p->desc.model_dim) * 4;
}

/* tile (+)= heads * weight, where heads [rows][width] are some neighbouring heads of all rows. Heads come in
 * natural order, so the chain of additions of an element is the same for every chunk. */
UPIPE_API upipe_status upi_tile_add(upi_run *r, upi_tile *t, upipe_view heads, upipe_view weight, int flags)
{
    if (t->begun) flags |= UPIPE_GEMM_ACCUMULATE;
    t->begun = 1;
    return upi_gemm(r, t->sum, upipe_view_rows(heads, t->row, t->n), weight, flags);
}

UPIPE_API upipe_status upi_tile_store(upi_run *r, upi_tile *t, upipe_view out, const void *buf)
{
    if (buf == NULL) return UPIPE_OK;
    return r->c->ops->cast(r->c, upipe_view_rows(out, t->row, t->n), t->sum);
}

UPIPE_API upipe_status upi_alloc_delta(upi_run *r, upipe_saved *save)
{
    void *delta;
    UPIPE_TRY(upi_alloc(r, &delta, r->buffers.delta, "delta"));
    save->delta = (float *)delta;
    return UPIPE_OK;
}

/* delta of the heads of one stage and rank: [rows][n]. */
UPIPE_API upipe_status upi_delta(upi_run *r, upipe_saved *save, int stage, int rank, upipe_view dout)
{
    const upipe_plan *p = r->p;
    const int32_t n = upipe_plan_q(p, stage, rank).count, d = p->desc.v_dim;
    upipe_view o = upi_slot_matrix(p, &save->out, stage, rank, d);
    int64_t before = upipe_plan_before(p, stage, -1) + upipe_plan_offset(p, UPIPE_A2A_Q, stage, rank);
    if (n == 0) return UPIPE_OK;
    return r->c->ops->rowdot(r->c,
                             upipe_view_packed(save->delta + before * p->rows, UPIPE_F32, p->rows, n, 1),
                             upipe_view_packed(o.data, p->desc.dtype, p->rows, n, d),
                             upipe_view_packed(dout.data, p->desc.dtype, p->rows, n, d));
}

#endif

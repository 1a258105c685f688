/* upipe_mem_block.h -- the attention block's types, scratch and checks        layer 5
 *
 * A host describes one block in a upipe_layer and keeps a upipe_saved between its passes; upipe_layer.h runs
 * them, upipe_out.h adds the output projection.
 *
 * Weights lie as in published Llama checkpoints, heads in natural order: wq [H*d][D], wk [Hkv*d][D],
 * wv [Hkv*v_dim][D], wo [D][H*v_dim], in the plan's storage type. Gradients of weights are f32, += over the rank's own
 * tokens; sum them over all ranks, team and ring, with upipe_all_reduce. Rows of x, y are [batch][T] tokens of this
 * rank; upipe_shard_pos says their positions.
 */
#ifndef UPIPE_BLOCK_H
#define UPIPE_BLOCK_H

#include "upipe_side_stream.h"
#include "upipe_ring.h"

enum { UPIPE_TILE_ROWS = 256 }; /* default tile of the output projection and of dX, in rows */

/* upipe_layer -- one attention block; zero fields are defaults
 *   plan        from upipe_plan_init
 *   wq wk wv wo weights, see above; wo is read by the out calls alone
 *   q_norm_weight k_norm_weight  f32 [d]: RMS norm of every head of Q and K before RoPE; both NULL = none
 *   norm_eps    of these norms, added to the mean square; 0 without them. With 0 a head of zeros gives NaN
 *   rope_theta  base of the rotary embedding; 0 = none
 *   rope_interleaved  pairs (2p, 2p+1); otherwise (p, p + d/2)
 *   scale       of the scores; 0 = 1/sqrt(d)
 *   mask        zero: every token sees all tokens of its sequence. cu_seqlens are positions in the flattened batch,
 *               [0, batch * S]: sequence b begins at b * S. The ends of a sequence are borders anyway
 *   tile_rows   rows of a tile of y and dX; 0 = UPIPE_TILE_ROWS. On a GPU model_dim, the paper's square tile,
 *               is better
 */
typedef struct upipe_layer {
    const upipe_plan *plan;
    const void *wq, *wk, *wv, *wo;
    const float *q_norm_weight, *k_norm_weight;
    double rope_theta;
    float norm_eps, scale;
    int rope_interleaved;
    upipe_mask mask;
    int64_t tile_rows;
} upipe_layer;

/* Gradients of the weights, f32, shapes of the weights, +=; NULL = not wanted. */
typedef struct upipe_grads {
    float *wq, *wk, *wv, *wo, *q_norm_weight, *k_norm_weight, *sinks;
} upipe_grads;

/* upipe_saved -- what the forward leaves for the backward, in the pool
 *   out    final_out in slots; after upipe_layer_out_bwd its gradient
 *   lse    f32 [stage][batch][S/R][n], of this rank's n heads of the stage
 *   delta  f32 [stage][rank][batch][T][n]: rowsum(dO * O); NULL until the backward
 */
typedef struct upipe_saved {
    upipe_slots out;
    float *lse, *delta;
} upipe_saved;

/* Heads of a buffer in send layout [blocks][batch][T][each][dim]: block b holds first + b * step + (0 .. each-1). The
 * blocks begin `at` heads into the buffer. */
typedef struct upi_heads {
    int blocks, each, first, step, at;
} upi_heads;

typedef enum upi_proj { UPI_PROJ_Q, UPI_PROJ_K, UPI_PROJ_V } upi_proj;

UPIPE_API upi_heads upi_heads_make(int blocks, int each, int first, int step)
{
    upi_heads h;
    h.blocks = blocks;
    h.each = each;
    h.first = first;
    h.step = step;
    h.at = 0;
    return h;
}

UPIPE_API upi_heads upi_all_kv_heads(const upipe_plan *p)
{
    return upi_heads_make(p->desc.kv_heads, 1, 0, 1);
}

/* Rounds are not common: gradients of K and V are summed over stages, in f32. */
UPIPE_API int upi_dkv_accumulates(const upipe_plan *p)
{
    return p->schedule >= UPIPE_IN_ORDER;
}

/* The blocks of a stage's buffer as runs of equal ones in equal steps, whose products are one call: all of them where
 * heads divide. `*rank` says where the next run begins, 0 at first; returns 0 after the last. */
UPIPE_API int upi_next_heads(const upipe_plan *p, upipe_a2a_heads which, int stage, int *rank, upi_heads *h)
{
    upipe_span before = upi_span_make(0, 0), s;
    int end = 0, r;
    if (*rank == 0) memset(h, 0, sizeof *h);
    if (*rank > 0) {
        before = upipe_plan_part(p, which, stage, *rank - 1);
        end = h->at + h->blocks * h->each;
    }
    *h = upi_heads_make(0, 0, 0, 1);
    h->at = end;
    for (r = *rank; r < p->desc.ranks; ++r, before = s) {
        s = upipe_plan_part(p, which, stage, r);
        if (s.count == 0 || upi_same_block(which, before, s)) continue;
        if (h->blocks == 0) {
            h->first = s.first;
            h->each = s.count;
        } else if (s.count != h->each || (h->blocks > 1 && s.first != h->first + h->blocks * h->step) ||
                   s.first < h->first) {
            break;
        } else if (h->blocks == 1) {
            h->step = s.first - h->first;
        }
        ++h->blocks;
    }
    *rank = r;
    return h->blocks > 0;
}

/* Elements of a head, and of all heads of Q (of O), in natural order. */
UPIPE_API int upi_dim(const upipe_plan *p, upi_proj which)
{
    return which == UPI_PROJ_V ? p->desc.v_dim : p->desc.head_dim;
}

UPIPE_API int32_t upi_out_width(const upipe_plan *p)
{
    return p->desc.heads * p->desc.v_dim;
}

UPIPE_API size_t upi_heads_bytes(const upipe_plan *p, upi_heads h, upi_proj which)
{
    return upipe_plan_rows_bytes(p, (int64_t)h.blocks * h.each, upi_dim(p, which));
}

/* These heads of a buffer in send layout. */
UPIPE_API void *upi_heads_at(const upipe_plan *p, void *data, upi_heads h, upi_proj which)
{
    return upipe_offset(data, upipe_plan_rows_bytes(p, h.at, upi_dim(p, which)));
}

/* The same as a batch of matrices [rows][each * dim], one a block. */
UPIPE_API upipe_view upi_block_matrix(const upipe_plan *p, void *data, upi_heads h, upi_proj which)
{
    int32_t width = h.each * upi_dim(p, which);
    return upipe_view_make(upi_heads_at(p, data, h, which), p->desc.dtype, p->rows, width, h.blocks,
                           p->rows * width, width);
}

/* The rows of a weight that make these heads, as a batch of matrices [each * dim][D]. */
UPIPE_API upipe_view upi_weight_rows(const upipe_plan *p, void *w, upipe_dtype dtype, upi_heads h,
                                     upi_proj which)
{
    int64_t dim = p->desc.model_dim, head = upi_dim(p, which) * dim;
    upipe_view v = upipe_view_make(w, dtype, (int64_t)h.each * upi_dim(p, which), dim, h.blocks,
                                   h.step * head, (int32_t)dim);
    v.data = (char *)w + (size_t)(h.first * head) * upipe_dtype_bytes(dtype);
    return v;
}

UPIPE_API int64_t upi_tile_rows(const upipe_layer *l)
{
    int64_t rows = l->tile_rows > 0 ? l->tile_rows : (int64_t)UPIPE_TILE_ROWS;
    return rows < l->plan->rows ? rows : l->plan->rows;
}

/* ---- scratch: one size for all products of the block, one for each attention kernel ---- */

/* What every attention call of the block has in common. */
UPIPE_API upipe_attn upi_layer_attn(const upipe_layer *l)
{
    upipe_attn a;
    memset(&a, 0, sizeof a);
    a.mask = l->mask;
    a.scale = l->scale;
    return a;
}

/* Scratch of the attention calls of a rank's stage, the largest: as upi_ring_attend makes them. */
UPIPE_API size_t upi_attn_scratch(const upipe_ops *ops, const upipe_layer *l, int stage, int backward)
{
    const upipe_plan *p = l->plan;
    const upipe_span mine = upipe_plan_q(p, stage, p->desc.rank);
    const int64_t keys = upipe_plan_seq_most(p);
    const upipe_dtype type = p->desc.dtype;
    upipe_ring_part part;
    upipe_attn a = upi_layer_attn(l);
    upipe_span q, kv;
    size_t most = 0;
    int head;
    float none[1]; /* shapes alone are asked for; a null pointer must not be offset */
    memset(&part, 0, sizeof part);
    part.heads = mine.count;
    part.first = mine.first;
    a.merge = p->desc.ring > 1;
    for (head = 0; upi_ring_heads(&part, p->group, head, &q, &kv); head += q.count) {
        a.q = upipe_view_packed(none, type, p->seq, q.count, p->desc.head_dim);
        a.k = upipe_view_packed(none, type, keys, kv.count, p->desc.head_dim);
        a.v = upipe_view_packed(none, type, keys, kv.count, p->desc.v_dim);
        a.o = upipe_view_packed(none, p->desc.ring > 1 ? UPIPE_F32 : type, p->seq, q.count, p->desc.v_dim);
        a.lse = upipe_view_packed(none, UPIPE_F32, p->seq, q.count, 1);
        most = upipe_max_bytes(most, ops->attn_bytes(ops, &a, backward));
    }
    return most;
}

/* Scratch of the products of a weight: with x, forward and for its gradient, and with a tile of dX. */
UPIPE_API size_t upi_product_scratch(const upipe_ops *ops, const upipe_layer *l, upi_proj which,
                                     upi_heads h)
{
    const upipe_plan *p = l->plan;
    const upipe_dtype t = p->desc.dtype;
    const int32_t model = (int32_t)p->desc.model_dim, columns = h.each * upi_dim(p, which);
    float none[1];
    upipe_view x = upipe_view_packed(NULL, t, p->rows, 1, model), block, grad, w, cols, sum;
    size_t most;
    h.at = h.first = 0;
    block = upi_block_matrix(p, NULL, h, which);
    grad = upi_weight_rows(p, none, UPIPE_F32, h, which);
    w = upi_weight_rows(p, none, t, h, which);
    cols = upipe_view_packed(NULL, t, upi_tile_rows(l), 1, columns);
    sum = upipe_view_packed(NULL, UPIPE_F32, upi_tile_rows(l), 1, model);
    most = ops->gemm_bytes(ops, block, x, w, UPIPE_GEMM_TRANS_B);
    most = upipe_max_bytes(most, ops->gemm_bytes(ops, grad, block, x, UPIPE_GEMM_TRANS_A | UPIPE_GEMM_ACCUMULATE));
    w = upipe_view_packed(NULL, t, columns, 1, model);
    most = upipe_max_bytes(most, ops->gemm_bytes(ops, sum, cols, w, 0));
    return upipe_max_bytes(most, ops->gemm_bytes(ops, sum, cols, w, UPIPE_GEMM_ACCUMULATE));
}

/* Scratch of the output projection's products with the heads of one stage and rank. */
UPIPE_API size_t upi_out_scratch(const upipe_ops *ops, const upipe_layer *l, int heads)
{
    const upipe_plan *p = l->plan;
    const upipe_dtype t = p->desc.dtype;
    const int32_t model = (int32_t)p->desc.model_dim, columns = heads * p->desc.v_dim,
                  width = upi_out_width(p);
    upipe_view x = upipe_view_packed(NULL, t, p->rows, 1, model);
    upipe_view wo = upipe_view_make(NULL, t, model, width, 1, columns, columns);
    upipe_view block = upipe_view_packed(NULL, t, p->rows, 1, columns);
    upipe_view grad = upipe_view_make(NULL, UPIPE_F32, model, width, 1, columns, columns);
    upipe_view sum = upipe_view_packed(NULL, UPIPE_F32, upi_tile_rows(l), 1, model);
    upipe_view cols = upipe_view_packed(NULL, t, upi_tile_rows(l), 1, columns);
    size_t most = ops->gemm_bytes(ops, sum, cols, wo, UPIPE_GEMM_TRANS_B);
    most = upipe_max_bytes(most, ops->gemm_bytes(ops, sum, cols, wo, UPIPE_GEMM_TRANS_B | UPIPE_GEMM_ACCUMULATE));
    most = upipe_max_bytes(most, ops->gemm_bytes(ops, block, x, wo, 0));
    return upipe_max_bytes(most, ops->gemm_bytes(ops, grad, x, block, UPIPE_GEMM_TRANS_A | UPIPE_GEMM_ACCUMULATE));
}

/* upipe_layer_scratch -- fills what upipe_plan_bytes needs besides the plan
 *   dx_in_place  nonzero: the gradient of x takes x's place
 */
UPIPE_API upipe_plan_scratch upipe_layer_scratch(const upipe_ops *ops, const upipe_layer *l, int dx_in_place)
{
    const upipe_plan *p = l->plan;
    upipe_plan_scratch s;
    upi_heads h;
    int stage, rank;
    memset(&s, 0, sizeof s);
    for (stage = 0; stage < p->stages; ++stage) {
        for (rank = 0; upi_next_heads(p, UPIPE_A2A_Q, stage, &rank, &h);) {
            s.gemm = upipe_max_bytes(s.gemm, upi_product_scratch(ops, l, UPI_PROJ_Q, h));
            if (l->wo != NULL) s.gemm = upipe_max_bytes(s.gemm, upi_out_scratch(ops, l, h.each));
        }
        for (rank = 0; upi_next_heads(p, UPIPE_A2A_KV, stage, &rank, &h);) {
            s.gemm = upipe_max_bytes(s.gemm, upi_product_scratch(ops, l, UPI_PROJ_K, h));
            s.gemm = upipe_max_bytes(s.gemm, upi_product_scratch(ops, l, UPI_PROJ_V, h));
        }
        s.attn_fwd = upipe_max_bytes(s.attn_fwd, upi_attn_scratch(ops, l, stage, 0));
        s.attn_bwd = upipe_max_bytes(s.attn_bwd, upi_attn_scratch(ops, l, stage, 1));
    }
    if (p->schedule >= UPIPE_IN_ORDER) {
        /* these end with all heads of K and V at once */
        s.gemm = upipe_max_bytes(s.gemm, upi_product_scratch(ops, l, UPI_PROJ_K, upi_all_kv_heads(p)));
        s.gemm = upipe_max_bytes(s.gemm, upi_product_scratch(ops, l, UPI_PROJ_V, upi_all_kv_heads(p)));
    }
    s.tile_rows = p->desc.dtype == UPIPE_F32 ? 0 : upi_tile_rows(l);
    s.dx = dx_in_place ? 0 : upipe_plan_unit_bytes(p);
    s.qk_norm = l->q_norm_weight != NULL;
    return s;
}

/* ---- checks, and what surrounds a pass ---- */

UPIPE_API void upi_field_whole(upipe_field *fields, int *n, const char *name, int64_t value)
{
    fields[*n].name = name;
    fields[*n].value = value;
    fields[*n].real = 0;
    ++*n;
}

UPIPE_API void upi_field_real_of(upipe_field *fields, int *n, const char *name, double value)
{
    upi_field_whole(fields, n, name, 0);
    fields[*n - 1].real = 1;
    memcpy(&fields[*n - 1].value, &value, sizeof value);
}

/* One number for the packed sequences' borders. */
UPIPE_API int64_t upi_cu_seqlens_hash(const upipe_mask *m)
{
    uint64_t hash = 0;
    int64_t i;
    for (i = 0; m->cu_seqlens != NULL && i <= m->cu_seqlens_n; ++i)
        hash = (hash ^ (uint64_t)m->cu_seqlens[i]) * 1099511628211u + 1;
    return (int64_t)(hash >> 1);
}

/* All ranks run the same block: everything but the data and the tile, which is each rank's own.
 *   whole segments  tokens of the sequence that the plan's are a segment of, and how many segments; 0 without
 */
UPIPE_API upipe_status upi_layer_agree(upipe_ctx *c, const upipe_layer *l, int64_t whole, int segments)
{
    const upipe_plan_desc *d = &l->plan->desc;
    const upipe_mask *m = &l->mask;
    upipe_field f[UPIPE_ALL_GATHER_MAX];
    int n = 0;
    upi_field_whole(f, &n, "tokens", d->tokens);
    upi_field_whole(f, &n, "tokens of all segments", whole);
    upi_field_whole(f, &n, "segments", segments);
    upi_field_whole(f, &n, "batch", d->batch);
    upi_field_whole(f, &n, "model_dim", d->model_dim);
    upi_field_whole(f, &n, "ranks", d->ranks);
    upi_field_whole(f, &n, "heads", d->heads);
    upi_field_whole(f, &n, "kv_heads", d->kv_heads);
    upi_field_whole(f, &n, "head_dim", d->head_dim);
    upi_field_whole(f, &n, "chunk", d->chunk);
    upi_field_whole(f, &n, "naive", d->naive != 0);
    upi_field_whole(f, &n, "dtype (0 f32, 1 bf16, 2 f16)", (int64_t)d->dtype);
    upi_field_whole(f, &n, "v_dim", d->v_dim);
    upi_field_whole(f, &n, "ring", d->ring);
    upi_field_whole(f, &n, "ring_inner", d->ring_inner);
    upi_field_whole(f, &n, "ring_mode (1 p2p, 2 all-gather)", (int64_t)d->ring_mode);
    upi_field_whole(f, &n, "ring_prefetch", d->ring_prefetch != 0);
    upi_field_whole(f, &n, "overlap", d->overlap != 0);
    upi_field_whole(f, &n, "layout (0 contiguous, 1 zigzag, 2 striped)", (int64_t)d->layout);
    upi_field_whole(f, &n, "causal", m->causal != 0);
    upi_field_whole(f, &n, "window", m->window);
    upi_field_whole(f, &n, "sinks", m->sinks != NULL);
    upi_field_whole(f, &n, "cu_seqlens_n", m->cu_seqlens_n);
    upi_field_whole(f, &n, "cu_seqlens (hash)", upi_cu_seqlens_hash(m));
    upi_field_real_of(f, &n, "softcap", m->softcap);
    upi_field_whole(f, &n, "qk_norm", l->q_norm_weight != NULL);
    upi_field_whole(f, &n, "rope_interleaved", l->rope_interleaved != 0);
    upi_field_real_of(f, &n, "scale", l->scale);
    upi_field_real_of(f, &n, "norm_eps", l->norm_eps);
    upi_field_real_of(f, &n, "rope_theta", l->rope_theta);
    UPIPE_TRY(upipe_comm_agree(c, c->team, f, n));
    return d->ring > 1 ? upipe_comm_agree(c, c->ring, f, n) : UPIPE_OK;
}

UPIPE_API int upi_is_size(double v)
{
    return v >= 0 && __builtin_isfinite(v);
}

/* The mask, before anything is sent. */
UPIPE_API upipe_status upi_layer_check_mask(upipe_ctx *c, const upipe_layer *l)
{
    const upipe_plan_desc *d = &l->plan->desc;
    upipe_attn a = upi_layer_attn(l);
    a.q.d = d->head_dim;
    a.v.d = d->v_dim;
    a.merge = d->ring > 1;
    UPIPE_TRY(upi_attn_check_masks(c, &a));
    return upi_attn_check_can(c, &a, 1);
}

/* This rank's part of it: nothing is sent. */
UPIPE_API upipe_status upi_layer_check_own(upipe_ctx *c, const upipe_layer *l, upipe_view x)
{
    const upipe_plan_desc *d = &l->plan->desc;
    if ((c->ring != NULL ? c->ring->ranks : 1) != d->ring || (d->ring > 1 && c->ring->rank != d->ring_rank))
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "a plan for ring rank %d of %d on rank %d of a ring of %d",
                        d->ring_rank, d->ring, c->ring != NULL ? c->ring->rank : 0,
                        c->ring != NULL ? c->ring->ranks : 1);
    if (c->team->ranks != d->ranks)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "a plan for %d ranks on a team of %d", d->ranks,
                        c->team->ranks);
    if (c->team->rank != d->rank && !upipe_plan_even(l->plan))
        return upipe_fail(
            &c->err, UPIPE_ERR_ARG,
            "a plan for rank %d on rank %d: where tokens or heads do not divide, each rank has its own",
            d->rank, c->team->rank);
    if (l->plan->overlap && c->side_stream == NULL)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "stages are to overlap, but ctx->side_stream is NULL");
    if (x.n != l->plan->rows || x.h != 1 || x.d != d->model_dim || x.dtype != d->dtype)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "x is %s [%lld][%d][%d], the plan says %s [%lld][1][%lld]",
                        upipe_dtype_name(x.dtype), (long long)x.n, x.h, x.d, upipe_dtype_name(d->dtype),
                        (long long)l->plan->rows, (long long)d->model_dim);
    if (l->wq == NULL || l->wk == NULL || l->wv == NULL)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "wq, wk or wv is NULL");
    if (d->head_dim < UPIPE_HEAD_DIM_MIN || d->head_dim > UPIPE_HEAD_DIM_MAX ||
        d->head_dim % UPIPE_HEAD_DIM_STEP != 0)
        return upipe_fail(&c->err, UPIPE_ERR_UNSUPPORTED, "head dim %d; %d to %d in steps of %d are built",
                        d->head_dim, UPIPE_HEAD_DIM_MIN, UPIPE_HEAD_DIM_MAX, UPIPE_HEAD_DIM_STEP);
    if (d->v_dim < UPIPE_HEAD_DIM_MIN || d->v_dim > UPIPE_HEAD_DIM_MAX || d->v_dim % UPIPE_HEAD_DIM_STEP != 0)
        return upipe_fail(&c->err, UPIPE_ERR_UNSUPPORTED, "head dim %d of V; %d to %d in steps of %d are built",
                        d->v_dim, UPIPE_HEAD_DIM_MIN, UPIPE_HEAD_DIM_MAX, UPIPE_HEAD_DIM_STEP);
    UPIPE_TRY(upi_layer_check_mask(c, l));
    if ((l->q_norm_weight == NULL) != (l->k_norm_weight == NULL))
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "QK norm needs both norm weights or none");
    if (l->q_norm_weight == NULL && l->norm_eps != 0)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "norm_eps %g without the norm weights of a QK norm", l->norm_eps);
    if (l->rope_theta == 0 && l->rope_interleaved)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "rope_interleaved without rope_theta");
    if (!upi_is_size(l->rope_theta) || !upi_is_size(l->norm_eps) || !upi_is_size(l->scale) ||
        l->tile_rows < 0)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "rope theta %g, norm eps %g, scale %g, tile rows %lld",
                        l->rope_theta, l->norm_eps, l->scale, (long long)l->tile_rows);
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_layer_check(upipe_ctx *c, const upipe_layer *l, upipe_view x)
{
    UPIPE_TRY(upi_layer_check_own(c, l, x));
    return upi_layer_agree(c, l, 0, 0);
}

UPIPE_API upipe_status upi_layer_end(upipe_ctx *c, upipe_status s, int64_t mark)
{
    upipe_mem_phase(c->mem, UPIPE_PHASE_OTHER, upipe_phase_name(UPIPE_PHASE_OTHER));
    return s == UPIPE_OK ? UPIPE_OK : upipe_unwind(c, s, mark);
}

/* upipe_layer_slots_alloc -- slots of the size of final_out from the pool, all in one state
 *   state   UPIPE_SLOT_EMPTY, or UPIPE_SLOT_FULL for a gradient that the caller writes (upipe_layer_scatter)
 *   errors  MEMORY
 */
UPIPE_API upipe_status upipe_layer_slots_alloc(upipe_ctx *c, const upipe_layer *l, upipe_slots *slots,
                                              int state, const char *tag)
{
    const upipe_plan *p = l->plan;
    void *data;
    size_t slot = upipe_plan_buffers(p).slot;
    UPIPE_TRY(upipe_mem_alloc(c->mem, &data, slot * (size_t)p->stages, tag, &c->err));
    upipe_slots_init(slots, data, slot, p->stages, state);
    return UPIPE_OK;
}

/* The heads of one stage and rank inside slots, dim elements each: a matrix [rows][n * dim]. */
UPIPE_API upipe_view upi_slot_matrix(const upipe_plan *p, const upipe_slots *slots, int stage, int rank,
                                     int dim)
{
    const size_t before = upipe_plan_rows_bytes(p, upipe_plan_offset(p, UPIPE_A2A_Q, stage, rank), dim);
    return upipe_view_packed(slots->data + (size_t)stage * slots->slot_bytes + before, p->desc.dtype, p->rows,
                             1, upipe_plan_q(p, stage, rank).count * dim);
}

/* Slots of this plan, all of them full. */
UPIPE_API upipe_status upi_slots_check(upipe_ctx *c, const upipe_layer *l, const upipe_slots *slots,
                                       const char *name)
{
    const upipe_plan *p = l->plan;
    size_t bytes = upipe_plan_buffers(p).slot;
    int i;
    if (slots->data == NULL)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "%s is not there (consumed before?)", name);
    if (slots->n != p->stages || slots->slot_bytes != bytes)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "%s has %d slots of %zu bytes, the plan says %d of %zu", name,
                        slots->n, slots->slot_bytes, p->stages, bytes);
    for (i = 0; i < slots->n; ++i)
        if (slots->state[i] != UPIPE_SLOT_FULL)
            return upipe_fail(&c->err, UPIPE_ERR_ARG, "slot %d of %s is not full", i, name);
    return UPIPE_OK;
}

/* The same heads in slots and in a tensor of natural order, [rows][H*v_dim]; `to_slots` says which one is
 * written. */
UPIPE_API upipe_status upi_reorder(upipe_ctx *c, const upipe_layer *l, const upipe_slots *slots,
                                   upipe_view natural, int to_slots)
{
    const upipe_plan *p = l->plan;
    int64_t width = upi_out_width(p);
    size_t step = (size_t)p->desc.v_dim * upipe_dtype_bytes(natural.dtype);
    int stage, rank;
    if (natural.n != p->rows || natural.h != 1 || natural.d != width)
        return upipe_fail(&c->err, UPIPE_ERR_ARG,
                        "heads in natural order are [%lld][1][%lld], not [%lld][%d][%d]", (long long)p->rows,
                        (long long)width, (long long)natural.n, natural.h, natural.d);
    UPIPE_TRY(upi_slots_check(c, l, slots, "slots"));
    for (stage = 0; stage < p->stages; ++stage) {
        for (rank = 0; rank < p->desc.ranks; ++rank) {
            upipe_view heads = upi_slot_matrix(p, slots, stage, rank, p->desc.v_dim), columns = natural;
            if (heads.d == 0) continue;
            columns.data = (char *)natural.data + (size_t)upipe_plan_q(p, stage, rank).first * step;
            columns.d = heads.d;
            UPIPE_TRY(c->ops->cast(c, to_slots ? heads : columns, to_slots ? columns : heads));
        }
    }
    return UPIPE_OK;
}

/* upipe_layer_gather -- dst = the slots' contents, heads in natural order
 *   dst     [rows][1][H*v_dim] view of any step and type
 *   slots   full ones of this layer's plan
 *   errors  ARG
 */
UPIPE_API upipe_status upipe_layer_gather(upipe_ctx *c, const upipe_layer *l, upipe_view dst,
                                          const upipe_slots *slots)
{
    return upi_reorder(c, l, slots, dst, 0);
}

/* upipe_layer_scatter -- the slots' contents = src
 *   slots   full ones of this layer's plan (upipe_layer_slots_alloc with UPIPE_SLOT_FULL)
 *   src     [rows][1][H*v_dim] view of any step and type, heads in natural order
 *   errors  ARG
 */
UPIPE_API upipe_status upipe_layer_scatter(upipe_ctx *c, const upipe_layer *l, const upipe_slots *slots,
                                           upipe_view src)
{
    return upi_reorder(c, l, slots, src, 1);
}

/* upipe_saved_free -- gives back what is left of the forward's results
 *   errors  ARG for blocks that a failed exchange has quarantined: upipe_mem_release first
 */
UPIPE_API upipe_status upipe_saved_free(upipe_ctx *c, upipe_saved *save)
{
    UPIPE_TRY(upipe_mem_free(c->mem, save->out.data, &c->err));
    UPIPE_TRY(upipe_mem_free(c->mem, save->lse, &c->err));
    UPIPE_TRY(upipe_mem_free(c->mem, save->delta, &c->err));
    memset(save, 0, sizeof *save);
    return UPIPE_OK;
}

#endif

/* upipe_block.h -- the attention block's types, and the steps that its passes are made of        layer 3
 *
 * A host describes one block in a upipe_layer and keeps a upipe_saved between its passes; upipe_layer.h runs
 * them, upipe_out.h adds the output projection.
 *
 * Weights lie as in published Llama checkpoints, heads in natural order: wq [H*d][D], wk, wv [Hkv*d][D],
 * wo [D][H*d], in the plan's storage type. Gradients of weights are f32, += over the rank's own tokens; sum
 * them over ranks with upipe_a2a_sum. Rows of x, y are [batch][T] tokens of this rank, whose position is rank
 * * T + t.
 */
#ifndef UPIPE_BLOCK_H
#define UPIPE_BLOCK_H

#include "upipe_a2a.h"
#include "upipe_attn.h"

enum { UPIPE_TILE_ROWS = 256 }; /* default tile of the output projection and of dX, in rows */

/* upipe_layer -- one attention block; zero fields are defaults
 *   plan        from upipe_plan_init
 *   wq wk wv wo weights, see above; wo is read by the out calls alone
 *   q_gain k_gain  f32 [d]: RMS norm of every head of Q and K before RoPE; both NULL = none
 *   norm_eps    of these norms, added to the mean square; 0 without them. With 0 a head of zeros gives NaN
 *   rope_theta  base of the rotary embedding; 0 = none
 *   rope_interleaved  pairs (2p, 2p+1); otherwise (p, p + d/2)
 *   scale       of the scores; 0 = 1/sqrt(d)
 *   full        nonzero: every token sees all; otherwise causal
 *   tile_rows   rows of a tile of y and dX; 0 = UPIPE_TILE_ROWS. On a GPU model_dim, the paper's square tile,
 *               is better
 */
typedef struct upipe_layer {
    const upipe_plan *plan;
    const void *wq, *wk, *wv, *wo;
    const float *q_gain, *k_gain;
    double rope_theta;
    float norm_eps, scale;
    int rope_interleaved, full;
    int64_t tile_rows;
} upipe_layer;

/* Gradients of the weights, f32, shapes of the weights, +=; NULL = not wanted. */
typedef struct upipe_grads {
    float *wq, *wk, *wv, *wo, *q_gain, *k_gain;
} upipe_grads;

/* upipe_saved -- what the forward leaves for the backward, in the pool
 *   out    final_out in slots; after upipe_layer_out_bwd its gradient
 *   lse    f32 [stage][batch][S][m], of this rank's heads
 *   delta  f32 [stage][rank][batch][T][m]: rowsum(dO * O); NULL until the backward
 */
typedef struct upipe_saved {
    upipe_slots out;
    float *lse, *delta;
} upipe_saved;

/* Heads of a buffer in send layout [blocks][batch][T][each][d]: block b holds first + b * step + (0 ..
 * each-1). */
typedef struct upi_heads {
    int blocks, each, first, step;
} upi_heads;

typedef enum upi_which { UPI_Q, UPI_K, UPI_V } upi_which;

UPIPE_API upi_heads upi_heads_make(int blocks, int each, int first, int step)
{
    upi_heads h;
    h.blocks = blocks;
    h.each = each;
    h.first = first;
    h.step = step;
    return h;
}

UPIPE_API upi_heads upi_q_heads(const upipe_plan *p, int stage)
{
    return upi_heads_make(p->desc.ranks, p->per_rank, upipe_plan_q_head(p, stage, 0, 0),
                          upipe_plan_q_step(p));
}

UPIPE_API upi_heads upi_all_kv_heads(const upipe_plan *p)
{
    return upi_heads_make(p->desc.kv_heads, 1, 0, 1);
}

UPIPE_API upi_heads upi_kv_heads(const upipe_plan *p, int stage)
{
    return upi_heads_make(upipe_plan_kv_blocks(p, stage), p->kv_per_rank, upipe_plan_kv_head(p, stage, 0, 0),
                          p->kv_per_rank);
}

UPIPE_API size_t upi_heads_bytes(const upipe_plan *p, upi_heads h)
{
    return upipe_plan_rows_bytes(p, (int64_t)h.blocks * h.each);
}

/* A buffer in send layout as a batch of matrices [rows][each * d], one a block. */
UPIPE_API upipe_view upi_block_matrix(const upipe_plan *p, void *data, upi_heads h)
{
    int32_t width = h.each * p->desc.head_dim;
    return upipe_view_make(data, p->desc.dtype, p->rows, width, h.blocks, p->rows * width, width);
}

/* The rows of a weight that make these heads, as a batch of matrices [each * d][D]. */
UPIPE_API upipe_view upi_weight_rows(const upipe_plan *p, void *w, upipe_dtype dtype, upi_heads h)
{
    int64_t dim = p->desc.model_dim, head = p->desc.head_dim * dim;
    upipe_view v = upipe_view_make(w, dtype, (int64_t)h.each * p->desc.head_dim, dim, h.blocks, h.step * head,
                                   (int32_t)dim);
    v.data = (char *)w + (size_t)(h.first * head) * upipe_dtype_bytes(dtype);
    return v;
}

UPIPE_API int64_t upi_tile_rows(const upipe_layer *l)
{
    int64_t rows = l->tile_rows > 0 ? l->tile_rows : (int64_t)UPIPE_TILE_ROWS;
    return rows < l->plan->rows ? rows : l->plan->rows;
}

/* ---- scratch: one size for all products of the block, one for each attention kernel ---- */

UPIPE_API upipe_attn upi_attn_args(const upipe_layer *l, int64_t sequence, void *q, void *k, void *v, void *o,
                                   float *lse)
{
    const upipe_plan *p = l->plan;
    int64_t tokens = p->desc.tokens,
            each = tokens * p->desc.head_dim * (int64_t)upipe_dtype_bytes(p->desc.dtype);
    int64_t q_at = sequence * each * p->per_rank, kv_at = sequence * each * p->kv_per_rank;
    upipe_attn a;
    memset(&a, 0, sizeof a);
    a.q = upipe_view_packed((char *)q + q_at, p->desc.dtype, tokens, p->per_rank, p->desc.head_dim);
    a.o = upipe_view_packed((char *)o + q_at, p->desc.dtype, tokens, p->per_rank, p->desc.head_dim);
    a.k = upipe_view_packed((char *)k + kv_at, p->desc.dtype, tokens, p->kv_per_rank, p->desc.head_dim);
    a.v = upipe_view_packed((char *)v + kv_at, p->desc.dtype, tokens, p->kv_per_rank, p->desc.head_dim);
    a.lse = upipe_view_packed(lse + sequence * tokens * p->per_rank, UPIPE_F32, tokens, p->per_rank, 1);
    a.scale = l->scale;
    a.causal = !l->full;
    return a;
}

/* upipe_layer_scratch -- fills what upipe_plan_bytes needs besides the plan
 *   gx_in_place  nonzero: the gradient of x takes x's place
 */
UPIPE_API upipe_plan_scratch upipe_layer_scratch(const upipe_ops *ops, const upipe_layer *l, int gx_in_place)
{
    const upipe_plan *p = l->plan;
    upipe_dtype t = p->desc.dtype;
    int64_t rows = p->rows, tile = upi_tile_rows(l), dim = p->desc.model_dim;
    int32_t d = p->desc.head_dim, model = (int32_t)dim;
    int32_t width = p->desc.heads * d;
    upipe_view x = upipe_view_packed(NULL, t, rows, 1, model);
    upipe_plan_scratch s;
    upipe_attn a;
    int which, stage;
    float none[1]; /* shapes alone are asked for; a null pointer must not be offset */
    memset(&s, 0, sizeof s);
    for (which = UPI_Q; which <= UPI_K; ++which) {
        int32_t columns = (which == UPI_Q ? p->per_rank : p->kv_per_rank) * d;
        upipe_view cols = upipe_view_packed(NULL, t, tile, 1, columns);
        upipe_view sum = upipe_view_packed(NULL, UPIPE_F32, tile, 1, model);
        upipe_view w = upipe_view_packed(NULL, t, columns, 1, model);
        for (stage = 0; stage <= p->stages; ++stage) {
            /* beyond the last stage: all heads of K at once, as the naive order ends */
            upi_heads h = which == UPI_K && stage == p->stages ? upi_all_kv_heads(p)
                          : which == UPI_Q                     ? upi_q_heads(p, stage % p->stages)
                                                               : upi_kv_heads(p, stage);
            upipe_view block = upi_block_matrix(p, NULL, h), grad;
            if (stage == p->stages && p->schedule != UPIPE_ORDER) break;
            h.first = 0;
            grad = upi_weight_rows(p, none, UPIPE_F32, h);
            w = upi_weight_rows(p, none, t, h);
            s.gemm = upi_most(s.gemm, ops->gemm_bytes(ops, block, x, w, UPIPE_GEMM_TRANS_B));
            s.gemm = upi_most(
                s.gemm, ops->gemm_bytes(ops, grad, block, x, UPIPE_GEMM_TRANS_A | UPIPE_GEMM_ACCUMULATE));
        }
        w = upipe_view_packed(NULL, t, columns, 1, model);
        s.gemm = upi_most(s.gemm, ops->gemm_bytes(ops, sum, cols, w, 0));
        s.gemm = upi_most(s.gemm, ops->gemm_bytes(ops, sum, cols, w, UPIPE_GEMM_ACCUMULATE));
    }
    if (l->wo != NULL) {
        int32_t columns = p->per_rank * d;
        upipe_view wo = upipe_view_make(NULL, t, dim, width, 1, columns, columns);
        upipe_view block = upipe_view_packed(NULL, t, rows, 1, columns);
        upipe_view grad = upipe_view_make(NULL, UPIPE_F32, dim, width, 1, columns, columns);
        upipe_view sum = upipe_view_packed(NULL, UPIPE_F32, tile, 1, model);
        upipe_view cols = upipe_view_packed(NULL, t, tile, 1, columns);
        s.gemm = upi_most(s.gemm, ops->gemm_bytes(ops, sum, cols, wo, UPIPE_GEMM_TRANS_B));
        s.gemm =
            upi_most(s.gemm, ops->gemm_bytes(ops, sum, cols, wo, UPIPE_GEMM_TRANS_B | UPIPE_GEMM_ACCUMULATE));
        s.gemm = upi_most(s.gemm, ops->gemm_bytes(ops, block, x, wo, 0));
        s.gemm = upi_most(s.gemm,
                          ops->gemm_bytes(ops, grad, x, block, UPIPE_GEMM_TRANS_A | UPIPE_GEMM_ACCUMULATE));
    }
    a = upi_attn_args(l, 0, none, none, none, none, none);
    s.attn_fwd = ops->attn_bytes(ops, &a, 0);
    s.attn_bwd = ops->attn_bytes(ops, &a, 1);
    s.tile_rows = t == UPIPE_F32 ? 0 : tile;
    s.gx = gx_in_place ? 0 : upipe_plan_unit_bytes(p);
    s.qk_norm = l->q_gain != NULL;
    return s;
}

/* ---- the steps of a stage ---- */

/* One pass over the block: the arguments that every step needs. */
typedef struct upi_run {
    upipe_ctx *c;
    const upipe_layer *l;
    const upipe_plan *p;
    upipe_view x;             /* [rows][D] */
    upipe_plan_scratch bytes; /* of scratch */
    float *norm;              /* backward with QK norm: gradient of the gains by head, [H + Hkv][d] */
} upi_run;

UPIPE_API upipe_status upi_take(upi_run *r, void **out, size_t bytes, const char *tag)
{
    return upipe_mem_take(r->c->mem, out, bytes, tag, &r->c->err);
}

UPIPE_API upipe_status upi_give(upi_run *r, void *p)
{
    return upipe_mem_give(r->c->mem, p, &r->c->err);
}

UPIPE_API void upi_phase(upi_run *r, upipe_phase phase)
{
    upipe_mem_phase(r->c->mem, (int)phase, upipe_phase_name((int)phase));
}

UPIPE_API upipe_status upi_gemm(upi_run *r, upipe_view out, upipe_view a, upipe_view b, int flags)
{
    void *work;
    UPIPE_TRY(upi_take(r, &work, r->bytes.gemm, "gemm_work"));
    UPIPE_TRY(r->c->ops->gemm(r->c, out, a, b, flags, work, r->bytes.gemm));
    return upi_give(r, work);
}

UPIPE_API upipe_status upi_rope(upi_run *r, void *data, upi_heads h, int inverse)
{
    const upipe_plan *p = r->p;
    int64_t width = (int64_t)h.each * p->desc.head_dim;
    upipe_rope rope;
    if (r->l->rope_theta == 0) return UPIPE_OK;
    memset(&rope, 0, sizeof rope);
    rope.x = upipe_view_packed(data, p->desc.dtype, p->local, h.each, p->desc.head_dim);
    rope.count = h.blocks * p->desc.batch;
    rope.step = p->local * width;
    rope.pos0 = r->c->team->rank * p->local;
    rope.theta = r->l->rope_theta;
    rope.interleaved = r->l->rope_interleaved;
    rope.inverse = inverse;
    return r->c->ops->rope(r->c, &rope);
}

/* The projection alone: dst [blocks][batch][T][each][d] = x * W^T for these heads. */
UPIPE_API upipe_status upi_project_raw(upi_run *r, upi_which which, upi_heads h, void *dst)
{
    const void *weights[3];
    weights[UPI_Q] = r->l->wq;
    weights[UPI_K] = r->l->wk;
    weights[UPI_V] = r->l->wv;
    return upi_gemm(r, upi_block_matrix(r->p, dst, h), r->x,
                    upi_weight_rows(r->p, (void *)(uintptr_t)weights[which], r->p->desc.dtype, h),
                    UPIPE_GEMM_TRANS_B);
}

UPIPE_API const float *upi_gain(const upi_run *r, upi_which which)
{
    return which == UPI_Q ? r->l->q_gain : which == UPI_K ? r->l->k_gain : NULL;
}

/* Projection, norm and rotation: what the exchange sends. */
UPIPE_API upipe_status upi_project(upi_run *r, upi_which which, upi_heads h, void *dst)
{
    const upipe_plan *p = r->p;
    const float *gain = upi_gain(r, which);
    UPIPE_TRY(upi_project_raw(r, which, h, dst));
    if (gain != NULL) {
        upipe_view x = upipe_view_packed(dst, p->desc.dtype, h.blocks * p->rows, h.each, p->desc.head_dim);
        UPIPE_TRY(r->c->ops->rmsnorm(r->c, x, x, gain, r->l->norm_eps));
    }
    return which == UPI_V ? UPIPE_OK : upi_rope(r, dst, h, 0);
}

/* The backward of upi_project: g [blocks][batch][T][each][d] becomes the gradient of x * W^T, and dW += g^T *
 * x. */
UPIPE_API upipe_status upi_project_bwd(upi_run *r, upi_which which, upi_heads h, void *g, float *dw)
{
    const upipe_plan *p = r->p;
    const float *gain = upi_gain(r, which);
    if (which != UPI_V) UPIPE_TRY(upi_rope(r, g, h, 1));
    if (gain != NULL) {
        int64_t d = p->desc.head_dim;
        int64_t block = p->rows * h.each * d * (int64_t)upipe_dtype_bytes(p->desc.dtype), b;
        void *raw;
        UPIPE_TRY(upi_take(r, &raw, upi_heads_bytes(p, h), "norm_input"));
        UPIPE_TRY(upi_project_raw(r, which, h, raw));
        for (b = 0; b < h.blocks; ++b) {
            int64_t head = h.first + b * h.step + (which == UPI_K ? p->desc.heads : 0);
            upipe_view dy =
                upipe_view_packed((char *)g + b * block, p->desc.dtype, p->rows, h.each, (int32_t)d);
            upipe_view in = dy;
            in.data = (char *)raw + b * block;
            UPIPE_TRY(r->c->ops->rmsnorm_bwd(r->c, dy, dy, in, gain, r->l->norm_eps, r->norm + head * d, 0));
        }
        UPIPE_TRY(upi_give(r, raw));
    }
    if (dw == NULL) return UPIPE_OK;
    return upi_gemm(r, upi_weight_rows(p, dw, UPIPE_F32, h), upi_block_matrix(p, g, h), r->x,
                    UPIPE_GEMM_TRANS_A | UPIPE_GEMM_ACCUMULATE);
}

/* Bytes of one rank's tokens of one sequence, `heads` heads of d elements. */
UPIPE_API size_t upi_block_bytes(const upipe_plan *p, int heads, size_t element)
{
    return (size_t)(p->local * heads * p->desc.head_dim) * element;
}

UPIPE_API upipe_share upi_each_its_own(void)
{
    upipe_share s;
    s.offset = 0;
    s.step = s.span = 1;
    return s;
}

/* K, then V, of a round: projected into one send buffer, exchanged into k and v
 * [batch][S][kv_per_rank][d]. */
UPIPE_API upipe_status upi_fetch_kv(upi_run *r, int stage, void **k, void **v)
{
    const upipe_plan *p = r->p;
    upi_heads h = upi_kv_heads(p, stage);
    size_t e = upipe_dtype_bytes(p->desc.dtype), block = upi_block_bytes(p, p->kv_per_rank, e);
    size_t bytes = block * (size_t)p->desc.ranks * (size_t)p->desc.batch;
    upipe_share share = upipe_plan_kv_share(p, stage);
    void *send;
    UPIPE_TRY(upi_take(r, k, bytes, "k"));
    UPIPE_TRY(upi_take(r, v, bytes, "v"));
    UPIPE_TRY(upi_take(r, &send, upi_heads_bytes(p, h), "kv_send"));
    UPIPE_TRY(upi_project(r, UPI_K, h, send));
    UPIPE_TRY(upipe_a2a_to_heads(r->c, *k, send, block, p->desc.batch, share));
    UPIPE_TRY(upi_project(r, UPI_V, h, send));
    UPIPE_TRY(upipe_a2a_to_heads(r->c, *v, send, block, p->desc.batch, share));
    return upi_give(r, send);
}

/* Attention over every sequence of the batch: o and lse of this rank's heads. */
UPIPE_API upipe_status upi_attend(upi_run *r, void *q, void *k, void *v, void *o, float *lse)
{
    void *work;
    int64_t b;
    UPIPE_TRY(upi_take(r, &work, r->bytes.attn_fwd, "attn_work"));
    for (b = 0; b < r->p->desc.batch; ++b) {
        upipe_attn a = upi_attn_args(r->l, b, q, k, v, o, lse);
        a.work = work;
        a.work_bytes = r->bytes.attn_fwd;
        UPIPE_TRY(upipe_attn_fwd(r->c, &a));
    }
    return upi_give(r, work);
}

/* Its backward: gq, and gk, gv in f32, +=. */
UPIPE_API upipe_status upi_attend_bwd(upi_run *r, void *q, void *k, void *v, void *go, float *lse,
                                      float *delta, void *gq, float *gk, float *gv)
{
    const upipe_plan *p = r->p;
    void *work;
    int64_t b;
    UPIPE_TRY(upi_take(r, &work, r->bytes.attn_bwd, "attn_work"));
    for (b = 0; b < p->desc.batch; ++b) {
        upipe_attn_grad g;
        upipe_attn go_gq =
            upi_attn_args(r->l, b, gq, k, v, go, delta); /* the same offsets for the gradients */
        int64_t kv_at = b * p->desc.tokens * p->kv_per_rank * p->desc.head_dim;
        g.a = upi_attn_args(r->l, b, q, k, v, go, lse);
        g.a.work = work;
        g.a.work_bytes = r->bytes.attn_bwd;
        g.go = go_gq.o;
        g.gq = go_gq.q;
        g.delta = go_gq.lse;
        g.gk = upipe_view_packed(gk + kv_at, UPIPE_F32, p->desc.tokens, p->kv_per_rank, p->desc.head_dim);
        g.gv = upipe_view_packed(gv + kv_at, UPIPE_F32, p->desc.tokens, p->kv_per_rank, p->desc.head_dim);
        UPIPE_TRY(upipe_attn_bwd(r->c, &g));
    }
    return upi_give(r, work);
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

/* All ranks run the same block: everything but the data and the tile, which is each rank's own. */
UPIPE_API upipe_status upi_layer_agree(upipe_ctx *c, const upipe_layer *l)
{
    const upipe_plan_desc *d = &l->plan->desc;
    upipe_field f[UPIPE_GATHER_MAX];
    int n = 0;
    upi_field_whole(f, &n, "tokens", d->tokens);
    upi_field_whole(f, &n, "batch", d->batch);
    upi_field_whole(f, &n, "model_dim", d->model_dim);
    upi_field_whole(f, &n, "ranks", d->ranks);
    upi_field_whole(f, &n, "heads", d->heads);
    upi_field_whole(f, &n, "kv_heads", d->kv_heads);
    upi_field_whole(f, &n, "head_dim", d->head_dim);
    upi_field_whole(f, &n, "chunk", d->chunk);
    upi_field_whole(f, &n, "naive", d->naive != 0);
    upi_field_whole(f, &n, "dtype (0 f32, 1 bf16)", (int64_t)d->dtype);
    upi_field_whole(f, &n, "full", l->full != 0);
    upi_field_whole(f, &n, "qk_norm", l->q_gain != NULL);
    upi_field_whole(f, &n, "rope_interleaved", l->rope_interleaved != 0);
    upi_field_real_of(f, &n, "scale", l->scale);
    upi_field_real_of(f, &n, "norm_eps", l->norm_eps);
    upi_field_real_of(f, &n, "rope_theta", l->rope_theta);
    return upipe_comm_agree(c, c->team, f, n);
}

UPIPE_API int upi_is_size(double v)
{
    return v >= 0 && __builtin_isfinite(v);
}

UPIPE_API upipe_status upi_layer_check(upipe_ctx *c, const upipe_layer *l, upipe_view x)
{
    const upipe_plan_desc *d = &l->plan->desc;
    if (c->ring != NULL)
        return upi_fail(&c->err, UPIPE_ERR_UNSUPPORTED, "a ring beside the team is not built yet");
    if (c->team->ranks != d->ranks)
        return upi_fail(&c->err, UPIPE_ERR_ARG, "a plan for %d ranks on a team of %d", d->ranks,
                        c->team->ranks);
    if (x.n != l->plan->rows || x.h != 1 || x.d != d->model_dim || x.dtype != d->dtype)
        return upi_fail(&c->err, UPIPE_ERR_ARG, "x is %s [%lld][%d][%d], the plan says %s [%lld][1][%lld]",
                        upipe_dtype_name(x.dtype), (long long)x.n, x.h, x.d, upipe_dtype_name(d->dtype),
                        (long long)l->plan->rows, (long long)d->model_dim);
    if (l->wq == NULL || l->wk == NULL || l->wv == NULL)
        return upi_fail(&c->err, UPIPE_ERR_ARG, "wq, wk or wv is NULL");
    if (d->head_dim < UPIPE_HEAD_DIM_MIN || d->head_dim > UPIPE_HEAD_DIM_MAX ||
        d->head_dim % UPIPE_HEAD_DIM_STEP != 0)
        return upi_fail(&c->err, UPIPE_ERR_UNSUPPORTED, "head dim %d; %d to %d in steps of %d are built",
                        d->head_dim, UPIPE_HEAD_DIM_MIN, UPIPE_HEAD_DIM_MAX, UPIPE_HEAD_DIM_STEP);
    if ((l->q_gain == NULL) != (l->k_gain == NULL))
        return upi_fail(&c->err, UPIPE_ERR_ARG, "QK norm needs both gains or none");
    if (l->q_gain == NULL && l->norm_eps != 0)
        return upi_fail(&c->err, UPIPE_ERR_ARG, "norm_eps %g without the gains of a QK norm", l->norm_eps);
    if (l->rope_theta == 0 && l->rope_interleaved)
        return upi_fail(&c->err, UPIPE_ERR_ARG, "rope_interleaved without rope_theta");
    if (!upi_is_size(l->rope_theta) || !upi_is_size(l->norm_eps) || !upi_is_size(l->scale) ||
        l->tile_rows < 0)
        return upi_fail(&c->err, UPIPE_ERR_ARG, "rope theta %g, norm eps %g, scale %g, tile rows %lld",
                        l->rope_theta, l->norm_eps, l->scale, (long long)l->tile_rows);
    return upi_layer_agree(c, l);
}

UPIPE_API upipe_status upi_layer_begin(upi_run *r, upipe_ctx *c, const upipe_layer *l, upipe_view x)
{
    memset(r, 0, sizeof *r);
    r->c = c;
    r->l = l;
    r->p = l->plan;
    r->x = x;
    UPIPE_TRY(upi_layer_check(c, l, x));
    r->bytes = upipe_layer_scratch(c->ops, l, 1);
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_layer_end(upipe_ctx *c, upipe_status s, int64_t mark)
{
    upipe_mem_phase(c->mem, UPIPE_PHASE_OTHER, upipe_phase_name(UPIPE_PHASE_OTHER));
    return s == UPIPE_OK ? UPIPE_OK : upi_unwind(c, s, mark);
}

/* upipe_layer_slots_take -- slots of the size of final_out from the pool, all in one state
 *   state   UPIPE_SLOT_EMPTY, or UPIPE_SLOT_FULL for a gradient that the caller writes (upipe_layer_scatter)
 *   errors  MEMORY
 */
UPIPE_API upipe_status upipe_layer_slots_take(upipe_ctx *c, const upipe_layer *l, upipe_slots *slots,
                                              int state, const char *tag)
{
    const upipe_plan *p = l->plan;
    void *data;
    UPIPE_TRY(upipe_mem_take(c->mem, &data, upipe_plan_rows_bytes(p, p->desc.heads), tag, &c->err));
    upipe_slots_init(slots, data, upipe_plan_rows_bytes(p, p->desc.chunk), p->stages, state);
    return UPIPE_OK;
}

/* The m heads of one stage and rank inside slots: a matrix [rows][m * d]. */
UPIPE_API upipe_view upi_slot_matrix(const upipe_plan *p, const upipe_slots *slots, int stage, int rank)
{
    int32_t width = p->per_rank * p->desc.head_dim;
    char *data = slots->data + (size_t)stage * slots->slot_bytes +
                 (size_t)rank * upipe_plan_rows_bytes(p, p->per_rank);
    return upipe_view_packed(data, p->desc.dtype, p->rows, 1, width);
}

/* Slots of this plan, all of them full. */
UPIPE_API upipe_status upi_slots_check(upipe_ctx *c, const upipe_layer *l, const upipe_slots *slots,
                                       const char *name)
{
    const upipe_plan *p = l->plan;
    size_t bytes = upipe_plan_rows_bytes(p, p->desc.chunk);
    int i;
    if (slots->data == NULL)
        return upi_fail(&c->err, UPIPE_ERR_ARG, "%s is not there (consumed before?)", name);
    if (slots->n != p->stages || slots->slot_bytes != bytes)
        return upi_fail(&c->err, UPIPE_ERR_ARG, "%s has %d slots of %zu bytes, the plan says %d of %zu", name,
                        slots->n, slots->slot_bytes, p->stages, bytes);
    for (i = 0; i < slots->n; ++i)
        if (slots->state[i] != UPIPE_SLOT_FULL)
            return upi_fail(&c->err, UPIPE_ERR_ARG, "slot %d of %s is not full", i, name);
    return UPIPE_OK;
}

/* The same heads in slots and in a tensor of natural order, [rows][H*d]; `to_slots` says which one is
 * written. */
UPIPE_API upipe_status upi_reorder(upipe_ctx *c, const upipe_layer *l, const upipe_slots *slots,
                                   upipe_view natural, int to_slots)
{
    const upipe_plan *p = l->plan;
    int64_t width = (int64_t)p->desc.heads * p->desc.head_dim;
    size_t step = (size_t)p->desc.head_dim * upipe_dtype_bytes(natural.dtype);
    int stage, rank;
    if (natural.n != p->rows || natural.h != 1 || natural.d != width)
        return upi_fail(&c->err, UPIPE_ERR_ARG,
                        "heads in natural order are [%lld][1][%lld], not [%lld][%d][%d]", (long long)p->rows,
                        (long long)width, (long long)natural.n, natural.h, natural.d);
    UPIPE_TRY(upi_slots_check(c, l, slots, "slots"));
    for (stage = 0; stage < p->stages; ++stage) {
        for (rank = 0; rank < p->desc.ranks; ++rank) {
            upipe_view heads = upi_slot_matrix(p, slots, stage, rank), columns = natural;
            columns.data = (char *)natural.data + (size_t)upipe_plan_q_head(p, stage, rank, 0) * step;
            columns.d = heads.d;
            UPIPE_TRY(c->ops->cast(c, to_slots ? heads : columns, to_slots ? columns : heads));
        }
    }
    return UPIPE_OK;
}

/* upipe_layer_gather -- dst = the slots' contents, heads in natural order
 *   dst     [rows][1][H*d] view of any step and type
 *   slots   full ones of this layer's plan
 *   errors  ARG
 */
UPIPE_API upipe_status upipe_layer_gather(upipe_ctx *c, const upipe_layer *l, upipe_view dst,
                                          const upipe_slots *slots)
{
    return upi_reorder(c, l, slots, dst, 0);
}

/* upipe_layer_scatter -- the slots' contents = src
 *   slots   full ones of this layer's plan (upipe_layer_slots_take with UPIPE_SLOT_FULL)
 *   src     [rows][1][H*d] view of any step and type, heads in natural order
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
    UPIPE_TRY(upipe_mem_give(c->mem, save->out.data, &c->err));
    UPIPE_TRY(upipe_mem_give(c->mem, save->lse, &c->err));
    UPIPE_TRY(upipe_mem_give(c->mem, save->delta, &c->err));
    memset(save, 0, sizeof *save);
    return UPIPE_OK;
}

/* ---- sums over heads: y and dX, by tiles of rows ---- */

/* Where a tile of rows is summed: in f32, in place if the result is f32. */
typedef struct upi_tile {
    upipe_view sum; /* [n][D], f32 */
    int64_t row, n;
    int begun; /* something has been added */
} upi_tile;

UPIPE_API upi_tile upi_tile_at(const upi_run *r, upipe_view out, void *room, int64_t row)
{
    int64_t rows = upi_tile_rows(r->l), left = r->p->rows - row;
    upi_tile t;
    t.row = row;
    t.n = left < rows ? left : rows;
    t.begun = 0;
    t.sum = room != NULL ? upipe_view_packed(room, UPIPE_F32, t.n, 1, out.d) : upipe_view_rows(out, row, t.n);
    return t;
}

UPIPE_API size_t upi_tile_room(const upi_run *r)
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

UPIPE_API upipe_status upi_tile_store(upi_run *r, upi_tile *t, upipe_view out, const void *room)
{
    if (room == NULL) return UPIPE_OK;
    return r->c->ops->cast(r->c, upipe_view_rows(out, t->row, t->n), t->sum);
}

UPIPE_API upipe_status upi_take_delta(upi_run *r, upipe_saved *save)
{
    void *delta;
    UPIPE_TRY(upi_take(r, &delta, (size_t)(r->p->rows * r->p->desc.heads) * 4, "delta"));
    save->delta = (float *)delta;
    return UPIPE_OK;
}

/* delta of the m heads of one stage and rank: [rows][m]. */
UPIPE_API upipe_status upi_delta(upi_run *r, upipe_saved *save, int stage, int rank, upipe_view go)
{
    const upipe_plan *p = r->p;
    int32_t m = p->per_rank, d = p->desc.head_dim;
    upipe_view o = upi_slot_matrix(p, &save->out, stage, rank);
    float *delta = save->delta + ((int64_t)stage * p->desc.ranks + rank) * p->rows * m;
    return r->c->ops->rowdot(r->c, upipe_view_packed(delta, UPIPE_F32, p->rows, m, 1),
                             upipe_view_packed(o.data, p->desc.dtype, p->rows, m, d),
                             upipe_view_packed(go.data, p->desc.dtype, p->rows, m, d));
}

#endif

/* latent.h -- attention whose K and V come from a latent: what is a token's own, around the library's layer
 *
 *     down.q = x Wqd^T            q_a_proj, and its norm: what Q is made of; where the model has none, that is x
 *     down.kv = [c, kr]           kv_a_proj_with_mqa: x Wkd^T. c has a norm, and kr is turned
 *     upipe_latent_layer_fwd      Q, K and V of all heads, stage by stage: O and lse
 *
 * Nothing of it is kept. The backward makes it again, with what the norms read beside what they give.
 */
#ifndef LLAMA_LATENT_H
#define LLAMA_LATENT_H

#include "attention_kind.h"

/* Of both norms, whatever rms_norm_eps is: as in transformers. */
#define LATENT_NORM_EPS 1e-6f

/* What the rank's tokens are projected down to, [rows][1][..]; q.data NULL: Q is made of x. */
typedef struct latent_down {
    upipe_view q, kv;
} latent_down;

/* Of scores: YaRN's, which sharpens all of a head here, where turning it sharpens the part that turns. */
static inline double latent_scale(const llama_config *c)
{
    const double by = c->rope_mscale_all > 0 ? llama_rope_sharpened(c->rope_factor, c->rope_mscale_all) : 1;
    return by * by / sqrt((double)c->head_dim);
}

static inline upipe_layer model_latent_layer(const model_rank *r, int64_t layer)
{
    const llama_config *config = &r->m->layout->config;
    upipe_layer l;
    memset(&l, 0, sizeof l);
    l.plan = &r->m->plan;
    l.id = layer + 1; /* as an attention layer's */
    l.wq = model_weight(r, config->q_rank > 0 ? LLAMA_Q_UP : LLAMA_WQ, layer);
    l.wk = model_weight(r, LLAMA_KV_UP, layer);
    l.wo = model_weight(r, LLAMA_WO, layer);
    l.bo = model_vector(r, LLAMA_BO, layer);
    l.rope_theta = config->rope_theta;
    l.rope_rates = r->m->rates.own ? r->m->rates.value : NULL;
    l.rope_factor = r->m->rates.factor;
    l.rope_interleaved = config->pairs;
    l.scale = (float)latent_scale(config);
    l.mask.causal = 1;
    l.mask.borders.cu_seqlens = r->borders;
    l.mask.borders.cu_seqlens_n = r->borders_n;
    l.tile_rows = config->dim;
    return l;
}

/* ---- parts ---- */

static inline upipe_status latent_alloc(const attention *a, upipe_view *x, int64_t columns)
{
    const upipe_dtype dtype = a->r->m->plan.desc.dtype;
    void *data;
    UPIPE_TRY(upipe_alloc(a->r->c, &data, (size_t)(a->r->m->rows * columns) * upipe_dtype_bytes(dtype),
                          UPIPE_USE_OTHER, "latent_down"));
    *x = upipe_view_packed(data, dtype, a->r->m->rows, 1, (int32_t)columns);
    return UPIPE_OK;
}

static inline upipe_status latent_product(const attention *a, upipe_view to, upipe_view x, upipe_view y,
                                          int flags)
{
    upipe_ctx *c = a->r->c;
    const size_t bytes = c->ops->gemm_bytes(c->ops, to, x, y, flags);
    void *work;
    UPIPE_TRY(upipe_alloc(c, &work, bytes, UPIPE_USE_SCRATCH, "gemm_work"));
    UPIPE_TRY(c->ops->gemm(c, to, x, y, flags, work, bytes));
    return upipe_free(c, work);
}

static inline upipe_view latent_matrix(const attention *a, llama_kind kind)
{
    const llama_tensor *t = model_tensor(a->r, kind, a->at);
    return upipe_view_packed((void *)(uintptr_t)model_weight(a->r, kind, a->at), a->r->m->plan.desc.dtype,
                             t->rows, 1, (int32_t)t->cols);
}

/* c and kr of what the latent's projection gives. */
static inline upipe_latent_kv latent_kv(const attention *a, upipe_view kv)
{
    const llama_config *config = &a->r->m->layout->config;
    upipe_latent_kv both = {UPIPE_LATENT_AUTO, kv, kv};
    both.c.d = (int32_t)config->kv_rank;
    both.kr.data = (char *)kv.data + (size_t)config->kv_rank * upipe_dtype_bytes(kv.dtype);
    both.kr.d = config->turned_dim;
    return both;
}

/* Turns kr at the positions of the rank's tokens, or back. */
static inline upipe_status latent_turn(const attention *a, upipe_view kr, int inverse)
{
    const upipe_layer *l = &a->f.layer;
    const upipe_shard *s = &l->plan->shard;
    upipe_rope rope;
    int64_t row = 0;
    int i;
    memset(&rope, 0, sizeof rope);
    rope.count = l->plan->desc.batch;
    rope.step = l->plan->local * kr.n_stride;
    rope.pos_step = s->step;
    rope.theta = l->rope_theta;
    rope.rates = l->rope_rates;
    rope.factor = l->rope_factor;
    rope.interleaved = l->rope_interleaved;
    rope.inverse = inverse;
    for (i = 0; i < s->pieces; row += s->piece[i++].n) {
        rope.x = upipe_view_rows(kr, row, s->piece[i].n);
        rope.pos0 = s->piece[i].pos;
        UPIPE_TRY(a->r->c->ops->rope(a->r->c, &rope));
    }
    return UPIPE_OK;
}

/* ---- forward ---- */

/* *y, taken here, = x W^T + b. */
static inline upipe_status latent_project(const attention *a, upipe_view *y, upipe_view x, llama_kind matrix,
                                          llama_kind bias)
{
    const float *const b = model_vector(a->r, bias, a->at);
    const upipe_view w = latent_matrix(a, matrix);
    UPIPE_TRY(latent_alloc(a, y, w.n));
    UPIPE_TRY(latent_product(a, *y, x, w, UPIPE_GEMM_TRANS_B));
    return b != NULL ? upipe_bias_add(a->r->c, *y, b, 0) : UPIPE_OK;
}

static inline upipe_status latent_down_make(const attention *a, latent_down *d, upipe_view x)
{
    memset(d, 0, sizeof *d);
    if (a->r->m->layout->config.q_rank > 0)
        UPIPE_TRY(latent_project(a, &d->q, x, LLAMA_Q_DOWN, LLAMA_B_Q_DOWN));
    return latent_project(a, &d->kv, x, LLAMA_KV_DOWN, LLAMA_B_KV_DOWN);
}

static inline upipe_status latent_down_free(const attention *a, const latent_down *d)
{
    UPIPE_TRY(upipe_free(a->r->c, d->kv.data));
    return upipe_free(a->r->c, d->q.data);
}

/* to = what the layer reads, from the projections' results, which may be to itself. */
static inline upipe_status latent_finish(const attention *a, const latent_down *to, const latent_down *from)
{
    upipe_ctx *c = a->r->c;
    const upipe_latent_kv y = latent_kv(a, to->kv), x = latent_kv(a, from->kv);
    if (to->q.data != NULL)
        UPIPE_TRY(c->ops->rmsnorm(c, to->q, from->q, model_vector(a->r, LLAMA_Q_DOWN_NORM, a->at),
                                  LATENT_NORM_EPS));
    UPIPE_TRY(c->ops->rmsnorm(c, y.c, x.c, model_vector(a->r, LLAMA_KV_DOWN_NORM, a->at), LATENT_NORM_EPS));
    if (y.kr.data != x.kr.data) UPIPE_TRY(c->ops->cast(c, y.kr, x.kr));
    return latent_turn(a, y.kr, 0);
}

/* attention_kind.fwd */
static inline upipe_status attention_latent_fwd(attention *a, upipe_view x)
{
    latent_down d;
    upipe_latent_kv kv;
    UPIPE_TRY(latent_down_make(a, &d, x));
    UPIPE_TRY(latent_finish(a, &d, &d));
    kv = latent_kv(a, d.kv);
    UPIPE_TRY(upipe_latent_layer_fwd(a->r->c, &a->f.layer, &a->saved, d.q.data != NULL ? d.q : x, &kv));
    return latent_down_free(a, &d);
}

/* ---- backward ---- */

/* d, gradients of what the layer reads, become those of the projections' results, which are raw. */
static inline upipe_status latent_finish_bwd(const attention *a, const latent_down *d, const latent_down *raw)
{
    upipe_ctx *c = a->r->c;
    const upipe_latent_kv dy = latent_kv(a, d->kv), x = latent_kv(a, raw->kv);
    if (raw->q.data != NULL)
        UPIPE_TRY(c->ops->rmsnorm_bwd(c, d->q, d->q, raw->q, model_vector(a->r, LLAMA_Q_DOWN_NORM, a->at),
                                      LATENT_NORM_EPS, model_grad(a->r, LLAMA_Q_DOWN_NORM, a->at), 0));
    UPIPE_TRY(c->ops->rmsnorm_bwd(c, dy.c, dy.c, x.c, model_vector(a->r, LLAMA_KV_DOWN_NORM, a->at),
                                  LATENT_NORM_EPS, model_grad(a->r, LLAMA_KV_DOWN_NORM, a->at), 0));
    return latent_turn(a, dy.kr, 1);
}

/* dW += dy^T x and db += sums of dy, where they are wanted. */
static inline upipe_status latent_project_grad(const attention *a, upipe_view dy, upipe_view x,
                                               llama_kind matrix, llama_kind bias)
{
    float *const dw = model_grad(a->r, matrix, a->at), *const db = model_grad(a->r, bias, a->at);
    if (db != NULL) UPIPE_TRY(a->r->c->ops->bias_bwd(a->r->c, db, dy));
    if (dw == NULL) return UPIPE_OK;
    return latent_product(a, upipe_view_packed(dw, UPIPE_F32, dy.d, 1, x.d), dy, x,
                          UPIPE_GEMM_TRANS_A | UPIPE_GEMM_ACCUMULATE);
}

/* dx = dq Wqd, or dq itself where Q is made of x, + dkv Wkd: tile by tile in f32. */
static inline upipe_status latent_down_bwd(const attention *a, upipe_view dx, const latent_down *d)
{
    upipe_ctx *c = a->r->c;
    const int64_t most = a->f.layer.tile_rows < dx.n ? a->f.layer.tile_rows : dx.n;
    upipe_mem_tiles at = {0, 0, 0};
    void *data;
    UPIPE_TRY(upipe_alloc(c, &data, (size_t)(most * dx.d) * 4, UPIPE_USE_SCRATCH, "latent_sum"));
    while (upipe_mem_tiles_next(c->mem, &at, dx.n, most)) {
        const upipe_view sum = upipe_view_packed(data, UPIPE_F32, at.n, 1, dx.d);
        const upipe_view dq = upipe_view_rows(d->q, at.row, at.n);
        UPIPE_TRY(a->r->m->layout->config.q_rank > 0
                      ? latent_product(a, sum, dq, latent_matrix(a, LLAMA_Q_DOWN), 0)
                      : c->ops->cast(c, sum, dq));
        UPIPE_TRY(latent_product(a, sum, upipe_view_rows(d->kv, at.row, at.n),
                                 latent_matrix(a, LLAMA_KV_DOWN), UPIPE_GEMM_ACCUMULATE));
        UPIPE_TRY(c->ops->cast(c, upipe_view_rows(dx, at.row, at.n), sum));
    }
    return upipe_free(c, data);
}

/* attention_kind.bwd: x becomes its gradient. */
static inline upipe_status attention_latent_bwd(attention *a, const upipe_grads *grads, upipe_view x)
{
    const llama_config *config = &a->r->m->layout->config;
    upipe_grads own = *grads;
    latent_down raw, d;
    upipe_view read = x;
    upipe_latent_kv kv;
    own.wq = model_grad(a->r, config->q_rank > 0 ? LLAMA_Q_UP : LLAMA_WQ, a->at);
    own.wk = model_grad(a->r, LLAMA_KV_UP, a->at);
    UPIPE_TRY(latent_down_make(a, &raw, x));
    d = raw;
    UPIPE_TRY(latent_alloc(a, &d.kv, raw.kv.d));
    if (config->q_rank > 0) UPIPE_TRY(latent_alloc(a, &d.q, config->q_rank));
    UPIPE_TRY(latent_finish(a, &d, &raw));
    if (config->q_rank > 0)
        read = d.q;
    else
        UPIPE_TRY(latent_alloc(a, &d.q, x.d)); /* x is read again */
    kv = latent_kv(a, d.kv);
    UPIPE_TRY(
        upipe_latent_layer_bwd(a->r->c, &a->f.layer, d.q, &kv, &own, &a->saved, &a->saved.out, read, &kv));
    UPIPE_TRY(latent_finish_bwd(a, &d, &raw));
    UPIPE_TRY(latent_down_free(a, &raw));
    if (config->q_rank > 0) UPIPE_TRY(latent_project_grad(a, d.q, x, LLAMA_Q_DOWN, LLAMA_B_Q_DOWN));
    UPIPE_TRY(latent_project_grad(a, d.kv, x, LLAMA_KV_DOWN, LLAMA_B_KV_DOWN));
    UPIPE_TRY(latent_down_bwd(a, x, &d));
    return latent_down_free(a, &d);
}

#endif

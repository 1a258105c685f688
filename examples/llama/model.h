/* model.h -- a Llama's forward and backward on one rank, assembled from upipe's primitives
 *
 *     x = embed(tokens)
 *     each layer:  x += Wo * attention(norm(x))         upipe_layer_fwd, upipe_layer_out_fwd
 *                  x += mlp(norm(x))                    upipe_mlp_fwd
 *     losses, and backwards                             upipe_loss_bwd, upipe_mlp_bwd, upipe_layer_bwd ...
 *
 * The residual stream is one tensor, changed in place, and so is its gradient, which begins in the stream's
 * place. Before each half of a layer a copy of the stream is kept (full activation checkpointing, attention
 * and MLP apart): 2 * layers tensors. The backward fetches them from the last to the first and computes all
 * else again. They wait in the pool, or with `offload` in a second one: host memory, on a GPU.
 *
 * A rank holds the tokens of its plan's shard of every sequence, and a whole copy of the weights. The plan
 * alone knows which method it is.
 */
#ifndef LLAMA_MODEL_H
#define LLAMA_MODEL_H

#include "upipe/upipe.h"
#include "../common/device.h"
#include "config.h"

/* Phases of the pool after those of the attention block, whose own calls set 0 to UPIPE_PHASE_OTHER. */
enum {
    MODEL_EMBED = UPIPE_PHASE_OTHER + 1,
    MODEL_MLP_FWD,
    MODEL_LOSS,
    MODEL_MLP_BWD,
    MODEL_UPDATE,
    MODEL_PHASES
};

static const char *const model_phase_names[] = {"embed", "mlp_fwd", "loss", "mlp_bwd", "update"};

/* Numbers alone. */
typedef struct model {
    const llama_layout *layout;
    upipe_plan plan;   /* of one rank */
    size_t tile_bytes; /* of MLP and loss; 0 = the library's default */
    int offload;
} model;

/* One rank. grads are there in training alone. */
typedef struct model_rank {
    const model *m;
    upipe_ctx *c;
    upipe_mem *host; /* where the kept copies of the stream wait; c->mem without offload */
    const void *weights;
    const float *gains;
    float *grads[2]; /* of the weights group and of the gains group */
    int32_t *tokens, *targets;
    float *losses;
    void **kept;    /* [2 * layers] */
    device *device; /* whose copies go beside the stream of c; NULL: they go in it */
} model_rank;

/* The plan of one rank: the model says how many heads there are and how large, desc everything else. */
__attribute__((unused)) static upipe_status model_init(model *m, const llama_layout *layout,
                                                       const upipe_plan_desc *desc, upipe_err *e)
{
    const llama_config *c = &layout->config;
    upipe_plan_desc d = *desc;
    memset(m, 0, sizeof *m);
    m->layout = layout;
    d.model_dim = c->dim;
    d.heads = c->heads;
    d.kv_heads = c->kv_heads;
    d.head_dim = c->head_dim;
    return upipe_plan_init(&m->plan, &d, e);
}

/* Ranks of the run, of all teams and rings, and this one of them: neighbours are a team. */
__attribute__((unused)) static int model_world(const model *m)
{
    return m->plan.desc.ranks * m->plan.desc.ring;
}

__attribute__((unused)) static int model_world_rank(const model *m)
{
    return m->plan.desc.ring_rank * m->plan.desc.ranks + m->plan.desc.rank;
}

/* ---- a layer's parts, as the library describes them ---- */

static const llama_tensor *model_tensor(const model_rank *r, llama_kind kind, int64_t layer)
{
    return llama_find(r->m->layout, kind, layer);
}

static const void *model_weight(const model_rank *r, llama_kind kind, int64_t layer)
{
    return (const char *)r->weights +
           (size_t)model_tensor(r, kind, layer)->at * upipe_dtype_bytes(r->m->plan.desc.dtype);
}

static const float *model_gain(const model_rank *r, llama_kind kind, int64_t layer)
{
    return r->gains + model_tensor(r, kind, layer)->at;
}

static float *model_grad(const model_rank *r, llama_kind kind, int64_t layer)
{
    const llama_tensor *t = model_tensor(r, kind, layer);
    return r->grads[t->is_gain] + t->at;
}

/* The head's matrix is the embedding table where they are tied. */
static llama_kind model_head_kind(const model_rank *r)
{
    return r->m->layout->config.tied ? LLAMA_EMBED : LLAMA_HEAD;
}

static upipe_layer model_attention_layer(const model_rank *r, int64_t layer)
{
    const llama_config *config = &r->m->layout->config;
    upipe_layer l;
    memset(&l, 0, sizeof l);
    l.plan = &r->m->plan;
    l.wq = model_weight(r, LLAMA_WQ, layer);
    l.wk = model_weight(r, LLAMA_WK, layer);
    l.wv = model_weight(r, LLAMA_WV, layer);
    l.wo = model_weight(r, LLAMA_WO, layer);
    l.rope_theta = config->rope_theta;
    l.window = config->window;
    l.tile_rows = config->dim;
    if (config->qk_norm) {
        l.q_gain = model_gain(r, LLAMA_QNORM, layer);
        l.k_gain = model_gain(r, LLAMA_KNORM, layer);
        l.norm_eps = (float)config->norm_eps;
    }
    return l;
}

static upipe_grads model_attention_grads(const model_rank *r, int64_t layer)
{
    upipe_grads g;
    memset(&g, 0, sizeof g);
    g.wq = model_grad(r, LLAMA_WQ, layer);
    g.wk = model_grad(r, LLAMA_WK, layer);
    g.wv = model_grad(r, LLAMA_WV, layer);
    g.wo = model_grad(r, LLAMA_WO, layer);
    if (r->m->layout->config.qk_norm) {
        g.q_gain = model_grad(r, LLAMA_QNORM, layer);
        g.k_gain = model_grad(r, LLAMA_KNORM, layer);
    }
    return g;
}

static upipe_mlp model_mlp(const model_rank *r, int64_t layer)
{
    upipe_mlp m;
    memset(&m, 0, sizeof m);
    m.w_gate = model_weight(r, LLAMA_GATE, layer);
    m.w_up = model_weight(r, LLAMA_UP, layer);
    m.w_down = model_weight(r, LLAMA_DOWN, layer);
    m.gain = model_gain(r, LLAMA_NORM2, layer);
    m.norm_eps = (float)r->m->layout->config.norm_eps;
    m.hidden = r->m->layout->config.hidden;
    m.residual = 1;
    m.tile_bytes = r->m->tile_bytes;
    return m;
}

static upipe_head model_head(const model_rank *r)
{
    upipe_head h;
    memset(&h, 0, sizeof h);
    h.w = model_weight(r, model_head_kind(r), -1);
    h.gain = model_gain(r, LLAMA_NORM, -1);
    h.norm_eps = (float)r->m->layout->config.norm_eps;
    h.vocab = r->m->layout->config.vocab;
    h.tile_bytes = r->m->tile_bytes;
    return h;
}

/* ---- blocks of the pool ---- */

/* A tensor [rows][D] of the storage type. */
static upipe_status model_take(const model_rank *r, upipe_view *x, const char *tag)
{
    const upipe_plan *p = &r->m->plan;
    void *data;
    UPIPE_TRY(upipe_mem_take(r->c->mem, &data, upipe_plan_unit_bytes(p), tag, &r->c->err));
    *x = upipe_view_packed(data, p->desc.dtype, p->rows, 1, (int32_t)p->desc.model_dim);
    return UPIPE_OK;
}

static upipe_status model_give(const model_rank *r, upipe_view x)
{
    return upipe_mem_give(r->c->mem, x.data, &r->c->err);
}

static const char *model_phase_name(int phase)
{
    return phase < MODEL_EMBED ? upipe_phase_name(phase) : model_phase_names[phase - MODEL_EMBED];
}

static void model_phase(const model_rank *r, int phase)
{
    upipe_mem_phase(r->c->mem, phase, model_phase_name(phase));
}

/* Keeps a copy of the stream as number i. */
static upipe_status model_keep(model_rank *r, int64_t i, upipe_view x)
{
    size_t bytes = upipe_plan_unit_bytes(&r->m->plan);
    UPIPE_TRY(upipe_mem_take(r->host, &r->kept[i], bytes, "kept", &r->c->err));
    if (r->device != NULL && r->host != r->c->mem)
        return device_copy_start(r->device, r->c, r->kept[i], x.data, bytes);
    return r->c->ops->copy(r->c, r->kept[i], x.data, bytes);
}

/* The stream may be written again: copies of it have been made. */
static upipe_status model_kept(model_rank *r)
{
    return r->device != NULL && r->host != r->c->mem ? device_copy_wait(r->device, r->c) : UPIPE_OK;
}

/* The copy again, as a block of the rank's own pool; x gives the shape. */
static upipe_status model_fetch(model_rank *r, int64_t i, upipe_view *x)
{
    if (r->host == r->c->mem) {
        x->data = r->kept[i];
    } else {
        UPIPE_TRY(model_take(r, x, "fetched"));
        UPIPE_TRY(r->c->ops->copy(r->c, x->data, r->kept[i], upipe_plan_unit_bytes(&r->m->plan)));
        UPIPE_TRY(upipe_mem_give(r->host, r->kept[i], &r->c->err));
    }
    r->kept[i] = NULL;
    return UPIPE_OK;
}

/* ---- forward ---- */

static upipe_status model_attention_fwd(model_rank *r, int64_t layer, upipe_view x, int keep)
{
    upipe_ctx *c = r->c;
    upipe_layer l = model_attention_layer(r, layer);
    upipe_saved saved;
    upipe_view n, y;
    UPIPE_TRY(model_take(r, &n, "normed"));
    UPIPE_TRY(
        c->ops->rmsnorm(c, n, x, model_gain(r, LLAMA_NORM1, layer), (float)r->m->layout->config.norm_eps));
    UPIPE_TRY(upipe_layer_fwd(c, &l, &saved, n));
    UPIPE_TRY(model_give(r, n));
    UPIPE_TRY(model_take(r, &y, "attended"));
    UPIPE_TRY(upipe_layer_out_fwd(c, &l, y, &saved));
    UPIPE_TRY(upipe_saved_free(c, &saved));
    if (keep) UPIPE_TRY(model_kept(r));
    UPIPE_TRY(c->ops->add(c, x, y));
    return model_give(r, y);
}

static upipe_status model_mlp_fwd(model_rank *r, int64_t layer, upipe_view x)
{
    upipe_mlp m = model_mlp(r, layer);
    upipe_status s;
    model_phase(r, MODEL_MLP_FWD);
    s = upipe_mlp_fwd(r->c, &m, x, x);
    model_phase(r, UPIPE_PHASE_OTHER);
    return s;
}

/* x, taken here, becomes the stream after the last layer. With keep nonzero the copies for the backward are
 * kept. */
__attribute__((unused)) static upipe_status model_fwd(model_rank *r, upipe_view *x, int keep)
{
    const llama_config *config = &r->m->layout->config;
    upipe_view table = upipe_view_packed((void *)(uintptr_t)model_weight(r, LLAMA_EMBED, -1),
                                         r->m->plan.desc.dtype, config->vocab, 1, (int32_t)config->dim);
    int64_t i;
    model_phase(r, MODEL_EMBED);
    UPIPE_TRY(model_take(r, x, "stream"));
    UPIPE_TRY(r->c->ops->embed(r->c, *x, table, r->tokens));
    model_phase(r, UPIPE_PHASE_OTHER);
    for (i = 0; i < config->layers; ++i) {
        if (keep) UPIPE_TRY(model_keep(r, 2 * i, *x));
        UPIPE_TRY(model_attention_fwd(r, i, *x, keep));
        if (keep) UPIPE_TRY(model_keep(r, 2 * i + 1, *x));
        if (keep) UPIPE_TRY(model_kept(r));
        UPIPE_TRY(model_mlp_fwd(r, i, *x));
    }
    return UPIPE_OK;
}

/* ---- loss and backward ---- */

/* The stream becomes the gradient of scale times the sum of the losses. */
static upipe_status model_loss_bwd(model_rank *r, upipe_view x, float scale)
{
    upipe_head h = model_head(r);
    upipe_head_grads g;
    upipe_status s;
    g.w = model_grad(r, model_head_kind(r), -1);
    g.gain = model_grad(r, LLAMA_NORM, -1);
    h.scale = scale;
    model_phase(r, MODEL_LOSS);
    s = upipe_loss_bwd(r->c, &h, x, &g, r->losses, x, r->targets);
    model_phase(r, UPIPE_PHASE_OTHER);
    return s;
}

/* g, the gradient of the half's result, becomes that of its input; so too below. */
static upipe_status model_mlp_bwd(model_rank *r, int64_t layer, upipe_view g)
{
    upipe_mlp m = model_mlp(r, layer);
    upipe_mlp_grads grads;
    upipe_view x = g;
    upipe_status s;
    grads.w_gate = model_grad(r, LLAMA_GATE, layer);
    grads.w_up = model_grad(r, LLAMA_UP, layer);
    grads.w_down = model_grad(r, LLAMA_DOWN, layer);
    grads.gain = model_grad(r, LLAMA_NORM2, layer);
    model_phase(r, MODEL_MLP_BWD);
    UPIPE_TRY(model_fetch(r, 2 * layer + 1, &x));
    s = upipe_mlp_bwd(r->c, &m, g, &grads, g, x);
    model_phase(r, UPIPE_PHASE_OTHER);
    return s == UPIPE_OK ? model_give(r, x) : s;
}

static upipe_status model_attention_bwd(model_rank *r, int64_t layer, upipe_view g)
{
    upipe_ctx *c = r->c;
    const float eps = (float)r->m->layout->config.norm_eps, *gain = model_gain(r, LLAMA_NORM1, layer);
    upipe_layer l = model_attention_layer(r, layer);
    upipe_grads grads = model_attention_grads(r, layer);
    upipe_saved saved;
    upipe_view x = g, n;
    UPIPE_TRY(model_fetch(r, 2 * layer, &x));
    UPIPE_TRY(model_take(r, &n, "normed"));
    UPIPE_TRY(c->ops->rmsnorm(c, n, x, gain, eps));
    UPIPE_TRY(upipe_layer_fwd(c, &l, &saved, n));
    UPIPE_TRY(upipe_layer_out_bwd(c, &l, &grads, &saved, g)); /* O becomes dO; g goes on down the stream */
    UPIPE_TRY(upipe_layer_bwd(c, &l, n, &grads, &saved, &saved.out, n));
    UPIPE_TRY(upipe_saved_free(c, &saved));
    UPIPE_TRY(c->ops->rmsnorm_bwd(c, g, n, x, gain, eps, model_grad(r, LLAMA_NORM1, layer), 1));
    UPIPE_TRY(model_give(r, n));
    return model_give(r, x);
}

/* model_bwd -- after model_fwd with keep: losses, and the gradients of scale times their sum over this rank's
 *              tokens, += into grads; x goes back to the pool */
__attribute__((unused)) static upipe_status model_bwd(model_rank *r, upipe_view x, float scale)
{
    const llama_config *config = &r->m->layout->config;
    upipe_view table =
        upipe_view_packed(model_grad(r, LLAMA_EMBED, -1), UPIPE_F32, config->vocab, 1, (int32_t)config->dim);
    int64_t i;
    UPIPE_TRY(model_loss_bwd(r, x, scale));
    for (i = config->layers; i-- > 0;) {
        UPIPE_TRY(model_mlp_bwd(r, i, x));
        UPIPE_TRY(model_attention_bwd(r, i, x));
    }
    UPIPE_TRY(r->c->ops->embed_bwd(r->c, table, x, r->tokens));
    return model_give(r, x);
}

/* model_logits -- f32 logits [n][vocab] of n rows of the stream, in the device's memory */
__attribute__((unused)) static upipe_status model_logits(model_rank *r, upipe_view logits, upipe_view x)
{
    const llama_config *config = &r->m->layout->config;
    upipe_ctx *c = r->c;
    upipe_view w = upipe_view_packed((void *)(uintptr_t)model_weight(r, model_head_kind(r), -1), x.dtype,
                                     config->vocab, 1, (int32_t)config->dim);
    upipe_view n = upipe_view_packed(NULL, x.dtype, x.n, 1, x.d);
    size_t bytes = c->ops->gemm_bytes(c->ops, logits, n, w, UPIPE_GEMM_TRANS_B);
    void *work;
    UPIPE_TRY(
        upipe_mem_take(c->mem, &n.data, (size_t)(x.n * x.d) * upipe_dtype_bytes(x.dtype), "normed", &c->err));
    UPIPE_TRY(upipe_mem_take(c->mem, &work, bytes, "logits_work", &c->err));
    UPIPE_TRY(c->ops->rmsnorm(c, n, x, model_gain(r, LLAMA_NORM, -1), (float)config->norm_eps));
    UPIPE_TRY(c->ops->gemm(c, logits, n, w, UPIPE_GEMM_TRANS_B, work, bytes));
    UPIPE_TRY(upipe_mem_give(c->mem, work, &c->err));
    return upipe_mem_give(c->mem, n.data, &c->err);
}

#endif

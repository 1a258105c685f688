/* model.h -- a Llama's forward and backward on one rank, assembled from upipe's primitives
 *
 *     x = embed(tokens)
 *     each layer:  x += Wo * attention(norm(x))         upipe_layer_fwd, upipe_layer_out_fwd
 *                  x += mlp(norm(x))                    upipe_mlp_fwd
 *     losses, and backwards                             upipe_loss_bwd, upipe_mlp_bwd, upipe_layer_bwd ...
 *
 * The residual stream is one tensor, changed in place, and so is its gradient, which begins in the stream's
 * place. The forward keeps copies of the stream between layers: activations.h says which, and in which pool. The
 * backward goes from the last to the first and computes all else again, each layer's attention before its
 * MLP's backward.
 *
 * Weights and their gradients come in units, half a layer each (config.h): model_weights_begin and
 * model_grads_begin bring one, and nothing reads a unit that has not begun.
 *
 * A rank holds the tokens of its plan's shard of every sequence. The plan alone knows which method it is, but for one
 * thing: model_cut cuts the sequence into segments. Then a rank's rows are those of its shards of the segments, one
 * segment after the other, the attention half is that of upipe_fpdt.h, and what it parks is in the second pool too.
 */
#ifndef LLAMA_MODEL_H
#define LLAMA_MODEL_H

#include "upipe/upipe.h"
#include "activations.h"
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

/* Kinds of units: of each, one at a time is used. */
enum { MODEL_UNIT_EMBED, MODEL_UNIT_ATTENTION, MODEL_UNIT_MLP, MODEL_UNIT_HEAD, MODEL_UNITS };

/* Numbers alone. */
typedef struct model {
    const llama_layout *layout;
    upipe_plan plan;   /* of one rank */
    upipe_fpdt fpdt;   /* its description and segments; 0 segments: the sequence is not cut */
    int64_t rows;      /* of this rank, of all sequences */
    size_t tile_bytes; /* of MLP and loss; 0 = the library's default */
    activations_setting activations;
    int zero;           /* stage: what is sharded over the ranks */
    int prefetch;       /* stage 3: the next unit's weights are gathered while one is used */
    upipe_dtype reduce; /* in which gradients are sent to be summed */
} model;

/* One rank. Gradients are there in training alone. */
typedef struct model_rank {
    const model *m;
    upipe_ctx *c;
    upipe_mem *second; /* the second pool */
    activations kept;
    upipe_zero *zero;                 /* of the weights group */
    const void *weights[MODEL_UNITS]; /* of the unit of each kind that has begun */
    float *grads[MODEL_UNITS];
    const float *vectors;
    float *vector_grads;
    int32_t *tokens, *targets;
    float *losses;
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
    UPIPE_TRY(upipe_plan_init(&m->plan, &d, e));
    m->rows = m->plan.rows;
    return UPIPE_OK;
}

/* model_cut -- after model_init: the sequence in so many segments; 0: none
 *   errors  those of upipe_fpdt_plan: more segments than tokens for every rank, a ring
 */
__attribute__((unused)) static upipe_status model_cut(model *m, int segments, upipe_err *e)
{
    upipe_plan first;
    int i;
    if (segments == 0) return UPIPE_OK;
    m->fpdt.desc = m->plan.desc;
    m->fpdt.segments = segments;
    UPIPE_TRY(upipe_fpdt_plan(&m->fpdt, 0, &first, e));
    for (i = 0, m->rows = 0; i < segments; ++i)
        m->rows += upipe_fpdt_shard(&m->fpdt, i).n * m->plan.desc.batch;
    return UPIPE_OK;
}

/* Parts that a rank's rows are in, [part][batch][tokens of the part]: segments, or one. */
static int model_parts(const model *m)
{
    return m->fpdt.segments > 0 ? m->fpdt.segments : 1;
}

/* Positions of a part's tokens. */
static upipe_shard model_shard(const model *m, int part)
{
    return m->fpdt.segments > 0 ? upipe_fpdt_shard(&m->fpdt, part) : m->plan.shard;
}

/* The position of a row of a sequence alone. */
__attribute__((unused)) static int64_t model_position(const model *m, int64_t row)
{
    upipe_shard s = model_shard(m, 0);
    int part = 0;
    while (row >= s.n) {
        row -= s.n;
        s = model_shard(m, ++part);
    }
    return upipe_shard_pos(&s, row);
}

/* Bytes of one tensor of the stream. */
__attribute__((unused)) static size_t model_unit(const model *m)
{
    return (size_t)(m->rows * m->plan.desc.model_dim) * upipe_dtype_bytes(m->plan.desc.dtype);
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

/* The head's matrix is the embedding table where they are tied. */
static llama_kind model_head_kind(const model_rank *r)
{
    return r->m->layout->config.tied ? LLAMA_EMBED : LLAMA_HEAD;
}

static int model_unit_of(const model_rank *r, llama_kind kind, int64_t layer)
{
    return model_tensor(r, kind, layer)->unit;
}

static int model_unit_kind(const model_rank *r, int unit)
{
    if (unit == 0) return MODEL_UNIT_EMBED;
    if (unit > 2 * r->m->layout->config.layers) return MODEL_UNIT_HEAD;
    return unit % 2 != 0 ? MODEL_UNIT_ATTENTION : MODEL_UNIT_MLP;
}

/* The unit's weights can be read, by model_weight, until model_weights_end. Those of unit `next`, whose turn is next, may
 * be gathered meanwhile; -1: it is not known. */
static upipe_status model_weights_begin(model_rank *r, int unit, int next)
{
    UPIPE_TRY(upipe_zero_weights_begin(r->c, r->zero, unit, &r->weights[model_unit_kind(r, unit)]));
    return next >= 0 ? upipe_zero_ahead(r->c, r->zero, next) : UPIPE_OK;
}

/* The first unit that the forward of a layer reads; behind the last layer the head. */
static int model_unit_above(const model_rank *r, int64_t layer)
{
    return layer < r->m->layout->config.layers ? model_unit_of(r, LLAMA_WQ, layer)
                                               : model_unit_of(r, model_head_kind(r), -1);
}

/* The first unit that the backward of the layers below this one reads: of the layer below, or of the first layer of its
 * block, which runs again; -1: none. */
static int model_unit_below(const model_rank *r, int64_t layer)
{
    if (--layer < 0) return -1;
    while (r->kept.layer[layer].x == NULL) --layer;
    return model_unit_of(r, LLAMA_WQ, layer);
}

static upipe_status model_weights_end(model_rank *r, int unit)
{
    const void **w = &r->weights[model_unit_kind(r, unit)];
    UPIPE_TRY(upipe_zero_weights_end(r->c, r->zero, *w));
    *w = NULL;
    return UPIPE_OK;
}

/* Gradients can be added to the unit's, by model_grad, until model_grads_end. */
static upipe_status model_grads_begin(model_rank *r, int unit)
{
    return upipe_zero_grads_begin(r->c, r->zero, unit, &r->grads[model_unit_kind(r, unit)]);
}

/* The same for the head, the first unit that ends: the largest one, and it takes no block. */
static upipe_status model_grads_first(model_rank *r, int unit)
{
    return upipe_zero_grads_first(r->c, r->zero, unit, &r->grads[model_unit_kind(r, unit)]);
}

static upipe_status model_grads_end(model_rank *r, int unit)
{
    float **g = &r->grads[model_unit_kind(r, unit)];
    UPIPE_TRY(upipe_zero_grads_end(r->c, r->zero, unit, *g));
    *g = NULL;
    return UPIPE_OK;
}

static const void *model_weight(const model_rank *r, llama_kind kind, int64_t layer)
{
    const llama_tensor *t = model_tensor(r, kind, layer);
    return (const char *)r->weights[model_unit_kind(r, t->unit)] +
           (size_t)(t->at - r->m->layout->first[t->unit]) * upipe_dtype_bytes(r->m->plan.desc.dtype);
}

static const float *model_vector(const model_rank *r, llama_kind kind, int64_t layer)
{
    return r->vectors + model_tensor(r, kind, layer)->at;
}

static float *model_grad(const model_rank *r, llama_kind kind, int64_t layer)
{
    const llama_tensor *t = model_tensor(r, kind, layer);
    return t->is_vector ? r->vector_grads + t->at
                        : r->grads[model_unit_kind(r, t->unit)] + (t->at - r->m->layout->first[t->unit]);
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
    l.mask.causal = 1;
    l.mask.window = config->window;
    l.tile_rows = config->dim;
    if (config->qk_norm) {
        l.q_norm_weight = model_vector(r, LLAMA_QNORM, layer);
        l.k_norm_weight = model_vector(r, LLAMA_KNORM, layer);
        l.norm_eps = (float)config->norm_eps;
    }
    if (config->attention_bias != LLAMA_BIAS_NONE) {
        l.bq = model_vector(r, LLAMA_BQ, layer);
        l.bk = model_vector(r, LLAMA_BK, layer);
        l.bv = model_vector(r, LLAMA_BV, layer);
    }
    if (config->attention_bias == LLAMA_BIAS_QKVO) l.bo = model_vector(r, LLAMA_BO, layer);
    return l;
}

static upipe_grads model_attention_grads(const model_rank *r, int64_t layer)
{
    const llama_config *config = &r->m->layout->config;
    upipe_grads g;
    memset(&g, 0, sizeof g);
    g.wq = model_grad(r, LLAMA_WQ, layer);
    g.wk = model_grad(r, LLAMA_WK, layer);
    g.wv = model_grad(r, LLAMA_WV, layer);
    g.wo = model_grad(r, LLAMA_WO, layer);
    if (config->qk_norm) {
        g.q_norm_weight = model_grad(r, LLAMA_QNORM, layer);
        g.k_norm_weight = model_grad(r, LLAMA_KNORM, layer);
    }
    if (config->attention_bias != LLAMA_BIAS_NONE) {
        g.bq = model_grad(r, LLAMA_BQ, layer);
        g.bk = model_grad(r, LLAMA_BK, layer);
        g.bv = model_grad(r, LLAMA_BV, layer);
    }
    if (config->attention_bias == LLAMA_BIAS_QKVO) g.bo = model_grad(r, LLAMA_BO, layer);
    return g;
}

static upipe_mlp model_mlp(const model_rank *r, int64_t layer)
{
    upipe_mlp m;
    memset(&m, 0, sizeof m);
    m.w_gate = model_weight(r, LLAMA_GATE, layer);
    m.w_up = model_weight(r, LLAMA_UP, layer);
    m.w_down = model_weight(r, LLAMA_DOWN, layer);
    m.norm_weight = model_vector(r, LLAMA_NORM2, layer);
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
    h.norm_weight = model_vector(r, LLAMA_NORM, -1);
    h.norm_eps = (float)r->m->layout->config.norm_eps;
    h.vocab = r->m->layout->config.vocab;
    h.tile_bytes = r->m->tile_bytes;
    return h;
}

/* ---- blocks of the pool ---- */

/* A tensor [n][D] of the storage type, of n rows. */
static upipe_status model_alloc_rows(const model_rank *r, upipe_mem *mem, upipe_view *x, int64_t n,
                                     const char *tag)
{
    const upipe_plan_desc *d = &r->m->plan.desc;
    void *data;
    UPIPE_TRY(upipe_mem_alloc(mem, &data, (size_t)(n * d->model_dim) * upipe_dtype_bytes(d->dtype), tag,
                              &r->c->err));
    *x = upipe_view_packed(data, d->dtype, n, 1, (int32_t)d->model_dim);
    return UPIPE_OK;
}

/* One of all the rank's rows. */
static upipe_status model_alloc(const model_rank *r, upipe_view *x, const char *tag)
{
    return model_alloc_rows(r, r->c->mem, x, r->m->rows, tag);
}

static upipe_status model_free_block(const model_rank *r, upipe_view x)
{
    return upipe_mem_free(r->c->mem, x.data, &r->c->err);
}

static const char *model_phase_name(int phase)
{
    return phase < MODEL_EMBED ? upipe_phase_name(phase) : model_phase_names[phase - MODEL_EMBED];
}

static void model_phase(const model_rank *r, int phase)
{
    upipe_mem_phase(r->c->mem, phase, model_phase_name(phase));
}

/* dst = src, of which one is in the second pool. */
static upipe_status model_copy(model_rank *r, upipe_view dst, upipe_view src)
{
    r->kept.moved += (int64_t)activations_bytes(src);
    return r->c->ops->copy(r->c, dst.data, src.data, activations_bytes(src));
}

/* The gradient of the stream waits in the second pool: begins the copy. */
static upipe_status model_grad_put(model_rank *r, void **there, upipe_view g)
{
    *there = NULL;
    if (!r->m->activations.grad) return UPIPE_OK;
    return activations_put(&r->kept, r->c, there, g.data, activations_bytes(g), "stream");
}

/* It is there, and nowhere else. */
static upipe_status model_grad_leave(model_rank *r, const void *there, upipe_view g)
{
    if (there == NULL) return UPIPE_OK;
    UPIPE_TRY(activations_wait(&r->kept, r->c));
    return model_free_block(r, g);
}

/* It is back. */
static upipe_status model_grad_fetch(model_rank *r, void *there, upipe_view *g)
{
    if (there == NULL) return UPIPE_OK;
    UPIPE_TRY(model_alloc(r, g, "stream"));
    UPIPE_TRY(activations_copy(&r->kept, r->c, g->data, there, activations_bytes(*g)));
    UPIPE_TRY(activations_wait(&r->kept, r->c));
    return upipe_mem_free(r->kept.second, there, &r->c->err);
}

/* ---- the norm, and sums, of what may be in the second pool ---- */

/* y += x, which lies in the second pool if it is `away`. */
static upipe_status model_add(model_rank *r, upipe_view y, upipe_view x, int away)
{
    activations_tiles t;
    UPIPE_TRY(activations_tiles_begin(&r->kept, r->c, &t, x, away, NULL));
    while (t.tile.n > 0) {
        UPIPE_TRY(r->c->ops->add(r->c, upipe_view_rows(y, t.row, t.tile.n), t.tile));
        UPIPE_TRY(activations_tiles_next(&r->kept, r->c, &t));
    }
    return activations_tiles_end(r->c, &t);
}

/* n = the attention half's norm of x; the same with `away`. */
static upipe_status model_norm(model_rank *r, int64_t layer, upipe_view n, upipe_view x, int away)
{
    activations_tiles t;
    UPIPE_TRY(activations_tiles_begin(&r->kept, r->c, &t, x, away, n.data));
    while (t.tile.n > 0) {
        UPIPE_TRY(r->c->ops->rmsnorm(r->c, upipe_view_rows(n, t.row, t.tile.n), t.tile,
                                     model_vector(r, LLAMA_NORM1, layer),
                                     (float)r->m->layout->config.norm_eps));
        UPIPE_TRY(activations_tiles_next(&r->kept, r->c, &t));
    }
    return activations_tiles_end(r->c, &t);
}

/* g += the gradient dn through this norm of x. */
static upipe_status model_norm_bwd(model_rank *r, int64_t layer, upipe_view g, upipe_view dn, upipe_view x,
                                   int away)
{
    activations_tiles t;
    UPIPE_TRY(activations_tiles_begin(&r->kept, r->c, &t, x, away, NULL));
    while (t.tile.n > 0) {
        UPIPE_TRY(r->c->ops->rmsnorm_bwd(
            r->c, upipe_view_rows(g, t.row, t.tile.n), upipe_view_rows(dn, t.row, t.tile.n), t.tile,
            model_vector(r, LLAMA_NORM1, layer), (float)r->m->layout->config.norm_eps,
            model_grad(r, LLAMA_NORM1, layer), 1));
        UPIPE_TRY(activations_tiles_next(&r->kept, r->c, &t));
    }
    return activations_tiles_end(r->c, &t);
}

/* ---- the attention half in segments ---- */

static upipe_fpdt model_segments(model_rank *r, int64_t layer)
{
    upipe_fpdt f = r->m->fpdt;
    f.layer = model_attention_layer(r, layer);
    f.host = r->second;
    return f;
}

/* A tensor's rows of segment i. */
static upipe_view model_segment(model_rank *r, upipe_view x, int i)
{
    const int64_t batch = r->m->plan.desc.batch;
    int64_t first = 0;
    int k;
    for (k = 0; k < i; ++k) first += model_shard(r->m, k).n * batch;
    return upipe_view_rows(x, first, model_shard(r->m, i).n * batch);
}

/* normed, in the second pool, from x; which lies there too where `away` says so. */
static upipe_status model_segments_norm(model_rank *r, int64_t layer, upipe_view normed, upipe_view x,
                                        int away)
{
    int i;
    for (i = 0; i < model_parts(r->m); ++i) {
        upipe_view from = model_segment(r, x, i), n;
        UPIPE_TRY(model_alloc_rows(r, r->c->mem, &n, from.n, "normed"));
        UPIPE_TRY(model_norm(r, layer, n, from, away));
        UPIPE_TRY(model_copy(r, model_segment(r, normed, i), n));
        UPIPE_TRY(model_free_block(r, n));
    }
    return UPIPE_OK;
}

/* Segment i of the slots in the second pool, to or from those in the rank's own. */
static upipe_status model_segment_slots(model_rank *r, const upipe_fpdt *f, const upipe_plan *p, int i,
                                        char *grads_at_tokens, const upipe_slots *slots, int back)
{
    upipe_ctx *c = r->c;
    const size_t slot = upipe_fpdt_out_bytes(f) / (size_t)f->segments / (size_t)p->stages;
    int stage;
    for (stage = 0; stage < p->stages; ++stage) {
        char *there = grads_at_tokens + (size_t)(i * p->stages + stage) * slot;
        char *here = (char *)slots->data + (size_t)stage * slots->slot_bytes;
        const size_t bytes =
            upipe_plan_rows_bytes(p, upipe_plan_buffer(p, UPIPE_A2A_Q, stage), p->desc.v_dim);
        r->kept.moved += (int64_t)bytes;
        UPIPE_TRY(c->ops->copy(c, back ? there : here, back ? here : there, bytes));
    }
    return UPIPE_OK;
}

/* Segment i of the forward's result, in the rank's own pool, as the output projection reads it. */
static upipe_status model_segment_begin(model_rank *r, const upipe_fpdt *f, int i, upipe_plan *p,
                                        upipe_layer *l, upipe_saved *out, const upipe_fpdt_saved *saved)
{
    UPIPE_TRY(upipe_fpdt_plan(f, i, p, &r->c->err));
    *l = f->layer;
    l->plan = p;
    UPIPE_TRY(upipe_slots_alloc(r->c, l->plan, &out->out, UPIPE_SLOT_FULL, "final_out"));
    out->lse = (float *)(void *)saved->out; /* is not read; NULL would mean consumed */
    out->delta = NULL;
    return model_segment_slots(r, f, p, i, saved->out, &out->out, 0);
}

/* y = O * Wo^T of segment i, a new block of the rank's own pool. */
static upipe_status model_segment_out_fwd(model_rank *r, const upipe_fpdt *f, int i, upipe_view *y,
                                          const upipe_fpdt_saved *saved)
{
    upipe_ctx *c = r->c;
    upipe_saved out;
    upipe_layer l;
    upipe_plan p;
    UPIPE_TRY(model_segment_begin(r, f, i, &p, &l, &out, saved));
    UPIPE_TRY(model_alloc_rows(r, c->mem, y, p.rows, "attended"));
    UPIPE_TRY(upipe_layer_out_fwd(c, &l, *y, &out));
    return upipe_mem_free(c->mem, out.out.data, &c->err);
}

/* x += O * Wo^T, segment by segment. */
static upipe_status model_segments_out_fwd(model_rank *r, const upipe_fpdt *f, upipe_view x,
                                           const upipe_fpdt_saved *saved)
{
    int i;
    for (i = 0; i < f->segments; ++i) {
        upipe_view y;
        UPIPE_TRY(model_segment_out_fwd(r, f, i, &y, saved));
        UPIPE_TRY(r->c->ops->add(r->c, model_segment(r, x, i), y));
        UPIPE_TRY(model_free_block(r, y));
    }
    return UPIPE_OK;
}

/* into, in the second pool = x + O * Wo^T: what the MLP reads; x, away as above. */
static upipe_status model_segments_between(model_rank *r, const upipe_fpdt *f, upipe_view into, upipe_view x,
                                           const upipe_fpdt_saved *saved, int away)
{
    int i;
    for (i = 0; i < f->segments; ++i) {
        upipe_view y;
        UPIPE_TRY(model_segment_out_fwd(r, f, i, &y, saved));
        UPIPE_TRY(model_add(r, y, model_segment(r, x, i), away));
        UPIPE_TRY(model_copy(r, model_segment(r, into, i), y));
        UPIPE_TRY(model_free_block(r, y));
    }
    return UPIPE_OK;
}

/* O in the second pool becomes its gradient, from that of the half's result; and delta. */
static upipe_status model_segments_out_bwd(model_rank *r, const upipe_fpdt *f, upipe_grads *grads,
                                           upipe_fpdt_saved *saved, upipe_view g)
{
    upipe_ctx *c = r->c;
    const size_t each = upipe_fpdt_delta_bytes(f) / (size_t)f->segments;
    void *delta;
    int i;
    UPIPE_TRY(upipe_mem_alloc(r->second, &delta, each * (size_t)f->segments, "delta", &c->err));
    saved->delta = (char *)delta;
    for (i = 0; i < f->segments; ++i) {
        upipe_saved out;
        upipe_layer l;
        upipe_plan p;
        size_t bytes;
        UPIPE_TRY(model_segment_begin(r, f, i, &p, &l, &out, saved));
        UPIPE_TRY(upipe_layer_out_bwd(c, &l, grads, &out, model_segment(r, g, i)));
        UPIPE_TRY(model_segment_slots(r, f, &p, i, saved->out, &out.out, 1));
        bytes = upipe_plan_buffers(&p).delta;
        r->kept.moved += (int64_t)bytes;
        UPIPE_TRY(c->ops->copy(c, saved->delta + (size_t)i * each, out.delta, bytes));
        UPIPE_TRY(upipe_mem_free(c->mem, out.delta, &c->err));
        UPIPE_TRY(upipe_mem_free(c->mem, out.out.data, &c->err));
    }
    return UPIPE_OK;
}

/* g += the gradient through the norm, of which gnormed is in the second pool; x, away as above. */
static upipe_status model_segments_norm_bwd(model_rank *r, int64_t layer, upipe_view g, upipe_view gnormed,
                                            upipe_view x, int away)
{
    int i;
    for (i = 0; i < model_parts(r->m); ++i) {
        upipe_view from = model_segment(r, x, i), n;
        UPIPE_TRY(model_alloc_rows(r, r->c->mem, &n, from.n, "normed"));
        UPIPE_TRY(model_copy(r, n, model_segment(r, gnormed, i)));
        UPIPE_TRY(model_norm_bwd(r, layer, model_segment(r, g, i), n, from, away));
        UPIPE_TRY(model_free_block(r, n));
    }
    return UPIPE_OK;
}

/* What attention has offloaded stays where it is kept. */
static upipe_status model_segments_fwd(model_rank *r, int64_t layer, upipe_view x, int keep_attention)
{
    upipe_ctx *c = r->c;
    const int unit = model_unit_of(r, LLAMA_WQ, layer), mlp = model_unit_of(r, LLAMA_GATE, layer);
    upipe_fpdt f;
    upipe_fpdt_saved saved;
    upipe_view n;
    UPIPE_TRY(model_weights_begin(r, unit, mlp));
    f = model_segments(r, layer);
    UPIPE_TRY(model_alloc_rows(r, r->second, &n, r->m->rows, "normed"));
    UPIPE_TRY(model_segments_norm(r, layer, n, x, 0));
    UPIPE_TRY(upipe_fpdt_fwd(c, &f, &saved, n.data));
    UPIPE_TRY(upipe_mem_free(r->second, n.data, &c->err));
    UPIPE_TRY(activations_wait(&r->kept, c));
    UPIPE_TRY(model_segments_out_fwd(r, &f, x, &saved));
    UPIPE_TRY(model_weights_end(r, unit));
    if (keep_attention) {
        r->kept.layer[layer].fpdt = saved;
        return UPIPE_OK;
    }
    r->kept.moved += saved.moved;
    return upipe_fpdt_free(&f, &saved, &c->err);
}

/* ---- forward ---- */

static upipe_status model_attention_fwd(model_rank *r, int64_t layer, upipe_view x, int keep_attention)
{
    upipe_ctx *c = r->c;
    const int unit = model_unit_of(r, LLAMA_WQ, layer), mlp = model_unit_of(r, LLAMA_GATE, layer);
    upipe_layer l;
    upipe_saved saved;
    upipe_view n, y;
    UPIPE_TRY(model_weights_begin(r, unit, mlp));
    l = model_attention_layer(r, layer);
    UPIPE_TRY(model_alloc(r, &n, "normed"));
    UPIPE_TRY(model_norm(r, layer, n, x, 0));
    UPIPE_TRY(upipe_layer_fwd(c, &l, &saved, n));
    UPIPE_TRY(model_free_block(r, n));
    if (keep_attention) UPIPE_TRY(activations_keep_attention(&r->kept, c, layer, l.plan, &saved));
    UPIPE_TRY(model_alloc(r, &y, "attended"));
    UPIPE_TRY(upipe_layer_out_fwd(c, &l, y, &saved));
    UPIPE_TRY(activations_wait(&r->kept, c)); /* copies of O and x are made */
    UPIPE_TRY(upipe_saved_free(c, &saved));
    UPIPE_TRY(c->ops->add(c, x, y));
    UPIPE_TRY(model_free_block(r, y));
    return model_weights_end(r, unit);
}

static upipe_status model_mlp_fwd(model_rank *r, int64_t layer, upipe_view x)
{
    const int unit = model_unit_of(r, LLAMA_GATE, layer);
    upipe_mlp m;
    model_phase(r, MODEL_MLP_FWD);
    UPIPE_TRY(model_weights_begin(r, unit, model_unit_above(r, layer + 1)));
    m = model_mlp(r, layer);
    UPIPE_TRY(upipe_mlp_fwd(r->c, &m, x, x));
    UPIPE_TRY(model_weights_end(r, unit));
    model_phase(r, UPIPE_PHASE_OTHER);
    return UPIPE_OK;
}

/* One layer: x, of which copies may be being made, becomes its result. */
static upipe_status model_layer_fwd(model_rank *r, int64_t layer, upipe_view x, int keep_attention)
{
    UPIPE_TRY(r->m->fpdt.segments > 0 ? model_segments_fwd(r, layer, x, keep_attention)
                                      : model_attention_fwd(r, layer, x, keep_attention));
    return model_mlp_fwd(r, layer, x);
}

/* x, taken here, becomes the stream after the last layer. With keep nonzero the backward's copies are kept. */
__attribute__((unused)) static upipe_status model_fwd(model_rank *r, upipe_view *x, int keep)
{
    const llama_config *config = &r->m->layout->config;
    const int unit = model_unit_of(r, LLAMA_EMBED, -1);
    upipe_view table;
    int64_t i;
    model_phase(r, MODEL_EMBED);
    UPIPE_TRY(model_alloc(r, x, "stream"));
    UPIPE_TRY(model_weights_begin(r, unit, model_unit_above(r, 0)));
    table = upipe_view_packed((void *)(uintptr_t)model_weight(r, LLAMA_EMBED, -1), r->m->plan.desc.dtype,
                              config->vocab, 1, (int32_t)config->dim);
    UPIPE_TRY(r->c->ops->embed(r->c, *x, table, r->tokens));
    UPIPE_TRY(model_weights_end(r, unit));
    model_phase(r, UPIPE_PHASE_OTHER);
    for (i = 0; i < config->layers; ++i) {
        const activations_row row = activations_of(&r->m->activations, i);
        if (keep && row.x) UPIPE_TRY(activations_keep_x(&r->kept, r->c, i, *x, row.away));
        UPIPE_TRY(model_layer_fwd(r, i, *x, keep && row.attention));
    }
    return UPIPE_OK;
}

/* ---- loss and backward ---- */

/* The stream becomes the gradient of scale times the sum of the losses. The gradient of a tied embedding goes on to
 * model_embed_bwd, so that its sums are the same however gradients are held. */
static upipe_status model_loss_bwd(model_rank *r, upipe_view x, float scale)
{
    const int unit = model_unit_of(r, model_head_kind(r), -1), tied = r->m->layout->config.tied;
    upipe_head h;
    upipe_head_grads g;
    model_phase(r, MODEL_LOSS);
    UPIPE_TRY(tied ? model_grads_begin(r, unit) : model_grads_first(r, unit));
    UPIPE_TRY(model_weights_begin(r, unit, model_unit_below(r, r->m->layout->config.layers)));
    h = model_head(r);
    g.w = model_grad(r, model_head_kind(r), -1);
    g.norm_weight = model_grad(r, LLAMA_NORM, -1);
    h.scale = scale;
    UPIPE_TRY(upipe_loss_bwd(r->c, &h, x, &g, r->losses, x, r->targets));
    UPIPE_TRY(model_weights_end(r, unit));
    if (!tied) UPIPE_TRY(model_grads_end(r, unit));
    model_phase(r, UPIPE_PHASE_OTHER);
    return UPIPE_OK;
}

/* The gradient of the embedding from g, that of the first layer's input, whose block goes back to the pool. Where a rank
 * holds no whole gradient until now, and in segments little else, g waits in the second pool and is read by tiles. */
static upipe_status model_embed_bwd(model_rank *r, upipe_view g)
{
    const llama_config *config = &r->m->layout->config;
    const int unit = model_unit_of(r, LLAMA_EMBED, -1);
    const int away = r->m->fpdt.segments > 0 && r->zero->stage >= 2 && !config->tied;
    activations_tiles t;
    upipe_view table;
    if (away) {
        void *there;
        UPIPE_TRY(activations_put(&r->kept, r->c, &there, g.data, activations_bytes(g), "stream"));
        UPIPE_TRY(model_grad_leave(r, there, g));
        g.data = there;
    }
    if (!config->tied) UPIPE_TRY(model_grads_begin(r, unit));
    table =
        upipe_view_packed(model_grad(r, LLAMA_EMBED, -1), UPIPE_F32, config->vocab, 1, (int32_t)config->dim);
    UPIPE_TRY(activations_tiles_begin(&r->kept, r->c, &t, g, away, NULL));
    while (t.tile.n > 0) {
        UPIPE_TRY(r->c->ops->embed_bwd(r->c, table, t.tile, r->tokens + t.row));
        UPIPE_TRY(activations_tiles_next(&r->kept, r->c, &t));
    }
    UPIPE_TRY(activations_tiles_end(r->c, &t));
    UPIPE_TRY(upipe_mem_free(away ? r->second : r->c->mem, g.data, &r->c->err));
    return model_grads_end(r, unit);
}

/* g, the gradient of the MLP half's result, becomes that of its input x, which is as model_add's. */
static upipe_status model_mlp_bwd(model_rank *r, int64_t layer, upipe_view g, upipe_view x, int away)
{
    const int unit = model_unit_of(r, LLAMA_GATE, layer);
    upipe_mlp m;
    upipe_mlp_grads grads;
    activations_tiles t;
    model_phase(r, MODEL_MLP_BWD);
    UPIPE_TRY(model_weights_begin(r, unit, model_unit_below(r, layer)));
    UPIPE_TRY(model_grads_begin(r, unit));
    m = model_mlp(r, layer);
    grads.w_gate = model_grad(r, LLAMA_GATE, layer);
    grads.w_up = model_grad(r, LLAMA_UP, layer);
    grads.w_down = model_grad(r, LLAMA_DOWN, layer);
    grads.norm_weight = model_grad(r, LLAMA_NORM2, layer);
    UPIPE_TRY(activations_tiles_begin(&r->kept, r->c, &t, x, away, NULL));
    while (t.tile.n > 0) {
        upipe_view rows = upipe_view_rows(g, t.row, t.tile.n);
        UPIPE_TRY(upipe_mlp_bwd(r->c, &m, rows, &grads, rows, t.tile));
        UPIPE_TRY(activations_tiles_next(&r->kept, r->c, &t));
    }
    UPIPE_TRY(activations_tiles_end(r->c, &t));
    UPIPE_TRY(model_weights_end(r, unit));
    UPIPE_TRY(model_grads_end(r, unit));
    model_phase(r, UPIPE_PHASE_OTHER);
    return UPIPE_OK;
}

/* The kept x of a layer, as a view; `like` gives the shape. */
static upipe_view model_kept_x(const model_rank *r, int64_t layer, upipe_view like)
{
    like.data = r->kept.layer[layer].x;
    return like;
}

/* A layer's backward: *g, the gradient of its result, becomes that of its input. One block is in turn the
 * norm's result, what the MLP reads, the norm's result again, and its gradient: so no hole is left. */
static upipe_status model_layer_bwd(model_rank *r, int64_t layer, upipe_view *g)
{
    upipe_ctx *c = r->c;
    const int away = r->kept.layer[layer].away;
    const upipe_view x = model_kept_x(r, layer, *g);
    const int unit = model_unit_of(r, LLAMA_WQ, layer), mlp = model_unit_of(r, LLAMA_GATE, layer);
    upipe_layer l;
    upipe_grads grads;
    upipe_saved saved;
    upipe_view n;
    void *there;
    UPIPE_TRY(model_weights_begin(r, unit, mlp));
    l = model_attention_layer(r, layer);
    UPIPE_TRY(model_alloc(r, &n, "normed"));
    if (r->kept.layer[layer].out != NULL) {
        UPIPE_TRY(activations_fetch_attention(&r->kept, c, layer, l.plan, &saved));
    } else {
        UPIPE_TRY(model_norm(r, layer, n, x, away));
        UPIPE_TRY(upipe_layer_fwd(c, &l, &saved, n));
    }
    UPIPE_TRY(upipe_layer_out_fwd(c, &l, n, &saved));
    UPIPE_TRY(model_add(r, n, x, away));
    UPIPE_TRY(model_mlp_bwd(r, layer, *g, n, 0));
    UPIPE_TRY(model_grads_begin(r, unit));
    grads = model_attention_grads(r, layer);
    UPIPE_TRY(model_grad_put(r, &there, *g));
    UPIPE_TRY(upipe_layer_out_bwd(c, &l, &grads, &saved, *g)); /* O becomes dO; g goes on down the stream */
    UPIPE_TRY(model_grad_leave(r, there, *g));
    UPIPE_TRY(model_norm(r, layer, n, x, away));
    UPIPE_TRY(upipe_layer_bwd(c, &l, n, &grads, &saved, &saved.out, n));
    UPIPE_TRY(upipe_saved_free(c, &saved));
    UPIPE_TRY(model_grad_fetch(r, there, g));
    UPIPE_TRY(model_norm_bwd(r, layer, *g, n, x, away));
    UPIPE_TRY(model_free_block(r, n));
    UPIPE_TRY(model_weights_end(r, unit));
    return model_grads_end(r, unit);
}

/* The same in segments, whose block is in the second pool. */
static upipe_status model_segments_bwd(model_rank *r, int64_t layer, upipe_view *g)
{
    upipe_ctx *c = r->c;
    const int away = r->kept.layer[layer].away;
    const upipe_view x = model_kept_x(r, layer, *g);
    const int unit = model_unit_of(r, LLAMA_WQ, layer), mlp = model_unit_of(r, LLAMA_GATE, layer);
    upipe_fpdt f;
    upipe_grads grads;
    upipe_fpdt_saved saved = r->kept.layer[layer].fpdt;
    upipe_view n;
    void *there;
    UPIPE_TRY(model_weights_begin(r, unit, mlp));
    f = model_segments(r, layer);
    UPIPE_TRY(model_alloc_rows(r, r->second, &n, r->m->rows, "normed"));
    if (saved.out == NULL) {
        UPIPE_TRY(model_segments_norm(r, layer, n, x, away));
        UPIPE_TRY(upipe_fpdt_fwd(c, &f, &saved, n.data));
    }
    memset(&r->kept.layer[layer].fpdt, 0, sizeof saved); /* freed below */
    UPIPE_TRY(model_segments_between(r, &f, n, x, &saved, away));
    UPIPE_TRY(model_mlp_bwd(r, layer, *g, n, 1));
    UPIPE_TRY(model_grads_begin(r, unit));
    grads = model_attention_grads(r, layer);
    UPIPE_TRY(model_segments_norm(r, layer, n, x, away));
    UPIPE_TRY(model_grad_put(r, &there, *g));
    UPIPE_TRY(model_segments_out_bwd(r, &f, &grads, &saved, *g));
    UPIPE_TRY(model_grad_leave(r, there, *g));
    UPIPE_TRY(upipe_fpdt_bwd(c, &f, n.data, &grads, &saved, saved.out, n.data));
    r->kept.moved += saved.moved;
    UPIPE_TRY(upipe_fpdt_free(&f, &saved, &c->err));
    UPIPE_TRY(model_grad_fetch(r, there, g));
    UPIPE_TRY(model_segments_norm_bwd(r, layer, *g, n, x, away));
    UPIPE_TRY(upipe_mem_free(r->second, n.data, &c->err));
    UPIPE_TRY(model_weights_end(r, unit));
    return model_grads_end(r, unit);
}

/* The layers of a block from its first one, whose x is kept, to the last: keeps the x of those that follow, and
 * attention's O and lse of all but the last. */
static upipe_status model_block_fwd(model_rank *r, int64_t last, upipe_view *g)
{
    upipe_ctx *c = r->c;
    int64_t first = last;
    upipe_view x;
    void *there;
    while (r->kept.layer[first].x == NULL) --first;
    UPIPE_TRY(model_grad_put(r, &there, *g));
    UPIPE_TRY(model_grad_leave(r, there, *g));
    UPIPE_TRY(model_alloc(r, &x, "stream"));
    UPIPE_TRY(activations_copy(&r->kept, c, x.data, r->kept.layer[first].x, activations_bytes(x)));
    UPIPE_TRY(activations_wait(&r->kept, c));
    for (; first < last; ++first) {
        UPIPE_TRY(model_layer_fwd(r, first, x, 1));
        UPIPE_TRY(activations_keep_x(&r->kept, c, first + 1, x, 1));
    }
    UPIPE_TRY(activations_wait(&r->kept, c));
    UPIPE_TRY(model_free_block(r, x));
    return model_grad_fetch(r, there, g);
}

/* model_bwd -- after model_fwd with keep: losses, and the gradients of scale times their sum over this rank's
 *              tokens, += into grads; x goes back to the pool */
__attribute__((unused)) static upipe_status model_bwd(model_rank *r, upipe_view x, float scale)
{
    int64_t i;
    UPIPE_TRY(model_loss_bwd(r, x, scale));
    for (i = r->m->layout->config.layers; i-- > 0;) {
        if (r->kept.layer[i].x == NULL) UPIPE_TRY(model_block_fwd(r, i, &x));
        UPIPE_TRY(r->m->fpdt.segments > 0 ? model_segments_bwd(r, i, &x) : model_layer_bwd(r, i, &x));
        UPIPE_TRY(activations_drop(&r->kept, r->c, i));
    }
    return model_embed_bwd(r, x);
}

/* model_logits -- f32 logits [n][vocab] of n rows of the stream, in the device's memory; the head's weights have begun */
__attribute__((unused)) static upipe_status model_logits(model_rank *r, upipe_view logits, upipe_view x)
{
    const llama_config *config = &r->m->layout->config;
    upipe_ctx *c = r->c;
    upipe_view w = upipe_view_packed((void *)(uintptr_t)model_weight(r, model_head_kind(r), -1), x.dtype,
                                     config->vocab, 1, (int32_t)config->dim);
    upipe_view n = upipe_view_packed(NULL, x.dtype, x.n, 1, x.d);
    size_t bytes = c->ops->gemm_bytes(c->ops, logits, n, w, UPIPE_GEMM_TRANS_B);
    void *work;
    UPIPE_TRY(upipe_mem_alloc(c->mem, &n.data, (size_t)(x.n * x.d) * upipe_dtype_bytes(x.dtype), "normed",
                              &c->err));
    UPIPE_TRY(upipe_mem_alloc(c->mem, &work, bytes, "logits_work", &c->err));
    UPIPE_TRY(c->ops->rmsnorm(c, n, x, model_vector(r, LLAMA_NORM, -1), (float)config->norm_eps));
    UPIPE_TRY(c->ops->gemm(c, logits, n, w, UPIPE_GEMM_TRANS_B, work, bytes));
    UPIPE_TRY(upipe_mem_free(c->mem, work, &c->err));
    return upipe_mem_free(c->mem, n.data, &c->err);
}

#endif

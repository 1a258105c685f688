/* model.h -- a Llama on one rank: its numbers, what the rank has of it, and which tokens
 *
 *     x = embed(tokens)
 *     each layer:  x += Wo * attention(norm(x))         forward.h, attention.h
 *                  x += mlp(norm(x))
 *     losses, and backwards                             backward.h
 *
 * The residual stream is one tensor, changed in place, and so is its gradient, which begins in the stream's
 * place. The forward keeps copies of the stream between layers: activations.h says which, and in which pool. The
 * backward goes from the last to the first and computes all else again, each layer's attention before its
 * MLP's backward.
 *
 * A rank holds the tokens of its plan's shard of every sequence. The plan alone knows which method it is, but for one
 * thing: model_cut cuts the sequence into segments. Then a rank's rows are those of its shards of the segments, one
 * segment after the other, and attention (attention.h) and what it parks are in the second pool too.
 */
#ifndef LLAMA_MODEL_H
#define LLAMA_MODEL_H

#include "upipe/upipe.h"
#include "activations.h"
#include "layout.h"
#include "rope.h"

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
    upipe_plan plan;        /* of one rank */
    upipe_fpdt fpdt;        /* its description and segments; 0 segments: the sequence is not cut */
    int64_t rows;           /* of this rank, of all sequences */
    llama_rates rates;      /* of RoPE, for the tokens of the plan */
    upipe_linear_ops rules; /* of linear attention, the device's */
    size_t tile_bytes;      /* of MLP and loss; 0 = the library's default */
    activations_setting activations;
    int zero;              /* stage: what is sharded over the ranks */
    int prefetch;          /* stage 3: the next unit's weights are gathered while one is used */
    upipe_dtype reduce;    /* in which gradients are sent to be summed */
    int offload_weights;   /* stage 3: weights are in the second pool, and gathered from there */
    int offload_optimizer; /* the optimizer's states, and gradients that are sharded, are in the second pool */
    int64_t accumulate;    /* micro-batches of a step */
    int replicas,
        replica; /* groups of ranks with sequences of their own, and which of them this rank is in */
    const int64_t *
        borders; /* cu_seqlens that a dry run counts with, of each micro-batch, one behind the other; NULL: none */
    int64_t borders_n; /* of one micro-batch, [borders_n + 1] */
    /* Borders of packed documents, for whose chunks linear attention has scratch; NULL: there are none */
    upipe_borders capacity;
} model;

/* One rank. Gradients are there in training alone. */
typedef struct model_rank {
    const model *m;
    upipe_ctx *c;
    upipe_mem *second; /* the second pool */
    activations kept;
    upipe_zero *zero, *frozen;           /* of the weights groups: what is trained, and what is frozen */
    const void *weights[2][MODEL_UNITS]; /* of the unit of each kind that has begun: trained, frozen */
    float *grads[MODEL_UNITS];
    void *merged
        [MODEL_UNITS]; /* matrices of the unit that have adapters, with these; NULL: there are none (lora.h) */
    float *adapted_grads[MODEL_UNITS];
    const float *stored[2];  /* the vectors that are trained and saved: trained, frozen */
    float *shifted[2];       /* 1 + these, of a family whose norms multiply by that; NULL: of another */
    const float *vectors[2]; /* those of both that layers read */
    float *vector_grads;
    int32_t *tokens, *targets;
    const int64_t *borders; /* cu_seqlens of the micro-batch's packed documents; NULL: none */
    int64_t borders_n;
    float *losses;
} model_rank;

/* The plan of one rank: the model says how many heads there are and how large, desc everything else. */
static inline upipe_status model_init(model *m, const llama_layout *layout, const upipe_plan_desc *desc,
                                      upipe_err *e)
{
    const llama_config *c = &layout->config;
    upipe_plan_desc d = *desc;
    memset(m, 0, sizeof *m);
    m->layout = layout;
    d.model_dim = c->dim;
    d.heads = c->heads;
    d.kv_heads = c->kv_heads;
    d.head_dim = c->head_dim;
    d.v_dim = c->v_dim;
    UPIPE_TRY(upipe_plan_init(&m->plan, &d, e));
    m->rows = m->plan.rows;
    m->accumulate = 1;
    m->replicas = 1;
    llama_rates_make(&m->rates, c, d.tokens);
    return UPIPE_OK;
}

/* model_cut -- after model_init: the sequence in so many segments; 0: none
 *   errors  those of upipe_fpdt_plan: more segments than tokens for every rank, a ring
 */
static inline upipe_status model_cut(model *m, int segments, upipe_err *e)
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
static inline int model_parts(const model *m)
{
    return m->fpdt.segments > 0 ? m->fpdt.segments : 1;
}

/* Positions of a part's tokens. */
static inline upipe_shard model_shard(const model *m, int part)
{
    return m->fpdt.segments > 0 ? upipe_fpdt_shard(&m->fpdt, part) : m->plan.shard;
}

/* The position of a row of a sequence alone. */
static inline int64_t model_position(const model *m, int64_t row)
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
static inline size_t model_unit(const model *m)
{
    return (size_t)(m->rows * m->plan.desc.model_dim) * upipe_dtype_bytes(m->plan.desc.dtype);
}

/* Ranks that share a sequence. */
static inline int model_sharers(const model *m)
{
    return m->plan.desc.ranks * m->plan.desc.ring;
}

/* Ranks of the run, of all teams, rings and replicas, and this one of them: neighbours are a team, and replicas follow
 * one another. */
static inline int model_world(const model *m)
{
    return m->replicas * model_sharers(m);
}

static inline int model_world_rank(const model *m)
{
    return m->replica * model_sharers(m) + m->plan.desc.ring_rank * m->plan.desc.ranks + m->plan.desc.rank;
}

/* A tensor's rows of part i. */
static inline upipe_view model_part(const model *m, upipe_view x, int i)
{
    const int64_t batch = m->plan.desc.batch;
    int64_t first = 0;
    int k;
    for (k = 0; k < i; ++k) first += model_shard(m, k).n * batch;
    return upipe_view_rows(x, first, model_shard(m, i).n * batch);
}

/* ---- blocks of the pool ---- */

/* A tensor [n][D] of the storage type, of n rows. */
static inline upipe_status model_alloc_rows(const model_rank *r, upipe_mem *mem, upipe_view *x, int64_t n,
                                            int use, const char *tag)
{
    const upipe_plan_desc *d = &r->m->plan.desc;
    void *data;
    UPIPE_TRY(upipe_mem_alloc(mem, &data, (size_t)(n * d->model_dim) * upipe_dtype_bytes(d->dtype), use, tag,
                              &r->c->err));
    *x = upipe_view_packed(data, d->dtype, n, 1, (int32_t)d->model_dim);
    return UPIPE_OK;
}

/* One of all the rank's rows. */
static inline upipe_status model_alloc(const model_rank *r, upipe_view *x, int use, const char *tag)
{
    return model_alloc_rows(r, r->c->mem, x, r->m->rows, use, tag);
}

static inline upipe_status model_free_block(const model_rank *r, upipe_view x)
{
    return upipe_mem_free(r->c->mem, x.data, &r->c->err);
}

static inline const char *model_phase_name(int phase)
{
    return phase < MODEL_EMBED ? upipe_phase_name(phase) : model_phase_names[phase - MODEL_EMBED];
}

static inline void model_phase(const model_rank *r, int phase)
{
    upipe_mem_phase(r->c->mem, phase, model_phase_name(phase));
}

/* dst = src, of which one is in the second pool. */
static inline upipe_status model_copy(model_rank *r, upipe_view dst, upipe_view src)
{
    r->kept.moved += (int64_t)activations_bytes(src);
    return r->c->ops->copy(r->c, dst.data, src.data, activations_bytes(src));
}

#endif

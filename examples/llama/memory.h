/* memory.h -- what a rank's pool holds over a training step: in closed form, and by a dry run
 *
 *     memory_plan plan;
 *     memory_plan_make(&plan, &m, &ops, &err);              plan.peak, plan.phase[], plan.part[]: bytes
 *
 * The closed form says the live bytes of every phase; the real run must agree to the byte. The dry run, the
 * trainer's own code over a pool that only counts, says also which slab holds them (alignment, holes).
 *
 * u is one tensor of the stream, L the number of layers. In its highest moment each phase stands on what
 * always stays, the stream (or its gradient), and the 2 L kept copies: one less in the attention half of the
 * last layer, where the forward has not made the last one yet and the backward has used it up.
 */
#ifndef LLAMA_MEMORY_H
#define LLAMA_MEMORY_H

#include "trainer.h"

/* Parts of the paper's breakdown figure. */
enum {
    MEMORY_WEIGHTS,
    MEMORY_GRADIENTS,
    MEMORY_OPTIMIZER,
    MEMORY_TOKENS,
    MEMORY_CHECKPOINTS,
    MEMORY_STREAM,
    MEMORY_ATTENTION,
    MEMORY_MLP,
    MEMORY_LOSS,
    MEMORY_SUM,
    MEMORY_PARTS
};

static const char *const memory_part_names[MEMORY_PARTS] = {"weights",     "gradients", "optimizer", "tokens",
                                                            "checkpoints", "stream",    "attention", "mlp",
                                                            "loss",        "sum"};

typedef struct memory_plan {
    size_t phase[MODEL_PHASES]; /* live bytes at most */
    size_t peak;                /* the largest of them */
    size_t host;                /* the second pool: with offload, or in segments; otherwise 0 */
    size_t at_peak[MEMORY_PARTS], largest[MEMORY_PARTS];
} memory_plan;

static int memory_phase_part(int phase)
{
    return phase <= UPIPE_PHASE_OTHER                         ? MEMORY_ATTENTION
           : phase == MODEL_MLP_FWD || phase == MODEL_MLP_BWD ? MEMORY_MLP
           : phase == MODEL_LOSS                              ? MEMORY_LOSS
           : phase == MODEL_UPDATE                            ? MEMORY_SUM
                                                              : MEMORY_STREAM;
}

/* Everything that stays, by part. */
static void memory_static(size_t *part, const model *m)
{
    const llama_layout *l = m->layout;
    const upipe_plan_desc *d = &m->plan.desc;
    const int rank = model_world_rank(m), ranks = model_world(m);
    int64_t first, weights = upipe_reduce_slice(l->weights, rank, ranks, &first);
    int64_t norm_weights = upipe_reduce_slice(l->norm_weights, rank, ranks, &first);
    memset(part, 0, MEMORY_PARTS * sizeof *part);
    part[MEMORY_WEIGHTS] = (size_t)l->weights * upipe_dtype_bytes(d->dtype) + (size_t)l->norm_weights * 4;
    part[MEMORY_GRADIENTS] = (size_t)(l->weights + l->norm_weights) * 4;
    part[MEMORY_OPTIMIZER] =
        (size_t)(weights + norm_weights) * 8 + (d->dtype == UPIPE_F32 ? 0 : (size_t)weights * 4);
    part[MEMORY_TOKENS] = (size_t)m->rows * 12; /* token, target, loss */
}

/* What the attention half takes, at once. */
static void memory_attention(size_t *extra, const model *m, const upipe_layer *layer, const upipe_ops *ops)
{
    const upipe_plan *p = &m->plan;
    const upipe_buffers b = upipe_plan_buffers(p);
    const upipe_plan_scratch scratch = upipe_layer_scratch(ops, layer, 1);
    const upipe_bytes bytes = upipe_plan_bytes(p, &scratch);
    size_t u = model_unit(m), out = b.slot * (size_t)p->stages, fwd, bwd;
    memcpy(extra, bytes.phase, sizeof bytes.phase);
    extra[UPIPE_BWD_BEFORE] = u + out + b.lse + b.delta; /* the gradient of O has O's place already */
    fwd = upipe_layer_out_bytes(p, &scratch, 0);
    bwd = upipe_layer_out_bytes(p, &scratch, 1);
    if (m->offload) fwd = fwd > u ? fwd - u : 0; /* the forward has no fetched copy beside it */
    extra[UPIPE_PHASE_OTHER] = u + out + b.lse + upipe_max_bytes(fwd, bwd);
}

/* What it takes in segments; and in the second pool: the normed stream, the gradient of O, and what the
 * library parks. */
static upipe_status memory_segments(size_t *extra, size_t *host, const model *m, const upipe_layer *layer,
                                    const upipe_ops *ops, upipe_err *e)
{
    upipe_fpdt f = m->fpdt;
    size_t *other = &extra[UPIPE_PHASE_OTHER];
    upipe_bytes bytes;
    int i;
    f.layer = *layer;
    UPIPE_TRY(upipe_fpdt_bytes(&f, ops, &bytes, host, e));
    *host += model_unit(m) + upipe_fpdt_out_bytes(&f);
    memcpy(extra, bytes.phase, sizeof bytes.phase);
    for (i = 0, *other = 0; i < f.segments; ++i) {
        upipe_layer l = *layer;
        upipe_plan_scratch scratch;
        upipe_plan p;
        size_t u, out, fwd, bwd;
        UPIPE_TRY(upipe_fpdt_plan(&f, i, &p, e));
        l.plan = &p;
        scratch = upipe_layer_scratch(ops, &l, 1);
        u = upipe_plan_unit_bytes(&p);
        out = upipe_plan_buffers(&p).slot * (size_t)p.stages;
        fwd = upipe_layer_out_bytes(&p, &scratch, 0);
        bwd = upipe_layer_out_bytes(&p, &scratch, 1);
        *other = upipe_max_bytes(*other, out + upipe_max_bytes(u + fwd, bwd));
        *other = upipe_max_bytes(*other, m->offload ? 2 * u : u); /* the norm's backward: gradient and copy */
    }
    return UPIPE_OK;
}

/* Scratch and results of a phase, beyond what memory_plan_make says below; and of the second pool, but for
 * the copies. */
static upipe_status memory_scratch(size_t *extra, size_t *host, const model *m, const upipe_ops *ops,
                                   upipe_err *e)
{
    const llama_config *config = &m->layout->config;
    const upipe_dtype dtype = m->plan.desc.dtype;
    const float norm_weight[1] = {0}; /* shapes alone are asked for */
    size_t sums[2];
    upipe_layer layer;
    upipe_mlp mlp;
    upipe_head head;
    memset(&layer, 0, sizeof layer);
    layer.plan = &m->plan;
    layer.wo = norm_weight;
    layer.tile_rows = config->dim;
    layer.mask.causal = 1;
    layer.mask.window = config->window;
    layer.q_norm_weight = layer.k_norm_weight = config->qk_norm ? norm_weight : NULL;
    *host = 0;
    if (m->fpdt.segments > 0)
        UPIPE_TRY(memory_segments(extra, host, m, &layer, ops, e));
    else
        memory_attention(extra, m, &layer, ops);

    memset(&mlp, 0, sizeof mlp);
    mlp.norm_weight = norm_weight;
    mlp.hidden = config->hidden;
    mlp.tile_bytes = m->tile_bytes;
    memset(&head, 0, sizeof head);
    head.norm_weight = norm_weight;
    head.vocab = config->vocab;
    head.tile_bytes = m->tile_bytes;
    extra[MODEL_EMBED] = 0;
    UPIPE_TRY(upipe_mlp_bytes(&extra[MODEL_MLP_FWD], ops, &mlp, m->rows, config->dim, dtype, 0, e));
    UPIPE_TRY(upipe_mlp_bytes(&extra[MODEL_MLP_BWD], ops, &mlp, m->rows, config->dim, dtype, 1, e));
    UPIPE_TRY(upipe_loss_bytes(&extra[MODEL_LOSS], ops, &head, m->rows, config->dim, dtype, 1, e));
    sums[0] = upipe_reduce_bytes(m->layout->weights, model_world(m));
    sums[1] = upipe_reduce_bytes(m->layout->norm_weights, model_world(m));
    extra[MODEL_UPDATE] = upipe_max_bytes(sums[0], sums[1]);
    return UPIPE_OK;
}

/* Copies of the stream that lie in the rank's own pool in the highest moment of a phase. */
static size_t memory_copies(const model *m, int phase)
{
    size_t layers = (size_t)m->layout->config.layers;
    if (phase == MODEL_EMBED || phase == MODEL_UPDATE) return 0;
    if (m->offload && m->fpdt.segments > 0) return phase == MODEL_MLP_BWD; /* attention fetches segments */
    if (m->offload) return phase <= UPIPE_PHASE_OTHER || phase == MODEL_MLP_BWD ? 1 : 0; /* the fetched one */
    return phase <= UPIPE_PHASE_OTHER ? 2 * layers - 1 : 2 * layers;
}

/* memory_plan_make -- the closed form, for the rank of the model's plan
 *   errors  ARG where tile_bytes is too small for one row
 */
static upipe_status memory_plan_make(memory_plan *plan, const model *m, const upipe_ops *ops, upipe_err *e)
{
    size_t u = model_unit(m), extra[MODEL_PHASES], part[MEMORY_PARTS];
    int phase, k;
    memset(plan, 0, sizeof *plan);
    UPIPE_TRY(memory_scratch(extra, &plan->host, m, ops, e));
    /* segments offload most in the last layer's backward, which has used up the copy of its MLP half */
    if (m->offload) plan->host += (2 * (size_t)m->layout->config.layers - (m->fpdt.segments > 0)) * u;
    for (phase = 0; phase < MODEL_PHASES; ++phase) {
        memory_static(part, m);
        part[MEMORY_STREAM] = phase == MODEL_UPDATE ? 0 : u;
        part[MEMORY_CHECKPOINTS] = memory_copies(m, phase) * u;
        /* segments may take less than the copy of the MLP half, which is there shortly before and after it */
        if (phase == UPIPE_PHASE_OTHER && extra[phase] < u)
            part[MEMORY_CHECKPOINTS] += u;
        else
            part[memory_phase_part(phase)] += extra[phase];
        for (k = 0; k < MEMORY_PARTS; ++k) {
            plan->phase[phase] += part[k];
            plan->largest[k] = upipe_max_bytes(plan->largest[k], part[k]);
        }
        if (plan->phase[phase] <= plan->peak) continue;
        plan->peak = plan->phase[phase];
        memcpy(plan->at_peak, part, sizeof part);
    }
    return UPIPE_OK;
}

#endif

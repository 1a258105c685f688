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
    size_t host;                /* the second pool with offload, otherwise 0 */
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
    int64_t first, weights = upipe_a2a_slice(l->weights, rank, ranks, &first);
    int64_t gains = upipe_a2a_slice(l->gains, rank, ranks, &first);
    memset(part, 0, MEMORY_PARTS * sizeof *part);
    part[MEMORY_WEIGHTS] = (size_t)l->weights * upipe_dtype_bytes(d->dtype) + (size_t)l->gains * 4;
    part[MEMORY_GRADIENTS] = (size_t)(l->weights + l->gains) * 4;
    part[MEMORY_OPTIMIZER] =
        (size_t)(weights + gains) * 8 + (d->dtype == UPIPE_F32 ? 0 : (size_t)weights * 4);
    part[MEMORY_TOKENS] = (size_t)m->plan.rows * 12; /* token, target, loss */
}

/* Scratch and results of a phase, beyond what memory_parts says below. */
static upipe_status memory_scratch(size_t *extra, const model *m, const upipe_ops *ops, upipe_err *e)
{
    const llama_config *config = &m->layout->config;
    const upipe_plan *p = &m->plan;
    const upipe_buffers b = upipe_plan_buffers(p);
    size_t u = upipe_plan_unit_bytes(p), out = b.slot * (size_t)p->stages, sums[2], fwd, bwd;
    const float gain[1] = {0}; /* shapes alone are asked for */
    upipe_plan_scratch scratch;
    upipe_bytes bytes;
    upipe_layer layer;
    upipe_mlp mlp;
    upipe_head head;
    int k;
    memset(&layer, 0, sizeof layer);
    layer.plan = p;
    layer.wo = gain;
    layer.tile_rows = config->dim;
    layer.window = config->window;
    layer.q_gain = layer.k_gain = config->qk_norm ? gain : NULL;
    scratch = upipe_layer_scratch(ops, &layer, 1);
    bytes = upipe_plan_bytes(p, &scratch);
    for (k = 0; k < UPIPE_PHASES; ++k) extra[k] = bytes.phase[k];
    extra[UPIPE_BWD_BEFORE] = u + out + b.lse + b.delta; /* the gradient of O has O's place already */
    fwd = upipe_layer_out_bytes(p, &scratch, 0);
    bwd = upipe_layer_out_bytes(p, &scratch, 1);
    if (m->offload) fwd = fwd > u ? fwd - u : 0; /* the forward has no fetched copy beside it */
    extra[UPIPE_PHASE_OTHER] = u + out + b.lse + upi_most(fwd, bwd);

    memset(&mlp, 0, sizeof mlp);
    mlp.gain = gain;
    mlp.hidden = config->hidden;
    mlp.tile_bytes = m->tile_bytes;
    memset(&head, 0, sizeof head);
    head.gain = gain;
    head.vocab = config->vocab;
    head.tile_bytes = m->tile_bytes;
    extra[MODEL_EMBED] = 0;
    UPIPE_TRY(upipe_mlp_bytes(&extra[MODEL_MLP_FWD], ops, &mlp, p->rows, config->dim, p->desc.dtype, 0, e));
    UPIPE_TRY(upipe_mlp_bytes(&extra[MODEL_MLP_BWD], ops, &mlp, p->rows, config->dim, p->desc.dtype, 1, e));
    UPIPE_TRY(upipe_loss_bytes(&extra[MODEL_LOSS], ops, &head, p->rows, config->dim, p->desc.dtype, 1, e));
    sums[0] = upipe_a2a_sum_bytes(m->layout->weights, model_world(m));
    sums[1] = upipe_a2a_sum_bytes(m->layout->gains, model_world(m));
    extra[MODEL_UPDATE] = upi_most(sums[0], sums[1]);
    return UPIPE_OK;
}

/* Copies of the stream that lie in the rank's own pool in the highest moment of a phase. */
static size_t memory_copies(const model *m, int phase)
{
    size_t layers = (size_t)m->layout->config.layers;
    if (phase == MODEL_EMBED || phase == MODEL_UPDATE) return 0;
    if (m->offload) return phase <= UPIPE_PHASE_OTHER || phase == MODEL_MLP_BWD ? 1 : 0; /* the fetched one */
    return phase <= UPIPE_PHASE_OTHER ? 2 * layers - 1 : 2 * layers;
}

/* memory_plan_make -- the closed form, for the rank of the model's plan
 *   errors  ARG where tile_bytes is too small for one row
 */
static upipe_status memory_plan_make(memory_plan *plan, const model *m, const upipe_ops *ops, upipe_err *e)
{
    size_t u = upipe_plan_unit_bytes(&m->plan), extra[MODEL_PHASES], part[MEMORY_PARTS];
    int phase, k;
    memset(plan, 0, sizeof *plan);
    UPIPE_TRY(memory_scratch(extra, m, ops, e));
    for (phase = 0; phase < MODEL_PHASES; ++phase) {
        memory_static(part, m);
        part[MEMORY_STREAM] = phase == MODEL_UPDATE ? 0 : u;
        part[MEMORY_CHECKPOINTS] = memory_copies(m, phase) * u;
        part[memory_phase_part(phase)] += extra[phase];
        for (k = 0; k < MEMORY_PARTS; ++k) {
            plan->phase[phase] += part[k];
            plan->largest[k] = upi_most(plan->largest[k], part[k]);
        }
        if (plan->phase[phase] <= plan->peak) continue;
        plan->peak = plan->phase[phase];
        memcpy(plan->at_peak, part, sizeof part);
    }
    plan->host = m->offload ? 2 * (size_t)m->layout->config.layers * u : 0;
    return UPIPE_OK;
}

#endif

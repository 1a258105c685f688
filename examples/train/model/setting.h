/* setting.h -- what decides what a rank of a training holds and does, and the model of each rank
 *
 *     setting s = {&layout, how, 1, activations, tokens, 1, 1, UPIPE_BF16, 0, 3};
 *     setting_model(&m, &s, rank, &err);
 */
#ifndef LLAMA_SETTING_H
#define LLAMA_SETTING_H

#include "../../common/options.h"
#include "../../common/rules.h"
#include "model.h"
#include "plans.h"

/* how: resolved (method_resolve), of the ranks of one replica.  replicas: of those ranks, each with sequences of its own.
 * tokens: of a sequence, over all ranks of a replica.  batch: sequences of a micro-batch.  accumulate: micro-batches of a step
 * of a replica.  tile_bytes: of MLP and loss, 0 = the
 * library's default.  zero: what is sharded over the ranks, 0 nothing to 3 everything.  reduce: the type in which
 * gradients are sent to be summed.  prefetch: with zero 3 the next unit's weights are gathered ahead.  offload_optimizer,
 * offload_weights: of the matrices, as in model.  borders: of the documents that are packed into a planned step, as
 * model.borders; NULL = none */
typedef struct setting {
    const llama_layout *layout;
    method_choice how;
    int replicas;
    activations_setting activations;
    int64_t tokens, batch, accumulate;
    upipe_dtype dtype;
    size_t tile_bytes;
    int zero, prefetch;
    upipe_dtype reduce;
    int offload_optimizer, offload_weights;
    const int64_t *borders;
    int64_t borders_n;
    int device;    /* DEVICE_... */
    int attention; /* of upipe-plan, as the one below: whose kernel */
    as_choice as;
} setting;

/* What the flags say of it. */
static inline setting setting_of(const options *o, const llama_layout *layout)
{
    setting s;
    s.layout = layout;
    s.how = o->how;
    s.replicas = o->replicas > 0 ? o->replicas : 1; /* 0: of a program without the flag */
    s.how.ranks /= s.replicas;
    s.activations = o->activations;
    s.tokens = o->tokens;
    s.batch = o->batch;
    s.accumulate = o->accumulate;
    s.dtype = (upipe_dtype)o->dtype;
    s.tile_bytes = o->tile_bytes;
    s.zero = o->zero;
    s.prefetch = o->zero_prefetch;
    s.reduce = (upipe_dtype)o->reduce_dtype;
    s.offload_optimizer = o->offload_optimizer;
    s.offload_weights = o->offload_weights;
    s.borders = o->borders;
    s.borders_n = o->borders_n;
    s.device = o->device;
    s.attention = o->attention;
    s.as = o->as;
    return s;
}

/* Of all replicas. */
static inline int setting_ranks(const setting *s)
{
    return s->how.ranks * s->replicas;
}

/* What layers of linear attention do not have: their state goes from rank to rank of a team, in one sequence. A family that
 * has them has a gate of attention's output too, which is built for one part of a sequence. */
static inline upipe_status setting_linear(const setting *s, upipe_err *e)
{
    const char *const type = llama_families[s->layout->config.family].type;
    if (llama_families[s->layout->config.family].windows != LLAMA_WINDOWS_LINEAR) return UPIPE_OK;
    if (s->how.ring > 1)
        return upipe_fail(e, UPIPE_ERR_UNSUPPORTED,
                          "a ring of %d ranks: a %s has linear attention, which is built for teams alone",
                          s->how.ring, type);
    if (s->how.segments > 0)
        return upipe_fail(e, UPIPE_ERR_UNSUPPORTED,
                          "%d segments: a %s has linear attention, which is not built in segments",
                          s->how.segments, type);
    if (s->batch > 1)
        return upipe_fail(e, UPIPE_ERR_UNSUPPORTED,
                          "--batch %" PRId64
                          ": a %s has linear attention, which takes one sequence at a time; "
                          "--accumulate %" PRId64 " takes the same step",
                          s->batch, type, s->batch);
    return UPIPE_OK;
}

/* What attention of a latent does not have. */
static inline upipe_status setting_latent(const setting *s, upipe_err *e)
{
    if (s->how.segments == 0 || s->layout->config.kv_rank == 0) return UPIPE_OK;
    return upipe_fail(e, UPIPE_ERR_UNSUPPORTED,
                      "%d segments: K and V of a %s come from a latent, which is not built in segments",
                      s->how.segments, llama_families[s->layout->config.family].type);
}

/* setting_model -- of one of all ranks
 *   errors  those of model_init and model_cut; UNSUPPORTED: nothing to overlap, or what linear attention or attention of a
 *           latent does not have
 */
static inline upipe_status setting_model(model *m, const setting *s, int rank, upipe_err *e)
{
    const llama_config *c = &s->layout->config;
    upipe_plan_desc d = method_desc(&s->how, c->heads, c->kv_heads);
    method_place(&d, rank % s->how.ranks);
    d.tokens = s->tokens;
    d.batch = s->batch;
    d.dtype = s->dtype;
    UPIPE_TRY(setting_linear(s, e));
    UPIPE_TRY(setting_latent(s, e));
    UPIPE_TRY(model_init(m, s->layout, &d, e));
    UPIPE_TRY(method_overlapped(&s->how, &m->plan, e));
    UPIPE_TRY(model_cut(m, s->how.segments, e));
    rules_of(s->device, &m->rules);
    m->replicas = s->replicas;
    m->replica = rank / s->how.ranks;
    m->tile_bytes = s->tile_bytes;
    m->activations = s->activations;
    m->zero = s->zero;
    m->prefetch = s->prefetch;
    m->reduce = s->reduce;
    m->offload_optimizer = s->offload_optimizer;
    m->offload_weights = s->offload_weights;
    m->accumulate = s->accumulate;
    m->borders = s->borders;
    m->borders_n = s->borders_n;
    return UPIPE_OK;
}

#endif

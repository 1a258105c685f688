/* trainer.h -- one rank's training state in its pool, and one training step
 *
 *     trainer_open(&t, &m, &ctx, world, host);   where m.prefetch: then t.side, t.side_world
 *     trainer_alloc(&t);                      weights, gradients, optimizer: from the pool, for the whole run
 *     ... fill t.state: initial values, or a checkpoint ...
 *     trainer_step(&t, &batch, &rates, &result);
 *     trainer_free_block(&t);
 *     trainer_close(&t);
 *
 * Weights, gradients and optimizer are sharded over all ranks as model.zero says (upipe_zero.h): gradients are
 * summed over ranks into slices, each rank moves its slices of the weights, and those are gathered.
 * The loss is the mean over all valid targets of all ranks and micro-batches, however unequally these hold them: they are
 * counted before the first forward.
 *
 * With model.offload_optimizer the states of matrices lie in the second pool, and so do their gradients where they are
 * sharded, and with model.offload_weights the weights; a CPU's table updates them there (offload.h). The bits are those that its adamw gives in the rank's pool.
 *
 * A step runs model.accumulate micro-batches in turn. Where each rank holds whole gradients, their sums over micro-batches
 * are summed over ranks once, at the end; where gradients are sharded, each micro-batch's sums over ranks are added to the
 * slices.
 *
 * The model's team and ring are in the context; sums here are over all ranks, the world.
 */
#ifndef LLAMA_TRAINER_H
#define LLAMA_TRAINER_H

#include "../model/backward.h"
#include "offload.h"
#include "state.h"

/* Phases of a step whose seconds are measured. */
enum { TRAINER_FORWARD, TRAINER_BACKWARD, TRAINER_SUM, TRAINER_UPDATE, TRAINER_PHASES };

static const char *const trainer_phase_names[TRAINER_PHASES] = {"forward", "backward", "sum", "update"};

typedef struct trainer {
    model m;
    model_rank r;
    llama_state state;
    upipe_comm *world;       /* of all ranks; with one team alone that team's */
    upipe_side_stream *side; /* the model's prefetch: a stream for it alone, */
    upipe_comm *side_world;  /* and a second communicator of all ranks */
    int64_t *gathered;       /* [ranks][2] */
    double *sums;            /* [trainer_sums()], as they come from the device */
    double losses;           /* the sum of the earlier micro-batches of the step */
    const upipe_ops *host;   /* a CPU's table, for what is in the second pool */
    int timed;               /* the rank waits for its stream behind each phase, and takes the pool's time */
} trainer;

/* What a rank brings to a step: its tokens of every sequence, [micro-batch][part][batch][T], host memory. */
typedef struct trainer_batch {
    const int32_t *inputs, *targets;
    int64_t valid; /* targets >= 0; -1: this rank could not read its tokens, and no rank takes the step */
    const int64_t *
        borders; /* of packed documents, the same on all ranks: mask.borders.cu_seqlens of each micro-batch, from 0 to
                             * batch * tokens, one behind the other, until the next step; NULL: none */
    int stop; /* not 0: this rank wants to stop after the step, by a signal of this number */
} trainer_batch;

typedef struct trainer_rates {
    int64_t step;                                /* 1 for the first one */
    double rate, beta1, beta2, eps, decay, clip; /* clip 0: none */
} trainer_rates;

/* The same on all ranks. */
typedef struct trainer_result {
    double loss, norm; /* mean over the valid targets; of the gradient before clipping */
    int finite;        /* 0: loss or norm is not; nothing was updated */
    int stop;          /* some rank wants to stop: the largest of the numbers */
    int lost;          /* 1 + the first rank that could not read its tokens: nothing was done; 0: none */
    double seconds[TRAINER_PHASES]; /* where the trainer is timed: this rank's */
} trainer_result;

static inline upipe_status trainer_alloc_floats(trainer *t, upipe_mem *pool, float **out, int64_t n, int use,
                                                const char *tag)
{
    void *data;
    UPIPE_TRY(upipe_mem_alloc(pool, &data, (size_t)n * 4, use, tag, &t->r.c->err));
    *out = (float *)data;
    return UPIPE_OK;
}

/* Whether a group's states are in the second pool: vectors are few, and stay. */
static inline int trainer_away(const trainer *t, int group)
{
    return group == LLAMA_WEIGHTS && t->m.offload_optimizer;
}

/* Numbers that a step sums: two of the losses, and two of each unit's gradients. */
static inline int64_t trainer_sums(const model *m)
{
    return 2 * (1 + (int64_t)m->layout->units + LLAMA_GROUPS - 1);
}

/* trainer_open -- a rank's trainer over its pools; trainer_close frees what it needs of the host
 *   host    the second pool. Where the rank's table is not a CPU's, t->host is to be set to one before trainer_alloc
 *   errors  MEMORY; trainer_close all the same
 */
static inline upipe_status trainer_open(trainer *t, const model *m, upipe_ctx *c, upipe_comm *world,
                                        upipe_mem *host)
{
    memset(t, 0, sizeof *t);
    t->m = *m;
    t->world = world;
    t->host = c->ops;
    t->r.c = c;
    t->r.second = t->r.kept.second = host;
    t->r.kept.layer = (activations_kept *)calloc((size_t)m->layout->config.layers, sizeof *t->r.kept.layer);
    t->gathered = (int64_t *)calloc((size_t)world->ranks * 2, sizeof *t->gathered);
    t->sums = (double *)calloc((size_t)trainer_sums(m), sizeof *t->sums);
    if (t->r.kept.layer != NULL && t->gathered != NULL && t->sums != NULL) return UPIPE_OK;
    return upipe_fail(&c->err, UPIPE_ERR_MEMORY, "no host memory for the tables of a rank");
}

static inline void trainer_close(trainer *t)
{
    free(t->r.kept.layer);
    free(t->gathered);
    free(t->sums);
}

/* How the states of the weights are shared beyond their stage: norm weights are few, their sums stay f32, and here. */
static inline upipe_status trainer_share(trainer *t)
{
    const llama_layout *l = t->m.layout;
    upipe_zero *z = &t->state.zero[LLAMA_WEIGHTS];
    z->sent = t->m.reduce;
    z->offload_grads = t->m.offload_optimizer && t->m.zero >= 2;
    z->offload_weights = t->state.frozen[LLAMA_WEIGHTS].offload_weights = t->m.offload_weights;
    if (!t->m.prefetch) return UPIPE_OK;
    if (l->frozen[LLAMA_WEIGHTS] > l->weights) z = &t->state.frozen[LLAMA_WEIGHTS]; /* one of both is */
    z->side = t->side;
    z->side_world = t->side_world;
    if (t->side != NULL && t->m.zero == 3) return UPIPE_OK;
    return upipe_fail(&t->r.c->err, UPIPE_ERR_ARG,
                      "weights are gathered ahead on a side stream, with ZeRO 3");
}

/* The optimizer's states of a group. The moments are zeroed, where they are. */
static inline upipe_status trainer_alloc_states(trainer *t, int group)
{
    const int64_t n = upipe_zero_held(&t->state.zero[group], UPIPE_ZERO_STATES);
    const int away = trainer_away(t, group);
    upipe_ctx *c = t->r.c;
    const upipe_ops *ops = away ? t->host : c->ops;
    upipe_mem *pool = away ? t->r.second : c->mem;
    llama_state *state = &t->state;
    UPIPE_TRY(trainer_alloc_floats(t, pool, &state->m[group], n, UPIPE_USE_STATES, "moments"));
    UPIPE_TRY(trainer_alloc_floats(t, pool, &state->v[group], n, UPIPE_USE_STATES, "moments"));
    UPIPE_TRY(ops->zero(c, state->m[group], (size_t)n * 4));
    UPIPE_TRY(ops->zero(c, state->v[group], (size_t)n * 4));
    if (state->zero[group].dtype == UPIPE_F32) return UPIPE_OK;
    return trainer_alloc_floats(t, pool, &state->master, n, UPIPE_USE_STATES, "master");
}

static inline upipe_mem *trainer_weights_pool(const trainer *t, const upipe_zero *z)
{
    return z->offload_weights ? t->r.second : t->r.c->mem;
}

static inline upipe_status trainer_alloc_weights(trainer *t, upipe_zero *z, const char *tag)
{
    return upipe_mem_alloc(trainer_weights_pool(t, z), &z->weights,
                           (size_t)upipe_zero_held(z, UPIPE_ZERO_WEIGHTS) * upipe_dtype_bytes(z->dtype),
                           UPIPE_USE_WEIGHTS, tag, &t->r.c->err);
}

/* trainer_alloc -- blocks for all that stays over steps; t->m, world and t->r's c, second, kept are set
 *                 before
 *
 * The moments are zeroed; everything else is not defined yet.
 */
static inline upipe_status trainer_alloc(trainer *t)
{
    const upipe_dtype dtype = t->m.plan.desc.dtype;
    const size_t ids = (size_t)t->m.rows * 4; /* bytes */
    upipe_ctx *c = t->r.c;
    llama_state *state = &t->state;
    void *data;
    int group;
    llama_state_init(state, t->m.layout, dtype, t->m.zero, model_world_rank(&t->m), model_world(&t->m));
    UPIPE_TRY(trainer_share(t));
    for (group = 0; group < LLAMA_GROUPS; ++group) {
        const char *const tag = group == LLAMA_WEIGHTS ? "weights" : "vectors";
        upipe_zero *z = &state->zero[group], *frozen = &state->frozen[group];
        z->world = frozen->world = t->world;
        UPIPE_TRY(upipe_zero_check(c, z));
        UPIPE_TRY(trainer_alloc_weights(t, frozen, tag));
        UPIPE_TRY(trainer_alloc_weights(t, z, tag));
        UPIPE_TRY(trainer_alloc_floats(t, z->offload_grads ? t->r.second : c->mem, &z->grads,
                                       upipe_zero_held(z, UPIPE_ZERO_GRADS), UPIPE_USE_WEIGHT_GRAD,
                                       "gradients"));
        UPIPE_TRY(trainer_alloc_states(t, group));
    }
    UPIPE_TRY(upipe_mem_alloc(c->mem, &data, ids, UPIPE_USE_INPUT, "tokens", &c->err));
    t->r.tokens = (int32_t *)data;
    UPIPE_TRY(upipe_mem_alloc(c->mem, &data, ids, UPIPE_USE_INPUT, "tokens", &c->err));
    t->r.targets = (int32_t *)data;
    UPIPE_TRY(trainer_alloc_floats(t, c->mem, &t->r.losses, t->m.rows, UPIPE_USE_INPUT, "losses"));
    t->r.m = &t->m;
    t->r.zero = &state->zero[LLAMA_WEIGHTS];
    t->r.frozen = &state->frozen[LLAMA_WEIGHTS];
    t->r.vector_grads = state->zero[LLAMA_VECTORS].grads;
    return model_vectors_alloc(&t->r, (const float *)state->zero[LLAMA_VECTORS].weights,
                               (const float *)state->frozen[LLAMA_VECTORS].weights);
}

/* trainer_stop -- after a failure, before the pools go: nothing is gathered ahead any more */
static inline void trainer_stop(trainer *t)
{
    upipe_zero_stop(t->r.c, &t->state.zero[LLAMA_WEIGHTS]);
    upipe_zero_stop(t->r.c, &t->state.frozen[LLAMA_WEIGHTS]);
}

/* trainer_sent -- bytes that a rank has sent to others so far, in its team, its ring and the world */
static inline int64_t trainer_sent(const trainer *t)
{
    const upipe_ctx *c = t->r.c;
    return t->world->sent_bytes + (c->team != t->world ? c->team->sent_bytes : 0) +
           (c->ring != NULL ? c->ring->sent_bytes : 0) +
           (t->side_world != NULL ? t->side_world->sent_bytes : 0);
}

/* trainer_moved_states, trainer_moved -- bytes copied between the rank's two pools so far: weights, gradients and what the
 *                                        optimizer needs of them; and activations too */
static inline int64_t trainer_moved_states(const trainer *t)
{
    return t->state.zero[LLAMA_WEIGHTS].moved + t->state.frozen[LLAMA_WEIGHTS].moved;
}

static inline int64_t trainer_moved(const trainer *t)
{
    return t->r.kept.moved + trainer_moved_states(t);
}

static inline upipe_status trainer_free_block(trainer *t)
{
    const llama_state *state = &t->state;
    upipe_err *err = &t->r.c->err;
    upipe_mem *const own = t->r.c->mem;
    int group;
    for (group = 0; group < LLAMA_GROUPS; ++group) {
        const upipe_zero *z = &state->zero[group], *frozen = &state->frozen[group];
        upipe_mem *states = trainer_away(t, group) ? t->r.second : own;
        UPIPE_TRY(upipe_mem_free(trainer_weights_pool(t, z), z->weights, err));
        UPIPE_TRY(upipe_mem_free(trainer_weights_pool(t, frozen), frozen->weights, err));
        UPIPE_TRY(upipe_mem_free(z->offload_grads ? t->r.second : own, z->grads, err));
        UPIPE_TRY(upipe_mem_free(states, state->m[group], err));
        UPIPE_TRY(upipe_mem_free(states, state->v[group], err));
        if (z->dtype != UPIPE_F32) UPIPE_TRY(upipe_mem_free(states, state->master, err));
    }
    UPIPE_TRY(model_vectors_free(&t->r));
    UPIPE_TRY(upipe_free(t->r.c, t->r.tokens));
    UPIPE_TRY(upipe_free(t->r.c, t->r.targets));
    return upipe_free(t->r.c, t->r.losses);
}

static int64_t trainer_bits(double v)
{
    int64_t bits;
    memcpy(&bits, &v, sizeof bits);
    return bits;
}

/* The sum of value number i of all ranks, in rank order. */
static inline double trainer_sum(const trainer *t, int i)
{
    double sum = 0, v;
    int r;
    for (r = 0; r < t->world->ranks; ++r) {
        memcpy(&v, &t->gathered[2 * r + i], sizeof v);
        sum += v;
    }
    return sum;
}

/* The sum of n numbers, or of their squares: of long rows in sums[0], and of the rest in sums[1]. */
static inline upipe_status trainer_total(upipe_ctx *c, double *sums, float *data, int64_t n, int squares)
{
    const int64_t row = 1 << 20, rest = n % row;
    UPIPE_TRY(c->ops->total(c, sums, upipe_view_packed(data, UPIPE_F32, n / row, 1, (int32_t)row), squares));
    return c->ops->total(
        c, sums + 1,
        upipe_view_packed(data + (n - rest), UPIPE_F32, rest > 0, 1, (int32_t)(rest > 0 ? rest : row)),
        squares);
}

/* A phase ends, the next one begins. */
static inline upipe_status trainer_phase_end(trainer *t, trainer_result *result, int phase, double *since)
{
    upipe_ctx *c = t->r.c;
    double now;
    if (!t->timed) return UPIPE_OK;
    UPIPE_TRY(c->ops->sync(c));
    now = c->mem->clock(c->mem->user);
    if (phase >= 0) result->seconds[phase] += now - *since;
    *since = now;
    return UPIPE_OK;
}

/* The sums of squares of a group's slices of units. */
static inline upipe_status trainer_squares(trainer *t, int group, double *sums)
{
    const upipe_zero *z = &t->state.zero[group];
    int unit;
    for (unit = 0; unit < z->units; ++unit)
        UPIPE_TRY(trainer_total(t->r.c, sums + 2 * unit, (float *)upipe_zero_owned(z, UPIPE_ZERO_GRADS, unit),
                                upipe_zero_slice(z, unit).n, 1));
    return UPIPE_OK;
}

/* The same where the slices are in the second pool; the host has waited for them. */
static inline upipe_status trainer_squares_away(trainer *t, int group, double *sums)
{
    const upipe_ops *const own = t->r.c->ops;
    upipe_status s;
    t->r.c->ops = t->host;
    s = trainer_squares(t, group, sums);
    t->r.c->ops = own;
    return s;
}

/* The slices of the gradients are sums over ranks; what the loss and the gradient's norm are, all ranks learn. The norm's
 * squares are added up by slices of units, in order: so in every stage alike. */
static inline upipe_status trainer_reduce(trainer *t, int64_t valid, trainer_result *result)
{
    upipe_ctx *c = t->r.c;
    const size_t bytes = (size_t)trainer_sums(&t->m) * sizeof *t->sums;
    const upipe_zero *z = t->state.zero;
    double squares = 0;
    int64_t mine[2], i;
    int group;
    void *sums;
    for (group = 0; group < LLAMA_GROUPS; ++group) UPIPE_TRY(upipe_zero_grads_sum(c, &t->state.zero[group]));
    UPIPE_TRY(upipe_alloc(c, &sums, bytes, UPIPE_USE_OTHER, "sums"));
    UPIPE_TRY(trainer_total(c, (double *)sums, t->r.losses, t->m.rows, 0));
    if (!z[LLAMA_WEIGHTS].offload_grads) UPIPE_TRY(trainer_squares(t, LLAMA_WEIGHTS, (double *)sums + 2));
    UPIPE_TRY(trainer_squares(t, LLAMA_VECTORS, (double *)sums + 2 + 2 * z[LLAMA_WEIGHTS].units));
    UPIPE_TRY(c->ops->copy(c, t->sums, sums, bytes)); /* the only wait for the device */
    UPIPE_TRY(upipe_free(c, sums));
    if (z[LLAMA_WEIGHTS].offload_grads) UPIPE_TRY(trainer_squares_away(t, LLAMA_WEIGHTS, t->sums + 2));
    for (i = 2; i < trainer_sums(&t->m); i += 2) squares += t->sums[i] + t->sums[i + 1];
    mine[0] = trainer_bits(t->losses + (t->sums[0] + t->sums[1]));
    mine[1] = trainer_bits(squares);
    UPIPE_TRY(upipe_comm_all_gather(c, t->world, t->gathered, mine, 2));
    result->loss = trainer_sum(t, 0) / (double)valid;
    result->norm = sqrt(trainer_sum(t, 1));
    result->finite = isfinite(result->loss) && isfinite(result->norm);
    return UPIPE_OK;
}

/* AdamW for what this rank has of the states of a unit. Matrices decay, vectors do not. */
static inline upipe_status trainer_update_unit(trainer *t, int group, int unit, const trainer_rates *rates,
                                               double norm)
{
    upipe_zero *z = &t->state.zero[group];
    const upipe_zero_part p = upipe_zero_part_of(z, UPIPE_ZERO_STATES, unit);
    const int64_t weight = upipe_zero_sharded(z, UPIPE_ZERO_WEIGHTS) ? p.at : p.first;
    const int64_t grad = upipe_zero_sharded(z, UPIPE_ZERO_GRADS) ? p.at : p.first;
    upipe_ctx *c = t->r.c;
    upipe_adamw a;
    if (p.n == 0) return UPIPE_OK;
    memset(&a, 0, sizeof a);
    a.n = p.n;
    if (z->dtype == UPIPE_F32) {
        a.w = (float *)z->weights + weight;
    } else {
        a.w = t->state.master + p.at;
        a.copy = upipe_offset(z->weights, (size_t)weight * upipe_dtype_bytes(z->dtype));
        a.copy_dtype = z->dtype;
    }
    a.m = t->state.m[group] + p.at;
    a.v = t->state.v[group] + p.at;
    a.g = z->grads + grad;
    a.step = rates->step;
    a.rate = rates->rate;
    a.beta1 = rates->beta1;
    a.beta2 = rates->beta2;
    a.eps = rates->eps;
    a.decay = group == LLAMA_WEIGHTS ? rates->decay : 0;
    a.grad_scale = rates->clip > 0 && norm > rates->clip ? rates->clip / norm : 1;
    if (trainer_away(t, group))
        return offload_update(c, &t->r.kept, t->host, &a, !z->offload_weights, !z->offload_grads, &z->moved);
    return c->ops->adamw(c, &a);
}

static inline upipe_status trainer_update(trainer *t, const trainer_rates *rates, double norm)
{
    int group, unit;
    for (group = 0; group < LLAMA_GROUPS; ++group) {
        for (unit = 0; unit < t->state.zero[group].units; ++unit)
            UPIPE_TRY(trainer_update_unit(t, group, unit, rates, norm));
        UPIPE_TRY(upipe_zero_weights_gather(t->r.c, &t->state.zero[group]));
    }
    return UPIPE_OK;
}

/* What all ranks learn before a step: the valid targets, and whether one wants to stop, or has no tokens. Where no token
 * has a target, sums of nothing are divided by 1. */
static inline upipe_status trainer_begin(trainer *t, const trainer_batch *batch, int64_t *valid,
                                         trainer_result *result)
{
    upipe_ctx *c = t->r.c;
    const int64_t mine[2] = {batch->valid, batch->stop};
    int r;
    UPIPE_TRY(upipe_comm_all_gather(c, t->world, t->gathered, mine, 2));
    for (r = 0, *valid = 0; r < t->world->ranks; ++r) {
        *valid += t->gathered[2 * r];
        if (t->gathered[2 * r] < 0 && result->lost == 0) result->lost = r + 1;
        if (t->gathered[2 * r + 1] > result->stop) result->stop = (int)t->gathered[2 * r + 1];
    }
    if (*valid < 1) *valid = 1;
    if (result->lost) return UPIPE_OK;
    t->losses = 0;
    UPIPE_TRY(upipe_zero_grads_clear(c, &t->state.zero[LLAMA_WEIGHTS]));
    return upipe_zero_grads_clear(c, &t->state.zero[LLAMA_VECTORS]);
}

/* Micro-batch number i of the step, after the one before it: its tokens come to the device. */
static inline upipe_status trainer_tokens(trainer *t, const trainer_batch *batch, int64_t i)
{
    upipe_ctx *c = t->r.c;
    const size_t bytes = (size_t)t->m.rows * 4, at = (size_t)i * bytes;
    const int64_t end = t->m.plan.desc.tokens * t->m.plan.desc.batch;
    if (batch->borders != NULL) {
        t->r.borders = i == 0 ? batch->borders : t->r.borders + t->r.borders_n + 1;
        for (t->r.borders_n = 1; t->r.borders[t->r.borders_n] < end;) ++t->r.borders_n;
    }
    UPIPE_TRY(c->ops->copy(c, t->r.tokens, upipe_offset(batch->inputs, at), bytes));
    return c->ops->copy(c, t->r.targets, upipe_offset(batch->targets, at), bytes);
}

/* The losses of a micro-batch are summed before the next one's take their place. */
static inline upipe_status trainer_losses(trainer *t)
{
    upipe_ctx *c = t->r.c;
    void *sums;
    UPIPE_TRY(upipe_alloc(c, &sums, 2 * sizeof *t->sums, UPIPE_USE_OTHER, "sums"));
    UPIPE_TRY(trainer_total(c, (double *)sums, t->r.losses, t->m.rows, 0));
    UPIPE_TRY(c->ops->copy(c, t->sums, sums, 2 * sizeof *t->sums));
    t->losses += t->sums[0] + t->sums[1];
    return upipe_free(c, sums);
}

/* trainer_step -- forward and backward of each micro-batch, sums over ranks, AdamW; all ranks together. Each rank's
 *                 gradients are its tokens' part of those of the mean loss over all valid targets
 *   errors  those of the library
 */
static inline upipe_status trainer_step(trainer *t, const trainer_batch *batch, const trainer_rates *rates,
                                        trainer_result *result)
{
    int64_t valid, i;
    double since = 0;
    upipe_status s;
    upipe_view x;
    memset(result, 0, sizeof *result);
    UPIPE_TRY(trainer_phase_end(t, result, -1, &since));
    UPIPE_TRY(trainer_begin(t, batch, &valid, result));
    if (result->lost) return UPIPE_OK;
    for (i = 0; i < t->m.accumulate; ++i) {
        t->state.zero[LLAMA_WEIGHTS].round = (int)i;
        UPIPE_TRY(trainer_tokens(t, batch, i));
        UPIPE_TRY(model_fwd(&t->r, &x, 1));
        UPIPE_TRY(trainer_phase_end(t, result, TRAINER_FORWARD, &since));
        UPIPE_TRY(model_bwd(&t->r, x, (float)(1.0 / (double)valid)));
        if (i + 1 < t->m.accumulate) UPIPE_TRY(trainer_losses(t));
        UPIPE_TRY(trainer_phase_end(t, result, TRAINER_BACKWARD, &since));
    }
    model_phase(&t->r, MODEL_UPDATE);
    s = trainer_reduce(t, valid, result);
    if (s == UPIPE_OK) s = trainer_phase_end(t, result, TRAINER_SUM, &since);
    if (s == UPIPE_OK && result->finite) s = trainer_update(t, rates, result->norm);
    if (s == UPIPE_OK) s = trainer_phase_end(t, result, TRAINER_UPDATE, &since);
    model_phase(&t->r, UPIPE_PHASE_OTHER);
    t->r.borders = NULL; /* they are the step's */
    t->r.borders_n = 0;
    return s;
}

/* What an evaluation adds up over batches, the same on all ranks. */
typedef struct trainer_score {
    int64_t nats,
        targets;    /* the sum of the targets' losses in units of 1 / TRAINER_NAT, each rounded; how many */
    int64_t broken; /* targets whose loss is not finite, or leaves 63 bits there */
    int stop, lost; /* as in trainer_result */
} trainer_score;

enum { TRAINER_NAT = 1 << 24 };
#define TRAINER_NATS_MAX 0x1p38f /* of one loss: as a whole number it has 63 bits */

/* This rank's losses, which are on the device: their sum in whole numbers, and how many are not in it. */
static inline upipe_status trainer_nats(trainer *t, int64_t sums[2])
{
    upipe_ctx *c = t->r.c;
    float *losses = (float *)calloc((size_t)t->m.rows + 1, sizeof *losses);
    upipe_status s;
    int64_t i;
    sums[0] = sums[1] = 0;
    if (losses == NULL)
        return upipe_fail(&c->err, UPIPE_ERR_MEMORY, "no memory for %lld losses", (long long)t->m.rows);
    s = c->ops->copy(c, losses, t->r.losses, (size_t)t->m.rows * sizeof *losses);
    for (i = 0; i < t->m.rows && s == UPIPE_OK; ++i)
        sums[1] += !(fabsf(losses[i]) < TRAINER_NATS_MAX) ||
                   __builtin_add_overflow(sums[0], llrint((double)losses[i] * TRAINER_NAT), &sums[0]);
    free(losses);
    return s;
}

/* trainer_evaluate -- the losses of a batch are added to *sum: a forward that keeps nothing; all ranks together
 *   errors  those of the library; MEMORY
 */
static inline upipe_status trainer_evaluate(trainer *t, const trainer_batch *batch, trainer_score *sum)
{
    upipe_ctx *c = t->r.c;
    int64_t mine[2] = {batch->valid, batch->stop};
    upipe_view x;
    int r;
    UPIPE_TRY(upipe_comm_all_gather(c, t->world, t->gathered, mine, 2));
    for (r = 0; r < t->world->ranks; ++r) {
        if (t->gathered[2 * r] < 0 && sum->lost == 0) sum->lost = r + 1;
        if (t->gathered[2 * r + 1] > sum->stop) sum->stop = (int)t->gathered[2 * r + 1];
    }
    if (sum->lost || sum->stop) return UPIPE_OK;
    for (r = 0; r < t->world->ranks; ++r) sum->targets += t->gathered[2 * r];
    UPIPE_TRY(trainer_tokens(t, batch, 0));
    UPIPE_TRY(model_fwd(&t->r, &x, 0));
    UPIPE_TRY(model_loss_fwd(&t->r, x));
    UPIPE_TRY(model_free_block(&t->r, x));
    t->r.borders = NULL; /* they are the batch's */
    t->r.borders_n = 0;
    UPIPE_TRY(trainer_nats(t, mine));
    UPIPE_TRY(upipe_comm_all_gather(c, t->world, t->gathered, mine, 2));
    for (r = 0; r < t->world->ranks; ++r) {
        sum->broken += t->gathered[2 * r + 1];
        sum->broken += __builtin_add_overflow(sum->nats, t->gathered[2 * r], &sum->nats);
    }
    return UPIPE_OK;
}

#endif

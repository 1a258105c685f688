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
 * The loss is the mean over all valid targets of all ranks, however unequally they hold them.
 *
 * The model's team and ring are in the context; sums here are over all ranks, the world.
 */
#ifndef LLAMA_TRAINER_H
#define LLAMA_TRAINER_H

#include "model.h"

typedef struct trainer {
    model m;
    model_rank r;
    llama_state state;
    upipe_comm *world;       /* of all ranks; with one team alone that team's */
    upipe_side_stream *side; /* the model's prefetch: a stream for it alone, */
    upipe_comm *side_world;  /* and a second communicator of all ranks */
    int64_t *gathered;       /* [ranks][2] */
} trainer;

/* What a rank brings to a step: its tokens of every sequence, [part][batch][T], host memory. */
typedef struct trainer_batch {
    const int32_t *inputs, *targets;
    int64_t valid; /* targets >= 0 */
    int stop;      /* not 0: this rank wants to stop after the step, by a signal of this number */
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
} trainer_result;

static upipe_status trainer_alloc_floats(trainer *t, float **out, int64_t n, const char *tag)
{
    void *data;
    UPIPE_TRY(upipe_mem_alloc(t->r.c->mem, &data, (size_t)n * 4, tag, &t->r.c->err));
    *out = (float *)data;
    return UPIPE_OK;
}

/* trainer_open -- a rank's trainer over its pools; trainer_close frees what it needs of the host
 *   host    the second pool
 *   errors  MEMORY; trainer_close all the same
 */
__attribute__((unused)) static upipe_status trainer_open(trainer *t, const model *m, upipe_ctx *c,
                                                         upipe_comm *world, upipe_mem *host)
{
    memset(t, 0, sizeof *t);
    t->m = *m;
    t->world = world;
    t->r.c = c;
    t->r.second = t->r.kept.second = host;
    t->r.kept.layer = (activations_kept *)calloc((size_t)m->layout->config.layers, sizeof *t->r.kept.layer);
    t->gathered = (int64_t *)calloc((size_t)world->ranks * 2, sizeof *t->gathered);
    if (t->r.kept.layer != NULL && t->gathered != NULL) return UPIPE_OK;
    return upipe_fail(&c->err, UPIPE_ERR_MEMORY, "no host memory for the tables of a rank");
}

__attribute__((unused)) static void trainer_close(trainer *t)
{
    free(t->r.kept.layer);
    free(t->gathered);
}

/* How the states of the weights are shared beyond their stage: norm weights are few, their sums stay f32. */
static upipe_status trainer_share(trainer *t)
{
    upipe_zero *z = &t->state.zero[LLAMA_WEIGHTS];
    z->sent = t->m.reduce;
    if (!t->m.prefetch) return UPIPE_OK;
    z->side = t->side;
    z->side_world = t->side_world;
    if (t->side != NULL && t->m.zero == 3) return UPIPE_OK;
    return upipe_fail(&t->r.c->err, UPIPE_ERR_ARG,
                      "weights are gathered ahead on a side stream, with ZeRO 3");
}

/* trainer_alloc -- blocks for all that stays over steps; t->m, world and t->r's c, second, kept are set
 *                 before
 *
 * The moments are zeroed; everything else is not defined yet.
 */
__attribute__((unused)) static upipe_status trainer_alloc(trainer *t)
{
    const upipe_dtype dtype = t->m.plan.desc.dtype;
    const size_t ids = (size_t)t->m.rows * 4; /* bytes */
    upipe_ctx *c = t->r.c;
    llama_state *state = &t->state;
    int64_t held;
    void *data;
    int group;
    llama_state_init(state, t->m.layout, dtype, t->m.zero, model_world_rank(&t->m), model_world(&t->m));
    UPIPE_TRY(trainer_share(t));
    for (group = 0; group < LLAMA_GROUPS; ++group) {
        upipe_zero *z = &state->zero[group];
        z->world = t->world;
        UPIPE_TRY(upipe_zero_check(c, z));
        UPIPE_TRY(upipe_alloc(c, &z->weights,
                              (size_t)upipe_zero_held(z, UPIPE_ZERO_WEIGHTS) * upipe_dtype_bytes(z->dtype),
                              group == LLAMA_WEIGHTS ? "weights" : "vectors"));
        UPIPE_TRY(trainer_alloc_floats(t, &z->grads, upipe_zero_held(z, UPIPE_ZERO_GRADS), "gradients"));
        held = upipe_zero_held(z, UPIPE_ZERO_STATES);
        UPIPE_TRY(trainer_alloc_floats(t, &state->m[group], held, "moments"));
        UPIPE_TRY(trainer_alloc_floats(t, &state->v[group], held, "moments"));
        UPIPE_TRY(c->ops->zero(c, state->m[group], (size_t)held * 4));
        UPIPE_TRY(c->ops->zero(c, state->v[group], (size_t)held * 4));
        if (z->dtype != UPIPE_F32) UPIPE_TRY(trainer_alloc_floats(t, &state->master, held, "master"));
    }
    UPIPE_TRY(upipe_mem_alloc(c->mem, &data, ids, "tokens", &c->err));
    t->r.tokens = (int32_t *)data;
    UPIPE_TRY(upipe_mem_alloc(c->mem, &data, ids, "tokens", &c->err));
    t->r.targets = (int32_t *)data;
    UPIPE_TRY(trainer_alloc_floats(t, &t->r.losses, t->m.rows, "losses"));
    t->r.m = &t->m;
    t->r.zero = &state->zero[LLAMA_WEIGHTS];
    t->r.vectors = (const float *)state->zero[LLAMA_VECTORS].weights;
    t->r.vector_grads = state->zero[LLAMA_VECTORS].grads;
    return UPIPE_OK;
}

/* trainer_stop -- after a failure, before the pools go: nothing is gathered ahead any more */
__attribute__((unused)) static void trainer_stop(trainer *t)
{
    upipe_zero_stop(t->r.c, &t->state.zero[LLAMA_WEIGHTS]);
}

/* trainer_sent -- bytes that a rank has sent to others so far, in its team, its ring and the world */
__attribute__((unused)) static int64_t trainer_sent(const trainer *t)
{
    const upipe_ctx *c = t->r.c;
    return t->world->sent_bytes + (c->team != t->world ? c->team->sent_bytes : 0) +
           (c->ring != NULL ? c->ring->sent_bytes : 0) +
           (t->side_world != NULL ? t->side_world->sent_bytes : 0);
}

__attribute__((unused)) static upipe_status trainer_free_block(trainer *t)
{
    const llama_state *state = &t->state;
    int group;
    for (group = 0; group < LLAMA_GROUPS; ++group) {
        UPIPE_TRY(upipe_free(t->r.c, state->zero[group].weights));
        UPIPE_TRY(upipe_free(t->r.c, state->zero[group].grads));
        UPIPE_TRY(upipe_free(t->r.c, state->m[group]));
        UPIPE_TRY(upipe_free(t->r.c, state->v[group]));
    }
    UPIPE_TRY(upipe_free(t->r.c, state->master));
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
static double trainer_sum(const trainer *t, int i)
{
    double sum = 0, v;
    int r;
    for (r = 0; r < t->world->ranks; ++r) {
        memcpy(&v, &t->gathered[2 * r + i], sizeof v);
        sum += v;
    }
    return sum;
}

/* The sum of n numbers, or of their squares, in long rows. */
static upipe_status trainer_total(upipe_ctx *c, double *out, float *data, int64_t n, int squares)
{
    const int64_t row = 1 << 20;
    double rest = 0;
    int64_t whole = n / row * row;
    UPIPE_TRY(c->ops->total(c, out, upipe_view_packed(data, UPIPE_F32, n / row, 1, (int32_t)row), squares));
    if (n > whole)
        UPIPE_TRY(c->ops->total(
            c, &rest, upipe_view_packed(data + whole, UPIPE_F32, 1, 1, (int32_t)(n - whole)), squares));
    *out += rest;
    return UPIPE_OK;
}

/* Losses of the batch, and the part that this rank's tokens have in the gradients of the mean loss over all
 * `valid` targets. */
static upipe_status trainer_gradients(trainer *t, const trainer_batch *batch, int64_t valid)
{
    upipe_ctx *c = t->r.c;
    size_t bytes = (size_t)t->m.rows * 4;
    upipe_view x;
    UPIPE_TRY(upipe_zero_grads_clear(c, &t->state.zero[LLAMA_WEIGHTS]));
    UPIPE_TRY(upipe_zero_grads_clear(c, &t->state.zero[LLAMA_VECTORS]));
    UPIPE_TRY(c->ops->copy(c, t->r.tokens, batch->inputs, bytes));
    UPIPE_TRY(c->ops->copy(c, t->r.targets, batch->targets, bytes));
    UPIPE_TRY(model_fwd(&t->r, &x, 1));
    return model_bwd(&t->r, x, (float)(1.0 / (double)valid));
}

/* The slices of the gradients are sums over ranks; what the loss and the gradient's norm are, all ranks learn. The norm's
 * squares are added up by slices of units, in order: so in every stage alike. */
static upipe_status trainer_reduce(trainer *t, int64_t valid, trainer_result *result)
{
    upipe_ctx *c = t->r.c;
    double loss, squares = 0, one;
    int64_t mine[2];
    int group, unit;
    UPIPE_TRY(trainer_total(c, &loss, t->r.losses, t->m.rows, 0));
    for (group = 0; group < LLAMA_GROUPS; ++group) {
        upipe_zero *z = &t->state.zero[group];
        UPIPE_TRY(upipe_zero_grads_sum(c, z));
        for (unit = 0; unit < z->units; ++unit) {
            UPIPE_TRY(trainer_total(c, &one, (float *)upipe_zero_owned(z, UPIPE_ZERO_GRADS, unit),
                                    upipe_zero_slice(z, unit).n, 1));
            squares += one;
        }
    }
    mine[0] = trainer_bits(loss);
    mine[1] = trainer_bits(squares);
    UPIPE_TRY(upipe_comm_all_gather(c, t->world, t->gathered, mine, 2));
    result->loss = trainer_sum(t, 0) / (double)valid;
    result->norm = sqrt(trainer_sum(t, 1));
    result->finite = isfinite(result->loss) && isfinite(result->norm);
    return UPIPE_OK;
}

/* AdamW for what this rank has of the states of a unit. Matrices decay, vectors do not. */
static upipe_status trainer_update_unit(trainer *t, int group, int unit, const trainer_rates *rates,
                                        double norm)
{
    const upipe_zero *z = &t->state.zero[group];
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
    return c->ops->adamw(c, &a);
}

static upipe_status trainer_update(trainer *t, const trainer_rates *rates, double norm)
{
    int group, unit;
    for (group = 0; group < LLAMA_GROUPS; ++group) {
        for (unit = 0; unit < t->state.zero[group].units; ++unit)
            UPIPE_TRY(trainer_update_unit(t, group, unit, rates, norm));
        UPIPE_TRY(upipe_zero_weights_gather(t->r.c, &t->state.zero[group]));
    }
    return UPIPE_OK;
}

/* trainer_step -- forward, backward, sums over ranks, AdamW; all ranks together
 *   errors  those of the library; ARG on every rank where no rank has a valid target
 */
__attribute__((unused)) static upipe_status trainer_step(trainer *t, const trainer_batch *batch,
                                                         const trainer_rates *rates, trainer_result *result)
{
    upipe_ctx *c = t->r.c;
    int64_t mine[2], valid = 0;
    upipe_status s;
    int r;
    mine[0] = batch->valid;
    mine[1] = batch->stop;
    UPIPE_TRY(upipe_comm_all_gather(c, t->world, t->gathered, mine, 2));
    for (r = 0, result->stop = 0; r < t->world->ranks; ++r) {
        valid += t->gathered[2 * r];
        if (t->gathered[2 * r + 1] > result->stop) result->stop = (int)t->gathered[2 * r + 1];
    }
    if (valid < 1) return upipe_fail(&c->err, UPIPE_ERR_ARG, "no token of this step has a target");
    UPIPE_TRY(trainer_gradients(t, batch, valid));
    model_phase(&t->r, MODEL_UPDATE);
    s = trainer_reduce(t, valid, result);
    if (s == UPIPE_OK && result->finite) s = trainer_update(t, rates, result->norm);
    model_phase(&t->r, UPIPE_PHASE_OTHER);
    return s;
}

#endif

/* trainer.h -- one rank's training state in its pool, and one training step
 *
 *     trainer_open(&t, &m, &ctx, world, host);
 *     trainer_alloc(&t);                      weights, gradients, optimizer: from the pool, for the whole run
 *     ... fill t.state: initial values, or a checkpoint ...
 *     trainer_step(&t, &batch, &rates, &result);
 *     trainer_free_block(&t);
 *     trainer_close(&t);
 *
 * Every rank has all weights and gradients, and the optimizer of its slice alone (ZeRO-1): gradients are
 * summed over ranks into slices, each rank moves its slice of the weights, and the slices are gathered.
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
    float *grads[2];   /* of the weights group and of the norm weights group */
    upipe_comm *world; /* of all ranks; with one team alone that team's */
    int64_t *gathered; /* [ranks][2] */
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

/* Elements of this rank's slice of a group; *first is where it begins. */
static int64_t trainer_slice(const trainer *t, int group, int64_t *first)
{
    const llama_layout *l = t->m.layout;
    return upipe_reduce_slice(group == 0 ? l->weights : l->norm_weights, t->state.rank, t->state.ranks,
                              first);
}

/* Makes another team the context's, and returns the one that was. Slices are summed and gathered, and
 * checkpoints written, by the context's team, which is to be the world meanwhile. */
static upipe_comm *trainer_swap(trainer *t, upipe_comm *team)
{
    upipe_comm *old = t->r.c->team;
    t->r.c->team = team;
    return old;
}

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

/* trainer_alloc -- blocks for all that stays over steps; t->m, world and t->r's c, second, kept are set
 *                 before
 *
 * The moments are zeroed; everything else is not defined yet.
 */
__attribute__((unused)) static upipe_status trainer_alloc(trainer *t)
{
    const llama_layout *l = t->m.layout;
    const upipe_dtype dtype = t->m.plan.desc.dtype;
    const size_t ids = (size_t)t->m.rows * 4; /* bytes */
    upipe_ctx *c = t->r.c;
    int64_t first, held[2];
    void *data;
    int group;
    t->state.layout = l;
    t->state.dtype = dtype;
    t->state.rank = model_world_rank(&t->m);
    t->state.ranks = model_world(&t->m);
    UPIPE_TRY(upipe_mem_alloc(c->mem, &t->state.weights, (size_t)l->weights * upipe_dtype_bytes(dtype),
                              "weights", &c->err));
    UPIPE_TRY(trainer_alloc_floats(t, &t->state.norm_weights, l->norm_weights, "norm_weights"));
    for (group = 0; group < 2; ++group) {
        held[group] = trainer_slice(t, group, &first);
        UPIPE_TRY(trainer_alloc_floats(t, &t->grads[group], group == 0 ? l->weights : l->norm_weights,
                                       "gradients"));
        UPIPE_TRY(trainer_alloc_floats(t, &t->state.m[group], held[group], "moments"));
        UPIPE_TRY(trainer_alloc_floats(t, &t->state.v[group], held[group], "moments"));
        UPIPE_TRY(c->ops->zero(c, t->state.m[group], (size_t)held[group] * 4));
        UPIPE_TRY(c->ops->zero(c, t->state.v[group], (size_t)held[group] * 4));
    }
    if (dtype != UPIPE_F32) UPIPE_TRY(trainer_alloc_floats(t, &t->state.master, held[0], "master"));
    UPIPE_TRY(upipe_mem_alloc(c->mem, &data, ids, "tokens", &c->err));
    t->r.tokens = (int32_t *)data;
    UPIPE_TRY(upipe_mem_alloc(c->mem, &data, ids, "tokens", &c->err));
    t->r.targets = (int32_t *)data;
    UPIPE_TRY(trainer_alloc_floats(t, &t->r.losses, t->m.rows, "losses"));
    t->r.m = &t->m;
    t->r.all_weights = t->state.weights;
    t->r.norm_weights = t->state.norm_weights;
    t->r.all_grads = t->grads[0];
    t->r.norm_grads = t->grads[1];
    return UPIPE_OK;
}

__attribute__((unused)) static upipe_status trainer_free_block(trainer *t)
{
    void *const blocks[] = {t->state.weights, t->state.norm_weights, t->grads[0],   t->grads[1],
                            t->state.m[0],    t->state.m[1],         t->state.v[0], t->state.v[1],
                            t->state.master,  t->r.tokens,           t->r.targets,  t->r.losses};
    size_t i;
    for (i = 0; i < sizeof blocks / sizeof *blocks; ++i)
        UPIPE_TRY(upipe_mem_free(t->r.c->mem, blocks[i], &t->r.c->err));
    return UPIPE_OK;
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
    for (r = 0; r < t->state.ranks; ++r) {
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
    const llama_layout *l = t->m.layout;
    size_t bytes = (size_t)t->m.rows * 4;
    upipe_view x;
    UPIPE_TRY(c->ops->zero(c, t->grads[0], (size_t)l->weights * 4));
    UPIPE_TRY(c->ops->zero(c, t->grads[1], (size_t)l->norm_weights * 4));
    UPIPE_TRY(c->ops->copy(c, t->r.tokens, batch->inputs, bytes));
    UPIPE_TRY(c->ops->copy(c, t->r.targets, batch->targets, bytes));
    UPIPE_TRY(model_fwd(&t->r, &x, 1));
    return model_bwd(&t->r, x, (float)(1.0 / (double)valid));
}

/* Slices of the gradients are summed; what the loss and the gradient's norm are, all ranks learn. */
static upipe_status trainer_reduce(trainer *t, int64_t valid, trainer_result *result)
{
    upipe_ctx *c = t->r.c;
    double loss, squares[2];
    int64_t mine[2], first;
    int group;
    UPIPE_TRY(trainer_total(c, &loss, t->r.losses, t->m.rows, 0));
    for (group = 0; group < 2; ++group) {
        int64_t n = trainer_slice(t, group, &first);
        UPIPE_TRY(upipe_reduce_scatter(c, t->grads[group],
                                       group == 0 ? t->m.layout->weights : t->m.layout->norm_weights));
        UPIPE_TRY(trainer_total(c, &squares[group], t->grads[group] + first, n, 1));
    }
    mine[0] = trainer_bits(loss);
    mine[1] = trainer_bits(squares[0] + squares[1]);
    UPIPE_TRY(upipe_comm_all_gather(c, t->world, t->gathered, mine, 2));
    result->loss = trainer_sum(t, 0) / (double)valid;
    result->norm = sqrt(trainer_sum(t, 1));
    result->finite = isfinite(result->loss) && isfinite(result->norm);
    return UPIPE_OK;
}

/* Each rank updates its slice, then the slices are gathered. Matrices decay, norm weights do not. */
static upipe_status trainer_update(trainer *t, const trainer_rates *rates, double norm)
{
    upipe_ctx *c = t->r.c;
    const llama_layout *l = t->m.layout;
    size_t element = upipe_dtype_bytes(t->state.dtype);
    int group;
    for (group = 0; group < 2; ++group) {
        upipe_adamw a;
        int64_t first;
        memset(&a, 0, sizeof a);
        a.n = trainer_slice(t, group, &first);
        a.w = group == 1 ? t->state.norm_weights + first : (float *)t->state.weights + first;
        if (group == 0 && t->state.master != NULL) {
            a.w = t->state.master;
            a.copy = (char *)t->state.weights + (size_t)first * element;
            a.copy_dtype = t->state.dtype;
        }
        a.m = t->state.m[group];
        a.v = t->state.v[group];
        a.g = t->grads[group] + first;
        a.step = rates->step;
        a.rate = rates->rate;
        a.beta1 = rates->beta1;
        a.beta2 = rates->beta2;
        a.eps = rates->eps;
        a.decay = group == 0 ? rates->decay : 0;
        a.grad_scale = rates->clip > 0 && norm > rates->clip ? rates->clip / norm : 1;
        if (a.n > 0) UPIPE_TRY(c->ops->adamw(c, &a));
    }
    UPIPE_TRY(upipe_all_gather(c, t->state.weights, l->weights, element));
    return upipe_all_gather(c, t->state.norm_weights, l->norm_weights, 4);
}

/* trainer_step -- forward, backward, sums over ranks, AdamW; all ranks together
 *   errors  those of the library; ARG on every rank where no rank has a valid target
 */
__attribute__((unused)) static upipe_status trainer_step(trainer *t, const trainer_batch *batch,
                                                         const trainer_rates *rates, trainer_result *result)
{
    upipe_ctx *c = t->r.c;
    int64_t mine[2], valid = 0;
    upipe_comm *team;
    upipe_status s;
    int r;
    mine[0] = batch->valid;
    mine[1] = batch->stop;
    UPIPE_TRY(upipe_comm_all_gather(c, t->world, t->gathered, mine, 2));
    for (r = 0, result->stop = 0; r < t->state.ranks; ++r) {
        valid += t->gathered[2 * r];
        if (t->gathered[2 * r + 1] > result->stop) result->stop = (int)t->gathered[2 * r + 1];
    }
    if (valid < 1) return upipe_fail(&c->err, UPIPE_ERR_ARG, "no token of this step has a target");
    UPIPE_TRY(trainer_gradients(t, batch, valid));
    model_phase(&t->r, MODEL_UPDATE);
    team = trainer_swap(t, t->world);
    s = trainer_reduce(t, valid, result);
    if (s == UPIPE_OK && result->finite) s = trainer_update(t, rates, result->norm);
    trainer_swap(t, team);
    model_phase(&t->r, UPIPE_PHASE_OTHER);
    return s;
}

#endif

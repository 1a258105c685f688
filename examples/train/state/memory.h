/* memory.h -- what a rank's pools hold over a training step: the trainer's own code over pools that only count
 *
 *     memory_plan plan;
 *     memory_plan_make(&plan, &m, &ops, NULL, NULL, &err);     plan.peak, plan.phase[], plan.at_peak[]: bytes
 *
 * A real step holds the same bytes, in every phase. The plan also says which slabs hold them (alignment, holes).
 */
#ifndef LLAMA_MEMORY_H
#define LLAMA_MEMORY_H

#include "upipe/net/upipe_net_threads.h"

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

/* Bytes of a step, and what the pools of a whole run need. */
typedef struct memory_plan {
    size_t phase[MODEL_PHASES];                          /* live bytes at most */
    size_t peak;                                         /* the largest of them */
    size_t host;                                         /* the second pool */
    size_t at_peak[MEMORY_PARTS], largest[MEMORY_PARTS]; /* each part's largest is at a moment of its own */
    size_t need, host_need;                              /* slabs */
    int64_t sent, moved;          /* to other ranks, and between the pools, in the step */
    int64_t moved_states;         /* of the latter: weights, gradients and what the optimizer needs of them */
    int64_t sent_team, sent_ring; /* of them: the all-to-all, and round the ring */
    upipe_dry_work work;
    int blocks_max;
    int64_t events_max;
} memory_plan;

/* A dry rank, and the world's communicator beside those of its team and its ring. */
typedef struct memory_dry {
    upipe_dry dry;
    upipe_comm world, side_world;
    upipe_side_stream side;
    upipe_msg list[2 * UPIPE_THREADS_MAX];
    int64_t gathered[UPIPE_THREADS_MAX * UPIPE_ALL_GATHER_MAX];
    upipe_mem host;
    memory_plan *plan;
} memory_dry;

/* The part that a block belongs to. What attention leaves for its backward waits through the MLP's. */
static inline int memory_part(int use, int phase)
{
    switch (use) {
    case UPIPE_USE_WEIGHTS:
        return MEMORY_WEIGHTS;
    case UPIPE_USE_WEIGHT_GRAD:
        return MEMORY_GRADIENTS;
    case UPIPE_USE_STATES:
        return MEMORY_OPTIMIZER;
    case UPIPE_USE_INPUT:
        return MEMORY_TOKENS;
    case UPIPE_USE_CHECKPOINT:
        return MEMORY_CHECKPOINTS;
    case UPIPE_USE_STREAM:
        return MEMORY_STREAM;
    case UPIPE_USE_REDUCE:
        return MEMORY_SUM;
    case UPIPE_USE_MLP:
        return MEMORY_MLP;
    default:
        return phase == MODEL_LOSS ? MEMORY_LOSS : phase == MODEL_UPDATE ? MEMORY_SUM : MEMORY_ATTENTION;
    }
}

/* The dry pool's guard: asked before each allocation. Each part's largest is its own, whatever the others then hold. */
static inline upipe_status memory_guard(void *user, size_t bytes, int use, const char *tag)
{
    memory_dry *d = (memory_dry *)user;
    const upipe_mem *m = &d->dry.mem;
    const size_t live = m->live + bytes;
    size_t part[MEMORY_PARTS] = {0};
    int i, k;
    (void)tag;
    part[memory_part(use, m->phase)] = bytes;
    for (i = 0; i < m->blocks_n; ++i) part[memory_part(m->blocks[i].use, m->phase)] += m->blocks[i].bytes;
    for (k = 0; k < MEMORY_PARTS; ++k) d->plan->largest[k] = upipe_max_bytes(d->plan->largest[k], part[k]);
    if (live <= d->plan->peak) return UPIPE_OK;
    d->plan->peak = live;
    memcpy(d->plan->at_peak, part, sizeof part);
    return UPIPE_OK;
}

/* What a rank does after a step. */
typedef upipe_status memory_then(trainer *t, void *user);

/* One step, and what comes after it; from the trainer's first allocation to the last thing freed. */
static inline upipe_status memory_life(memory_dry *d, trainer *t, memory_then *then, void *user)
{
    memory_plan *plan = d->plan;
    trainer_batch batch;
    trainer_rates rates;
    trainer_result result;
    upipe_mem *mem = &d->dry.mem;
    memset(&batch, 0, sizeof batch);
    memset(&rates, 0, sizeof rates);
    memset(&result, 0, sizeof result);
    batch.valid = 1;
    batch.borders = t->m.borders;
    mem->guard = memory_guard;
    mem->user = d;
    UPIPE_TRY(trainer_alloc(t));
    UPIPE_TRY(trainer_step(t, &batch, &rates, &result));
    mem->guard = NULL;
    memcpy(plan->phase, mem->phase_peak, sizeof plan->phase);
    plan->host = d->host.peak;
    plan->events_max = mem->events_lost; /* a trace ends with the step */
    plan->sent = trainer_sent(t);
    plan->sent_team = d->dry.team.sent_bytes;
    plan->sent_ring = d->dry.ring.sent_bytes;
    plan->work = d->dry.work;
    plan->moved = trainer_moved(t);
    plan->moved_states = trainer_moved_states(t);
    if (then != NULL) UPIPE_TRY(then(t, user));
    return trainer_free_block(t);
}

/* Steps that a dry run walks through, roughly: heads of every layer, and of every pair of segments, strips of sums. Of
 * tiles and of sequences one counts for all. */
static inline double memory_walk(const model *m)
{
    const llama_config *c = &m->layout->config;
    const upipe_plan *p = &m->plan;
    const double segments = (double)m->fpdt.segments, pairs = segments * segments + p->desc.ring;
    const double heads = (double)c->heads / p->per_rank + 2.0 * c->kv_heads / p->kv_per_rank;
    const double micro =
        (double)c->layers * 2 * (model_parts(m) * (heads + 8) + pairs * p->per_rank * p->stages) +
        (double)m->layout->weights / (UPIPE_ZERO_STRIP / 4) + 8.0 * m->layout->units;
    return micro * (double)m->accumulate;
}

/* Whether a rank's slice of n elements is as long as another's. */
static inline int memory_same_slices(int64_t n, const model *a, const model *b)
{
    int64_t at;
    return upipe_reduce_slice(n, model_world_rank(a), model_world(a), &at) ==
           upipe_reduce_slice(n, model_world_rank(b), model_world(b), &at);
}

/* Whether two ranks have as many chunks in layers of linear attention, and send the same: the first one nothing to the rank
 * before it, the last one nothing behind it, and nobody over a border. */
static inline int memory_same_linear(const model *a, const model *b)
{
    const upipe_plan_desc *p = &a->plan.desc, *q = &b->plan.desc;
    const int64_t from = upipe_shard_pos(&a->plan.shard, 0), to = upipe_shard_pos(&b->plan.shard, 0);
    if (p->rank == q->rank || !llama_has_linear(&a->layout->config)) return 1;
    if (from % UPIPE_LINEAR_CHUNK != to % UPIPE_LINEAR_CHUNK) return 0;
    return a->borders == NULL && p->rank > 0 && q->rank > 0 && p->rank < p->ranks - 1 &&
           q->rank < q->ranks - 1;
}

/* memory_same -- whether two ranks' pools live the same: where tokens, heads or weights do not divide, ranks have
 *                different numbers of them */
static inline int memory_same(const model *a, const model *b)
{
    const upipe_plan *p = &a->plan, *q = &b->plan;
    const int64_t *const first = a->layout->first, *const frozen = a->layout->frozen_first;
    int i, same = p->team_tokens == q->team_tokens && a->rows == b->rows && p->stages == q->stages;
    for (i = 0; i < model_parts(a) && same; ++i) same = model_shard(a, i).n == model_shard(b, i).n;
    for (i = 0; i < p->stages && same; ++i)
        same = upipe_plan_q(p, i, p->desc.rank).count == upipe_plan_q(q, i, q->desc.rank).count &&
               upipe_plan_part(p, UPIPE_A2A_KV, i, p->desc.rank).count ==
                   upipe_plan_part(q, UPIPE_A2A_KV, i, q->desc.rank).count;
    for (i = 0; i < a->layout->units && same; ++i)
        same = memory_same_slices(first[i + 1] - first[i], a, b) &&
               memory_same_slices(frozen[i + 1] - frozen[i], a, b);
    return same && memory_same_linear(a, b) && memory_same_slices(a->layout->vectors, a, b);
}

enum { MEMORY_WALK_MAX = 50000000 }; /* some seconds */

static inline upipe_status memory_walkable(const model *m, upipe_err *e)
{
    if (memory_walk(m) <= MEMORY_WALK_MAX) return UPIPE_OK;
    return upipe_fail(e, UPIPE_ERR_UNSUPPORTED,
                      "the memory's dry run would take %.2g steps, at most %d are walked", memory_walk(m),
                      MEMORY_WALK_MAX);
}

/* memory_plan_make -- for the rank of the model's plan
 *   then    what the rank does after the step, for the slabs; NULL: nothing
 *   errors  those of the library but for transport: ARG where tile_bytes is too small for one row; UNSUPPORTED where the
 *           dry run would take more than MEMORY_WALK_MAX steps
 */
static inline upipe_status memory_plan_make(memory_plan *plan, const model *m, const upipe_ops *ops,
                                            memory_then *then, void *user, upipe_err *e)
{
    const int blocks_max = 6 * (int)m->layout->config.layers + m->plan.stages * 2 + 64;
    memory_dry *d = (memory_dry *)calloc(1, sizeof *d);
    upipe_mem_block *blocks = (upipe_mem_block *)calloc(2 * (size_t)blocks_max, sizeof *blocks);
    upipe_mem_event none;
    trainer t;
    upipe_status s;
    memset(plan, 0, sizeof *plan);
    if (d == NULL || blocks == NULL) {
        free(d);
        free(blocks);
        return upipe_fail(e, UPIPE_ERR_MEMORY, "no host memory for a dry run");
    }
    d->plan = plan;
    s = upipe_dry_init(&d->dry, &m->plan, ops);
    if (s == UPIPE_OK) s = memory_walkable(m, &d->dry.ctx.err);
    upipe_comm_dry(&d->world, model_world_rank(m), model_world(m), d->list, d->gathered);
    upipe_comm_dry(&d->side_world, model_world_rank(m), model_world(m), d->list, d->gathered);
    upipe_side_stream_inline(&d->side, NULL);
    upipe_mem_init_dry(&d->dry.mem, blocks, blocks_max);
    upipe_mem_init_dry(&d->host, blocks + blocks_max, blocks_max);
    d->host.slab = d->dry.host.slab; /* in the place of that pool, and apart from the first one */
    d->dry.mem.events = &none;       /* space for none: all are counted as lost */
    if (s == UPIPE_OK) {
        s = trainer_open(&t, m, &d->dry.ctx, &d->world, &d->host);
        t.side = &d->side;
        t.side_world = &d->side_world;
        if (s == UPIPE_OK) s = memory_life(d, &t, then, user);
        trainer_close(&t);
    }
    plan->need = d->dry.mem.need;
    plan->host_need = d->host.need;
    plan->blocks_max =
        d->dry.mem.blocks_peak > d->host.blocks_peak ? d->dry.mem.blocks_peak : d->host.blocks_peak;
    if (s != UPIPE_OK) *e = d->dry.ctx.err;
    free(blocks);
    free(d);
    return s;
}

/* memory_least -- bytes that are known without a dry run: the trainer's state, the stream and its copies
 *   host    of them in the second pool
 */
static inline double memory_least(const model *m, double *host)
{
    const double u = (double)model_unit(m);
    int64_t here, away = activations_copies(&m->activations, m->layout->config.layers, &here);
    double state = 0;
    llama_state held;
    int group;
    llama_state_init(&held, m->layout, m->plan.desc.dtype, m->zero, model_world_rank(m), model_world(m));
    *host = (double)away * u;
    for (group = 0; group < LLAMA_GROUPS; ++group) {
        const upipe_zero *z = &held.zero[group];
        const double e = (double)upipe_dtype_bytes(z->dtype);
        const int states_away = group == LLAMA_WEIGHTS && m->offload_optimizer;
        *(group == LLAMA_WEIGHTS && m->offload_weights ? host : &state) +=
            (double)(upipe_zero_held(z, UPIPE_ZERO_WEIGHTS) +
                     upipe_zero_held(&held.frozen[group], UPIPE_ZERO_WEIGHTS)) *
            e;
        *(states_away && m->zero >= 2 ? host : &state) += (double)upipe_zero_held(z, UPIPE_ZERO_GRADS) * 4;
        *(states_away ? host : &state) += (double)upipe_zero_held(z, UPIPE_ZERO_STATES) * (e < 4 ? 12 : 8);
    }
    return state + (double)m->rows * 12 + u + (double)here * u;
}

#endif

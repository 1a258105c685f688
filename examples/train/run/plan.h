/* plan.h -- what every rank of a run will hold, before anything is allocated, and whether it fits */
#ifndef LLAMA_PLAN_H
#define LLAMA_PLAN_H

#include "run.h"

/* After a step of a dry rank: a batch of an evaluation, one token of a sample. */
typedef struct run_after_step {
    const run *u;
    const model *sampled;
} run_after_step;

static inline upipe_status run_dry_after(trainer *t, void *user)
{
    const run_after_step *after = (const run_after_step *)user;
    sample_request request = run_sample_request(after->u);
    trainer_batch batch;
    trainer_score score;
    int64_t made;
    int32_t token;
    memset(&batch, 0, sizeof batch);
    memset(&score, 0, sizeof score);
    batch.borders = t->m.borders;
    if (after->u->o.eval != NULL) UPIPE_TRY(trainer_evaluate(t, &batch, &score));
    if (after->u->o.sample == 0) return UPIPE_OK;
    t->r.m = after->sampled;
    return sample_text(&t->r, t->world, &request, &token, 1, &made, t->gathered);
}

/* The ranks of a machine share its memory: says no rather than to be killed for it.
 *   planned   zero: before the dry runs, with what is known without them
 */
static inline int run_check_memory(const run *u, int planned)
{
    double slabs = 0, host = 16.0 * (double)u->o.steps, have;
    const int all = u->net.all == NULL, first = all ? 0 : u->net.near_first;
    int r;
    if (cli_memory(&have) != 0) return -1;
    for (r = first; r < (all ? u->o.how.ranks : first + u->net.near); ++r) {
        const run_rank *k = &u->ranks[r];
        double second;
        const double least = memory_least(&k->m, &second);
        if (u->net.transport != WORLD_NCCL || r == u->net.first) /* each has a device of its own */
            slabs += planned ? (double)k->plan.need : least;
        host += planned ? (double)k->plan.host_need : second;
    }
    if (u->o.device == DEVICE_CPU) host += slabs;
    if (host > have)
        return cli_fail(
            "out of memory: the ranks share this machine's %.1f GiB, and the run takes %s%.1f GiB",
            have / (1 << 30), planned ? "" : "at least ", host / (1 << 30));
    return device_has_buf(u->o.device, slabs);
}

/* The scratch of linear attention does not depend on a step's documents: it is that of as many borders as a window may have,
 * none of which is where a chunk ends anyway. */
static inline upipe_status run_plan_capacity(const run *u, run_rank *k, upipe_err *e)
{
    const int64_t first = upipe_shard_pos(&k->m.plan.shard, 0), end = first + k->m.plan.local;
    const int64_t most = u->documents < k->m.plan.local ? u->documents : k->m.plan.local;
    int64_t at, n = 0;
    if (most == 0) return UPIPE_OK;
    k->capacity = (int64_t *)malloc((size_t)(most + 2) * sizeof *k->capacity);
    if (k->capacity == NULL) return upipe_fail(e, UPIPE_ERR_MEMORY, "no memory for borders of documents");
    k->capacity[0] = first;
    for (at = first + 1; at < end && n < most; ++at)
        if (at % UPIPE_LINEAR_CHUNK != 0) k->capacity[++n] = at;
    k->capacity[++n] = end;
    k->m.capacity.cu_seqlens = k->capacity;
    k->m.capacity.cu_seqlens_n = n;
    return UPIPE_OK;
}

/* Plans of a rank's training and sample. */
static inline upipe_status run_plan_rank(const run *u, run_rank *k, int rank, upipe_err *e)
{
    const setting s = setting_of(&u->o, &u->layout);
    UPIPE_TRY(setting_model(&k->m, &s, rank, e));
    UPIPE_TRY(run_plan_capacity(u, k, e));
    return sample_model(&k->sampled, &k->m, e);
}

/* An earlier rank whose pool lives as this one's does; the rank itself if there is none. */
static inline int run_like(const run *u, int rank)
{
    const run_rank *k = &u->ranks[rank], *all = u->ranks;
    int r = 0;
    while (r < rank && !(memory_same(&all[r].m, &k->m) && memory_same(&all[r].sampled, &k->sampled))) ++r;
    return r;
}

/* Borders in the first replica's first step, where documents are packed, for what its ring sends then. 0, or -1 with the
 * sentence out. */
static inline int run_plan_borders(run *u)
{
    options *o = &u->o;
    data_order order;
    const int64_t sequences = o->batch * o->accumulate;
    int64_t n, window = 0;
    if (!u->text.packed) return 0;
    o->borders = (int64_t *)malloc((size_t)(data_borders_max(&u->text, o->batch) * o->accumulate) *
                                   sizeof *o->borders);
    data_order_init(&order);
    for (n = 0; o->borders != NULL && window >= 0 && n < sequences; ++n) {
        const int64_t b = n % o->batch;
        window = data_window(&u->text, &order, (uint64_t)o->seed,
                             run_sequence(o, 0, u->position.step * run_step_sequences(o), n));
        o->borders_n += b == 0 && n > 0;
        if (window >= 0)
            o->borders_n += data_borders(&u->text, &order, window, b * o->tokens, o->borders + o->borders_n);
    }
    data_order_free(&order);
    return o->borders != NULL && window >= 0 ? 0
                                             : cli_fail("out of memory: the borders of a step's documents");
}

/* How many documents a window may have, where linear attention must know it. 0, or -1 with the sentence out. */
static inline int run_plan_documents(run *u)
{
    const corpus *const all[] = {&u->text, &u->held};
    int i;
    for (i = 0; i < 2 && llama_has_linear(&u->layout.config); ++i) {
        const int64_t n = all[i]->packed ? data_documents_max(all[i]) : 0;
        if (n < 0) return cli_fail("out of memory: the lengths of documents");
        if (n > u->documents) u->documents = n;
    }
    return 0;
}

/* Plans and memory of every rank. 0, or -1 with the sentence out. */
static inline int run_plan(run *u)
{
    const int ranks = u->o.how.ranks;
    upipe_err e;
    int r;
    upipe_status s = UPIPE_OK;
    memset(&e, 0, sizeof e);
    u->ranks = (run_rank *)calloc((size_t)ranks, sizeof *u->ranks);
    if (u->ranks == NULL) return cli_fail("out of memory: %d ranks", ranks);
    if (run_plan_borders(u) != 0 || run_plan_documents(u) != 0) return -1;
    for (r = 0; r < ranks && s == UPIPE_OK; ++r) s = run_plan_rank(u, &u->ranks[r], r, &e);
    /* A dry run walks through all sums: their number must make sense before. */
    if (s == UPIPE_OK && !u->o.plan && run_check_memory(u, 0) != 0) return -1;
    for (r = 0; r < ranks && s == UPIPE_OK; ++r) {
        run_rank *k = &u->ranks[r];
        const int like = run_like(u, r);
        run_after_step after = {u, &k->sampled};
        if (like < r)
            k->plan = u->ranks[like].plan;
        else
            s = memory_plan_make(&k->plan, &k->m, &u->ops, run_dry_after, &after, &e);
    }
    return s == UPIPE_OK ? 0 : run_fail(s, &e);
}

#endif

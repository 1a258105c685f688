/* rank.h -- the life of a rank: its pools and weights, its steps, its checkpoints, its part of the sample */
#ifndef LLAMA_RANK_H
#define LLAMA_RANK_H

#include "../state/initial.h"
#include "eval.h"

/* ---- before the first step ---- */

static inline upipe_status run_allocate(const run *u, run_rank *k)
{
    const memory_plan *p = &k->plan;
    int most;
    UPIPE_TRY(pools_open(&k->p, &k->c, u->o.device, &u->o.how, p->need, p->host_need, p->blocks_max));
    device_avoid(&k->p.d, u->o.avoid);
    most = device_ranks_most(&k->p.d, u->layout.config.vocab);
    if (u->net.here > most)
        return upipe_fail(&k->c.err, UPIPE_ERR_UNSUPPORTED,
                          "%d ranks share a device; with a vocabulary of %lld it takes %d at most",
                          u->net.here, (long long)u->layout.config.vocab, most);
    if (u->o.zero_prefetch) UPIPE_TRY(side_stream_make(&k->ahead, &k->p.d, 1, &k->c.err));
    k->p.mem.clock = cli_clock;
    if (u->o.trace == NULL) return UPIPE_OK;
    k->p.mem.events = k->events = (upipe_mem_event *)calloc((size_t)p->events_max, sizeof *k->events);
    k->p.mem.events_max = p->events_max;
    return k->events != NULL ? UPIPE_OK : upipe_fail(&k->c.err, UPIPE_ERR_MEMORY, "no memory for a trace");
}

/* The CPU's table for what is updated in the second pool; the ranks of this machine share its threads. */
static inline upipe_status run_open_host(const run *u, run_rank *k)
{
    const long threads = sysconf(_SC_NPROCESSORS_ONLN) / u->net.near;
    if (pool_init(&k->threads, threads < 1 ? 1 : threads < POOL_MAX ? (int32_t)threads : POOL_MAX) != 0)
        return upipe_fail(&k->c.err, UPIPE_ERR_BACKEND, "no threads for the optimizer");
    k->par = pool_par(&k->threads);
    device_table(DEVICE_CPU, &k->host);
    k->host.par = &k->par;
    k->t.host = &k->host;
    return UPIPE_OK;
}

/* New weights, or those of a folder, which may have no adapters. */
static inline upipe_status run_begin(const run *u, trainer *t)
{
    llama_run position;
    if (u->from == NULL || u->o.lora != NULL) UPIPE_TRY(initial_weights(t, (uint64_t)u->o.seed));
    if (u->from == NULL) return UPIPE_OK;
    UPIPE_TRY(llama_load_weights(t->r.c, u->from, &t->state, u->o.merge ? &u->adapter : NULL));
    if (u->o.load_adapter != NULL && !u->o.merge)
        UPIPE_TRY(llama_load_adapter(t->r.c, &u->adapter, &t->state));
    if (u->o.resume == NULL) return UPIPE_OK;
    return llama_load_optimizer(t->r.c, u->from, &t->state, &position);
}

/* All that stays over steps. */
static inline upipe_status run_open(run *u, run_rank *k, int rank)
{
    upipe_comm *const world = world_all(&u->net, rank);
    world_use(&u->net, rank, &k->c);
    data_order_init(&k->order);
    UPIPE_TRY(upipe_comm_barrier(&k->c, world)); /* all have started */
    UPIPE_TRY(run_allocate(u, k));
    UPIPE_TRY(trainer_open(&k->t, &k->m, &k->c, world, &k->p.host));
    if (u->o.offload_optimizer) UPIPE_TRY(run_open_host(u, k));
    k->t.r.kept.side = &k->p.d;
    k->t.timed = u->log != NULL && rank == u->net.first;
    if (u->o.zero_prefetch) {
        k->t.side = &k->ahead.side_stream;
        k->t.side_world = world_side(&u->net, rank);
    }
    k->inputs = (int32_t *)malloc((size_t)(k->m.rows * u->o.accumulate) * 2 * sizeof *k->inputs);
    if (k->inputs == NULL)
        return upipe_fail(&k->c.err, UPIPE_ERR_MEMORY, "no memory for the tokens of a step");
    if (u->text.packed || u->held.packed) {
        const int64_t n = data_borders_max(&u->text, u->o.batch) * u->o.accumulate,
                      more = data_borders_max(&u->held, u->o.batch);
        k->borders = (int64_t *)malloc((size_t)(n > more ? n : more) * sizeof *k->borders);
        if (k->borders == NULL)
            return upipe_fail(&k->c.err, UPIPE_ERR_MEMORY, "no memory for the borders of a step's documents");
    }
    UPIPE_TRY(trainer_alloc(&k->t));
    UPIPE_TRY(run_begin(u, &k->t));
    k->step = k->last = u->position.step;
    k->keep = u->o.keep;
    k->sent = trainer_sent(&k->t);
    return UPIPE_OK;
}

/* ---- a step ---- */

/* The learning rate of a step: it rises to lr, and falls from there, to min_lr in the last step. */
static inline double run_rate(const options *o, int64_t step)
{
    const int64_t from = o->schedule == SCHEDULE_WSD ? o->steps - o->decay : o->warmup;
    const double progress = o->steps > from ? (double)(step - from) / (double)(o->steps - from) : 1;
    if (step <= o->warmup) return o->lr * (double)step / (double)o->warmup;
    if (step <= from || o->schedule == SCHEDULE_CONSTANT) return o->lr;
    if (o->schedule == SCHEDULE_COSINE)
        return o->min_lr + 0.5 * (o->lr - o->min_lr) * (1 + cos(acos(-1.0) * progress));
    return o->lr + (o->min_lr - o->lr) * progress;
}

static inline trainer_rates run_rates(const run *u, int64_t step)
{
    const options *o = &u->o;
    trainer_rates r;
    r.step = step;
    r.rate = run_rate(o, step);
    r.beta1 = o->beta1;
    r.beta2 = o->beta2;
    r.eps = o->adam_eps;
    r.decay = o->weight_decay;
    r.clip = o->clip;
    return r;
}

static inline upipe_status run_save(run *u, trainer *t, int64_t step, int keep)
{
    llama_run position;
    if (u->o.save == NULL || u->saved == step) return UPIPE_OK;
    memset(&position, 0, sizeof position);
    if (u->o.lora != NULL) snprintf(position.lora, sizeof position.lora, "%s", u->o.lora);
    if (u->o.train != NULL) snprintf(position.train, sizeof position.train, "%s", u->o.train);
    position.step = step;
    position.text_bytes = u->text.ids.bytes;
    position.text_hash = u->text.hash;
    options_fields(&u->o, llama_run_fields, LLAMA_RUN_FIELDS, &position, 0);
    position.accumulate *= u->o.replicas;
    UPIPE_TRY(llama_save(t->r.c, t->world, u->o.save, &t->state, &position, keep));
    UPIPE_TRY(upipe_comm_barrier(t->r.c, t->world)); /* all have read `saved` */
    if (t->world->rank == u->net.first) u->saved = step;
    return upipe_comm_barrier(t->r.c, t->world);
}

/* What the driver has given out since the ranks began. Nothing goes back before all of them have ended. */
static inline upipe_status run_note_driver(const run *u, run_rank *k)
{
    size_t left;
    UPIPE_TRY(device_left(u->o.device, &left, &k->c.err));
    if (left < u->left && u->left - left > k->driver_peak) k->driver_peak = u->left - left;
    return UPIPE_OK;
}

/* The step's books and log, and its checkpoint. */
static inline upipe_status run_after(run *u, run_rank *k, const trainer_rates *rates,
                                     const trainer_result *result, double seconds)
{
    k->seconds += seconds;
    UPIPE_TRY(run_note_driver(u, k));
    if (k->sent_bytes == 0) k->sent_bytes = trainer_sent(&k->t) - k->sent;
    k->p.mem.events = NULL; /* the first step is traced */
    if (k->t.world->rank == u->net.first) {
        run_log(u, k, result, rates, seconds);
        run_note(u, result, rates, k->seconds);
    }
    k->ended = !result->finite || result->stop;
    if (result->stop && run_signal == 0) run_signal = result->stop; /* it came to another process */
    if (!result->finite) k->keep = 0; /* an older checkpoint may be the one to go on from */
    if (result->finite) k->last = k->step;
    if (k->ended || u->o.save_every == 0 || k->step % u->o.save_every != 0) return UPIPE_OK;
    return run_save(u, &k->t, k->step, k->keep);
}

/* ---- after the last one ---- */

static inline upipe_status run_write_sample(run *u, run_rank *k)
{
    trainer *t = &k->t;
    const int is_first = t->world->rank == 0;
    const sample_request request = run_sample_request(u);
    int32_t *buf = is_first ? u->sample : (int32_t *)malloc((size_t)u->o.sample * sizeof *buf);
    int64_t made = 0;
    upipe_status s;
    if (buf == NULL) return upipe_fail(&k->c.err, UPIPE_ERR_MEMORY, "no memory for the sample");
    t->r.m = &k->sampled;
    s = sample_text(&t->r, t->world, &request, buf, u->o.sample, &made, t->gathered);
    if (!is_first) free(buf);
    if (is_first) u->sample_n = made;
    if (is_first && made < 0) u->broke = cli_fail("the sample: a logit is not finite; nothing is drawn");
    return s;
}

/* What was learnt is kept, however the training ended. */
static inline upipe_status run_finish(run *u, run_rank *k)
{
    int phase;
    if (k->last > 0 || u->o.steps == 0) {
        UPIPE_TRY(run_save(u, &k->t, k->last, k->keep));
        if (u->o.save_adapter != NULL)
            UPIPE_TRY(llama_save_adapter(&k->c, k->t.world, u->o.save_adapter, &k->t.state));
    }
    k->events_n = k->p.mem.events_n;
    for (phase = 0; phase < MODEL_PHASES; ++phase) k->phase[phase] = k->p.mem.phase_peak[phase];
    k->peak = k->p.mem.peak;
    k->host_peak = k->p.host.peak;
    if (u->o.sample > 0 && !k->ended) UPIPE_TRY(run_write_sample(u, k));
    return trainer_free_block(&k->t);
}

static inline upipe_status run_close(run_rank *k, upipe_status s)
{
    if (s != UPIPE_OK) trainer_stop(&k->t);
    if (s == UPIPE_OK) s = pools_destroy(&k->p, &k->c.err);
    trainer_close(&k->t);
    if (k->threads.workers > 0) pool_free(&k->threads);
    data_order_free(&k->order);
    free(k->borders);
    free(k->inputs);
    if (s != UPIPE_OK) k->peak = k->p.mem.peak;
    return s;
}

/* ---- all of it ---- */

static inline upipe_status run_rank_main(void *user, int rank, upipe_err *why)
{
    run *u = (run *)user;
    run_rank *k = &u->ranks[rank];
    const int64_t sequences = u->o.batch * u->o.accumulate; /* of a step, of this replica */
    upipe_status s = run_open(u, k, rank);
    if (s == UPIPE_OK && u->o.steps == 0 && run_evaluates(u, 0)) s = run_evaluate(u, k);
    while (s == UPIPE_OK && k->step < u->o.steps && !k->ended) {
        const double start = cli_clock(NULL);
        const trainer_rates rates = run_rates(u, ++k->step);
        trainer_batch batch;
        trainer_result result;
        s = run_batch(u, k, &u->text, (k->step - 1) * run_step_sequences(&u->o), sequences, &batch);
        if (s == UPIPE_OK) s = trainer_step(&k->t, &batch, &rates, &result);
        if (s == UPIPE_OK && result.lost)
            s = run_lost(u, k, result.lost, "updated");
        else if (s == UPIPE_OK)
            s = run_after(u, k, &rates, &result, cli_clock(NULL) - start);
        if (s == UPIPE_OK && !k->ended && run_evaluates(u, k->step)) s = run_evaluate(u, k);
    }
    if (s == UPIPE_OK) s = run_finish(u, k);
    s = run_close(k, s);
    *why = k->c.err;
    return s;
}

#endif

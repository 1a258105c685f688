/* run.h -- one training run: what the ranks share, and what each of them does
 *
 *     run_plan(&run);                      the memory of every rank, before anything is allocated
 *     run_train(&run);                     threads, steps, checkpoints, sample
 *     run_free(&run);
 *
 * The ranks are threads or processes, and share nothing that they write: a rank has its own pool, weights and
 * optimizer, and all that it hears of the others comes over its communicator. Each process plans all ranks, and
 * runs and measures its own. What is said and written at the end, the process of rank 0 says.
 */
#ifndef LLAMA_RUN_H
#define LLAMA_RUN_H

#include <signal.h>

#include "upipe/cpu/upipe_cpu_simd.h"
#include "upipe/upipe.h"

#include "../common/device_flag.h"
#include "../common/world.h"
#include "../common/side_stream.h"
#include "checkpoint.h"
#include "data.h"
#include "memory.h"
#include "options.h"
#include "sample.h"
#include "setting.h"
#include "trainer.h"

/* A rank's memory and what it measured. */
typedef struct run_rank {
    model m, sampled;
    memory_plan plan;
    device d;
    side_stream line, ahead; /* where something overlaps; where weights are gathered ahead */
    void *slab, *host_slab;
    upipe_mem_block *blocks, *host_blocks;
    upipe_mem_event *events;
    int64_t events_n;
    upipe_mem mem, host;
    size_t phase[MODEL_PHASES], peak, host_peak;
    int64_t sent_bytes; /* in the first step */
} run_rank;

typedef struct run {
    options o;
    llama_layout layout;
    upipe_ops ops; /* of the device, for plans */
    corpus text;
    struct world net;
    run_rank *ranks;
    llama_lock lock;     /* of the folder of --save */
    llama_run position;  /* of the checkpoint that is continued; step 0: none */
    const char *from;    /* folder of the weights to start from */
    double *loss, *norm; /* [steps], of the steps done here, from number position.step + 1 on */
    int64_t done;        /* steps done here */
    int64_t saved;       /* step of the newest checkpoint; 0 = none */
    double seconds;      /* in steps */
    char *sample;
    int64_t sample_n; /* bytes of it */
    int failed;       /* a rank aborted, or a promise was broken */
    int broke;        /* nonzero: a step's loss or gradient is not finite; the sentence is out */
} run;

/* Signals that end the training after the step they come in, or the sample after a byte. */
static volatile sig_atomic_t run_signal;
static const int run_signals[] = {SIGHUP, SIGINT, SIGTERM, SIGUSR1}; /* launchers pass the last one on */
static int64_t run_signal_at; /* atomic: when the first one came, ns; 0 = none has */

/* Whoever ends a program may signal it and its group, so that one wish comes twice. What comes RUN_SIGNAL_AGAIN after
 * the first, of whatever kind, ends the program at once. */
enum { RUN_SIGNAL_AGAIN = 1 }; /* seconds */

static void run_on_signal(int number)
{
    struct timespec t;
    int64_t now, none = 0;
    clock_gettime(CLOCK_MONOTONIC, &t);
    now = (int64_t)t.tv_sec * 1000000000 + t.tv_nsec + 1;
    if (__atomic_compare_exchange_n(&run_signal_at, &none, now, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
        run_signal = number;
    } else if (now - none >= (int64_t)RUN_SIGNAL_AGAIN * 1000000000) {
        signal(number, SIG_DFL);
        raise(number);
    }
}

/* ---- planning ---- */

static trainer_rates run_rates(const run *u, int64_t step)
{
    const options *o = &u->o;
    double progress = o->steps > o->warmup ? (double)(step - o->warmup) / (double)(o->steps - o->warmup) : 1;
    trainer_rates r;
    r.step = step;
    r.rate = step <= o->warmup ? o->lr * (double)step / (double)o->warmup
                               : o->min_lr + 0.5 * (o->lr - o->min_lr) * (1 + cos(acos(-1.0) * progress));
    r.beta1 = o->beta1;
    r.beta2 = o->beta2;
    r.eps = o->adam_eps;
    r.decay = o->weight_decay;
    r.clip = o->clip;
    return r;
}

static sample_wish run_wish(const run *u)
{
    sample_wish w;
    w.prompt = u->o.prompt;
    w.temperature = u->o.temperature;
    w.seed = (uint64_t)u->o.seed;
    w.stop = &run_signal;
    return w;
}

/* After a step of a dry rank: one byte of a sample. */
typedef struct run_sample {
    const run *u;
    const model *m;
} run_sample;

static upipe_status run_dry_sample(trainer *t, void *user)
{
    const run_sample *sample = (const run_sample *)user;
    sample_wish wish = run_wish(sample->u);
    int64_t made;
    char byte;
    t->r.m = sample->m;
    return sample_text(&t->r, t->world, &wish, &byte, 1, &made, t->gathered);
}

/* The memory of one rank, by a dry run. sampled: NULL for none */
static upipe_status run_dry(const run *u, const model *m, const model *sampled, memory_plan *plan,
                            upipe_err *e)
{
    run_sample sample = {u, sampled};
    return memory_plan_make(plan, m, &u->ops, u->o.sample > 0 && sampled != NULL ? run_dry_sample : NULL,
                            &sample, e);
}

static int run_fail(upipe_status s, const upipe_err *e)
{
    return cli_fail("%s%s", cli_status(s), e->text);
}

/* The ranks of a machine share its memory: says no rather than to be killed for it.
 *   planned   zero: before the dry runs, with what is known without them
 */
static int run_check_memory(const run *u, int planned)
{
    double slabs = 0, host = 16.0 * (double)u->o.steps, have = cli_memory();
    const int all = u->net.all == NULL, first = all ? 0 : u->net.near_first;
    int r;
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

/* Plans of a rank's training and sample. */
static upipe_status run_plan_rank(const run *u, run_rank *k, int rank, upipe_err *e)
{
    const options *o = &u->o;
    setting s;
    s.layout = &u->layout;
    s.how = o->how;
    s.activations = o->activations;
    s.tokens = o->tokens;
    s.batch = o->batch;
    s.dtype = o->dtype;
    s.tile_bytes = o->tile_bytes;
    s.zero = o->zero;
    s.prefetch = o->zero_prefetch;
    s.reduce = o->reduce;
    UPIPE_TRY(setting_model(&k->m, &s, rank, e));
    return sample_model(&k->sampled, &k->m, e);
}

/* An earlier rank whose pool lives as this one's does; the rank itself if there is none. */
static int run_like(const run *u, int rank)
{
    const run_rank *k = &u->ranks[rank], *all = u->ranks;
    int r = 0;
    while (r < rank && !(memory_same(&all[r].m, &k->m) && memory_same(&all[r].sampled, &k->sampled))) ++r;
    return r;
}

/* Plans and memory of every rank. 0, or -1 with the sentence out. */
static int run_plan(run *u)
{
    const int ranks = u->o.how.ranks;
    upipe_err e;
    int r;
    upipe_status s = UPIPE_OK;
    memset(&e, 0, sizeof e);
    u->ranks = (run_rank *)calloc((size_t)ranks, sizeof *u->ranks);
    if (u->ranks == NULL) return cli_fail("out of memory: %d ranks", ranks);
    for (r = 0; r < ranks && s == UPIPE_OK; ++r) s = run_plan_rank(u, &u->ranks[r], r, &e);
    /* A dry run walks through all tiles and sums: their number must make sense before. */
    if (s == UPIPE_OK && !u->o.plan && run_check_memory(u, 0) != 0) return -1;
    for (r = 0; r < ranks && s == UPIPE_OK; ++r) {
        run_rank *k = &u->ranks[r];
        const int like = run_like(u, r);
        if (like < r)
            k->plan = u->ranks[like].plan;
        else
            s = run_dry(u, &k->m, &k->sampled, &k->plan, &e);
    }
    return s == UPIPE_OK ? 0 : run_fail(s, &e);
}

/* ---- one rank ---- */

static upipe_status run_allocate(const run *u, run_rank *k, upipe_ctx *c, upipe_mem **host)
{
    size_t slab = (k->plan.need + UPIPE_MEM_ALIGN - 1) / UPIPE_MEM_ALIGN * UPIPE_MEM_ALIGN;
    size_t second = (k->plan.host_need + UPIPE_MEM_ALIGN - 1) / UPIPE_MEM_ALIGN * UPIPE_MEM_ALIGN;
    UPIPE_TRY(device_open(&k->d, u->o.device, &c->err));
    device_use(&k->d, c);
    if (u->o.how.overlap) UPIPE_TRY(side_stream_open(&k->line, u->o.device, c));
    if (u->o.zero_prefetch) UPIPE_TRY(side_stream_make(&k->ahead, u->o.device, &c->err));
    UPIPE_TRY(device_slab(&k->d, &k->slab, slab, &c->err));
    UPIPE_TRY(device_host_slab(&k->d, &k->host_slab, second, &c->err));
    k->blocks = (upipe_mem_block *)calloc((size_t)k->plan.blocks_max, sizeof *k->blocks);
    k->host_blocks = (upipe_mem_block *)calloc((size_t)k->plan.blocks_max, sizeof *k->host_blocks);
    if (u->o.trace != NULL)
        k->events = (upipe_mem_event *)calloc((size_t)k->plan.events_max, sizeof *k->events);
    if (k->blocks == NULL || k->host_blocks == NULL || (u->o.trace != NULL && k->events == NULL))
        return upipe_fail(&c->err, UPIPE_ERR_MEMORY, "no memory for the tables of a rank's pools");
    upipe_mem_init(&k->mem, k->slab, slab, k->blocks, k->plan.blocks_max);
    upipe_mem_init(&k->host, k->host_slab, second, k->host_blocks, k->plan.blocks_max);
    k->mem.events = k->events;
    k->mem.events_max = k->plan.events_max;
    k->mem.clock = cli_clock;
    c->mem = &k->mem;
    *host = &k->host;
    return UPIPE_OK;
}

/* Element i of a new matrix: normal, of the deviation that GPT-2 and Llama start from, smaller where the
 * stream adds up over 2 * layers halves. A function of the seed and the place alone. */
static float run_initial(const llama_tensor *t, int64_t layers, uint64_t seed, int64_t i)
{
    uint64_t at = text_mix(seed) + (uint64_t)(t->at + i) * 0x9e3779b97f4a7c15u;
    double one = ((double)(text_mix(at) >> 11) + 1) * 0x1p-53, two = (double)(text_mix(~at) >> 11) * 0x1p-53;
    double deviation =
        t->kind == LLAMA_WO || t->kind == LLAMA_DOWN ? 0.02 / sqrt(2.0 * (double)layers) : 0.02;
    return (float)(deviation * sqrt(-2 * log(one)) * cos(2 * acos(-1.0) * two));
}

/* What this rank has of a unit's new weights, of which it has the optimizer's states. */
static upipe_status run_begin_unit(const run *u, trainer *t, int unit)
{
    enum { CHUNK = 4096 };
    const upipe_zero *z = &t->state.zero[LLAMA_WEIGHTS];
    const upipe_zero_part p = upipe_zero_part_of(z, UPIPE_ZERO_STATES, unit);
    const int64_t shift = upipe_zero_sharded(z, UPIPE_ZERO_WEIGHTS) ? p.at - p.first : 0;
    const size_t element = upipe_dtype_bytes(z->dtype);
    const llama_tensor *tensor = u->layout.tensors;
    upipe_ctx *c = t->r.c;
    float wide[CHUNK];
    uint16_t narrow[CHUNK];
    int64_t at, i;
    for (at = p.first; at < p.first + p.n; at += CHUNK) {
        int64_t count = p.first + p.n - at < CHUNK ? p.first + p.n - at : CHUNK;
        for (i = 0; i < count; ++i) {
            while (at + i >= tensor->at + tensor->n) ++tensor;
            wide[i] = run_initial(tensor, u->layout.config.layers, (uint64_t)u->o.seed, at + i - tensor->at);
            narrow[i] = upipe_f32_to_bf16(wide[i]);
        }
        UPIPE_TRY(c->ops->copy(c, (char *)z->weights + (size_t)(at + shift) * element,
                               z->dtype == UPIPE_F32 ? (void *)wide : (void *)narrow,
                               (size_t)count * element));
        if (t->state.master != NULL)
            UPIPE_TRY(c->ops->copy(c, t->state.master + (at - p.first + p.at), wide, (size_t)count * 4));
    }
    return UPIPE_OK;
}

/* Norm weights are 1, biases 0. */
static upipe_status run_begin_vectors(const run *u, trainer *t)
{
    enum { CHUNK = 4096 };
    float *const vectors = (float *)t->state.zero[LLAMA_VECTORS].weights;
    upipe_ctx *c = t->r.c;
    float ones[CHUNK];
    int64_t at, n;
    int i;
    for (i = 0; i < CHUNK; ++i) ones[i] = 1;
    UPIPE_TRY(c->ops->zero(c, vectors, (size_t)u->layout.vectors * 4));
    for (i = 0; i < u->layout.n; ++i) {
        const llama_tensor *tensor = &u->layout.tensors[i];
        if (!tensor->is_vector || llama_is_bias(tensor->kind)) continue;
        for (at = 0; at < tensor->n; at += n) {
            n = tensor->n - at < CHUNK ? tensor->n - at : CHUNK;
            UPIPE_TRY(c->ops->copy(c, vectors + tensor->at + at, ones, (size_t)n * 4));
        }
    }
    return UPIPE_OK;
}

/* Each rank computes its slices of the new weights; then the slices are gathered, where all are to be whole. */
static upipe_status run_begin_new(const run *u, trainer *t)
{
    int unit;
    for (unit = 0; unit < u->layout.units; ++unit) UPIPE_TRY(run_begin_unit(u, t, unit));
    UPIPE_TRY(upipe_zero_weights_gather(t->r.c, &t->state.zero[LLAMA_WEIGHTS]));
    return run_begin_vectors(u, t);
}

static upipe_status run_begin(const run *u, trainer *t)
{
    llama_run position;
    if (u->from == NULL) return run_begin_new(u, t);
    UPIPE_TRY(llama_load_weights(t->r.c, u->from, &t->state));
    if (u->o.resume == NULL) return UPIPE_OK;
    return llama_load_optimizer(t->r.c, u->from, &t->state, &position);
}

/* This rank's tokens of the step's sequences, [part][batch][T]; returns the valid targets, or -1 without
 * memory. */
static int64_t run_fill(const run *u, const model *m, text_order *order, int64_t step, int32_t *inputs,
                        int32_t *targets)
{
    const int64_t batch = m->plan.desc.batch;
    int64_t b, i, valid = 0;
    for (b = 0; b < batch; ++b) {
        int64_t window = text_window(&u->text, order, (uint64_t)u->o.seed, (step - 1) * batch + b), at = 0;
        int part;
        if (window < 0) return -1;
        for (part = 0; part < model_parts(m); ++part) {
            const upipe_shard s = model_shard(m, part);
            text_fill(&u->text, window, &s, inputs + at + b * s.n, targets + at + b * s.n);
            at += batch * s.n;
        }
    }
    for (i = 0; i < m->rows; ++i) valid += targets[i] >= 0;
    return valid;
}

static upipe_status run_save(run *u, trainer *t, int64_t step, int keep)
{
    llama_run position;
    upipe_comm *team;
    upipe_status s;
    if (u->o.save == NULL || u->saved == step) return UPIPE_OK;
    position.step = step;
    position.tokens = u->o.tokens;
    position.batch = u->o.batch;
    position.text_bytes = u->text.bytes;
    position.text_hash = u->text.hash;
    position.steps = u->o.steps;
    position.warmup = u->o.warmup;
    position.lr = u->o.lr;
    position.min_lr = u->o.min_lr;
    position.weight_decay = u->o.weight_decay;
    position.beta1 = u->o.beta1;
    position.beta2 = u->o.beta2;
    position.adam_eps = u->o.adam_eps;
    position.clip = u->o.clip;
    position.seed = u->o.seed;
    team = t->r.c->team;
    t->r.c->team = t->world;
    s = llama_save(t->r.c, u->o.save, &t->state, &position, keep);
    t->r.c->team = team;
    UPIPE_TRY(s);
    UPIPE_TRY(upipe_comm_barrier(t->r.c, t->world)); /* all have read `saved` */
    if (t->world->rank == u->net.first) u->saved = step;
    return upipe_comm_barrier(t->r.c, t->world);
}

static void run_progress(const run *u, const trainer_result *result, const trainer_rates *rates,
                         double seconds)
{
    int64_t here = u->done, left = u->o.steps - rates->step;
    double each = seconds / (double)here;
    if (!u->o.progress) return;
    fprintf(stderr, "step %lld/%lld  loss %.4f  norm %.3f  rate %.2e  %.0f tokens/s  ETA %.0f s\n",
            (long long)rates->step, (long long)u->o.steps, result->loss, result->norm, rates->rate,
            (double)u->o.tokens * (double)u->o.batch / each, each * (double)left);
}

static const char *run_number(char out[32], double v)
{
    snprintf(out, 32, "%g", v);
    return isnan(v) ? "not a number" : isinf(v) ? "infinite" : out;
}

/* Rank 0 keeps the books. What is not finite is said at once, before what follows from it: a checkpoint that cannot be
 * saved. */
static void run_note(run *u, const trainer_result *result, const trainer_rates *rates, double seconds)
{
    char loss[32], norm[32];
    if (!result->finite) {
        u->broke = cli_fail(
            "step %lld: the loss is %s and the norm of the gradient %s; nothing was updated in this step",
            (long long)rates->step, run_number(loss, result->loss), run_number(norm, result->norm));
        return;
    }
    u->loss[u->done] = result->loss;
    u->norm[u->done] = result->norm;
    ++u->done;
    u->seconds = seconds;
    run_progress(u, result, rates, seconds);
}

/* The steps; *inputs has space for inputs and targets. *ended, the same on all ranks, says whether they ended
 * before their time. */
static upipe_status run_steps(run *u, run_rank *k, trainer *t, text_order *order, int32_t *inputs, int *ended)
{
    upipe_ctx *c = t->r.c;
    int rank = t->world->rank;
    double seconds = 0;
    int64_t step, last = u->position.step, sent = trainer_sent(t);
    int keep = u->o.keep;
    for (step = last + 1, *ended = 0; step <= u->o.steps && !*ended; ++step) {
        trainer_rates rates = run_rates(u, step);
        trainer_result result;
        trainer_batch batch;
        double start = cli_clock(NULL);
        batch.inputs = inputs;
        batch.targets = inputs + k->m.rows;
        batch.valid = run_fill(u, &k->m, order, step, inputs, inputs + k->m.rows);
        batch.stop = run_signal;
        if (batch.valid < 0)
            return upipe_fail(&c->err, UPIPE_ERR_MEMORY, "no memory for the order of the text");
        UPIPE_TRY(trainer_step(t, &batch, &rates, &result));
        seconds += cli_clock(NULL) - start;
        if (k->sent_bytes == 0) k->sent_bytes = trainer_sent(t) - sent;
        k->mem.events = NULL; /* the first step is traced */
        if (rank == u->net.first) run_note(u, &result, &rates, seconds);
        *ended = !result.finite || result.stop;
        if (result.stop && run_signal == 0) run_signal = result.stop; /* it came to another process */
        if (!result.finite) keep = 0; /* an older checkpoint may be the one to go on from */
        if (result.finite) last = step;
        if (!*ended && u->o.save_every > 0 && step % u->o.save_every == 0)
            UPIPE_TRY(run_save(u, t, step, keep));
    }
    /* what was learnt is kept, however the training ended */
    return last > 0 ? run_save(u, t, last, keep) : UPIPE_OK;
}

static upipe_status run_life(run *u, run_rank *k, trainer *t, text_order *order)
{
    upipe_ctx *c = t->r.c;
    int32_t *inputs = (int32_t *)malloc((size_t)k->m.rows * 2 * sizeof *inputs);
    sample_wish wish = run_wish(u);
    upipe_status s = UPIPE_OK;
    int64_t made = 0;
    int phase, ended = 0;
    if (inputs == NULL) return upipe_fail(&c->err, UPIPE_ERR_MEMORY, "no memory for the tokens of a step");
    s = trainer_alloc(t);
    if (s == UPIPE_OK) s = run_begin(u, t);
    if (s == UPIPE_OK) s = run_steps(u, k, t, order, inputs, &ended);
    free(inputs);
    UPIPE_TRY(s);
    k->events_n = k->mem.events_n;
    for (phase = 0; phase < MODEL_PHASES; ++phase) k->phase[phase] = k->mem.phase_peak[phase];
    k->peak = k->mem.peak;
    k->host_peak = k->host.peak;
    if (u->o.sample > 0 && !ended) {
        char *buf = t->world->rank == 0 ? u->sample : (char *)malloc((size_t)u->o.sample);
        if (buf == NULL) return upipe_fail(&c->err, UPIPE_ERR_MEMORY, "no memory for the sample");
        t->r.m = &k->sampled;
        s = sample_text(&t->r, t->world, &wish, buf, u->o.sample, &made, t->gathered);
        if (t->world->rank != 0)
            free(buf);
        else
            u->sample_n = made;
        UPIPE_TRY(s);
    }
    return trainer_free_block(t);
}

static upipe_status run_rank_main(void *user, int rank, upipe_err *why)
{
    run *u = (run *)user;
    run_rank *k = &u->ranks[rank];
    text_order order;
    upipe_ctx c;
    upipe_mem *host = NULL;
    trainer t;
    upipe_status s;
    memset(&c, 0, sizeof c);
    memset(&t, 0, sizeof t);
    world_use(&u->net, rank, &c);
    text_order_init(&order);
    s = upipe_comm_barrier(&c, world_all(&u->net, rank)); /* all have started */
    if (s == UPIPE_OK) s = run_allocate(u, k, &c, &host);
    if (s == UPIPE_OK) s = trainer_open(&t, &k->m, &c, world_all(&u->net, rank), host);
    t.r.kept.side = &k->d;
    if (u->o.zero_prefetch) {
        t.side = &k->ahead.side_stream;
        t.side_world = world_side(&u->net, rank);
    }
    if (s == UPIPE_OK) s = run_life(u, k, &t, &order);
    if (s != UPIPE_OK) trainer_stop(&t);
    if (s == UPIPE_OK) s = upipe_mem_destroy(&k->mem, &c.err);
    if (s == UPIPE_OK) s = upipe_mem_destroy(&k->host, &c.err);
    trainer_close(&t);
    text_order_free(&order);
    if (s != UPIPE_OK) k->peak = k->mem.peak;
    *why = c.err;
    return s;
}

/* ---- all ranks ---- */

/* What the dry runs said, held against what the pools measured. */
static int run_check_promises(const run *u)
{
    int r, phase, bad = 0;
    for (r = u->net.first; r < u->net.first + u->net.here && u->done > 0; ++r) {
        const run_rank *k = &u->ranks[r];
        for (phase = 0; phase < MODEL_PHASES; ++phase)
            if (k->phase[phase] != k->plan.phase[phase])
                bad = cli_fail("rank %d held %zu bytes in %s, the plan says %zu", r, k->phase[phase],
                               model_phase_name(phase), k->plan.phase[phase]);
        if (k->peak != k->plan.peak || k->host_peak != k->plan.host)
            bad = cli_fail("rank %d held %zu bytes, and %zu in the second pool; the plan says %zu and %zu", r,
                           k->peak, k->host_peak, k->plan.peak, k->plan.host);
    }
    return bad;
}

static void run_free(run *u)
{
    int r;
    for (r = 0; u->ranks != NULL && r < u->o.how.ranks; ++r) {
        device_slab_free(&u->ranks[r].d, u->ranks[r].slab);
        device_host_slab_free(&u->ranks[r].d, u->ranks[r].host_slab);
        side_stream_close(&u->ranks[r].line, NULL);
        side_stream_close(&u->ranks[r].ahead, NULL);
        device_close(&u->ranks[r].d, NULL);
        free(u->ranks[r].blocks);
        free(u->ranks[r].host_blocks);
        free(u->ranks[r].events);
    }
    free(u->ranks);
    free(u->loss);
    free(u->norm);
    free(u->sample);
    text_close(&u->text);
    llama_layout_free(&u->layout);
}

/* run_train -- after run_plan, with the text open: trains. 0, or -1 with the sentence out */
static int run_train(run *u)
{
    struct sigaction action, old;
    upipe_status s;
    upipe_err e;
    size_t i;
    int bad;
    memset(&e, 0, sizeof e);
    u->loss = (double *)calloc((size_t)u->o.steps, sizeof *u->loss);
    u->norm = (double *)calloc((size_t)u->o.steps, sizeof *u->norm);
    u->sample = (char *)calloc((size_t)u->o.sample + 1, 1);
    bad = u->loss == NULL || u->norm == NULL || u->sample == NULL ? cli_fail("out of memory") : 0;
    if (world_agree(&u->net, bad) != 0) return -1;
    memset(&action, 0, sizeof action);
    action.sa_handler = run_on_signal;
    action.sa_flags = SA_RESTART; /* a checkpoint's writes go on */
    for (i = 0; i < sizeof run_signals / sizeof *run_signals; ++i)
        if (sigaction(run_signals[i], NULL, &old) == 0 && old.sa_handler != SIG_IGN)
            sigaction(run_signals[i], &action, NULL);
    u->net.told = &run_signal;
    s = world_split(&u->net, u->o.how.ranks / u->o.how.ring, u->o.how.ring, &e);
    if (s != UPIPE_OK) return run_fail(s, &e);
    bad = world_run(&u->net, run_rank_main, u, "");
    world_join(&u->net);
    return world_agree(&u->net, bad != 0 ? bad : run_check_promises(u));
}

#endif

/* ranks.h -- all ranks of a run: begun, run, held to what was planned, freed */
#ifndef LLAMA_RANKS_H
#define LLAMA_RANKS_H

#include "rank.h"

/* What the dry runs said, held against what the pools measured. */
static inline int run_check_promises(const run *u)
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

static inline void run_free(run *u)
{
    int r;
    for (r = 0; u->ranks != NULL && r < u->o.how.ranks; ++r) {
        pools_close(&u->ranks[r].p, NULL);
        side_stream_close(&u->ranks[r].ahead, NULL);
        free(u->ranks[r].events);
        free(u->ranks[r].capacity);
    }
    if (u->log != NULL) fclose(u->log);
    free(u->ranks);
    free(u->o.borders);
    free(u->loss);
    free(u->norm);
    free(u->evals);
    free(u->sample);
    free(u->prompt);
    data_close(&u->text);
    data_close(&u->held);
    llama_layout_free(&u->layout);
    llama_adapter_close(&u->adapter);
}

/* run_train -- after run_plan, with the text open: trains. 0, or -1 with the sentence out */
static inline int run_train(run *u)
{
    upipe_status s;
    upipe_err e;
    int bad;
    memset(&e, 0, sizeof e);
    u->saved = u->sample_n = -1;
    u->loss = (double *)calloc((size_t)u->o.steps + 1, sizeof *u->loss);
    u->norm = (double *)calloc((size_t)u->o.steps + 1, sizeof *u->norm);
    u->evals = (run_eval *)calloc((size_t)(u->o.eval_every > 0 ? u->o.steps / u->o.eval_every : 0) + 1,
                                  sizeof *u->evals);
    u->sample = (int32_t *)calloc((size_t)u->o.sample + 1, sizeof *u->sample);
    bad = u->loss == NULL || u->norm == NULL || u->evals == NULL || u->sample == NULL
              ? cli_fail("out of memory")
              : 0;
    if (u->o.log != NULL && world_is_root(&u->net)) {
        u->log = fopen(u->o.log, u->o.resume != NULL ? "a" : "w");
        if (u->log == NULL) bad = cli_fail("--log %s cannot be written: %s", u->o.log, strerror(errno));
    }
    if (bad == 0 && device_left(u->o.device, &u->left, &e) != UPIPE_OK) bad = cli_fail("%s", e.text);
    u->begun = cli_clock(NULL);
    u->line = u->begun + RUN_LINE_FIRST;
    if (world_agree(&u->net, bad) != 0) return -1;
    run_signals_catch();
    u->net.caught = &run_signal;
    s = world_split(&u->net, u->o.how.ranks / u->o.replicas / u->o.how.ring, u->o.how.ring, &e);
    if (s != UPIPE_OK) return run_fail(s, &e);
    bad = world_run(&u->net, run_rank_main, u, "");
    world_join(&u->net);
    return world_agree(&u->net, bad != 0 ? bad : u->lost != 0 ? u->lost : run_check_promises(u));
}

#endif

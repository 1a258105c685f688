/* log.h -- what a training says of its steps while it runs: lines on stderr, and --log's file */
#ifndef LLAMA_LOG_H
#define LLAMA_LOG_H

#include "run.h"

/* A terminal has a line a step; a file has one now and then, ever more seldom. */
enum {
    RUN_LINE_FIRST = 5,
    RUN_LINE_MOST = 60,
    RUN_LINE_SHARE = 10
}; /* seconds; of the time so far, 1 in so many */
static inline void run_progress(run *u, const trainer_result *result, const trainer_rates *rates,
                                double seconds)
{
    const int64_t here = u->done, left = u->o.steps - rates->step;
    const double each = seconds / (double)here, now = cli_clock(NULL);
    if (!world_is_root(&u->net) || (!u->o.progress && now < u->line)) return;
    u->line = now + fmin(fmax((now - u->begun) / RUN_LINE_SHARE, RUN_LINE_FIRST), RUN_LINE_MOST);
    fprintf(stderr, "step %lld/%lld  loss %.4f  norm %.3f  rate %.2e  %.0f tokens/s  ETA %.0f s\n",
            (long long)rates->step, (long long)u->o.steps, result->loss, result->norm, rates->rate,
            run_step_tokens(u) / each, each * (double)left);
}

/* A member of a line of --log, behind another; what is no number is null. */
static inline void run_log_number(FILE *f, const char *name, double v)
{
    fprintf(f, ", \"%s\": ", name);
    if (isfinite(v))
        fprintf(f, "%.17g", v);
    else
        fputs("null", f);
}

/* A reader has the lines so far. What cannot be written is said once. */
static inline void run_log_flush(run *u)
{
    if (fflush(u->log) == 0) return;
    u->log_failed = cli_fail("--log %s cannot be written: %s", u->o.log, strerror(errno));
    fclose(u->log);
    u->log = NULL;
}

/* The step's line, which a reader has when the step ends. */
static inline void run_log(run *u, const run_rank *k, const trainer_result *result,
                           const trainer_rates *rates, double seconds)
{
    FILE *const f = u->log;
    int i;
    if (f == NULL) return;
    fprintf(f, "{\"step\": %" PRId64, rates->step);
    run_log_number(f, "loss", result->loss);
    run_log_number(f, "norm", result->norm);
    run_log_number(f, "rate", rates->rate);
    run_log_number(f, "tokens_per_s", run_step_tokens(u) / seconds);
    fprintf(f, ", \"seconds\": {\"step\": %.17g", seconds);
    for (i = 0; i < TRAINER_PHASES; ++i) run_log_number(f, trainer_phase_names[i], result->seconds[i]);
    fprintf(f, "}, \"peak_bytes\": %zu}\n", k->p.mem.peak);
    run_log_flush(u);
}

static inline const char *run_number(char out[32], double v)
{
    snprintf(out, 32, "%g", v);
    return isnan(v) ? "not a number" : isinf(v) ? "infinite" : out;
}

/* Rank 0 keeps the books. What is not finite is said at once, before what follows from it: a checkpoint that cannot be
 * saved. */
static inline void run_note(run *u, const trainer_result *result, const trainer_rates *rates, double seconds)
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

#endif

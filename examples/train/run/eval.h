/* eval.h -- the loss of another text, of which nothing is learnt: --eval
 *
 * All windows of the text in their order, a batch of the training's size for each replica at a time, forward alone. Each target's loss is
 * rounded to a multiple of 2^-24 nats, so that sums are whole numbers: the value does not depend on how many ranks and
 * replicas add up which of them.
 */
#ifndef LLAMA_EVAL_H
#define LLAMA_EVAL_H

#include "batch.h"

/* Whether a step is evaluated: every --eval-every, and the last one. */
static inline int run_evaluates(const run *u, int64_t step)
{
    return u->o.eval != NULL && (step == u->o.steps || (u->o.eval_every > 0 && step % u->o.eval_every == 0));
}

/* Rank 0 keeps the value. It is on stderr at once where a step has a line, or the training has lasted. */
static inline void run_eval_note(run *u, int64_t step, const trainer_score *sum)
{
    run_eval *e = &u->evals[u->evals_n++];
    e->step = step;
    e->targets = sum->targets;
    e->loss = (double)sum->nats / TRAINER_NAT / (double)(sum->targets > 0 ? sum->targets : 1);
    if (sum->broken > 0) {
        e->loss = NAN;
        u->broke =
            cli_fail("step %lld: the loss of --eval is no number: %lld of its %lld targets have none that is "
                     "finite and can be summed",
                     (long long)step, (long long)sum->broken, (long long)sum->targets);
    }
    if (world_is_root(&u->net) && (u->o.progress || cli_clock(NULL) - u->begun >= RUN_LINE_FIRST))
        fprintf(stderr, "step %lld/%lld  evaluation: loss %.4f  perplexity %.4f  %lld targets\n",
                (long long)step, (long long)u->o.steps, e->loss, exp(e->loss), (long long)e->targets);
    if (u->log == NULL) return;
    fprintf(u->log, "{\"step\": %" PRId64, step);
    run_log_number(u->log, "eval_loss", e->loss);
    run_log_number(u->log, "eval_perplexity", exp(e->loss));
    fprintf(u->log, ", \"eval_targets\": %" PRId64 "}\n", e->targets);
    run_log_flush(u);
}

/* All ranks together; a signal ends it between two batches, and then there is no value. One that is no number ends the
 * training, as a step's loss does. */
static inline upipe_status run_evaluate(run *u, run_rank *k)
{
    const int64_t batch = k->m.plan.desc.batch;
    trainer_score sum;
    int64_t window;
    memset(&sum, 0, sizeof sum);
    for (window = 0; window < u->held.windows && !sum.stop && !sum.lost; window += batch * u->o.replicas) {
        trainer_batch b;
        UPIPE_TRY(run_batch(u, k, &u->held, window, batch, &b));
        UPIPE_TRY(trainer_evaluate(&k->t, &b, &sum));
    }
    if (sum.lost) return run_lost(u, k, sum.lost, "evaluated");
    if (sum.stop) {
        k->ended = 1;
        if (run_signal == 0) run_signal = sum.stop; /* it came to another process */
        return UPIPE_OK;
    }
    if (k->t.world->rank == u->net.first) run_eval_note(u, k->step, &sum);
    if (sum.broken > 0) {
        k->ended = 1;
        k->keep = 0; /* an older checkpoint may be the one to go on from */
    }
    return UPIPE_OK;
}

#endif

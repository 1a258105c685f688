/* batch.h -- a rank's tokens of a step, or of a part of an evaluation */
#ifndef LLAMA_BATCH_H
#define LLAMA_BATCH_H

#include "log.h"

/* This rank's tokens of sequence b of a micro-batch, [part][batch][T]: a window of a text; of none (-1) nothing, and it has no
 * target. */
static inline int run_fill(run_rank *k, const corpus *text, int64_t b, int64_t window, int32_t *inputs,
                           int32_t *targets)
{
    const model *m = &k->m;
    const int64_t batch = m->plan.desc.batch;
    int64_t at = 0, i;
    int part, lost = 0;
    for (part = 0; part < model_parts(m); ++part) {
        const upipe_shard s = model_shard(m, part);
        const int64_t from = at + b * s.n;
        if (window >= 0) lost |= data_fill(text, &k->order, window, &s, inputs + from, targets + from);
        for (i = from; i < from + s.n && window < 0; ++i) inputs[i] = 0, targets[i] = DATA_IGNORE;
        at += batch * s.n;
    }
    return lost;
}

/* This replica's sequences of those from number `first` on, of the training's shuffled windows, or of the evaluation's in their
 * order: micro-batches one behind the other, and the borders of their documents likewise. */
static inline upipe_status run_batch(const run *u, run_rank *k, const corpus *text, int64_t first,
                                     int64_t sequences, trainer_batch *out)
{
    const model *m = &k->m;
    const int64_t batch = m->plan.desc.batch, rows = m->rows * (sequences / batch);
    int32_t *const inputs = k->inputs, *const targets = k->inputs + rows;
    int64_t used = 0, n, i; /* used: numbers of the borders */
    int lost = 0;
    memset(out, 0, sizeof *out);
    out->inputs = inputs;
    out->targets = targets;
    out->stop = run_signal;
    if (text->packed) out->borders = k->borders;
    for (n = 0; n < sequences; ++n) {
        const int64_t b = n % batch, at = n / batch * m->rows,
                      number = run_sequence(&u->o, m->replica, first, n);
        const int trains = text == &u->text, is_there = trains || number < text->windows;
        const int64_t window = !trains ? number : data_window(text, &k->order, (uint64_t)u->o.seed, number);
        if (window < 0) return upipe_fail(&k->c.err, UPIPE_ERR_MEMORY, "no memory for the order of the text");
        if (text->packed) {
            used += b == 0 && n > 0; /* behind those of the micro-batch before */
            used += data_borders(text, &k->order, is_there ? window : 0, b * u->o.tokens, k->borders + used);
        }
        lost |= run_fill(k, text, b, is_there ? window : -1, inputs + at, targets + at);
    }
    for (i = 0; i < rows; ++i) out->valid += targets[i] >= 0;
    if (lost) out->valid = -1;
    return UPIPE_OK;
}

/* The tokens of a rank are gone: the step was not done, or its text not evaluated. What was learnt before is saved. */
static inline upipe_status run_lost(run *u, run_rank *k, int lost, const char *what)
{
    k->ended = 1;
    if (lost == 1 + k->t.world->rank)
        u->lost = cli_fail(
            "step %lld: %s has changed since the training began, or can no longer be read; nothing was %s "
            "in this step",
            (long long)k->step, k->order.lost, what);
    return UPIPE_OK;
}

#endif

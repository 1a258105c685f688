/* batch.h -- a rank's tokens of a step, or of a part of an evaluation */
#ifndef LLAMA_BATCH_H
#define LLAMA_BATCH_H

#include "log.h"

/* This rank's tokens of sequence b, [part][batch][T]: a window of a text; of none (-1) nothing, and it has no target. */
static inline int run_fill(run_rank *k, const corpus *text, int64_t b, int64_t window)
{
    const model *m = &k->m;
    const int64_t batch = m->plan.desc.batch;
    int32_t *const inputs = k->inputs, *const targets = k->inputs + m->rows;
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

/* A batch: sequences from number `first` on, of the training's shuffled windows, or of the evaluation's in their order. */
static inline upipe_status run_batch(const run *u, run_rank *k, const corpus *text, int64_t first,
                                     trainer_batch *out)
{
    const model *m = &k->m;
    const int64_t batch = m->plan.desc.batch;
    int64_t b, i;
    int lost = 0;
    memset(out, 0, sizeof *out);
    out->inputs = k->inputs;
    out->targets = k->inputs + m->rows;
    out->stop = run_signal;
    if (text->packed) out->borders = k->borders;
    for (b = 0; b < batch; ++b) {
        const int trains = text == &u->text, is_there = trains || first + b < text->windows;
        const int64_t window =
            !trains ? first + b : data_window(text, &k->order, (uint64_t)u->o.seed, first + b);
        if (window < 0) return upipe_fail(&k->c.err, UPIPE_ERR_MEMORY, "no memory for the order of the text");
        if (text->packed)
            out->borders_n += data_borders(text, &k->order, is_there ? window : 0, b * u->o.tokens,
                                           k->borders + out->borders_n);
        lost |= run_fill(k, text, b, is_there ? window : -1);
    }
    for (i = 0; i < m->rows; ++i) out->valid += out->targets[i] >= 0;
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

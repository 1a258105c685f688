/* run.h -- one training run: what the ranks share, and what each of them has
 *
 *     run_plan(&run);                      plan.h: the memory of every rank, before anything is allocated
 *     run_train(&run);                     ranks.h: threads or processes, each with the life of rank.h
 *     run_free(&run);
 *
 * The ranks are threads or processes, and share nothing that they write: a rank has its own pool, weights and
 * optimizer, and all that it hears of the others comes over its communicator. Each process plans all ranks, and
 * runs and measures its own. What is said and written at the end, the process of rank 0 says.
 */
#ifndef LLAMA_RUN_H
#define LLAMA_RUN_H

#include "upipe/upipe.h"

#include "../../common/device_flag.h"
#include "../../common/pool.h"
#include "../../common/world.h"
#include "../files/data.h"
#include "../model/setting.h"
#include "../state/checkpoint.h"
#include "../state/memory.h"
#include "options.h"
#include "pools.h"
#include "sample.h"
#include "signals.h"

/* A rank's memory and what it measured. */
typedef struct run_rank {
    model m, sampled;
    memory_plan plan;
    pools p;
    side_stream ahead; /* where weights are gathered ahead */
    upipe_ops host;    /* of the CPU, for what is updated in the second pool; its threads */
    pool threads;
    upipe_par par;
    upipe_mem_event *events;
    int64_t events_n;
    size_t phase[MODEL_PHASES], peak, host_peak;
    size_t driver_peak; /* most that the driver had given out after a step, to all ranks of the process */
    int64_t sent_bytes; /* in the first step */
    /* while it runs */
    upipe_ctx c;
    trainer t;
    data_order order;
    int64_t *capacity;  /* as the model has it */
    int64_t *borders;   /* of a step's packed documents, as trainer_batch has them; NULL: there are none */
    int32_t *inputs;    /* of a step, and behind them its targets */
    int64_t step, last; /* begun; the last one that updated the weights */
    int64_t sent;       /* before the first step */
    double seconds;     /* in steps */
    int keep, ended;    /* checkpoints; whether the steps ended before their time, the same on all ranks */
} run_rank;

/* What an evaluation said. */
typedef struct run_eval {
    int64_t step, targets;
    double loss; /* mean over the targets */
} run_eval;

typedef struct run {
    options o;
    llama_config config;
    llama_layout layout;
    llama_adapter adapter; /* of --load-adapter */
    upipe_ops ops;         /* of the device, for plans */
    corpus text, held;     /* of --eval; no windows: none */
    int64_t documents;     /* that a window may have, where the plan needs it; 0: it does not */
    int32_t *prompt;       /* of the sample */
    int64_t prompt_n;
    struct world net;
    size_t left; /* free bytes of the device, before a rank of the process has any */
    run_rank *ranks;
    llama_lock lock;    /* of the folder of --save */
    llama_run position; /* of the checkpoint that is continued; step 0: none */
    const char *from;   /* folder of the weights to start from, NULL = none: it is */
    char folder[LLAMA_PATH];
    double *loss, *norm; /* [steps], of the steps done here, from number position.step + 1 on */
    int64_t done;        /* steps done here */
    int64_t saved;       /* step of the newest checkpoint; -1 = none */
    run_eval *evals;     /* [evals_n] */
    int64_t evals_n;
    double seconds;     /* in steps */
    double begun, line; /* when the training began, and when the next line is due without a terminal */
    FILE *log;          /* of --log */
    int log_failed;     /* the sentence is out */
    int32_t *sample;    /* bytes, or ids where tokens come from files */
    int64_t sample_n;   /* of them; -1: no sample was made */
    int lost;           /* nonzero: a file of the data has changed; the sentence is out */
    int failed;         /* a rank aborted, or a promise was broken */
    int broke; /* nonzero: a loss, a gradient or a logit of the sample is not finite; the sentence is out */
} run;

/* Sequences of a step, of all replicas. */
static inline int64_t run_step_sequences(const options *o)
{
    return o->batch * o->accumulate * o->replicas;
}

/* The number of a replica's sequence n of those from `first` on: the replicas take micro-batches in turn. */
static inline int64_t run_sequence(const options *o, int replica, int64_t first, int64_t n)
{
    return first + (n / o->batch * o->replicas + replica) * o->batch + n % o->batch;
}

/* Tokens of a step. */
static inline double run_step_tokens(const run *u)
{
    return (double)u->o.tokens * (double)run_step_sequences(&u->o);
}

static inline int run_fail(upipe_status s, const upipe_err *e)
{
    return cli_fail("%s%s", cli_status(s), e->text);
}

static inline sample_request run_sample_request(const run *u)
{
    sample_request w;
    w.prompt = u->prompt;
    w.prompt_n = u->prompt_n;
    w.kinds = u->o.tokens_file != NULL ? u->layout.config.vocab : SAMPLE_BYTES;
    w.stop_token = u->o.stop_id;
    w.temperature = u->o.temperature;
    w.seed = (uint64_t)u->o.seed;
    w.stop = &run_signal;
    return w;
}

#endif

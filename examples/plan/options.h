/* options.h -- the command line of upipe-plan: read, checked, defaults filled in */
#ifndef PLAN_OPTIONS_H
#define PLAN_OPTIONS_H

#include "../common/flags.h"
#include "../common/options.h"
#include "estimate.h"
#include "packed.h"
#include "preset.h"
#include "titan.h"

static const char usage_text[] =
    "usage: upipe-plan --model NAME --tokens N [flags]\n"
    "\n"
    "Says whether a training step fits a machine before anything is allocated: bytes of the largest rank and of\n"
    "the fullest node by a dry run of the trainer, to the byte, and an estimate of the time. Of deepseek-v3, kimi-k2,\n"
    "minicpm3-4b and moonlight, whose attention has a latent, it says what the attention of one layer holds and sends, by\n"
    "Ulysses and by UPipe, as heads and as a gathered latent; flags that change nothing of that are refused. A folder's\n"
    "model with a latent is planned whole, if all of its layers are dense.\n";

static const char usage_end[] =
    "\n"
    "Exit status: 0 it fits, 3 it does not, 2 wrong usage, 1 where a file cannot be read or written, or memory is out.\n";

static const char *const usage_more[] = {method_usage, activations_usage, usage_end, NULL};
static const flag_set option_flags = {flag_rows,  FLAG_ROWS,  IN_PLAN,
                                      usage_text, usage_more, ", products: " PRODUCTS};

enum { EXIT_NO_FIT = 3 };

/* What is to be planned: what the flags say, and what follows from it. */
typedef struct job {
    options o;
    llama_config config;
    const latent_model *latent; /* in place of config; NULL: of no such model */
    char note[PRESET_NOTE];     /* why the trainer refuses the model; empty if it does not */
    machine machine;
    setting s;
    int titan; /* TITANS is none */
} job;

/* The paper's method, and what would have no effect on it. */
static int options_titan(job *j)
{
    options *o = &j->o;
    const method_choice *how = &o->how;
    const char *const name = o->method_name;
    j->titan = titan_find(name);
    if (j->titan == TITANS)
        return cli_refuse("--method: as torchtitan it is native, ring, ulysses, fpdt or upipe, not '%s'",
                          name);
    if (how->overlap || how->inner > 0 || how->segments > 0 || o->tile_bytes > 0)
        return cli_refuse(
            "--overlap, --inner, --segments and --tile-bytes would have no effect as torchtitan");
    if (how->chunk > 0 && j->titan != TITAN_UPIPE)
        return cli_refuse("--chunk would have no effect with --method %s", name);
    if (how->ring > 0 && j->titan != TITAN_UPIPE && j->titan != TITAN_ULYSSES)
        return cli_refuse("--ring would have no effect with --method %s", name);
    if (j->machine.gpu == 0) return cli_refuse("as torchtitan ranks have GPUs: %s has none", j->machine.name);
    if (j->titan != TITAN_NATIVE) return 0;
    if (options_given(o, &o->activations) && o->activations.kind != ACTIVATIONS_AC)
        return cli_refuse("--method native keeps the inputs on the GPU: --activations ac");
    o->activations.kind = ACTIVATIONS_AC;
    return 0;
}

/* The number of ranks. */
static int options_ranks(job *j)
{
    int *const ranks = &j->o.how.ranks;
    if (*ranks == 0) *ranks = j->machine.ranks;
    if (*ranks <= j->machine.ranks) return 0;
    return cli_refuse("--ranks %d: %s has %d", *ranks, j->machine.name, j->machine.ranks);
}

/* The method by its name here or there, its defaults, and the number of ranks. */
static int options_method(job *j)
{
    options *o = &j->o;
    method_choice *how = &o->how;
    int status = options_ranks(j);
    if (status != 0) return status;
    if (o->as_titan) return options_titan(j);
    if (o->best) {
        if (options_given(o, &o->method_name) || how->chunk > 0 || how->segments > 0 || how->ring > 0 ||
            how->inner > 0 || how->overlap || options_given(o, &o->activations))
            return cli_refuse(
                "--best tries all methods, chunks, segments, rings, activations and overlaps: none of "
                "these can be given");
        return method_replicas(how, o->replicas);
    }
    status = flag_method(o->method_name, &how->method);
    return status != 0 ? status : method_resolve(how, o->replicas);
}

/* Without a model a machine is written, and nothing is planned. */
static int options_only_machine(const options *o)
{
    int i;
    for (i = 0; i < FLAG_ROWS; ++i)
        if (o->given[i] && flag_rows[i].at != offsetof(options, machine) &&
            flag_rows[i].at != offsetof(options, calibrate) &&
            flag_rows[i].at != offsetof(options, write_machine))
            return cli_refuse("--%s would have no effect without --model", flag_rows[i].name);
    return 0;
}

static int options_resolve(job *j)
{
    options *o = &j->o;
    const int only_machine = o->write_machine != NULL && o->model == NULL;
    int status = machine_find(&j->machine, o->machine);
    o->as_titan = options_given(o, &o->as_titan) > 0;
    if (status != 0) return status;
    if (only_machine) return options_only_machine(o);
    if (o->calibrate.n > 0 && o->write_machine == NULL)
        return cli_refuse("--calibrate wants --write-machine FILE, for --machine FILE later");
    if (o->model == NULL) return cli_refuse("--model is missing: a name, or a folder with a config.json");
    if (!options_given(o, &o->device)) o->device = j->machine.gpu > 0 ? DEVICE_CUDA : DEVICE_CPU;
    if ((j->latent = latent_find(o->model)) != NULL)
        return (status = latent_options(j->latent, o)) != 0 ? status : options_ranks(j);
    if (o->tokens == 0 && !o->max_tokens) return cli_refuse("--tokens is missing, or --max-tokens");
    if (o->tokens > 0 && o->max_tokens)
        return cli_refuse("--tokens and --max-tokens contradict each other: the latter looks for them");
    if (o->lengths != NULL && (o->max_tokens || o->as_titan))
        return cli_refuse("--documents would have no effect with --max-tokens, and as torchtitan");
    if (o->accumulate > 1 && (o->lengths != NULL || o->as_titan))
        return cli_refuse(
            "--accumulate would have no effect with --documents, which are one micro-batch's, and as torchtitan");
    if (o->replicas > 1 && (o->lengths != NULL || o->as_titan))
        return cli_refuse(
            "--replicas would have no effect with --documents, which are one replica's, and as torchtitan");
    if (o->best && o->as_titan) return cli_refuse("--best and --as contradict each other");
    if (o->as_titan &&
        (o->dtype != UPIPE_BF16 || options_given(o, &o->device) || options_given(o, &o->zero) ||
         o->zero_prefetch || options_given(o, &o->reduce_dtype) || o->offload_weights ||
         o->offload_optimizer || o->train != NULL || o->lora != NULL))
        return cli_refuse(
            "--dtype, --device, --zero, --zero-prefetch, --reduce-dtype, --offload-optimizer, --offload-weights, --train and --lora would have no effect as torchtitan");
    if (o->offload_weights && (o->zero < 3 || !o->offload_optimizer))
        return cli_refuse("--offload-weights wants --zero 3 and --offload-optimizer");
    if (o->zero_prefetch && o->zero < 3)
        return cli_refuse("--zero-prefetch would have no effect with --zero %d: no weights are gathered",
                          o->zero);
    if ((status = preset_find(&j->config, j->note, o->model, &o->ignore_key)) != 0) return status;
    if (o->as_titan && j->config.kv_rank > 0)
        return cli_refuse("--as torchtitan: K and V of --model %s come from a latent", o->model);
    if (o->activations.k > j->config.layers)
        return cli_refuse("--activations: the model has %lld layers", (long long)j->config.layers);
    status = options_method(j);
    if (status == 0 && o->lengths != NULL) status = packed_read(o, o->lengths);
    j->s = setting_of(o, NULL);
    return status;
}

static int options_read(job *j, int argc, char **argv)
{
    int status;
    memset(j, 0, sizeof *j);
    j->o.program = IN_PLAN;
    status = flags_read(&option_flags, &j->o, j->o.given, argc, argv);
    return status != 0 ? status : options_resolve(j);
}

#endif

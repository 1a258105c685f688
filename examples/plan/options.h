/* options.h -- the command line of upipe-plan: read, checked, defaults filled in */
#ifndef PLAN_OPTIONS_H
#define PLAN_OPTIONS_H

#include "../common/flags.h"
#include "../common/options.h"
#include "as.h"
#include "packed.h"
#include "preset.h"

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
} job;

/* The number of ranks. */
static int options_ranks(job *j)
{
    int *const ranks = &j->o.how.ranks;
    if (*ranks == 0) *ranks = j->machine.ranks;
    if (*ranks <= j->machine.ranks) return 0;
    return cli_refuse("--ranks %d: %s has %d", *ranks, j->machine.name, j->machine.ranks);
}

/* Refuses the first flag that has no effect there: one that is not among those at `known`, a list of members' offsets. */
static int options_only(const options *o, const size_t *known, size_t n, const char *there)
{
    size_t k;
    int i;
    for (i = 0; i < FLAG_ROWS; ++i) {
        for (k = 0; k < n && flag_rows[i].at != known[k]; ++k) {
        }
        if (o->given[i] && k == n)
            return cli_refuse("--%s would have no effect %s", flag_rows[i].name, there);
    }
    return 0;
}

#define OPTIONS_ONLY(o, known, there) options_only(o, known, sizeof known / sizeof *known, there)
#define AT(member)                    offsetof(options, member)

/* Of a model with latent attention the attention of one layer is planned. */
static int options_latent(job *j)
{
    static const size_t known[] = {AT(model),       AT(machine), AT(how.ranks), AT(how.chunk),
                                   AT(how.overlap), AT(tokens),  AT(batch),     AT(dtype),
                                   AT(device),      AT(json),    AT(calibrate), AT(write_machine)};
    char there[192];
    int status;
    snprintf(
        there, sizeof there,
        "with --model %s: of a model with latent attention the attention of one layer is planned, by Ulysses and by UPipe",
        j->latent->name);
    if ((status = OPTIONS_ONLY(&j->o, known, there)) != 0) return status;
    return j->o.tokens > 0 ? options_ranks(j) : cli_refuse("--tokens is missing");
}

/* Another program's method, of those that it has. */
static int options_as_method(options *o, const program *p)
{
    char names[128];
    int i, used = 0;
    for (i = 0; i < AS_METHODS && p->methods[i].name != NULL; ++i) {
        if (o->method_name == NULL || strcmp(p->methods[i].name, o->method_name) == 0) {
            o->as.method = i;
            return 0;
        }
        used += snprintf(names + used, sizeof names - (size_t)used, "%s%s", i > 0 ? ", " : "",
                         p->methods[i].name);
    }
    return cli_refuse("--method: --as %s has %s, not '%s'", p->name, names, o->method_name);
}

/* Another program's flags, and its defaults. */
static int options_as(job *j)
{
    /* clang-format off */
    static const size_t known[] = {
        AT(model), AT(machine), AT(tokens), AT(batch), AT(accumulate), AT(replicas), AT(how.ranks), AT(how.ring), AT(how.chunk),
        AT(method_name), AT(activations), AT(offload_optimizer), AT(offload_weights), AT(zero), AT(attention), AT(as.program),
        AT(as.loss), AT(as.mlp), AT(as.all), AT(as.fp8), AT(best), AT(max_tokens), AT(json), AT(calibrate), AT(write_machine),
        AT(ignore_key), AT(progress)};
    /* clang-format on */
    options *o = &j->o;
    const program *p = as_program(o->as.program);
    char there[64];
    int status;
    snprintf(there, sizeof there, "with --as %s", p->name);
    if ((status = OPTIONS_ONLY(o, known, there)) != 0 || (status = options_as_method(o, p)) != 0)
        return status;
    if (o->as.fp8 && strcmp(j->machine.card, "a100") == 0) return cli_refuse("--fp8: an A100 has none");
    if (o->as.all && options_given(o, &o->activations))
        return cli_refuse("--keep-all and --activations contradict each other: all is kept");
    if (j->machine.gpu == 0) return cli_refuse("--as %s wants GPUs: %s has none", p->name, j->machine.name);
    if (j->config.kv_rank > 0)
        return cli_refuse("--as %s: K and V of --model %s come from a latent", p->name, o->model);
    if (!options_given(o, &o->as.loss)) o->as.loss = p->loss >> AS_TILED & 1;
    if (!options_given(o, &o->as.mlp)) o->as.mlp = p->mlp >> AS_TILED & 1;
    if (!options_given(o, &o->attention)) {
        o->attention = p->methods[o->as.method].attention;
        if (!kernel_runs(o->attention, j->machine.card)) o->attention = kernel_of(j->machine.card);
    }
    if (!options_given(o, &o->zero)) o->zero = p->zeros >> 1 & 1 ? 1 : 3;
    if (!options_given(o, &o->activations) &&
        (o->as.all || p->methods[o->as.method].stays || !(p->keeps >> ACTIVATIONS_OFFLOAD & 1)))
        o->activations.kind = ACTIVATIONS_AC;
    return method_replicas(&o->how, o->replicas);
}

/* The method by its name here or there, its defaults, and the number of ranks. */
static int options_method(job *j)
{
    options *o = &j->o;
    method_choice *how = &o->how;
    const int tiles = options_given(o, &o->as.loss) || options_given(o, &o->as.mlp);
    int status = options_ranks(j);
    if (status != 0) return status;
    if (o->best &&
        (o->method_name != NULL || how->chunk > 0 || how->segments > 0 || how->ring > 0 || how->inner > 0 ||
         how->overlap || options_given(o, &o->activations) || tiles || o->as.all))
        return cli_refuse(
            "--best tries all methods, chunks, segments, rings, activations, overlaps and tiles: none of "
            "these can be given");
    if (o->attention != KERNEL_MACHINE && j->machine.gpu == 0)
        return cli_refuse("--attention %s wants GPUs: %s has none", kernel_names[o->attention],
                          j->machine.name);
    if (!kernel_runs(o->attention, j->machine.card))
        return cli_refuse("--attention %s runs on H100 and H200 alone", kernel_names[o->attention]);
    if (o->as.program > 0) return options_as(j);
    if (tiles || o->as.all || o->as.fp8)
        return cli_refuse(
            "--loss, --mlp, --keep-all and --fp8 want --as: this library's loss and MLP are in tiles");
    if (o->best) return method_replicas(how, o->replicas);
    status = flag_method(o->method_name != NULL ? o->method_name : "upipe", &how->method);
    return status != 0 ? status : method_resolve(how, o->replicas);
}

static int options_resolve(job *j)
{
    static const size_t only_machine[] = {AT(machine), AT(calibrate), AT(write_machine)};
    options *o = &j->o;
    int status;
    status = machine_find(&j->machine, o->machine);
    if (status != 0) return status;
    if (o->write_machine != NULL && o->model == NULL) return OPTIONS_ONLY(o, only_machine, "without --model");
    if (o->calibrate.n > 0 && o->write_machine == NULL)
        return cli_refuse("--calibrate wants --write-machine FILE, for --machine FILE later");
    if (o->model == NULL) return cli_refuse("--model is missing: a name, or a folder with a config.json");
    if (!options_given(o, &o->device)) o->device = j->machine.gpu > 0 ? DEVICE_CUDA : DEVICE_CPU;
    if ((j->latent = latent_find(o->model)) != NULL) return options_latent(j);
    if (o->tokens == 0 && !o->max_tokens) return cli_refuse("--tokens is missing, or --max-tokens");
    if (o->tokens > 0 && o->max_tokens)
        return cli_refuse("--tokens and --max-tokens contradict each other: the latter looks for them");
    if (o->lengths != NULL && (o->max_tokens || o->accumulate > 1 || o->replicas > 1))
        return cli_refuse(
            "--max-tokens, --accumulate and --replicas would have no effect with --documents, which are one "
            "micro-batch's of one replica");
    if (o->offload_weights && ((o->as.program == 0 && o->zero < 3) || !o->offload_optimizer))
        return cli_refuse("--offload-weights wants --zero 3 and --offload-optimizer");
    if (o->zero_prefetch && o->zero < 3)
        return cli_refuse("--zero-prefetch would have no effect with --zero %d: no weights are gathered",
                          o->zero);
    if ((status = preset_find(&j->config, j->note, o->model, &o->ignore_key)) != 0) return status;
    if (o->activations.k > j->config.layers)
        return cli_refuse("--activations: the model has %lld layers", (long long)j->config.layers);
    status = options_method(j);
    if (status == 0 && o->lengths != NULL) status = packed_read(o, o->lengths);
    j->s = setting_of(o, NULL);
    return status;
}

#undef AT

static int options_read(job *j, int argc, char **argv)
{
    int status;
    memset(j, 0, sizeof *j);
    j->o.program = IN_PLAN;
    status = flags_read(&option_flags, &j->o, j->o.given, argc, argv);
    return status != 0 ? status : options_resolve(j);
}

#endif

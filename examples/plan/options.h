/* options.h -- the command line of upipe-plan: read, checked, defaults filled in */
#ifndef PLAN_OPTIONS_H
#define PLAN_OPTIONS_H

#include "../common/device_flag.h"
#include "estimate.h"
#include "preset.h"
#include "titan.h"

/* clang-format off */
enum {
    FLAG_MODEL, FLAG_MACHINE, FLAG_RANKS, FLAG_TOKENS, FLAG_BATCH, FLAG_METHOD, FLAG_RING, FLAG_INNER, FLAG_SEGMENTS,
    FLAG_CHUNK, FLAG_OVERLAP, FLAG_ACTIVATIONS, FLAG_ZERO, FLAG_ZERO_PREFETCH, FLAG_REDUCE_DTYPE, FLAG_DTYPE, FLAG_DEVICE, FLAG_TILE_BYTES, FLAG_AS, FLAG_MAX_TOKENS,
    FLAG_BEST, FLAG_JSON, FLAG_CALIBRATE, FLAG_WRITE_MACHINE, FLAG_PROGRESS, FLAG_HELP, FLAG_VERSION, FLAGS
};

static const struct option option_list[] = {
    {"model",         required_argument, NULL, FLAG_MODEL},
    {"machine",       required_argument, NULL, FLAG_MACHINE},
    {"ranks",         required_argument, NULL, FLAG_RANKS},
    {"tokens",        required_argument, NULL, FLAG_TOKENS},
    {"batch",         required_argument, NULL, FLAG_BATCH},
    {"method",        required_argument, NULL, FLAG_METHOD},
    {"ring",          required_argument, NULL, FLAG_RING},
    {"inner",         required_argument, NULL, FLAG_INNER},
    {"segments",      required_argument, NULL, FLAG_SEGMENTS},
    {"chunk",         required_argument, NULL, FLAG_CHUNK},
    {"overlap",       no_argument,       NULL, FLAG_OVERLAP},
    {"activations",   required_argument, NULL, FLAG_ACTIVATIONS},
    {"zero",          required_argument, NULL, FLAG_ZERO},
    {"zero-prefetch", no_argument,       NULL, FLAG_ZERO_PREFETCH},
    {"reduce-dtype",  required_argument, NULL, FLAG_REDUCE_DTYPE},
    {"dtype",         required_argument, NULL, FLAG_DTYPE},
    {"device",        required_argument, NULL, FLAG_DEVICE},
    {"tile-bytes",    required_argument, NULL, FLAG_TILE_BYTES},
    {"as",            required_argument, NULL, FLAG_AS},
    {"max-tokens",    no_argument,       NULL, FLAG_MAX_TOKENS},
    {"best",          no_argument,       NULL, FLAG_BEST},
    {"json",          required_argument, NULL, FLAG_JSON},
    {"calibrate",     required_argument, NULL, FLAG_CALIBRATE},
    {"write-machine", required_argument, NULL, FLAG_WRITE_MACHINE},
    {"progress",      no_argument,       NULL, FLAG_PROGRESS},
    {"help",          no_argument,       NULL, FLAG_HELP},
    {"version",       no_argument,       NULL, FLAG_VERSION},
    {NULL, 0, NULL, 0}};

static const char usage_text[] =
    "usage: upipe-plan --model NAME --tokens N [flags]\n"
    "\n"
    "Says whether a training step fits a machine before anything is allocated: bytes of the largest rank and of\n"
    "the fullest node by a dry run of the trainer, to the byte, and an estimate of the time.\n"
    "\n"
    "  --model NAME|DIR   a model by name (a wrong one lists them), or a folder with a config.json\n"
    "  --machine NAME|FILE\n"
    "                     h100x8, h100x16 (two nodes), h100x32, h200x8, a100x8, cpu, or a file (h100x8)\n"
    "  --ranks N          of the machine's (all)\n"
    "  --tokens N         of a sequence, over all ranks: 5M is 5 x 2^20, 128k 128 x 2^10, 1e6 a million\n"
    "  --batch N          sequences of a step (1)\n"
    METHOD_USAGE
    "  --activations KIND what is kept of each layer, see below (offload)\n"
    "  --zero STAGE       sharded over the ranks: 0 nothing, 1 optimizer, 2 gradients too, 3 weights too (3)\n"
    "  --zero-prefetch    with --zero 3: the weights of the next half a layer are gathered while one computes\n"
    "  --reduce-dtype T   in which gradients of matrices are sent to be summed: f32 or bf16 (f32)\n"
    "  --dtype TYPE       storage of activations and weights: f32 or bf16 (bf16)\n"
    "  --device NAME      whose kernels' scratch is counted: cpu or cuda (cuda where the machine\n"
    "                     has GPUs)\n"
    "  --tile-bytes SIZE  limit of a tile of MLP or loss, with its unit (the paper's square)\n"
    "\n"
    "  --as torchtitan    the paper's own setting instead of this library: what PyTorch holds and takes. Methods\n"
    "                     are native, ring, ulysses, fpdt and upipe as the paper ran them; activations offload,\n"
    "                     of native ac\n"
    "  --max-tokens       the longest sequence that fits, instead of --tokens; with --best of every setting\n"
    "  --best             all methods, chunks, segments, rings, activations and overlaps: what fits, the fastest\n"
    "                     first, and which are the fastest of their memory\n"
    "  --json FILE        write the numbers; bytes and seconds. examples/plan/plot_plan.py draws them: memory by\n"
    "                     component and phase, and of --best the settings by time and memory\n"
    "  --calibrate FILE   rates from numbers of bench/run.sh attn, gemm or all: this machine's; may come 16 times\n"
    "  --write-machine FILE\n"
    "                     write the machine, every rate with its origin, as --machine reads it\n"
    "  --progress         say on stderr what is being done, terminal or not\n"
    "  --help, --version\n"
    "\n"
    "Exit status: 0 it fits, 3 it does not, 2 wrong usage, 1 for a file that cannot be written.\n";
/* clang-format on */

enum { EXIT_NO_FIT = 3, CALIBRATE_MAX = 16 };

typedef struct options {
    llama_config config;
    char note[PRESET_NOTE]; /* why the trainer refuses the model; empty if it does not */
    machine machine;
    setting s;
    const char *model, *machine_name, *method, *json, *write_machine, *calibrate[CALIBRATE_MAX];
    int calibrate_n, titan; /* titan: TITANS is none */
    int as_titan, max_tokens, best, device, progress;
    int given[FLAGS];
} options;

static int options_path(options *o, int flag, const char *text)
{
    if (flag == FLAG_MODEL) o->model = text;
    if (flag == FLAG_MACHINE) o->machine_name = text;
    if (flag == FLAG_METHOD) o->method = text;
    if (flag == FLAG_JSON) o->json = text;
    if (flag == FLAG_WRITE_MACHINE) o->write_machine = text;
    if (flag != FLAG_CALIBRATE) return 0;
    if (o->calibrate_n == CALIBRATE_MAX)
        return cli_refuse("--calibrate may come %d times", (int)CALIBRATE_MAX);
    o->calibrate[o->calibrate_n++] = text;
    return 0;
}

static int options_flag(void *user, int flag, const char *text)
{
    options *o = (options *)user;
    const char *name = option_list[flag].name;
    int64_t n = 0;
    int status;
    switch (flag) {
    case FLAG_RANKS:
    case FLAG_RING:
    case FLAG_INNER:
    case FLAG_SEGMENTS:
    case FLAG_CHUNK:
    case FLAG_OVERLAP:
        return method_flag(&o->s.how, name, text);
    case FLAG_TOKENS:
        return cli_tokens(name, text, INT32_MAX, &o->s.tokens);
    case FLAG_BATCH:
        return cli_number(name, text, 1, INT32_MAX, &o->s.batch);
    case FLAG_ACTIVATIONS:
        return activations_flag(name, text, &o->s.activations);
    case FLAG_ZERO:
        status = cli_number(name, text, limit_whole_of(name)->least, limit_whole_of(name)->most, &n);
        o->s.zero = (int)n;
        return status;
    case FLAG_ZERO_PREFETCH:
        o->s.prefetch = 1;
        return 0;
    case FLAG_REDUCE_DTYPE:
        return cli_dtype(name, text, &o->s.reduce);
    case FLAG_DTYPE:
        return cli_dtype(name, text, &o->s.dtype);
    case FLAG_DEVICE:
        return device_flag_planned(name, text, &o->device);
    case FLAG_TILE_BYTES:
        return cli_bytes(name, text, &o->s.tile_bytes);
    case FLAG_AS:
        o->as_titan = 1;
        return strcmp(text, "torchtitan") == 0 ? 0 : cli_refuse("--as is torchtitan, not '%s'", text);
    case FLAG_MAX_TOKENS:
        o->max_tokens = 1;
        return 0;
    case FLAG_BEST:
        o->best = 1;
        return 0;
    case FLAG_PROGRESS:
        o->progress = 1;
        return 0;
    case FLAG_HELP:
        fputs(usage_text, stdout);
        return method_help(name, activations_usage);
    case FLAG_VERSION:
        return cli_version(name, ", products: " PRODUCTS);
    default:
        return options_path(o, flag, text);
    }
}

/* The paper's method, and what would have no effect on it. */
static int options_titan(options *o, const char *name)
{
    const method_choice *how = &o->s.how;
    o->titan = titan_find(name);
    if (o->titan == TITANS)
        return cli_refuse("--method: as torchtitan it is native, ring, ulysses, fpdt or upipe, not '%s'",
                          name);
    if (how->overlap || how->inner > 0 || how->segments > 0 || o->s.tile_bytes > 0)
        return cli_refuse(
            "--overlap, --inner, --segments and --tile-bytes would have no effect as torchtitan");
    if (how->chunk > 0 && o->titan != TITAN_UPIPE)
        return cli_refuse("--chunk would have no effect with --method %s", name);
    if (how->ring > 0 && o->titan != TITAN_UPIPE && o->titan != TITAN_ULYSSES)
        return cli_refuse("--ring would have no effect with --method %s", name);
    if (o->machine.gpu == 0) return cli_refuse("as torchtitan ranks have GPUs: %s has none", o->machine.name);
    if (o->titan != TITAN_NATIVE) return 0;
    if (o->given[FLAG_ACTIVATIONS] && o->s.activations.kind != ACTIVATIONS_AC)
        return cli_refuse("--method native keeps the inputs on the GPU: --activations ac");
    o->s.activations.kind = ACTIVATIONS_AC;
    return 0;
}

/* The method by its name here or there, its defaults, and the number of ranks. */
static int options_method(options *o)
{
    method_choice *how = &o->s.how;
    const char *name = o->method != NULL ? o->method : "upipe";
    if (how->ranks == 0) how->ranks = o->machine.ranks;
    if (how->ranks > o->machine.ranks)
        return cli_refuse("--ranks %d: %s has %d", how->ranks, o->machine.name, o->machine.ranks);
    if (o->as_titan) return options_titan(o, name);
    if (o->best) {
        if (o->method != NULL || how->chunk > 0 || how->segments > 0 || how->ring > 0 || how->inner > 0 ||
            how->overlap || o->given[FLAG_ACTIVATIONS])
            return cli_refuse(
                "--best tries all methods, chunks, segments, rings, activations and overlaps: none of "
                "these can be given");
        return 0;
    }
    how->method = method_find(name);
    if (how->method == METHODS) return cli_refuse("--method: '%s' is none of those that --help lists", name);
    return method_resolve(how);
}

/* Without a model a machine is written, and nothing is planned. */
static int options_only_machine(const options *o)
{
    int flag;
    for (flag = 0; flag < FLAGS; ++flag)
        if (o->given[flag] && flag != FLAG_MACHINE && flag != FLAG_CALIBRATE && flag != FLAG_WRITE_MACHINE)
            return cli_refuse("--%s would have no effect without --model", option_list[flag].name);
    return 0;
}

static int options_resolve(options *o)
{
    const int only_machine = o->write_machine != NULL && o->model == NULL;
    int status = machine_find(&o->machine, o->machine_name != NULL ? o->machine_name : "h100x8");
    if (status != 0) return status;
    if (only_machine) return options_only_machine(o);
    if (o->calibrate_n > 0 && o->write_machine == NULL)
        return cli_refuse("--calibrate wants --write-machine FILE, for --machine FILE later");
    if (o->model == NULL) return cli_refuse("--model is missing: a name, or a folder with a config.json");
    if (o->s.tokens == 0 && !o->max_tokens) return cli_refuse("--tokens is missing, or --max-tokens");
    if (o->s.tokens > 0 && o->max_tokens)
        return cli_refuse("--tokens and --max-tokens contradict each other: the latter looks for them");
    if (o->best && o->as_titan) return cli_refuse("--best and --as contradict each other");
    if (o->as_titan && (o->s.dtype != UPIPE_BF16 || o->given[FLAG_DEVICE] || o->given[FLAG_ZERO] ||
                        o->s.prefetch || o->given[FLAG_REDUCE_DTYPE]))
        return cli_refuse(
            "--dtype, --device, --zero, --zero-prefetch and --reduce-dtype would have no effect as torchtitan");
    if (o->s.prefetch && o->s.zero < 3)
        return cli_refuse("--zero-prefetch would have no effect with --zero %d: no weights are gathered",
                          o->s.zero);
    if ((status = preset_find(&o->config, o->note, o->model)) != 0) return status;
    if (o->s.activations.k > o->config.layers)
        return cli_refuse("--activations: the model has %lld layers", (long long)o->config.layers);
    if (!o->given[FLAG_DEVICE]) o->device = o->machine.gpu > 0 ? DEVICE_CUDA : DEVICE_CPU;
    return options_method(o);
}

static int options_read(options *o, int argc, char **argv)
{
    int status;
    memset(o, 0, sizeof *o);
    o->s.batch = 1;
    o->s.dtype = UPIPE_BF16;
    o->s.zero = 3;
    o->s.reduce = UPIPE_F32;
    o->s.activations.kind = ACTIVATIONS_OFFLOAD;
    status = cli_read(option_list, argc, argv, o->given, FLAG_CALIBRATE, options_flag, o);
    return status != 0 ? status : options_resolve(o);
}

#endif

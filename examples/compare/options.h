/* options.h -- the command line of compare: read, checked, defaults filled in
 *
 *     int status = options_read(&options, argc, argv);      0: run; otherwise the sentence is out, exit with
 *                                                           status - 1
 *
 * Numbers must be plain decimals within their range, a flag comes once (--method once a method), and a flag
 * that would have no effect is refused: what is accepted is honoured.
 */
#ifndef COMPARE_OPTIONS_H
#define COMPARE_OPTIONS_H

#include <getopt.h>
#include <string.h>

#include "upipe/net/upipe_net_threads.h"
#include "upipe/upipe.h"

#include "../common/cli.h"
#include "../common/device_flag.h"

enum { METHOD_ULYSSES, METHOD_UPIPE, METHOD_NAIVE, METHODS };

static const char *const method_names[METHODS] = {"ulysses", "upipe", "upipe-naive"};

enum { CHECK_AUTO, CHECK_ON, CHECK_OFF, CHECK_AUTO_TOKENS = 2048 };

typedef struct options {
    int methods[METHODS], methods_n; /* in the order of the command line */
    int ranks, heads, kv_heads, head_dim, chunk;
    int64_t model_dim, tokens, batch;
    upipe_dtype dtype;
    int device, full, rope, check, progress;
    uint64_t seed;
    double deadline;                        /* seconds that a rank waits for the others */
    const char *data, *json, *trace, *dump; /* paths; NULL = not wanted */
} options;

static const double rope_theta = 10000;

/* clang-format off */
static const char usage_text[] =
    "usage: compare [flags]\n"
    "\n"
    "Runs one attention block, forward and backward, over the tokens (bytes) of a text, with DeepSpeed-Ulysses and\n"
    "with UPipe, on ranks that are threads of this process; prints what each holds, sends and computes.\n"
    "\n"
    "  --method NAME      ulysses, upipe or upipe-naive (heads in order, K and V sent in every stage); repeatable.\n"
    "                     Default: ulysses and upipe\n"
    "  --ranks N          ranks that share the sequence (4)\n"
    "  --heads N          query heads (16)\n"
    "  --kv-heads N       key/value heads (as many as query heads)\n"
    "  --head-dim N       elements of a head: 32 to 256 in steps of 8 (64)\n"
    "  --model-dim N      elements of a token (heads * head-dim)\n"
    "  --tokens N         tokens of a sequence, over all ranks (2048)\n"
    "  --batch N          sequences (1)\n"
    "  --chunk N          query heads of a stage of upipe, over all ranks (ranks)\n"
    "  --dtype TYPE       storage of activations and weights: f32 or bf16 (f32)\n"
    "  --device NAME      where the ranks compute: cpu, or cuda, a GPU that all of them share (cpu)\n"
    "  --full             every token sees all; otherwise causal\n"
    "  --rope             rotary position embedding, rotate-half, theta 10000\n"
    "  --seed N           of the embedding table, the weights and the gradient of the result (1)\n"
    "  --data FILE        the text, at least batch * tokens bytes (the book in examples/data)\n"
    "  --check WHEN       compare with a reference in double precision: on, off, or auto, up to 2048 tokens (auto)\n"
    "  --json FILE        write the numbers\n"
    "  --trace DIR        write what the pools did: DIR/METHOD.json, for Perfetto or chrome://tracing\n"
    "  --dump DIR         write inputs and results as NumPy files: DIR/METHOD/x.npy wq wk wv out dout dx dwq dwk dwv\n"
    "  --deadline SECONDS how long a rank waits for another one before it gives up (600)\n"
    "  --progress         say on stderr what is being done, terminal or not\n"
    "  --help, --version\n"
    "\n"
    "Exit status: 0, 1 for a run that failed or broke a promise (bytes, errors, bits), 2 for wrong usage.\n";
/* clang-format on */

static int options_method(options *o, const char *name)
{
    int m, i;
    for (m = 0; m < METHODS && strcmp(name, method_names[m]) != 0; ++m) {
    }
    if (m == METHODS) return cli_refuse("--method is ulysses, upipe or upipe-naive, not '%s'", name);
    for (i = 0; i < o->methods_n; ++i)
        if (o->methods[i] == m) return cli_refuse("--method %s is given twice", name);
    o->methods[o->methods_n++] = m;
    return 0;
}

/* clang-format off */
enum {
    FLAG_METHOD, FLAG_RANKS, FLAG_HEADS, FLAG_KV_HEADS, FLAG_HEAD_DIM, FLAG_MODEL_DIM, FLAG_TOKENS, FLAG_BATCH,
    FLAG_CHUNK, FLAG_DTYPE, FLAG_DEVICE, FLAG_FULL, FLAG_ROPE, FLAG_SEED, FLAG_DATA, FLAG_CHECK, FLAG_JSON, FLAG_TRACE, FLAG_DUMP,
    FLAG_DEADLINE, FLAG_PROGRESS, FLAG_HELP, FLAG_VERSION, FLAGS
};

static const struct option option_list[] = {
    {"method",    required_argument, NULL, FLAG_METHOD},
    {"ranks",     required_argument, NULL, FLAG_RANKS},
    {"heads",     required_argument, NULL, FLAG_HEADS},
    {"kv-heads",  required_argument, NULL, FLAG_KV_HEADS},
    {"head-dim",  required_argument, NULL, FLAG_HEAD_DIM},
    {"model-dim", required_argument, NULL, FLAG_MODEL_DIM},
    {"tokens",    required_argument, NULL, FLAG_TOKENS},
    {"batch",     required_argument, NULL, FLAG_BATCH},
    {"chunk",     required_argument, NULL, FLAG_CHUNK},
    {"dtype",     required_argument, NULL, FLAG_DTYPE},
    {"device",    required_argument, NULL, FLAG_DEVICE},
    {"full",      no_argument,       NULL, FLAG_FULL},
    {"rope",      no_argument,       NULL, FLAG_ROPE},
    {"seed",      required_argument, NULL, FLAG_SEED},
    {"data",      required_argument, NULL, FLAG_DATA},
    {"check",     required_argument, NULL, FLAG_CHECK},
    {"json",      required_argument, NULL, FLAG_JSON},
    {"trace",     required_argument, NULL, FLAG_TRACE},
    {"dump",      required_argument, NULL, FLAG_DUMP},
    {"deadline",  required_argument, NULL, FLAG_DEADLINE},
    {"progress",  no_argument,       NULL, FLAG_PROGRESS},
    {"help",      no_argument,       NULL, FLAG_HELP},
    {"version",   no_argument,       NULL, FLAG_VERSION},
    {NULL, 0, NULL, 0}};
/* clang-format on */

static int options_flag(void *user, int flag, const char *text)
{
    options *o = (options *)user;
    const char *name = option_list[flag].name;
    int64_t n = 0;
    int status = 0;
    switch (flag) {
    case FLAG_METHOD:
        return options_method(o, text);
    case FLAG_RANKS:
        return cli_int(name, text, UPIPE_THREADS_MAX, &o->ranks);
    case FLAG_HEADS:
        return cli_int(name, text, INT32_MAX, &o->heads);
    case FLAG_KV_HEADS:
        return cli_int(name, text, INT32_MAX, &o->kv_heads);
    case FLAG_HEAD_DIM:
        return cli_int(name, text, INT32_MAX, &o->head_dim);
    case FLAG_CHUNK:
        return cli_int(name, text, INT32_MAX, &o->chunk);
    case FLAG_MODEL_DIM:
        return cli_number(name, text, 1, INT32_MAX, &o->model_dim);
    case FLAG_TOKENS:
        return cli_number(name, text, 1, INT64_MAX, &o->tokens);
    case FLAG_BATCH:
        return cli_number(name, text, 1, INT64_MAX, &o->batch);
    case FLAG_SEED:
        status = cli_number(name, text, 0, INT64_MAX, &n);
        o->seed = (uint64_t)n;
        return status;
    case FLAG_DTYPE:
        return cli_dtype(name, text, &o->dtype);
    case FLAG_DEVICE:
        return device_flag(name, text, &o->device);
    case FLAG_CHECK:
        if (strcmp(text, "auto") != 0 && strcmp(text, "on") != 0 && strcmp(text, "off") != 0)
            return cli_refuse("--check is auto, on or off, not '%s'", text);
        o->check = text[0] == 'a' ? CHECK_AUTO : text[1] == 'n' ? CHECK_ON : CHECK_OFF;
        return 0;
    case FLAG_DEADLINE:
        return cli_seconds(name, text, &o->deadline);
    case FLAG_DATA:
        o->data = text;
        return 0;
    case FLAG_JSON:
        o->json = text;
        return 0;
    case FLAG_TRACE:
        o->trace = text;
        return 0;
    case FLAG_DUMP:
        o->dump = text;
        return 0;
    case FLAG_FULL:
        o->full = 1;
        return 0;
    case FLAG_ROPE:
        o->rope = 1;
        return 0;
    case FLAG_PROGRESS:
        o->progress = 1;
        return 0;
    case FLAG_HELP:
        return cli_print(name, usage_text);
    default: /* FLAG_VERSION */
        return cli_version(name, ", products: " PRODUCTS);
    }
}

/* Wishes that exclude each other, and defaults that depend on other flags. */
static int options_resolve(options *o, const int *given)
{
    int i, chunked = 0;
    if (o->methods_n == 0) {
        o->methods[o->methods_n++] = METHOD_ULYSSES;
        o->methods[o->methods_n++] = METHOD_UPIPE;
    }
    for (i = 0; i < o->methods_n; ++i) chunked |= o->methods[i] != METHOD_ULYSSES;
    if (given[FLAG_CHUNK] && !chunked)
        return cli_refuse("--chunk %d and --method ulysses alone contradict each other: ulysses takes all %d "
                          "heads in one stage",
                          o->chunk, o->heads);
    if (o->trace != NULL && o->dump != NULL && strcmp(o->trace, o->dump) == 0)
        return cli_refuse("--trace and --dump name the same folder, %s", o->trace);
    if (o->json != NULL && ((o->trace != NULL && strcmp(o->json, o->trace) == 0) ||
                            (o->dump != NULL && strcmp(o->json, o->dump) == 0)))
        return cli_refuse("--json names %s, which --trace or --dump takes for a folder", o->json);
    if (o->kv_heads == 0) o->kv_heads = o->heads;
    if (o->chunk == 0) o->chunk = o->ranks;
    if (o->model_dim == 0 &&
        (int64_t)o->heads * o->head_dim <= INT32_MAX) /* otherwise the plan refuses them */
        o->model_dim = (int64_t)o->heads * o->head_dim;
    if (o->check == CHECK_AUTO) o->check = o->tokens <= CHECK_AUTO_TOKENS ? CHECK_ON : CHECK_OFF;
    return 0;
}

static int options_read(options *o, int argc, char **argv)
{
    int given[FLAGS] = {0}, status;
    memset(o, 0, sizeof *o);
    o->ranks = 4;
    o->heads = 16;
    o->head_dim = 64;
    o->tokens = 2048;
    o->batch = 1;
    o->seed = 1;
    o->deadline = 600;
    status = cli_read(option_list, argc, argv, given, FLAG_METHOD, options_flag, o);
    return status != 0 ? status : options_resolve(o, given);
}

#endif

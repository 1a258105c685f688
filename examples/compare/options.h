/* options.h -- the command line of compare: read, checked, defaults filled in
 *
 *     int status = options_read(&options, &world, argc, argv);      0: run; otherwise the sentence is out, exit with
 *                                                                   status - 1
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
#include "../common/methods.h"
#include "../common/world.h"
#include "random.h"

enum { CHECK_AUTO, CHECK_ON, CHECK_OFF, CHECK_AUTO_TOKENS = 2048, CU_SEQLENS_MAX = 65536, LAYERS_MAX = 4096 };

typedef struct options {
    int methods[METHODS], methods_n; /* in the order of the command line */
    int ranks, ring, inner;          /* all ranks; those of a ring beside teams; those of an inner ring */
    int segments;
    int overlap;
    int layers, offload;                         /* whose inputs are kept; where */
    int heads, kv_heads, head_dim, v_dim, chunk; /* chunk 0: the plan's default */
    upipe_ring_mode ring_mode;
    int64_t model_dim, tokens, batch, window;
    int64_t *cu_seqlens, cu_seqlens_n; /* borders of packed sequences, [cu_seqlens_n + 1]; NULL = none */
    const char *cu_seqlens_text;
    double softcap;
    upipe_dtype dtype;
    int device, full, rope, sinks, check, progress;
    world_options net;
    uint64_t seed;
    double deadline;                        /* seconds that a rank waits for the others */
    const char *data, *json, *trace, *dump; /* paths; NULL = not wanted */
} options;

static const double rope_theta = 10000;

/* clang-format off */
static const char usage_text[] =
    "usage: compare [flags]\n"
    "\n"
    "Runs one attention block, forward and backward, over the tokens (bytes) of a text, with methods of\n"
    "context parallelism, on ranks that are threads of this process or processes. Prints what each holds,\n"
    "sends and computes.\n"
    "\n"
    "  --method NAME      one of the methods below; repeatable (ulysses and upipe)\n"
    "  --ranks N          all ranks, which share the sequence (4)\n"
    "  --ring R           of them, ranks of a ring of usp and upipe-ring: teams of ranks / R (2)\n"
    "  --ring-mode MODE   of upipe-ring: p2p, all-gather, or auto, the one that holds less memory (auto)\n"
    "  --inner N          ranks of an inner ring of double-ring (2)\n"
    "  --segments N       parts of the sequence of fpdt and upipe-fpdt (4)\n"
    "  --overlap          upipe, upipe-naive: projections and all-to-alls of the next stage overlap\n"
    "                     attention, on a side stream and into buffers of their own; fpdt, upipe-fpdt:\n"
    "                     copies between host and device overlap attention\n"
    "  --layers N         of the model: a rank keeps the inputs of the other N - 1 for a backward (1)\n"
    "  --offload          layers' inputs are offloaded to the host, as always in fpdt and upipe-fpdt\n"
    "  --heads N          query heads (16)\n"
    "  --kv-heads N       key/value heads (as many as query heads)\n"
    "  --head-dim N       elements of a head: 32 to 256 in steps of 8 (64)\n"
    "  --v-dim N          elements of a head of V and of the result (head-dim)\n"
    "  --model-dim N      elements of a token (heads * head-dim)\n"
    "  --tokens N         tokens of a sequence, over all ranks (2048)\n"
    "  --batch N          sequences (1)\n"
    "  --chunk N          query heads of a stage over all ranks of a team, for the methods with upipe in\n"
    "                     their names (as many as these ranks)\n"
    "  --dtype TYPE       storage of activations and weights: f32, bf16 or f16 (f32)\n"
    "  --device NAME      where the ranks compute: cpu, or cuda, a GPU that all threads share (cpu)\n"
    "  --full             every token sees all; otherwise causal\n"
    "  --window N         a token at position p sees no position below p - N + 1\n"
    "  --cu-seqlens LIST  packed sequences: their lengths, as 100,28,..., together batch * tokens; or one\n"
    "                     number: so many packed sequences of random lengths. A token sees its own one alone\n"
    "  --softcap X        scores become X * tanh(score / X)\n"
    "  --sinks            one more score a head, random, whose value is 0\n"
    "  --rope             rotary position embedding, rotate-half, theta 10000\n"
    "  --seed N           of all that is random: embedding table, weights, gradient of the result (1)\n"
    "  --data FILE        the text, at least batch * tokens bytes (the book in examples/data)\n"
    "  --check WHEN       compare with a reference in f64: on, off, or auto, up to 2048 tokens (auto)\n"
    "  --json FILE        write the numbers\n"
    "  --trace DIR        write the pools' traces: DIR/METHOD.json, for Perfetto or chrome://tracing\n"
    "  --dump DIR         write inputs and results as NumPy files: DIR/METHOD/x.npy wq wk wv out dout dx\n"
    "                     dwq dwk dwv, and with --sinks sinks dsinks\n"
    "  --deadline SECONDS how long a rank waits for another one before it aborts (600)\n"
    "  --progress         say on stderr what is being done, terminal or not\n"
    "  --help, --version\n";

static const char usage_end[] =
    "\n"
    "Exit status: 0, 1 for a run that failed or broke a promise (bytes, errors, bits), 2 for wrong usage.\n";
/* clang-format on */

static int options_method(options *o, const char *name)
{
    int m = method_find(name), i;
    if (m == METHODS) return cli_refuse("--method %s is no method", name);
    for (i = 0; i < o->methods_n; ++i)
        if (o->methods[i] == m) return cli_refuse("--method %s is given twice", name);
    o->methods[o->methods_n++] = m;
    return 0;
}

static int options_dtype(const char *flag, const char *text, upipe_dtype *out)
{
    static const upipe_dtype all[] = {UPIPE_F32, UPIPE_BF16, UPIPE_F16};
    size_t i;
    for (i = 0; i < sizeof all / sizeof *all && strcmp(text, upipe_dtype_name(all[i])) != 0; ++i) {
    }
    if (i == sizeof all / sizeof *all) return cli_refuse("--%s is f32, bf16 or f16, not '%s'", flag, text);
    *out = all[i];
    return 0;
}

static int options_ring_mode(const char *flag, const char *text, upipe_ring_mode *out)
{
    static const char *const names[] = {"auto", "p2p", "all-gather"}; /* in the order of upipe_ring_mode */
    int i;
    for (i = 0; i < 3 && strcmp(text, names[i]) != 0; ++i) {
    }
    if (i == 3) return cli_refuse("--%s is auto, p2p or all-gather, not '%s'", flag, text);
    *out = (upipe_ring_mode)i;
    return 0;
}

/* clang-format off */
enum {
    FLAG_METHOD, FLAG_RANKS, FLAG_RING, FLAG_RING_MODE, FLAG_INNER, FLAG_SEGMENTS, FLAG_OVERLAP, FLAG_LAYERS,
    FLAG_OFFLOAD, FLAG_HEADS,
    FLAG_KV_HEADS, FLAG_HEAD_DIM, FLAG_V_DIM, FLAG_MODEL_DIM, FLAG_TOKENS, FLAG_BATCH, FLAG_CHUNK,
    FLAG_DTYPE, FLAG_DEVICE, FLAG_FULL, FLAG_WINDOW, FLAG_CU_SEQLENS, FLAG_SOFTCAP, FLAG_SINKS, FLAG_ROPE,
    FLAG_SEED, FLAG_DATA, FLAG_CHECK, FLAG_JSON, FLAG_TRACE, FLAG_DUMP, FLAG_TRANSPORT, FLAG_NODE_RANKS,
    FLAG_DEADLINE, FLAG_PROGRESS,
    FLAG_HELP, FLAG_VERSION, FLAGS
};

static const struct option option_list[] = {
    {"method",    required_argument, NULL, FLAG_METHOD},
    {"ranks",     required_argument, NULL, FLAG_RANKS},
    {"ring",      required_argument, NULL, FLAG_RING},
    {"ring-mode", required_argument, NULL, FLAG_RING_MODE},
    {"inner",     required_argument, NULL, FLAG_INNER},
    {"segments",  required_argument, NULL, FLAG_SEGMENTS},
    {"overlap",   no_argument,       NULL, FLAG_OVERLAP},
    {"layers",    required_argument, NULL, FLAG_LAYERS},
    {"offload",   no_argument,       NULL, FLAG_OFFLOAD},
    {"heads",     required_argument, NULL, FLAG_HEADS},
    {"kv-heads",  required_argument, NULL, FLAG_KV_HEADS},
    {"head-dim",  required_argument, NULL, FLAG_HEAD_DIM},
    {"v-dim",     required_argument, NULL, FLAG_V_DIM},
    {"model-dim", required_argument, NULL, FLAG_MODEL_DIM},
    {"tokens",    required_argument, NULL, FLAG_TOKENS},
    {"batch",     required_argument, NULL, FLAG_BATCH},
    {"chunk",     required_argument, NULL, FLAG_CHUNK},
    {"dtype",     required_argument, NULL, FLAG_DTYPE},
    {"device",    required_argument, NULL, FLAG_DEVICE},
    {"full",      no_argument,       NULL, FLAG_FULL},
    {"window",    required_argument, NULL, FLAG_WINDOW},
    {"cu-seqlens",      required_argument, NULL, FLAG_CU_SEQLENS},
    {"softcap",   required_argument, NULL, FLAG_SOFTCAP},
    {"sinks",     no_argument,       NULL, FLAG_SINKS},
    {"rope",      no_argument,       NULL, FLAG_ROPE},
    {"seed",      required_argument, NULL, FLAG_SEED},
    {"data",      required_argument, NULL, FLAG_DATA},
    {"check",     required_argument, NULL, FLAG_CHECK},
    {"json",      required_argument, NULL, FLAG_JSON},
    {"trace",     required_argument, NULL, FLAG_TRACE},
    {"dump",      required_argument, NULL, FLAG_DUMP},
    {"transport", required_argument, NULL, FLAG_TRANSPORT},
    {"node-ranks", required_argument, NULL, FLAG_NODE_RANKS},
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
    case FLAG_RING:
        return cli_int(name, text, UPIPE_THREADS_MAX, &o->ring);
    case FLAG_RING_MODE:
        return options_ring_mode(name, text, &o->ring_mode);
    case FLAG_INNER:
        return cli_int(name, text, UPIPE_THREADS_MAX, &o->inner);
    case FLAG_SEGMENTS:
        return cli_int(name, text, UPIPE_SEGMENTS_MAX, &o->segments);
    case FLAG_LAYERS:
        return cli_int(name, text, LAYERS_MAX, &o->layers);
    case FLAG_HEADS:
        return cli_int(name, text, INT32_MAX, &o->heads);
    case FLAG_KV_HEADS:
        return cli_int(name, text, INT32_MAX, &o->kv_heads);
    case FLAG_HEAD_DIM:
        return cli_int(name, text, INT32_MAX, &o->head_dim);
    case FLAG_V_DIM:
        return cli_int(name, text, INT32_MAX, &o->v_dim);
    case FLAG_CHUNK:
        return cli_int(name, text, INT32_MAX, &o->chunk);
    case FLAG_MODEL_DIM:
        return cli_number(name, text, 1, INT32_MAX, &o->model_dim);
    case FLAG_TOKENS:
        return cli_tokens(name, text, INT64_MAX, &o->tokens);
    case FLAG_BATCH:
        return cli_number(name, text, 1, INT64_MAX, &o->batch);
    case FLAG_WINDOW:
        return cli_tokens(name, text, INT64_MAX, &o->window);
    case FLAG_SOFTCAP:
        return cli_real(name, text, 1e-3, 1e6, &o->softcap);
    case FLAG_SEED:
        status = cli_number(name, text, 0, INT64_MAX, &n);
        o->seed = (uint64_t)n;
        return status;
    case FLAG_DTYPE:
        return options_dtype(name, text, &o->dtype);
    case FLAG_DEVICE:
        return device_flag(name, text, &o->device);
    case FLAG_CHECK:
        if (strcmp(text, "auto") != 0 && strcmp(text, "on") != 0 && strcmp(text, "off") != 0)
            return cli_refuse("--check is auto, on or off, not '%s'", text);
        o->check = text[0] == 'a' ? CHECK_AUTO : text[1] == 'n' ? CHECK_ON : CHECK_OFF;
        return 0;
    case FLAG_TRANSPORT:
    case FLAG_NODE_RANKS:
        return world_flag(&o->net, name, text);
    case FLAG_DEADLINE:
        return cli_seconds(name, text, &o->deadline);
    case FLAG_CU_SEQLENS:
        o->cu_seqlens_text = text;
        return 0;
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
    case FLAG_OVERLAP:
        o->overlap = 1;
        return 0;
    case FLAG_OFFLOAD:
        o->offload = 1;
        return 0;
    case FLAG_SINKS:
        o->sinks = 1;
        return 0;
    case FLAG_ROPE:
        o->rope = 1;
        return 0;
    case FLAG_PROGRESS:
        o->progress = 1;
        return 0;
    case FLAG_HELP:
        fputs(usage_text, stdout);
        fputs(method_usage, stdout);
        fputs(world_usage, stdout);
        return cli_print(name, usage_end);
    default: /* FLAG_VERSION */
        return cli_version(name, ", products: " PRODUCTS);
    }
}

static int options_ascending(const void *a, const void *b)
{
    int64_t one = *(const int64_t *)a, other = *(const int64_t *)b;
    return (one > other) - (one < other);
}

/* The packed sequences' borders: from lengths with commas between them, or of a number of random packed
 * sequences, which may be empty. Tokens beyond 63 bits are left to the plan to refuse. */
static int options_cu_seqlens(options *o)
{
    const char *text = o->cu_seqlens_text, *comma;
    int64_t total, n = 1, i, length = 0;
    random_state r = {~o->seed, 0, 0}; /* not the numbers of the inputs */
    int status;
    if (text == NULL || !upipe_mul(&total, o->batch, o->tokens)) return 0;
    for (comma = text; (comma = strchr(comma, ',')) != NULL; ++comma) ++n;
    if (n == 1) {
        status = cli_number("cu-seqlens", text, 1, CU_SEQLENS_MAX, &o->cu_seqlens_n);
        if (status != 0) return status;
    } else {
        o->cu_seqlens_n = n;
    }
    o->cu_seqlens = (int64_t *)calloc((size_t)o->cu_seqlens_n + 1, sizeof *o->cu_seqlens);
    if (o->cu_seqlens == NULL)
        return cli_fail("out of memory for %lld packed sequences", (long long)o->cu_seqlens_n), 1 + EXIT_RUN;
    for (i = 1; n == 1 && i < o->cu_seqlens_n; ++i)
        o->cu_seqlens[i] = (int64_t)(random_uniform(&r) * (double)total);
    if (n == 1) {
        o->cu_seqlens[o->cu_seqlens_n] = total;
        qsort(o->cu_seqlens, (size_t)o->cu_seqlens_n, sizeof *o->cu_seqlens, options_ascending);
        return 0;
    }
    for (i = 0; i < n; ++i, text += strcspn(text, ",") + 1) {
        char one[32];
        snprintf(one, sizeof one, "%.*s", (int)strcspn(text, ","), text);
        status = cli_number("cu-seqlens", one, 0, total - o->cu_seqlens[i], &length);
        if (status != 0) return status;
        o->cu_seqlens[i + 1] = o->cu_seqlens[i] + length;
    }
    if (o->cu_seqlens[n] == total) return 0;
    return cli_refuse("--cu-seqlens has %lld tokens, the text %lld x %lld", (long long)o->cu_seqlens[n],
                      (long long)o->batch, (long long)o->tokens);
}

/* Flags that no method heeds. */
static int options_heeded(const options *o, const int *given)
{
    int i, chunked = 0, ringed = 0, free_mode = 0, inner = 0, segmented = 0, whole = 0, overlaps = 0;
    for (i = 0; i < o->methods_n; ++i) {
        const method_kind *k = &method_kinds[o->methods[i]];
        chunked |= k->stage == METHOD_CHUNK;
        ringed |= k->shape == METHOD_IS_GRID;
        free_mode |= k->shape == METHOD_IS_GRID && k->mode == UPIPE_RING_AUTO;
        inner |= k->inner;
        segmented |= k->segmented;
        whole |= !k->segmented;
        overlaps |= method_overlaps(k);
    }
    if (given[FLAG_CHUNK] && !chunked) return cli_refuse("no method here heeds --chunk %d", o->chunk);
    if (given[FLAG_RING] && !ringed) return cli_refuse("no method here heeds --ring %d", o->ring);
    if (given[FLAG_RING_MODE] && !free_mode) return cli_refuse("no method here heeds --ring-mode");
    if (given[FLAG_INNER] && !inner) return cli_refuse("no method here heeds --inner %d", o->inner);
    if (given[FLAG_SEGMENTS] && !segmented)
        return cli_refuse("no method here heeds --segments %d", o->segments);
    if (given[FLAG_OVERLAP] && !overlaps) return cli_refuse("no method here heeds --overlap");
    if (given[FLAG_OFFLOAD] && !whole)
        return cli_refuse(
            "--offload says nothing new of these methods: they keep inputs in the host's memory");
    if (ringed && o->ranks % o->ring != 0)
        return cli_refuse("--ranks %d do not divide into rings of %d (--ring)", o->ranks, o->ring);
    return 0;
}

/* Wishes that exclude each other, and defaults that depend on other flags. */
static int options_resolve(options *o, const int *given)
{
    int status;
    if (o->methods_n == 0) {
        o->methods[o->methods_n++] = METHOD_ULYSSES;
        o->methods[o->methods_n++] = METHOD_UPIPE;
    }
    status = options_heeded(o, given);
    if (status != 0) return status;
    if (o->trace != NULL && o->dump != NULL && strcmp(o->trace, o->dump) == 0)
        return cli_refuse("--trace and --dump name the same folder, %s", o->trace);
    if (o->json != NULL && ((o->trace != NULL && strcmp(o->json, o->trace) == 0) ||
                            (o->dump != NULL && strcmp(o->json, o->dump) == 0)))
        return cli_refuse("--json names %s, which --trace or --dump takes for a folder", o->json);
    if (o->kv_heads == 0) o->kv_heads = o->heads;
    if (o->v_dim == 0) o->v_dim = o->head_dim;
    if (o->model_dim == 0 &&
        (int64_t)o->heads * o->head_dim <= INT32_MAX) /* otherwise the plan refuses them */
        o->model_dim = (int64_t)o->heads * o->head_dim;
    if (o->check == CHECK_AUTO) o->check = o->tokens <= CHECK_AUTO_TOKENS ? CHECK_ON : CHECK_OFF;
    return options_cu_seqlens(o);
}

static void options_free(options *o)
{
    free(o->cu_seqlens);
    o->cu_seqlens = NULL;
}

/* The ranks of w are there when this returns; then the program ends with world_end. */
static int options_read(options *o, struct world *w, int argc, char **argv)
{
    int given[FLAGS] = {0}, status;
    memset(o, 0, sizeof *o);
    o->ranks = 4;
    o->ring = o->inner = 2;
    o->segments = 4;
    o->layers = 1;
    o->heads = 16;
    o->head_dim = 64;
    o->tokens = 2048;
    o->batch = 1;
    o->seed = 1;
    o->deadline = 600;
    status = cli_read(option_list, argc, argv, given, FLAG_METHOD, options_flag, o);
    if (status == 0) status = world_place(&o->net, o->device == DEVICE_CUDA);
    if (status != 0) return status;
    status = world_begin(w, &o->net, o->deadline, given[FLAG_RANKS], &o->ranks);
    if (status == 0) status = options_resolve(o, given);
    status = world_agree(w, status);
    if (status != 0) options_free(o);
    return status;
}

#endif

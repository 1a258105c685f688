/* options.h -- the command line of train: read, checked, defaults filled in
 *
 *     int status = options_read(&options, &world, argc, argv);      0: run; otherwise the sentence is out, exit with
 *                                                           status - 1
 *
 * Numbers must be plain and within their range, a flag comes once, and a flag that would have no effect is
 * refused: what is accepted is honoured. Where --resume or --load names a folder, options.from, its
 * config.json has the model, and a checkpoint the schedule: the program calls options_other_model and
 * options_resume when it has read them.
 */
#ifndef LLAMA_OPTIONS_H
#define LLAMA_OPTIONS_H

#include <getopt.h>
#include <string.h>

#include "upipe/upipe.h"

#include "../common/cli.h"
#include "../common/device_flag.h"
#include "../common/world.h"
#include "activations_flag.h"
#include "checkpoint.h"
#include "limits.h"
#include "plans.h"

/* clang-format off */
enum {
    FLAG_DATA, FLAG_METHOD, FLAG_RANKS, FLAG_RING, FLAG_INNER, FLAG_SEGMENTS, FLAG_CHUNK, FLAG_OVERLAP, FLAG_LAYERS,
    FLAG_MODEL_DIM, FLAG_HEADS, FLAG_KV_HEADS, FLAG_HEAD_DIM, FLAG_FF_DIM, FLAG_VOCAB, FLAG_UNTIED,
    FLAG_QK_NORM, FLAG_ATTENTION_BIAS, FLAG_ROPE_THETA, FLAG_NORM_EPS, FLAG_WINDOW, FLAG_TOKENS, FLAG_BATCH, FLAG_STEPS, FLAG_LR, FLAG_MIN_LR,
    FLAG_WARMUP, FLAG_WEIGHT_DECAY, FLAG_BETA1, FLAG_BETA2, FLAG_ADAM_EPS, FLAG_CLIP, FLAG_DTYPE, FLAG_DEVICE,
    FLAG_SEED, FLAG_TILE_BYTES, FLAG_ACTIVATIONS, FLAG_OFFLOAD, FLAG_ZERO, FLAG_ZERO_PREFETCH,
    FLAG_REDUCE_DTYPE, FLAG_JSON, FLAG_TRACE, FLAG_SAVE, FLAG_SAVE_EVERY,
    FLAG_KEEP, FLAG_RESUME, FLAG_LOAD, FLAG_SAMPLE, FLAG_PROMPT, FLAG_TEMPERATURE, FLAG_TRANSPORT, FLAG_NODE_RANKS, FLAG_DEADLINE,
    FLAG_PLAN, FLAG_PROGRESS, FLAG_HELP, FLAG_VERSION, FLAGS
};

static const struct option option_list[] = {
    {"data",         required_argument, NULL, FLAG_DATA},
    {"method",       required_argument, NULL, FLAG_METHOD},
    {"ranks",        required_argument, NULL, FLAG_RANKS},
    {"ring",         required_argument, NULL, FLAG_RING},
    {"inner",        required_argument, NULL, FLAG_INNER},
    {"segments",     required_argument, NULL, FLAG_SEGMENTS},
    {"chunk",        required_argument, NULL, FLAG_CHUNK},
    {"overlap",      no_argument,       NULL, FLAG_OVERLAP},
    {"layers",       required_argument, NULL, FLAG_LAYERS},
    {"model-dim",    required_argument, NULL, FLAG_MODEL_DIM},
    {"heads",        required_argument, NULL, FLAG_HEADS},
    {"kv-heads",     required_argument, NULL, FLAG_KV_HEADS},
    {"head-dim",     required_argument, NULL, FLAG_HEAD_DIM},
    {"ff-dim",       required_argument, NULL, FLAG_FF_DIM},
    {"vocab",        required_argument, NULL, FLAG_VOCAB},
    {"untied",       no_argument,       NULL, FLAG_UNTIED},
    {"qk-norm",      no_argument,       NULL, FLAG_QK_NORM},
    {"attention-bias", required_argument, NULL, FLAG_ATTENTION_BIAS},
    {"rope-theta",   required_argument, NULL, FLAG_ROPE_THETA},
    {"norm-eps",     required_argument, NULL, FLAG_NORM_EPS},
    {"window",       required_argument, NULL, FLAG_WINDOW},
    {"tokens",       required_argument, NULL, FLAG_TOKENS},
    {"batch",        required_argument, NULL, FLAG_BATCH},
    {"steps",        required_argument, NULL, FLAG_STEPS},
    {"lr",           required_argument, NULL, FLAG_LR},
    {"min-lr",       required_argument, NULL, FLAG_MIN_LR},
    {"warmup",       required_argument, NULL, FLAG_WARMUP},
    {"weight-decay", required_argument, NULL, FLAG_WEIGHT_DECAY},
    {"beta1",        required_argument, NULL, FLAG_BETA1},
    {"beta2",        required_argument, NULL, FLAG_BETA2},
    {"adam-eps",     required_argument, NULL, FLAG_ADAM_EPS},
    {"clip",         required_argument, NULL, FLAG_CLIP},
    {"dtype",        required_argument, NULL, FLAG_DTYPE},
    {"device",       required_argument, NULL, FLAG_DEVICE},
    {"seed",         required_argument, NULL, FLAG_SEED},
    {"tile-bytes",   required_argument, NULL, FLAG_TILE_BYTES},
    {"activations",  required_argument, NULL, FLAG_ACTIVATIONS},
    {"offload",      no_argument,       NULL, FLAG_OFFLOAD},
    {"zero",         required_argument, NULL, FLAG_ZERO},
    {"zero-prefetch", no_argument,      NULL, FLAG_ZERO_PREFETCH},
    {"reduce-dtype", required_argument, NULL, FLAG_REDUCE_DTYPE},
    {"json",         required_argument, NULL, FLAG_JSON},
    {"trace",        required_argument, NULL, FLAG_TRACE},
    {"save",         required_argument, NULL, FLAG_SAVE},
    {"save-every",   required_argument, NULL, FLAG_SAVE_EVERY},
    {"keep",         required_argument, NULL, FLAG_KEEP},
    {"resume",       required_argument, NULL, FLAG_RESUME},
    {"load",         required_argument, NULL, FLAG_LOAD},
    {"sample",       required_argument, NULL, FLAG_SAMPLE},
    {"prompt",       required_argument, NULL, FLAG_PROMPT},
    {"temperature",  required_argument, NULL, FLAG_TEMPERATURE},
    {"transport",    required_argument, NULL, FLAG_TRANSPORT},
    {"node-ranks",   required_argument, NULL, FLAG_NODE_RANKS},
    {"deadline",     required_argument, NULL, FLAG_DEADLINE},
    {"plan",         no_argument,       NULL, FLAG_PLAN},
    {"progress",     no_argument,       NULL, FLAG_PROGRESS},
    {"help",         no_argument,       NULL, FLAG_HELP},
    {"version",      no_argument,       NULL, FLAG_VERSION},
    {NULL, 0, NULL, 0}};

static const char usage_text[] =
    "usage: train [flags]\n"
    "\n"
    "Trains a Llama on the bytes of a text, its sequences shared by ranks, with UPipe or another\n"
    "method. The ranks are threads of this process, or processes. Prints loss, speed and memory, and writes a little text.\n"
    "\n"
    "  --data FILE        the text, at least tokens + 1 bytes (the book in examples/data)\n"
    METHOD_USAGE
    "  --ranks N          ranks that share a sequence (4; as many as a launcher has started)\n"
    "\n"
    "the model; with --resume or --load config.json gives all of it, and no flag may contradict it\n"
    "  --layers N         (4)\n"
    "  --model-dim N      elements of a token (256)\n"
    "  --heads N          query heads (8)\n"
    "  --kv-heads N       key/value heads (4)\n"
    "  --head-dim N       elements of a head: 32 to 256 in steps of 8 (model-dim / heads, rounded up)\n"
    "  --ff-dim N         width of the MLP (8/3 model-dim, rounded up to a multiple of 64)\n"
    "  --vocab N          rows of the embedding, at least 256: a token is a byte (256)\n"
    "  --untied           the head is a matrix of its own, not the embedding\n"
    "  --qk-norm          RMS norm of every head of Q and K, as in Qwen3\n"
    "  --attention-bias B none; qkv: of Q, K and V, as in Qwen2; qkvo: of the output projection too (none)\n"
    "  --rope-theta X     (10000)\n"
    "  --norm-eps X       (1e-5)\n"
    "  --window N         tokens that a token sees, its own included, as in Mistral; 0 for all (0)\n"
    "\n"
    "the training\n"
    "  --tokens N         tokens of a sequence, over all ranks (1024)\n"
    "  --batch N          sequences of a step (1)\n"
    "  --steps N          of the whole training, those before a resume included (100)\n"
    "  --lr X             learning rate after the warmup (1e-3)\n"
    "  --min-lr X         learning rate at the end of its cosine (lr / 10)\n"
    "  --warmup N         steps in which the learning rate rises (steps / 10, at least 1)\n"
    "  --weight-decay X   of the matrices; norm weights and biases have none (0.1)\n"
    "  --beta1 X, --beta2 X, --adam-eps X\n"
    "                     of AdamW (0.9, 0.95, 1e-8)\n"
    "  --clip X           largest norm of the gradient, 0 for none (1)\n"
    "  --dtype TYPE       storage of activations and weights: f32 or bf16 (f32)\n"
    "  --device NAME      where the ranks compute: cpu, or cuda, a GPU that a process's ranks share (cpu)\n"
    "  --seed N           of the first weights, the order of the text and the sample (1)\n"
    "  --activations KIND what is kept of each layer, see below (ac)\n"
    "  --offload          --activations offload\n"
    "  --zero STAGE       sharded over the ranks: 0 nothing, 1 optimizer, 2 gradients too, 3 weights too (1)\n"
    "  --zero-prefetch    with --zero 3: the weights of the next half a layer are gathered while one computes\n"
    "  --reduce-dtype T   in which gradients of matrices are sent to be summed: f32 or bf16; sums are f32 (f32)\n"
    "  --tile-bytes SIZE  limit of a tile of MLP or loss with its unit (64KiB; 64 tokens or more), without product\n"
    "                     scratch\n"
    "                     (0: the paper's square, about model-dim tokens)\n"
    "  --deadline SECONDS how long a rank waits for another one before it aborts (600)\n"
    "  --plan             print the memory by component and what a token adds to it; train nothing\n"
    "\n"
    "files\n"
    "  --json FILE        write the numbers; with --plan those of the plan\n"
    "  --trace FILE       write the traces of the ranks' pools up to the first step, for Perfetto\n"
    "  --save DIR         write checkpoints with the weights as Hugging Face has them\n"
    "  --save-every N     steps between checkpoints (0: one at the end)\n"
    "  --keep N           checkpoints that stay; 0 for all (1)\n"
    "  --resume DIR       continue from a checkpoint: its data, seed, tokens, batch and dtype, and its\n"
    "                     schedule unless a flag says otherwise; bit for bit on as many ranks\n"
    "  --load DIR         start from the weights of a Hugging Face folder\n";

static const char usage_end[] =
    "\n"
    "the text written at the end\n"
    "  --sample N         bytes, 0 for none (200)\n"
    "  --prompt TEXT      its last 256 bytes count, at most --tokens (\"In the beginning \")\n"
    "  --temperature X    0 samples the likeliest byte (0.8)\n"
    "\n"
    "  --progress         say on stderr what is being done, terminal or not\n"
    "  --help, --version\n"
    "\n"
    "Exit status: 0, 1 for a run that failed or broke a promise (bytes, bits), 2 for wrong usage, 128 + N\n"
    "after signal N (interrupt, hangup, terminate), which ends the training after the step and its files.\n";
/* clang-format on */

typedef struct options {
    llama_config config; /* by the flags; the folder's config.json counts where there is one */
    const char *from;    /* resume or load; NULL = none */
    method_choice how;
    int keep;
    int64_t tokens, batch, steps, warmup, save_every, sample;
    double lr, min_lr, weight_decay, beta1, beta2, adam_eps, clip, temperature;
    world_options net;
    double deadline; /* seconds that a rank waits for the others */
    size_t tile_bytes;
    upipe_dtype dtype;
    int device;
    activations_setting activations;
    int zero; /* stage */
    int zero_prefetch;
    upipe_dtype reduce;
    int plan, progress;
    int64_t seed;
    const char *data, *prompt;
    const char *json, *trace, *save, *resume, *load; /* paths; NULL = not wanted */
    int given[FLAGS];                                /* how often each flag came: 0 or 1 */
} options;

static int options_whole(const char *name, const char *text, int64_t *out)
{
    const limit_whole *l = limit_whole_of(name);
    return cli_number(name, text, l->least, l->most, out);
}

static int options_int(const char *name, const char *text, int *out)
{
    int64_t n = 0;
    int status = options_whole(name, text, &n);
    *out = (int)n;
    return status;
}

static int options_real(const char *name, const char *text, double *out)
{
    const limit_real *l = limit_real_of(name);
    return cli_real(name, text, l->least, l->most, out);
}

static int options_bias(const char *name, const char *text, llama_bias *out)
{
    int i;
    for (i = LLAMA_BIAS_NONE; i <= LLAMA_BIAS_QKVO; ++i) {
        *out = (llama_bias)i;
        if (strcmp(text, llama_bias_names[i]) == 0) return 0;
    }
    return cli_refuse("--%s is none, qkv or qkvo, not '%s'", name, text);
}

static int options_model(llama_config *c, int flag, const char *name, const char *text)
{
    switch (flag) {
    case FLAG_LAYERS:
        return options_whole(name, text, &c->layers);
    case FLAG_MODEL_DIM:
        return options_whole(name, text, &c->dim);
    case FLAG_HEADS:
        return options_int(name, text, &c->heads);
    case FLAG_KV_HEADS:
        return options_int(name, text, &c->kv_heads);
    case FLAG_HEAD_DIM:
        return options_int(name, text, &c->head_dim);
    case FLAG_FF_DIM:
        return options_whole(name, text, &c->hidden);
    case FLAG_VOCAB: /* a token is a byte; another's model may have fewer tokens */
        return cli_number(name, text, 256, limit_whole_of(name)->most, &c->vocab);
    case FLAG_ROPE_THETA:
        return options_real(name, text, &c->rope_theta);
    case FLAG_NORM_EPS:
        return options_real(name, text, &c->norm_eps);
    case FLAG_WINDOW:
        return options_whole(name, text, &c->window);
    case FLAG_ATTENTION_BIAS:
        return options_bias(name, text, &c->attention_bias);
    case FLAG_UNTIED:
        c->tied = 0;
        return 0;
    default: /* FLAG_QK_NORM */
        c->qk_norm = 1;
        return 0;
    }
}

static int options_path(options *o, int flag, const char *text)
{
    const char **paths[FLAGS] = {NULL};
    paths[FLAG_DATA] = &o->data;
    paths[FLAG_PROMPT] = &o->prompt;
    paths[FLAG_JSON] = &o->json;
    paths[FLAG_TRACE] = &o->trace;
    paths[FLAG_SAVE] = &o->save;
    paths[FLAG_RESUME] = &o->resume;
    paths[FLAG_LOAD] = &o->load;
    *paths[flag] = text;
    return 0;
}

static int options_flag(void *user, int flag, const char *text)
{
    options *o = (options *)user;
    const char *name = option_list[flag].name;
    switch (flag) {
    case FLAG_METHOD:
    case FLAG_RANKS:
    case FLAG_RING:
    case FLAG_INNER:
    case FLAG_SEGMENTS:
    case FLAG_CHUNK:
    case FLAG_OVERLAP:
        return method_flag(&o->how, name, text);
    case FLAG_LAYERS:
    case FLAG_MODEL_DIM:
    case FLAG_HEADS:
    case FLAG_KV_HEADS:
    case FLAG_HEAD_DIM:
    case FLAG_FF_DIM:
    case FLAG_VOCAB:
    case FLAG_UNTIED:
    case FLAG_QK_NORM:
    case FLAG_ATTENTION_BIAS:
    case FLAG_ROPE_THETA:
    case FLAG_NORM_EPS:
    case FLAG_WINDOW:
        return options_model(&o->config, flag, name, text);
    case FLAG_TOKENS:
        return cli_tokens(name, text, limit_whole_of(name)->most, &o->tokens);
    case FLAG_BATCH:
        return options_whole(name, text, &o->batch);
    case FLAG_STEPS:
        return options_whole(name, text, &o->steps);
    case FLAG_WARMUP:
        return options_whole(name, text, &o->warmup);
    case FLAG_LR:
        return options_real(name, text, &o->lr);
    case FLAG_MIN_LR:
        return options_real(name, text, &o->min_lr);
    case FLAG_WEIGHT_DECAY:
        return options_real(name, text, &o->weight_decay);
    case FLAG_BETA1:
        return options_real(name, text, &o->beta1);
    case FLAG_BETA2:
        return options_real(name, text, &o->beta2);
    case FLAG_ADAM_EPS:
        return options_real(name, text, &o->adam_eps);
    case FLAG_CLIP:
        return options_real(name, text, &o->clip);
    case FLAG_DTYPE:
        return cli_dtype(name, text, &o->dtype);
    case FLAG_DEVICE:
        return device_flag_planned(name, text, &o->device);
    case FLAG_SEED:
        return options_whole(name, text, &o->seed);
    case FLAG_TILE_BYTES:
        return cli_bytes(name, text, &o->tile_bytes);
    case FLAG_ACTIVATIONS:
        return activations_flag(name, text, &o->activations);
    case FLAG_OFFLOAD:
        o->activations.kind = ACTIVATIONS_OFFLOAD;
        return 0;
    case FLAG_ZERO:
        return options_int(name, text, &o->zero);
    case FLAG_ZERO_PREFETCH:
        o->zero_prefetch = o->net.with_side = 1;
        return 0;
    case FLAG_REDUCE_DTYPE:
        return cli_dtype(name, text, &o->reduce);
    case FLAG_SAVE_EVERY:
        return options_whole(name, text, &o->save_every);
    case FLAG_KEEP:
        return options_int(name, text, &o->keep);
    case FLAG_SAMPLE:
        return options_whole(name, text, &o->sample);
    case FLAG_TEMPERATURE:
        return options_real(name, text, &o->temperature);
    case FLAG_TRANSPORT:
    case FLAG_NODE_RANKS:
        return world_flag(&o->net, name, text);
    case FLAG_DEADLINE:
        return cli_seconds(name, text, &o->deadline);
    case FLAG_PLAN:
        o->plan = 1;
        return 0;
    case FLAG_PROGRESS:
        o->progress = 1;
        return 0;
    case FLAG_HELP:
        fputs(usage_text, stdout);
        fputs(usage_end, stdout);
        fputs(world_usage, stdout);
        return method_help(name, activations_usage);
    case FLAG_VERSION:
        return cli_version(name, ", products: " PRODUCTS);
    default:
        return options_path(o, flag, text);
    }
}

/* The first of the listed flags that was given; -1 for none. */
static int options_any(const options *o, const int *flags, size_t n)
{
    size_t i;
    for (i = 0; i < n; ++i)
        if (o->given[flags[i]]) return flags[i];
    return -1;
}

/* Wishes that exclude each other or would have no effect. */
static int options_contradictions(const options *o)
{
    static const int of_training[] = {
        FLAG_TRACE, FLAG_SAVE,  FLAG_SAVE_EVERY, FLAG_KEEP,   FLAG_SAMPLE,   FLAG_PROMPT,  FLAG_TEMPERATURE,
        FLAG_DATA,  FLAG_STEPS, FLAG_LR,         FLAG_MIN_LR, FLAG_WARMUP,   FLAG_CLIP,    FLAG_WEIGHT_DECAY,
        FLAG_BETA1, FLAG_BETA2, FLAG_ADAM_EPS,   FLAG_SEED,   FLAG_DEADLINE, FLAG_PROGRESS};
    static const int of_save[] = {FLAG_SAVE_EVERY, FLAG_KEEP};
    static const int of_sample[] = {FLAG_PROMPT, FLAG_TEMPERATURE};
    int flag;
    if (llama_config_like(&o->config) < 0)
        return cli_refuse(
            "--window, --qk-norm and --attention-bias contradict each other: no model that is built has these together");
    if (!o->plan && device_flag_built("device", o->device) != 0) return 1 + EXIT_USAGE;
    if (o->given[FLAG_ACTIVATIONS] && o->given[FLAG_OFFLOAD])
        return cli_refuse("--offload is --activations offload: only one of them can be given");
    if (o->zero_prefetch && o->zero < 3)
        return cli_refuse("--zero-prefetch would have no effect with --zero %d: no weights are gathered",
                          o->zero);
    if (o->resume != NULL && o->load != NULL)
        return cli_refuse(
            "--resume %s and --load %s contradict each other: the weights come from one of them", o->resume,
            o->load);
    flag = options_any(o, of_training, sizeof of_training / sizeof *of_training);
    if (o->plan && flag >= 0)
        return cli_refuse("--plan trains nothing, so --%s would have no effect", option_list[flag].name);
    flag = options_any(o, of_save, sizeof of_save / sizeof *of_save);
    if (o->save == NULL && flag >= 0) return cli_refuse("--%s wants --save", option_list[flag].name);
    flag = options_any(o, of_sample, sizeof of_sample / sizeof *of_sample);
    if (o->sample == 0 && flag >= 0)
        return cli_refuse("--%s would have no effect, as --sample is 0", option_list[flag].name);
    if (o->json != NULL && o->trace != NULL && strcmp(o->json, o->trace) == 0)
        return cli_refuse("--json and --trace name the same file, %s", o->json);
    if (o->save != NULL && o->json != NULL && strcmp(o->json, o->save) == 0)
        return cli_refuse("--json names %s, which --save takes for a folder", o->json);
    if (o->save != NULL && o->trace != NULL && strcmp(o->trace, o->save) == 0)
        return cli_refuse("--trace names %s, which --save takes for a folder", o->trace);
    return 0;
}

/* To stand before a flag's name: whose value it is. */
static const char *options_whose(const options *o, int flag)
{
    return o->resume != NULL && !o->given[flag] ? "the checkpoint's " : "";
}

/* What must fit the schedule. */
static int options_schedule(const options *o)
{
    if (o->min_lr > o->lr)
        return cli_refuse("%s--min-lr %g is above %s--lr %g", options_whose(o, FLAG_MIN_LR), o->min_lr,
                          options_whose(o, FLAG_LR), o->lr);
    if (o->warmup > o->steps)
        return cli_refuse("%s--warmup %lld is longer than the %lld steps of the training",
                          options_whose(o, FLAG_WARMUP), (long long)o->warmup, (long long)o->steps);
    if (o->save_every > o->steps)
        return cli_refuse("--save-every %lld is longer than the %lld steps of the training",
                          (long long)o->save_every, (long long)o->steps);
    return 0;
}

/* What the checkpoint says of the schedule, where no flag says otherwise; likewise of the data. */
static int options_resume(options *o, const llama_run *run, upipe_dtype dtype)
{
    if (!o->given[FLAG_STEPS]) o->steps = run->steps;
    if (!o->given[FLAG_WARMUP]) o->warmup = run->warmup;
    if (!o->given[FLAG_LR]) o->lr = run->lr;
    if (!o->given[FLAG_MIN_LR]) o->min_lr = run->min_lr;
    if (!o->given[FLAG_WEIGHT_DECAY]) o->weight_decay = run->weight_decay;
    if (!o->given[FLAG_BETA1]) o->beta1 = run->beta1;
    if (!o->given[FLAG_BETA2]) o->beta2 = run->beta2;
    if (!o->given[FLAG_ADAM_EPS]) o->adam_eps = run->adam_eps;
    if (!o->given[FLAG_CLIP]) o->clip = run->clip;
    if (!o->given[FLAG_TOKENS]) o->tokens = run->tokens;
    if (!o->given[FLAG_BATCH]) o->batch = run->batch;
    if (!o->given[FLAG_SEED]) o->seed = run->seed;
    if (!o->given[FLAG_DTYPE]) o->dtype = dtype;
    return options_schedule(o);
}

/* A flag of the model that says otherwise than the folder's config.json; -1 for none. */
static int options_other_model(const options *o, const llama_config *folder)
{
    const llama_config *c = &o->config;
    const struct {
        int flag, same;
    } all[] = {{FLAG_LAYERS, c->layers == folder->layers},
               {FLAG_MODEL_DIM, c->dim == folder->dim},
               {FLAG_HEADS, c->heads == folder->heads},
               {FLAG_KV_HEADS, c->kv_heads == folder->kv_heads},
               {FLAG_HEAD_DIM, c->head_dim == folder->head_dim},
               {FLAG_FF_DIM, c->hidden == folder->hidden},
               {FLAG_VOCAB, c->vocab == folder->vocab},
               {FLAG_UNTIED, c->tied == folder->tied},
               {FLAG_QK_NORM, c->qk_norm == folder->qk_norm},
               {FLAG_ATTENTION_BIAS, c->attention_bias == folder->attention_bias},
               {FLAG_ROPE_THETA, c->rope_theta == folder->rope_theta},
               {FLAG_NORM_EPS, c->norm_eps == folder->norm_eps},
               {FLAG_WINDOW, c->window == folder->window}};
    size_t i;
    for (i = 0; i < sizeof all / sizeof *all; ++i)
        if (o->given[all[i].flag] && !all[i].same) return all[i].flag;
    return -1;
}

/* Defaults that depend on other flags, and what must fit them. */
static int options_resolve(options *o)
{
    llama_config *c = &o->config;
    int64_t head_dim = (c->dim + c->heads - 1) / c->heads;
    int status;
    o->from = o->resume != NULL ? o->resume : o->load;
    status = options_contradictions(o);
    if (status == 0) status = method_resolve(&o->how);
    if (status != 0) return status;
    if (!o->given[FLAG_HEAD_DIM]) c->head_dim = head_dim < 32 ? 32 : (int)((head_dim + 7) / 8 * 8);
    if (!o->given[FLAG_FF_DIM]) c->hidden = (8 * c->dim + 191) / 192 * 64;
    if (o->data == NULL) o->data = cli_book();
    if (o->resume != NULL) return 0; /* the checkpoint has the schedule: options_resume */
    if (!o->given[FLAG_MIN_LR]) o->min_lr = o->lr / 10;
    if (!o->given[FLAG_WARMUP]) o->warmup = o->steps < 10 ? 1 : o->steps / 10;
    return options_schedule(o);
}

/* The ranks of w are there when this returns; then the program ends with world_end. */
static int options_read(options *o, struct world *w, int argc, char **argv)
{
    int status;
    memset(o, 0, sizeof *o);
    o->how.method = METHOD_UPIPE;
    o->how.ranks = 4;
    o->config.layers = 4;
    o->config.dim = 256;
    o->config.heads = 8;
    o->config.kv_heads = 4;
    o->config.vocab = 256;
    o->config.tied = 1;
    o->config.rope_theta = 10000;
    o->config.norm_eps = 1e-5;
    o->tokens = 1024;
    o->batch = 1;
    o->steps = 100;
    o->lr = 1e-3;
    o->weight_decay = 0.1;
    o->beta1 = 0.9;
    o->beta2 = 0.95;
    o->adam_eps = 1e-8;
    o->clip = 1;
    o->dtype = UPIPE_F32;
    o->seed = 1;
    o->keep = 1;
    o->zero = 1;
    o->sample = 200;
    o->prompt = "In the beginning ";
    o->temperature = 0.8;
    o->deadline = 600;
    status = cli_read(option_list, argc, argv, o->given, -1, options_flag, o);
    if (status == 0) status = world_place(&o->net, o->device == DEVICE_CUDA);
    if (status != 0) return status;
    status = world_begin(w, &o->net, o->deadline, o->given[FLAG_RANKS], &o->how.ranks);
    if (status == 0) status = options_resolve(o);
    return world_agree(w, status);
}

#endif

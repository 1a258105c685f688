/* options.h -- what the flags of all programs are, and what they say: one table
 *
 *     a flag is a member of options and a row of flag_rows; its reading, its range, --help, the agreement of ranks and
 *     the settings in JSON follow from the row. What stays over a resume (FLAG_DATA, FLAG_SCHEDULE) is a member and a row
 *     of llama_run too, and what config.json says (FLAG_MODEL) one of llama_config: the trait alone keeps nothing, and a
 *     resumed run accepts any value. Older checkpoints lack a new number and are refused
 *
 *     const flag_row *row = flag_find(IN_TRAIN, "min_lr");        the flag min-lr: - and _ are the same
 *     if (options_given(&o, &o.lr)) ...
 *
 * flags.h reads a command line by the table. A name stands in several rows where programs differ in its meaning.
 */
#ifndef COMMON_OPTIONS_H
#define COMMON_OPTIONS_H

#include <assert.h>
#include <stddef.h>

#include "upipe/upipe.h"

#include "activations_flag.h"
#include "flag_row.h"
#include "methods.h"

/* Programs. A checkpoint's numbers that no flag says are rows too. */
enum { IN_TRAIN = 1, IN_COMPARE = 2, IN_LOGITS = 4, IN_PLAN = 8, IN_CHECKPOINT = 16 };

/* Sections of --help, in which rows stand together. */
static const char in_run[] = "";
static const char in_model[] = "the model";
static const char in_training[] = "the training";
static const char in_memory[] = "where it is computed, and what is held";
static const char in_mask[] = "the mask";
static const char in_planning[] = "the plan";
static const char in_files[] = "files";
static const char in_sample[] = "the text written at the end";
static const char in_processes[] = "ranks that are processes";
static const char in_rest[] = "what is said";

enum {
    LLAMA_LAYERS_MAX = 4096, /* bounds the table of tensors that a file can make us allocate */
    LLAMA_DIM_MAX = 1 << 24,
    FLAG_RANKS_MAX = 256,
    FLAG_CHUNK_MAX = 1 << 24,
    FLAG_ROWS_MAX = 192
};

enum { CHECK_AUTO, CHECK_ON, CHECK_OFF };
enum { SCHEDULE_COSINE, SCHEDULE_LINEAR, SCHEDULE_CONSTANT, SCHEDULE_WSD, SCHEDULES };

/* How another program would run a training, for upipe-plan (plan/as.h); all 0: this library.
 *   program, method   rows of its tables;  loss, mlp  0 whole, 1 in tiles;  all  nothing is computed twice;  fp8  products are */
typedef struct as_choice {
    int program, method, loss, mlp, all, fp8;
} as_choice;

/* What the flags say, of all programs; each uses what is its own. */
typedef struct options {
    int program;              /* IN_... */
    int given[FLAG_ROWS_MAX]; /* how often each row's flag came */

    method_choice how;
    method_list methods;     /* of compare */
    const char *method_name; /* of upipe-plan, whose --as has other methods */
    as_choice as;
    int attention; /* of upipe-plan: a kernel */
    int ring_mode; /* upipe_ring_mode */
    int replicas, device, avoid, dtype, transport, node_ranks;
    double deadline; /* seconds that a rank waits for the others */

    int layers, heads, kv_heads, head_dim, v_dim, untied, qk_norm, attention_bias;
    int64_t model_dim, ff_dim, vocab, window;
    double rope_theta, rope_factor, norm_eps, softcap;
    int64_t rope_original;
    int full, sinks, rope, rope_type;
    const char *cu_seqlens;
    int64_t *borders,
        borders_n; /* of cu_seqlens, the planned documents, or the first step's: [borders_n + 1]; NULL = none */

    int64_t tokens, batch, accumulate, steps, warmup, seed;
    double lr, min_lr, weight_decay, beta1, beta2, adam_eps, clip;

    activations_setting activations;
    int offload, zero, zero_prefetch, reduce_dtype, offload_optimizer, offload_weights;
    size_t tile_bytes;

    const char *model, *machine, *lengths, *train, *lora;
    int max_tokens, best, plan;
    text_list calibrate, ignore_key;

    const char *tokens_file, *end_token, *loss_mask, *eval_mask;
    int token_type, documents, shuffle;
    int64_t end_id; /* what end_token comes to; -1 = none */

    const char *data, *eval, *json, *log, *trace, *dump, *save, *resume, *load, *load_adapter, *save_adapter,
        *ids, *out, *write_machine;
    int check, keep, progress, schedule, merge;
    int64_t save_every, eval_every, decay, sample;
    const char *prompt, *stop_token;
    int64_t stop_id; /* what stop_token comes to; -1 = none */
    double temperature;
} options;

#define AT(member) offsetof(options, member)

/* clang-format off */
static const flag_row flag_rows[] = {
    /* who shares the sequence */
    {"model", "NAME|DIR", IN_PLAN, in_run, FLAG_TEXT, AT(model), 0, 0, NULL, 0,
     "a model by name (a wrong one lists them), or a folder with a config.json"},
    {"machine", "NAME|FILE", IN_PLAN, in_run, FLAG_TEXT, AT(machine), 0, 0, "h100x8", 0,
     "so many GPUs, eight in a node, of h100, h100-96g, h200, a100, b200, rtxpro6000, l40s, 5090 and 4090, as h100x16; cpu; or a file"},
    {"method", "NAME", IN_TRAIN | IN_LOGITS, in_run, FLAG_METHOD, AT(how.method), 0, 0, "upipe", 0,
     "one of those below"},
    {"method", "NAME", IN_PLAN, in_run, FLAG_TEXT, AT(method_name), 0, 0, NULL, 0,
     "one of those below; with --as those of that program, its first one (upipe)"},
    {"method", "NAME", IN_COMPARE, in_run, FLAG_METHODS, AT(methods), 0, 0, NULL, 0,
     "one of the methods below; may come several times (ulysses and upipe)"},
    {"ranks", "N", IN_TRAIN | IN_COMPARE, in_run, FLAG_INT, AT(how.ranks), 1, FLAG_RANKS_MAX, "4", 0,
     "ranks that share the sequence; of processes as many as a launcher has started"},
    {"ranks", "N", IN_LOGITS, in_run, FLAG_INT, AT(how.ranks), 1, FLAG_RANKS_MAX, "1", 0,
     "ranks that share the tokens; of processes as many as a launcher has started"},
    {"ranks", "N", IN_PLAN, in_run, FLAG_INT, AT(how.ranks), 1, FLAG_RANKS_MAX, NULL, 0, "of the machine's (all)"},
    {"replicas", "N", IN_TRAIN | IN_PLAN, in_run, FLAG_INT, AT(replicas), 1, FLAG_RANKS_MAX, "1", 0,
     "groups of --ranks / N ranks, each with sequences of its own; gradients are summed, and states sharded, over all ranks"},
    {"ring", "N", IN_TRAIN | IN_COMPARE | IN_LOGITS | IN_PLAN, in_run, FLAG_INT, AT(how.ring), 1, FLAG_RANKS_MAX, NULL, 0,
     "ranks of a ring of usp and upipe-ring (2)"},
    {"ring-mode", "auto|p2p|all-gather", IN_COMPARE, in_run, FLAG_CHOICE, AT(ring_mode), 0, 0, "auto", 0,
     "of upipe-ring; auto: the one that holds less memory"},
    {"inner", "N", IN_TRAIN | IN_COMPARE | IN_LOGITS | IN_PLAN, in_run, FLAG_INT, AT(how.inner), 1, FLAG_RANKS_MAX, NULL, 0,
     "ranks of an inner ring of double-ring (2)"},
    {"segments", "N", IN_TRAIN | IN_COMPARE | IN_LOGITS | IN_PLAN, in_run, FLAG_INT, AT(how.segments), 1, UPIPE_SEGMENTS_MAX, NULL, 0,
     "parts of the sequence of fpdt and upipe-fpdt (4)"},
    {"chunk", "N", IN_TRAIN | IN_COMPARE | IN_LOGITS | IN_PLAN, in_run, FLAG_INT, AT(how.chunk), 1, FLAG_CHUNK_MAX, NULL, FLAG_NULL,
     "query heads of a stage of the methods with upipe in their names, over a team's ranks (their number)"},
    {"overlap", NULL, IN_TRAIN | IN_COMPARE | IN_LOGITS | IN_PLAN, in_run, FLAG_SWITCH, AT(how.overlap), 0, 1, NULL, 0,
     "upipe, upipe-naive: projections and all-to-alls of the next stage overlap attention, on a side stream and into "
     "buffers of their own; fpdt, upipe-fpdt: copies between host and device overlap attention"},
    {"tokens", "N", IN_TRAIN, in_run, FLAG_WHOLE, AT(tokens), 1, INT32_MAX, "1024", FLAG_DATA,
     "tokens of a sequence, over all ranks; 128k is 128 x 2^10, 5M 5 x 2^20, 1e6 a million"},
    {"tokens", "N", IN_COMPARE, in_run, FLAG_WHOLE, AT(tokens), 1, (double)INT64_MAX, "2048", 0,
     "tokens of a sequence, over all ranks; 128k is 128 x 2^10, 5M 5 x 2^20, 1e6 a million"},
    {"tokens", "N", IN_PLAN, in_run, FLAG_WHOLE, AT(tokens), 1, INT32_MAX, NULL, 0,
     "tokens of a sequence, over all ranks; 128k is 128 x 2^10, 5M 5 x 2^20, 1e6 a million"},
    {"batch", "N", IN_TRAIN | IN_PLAN, in_run, FLAG_WHOLE, AT(batch), 1, INT32_MAX, "1", FLAG_DATA,
     "sequences of a micro-batch, of which a step has --accumulate"},
    {"accumulate", "N", IN_TRAIN | IN_PLAN, in_run, FLAG_WHOLE, AT(accumulate), 1, 1 << 20, "1", FLAG_DATA,
     "micro-batches of a step, whose gradients are summed: a step has batch * accumulate * replicas sequences and the memory of batch"},
    {"batch", "N", IN_COMPARE, in_run, FLAG_WHOLE, AT(batch), 1, (double)INT64_MAX, "1", 0, "sequences"},

    /* the model, or the block */
    {"layers", "N", IN_TRAIN, in_model, FLAG_INT, AT(layers), 1, LLAMA_LAYERS_MAX, "4", FLAG_MODEL, "layers"},
    {"layers", "N", IN_COMPARE, in_model, FLAG_INT, AT(layers), 1, LLAMA_LAYERS_MAX, "1", 0,
     "of the model: a rank keeps the inputs of the other N - 1 for a backward"},
    {"model-dim", "N", IN_TRAIN, in_model, FLAG_WHOLE, AT(model_dim), 1, LLAMA_DIM_MAX, "256", FLAG_MODEL,
     "elements of a token"},
    {"model-dim", "N", IN_COMPARE, in_model, FLAG_WHOLE, AT(model_dim), 1, INT32_MAX, NULL, 0,
     "elements of a token (heads * head-dim)"},
    {"heads", "N", IN_TRAIN, in_model, FLAG_INT, AT(heads), 1, LLAMA_DIM_MAX, "8", FLAG_MODEL, "query heads"},
    {"heads", "N", IN_COMPARE, in_model, FLAG_INT, AT(heads), 1, INT32_MAX, "16", 0, "query heads"},
    {"kv-heads", "N", IN_TRAIN, in_model, FLAG_INT, AT(kv_heads), 1, LLAMA_DIM_MAX, "4", FLAG_MODEL, "key/value heads"},
    {"kv-heads", "N", IN_COMPARE, in_model, FLAG_INT, AT(kv_heads), 1, INT32_MAX, NULL, 0,
     "key/value heads (as many as query heads)"},
    {"head-dim", "N", IN_TRAIN, in_model, FLAG_INT, AT(head_dim), 1, LLAMA_DIM_MAX, NULL, FLAG_MODEL,
     "elements of a head: 32 to 256 in steps of 8 (model-dim / heads, rounded up)"},
    {"head-dim", "N", IN_COMPARE, in_model, FLAG_INT, AT(head_dim), 1, INT32_MAX, "64", 0,
     "elements of a head: 32 to 256 in steps of 8"},
    {"v-dim", "N", IN_COMPARE, in_model, FLAG_INT, AT(v_dim), 1, INT32_MAX, NULL, 0,
     "elements of a head of V and of the result (head-dim)"},
    {"ff-dim", "N", IN_TRAIN, in_model, FLAG_WHOLE, AT(ff_dim), 1, LLAMA_DIM_MAX, NULL, FLAG_MODEL,
     "width of the MLP (8/3 model-dim, rounded up to a multiple of 64)"},
    {"vocab", "N", IN_TRAIN, in_model, FLAG_WHOLE, AT(vocab), 256, INT32_MAX, "256", FLAG_MODEL,
     "rows of the embedding, at least 256: a token is a byte"},
    {"untied", NULL, IN_TRAIN, in_model, FLAG_SWITCH, AT(untied), 0, 1, NULL, FLAG_MODEL,
     "the head is a matrix of its own, not the embedding"},
    {"qk-norm", NULL, IN_TRAIN, in_model, FLAG_SWITCH, AT(qk_norm), 0, 1, NULL, FLAG_MODEL,
     "RMS norm of every head of Q and K, as in Qwen3"},
    {"attention-bias", "none|qkv|qkvo", IN_TRAIN, in_model, FLAG_CHOICE, AT(attention_bias), 0, 0, "none", FLAG_MODEL,
     "qkv: of Q, K and V, as in Qwen2; qkvo: of the output projection too"},
    {"rope-theta", "X", IN_TRAIN | IN_LOGITS, in_model, FLAG_REAL, AT(rope_theta), 1, 1e12, "10000", FLAG_MODEL,
     "base of the rotary position embedding; this and the three below may say otherwise than the folder of --load"},
    {"rope-type", "default|linear|dynamic|llama3|yarn|longrope", IN_TRAIN | IN_LOGITS, in_model, FLAG_CHOICE, AT(rope_type), 0, 0,
     "default", FLAG_MODEL,
     "how the rates of RoPE come from theta. dynamic and longrope go by the sequence's tokens; longrope is a folder's alone"},
    {"rope-factor", "X", IN_TRAIN | IN_LOGITS, in_model, FLAG_REAL, AT(rope_factor), 1, 1e6, NULL, FLAG_MODEL | FLAG_NULL,
     "of the rope-type: by which positions are more than --rope-original"},
    {"rope-original", "N", IN_TRAIN | IN_LOGITS, in_model, FLAG_WHOLE, AT(rope_original), 1, INT32_MAX, NULL, FLAG_MODEL | FLAG_NULL,
     "of dynamic, llama3 and yarn: tokens of the longest sequence that the model was trained on before"},
    {"rope", NULL, IN_COMPARE, in_model, FLAG_SWITCH, AT(rope), 0, 1, NULL, 0, "rotary position embedding, rotate-half"},
    {"rope-theta", "X", IN_COMPARE, in_model, FLAG_REAL, AT(rope_theta), 1, 1e12, "10000", 0, "base of --rope"},
    {"rope-type", "default|linear|dynamic|llama3|yarn", IN_COMPARE, in_model, FLAG_CHOICE, AT(rope_type), 0, 0, "default", 0,
     "how the rates of --rope come from theta. dynamic goes by --tokens"},
    {"rope-factor", "X", IN_COMPARE, in_model, FLAG_REAL, AT(rope_factor), 1, 1e6, NULL, FLAG_NULL,
     "of the rope-type: by which positions are more than --rope-original"},
    {"rope-original", "N", IN_COMPARE, in_model, FLAG_WHOLE, AT(rope_original), 1, INT32_MAX, NULL, FLAG_NULL,
     "of dynamic, llama3 and yarn: tokens of the longest sequence before"},
    {"norm-eps", "X", IN_TRAIN, in_model, FLAG_REAL, AT(norm_eps), 1e-12, 1, "1e-5", FLAG_MODEL,
     "added to a mean square before its root"},
    {"window", "N", IN_TRAIN, in_model, FLAG_WHOLE, AT(window), 0, INT32_MAX, "0", FLAG_MODEL,
     "tokens that a token sees, its own included, as in Mistral; 0: all"},

    /* what a token sees */
    {"full", NULL, IN_COMPARE, in_mask, FLAG_SWITCH, AT(full), 0, 1, NULL, 0,
     "every token sees all; otherwise causal"},
    {"window", "N", IN_COMPARE, in_mask, FLAG_WHOLE, AT(window), 1, (double)INT64_MAX, NULL, FLAG_NULL,
     "a token at position p sees no position below p - N + 1"},
    {"cu-seqlens", "LIST", IN_COMPARE, in_mask, FLAG_LENGTHS, AT(cu_seqlens), 0, 0, NULL, 0,
     "packed sequences: their lengths, as 100,28,..., together batch * tokens; or one number: so many packed "
     "sequences of random lengths. A token sees its own one alone"},
    {"softcap", "X", IN_COMPARE, in_mask, FLAG_REAL, AT(softcap), 1e-3, 1e6, NULL, FLAG_NULL,
     "scores become X * tanh(score / X)"},
    {"sinks", NULL, IN_COMPARE, in_mask, FLAG_SWITCH, AT(sinks), 0, 1, NULL, 0,
     "one more score a head, random, whose value is 0"},

    /* the training */
    {"data", "FILE", IN_TRAIN, in_training, FLAG_TEXT, AT(data), 0, 0, NULL, FLAG_READ | FLAG_TRAINING,
     "the text, at least tokens + 1 bytes (the book in examples/data)"},
    {"tokens-file", "FILE|@LIST", IN_TRAIN, in_training, FLAG_TEXT, AT(tokens_file), 0, 0, NULL, FLAG_READ | FLAG_TRAINING,
     "token ids in place of --data: .npy, llm.c's .bin, Megatron's .bin with its .idx, or raw; LIST has a path a line "
     "(docs/data.md)"},
    {"token-type", "auto|u8|u16|u32|i32|i64", IN_TRAIN, in_training, FLAG_CHOICE, AT(token_type), 0, 0, "auto", FLAG_TRAINING,
     "of the ids of raw files; the other ones say it themselves"},
    {"end-token", "ID", IN_TRAIN, in_training, FLAG_TEXT, AT(end_token), 0, 0, NULL, FLAG_TRAINING,
     "documents end with this token, whatever an .idx says"},
    {"documents", "apart|joined", IN_TRAIN, in_training, FLAG_CHOICE, AT(documents), 0, 0, "apart", FLAG_TRAINING,
     "where an .idx or --end-token says what they are: apart: a token sees its own alone; joined: they are one text"},
    {"shuffle", "windows|documents", IN_TRAIN, in_training, FLAG_CHOICE, AT(shuffle), 0, 0, "windows", FLAG_TRAINING,
     "what has another order in each epoch: the sequences that the files are cut into, or the documents before that"},
    {"loss-mask", "FILE|@LIST", IN_TRAIN, in_training, FLAG_TEXT, AT(loss_mask), 0, 0, NULL, FLAG_READ | FLAG_TRAINING,
     "a number for each token, of the same formats or raw u8: 0 where it is no target"},
    {"eval", "FILE|@LIST", IN_TRAIN, in_training, FLAG_TEXT, AT(eval), 0, 0, NULL, FLAG_READ | FLAG_TRAINING,
     "a text, or with --tokens-file files of tokens, of which nothing is learnt: its loss and perplexity after the last step"},
    {"eval-mask", "FILE|@LIST", IN_TRAIN, in_training, FLAG_TEXT, AT(eval_mask), 0, 0, NULL, FLAG_READ | FLAG_TRAINING,
     "what --loss-mask is, for the tokens of --eval"},
    {"eval-every", "N", IN_TRAIN, in_training, FLAG_WHOLE, AT(eval_every), 0, INT32_MAX, "0", FLAG_TRAINING,
     "steps between evaluations; 0: one after the last step"},
    {"train", "PATTERN,...", IN_TRAIN | IN_PLAN, in_training, FLAG_TEXT, AT(train), 0, 0, NULL, FLAG_DATA,
     "tensors that are trained, by name or by patterns with * and ?; the others are frozen: they have neither gradients nor "
     "states of the optimizer (all)"},
    {"lora", "R[:ALPHA[:LIST]]", IN_TRAIN | IN_PLAN, in_training, FLAG_TEXT, AT(lora), 0, 0, NULL, FLAG_DATA,
     "adapters of rank R are trained, and nothing else: ALPHA / R * B * A is added to the matrices of LIST, of q, k, v, o, "
     "gate, up and down (8:q,v)"},
    {"steps", "N", IN_TRAIN, in_training, FLAG_WHOLE, AT(steps), 0, INT32_MAX, "100", FLAG_SCHEDULE | FLAG_TRAINING,
     "of the whole training, those before a resume included; 0: --save exports the first weights, --eval evaluates them"},
    {"lr", "X", IN_TRAIN, in_training, FLAG_REAL, AT(lr), 0, 1000, "1e-3", FLAG_SCHEDULE | FLAG_TRAINING,
     "learning rate after the warmup"},
    {"min-lr", "X", IN_TRAIN, in_training, FLAG_REAL, AT(min_lr), 0, 1000, NULL, FLAG_SCHEDULE | FLAG_TRAINING,
     "learning rate at the end of the schedule (lr / 10)"},
    {"warmup", "N", IN_TRAIN, in_training, FLAG_WHOLE, AT(warmup), 0, INT32_MAX, NULL, FLAG_SCHEDULE | FLAG_TRAINING,
     "steps in which the learning rate rises (steps / 10, at least 1)"},
    {"schedule", "cosine|linear|constant|wsd", IN_TRAIN, in_training, FLAG_CHOICE, AT(schedule), 0, SCHEDULES - 1, "cosine",
     FLAG_SCHEDULE | FLAG_TRAINING,
     "of the learning rate after the warmup: along a cosine or a line to --min-lr, constant, or wsd: constant, then along a "
     "line in the last --decay steps"},
    {"decay", "N", IN_TRAIN, in_training, FLAG_WHOLE, AT(decay), 0, INT32_MAX, NULL, FLAG_SCHEDULE | FLAG_TRAINING,
     "steps at the end of wsd in which the learning rate falls to --min-lr (steps / 10, at least 1)"},
    {"weight-decay", "X", IN_TRAIN, in_training, FLAG_REAL, AT(weight_decay), 0, 1000, "0.1", FLAG_SCHEDULE | FLAG_TRAINING,
     "of the matrices; norm weights and biases have none"},
    {"beta1", "X", IN_TRAIN, in_training, FLAG_REAL, AT(beta1), 0, 0.99999, "0.9", FLAG_SCHEDULE | FLAG_TRAINING,
     "of AdamW: decay of the mean of gradients"},
    {"beta2", "X", IN_TRAIN, in_training, FLAG_REAL, AT(beta2), 0, 0.99999, "0.95", FLAG_SCHEDULE | FLAG_TRAINING,
     "of AdamW: decay of the mean of their squares"},
    {"adam-eps", "X", IN_TRAIN, in_training, FLAG_REAL, AT(adam_eps), 1e-20, 1, "1e-8", FLAG_SCHEDULE | FLAG_TRAINING,
     "of AdamW: added to the root of that mean"},
    {"clip", "X", IN_TRAIN, in_training, FLAG_REAL, AT(clip), 0, 1e30, "1", FLAG_SCHEDULE | FLAG_TRAINING,
     "largest norm of the gradient; 0: any"},
    {"seed", "N", IN_TRAIN, in_training, FLAG_WHOLE, AT(seed), 0, (double)INT64_MAX, "1", FLAG_DATA | FLAG_TRAINING,
     "of the first weights, the order of the text and the sample"},
    {"plan", NULL, IN_TRAIN, in_training, FLAG_SWITCH, AT(plan), 0, 1, NULL, 0,
     "print the memory by component and what a token adds to it; train nothing"},

    /* where, and what is held */
    {"dtype", "f32|bf16", IN_TRAIN | IN_COMPARE | IN_LOGITS, in_memory, FLAG_CHOICE, AT(dtype), 0, 0, "f32", FLAG_DATA,
     "storage of activations and weights"},
    {"dtype", "f32|bf16", IN_PLAN, in_memory, FLAG_CHOICE, AT(dtype), 0, 0, "bf16", 0,
     "storage of activations and weights"},
    {"device", "cpu|cuda", IN_TRAIN | IN_COMPARE | IN_LOGITS, in_memory, FLAG_CHOICE, AT(device), 0, 0, "cpu", 0,
     "where the ranks compute; cuda: a GPU that a process's ranks share"},
    {"avoid", "none|fwd90|bwd90|both", IN_TRAIN | IN_COMPARE, in_memory, FLAG_CHOICE, AT(avoid), 0, 0, "none", FLAG_TRAINING,
     "kernels of attention for GPUs of capability 9.0, forward or backward, that those for 8.0 stand in for"},
    {"device", "cpu|cuda", IN_PLAN, in_memory, FLAG_CHOICE, AT(device), 0, 0, NULL, 0,
     "whose kernels' scratch is counted (cuda where the machine has GPUs)"},
    {"activations", "KIND", IN_TRAIN, in_memory, FLAG_ACTIVATIONS, AT(activations), 0, 0, "ac", 0,
     "what is kept of each layer, see below"},
    {"activations", "KIND", IN_PLAN, in_memory, FLAG_ACTIVATIONS, AT(activations), 0, 0, "offload", 0,
     "what is kept of each layer, see below"},
    {"offload", NULL, IN_TRAIN, in_memory, FLAG_SWITCH, AT(offload), 0, 1, NULL, 0, "--activations offload"},
    {"offload", NULL, IN_COMPARE, in_memory, FLAG_SWITCH, AT(offload), 0, 1, NULL, 0,
     "layers' inputs are offloaded to the host, as always in fpdt and upipe-fpdt"},
    {"zero", "STAGE", IN_TRAIN, in_memory, FLAG_INT, AT(zero), 0, 3, "1", 0,
     "sharded over the ranks: 0 nothing, 1 optimizer, 2 gradients too, 3 weights too"},
    {"zero", "STAGE", IN_PLAN, in_memory, FLAG_INT, AT(zero), 0, 3, "3", 0,
     "sharded over the ranks: 0 nothing, 1 optimizer, 2 gradients too, 3 weights too"},
    {"zero-prefetch", NULL, IN_TRAIN | IN_PLAN, in_memory, FLAG_SWITCH, AT(zero_prefetch), 0, 1, NULL, 0,
     "with --zero 3: the weights of the next half a layer are gathered while one computes"},
    {"reduce-dtype", "f32|bf16", IN_TRAIN | IN_PLAN, in_memory, FLAG_CHOICE, AT(reduce_dtype), 0, 0, "f32", 0,
     "in which gradients of matrices are sent to be summed; sums are f32"},
    {"offload-optimizer", NULL, IN_TRAIN | IN_PLAN, in_memory, FLAG_SWITCH, AT(offload_optimizer), 0, 1, NULL, 0,
     "the optimizer's states of matrices, and with --zero 2 or 3 their gradients, are in a second pool, the host's memory, "
     "where its CPU updates them"},
    {"offload-weights", NULL, IN_TRAIN | IN_PLAN, in_memory, FLAG_SWITCH, AT(offload_weights), 0, 1, NULL, 0,
     "with --zero 3 and --offload-optimizer: the weights of matrices are there too, and each half a layer is gathered from "
     "there"},
    {"tile-bytes", "SIZE", IN_TRAIN | IN_PLAN, in_memory, FLAG_BYTES, AT(tile_bytes), 1, (double)(INT64_MAX / 2), NULL, 0,
     "limit of a tile of MLP or loss with its unit (64KiB; 64 tokens or more), without product scratch (the paper's "
     "square, about model-dim tokens; of logits on a GPU 800MiB)"},
    {"seed", "N", IN_COMPARE, in_memory, FLAG_WHOLE, AT(seed), 0, (double)INT64_MAX, "1", 0,
     "of all that is random: embedding table, weights, gradient of the result"},
    {"check", "auto|on|off", IN_COMPARE, in_memory, FLAG_CHOICE, AT(check), 0, 0, "auto", 0,
     "compare with a reference in f64; auto: up to 2048 tokens"},

    /* the planner */
    {"as", "upipe|paper|torchtitan|deepspeed-alst|trl|megatron", IN_PLAN, in_planning, FLAG_CHOICE, AT(as.program), 0, 0,
     "upipe", 0,
     "who trains: this library, planned to the byte, or another program, by the tensors that it is known to hold; how far "
     "that is off what others measured, a line of the plan says"},
    {"attention", "machine|fa2|fa3|fa4|cudnn|upipe", IN_PLAN, in_planning, FLAG_CHOICE, AT(attention), 0, 0, NULL, 0,
     "whose attention kernel sets the time: published rates by card, head dim and length; machine: the machine's own rates "
     "(machine; with --as what that program uses)"},
    {"loss", "whole|tiled", IN_PLAN, in_planning, FLAG_CHOICE, AT(as.loss), 0, 0, NULL, 0,
     "with --as: whether all logits exist at once (tiled where the program can)"},
    {"mlp", "whole|tiled", IN_PLAN, in_planning, FLAG_CHOICE, AT(as.mlp), 0, 0, NULL, 0,
     "with --as: whether the MLP goes through all tokens at once (tiled where the program can)"},
    {"keep-all", NULL, IN_PLAN, in_planning, FLAG_SWITCH, AT(as.all), 0, 1, NULL, 0,
     "with --as: no layer is computed twice, and all of its forward stays on the GPU"},
    {"fp8", NULL, IN_PLAN, in_planning, FLAG_SWITCH, AT(as.fp8), 0, 1, NULL, 0, "with --as: products of the layers are in fp8"},
    {"documents", "FILE|lognormal:MEDIAN,SIGMA,MOST", IN_PLAN, in_planning, FLAG_TEXT, AT(lengths), 0, 0, NULL, 0,
     "sequences are packed with documents: lengths from a file, or drawn, as in lognormal:2k,1.5,128k; attention counts what "
     "they see, and how evenly the ranks of a ring share it is shown"},
    {"max-tokens", NULL, IN_PLAN, in_planning, FLAG_SWITCH, AT(max_tokens), 0, 1, NULL, 0,
     "the longest sequence that fits, instead of --tokens; with --best of every setting"},
    {"best", NULL, IN_PLAN, in_planning, FLAG_SWITCH, AT(best), 0, 1, NULL, 0,
     "all methods, chunks, segments, rings, activations and overlaps, and where the memory of the GPU ends also "
     "--offload-optimizer and --offload-weights: what fits, the fastest first, and which are the "
     "fastest of their memory"},

    /* files */
    {"load", "DIR", IN_LOGITS, in_files, FLAG_TEXT, AT(load), 0, 0, NULL, FLAG_READ,
     "folder with config.json and model.safetensors (or its index and parts)"},
    {"ids", "FILE|@LIST", IN_LOGITS, in_files, FLAG_TEXT, AT(ids), 0, 0, NULL, FLAG_READ,
     "tokens: a file of a format of --tokens-file that says the type of its ids, such as .npy"},
    {"out", "FILE", IN_LOGITS, in_files, FLAG_TEXT, AT(out), 0, 0, NULL, 0,
     "where the logits go: a .npy file, float32 [tokens][vocabulary]"},
    {"data", "FILE", IN_COMPARE, in_files, FLAG_TEXT, AT(data), 0, 0, NULL, FLAG_READ,
     "the text, at least batch * tokens bytes (the book in examples/data)"},
    {"json", "FILE", IN_TRAIN | IN_COMPARE | IN_PLAN, in_files, FLAG_TEXT, AT(json), 0, 0, NULL, 0,
     "write the numbers, settings included; of upipe-plan examples/plan/plot_plan.py draws them"},
    {"log", "FILE", IN_TRAIN, in_files, FLAG_TEXT, AT(log), 0, 0, NULL, FLAG_TRAINING,
     "write a line of JSON a step, when it ends: step, loss, norm, rate, tokens/s, seconds by phase, peak bytes; --resume "
     "appends"},
    {"trace", "FILE", IN_TRAIN, in_files, FLAG_TEXT, AT(trace), 0, 0, NULL, FLAG_TRAINING,
     "write the traces of the ranks' pools up to the first step, for Perfetto"},
    {"trace", "DIR", IN_COMPARE, in_files, FLAG_TEXT, AT(trace), 0, 0, NULL, 0,
     "write the pools' traces: DIR/METHOD.json, for Perfetto or chrome://tracing"},
    {"dump", "DIR", IN_COMPARE, in_files, FLAG_TEXT, AT(dump), 0, 0, NULL, 0,
     "write inputs and results as NumPy files: DIR/METHOD/x.npy wq wk wv out dout dx dwq dwk dwv, and with --sinks "
     "sinks dsinks"},
    {"save", "DIR", IN_TRAIN, in_files, FLAG_TEXT, AT(save), 0, 0, NULL, FLAG_TRAINING,
     "write checkpoints with the weights as Hugging Face has them; missing folders are made"},
    {"save-every", "N", IN_TRAIN, in_files, FLAG_WHOLE, AT(save_every), 0, INT32_MAX, "0", FLAG_TRAINING,
     "steps between checkpoints; 0: one at the end"},
    {"keep", "N", IN_TRAIN, in_files, FLAG_INT, AT(keep), 0, 1000000, "1", FLAG_TRAINING,
     "checkpoints that stay; 0: all"},
    {"resume", "DIR", IN_TRAIN, in_files, FLAG_TEXT, AT(resume), 0, 0, NULL, FLAG_READ,
     "continue from a checkpoint: its model, data, seed, tokens, batch, accumulate and dtype, and its schedule unless a flag says "
     "otherwise; bit for bit on as many ranks"},
    {"load", "DIR", IN_TRAIN, in_files, FLAG_TEXT, AT(load), 0, 0, NULL, FLAG_READ,
     "start from the weights of a Hugging Face folder, whose config.json says what the model is"},
    {"load-adapter", "DIR", IN_TRAIN, in_files, FLAG_TEXT, AT(load_adapter), 0, 0, NULL, FLAG_READ,
     "train this adapter of the model of --load, in PEFT's format, in place of a new one: its config says what --lora would"},
    {"load-adapter", "DIR", IN_LOGITS, in_files, FLAG_TEXT, AT(load_adapter), 0, 0, NULL, FLAG_READ,
     "an adapter of the model in PEFT's format, merged into its matrices as they are read"},
    {"merge", NULL, IN_TRAIN, in_files, FLAG_SWITCH, AT(merge), 0, 1, NULL, 0,
     "merge --load-adapter into the weights as they are read, and train, or with --steps 0 save, a model without it"},
    {"save-adapter", "DIR", IN_TRAIN, in_files, FLAG_TEXT, AT(save_adapter), 0, 0, NULL, FLAG_TRAINING,
     "write the trained adapter in PEFT's format when the training ends, to a folder that is not there yet"},
    {"ignore-key", "NAME", IN_TRAIN | IN_LOGITS | IN_PLAN, in_files, FLAG_TEXTS, AT(ignore_key), 0, 0, NULL, 0,
     "read the model's config.json as if it had no key of this name, as rope_scaling.KEY one in that object; such a key is "
     "refused otherwise; may come 16 times"},
    {"calibrate", "FILE", IN_PLAN, in_files, FLAG_TEXTS, AT(calibrate), 0, 0, NULL, 0,
     "rates from numbers of bench/run.sh attn, gemm, ops or all: this machine's; may come 16 times"},
    {"write-machine", "FILE", IN_PLAN, in_files, FLAG_TEXT, AT(write_machine), 0, 0, NULL, 0,
     "write the machine, every rate with its origin, as --machine reads it"},

    /* the sample */
    {"sample", "N", IN_TRAIN, in_sample, FLAG_WHOLE, AT(sample), 0, 1 << 20, "200", FLAG_TRAINING, "bytes; 0: none"},
    {"prompt", "TEXT", IN_TRAIN, in_sample, FLAG_TEXT, AT(prompt), 0, 0, "In the beginning ", FLAG_TRAINING,
     "its last 256 bytes count, at most --tokens"},
    {"temperature", "X", IN_TRAIN, in_sample, FLAG_REAL, AT(temperature), 0, 1000, "0.8", FLAG_TRAINING,
     "0 samples the likeliest byte"},
    {"stop-token", "ID", IN_TRAIN, in_sample, FLAG_TEXT, AT(stop_token), 0, 0, NULL, FLAG_TRAINING,
     "a token, or a byte's number, that ends the text and is not written"},

    /* processes, and the rest */
    {"transport", "threads|mpi|nccl|tcp", IN_TRAIN | IN_COMPARE | IN_LOGITS, in_processes, FLAG_CHOICE, AT(transport), 0, 0,
     "threads", 0,
     "threads of this process; mpi: the processes of mpirun or srun; nccl: those of torchrun, srun or mpirun, with a "
     "GPU each; tcp: the same on CPUs, without a library"},
    {"node-ranks", "N", IN_TRAIN | IN_COMPARE | IN_LOGITS, in_processes, FLAG_INT, AT(node_ranks), 1, 1 << 20, NULL, FLAG_NULL,
     "processes of a machine, neighbours in the launcher's order (what the machine says)"},
    {"deadline", "SECONDS", IN_TRAIN | IN_COMPARE | IN_LOGITS, in_processes, FLAG_SECONDS, AT(deadline), 0, 1e6, "600", FLAG_TRAINING,
     "how long a rank waits for another one before it aborts"},
    {"progress", NULL, IN_TRAIN | IN_COMPARE | IN_PLAN, in_rest, FLAG_SWITCH, AT(progress), 0, 1, NULL, FLAG_FREE | FLAG_TRAINING,
     "say on stderr what is being done, terminal or not; ranks may differ in it"},
    {"help", NULL, IN_TRAIN | IN_COMPARE | IN_LOGITS | IN_PLAN, in_rest, FLAG_HELP, 0, 0, 0, NULL, FLAG_FREE,
     "this text"},
    {"version", NULL, IN_TRAIN | IN_COMPARE | IN_LOGITS | IN_PLAN, in_rest, FLAG_VERSION, 0, 0, 0, NULL, FLAG_FREE,
     "the version"},

    /* a checkpoint's or a model's, which no flag says */
    {"pad-token-id", NULL, IN_CHECKPOINT, in_model, FLAG_WHOLE, 0, -(double)INT32_MAX, INT32_MAX, NULL, 0,
     "the token whose row of the embedding gets no gradient; below 0: from the end"},
    {"model-type", NULL, IN_CHECKPOINT, in_model, FLAG_WHOLE, 0, 0, 100, NULL, 0, "row of the table of families"},
    {"layer-types", NULL, IN_CHECKPOINT, in_model, FLAG_TEXT, 0, 0, 0, NULL, 0, "window, RoPE and kind of each layer"},
    {"linear-heads", NULL, IN_CHECKPOINT, in_model, FLAG_WHOLE, 0, 1, LLAMA_DIM_MAX, NULL, 0, "of linear attention"},
    {"linear-key-heads", NULL, IN_CHECKPOINT, in_model, FLAG_WHOLE, 0, 1, LLAMA_DIM_MAX, NULL, 0, "of its q and k"},
    {"linear-key-dim", NULL, IN_CHECKPOINT, in_model, FLAG_WHOLE, 0, 1, 256, NULL, 0, "of a head of these"},
    {"linear-value-dim", NULL, IN_CHECKPOINT, in_model, FLAG_WHOLE, 0, 1, 256, NULL, 0, "of a head of its v"},
    {"linear-taps", NULL, IN_CHECKPOINT, in_model, FLAG_WHOLE, 0, 2, 8, NULL, 0, "rows of its convolution"},
    {"q-rank", NULL, IN_CHECKPOINT, in_model, FLAG_WHOLE, 0, 1, LLAMA_DIM_MAX, NULL, 0, "of what Q is made of, with a latent"},
    {"kv-rank", NULL, IN_CHECKPOINT, in_model, FLAG_WHOLE, 0, 1, LLAMA_DIM_MAX, NULL, 0, "of the latent of K and V"},
    {"still-dim", NULL, IN_CHECKPOINT, in_model, FLAG_INT, 0, 1, 256, NULL, 0, "of a head with a latent, without RoPE"},
    {"turned-dim", NULL, IN_CHECKPOINT, in_model, FLAG_INT, 0, 1, 256, NULL, 0, "of a head with a latent, with RoPE"},
    {"v-head-dim", NULL, IN_CHECKPOINT, in_model, FLAG_INT, 0, 1, 256, NULL, 0, "of a head of V, with a latent"},
    {"rope-pairs", NULL, IN_CHECKPOINT, in_model, FLAG_SWITCH, 0, 0, 1, NULL, 0, "with a latent, RoPE turns neighbours together"},
    {"scale-depth", NULL, IN_CHECKPOINT, in_model, FLAG_REAL, 0, 1e-6, 1e6, NULL, 0, "of both halves' results, times the root of layers"},
    {"dim-base", NULL, IN_CHECKPOINT, in_model, FLAG_WHOLE, 0, 1, LLAMA_DIM_MAX, NULL, 0, "by model-dim over it logits are divided"},
    {"embedding-multiplier", NULL, IN_CHECKPOINT, in_model, FLAG_REAL, 0, 1e-6, 1e6, NULL, 0, "of what the embedding gives"},
    {"residual-multiplier", NULL, IN_CHECKPOINT, in_model, FLAG_REAL, 0, 1e-6, 1e6, NULL, 0, "of attention's and the MLP's results"},
    {"attention-multiplier", NULL, IN_CHECKPOINT, in_model, FLAG_REAL, 0, 1e-6, 1e6, NULL, 0, "of the scores"},
    {"logits-scaling", NULL, IN_CHECKPOINT, in_model, FLAG_REAL, 0, 1e-6, 1e6, NULL, 0, "by which logits are divided"},
    {"query-pre-attn-scalar", NULL, IN_CHECKPOINT, in_model, FLAG_WHOLE, 0, 1, 1 << 20, NULL, 0, "by whose root scores are divided"},
    {"attention-softcap", NULL, IN_CHECKPOINT, in_model, FLAG_REAL, 0, 1e-3, 1e6, NULL, 0, "of scores"},
    {"logit-softcap", NULL, IN_CHECKPOINT, in_model, FLAG_REAL, 0, 1e-3, 1e6, NULL, 0, "of logits"},
    {"rope-local", NULL, IN_CHECKPOINT, in_model, FLAG_REAL, 0, 1, 1e12, NULL, 0, "theta of layers with a window"},
    {"rope-positions", NULL, IN_CHECKPOINT, in_model, FLAG_WHOLE, 0, 1, INT32_MAX, NULL, 0, "max_position_embeddings"},
    {"rope-partial", NULL, IN_CHECKPOINT, in_model, FLAG_REAL, 0, 1e-3, 1, NULL, 0, "the part of a head that turns"},
    {"rope-low", NULL, IN_CHECKPOINT, in_model, FLAG_REAL, 0, 1e-6, 1e6, NULL, 0, "turns within those, of llama3"},
    {"rope-high", NULL, IN_CHECKPOINT, in_model, FLAG_REAL, 0, 1e-6, 1e6, NULL, 0, "turns within those, of llama3"},
    {"rope-beta-fast", NULL, IN_CHECKPOINT, in_model, FLAG_REAL, 0, 1e-6, 1e6, NULL, 0, "turns, of yarn"},
    {"rope-beta-slow", NULL, IN_CHECKPOINT, in_model, FLAG_REAL, 0, 1e-6, 1e6, NULL, 0, "turns, of yarn"},
    {"rope-mscale", NULL, IN_CHECKPOINT, in_model, FLAG_REAL, 0, 0, 1e6, NULL, 0, "of yarn's factor"},
    {"rope-mscale-all", NULL, IN_CHECKPOINT, in_model, FLAG_REAL, 0, 0, 1e6, NULL, 0, "of yarn's factor"},
    {"rope-untruncated", NULL, IN_CHECKPOINT, in_model, FLAG_SWITCH, 0, 0, 1, NULL, 0, "yarn's borders as they are"},
    {"rope-attention", NULL, IN_CHECKPOINT, in_model, FLAG_REAL, 0, 1e-6, 1e6, NULL, 0, "the factor of what turns"},
    {"rope-short", NULL, IN_CHECKPOINT, in_model, FLAG_REAL, 0, 1e-6, 1e9, NULL, 0, "longrope's of each pair"},
    {"rope-long", NULL, IN_CHECKPOINT, in_model, FLAG_REAL, 0, 1e-6, 1e9, NULL, 0, "longrope's of each pair"},
    {"step", NULL, IN_CHECKPOINT, in_run, FLAG_WHOLE, 0, 0, INT32_MAX, NULL, 0, "steps done"},
    {"text-bytes", NULL, IN_CHECKPOINT, in_run, FLAG_WHOLE, 0, 2, (double)INT64_MAX, NULL, 0, "of the text"},
    {"format-version", NULL, IN_CHECKPOINT, in_run, FLAG_WHOLE, 0, 1, INT32_MAX, NULL, 0, "of the checkpoint"}};
/* clang-format on */

#undef AT

enum { FLAG_ROWS = sizeof flag_rows / sizeof *flag_rows };

/* The row of this name, of one of these programs; NULL if there is none. */
static inline const flag_row *flag_find(int programs, const char *name)
{
    int i = 0;
    while (i < FLAG_ROWS && !((flag_rows[i].programs & programs) && flag_same_name(flag_rows[i].name, name)))
        ++i;
    return i < FLAG_ROWS ? &flag_rows[i] : NULL;
}

/* What a number of a training or its checkpoint may be, whether a flag says it or a file. */
static inline const flag_row *flag_limits(const char *name)
{
    const flag_row *row = flag_find(IN_TRAIN | IN_CHECKPOINT, name);
    assert(row != NULL);
    return row;
}

/* The row of this program whose flag says the member. */
static inline int options_row(const options *o, const void *member)
{
    const size_t at = (size_t)((const char *)member - (const char *)o);
    int i = 0;
    while (i < FLAG_ROWS &&
           !((flag_rows[i].programs & o->program) && flag_rows[i].at == at && flag_rows[i].kind < FLAG_HELP))
        ++i;
    assert(i < FLAG_ROWS);
    return i;
}

/* How often its flag came. */
static inline int options_given(const options *o, const void *member)
{
    return o->given[options_row(o, member)];
}

#endif

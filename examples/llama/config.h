/* config.h -- a Llama: its numbers, its tensors by Hugging Face's names, the state of one rank, config.json
 *
 *     upipe_err err;
 *     llama_config config;
 *     llama_layout layout;
 *     if (llama_config_read(&config, &dtype, "model/config.json", &err)) fail(err.text);
 *     if (llama_layout_init(&layout, &config)) fail("too large");
 *     const llama_tensor *q = llama_find(&layout, LLAMA_WQ, 3);       layer 3's q_proj: weights + q->at
 *
 * The tensors lie in two groups, each one flat array: weights (matrices, of the storage type; embed, then wq
 * wk wv wo gate up down of every layer, then the head unless it is the embedding) and vectors (f32; norm1, q_norm
 * and k_norm, the biases bq bk bv bo, norm2 of every layer, then the last norm; what the model has of these).
 *
 * Read are LlamaForCausalLM, MistralForCausalLM, and without a window Qwen2ForCausalLM and Qwen3ForCausalLM. Keys that do not
 * change the computation are passed over; those that do, and are not built here, are refused. Functions
 * return 0, or fill *err and return -1. Links with jansson (-ljansson); needs POSIX.
 */
#ifndef LLAMA_CONFIG_H
#define LLAMA_CONFIG_H

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <unistd.h>

#include "../../upipe/upipe_zero.h"
#include "../common/regular.h"
#include "json_load.h"
#include "limits.h"

enum { LLAMA_CONFIG_BYTES_MAX = 1 << 20 /* of a config.json */ };

/* Which of attention's projections have a bias. */
typedef enum llama_bias { LLAMA_BIAS_NONE, LLAMA_BIAS_QKV, LLAMA_BIAS_QKVO } llama_bias;

static const char *const llama_bias_names[] = {"none", "qkv", "qkvo"};

typedef struct llama_config {
    int64_t layers, dim, hidden, vocab; /* hidden = the MLP's width F */
    int heads, kv_heads, head_dim;
    int tied, qk_norm; /* tied: the head is the embedding table; qk_norm: Qwen3's q_norm and k_norm */
    llama_bias attention_bias;
    double rope_theta, norm_eps;
    int64_t window; /* a token sees so many, its own included; 0 = all up to it */
} llama_config;

typedef enum llama_kind {
    LLAMA_EMBED,
    LLAMA_NORM1,
    LLAMA_WQ,
    LLAMA_WK,
    LLAMA_WV,
    LLAMA_WO,
    LLAMA_QNORM,
    LLAMA_KNORM,
    LLAMA_BQ,
    LLAMA_BK,
    LLAMA_BV,
    LLAMA_BO,
    LLAMA_NORM2,
    LLAMA_GATE,
    LLAMA_UP,
    LLAMA_DOWN,
    LLAMA_NORM,
    LLAMA_HEAD,
    LLAMA_KINDS
} llama_kind;

/* Groups of tensors. */
enum { LLAMA_WEIGHTS, LLAMA_VECTORS, LLAMA_GROUPS };

typedef struct llama_tensor {
    char name[80];      /* Hugging Face's: model.layers.3.self_attn.q_proj.weight, or .bias */
    int64_t rows, cols; /* a vector is [rows], cols = 1 */
    int is_vector;      /* which group: weights (matrices, storage type) or vectors (f32) */
    int64_t at, n;      /* first element in its group, elements */
    int64_t layer;      /* -1 outside layers */
    llama_kind kind;
    int unit; /* of the weights group; -1 for a vector */
} llama_tensor;

typedef struct llama_layout {
    llama_config config;
    llama_tensor *tensors; /* [n]: the weights group in its order, then the vectors */
    int n;
    int64_t weights, vectors; /* elements of both groups */
    /* The weights group in units that are used together: the embedding, the attention half and the MLP half of each
     * layer, the head where it is not tied. Unit u is elements first[u] .. first[u + 1] - 1. */
    int64_t *first;
    int units;
    int64_t vectors_first[2]; /* the vectors are one unit */
    int place[LLAMA_KINDS];   /* the tensor of layer 0, or outside layers; -1 = the model has none */
    int step[LLAMA_GROUPS];   /* tensors from a layer to the next */
} llama_layout;

/* The state of one rank; the arrays lie in the rank's pool. zero says which elements of its group an array has: weights
 * and gradients are zero's own, the optimizer's are upipe_zero_part_of(zero, UPIPE_ZERO_STATES, unit). */
typedef struct llama_state {
    const llama_layout *layout;
    upipe_zero zero[LLAMA_GROUPS];
    float *master;                            /* f32 weights, of the weights group; NULL if these are f32 */
    float *m[LLAMA_GROUPS], *v[LLAMA_GROUPS]; /* AdamW moments */
} llama_state;

/* ---- layout ---- */

static int llama_is_bias(llama_kind kind)
{
    return kind >= LLAMA_BQ && kind <= LLAMA_BO;
}

static int llama_is_vector(llama_kind kind)
{
    return llama_is_bias(kind) || kind == LLAMA_NORM1 || kind == LLAMA_QNORM || kind == LLAMA_KNORM ||
           kind == LLAMA_NORM2 || kind == LLAMA_NORM;
}

static int llama_add(llama_layout *l, llama_kind kind, int64_t layer, const char *part, int64_t rows,
                     int64_t cols)
{
    llama_tensor *t = &l->tensors[l->n];
    int64_t *group;
    t->is_vector = llama_is_vector(kind);
    group = t->is_vector ? &l->vectors : &l->weights;
    t->kind = kind;
    t->layer = layer;
    t->rows = rows;
    t->cols = cols;
    t->at = *group;
    if (layer < 0)
        snprintf(t->name, sizeof t->name, "%s.weight", part);
    else
        snprintf(t->name, sizeof t->name, "model.layers.%" PRId64 ".%s.%s", layer, part,
                 llama_is_bias(kind) ? "bias" : "weight");
    if (layer <= 0) l->place[kind] = l->n;
    if (layer == 0) ++l->step[t->is_vector];
    /* bytes too are to stay within 63 bits */
    if (!upipe_mul(&t->n, rows, cols) || t->n > INT64_MAX / 16 - *group) return -1;
    t->unit = -1;
    if (!t->is_vector) {
        if (kind == LLAMA_EMBED || kind == LLAMA_WQ || kind == LLAMA_GATE || kind == LLAMA_HEAD)
            l->first[l->units++] = t->at;
        t->unit = l->units - 1;
        l->first[l->units] = t->at + t->n;
    }
    *group += t->n;
    ++l->n;
    return 0;
}

static int llama_add_all(llama_layout *l)
{
    const llama_config *c = &l->config;
    int64_t q = (int64_t)c->heads * c->head_dim, kv = (int64_t)c->kv_heads * c->head_dim, i;
    if (llama_add(l, LLAMA_EMBED, -1, "model.embed_tokens", c->vocab, c->dim)) return -1;
    for (i = 0; i < c->layers; ++i)
        if (llama_add(l, LLAMA_WQ, i, "self_attn.q_proj", q, c->dim) ||
            llama_add(l, LLAMA_WK, i, "self_attn.k_proj", kv, c->dim) ||
            llama_add(l, LLAMA_WV, i, "self_attn.v_proj", kv, c->dim) ||
            llama_add(l, LLAMA_WO, i, "self_attn.o_proj", c->dim, q) ||
            llama_add(l, LLAMA_GATE, i, "mlp.gate_proj", c->hidden, c->dim) ||
            llama_add(l, LLAMA_UP, i, "mlp.up_proj", c->hidden, c->dim) ||
            llama_add(l, LLAMA_DOWN, i, "mlp.down_proj", c->dim, c->hidden))
            return -1;
    if (!c->tied && llama_add(l, LLAMA_HEAD, -1, "lm_head", c->vocab, c->dim)) return -1;
    for (i = 0; i < c->layers; ++i) {
        if (llama_add(l, LLAMA_NORM1, i, "input_layernorm", c->dim, 1)) return -1;
        if (c->qk_norm && (llama_add(l, LLAMA_QNORM, i, "self_attn.q_norm", c->head_dim, 1) ||
                           llama_add(l, LLAMA_KNORM, i, "self_attn.k_norm", c->head_dim, 1)))
            return -1;
        if (c->attention_bias != LLAMA_BIAS_NONE && (llama_add(l, LLAMA_BQ, i, "self_attn.q_proj", q, 1) ||
                                                     llama_add(l, LLAMA_BK, i, "self_attn.k_proj", kv, 1) ||
                                                     llama_add(l, LLAMA_BV, i, "self_attn.v_proj", kv, 1)))
            return -1;
        if (c->attention_bias == LLAMA_BIAS_QKVO && llama_add(l, LLAMA_BO, i, "self_attn.o_proj", c->dim, 1))
            return -1;
        if (llama_add(l, LLAMA_NORM2, i, "post_attention_layernorm", c->dim, 1)) return -1;
    }
    return llama_add(l, LLAMA_NORM, -1, "model.norm", c->dim, 1);
}

static void llama_layout_free(llama_layout *l)
{
    free(l->tensors);
    free(l->first);
    memset(l, 0, sizeof *l);
}

/* llama_layout_init -- names, shapes and places of all tensors
 *
 * Returns -1 where a size is not positive, there are more than LLAMA_LAYERS_MAX layers, the bytes leave 63
 * bits, or there is no memory for the table. Then nothing is to be freed.
 */
__attribute__((unused)) static int llama_layout_init(llama_layout *l, const llama_config *c)
{
    int kind;
    memset(l, 0, sizeof *l);
    for (kind = 0; kind < LLAMA_KINDS; ++kind) l->place[kind] = -1;
    if (c->layers < 1 || c->layers > LLAMA_LAYERS_MAX || c->dim < 1 || c->hidden < 1 || c->vocab < 1 ||
        c->heads < 1 || c->kv_heads < 1 || c->head_dim < 1)
        return -1;
    l->config = *c;
    l->vectors_first[0] = 0;
    l->tensors = (llama_tensor *)calloc((size_t)c->layers * 15 + 3, sizeof *l->tensors);
    l->first = (int64_t *)calloc((size_t)c->layers * 2 + 3, sizeof *l->first);
    if (l->tensors != NULL && l->first != NULL && llama_add_all(l) == 0) {
        l->vectors_first[1] = l->vectors;
        return 0;
    }
    llama_layout_free(l);
    return -1;
}

/* The tensor of this kind, layer -1 outside layers; NULL if the model has none. */
__attribute__((unused)) static const llama_tensor *llama_find(const llama_layout *l, llama_kind kind,
                                                              int64_t layer)
{
    const llama_tensor *first = l->place[kind] < 0 ? NULL : &l->tensors[l->place[kind]];
    if (first == NULL || (layer < 0) != (first->layer < 0) || layer < -1 || layer >= l->config.layers)
        return NULL;
    return layer < 0 ? first : first + layer * l->step[first->is_vector];
}

/* llama_state_init -- which elements a rank's arrays have, by the stage of ZeRO; the arrays are the caller's
 *
 * Vectors are few: neither they nor their gradients are sharded.
 */
__attribute__((unused)) static void llama_state_init(llama_state *s, const llama_layout *l, upipe_dtype dtype,
                                                     int stage, int rank, int ranks)
{
    int group;
    memset(s, 0, sizeof *s);
    s->layout = l;
    for (group = 0; group < LLAMA_GROUPS; ++group) {
        upipe_zero *z = &s->zero[group];
        z->rank = rank;
        z->ranks = ranks;
        z->stage = group == LLAMA_WEIGHTS || stage == 0 ? stage : 1;
        z->dtype = group == LLAMA_WEIGHTS ? dtype : UPIPE_F32;
        z->first = group == LLAMA_WEIGHTS ? l->first : l->vectors_first;
        z->units = group == LLAMA_WEIGHTS ? l->units : 1;
    }
}

/* The storage type of the weights group. */
__attribute__((unused)) static upipe_dtype llama_state_dtype(const llama_state *s)
{
    return s->zero[LLAMA_WEIGHTS].dtype;
}

/* ---- config.json, reading ---- */

__attribute__((format(printf, 3, 4))) static int llama_config_fail(upipe_err *err, const char *path,
                                                                   const char *format, ...)
{
    char text[176];
    size_t length = strlen(path);
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    /* the end of a long path says more than its start */
    upipe_fail(err, UPIPE_ERR_ARG, "%s: %s", length > 76 ? path + length - 76 : path, text);
    return -1;
}

/* A whole number from 1 to what the flag may say at most; absent or null is `otherwise`, or refused if that is 0. */
static int llama_config_count(int64_t *out, const json_t *root, const char *key, const char *flag,
                              int64_t otherwise, const char *path, upipe_err *err)
{
    const json_t *j = json_object_get(root, key);
    const int64_t most = limit_whole_of(flag)->most;
    if (j == NULL || json_is_null(j)) {
        if (otherwise == 0) return llama_config_fail(err, path, "%s is missing", key);
        *out = otherwise;
        return 0;
    }
    if (!json_is_integer(j)) return llama_config_fail(err, path, "%s is not an integer", key);
    *out = json_integer_value(j);
    if (*out < 1 || *out > most)
        return llama_config_fail(err, path, "%s is %" PRId64 ", not in 1 .. %" PRId64, key, *out, most);
    return 0;
}

/* A number that the flag may say; absent or null leaves *out as it is. */
static int llama_config_real(double *out, const json_t *root, const char *key, const char *flag,
                             const char *path, upipe_err *err)
{
    const json_t *j = json_object_get(root, key);
    const limit_real *l = limit_real_of(flag);
    if (j == NULL || json_is_null(j)) return 0;
    if (!json_is_number(j)) return llama_config_fail(err, path, "%s is not a number", key);
    *out = json_number_value(j);
    if (!(*out >= l->least && *out <= l->most))
        return llama_config_fail(err, path, "%s is %g, not in %g .. %g", key, *out, l->least, l->most);
    return 0;
}

/* true or false; absent or null is 0. */
static int llama_config_flag(int *out, const json_t *root, const char *key, const char *path, upipe_err *err)
{
    const json_t *j = json_object_get(root, key);
    if (j != NULL && !json_is_null(j) && !json_is_boolean(j))
        return llama_config_fail(err, path, "%s is neither true nor false", key);
    *out = json_is_true(j);
    return 0;
}

/* What must not be there, or have no effect: a flag that is set, a number other than `neutral`. */
static int llama_config_neutral(const json_t *root, const char *key, double neutral, const char *path,
                                upipe_err *err)
{
    const json_t *j = json_object_get(root, key);
    if (j == NULL || json_is_null(j) || json_is_false(j)) return 0;
    if (json_is_number(j) && json_number_value(j) == neutral) return 0;
    if (json_is_number(j))
        return llama_config_fail(err, path, "%s is %g; only %g is built", key, json_number_value(j), neutral);
    return llama_config_fail(err, path, "%s is set, and not built", key);
}

/* rope_scaling and its successor rope_parameters: an object, of type default, the same for all layers. */
static int llama_config_rope(llama_config *c, const json_t *root, const char *key, const char *path,
                             upipe_err *err)
{
    static const char *const known[] = {"rope_type", "type", "rope_theta", "partial_rotary_factor"};
    const json_t *j = json_object_get(root, key), *type;
    const char *name;
    json_t *value;
    size_t i;
    if (j == NULL || json_is_null(j)) return 0;
    if (!json_is_object(j)) return llama_config_fail(err, path, "%s is neither null nor an object", key);
    for (i = 0; i < 2; ++i) {
        type = json_object_get(j, known[i]);
        if (type == NULL) continue;
        if (!json_is_string(type) || strcmp(json_string_value(type), "default") != 0)
            return llama_config_fail(err, path, "%s has %s %.40s; only default is built", key, known[i],
                                     json_is_string(type) ? json_string_value(type) : "that is no string");
    }
    json_object_foreach((json_t *)(uintptr_t)j, name, value)
    {
        for (i = 0; i < sizeof known / sizeof *known && strcmp(known[i], name) != 0; ++i) {
        }
        if (i == sizeof known / sizeof *known && !json_is_null(value))
            return llama_config_fail(err, path, "%s has %.40s, which is not built", key, name);
    }
    if (llama_config_neutral(j, "partial_rotary_factor", 1, path, err)) return -1;
    return llama_config_real(&c->rope_theta, j, "rope_theta", "rope-theta", path, err);
}

enum { LLAMA_IS_LLAMA, LLAMA_IS_MISTRAL, LLAMA_IS_QWEN2, LLAMA_IS_QWEN3, LLAMA_MODELS };

static const char *const llama_models[LLAMA_MODELS][2] = {{"llama", "LlamaForCausalLM"},
                                                          {"mistral", "MistralForCausalLM"},
                                                          {"qwen2", "Qwen2ForCausalLM"},
                                                          {"qwen3", "Qwen3ForCausalLM"}};

/* Which of llama_models; -1 with a sentence. */
static int llama_config_model(const json_t *root, const char *path, upipe_err *err)
{
    const json_t *type = json_object_get(root, "model_type"), *all = json_object_get(root, "architectures");
    const json_t *one = json_array_size(all) == 1 ? json_array_get(all, 0) : NULL;
    int i;
    if (type != NULL && !json_is_string(type))
        return llama_config_fail(err, path, "model_type is not a string");
    if (all != NULL && !json_is_null(all) && !json_is_string(one))
        return llama_config_fail(err, path, "architectures is not a list of one name");
    if (type == NULL && one == NULL)
        return llama_config_fail(err, path, "neither model_type nor architectures says what model this is");
    for (i = 0; i < LLAMA_MODELS; ++i) {
        if (type != NULL && strcmp(json_string_value(type), llama_models[i][0]) != 0) continue;
        if (one != NULL && strcmp(json_string_value(one), llama_models[i][1]) != 0) continue;
        return i;
    }
    return llama_config_fail(err, path, "model_type %.40s with the architecture %.40s is not built",
                             type != NULL ? json_string_value(type) : "(none)",
                             one != NULL ? json_string_value(one) : "(none)");
}

/* Everything that would change what is computed and is not built. */
static int llama_config_unbuilt(const json_t *root, const char *path, upipe_err *err)
{
    const json_t *act = json_object_get(root, "hidden_act");
    const json_t *layers = json_object_get(root, "layer_types"), *one;
    const json_t *causal = json_object_get(root, "is_causal");
    size_t i;
    if (act != NULL && (!json_is_string(act) || strcmp(json_string_value(act), "silu") != 0))
        return llama_config_fail(err, path, "hidden_act is %.40s; only silu is built",
                                 json_is_string(act) ? json_string_value(act) : "no string");
    if (llama_config_neutral(root, "mlp_bias", 0, path, err) ||
        llama_config_neutral(root, "use_sliding_window", 0, path, err) ||
        llama_config_neutral(root, "attention_dropout", 0, path, err) ||
        llama_config_neutral(root, "partial_rotary_factor", 1, path, err) ||
        llama_config_neutral(root, "quantization_config", 0, path, err) ||
        llama_config_neutral(root, "auto_map", 0, path, err)) /* code of its own */
        return -1;
    if (causal != NULL && !json_is_null(causal) && !json_is_true(causal))
        return llama_config_fail(err, path, "is_causal is not true; only causal attention is built");
    if (layers != NULL && !json_is_null(layers) && !json_is_array(layers))
        return llama_config_fail(err, path, "layer_types is not a list");
    for (i = 0; i < json_array_size(layers); ++i) {
        one = json_array_get(layers, i);
        if (!json_is_string(one) || strcmp(json_string_value(one), "full_attention") != 0)
            return llama_config_fail(err, path, "layer %zu of layer_types is not full_attention", i);
    }
    return 0;
}

/* Qwen2's Q, K and V have biases, whatever the key says, Mistral's have none; in Llama and Qwen3 the key is of O's bias
 * too. (transformers 5.23, the modeling files of these four) */
static int llama_config_bias(llama_config *c, const json_t *root, int model, const char *path, upipe_err *err)
{
    int all = 0;
    c->attention_bias = LLAMA_BIAS_QKV;
    if (model == LLAMA_IS_QWEN2) return 0;
    if (model == LLAMA_IS_MISTRAL && llama_config_neutral(root, "attention_bias", 0, path, err)) return -1;
    if (model != LLAMA_IS_MISTRAL && llama_config_flag(&all, root, "attention_bias", path, err)) return -1;
    c->attention_bias = all ? LLAMA_BIAS_QKVO : LLAMA_BIAS_NONE;
    return 0;
}

static int llama_config_numbers(llama_config *c, const json_t *root, int model, const char *path,
                                upipe_err *err)
{
    int64_t heads, kv_heads, head_dim, dim, queries;
    llama_layout layout;
    if (llama_config_count(&c->dim, root, "hidden_size", "model-dim", 0, path, err) ||
        llama_config_count(&c->hidden, root, "intermediate_size", "ff-dim", 0, path, err) ||
        llama_config_count(&c->layers, root, "num_hidden_layers", "layers", 0, path, err) ||
        llama_config_count(&c->vocab, root, "vocab_size", "vocab", 0, path, err) ||
        llama_config_count(&heads, root, "num_attention_heads", "heads", 0, path, err))
        return -1;
    /* the other models have defaults of their own where Llama's follow from the rest: not guessed */
    dim = c->dim % heads == 0 && model != LLAMA_IS_QWEN3 ? c->dim / heads : 0;
    if (llama_config_count(&kv_heads, root, "num_key_value_heads", "kv-heads",
                           model == LLAMA_IS_LLAMA ? heads : 0, path, err) ||
        llama_config_count(&head_dim, root, "head_dim", "head-dim", dim, path, err))
        return -1;
    if (heads % kv_heads != 0)
        return llama_config_fail(
            err, path, "%" PRId64 " heads do not divide among %" PRId64 " key/value heads", heads, kv_heads);
    if (head_dim % 2 != 0)
        return llama_config_fail(err, path, "head_dim is %" PRId64 ", and odd: it has no rotary pairs",
                                 head_dim);
    if (!upipe_mul(&queries, heads, head_dim) || queries > INT32_MAX)
        return llama_config_fail(err, path, "%" PRId64 " heads of %" PRId64 " are more than %d", heads,
                                 head_dim, INT32_MAX);
    /* a Mistral without the key has this one; Llama has none, Qwen only with use_sliding_window */
    if (model == LLAMA_IS_MISTRAL && !json_is_null(json_object_get(root, "sliding_window")) &&
        llama_config_count(&c->window, root, "sliding_window", "window", 4096, path, err))
        return -1;
    c->heads = (int)heads;
    c->kv_heads = (int)kv_heads;
    c->head_dim = (int)head_dim;
    c->qk_norm = model == LLAMA_IS_QWEN3;
    if (llama_config_bias(c, root, model, path, err)) return -1;
    if (llama_config_real(&c->norm_eps, root, "rms_norm_eps", "norm-eps", path, err) ||
        llama_config_real(&c->rope_theta, root, "rope_theta", "rope-theta", path, err) ||
        llama_config_rope(c, root, "rope_scaling", path, err) ||
        llama_config_rope(c, root, "rope_parameters", path, err) ||
        llama_config_flag(&c->tied, root, "tie_word_embeddings", path, err))
        return -1;
    if (llama_layout_init(&layout, c) != 0)
        return llama_config_fail(err, path, "the model's bytes leave 63 bits, or memory is out");
    llama_layout_free(&layout);
    return 0;
}

/* The bytes of a whole small file, with a 0 behind them; free() it. NULL with a sentence. */
static char *llama_file(const char *path, size_t most, size_t *bytes, upipe_err *err)
{
    const char *why = NULL;
    int64_t size = 0;
    FILE *f = regular_open(path, &size, &why);
    char *text = NULL, *more;
    size_t n = 0, buf = 0, got;
    errno = 0;
    while (f != NULL && n <= most) {
        if (n == buf) {
            more = (char *)realloc(text, buf * 2 + 4097);
            if (more == NULL) break;
            text = more;
            buf = buf * 2 + 4096;
        }
        got = fread(text + n, 1, buf - n, f);
        n += got;
        if (got == 0) break;
    }
    if (f == NULL || ferror(f))
        llama_config_fail(err, path, "cannot be read: %s", f == NULL ? why : strerror(errno));
    else if (n > most)
        llama_config_fail(err, path, "is longer than %zu bytes", most);
    else if (text == NULL || !feof(f))
        llama_config_fail(err, path, "memory is out");
    else {
        fclose(f);
        text[n] = 0;
        *bytes = n;
        return text;
    }
    if (f != NULL) fclose(f);
    free(text);
    return NULL;
}

/* llama_config_read -- fills *c from a config.json; every number is within its range afterwards
 *
 *   dtype   which storage type the file names: bf16 for bfloat16, else f32; NULL = not wanted
 */
__attribute__((unused)) static int llama_config_read(llama_config *c, upipe_dtype *dtype, const char *path,
                                                     upipe_err *err)
{
    char why[JSON_LOAD_WHY];
    json_t *root;
    const json_t *type;
    size_t bytes;
    int model, bad;
    char *text = llama_file(path, LLAMA_CONFIG_BYTES_MAX, &bytes, err);
    if (text == NULL) return -1;
    root = json_load(text, bytes, why);
    free(text);
    if (root == NULL) return llama_config_fail(err, path, "%s", why);
    memset(c, 0, sizeof *c);
    c->norm_eps = 1e-6;
    c->rope_theta = 10000;
    model = json_is_object(root) ? llama_config_model(root, path, err)
                                 : llama_config_fail(err, path, "is not a JSON object");
    bad =
        model < 0 || llama_config_unbuilt(root, path, err) || llama_config_numbers(c, root, model, path, err);
    type = json_object_get(root, "torch_dtype");
    if (type == NULL) type = json_object_get(root, "dtype");
    if (dtype != NULL)
        *dtype =
            json_is_string(type) && strcmp(json_string_value(type), "bfloat16") == 0 ? UPIPE_BF16 : UPIPE_F32;
    json_decref(root);
    return bad ? -1 : 0;
}

/* ---- config.json, writing ---- */

/* Decimals that give x back, with a point or an exponent: Python is to read a float. */
static void llama_config_decimals(char out[40], double x)
{
    int digits;
    for (digits = 15; digits <= 17; ++digits) {
        snprintf(out, 32, "%.*g", digits, x);
        if (strtod(out, NULL) == x) break;
    }
    if (strpbrk(out, ".e") == NULL) strcat(out, ".0");
}

/* The one of llama_models that has this window, QK norm and biases; -1: none has them together. */
static int llama_config_like(const llama_config *c)
{
    const int model = c->attention_bias == LLAMA_BIAS_QKV ? LLAMA_IS_QWEN2
                      : c->window > 0                     ? LLAMA_IS_MISTRAL
                      : c->qk_norm                        ? LLAMA_IS_QWEN3
                                                          : LLAMA_IS_LLAMA;
    if ((c->window > 0 && model != LLAMA_IS_MISTRAL) || (c->qk_norm && model != LLAMA_IS_QWEN3)) return -1;
    return model == LLAMA_IS_MISTRAL && c->attention_bias != LLAMA_BIAS_NONE ? -1 : model;
}

/* llama_config_write -- makes a config.json that llama_config_read and Hugging Face read; synced to the disk
 *
 *   c           one of llama_models: llama_config_like
 *   positions   tokens of the longest sequence the model has seen: max_position_embeddings
 *   path        must not exist
 */
__attribute__((unused)) static int llama_config_write(const llama_config *c, upipe_dtype dtype,
                                                      int64_t positions, const char *path, upipe_err *err)
{
    const int model = llama_config_like(c);
    char eps[40], theta[40];
    int bad;
    FILE *f;
    if (model < 0)
        return llama_config_fail(err, path, "no model has this window, QK norm and attention bias together");
    f = fopen(path, "wx");
    if (f == NULL) return llama_config_fail(err, path, "cannot be made: %s", strerror(errno));
    llama_config_decimals(eps, c->norm_eps);
    llama_config_decimals(theta, c->rope_theta);
    fprintf(f, "{\n  \"architectures\": [\"%s\"],\n  \"model_type\": \"%s\",\n", llama_models[model][1],
            llama_models[model][0]);
    fprintf(f, "  \"hidden_size\": %" PRId64 ",\n  \"intermediate_size\": %" PRId64 ",\n", c->dim, c->hidden);
    fprintf(f, "  \"num_hidden_layers\": %" PRId64 ",\n  \"num_attention_heads\": %d,\n", c->layers,
            c->heads);
    fprintf(f, "  \"num_key_value_heads\": %d,\n  \"head_dim\": %d,\n", c->kv_heads, c->head_dim);
    fprintf(f, "  \"vocab_size\": %" PRId64 ",\n  \"max_position_embeddings\": %" PRId64 ",\n", c->vocab,
            positions);
    fprintf(f, "  \"rms_norm_eps\": %s,\n  \"rope_theta\": %s,\n  \"rope_scaling\": null,\n", eps, theta);
    if (c->window > 0) fprintf(f, "  \"sliding_window\": %" PRId64 ",\n", c->window);
    if (model == LLAMA_IS_QWEN2)
        fprintf(f, "  \"use_sliding_window\": false,\n");
    else
        fprintf(f, "  \"attention_bias\": %s,\n", c->attention_bias == LLAMA_BIAS_QKVO ? "true" : "false");
    fprintf(f, "  \"hidden_act\": \"silu\",\n  \"mlp_bias\": false,\n");
    fprintf(f, "  \"attention_dropout\": 0.0,\n  \"bos_token_id\": null,\n  \"eos_token_id\": null,\n");
    fprintf(f, "  \"tie_word_embeddings\": %s,\n", c->tied ? "true" : "false");
    fprintf(f, "  \"torch_dtype\": \"%s\"\n}\n", dtype == UPIPE_BF16 ? "bfloat16" : "float32");
    bad = fflush(f) != 0 || fsync(fileno(f)) != 0;
    if (bad) llama_config_fail(err, path, "cannot be written: %s", strerror(errno));
    if (fclose(f) != 0 && !bad) bad = llama_config_fail(err, path, "cannot be written: %s", strerror(errno));
    return bad ? -1 : 0;
}

#endif

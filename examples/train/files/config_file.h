/* config_file.h -- config.json of a Llama, and of what its family does otherwise: read
 *
 *     upipe_err err;
 *     llama_config config;
 *     if (llama_config_read(&config, &dtype, "model/config.json", &ignored, &err)) fail(err.text);
 *
 * Every key is used, is known to change nothing (families.h), or is refused by its name. Functions return 0, or fill
 * *err and return -1. Links with jansson (-ljansson); needs POSIX.
 */
#ifndef LLAMA_CONFIG_FILE_H
#define LLAMA_CONFIG_FILE_H

#include <unistd.h>

#include "../model/families.h"
#include "../model/layout.h"
#include "config_latent.h"
#include "whole_file.h"

enum { LLAMA_CONFIG_BYTES_MAX = 1 << 20 /* of a config.json */ };

/* ---- RoPE ---- */

/* rope_parameters of a family with two RoPEs: that of layers with a window is theta alone, the other one stays in *j. */
static inline int llama_config_rope_two(llama_config *c, const json_t **j, const char *path, upipe_err *err)
{
    const json_t *full = json_object_get(*j, "full_attention"),
                 *slides = json_object_get(*j, "sliding_attention");
    const json_t *type = json_object_get(slides, "rope_type");
    const char *name;
    json_t *value;
    json_object_foreach((json_t *)(uintptr_t)*j, name, value)
    {
        if (!llama_is_word(" full_attention sliding_attention ", name) ||
            !(json_is_object(value) || json_is_null(value)))
            return llama_config_fail(
                err, path, "rope_parameters has %.40s, which is no object for a type of layers", name);
    }
    if (type != NULL && !(json_is_string(type) && strcmp(json_string_value(type), "default") == 0))
        return llama_config_fail(
            err, path, "rope_parameters of sliding_attention has rope_type %.40s; only default is built",
            json_is_string(type) ? json_string_value(type) : "that is no string");
    *j = json_is_null(full) ? NULL : full;
    return llama_config_real(&c->rope_local, slides, "rope_theta", "rope-local", path, err);
}

/* rope_scaling or its successor rope_parameters, which says the same in one file; NULL in *out: neither says
 * anything. */
static inline int llama_config_rope_object(llama_config *c, const json_t **out, const char **key,
                                           const json_t *root, const llama_family *family, const char *path,
                                           upipe_err *err)
{
    static const char *const keys[] = {"rope_scaling", "rope_parameters"};
    int i;
    *out = NULL;
    for (i = 0; i < 2; ++i) {
        const json_t *j = json_object_get(root, keys[i]);
        if (j == NULL || json_is_null(j)) continue;
        if (!json_is_object(j))
            return llama_config_fail(err, path, "%s is neither null nor an object", keys[i]);
        if (i == 1 && family->local > 0 && llama_config_rope_two(c, &j, path, err)) return -1;
        if (json_object_size(j) == 0) continue;
        if (*out != NULL && !json_equal(*out, j))
            return llama_config_fail(err, path, "%s and %s say different things", keys[0], keys[1]);
        *out = j;
        *key = keys[i];
    }
    return 0;
}

static inline int llama_config_rope_type(llama_config *c, const json_t *j, const char *key,
                                         const llama_family *family, const char *path, upipe_err *err)
{
    const json_t *type = json_object_get(j, "rope_type");
    const char *word = type != NULL ? "rope_type" : "type", *name;
    if (type == NULL) type = json_object_get(j, "type");
    if (type == NULL) return 0;
    name = json_is_string(type) ? json_string_value(type) : "that is no string";
    if (family->ropes != 0 && llama_is_word(" su yarn ", name)) name = "longrope"; /* Phi-3's names of it */
    while (c->rope_type < LLAMA_ROPES && strcmp(llama_rope_names[c->rope_type], name) != 0) ++c->rope_type;
    if (c->rope_type < LLAMA_ROPES && (family->ropes == 0 || family->ropes >> c->rope_type & 1)) return 0;
    if (c->rope_type < LLAMA_ROPES)
        return llama_config_fail(err, path, "%s has %s %.40s, which no %s has", key, word, name,
                                 family->type);
    return llama_config_fail(err, path,
                             "%s has %s %.40s; default, linear, dynamic, llama3, yarn and longrope are known",
                             key, word, name);
}

/* A list of numbers, one for each pair that turns. */
static inline int llama_config_rope_list(double *out, const json_t *j, const field *f, int pairs,
                                         const char *path, upipe_err *err)
{
    int i;
    if (!json_is_array(j) || json_array_size(j) != (size_t)pairs || pairs > f->many)
        return llama_config_fail(err, path, "%s is no list of %d numbers, one for each pair", f->key, pairs);
    for (i = 0; i < pairs; ++i)
        if (llama_config_number(&out[i], json_array_get(j, (size_t)i), f->key, f->flag, path, err)) return -1;
    return 0;
}

static inline int llama_config_rope_field(llama_config *c, const json_t *j, const field *f, const char *key,
                                          const char *path, upipe_err *err)
{
    void *at = (char *)c + f->at;
    const json_t *value = json_object_get(j, f->key);
    int on = 0;
    if (value == NULL || json_is_null(value)) {
        if (!(f->needed >> c->rope_type & 1)) return 0;
        return llama_config_fail(err, path, "%s of the type %s has no %s", key,
                                 llama_rope_names[c->rope_type], f->key);
    }
    if (f->many > 0) return llama_config_rope_list((double *)at, value, f, llama_rope_dims(c) / 2, path, err);
    if (f->kind == FLAG_REAL) return llama_config_real((double *)at, j, f->key, f->flag, path, err);
    if (f->kind == FLAG_WHOLE) return llama_config_count((int64_t *)at, j, f->key, f->flag, 1, path, err);
    if (llama_config_flag(&on, j, f->key, path, err)) return -1;
    *(int *)at = on ^ f->opposite;
    return 0;
}

/* Numbers that stand beside the object, and what follows from them. */
static inline int llama_config_rope_rest(llama_config *c, const json_t *root, const llama_family *family,
                                         const char *path, upipe_err *err)
{
    int64_t positions = 0;
    if (c->rope_type == LLAMA_ROPE_DEFAULT || c->rope_type == LLAMA_ROPE_LINEAR) return 0;
    if (llama_config_count(&positions, root, "max_position_embeddings", "rope-positions", 0, path, err))
        return -1;
    if (c->rope_type == LLAMA_ROPE_DYNAMIC) {
        c->rope_positions = positions;
        return 0;
    }
    if (family->original > 0) c->rope_original = family->original;
    if (c->rope_original == 0) c->rope_original = positions;
    if (llama_config_count(&c->rope_original, root, "original_max_position_embeddings", "rope-original",
                           c->rope_original, path, err))
        return -1;
    if (c->rope_factor == 0) c->rope_positions = positions;
    if (c->rope_type == LLAMA_ROPE_LLAMA3 && c->rope_high <= c->rope_low)
        return llama_config_fail(err, path, "high_freq_factor %g is not above low_freq_factor %g",
                                 c->rope_high, c->rope_low);
    if ((c->rope_beta_fast > 0 ? c->rope_beta_fast : 32) < (c->rope_beta_slow > 0 ? c->rope_beta_slow : 1))
        return llama_config_fail(err, path, "beta_fast is below beta_slow");
    return 0;
}

static inline int llama_config_rope(llama_config *c, const json_t *root, const llama_family *family,
                                    const char *path, upipe_err *err)
{
    const json_t *j;
    const char *key = NULL;
    const field *f;
    double partial = family->partial > 0 ? family->partial : 1;
    if (llama_config_rope_object(c, &j, &key, root, family, path, err)) return -1;
    if (j == NULL && family->rope_given)
        return llama_config_fail(err, path, "rope_parameters is missing, and a %s has some", family->type);
    if (llama_config_rope_type(c, j, key, family, path, err) ||
        llama_config_real(&c->rope_theta, j, "rope_theta", "rope-theta", path, err) ||
        llama_config_real(&partial, root, "partial_rotary_factor", "rope-partial", path, err) ||
        llama_config_real(&partial, j, "partial_rotary_factor", "rope-partial", path, err))
        return -1;
    if (partial != 1 && family->partial == 0)
        return llama_config_fail(err, path, "partial_rotary_factor is %g; only 1 is built", partial);
    if (partial != 1) c->rope_partial = partial;
    if (llama_rope_dims(c) < 2 || llama_rope_dims(c) % 2 != 0)
        return llama_config_fail(err, path, "partial_rotary_factor %g of a head of %d are %d, no pairs",
                                 partial, c->head_dim, llama_rope_dims(c));
    for (f = llama_fields; f < llama_fields + LLAMA_FIELDS; ++f)
        if (f->used >> c->rope_type & 1 && llama_config_rope_field(c, j, f, key, path, err)) return -1;
    if (c->rope_untruncated &&
        family->local > 0) /* transformers looks for it beside the two RoPEs, and finds none */
        return llama_config_fail(err, path, "truncate is false; only true is built in a %s", family->type);
    return llama_config_rope_rest(c, root, family, path, err);
}

/* ---- what model it is ---- */

/* The row of llama_families that is the text part of this model; -1: of none. */
static inline int llama_config_whole(const json_t *root)
{
    const char *type = json_string_value(json_object_get(root, "model_type"));
    int i;
    for (i = 0; i < LLAMA_FAMILIES; ++i)
        if (type != NULL && llama_families[i].whole != NULL && strcmp(llama_families[i].whole, type) == 0)
            return i;
    return -1;
}

/* *text = the object that describes the text model: all of the file, or the text part of a larger model, which says
 * nothing else of it. */
static inline int llama_config_text(json_t **text, json_t *root, const char *path, upipe_err *err)
{
    static const char *const types[] = {"torch_dtype", "dtype"};
    const int like = llama_config_whole(root);
    json_t *part = json_object_get(root, "text_config");
    const char *type = json_string_value(json_object_get(part, "model_type"));
    int i;
    *text = root;
    if (like < 0) return 0;
    if (type == NULL || strcmp(type, llama_families[like].type) != 0)
        return llama_config_fail(err, path, "text_config is not that of a %s", llama_families[like].type);
    for (i = 0; i < 2; ++i)
        if (json_object_get(part, types[i]) == NULL && json_object_get(root, types[i]) != NULL)
            json_object_set(part, types[i], json_object_get(root, types[i]));
    if (json_is_true(json_object_get(root, "tie_word_embeddings")) !=
        json_is_true(json_object_get(part, "tie_word_embeddings"))) /* absent is false in both */
        return llama_config_fail(err, path,
                                 "tie_word_embeddings and that of text_config say different things");
    *text = part;
    return 0;
}

/* The row of llama_families; -1 with a sentence. A mistral with layer_types is a ministral, as AutoModel has it. */
static inline int llama_config_model(const json_t *root, const char *path, upipe_err *err)
{
    const json_t *type = json_object_get(root, "model_type"), *all = json_object_get(root, "architectures");
    const json_t *one = json_array_size(all) == 1 ? json_array_get(all, 0) : NULL;
    int i;
    if (type == NULL) return llama_config_fail(err, path, "model_type is missing");
    if (!json_is_string(type)) return llama_config_fail(err, path, "model_type is not a string");
    if (all != NULL && !json_is_null(all) && !json_is_string(one))
        return llama_config_fail(err, path, "architectures is not a list of one name");
    for (i = 0; i < LLAMA_FAMILIES; ++i) {
        if (strcmp(json_string_value(type), llama_families[i].type) != 0) continue;
        if (one != NULL && strcmp(json_string_value(one), llama_families[i].architecture) != 0) continue;
        return i == LLAMA_IS_MISTRAL && json_object_get(root, "layer_types") != NULL ? LLAMA_IS_MINISTRAL : i;
    }
    return llama_config_fail(err, path,
                             "model_type %.16s (%.28s) is not built; docs/models.md has those that are",
                             json_string_value(type), one != NULL ? json_string_value(one) : "(none)");
}

/* ---- keys that are not known ---- */

/* Their names for one sentence, and how many of them it has no space for. */
typedef struct llama_strangers {
    char names[128];
    int n, more, rope; /* rope: some are RoPE's */
} llama_strangers;

static inline void llama_strangers_add(llama_strangers *s, const char *in, const char *name)
{
    const size_t at = strlen(s->names), most = sizeof s->names - sizeof " and 1000000 more";
    if (s->more > 0 ||
        (size_t)snprintf(s->names + at, most - at, "%s%s%.60s", at > 0 ? ", " : "", in, name) >= most - at) {
        s->names[at] = 0;
        ++s->more;
    }
    ++s->n;
}

/* An object of RoPE's: the keys of its type are known.
 *   in   its name, with a dot behind it */
static inline void llama_strangers_rope(llama_strangers *s, const json_t *j, const char *in, int type,
                                        const llama_family *family)
{
    const char *name;
    json_t *value;
    const field *f;
    json_object_foreach((json_t *)(uintptr_t)j, name, value)
    {
        for (f = llama_fields; f < llama_fields + LLAMA_FIELDS; ++f)
            if (f->used >> type & 1 && f->key != NULL && strcmp(f->key, name) == 0) break;
        if (f < llama_fields + LLAMA_FIELDS || json_is_null(value) ||
            llama_is_word(" rope_type type rope_theta partial_rotary_factor ", name) ||
            (family->rope_idle != NULL && llama_is_word(family->rope_idle, name)))
            continue;
        llama_strangers_add(s, in, name);
        s->rope = 1;
    }
}

/* The objects of RoPE, of which a family with two has each in an object of its own. */
static inline void llama_strangers_ropes(llama_strangers *s, const llama_config *c, const json_t *text,
                                         const llama_family *family)
{
    const json_t *both = json_object_get(text, "rope_parameters");
    llama_strangers_rope(s, json_object_get(text, "rope_scaling"), "rope_scaling.", c->rope_type, family);
    if (family->local == 0) {
        llama_strangers_rope(s, both, "rope_parameters.", c->rope_type, family);
        return;
    }
    llama_strangers_rope(s, json_object_get(both, "full_attention"), "rope_parameters.full_attention.",
                         c->rope_type, family);
    llama_strangers_rope(s, json_object_get(both, "sliding_attention"), "rope_parameters.sliding_attention.",
                         LLAMA_ROPE_DEFAULT, family);
}

/* Every key is known: used, or without effect. All that are not are in one sentence.
 *   root   the file's object; text: that of the text model, perhaps the same */
static inline int llama_config_known(const llama_config *c, json_t *root, json_t *text,
                                     const llama_family *family, const char *path, upipe_err *err)
{
    llama_strangers s;
    const char *name;
    json_t *value;
    size_t n;
    memset(&s, 0, sizeof s);
    json_object_foreach(root, name, value)
    {
        if (text != root && !llama_is_word(llama_keys_whole, name) && !llama_is_word(llama_keys_idle, name))
            llama_strangers_add(&s, "", name);
    }
    json_object_foreach(text, name, value)
    {
        if (!llama_has_key(family, name) && !llama_is_word(llama_keys_idle, name) &&
            !llama_is_word(family->idle, name) && !(json_is_null(value) && strcmp(name, "auto_map") == 0))
            llama_strangers_add(&s, "", name);
    }
    llama_strangers_ropes(&s, c, text, family);
    if (s.n == 0) return 0;
    n = strlen(s.names);
    if (s.more > 0) snprintf(s.names + n, sizeof s.names - n, " and %d more", s.more);
    return llama_config_fail(err, path, "%s %s not known of a %s%s%s; --ignore-key reads on without %s",
                             s.names, s.n > 1 ? "are keys that are" : "is a key that is", family->type,
                             s.rope ? " with RoPE of the type " : "",
                             s.rope ? llama_rope_names[c->rope_type] : "", s.n > 1 ? "each" : "it");
}

/* The activation of the gate is the family's. */
static inline int llama_config_act(const json_t *root, const char *key, const llama_family *family,
                                   const char *path, upipe_err *err)
{
    const json_t *act = json_object_get(root, key);
    const char *words = family->gemma ? " gelu_pytorch_tanh " : " silu swish ";
    if (act == NULL || (json_is_string(act) && llama_is_word(words, json_string_value(act)))) return 0;
    return llama_config_fail(err, path, "%s is %.40s; only %s is built", key,
                             json_is_string(act) ? json_string_value(act) : "no string",
                             family->gemma ? "gelu_pytorch_tanh" : "silu");
}

/* Everything that would change what is computed and is not built; transformers' Gemma 3 passes over its
 * attn_logit_softcapping. */
static inline int llama_config_unbuilt(const json_t *root, const llama_family *family, const char *path,
                                       upipe_err *err)
{
    const json_t *causal = json_object_get(root, "is_causal");
    if (llama_config_act(root, "hidden_act", family, path, err) ||
        llama_config_act(root, "hidden_activation", family, path, err) ||
        llama_config_none(root, "use_bidirectional_attention", path, err) ||
        (family->attention_cap == 0 && llama_config_none(root, "attn_logit_softcapping", path, err)) ||
        llama_config_neutral(root, "mlp_bias", 0, path, err) ||
        llama_config_neutral(root, "attention_dropout", 0, path, err) ||
        llama_config_neutral(root, "residual_dropout", 0, path, err) ||
        llama_config_neutral(root, "resid_pdrop", 0, path, err) ||
        llama_config_neutral(root, "embd_pdrop", 0, path, err) ||
        llama_config_neutral(root, "use_bias", 0, path, err) ||
        llama_config_none(root, "quantization_config", path, err) ||
        llama_config_none(root, "per_layer_config", path, err) ||
        llama_config_none(root, "text_config", path, err) ||
        llama_config_neutral(root, "use_mrope", 0, path, err) ||
        llama_config_neutral(root, "lm_head_bias", 0, path, err) ||
        llama_config_neutral(root, "full_attn_mod", 1, path, err) ||
        llama_config_neutral(root, "interpolate_factor", 1, path, err))
        return -1;
    if (causal != NULL && !json_is_true(causal))
        return llama_config_fail(err, path, "is_causal is not true; only causal attention is built");
    return 0;
}

/* ---- numbers ---- */

static inline int llama_config_bias(llama_config *c, const json_t *root, const llama_family *family,
                                    const char *path, upipe_err *err)
{
    int on = family->bias_absent, out = 0;
    if (family->bias == LLAMA_BIAS_NONE) return llama_config_neutral(root, "attention_bias", 0, path, err);
    if (llama_config_flag(&on, root, "attention_bias", path, err)) return -1;
    c->attention_bias = on || family->bias_always ? family->bias : LLAMA_BIAS_NONE;
    if (!llama_is_word(family->keys, "attention_out_bias")) return 0;
    if (llama_config_flag(&out, root, "attention_out_bias", path, err)) return -1;
    if (out && !on)
        return llama_config_fail(err, path, "attention_out_bias without attention_bias is not built");
    if (out) c->attention_bias = LLAMA_BIAS_QKVO;
    return 0;
}

/* What stands for a count that the file does not have; 0: it must have it. */
static inline int64_t llama_config_otherwise(const llama_config *c, const field *f,
                                             const llama_family *family)
{
    if (f->at == offsetof(llama_config, kv_heads)) return family->kv_heads ? c->heads : 0;
    if (f->at == offsetof(llama_config, query_scalar)) return 256;
    if (f->at == offsetof(llama_config, v_dim))
        return family->latent & LLAMA_LATENT_DEPTH ? c->dim / c->heads : 0;
    if (f->at != offsetof(llama_config, head_dim)) return 0;
    if (family->head_dim != LLAMA_HEAD_DIVIDED) return family->head_dim > 0 ? family->head_dim : 0;
    return c->dim % c->heads == 0 ? c->dim / c->heads : 0;
}

/* Whether null is none of it: 0. */
static inline int llama_config_may_lack(const field *f)
{
    return f->at == offsetof(llama_config, attention_cap) || f->at == offsetof(llama_config, logit_cap) ||
           f->at == offsetof(llama_config, q_rank) || f->at == offsetof(llama_config, scale_depth) ||
           f->at == offsetof(llama_config, dim_base);
}

/* One of the table's numbers. */
static inline int llama_config_field(llama_config *c, const field *f, json_t *root,
                                     const llama_family *family, const char *path, upipe_err *err)
{
    void *at = (char *)c + f->at;
    int64_t count = 0, otherwise;
    int on;
    if (json_is_null(json_object_get(root, f->key)) && llama_config_may_lack(f)) {
        memset(at, 0, field_bytes(f));
        return 0;
    }
    if (f->kind == FLAG_REAL) return llama_config_real((double *)at, root, f->key, f->flag, path, err);
    if (f->kind == FLAG_CHOICE) return llama_config_bias(c, root, family, path, err);
    if (f->kind == FLAG_SWITCH) {
        on = f->at == offsetof(llama_config, tied) ? family->tied : 1;
        if (llama_config_flag(&on, root, f->key, path, err)) return -1;
        *(int *)at = on;
        return 0;
    }
    otherwise = llama_config_otherwise(c, f, family);
    if (json_is_null(json_object_get(root, f->key)) && otherwise > 0 &&
        (f->at == offsetof(llama_config, kv_heads) || family->head_dim == LLAMA_HEAD_DIVIDED))
        json_object_del(root, f->key);
    if (llama_config_count(&count, root, f->key, f->flag, otherwise, path, err)) return -1;
    field_set(f->kind, at, count);
    return 0;
}

/* pad_token_id, which counts from the end where it is below 0. */
static inline int llama_config_pad(llama_config *c, const json_t *root, const llama_family *family,
                                   const char *path, upipe_err *err)
{
    const json_t *j = json_object_get(root, "pad_token_id");
    int64_t id = family->pad - 1;
    if (json_is_null(j) || (j == NULL && id < 0)) return 0;
    if (j != NULL && llama_config_count(&id, root, "pad_token_id", "pad-token-id", 0, path, err)) return -1;
    if (id < -c->vocab || id >= c->vocab)
        return llama_config_fail(err, path, "pad_token_id is %" PRId64 ", of %" PRId64 " tokens", id,
                                 c->vocab);
    c->pad = 1 + (id < 0 ? id + c->vocab : id);
    return 0;
}

/* ---- layers ---- */

/* Layers without RoPE: a list in which 1 stands for a layer that turns, or every so many-th. */
static inline int llama_config_no_rope(llama_config *c, const json_t *root, const char *path, upipe_err *err)
{
    const json_t *list, *one;
    int64_t every = 4, i;
    if (llama_config_list(&list, c, root, "no_rope_layers", path, err) ||
        llama_config_count(&every, root, "no_rope_layer_interval", "layers", every, path, err))
        return -1;
    for (i = 0; i < c->layers; ++i) {
        one = json_array_get(list, (size_t)i);
        if (one != NULL && (!json_is_integer(one) || json_integer_value(one) >> 1 != 0))
            return llama_config_fail(err, path, "layer %" PRId64 " of no_rope_layers is neither 0 nor 1", i);
        if (one != NULL ? json_integer_value(one) == 0 : (i + 1) % every == 0)
            c->by_layer[i] |= LLAMA_NO_ROPE;
    }
    return 0;
}

/* Whether a layer has the window where layer_types does not say it. */
static inline int llama_config_slides(const llama_config *c, const llama_family *family, int64_t layer,
                                      int64_t from)
{
    if (family->full_every > 0) return layer % family->full_every != 0;
    if (family->pattern > 0) return (layer + 1) % from != 0;
    if (llama_is_word(family->keys, "no_rope_layers")) return (c->by_layer[layer] & LLAMA_NO_ROPE) != 0;
    return family->windows != LLAMA_WINDOWS_SWITCH || layer >= from;
}

/* Which layers have linear attention. */
static inline int llama_config_linear(llama_config *c, const json_t *root, const llama_family *family,
                                      const char *path, upipe_err *err)
{
    const json_t *types, *one, *gate = json_object_get(root, "attn_output_gate"),
                               *plain = json_object_get(root, "mlp_only_layers");
    int64_t every = family->pattern, i;
    int linear;
    if (llama_config_list(&types, c, root, "layer_types", path, err) ||
        llama_config_neutral(root, "use_sliding_window", 0, path, err) ||
        llama_config_count(&every, root, "full_attention_interval", "layers", every, path, err))
        return -1;
    if (gate != NULL && !json_is_true(gate))
        return llama_config_fail(err, path,
                                 "attn_output_gate is not true; only attention with a gate is built");
    if (plain != NULL && !(json_is_array(plain) && json_array_size(plain) == 0))
        return llama_config_fail(err, path, "mlp_only_layers is no empty list");
    if (c->linear_heads % c->linear_key_heads != 0)
        return llama_config_fail(
            err, path, "%" PRId64 " heads of linear attention do not divide among %" PRId64 " key heads",
            c->linear_heads, c->linear_key_heads);
    for (i = 0; i < c->layers; ++i) {
        one = json_array_get(types, (size_t)i);
        linear = one != NULL ? json_is_string(one) && strcmp(json_string_value(one), "linear_attention") == 0
                             : (i + 1) % every != 0;
        if (one != NULL && !linear &&
            (!json_is_string(one) || strcmp(json_string_value(one), "full_attention") != 0))
            return llama_config_fail(
                err, path, "layer %" PRId64 " of layer_types is neither full_attention nor linear_attention",
                i);
        if (linear) c->by_layer[i] |= LLAMA_LINEAR;
    }
    return 0;
}

static inline int llama_config_windows(llama_config *c, const json_t *root, const llama_family *family,
                                       const char *path, upipe_err *err)
{
    const json_t *types, *one;
    int64_t i, from = family->pattern > 0 ? family->pattern : 28, sliding = 0;
    int on = family->windows == LLAMA_WINDOWS_ALL || family->windows == LLAMA_WINDOWS_TYPES, slides;
    if (llama_config_list(&types, c, root, "layer_types", path, err)) return -1;
    if (family->windows != LLAMA_WINDOWS_SWITCH &&
        llama_config_neutral(root, "use_sliding_window", 0, path, err))
        return -1;
    if (family->windows == LLAMA_WINDOWS_SWITCH &&
        (llama_config_flag(&on, root, "use_sliding_window", path, err) ||
         llama_config_count(&from, root, "max_window_layers", "window", from, path, err)))
        return -1;
    if (llama_has_key(family, "sliding_window_pattern") && types == NULL &&
        llama_config_count(&from, root, "sliding_window_pattern", "layers", from, path, err))
        return -1;
    c->window = on ? family->window : 0;
    if (on && json_is_null(json_object_get(root, "sliding_window")))
        c->window = 0;
    else if (on && json_object_get(root, "sliding_window") != NULL &&
             llama_config_count(&c->window, root, "sliding_window", "window", 0, path, err))
        return -1;
    for (i = 0; i < c->layers; ++i) {
        one = json_array_get(types, (size_t)i);
        slides = json_is_string(one) && strcmp(json_string_value(one), "sliding_attention") == 0;
        if (one != NULL && !slides &&
            (!json_is_string(one) || strcmp(json_string_value(one), "full_attention") != 0))
            return llama_config_fail(
                err, path, "layer %" PRId64 " of layer_types is neither full_attention nor sliding_attention",
                i);
        if (one == NULL) slides = (c->window > 0 || family->gemma) && llama_config_slides(c, family, i, from);
        if (slides && c->window == 0)
            return llama_config_fail(
                err, path, "layer %" PRId64 " of layer_types is sliding_attention, and there is no window",
                i);
        if (!slides && c->window > 0) c->by_layer[i] |= LLAMA_SEES_ALL;
        if (!slides && c->window > 0 && family->nope) c->by_layer[i] |= LLAMA_NO_ROPE;
        sliding += slides;
    }
    if (family->nope && c->window > 0 && sliding == 0)
        return llama_config_fail(err, path,
                                 "no layer is sliding_attention, so that none has RoPE: not built");
    if (sliding > 0 || c->window == 0) return 0;
    for (i = 0, c->window = 0; i < c->layers; ++i) c->by_layer[i] &= (unsigned char)~LLAMA_SEES_ALL;
    return 0;
}

static inline int llama_config_numbers(llama_config *c, json_t *root, int like, const char *path,
                                       upipe_err *err)
{
    const llama_family *family = &llama_families[like];
    llama_layout layout;
    int status, i;
    memset(c, 0, sizeof *c);
    c->norm_eps = family->norm_eps;
    c->rope_theta = family->rope_theta;
    c->family = like;
    c->qk_norm = family->qk_norm;
    c->rope_local = family->local;
    c->attention_cap = family->attention_cap;
    c->logit_cap = family->logit_cap;
    if (llama_has_key(family, "embedding_multiplier"))
        c->embedding_multiplier = c->residual_multiplier = c->attention_multiplier = c->logits_scaling = 1;
    for (i = 0; i < LLAMA_FIELDS; ++i)
        if (llama_fields[i].key != NULL && llama_fields[i].used == 0 &&
            llama_fields[i].at != offsetof(llama_config, window) &&
            !(family->latent && llama_fields[i].at == offsetof(llama_config, head_dim)) &&
            llama_has_key(family, llama_fields[i].key) &&
            llama_config_field(c, &llama_fields[i], root, family, path, err))
            return -1;
    if (family->latent && llama_config_latent(c, root, family, path, err)) return -1;
    if (c->heads % c->kv_heads != 0)
        return llama_config_fail(err, path, "%d heads do not divide among %d key/value heads", c->heads,
                                 c->kv_heads);
    if (c->kv_rank == 0 && c->head_dim % 2 != 0)
        return llama_config_fail(err, path, "head_dim is %d, and odd: it has no rotary pairs", c->head_dim);
    if ((int64_t)c->heads * c->head_dim > INT32_MAX)
        return llama_config_fail(err, path, "%d heads of %d are more than %d", c->heads, c->head_dim,
                                 INT32_MAX);
    if (llama_config_pad(c, root, family, path, err) ||
        (llama_is_word(family->keys, "no_rope_layers") && llama_config_no_rope(c, root, path, err)) ||
        (family->windows == LLAMA_WINDOWS_LINEAR ? llama_config_linear(c, root, family, path, err)
                                                 : llama_config_windows(c, root, family, path, err)) ||
        llama_config_rope(c, root, family, path, err) ||
        (family->latent && llama_config_latent_rope(c, path, err)))
        return -1;
    status = llama_layout_init(&layout, c);
    if (status == LLAMA_LAYOUT_MEMORY)
        return llama_config_lost(err, UPIPE_ERR_MEMORY, path, "memory is out", "");
    if (status != 0) return llama_config_fail(err, path, "the model's bytes leave 63 bits");
    llama_layout_free(&layout);
    return 0;
}

/* ---- the file ---- */

/* Takes a key out of an object, or, as in rope_scaling.factor, out of an object in it; -1: it is not there. */
static inline int llama_config_forget(json_t *object, const char *name)
{
    const char *dot = strchr(name, '.');
    char key[80];
    if (json_object_del(object, name) == 0) return 0;
    for (; dot != NULL; dot = strchr(dot + 1, '.')) {
        snprintf(key, sizeof key, "%.*s", (int)(dot - name), name);
        if (llama_config_forget(json_object_get(object, key), dot + 1) == 0) return 0;
    }
    return -1;
}

/* llama_config_ignore -- the file as if it had no key of these names, each of which it has */
static inline int llama_config_ignore(json_t *root, const text_list *ignored, const char *path,
                                      upipe_err *err)
{
    int i;
    for (i = 0; ignored != NULL && i < ignored->n; ++i)
        if (llama_config_forget(root, ignored->at[i]) != 0 &&
            llama_config_forget(json_object_get(root, "text_config"), ignored->at[i]) != 0)
            return llama_config_fail(err, path, "has no key %.60s, which --ignore-key names", ignored->at[i]);
    return 0;
}

/* llama_config_read -- fills *c from a config.json; every number is within its range afterwards
 *
 *   dtype    which storage type the file names: bf16 for bfloat16, else f32; NULL = not wanted
 *   ignored  keys to read on without; NULL = none
 */
static inline int llama_config_read(llama_config *c, upipe_dtype *dtype, const char *path,
                                    const text_list *ignored, upipe_err *err)
{
    char why[JSON_LOAD_WHY];
    json_t *root, *text;
    const json_t *type;
    size_t bytes;
    int like, bad, lost;
    char *data = llama_file(path, LLAMA_CONFIG_BYTES_MAX, &bytes, err);
    if (data == NULL) return -1;
    text = root = json_load(data, bytes, why);
    lost = root == NULL && errno == ENOMEM;
    free(data);
    if (lost) return llama_config_lost(err, UPIPE_ERR_MEMORY, path, why, "");
    if (root == NULL) return llama_config_fail(err, path, "%s", why);
    like = !json_is_object(root) ? llama_config_fail(err, path, "is not a JSON object")
           : llama_config_ignore(root, ignored, path, err) || llama_config_text(&text, root, path, err)
               ? -1
               : llama_config_model(text, path, err);
    bad = like < 0 || llama_config_unbuilt(text, &llama_families[like], path, err) ||
          llama_config_numbers(c, text, like, path, err) ||
          llama_config_known(c, root, text, &llama_families[like], path, err);
    type = json_object_get(text, "torch_dtype");
    if (type == NULL) type = json_object_get(text, "dtype");
    if (dtype != NULL)
        *dtype =
            json_is_string(type) && strcmp(json_string_value(type), "bfloat16") == 0 ? UPIPE_BF16 : UPIPE_F32;
    json_decref(root);
    return bad ? -1 : 0;
}

/* llama_config_is_part -- whether a file that has been read is that of a larger model, of which the text part counts alone
 */
static inline int llama_config_is_part(const char *path)
{
    char why[JSON_LOAD_WHY];
    upipe_err err;
    size_t bytes;
    char *text = llama_file(path, LLAMA_CONFIG_BYTES_MAX, &bytes, &err);
    json_t *root = text != NULL ? json_load(text, bytes, why) : NULL;
    const int is = llama_config_whole(root) >= 0;
    free(text);
    json_decref(root);
    return is;
}

#endif

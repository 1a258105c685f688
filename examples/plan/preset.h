/* preset.h -- models by name, and config.json of more models than the trainer builds
 *
 *     llama_config c;
 *     char note[256];
 *     preset_find(&c, note, "qwen2.5-7b");     or a folder with a config.json
 *
 * note is empty, or says why the trainer refuses this model; it is planned all the same, without what is refused.
 */
#ifndef PLAN_PRESET_H
#define PLAN_PRESET_H

#include "../train/files/config_file.h"
#include "latent.h"
#include "machine.h"

enum { PRESET_NOTE = 320 };

/* Numbers of the models' config.json; the family says what stands in no number. */
static const struct preset {
    const char *name;
    int family;
    int64_t layers, dim, hidden, vocab;
    int heads, kv_heads, head_dim, tied;
    double rope_theta, norm_eps;
    int64_t window;
    double llama3; /* the factor of its RoPE, which is of that type; 0 = default */
} presets[] = {
    {"llama3-8b", LLAMA_IS_LLAMA, 32, 4096, 14336, 128256, 32, 8, 128, 0, 500000, 1e-5, 0, 0},
    {"llama3-70b", LLAMA_IS_LLAMA, 80, 8192, 28672, 128256, 64, 8, 128, 0, 500000, 1e-5, 0, 0},
    {"llama3.1-8b", LLAMA_IS_LLAMA, 32, 4096, 14336, 128256, 32, 8, 128, 0, 500000, 1e-5, 0, 8},
    {"llama3.1-70b", LLAMA_IS_LLAMA, 80, 8192, 28672, 128256, 64, 8, 128, 0, 500000, 1e-5, 0, 8},
    {"llama3.1-405b", LLAMA_IS_LLAMA, 126, 16384, 53248, 128256, 128, 8, 128, 0, 500000, 1e-5, 0, 8},
    {"llama3.2-1b", LLAMA_IS_LLAMA, 16, 2048, 8192, 128256, 32, 8, 64, 1, 500000, 1e-5, 0, 32},
    {"llama3.2-3b", LLAMA_IS_LLAMA, 28, 3072, 8192, 128256, 24, 8, 128, 1, 500000, 1e-5, 0, 32},
    {"qwen2.5-7b", LLAMA_IS_QWEN2, 28, 3584, 18944, 152064, 28, 4, 128, 0, 1000000, 1e-6, 0, 0},
    {"qwen2.5-32b", LLAMA_IS_QWEN2, 64, 5120, 27648, 152064, 40, 8, 128, 0, 1000000, 1e-6, 0, 0},
    {"qwen2.5-72b", LLAMA_IS_QWEN2, 80, 8192, 29568, 152064, 64, 8, 128, 0, 1000000, 1e-6, 0, 0},
    {"qwen3-0.6b", LLAMA_IS_QWEN3, 28, 1024, 3072, 151936, 16, 8, 128, 1, 1000000, 1e-6, 0, 0},
    {"qwen3-4b", LLAMA_IS_QWEN3, 36, 2560, 9728, 151936, 32, 8, 128, 1, 1000000, 1e-6, 0, 0},
    {"qwen3-8b", LLAMA_IS_QWEN3, 36, 4096, 12288, 151936, 32, 8, 128, 0, 1000000, 1e-6, 0, 0},
    {"qwen3-14b", LLAMA_IS_QWEN3, 40, 5120, 17408, 151936, 40, 8, 128, 0, 1000000, 1e-6, 0, 0},
    {"qwen3-32b", LLAMA_IS_QWEN3, 64, 5120, 25600, 151936, 64, 8, 128, 0, 1000000, 1e-6, 0, 0},
    {"mistral-7b", LLAMA_IS_MISTRAL, 32, 4096, 14336, 32000, 32, 8, 128, 0, 10000, 1e-5, 4096, 0},
    {"mistral-7b-v0.3", LLAMA_IS_MISTRAL, 32, 4096, 14336, 32768, 32, 8, 128, 0, 1000000, 1e-5, 0, 0},
    {"smollm2-135m", LLAMA_IS_LLAMA, 30, 576, 1536, 49152, 9, 3, 64, 1, 100000, 1e-5, 0, 0},
    {"gemma3-1b", LLAMA_IS_GEMMA3, 26, 1152, 6912, 262144, 4, 1, 256, 1, 1000000, 1e-6, 512, 0},
    {"gemma2-2b", LLAMA_IS_GEMMA2, 26, 2304, 9216, 256000, 8, 4, 256, 1, 10000, 1e-6, 4096, 0},
    {"gemma2-9b", LLAMA_IS_GEMMA2, 42, 3584, 14336, 256000, 16, 8, 256, 1, 10000, 1e-6, 4096, 0}};

enum { PRESETS = sizeof presets / sizeof *presets };

static inline void preset_config(llama_config *c, const struct preset *p)
{
    const llama_family *family = &llama_families[p->family];
    int64_t i;
    memset(c, 0, sizeof *c);
    c->layers = p->layers, c->dim = p->dim, c->hidden = p->hidden, c->vocab = p->vocab;
    c->heads = p->heads, c->kv_heads = p->kv_heads, c->head_dim = p->head_dim, c->tied = p->tied;
    c->rope_theta = p->rope_theta, c->norm_eps = p->norm_eps, c->window = p->window;
    if (p->llama3 > 0) {
        c->rope_type = LLAMA_ROPE_LLAMA3, c->rope_factor = p->llama3, c->rope_original = 8192;
        c->rope_low = 1, c->rope_high = 4;
    }
    c->family = p->family;
    c->qk_norm = family->qk_norm;
    for (i = 0; i < p->layers; ++i)
        if (family->pattern > 0 && (i + 1) % family->pattern == 0) c->by_layer[i] = LLAMA_SEES_ALL;
    if (family->gemma) c->query_scalar = 256;
    c->rope_local = family->local, c->attention_cap = family->attention_cap, c->logit_cap = family->logit_cap;
    c->attention_bias = family->bias_always || family->bias_absent ? family->bias : LLAMA_BIAS_NONE;
}

static inline void preset_names(char *out, size_t n)
{
    size_t i, used = 0;
    for (i = 0; i < PRESETS && used < n; ++i)
        used += (size_t)snprintf(out + used, n - used, "%s%s", i > 0 ? ", " : "", presets[i].name);
}

/* Which of llama_families a type reads as; -1 for none. */
static inline int preset_family(const json_t *root)
{
    const char *type = json_string_value(json_object_get(root, "model_type"));
    int i;
    for (i = 0; i < LLAMA_FAMILIES && type != NULL; ++i)
        if (strcmp(llama_families[i].type, type) == 0) return i;
    return -1;
}

/* The sizes alone, whatever else the file says. */
static inline int preset_sizes(llama_config *c, json_t *root, const char *path, upipe_err *e)
{
    static const char *const other[] = {"rope_scaling", "rope_parameters"};
    const int family = preset_family(root);
    size_t i;
    if (family < 0 || json_object_get(root, "num_experts") != NULL ||
        json_object_get(root, "num_local_experts") != NULL)
        return llama_config_fail(e, path, "no dense model");
    for (i = 0; i < sizeof other / sizeof *other; ++i) json_object_del(root, other[i]);
    return llama_config_numbers(c, root, family, path, e);
}

/* A folder's model, the trainer's or not. */
static inline int preset_read(llama_config *c, char note[PRESET_NOTE], const char *path,
                              const text_list *ignored)
{
    upipe_err e, again;
    json_t *root = NULL;
    int status;
    note[0] = '\0';
    memset(&e, 0, sizeof e);
    if (llama_config_read(c, NULL, path, ignored, &e) == 0) return 0;
    if (e.status != UPIPE_ERR_ARG) return machine_unread(&e);
    if ((status = machine_json(&root, path)) != 0) return status;
    status = preset_sizes(c, root, path, &again);
    json_decref(root);
    if (status != 0)
        return again.status == UPIPE_ERR_MEMORY ? machine_unread(&again) : cli_refuse("%s", e.text);
    snprintf(note, PRESET_NOTE, "%s", e.text);
    return 0;
}

/* preset_find -- 0, or as a flag's reader */
static inline int preset_find(llama_config *c, char note[PRESET_NOTE], const char *name,
                              const text_list *ignored)
{
    char path[4096], names[1024], latent[256];
    int i, status;
    note[0] = '\0';
    for (i = 0; i < (int)PRESETS; ++i) {
        if (strcmp(presets[i].name, name) != 0) continue;
        if (ignored != NULL && ignored->n > 0)
            return cli_refuse("--ignore-key would have no effect with --model %s, which has no config.json",
                              name);
        preset_config(c, &presets[i]);
        return 0;
    }
    snprintf(path, sizeof path, "%s/config.json", name);
    if (access(path, F_OK) == 0 || (errno != ENOENT && errno != ENOTDIR)) {
        status = preset_read(c, note, path, ignored);
        if (status != 0 || !llama_has_linear(c)) return status;
        return cli_refuse(
            "--model %s has layers of linear attention, which are not planned here; train --plan "
            "plans their bytes",
            name);
    }
    preset_names(names, sizeof names);
    latent_names(latent, sizeof latent);
    return cli_refuse(
        "--model %s is neither a folder with a config.json nor one of %s (of one layer's attention: %s)",
        name, names, latent);
}

#endif

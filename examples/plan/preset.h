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

#include "../common/cli.h"
#include "../llama/config.h"

enum { PRESET_NOTE = 320 };

/* Numbers of the models' config.json. */
static const struct {
    const char *name;
    llama_config c;
    const char *refused;
} presets[] = {
    /* layers, dim, hidden, vocab, heads, kv heads, head dim, tied, qk norm, biases, theta, eps, window */
    {"llama3-8b", {32, 4096, 14336, 128256, 32, 8, 128, 0, 0, 0, 500000, 1e-5, 0}, NULL},
    {"llama3-70b", {80, 8192, 28672, 128256, 64, 8, 128, 0, 0, 0, 500000, 1e-5, 0}, NULL},
    {"llama3.1-8b", {32, 4096, 14336, 128256, 32, 8, 128, 0, 0, 0, 500000, 1e-5, 0}, "rope_scaling llama3"},
    {"llama3.1-70b", {80, 8192, 28672, 128256, 64, 8, 128, 0, 0, 0, 500000, 1e-5, 0}, "rope_scaling llama3"},
    {"llama3.1-405b",
     {126, 16384, 53248, 128256, 128, 8, 128, 0, 0, 0, 500000, 1e-5, 0},
     "rope_scaling llama3"},
    {"llama3.2-1b", {16, 2048, 8192, 128256, 32, 8, 64, 1, 0, 0, 500000, 1e-5, 0}, "rope_scaling llama3"},
    {"llama3.2-3b", {28, 3072, 8192, 128256, 24, 8, 128, 1, 0, 0, 500000, 1e-5, 0}, "rope_scaling llama3"},
    {"qwen2.5-7b", {28, 3584, 18944, 152064, 28, 4, 128, 0, 0, LLAMA_BIAS_QKV, 1000000, 1e-6, 0}, NULL},
    {"qwen2.5-32b", {64, 5120, 27648, 152064, 40, 8, 128, 0, 0, LLAMA_BIAS_QKV, 1000000, 1e-6, 0}, NULL},
    {"qwen2.5-72b", {80, 8192, 29568, 152064, 64, 8, 128, 0, 0, LLAMA_BIAS_QKV, 1000000, 1e-6, 0}, NULL},
    {"qwen3-8b", {36, 4096, 12288, 151936, 32, 8, 128, 0, 1, 0, 1000000, 1e-6, 0}, NULL},
    {"qwen3-14b", {40, 5120, 17408, 151936, 40, 8, 128, 0, 1, 0, 1000000, 1e-6, 0}, NULL},
    {"qwen3-32b", {64, 5120, 25600, 151936, 64, 8, 128, 0, 1, 0, 1000000, 1e-6, 0}, NULL},
    {"mistral-7b", {32, 4096, 14336, 32000, 32, 8, 128, 0, 0, 0, 10000, 1e-5, 4096}, NULL},
    {"mistral-7b-v0.3", {32, 4096, 14336, 32768, 32, 8, 128, 0, 0, 0, 1000000, 1e-5, 0}, NULL},
    {"smollm2-135m", {30, 576, 1536, 49152, 9, 3, 64, 1, 0, 0, 100000, 1e-5, 0}, NULL}};

enum { PRESETS = sizeof presets / sizeof *presets };

static inline void preset_names(char *out, size_t n)
{
    size_t i, used = 0;
    for (i = 0; i < PRESETS && used < n; ++i)
        used += (size_t)snprintf(out + used, n - used, "%s%s", i > 0 ? ", " : "", presets[i].name);
}

/* Which of llama_models a type reads as; -1 for none. */
static inline int preset_like(const json_t *root)
{
    const char *type = json_string_value(json_object_get(root, "model_type"));
    int i;
    for (i = 0; i < LLAMA_MODELS && type != NULL; ++i)
        if (strcmp(llama_models[i][0], type) == 0) return i;
    return -1;
}

/* The sizes alone, whatever else the file says. */
static inline int preset_sizes(llama_config *c, json_t *root, const char *path, upipe_err *e)
{
    static const char *const other[] = {"rope_scaling", "rope_parameters"};
    const int like = preset_like(root);
    size_t i;
    if (like < 0 || json_object_get(root, "num_experts") != NULL ||
        json_object_get(root, "num_local_experts") != NULL)
        return llama_config_fail(e, path, "no dense model of the types llama, mistral, qwen2 and qwen3");
    for (i = 0; i < sizeof other / sizeof *other; ++i) json_object_del(root, other[i]);
    memset(c, 0, sizeof *c);
    c->norm_eps = 1e-6;
    c->rope_theta = 10000;
    return llama_config_numbers(c, root, like, path, e);
}

/* A folder's model, the trainer's or not. */
static inline int preset_read(llama_config *c, char note[PRESET_NOTE], const char *path)
{
    char why[JSON_LOAD_WHY], *text;
    upipe_err e, again;
    size_t bytes;
    json_t *root;
    int status;
    note[0] = '\0';
    memset(&e, 0, sizeof e);
    if (llama_config_read(c, NULL, path, &e) == 0) return 0;
    text = llama_file(path, LLAMA_CONFIG_BYTES_MAX, &bytes, &again);
    root = text != NULL ? json_load(text, bytes, why) : NULL;
    free(text);
    status = json_is_object(root) ? preset_sizes(c, root, path, &again) : -1;
    json_decref(root);
    if (status != 0) return cli_refuse("%s", e.text);
    snprintf(note, PRESET_NOTE, "%s", e.text);
    return 0;
}

/* preset_find -- 0, or as a flag's reader */
static inline int preset_find(llama_config *c, char note[PRESET_NOTE], const char *name)
{
    char path[4096], names[1024];
    int i;
    note[0] = '\0';
    for (i = 0; i < (int)PRESETS; ++i) {
        if (strcmp(presets[i].name, name) != 0) continue;
        *c = presets[i].c;
        if (presets[i].refused != NULL) snprintf(note, PRESET_NOTE, "%s: %s", name, presets[i].refused);
        return 0;
    }
    snprintf(path, sizeof path, "%s/config.json", name);
    if (access(path, F_OK) == 0) return preset_read(c, note, path);
    preset_names(names, sizeof names);
    return cli_refuse("--model %s is neither a folder with a config.json nor one of %s", name, names);
}

#endif

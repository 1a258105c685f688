/* adapter.h -- the folder of an adapter of low rank, as PEFT has it: adapter_config.json, adapter_model.safetensors
 *
 *     llama_adapter a;
 *     if (llama_adapter_open(&a, "DIR", &config, &err)) ...
 *     llama_load_weights(c, "BASE", &state, &a);                     W + s * B * A in place of W, or
 *     llama_load_adapter(c, &a, &state);                             A and B, into a layout that has them
 *     llama_adapter_close(&a);
 *
 * Tensors have the layout's names behind LLAMA_ADAPTER_PREFIX. Where target_modules is a pattern, they say which
 * projections of a layer it means; all layers have the same. A key of the config is used, changes nothing that is
 * computed here, or must say that it is off (null, false, 0, empty): else it is refused by its name. Functions return
 * 0, or fill *err with a sentence and return -1. An open adapter is constant: threads may share it.
 */
#ifndef LLAMA_ADAPTER_H
#define LLAMA_ADAPTER_H

#include "../files/config_file.h"
#include "checkpoint_run.h"

#define LLAMA_ADAPTER_CONFIG "adapter_config.json"
#define LLAMA_ADAPTER_MODEL  "adapter_model.safetensors"
#define LLAMA_ADAPTER_PREFIX "base_model.model."

typedef struct llama_adapter {
    llama_layout layout;        /* of the model with this adapter */
    st_file f;                  /* its tensors */
    char flag[LLAMA_LORA_TEXT]; /* what --lora would say */
} llama_adapter;

/* ---- the config ---- */

/* As target_modules has a number of llama_lora_kinds. */
static inline const char *llama_adapter_target(int i)
{
    return strchr(llama_lora_parts[i], '.') + 1;
}

/* The number of the projection that an entry of target_modules names, and of its layer, or -1: of all layers.
 * LLAMA_LORAS: of none. */
static inline int llama_adapter_module(const char *name, int64_t layers, int64_t *layer)
{
    static const char *const before[] = {"model.layers.", "layers.", ""};
    char whole[64];
    size_t k;
    int i;
    for (i = 0; i < LLAMA_LORAS; ++i) {
        *layer = -1;
        if (strcmp(name, llama_adapter_target(i)) == 0 || strcmp(name, llama_lora_parts[i]) == 0) return i;
        for (k = 0; k < sizeof before / sizeof *before; ++k) {
            if (strncmp(name, before[k], strlen(before[k])) != 0) continue;
            *layer = strtoll(name + strlen(before[k]), NULL, 10);
            snprintf(whole, sizeof whole, "%s%" PRId64 ".%s", before[k], *layer, llama_lora_parts[i]);
            if (*layer >= 0 && *layer < layers && strcmp(name, whole) == 0) return i;
        }
    }
    return LLAMA_LORAS;
}

/* The projections that a list names, the same ones of all layers. of[layer]: no bits. */
static inline int llama_adapter_list(llama_lora *l, const json_t *list, int64_t layers, unsigned *of,
                                     const char *path, upipe_err *err)
{
    unsigned all = 0;
    int64_t layer;
    size_t at;
    int i;
    for (at = 0; at < json_array_size(list); ++at) {
        const char *name = json_string_value(json_array_get(list, at));
        i = name != NULL ? llama_adapter_module(name, layers, &layer) : LLAMA_LORAS;
        if (i == LLAMA_LORAS)
            return llama_config_fail(err, path, "target_modules has %.60s, which is no projection of a layer",
                                     name != NULL ? name : "what is no string");
        *(layer < 0 ? &all : &of[layer]) |= 1u << i;
        l->targets |= 1u << i;
    }
    for (layer = 0; layer < layers; ++layer)
        if ((l->targets & ~(all | of[layer])) != 0)
            return llama_config_fail(
                err, path, "target_modules has no projection of layer %" PRId64 " that it has of others",
                layer);
    return l->targets != 0 ? 0 : llama_config_fail(err, path, "target_modules is no list of projections");
}

/* None of a pattern: the tensors say which. */
static inline int llama_adapter_targets(llama_lora *l, const json_t *root, int64_t layers, const char *path,
                                        upipe_err *err)
{
    const json_t *list = json_object_get(root, "target_modules");
    unsigned *of;
    int bad;
    if (json_is_string(list)) return 0;
    of = (unsigned *)calloc((size_t)layers, sizeof *of);
    bad = of == NULL ? llama_config_lost(err, UPIPE_ERR_MEMORY, path, "memory is out", "")
                     : llama_adapter_list(l, list, layers, of, path, err);
    free(of);
    return bad;
}

/* What is off changes nothing. */
static inline int llama_adapter_off(const json_t *j)
{
    return json_is_null(j) || json_is_false(j) || (json_is_number(j) && json_number_value(j) == 0) ||
           (json_is_object(j) && json_object_size(j) == 0) || (json_is_array(j) && json_array_size(j) == 0);
}

/* Every key is known, or off. */
static inline int llama_adapter_known(const json_t *root, const char *path, upipe_err *err)
{
    static const char idle[] =
        " r lora_alpha target_modules lora_dropout base_model_name_or_path revision peft_version inference_mode "
        "auto_mapping megatron_core qalora_group_size ";
    static const char *const words[][2] = {{"peft_type", " LORA "},
                                           {"task_type", " CAUSAL_LM "},
                                           {"bias", " none "},
                                           {"init_lora_weights", " gaussian orthogonal "}};
    const char *name;
    json_t *value;
    size_t i;
    json_object_foreach((json_t *)(uintptr_t)root, name, value)
    {
        const char *word = json_string_value(value);
        if (llama_is_word(idle, name) || llama_adapter_off(value)) continue;
        if (llama_is_word(" init_lora_weights use_rslora ", name) && json_is_true(value)) continue;
        for (i = 0; i < sizeof words / sizeof *words && strcmp(name, words[i][0]) != 0;) ++i;
        if (i == sizeof words / sizeof *words)
            return llama_config_fail(err, path, "%.60s is set, and not built", name);
        if (word == NULL || !llama_is_word(words[i][1], word))
            return llama_config_fail(err, path, "%s is %.40s, which is not built", name,
                                     word != NULL ? word : "no string");
    }
    return 0;
}

/* With use_rslora s is alpha / sqrt(r): alpha becomes that of alpha / r. */
static inline int llama_adapter_numbers(llama_lora *l, const json_t *root, int64_t layers, const char *path,
                                        upipe_err *err)
{
    const json_t *rank = json_object_get(root, "r"), *alpha = json_object_get(root, "lora_alpha");
    const int by_root = json_is_true(json_object_get(root, "use_rslora"));
    memset(l, 0, sizeof *l);
    if (!json_is_integer(rank) || json_integer_value(rank) < 1 ||
        json_integer_value(rank) > LLAMA_LORA_RANK_MAX)
        return llama_config_fail(err, path, "r is not a whole number from 1 to %d", LLAMA_LORA_RANK_MAX);
    l->rank = (int)json_integer_value(rank);
    l->alpha = json_number_value(alpha);
    if (by_root) l->alpha *= sqrt(l->rank);
    if (!(l->alpha > 0 && l->alpha <= LLAMA_LORA_ALPHA_MAX))
        return llama_config_fail(err, path, "lora_alpha%s is not a number above 0, of at most %g",
                                 by_root ? " times sqrt(r)" : "", LLAMA_LORA_ALPHA_MAX);
    return llama_adapter_targets(l, root, layers, path, err) || llama_adapter_known(root, path, err) ? -1 : 0;
}

/* layers: of the model */
static inline int llama_adapter_read(llama_lora *l, int64_t layers, const char *path, upipe_err *err)
{
    char why[JSON_LOAD_WHY];
    json_t *root;
    size_t bytes;
    int bad, lost;
    char *text = llama_file(path, LLAMA_CONFIG_BYTES_MAX, &bytes, err);
    if (text == NULL) return -1;
    root = json_load(text, bytes, why);
    lost = root == NULL && errno == ENOMEM;
    free(text);
    if (lost) return llama_config_lost(err, UPIPE_ERR_MEMORY, path, why, "");
    if (root == NULL) return llama_config_fail(err, path, "%s", why);
    bad = json_is_object(root) ? llama_adapter_numbers(l, root, layers, path, err)
                               : llama_config_fail(err, path, "is not a JSON object");
    json_decref(root);
    return bad;
}

/* ---- the tensors ---- */

static inline const st_tensor *llama_adapter_find(const llama_adapter *a, const llama_tensor *t)
{
    char name[sizeof LLAMA_ADAPTER_PREFIX + sizeof t->name];
    snprintf(name, sizeof name, LLAMA_ADAPTER_PREFIX "%s", t->name);
    return st_find(&a->f, name);
}

/* All that the layout says, in its shapes, and nothing else. */
static inline int llama_adapter_check(const llama_adapter *a, upipe_err *err)
{
    int i, n = 0;
    for (i = 0; i < a->layout.n; ++i) {
        const llama_tensor *t = &a->layout.tensors[i];
        const st_tensor *from;
        if (!llama_is_adapter(t->kind)) continue;
        ++n;
        from = llama_adapter_find(a, t);
        if (from == NULL) return st_fail(err, a->f.path, LLAMA_ADAPTER_PREFIX "%s is missing", t->name);
        if (llama_load_fits(&a->f, from, t, err)) return -1;
    }
    if (a->f.n == n) return 0;
    return st_fail(err, a->f.path, "has %d tensors, not the %d of its config and this model", a->f.n, n);
}

/* The projections that the file has tensors of. */
static inline int llama_adapter_found(llama_lora *l, const st_file *f, upipe_err *err)
{
    char tail[64];
    int i, k;
    for (i = 0; i < LLAMA_LORAS; ++i) {
        const size_t n = (size_t)snprintf(tail, sizeof tail, ".%s.lora_A.weight", llama_lora_parts[i]);
        for (k = 0; k < f->n; ++k) {
            const size_t length = strlen(f->tensors[k].name);
            if (length > n && strcmp(f->tensors[k].name + length - n, tail) == 0) l->targets |= 1u << i;
        }
    }
    return l->targets != 0 ? 0 : st_fail(err, f->path, "has no tensor of a projection of a layer");
}

static inline int llama_adapter_layout(llama_adapter *a, const llama_lora *lora, const llama_config *config,
                                       const char *path, upipe_err *err)
{
    int bad, i, used;
    if (llama_families[config->family].fused)
        return llama_config_fail(err, path, "a %s stores several matrices as one",
                                 llama_families[config->family].type);
    if (llama_lora_lacks(config, lora->targets) != NULL)
        return llama_config_fail(err, path, "target_modules has %s, which this %s has not",
                                 llama_lora_lacks(config, lora->targets),
                                 llama_families[config->family].type);
    bad = llama_layout_adapted(&a->layout, config, lora);
    if (bad == LLAMA_LAYOUT_MEMORY)
        return llama_config_lost(err, UPIPE_ERR_MEMORY, path, "memory is out", "");
    if (bad) return llama_config_fail(err, path, "the model's bytes leave 63 bits");
    used = snprintf(a->flag, sizeof a->flag, "%d:%.17g", lora->rank, lora->alpha);
    for (i = 0, bad = ':'; i < LLAMA_LORAS; ++i) {
        if (!(lora->targets >> i & 1)) continue;
        used += snprintf(a->flag + used, sizeof a->flag - (size_t)used, "%c%s", bad, llama_lora_names[i]);
        bad = ',';
    }
    return 0;
}

static inline void llama_adapter_close(llama_adapter *a)
{
    if (a->layout.n > 0) st_close(&a->f);
    llama_layout_free(&a->layout);
}

static inline int llama_adapter_file(st_file *f, const char *folder, upipe_err *err)
{
    char path[LLAMA_PATH];
    if (llama_path_in(path, folder, LLAMA_ADAPTER_MODEL, err) ||
        (access(path, F_OK) != 0 && llama_pickled(folder, "adapter_model.bin", err)))
        return -1;
    return st_open(f, path, err);
}

/* llama_adapter_open -- an adapter of a model, whose names, shapes and types fit it; no weight is read */
static inline int llama_adapter_open(llama_adapter *a, const char *folder, const llama_config *config,
                                     upipe_err *err)
{
    char path[LLAMA_PATH];
    llama_lora lora;
    memset(a, 0, sizeof *a);
    if (llama_path_in(path, folder, LLAMA_ADAPTER_CONFIG, err) ||
        llama_adapter_read(&lora, config->layers, path, err) || llama_adapter_file(&a->f, folder, err))
        return -1;
    if ((lora.targets != 0 || llama_adapter_found(&lora, &a->f, err) == 0) &&
        llama_adapter_layout(a, &lora, config, path, err) == 0 && llama_adapter_check(a, err) == 0)
        return 0;
    st_close(&a->f);
    llama_layout_free(&a->layout);
    return -1;
}

/* ---- merging ---- */

/* Elements at .. at + n - 1 of a matrix [.][cols], which begin in row `row`, each rounded once.
 *   a [rank][cols], b [.][rank] from that row on, sum [cols] */
static inline void llama_adapter_product(float *w, int64_t at, int64_t n, int64_t cols, double scale,
                                         int rank, const float *a, const float *b, double *sum)
{
    const int64_t row = at / cols;
    int64_t i, j, part;
    int k;
    for (i = 0; i < n; i += part) {
        const int64_t col = (at + i) % cols;
        const float *const factors = b + ((at + i) / cols - row) * rank;
        part = cols - col < n - i ? cols - col : n - i;
        memset(sum, 0, (size_t)part * sizeof *sum);
        for (k = 0; k < rank; ++k)
            for (j = 0; j < part; ++j) sum[j] += scale * factors[k] * a[k * cols + col + j];
        for (j = 0; j < part; ++j) w[i + j] = (float)(w[i + j] + sum[j]);
    }
}

/* llama_adapter_add -- adds s * B * A to elements at .. at + n - 1 of the model's tensor t, where it has an adapter */
static inline int llama_adapter_add(const llama_adapter *a, const llama_tensor *t, int64_t at, int64_t n,
                                    float *w, upipe_err *err)
{
    const llama_lora *lora = &a->layout.lora;
    const llama_tensor *own = llama_find(&a->layout, t->kind, t->layer);
    const int64_t row = at / t->cols, rows = (at + n - 1) / t->cols - row + 1;
    float *left, *right;
    double *sum;
    int bad;
    if (own == NULL || own->lora == 0) return 0;
    right = (float *)malloc((size_t)(lora->rank * t->cols) * sizeof *right);
    left = (float *)malloc((size_t)(lora->rank * rows) * sizeof *left);
    sum = (double *)malloc((size_t)t->cols * sizeof *sum);
    if (right == NULL || left == NULL || sum == NULL)
        bad = st_fail(err, a->f.path, "no memory to merge %s", t->name);
    else
        bad =
            st_read_f32(&a->f, llama_adapter_find(a, own + own->lora), 0, lora->rank * t->cols, right, err) ||
            st_read_f32(&a->f, llama_adapter_find(a, own + own->lora + 1), row * lora->rank,
                        rows * lora->rank, left, err);
    if (!bad)
        llama_adapter_product(w, at, n, t->cols, lora->alpha / lora->rank, lora->rank, right, left, sum);
    free(right);
    free(left);
    free(sum);
    return bad ? -1 : 0;
}

#endif

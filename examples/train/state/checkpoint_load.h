/* checkpoint_load.h -- a model and its optimizer from the disk, for any number of ranks; another's model too */
#ifndef LLAMA_CHECKPOINT_LOAD_H
#define LLAMA_CHECKPOINT_LOAD_H

#include "adapter.h"

enum {
    LLAMA_INDEX_MAX = 64 << 20, /* bytes of a model.safetensors.index.json */
    LLAMA_PARTS_MAX = 4096      /* files of a model */
};

typedef struct llama_load_work {
    upipe_ctx *c;
    upipe_err *err;
    const llama_layout *layout;
    const llama_family *family;
    const llama_state *state;           /* what is read goes there; NULL: all is checked alone */
    const llama_adapter *merged;        /* is added to it; NULL: nothing */
    const llama_tensor **by_name;       /* [layout's stored_n] */
    char *seen;                         /* [layout's stored_n] */
    float *host;                        /* [LLAMA_CHUNK / 4], followed by as many u16 */
    const char *path;                   /* the folder */
    const json_t *map;                  /* of model.safetensors.index.json; NULL = one file */
    size_t mapped;                      /* tensors met that are in the map */
    const char *parts[LLAMA_PARTS_MAX]; /* files that the map names */
} llama_load_work;

static int llama_by_name(const void *a, const void *b)
{
    return strcmp((*(const llama_tensor *const *)a)->name, (*(const llama_tensor *const *)b)->name);
}

static int llama_find_name(const void *key, const void *one)
{
    return strcmp((const char *)key, (*(const llama_tensor *const *)one)->name);
}

/* To the nearest, ties to even; what is a bf16 already keeps its bits. */
static uint16_t llama_to_bf16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0xffffu) == 0) return (uint16_t)(bits >> 16);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40u);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

/* Values of a tensor, from element `at` of its group on, go to where an array has them. */
static int llama_load_store(llama_load_work *w, void *array, llama_range r, int64_t at, int64_t n,
                            const void *values, size_t size)
{
    upipe_ctx *c = w->c;
    const int64_t from = at > r.first ? at : r.first, to = at + n < r.end ? at + n : r.end;
    if (array == NULL || from >= to) return 0;
    return c->ops->copy(c, (char *)array + (size_t)(from + r.shift) * size,
                        (const char *)values + (size_t)(from - at) * size,
                        (size_t)(to - from) * size) != UPIPE_OK
               ? -1
               : 0;
}

/* The same of n values read, into weights and master: a model that is not trained has no use for the latter. */
static int llama_load_values(llama_load_work *w, const llama_tensor *t, int64_t at, int64_t n)
{
    const llama_state *state = w->state;
    const upipe_zero *z = llama_zero(state, t);
    const llama_range held = llama_held(state, UPIPE_ZERO_WEIGHTS, t);
    uint16_t *narrow = (uint16_t *)(void *)(w->host + LLAMA_CHUNK / 4);
    int64_t i;
    if (z->dtype == UPIPE_F32) return llama_load_store(w, z->weights, held, at, n, w->host, 4);
    for (i = 0; i < n; ++i) narrow[i] = llama_to_bf16(w->host[i]);
    if (llama_load_store(w, z->weights, held, at, n, narrow, 2)) return -1;
    if (t->frozen) return 0;
    return llama_load_store(w, state->master, llama_held(state, UPIPE_ZERO_STATES, t), at, n, w->host, 4);
}

#define LLAMA_BF16_END 0x1.ffp127f /* from here on a number is rounded to an infinite bf16 */

/* Whether all values stay finite in a storage type. */
static int llama_load_finite(const float *x, int64_t n, upipe_dtype dtype)
{
    const float end = dtype == UPIPE_F32 ? INFINITY : LLAMA_BF16_END;
    int64_t i;
    for (i = 0; i < n && fabsf(x[i]) < end; ++i) {
    }
    return i == n;
}

/* What this rank needs of a tensor: the weights that it holds, among which are those whose states it has. */
static int llama_load_read(llama_load_work *w, const st_file *f, const st_tensor *from, const llama_tensor *t)
{
    const llama_range need = llama_held(w->state, UPIPE_ZERO_WEIGHTS, t);
    const upipe_dtype dtype = llama_zero(w->state, t)->dtype;
    const char *const as = dtype == UPIPE_F32 ? "" : " in bf16";
    int64_t at, n, there;
    for (at = need.first; at < need.end; at += n) {
        n = need.end - at < LLAMA_CHUNK / 4 ? need.end - at : LLAMA_CHUNK / 4;
        there = llama_in_file(t, at - t->at, &n);
        if (st_read_f32(f, from, there, n, w->host, w->err)) return -1;
        if (!llama_load_finite(w->host, n, dtype))
            return st_fail(w->err, f->path, "%.80s has a value that is not finite%s", t->name, as);
        if (w->merged != NULL) {
            if (llama_adapter_add(w->merged, t, at - t->at, n, w->host, w->err)) return -1;
            if (!llama_load_finite(w->host, n, dtype))
                return st_fail(w->err, w->merged->f.path,
                               "merged into %.80s it gives a value that is not finite%s", t->name, as);
        }
        if (llama_load_values(w, t, at, n)) return -1;
    }
    return 0;
}

/* What a file may hold beside the model's tensors: nothing in it changes the model. Of a larger model its other parts. */
static int llama_load_spare(const llama_family *family, const char *name)
{
    static const char buffer[] = "rotary_emb.inv_freq";
    size_t length = strlen(name), tail = sizeof buffer - 1, n;
    const char *other = family->others;
    for (; other != NULL && *(other += strspn(other, " ")) != '\0'; other += n) {
        n = strcspn(other, " ");
        if (strncmp(name, other, n) == 0) return 1;
    }
    return length >= tail && strcmp(name + length - tail, buffer) == 0;
}

enum { LLAMA_LOAD_NAME = 120 };

/* `name` with another beginning: of a tensor in a larger model's file as the layout has it or, with `whole`, the reverse. */
static const char *llama_load_name(char out[LLAMA_LOAD_NAME], const llama_family *family, const char *name,
                                   int whole)
{
    static const char own[] = "model.";
    const char *const from = whole ? own : family->part, *const to = whole ? family->part : own;
    if (family->part == NULL || strncmp(name, from, strlen(from)) != 0) return name;
    snprintf(out, LLAMA_LOAD_NAME, "%s%s", to, name + strlen(from));
    return out;
}

/* A head that is stored beside the embedding that it is tied to has the same numbers. */
static int llama_load_tied(llama_load_work *w, const st_file *f, const st_tensor *head)
{
    const llama_tensor *embed = llama_find(w->layout, LLAMA_EMBED, -1);
    const int64_t most = LLAMA_CHUNK / 8;
    char path[LLAMA_PATH], whole[LLAMA_LOAD_NAME];
    const char *name = embed->name, *part = "model.safetensors";
    const st_tensor *t;
    st_file other;
    int64_t at, n;
    int bad;
    if (w->map != NULL) {
        if (json_object_get(w->map, name) == NULL) name = llama_load_name(whole, w->family, name, 1);
        part = json_string_value(json_object_get(w->map, name));
    }
    if (part == NULL) return 0; /* the embedding is missing, which is said at the end */
    if (llama_path_in(path, w->path, part, w->err) || st_open(&other, path, w->err)) return -1;
    t = st_find(&other, name);
    if (t == NULL) t = st_find(&other, llama_load_name(whole, w->family, name, 1));
    bad = t != NULL && t->n == head->n
              ? 0
              : st_fail(w->err, other.path, "%.80s is missing, or has another shape", embed->name);
    for (at = 0; at < head->n && !bad; at += n) {
        n = head->n - at < most ? head->n - at : most;
        bad = st_read_f32(f, head, at, n, w->host, w->err) ||
              st_read_f32(&other, t, at, n, w->host + most, w->err);
        if (!bad && memcmp(w->host, w->host + most, (size_t)n * 4) != 0)
            bad = st_fail(w->err, f->path,
                          "%.80s is not the embedding, and tie_word_embeddings says that it is", head->name);
    }
    st_close(&other);
    return bad;
}

/* One tensor of a file: checked, and in the second pass read (and checked again: the file may
 * have changed). */
static int llama_load_tensor(llama_load_work *w, const st_file *f, const char *part, const st_tensor *t,
                             int reading)
{
    const llama_layout *l = w->layout;
    char own[LLAMA_LOAD_NAME];
    const llama_tensor *const *found =
        (const llama_tensor *const *)bsearch(llama_load_name(own, w->family, t->name, 0), w->by_name,
                                             (size_t)l->stored_n, sizeof *w->by_name, llama_find_name);
    const int head = l->config.tied && strcmp(t->name, "lm_head.weight") == 0;
    const llama_tensor *expected = head ? llama_find(l, LLAMA_EMBED, -1) : found != NULL ? *found : NULL;
    upipe_err *err = w->err;
    const char *mapped;
    if (w->map != NULL) {
        mapped = json_string_value(json_object_get(w->map, t->name));
        if (mapped == NULL || strcmp(mapped, part) != 0)
            return st_fail(err, f->path, "%.80s is not here by model.safetensors.index.json", t->name);
        ++w->mapped;
    }
    if (expected == NULL)
        return llama_load_spare(w->family, t->name)
                   ? 0
                   : st_fail(err, f->path, "%.80s is no tensor of this model", t->name);
    if (llama_load_fits(f, t, expected, err)) return -1;
    if (head) return w->state == NULL ? llama_load_tied(w, f, t) : 0;
    if (!reading && w->seen[expected - l->stored])
        return st_fail(err, f->path, "%.80s is there twice, by two names", t->name);
    w->seen[expected - l->stored] = 1;
    return reading ? llama_load_read(w, f, t, expected) : 0;
}

static int llama_load_part(llama_load_work *w, const char *part, int reading)
{
    char path[LLAMA_PATH];
    st_file f;
    int i, bad = 0;
    if (llama_path_in(path, w->path, part, w->err) || st_open(&f, path, w->err)) return -1;
    for (i = 0; i < f.n && !bad; ++i) bad = llama_load_tensor(w, &f, part, &f.tensors[i], reading);
    st_close(&f);
    return bad;
}

/* A file of the folder itself: a map is not to lead elsewhere. */
static int llama_load_part_name(const char *part)
{
    return part != NULL && part[0] != 0 && part[0] != '.' && strchr(part, '/') == NULL;
}

static int llama_load_parts(llama_load_work *w, int reading)
{
    upipe_err *err = w->err;
    json_t *value;
    const char *name;
    int i, n = 0;
    if (w->map == NULL) return llama_load_part(w, "model.safetensors", reading);
    json_object_foreach((json_t *)(uintptr_t)w->map, name, value)
    {
        const char *part = json_string_value(value);
        if (!llama_load_part_name(part))
            return llama_config_fail(err, w->path, "the index names no file of the folder for %.80s", name);
        for (i = 0; i < n && strcmp(w->parts[i], part) != 0;) ++i;
        if (i < n) continue; /* read already */
        if (n == LLAMA_PARTS_MAX)
            return llama_config_fail(err, w->path, "the index names more than %d files", LLAMA_PARTS_MAX);
        w->parts[n++] = part;
        if (llama_load_part(w, part, reading)) return -1;
    }
    if (!reading && w->mapped != json_object_size(w->map))
        return llama_config_fail(err, w->path, "the index has %zu tensors, the files have %zu",
                                 json_object_size(w->map), w->mapped);
    return 0;
}

/* A model may lack all adapters. */
static int llama_load_all(llama_load_work *w)
{
    const llama_layout *l = w->layout;
    int i, adapters = 0;
    for (i = 0; i < l->stored_n; ++i) w->by_name[i] = &l->stored[i];
    qsort(w->by_name, (size_t)l->stored_n, sizeof *w->by_name, llama_by_name);
    if (llama_load_parts(w, 0)) return -1;
    for (i = 0; i < l->stored_n; ++i) adapters += w->seen[i] && llama_is_adapter(l->stored[i].kind);
    for (i = 0; i < l->stored_n; ++i)
        if (!w->seen[i] && !(llama_is_adapter(l->stored[i].kind) && adapters == 0))
            return llama_config_fail(w->err, w->path, "%s is missing", l->stored[i].name);
    return w->state != NULL ? llama_load_parts(w, 1) : 0;
}

/* The map of a model in several files, which belongs to *root: that is to be given back. NULL with a sentence. */
static json_t *llama_index(const char *path, json_t **root, upipe_err *err)
{
    char why[JSON_LOAD_WHY];
    size_t bytes;
    char *text = llama_file(path, LLAMA_INDEX_MAX, &bytes, err);
    json_t *map;
    *root = NULL;
    if (text == NULL) return NULL;
    *root = json_load(text, bytes, why);
    free(text);
    map = json_object_get(*root, "weight_map");
    if (json_is_object(map)) return map;
    llama_config_fail(err, path, "%s", *root == NULL ? why : "has no object weight_map");
    return NULL;
}

/* Fills w->map where the model is in several files; *root is to be given back. */
static int llama_load_index(llama_load_work *w, json_t **root)
{
    char path[LLAMA_PATH];
    upipe_err *err = w->err;
    *root = NULL;
    if (llama_path_in(path, w->path, "model.safetensors", err)) return -1;
    if (access(path, F_OK) == 0) return 0;
    if (errno != ENOENT) return llama_config_fail(err, path, "cannot be looked for: %s", strerror(errno));
    if (llama_path_in(path, w->path, "model.safetensors.index.json", err)) return -1;
    if (access(path, F_OK) != 0) {
        const char *const why = strerror(errno);
        if (llama_pickled(w->path, "pytorch_model.bin", err) ||
            llama_pickled(w->path, "pytorch_model.bin.index.json", err))
            return -1;
        return llama_config_fail(err, w->path,
                                 "has neither model.safetensors nor model.safetensors.index.json: %s", why);
    }
    w->map = llama_index(path, root, err);
    return w->map == NULL ? -1 : 0;
}

static int llama_same_file(const char *folder, const char *name, const char *path, upipe_err *err)
{
    char own[LLAMA_PATH];
    struct stat a, b;
    if (llama_path_in(own, folder, name, err)) return -1;
    return stat(own, &a) == 0 && stat(path, &b) == 0 && a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

/* llama_reads -- whether path is one of the files of the model, or the adapter, in a folder: 1 or 0, or -1 with a sentence */
static inline int llama_reads(const char *folder, const char *path, upipe_err *err)
{
    static const char *const names[] = {
        "config.json",           "model.safetensors",  "model.safetensors.index.json",
        "optimizer.safetensors", LLAMA_ADAPTER_CONFIG, LLAMA_ADAPTER_MODEL};
    char own[LLAMA_PATH];
    const char *name;
    json_t *map, *root, *value;
    size_t i;
    int same = 0;
    for (i = 0; i < sizeof names / sizeof *names && !same; ++i)
        same = llama_same_file(folder, names[i], path, err);
    if (same || llama_path_in(own, folder, "model.safetensors.index.json", err) || access(own, F_OK) != 0)
        return same;
    map = llama_index(own, &root, err);
    json_object_foreach(map, name, value)
    {
        if (!same && json_is_string(value))
            same = llama_same_file(folder, json_string_value(value), path, err);
    }
    json_decref(root);
    return map == NULL ? -1 : same;
}

/* The folder's files against the layout: with a state they are read. */
static int llama_load_model(llama_load_work *w)
{
    size_t n = (size_t)w->layout->stored_n;
    json_t *root = NULL;
    int bad;
    w->family = &llama_families[w->layout->config.family];
    w->by_name = (const llama_tensor **)calloc(n, sizeof *w->by_name);
    w->seen = (char *)calloc(n, 1);
    w->host = (float *)malloc(LLAMA_CHUNK + LLAMA_CHUNK / 2);
    if (w->by_name == NULL || w->seen == NULL || w->host == NULL)
        bad = llama_config_fail(w->err, w->path, "no memory for a chunk");
    else
        bad = llama_load_index(w, &root);
    if (!bad) bad = llama_load_all(w);
    json_decref(root);
    free((void *)(uintptr_t)w->by_name);
    free(w->seen);
    free(w->host);
    return bad;
}

/* llama_load_check -- whether a folder's tensors are those of the model: names, shapes, types, and that a stored head of a
 *                     tied model is its embedding. 0, or -1 with a sentence. No weight is kept
 */
static inline int llama_load_check(const char *path, const llama_layout *layout, upipe_err *err)
{
    llama_load_work w;
    memset(&w, 0, sizeof w);
    w.err = err;
    w.layout = layout;
    w.path = path;
    return llama_load_model(&w);
}

/* llama_load_weights -- fills weights of both groups and, unless it is NULL, master from the safetensors in a
 * folder
 *   merged  an adapter of the model, which is added to its matrices in f32; NULL: none
 *
 * Values are converted to the storage type; a rank reads those alone that it holds. Every tensor of the layout must be there in its shape, and no
 * other but a tied model's head, whose values are not read, and stored rotary frequencies; a value that is not finite is refused. No call of other ranks is waited for.
 * After a failure the arrays hold anything; the sentence is in c->err.
 */
static inline upipe_status llama_load_weights(upipe_ctx *c, const char *path, const llama_state *state,
                                              const llama_adapter *merged)
{
    llama_load_work w;
    memset(&w, 0, sizeof w);
    w.c = c;
    w.err = &c->err;
    w.layout = state->layout;
    w.state = state;
    w.merged = merged;
    w.path = path;
    if (llama_load_model(&w) == 0) return UPIPE_OK;
    return c->err.status != UPIPE_OK ? c->err.status : UPIPE_ERR_BACKEND;
}

/* llama_load_adapter -- fills A and B of a layout that has those of the adapter, and of these master; errors as there */
static inline upipe_status llama_load_adapter(upipe_ctx *c, const llama_adapter *a, const llama_state *state)
{
    const llama_layout *l = state->layout;
    llama_load_work w;
    int i, bad;
    memset(&w, 0, sizeof w);
    w.c = c;
    w.err = &c->err;
    w.state = state;
    w.host = (float *)malloc(LLAMA_CHUNK + LLAMA_CHUNK / 2);
    bad = w.host == NULL ? st_fail(w.err, a->f.path, "no memory for a chunk") : 0;
    for (i = 0; i < l->n && !bad; ++i)
        if (llama_is_adapter(l->tensors[i].kind))
            bad = llama_load_read(&w, &a->f, llama_adapter_find(a, &l->tensors[i]), &l->tensors[i]);
    free(w.host);
    if (!bad) return UPIPE_OK;
    return c->err.status != UPIPE_OK ? c->err.status : UPIPE_ERR_BACKEND;
}

static inline const st_tensor *llama_load_entry(const st_file *f, const char *prefix, const llama_tensor *t,
                                                upipe_err *err)
{
    char name[96];
    const st_tensor *entry;
    snprintf(name, sizeof name, "%s%s", prefix, t->name);
    entry = st_find(f, name);
    if (entry == NULL) {
        st_fail(err, f->path, "%s is missing", name);
        return NULL;
    }
    if (entry->dtype != ST_F32) {
        st_fail(err, f->path, "%s is %s, not F32", name, st_dtype_name(entry->dtype));
        return NULL;
    }
    return llama_load_shape(f, entry, t, err) ? NULL : entry;
}

/* This rank's states of a group, from the tensors PREFIX.NAME. */
static int llama_load_states(upipe_ctx *c, const st_file *f, const llama_state *state, const char *prefix,
                             int group, float *data, void *host)
{
    const llama_layout *l = state->layout;
    int64_t at, n, there;
    int i;
    for (i = 0; i < l->stored_n; ++i) {
        const llama_tensor *t = &l->stored[i];
        const st_tensor *entry;
        llama_range r;
        if (t->is_vector != group || t->frozen) continue;
        entry = llama_load_entry(f, prefix, t, &c->err); /* parts of others' slices are checked too */
        if (entry == NULL) return -1;
        r = llama_held(state, UPIPE_ZERO_STATES, t);
        for (at = r.first; at < r.end; at += n) {
            n = r.end - at < LLAMA_CHUNK / 4 ? r.end - at : LLAMA_CHUNK / 4;
            there = llama_in_file(t, at - t->at, &n);
            if (st_read_raw(f, entry, there, n, host, &c->err) ||
                c->ops->copy(c, data + (at + r.shift), host, (size_t)n * 4) != UPIPE_OK)
                return -1;
        }
    }
    return 0;
}

static int llama_load_all_states(upipe_ctx *c, const st_file *f, const llama_state *state, void *host)
{
    const llama_layout *l = state->layout;
    const int half = llama_state_dtype(state) == UPIPE_BF16;
    int64_t expected = 0;
    int i, g;
    for (i = 0; i < l->stored_n; ++i)
        if (!l->stored[i].frozen) expected += 2 + (half && !l->stored[i].is_vector);
    for (g = 0; g < 2; ++g)
        if (llama_load_states(c, f, state, "exp_avg.", g, state->m[g], host) ||
            llama_load_states(c, f, state, "exp_avg_sq.", g, state->v[g], host))
            return -1;
    if (half && llama_load_states(c, f, state, "master.", 0, state->master, host)) return -1;
    if (f->n != expected)
        return st_fail(&c->err, f->path, "has %d tensors, not the %" PRId64 " of this model's optimizer",
                       f->n, expected);
    return 0;
}

/* llama_load_optimizer -- fills what this rank has of m, v and, in a bf16 run, master; and *run
 *
 * To be called after llama_load_weights, which fills master with less exact values. The bits are those that
 * were saved, by however many ranks, in whatever stage of ZeRO. A run of another storage type is refused. Failures as there.
 */
static inline upipe_status llama_load_optimizer(upipe_ctx *c, const char *path, const llama_state *state,
                                                llama_run *run)
{
    char file[LLAMA_PATH];
    upipe_dtype dtype = UPIPE_F32; /* gcc does not see that it is set where it is read */
    st_file f;
    void *host = malloc(LLAMA_CHUNK);
    int bad = host == NULL
                  ? llama_config_fail(&c->err, path, "no memory for a chunk")
                  : llama_path_in(file, path, "optimizer.safetensors", &c->err) || st_open(&f, file, &c->err);
    if (!bad) {
        bad = llama_load_numbers(&f, run, &dtype, &c->err);
        if (!bad && dtype != llama_state_dtype(state))
            bad = st_fail(&c->err, f.path, "is of a run in %s; a run in %s cannot go on from it",
                          upipe_dtype_name(dtype), upipe_dtype_name(llama_state_dtype(state)));
        if (!bad) bad = llama_load_all_states(c, &f, state, host);
        st_close(&f);
    }
    free(host);
    if (!bad) return UPIPE_OK;
    return c->err.status != UPIPE_OK ? c->err.status : UPIPE_ERR_BACKEND;
}

#endif

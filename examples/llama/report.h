/* report.h -- what train says at its end: a table on stdout, numbers as JSON, the pools' trace */
#ifndef LLAMA_REPORT_H
#define LLAMA_REPORT_H

#include <jansson.h>

#include "../common/files.h"
#include "run.h"

/* What the paper's public code holds, ulysses and upipe, at Llama3-8B's shape on 8 GPUs: its peak's slope, in
 * GiB per million tokens, which here is one unit (a tensor of the stream in bf16). */
static const double report_paper_slope[] = {15.1, 10.6};

static const char *report_bytes(char *out, double bytes)
{
    static const char *const units[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
    int i = 0;
    while (bytes >= 1024 && i < 4) {
        bytes /= 1024;
        ++i;
    }
    snprintf(out, 32, i == 0 ? "%.0f %s" : "%.2f %s", bytes, units[i]);
    return out;
}

/* Who shares a sequence, and how. */
static void report_ranks(const run *u)
{
    const method_choice *how = &u->o.how;
    printf("%s, %d ranks", method_kinds[how->method].name, how->ranks);
    if (how->ring > 1) printf(" in rings of %d", how->ring);
    if (how->inner > 1) printf(" of rings of %d", how->inner);
    if (how->segments > 0) printf(", %d segments", how->segments);
    if (how->overlap) printf(", overlapped");
}

static void report_memory(const run *u)
{
    const run_rank *k = &u->ranks[0];
    char a[32], b[32];
    int part;
    printf("\nmemory of rank 0, by the plan\n\n  %-12s %14s %14s\n", "", "at the peak", "at most");
    for (part = 0; part < MEMORY_PARTS; ++part)
        printf("  %-12s %14s %14s\n", memory_part_names[part], report_bytes(a, (double)k->plan.at_peak[part]),
               report_bytes(b, (double)k->plan.largest[part]));
    printf("  %-12s %14s   %zu bytes\n", "peak", report_bytes(a, (double)k->plan.peak), k->plan.peak);
    printf("  %-12s %14s   %zu bytes with alignment and holes\n", "slab",
           report_bytes(a, (double)k->plan.need), k->plan.need);
    if (k->plan.host > 0)
        printf("  %-12s %14s   %zu bytes, the second pool\n", "host", report_bytes(a, (double)k->plan.host),
               k->plan.host);
}

/* ---- --plan ---- */

/* What a token more adds to the peak, in units, without and with offload; and what to the second pool. */
typedef struct report_slopes {
    double pool[2], host[2];
} report_slopes;

/* From here to twice as many tokens. */
static int report_slope(const run *u, int offload, report_slopes *slopes)
{
    const upipe_plan_desc *d = &u->ranks[0].m.plan.desc;
    double unit, rows;
    memory_plan plans[2];
    model m[2];
    upipe_err e;
    upipe_status s = UPIPE_OK;
    int i;
    memset(&e, 0, sizeof e);
    for (i = 0; i < 2 && s == UPIPE_OK; ++i) {
        upipe_plan_desc wide = *d;
        wide.tokens *= i + 1;
        s = model_init(&m[i], &u->layout, &wide, &e);
        if (s == UPIPE_OK) s = model_cut(&m[i], u->o.how.segments, &e);
        m[i].tile_bytes = u->o.tile_bytes;
        m[i].offload = offload;
        if (s == UPIPE_OK) s = run_dry(u, &m[i], NULL, &plans[i], &e);
    }
    if (s != UPIPE_OK) return run_fail(s, &e);
    unit = (double)(d->model_dim * (int64_t)upipe_dtype_bytes(d->dtype));
    rows = (double)(m[1].rows - m[0].rows);
    slopes->pool[offload] = (double)(plans[1].peak - plans[0].peak) / rows / unit;
    slopes->host[offload] = (double)(plans[1].host - plans[0].host) / rows / unit;
    return 0;
}

static int report_plan(const run *u, report_slopes *slopes)
{
    const llama_config *c = &u->layout.config;
    int offload;
    report_ranks(u);
    printf(", chunk %d: %lld layers of %lld, %d/%d heads of %d, MLP %lld, vocabulary %lld, %s\n",
           u->ranks[0].m.plan.desc.chunk, (long long)c->layers, (long long)c->dim, c->heads, c->kv_heads,
           c->head_dim, (long long)c->hidden, (long long)c->vocab, upipe_dtype_name(u->o.dtype));
    printf("%lld tokens x %lld sequences; bytes by a dry run of a training step\n", (long long)u->o.tokens,
           (long long)u->o.batch);
    report_memory(u);
    printf("\nwhat a token on a rank adds to the peak, in units of model-dim elements, by dry runs\n");
    printf("(from %lld to %lld tokens)\n", (long long)u->o.tokens, 2 * (long long)u->o.tokens);
    for (offload = 0; offload < 2; ++offload) {
        if (report_slope(u, offload, slopes) != 0) return -1;
        printf("  layers' inputs %-22s %7.2f", offload ? "in a second pool" : "beside the rest",
               slopes->pool[offload]);
        if (offload || slopes->host[0] > 0)
            printf("   and %.2f %s", slopes->host[offload], offload ? "there" : "in a second pool");
        printf("\n");
    }
    if (c->layers == 32 && c->dim == 4096 && c->heads == 32 && c->kv_heads == 8 && u->o.how.ranks == 8 &&
        u->o.dtype == UPIPE_BF16 && u->o.how.method <= METHOD_UPIPE)
        printf("\nmeasured by the paper for Llama3-8B on 8 GPUs, layers' inputs in host memory: %.1f (%s)\n",
               report_paper_slope[u->o.how.method], method_kinds[u->o.how.method].name);
    return 0;
}

/* ---- after training ---- */

static void report_table(const run *u)
{
    const llama_config *c = &u->layout.config;
    double each = (double)u->o.tokens * (double)u->o.batch;
    report_ranks(u);
    printf(", %s: %lld parameters in %lld layers, %lld x %lld tokens a step\n", upipe_dtype_name(u->o.dtype),
           (long long)(u->layout.weights + u->layout.norm_weights), (long long)c->layers,
           (long long)u->o.batch, (long long)u->o.tokens);
    if (u->done > 0) {
        printf("steps %lld to %lld: loss %.4f -> %.4f, %.0f tokens/s\n", (long long)u->position.step + 1,
               (long long)(u->position.step + u->done), u->loss[0], u->loss[u->done - 1],
               each * (double)u->done / u->seconds);
        report_memory(u);
        printf("\nmeasured: the same to the byte, in every phase, on every rank\n");
    }
    if (u->saved > 0) printf("checkpoint: %s/checkpoint-%lld\n", u->o.save, (long long)u->saved);
    if (u->sample_n > 0) {
        printf("\n%s", u->o.prompt);
        fwrite(u->sample, 1, (size_t)u->sample_n, stdout);
        printf("\n");
    }
}

static json_t *report_parts(const size_t *part)
{
    json_t *o = json_object();
    int i;
    for (i = 0; i < MEMORY_PARTS; ++i)
        json_object_set_new(o, memory_part_names[i], json_integer((json_int_t)part[i]));
    return o;
}

/* A path may hold any byte: one that is not UTF-8 is written as the character of that number. */
static json_t *report_path(const char *path)
{
    char *text, *to;
    json_t *one;
    if (path == NULL) return json_null();
    text = to = (char *)malloc(2 * strlen(path) + 1);
    if (text == NULL) return NULL;
    while (*path != '\0') {
        size_t n = 1, most = strnlen(path, 4);
        while (n <= most && (one = json_stringn(path, n)) == NULL) ++n;
        if (n <= most) {
            json_decref(one);
            memcpy(to, path, n);
            to += n;
            path += n;
        } else {
            unsigned char byte = (unsigned char)*path++;
            *to++ = (char)(0xc0 | byte >> 6);
            *to++ = (char)(0x80 | (byte & 0x3f));
        }
    }
    one = json_stringn(text, (size_t)(to - text));
    free(text);
    return one;
}

static json_t *report_config(const run *u)
{
    const options *o = &u->o;
    const llama_config *c = &u->layout.config;
    return json_pack(
        "{s:s, s:i, s:i, s:i, s:i, s:i, s:b, "
        "s:I, s:I, s:I, s:i, s:i, s:i, s:I, s:I, s:b, s:b, s:f, s:f, s:I, s:I, "
        "s:I, s:f, s:f, s:I, s:f, "
        "s:f, s:f, s:f, s:f, s:s, s:I, s:I, s:b, s:o, s:o, s:o, s:o, s:I, s:s, s:s, s:s}",
        "method", method_kinds[o->how.method].name, "ranks", o->how.ranks, "ring", o->how.ring, "inner",
        o->how.inner, "segments", o->how.segments, "chunk", u->ranks[0].m.plan.desc.chunk, "overlap",
        o->how.overlap, "window", (json_int_t)c->window, "layers", (json_int_t)c->layers, "model_dim",
        (json_int_t)c->dim, "heads", c->heads, "kv_heads", c->kv_heads, "head_dim", c->head_dim, "ff_dim",
        (json_int_t)c->hidden, "vocab", (json_int_t)c->vocab, "untied", !c->tied, "qk_norm", c->qk_norm,
        "rope_theta", c->rope_theta, "norm_eps", c->norm_eps, "tokens", (json_int_t)o->tokens, "batch",
        (json_int_t)o->batch, "steps", (json_int_t)o->steps, "lr", o->lr, "min_lr", o->min_lr, "warmup",
        (json_int_t)o->warmup, "weight_decay", o->weight_decay, "beta1", o->beta1, "beta2", o->beta2,
        "adam_eps", o->adam_eps, "clip", o->clip, "dtype", upipe_dtype_name(o->dtype), "seed",
        (json_int_t)o->seed, "tile_bytes", (json_int_t)o->tile_bytes, "offload", o->offload, "data",
        report_path(o->data), "save", report_path(o->save), "resume", report_path(o->resume), "load",
        report_path(o->load), "text_bytes", (json_int_t)u->text.bytes, "device", device_names[o->device],
        "products", device_products(o->device), "kernels", u->ops.name);
}

static json_t *report_numbers(const double *values, int64_t n)
{
    json_t *list = json_array();
    int64_t i;
    for (i = 0; i < n; ++i) json_array_append_new(list, json_real(values[i]));
    return list;
}

/* What only a training has to say. */
static void report_json_training(const run *u, json_t *root)
{
    const run_rank *k = &u->ranks[0];
    double tokens = (double)u->o.tokens * (double)u->o.batch * (double)u->done;
    json_object_set_new(root, "first_step", json_integer((json_int_t)u->position.step + 1));
    json_object_set_new(root, "loss", report_numbers(u->loss, u->done));
    json_object_set_new(root, "grad_norm", report_numbers(u->norm, u->done));
    json_object_set_new(root, "tokens_per_s", json_real(u->done > 0 ? tokens / u->seconds : 0));
    json_object_set_new(root, "peak_bytes", json_integer((json_int_t)k->peak));
    json_object_set_new(root, "sent_bytes_per_step", json_integer((json_int_t)k->sent_bytes));
}

/* slopes: of --plan; NULL after a training. */
static int report_json(const run *u, files *all, const report_slopes *slopes)
{
    const run_rank *k = &u->ranks[0];
    FILE *f = files_open(all, u->o.json);
    json_t *root;
    int bad;
    if (f == NULL) return -1;
    root = json_pack("{s:o, s:I, s:I, s:I, s:{s:o, s:o}}", "config", report_config(u), "plan_bytes",
                     (json_int_t)k->plan.peak, "slab_bytes", (json_int_t)k->plan.need, "host_bytes",
                     (json_int_t)k->plan.host, "memory", "at_peak", report_parts(k->plan.at_peak), "largest",
                     report_parts(k->plan.largest));
    if (slopes == NULL)
        report_json_training(u, root);
    else
        json_object_set_new(root, "slope_units",
                            json_pack("{s:f, s:f, s:f, s:f}", "in_one_pool", slopes->pool[0], "host",
                                      slopes->host[0], "with_offload", slopes->pool[1], "offloaded",
                                      slopes->host[1]));
    bad = root == NULL || json_dumpf(root, f, JSON_INDENT(2) | JSON_REAL_PRECISION(17)) != 0 ||
          fputc('\n', f) == EOF;
    json_decref(root);
    if (root == NULL) cli_fail("%s: the numbers cannot be written as JSON", u->o.json);
    return files_close(all, f) != 0 || bad ? -1 : 0;
}

static int report_trace(const run *u, files *all)
{
    FILE *f = files_open(all, u->o.trace);
    int r;
    if (f == NULL) return -1;
    fprintf(f, "[\n");
    for (r = 0; r < u->o.how.ranks; ++r) {
        upipe_mem pool; /* the pool is gone, its trace is not */
        memset(&pool, 0, sizeof pool);
        pool.events = u->ranks[r].events;
        pool.events_n = u->ranks[r].events_n;
        upipe_mem_trace_write(&pool, f, r, r == 0);
    }
    fprintf(f, "]\n");
    return files_close(all, f);
}

/* All files that were asked for, or none. */
static int report_files(const run *u, files *all, const report_slopes *slopes)
{
    files_begin(all);
    if (u->o.json != NULL && report_json(u, all, slopes) != 0) return -1;
    if (u->o.trace != NULL && !u->failed && report_trace(u, all) != 0) return -1;
    return files_commit(all);
}

/* The folder of --save; made to see that it can be, and left to the first checkpoint to make again. */
static int report_reserve_folder(const run *u, const char *path)
{
    char found[LLAMA_PATH], parent[LLAMA_PATH + 4];
    struct stat about;
    upipe_err e;
    if (mkdir(path, 0777) == 0)
        return rmdir(path) == 0 ? 0 : files_fail(path, "the folder cannot be removed again");
    if (errno != EEXIST) return files_fail(path, "the folder cannot be made");
    if (stat(path, &about) == 0 && !S_ISDIR(about.st_mode)) errno = ENOTDIR;
    if (errno == ENOTDIR || access(path, R_OK | W_OK | X_OK) != 0)
        return files_fail(path, "checkpoints cannot be written there");
    /* Pruning would remove another training's, and resuming could take them. */
    if (llama_checkpoint_find(path, found, &e) != 0) return 0;
    snprintf(parent, sizeof parent, "%s/..", u->o.resume != NULL ? u->from : ".");
    if (u->o.resume != NULL && files_same(path, parent)) return 0;
    return cli_fail(
        "%s holds %s already, which this training does not continue: --resume it, or save elsewhere", path,
        strcmp(found, path) == 0 ? "a model" : found);
}

/* Names that cannot be written are found before hours of work. */
static int report_reserve(const run *u, files *all)
{
    int bad;
    if (u->o.save != NULL && report_reserve_folder(u, u->o.save) != 0) return -1;
    files_begin(all);
    bad = (u->o.json != NULL && files_reserve(all, u->o.json, u->o.data) != 0) ||
          (u->o.trace != NULL && files_reserve(all, u->o.trace, u->o.data) != 0);
    files_abandon(all);
    return bad ? -1 : 0;
}

#endif

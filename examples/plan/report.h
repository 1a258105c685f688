/* report.h -- what upipe-plan says: a verdict as text and as JSON */
#ifndef PLAN_REPORT_H
#define PLAN_REPORT_H

#include "../common/files.h"
#include "../common/paper.h"
#include "options.h"
#include "planner.h"

static const char *report_bytes(char out[32], double bytes)
{
    static const char *const units[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
    int i = 0;
    while (fabs(bytes) >= 1024 && i < 4) {
        bytes /= 1024;
        ++i;
    }
    snprintf(out, 32, i == 0 ? "%.0f %s" : "%.2f %s", bytes, units[i]);
    return out;
}

/* 5M, 96k, 12345: as --tokens reads it. */
static const char *report_tokens(char out[32], int64_t tokens)
{
    if (tokens > 0 && tokens % (1 << 20) == 0)
        snprintf(out, 32, "%lldM", (long long)(tokens >> 20));
    else if (tokens > 0 && tokens % 1024 == 0)
        snprintf(out, 32, "%lldk", (long long)(tokens >> 10));
    else
        snprintf(out, 32, "%lld", (long long)tokens);
    return out;
}

/* The flags that make this setting. */
static const char *report_flags(char *out, size_t n, const setting *s)
{
    const method_choice *how = &s->how;
    const program *as = as_program(s->as.program);
    char text[ACTIVATIONS_TEXT];
    size_t used = (size_t)snprintf(out, n, "--method %s",
                                   as != NULL ? as_method_of(s)->name : method_kinds[how->method].name);
    const struct {
        const char *name;
        int value, shown;
    } all[] = {{"chunk", how->chunk, how->chunk > 0},
               {"ring", how->ring,
                how->ring > 1 && (as != NULL || method_kinds[how->method].shape == METHOD_IS_GRID)},
               {"inner", how->inner, how->inner > 0},
               {"segments", how->segments, how->segments > 0}};
    size_t i;
    for (i = 0; i < sizeof all / sizeof *all; ++i)
        if (all[i].shown)
            used += (size_t)snprintf(out + used, n - used, " --%s %d", all[i].name, all[i].value);
    if (as != NULL)
        used += (size_t)snprintf(out + used, n - used, " --loss %s --mlp %s%s%s%s",
                                 s->as.loss ? "tiled" : "whole", s->as.mlp ? "tiled" : "whole",
                                 s->as.fp8 ? " --fp8" : "", s->zero != 3 ? " --zero 1" : "",
                                 s->as.all ? " --keep-all" : "");
    used += (size_t)snprintf(out + used, n - used, "%s", how->overlap ? " --overlap" : "");
    if (!s->as.all)
        used += (size_t)snprintf(out + used, n - used, " --activations %s",
                                 activations_text(text, &s->activations));
    snprintf(out + used, n - used, "%s%s", s->offload_optimizer ? " --offload-optimizer" : "",
             s->offload_weights ? " --offload-weights" : "");
    return out;
}

static double report_rate(const setting *s, const estimate *e)
{
    return e->seconds > 0 ? (double)s->tokens * (double)(s->batch * s->accumulate) / s->how.ranks / e->seconds
                          : 0;
}

/* Whose attention sets the time, and where its rates are from. */
static void report_attention(const planner *p, const setting *s)
{
    const char *from;
    double part[2];
    int guess;
    attention_part(part, &from, &guess, s, p->m);
    printf("attention: %s, forward %.0f and backward %.0f TFLOP/s: the machine's rates (%s)",
           kernel_names[s->attention], part[0] * p->m->rate[MACHINE_ATTN_FWD] / 1e12,
           part[1] * p->m->rate[MACHINE_ATTN_BWD] / 1e12, p->m->origin[MACHINE_ATTN_FWD]);
    if (part[0] != 1 || part[1] != 1) printf(" times %.2f and %.2f (%s)", part[0], part[1], from);
    printf("%s\n", guess ? ", a guess for this card" : "");
}

static void report_head(const job *j, const planner *p, const setting *s)
{
    char flags[256], tokens[32];
    const llama_config *c = &j->config;
    printf("%s, %lld layers of %lld, %d/%d heads of %d, on %d ranks of %s: %s tokens x %lld", j->o.model,
           (long long)c->layers, (long long)c->dim, c->heads, c->kv_heads, c->head_dim, setting_ranks(s),
           j->machine.name, report_tokens(tokens, s->tokens), (long long)s->batch);
    if (s->replicas > 1) printf(" in each of %d replicas", s->replicas);
    if (s->accumulate > 1) printf(", %lld micro-batches a step", (long long)s->accumulate);
    printf("\n");
    printf("%s, %s\n", report_flags(flags, sizeof flags, s),
           s->as.program > 0 ? "not this library" : p->ops->name);
    if (s->as.program > 0) printf("%s: %s\n", as_program(s->as.program)->name, as_program(s->as.program)->is);
    if (s->attention != KERNEL_MACHINE || s->as.program > 0) report_attention(p, s);
    if (j->note[0] != '\0') printf("the trainer refuses this model (%s); planned without that\n", j->note);
}

static void report_resource(const char *name, double bytes, double limit, const char *of)
{
    char a[32], b[32], c[32];
    printf("  %-5s %11s of %11s %s, %s %s\n", name, report_bytes(a, bytes), report_bytes(b, limit), of,
           report_bytes(c, fabs(limit - bytes)), bytes > limit ? "too much" : "left");
}

/* How even packed documents are over ranks. Teams have all tokens of their heads. */
static void report_documents(const setting *s, const packed_balance *b)
{
    const double one = packed_one(s);
    char a[32], c[32];
    int64_t i, shortest = INT64_MAX, longest = 0;
    int rank, step;
    for (i = 0; i < s->borders_n; ++i) {
        const int64_t n = s->borders[i + 1] - s->borders[i];
        shortest = n < shortest ? n : shortest;
        longest = n > longest ? n : longest;
    }
    printf(
        "\n%lld documents with %s to %s tokens: %.4g pairs of a query and a key a head, %.3f of one document's\n",
        (long long)s->borders_n, report_tokens(a, shortest), report_tokens(c, longest), b->all, b->all / one);
    if (b->ring == 1) {
        printf("every rank sees the same, for its heads\n");
        return;
    }
    printf("  %-10s %12s %12s %20s\n", "ring rank", "pairs", "of the mean", "of a step at most");
    for (rank = 0; rank < b->ring; ++rank) {
        double sum = 0, most = 0;
        for (step = 0; step < b->ring; ++step) {
            sum += b->step[step * b->ring + rank];
            most = fmax(most, b->step[step * b->ring + rank]);
        }
        printf("  %-10d %12.4g %12.2f %20.4g\n", rank, sum, sum * b->ring / b->all, most);
    }
    printf(
        "used of the ranks' time: %.2f where they wait for each other in every step (P2P), %.2f where once\n",
        b->all / (b->apart * b->ring), b->all / (b->sum * b->ring));
}

static void report_verdict(const job *j, const planner *p, const setting *s, const estimate *e)
{
    const verdict v = estimate_verdict(e, p->m);
    char a[32];
    int i;
    report_head(j, p, s);
    printf("\n%s; the %s binds\n", v.fits ? "it fits" : "it does NOT fit",
           strcmp(v.binding, "gpu") == 0 ? "memory of the GPU" : "memory of the host");
    if (p->m->gpu > 0) report_resource("gpu", e->gpu, v.gpu_limit, "of the largest rank");
    report_resource("host", e->host, v.host_limit, "of the fullest node");
    if (p->m->gpu > 0)
        printf("  link  %11s between a rank's GPU and the host in a step\n",
               report_bytes(a, estimate_link(e)));
    printf("\n  %-20s %12s\n", "phases of the step", "at most");
    for (i = 0; i < e->phases; ++i)
        printf("  %-20s %12s\n", e->phase[i].name, report_bytes(a, e->phase[i].bytes));
    printf("\n  %-20s %12s\n", "components", "at the peak");
    for (i = 0; i < e->parts; ++i)
        printf("  %-20s %12s\n", e->part[i].name, report_bytes(a, e->part[i].bytes));
    printf("\nestimated %.2f s a step, %.2f tokens/s a GPU\n", e->seconds, report_rate(s, e));
    for (i = 0; i < SHARES; ++i)
        if (e->share[i] > 0)
            printf("  %-20s %10.3f s %5.1f %%\n", share_names[i], e->share[i],
                   100 * e->share[i] / e->seconds);
    if (p->m->gpu > 0)
        printf("\nmeasured runs like this: %s\n",
               s->as.program == 0
                   ? "none of this library on GPUs; its bytes are exact, its time is an estimate"
               : as_method_of(s)->measured[0] != '\0' ? as_method_of(s)->measured
                                                      : "none");
}

/* With its sign. */
static const char *report_change(char out[32], double bytes)
{
    char text[32];
    snprintf(out, 32, "%s%.30s", bytes < 0 ? "-" : "+", report_bytes(text, fabs(bytes)));
    return out;
}

static void report_advice(const advice_item *all, int n)
{
    char a[32], b[32], c[32];
    int i;
    if (n > 0) printf("\nwhat would need less, and what it changes\n");
    for (i = 0; i < n; ++i)
        printf("  %-38s GPU %s, host %s, link %s, %+.1f s a step%s\n", all[i].flags,
               report_change(a, -all[i].gpu), report_change(b, -all[i].host), report_change(c, all[i].link),
               all[i].seconds, all[i].fits ? ": fits" : "");
}

/* A table of the attention block's phases; `unit` bytes of the dry run are one. With activations in the rank's pool
 * Ulysses has the inputs of the other layers too, as the paper's first row. */
static void report_phases(const upipe_dry *dry, const setting *s, double unit, double stages)
{
    static const char *const columns[UPIPE_PHASES] = {
        "before attention",     "inp_all_to_all",     "attention kernel",     "out_all_to_all",
        "before bwd attention", "bwd out_all_to_all", "bwd attention kernel", "bwd inp_all_to_all"};
    const llama_config *c = &s->layout->config;
    const double group = (double)c->heads / c->kv_heads, layers = (double)c->layers;
    const int here = s->how.method == METHOD_ULYSSES && s->activations.kind == ACTIVATIONS_AC;
    const paper_row row = s->how.method == METHOD_UPIPE ? PAPER_UPIPE
                          : here                        ? PAPER_ULYSSES
                                                        : PAPER_ULYSSES_OFFLOAD;
    int i;
    printf("\nthe attention block alone, in units of %.3f MiB (tokens of a rank x model dim)\n",
           unit / (1 << 20));
    printf("  %-22s %8s %8s\n", "", "exact", "paper");
    for (i = 0; i < (int)UPIPE_PHASES; ++i)
        printf("  %-22s %8.3f %8.3f\n", columns[i],
               (double)dry->mem.phase_peak[i] / unit + (here ? layers - 1 : 0),
               paper_units(row, (upipe_phase)i, group, stages, 1, layers));
}

/* The attention block alone, of rank 0: exact, and the paper's tables. The dry run is that of upipe_dry_layer: x, a
 * forward, a gradient of O, a backward. */
static void report_block(const planner *p, const setting *s)
{
    upipe_dry *dry = (upipe_dry *)estimate_memory(1, sizeof *dry);
    upipe_layer l = {.wq = dry, .wk = dry, .wv = dry, .wo = dry}; /* never read */
    upipe_err err;
    model m;
    if (setting_model(&m, s, 0, &err) == UPIPE_OK && upipe_dry_init(dry, &m.plan, p->ops) == UPIPE_OK) {
        l.plan = &m.plan;
        l.mask.causal = 1;
        l.tile_rows = s->layout->config.dim;
        if (upipe_dry_layer(dry, &l, 1) == UPIPE_OK)
            report_phases(dry, s, (double)upipe_plan_unit_bytes(&m.plan),
                          (double)s->layout->config.heads / m.plan.desc.chunk);
    }
    free(dry);
}

/* ---- JSON ---- */

/* jansson has no memory: the program ends, as estimate_memory ends it. */
static void report_lost(void)
{
    cli_fail("out of memory: what is to be written as JSON");
    exit(EXIT_RUN);
}

static void report_set(json_t *object, const char *key, json_t *value)
{
    if (json_object_set_new(object, key, value) != 0) report_lost();
}

static void report_append(json_t *array, json_t *value)
{
    if (json_array_append_new(array, value) != 0) report_lost();
}

/* Bytes and pairs are counted in floating point, and written as whole numbers. */
static json_t *report_whole(double n)
{
    return fabs(n) < 0x1p63 ? json_integer(llrint(n)) : json_real(n);
}

/* report_write -- the file of --json, and no more of `root`; EXIT_RUN with the sentence out where it cannot be written. It is
 * written to the file, which remembers what failed: jansson's own text loses a key where memory is out, and says nothing */
static int report_write(files *all, const char *path, json_t *root)
{
    FILE *f;
    files_begin(all);
    f = files_open(all, path);
    if (f != NULL && json_dumpf(root, f, JSON_INDENT(2) | JSON_REAL_PRECISION(9)) != 0 && !ferror(f)) {
        files_abandon(all);
        report_lost();
    }
    json_decref(root);
    if (f != NULL) fputc('\n', f);
    return f == NULL || files_close(all, f) != 0 || files_commit(all) != 0 ? EXIT_RUN : 0;
}

static json_t *report_json_parts(const estimate_part *part, int n)
{
    json_t *all = json_array();
    int i;
    for (i = 0; i < n; ++i)
        report_append(all, json_pack("{ss so}", "name", part[i].name, "bytes", report_whole(part[i].bytes)));
    return all;
}

static json_t *report_json_advice(const advice_item *help, int n)
{
    json_t *all = json_array();
    int i;
    for (i = 0; i < n; ++i)
        report_append(all,
                      json_pack("{ss so so so sf sb}", "flags", help[i].flags, "gpu_bytes_saved",
                                report_whole(help[i].gpu), "host_bytes_node_saved",
                                report_whole(help[i].host), "link_bytes_more", report_whole(help[i].link),
                                "seconds_more", help[i].seconds, "fits", help[i].fits));
    return all;
}

/* report_json -- what every file has, of one setting */
static json_t *report_json(const planner *p, const setting *s, const estimate *e, int fits,
                           const advice_item *help, int n)
{
    json_t *root = json_pack("{sb so so so ss sf sf}", "fits", fits, "gpu_bytes", report_whole(e->gpu),
                             "host_bytes_node", report_whole(e->host), "link_bytes",
                             report_whole(estimate_link(e)), "binding", estimate_verdict(e, p->m).binding,
                             "seconds_step", e->seconds, "tokens_per_s_per_gpu", report_rate(s, e));
    if (s->as.program > 0) {
        report_set(root, "as", json_string(as_program(s->as.program)->name));
        report_set(root, "method", json_string(as_method_of(s)->name));
        report_set(root, "measured", json_string(as_method_of(s)->measured));
    }
    report_set(root, "phases", report_json_parts(e->phase, e->phases));
    report_set(root, "components", report_json_parts(e->part, e->parts));
    report_set(root, "advice", report_json_advice(help, n));
    return root;
}

static json_t *report_json_documents(const setting *s, const packed_balance *b)
{
    json_t *steps = json_array();
    int step, rank;
    for (step = 0; step < b->ring; ++step) {
        json_t *pairs = json_array();
        for (rank = 0; rank < b->ring; ++rank)
            report_append(pairs, report_whole(b->step[step * b->ring + rank]));
        report_append(steps, pairs);
    }
    return json_pack("{sI so so sf sf sf so}", "number", (json_int_t)s->borders_n, "pairs",
                     report_whole(b->all), "pairs_of_one", report_whole(packed_one(s)), "used_p2p",
                     b->all / (b->apart * b->ring), "used_all_gather", b->all / (b->sum * b->ring),
                     "slowest_over_mean", b->sum * b->ring / b->all, "steps", steps);
}

#endif

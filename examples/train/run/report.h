/* report.h -- what train says at its end: a table on stdout, numbers as JSON, the pools' trace */
#ifndef LLAMA_REPORT_H
#define LLAMA_REPORT_H

#include "../../common/files.h"
#include "../../common/json.h"
#include "../../common/trace.h"
#include "plan.h"

/* What the paper's public code holds, ulysses and upipe, at Llama3-8B's shape on 8 GPUs: its peak's slope, in
 * GiB per million tokens, which here is one unit (a tensor of the stream in bf16). 0: of other methods. */
static const double report_paper_slope[METHODS] = {[METHOD_ULYSSES] = 15.1, [METHOD_UPIPE] = 10.6};

static inline const char *report_bytes(char *out, double bytes)
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
    if (u->o.replicas > 1) printf(" in %d replicas", u->o.replicas);
    if (how->ring > 1) printf(" in rings of %d", how->ring);
    if (how->inner > 1) printf(" of rings of %d", how->inner);
    if (how->segments > 0) printf(", %d segments", how->segments);
    if (how->overlap) printf(", overlapped");
}

static void report_memory(const run *u, int rank)
{
    const memory_plan *p = &u->ranks[rank].plan;
    char a[32], b[32];
    int part;
    printf("\nmemory of rank %d, by the plan\n\n  %-12s %14s %14s\n", rank, "", "at the peak", "at most");
    for (part = 0; part < MEMORY_PARTS; ++part)
        printf("  %-12s %14s %14s\n", memory_part_names[part], report_bytes(a, (double)p->at_peak[part]),
               report_bytes(b, (double)p->largest[part]));
    printf("  %-12s %14s   %zu bytes\n", "peak", report_bytes(a, (double)p->peak), p->peak);
    printf("  %-12s %14s   %zu bytes with alignment and holes\n", "slab", report_bytes(a, (double)p->need),
           p->need);
    if (p->host == 0) return;
    printf("  %-12s %14s   %zu bytes, the second pool\n", "host", report_bytes(a, (double)p->host), p->host);
    printf("  %-12s %14s   %zu bytes with alignment and holes\n", "host slab",
           report_bytes(a, (double)p->host_need), p->host_need);
}

/* ---- --plan ---- */

/* Bytes of the largest rank, each number's own, and of all ranks together. */
typedef struct report_total {
    double peak, slab, host, host_slab;
    double slabs, host_slabs; /* of all ranks */
} report_total;

static report_total report_all(const run *u)
{
    report_total t;
    int r;
    memset(&t, 0, sizeof t);
    for (r = 0; r < u->o.how.ranks; ++r) {
        const memory_plan *p = &u->ranks[r].plan;
        t.peak = fmax(t.peak, (double)p->peak);
        t.slab = fmax(t.slab, (double)p->need);
        t.host = fmax(t.host, (double)p->host);
        t.host_slab = fmax(t.host_slab, (double)p->host_need);
        t.slabs += (double)p->need;
        t.host_slabs += (double)p->host_need;
    }
    return t;
}

/* The rank whose slab is the largest: the first of them. */
static int report_largest(const run *u)
{
    int r, largest = 0;
    for (r = 1; r < u->o.how.ranks; ++r)
        if (u->ranks[r].plan.need > u->ranks[largest].plan.need) largest = r;
    return largest;
}

/* What more tokens add: of the largest rank in units, for one more on each rank; of all ranks in bytes, for one
 * more of the sequence. */
static int report_slope(const run *u, report_total *slope)
{
    const upipe_plan_desc *d = &u->ranks[0].m.plan.desc;
    const double rows = (double)(u->o.tokens * u->o.batch * u->o.replicas) / u->o.how.ranks;
    const double unit = rows * (double)(d->model_dim * (int64_t)upipe_dtype_bytes(d->dtype));
    const report_total one = report_all(u);
    report_total two;
    run wide = *u; /* from here to twice as many tokens */
    int status;
    wide.o.tokens *= 2;
    status = run_plan(&wide);
    if (status == 0) {
        two = report_all(&wide);
        slope->peak = (two.peak - one.peak) / unit;
        slope->slab = (two.slab - one.slab) / unit;
        slope->host = (two.host - one.host) / unit;
        slope->host_slab = (two.host_slab - one.host_slab) / unit;
        slope->slabs = (two.slabs - one.slabs) / (double)u->o.tokens;
        slope->host_slabs = (two.host_slabs - one.host_slabs) / (double)u->o.tokens;
    }
    free(wide.ranks);
    return status;
}

static int report_plan(const run *u, report_total *slope)
{
    const llama_config *c = &u->layout.config;
    const int rank = report_largest(u);
    const memory_plan *p = &u->ranks[rank].plan;
    const report_total all = report_all(u);
    char a[32], b[32], kept[ACTIVATIONS_TEXT];
    report_ranks(u);
    printf(", chunk %d: %lld layers of %lld, %d/%d heads of %d, MLP %lld, vocabulary %lld, %s\n",
           u->ranks[0].m.plan.desc.chunk, (long long)c->layers, (long long)c->dim, c->heads, c->kv_heads,
           c->head_dim, (long long)c->hidden, (long long)c->vocab, upipe_dtype_name((upipe_dtype)u->o.dtype));
    printf(
        "%lld tokens x %lld sequences, activations %s, ZeRO %d, kernels %s; bytes by a dry run of a training "
        "step\n",
        (long long)u->o.tokens, (long long)u->o.batch, activations_text(kept, &u->o.activations), u->o.zero,
        u->ops.name);
    report_memory(u, rank);
    printf("\nall ranks together: slabs %s, second pools %s\n", report_bytes(a, all.slabs),
           report_bytes(b, all.host_slabs));
    printf("rank %d in a step: sends %s, copies %s between its pools\n", rank,
           report_bytes(a, (double)p->sent), report_bytes(b, (double)p->moved));
    if (report_slope(u, slope) != 0) return -1;
    printf(
        "\nwhat one more token on each rank adds to the largest, in units of model-dim elements, by dry runs\n");
    printf("(from %lld to %lld tokens)\n", (long long)u->o.tokens, 2 * (long long)u->o.tokens);
    printf("  peak %9.2f   slab %9.2f\n", slope->peak, slope->slab);
    printf("  host %9.2f   slab %9.2f   the second pool\n", slope->host, slope->host_slab);
    printf("one more of the sequence, all ranks together: slabs %.0f bytes, second pools %.0f bytes\n",
           slope->slabs, slope->host_slabs);
    if (c->layers == 32 && c->dim == 4096 && c->heads == 32 && c->kv_heads == 8 &&
        u->o.how.ranks / u->o.replicas == 8 && u->o.dtype == UPIPE_BF16 &&
        report_paper_slope[u->o.how.method] > 0)
        printf("\nmeasured by the paper for Llama3-8B on 8 GPUs, layers' inputs in host memory: %.1f (%s)\n",
               report_paper_slope[u->o.how.method], method_kinds[u->o.how.method].name);
    return 0;
}

/* ---- after training ---- */

/* Bytes that a device of its own gave to this process's ranks. */
typedef struct report_driver {
    size_t peak; /* most that the driver had given out */
    size_t plan; /* the plans' slabs, and what tables of operations hold beside them */
} report_driver;

static report_driver report_given(const run *u)
{
    report_driver given = {0, 0};
    int r;
    for (r = u->net.first; r < u->net.first + u->net.here; ++r) {
        const run_rank *k = &u->ranks[r];
        if (k->driver_peak > given.peak) given.peak = k->driver_peak;
        given.plan += upipe_mem_span(k->plan.need) + device_bytes(&k->p.d) + device_bytes(&k->p.line.d) +
                      device_bytes(&k->ahead.d);
    }
    return given;
}

/* The prompt and the sample as numbers: examples/train/tokenize.py --decode makes a text of the line. */
static void report_ids(const run *u)
{
    int64_t i;
    printf("ids:");
    for (i = 0; i < u->prompt_n; ++i) printf(" %d", (int)u->prompt[i]);
    printf(" |");
    for (i = 0; i < u->sample_n; ++i) printf(" %d", (int)u->sample[i]);
}

/* The same of bytes, which are one text. */
static void report_sample(const run *u)
{
    char *text = (char *)(void *)u->sample; /* in its own place: a byte is no longer than its number */
    int64_t i;
    for (i = 0; i < u->sample_n; ++i) text[i] = (char)u->sample[i];
    cli_text(stdout, u->o.prompt, strlen(u->o.prompt), "\n\t");
    cli_text(stdout, text, (size_t)u->sample_n, "\n\t");
}

static void report_table(const run *u)
{
    const llama_config *c = &u->layout.config;
    const llama_layout *l = &u->layout;
    const int64_t trained = l->weights + l->vectors,
                  frozen = l->frozen[LLAMA_WEIGHTS] + l->frozen[LLAMA_VECTORS];
    double each = run_step_tokens(u);
    int64_t i;
    report_ranks(u);
    printf(", %s: %lld parameters", upipe_dtype_name((upipe_dtype)u->o.dtype), (long long)(trained + frozen));
    if (frozen > 0) printf(", %lld of them trained,", (long long)trained);
    printf(" in %lld layers, %lld x %lld tokens a step\n", (long long)c->layers,
           (long long)run_step_sequences(&u->o), (long long)u->o.tokens);
    if (u->done > 0) {
        printf("steps %lld to %lld: loss %.4f -> %.4f, %.0f tokens/s\n", (long long)u->position.step + 1,
               (long long)(u->position.step + u->done), u->loss[0], u->loss[u->done - 1],
               each * (double)u->done / u->seconds);
        report_memory(u, 0);
        printf("\nmeasured: the same to the byte, in every phase, on every rank\n");
        if (u->o.device == DEVICE_CUDA) {
            const report_driver given = report_given(u);
            printf("given out by the driver: %zu bytes; planned for slabs and workspaces: %zu bytes\n",
                   given.peak, given.plan);
        }
    }
    for (i = 0; i < u->evals_n; ++i)
        printf("evaluation after step %lld: loss %.4f, perplexity %.4f, %lld targets\n",
               (long long)u->evals[i].step, u->evals[i].loss, exp(u->evals[i].loss),
               (long long)u->evals[i].targets);
    if (u->saved >= 0) printf("checkpoint: %s/checkpoint-%lld\n", u->o.save, (long long)u->saved);
    if (u->sample_n >= 0) {
        printf("\nsample, temperature %g: what the model writes after the prompt\n", u->o.temperature);
        if (u->o.tokens_file != NULL)
            report_ids(u);
        else
            report_sample(u);
        printf("\n");
    }
}

/* What was asked for, with the defaults filled in, and what was found. */
static void report_config(FILE *f, const run *u)
{
    options o = u->o;
    o.how.chunk = u->ranks[0].m.plan.desc.chunk;
    fputs("  \"config\": {\n", f);
    flags_json(f, &option_flags, &o);
    fprintf(f, "    \"text_bytes\": %" PRId64 ",\n    \"products\": \"%s\",\n    \"kernels\": ",
            u->text.ids.bytes, device_products(o.device));
    json_quote(f, u->ops.name);
    fputs("\n  },\n", f);
}

/* Rates that are not theta's, and what goes with them. */
static void report_rates(FILE *f, const llama_rates *r, int pairs)
{
    int p;
    fprintf(f, "  \"rope\": {\"factor\": %.17g, \"rates\": [", r->factor > 0 ? r->factor : 1);
    for (p = 0; p < pairs; ++p) fprintf(f, "%s%.17g", p > 0 ? ", " : "", r->value[p]);
    fputs("]},\n", f);
}

static void report_parts(FILE *f, const char *name, const size_t *part, const char *ending)
{
    int i;
    fprintf(f, "    \"%s\": {", name);
    for (i = 0; i < MEMORY_PARTS; ++i)
        fprintf(f, "%s\"%s\": %zu", i > 0 ? ", " : "", memory_part_names[i], part[i]);
    fprintf(f, "}%s\n", ending);
}

static void report_numbers(FILE *f, const char *name, const double *values, int64_t n)
{
    int64_t i;
    fprintf(f, "  \"%s\": [", name);
    for (i = 0; i < n; ++i) fprintf(f, "%s\n    %.17g", i > 0 ? "," : "", values[i]);
    fputs("\n  ],\n", f);
}

/* What only a training has to say. */
static void report_json_training(FILE *f, const run *u)
{
    const run_rank *k = &u->ranks[0];
    double tokens = run_step_tokens(u) * (double)u->done;
    int64_t i;
    fprintf(f, "  \"first_step\": %" PRId64 ",\n", u->position.step + 1);
    report_numbers(f, "loss", u->loss, u->done);
    report_numbers(f, "grad_norm", u->norm, u->done);
    fputs("  \"eval\": [", f);
    for (i = 0; i < u->evals_n; ++i) {
        const run_eval *v = &u->evals[i];
        fprintf(f, "%s\n    {\"step\": %" PRId64 ", \"loss\": ", i > 0 ? "," : "", v->step);
        fprintf(f, isfinite(v->loss) ? "%.17g" : "null", v->loss);
        fprintf(f, ", \"targets\": %" PRId64 "}", v->targets);
    }
    fputs("\n  ],\n", f);
    fprintf(f, "  \"tokens_per_s\": %.17g,\n", u->done > 0 ? tokens / u->seconds : 0);
    fprintf(f, "  \"peak_bytes\": %zu,\n  \"sent_bytes_per_step\": %" PRId64 ",\n", k->peak, k->sent_bytes);
    if (u->o.device == DEVICE_CUDA && u->done > 0) {
        const report_driver given = report_given(u);
        fprintf(f, "  \"driver_peak_bytes\": %zu,\n  \"driver_plan_bytes\": %zu,\n", given.peak, given.plan);
    }
}

/* What only a plan has to say. */
static void report_json_plan(FILE *f, const run *u, const report_total *slope)
{
    const report_total all = report_all(u);
    fprintf(f, "  \"rank\": %d,\n  \"host_slab_bytes\": %zu,\n", report_largest(u),
            u->ranks[report_largest(u)].plan.host_need);
    fprintf(f, "  \"all_ranks\": {\"slab_bytes\": %.0f, \"host_slab_bytes\": %.0f},\n", all.slabs,
            all.host_slabs);
    fprintf(f,
            "  \"slope_units\": {\"peak\": %.17g, \"slab\": %.17g, \"host\": %.17g, \"host_slab\": %.17g},\n",
            slope->peak, slope->slab, slope->host, slope->host_slab);
    fprintf(f, "  \"slope_bytes_all_ranks\": {\"slab\": %.17g, \"host_slab\": %.17g},\n", slope->slabs,
            slope->host_slabs);
}

/* slope: of --plan, whose rank is the largest; NULL after a training, whose rank is 0. */
static int report_json(const run *u, files *all, const report_total *slope)
{
    const run_rank *k = &u->ranks[slope != NULL ? report_largest(u) : 0];
    FILE *f = files_open(all, u->o.json);
    if (f == NULL) return -1;
    fputs("{\n", f);
    report_config(f, u);
    if (k->m.rates.own) report_rates(f, &k->m.rates, llama_rope_dims(&u->layout.config) / 2);
    fprintf(f, "  \"plan_bytes\": %zu,\n  \"slab_bytes\": %zu,\n  \"host_bytes\": %zu,\n", k->plan.peak,
            k->plan.need, k->plan.host);
    fprintf(f, "  \"plan_sent_bytes\": %" PRId64 ",\n  \"plan_moved_bytes\": %" PRId64 ",\n", k->plan.sent,
            k->plan.moved);
    if (slope == NULL)
        report_json_training(f, u);
    else
        report_json_plan(f, u, slope);
    fputs("  \"memory\": {\n", f);
    report_parts(f, "at_peak", k->plan.at_peak, ",");
    report_parts(f, "largest", k->plan.largest, "");
    fputs("  }\n}\n", f);
    return files_close(all, f);
}

static void report_trace_rank(void *user, FILE *f, int rank)
{
    const run *u = (const run *)user;
    trace_write(u->ranks[rank].events, u->ranks[rank].events_n, f, rank, rank == 0);
}

/* All processes together; rank 0's writes. */
static int report_trace(run *u, files *all)
{
    FILE *f = world_is_root(&u->net) ? files_open(all, u->o.trace) : NULL;
    int r, bad = world_is_root(&u->net) && f == NULL ? -1 : 0;
    if (f != NULL) fprintf(f, "[\n");
    for (r = 0; r < u->o.how.ranks; ++r)
        if (world_text(&u->net, f, r, report_trace_rank, u) != 0) bad = -1;
    if (f == NULL) return bad;
    fprintf(f, "]\n");
    return files_close(all, f) != 0 ? -1 : bad;
}

/* All files that were asked for, or none. */
static int report_files(run *u, files *all, const report_total *slope)
{
    const int is_root = world_is_root(&u->net);
    int bad = 0;
    files_begin(all);
    if (is_root && u->o.json != NULL) bad = report_json(u, all, slope);
    if (u->o.trace != NULL && !u->failed && report_trace(u, all) != 0) bad = -1;
    return bad != 0 ? -1 : is_root ? files_commit(all) : 0;
}

/* Whether two names are one folder; -1: one of them cannot be looked at, errno says why. */
static int report_same_folder(const char *one, const char *other)
{
    errno = 0;
    if (files_same(one, other)) return 1;
    return errno == 0 || errno == ENOENT ? 0 : -1;
}

/* The folder of --save, which is this training's from here on. */
static int report_reserve_folder(run *u, const char *path)
{
    char found[LLAMA_PATH], parent[LLAMA_PATH + 4];
    const char *what;
    upipe_err e;
    int there, same = 0, ours = 0;
    if (files_parents(NULL, path) != 0)
        return cli_fail("%s: the folder cannot be made: %s", path, strerror(errno));
    if (llama_lock_init(&u->lock, path, &e) != 0) return cli_fail("%s", e.text);
    /* Pruning would remove another training's, and resuming could take them. */
    there = llama_names_fit(path, &e) != 0 ? -1 : llama_checkpoint_find(path, found, &e);
    if (there < 0) return cli_fail("%s", e.text);
    if (there > 0) return 0;
    snprintf(parent, sizeof parent, "%s/..", u->o.resume != NULL ? u->from : ".");
    what = strcmp(found, path) == 0 ? "a model" : found;
    if (u->o.resume != NULL) same = report_same_folder(path, parent);
    if (same > 0) ours = report_same_folder(found, u->from);
    if (same < 0 || ours < 0)
        return cli_fail("%s cannot be compared with %s: %s", path, u->from, strerror(errno));
    if (ours > 0) return 0;
    if (same == 0)
        return cli_fail(
            "%s holds %s already, which this training does not continue: --resume it, or save elsewhere",
            path, what);
    return cli_fail(
        "%s holds %s, which a later --resume %s would take instead of what follows %s: resume from "
        "it, save elsewhere, or remove it",
        path, what, path, u->from);
}

/* The folder of --save-adapter is not there, and can be made. */
static int report_reserve_adapter(const char *path)
{
    if (files_parents(NULL, path) != 0 || mkdir(path, 0777) != 0)
        return cli_fail("--save-adapter %s: the folder cannot be made: %s", path, strerror(errno));
    return rmdir(path) == 0 ? 0 : cli_fail("%s cannot be removed: %s", path, strerror(errno));
}

/* Nor one that it reads tokens of. */
static int report_spare_tokens(const run *u, const char *path)
{
    int i;
    for (i = 0; i < u->text.ids.files && u->o.data == NULL; ++i)
        if (files_spare(path, "--tokens-file", u->text.ids.file[i].path) != 0) return -1;
    for (i = 0; i < u->held.ids.files; ++i)
        if (files_spare(path, "--eval", u->held.ids.file[i].path) != 0) return -1;
    for (i = 0; i < u->text.mask.files; ++i)
        if (files_spare(path, "--loss-mask", u->text.mask.file[i].path) != 0) return -1;
    for (i = 0; i < u->held.mask.files; ++i)
        if (files_spare(path, "--eval-mask", u->held.mask.file[i].path) != 0) return -1;
    return 0;
}

/* A result must not replace a file that the training starts from. */
static int report_reserve_file(const run *u, files *all, const char *flag, const char *path)
{
    const char *const folders[] = {u->from, u->o.load_adapter};
    upipe_err e;
    int reads, i;
    if (path == NULL) return 0;
    for (i = 0; i < 2; ++i) {
        reads = folders[i] != NULL ? llama_reads(folders[i], path, &e) : 0;
        if (reads < 0) return cli_fail("%s", e.text);
        if (reads) return cli_fail("--%s %s would replace a file of the model in %s", flag, path, folders[i]);
    }
    if (u->o.data != NULL && files_spare(path, "--data", u->o.data) != 0) return -1;
    return report_spare_tokens(u, path) != 0 ? -1 : files_reserve(all, path);
}

/* Names that cannot be written are found before hours of work. */
static int report_reserve(run *u, files *all)
{
    int bad;
    if (!world_is_root(&u->net)) return 0;
    if (u->o.save != NULL && report_reserve_folder(u, u->o.save) != 0) return -1;
    if (u->o.save_adapter != NULL && report_reserve_adapter(u->o.save_adapter) != 0) return -1;
    files_begin(all);
    bad = report_reserve_file(u, all, "json", u->o.json) != 0 ||
          report_reserve_file(u, all, "trace", u->o.trace) != 0 ||
          report_reserve_file(u, all, "log", u->o.log) != 0;
    return files_abandon(all) != 0 || bad ? -1 : 0;
}

#endif

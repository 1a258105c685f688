/* report.h -- the numbers of a comparison: one table on stdout, one JSON file
 *
 *     report_table(methods, n, &options);
 *     report_json(file, methods, n, &options);
 */
#ifndef COMPARE_REPORT_H
#define COMPARE_REPORT_H

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "../common/json.h"
#include "../common/paper.h"
#include "setup.h"

static const double report_mib = 1024 * 1024;

/* One unit of the paper's tables: a rank's tokens x model dim, on average. */
static double report_unit(const options *o)
{
    return (double)o->tokens * (double)o->batch * (double)o->model_dim *
           (double)upipe_dtype_bytes((upipe_dtype)o->dtype) / o->how.ranks;
}

/* A cell of the paper's tables. NaN for what is not in them: other methods, and UPipe that keeps the inputs
 * of layers on the device. */
static double report_paper(const method *m, int phase)
{
    const upipe_plan *p = method_plan_of(m);
    const int which = (int)(m->kind - method_kinds);
    paper_row row = which == METHOD_ULYSSES ? PAPER_ULYSSES : which == METHOD_FPDT ? PAPER_FPDT : PAPER_UPIPE;
    if (row == PAPER_UPIPE && which != METHOD_UPIPE && which != METHOD_UPIPE_NAIVE) return NAN;
    if (row == PAPER_UPIPE && m->o->layers > 1 && !m->o->offload) return NAN;
    if (row == PAPER_ULYSSES && m->o->offload) row = PAPER_ULYSSES_OFFLOAD;
    return paper_units(row, (upipe_phase)phase, p->group, p->stages, m->o->how.segments, m->o->layers);
}

static size_t report_peak(const method_bytes *b)
{
    size_t most = 0;
    int i;
    for (i = 0; i < UPIPE_PHASES; ++i) most = upipe_max_bytes(most, b->phase[i]);
    return most;
}

/* Live bytes of a phase but for other layers' inputs. */
static size_t report_without_kept(const method *m, int phase)
{
    size_t most = 0;
    int r;
    for (r = 0; r < m->o->how.ranks; ++r)
        most = upipe_max_bytes(most, m->ranks[r].measured.phase[phase] - method_kept_device(m, &m->ranks[r]));
    return most;
}

/* To other ranks. */
static int64_t report_sent(const method *m)
{
    int64_t sum = 0;
    int way, pass;
    for (way = 0; way < SENT_HOST; ++way)
        for (pass = 0; pass < 2; ++pass) sum += m->measured.sent[way][pass];
    return sum;
}

/* One sentence for each method after the first. */
static void report_verdict(const method *first, const method *m)
{
    double peak = (double)report_peak(&m->measured) / (double)report_peak(&first->measured);
    int64_t sent = report_sent(m), other = report_sent(first);
    int same = m->same[RESULT_OUT] + m->same[RESULT_DX] + method_same_dw(m);
    printf("%s holds ", m->name);
    if (peak == 1)
        printf("as much as %s at its peak", first->name);
    else
        printf("%.*f %% %s than %s at its peak", fabs(1 - peak) < 0.005 ? 2 : 0, 100 * fabs(1 - peak),
               peak < 1 ? "less" : "more", first->name);
    if (same == 3)
        printf(", gives the same bits");
    else
        printf(", gives other bits in%s%s%s", m->same[RESULT_OUT] ? "" : " out",
               m->same[RESULT_DX] ? "" : " dx", method_same_dw(m) ? "" : " dw");
    if (other == 0)
        printf(", and sends nothing, as one rank does.\n");
    else if (sent == other)
        printf(", and sends the same number of bytes.\n");
    else
        printf(", and sends %.2f times the bytes.\n", (double)sent / (double)other);
}

/* ---- a row a method in each of two tables, at most 120 columns ---- */

typedef struct report_shows {
    int ways[SENT_WAYS], errors, sinks, bits; /* columns that there are */
} report_shows;

static void report_mask(const options *o)
{
    printf("%s", o->full ? "full" : "causal");
    if (o->window > 0) printf(", window %lld", (long long)o->window);
    if (o->borders != NULL) printf(", %lld packed sequences", (long long)o->borders_n);
    if (o->softcap > 0) printf(", soft-cap %g", o->softcap);
    if (o->sinks) printf(", sinks");
    if (o->rope) printf(", RoPE");
    if (o->rope_type != LLAMA_ROPE_DEFAULT) printf(" %s", llama_rope_names[o->rope_type]);
    if (o->how.overlap) printf(", overlapped");
}

static void report_heading(const method *all, const options *o)
{
    printf("%d query heads, %d key/value heads of %d", o->heads, o->kv_heads, o->head_dim);
    if (o->v_dim != o->head_dim) printf(" (V: %d)", o->v_dim);
    printf(", model dim %lld; %lld x %lld tokens on %d ranks\n%s, ", (long long)o->model_dim,
           (long long)o->batch, (long long)o->tokens, o->how.ranks, upipe_dtype_name((upipe_dtype)o->dtype));
    report_mask(o);
    if (o->layers > 1) printf(", inputs of %d layers", o->layers);
    if (o->offload) printf(" in the host's memory");
    printf("; %s\none unit, a rank's tokens x model dim: %.0f bytes, %.2f MiB.", all[0].ops->name,
           report_unit(o), report_unit(o) / report_mib);
    printf(" All numbers are the largest of one rank.\n\n");
}

/* The columns of report_memory_row. */
static void report_memory_columns(const report_shows *show, const method *first)
{
    printf("%-12s%8s%12s%28s%8s%8s", "memory", "", "stages", "peak, bytes", "", "Q K V,");
    if (show->ways[SENT_HOST]) printf("%14s", "host,");
    if (show->bits) printf("   same bits");
    printf("\n%-12s%8s%12s%14s%14s%8s%8s", "method", "ranks", "x heads", "plan", "measured", "units",
           "units");
    if (show->ways[SENT_HOST]) printf("%14s", "bytes");
    if (show->bits) printf("   as %s", first->name);
    printf("\n");
}

static void report_memory_row(const report_shows *show, const method *first, const method *m)
{
    const upipe_plan *p = method_plan_of(m);
    const size_t peak = report_peak(&m->measured);
    const double unit = report_unit(m->o);
    char ranks[32], stages[32];
    snprintf(ranks, sizeof ranks, p->desc.ring > 1 ? "%d x %d" : "%d", p->desc.ranks, p->desc.ring);
    snprintf(stages, sizeof stages, "%d x %d", p->stages, p->desc.chunk);
    printf("%-12s%8s%12s%14zu%14zu%8.3f%8.3f", m->name, ranks, stages, report_peak(&m->planned), peak,
           (double)peak / unit, (double)m->measured.intermediate / unit);
    if (show->ways[SENT_HOST]) printf("%14zu", m->measured.host);
    if (show->bits && m == first)
        printf("   -");
    else if (show->bits)
        printf("  %s%s%s%s", m->same[RESULT_OUT] ? " out" : "", m->same[RESULT_DX] ? " dx" : "",
               method_same_dw(m) ? " dw" : "",
               m->same[RESULT_OUT] || m->same[RESULT_DX] || method_same_dw(m) ? "" : " none");
    printf("\n");
}

/* The columns of report_sent_row. */
static void report_sent_columns(const report_shows *show)
{
    static const char *const ways[SENT_WAYS] = {"all-to-all, MiB", "ring, MiB", "host link, MiB"};
    int way;
    printf("\n%-12s", "sent, time");
    for (way = 0; way < SENT_WAYS; ++way)
        if (show->ways[way]) printf("%18s", ways[way]);
    printf("%16s", "seconds");
    if (show->errors) printf("%*s", show->sinks ? 36 : 27, "relative error of");
    printf("\n%-12s", "method");
    for (way = 0; way < SENT_WAYS; ++way)
        if (show->ways[way]) printf("%9s%9s", "fwd", "bwd");
    printf("%8s%8s", "fwd", "bwd");
    if (show->errors) printf("%9s%9s%9s", "out", "dx", "dw");
    if (show->errors && show->sinks) printf("%9s", "dsinks");
    printf("\n");
}

static void report_sent_cell(int64_t bytes)
{
    if (bytes == 0)
        printf("%9s", "-");
    else
        printf("%9.2f", (double)bytes / report_mib);
}

static void report_sent_row(const report_shows *show, const method *m)
{
    int way;
    printf("%-12s", m->name);
    for (way = 0; way < SENT_WAYS; ++way) {
        if (!show->ways[way]) continue;
        report_sent_cell(m->measured.sent[way][0]);
        report_sent_cell(m->measured.sent[way][1]);
    }
    printf("%8.3f%8.3f", m->seconds[0], m->seconds[1]);
    if (show->errors) printf("%9.1e%9.1e%9.1e", m->err[MEASURE_OUT], m->err[MEASURE_DX], m->err[MEASURE_DW]);
    if (show->errors && show->sinks) printf("%9.1e", m->err[MEASURE_DSINKS]);
    printf("\n");
}

/* What rows and columns are; of a method what --help says. */
static void report_legend(const method *all, int n, const report_shows *show)
{
    int i;
    for (i = 0; i < n; ++i) {
        char name[32];
        const char *at, *end;
        snprintf(name, sizeof name, "\n  %s ", all[i].name);
        at = strstr(method_usage, name);
        if (at == NULL) continue;
        for (end = strchr(at + 1, '\n'); end != NULL && strncmp(end + 1, "     ", 5) == 0;)
            end = strchr(end + 1, '\n');
        printf("%.*s", (int)(end != NULL ? end - at : (ptrdiff_t)strlen(at)), at);
    }
    printf(
        "\n\n  stages x heads  a stage attends so many heads of all ranks\n"
        "  peak            most bytes of a rank's pool at one time: as a dry run plans them, and as they were\n"
        "  Q K V           of the peak in units: buffers of Q, K, V in the forward\n");
    if (show->ways[SENT_HOST]) printf("  host            most bytes of the second pool, in host memory\n");
    if (show->bits) printf("  same bits       the results whose bits are those of the first method\n");
    printf("  fwd, bwd        forward and backward; a dash: nothing is sent that way\n");
    if (show->errors)
        printf("  relative error  against a reference in double precision%s\n",
               show->sinks ? "; of dsinks, to the magnitudes of its terms" : "");
    printf(
        "  paper, exact    units by the formulas of the paper's tables, where it has them, and as measured\n");
}

/* ---- the paper's two tables ---- */

enum { REPORT_CELL = 9, REPORT_COLUMNS = 4 };

static void report_cell(double units)
{
    if (isnan(units))
        printf("%*s", REPORT_CELL, "-");
    else
        printf("%*.3f", REPORT_CELL, units);
}

/* A pass: phases first .. first + 3, the paper's formula and what was measured, which is the plan's. */
static void report_phases(const method *all, int n, const options *o, int first)
{
    static const char *const about[UPIPE_PHASES] = {"before attn block", "inp_all_to_all",  "attn kernel",
                                                    "out_all_to_all",    "before bwd attn", "out_all_to_all",
                                                    "bwd attn kernel",   "inp_all_to_all"};
    int i, k;
    printf("\n%-22s", "most live bytes, units");
    for (k = 0; k < REPORT_COLUMNS; ++k) printf("%*s", 2 * REPORT_CELL, upipe_phase_name(first + k));
    printf("\n%-22s", "");
    for (k = 0; k < REPORT_COLUMNS; ++k) printf("%*s", 2 * REPORT_CELL, about[first + k]);
    printf("\n%-22s", "");
    for (k = 0; k < REPORT_COLUMNS; ++k) printf("%*s%*s", REPORT_CELL, "paper", REPORT_CELL, "exact");
    printf("\n");
    for (i = 0; i < n; ++i) {
        printf("%-22s", all[i].name);
        for (k = first; k < first + REPORT_COLUMNS; ++k) {
            report_cell(report_paper(&all[i], k));
            report_cell((double)all[i].measured.phase[k] / report_unit(o));
        }
        printf("\n");
        if (all[i].kind != &method_kinds[METHOD_ULYSSES] || o->offload) continue;
        printf("%-22s", "  with offloading"); /* other layers' inputs are not there */
        for (k = first; k < first + REPORT_COLUMNS; ++k) {
            report_cell(
                paper_units(PAPER_ULYSSES_OFFLOAD, (upipe_phase)k, method_plan_of(&all[i])->group, 1, 1, 1));
            report_cell((double)report_without_kept(&all[i], k) / report_unit(o));
        }
        printf("\n");
    }
}

static void report_table(const method *all, int n, const options *o)
{
    report_shows show;
    int i;
    memset(&show, 0, sizeof show);
    show.ways[SENT_TEAM] = 1;
    for (i = 0; i < n; ++i) {
        show.ways[SENT_RING] |= method_plan_of(&all[i])->desc.ring > 1;
        show.ways[SENT_HOST] |= all[i].kind->segmented || o->offload;
    }
    show.errors = o->check == CHECK_ON;
    show.sinks = o->sinks;
    show.bits = n > 1;
    report_heading(all, o);
    for (i = 1; i < n; ++i) report_verdict(&all[0], &all[i]);
    if (n > 1) printf("\n");
    report_memory_columns(&show, all);
    for (i = 0; i < n; ++i) report_memory_row(&show, all, &all[i]);
    report_sent_columns(&show);
    for (i = 0; i < n; ++i) report_sent_row(&show, &all[i]);
    report_phases(all, n, o, UPIPE_FWD_BEFORE);
    report_phases(all, n, o, UPIPE_BWD_BEFORE);
    report_legend(all, n, &show);
}

/* ---- JSON ---- */

static const char *json_bool(int value)
{
    return value ? "true" : "false";
}

static void json_phases(FILE *f, const char *name, const size_t *phases)
{
    int i;
    fprintf(f, "      \"%s\": {", name);
    for (i = 0; i < UPIPE_PHASES; ++i)
        fprintf(f, "%s\"%s\": %zu", i > 0 ? ", " : "", upipe_phase_name(i), phases[i]);
    fprintf(f, "},\n");
}

/* JSON has no word for infinity or NaN: what is no number is null. */
static void json_error(FILE *f, const char *name, double value)
{
    if (isfinite(value))
        fprintf(f, "      \"%s\": %.9e,\n", name, value);
    else
        fprintf(f, "      \"%s\": null,\n", name);
}

/* Lengths of the packed sequences. */
static void json_cu_seqlens(FILE *f, const options *o)
{
    int64_t i;
    fprintf(f, "    \"cu_seqlens\": %s", o->borders == NULL ? "null" : "[");
    for (i = 0; i < o->borders_n; ++i)
        fprintf(f, "%s%lld", i > 0 ? ", " : "", (long long)(o->borders[i + 1] - o->borders[i]));
    fprintf(f, "%s,\n", o->borders == NULL ? "" : "]");
}

/* What was asked for, with the defaults filled in. */
static void json_config(FILE *f, const options *o)
{
    fprintf(f, "  \"config\": {\n");
    flags_json(f, &option_flags, o);
    json_cu_seqlens(f, o);
    fprintf(f, "    \"products\": \"%s\",\n    \"unit_bytes\": %.9g\n  },\n", device_products(o->device),
            report_unit(o));
}

static void json_plan(FILE *f, const upipe_plan *p)
{
    static const char *const modes[] = {"auto", "p2p", "all-gather"};
    const upipe_plan_desc *d = &p->desc;
    fprintf(f, "      \"ranks\": %d,\n      \"ring\": %d,\n      \"ring_inner\": %d,\n", d->ranks, d->ring,
            d->ring_inner);
    fprintf(f, "      \"ring_mode\": ");
    json_quote(f, d->ring > 1 ? modes[d->ring_mode] : NULL);
    fprintf(f, ",\n      \"layout\": \"%s\",\n      \"chunk\": %d,\n      \"stages\": %d,\n",
            upipe_layout_name(d->layout), d->chunk, p->stages);
}

/* "NAME": {"team": [forward, backward], "ring": ...} */
static void json_sent(FILE *f, const char *name, const method_bytes *b)
{
    static const char *const ways[SENT_WAYS] = {"team", "ring", "host"};
    int way;
    fprintf(f, "      \"%s\": {", name);
    for (way = 0; way < SENT_WAYS; ++way)
        fprintf(f, "%s\"%s\": [%lld, %lld]", way > 0 ? ", " : "", ways[way], (long long)b->sent[way][0],
                (long long)b->sent[way][1]);
    fprintf(f, "},\n");
}

/* Processor seconds of all ranks, both passes together, by part. */
static void json_cpu(FILE *f, const method *m)
{
    int part;
    fprintf(f, "      \"seconds_cpu\": %s", method_counts(m) ? "{" : "null");
    for (part = 0; method_counts(m) && part < PARTS; ++part)
        fprintf(f, "%s\"%s\": %.9f", part > 0 ? ", " : "", part_names[part], m->cpu[part]);
    fprintf(f, "%s,\n", method_counts(m) ? "}" : "");
}

static void json_method(FILE *f, const method *m)
{
    int phase;
    fprintf(f, "    {\n      \"name\": \"%s\",\n", m->name);
    json_plan(f, method_plan_of(m));
    fprintf(f, "      \"segments\": %d,\n      \"host_bytes\": %zu,\n      \"plan_host_bytes\": %zu,\n",
            m->kind->segmented ? m->o->how.segments : 1, m->measured.host, m->planned.host);
    json_phases(f, "peak_bytes", m->measured.phase);
    json_phases(f, "plan_bytes", m->planned.phase);
    fprintf(f, "      \"paper_units\": ");
    for (phase = 0; !isnan(report_paper(m, 0)) && phase < UPIPE_PHASES; ++phase)
        fprintf(f, "%s\"%s\": %.12g", phase > 0 ? ", " : "{", upipe_phase_name(phase),
                report_paper(m, phase));
    fprintf(f, "%s,\n      \"slab_bytes\": %zu,\n      \"intermediate_bytes_fwd\": %zu,\n",
            !isnan(report_paper(m, 0)) ? "}" : "null", m->slab_bytes, m->measured.intermediate);
    json_sent(f, "sent_bytes", &m->measured);
    json_sent(f, "plan_sent_bytes", &m->planned);
    fprintf(f, "      \"seconds_fwd\": %.6f,\n      \"seconds_bwd\": %.6f,\n", m->seconds[0], m->seconds[1]);
    json_cpu(f, m);
    json_error(f, "err_out", m->err[MEASURE_OUT]);
    json_error(f, "err_dx", m->err[MEASURE_DX]);
    json_error(f, "err_dw", m->err[MEASURE_DW]);
    json_error(f, "err_dsinks", m->err[MEASURE_DSINKS]);
    fprintf(f, "      \"same_bits_out\": %s,\n      \"same_bits_dx\": %s,\n      \"same_bits_dw\": %s\n    }",
            json_bool(m->same[RESULT_OUT]), json_bool(m->same[RESULT_DX]), json_bool(method_same_dw(m)));
}

static void report_json(FILE *f, const method *all, int n, const options *o)
{
    int i;
    fprintf(f, "{\n");
    json_config(f, o);
    fprintf(f, "  \"methods\": [\n");
    for (i = 0; i < n; ++i) {
        json_method(f, &all[i]);
        fprintf(f, "%s\n", i + 1 < n ? "," : "");
    }
    fprintf(f, "  ]\n}\n");
}

#endif

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

#include "method.h"

static const double report_mib = 1024 * 1024;

enum { REPORT_LABEL = 28, REPORT_WIDTH = 40 };

/* The row of the paper's tables that has this method's assumptions: inputs of other layers are elsewhere. */
static double report_paper(const method *m, int phase)
{
    upipe_paper_row row = m->which == METHOD_ULYSSES ? UPIPE_PAPER_ULYSSES_OFFLOAD : UPIPE_PAPER_UPIPE;
    return upipe_paper_units(row, (upipe_phase)phase, m->plan.group, m->plan.stages, 1, 1);
}

static size_t report_most(const size_t *phases)
{
    size_t most = 0;
    int i;
    for (i = 0; i < UPIPE_PHASES; ++i) most = phases[i] > most ? phases[i] : most;
    return most;
}

static void report_line(const char *label)
{
    printf("%-*s", REPORT_LABEL, label);
}

/* A cell of the lower half. */
__attribute__((format(printf, 1, 2))) static void report_cell(const char *format, ...)
{
    char text[128];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    printf("  %*s", REPORT_WIDTH, text);
}

static void report_bytes(const char *label, const method *all, int n, size_t (*value)(const method *m))
{
    int i;
    report_line(label);
    for (i = 0; i < n; ++i) {
        size_t bytes = value(&all[i]), unit = upipe_plan_unit_bytes(&all[i].plan);
        report_cell("%zu bytes %9.2f MiB %7.3f", bytes, (double)bytes / report_mib,
                    (double)bytes / (double)unit);
    }
    printf("\n");
}

static size_t report_peak(const method *m)
{
    return report_most(m->peak);
}

static size_t report_slab(const method *m)
{
    return m->slab_bytes;
}

static size_t report_intermediate(const method *m)
{
    return m->intermediate;
}

static size_t report_sent_fwd(const method *m)
{
    return (size_t)m->sent[0];
}

static size_t report_sent_bwd(const method *m)
{
    return (size_t)m->sent[1];
}

static void report_same(const method *all, int n)
{
    char label[64];
    int i;
    snprintf(label, sizeof label, "same bits as %s", all[0].name);
    report_line(label);
    for (i = 0; i < n; ++i)
        if (i == 0)
            report_cell("-");
        else
            report_cell("out %s, dx %s, dw %s", all[i].same_out ? "yes" : "no", all[i].same_dx ? "yes" : "no",
                        all[i].same_dw ? "yes" : "no");
    printf("\n");
}

/* One sentence for each method after the first. */
static void report_verdict(const method *first, const method *m)
{
    double peak = (double)report_peak(m) / (double)report_peak(first);
    double sent = (double)(m->sent[0] + m->sent[1]) / (double)(first->sent[0] + first->sent[1]);
    int same = m->same_out + m->same_dx + m->same_dw;
    printf("%s holds ", m->name);
    if (peak == 1)
        printf("as much as %s at its peak", first->name);
    else
        printf("%.*f %% %s than %s at its peak", fabs(1 - peak) < 0.005 ? 2 : 0, 100 * fabs(1 - peak),
               peak < 1 ? "less" : "more", first->name);
    if (same == 3)
        printf(", gives the same bits");
    else
        printf(", gives other bits in%s%s%s", m->same_out ? "" : " out", m->same_dx ? "" : " dx",
               m->same_dw ? "" : " dw");
    if (first->sent[0] + first->sent[1] == 0)
        printf(", and sends nothing, as one rank does.\n");
    else if (m->sent[0] == first->sent[0] && m->sent[1] == first->sent[1])
        printf(", and sends the same number of bytes.\n");
    else
        printf(", and sends %.2f times the bytes.\n", sent);
}

static void report_heading(const method *all, int n, const options *o)
{
    int i;
    printf(
        "%d query heads, %d key/value heads of %d, model dim %lld; %lld x %lld tokens on %d ranks; %s, %s%s; %s\n",
        o->heads, o->kv_heads, o->head_dim, (long long)o->model_dim, (long long)o->batch,
        (long long)o->tokens, o->ranks, upipe_dtype_name(o->dtype), o->full ? "full" : "causal",
        o->rope ? ", RoPE" : "", all[0].ops->name);
    printf(
        "one unit, a rank's tokens x model dim: %zu bytes, %.2f MiB. All numbers are the largest of one rank.\n\n",
        upipe_plan_unit_bytes(&all[0].plan), (double)upipe_plan_unit_bytes(&all[0].plan) / report_mib);
    report_line("");
    for (i = 0; i < n; ++i) {
        char stages[64];
        if (all[i].plan.stages == 1)
            snprintf(stages, sizeof stages, "%s, 1 stage", all[i].name);
        else
            snprintf(stages, sizeof stages, "%s, %d stages of %d heads", all[i].name, all[i].plan.stages,
                     all[i].plan.desc.chunk);
        report_cell("%s", stages);
    }
    printf("\n");
    report_line("most live bytes in");
    for (i = 0; i < n; ++i) report_cell("%6s %12s %12s %7s", "paper", "plan", "measured", "units");
    printf("\n");
}

static void report_table(const method *all, int n, const options *o)
{
    static const char *const about[UPIPE_PHASES] = {"", "exchange QKV", "", "exchange O",
                                                    "", "exchange dO",  "", "QKV dQ dK dV dX"};
    char label[64];
    int i, phase;
    report_heading(all, n, o);
    for (phase = 0; phase < UPIPE_PHASES; ++phase) {
        snprintf(label, sizeof label, "%-10s  %s", upipe_phase_name(phase), about[phase]);
        report_line(label);
        for (i = 0; i < n; ++i)
            report_cell("%6.3f %12zu %12zu %7.3f", report_paper(&all[i], phase), all[i].bytes.phase[phase],
                        all[i].peak[phase],
                        (double)all[i].peak[phase] / (double)upipe_plan_unit_bytes(&all[i].plan));
        printf("\n");
    }
    printf("\n");
    report_bytes("peak, measured", all, n, report_peak);
    report_bytes("slab that it takes", all, n, report_slab);
    report_bytes("Q K V buffers, forward", all, n, report_intermediate);
    report_bytes("sent, forward", all, n, report_sent_fwd);
    report_bytes("sent, backward", all, n, report_sent_bwd);
    report_line("seconds, fwd + bwd");
    for (i = 0; i < n; ++i) report_cell("%.3f + %.3f", all[i].seconds[0], all[i].seconds[1]);
    printf("\n");
    report_line("error of out, dx, dw");
    for (i = 0; i < n; ++i)
        if (o->check == CHECK_ON)
            report_cell("%.2e  %.2e  %.2e", all[i].err_out, all[i].err_dx, all[i].err_dw);
        else
            report_cell("not checked");
    printf("\n");
    if (n > 1) report_same(all, n);
    printf("\n");
    for (i = 1; i < n; ++i) report_verdict(&all[0], &all[i]);
}

/* ---- JSON ---- */

/* Bytes of the UTF-8 sequence at s; 0 where none is. */
static int json_utf8(const unsigned char *s)
{
    int i, n = s[0] < 0x80 ? 1 : s[0] < 0xc2 ? 0 : s[0] < 0xe0 ? 2 : s[0] < 0xf0 ? 3 : s[0] < 0xf5 ? 4 : 0;
    for (i = 1; i < n; ++i)
        if ((s[i] & 0xc0) != 0x80) return 0;
    if ((s[0] == 0xe0 && s[1] < 0xa0) || (s[0] == 0xf0 && s[1] < 0x90)) return 0; /* longer than need be */
    if ((s[0] == 0xed && s[1] > 0x9f) || (s[0] == 0xf4 && s[1] > 0x8f)) return 0; /* no characters */
    return n;
}

/* A path may hold any byte: one that is not UTF-8 is written as the character of that number. */
static void json_string(FILE *f, const char *text)
{
    int n;
    if (text == NULL) {
        fputs("null", f);
        return;
    }
    fputc('"', f);
    for (; *text != '\0'; text += n > 0 ? n : 1) {
        n = json_utf8((const unsigned char *)text);
        if (*text == '"' || *text == '\\')
            fprintf(f, "\\%c", *text);
        else if (n == 0 || (n == 1 && *text < 32))
            fprintf(f, "\\u%04x", (unsigned)(unsigned char)*text);
        else
            fwrite(text, 1, (size_t)n, f);
    }
    fputc('"', f);
}

static void json_path(FILE *f, const char *name, const char *text)
{
    fprintf(f, "    \"%s\": ", name);
    json_string(f, text);
    fprintf(f, ",\n");
}

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

static void json_config(FILE *f, const method *all, int n, const options *o)
{
    int i;
    fprintf(f, "  \"config\": {\n    \"method\": [");
    for (i = 0; i < n; ++i) fprintf(f, "%s\"%s\"", i > 0 ? ", " : "", all[i].name);
    fprintf(f, "],\n    \"ranks\": %d,\n    \"heads\": %d,\n    \"kv_heads\": %d,\n    \"head_dim\": %d,\n",
            o->ranks, o->heads, o->kv_heads, o->head_dim);
    fprintf(f, "    \"model_dim\": %lld,\n    \"tokens\": %lld,\n    \"batch\": %lld,\n    \"chunk\": %d,\n",
            (long long)o->model_dim, (long long)o->tokens, (long long)o->batch, o->chunk);
    fprintf(
        f,
        "    \"dtype\": \"%s\",\n    \"device\": \"%s\",\n    \"full\": %s,\n    \"rope\": %s,\n    \"seed\": %llu,\n",
        upipe_dtype_name(o->dtype), device_names[o->device], json_bool(o->full), json_bool(o->rope),
        (unsigned long long)o->seed);
    fprintf(f, "    \"check\": \"%s\",\n    \"deadline\": %.9g,\n", o->check == CHECK_ON ? "on" : "off",
            o->deadline);
    json_path(f, "data", o->data);
    json_path(f, "json", o->json);
    json_path(f, "trace", o->trace);
    json_path(f, "dump", o->dump);
    fprintf(f, "    \"progress\": %s,\n    \"products\": \"%s\",\n    \"unit_bytes\": %zu\n  },\n",
            json_bool(o->progress), device_products(o->device), upipe_plan_unit_bytes(&all[0].plan));
}

static void report_json(FILE *f, const method *all, int n, const options *o)
{
    int i, phase;
    fprintf(f, "{\n");
    json_config(f, all, n, o);
    fprintf(f, "  \"methods\": [\n");
    for (i = 0; i < n; ++i) {
        const method *m = &all[i];
        fprintf(f, "    {\n      \"name\": \"%s\",\n      \"stages\": %d,\n", m->name, m->plan.stages);
        json_phases(f, "peak_bytes", m->peak);
        json_phases(f, "plan_bytes", m->bytes.phase);
        fprintf(f, "      \"paper_units\": {");
        for (phase = 0; phase < UPIPE_PHASES; ++phase)
            fprintf(f, "%s\"%s\": %.12g", phase > 0 ? ", " : "", upipe_phase_name(phase),
                    report_paper(m, phase));
        fprintf(f, "},\n      \"slab_bytes\": %zu,\n      \"intermediate_bytes_fwd\": %zu,\n", m->slab_bytes,
                m->intermediate);
        fprintf(f, "      \"sent_bytes_fwd\": %lld,\n      \"sent_bytes_bwd\": %lld,\n",
                (long long)m->sent[0], (long long)m->sent[1]);
        fprintf(f, "      \"seconds_fwd\": %.6f,\n      \"seconds_bwd\": %.6f,\n", m->seconds[0],
                m->seconds[1]);
        json_error(f, "err_out", m->err_out);
        json_error(f, "err_dx", m->err_dx);
        json_error(f, "err_dw", m->err_dw);
        fprintf(
            f,
            "      \"same_bits_out\": %s,\n      \"same_bits_dx\": %s,\n      \"same_bits_dw\": %s\n    }%s\n",
            json_bool(m->same_out), json_bool(m->same_dx), json_bool(m->same_dw), i + 1 < n ? "," : "");
    }
    fprintf(f, "  ]\n}\n");
}

#endif

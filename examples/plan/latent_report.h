/* latent_report.h -- what upipe-plan says of one layer's latent attention: Ulysses and UPipe, with heads sent and with the
 * latent gathered */
#ifndef PLAN_LATENT_REPORT_H
#define PLAN_LATENT_REPORT_H

#include "../common/files.h"
#include "report.h"

enum { LATENT_ROWS = 4 };

static const char *const latent_door_names[LATENT_DOORS] = {"q_given", "q_by_stages"};

static const char *latent_form_name(int gathers)
{
    return gathers ? "gathered" : "heads";
}

/* A line's name: what it plans. */
static void latent_label(const latent_row *row, const options *o)
{
    const char *const form = latent_form_name(row->form == UPIPE_LATENT_GATHERED);
    char text[64];
    if (row->method == METHOD_UPIPE)
        snprintf(text, sizeof text, "upipe --chunk %d%s, %s", row->chunk, o->how.overlap ? " --overlap" : "",
                 form);
    else
        snprintf(text, sizeof text, "ulysses, %s", form);
    printf("  %-36s", text);
}

static void latent_cell(double bytes, double unit)
{
    char text[32];
    printf(" %11s %6.2f", report_bytes(text, bytes), bytes / unit);
}

static void latent_head(const job *j, const upipe_ops *ops, const latent_row *row)
{
    const latent_model *m = j->latent;
    const options *o = &j->o;
    char text[32], from[32] = "the hidden state";
    if (m->q_latent > 0) snprintf(from, sizeof from, "a latent of %d", m->q_latent);
    printf("%s, the attention of one of %d layers, on %d ranks of %s: %s tokens x %lld\n", m->name, m->layers,
           o->how.ranks, j->machine.name, report_tokens(text, o->tokens), (long long)o->batch);
    printf("%d heads of %d and %d, a latent of %d and a shared key of %d; Q from %s\n", m->heads,
           m->nope + m->rope, m->v_dim, m->latent, m->rope, from);
    printf("%s, %s; form AUTO: %s\n", upipe_dtype_name((upipe_dtype)o->dtype), ops->name,
           latent_form_name(row->by_auto));
    printf(
        "the attention alone is planned: neither MLPs, in most such models mixtures of experts, nor a training step\n");
    printf(
        "\nof the rank that has the most, in bytes and in units of %.3f MiB (tokens of a rank x model dim)\n",
        row->unit / (1 << 20));
}

static void latent_text(const job *j, const upipe_ops *ops, const latent_row rows[LATENT_ROWS])
{
    static const char *const beside[LATENT_DOORS] = {"peak beside Q, O, c and kr",
                                                     "peak beside xq, c and kr"};
    const options *o = &j->o;
    int i, door;
    latent_head(j, ops, &rows[0]);
    printf("\n  %-36s %18s %18s %18s %14s\n", "sent by a rank", "forward", "backward", "K, V in each",
           "numbers/token");
    for (i = 0; i < LATENT_ROWS; ++i) {
        latent_label(&rows[i], o);
        latent_cell(rows[i].sent[0], rows[i].unit);
        latent_cell(rows[i].sent[1], rows[i].unit);
        latent_cell(rows[i].sent_kv, rows[i].unit);
        printf(" %14.0f\n", rows[i].numbers);
    }
    printf("\n  %-36s %18s %18s\n", "held by a rank", "gathered latent", "K', V' of a stage");
    for (i = 0; i < LATENT_ROWS; ++i) {
        latent_label(&rows[i], o);
        latent_cell(rows[i].latent, rows[i].unit);
        latent_cell(rows[i].kv, rows[i].unit);
        printf("\n");
    }
    for (door = 0; door < LATENT_DOORS; ++door) {
        printf("\n  %-36s %18s %18s\n", beside[door], "forward", "backward");
        for (i = 0; i < LATENT_ROWS; ++i) {
            latent_label(&rows[i], o);
            latent_cell(rows[i].peak[door][0], rows[i].unit);
            latent_cell(rows[i].peak[door][1], rows[i].unit);
            printf("\n");
        }
    }
}

static void latent_json_row(FILE *f, const latent_row *row)
{
    int door, i;
    fprintf(f, "{\"method\": \"%s\", \"form\": \"%s\", \"chunk\": %d, \"stages\": %d,\n     ",
            method_kinds[row->method].name, latent_form_name(row->form == UPIPE_LATENT_GATHERED), row->chunk,
            row->stages);
    fprintf(f, "\"sent_forward_bytes\": %.0f, \"sent_backward_bytes\": %.0f, \"sent_kv_bytes\": %.0f,\n     ",
            row->sent[0], row->sent[1], row->sent_kv);
    fprintf(f, "\"latent_bytes\": %.0f, \"kv_stage_bytes\": %.0f", row->latent, row->kv);
    for (door = 0; door < LATENT_DOORS; ++door) {
        fprintf(f, ",\n     \"%s\": {\"forward_bytes\": %.0f, \"backward_bytes\": %.0f, \"phases\": {",
                latent_door_names[door], row->peak[door][0], row->peak[door][1]);
        for (i = 0; i < (int)UPIPE_PHASES; ++i)
            fprintf(f, "%s\"%s\": %.0f", i > 0 ? ", " : "", upipe_phase_name(i), row->phase[door][i]);
        fputs("}}", f);
    }
    fputs("}", f);
}

static void latent_json(FILE *f, const job *j, const latent_row rows[LATENT_ROWS])
{
    const latent_model *m = j->latent;
    int i;
    fprintf(f, "{\n  \"attention_of\": \"%s\",\n  \"layers\": %d,\n  \"unit_bytes\": %.0f,\n  ", m->name,
            m->layers, rows[0].unit);
    fprintf(f, "\"auto\": \"%s\",\n  \"rows\": [", latent_form_name(rows[0].by_auto));
    for (i = 0; i < LATENT_ROWS; ++i) {
        fputs(i > 0 ? ",\n    " : "\n    ", f);
        latent_json_row(f, &rows[i]);
    }
    fputs("\n  ]\n}\n", f);
}

/* latent_plan -- counted and said; the exit status */
static int latent_plan(const job *j, const upipe_ops *ops, files *all)
{
    latent_row rows[LATENT_ROWS];
    upipe_dry *dry = (upipe_dry *)estimate_memory(1, sizeof *dry);
    upipe_status s = UPIPE_OK;
    upipe_err e;
    FILE *f;
    int i;
    memset(rows, 0, sizeof rows);
    for (i = 0; i < LATENT_ROWS && s == UPIPE_OK; ++i) {
        rows[i].method = i < 2 ? METHOD_ULYSSES : METHOD_UPIPE;
        rows[i].form = i % 2 == 0 ? UPIPE_LATENT_HEADS : UPIPE_LATENT_GATHERED;
        s = latent_count(&rows[i], j->latent, &j->o, ops, dry, &e);
    }
    free(dry);
    if (s != UPIPE_OK) return cli_fail("%s%s", cli_status(s), e.text), EXIT_USAGE;
    latent_text(j, ops, rows);
    if (j->o.json == NULL) return 0;
    files_begin(all);
    f = files_open(all, j->o.json);
    if (f != NULL) latent_json(f, j, rows);
    return f == NULL || files_close(all, f) != 0 || files_commit(all) != 0 ? EXIT_RUN : 0;
}

#endif

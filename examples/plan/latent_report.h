/* latent_report.h -- what upipe-plan says of one layer's latent attention: Ulysses and UPipe, with heads sent and with the
 * latent gathered */
#ifndef PLAN_LATENT_REPORT_H
#define PLAN_LATENT_REPORT_H

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
    char chunk[32] = "", text[64];
    if (row->method == METHOD_UPIPE)
        snprintf(chunk, sizeof chunk, " --chunk %d%s", row->chunk, o->how.overlap ? " --overlap" : "");
    snprintf(text, sizeof text, "%s%s, %s", method_kinds[row->method].name, chunk,
             latent_form_name(row->form == UPIPE_LATENT_GATHERED));
    printf("  %-36s", text);
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

/* The tables: a row's numbers in bytes. */
enum { LATENT_TABLES = 2 + LATENT_DOORS, LATENT_COLUMNS = 3 };

static const struct {
    const char *title, *columns[LATENT_COLUMNS];
    size_t at[LATENT_COLUMNS];
} latent_tables[LATENT_TABLES] = {
    {"sent by a rank",
     {"forward", "backward", "K, V in each"},
     {offsetof(latent_row, sent[0]), offsetof(latent_row, sent[1]), offsetof(latent_row, sent_kv)}},
    {"held by a rank",
     {"gathered latent", "K', V' of a stage"},
     {offsetof(latent_row, latent), offsetof(latent_row, kv)}},
    {"peak beside Q, O, c and kr",
     {"forward", "backward"},
     {offsetof(latent_row, peak[LATENT_Q_GIVEN][0]), offsetof(latent_row, peak[LATENT_Q_GIVEN][1])}},
    {"peak beside xq, c and kr",
     {"forward", "backward"},
     {offsetof(latent_row, peak[LATENT_Q_STAGES][0]), offsetof(latent_row, peak[LATENT_Q_STAGES][1])}}};

static void latent_text(const job *j, const upipe_ops *ops, const latent_row rows[LATENT_ROWS])
{
    char text[32];
    int table, row, k;
    latent_head(j, ops, &rows[0]);
    for (table = 0; table < LATENT_TABLES; ++table) {
        const char *const *columns = latent_tables[table].columns;
        printf("\n  %-36s", latent_tables[table].title);
        for (k = 0; k < LATENT_COLUMNS && columns[k] != NULL; ++k) printf(" %18s", columns[k]);
        printf(table == 0 ? " %14s\n" : "\n", "numbers/token");
        for (row = 0; row < LATENT_ROWS; ++row) {
            latent_label(&rows[row], &j->o);
            for (k = 0; k < LATENT_COLUMNS && columns[k] != NULL; ++k) {
                const char *at = (const char *)&rows[row] + latent_tables[table].at[k];
                const double bytes = *(const double *)at;
                printf(" %11s %6.2f", report_bytes(text, bytes), bytes / rows[row].unit);
            }
            printf(table == 0 ? " %14.0f\n" : "\n", rows[row].numbers);
        }
    }
}

static json_t *latent_json_row(const latent_row *row)
{
    json_t *one =
        json_pack("{ss ss si si so so so so so}", "method", method_kinds[row->method].name, "form",
                  latent_form_name(row->form == UPIPE_LATENT_GATHERED), "chunk", row->chunk, "stages",
                  row->stages, "sent_forward_bytes", report_whole(row->sent[0]), "sent_backward_bytes",
                  report_whole(row->sent[1]), "sent_kv_bytes", report_whole(row->sent_kv), "latent_bytes",
                  report_whole(row->latent), "kv_stage_bytes", report_whole(row->kv));
    int door, i;
    for (door = 0; door < LATENT_DOORS; ++door) {
        json_t *phases = json_object();
        for (i = 0; i < (int)UPIPE_PHASES; ++i)
            report_set(phases, upipe_phase_name(i), report_whole(row->phase[door][i]));
        report_set(one, latent_door_names[door],
                   json_pack("{so so so}", "forward_bytes", report_whole(row->peak[door][0]),
                             "backward_bytes", report_whole(row->peak[door][1]), "phases", phases));
    }
    return one;
}

static json_t *latent_json(const latent_model *m, const latent_row rows[LATENT_ROWS])
{
    json_t *all = json_array();
    int i;
    for (i = 0; i < LATENT_ROWS; ++i) report_append(all, latent_json_row(&rows[i]));
    return json_pack("{ss si so ss so}", "attention_of", m->name, "layers", m->layers, "unit_bytes",
                     report_whole(rows[0].unit), "auto", latent_form_name(rows[0].by_auto), "rows", all);
}

/* latent_plan -- counted and said; the exit status */
static int latent_plan(const job *j, const upipe_ops *ops, files *all)
{
    latent_row rows[LATENT_ROWS] = {{0}};
    upipe_dry *dry = (upipe_dry *)estimate_memory(1, sizeof *dry);
    upipe_status s = UPIPE_OK;
    upipe_err e;
    int i;
    for (i = 0; i < LATENT_ROWS && s == UPIPE_OK; ++i) {
        rows[i].method = i < 2 ? METHOD_ULYSSES : METHOD_UPIPE;
        rows[i].form = i % 2 == 0 ? UPIPE_LATENT_HEADS : UPIPE_LATENT_GATHERED;
        s = latent_count(&rows[i], j->latent, &j->o, ops, dry, &e);
    }
    free(dry);
    if (s != UPIPE_OK) return cli_fail("%s%s", cli_status(s), e.text), EXIT_USAGE;
    latent_text(j, ops, rows);
    return j->o.json != NULL ? report_write(all, j->o.json, latent_json(j->latent, rows)) : 0;
}

#endif

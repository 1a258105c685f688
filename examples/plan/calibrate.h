/* calibrate.h -- a machine's rates from the numbers of its benchmarks
 *
 *     calibrate(&machine, "attn.json");       JSON lines of bench/run.sh attn and gemm
 *
 * Of each kind of kernel the fastest line with the most threads counts: long sequences are what plans are about. So of
 * bench/run.sh ops the update of the most elements does, which no cache holds.
 */
#ifndef PLAN_CALIBRATE_H
#define PLAN_CALIBRATE_H

#include "machine.h"

enum { CALIBRATE_BYTES_MAX = 1 << 24 };

/* A line's rate of this kind, in FLOP/s or bytes/s; 0 if it is of none. */
static double calibrate_line(const json_t *line, int *kind, int64_t *threads, int64_t *elements)
{
    static const struct {
        const char *op;
        int rate;
    } ops[] = {{"attn_fwd", MACHINE_ATTN_FWD},
               {"attn_bwd", MACHINE_ATTN_BWD},
               {"gemm", MACHINE_DENSE},
               {"adamw", MACHINE_UPDATE}};
    const char *op = json_string_value(json_object_get(line, "op"));
    const json_t *giga = json_object_get(line, "gflops"), *tera = json_object_get(line, "tflops");
    size_t i;
    if (!json_is_number(giga)) giga = json_object_get(line, "gbytes_per_s");
    if (op == NULL || (!json_is_number(giga) && !json_is_number(tera))) return 0;
    for (i = 0; i < sizeof ops / sizeof *ops && strcmp(ops[i].op, op) != 0; ++i) {
    }
    if (i == sizeof ops / sizeof *ops) return 0;
    *kind = ops[i].rate;
    *threads = json_integer_value(json_object_get(line, "threads"));
    *elements = *kind != MACHINE_UPDATE ? 0
                                        : json_integer_value(json_object_get(line, "rows")) *
                                              json_integer_value(json_object_get(line, "d"));
    return json_is_number(giga) ? 1e9 * json_number_value(giga) : 1e12 * json_number_value(tera);
}

/* Takes the rates of one file over; 0, or the exit status. */
static int calibrate(machine *m, const char *path)
{
    double best[MACHINE_RATES] = {0};
    int64_t most[MACHINE_RATES] = {0}, longest[MACHINE_RATES] = {0};
    char why[JSON_LOAD_WHY], *text, *line, *next;
    upipe_err e;
    size_t bytes;
    int kind = 0, found = 0, k;
    text = llama_file(path, CALIBRATE_BYTES_MAX, &bytes, &e);
    if (text == NULL) return machine_unread(&e) - 1;
    for (line = text; line < text + bytes; line = next) {
        int64_t threads = 0, elements = 0;
        json_t *root;
        double rate;
        next = (char *)memchr(line, '\n', (size_t)(text + bytes - line));
        next = next != NULL ? next + 1 : text + bytes;
        root = json_load(line, (size_t)(next - line), why);
        if (root == NULL) {
            const int lost = errno == ENOMEM;
            free(text);
            return cli_fail("%s: no numbers of a benchmark: %s", path, why), lost ? EXIT_RUN : EXIT_USAGE;
        }
        rate = calibrate_line(root, &kind, &threads, &elements);
        json_decref(root);
        if (rate <= 0 || threads < most[kind]) continue;
        if (threads == most[kind] &&
            (elements < longest[kind] || (elements == longest[kind] && rate < best[kind])))
            continue;
        longest[kind] = elements;
        best[kind] = rate;
        most[kind] = threads;
        ++found;
    }
    free(text);
    if (found == 0) return cli_fail("%s: no rates of attn_fwd, attn_bwd, gemm or adamw", path), EXIT_USAGE;
    for (k = 0; k < MACHINE_RATES; ++k) {
        if (best[k] <= 0) continue;
        /* a CPU's ranks share its cores */
        m->rate[k] = best[k] / (m->gpu > 0 || k == MACHINE_UPDATE ? 1 : m->ranks);
        if (!machine_rate_known(m->rate[k]))
            return cli_fail("%s: %s would be %g, not in %g .. %g", path, machine_rates[k].name, m->rate[k],
                            MACHINE_RATE_MIN, MACHINE_RATE_MAX),
                   EXIT_USAGE;
        snprintf(m->origin[k], MACHINE_ORIGIN, "measured: %.100s", path);
    }
    return 0;
}

#endif

/* plan.c -- upipe-plan: will it fit, and how fast
 *
 *     upipe-plan --model llama3-8b --machine h100x8 --tokens 5M
 *
 * Where to read: exact.h (bytes of this library's trainer, by a dry run), titan.h (what the paper's setting holds),
 * estimate.h (time, and the verdict), machine.h (rates, with their origins), planner.h (advice, longest sequence),
 * search.h (all settings), best.h, longest.h, calibrate.h (rates of this machine).
 */
#define PROGRAM "upipe-plan"

#include "../common/files.h"
#include "best.h"
#include "calibrate.h"
#include "longest.h"

/* The longest sequence of a setting, and why not a longer one if bytes are not why. */
static void plan_longest(const planner *p, setting s, int64_t longest, estimate *e)
{
    char text[32];
    printf("\nthe longest sequence that fits: %s, %lld tokens\n", report_tokens(text, longest),
           (long long)longest);
    s.tokens = longest + planner_step(&s);
    if (s.tokens <= INT32_MAX) planner_estimate(p, &s, e);
    if (s.tokens > INT32_MAX)
        printf("longer ones are not planned: 31 bits of tokens\n");
    else if (e->why[0] != '\0')
        printf("longer ones are not planned: %s\n", e->why);
}

/* One setting, or the longest sequence of one. */
static int plan_one(const options *o, const planner *p, files *all)
{
    estimate *e = (estimate *)calloc(1, sizeof *e);
    advice_item help[ADVICE_MAX];
    setting s = o->s;
    int64_t longest = -1;
    int n = 0, fits, status = 0;
    FILE *f;
    if (e == NULL) return cli_fail("out of memory"), EXIT_RUN;
    if (o->max_tokens) {
        longest = planner_longest(p, &s, planner_step(&s), e);
        s.tokens = longest > 0 ? longest : planner_step(&s);
    } else {
        planner_estimate(p, &s, e);
    }
    if (e->why[0] != '\0') {
        cli_fail("%s", e->why);
        free(e);
        return EXIT_USAGE;
    }
    fits = estimate_verdict(e, p->m).fits;
    n = planner_advice(p, &s, e, help);
    report_verdict(o, p, &s, e);
    if (p->titan == TITANS && s.how.method <= METHOD_UPIPE) report_block(p, &s);
    report_advice(help, n);
    if (o->json != NULL) {
        files_begin(all);
        f = files_open(all, o->json);
        if (f != NULL) report_json(f, p, &s, e, help, n, longest);
        status = f == NULL || files_close(all, f) != 0 || files_commit(all) != 0 ? EXIT_RUN : 0;
    }
    if (longest > 0) plan_longest(p, s, longest, e);
    free(e);
    return status != 0 ? status : fits ? 0 : EXIT_NO_FIT;
}

/* A result that cannot be written is found before the work, and none replaces what is read. */
static int plan_reserve(const options *o, files *all)
{
    const char *const results[] = {o->json, o->write_machine};
    char config[FILES_PATH] = "";
    int i, k, bad = 0;
    if (o->model != NULL) snprintf(config, sizeof config, "%s/config.json", o->model);
    files_begin(all);
    for (i = 0; i < 2 && !bad; ++i) {
        if (results[i] == NULL) continue;
        bad = files_spare(results[i], "--model", config) != 0 ||
              (o->machine_name != NULL && files_spare(results[i], "--machine", o->machine_name) != 0);
        for (k = 0; k < o->calibrate_n && !bad; ++k)
            bad = files_spare(results[i], "--calibrate", o->calibrate[k]) != 0;
        if (!bad) bad = files_reserve(all, results[i]) != 0;
    }
    files_abandon(all);
    return bad ? EXIT_RUN : 0;
}

static int plan_write_machine(options *o, files *all)
{
    FILE *f;
    int i;
    for (i = 0; i < o->calibrate_n; ++i)
        if (calibrate(&o->machine, o->calibrate[i]) != 0) return EXIT_USAGE;
    files_begin(all);
    f = files_open(all, o->write_machine);
    if (f == NULL) return EXIT_RUN;
    machine_write(f, &o->machine);
    return files_close(all, f) != 0 || files_commit(all) != 0 ? EXIT_RUN : 0;
}

static int plan(options *o, files *all)
{
    upipe_ops ops;
    llama_layout layout;
    planner p;
    int status = plan_reserve(o, all);
    if (status == 0 && o->write_machine != NULL) status = plan_write_machine(o, all);
    if (status != 0 || o->model == NULL) return status;
    if (llama_layout_init(&layout, &o->config) != 0)
        return cli_fail("the model's bytes leave 63 bits, or memory is out"), EXIT_RUN;
    memset(&ops, 0, sizeof ops);
    device_table(o->device, &ops);
    p.m = &o->machine;
    p.ops = &ops;
    o->s.layout = &layout;
    p.titan = o->as_titan ? o->titan : TITANS;
    if (o->best)
        status = o->max_tokens ? longest_best(o, &p, all) : best(o, &p, all);
    else
        status = plan_one(o, &p, all);
    llama_layout_free(&layout);
    if (fflush(stdout) != 0 || ferror(stdout))
        return cli_fail("the table cannot be written: %s", strerror(errno)), EXIT_RUN;
    return status;
}

int main(int argc, char **argv)
{
    options *o = (options *)calloc(1, sizeof *o);
    files *all = (files *)calloc(1, sizeof *all);
    int status;
    if (o == NULL || all == NULL) {
        cli_fail("out of memory");
        status = EXIT_RUN;
    } else {
        status = options_read(o, argc, argv);
        o->progress = o->progress || isatty(STDERR_FILENO);
        if (status != 0)
            --status;
        else
            status = plan(o, all);
        files_abandon(all);
    }
    free(o);
    free(all);
    return status;
}

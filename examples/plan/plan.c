/* plan.c -- upipe-plan: will it fit, and how fast
 *
 *     upipe-plan --model llama3-8b --machine h100x8 --tokens 5M
 *
 * Where to read: exact.h (bytes of this library's trainer, by a dry run), estimate.h (time, and the verdict), machine.h
 * (rates, with their origins), attention.h (kernels), planner.h (advice, longest sequence), search.h (all settings), best.h, longest.h,
 * calibrate.h (rates of this machine); as.h (what other programs hold); latent.h (one layer's attention of models
 * with latent attention).
 */
#define PROGRAM "upipe-plan"

#include "../train/model/lora_flag.h"
#include "best.h"
#include "calibrate.h"
#include "latent_report.h"
#include "longest.h"

/* The longest sequence of a setting, and why not a longer one if bytes are not why; 0: none fits. */
static void plan_longest(const planner *p, setting s, int64_t longest, estimate *e)
{
    char text[32];
    if (longest == 0) {
        printf("\nno length fits with these settings, not even %s tokens; --best looks for others\n",
               report_tokens(text, s.tokens));
        return;
    }
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
static int plan_one(const job *j, const planner *p, files *all)
{
    estimate e;
    advice_item help[ADVICE_MAX];
    setting s = j->s;
    int64_t longest = -1;
    packed_balance balance = {0};
    int n = 0, fits, status = 0;
    if (j->o.max_tokens) {
        longest = planner_longest(p, &s, planner_step(&s), &e);
        s.tokens = longest > 0 ? longest : planner_step(&s);
    } else {
        planner_estimate(p, &s, &e);
    }
    if (e.why[0] != '\0') return cli_fail("%s", e.why), EXIT_USAGE;
    fits = estimate_verdict(&e, p->m).fits;
    n = planner_advice(p, &s, &e, help);
    report_verdict(j, p, &s, &e);
    if (s.borders != NULL) {
        balance = packed_balance_of(&s);
        report_documents(&s, &balance);
    }
    if (s.as.program == 0 && j->config.kv_rank == 0 && /* the paper has no latents */
        (s.how.method == METHOD_ULYSSES || s.how.method == METHOD_UPIPE))
        report_block(p, &s);
    report_advice(help, n);
    if (j->o.json != NULL) {
        json_t *root = report_json(p, &s, &e, fits, help, n);
        if (longest >= 0) report_set(root, "max_tokens", json_integer(longest));
        if (balance.step != NULL) report_set(root, "documents", report_json_documents(&s, &balance));
        status = report_write(all, j->o.json, root);
    }
    if (longest >= 0) plan_longest(p, s, longest, &e);
    free(balance.step);
    return status != 0 ? status : fits ? 0 : EXIT_NO_FIT;
}

/* A result that cannot be written is found before the work, and none replaces what is read. */
static int plan_reserve(const job *j, files *all)
{
    const char *const results[] = {j->o.json, j->o.write_machine};
    char config[FILES_PATH] = "";
    int i, k, bad = 0;
    if (j->o.model != NULL) snprintf(config, sizeof config, "%s/config.json", j->o.model);
    files_begin(all);
    for (i = 0; i < 2 && !bad; ++i) {
        if (results[i] == NULL) continue;
        bad = files_spare(results[i], "--model", config) != 0 ||
              (files_spare(results[i], "--machine", j->o.machine) != 0);
        for (k = 0; k < j->o.calibrate.n && !bad; ++k)
            bad = files_spare(results[i], "--calibrate", j->o.calibrate.at[k]) != 0;
        if (!bad) bad = files_reserve(all, results[i]) != 0;
    }
    files_abandon(all);
    return bad ? EXIT_RUN : 0;
}

static int plan_write_machine(job *j, files *all)
{
    FILE *f;
    int i, status;
    for (i = 0; i < j->o.calibrate.n; ++i)
        if ((status = calibrate(&j->machine, j->o.calibrate.at[i])) != 0) return status;
    files_begin(all);
    f = files_open(all, j->o.write_machine);
    if (f == NULL) return EXIT_RUN;
    machine_write(f, &j->machine);
    return files_close(all, f) != 0 || files_commit(all) != 0 ? EXIT_RUN : 0;
}

static int plan(job *j, files *all)
{
    upipe_ops ops = {0};
    llama_layout layout;
    planner_watch watch = {0, cli_clock(NULL), j->o.progress ? 0 : 2};
    const planner p = {&j->machine, &ops, &watch};
    upipe_err e;
    upipe_status s;
    int status = plan_reserve(j, all);
    if (status == 0 && j->o.write_machine != NULL) status = plan_write_machine(j, all);
    if (status != 0 || j->o.model == NULL) return status;
    device_table(j->o.device, &ops);
    if (j->latent != NULL) {
        status = latent_plan(j, &ops, all);
        return cli_flush("the table") == 0 ? status : EXIT_RUN;
    }
    s = llama_layout_trained(&layout, &j->config, j->o.train, j->o.lora, &e);
    if (s != UPIPE_OK) return cli_fail("%s", e.text), s == UPIPE_ERR_ARG ? EXIT_USAGE : EXIT_RUN;
    j->s.layout = &layout;
    if (j->o.best)
        status = j->o.max_tokens ? longest_best(j, &p, all) : best(j, &p, all);
    else
        status = plan_one(j, &p, all);
    llama_layout_free(&layout);
    return cli_flush("the table") == 0 ? status : EXIT_RUN;
}

int main(int argc, char **argv)
{
    static job j;
    static files all;
    int status;
    cli_start();
    status = options_read(&j, argc, argv);
    status = status != 0 ? status - 1 : plan(&j, &all);
    files_abandon(&all);
    free(j.o.borders);
    return status;
}

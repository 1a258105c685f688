/* flags.h -- any words as a command line        included by a fuzzer with PROGRAM, options_read and words_used
 *
 * An input is words between blanks. What is accepted goes on to the plan: words_used.
 */
#ifndef UPIPE_FUZZ_FLAGS_H
#define UPIPE_FUZZ_FLAGS_H

enum { WORDS = 64 };

static void words_used(const options *o);

/* A plan of a rank, or a sentence. */
static void flags_plan(const upipe_plan_desc *d, int segments)
{
    upipe_fpdt f;
    upipe_plan p;
    upipe_err e;
    memset(&e, 0, sizeof e);
    memset(&f, 0, sizeof f);
    f.desc = *d;
    f.segments = segments;
    if (upipe_plan_init(&p, d, &e) != UPIPE_OK ||
        (segments > 1 && upipe_fpdt_plan(&f, 0, &p, &e) != UPIPE_OK))
        CHECK(strlen(e.text) > 10);
    else
        CHECK(p.stages >= 1 && upi_plan_sent_stage(&p, p.stages - 1, 1) >= 0);
}

static void fuzz_one(const char *input, size_t n)
{
    static char text[FUZZ_MAX + 1];
    char *words[WORDS + 1], *at = text;
    static FILE *nowhere;
    FILE *const out = stdout, *const err = stderr;
    options o;
    struct world w;
    int count = 1, status;
    memcpy(text, input, n + 1);
    if (nowhere == NULL) nowhere = fopen("/dev/null", "w");
    if (nowhere == NULL) abort();
    words[0] = text + n; /* the program's name */
    for (at = strtok(text, " "); at != NULL && count < WORDS; at = strtok(NULL, " ")) words[count++] = at;
    words[count] = NULL;
    stdout = stderr = nowhere; /* its sentences are many */
    memset(&w, 0, sizeof w);
    status = options_read(&o, &w, count, words);
    stdout = out;
    stderr = err;
    CHECK(status >= 0 && status <= 1 + EXIT_USAGE);
    if (status == 0) words_used(&o);
}

#endif

/* cli.h -- what the command lines of the programs share
 *
 *     #define PROGRAM "compare"          the name in sentences, before the first include
 *
 *     static int used(void *user, int flag, const char *text)           text: the flag's value
 *     {
 *         ...
 *         return cli_int("ranks", text, 64, &options->ranks);
 *     }
 *     int status = cli_read(list, argc, argv, given, -1, used, &options);
 *     if (status != 0) return status - 1;                    the sentence is out
 *
 * What reads a flag returns 0 to go on, or 1 + the exit status once its sentence is out; list[i].val is i.
 * What fails later returns -1 (cli_fail) with its sentence out.
 */
#ifndef COMMON_CLI_H
#define COMMON_CLI_H

#include <assert.h>
#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "upipe/upipe.h"

#include "json.h"
#include "number.h"

#ifndef PROGRAM
#error "define PROGRAM, the name in sentences, before this"
#endif

/* The folder of the sources that a program was built from; the current one if the build does not say. */
#ifndef UPIPE_SOURCE_ROOT
#define UPIPE_SOURCE_ROOT "."
#endif

#define BOOK "examples/data/genesis_exodus.txt"

enum { EXIT_RUN = 1, EXIT_USAGE = 2, CLI_SENTENCE = 16384 /* bytes of one at most, paths included */ };

/* ---- sentences ---- */

/* Of many processes with the same fault one says it: another one holds its first sentence (world.h). */
static int cli_holds;
static char cli_held[CLI_SENTENCE];

/* n bytes and a 0 behind them, as a terminal may see them: control characters other than those in `plain`, and bytes that
 * are no characters, are written as their numbers. */
static inline void cli_text(FILE *f, const char *text, size_t bytes, const char *plain)
{
    const char *const end = text + bytes;
    while (text < end) {
        const unsigned char *s = (const unsigned char *)text;
        int n = json_utf8(s);
        const int control =
            *s < 32 ? *s == 0 || strchr(plain, *s) == NULL : *s == 127 || (*s == 0xc2 && s[1] < 0xa0);
        if (n == 0 || control)
            for (n += n == 0; n > 0; --n) fprintf(f, "\\x%02x", (unsigned)(unsigned char)*text++);
        else
            for (; n > 0; --n) fputc(*text++, f);
    }
}

/* Locked, so that the sentences of several ranks do not mix. Names in files may hold what a terminal would obey. */
static inline void cli_sentence(const char *format, va_list args, const char *ending)
{
    char text[CLI_SENTENCE];
    vsnprintf(text, sizeof text, format, args);
    if (cli_holds) {
        if (cli_held[0] == '\0') memcpy(cli_held, text, sizeof cli_held);
        return;
    }
    flockfile(stderr);
    fputs(PROGRAM ": ", stderr);
    cli_text(stderr, text, strlen(text), "");
    fprintf(stderr, "%s\n", ending);
    funlockfile(stderr);
}

__attribute__((format(printf, 1, 2))) static inline int cli_fail(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    cli_sentence(format, args, "");
    va_end(args);
    return -1;
}

/* From here on this process speaks, beginning with what it held. */
static inline void cli_release(void)
{
    cli_holds = 0;
    if (cli_held[0] != '\0') cli_fail("%s", cli_held);
    cli_held[0] = '\0';
}

__attribute__((format(printf, 1, 2))) static inline int cli_refuse(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    cli_sentence(format, args, " (" PROGRAM " --help lists the flags)");
    va_end(args);
    return 1 + EXIT_USAGE;
}

/* The text of a flag like --help on stdout, and the end of the program. */
static inline int cli_print(const char *flag, const char *text)
{
    fputs(text, stdout);
    if (fflush(stdout) == 0 && !ferror(stdout)) return 1;
    cli_fail("--%s cannot be written: %s", flag, strerror(errno));
    return 1 + EXIT_RUN;
}

/* more: what else is to be said, from a comma on, or "" */
static inline int cli_version(const char *flag, const char *more)
{
    char text[128];
    snprintf(text, sizeof text, PROGRAM ", upipe %d.%d%s\n", UPIPE_VERSION_MAJOR, UPIPE_VERSION_MINOR, more);
    return cli_print(flag, text);
}

/* "deadline passed: " and so on, to stand before a sentence; nothing where the sentence says it all. */
static inline const char *cli_status(upipe_status s)
{
    switch (s) {
    case UPIPE_ERR_MEMORY:
        return "out of memory: ";
    case UPIPE_ERR_MISMATCH:
        return "ranks disagree: ";
    case UPIPE_ERR_TIMEOUT:
        return "deadline passed: ";
    case UPIPE_ERR_UNSUPPORTED:
        return "unsupported: ";
    default:
        return "";
    }
}

/* A rank that has the reason of a failed team: one with the team's status. Others only heard of it. */
static inline int cli_reason(const upipe_status *statuses, int ranks, upipe_status team)
{
    int r;
    for (r = 0; r < ranks && statuses[r] != team; ++r) {
    }
    return r < ranks ? r : 0;
}

/* ---- values ---- */

/* A whole number: 1024, 1e6; of tokens also 128k, 5M. */
static inline int cli_whole(const char *flag, const char *text, int tokens, int64_t least, int64_t most,
                            int64_t *out)
{
    int64_t value;
    if (number_whole(text, tokens, &value) != 0 || value < least || value > most)
        return cli_refuse("--%s wants a whole number from %lld to %lld, not '%s'", flag, (long long)least,
                          (long long)most, text);
    *out = value;
    return 0;
}

static inline int cli_number(const char *flag, const char *text, int64_t least, int64_t most, int64_t *out)
{
    return cli_whole(flag, text, 0, least, most, out);
}

/* A number of tokens. */
static inline int cli_tokens(const char *flag, const char *text, int64_t most, int64_t *out)
{
    return cli_whole(flag, text, 1, 1, most, out);
}

/* Bytes, which have a unit: 64KiB, 80GB; half of 63 bits at most. */
static inline int cli_bytes(const char *flag, const char *text, size_t *out)
{
    int64_t n = 0;
    if (number_bytes(text, &n) != 0 || n > INT64_MAX / 2)
        return cli_refuse("--%s wants a size with its unit (64KiB, 80GB, 1.9TiB; GB is not GiB), not '%s'",
                          flag, text);
    *out = (size_t)n;
    return 0;
}

/* A whole number from 1. */
static inline int cli_int(const char *flag, const char *text, int most, int *out)
{
    int64_t n = 0;
    int status = cli_number(flag, text, 1, most, &n);
    *out = (int)n;
    return status;
}

/* A number like 0.001 or 1e-3: no sign, no infinity, no hexadecimals. NaN if it is none. */
static inline double cli_decimal(const char *text)
{
    char *end = NULL;
    double value;
    if (text[0] == '\0' || text[strspn(text, "0123456789.eE+-")] != '\0' || text[0] == '-' || text[0] == '+')
        return NAN;
    value = strtod(text, &end);
    return *end == '\0' && isfinite(value) ? value : NAN;
}

static inline int cli_real(const char *flag, const char *text, double least, double most, double *out)
{
    double value = cli_decimal(text);
    if (!(value >= least && value <= most))
        return cli_refuse("--%s wants a number from %g to %g, not '%s'", flag, least, most, text);
    *out = value;
    return 0;
}

/* How long to wait. */
static inline int cli_seconds(const char *flag, const char *text, double *out)
{
    double value = text[strspn(text, "0123456789.")] == '\0' ? cli_decimal(text) : NAN;
    if (!(value > 0 && value <= 1e6))
        return cli_refuse("--%s wants seconds above 0, at most 1000000, not '%s'", flag, text);
    *out = value;
    return 0;
}

static inline int cli_dtype(const char *flag, const char *text, upipe_dtype *out)
{
    if (strcmp(text, "f32") != 0 && strcmp(text, "bf16") != 0)
        return cli_refuse("--%s is f32 or bf16, not '%s'", flag, text);
    *out = strcmp(text, "f32") == 0 ? UPIPE_F32 : UPIPE_BF16;
    return 0;
}

/* ---- the loop ---- */

/* Passes every flag to used; given[flag] counts them. A flag is given once, except repeatable (-1: none). */
static inline int cli_read(const struct option *list, int argc, char **argv, int *given, int repeatable,
                           int (*used)(void *user, int flag, const char *text), void *user)
{
    int at;
    for (at = 0; list[at].name != NULL; ++at)
        assert(list[at].val == at); /* a flag is its place in the list */
    opterr = 0;
    for (;;) {
        int before = optind, status;
        int flag = getopt_long(argc, argv, "+:", list, NULL); /* in order, errors told apart */
        if (flag < 0) break;
        if (flag == ':') return cli_refuse("%s wants a value", argv[before]);
        if (flag == '?')
            return cli_refuse("'%s' is no flag of this program, or takes no value", argv[before]);
        if (given[flag]++ > 0 && flag != repeatable)
            return cli_refuse("--%s is given twice", list[flag].name);
        if (cli_holds && (strcmp(list[flag].name, "help") == 0 || strcmp(list[flag].name, "version") == 0))
            return 1; /* another process prints it */
        if (list[flag].has_arg && optarg[0] == '\0') return cli_refuse("--%s is empty", list[flag].name);
        status = used(user, flag, optarg);
        if (status != 0) return status;
    }
    return optind < argc ? cli_refuse("'%s' is not a flag", argv[optind]) : 0;
}

/* ---- the machine ---- */

/* The book beside the sources that this program was built from, or below the current folder. */
static inline const char *cli_book(void)
{
    const char *built_from = UPIPE_SOURCE_ROOT "/" BOOK;
    return access(built_from, R_OK) != 0 && access(BOOK, R_OK) == 0 ? BOOK : built_from;
}

/* Seconds since some moment; of the type that a pool's clock has. */
static inline double cli_clock(void *user)
{
    struct timespec now;
    (void)user;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* Bytes of this machine's memory; a floating-point number, to be compared with sums that may be huge. */
static inline double cli_memory(void)
{
    return (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
}

#endif

/* cli.h -- what the command lines of the programs share
 *
 *     #define PROGRAM "compare"          the name in sentences, before the first include
 *
 *     int status;
 *     cli_start();                                           before anything is opened
 *     status = flags_read(...);                              flags.h
 *     ...                                                    printf
 *     return cli_flush("the table") == 0 ? 0 : EXIT_RUN;
 *
 * What refuses a flag (cli_refuse) returns 1 + the exit status, what fails later (cli_fail) -1, with its sentence out.
 */
#ifndef COMMON_CLI_H
#define COMMON_CLI_H

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "upipe/upipe.h"

#include "json.h"

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
static int cli_mute; /* the sentence that counts is out: what follows from it says nothing */

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
    const char *at;
    if (cli_mute) return;
    vsnprintf(text, sizeof text, format, args);
    if (cli_holds) {
        if (cli_held[0] == '\0') memcpy(cli_held, text, sizeof cli_held);
        return;
    }
    for (at = text; *at >= ' ' && *at <= '~'; ++at) {
    }
    flockfile(stderr);
    if (*at == '\0') { /* in one write: a launcher that joins what ranks say takes it apart nowhere */
        fprintf(stderr, PROGRAM ": %s%s\n", text, ending);
    } else {
        fputs(PROGRAM ": ", stderr);
        cli_text(stderr, text, strlen(text), "");
        fprintf(stderr, "%s\n", ending);
    }
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

/* What is no failure: said by one process, and not held. */
__attribute__((format(printf, 1, 2))) static inline void cli_note(const char *format, ...)
{
    va_list args;
    if (cli_holds) return;
    va_start(args, format);
    cli_sentence(format, args, "");
    va_end(args);
}

/* From here on this process prints, beginning with what it held. */
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

/* cli_start -- descriptors 0 to 2 are open from here on, or the program has ended. In the place of a closed one the next
 *              file would come that the program opens, and what is printed would be written to it. Whatever is written
 *              to those that are opened here fails. */
static inline void cli_start(void)
{
    int fd;
    for (fd = 0; fd <= STDERR_FILENO; ++fd) {
        if (fcntl(fd, F_GETFD) >= 0 || open("/dev/null", O_RDONLY) >= 0) continue;
        cli_fail("descriptor %d is closed, and /dev/null cannot be opened: %s", fd, strerror(errno));
        exit(EXIT_RUN);
    }
}

/* cli_flush -- all that was printed has been written; -1 with the sentence out if it has not */
static inline int cli_flush(const char *what)
{
    if (fflush(stdout) == 0 && !ferror(stdout)) return 0;
    return cli_fail("%s cannot be written: %s", what, strerror(errno));
}

/* The text of a flag like --help on stdout, and the end of the program. */
static inline int cli_print(const char *flag, const char *text)
{
    char what[32];
    snprintf(what, sizeof what, "--%s", flag);
    fputs(text, stdout);
    return cli_flush(what) == 0 ? 1 : 1 + EXIT_RUN;
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

/* Bytes of this machine's memory; a floating-point number, to be compared with sums that may be huge. 0, or -1 with the
 * sentence out. */
static inline int cli_memory(double *bytes)
{
    const long pages = sysconf(_SC_PHYS_PAGES), each = sysconf(_SC_PAGESIZE);
    *bytes = (double)pages * (double)each;
    return pages > 0 && each > 0 ? 0 : cli_fail("the system does not say how much memory this machine has");
}

#endif

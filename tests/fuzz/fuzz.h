/* fuzz.h -- what the fuzzers share: an input is a line of a corpus, or what libFuzzer makes of one
 *
 *     #include "fuzz.h"
 *     static void fuzz_one(const char *input, size_t n)       any bytes, and a 0 behind them
 *     {
 *         ...                                                 CHECK what must hold; return in milliseconds
 *     }
 *
 * A corpus is a text: one input a line, in which \xHH is a byte and \\ a backslash; # begins a comment line. As a plain
 * program main replays the corpus that it is given. Compiled with LIBFUZZER and -fsanitize=fuzzer, inputs come from
 * there, and a check that fails aborts (fuzz.py).
 */
#ifndef UPIPE_FUZZ_H
#define UPIPE_FUZZ_H

#include "../lib/test.h"

enum { FUZZ_MAX = 1 << 16 };

static void fuzz_one(const char *input, size_t n);

#ifdef LIBFUZZER

#ifdef __cplusplus
extern "C"
#endif
    int
    LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    static char input[FUZZ_MAX + 1];
    if (n > FUZZ_MAX) return 0;
    memcpy(input, data, n);
    input[n] = 0;
    fuzz_one(input, n);
    if (test_failures > 0) abort();
    return 0;
}

#else

/* A line's bytes, in place. */
static size_t fuzz_decode(char *line)
{
    size_t n = 0;
    const char *at = line;
    for (; *at != 0 && *at != '\n'; ++n) {
        unsigned byte = 0;
        if (at[0] == '\\' && at[1] == 'x' && sscanf(at + 2, "%2x", &byte) == 1) {
            line[n] = (char)byte;
            at += 4;
        } else {
            at += at[0] == '\\' && at[1] == '\\';
            line[n] = *at++;
        }
    }
    line[n] = 0;
    return n;
}

int main(int argc, char **argv)
{
    static char line[FUZZ_MAX];
    FILE *corpus = argc == 2 ? fopen(argv[1], "rb") : NULL;
    long inputs = 0, at = 0;
    if (corpus == NULL) {
        fprintf(stderr, "usage: %s CORPUS.txt\n", argv[0]);
        return 2;
    }
    while (fgets(line, sizeof line, corpus) != NULL) {
        long failures = test_failures;
        ++at;
        if (line[0] == '#' || line[0] == '\n') continue;
        fuzz_one(line, fuzz_decode(line));
        ++inputs;
        if (test_shown_since(failures)) printf("%s:%ld fails\n", argv[1], at);
    }
    CHECK(feof(corpus));
    fclose(corpus);
    printf("%ld inputs, %ld checks, %ld failed\n", inputs, test_checks, test_failures);
    return test_failures != 0 || inputs == 0;
}

#endif
#endif

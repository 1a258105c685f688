/* fuzz.h -- what the fuzzers share: an input is a line of a corpus, or what libFuzzer makes of one
 *
 *     #include "fuzz.h"
 *     static void fuzz_one(const char *input, size_t n)       any bytes, and a 0 behind them
 *     {
 *         ...                                                 CHECK what must hold; return in milliseconds
 *     }
 *
 * A corpus is a text: one input a line, in which \xHH is a byte and \\ a backslash; # begins a comment line. As a plain
 * program main replays the corpus that it is given, and inputs of it with random damage for UPIPE_FUZZ_SECONDS (2) divided by
 * FUZZ_PARTS; UPIPE_SEED is the seed. Compiled with LIBFUZZER and -fsanitize=fuzzer, inputs come from
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

typedef struct fuzz_input {
    char *bytes;
    size_t n;
} fuzz_input;

#ifndef FUZZ_PARTS
#define FUZZ_PARTS 4 /* there are as many fuzzers */
#endif

enum { FUZZ_INPUTS = 1024 };

/* [from, to) becomes these bytes, if they fit. */
static size_t fuzz_replace(char *input, size_t n, size_t from, size_t to, const char *bytes, size_t count)
{
    if (n - (to - from) + count > FUZZ_MAX) return n;
    memmove(input + from + count, input + to, n - to);
    memcpy(input + from, bytes, count);
    return n - (to - from) + count;
}

/* A random change; at most 512 bytes longer. Returns the length. */
static size_t fuzz_damage(char *input, size_t n, const fuzz_input *other, test_rng *rng)
{
    static const char *const words[] = {"0",     "1",   "8",    "-1",   "4294967296", "9223372036854775807",
                                        "1e400", "0.5", "null", "true", "\\u0000",    "9223372036854775808"};
    static const char marks[] = "{}[]\",: ";
    static char piece[512];
    const char *word = words[test_below(rng, (int)(sizeof words / sizeof *words))];
    const size_t at = (size_t)test_below(rng, (int)n + 1);
    size_t count, from = at, to;
    switch (test_below(rng, 9)) {
    case 0:
        if (at < n) input[at] = (char)(input[at] ^ 1 << test_below(rng, 8));
        return n;
    case 1:
        if (at < n) input[at] = (char)test_below(rng, 256);
        return n;
    case 2:
        return at;
    case 3: /* a piece of the other one */
        from = (size_t)test_below(rng, (int)other->n + 1);
        count = (size_t)test_below(rng, (int)(other->n - from < 256 ? other->n - from : 256) + 1);
        return fuzz_replace(input, n, at, at + (size_t)test_below(rng, (int)(n - at) + 1),
                            other->bytes + from, count);
    case 4:
    case 5:
    case 6: /* a number */
        while (from < n && (input[from] < '0' || input[from] > '9')) ++from;
        for (to = from; to < n && input[to] >= '0' && input[to] <= '9';) ++to;
        return fuzz_replace(input, n, from, to, word, strlen(word));
    case 7: /* the same twice: keys, too */
        count = (size_t)test_below(rng, (int)(n - at < sizeof piece ? n - at : sizeof piece) + 1);
        memcpy(piece, input + at, count);
        return fuzz_replace(input, n, at, at, piece, count);
    default: /* a mark, or many */
        count = test_below(rng, 4) > 0 ? 1 : 1 + (size_t)test_below(rng, (int)sizeof piece);
        memset(piece, marks[test_below(rng, (int)sizeof marks - 1)], sizeof piece);
        return fuzz_replace(input, n, at, at, piece, count);
    }
}

static void fuzz_random(const fuzz_input *inputs, int n)
{
    static char input[FUZZ_MAX + 1];
    const double end = test_seconds() + (double)test_env("UPIPE_FUZZ_SECONDS", 2) / FUZZ_PARTS;
    test_rng rng;
    long draws;
    rng.state = (uint64_t)test_env("UPIPE_SEED", 1);
    for (draws = 0; test_seconds() < end && test_failures == 0; ++draws) {
        const fuzz_input *one = &inputs[test_below(&rng, n)];
        size_t bytes = one->n, i;
        int changes = 1 + test_below(&rng, 3);
        memcpy(input, one->bytes, bytes);
        while (changes-- > 0) bytes = fuzz_damage(input, bytes, &inputs[test_below(&rng, n)], &rng);
        input[bytes] = 0;
        fuzz_one(input, bytes);
        if (test_failures == 0) continue;
        printf("input: ");
        for (i = 0; i < bytes; ++i)
            printf(input[i] == '\\'                    ? "\\\\"
                   : input[i] >= ' ' && input[i] < 127 ? "%c"
                                                       : "\\x%02x",
                   (unsigned char)input[i]);
        printf("\n");
    }
    printf("damaged: %ld inputs from seed %ld\n", draws, test_env("UPIPE_SEED", 1));
}

int main(int argc, char **argv)
{
    static char line[FUZZ_MAX];
    static fuzz_input inputs[FUZZ_INPUTS];
    FILE *corpus = argc == 2 ? fopen(argv[1], "rb") : NULL;
    long at = 0;
    int n = 0, i;
    if (corpus == NULL) {
        fprintf(stderr, "usage: %s CORPUS.txt\n", argv[0]);
        return 2;
    }
    while (n < FUZZ_INPUTS && fgets(line, sizeof line, corpus) != NULL) {
        fuzz_input *one = &inputs[n];
        long failures = test_failures;
        ++at;
        if (line[0] == '#' || line[0] == '\n') continue;
        one->n = fuzz_decode(line);
        one->bytes = (char *)malloc(one->n + 1);
        if (one->bytes == NULL) abort();
        memcpy(one->bytes, line, one->n + 1);
        fuzz_one(line, one->n);
        ++n;
        if (test_shown_since(failures)) printf("%s:%ld fails\n", argv[1], at);
    }
    CHECK(feof(corpus));
    fclose(corpus);
    if (n > 0) fuzz_random(inputs, n);
    for (i = 0; i < n; ++i) free(inputs[i].bytes);
    printf("%d inputs, %ld checks, %ld failed\n", n, test_checks, test_failures);
    return test_failures != 0 || n == 0;
}

#endif
#endif

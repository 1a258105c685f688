/* test.h -- what every test program uses: checks that print both values, a seeded generator, a verdict
 *
 * A program's main ends with `return test_end("name");`, which prints the number of checks and is non-zero if
 * one failed or none ran. Checks go on after a failure. Random tests take their seed and count from the
 * environment (UPIPE_SEED, UPIPE_DRAWS), and print a line that replays a failing draw.
 */
#ifndef UPIPE_TEST_H
#define UPIPE_TEST_H

#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static long test_checks, test_failures;

#define TEST_MAX_SHOWN 20

/* Where every instruction is watched or emulated, a long test runs less of the same. */
#ifdef BRIEF_TESTS
enum { BRIEF = 1 };
#else
enum { BRIEF = 0 };
#endif

__attribute__((unused, format(printf, 4, 5))) static int test_check(int ok, const char *file, int line,
                                                                    const char *format, ...)
{
    __atomic_fetch_add(&test_checks, 1, __ATOMIC_RELAXED);
    if (!ok && __atomic_add_fetch(&test_failures, 1, __ATOMIC_RELAXED) <= TEST_MAX_SHOWN) {
        va_list args;
        char text[1024];
        va_start(args, format);
        vsnprintf(text, sizeof text, format, args);
        va_end(args);
        fprintf(stderr, "%s:%d: %s\n", file, line, text);
    }
    return ok;
}

#define CHECK(condition) test_check(!!(condition), __FILE__, __LINE__, "%s", #condition)
/* A check with a message of its own. */
#define CHECK_SAY(condition, ...) test_check(!!(condition), __FILE__, __LINE__, __VA_ARGS__)
#define CHECK_INT(got, want)                                                                      \
    do {                                                                                          \
        long long got_ = (long long)(got), want_ = (long long)(want);                             \
        test_check(got_ == want_, __FILE__, __LINE__, "%s is %lld, not %lld", #got, got_, want_); \
    } while (0)
/* A call that must return this status. */
#define CHECK_STATUS(call, want, err)                                                     \
    do {                                                                                  \
        upipe_status got_ = (call);                                                       \
        test_check(got_ == (want), __FILE__, __LINE__, "%s gives %s (%s), not %s", #call, \
                   upipe_status_name(got_), (err).text, upipe_status_name(want));         \
    } while (0)
/* A sentence must name these words. */
#define CHECK_TEXT(text, part)                                                                           \
    test_check(strstr((text), (part)) != NULL, __FILE__, __LINE__, "\"%s\" does not say \"%s\"", (text), \
               (part))
#define CHECK_BYTES(got, want, bytes)                                                                       \
    test_check(memcmp((got), (want), (size_t)(bytes)) == 0, __FILE__, __LINE__, "%s differs from %s", #got, \
               #want)

__attribute__((unused)) static int test_end(const char *name)
{
    printf("%s: %ld checks, %ld failed\n", name, test_checks, test_failures);
    return test_failures != 0 || test_checks == 0;
}

/* splitmix64: the same numbers everywhere */
typedef struct test_rng {
    uint64_t state;
} test_rng;

__attribute__((unused)) static uint64_t test_u64(test_rng *r)
{
    uint64_t z = (r->state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* 0 .. n-1 */
__attribute__((unused)) static int test_below(test_rng *r, int n)
{
    return (int)(test_u64(r) % (uint64_t)n);
}

/* roughly normal, mean 0, variance 1 */
__attribute__((unused)) static double test_normal(test_rng *r)
{
    double s = 0;
    int i;
    for (i = 0; i < 12; ++i) s += (double)(test_u64(r) >> 11) * 0x1p-53;
    return s - 6;
}

__attribute__((unused)) static long test_env(const char *name, long otherwise)
{
    const char *s = getenv(name);
    return s != NULL && *s ? strtol(s, NULL, 0) : otherwise;
}

#endif

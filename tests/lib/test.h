/* test.h -- what every test program uses: checks that print both values, tests by name, a seeded generator, a verdict
 *
 *     int main(int argc, char **argv)
 *     {
 *         test_begin(argc, argv);
 *         TEST(test_counts());
 *         return test_end("mem");
 *     }
 *
 * `test_mem counts` runs test_counts alone, and so does UPIPE_TEST=counts, which takes several with commas between them
 * and is for programs that have arguments of their own. test_end prints the number of checks and is non-zero if one
 * failed or none ran, 2 if a name is no test's. Checks go on after a failure; test_failed is where a debugger stops at
 * each. Random tests take their seed and count from the environment, and print a line that replays a failing draw:
 *   UPIPE_SEED       draw i has the seed UPIPE_SEED + i (1)
 *   UPIPE_DRAWS      so many draws exactly; without it
 *   UPIPE_DRAWS_MIN  so many at the least (200), and
 *   UPIPE_SECONDS    more until so many seconds have passed (0).
 * UPIPE_FULL is 1 in the full run, TEST_BRIEF where programs run under valgrind or the like.
 */
#ifndef UPIPE_TEST_H
#define UPIPE_TEST_H

#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static long test_checks, test_failures;

enum { TEST_MAX_SHOWN = 10, TEST_MAX_TESTS = 64 };

/* The tests of a main in order, a name once; before the first of them there is the main itself. */
static struct {
    const char *name;
    int length;
    long failed;
} test_list[TEST_MAX_TESTS + 1] = {{"main", 4, 0}};
static int test_listed = 1, test_now;
static char test_spot[200];
static __thread int test_rank = -1;

/* Where every instruction is watched or emulated, a long test runs less of the same. */
#ifdef BRIEF_TESTS
enum { BRIEF = 1 };
#else
enum { BRIEF = 0 };
#endif

/* Every failure comes here: `break test_failed` in gdb, then `up`. */
__attribute__((unused, noinline)) static void test_failed(const char *file, int line, const char *text)
{
    __atomic_fetch_add(&test_list[test_now].failed, 1, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&test_failures, 1, __ATOMIC_RELAXED) <= TEST_MAX_SHOWN)
        fprintf(stderr, test_rank < 0 ? "%s:%d: %s%s%s\n" : "%s:%d: %s%s%s, rank %d\n", file, line, text,
                test_spot[0] ? "; " : "", test_spot, test_rank);
    if (getenv("UPIPE_PLANTED")) _Exit(1); /* a planted bug is seen, which nobody waits to see again */
}

/* Where the checks are that follow, up to the next place or test: indices that their sentences do not have. The main thread
 * says so; a rank's thread says test_rank. */
__attribute__((unused, format(printf, 1, 2))) static void test_at(const char *format, ...)
{
    va_list args;
    test_rank = -1;
    va_start(args, format);
    vsnprintf(test_spot, sizeof test_spot, format, args);
    va_end(args);
}

/* Has one failed since there were so many failures, and was it shown? */
__attribute__((unused)) static int test_shown_since(long failed)
{
    return test_failures > failed && failed < TEST_MAX_SHOWN;
}

__attribute__((unused, format(printf, 4, 5))) static int test_check(int ok, const char *file, int line,
                                                                    const char *format, ...)
{
    __atomic_fetch_add(&test_checks, 1, __ATOMIC_RELAXED);
    if (!ok) {
        va_list args;
        char text[1024];
        va_start(args, format);
        vsnprintf(text, sizeof text, format, args);
        va_end(args);
        test_failed(file, line, text);
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
/* A call that must be refused with this status and these words. */
#define CHECK_REFUSED(call, status, err, words) \
    do {                                        \
        CHECK_STATUS(call, status, err);        \
        CHECK_TEXT((err).text, words);          \
    } while (0)
#define CHECK_BYTES(got, want, bytes)                                                                       \
    test_check(memcmp((got), (want), (size_t)(bytes)) == 0, __FILE__, __LINE__, "%s differs from %s", #got, \
               #want)

/* The next name of "counts,test_marks", or that of a call, without test_ and check_; NULL at the end. */
static const char *test_name(const char **list, int *length)
{
    const char *s = *list + strspn(*list, ",");
    s += strncmp(s, "test_", 5) == 0 ? 5 : strncmp(s, "check_", 6) == 0 ? 6 : 0;
    *length = (int)strcspn(s, ",(");
    *list = s + strcspn(s, ",");
    return *s != 0 ? s : NULL;
}

static int test_same_name(const char *one, int length, const char *other, int others)
{
    return length == others && strncmp(one, other, (size_t)length) == 0;
}

/* What is asked for; NULL for everything. */
static const char *test_asked(void)
{
    const char *asked = getenv("UPIPE_TEST");
    return asked != NULL && *asked ? asked : NULL;
}

/* A test begins, if it is asked for. */
__attribute__((unused)) static int test_wanted(const char *call)
{
    const char *asked = test_asked(), *word, *name;
    int length, n;
    test_spot[0] = 0;
    test_rank = -1;
    name = test_name(&call, &length);
    for (test_now = 1; test_now < test_listed; ++test_now)
        if (test_same_name(test_list[test_now].name, test_list[test_now].length, name, length)) break;
    if (test_now > TEST_MAX_TESTS) abort();
    if (test_now == test_listed) {
        test_list[test_listed].name = name;
        test_list[test_listed++].length = length;
    }
    if (asked == NULL) return 1;
    while ((word = test_name(&asked, &n)) != NULL)
        if (test_same_name(word, n, name, length)) return 1;
    return 0;
}

/* A test is a call, and has the name of its function, or another. */
#define TEST(call) TEST_OF(#call, call)
#define TEST_OF(name, call)          \
    do {                             \
        if (test_wanted(name)) call; \
    } while (0)

/* Arguments are names of tests. */
__attribute__((unused)) static void test_begin(int argc, char **argv)
{
    char names[1024] = "";
    size_t n = 0;
    for (int i = 1; i < argc && n < sizeof names; ++i)
        n += (size_t)snprintf(names + n, sizeof names - n, "%s%s", i > 1 ? "," : "", argv[i]);
    if (argc > 1) setenv("UPIPE_TEST", names, 1);
}

/* Is a name that was asked for no test's? Says which there are. */
static int test_unknown(void)
{
    const char *asked = test_asked(), *word;
    int n, i, unknown = 0;
    while (asked != NULL && (word = test_name(&asked, &n)) != NULL) {
        for (i = 1; i < test_listed; ++i)
            if (test_same_name(word, n, test_list[i].name, test_list[i].length)) break;
        if (i == test_listed) unknown = fprintf(stderr, "no test is named %.*s\n", n, word);
    }
    if (unknown) fprintf(stderr, "the tests are:");
    for (i = 1; i < test_listed && unknown; ++i)
        fprintf(stderr, " %.*s", test_list[i].length, test_list[i].name);
    if (unknown) fprintf(stderr, "\n");
    return unknown != 0;
}

__attribute__((unused)) static int test_end(const char *name)
{
    if (test_failures > TEST_MAX_SHOWN)
        fprintf(stderr, "%ld more failures are not shown\n", test_failures - TEST_MAX_SHOWN);
    for (int i = 0; i < test_listed; ++i)
        if (test_list[i].failed > 0)
            fprintf(stderr, "failed: %.*s, %ld times\n", test_list[i].length, test_list[i].name,
                    test_list[i].failed);
    if (test_unknown()) return 2;
    if (test_asked() != NULL) printf("chosen: %s\n", test_asked());
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
    for (int i = 0; i < 12; ++i) s += (double)(test_u64(r) >> 11) * 0x1p-53;
    return s - 6;
}

__attribute__((unused)) static long test_env(const char *name, long otherwise)
{
    const char *s = getenv(name);
    return s != NULL && *s ? strtol(s, NULL, 0) : otherwise;
}

__attribute__((unused)) static int test_full(void)
{
    return test_env("UPIPE_FULL", 0) != 0;
}

/* Less of the same, but in the full run. */
__attribute__((unused)) static int test_brief(void)
{
    return (BRIEF || test_env("TEST_BRIEF", 0) != 0) && !test_full();
}

__attribute__((unused)) static double test_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

__attribute__((unused)) static void test_nap(double seconds)
{
    struct timespec t;
    t.tv_sec = (time_t)seconds;
    t.tv_nsec = (long)((seconds - (double)t.tv_sec) * 1e9);
    while (nanosleep(&t, &t) != 0) continue;
}

/* The number of draws, for what has no time of its own: tests take a part of it. */
__attribute__((unused)) static long test_draws_wanted(void)
{
    return test_env("UPIPE_DRAWS", test_env("UPIPE_DRAWS_MIN", 200));
}

/* Draws until both their number and the time are reached. One that takes ten times its seconds, and more than 80, to come
 * to the number has failed; a machine that is slower than its budget still gets there. */
typedef struct test_draws {
    long seed, done, least;
    double began, budget, patience;
} test_draws;

/* A program whose draws are longer takes a part of the number and of the seconds. */
__attribute__((unused)) static test_draws test_draws_begin(long part)
{
    test_draws d;
    d.seed = test_env("UPIPE_SEED", 1);
    d.done = 0;
    d.least = test_draws_wanted() / part;
    d.began = test_seconds();
    d.budget = test_env("UPIPE_DRAWS", -1) >= 0 ? 0 : (double)test_env("UPIPE_SECONDS", 0) / (double)part;
    d.patience = d.budget > 8 ? 10 * d.budget : d.budget > 0 ? 80 : 1e9;
    return d;
}

__attribute__((unused)) static int test_draws_more(const test_draws *d)
{
    double passed = test_seconds() - d->began;
    return (d->done < d->least && passed < d->patience) || passed < d->budget;
}

__attribute__((unused)) static void test_draws_end(const test_draws *d)
{
    printf("reached: %ld draws from seed %ld in %.0f s (at least %ld, and for %.0f s)\n", d->done, d->seed,
           test_seconds() - d->began, d->least, d->budget);
    CHECK_SAY(d->done >= d->least, "only %ld draws in %.0f s, at least %ld count", d->done,
              test_seconds() - d->began, d->least);
}

#endif

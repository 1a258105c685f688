/* test_abi_threads.c -- handles of the C ABI that are closed while other threads call, or close, and a fork under calls
 *
 * What is freed under a call is seen by the sanitizers, and elsewhere by what MALLOC_PERTURB_ leaves in freed memory.
 */
#include "../examples/bindings/c/upipe_abi.h"
#include "lib/test.h"

#include <pthread.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

enum { HANDLES = BRIEF ? 50 : 3000, FORKS = BRIEF ? 20 : 300, CALLERS = 2, ROWS = 4, RANKS = 2 };

static uintptr_t handle; /* atomic: the one that is called for; 0: the threads end */
static long closes;      /* atomic */

static upipe_abi *now(void)
{
    return (upipe_abi *)__atomic_load_n(&handle, __ATOMIC_ACQUIRE);
}

static upipe_abi *open_next(void)
{
    const upipe_abi_desc d = {.tokens = ROWS * RANKS, .ranks = RANKS, .heads = 2, .head_dim = 32};
    char why[256] = "";
    upipe_abi *u = upipe_abi_open(&d, why, sizeof why);
    if (!CHECK_SAY(u != NULL, "not open: %s", why)) exit(1);
    __atomic_store_n(&handle, (uintptr_t)u, __ATOMIC_RELEASE);
    return u;
}

static void begin(pthread_t *threads, void *(*body)(void *))
{
    for (int i = 0; i < CALLERS; ++i) CHECK_INT(pthread_create(&threads[i], NULL, body, NULL), 0);
}

static void join(pthread_t *threads)
{
    __atomic_store_n(&handle, (uintptr_t)0, __ATOMIC_RELEASE);
    for (int i = 0; i < CALLERS; ++i) CHECK_INT(pthread_join(threads[i], NULL), 0);
}

/* Each call that does not wait for another rank, of ranks that are there and one that is not. */
static void *call(void *none)
{
    int64_t first, positions[ROWS];
    upipe_abi *u;
    while ((u = now()) != NULL) {
        for (int rank = 0; rank <= RANKS; ++rank) {
            const int64_t rows = upipe_abi_rows(u, rank, &first);
            CHECK_SAY(rows == -1 || (rank < RANKS && rows == ROWS && first == ROWS * rank),
                      "rank %d has %lld rows from %lld", rank, (long long)rows, (long long)first);
            upipe_abi_positions(u, rank, positions);
            CHECK(upipe_abi_bytes(u, rank) != 0 && upipe_abi_saved_bytes(u, rank) != 0);
            CHECK(upipe_abi_drop(u, rank, 0) != 0);
            upipe_abi_sinks(u, rank, NULL, NULL);
            CHECK(strlen(upipe_abi_error(u, rank)) < 256);
            upipe_abi_abort(u, rank, "a caller has left");
        }
        sched_yield(); /* else there is always a call, and no close */
    }
    return none;
}

static void test_calls(void)
{
    pthread_t threads[CALLERS];
    open_next();
    begin(threads, call);
    for (int i = 0; i < HANDLES; ++i) {
        upipe_abi *u = now();
        while (upipe_abi_close(u) != 0) sched_yield();
        CHECK(upipe_abi_rows(u, 0, NULL) == -1);
        open_next();
    }
    join(threads);
}

static void *close_now(void *none)
{
    upipe_abi *u;
    for (int i = 1; (u = now()) != NULL; ++i) {
        if (upipe_abi_close(u) == 0) __atomic_fetch_add(&closes, 1, __ATOMIC_RELAXED);
        if (i % 50 == 0) sched_yield(); /* else few handles are opened */
    }
    return none;
}

static void test_closes(void)
{
    pthread_t threads[CALLERS];
    open_next();
    begin(threads, close_now);
    for (int i = 0; i < HANDLES; ++i) {
        upipe_abi *u = now();
        if (upipe_abi_close(u) == 0) __atomic_fetch_add(&closes, 1, __ATOMIC_RELAXED);
        if (i < HANDLES - 1) open_next();
    }
    join(threads);
    CHECK_INT(closes, HANDLES);
}

/* Little else than looking for a handle. */
static void *look(void *none)
{
    upipe_abi *u;
    while ((u = now()) != NULL) CHECK(upipe_abi_bytes(u, RANKS) == -1);
    return none;
}

/* A child's calls end, whatever the other threads were in. */
static void test_fork(void)
{
    pthread_t threads[CALLERS];
    upipe_abi *u = open_next();
    begin(threads, look);
    for (int i = 0; i < FORKS; ++i) {
        int status = -1;
        const pid_t child = fork();
        if (child == 0) {
            alarm(10);
            _exit(upipe_abi_rows(u, 0, NULL) == -1 && strstr(upipe_abi_error(u, 0), "forked") != NULL &&
                          upipe_abi_close(u) != 0
                      ? 0
                      : 1);
        }
        CHECK_INT(waitpid(child, &status, 0), child);
        if (!CHECK_SAY(status == 0, "a child ends with status %d", status)) break;
    }
    join(threads);
    CHECK_INT(upipe_abi_close(u), 0);
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    TEST(test_calls());
    TEST(test_closes());
    TEST(test_fork());
    return test_end("abi threads");
}

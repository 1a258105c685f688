/* executed.c -- which functions a program executes inside some of its own; tests/check_reach.py compiles both
 *
 * The program is compiled with -finstrument-functions, so it says every function that begins and ends. $EXECUTED_IN has
 * the addresses of the functions to look into. At its end this prints a line for each function that was executed inside
 * of one on any thread: the number of the outer function, from 0, and the address of the inner one, itself included.
 *
 * $EXECUTED_TO has the address of one function: where a thread beside the first enters it for the first time, the functions
 * that have begun and not ended are those of the first thread and of this one, a line "path ADDRESS" each.
 */
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#define PLAIN __attribute__((no_instrument_function))

enum { ROOTS = 8, SEEN = 4096, DEEP = 128 };

static struct {
    uintptr_t root[ROOTS];
    int roots;
    uintptr_t seen[ROOTS][SEEN];
    int seen_n[ROOTS];
    atomic_flag busy;
} run = {.busy = ATOMIC_FLAG_INIT};
static _Thread_local int depth, inside; /* calls below the outer function, and its number */

struct stack {
    uintptr_t at[DEEP];
    int n;
};
static _Thread_local struct stack own;
static struct stack *first, paths[2]; /* paths: of the first thread, and of the other */
static uintptr_t to;

PLAIN __attribute__((constructor)) static void begin(void)
{
    const char *p = getenv("EXECUTED_IN");
    const char *path = getenv("EXECUTED_TO");
    char *end;
    first = &own;
    if (path != NULL) to = strtoul(path, &end, 16);
    while (p != NULL && run.roots < ROOTS && (run.root[run.roots] = strtoul(p, &end, 16)) != 0) {
        ++run.roots;
        p = end;
    }
}

PLAIN __attribute__((destructor)) static void end(void)
{
    int r, i;
    for (r = 0; r < run.roots; ++r)
        for (i = 0; i < run.seen_n[r]; ++i) fprintf(stderr, "%d %" PRIxPTR "\n", r, run.seen[r][i]);
    for (r = 0; r < 2; ++r)
        for (i = 0; i < paths[r].n; ++i) fprintf(stderr, "path %" PRIxPTR "\n", paths[r].at[i]);
}

PLAIN static void note(uintptr_t function)
{
    int i;
    while (atomic_flag_test_and_set(&run.busy)) {
    }
    for (i = 0; i < run.seen_n[inside] && run.seen[inside][i] != function;) ++i;
    if (i == run.seen_n[inside]) {
        if (i == SEEN) abort();
        run.seen[inside][run.seen_n[inside]++] = function;
    }
    atomic_flag_clear(&run.busy);
}

PLAIN static void note_path(uintptr_t function)
{
    if (own.n == DEEP) abort();
    own.at[own.n++] = function;
    if (function != to || &own == first) return;
    while (atomic_flag_test_and_set(&run.busy)) {
    }
    if (paths[0].n == 0) {
        paths[0] = *first;
        paths[1] = own;
    }
    atomic_flag_clear(&run.busy);
}

PLAIN void __cyg_profile_func_enter(void *function, void *from);
PLAIN void __cyg_profile_func_exit(void *function, void *from);

PLAIN void __cyg_profile_func_enter(void *function, void *from)
{
    (void)from;
    note_path((uintptr_t)function);
    if (depth == 0) {
        for (inside = 0; inside < run.roots && run.root[inside] != (uintptr_t)function;) ++inside;
        if (inside == run.roots) return;
    }
    ++depth;
    note((uintptr_t)function);
}

PLAIN void __cyg_profile_func_exit(void *function, void *from)
{
    (void)function;
    (void)from;
    --own.n;
    if (depth > 0) --depth;
}

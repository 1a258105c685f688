/* simt.h -- runs CUDA kernels on CPU fibers: threads, blocks, barriers, launches      C++17, tests only
 *
 * Every CUDA thread is a fiber. The fibers of a block take turns on one OS thread; they change over at
 * barriers, warp collectives and pauses, so a thread runs on alone from one of those to the next. Up to
 * SIMT_THREADS blocks of a launch run side by side. The kernels' names for all this are in seams.h; warp
 * collectives in simt_warp.h, asynchronous copies in simt_copy.h, what Hopper added in simt_hopper.h, the
 * race detector in simt_race.h.
 *
 *     simt_shape shape = {{blocks, 1, 1}, {256, 1, 1}, shared_bytes};
 *     simt_run(shape, [&] { kernel(x, n); });         returns when every block has ended
 *
 * Time stands still while any thread of the launch can go on, and then goes on to the end of a wait that has one.
 *
 * Whatever a device would leave undefined is a finding: one report on stderr, then the process ends with
 * status SIMT_STATUS. Found are: a barrier that part of a block reaches or that its threads reach at
 * different lines; collectives whose lanes differ in place or mask; waiting for ever; shared memory before
 * its start and past its end; addresses that an instruction can't take; a fiber's stack running over; and
 * what simt_race.h finds. Shared memory is full of NaNs when a block starts.
 *
 *     SIMT_SEED=n     n > 0: random order of blocks, and of the threads that could go on. Three blocks then
 *                     take turns, which end at barriers, pauses and releases, so that a seed gives the same
 *                     run again
 *     SIMT_EAGER=1    asynchronous copies land at once, not as late as they may
 *     SIMT_THREADS=n  blocks that run side by side (default: the cores; 3 where they take turns); more where the
 *                     launch says that so many wait for one another
 *
 * What it can't show: speed, bank conflicts, the rounding inside a tensor core, a warp that runs ahead
 * between two barriers in the middle of another's instructions (the race detector stands for that).
 */
#ifndef SIMT_H
#define SIMT_H

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <type_traits>
#include <unistd.h>

#if defined(__SANITIZE_ADDRESS__)
#define SIMT_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define SIMT_ASAN 1
#endif
#endif
#ifdef SIMT_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

/* The emulator's own accesses are not the kernel's. */
#if defined(__clang__)
#define SIMT_QUIET __attribute__((disable_sanitizer_instrumentation))
#else
#define SIMT_QUIET __attribute__((no_sanitize_thread))
#endif
/* Loops that are worth it in any build. */
#if defined(__clang__)
#define SIMT_FAST
#else
#define SIMT_FAST __attribute__((optimize("O3")))
#endif
/* The caller's place, as the last two parameters. */
#define SIMT_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

enum {
    SIMT_STATUS = 70,    /* of a process that ends by a finding */
    SIMT_THREADS = 1024, /* of a block, at most */
    SIMT_WARP = 32,
    SIMT_GUARD = 1 << 20,     /* before and after shared memory */
    SIMT_SHARED_START = 1024, /* address of the first shared byte: not 0, as on a device */
    SIMT_POISON = 0x7fc17fc1, /* a NaN as f32 and as two bf16 */
#ifdef SIMT_ASAN
    SIMT_STACK = 1 << 20
#else
    SIMT_STACK = 1 << 18
#endif
};

struct simt_extent {
    int64_t x, y, z;
};

struct simt_shape {
    simt_extent grid, block;
    size_t shared;
    int together; /* blocks that wait for one another: so many run side by side at least */
};

struct uint3 {
    unsigned x, y, z;
};

enum simt_state { SIMT_READY, SIMT_WAITING, SIMT_DONE };

struct simt_copy;   /* simt_copy.h */
struct simt_bulk;   /* simt_hopper.h: a copy out of shared memory by a thread's word */
struct simt_hopper; /* simt_hopper.h: a block's barriers, loads and warpgroups */
struct simt_clocks; /* simt_race.h: what a thread knows of the others */
struct simt_shadow; /* simt_race.h: a launch's memory of who touched what */
struct simt_trace;  /* simt_race.h: a block's */

struct simt_fiber {
    void *stack_pointer;
    char *stack;
    uint3 index;
    unsigned number, lane, warp;
    simt_state state;
    const char *what, *file; /* it waits at, or was last seen at */
    int line;
    simt_copy *copies, **copies_end; /* not landed */
    int group;                       /* of the next copy */
    simt_bulk *bulk, **bulk_end;     /* not written */
    int bulk_group;                  /* of the next one */
    const void *waits_for;           /* a barrier of simt_hopper.h */
    uint64_t until;                  /* the clock at which it no longer does; 0: it waits for ever */
    simt_clocks *clocks;
    void *fake_stack; /* ASan's */
};

/* A rendezvous of a warp's lanes. */
struct simt_meeting {
    uint32_t mask, arrived; /* mask 0: nobody is there */
    const char *what, *file;
    int line;
    void *args[SIMT_WARP];
};

struct simt_launch;

struct simt_block {
    simt_launch *launch;
    uint3 index, size, grid;
    unsigned number, threads, done;
    simt_fiber *fiber;
    void *home; /* stack pointer of the OS thread */
    char *map, *shared;
    size_t map_bytes, shared_bytes, buf; /* buffer: what the map has for shared memory, in whole pages */
    char *stacks;
    unsigned stacks_made;
    uint16_t ready[SIMT_THREADS];
    unsigned first, count; /* of ready, a ring */
    unsigned at_barrier;
    const char *barrier_file;
    int barrier_line;
    simt_meeting meeting[SIMT_THREADS / SIMT_WARP][4];
    simt_hopper *hopper;
    uint64_t random;
    unsigned pauses; /* since a thread last did anything else */
    unsigned asked;  /* how often a barrier was asked, and not waited for */
    uint64_t moves;  /* of the launch, when those began */
    uint64_t due;    /* no wait of its threads ends before; UINT64_MAX: none does by time */
    unsigned worker;
    simt_trace *trace;
    const void *place; /* in the code, of the last meeting of a warp */
    simt_block *next;  /* in the pool */
    const void *home_stack;
    size_t home_stack_bytes;
    void *home_fake_stack;
};

enum {
    SIMT_WORKERS = 64, /* at most */
    SIMT_IN_TURN = 3   /* where they take turns */
};

struct simt_launch {
    simt_shape shape;
    void (*kernel)(void *);
    void *args;
    uint64_t blocks, next, step, offset; /* block number i is (offset + i step) % blocks */
    uint64_t moves;                      /* counts what a pausing thread may be waiting for */
    uint64_t stuck[SIMT_WORKERS]; /* moves + 1 at which a worker's block only waited; ~0: the worker left */
    uint64_t due[SIMT_WORKERS];   /* its block's then */
    uint64_t clock;               /* nanoseconds */
    int trapped;
    unsigned workers;
    int alternates; /* one worker runs at a time, the others wait */
    unsigned turn;  /* whose it is */
    uint64_t there; /* workers that have not left, a bit each */
    uint64_t random;
    pthread_mutex_t lock; /* of the turn */
    pthread_cond_t passed;
    simt_shadow *shadow;
};

inline thread_local simt_block *simt_here; /* the block that this OS thread runs */
inline thread_local simt_fiber *simt_fiber_now;
inline pthread_mutex_t simt_report_lock = PTHREAD_MUTEX_INITIALIZER,
                       simt_pool_lock = PTHREAD_MUTEX_INITIALIZER;
inline simt_block *simt_pool;

SIMT_QUIET inline long simt_env(const char *name, long otherwise)
{
    const char *s = getenv(name);
    return s != NULL && *s ? strtol(s, NULL, 0) : otherwise;
}

/* ---- findings ---- */

/* Prints "simt: ..." with the block and thread, and ends the process. Only the first finding is printed. */
[[noreturn]] SIMT_QUIET __attribute__((noinline, format(printf, 1, 2))) inline void simt_finding(
    const char *format, ...)
{
    va_list args;
    pthread_mutex_lock(&simt_report_lock); /* kept: nobody else reports */
    fflush(stdout);
    fprintf(stderr, "simt: ");
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    if (simt_here != NULL && simt_fiber_now != NULL)
        fprintf(stderr, " [block %u,%u,%u thread %u, last seen at %s:%d]", simt_here->index.x,
                simt_here->index.y, simt_here->index.z, simt_fiber_now->number,
                simt_fiber_now->file != NULL ? simt_fiber_now->file : "its start", simt_fiber_now->line);
    fprintf(stderr, "\n");
    _exit(SIMT_STATUS);
}

SIMT_QUIET inline int simt_same_place(const simt_fiber *a, const simt_fiber *b)
{
    return a->state == b->state && a->warp == b->warp && a->what == b->what && a->line == b->line;
}

/* Nobody can go on: says where everybody is. */
[[noreturn]] SIMT_QUIET __attribute__((noinline)) inline void simt_deadlock(simt_block *b, const char *why)
{
    unsigned t, u;
    pthread_mutex_lock(&simt_report_lock);
    fflush(stdout);
    fprintf(stderr, "simt: deadlock in block %u,%u,%u: %s\n", b->index.x, b->index.y, b->index.z, why);
    for (t = 0; t < b->threads; t = u) {
        const simt_fiber *f = &b->fiber[t];
        for (u = t + 1; u < b->threads && simt_same_place(f, &b->fiber[u]);) ++u;
        if (f->state == SIMT_DONE)
            fprintf(stderr, "  threads %u to %u have ended\n", t, u - 1);
        else
            fprintf(stderr, "  threads %u to %u wait at %s, %s:%d\n", t, u - 1, f->what, f->file, f->line);
    }
    _exit(SIMT_STATUS);
}

/* ---- fibers ---- */

/* Saves what a function must keep on the stack, its pointer in *save, and goes on where `load` was saved. */
extern "C" void simt_switch_stacks(void **save, void *load);

#if defined(__x86_64__)
enum { SIMT_FRAME = 7, SIMT_FRAME_START = 6 }; /* words on a sleeping stack; which one is the address */
__asm__(".text\n"
        ".weak simt_switch_stacks\n"
        ".type simt_switch_stacks, @function\n"
        "simt_switch_stacks:\n"
        "pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
        "movq %rsp, (%rdi)\n"
        "movq %rsi, %rsp\n"
        "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n"
        "ret\n"
        ".size simt_switch_stacks, . - simt_switch_stacks\n");
#elif defined(__aarch64__)
enum { SIMT_FRAME = 21, SIMT_FRAME_START = 11 }; /* one more: its stack pointer must be a multiple of 16 */
__asm__(
    ".text\n"
    ".weak simt_switch_stacks\n"
    ".type simt_switch_stacks, %function\n"
    "simt_switch_stacks:\n"
    "sub sp, sp, #160\n"
    "stp x19, x20, [sp, #0]\n stp x21, x22, [sp, #16]\n stp x23, x24, [sp, #32]\n"
    "stp x25, x26, [sp, #48]\n stp x27, x28, [sp, #64]\n stp x29, x30, [sp, #80]\n"
    "stp d8, d9, [sp, #96]\n stp d10, d11, [sp, #112]\n stp d12, d13, [sp, #128]\n stp d14, d15, [sp, #144]\n"
    "mov x9, sp\n str x9, [x0]\n mov sp, x1\n"
    "ldp x19, x20, [sp, #0]\n ldp x21, x22, [sp, #16]\n ldp x23, x24, [sp, #32]\n"
    "ldp x25, x26, [sp, #48]\n ldp x27, x28, [sp, #64]\n ldp x29, x30, [sp, #80]\n"
    "ldp d8, d9, [sp, #96]\n ldp d10, d11, [sp, #112]\n ldp d12, d13, [sp, #128]\n ldp d14, d15, [sp, #144]\n"
    "add sp, sp, #160\n"
    "ret\n"
    ".size simt_switch_stacks, . - simt_switch_stacks\n");
#else
#error "simt.h switches stacks on x86-64 and aarch64 alone"
#endif

/* From one fiber to another, or home where `to` is NULL; `from` is NULL on the way from home. */
SIMT_QUIET inline void simt_switch(simt_block *b, simt_fiber *from, simt_fiber *to)
{
    void **save = from != NULL ? &from->stack_pointer : &b->home;
#ifdef SIMT_ASAN
    void **fake = from != NULL ? &from->fake_stack : &b->home_fake_stack;
    /* a fiber that has ended never comes back: its fake stack goes */
    __sanitizer_start_switch_fiber(from != NULL && from->state == SIMT_DONE ? NULL : fake,
                                   to != NULL ? to->stack : b->home_stack,
                                   to != NULL ? (size_t)SIMT_STACK : b->home_stack_bytes);
#endif
    simt_switch_stacks(save, to != NULL ? to->stack_pointer : b->home);
#ifdef SIMT_ASAN
    __sanitizer_finish_switch_fiber(*fake, NULL, NULL);
#endif
}

/* ---- the scheduler of a block ---- */

SIMT_QUIET inline uint64_t simt_random(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

inline const size_t simt_page = (size_t)sysconf(_SC_PAGESIZE);
inline long simt_seed = simt_env("SIMT_SEED", 0);
inline int simt_words_hidden; /* barriers whose state is not in shared memory, as an H200 has shown it */
inline uint64_t
    simt_tick; /* nanoseconds that go by where a thread gives way, for tests of waits that time ends */

SIMT_QUIET inline void simt_make_ready(simt_block *b, unsigned thread)
{
    b->fiber[thread].state = SIMT_READY;
    b->ready[(b->first + b->count++) % SIMT_THREADS] = (uint16_t)thread;
}

/* One of the loads on their way arrives, simt_hopper.h; 0: there is none. */
SIMT_QUIET inline int simt_land_load(simt_block *b);

/* Where no thread of the block can go on, or all that can only pause. */
SIMT_QUIET inline int simt_pass_time(simt_block *b, uint64_t moves);

SIMT_QUIET inline uint64_t simt_clock(void)
{
    return __atomic_load_n(&simt_here->launch->clock, __ATOMIC_SEQ_CST);
}

/* Ends the waits whose time has come; returns how many. */
SIMT_QUIET inline unsigned simt_wake_late(simt_block *b)
{
    const uint64_t now = simt_clock();
    unsigned t, woken = 0;
    if (now < b->due) return 0;
    b->due = UINT64_MAX;
    for (t = 0; t < b->threads; ++t) {
        simt_fiber *f = &b->fiber[t];
        if (f->until == 0) continue;
        if (f->until > now) {
            b->due = f->until < b->due ? f->until : b->due;
            continue;
        }
        f->until = 0;
        f->waits_for = NULL;
        simt_make_ready(b, t);
        ++woken;
    }
    return woken;
}

/* No thread of the block ever runs again. */
SIMT_QUIET inline void simt_abandon(simt_block *b)
{
    simt_switch(b, simt_fiber_now, NULL);
    abort();
}

/* Goes on with another thread. The caller stands in whatever queue will wake it. */
SIMT_QUIET inline void simt_yield(simt_block *b)
{
    simt_fiber *me = simt_fiber_now;
    unsigned at, thread;
    if (__atomic_load_n(&b->launch->trapped, __ATOMIC_SEQ_CST)) simt_abandon(b);
    if (simt_seed > 0 && simt_random(&b->random) % 8 == 0) simt_land_load(b);
    if (simt_tick > 0) {
        __atomic_fetch_add(&b->launch->clock, simt_tick, __ATOMIC_SEQ_CST);
        simt_wake_late(b);
        simt_land_load(b); /* some thread or other can always go on */
    }
    while (b->count == 0 && b->done < b->threads &&
           (simt_land_load(b) || (b->due != UINT64_MAX &&
                                  simt_pass_time(b, __atomic_load_n(&b->launch->moves, __ATOMIC_SEQ_CST)))))
        continue;
    at = b->first;
    if (b->count == 0) {
        if (b->done == b->threads) {
            simt_switch(b, me, NULL);
            return;
        }
        simt_deadlock(b, b->at_barrier > 0 ? "part of the block reached a barrier, the rest never will"
                                           : "its threads wait for one another");
    }
    if (simt_seed > 0) at = (at + (unsigned)(simt_random(&b->random) % b->count)) % SIMT_THREADS;
    thread = b->ready[at];
    b->ready[at] = b->ready[b->first];
    b->first = (b->first + 1) % SIMT_THREADS;
    --b->count;
    if (&b->fiber[thread] == me) return;
    simt_fiber_now = &b->fiber[thread];
    simt_switch(b, me, simt_fiber_now);
}

SIMT_QUIET inline void simt_wait(simt_block *b, const char *what)
{
    simt_fiber_now->state = SIMT_WAITING;
    simt_fiber_now->what = what;
    simt_yield(b);
}

/* Marks where the thread is, for reports. */
SIMT_QUIET inline void simt_mark(const char *file, int line)
{
    simt_fiber_now->file = file;
    simt_fiber_now->line = line;
    simt_here->pauses = 0;
}

#include "simt_race.h"

/* ---- turns ---- */

SIMT_QUIET inline void simt_await_turn(simt_launch *l, unsigned me)
{
    if (!l->alternates) return;
    pthread_mutex_lock(&l->lock);
    while (l->turn != me) pthread_cond_wait(&l->passed, &l->lock);
    pthread_mutex_unlock(&l->lock);
}

/* To the next worker, or with a seed to any. Returns when it has come back, at once if the worker leaves. */
SIMT_QUIET inline void simt_pass_turn(simt_launch *l, unsigned me, int leaves)
{
    uint64_t steps = 1;
    if (!l->alternates) return;
    pthread_mutex_lock(&l->lock);
    if (simt_seed > 0) steps = simt_random(&l->random) % l->workers + (leaves != 0);
    if (leaves) l->there &= ~((uint64_t)1 << me);
    for (; steps > 0 && l->there != 0; --steps) {
        do l->turn = (l->turn + 1) % l->workers;
        while ((l->there >> l->turn & 1) == 0);
    }
    pthread_cond_broadcast(&l->passed);
    pthread_mutex_unlock(&l->lock);
    if (!leaves) simt_await_turn(l, me);
}

/* __syncthreads: all threads of the block, at one line. */
SIMT_QUIET __attribute__((noinline)) inline void simt_barrier(const char *file, int line)
{
    simt_block *b = simt_here;
    unsigned t;
    simt_mark(file, line);
    if (b->at_barrier > 0 && (line != b->barrier_line || strcmp(file, b->barrier_file) != 0))
        simt_finding("divergence: a barrier at %s:%d while other threads are at the one at %s:%d", file, line,
                     b->barrier_file, b->barrier_line);
    b->barrier_file = file;
    b->barrier_line = line;
    if (++b->at_barrier < b->threads) {
        simt_wait(b, "__syncthreads");
        return;
    }
    b->at_barrier = 0;
    simt_race_barrier(b);
    simt_pass_turn(b->launch, b->worker, 0);
    for (t = 0; t < b->threads; ++t)
        if (t != simt_fiber_now->number) simt_make_ready(b, t);
    if (simt_seed > 0) { /* the last to arrive is not the first to leave */
        simt_make_ready(b, simt_fiber_now->number);
        simt_yield(b);
    }
}

/* Something happened that a pausing thread may wait for. */
SIMT_QUIET inline void simt_moved(void)
{
    simt_here->pauses = 0;
    __atomic_fetch_add(&simt_here->launch->moves, 1, __ATOMIC_SEQ_CST);
}

/* Before a thread hands something on: other blocks run until they wait, for it may be as late as that. */
SIMT_QUIET inline void simt_dawdle(void)
{
    simt_launch *l = simt_here->launch;
    __atomic_store_n(&l->stuck[simt_here->worker], 0, __ATOMIC_SEQ_CST); /* it does not wait */
    simt_pass_turn(l, simt_here->worker, 0);
}

/* Wakes threads whose waits time ends. If every block that runs only waits, and no atomic or release came since `moves`,
 * the clock goes on to the first such end; where there is none, nobody will ever go on: returns 0. */
SIMT_QUIET inline int simt_pass_time(simt_block *b, uint64_t moves)
{
    simt_launch *l = b->launch;
    uint64_t first = UINT64_MAX;
    unsigned i;
    int all;
    if (__atomic_load_n(&l->trapped, __ATOMIC_SEQ_CST)) simt_abandon(b);
    if (simt_wake_late(b) > 0) return 1;
    pthread_mutex_lock(&l->lock);
    __atomic_store_n(&l->stuck[b->worker], moves + 1, __ATOMIC_SEQ_CST);
    l->due[b->worker] = b->due;
    for (i = 0; i < l->workers; ++i) {
        const uint64_t at = __atomic_load_n(&l->stuck[i], __ATOMIC_SEQ_CST);
        if (at == UINT64_MAX) continue;
        if (at != moves + 1) break;
        if (l->due[i] < first) first = l->due[i];
    }
    all = i == l->workers && __atomic_load_n(&l->moves, __ATOMIC_SEQ_CST) == moves;
    if (all && first != UINT64_MAX) {
        if (first > l->clock) __atomic_store_n(&l->clock, first, __ATOMIC_SEQ_CST);
        for (i = 0; i < l->workers; ++i) /* nobody goes on in time before these have */
            if (l->stuck[i] == moves + 1 && l->due[i] <= first)
                __atomic_store_n(&l->stuck[i], 0, __ATOMIC_SEQ_CST);
    }
    pthread_mutex_unlock(&l->lock);
    if (!all) sched_yield();
    if (!all || first != UINT64_MAX) simt_pass_turn(l, b->worker, 0);
    return !all || first != UINT64_MAX;
}

/* The launch fails. */
SIMT_QUIET inline void simt_trap(void)
{
    __atomic_store_n(&simt_here->launch->trapped, 1, __ATOMIC_SEQ_CST);
    simt_abandon(simt_here);
}

/* Inside a loop that waits for another block. If every block that runs only pauses, and no atomic or release
 * came in between, then none ever will: blocks that have not started wait for these to end. */
SIMT_QUIET __attribute__((noinline)) inline void simt_pause(const char *file, int line)
{
    simt_block *b = simt_here;
    simt_launch *l = b->launch;
    uint64_t moves = __atomic_load_n(&l->moves, __ATOMIC_SEQ_CST);
    unsigned pauses = b->pauses;
    simt_mark(file, line);
    simt_fiber_now->what = "a pause";
    if (pauses == 0 || moves != b->moves) {
        pauses = 0;
        b->moves = moves;
    }
    b->pauses = pauses + 1;
    if (b->pauses > b->count + 1) simt_land_load(b);
    /* every thread that can run has had its turn, several times: a random order may pass over one */
    if (b->pauses <= 64 * (b->count + 1))
        simt_pass_turn(l, b->worker, 0);
    else if (!simt_pass_time(b, moves))
        simt_deadlock(b, "every running block waits for one that has not started, or for nothing");
    simt_make_ready(b, simt_fiber_now->number);
    simt_yield(b);
}

/* ---- shared memory ---- */

SIMT_QUIET inline uint32_t simt_shared_address(const void *p)
{
    uintptr_t offset = (uintptr_t)p - (uintptr_t)simt_here->shared;
    if (offset > simt_here->shared_bytes)
        simt_finding("an address outside of the block's shared memory, %ld bytes from its start; it has %zu",
                     (long)offset, simt_here->shared_bytes);
    return (uint32_t)offset + SIMT_SHARED_START;
}

/* Both multiples of 4. */
SIMT_QUIET inline void simt_poison(void *p, size_t bytes)
{
    size_t i;
    for (i = 0; i < bytes / 4; ++i) ((uint32_t *)p)[i] = SIMT_POISON;
}

#include "simt_copy.h"
#include "simt_warp.h"

#include "simt_hopper.h"

/* ---- shared memory, to its end ---- */

/* Between the end of shared memory and its guard page lie less than 1024 bytes; before its start the rest of
 * the pages. Nobody may have written there. */
SIMT_QUIET inline void simt_check_rims(simt_block *b)
{
    const char *from = b->map + SIMT_GUARD, *to = from + b->buf, *p;
    uint32_t nan = SIMT_POISON;
    for (p = from; p < to; ++p) {
        if (p == b->shared) p += b->shared_bytes;
        if (p < to && *p != ((const char *)&nan)[(uintptr_t)p % 4])
            simt_finding("shared memory out of bounds: byte %ld was written, the block has %zu",
                         (long)(p - b->shared), b->shared_bytes);
    }
}

SIMT_QUIET inline void simt_lay_out_shared(simt_block *b, size_t bytes)
{
    size_t buf = (bytes + simt_page - 1) / simt_page * simt_page;
    if (b->map == NULL || buf != b->buf) {
        if (b->map != NULL) munmap(b->map, b->map_bytes);
        b->map_bytes = buf + 2 * SIMT_GUARD;
        b->map = (char *)mmap(NULL, b->map_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (b->map == MAP_FAILED ||
            (buf > 0 && mprotect(b->map + SIMT_GUARD, buf, PROT_READ | PROT_WRITE) != 0))
            simt_finding("no memory for %zu bytes of shared memory: %s", bytes, strerror(errno));
        b->buf = buf;
    }
    b->shared_bytes = bytes;
    b->shared = b->map + SIMT_GUARD + (buf - bytes) / 1024 * 1024;
    if (buf > 0) simt_poison(b->map + SIMT_GUARD, buf);
#ifdef SIMT_ASAN
    __asan_poison_memory_region(b->map + SIMT_GUARD, buf);
    __asan_unpoison_memory_region(b->shared, bytes);
#endif
}

/* ---- a block from start to end ---- */

SIMT_QUIET inline void simt_fiber_main(void)
{
    simt_block *b = simt_here;
    simt_fiber *me = simt_fiber_now;
#ifdef SIMT_ASAN
    const void *from;
    size_t bytes;
    __sanitizer_finish_switch_fiber(NULL, &from, &bytes);
    if (b->home_stack == NULL) {
        b->home_stack = from;
        b->home_stack_bytes = bytes;
    }
#endif
    b->launch->kernel(b->launch->args);
    simt_copy_end(me);
    simt_bulk_end(me);
    me->state = SIMT_DONE;
    ++b->done;
    b->pauses = 0;
    simt_yield(b);
    abort();
}

SIMT_QUIET inline void simt_make_stacks(simt_block *b, unsigned threads)
{
    unsigned t;
    if (b->stacks == NULL) {
        b->stacks = (char *)mmap(NULL, (size_t)SIMT_THREADS * SIMT_STACK, PROT_NONE,
                                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (b->stacks == MAP_FAILED) simt_finding("no memory for the stacks: %s", strerror(errno));
    }
    for (t = b->stacks_made; t < threads; ++t) /* a guard page under each */
        if (mprotect(b->stacks + (size_t)t * SIMT_STACK + simt_page, SIMT_STACK - simt_page,
                     PROT_READ | PROT_WRITE) != 0)
            simt_finding("no memory for the stacks: %s", strerror(errno));
    if (b->stacks_made < threads) b->stacks_made = threads;
}

SIMT_QUIET inline uint3 simt_unravel(uint64_t i, const simt_extent *e)
{
    uint3 r = {(unsigned)(i % (uint64_t)e->x), (unsigned)(i / (uint64_t)e->x % (uint64_t)e->y),
               (unsigned)(i / (uint64_t)(e->x * e->y))};
    return r;
}

SIMT_QUIET inline void simt_start_fiber(simt_block *b, unsigned thread)
{
    simt_fiber *f = &b->fiber[thread];
    void **frame;
    simt_clocks *clocks = f->clocks;
    memset(f, 0, sizeof *f);
    f->clocks = clocks;
    f->stack = b->stacks + (size_t)thread * SIMT_STACK;
    f->index = simt_unravel(thread, &b->launch->shape.block);
    f->number = thread;
    f->lane = thread % SIMT_WARP;
    f->warp = thread / SIMT_WARP;
    f->copies_end = &f->copies;
    f->bulk_end = &f->bulk;
    /* Their tops lie at different places in a page: else all of them would share a few lines of the cache. Last
     * the return address of a function that never returns. */
    frame = (void **)(f->stack + SIMT_STACK - 64 - thread % 32 * 448) - 1;
    *frame = NULL;
    frame -= SIMT_FRAME;
    memset(frame, 0, SIMT_FRAME * sizeof *frame);
    frame[SIMT_FRAME_START] = (void *)simt_fiber_main;
    f->stack_pointer = frame;
    simt_make_ready(b, thread);
}

SIMT_QUIET inline void simt_run_block(simt_block *b, uint64_t number)
{
    simt_launch *l = b->launch;
    unsigned t;
    b->index = simt_unravel(number, &l->shape.grid);
    b->number = (unsigned)number;
    b->random = (uint64_t)simt_seed * 0x9e3779b97f4a7c15u + number;
    b->first = b->count = b->done = b->at_barrier = b->pauses = 0;
    b->due = UINT64_MAX;
    memset(b->meeting, 0, sizeof b->meeting);
    simt_lay_out_shared(b, l->shape.shared);
    simt_race_block(b);
    simt_hopper_start(b);
    for (t = 0; t < b->threads; ++t) simt_start_fiber(b, t);
    t = b->ready[b->first];
    b->first = (b->first + 1) % SIMT_THREADS;
    --b->count;
    b->home_stack = NULL;
    simt_fiber_now = &b->fiber[t];
    simt_switch(b, NULL, simt_fiber_now);
    simt_fiber_now = NULL;
#ifdef SIMT_ASAN
    __asan_unpoison_memory_region(b->map + SIMT_GUARD, b->buf);
#endif
    if (__atomic_load_n(&l->trapped, __ATOMIC_SEQ_CST)) { /* what was on its way stays there */
#ifdef SIMT_ASAN
        __asan_unpoison_memory_region(b->stacks, (size_t)b->threads * SIMT_STACK); /* and frames of threads */
#endif
        return;
    }
    simt_hopper_end(b);
    simt_check_rims(b);
}

/* ---- a launch ---- */

inline struct sigaction simt_older_handler;

/* A fault in shared memory's guard pages or a stack's is a finding; any other goes to who had the signal. */
SIMT_QUIET inline void simt_fault(int signal_number, siginfo_t *info, void *context)
{
    simt_block *b = simt_here;
    const char *p = (const char *)info->si_addr;
    if (b != NULL && simt_fiber_now != NULL) {
        if (p >= b->map && p < b->map + b->map_bytes)
            simt_finding("shared memory out of bounds: byte %ld, the block has %zu", (long)(p - b->shared),
                         b->shared_bytes);
        if (p >= b->stacks && p < b->stacks + (size_t)SIMT_THREADS * SIMT_STACK)
            simt_finding("a thread's stack ran over");
        if ((simt_older_handler.sa_flags & SA_SIGINFO) == 0)
            simt_finding("bad address %p (0: perhaps a misaligned vector)", (const void *)p);
        fprintf(stderr, "simt: bad address %p, block %u,%u,%u thread %u, last seen at %s:%d\n",
                (const void *)p, b->index.x, b->index.y, b->index.z, simt_fiber_now->number,
                simt_fiber_now->file, simt_fiber_now->line);
    }
    if (simt_older_handler.sa_flags & SA_SIGINFO)
        simt_older_handler.sa_sigaction(signal_number, info, context);
    else
        sigaction(signal_number, &simt_older_handler, NULL); /* the access faults again */
}

SIMT_QUIET inline void simt_watch_faults(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, [] {
        struct sigaction a;
        memset(&a, 0, sizeof a);
        a.sa_sigaction = simt_fault;
        a.sa_flags = SA_SIGINFO | SA_ONSTACK;
        sigaction(SIGSEGV, &a, &simt_older_handler);
        sigaction(SIGBUS, &a, NULL);
    });
}

SIMT_QUIET inline simt_block *simt_block_start(void)
{
    simt_block *b;
    pthread_mutex_lock(&simt_pool_lock);
    b = simt_pool;
    if (b != NULL) simt_pool = b->next;
    pthread_mutex_unlock(&simt_pool_lock);
    if (b == NULL) {
        b = (simt_block *)calloc(1, sizeof *b);
        if (b != NULL) b->fiber = (simt_fiber *)calloc(SIMT_THREADS, sizeof *b->fiber);
        if (b != NULL) b->hopper = simt_hopper_new();
        if (b == NULL || b->fiber == NULL || b->hopper == NULL) simt_finding("no memory for a block");
    }
    return b;
}

SIMT_QUIET inline void simt_block_end(simt_block *b)
{
    pthread_mutex_lock(&simt_pool_lock);
    b->next = simt_pool;
    simt_pool = b;
    pthread_mutex_unlock(&simt_pool_lock);
}

/* Runs blocks until none is left. `worker` of the launch. */
SIMT_QUIET inline void simt_work(simt_launch *l, unsigned worker)
{
    simt_block *b = simt_block_start();
    stack_t mine, older;
    uint64_t i;
    simt_await_turn(l, worker);
    memset(&mine, 0, sizeof mine);
    mine.ss_size = 1 << 16;
    mine.ss_sp = malloc(mine.ss_size); /* a signal can't be taken on a stack that ran over */
    sigaltstack(&mine, &older);
    b->launch = l;
    b->worker = worker;
    b->threads = (unsigned)(l->shape.block.x * l->shape.block.y * l->shape.block.z);
    b->size = {(unsigned)l->shape.block.x, (unsigned)l->shape.block.y, (unsigned)l->shape.block.z};
    b->grid = {(unsigned)l->shape.grid.x, (unsigned)l->shape.grid.y, (unsigned)l->shape.grid.z};
    simt_make_stacks(b, b->threads);
    simt_race_enter(b);
    simt_here = b;
    while (!__atomic_load_n(&l->trapped, __ATOMIC_SEQ_CST) &&
           (i = __atomic_fetch_add(&l->next, 1, __ATOMIC_SEQ_CST)) < l->blocks) {
        simt_run_block(b, (l->offset + i * l->step) % l->blocks);
        __atomic_fetch_add(&l->moves, 1, __ATOMIC_SEQ_CST);
        simt_pass_turn(l, worker, 0);
    }
    simt_here = NULL;
    __atomic_store_n(&l->stuck[worker], UINT64_MAX, __ATOMIC_SEQ_CST);
    sigaltstack(&older, NULL);
    free(mine.ss_sp);
    simt_block_end(b);
    simt_pass_turn(l, worker, 1);
}

struct simt_work_args {
    simt_launch *launch;
    unsigned worker;
};

SIMT_QUIET inline void *simt_worker(void *p)
{
    simt_work_args *a = (simt_work_args *)p;
    simt_work(a->launch, a->worker);
    return NULL;
}

SIMT_QUIET inline uint64_t simt_common_divisor(uint64_t a, uint64_t b)
{
    while (b != 0) {
        uint64_t r = a % b;
        a = b;
        b = r;
    }
    return a;
}

/* kernel(args) once a thread of every block. The caller's OS thread works too. Returns whether it came to its end: 0 for
 * a trap. */
SIMT_QUIET inline int simt_run_raw(const simt_shape &shape, void (*kernel)(void *), void *args)
{
    static long threads = simt_env("SIMT_THREADS", 0);
    long workers = threads;
    simt_launch l;
    pthread_t id[SIMT_WORKERS];
    simt_work_args work[SIMT_WORKERS];
    unsigned i;
    memset(&l, 0, sizeof l);
    l.shape = shape;
    l.kernel = kernel;
    l.args = args;
    l.blocks = (uint64_t)(shape.grid.x * shape.grid.y * shape.grid.z);
    l.step = 1;
    if (simt_seed > 0 && l.blocks > 1) {
        uint64_t state = (uint64_t)simt_seed;
        l.offset = simt_random(&state) % l.blocks;
        do l.step = 1 + simt_random(&state) % (l.blocks - 1);
        while (simt_common_divisor(l.step, l.blocks) != 1);
    }
    l.alternates = SIMT_RACE_ON || simt_seed > 0;
    if (workers < 1) workers = l.alternates ? (long)SIMT_IN_TURN : sysconf(_SC_NPROCESSORS_ONLN);
    if (workers < shape.together) workers = shape.together;
    l.workers = (unsigned)(workers < SIMT_WORKERS ? workers : (long)SIMT_WORKERS);
    if (l.workers > l.blocks) l.workers = (unsigned)l.blocks;
    l.there = l.workers < 64 ? ((uint64_t)1 << l.workers) - 1 : UINT64_MAX;
    l.random = (uint64_t)simt_seed;
    pthread_mutex_init(&l.lock, NULL);
    pthread_cond_init(&l.passed, NULL);
    simt_watch_faults();
    simt_race_start(&l);
    for (i = 1; i < l.workers; ++i) {
        work[i] = {&l, i};
        if (pthread_create(&id[i], NULL, simt_worker, &work[i]) != 0)
            simt_finding("no OS thread for a worker");
    }
    simt_work(&l, 0);
    for (i = 1; i < l.workers; ++i) pthread_join(id[i], NULL);
    pthread_mutex_destroy(&l.lock);
    pthread_cond_destroy(&l.passed);
    simt_race_end(&l);
    return !l.trapped;
}

template <class F> void simt_call(void *f)
{
    (*(F *)f)();
}

template <class F> SIMT_QUIET int simt_run(const simt_shape &shape, F &&f)
{
    return simt_run_raw(shape, simt_call<typename std::remove_reference<F>::type>, &f);
}

#endif

/* upipe_net_clock.h -- deadlines, and pauses between two tests of a condition
 *
 *     int64_t until = upi_net_until(seconds);
 *     while (!done()) {
 *         if (upipe_net_now() >= until) ...
 *         upi_net_rest(&idle, yields, nap_ns);
 *     }
 */
#ifndef UPIPE_NET_CLOCK_H
#define UPIPE_NET_CLOCK_H

#if defined(__STRICT_ANSI__) && defined(__linux__) && !defined(_GNU_SOURCE) && !defined(_POSIX_C_SOURCE)
#define _POSIX_C_SOURCE 200809L
#endif

#include <sched.h>
#include <time.h>

#include "../upipe_base.h"

#ifndef CLOCK_MONOTONIC
#error "upipe/net needs POSIX clocks: define _POSIX_C_SOURCE=200809L before the first system header"
#endif

/* The monotonic clock, in ns. */
UPIPE_API int64_t upipe_net_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* The time `seconds` from now, in ns; an impossible number counts as 0 or as thirty years. */
UPIPE_API int64_t upi_net_until(double seconds)
{
    if (!(seconds > 0)) seconds = 0;
    if (seconds > 1e9) seconds = 1e9;
    return upipe_net_now() + (int64_t)(seconds * 1e9);
}

/* Between two tests, after `idle` of them without success: yields so many times, then sleeps `nap` ns. */
UPIPE_API void upi_net_rest(int *idle, int yields, int nap)
{
    if (++*idle < yields) {
        sched_yield();
    } else {
        struct timespec t;
        *idle = yields;
        t.tv_sec = 0;
        t.tv_nsec = nap;
        nanosleep(&t, NULL);
    }
}

#endif

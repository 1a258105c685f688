/* signals.h -- a training ends after the step in which a signal comes, and its sample after a byte */
#ifndef LLAMA_SIGNALS_H
#define LLAMA_SIGNALS_H

#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

static volatile sig_atomic_t run_signal;                             /* which one; 0 = none */
static const int run_signals[] = {SIGHUP, SIGINT, SIGTERM, SIGUSR1}; /* launchers pass the last one on */
static int64_t run_signal_at; /* atomic: when the first one came, ns; 0 = none has */

/* Whoever ends a program may signal it and its group, so that one request comes twice. What comes RUN_SIGNAL_AGAIN after
 * the first, of whatever kind, ends the program at once. */
enum { RUN_SIGNAL_AGAIN = 1 }; /* seconds */

static inline void run_on_signal(int number)
{
    struct timespec t;
    int64_t now, none = 0;
    clock_gettime(CLOCK_MONOTONIC, &t);
    now = (int64_t)t.tv_sec * 1000000000 + t.tv_nsec + 1;
    if (__atomic_compare_exchange_n(&run_signal_at, &none, now, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
        run_signal = number;
    } else if (now - none >= (int64_t)RUN_SIGNAL_AGAIN * 1000000000) {
        signal(number, SIG_DFL);
        raise(number);
    }
}

/* From here on; signals that are ignored stay so. */
static inline void run_signals_catch(void)
{
    struct sigaction action, old;
    size_t i;
    memset(&action, 0, sizeof action);
    action.sa_handler = run_on_signal;
    action.sa_flags = SA_RESTART; /* a checkpoint's writes go on */
    for (i = 0; i < sizeof run_signals / sizeof *run_signals; ++i)
        if (sigaction(run_signals[i], NULL, &old) == 0 && old.sa_handler != SIG_IGN)
            sigaction(run_signals[i], &action, NULL);
}

#endif

/* memory.h -- memory of a test, freed together
 *
 *     float *weight = floats(d);
 *     ...
 *     buffers_free(0);
 *
 * Each buffer is an allocation of its own, so that the sanitizer sees its end. All are on one list, which threads may
 * extend at the same time: `const int mark = buffers_n;` before, `buffers_free(mark);` after, when no thread runs. TEST
 * of test.h also frees what the test has made.
 */
#ifndef UPIPE_TEST_MEMORY_H
#define UPIPE_TEST_MEMORY_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "test.h"

static void **buffer_list;
static int buffers_n, buffers_max, buffers_lock;

/* Frees what was made since there were `mark` of them. */
static inline void buffers_free(int mark)
{
    while (buffers_n > mark) free(buffer_list[--buffers_n]);
    if (buffers_n > 0) return;
    free(buffer_list);
    buffer_list = NULL;
    buffers_max = 0;
}

/* Puts memory on the list. Never NULL. */
static inline void *listed(void *p)
{
    while (__sync_lock_test_and_set(&buffers_lock, 1)) continue;
    if (buffers_n == buffers_max)
        buffer_list =
            (void **)realloc(buffer_list, (size_t)(buffers_max += buffers_max + 64) * sizeof *buffer_list);
    if (p == NULL || buffer_list == NULL) exit(2);
    buffer_list[buffers_n++] = p;
    __sync_lock_release(&buffers_lock);
    return p;
}

/* Every byte 0xff: NaNs in all types. */
static inline void *buffer(size_t bytes)
{
    return memset(listed(malloc(bytes + 1)), 0xff, bytes + 1);
}

/* The same, aligned as a pool's slab has to be. */
static inline void *slab_of(size_t bytes)
{
    void *p[1];
    if (posix_memalign(p, 256, bytes) != 0) exit(2);
    memset(listed(p[0]), 0xff, bytes);
    return p[0];
}

static inline void *zeroed(size_t bytes)
{
    return listed(calloc(bytes + 1, 1));
}

static inline void *copy_of(const void *data, size_t bytes)
{
    void *p = listed(malloc(bytes + 1));
    return bytes > 0 ? memcpy(p, data, bytes) : p; /* data may be NULL then */
}

/* n zeros */
static inline float *floats(int64_t n)
{
    return (float *)zeroed((size_t)n * sizeof(float));
}

/* TEST of test.h, which frees what the test has made. */
#undef TEST_OF
#define TEST_OF(name, call)          \
    do {                             \
        const int made_ = buffers_n; \
        if (test_wanted(name)) call; \
        buffers_free(made_);         \
    } while (0)

#endif

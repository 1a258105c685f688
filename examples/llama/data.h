/* data.h -- a text's bytes as tokens, cut into windows, in a shuffled order that a number reproduces
 *
 *     corpus t;
 *     text_order order;                                       one a rank: it caches an epoch's order
 *     text_open(&t, "book.txt", 1024);                        0, or -1 with the sentence out
 *     t.hash = text_hash(&t);                                 reads all of it, text_probe a little
 *     text_order_init(&order);
 *     k = step * batch + row;                                 which sample, from 0
 *     w = text_window(&t, &order, seed, k);                   -1 without memory
 *     text_fill(&t, w, &plan.shard, inputs, targets);         a rank's tokens of it
 *     text_order_free(&order);  text_close(&t);
 *
 * Window w has the inputs text[w*S .. w*S + S - 1], and as targets the byte after each. windows is
 * ceil((bytes - 1) / S): every byte but the first is a target once an epoch. The last window may reach
 * beyond the text: there inputs are 0 and targets TEXT_IGNORE. Epoch e = k / windows takes all windows, in an
 * order that depends on (seed, e) alone.
 *
 * A corpus is only read after text_open: ranks share one. It is mapped, not held: a rank reads what it needs, and a
 * file that becomes shorter meanwhile ends the program by SIGBUS.
 */
#ifndef LLAMA_DATA_H
#define LLAMA_DATA_H

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "../../upipe/upipe_shard.h"
#include "../common/cli.h"
#include "../common/regular.h"

enum { TEXT_IGNORE = -1 };

typedef struct corpus {
    const unsigned char *data;      /* mapped */
    int64_t bytes, tokens, windows; /* tokens of a window */
    uint64_t hash;                  /* text_hash, where the program needs it */
} corpus;

typedef struct text_order {
    int64_t *windows; /* of one epoch, in their order; NULL = none yet */
    int64_t epoch;
    uint64_t seed;
} text_order;

static inline void text_close(corpus *t)
{
    if (t->data != NULL) munmap((void *)(uintptr_t)t->data, (size_t)t->bytes);
    memset(t, 0, sizeof *t);
}

/* The file if it is one, and its size; NULL with the sentence out. */
static inline FILE *text_file(const char *path, int64_t tokens, int64_t *bytes)
{
    const char *why;
    FILE *f = regular_open(path, bytes, &why);
    if (f == NULL)
        cli_fail("the text %s cannot be read: %s", path, why);
    else if (*bytes == 0)
        cli_fail("the text %s is empty", path);
    else if (*bytes - 1 < tokens)
        cli_fail("the text %s has %lld bytes, but a sequence of %lld tokens needs %lld: one more is the last "
                 "target",
                 path, (long long)*bytes, (long long)tokens, (long long)tokens + 1);
    else
        return f;
    if (f != NULL) fclose(f);
    return NULL;
}

static inline uint64_t text_hash_on(uint64_t hash, const unsigned char *data, int64_t bytes)
{
    int64_t i;
    for (i = 0; i < bytes; ++i) hash = (hash ^ data[i]) * 1099511628211u;
    return hash;
}

enum { TEXT_PROBES = 64, TEXT_PROBE = 4096 /* bytes of one */ };

/* Tells two texts of the same length apart: FNV-1a of all bytes. */
static inline uint64_t text_hash(const corpus *t)
{
    return text_hash_on(1469598103934665603u, t->data, t->bytes);
}

/* The same of a few parts of a long text, for processes that would all have to read it. */
static inline uint64_t text_probe(const corpus *t)
{
    uint64_t hash = 1469598103934665603u ^ (uint64_t)t->bytes;
    int64_t i, parts = t->bytes / TEXT_PROBE;
    if (parts <= TEXT_PROBES) return text_hash_on(hash, t->data, t->bytes);
    for (i = 0; i < TEXT_PROBES; ++i)
        hash = text_hash_on(hash, t->data + parts * i / TEXT_PROBES * TEXT_PROBE, TEXT_PROBE);
    return hash;
}

/* text_open -- maps a text, to be cut into windows of so many tokens, 1 to 2^62
 *
 * 0, or -1 with the sentence out; then there is nothing to close.
 */
static inline int text_open(corpus *t, const char *path, int64_t tokens)
{
    int64_t bytes = 0;
    FILE *f = text_file(path, tokens, &bytes);
    void *data;
    memset(t, 0, sizeof *t);
    if (f == NULL) return -1;
    data = mmap(NULL, (size_t)bytes, PROT_READ, MAP_PRIVATE, fileno(f), 0);
    fclose(f);
    if (data == MAP_FAILED) return cli_fail("the text %s cannot be mapped: %s", path, strerror(errno));
    t->data = (const unsigned char *)data;
    t->bytes = bytes;
    t->tokens = tokens;
    t->windows = (bytes - 2) / tokens + 1;
    return 0;
}

/* ---- the order ---- */

static inline void text_order_init(text_order *order)
{
    memset(order, 0, sizeof *order);
}

static inline void text_order_free(text_order *order)
{
    free(order->windows);
    memset(order, 0, sizeof *order);
}

static inline uint64_t text_mix(uint64_t z)
{
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* Fisher-Yates over splitmix64; the bias of the remainder is windows / 2^64. */
static inline void text_shuffle(int64_t *windows, int64_t n, uint64_t seed, int64_t epoch)
{
    /* seed and epoch are mixed apart, or epoch e + 1 of one seed would be epoch e of the next */
    uint64_t state = text_mix(text_mix(seed + 0x9e3779b97f4a7c15u) ^ (uint64_t)epoch);
    int64_t i;
    for (i = 0; i < n; ++i) windows[i] = i;
    for (i = n - 1; i > 0; --i) {
        int64_t j = (int64_t)(text_mix(state += 0x9e3779b97f4a7c15u) % (uint64_t)(i + 1));
        int64_t moved = windows[i];
        windows[i] = windows[j];
        windows[j] = moved;
    }
}

/* text_window -- the window of sample k, counted from 0; -1 without memory
 *
 * order keeps the table of k's epoch for the next call; it belongs to one text.
 */
static inline int64_t text_window(const corpus *t, text_order *order, uint64_t seed, int64_t k)
{
    int64_t epoch = k / t->windows;
    if (order->windows == NULL || order->epoch != epoch || order->seed != seed) {
        if (order->windows == NULL)
            order->windows = (int64_t *)malloc((size_t)t->windows * sizeof *order->windows);
        if (order->windows == NULL) return -1;
        text_shuffle(order->windows, t->windows, seed, epoch);
        order->epoch = epoch;
        order->seed = seed;
    }
    return order->windows[k % t->windows];
}

/* ---- tokens ---- */

/* Targets of a window that are none of TEXT_IGNORE. */
static inline int64_t text_valid(const corpus *t, int64_t window)
{
    int64_t rest = t->bytes - 1 - window * t->tokens;
    return rest < t->tokens ? rest : t->tokens;
}

/* The tokens of a window that lie at a shard's positions, into inputs [n] and targets [n]. */
static inline void text_fill(const corpus *t, int64_t window, const upipe_shard *shard, int32_t *inputs,
                             int32_t *targets)
{
    const unsigned char *from = t->data + window * t->tokens;
    int64_t valid = text_valid(t, window), i;
    for (i = 0; i < shard->n; ++i) {
        int64_t at = upipe_shard_pos(shard, i);
        inputs[i] = at < valid ? from[at] : 0;
        targets[i] = at < valid ? from[at + 1] : TEXT_IGNORE;
    }
}

#endif

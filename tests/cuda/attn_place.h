/* attn_place.h -- a device, emulated or real, as the place whose attention is checked (lib/attn.h)
 *
 *     if (!place_open()) return test_end("name");
 *     place_types(UPIPE_BF16);                       or UPIPE_F32: other kernels each
 *     ...
 *     return place_close("name");
 *
 * The yardstick is the naive implementation with the operands of a tensor core (NAIVE_NARROW).
 */
#ifndef UPIPE_TEST_ATTN_PLACE_H
#define UPIPE_TEST_ATTN_PLACE_H

#include "../lib/attn_checks.h"
#include "cuda/staged.h"
#include "upipe/cuda/upipe_cuda_watch.h"

#ifdef FAKE_CUDA_RUNTIME_API_H
#include "fake/fake.h"
#endif

static device dev;

/* Storage of q, k, v and o. */
static inline void place_types(upipe_dtype dtype)
{
    here.types[0] = here.types[1] = here.types[2] = dtype;
}

static inline int place_open(void)
{
    static const int layouts[ATTN_LAYOUTS] = {PACKED, HEAD_MAJOR, ALIGNED};
    if (!device_open(&dev)) return 0;
    staged_open(&dev);
    memset(&here, 0, sizeof here);
    here.c = &staged.c;
    place_types(UPIPE_BF16);
    memcpy(here.layouts, layouts, sizeof layouts);
    here.naive = NAIVE_NARROW;
    here.compares = compares();
    here.brief = brief();
    return 1;
}

static inline int place_close(const char *name)
{
    staged_close();
    device_close(&dev);
    return test_end(name);
}

/* A call of both directions, or of the forward alone, has the same bits where its kernels are watched, and no block says
 * anything. */
static inline void check_watched(const oracle_attn *t, uint64_t seed, int directions)
{
    char text[UPIPE_CUDA_WATCH_TEXT];
    test_rng r = {seed};
    const values in = inputs_make(t, UPIPE_BF16, &r, 1);
    values alone = values_make(t), watched = values_make(t);
    run_directions(t, UPIPE_BF16, PACKED, t->h, &in, &alone, directions);
    CHECK_STATUS(upipe_cuda_host_slab(&dev.cuda.watch, UPIPE_CUDA_WATCH, &dev.c.err), UPIPE_OK, dev.c.err);
    memset(dev.cuda.watch, 0, UPIPE_CUDA_WATCH);
    run_directions(t, UPIPE_BF16, PACKED, t->h, &in, &watched, directions);
    check_same(t, &alone, &watched);
    CHECK_INT(upipe_cuda_watch_text(dev.cuda.watch, text, sizeof text), 0);
    CHECK_STATUS(upipe_cuda_host_slab_free(dev.cuda.watch, &dev.c.err), UPIPE_OK, dev.c.err);
    dev.cuda.watch = NULL;
    buffers_free(0);
}

/* The f32 kernels ask for no capability: where the fake plays a device of 9.0, the run on that of 8.0 has tried them. */
static inline int same_as_before(upipe_dtype dtype)
{
#ifdef FAKE_CUDA_RUNTIME_API_H
    return dtype == UPIPE_F32 && dev.cuda.capability / 10 == 9;
#else
    (void)dtype;
    return 0;
#endif
}

#endif

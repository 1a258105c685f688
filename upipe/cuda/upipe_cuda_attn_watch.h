/* upipe_cuda_attn_watch.h -- the warp of an attention kernel for 9.0 that sees whether the others still move
 *
 * Warps of these kernels wait for one another at barriers in shared memory that lie in a row. One warp has nothing
 * else to do. It looks at the barriers now and then, a lane at each, and sees whether the phase is odd or even. Looks
 * keep no step with the block, so of hundreds some find another parity while it moves. Where none did for 2 s the warp
 * writes the barriers to the host's memory (upipe_cuda_watch.h), gives other blocks that stand still the time to do so
 * too, and traps. Between two looks it sleeps at a barrier of its own, behind the others, whose first phase ends when
 * nobody in the block waits any more: the block does not end later for it.
 */
#ifndef UPIPE_CUDA_ATTN_WATCH_H
#define UPIPE_CUDA_ATTN_WATCH_H

#include "upipe_cuda_hopper.h"
#include "upipe_cuda_watch.h"

/* Nanoseconds. A look counts for a while at most: a block that has been put aside for another program has not moved
 * meanwhile, and still does not stand still. */
enum {
    UPI_WATCH_LOOK = 1000000,
    UPI_WATCH_LOOK_MOST = 10000000,
    UPI_WATCH_STILL = 2000000000,
    UPI_WATCH_OTHERS = 500000000
};

/* The end of a block that stands still. Returns if it goes on to its own end after all. */
template <int D, int KEYS, int BACKWARD, int BARRIERS>
UPI_DEVICE void upi_cuda_attn_watch_end(void *watch, int block, uint32_t barriers)
{
    upi_cuda_watch_record *const x =
        (upi_cuda_watch_record *)watch + (uint32_t)block % UPI_CUDA_WATCH_RECORDS;
    const uint32_t lane = threadIdx.x % 32, since = upi_clock();
    const uint32_t odd =
        __ballot_sync(0xffffffffu, lane < BARRIERS && upi_mbarrier_parity(barriers + 8 * lane));
    if (lane < BARRIERS) x->barrier[lane] = upi_mbarrier_word(barriers + 8 * lane);
    if (lane == 0) {
        x->odd = odd;
        x->keys = KEYS;
        x->backward = BACKWARD;
        x->block = block;
        x->blocks = (int)gridDim.x;
    }
    __threadfence_system();
    __syncwarp();
    if (lane == 0) x->d = D; /* last: the record is whole */
    __threadfence_system();
    while (!__any_sync(0xffffffffu, upi_mbarrier_wait_for(barriers + 8 * BARRIERS, 0, UPI_WATCH_LOOK)))
        if (__any_sync(0xffffffffu, upi_clock() - since >= UPI_WATCH_OTHERS)) upi_trap();
}

/* By a whole warp; returns when the block needs no watch any more. `block`: of the grid; those that run side by side have
 * numbers close to one another. `barriers`: so many, and behind them the watch's own. */
template <int D, int KEYS, int BACKWARD, int BARRIERS>
UPI_DEVICE void upi_cuda_attn_watch(void *watch, int block, uint32_t barriers)
{
    const uint32_t lane = threadIdx.x % 32;
    uint32_t last = upi_clock(), still = 0, seen = 0;
    static_assert(BARRIERS <= UPI_CUDA_WATCH_BARRIERS, "a record has a place for each");
    while (!__any_sync(0xffffffffu, upi_mbarrier_wait_for(barriers + 8 * BARRIERS, 0, UPI_WATCH_LOOK))) {
        const uint32_t now = upi_clock(), before = seen;
        uint32_t since = now - last;
        /* the phase's parity, not the word in memory, which need not follow the barrier: docs/kernels.md */
        if (lane < BARRIERS) seen = upi_mbarrier_parity(barriers + 8 * lane);
        if (since > UPI_WATCH_LOOK_MOST) since = UPI_WATCH_LOOK_MOST;
        still = __any_sync(0xffffffffu, seen != before) ? 0 : still + since;
        last = now;
        if (__any_sync(0xffffffffu, still >= UPI_WATCH_STILL))
            upi_cuda_attn_watch_end<D, KEYS, BACKWARD, BARRIERS>(watch, block, barriers);
    }
}

#endif

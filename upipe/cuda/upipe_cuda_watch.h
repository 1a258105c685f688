/* upipe_cuda_watch.h -- a kernel that hangs ends, and says for what it waits
 *
 *     upipe_cuda_host_slab(&device.watch, UPIPE_CUDA_WATCH, &err);      after upipe_cuda_init
 *     memset(device.watch, 0, UPIPE_CUDA_WATCH);
 *     ...                                                               calls; one fails: "unspecified launch failure"
 *     if (upipe_cuda_watch_text(device.watch, text, sizeof text) > 0) puts(text);
 *
 * Watched are the attention kernels for compute capability 9.0, whose warps wait for barriers in shared memory. A
 * block in which no barrier moves for 2 s writes its barriers to the host's memory, and half a second later the
 * kernel is trapped. That ends the CUDA context, as every failure of a kernel does. Calls of several streams share
 * the memory; a graph keeps its address. Where nobody watches, a kernel that hangs never ends.
 */
#ifndef UPIPE_CUDA_WATCH_H
#define UPIPE_CUDA_WATCH_H

#include "upipe_cuda_device.h"

enum {
    UPIPE_CUDA_WATCH_TEXT = 1024, /* bytes of the sentence, at most */
    UPI_CUDA_WATCH_BARRIERS = 13  /* of a block, at most */
};

/* What a block writes. */
typedef struct upi_cuda_watch_record {
    int d, keys, backward; /* the kernel's columns and its keys in a tile; d is 0 where nobody has written */
    int block, blocks;     /* of the grid; in the backward the block's ticket, whose order is that of turns */
    uint32_t odd;          /* bit i: barrier i is in an odd phase */
    uint64_t barrier[UPI_CUDA_WATCH_BARRIERS]; /* as they lie in shared memory */
} upi_cuda_watch_record;

enum { UPI_CUDA_WATCH_RECORDS = UPIPE_CUDA_WATCH / (int)sizeof(upi_cuda_watch_record) };

/* The word of a barrier on 9.0. PTX keeps it to itself. Parity, pending and count are where the compiler's own code
 * for mbarrier.init, pending_count and test_wait has them; bytes are where an H200 showed them. Of barriers in use it has
 * shown words of 0 too:
 *
 *     63       parity of the phase: one that waits for the other parity has gone on, one that waits for this is held
 *     62..43   2^20 - arrivals that the phase still waits for
 *     41..21   2^21 - bytes that loads still owe to the phase; from 0 on, bytes that came before they were expected
 *     20..1    2^20 - arrivals of every phase
 */
UPIPE_API int upi_cuda_watch_pending(uint64_t word)
{
    return (int)(-(word >> 43) & 0xfffff);
}

UPIPE_API int upi_cuda_watch_count(uint64_t word)
{
    return (int)(-(word >> 1) & 0xfffff);
}

UPIPE_API int upi_cuda_watch_bytes(uint64_t word)
{
    const int x = (int)(word >> 21 & 0x1fffff);
    return x < 1 << 20 ? -x : (1 << 21) - x;
}

/* Names of the barriers, in the order of UPI_FWD90_* and UPI_BWD90_*. */
UPIPE_API const char *upi_cuda_watch_name(int backward, int i)
{
    static const char *const forward[] = {"K full 0", "K full 1",  "K empty 0", "K empty 1", "V full 0",
                                          "V full 1", "V empty 0", "V empty 1", "Q full",    "Q empty"};
    static const char *const back[] = {"Q full 0",   "Q full 1",   "Q empty 0", "Q empty 1", "dO full 0",
                                       "dO full 1",  "K full",     "V full",    "dQ full 0", "dQ full 1",
                                       "dQ empty 0", "dQ empty 1", "dO empty"};
    if (backward) return i < (int)(sizeof back / sizeof *back) ? back[i] : NULL;
    return i < (int)(sizeof forward / sizeof *forward) ? forward[i] : NULL;
}

/* upipe_cuda_watch_text -- how many blocks stand still, and a sentence about the first of them
 *   watch  the memory, after a call that failed; NULL: nobody watched
 *   text   UPIPE_CUDA_WATCH_TEXT bytes hold every sentence; "" where no block has written. Behind the kernel and the
 *          block come its barriers, each with name and parity of its phase, and, where its word was in memory, arrivals
 *          that are missing of how many, bytes that are missing, and the word. `full`: loads fill it and consumers wait;
 *          `empty`: consumers give it back and loads wait
 */
UPIPE_API int upipe_cuda_watch_text(const void *watch, char *text, size_t bytes)
{
    const upi_cuda_watch_record *all = (const upi_cuda_watch_record *)watch, *first = NULL;
    int found = 0, i;
    size_t n;
    text[0] = 0;
    for (i = 0; watch != NULL && i < UPI_CUDA_WATCH_RECORDS; ++i) {
        if (all[i].d == 0) continue;
        if (first == NULL || all[i].block < first->block) first = &all[i];
        ++found;
    }
    if (found == 0) return 0;
    snprintf(text, bytes, "%d block%s; %s %d of %d, %s for 9.0, d <= %d, %d keys:", found,
             found == 1 ? " stands still" : "s stand still", first->backward ? "ticket" : "block",
             first->block, first->blocks, first->backward ? "backward" : "forward", first->d, first->keys);
    for (i = 0; upi_cuda_watch_name(first->backward, i) != NULL; ++i) {
        const uint64_t word = first->barrier[i];
        n = strlen(text);
        snprintf(text + n, bytes - n, "%s %s %s", i > 0 ? "," : "", upi_cuda_watch_name(first->backward, i),
                 first->odd >> i & 1 ? "odd" : "even");
        n = strlen(text);
        if (word != 0)
            snprintf(text + n, bytes - n, " %d/%d %d B %016llx", upi_cuda_watch_pending(word),
                     upi_cuda_watch_count(word), upi_cuda_watch_bytes(word), (unsigned long long)word);
    }
    return found;
}

#endif

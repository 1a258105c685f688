/* simt_copy.h -- asynchronous copies into shared memory     part of simt.h
 *
 * A copy lands when the thread waits for its group, as late as it may; until then its destination is NaNs.
 * So whoever reads before the wait, or still needs what was there, gets NaNs. With SIMT_EAGER=1 it lands at
 * once.
 */
#ifndef SIMT_COPY_H
#define SIMT_COPY_H

struct simt_copy {
    simt_copy *next;
    char *dst;
    const void *src;
    int bytes, valid, group;
};

inline long simt_eager = simt_env("SIMT_EAGER", 0);

/* Where a shared address is, if the instruction can take it. */
SIMT_QUIET inline char *simt_shared_at(uint32_t address, unsigned bytes, const char *what)
{
    simt_block *b = simt_here;
    uint32_t offset = address - SIMT_SHARED_START;
    if (address % bytes != 0)
        simt_finding("misaligned: %s takes a shared address that is a multiple of %u, not %u", what, bytes,
                     offset);
    if (offset > b->shared_bytes || b->shared_bytes - offset < bytes)
        simt_finding("shared memory out of bounds: %s at byte %ld, the block has %zu", what,
                     (long)(int32_t)offset, b->shared_bytes);
    return b->shared + offset;
}

SIMT_QUIET inline void simt_copy_land(simt_copy *c)
{
    memset(c->dst + c->valid, 0, (size_t)(c->bytes - c->valid));
    if (c->valid > 0) memcpy(c->dst, c->src, (size_t)c->valid);
    free(c);
}

/* `bytes` to shared memory, of which `valid` are read and the rest are zeros. */
SIMT_QUIET __attribute__((noinline)) inline void simt_copy_start(uint32_t dst, const void *src, int bytes,
                                                                 int valid)
{
    simt_fiber *f = simt_fiber_now;
    simt_copy *c = (simt_copy *)malloc(sizeof *c);
    if (c == NULL) simt_finding("no memory for a copy");
    c->next = NULL;
    c->dst = simt_shared_at(dst, (unsigned)bytes, "an asynchronous copy");
    c->src = src;
    c->bytes = bytes;
    c->valid = valid;
    c->group = f->group;
    if ((uintptr_t)src % (unsigned)bytes != 0)
        simt_finding("misaligned: an asynchronous copy of %d bytes from %p", bytes, src);
    simt_race_copy(c->dst, src, bytes, valid);
    if (simt_eager) {
        simt_copy_land(c);
        return;
    }
    simt_poison(c->dst, (size_t)bytes);
    *f->copies_end = c;
    f->copies_end = &c->next;
}

SIMT_QUIET inline void simt_copy_commit(void)
{
    ++simt_fiber_now->group;
}

/* All but the newest groups have landed. */
SIMT_QUIET inline void simt_copy_wait(int newest)
{
    simt_fiber *f = simt_fiber_now;
    while (f->copies != NULL && f->copies->group < f->group - newest) {
        simt_copy *c = f->copies;
        f->copies = c->next;
        if (f->copies == NULL) f->copies_end = &f->copies;
        simt_copy_land(c);
    }
    simt_race_copy_wait(f->group - newest);
}

/* The thread ends: what it never waited for lands whenever, so now. */
SIMT_QUIET inline void simt_copy_end(simt_fiber *f)
{
    while (f->copies != NULL) {
        simt_copy *c = f->copies;
        f->copies = c->next;
        simt_copy_land(c);
    }
}

#endif

/* upipe_mem.h -- a slab pool that counts to the byte        layer 1, includes upipe_base.h
 *
 * The host provides one slab and a table of blocks; the library allocates nothing else. Blocks are placed
 * best fit, the space above the highest block last. So a dry run and the real run place them alike.
 *
 *     upipe_mem m;
 *     upipe_mem_init(&m, slab, bytes, blocks, 64);       or upipe_mem_init_dry(&m, blocks, 64)
 *     upipe_mem_alloc(&m, &p, n, "q_send", &err);  ...  upipe_mem_free(&m, p, &err);
 *
 *     int64_t mark = upipe_mem_mark(&m);
 *     upipe_mem_rewind(&m, mark);                        after a failure: frees all blocks allocated since
 *
 * Two numbers. `live` and its maximum `peak` are the exact sums of the bytes asked for. `need` is the highest
 * end of any block so far: the slab that this sequence of allocations requires, with alignment and holes. A
 * dry pool has no slab. It returns addresses that must not be accessed, and finds both numbers for runs of
 * any size.
 *
 * Under AddressSanitizer free space and the tails of blocks are poisoned, and a red zone follows each block.
 * The red zone counts in `need`, not in `live`. Define UPIPE_MEM_NO_POISON where the slab is used on a stream
 * that runs behind the host: enqueued work may rightly access a block that the host has freed already.
 */
#ifndef UPIPE_MEM_H
#define UPIPE_MEM_H

#include "upipe_base.h"

#if defined(UPIPE_MEM_NO_POISON)
/* neither poison nor red zones */
#elif defined(__SANITIZE_ADDRESS__)
#define UPI_MEM_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define UPI_MEM_ASAN 1
#endif
#endif
#ifdef UPI_MEM_ASAN
#include <sanitizer/asan_interface.h>
#endif

enum {
    UPIPE_MEM_ALIGN = 256,    /* bytes; every block starts on a multiple of it from the slab's start */
    UPIPE_MEM_PHASES_MAX = 16 /* phases whose peaks are kept */
};

/* One live block. */
typedef struct upipe_mem_block {
    size_t offset, bytes, span; /* from the slab's start; asked for; occupied */
    int64_t serial;             /* 1 for the pool's first allocation */
    const char *tag;            /* the caller's, kept by address */
    int quarantined;
} upipe_mem_block;

/* One allocation or free, or the start of a phase (bytes = 0), as the trace records it. */
typedef struct upipe_mem_event {
    double seconds; /* of the host's clock; without a clock the number of the event, in microseconds */
    size_t offset, bytes, live;
    int64_t serial;
    const char *tag;
    int kind; /* +1 alloc, -1 free, 0 phase */
    int phase;
} upipe_mem_event;

typedef struct upipe_mem {
    char *slab;
    size_t slab_bytes;       /* SIZE_MAX in a dry pool */
    upipe_mem_block *blocks; /* live blocks by ascending offset */
    int blocks_n, blocks_max;
    int blocks_peak; /* most live blocks so far: what the table must hold */
    int dry;
    int locked; /* the whole pool is quarantined: no allocations before upipe_mem_release */
    int phase;
    size_t live, peak;                       /* sum of bytes asked for: now, and its largest value */
    size_t need;                             /* slab bytes that were needed so far */
    size_t quarantined;                      /* part of live that cannot be freed before upipe_mem_release */
    int64_t serial;                          /* allocations so far */
    size_t phase_peak[UPIPE_MEM_PHASES_MAX]; /* largest live while the phase was current */
    /* optional, set by the host after init */
    upipe_mem_event *events; /* trace; NULL = none */
    int64_t events_n, events_max, events_lost;
    double (*clock)(void *user); /* seconds */
    /* called before each allocation; any status but UPIPE_OK refuses it (budgets, fault injection) */
    upipe_status (*guard)(void *user, size_t bytes, const char *tag);
    void *user;
} upipe_mem;

UPIPE_API void upi_mem_poison(upipe_mem *m, size_t offset, size_t bytes, int poison)
{
#ifdef UPI_MEM_ASAN
    if (m->dry || bytes == 0) return; /* an empty pool may have no slab */
    if (poison)
        __asan_poison_memory_region(m->slab + offset, bytes);
    else
        __asan_unpoison_memory_region(m->slab + offset, bytes);
#else
    (void)m, (void)offset, (void)bytes, (void)poison;
#endif
}

/* Slab bytes that a block of this size occupies. */
UPIPE_API size_t upipe_mem_span(size_t bytes)
{
    size_t span = (bytes + UPIPE_MEM_ALIGN - 1) / UPIPE_MEM_ALIGN * UPIPE_MEM_ALIGN;
#ifdef UPI_MEM_ASAN
    span += UPIPE_MEM_ALIGN;
#endif
    return span;
}

UPIPE_API void upi_mem_note(upipe_mem *m, int kind, const upipe_mem_block *b, const char *tag)
{
    upipe_mem_event *e;
    if (m->events == NULL) return;
    if (m->events_n == m->events_max) {
        ++m->events_lost;
        return;
    }
    e = &m->events[m->events_n];
    e->seconds = m->clock != NULL ? m->clock(m->user) : (double)m->events_n * 1e-6;
    e->offset = b != NULL ? b->offset : 0;
    e->bytes = b != NULL ? b->bytes : 0;
    e->serial = b != NULL ? b->serial : 0;
    e->live = m->live;
    e->tag = tag;
    e->kind = kind;
    e->phase = m->phase;
    ++m->events_n;
}

/* upipe_mem_init -- a pool over the host's slab
 *   slab    bytes long, aligned to 64 bytes at least; stays the host's
 *   blocks  space for blocks_max live blocks, host memory
 */
UPIPE_API void upipe_mem_init(upipe_mem *m, void *slab, size_t bytes, upipe_mem_block *blocks, int blocks_max)
{
    memset(m, 0, sizeof *m);
    m->slab = (char *)slab;
    m->slab_bytes = bytes;
    m->blocks = blocks;
    m->blocks_max = blocks_max;
    upi_mem_poison(m, 0, bytes, 1);
}

/* upipe_mem_init_dry -- a pool without a slab: it counts, and returns addresses that must not be accessed */
UPIPE_API void upipe_mem_init_dry(upipe_mem *m, upipe_mem_block *blocks, int blocks_max)
{
    memset(m, 0, sizeof *m);
    m->slab = (char *)(uintptr_t)(1u << 20);
    m->slab_bytes = SIZE_MAX;
    m->dry = 1;
    m->blocks = blocks;
    m->blocks_max = blocks_max;
}

/* upipe_mem_destroy -- ends the pool; the slab is the host's again
 *   errors  ARG if blocks are still live: the sentence names the first one. The pool is ended all the same
 */
UPIPE_API upipe_status upipe_mem_destroy(upipe_mem *m, upipe_err *e)
{
    int left = m->blocks_n;
    const char *tag = left > 0 ? m->blocks[0].tag : "";
    size_t live = m->live;
    upi_mem_poison(m, 0, m->slab_bytes, 0);
    memset(m, 0, sizeof *m);
    if (left == 0) return UPIPE_OK;
    return upipe_fail(e, UPIPE_ERR_ARG, "pool freed with %d blocks of %zu bytes live, the first is '%s'",
                      left, live, tag);
}

/* upipe_mem_alloc -- a block of `bytes` bytes with undefined contents
 *   out     its address, a multiple of 64 bytes if the slab's is; NULL for 0 bytes
 *   tag     what it holds, for traces and errors: a plain word that outlives the pool
 *   errors  MEMORY (the sentence has the live bytes, the largest hole and the slab's size); ARG where the pool is
 *           quarantined; or the guard's status
 */
UPIPE_API upipe_status upipe_mem_alloc(upipe_mem *m, void **out, size_t bytes, const char *tag, upipe_err *e)
{
    size_t span = upipe_mem_span(bytes), end = 0, best = SIZE_MAX, largest = 0, offset = 0;
    int i, at = -1;
    upipe_mem_block *b;
    *out = NULL;
    if (bytes == 0) return UPIPE_OK;
    if (m->locked)
        return upipe_fail(e, UPIPE_ERR_ARG, "%zu bytes for '%s': the pool is quarantined", bytes, tag);
    if (m->guard != NULL) {
        upipe_status s = m->guard(m->user, bytes, tag);
        if (s != UPIPE_OK) return upipe_fail(e, s, "the pool's guard refused %zu bytes for '%s'", bytes, tag);
    }
    if ((uintptr_t)m->slab % 64 != 0)
        return upipe_fail(e, UPIPE_ERR_ARG, "the slab at %p is not aligned to 64 bytes", (void *)m->slab);
    if (bytes > SIZE_MAX / 2)
        return upipe_fail(e, UPIPE_ERR_OVERFLOW, "a block of %zu bytes for '%s'", bytes, tag);
    if (m->blocks_n == m->blocks_max)
        return upipe_fail(e, UPIPE_ERR_MEMORY, "no entry left for '%s' in a table of %d blocks", tag,
                          m->blocks_max);
    for (i = 0; i < m->blocks_n; ++i) {
        size_t hole = m->blocks[i].offset - end;
        if (hole > largest) largest = hole;
        if (hole >= span && hole < best) {
            best = hole;
            offset = end;
            at = i;
        }
        end = m->blocks[i].offset + m->blocks[i].span;
    }
    if (at < 0) {
        if (m->slab_bytes - end > largest) largest = m->slab_bytes - end;
        if (span > m->slab_bytes - end)
            return upipe_fail(
                e, UPIPE_ERR_MEMORY,
                "%zu bytes for '%s' do not fit: %zu of the slab's %zu bytes are live, the largest hole "
                "has %zu",
                bytes, tag, m->live, m->slab_bytes, largest);
        offset = end;
        at = m->blocks_n;
    }
    memmove(m->blocks + at + 1, m->blocks + at, (size_t)(m->blocks_n - at) * sizeof *m->blocks);
    ++m->blocks_n;
    if (m->blocks_n > m->blocks_peak) m->blocks_peak = m->blocks_n;
    b = &m->blocks[at];
    b->offset = offset;
    b->bytes = bytes;
    b->span = span;
    b->serial = ++m->serial;
    b->tag = tag;
    b->quarantined = 0;
    m->live += bytes;
    if (m->live > m->peak) m->peak = m->live;
    if (m->live > m->phase_peak[m->phase]) m->phase_peak[m->phase] = m->live;
    if (offset + span > m->need) m->need = offset + span;
    upi_mem_poison(m, offset, bytes, 0);
    upi_mem_note(m, 1, b, tag);
    *out = m->slab + offset;
    return UPIPE_OK;
}

UPIPE_API void upi_mem_drop(upipe_mem *m, int i)
{
    upipe_mem_block b = m->blocks[i];
    m->live -= b.bytes;
    memmove(m->blocks + i, m->blocks + i + 1, (size_t)(m->blocks_n - i - 1) * sizeof *m->blocks);
    --m->blocks_n;
    upi_mem_poison(m, b.offset, b.span, 1);
    upi_mem_note(m, -1, &b, b.tag);
}

/* upipe_mem_free -- frees a block
 *   p       an address from upipe_mem_alloc; NULL does nothing
 *   errors  ARG for an address that is no live block of this pool (freed twice, say), or that is quarantined
 */
UPIPE_API upipe_status upipe_mem_free(upipe_mem *m, void *p, upipe_err *e)
{
    int i;
    if (p == NULL) return UPIPE_OK;
    for (i = 0; i < m->blocks_n; ++i) {
        if ((char *)p != m->slab + m->blocks[i].offset) continue;
        if (m->blocks[i].quarantined)
            return upipe_fail(e, UPIPE_ERR_ARG, "block '%s' is quarantined", m->blocks[i].tag);
        upi_mem_drop(m, i);
        return UPIPE_OK;
    }
    return upipe_fail(e, UPIPE_ERR_ARG, "%p is no live block of this pool (freed twice?)", p);
}

/* upipe_alloc, upipe_free -- a block of ctx->mem; the reason of a failure is in ctx->err */
UPIPE_API upipe_status upipe_alloc(upipe_ctx *c, void **out, size_t bytes, const char *tag)
{
    if (c->mem == NULL) return upipe_fail(&c->err, UPIPE_ERR_ARG, "ctx->mem is NULL");
    return upipe_mem_alloc(c->mem, out, bytes, tag, &c->err);
}

/* The block goes back to ctx->mem. */
UPIPE_API upipe_status upipe_free(upipe_ctx *c, void *p)
{
    return upipe_mem_free(c->mem, p, &c->err);
}

/* upipe_mem_mark -- a point in the sequence of allocations, for upipe_mem_rewind and upipe_mem_quarantine */
UPIPE_API int64_t upipe_mem_mark(const upipe_mem *m)
{
    return m != NULL ? m->serial : 0;
}

/* upipe_mem_rewind -- frees every block that was allocated after the mark, but for those in quarantine */
UPIPE_API void upipe_mem_rewind(upipe_mem *m, int64_t mark)
{
    int i = 0;
    while (m != NULL && i < m->blocks_n) {
        if (m->blocks[i].serial > mark && !m->blocks[i].quarantined)
            upi_mem_drop(m, i);
        else
            ++i;
    }
}

/* upipe_mem_quarantine -- locks the blocks allocated after the mark, since a peer may still access them
 *   mark    0: the whole pool. Free space is then locked too: a transfer may be in flight whose buffers the host
 *           has freed, where work on a stream runs behind it
 */
UPIPE_API void upipe_mem_quarantine(upipe_mem *m, int64_t mark)
{
    int i;
    if (mark == 0) m->locked = 1;
    for (i = 0; i < m->blocks_n; ++i) {
        if (m->blocks[i].serial <= mark || m->blocks[i].quarantined) continue;
        m->blocks[i].quarantined = 1;
        m->quarantined += m->blocks[i].bytes;
    }
}

/* upipe_mem_release -- unlocks the quarantined blocks: they are live again and can be freed. Call it once no
 *                      peer
 *                      accesses them any more: the team's ranks have returned */
UPIPE_API void upipe_mem_release(upipe_mem *m)
{
    int i;
    for (i = 0; i < m->blocks_n; ++i) m->blocks[i].quarantined = 0;
    m->quarantined = 0;
    m->locked = 0;
}

/* upipe_mem_phase -- starts a phase: peaks count for it from now on, beginning with the live bytes
 *   phase   0 .. UPIPE_MEM_PHASES_MAX - 1
 *   name    for the trace, kept by address
 */
UPIPE_API void upipe_mem_phase(upipe_mem *m, int phase, const char *name)
{
    assert(phase >= 0 && phase < UPIPE_MEM_PHASES_MAX);
    m->phase = phase;
    if (m->live > m->phase_peak[phase]) m->phase_peak[phase] = m->live;
    upi_mem_note(m, 0, NULL, name);
}

/* upipe_mem_largest -- the largest number of live bytes, over the traced run, of the blocks with these tags
 *   tags    n words. Needs the whole trace: from the pool's first allocation on, with events_lost = 0
 */
UPIPE_API size_t upipe_mem_largest(const upipe_mem *m, const char *const *tags, int n)
{
    size_t live = 0, most = 0;
    int64_t i;
    int t;
    for (i = 0; i < m->events_n; ++i) {
        const upipe_mem_event *e = &m->events[i];
        for (t = 0; t < n && strcmp(tags[t], e->tag) != 0; ++t) {
        }
        if (t == n) continue;
        live = e->kind > 0 ? live + e->bytes : e->kind < 0 ? live - e->bytes : live;
        if (live > most) most = live;
    }
    return most;
}

/* upipe_mem_trace_write -- the trace as Chrome trace events, for Perfetto or chrome://tracing
 *   file    gets one JSON object a line, with a comma before all but the first; the caller writes [ before
 *           the first pool's objects and ] after the last one's
 *   pid     the rank
 *   first   nonzero for the first pool of the file
 * Times are the clock's, so pools of ranks that share a clock are aligned. Each block is a span with its tag
 * as name. A counter shows the live bytes. Phases are spans on a track of their own. Returns the number of
 * events written, or -1 if writing failed.
 */
UPIPE_API int64_t upipe_mem_trace_write(const upipe_mem *m, FILE *file, int pid, int first)
{
    int64_t i;
    const char *open = NULL;
    double last = 0;
    if (fprintf(file,
                "%s{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":%d,\"args\":{\"name\":\"rank %d\"}}\n",
                first ? "" : ",", pid, pid) < 0)
        return -1;
    fprintf(file,
            ",{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":%d,\"tid\":1,\"args\":{\"name\":\"phases\"}}\n",
            pid);
    for (i = 0; i < m->events_n; ++i) {
        const upipe_mem_event *e = &m->events[i];
        double us = e->seconds * 1e6; /* from the clock's own zero, which the ranks share */
        last = us;
        if (e->kind == 0) {
            if (open != NULL) fprintf(file, ",{\"ph\":\"E\",\"pid\":%d,\"tid\":1,\"ts\":%.3f}\n", pid, us);
            fprintf(file,
                    ",{\"ph\":\"B\",\"name\":\"%s\",\"cat\":\"phase\",\"pid\":%d,\"tid\":1,\"ts\":%.3f}\n",
                    e->tag, pid, us);
            open = e->tag;
            continue;
        }
        fprintf(file,
                ",{\"ph\":\"%s\",\"name\":\"%s\",\"cat\":\"block\",\"id\":\"%d.%lld\",\"pid\":%d,\"tid\":2,"
                "\"ts\":%.3f,\"args\":{\"bytes\":%zu,\"offset\":%zu}}\n",
                e->kind > 0 ? "b" : "e", e->tag, pid, (long long)e->serial, pid, us, e->bytes, e->offset);
        fprintf(file, ",{\"ph\":\"C\",\"name\":\"live\",\"pid\":%d,\"ts\":%.3f,\"args\":{\"bytes\":%zu}}\n",
                pid, us, e->live);
    }
    if (open != NULL) fprintf(file, ",{\"ph\":\"E\",\"pid\":%d,\"tid\":1,\"ts\":%.3f}\n", pid, last);
    return ferror(file) ? -1 : m->events_n;
}

#endif

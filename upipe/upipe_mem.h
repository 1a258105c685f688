/* upipe_mem.h -- a slab pool that counts to the byte
 *
 * The host provides one slab and a table of blocks; the library allocates nothing else. Blocks are placed
 * best fit, the space above the highest block last. So a dry run and the real run place them alike.
 *
 *     upipe_mem m;
 *     upipe_mem_init(&m, slab, bytes, blocks, 64);       or upipe_mem_init_dry(&m, blocks, 64)
 *     upipe_mem_alloc(&m, &p, n, UPIPE_USE_QKV, "q_send", &err);  ...  upipe_mem_free(&m, p, &err);
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
    UPIPE_MEM_PHASES_MAX = 16 /* phases whose peaks are kept: those of upipe_phase, and a host's own */
};

/* What a block is for: the rows of a breakdown of memory. The library's own blocks have one of these; a host gives
 * its blocks those that fit. */
typedef enum upipe_use {
    UPIPE_USE_OTHER,
    UPIPE_USE_QKV,         /* Q, K, V of stages and their send buffers: the paper's intermediate tensors */
    UPIPE_USE_OUT,         /* final_out and its gradient, in slots */
    UPIPE_USE_STAT,        /* lse and delta */
    UPIPE_USE_ACT_GRAD,    /* gradients of activations of the attention block */
    UPIPE_USE_DK,          /* of them: dK of a round at its tokens, */
    UPIPE_USE_DV,          /* and dV */
    UPIPE_USE_SCRATCH,     /* of products and attention; sums in f32 */
    UPIPE_USE_MLP,         /* a tile of the MLP */
    UPIPE_USE_LOSS,        /* a tile of the head and the loss */
    UPIPE_USE_REDUCE,      /* strips of a sum over ranks */
    UPIPE_USE_WEIGHTS,     /* parameters */
    UPIPE_USE_WEIGHT_GRAD, /* of parameters */
    UPIPE_USE_STATES,      /* of the optimizer */
    UPIPE_USE_INPUT,       /* tokens, targets, losses */
    UPIPE_USE_CHECKPOINT,  /* activations that are kept for the backward */
    UPIPE_USE_STREAM       /* the residual stream */
} upipe_use;

/* The columns of the paper's tables; peaks are kept for each. Everything else counts as OTHER. */
typedef enum upipe_phase {
    UPIPE_FWD_BEFORE,
    UPIPE_FWD_IN,   /* inp_all_to_all, with projection, QK norm and RoPE */
    UPIPE_FWD_ATTN, /* the attention kernel */
    UPIPE_FWD_OUT,  /* out_all_to_all */
    UPIPE_BWD_BEFORE,
    UPIPE_BWD_OUT,  /* dO and delta to heads */
    UPIPE_BWD_ATTN, /* the attention backward kernel */
    UPIPE_BWD_IN,   /* recomputed Q, K, V; dQ, dK, dV to tokens; weight gradients; dX */
    UPIPE_PHASES,
    UPIPE_PHASE_OTHER = UPIPE_PHASES
} upipe_phase;

/* "fwd_in" and so on. */
UPIPE_API const char *upipe_phase_name(int phase)
{
    static const char *const names[] = {"fwd_before", "fwd_in",   "fwd_attn", "fwd_out", "bwd_before",
                                        "bwd_out",    "bwd_attn", "bwd_in",   "other"};
    return names[phase >= 0 && phase < UPIPE_PHASES ? phase : UPIPE_PHASES];
}

/* One live block. */
typedef struct upipe_mem_block {
    size_t offset, bytes, span; /* from the slab's start; asked for; occupied */
    int64_t serial;             /* 1 for the pool's first allocation */
    const char *tag;            /* the caller's, for people; kept by address */
    int use;                    /* a upipe_use */
    int quarantined;
    void *link; /* see upi_mem_link */
} upipe_mem_block;

/* One allocation or free, or the start of a phase (bytes = 0), as the trace records it. */
typedef struct upipe_mem_event {
    double seconds; /* of the host's clock; without a clock the number of the event, in microseconds */
    size_t offset, bytes, live;
    int64_t serial;
    const char *tag;
    int kind; /* +1 alloc, -1 free, 0 phase */
    int use, phase;
} upipe_mem_event;

typedef struct upipe_mem {
    char *slab;
    size_t slab_bytes;       /* SIZE_MAX in a dry pool */
    upipe_mem_block *blocks; /* live blocks by ascending offset */
    int blocks_n, blocks_max;
    int blocks_peak; /* most live blocks so far: what the table must hold */
    int dry; /* no slab. Below 0: and every tile of upipe_mem_tiles_next is gone through, as in a real pool */
    int64_t times; /* how often what happens now counts; 1 but in a dry pool */
    int locked;    /* the whole pool is quarantined: no allocations any more */
    int phase;
    size_t live, peak;                       /* sum of bytes asked for: now, and its largest value */
    size_t need;                             /* slab bytes that were needed so far */
    size_t quarantined;                      /* part of live that cannot be freed any more */
    int64_t serial;                          /* allocations so far */
    size_t phase_peak[UPIPE_MEM_PHASES_MAX]; /* largest live while the phase was current */
    /* optional, set by the host after init */
    upipe_mem_event *events; /* trace; NULL = none */
    int64_t events_n, events_max, events_lost;
    double (*clock)(void *user); /* seconds */
    /* called before each allocation; any status but UPIPE_OK refuses it (budgets, fault injection) */
    upipe_status (*guard)(void *user, size_t bytes, int use, const char *tag);
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
        m->events_lost += m->times;
        return;
    }
    e = &m->events[m->events_n];
    e->seconds = m->clock != NULL ? m->clock(m->user) : (double)m->events_n * 1e-6;
    e->offset = b != NULL ? b->offset : 0;
    e->bytes = b != NULL ? b->bytes : 0;
    e->serial = b != NULL ? b->serial : 0;
    e->live = m->live;
    e->tag = tag;
    e->use = b != NULL ? b->use : 0;
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
    m->times = 1;
    upi_mem_poison(m, 0, bytes, 1);
}

/* upipe_mem_init_dry -- a pool without a slab: it counts, and returns addresses that must not be accessed */
UPIPE_API void upipe_mem_init_dry(upipe_mem *m, upipe_mem_block *blocks, int blocks_max)
{
    upipe_mem_init(m, (void *)(uintptr_t)(1u << 20), 0, blocks, blocks_max);
    m->slab_bytes = SIZE_MAX;
    m->dry = 1;
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
 *   use     what it is for: a upipe_use
 *   tag     its name in traces and errors: a plain word that outlives the pool
 *   errors  MEMORY (the sentence has the live bytes, the largest hole and the slab's size); ARG where the pool is
 *           quarantined; or the guard's status
 */
UPIPE_API upipe_status upipe_mem_alloc(upipe_mem *m, void **out, size_t bytes, int use, const char *tag,
                                       upipe_err *e)
{
    size_t span = upipe_mem_span(bytes), end = 0, best = SIZE_MAX, largest = 0, offset = 0;
    int i, at = -1;
    upipe_mem_block *b;
    upipe_status s;
    *out = NULL;
    if (bytes == 0) return UPIPE_OK;
    if (m == NULL) return upipe_fail(e, UPIPE_ERR_ARG, "%zu bytes for '%s': the pool is NULL", bytes, tag);
    if (m->locked)
        return upipe_fail(e, UPIPE_ERR_ARG, "%zu bytes for '%s': the pool is quarantined", bytes, tag);
    s = m->guard != NULL ? m->guard(m->user, bytes, use, tag) : UPIPE_OK;
    if (s != UPIPE_OK) return upipe_fail(e, s, "the pool's guard refused %zu bytes for '%s'", bytes, tag);
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
            return upipe_fail(e, UPIPE_ERR_MEMORY,
                              "%zu bytes for '%s' do not fit: %zu of the slab's %zu bytes are live, the "
                              "largest hole has %zu",
                              bytes, tag, m->live, m->slab_bytes, largest);
        offset = end;
        at = m->blocks_n;
    }
    memmove(m->blocks + at + 1, m->blocks + at, (size_t)(m->blocks_n - at) * sizeof *m->blocks);
    if (++m->blocks_n > m->blocks_peak) m->blocks_peak = m->blocks_n;
    b = &m->blocks[at];
    memset(b, 0, sizeof *b);
    b->offset = offset;
    b->bytes = bytes;
    b->span = span;
    b->serial = ++m->serial;
    b->tag = tag;
    b->use = use;
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
    if (m == NULL) return upipe_fail(e, UPIPE_ERR_ARG, "the pool is NULL");
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
UPIPE_API upipe_status upipe_alloc(upipe_ctx *c, void **out, size_t bytes, int use, const char *tag)
{
    return upipe_mem_alloc(c->mem, out, bytes, use, tag, &c->err);
}

/* The block goes back to ctx->mem. */
UPIPE_API upipe_status upipe_free(upipe_ctx *c, void *p)
{
    return upipe_mem_free(c->mem, p, &c->err);
}

/* upipe_mem_mark -- a point in the sequence of allocations, for upipe_mem_rewind and upi_mem_quarantine */
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

/* upi_mem_quarantine -- locks the blocks allocated after the mark, since a peer may still access them
 *   mark    0: the whole pool. Free space is then locked too: a transfer may be in flight whose buffers the host
 *           has freed, where work on a stream runs behind it
 * Once no peer accesses them any more, as the team's ranks have returned, the host may end the pool
 * (upipe_mem_destroy), and begin another one over its slab.
 */
UPIPE_API void upi_mem_quarantine(upipe_mem *m, int64_t mark)
{
    int i;
    if (mark == 0) m->locked = 1;
    for (i = 0; i < m->blocks_n; ++i) {
        if (m->blocks[i].serial <= mark || m->blocks[i].quarantined) continue;
        m->blocks[i].quarantined = 1;
        m->quarantined += m->blocks[i].bytes;
    }
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

/* upipe_mem_tiles -- a loop over rows, all zero before its first tile
 *   row n   the tile's rows: n of them from row on
 *   times   how many tiles this one stands for: more than 1 in a dry run alone
 */
typedef struct upipe_mem_tiles {
    int64_t row, n, times;
} upipe_mem_tiles;

/* upipe_mem_tiles_next -- the next tile of a loop over `all` rows by `rows`; 0 after the last
 *   m       the pool: in a dry one equal tiles run once, and what is counted counts for all of them. So a tile frees what
 *           it allocates, and sends nothing. NULL: a loop without a pool
 */
UPIPE_API int upipe_mem_tiles_next(upipe_mem *m, upipe_mem_tiles *t, int64_t all, int64_t rows)
{
    const int dry = m != NULL && m->dry > 0;
    const int64_t left = all - (t->row += t->n * t->times);
    if (dry && t->times > 0) m->times /= t->times;
    t->n = left < rows ? left : rows;
    t->times = dry && left > 0 ? left / t->n : 1;
    if (dry) m->times *= t->times;
    return left > 0;
}

/* upi_mem_link -- the place beside a live block for an address of its owner's, NULL at first: so a list of blocks needs
 *                 no memory of its own. NULL: p is no live block */
UPIPE_API void **upi_mem_link(const upipe_mem *m, const void *p)
{
    int i = 0;
    while (i < m->blocks_n && m->slab + m->blocks[i].offset != (const char *)p) ++i;
    return i < m->blocks_n ? &m->blocks[i].link : NULL;
}

/* From now on the peaks of ctx->mem count for this phase of the attention block. */
UPIPE_API void upi_phase_set(upipe_ctx *c, upipe_phase phase)
{
    upipe_mem_phase(c->mem, (int)phase, upipe_phase_name((int)phase));
}

/* upipe_mem_largest -- the largest number of live bytes, over the traced run, of the blocks with this use
 *   use     a upipe_use. Needs the whole trace: from the pool's first allocation on, with
 *           events_lost = 0
 */
UPIPE_API size_t upipe_mem_largest(const upipe_mem *m, upipe_use use)
{
    size_t live = 0, most = 0;
    int64_t i;
    for (i = 0; i < m->events_n; ++i) {
        const upipe_mem_event *e = &m->events[i];
        if (e->kind == 0 || e->use != (int)use) continue;
        live = e->kind > 0 ? live + e->bytes : live - e->bytes;
        if (live > most) most = live;
    }
    return most;
}

#endif

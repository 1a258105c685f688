/* simt_hopper.h -- what Hopper added: barriers in shared memory, bulk copies, products of warpgroups
 *                  part of simt.h
 *
 * As unkind as allowed:
 *
 *   loads    (TMA) land when no thread of the block can go on without them, with a seed at any moment and in
 *            any order; until then their destination is NaNs. With SIMT_EAGER=1 they land at once
 *   stores   read shared memory at the wait for their group, and write global memory at the wait for that,
 *            or when the block has ended
 *   wgmma    reads shared memory at the wait, where its results appear; until then they are NaNs
 *
 * Findings: a barrier that nobody initialised, or that was overwritten; more arrivals than it counts; a load
 * on its way, or a store that has not read its source, or a product without a wait when the block ends; wgmma
 * by part of a warpgroup, with operands that differ between threads, in a group that no wgmma.fence begins,
 * or whose registers change before the wait; addresses and sizes that an instruction can't take; registers
 * that setmaxnreg takes and nobody gave.
 *
 * The race detector counts as agents of their own: the loads of a barrier, the products of a warpgroup, the
 * reads and the writes of a thread's stores. What a thread writes to shared memory itself, and what it has learnt
 * that other blocks wrote to global memory, such an agent sees only behind a fence.proxy.async for that memory.
 */
#ifndef SIMT_HOPPER_H
#define SIMT_HOPPER_H

enum {
    SIMT_GROUP = 128, /* threads of a warpgroup */
    SIMT_GROUPS = SIMT_THREADS / SIMT_GROUP,
    SIMT_NAMED = 16,        /* barriers that have numbers */
    SIMT_TILE_ALIGN = 1024, /* of what is swizzled */
    SIMT_MARK = 0x6d626172  /* the word of an initialised barrier */
};

/* ---- tensors as the copy engine sees them ---- */

/* dims from the innermost; steps in bytes. A box is [rows][128 bytes], swizzled. */
struct alignas(64) simt_map {
    char *base;
    int64_t dim[3], step[3];
    int element, rows; /* bytes of an element; rows of a box */
};

/* Where byte `at` of a swizzled tile lies; addresses, not offsets. */
SIMT_QUIET inline uint32_t simt_swizzle(uint32_t at)
{
    return at ^ (at >> 3 & 0x70);
}

/* 16 bytes of global memory in a box: NULL outside of the tensor. `some`: how many bytes of them are inside. */
SIMT_QUIET inline char *simt_box_at(const simt_map *m, const int *from, int row, int chunk, int *some)
{
    const int64_t column = from[0] + chunk * (16 / m->element), i = (int64_t)from[1] + row;
    *some = 0;
    if (column < 0 || column >= m->dim[0] || i < 0 || i >= m->dim[1] || from[2] < 0 || from[2] >= m->dim[2])
        return NULL;
    *some = m->dim[0] - column < 16 / m->element ? (int)(m->dim[0] - column) * m->element : 16;
    return m->base + column * m->element + i * m->step[1] + from[2] * m->step[2];
}

/* ---- a block's state ---- */

struct simt_load {
    simt_load *next;
    simt_map map;
    int from[3];
    const char *plain; /* not NULL: `bytes` bytes from there instead */
    uint32_t to, bytes;
    unsigned barrier;
    uint32_t phase; /* of the barrier when the load began */
};

/* A barrier in shared memory. */
struct simt_mbarrier {
    uint32_t address;
    int count, pending;
    int64_t bytes; /* that loads still owe to this phase */
    uint32_t phase;
};

struct simt_named {
    unsigned size, arrived;
};

/* A rendezvous of a warpgroup. */
struct simt_gathering {
    unsigned arrived;
    const char *what, *file;
    int line;
    void *args[SIMT_GROUP];
};

struct simt_product {
    simt_product *next;
    int n, add, group, trans_a, trans_b;
    uint64_t a, b;                    /* descriptors; a: where no registers are */
    const uint32_t *a_of[SIMT_GROUP]; /* registers, and what they held */
    uint32_t a_was[SIMT_GROUP][4];
    float *d[SIMT_GROUP];
    float *sum; /* [64][n], shared by all products into the same registers */
};

struct simt_warpgroup {
    simt_gathering gathering;
    simt_product *first, **end;
    int group, fenced;
    int registers; /* of a thread */
};

struct simt_hopper {
    simt_load *first, **end;
    unsigned loads, barriers;
    simt_mbarrier barrier[SIMT_BARRIERS];
    simt_named named[SIMT_NAMED];
    simt_warpgroup group[SIMT_GROUPS];
    int registers; /* that setmaxnreg has given back, less those taken */
};

SIMT_QUIET inline simt_hopper *simt_hopper_new(void)
{
    return (simt_hopper *)calloc(1, sizeof(simt_hopper));
}

SIMT_QUIET inline void simt_hopper_start(simt_block *b)
{
    simt_hopper *h = b->hopper;
    unsigned i;
    memset(h, 0, sizeof *h);
    h->end = &h->first;
    for (i = 0; i < SIMT_GROUPS; ++i) {
        h->group[i].end = &h->group[i].first;
        h->group[i].registers = (int)(65536 / b->threads / 8 * 8);
    }
}

SIMT_QUIET inline void *simt_hopper_alloc(size_t bytes)
{
    void *p = aligned_alloc(64, (bytes + 63) / 64 * 64); /* maps are aligned */
    if (p == NULL) simt_finding("no memory for what is asynchronous");
    return memset(p, 0, bytes);
}

/* Wakes the threads that wait for this. */
SIMT_QUIET inline void simt_wake(simt_block *b, const void *what, unsigned sync)
{
    unsigned t;
    for (t = 0; t < b->threads; ++t)
        if (b->fiber[t].state == SIMT_WAITING && b->fiber[t].waits_for == what) {
            b->fiber[t].waits_for = NULL;
            b->fiber[t].until = 0;
            simt_race_acquire(&b->fiber[t], sync);
            simt_make_ready(b, t);
        }
}

/* ---- barriers in shared memory ---- */

SIMT_QUIET inline unsigned simt_mbarrier_at(uint32_t address, const char *what)
{
    simt_hopper *h = simt_here->hopper;
    const char *p = simt_shared_at(address, 8, what);
    uint32_t mark;
    unsigned i;
    for (i = 0; i < h->barriers && h->barrier[i].address != address;) ++i;
    if (i == h->barriers)
        simt_finding("%s: no mbarrier at shared byte %u", what, address - SIMT_SHARED_START);
    memcpy(&mark, p, sizeof mark);
    if (mark != SIMT_MARK)
        simt_finding("%s: the mbarrier at shared byte %u was overwritten", what, address - SIMT_SHARED_START);
    return i;
}

SIMT_QUIET inline void simt_mbarrier_init(uint32_t address, int count, const void *code)
{
    simt_hopper *h = simt_here->hopper;
    char *p = simt_shared_at(address, 8, "mbarrier.init");
    uint32_t word[2] = {SIMT_MARK, 0};
    unsigned i;
    if (count < 1 || count > 0xfffff) simt_finding("mbarrier.init with a count of %d", count);
    for (i = 0; i < h->barriers && h->barrier[i].address != address;) ++i;
    if (i < h->barriers) simt_finding("mbarrier.init of one that is in use");
    if (i == SIMT_BARRIERS) simt_finding("more than %d mbarriers in a block", (int)SIMT_BARRIERS);
    h->barriers = i + 1;
    h->barrier[i].address = address;
    h->barrier[i].count = h->barrier[i].pending = count;
    memcpy(p, word, sizeof word);
    simt_race_own(p, 8, SIMT_WRITE, code);
}

SIMT_QUIET inline void simt_mbarrier_check(unsigned i)
{
    simt_mbarrier *m = &simt_here->hopper->barrier[i];
    if (m->pending > 0 || m->bytes != 0) return;
    simt_race_pass(2 * i, 2 * i + 1, SIMT_AGENT_LOADS + i, m->phase + 1);
    ++m->phase;
    m->pending = m->count;
    simt_wake(simt_here, m, 2 * i + 1);
}

/* `bytes` more are expected in this phase, then one arrival. */
SIMT_QUIET inline void simt_mbarrier_arrive(uint32_t address, uint32_t bytes, const void *code)
{
    const unsigned i = simt_mbarrier_at(address, "mbarrier.arrive");
    simt_mbarrier *m = &simt_here->hopper->barrier[i];
    simt_race_own(simt_shared_at(address, 8, "mbarrier.arrive"), 8, SIMT_READ, code);
    if (m->pending < 1) simt_finding("mbarrier.arrive: more arrivals than the count, %d", m->count);
    m->bytes += bytes;
    if (m->bytes > 0xfffff) simt_finding("mbarrier.arrive: %lld bytes expected", (long long)m->bytes);
    --m->pending;
    simt_race_release(2 * i);
    simt_mbarrier_check(i);
}

/* Until the phase of this parity has ended. */
SIMT_QUIET inline void simt_mbarrier_wait(uint32_t address, uint32_t parity, const char *file, int line,
                                          const void *code)
{
    const unsigned i = simt_mbarrier_at(address, "mbarrier.try_wait");
    simt_mbarrier *m = &simt_here->hopper->barrier[i];
    simt_mark(file, line);
    simt_race_own(simt_shared_at(address, 8, "mbarrier.try_wait"), 8, SIMT_READ, code);
    if ((m->phase & 1) != (parity & 1)) {
        simt_race_acquire(simt_fiber_now, 2 * i + 1);
        return;
    }
    simt_fiber_now->waits_for = m;
    simt_wait(simt_here, "mbarrier.try_wait");
}

/* The same for a while; whether it has ended. `ns` is a hint: here the wait lasts ten times as long. */
SIMT_QUIET inline int simt_mbarrier_wait_for(uint32_t address, uint32_t parity, uint32_t ns, const char *file,
                                             int line, const void *code)
{
    const unsigned i = simt_mbarrier_at(address, "mbarrier.try_wait");
    simt_block *b = simt_here;
    simt_fiber *me = simt_fiber_now;
    simt_mbarrier *m = &b->hopper->barrier[i];
    simt_mark(file, line);
    simt_race_own(simt_shared_at(address, 8, "mbarrier.try_wait"), 8, SIMT_READ, code);
    if ((m->phase & 1) == (parity & 1)) {
        me->waits_for = m;
        me->until = simt_clock() + (uint64_t)ns * 10 + 1;
        if (me->until < b->due) b->due = me->until;
        simt_wait(b, "mbarrier.try_wait");
        if ((m->phase & 1) == (parity & 1)) return 0;
    }
    simt_race_acquire(me, 2 * i + 1);
    return 1;
}

/* As a device has it, as far as that is known: upipe_cuda_watch.h. */
SIMT_QUIET inline uint64_t simt_mbarrier_word(uint32_t address, const void *code)
{
    const simt_mbarrier *m = &simt_here->hopper->barrier[simt_mbarrier_at(address, "the word of a barrier")];
    simt_race_own(simt_shared_at(address, 8, "the word of a barrier"), 8, SIMT_READ, code);
    if (simt_words_hidden) return 0;
    return (uint64_t)(m->phase & 1) << 63 | (-(uint64_t)m->pending & 0xfffff) << 43 |
           (-(uint64_t)m->bytes & 0x1fffff) << 21 | (-(uint64_t)m->count & 0xfffff) << 1;
}

/* The parity of its phase, at once. */
SIMT_QUIET inline uint32_t simt_mbarrier_parity(uint32_t address, const void *code)
{
    const simt_mbarrier *m = &simt_here->hopper->barrier[simt_mbarrier_at(address, "the phase of a barrier")];
    simt_race_own(simt_shared_at(address, 8, "the phase of a barrier"), 8, SIMT_READ, code);
    return (uint32_t)m->phase & 1;
}

/* Whether it has. The one who asks gets to it early or late: every other time the block's other threads go first, as far
 * as they can. */
SIMT_QUIET inline int simt_mbarrier_test(uint32_t address, uint32_t parity, const void *code)
{
    const unsigned i = simt_mbarrier_at(address, "mbarrier.test_wait");
    simt_block *b = simt_here;
    const simt_mbarrier *m = &b->hopper->barrier[i];
    unsigned turns = b->asked++ % 2 * 4 * b->threads;
    simt_race_own(simt_shared_at(address, 8, "mbarrier.test_wait"), 8, SIMT_READ, code);
    for (; turns > 0 && (m->phase & 1) == (parity & 1); --turns) {
        if (b->count == 0 && !simt_land_load(b)) break;
        simt_make_ready(b, simt_fiber_now->number);
        simt_yield(b);
    }
    if ((m->phase & 1) == (parity & 1)) return 0;
    simt_race_acquire(simt_fiber_now, 2 * i + 1);
    return 1;
}

/* ---- loads ---- */

SIMT_QUIET inline void simt_load_finish(simt_load *l)
{
    simt_mbarrier *m = &simt_here->hopper->barrier[l->barrier];
    char *shared = simt_here->shared - SIMT_SHARED_START;
    int row, chunk, some;
    if (l->plain != NULL) memcpy(shared + l->to, l->plain, l->bytes);
    for (row = 0; l->plain == NULL && row < l->map.rows; ++row)
        for (chunk = 0; chunk < 8; ++chunk) {
            char *to = shared + simt_swizzle(l->to + (uint32_t)(row * 128 + chunk * 16));
            const char *from = simt_box_at(&l->map, l->from, row, chunk, &some);
            memset(to, 0, 16);
            if (some > 0) memcpy(to, from, (size_t)some);
        }
    simt_mbarrier_at(m->address, "the end of a load");
    m->bytes -= l->bytes;
    simt_mbarrier_check(l->barrier);
    free(l);
}

SIMT_QUIET inline int simt_land_load(simt_block *b)
{
    simt_hopper *h = b->hopper;
    simt_load **at = &h->first, *l;
    unsigned skip;
    if (h->loads == 0) return 0;
    skip = simt_seed > 0 ? (unsigned)(simt_random(&b->random) % h->loads) : 0;
    for (; skip > 0; --skip) at = &(*at)->next;
    l = *at;
    *at = l->next;
    if (l->next == NULL) h->end = at;
    --h->loads;
    simt_load_finish(l);
    return 1;
}

SIMT_QUIET inline void simt_load_start(simt_load *l, uint32_t barrier, const void *code)
{
    simt_block *b = simt_here;
    simt_hopper *h = b->hopper;
    char *to = simt_shared_at(l->to, l->plain != NULL ? 16 : SIMT_TILE_ALIGN, "a load");
    unsigned agent;
    int row, chunk, some;
    if (l->to - SIMT_SHARED_START + l->bytes > b->shared_bytes)
        simt_finding("shared memory out of bounds: a load of %u bytes at byte %u, the block has %zu",
                     l->bytes, l->to - SIMT_SHARED_START, b->shared_bytes);
    l->barrier = simt_mbarrier_at(barrier, "a load");
    l->phase = h->barrier[l->barrier].phase;
    agent = SIMT_AGENT_LOADS + l->barrier;
    simt_race_agent(agent, l->phase + 1, simt_shared_at(barrier, 8, "a load"), 8, SIMT_READ, code);
    simt_race_agent(agent, l->phase + 1, to, l->bytes, SIMT_WRITE, code);
    if (l->plain != NULL) simt_race_agent(agent, l->phase + 1, l->plain, l->bytes, SIMT_READ, code);
    for (row = 0; SIMT_RACE_ON && l->plain == NULL && row < l->map.rows; ++row)
        for (chunk = 0; chunk < 8; ++chunk) {
            const char *from = simt_box_at(&l->map, l->from, row, chunk, &some);
            if (some > 0) simt_race_agent(agent, l->phase + 1, from, (size_t)some, SIMT_READ, code);
        }
    if (simt_eager) {
        simt_load_finish(l);
        return;
    }
    simt_poison(to, l->bytes);
    *h->end = l;
    h->end = &l->next;
    ++h->loads;
}

SIMT_QUIET inline void simt_load_box(uint32_t to, const simt_map *map, int x, int y, int z, uint32_t barrier,
                                     const void *code)
{
    simt_load *l = (simt_load *)simt_hopper_alloc(sizeof *l);
    l->map = *map;
    l->from[0] = x, l->from[1] = y, l->from[2] = z;
    l->to = to;
    l->bytes = (uint32_t)map->rows * 128;
    simt_load_start(l, barrier, code);
}

SIMT_QUIET inline void simt_load_plain(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier,
                                       const void *code)
{
    simt_load *l = (simt_load *)simt_hopper_alloc(sizeof *l);
    if ((uintptr_t)from % 16 != 0 || bytes % 16 != 0)
        simt_finding("misaligned: a bulk load of %u bytes from %p", bytes, from);
    l->plain = (const char *)from;
    l->to = to;
    l->bytes = bytes;
    simt_load_start(l, barrier, code);
}

/* ---- stores ---- */

struct simt_bulk {
    simt_bulk *next;
    simt_map map;
    int from[3], group;
    int adds;    /* a box of f32 that is added to what is there */
    float *sums; /* not NULL: `bytes` bytes are added to these instead */
    uint32_t source, bytes;
    char *data; /* once it has been read, as it lies in shared memory */
    const void *code;
};

SIMT_QUIET inline void simt_bulk_read(simt_bulk *s)
{
    if (s->data != NULL) return;
    s->data = (char *)simt_hopper_alloc(s->bytes);
    memcpy(s->data, simt_here->shared + (s->source - SIMT_SHARED_START), s->bytes);
}

/* Adds `bytes` bytes of f32 to what is there, each number for itself. */
SIMT_QUIET inline void simt_bulk_add(float *to, const char *from, uint32_t bytes)
{
    uint32_t i;
    for (i = 0; i < bytes / 4; ++i) {
        uint32_t *bits = (uint32_t *)(to + i), was = __atomic_load_n(bits, __ATOMIC_RELAXED), will;
        float x, y;
        memcpy(&y, from + 4 * i, 4);
        do {
            memcpy(&x, &was, 4);
            x += y;
            memcpy(&will, &x, 4);
        } while (!__atomic_compare_exchange_n(bits, &was, will, 0, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED));
    }
}

SIMT_QUIET inline void simt_bulk_write(simt_bulk *s)
{
    int row, chunk, some;
    simt_bulk_read(s);
    for (row = 0; s->sums == NULL && row < s->map.rows; ++row)
        for (chunk = 0; chunk < 8; ++chunk) {
            char *to = simt_box_at(&s->map, s->from, row, chunk, &some);
            const uint32_t at = s->source + (uint32_t)(row * 128 + chunk * 16);
            const char *source = s->data + (simt_swizzle(at) - s->source);
            if (some > 0 && s->adds)
                simt_bulk_add((float *)to, source, (uint32_t)some);
            else if (some > 0)
                memcpy(to, source, (size_t)some);
        }
    if (s->sums != NULL) simt_bulk_add(s->sums, s->data, s->bytes);
    free(s->data);
    free(s);
}

/* The running thread's agents for this: reads, then writes. */
SIMT_QUIET inline unsigned simt_bulk_agent(void)
{
    return SIMT_AGENT_STORES + simt_fiber_now->warp % SIMT_STORERS * 2;
}

SIMT_QUIET inline void simt_bulk_start(simt_bulk *s, const void *code)
{
    simt_fiber *f = simt_fiber_now;
    const unsigned agent = simt_bulk_agent();
    const uint32_t clock = (uint32_t)f->bulk_group + 1;
    char *source = simt_shared_at(s->source, s->sums != NULL ? 16 : SIMT_TILE_ALIGN, "a bulk store");
    int row, chunk, some;
    if (s->source - SIMT_SHARED_START + s->bytes > simt_here->shared_bytes)
        simt_finding("shared memory out of bounds: a bulk store of %u bytes at byte %u, the block has %zu",
                     s->bytes, s->source - SIMT_SHARED_START, simt_here->shared_bytes);
    s->group = f->bulk_group;
    if (s->sums != NULL) {
        simt_race_agent(agent, clock, source, s->bytes, SIMT_READ, code);
        simt_race_agent(agent + 1, clock, s->sums, s->bytes, SIMT_ATOMIC_WRITE, code);
    }
    for (row = 0; SIMT_RACE_ON && s->sums == NULL && row < s->map.rows; ++row)
        for (chunk = 0; chunk < 8; ++chunk) {
            char *to = simt_box_at(&s->map, s->from, row, chunk, &some);
            const uint32_t at = s->source + (uint32_t)(row * 128 + chunk * 16);
            if (some <= 0) continue; /* what goes nowhere need not have been written */
            simt_race_agent(agent, clock, source + (simt_swizzle(at) - s->source), (size_t)some, SIMT_READ,
                            code);
            simt_race_agent(agent + 1, clock, to, (size_t)some, s->adds ? SIMT_ATOMIC_WRITE : SIMT_WRITE,
                            code);
        }
    if (simt_eager) {
        simt_bulk_write(s);
        return;
    }
    *f->bulk_end = s;
    f->bulk_end = &s->next;
}

SIMT_QUIET inline simt_bulk *simt_bulk_box(const simt_map *map, int x, int y, int z, uint32_t source)
{
    simt_bulk *s = (simt_bulk *)simt_hopper_alloc(sizeof *s);
    s->map = *map;
    s->from[0] = x, s->from[1] = y, s->from[2] = z;
    s->source = source;
    s->bytes = (uint32_t)map->rows * 128;
    return s;
}

SIMT_QUIET inline void simt_store_box(const simt_map *map, int x, int y, int z, uint32_t source,
                                      const void *code)
{
    simt_bulk_start(simt_bulk_box(map, x, y, z, source), code);
}

SIMT_QUIET inline void simt_add_box(const simt_map *map, int x, int y, int z, uint32_t source,
                                    const void *code)
{
    simt_bulk *s = simt_bulk_box(map, x, y, z, source);
    if (map->element != 4) simt_finding("a bulk sum into elements of %d bytes", map->element);
    s->adds = 1;
    simt_bulk_start(s, code);
}

SIMT_QUIET inline void simt_add_plain(float *to, uint32_t source, uint32_t bytes, const void *code)
{
    simt_bulk *s = (simt_bulk *)simt_hopper_alloc(sizeof *s);
    if ((uintptr_t)to % 16 != 0 || bytes % 16 != 0)
        simt_finding("misaligned: a bulk sum of %u bytes to %p", bytes, (void *)to);
    s->sums = to;
    s->source = source;
    s->bytes = bytes;
    simt_bulk_start(s, code);
}

SIMT_QUIET inline void simt_bulk_commit(void)
{
    ++simt_fiber_now->bulk_group;
}

/* All but the newest groups have read their sources, or are in global memory. */
SIMT_QUIET inline void simt_bulk_wait(int newest, int written)
{
    simt_fiber *f = simt_fiber_now;
    const int old = f->bulk_group - newest;
    simt_bulk *s;
    for (s = f->bulk; s != NULL && s->group < old; s = s->next) simt_bulk_read(s);
    while (written && f->bulk != NULL && f->bulk->group < old) {
        s = f->bulk;
        f->bulk = s->next;
        if (f->bulk == NULL) f->bulk_end = &f->bulk;
        simt_bulk_write(s);
    }
    if (old > 0) simt_race_learn(simt_bulk_agent(), (uint32_t)old);
    if (old > 0 && written) simt_race_learn(simt_bulk_agent() + 1, (uint32_t)old);
}

/* The thread ends: shared memory goes with the block. */
SIMT_QUIET inline void simt_bulk_end(simt_fiber *f)
{
    simt_bulk *s;
    for (s = f->bulk; s != NULL; s = s->next)
        if (s->data == NULL) simt_finding("a thread ends before its bulk store has read shared memory");
}

/* ---- barriers that have numbers ---- */

SIMT_QUIET inline void simt_named_barrier(int id, int threads, int waits, const char *file, int line)
{
    simt_block *b = simt_here;
    const unsigned sync = 2 * SIMT_BARRIERS + (unsigned)id;
    simt_named *n;
    simt_mark(file, line);
    if (id < 1 || id >= SIMT_NAMED) simt_finding("there is no barrier %d but that of __syncthreads", id);
    if (threads < SIMT_WARP || threads % SIMT_WARP != 0 || threads > (int)b->threads)
        simt_finding("barrier %d of %d threads", id, threads);
    n = &b->hopper->named[id];
    if (n->arrived > 0 && n->size != (unsigned)threads)
        simt_finding("divergence: barrier %d of %d threads, others say %u", id, threads, n->size);
    n->size = (unsigned)threads;
    simt_race_release(sync);
    if (++n->arrived < n->size) {
        if (!waits) return;
        simt_fiber_now->waits_for = n;
        simt_wait(b, "a named barrier");
        return;
    }
    n->arrived = 0;
    simt_wake(b, n, sync);
    if (waits) simt_race_acquire(simt_fiber_now, sync);
}

/* ---- warpgroups ---- */

typedef void (*simt_group_work)(simt_warpgroup *g, void **args);

SIMT_QUIET __attribute__((noinline)) inline void simt_gather(const char *what, void *arg,
                                                             simt_group_work work, const char *file, int line)
{
    simt_block *b = simt_here;
    simt_fiber *me = simt_fiber_now;
    const unsigned first = me->number / SIMT_GROUP * SIMT_GROUP;
    simt_warpgroup *w = &b->hopper->group[me->number / SIMT_GROUP];
    simt_gathering *g = &w->gathering;
    unsigned t;
    simt_mark(file, line);
    if (first + SIMT_GROUP > b->threads) simt_finding("%s in a warpgroup that is not whole", what);
    if (g->arrived > 0 && (g->what != what || g->line != line || strcmp(g->file, file) != 0))
        simt_finding("divergence: thread %u is at %s, %s:%d; others of its warpgroup at %s, %s:%d",
                     me->number, what, file, line, g->what, g->file, g->line);
    g->what = what;
    g->file = file;
    g->line = line;
    g->args[me->number - first] = arg;
    if (++g->arrived < SIMT_GROUP) {
        simt_wait(b, what);
        return;
    }
    g->arrived = 0;
    b->place = __builtin_return_address(0);
    if (work != NULL) work(w, g->args);
    for (t = first; t < first + SIMT_GROUP; ++t)
        if (t != me->number) simt_make_ready(b, t);
}

/* ---- products ---- */

struct simt_product_arg {
    float *d;
    const uint32_t *a_registers; /* NULL: a is in shared memory */
    uint64_t a, b;
    int n, add, trans_a, trans_b;
};

/* 16 bytes of an operand in shared memory that is swizzled by 128 bytes: elements (mn, k) and the next seven
 * of k, or of mn where `trans`. */
SIMT_QUIET inline const char *simt_operand_at(uint64_t descriptor, int mn, int k, int trans)
{
    const uint32_t base = (uint32_t)(descriptor & 0x3fff) << 4;
    const uint32_t lead = (uint32_t)(descriptor >> 16 & 0x3fff) << 4;
    const uint32_t stride = (uint32_t)(descriptor >> 32 & 0x3fff) << 4;
    uint32_t at;
    if (descriptor >> 49 != 1u << 13) simt_finding("wgmma: a descriptor of another swizzle, or of an offset");
    if (trans)
        at = base + (uint32_t)(mn / 64) * lead + (uint32_t)(k / 8) * stride +
             (uint32_t)(k % 8 * 128 + mn % 64 * 2);
    else
        at = base + (uint32_t)(mn / 8) * stride + (uint32_t)(mn % 8 * 128 + k * 2);
    return simt_shared_at(simt_swizzle(at), 16, "wgmma");
}

/* x [rows][16] */
SIMT_QUIET SIMT_FAST inline void simt_operand(float *x, uint64_t descriptor, int rows, int trans)
{
    int mn, k, e;
    for (mn = 0; mn < rows; mn += trans ? 8 : 1)
        for (k = 0; k < 16; k += trans ? 1 : 8) {
            const char *p = simt_operand_at(descriptor, mn, k, trans);
            for (e = 0; e < 8; ++e) {
                uint16_t bits;
                memcpy(&bits, p + 2 * e, 2);
                x[(trans ? mn + e : mn) * 16 + (trans ? k : k + e)] = simt_bf16(bits);
            }
        }
}

/* Where thread t of a warpgroup holds (row, column) of an accumulator. */
SIMT_QUIET inline int simt_row_of(int t, int i)
{
    return t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8;
}
SIMT_QUIET inline int simt_column_of(int t, int i)
{
    return i / 4 * 8 + t % 4 * 2 + i % 2;
}

SIMT_QUIET SIMT_FAST inline void simt_product_run(const simt_product *p)
{
    float a[64 * 16], b[256 * 16], turned[16][256];
    int t, i, j, k;
    simt_operand(b, p->b, p->n, p->trans_b);
    for (j = 0; j < p->n; ++j)
        for (k = 0; k < 16; ++k) turned[k][j] = b[j * 16 + k];
    if (p->a_of[0] == NULL) simt_operand(a, p->a, 64, p->trans_a);
    for (t = 0; p->a_of[0] != NULL && t < SIMT_GROUP; ++t)
        for (i = 0; i < 4; ++i) {
            float *to = a + (t / 32 * 16 + t % 32 / 4 + i % 2 * 8) * 16 + t % 4 * 2 + i / 2 * 8;
            if (p->a_of[t][i] != p->a_was[t][i])
                simt_finding("wgmma: register %d of operand a of thread %d changed before the wait", i, t);
            to[0] = simt_bf16(p->a_was[t][i] & 0xffff);
            to[1] = simt_bf16(p->a_was[t][i] >> 16);
        }
    for (i = 0; i < 64; ++i) {
        float *sum = p->sum + i * p->n;
        if (!p->add) memset(sum, 0, (size_t)p->n * sizeof *sum);
        for (k = 0; k < 16; ++k)
            for (j = 0; j < p->n; ++j) sum[j] += a[i * 16 + k] * turned[k][j];
    }
}

SIMT_QUIET inline void simt_product_race(const simt_warpgroup *g, const simt_product *p, unsigned number)
{
    const uint32_t clock = (uint32_t)g->group + 1;
    int mn, k;
    if (!SIMT_RACE_ON) return;
    simt_race_warpgroup(number);
    for (mn = 0; mn < p->n; mn += p->trans_b ? 8 : 1)
        for (k = 0; k < 16; k += p->trans_b ? 1 : 8)
            simt_race_operand(number, clock, simt_operand_at(p->b, mn, k, p->trans_b));
    for (mn = 0; p->a_of[0] == NULL && mn < 64; mn += p->trans_a ? 8 : 1)
        for (k = 0; k < 16; k += p->trans_a ? 1 : 8)
            simt_race_operand(number, clock, simt_operand_at(p->a, mn, k, p->trans_a));
}

SIMT_QUIET inline void simt_product_start(simt_warpgroup *g, void **args)
{
    const simt_product_arg *first = (const simt_product_arg *)args[0];
    simt_product *p = (simt_product *)simt_hopper_alloc(sizeof *p), *other;
    int t, i, fresh;
    if (!g->fenced) simt_finding("wgmma in a group that no wgmma.fence begins");
    p->n = first->n, p->add = first->add, p->group = g->group;
    p->trans_a = first->trans_a, p->trans_b = first->trans_b;
    p->a = first->a, p->b = first->b;
    for (other = g->first; other != NULL; other = other->next)
        if (other->d[0] == first->d) {
            if (other->n != p->n) simt_finding("wgmma: accumulators of another shape are on their way");
            p->sum = other->sum;
        }
    fresh = p->sum == NULL;
    if (fresh) p->sum = (float *)simt_hopper_alloc(sizeof(float) * 64 * (size_t)p->n);
    for (t = 0; t < SIMT_GROUP; ++t) {
        const simt_product_arg *x = (const simt_product_arg *)args[t];
        if (x->a != p->a || x->b != p->b || x->add != p->add ||
            (x->a_registers == NULL) != (first->a_registers == NULL))
            simt_finding("wgmma: operands differ between threads");
        p->d[t] = x->d;
        p->a_of[t] = x->a_registers;
        if (x->a_registers != NULL) memcpy(p->a_was[t], x->a_registers, sizeof p->a_was[t]);
        for (i = 0; fresh && i < p->n / 2; ++i)
            p->sum[simt_row_of(t, i) * p->n + simt_column_of(t, i)] = x->d[i];
        simt_poison(x->d, (size_t)p->n / 2 * sizeof *x->d);
    }
    simt_product_race(g, p, simt_fiber_now->number / SIMT_GROUP);
    *g->end = p;
    g->end = &p->next;
}

/* The results go to the registers, which nobody has touched. */
SIMT_QUIET inline void simt_product_land(const simt_product *p)
{
    int t, i;
    for (t = 0; t < SIMT_GROUP; ++t)
        for (i = 0; i < p->n / 2; ++i) {
            uint32_t bits;
            memcpy(&bits, &p->d[t][i], 4);
            if (bits != SIMT_POISON)
                simt_finding("wgmma: accumulator %d of thread %d changed before the wait", i, t);
            p->d[t][i] = p->sum[simt_row_of(t, i) * p->n + simt_column_of(t, i)];
        }
}

SIMT_QUIET inline void simt_product_wait(simt_warpgroup *g, void **args)
{
    const int old = g->group - *(const int *)args[0];
    while (g->first != NULL && g->first->group < old) {
        simt_product *p = g->first, *other;
        g->first = p->next;
        if (g->first == NULL) g->end = &g->first;
        simt_product_run(p);
        for (other = g->first; other != NULL && other->sum != p->sum;) other = other->next;
        if (other == NULL) {
            simt_product_land(p);
            free(p->sum);
        }
        free(p);
    }
    if (old > 0) simt_race_products(simt_fiber_now->number / SIMT_GROUP, (uint32_t)old);
}

SIMT_QUIET inline void simt_product_fence(simt_warpgroup *g, void **)
{
    g->fenced = 1;
}

SIMT_QUIET inline void simt_product_commit(simt_warpgroup *g, void **)
{
    ++g->group;
    g->fenced = 0;
}

/* ---- registers ---- */

/* *args[0]: what a thread of the warpgroup has from now on; more than before, or less if negative. */
SIMT_QUIET inline void simt_set_registers(simt_warpgroup *g, void **args)
{
    const int request = *(const int *)args[0], r = request < 0 ? -request : request;
    if (r < 24 || r > 256 || r % 8 != 0) simt_finding("setmaxnreg to %d", r);
    if (request > 0 ? r < g->registers : r > g->registers)
        simt_finding("setmaxnreg from %d %s to %d", g->registers, request > 0 ? "up" : "down", r);
    simt_here->hopper->registers += (g->registers - r) * SIMT_GROUP;
    g->registers = r;
}

/* ---- a block ends ---- */

SIMT_QUIET inline void simt_hopper_end(simt_block *b)
{
    simt_hopper *h = b->hopper;
    unsigned i, t;
    if (h->loads > 0) simt_finding("block %u ends while a load is on its way", b->number);
    if (h->registers < 0) simt_finding("setmaxnreg: %d registers more than there are", -h->registers);
    for (i = 0; i < SIMT_GROUPS; ++i)
        if (h->group[i].first != NULL) simt_finding("block %u ends before a wgmma was waited for", b->number);
    for (t = 0; t < b->threads; ++t)
        while (b->fiber[t].bulk != NULL) {
            simt_bulk *s = b->fiber[t].bulk;
            b->fiber[t].bulk = s->next;
            simt_bulk_write(s);
        }
}

#endif

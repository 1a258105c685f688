/* simt_race.h -- finds data races of one launch, in shared memory and in global memory of any block
 *                part of simt.h
 *
 * Compile the unit with -fsanitize=thread -DSIMT_RACE and link it without the sanitizer's library: the
 * callbacks at every load and store are here. Blocks then take turns, as with a seed.
 *
 * Every thread has a clock, and knows a clock of every other thread: what it has learnt of it through
 * __syncthreads (the block), __syncwarp (the lanes), upi_add_release to upi_load_acquire, and __threadfence
 * around an atomic on either side. Shuffles, ldmatrix and mma order nothing. Every two bytes of memory
 * remember their last write and up to four reads by different warps. An access that does not know of an
 * earlier one, of which one is a write and not both are atomic, is a race. A copy that has not been waited
 * for counts as a thread of its own, and so does what is asynchronous in simt_hopper.h. A launch with races ends
 * the process.
 *
 * Found too: shared memory that is read and that nobody wrote; a load or store that is not aligned to its
 * size (to 8 bytes if it is wider).
 *
 * A run without a report proves that there is no race with these addresses and with synchronisation in this
 * order: a flag that happens to be set when it is looked at orders like one that was waited for, which is why
 * blocks take turns. Not found: a race with a reader that later ones made it forget; races between
 * launches, which streams order, and with the host.
 */
#ifndef SIMT_RACE_H
#define SIMT_RACE_H

enum simt_kind { SIMT_READ = 0, SIMT_WRITE = 1, SIMT_ATOMIC_READ = 2, SIMT_ATOMIC_WRITE = 3 };

/* What hands knowledge on: barriers in shared memory (what arrivals brought, and what the last phase gave) and
 * those that have numbers. */
enum { SIMT_BARRIERS = 40, SIMT_SYNCS = 2 * SIMT_BARRIERS + 16 };

/* Agents of a block beside its threads and their copies, counted from behind those: see simt_hopper.h. */
enum {
    SIMT_STORERS = 16,
    SIMT_AGENT_LOADS = 0,
    SIMT_AGENT_STORES = SIMT_AGENT_LOADS + SIMT_BARRIERS,
    SIMT_AGENT_PRODUCTS = SIMT_AGENT_STORES + 2 * SIMT_STORERS,
    SIMT_AGENTS = SIMT_AGENT_PRODUCTS + 8
};

#ifndef SIMT_RACE

enum { SIMT_RACE_ON = 0 };

/* Nothing is noted. */
#define SIMT_UNSEEN(name, ...)               \
    SIMT_QUIET inline void name(__VA_ARGS__) \
    {                                        \
    }
SIMT_UNSEEN(simt_race_start, simt_launch *)
SIMT_UNSEEN(simt_race_end, simt_launch *)
SIMT_UNSEEN(simt_race_enter, simt_block *)
SIMT_UNSEEN(simt_race_block, simt_block *)
SIMT_UNSEEN(simt_race_barrier, simt_block *)
SIMT_UNSEEN(simt_race_lanes, uint32_t)
SIMT_UNSEEN(simt_race_copy, const void *, const void *, int, int)
SIMT_UNSEEN(simt_race_copy_wait, int)
SIMT_UNSEEN(simt_race_matrix_row, unsigned, const void *, simt_kind)
SIMT_UNSEEN(simt_race_atomic, const void *, unsigned)
SIMT_UNSEEN(simt_race_release, const void *)
SIMT_UNSEEN(simt_race_acquire, const void *)
SIMT_UNSEEN(simt_race_fence)
SIMT_UNSEEN(simt_race_fence_async_shared)
SIMT_UNSEEN(simt_race_fence_async_global)
SIMT_UNSEEN(simt_race_release, unsigned)
SIMT_UNSEEN(simt_race_acquire, simt_fiber *, unsigned)
SIMT_UNSEEN(simt_race_pass, unsigned, unsigned, unsigned, uint32_t)
SIMT_UNSEEN(simt_race_own, const void *, size_t, simt_kind, const void *)
SIMT_UNSEEN(simt_race_agent, unsigned, uint32_t, const void *, size_t, simt_kind, const void *)
SIMT_UNSEEN(simt_race_learn, unsigned, uint32_t)
SIMT_UNSEEN(simt_race_warpgroup, unsigned)
SIMT_UNSEEN(simt_race_operand, unsigned, uint32_t, const void *)
SIMT_UNSEEN(simt_race_products, unsigned, uint32_t)
#undef SIMT_UNSEEN

#else

enum {
    SIMT_RACE_ON = 1,
    SIMT_RACE_SHOWN = 8,  /* races of a launch that are printed */
    SIMT_GRAIN = 2,       /* bytes that share a memory */
    SIMT_SHADOW_BITS = 9, /* bytes of memory behind one page of the shadow */
    SIMT_PAGE_CELLS = (1 << SIMT_SHADOW_BITS) / SIMT_GRAIN,
    SIMT_SHADOW_LISTS = 4096, /* of pages, by hash */
    SIMT_READERS = 4
};

/* Somebody's access. `agent`: a thread's number; for its copies, that plus the block's threads. */
struct simt_touch {
    uint32_t block, clock, place; /* clock 0: none; place: of the code */
    uint16_t agent, atomic;
};

struct simt_cell {
    simt_touch write, read[SIMT_READERS];
};

/* What a thread knew when it released: clocks of agents, by block in rising order. Never changed later. */
struct simt_known {
    uint32_t block;
    const uint32_t *clock;
};
struct simt_view {
    unsigned count;
    simt_known known[1];
};

/* What an access must know of earlier writes: clocks of agents of the own block, and of others. */
struct simt_sight {
    const uint32_t *own;
    const simt_view *far;
};

/* Of a thread: `clock` of the agents of its own block, `far` of other blocks. */
struct simt_clocks {
    uint32_t *clock;
    uint32_t *fenced_async; /* the same, as far as the asynchronous proxy sees what was written */
    const simt_view *far;
    const simt_view *far_async; /* the same, as far as the asynchronous proxy sees it */
    const simt_view *fenced;    /* what an atomic after the last fence gives away */
    const simt_view *seen;      /* what atomics have brought, and the next fence takes in */
};

struct simt_shadow_page {
    simt_shadow_page *next;
    uintptr_t number;
    simt_cell cell[SIMT_PAGE_CELLS];
    const simt_view *released[(1 << SIMT_SHADOW_BITS) / 4];
};

struct simt_chunk {
    simt_chunk *next;
};

struct simt_shadow {
    simt_shadow_page *list[SIMT_SHADOW_LISTS], *last;
    simt_chunk *chunks; /* clocks and views, freed with the launch */
    unsigned threads, races, shown;
    uint32_t last_now, last_then; /* places of the last race that was printed */
    uint32_t *joined;
};

/* Of a block, while it runs. */
struct simt_trace {
    simt_cell *shared;
    uint32_t *run_of;               /* of a cell of shared memory: the run that it was cleared for */
    uint32_t run;                   /* counts the blocks that this has served */
    size_t cells, vectors, threads; /* that there is space for */
    uint32_t *clocks;
    simt_clocks *of;
    simt_clocks sync[SIMT_SYNCS];
    simt_clocks together[SIMT_THREADS / 128]; /* what every thread of a warpgroup knows */
    uint64_t changes[SIMT_THREADS / 128];     /* of what a warpgroup's threads know */
    uint64_t gathered[SIMT_THREADS / 128];    /* changes when `together` was last right */
    int asynchronous; /* there is more to know than what threads and their copies did */
    unsigned
        clean_for; /* not 0: of blocks with so many threads only clocks of threads and their copies are set */
};

SIMT_QUIET inline unsigned simt_agents(unsigned threads)
{
    return 2 * threads + SIMT_AGENTS;
}

/* Pages of launches that have ended; under simt_pool_lock. */
inline simt_shadow_page *simt_spare_pages;

SIMT_QUIET inline void *simt_race_new(size_t bytes)
{
    void *p = calloc(1, bytes > 0 ? bytes : 1);
    if (p == NULL) simt_finding("no memory for the race detector");
    return p;
}

/* Lives as long as the launch. */
SIMT_QUIET inline void *simt_race_keep(simt_shadow *s, size_t bytes)
{
    simt_chunk *c = (simt_chunk *)simt_race_new(sizeof *c + bytes);
    c->next = s->chunks;
    s->chunks = c;
    return c + 1;
}

SIMT_QUIET inline void simt_race_start(simt_launch *l)
{
    simt_shadow *s = (simt_shadow *)simt_race_new(sizeof *s);
    s->threads = (unsigned)(l->shape.block.x * l->shape.block.y * l->shape.block.z);
    s->joined = (uint32_t *)simt_race_new(2 * simt_agents(s->threads) * sizeof(uint32_t));
    l->shadow = s;
}

SIMT_QUIET inline void simt_race_end(simt_launch *l)
{
    simt_shadow *s = l->shadow;
    unsigned i, races = s->races;
    pthread_mutex_lock(&simt_pool_lock);
    for (i = 0; i < SIMT_SHADOW_LISTS; ++i)
        while (s->list[i] != NULL) {
            simt_shadow_page *p = s->list[i];
            s->list[i] = p->next;
            p->next = simt_spare_pages;
            simt_spare_pages = p;
        }
    pthread_mutex_unlock(&simt_pool_lock);
    while (s->chunks != NULL) {
        simt_chunk *c = s->chunks;
        s->chunks = c->next;
        free(c);
    }
    free(s->joined);
    free(s);
    if (races > 0) simt_finding("%u races in this launch", races);
}

/* A worker's block, before its first. What it takes stays with the block, for the next launch. */
SIMT_QUIET inline void simt_race_enter(simt_block *b)
{
    simt_trace *t = b->trace;
    const size_t cells = b->launch->shape.shared / SIMT_GRAIN + 1;
    const size_t vectors = 2 * (b->threads + SIMT_SYNCS + SIMT_THREADS / 128) * simt_agents(b->threads);
    if (t == NULL) b->trace = t = (simt_trace *)simt_race_new(sizeof *t);
    if (t->cells < cells) {
        free(t->shared);
        free(t->run_of);
        t->shared = (simt_cell *)simt_race_new(cells * sizeof *t->shared);
        t->run_of = (uint32_t *)simt_race_new(cells * sizeof *t->run_of);
        t->cells = cells;
    }
    if (t->vectors < vectors) {
        free(t->clocks);
        t->clocks = (uint32_t *)simt_race_new(vectors * sizeof *t->clocks);
        t->vectors = vectors;
        t->clean_for = 0;
    }
    if (t->threads < b->threads) {
        free(t->of);
        t->of = (simt_clocks *)simt_race_new(b->threads * sizeof *t->of);
        t->threads = b->threads;
    }
}

SIMT_QUIET inline void simt_race_block(simt_block *b)
{
    simt_trace *trace = b->trace;
    const unsigned agents = simt_agents(b->threads), syncs = b->threads + SIMT_SYNCS,
                   all = syncs + SIMT_THREADS / 128;
    unsigned t;
    if (++trace->run == 0) simt_finding("the race detector has served too many blocks");
    trace->asynchronous = 0;
    memset(trace->changes, 0, sizeof trace->changes);
    memset(trace->gathered, 0xff, sizeof trace->gathered);
    if (trace->clean_for != b->threads)
        memset(trace->clocks, 0, (size_t)2 * all * agents * sizeof(uint32_t));
    else /* the last block touched no more than this */
        for (t = 0; t < b->threads; ++t)
            memset(trace->clocks + (size_t)2 * t * agents, 0, (size_t)2 * b->threads * sizeof(uint32_t));
    trace->clean_for = b->threads;
    for (t = 0; t < all; ++t) {
        simt_clocks *c = t < b->threads ? &trace->of[t]
                         : t < syncs    ? &trace->sync[t - b->threads]
                                        : &trace->together[t - syncs];
        memset(c, 0, sizeof *c);
        c->clock = trace->clocks + (size_t)2 * t * agents;
        c->fenced_async = c->clock + agents;
        if (t < b->threads) {
            c->clock[t] = 1;
            b->fiber[t].clocks = c;
        }
    }
}

/* There is more to know in this block than what threads and their copies did. */
SIMT_QUIET inline void simt_race_spreads(void)
{
    simt_here->trace->asynchronous = 1;
    simt_here->trace->clean_for = 0;
}

/* What the thread knows has changed. */
SIMT_QUIET inline void simt_race_changed(const simt_fiber *f)
{
    ++simt_here->trace->changes[f->number / 128];
}

/* ---- views ---- */

SIMT_QUIET inline simt_view *simt_view_new(simt_shadow *s, unsigned most)
{
    return (simt_view *)simt_race_keep(s, sizeof(simt_view) + most * sizeof(simt_known));
}

/* The clocks of a block that know what either knows. */
SIMT_QUIET inline const uint32_t *simt_clock_join(simt_shadow *s, const uint32_t *a, const uint32_t *b)
{
    unsigned i, agents = simt_agents(s->threads);
    int a_more = 0, b_more = 0;
    uint32_t *r;
    if (a == b) return a;
    for (i = 0; i < agents; ++i) {
        a_more |= a[i] > b[i];
        b_more |= b[i] > a[i];
    }
    if (!b_more) return a;
    if (!a_more) return b;
    r = (uint32_t *)simt_race_keep(s, agents * sizeof *r);
    for (i = 0; i < agents; ++i) r[i] = a[i] > b[i] ? a[i] : b[i];
    return r;
}

SIMT_QUIET inline const simt_view *simt_view_join(simt_shadow *s, const simt_view *a, const simt_view *b)
{
    simt_view *r;
    unsigned i = 0, j = 0, same_a = 1, same_b = 1;
    if (a == b || b == NULL) return a;
    if (a == NULL) return b;
    r = simt_view_new(s, a->count + b->count);
    while (i < a->count || j < b->count) {
        simt_known *k = &r->known[r->count++];
        if (j == b->count || (i < a->count && a->known[i].block < b->known[j].block)) {
            *k = a->known[i++];
            same_b = 0;
        } else if (i == a->count || b->known[j].block < a->known[i].block) {
            *k = b->known[j++];
            same_a = 0;
        } else {
            k->block = a->known[i].block;
            k->clock = simt_clock_join(s, a->known[i].clock, b->known[j].clock);
            same_a &= k->clock == a->known[i++].clock;
            same_b &= k->clock == b->known[j++].clock;
        }
    }
    return same_a ? a : same_b ? b : r;
}

/* All that a thread knows now, itself included. */
SIMT_QUIET inline const simt_view *simt_view_of(simt_shadow *s, const simt_fiber *f)
{
    unsigned agents = simt_agents(s->threads);
    uint32_t *clock = (uint32_t *)simt_race_keep(s, agents * sizeof *clock);
    simt_view *own = simt_view_new(s, 1);
    memcpy(clock, f->clocks->clock, agents * sizeof *clock);
    own->count = 1;
    own->known[0].block = simt_here->number;
    own->known[0].clock = clock;
    ++f->clocks->clock[f->number]; /* what comes later is not in it */
    simt_race_changed(f);
    return simt_view_join(s, f->clocks->far, own);
}

/* clock = the greater of both, agent by agent. */
SIMT_QUIET SIMT_FAST inline void simt_clock_raise(uint32_t *clock, const uint32_t *by, unsigned agents)
{
    unsigned a;
    for (a = 0; a < agents; ++a) clock[a] = clock[a] > by[a] ? clock[a] : by[a];
}

SIMT_QUIET inline void simt_view_learn(simt_shadow *s, simt_fiber *f, const simt_view *v)
{
    unsigned i;
    if (v == NULL) return;
    simt_race_changed(f);
    f->clocks->far = simt_view_join(s, f->clocks->far, v);
    for (i = 0; i < v->count; ++i)
        if (v->known[i].block == simt_here->number)
            simt_clock_raise(f->clocks->clock, v->known[i].clock, simt_agents(s->threads));
}

/* ---- accesses ---- */

SIMT_QUIET inline int simt_knows_by(simt_sight x, const simt_touch *t)
{
    unsigned i;
    if (t->clock == 0) return 1;
    if (t->block == simt_here->number) return t->clock <= x.own[t->agent];
    if (x.far == NULL) return 0;
    for (i = 0; i < x.far->count; ++i)
        if (x.far->known[i].block == t->block) return t->clock <= x.far->known[i].clock[t->agent];
    return 0;
}

extern "C" const char __executable_start[] __attribute__((weak));

SIMT_QUIET inline int simt_knows(const simt_clocks *c, const simt_touch *t)
{
    return simt_knows_by(simt_sight{c->clock, c->far}, t);
}

/* "function at file:line" of a place in the code, as addr2line knows it. */
SIMT_QUIET inline void simt_name_place(uint32_t place, char *out, size_t bytes)
{
    char command[128], line[256];
    const char *moved = __executable_start[16] == 3 ? (const char *)0 : __executable_start; /* ET_DYN */
    FILE *f;
    snprintf(out, bytes, "code +0x%x", place);
    snprintf(command, sizeof command, "addr2line -i -e /proc/%d/exe 0x%lx 2>/dev/null", (int)getpid(),
             (unsigned long)(uintptr_t)moved + place - 1);
    f = popen(command, "r");
    if (f == NULL) return;
    while (fgets(line, sizeof line, f) != NULL) {
        size_t used;
        line[strcspn(line, "\n")] = 0;
        if (strncmp(line, "??", 2) == 0 || strstr(line, "/seams.h:") != NULL)
            continue; /* the caller says more */
        if (strncmp(out, "code", 4) == 0) out[0] = 0;
        used = strlen(out);
        snprintf(out + used, bytes - used, "%s%s", used > 0 ? " from " : "", line);
    }
    pclose(f);
}

SIMT_QUIET inline const char *simt_name_agent(unsigned agent, char *out, size_t bytes)
{
    const unsigned threads = simt_here->threads;
    if (agent < 2 * threads)
        snprintf(out, bytes, "thread %u%s", agent % threads, agent >= threads ? " (its copy)" : "");
    else if ((agent -= 2 * threads) < SIMT_AGENT_STORES)
        snprintf(out, bytes, "a load of barrier %u", agent - SIMT_AGENT_LOADS);
    else if (agent < SIMT_AGENT_PRODUCTS)
        snprintf(out, bytes, "a bulk store of warp %u", (agent - SIMT_AGENT_STORES) / 2);
    else
        snprintf(out, bytes, "a product of warpgroup %u", agent - SIMT_AGENT_PRODUCTS);
    return out;
}

SIMT_QUIET __attribute__((noinline)) inline void simt_race_report(const char *what, const void *p,
                                                                  const simt_touch *now,
                                                                  const simt_touch *then)
{
    simt_block *b = simt_here;
    uintptr_t offset = (uintptr_t)p - (uintptr_t)b->shared;
    char here[1024], there[1024], where[64], names[2][64];
    simt_shadow *s = b->launch->shadow;
    ++s->races;
    if (s->shown == SIMT_RACE_SHOWN || (s->last_now == now->place && s->last_then == then->place)) return;
    ++s->shown;
    s->last_now = now->place;
    s->last_then = then->place;
    simt_name_place(now->place, here, sizeof here);
    simt_name_place(then->place, there, sizeof there);
    if (offset < b->shared_bytes)
        snprintf(where, sizeof where, "shared byte %lu", (unsigned long)offset);
    else
        snprintf(where, sizeof where, "global %p", p);
    fprintf(stderr, "simt: race: %s, %s\n  block %u %s, %s\n  block %u %s before, %s\n", what, where,
            now->block, simt_name_agent(now->agent, names[0], sizeof names[0]), here, then->block,
            simt_name_agent(then->agent, names[1], sizeof names[1]), there);
}

/* Keeps a read: in the place of one that this access knows of, of the same warp, or of any. */
SIMT_QUIET inline void simt_keep_read(const simt_clocks *c, simt_cell *cell, const simt_touch *now)
{
    unsigned i;
    for (i = 0; i < SIMT_READERS; ++i)
        if (simt_knows(c, &cell->read[i]) && cell->read[i].agent != now->agent)
            break;
        else if (cell->read[i].block == now->block &&
                 cell->read[i].agent / SIMT_WARP == now->agent / SIMT_WARP && cell->read[i].clock != 0)
            break;
    if (i == SIMT_READERS) i = (now->clock + now->agent + now->block) % SIMT_READERS;
    cell->read[i] = *now;
}

/* `sight`: what an earlier write must be in. */
SIMT_QUIET inline void simt_touch_cell(simt_cell *cell, simt_kind kind, const simt_clocks *c,
                                       simt_sight sight, const void *p, const simt_touch *now)
{
    unsigned i;
    /* read by the same thread before, which knew no less of the write then */
    if ((kind & SIMT_WRITE) == 0 && cell->read[0].clock == now->clock && cell->read[0].agent == now->agent &&
        cell->read[0].block == now->block && cell->read[0].atomic == now->atomic) {
        cell->read[0].place = now->place;
        return;
    }
    if (!(now->atomic && cell->write.atomic) && !simt_knows_by(sight, &cell->write))
        simt_race_report(kind & SIMT_WRITE ? "a write after a write" : "a read after a write", p, now,
                         &cell->write);
    if ((kind & SIMT_WRITE) == 0) {
        simt_keep_read(c, cell, now);
        return;
    }
    for (i = 0; i < SIMT_READERS; ++i) {
        if (!(now->atomic && cell->read[i].atomic) && !simt_knows(c, &cell->read[i]))
            simt_race_report("a write after a read", p, now, &cell->read[i]);
        cell->read[i].clock = 0;
    }
    cell->write = *now;
}

SIMT_QUIET inline int simt_same_cell(const simt_cell *a, const simt_cell *b)
{
    uint64_t x[sizeof *a / 8], y[sizeof *a / 8], other = 0;
    unsigned i;
    memcpy(x, a, sizeof x);
    memcpy(y, b, sizeof y);
    for (i = 0; i < sizeof *a / 8; ++i) other |= x[i] ^ y[i];
    return other == 0;
}

/* The cells of an access, most of which have the same past: what holds for the first one holds for its like. */
SIMT_QUIET inline void simt_touch_cells(simt_cell *cell, unsigned n, simt_kind kind, const simt_clocks *c,
                                        simt_sight sight, const char *p, const simt_touch *now)
{
    const unsigned *races = &simt_here->launch->shadow->races, before = *races;
    simt_cell was = cell[0];
    unsigned i;
    simt_touch_cell(&cell[0], kind, c, sight, p, now);
    for (i = 1; i < n; ++i)
        if (*races == before && simt_same_cell(&cell[i], &was))
            cell[i] = cell[0];
        else
            simt_touch_cell(&cell[i], kind, c, sight, p + (size_t)i * SIMT_GRAIN, now);
}

SIMT_QUIET inline simt_shadow_page *simt_shadow_at(simt_shadow *s, uintptr_t address)
{
    uintptr_t number = address >> SIMT_SHADOW_BITS;
    simt_shadow_page **list, *p = s->last;
    if (p != NULL && p->number == number) return p;
    list = &s->list[number % SIMT_SHADOW_LISTS];
    for (p = *list; p != NULL && p->number != number;) p = p->next;
    if (p == NULL) {
        pthread_mutex_lock(&simt_pool_lock);
        p = simt_spare_pages;
        if (p != NULL) simt_spare_pages = p->next;
        pthread_mutex_unlock(&simt_pool_lock);
        if (p == NULL)
            p = (simt_shadow_page *)simt_race_new(sizeof *p);
        else
            memset(p, 0, sizeof *p);
        p->number = number;
        p->next = *list;
        *list = p;
    }
    s->last = p;
    return p;
}

/* With the knowledge of c; of earlier writes with `mine` of the block's to shared memory, and with `far` of
 * others'. */
SIMT_QUIET inline void simt_access_by(const simt_clocks *c, const uint32_t *mine, const simt_view *far,
                                      unsigned agent, uint32_t clock, const void *p, size_t bytes,
                                      simt_kind kind, const void *code)
{
    simt_block *b = simt_here;
    simt_shadow *s = b->launch->shadow;
    uintptr_t at = (uintptr_t)p, offset = at - (uintptr_t)b->shared;
    simt_touch now = {b->number, clock, (uint32_t)((uintptr_t)code - (uintptr_t)__executable_start),
                      (uint16_t)agent, (uint16_t)(kind >> 1)};
    uintptr_t i, first, end;
    if (offset < b->shared_bytes) {
        simt_trace *t = b->trace;
        if (b->shared_bytes - offset < bytes)
            simt_finding("shared memory out of bounds: %zu bytes at %lu, the block has %zu", bytes,
                         (unsigned long)offset, b->shared_bytes);
        first = offset / SIMT_GRAIN, end = (offset + bytes - 1) / SIMT_GRAIN + 1;
        for (i = first; i < end; ++i) {
            if (t->run_of[i] != t->run) {
                memset(&t->shared[i], 0, sizeof t->shared[i]);
                t->run_of[i] = t->run;
            }
            if ((kind & SIMT_WRITE) == 0 && t->shared[i].write.clock == 0 && s->races == 0) {
                char here[1024];
                simt_name_place(now.place, here, sizeof here);
                simt_finding("shared byte %lu is read and nobody wrote it, at %s",
                             (unsigned long)i * SIMT_GRAIN, here);
            }
        }
        simt_touch_cells(&t->shared[first], (unsigned)(end - first), kind, c, simt_sight{mine, far},
                         b->shared + first * SIMT_GRAIN, &now);
        return;
    }
    if (at - (uintptr_t)b->map < b->map_bytes)
        simt_finding("shared memory out of bounds: byte %ld, the block has %zu", (long)offset,
                     b->shared_bytes);
    for (first = at / SIMT_GRAIN, end = (at + bytes - 1) / SIMT_GRAIN + 1; first < end; first = i) {
        const uintptr_t here = first % SIMT_PAGE_CELLS;
        i = end - first < SIMT_PAGE_CELLS - here ? end : first + (SIMT_PAGE_CELLS - here);
        simt_touch_cells(&simt_shadow_at(s, first * SIMT_GRAIN)->cell[here], (unsigned)(i - first), kind, c,
                         simt_sight{c->clock, far}, (const char *)(first * SIMT_GRAIN), &now);
    }
}

SIMT_QUIET inline void simt_access(const simt_fiber *f, unsigned agent, uint32_t clock, const void *p,
                                   size_t bytes, simt_kind kind, const void *code)
{
    simt_access_by(f->clocks, f->clocks->clock, f->clocks->far, agent, clock, p, bytes, kind, code);
}

/* Of the thread that runs; its own variables are nobody else's. */
SIMT_QUIET inline void simt_access_now(const void *p, size_t bytes, simt_kind kind, const void *code)
{
    const simt_fiber *f = simt_fiber_now;
    if (f != NULL && (uintptr_t)p - (uintptr_t)f->stack >= SIMT_STACK)
        simt_access(f, f->number, f->clocks->clock[f->number], p, bytes, kind, code);
}

SIMT_QUIET inline void simt_access_aligned(const void *p, size_t bytes, simt_kind kind, const void *code)
{
    if ((uintptr_t)p % (bytes < 8 ? bytes : 8) != 0 && simt_fiber_now != NULL) {
        char here[1024];
        simt_name_place((uint32_t)((uintptr_t)code - (uintptr_t)__executable_start), here, sizeof here);
        simt_finding("misaligned: %zu bytes at %p, %s", bytes, p, here);
    }
    simt_access_now(p, bytes, kind, code);
}

/* ---- what orders accesses ---- */

/* These threads of the block know from now on what any of them knew. */
SIMT_QUIET inline void simt_race_meet(simt_block *b, const uint16_t *thread, unsigned count)
{
    simt_shadow *s = b->launch->shadow;
    /* of both kinds, which lie behind one another */
    unsigned i, agents = b->trace->asynchronous ? 2 * simt_agents(b->threads) : 2 * b->threads;
    const simt_view *far = NULL, *far_async = NULL;
    memset(s->joined, 0, agents * sizeof(uint32_t));
    for (i = 0; i < count; ++i) {
        const simt_clocks *c = b->fiber[thread[i]].clocks;
        simt_clock_raise(s->joined, c->clock, agents);
        far = simt_view_join(s, far, c->far);
        far_async = simt_view_join(s, far_async, c->far_async);
    }
    for (i = 0; i < count; ++i) {
        simt_clocks *c = b->fiber[thread[i]].clocks;
        memcpy(c->clock, s->joined, agents * sizeof(uint32_t));
        ++c->clock[thread[i]];
        c->far = far;
        c->far_async = far_async;
        simt_race_changed(&b->fiber[thread[i]]);
    }
}

SIMT_QUIET inline void simt_race_barrier(simt_block *b)
{
    uint16_t all[SIMT_THREADS];
    unsigned t;
    for (t = 0; t < b->threads; ++t) all[t] = (uint16_t)t;
    simt_race_meet(b, all, b->threads);
}

SIMT_QUIET inline void simt_race_lanes(uint32_t mask)
{
    uint16_t lanes[SIMT_WARP];
    unsigned i, n = 0;
    for (i = 0; i < SIMT_WARP; ++i)
        if (mask >> i & 1) lanes[n++] = (uint16_t)(simt_fiber_now->warp * SIMT_WARP + i);
    simt_race_meet(simt_here, lanes, n);
}

/* A copy's clock is its group plus 1, so that a wait knows which have landed. */
SIMT_QUIET __attribute__((always_inline)) inline void simt_race_copy(const void *dst, const void *src,
                                                                     int bytes, int valid)
{
    const simt_fiber *f = simt_fiber_now;
    unsigned agent = f->number + simt_here->threads;
    const void *code = __builtin_return_address(0);
    simt_access(f, agent, (uint32_t)f->group + 1, dst, (size_t)bytes, SIMT_WRITE, code);
    if (valid > 0) simt_access(f, agent, (uint32_t)f->group + 1, src, (size_t)valid, SIMT_READ, code);
}

SIMT_QUIET inline void simt_race_copy_wait(int landed)
{
    simt_fiber *f = simt_fiber_now;
    uint32_t *clock = &f->clocks->clock[f->number + simt_here->threads];
    if (landed <= 0 || (uint32_t)landed <= *clock) return;
    *clock = (uint32_t)landed;
    simt_race_changed(f);
}

SIMT_QUIET inline void simt_race_matrix_row(unsigned lane, const void *p, simt_kind kind)
{
    const simt_fiber *f = &simt_here->fiber[simt_fiber_now->warp * SIMT_WARP + lane];
    simt_access(f, f->number, f->clocks->clock[f->number], p, 16, kind, simt_here->place);
}

SIMT_QUIET inline const simt_view **simt_released_at(const void *p)
{
    simt_shadow_page *page = simt_shadow_at(simt_here->launch->shadow, (uintptr_t)p);
    return &page->released[(uintptr_t)p % (1 << SIMT_SHADOW_BITS) / 4];
}

/* Before an atomic that gives and takes nothing by itself: fences on both sides do. */
SIMT_QUIET __attribute__((always_inline)) inline void simt_race_atomic(const void *p, unsigned bytes)
{
    simt_shadow *s = simt_here->launch->shadow;
    simt_clocks *c = simt_fiber_now->clocks;
    const simt_view **released = simt_released_at(p);
    simt_access_now(p, bytes, SIMT_ATOMIC_WRITE, __builtin_return_address(0));
    c->seen = simt_view_join(s, c->seen, *released);
    *released = simt_view_join(s, *released, c->fenced);
}

SIMT_QUIET __attribute__((always_inline)) inline void simt_race_release(const void *p)
{
    simt_shadow *s = simt_here->launch->shadow;
    const simt_view **released = simt_released_at(p);
    simt_access_now(p, 4, SIMT_ATOMIC_WRITE, __builtin_return_address(0));
    *released = simt_view_join(s, *released, simt_view_of(s, simt_fiber_now));
}

SIMT_QUIET __attribute__((always_inline)) inline void simt_race_acquire(const void *p)
{
    simt_shadow *s = simt_here->launch->shadow;
    simt_access_now(p, 4, SIMT_ATOMIC_READ, __builtin_return_address(0));
    simt_view_learn(s, simt_fiber_now, *simt_released_at(p));
}

SIMT_QUIET inline void simt_race_fence(void)
{
    simt_shadow *s = simt_here->launch->shadow;
    simt_fiber *f = simt_fiber_now;
    simt_view_learn(s, f, f->clocks->seen);
    f->clocks->fenced = simt_view_of(s, f);
}

/* ---- the asynchronous proxy, and what orders it ---- */

/* `to` knows what `from` does. */
SIMT_QUIET inline void simt_clocks_raise(simt_clocks *to, const simt_clocks *from)
{
    simt_clock_raise(to->clock, from->clock, 2 * simt_agents(simt_here->threads)); /* both kinds */
    to->far = simt_view_join(simt_here->launch->shadow, to->far, from->far);
    to->far_async = simt_view_join(simt_here->launch->shadow, to->far_async, from->far_async);
}

/* What the thread knows of other blocks' writes to global memory the asynchronous proxy sees from now on. */
SIMT_QUIET inline void simt_race_fence_async_global(void)
{
    simt_fiber_now->clocks->far_async = simt_fiber_now->clocks->far;
    simt_race_changed(simt_fiber_now);
}

/* What the thread knows of shared memory the asynchronous proxy sees from now on. */
SIMT_QUIET inline void simt_race_fence_async_shared(void)
{
    simt_clocks *c = simt_fiber_now->clocks;
    simt_race_spreads();
    simt_clock_raise(c->fenced_async, c->clock, simt_agents(simt_here->threads));
    ++c->clock[simt_fiber_now->number]; /* what comes later is not in it */
    simt_race_changed(simt_fiber_now);
}

SIMT_QUIET inline void simt_race_release(unsigned sync)
{
    simt_clocks *c = simt_fiber_now->clocks;
    simt_race_spreads();
    simt_clocks_raise(&simt_here->trace->sync[sync], c);
    ++c->clock[simt_fiber_now->number];
    simt_race_changed(simt_fiber_now);
}

SIMT_QUIET inline void simt_race_acquire(simt_fiber *f, unsigned sync)
{
    simt_clocks_raise(f->clocks, &simt_here->trace->sync[sync]);
    simt_race_changed(f);
}

SIMT_QUIET inline void simt_learn(simt_clocks *c, unsigned agent, uint32_t clock)
{
    simt_race_spreads();
    agent += 2 * simt_here->threads;
    if (c->clock[agent] < clock) c->clock[agent] = clock;
    if (c->fenced_async[agent] < clock) c->fenced_async[agent] = clock;
}

/* Whoever takes from `to` knows what `from` was given, and that the agent is through to `clock`. */
SIMT_QUIET inline void simt_race_pass(unsigned from, unsigned to, unsigned agent, uint32_t clock)
{
    simt_clocks_raise(&simt_here->trace->sync[to], &simt_here->trace->sync[from]);
    simt_learn(&simt_here->trace->sync[to], agent, clock);
}

/* An access of the thread by an instruction that has no callback. */
SIMT_QUIET inline void simt_race_own(const void *p, size_t bytes, simt_kind kind, const void *code)
{
    const simt_fiber *f = simt_fiber_now;
    simt_access(f, f->number, f->clocks->clock[f->number], p, bytes, kind, code);
}

/* An access of an agent whom the thread starts, and whom a fence shows the thread's writes. Its own reads hold
 * up nothing but a write. */
SIMT_QUIET inline void simt_race_agent(unsigned agent, uint32_t clock, const void *p, size_t bytes,
                                       simt_kind kind, const void *code)
{
    const simt_clocks *c = simt_fiber_now->clocks;
    simt_access_by(c, c->fenced_async, c->far_async, agent + 2 * simt_here->threads, clock, p, bytes, kind,
                   code);
}

/* The thread has waited for the agent. */
SIMT_QUIET inline void simt_race_learn(unsigned agent, uint32_t clock)
{
    simt_learn(simt_fiber_now->clocks, agent, clock);
    simt_race_changed(simt_fiber_now);
}

/* Gathers what all threads of a warpgroup know: any of its warps may be the first to read an operand. */
SIMT_QUIET SIMT_FAST inline void simt_race_warpgroup(unsigned group)
{
    simt_block *b = simt_here;
    simt_clocks *all = &b->trace->together[group];
    const unsigned agents = 2 * simt_agents(b->threads);
    unsigned t, i;
    if (b->trace->gathered[group] == b->trace->changes[group]) return;
    b->trace->gathered[group] = b->trace->changes[group];
    for (t = group * 128; t < group * 128 + 128; ++t) {
        const simt_clocks *c = b->fiber[t].clocks;
        if (t % 128 == 0) memcpy(all->clock, c->clock, agents * sizeof(uint32_t));
        for (i = 0; i < agents; ++i)
            if (c->clock[i] < all->clock[i]) all->clock[i] = c->clock[i];
    }
}

SIMT_QUIET inline void simt_race_operand(unsigned group, uint32_t clock, const void *p)
{
    const simt_clocks *all = &simt_here->trace->together[group];
    simt_access_by(all, all->fenced_async, all->far_async,
                   SIMT_AGENT_PRODUCTS + group + 2 * simt_here->threads, clock, p, 16, SIMT_READ,
                   simt_here->place);
}

SIMT_QUIET inline void simt_race_products(unsigned group, uint32_t clock)
{
    unsigned t;
    for (t = group * 128; t < group * 128 + 128; ++t)
        simt_learn(simt_here->fiber[t].clocks, SIMT_AGENT_PRODUCTS + group, clock);
    ++simt_here->trace->changes[group];
}

/* ---- the compiler's callbacks ---- */

#define SIMT_CALLBACK extern "C" __attribute__((weak)) SIMT_QUIET
#define SIMT_CODE     __builtin_return_address(0)
#define SIMT_ACCESS_CALLBACKS(n)                          \
    SIMT_CALLBACK void __tsan_read##n(void *p)            \
    {                                                     \
        simt_access_aligned(p, n, SIMT_READ, SIMT_CODE);  \
    }                                                     \
    SIMT_CALLBACK void __tsan_write##n(void *p)           \
    {                                                     \
        simt_access_aligned(p, n, SIMT_WRITE, SIMT_CODE); \
    }                                                     \
    SIMT_CALLBACK void __tsan_unaligned_read##n(void *p)  \
    {                                                     \
        simt_access_now(p, n, SIMT_READ, SIMT_CODE);      \
    }                                                     \
    SIMT_CALLBACK void __tsan_unaligned_write##n(void *p) \
    {                                                     \
        simt_access_now(p, n, SIMT_WRITE, SIMT_CODE);     \
    }
SIMT_ACCESS_CALLBACKS(1)
SIMT_ACCESS_CALLBACKS(2)
SIMT_ACCESS_CALLBACKS(4)
SIMT_ACCESS_CALLBACKS(8)
SIMT_ACCESS_CALLBACKS(16)
SIMT_CALLBACK void __tsan_read_range(void *p, size_t n)
{
    if (n > 0) simt_access_now(p, n, SIMT_READ, SIMT_CODE);
}
SIMT_CALLBACK void __tsan_write_range(void *p, size_t n)
{
    if (n > 0) simt_access_now(p, n, SIMT_WRITE, SIMT_CODE);
}
SIMT_CALLBACK void __tsan_init(void)
{
}
SIMT_CALLBACK void __tsan_func_entry(void *)
{
}
SIMT_CALLBACK void __tsan_func_exit(void)
{
}
SIMT_CALLBACK void __tsan_vptr_update(void **, void *)
{
}
SIMT_CALLBACK void __tsan_vptr_read(void **)
{
}

/* Atomics are the host code's: kernels use those of seams.h. */
#define SIMT_ATOMIC_CALLBACKS(bits, type)                                             \
    SIMT_CALLBACK type __tsan_atomic##bits##_load(const volatile type *p, int)        \
    {                                                                                 \
        return __atomic_load_n(p, __ATOMIC_SEQ_CST);                                  \
    }                                                                                 \
    SIMT_CALLBACK void __tsan_atomic##bits##_store(volatile type *p, type v, int)     \
    {                                                                                 \
        __atomic_store_n(p, v, __ATOMIC_SEQ_CST);                                     \
    }                                                                                 \
    SIMT_CALLBACK type __tsan_atomic##bits##_fetch_add(volatile type *p, type v, int) \
    {                                                                                 \
        return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST);                            \
    }
SIMT_ATOMIC_CALLBACKS(8, signed char)
SIMT_ATOMIC_CALLBACKS(32, int)
SIMT_ATOMIC_CALLBACKS(64, long)

#endif

#endif

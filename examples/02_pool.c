/* 02_pool.c -- the slab pool: a dry pool finds the slab's size, a trace shows what happened
 *
 *     cc -O2 -I . examples/02_pool.c && ./a.out
 *
 * The same function runs twice: over a dry pool, whose addresses must not be accessed, and over a slab of
 * exactly the size that the dry run found.
 */
#include <stdio.h>
#include <stdlib.h>

#include "upipe/upipe_mem.h"

enum { SMALL = 1000, LARGE = 100000, BLOCKS = 8 };

/* Frees the first of three blocks before it allocates a larger one: a hole is left. */
static upipe_status work(upipe_mem *m, upipe_err *e)
{
    void *a, *b, *c, *d;
    upipe_mem_phase(m, 0, "load");
    UPIPE_TRY(upipe_mem_alloc(m, &a, SMALL, UPIPE_USE_OTHER, "a", e));
    UPIPE_TRY(upipe_mem_alloc(m, &b, LARGE, UPIPE_USE_OTHER, "b", e));
    UPIPE_TRY(upipe_mem_alloc(m, &c, SMALL, UPIPE_USE_OTHER, "c", e));
    upipe_mem_phase(m, 1, "work");
    UPIPE_TRY(upipe_mem_free(m, a, e));
    UPIPE_TRY(upipe_mem_alloc(m, &d, SMALL + 100, UPIPE_USE_OTHER, "d", e));
    UPIPE_TRY(upipe_mem_free(m, b, e));
    UPIPE_TRY(upipe_mem_free(m, c, e));
    return upipe_mem_free(m, d, e);
}

int main(void)
{
    upipe_mem_block blocks[BLOCKS];
    upipe_mem_event events[32];
    upipe_mem dry, mem;
    upipe_err err;
    upipe_status s;
    void *slab, *p;
    int64_t i;

    upipe_mem_init_dry(&dry, blocks, BLOCKS);
    s = work(&dry, &err);
    if (s != UPIPE_OK) goto failed;
    printf("dry run: at most %zu bytes live, a slab of %zu bytes needed\n", dry.peak, dry.need);

    slab = aligned_alloc(UPIPE_MEM_ALIGN, dry.need);
    if (slab == NULL) return 1;
    upipe_mem_init(&mem, slab, dry.need, blocks, BLOCKS);
    mem.events = events;
    mem.events_max = 32;
    s = work(&mem, &err);
    if (s != UPIPE_OK) goto failed;
    printf("real run: at most %zu bytes live, %zu in phase load, %zu in phase work\n\n", mem.peak,
           mem.phase_peak[0], mem.phase_peak[1]);
    for (i = 0; i < mem.events_n; ++i) {
        const upipe_mem_event *e = &events[i];
        if (e->kind == 0)
            printf("phase %s\n", e->tag);
        else
            printf("  %s %s  %6zu bytes at %6zu, %6zu live\n", e->kind > 0 ? "alloc" : "free ", e->tag,
                   e->bytes, e->offset, e->live);
    }

    /* What does not fit is an answer with numbers, not a crash; so is a block that is freed twice. */
    s = upipe_mem_alloc(&mem, &p, 2 * LARGE, UPIPE_USE_OTHER, "too much", &err);
    printf("\n%s: %s\n", upipe_status_name(s), err.text);
    if (s != UPIPE_ERR_MEMORY) return 1;
    s = upipe_mem_destroy(&mem, &err);
    free(slab);
    return fflush(stdout) != 0 || s != UPIPE_OK;
failed:
    fprintf(stderr, "%s: %s\n", upipe_status_name(s), err.text);
    return 1;
}

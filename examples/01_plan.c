/* 01_plan.c -- what a rank will send and hold, before anything is allocated or computed; and a slab of exactly that size
 *
 *     cc -O2 -I . examples/01_plan.c -lm && ./a.out
 *
 * First the attention block of Llama3-8B (32 query heads, 8 key/value heads of 128) on 8 ranks over a million tokens: a
 * dry run goes through the block's own code over a pool that counts. Then code of the trainer's own, dry and for real.
 */
#include <stdio.h>
#include <stdlib.h>

#include "upipe/upipe.h"

enum { SMALL = 1000, LARGE = 100000, BLOCKS = 8, EVENTS = 32 };

/* A backend without scratch: how much one takes depends on its kernels. */
static size_t no_scratch(const upipe_ops *ops, upipe_view out, upipe_view a, upipe_view b, int flags)
{
    (void)ops, (void)out, (void)a, (void)b, (void)flags;
    return 0;
}

static size_t no_attn_scratch(const upipe_ops *ops, const upipe_attn *a, int backward)
{
    (void)ops, (void)a, (void)backward;
    return 0;
}

static void print_schedule(const upipe_plan *p)
{
    for (int stage = 0; stage < p->stages; ++stage) {
        printf("  stage %d, query heads of ranks 0 .. 7:", stage);
        for (int rank = 0; rank < p->desc.ranks; ++rank) {
            const int first = upipe_plan_q(p, stage, rank).first;
            printf(p->per_rank > 1 ? " %d-%d" : " %d", first, first + p->per_rank - 1);
        }
        printf(upipe_plan_stage(p, stage).kv_fresh ? "   K and V travel\n" : "   K and V stay\n");
    }
    printf("  sends %.2f GiB forward, %.2f GiB backward\n", (double)upipe_plan_sent(p, 0) / (1 << 30),
           (double)upipe_plan_sent(p, 1) / (1 << 30));
}

/* The block in stages of `chunk` heads. Nothing of this size is allocated. */
static upipe_status plan_block(const char *name, int chunk, size_t *peak, upipe_err *err)
{
    static upipe_dry dry;   /* too large for some stacks */
    const float weight = 0; /* is not read */
    upipe_ops ops = {0};
    upipe_plan_desc d = {0};
    upipe_plan plan;
    upipe_layer layer = {0};
    upipe_bytes bytes;
    ops.gemm_bytes = no_scratch, ops.attn_bytes = no_attn_scratch, ops.attn_can = ~0;
    d.tokens = 1 << 20, d.ranks = 8, d.heads = 32, d.kv_heads = 8, d.head_dim = 128;
    d.chunk = chunk, d.dtype = UPIPE_BF16;
    UPIPE_TRY(upipe_plan_init(&plan, &d, err));
    layer.plan = &plan, layer.wq = layer.wk = layer.wv = &weight;
    if (upipe_dry_init(&dry, &plan, &ops) || upipe_dry_layer(&dry, &layer, 1))
        return *err = dry.ctx.err, err->status;
    bytes = upipe_dry_bytes(&dry);
    printf("%s: %d stage%s\n", name, plan.stages, plan.stages == 1 ? "" : "s");
    print_schedule(&plan);
    printf("  holds, in GiB:");
    for (int phase = 0; phase < UPIPE_PHASES; ++phase)
        printf(" %s %.2f", upipe_phase_name(phase), (double)bytes.phase[phase] / (1 << 30));
    printf("\n  peak %.2f GiB\n\n", (double)bytes.peak / (1 << 30));
    *peak = bytes.peak;
    return UPIPE_OK;
}

/* The trainer's own. It frees the first of three blocks before it allocates a larger one: a hole is left. */
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

/* Dry, where addresses must not be accessed; then in a slab of the size that was found. */
static upipe_status run_work(upipe_err *err)
{
    upipe_mem_block blocks[BLOCKS];
    upipe_mem_event events[EVENTS];
    upipe_mem dry, mem;
    upipe_status s;
    void *slab, *more;
    upipe_mem_init_dry(&dry, blocks, BLOCKS);
    UPIPE_TRY(work(&dry, err));
    slab = aligned_alloc(UPIPE_MEM_ALIGN, dry.need);
    upipe_mem_init(&mem, slab, slab != NULL ? dry.need : 0, blocks, BLOCKS);
    mem.events = events, mem.events_max = EVENTS;
    s = work(&mem, err);
    for (int64_t i = 0; i < mem.events_n; ++i) {
        const upipe_mem_event *e = &events[i];
        if (e->kind == 0)
            printf("phase %s\n", e->tag);
        else
            printf("  %s %s  %6zu bytes at %6zu, %6zu live\n", e->kind > 0 ? "alloc" : "free ", e->tag,
                   e->bytes, e->offset, e->live);
    }
    printf("at most %zu bytes live in a slab of %zu, as the dry run said\n", mem.peak, dry.need);
    if (s == UPIPE_OK && (mem.peak != dry.peak || mem.need != dry.need))
        s = upipe_fail(err, UPIPE_ERR_MISMATCH, "not %zu in %zu", dry.peak, dry.need); /* never */
    /* What does not fit is an answer with numbers, not a crash. */
    if (s == UPIPE_OK && upipe_mem_alloc(&mem, &more, 2 * LARGE, UPIPE_USE_OTHER, "more", err) == UPIPE_OK)
        s = upipe_fail(err, UPIPE_ERR_MISMATCH, "more than the slab fits");
    if (s == UPIPE_OK) printf("%s\n", err->text);
    if (s == UPIPE_OK) s = upipe_mem_destroy(&mem, err); /* nothing may be left in it */
    free(slab);
    return s;
}

int main(void)
{
    size_t ulysses, upipe;
    upipe_err err;
    if (plan_block("Ulysses, all heads at once", 32, &ulysses, &err) ||
        plan_block("UPipe, chunks of 8 heads", 8, &upipe, &err) || run_work(&err))
        return fprintf(stderr, "%s: %s\n", upipe_status_name(err.status), err.text), 1;
    return fflush(stdout) != 0 || upipe >= ulysses;
}

/* plans.h -- the methods of context parallelism by name, as descriptions of a plan
 *
 *     method_choice how = {METHOD_USP, 8, 2, 0, 0, 0, 0};   on 8 ranks, 2 of them a ring
 *     upipe_plan_desc desc = method_desc(&how, heads, kv_heads);
 *     method_place(&desc, rank);                            for one of the 8; the caller says the rest
 *
 * A run's ranks are a grid: neighbours are a team (all-to-all), and ranks at the same place of their
 * teams are a ring, round which keys and values are sent. Where the method cuts the sequence into
 * segments, how.segments says into how many, for model_cut.
 */
#ifndef LLAMA_PLANS_H
#define LLAMA_PLANS_H

#include "upipe/net/upipe_net_threads.h"
#include "upipe/upipe.h"

#include "../common/cli.h"
#include "../common/methods.h"

enum { METHOD_CHUNK_MAX = 1 << 24 };

/* Lines of --help. */
#define METHOD_USAGE                                                                                  \
    "  --method NAME      one of those below (upipe)\n"                                               \
    "  --ring N           ranks of a ring of usp and upipe-ring (2)\n"                                \
    "  --inner N          ranks of an inner ring of double-ring (2)\n"                                \
    "  --segments N       parts of the sequence of fpdt and upipe-fpdt (4)\n"                         \
    "  --chunk N          query heads of a stage of the upipes, over a team's ranks (their number)\n" \
    "  --overlap          upipe, upipe-naive: stages overlap; fpdt, upipe-fpdt: copies overlap attention\n"

/* ranks: of all. ring, inner, chunk, segments: 0 for the default */
typedef struct method_choice {
    int method, ranks, ring, inner, chunk, segments, overlap;
} method_choice;

/* Prints --help: a program's own text, and the methods. */
static inline int method_help(const char *name, const char *usage)
{
    fputs(usage, stdout);
    return cli_print(name, method_usage);
}

/* Takes the flag of this name. */
static inline int method_flag(method_choice *how, const char *name, const char *text)
{
    const struct {
        const char *name;
        int most, *number;
    } numbers[] = {{"ranks", UPIPE_THREADS_MAX, &how->ranks},
                   {"ring", UPIPE_THREADS_MAX, &how->ring},
                   {"inner", UPIPE_THREADS_MAX, &how->inner},
                   {"chunk", METHOD_CHUNK_MAX, &how->chunk},
                   {"segments", UPIPE_SEGMENTS_MAX, &how->segments}};
    size_t i;
    if (strcmp(name, "overlap") == 0) {
        how->overlap = 1;
        return 0;
    }
    for (i = 0; i < sizeof numbers / sizeof *numbers; ++i)
        if (strcmp(name, numbers[i].name) == 0)
            return cli_int(name, text, numbers[i].most, numbers[i].number);
    how->method = method_find(text);
    if (how->method < METHODS) return 0;
    return cli_refuse("--method: '%s' is none of those that --help lists", text);
}

/* Fills in the defaults, and refuses a flag that the method does not heed. */
static inline int method_resolve(method_choice *how)
{
    const method_kind *a = &method_kinds[how->method];
    if (how->chunk > 0 && a->stage != METHOD_CHUNK)
        return cli_refuse("--chunk %d and --method %s contradict each other: its stages take %s", how->chunk,
                          a->name, a->stage == METHOD_ALL_HEADS ? "all heads" : "a group of heads");
    if (how->ring > 0 && a->shape != METHOD_IS_GRID)
        return cli_refuse("--ring %d and --method %s contradict each other: %s are its ring", how->ring,
                          a->name, a->shape == METHOD_IS_TEAM ? "no ranks" : "all ranks");
    if (how->inner > 0 && !a->inner)
        return cli_refuse("--inner %d would have no effect with --method %s", how->inner, a->name);
    if (how->segments > 0 && !a->segmented)
        return cli_refuse("--segments %d would have no effect with --method %s", how->segments, a->name);
    if (how->overlap && !method_overlaps(a))
        return cli_refuse("--overlap would have no effect with --method %s", a->name);
    if (how->inner == 0 && a->inner) how->inner = 2;
    if (how->segments == 0 && a->segmented) how->segments = 4;
    how->ring = method_ring(a, how->ranks, how->ring > 0 ? how->ring : 2);
    if (how->ranks % how->ring == 0) return 0;
    return cli_refuse("--ranks %d does not divide into rings of --ring %d", how->ranks, how->ring);
}

/* The schedule of a resolved choice. */
static inline upipe_plan_desc method_desc(const method_choice *how, int heads, int kv_heads)
{
    upipe_plan_desc d =
        method_schedule(&method_kinds[how->method], how->ranks, how->ring, heads, kv_heads, how->chunk);
    d.ring_inner = how->inner;
    d.overlap = how->overlap;
    return d;
}

/* Overlap needs several stages, or segments. */
static inline upipe_status method_overlapped(const method_choice *how, const upipe_plan *p, upipe_err *e)
{
    if (!how->overlap || (how->segments > 0 ? how->segments > 1 : p->overlap)) return UPIPE_OK;
    if (how->segments > 0)
        return upipe_fail(e, UPIPE_ERR_UNSUPPORTED, "--overlap would have no effect: there is one segment");
    return upipe_fail(e, UPIPE_ERR_UNSUPPORTED,
                      "--overlap would have no effect: %d heads at a time are one stage", p->desc.chunk);
}

#endif

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

#include "../../common/cli.h"
#include "../../common/methods.h"

/* 0, or refuses replicas that have not as many ranks each. */
static inline int method_replicas(const method_choice *how, int replicas)
{
    if (how->ranks % replicas == 0) return 0;
    return cli_refuse("--ranks %d does not divide into --replicas %d", how->ranks, replicas);
}

/* Fills in the defaults, and refuses a flag that the method does not heed. how->ranks: of all replicas */
static inline int method_resolve(method_choice *how, int replicas)
{
    const method_kind *a = &method_kinds[how->method];
    const int ranks = how->ranks / replicas; /* of one */
    if (method_replicas(how, replicas) != 0) return 1 + EXIT_USAGE;
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
    how->ring = method_ring(a, ranks, how->ring > 0 ? how->ring : 2);
    if (ranks % how->ring == 0) return 0;
    if (replicas > 1)
        return cli_refuse("--ranks %d in --replicas %d does not divide into rings of --ring %d", how->ranks,
                          replicas, how->ring);
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

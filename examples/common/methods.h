/* methods.h -- the methods of context parallelism by name, each a row of numbers for the plan
 *
 *     const method_kind *k = &method_kinds[METHOD_USP];
 *     upipe_plan_desc d = method_schedule(k, 8, 2, heads, kv_heads, chunk);    on 8 ranks, 2 of them a ring
 *     method_place(&d, rank);                                                  for one of the 8
 *
 * A run's ranks are a grid: neighbours are a team (all-to-all), and ranks at the same place of their teams
 * are a ring, round which keys and values are sent.
 */
#ifndef COMMON_METHODS_H
#define COMMON_METHODS_H

#include "upipe/upipe_plan.h"

enum {
    METHOD_ULYSSES,
    METHOD_UPIPE,
    METHOD_UPIPE_NAIVE,
    METHOD_RING,
    METHOD_ZIGZAG,
    METHOD_STRIPE,
    METHOD_DOUBLE_RING,
    METHOD_ALLGATHER,
    METHOD_USP,
    METHOD_UPIPE_RING,
    METHOD_FPDT,
    METHOD_UPIPE_FPDT,
    METHODS
};

/* Whether the ranks are a team, a ring or both; and which heads a stage has. */
typedef enum method_shape { METHOD_IS_TEAM, METHOD_IS_RING, METHOD_IS_GRID } method_shape;
typedef enum method_stage { METHOD_ALL_HEADS, METHOD_CHUNK, METHOD_GROUP } method_stage;

/* method_kind
 *   stage      all heads, a chunk that the caller chooses, or those of a key/value head
 *   mode       the ring mode; AUTO: the caller may choose
 *   naive      heads in their order
 *   inner      the ring has inner ones
 *   segmented  the sequence in segments, offloaded to a second pool
 */
typedef struct method_kind {
    const char *name;
    method_shape shape;
    method_stage stage;
    upipe_layout layout;
    upipe_ring_mode mode;
    int naive, inner, segmented;
} method_kind;

/* clang-format off */
static const method_kind method_kinds[METHODS] = {
    {"ulysses",     METHOD_IS_TEAM, METHOD_ALL_HEADS, UPIPE_CONTIGUOUS, UPIPE_RING_AUTO,   0, 0, 0},
    {"upipe",       METHOD_IS_TEAM, METHOD_CHUNK,     UPIPE_CONTIGUOUS, UPIPE_RING_AUTO,   0, 0, 0},
    {"upipe-naive", METHOD_IS_TEAM, METHOD_CHUNK,     UPIPE_CONTIGUOUS, UPIPE_RING_AUTO,   1, 0, 0},
    {"ring",        METHOD_IS_RING, METHOD_ALL_HEADS, UPIPE_CONTIGUOUS, UPIPE_RING_P2P,  0, 0, 0},
    {"zigzag",      METHOD_IS_RING, METHOD_ALL_HEADS, UPIPE_ZIGZAG,     UPIPE_RING_P2P,  0, 0, 0},
    {"stripe",      METHOD_IS_RING, METHOD_ALL_HEADS, UPIPE_STRIPED,    UPIPE_RING_P2P,  0, 0, 0},
    {"double-ring", METHOD_IS_RING, METHOD_ALL_HEADS, UPIPE_ZIGZAG,     UPIPE_RING_P2P,  0, 1, 0},
    {"allgather",   METHOD_IS_RING, METHOD_GROUP,     UPIPE_ZIGZAG,     UPIPE_RING_ALL_GATHER, 0, 0, 0},
    {"usp",         METHOD_IS_GRID, METHOD_ALL_HEADS, UPIPE_ZIGZAG,     UPIPE_RING_P2P,  0, 0, 0},
    {"upipe-ring",  METHOD_IS_GRID, METHOD_CHUNK,     UPIPE_ZIGZAG,     UPIPE_RING_AUTO,   0, 0, 0},
    {"fpdt",        METHOD_IS_TEAM, METHOD_ALL_HEADS, UPIPE_CONTIGUOUS, UPIPE_RING_AUTO,   0, 0, 1},
    {"upipe-fpdt",  METHOD_IS_TEAM, METHOD_CHUNK,     UPIPE_CONTIGUOUS, UPIPE_RING_AUTO,   0, 0, 1}};
/* clang-format on */

/* ranks: those that share a sequence; of a command line, those of all replicas. ring, inner, chunk, segments: 0 for the
 * default */
typedef struct method_choice {
    int method, ranks, ring, inner, chunk, segments, overlap;
} method_choice;

/* What --help says of them. */
static const char method_usage[] =
    "\n"
    "Methods:\n"
    "  ulysses      DeepSpeed-Ulysses: one all-to-all trades tokens for all heads\n"
    "  upipe        UPipe: the same in stages of a few heads\n"
    "  upipe-naive  UPipe with heads in their order: K and V are sent in every stage\n"
    "  ring         ring attention: K and V are sent round, contiguous tokens\n"
    "  zigzag       the same with two parts of the sequence a rank, one from each end: equal work\n"
    "               under a causal mask\n"
    "  stripe       the same with every N-th token\n"
    "  double-ring  zigzag, with inner rings of --inner ranks\n"
    "  allgather    zigzag, K and V gathered from all ranks, one key/value head at a time\n"
    "  usp          ulysses over teams, zigzag rings of --ring ranks, one of each team\n"
    "  upipe-ring   upipe over such teams\n"
    "  fpdt         FPDT: ulysses in segments of the sequence, offloaded to the host's memory\n"
    "  upipe-fpdt   upipe in segments: the device holds one stage of a segment\n";

/* The method of this name, or METHODS. */
static inline int method_find(const char *name)
{
    int m;
    for (m = 0; m < METHODS && strcmp(name, method_kinds[m].name) != 0; ++m) {
    }
    return m;
}

/* Ranks of the ring, of `ranks`; a grid's is the caller's choice. */
static inline int method_ring(const method_kind *k, int ranks, int ring)
{
    return k->shape == METHOD_IS_RING ? ranks : k->shape == METHOD_IS_GRID ? ring : 1;
}

/* Whether the method can overlap: stages on one team, or the copies of segments. */
static inline int method_overlaps(const method_kind *k)
{
    return k->segmented || (k->shape == METHOD_IS_TEAM && k->stage == METHOD_CHUNK);
}

/* The schedule; shapes of the data are the caller's.
 *   ring   of a grid;  chunk   of stages that take one
 */
static inline upipe_plan_desc method_schedule(const method_kind *k, int ranks, int ring, int heads,
                                              int kv_heads, int chunk)
{
    upipe_plan_desc d;
    memset(&d, 0, sizeof d);
    d.ring = method_ring(k, ranks, ring);
    d.ranks = ranks / d.ring;
    d.heads = heads;
    d.kv_heads = kv_heads;
    d.chunk = k->stage == METHOD_ALL_HEADS ? heads : k->stage == METHOD_GROUP ? heads / kv_heads : chunk;
    d.naive = k->naive;
    d.layout = k->layout;
    if (d.ring > 1) d.ring_mode = k->mode;
    d.ring_prefetch = d.ring > 1 && k->mode == UPIPE_RING_ALL_GATHER;
    return d;
}

/* One of all ranks. */
static inline void method_place(upipe_plan_desc *d, int rank)
{
    d->rank = rank % d->ranks;
    d->ring_rank = rank / d->ranks;
}

#endif

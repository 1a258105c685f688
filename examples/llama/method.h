/* method.h -- the methods of context parallelism by name, as descriptions of a plan
 *
 *     method_choice how = {METHOD_USP, 8, 2, 0, 0, 0};      on 8 ranks, 2 of them a ring
 *     upipe_plan_desc desc = method_desc(&how, heads, kv_heads);
 *     method_place(&desc, rank);                            for one of the 8; the caller says the rest
 *
 * A run's ranks are a grid: neighbours are a team, which exchanges heads for tokens, and ranks at the same
 * place of their teams are a ring, in which keys and values travel. Where the method cuts the sequence into
 * segments, how.segments says into how many, for model_cut.
 */
#ifndef LLAMA_METHOD_H
#define LLAMA_METHOD_H

#include "upipe/net/upipe_net_threads.h"
#include "upipe/upipe.h"

#include "../common/cli.h"

enum {
    METHOD_ULYSSES,
    METHOD_UPIPE,
    METHOD_UPIPE_NAIVE,
    METHOD_RING,
    METHOD_ZIGZAG,
    METHOD_STRIPE,
    METHOD_ALLGATHER,
    METHOD_USP,
    METHOD_UPIPE_RING,
    METHOD_DOUBLE_RING,
    METHOD_FPDT,
    METHOD_UPIPE_FPDT,
    METHODS
};

enum { METHOD_CHUNK_MAX = 1 << 24, METHOD_SEGMENTS_MAX = 1 << 16 };

/* What the ranks are, and which heads a stage takes. */
typedef enum method_shape { METHOD_IS_TEAM, METHOD_IS_RING, METHOD_IS_GRID } method_shape;
typedef enum method_stage { METHOD_ALL_HEADS, METHOD_CHUNK, METHOD_GROUP } method_stage;

typedef struct method_about {
    const char *name;
    method_shape shape;
    method_stage stage;
    upipe_layout layout;
    upipe_ring_mode mode;
    int naive, inner, segmented; /* inner: rings of rings */
} method_about;

/* clang-format off */
static const method_about method_list[METHODS] = {
    {"ulysses",     METHOD_IS_TEAM, METHOD_ALL_HEADS, UPIPE_CONTIGUOUS, UPIPE_RING_AUTO,   0, 0, 0},
    {"upipe",       METHOD_IS_TEAM, METHOD_CHUNK,     UPIPE_CONTIGUOUS, UPIPE_RING_AUTO,   0, 0, 0},
    {"upipe-naive", METHOD_IS_TEAM, METHOD_CHUNK,     UPIPE_CONTIGUOUS, UPIPE_RING_AUTO,   1, 0, 0},
    {"ring",        METHOD_IS_RING, METHOD_ALL_HEADS, UPIPE_CONTIGUOUS, UPIPE_RING_SHIFT,  0, 0, 0},
    {"zigzag",      METHOD_IS_RING, METHOD_ALL_HEADS, UPIPE_ZIGZAG,     UPIPE_RING_SHIFT,  0, 0, 0},
    {"stripe",      METHOD_IS_RING, METHOD_ALL_HEADS, UPIPE_STRIPED,    UPIPE_RING_SHIFT,  0, 0, 0},
    {"allgather",   METHOD_IS_RING, METHOD_GROUP,     UPIPE_ZIGZAG,     UPIPE_RING_GATHER, 0, 0, 0},
    {"usp",         METHOD_IS_GRID, METHOD_ALL_HEADS, UPIPE_ZIGZAG,     UPIPE_RING_SHIFT,  0, 0, 0},
    {"upipe-ring",  METHOD_IS_GRID, METHOD_CHUNK,     UPIPE_ZIGZAG,     UPIPE_RING_AUTO,   0, 0, 0},
    {"double-ring", METHOD_IS_RING, METHOD_ALL_HEADS, UPIPE_ZIGZAG,     UPIPE_RING_SHIFT,  0, 1, 0},
    {"fpdt",        METHOD_IS_TEAM, METHOD_ALL_HEADS, UPIPE_CONTIGUOUS, UPIPE_RING_AUTO,   0, 0, 1},
    {"upipe-fpdt",  METHOD_IS_TEAM, METHOD_CHUNK,     UPIPE_CONTIGUOUS, UPIPE_RING_AUTO,   0, 0, 1}};
/* clang-format on */

/* Lines of --help, and its end. */
#define METHOD_USAGE                                                                                  \
    "  --method NAME      one of those below (upipe)\n"                                               \
    "  --ring N           ranks of a ring of usp and upipe-ring (2)\n"                                \
    "  --inner N          ranks of an inner ring of double-ring (2)\n"                                \
    "  --segments N       parts of the sequence of fpdt and upipe-fpdt (4)\n"                         \
    "  --chunk N          query heads of a stage of the upipes, over a team's ranks (their number)\n" \
    "  --overlap          stages of upipe and upipe-naive overlap, on a second line of execution\n"

static const char method_usage[] =
    "\n"
    "methods\n"
    "  ulysses            heads for tokens, all heads at once\n"
    "  upipe              heads for tokens, --chunk heads at a time\n"
    "  upipe-naive        the same with the heads in their order\n"
    "  ring               K and V go round all ranks, which hold contiguous parts of the sequence\n"
    "  zigzag             the same; a rank holds a part from the start and its mirror image from the end\n"
    "  stripe             the same; a rank holds every N-th token\n"
    "  allgather          tokens as zigzag; K and V of a group of heads at a time are gathered\n"
    "  usp                ulysses in teams, zigzag in rings of --ring ranks, one of each team\n"
    "  upipe-ring         upipe in such teams\n"
    "  double-ring        zigzag in rings of --inner ranks, and round these rings\n"
    "  fpdt               ulysses in segments of the sequence, which wait in the second pool\n"
    "  upipe-fpdt         upipe in such segments\n";

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
                   {"segments", METHOD_SEGMENTS_MAX, &how->segments}};
    size_t i;
    if (strcmp(name, "overlap") == 0) {
        how->overlap = 1;
        return 0;
    }
    for (i = 0; i < sizeof numbers / sizeof *numbers; ++i)
        if (strcmp(name, numbers[i].name) == 0)
            return cli_int(name, text, numbers[i].most, numbers[i].number);
    for (how->method = 0; how->method < METHODS; ++how->method)
        if (strcmp(text, method_list[how->method].name) == 0) return 0;
    return cli_refuse("--method: '%s' is none of those that --help lists", text);
}

/* Whether stages overlap, and the method has some that may. */
static inline int method_overlaps(const method_choice *how)
{
    const method_about *a = &method_list[how->method];
    return how->overlap && a->shape == METHOD_IS_TEAM && a->stage == METHOD_CHUNK && !a->segmented;
}

/* Fills in the defaults, and refuses a flag that the method does not heed. */
static inline int method_resolve(method_choice *how)
{
    const method_about *a = &method_list[how->method];
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
    if (how->overlap && !method_overlaps(how))
        return cli_refuse("--overlap would have no effect with --method %s", a->name);
    if (how->inner == 0 && a->inner) how->inner = 2;
    if (how->segments == 0 && a->segmented) how->segments = 4;
    if (a->shape == METHOD_IS_GRID && how->ring == 0) how->ring = 2;
    if (a->shape != METHOD_IS_GRID) how->ring = a->shape == METHOD_IS_RING ? how->ranks : 1;
    if (how->ranks % how->ring == 0) return 0;
    return cli_refuse("--ranks %d does not divide into rings of --ring %d", how->ranks, how->ring);
}

/* The schedule of a resolved choice. */
static inline upipe_plan_desc method_desc(const method_choice *how, int heads, int kv_heads)
{
    const method_about *a = &method_list[how->method];
    upipe_plan_desc d;
    memset(&d, 0, sizeof d);
    d.ring = how->ring;
    d.ranks = how->ranks / how->ring;
    d.ring_inner = how->inner;
    d.ring_mode = a->mode;
    d.ring_ahead = a->mode == UPIPE_RING_GATHER;
    d.layout = a->layout;
    d.naive = a->naive;
    d.overlap = how->overlap;
    d.chunk = a->stage == METHOD_ALL_HEADS ? heads : a->stage == METHOD_GROUP ? heads / kv_heads : how->chunk;
    return d;
}

/* One of all ranks. */
static inline void method_place(upipe_plan_desc *d, int rank)
{
    d->rank = rank % d->ranks;
    d->ring_rank = rank / d->ranks;
}

#endif

/* methods.h -- the methods, each a row of numbers for the plan
 *
 *     const method_kind *k = &method_kinds[METHOD_USP];
 *     method_team(k, ranks, ring)           C: ranks that trade heads. The other factor is the ring, R
 */
#ifndef COMPARE_METHODS_H
#define COMPARE_METHODS_H

#include "upipe/upipe_bytes.h"

enum { TEAM_ALL, TEAM_ONE, TEAM_REST };        /* C: all ranks, one, those beside --ring */
enum { CHUNK_HEADS, CHUNK_FLAG, CHUNK_GROUP }; /* a stage: all heads, --chunk, those of a key/value head */
enum { PAPER_NONE = -1 };

/* method_kind
 *   team chunk  see above
 *   layout      how a ring shares tokens
 *   mode        how K and V go round it; AUTO: --ring-mode says
 *   naive       heads in their order
 *   inner       the ring has inner ones, of --inner ranks
 *   segmented   the sequence in --segments parts, with the host's memory behind it
 *   paper       upipe_paper_row with its assumptions, or PAPER_NONE
 */
typedef struct method_kind {
    const char *name;
    int team, chunk;
    upipe_layout layout;
    upipe_ring_mode mode;
    int naive, inner, segmented, paper;
} method_kind;

/* clang-format off */
static const method_kind method_kinds[] = {
    /* name         team       chunk        layout            mode     naive, inner, segmented  paper */
    {"ulysses",     TEAM_ALL,  CHUNK_HEADS, UPIPE_CONTIGUOUS, UPIPE_RING_AUTO,   0, 0, 0, UPIPE_PAPER_ULYSSES},
    {"upipe",       TEAM_ALL,  CHUNK_FLAG,  UPIPE_CONTIGUOUS, UPIPE_RING_AUTO,   0, 0, 0, UPIPE_PAPER_UPIPE},
    {"upipe-naive", TEAM_ALL,  CHUNK_FLAG,  UPIPE_CONTIGUOUS, UPIPE_RING_AUTO,   1, 0, 0, UPIPE_PAPER_UPIPE},
    {"ring",        TEAM_ONE,  CHUNK_HEADS, UPIPE_CONTIGUOUS, UPIPE_RING_SHIFT,  0, 0, 0, PAPER_NONE},
    {"zigzag",      TEAM_ONE,  CHUNK_HEADS, UPIPE_ZIGZAG,     UPIPE_RING_SHIFT,  0, 0, 0, PAPER_NONE},
    {"stripe",      TEAM_ONE,  CHUNK_HEADS, UPIPE_STRIPED,    UPIPE_RING_SHIFT,  0, 0, 0, PAPER_NONE},
    {"double-ring", TEAM_ONE,  CHUNK_HEADS, UPIPE_ZIGZAG,     UPIPE_RING_SHIFT,  0, 1, 0, PAPER_NONE},
    {"allgather",   TEAM_ONE,  CHUNK_GROUP, UPIPE_ZIGZAG,     UPIPE_RING_GATHER, 0, 0, 0, PAPER_NONE},
    {"usp",         TEAM_REST, CHUNK_HEADS, UPIPE_ZIGZAG,     UPIPE_RING_SHIFT,  0, 0, 0, PAPER_NONE},
    {"upipe-ring",  TEAM_REST, CHUNK_FLAG,  UPIPE_ZIGZAG,     UPIPE_RING_AUTO,   0, 0, 0, PAPER_NONE},
    {"fpdt",        TEAM_ALL,  CHUNK_HEADS, UPIPE_CONTIGUOUS, UPIPE_RING_AUTO,   0, 0, 1, UPIPE_PAPER_FPDT},
    {"upipe-fpdt",  TEAM_ALL,  CHUNK_FLAG,  UPIPE_CONTIGUOUS, UPIPE_RING_AUTO,   0, 0, 1, PAPER_NONE},
};
/* clang-format on */

enum {
    METHODS = sizeof method_kinds / sizeof *method_kinds,
    METHOD_ULYSSES = 0,
    METHOD_UPIPE = 1 /* the default ones */
};

static int method_team(const method_kind *k, int ranks, int ring)
{
    return k->team == TEAM_ALL ? ranks : k->team == TEAM_ONE ? 1 : ranks / ring;
}

/* Whether --overlap says something of it: stages, on one team. */
static int method_overlaps(const method_kind *k)
{
    return k->team == TEAM_ALL && k->chunk == CHUNK_FLAG && !k->segmented;
}

#endif

/* upipe_shard.h -- which tokens of a sequence a rank holds        layer 1, includes upipe_base.h
 *
 * First the ring's ranks share the sequence, in one of three ways:
 *
 *     CONTIGUOUS  rank r has part r of R
 *     ZIGZAG      of 2R parts rank r has parts r and 2R-1-r: under a causal mask all ranks have equal work
 *     STRIPED     rank r has every R-th token from r on: equal work too
 *
 * Then the all-to-all's ranks cut what their ring rank holds into C parts, in order. Parts differ by one
 * token where the number does not divide: part i of n tokens begins at upipe_cut(n, parts, i).
 *
 *     upipe_shard team = upipe_shard_ring(UPIPE_ZIGZAG, tokens, ring_ranks, ring_rank);
 *     upipe_shard mine = upipe_shard_team(&team, team_ranks, team_rank);
 *     for (i = 0; i < mine.n; ++i) input[i] = sequence[upipe_shard_pos(&mine, i)];
 *
 * A host that loads its data like this is the sharder; nothing is ever permuted over the network.
 */
#ifndef UPIPE_SHARD_H
#define UPIPE_SHARD_H

#include "upipe_base.h"

typedef enum upipe_layout { UPIPE_CONTIGUOUS, UPIPE_ZIGZAG, UPIPE_STRIPED, UPIPE_LAYOUTS } upipe_layout;

/* "contiguous" and so on. */
UPIPE_API const char *upipe_layout_name(upipe_layout layout)
{
    return layout == UPIPE_CONTIGUOUS ? "contiguous" : layout == UPIPE_ZIGZAG ? "zigzag" : "striped";
}

enum { UPIPE_PIECES_MAX = 2 };

/* n rows whose positions are pos, pos + step, ... with the shard's step */
typedef struct upipe_piece {
    int64_t pos, n;
} upipe_piece;

/* upipe_shard -- n rows: those of piece 0, then those of piece 1. Pieces have one row at least. All numbers are of one
 *                size: a plan, which has two shards, is hashed without gaps */
typedef struct upipe_shard {
    int64_t n, step;
    upipe_piece piece[UPIPE_PIECES_MAX];
    int64_t pieces;
} upipe_shard;

/* A piece more: n positions from pos on. None are no piece. */
UPIPE_API void upipe_shard_add(upipe_shard *s, int64_t pos, int64_t n)
{
    if (n <= 0) return;
    s->piece[s->pieces].pos = pos;
    s->piece[s->pieces].n = n;
    ++s->pieces;
    s->n += n;
}

/* n neighbouring positions from pos on. */
UPIPE_API upipe_shard upipe_shard_range(int64_t pos, int64_t n)
{
    upipe_shard s;
    memset(&s, 0, sizeof s);
    s.step = 1;
    upipe_shard_add(&s, pos, n);
    return s;
}

/* What rank r of a ring holds of a sequence of `tokens`. */
UPIPE_API upipe_shard upipe_shard_ring(upipe_layout layout, int64_t tokens, int ranks, int rank)
{
    upipe_shard s;
    memset(&s, 0, sizeof s);
    s.step = 1;
    if (layout == UPIPE_STRIPED) {
        s.step = ranks;
        upipe_shard_add(&s, rank, tokens / ranks + (rank < tokens % ranks));
    } else if (layout == UPIPE_ZIGZAG && ranks > 1) {
        int parts = 2 * ranks, mirror = parts - 1 - rank;
        int64_t low = upipe_cut(tokens, parts, rank), high = upipe_cut(tokens, parts, mirror);
        upipe_shard_add(&s, low, upipe_cut(tokens, parts, rank + 1) - low);
        upipe_shard_add(&s, high, upipe_cut(tokens, parts, mirror + 1) - high);
    } else {
        int64_t low = upipe_cut(tokens, ranks, rank);
        upipe_shard_add(&s, low, upipe_cut(tokens, ranks, rank + 1) - low);
    }
    return s;
}

/* Rows first .. first + n - 1 of a shard. */
UPIPE_API upipe_shard upipe_shard_rows(const upipe_shard *of, int64_t first, int64_t n)
{
    upipe_shard s;
    int i;
    memset(&s, 0, sizeof s);
    s.step = of->step;
    for (i = 0; i < of->pieces; ++i) {
        int64_t skip = first > 0 ? first : 0, left = of->piece[i].n - skip;
        int64_t count = left < n - s.n ? left : n - s.n;
        upipe_shard_add(&s, of->piece[i].pos + skip * of->step, count);
        first -= of->piece[i].n;
    }
    return s;
}

/* Part `rank` of what a ring rank holds. */
UPIPE_API upipe_shard upipe_shard_team(const upipe_shard *held, int ranks, int rank)
{
    int64_t first = upipe_cut(held->n, ranks, rank);
    return upipe_shard_rows(held, first, upipe_cut(held->n, ranks, rank + 1) - first);
}

/* The position of row i < n. */
UPIPE_API int64_t upipe_shard_pos(const upipe_shard *s, int64_t i)
{
    int piece = s->pieces > 1 && i >= s->piece[0].n;
    return s->piece[piece].pos + (i - (piece ? s->piece[0].n : 0)) * s->step;
}

#endif

/* shards.h -- the states that are sharded, and who has what of them        part of upipe_zero.h */
#ifndef UPIPE_ZERO_SHARDS_H
#define UPIPE_ZERO_SHARDS_H

#include "../upipe_reduce.h"
#include "../upipe_side_stream.h"

enum { UPIPE_ZERO_STRIP = 4 << 20, UPIPE_ZERO_STAGES = 4, UPIPE_ZERO_BEGUN = 8 };

/* What upipe_zero_held and upipe_zero_bytes count. */
typedef enum upipe_zero_what {
    UPIPE_ZERO_WEIGHTS,
    UPIPE_ZERO_GRADS,
    UPIPE_ZERO_STATES, /* of the optimizer */
    UPIPE_ZERO_SUM     /* buffers of a reduce-scatter */
} upipe_zero_what;

/* Gradients of a unit that has begun. */
typedef struct upipe_zero_begun {
    float *g;
    int unit;
} upipe_zero_begun;

/* upipe_zero -- one rank's; the host's, as are all arrays
 *   world         the ranks; rank, ranks as it has them. NULL: none, where ranks is 1 and stage 0
 *   dtype         storage type of the parameters
 *   sent          storage type of gradients on their way to be summed: UPIPE_F32, or UPIPE_BF16
 *   first         [units + 1] ascending, the first 0: unit u is elements first[u] .. first[u + 1] - 1
 *   strip         bytes that go to each rank in one round of a reduce-scatter; 0: UPIPE_ZERO_STRIP
 *   weights       [upipe_zero_held(z, UPIPE_ZERO_WEIGHTS)] of dtype
 *   grads         [upipe_zero_held(z, UPIPE_ZERO_GRADS)]
 *   weights_away  weights is host memory, in stage 3: a unit's gather brings this rank's slice from there
 *   grads_away    grads is, in stages 2 and 3: a unit is summed in the block of its gradients, and the sums are copied
 *                 there. It is not zeroed: the sums of round 0 replace what is there
 *   round         how often all units have ended before since upipe_zero_grads_clear; read with grads_away
 *   moved         bytes copied to and from host memory so far
 *   side          a side stream for upipe_zero_ahead; NULL: that does nothing
 *   side_world    a second communicator of the same ranks, for it
 *   summed        since upipe_zero_grads_clear: something has been added to the shard of the gradients; in stages 0 and
 *                 1, they have been summed
 *   begun         stages 2 and 3: units whose gradients have begun and not ended, and the block of each; g NULL: none.
 *                 The front of the shard may be one of the blocks
 *   ahead, ...    upipe_zero_ahead's: the block of the unit that is being gathered, NULL for none
 */
typedef struct upipe_zero {
    upipe_comm *world;
    int rank, ranks, stage, units;
    upipe_dtype dtype, sent;
    const int64_t *first;
    size_t strip;
    void *weights;
    float *grads;
    int weights_away, grads_away, round;
    int64_t moved;
    int summed;
    upipe_zero_begun begun[UPIPE_ZERO_BEGUN];
    upipe_side_stream *side;
    upipe_comm *side_world;
    void *ahead;
    int ahead_unit;
    int64_t ahead_point;
    upipe_status ahead_status;
} upipe_zero;

/* upipe_zero_part -- n elements from element `first` on of all; on this rank they are from element `at` on of the
 *                    array in question */
typedef struct upipe_zero_part {
    int64_t first, at, n;
} upipe_zero_part;

/* ---- who has what ---- */

/* The first element of a unit; without units, 0. */
UPIPE_API int64_t upi_zero_first(const upipe_zero *z, int unit)
{
    return z->first != NULL ? z->first[unit] : 0;
}

/* Elements of a unit. */
UPIPE_API int64_t upi_zero_n(const upipe_zero *z, int unit)
{
    return upi_zero_first(z, unit + 1) - upi_zero_first(z, unit);
}

/* upipe_zero_slice -- this rank's slice of a unit; at: in its shard */
UPIPE_API upipe_zero_part upipe_zero_slice(const upipe_zero *z, int unit)
{
    upipe_zero_part p;
    int64_t first;
    int u;
    for (u = 0, p.at = 0; u < unit; ++u)
        p.at += upipe_reduce_slice(upi_zero_n(z, u), z->rank, z->ranks, &first);
    p.n = upipe_reduce_slice(upi_zero_n(z, unit), z->rank, z->ranks, &first);
    p.first = upi_zero_first(z, unit) + first;
    return p;
}

/* Whether a rank holds its shard of it, and not the whole. */
UPIPE_API int upipe_zero_sharded(const upipe_zero *z, upipe_zero_what what)
{
    return z->stage >= (what == UPIPE_ZERO_WEIGHTS ? 3 : what == UPIPE_ZERO_GRADS ? 2 : 1);
}

/* upipe_zero_part_of -- what this rank holds of a unit's weights, gradients or states; at: in its array of them */
UPIPE_API upipe_zero_part upipe_zero_part_of(const upipe_zero *z, upipe_zero_what what, int unit)
{
    upipe_zero_part p;
    if (upipe_zero_sharded(z, what)) return upipe_zero_slice(z, unit);
    p.first = p.at = upi_zero_first(z, unit);
    p.n = upi_zero_n(z, unit);
    return p;
}

/* upipe_zero_held -- elements of weights, gradients, or of one state of the optimizer that this rank holds */
UPIPE_API int64_t upipe_zero_held(const upipe_zero *z, upipe_zero_what what)
{
    upipe_zero_part p;
    if (z->units == 0) return 0;
    p = upipe_zero_part_of(z, what, z->units - 1);
    return p.at + p.n;
}

/* upipe_zero_owned -- where the weights or gradients of this rank's slice of a unit are, after the sum: n elements of
 *                     upipe_zero_slice */
UPIPE_API void *upipe_zero_owned(const upipe_zero *z, upipe_zero_what what, int unit)
{
    const upipe_zero_part p = upipe_zero_slice(z, unit);
    const int64_t at = upipe_zero_sharded(z, what) ? p.at : p.first;
    return what == UPIPE_ZERO_GRADS ? upipe_offset(z->grads, (size_t)at * 4)
                                    : upipe_offset(z->weights, (size_t)at * upipe_dtype_bytes(z->dtype));
}

/* A rank alone rounds nothing. */
UPIPE_API upipe_dtype upi_zero_sent(const upipe_zero *z)
{
    return z->ranks == 1 ? UPIPE_F32 : z->sent;
}

/* Elements of a strip. */
UPIPE_API int64_t upi_zero_strip(const upipe_zero *z)
{
    const size_t strip =
        (z->strip > 0 ? z->strip : (size_t)UPIPE_ZERO_STRIP) / upipe_dtype_bytes(upi_zero_sent(z));
    return strip > 0 ? (int64_t)strip : 1;
}

/* upipe_zero_bytes -- exact bytes of the pool that a unit takes: WEIGHTS from begin (or ahead) to end, GRADS from begin
 *                     to end, SUM within the call that sums */
UPIPE_API size_t upipe_zero_bytes(const upipe_zero *z, int unit, upipe_zero_what what)
{
    const int64_t n = upi_zero_n(z, unit);
    if (what == UPIPE_ZERO_SUM)
        return upipe_reduction_bytes(n, z->ranks, upi_zero_strip(z), upi_zero_sent(z));
    if (what == UPIPE_ZERO_STATES || !upipe_zero_sharded(z, what)) return 0;
    return (size_t)n * (what == UPIPE_ZERO_GRADS ? 4 : upipe_dtype_bytes(z->dtype));
}

#endif

/* upipe_zero.h -- parameters, gradients and optimizer states sharded over ranks: ZeRO
 *
 * The elements are cut into units that are used together, half a layer say. A rank's slice of a unit is that of
 * upipe_reduce_slice; its slices of all units, one behind the other, are its shard. The stage says what is sharded:
 *
 *     stage   optimizer states   gradients (f32)   parameters
 *       0         whole              whole            whole
 *       1         shard              whole            whole
 *       2         shard              shard            whole
 *       3         shard              shard            shard
 *
 *     upipe_zero z = {0};                                     its fields are described below
 *     z.world = world, z.stage = 3, z.first = first, z.units = units, ...   first[u]: where unit u begins
 *     z.weights = block of upipe_zero_held(&z, UPIPE_ZERO_WEIGHTS) elements; z.grads, states alike
 *     upipe_zero_check(&ctx, &z);
 *
 *     upipe_zero_grads_clear(&ctx, &z);                       a step
 *     upipe_zero_weights_begin(&ctx, &z, unit, &w);           stage 3 gathers; else a pointer
 *     upipe_zero_weights_end(&ctx, &z, w);
 *     upipe_zero_grads_begin(&ctx, &z, unit, &g);             stages 2, 3: a block of zeros; else a pointer
 *     upipe_zero_grads_end(&ctx, &z, unit, g);                stages 2, 3: a reduce-scatter, += into the shard
 *     upipe_zero_grads_first(&ctx, &z, unit, &g);             as begin, of the unit that ends before all others
 *     upipe_zero_grads_sum(&ctx, &z);                         stages 0, 1: the same, of all units
 *     for (u = 0; u < units; ++u)
 *         my_adamw(upipe_zero_part_of(&z, UPIPE_ZERO_STATES, u), ...);
 *     upipe_zero_weights_gather(&ctx, &z);                    stages 1, 2: all ranks' slices, of all units
 *
 * Sums over ranks are f32 chains in rank order. An element's sum depends neither on the stage nor on the strip, if a
 * unit's gradients begin and end once a step. All ranks make the same calls in the same order.
 *
 * With `offload_weights` and `offload_grads` these shards are in host memory, where the optimizer's states are and its update
 * runs.
 *
 * Weights that are gathered for each use lie elsewhere in the backward: upipe_layer.id tells the layer then.
 *
 * With `side` a unit can be gathered ahead, on the side stream and by a communicator of its own:
 *
 *     upipe_zero_ahead(&ctx, &z, next);                       then upipe_zero_weights_begin takes it
 *
 * One unit at a time. The side stream is not the one of ctx->side_stream. Over NCCL two communicators need the same
 * order on all ranks, which this has.
 */
#ifndef UPIPE_ZERO_H
#define UPIPE_ZERO_H

#include "upipe_reduce.h"

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
 *   offload_weights  weights is host memory, in stage 3: a unit's gather brings this rank's slice from there
 *   offload_grads    grads is, in stages 2 and 3: a unit is summed in the block of its gradients, and the sums are copied
 *                 there. It is not zeroed: the sums of round 0 replace what is there
 *   round         how often all units have ended before since upipe_zero_grads_clear; read with offload_grads
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
    int offload_weights, offload_grads, round;
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
    if (what == UPIPE_ZERO_SUM) return upi_reduction_bytes(n, z->ranks, upi_zero_strip(z), upi_zero_sent(z));
    if (what == UPIPE_ZERO_STATES || !upipe_zero_sharded(z, what)) return 0;
    return (size_t)n * (what == UPIPE_ZERO_GRADS ? 4 : upipe_dtype_bytes(z->dtype));
}

#include "parts/zero.h"

/* ---- checks and failures ---- */

/* The fields that say who has what; each call begins with it, as the host may have changed them. */
UPIPE_API upipe_status upi_zero_args(upipe_ctx *c, const upipe_zero *z)
{
    int u;
    UPIPE_TRY(upi_ctx_check(c));
    if (z == NULL || (z->world == NULL && (z->ranks != 1 || z->stage != 0)))
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "zero or its world is NULL");
    if (z->world != NULL && (z->world->rank != z->rank || z->world->ranks != z->ranks))
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "zero: rank %d of %d, its communicator is rank %d of %d",
                          z->rank, z->ranks, z->world->rank, z->world->ranks);
    if (z->stage < 0 || z->stage >= UPIPE_ZERO_STAGES)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "zero: stage %d; there are 0 to 3", z->stage);
    if (!upi_dtype_built(&z->dtype))
        return upipe_fail(&c->err, UPIPE_ERR_UNSUPPORTED, "zero: parameters are f32 or bf16, not type %d",
                          upi_enum_number(&z->dtype, sizeof z->dtype));
    if (!upi_dtype_built(&z->sent))
        return upipe_fail(&c->err, UPIPE_ERR_UNSUPPORTED,
                          "zero: gradients are sent as f32 or bf16, not as type %d",
                          upi_enum_number(&z->sent, sizeof z->sent));
    if (upi_zero_strip(z) > INT32_MAX)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "zero: a strip of %zu bytes", z->strip);
    if (z->units < 0 || z->first == NULL || z->first[0] != 0)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "zero: %d units, which do not begin at 0", z->units);
    for (u = 0; u < z->units; ++u)
        if (upi_zero_n(z, u) < 0)
            return upipe_fail(&c->err, UPIPE_ERR_ARG, "zero: unit %d has %lld elements", u,
                              (long long)upi_zero_n(z, u));
    if ((z->offload_weights && !upipe_zero_sharded(z, UPIPE_ZERO_WEIGHTS)) ||
        (z->offload_grads && !upipe_zero_sharded(z, UPIPE_ZERO_GRADS)))
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "zero: %s are away in stage %d, which keeps them whole",
                          z->offload_grads && z->stage < 2 ? "gradients" : "parameters", z->stage);
    if (z->side != NULL && z->side_world == NULL)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "zero: a side stream without a communicator of its own");
    return UPIPE_OK;
}

/* upipe_zero_check -- before the first of the other calls: this rank's fields, and that all ranks have the same
 *   errors  ARG, UNSUPPORTED; MISMATCH on every rank where stage, units or types differ; others as upipe_comm_wait
 */
UPIPE_API upipe_status upipe_zero_check(upipe_ctx *c, const upipe_zero *z)
{
    upi_fields f;
    uint64_t hash = UPIPE_HASH;
    UPIPE_TRY(upi_zero_args(c, z));
    UPIPE_TRY(upipe_comm_idle(c, z->world));
    f.n = 0;
    hash = upipe_hash_bytes(hash, z->first, (size_t)(z->units + 1) * sizeof *z->first);
    upi_field_int(&f, "the stage of ZeRO", z->stage);
    upi_field_int(&f, "its number of units", z->units);
    upi_field_int(&f, "its number of elements", z->first[z->units]);
    upi_field_int(&f, "the hash of its units", (int64_t)(hash >> 1));
    upi_field_int(&f, "the type of its parameters", z->dtype);
    upi_field_int(&f, "the type in which gradients are sent", z->sent);
    upi_field_int(&f, "its strip", upi_zero_strip(z));
    upi_field_int(&f, "its side stream", z->side != NULL);
    return upi_agree(c, z->world, &f);
}

/* Weights or gradients are there, where this rank holds any. */
UPIPE_API upipe_status upi_zero_there(upipe_ctx *c, const upipe_zero *z, upipe_zero_what what)
{
    const void *data = what == UPIPE_ZERO_WEIGHTS ? z->weights : z->grads;
    if (data != NULL || upipe_zero_held(z, what) == 0) return UPIPE_OK;
    return upipe_fail(&c->err, UPIPE_ERR_ARG, "zero: %s is NULL",
                      what == UPIPE_ZERO_WEIGHTS ? "weights" : "grads");
}

/* The same of a unit, where the call writes to `out`. */
UPIPE_API upipe_status upi_zero_unit(upipe_ctx *c, const upipe_zero *z, int unit, const void *out)
{
    UPIPE_TRY(upi_zero_args(c, z));
    if (out == NULL) return upipe_fail(&c->err, UPIPE_ERR_ARG, "zero: the place for the result is NULL");
    if (unit >= 0 && unit < z->units) return UPIPE_OK;
    return upipe_fail(&c->err, UPIPE_ERR_ARG, "zero: unit %d of %d", unit, z->units);
}

/* upipe_zero_stop -- after a failure of another call: aborts a gather ahead, and waits for its end. Does nothing where
 *                    there is none */
UPIPE_API void upipe_zero_stop(upipe_ctx *c, upipe_zero *z)
{
    upipe_err first;
    if (z->ahead == NULL) return;
    first = c->err;
    upipe_comm_abort(z->side_world, "a gather ahead that is not needed any more");
    upi_zero_join(c, z);
    c->err = first;
}

/* ---- parameters ---- */

/* upipe_zero_ahead -- begins to gather the unit that upipe_zero_weights_begin asks for next
 *   bytes   allocates that unit's; sends as that call
 *   errors  ARG (no such unit; another one is being gathered), MEMORY, the side stream's
 * Without a side stream, or where nothing is gathered, it does nothing.
 */
UPIPE_API upipe_status upipe_zero_ahead(upipe_ctx *c, upipe_zero *z, int unit)
{
    const int64_t mark = upipe_mem_mark(c->mem);
    upipe_status s;
    UPIPE_TRY(upi_zero_unit(c, z, unit, z));
    UPIPE_TRY(upi_zero_there(c, z, UPIPE_ZERO_WEIGHTS));
    if (z->side == NULL || z->stage < 3 || upi_zero_n(z, unit) == 0) return UPIPE_OK;
    if (z->ahead != NULL)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "zero: unit %d is being gathered, and not unit %d yet",
                          z->ahead_unit, unit);
    s = upi_zero_ahead(c, z, unit);
    return s == UPIPE_OK ? UPIPE_OK : upi_zero_unwind(c, z, s, mark);
}

/* upipe_zero_weights_begin -- a unit's parameters, until upipe_zero_weights_end
 *   w       [n] of the storage type, read only; NULL for a unit without elements
 *   bytes   stage 3: allocates upipe_zero_bytes(z, unit, UPIPE_ZERO_WEIGHTS), sends this rank's slice to each of the
 *           others. Else nothing
 *   errors  ARG (no such unit, not the one that was announced), MEMORY; others as upipe_comm_wait. For all but ARG
 *           the world, ctx->team and ctx->ring are aborted
 */
UPIPE_API upipe_status upipe_zero_weights_begin(upipe_ctx *c, upipe_zero *z, int unit, const void **w)
{
    const int64_t mark = upipe_mem_mark(c->mem);
    upipe_status s;
    void *data = NULL;
    if (w != NULL) *w = NULL;
    UPIPE_TRY(upi_zero_unit(c, z, unit, w));
    UPIPE_TRY(upi_zero_there(c, z, UPIPE_ZERO_WEIGHTS));
    if (z->stage < 3) {
        *w = upipe_offset(z->weights, (size_t)z->first[unit] * upipe_dtype_bytes(z->dtype));
        return UPIPE_OK;
    }
    if (upi_zero_n(z, unit) == 0) return UPIPE_OK;
    if (z->ahead != NULL && z->ahead_unit != unit)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "zero: unit %d was announced, and unit %d comes",
                          z->ahead_unit, unit);
    if (z->ahead != NULL) {
        s = upi_zero_arrived(c, z, w);
        return s == UPIPE_OK ? UPIPE_OK : upi_zero_unwind(c, z, s, mark);
    }
    s = upipe_mem_alloc(c->mem, &data, upipe_zero_bytes(z, unit, UPIPE_ZERO_WEIGHTS), UPIPE_USE_WEIGHTS,
                        "weights", &c->err);
    if (s == UPIPE_OK) s = upi_zero_gather(c, z->world, z, unit, data);
    if (s != UPIPE_OK) return upi_zero_unwind(c, z, s, mark);
    z->moved += upi_zero_fetched(z, unit);
    *w = data;
    return UPIPE_OK;
}

/* upipe_zero_weights_end -- the unit's parameters are not read any more
 *   errors  ARG: w is not what begin gave
 */
UPIPE_API upipe_status upipe_zero_weights_end(upipe_ctx *c, const upipe_zero *z, const void *w)
{
    UPIPE_TRY(upi_zero_args(c, z));
    return z->stage < 3 ? UPIPE_OK : upipe_mem_free(c->mem, (void *)(uintptr_t)w, &c->err);
}

/* upipe_zero_weights_gather -- stages 1 and 2, after each rank has changed its slices: all ranks have all parameters.
 *                              Else nothing
 *   errors  ARG; others as upipe_comm_wait. For all but ARG the world, ctx->team and ctx->ring are aborted
 */
UPIPE_API upipe_status upipe_zero_weights_gather(upipe_ctx *c, upipe_zero *z)
{
    const int64_t mark = upipe_mem_mark(c->mem);
    upipe_status s = UPIPE_OK;
    int u;
    UPIPE_TRY(upi_zero_args(c, z));
    UPIPE_TRY(upi_zero_there(c, z, UPIPE_ZERO_WEIGHTS));
    if (z->stage == 0 || z->stage == 3 || z->ranks == 1) return UPIPE_OK;
    for (u = 0; u < z->units && s == UPIPE_OK; ++u)
        s = upi_zero_gather(c, z->world, z, u,
                            upipe_offset(z->weights, (size_t)z->first[u] * upipe_dtype_bytes(z->dtype)));
    return s == UPIPE_OK ? UPIPE_OK : upi_zero_unwind(c, z, s, mark);
}

/* ---- gradients ---- */

/* upipe_zero_grads_clear -- all that this rank holds of them is 0, at the start of a step; where they are away, they
 *                           count as 0 */
UPIPE_API upipe_status upipe_zero_grads_clear(upipe_ctx *c, upipe_zero *z)
{
    UPIPE_TRY(upi_zero_args(c, z));
    UPIPE_TRY(upi_zero_there(c, z, UPIPE_ZERO_GRADS));
    z->summed = z->round = 0;
    memset(z->begun, 0, sizeof z->begun);
    if (z->offload_grads) return UPIPE_OK;
    return c->ops->zero(c, z->grads, (size_t)upipe_zero_held(z, UPIPE_ZERO_GRADS) * 4);
}

/* The unit whose gradients are at g; of NULL, a free place. NULL: there is none. */
UPIPE_API upipe_zero_begun *upi_zero_begun(upipe_zero *z, const float *g)
{
    int i = 0;
    while (i < UPIPE_ZERO_BEGUN && z->begun[i].g != g) ++i;
    return i < UPIPE_ZERO_BEGUN ? &z->begun[i] : NULL;
}

/* A unit has begun, in a block that another one may have had before a failure. */
UPIPE_API void upi_zero_begins(upipe_zero *z, int unit, float *g)
{
    upipe_zero_begun *place = upi_zero_begun(z, g);
    if (place == NULL) place = upi_zero_begun(z, NULL);
    place->g = g;
    place->unit = unit;
}

/* Gradients can be added, and a unit more can begin. */
UPIPE_API upipe_status upi_zero_open(upipe_ctx *c, upipe_zero *z)
{
    UPIPE_TRY(upi_zero_there(c, z, UPIPE_ZERO_GRADS));
    if (z->stage < 2 && z->summed)
        return upipe_fail(&c->err, UPIPE_ERR_ARG,
                          "zero: the gradients are summed already, until upipe_zero_grads_clear");
    if (z->stage < 2 || upi_zero_begun(z, NULL) != NULL) return UPIPE_OK;
    return upipe_fail(&c->err, UPIPE_ERR_ARG, "zero: %d units have begun and not ended", UPIPE_ZERO_BEGUN);
}

/* upipe_zero_grads_begin -- where to add a unit's gradients, until upipe_zero_grads_end
 *   g       [n] f32: zeros in stages 2 and 3, else what has been added since upipe_zero_grads_clear; NULL for a unit
 *           without elements
 *   bytes   stages 2 and 3: allocates upipe_zero_bytes(z, unit, UPIPE_ZERO_GRADS)
 *   errors  ARG (no such unit; stages 0 and 1, after upipe_zero_grads_sum; UPIPE_ZERO_BEGUN units have begun and not
 *           ended), MEMORY, the table's. For all but ARG the world, ctx->team and ctx->ring are aborted
 */
UPIPE_API upipe_status upipe_zero_grads_begin(upipe_ctx *c, upipe_zero *z, int unit, float **g)
{
    const int64_t mark = upipe_mem_mark(c->mem);
    size_t bytes;
    upipe_status s;
    void *data;
    if (g != NULL) *g = NULL;
    UPIPE_TRY(upi_zero_unit(c, z, unit, g));
    if (upi_zero_n(z, unit) == 0) return UPIPE_OK;
    UPIPE_TRY(upi_zero_open(c, z));
    if (z->stage < 2) {
        *g = z->grads + z->first[unit];
        return UPIPE_OK;
    }
    bytes = upipe_zero_bytes(z, unit, UPIPE_ZERO_GRADS);
    s = upipe_mem_alloc(c->mem, &data, bytes, UPIPE_USE_WEIGHT_GRAD, "gradients", &c->err);
    if (s == UPIPE_OK) s = c->ops->zero(c, data, bytes);
    if (s != UPIPE_OK) return upi_zero_unwind(c, z, s, mark);
    *g = (float *)data;
    upi_zero_begins(z, unit, *g);
    return UPIPE_OK;
}

/* upipe_zero_grads_first -- as upipe_zero_grads_begin, of the first unit that ends in a step: its block may be the shard,
 *                           in which no sum lies yet
 *   bytes   as upipe_zero_grads_begin. In stages 2 and 3 none where the shard holds as many elements before this unit's
 *           slice as the unit has, is not offloaded, and no unit has ended since upipe_zero_grads_clear
 *   errors  as upipe_zero_grads_begin; and then upipe_zero_grads_end refuses any other unit before this one
 */
UPIPE_API upipe_status upipe_zero_grads_first(upipe_ctx *c, upipe_zero *z, int unit, float **g)
{
    if (g != NULL) *g = NULL;
    UPIPE_TRY(upi_zero_unit(c, z, unit, g));
    if (z->stage < 2 || z->offload_grads || z->summed || upi_zero_n(z, unit) == 0 ||
        upipe_zero_slice(z, unit).at < upi_zero_n(z, unit) || upi_zero_begun(z, z->grads) != NULL)
        return upipe_zero_grads_begin(c, z, unit, g);
    UPIPE_TRY(upi_zero_open(c, z));
    *g = z->grads;
    upi_zero_begins(z, unit, *g);
    return UPIPE_OK;
}

/* The sums over ranks of a unit's gradients, whole in g, go to this rank's slice. */
UPIPE_API upipe_status upi_zero_sum(upipe_ctx *c, const upipe_zero *z, int unit, float *g)
{
    upi_reduction x;
    x.offloaded = NULL;
    x.dst = (float *)upipe_zero_owned(z, UPIPE_ZERO_GRADS, unit);
    x.terms = g;
    x.n = upi_zero_n(z, unit);
    x.strip = upi_zero_strip(z);
    x.sent = upi_zero_sent(z);
    x.accumulate = z->stage >= 2;
    if (z->offload_grads) {
        x.offloaded = x.dst;
        x.dst = g + (upipe_zero_slice(z, unit).first - z->first[unit]);
        x.accumulate = z->round > 0;
    }
    return x.n > 0 ? upi_reduction_run(c, z->world, &x) : UPIPE_OK;
}

/* The block of g, which has been summed, is the pool's again; or the front of the shard is zeros again. */
UPIPE_API upipe_status upi_zero_grads_back(upipe_ctx *c, upipe_zero *z, int unit, float *g)
{
    if (g != z->grads) return upipe_mem_free(c->mem, g, &c->err);
    return c->ops->zero(c, g, (size_t)upi_zero_n(z, unit) * 4);
}

/* upipe_zero_grads_end -- the unit's gradients are whole, on every rank; g is not used any more
 *   bytes   stages 2 and 3: sends 4 (2 with `sent` bf16) for each element of the other ranks' slices; allocates
 *           upipe_zero_bytes(z, unit, UPIPE_ZERO_SUM) meanwhile. Else nothing. With offload_grads `moved` grows by 4
 *           for each element of the slice, and in later rounds by 8
 *   g       what begin or first gave for this unit
 *   errors  ARG (no such unit, g is not this unit's, upipe_zero_grads_first's unit has not ended), MEMORY; others as
 *           upipe_comm_wait. For all but ARG the world, ctx->team and ctx->ring are aborted
 */
UPIPE_API upipe_status upipe_zero_grads_end(upipe_ctx *c, upipe_zero *z, int unit, float *g)
{
    const int64_t mark = upipe_mem_mark(c->mem);
    upipe_zero_begun *own, *lent;
    upipe_status s;
    UPIPE_TRY(upi_zero_unit(c, z, unit, z));
    if (z->stage < 2 || upi_zero_n(z, unit) == 0) return UPIPE_OK;
    lent = z->grads != NULL ? upi_zero_begun(z, z->grads) : NULL;
    if (lent != NULL && lent->unit != unit)
        return upipe_fail(&c->err, UPIPE_ERR_ARG,
                          "zero: unit %d ends, and another one has been lent the shard", unit);
    own = g != NULL ? upi_zero_begun(z, g) : NULL;
    if (own == NULL || own->unit != unit)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "zero: g is not what unit %d was given", unit);
    own->g = NULL;
    z->summed = 1;
    s = upi_zero_sum(c, z, unit, g);
    if (z->offload_grads) z->moved += upipe_zero_slice(z, unit).n * (z->round > 0 ? 8 : 4);
    if (s == UPIPE_OK) s = upi_zero_grads_back(c, z, unit, g);
    if (s == UPIPE_OK) return s;
    upi_zero_unwind(c, z, s, mark);
    if (g != z->grads) (void)upipe_mem_free(c->mem, g, NULL); /* refused while peers may read it */
    return s;
}

UPIPE_API upipe_status upi_zero_sum_all(upipe_ctx *c, const upipe_zero *z)
{
    int u;
    for (u = 0; u < z->units; ++u) UPIPE_TRY(upi_zero_sum(c, z, u, z->grads + z->first[u]));
    if (z->stage == 1) return UPIPE_OK;
    for (u = 0; u < z->units; ++u)
        UPIPE_TRY(upi_slices_gather(c, z->world, z->grads + z->first[u],
                                    upipe_zero_owned(z, UPIPE_ZERO_GRADS, u), upi_zero_n(z, u), 4));
    return UPIPE_OK;
}

/* upipe_zero_grads_sum -- stages 0 and 1, when the gradients of all units are whole: this rank's slices become the sums
 *                         over ranks, and in stage 0 all slices do, on every rank; once a step. Else nothing
 *   bytes   as upipe_zero_grads_end, for all units in turn; stage 0 sends this rank's slices to each of the others too
 *   errors  as upipe_zero_grads_end; ARG: they are summed already, and upipe_zero_grads_clear has not begun another step
 */
UPIPE_API upipe_status upipe_zero_grads_sum(upipe_ctx *c, upipe_zero *z)
{
    const int64_t mark = upipe_mem_mark(c->mem);
    upipe_status s;
    UPIPE_TRY(upi_zero_args(c, z));
    if (z->stage >= 2) return UPIPE_OK;
    UPIPE_TRY(upi_zero_open(c, z));
    z->summed = 1;
    if (z->ranks == 1) return UPIPE_OK;
    s = upi_zero_sum_all(c, z);
    return s == UPIPE_OK ? UPIPE_OK : upi_zero_unwind(c, z, s, mark);
}

#endif

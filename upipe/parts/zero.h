/* zero.h -- a unit's parameters gathered on the side stream, and the end of a failed call */
#ifndef UPIPE_PARTS_ZERO_H
#define UPIPE_PARTS_ZERO_H

/* Ends what is being gathered ahead; its block is the pool's again, unless a peer or the device may still reach it. */
UPIPE_API void upi_zero_join(upipe_ctx *c, upipe_zero *z)
{
    void *block = z->ahead;
    upipe_status s;
    if (block == NULL) return;
    s = z->side->join(c, z->side); /* until then the side stream reads z */
    z->ahead = NULL;
    z->ahead_point = 0;
    if (z->side_world->quarantine)
        upi_mem_quarantine(c->mem, 0);
    else if (s == UPIPE_OK)
        upipe_mem_free(c->mem, block, NULL);
}

/* After a failure: as upi_unwind, of both communicators of the world. */
UPIPE_API upipe_status upi_zero_unwind(upipe_ctx *c, upipe_zero *z, upipe_status s, int64_t mark)
{
    upipe_err first;
    upi_fail_reason(&c->err, s);
    first = c->err;
    upipe_comm_abort(z->side != NULL ? z->side_world : NULL, first.text);
    upi_zero_join(c, z);
    c->err = first;
    return upi_unwind(c, s, mark, z->world);
}

/* Bytes that a unit's gather brings from the host's memory. */
UPIPE_API int64_t upi_zero_fetched(const upipe_zero *z, int unit)
{
    return z->offload_weights ? upipe_zero_slice(z, unit).n * (int64_t)upipe_dtype_bytes(z->dtype) : 0;
}

/* data = the whole unit, on the stream of c. */
UPIPE_API upipe_status upi_zero_gather(upipe_ctx *c, upipe_comm *comm, const upipe_zero *z, int unit,
                                       void *data)
{
    const size_t element = upipe_dtype_bytes(z->dtype), bytes = (size_t)upi_zero_fetched(z, unit);
    const void *own = upipe_zero_owned(z, UPIPE_ZERO_WEIGHTS, unit);
    if (bytes > 0) {
        void *place =
            upipe_offset(data, (size_t)(upipe_zero_slice(z, unit).first - z->first[unit]) * element);
        UPIPE_TRY(c->ops->copy(c, place, own, bytes));
        own = place;
    }
    return upi_slices_gather(c, comm, data, own, upi_zero_n(z, unit), element);
}

/* On the side stream: behind the work that the compute stream had when it asked. */
UPIPE_API void upi_zero_ahead_run(void *arg)
{
    upipe_zero *z = (upipe_zero *)arg;
    upipe_ctx *c = &z->side->ctx;
    upipe_status s = z->side->meet(c, z->side, UPIPE_SIDE_BEGIN, z->ahead_point);
    if (s == UPIPE_OK) s = upi_zero_gather(c, z->side_world, z, z->ahead_unit, z->ahead);
    z->ahead_status = s; /* the compute stream may go on behind the mark, and ask for another unit */
    if (z->side->mark(c, z->side, UPIPE_SIDE_READY, z->ahead_point) != UPIPE_OK)
        upipe_comm_abort(z->side_world, c->err.text);
}

UPIPE_API upipe_status upi_zero_ahead(upipe_ctx *c, upipe_zero *z, int unit)
{
    upipe_ctx *other = &z->side->ctx;
    UPIPE_TRY(upipe_mem_alloc(c->mem, &z->ahead, upipe_zero_bytes(z, unit, UPIPE_ZERO_WEIGHTS),
                              UPIPE_USE_WEIGHTS, "weights", &c->err));
    other->ops = z->side->ops != NULL ? z->side->ops : c->ops;
    other->mem = c->mem;
    other->team = z->side_world;
    other->user = c->user;
    memset(&other->err, 0, sizeof other->err);
    z->ahead_unit = unit;
    z->moved += upi_zero_fetched(z, unit);
    ++z->ahead_point;
    UPIPE_TRY(z->side->mark(c, z->side, UPIPE_SIDE_BEGIN, z->ahead_point));
    return z->side->post(c, z->side, upi_zero_ahead_run, z);
}

/* *w = what has been gathered ahead. */
UPIPE_API upipe_status upi_zero_arrived(upipe_ctx *c, upipe_zero *z, const void **w)
{
    UPIPE_TRY(z->side->meet(c, z->side, UPIPE_SIDE_READY, z->ahead_point));
    if (z->ahead_status != UPIPE_OK) {
        c->err = z->side->ctx.err;
        return z->ahead_status;
    }
    *w = z->ahead;
    z->ahead = NULL;
    return UPIPE_OK;
}

#endif

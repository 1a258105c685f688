/* agree.h -- descriptions that ranks compare before they send
 *
 *     upi_fields f = {0};
 *     upi_field_int(&f, "heads", heads);
 *     upi_field_real(&f, "rope_theta", theta);
 *     upi_agree(&ctx, ctx.team, &f);                      MISMATCH on every rank if any rank differs
 */
#ifndef UPIPE_PARTS_AGREE_H
#define UPIPE_PARTS_AGREE_H

/* One line of a description that all ranks must share: a whole number, or the bits of a double. */
typedef struct upi_field {
    const char *name;
    int64_t value;
    int real; /* value holds the bits of a double */
} upi_field;

/* The double whose bits a field with `real` holds. */
UPIPE_API double upi_field_value(int64_t bits)
{
    double v;
    memcpy(&v, &bits, sizeof v);
    return v;
}

/* upi_fields -- a description; with n = 0 it is empty, whatever else it holds
 *   list  [n] of at most UPIPE_ALL_GATHER_MAX
 *   hash  FNV-1a of their names and values
 */
typedef struct upi_fields {
    upi_field list[UPIPE_ALL_GATHER_MAX];
    uint64_t hash;
    int n;
} upi_fields;

/* upi_field_int, upi_field_real -- one more field; the name must outlive the description. Those beyond
 * UPIPE_ALL_GATHER_MAX are counted and not written: upi_agree then refuses the description */
UPIPE_API void upi_field_int(upi_fields *f, const char *name, int64_t value)
{
    const upi_field field = {name, value, 0};
    if (f->n < UPIPE_ALL_GATHER_MAX) f->list[f->n] = field;
    f->hash = upipe_hash_bytes(f->n == 0 ? UPIPE_HASH : f->hash, name, strlen(name) + 1);
    f->hash = upipe_hash_bytes(f->hash, &value, sizeof value);
    ++f->n;
}

/* As upi_field_int, with the bits of a double. */
UPIPE_API void upi_field_real(upi_fields *f, const char *name, double value)
{
    int64_t bits;
    memcpy(&bits, &value, sizeof bits);
    upi_field_int(f, name, bits);
    if (f->n <= UPIPE_ALL_GATHER_MAX) f->list[f->n - 1].real = 1;
}

/* A weight of a layer, or another tensor that a forward and its backward read. */
typedef struct upi_weight {
    const char *name;
    const void *data;
} upi_weight;

/* upi_given_same -- writes what a call is given where nothing is recorded yet; otherwise ARG unless it is the same
 *   f   NULL: no numbers
 *   w   [n] of at most UPIPE_WEIGHTS_MAX, always in the same order; a later call may compare fewer of them
 */
UPIPE_API upipe_status upi_given_same(upipe_err *e, upipe_given *given, uint64_t plan, int64_t id,
                                      const upi_fields *f, const upi_weight *w, int n)
{
    const int numbers = f != NULL ? f->n : 0, first = given->plan == 0;
    int i;
    assert(n >= 0 && n <= UPIPE_WEIGHTS_MAX && numbers <= UPIPE_ALL_GATHER_MAX);
    for (i = 0; i < numbers; ++i) {
        const uint64_t mark = upipe_hash_bytes(UPIPE_HASH, &f->list[i].value, sizeof f->list[i].value) >> 32;
        if (first) given->numbers[i] = (uint32_t)mark;
        if (given->numbers[i] != mark)
            return upipe_fail(e, UPIPE_ERR_ARG, "%s is not that of the forward", f->list[i].name);
    }
    if (!first && given->plan != plan)
        return upipe_fail(e, UPIPE_ERR_ARG, "another plan than in the forward");
    if (!first && given->id != id)
        return upipe_fail(e, UPIPE_ERR_ARG, "layer id %lld, and %lld in the forward", (long long)id,
                          (long long)given->id);
    for (i = 0; id == 0 && i < n; ++i) {
        const uint64_t mark = upipe_hash_bytes(UPIPE_HASH, &w[i].data, sizeof w[i].data) >> 32;
        if (first) given->weights[i] = (uint32_t)mark;
        if (given->weights[i] != mark)
            return upipe_fail(e, UPIPE_ERR_ARG,
                              "%s is not where it was in the forward; weights that move need layer.id",
                              w[i].name);
    }
    if (first) {
        given->plan = plan;
        given->id = id;
    }
    return UPIPE_OK;
}

/* upi_agree -- all ranks compare a description of what they are about to do
 *
 * Ranks communicate only where the description is not the expected one: that which followed before, after as many of the
 * last one in a row; where none has, the last one again. So the first layers of a model compare, and those where the order
 * of several kinds turns. That all ranks have agreed on a description before is not enough: a rank that is out of step would
 * pass.
 *
 * The expectation is for NCCL. Its all-gather makes the host wait for the stream: in each layer the host could then not run
 * ahead of the device, and a layer could not be captured into a graph. Other transports do without: over threads, sockets
 * and MPI the all-gathers take at most 2 % of forward and backward of a layer of 128 tokens (3, 30 and 2 us each on 2 ranks,
 * 5, 100 and 30 on 4, which share 2 cores).
 *
 *   f       1 to UPIPE_ALL_GATHER_MAX fields
 *   errors  MISMATCH on every rank if any rank differs: the sentence names the field, the rank and both
 *           values, or the two calls where one rank compares and another continues. ARG (comm is NULL, a
 *           transfer in progress, the number of fields); others as upipe_comm_wait
 */
UPIPE_API upipe_status upi_agree(upipe_ctx *c, upipe_comm *comm, const upi_fields *f)
{
    int64_t mine[UPIPE_ALL_GATHER_MAX];
    uint64_t expected;
    int at = 0, surprise, r, i;
    UPIPE_TRY(upipe_comm_idle(c, comm));
    if (f == NULL || f->n < 1 || f->n > UPIPE_ALL_GATHER_MAX)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "a description of %d fields; 1 to %d are possible",
                          f != NULL ? f->n : 0, UPIPE_ALL_GATHER_MAX);
    while (at < UPIPE_AGREED_MAX && comm->agreed[at].after != comm->agreed_after) ++at;
    expected = at < UPIPE_AGREED_MAX ? comm->agreed[at].next : comm->agreed_last;
    surprise = f->hash != expected;
    for (i = 0; surprise && i < f->n; ++i) mine[i] = f->list[i].value;
    if (surprise) UPIPE_TRY(comm->ops.all_gather(c, comm, comm->gathered, mine, f->n));
    for (r = 1; surprise && r < comm->ranks; ++r)
        for (i = 0; i < f->n; ++i) {
            const int64_t first = comm->gathered[i], other = comm->gathered[r * f->n + i];
            if (other == first) continue;
            if (f->list[i].real)
                return upipe_comm_fail(&c->err, comm, UPIPE_ERR_MISMATCH,
                                       "%s is %g on rank %d and %g on rank %d", f->list[i].name,
                                       upi_field_value(first), upi_comm_called(comm, 0),
                                       upi_field_value(other), upi_comm_called(comm, r));
            return upipe_comm_fail(&c->err, comm, UPIPE_ERR_MISMATCH,
                                   "%s is %lld on rank %d and %lld on rank %d", f->list[i].name,
                                   (long long)first, upi_comm_called(comm, 0), (long long)other,
                                   upi_comm_called(comm, r));
        }
    if (surprise) {
        if (at == UPIPE_AGREED_MAX) --at;
        memmove(comm->agreed + 1, comm->agreed, (size_t)at * sizeof *comm->agreed);
        comm->agreed[0].after = comm->agreed_after;
        comm->agreed[0].next = f->hash;
    }
    comm->agreed_after = upipe_hash_bytes(f->hash == comm->agreed_last ? comm->agreed_after : UPIPE_HASH,
                                          &f->hash, sizeof f->hash);
    comm->agreed_last = f->hash;
    return UPIPE_OK;
}

#endif

/* upipe_agree.h -- descriptions that ranks compare before they send        layer 2, includes upipe_comm.h
 *
 *     upipe_fields f = {0};
 *     upipe_field_int(&f, "heads", heads);
 *     upipe_field_real(&f, "rope_theta", theta);
 *     upipe_comm_agree(&ctx, ctx.team, f.at, f.n);         MISMATCH on every rank if any rank differs
 */
#ifndef UPIPE_AGREE_H
#define UPIPE_AGREE_H

#include "upipe_comm.h"

/* One line of a description that all ranks must share: a whole number, or the bits of a double. */
typedef struct upipe_field {
    const char *name;
    int64_t value;
    int real; /* value holds the bits of a double */
} upipe_field;

/* The double whose bits a field with `real` holds. */
UPIPE_API double upipe_field_value(int64_t bits)
{
    double v;
    memcpy(&v, &bits, sizeof v);
    return v;
}

/* A description while it is written down: n of at most UPIPE_ALL_GATHER_MAX fields. */
typedef struct upipe_fields {
    upipe_field at[UPIPE_ALL_GATHER_MAX];
    int n;
} upipe_fields;

/* upipe_field_int, upipe_field_real -- one more field; the name must outlive the description */
UPIPE_API void upipe_field_int(upipe_fields *f, const char *name, int64_t value)
{
    assert(f->n < UPIPE_ALL_GATHER_MAX);
    f->at[f->n].name = name;
    f->at[f->n].value = value;
    f->at[f->n++].real = 0;
}

/* As upipe_field_int, with the bits of a double. */
UPIPE_API void upipe_field_real(upipe_fields *f, const char *name, double value)
{
    upipe_field_int(f, name, 0);
    f->at[f->n - 1].real = 1;
    memcpy(&f->at[f->n - 1].value, &value, sizeof value);
}

/* FNV-1a of names and values; never 0. */
UPIPE_API uint64_t upi_hash(const upipe_field *fields, int n)
{
    uint64_t hash = UPI_HASH;
    int i;
    for (i = 0; i < n; ++i) {
        hash = upi_hash_bytes(hash, fields[i].name, strlen(fields[i].name) + 1);
        hash = upi_hash_bytes(hash, &fields[i].value, sizeof fields[i].value);
    }
    return hash != 0 ? hash : 1;
}

/* Whether this description comes as it did when the ranks last compared. Then it comes on all ranks, or a
 * rank where it does not compares, which the others detect. That a description is known is not enough: a rank
 * that is out of step would pass. */
UPIPE_API int upi_agree_expected(const upipe_comm *comm, uint64_t hash)
{
    const upi_agreed *last = &comm->agreed[comm->agreed_at];
    return hash == (last->next == 0 || comm->agreed_run < last->run ? last->hash : last->next);
}

/* Notes that the description has come on all ranks; all of them note the same. */
UPIPE_API void upi_agree_note(upipe_comm *comm, uint64_t hash, int expected)
{
    upi_agreed *last = &comm->agreed[comm->agreed_at];
    int i = 0;
    if (hash == last->hash) {
        if (!expected) last->next = 0; /* a longer run than before */
        ++comm->agreed_run;
        return;
    }
    if (!expected) {
        last->next = hash;
        last->run = comm->agreed_run;
    }
    while (i < UPI_AGREED_MAX && comm->agreed[i].hash != hash) ++i;
    if (i == UPI_AGREED_MAX) {
        i = comm->agreed_oldest;
        comm->agreed_oldest = (i + 1) % UPI_AGREED_MAX;
        memset(&comm->agreed[i], 0, sizeof comm->agreed[i]);
        comm->agreed[i].hash = hash;
    }
    comm->agreed_at = i;
    comm->agreed_run = 1;
}

/* upipe_comm_agree -- all ranks compare a description of what they are about to do
 *
 * The call communicates only where the description is unexpected: it follows another description than before,
 * or another number of repetitions. So only the first layers of a model compare.
 *
 *   fields  [n] named numbers, 1 <= n <= UPIPE_ALL_GATHER_MAX
 *   errors  MISMATCH on every rank if any rank differs: the sentence names the field, the rank and both
 *           values, or the two calls where one rank compares and another continues. ARG (comm is NULL, a
 *           transfer in progress, n out of range); others as upipe_comm_wait
 */
UPIPE_API upipe_status upipe_comm_agree(upipe_ctx *c, upipe_comm *comm, const upipe_field *fields, int n)
{
    int64_t mine[UPIPE_ALL_GATHER_MAX];
    uint64_t hash;
    int i, r;
    UPIPE_TRY(upi_comm_idle(c, comm));
    if (n < 1 || n > UPIPE_ALL_GATHER_MAX)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "a description of %d fields; 1 to %d are possible", n,
                          UPIPE_ALL_GATHER_MAX);
    hash = upi_hash(fields, n);
    if (upi_agree_expected(comm, hash)) {
        upi_agree_note(comm, hash, 1);
        return UPIPE_OK;
    }
    for (i = 0; i < n; ++i) mine[i] = fields[i].value;
    UPIPE_TRY(comm->ops.all_gather(c, comm, comm->gathered, mine, n));
    for (r = 1; r < comm->ranks; ++r) {
        for (i = 0; i < n; ++i) {
            int64_t first = comm->gathered[i], other = comm->gathered[r * n + i];
            if (other == first) continue;
            if (fields[i].real)
                return upi_comm_fail(&c->err, comm, UPIPE_ERR_MISMATCH,
                                     "%s is %g on rank 0 and %g on rank %d", fields[i].name,
                                     upipe_field_value(first), upipe_field_value(other), r);
            return upi_comm_fail(&c->err, comm, UPIPE_ERR_MISMATCH,
                                 "%s is %lld on rank 0 and %lld on rank %d", fields[i].name, (long long)first,
                                 (long long)other, r);
        }
    }
    upi_agree_note(comm, hash, 0);
    return UPIPE_OK;
}

#endif

/* upipe_reduce.h -- sums over the ranks of a communicator, and gathers
 *
 * Every rank owns a slice of the elements: upipe_reduce_slice. The ranks' values are added in rank order on
 * every transport, so the bits of a sum do not depend on the transport.
 *
 *     upipe_all_reduce(&ctx, ctx.team, dwq, n);           gradients of weights, over the ranks of ctx.team
 *     upipe_all_reduce(&ctx, world, dwq, n);              the same over all ranks, where there is a ring too
 *     upipe_scalars_sum(&ctx, world, &loss, 1);           a few numbers of the host, in f64
 */
#ifndef UPIPE_REDUCE_H
#define UPIPE_REDUCE_H

#include "upipe_comm.h"

enum { UPIPE_REDUCE_STRIP = 16384 }; /* elements that a rank sums at a time */

/* upipe_reduce_slice -- the part of n elements that a rank owns: [*first, *first + result). That is
 *                       ceil(n / ranks) elements, or what is left of n
 */
UPIPE_API int64_t upipe_reduce_slice(int64_t n, int rank, int ranks, int64_t *first)
{
    int64_t most = n / ranks + (n % ranks != 0), begin = most * rank;
    if (begin > n) begin = n;
    *first = begin;
    return n - begin < most ? n - begin : most;
}

/* ---- strip by strip, for a caller that unwinds itself ---- */

/* upi_reduction -- a reduce-scatter: in each transfer a rank receives the terms of one strip of its slice
 *   dst         this rank's slice of the sums
 *   terms       [n] this rank's; dst may be its slice of them
 *   strip       elements that a rank sums at a time
 *   sent        storage type of the terms on their way: UPIPE_F32, or UPIPE_BF16, to which they are rounded
 *   accumulate  dst += the sum, in one f32 chain that starts from dst; otherwise dst = the sum
 *   offloaded   where the sums go from dst, and with accumulate come from before: host memory; NULL: they stay in dst
 */
typedef struct upi_reduction {
    float *dst;
    const float *terms;
    int64_t n, strip;
    upipe_dtype sent;
    int accumulate;
    float *offloaded;
} upi_reduction;

/* Elements from one rank's terms to the next one's in a buffer. No strip is longer. */
UPIPE_API int64_t upi_reduction_stride(int64_t n, int ranks, int64_t strip)
{
    int64_t first, slice = upipe_reduce_slice(n, 0, ranks, &first);
    return slice < strip ? slice : strip;
}

/* upi_reduction_bytes -- what upi_reduction_run allocates in the pool: the terms that come, and the rounded ones
 *                        that go
 *   strip sent  as in upi_reduction
 */
UPIPE_API size_t upi_reduction_bytes(int64_t n, int ranks, int64_t strip, upipe_dtype sent)
{
    const size_t bytes = (size_t)(upi_reduction_stride(n, ranks, strip) * ranks) * upipe_dtype_bytes(sent);
    return sent == UPIPE_F32 ? bytes : 2 * bytes;
}

/* The strip of a rank's slice behind its first `done` elements: perhaps no element. */
UPIPE_API int64_t upi_reduction_strip(const upi_reduction *x, int rank, int ranks, int64_t done,
                                      int64_t *first)
{
    int64_t count = upipe_reduce_slice(x->n, rank, ranks, first) - done;
    *first += done;
    return count < 0 ? 0 : count < x->strip ? count : x->strip;
}

/* The *used messages of a strip: terms come to `in`; those that go are rounded into `out`, unless they are sent as they
 * are. */
UPIPE_API upipe_status upi_reduction_list(upipe_ctx *c, upipe_comm *comm, const upi_reduction *x,
                                          int64_t done, char *in, char *out, int *used)
{
    const size_t element = upipe_dtype_bytes(x->sent);
    const size_t stride = (size_t)upi_reduction_stride(x->n, comm->ranks, x->strip) * element;
    int64_t first, mine = upi_reduction_strip(x, comm->rank, comm->ranks, done, &first);
    int r;
    for (r = *used = 0; r < comm->ranks; ++r) {
        int64_t theirs = upi_reduction_strip(x, r, comm->ranks, done, &first);
        const void *from = x->terms + first;
        if (x->sent != UPIPE_F32 && theirs > 0) {
            upipe_view src = upipe_view_packed((void *)(uintptr_t)from, UPIPE_F32, 1, 1, (int32_t)theirs);
            upipe_view dst = upipe_view_packed(out + (size_t)r * stride, x->sent, 1, 1, (int32_t)theirs);
            UPIPE_TRY(c->ops->cast(c, dst, src));
            from = dst.data;
        }
        upipe_msg_add(comm->list, used, r, 1, from, (size_t)theirs * element, 0, in + (size_t)r * stride,
                      (size_t)mine * element, 0);
    }
    return UPIPE_OK;
}

/* dst (+)= the terms of n elements that came, in rank order. */
UPIPE_API upipe_status upi_reduction_add(upipe_ctx *c, const upi_reduction *x, int ranks, int64_t done,
                                         int64_t n, char *in)
{
    const int64_t stride = upi_reduction_stride(x->n, ranks, x->strip);
    upipe_view dst = upipe_view_packed(x->dst + done, UPIPE_F32, 1, 1, (int32_t)n), src = dst;
    int r;
    if (n == 0) return UPIPE_OK;
    if (x->sent == UPIPE_F32)
        return c->ops->sum(c, dst, (const float *)(const void *)in, stride, ranks, x->accumulate);
    src.dtype = x->sent;
    if (!x->accumulate) UPIPE_TRY(c->ops->zero(c, dst.data, (size_t)n * 4));
    for (r = 0; r < ranks; ++r) {
        src.data = in + (size_t)(r * stride) * upipe_dtype_bytes(x->sent);
        UPIPE_TRY(c->ops->add(c, dst, src));
    }
    return UPIPE_OK;
}

/* The same, by way of dst where the sums are offloaded. */
UPIPE_API upipe_status upi_reduction_sum(upipe_ctx *c, const upi_reduction *x, int ranks, int64_t done,
                                         int64_t n, char *in)
{
    const size_t bytes = (size_t)n * 4;
    if (x->offloaded == NULL || n == 0) return upi_reduction_add(c, x, ranks, done, n, in);
    if (x->accumulate) UPIPE_TRY(c->ops->copy(c, x->dst + done, x->offloaded + done, bytes));
    UPIPE_TRY(upi_reduction_add(c, x, ranks, done, n, in));
    return c->ops->copy(c, x->offloaded + done, x->dst + done, bytes);
}

/* upi_reduction_run -- the sums over the ranks of comm; all of them call it with the same n, strip and sent
 *   bytes   sends the terms of the other ranks' slices; allocates upi_reduction_bytes
 *   errors  MEMORY, the table's; others as upipe_comm_wait. What is allocated stays so, and nothing is aborted: the
 *           caller calls upi_unwind
 */
UPIPE_API upipe_status upi_reduction_run(upipe_ctx *c, upipe_comm *comm, const upi_reduction *x)
{
    int64_t first, done, most = upipe_reduce_slice(x->n, 0, comm->ranks, &first); /* no slice is longer */
    const size_t bytes = upi_reduction_bytes(x->n, comm->ranks, x->strip, x->sent);
    void *buf;
    UPIPE_TRY(upipe_mem_alloc(c->mem, &buf, bytes, UPIPE_USE_REDUCE, "sum", &c->err));
    for (done = 0; done < most; done += x->strip) {
        int64_t mine = upi_reduction_strip(x, comm->rank, comm->ranks, done, &first);
        int used;
        UPIPE_TRY(upi_reduction_list(c, comm, x, done, (char *)buf, (char *)buf + bytes / 2, &used));
        UPIPE_TRY(upipe_comm_start(c, comm, comm->list, used));
        UPIPE_TRY(upipe_comm_wait(c, comm));
        UPIPE_TRY(upi_reduction_sum(c, x, comm->ranks, done, mine, (char *)buf));
    }
    return upipe_mem_free(c->mem, buf, &c->err);
}

/* upi_slices_gather -- data = every rank's slice; where all are equal, by the transport's own all-gather, if it has one
 *   data    n elements of `element` bytes, the same on all ranks
 *   own     this rank's slice: in its place in data, or elsewhere
 *   errors  as upipe_comm_wait; nothing is aborted: the caller calls upi_unwind
 */
UPIPE_API upipe_status upi_slices_gather(upipe_ctx *c, upipe_comm *comm, void *data, const void *own,
                                         int64_t n, size_t element)
{
    int64_t first, mine = upipe_reduce_slice(n, comm->rank, comm->ranks, &first);
    const int in_place = own == upipe_offset(data, (size_t)first * element);
    int r, used = 0;
    if (comm->ops.gather != NULL && n % comm->ranks == 0) {
        UPIPE_TRY(upipe_comm_idle(c, comm));
        UPIPE_TRY(comm->ops.gather(c, comm, data, own, (size_t)mine * element));
        comm->sent_bytes += mine * (int64_t)element * (comm->ranks - 1);
        return UPIPE_OK;
    }
    for (r = 0; r < comm->ranks; ++r) {
        int64_t theirs = upipe_reduce_slice(n, r, comm->ranks, &first);
        if (r == comm->rank && in_place) continue;
        upipe_msg_add(comm->list, &used, r, 1, own, (size_t)mine * element, 0,
                      upipe_offset(data, (size_t)first * element), (size_t)theirs * element, 0);
    }
    UPIPE_TRY(upipe_comm_start(c, comm, comm->list, used));
    return upipe_comm_wait(c, comm);
}

/* ---- whole calls, which unwind ---- */

/* upipe_reduce_bytes -- what upipe_reduce_scatter and upipe_all_reduce allocate in the pool */
UPIPE_API size_t upipe_reduce_bytes(int64_t n, int ranks)
{
    return ranks == 1 ? 0 : upi_reduction_bytes(n, ranks, UPIPE_REDUCE_STRIP, UPIPE_F32);
}

/* What all three calls check; `what` is for the sentence. */
UPIPE_API upipe_status upi_reduce_check(upipe_ctx *c, const upipe_comm *comm, const char *what, int64_t n)
{
    if (n < 0) return upipe_fail(&c->err, UPIPE_ERR_ARG, "%s of %lld elements", what, (long long)n);
    if (c->ops == NULL || c->mem == NULL) return upi_ctx_check(c);
    return upipe_comm_idle(c, comm);
}

/* upipe_reduce_scatter -- this rank's slice becomes the sum over the ranks of comm; the rest of data is unchanged
 *   comm    ctx->team, ctx->ring, or any other communicator of this rank; ctx->team may then be NULL
 *   data    n f32 elements, the same n on all ranks; slices as upipe_reduce_slice
 *   bytes   sends 4 * (n - its slice); allocates upipe_reduce_bytes
 *   errors  ARG (n < 0, comm is NULL, or a transfer in progress: nothing happens), MEMORY; others as
 *           upipe_comm_wait. For all but ARG comm, ctx->team and ctx->ring are aborted
 */
UPIPE_API upipe_status upipe_reduce_scatter(upipe_ctx *c, upipe_comm *comm, float *data, int64_t n)
{
    upi_reduction x = {data, data, n, UPIPE_REDUCE_STRIP, UPIPE_F32, 0, NULL};
    int64_t first, mark;
    upipe_status s;
    UPIPE_TRY(upi_reduce_check(c, comm, "a sum", n));
    if (n == 0 || comm->ranks == 1) return UPIPE_OK;
    mark = upipe_mem_mark(c->mem);
    upipe_reduce_slice(n, comm->rank, comm->ranks, &first);
    x.dst = data + first;
    s = upi_reduction_run(c, comm, &x);
    return s == UPIPE_OK ? UPIPE_OK : upi_unwind(c, s, mark, comm);
}

/* upipe_all_gather -- every rank of comm receives every rank's slice
 *   data    n elements of `element` bytes, the same on all ranks: this rank's slice is read, the others are
 *           written
 *   bytes   sends its slice to each of the others
 *   comm, errors  as upipe_reduce_scatter, without MEMORY
 */
UPIPE_API upipe_status upipe_all_gather(upipe_ctx *c, upipe_comm *comm, void *data, int64_t n, size_t element)
{
    int64_t mine, mark;
    upipe_status s;
    UPIPE_TRY(upi_reduce_check(c, comm, "a gather", n));
    if (n == 0 || comm->ranks == 1) return UPIPE_OK;
    mark = upipe_mem_mark(c->mem);
    upipe_reduce_slice(n, comm->rank, comm->ranks, &mine);
    s = upi_slices_gather(c, comm, data, (const char *)data + (size_t)mine * element, n, element);
    return s == UPIPE_OK ? UPIPE_OK : upi_unwind(c, s, mark, comm);
}

/* upipe_all_reduce -- every rank of comm receives the sum over its ranks: a reduce-scatter, then an all-gather
 *   data    n f32 elements, the same n on all ranks; replaced by the sum
 *   bytes   sends about 2 * 4 * n * (ranks - 1) / ranks; allocates upipe_reduce_bytes
 *   comm, errors  as upipe_reduce_scatter
 */
UPIPE_API upipe_status upipe_all_reduce(upipe_ctx *c, upipe_comm *comm, float *data, int64_t n)
{
    UPIPE_TRY(upipe_reduce_scatter(c, comm, data, n));
    return upipe_all_gather(c, comm, data, n, 4);
}

/* upipe_scalars_sum -- every rank of comm receives the sums over its ranks: losses, counts of tokens, squares of a norm
 *   values  [n] in the host's memory, 0 <= n <= UPIPE_ALL_GATHER_MAX, the same n on all ranks; replaced by the sums,
 *           which have the same bits on every rank
 *   comm, errors  as upipe_reduce_scatter, without MEMORY; ARG where n is out of range
 */
UPIPE_API upipe_status upipe_scalars_sum(upipe_ctx *c, upipe_comm *comm, double *values, int n)
{
    int64_t mine[UPIPE_ALL_GATHER_MAX], mark;
    upipe_status s;
    int r, i;
    UPIPE_TRY(upi_reduce_check(c, comm, "a sum", n));
    if (n > UPIPE_ALL_GATHER_MAX)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "a sum of %d numbers, at most %d", n, UPIPE_ALL_GATHER_MAX);
    mark = upipe_mem_mark(c->mem);
    memcpy(mine, values, (size_t)n * sizeof *values);
    s = upipe_comm_all_gather(c, comm, comm->gathered, mine, n);
    if (s != UPIPE_OK) return upi_unwind(c, s, mark, comm);
    for (i = 0; i < n; ++i)
        for (values[i] = 0, r = 0; r < comm->ranks; ++r) {
            double term;
            memcpy(&term, &comm->gathered[r * n + i], sizeof term);
            values[i] += term;
        }
    return UPIPE_OK;
}

#endif

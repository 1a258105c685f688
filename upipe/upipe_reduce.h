/* upipe_reduce.h -- sums over the ranks of a team: reduce-scatter, all-gather, all-reduce        layer 3
 *
 * Every rank owns a slice of the elements: upipe_reduce_slice. The ranks' values are added in rank order on
 * every transport, so the bits of a sum do not depend on the transport.
 *
 *     upipe_all_reduce(&ctx, dwq, n);           gradients of weights, over ctx->team
 */
#ifndef UPIPE_REDUCE_H
#define UPIPE_REDUCE_H

#include "upipe_unwind.h"

enum { UPIPE_REDUCE_STRIP = 16384 }; /* elements that a rank sums at a time */

/* upipe_reduce_slice -- the part of n elements that a rank owns: [*first, *first + result), ceil(n / ranks)
 *                       elements or
 *                       what is left */
UPIPE_API int64_t upipe_reduce_slice(int64_t n, int rank, int ranks, int64_t *first)
{
    int64_t piece = n / ranks + (n % ranks != 0), begin = piece * rank;
    if (begin > n) begin = n;
    *first = begin;
    return n - begin < piece ? n - begin : piece;
}

/* upi_reduction -- a reduce-scatter over a communicator, strip by strip
 *   dst         this rank's slice of the sums
 *   data        [n] this rank's terms; dst may be its slice of them
 *   strip       elements that a rank sums at a time
 *   sent        storage type of the terms on their way: UPIPE_F32, or UPIPE_BF16, to which they are rounded
 *   accumulate  dst += the sum, in one f32 chain that starts from dst; otherwise dst = the sum
 */
typedef struct upi_reduction {
    float *dst;
    const float *data;
    int64_t n, strip;
    upipe_dtype sent;
    int accumulate;
} upi_reduction;

/* Elements of a strip: no rank's is longer. */
UPIPE_API int64_t upi_reduce_piece(int64_t n, int ranks, int64_t strip)
{
    int64_t first, slice = upipe_reduce_slice(n, 0, ranks, &first);
    return slice < strip ? slice : strip;
}

/* What upi_reduce allocates: the strips that come, and the rounded ones that go. */
UPIPE_API size_t upi_reduce_bytes(int64_t n, int ranks, int64_t strip, upipe_dtype sent)
{
    const size_t buf = (size_t)(upi_reduce_piece(n, ranks, strip) * ranks) * upipe_dtype_bytes(sent);
    return sent == UPIPE_F32 ? buf : 2 * buf;
}

/* upipe_reduce_bytes -- what upipe_reduce_scatter and upipe_all_reduce allocate in the pool */
UPIPE_API size_t upipe_reduce_bytes(int64_t n, int ranks)
{
    return ranks == 1 ? 0 : upi_reduce_bytes(n, ranks, UPIPE_REDUCE_STRIP, UPIPE_F32);
}

/* Strip `at` of a rank's slice: perhaps no element. */
UPIPE_API int64_t upi_reduce_strip(const upi_reduction *x, int rank, int ranks, int64_t at, int64_t *first)
{
    int64_t count = upipe_reduce_slice(x->n, rank, ranks, first) - at;
    *first += at;
    return count < 0 ? 0 : count < x->strip ? count : x->strip;
}

/* The *used messages of strip `at`, which come to `in` and are rounded into `out`. */
UPIPE_API upipe_status upi_reduce_list(upipe_ctx *c, upipe_comm *comm, const upi_reduction *x, int64_t at,
                                       char *in, char *out, int *used)
{
    const size_t element = upipe_dtype_bytes(x->sent);
    const int64_t piece = upi_reduce_piece(x->n, comm->ranks, x->strip);
    int64_t first, mine_n = upi_reduce_strip(x, comm->rank, comm->ranks, at, &first);
    int p;
    for (p = *used = 0; p < comm->ranks; ++p) {
        int64_t len = upi_reduce_strip(x, p, comm->ranks, at, &first);
        const void *from = x->data + first;
        upipe_msg *s = &comm->list[*used];
        if (len == 0 && mine_n == 0) continue;
        if (x->sent != UPIPE_F32 && len > 0) {
            upipe_view src = upipe_view_packed((void *)(uintptr_t)from, UPIPE_F32, 1, 1, (int32_t)len),
                       dst = src;
            dst.dtype = x->sent;
            dst.data = out + (size_t)(p * piece) * element;
            UPIPE_TRY(c->ops->cast(c, dst, src));
            from = dst.data;
        }
        memset(s, 0, sizeof *s);
        s->peer = p;
        s->count = 1;
        s->send = len > 0 ? from : NULL;
        s->send_bytes = (size_t)len * element;
        s->recv = in + (size_t)(p * piece) * element;
        s->recv_bytes = (size_t)mine_n * element;
        ++*used;
    }
    return UPIPE_OK;
}

/* dst (+)= the strips that came, in rank order. */
UPIPE_API upipe_status upi_reduce_sum(upipe_ctx *c, const upi_reduction *x, int ranks, int64_t at, int64_t n,
                                      char *in)
{
    const int64_t piece = upi_reduce_piece(x->n, ranks, x->strip);
    upipe_view dst = upipe_view_packed(x->dst + at, UPIPE_F32, 1, 1, (int32_t)n), src = dst;
    int p;
    if (n == 0) return UPIPE_OK;
    if (x->sent == UPIPE_F32)
        return c->ops->sum(c, dst, (const float *)(const void *)in, piece, ranks, x->accumulate);
    src.dtype = x->sent;
    if (!x->accumulate) UPIPE_TRY(c->ops->zero(c, dst.data, (size_t)n * 4));
    for (p = 0; p < ranks; ++p) {
        src.data = in + (size_t)(p * piece) * upipe_dtype_bytes(x->sent);
        UPIPE_TRY(c->ops->add(c, dst, src));
    }
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_reduce(upipe_ctx *c, upipe_comm *comm, const upi_reduction *x)
{
    int64_t first, slice = upipe_reduce_slice(x->n, 0, comm->ranks, &first),
                   at; /* no rank's slice is longer */
    const size_t bytes = upi_reduce_bytes(x->n, comm->ranks, x->strip, x->sent);
    void *buf;
    UPIPE_TRY(upipe_mem_alloc(c->mem, &buf, bytes, "sum", &c->err));
    for (at = 0; at < slice; at += x->strip) {
        int64_t mine_n = upi_reduce_strip(x, comm->rank, comm->ranks, at, &first);
        int used;
        UPIPE_TRY(upi_reduce_list(c, comm, x, at, (char *)buf, (char *)buf + bytes / 2, &used));
        UPIPE_TRY(upipe_comm_start(c, comm, comm->list, used));
        UPIPE_TRY(upipe_comm_wait(c, comm));
        UPIPE_TRY(upi_reduce_sum(c, x, comm->ranks, at, mine_n, (char *)buf));
    }
    return upipe_mem_free(c->mem, buf, &c->err);
}

/* upipe_reduce_scatter -- this rank's slice becomes the sum over ranks; the rest of data is unchanged
 *   data    n f32 elements, the same n on all ranks; slices as upipe_reduce_slice
 *   bytes   sends 4 * (n - its slice); allocates upipe_reduce_bytes
 *   errors  ARG (n < 0, or a transfer in progress: nothing happens), MEMORY; others as upipe_comm_wait, and
 *           for these the team is aborted
 */
UPIPE_API upipe_status upipe_reduce_scatter(upipe_ctx *c, float *data, int64_t n)
{
    const int64_t mark = upipe_mem_mark(c->mem);
    upi_reduction x = {data, data, n, UPIPE_REDUCE_STRIP, UPIPE_F32, 0};
    int64_t first;
    upipe_status s;
    if (n < 0) return upipe_fail(&c->err, UPIPE_ERR_ARG, "a sum of %lld elements", (long long)n);
    UPIPE_TRY(upipe_ctx_check(c));
    UPIPE_TRY(upi_comm_idle(c, c->team));
    if (n == 0 || c->team->ranks == 1) return UPIPE_OK;
    upipe_reduce_slice(n, c->team->rank, c->team->ranks, &first);
    x.dst = data + first;
    s = upi_reduce(c, c->team, &x);
    return s == UPIPE_OK ? UPIPE_OK : upipe_unwind(c, s, mark);
}

/* data = every rank's slice, of which this rank's is at `own`: there already, or elsewhere. */
UPIPE_API upipe_status upi_gather(upipe_ctx *c, upipe_comm *comm, void *data, const void *own, int64_t n,
                                  size_t element)
{
    int64_t mine, mine_n = upipe_reduce_slice(n, comm->rank, comm->ranks, &mine), first;
    int p, used = 0;
    for (p = 0; p < comm->ranks; ++p) {
        int64_t len = upipe_reduce_slice(n, p, comm->ranks, &first);
        upipe_msg *s = &comm->list[used];
        if (len == 0 && mine_n == 0) continue;
        if (p == comm->rank && own == (const char *)data + (size_t)mine * element) continue;
        memset(s, 0, sizeof *s);
        s->peer = p;
        s->count = 1;
        s->send = mine_n > 0 ? own : NULL;
        s->send_bytes = (size_t)mine_n * element;
        s->recv = len > 0 ? (char *)data + (size_t)first * element : NULL;
        s->recv_bytes = (size_t)len * element;
        ++used;
    }
    UPIPE_TRY(upipe_comm_start(c, comm, comm->list, used));
    return upipe_comm_wait(c, comm);
}

/* upipe_all_gather -- every rank receives every rank's slice
 *   data    n elements of `element` bytes, the same on all ranks: this rank's slice is read, the others are
 *           written
 *   bytes   sends its slice to each of the others
 *   errors  ARG (n < 0, or a transfer in progress: nothing happens); others as upipe_comm_wait, and for these
 *           the team is aborted
 */
UPIPE_API upipe_status upipe_all_gather(upipe_ctx *c, void *data, int64_t n, size_t element)
{
    const int64_t mark = upipe_mem_mark(c->mem);
    int64_t mine;
    upipe_status status;
    if (n < 0) return upipe_fail(&c->err, UPIPE_ERR_ARG, "a gather of %lld elements", (long long)n);
    UPIPE_TRY(upipe_ctx_check(c));
    UPIPE_TRY(upi_comm_idle(c, c->team));
    if (n == 0 || c->team->ranks == 1) return UPIPE_OK;
    upipe_reduce_slice(n, c->team->rank, c->team->ranks, &mine);
    status = upi_gather(c, c->team, data, (const char *)data + (size_t)mine * element, n, element);
    return status == UPIPE_OK ? UPIPE_OK : upipe_unwind(c, status, mark);
}

/* upipe_all_reduce -- every rank receives the sum over ranks: a reduce-scatter, then an all-gather
 *   data    n f32 elements, the same n on all ranks; replaced by the sum
 *   bytes   sends about 2 * 4 * n * (ranks - 1) / ranks; allocates upipe_reduce_bytes
 *   errors  ARG (n < 0, or a transfer in progress: nothing happens), MEMORY; others as upipe_comm_wait, and
 *           for these the team is aborted
 */
UPIPE_API upipe_status upipe_all_reduce(upipe_ctx *c, float *data, int64_t n)
{
    UPIPE_TRY(upipe_reduce_scatter(c, data, n));
    return upipe_all_gather(c, data, n, 4);
}

#endif

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

/* upipe_reduce_bytes -- what upipe_reduce_scatter and upipe_all_reduce allocate in the pool */
UPIPE_API size_t upipe_reduce_bytes(int64_t n, int ranks)
{
    int64_t first, piece = upipe_reduce_slice(n, 0, ranks, &first);
    if (ranks == 1) return 0;
    return (size_t)((piece < UPIPE_REDUCE_STRIP ? piece : (int64_t)UPIPE_REDUCE_STRIP) * ranks) * 4;
}

/* Strip `at` of the rank's slice: at most UPIPE_REDUCE_STRIP elements, perhaps none. */
UPIPE_API int64_t upi_reduce_strip(int64_t n, int rank, int ranks, int64_t at, int64_t *first)
{
    int64_t count = upipe_reduce_slice(n, rank, ranks, first) - at;
    *first += at;
    return count < 0 ? 0 : count < UPIPE_REDUCE_STRIP ? count : (int64_t)UPIPE_REDUCE_STRIP;
}

UPIPE_API upipe_status upi_reduce_scatter(upipe_ctx *c, float *data, int64_t n)
{
    upipe_comm *team = c->team;
    int64_t first, slice = upipe_reduce_slice(n, 0, team->ranks, &first), at; /* no rank's slice is longer */
    int64_t piece = slice < UPIPE_REDUCE_STRIP ? slice : (int64_t)UPIPE_REDUCE_STRIP;
    void *buf;
    int p, used;
    UPIPE_TRY(upipe_mem_alloc(c->mem, &buf, upipe_reduce_bytes(n, team->ranks), "sum", &c->err));
    for (at = 0; at < slice; at += piece) {
        int64_t mine, mine_n = upi_reduce_strip(n, team->rank, team->ranks, at, &mine);
        for (p = 0, used = 0; p < team->ranks; ++p) {
            int64_t len = upi_reduce_strip(n, p, team->ranks, at, &first);
            upipe_msg *s = &team->list[used];
            if (len == 0 && mine_n == 0) continue;
            memset(s, 0, sizeof *s);
            s->peer = p;
            s->count = 1;
            s->send = len > 0 ? data + first : NULL;
            s->send_bytes = (size_t)len * 4;
            s->recv = (float *)buf + p * piece;
            s->recv_bytes = (size_t)mine_n * 4;
            ++used;
        }
        UPIPE_TRY(upipe_comm_start(c, team, team->list, used));
        UPIPE_TRY(upipe_comm_wait(c, team));
        if (mine_n > 0)
            UPIPE_TRY(c->ops->sum(c, upipe_view_packed(data + mine, UPIPE_F32, 1, 1, (int32_t)mine_n),
                                  (const float *)buf, piece, team->ranks, 0));
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
    int64_t mark = upipe_mem_mark(c->mem);
    upipe_status s;
    if (n < 0) return upipe_fail(&c->err, UPIPE_ERR_ARG, "a sum of %lld elements", (long long)n);
    UPIPE_TRY(upipe_ctx_check(c));
    UPIPE_TRY(upi_comm_idle(c, c->team));
    if (n == 0 || c->team->ranks == 1) return UPIPE_OK;
    s = upi_reduce_scatter(c, data, n);
    return s == UPIPE_OK ? UPIPE_OK : upipe_unwind(c, s, mark);
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
    upipe_comm *team = c->team;
    int64_t mine, mine_n, first, mark = upipe_mem_mark(c->mem);
    upipe_status status;
    int p, used = 0;
    if (n < 0) return upipe_fail(&c->err, UPIPE_ERR_ARG, "a gather of %lld elements", (long long)n);
    UPIPE_TRY(upipe_ctx_check(c));
    UPIPE_TRY(upi_comm_idle(c, team));
    mine_n = upipe_reduce_slice(n, team->rank, team->ranks, &mine);
    for (p = 0; p < team->ranks; ++p) {
        int64_t len = upipe_reduce_slice(n, p, team->ranks, &first);
        upipe_msg *s = &team->list[used];
        if (p == team->rank || (len == 0 && mine_n == 0)) continue;
        memset(s, 0, sizeof *s);
        s->peer = p;
        s->count = 1;
        s->send = mine_n > 0 ? (char *)data + (size_t)mine * element : NULL;
        s->send_bytes = (size_t)mine_n * element;
        s->recv = len > 0 ? (char *)data + (size_t)first * element : NULL;
        s->recv_bytes = (size_t)len * element;
        ++used;
    }
    if (n == 0 || team->ranks == 1) return UPIPE_OK;
    status = upipe_comm_start(c, team, team->list, used);
    if (status == UPIPE_OK) status = upipe_comm_wait(c, team);
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

/* upipe_a2a.h -- sequence <-> heads without packing; slots of final_out; sums over ranks        layer 3
 *
 * Layouts are chosen so that the exchange only moves whole blocks:
 *
 *     send    [block][batch][T][n][d]    tokens of this rank; a block holds the n heads of one rank
 *     heads   [batch][S][n][d]           all tokens of this rank's heads; those of rank p begin at its first one
 *     slots   [stage][rank][batch][T][n][d]     final_out, stage-major: slot i is a send buffer of stage i
 *
 * A projection writes the send layout directly (strided-batched products), and a slot has the size of Q',
 * so it can hold Q' before it holds O. n is m where heads divide; S is the team's part where there is a ring.
 */
#ifndef UPIPE_A2A_H
#define UPIPE_A2A_H

#include "upipe_comm.h"
#include "upipe_mem.h"
#include "upipe_ops.h"
#include "upipe_plan.h"

/* An exchange between start and wait ends with the failure: then nobody reads its buffers any more, or comm->quarantine
 * says so. */
UPIPE_API void upi_abandon(upipe_ctx *c, upipe_comm *comm)
{
    const upipe_err first = c->err; /* the first failure is the one that tells */
    if (comm != NULL && comm->started) upipe_comm_wait(c, comm);
    c->err = first;
}

/* upipe_unwind -- after a failure: team and ring learn of it, the stream is drained, so that no work of this rank
 *               is left that touches the pool, and the pool goes back to the mark. A stream that may be stuck
 *               behind a peer is not waited for: then everything in the pool stays
 *
 * Where a peer may still be reading, no block of this pool may be used again before upipe_mem_release: any of
 * them may be a send buffer.
 */
UPIPE_API upipe_status upipe_unwind(upipe_ctx *c, upipe_status s, int64_t mark)
{
    upipe_err first;
    upipe_fail_reason(&c->err, s);
    upipe_comm_abort(c->team, c->err.text);
    upipe_comm_abort(c->ring, c->err.text);
    upi_abandon(c, c->team);
    upi_abandon(c, c->ring);
    first = c->err;
    if (!((c->team != NULL && c->team->stuck) || (c->ring != NULL && c->ring->stuck)) &&
        c->ops->sync(c) != UPIPE_OK)
        c->err = first;
    if ((c->team != NULL && c->team->quarantine) || (c->ring != NULL && c->ring->quarantine))
        upipe_mem_quarantine(c->mem, 0);
    else
        upipe_mem_rewind(c->mem, mark);
    return s;
}

/* One peer's part of an exchange; nothing where it has none. */
UPIPE_API void upi_msg_add(upipe_msg *s, int *n, int peer, int64_t batch, const void *send,
                               size_t send_bytes, size_t send_step, void *recv, size_t recv_bytes,
                               size_t recv_step)
{
    if (send_bytes == 0 && recv_bytes == 0) return;
    s += (*n)++;
    s->peer = peer;
    s->count = batch;
    s->send = send_bytes > 0 ? send : NULL;
    s->recv = recv_bytes > 0 ? recv : NULL;
    s->send_bytes = send_bytes;
    s->recv_bytes = recv_bytes;
    s->send_step = send_step;
    s->recv_step = recv_step;
}

UPIPE_API upipe_status upi_a2a_check(upipe_ctx *c, const upipe_plan *p)
{
    if (c->team->ranks != p->desc.ranks || (c->team->rank != p->desc.rank && !upipe_plan_even(p)))
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "a plan for rank %d of %d on rank %d of a team of %d",
                        p->desc.rank, p->desc.ranks, c->team->rank, c->team->ranks);
    return upi_comm_idle(c, c->team);
}

/* upipe_a2a_to_heads -- trade tokens for heads (the paper's inp_all_to_all)
 *   dst    [batch][S][n]       this rank's n heads of the stage; tokens of rank r begin at its first one
 *   src    [block][batch][T][n']  a block for each rank, in order, of the n' heads that the rank gets; one for several
 *          neighbours that get the same (upipe_plan_offset says where)
 *   plan, stage, which   whose heads: UPIPE_A2A_Q or UPIPE_A2A_KV
 *   each   bytes of one token and head
 *   bytes  as upipe_plan_sent_stage counts; dst does not overlap src
 *   order  returns when dst is complete and src is free
 *   errors ARG (a plan of another team or rank), others as upipe_comm_wait
 *   paper  sections 3.1 and 3.3
 */
UPIPE_API upipe_status upipe_a2a_to_heads(upipe_ctx *c, void *dst, const void *src, const upipe_plan *p,
                                          int stage, upipe_a2a_heads which, size_t each)
{
    upipe_comm *team = c->team;
    const int mine = upipe_plan_part(p, which, stage, team->rank).count;
    const int64_t batch = p->desc.batch;
    upipe_span before = upi_span_make(0, 0);
    int r, used = 0;
    int64_t first, at = 0;
    UPIPE_TRY(upi_a2a_check(c, p));
    for (r = 0; r < team->ranks; ++r) {
        upipe_span s = upipe_plan_part(p, which, stage, r);
        size_t theirs = (size_t)(upipe_plan_tokens(p, r, &first) * mine) * each;
        size_t block = (size_t)(p->local * s.count) * each;
        if (r > 0 && !upi_same_block(which, before, s)) at += before.count;
        before = s;
        upi_msg_add(team->list, &used, r, batch, upipe_offset(src, (size_t)(at * p->rows) * each), block,
                        block, upipe_offset(dst, (size_t)(first * mine) * each), theirs,
                        (size_t)(p->seq * mine) * each);
    }
    UPIPE_TRY(upipe_comm_start(c, team, team->list, used));
    return upipe_comm_wait(c, team);
}

/* upipe_a2a_to_tokens -- trade heads for tokens (the paper's out_all_to_all)
 *   dst    [rank][batch][T][n']  from each rank its n' heads of this rank's tokens
 *   src    [batch][S][n]       this rank's n heads; tokens go to their ranks
 *   which  UPIPE_A2A_Q or UPIPE_A2A_DKV
 *   plan, stage, each, bytes, order, errors    as upipe_a2a_to_heads
 */
UPIPE_API upipe_status upipe_a2a_to_tokens(upipe_ctx *c, void *dst, const void *src, const upipe_plan *p,
                                           int stage, upipe_a2a_heads which, size_t each)
{
    upipe_comm *team = c->team;
    const int mine = upipe_plan_part(p, which, stage, team->rank).count;
    const int64_t batch = p->desc.batch;
    int r, used = 0;
    int64_t first, at = 0;
    UPIPE_TRY(upi_a2a_check(c, p));
    for (r = 0; r < team->ranks; ++r) {
        int heads = upipe_plan_part(p, which, stage, r).count;
        size_t theirs = (size_t)(upipe_plan_tokens(p, r, &first) * mine) * each;
        size_t block = (size_t)(p->local * heads) * each;
        upi_msg_add(team->list, &used, r, batch, upipe_offset(src, (size_t)(first * mine) * each), theirs,
                        (size_t)(p->seq * mine) * each, upipe_offset(dst, (size_t)(at * p->rows) * each), block,
                        block);
        at += heads;
    }
    UPIPE_TRY(upipe_comm_start(c, team, team->list, used));
    return upipe_comm_wait(c, team);
}

/* ---- sums over ranks: each owns a slice ---- */

enum { UPIPE_REDUCE_STRIP = 16384 }; /* elements that a rank sums at a time */

/* upipe_reduce_slice -- the part of n elements that a rank owns: [*first, *first + result), ceil(n / ranks) or
 *                    what is left */
UPIPE_API int64_t upipe_reduce_slice(int64_t n, int rank, int ranks, int64_t *first)
{
    int64_t piece = n / ranks + (n % ranks != 0), begin = piece * rank;
    if (begin > n) begin = n;
    *first = begin;
    return n - begin < piece ? n - begin : piece;
}

/* upipe_reduce_bytes -- what upipe_reduce_scatter and upipe_all_reduce take from the pool */
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
    int64_t first, slice = upipe_reduce_slice(n, 0, team->ranks, &first), at; /* nobody's is longer */
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

/* upipe_reduce_scatter -- every rank's slice becomes the sum over ranks, added in rank order: the same
 *                             bits on every transport. The rest of data stays as it was
 *   data    n f32 elements, the same n on all ranks; slices as upipe_reduce_slice
 *   bytes   sends 4 * (n - its slice); takes upipe_reduce_bytes from the pool
 *   errors  ARG (n < 0, or an exchange is under way: nothing happens), MEMORY; others as upipe_comm_wait,
 *           and for these the team is aborted
 */
UPIPE_API upipe_status upipe_reduce_scatter(upipe_ctx *c, float *data, int64_t n)
{
    int64_t mark = upipe_mem_mark(c->mem);
    upipe_status s;
    if (n < 0) return upipe_fail(&c->err, UPIPE_ERR_ARG, "a sum of %lld elements", (long long)n);
    UPIPE_TRY(upi_comm_idle(c, c->team));
    if (n == 0 || c->team->ranks == 1) return UPIPE_OK;
    s = upi_reduce_scatter(c, data, n);
    return s == UPIPE_OK ? UPIPE_OK : upipe_unwind(c, s, mark);
}

/* upipe_all_gather -- every rank gets every rank's slice
 *   data    n elements of `element` bytes, the same on all ranks: the own slice is read, the others are
 *           written
 *   bytes   sends its slice to each of the others
 *   errors  ARG (n < 0, or an exchange is under way: nothing happens); others as upipe_comm_wait, and for
 *           these the team is aborted
 */
UPIPE_API upipe_status upipe_all_gather(upipe_ctx *c, void *data, int64_t n, size_t element)
{
    upipe_comm *team = c->team;
    int64_t mine, mine_n, first, mark = upipe_mem_mark(c->mem);
    upipe_status status;
    int p, used = 0;
    if (n < 0) return upipe_fail(&c->err, UPIPE_ERR_ARG, "a gather of %lld elements", (long long)n);
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

/* upipe_all_reduce -- every rank gets the sum over ranks, added in rank order: a reduce-scatter, and a gather
 *   data    n f32 elements, the same n on all ranks; replaced by the sum
 *   bytes   sends about 2 * 4 * n * (ranks - 1) / ranks; takes upipe_reduce_bytes from the pool
 *   errors  ARG (n < 0, or an exchange is under way: nothing happens), MEMORY; others as upipe_comm_wait,
 *           and for these the team is aborted
 */
UPIPE_API upipe_status upipe_all_reduce(upipe_ctx *c, float *data, int64_t n)
{
    UPIPE_TRY(upipe_reduce_scatter(c, data, n));
    return upipe_all_gather(c, data, n, 4);
}

/* ---- slots ---- */

enum { UPIPE_SLOT_EMPTY, UPIPE_SLOT_LENT, UPIPE_SLOT_FULL };

/* upipe_slots -- final_out or its gradient, [stage][rank][batch][T][m][d], with the state of each slot
 *
 *   EMPTY  lend   LENT   fill   FULL   drain   EMPTY
 *
 * Forward: slot i is lent to Q', then filled with O. Backward: the slot of dO is drained as dO leaves, and
 * lent to dQ.
 */
typedef struct upipe_slots {
    char *data;
    size_t slot_bytes;
    int n;
    unsigned char state[UPIPE_STAGES_MAX];
} upipe_slots;

/* n slots of slot_bytes each at data, all in the given state. */
UPIPE_API void upipe_slots_init(upipe_slots *s, void *data, size_t slot_bytes, int n, int state)
{
    assert(n >= 0 && n <= UPIPE_STAGES_MAX);
    memset(s, 0, sizeof *s);
    s->data = (char *)data;
    s->slot_bytes = slot_bytes;
    s->n = n;
    memset(s->state, state, (size_t)n);
}

UPIPE_API upipe_status upi_slot_move(upipe_slots *s, int i, int from, int to, void **out, upipe_err *e)
{
    static const char *const names[] = {"empty", "lent", "full"};
    if (out != NULL) *out = NULL;
    if (i < 0 || i >= s->n) return upipe_fail(e, UPIPE_ERR_ARG, "slot %d of %d", i, s->n);
    if (s->state[i] != from)
        return upipe_fail(e, UPIPE_ERR_ARG, "slot %d is %s, not %s", i, names[s->state[i]], names[from]);
    s->state[i] = (unsigned char)to;
    if (out != NULL) *out = s->data + (size_t)i * s->slot_bytes;
    return UPIPE_OK;
}

/* The empty slot's space, to be written. Errors: ARG where the slot is not empty. */
UPIPE_API upipe_status upipe_slot_lend(upipe_slots *s, int i, void **out, upipe_err *e)
{
    return upi_slot_move(s, i, UPIPE_SLOT_EMPTY, UPIPE_SLOT_LENT, out, e);
}

/* The lent slot holds its result now. Errors: ARG where the slot is not lent. */
UPIPE_API upipe_status upipe_slot_fill(upipe_slots *s, int i, upipe_err *e)
{
    return upi_slot_move(s, i, UPIPE_SLOT_LENT, UPIPE_SLOT_FULL, NULL, e);
}

/* The full slot's contents, read for the last time; it is empty from now on. Errors: ARG where it is not
 * full. */
UPIPE_API upipe_status upipe_slot_drain(upipe_slots *s, int i, void **out, upipe_err *e)
{
    return upi_slot_move(s, i, UPIPE_SLOT_FULL, UPIPE_SLOT_EMPTY, out, e);
}

#endif

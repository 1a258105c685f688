/* upipe_a2a.h -- both all-to-alls of the paper, which never pack, and the slots of final_out
 *
 * Layouts are chosen so that both all-to-alls move whole blocks:
 *
 *     send    [block][batch][T][n][d]           tokens of this rank; a block holds the n heads of one rank
 *     heads   [batch][S][n][d]                  all tokens of this rank's heads; those of rank p at its first
 *     slots   [stage][rank][batch][T][n][d]     final_out, stage-major: slot i is a send buffer of stage i
 *
 * A projection writes the send layout directly (strided-batched products). A slot has the size of Q', so it
 * holds Q' before it holds O. n is m where heads divide evenly. With a ring, S is the team's part of the
 * sequence.
 */
#ifndef UPIPE_A2A_H
#define UPIPE_A2A_H

#include "upipe_comm.h"
#include "upipe_plan.h"

/* ---- the send layout: which heads lie where ---- */

/* upi_head_run -- equal blocks of a buffer in send layout: [blocks][batch][T][heads][dim], from head `offset` of
 *                 the buffer on
 *
 * Block b holds the heads first + b * stride + (0 .. heads - 1). The products of all blocks of a run are one
 * strided-batched call. Where heads divide evenly, a stage's buffer is one run.
 */
typedef struct upi_head_run {
    int blocks, heads, first, stride, offset;
} upi_head_run;

/* A run of all its fields, at the start of the buffer. */
UPIPE_API upi_head_run upi_head_run_make(int blocks, int heads, int first, int stride)
{
    upi_head_run h;
    h.blocks = blocks;
    h.heads = heads;
    h.first = first;
    h.stride = stride;
    h.offset = 0;
    return h;
}

/* All key/value heads in natural order, [Hkv][batch][T][dim]. */
UPIPE_API upi_head_run upi_head_run_all_kv(const upipe_plan *p)
{
    return upi_head_run_make(p->desc.kv_heads, 1, 0, 1);
}

/* upi_head_run_next -- the runs of a stage's send buffer, one after the other
 *   rank    in and out: the rank with which the next run begins; 0 before the first call
 *   run     in and out: the next run begins in the buffer where the previous one ended
 * Returns 0 after the last one.
 */
UPIPE_API int upi_head_run_next(const upipe_plan *p, upipe_a2a_heads which, int stage, int *rank,
                                upi_head_run *run)
{
    upipe_head_range before = upi_head_range_make(0, 0), s;
    int end = 0, r;
    if (*rank > 0) {
        before = upipe_plan_part(p, which, stage, *rank - 1);
        end = run->offset + run->blocks * run->heads;
    }
    *run = upi_head_run_make(0, 0, 0, 1);
    run->offset = end;
    for (r = *rank; r < p->desc.ranks; ++r, before = s) {
        s = upipe_plan_part(p, which, stage, r);
        if (s.count == 0 || upi_plan_same_block(which, before, s)) continue;
        if (run->blocks == 0) {
            run->first = s.first;
            run->heads = s.count;
        } else if (s.count != run->heads || s.first < run->first ||
                   (run->blocks > 1 && s.first != run->first + run->blocks * run->stride)) {
            break;
        } else if (run->blocks == 1) {
            run->stride = s.first - run->first;
        }
        ++run->blocks;
    }
    *rank = r;
    return run->blocks > 0;
}

/* A run as a batch of matrices [rows][heads * dim], one a block. */
UPIPE_API upipe_view upi_head_run_matrix(const upipe_plan *p, void *data, upi_head_run h, int dim)
{
    int32_t width = h.heads * dim;
    return upipe_view_make(upipe_offset(data, upipe_plan_rows_bytes(p, h.offset, dim)), p->desc.dtype,
                           p->rows, width, h.blocks, p->rows * width, width);
}

/* ---- natural order, and the send layout ---- */

/* A run of a buffer in send layout, and the same heads of a tensor in natural order; `to_run` says which one is
 * written.
 *   heads  [rows][H or Hkv][dim], of any strides and type
 */
UPIPE_API upipe_status upi_head_run_copy(upipe_ctx *c, const upipe_plan *p, void *data, upi_head_run h,
                                         upipe_view heads, int to_run)
{
    upipe_view block = upipe_view_packed(upi_head_run_matrix(p, data, h, heads.d).data, p->desc.dtype,
                                         p->rows, h.heads, heads.d);
    const size_t bytes = upipe_plan_rows_bytes(p, h.heads, heads.d);
    int b;
    for (b = 0; b < h.blocks; ++b, block.data = (char *)block.data + bytes) {
        upipe_view own = heads;
        own.data = upipe_view_at(heads, 0, h.first + b * h.stride);
        own.h = h.heads;
        UPIPE_TRY(c->ops->cast(c, to_run ? block : own, to_run ? own : block));
    }
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_a2a_reorder(upipe_ctx *c, const upipe_plan *p, void *blocks, int stage,
                                       upipe_a2a_heads which, upipe_view heads, int to_blocks)
{
    const int all = p == NULL ? 0 : which == UPIPE_A2A_Q ? p->desc.heads : p->desc.kv_heads;
    upi_head_run h;
    int rank = 0;
    if (p == NULL || heads.data == NULL) return upipe_fail(&c->err, UPIPE_ERR_ARG, "plan or heads are NULL");
    if (which == UPIPE_A2A_DKV || stage < 0 || stage >= p->stages)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "stage %d of %d, of %s", stage, p->stages,
                          which == UPIPE_A2A_DKV ? "DKV, where several blocks may hold shares of one head"
                                                 : "Q or KV");
    if (heads.n != p->rows || heads.h != all)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "heads in natural order are [%lld][%d], not [%lld][%d]",
                          (long long)p->rows, all, (long long)heads.n, heads.h);
    while (upi_head_run_next(p, which, stage, &rank, &h))
        UPIPE_TRY(upi_head_run_copy(c, p, blocks, h, heads, to_blocks));
    return UPIPE_OK;
}

/* upipe_a2a_pack -- one stage's heads, from natural order into the send layout
 *   send    [block][batch][T][n][dim] of the plan's type, written: what upipe_a2a_to_heads sends. It has
 *           upipe_plan_heads_sent(plan, which, stage) heads
 *   stage   of the plan
 *   which   UPIPE_A2A_Q (Q, and dO, which goes the same way), or UPIPE_A2A_KV (K and V)
 *   heads   [rows][H or Hkv][dim] view of any strides and type; dim is the view's
 *   errors  ARG
 */
UPIPE_API upipe_status upipe_a2a_pack(upipe_ctx *c, void *send, const upipe_plan *p, int stage,
                                      upipe_a2a_heads which, upipe_view heads)
{
    return upi_a2a_reorder(c, p, send, stage, which, heads, 1);
}

/* upipe_a2a_unpack -- the reverse: one stage's heads, to natural order
 *   heads   [rows][H or Hkv][dim] view of any strides and type; the stage's heads of it are written
 *   blocks  [rank][batch][T][n][dim] of the plan's type: what upipe_a2a_to_tokens has received, for
 *           UPIPE_A2A_Q (O and dQ). With UPIPE_A2A_KV blocks in send layout, where ranks share blocks
 *   errors  ARG
 */
UPIPE_API upipe_status upipe_a2a_unpack(upipe_ctx *c, upipe_view heads, const upipe_plan *p, int stage,
                                        upipe_a2a_heads which, const void *blocks)
{
    return upi_a2a_reorder(c, p, (void *)(uintptr_t)blocks, stage, which, heads, 0);
}

/* ---- both all-to-alls ---- */

/* Of what a call's plan must be this rank's; UPI_PLAN_WHOLE: and as upipe_plan_init made it. */
enum { UPI_PLAN_TEAM = 1, UPI_PLAN_RING = 2, UPI_PLAN_WHOLE = 4 };

/* ARG unless the plan is all of that: another rank's has other positions, and perhaps other heads. */
UPIPE_API upipe_status upi_plan_check(upipe_ctx *c, const upipe_plan *p, int of)
{
    const upipe_comm *team = c->team, *ring = c->ring;
    const upipe_plan_desc *d = p != NULL ? &p->desc : NULL;
    if (d == NULL || (of & UPI_PLAN_TEAM && team == NULL))
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "%s is NULL", d == NULL ? "the plan" : "ctx->team");
    if (of & UPI_PLAN_WHOLE && p->seal != upipe_hash_bytes(UPIPE_HASH, p, offsetof(upipe_plan, seal)))
        return upipe_fail(&c->err, UPIPE_ERR_ARG,
                          "the plan was changed after upipe_plan_init, or not made by it");
    if (of & UPI_PLAN_TEAM && team->ranks != d->ranks)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "a plan for %d ranks on a team of %d", d->ranks,
                          team->ranks);
    if (of & UPI_PLAN_TEAM && team->rank != d->rank)
        return upipe_fail(&c->err, UPIPE_ERR_ARG,
                          "a plan for rank %d of %d on rank %d of a team of %d: each rank has its own",
                          d->rank, d->ranks, team->rank, team->ranks);
    if (!(of & UPI_PLAN_RING) || (ring != NULL && ring->ranks == d->ring && ring->rank == d->ring_rank))
        return UPIPE_OK;
    return upipe_fail(&c->err, UPIPE_ERR_ARG, "a plan for ring rank %d of %d on rank %d of a ring of %d",
                      d->ring_rank, d->ring, ring != NULL ? ring->rank : 0, ring != NULL ? ring->ranks : 1);
}

/* Both all-to-alls' messages: this rank's tokens of a rank's heads, a block, and its tokens of this rank's heads.
 *   blocks     [block][batch][T][n'], in the order of ranks; those with the same heads share one
 *   heads      [batch][S][n]; tokens of rank r begin at its first one
 *   to_heads   nonzero: blocks are sent, heads received; otherwise the reverse
 * Returns how many. */
UPIPE_API int upi_a2a_list(upipe_comm *team, const upipe_plan *p, int stage, upipe_a2a_heads which,
                           size_t token_bytes, const void *blocks, const void *heads, int to_heads)
{
    const size_t mine = (size_t)upipe_plan_part(p, which, stage, team->rank).count * token_bytes;
    const size_t row = (size_t)p->team_tokens * mine;
    upipe_head_range before = upi_head_range_make(0, 0);
    int64_t first, at = 0;
    int r, used = 0;
    for (r = 0; r < team->ranks; ++r) {
        const upipe_head_range part = upipe_plan_part(p, which, stage, r);
        const size_t theirs = (size_t)upi_plan_tokens(p, r, &first) * mine;
        const size_t block = (size_t)(p->local * part.count) * token_bytes;
        void *in_blocks, *in_heads = upipe_offset(heads, (size_t)first * mine);
        if (r > 0 && !upi_plan_same_block(which, before, part)) at += before.count;
        before = part;
        in_blocks = upipe_offset(blocks, (size_t)(at * p->rows) * token_bytes);
        if (to_heads)
            upipe_msg_add(team->list, &used, r, p->desc.batch, in_blocks, block, block, in_heads, theirs,
                          row);
        else
            upipe_msg_add(team->list, &used, r, p->desc.batch, in_heads, theirs, row, in_blocks, block,
                          block);
    }
    return used;
}

/* upipe_a2a_to_heads -- trade tokens for heads (the paper's inp_all_to_all)
 *   dst    [batch][S][n]          this rank's n heads of the stage; tokens of rank r begin at its first one
 *   src    [block][batch][T][n']  one block for each rank, in order, with the n' heads of that rank.
 *                                 Neighbouring ranks with the same heads share a block (upipe_plan_offset
 *                                 gives its place). Does not overlap dst
 *   which  UPIPE_A2A_Q or UPIPE_A2A_KV: whose heads of `plan` and `stage`
 *   token_bytes   bytes of one token and head
 *   bytes  as upi_plan_sent_stage counts
 *   order  when it returns dst is complete, and src may be written again, for what comes behind on ctx->stream
 *   errors ARG (a plan of another team or rank), others as upipe_comm_wait
 *   paper  sections 3.1 and 3.3
 */
UPIPE_API upipe_status upipe_a2a_to_heads(upipe_ctx *c, void *dst, const void *src, const upipe_plan *p,
                                          int stage, upipe_a2a_heads which, size_t token_bytes)
{
    upipe_comm *team = c->team;
    UPIPE_TRY(upi_plan_check(c, p, UPI_PLAN_TEAM));
    UPIPE_TRY(upipe_comm_idle(c, team));
    UPIPE_TRY(
        upipe_comm_start(c, team, team->list, upi_a2a_list(team, p, stage, which, token_bytes, src, dst, 1)));
    return upipe_comm_wait(c, team);
}

/* upipe_a2a_to_tokens -- trade heads for tokens (the paper's out_all_to_all)
 *   dst    [rank][batch][T][n']   from each rank its n' heads of this rank's tokens
 *   src    [batch][S][n]          this rank's n heads; each token goes to its rank
 *   which  UPIPE_A2A_Q or UPIPE_A2A_DKV
 *   plan, stage, token_bytes, bytes, order, errors    as upipe_a2a_to_heads
 */
UPIPE_API upipe_status upipe_a2a_to_tokens(upipe_ctx *c, void *dst, const void *src, const upipe_plan *p,
                                           int stage, upipe_a2a_heads which, size_t token_bytes)
{
    upipe_comm *team = c->team;
    UPIPE_TRY(upi_plan_check(c, p, UPI_PLAN_TEAM));
    UPIPE_TRY(upipe_comm_idle(c, team));
    UPIPE_TRY(
        upipe_comm_start(c, team, team->list, upi_a2a_list(team, p, stage, which, token_bytes, dst, src, 0)));
    return upipe_comm_wait(c, team);
}

/* ---- slots ---- */

enum { UPIPE_SLOT_EMPTY, UPIPE_SLOT_LENT, UPIPE_SLOT_FULL };

/* upipe_slots -- final_out or its gradient, [stage][rank][batch][T][m][d], with the state of each slot
 *
 *     EMPTY -> lend -> LENT -> fill -> FULL -> drain -> EMPTY
 *
 * Forward: slot i is lent to Q', then filled with O. Backward: the slot of dO is drained when dO is sent, then
 * lent to Q', and filled with dQ.
 *
 * Each of the n slots has a buffer of its own, unless `buffers` is smaller: then slot i uses buffer i % buffers, which
 * the slot before must have left empty.
 */
typedef struct upipe_slots {
    char *data;
    size_t slot_bytes;
    int n, buffers;
    unsigned char state[UPIPE_STAGES_MAX];
} upipe_slots;

/* n slots of slot_bytes each at data, all in the given state. */
UPIPE_API void upipe_slots_init(upipe_slots *s, void *data, size_t slot_bytes, int n, int state)
{
    assert(n >= 0 && n <= UPIPE_STAGES_MAX);
    memset(s, 0, sizeof *s);
    s->data = (char *)data;
    s->slot_bytes = slot_bytes;
    s->n = s->buffers = n;
    memset(s->state, state, (size_t)n);
}

/* upi_slot_at -- the memory of slot i, whatever its state */
UPIPE_API char *upi_slot_at(const upipe_slots *s, int i)
{
    return s->data + (size_t)(i % s->buffers) * s->slot_bytes;
}

UPIPE_API upipe_status upi_slot_move(upipe_slots *s, int i, int from, int to, void **out, upipe_err *e)
{
    static const char *const names[] = {"empty", "lent", "full"};
    unsigned char *state = &s->state[s->buffers > 0 ? i % s->buffers : 0];
    if (out != NULL) *out = NULL;
    if (i < 0 || i >= s->n) return upipe_fail(e, UPIPE_ERR_ARG, "slot %d of %d", i, s->n);
    if (*state != from)
        return upipe_fail(e, UPIPE_ERR_ARG, "slot %d is %s, not %s", i, names[*state], names[from]);
    *state = (unsigned char)to;
    if (out != NULL) *out = upi_slot_at(s, i);
    return UPIPE_OK;
}

/* Lends the empty slot: *out is its memory, to be written. Errors: ARG where the slot is not empty. */
UPIPE_API upipe_status upi_slot_lend(upipe_slots *s, int i, void **out, upipe_err *e)
{
    return upi_slot_move(s, i, UPIPE_SLOT_EMPTY, UPIPE_SLOT_LENT, out, e);
}

/* The lent slot is full: it holds its result. Errors: ARG where the slot is not lent. */
UPIPE_API upipe_status upi_slot_fill(upipe_slots *s, int i, upipe_err *e)
{
    return upi_slot_move(s, i, UPIPE_SLOT_LENT, UPIPE_SLOT_FULL, NULL, e);
}

/* Drains the full slot: *out is its memory, to be read for the last time; the slot is empty. Errors: ARG
 * where the slot is not full. */
UPIPE_API upipe_status upi_slot_drain(upipe_slots *s, int i, void **out, upipe_err *e)
{
    return upi_slot_move(s, i, UPIPE_SLOT_FULL, UPIPE_SLOT_EMPTY, out, e);
}

/* upipe_slots_alloc -- allocates slots of the size of the plan's final_out, all in one state
 *   state   UPIPE_SLOT_EMPTY, or UPIPE_SLOT_FULL for a gradient that the caller writes (upipe_slots_scatter)
 *   errors  MEMORY
 */
UPIPE_API upipe_status upipe_slots_alloc(upipe_ctx *c, const upipe_plan *p, upipe_slots *slots, int state,
                                         const char *tag)
{
    void *data;
    if (p == NULL || slots == NULL) return upipe_fail(&c->err, UPIPE_ERR_ARG, "the plan or slots are NULL");
    UPIPE_TRY(upipe_alloc(c, &data, p->buffers.slot * (size_t)p->stages, UPIPE_USE_OUT, tag));
    upipe_slots_init(slots, data, p->buffers.slot, p->stages, state);
    return UPIPE_OK;
}

/* The heads of one stage and rank inside slots, dim elements each: a matrix [rows][n * dim]. */
UPIPE_API upipe_view upipe_slots_matrix(const upipe_plan *p, const upipe_slots *slots, int stage, int rank,
                                        int dim)
{
    const size_t before = upipe_plan_rows_bytes(p, upipe_plan_offset(p, UPIPE_A2A_Q, stage, rank), dim);
    return upipe_view_packed(upi_slot_at(slots, stage) + before, p->desc.dtype, p->rows, 1,
                             upipe_plan_q(p, stage, rank).count * dim);
}

/* upi_slots_check -- ARG unless these are slots of this plan, and all of them full; `name` is for the
 *                    sentence */
UPIPE_API upipe_status upi_slots_check(upipe_ctx *c, const upipe_plan *p, const upipe_slots *slots,
                                       const char *name)
{
    size_t bytes = p != NULL ? p->buffers.slot : 0;
    int i;
    if (p == NULL || slots == NULL || slots->data == NULL)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "%s, or its plan, is not there (consumed before?)", name);
    if (slots->n != p->stages || slots->buffers != slots->n || slots->slot_bytes != bytes)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "%s has %d slots of %zu bytes, the plan says %d of %zu",
                          name, slots->n, slots->slot_bytes, p->stages, bytes);
    for (i = 0; i < slots->n; ++i)
        if (slots->state[i] != UPIPE_SLOT_FULL)
            return upipe_fail(&c->err, UPIPE_ERR_ARG, "slot %d of %s is not full", i, name);
    return UPIPE_OK;
}

/* The same heads in slots and in natural order; `to_slots` says which one is written. */
UPIPE_API upipe_status upi_slots_reorder(upipe_ctx *c, const upipe_plan *p, const upipe_slots *slots,
                                         upipe_view natural, int to_slots)
{
    const int64_t width = p != NULL ? (int64_t)p->desc.heads * p->desc.v_dim : 0;
    int stage;
    UPIPE_TRY(upi_slots_check(c, p, slots, "slots"));
    if (natural.n != p->rows || natural.h != 1 || natural.d != width)
        return upipe_fail(&c->err, UPIPE_ERR_ARG,
                          "heads in natural order are [%lld][1][%lld], not [%lld][%d][%d]",
                          (long long)p->rows, (long long)width, (long long)natural.n, natural.h, natural.d);
    natural = upipe_view_heads(natural, p->desc.heads);
    for (stage = 0; stage < p->stages; ++stage)
        UPIPE_TRY(upi_a2a_reorder(c, p, upi_slot_at(slots, stage), stage, UPIPE_A2A_Q, natural, to_slots));
    return UPIPE_OK;
}

/* upipe_slots_gather -- dst = the contents of slots, heads in natural order
 *   dst     [rows][1][H*v_dim] view of any step and type
 *   slots   full ones of this plan
 *   errors  ARG
 */
UPIPE_API upipe_status upipe_slots_gather(upipe_ctx *c, const upipe_plan *p, upipe_view dst,
                                          const upipe_slots *slots)
{
    return upi_slots_reorder(c, p, slots, dst, 0);
}

/* upipe_slots_scatter -- the contents of slots = src
 *   slots   full ones of this plan (upipe_slots_alloc with UPIPE_SLOT_FULL)
 *   src     [rows][1][H*v_dim] view of any step and type, heads in natural order
 *   errors  ARG
 */
UPIPE_API upipe_status upipe_slots_scatter(upipe_ctx *c, const upipe_plan *p, const upipe_slots *slots,
                                           upipe_view src)
{
    return upi_slots_reorder(c, p, slots, src, 1);
}

#endif

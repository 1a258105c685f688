/* upipe_segment.h -- the sequence in segments, with the host's memory behind it: what, where, how much     layer 7
 *
 * The types, sizes and layouts of upipe_fpdt.h, which says how they are used. The sequence is cut into segments, and
 * every segment over all ranks of the team; a rank holds its part of each.
 */
#ifndef UPIPE_SEGMENT_H
#define UPIPE_SEGMENT_H

#include "upipe_step.h"

/* upipe_fpdt
 *   layer     weights and mask; its plan is not read
 *   desc      of the whole sequence, without a ring, and of this rank: desc.rank must be the team's. chunk =
 *             heads: FPDT; smaller: head chunks in sequence chunks. overlap: what passes by comes and goes on
 *             ctx->side_stream, while a segment attends
 *   segments  pi; at most tokens / ranks
 *   host      pool of the host's memory
 */
typedef struct upipe_fpdt {
    upipe_layer layer;
    upipe_plan_desc desc;
    int segments;
    upipe_mem *host;
} upipe_fpdt;

/* upipe_fpdt_saved -- what the forward leaves, in the host's memory; blocks of all segments have the size of the largest
 *   out      [segment] slots of final_out: [stage][rank][batch][T][n][v_dim]; in the backward dO, then dQ
 *   q k v    [segment][stage] Q', [segment][round] K', V'
 *   lse      f32 [segment][stage]
 *   moved    bytes between host and device so far
 */
typedef struct upipe_fpdt_saved {
    char *out, *q, *k, *v, *lse;
    int64_t moved;
} upipe_fpdt_saved;

/* upipe_fpdt_free -- gives back what the forward left in the host's pool. No peer reads there, so nothing is
 *                    quarantined
 *   errors  ARG for a block that the pool does not have
 */
UPIPE_API upipe_status upipe_fpdt_free(const upipe_fpdt *f, upipe_fpdt_saved *save, upipe_err *e)
{
    UPIPE_TRY(upipe_mem_free(f->host, save->out, e));
    UPIPE_TRY(upipe_mem_free(f->host, save->q, e));
    UPIPE_TRY(upipe_mem_free(f->host, save->k, e));
    UPIPE_TRY(upipe_mem_free(f->host, save->v, e));
    UPIPE_TRY(upipe_mem_free(f->host, save->lse, e));
    memset(save, 0, sizeof *save);
    return UPIPE_OK;
}

/* ---- segments ---- */

/* The plan of segment i, which has desc.tokens of the sequence's from upipe_cut(S, segments, i) on. Errors:
 * as upipe_plan_init, of the segment's numbers; ARG for fewer tokens than ranks in a segment, or no such
 * segment; UNSUPPORTED for a ring, the naive order, and stages without common rounds. */
UPIPE_API upipe_status upipe_fpdt_plan(const upipe_fpdt *f, int i, upipe_plan *p, upipe_err *e)
{
    upipe_plan_desc d = f->desc;
    if (f->segments < 1 || d.tokens / f->segments < (d.ranks > 0 ? d.ranks : 1))
        return upipe_fail(e, UPIPE_ERR_ARG, "%lld tokens in %d segments over %d ranks", (long long)d.tokens,
                        f->segments, d.ranks);
    if (i < 0 || i >= f->segments) return upipe_fail(e, UPIPE_ERR_ARG, "segment %d of %d", i, f->segments);
    if (d.ring > 1 || d.naive)
        return upipe_fail(e, UPIPE_ERR_UNSUPPORTED, "segments with %s",
                        d.ring > 1 ? "a ring" : "the naive order");
    d.overlap = 0; /* of stages */
    d.tokens = upipe_cut(f->desc.tokens, f->segments, i + 1) - upipe_cut(f->desc.tokens, f->segments, i);
    UPIPE_TRY(upipe_plan_init(p, &d, e));
    if (p->schedule == UPIPE_UNEVEN && p->stages > 1)
        return upipe_fail(e, UPIPE_ERR_UNSUPPORTED,
                        "segments in %d stages of %d/%d heads over %d ranks, which have no common rounds",
                        p->stages, d.heads, d.kv_heads, d.ranks);
    return UPIPE_OK;
}

/* This rank's tokens of a segment: positions in the sequence. */
UPIPE_API upipe_shard upipe_fpdt_shard(const upipe_fpdt *f, int i)
{
    const int64_t first = upipe_cut(f->desc.tokens, f->segments, i);
    upipe_shard all, mine;
    memset(&all, 0, sizeof all);
    all.step = 1;
    upi_shard_add(&all, first, upipe_cut(f->desc.tokens, f->segments, i + 1) - first);
    mine = upipe_shard_team(&all, f->desc.ranks > 0 ? f->desc.ranks : 1, f->desc.rank);
    return mine;
}

/* Sizes of the largest segment. */
typedef struct upi_fpdt_sizes {
    upipe_buffers b;
    upipe_plan_scratch s;
    size_t x, raw, delta;
    size_t kv_tokens; /* of all key/value heads at their tokens, for one element of a head each */
    int stages, rounds, steps;
} upi_fpdt_sizes;

UPIPE_API upipe_status upi_fpdt_measure(const upipe_fpdt *f, const upipe_ops *ops, upi_fpdt_sizes *z,
                                        upipe_err *e)
{
    upipe_layer layer = f->layer;
    upipe_plan p;
    int64_t last = 0;
    int i, stage, rank;
    memset(z, 0, sizeof *z);
    UPIPE_TRY(upipe_fpdt_plan(f, 0, &p, e)); /* there is one at least */
    for (i = 0; i < f->segments; ++i) {
        const int64_t n =
            upipe_cut(f->desc.tokens, f->segments, i + 1) - upipe_cut(f->desc.tokens, f->segments, i);
        upipe_plan_scratch s;
        upipe_buffers b;
        upi_heads h;
        size_t k, *to = (size_t *)(void *)&z->b;
        const size_t *from = (const size_t *)(const void *)&b;
        if (n == last) continue; /* sizes alternate between two */
        last = n;
        UPIPE_TRY(upipe_fpdt_plan(f, i, &p, e));
        b = upipe_plan_buffers(&p);
        for (k = 0; k < sizeof b / sizeof *from; ++k) to[k] = upipe_max_bytes(to[k], from[k]);
        layer.plan = &p;
        s = upipe_layer_scratch(ops, &layer, 1);
        z->s.gemm = upipe_max_bytes(z->s.gemm, s.gemm);
        z->s.attn_fwd = upipe_max_bytes(z->s.attn_fwd, s.attn_fwd);
        z->s.attn_bwd = upipe_max_bytes(z->s.attn_bwd, s.attn_bwd);
        z->s.tile_rows = s.tile_rows > z->s.tile_rows ? s.tile_rows : z->s.tile_rows;
        z->s.qk_norm = s.qk_norm;
        for (stage = 0; stage < p.stages; ++stage)
            z->delta = upipe_max_bytes(z->delta, (size_t)(p.rows * upipe_plan_buffer(&p, UPIPE_A2A_Q, stage)) * 4);
        for (stage = 0; stage < p.stages; ++stage)
            for (rank = 0; upi_next_heads(&p, UPIPE_A2A_Q, stage, &rank, &h);)
                z->raw = upipe_max_bytes(z->raw, upi_heads_bytes(&p, h, UPI_PROJ_Q));
        z->x = upipe_max_bytes(z->x, upipe_plan_unit_bytes(&p));
        z->kv_tokens = upipe_max_bytes(z->kv_tokens, upipe_plan_rows_bytes(&p, p.desc.kv_heads, 1));
    }
    z->stages = p.stages;
    z->rounds = p.schedule == UPIPE_UNEVEN ? 1 : p.rounds;
    z->steps = p.schedule == UPIPE_UNEVEN ? 1 : p.steps;
    z->b.sum_o = z->b.o / upipe_dtype_bytes(f->desc.dtype) * 4;
    z->b.sum_q = z->b.q / upipe_dtype_bytes(f->desc.dtype) * 4;
    return UPIPE_OK;
}

/* Q', dO', dQ', lse and delta of a stage and a segment: half of one block of the device's memory. */
UPIPE_API size_t upi_fpdt_fetch_bytes(const upi_fpdt_sizes *z)
{
    return z->b.q + z->b.o + z->b.sum_q + 2 * z->b.stat;
}

/* Where visitor 0 or 1 lies in the block. Both lots of lse and delta come last: rows of the others stay at
 * multiples of 16 bytes, as kernels want them. */
UPIPE_API void upi_fpdt_fetched(const upi_fpdt_sizes *z, char *bufs, int which, upipe_ring_part *part)
{
    const size_t rows = z->b.q + z->b.o + z->b.sum_q;
    part->q = bufs + (size_t)which * rows;
    part->dout = upipe_offset(part->q, z->b.q);
    part->dq = upipe_offset(part->dout, z->b.o);
    part->lse = (float *)upipe_offset(bufs, 2 * (rows + (size_t)which * z->b.stat));
    part->delta = (float *)upipe_offset(part->lse, z->b.stat);
}

/* Whether a query of segment i may see a key of segment j. */
UPIPE_API int upi_fpdt_sees(const upipe_fpdt *f, int i, int j)
{
    upipe_attn a = upi_layer_attn(&f->layer);
    int64_t b, batch = f->desc.batch > 0 ? f->desc.batch : 1;
    const int64_t tokens = f->desc.tokens, q0 = upipe_cut(tokens, f->segments, i);
    const int64_t k0 = upipe_cut(tokens, f->segments, j);
    a.q.n = upipe_cut(tokens, f->segments, i + 1) - q0;
    a.k.n = upipe_cut(tokens, f->segments, j + 1) - k0;
    for (b = 0; b < batch; ++b) {
        a.q_pos = b * tokens + q0;
        a.k_pos = b * tokens + k0;
        if (upi_ring_sees(&a)) return 1;
    }
    return 0;
}

/* The segment after `j` of those that `i` sees (of_keys), or that see `i`; -1 after the last. The own one comes first. */
UPIPE_API int upi_fpdt_next(const upipe_fpdt *f, int i, int j, int of_keys)
{
    for (j = j == i ? 0 : j + 1; j < f->segments; ++j)
        if (j != i && upi_fpdt_sees(f, of_keys ? i : j, of_keys ? j : i)) return j;
    return -1;
}

/* Whether dQ' of segment i has anything in it before segment j's turn. */
UPIPE_API int upi_fpdt_begun(const upipe_fpdt *f, int i, int j)
{
    int k;
    for (k = 0; k < j; ++k)
        if (k == i || upi_fpdt_sees(f, i, k)) return 1;
    return 0;
}

/* Block (segment i, k of n) of a buffer in the host's memory. */
UPIPE_API char *upi_fpdt_at(char *base, size_t bytes, int n, int i, int k)
{
    return base + ((size_t)i * (size_t)n + (size_t)k) * bytes;
}

/* ---- slots in the host's memory ---- */

/* upipe_fpdt_out_bytes -- of save->out and of its gradient; 0 for what upipe_fpdt_plan refuses */
UPIPE_API size_t upipe_fpdt_out_bytes(const upipe_fpdt *f, const upipe_ops *ops)
{
    upi_fpdt_sizes z;
    upipe_err e;
    if (upi_fpdt_measure(f, ops, &z, &e) != UPIPE_OK) return 0;
    return z.b.slot * (size_t)z.stages * (size_t)f->segments;
}

UPIPE_API upipe_status upi_fpdt_reorder(upipe_ctx *c, const upipe_fpdt *f, void *slots, void *natural,
                                        upipe_dtype type, int to_slots)
{
    upi_fpdt_sizes z;
    upipe_plan p;
    upipe_slots s;
    char *at = (char *)natural;
    int i, stage, rank;
    UPIPE_TRY(upi_fpdt_measure(f, c->ops, &z, &c->err));
    if (slots == NULL || natural == NULL)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "%s NULL", slots == NULL ? "the slots are" : "the heads are");
    for (i = 0; i < f->segments; ++i) {
        UPIPE_TRY(upipe_fpdt_plan(f, i, &p, &c->err));
        for (stage = 0; stage < p.stages; ++stage) {
            upipe_slots_init(&s, upi_fpdt_at((char *)slots, z.b.slot, z.stages, i, 0), z.b.slot, p.stages,
                             UPIPE_SLOT_FULL);
            for (rank = 0; rank < p.desc.ranks; ++rank) {
                upipe_view heads = upi_slot_matrix(&p, &s, stage, rank, p.desc.v_dim);
                upipe_view columns = upipe_view_packed(at, type, p.rows, 1, upi_out_width(&p));
                if (heads.d == 0) continue;
                columns.data = at + (size_t)(upipe_plan_q(&p, stage, rank).first * p.desc.v_dim) *
                                        upipe_dtype_bytes(type);
                columns.d = heads.d;
                UPIPE_TRY(c->ops->cast(c, to_slots ? heads : columns, to_slots ? columns : heads));
            }
        }
        at += (size_t)(p.rows * upi_out_width(&p)) * upipe_dtype_bytes(type);
    }
    return UPIPE_OK;
}

/* upipe_fpdt_gather -- dst = what slots in the host's memory hold, heads in natural order
 *   dst     host, [segment][batch][T][H*v_dim] of the given type
 *   slots   save->out, or its gradient
 *   errors  as upipe_fpdt_plan; ARG for NULL
 */
UPIPE_API upipe_status upipe_fpdt_gather(upipe_ctx *c, const upipe_fpdt *f, void *dst, upipe_dtype type,
                                         const void *slots)
{
    return upi_fpdt_reorder(c, f, (void *)(uintptr_t)slots, dst, type, 0);
}

/* upipe_fpdt_scatter -- the way back: slots (upipe_fpdt_out_bytes) = src. Errors as upipe_fpdt_gather */
UPIPE_API upipe_status upipe_fpdt_scatter(upipe_ctx *c, const upipe_fpdt *f, void *slots, const void *src,
                                          upipe_dtype type)
{
    return upi_fpdt_reorder(c, f, slots, (void *)(uintptr_t)src, type, 1);
}

/* ---- bytes ---- */

/* upipe_fpdt_bytes -- exact live bytes of the device by phase, and of the host's pool at its peak (the forward's results
 *                     and what the backward parks; not x, dx and dout, which are the caller's)
 *   errors  as upipe_fpdt_plan
 */
UPIPE_API upipe_status upipe_fpdt_bytes(const upipe_fpdt *f, const upipe_ops *ops, upipe_bytes *r,
                                        size_t *host, upipe_err *e)
{
    upi_fpdt_sizes z;
    upipe_plan p;
    size_t element, norm, kv, grads, tokens_grad, raw_k;
    int i;
    UPIPE_TRY(upi_fpdt_measure(f, ops, &z, e));
    UPIPE_TRY(upipe_fpdt_plan(f, 0, &p, e));
    memset(r, 0, sizeof *r);
    element = upipe_dtype_bytes(p.desc.dtype);
    kv = z.b.k + z.b.v;
    norm = z.s.qk_norm ? (size_t)((p.desc.heads + p.desc.kv_heads) * p.desc.head_dim) * 4 : 0;
    r->intermediate_fwd = kv + z.b.q + upipe_max_bytes(z.b.kv_send, z.b.send);
    r->phase[UPIPE_FWD_IN] = r->intermediate_fwd + z.x + z.s.gemm;
    r->phase[UPIPE_FWD_ATTN] = 3 * kv + z.b.q + z.b.sum_o + z.b.stat + z.s.attn_fwd;
    r->phase[UPIPE_FWD_OUT] = z.b.sum_o + z.b.stat + z.b.o + z.b.slot;

    r->phase[UPIPE_BWD_BEFORE] = norm;
    r->phase[UPIPE_BWD_OUT] = norm + 2 * z.b.slot + z.delta + upipe_max_bytes(z.b.o, z.b.stat);
    grads = z.b.dk + z.b.dv;
    r->phase[UPIPE_BWD_ATTN] = norm + kv + grads + 2 * upi_fpdt_fetch_bytes(&z) + z.s.attn_bwd;
    raw_k = z.s.qk_norm ? z.b.token_dk : 0;
    for (i = 0; i < 2; ++i) {
        size_t sum = i == 0 ? z.b.token_dk : z.b.token_dv, cast = i == 0 ? z.b.k : z.b.v;
        if (p.kv_partial) cast = z.b.partial + (upi_dkv_accumulates(&p) ? sum / element * 4 : 0);
        tokens_grad = norm + grads + z.x + sum + upipe_max_bytes(cast, (i == 0 ? raw_k : 0) + z.s.gemm);
        r->phase[UPIPE_BWD_IN] = upipe_max_bytes(r->phase[UPIPE_BWD_IN], tokens_grad);
    }
    tokens_grad = norm + z.b.sum_q + z.x + z.b.slot + upipe_max_bytes(z.b.q, (z.s.qk_norm ? z.raw : 0) + z.s.gemm);
    r->phase[UPIPE_BWD_IN] = upipe_max_bytes(r->phase[UPIPE_BWD_IN], tokens_grad);
    tokens_grad = z.b.slot * (size_t)z.stages + z.kv_tokens * (size_t)(p.desc.head_dim + p.desc.v_dim) + z.x +
           (size_t)(z.s.tile_rows * p.desc.model_dim) * 4 + z.s.gemm;
    r->phase[UPIPE_BWD_IN] = upipe_max_bytes(r->phase[UPIPE_BWD_IN], tokens_grad);
    for (i = 0; i < UPIPE_PHASES; ++i) r->peak = upipe_max_bytes(r->peak, r->phase[i]);

    *host = (z.b.slot + z.b.q + 2 * z.b.stat + z.b.o + z.b.sum_q) * (size_t)z.stages + kv * (size_t)z.rounds +
            z.kv_tokens * (size_t)(p.desc.head_dim + p.desc.v_dim);
    if (z.steps > 1) *host += grads; /* those of a round's keys and values, between its stages */
    *host *= (size_t)f->segments;
    return UPIPE_OK;
}

#endif

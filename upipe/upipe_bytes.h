/* upipe_bytes.h -- bytes of the attention block: phases, buffers, closed forms        layer 3, includes plan
 *
 * What a block takes is what its code takes: upipe_dry.h runs it over a pool that counts. The closed forms here say why.
 *
 *     upipe_even_bytes(&bytes, &plan, 0, 0, 0, 0, &err)     the same bytes as sums: Ulysses, and UPipe with even heads
 *     upipe_paper_units(UPIPE_PAPER_UPIPE, ...)             the paper's formulas
 */
#ifndef UPIPE_BYTES_H
#define UPIPE_BYTES_H

#include "upipe_mem.h"
#include "upipe_plan.h"

/* The columns of the paper's tables; peaks are kept for each. Everything else counts as OTHER. */
typedef enum upipe_phase {
    UPIPE_FWD_BEFORE,
    UPIPE_FWD_IN,   /* inp_all_to_all, with projection, QK norm and RoPE */
    UPIPE_FWD_ATTN, /* the attention kernel */
    UPIPE_FWD_OUT,  /* out_all_to_all */
    UPIPE_BWD_BEFORE,
    UPIPE_BWD_OUT,  /* dO and delta to heads */
    UPIPE_BWD_ATTN, /* the attention backward kernel */
    UPIPE_BWD_IN,   /* recomputed Q, K, V; dQ, dK, dV to tokens; weight gradients; dX */
    UPIPE_PHASES,
    UPIPE_PHASE_OTHER = UPIPE_PHASES
} upipe_phase;

/* "fwd_in" and so on. */
UPIPE_API const char *upipe_phase_name(int phase)
{
    static const char *const names[] = {"fwd_before", "fwd_in",   "fwd_attn", "fwd_out", "bwd_before",
                                        "bwd_out",    "bwd_attn", "bwd_in",   "other"};
    return names[phase >= 0 && phase < UPIPE_PHASES ? phase : UPIPE_PHASES];
}

/* From now on the pool's peaks count for this phase. */
UPIPE_API void upipe_phase_set(upipe_ctx *c, upipe_phase phase)
{
    upipe_mem_phase(c->mem, (int)phase, upipe_phase_name((int)phase));
}

/* Live bytes of one rank, x included: the largest of each phase, of all, and of Q, K, V chunks and all-to-all buffers in
 * the forward (the paper's "intermediate tensors"). */
typedef struct upipe_bytes {
    size_t phase[UPIPE_PHASES];
    size_t peak;
    size_t intermediate_fwd;
} upipe_bytes;

/* The larger of both. */
UPIPE_API size_t upipe_max_bytes(size_t a, size_t b)
{
    return a > b ? a : b;
}

/* ---- buffers ---- */

/* upipe_buffers -- the block's buffers in bytes, the largest over stages, in the storage type if not said otherwise
 *   slot           of final_out, and of its gradient: Q', O, dO or dQ of a stage
 *   send           a stage's Q before its all-to-all; O' and dQ' before theirs
 *   q o stat       Q', dQ'; O', dO'; lse, delta (f32) of this rank's heads of a stage
 *   k v            K', V' of this rank's heads
 *   kv_send        K or V before its all-to-all
 *   dk dv          gradients of K', V', f32
 *   token_dk token_dv  gradients of K, V of a stage's heads at their tokens
 *   partial        the same for several ranks' shares of them, f32
 *   lse delta      of all stages, f32
 * With a ring:
 *   all_k all_v    K', V' of the whole sequence;  all_dk, all_dv  their gradients, f32
 *   hop_k hop_v    K', V' of another ring rank
 *   sum_o sum_q    sums of O', dQ' of a stage, f32
 */
/* clang-format off */
#define UPI_BUFFERS(X)                                                                                   \
    X(slot)                                                                                              \
    X(send) X(q) X(o) X(stat) X(k) X(v) X(kv_send) X(dk) X(dv) X(token_dk) X(token_dv) X(partial) X(lse) \
        X(delta) X(all_k) X(all_v) X(all_dk) X(all_dv) X(hop_k) X(hop_v) X(sum_o) X(sum_q)
/* clang-format on */
typedef struct upipe_buffers {
#define UPI_BUFFERS_FIELD(name) size_t name;
    UPI_BUFFERS(UPI_BUFFERS_FIELD)
#undef UPI_BUFFERS_FIELD
} upipe_buffers;

/* Each buffer as large as the larger one of two plans'. */
UPIPE_API upipe_buffers upipe_buffers_max(upipe_buffers a, upipe_buffers b)
{
#define UPI_BUFFERS_MAX(name) a.name = upipe_max_bytes(a.name, b.name);
    UPI_BUFFERS(UPI_BUFFERS_MAX)
#undef UPI_BUFFERS_MAX
    return a;
}

/* Tokens of a sequence on the ring rank that holds most. */
UPIPE_API int64_t upipe_plan_seq_most(const upipe_plan *p)
{
    int64_t most = 0;
    int r;
    for (r = 0; r < p->desc.ring; ++r) {
        upipe_shard s = upipe_shard_ring(p->desc.layout, p->desc.tokens, p->desc.ring, r);
        if (s.n > most) most = s.n;
    }
    return most;
}

/* The buffers of this rank's plan. */
UPIPE_API upipe_buffers upipe_plan_buffers(const upipe_plan *p)
{
    const int d = p->desc.head_dim, v_dim = p->desc.v_dim, wide = d > v_dim ? d : v_dim, me = p->desc.rank;
    const size_t e = upipe_dtype_bytes(p->desc.dtype);
    const size_t hop = (size_t)(upipe_plan_seq_most(p) * p->desc.batch),
                 all = (size_t)(p->desc.tokens * p->desc.batch);
    const int stages = p->schedule == UPIPE_UNEVEN ? p->stages : p->steps;
    size_t kv = (size_t)p->kv_per_rank;
    upipe_buffers b;
    int i;
    memset(&b, 0, sizeof b);
    for (i = 0; i < stages; ++i) {
        int sent = upipe_plan_buffer(p, UPIPE_A2A_Q, i), mine = upipe_plan_q(p, i, me).count;
        b.send = upipe_max_bytes(b.send, upipe_plan_rows_bytes(p, sent, d));
        b.slot = upipe_max_bytes(b.slot, upipe_plan_rows_bytes(p, sent, wide));
        b.q = upipe_max_bytes(b.q, upipe_plan_seq_bytes(p, mine, d));
        b.o = upipe_max_bytes(b.o, upipe_plan_seq_bytes(p, mine, v_dim));
        b.partial = upipe_max_bytes(
            b.partial, upipe_plan_rows_bytes(p, upipe_plan_buffer(p, UPIPE_A2A_DKV, i), wide) / e * 4);
    }
    /* the naive order may need one block more or less in later stages */
    for (i = 0; i < p->stages; ++i)
        if (p->schedule >= UPIPE_IN_ORDER || i == 0)
            b.kv_send = upipe_max_bytes(
                b.kv_send, upipe_plan_rows_bytes(p, upipe_plan_buffer(p, UPIPE_A2A_KV, i), wide));
    b.send = upipe_max_bytes(b.send, upipe_max_bytes(b.q, b.o));
    b.slot = upipe_max_bytes(b.slot, b.q);
    b.stat = b.q / e / (size_t)d * 4;
    b.k = upipe_plan_seq_bytes(p, p->kv_per_rank, d);
    b.v = upipe_plan_seq_bytes(p, p->kv_per_rank, v_dim);
    b.dk = b.k / e * 4;
    b.dv = b.v / e * 4;
    b.token_dk =
        upipe_plan_rows_bytes(p, p->kv_grads_partial ? p->desc.kv_heads : p->desc.ranks * p->kv_per_rank, d);
    b.token_dv = b.token_dk / (size_t)d * (size_t)v_dim;
    b.lse = (size_t)(upipe_plan_before(p, p->stages, me) * p->seq * p->desc.batch) * 4;
    if (b.lse == 0) b.lse = 4; /* a rank without heads: NULL would mean consumed */
    b.delta = (size_t)(p->rows * p->desc.heads) * 4;
    if (p->desc.ring == 1) return b;
    b.sum_o = b.o / e * 4;
    b.sum_q = b.q / e * 4;
    b.all_k = all * kv * (size_t)d * e;
    b.all_v = all * kv * (size_t)v_dim * e;
    b.all_dk = b.all_k / e * 4;
    b.all_dv = b.all_v / e * 4;
    b.hop_k = hop * kv * (size_t)d * e;
    b.hop_v = hop * kv * (size_t)v_dim * e;
    if (p->desc.ring_mode == UPIPE_RING_P2P) {
        /* those of other ranks are formed there too */
        b.dk = b.hop_k / e * 4;
        b.dv = b.hop_v / e * 4;
    }
    return b;
}

/* ---- closed forms ---- */

/* upipe_even_bytes -- the live bytes of upipe_dry_layer, with dX in x's place, as sums that can be read: Ulysses, and
 *                     UPipe with even heads; docs/memory.md derives them
 *   p     of the schedules GROUP and WHOLE, without a ring, without overlap, with ranks that divide the tokens. The block
 *         has no QK norm
 *   gemm attn_fwd attn_bwd tile  scratch: of a product, of attention, and of the f32 sum of a tile of dX (0 in f32)
 *   errors  UNSUPPORTED for other plans: their bytes are those of upipe_dry_layer
 */
UPIPE_API upipe_status upipe_even_bytes(upipe_bytes *r, const upipe_plan *p, size_t gemm, size_t attn_fwd,
                                        size_t attn_bwd, size_t tile, upipe_err *err)
{
    const upipe_plan_desc *d = &p->desc;
    const int64_t kv_heads = (int64_t)d->ranks * p->kv_per_rank; /* of a round */
    const size_t x = upipe_plan_unit_bytes(p), e = upipe_dtype_bytes(d->dtype);
    const size_t q = upipe_plan_rows_bytes(p, d->chunk, d->head_dim),
                 o = upipe_plan_rows_bytes(p, d->chunk, d->v_dim);
    const size_t k = upipe_plan_rows_bytes(p, kv_heads, d->head_dim),
                 v = upipe_plan_rows_bytes(p, kv_heads, d->v_dim);
    const size_t send = upipe_max_bytes(q, o),
                 kv_send = upipe_max_bytes(k, v); /* beside a stage's; O' and dQ' too */
    const size_t kv = k + v, dv = v / e * 4, dkv = kv / e * 4, cast = e < 4 ? kv_send : 0;
    const size_t out = send * (size_t)p->stages,
                 stat = q / e / (size_t)d->head_dim * 4; /* final_out; lse, delta of a stage */
    const size_t lse = stat * (size_t)p->stages, delta = lse,
                 kept = p->steps > 1 ? kv : 0; /* from stage to stage */
    const size_t fwd = x + out + lse,
                 bwd = fwd + delta + (size_t)(p->rounds - 1) * kv; /* dK, dV of finished rounds */
    const size_t stage = kv + dkv + send + o + stat;               /* Q' is in a slot */
    int i;
    memset(r, 0, sizeof *r);
    if (p->schedule > UPIPE_WHOLE || d->ring > 1 || p->overlap || d->tokens % d->ranks != 0)
        return upipe_fail(err, UPIPE_ERR_UNSUPPORTED,
                          "a closed form for uneven heads or tokens, a ring, or overlap");
    r->intermediate_fwd = kv + upipe_max_bytes(kv_send, send);
    r->phase[UPIPE_FWD_BEFORE] = x;
    r->phase[UPIPE_FWD_IN] = fwd + r->intermediate_fwd + gemm;
    r->phase[UPIPE_FWD_ATTN] = fwd + kv + send + attn_fwd;
    r->phase[UPIPE_FWD_OUT] = fwd + kept + send;
    r->phase[UPIPE_BWD_BEFORE] = fwd + out + delta; /* O, and its gradient */
    r->phase[UPIPE_BWD_OUT] = bwd + stage;
    r->phase[UPIPE_BWD_ATTN] = bwd + stage + attn_bwd;
    r->phase[UPIPE_BWD_IN] =
        upipe_max_bytes(kv + dkv + kv_send + gemm, upipe_max_bytes(kv + dkv + send + gemm, stage));
    r->phase[UPIPE_BWD_IN] = upipe_max_bytes(r->phase[UPIPE_BWD_IN], kv + upipe_max_bytes(cast + dv, gemm));
    r->phase[UPIPE_BWD_IN] = upipe_max_bytes(r->phase[UPIPE_BWD_IN], k + cast + dkv); /* dK' to its tokens */
    r->phase[UPIPE_BWD_IN] =
        upipe_max_bytes(bwd + r->phase[UPIPE_BWD_IN], x + out + (size_t)p->rounds * kv + tile + gemm);
    for (i = 0; i < UPIPE_PHASES; ++i) r->peak = upipe_max_bytes(r->peak, r->phase[i]);
    return UPIPE_OK;
}

typedef enum upipe_paper_row {
    UPIPE_PAPER_ULYSSES,
    UPIPE_PAPER_ULYSSES_OFFLOAD,
    UPIPE_PAPER_FPDT,
    UPIPE_PAPER_UPIPE
} upipe_paper_row;

/* upipe_paper_units -- a cell of the paper's two tables of peak activation memory, in units
 *   row     method
 *   phase   column: the forward table's four, then the backward table's four
 *   group   G;  stages  nu (UPipe's row);  chunks  pi (FPDT's row);  layers  L (Ulysses' row)
 *   paper   tables "Peak activation memory within the forward attention block" (section 2) and "... during
 *           the backward pass" (Appendix A)
 */
UPIPE_API double upipe_paper_units(upipe_paper_row row, upipe_phase phase, double group, double stages,
                                   double chunks, double layers)
{
    double gamma = 1 + 2 / group, nu = stages, pi = chunks, before = 2 * (nu - 1) / nu;
    double attn0 = 3 + 2 * gamma / nu, attn1 = 2 + 2 * gamma / nu + before;
    double cell[4][UPIPE_PHASES];
    int k;
    const double ulysses[] = {0, gamma + 1, gamma + 1, 2, 2, 3, 2 * gamma + 2, gamma + 1};
    const double offload[] = {1, gamma + 2, gamma + 2, 3, 3, 4, 2 * gamma + 3, gamma + 2};
    const double fpdt[] = {1, gamma + 2, 2 * gamma + 1, 2, 1, 3, 2 * gamma + 4, gamma + 2};
    const double upipe[] = {1,
                            2 + gamma / nu,
                            2 + gamma / nu,
                            2 + 1 / nu,
                            3,
                            3 + 1 / nu,
                            attn0 > attn1 ? attn0 : attn1,
                            2 + gamma / nu + before};
    for (k = 0; k < UPIPE_PHASES; ++k) {
        cell[UPIPE_PAPER_ULYSSES][k] = layers + ulysses[k];
        cell[UPIPE_PAPER_ULYSSES_OFFLOAD][k] = offload[k];
        cell[UPIPE_PAPER_FPDT][k] = fpdt[k] / pi;
        cell[UPIPE_PAPER_UPIPE][k] = upipe[k];
    }
    return phase < UPIPE_PHASES ? cell[row][phase] : 0;
}

#endif

/* upipe_bytes.h -- how many bytes: what the attention block takes, in closed form        layer 3, includes plan
 *
 *     upipe_bytes b = upipe_plan_bytes(&plan, &scratch);         exact, by phase; upipe_layer_scratch fills scratch
 *     upipe_paper_units(UPIPE_PAPER_UPIPE, ...)                  the paper's formulas, beside it
 *
 * A dry pool under the layer's code (upipe_dry.h) and the real run agree with upipe_plan_bytes to the byte.
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

/* upipe_plan_scratch -- what the exact count needs besides the plan
 *   gemm attn_fwd attn_bwd  scratch bytes of the compute table (upipe_layer_scratch fills them)
 *   tile_rows               rows of the tile in which dX is summed; 0 when dX is summed in place (f32
 *                           storage)
 *   dx                      bytes of the gradient of x; 0 when it takes x's place
 *   qk_norm                 nonzero: per-head norms of Q and K
 */
typedef struct upipe_plan_scratch {
    size_t gemm, attn_fwd, attn_bwd;
    size_t dx;
    int64_t tile_rows;
    int qk_norm;
} upipe_plan_scratch;

/* Exact live bytes of one rank, x included: the largest of each phase, of all, and of Q, K, V chunks and
 * exchange buffers in the forward (the paper's "intermediate tensors"). */
typedef struct upipe_bytes {
    size_t phase[UPIPE_PHASES];
    size_t peak;
    size_t intermediate_fwd;
} upipe_bytes;

UPIPE_API size_t upipe_max_bytes(size_t a, size_t b)
{
    return a > b ? a : b;
}

/* ---- buffers ---- */

/* upipe_buffers -- the block's buffers in bytes, the largest over stages, in the storage type if not said otherwise
 *   slot           of final_out, and of its gradient: Q', O, dO or dQ of a stage
 *   send           a stage's Q before its exchange; O' and dQ' before theirs
 *   q o stat       Q', dQ'; O', dO'; lse, delta (f32) of this rank's heads of a stage
 *   k v            K', V' of this rank's heads
 *   kv_send        K or V before its exchange
 *   dk dv          gradients of K', V', f32
 *   token_dk token_dv  gradients of K, V of a stage's heads at their tokens
 *   partial        the same for several ranks' shares of them, f32
 *   lse delta      of all stages, f32
 * With a ring:
 *   all_k all_v    K', V' of the whole sequence;  all_dk, all_dv  their gradients, f32
 *   hop_k hop_v    K', V' of another ring rank
 *   sum_o sum_q    sums of O', dQ' of a stage, f32
 */
#define UPI_BUFFERS(X)                                                                                       \
    X(slot) X(send) X(q) X(o) X(stat) X(k) X(v) X(kv_send) X(dk) X(dv) X(token_dk) X(token_dv) X(partial)    \
    X(lse) X(delta) X(all_k) X(all_v) X(all_dk) X(all_dv) X(hop_k) X(hop_v) X(sum_o) X(sum_q)
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
        b.partial = upipe_max_bytes(b.partial,
                             upipe_plan_rows_bytes(p, upipe_plan_buffer(p, UPIPE_A2A_DKV, i), wide) / e * 4);
    }
    /* the naive order may need one block more or less in later stages */
    for (i = 0; i < p->stages; ++i)
        if (p->schedule >= UPIPE_IN_ORDER || i == 0)
            b.kv_send =
                upipe_max_bytes(b.kv_send, upipe_plan_rows_bytes(p, upipe_plan_buffer(p, UPIPE_A2A_KV, i), wide));
    b.send = upipe_max_bytes(b.send, upipe_max_bytes(b.q, b.o));
    b.slot = upipe_max_bytes(b.slot, b.q);
    b.stat = b.q / e / (size_t)d * 4;
    b.k = upipe_plan_seq_bytes(p, p->kv_per_rank, d);
    b.v = upipe_plan_seq_bytes(p, p->kv_per_rank, v_dim);
    b.dk = b.k / e * 4;
    b.dv = b.v / e * 4;
    b.token_dk = upipe_plan_rows_bytes(p, p->kv_grads_partial ? p->desc.kv_heads : p->desc.ranks * p->kv_per_rank, d);
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

/* What shifting K and V round the ring takes besides sum_o or sum_q. */
UPIPE_API size_t upi_ring_hops(const upipe_plan *p, const upipe_buffers *b, int backward)
{
    const int inner = p->desc.ring_inner > 1 ? p->desc.ring_inner : p->desc.ring,
              outer = p->desc.ring / inner;
    size_t hops = (size_t)(inner - 1 < 2 ? inner - 1 : 2) + (size_t)(outer - 1 < 2 ? outer - 1 : 2);
    if (p->desc.ring == 1 || p->desc.ring_mode != UPIPE_RING_P2P) return 0;
    hops *= b->hop_k + b->hop_v;
    if (backward) hops += 2 * (b->dk + b->dv) + (outer > 1 ? 2 * (b->dk + b->dv) : 0);
    return hops;
}

/* Bytes of the way home of a round's dK and dV, beside dK', dV' in f32: the larger of its moments. */
UPIPE_API size_t upi_token_grad_bytes(const upipe_plan *p, const upipe_plan_scratch *s, const upipe_buffers *b)
{
    const size_t e = upipe_dtype_bytes(p->desc.dtype), cast = e < 4 ? upipe_max_bytes(b->k, b->v) : 0;
    const size_t tokens_grad = b->token_dk + b->token_dv, own = b->dk + b->dv, norm = s->qk_norm ? b->token_dk : 0;
    if (p->schedule == UPIPE_IN_ORDER) return own + b->partial;
    if (p->schedule == UPIPE_SPLIT)
        return upipe_max_bytes(upipe_max_bytes(b->token_dk + own + b->partial, tokens_grad + b->dv + b->partial),
                        tokens_grad + norm + s->gemm);
    return upipe_max_bytes(upipe_max_bytes(b->token_dk + cast + own, tokens_grad + cast + b->dv), tokens_grad + norm + s->gemm);
}

/* The phases of stages that overlap: two are under way, and scratch of attention is there throughout. Rounds are
 * common, and there is no ring. */
UPIPE_API void upi_overlap_bytes(const upipe_plan *p, const upipe_plan_scratch *s, const upipe_buffers *b,
                                 upipe_bytes *r)
{
    const upipe_plan_desc *d = &p->desc;
    const size_t e = upipe_dtype_bytes(d->dtype), x = upipe_plan_unit_bytes(p),
                 out = b->slot * (size_t)p->stages;
    const size_t kv = b->k + b->v, grads = b->dk + b->dv, round = kv + grads;
    const size_t stage = b->send + b->q + b->o + b->stat;
    const size_t norm = s->qk_norm ? ((size_t)d->heads + (size_t)d->kv_heads) * (size_t)d->head_dim * 4 : 0;
    size_t fwd = x + out + b->lse + s->attn_fwd,
           bwd = x + s->dx + out + b->lse + b->delta + norm + s->attn_bwd;
    size_t grads_at_tokens[2] = {
        0, 0}; /* dK and dV of rounds that have ended before this stage, and before the one before */
    int i;
    if (p->schedule == UPIPE_IN_ORDER)
        bwd += (upipe_plan_rows_bytes(p, d->kv_heads, d->head_dim) +
                upipe_plan_rows_bytes(p, d->kv_heads, d->v_dim)) /
               e * 4;
    r->intermediate_fwd = 0;
    for (i = UPIPE_FWD_IN; i <= UPIPE_FWD_OUT; ++i) r->phase[i] = fwd;
    r->phase[UPIPE_BWD_OUT] = r->phase[UPIPE_BWD_ATTN] = 0;
    for (i = 0; i < p->stages; ++i) {
        const int fresh = upipe_plan_stage(p, i).kv_fresh, last = upipe_plan_stage(p, i).kv_last;
        const int more = i + 1 < p->stages, soon = more && upipe_plan_stage(p, i + 1).kv_fresh;
        /* prepared beside the stage before */
        size_t beside = i > 0 ? kv + b->send : 0, has = fresh ? beside + kv : beside, most = has + b->send;
        size_t next = more ? b->send : 0;
        if (fresh) most = upipe_max_bytes(most, has + b->kv_send);
        r->intermediate_fwd = upipe_max_bytes(r->intermediate_fwd, most);
        r->phase[UPIPE_FWD_IN] = upipe_max_bytes(r->phase[UPIPE_FWD_IN], fwd + most + s->gemm);
        /* finished beside the next one */
        has = kv + b->send + next;
        r->phase[UPIPE_FWD_ATTN] = upipe_max_bytes(r->phase[UPIPE_FWD_ATTN], fwd + has + (soon ? kv : 0));
        r->phase[UPIPE_FWD_OUT] = upipe_max_bytes(r->phase[UPIPE_FWD_OUT], fwd + has - (last && !soon ? kv : 0));

        beside = bwd + grads_at_tokens[0] + (i > 0 ? round + stage : 0);
        has = fresh ? beside + round : beside;
        most = has + b->send + upipe_max_bytes(s->gemm, b->q);
        if (fresh) most = upipe_max_bytes(most, has + b->kv_send + s->gemm);
        r->phase[UPIPE_BWD_IN] = upipe_max_bytes(r->phase[UPIPE_BWD_IN], most);
        r->phase[UPIPE_BWD_OUT] = upipe_max_bytes(r->phase[UPIPE_BWD_OUT], has + stage);
        next = more ? stage + (soon ? round : 0) : 0;
        has = bwd + grads_at_tokens[1] + next;
        r->phase[UPIPE_BWD_ATTN] = upipe_max_bytes(r->phase[UPIPE_BWD_ATTN], has + round + stage);
        most = grads + (last ? 0 : kv) + upipe_max_bytes(b->send, (s->qk_norm ? b->send : 0) + s->gemm);
        if (last) most = upipe_max_bytes(most, upi_token_grad_bytes(p, s, b));
        r->phase[UPIPE_BWD_IN] = upipe_max_bytes(r->phase[UPIPE_BWD_IN], has + most);
        grads_at_tokens[0] = grads_at_tokens[1];
        if (last && p->schedule < UPIPE_SPLIT) grads_at_tokens[1] += b->token_dk + b->token_dv;
    }
}

/* upipe_plan_bytes -- what the attention block of upipe_layer.h holds, by phase
 *
 * The sum is spelled out in docs/memory.md. A dry pool under the layer's code, and the real run, must agree
 * to the byte.
 *   paper  Appendix A; where this count differs from its tables, docs/memory.md says why
 */
UPIPE_API upipe_bytes upipe_plan_bytes(const upipe_plan *p, const upipe_plan_scratch *s)
{
    const upipe_plan_desc *d = &p->desc;
    const int uneven = p->schedule == UPIPE_UNEVEN, ring = d->ring > 1;
    const int gather = ring && d->ring_mode == UPIPE_RING_ALL_GATHER, width = p->width;
    const size_t e = upipe_dtype_bytes(d->dtype), w = (size_t)width;
    upipe_buffers b = upipe_plan_buffers(p);
    size_t x = upipe_plan_unit_bytes(p),
           both = x + s->dx;                 /* the caller's; dx is there throughout the backward */
    size_t out = b.slot * (size_t)p->stages; /* final_out, or its gradient */
    size_t kv = b.k + b.v, kept = gather ? b.all_k + b.all_v : kv;
    size_t ahead = d->ring_prefetch && p->rounds > 1 ? kv + kept : 0, next = ahead > 0 ? kept : 0;
    size_t stays = uneven || p->steps > width ? kept : 0; /* beyond a stage */
    size_t own = b.dk + b.dv, grads = gather ? b.all_dk + b.all_dv : own;
    size_t tokens_grad = b.token_dk + b.token_dv, norm, grads_at_tokens, hold, fetch, stage, last, end, early, soon = 0;
    size_t all_k = upipe_plan_rows_bytes(p, d->kv_heads, d->head_dim),
           all_v = upipe_plan_rows_bytes(p, d->kv_heads, d->v_dim);
    size_t attn_fwd = s->attn_fwd + upi_ring_hops(p, &b, 0), attn_bwd = s->attn_bwd + upi_ring_hops(p, &b, 1);
    upipe_bytes r;
    int i;
    norm = s->qk_norm ? ((size_t)d->heads + (size_t)d->kv_heads) * (size_t)d->head_dim * 4 : 0;

    /* K and V arrive; with them gathered, those of the ring */
    fetch = kv + b.kv_send + (uneven && gather ? kept : 0);
    r.intermediate_fwd = upipe_max_bytes(upipe_max_bytes(fetch, gather ? kv + kept : 0), kept + b.send);
    hold = x + out + b.lse;
    r.phase[UPIPE_FWD_BEFORE] = x;
    r.phase[UPIPE_FWD_IN] =
        hold + upipe_max_bytes(upipe_max_bytes(fetch + s->gemm, gather ? kv + kept : 0), kept + b.send + s->gemm);
    if (ahead > 0) { /* the next round's, beside this one's */
        r.intermediate_fwd = upipe_max_bytes(r.intermediate_fwd, kept + b.send + upipe_max_bytes(fetch, ahead));
        r.phase[UPIPE_FWD_IN] =
            upipe_max_bytes(r.phase[UPIPE_FWD_IN], hold + kept + b.send + upipe_max_bytes(fetch + s->gemm, ahead));
    }
    r.phase[UPIPE_FWD_ATTN] = hold + kept + b.send + w * b.sum_o + attn_fwd + ahead;
    r.phase[UPIPE_FWD_OUT] = hold + upipe_max_bytes(stays, next) + b.send + w * b.sum_o;

    r.phase[UPIPE_BWD_BEFORE] = both + 2 * out + b.lse + b.delta;
    /* dK and dV of finished rounds wait for dX; sums over ranks and stages wait in f32 where rounds are not common */
    if (p->schedule >= UPIPE_IN_ORDER)
        grads_at_tokens = (all_k + all_v) / e * 4;
    else
        grads_at_tokens = (size_t)(p->rounds - 1) * tokens_grad;
    hold = both + out + b.lse + b.delta + norm + grads_at_tokens;
    stage = kept + grads + b.send + w * (b.q + b.o + b.stat);
    r.phase[UPIPE_BWD_OUT] = hold + stage;
    /* with the next round's K and V beside them, a round less is parked */
    early = hold - (p->schedule < UPIPE_IN_ORDER && p->rounds > 1 ? tokens_grad : 0);
    r.phase[UPIPE_BWD_ATTN] = upipe_max_bytes(hold, early + ahead) + stage + w * b.sum_q + attn_bwd;

    /* within the stages: fetch, projection, and the way home of a finished round's dK and dV */
    last = grads + upipe_max_bytes(fetch + s->gemm, gather ? kv + kept : 0);
    last = upipe_max_bytes(last, kept + grads + b.send + upipe_max_bytes(s->gemm, w * b.q + (width > 1 ? s->gemm : 0)));
    last = upipe_max_bytes(last, stays + grads + b.send + w * b.sum_q);
    if (ahead > 0)
        soon = upipe_max_bytes(stage + upipe_max_bytes(fetch + s->gemm, ahead), next + grads + b.send + w * b.sum_q);
    if (width > 1) last = upipe_max_bytes(last, grads + (s->qk_norm ? b.send : 0) + s->gemm);
    if (gather) {
        size_t wide = upipe_max_bytes(b.dk, b.dv), kept_then = uneven ? kept : 0;
        last = upipe_max_bytes(last, kept_then + grads + own + (size_t)d->ring * wide);
        soon = upipe_max_bytes(soon, next + grads + own + (size_t)d->ring * wide);
    }
    end = both + out + all_k + all_v; /* after them: dQ, dK and dV of all heads */
    if (uneven || p->schedule == UPIPE_IN_ORDER) {
        size_t sums = grads_at_tokens; /* in f32; narrower ones replace one after the other */
        size_t held = uneven ? kept + (gather ? grads : 0) : 0;
        if (e < 4) sums = upipe_max_bytes(grads_at_tokens + all_k, all_k + all_v / e * 4 + all_v);
        last = hold + upipe_max_bytes(last, held + own + b.partial); /* with the partial gradients of all ranks */
        soon = upipe_max_bytes(soon, next + own + b.partial);
        last = upipe_max_bytes(last, both + out + norm + sums);
        last = upipe_max_bytes(last, end + norm + (s->qk_norm ? all_k : 0) + s->gemm);
    } else if (p->schedule == UPIPE_SPLIT) {
        last = upipe_max_bytes(last, all_k + own + b.partial);
        last = upipe_max_bytes(last, all_k + all_v + b.dv + b.partial);
        last = hold + upipe_max_bytes(last, all_k + all_v + (s->qk_norm ? all_k : 0) + s->gemm);
    } else {
        size_t cast = e < 4 ? upipe_max_bytes(b.k, b.v) : 0;
        const size_t turn = upipe_max_bytes(upipe_max_bytes(b.token_dk + cast + own, tokens_grad + cast + b.dv),
                                     tokens_grad + (s->qk_norm ? b.token_dk : 0) + s->gemm);
        last = hold + upipe_max_bytes(last, turn);
        soon = upipe_max_bytes(soon, next + turn);
    }
    if (ahead > 0) last = upipe_max_bytes(last, early + soon);
    end += (size_t)s->tile_rows * (size_t)d->model_dim * 4 + s->gemm;
    r.phase[UPIPE_BWD_IN] = upipe_max_bytes(last, end);

    if (p->overlap) upi_overlap_bytes(p, s, &b, &r);
    r.peak = 0;
    for (i = 0; i < UPIPE_PHASES; ++i) r.peak = upipe_max_bytes(r.peak, r.phase[i]);
    return r;
}

/* ---- the paper's own formulas ---- */

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

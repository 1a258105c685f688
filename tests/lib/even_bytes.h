/* even_bytes.h -- the bytes of the attention block as sums that can be read: Ulysses, and UPipe with even heads
 *
 * What a block takes is what its code takes: upipe_dry.h runs it over a pool that counts. The sums say why.
 *
 *     even_bytes(&bytes, &plan, 0, 0, 0, 0, &err)
 */
#ifndef EVEN_BYTES_H
#define EVEN_BYTES_H

#include "upipe/upipe_dry.h"

/* even_bytes -- the live bytes of upipe_dry_layer, with dX in x's place; docs/memory.md derives them
 *   p     of the schedules GROUP and WHOLE, without a ring, without overlap, with ranks that divide the tokens. The block
 *         has no QK norm, and the compute table no attn_reads_o
 *   gemm attn_fwd attn_bwd tile  scratch: of a product, of attention, and of a tile of dX: its sum in f32 (in f32 storage
 *         none), and its heads side by side (none where a rank alone has them all in one stage)
 *   errors  UNSUPPORTED for other plans: their bytes are those of upipe_dry_layer
 */
static inline upipe_status even_bytes(upipe_bytes *r, const upipe_plan *p, size_t gemm, size_t attn_fwd,
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

#endif

/* upipe_linear_layer.h -- a layer of linear attention over ranks: the gated delta net of Qwen3-Next and Qwen3.5    layer 7
 *
 * x (already normed) -> q, k, v, z, a, b by projections -> short causal convolution of q, k, v, and SiLU -> q and k of
 * length 1 -> gated delta rule -> o -> norm(o) * silu(z) -> output projection. The residual is the host's.
 *
 *     upipe_linear_layer l = {0};
 *     l.plan = &plan; l.rules = &rules; l.heads = 32; l.key_heads = 16; l.key_dim = l.value_dim = 128; l.taps = 4;
 *     l.w_qkv = ...; l.stage_keys = 4;
 *     upipe_linear_layer_fwd(&ctx, ctx.team, &l, &saved, y, x, NULL);              saved: o, and states
 *     upipe_linear_layer_bwd(&ctx, ctx.team, &l, dx, &grads, &saved, dy, x, NULL);
 *
 * One pass over the ranks (upipe_scan.h) brings the whole state of a layer, by stages of key heads: of each key head the
 * rule's states of its value heads, and the rows that the convolution needs of the tokens before. Neighbours hold
 * neighbouring tokens. A border of packed documents ends a state. A stage projects its own heads alone, so that q, k and v
 * never exist as a whole; z exists for a tile of rows. The backward computes all of this again, but for o.
 *
 * Where ranks and documents begin at multiples of the chunk, y and dx have the bits of one rank, or of the document alone,
 * with the built-in gemm of the CPU. Neither stages nor tiles change a bit. Gradients of weights are sums over a rank's
 * tokens.
 */
#ifndef UPIPE_LINEAR_LAYER_H
#define UPIPE_LINEAR_LAYER_H

#include "linear/check.h"
#include "linear/pass.h"

/* upipe_linear_saved_free -- frees what a forward has left, or what is left of it */
UPIPE_API upipe_status upipe_linear_saved_free(upipe_ctx *c, upipe_linear_saved *save)
{
    UPIPE_TRY(upipe_free(c, save->o));
    UPIPE_TRY(upipe_free(c, save->states));
    memset(save, 0, sizeof *save);
    return UPIPE_OK;
}

/* upipe_linear_layer_fwd -- y = the layer of x
 *   comm    as in upipe_scan_fwd
 *   save    written: o and states; the backward or upipe_linear_saved_free frees them
 *   y       [n][1][D] view of this rank's tokens, the plan's type, written; its data NULL: only save is, and
 *           upipe_linear_layer_out_fwd makes y of it
 *   x       likewise; y may be x, if the backward is given x again
 *   carry   as in upipe_scan_fwd, of upipe_linear_layer_state_bytes, zeros before the first segment; NULL without segments
 *   bytes   save's, beside them a stage's buffers or a tile's; sends upipe_linear_layer_state_bytes to the next rank
 *   errors  ARG, UNSUPPORTED, OVERFLOW: nothing happens. MEMORY, MISMATCH, TIMEOUT, ABORTED, those of the rules: team, ring and
 *           comm are aborted, and the pool is as before
 */
UPIPE_API upipe_status upipe_linear_layer_fwd(upipe_ctx *c, upipe_comm *comm, const upipe_linear_layer *l,
                                              upipe_linear_saved *save, upipe_view y, upipe_view x,
                                              float *carry)
{
    upi_lin_pass p;
    upipe_fields f;
    upipe_status s;
    int64_t mark;
    if (save != NULL) memset(save, 0, sizeof *save);
    UPIPE_TRY(upi_lin_check(c, comm, l, x));
    if (y.data != NULL) UPIPE_TRY(upi_lin_check_rows(c, l, "y", y));
    if (save == NULL) return upipe_fail(&c->err, UPIPE_ERR_ARG, "linear layer: save is NULL");
    mark = upipe_mem_mark(c->mem);
    f = upi_lin_fields(l);
    UPIPE_TRY(upi_lin_given(c, l, &f, &save->given));
    s = upi_lin_agree(c, comm, l, &f, 0, carry != NULL);
    upi_lin_begin(c, &p, l, save, x);
    if (s == UPIPE_OK) s = upi_lin_fwd(c, comm, &p, y, carry);
    if (s == UPIPE_OK) return s;
    memset(save, 0, sizeof *save);
    return upipe_unwind(c, s, mark, comm);
}

/* upipe_linear_layer_out_fwd -- y = the layer of x, from what its forward has saved; no rank waits for another
 *   save    read
 *   y x     as in the forward; y may be x
 *   bytes   a tile's buffers
 *   errors  ARG, UNSUPPORTED, OVERFLOW: nothing happens. MEMORY, those of the table: team and ring are aborted
 */
UPIPE_API upipe_status upipe_linear_layer_out_fwd(upipe_ctx *c, upipe_comm *comm, const upipe_linear_layer *l,
                                                  const upipe_linear_saved *save, upipe_view y, upipe_view x)
{
    upi_lin_pass p;
    upipe_fields f;
    upipe_linear_saved of;
    upipe_status s;
    int64_t mark;
    UPIPE_TRY(upi_lin_check(c, comm, l, x));
    UPIPE_TRY(upi_lin_check_rows(c, l, "y", y));
    f = upi_lin_fields(l);
    UPIPE_TRY(upi_lin_check_save(c, l, &f, save));
    of = *save;
    mark = upipe_mem_mark(c->mem);
    upi_lin_begin(c, &p, l, &of, x);
    s = upi_lin_out_fwd(c, &p, y);
    return s == UPIPE_OK ? s : upipe_unwind(c, s, mark, comm);
}

/* upipe_linear_layer_bwd -- gradients of x and of the weights
 *   dx      [n][1][D] view, the plan's type, written; may be dy, not x
 *   grads   +=
 *   save    consumed
 *   dy x    likewise; x is the forward's
 *   carry   as in upipe_scan_bwd, zeros before the last segment, which comes first
 *   bytes   a stage's buffers or a tile's, and the sum of dx where it is not f32; sends as much, to the rank before
 *   errors  as the forward; of the second kind save is then valid for upipe_linear_saved_free alone, and grads hold part of a
 *           sum
 */
UPIPE_API upipe_status upipe_linear_layer_bwd(upipe_ctx *c, upipe_comm *comm, const upipe_linear_layer *l,
                                              upipe_view dx, const upipe_linear_layer_grads *grads,
                                              upipe_linear_saved *save, upipe_view dy, upipe_view x,
                                              float *carry)
{
    upi_lin_pass p;
    upipe_fields f;
    upipe_status s;
    int64_t mark;
    UPIPE_TRY(upi_lin_check(c, comm, l, x));
    UPIPE_TRY(upi_lin_check_rows(c, l, "dx", dx));
    UPIPE_TRY(upi_lin_check_rows(c, l, "dy", dy));
    f = upi_lin_fields(l);
    if (grads == NULL || dx.data == x.data)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "linear layer: %s",
                          grads == NULL ? "grads are NULL" : "dx lies over x, which every stage reads");
    UPIPE_TRY(upi_lin_check_save(c, l, &f, save));
    save->given.plan = 0;
    mark = upipe_mem_mark(c->mem);
    s = upi_lin_agree(c, comm, l, &f, 1, carry != NULL);
    upi_lin_begin(c, &p, l, save, x);
    p.grads = grads;
    if (s == UPIPE_OK) s = upi_lin_bwd(c, comm, &p, dx, dy, carry);
    if (s == UPIPE_OK) s = upipe_linear_saved_free(c, save);
    return s == UPIPE_OK ? s : upipe_unwind(c, s, mark, comm);
}

#endif

/* upipe_linear_layer.h -- a layer of linear attention over ranks: the gated delta net of Qwen3-Next and Qwen3.5
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

#include "upipe_linear.h"
#include "upipe_scan.h"

enum { UPIPE_LINEAR_TILE_ROWS = 256 };
#define UPIPE_LINEAR_LENGTH_EPS 1e-6 /* added to the squared lengths of q and k */

/* upipe_linear_layer -- zero fields are defaults
 *   id          as in upipe_layer
 *   plan        tokens, model_dim D and storage type are read; contiguous, of one sequence
 *   first borders  as in upipe_scan
 *   capacity    borders for whose chunks scratch is sized as well, so that calls with other documents need the same bytes,
 *               unless these make more chunks
 *   rules       with all entries; in a dry run those of a plan too (upipe_cuda_plan_linear)
 *   heads key_heads key_dim value_dim  heads of v and o, a multiple of those of q and k; head h reads key head
 *               h / (heads / key_heads)
 *   taps        of the convolution, 2 to 8
 *   chunk       tokens of a chunk of the rule, at most rules->chunk_max; 0 = 64
 *   stage_keys  key heads of a stage; 0 = all
 *   tile_rows   rows of a tile of z and y, a multiple of 64; 0 = 256
 *   w_qkv w_z w_b w_a w_out  [2 key_heads key_dim + heads value_dim][D], q, k and v one below the other;
 *               [heads value_dim][D]; [heads][D] twice; [D][heads value_dim]: the plan's type
 *   conv        f32 [rows of w_qkv][taps], the own token's last
 *   a_log dt_bias  f32 [heads]: the decay of a token is e^g, g = -e^a_log softplus(a + dt_bias)
 *   norm_weight norm_eps  f32 [value_dim]: of every head of o
 */
typedef struct upipe_linear_layer {
    const upipe_plan *plan;
    int64_t id, first;
    upipe_borders borders, capacity;
    const upipe_linear_ops *rules;
    int heads, key_heads, key_dim, value_dim, taps, chunk, stage_keys;
    int64_t tile_rows;
    const void *w_qkv, *w_z, *w_b, *w_a, *w_out;
    const float *conv, *a_log, *dt_bias, *norm_weight;
    float norm_eps;
} upipe_linear_layer;

/* Gradients, f32, shapes of the weights, +=; NULL = not wanted. */
typedef struct upipe_linear_layer_grads {
    float *w_qkv, *w_z, *w_b, *w_a, *w_out, *conv, *a_log, *dt_bias, *norm_weight;
} upipe_linear_layer_grads;

/* upipe_linear_layer_saved -- what a forward leaves for the backward, in the pool
 *   given   see upipe_given
 *   o       [n][heads][value_dim], the plan's type: what the rule has made
 *   states  as a scan has them, before this rank's first token
 */
typedef struct upipe_linear_layer_saved {
    upipe_given given;
    void *o;
    float *states;
} upipe_linear_layer_saved;

#include "linear/sizes.h"

/* upipe_linear_layer_state_bytes -- of a carry */
UPIPE_API size_t upipe_linear_layer_state_bytes(const upipe_linear_layer *l)
{
    const upipe_scan scan = upi_lin_scan(l);
    return upipe_scan_state_bytes(&scan);
}

#include "linear/check.h"
#include "linear/stage.h"

/* upipe_linear_layer_saved_free -- frees what a forward has left, or what is left of it */
UPIPE_API upipe_status upipe_linear_layer_saved_free(upipe_ctx *c, upipe_linear_layer_saved *save)
{
    UPIPE_TRY(upipe_free(c, save->o));
    UPIPE_TRY(upipe_free(c, save->states));
    memset(save, 0, sizeof *save);
    return UPIPE_OK;
}

/* upipe_linear_layer_fwd -- y = the layer of x
 *   comm    as in upipe_scan_fwd
 *   save    written: o and states; the backward or upipe_linear_layer_saved_free frees them
 *   y       [n][1][D] view of this rank's tokens, the plan's type, written; its data NULL: only save is, and
 *           upipe_linear_layer_out_fwd makes y of it
 *   x       likewise; y may be x, if the backward is given x again
 *   carry   as in upipe_scan_fwd, of upipe_linear_layer_state_bytes, zeros before the first segment; NULL without segments
 *   bytes   save's, beside them a stage's buffers or a tile's; sends upipe_linear_layer_state_bytes to the next rank
 *   errors  ARG, UNSUPPORTED, OVERFLOW: nothing happens. MEMORY, MISMATCH, TIMEOUT, ABORTED, those of the rules: team, ring and
 *           comm are aborted, and the pool is as before
 */
UPIPE_API upipe_status upipe_linear_layer_fwd(upipe_ctx *c, upipe_comm *comm, const upipe_linear_layer *l,
                                              upipe_linear_layer_saved *save, upipe_view y, upipe_view x,
                                              float *carry)
{
    upi_lin_pass p;
    upi_fields f;
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
    return upi_unwind(c, s, mark, comm);
}

/* upipe_linear_layer_out_fwd -- y = the layer of x, from what its forward has saved; no rank waits for another
 *   save    read
 *   y x     as in the forward; y may be x
 *   bytes   a tile's buffers
 *   errors  ARG, UNSUPPORTED, OVERFLOW: nothing happens. MEMORY, those of the table: team and ring are aborted
 */
UPIPE_API upipe_status upipe_linear_layer_out_fwd(upipe_ctx *c, upipe_comm *comm, const upipe_linear_layer *l,
                                                  const upipe_linear_layer_saved *save, upipe_view y,
                                                  upipe_view x)
{
    upi_lin_pass p;
    upi_fields f;
    upipe_linear_layer_saved of;
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
    return s == UPIPE_OK ? s : upi_unwind(c, s, mark, comm);
}

/* upipe_linear_layer_bwd -- gradients of x and of the weights
 *   dx      [n][1][D] view, the plan's type, written; may be dy, not x
 *   grads   +=
 *   save    consumed
 *   dy x    likewise; x is the forward's
 *   carry   as in upipe_scan_bwd, zeros before the last segment, which comes first
 *   bytes   a stage's buffers or a tile's, and the sum of dx where it is not f32; sends as much, to the rank before
 *   errors  as the forward; of the second kind save is then valid for upipe_linear_layer_saved_free alone, and grads hold part of a
 *           sum
 */
UPIPE_API upipe_status upipe_linear_layer_bwd(upipe_ctx *c, upipe_comm *comm, const upipe_linear_layer *l,
                                              upipe_view dx, const upipe_linear_layer_grads *grads,
                                              upipe_linear_layer_saved *save, upipe_view dy, upipe_view x,
                                              float *carry)
{
    upi_lin_pass p;
    upi_fields f;
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
    if (s == UPIPE_OK) s = upipe_linear_layer_saved_free(c, save);
    return s == UPIPE_OK ? s : upi_unwind(c, s, mark, comm);
}

#endif

/* types.h -- the host's tensors of a call        part of upipe_qkv.h */
#ifndef UPIPE_QKV_TYPES_H
#define UPIPE_QKV_TYPES_H

#include "../upipe_stage.h"

/* upipe_qkv -- one call
 *   plan     from upipe_plan_init; its model_dim is not used
 *   id       0, or the layer's number: a backward with another one is refused
 *   mask     as in upipe_layer
 *   scale    of the scores; 0 = 1/sqrt(d)
 *   q k v    [rows][H][d], [rows][Hkv][d], [rows][Hkv][v_dim]: read
 *   o        [rows][H][v_dim]: written by the forward, read by the backward
 * Views have any strides, and any type that the compute table casts. What is sent is in the plan's type. The
 * tensors may lie outside of the pool, in memory that the compute table reaches.
 */
typedef struct upipe_qkv {
    const upipe_plan *plan;
    int64_t id;
    upipe_mask mask;
    float scale;
    upipe_view q, k, v, o;
} upipe_qkv;

/* upipe_qkv_grads -- of the backward; views of any strides and type
 *   dout      [rows][H][v_dim]: the gradient of o, read
 *   dq dk dv  shapes of q, k, v, written (=): rounded to the plan's type once, when a value is complete. data
 *             NULL: not wanted. dq may be q itself, dk k, and dv v: each head is read for the last time before
 *   dsinks    f32 [H], +=, over this rank's heads: sum it over team and ring. NULL: not wanted
 */
typedef struct upipe_qkv_grads {
    upipe_view dout, dq, dk, dv;
    float *dsinks;
} upipe_qkv_grads;

/* upipe_qkv_fused -- a call whose Q, K and V lie side by side at each token
 *   call   plan, id, mask and scale, which the result has too; its views are not read. Rows, heads and dims are the
 *          plan's, so batch is included. Without a plan there are no views, and upipe_qkv_fwd refuses the result
 *   qkv    [B][T][H + 2 Hkv][d]: the query heads, then those of K, then those of V. [B][T][3][H][d] is the same with
 *          Hkv = H. Heads of V have v_dim elements
 *   o      [B][T][H][v_dim], packed
 */
UPIPE_API upipe_qkv upipe_qkv_fused(const upipe_qkv *call, void *qkv, void *o, upipe_dtype dtype)
{
    upipe_qkv a = *call;
    if (a.plan != NULL) {
        const int64_t n = a.plan->rows;
        const int32_t h = a.plan->desc.heads, kv = a.plan->desc.kv_heads, d = a.plan->desc.head_dim,
                      v = a.plan->desc.v_dim;
        const int64_t row = (int64_t)(h + kv) * d + (int64_t)kv * v;
        a.q = upipe_view_make(qkv, dtype, n, row, h, d, d);
        a.k = upipe_view_make(upipe_view_at(a.q, 0, h), dtype, n, row, kv, d, d);
        a.v = upipe_view_make(upipe_view_at(a.k, 0, kv), dtype, n, row, kv, v, v);
        a.o = upipe_view_packed(o, dtype, n, h, v);
    }
    return a;
}

/* upipe_qkv_sbh3d -- the same of Megatron's tensors, in which a head's Q, K and V are neighbours: one sequence of them
 *   call   as upipe_qkv_fused, of a plan with batch 1: a view's rows have one stride, so each sequence is a call
 *   qkv    [T][batch][H][3][d]: Hkv = H and v_dim = d, and upipe_qkv_fwd refuses the views with another plan
 *   o      [T][batch][H][d]
 *   b      the sequence, 0 <= b < batch
 */
UPIPE_API upipe_qkv upipe_qkv_sbh3d(const upipe_qkv *call, void *qkv, void *o, upipe_dtype dtype, int batch,
                                    int b)
{
    upipe_qkv a = *call;
    if (a.plan != NULL) {
        const int32_t h = a.plan->desc.heads, d = a.plan->desc.head_dim;
        const int64_t n = a.plan->local, row = (int64_t)batch * h * d;
        a.q = upipe_view_make(qkv, dtype, n, 3 * row, h, 3 * (int64_t)d, d);
        a.q.data = upipe_view_at(a.q, 0, b * h);
        a.k = a.v = a.q;
        a.k.data = upipe_offset(a.q.data, (size_t)d * upipe_dtype_bytes(dtype));
        a.v.data = upipe_offset(a.k.data, (size_t)d * upipe_dtype_bytes(dtype));
        a.o = upipe_view_make(o, dtype, n, row, h, d, d);
        a.o.data = upipe_view_at(a.o, 0, b * h);
    }
    return a;
}

/* upipe_qkv_grads_of -- gradients in the views of a call: dq, dk and dv in those of q, k and v, dout in that of o
 *   d      from a constructor above, over the gradients' tensors. dsinks is NULL
 */
UPIPE_API upipe_qkv_grads upipe_qkv_grads_of(const upipe_qkv *d)
{
    upipe_qkv_grads g;
    g.dout = d->o;
    g.dq = d->q;
    g.dk = d->k;
    g.dv = d->v;
    g.dsinks = NULL;
    return g;
}

#endif

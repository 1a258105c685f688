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

#endif

/* upipe_cuda.h -- the CUDA compute table
 *
 * The kernels are in headers; one .cu unit of the host compiles them:
 *
 *     #include "upipe/cuda/upipe_cuda.h"
 *     UPIPE_EXPORT_OPS(app_ops, upipe_cuda_ops)
 *
 * The rest of the program may be C. It includes upipe_cuda_device.h, which has no kernels, and declares the
 * function:
 *
 *     upipe_status app_ops(upipe_ops *ops, upipe_cuda *device, upipe_err *err);
 *
 *     upipe_cuda_init(&device, blas, &err);
 *     app_ops(&ops, &device, &err);
 *     ctx.ops = &ops;
 *     ctx.stream = stream;
 *
 * The table belongs to one rank, as its device does. Device code is for compute capability 8.0 and up, by nvcc
 * 12.8 or later: nvcc -std=c++17 -gencode=arch=compute_80,code=sm_80 -gencode=arch=compute_80,code=compute_80
 * -gencode=arch=compute_90a,code=sm_90a. The second is PTX, which every later device takes; code of sm_80 runs on
 * 8.x alone, that of sm_90a on 9.0 alone. Without the `a` attention on Hopper falls back to the kernels for 8.0
 * (upipe_cuda.choice says so). Links with cudart and cublas.
 */
#ifndef UPIPE_CUDA_H
#define UPIPE_CUDA_H

#include "../upipe_ops.h"
#include "upipe_cuda_attn_bwd.h"
#include "upipe_cuda_attn_fwd.h"
#include "upipe_cuda_bytes.h"
#include "upipe_cuda_device.h"
#include "upipe_cuda_gemm.h"
#include "upipe_cuda_norm.h"
#include "upipe_cuda_rope.h"
#include "upipe_cuda_rows.h"
#include "upipe_cuda_train.h"

/* upipe_cuda_ops -- fills every entry of the table
 *   device  of this rank, after upipe_cuda_init; stays where it is while the table is in use
 *   errors  UNSUPPORTED: the program has no code that the current device can run; BACKEND: the runtime's text
 */
UPIPE_API upipe_status upipe_cuda_ops(upipe_ops *ops, upipe_cuda *device, upipe_err *e)
{
    UPIPE_TRY(upi_cuda_has_code(device, (const void *)upi_cast_rows<0>, e));
    upipe_cuda_plan_ops(ops);
    ops->self = device;
    ops->sync = upi_cuda_sync;
    ops->copy = upi_cuda_copy;
    ops->zero = upi_cuda_zero;
    ops->cast = upi_cuda_cast;
    ops->gemm = upi_cuda_gemm;
    ops->attn_fwd = upi_cuda_attn_fwd;
    ops->attn_bwd = upi_cuda_attn_bwd;
    ops->rope = upi_cuda_rope;
    ops->rmsnorm = upi_cuda_rmsnorm;
    ops->rmsnorm_bwd = upi_cuda_rmsnorm_bwd;
    ops->bias_bwd = upi_cuda_bias_bwd;
    ops->rowdot = upi_cuda_rowdot;
    ops->sum = upi_cuda_sum;
    ops->add = upi_cuda_add;
    ops->scale = upi_cuda_scale;
    ops->gate = upi_cuda_gate;
    ops->gate_bwd = upi_cuda_gate_bwd;
    ops->cross_entropy = upi_cuda_cross_entropy;
    ops->embed = upi_cuda_embed;
    ops->embed_bwd = upi_cuda_embed_bwd;
    ops->total = upi_cuda_total;
    ops->adamw = upi_cuda_adamw;
    return UPIPE_OK;
}

/* Defines, with C linkage, upipe_status function(upipe_ops *ops, upipe_cuda *device, upipe_err *e), which calls
 * fill. */
#define UPIPE_EXPORT_OPS(function, fill)                                                       \
    extern "C" upipe_status function(struct upipe_ops *ops, upipe_cuda *device, upipe_err *e); \
    extern "C" upipe_status function(struct upipe_ops *ops, upipe_cuda *device, upipe_err *e)  \
    {                                                                                          \
        return fill(ops, device, e);                                                           \
    }

#endif

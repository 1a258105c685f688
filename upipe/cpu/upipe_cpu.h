/* upipe_cpu.h -- the CPU compute table
 *
 *     upipe_ops ops;
 *     upipe_cpu_ops(&ops);
 *     ctx.ops = &ops;
 *
 * Compile with -march=native (or -mavx2 -mfma) and -O2 for the fast kernels; upipe_cpu_simd.h lists
 * the instruction sets, and ops.name says which it is: "cpu-avx512", "cpu-avx2", "cpu-neon", "cpu-portable"
 * or "cpu-scalar". Links with the math library (-lm).
 *
 * A call runs on the thread that makes it, start to end, and on the host's others if ops.par says so; it uses
 * neither ctx->stream nor memory of its own. Ranks that share the table run side by side.
 *
 * The kernels are most of what a compiler has to do. A program of several units compiles them in one, upipe_cpu.c,
 * which defines UPIPE_CPU_DEFINE before it includes this, and has the others define UPIPE_CPU_DECLARE: there
 * upipe_cpu_ops is a declaration, with C linkage, and nothing else is. With neither, every unit has its own;
 * with both, it defines. The same holds of upipe_cpu_linear.h, which the unit with the kernels includes too.
 */
#ifndef UPIPE_CPU_H
#define UPIPE_CPU_H

#include "../upipe_ops.h"

#if defined(UPIPE_CPU_DECLARE) || defined(UPIPE_CPU_DEFINE)
#ifdef __cplusplus
extern "C" {
#endif
void upipe_cpu_ops(upipe_ops *ops);
#ifdef __cplusplus
}
#endif
#endif

#if !defined(UPIPE_CPU_DECLARE) || defined(UPIPE_CPU_DEFINE)
#include "upipe_cpu_simd.h"
#include "upipe_cpu_par.h"
#include "upipe_cpu_attn_bwd.h"
#include "upipe_cpu_attn_fwd.h"
#include "upipe_cpu_gemm.h"
#include "upipe_cpu_rows.h"
#include "upipe_cpu_train.h"

/* upipe_cpu_ops -- fills every entry of the table */
UPI_CPU_OPS void upipe_cpu_ops(upipe_ops *ops)
{
    memset(ops, 0, sizeof *ops);
    ops->name = upi_cpu_simd_name();
    ops->attn_can = UPI_ATTN_CAN;
    ops->sync = upi_cpu_sync;
    ops->copy = upi_cpu_copy;
    ops->zero = upi_cpu_zero;
    ops->cast = upi_cpu_cast;
    ops->gemm = upi_cpu_gemm;
    ops->gemm_bytes = upi_cpu_gemm_bytes;
    ops->attn_fwd = upi_cpu_attn_fwd;
    ops->attn_bwd = upi_cpu_attn_bwd;
    ops->attn_bytes = upi_cpu_attn_bytes;
    ops->rope = upi_cpu_rope;
    ops->rmsnorm = upi_cpu_rmsnorm;
    ops->rmsnorm_bwd = upi_cpu_rmsnorm_bwd;
    ops->bias_bwd = upi_cpu_bias_bwd;
    ops->rowdot = upi_cpu_rowdot;
    ops->sum = upi_cpu_sum;
    ops->add = upi_cpu_add;
    ops->scale = upi_cpu_scale;
    ops->gate = upi_cpu_gate;
    ops->gate_bwd = upi_cpu_gate_bwd;
    ops->cross_entropy = upi_cpu_cross_entropy;
    ops->embed = upi_cpu_embed;
    ops->embed_bwd = upi_cpu_embed_bwd;
    ops->total = upi_cpu_total;
    ops->adamw = upi_cpu_adamw;
}
#endif

#endif

/* upipe_cpu_cblas.h -- the host's BLAS for f32 matrix products
 *  <cblas.h>
 *
 *     upipe_cpu_ops(&ops);
 *     upipe_cpu_cblas(&ops);
 *
 * Only this header names cblas.h; the host links the library (-lopenblas, say) and sets its threads. Products
 * with bf16, and sizes that don't fit BLAS's int, still go to the built-in entry. What is lost:
 * BLAS gives no promise of equal bits when rows, columns or the depth are split differently, so results over
 * different numbers of ranks or stages agree within rounding only. Scratch is asked for as before; BLAS does
 * not use it.
 */
#ifndef UPIPE_CPU_CBLAS_H
#define UPIPE_CPU_CBLAS_H

#include <cblas.h>
#include <limits.h>

#include "upipe_cpu.h"
#include "upipe_cpu_gemm.h"

/* BLAS's leading dimension: the stride between rows. Where there is one row it says nothing, but BLAS checks
 * it. */
UPI_INLINE int64_t upi_cblas_stride(upipe_view v)
{
    return v.n > 1 ? v.n_stride : v.d > 0 ? v.d : 1;
}

UPI_INLINE int upi_cblas_accepts(upipe_view v)
{
    int64_t stride = upi_cblas_stride(v);
    return v.dtype == UPIPE_F32 && v.n <= INT_MAX && stride >= v.d && stride <= INT_MAX;
}

UPIPE_API upipe_status upi_cblas_gemm(upipe_ctx *c, upipe_view out, upipe_view a, upipe_view b, int flags,
                                      void *work, size_t work_bytes)
{
    int trans_a = (flags & UPIPE_GEMM_TRANS_A) != 0, trans_b = (flags & UPIPE_GEMM_TRANS_B) != 0;
    int64_t depth;
    int32_t j;
    UPIPE_TRY(upi_check_gemm(c, out, a, b, flags));
    if (!upi_gemm_join(out, &a, &b, flags)) return upi_cpu_gemm(c, out, a, b, flags, work, work_bytes);
    depth = trans_a ? a.n : a.d;
    if (!upi_cblas_accepts(out) || !upi_cblas_accepts(a) || !upi_cblas_accepts(b) || depth == 0 ||
        out.n == 0 || out.d == 0)
        return upi_cpu_gemm(c, out, a, b, flags, work, work_bytes);
    for (j = 0; j < out.h; ++j)
        cblas_sgemm(CblasRowMajor, trans_a ? CblasTrans : CblasNoTrans, trans_b ? CblasTrans : CblasNoTrans,
                    (int)out.n, out.d, (int)depth, 1.0f, (const float *)upipe_view_at(a, 0, a.h > 1 ? j : 0),
                    (int)upi_cblas_stride(a), (const float *)upipe_view_at(b, 0, b.h > 1 ? j : 0),
                    (int)upi_cblas_stride(b), (flags & UPIPE_GEMM_ACCUMULATE) != 0 ? 1.0f : 0.0f,
                    (float *)upipe_view_at(out, 0, j), (int)upi_cblas_stride(out));
    return UPIPE_OK;
}

/* upipe_cpu_cblas -- replaces the table's matrix product by BLAS; ops was filled by upipe_cpu_ops */
UPIPE_API void upipe_cpu_cblas(upipe_ops *ops)
{
    ops->gemm = upi_cblas_gemm;
}

#endif

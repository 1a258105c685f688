/* upipe_cuda_gemm.h -- matrix products by cuBLAS
 *
 * Fills the table's gemm; upipe_cuda_bytes.h has gemm_bytes. Operands f32 and out f32, or operands bf16 and out bf16 or
 * f32; sums are f32 throughout, without TF32. Other mixes of types are refused. Strides between rows are at least their
 * length.
 *
 * cuBLAS counts by columns: what is a row-major matrix [n][d] here is there a column-major one of d rows, d
 * apart by its n_stride. So c = op(a) * op(b) is asked for as c^T = op(b)^T * op(a)^T, with the operands
 * swapped and no transpose of its own. Heads are a batch; an operand with one head has a stride of 0. Products
 * that are added up are one product of a longer depth.
 *
 * cuBLAS chooses its order of summation from shapes and device: there is no promise of equal bits when rows,
 * columns or the depth are split differently. For one shape, on one device and with one stream a handle, it
 * is the same from run to run. Scratch is cuBLAS's own workspace; none is asked for here.
 */
#ifndef UPIPE_CUDA_GEMM_H
#define UPIPE_CUDA_GEMM_H

#include "../upipe_ops.h"
#include "upipe_cuda_bytes.h"
#include "upipe_cuda_device.h"

/* The leading dimension: the stride between rows. Where there is one row it says nothing, but cuBLAS checks
 * it. */
UPIPE_API int64_t upi_cublas_stride(upipe_view v)
{
    return v.n > 1 ? v.n_stride : v.d > 0 ? v.d : 1;
}

UPIPE_API cudaDataType upi_cublas_type(upipe_dtype t)
{
    return t == UPIPE_F32 ? CUDA_R_32F : CUDA_R_16BF;
}

UPIPE_API upipe_status upi_cublas_accepts(upipe_ctx *c, upipe_view out, upipe_view a, upipe_view b)
{
    if (a.dtype != b.dtype || (a.dtype == UPIPE_F32 && out.dtype != UPIPE_F32))
        return upipe_fail(&c->err, UPIPE_ERR_UNSUPPORTED,
                          "gemm: %s times %s to %s; cuBLAS takes f32 to f32, bf16 to bf16 or f32",
                          upipe_dtype_name(a.dtype), upipe_dtype_name(b.dtype), upipe_dtype_name(out.dtype));
    if (upi_cublas_stride(out) < out.d || upi_cublas_stride(a) < a.d || upi_cublas_stride(b) < b.d)
        return upipe_fail(&c->err, UPIPE_ERR_UNSUPPORTED,
                          "gemm: rows of %d, %d and %d elements (out, a, b) are %lld, %lld and %lld apart",
                          out.d, a.d, b.d, (long long)upi_cublas_stride(out), (long long)upi_cublas_stride(a),
                          (long long)upi_cublas_stride(b));
    return UPIPE_OK;
}

/* out = 0, row by row where rows lie apart. */
UPIPE_API upipe_status upi_cuda_gemm_zero(upipe_ctx *c, upipe_view out)
{
    size_t row = (size_t)out.d * upipe_dtype_bytes(out.dtype);
    int whole = out.n == 1 || out.n_stride == out.d;
    int64_t i;
    int32_t j;
    for (j = 0; j < out.h; ++j)
        for (i = 0; i < (whole ? 1 : out.n); ++i)
            UPIPE_CUDA_TRY(&c->err,
                           cudaMemsetAsync(upipe_view_at(out, i, j), 0, whole ? row * (size_t)out.n : row,
                                           (cudaStream_t)c->stream));
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_cuda_gemm(upipe_ctx *c, upipe_view out, upipe_view a, upipe_view b, int flags,
                                     void *work, size_t work_bytes)
{
    const upipe_cuda *self = (const upipe_cuda *)c->ops->self;
    cublasOperation_t op_a = (flags & UPIPE_GEMM_TRANS_A) != 0 ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasOperation_t op_b = (flags & UPIPE_GEMM_TRANS_B) != 0 ? CUBLAS_OP_T : CUBLAS_OP_N;
    int64_t depth;
    float alpha = 1, beta = (flags & UPIPE_GEMM_ACCUMULATE) != 0 ? 1.0f : 0.0f;
    cudaStream_t set;
    (void)work;
    (void)work_bytes;
    UPIPE_TRY(upi_check_gemm(c, out, a, b, flags));
    if (!upi_gemm_join(out, &a, &b, flags))
        return upipe_fail(&c->err, UPIPE_ERR_UNSUPPORTED,
                          "gemm: %d products to add up, whose operands do not lie as one matrix", b.h);
    UPIPE_TRY(upi_cublas_accepts(c, out, a, b));
    depth = op_a == CUBLAS_OP_T ? a.n : a.d;
    if (out.n == 0 || out.d == 0) return UPIPE_OK;
    if (depth == 0) return beta != 0 ? UPIPE_OK : upi_cuda_gemm_zero(c, out); /* the empty sum */
    UPIPE_CUBLAS_TRY(&c->err, cublasGetStream(self->blas, &set));
    /* only where it differs: setting a stream resets the host's workspace */
    if (set != (cudaStream_t)c->stream)
        UPIPE_CUBLAS_TRY(&c->err, cublasSetStream(self->blas, (cudaStream_t)c->stream));
    if (out.h == 1)
        UPIPE_CUBLAS_TRY(&c->err,
                         cublasGemmEx_64(self->blas, op_b, op_a, out.d, out.n, depth, &alpha, b.data,
                                         upi_cublas_type(b.dtype), upi_cublas_stride(b), a.data,
                                         upi_cublas_type(a.dtype), upi_cublas_stride(a), &beta, out.data,
                                         upi_cublas_type(out.dtype), upi_cublas_stride(out),
                                         CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
    else
        UPIPE_CUBLAS_TRY(&c->err,
                         cublasGemmStridedBatchedEx_64(
                             self->blas, op_b, op_a, out.d, out.n, depth, &alpha, b.data,
                             upi_cublas_type(b.dtype), upi_cublas_stride(b), b.h > 1 ? b.h_stride : 0, a.data,
                             upi_cublas_type(a.dtype), upi_cublas_stride(a), a.h > 1 ? a.h_stride : 0, &beta,
                             out.data, upi_cublas_type(out.dtype), upi_cublas_stride(out), out.h_stride,
                             out.h, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
    return UPIPE_OK;
}

#endif

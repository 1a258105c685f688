/* upipe_cuda_kernel.h -- the seams of every kernel: launch, shared memory, copies, tensor cores
 *                                                                                          backend cuda
 *
 * Kernels are written against these few names and the CUDA built-ins __syncthreads, __syncwarp,
 * __shfl_xor_sync, __shfl_sync, threadIdx, blockIdx, blockDim, gridDim, atomicAdd, __threadfence,
 * __threadfence_system. So the same source runs on a device and, where UPIPE_CUDA_SEAMS names another header
 * that defines them, anywhere else: the tests run it on CPU fibers.
 *
 *     UPI_KERNEL(256, 1) void upi_scale(upi_bf16 *x, float f, int64_t n) { ... }
 *     UPIPE_TRY(UPI_LAUNCH(c, upi_scale, blocks, 256, 0, x, f, n));
 *
 * Kernels are templates, so that only what a unit launches is compiled.
 */
#ifndef UPIPE_CUDA_KERNEL_H
#define UPIPE_CUDA_KERNEL_H

#include "upipe_cuda_device.h"

typedef uint16_t upi_bf16; /* storage alone */

/* Of --use_fast_math, -ftz=true and -prec-div=false no macro tells: what is no instruction fails the assembler there,
 * and is gone before it elsewhere. */
#if defined(__NVCC__) && defined(__CUDA_ARCH__)
extern "C" __device__ int __nvvm_reflect(const char *name);
static __device__ __forceinline__ void upi_need_ieee(void)
{
    if (__nvvm_reflect("__CUDA_FTZ") || !__nvvm_reflect("__CUDA_PREC_DIV"))
        asm volatile("upipe_needs_IEEE_arithmetic_compile_it_in_a_unit_of_its_own_without_use_fast_math;");
}
#else
#define upi_need_ieee() ((void)0)
#endif

#ifdef UPIPE_CUDA_SEAMS
#include UPIPE_CUDA_SEAMS
#else

#include <cuda_runtime.h>

/* At most `threads` a block, registers for at least `blocks` blocks a processor. */
#define UPI_KERNEL(threads, blocks) static __global__ __launch_bounds__(threads, blocks)
#define UPI_DEVICE                  static __device__ __forceinline__
#define UPI_UNROLL                  _Pragma("unroll")

/* The block's dynamic shared memory, aligned for swizzles of 1024 bytes. */
#define UPI_SHARED(type, name)                                          \
    extern __shared__ __align__(1024) unsigned char upi_shared_bytes[]; \
    type *name = (type *)upi_shared_bytes

/* Launches on ctx->stream and returns a status. A kernel with template arguments stands in parentheses. A
 * launch has no status of its own but the thread's last error: one that the host has left unread is forgotten
 * before, not taken for this launch's. */
/* clang-format off */
#define UPI_LAUNCH(c, kernel, grid, block, shared, ...)                                \
    ((void)cudaGetLastError(),                                                         \
     (kernel)<<<(grid), (block), (shared), (cudaStream_t)(c)->stream>>>(__VA_ARGS__), \
     upipe_cuda_check(&(c)->err, cudaGetLastError(), "launch of " #kernel))
/* clang-format on */

/* The same for a kernel of which `count` blocks, started one after another, wait for one another: its launch bounds
 * must make sure that a device holds so many. */
#define UPI_LAUNCH_TOGETHER(c, count, kernel, ...) UPI_LAUNCH(c, kernel, __VA_ARGS__)

/* More than 48 KiB of shared memory must be asked for, once a kernel and device. */
#define UPI_ALLOW_SHARED(c, kernel, shared) \
    upi_cuda_allow_shared(&(c)->err, (const void *)(kernel), (int)(shared))

/* ---- numbers ---- */

/* Two floats as bf16, rounded to nearest even; `low` in the low half. */
UPI_DEVICE uint32_t upi_pack_bf16(float low, float high)
{
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

/* 2^x, to 2 ulp; results below the normal range are 0. */
UPI_DEVICE float upi_exp2(float x)
{
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

UPI_DEVICE float upi_as_float(uint32_t bits)
{
    return __uint_as_float(bits);
}

UPI_DEVICE uint32_t upi_as_bits(float f)
{
    return __float_as_uint(f);
}

/* ---- shared memory, and copies into it ---- */

/* Address of a shared object, as the instructions below take it. */
UPI_DEVICE uint32_t upi_shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* Starts a copy of 16 bytes into shared memory, both sides aligned to 16; zeros where `valid` is 0, and then
 * `src` is not read. */
UPI_DEVICE void upi_copy16(uint32_t dst, const void *src, int valid)
{
    int n = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(n)
                 : "memory");
}

/* Closes the group of the thread's copies started so far. */
UPI_DEVICE void upi_copy_commit(void)
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* All but the thread's N newest groups have arrived; other threads see them after a barrier. */
template <int N> UPI_DEVICE void upi_copy_wait(void)
{
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/* ---- tensor cores ---- */

/* Four 8x8 bf16 matrices; lane l gives the address of row l % 8 of matrix l / 8. Lane l receives elements
 * (l / 4, 2 (l % 4)) and the next one of each. */
UPI_DEVICE void upi_load_matrix4(uint32_t r[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

/* The same, each matrix transposed on its way. */
UPI_DEVICE void upi_load_matrix4_trans(uint32_t r[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

/* d [16][8] f32 += a [16][16] bf16 * b [16][8] bf16 (b by columns), over a warp. Lane l holds of d the
 * elements (l / 4, 2 (l % 4)), the next one, and both 8 rows below. */
UPI_DEVICE void upi_mma(float d[4], const uint32_t a[4], const uint32_t b[2])
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* ---- between blocks ---- */

UPI_DEVICE int upi_load_acquire(const int *p)
{
    int v;
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

UPI_DEVICE void upi_add_release(int *p, int v)
{
    asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

/* *p += v, of which nobody waits for the result; *p, v and the sum are 0 below 2^-126. No other thread may touch *p
 * until a release or a barrier has put this behind it: the order of sums is the caller's. */
UPI_DEVICE void upi_add_alone(float *p, float v)
{
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(p), "f"(v) : "memory");
}

/* Inside a loop that waits for another block. */
UPI_DEVICE void upi_pause(void)
{
    __nanosleep(20);
}

/* Nanoseconds, modulo 2^32, of a clock that goes on while the block is put aside. */
UPI_DEVICE uint32_t upi_clock(void)
{
    uint32_t now;
    asm volatile("mov.u32 %0, %globaltimer_lo;" : "=r"(now));
    return now;
}

/* Ends all blocks, and the context: the launch has failed. */
UPI_DEVICE void upi_trap(void)
{
    __trap();
}

#endif

/* For loops whose length is known at run time alone, or too long to unroll whole. */
#ifdef __CUDACC__
#define UPI_UNROLL_4 _Pragma("unroll 4")
#else
#define UPI_UNROLL_4
#endif

/* a * b, rounded: fused with a later sum it would not be. */
UPI_DEVICE float upi_product(float a, float b)
{
#ifdef __CUDACC__
    return __fmul_rn(a, b);
#else
    return a * b;
#endif
}

/* One element of either storage type as f32, and back, rounded to nearest even. */
UPI_DEVICE float upi_from_bf16(upi_bf16 b)
{
    return upi_as_float((uint32_t)b << 16);
}

UPI_DEVICE upi_bf16 upi_to_bf16(float f)
{
    return (upi_bf16)(upi_pack_bf16(f, 0.0f) & 0xffff);
}

#endif

/* upipe_cuda_hopper.h -- the seams of kernels for compute capability 9.0
 *
 * What sm_90a added to the names of upipe_cuda_kernel.h, and runs elsewhere in the same way: barriers in
 * shared memory, bulk copies (TMA), products of warpgroups (wgmma), registers that move between them.
 *
 *     UPI_HOPPER_KERNEL(384) void upi_twice(UPI_BY_VALUE upi_twice_args a)
 *     {
 *     #if UPI_HOPPER_CODE
 *         ...
 *     #endif
 *     }
 *
 * Tiles in shared memory are panels of 128 bytes a row, swizzled, at multiples of 1024 bytes; a tile of 128
 * bf16 columns is two panels behind one another. A tensor map cuts a view [n][h][d] into such panels: TMA
 * then copies `rows` rows of one head from any row and column, with zeros for what lies outside of the view,
 * which it does not write either.
 *
 * A unit that is compiled without sm_90a has the kernels as stubs of one thread a block, which no
 * UPI_HOPPER_FITS takes.
 */
#ifndef UPIPE_CUDA_HOPPER_H
#define UPIPE_CUDA_HOPPER_H

#include "../upipe_ops.h"
#include "upipe_cuda_kernel.h"

#ifndef UPIPE_CUDA_SEAMS

#include <cuda.h>

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define UPI_HOPPER_KERNEL(threads) UPI_KERNEL(threads, 1)
#define UPI_HOPPER_CODE            1
#else
#define UPI_HOPPER_KERNEL(threads) UPI_KERNEL(1, 1)
#define UPI_HOPPER_CODE            0
#endif

/* A parameter whose address TMA may take. */
#define UPI_BY_VALUE const __grid_constant__

#define UPI_HOPPER_FITS(kernel, threads, registers) \
    upi_cuda_hopper_fits((const void *)(kernel), threads, registers)

/* Whether the current device has code for the kernel, a block can have so many threads, and starts with so
 * many registers in all: the sum of what its warpgroups will have after they have shared them out anew, which
 * would wait for ever for more. */
UPIPE_API int upi_cuda_hopper_fits(const void *kernel, int threads, int registers)
{
    cudaFuncAttributes x;
    if (cudaFuncGetAttributes(&x, kernel) == cudaSuccess)
        return x.maxThreadsPerBlock >= threads && x.numRegs * threads >= registers;
    (void)cudaGetLastError();
    return 0;
}

/* ---- tensor maps ---- */

typedef CUtensorMap upi_tensor_map;

/* dims from the innermost, in elements of 2 (bf16) or 4 bytes (f32); strides of the outer two in bytes. The
 * driver's function is asked for at every call: the library keeps no state, and links with no driver. */
UPIPE_API upipe_status upi_tensor_map_encode(upipe_err *e, upi_tensor_map *map, int element, void *base,
                                             const uint64_t dims[3], const uint64_t strides[2], uint32_t rows)
{
    typedef CUresult (*encoder)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                                const cuuint64_t *, const cuuint32_t *, const cuuint32_t *,
                                CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                                CUtensorMapFloatOOBfill);
    const cuuint32_t box[3] = {128u / (unsigned)element, rows, 1}, each[3] = {1, 1, 1};
    cudaDriverEntryPointQueryResult found;
    void *encode = NULL;
    CUresult r;
    UPIPE_CUDA_TRY(e, cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000,
                                                       cudaEnableDefault, &found));
    if (encode == NULL || found != cudaDriverEntryPointSuccess)
        return upipe_fail(e, UPIPE_ERR_BACKEND, "the driver has no cuTensorMapEncodeTiled");
    r = ((encoder)encode)(
        map, element == 2 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 3, base, dims,
        strides, box, each, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
        CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (r == CUDA_SUCCESS) return UPIPE_OK;
    return upipe_fail(e, UPIPE_ERR_BACKEND, "cuTensorMapEncodeTiled: error %d", (int)r);
}

/* Brings the map to where TMA reads it. */
UPI_DEVICE void upi_tma_prefetch(const upi_tensor_map *map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/* ---- barriers in shared memory: eight bytes, at a multiple of eight ---- */

/* Every phase ends after `count` arrivals and the bytes that they expect. By one thread; the others, and TMA,
 * may use the barrier behind upi_mbarrier_fence and __syncthreads. */
UPI_DEVICE void upi_mbarrier_init(uint32_t barrier, int count)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

UPI_DEVICE void upi_mbarrier_fence(void)
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

UPI_DEVICE void upi_mbarrier_arrive(uint32_t barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/* Arrives, after this phase has been told to expect `bytes` more from loads. */
UPI_DEVICE void upi_mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

/* Returns when the phase of this parity has ended; phases count from 0, so 1 returns at once at first. */
UPI_DEVICE void upi_mbarrier_wait(uint32_t barrier, uint32_t parity)
{
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again_%=:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, 0x989680;\n"
                 "@!done bra again_%=;\n"
                 "}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}

/* Waits for that for `ns` nanoseconds, as far as the device takes the hint; whether the phase has ended. */
UPI_DEVICE int upi_mbarrier_wait_for(uint32_t barrier, uint32_t parity, uint32_t ns)
{
    int ended;
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2, %3;\n"
                 "selp.s32 %0, 1, 0, done;\n"
                 "}"
                 : "=r"(ended)
                 : "r"(barrier), "r"(parity), "r"(ns)
                 : "memory");
    return ended;
}

/* The barrier's eight bytes, to compare and to look at: upipe_cuda_watch.h. */
UPI_DEVICE uint64_t upi_mbarrier_word(uint32_t barrier)
{
    uint64_t word;
    asm volatile("ld.volatile.shared.b64 %0, [%1];" : "=l"(word) : "r"(barrier) : "memory");
    return word;
}

/* Whether the phase of this parity has ended, which then shows what upi_mbarrier_wait would. */
UPI_DEVICE int upi_mbarrier_test(uint32_t barrier, uint32_t parity)
{
    int ended;
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
                 "selp.s32 %0, 1, 0, done;\n"
                 "}"
                 : "=r"(ended)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return ended;
}

/* The parity of the phase that a barrier is in. */
UPI_DEVICE uint32_t upi_mbarrier_parity(uint32_t barrier)
{
    return (uint32_t)upi_mbarrier_test(barrier, 0);
}

/* ---- bulk copies: by one thread; shared addresses of tiles are multiples of 1024, others of 16 ---- */

/* What the thread has written, or has learnt that others wrote, in shared memory is there for bulk copies and
 * wgmma that come after; with upi_fence_async_global, in global memory. */
UPI_DEVICE void upi_fence_async_shared(void)
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

UPI_DEVICE void upi_fence_async_global(void)
{
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

/* A panel of the map's rows from column x, row y of head z on. The barrier gets all its bytes, those of zeros
 * too: rows * 128. */
UPI_DEVICE void upi_tma_load(uint32_t to, const upi_tensor_map *map, int x, int y, int z, uint32_t barrier)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
                 "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
                 : "memory");
}

/* Plain bytes, a multiple of 16 from a multiple of 16. */
UPI_DEVICE void upi_bulk_load(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier)
{
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}

/* The other way: belongs to the thread's open group, until upi_bulk_commit. */
UPI_DEVICE void upi_tma_store(const upi_tensor_map *map, int x, int y, int z, uint32_t from)
{
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(map),
                 "r"(x), "r"(y), "r"(z), "r"(from)
                 : "memory");
}

/* The same of an f32 map, added to what is there; each sum atomic, their order open. */
UPI_DEVICE void upi_tma_add(const upi_tensor_map *map, int x, int y, int z, uint32_t from)
{
    asm volatile("cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group "
                 "[%0, {%1, %2, %3}], [%4];" ::"l"(map),
                 "r"(x), "r"(y), "r"(z), "r"(from)
                 : "memory");
}

/* to[i] += from[i], f32, as plain bytes; each sum atomic, their order open. Likewise of the open group. */
UPI_DEVICE void upi_bulk_add(float *to, uint32_t from, uint32_t bytes)
{
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
                 "r"(from), "r"(bytes)
                 : "memory");
}

UPI_DEVICE void upi_bulk_commit(void)
{
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/* All but the thread's N newest groups have read shared memory. Needed before its block ends. */
template <int N> UPI_DEVICE void upi_bulk_wait_read(void)
{
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

/* All but the thread's N newest groups are in global memory. */
template <int N> UPI_DEVICE void upi_bulk_wait(void)
{
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}

/* Four 8x8 bf16 matrices into shared memory, as upi_load_matrix4 reads them. */
UPI_DEVICE void upi_store_matrix4(uint32_t address, const uint32_t r[4])
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

/* ---- order of instructions ---- */

/* What x depends on is computed before the wait that follows. ptxas sees no reason for that and moves a wait for
 * products ahead of arithmetic, which then no longer runs under them. So x guards a store that never happens:
 * x >= 0, or NaN. `address`: any of shared memory. */
UPI_DEVICE void upi_computed_before(float x, uint32_t address)
{
    asm volatile("{\n"
                 ".reg .pred never;\n"
                 "setp.lt.f32 never, %0, 0f00000000;\n"
                 "@never st.shared.f32 [%1], %0;\n"
                 "}" ::"f"(x),
                 "r"(address)
                 : "memory");
}

/* ---- part of a block: 16 barriers that have numbers, 0 that of __syncthreads ---- */

/* Waits until `threads` threads, whole warps, have come to either of these. */
UPI_DEVICE void upi_barrier_sync(int id, int threads)
{
    asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

UPI_DEVICE void upi_barrier_arrive(int id, int threads)
{
    asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* A thread of this warpgroup has N registers from now on: a multiple of 8, no more than before. */
template <int N> UPI_DEVICE void upi_registers_less(void)
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

/* No fewer than before; waits until other warpgroups have given them. */
template <int N> UPI_DEVICE void upi_registers_more(void)
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

#endif

#include "upipe_cuda_wgmma.h"

/* ---- operands of wgmma in shared memory ---- */

/* Rows of the operand (M or N) are rows of a panel, K its columns: the operand begins at row 8 i of the
 * panel, column 16 k: address of that row + 32 k. `stride`: 1024, the bytes of eight rows. */
UPI_DEVICE uint64_t upi_wgmma_rows(uint32_t address)
{
    return (uint64_t)(address >> 4 & 0x3fff) | (uint64_t)1 << 16 | (uint64_t)(1024 >> 4) << 32 |
           (uint64_t)1 << 62;
}

/* The transposed operand (TRANS): K runs down the panel, from a row that is a multiple of 8, and M or N along
 * its 64 columns, and on in the panel `panel` bytes further. */
UPI_DEVICE uint64_t upi_wgmma_columns(uint32_t address, uint32_t panel)
{
    return (uint64_t)(address >> 4 & 0x3fff) | (uint64_t)(panel >> 4 & 0x3fff) << 16 |
           (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}

/* The operand `bytes`, a multiple of 16, further in shared memory. */
UPI_DEVICE uint64_t upi_wgmma_further(uint64_t operand, int bytes)
{
    return operand + (uint64_t)(bytes / 16);
}

/* Byte offset of 16-byte chunk c of row r of a tile whose panels have `rows` rows. */
UPI_DEVICE uint32_t upi_panel_at(int rows, int r, int c)
{
    return (uint32_t)((c / 8 * rows + r) * 128 + ((c ^ r) & 7) * 16);
}

/* ---- tensor maps of views ---- */

/* TMA takes the view: its rows begin at multiples of 16 bytes, a positive stride apart that it can hold. */
UPIPE_API int upi_tensor_map_fits(upipe_view v)
{
    const int64_t each = 16 / (int64_t)upipe_dtype_bytes(v.dtype), most = INT64_C(1) << 36;
    return v.n > 0 && v.n < INT32_MAX && v.h > 0 && (uintptr_t)v.data % 16 == 0 &&
           (v.n == 1 || (v.n_stride > 0 && v.n_stride < most && v.n_stride % each == 0)) &&
           (v.h == 1 || (v.h_stride > 0 && v.h_stride < most && v.h_stride % each == 0));
}

/* Why the device cannot run a kernel: `code` 0, or fewer bytes of shared memory than it needs; NULL if it
 * can. */
UPIPE_API const char *upi_cuda_hopper_missing(const upipe_cuda *device, int shared, int code)
{
    if (shared > device->shared_most) return "the device has too little shared memory for them";
    return code ? NULL : "the program has no code for sm_90a";
}

/* The map of a view of bf16 or f32 that fits, in panels of `rows` rows, at most 256. */
UPIPE_API upipe_status upi_tensor_map_make(upipe_ctx *c, upi_tensor_map *map, upipe_view v, int rows)
{
    const int64_t bytes = (int64_t)upipe_dtype_bytes(v.dtype);
    const uint64_t dims[3] = {(uint64_t)v.d, (uint64_t)v.n, (uint64_t)v.h};
    const int64_t row = (v.d * bytes + 15) / 16 * 16; /* a stride that is never used */
    const uint64_t strides[2] = {(uint64_t)(v.n > 1 ? v.n_stride * bytes : row),
                                 (uint64_t)(v.h > 1 ? v.h_stride * bytes : row)};
    return upi_tensor_map_encode(&c->err, map, (int)bytes, v.data, dims, strides, (uint32_t)rows);
}

#endif

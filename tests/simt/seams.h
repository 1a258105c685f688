/* seams.h -- the emulator's side of upipe_cuda_kernel.h: kernels run on CPU fibers      C++17, tests only
 *
 *     g++ -std=c++17 -DUPIPE_CUDA_SEAMS='"simt/seams.h"' -I. -Itests -Itests/fake -c tests/cuda/table.cpp
 *
 * A launch is checked as a device would, its arguments are copied, and the rest goes to the fake stream of
 * tests/fake, which runs it when it likes. simt.h says what is found on the way.
 */
#ifndef SIMT_SEAMS_H
#define SIMT_SEAMS_H

#include <math.h>

#include <functional>
#include <tuple>

#include "fake/fake.h"
#include "simt/simt.h"

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_)
    {
    }
};

#define threadIdx (simt_fiber_now->index)
#define blockIdx  (simt_here->index)
#define blockDim  (simt_here->size)
#define gridDim   (simt_here->grid)
#define warpSize  32

#define UPI_KERNEL(threads, blocks) __attribute__((unused)) static
#define UPI_DEVICE                  __attribute__((unused)) static inline
#define UPI_UNROLL

#define UPI_SHARED(type, name) type *name = (type *)simt_here->shared

#define UPI_HOPPER_KERNEL(threads)                  UPI_KERNEL(threads, 1)
#define UPI_HOPPER_CODE                             1
#define UPI_BY_VALUE                                const
#define UPI_HOPPER_FITS(kernel, threads, registers) ((void)(kernel), (threads) <= 1024)

/* ---- launches ---- */

/* A grid or block as the caller wrote it, before anything is cut to 32 bits. */
struct simt_size {
    simt_extent e;
    simt_size(const dim3 &d) : e{d.x, d.y, d.z}
    {
    }
    template <class I,
              class = typename std::enable_if<std::is_integral<I>::value || std::is_enum<I>::value>::type>
    simt_size(I x) : e{(int64_t)x, 1, 1}
    {
        if ((uint64_t)(int64_t)x >> 32 != 0)
            simt_finding("a grid of %lld blocks is cut to 32 bits", (long long)x);
    }
};

/* Kernels that may have more shared memory than others. */
struct simt_allowance {
    const void *kernel;
    int device;
    size_t bytes;
    simt_allowance *next;
};
inline simt_allowance *simt_allowances; /* under simt_pool_lock */

inline simt_allowance *simt_find_allowance(const void *kernel, int device)
{
    simt_allowance *a = simt_allowances;
    while (a != NULL && (a->kernel != kernel || a->device != device)) a = a->next;
    return a;
}

template <class... P> cudaError_t simt_allow_shared(void (*kernel)(P...), size_t bytes)
{
    simt_allowance *a;
    int device = 0, most = 0;
    cudaError_t r =
        cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
    if (r != cudaSuccess) return r;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (bytes > (size_t)most) return cudaErrorInvalidValue;
    pthread_mutex_lock(&simt_pool_lock);
    a = simt_find_allowance((const void *)kernel, device);
    if (a == NULL) simt_allowances = a = new simt_allowance{(const void *)kernel, device, 0, simt_allowances};
    a->bytes = bytes;
    pthread_mutex_unlock(&simt_pool_lock);
    return cudaSuccess;
}

/* What a device says to a launch of this shape. */
inline cudaError_t simt_check_shape(const simt_shape &s, const void *kernel)
{
    const simt_extent &g = s.grid, &b = s.block;
    const simt_allowance *a;
    size_t most = 48 << 10;
    int device = 0;
    if (g.x < 1 || g.y < 1 || g.z < 1 || g.x > INT32_MAX || g.y > 65535 || g.z > 65535)
        return cudaErrorInvalidConfiguration;
    if (b.x < 1 || b.y < 1 || b.z < 1 || b.x > 1024 || b.y > 1024 || b.z > 64 || b.x * b.y * b.z > 1024)
        return cudaErrorInvalidConfiguration;
    cudaGetDevice(&device);
    pthread_mutex_lock(&simt_pool_lock);
    a = simt_find_allowance(kernel, device);
    if (a != NULL && a->bytes > most) most = a->bytes;
    pthread_mutex_unlock(&simt_pool_lock);
    return s.shared > most ? cudaErrorInvalidValue : cudaSuccess;
}

/* Copies the arguments as the kernel's parameters are, and enqueues. */
template <class... P, class... A>
cudaError_t simt_launch_kernel(cudaStream_t stream, int together, const char *name, const char *from,
                               void (*kernel)(P...), simt_size grid, simt_size block, size_t shared,
                               A &&...args)
{
    simt_shape shape = {grid.e, block.e, shared, together};
    cudaError_t r = simt_check_shape(shape, (const void *)kernel);
    static_assert((sizeof(P) + ... + 0) <= 4096, "a kernel has 4096 bytes of parameters at most");
    if (r != cudaSuccess) return r;
    const char *columns = strstr(from, "D = "); /* a template's argument, in the function's name */
    return fake_enqueue(
        stream, name,
        [=, params = std::tuple<P...>(args...)] {
            if (!simt_run(shape, [&] { std::apply(kernel, params); })) fake_end_context();
        },
        {grid.e.x * grid.e.y * grid.e.z, (int)(block.e.x * block.e.y * block.e.z), 0, shared, 0},
        columns != NULL ? atoi(columns + 4) : 0);
}

#define UPI_LAUNCH_TOGETHER(c, count, kernel, grid, block, shared, ...)                                 \
    upipe_cuda_check(&(c)->err,                                                                         \
                     simt_launch_kernel((cudaStream_t)(c)->stream, count, #kernel, __PRETTY_FUNCTION__, \
                                        kernel, (grid), (block), (size_t)(shared), __VA_ARGS__),        \
                     "launch of " #kernel)

#define UPI_LAUNCH(c, kernel, ...) UPI_LAUNCH_TOGETHER(c, 1, kernel, __VA_ARGS__)

#define UPI_ALLOW_SHARED(c, kernel, shared) \
    upipe_cuda_check(&(c)->err, simt_allow_shared(kernel, (size_t)(shared)), "cudaFuncSetAttribute")

/* ---- numbers ---- */

UPI_DEVICE float upi_as_float(uint32_t bits)
{
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

UPI_DEVICE uint32_t upi_as_bits(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits;
}

UPI_DEVICE uint32_t upi_pack_bf16(float low, float high)
{
    uint32_t part[2] = {upi_as_bits(low), upi_as_bits(high)};
    for (int i = 0; i < 2; ++i)
        part[i] =
            (part[i] & 0x7fffffff) > 0x7f800000 ? 0x7fff : (part[i] + 0x7fff + (part[i] >> 16 & 1)) >> 16;
    return (part[0] & 0xffff) | part[1] << 16;
}

UPI_DEVICE float upi_exp2(float x)
{
    float r = exp2f(x);
    return r < 0x1p-126f ? 0.0f : r;
}

UPI_DEVICE float rsqrtf(float x)
{
    return 1.0f / sqrtf(x);
}

/* C libraries have functions of these names */
#define __expf(x) expf(x)
#define __logf(x) logf(x)

/* Never part of a fused multiply-add. */
#define __fmul_rn(x, y) simt_rounded((float)(x) * (float)(y))
#define __fadd_rn(x, y) simt_rounded((float)(x) + (float)(y))
#define __fsub_rn(x, y) simt_rounded((float)(x) - (float)(y))

UPI_DEVICE float simt_rounded(float x)
{
    __asm__("" : "+g"(x));
    return x;
}

/* As the device's: 0 where y is above 2^126. */
UPI_DEVICE float __fdividef(float x, float y)
{
    return fabsf(y) > 0x1p126f && fabsf(y) <= 0x1.fffffep127f ? 0.0f * x : x / y;
}

/* ---- a block and its warps ---- */

#define __syncthreads() simt_barrier(__FILE__, __LINE__)

SIMT_QUIET inline void simt_lanes_meet(void **, uint32_t mask)
{
    simt_race_lanes(mask);
}

UPI_DEVICE void __syncwarp(uint32_t mask = 0xffffffff, SIMT_HERE)
{
    simt_meet("__syncwarp", mask, NULL, simt_lanes_meet, file, line);
}

/* Lanes are counted inside groups of `width`, a power of two. */
template <class T> SIMT_QUIET inline T __shfl_sync(uint32_t mask, T v, int lane, int width = 32, SIMT_HERE)
{
    unsigned me = simt_fiber_now->lane, group = me & ~(unsigned)(width - 1);
    return simt_shuffle("__shfl_sync", mask, v, group + ((unsigned)lane & (unsigned)(width - 1)), file, line);
}

template <class T>
SIMT_QUIET inline T __shfl_xor_sync(uint32_t mask, T v, int lanes, int width = 32, SIMT_HERE)
{
    unsigned me = simt_fiber_now->lane, from = me ^ (unsigned)lanes;
    if (from / (unsigned)width > me / (unsigned)width) from = me; /* an earlier group may be read */
    return simt_shuffle("__shfl_xor_sync", mask, v, from, file, line);
}

template <class T>
SIMT_QUIET inline T __shfl_down_sync(uint32_t mask, T v, unsigned lanes, int width = 32, SIMT_HERE)
{
    unsigned me = simt_fiber_now->lane, inside = me & (unsigned)(width - 1);
    return simt_shuffle("__shfl_down_sync", mask, v, inside + lanes < (unsigned)width ? me + lanes : me, file,
                        line);
}

template <class T>
SIMT_QUIET inline T __shfl_up_sync(uint32_t mask, T v, unsigned lanes, int width = 32, SIMT_HERE)
{
    unsigned me = simt_fiber_now->lane, inside = me & (unsigned)(width - 1);
    return simt_shuffle("__shfl_up_sync", mask, v, inside >= lanes ? me - lanes : me, file, line);
}

UPI_DEVICE uint32_t __ballot_sync(uint32_t mask, int vote, SIMT_HERE)
{
    return simt_vote("__ballot_sync", mask, vote, file, line);
}

UPI_DEVICE int __any_sync(uint32_t mask, int vote, SIMT_HERE)
{
    return simt_vote("__any_sync", mask, vote, file, line) != 0;
}

UPI_DEVICE int __all_sync(uint32_t mask, int vote, SIMT_HERE)
{
    return simt_vote("__all_sync", mask, vote, file, line) == mask;
}

/* ---- shared memory, and copies into it ---- */

UPI_DEVICE uint32_t upi_shared_address(const void *p)
{
    return simt_shared_address(p);
}

UPI_DEVICE void upi_copy16(uint32_t dst, const void *src, int valid)
{
    simt_copy_start(dst, src, 16, valid ? 16 : 0);
}

UPI_DEVICE void upi_copy_commit(void)
{
    simt_copy_commit();
}

template <int N> UPI_DEVICE void upi_copy_wait(void)
{
    simt_copy_wait(N);
}

/* ---- tensor cores ---- */

UPI_DEVICE void upi_load_matrix4(uint32_t r[4], uint32_t address, SIMT_HERE)
{
    simt_load_arg a = {address, r};
    simt_meet("ldmatrix", 0xffffffff, &a, simt_load_matrices<0>, file, line);
}

UPI_DEVICE void upi_load_matrix4_trans(uint32_t r[4], uint32_t address, SIMT_HERE)
{
    simt_load_arg a = {address, r};
    simt_meet("ldmatrix.trans", 0xffffffff, &a, simt_load_matrices<1>, file, line);
}

UPI_DEVICE void upi_mma(float d[4], const uint32_t a[4], const uint32_t b[2], SIMT_HERE)
{
    simt_mma_arg x = {d, a, b};
    simt_meet("mma", 0xffffffff, &x, simt_multiply, file, line);
}

/* ---- what Hopper added ---- */

typedef simt_map upi_tensor_map;

inline upipe_status upi_tensor_map_encode(upipe_err *e, upi_tensor_map *map, int element, void *base,
                                          const uint64_t dims[3], const uint64_t steps[2], uint32_t rows)
{
    int i;
    memset(map, 0, sizeof *map);
    if ((uintptr_t)base % 16 != 0 || rows < 1 || rows > 256 || (element != 2 && element != 4))
        return upipe_fail(e, UPIPE_ERR_BACKEND, "no tensor map of %p in boxes of %u rows", base, rows);
    for (i = 0; i < 3; ++i)
        if (dims[i] < 1 || dims[i] > (uint64_t)1 << 32 ||
            (i > 0 && (steps[i - 1] % 16 != 0 || steps[i - 1] < 1 || steps[i - 1] >= (uint64_t)1 << 40)))
            return upipe_fail(e, UPIPE_ERR_BACKEND, "no tensor map of %llu elements",
                              (unsigned long long)dims[i]);
    map->base = (char *)base;
    for (i = 0; i < 3; ++i) map->dim[i] = (int64_t)dims[i];
    for (i = 0; i < 2; ++i) map->step[i + 1] = (int64_t)steps[i];
    map->element = element;
    map->rows = (int)rows;
    return UPIPE_OK;
}

UPI_DEVICE void upi_tma_prefetch(const upi_tensor_map *)
{
}

#define SIMT_CODE_HERE __builtin_return_address(0)
#define SIMT_APART     SIMT_QUIET __attribute__((noinline)) inline
/* A seam passes its arguments on. */
#define SIMT_SEAM(type, name, parameters, ...) \
    SIMT_APART type name parameters            \
    {                                          \
        return __VA_ARGS__;                    \
    }

SIMT_SEAM(void, upi_mbarrier_init, (uint32_t barrier, int count),
          simt_mbarrier_init(barrier, count, SIMT_CODE_HERE))
SIMT_SEAM(void, upi_mbarrier_fence, (void), simt_race_fence_async_shared())
SIMT_SEAM(void, upi_mbarrier_arrive, (uint32_t barrier), simt_mbarrier_arrive(barrier, 0, SIMT_CODE_HERE))
SIMT_SEAM(void, upi_mbarrier_arrive_expect, (uint32_t barrier, uint32_t bytes),
          simt_mbarrier_arrive(barrier, bytes, SIMT_CODE_HERE))
SIMT_SEAM(void, upi_mbarrier_wait, (uint32_t barrier, uint32_t parity, SIMT_HERE),
          simt_mbarrier_wait(barrier, parity, file, line, SIMT_CODE_HERE))
SIMT_SEAM(int, upi_mbarrier_wait_for, (uint32_t barrier, uint32_t parity, uint32_t ns, SIMT_HERE),
          simt_mbarrier_wait_for(barrier, parity, ns, file, line, SIMT_CODE_HERE))
SIMT_SEAM(uint64_t, upi_mbarrier_word, (uint32_t barrier), simt_mbarrier_word(barrier, SIMT_CODE_HERE))
SIMT_SEAM(uint32_t, upi_mbarrier_parity, (uint32_t barrier), simt_mbarrier_parity(barrier, SIMT_CODE_HERE))
SIMT_SEAM(int, upi_mbarrier_test, (uint32_t barrier, uint32_t parity),
          simt_mbarrier_test(barrier, parity, SIMT_CODE_HERE))
SIMT_SEAM(void, upi_fence_async_shared, (void), simt_race_fence_async_shared())
SIMT_SEAM(void, upi_fence_async_global, (void), simt_race_fence_async_global())
SIMT_SEAM(void, upi_tma_load, (uint32_t to, const upi_tensor_map *map, int x, int y, int z, uint32_t barrier),
          simt_load_box(to, map, x, y, z, barrier, SIMT_CODE_HERE))
SIMT_SEAM(void, upi_bulk_load, (uint32_t to, const void *from, uint32_t bytes, uint32_t barrier),
          simt_load_plain(to, from, bytes, barrier, SIMT_CODE_HERE))
SIMT_SEAM(void, upi_tma_store, (const upi_tensor_map *map, int x, int y, int z, uint32_t from),
          simt_store_box(map, x, y, z, from, SIMT_CODE_HERE))
SIMT_SEAM(void, upi_tma_add, (const upi_tensor_map *map, int x, int y, int z, uint32_t from),
          simt_add_box(map, x, y, z, from, SIMT_CODE_HERE))
SIMT_SEAM(void, upi_bulk_add, (float *to, uint32_t from, uint32_t bytes),
          simt_add_plain(to, from, bytes, SIMT_CODE_HERE))

UPI_DEVICE void upi_bulk_commit(void)
{
    simt_bulk_commit();
}

template <int N> UPI_DEVICE void upi_bulk_wait_read(void)
{
    simt_bulk_wait(N, 0);
}

template <int N> UPI_DEVICE void upi_bulk_wait(void)
{
    simt_bulk_wait(N, 1);
}

UPI_DEVICE void upi_store_matrix4(uint32_t address, const uint32_t r[4], SIMT_HERE)
{
    simt_store_arg a = {address, r};
    simt_meet("stmatrix", 0xffffffff, &a, simt_store_matrices, file, line);
}

UPI_DEVICE void upi_wgmma_fence(SIMT_HERE)
{
    simt_gather("wgmma.fence", NULL, simt_product_fence, file, line);
}

UPI_DEVICE void upi_wgmma_commit(SIMT_HERE)
{
    simt_gather("wgmma.commit_group", NULL, simt_product_commit, file, line);
}

template <int N> UPI_DEVICE void upi_wgmma_wait(SIMT_HERE)
{
    int newest = N;
    simt_gather("wgmma.wait_group", &newest, simt_product_wait, file, line);
}

template <int N, int TRANS_A, int TRANS_B>
UPI_DEVICE void upi_wgmma_ss(float *d, uint64_t a, uint64_t b, int add, SIMT_HERE)
{
    simt_product_arg x = {d, NULL, a, b, N, add, TRANS_A, TRANS_B};
    simt_gather("wgmma", &x, simt_product_start, file, line);
}

template <int N, int TRANS_B>
UPI_DEVICE void upi_wgmma_rs(float *d, const uint32_t a[4], uint64_t b, int add, SIMT_HERE)
{
    simt_product_arg x = {d, a, 0, b, N, add, 0, TRANS_B};
    simt_gather("wgmma", &x, simt_product_start, file, line);
}

UPI_DEVICE void upi_computed_before(float x, uint32_t, SIMT_HERE)
{
    if (x < 0) simt_finding("%s:%d: a store that must never happen depends on %g", file, line, (double)x);
}

/* Barriers of part of a block, 1 to 15. */
UPI_DEVICE void upi_barrier_sync(int id, int threads, SIMT_HERE)
{
    simt_named_barrier(id, threads, 1, file, line);
}

UPI_DEVICE void upi_barrier_arrive(int id, int threads, SIMT_HERE)
{
    simt_named_barrier(id, threads, 0, file, line);
}

template <int N> UPI_DEVICE void upi_registers_less(SIMT_HERE)
{
    int registers = -N;
    simt_gather("setmaxnreg", &registers, simt_set_registers, file, line);
}

template <int N> UPI_DEVICE void upi_registers_more(SIMT_HERE)
{
    int registers = N;
    simt_gather("setmaxnreg", &registers, simt_set_registers, file, line);
}

/* ---- between threads and blocks ---- */

SIMT_APART int upi_load_acquire(const int *p)
{
    simt_race_acquire(p);
    return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}

SIMT_APART void upi_add_release(int *p, int v)
{
    simt_dawdle();
    simt_race_release(p);
    __atomic_fetch_add(p, v, __ATOMIC_RELEASE);
    simt_moved();
}

/* A number below 2^-126 is 0, with its sign. */
UPI_DEVICE float simt_normal(float x)
{
    return fabsf(x) < 0x1p-126f ? copysignf(0, x) : x;
}

/* For the race detector a plain access: nobody else may have the number. */
SIMT_APART void upi_add_alone(float *p, float v)
{
    if ((uintptr_t)p % sizeof *p != 0) simt_finding("misaligned: a sum of 4 bytes to %p", (void *)p);
    simt_race_own(p, sizeof *p, SIMT_WRITE, SIMT_CODE_HERE);
    *p = simt_normal(simt_normal(*p) + simt_normal(v));
}

UPI_DEVICE void upi_pause(SIMT_HERE)
{
    simt_pause(file, line);
}

UPI_DEVICE uint32_t upi_clock(void)
{
    return (uint32_t)simt_clock();
}

UPI_DEVICE void upi_trap(void)
{
    simt_trap();
}

SIMT_APART void __threadfence(void)
{
    simt_race_fence();
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

/* The host is behind it too. */
UPI_DEVICE void __threadfence_system(void)
{
    __threadfence();
}

SIMT_APART float atomicAdd(float *p, float v)
{
    uint32_t *bits = (uint32_t *)p, was, will;
    float f;
    simt_race_atomic(p, sizeof *p);
    was = __atomic_load_n(bits, __ATOMIC_RELAXED);
    do {
        memcpy(&f, &was, sizeof f);
        f += v;
        memcpy(&will, &f, sizeof f);
    } while (!__atomic_compare_exchange_n(bits, &was, will, 0, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED));
    memcpy(&f, &was, sizeof f);
    simt_moved();
    return f;
}

/* Of int, unsigned and unsigned long long. */
template <class T> SIMT_APART T atomicAdd(T *p, typename std::common_type<T>::type v)
{
    T was;
    simt_race_atomic(p, sizeof *p);
    was = __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST);
    simt_moved();
    return was;
}

#endif

/* bf16.h -- the processor's bf16 instructions in plain C, and kernels of them that take the library's places
 *
 * Subnormal numbers are read and written as zeros of their sign; every step rounds to nearest. After Intel's
 * description of VDPBF16PS and TDPBF16PS.
 */
#ifndef UPIPE_TEST_BF16_H
#define UPIPE_TEST_BF16_H

#include "upipe/cpu/upipe_cpu_bf16.h"
#include "test.h"

/* Subnormal numbers are read and written as zeros of their sign. */
static inline float flushed(float x)
{
    return fabsf(x) < FLT_MIN ? copysignf(0, x) : x;
}

static inline float low(uint32_t pair)
{
    return flushed(upi_f32_of_bits(pair << 16));
}

static inline float high(uint32_t pair)
{
    return flushed(upi_f32_of_bits(pair & 0xffff0000u));
}

/* A lane of VDPBF16PS. */
static inline float dot_pair(float sum, uint32_t x, uint32_t y)
{
    sum = flushed(fmaf(high(x), high(y), sum));
    return flushed(fmaf(low(x), low(y), sum));
}

/* An element of TDPBF16PS: 16 pairs. */
static inline float dot_row(float sum, const uint32_t *x, const uint32_t *y, int y_stride)
{
    float even = 0, odd = 0;
    for (int p = 0; p < UPI_BF16_STEP / 2; ++p) {
        even = flushed(fmaf(low(x[p]), low(y[p * y_stride]), even));
        odd = flushed(fmaf(high(x[p]), high(y[p * y_stride]), odd));
    }
    return flushed(sum + flushed(even + odd));
}

/* Pairs `first` .. `last` - 1 of one sum, in steps of 16. */
static inline float sum_of(int amx, const uint32_t *x, const uint32_t *y, int y_stride, int first, int last)
{
    float sum = 0;
    if (amx)
        for (int p = first; p < last; p += UPI_BF16_STEP / 2)
            sum = dot_row(sum, x + p, y + p * y_stride, y_stride);
    else
        for (int p = first; p < last; ++p) sum = dot_pair(sum, x[p], y[p * y_stride]);
    return sum;
}

/* Kernels are called between an open and a close. */
static _Thread_local int plain_is_open;

/* The library's kernels in plain C. */
static inline void plain_tile(int amx, int depth, int sum_depth, const uint32_t *a, const uint32_t *b,
                              float *sums, int64_t next, int accumulate)
{
    CHECK(plain_is_open);
    for (int first = 0; first < depth; first += sum_depth) {
        const int last = first + sum_depth < depth ? first + sum_depth : depth;
        for (int i = 0; i < 2 * UPI_BF16_PANEL; ++i)
            for (int j = 0; j < 2 * UPI_BF16_PANEL; ++j) {
                const uint32_t *x = a + i * UPI_BF16_PAIRS;
                const uint32_t *y = b + j / UPI_BF16_PANEL * UPI_BF16_PACKED + j % UPI_BF16_PANEL;
                float *to = sums + i / UPI_BF16_PANEL * next + j / UPI_BF16_PANEL * UPI_BF16_TILE +
                            i % UPI_BF16_PANEL * UPI_BF16_PANEL + j % UPI_BF16_PANEL;
                const float s = sum_of(amx, x, y, UPI_BF16_PANEL, first / 2, (last + 1) / 2);
                *to = accumulate || first > 0 ? *to + s : s;
            }
    }
}

static inline void plain_tile_amx(int depth, int sum_depth, const uint32_t *a, const uint32_t *b, float *sums,
                                  int64_t next, int accumulate)
{
    plain_tile(1, depth, sum_depth, a, b, sums, next, accumulate);
}

static inline void plain_tile_avx512(int depth, int sum_depth, const uint32_t *a, const uint32_t *b,
                                     float *sums, int64_t next, int accumulate)
{
    plain_tile(0, depth, sum_depth, a, b, sums, next, accumulate);
}

/* Strips are for all of attention: sixteen columns at a time. The product of two bf16 is exact in f32, so that a
 * multiplication and an addition round once; one that is subnormal adds less than what is kept, or is flushed. */
UPI_KERNELS_BEGIN

typedef float plain_floats __attribute__((vector_size(64)));
typedef uint32_t plain_bits __attribute__((vector_size(64)));

/* By address: how such vectors are passed depends on the compiler's flags. */
UPI_INLINE void flush_all(plain_floats *x)
{
    const plain_bits bits = (plain_bits)*x, normal = (plain_bits)((bits & 0x7f800000u) != 0);
    *x = (plain_floats)(bits & (normal | 0x80000000u));
}

/* One step of the depth of one row: x 16 pairs, y [pair][low, high]. */
UPI_INLINE void plain_step(int amx, plain_floats *sum, const uint32_t *x, plain_floats (*y)[2])
{
    plain_floats part[2] = {{0}, {0}};
    for (int p = 0; p < UPI_BF16_STEP / 2; ++p)
        for (int half = 1; half >= 0; --half) {
            plain_floats *to = amx ? &part[half] : sum;
            *to = (half ? high(x[p]) : low(x[p])) * y[p][half] + *to;
            flush_all(to);
        }
    if (!amx) return;
    part[0] += part[1];
    flush_all(&part[0]);
    *sum += part[0];
    flush_all(sum);
}

UPI_INLINE void plain_strip_of(int amx, int rows, int depth, const uint32_t *a, int64_t a_stride,
                               const uint32_t *b, int64_t b_stride, float *sums, int64_t sums_stride)
{
    enum { STEP = UPI_BF16_STEP / 2 };
    CHECK(plain_is_open);
    for (int p = 0; p < depth / 2; p += STEP) {
        plain_floats y[STEP][2];
        for (int k = 0; k < STEP; ++k)
            for (int half = 0; half < 2; ++half) {
                plain_bits pairs;
                memcpy(&pairs, b + (p + k) * b_stride, sizeof pairs);
                y[k][half] = (plain_floats)(half ? pairs & 0xffff0000u : pairs << 16);
                flush_all(&y[k][half]);
            }
        for (int i = 0; i < rows; ++i) {
            plain_floats sum = {0};
            if (p > 0) memcpy(&sum, sums + i * sums_stride, sizeof sum);
            plain_step(amx, &sum, a + i * a_stride + p, y);
            memcpy(sums + i * sums_stride, &sum, sizeof sum);
        }
    }
}

UPI_CPU_KERNEL void plain_strip(int amx, int rows, int depth, const uint32_t *a, int64_t a_stride,
                                const uint32_t *b, int64_t b_stride, float *sums, int64_t sums_stride)
{
    if (amx)
        plain_strip_of(1, rows, depth, a, a_stride, b, b_stride, sums, sums_stride);
    else
        plain_strip_of(0, rows, depth, a, a_stride, b, b_stride, sums, sums_stride);
}

UPI_KERNELS_END

static inline void plain_strip_amx(int rows, int depth, const uint32_t *a, int64_t a_stride,
                                   const uint32_t *b, int64_t b_stride, float *sums, int64_t sums_stride)
{
    plain_strip(1, rows, depth, a, a_stride, b, b_stride, sums, sums_stride);
}

static inline void plain_strip_avx512(int rows, int depth, const uint32_t *a, int64_t a_stride,
                                      const uint32_t *b, int64_t b_stride, float *sums, int64_t sums_stride)
{
    plain_strip(0, rows, depth, a, a_stride, b, b_stride, sums, sums_stride);
}

static inline void plain_open(void)
{
    CHECK(!plain_is_open);
    plain_is_open = 1;
}

static inline void plain_close(void)
{
    CHECK(plain_is_open);
    plain_is_open = 0;
}

/* [amx] */
static const upi_bf16_unit plain_units[2] = {
    {"AVX512-BF16", plain_open, plain_close, plain_tile_avx512, plain_strip_avx512},
    {"AMX", plain_open, plain_close, plain_tile_amx, plain_strip_amx}};

#endif

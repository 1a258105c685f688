/* upipe_cpu_simd.h -- f32 lanes: the vocabulary of the CPU kernels
 *
 * upi_f8 is eight lanes, for what runs at the memory's speed; upi_fw is UPI_WIDE lanes, the widest vectors
 * there are, for what runs at the arithmetic's. The instructions are chosen when the host compiles, by what
 * the compiler may use, and upi_cpu_simd_name() says which:
 *
 *     avx512    16 wide    -mavx512f -mavx2 -mfma, or -march=native there
 *     avx2       8         -mavx2 -mfma
 *     neon       8         any aarch64: two registers of four lanes
 *     portable   8         the vector extensions of gcc and clang, lowered to what the target has; also with
 *                          UPIPE_CPU_PORTABLE defined
 *     scalar     8         plain C, with UPIPE_CPU_SCALAR defined
 *
 *     upi_f8 sum = upi_f8_zero();
 *     for (k = 0; k < depth; ++k) {
 *         upi_f8 b = upi_f8_load(panel + k * 8);
 *         UPI_OPAQUE(b);
 *         sum = upi_f8_fma(upi_f8_broadcast(row + k), b, sum);
 *     }
 *
 * Every function inlines. Addresses need no alignment beyond that of their elements. All compute the same,
 * but for one thing: the fused multiply-add rounds once with AVX and NEON, while the other two round twice
 * unless the compiler contracts them. So an element has the same bits wherever it stands only if it always
 * goes through the same function: a kernel's tail runs through its main loop on padded data, never through
 * scalar code. Wide or not, a lane computes the same.
 */
#ifndef UPIPE_CPU_SIMD_H
#define UPIPE_CPU_SIMD_H

#include <math.h>

#include "../upipe_base.h"

#define UPIPE_CPU_AVX512 0
#define UPIPE_CPU_AVX2   0
#define UPIPE_CPU_NEON   0
#define UPI_CPU_SCALAR   0
#if defined(UPIPE_CPU_SCALAR)
#undef UPI_CPU_SCALAR
#define UPI_CPU_SCALAR 1
#elif defined(UPIPE_CPU_PORTABLE)
/* none of the others */
#elif defined(__AVX2__) && defined(__FMA__)
#undef UPIPE_CPU_AVX2
#define UPIPE_CPU_AVX2 1
/* Its undefined vectors begin as themselves, of which g++ 12 warns wherever they are inlined. */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Winit-self"
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop
#if defined(__AVX512F__)
#undef UPIPE_CPU_AVX512
#define UPIPE_CPU_AVX512 1
#endif
#elif defined(__aarch64__)
#undef UPIPE_CPU_NEON
#define UPIPE_CPU_NEON 1
#include <arm_neon.h>
#endif

/* Rounding by a magic constant and sums in a fixed order would be optimised away. upipe_base.h refuses the rest. */
#ifdef __ASSOCIATIVE_MATH__
#error \
    "upipe's CPU kernels need IEEE arithmetic: compile them without -ffast-math in a unit of their own that defines UPIPE_CPU_DEFINE, and define UPIPE_CPU_DECLARE in the others"
#endif

#define UPI_INLINE static inline __attribute__((always_inline, unused))
/* A kernel compiled on its own: it inlines the vocabulary, nothing inlines it. */
#define UPI_CPU_KERNEL static __attribute__((noinline, unused))
/* The calls that fill a table: of this unit alone, or of a program whose other units declare them. */
#ifdef UPIPE_CPU_DEFINE
#define UPI_CPU_OPS
#else
#define UPI_CPU_OPS UPIPE_API
#endif

/* Around kernels: gcc compiles them with -O3 whatever the user's flags are; -O0 would give 5 instead of 104
 * GFLOP/s, -O1 38. Not with a sanitizer or plain C, where it would only slow the build. clang has nothing like
 * it. */
#if UPI_CPU_SCALAR || defined(__clang__) || defined(__CUDACC__) || defined(__SANITIZE_ADDRESS__) || \
    defined(__SANITIZE_THREAD__)
#define UPI_KERNELS_BEGIN
#define UPI_KERNELS_END
#else
#define UPI_KERNELS_BEGIN _Pragma("GCC push_options") _Pragma("GCC optimize(\"O3\", \"no-associative-math\")")
#define UPI_KERNELS_END   _Pragma("GCC pop_options")
#endif

/* gcc forgets what it knows of a pointer: it neither keeps for later what is read there, nor turns the pointer
 * into offsets from others, both of which cost registers that a tile needs. Empty with clang, which would keep
 * an address for each row and step on the stack. */
#if defined(__clang__)
#define UPI_OPAQUE_ADDRESS(p)
#else
#define UPI_OPAQUE_ADDRESS(p) __asm__ volatile("" : "+r"(p))
#endif

/* Before a loop of at most 16 turns with a constant count, whose body indexes an array of registers, which
 * plain C has none of. nvcc knows neither pragma. */
#if defined(__clang__)
#define UPI_CPU_UNROLL _Pragma("clang loop unroll(full)")
#elif defined(__CUDACC__) || UPI_CPU_SCALAR
#define UPI_CPU_UNROLL
#else
#define UPI_CPU_UNROLL _Pragma("GCC unroll 16")
#endif

enum {
    UPI_LANES = 8,
    /* Terms of a dot product over d that are chained before the chain joins the others: rounding grows with
     * the length of a chain, and scores and dO * V are where attention is sensitive to it. */
    UPI_DOT_PIECE = 64
};

#if UPIPE_CPU_AVX2

typedef __m256 upi_f8;
typedef __m256 upi_mask8; /* a lane is all ones or all zeros */

/* Keeps a loaded value in its register. gcc otherwise folds the load into each FMA that uses it, and the load
 * ports, not the FMA units, then set the pace: 90 falls to 60 GFLOP/s. */
#if UPIPE_CPU_AVX512
#define UPI_OPAQUE(v) __asm__("" : "+v"(v))
#else
#define UPI_OPAQUE(v) __asm__("" : "+x"(v))
#endif

#elif UPI_CPU_SCALAR

typedef struct upi_f8 {
    float v[8];
} upi_f8;
typedef struct upi_mask8 {
    int32_t v[8]; /* 1 or 0 */
} upi_mask8;

/* Against the fusing of a product with a later sum, which compilers may do where a target has FMA. */
#define UPI_OPAQUE(x) __asm__("" : "+m"(x))

#else

/* Halves of 16 bytes, for every 64-bit target passes those in registers; gcc and clang warn of wider ones. */
typedef float upi_f4 __attribute__((vector_size(16)));
typedef int32_t upi_i4 __attribute__((vector_size(16)));
typedef uint32_t upi_u4 __attribute__((vector_size(16)));
typedef struct upi_f8 {
    upi_f4 lo, hi;
} upi_f8;
typedef struct upi_mask8 {
    upi_i4 lo, hi;
} upi_mask8;

/* As above, and against the fusing of a product with a later sum, which compilers may do where a target has
 * FMA. */
#if defined(__x86_64__)
#define UPI_OPAQUE(v) __asm__("" : "+x"((v).lo), "+x"((v).hi))
#elif defined(__aarch64__)
#define UPI_OPAQUE(v) __asm__("" : "+w"((v).lo), "+w"((v).hi))
#else
#define UPI_OPAQUE(v) __asm__("" : "+m"((v).lo), "+m"((v).hi))
#endif

#endif

UPIPE_API const char *upi_cpu_simd_name(void)
{
    return UPIPE_CPU_AVX512 ? "cpu-avx512"
           : UPIPE_CPU_AVX2 ? "cpu-avx2"
           : UPIPE_CPU_NEON ? "cpu-neon"
           : UPI_CPU_SCALAR ? "cpu-scalar"
                            : "cpu-portable";
}

/* ---- bf16, one element ---- */

UPI_INLINE uint32_t upi_bits_of_f32(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits;
}

UPI_INLINE float upi_f32_of_bits(uint32_t bits)
{
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

/* The f32 of the same value. */
UPI_INLINE float upipe_bf16_to_f32(uint16_t b)
{
    return upi_f32_of_bits((uint32_t)b << 16);
}

/* Rounds to nearest, ties to even. A NaN stays one: rounding could carry it out of the fraction. */
UPI_INLINE uint16_t upipe_f32_to_bf16(float f)
{
    uint32_t bits = upi_bits_of_f32(f);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40u);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

/* ---- eight lanes ---- */

/* clang-format off */
#if UPIPE_CPU_AVX2

UPI_INLINE upi_f8 upi_f8_zero(void)                              { return _mm256_setzero_ps(); }
UPI_INLINE upi_f8 upi_f8_set1(float s)                           { return _mm256_set1_ps(s); }
UPI_INLINE upi_f8 upi_f8_broadcast(const float *p)               { return _mm256_broadcast_ss(p); }
UPI_INLINE upi_f8 upi_f8_load(const float *p)                    { return _mm256_loadu_ps(p); }
UPI_INLINE void   upi_f8_store(float *p, upi_f8 v)               { _mm256_storeu_ps(p, v); }
UPI_INLINE upi_f8 upi_f8_add(upi_f8 a, upi_f8 b)                 { return _mm256_add_ps(a, b); }
UPI_INLINE upi_f8 upi_f8_sub(upi_f8 a, upi_f8 b)                 { return _mm256_sub_ps(a, b); }
UPI_INLINE upi_f8 upi_f8_mul(upi_f8 a, upi_f8 b)                 { return _mm256_mul_ps(a, b); }
UPI_INLINE upi_f8 upi_f8_div(upi_f8 a, upi_f8 b)                 { return _mm256_div_ps(a, b); }
UPI_INLINE upi_f8 upi_f8_sqrt(upi_f8 a)                          { return _mm256_sqrt_ps(a); }
UPI_INLINE upi_f8 upi_f8_fma(upi_f8 a, upi_f8 b, upi_f8 c)       { return _mm256_fmadd_ps(a, b, c); }
/* The greater one; b where either is a NaN. */
UPI_INLINE upi_f8 upi_f8_max(upi_f8 a, upi_f8 b)                 { return _mm256_max_ps(a, b); }
/* The lesser one; b where either is a NaN. */
UPI_INLINE upi_f8 upi_f8_min(upi_f8 a, upi_f8 b)                 { return _mm256_min_ps(a, b); }
UPI_INLINE upi_mask8 upi_f8_equal(upi_f8 a, upi_f8 b)            { return _mm256_cmp_ps(a, b, _CMP_EQ_OQ); }
/* a where the mask is set, b elsewhere. */
UPI_INLINE upi_f8 upi_f8_select(upi_mask8 m, upi_f8 a, upi_f8 b) { return _mm256_blendv_ps(b, a, m); }

#elif UPI_CPU_SCALAR

/* Not inlined: eight operations in place of each would take a compiler half a minute. */
/* r.v[l] = expression of l, for every lane */
#define UPI_EACH(r, expression) do { int l; for (l = 0; l < UPI_LANES; ++l) (r).v[l] = (expression); } while (0)

UPI_CPU_KERNEL upi_f8 upi_f8_set1(float s)                           { upi_f8 r; UPI_EACH(r, s); return r; }
UPI_CPU_KERNEL upi_f8 upi_f8_zero(void)                              { return upi_f8_set1(0); }
UPI_CPU_KERNEL upi_f8 upi_f8_broadcast(const float *p)               { return upi_f8_set1(*p); }
UPI_CPU_KERNEL upi_f8 upi_f8_load(const float *p)                    { upi_f8 r; UPI_EACH(r, p[l]); return r; }
UPI_CPU_KERNEL void   upi_f8_store(float *p, upi_f8 v)               { memcpy(p, v.v, sizeof v.v); }
UPI_CPU_KERNEL upi_f8 upi_f8_add(upi_f8 a, upi_f8 b)                 { upi_f8 r; UPI_EACH(r, a.v[l] + b.v[l]); return r; }
UPI_CPU_KERNEL upi_f8 upi_f8_sub(upi_f8 a, upi_f8 b)                 { upi_f8 r; UPI_EACH(r, a.v[l] - b.v[l]); return r; }
UPI_CPU_KERNEL upi_f8 upi_f8_mul(upi_f8 a, upi_f8 b)                 { upi_f8 r; UPI_EACH(r, a.v[l] * b.v[l]); return r; }
UPI_CPU_KERNEL upi_f8 upi_f8_div(upi_f8 a, upi_f8 b)                 { upi_f8 r; UPI_EACH(r, a.v[l] / b.v[l]); return r; }
UPI_CPU_KERNEL upi_f8 upi_f8_sqrt(upi_f8 a)                          { upi_f8 r; UPI_EACH(r, sqrtf(a.v[l])); return r; }
UPI_CPU_KERNEL upi_f8 upi_f8_fma(upi_f8 a, upi_f8 b, upi_f8 c)       { upi_f8 r; UPI_EACH(r, a.v[l] * b.v[l] + c.v[l]); return r; }
UPI_CPU_KERNEL upi_f8 upi_f8_max(upi_f8 a, upi_f8 b)                 { upi_f8 r; UPI_EACH(r, a.v[l] > b.v[l] ? a.v[l] : b.v[l]); return r; }
UPI_CPU_KERNEL upi_f8 upi_f8_min(upi_f8 a, upi_f8 b)                 { upi_f8 r; UPI_EACH(r, a.v[l] < b.v[l] ? a.v[l] : b.v[l]); return r; }
UPI_CPU_KERNEL upi_mask8 upi_f8_equal(upi_f8 a, upi_f8 b)            { upi_mask8 r; UPI_EACH(r, a.v[l] == b.v[l]); return r; }
UPI_CPU_KERNEL upi_f8 upi_f8_select(upi_mask8 m, upi_f8 a, upi_f8 b) { upi_f8 r; UPI_EACH(r, m.v[l] ? a.v[l] : b.v[l]); return r; }

#else

UPI_INLINE upi_f4 upi_f4_set1(float s)                           { upi_f4 v = {s, s, s, s}; return v; }
UPI_INLINE upi_f4 upi_f4_select(upi_i4 m, upi_f4 a, upi_f4 b)
{
    return (upi_f4)((m & (upi_i4)a) | (~m & (upi_i4)b));
}
UPI_INLINE upi_f8 upi_f8_join(upi_f4 lo, upi_f4 hi)              { upi_f8 v; v.lo = lo; v.hi = hi; return v; }
UPI_INLINE upi_mask8 upi_mask8_join(upi_i4 lo, upi_i4 hi)        { upi_mask8 m; m.lo = lo; m.hi = hi; return m; }

UPI_INLINE upi_f8 upi_f8_set1(float s)
{
    return upi_f8_join(upi_f4_set1(s), upi_f4_set1(s));
}
UPI_INLINE upi_f8 upi_f8_zero(void)                              { return upi_f8_set1(0); }
UPI_INLINE upi_f8 upi_f8_broadcast(const float *p)               { return upi_f8_set1(*p); }
UPI_INLINE upi_f8 upi_f8_load(const float *p)                    { upi_f8 v; memcpy(&v, p, sizeof v); return v; }
UPI_INLINE void   upi_f8_store(float *p, upi_f8 v)               { memcpy(p, &v, sizeof v); }
UPI_INLINE upi_f8 upi_f8_add(upi_f8 a, upi_f8 b)                 { return upi_f8_join(a.lo + b.lo, a.hi + b.hi); }
UPI_INLINE upi_f8 upi_f8_sub(upi_f8 a, upi_f8 b)                 { return upi_f8_join(a.lo - b.lo, a.hi - b.hi); }
UPI_INLINE upi_f8 upi_f8_mul(upi_f8 a, upi_f8 b)                 { return upi_f8_join(a.lo * b.lo, a.hi * b.hi); }
UPI_INLINE upi_f8 upi_f8_div(upi_f8 a, upi_f8 b)                 { return upi_f8_join(a.lo / b.lo, a.hi / b.hi); }
#if UPIPE_CPU_NEON
UPI_INLINE upi_f8 upi_f8_sqrt(upi_f8 a)
{
    return upi_f8_join((upi_f4)vsqrtq_f32((float32x4_t)a.lo), (upi_f4)vsqrtq_f32((float32x4_t)a.hi));
}
UPI_INLINE upi_f4 upi_f4_fma(upi_f4 a, upi_f4 b, upi_f4 c)
{
    return (upi_f4)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
UPI_INLINE upi_f8 upi_f8_fma(upi_f8 a, upi_f8 b, upi_f8 c)
{
    return upi_f8_join(upi_f4_fma(a.lo, b.lo, c.lo), upi_f4_fma(a.hi, b.hi, c.hi));
}
#else
UPI_INLINE upi_f8 upi_f8_sqrt(upi_f8 a)
{
    float t[UPI_LANES];
    int i;
    upi_f8_store(t, a);
    for (i = 0; i < UPI_LANES; ++i) t[i] = sqrtf(t[i]);
    return upi_f8_load(t);
}
UPI_INLINE upi_f8 upi_f8_fma(upi_f8 a, upi_f8 b, upi_f8 c)
{
    return upi_f8_join(a.lo * b.lo + c.lo, a.hi * b.hi + c.hi);
}
#endif
UPI_INLINE upi_f8 upi_f8_max(upi_f8 a, upi_f8 b)
{
    return upi_f8_join(upi_f4_select(a.lo > b.lo, a.lo, b.lo), upi_f4_select(a.hi > b.hi, a.hi, b.hi));
}
UPI_INLINE upi_f8 upi_f8_min(upi_f8 a, upi_f8 b)
{
    return upi_f8_join(upi_f4_select(a.lo < b.lo, a.lo, b.lo), upi_f4_select(a.hi < b.hi, a.hi, b.hi));
}
UPI_INLINE upi_mask8 upi_f8_equal(upi_f8 a, upi_f8 b)
{
    return upi_mask8_join(a.lo == b.lo, a.hi == b.hi);
}
UPI_INLINE upi_f8 upi_f8_select(upi_mask8 m, upi_f8 a, upi_f8 b)
{
    return upi_f8_join(upi_f4_select(m.lo, a.lo, b.lo), upi_f4_select(m.hi, a.hi, b.hi));
}

#endif
/* clang-format on */

/* Lanes l > threshold, l = 0..7. */
UPI_INLINE upi_mask8 upi_lanes_above(int32_t threshold)
{
#if UPIPE_CPU_AVX2
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_castsi256_ps(_mm256_cmpgt_epi32(lane, _mm256_set1_epi32(threshold)));
#elif UPI_CPU_SCALAR
    upi_mask8 m;
    UPI_EACH(m, l > threshold);
    return m;
#else
    const upi_i4 lo = {0, 1, 2, 3}, hi = {4, 5, 6, 7}, limit = {threshold, threshold, threshold, threshold};
    return upi_mask8_join(lo > limit, hi > limit);
#endif
}

/* 2^x for x <= 126, to 1e-7 of the value down to -126; exactly 0 below -126.5, -inf included; a NaN stays
 * one.
 *
 * Adding 1.5 * 2^23 + 127 rounds x to a whole number n, and n + 127, the exponent of 2^n, then stands in the
 * low bits of the sum. A polynomial of the fraction, whose constant is exactly 1, is multiplied by that
 * power. At n = -127 the power is 0: no comparison is needed to send hidden keys to 0. A product, not a sum
 * of exponents, so that any NaN survives.
 */
UPI_INLINE upi_f8 upi_f8_exp2(upi_f8 x)
{
    const upi_f8 magic = upi_f8_set1(12583039.0f);
    upi_f8 shifted, fraction, p;
    x = upi_f8_max(upi_f8_set1(-127.0f), x);
    shifted = upi_f8_add(x, magic);
    UPI_OPAQUE(shifted);
    fraction = upi_f8_sub(x, upi_f8_sub(shifted, magic));
    p = upi_f8_set1(1.559467777e-04f);
    p = upi_f8_fma(p, fraction, upi_f8_set1(1.340664344e-03f));
    p = upi_f8_fma(p, fraction, upi_f8_set1(9.617692791e-03f));
    p = upi_f8_fma(p, fraction, upi_f8_set1(5.550310388e-02f));
    p = upi_f8_fma(p, fraction, upi_f8_set1(2.402265221e-01f));
    p = upi_f8_fma(p, fraction, upi_f8_set1(6.931472421e-01f));
    p = upi_f8_fma(p, fraction, upi_f8_set1(1.0f));
#if UPIPE_CPU_AVX2
    return upi_f8_mul(p, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(shifted), 23)));
#elif UPI_CPU_SCALAR
    UPI_EACH(shifted, upi_f32_of_bits(upi_bits_of_f32(shifted.v[l]) << 23));
    return upi_f8_mul(p, shifted);
#else
    return upi_f8_mul(p, upi_f8_join((upi_f4)((upi_u4)shifted.lo << 23), (upi_f4)((upi_u4)shifted.hi << 23)));
#endif
}

/* e^x for x <= 87, to 2e-7 + 1e-7 * |x| of the value; exactly 0 from -88.1 down; a NaN stays one. */
UPI_INLINE upi_f8 upi_f8_exp(upi_f8 x)
{
    return upi_f8_exp2(upi_f8_mul(x, upi_f8_set1(1.4426950408889634f)));
}

/* The sum of the lanes, in one fixed order. */
UPI_INLINE float upi_f8_sum(upi_f8 v)
{
    float t[UPI_LANES];
    upi_f8_store(t, v);
    return ((t[0] + t[4]) + (t[2] + t[6])) + ((t[1] + t[5]) + (t[3] + t[7]));
}

/* r[i][j] becomes r[j][i]. */
#if UPIPE_CPU_AVX2
UPI_INLINE void upi_f8_transpose(upi_f8 *r)
{
    upi_f8 t[8], s[8];
    int i;
    UPI_CPU_UNROLL
    for (i = 0; i < 4; ++i) {
        t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    UPI_CPU_UNROLL
    for (i = 0; i < 2; ++i) {
        s[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
        s[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
        s[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
        s[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
    }
    UPI_CPU_UNROLL
    for (i = 0; i < 4; ++i) {
        r[i] = _mm256_permute2f128_ps(s[i], s[i + 4], 0x20);
        r[i + 4] = _mm256_permute2f128_ps(s[i], s[i + 4], 0x31);
    }
}
#else
UPI_CPU_KERNEL void upi_f8_transpose(upi_f8 *r)
{
    float rows[64], cols[64];
    int i, j;
    for (i = 0; i < 8; ++i) upi_f8_store(rows + i * 8, r[i]);
    for (i = 0; i < 8; ++i)
        for (j = 0; j < 8; ++j) cols[j * 8 + i] = rows[i * 8 + j];
    for (i = 0; i < 8; ++i) r[i] = upi_f8_load(cols + i * 8);
}
#endif

#if !UPIPE_CPU_AVX2 && !UPI_CPU_SCALAR
typedef uint16_t upi_h4 __attribute__((vector_size(8)));

/* Four lanes of upipe_f32_to_bf16. */
UPI_INLINE upi_h4 upi_h4_of_bf16(upi_f4 v)
{
    upi_u4 bits = (upi_u4)v, nan = (upi_u4)(v != v);
    upi_u4 rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, quiet = bits >> 16 | 0x40;
    return __builtin_convertvector((rounded & ~nan) | (quiet & nan), upi_h4);
}
#endif

UPI_INLINE upi_f8 upi_f8_load_bf16(const uint16_t *p)
{
#if UPIPE_CPU_AVX2
    __m128i half = _mm_loadu_si128((const __m128i *)(const void *)p);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
#elif UPI_CPU_SCALAR
    float t[UPI_LANES];
    int i;
    for (i = 0; i < UPI_LANES; ++i) t[i] = upipe_bf16_to_f32(p[i]);
    return upi_f8_load(t);
#else
    upi_h4 lo, hi;
    memcpy(&lo, p, sizeof lo);
    memcpy(&hi, p + 4, sizeof hi);
    return upi_f8_join((upi_f4)(__builtin_convertvector(lo, upi_u4) << 16),
                       (upi_f4)(__builtin_convertvector(hi, upi_u4) << 16));
#endif
}

/* Rounds as upipe_f32_to_bf16 does. */
UPI_INLINE void upi_f8_store_bf16(uint16_t *p, upi_f8 v)
{
#if UPIPE_CPU_AVX2
    __m256i bits = _mm256_castps_si256(v);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(_mm256_set1_epi32(0x7fff), odd));
    __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);
    _mm_storeu_si128((__m128i *)(void *)p, _mm256_castsi256_si128(packed));
#elif UPI_CPU_SCALAR
    float t[UPI_LANES];
    int i;
    upi_f8_store(t, v);
    for (i = 0; i < UPI_LANES; ++i) p[i] = upipe_f32_to_bf16(t[i]);
#else
    upi_h4 lo = upi_h4_of_bf16(v.lo), hi = upi_h4_of_bf16(v.hi);
    memcpy(p, &lo, sizeof lo);
    memcpy(p + 4, &hi, sizeof hi);
#endif
}

/* ---- by storage type: element i of an array, as f32 ---- */

UPI_INLINE upi_f8 upi_f8_get(const void *base, upipe_dtype dtype, int64_t i)
{
    return dtype == UPIPE_F32 ? upi_f8_load((const float *)base + i)
                              : upi_f8_load_bf16((const uint16_t *)base + i);
}

UPI_INLINE void upi_f8_put(void *base, upipe_dtype dtype, int64_t i, upi_f8 v)
{
    if (dtype == UPIPE_F32)
        upi_f8_store((float *)base + i, v);
    else
        upi_f8_store_bf16((uint16_t *)base + i, v);
}

/* Element i of an array of this type, as f32. */
UPI_INLINE float upipe_cpu_get(const void *base, upipe_dtype dtype, int64_t i)
{
    return dtype == UPIPE_F32 ? ((const float *)base)[i] : upipe_bf16_to_f32(((const uint16_t *)base)[i]);
}

/* Element i = v, rounded to the array's type. */
UPI_INLINE void upipe_cpu_put(void *base, upipe_dtype dtype, int64_t i, float v)
{
    if (dtype == UPIPE_F32)
        ((float *)base)[i] = v;
    else
        ((uint16_t *)base)[i] = upipe_f32_to_bf16(v);
}

/* ---- the widest lanes: only what the wide kernels say ---- */

#if UPIPE_CPU_AVX512

enum { UPI_WIDE = 16 };
typedef __m512 upi_fw;
typedef __mmask16 upi_maskw;

/* clang-format off */
UPI_INLINE upi_fw upi_fw_zero(void)                              { return _mm512_setzero_ps(); }
UPI_INLINE upi_fw upi_fw_set1(float s)                           { return _mm512_set1_ps(s); }
UPI_INLINE upi_fw upi_fw_load(const float *p)                    { return _mm512_loadu_ps(p); }
UPI_INLINE void   upi_fw_store(float *p, upi_fw v)               { _mm512_storeu_ps(p, v); }
UPI_INLINE upi_fw upi_fw_add(upi_fw a, upi_fw b)                 { return _mm512_add_ps(a, b); }
UPI_INLINE upi_fw upi_fw_sub(upi_fw a, upi_fw b)                 { return _mm512_sub_ps(a, b); }
UPI_INLINE upi_fw upi_fw_mul(upi_fw a, upi_fw b)                 { return _mm512_mul_ps(a, b); }
UPI_INLINE upi_fw upi_fw_div(upi_fw a, upi_fw b)                 { return _mm512_div_ps(a, b); }
UPI_INLINE upi_fw upi_fw_sqrt(upi_fw a)                          { return _mm512_sqrt_ps(a); }
UPI_INLINE upi_fw upi_fw_min(upi_fw a, upi_fw b)                 { return _mm512_min_ps(a, b); }
UPI_INLINE upi_fw upi_fw_fma(upi_fw a, upi_fw b, upi_fw c)       { return _mm512_fmadd_ps(a, b, c); }
UPI_INLINE upi_fw upi_fw_max(upi_fw a, upi_fw b)                 { return _mm512_max_ps(a, b); }
UPI_INLINE upi_maskw upi_fw_equal(upi_fw a, upi_fw b)            { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
UPI_INLINE upi_fw upi_fw_select(upi_maskw m, upi_fw a, upi_fw b) { return _mm512_mask_blend_ps(m, b, a); }
/* Every two neighbours change places. */
UPI_INLINE upi_fw upi_fw_swap(upi_fw v)                          { return _mm512_permute_ps(v, 0xb1); }
/* Of a row, what is left of it: `count` elements, 8 or at least 16; zeros beyond. */
UPI_INLINE upi_fw upi_fw_load_rest(const float *p, int count)    { return _mm512_maskz_loadu_ps(count < 16 ? 0xff : 0xffff, p); }
UPI_INLINE void   upi_fw_store_rest(float *p, int count, upi_fw v) { _mm512_mask_storeu_ps(p, count < 16 ? 0xff : 0xffff, v); }
/* clang-format on */

/* As upi_f8_get and upi_f8_put. */
UPI_INLINE upi_fw upi_fw_get(const void *base, upipe_dtype dtype, int64_t i)
{
    const __m256i *half = (const __m256i *)(const void *)((const uint16_t *)base + i);
    if (dtype == UPIPE_F32) return upi_fw_load((const float *)base + i);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(half)), 16));
}

UPI_INLINE void upi_fw_put(void *base, upipe_dtype dtype, int64_t i, upi_fw v)
{
    __m256i *half = (__m256i *)(void *)((uint16_t *)base + i);
    if (dtype == UPIPE_F32) {
        upi_fw_store((float *)base + i, v);
    } else {
        __m512i bits = _mm512_castps_si512(v);
        __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(_mm512_set1_epi32(0x7fff), odd));
        __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
        rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
        _mm256_storeu_si256(half, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
    }
}

/* Lanes l > threshold. */
UPI_INLINE upi_maskw upi_wide_above(int32_t threshold)
{
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_cmpgt_epi32_mask(lane, _mm512_set1_epi32(threshold));
}

/* As upi_f8_exp2, bit for bit. */
UPI_INLINE upi_fw upi_fw_exp2(upi_fw x)
{
    const upi_fw magic = upi_fw_set1(12583039.0f);
    upi_fw shifted, fraction, p;
    x = upi_fw_max(upi_fw_set1(-127.0f), x);
    shifted = upi_fw_add(x, magic);
    UPI_OPAQUE(shifted);
    fraction = upi_fw_sub(x, upi_fw_sub(shifted, magic));
    p = upi_fw_set1(1.559467777e-04f);
    p = upi_fw_fma(p, fraction, upi_fw_set1(1.340664344e-03f));
    p = upi_fw_fma(p, fraction, upi_fw_set1(9.617692791e-03f));
    p = upi_fw_fma(p, fraction, upi_fw_set1(5.550310388e-02f));
    p = upi_fw_fma(p, fraction, upi_fw_set1(2.402265221e-01f));
    p = upi_fw_fma(p, fraction, upi_fw_set1(6.931472421e-01f));
    p = upi_fw_fma(p, fraction, upi_fw_set1(1.0f));
    return upi_fw_mul(p, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(shifted), 23)));
}

#else

enum { UPI_WIDE = UPI_LANES };
typedef upi_f8 upi_fw;
typedef upi_mask8 upi_maskw;

/* clang-format off */
UPI_INLINE upi_fw upi_fw_zero(void)                              { return upi_f8_zero(); }
UPI_INLINE upi_fw upi_fw_set1(float s)                           { return upi_f8_set1(s); }
UPI_INLINE upi_fw upi_fw_load(const float *p)                    { return upi_f8_load(p); }
UPI_INLINE void   upi_fw_store(float *p, upi_fw v)               { upi_f8_store(p, v); }
UPI_INLINE upi_fw upi_fw_add(upi_fw a, upi_fw b)                 { return upi_f8_add(a, b); }
UPI_INLINE upi_fw upi_fw_sub(upi_fw a, upi_fw b)                 { return upi_f8_sub(a, b); }
UPI_INLINE upi_fw upi_fw_mul(upi_fw a, upi_fw b)                 { return upi_f8_mul(a, b); }
UPI_INLINE upi_fw upi_fw_div(upi_fw a, upi_fw b)                 { return upi_f8_div(a, b); }
UPI_INLINE upi_fw upi_fw_sqrt(upi_fw a)                          { return upi_f8_sqrt(a); }
UPI_INLINE upi_fw upi_fw_min(upi_fw a, upi_fw b)                 { return upi_f8_min(a, b); }
UPI_INLINE upi_fw upi_fw_get(const void *base, upipe_dtype dtype, int64_t i) { return upi_f8_get(base, dtype, i); }
UPI_INLINE void   upi_fw_put(void *base, upipe_dtype dtype, int64_t i, upi_fw v) { upi_f8_put(base, dtype, i, v); }
UPI_INLINE upi_fw upi_fw_fma(upi_fw a, upi_fw b, upi_fw c)       { return upi_f8_fma(a, b, c); }
UPI_INLINE upi_fw upi_fw_max(upi_fw a, upi_fw b)                 { return upi_f8_max(a, b); }
UPI_INLINE upi_maskw upi_fw_equal(upi_fw a, upi_fw b)            { return upi_f8_equal(a, b); }
UPI_INLINE upi_fw upi_fw_select(upi_maskw m, upi_fw a, upi_fw b) { return upi_f8_select(m, a, b); }
UPI_INLINE upi_fw upi_fw_load_rest(const float *p, int count)    { (void)count; return upi_f8_load(p); }
UPI_INLINE void   upi_fw_store_rest(float *p, int count, upi_fw v) { (void)count; upi_f8_store(p, v); }
UPI_INLINE upi_maskw upi_wide_above(int32_t threshold)           { return upi_lanes_above(threshold); }
UPI_INLINE upi_fw upi_fw_exp2(upi_fw x)                          { return upi_f8_exp2(x); }
/* clang-format on */

UPI_INLINE upi_fw upi_fw_swap(upi_fw v)
{
#if UPIPE_CPU_AVX2
    return _mm256_permute_ps(v, 0xb1);
#else
    float from[UPI_LANES], to[UPI_LANES];
    int i;
    upi_f8_store(from, v);
    for (i = 0; i < UPI_LANES; ++i) to[i] = from[i ^ 1];
    return upi_f8_load(to);
#endif
}

#endif

UPI_INLINE upi_fw upi_fw_broadcast(const float *p)
{
    return upi_fw_set1(*p);
}

/* *sum = upi_fw_fma(a, b, *sum), for register tiles. Where the tile fills all registers, gcc would write the sum
 * over a or b, copy and spill: 69 in place of 97 % of the peak in an unrolled loop. clang does not. */
UPI_INLINE void upi_fw_accumulate(upi_fw *sum, upi_fw a, upi_fw b)
{
#if UPIPE_CPU_AVX512 && !defined(__clang__)
    __asm__("vfmadd231ps {%2, %1, %0|%0, %1, %2}" : "+v"(*sum) : "v"(a), "v"(b));
#elif UPIPE_CPU_AVX2 && !defined(__clang__)
    __asm__("vfmadd231ps {%2, %1, %0|%0, %1, %2}" : "+x"(*sum) : "x"(a), "x"(b));
#else
    *sum = upi_fw_fma(a, b, *sum);
#endif
}

UPI_INLINE upi_fw upi_fw_exp(upi_fw x)
{
    return upi_fw_exp2(upi_fw_mul(x, upi_fw_set1(1.4426950408889634f)));
}

/* tanh x, within 2 units in the last place; -1 and 1 at the infinities, a NaN stays one. A polynomial up to
 * 0.8, from there 1 - 2 / (e^2|x| + 1), which has lost no digits to the 1 yet. */
UPI_INLINE upi_fw upi_fw_tanh(upi_fw x)
{
    const upi_fw border = upi_fw_set1(0.8f), one = upi_fw_set1(1.0f);
    upi_fw size, square, p, large;
    UPI_OPAQUE(x); /* a product that x comes from could be fused with the last addition, or not */
    size = upi_fw_max(x, upi_fw_sub(upi_fw_zero(), x));
    square = upi_fw_mul(x, x);
    p = upi_fw_set1(1.762877250e-03f);
    p = upi_fw_fma(p, square, upi_fw_set1(-7.734463229e-03f));
    p = upi_fw_fma(p, square, upi_fw_set1(2.152135517e-02f));
    p = upi_fw_fma(p, square, upi_fw_set1(-5.391799249e-02f));
    p = upi_fw_fma(p, square, upi_fw_set1(1.333306266e-01f));
    p = upi_fw_fma(p, square, upi_fw_set1(-3.333333094e-01f));
    p = upi_fw_fma(upi_fw_mul(p, square), x, x);
    /* 1 from 9.1 on */
    large = upi_fw_add(
        upi_fw_exp2(upi_fw_mul(upi_fw_min(upi_fw_set1(10.0f), size), upi_fw_set1(2.8853900817779268f))), one);
    large = upi_fw_sub(one, upi_fw_div(upi_fw_set1(2.0f), large));
    large = upi_fw_select(upi_fw_equal(size, x), large, upi_fw_sub(upi_fw_zero(), large));
    return upi_fw_select(upi_fw_equal(upi_fw_min(size, border), size), p, large);
}

/* 1 - tanh^2 x, by e = exp(-2|x|): 4e / (1 + e)^2, which loses no digits where tanh x is near 1. */
UPI_INLINE upi_fw upi_fw_tanh_slope(upi_fw x)
{
    upi_fw e, sum;
    UPI_OPAQUE(x); /* as in upi_fw_tanh */
    e = upi_fw_min(x, upi_fw_sub(upi_fw_zero(), x));
    e = upi_fw_exp2(upi_fw_mul(e, upi_fw_set1(2.8853900817779268f)));
    sum = upi_fw_add(e, upi_fw_set1(1.0f));
    return upi_fw_div(upi_fw_mul(e, upi_fw_set1(4.0f)), upi_fw_mul(sum, sum));
}

#endif

/* upipe_cuda_wgmma.h -- products of warpgroups as sm_90a has them
 *
 *     d [64][N] f32 (+)= a [64][16] * b [16][N], bf16
 *
 * over the 128 threads of a warpgroup. Warp w of them holds rows 16 w to 16 w + 15. Lane l has, in d[4 i] and
 * d[4 i + 1], row l / 4 and columns 8 i + 2 (l % 4) and the next one, and in d[4 i + 2] and d[4 i + 3] those
 * 8 rows below. Where a stands in registers, a[0] is row l / 4 and columns 2 (l % 4) and the next, a[1] 8
 * rows below, a[2] and a[3] both 8 columns further: so accumulators d[8 k .. 8 k + 7] in pairs are a of step
 * k.
 *
 * Products run by themselves. A group begins with upi_wgmma_fence, for the registers that it uses, and ends
 * with upi_wgmma_commit; neither its accumulators nor its operands in registers or shared memory may be
 * touched before a upi_wgmma_wait that covers it. All four warps come to every one of these.
 */
#ifndef UPIPE_CUDA_WGMMA_H
#define UPIPE_CUDA_WGMMA_H

#ifndef UPIPE_CUDA_SEAMS /* elsewhere they are functions of whoever stands for the device */

UPI_DEVICE void upi_wgmma_fence(void)
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

UPI_DEVICE void upi_wgmma_commit(void)
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/* All but the N newest groups are through. */
template <int N> UPI_DEVICE void upi_wgmma_wait(void)
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

template <int N> struct upi_wgmma_shape;

/* clang-format off */
#define UPI_WGMMA_R0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define UPI_WGMMA_R8 "%8, %9, %10, %11, %12, %13, %14, %15"
#define UPI_WGMMA_R16 "%16, %17, %18, %19, %20, %21, %22, %23"
#define UPI_WGMMA_R24 "%24, %25, %26, %27, %28, %29, %30, %31"
#define UPI_WGMMA_R32 "%32, %33, %34, %35, %36, %37, %38, %39"
#define UPI_WGMMA_R40 "%40, %41, %42, %43, %44, %45, %46, %47"
#define UPI_WGMMA_R48 "%48, %49, %50, %51, %52, %53, %54, %55"
#define UPI_WGMMA_R56 "%56, %57, %58, %59, %60, %61, %62, %63"
#define UPI_WGMMA_R64 "%64, %65, %66, %67, %68, %69, %70, %71"
#define UPI_WGMMA_R72 "%72, %73, %74, %75, %76, %77, %78, %79"
#define UPI_WGMMA_R80 "%80, %81, %82, %83, %84, %85, %86, %87"
#define UPI_WGMMA_R88 "%88, %89, %90, %91, %92, %93, %94, %95"
#define UPI_WGMMA_R96 "%96, %97, %98, %99, %100, %101, %102, %103"
#define UPI_WGMMA_R104 "%104, %105, %106, %107, %108, %109, %110, %111"
#define UPI_WGMMA_R112 "%112, %113, %114, %115, %116, %117, %118, %119"
#define UPI_WGMMA_R120 "%120, %121, %122, %123, %124, %125, %126, %127"
#define UPI_WGMMA_D(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]),                    \
                       "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])

/* Operands are counted: those behind the accumulators have other numbers for every N. */
#define UPI_WGMMA_SHAPE(N, REGISTERS, ACCUMULATORS, i0, i1, i2, i3, i4, i5, i6)                       \
    template <> struct upi_wgmma_shape<N> {                                                           \
        template <int TRANS_A, int TRANS_B>                                                           \
        static __device__ __forceinline__ void ss(float *d, uint64_t a, uint64_t b, int add)          \
        {                                                                                             \
            asm volatile("{\n.reg .pred sums;\nsetp.ne.b32 sums, " i2 ", 0;\n"                        \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 "                  \
                         "{" REGISTERS "}, " i0 ", " i1 ", sums, 1, 1, " i3 ", " i4 ";\n}"            \
                         : ACCUMULATORS                                                               \
                         : "l"(a), "l"(b), "r"(add), "n"(TRANS_A), "n"(TRANS_B));                     \
        }                                                                                             \
        template <int TRANS_B>                                                                        \
        static __device__ __forceinline__ void rs(float *d, const uint32_t *a, uint64_t b, int add)   \
        {                                                                                             \
            asm volatile("{\n.reg .pred sums;\nsetp.ne.b32 sums, " i5 ", 0;\n"                        \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 "                  \
                         "{" REGISTERS "}, {" i0 ", " i1 ", " i2 ", " i3 "}, " i4 ", sums, 1, 1, " i6 ";\n}" \
                         : ACCUMULATORS                                                               \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(TRANS_B)); \
        }                                                                                             \
    };
#define UPI_WGMMA_TEXT16 UPI_WGMMA_R0 ", " UPI_WGMMA_R8
#define UPI_WGMMA_LIST16 UPI_WGMMA_D(0), UPI_WGMMA_D(8)
#define UPI_WGMMA_TEXT32 UPI_WGMMA_TEXT16 ", " UPI_WGMMA_R16 ", " UPI_WGMMA_R24
#define UPI_WGMMA_LIST32 UPI_WGMMA_LIST16, UPI_WGMMA_D(16), UPI_WGMMA_D(24)
#define UPI_WGMMA_TEXT40 UPI_WGMMA_TEXT32 ", " UPI_WGMMA_R32
#define UPI_WGMMA_LIST40 UPI_WGMMA_LIST32, UPI_WGMMA_D(32)
#define UPI_WGMMA_TEXT48 UPI_WGMMA_TEXT40 ", " UPI_WGMMA_R40
#define UPI_WGMMA_LIST48 UPI_WGMMA_LIST40, UPI_WGMMA_D(40)
#define UPI_WGMMA_TEXT56 UPI_WGMMA_TEXT48 ", " UPI_WGMMA_R48
#define UPI_WGMMA_LIST56 UPI_WGMMA_LIST48, UPI_WGMMA_D(48)
#define UPI_WGMMA_TEXT64 UPI_WGMMA_TEXT56 ", " UPI_WGMMA_R56
#define UPI_WGMMA_LIST64 UPI_WGMMA_LIST56, UPI_WGMMA_D(56)
#define UPI_WGMMA_TEXT88 UPI_WGMMA_TEXT64 ", " UPI_WGMMA_R64 ", " UPI_WGMMA_R72 ", " UPI_WGMMA_R80
#define UPI_WGMMA_LIST88 UPI_WGMMA_LIST64, UPI_WGMMA_D(64), UPI_WGMMA_D(72), UPI_WGMMA_D(80)
#define UPI_WGMMA_TEXT96 UPI_WGMMA_TEXT88 ", " UPI_WGMMA_R88
#define UPI_WGMMA_LIST96 UPI_WGMMA_LIST88, UPI_WGMMA_D(88)
#define UPI_WGMMA_TEXT128 UPI_WGMMA_TEXT96 ", " UPI_WGMMA_R96 ", " UPI_WGMMA_R104 ", " \
    UPI_WGMMA_R112 ", " UPI_WGMMA_R120
#define UPI_WGMMA_LIST128 UPI_WGMMA_LIST96, UPI_WGMMA_D(96), UPI_WGMMA_D(104), UPI_WGMMA_D(112), \
    UPI_WGMMA_D(120)

UPI_WGMMA_SHAPE(32, UPI_WGMMA_TEXT16, UPI_WGMMA_LIST16, "%16", "%17", "%18", "%19", "%20", "%21", "%22")
UPI_WGMMA_SHAPE(64, UPI_WGMMA_TEXT32, UPI_WGMMA_LIST32, "%32", "%33", "%34", "%35", "%36", "%37", "%38")
UPI_WGMMA_SHAPE(80, UPI_WGMMA_TEXT40, UPI_WGMMA_LIST40, "%40", "%41", "%42", "%43", "%44", "%45", "%46")
UPI_WGMMA_SHAPE(96, UPI_WGMMA_TEXT48, UPI_WGMMA_LIST48, "%48", "%49", "%50", "%51", "%52", "%53", "%54")
UPI_WGMMA_SHAPE(112, UPI_WGMMA_TEXT56, UPI_WGMMA_LIST56, "%56", "%57", "%58", "%59", "%60", "%61", "%62")
UPI_WGMMA_SHAPE(128, UPI_WGMMA_TEXT64, UPI_WGMMA_LIST64, "%64", "%65", "%66", "%67", "%68", "%69", "%70")
UPI_WGMMA_SHAPE(176, UPI_WGMMA_TEXT88, UPI_WGMMA_LIST88, "%88", "%89", "%90", "%91", "%92", "%93", "%94")
UPI_WGMMA_SHAPE(192, UPI_WGMMA_TEXT96, UPI_WGMMA_LIST96, "%96", "%97", "%98", "%99", "%100", "%101", "%102")
UPI_WGMMA_SHAPE(256, UPI_WGMMA_TEXT128, UPI_WGMMA_LIST128, "%128", "%129", "%130", "%131", "%132", "%133",
                "%134")
/* clang-format on */

/* d (+)= a b with both in shared memory, as upi_wgmma_rows or, where TRANS, upi_wgmma_columns say. N is one
 * of 32, 64, 80, 96, 112, 128, 176, 192, 256. `add` 0: d counts as zeros. */
template <int N, int TRANS_A, int TRANS_B>
UPI_DEVICE void upi_wgmma_ss(float *d, uint64_t a, uint64_t b, int add)
{
    upi_wgmma_shape<N>::template ss<TRANS_A, TRANS_B>(d, a, b, add);
}

/* The same with a in registers. */
template <int N, int TRANS_B> UPI_DEVICE void upi_wgmma_rs(float *d, const uint32_t a[4], uint64_t b, int add)
{
    upi_wgmma_shape<N>::template rs<TRANS_B>(d, a, b, add);
}

#endif

#endif

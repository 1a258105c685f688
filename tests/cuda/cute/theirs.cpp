/* theirs.cpp -- descriptors, swizzles and fragments of the kernels beside those of CuTe (NVIDIA CUTLASS), on the host
 *
 * The layouts are those of the instructions, wgmma with operands swizzled by 128 bytes and mma.sync m16n8k16 of bf16, so CuTe
 * and the library must agree in every element. Shapes are those of the tiles that the kernels have.
 */
#include <cute/tensor.hpp>
#include <cute/atom/copy_traits_sm90.hpp>
#include <cute/atom/mma_traits_sm80.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>

#include <cstdio>
#include <cstring>

#include "ours.h"

using namespace cute;
typedef cutlass::bfloat16_t bf16;

static long checks, failed;
alignas(1024) static unsigned char space[1 << 18];

static void check(bool ok, const char *what, long a, long b)
{
    ++checks;
    if (!ok && ++failed <= 10) fprintf(stderr, "%s: at %ld, %ld\n", what, a, b);
}

template <class T> static uint32_t at(const T &tensor, int i, int j)
{
    return (uint32_t)((unsigned char *)&tensor(i, j) - space);
}

/* A tile [ROWS][COLUMNS] whose rows are M or N and whose columns are K; MN of its rows are one instruction's. */
template <int ROWS, int COLUMNS, int MN> static void rows_of()
{
    auto tile =
        make_tensor(make_smem_ptr((bf16 *)space),
                    tile_to_shape(SM90::GMMA::Layout_K_SW128_Atom<bf16>{}, Shape<Int<ROWS>, Int<COLUMNS>>{}));
    for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < COLUMNS; ++c) {
            const uint32_t panel = (uint32_t)(c / 64 * ROWS * 128 + r * 128 + c % 64 * 2);
            check(at(tile, r, c) == ours_panel_at(ROWS, r, c / 8) + (uint32_t)(c % 8 * 2), "rows: an element",
                  r, c);
            check(at(tile, r, c) == ours_swizzle(panel), "rows: an element, swizzled by the emulator", r, c);
        }
    auto operand = SM90::GMMA::make_gmma_desc<SM90::GMMA::Major::K>(
        local_tile(tile, Shape<Int<MN>, _16>{}, make_coord(0, 0)));
    check(operand.desc_ == ours_rows(0), "rows: the descriptor", ROWS, COLUMNS);
    auto words = recast<uint128_t const>(tile);
    for (int k = 0; k < COLUMNS / 16; ++k) /* 16 columns on */
        check(operand.desc_ + (uint64_t)words.layout()(0, k * 2) ==
                  ours_further(ours_rows(0), k / 4 * ROWS * 128 + k % 4 * 32),
              "rows: the operand further on", ROWS, k);
}

/* A tile [K][COLUMNS] whose columns are M or N: the transposed operand. */
template <int K, int COLUMNS, int MN> static void columns_of()
{
    auto tile = make_tensor(make_smem_ptr((bf16 *)space),
                            tile_to_shape(SM90::GMMA::Layout_MN_SW128_Atom<bf16>{},
                                          Shape<Int<COLUMNS>, Int<K>>{}, Step<_2, _1>{}));
    for (int c = 0; c < COLUMNS; ++c)
        for (int k = 0; k < K; ++k)
            check(at(tile, c, k) == ours_panel_at(K, k, c / 8) + (uint32_t)(c % 8 * 2), "columns: an element",
                  k, c);
    auto operand = SM90::GMMA::make_gmma_desc<SM90::GMMA::Major::MN>(
        local_tile(tile, Shape<Int<MN>, _16>{}, make_coord(0, 0)));
    /* of one panel the distance to the next is not read */
    const uint64_t read = MN == 64 ? ~((uint64_t)0x3fff << 16) : ~(uint64_t)0;
    check((operand.desc_ & read) == (ours_columns(0, K * 128) & read), "columns: the descriptor", K, COLUMNS);
    auto words = recast<uint128_t const>(tile);
    for (int k = 0; k < K / 16; ++k)
        check(((operand.desc_ + (uint64_t)words.layout()(0, k * 16)) & read) ==
                  (ours_further(ours_columns(0, K * 128), k * 16 * 128) & read),
              "columns: the operand further on", K, k);
}

template <int N> static void accumulators()
{
    for (int t = 0; t < 128; ++t)
        for (int i = 0; i < N / 2; ++i) {
            const int x = SM90::GMMA::CLayout_64xN<N>{}(t, i);
            check(x % 64 == ours_row_of(t, i) && x / 64 == ours_column_of(t, i), "an accumulator of wgmma", t,
                  i);
        }
    for (int t = 0; t < 128; ++t) /* A in registers is laid out as 16 columns of them */
        for (int i = 0; i < 8; ++i) {
            const int x = SM90::GMMA::ALayout_64x16{}(t, i);
            check(x % 64 == ours_row_of(t, i) && x / 64 == ours_column_of(t, i),
                  "an operand of wgmma in registers", t, i);
        }
}

static uint32_t bits(int x) /* of bf16; small integers are exact */
{
    const float f = (float)x;
    uint32_t u;
    memcpy(&u, &f, 4);
    return u >> 16;
}

/* Matrices of small integers in CuTe's fragments, multiplied by the emulator. */
static void products()
{
    typedef MMA_Traits<SM80_16x8x16_F32BF16BF16F32_TN> traits;
    static float d[32][4];
    static uint32_t a[32][4], b[32][2];
    int A[16][16], B[8][16];
    for (int i = 0; i < 16 * 16; ++i) A[i / 16][i % 16] = i * 7 % 19 - 9;
    for (int i = 0; i < 8 * 16; ++i) B[i / 16][i % 16] = i * 5 % 17 - 8;
    for (int l = 0; l < 32; ++l) {
        for (int i = 0; i < 8; ++i) {
            const int x = traits::ALayout{}(l, i);
            a[l][i / 2] |= bits(A[x % 16][x / 16]) << i % 2 * 16;
        }
        for (int i = 0; i < 4; ++i) {
            const int x = traits::BLayout{}(l, i);
            b[l][i / 2] |= bits(B[x % 8][x / 8]) << i % 2 * 16;
        }
    }
    ours_mma(d, a, b);
    for (int l = 0; l < 32; ++l)
        for (int i = 0; i < 4; ++i) {
            const int x = traits::CLayout{}(l, i);
            int sum = 0;
            for (int k = 0; k < 16; ++k) sum += A[x % 16][k] * B[x / 16][k];
            check(d[l][i] == (float)sum, "mma.sync", l, i);
        }
}

int main()
{
    rows_of<64, 64, 64>(), rows_of<64, 128, 64>(), rows_of<64, 256, 64>(), rows_of<80, 256, 80>(),
        rows_of<128, 64, 64>();
    rows_of<128, 64, 128>(), rows_of<128, 128, 64>(), rows_of<128, 128, 128>(), rows_of<128, 256, 64>();
    rows_of<112, 192, 112>(), rows_of<176, 128, 176>(), rows_of<192, 64, 64>();
    columns_of<64, 64, 64>(), columns_of<64, 128, 128>(), columns_of<64, 256, 128>(),
        columns_of<80, 256, 256>();
    columns_of<128, 64, 64>(), columns_of<128, 128, 64>(), columns_of<128, 128, 128>(),
        columns_of<176, 128, 128>();
    accumulators<32>(), accumulators<64>(), accumulators<80>(), accumulators<96>(), accumulators<112>(),
        accumulators<128>(), accumulators<176>();
    accumulators<192>(), accumulators<256>();
    products();
    printf("cute: %ld checks, %ld failed\n", checks, failed);
    return failed > 0 || checks == 0;
}

/* test_bf16.c -- products in bf16 instructions: against f64, and bit by bit against what the instructions compute, element
 * by element from the matrices as they lie
 *
 * Plain C stands for the instructions in the library's own loops, so that packing, borders, threads and scratch are
 * checked on every processor. Where the processor has an instruction, its bits must be those of plain C.
 */
#include "lib/bf16.h"
#include "lib/gemm.h"

typedef upipe_status (*gemm_entry)(upipe_ctx *c, upipe_view out, upipe_view a, upipe_view b, int flags,
                                   void *work, size_t work_bytes);

/* ---- the library's product with kernels in plain C ---- */

static upipe_status plain_amx(upipe_ctx *c, upipe_view out, upipe_view a, upipe_view b, int flags, void *work,
                              size_t work_bytes)
{
    return upi_bf16_gemm(c, out, a, b, flags, work, work_bytes, &plain_units[1]);
}

static upipe_status plain_avx512(upipe_ctx *c, upipe_view out, upipe_view a, upipe_view b, int flags,
                                 void *work, size_t work_bytes)
{
    return upi_bf16_gemm(c, out, a, b, flags, work, work_bytes, &plain_units[0]);
}

/* What there is: [amx]; NULL for an instruction that the processor lacks. */
static gemm_entry machine[2];
static const gemm_entry plain[2] = {plain_avx512, plain_amx};
static const upi_bf16_unit *machine_units[2];

/* ---- one product ---- */

/* A host's threads one after the other, the last one first: blocks must not lean on each other. */
static void run_backwards(void *self, int32_t count, void (*task)(void *arg, int32_t i), void *arg)
{
    (void)self;
    while (count > 0) task(arg, --count);
}

static upipe_par threads = {run_backwards, NULL, 3};
static upipe_ops alone, many;

static void run(gemm_entry gemm, const upipe_ops *ops, upipe_view out, upipe_view a, upipe_view b, int flags)
{
    const size_t bytes = upi_bf16_gemm_bytes(ops, out, a, b, flags);
    char *work = (char *)aligned_alloc(64, bytes + 64);
    upipe_ctx c = {.ops = ops};
    memset(work, 0xff, bytes + 64);
    CHECK_SAY(bytes % 64 == 0, "scratch of %zu bytes", bytes);
    CHECK_STATUS(gemm(&c, out, a, b, flags, work, bytes), UPIPE_OK, c.err);
    for (size_t i = bytes; i < bytes + 64; ++i)
        if (!CHECK(work[i] == (char)0xff)) break;
    free(work);
}

/* Pairs of row i of op(a) or of column i of op(b), from k0 on; zeros from `depth` on. */
static void pairs_of(upipe_view v, int by_rows, int head, int64_t i, int64_t k0, int64_t depth,
                     uint32_t *pairs)
{
    for (int64_t k = k0; k < depth; ++k) {
        const uint16_t *at = (const uint16_t *)upipe_view_at(v, by_rows ? i : k, head) + (by_rows ? k : i);
        pairs[(k - k0) / 2] |= (uint32_t)*at << (k - k0) % 2 * 16;
    }
}

/* Every element from the matrices as they lie. */
static void expect(const gemm_product *p, int amx, upipe_view want)
{
    const int trans_a = p->flags & UPIPE_GEMM_TRANS_A, trans_b = p->flags & UPIPE_GEMM_TRANS_B;
    const int64_t step = trans_a ? UPIPE_SUM_ROWS : UPI_BF16_DEPTH;
    for (int j = 0; j < p->out.h; ++j)
        for (int64_t i = 0; i < p->out.n; ++i)
            for (int64_t n = 0; n < p->out.d; ++n) {
                float sum = p->flags & UPIPE_GEMM_ACCUMULATE ? (float)get(p->before, i, j, n) : -0.0f;
                for (int head = 0; head < gemm_added(p); ++head)
                    for (int64_t k = 0; k < p->depth; k += step) {
                        uint32_t x[UPI_BF16_PAIRS] = {0}, y[UPI_BF16_PAIRS] = {0};
                        const int64_t last = k + step < p->depth ? k + step : p->depth;
                        pairs_of(p->a, !trans_a, p->a.h > 1 ? j + head : 0, i, k, last, x);
                        pairs_of(p->b, trans_b, p->b.h > 1 ? j + head : 0, n, k, last, y);
                        sum += sum_of(amx, x, y, 1, 0, (int)(last - k + 1) / 2);
                    }
                upipe_cpu_put(upipe_view_at(want, i, j), want.dtype, n, sum);
            }
}

static void check_product(test_rng *r, int64_t rows, int cols, int64_t depth, int heads, int shared,
                          int flags, upipe_dtype type)
{
    const gemm_product p =
        product_make(r, rows, cols, depth, heads, shared, flags, UPIPE_BF16, UPIPE_BF16, type);
    for (int amx = 0; amx < 2; ++amx) {
        const gemm_entry entries[] = {plain[amx], machine[amx]};
        const upipe_view want = twin(p.before);
        expect(&p, amx, want);
        for (int i = 0; i < 4; ++i) {
            if (entries[i / 2] == NULL) continue;
            memcpy(p.out.data, p.before.data, view_bytes(p.out));
            run(entries[i / 2], i % 2 ? &many : &alone, p.out, p.a, p.b, flags);
            CHECK_SAY(same_bytes(want, p.out), "%s%s, %d threads: %s: other bits", i / 2 ? "" : "plain ",
                      amx ? "AMX" : "AVX512-BF16", i % 2 ? 3 : 1, product_text(&p));
        }
        CHECK(reference(&p));
    }
    buffers_free(0);
}

/* ---- the cases ---- */

static void check_shapes(test_rng *r)
{
    static const int sizes[] = {1, 8, 15, 17, 32, 49};
    const int count = (int)(sizeof sizes / sizeof *sizes);
    const int rows = UPI_BF16_ROW_PANELS * UPI_BF16_PANEL + 17,
              cols = UPI_BF16_COL_PANELS * UPI_BF16_PANEL + 17;
    for (int i = 0; i < count; ++i)
        for (int n = 0; n < count; ++n)
            for (int flags = 0; flags < 8; ++flags)
                check_product(r, sizes[i], sizes[n], 1 + test_below(r, 100), 1, 0, flags,
                              flags & UPIPE_GEMM_ACCUMULATE || (i + n) % 2 ? UPIPE_F32 : UPIPE_BF16);
    for (int flags = 0; flags < 4; ++flags) {
        check_product(r, 19, 35, 2 * UPI_BF16_DEPTH + 33, 1, 0, flags, UPIPE_F32);
        check_product(r, rows, 18, 70, 1, 0, flags, UPIPE_F32);
        check_product(r, 18, cols, 70, 1, 0, flags, UPIPE_BF16);
        check_product(r, 40, 24, 80, 3, 1, flags, UPIPE_F32); /* heads of a projection */
        check_product(r, 40, 24, 80, 3, 2, flags, UPIPE_F32); /* and of a weight's gradient */
        check_product(r, 20, 40, 33, 2, 3, flags, UPIPE_BF16);
        check_product(r, 33, 20, 45, 4, 0, flags, UPIPE_F32);
        check_product(r, 30, 21, 64, 5, ADDED, flags | UPIPE_GEMM_ACCUMULATE, UPIPE_F32);
        check_product(r, 30, 21, 41, 3, ADDED, flags, UPIPE_BF16);
        check_product(r, 30, 21, 64, 9, ADDED | JOINED, flags, UPIPE_F32);
        check_product(r, 30, 21, 48, 3, ADDED | JOINED, flags, UPIPE_F32); /* not by whole steps */
    }
}

/* Numbers whose products, or sums, are subnormal. */
static void check_tiny(test_rng *r)
{
    uint16_t a[32], b[32];
    float c[2];
    for (int i = 0; i < 200; ++i) {
        const upipe_view va = upipe_view_packed(a, UPIPE_BF16, 1, 1, 32),
                         vb = upipe_view_packed(b, UPIPE_BF16, 1, 1, 32);
        uint32_t x[UPI_BF16_PAIRS] = {0}, y[UPI_BF16_PAIRS] = {0};
        for (int k = 0; k < 32; ++k) {
            a[k] = (uint16_t)(test_below(r, 2) << 15 | (test_below(r, 4) ? 1 + test_below(r, 64) : 0) << 7 |
                              test_below(r, 128));
            b[k] = (uint16_t)(test_below(r, 2) << 15 | (60 + test_below(r, 10)) << 7 | test_below(r, 128));
            if (test_below(r, 3) == 0)
                b[k] = (uint16_t)(test_below(r, 2) << 15 | test_below(r, 128)); /* subnormal */
        }
        pairs_of(va, 1, 0, 0, 0, 32, x), pairs_of(vb, 1, 0, 0, 0, 32, y);
        for (int amx = 0; amx < 2; ++amx) {
            c[0] = sum_of(amx, x, y, 1, 0, 16);
            run(machine[amx] != NULL ? machine[amx] : plain[amx], &alone,
                upipe_view_packed(c + 1, UPIPE_F32, 1, 1, 1), va, vb, UPIPE_GEMM_TRANS_B);
            CHECK_BYTES(c, c + 1, 4);
        }
    }
}

/* A pair of bf16, some of them subnormal or close to it. */
static uint32_t draw_pair(test_rng *r)
{
    uint32_t pair = 0;
    for (int i = 0; i < 2; ++i) {
        const float x =
            (float)test_normal(r) * (test_below(r, 8) ? 1 : 0x1p-66f) * (test_below(r, 40) ? 1 : 0x1p-64f);
        pair = pair << 16 | upipe_f32_to_bf16(x);
    }
    return pair;
}

/* Strips of all heights and depths, with operands and sums at any step. */
static void check_strips(test_rng *r)
{
    enum { STEP = 150, ROWS = 5 * UPI_BF16_PANEL };
    static uint32_t a[ROWS * STEP], b[STEP * STEP];
    static float want[ROWS * STEP], got[ROWS * STEP];
    for (int i = 0; i < ROWS * STEP; ++i) a[i] = draw_pair(r);
    for (int i = 0; i < STEP * STEP; ++i) b[i] = draw_pair(r);
    for (int rows = UPI_BF16_PANEL; rows <= ROWS; rows += UPI_BF16_PANEL)
        for (int depth = UPI_BF16_STEP; depth <= 8 * UPI_BF16_STEP; depth *= 2)
            for (int amx = 0; amx < 2; ++amx) {
                const upi_bf16_unit *units[] = {&plain_units[amx], machine_units[amx]};
                const int a_stride = depth / 2 + test_below(r, STEP - depth / 2),
                          b_stride = UPI_BF16_PANEL + test_below(r, STEP - UPI_BF16_PANEL),
                          sums_stride = UPI_BF16_PANEL + test_below(r, STEP - UPI_BF16_PANEL);
                memset(want, 0xff, sizeof want);
                for (int i = 0; i < rows; ++i)
                    for (int j = 0; j < UPI_BF16_PANEL; ++j)
                        want[i * sums_stride + j] =
                            sum_of(amx, a + i * a_stride, b + j, b_stride, 0, depth / 2);
                for (int kind = 0; kind < 2; ++kind) {
                    if (units[kind] == NULL) continue;
                    memset(got, 0xff, sizeof got);
                    units[kind]->open();
                    units[kind]->strip(rows, depth, a, a_stride, b, b_stride, got, sums_stride);
                    units[kind]->close();
                    CHECK_SAY(memcmp(want, got, sizeof want) == 0, "%s%s: a strip of %d x %d",
                              kind ? "" : "plain ", units[kind]->name, rows, depth);
                }
            }
}

/* Scratch for the largest product serves all smaller ones. */
static void check_bytes(void)
{
    size_t rows = 0, cols = 0;
    for (int size = 1; size < 1300; ++size) {
        const upipe_view a = upipe_view_packed(NULL, UPIPE_BF16, size, 1, 700);
        const upipe_view b = upipe_view_packed(NULL, UPIPE_BF16, 300, 1, 700);
        const upipe_view tall = upipe_view_packed(NULL, UPIPE_BF16, size, 1, 300);
        const upipe_view wide = upipe_view_packed(NULL, UPIPE_BF16, 300, 1, size);
        const size_t more_rows = upi_bf16_gemm_bytes(&many, tall, a, b, UPIPE_GEMM_TRANS_B);
        const size_t more_cols = upi_bf16_gemm_bytes(&many, wide, b, a, UPIPE_GEMM_TRANS_B);
        CHECK(more_rows >= rows && more_cols >= cols && more_rows % 3 == 0);
        rows = more_rows, cols = more_cols;
    }
}

/* Other types go to the table's own product; what is wrong is refused. */
static void check_others(test_rng *r)
{
    upipe_view a = matrix(r, UPIPE_F32, 20, 1, 40, 0, 0), b = matrix(r, UPIPE_BF16, 17, 1, 40, 0, 0);
    float c[2][20 * 17];
    upipe_ops ops = alone;
    upipe_ctx ctx;
    upipe_err err;
    memset(&ctx, 0, sizeof ctx), memset(&err, 0, sizeof err);
    run(plain_amx, &alone, upipe_view_packed(c[0], UPIPE_F32, 20, 1, 17), a, b, UPIPE_GEMM_TRANS_B);
    run(upi_cpu_gemm, &alone, upipe_view_packed(c[1], UPIPE_F32, 20, 1, 17), a, b, UPIPE_GEMM_TRANS_B);
    CHECK_BYTES(c[0], c[1], sizeof c[0]);
    ctx.ops = &alone;
    CHECK_REFUSED(
        plain_amx(&ctx, upipe_view_packed(c[0], UPIPE_F32, 17, 1, 17), b, b, UPIPE_GEMM_TRANS_B, c[1], 64),
        UPIPE_ERR_ARG, ctx.err, "of scratch");
    ops.gemm = upi_cpu_gemm, ops.gemm_bytes = upi_cpu_gemm_bytes;
    if (machine[0] == NULL && machine[1] == NULL) {
        CHECK_STATUS(upipe_cpu_bf16(&ops, &err), UPIPE_ERR_UNSUPPORTED, err);
        CHECK(strstr(err.text, "neither AMX nor AVX512-BF16") != NULL);
        CHECK(ops.gemm == upi_cpu_gemm && ops.gemm_bytes == upi_cpu_gemm_bytes);
        CHECK(upipe_cpu_bf16_name() == NULL);
    } else {
        CHECK_STATUS(upipe_cpu_bf16(&ops, &err), UPIPE_OK, err);
        CHECK(ops.gemm == machine[machine[1] != NULL] && ops.gemm_bytes == upi_bf16_gemm_bytes);
        CHECK(strcmp(upipe_cpu_bf16_name(), machine[1] != NULL ? "AMX" : "AVX512-BF16") == 0);
    }
    buffers_free(0);
}

int main(int argc, char **argv)
{
    test_rng r;
    r.state = (uint64_t)test_env("UPIPE_SEED", 1);
    many = alone;
    many.par = &threads;
#if UPIPE_CPU_BF16_X86
    if (upi_bf16_has_amx()) machine[1] = upi_bf16_gemm_amx, machine_units[1] = &upi_bf16_amx;
    if (__builtin_cpu_supports("avx512bf16"))
        machine[0] = upi_bf16_gemm_avx512, machine_units[0] = &upi_bf16_avx512;
#endif
    if (machine[0] == NULL) printf("left out: AVX512-BF16's own bits, as this processor has none\n");
    if (machine[1] == NULL) printf("left out: AMX's own bits, as this processor has none\n");
    test_begin(argc, argv);
    TEST(check_shapes(&r));
    TEST(check_tiny(&r));
    TEST(check_strips(&r));
    TEST(check_bytes());
    TEST(check_others(&r));
    return test_end("test_bf16");
}

/* test_cuda_gemm.c -- the CUDA matrix product: against f64 for all flags, batches and steps; what it refuses
 */
#include "../lib/gemm.h"
#include "cuda/staged.h"

static void check_product(test_rng *r, upipe_ctx *c, int64_t rows, int cols, int64_t depth, int heads,
                          int shared, int flags, upipe_dtype type, upipe_dtype type_out)
{
    gemm_product p = product_make(r, rows, cols, depth, heads, shared, flags, type, type, type_out);
    /* the step of a single row says nothing */
    if (p.a.n == 1) p.a.n_stride = 0;
    if (p.b.n == 1) p.b.n_stride = 0;
    if (p.out.n == 1) p.out.n_stride = p.before.n_stride = p.want.n_stride = 0;
    CHECK_INT(c->ops->gemm_bytes(c->ops, p.out, p.a, p.b, flags), 0);
    CHECK_OP(gemm(c, p.out, p.a, p.b, flags, NULL, 0));
    CHECK_SAY(reference(&p), "%s", product_text(&p));
    CHECK_SAY(gaps_whole(p.out), "%s: a gap written", product_text(&p));
    buffers_free(0);
}

static void check_all(test_rng *r, upipe_ctx *c)
{
    static const int sizes[] = {1, 2, 7, 8, 16, 33};
    for (int i = 0; i < 6; ++i)
        for (int which = 0; which < 8 * 3 * 4; ++which) {
            int flags = which % 8, kind = which / 8 % 3, shared = which / 24;
            int rows = sizes[i], cols = sizes[test_below(r, 6)], depth = sizes[test_below(r, 6)];
            upipe_dtype type = kind == 0 ? UPIPE_F32 : UPIPE_BF16, out = kind == 2 ? UPIPE_BF16 : UPIPE_F32;
            if (out == UPIPE_BF16) flags &= ~UPIPE_GEMM_ACCUMULATE;
            check_product(r, c, rows, cols, depth, 1, 0, flags, type, out);
            check_product(r, c, rows, cols, depth, 3, shared, flags, type, out);
        }
    check_product(r, c, 130, 70, 300, 1, 0, UPIPE_GEMM_TRANS_B, UPIPE_BF16, UPIPE_BF16);
    check_product(r, c, 64, 130, 200, 2, 1, UPIPE_GEMM_TRANS_A | UPIPE_GEMM_ACCUMULATE, UPIPE_BF16,
                  UPIPE_F32);
    check_product(r, c, 70, 65, 300, 1, 0, 0, UPIPE_F32, UPIPE_F32);
}

/* An empty sum is 0, or the old out; an empty out is nothing. */
static void check_empty(test_rng *r, upipe_ctx *c)
{
    check_product(r, c, 5, 9, 0, 2, 0, UPIPE_GEMM_TRANS_A, UPIPE_F32, UPIPE_F32);
    check_product(r, c, 5, 9, 0, 2, 0, UPIPE_GEMM_TRANS_A, UPIPE_BF16, UPIPE_BF16);
    check_product(r, c, 5, 9, 0, 1, 0, UPIPE_GEMM_TRANS_A | UPIPE_GEMM_ACCUMULATE, UPIPE_F32, UPIPE_F32);
    check_product(r, c, 0, 9, 4, 1, 0, 0, UPIPE_F32, UPIPE_F32);
    check_product(r, c, 5, 0, 4, 2, 0, 0, UPIPE_F32, UPIPE_F32);
}

static void check_statuses(upipe_ctx *c)
{
    static float buf[64];
    const upipe_view out = upipe_view_packed(buf, UPIPE_F32, 3, 1, 4);
    const upipe_view a = upipe_view_packed(buf, UPIPE_F32, 3, 1, 5);
    const upipe_view b = upipe_view_packed(buf, UPIPE_F32, 5, 1, 4);
    upipe_view v;
    check_gemm_statuses(c, NULL, 0);
#define REFUSED(x, y, z, words) \
    CHECK_REFUSED(c->ops->gemm(c, x, y, z, 0, NULL, 0), UPIPE_ERR_UNSUPPORTED, c->err, words)
    REFUSED((v = out, v.dtype = UPIPE_BF16, v), a, b, "f32 times f32 to bf16");
    REFUSED(out, (v = a, v.dtype = UPIPE_BF16, v), b, "bf16 times f32 to f32");
    REFUSED(out, (v = a, v.n_stride = 3, v), b, "are 4, 3 and 4 apart");
    REFUSED((v = out, v.n_stride = 2, v), a, b, "are 2, 5 and 4 apart");
#undef REFUSED
}

int main(int argc, char **argv)
{
    test_rng r;
    device d;
    r.state = (uint64_t)test_env("UPIPE_SEED", 1);
    test_begin(argc, argv);
    if (device_open(&d)) {
        printf("test_cuda_gemm: %s, seed %llu\n", d.ops.name, (unsigned long long)r.state);
        staged_open(&d);
        TEST(check_all(&r, &staged.c));
        TEST(check_empty(&r, &staged.c));
        TEST(check_statuses(&d.c));
        staged_close();
    }
    device_close(&d);
    return test_end("test_cuda_gemm");
}

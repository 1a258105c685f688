/* test_cuda_gemm.c -- the CUDA matrix product: against f64 for all flags, batches and steps; what it refuses
 */
#include "../lib/gemm.h"
#include "cuda/staged.h"

/* shared: bit 0 = a has one matrix for all heads, bit 1 = b has. */
static void check_product(test_rng *r, upipe_ctx *c, int64_t rows, int cols, int64_t depth, int heads,
                          int shared, int flags, upipe_dtype type, upipe_dtype type_out)
{
    gemm_product p;
    upipe_view before, want;
    int trans_a = flags & UPIPE_GEMM_TRANS_A, trans_b = flags & UPIPE_GEMM_TRANS_B, whole = 1, j;
    int a_heads = shared & 1 ? 1 : heads, b_heads = shared & 2 ? 1 : heads;
    int64_t i, at;
    size_t bytes;
    p.flags = flags;
    p.depth = depth;
    p.a = matrix(r, type, trans_a ? depth : rows, a_heads, (int)(trans_a ? rows : depth), test_below(r, 2),
                 test_below(r, 4));
    p.b = matrix(r, type, trans_b ? cols : depth, b_heads, trans_b ? (int)depth : cols, test_below(r, 2),
                 test_below(r, 4));
    p.out = matrix(r, type_out, rows, heads, cols, test_below(r, 2), test_below(r, 4));
    p.sum_depth = 0;
    /* the step of a single row says nothing */
    if (p.a.n == 1) p.a.n_step = 0;
    if (p.b.n == 1) p.b.n_step = 0;
    if (p.out.n == 1) p.out.n_step = 0;
    if (!(flags & UPIPE_GEMM_ACCUMULATE)) /* an old NaN must not survive */
        memset(p.out.data, 0xff, view_bytes(p.out));
    bytes = view_bytes(p.out);
    before = want = p.out;
    before.data = copy_of(p.out.data, bytes);
    want.data = copy_of(p.out.data, bytes);
    CHECK_INT(c->ops->gemm_bytes(c->ops, p.out, p.a, p.b, flags), 0);
    CHECK_STATUS(c->ops->gemm(c, p.out, p.a, p.b, flags, NULL, 0), UPIPE_OK, c->err);
    CHECK_SAY(reference(&p, before, want), "%lld x %d x %lld, %d heads, shared %d, flags %d, %s -> %s",
              (long long)rows, cols, (long long)depth, heads, shared, flags, upipe_dtype_name(type),
              upipe_dtype_name(type_out));
    /* what is not an element is as it was: put the old elements back and compare all bytes */
    for (i = 0; i < rows; ++i)
        for (j = 0; j < heads; ++j)
            memcpy(upipe_view_at(p.out, i, j), upipe_view_at(before, i, j),
                   (size_t)cols * upipe_dtype_bytes(type_out));
    for (at = 0; at < (int64_t)bytes; ++at) whole &= ((char *)p.out.data)[at] == ((char *)before.data)[at];
    CHECK_SAY(whole, "%lld x %d x %lld, %d heads: a gap written", (long long)rows, cols, (long long)depth,
              heads);
    free(p.a.data);
    free(p.b.data);
    free(p.out.data);
    free(before.data);
    free(want.data);
}

static void check_all(test_rng *r, upipe_ctx *c)
{
    static const int sizes[] = {1, 2, 7, 8, 16, 33};
    int i, which;
    for (i = 0; i < 6; ++i)
        for (which = 0; which < 8 * 3 * 4; ++which) {
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
    upipe_view out = upipe_view_packed(buf, UPIPE_F32, 3, 1, 4),
               a = upipe_view_packed(buf, UPIPE_F32, 3, 1, 5);
    upipe_view b = upipe_view_packed(buf, UPIPE_F32, 5, 1, 4), v, w;
    CHECK_STATUS(c->ops->gemm(c, out, a, b, UPIPE_GEMM_TRANS_B, NULL, 0), UPIPE_ERR_ARG, c->err);
    CHECK_TEXT(c->err.text, "op(b) is 4 x 5");
    CHECK_STATUS(c->ops->gemm(c, out, a, b, UPIPE_GEMM_TRANS_A, NULL, 0), UPIPE_ERR_ARG, c->err);
    CHECK_TEXT(c->err.text, "op(a) is 5 x 3");
    v = a;
    v.h = 2;
    CHECK_STATUS(c->ops->gemm(c, out, v, b, 0, NULL, 0), UPIPE_ERR_ARG, c->err);
    CHECK_TEXT(c->err.text, "2 matrices of a and 1 of b for 1 of out");
    CHECK_STATUS(c->ops->gemm(c, out, a, b, 8, NULL, 0), UPIPE_ERR_UNSUPPORTED, c->err);
    CHECK_TEXT(c->err.text, "unknown flags 0x8");
    v = out;
    v.dtype = UPIPE_BF16;
    CHECK_STATUS(c->ops->gemm(c, v, a, b, UPIPE_GEMM_ACCUMULATE, NULL, 0), UPIPE_ERR_UNSUPPORTED, c->err);
    CHECK_TEXT(c->err.text, "accumulates into f32 only");
    CHECK_STATUS(c->ops->gemm(c, v, a, b, 0, NULL, 0), UPIPE_ERR_UNSUPPORTED, c->err);
    CHECK_TEXT(c->err.text, "f32 times f32 to bf16");
    v = a;
    v.dtype = UPIPE_BF16;
    CHECK_STATUS(c->ops->gemm(c, out, v, b, 0, NULL, 0), UPIPE_ERR_UNSUPPORTED, c->err);
    CHECK_TEXT(c->err.text, "bf16 times f32 to f32");
    v = a;
    v.n_step = 3;
    CHECK_STATUS(c->ops->gemm(c, out, v, b, 0, NULL, 0), UPIPE_ERR_UNSUPPORTED, c->err);
    CHECK_TEXT(c->err.text, "are 4, 3 and 4 apart");
    w = out;
    w.n_step = 2;
    CHECK_STATUS(c->ops->gemm(c, w, a, b, 0, NULL, 0), UPIPE_ERR_UNSUPPORTED, c->err);
    v = a;
    v.data = NULL;
    CHECK_STATUS(c->ops->gemm(c, out, v, b, 0, NULL, 0), UPIPE_ERR_ARG, c->err);
    CHECK_TEXT(c->err.text, "a is NULL");
}

int main(void)
{
    test_rng r;
    device d;
    r.state = (uint64_t)test_env("UPIPE_SEED", 1);
    if (device_open(&d)) {
        printf("test_cuda_gemm: %s, seed %llu\n", d.ops.name, (unsigned long long)r.state);
        staged_open(&d);
        check_all(&r, &staged.c);
        check_empty(&r, &staged.c);
        check_statuses(&d.c);
        staged_close();
    }
    device_close(&d);
    return test_end("test_cuda_gemm");
}

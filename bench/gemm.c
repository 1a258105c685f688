/* gemm.c -- what bench/gemm.py calls through a shared object: the matrix product of the CPU table
 *
 * With kernels.c, so that the peak is measured with the same vectors, on the same threads:
 *
 *     bench *b = bench_open(threads);
 *     p.work_bytes = bench_gemm_bytes(b, &p);
 *     const char *why = bench_gemm(b, &p);     NULL: done
 */
#include "kernels.c"
#include "upipe/cpu/upipe_cpu_bf16.h"

/* bench_product -- c [m][n] = op(a) * op(b) over a depth of k, packed matrices of `dtype`, c of `out_dtype`
 *   a      [m][k], with UPIPE_GEMM_TRANS_A [k][m]
 *   b      [k][n], with UPIPE_GEMM_TRANS_B [n][k]
 *   work   work_bytes of bench_gemm_bytes, 64-byte aligned
 */
typedef struct bench_product {
    void *c, *a, *b, *work;
    int64_t work_bytes, m, n, k;
    int32_t flags, dtype, out_dtype;
} bench_product;

static upipe_view product_a(const bench_product *p)
{
    int turned = (p->flags & UPIPE_GEMM_TRANS_A) != 0;
    return upipe_view_packed(p->a, (upipe_dtype)p->dtype, turned ? p->k : p->m, 1,
                             (int32_t)(turned ? p->m : p->k));
}

static upipe_view product_b(const bench_product *p)
{
    int turned = (p->flags & UPIPE_GEMM_TRANS_B) != 0;
    return upipe_view_packed(p->b, (upipe_dtype)p->dtype, turned ? p->n : p->k, 1,
                             (int32_t)(turned ? p->k : p->n));
}

static upipe_view product_c(const bench_product *p)
{
    return upipe_view_packed(p->c, (upipe_dtype)p->out_dtype, p->m, 1, (int32_t)p->n);
}

int64_t bench_gemm_bytes(const bench *b, const bench_product *p)
{
    return (int64_t)b->ops.gemm_bytes(&b->ops, product_c(p), product_a(p), product_b(p), p->flags);
}

const char *bench_gemm(bench *b, const bench_product *p)
{
    upipe_status status = b->ops.gemm(&b->ctx, product_c(p), product_a(p), product_b(p), p->flags, p->work,
                                      (size_t)p->work_bytes);
    return status ? b->ctx.err.text : NULL;
}

/* From now on bf16's product is that in the processor's bf16 instructions. NULL: done; else why not */
const char *bench_use_bf16_gemm(bench *b)
{
    return upipe_cpu_bf16(&b->ops, &b->ctx.err) ? b->ctx.err.text : NULL;
}

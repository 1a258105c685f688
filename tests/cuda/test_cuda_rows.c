/* test_cuda_rows.c -- the CUDA row operations: lib/rows.h, rows longer than a warp takes, host memory of all
 *                     kinds, and that the table is whole
 */
#include "../lib/rows.h"
#include "cuda/staged.h"

/* No entry is missing. */
static void check_whole(const upipe_ops *ops)
{
    CHECK(ops->name != NULL && ops->self != NULL);
    CHECK(ops->sync && ops->copy && ops->zero && ops->cast);
    CHECK(ops->gemm && ops->gemm_bytes);
    CHECK(ops->attn_fwd && ops->attn_bwd && ops->attn_bytes);
    CHECK(ops->rope && ops->rmsnorm && ops->rmsnorm_bwd && ops->rowdot && ops->sum && ops->add && ops->scale);
    CHECK(ops->gate && ops->gate_bwd && ops->cross_entropy && ops->embed && ops->embed_bwd);
    CHECK(ops->total && ops->adamw && ops->bias_bwd);
    /* and none that this list lacks */
    CHECK_INT(sizeof *ops,
              (6 + 24) * sizeof(void *)); /* name, self, host, attn_can, attn_reads_o, loss_bytes, par */
    CHECK_INT(ops->attn_reads_o, 0);
}

/* Ordinary memory may be reused at once, in both directions; pinned memory after sync. */
static void check_host_memory(device *d)
{
    enum { BYTES = 5000 };
    unsigned char *host = (unsigned char *)malloc(BYTES), *again = (unsigned char *)malloc(BYTES);
    void *pinned = NULL, *x = device_new(d, BYTES), *y = device_new(d, BYTES);
    CHECK_STATUS(upipe_cuda_host_slab(&pinned, BYTES, &d->c.err), UPIPE_OK, d->c.err);
    for (int round = 0; round < 4; ++round) {
        for (int i = 0; i < BYTES; ++i) host[i] = (unsigned char)(i * 7 + round);
        CHECK_STATUS(d->ops.copy(&d->c, x, host, BYTES), UPIPE_OK, d->c.err);
        memset(host, 0, BYTES);
        CHECK_STATUS(d->ops.copy(&d->c, y, x, BYTES), UPIPE_OK, d->c.err);
        CHECK_STATUS(d->ops.zero(&d->c, x, BYTES), UPIPE_OK, d->c.err);
        CHECK_STATUS(d->ops.copy(&d->c, pinned, y, BYTES), UPIPE_OK, d->c.err);
        CHECK_STATUS(d->ops.copy(&d->c, x, pinned, BYTES), UPIPE_OK, d->c.err);
        memset(again, 0, BYTES);
        CHECK_STATUS(d->ops.copy(&d->c, again, x, BYTES), UPIPE_OK, d->c.err);
        for (int i = 0; i < BYTES; ++i) host[i] = (unsigned char)(i * 7 + round);
        CHECK_BYTES(again, host, BYTES);
        CHECK_STATUS(d->ops.sync(&d->c), UPIPE_OK, d->c.err);
        CHECK_BYTES(pinned, host, BYTES);
        memset(again, 0, BYTES);
        CHECK_STATUS(d->ops.copy(&d->c, again, host, BYTES), UPIPE_OK, d->c.err);
        CHECK_BYTES(again, host, BYTES);
    }
    CHECK_STATUS(upipe_cuda_host_slab_free(pinned, &d->c.err), UPIPE_OK, d->c.err);
    device_free(d, x);
    device_free(d, y);
    free(host);
    free(again);
}

/* A cast between equal types moves bits, those of NaNs too. */
static void check_bits(upipe_ctx *c)
{
    static const uint32_t wide[] = {0x7f800001, 0xffc12345, 0x00000001, 0x80000000, 0x3f800001};
    static const uint16_t narrow[] = {0x7f81, 0xffc1, 0x0001, 0x8000, 0x3f81};
    uint32_t wide_got[5];
    uint16_t narrow_got[5], narrow_from[5];
    float from[5];
    memcpy(from, wide, sizeof wide);
    memcpy(narrow_from, narrow, sizeof narrow);
    CHECK_OP(cast(c, upipe_view_packed(wide_got, UPIPE_F32, 1, 1, 5),
                  upipe_view_packed(from, UPIPE_F32, 1, 1, 5)));
    CHECK_OP(cast(c, upipe_view_packed(narrow_got, UPIPE_BF16, 1, 1, 5),
                  upipe_view_packed(narrow_from, UPIPE_BF16, 1, 1, 5)));
    CHECK_BYTES(wide_got, wide, sizeof wide);
    CHECK_BYTES(narrow_got, narrow, sizeof narrow);
}

/* One row of a token for all its heads, stride 0: as a latent's shared key goes into K. */
static void check_shared(test_rng *r, upipe_ctx *c, upipe_dtype dtype, int64_t n, int h, int d)
{
    upipe_view one = tensor(r, dtype, n, 1, d, ROWS_APART, 1), all = one,
               y = empty(dtype, n, h, d, HEADS_INNER);
    int ok = 1;
    all.h = h;
    all.h_stride = 0;
    CHECK_OP(cast(c, y, all));
    for (int64_t i = 0; i < n; ++i)
        for (int j = 0; j < h; ++j)
            for (int k = 0; k < d; ++k) ok &= get(y, i, j, k) == get(one, i, 0, k);
    CHECK_SAY(ok && gaps_whole(y), "[%lld][%d][%d] of %s from one head", (long long)n, h, d,
              upipe_dtype_name(dtype));
    buffers_free(0);
}

/* More tokens than one tile of the norm weight's gradient, in columns that end inside a block. */
static void check_weight(test_rng *r, upipe_ctx *c, int tokens, int d, upipe_dtype dtype)
{
    upipe_view x = tensor(r, dtype, tokens, 1, d, PACKED, 1),
               dy = tensor(r, dtype, tokens, 1, d, ROWS_APART, 1), dx = twin(x);
    float *weight = floats(d), *dweight = floats(d);
    double *want = (double *)buffer((size_t)d * sizeof *want),
           *size = (double *)buffer((size_t)d * sizeof *size);
    int ok = 1;
    for (int k = 0; k < d; ++k) {
        weight[k] = 1;
        dweight[k] = (float)k;
        want[k] = size[k] = k;
    }
    for (int i = 0; i < tokens; ++i) {
        double square = 0;
        for (int k = 0; k < d; ++k) square += get(x, i, 0, k) * get(x, i, 0, k);
        for (int k = 0; k < d; ++k) {
            double one = get(dy, i, 0, k) * get(x, i, 0, k) / sqrt(square / d + 1e-5);
            want[k] += one;
            size[k] += fabs(one);
        }
    }
    CHECK_OP(rmsnorm_bwd(c, dx, dy, x, weight, 1e-5f, dweight, 0));
    for (int k = 0; k < d; ++k)
        if (!(fabs((double)dweight[k] - want[k]) <= size[k] * (16 + tokens) * EPS_F32)) ok = 0;
    CHECK_SAY(ok, "dgain of %d tokens, d %d, %s", tokens, d, upipe_dtype_name(dtype));
    buffers_free(0);
}

/* More blocks than a grid has, so that they take turns; a row in pieces, and short rows. */
static void check_wide(test_rng *r, upipe_ctx *c, int64_t n, int h, int d, int layout)
{
    upipe_view x = tensor(r, UPIPE_F32, n, h, d, layout, 1), y = twin(x),
               z = empty(UPIPE_BF16, n, h, d, layout);
    float *weight = floats(d);
    int ok_cast = 1, ok_norm = 1;
    for (int k = 0; k < d; ++k) weight[k] = 2;
    CHECK_OP(cast(c, z, x));
    CHECK_OP(rmsnorm(c, y, y, weight, 0));
    for (int64_t i = 0; i < n; ++i)
        for (int j = 0; j < h; ++j) {
            double square = 0;
            for (int k = 0; k < d; ++k) square += get(x, i, j, k) * get(x, i, j, k);
            for (int k = 0; k < d; ++k) {
                double one = get(x, i, j, k), want = 2 * one / sqrt(square / d);
                if (!(fabs(get(z, i, j, k) - one) <= store_error(UPIPE_BF16, one))) ok_cast = 0;
                if (!(fabs(get(y, i, j, k) - want) <= (16 + d / 8.0) * EPS_F32 * fabs(want))) ok_norm = 0;
            }
        }
    CHECK_SAY(ok_cast && ok_norm && gaps_whole(z) && gaps_whole(y),
              "[%lld][%d][%d], layout %d: cast %d, rmsnorm %d", (long long)n, h, d, layout, ok_cast, ok_norm);
    buffers_free(0);
}

/* More rows than one launch sums. Every element is 1, or, towards the end, -1, so that
 * every term of the sums is 1. */
static void check_weight_chunks(upipe_ctx *c)
{
    enum { TOKENS = 40000, HEADS = 7, DIM = 2 };
    upipe_view x = empty(UPIPE_BF16, TOKENS, HEADS, DIM, PACKED), dx;
    float weight[DIM] = {1, 1}, dweight[HEADS * DIM];
    int64_t at;
    for (at = 0; at < TOKENS * HEADS * DIM; ++at)
        ((uint16_t *)x.data)[at] = at < 30000 * HEADS * DIM ? 0x3f80 : 0xbf80;
    for (int k = 0; k < HEADS * DIM; ++k) dweight[k] = (float)k;
    dx = twin(x);
    CHECK_OP(rmsnorm_bwd(c, dx, dx, x, weight, 0, dweight, 0));
    for (int k = 0; k < HEADS * DIM; ++k)
        CHECK_SAY(dweight[k] == (float)(TOKENS + k), "dgain %.9g", (double)dweight[k]);
    for (at = 0; at < TOKENS * HEADS * DIM; ++at)
        if ((((uint16_t *)dx.data)[at] & 0x7fff) != 0) break;
    CHECK_INT(at, TOKENS * HEADS * DIM);
    buffers_free(0);
}

/* Rows of one chain in f32 and, in bf16, of the products that attention's backward forms: a row has the same
 * bits wherever it stands in a tile, and whatever follows its end. */
static void check_rowdot_places(test_rng *r, upipe_ctx *c, upipe_dtype dtype, int d)
{
    upipe_view a = tensor(r, dtype, 37, 2, d, PACKED, 1), b = tensor(r, dtype, 37, 2, d, ROWS_APART, 1);
    upipe_view all = empty(UPIPE_F32, 37, 2, 1, PACKED), one = empty(UPIPE_F32, 37, 2, 1, HEADS_OUTER);
    int ok = 1;
    CHECK_OP(rowdot(c, all, a, b));
    for (int i = 0; i < 37; i += 3)
        CHECK_OP(rowdot(c, upipe_view_rows(one, i, i < 36 ? 3 : 1), upipe_view_rows(b, i, i < 36 ? 3 : 1),
                        upipe_view_rows(a, i, i < 36 ? 3 : 1)));
    CHECK(same(all, one) && gaps_whole(one));
    for (int i = 0; i < 37 && dtype == UPIPE_F32; ++i)
        for (int j = 0; j < 2; ++j) {
            float chain = 0;
            for (int k = 0; k < d; ++k) chain = fmaf((float)get(a, i, j, k), (float)get(b, i, j, k), chain);
            if ((float)get(all, i, j, 0) != chain) ok = 0;
        }
    CHECK_SAY(ok, "rowdot d %d: not the chain", d);
    buffers_free(0);
}

/* More heads than share one computation of angles: each as if it were alone. */
static void check_rope_heads(test_rng *r, upipe_ctx *c)
{
    enum { HEADS = 19 };
    upipe_view x = tensor(r, UPIPE_F32, 3, HEADS, 16, HEADS_INNER, 1), alone = twin(x);
    upipe_rope call = rope_of(x, 5, 0, 0);
    CHECK_OP(rope(c, &call));
    call.x.h = 1;
    for (int j = 0; j < HEADS; ++j) {
        call.x.data = (float *)alone.data + j * alone.h_stride;
        CHECK_OP(rope(c, &call));
    }
    CHECK(same(x, alone) && gaps_whole(x));
    buffers_free(0);
}

static void check_cuda_statuses(upipe_ctx *c)
{
    const int most = UPIPE_CUDA_SCRATCH / 16;
    float buf[16];
    upipe_view x = upipe_view_packed(buf, UPIPE_F32, 1, most + 1, 1);
    memset(buf, 0, sizeof buf);
    CHECK_REFUSED(c->ops->rmsnorm_bwd(c, x, x, x, buf, 0, buf, 0), UPIPE_ERR_UNSUPPORTED, c->err,
                  "262145 columns, at most 262144 with dgain");
    x = upipe_view_packed(buf, UPIPE_F32, 1, 1, most);
    CHECK_REFUSED(c->ops->rmsnorm_bwd(c, x, x, x, buf, 0, buf, 0), UPIPE_ERR_UNSUPPORTED, c->err,
                  "262144 elements with dgain take 1048608 bytes of shared memory a block");
    x = upipe_view_packed(buf, UPIPE_F32, 1, 1, 4 * most + 1);
    CHECK_REFUSED(c->ops->bias_bwd(c, buf, x), UPIPE_ERR_UNSUPPORTED, c->err,
                  "bias_bwd: 1048577 columns, at most 1048576");
}

int main(int argc, char **argv)
{
    test_rng r;
    device d;
    r.state = (uint64_t)test_env("UPIPE_SEED", 1);
    test_begin(argc, argv);
    if (device_open(&d)) {
        printf("test_cuda_rows: %s, seed %llu\n", d.ops.name, (unsigned long long)r.state);
        staged_open(&d);
        TEST(check_whole(&d.ops));
        TEST(check_host_memory(&d));
        TEST(check_bits(&staged.c));
        TEST(check_shared(&r, &staged.c, UPIPE_F32, 37, 5, 64));
        TEST(check_shared(&r, &staged.c, UPIPE_BF16, 300, 16, 64));
        TEST(check_shared(&r, &staged.c, UPIPE_BF16, 37, 3, 6));
        TEST(check_rows(&r, &staged.c));
        TEST(check_weight(&r, &staged.c, 150, 70, UPIPE_F32));
        TEST(check_weight(&r, &staged.c, 65, 32, UPIPE_BF16));
        TEST(check_weight(&r, &staged.c, 20, 12001,
                          UPIPE_BF16)); /* more shared memory than a launch has unasked */
        TEST(check_weight_chunks(&staged.c));
        for (int i = 0; i < 4; ++i) {
            static const int rows[] = {1, 40, 64, 131};
            TEST(check_rowdot_places(&r, &staged.c, UPIPE_F32, rows[i]));
            TEST(check_rowdot_places(&r, &staged.c, UPIPE_BF16, rows[i]));
        }
        TEST(check_rope_heads(&r, &staged.c));
        TEST(check_wide(&r, &staged.c, 1, 1, 300001, PACKED));
        TEST(check_wide(&r, &staged.c, 5000, 2, 16, HEADS_INNER));
        TEST(check_wide(&r, &staged.c, 150, 1, 1032, ROWS_APART));
        TEST(check_row_statuses(&d.c));
        TEST(check_cuda_statuses(&d.c));
        staged_close();
    }
    device_close(&d);
    return test_end("test_cuda_rows");
}

/* test_attn.c -- the CPU attention kernels against dense attention in f64, and their vector lanes
 *
 * Tolerance runs (every head dim, lengths, offsets, causal or not, groups, types, layouts; extreme scores),
 * errors of long sums, bit equality over layouts and over calls, causal prefixes, accumulation, refusals. Other
 * masks, and the oracle itself: test_attn_masks.c.
 */
#define _POSIX_C_SOURCE 200809L
#include "lib/attn_units.h"

static void test_head_dims(void)
{
    test_rng r = {1};
    for (int d = UPIPE_HEAD_DIM_MIN; d <= UPIPE_HEAD_DIM_MAX; d += (BRIEF ? 3 : 1) * UPIPE_HEAD_DIM_STEP)
        for (int b = 0; b < 3; ++b) {
            const oracle_attn t = shape(37, 83, 2, 1, d, (b ^ (d / 8)) & 1, 50, 0);
            check_drawn(&t, here.types[b], d / 8 % ATTN_LAYOUTS, &r, 1);
        }
}

/* Edges of panels and blocks: 24 and 48 lanes, 64 keys, 144, 192, 288 and 384 rows. */
static void test_lengths(void)
{
    /* clang-format off */
    static const int64_t cases[][7] = { /* sq, sk, causal, q_pos, k_pos, query heads, key/value heads */
        {1, 1, 0, 0, 0, 1, 1}, {1, 1, 1, 0, 0, 1, 1}, {1, 1, 1, 0, 1, 1, 1}, {1, 200, 1, 199, 0, 1, 1},
        {200, 1, 0, 0, 0, 1, 1}, {0, 5, 0, 0, 0, 1, 1}, {5, 0, 0, 0, 0, 1, 1}, {0, 0, 1, 0, 0, 1, 1},
        {5, 0, 1, 0, 0, 1, 1}, {15, 63, 1, 48, 0, 1, 1}, {16, 64, 1, 48, 0, 1, 1}, {17, 65, 1, 48, 0, 1, 1},
        {64, 64, 1, 0, 0, 1, 1}, {65, 64, 1, 0, 0, 1, 1}, {127, 66, 1, 0, 61, 1, 1}, {128, 128, 1, 0, 0, 1, 1},
        {129, 130, 0, 0, 0, 1, 1}, {191, 67, 1, 7, 0, 1, 1}, {193, 195, 1, 2, 0, 1, 1},
        {200, 100, 1, 0, 0, 1, 1}, {200, 100, 1, 0, 90, 1, 1}, {100, 200, 1, 0, 0, 1, 1},
        {100, 200, 1, 500, 0, 1, 1}, {50, 70, 1, 0, 1000, 1, 1}, {23, 63, 1, 40, 0, 1, 1},
        {24, 64, 1, 40, 0, 1, 1}, {25, 65, 1, 40, 0, 1, 1}, {47, 60, 1, 13, 0, 1, 1}, {49, 62, 1, 13, 0, 1, 1},
        {144, 70, 1, 0, 0, 1, 1}, {145, 71, 1, 0, 74, 1, 1}, {288, 66, 1, 0, 230, 1, 1},
        {289, 90, 1, 0, 200, 1, 1}, {385, 61, 1, 0, 330, 1, 1}, {40, 90, 1, 1000000000000, 999999999970, 1, 1},
        {40, 90, 1, 0, 39, 1, 1}, {40, 90, 1, 0, 40, 1, 1},
    };
    /* clang-format on */
    check_lengths(cases, COUNT_OF(cases), 0);
}

static void test_extreme_scores(void)
{
    static const double sizes[] = {1, 30, 300};
    test_rng r = {3};
    for (int i = BRIEF ? 2 : 0; i < 3; ++i)
        for (int grow = 0; grow < 2; ++grow)
            for (int sees = 0; sees < 3; ++sees) {
                const oracle_attn t =
                    shape(150, sees == 2 ? 90 : 150, 2, 1, 64, sees > 0, 0, sees == 2 ? 60 : 0);
                check_extreme(&t, here.types[(i + grow + sees) % 3 == 2], &r, sizes[i], grow);
            }
}

static void test_random(long draws)
{
    static const draw_limits most = {7, 200, 0, 200, 3000000, 220};
    check_random(draws, &most, 0);
}

/* ---- long sums ---- */

static double l2_error(const float *got, const double *want, int64_t n)
{
    double error = 0, size = 0;
    for (int64_t i = 0; i < n; ++i) {
        error += ((double)got[i] - want[i]) * ((double)got[i] - want[i]);
        size += want[i] * want[i];
    }
    return sqrt(error / size);
}

/* A bound that does not grow with the depth, which sums of one chain break: a few queries over many keys for o,
 * lse and dq, and many queries over a few keys for dk and dv. */
static void test_depth(void)
{
    const int64_t many = BRIEF ? 1 << 14 : 1 << 17;
    static const char *const names[] = {"dk", "dv", "o", "dq", "lse"};
    const double bound = 16 * (double)FLT_EPSILON;
    for (int queries = 0; queries < 2; ++queries) {
        oracle_attn t = shape(queries ? many : 3, queries ? 4 : many, 1, 1, 32, 0, 0, 0);
        test_rng r = {12};
        values in = inputs_make(&t, UPIPE_F32, &r, 1), out = values_make(&t);
        double *q = doubles(in.q, q_count(&t)), *k = doubles(in.k, k_count(&t)),
               *v = doubles(in.v, v_count(&t)), *dout = doubles(in.dout, o_count(&t)),
               *o = doubles(NULL, o_count(&t)), *lse = doubles(NULL, t.sq), *dq = doubles(NULL, q_count(&t)),
               *dk = doubles(NULL, k_count(&t)), *dv = doubles(NULL, v_count(&t)), errors[5] = {0};
        run_kernels(&t, UPIPE_F32, PACKED, 1, &in, &out);
        f64_attn_fwd(&t, UPIPE_F32, q, k, v, o, lse);
        f64_attn_bwd(&t, UPIPE_F32, q, k, v, dout, o, lse, dq, dk, dv);
        if (queries) {
            errors[0] = l2_error(out.dk, dk, k_count(&t)), errors[1] = l2_error(out.dv, dv, v_count(&t));
        } else {
            errors[2] = l2_error(out.o, o, o_count(&t)), errors[3] = l2_error(out.dq, dq, q_count(&t));
            for (int64_t i = 0; i < t.sq; ++i) errors[4] = fmax(errors[4], fabs((double)out.lse[i] - lse[i]));
        }
        for (int64_t i = 0; i < 5; ++i)
            CHECK_SAY(errors[i] <= bound, "%s is off by %.1e", names[i], errors[i]);
        buffers_free(0);
    }
}

/* Rows some of which see keys on both sides of a section's border: against f64, and the bits of a row are the
 * same whatever rows are in the call with it. */
static void test_sections(void)
{
    static const int64_t windows[] = {40, 0, 300};
    static const int64_t cuts[] = {0, 20, 45, 70};
    test_rng r = {13};
    for (int i = 0; i < (BRIEF ? 1 : 3); ++i) {
        oracle_attn t = shape(70, UPI_ATTN_SECTION + 100, 1, 1, 40, 1, UPI_ATTN_SECTION - 30, 0);
        values in, out = values_make(&t);
        t.window = windows[i];
        in = inputs_make(&t, here.types[0], &r, 1);
        check_case(&t, here.types[0], GAPS, &in);
        run_kernels(&t, here.types[0], PACKED, t.h, &in, &out);
        for (int part = 0; part < 3; ++part) {
            oracle_attn rows = t;
            const int64_t at = cuts[part] * t.h * t.d;
            values some = in, got;
            rows.sq = cuts[part + 1] - cuts[part];
            rows.q_pos += cuts[part];
            some.q += at, some.dout += at;
            got = values_make(&rows);
            run_kernels(&rows, here.types[0], PACKED, rows.h, &some, &got);
            CHECK_BYTES(got.o, out.o + at, o_count(&rows) * 4);
            CHECK_BYTES(got.lse, out.lse + cuts[part] * t.h, rows.sq * t.h * 4);
            CHECK_BYTES(got.dq, out.dq + at, q_count(&rows) * 4);
        }
        buffers_free(0);
    }
}

/* ---- merging ---- */

static void test_merge(void)
{
    /* clang-format off */
    static const int64_t cases[][7] = { /* sq, causal, q_pos, then keys of up to three parts */
        {90, 0, 0, 70, 50, 0},   {90, 1, 30, 40, 40, 40}, {70, 1, 0, 64, 1, 64}, /* hidden late parts */
        {40, 1, -20, 30, 0, 30}, {200, 1, 0, 0, 0, 0},    {17, 0, 0, 0, 33, 0}, /* see nothing */
    };
    /* clang-format on */
    test_rng r = {10};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; ++i)
        for (int type = 0; type < 3; ++type) {
            const int64_t *x = cases[i];
            const upipe_dtype dtype = here.types[type > 0];
            oracle_attn t = shape(x[0], x[3] + x[4] + x[5], 2, 1, i % 2 ? 64 : 104, (int)x[1], x[2], 0);
            values in = inputs_make(&t, dtype, &r, 2);
            check_merge(&t, dtype, type > 1 ? UPIPE_BF16 : UPIPE_F32, (int)i % ATTN_LAYOUTS, 1, &in, x + 3,
                        3);
            buffers_free(0);
        }
}

/* ---- the same bits ---- */

static void test_same_bits(void)
{
    static const int dims[] = {64, 128, 104};
    test_rng r = {4};
    for (int i = 0; i < 3; ++i)
        for (int b = 0; b < 2; ++b) {
            const oracle_attn t = shape(211, 171, 4, 1, dims[i], b, 20, 60);
            check_same_bits(&t, here.types[b], &r, 1, test_brief() ? 2 * i + b : -1);
        }
}

/* Blocks smaller and larger than the work; a group of more heads than a block takes. */
static void test_workers(size_t count)
{
    const int cases[][5] = {/* sq, sk, h, hkv, causal */
                            {700, 700, 1, 1, 1},
                            {700, 650, 1, 1, 0},
                            {330, 200, 4, 2, 1},
                            {100, 90, 17, 1, 1},
                            {260, 500, 6, 1, 1},
                            {3, 9, 2, 2, 0},
                            {test_brief() ? 40 : 310, UPI_ATTN_SECTION + 70, 2, 1, 0}};
    test_rng r = {10};
    for (size_t i = 0; i < sizeof cases / sizeof *cases && i < count; ++i) {
        const int *x = cases[i];
        const upipe_dtype dtype = here.types[i % 3];
        const oracle_attn t =
            shape(x[0], x[1], x[2], x[3], i % 2 ? 64 : 40, x[4], i % 2 ? 30 : 0, i == 3 ? 60 : 0);
        const values in = inputs_make(&t, dtype, &r, 2);
        check_workers(&t, dtype, &in, 0);
        buffers_free(0);
    }
}

/* Two key/value heads in one call give what each gives alone. */
static void test_heads_alone(void)
{
    oracle_attn t = shape(77, 90, 4, 2, 80, 1, 20, 0), half = t;
    test_rng r = {5};
    values in = inputs_make(&t, here.types[0], &r, 1), out = values_make(&t);
    half.h = 2, half.hkv = 1;
    run_kernels(&t, here.types[0], PACKED, t.h, &in, &out);
    for (int part = 0; part < 2; ++part) {
        values x = values_make(&half), got = values_make(&half);
        for (int64_t i = 0; i < t.sq; ++i) {
            int64_t from = oracle_q_row(&t, i, 2 * part), to = oracle_q_row(&half, i, 0);
            memcpy(x.q + to, in.q + from, 2 * 80 * 4), memcpy(x.dout + to, in.dout + from, 2 * 80 * 4);
        }
        for (int64_t i = 0; i < t.sk; ++i) {
            int64_t from = oracle_k_row(&t, i, 2 * part), to = oracle_k_row(&half, i, 0);
            memcpy(x.k + to, in.k + from, 80 * 4), memcpy(x.v + to, in.v + from, 80 * 4);
        }
        run_kernels(&half, here.types[0], PACKED, half.h, &x, &got);
        for (int64_t i = 0; i < t.sq; ++i) {
            CHECK_BYTES(got.o + oracle_q_row(&half, i, 0), out.o + oracle_q_row(&t, i, 2 * part), 2 * 80 * 4);
            CHECK_BYTES(got.dq + oracle_q_row(&half, i, 0), out.dq + oracle_q_row(&t, i, 2 * part),
                        2 * 80 * 4);
        }
        for (int64_t i = 0; i < t.sk; ++i) {
            CHECK_BYTES(got.dk + oracle_k_row(&half, i, 0), out.dk + oracle_k_row(&t, i, 2 * part), 80 * 4);
            CHECK_BYTES(got.dv + oracle_k_row(&half, i, 0), out.dv + oracle_k_row(&t, i, 2 * part), 80 * 4);
        }
    }
    buffers_free(0);
}

/* dk and dv add to what is there. */
static void test_accumulate(void)
{
    oracle_attn t = shape(90, 70, 2, 1, 72, 1, 0, 10);
    test_rng r = {7};
    values in = inputs_make(&t, here.types[0], &r, 1), zero = values_make(&t), out = values_make(&t);
    int moved_k = 0, moved_v = 0;
    for (int64_t i = 0; i < k_count(&t); ++i) out.dk[i] = 100, out.dv[i] = -100;
    run_kernels(&t, here.types[0], GAPS, t.h, &in, &zero);
    run_kernels(&t, here.types[0], GAPS, t.h, &in, &out);
    for (int64_t i = 0; i < k_count(&t); ++i) {
        moved_k |= fabsf(zero.dk[i]) > 0.1f;
        moved_v |= fabsf(zero.dv[i]) > 0.1f;
    }
    CHECK(moved_k && moved_v);
    for (int64_t i = 0; i < k_count(&t); ++i) {
        CHECK_SAY(fabsf(out.dk[i] - 100 - zero.dk[i]) < 2e-3f, "dk %g after 100, %g after 0", out.dk[i],
                  zero.dk[i]);
        CHECK_SAY(fabsf(out.dv[i] + 100 - zero.dv[i]) < 2e-3f, "dv %g after -100, %g after 0", out.dv[i],
                  zero.dv[i]);
    }
    buffers_free(0);
}

static void test_one_key(void)
{
    static const int dims[] = {32, 40, 64, 80, 128, 200, 256};
    for (int k = 0; k < COUNT_OF(dims); ++k)
        for (int round = 0; round < 20; ++round) {
            const oracle_attn t = shape(1, 1, 1, 1, dims[k], round & 1, 0, 0);
            test_rng r = {(uint64_t)(round * 100 + dims[k])};
            check_one_key(&t, UPIPE_F32, &r, 1, 1);
        }
}

/* ---- the vocabulary of lanes ---- */

static void test_exp(void)
{
    static const float edge[8] = {-127.0f, -INFINITY, -1e30f, -126.5f, 0.0f, 60.0f, NAN, -1.0f};
    float x[8], y[8], z[8];
    double worst2 = 0, worst = 0;
    for (int i = 0; i < 20000; ++i) {
        for (int j = 0; j < 8; ++j) x[j] = -126.0f * (float)(i * 8 + j) / 160000.0f;
        upi_f8_store(y, upi_f8_exp2(upi_f8_load(x)));
        for (int j = 0; j < 8; ++j) worst2 = fmax(worst2, fabs(y[j] / exp2((double)x[j]) - 1));
        for (int j = 0; j < 8; ++j) x[j] *= 0.69f;
        upi_f8_store(z, upi_f8_exp(upi_f8_load(x)));
        for (int j = 0; j < 8; ++j)
            worst = fmax(worst, fabs(z[j] / exp((double)x[j]) - 1) / (2e-7 + 1e-7 * fabs((double)x[j])));
    }
    CHECK_SAY(worst2 <= 2.5e-7, "exp2 is off by %g", worst2);
    CHECK_SAY(worst <= 1, "exp is off by %g of what it promises", worst);
    upi_f8_store(y, upi_f8_exp2(upi_f8_load(edge)));
    CHECK(y[0] == 0 && y[1] == 0 && y[2] == 0 && y[3] >= 0 && y[3] < 1e-37f);
    CHECK(y[4] == 1 && y[5] == 0x1p60f && isnan(y[6]) && y[7] == 0.5f);
}

/* Every bf16 survives; in between, the nearest one, or the even one of two; NaN stays NaN. */
static void test_bf16(void)
{
    uint32_t b;
    for (b = 0; b < 0x10000; b += 8) {
        uint16_t in[8], out[8];
        float x[8];
        for (int j = 0; j < 8; ++j) in[j] = (uint16_t)(b + (uint32_t)j);
        upi_f8_store(x, upi_f8_load_bf16(in));
        upi_f8_store_bf16(out, upi_f8_load(x));
        for (int j = 0; j < 8; ++j) {
            float one = upipe_bf16_to_f32(in[j]);
            CHECK_BYTES(&one, &x[j], 4);
            if (isnan(x[j]))
                CHECK(isnan(upipe_bf16_to_f32(out[j])) && isnan(upipe_bf16_to_f32(upipe_f32_to_bf16(x[j]))));
            else
                CHECK(out[j] == in[j] && upipe_f32_to_bf16(x[j]) == in[j]);
        }
    }
    CHECK_INT(upipe_f32_to_bf16(1 + 0x1p-8f), 0x3f80);            /* a tie, down to the even one */
    CHECK_INT(upipe_f32_to_bf16(1 + 0x1p-7f + 0x1p-8f), 0x3f82);  /* a tie, up to the even one */
    CHECK_INT(upipe_f32_to_bf16(1 + 0x1p-8f + 0x1p-20f), 0x3f81); /* more than a tie */
    CHECK_INT(upipe_f32_to_bf16(3.4e38f), 0x7f80);
    for (b = 0; b < 4096; ++b) { /* lanes round as one element does, NaNs with low bits only included */
        uint32_t bits = b * 2654435761u;
        uint16_t out[8];
        float x;
        if (b % 16 == 0) bits = 0x7f800001u + b;
        memcpy(&x, &bits, 4);
        upi_f8_store_bf16(out, upi_f8_set1(x));
        CHECK_INT(out[b % 8], upipe_f32_to_bf16(x));
    }
}

static void test_simd_lanes_here(void)
{
    float x[64], y[64];
    upi_f8 r[8];
    for (int i = 0; i < 64; ++i) x[i] = (float)i;
    for (int i = 0; i < 8; ++i) r[i] = upi_f8_load(x + i * 8);
    CHECK(upi_f8_sum(r[1]) == 92);
    upi_f8_transpose(r);
    for (int i = 0; i < 8; ++i) upi_f8_store(y + i * 8, r[i]);
    for (int i = 0; i < 64; ++i) CHECK_INT(y[i], x[i % 8 * 8 + i / 8]);
    for (int i = -2; i < 10; ++i) {
        upi_f8_store(y, upi_f8_select(upi_lanes_above(i), upi_f8_set1(1), upi_f8_zero()));
        for (int j = 0; j < 8; ++j) CHECK_INT(y[j], j > i);
    }
}

/* ---- what is refused ---- */

static void test_refusals(void)
{
    static const int bad_dims[] = {24, 36, 264, 0, -8};
    size_t need_fwd, need_bwd;
    float *block = floats(8 * 4 * 64);
    upipe_attn_grad g;
    upipe_ctx *c = here.c;
    void *work;

    valid_call(&g, UPIPE_F32, block, NULL, 0);
    need_fwd = cpu_ops.attn_bytes(&cpu_ops, &g.a, 0);
    need_bwd = cpu_ops.attn_bytes(&cpu_ops, &g.a, 1);
    work = aligned_alloc(64, need_bwd);
    if (work == NULL) exit(2);

#define REFUSED(change, status, word)                                 \
    do {                                                              \
        valid_call(&g, UPIPE_F32, block, work, need_bwd);             \
        change;                                                       \
        CHECK_REFUSED(upipe_attn_fwd(c, &g.a), status, c->err, word); \
        CHECK_REFUSED(upipe_attn_bwd(c, &g), status, c->err, word);   \
    } while (0)
#define REFUSED_BWD(change, status, word)                           \
    do {                                                            \
        valid_call(&g, UPIPE_F32, block, work, need_bwd);           \
        change;                                                     \
        CHECK_REFUSED(upipe_attn_bwd(c, &g), status, c->err, word); \
    } while (0)

    valid_call(&g, UPIPE_F32, block, work, need_fwd);
    CHECK_STATUS(upipe_attn_fwd(c, &g.a), UPIPE_OK, c->err);
    g.a.work_bytes = need_fwd - 1;
    CHECK_REFUSED(upipe_attn_fwd(c, &g.a), UPIPE_ERR_ARG, c->err, "scratch");
    REFUSED_BWD(g.a.work_bytes = need_bwd - 1, UPIPE_ERR_ARG, "scratch");

    for (size_t i = 0; i < sizeof bad_dims / sizeof *bad_dims; ++i) {
        int d = bad_dims[i];
        REFUSED((g.a.q.d = d, g.a.k.d = d, g.a.v.d = d, g.a.o.d = d), UPIPE_ERR_UNSUPPORTED, "head dim");
    }
    REFUSED(g.a.scale = -1, UPIPE_ERR_ARG, "scale");
    REFUSED(g.a.scale = NAN, UPIPE_ERR_ARG, "scale");
    REFUSED(g.a.scale = INFINITY, UPIPE_ERR_ARG, "scale");
    REFUSED(g.a.q.dtype = (upipe_dtype)7, UPIPE_ERR_ARG, "data type 7");
    REFUSED(g.a.q_pos = INT64_MAX, UPIPE_ERR_OVERFLOW, "queries from");
    REFUSED(g.a.k_pos = INT64_MIN, UPIPE_ERR_OVERFLOW, "keys from");
    REFUSED(g.a.work = NULL, UPIPE_ERR_ARG, "0 bytes of scratch");
    REFUSED(g.a.q.h = 3, UPIPE_ERR_ARG, "heads");
    REFUSED(g.a.k.h = 0, UPIPE_ERR_ARG, "heads");
    REFUSED(g.a.q.n = -1, UPIPE_ERR_ARG, "queries");
    REFUSED(g.a.q.data = NULL, UPIPE_ERR_ARG, "q is NULL");
    REFUSED(g.a.k.d = 32, UPIPE_ERR_ARG, "k is");
    REFUSED(g.a.k.dtype = UPIPE_BF16, UPIPE_ERR_ARG, "k is bf16");
    REFUSED(g.a.v.n = 7, UPIPE_ERR_ARG, "v is");
    REFUSED(g.a.v.h = 1, UPIPE_ERR_ARG, "v is");
    REFUSED(g.a.lse.dtype = UPIPE_BF16, UPIPE_ERR_ARG, "lse is bf16");
    REFUSED(g.a.lse.d = 2, UPIPE_ERR_ARG, "lse is");
    valid_call(&g, UPIPE_F32, block, work, need_bwd);
    g.a.o.n = 9;
    CHECK_REFUSED(upipe_attn_fwd(c, &g.a), UPIPE_ERR_ARG, c->err, "o is");
    REFUSED_BWD(g.dout.n = 7, UPIPE_ERR_ARG, "dout is");
    REFUSED_BWD(g.dq.dtype = UPIPE_BF16, UPIPE_ERR_ARG, "dq is bf16");
    REFUSED_BWD(g.delta.h = 2, UPIPE_ERR_ARG, "delta is");
    REFUSED_BWD(g.dk.dtype = UPIPE_BF16, UPIPE_ERR_ARG, "dk is bf16");
    REFUSED_BWD(g.dv.data = NULL, UPIPE_ERR_ARG, "dv is NULL");
    valid_call(&g, UPIPE_F32, block, work, need_bwd);
    g.a.o.dtype = UPIPE_BF16, g.a.merge = 1;
    CHECK_REFUSED(upipe_attn_fwd(c, &g.a), UPIPE_ERR_ARG, c->err, "o is bf16");
#undef REFUSED
#undef REFUSED_BWD
    free(work);
    buffers_free(0);
}

/* A few hundred KiB. Nothing but the head dims decides, on one thread, and whether the keys fill more than a
 * section. */
static void test_scratch(void)
{
    const upipe_par par = {workers_backwards, NULL, 3};
    float block[1];
    upipe_attn_grad g;
    size_t fwd, bwd;
    upipe_ops ops = {0};
    valid_call(&g, UPIPE_F32, block, NULL, 0);
    g.a.q.d = g.a.v.d = 128;
    fwd = cpu_ops.attn_bytes(NULL, &g.a, 0);
    bwd = cpu_ops.attn_bytes(NULL, &g.a, 1);
    CHECK(fwd % 64 == 0 && fwd <= 400 * 1024 * (UPI_WIDE / 8));
    CHECK(bwd % 64 == 0 && bwd <= 600 * 1024 * (UPI_WIDE / 8));
    g.a.q.dtype = UPIPE_BF16;
    g.a.mask.causal = 1;
    g.a.q.n = 1 << 20, g.a.k.n = UPI_ATTN_SECTION;
    CHECK_INT(cpu_ops.attn_bytes(NULL, &g.a, 0), fwd);
    CHECK_INT(cpu_ops.attn_bytes(NULL, &g.a, 1), bwd);
    g.a.k.n = 1 << 20;
    fwd += (128 + 2) * UPI_ATTN_ROWS_FWD * sizeof(float);
    bwd += 128 * UPI_ATTN_ROWS_BWD * sizeof(float);
    CHECK_INT(cpu_ops.attn_bytes(NULL, &g.a, 0), fwd);
    CHECK_INT(cpu_ops.attn_bytes(NULL, &g.a, 1), bwd);
    ops.par = &par; /* each worker its own, and in the backward eight bytes a block of 64 keys and group */
    CHECK_INT(cpu_ops.attn_bytes(&ops, &g.a, 0), 3 * fwd);
    CHECK_INT(cpu_ops.attn_bytes(&ops, &g.a, 1), 3 * bwd + (1 << 20) / 64 * 2 * 8);
}

/* f32, which no unit takes, goes to the other kernels; the call that replaces the table's entries. */
static void test_unit_table(void)
{
    oracle_attn t = shape(50, 70, 2, 1, 40, 1, 20, 0);
    test_rng r = {14};
    upipe_ops ops, before;
    upipe_err err;
    const upi_bf16_unit *const unit = attn_unit;
    values in = inputs_make(&t, UPIPE_F32, &r, 1), got = values_make(&t), want = values_make(&t);
    run_kernels(&t, UPIPE_F32, PACKED, t.h, &in, &got);
    cpu_place();
    run_kernels(&t, UPIPE_F32, PACKED, t.h, &in, &want);
    unit_place(unit);
    check_same(&t, &got, &want);
    buffers_free(0);
    memset(&ops, 0, sizeof ops), memset(&err, 0, sizeof err);
    before = ops;
    if (upi_bf16_here() == NULL) {
        CHECK_REFUSED(upipe_cpu_attn_bf16(&ops, &err), UPIPE_ERR_UNSUPPORTED, err,
                      "attention in bf16 instructions: this processor has neither AMX nor AVX512-BF16");
        CHECK_BYTES(&ops, &before, sizeof ops);
        return;
    }
    CHECK_STATUS(upipe_cpu_attn_bf16(&ops, &err), UPIPE_OK, err);
    CHECK(ops.attn_bytes == upi_attn_bf16_bytes);
#if UPIPE_CPU_BF16_X86
    CHECK(ops.attn_fwd == (upi_bf16_here() == &upi_bf16_amx ? upi_attn_fwd_amx : upi_attn_fwd_avx512));
    CHECK(ops.attn_bwd == (upi_bf16_here() == &upi_bf16_amx ? upi_attn_bwd_amx : upi_attn_bwd_avx512));
#endif
}

static long all_draws(void)
{
    return (BRIEF ? 5 : 20) + test_draws_wanted() / 20;
}

static const int64_t longer[] = {1, 3, 40, 64, 129};

/* What kernels of any unit promise, on bf16. */
static void test_unit(int all)
{
    test_unit_table();
    test_lengths();
    test_merge();
    check_nan(64, 64);
    test_random(all ? all_draws() : 5);
    test_workers(all ? SIZE_MAX : 1);
    if (!all) return;
    test_head_dims();
    test_extreme_scores();
    test_sections();
    test_same_bits();
    test_heads_alone();
    check_prefix(longer, COUNT_OF(longer));
    test_accumulate();
}

int main(int argc, char **argv)
{
    if (attn_units(argc, argv, test_unit)) return test_end("attn bf16");
    test_begin(argc, argv);
    TEST(test_exp());
    TEST(test_bf16());
    TEST(test_simd_lanes_here());
    TEST(test_refusals());
    TEST(test_scratch());
    TEST(test_head_dims());
    TEST(test_lengths());
    TEST(check_pos_steps());
    TEST(test_extreme_scores());
    TEST(check_low_scores(64));
    TEST(test_depth());
    TEST(test_sections());
    TEST(test_merge());
    TEST(check_merge_nothing());
    TEST(test_same_bits());
    TEST(test_workers(SIZE_MAX));
    TEST(test_heads_alone());
    TEST(check_prefix(longer, COUNT_OF(longer)));
    TEST(test_accumulate());
    TEST(check_nan(64, 64));
    TEST(test_one_key());
    TEST(test_random(all_draws()));
    return test_end("attn");
}

/* test_attn_masks.c -- sliding windows, packed sequences, soft-caps, sinks, steps between positions, head
 * dims of v, and gradients of q that are added to, in the CPU attention kernels
 *
 * What a row sees, as the library says it in one run, against a question for every pair; finite differences
 * for the oracle; tolerance runs of every mask alone and of any of them together; parts of the keys against
 * all at once; the same bits on any threads; where NaNs show; refusals.
 */
#define _POSIX_C_SOURCE 200809L
#include "lib/attn_units.h"

/* ---- what a row sees ---- */

static void test_sight(void)
{
    test_rng r = {20};
    for (int round = 0; round < 4000; ++round) {
        int64_t cu_seqlens[MOST_CU_SEQLENS + 1], i, j, before_first = 0, before_end = 0;
        oracle_attn t = shape(1 + test_below(&r, 40), test_below(&r, 40), 1, 1, 32, test_below(&r, 2),
                              test_below(&r, 80) - 40, test_below(&r, 80) - 40);
        upipe_attn a = {0};
        t.pos_step = test_below(&r, 6); /* 0 = 1 */
        if (test_below(&r, 2)) t.window = 1 + test_below(&r, 60);
        if (test_below(&r, 2)) {
            t.cu_seqlens_n = draw_cu_seqlens(&r, cu_seqlens, -60, 160);
            t.cu_seqlens = cu_seqlens;
        }
        attn_set(&a, &t);
        a.q.n = t.sq;
        a.k.n = t.sk;
        for (i = 0; i < t.sq; ++i) {
            int64_t first, end, wrong = 0;
            upipe_attn_visible(&a, i, &first, &end);
            CHECK(0 <= first && first <= end && end <= t.sk && first >= before_first && end >= before_end);
            for (j = 0; j < t.sk; ++j) wrong += oracle_visible(&t, i, j) != (first <= j && j < end);
            if (!CHECK_SAY(wrong == 0, "round %d: row %d sees [%lld, %lld)", round, (int)i, (long long)first,
                           (long long)end))
                say_case(&t, UPIPE_F32, PACKED);
            before_first = first;
            before_end = end;
        }
    }
}

/* ---- the oracle itself ---- */

static double loss(const oracle_attn *t, const double *q, const double *k, const double *v,
                   const double *dout)
{
    const int mark = buffers_n;
    int64_t n = o_count(t), i;
    double *o = doubles(NULL, n), *lse = doubles(NULL, t->sq * t->h), sum = 0;
    f64_attn_fwd(t, UPIPE_F32, q, k, v, o, lse);
    for (i = 0; i < n; ++i) sum += o[i] * dout[i];
    buffers_free(mark);
    return sum;
}

static void check_slope(const oracle_attn *t, double *x, int64_t n, const double *grad, const answers *a,
                        const char *name)
{
    const double step = 1e-5;
    double worst = 0;
    for (int64_t i = 0; i < n; ++i) {
        double at = x[i], up, down;
        x[i] = at + step;
        up = loss(t, a->q, a->k, a->v, a->dout);
        x[i] = at - step;
        down = loss(t, a->q, a->k, a->v, a->dout);
        x[i] = at;
        worst = fmax(worst, fabs((up - down) / (2 * step) - grad[i]));
    }
    CHECK_SAY(worst <= 1e-7, "%s: finite differences are off by %g", name, worst);
}

/* A sink is an f32: a step that such a number holds. */
static void check_sinks_slope(const oracle_attn *t, float *sinks, const answers *a)
{
    const float step = 0x1p-12f;
    double worst = 0;
    for (int x = 0; x < t->h; ++x) {
        float at = sinks[x];
        double up, down;
        sinks[x] = at + step;
        up = loss(t, a->q, a->k, a->v, a->dout);
        sinks[x] = at - step;
        down = loss(t, a->q, a->k, a->v, a->dout);
        sinks[x] = at;
        worst = fmax(worst, fabs((up - down) / (2 * (double)step) - a->dsinks[x]));
    }
    CHECK_SAY(worst <= 1e-6, "dsinks: finite differences are off by %g", worst);
}

static void test_oracle(void)
{
    static const int64_t cu_seqlens[] = {1, 4, 4, 9, 30};
    float sinks[] = {0.5f, -1.25f};
    for (int kind = 0; kind < 64; ++kind) {
        oracle_attn t = shape(5, 7, 2, 1, 6, kind & 1, 1, 2); /* causal: row 0 sees nothing */
        test_rng r = {9};
        values in;
        answers x;
        if (kind & 2) t.window = 3;
        if (kind & 4) t.cu_seqlens = cu_seqlens, t.cu_seqlens_n = 4;
        if (kind & 8) t.softcap = 1.5;
        if (kind & 16) t.sinks = sinks;
        if (kind & 32) t.v_dim = 3, t.pos_step = 2;
        in = inputs_make(&t, UPIPE_F32, &r, 1);
        x = answers_make(&t, UPIPE_F32, UPIPE_F32, &in, 2);
        if (kind < 2) CHECK((x.lse[0] == -(double)INFINITY) == kind);
        check_slope(&t, x.q, q_count(&t), x.dq, &x, "dq");
        check_slope(&t, x.k, k_count(&t), x.dk, &x, "dk");
        check_slope(&t, x.v, v_count(&t), x.dv, &x, "dv");
        if (t.sinks != NULL) check_sinks_slope(&t, sinks, &x);
        buffers_free(0);
    }
}

/* ---- the masks ---- */

static void test_alone(void)
{
    for (int variant = 0; variant < 3; ++variant)
        check_alone(here.types[variant], variant == 1 ? 64 : 40, variant < 2, 1, variant == 2 ? 30 : 0);
}

static void test_random(long draws)
{
    static const draw_limits most = {8, 250, 0, 300, 800000, 220};
    check_random(draws, &most, 1);
}

/* Any number of threads, tasks in any order, and a group's heads in several calls: gates where blocks of
 * queries see few blocks of keys. */
static void test_workers(void)
{
    static const int64_t cu_seqlens[] = {-5, 100, 100, 101, 390, 640, 650, 1200};
    static const float sinks[] = {0.5f, -2, 3, 1, -1, 0};
    test_rng r = {23};
    for (int kind = 0; kind < 8; ++kind) {
        const upipe_dtype dtype = here.types[kind % 3];
        oracle_attn t = shape(700 - 130 * (kind % 3), 760 - 110 * (kind & 1), kind < 4 ? 2 : 6,
                              1 + (kind == 5), 40, kind != 3, 20, 0);
        values in;
        if (kind & 1) t.window = 30 + 50 * kind;
        if (kind & 2) t.cu_seqlens = cu_seqlens, t.cu_seqlens_n = 7;
        if (kind & 4) t.sinks = sinks, t.softcap = 8;
        if (kind == 6) t.pos_step = 3, t.k_pos = 50;
        in = inputs_make(&t, dtype, &r, 2);
        check_workers(&t, dtype, &in, kind & 4 ? 4.0f : 0);
        buffers_free(0);
    }
}

static void test_one_key(void)
{
    test_rng r = {25};
    for (int round = 0; round < 20; ++round) {
        oracle_attn t = shape(90, 90, 1, 1, 64, 1, 0, 0);
        t.window = 1;
        t.softcap = round % 2 ? 3 : 0;
        check_one_key(&t, UPIPE_F32, &r, 3, 1);
    }
}

static void test_saturated(void)
{
    for (int i = 0; i < 3; ++i) check_saturated(here.types[i], i == 1 ? 40 : 64);
}

/* ---- what is left out ---- */

/* So the work is that of the mask, whatever the length; and a NaN shows where it is seen, and nowhere else. */
static void test_reach(void)
{
    const nan_reach exact = {1, 1, 1, 1};
    check_nan_reach(&exact, attn_unit != NULL ? 2 : 6);
    check_nan_apart(1, 1);
}

static void test_far_keys(void)
{
    oracle_attn t = shape(200, 4000, 2, 1, 64, 1, 2000, 0);
    t.window = 100;
    check_far_keys(&t, 2000 - 99, 2200);
}

/* ---- what is refused ---- */

static long all_draws(void)
{
    return 100 + test_draws_wanted() / 10;
}

/* As in test_attn.c. */
static void test_unit(int all)
{
    test_reach();
    test_far_keys();
    test_random(all ? all_draws() : 10);
    if (!all) return;
    test_alone();
    test_saturated();
    check_parts(1, 40, 1);
    test_workers();
    check_wide_masks();
}

static void test_refusals(void)
{
    static const char *const names[] = {"window", "packed sequences", "soft-cap",
                                        "sinks",  "head dim",         "gradient of q"};
    static const int64_t good[] = {0, 8, 9}, descending[] = {0, 8, 7}, far[] = {0, INT64_MAX};
    float *block = floats(8 * 4 * 64), sinks[4] = {0, 0, 0, 0};
    upipe_attn_grad g;
    upipe_ctx *c = here.c;
    size_t need;
    void *work;

    valid_call(&g, UPIPE_F32, block, NULL, 0);
    need = cpu_ops.attn_bytes(&cpu_ops, &g.a, 1);
    work = aligned_alloc(64, need);
    if (work == NULL) exit(2);
    for (int bit = 0; bit < 6; ++bit)
        for (int can = 0; can < 2; ++can)
            for (int backward = 0; backward < 2; ++backward) {
                valid_call(&g, UPIPE_F32, block, work, need);
                cpu_ops.attn_can = can << bit;
                if (bit == 0) g.a.mask.window = 4;
                if (bit == 1) g.a.mask.borders.cu_seqlens = good, g.a.mask.borders.cu_seqlens_n = 2;
                if (bit == 2) g.a.mask.softcap = 30;
                if (bit == 3) g.a.mask.sinks = sinks;
                if (bit == 4) g.a.v.d = g.a.o.d = g.dout.d = g.dv.d = 32;
                if (bit == 5) g.a.merge = 1;
                CHECK_STATUS(backward ? upipe_attn_bwd(c, &g) : upipe_attn_fwd(c, &g.a),
                             can || (bit == 5 && !backward) ? UPIPE_OK : UPIPE_ERR_UNSUPPORTED, c->err);
                if (can || (bit == 5 && !backward)) continue;
                CHECK_TEXT(c->err.text, "this table");
                CHECK_TEXT(c->err.text, names[bit]);
            }
    cpu_place();
#define REFUSED(change, word)                                                \
    do {                                                                     \
        valid_call(&g, UPIPE_F32, block, work, need);                        \
        change;                                                              \
        CHECK_REFUSED(upipe_attn_fwd(c, &g.a), UPIPE_ERR_ARG, c->err, word); \
        CHECK_REFUSED(upipe_attn_bwd(c, &g), UPIPE_ERR_ARG, c->err, word);   \
    } while (0)
    REFUSED(g.a.mask.window = -1, "a window of -1");
    REFUSED(g.a.mask.window = INT64_MAX, "window");
    REFUSED(g.a.pos_step = -1, "-1 positions between rows");
    REFUSED(g.a.pos_step = UPIPE_POS_STEP_MAX + 1, "positions between rows");
    REFUSED(g.a.mask.softcap = -1, "soft-cap");
    REFUSED(g.a.mask.softcap = NAN, "soft-cap");
    REFUSED(g.a.mask.softcap = INFINITY, "soft-cap");
    /* f32 has no scale / softcap, or no softcap * log2(e): scores would be 0 * inf */
    REFUSED((g.a.mask.softcap = 3e38f, g.a.scale = 1e-8f), "out of all proportion to scale 1e-08");
    REFUSED((g.a.mask.softcap = 3e38f, g.a.scale = 10), "out of all proportion");
    REFUSED((g.a.mask.softcap = 1e30f, g.a.scale = 1e-12f), "out of all proportion");
    REFUSED((g.a.mask.softcap = 1e-39f, g.a.scale = 1), "out of all proportion");
    REFUSED((g.a.mask.softcap = 1e-20f, g.a.scale = 1e30f), "out of all proportion");
    REFUSED(g.a.mask.borders.cu_seqlens_n = 1, "1 packed documents, cu_seqlens is NULL");
    REFUSED(g.a.mask.borders.cu_seqlens = good, "0 packed documents, cu_seqlens is not NULL");
    REFUSED((g.a.mask.borders.cu_seqlens = good, g.a.mask.borders.cu_seqlens_n = -1), "-1 packed documents");
    REFUSED((g.a.mask.borders.cu_seqlens = descending, g.a.mask.borders.cu_seqlens_n = 2),
            "packed document 1 is [8, 7)");
    REFUSED((g.a.mask.borders.cu_seqlens = far, g.a.mask.borders.cu_seqlens_n = 1), "packed document 0");
#undef REFUSED
    valid_call(&g, UPIPE_F32, block, work, need);
    g.dsinks = sinks;
    CHECK_REFUSED(upipe_attn_bwd(c, &g), UPIPE_ERR_ARG, c->err, "sinks without sinks");
    valid_call(&g, UPIPE_F32, block, work, need);
    g.a.merge = 1;
    g.dq.dtype = UPIPE_BF16;
    CHECK_REFUSED(upipe_attn_bwd(c, &g), UPIPE_ERR_ARG, c->err, "dq is bf16");
    free(work);
    buffers_free(0);
}

int main(int argc, char **argv)
{
    if (attn_units(argc, argv, test_unit)) return test_end("attn_masks bf16");
    test_begin(argc, argv);
    TEST(test_sight());
    TEST(test_oracle());
    TEST(test_refusals());
    TEST(test_alone());
    TEST(test_saturated());
    TEST(check_parts(1, 40, 1));
    TEST(test_workers());
    TEST(check_wide_masks());
    TEST(test_one_key());
    TEST(test_reach());
    TEST(test_far_keys());
    TEST(test_random(all_draws()));
    return test_end("attn_masks");
}

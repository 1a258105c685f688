/* test_attn_masks.c -- sliding windows, packed sequences, soft-caps, sinks, steps between positions, head
 * dims of v, and gradients of q that are added to, in the CPU attention kernels
 *
 * What a row sees, as the library says it in one run, against a question for every pair; finite differences
 * for the oracle; tolerance runs of every mask alone and of any of them together; parts of the keys against
 * all at once; the same bits on any threads; where NaNs show; refusals.
 */
#define _POSIX_C_SOURCE 200809L
#include "lib/attn.h"

enum { MOST_CU_SEQLENS = 12 };

/* ---- what a row sees ---- */

/* Ascending positions in [low, high], some of them equal; returns the number of packed sequences. */
static int64_t draw_cu_seqlens(test_rng *r, int64_t *cu_seqlens, int64_t low, int64_t high)
{
    int64_t n = 1 + test_below(r, MOST_CU_SEQLENS), i, j;
    for (i = 0; i <= n; ++i) {
        int64_t x = low + test_below(r, (int)(high - low + 1));
        if (i > 0 && test_below(r, 4) == 0) x = cu_seqlens[i - 1];
        for (j = i; j > 0 && cu_seqlens[j - 1] > x; --j) cu_seqlens[j] = cu_seqlens[j - 1];
        cu_seqlens[j] = x;
    }
    return n;
}

static void test_sight(void)
{
    test_rng r = {20};
    int round;
    for (round = 0; round < 4000; ++round) {
        int64_t cu_seqlens[MOST_CU_SEQLENS + 1], i, j, before_first = 0, before_end = 0;
        oracle_attn t = shape(1 + test_below(&r, 40), test_below(&r, 40), 1, 1, 32, test_below(&r, 2),
                              test_below(&r, 80) - 40, test_below(&r, 80) - 40);
        upipe_attn a;
        t.pos_step = test_below(&r, 6); /* 0 = 1 */
        if (test_below(&r, 2)) t.window = 1 + test_below(&r, 60);
        if (test_below(&r, 2)) {
            t.cu_seqlens_n = draw_cu_seqlens(&r, cu_seqlens, -60, 160);
            t.cu_seqlens = cu_seqlens;
        }
        memset(&a, 0, sizeof a);
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
    int64_t n = o_count(t), i;
    double *o = doubles(NULL, n), *lse = doubles(NULL, t->sq * t->h), sum = 0;
    oracle_attn_fwd(t, q, k, v, o, lse);
    for (i = 0; i < n; ++i) sum += o[i] * dout[i];
    free(o), free(lse);
    return sum;
}

static void check_slope(const oracle_attn *t, double *x, int64_t n, const double *grad, const answers *a,
                        const char *name)
{
    const double step = 1e-5;
    double worst = 0;
    int64_t i;
    for (i = 0; i < n; ++i) {
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
    int x;
    for (x = 0; x < t->h; ++x) {
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
    int kind;
    for (kind = 0; kind < 64; ++kind) {
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
        x = answers_make(&t, UPIPE_F32, &in);
        if (kind < 2) CHECK((x.lse[0] == -(double)INFINITY) == kind);
        check_slope(&t, x.q, q_count(&t), x.dq, &x, "dq");
        check_slope(&t, x.k, k_count(&t), x.dk, &x, "dk");
        check_slope(&t, x.v, v_count(&t), x.dv, &x, "dv");
        if (t.sinks != NULL) check_sinks_slope(&t, sinks, &x);
        answers_free(&x);
        values_free(&in);
    }
}

/* ---- against the oracle ---- */

/* Each mask alone, at the edges of tiles, panels and blocks, and where rows see nothing. */
static void test_alone(void)
{
    static const int64_t windows[] = {1, 2, 7, 9, 48, 64, 65, 100, 1000};
    static const int64_t packed[] = {0, 48, 48, 49, 64, 73, 130, 130, 150};
    static const int64_t straddling[] = {-50, -3, 70, 110, 1000};
    static const int64_t inside[] = {20, 30, 30, 90};
    static const int64_t elsewhere[] = {-90, -20, 0};
    static const struct {
        const int64_t *cu_seqlens;
        int64_t n;
    } cu_seqlens[] = {{packed, 8}, {straddling, 4}, {inside, 3}, {elsewhere, 2}};
    static const double caps[] = {0.3, 2, 50, 1e6};
    static const float sinks[][2] = {{0, 1}, {-30, 30}, {200, -200}, {-INFINITY, 3}};
    static const int dims[][2] = {{32, 64}, {64, 32}, {192, 128}, {40, 72}, {128, 256}, {72, 40}};
    test_rng r = {21};
    size_t i;
    int variant;
    for (variant = 0; variant < 3; ++variant) {
        upipe_dtype dtype = types[variant];
        oracle_attn plain = shape(150, 150, 2, 1, variant == 1 ? 64 : 40, variant < 2, 0, 0), t;
        values in;
#define RUN(change)                                   \
    do {                                              \
        t = plain;                                    \
        change;                                       \
        in = inputs_make(&t, dtype, &r, 1.5);         \
        check_case(&t, dtype, (int)i % LAYOUTS, &in); \
        values_free(&in);                             \
    } while (0)
        for (i = 0; i < sizeof windows / sizeof *windows; ++i)
            RUN((t.window = windows[i], t.q_pos = i % 3 == 2 ? 90 : 0));
        for (i = 0; i < sizeof cu_seqlens / sizeof *cu_seqlens; ++i)
            RUN((t.cu_seqlens = cu_seqlens[i].cu_seqlens, t.cu_seqlens_n = cu_seqlens[i].n,
                 t.k_pos = variant == 2 ? 30 : 0));
        for (i = 0; i < sizeof caps / sizeof *caps; ++i) RUN((t.softcap = (double)(float)caps[i]));
        for (i = 0; i < sizeof sinks / sizeof *sinks; ++i)
            RUN((t.sinks = sinks[i], t.k_pos = i % 2 ? 90 : 0));
        for (i = 0; i < sizeof dims / sizeof *dims; ++i) RUN((t.d = dims[i][0], t.v_dim = dims[i][1]));
        for (i = 2; i < 6; ++i) RUN((t.pos_step = (int64_t)i, t.q_pos = 3, t.window = i == 4 ? 90 : 0));
#undef RUN
    }
}

/* Masks of a draw; cu_seqlens and sinks have space for MOST_CU_SEQLENS + 1 and for all heads. */
static void draw_masks(test_rng *r, oracle_attn *t, int64_t *cu_seqlens, float *sinks)
{
    const int mask = test_below(r, 64);
    int x;
    t->causal = test_below(r, 4) > 0;
    if (mask & 1) t->window = 1 + test_below(r, test_below(r, 2) ? 20 : 300);
    if (mask & 2) {
        t->cu_seqlens_n = draw_cu_seqlens(r, cu_seqlens, -20, (int)(t->q_pos + t->sq + 40));
        t->cu_seqlens = cu_seqlens;
    }
    if (mask & 4) t->softcap = (double)(float)(0.5 + test_below(r, 60));
    for (x = 0; x < t->h && mask & 8; ++x) sinks[x] = (float)(2 * test_normal(r));
    if (mask & 8) t->sinks = sinks;
    if (mask & 16) t->v_dim = 32 + 8 * test_below(r, 29);
    if (mask & 32) t->pos_step = 1 + test_below(r, 5);
}

static void test_random(long draws)
{
    static const int groups[][2] = {{1, 1}, {2, 2}, {2, 1}, {4, 2}, {3, 1}, {6, 2}, {13, 1}};
    long seed = test_env("UPIPE_SEED", 1), i;
    for (i = 0; i < draws; ++i) {
        test_rng r = {(uint64_t)(seed + i) * 7919};
        const int *g = groups[test_below(&r, 7)];
        upipe_dtype dtype = types[test_below(&r, 3)];
        int layout = test_below(&r, LAYOUTS), d = 32 + 8 * test_below(&r, test_below(&r, 4) ? 9 : 29);
        int64_t cu_seqlens[MOST_CU_SEQLENS + 1], most = 800000 / (g[0] * d), sq = 1 + test_below(&r, 250);
        int64_t sk = 1 + test_below(&r, (int)(most / sq < 300 ? most / sq : 300));
        oracle_attn t = shape(sq, sk, g[0], g[1], d, 0, test_below(&r, 220), test_below(&r, 220));
        long failed = test_failures;
        float sinks[13];
        values in;
        draw_masks(&r, &t, cu_seqlens, sinks);
        in = inputs_make(&t, dtype, &r, 1);
        check_case(&t, dtype, layout, &in);
        values_free(&in);
        if (test_failures != failed) fprintf(stderr, "  replay: UPIPE_SEED=%ld UPIPE_DRAWS=1\n", seed + i);
    }
}

/* ---- keys in parts ---- */

/* The backward of the keys in parts, with o and lse of all of them: dq is added to. */
static void check_merge_bwd(const oracle_attn *t, upipe_dtype dtype, int layout, const values *in,
                            const int64_t *lengths, int parts)
{
    values all = values_make(t), got = values_make(t);
    answers x = answers_make(t, dtype, in);
    upipe_attn_grad g;
    upipe_ops ops;
    upipe_ctx c;
    int64_t first = 0;
    int p, way;

    run_kernels(t, dtype, layout, t->h, in, &all);
    attn_ops(&c, &ops);
    memset(&g, 0, sizeof g);
    g.a.q = tensor_make(dtype, t->sq, t->h, t->d, layout, in->q);
    g.a.lse = tensor_make(UPIPE_F32, t->sq, t->h, 1, layout, all.lse);
    g.dout = tensor_make(dtype, t->sq, t->h, oracle_v_dim(t), layout, in->dout);
    g.a.o = tensor_make(dtype, t->sq, t->h, oracle_v_dim(t), layout, all.o);
    g.delta = tensor_make(UPIPE_F32, t->sq, t->h, 1, layout, NULL);
    g.dq = tensor_make(UPIPE_F32, t->sq, t->h, t->d, layout, got.dq);
    CHECK_STATUS(upi_cpu_rowdot(&c, g.delta, g.dout, g.a.o), UPIPE_OK, c.err);
    for (p = 0; p < parts; first += lengths[p++]) {
        oracle_attn piece = piece_of(t, first, lengths[p]);
        int64_t at = first * t->hkv * t->d, v_at = first * t->hkv * oracle_v_dim(t);
        attn_set(&g.a, &piece);
        g.a.merge = 1;
        g.dsinks = piece.sinks != NULL ? got.dsinks : NULL;
        g.a.k = tensor_make(dtype, lengths[p], t->hkv, t->d, layout, in->k + at);
        g.a.v = tensor_make(dtype, lengths[p], t->hkv, oracle_v_dim(t), layout, in->v + v_at);
        g.dk = tensor_make(UPIPE_F32, lengths[p], t->hkv, t->d, layout, got.dk + at);
        g.dv = tensor_make(UPIPE_F32, lengths[p], t->hkv, oracle_v_dim(t), layout, got.dv + v_at);
        attn_scratch(&g.a, &ops, 1);
        CHECK_STATUS(upipe_attn_bwd(&c, &g), UPIPE_OK, c.err);
        free(g.a.work);
        tensor_read(g.a.k, NULL), tensor_read(g.a.v, NULL);
        tensor_read(g.dk, got.dk + at), tensor_read(g.dv, got.dv + v_at);
    }
    CHECK_INT(first, t->sk);
    tensor_read(g.a.q, NULL), tensor_read(g.a.lse, NULL), tensor_read(g.dout, NULL), tensor_read(g.a.o, NULL);
    tensor_read(g.delta, NULL), tensor_read(g.dq, got.dq);
    /* o and lse were not computed here, and dq is not rounded to the storage type */
    memcpy(got.o, all.o, (size_t)o_count(t) * 4), memcpy(got.lse, all.lse, (size_t)(t->sq * t->h) * 4);
    for (way = 0; way < NAIVE_WAYS; ++way) {
        oracle_attn plain = *t;
        values *n = &x.naive[way];
        plain.naive = naive_way(way);
        naive_attn_bwd(&plain, UPIPE_F32, in->q, in->k, in->v, in->dout, n->o, n->lse, n->dq, n->dk, n->dv);
    }
    CHECK_BYTES(got.dsinks, all.dsinks, t->h * 4);
    check_answers(t, &got, &x);
    values_free(&all), values_free(&got);
    answers_free(&x);
}

static void test_parts(void)
{
    static const int64_t lengths[][3] = {{70, 50, 80}, {64, 128, 8}, {1, 0, 199}, {150, 49, 1}};
    static const int64_t cu_seqlens[] = {0, 30, 75, 75, 130, 190};
    static const float sinks[] = {0.5f, -2, 3, 1};
    test_rng r = {22};
    int kind;
    for (kind = 0; kind < 32; ++kind) {
        upipe_dtype dtype = types[kind % 3];
        oracle_attn t = shape(120, 200, 4, 2, kind % 2 ? 64 : 40, kind & 1, 60, 0);
        values in;
        if (kind & 2) t.window = 45;
        if (kind & 4) t.cu_seqlens = cu_seqlens, t.cu_seqlens_n = 5;
        if (kind & 8) t.sinks = sinks;
        if (kind & 16) t.softcap = 4, t.v_dim = 48, t.pos_step = 1 + kind % 3;
        in = inputs_make(&t, dtype, &r, 1);
        check_merge(&t, dtype, kind % 2 ? dtype : UPIPE_F32, kind % LAYOUTS, &in, lengths[kind / 2 % 4], 3);
        check_merge_bwd(&t, dtype, kind % LAYOUTS, &in, lengths[kind / 2 % 4], 3);
        values_free(&in);
    }
}

/* ---- the same bits ---- */

/* Any number of threads, tasks in any order, and a group's heads in several calls: gates where blocks of
 * queries see few blocks of keys. */
static void test_workers(void)
{
    static const int64_t cu_seqlens[] = {-5, 100, 100, 101, 390, 640, 650, 1200};
    static const float sinks[] = {0.5f, -2, 3, 1, -1, 0};
    test_rng r = {23};
    int kind;
    for (kind = 0; kind < 8; ++kind) {
        upipe_dtype dtype = types[kind % 3];
        oracle_attn t = shape(700 - 130 * (kind % 3), 760 - 110 * (kind & 1), kind < 4 ? 2 : 6,
                              1 + (kind == 5), 40, kind != 3, 20, 0);
        values in, one = values_make(&t), got;
        int workers;
        if (kind & 1) t.window = 30 + 50 * kind;
        if (kind & 2) t.cu_seqlens = cu_seqlens, t.cu_seqlens_n = 7;
        if (kind & 4) t.sinks = sinks, t.softcap = 8, one.dsinks[0] = 4;
        if (kind == 6) t.pos_step = 3, t.k_pos = 50;
        in = inputs_make(&t, dtype, &r, 2);
        run_kernels(&t, dtype, PACKED, t.h, &in, &one);
        for (workers = 0; workers < WORKERS_KINDS; ++workers) {
            host_threads w;
            got = values_make(&t);
            got.dsinks[0] = kind & 4 ? 4.0f : 0;
            workers_begin(&w, workers);
            threads = &w.par;
            run_kernels(&t, dtype, workers % LAYOUTS, t.h, &in, &got);
            threads = NULL;
            workers_end(&w);
            check_same(&t, &one, &got);
            values_free(&got);
        }
        got = values_make(&t);
        got.dsinks[0] = kind & 4 ? 4.0f : 0;
        run_kernels(&t, dtype, PACKED, 1, &in, &got);
        check_same(&t, &one, &got);
        values_free(&got);
        values_free(&in), values_free(&one);
    }
}

/* Masks that hide nothing change no bit. */
static void test_wide_masks(void)
{
    static const int64_t cu_seqlens[] = {-10, 5000};
    static const float sinks[] = {-INFINITY, -INFINITY};
    oracle_attn t = shape(211, 171, 2, 1, 64, 1, 20, 60), wide = t;
    test_rng r = {24};
    values in = inputs_make(&t, types[0], &r, 1), a = values_make(&t), b = values_make(&t);
    wide.window = INT64_C(1) << 60;
    wide.cu_seqlens = cu_seqlens, wide.cu_seqlens_n = 1;
    wide.sinks = sinks;
    wide.pos_step = 1;
    run_kernels(&t, types[0], PACKED, t.h, &in, &a);
    run_kernels(&wide, types[0], PACKED, t.h, &in, &b);
    check_same(&t, &a, &b);
    values_free(&in), values_free(&a), values_free(&b);
}

/* A query that sees one key: o is v, dv is dO, dq and dk are 0, bit for bit, also through a soft-cap. */
static void test_one_key(void)
{
    test_rng r = {25};
    int round;
    for (round = 0; round < 20; ++round) {
        oracle_attn t = shape(90, 90, 1, 1, 64, 1, 0, 0);
        values in = inputs_make(&t, UPIPE_F32, &r, 3), out = values_make(&t);
        int64_t i;
        t.window = 1;
        t.softcap = round % 2 ? 3 : 0;
        run_kernels(&t, UPIPE_F32, PACKED, 1, &in, &out);
        CHECK_BYTES(out.o, in.v, v_count(&t) * 4);
        CHECK_BYTES(out.dv, in.dout, v_count(&t) * 4);
        for (i = 0; i < q_count(&t); ++i) CHECK(out.dq[i] == 0 && out.dk[i] == 0);
        values_free(&in), values_free(&out);
    }
}

/* ---- what is left out ---- */

/* A key that is NaN shows only in rows near those that see it: what a panel doesn't see, but for the tile at
 * the end of it, is not read. So the work is that of the window, whatever the length. */
static void test_reach(void)
{
    /* a unit takes whole steps of keys */
    const int near = (int)UPI_ATTN_PANEL + (attn_unit != NULL ? (int)UPI_BF16_STEP : (int)UPI_ATTN_TILE);
    static const int64_t cu_seqlens[] = {0, 300, 500, 900};
    int kind;
    for (kind = 0; kind < 4; ++kind) {
        oracle_attn t = shape(900, 900, 1, 1, 64, kind != 1, 0, 0);
        const int64_t bad = 450,
                      low = kind == 2   ? 300
                            : kind == 1 ? 0
                                        : bad,
                      high = kind == 2 ? 499 : bad + 19;
        test_rng r = {26};
        values in = inputs_make(&t, types[0], &r, 1), out = values_make(&t);
        int64_t i;
        int c, seen = 0;
        if (kind == 2)
            t.cu_seqlens = cu_seqlens, t.cu_seqlens_n = 3;
        else
            t.window = 20;
        t.softcap = kind == 3 ? 5 : 0;
        for (c = 0; c < 64; ++c) in.k[bad * 64 + c] = in.v[bad * 64 + c] = NAN;
        run_kernels(&t, types[0], PACKED, 1, &in, &out);
        for (i = 0; i < t.sq * 64; ++i) {
            int64_t row = i / 64;
            int spoilt = isnan(out.o[i]) || isnan(out.dq[i]);
            if (oracle_visible(&t, row, bad)) CHECK(spoilt);
            CHECK_SAY(!spoilt || (row > low - near && row < high + near), "kind %d: row %d has seen key %d",
                      kind, (int)row, (int)bad);
            seen |= spoilt;
        }
        CHECK(seen);
        values_free(&in), values_free(&out);
    }
}

/* Queries in the middle of a long row of keys: those that none of them sees may be anything, and get no
 * gradient. */
static void test_far_keys(void)
{
    oracle_attn t = shape(200, 4000, 2, 1, 64, 1, 2000, 0);
    test_rng r = {27};
    values in = inputs_make(&t, types[0], &r, 1), out = values_make(&t);
    const int64_t first = attn_unit != NULL ? 2000 - 99 : (2000 - 99) / UPI_ATTN_TILE * UPI_ATTN_TILE,
                  end = 2200;
    int64_t i, wrong = 0;
    t.window = 100;
    for (i = 0; i < k_count(&t); ++i) {
        out.dk[i] = out.dv[i] = 7;
        if (i / 64 < first || i / 64 >= end) in.k[i] = in.v[i] = NAN;
    }
    run_kernels(&t, types[0], PACKED, t.h, &in, &out);
    for (i = 0; i < q_count(&t); ++i) wrong += isnan(out.o[i]) || isnan(out.dq[i]);
    for (i = 0; i < k_count(&t); ++i)
        wrong += isnan(out.dk[i]) || isnan(out.dv[i]) ||
                 ((i / 64 < first || i / 64 >= end) && !(out.dk[i] == 7 && out.dv[i] == 7));
    CHECK_INT(wrong, 0);
    values_free(&in), values_free(&out);
}

/* ---- what is refused ---- */

static void test_refusals(void)
{
    static const char *const names[] = {"window", "packed sequences", "soft-cap",
                                        "sinks",  "head dim",         "gradient of q"};
    static const int64_t good[] = {0, 8, 9}, descending[] = {0, 8, 7}, far[] = {0, INT64_MAX};
    float *block = floats(8 * 4 * 64), sinks[4] = {0, 0, 0, 0};
    upipe_attn_grad g;
    upipe_ops ops;
    upipe_ctx c;
    size_t need;
    void *work;
    int bit, backward, can;

    attn_ops(&c, &ops);
    valid_call(&g, block, NULL, 0);
    need = upi_cpu_attn_bytes(&ops, &g.a, 1);
    work = aligned_alloc(64, need);
    if (work == NULL) exit(2);
    for (bit = 0; bit < 6; ++bit)
        for (can = 0; can < 2; ++can)
            for (backward = 0; backward < 2; ++backward) {
                valid_call(&g, block, work, need);
                ops.name = "this table";
                ops.attn_can = can << bit;
                if (bit == 0) g.a.mask.window = 4;
                if (bit == 1) g.a.mask.cu_seqlens = good, g.a.mask.cu_seqlens_n = 2;
                if (bit == 2) g.a.mask.softcap = 30;
                if (bit == 3) g.a.mask.sinks = sinks;
                if (bit == 4) g.a.v.d = g.a.o.d = g.dout.d = g.dv.d = 32;
                if (bit == 5) g.a.merge = 1;
                CHECK_STATUS(backward ? upipe_attn_bwd(&c, &g) : upipe_attn_fwd(&c, &g.a),
                             can || (bit == 5 && !backward) ? UPIPE_OK : UPIPE_ERR_UNSUPPORTED, c.err);
                if (can || (bit == 5 && !backward)) continue;
                CHECK_TEXT(c.err.text, "this table");
                CHECK_TEXT(c.err.text, names[bit]);
            }
    attn_ops(&c, &ops);
#define REFUSED(change, word)                                         \
    do {                                                              \
        valid_call(&g, block, work, need);                            \
        change;                                                       \
        CHECK_STATUS(upipe_attn_fwd(&c, &g.a), UPIPE_ERR_ARG, c.err); \
        CHECK_TEXT(c.err.text, word);                                 \
        CHECK_STATUS(upipe_attn_bwd(&c, &g), UPIPE_ERR_ARG, c.err);   \
        CHECK_TEXT(c.err.text, word);                                 \
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
    REFUSED(g.a.mask.cu_seqlens_n = 1, "1 packed sequences, cu_seqlens is NULL");
    REFUSED(g.a.mask.cu_seqlens = good, "0 packed sequences, cu_seqlens is not NULL");
    REFUSED((g.a.mask.cu_seqlens = good, g.a.mask.cu_seqlens_n = -1), "-1 packed sequences");
    REFUSED((g.a.mask.cu_seqlens = descending, g.a.mask.cu_seqlens_n = 2), "packed sequence 1 is [8, 7)");
    REFUSED((g.a.mask.cu_seqlens = far, g.a.mask.cu_seqlens_n = 1), "packed sequence 0");
#undef REFUSED
    valid_call(&g, block, work, need);
    g.dsinks = sinks;
    CHECK_STATUS(upipe_attn_bwd(&c, &g), UPIPE_ERR_ARG, c.err);
    CHECK_TEXT(c.err.text, "sinks without sinks");
    valid_call(&g, block, work, need);
    g.a.merge = 1;
    g.dq.dtype = UPIPE_BF16;
    CHECK_STATUS(upipe_attn_bwd(&c, &g), UPIPE_ERR_ARG, c.err);
    CHECK_TEXT(c.err.text, "dq is bf16");
    free(work);
    free(block);
}

static long all_draws(void)
{
    return 100 + test_draws_wanted() / 10;
}

/* As in test_attn.c. */
static void test_unit(const upi_bf16_unit *unit, int all)
{
    attn_use(unit);
    test_reach();
    test_far_keys();
    test_random(all ? all_draws() : 10);
    if (!all) return;
    test_alone();
    test_parts();
    test_workers();
    test_wide_masks();
}

int main(int argc, char **argv)
{
    if (attn_units(argc, argv, test_unit)) return test_end("attn_masks bf16");
    test_sight();
    test_oracle();
    test_refusals();
    test_alone();
    test_parts();
    test_workers();
    test_wide_masks();
    test_one_key();
    test_reach();
    test_far_keys();
    test_random(all_draws());
    return test_end("attn_masks");
}

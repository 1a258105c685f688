/* test_cuda_attn_masks.c -- sliding windows, packed sequences, soft-caps, sinks, head dims of v, and gradients of q
 * that are added to, in the CUDA attention kernels, against dense attention in f64
 *
 * Each mask alone and any of them together; parts of the keys against all at once; the same bits in any layout and
 * by the kernels without masks; where NaNs show.
 */
#include "cuda/attn_device.h"

enum { MOST_CU_SEQLENS = 12 };

/* ---- against the oracle ---- */

/* Each mask alone, at the edges of tiles, and where rows see nothing. */
static void test_alone(void)
{
    static const int64_t windows[] = {1, 9, 64, 65, 100, 1000};
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
    static const int dims[][2] = {{32, 64}, {192, 128}, {40, 72}, {128, 256}, {72, 40}};
    test_rng r = {21};
    size_t i;
    int variant;
    const int last = storage == UPIPE_F32 || test_full() ? 1 : 0;
    for (variant = storage == UPIPE_F32; variant <= last; ++variant) {
        oracle_attn plain = shape(150, 150, 2, 1, variant ? 104 : 64, variant == 0, 0, 0), t;
        values in;
#define RUN(change)                            \
    do {                                       \
        t = plain;                             \
        change;                                \
        in = inputs_make(&t, &r, 1.5);         \
        check_case(&t, (int)i % LAYOUTS, &in); \
        values_free(&in);                      \
    } while (0)
        for (i = 0; i < sizeof windows / sizeof *windows; ++i)
            RUN((t.window = windows[i], t.q_pos = i % 3 == 2 ? 90 : 0));
        for (i = 0; i < sizeof cu_seqlens / sizeof *cu_seqlens; ++i)
            RUN((t.cu_seqlens = cu_seqlens[i].cu_seqlens, t.cu_seqlens_n = cu_seqlens[i].n,
                 t.k_pos = variant ? 30 : 0));
        for (i = 0; i < sizeof caps / sizeof *caps; ++i) RUN((t.softcap = (double)(float)caps[i]));
        for (i = 0; i < sizeof sinks / sizeof *sinks; ++i)
            RUN((t.sinks = sinks[i], t.k_pos = i % 2 ? 90 : 0));
        for (i = 0; i < sizeof dims / sizeof *dims && variant == 0; ++i)
            RUN((t.d = dims[i][0], t.v_dim = dims[i][1]));
        for (i = 2; i < 6; ++i) RUN((t.pos_step = (int64_t)i, t.q_pos = 3, t.window = 150));
#undef RUN
    }
}

/* Blocks of keys and tiles of queries without anything to do between others that have, and rows of more blocks. */
static void test_long(void)
{
    static const int64_t gaps[] = {-9, 10, 60, 60, 200, 201, 430, 480};
    /* clang-format off */
    static const int64_t cases[][6] = { /* sq, sk, window, q_pos, k_pos, cu_seqlens */
        {500, 500, 40, 0, 0, 0}, {300, 700, 150, 390, 0, 0}, {420, 300, 33, 100, 0, 0}, {500, 500, 0, 0, 0, 7},
        {290, 400, 90, 100, 0, 7}, {330, 330, 1, 0, 0, 0}, {200, 260, 30, 0, 250, 0}, {280, 200, 10, 300, 0, 0},
    };
    /* clang-format on */
    static const int dims[] = {64, 40, 128, 168};
    test_rng r = {28};
    size_t i;
    for (i = 0; i < sizeof cases / sizeof *cases; ++i) {
        const int64_t *x = cases[i];
        oracle_attn t = shape(x[0], x[1], 2, 1 + (int)i % 2, dims[i % 4], i != 5, x[3], x[4]);
        values in;
        t.window = x[2];
        if (x[5] > 0) t.cu_seqlens = gaps, t.cu_seqlens_n = x[5];
        if (brief() && i % 2 == 0) continue;
        in = inputs_make(&t, &r, 1);
        check_case(&t, (int)i % LAYOUTS, &in);
        values_free(&in);
    }
}

/* More packed sequences than a launch has space for: some of a row, some of several, many far from here. */
static void test_many_documents(void)
{
    enum { N = 1300 };
    static int64_t cu_seqlens[N + 1];
    oracle_attn t = shape(210, 230, 1, 1, 64, 0, 1000, 990);
    test_rng r = {29};
    values in;
    int64_t i;
    for (i = 0; i < N; ++i) cu_seqlens[i + 1] = cu_seqlens[i] + (i % 7 == 3 ? 0 : i % 5 == 1 ? 6 : 1 + i % 2);
    t.cu_seqlens = cu_seqlens, t.cu_seqlens_n = N;
    in = inputs_make(&t, &r, 1);
    check_case(&t, PACKED, &in);
    t.pos_step = 2;
    check_case(&t, GAPS, &in);
    values_free(&in);
}

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

static void test_random(void)
{
    static const int groups[][2] = {{1, 1}, {2, 2}, {2, 1}, {4, 2}, {3, 1}, {6, 2}};
    long seed = test_env("UPIPE_SEED", 1), draws = 8 + test_env("UPIPE_DRAWS", 2000) / 2000, i;
    for (i = 0; i < draws; ++i) {
        test_rng r = {(uint64_t)(seed + i) * 7919};
        const int *g = groups[test_below(&r, 6)];
        int layout = test_below(&r, LAYOUTS), d = 32 + 8 * test_below(&r, test_below(&r, 4) ? 9 : 29);
        int64_t cu_seqlens[MOST_CU_SEQLENS + 1], sq = 1 + test_below(&r, 400 / g[0]),
                                                 sk = 1 + test_below(&r, 300);
        oracle_attn t = shape(sq, sk, g[0], g[1], d, 0, test_below(&r, 220), test_below(&r, 220));
        long failed = test_failures;
        float sinks[6];
        values in;
        draw_masks(&r, &t, cu_seqlens, sinks);
        in = inputs_make(&t, &r, 1);
        check_case(&t, layout, &in);
        values_free(&in);
        if (test_failures != failed) fprintf(stderr, "  replay: UPIPE_SEED=%ld UPIPE_DRAWS=1\n", seed + i);
    }
}

/* ---- keys in parts ---- */

/* The backward of the keys in parts, with o and lse of all of them: dq is added to. Its naive runs are rounded to
 * the storage type all the same: where operands are, that is no more than they are off already. */
static void check_merge_bwd(const oracle_attn *t, int layout, const values *in, const int64_t *lengths,
                            int parts)
{
    values all = values_make(t), got = values_make(t);
    int64_t *cu_seqlens = cu_seqlens_alloc(t), first = 0;
    tensor q, k, v, dout, o, lse, delta, dq, dk, dv, sinks, dsinks;
    upipe_attn_grad g;
    int p;

    run_kernels(t, layout, t->h, in, &all);
    memset(&g, 0, sizeof g);
    q = tensor_make(storage, t->sq, t->h, t->d, layout, in->q);
    lse = tensor_make(UPIPE_F32, t->sq, t->h, 1, layout, all.lse);
    dout = tensor_make(storage, t->sq, t->h, oracle_v_dim(t), layout, in->dout);
    o = tensor_make(storage, t->sq, t->h, oracle_v_dim(t), layout, all.o);
    delta = tensor_make(UPIPE_F32, t->sq, t->h, 1, layout, NULL);
    dq = tensor_make(UPIPE_F32, t->sq, t->h, t->d, layout, got.dq);
    sinks = tensor_make(UPIPE_F32, 1, 1, t->h, PACKED, t->sinks);
    dsinks = tensor_make(UPIPE_F32, 1, 1, t->h, PACKED, got.dsinks);
    CHECK_STATUS(dev.ops.rowdot(&dev.c, delta.v, o.v, dout.v), UPIPE_OK, dev.c.err);
    for (p = 0; p < parts; first += lengths[p++]) {
        oracle_attn piece = piece_of(t, first, lengths[p]);
        int64_t at = first * t->hkv * t->d, v_at = first * t->hkv * oracle_v_dim(t);
        k = tensor_make(storage, lengths[p], t->hkv, t->d, layout, in->k + at);
        v = tensor_make(storage, lengths[p], t->hkv, oracle_v_dim(t), layout, in->v + v_at);
        dk = tensor_make(UPIPE_F32, lengths[p], t->hkv, t->d, layout, got.dk + at);
        dv = tensor_make(UPIPE_F32, lengths[p], t->hkv, oracle_v_dim(t), layout, got.dv + v_at);
        attn_set(&g.a, &piece, cu_seqlens);
        g.a.merge = 1;
        g.a.q = q.v, g.a.k = k.v, g.a.v = v.v, g.a.lse = lse.v;
        g.dout = dout.v, g.delta = delta.v, g.dq = dq.v, g.dk = dk.v, g.dv = dv.v;
        g.a.mask.sinks = piece.sinks != NULL ? (const float *)sinks.v.data : NULL;
        g.dsinks = piece.sinks != NULL ? (float *)dsinks.v.data : NULL;
        call_kernel(&g, t, cu_seqlens, 1);
        tensor_read(&k, NULL), tensor_read(&v, NULL);
        tensor_read(&dk, got.dk + at), tensor_read(&dv, got.dv + v_at);
    }
    CHECK_INT(first, t->sk);
    tensor_read(&q, NULL), tensor_read(&lse, NULL), tensor_read(&dout, NULL), tensor_read(&o, NULL);
    tensor_read(&delta, NULL), tensor_read(&dq, got.dq);
    tensor_read(&sinks, NULL), tensor_read(&dsinks, got.dsinks);
    /* o and lse were not computed here */
    memcpy(got.o, all.o, (size_t)o_count(t) * 4), memcpy(got.lse, all.lse, (size_t)(t->sq * t->h) * 4);
    CHECK_BYTES(got.dsinks, all.dsinks, t->h * 4);
    if (compares()) {
        answers x = answers_make(t, in);
        check_answers(t, in, &got, &x);
        answers_free(&x);
    }
    values_free(&all), values_free(&got);
    free(cu_seqlens);
}

static void test_parts(void)
{
    static const int64_t lengths[][3] = {{70, 50, 80}, {64, 128, 8}, {1, 0, 199}, {150, 49, 1}};
    static const int64_t cu_seqlens[] = {0, 30, 75, 75, 130, 190};
    static const float sinks[] = {0.5f, -2, 3, 1};
    /* every bit of a kind, and in the full run with every other */
    const int step = !test_full() ? 5 : storage == UPIPE_F32 ? 3 : 1;
    test_rng r = {22};
    int kind;
    for (kind = 0; kind < 32; kind += step) {
        oracle_attn t = shape(120, 200, 4, 2, kind % 3 ? 64 : 104, kind & 1, 60, 0);
        long failed = test_failures;
        values in;
        if (kind & 2) t.window = 45;
        if (kind & 4) t.cu_seqlens = cu_seqlens, t.cu_seqlens_n = 5;
        if (kind & 8) t.sinks = sinks;
        if (kind & 16) t.softcap = 4, t.v_dim = 48, t.pos_step = 1 + kind % 3;
        in = inputs_make(&t, &r, 1);
        check_merge(&t, kind % 2 ? storage : UPIPE_F32, kind % LAYOUTS, kind / 4 % 2, &in,
                    lengths[kind / 2 % 4], 3);
        check_merge_bwd(&t, kind % LAYOUTS, &in, lengths[kind / 2 % 4], 3);
        values_free(&in);
        if (test_failures != failed) say_case(&t, kind % LAYOUTS);
    }
}

/* ---- the same bits ---- */

/* Layouts, and a group's heads in one call or in several, from a start that is not zero. */
static void test_same_bits(void)
{
    static const int64_t cu_seqlens[] = {-5, 100, 100, 101, 190, 240, 250, 1200};
    static const float sinks[] = {0.5f, -2, 3, 1};
    static const int dims[] = {64, 128, 168};
    test_rng r = {4};
    int i;
    for (i = 0; i < 3; ++i) {
        oracle_attn t = shape(140, 210, 4, 1, dims[i], i != 1, 90, 20);
        values in, one = values_make(&t), first, other;
        int calls;
        if (i != 1) t.window = 50;
        if (i > 0) t.cu_seqlens = cu_seqlens, t.cu_seqlens_n = 7;
        t.sinks = sinks;
        in = inputs_make(&t, &r, 3);
        fill(&r, one.dk, k_count(&t), UPIPE_F32, 1);
        fill(&r, one.dv, v_count(&t), UPIPE_F32, 1);
        fill(&r, one.dsinks, t.h, UPIPE_F32, 1);
        first = start_from(&t, &one);
        run_kernels(&t, PACKED, t.h, &in, &first);
        for (calls = 2; calls <= 4; calls *= 2) {
            other = start_from(&t, &one);
            run_kernels(&t, (i + calls) % LAYOUTS, t.h / calls, &in, &other);
            check_same(&t, &first, &other);
            values_free(&other);
        }
        values_free(&in), values_free(&one), values_free(&first);
    }
}

/* Masks that hide nothing change no bit: the kernels with tables compute as those without. */
static void test_wide_masks(void)
{
    static const int64_t cu_seqlens[] = {-10, 5000};
    static const float sinks[] = {-INFINITY, -INFINITY};
    static const int dims[] = {64, 128, 200};
    int i;
    for (i = 0; i < 3; ++i) {
        oracle_attn t = shape(211, 171, 2, 1, dims[i], i != 1, 20, 60), wide = t;
        test_rng r = {24};
        values in = inputs_make(&t, &r, 1), a = values_make(&t), b = values_make(&t);
        wide.window = INT64_C(1) << 60;
        wide.cu_seqlens = cu_seqlens, wide.cu_seqlens_n = 1;
        wide.sinks = sinks;
        wide.pos_step = 1;
        run_kernels(&t, PACKED, t.h, &in, &a);
        run_kernels(&wide, PACKED, t.h, &in, &b);
        check_same(&t, &a, &b);
        values_free(&in), values_free(&a), values_free(&b);
    }
}

/* A query that sees one key: o is v and dv is dO, bit for bit, also through a soft-cap. */
static void test_one_key(void)
{
    test_rng r = {25};
    int round;
    for (round = 0; round < 4; ++round) {
        oracle_attn t = shape(90, 90, 1, 1, round < 2 ? 64 : 128, 1, 0, 0);
        values in = inputs_make(&t, &r, 3), out = values_make(&t);
        t.window = 1;
        t.softcap = round % 2 ? 3 : 0;
        run_kernels(&t, PACKED, 1, &in, &out);
        CHECK_BYTES(out.o, in.v, v_count(&t) * 4);
        CHECK_BYTES(out.dv, in.dout, v_count(&t) * 4);
        values_free(&in), values_free(&out);
    }
}

/* ---- what is left out ---- */

enum { BLOCK = 128 }; /* keys of the largest block */

/* Queries in the middle of a long row of keys: those that none of them sees may be anything, and get no gradient. */
static void test_far_keys(void)
{
    static const int dims[] = {64, 128, 256};
    int k;
    for (k = 0; k < 3; ++k) {
        oracle_attn t = shape(130, 1000, 2, 1, dims[k], 1, 500, 0);
        test_rng r = {27};
        values in = inputs_make(&t, &r, 1), out = values_make(&t);
        const int64_t first = (500 - 99) / BLOCK * BLOCK, end = (630 + BLOCK - 1) / BLOCK * BLOCK;
        int64_t i, wrong = 0;
        t.window = 100;
        for (i = 0; i < k_count(&t); ++i) {
            out.dk[i] = out.dv[i] = 7;
            if (i / t.d < first || i / t.d >= end) in.k[i] = in.v[i] = NAN;
        }
        run_kernels(&t, PACKED, t.h, &in, &out);
        for (i = 0; i < q_count(&t); ++i) wrong += isnan(out.o[i]) || isnan(out.dq[i]);
        for (i = 0; i < k_count(&t); ++i)
            wrong += isnan(out.dk[i]) || isnan(out.dv[i]) ||
                     ((i / t.d < first || i / t.d >= end) && !(out.dk[i] == 7 && out.dv[i] == 7));
        CHECK_INT(wrong, 0);
        values_free(&in), values_free(&out);
    }
}

/* Documents of whole tiles: what is NaN in one does not show in another, in either direction. */
static void test_far_documents(void)
{
    static const int dims[] = {64, 128, 256};
    /* multiples of what the kernels take of queries and keys at once; for 9.0 of 192 and 128, 128, 128 and 80 */
    static const int64_t whole[] = {128, 128, 128}, whole90[] = {384, 128, 640};
    int k;
    for (k = 0; k < 3; ++k) {
        const int64_t one = dev.cuda.capability / 10 == 9 ? whole90[k] : whole[k];
        const int64_t cu_seqlens[] = {0, one, 2 * one, 3 * one};
        oracle_attn t = shape(3 * one, 3 * one, 1, 1, dims[k], 0, 0, 0);
        test_rng r = {30};
        values in = inputs_make(&t, &r, 1), out = values_make(&t);
        int64_t i, wrong = 0;
        t.cu_seqlens = cu_seqlens, t.cu_seqlens_n = 3;
        for (i = one * t.d; i < 2 * one * t.d; ++i) in.q[i] = in.k[i] = in.v[i] = in.dout[i] = NAN;
        run_kernels(&t, PACKED, t.h, &in, &out);
        for (i = 0; i < q_count(&t); ++i) {
            const int bad = isnan(out.o[i]) + isnan(out.dq[i]) + isnan(out.dk[i]) + isnan(out.dv[i]);
            wrong += bad != (i >= one * t.d && i < 2 * one * t.d ? 4 : 0);
        }
        CHECK_INT(wrong, 0);
        values_free(&in), values_free(&out);
    }
}

int main(void)
{
    int i;
    if (!device_open(&dev)) return test_end("cuda_attn_masks");
    for (i = 0; i < 2; ++i) { /* other kernels each */
        storage = i == 0 ? UPIPE_BF16 : UPIPE_F32;
        if (same_as_before(storage)) break;
        test_long();
        test_many_documents();
        test_one_key();
        test_random();
        if (brief() || (storage == UPIPE_F32 && !test_full())) break;
        test_wide_masks();
        test_far_keys();
        test_far_documents();
        if (BRIEF) break; /* the same code with other numbers, and loops that test_cuda_attn has in f32 too */
        test_alone();
        test_parts();
        test_same_bits();
    }
    printf("digest %016llx\n", (unsigned long long)digest);
    device_close(&dev);
    return test_end("cuda_attn_masks");
}

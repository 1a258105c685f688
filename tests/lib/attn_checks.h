/* attn_checks.h -- what attention promises, checked by the same code at every place (attn.h)
 *
 * Shapes are the caller's where places differ: those of an emulated device are small, as it takes tenths of a second for
 * one of 300 x 300, and lie around the edges of other tiles.
 */
#ifndef UPIPE_TEST_ATTN_CHECKS_H
#define UPIPE_TEST_ATTN_CHECKS_H

#include "attn.h"

enum { MOST_CU_SEQLENS = 12 };

#define COUNT_OF(array) ((int)(sizeof(array) / sizeof *(array)))

/* ---- causal masks, and none ---- */

/* Edges of blocks, no rows, no keys, rows that see nothing, groups of heads. wide: a head dim of every fifth case. A
 * case: sq, sk, causal, q_pos, k_pos, query heads, key/value heads. */
static inline void check_lengths(const int64_t (*cases)[7], int count, int wide)
{
    test_rng r = {2};
    for (int i = 0; i < count; ++i) {
        const int64_t *x = cases[i];
        const int d = i % 5 == 4 && wide > 0 ? wide : i % 3 ? 64 : 40;
        const oracle_attn t = shape(x[0], x[1], (int)x[5], (int)x[6], d, (int)x[2], x[3], x[4]);
        if (here.brief && i % 4 != 3) continue;
        check_drawn(&t, here.types[i % 8 == 7 ? 2 : i % 4 == 3], i % ATTN_LAYOUTS, &r, 1);
    }
}

/* x = whole numbers of about this size. */
static inline void fill_whole(test_rng *r, float *x, int64_t n, upipe_dtype dtype, double size)
{
    for (int64_t i = 0; i < n; ++i) x[i] = naive_store(dtype, rintf((float)(size * test_normal(r))));
}

/* Scores up to tens of thousands, keys that grow so that every tile moves the maximum. The scores are whole numbers,
 * which f32 sums exactly: rounding one of 10,000 would change its weight by 1e-3, and the result would tell more about
 * luck than about the kernel. */
static inline void check_extreme(const oracle_attn *t, upipe_dtype dtype, test_rng *r, double size, int grow)
{
    const int mark = buffers_n;
    values in = inputs_make(t, dtype, r, 1);
    fill_whole(r, in.q, q_count(t), dtype, size);
    fill_whole(r, in.k, k_count(t), dtype, 4);
    for (int64_t e = 0; grow && e < k_count(t); ++e)
        in.k[e] = naive_store(dtype, in.k[e] * (float)(1 + e / t->d / 5));
    check_case(t, dtype, PACKED, &in);
    buffers_free(mark);
}

/* All scores are so far below zero that zeros beyond the last key would outweigh every key, and overflow. */
static inline void check_low_scores(int d)
{
    const int mark = buffers_n;
    const oracle_attn t = shape(70, 150, 2, 1, d, 0, 0, 0);
    test_rng r = {5};
    values in = inputs_make(&t, here.types[0], &r, 1);
    for (int64_t e = 0; e < q_count(&t); ++e) in.q[e] = 4;
    for (int64_t e = 0; e < k_count(&t); ++e)
        in.k[e] = naive_store(here.types[0], (float)(-5 - 0.25 * test_normal(&r)));
    check_case(&t, here.types[0], PACKED, &in);
    buffers_free(mark);
}

/* All scores are near their soft-cap, where 1 - tanh^2 has no digits left: dq and dk have theirs. */
static inline void check_saturated(upipe_dtype dtype, int d)
{
    const int mark = buffers_n;
    oracle_attn t = shape(70, 150, 2, 1, d, 1, 90, 0);
    test_rng r = {32};
    values in = inputs_make(&t, dtype, &r, 1);
    t.softcap = 1;
    for (int64_t e = 0; e < q_count(&t); ++e) in.q[e] = 1;
    for (int64_t e = 0; e < k_count(&t); ++e)
        in.k[e] = naive_store(dtype, (float)(7 / sqrt((double)d) + 0.5 * test_normal(&r)));
    check_case(&t, dtype, PACKED, &in);
    buffers_free(mark);
}

/* Rows that lie some positions apart, as those of a striped ring: keys ahead of the queries by less than a
 * step, by one and by several, and behind them. */
static inline void check_pos_steps(void)
{
    /* clang-format off */
    static const int64_t cases[][3] = { /* step, q_pos, k_pos */
        {2, 0, 1}, {2, 1, 0}, {3, 2, 0}, {3, 0, 2}, {3, 0, 3}, {5, 204, 1}, {7, 0, 300}, {1000, 70001, 0},
    };
    /* clang-format on */
    test_rng r = {12};
    for (int i = here.brief; i < COUNT_OF(cases); i += here.brief ? 4 : 1) {
        oracle_attn t = shape(75, 140, 2, 1, i % 2 ? 64 : 40, 1, cases[i][1], cases[i][2]);
        t.pos_step = cases[i][0];
        check_drawn(&t, here.types[i % 3], i % ATTN_LAYOUTS, &r, 1);
    }
}

/* ---- random problems ---- */

/* Ascending positions in [low, high], some of them equal; returns the number of packed sequences. */
static inline int64_t draw_cu_seqlens(test_rng *r, int64_t *cu_seqlens, int64_t low, int64_t high)
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
static inline void draw_masks(test_rng *r, oracle_attn *t, int64_t *cu_seqlens, float *sinks)
{
    const int mask = test_below(r, 64);
    t->causal = test_below(r, 4) > 0;
    if (mask & 1) t->window = 1 + test_below(r, test_below(r, 2) ? 20 : 300);
    if (mask & 2) {
        t->cu_seqlens_n = draw_cu_seqlens(r, cu_seqlens, -20, (int)(t->q_pos + t->sq + 40));
        t->cu_seqlens = cu_seqlens;
    }
    if (mask & 4) t->softcap = (double)(float)(0.5 + test_below(r, 60));
    for (int x = 0; x < t->h && mask & 8; ++x) sinks[x] = (float)(2 * test_normal(r));
    if (mask & 8) t->sinks = sinks;
    if (mask & 16) t->v_dim = 32 + 8 * test_below(r, 29);
    if (mask & 32) t->pos_step = 1 + test_below(r, 5);
}

/* How large draws become: rows are divided among the heads, or not; work is query heads * d * sq * sk at most. */
typedef struct draw_limits {
    int groups, rows, rows_shared, keys;
    int64_t work;
    int positions;
} draw_limits;

/* masks: any of them together; otherwise a scale. */
static inline void check_random(long draws, const draw_limits *most, int masks)
{
    static const int groups[][2] = {{1, 1}, {2, 2}, {2, 1}, {4, 2}, {3, 1}, {6, 2}, {8, 1}, {13, 1}};
    long seed = test_env("UPIPE_SEED", 1), i;
    for (i = 0; i < draws; ++i) {
        test_rng r = {(uint64_t)(seed + i) * (masks ? 7919 : 1)};
        const int *g = groups[test_below(&r, most->groups)];
        const upipe_dtype dtype = here.types[test_below(&r, 3)];
        const int layout = test_below(&r, ATTN_LAYOUTS),
                  d = 32 + 8 * test_below(&r, masks && test_below(&r, 4) ? 9 : 29);
        const int64_t sq = 1 + test_below(&r, most->rows / (most->rows_shared ? g[0] : 1));
        const int64_t keys = most->work / (g[0] * d) / sq;
        const int64_t sk = 1 + test_below(&r, keys < most->keys ? (int)keys : most->keys);
        int64_t cu_seqlens[MOST_CU_SEQLENS + 1];
        oracle_attn t =
            shape(sq, sk, g[0], g[1], d, 0, test_below(&r, most->positions), test_below(&r, most->positions));
        const long failed = test_failures;
        float sinks[13];
        if (masks) {
            draw_masks(&r, &t, cu_seqlens, sinks);
        } else {
            t.causal = test_below(&r, 4) > 0;
            t.scale = (double)(float)(t.scale * 0.25 * (1 + test_below(&r, 8)));
        }
        check_drawn(&t, dtype, layout, &r, 1);
        if (test_shown_since(failed)) fprintf(stderr, "  replay: UPIPE_SEED=%ld UPIPE_DRAWS=1\n", seed + i);
    }
}

/* ---- merging ---- */

/* What is merged with no keys, and with keys that it doesn't see, stays as it is, to the bit. A NaN stays one. */
static inline void check_merge_nothing(void)
{
    enum { BAD = 3 }; /* of the rows of all heads, the one whose lse is NaN */
    const oracle_attn t = shape(30, 20, 2, 1, 40, 1, 0, 100);
    const upipe_dtype dtype = here.types[0];
    const int mark = buffers_n;
    test_rng r = {11};
    const values in = inputs_make(&t, dtype, &r, 1);
    for (int kind = 0; kind < 8; ++kind) {
        const int layout = kind & 1 ? GAPS : PACKED, keys = kind & 2 ? 20 : 0;
        float *got_o = floats(q_count(&t)), *got_lse = floats(t.sq * t.h), *lse = floats(t.sq * t.h);
        upipe_attn_grad g = {0};
        memcpy(lse, in.q, (size_t)(t.sq * t.h) * 4);
        lse[BAD] = NAN;
        attn_set(&g.a, &t);
        g.a.q = placed(dtype, t.sq, t.h, t.d, layout, in.q);
        g.a.k = placed(dtype, keys, t.hkv, t.d, layout, in.k);
        g.a.v = placed(dtype, keys, t.hkv, t.d, layout, in.v);
        g.a.o = placed(kind & 4 ? dtype : UPIPE_F32, t.sq, t.h, t.d, layout, in.dout);
        g.a.lse = placed(UPIPE_F32, t.sq, t.h, 1, layout, lse);
        g.a.merge = 1;
        call_kernel(&g, 0);
        read_back(g.a.q, NULL), read_back(g.a.k, NULL), read_back(g.a.o, got_o), read_back(g.a.lse, got_lse);
        CHECK_SAY(isnan(got_lse[BAD]), "kind %d: a lse that was NaN is %g", kind, (double)got_lse[BAD]);
        got_lse[BAD] = lse[BAD];
        memcpy(got_o + BAD * t.d, in.dout + BAD * t.d, (size_t)t.d * 4);
        CHECK_BYTES(got_o, in.dout, q_count(&t) * 4);
        CHECK_BYTES(got_lse, lse, t.sq * t.h * 4);
    }
    buffers_free(mark);
}

/* Every mask in parts of the keys, forward and backward. wide: the other head dim; begun: lse always begins as -inf. */
static inline void check_parts(int step, int wide, int begun)
{
    static const int64_t lengths[][3] = {{70, 50, 80}, {64, 128, 8}, {1, 0, 199}, {150, 49, 1}};
    static const int64_t cu_seqlens[] = {0, 30, 75, 75, 130, 190};
    static const float sinks[] = {0.5f, -2, 3, 1};
    test_rng r = {22};
    for (int kind = 0; kind < 32; kind += step) {
        const upipe_dtype dtype = here.types[kind % 3];
        const int layout = kind % ATTN_LAYOUTS, mark = buffers_n;
        const int64_t *parts = lengths[kind / 2 % 4];
        oracle_attn t = shape(120, 200, 4, 2, kind % 2 ? 64 : wide, kind & 1, 60, 0);
        const long failed = test_failures;
        values in;
        if (kind & 2) t.window = 45;
        if (kind & 4) t.cu_seqlens = cu_seqlens, t.cu_seqlens_n = 5;
        if (kind & 8) t.sinks = sinks;
        if (kind & 16) t.softcap = 4, t.v_dim = 48, t.pos_step = 1 + kind % 3;
        in = inputs_make(&t, dtype, &r, 1);
        check_merge(&t, dtype, kind % 2 ? dtype : UPIPE_F32, layout, begun || kind / 4 % 2, &in, parts, 3);
        check_merge_bwd(&t, dtype, layout, &in, parts, 3);
        if (test_shown_since(failed)) say_case(&t, dtype, layout);
        buffers_free(mark);
    }
}

/* ---- the same bits ---- */

/* A group's heads in one call or in several (from `calls` on) and layouts, all of each, or one that takes turns; and one
 * run after another, from a start that is not zero. */
static inline void check_same_bits(const oracle_attn *t, upipe_dtype dtype, test_rng *r, int calls, int turn)
{
    const int mark = buffers_n;
    const values in = inputs_make(t, dtype, r, 3);
    values one = values_make(t), first, other;
    fill(r, one.dk, k_count(t), UPIPE_F32, 1);
    fill(r, one.dv, v_count(t), UPIPE_F32, 1);
    fill(r, one.dsinks, t->h, UPIPE_F32, 1);
    first = start_from(t, &one);
    run_kernels(t, dtype, PACKED, t->h, &in, &first);
    for (; calls <= 4; calls *= 2)
        for (int layout = 0; layout < ATTN_LAYOUTS; ++layout) {
            if (turn >= 0 && layout != (turn + calls) % ATTN_LAYOUTS) continue;
            other = start_from(t, &one);
            run_kernels(t, dtype, layout, t->h / calls, &in, &other);
            check_same(t, &first, &other);
        }
    buffers_free(mark);
}

/* Keys that come after every query's position change nothing, to the bit, and get gradients of 0. */
static inline void check_prefix(const int64_t *longer, int count)
{
    const oracle_attn t = shape(150, 150, 2, 1, 64, 1, 0, 0);
    test_rng r = {6};
    for (int i = here.brief ? count - 1 : 0; i < count; ++i) {
        const int mark = buffers_n;
        oracle_attn more = t;
        values in, out, got;
        more.sk += longer[i];
        in = inputs_make(&more, here.types[0], &r, 1);
        out = values_make(&more);
        got = values_make(&t);
        run_kernels(&more, here.types[0], PACKED, t.h, &in, &out);
        run_kernels(&t, here.types[0], PACKED, t.h, &in, &got); /* of the same values, the first keys */
        check_same(&t, &got, &out);
        for (int64_t e = k_count(&t); e < k_count(&more); ++e) CHECK(out.dk[e] == 0 && out.dv[e] == 0);
        buffers_free(mark);
    }
}

/* Masks that hide nothing change no bit: kernels with tables compute as those without. */
static inline void check_wide_masks(void)
{
    static const int64_t cu_seqlens[] = {-10, 5000};
    static const float sinks[] = {-INFINITY, -INFINITY};
    static const int dims[] = {64, 128, 200};
    for (int i = 0; i < 3; ++i) {
        const int mark = buffers_n;
        oracle_attn t = shape(211, 171, 2, 1, dims[i], i != 1, 20, 60), wide = t;
        test_rng r = {24};
        values in = inputs_make(&t, here.types[0], &r, 1), a = values_make(&t), b = values_make(&t);
        wide.window = INT64_C(1) << 60;
        wide.cu_seqlens = cu_seqlens, wide.cu_seqlens_n = 1;
        wide.sinks = sinks;
        wide.pos_step = 1;
        run_kernels(&t, here.types[0], PACKED, t.h, &in, &a);
        run_kernels(&wide, here.types[0], PACKED, t.h, &in, &b);
        check_same(&t, &a, &b);
        buffers_free(mark);
    }
}

/* Queries that see one key, at their own position or their window's only one: o is v and dv is dO, bit for bit, also
 * through a soft-cap. zeros: and dq and dk are 0. */
static inline void check_one_key(const oracle_attn *t, upipe_dtype dtype, test_rng *r, double q_size,
                                 int zeros)
{
    const int mark = buffers_n;
    const values in = inputs_make(t, dtype, r, q_size);
    values out = values_make(t);
    run_kernels(t, dtype, PACKED, t->h, &in, &out);
    CHECK_BYTES(out.o, in.v, v_count(t) * 4);
    CHECK_BYTES(out.dv, in.dout, v_count(t) * 4);
    for (int64_t i = 0; zeros && i < q_count(t); ++i) CHECK(out.dq[i] == 0 && out.dk[i] == 0);
    buffers_free(mark);
}

/* ---- what is not a number ---- */

/* A NaN in a row of q is not swallowed, and stays in its row: one element of head dim d_one, or a row of d_row. */
static inline void check_nan(int d_one, int d_row)
{
    /* the quiet NaN of <math.h>, and the one that poisoned memory is full of */
    static const uint32_t patterns[] = {0x7fc00000u, 0xffffffffu};
    for (int kind = 0; kind < 8; ++kind) {
        const int d = kind & 2 ? d_row : d_one, mark = buffers_n;
        const oracle_attn t = shape(40, 70, 1, 1, d, kind >> 2, 30, 0);
        test_rng r = {8};
        values in = inputs_make(&t, here.types[0], &r, 1), out = values_make(&t);
        for (int64_t e = 0; e < (kind & 2 ? d : 1); ++e) memcpy(&in.q[17 * d + e], &patterns[kind & 1], 4);
        run_kernels(&t, here.types[0], PACKED, 1, &in, &out);
        for (int64_t i = 0; i < t.sq; ++i) {
            int all = 1, any = 0;
            for (int64_t e = 0; e < d; ++e) {
                const int nan_o = isnan(out.o[i * d + e]) != 0, nan_q = isnan(out.dq[i * d + e]) != 0;
                all &= nan_o && nan_q;
                any |= nan_o || nan_q;
            }
            CHECK_SAY(i == 17 ? all : !any, "kind %d: row %d of o and dq", kind, (int)i);
            CHECK_INT(isnan(out.lse[i]) != 0, i == 17);
        }
        for (int64_t i = 0; i < 70 * d; ++i)
            CHECK(isnan(out.dk[i]) || (t.causal && i / d > 47)); /* what row 17 saw */
        buffers_free(mark);
    }
}

/* Rows with NaNs change no row that does not see them, or is not seen by them, to the bit: they are as if zeros were
 * there. Padding, before and behind all packed sequences; and, where `documents`, a whole sequence, or a NaN or an
 * infinity alone in q, dO, k or v of it, where others share its tiles. step: of so many cases one. */
static inline void check_nan_apart(int documents, int step)
{
    enum { N = 211, FIRST = 25, FROM = FIRST + 51, TO = FIRST + 97, END = FIRST + 160 };
    static const int64_t cu_seqlens[] = {0, FROM - FIRST, TO - FIRST, TO - FIRST, 140, END - FIRST};
    static const float sinks[] = {0.5f, -2};
    test_rng r = {31};
    for (int round = 0; round < (documents ? 28 : 8); round += step) {
        const int mark = buffers_n, which = round < 8 ? 0 : 1 + round % 5, layout = round % ATTN_LAYOUTS;
        const upipe_dtype dtype = here.types[round % 3];
        const long failed = test_failures;
        oracle_attn t = shape(N, N, 2, 1, round & 2 ? 64 : 40, round & 1, -FIRST, -FIRST);
        values in = inputs_make(&t, dtype, &r, 1), bad = values_make(&t), out = values_make(&t),
               got = values_make(&t);
        float *const inputs[][2] = {{in.q, bad.q}, {in.dout, bad.dout}, {in.k, bad.k}, {in.v, bad.v}};
        float *const results[][2] = {
            {out.o, got.o}, {out.lse, got.lse}, {out.dq, got.dq}, {out.dk, got.dk}, {out.dv, got.dv}};
        const int rows[] = {t.h * t.d, t.h, t.h * t.d, t.d, t.d};
        int64_t e, shown = 0;
        t.cu_seqlens = cu_seqlens, t.cu_seqlens_n = COUNT_OF(cu_seqlens) - 1;
        if (round & 4) t.window = 30;
        if (round & 2) t.softcap = 5;
        if (which == 0 && round % 3 == 0) t.sinks = sinks;
        for (int x = 0; x < 4; ++x) {
            const int row = x < 2 ? t.h * t.d : t.d;
            const int64_t one = row * (FROM + test_below(&r, TO - FROM)) + 7;
            for (e = 0; e < N * row; ++e) {
                const int64_t i = e / row;
                const int hit = which == 0   ? i < FIRST || i >= END
                                : which == 1 ? i >= FROM && i < TO
                                             : which == x + 2 && e == one;
                if (hit) inputs[x][0][e] = 0;
                inputs[x][1][e] = !hit ? inputs[x][0][e] : which > 1 && round & 1 ? INFINITY : NAN;
            }
        }
        run_kernels(&t, dtype, layout, t.h, &in, &out);
        run_kernels(&t, dtype, layout, t.h, &bad, &got);
        for (int x = 0; x < 5 && which > 0; ++x) /* in the sequence itself they show */
            for (e = FROM * rows[x]; e < TO * rows[x]; ++e) {
                shown += !isfinite(results[x][1][e]);
                results[x][0][e] = results[x][1][e] = 0;
            }
        CHECK((shown > 0) == (which > 0));
        check_same(&t, &out, &got);
        if (test_shown_since(failed))
            fprintf(stderr, "  round %d, NaNs in %d\n", round, which), say_case(&t, dtype, layout);
        buffers_free(mark);
    }
}

/* How far a NaN may show that the mask keeps away, as its weight of 0 is multiplied with it: a kernel takes rows and keys
 * together, these at most in the gradients of k and v, and those in the rest. */
typedef struct nan_reach {
    int64_t rows, keys, grad_rows, grad_keys;
} nan_reach;

/* Is there a pair of a row and a key that sees it, less than so many rows and keys away? */
static inline int sees_near(const oracle_attn *t, int64_t row, int64_t key, int64_t rows, int64_t keys)
{
    int64_t i, j;
    for (i = row - rows + 1; i < row + rows; ++i)
        for (j = key - keys + 1; j < key + keys && i >= 0 && i < t->sq; ++j)
            if (j >= 0 && j < t->sk && oracle_visible(t, i, j)) return 1;
    return 0;
}

/* A NaN in a row of k or v shows in all rows that see it, and one in a row of q or dO in the gradients of all keys that
 * this row sees. It may show near them, and nowhere else. */
static inline void check_nan_reach(const nan_reach *reach, int tries)
{
    enum { N = 400, D = 64 };
    static const int64_t cu_seqlens[] = {0, 150, 250, N};
    static const char *const names[] = {"k", "v", "q", "dout"};
    test_rng r = {26};
    int round, e;
    for (round = 0; round < 16 * tries; ++round) {
        const int mark = buffers_n, mask = round / 4 % 4, which = round % 4, of_row = which >= 2;
        const int64_t bad = 150 + test_below(&r, 100);
        oracle_attn t = shape(N, N, 1, 1, D, mask < 3, 0, 0);
        values in = inputs_make(&t, here.types[0], &r, 1), out = values_make(&t);
        float *const all[] = {in.k, in.v, in.q, in.dout};
        int64_t i;
        if (mask == 1) t.window = 20, t.softcap = 5;
        if (mask > 1) t.cu_seqlens = cu_seqlens, t.cu_seqlens_n = 3;
        for (e = 0; e < D; ++e) all[which][bad * D + e] = NAN;
        run_kernels(&t, here.types[0], PACKED, 1, &in, &out);
        for (i = 0; i < N; ++i) {
            const int sees = of_row ? oracle_visible(&t, bad, i) : oracle_visible(&t, i, bad);
            const int near = of_row ? sees_near(&t, bad, i, reach->grad_rows, reach->grad_keys)
                                    : sees_near(&t, i, bad, reach->rows, reach->keys);
            int row = 0, key = 0;
            for (e = 0; e < D; ++e) {
                row |= isnan(out.o[i * D + e]) || isnan(out.dq[i * D + e]);
                key |= isnan(out.dk[i * D + e]) || isnan(out.dv[i * D + e]);
            }
            CHECK_SAY((of_row ? key : row) ? near : !sees, "mask %d: %s %d is NaN: %s %d %s", mask,
                      names[which], (int)bad, of_row ? "key" : "row", (int)i,
                      sees ? "does not show it" : "shows it");
            if (of_row) CHECK_INT(row, i == bad);
        }
        buffers_free(mark);
    }
}

/* Queries in the middle of a long row of keys: those before key `first` and from `end` on, which none of them sees, may
 * be anything, and get no gradient. */
static inline void check_far_keys(const oracle_attn *t, int64_t first, int64_t end)
{
    const int mark = buffers_n;
    test_rng r = {27};
    values in = inputs_make(t, here.types[0], &r, 1), out = values_make(t);
    int64_t wrong = 0;
    for (int64_t i = 0; i < k_count(t); ++i) {
        out.dk[i] = out.dv[i] = 7;
        if (i / t->d < first || i / t->d >= end) in.k[i] = in.v[i] = NAN;
    }
    run_kernels(t, here.types[0], PACKED, t->h, &in, &out);
    for (int64_t i = 0; i < q_count(t); ++i) wrong += isnan(out.o[i]) || isnan(out.dq[i]);
    for (int64_t i = 0; i < k_count(t); ++i)
        wrong += isnan(out.dk[i]) || isnan(out.dv[i]) ||
                 ((i / t->d < first || i / t->d >= end) && !(out.dk[i] == 7 && out.dv[i] == 7));
    CHECK_INT(wrong, 0);
    buffers_free(mark);
}

/* ---- masks ---- */

/* Each mask alone, at the edges of tiles, panels and blocks, and where rows see nothing. */
static inline void check_alone(upipe_dtype dtype, int d, int causal, int with_dims, int64_t k_pos)
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
    static const int64_t steps[][2] = {{2, 0},   {3, 0},   {4, 90},  {5, 0},
                                       {2, 150}, {3, 150}, {4, 150}, {5, 150}};
    const oracle_attn plain = shape(150, 150, 2, 1, d, causal, 0, 0);
    test_rng r = {21};
    oracle_attn t;
    int i;
#define RUN(change)                                        \
    do {                                                   \
        t = plain;                                         \
        change;                                            \
        check_drawn(&t, dtype, i % ATTN_LAYOUTS, &r, 1.5); \
    } while (0)
    for (i = 0; i < COUNT_OF(windows); ++i) RUN((t.window = windows[i], t.q_pos = i % 3 == 2 ? 90 : 0));
    for (i = 0; i < COUNT_OF(cu_seqlens); ++i)
        RUN((t.cu_seqlens = cu_seqlens[i].cu_seqlens, t.cu_seqlens_n = cu_seqlens[i].n, t.k_pos = k_pos));
    for (i = 0; i < COUNT_OF(caps); ++i) RUN((t.softcap = (double)(float)caps[i]));
    for (i = 0; i < COUNT_OF(sinks); ++i) RUN((t.sinks = sinks[i], t.k_pos = i % 2 ? 90 : 0));
    for (i = 0; i < COUNT_OF(dims) && with_dims; ++i) RUN((t.d = dims[i][0], t.v_dim = dims[i][1]));
    for (i = 0; i < COUNT_OF(steps); ++i)
        RUN((t.pos_step = steps[i][0], t.q_pos = 3, t.window = steps[i][1]));
#undef RUN
}

#endif

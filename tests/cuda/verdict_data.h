/* verdict_data.h -- what verdict.c runs: a case's shape, exact data, and the results in f64
 *
 * Five runs, of whole numbers that bf16 holds. A wrong index is a wrong number then, and the number says which:
 *
 *     check    random; weights are powers of two, as a score's unit is log 2. Scores of some -160 keep what must not
 *              be seen, zeros beyond the last key, in front of all that must. Decides; the others run after a failure
 *     labels   query i of head h finds one key, target(i, h). A chunk of eight columns of what it brings says whose
 *              chunk it is: row, head and column
 *     columns  rows of q and k are unit vectors (column_of): which columns meet in Q K^T
 *     counts   every key weighs the same (forward: in half of the rows a power of two more every 64 keys), and the
 *              result counts the rows of 16, one step of a product, that came in. v and dout have the next step in the
 *              next column, and all of it again every 32 columns, times 1, 2, 3 and so on; q in even columns, k in odd
 *     grads    backward: which columns meet in dO V^T; dk and dq have 1 for even ones and 64 for odd ones
 *
 * Columns of a label, by their number modulo 8; v (forward) and dout have all of the first line, q and k those below:
 *
 *     v, dout  64 + row % 64, row / 64, head, column / 8, 1, 1 + row % 59, 1 + column / 8, 1
 *     q        64 + row % 64, row / 64, head * 32 + column / 8, 0, 0, 0, and the code of the target
 *     k        0, 0, 0, 64 + row % 64, row / 64, head * 32 + column / 8, and the code of the key
 *
 * A backward's labels are multiplied: dv's by 2^s, dk's and dq's by 2^(s + t) scale. Row i's lse has s(i, h), its delta
 * has t(i, h): another row's shows.
 */
#ifndef UPIPE_TEST_VERDICT_DATA_H
#define UPIPE_TEST_VERDICT_DATA_H

#include "device.h"

#include "upipe/cpu/upipe_cpu_simd.h"
#include "upipe/upipe_attn.h"

enum { CHECK_RUN, LABELS, COLUMNS, COUNTS, GRADS, RUNS };
enum { FULL, CAUSAL, GROUPED, PACKED_RUNS, ITEMS, MERGE, MASKS };
enum { T_Q, T_K, T_V, T_DOUT, T_LSE, T_DELTA, T_O, T_DQ, T_DK, T_DV, TENSORS };

static const char *const run_names[] = {"check", "labels", "columns", "counts", "grads"};
static const char *const mask_names[] = {"full", "causal", "grouped", "packed", "items", "merge"};
static const char *const tensor_names[] = {"q", "k", "v", "dout", "lse", "delta", "o", "dq", "dk", "dv"};
static const int64_t borders[] = {140, 400, 410, 640}; /* of packed sequences, among 660 */

/* Words of a case, and its shape. */
typedef struct verdict_case {
    int backward, kernel; /* 80, 90; 32: of f32 */
    int d, mask;
    int64_t queries, keys, seen; /* keys that have values; the rest nobody may see */
    int heads, kv_heads;
    int64_t q_pos;
    int margin_left; /* processors that the margin leaves; 0: no margin */
} verdict_case;

/* The emulator is slow; a device has many more blocks, past one wave in the backward, whose chains are 40 blocks. There it
 * is the host that takes the time: two tiles of queries, and shorter chains of many heads. */
static void shape_case(verdict_case *x)
{
#ifdef FAKE_CUDA_RUNTIME_API_H
    const int64_t chain = 520, queries = 200;
    const int heads = 2;
#else
    const int64_t chain = 40 * (x->d > 128 ? 64 : 128) + 18, queries = !x->backward ? 330
                                                                       : x->d > 64  ? 70
                                                                                    : 134;
    const int heads = x->backward ? 4 : 8;
#endif
    x->queries = queries, x->keys = x->backward ? chain : 520;
    x->heads = x->kv_heads = heads;
    if (x->mask == CAUSAL) x->q_pos = x->keys - queries - 10;
    if (x->mask == GROUPED) {
        x->keys = x->keys > 2000 ? x->keys / 4 : x->keys;
        x->queries = 130, x->q_pos = x->keys - 120, x->heads = 8, x->kv_heads = 2;
    }
    if (x->mask == PACKED_RUNS) x->queries = x->keys = 660, x->heads = x->kv_heads = 2;
    x->seen = x->keys;
    if (x->mask ==
        ITEMS) { /* two heads fill the cache: sections of 2, 2 and 1; the first queries see nothing */
        x->queries = 400, x->q_pos = -100;
        x->seen = 384; /* of 300 keys: a tile's hidden values are multiplied by 0 */
        x->keys = (32 << 20) / (4 * x->d) / 2 - 100;
        x->heads = x->kv_heads = 5, x->margin_left = 4;
    }
}

static int is_f32(const verdict_case *x)
{
    return x->kernel == 32;
}

/* ---- data ---- */

static uint32_t hash(uint32_t t, int64_t i, int h, int c)
{
    test_rng r = {((uint64_t)i << 24) + (uint64_t)(h << 16) + (uint64_t)(c << 4) + t};
    return (uint32_t)(test_u64(&r) >> 33);
}

/* Whole numbers from -most to most. */
static float any(uint32_t t, int64_t i, int h, int c, int most)
{
    return (float)((int)(hash(t, i, h, c) % (uint32_t)(2 * most + 1)) - most);
}

static upipe_attn mask_of(const verdict_case *x)
{
    upipe_attn a;
    memset(&a, 0, sizeof a);
    a.q.n = x->queries, a.k.n = x->keys;
    a.q_pos = x->q_pos;
    a.mask.causal = x->mask == CAUSAL || x->mask == GROUPED || x->mask == PACKED_RUNS || x->mask == ITEMS;
    if (x->mask == PACKED_RUNS) a.mask.borders.cu_seqlens = borders, a.mask.borders.cu_seqlens_n = 3;
    return a;
}

/* The key that query i of head h finds; -1 where it sees none. Neighbours find keys of other tiles. */
static int64_t target(const verdict_case *x, int64_t i, int h)
{
    const upipe_attn a = mask_of(x);
    int64_t first, end;
    upipe_attn_visible(&a, i, &first, &end);
    return first < end ? first + (i * 171 + h * 89) % (end - first) : -1;
}

/* The column in which a row is 1: rows of other tiles, halves and heads have others at the same place. */
static int column_of(const verdict_case *x, int64_t row, int h)
{
    return (int)((row + 5 * (row / 64) + 67 * h) % x->d);
}

/* Whether column c counts the row's step of 16, among `steps` columns; times what it is. */
static float step_value(int64_t row, int c, int steps)
{
    return c % steps == row / 16 % steps ? (float)(1 + c / steps) : 0;
}

/* Bit `at` of a key's code of 16, +1 or -1: its number and the parity, so two keys differ in two bits at least. */
static float code(int64_t key, int at)
{
    int bit = at < 15 ? (int)(key >> at & 1) : __builtin_parityll((unsigned long long)key);
    return bit ? 1 : -1;
}

static float label(int64_t row, int h, int c)
{
    const float x[8] = {(float)(64 + row % 64), (float)(row / 64),  (float)h, (float)(c / 8), 1,
                        (float)(1 + row % 59),  (float)(1 + c / 8), 1};
    return x[c % 8];
}

/* The three columns of q's and k's labels. */
static float short_label(int64_t row, int h, int c, int at)
{
    return (float)(at == 0 ? 64 + row % 64 : at == 1 ? row / 64 : h * 32 + c / 8);
}

static int stats_s(int64_t i, int h)
{
    return (int)((i ^ i >> 3 ^ i >> 5) + 3 * h) & 7;
}
static int stats_t(int64_t i, int h)
{
    return (int)((i >> 1 ^ i >> 4 ^ i >> 6) + h) & 3;
}

static float scale_of(const verdict_case *x, int run)
{
    if (run == LABELS) return x->d < 128 ? 2 : x->d < 256 ? 0.5f : 0.25f; /* a target's score is 128 to 384 */
    if (run == COLUMNS) return 0.5f;
    if (run == COUNTS && x->backward) return 1;
    if (run == GRADS) return 1.0f / 64;
    return 0.69314718f;
}

static float q_value(const verdict_case *x, int run, int64_t i, int h, int c)
{
    const int column = column_of(x, i, h), at = c % 8;
    if (run == CHECK_RUN)
        return c == 0 ? 4 : hash(T_Q, i, h, c) % (uint32_t)x->d < 8 ? any(T_O, i, h, c, 2) : 0;
    if (run == LABELS)
        return at < 3   ? short_label(i, h, c, at)
               : at < 6 ? 0
                        : 8 * code(target(x, i, h), c / 8 % 8 * 2 + at - 6);
    if (run == COLUMNS) return c == column ? 8 : 0;
    if (run == GRADS) return c == column / 2 * 2 ? (column % 2 ? 64 : 1) : 0;
    if (!x->backward) return c == 0 ? (float)(i / 8 % 2) : 0;
    return c == i / 16 % (x->d / 2) * 2;
}

static float k_value(const verdict_case *x, int run, int64_t j, int h, int c)
{
    const int column = column_of(x, j, 0), at = c % 8;
    if (run == CHECK_RUN) return c == 0 ? -40 : any(T_K, j, h, c, 1);
    if (run == LABELS)
        return at < 3 ? 0 : at < 6 ? short_label(j, h, c, at - 3) : code(j, c / 8 % 8 * 2 + at - 6);
    if (run == COLUMNS) return c == column ? 8 : 0;
    if (run == GRADS) return c == column / 2 * 2 + 1 ? (column % 2 ? 64 : 1) : 0;
    if (!x->backward) return c == 0 ? (float)((x->seen - 1 - j) / 64) : 0;
    return c == j / 16 % (x->d / 2) * 2 + 1;
}

static float v_value(const verdict_case *x, int run, int64_t j, int h, int c)
{
    if (run == CHECK_RUN) return any(T_V, j, h, c, 8);
    if (run == GRADS) return c == column_of(x, j, 0) ? 8 : 0;
    if (x->backward) return 0;
    return run == LABELS ? label(j, h, c) : run == COLUMNS ? c == column_of(x, j, 0) : step_value(j, c, 32);
}

static float dout_value(const verdict_case *x, int run, int64_t i, int h, int c)
{
    if (run == CHECK_RUN) return any(T_DOUT, i, h, c, 2);
    if (run == LABELS) return label(i, h, c);
    if (run == COUNTS) return step_value(i, c, 32);
    return c == column_of(x, i, h) ? (run == GRADS ? 8 : 1) : 0;
}

static float delta_value(int run, int64_t i, int h)
{
    if (run == CHECK_RUN) return any(T_DELTA, i, h, 0, 4);
    return run == LABELS ? -(float)(1 << stats_t(i, h)) : run == GRADS ? 0 : -1;
}

/* What outputs that are added to hold before: o and lse with merge, dk and dv. */
static float start_value(int run, int t, int64_t i, int h, int c)
{
    if (t == T_LSE && run == CHECK_RUN) return (float)(i % 5 - 152) * 0.69314718f;
    if (t == T_LSE) return run == COUNTS ? 2.7725887f : -INFINITY;
    return run == CHECK_RUN ? (float)((i + h + c) % 3) : 0;
}

/* ---- results ---- */

/* A tensor in f32, [n][h][d]: as it goes in, or should come out; `slack`: by how much it may be off. */
typedef struct tensor {
    int64_t n;
    int h, d;
    float *x, *slack, *got;
} tensor;

static float *row_of(const tensor *t, float *x, int64_t i, int h)
{
    return x + (i * t->h + h) * t->d;
}

/* Whole numbers: the sum is exact in any order. */
static float dot(const float *a, const float *b, int n)
{
    float s[4] = {0, 0, 0, 0};
    for (int i = 0; i < n; i += 4)
        for (int k = 0; k < 4; ++k) s[k] += a[i + k] * b[i + k];
    return s[0] + s[1] + s[2] + s[3];
}

/* to += f x, slack += |f x| */
static void add(float *to, float *slack, double f, const float *x, int n)
{
    const float g = (float)f;
    for (int i = 0; i < n; ++i) {
        to[i] += g * x[i];
        slack[i] += fabsf(g * x[i]);
    }
}

/* Absolute terms become how far a result may be off. `terms`: bits to which these are rounded, `store`: the result. */
static void bound(tensor *t, int terms, int store)
{
    for (int64_t e = 0; e < t->n * t->h * t->d; ++e)
        t->slack[e] = ldexpf(t->slack[e], -terms) + ldexpf(fabsf(t->x[e]), -store) + 1e-6f;
}

static void forward_row(const verdict_case *x, int run, tensor *t, int64_t i, int h, int64_t first,
                        int64_t end, double *s)
{
    const int kv = h / (x->heads / x->kv_heads);
    float *o = row_of(&t[T_O], t[T_O].x, i, h), *slack = row_of(&t[T_O], t[T_O].slack, i, h);
    float *lse = row_of(&t[T_LSE], t[T_LSE].x, i, h);
    double top = -INFINITY, sum = 0;
    for (int64_t j = first; j < end; ++j) {
        s[j] = (double)scale_of(x, run) *
               dot(row_of(&t[T_Q], t[T_Q].x, i, h), row_of(&t[T_K], t[T_K].x, j, kv), x->d);
        if (s[j] > top) top = s[j];
    }
    if (x->mask == MERGE && *lse > top) top = *lse;
    for (int64_t j = first; j < end; ++j) sum += s[j] = exp(s[j] - top);
    if (x->mask == MERGE) sum += exp(*lse - top);
    for (int c = 0; c < x->d; ++c) {
        o[c] = x->mask == MERGE ? (float)(o[c] * exp(*lse - top) / sum) : 0;
        slack[c] = fabsf(o[c]);
    }
    for (int64_t j = first; j < end; ++j)
        if (s[j] > 1e-12) add(o, slack, s[j] / sum, row_of(&t[T_V], t[T_V].x, j, kv), x->d);
    *lse = sum > 0 ? (float)(top + log(sum)) : -INFINITY;
    *row_of(&t[T_LSE], t[T_LSE].slack, i, h) = 1e-4f;
}

static void backward_row(const verdict_case *x, int run, tensor *t, int64_t i, int h, int64_t first,
                         int64_t end, double *s)
{
    const int kv = h / (x->heads / x->kv_heads), d = x->d;
    const float *q = row_of(&t[T_Q], t[T_Q].x, i, h), *dout = row_of(&t[T_DOUT], t[T_DOUT].x, i, h);
    float *dq = row_of(&t[T_DQ], t[T_DQ].x, i, h), *dq_slack = row_of(&t[T_DQ], t[T_DQ].slack, i, h);
    float *lse = row_of(&t[T_LSE], t[T_LSE].x, i, h), delta = *row_of(&t[T_DELTA], t[T_DELTA].x, i, h);
    const float scale = scale_of(x, run);
    double top = -INFINITY, sum = 0;
    for (int64_t j = first; j < end; ++j) {
        s[j] = dot(q, row_of(&t[T_K], t[T_K].x, j, kv), d);
        if (s[j] > top) top = s[j];
    }
    for (int64_t j = first; j < end && run == CHECK_RUN; ++j) sum += exp2(s[j] - top);
    *lse = run == CHECK_RUN ? (float)(top + ceil(log2(sum))) * scale
           : run == LABELS  ? (float)(2 * d) * scale - (float)stats_s(i, h) * 0.69314718f
           : run == COLUMNS ? 64 * scale
                            : 0;
    if (first == end) *lse = -INFINITY;
    for (int64_t j = first; j < end; ++j) {
        const double p = exp(scale * s[j] - (double)*lse);
        double ds;
        if (p < 1e-12) continue;
        ds = scale * p * (dot(dout, row_of(&t[T_V], t[T_V].x, j, kv), d) - delta);
        add(row_of(&t[T_DV], t[T_DV].x, j, kv), row_of(&t[T_DV], t[T_DV].slack, j, kv), p, dout, d);
        if (ds == 0) continue;
        add(row_of(&t[T_DK], t[T_DK].x, j, kv), row_of(&t[T_DK], t[T_DK].slack, j, kv), ds, q, d);
        add(dq, dq_slack, ds, row_of(&t[T_K], t[T_K].x, j, kv), d);
    }
}

/* Fills inputs, and outputs with what they should become. */
static void make_run(const verdict_case *x, int run, tensor *t)
{
    const upipe_attn a = mask_of(x);
    double *s = (double *)malloc((size_t)x->keys * sizeof *s);
    int k;
    int64_t i, e;
    if (s == NULL) exit(4);
    for (k = 0; k < TENSORS; ++k)
        for (e = 0; e < t[k].n * t[k].h * t[k].d; ++e) {
            const int c = (int)(e % t[k].d), h = (int)(e / t[k].d % t[k].h);
            i = e / t[k].d / t[k].h;
            t[k].x[e] = k == T_Q       ? q_value(x, run, i, h, c)
                        : k == T_K     ? k_value(x, run, i, h, c)
                        : k == T_V     ? v_value(x, run, i, h, c)
                        : k == T_DOUT  ? dout_value(x, run, i, h, c)
                        : k == T_DELTA ? delta_value(run, i, h)
                        : k == T_DQ    ? 0
                                       : start_value(run, k, i, h, c);
            t[k].slack[e] = 0;
        }
    for (i = 0; i < x->queries; ++i)
        for (k = 0; k < x->heads; ++k) {
            int64_t first, end;
            upipe_attn_visible(&a, i, &first, &end);
            if (x->backward)
                backward_row(x, run, t, i, k, first, end, s);
            else
                forward_row(x, run, t, i, k, first, end, s);
        }
    /* weights are exact in bf16, but for what ex2.approx and one FMA leave; dS is rounded */
    bound(&t[T_O], 13, is_f32(x) || x->mask == MERGE ? 20 : 8);
    bound(&t[T_DV], 13, 20);
    bound(&t[T_DK], is_f32(x) ? 13 : 8, 20);
    bound(&t[T_DQ], is_f32(x) ? 13 : 8, is_f32(x) ? 20 : 8);
    free(s);
}

#endif

/* test_attn.c -- the CPU attention kernels against dense attention in f64, and the lanes that they are made
 * of
 *
 * Tolerance runs (every head dim, lengths, offsets, masks, groups, types, layouts; extreme scores), bit
 * equality over layouts and over calls, causal prefixes, accumulation, refusals, and finite differences for
 * the oracle itself. A layout with gaps has NaNs in them: a kernel that reads one shows it in its results,
 * one that writes one is found by looking.
 */
#define _POSIX_C_SOURCE 200809L
#include "../upipe/cpu/upipe_cpu_attn_bwd.h"
#include "../upipe/cpu/upipe_cpu_rows.h"
#include "oracle.h"
#include "test.h"
#include "tolerance.h"
#include "workers.h"

enum { PACKED, HEAD_MAJOR, GAPS, LAYOUTS };

static const upipe_dtype types[] = {UPIPE_F32, UPIPE_BF16, UPIPE_F16};

/* The threads that kernels run on; NULL: the caller's alone. */
static const upipe_par *threads;

/* Packed f32 values of one problem: inputs, or a kernel's results. */
typedef struct values {
    float *q, *k, *v, *go; /* inputs, already rounded to the storage type */
    float *o, *lse, *dq, *dk, *dv;
} values;

static int64_t q_count(const oracle_attn *t)
{
    return t->sq * t->h * t->d;
}

static int64_t k_count(const oracle_attn *t)
{
    return t->sk * t->hkv * t->d;
}

/* n zeros; never NULL. */
static float *floats(int64_t n)
{
    float *p = (float *)calloc((size_t)n + 1, sizeof *p);
    if (p == NULL) exit(2);
    return p;
}

static double *doubles(const float *from, int64_t n)
{
    double *p = (double *)calloc((size_t)n + 1, sizeof *p);
    int64_t i;
    if (p == NULL) exit(2);
    for (i = 0; from != NULL && i < n; ++i) p[i] = (double)from[i];
    return p;
}

static values values_make(const oracle_attn *t)
{
    values x;
    x.q = floats(q_count(t));
    x.go = floats(q_count(t));
    x.o = floats(q_count(t));
    x.dq = floats(q_count(t));
    x.lse = floats(t->sq * t->h);
    x.k = floats(k_count(t));
    x.v = floats(k_count(t));
    x.dk = floats(k_count(t));
    x.dv = floats(k_count(t));
    return x;
}

static void values_free(values *x)
{
    free(x->q), free(x->k), free(x->v), free(x->go);
    free(x->o), free(x->lse), free(x->dq), free(x->dk), free(x->dv);
}

static void fill(test_rng *r, float *x, int64_t n, upipe_dtype dtype, double size)
{
    int64_t i;
    for (i = 0; i < n; ++i) x[i] = naive_store(dtype, (float)(size * test_normal(r)));
}

/* q, k, v, go; the scores' deviation is about q_size where scale is 1/sqrt(d). */
static values inputs_make(const oracle_attn *t, upipe_dtype dtype, test_rng *r, double q_size)
{
    values x = values_make(t);
    fill(r, x.q, q_count(t), dtype, q_size);
    fill(r, x.k, k_count(t), dtype, 1);
    fill(r, x.v, k_count(t), dtype, 1);
    fill(r, x.go, q_count(t), dtype, 1);
    return x;
}

/* ---- tensors in a layout ---- */

/* Elements between the end of the last row and the start: the block that a view needs. */
static int64_t view_extent(upipe_view v)
{
    return v.n == 0 ? 0 : (v.n - 1) * v.n_step + (v.h - 1) * v.h_step + v.d;
}

/* A view of fresh memory in which every byte is 0xff: NaN in both types. values (or NULL) is packed. */
static upipe_view tensor_make(upipe_dtype dtype, int64_t n, int h, int d, int layout, const float *from)
{
    upipe_view v = upipe_view_packed(NULL, dtype, n, h, d);
    int64_t i, bytes;
    int j, c;
    if (layout == HEAD_MAJOR) v.n_step = d, v.h_step = n * d;
    if (layout == GAPS) v.h_step = d + 3, v.n_step = h * v.h_step + 5;
    bytes = view_extent(v) * (int64_t)upipe_dtype_bytes(dtype);
    if (n > 0) {
        v.data = malloc((size_t)bytes);
        if (v.data == NULL) exit(2);
        memset(v.data, 0xff, (size_t)bytes);
    }
    for (i = 0; from != NULL && i < n; ++i)
        for (j = 0; j < h; ++j)
            for (c = 0; c < d; ++c) upi_f1_put(upipe_view_at(v, i, j), dtype, c, *from++);
    return v;
}

/* Takes the values out, packed (to may be NULL), checks that every gap still holds 0xff, and frees. */
static void tensor_take(upipe_view v, float *to)
{
    int64_t size = (int64_t)upipe_dtype_bytes(v.dtype), bytes = view_extent(v) * size, i, spoilt = 0;
    int j, c;
    for (i = 0; i < v.n; ++i)
        for (j = 0; j < v.h; ++j) {
            for (c = 0; to != NULL && c < v.d; ++c) *to++ = upi_f1_get(upipe_view_at(v, i, j), v.dtype, c);
            memset(upipe_view_at(v, i, j), 0xff, (size_t)(v.d * size));
        }
    for (i = 0; i < bytes; ++i) spoilt += ((unsigned char *)v.data)[i] != 0xff;
    CHECK_INT(spoilt, 0);
    free(v.data);
}

static upipe_view heads(upipe_view v, int first, int count)
{
    if (v.data != NULL) v.data = upipe_view_at(v, 0, first);
    v.h = count;
    return v;
}

/* ---- the kernels ---- */

static void attn_ops(upipe_ctx *c, upipe_ops *ops)
{
    memset(ops, 0, sizeof *ops);
    memset(c, 0, sizeof *c);
    ops->attn_fwd = upi_cpu_attn_fwd;
    ops->attn_bwd = upi_cpu_attn_bwd;
    ops->attn_bytes = upi_cpu_attn_bytes;
    ops->f16 = 1;
    ops->par = threads;
    c->ops = ops;
}

/* Forward and backward of `in` in a layout, `heads_per_call` query heads at a time (all, or a divisor of a
 * group). out->dk and out->dv hold the start of the sums. */
static void run_kernels(const oracle_attn *t, upipe_dtype dtype, int layout, int heads_per_call,
                        const values *in, values *out)
{
    int group = t->h / t->hkv, x, kv_heads = heads_per_call == t->h ? t->hkv : 1;
    upipe_view q = tensor_make(dtype, t->sq, t->h, t->d, layout, in->q);
    upipe_view k = tensor_make(dtype, t->sk, t->hkv, t->d, layout, in->k);
    upipe_view v = tensor_make(dtype, t->sk, t->hkv, t->d, layout, in->v);
    upipe_view go = tensor_make(dtype, t->sq, t->h, t->d, layout, in->go);
    upipe_view o = tensor_make(dtype, t->sq, t->h, t->d, layout, NULL);
    upipe_view gq = tensor_make(dtype, t->sq, t->h, t->d, layout, NULL);
    upipe_view gk = tensor_make(UPIPE_F32, t->sk, t->hkv, t->d, layout, out->dk);
    upipe_view gv = tensor_make(UPIPE_F32, t->sk, t->hkv, t->d, layout, out->dv);
    upipe_view lse = tensor_make(UPIPE_F32, t->sq, t->h, 1, layout, NULL);
    upipe_view delta = tensor_make(UPIPE_F32, t->sq, t->h, 1, layout, NULL);
    upipe_attn_grad g;
    upipe_ops ops;
    upipe_ctx c;
    int backward;

    attn_ops(&c, &ops);
    memset(&g, 0, sizeof g);
    g.a.q_pos = t->q_pos;
    g.a.k_pos = t->k_pos;
    g.a.causal = t->causal;
    g.a.scale = (float)t->scale;
    for (backward = 0; backward < 2; ++backward)
        for (x = 0; x < t->h; x += heads_per_call) {
            g.a.q = heads(q, x, heads_per_call);
            g.a.o = heads(o, x, heads_per_call);
            g.a.lse = heads(lse, x, heads_per_call);
            g.a.k = heads(k, x / group, kv_heads);
            g.a.v = heads(v, x / group, kv_heads);
            g.go = heads(go, x, heads_per_call);
            g.delta = heads(delta, x, heads_per_call);
            g.gq = heads(gq, x, heads_per_call);
            g.gk = heads(gk, x / group, kv_heads);
            g.gv = heads(gv, x / group, kv_heads);
            g.a.work_bytes = upi_cpu_attn_bytes(&ops, &g.a, backward);
            /* exactly as much as asked for, so that a sanitizer sees one element too many */
            g.a.work = aligned_alloc(64, g.a.work_bytes);
            if (g.a.work == NULL) exit(2);
            memset(g.a.work, 0xff, g.a.work_bytes);
            if (backward)
                CHECK_STATUS(upipe_attn_bwd(&c, &g), UPIPE_OK, c.err);
            else {
                CHECK_STATUS(upipe_attn_fwd(&c, &g.a), UPIPE_OK, c.err);
                CHECK_STATUS(upi_cpu_rowdot(&c, g.delta, g.go, g.a.o), UPIPE_OK, c.err);
            }
            free(g.a.work);
        }
    tensor_take(q, NULL), tensor_take(k, NULL), tensor_take(v, NULL), tensor_take(go, NULL);
    tensor_take(o, out->o), tensor_take(gq, out->dq), tensor_take(gk, out->dk), tensor_take(gv, out->dv);
    tensor_take(lse, out->lse), tensor_take(delta, NULL);
}

/* ---- against the oracle ---- */

static void check_case(const oracle_attn *t, upipe_dtype dtype, int layout, const values *in)
{
    int64_t nq = q_count(t), nk = k_count(t), rows = t->sq * t->h;
    values got = values_make(t), naive[NAIVE_WAYS];
    oracle_attn shape = *t;
    int way;
    double *q = doubles(in->q, nq), *k = doubles(in->k, nk), *v = doubles(in->v, nk),
           *go = doubles(in->go, nq);
    double *o = doubles(NULL, nq), *lse = doubles(NULL, rows), *dq = doubles(NULL, nq),
           *dk = doubles(NULL, nk);
    double *dv = doubles(NULL, nk);
    long failed = test_failures;

    run_kernels(t, dtype, layout, t->h, in, &got);
    oracle_attn_fwd(t, q, k, v, o, lse);
    oracle_attn_bwd(t, q, k, v, go, o, lse, dq, dk, dv);
    for (way = 0; way < NAIVE_WAYS; ++way) {
        values *n = &naive[way];
        *n = values_make(t);
        shape.naive = way;
        naive_attn_fwd(&shape, dtype, in->q, in->k, in->v, n->o, n->lse);
        naive_attn_bwd(&shape, dtype, in->q, in->k, in->v, in->go, n->o, n->lse, n->dq, n->dk, n->dv);
    }
#define CLOSE(tensor, count)                                                  \
    do {                                                                      \
        const float *runs[NAIVE_WAYS];                                        \
        for (way = 0; way < NAIVE_WAYS; ++way) runs[way] = naive[way].tensor; \
        CHECK_CLOSE(got.tensor, runs, NAIVE_WAYS, tensor, count, #tensor);    \
    } while (0)
    CLOSE(o, nq);
    CLOSE(lse, rows);
    CLOSE(dq, nq);
    CLOSE(dk, nk);
    CLOSE(dv, nk);
#undef CLOSE
    if (test_failures != failed)
        fprintf(stderr,
                "  %s layout %d: sq %lld sk %lld h %d hkv %d d %d causal %d q_pos %lld k_pos %lld scale %g\n",
                upipe_dtype_name(dtype), layout, (long long)t->sq, (long long)t->sk, t->h, t->hkv, t->d,
                t->causal, (long long)t->q_pos, (long long)t->k_pos, t->scale);
    values_free(&got);
    for (way = 0; way < NAIVE_WAYS; ++way) values_free(&naive[way]);
    free(q), free(k), free(v), free(go), free(o), free(lse), free(dq), free(dk), free(dv);
}

static oracle_attn shape(int64_t sq, int64_t sk, int h, int hkv, int d, int causal, int64_t q_pos,
                         int64_t k_pos)
{
    oracle_attn t;
    t.sq = sq, t.sk = sk, t.q_pos = q_pos, t.k_pos = k_pos;
    t.h = h, t.hkv = hkv, t.d = d, t.causal = causal, t.naive = 0;
    t.scale = (double)(float)(1 / sqrt((double)d));
    return t;
}

static void test_head_dims(void)
{
    test_rng r = {1};
    int d, b;
    for (d = UPIPE_HEAD_DIM_MIN; d <= UPIPE_HEAD_DIM_MAX; d += UPIPE_HEAD_DIM_STEP)
        for (b = 0; b < 3; ++b) {
            upipe_dtype dtype = types[b];
            oracle_attn t = shape(37, 83, 2, 1, d, (b ^ (d / 8)) & 1, 50, 0);
            values in = inputs_make(&t, dtype, &r, 1);
            check_case(&t, dtype, d / 8 % LAYOUTS, &in);
            values_free(&in);
        }
}

/* Edges of panels and blocks (24 and 48 lanes, 64 keys, 144, 192, 288 and 384 rows), no rows, no keys, rows that see nothing. */
static void test_lengths(void)
{
    /* clang-format off */
    static const int64_t cases[][5] = { /* sq, sk, causal, q_pos, k_pos */
        {1, 1, 0, 0, 0},     {1, 1, 1, 0, 0},      {1, 1, 1, 0, 1},        {1, 200, 1, 199, 0},  {200, 1, 0, 0, 0},
        {0, 5, 0, 0, 0},     {5, 0, 0, 0, 0},      {0, 0, 1, 0, 0},        {5, 0, 1, 0, 0},
        {15, 63, 1, 48, 0},  {16, 64, 1, 48, 0},   {17, 65, 1, 48, 0},     {64, 64, 1, 0, 0},    {65, 64, 1, 0, 0},
        {127, 66, 1, 0, 61}, {128, 128, 1, 0, 0},  {129, 130, 0, 0, 0},    {191, 67, 1, 7, 0},   {193, 195, 1, 2, 0},
        {200, 100, 1, 0, 0}, {200, 100, 1, 0, 90}, {100, 200, 1, 0, 0},    {100, 200, 1, 500, 0}, {50, 70, 1, 0, 1000},
        {23, 63, 1, 40, 0},  {24, 64, 1, 40, 0},   {25, 65, 1, 40, 0},     {47, 60, 1, 13, 0},   {49, 62, 1, 13, 0},
        {144, 70, 1, 0, 0},  {145, 71, 1, 0, 74},  {288, 66, 1, 0, 230},   {289, 90, 1, 0, 200}, {385, 61, 1, 0, 330},
        {40, 90, 1, 1000000000000, 999999999970},  {40, 90, 1, 0, 39},     {40, 90, 1, 0, 40},
    };
    /* clang-format on */
    test_rng r = {2};
    size_t i;
    for (i = 0; i < sizeof cases / sizeof *cases; ++i) {
        const int64_t *x = cases[i];
        upipe_dtype dtype = types[i % 8 == 7 ? 2 : i % 4 == 3];
        oracle_attn t = shape(x[0], x[1], 1, 1, i % 3 ? 64 : 40, (int)x[2], x[3], x[4]);
        values in = inputs_make(&t, dtype, &r, 1);
        check_case(&t, dtype, (int)i % LAYOUTS, &in);
        values_free(&in);
    }
}

/* x = whole numbers of about this size. */
static void fill_whole(test_rng *r, float *x, int64_t n, upipe_dtype dtype, double size)
{
    int64_t i;
    for (i = 0; i < n; ++i) x[i] = naive_store(dtype, rintf((float)(size * test_normal(r))));
}

/* Scores up to tens of thousands, keys that grow so that every block moves the maximum, rows that see
 * nothing. The scores are whole numbers, which f32 sums exactly: rounding one of 10,000 would change its
 * weight by 1e-3, and the result would tell more about luck than about the kernel. */
static void test_extreme_scores(void)
{
    static const double sizes[] = {1, 30, 300};
    test_rng r = {3};
    int i, grow, sees;
    for (i = 0; i < 3; ++i)
        for (grow = 0; grow < 2; ++grow)
            for (sees = 0; sees < 3; ++sees) {
                upipe_dtype dtype = (i + grow + sees) % 3 == 2 ? UPIPE_BF16 : UPIPE_F32;
                oracle_attn t = shape(150, sees == 2 ? 90 : 150, 2, 1, 64, sees > 0, 0, sees == 2 ? 60 : 0);
                values in = inputs_make(&t, dtype, &r, 1);
                int64_t e;
                fill_whole(&r, in.q, q_count(&t), dtype, sizes[i]);
                fill_whole(&r, in.k, k_count(&t), dtype, 4);
                for (e = 0; grow && e < k_count(&t); ++e)
                    in.k[e] = naive_store(dtype, in.k[e] * (float)(1 + e / t.d / 5));
                check_case(&t, dtype, PACKED, &in);
                values_free(&in);
            }
}

static void test_random(void)
{
    static const int groups[][2] = {{1, 1}, {2, 2}, {2, 1}, {4, 2}, {3, 1}, {6, 2}, {8, 1}};
    long seed = test_env("UPIPE_SEED", 1), draws = 20 + test_env("UPIPE_DRAWS", 2000) / 20, i;
    for (i = 0; i < draws; ++i) {
        test_rng r = {(uint64_t)(seed + i)};
        const int *g = groups[test_below(&r, 7)];
        upipe_dtype dtype = types[test_below(&r, 3)];
        int layout = test_below(&r, LAYOUTS), d = 32 + 8 * test_below(&r, 29);
        int64_t most = 3000000 / (g[0] * d), sq = 1 + test_below(&r, 200);
        int64_t sk = 1 + test_below(&r, (int)(most / sq < 200 ? most / sq : 200));
        oracle_attn t =
            shape(sq, sk, g[0], g[1], d, test_below(&r, 4) > 0, test_below(&r, 220), test_below(&r, 220));
        long failed = test_failures;
        values in;
        t.scale = (double)(float)(t.scale * 0.25 * (1 + test_below(&r, 8)));
        in = inputs_make(&t, dtype, &r, 1);
        check_case(&t, dtype, layout, &in);
        values_free(&in);
        if (test_failures != failed) fprintf(stderr, "  replay: UPIPE_SEED=%ld UPIPE_DRAWS=1\n", seed + i);
    }
}

/* ---- merging ---- */

/* o and lse of keys seen so far, in plain f32, brought up to those of a part; rounded as it is stored. */
static void naive_merge(const oracle_attn *t, upipe_dtype o_dtype, float *o, float *lse, const float *o_part,
                        const float *lse_part)
{
    int64_t i;
    int c;
    for (i = 0; i < t->sq * t->h; ++i) {
        float top = fmaxf(lse[i], lse_part[i]), a, b;
        if (top == -INFINITY) continue;
        a = expf(lse[i] - top), b = expf(lse_part[i] - top);
        for (c = 0; c < t->d; ++c)
            o[i * t->d + c] =
                naive_store(o_dtype, (a * o[i * t->d + c] + b * o_part[i * t->d + c]) / (a + b));
        lse[i] = top + logf(a + b);
    }
}

/* The keys in parts, each merged into what came before: as in one call. lse begins as -inf, and o as NaNs
 * that are not read. */
static void check_merge(const oracle_attn *t, upipe_dtype dtype, upipe_dtype o_dtype, int layout,
                        const values *in, const int64_t *lengths, int parts)
{
    int64_t nq = q_count(t), rows = t->sq * t->h, first = 0, i;
    values got = values_make(t), naive[NAIVE_WAYS], part = values_make(t);
    double *q = doubles(in->q, nq), *k = doubles(in->k, k_count(t)), *v = doubles(in->v, k_count(t)),
           *o = doubles(NULL, nq), *lse = doubles(NULL, rows);
    const float *runs_o[NAIVE_WAYS], *runs_lse[NAIVE_WAYS];
    upipe_attn a;
    upipe_ops ops;
    upipe_ctx c;
    int way, p;

    for (i = 0; i < rows; ++i) got.lse[i] = -INFINITY;
    attn_ops(&c, &ops);
    memset(&a, 0, sizeof a);
    a.q = tensor_make(dtype, t->sq, t->h, t->d, layout, in->q);
    a.o = tensor_make(o_dtype, t->sq, t->h, t->d, layout, NULL);
    a.lse = tensor_make(UPIPE_F32, t->sq, t->h, 1, layout, got.lse);
    a.q_pos = t->q_pos;
    a.causal = t->causal;
    a.scale = (float)t->scale;
    a.merge = 1;
    for (way = 0; way < NAIVE_WAYS; ++way) {
        naive[way] = values_make(t);
        for (i = 0; i < rows; ++i) naive[way].lse[i] = -INFINITY;
        runs_o[way] = naive[way].o, runs_lse[way] = naive[way].lse;
    }
    for (p = 0; p < parts; first += lengths[p++]) {
        int64_t at = first * t->hkv * t->d;
        oracle_attn piece = *t;
        piece.sk = lengths[p];
        piece.k_pos = t->k_pos + first;
        for (way = 0; way < NAIVE_WAYS; ++way) {
            piece.naive = way;
            naive_attn_fwd(&piece, UPIPE_F32, in->q, in->k + at, in->v + at, part.o, part.lse);
            naive_merge(t, o_dtype, naive[way].o, naive[way].lse, part.o, part.lse);
        }
        a.k = tensor_make(dtype, lengths[p], t->hkv, t->d, layout, in->k + at);
        a.v = tensor_make(dtype, lengths[p], t->hkv, t->d, layout, in->v + at);
        a.k_pos = piece.k_pos;
        a.work_bytes = upi_cpu_attn_bytes(&ops, &a, 0);
        a.work = aligned_alloc(64, a.work_bytes);
        if (a.work == NULL) exit(2);
        CHECK_STATUS(upipe_attn_fwd(&c, &a), UPIPE_OK, c.err);
        free(a.work);
        tensor_take(a.k, NULL), tensor_take(a.v, NULL);
    }
    CHECK_INT(first, t->sk);
    tensor_take(a.q, NULL), tensor_take(a.o, got.o), tensor_take(a.lse, got.lse);
    oracle_attn_fwd(t, q, k, v, o, lse);
    CHECK_CLOSE(got.o, runs_o, NAIVE_WAYS, o, nq, "o, merged");
    CHECK_CLOSE(got.lse, runs_lse, NAIVE_WAYS, lse, rows, "lse, merged");
    values_free(&got), values_free(&part);
    for (way = 0; way < NAIVE_WAYS; ++way) values_free(&naive[way]);
    free(q), free(k), free(v), free(o), free(lse);
}

static void test_merge(void)
{
    /* clang-format off */
    static const int64_t cases[][7] = { /* sq, causal, q_pos, then keys of up to three parts */
        {90, 0, 0, 70, 50, 0},   {90, 1, 30, 40, 40, 40}, {70, 1, 0, 64, 1, 64}, /* late parts hidden from early rows */
        {40, 1, -20, 30, 0, 30}, {200, 1, 0, 0, 0, 0},    {17, 0, 0, 0, 33, 0}, /* rows, and parts, that see nothing */
    };
    /* clang-format on */
    test_rng r = {10};
    size_t i;
    int type;
    for (i = 0; i < sizeof cases / sizeof *cases; ++i)
        for (type = 0; type < 3; ++type) {
            const int64_t *x = cases[i];
            upipe_dtype dtype = type > 0 ? UPIPE_BF16 : UPIPE_F32;
            oracle_attn t = shape(x[0], x[3] + x[4] + x[5], 2, 1, i % 2 ? 64 : 104, (int)x[1], x[2], 0);
            values in = inputs_make(&t, dtype, &r, 2);
            check_merge(&t, dtype, type > 1 ? UPIPE_BF16 : UPIPE_F32, (int)i % LAYOUTS, &in, x + 3, 3);
            values_free(&in);
        }
}

/* What is merged with no keys, and with keys that it doesn't see, stays as it is, to the bit. */
static void test_merge_nothing(void)
{
    oracle_attn t = shape(30, 20, 2, 1, 40, 1, 0, 100);
    test_rng r = {11};
    values in = inputs_make(&t, UPIPE_F32, &r, 1);
    int keys;
    for (keys = 0; keys <= 20; keys += 20) {
        upipe_attn a;
        upipe_ops ops;
        upipe_ctx c;
        float *o = floats(q_count(&t)), *lse = floats(t.sq * t.h);
        attn_ops(&c, &ops);
        memset(&a, 0, sizeof a);
        a.q = upipe_view_packed(in.q, UPIPE_F32, t.sq, t.h, t.d);
        a.k = upipe_view_packed(in.k, UPIPE_F32, keys, t.hkv, t.d);
        a.v = upipe_view_packed(in.v, UPIPE_F32, keys, t.hkv, t.d);
        a.o = upipe_view_packed(o, UPIPE_F32, t.sq, t.h, t.d);
        a.lse = upipe_view_packed(lse, UPIPE_F32, t.sq, t.h, 1);
        a.k_pos = t.k_pos;
        a.causal = a.merge = 1;
        memcpy(o, in.go, (size_t)q_count(&t) * 4);
        memcpy(lse, in.q, (size_t)(t.sq * t.h) * 4);
        a.work_bytes = upi_cpu_attn_bytes(&ops, &a, 0);
        a.work = aligned_alloc(64, a.work_bytes);
        if (a.work == NULL) exit(2);
        CHECK_STATUS(upipe_attn_fwd(&c, &a), UPIPE_OK, c.err);
        CHECK_BYTES(o, in.go, q_count(&t) * 4);
        CHECK_BYTES(lse, in.q, t.sq * t.h * 4);
        free(a.work), free(o), free(lse);
    }
    values_free(&in);
}

/* ---- the same bits ---- */

static void check_same(const oracle_attn *t, const values *a, const values *b)
{
    CHECK_BYTES(a->o, b->o, q_count(t) * 4);
    CHECK_BYTES(a->lse, b->lse, t->sq * t->h * 4);
    CHECK_BYTES(a->dq, b->dq, q_count(t) * 4);
    CHECK_BYTES(a->dk, b->dk, k_count(t) * 4);
    CHECK_BYTES(a->dv, b->dv, k_count(t) * 4);
}

/* Layouts, and a group's heads in one call or in several, from a start that is not zero. */
static void test_same_bits(void)
{
    static const int dims[] = {64, 128, 104};
    test_rng r = {4};
    int i, b, layout, calls;
    for (i = 0; i < 3; ++i)
        for (b = 0; b < 2; ++b) {
            upipe_dtype dtype = b ? UPIPE_BF16 : UPIPE_F32;
            oracle_attn t = shape(211, 171, 4, 1, dims[i], b, 20, 60);
            values in = inputs_make(&t, dtype, &r, 3), one = values_make(&t);
            fill(&r, one.dk, k_count(&t), UPIPE_F32, 1);
            fill(&r, one.dv, k_count(&t), UPIPE_F32, 1);
            for (layout = 0; layout < LAYOUTS; ++layout)
                for (calls = 1; calls <= 4; calls *= 2) {
                    values first = values_make(&t), other = values_make(&t);
                    memcpy(first.dk, one.dk, (size_t)k_count(&t) * 4),
                        memcpy(other.dk, one.dk, (size_t)k_count(&t) * 4);
                    memcpy(first.dv, one.dv, (size_t)k_count(&t) * 4),
                        memcpy(other.dv, one.dv, (size_t)k_count(&t) * 4);
                    run_kernels(&t, dtype, PACKED, t.h, &in, &first);
                    run_kernels(&t, dtype, layout, t.h / calls, &in, &other);
                    check_same(&t, &first, &other);
                    values_free(&first), values_free(&other);
                }
            values_free(&in), values_free(&one);
        }
}

/* Any number of threads, tasks in any order; blocks smaller and larger than the work; a group of more heads than a
 * block takes; all of a group in one call, or head by head. */
static void test_workers(void)
{
    static const int cases[][5] = {/* sq, sk, h, hkv, causal */
                                   {700, 700, 1, 1, 1}, {700, 650, 1, 1, 0}, {330, 200, 4, 2, 1},
                                   {100, 90, 17, 1, 1}, {260, 500, 6, 1, 1}, {3, 9, 2, 2, 0}};
    test_rng r = {10};
    size_t i;
    int kind;
    for (i = 0; i < sizeof cases / sizeof *cases; ++i) {
        const int *x = cases[i];
        upipe_dtype dtype = types[i % 3];
        oracle_attn t = shape(x[0], x[1], x[2], x[3], i % 2 ? 64 : 40, x[4], i % 2 ? 30 : 0, i == 3 ? 60 : 0);
        values in = inputs_make(&t, dtype, &r, 2), one = values_make(&t), got;
        run_kernels(&t, dtype, PACKED, t.h, &in, &one);
        for (kind = 0; kind < WORKERS_KINDS; ++kind) {
            host_threads w;
            got = values_make(&t);
            workers_begin(&w, kind);
            threads = &w.par;
            run_kernels(&t, dtype, PACKED, t.h, &in, &got);
            threads = NULL;
            workers_end(&w);
            check_same(&t, &one, &got);
            values_free(&got);
        }
        got = values_make(&t);
        run_kernels(&t, dtype, PACKED, 1, &in, &got);
        check_same(&t, &one, &got);
        values_free(&got);
        values_free(&in), values_free(&one);
    }
}

/* Two key/value heads in one call give what each gives alone. */
static void test_heads_alone(void)
{
    oracle_attn t = shape(77, 90, 4, 2, 80, 1, 20, 0), half = t;
    test_rng r = {5};
    values in = inputs_make(&t, UPIPE_F32, &r, 1), out = values_make(&t);
    int part;
    half.h = 2, half.hkv = 1;
    run_kernels(&t, UPIPE_F32, PACKED, t.h, &in, &out);
    for (part = 0; part < 2; ++part) {
        values x = values_make(&half), got = values_make(&half);
        int64_t i;
        for (i = 0; i < t.sq; ++i) {
            int64_t from = oracle_q_row(&t, i, 2 * part), to = oracle_q_row(&half, i, 0);
            memcpy(x.q + to, in.q + from, 2 * 80 * 4), memcpy(x.go + to, in.go + from, 2 * 80 * 4);
        }
        for (i = 0; i < t.sk; ++i) {
            int64_t from = oracle_k_row(&t, i, 2 * part), to = oracle_k_row(&half, i, 0);
            memcpy(x.k + to, in.k + from, 80 * 4), memcpy(x.v + to, in.v + from, 80 * 4);
        }
        run_kernels(&half, UPIPE_F32, PACKED, half.h, &x, &got);
        for (i = 0; i < t.sq; ++i) {
            CHECK_BYTES(got.o + oracle_q_row(&half, i, 0), out.o + oracle_q_row(&t, i, 2 * part), 2 * 80 * 4);
            CHECK_BYTES(got.dq + oracle_q_row(&half, i, 0), out.dq + oracle_q_row(&t, i, 2 * part),
                        2 * 80 * 4);
        }
        for (i = 0; i < t.sk; ++i) {
            CHECK_BYTES(got.dk + oracle_k_row(&half, i, 0), out.dk + oracle_k_row(&t, i, 2 * part), 80 * 4);
            CHECK_BYTES(got.dv + oracle_k_row(&half, i, 0), out.dv + oracle_k_row(&t, i, 2 * part), 80 * 4);
        }
        values_free(&x), values_free(&got);
    }
    values_free(&in), values_free(&out);
}

/* Keys that come after every query's position change nothing, to the bit, and get gradients of 0. */
static void test_prefix(void)
{
    static const int64_t longer[] = {1, 3, 40, 64, 129};
    oracle_attn t = shape(150, 150, 2, 1, 64, 1, 0, 0);
    test_rng r = {6};
    int64_t e;
    size_t i;
    for (i = 0; i < sizeof longer / sizeof *longer; ++i) {
        oracle_attn more = t;
        values in, out, got, less = values_make(&t);
        more.sk += longer[i];
        in = inputs_make(&more, UPIPE_F32, &r, 1);
        out = values_make(&more);
        got = values_make(&t);
        memcpy(less.q, in.q, (size_t)q_count(&t) * 4), memcpy(less.go, in.go, (size_t)q_count(&t) * 4);
        memcpy(less.k, in.k, (size_t)k_count(&t) * 4), memcpy(less.v, in.v, (size_t)k_count(&t) * 4);
        run_kernels(&more, UPIPE_F32, PACKED, t.h, &in, &out);
        run_kernels(&t, UPIPE_F32, PACKED, t.h, &less, &got);
        check_same(&t, &got, &out);
        for (e = k_count(&t); e < k_count(&more); ++e) CHECK(out.dk[e] == 0 && out.dv[e] == 0);
        values_free(&in), values_free(&out), values_free(&got), values_free(&less);
    }
}

/* gk and gv add to what is there. */
static void test_accumulate(void)
{
    oracle_attn t = shape(90, 70, 2, 1, 72, 1, 0, 10);
    test_rng r = {7};
    values in = inputs_make(&t, UPIPE_F32, &r, 1), zero = values_make(&t), out = values_make(&t);
    int moved_k = 0, moved_v = 0;
    int64_t i;
    for (i = 0; i < k_count(&t); ++i) out.dk[i] = 100, out.dv[i] = -100;
    run_kernels(&t, UPIPE_F32, GAPS, t.h, &in, &zero);
    run_kernels(&t, UPIPE_F32, GAPS, t.h, &in, &out);
    for (i = 0; i < k_count(&t); ++i) {
        moved_k |= fabsf(zero.dk[i]) > 0.1f;
        moved_v |= fabsf(zero.dv[i]) > 0.1f;
    }
    CHECK(moved_k && moved_v);
    for (i = 0; i < k_count(&t); ++i) {
        CHECK_SAY(fabsf(out.dk[i] - 100 - zero.dk[i]) < 2e-3f, "dk %g after 100, %g after 0", out.dk[i],
                  zero.dk[i]);
        CHECK_SAY(fabsf(out.dv[i] + 100 - zero.dv[i]) < 2e-3f, "dv %g after -100, %g after 0", out.dv[i],
                  zero.dv[i]);
    }
    values_free(&in), values_free(&zero), values_free(&out);
}

/* A NaN in a row of q is not swallowed, and stays in its row. */
static void test_nan(void)
{
    /* the quiet NaN of <math.h>, and the one that poisoned memory is full of; one element, and a whole row */
    static const uint32_t patterns[] = {0x7fc00000u, 0xffffffffu};
    int kind;
    for (kind = 0; kind < 8; ++kind) {
        oracle_attn t = shape(40, 70, 1, 1, 64, kind >> 2, 0, 30);
        test_rng r = {8};
        values in = inputs_make(&t, UPIPE_F32, &r, 1), out = values_make(&t);
        int64_t i, e;
        t.q_pos = 30;
        t.k_pos = 0;
        for (e = 0; e < (kind & 2 ? 64 : 1); ++e) memcpy(&in.q[17 * 64 + e], &patterns[kind & 1], 4);
        run_kernels(&t, UPIPE_F32, PACKED, 1, &in, &out);
        for (i = 0; i < t.sq; ++i) {
            int all = 1, any = 0;
            for (e = 0; e < 64; ++e) {
                int nan_o = isnan(out.o[i * 64 + e]) != 0, nan_q = isnan(out.dq[i * 64 + e]) != 0;
                all &= nan_o && nan_q;
                any |= nan_o || nan_q;
            }
            CHECK_SAY(i == 17 ? all : !any, "kind %d: row %d of o and dq", kind, (int)i);
            CHECK_INT(isnan(out.lse[i]) != 0, i == 17);
        }
        for (i = 0; i < 70 * 64; ++i)
            CHECK(isnan(out.dk[i]) || (t.causal && i / 64 > 47)); /* what row 17 saw */
        values_free(&in), values_free(&out);
    }
}

/* A query that sees one key: o is v, dv is dO, dq and dk are 0, bit for bit. */
static void test_one_key(void)
{
    static const int dims[] = {32, 40, 64, 80, 128, 200, 256};
    size_t k;
    for (k = 0; k < sizeof dims / sizeof *dims; ++k) {
        int round;
        for (round = 0; round < 20; ++round) {
            oracle_attn t = shape(1, 1, 1, 1, dims[k], round & 1, 0, 0);
            test_rng r = {(uint64_t)(round * 100 + dims[k])};
            values in = inputs_make(&t, UPIPE_F32, &r, 1), out = values_make(&t);
            int c;
            run_kernels(&t, UPIPE_F32, PACKED, 1, &in, &out);
            CHECK(memcmp(out.o, in.v, (size_t)dims[k] * 4) == 0);
            CHECK(memcmp(out.dv, in.go, (size_t)dims[k] * 4) == 0);
            for (c = 0; c < dims[k]; ++c) CHECK(out.dq[c] == 0 && out.dk[c] == 0);
            values_free(&in), values_free(&out);
        }
    }
}

/* ---- the vocabulary of lanes ---- */

static void test_exp(void)
{
    static const float edge[8] = {-127.0f, -INFINITY, -1e30f, -126.5f, 0.0f, 60.0f, NAN, -1.0f};
    float x[8], y[8], z[8];
    double worst2 = 0, worst = 0;
    int i, j;
    for (i = 0; i < 20000; ++i) {
        for (j = 0; j < 8; ++j) x[j] = -126.0f * (float)(i * 8 + j) / 160000.0f;
        upi_f8_store(y, upi_f8_exp2(upi_f8_load(x)));
        for (j = 0; j < 8; ++j) worst2 = fmax(worst2, fabs(y[j] / exp2((double)x[j]) - 1));
        for (j = 0; j < 8; ++j) x[j] *= 0.69f;
        upi_f8_store(z, upi_f8_exp(upi_f8_load(x)));
        for (j = 0; j < 8; ++j)
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
    int j;
    for (b = 0; b < 0x10000; b += 8) {
        uint16_t in[8], out[8];
        float x[8];
        for (j = 0; j < 8; ++j) in[j] = (uint16_t)(b + (uint32_t)j);
        upi_f8_store(x, upi_f8_load_bf16(in));
        upi_f8_store_bf16(out, upi_f8_load(x));
        for (j = 0; j < 8; ++j) {
            float one = upi_bf16_to_f32(in[j]);
            CHECK_BYTES(&one, &x[j], 4);
            if (isnan(x[j]))
                CHECK(isnan(upi_bf16_to_f32(out[j])) && isnan(upi_bf16_to_f32(upi_f32_to_bf16(x[j]))));
            else
                CHECK(out[j] == in[j] && upi_f32_to_bf16(x[j]) == in[j]);
        }
    }
    CHECK_INT(upi_f32_to_bf16(1 + 0x1p-8f), 0x3f80);            /* a tie, down to the even one */
    CHECK_INT(upi_f32_to_bf16(1 + 0x1p-7f + 0x1p-8f), 0x3f82);  /* a tie, up to the even one */
    CHECK_INT(upi_f32_to_bf16(1 + 0x1p-8f + 0x1p-20f), 0x3f81); /* more than a tie */
    CHECK_INT(upi_f32_to_bf16(3.4e38f), 0x7f80);
    for (b = 0; b < 4096; ++b) { /* lanes round as one element does, NaNs with low bits only included */
        uint32_t bits = b * 2654435761u;
        uint16_t out[8];
        float x;
        if (b % 16 == 0) bits = 0x7f800001u + b;
        memcpy(&x, &bits, 4);
        upi_f8_store_bf16(out, upi_f8_set1(x));
        CHECK_INT(out[b % 8], upi_f32_to_bf16(x));
    }
}

static void test_lanes(void)
{
    float x[64], y[64];
    upi_f8 r[8];
    int i, j;
    for (i = 0; i < 64; ++i) x[i] = (float)i;
    for (i = 0; i < 8; ++i) r[i] = upi_f8_load(x + i * 8);
    CHECK(upi_f8_sum(r[1]) == 92);
    upi_f8_transpose(r);
    for (i = 0; i < 8; ++i) upi_f8_store(y + i * 8, r[i]);
    for (i = 0; i < 64; ++i) CHECK_INT(y[i], x[i % 8 * 8 + i / 8]);
    for (i = -2; i < 10; ++i) {
        upi_f8_store(y, upi_f8_select(upi_lanes_above(i), upi_f8_set1(1), upi_f8_zero()));
        for (j = 0; j < 8; ++j) CHECK_INT(y[j], j > i);
    }
}

/* ---- the oracle itself ---- */

static double loss(const oracle_attn *t, const double *q, const double *k, const double *v, const double *go)
{
    int64_t n = q_count(t), i;
    double *o = doubles(NULL, n), *lse = doubles(NULL, t->sq * t->h), sum = 0;
    oracle_attn_fwd(t, q, k, v, o, lse);
    for (i = 0; i < n; ++i) sum += o[i] * go[i];
    free(o), free(lse);
    return sum;
}

static void check_slope(const oracle_attn *t, double *x, int64_t n, const double *grad, const double *q,
                        const double *k, const double *v, const double *go, const char *name)
{
    const double step = 1e-5;
    double worst = 0;
    int64_t i;
    for (i = 0; i < n; ++i) {
        double at = x[i], up, down;
        x[i] = at + step;
        up = loss(t, q, k, v, go);
        x[i] = at - step;
        down = loss(t, q, k, v, go);
        x[i] = at;
        worst = fmax(worst, fabs((up - down) / (2 * step) - grad[i]));
    }
    CHECK_SAY(worst <= 1e-7, "%s: finite differences are off by %g", name, worst);
}

static void test_oracle(void)
{
    int causal;
    for (causal = 0; causal < 2; ++causal) {
        oracle_attn t = shape(5, 7, 2, 1, 6, causal, 1, 2); /* causal: row 0 sees nothing */
        test_rng r = {9};
        values in = inputs_make(&t, UPIPE_F32, &r, 1);
        int64_t nq = q_count(&t), nk = k_count(&t);
        double *q = doubles(in.q, nq), *k = doubles(in.k, nk), *v = doubles(in.v, nk),
               *go = doubles(in.go, nq);
        double *o = doubles(NULL, nq), *lse = doubles(NULL, nq), *dq = doubles(NULL, nq),
               *dk = doubles(NULL, nk);
        double *dv = doubles(NULL, nk);
        oracle_attn_fwd(&t, q, k, v, o, lse);
        oracle_attn_bwd(&t, q, k, v, go, o, lse, dq, dk, dv);
        CHECK((lse[0] == -(double)INFINITY) == causal);
        check_slope(&t, q, nq, dq, q, k, v, go, "dq");
        check_slope(&t, k, nk, dk, q, k, v, go, "dk");
        check_slope(&t, v, nk, dv, q, k, v, go, "dv");
        values_free(&in);
        free(q), free(k), free(v), free(go), free(o), free(lse), free(dq), free(dk), free(dv);
    }
}

/* ---- what is refused ---- */

/* A call that would work: 8 queries, 8 keys, 4 heads over 2, d 64, f32; every pointer into one block. */
static void valid_call(upipe_attn_grad *g, float *block, void *work, size_t work_bytes)
{
    upipe_view q = upipe_view_packed(block, UPIPE_F32, 8, 4, 64),
               k = upipe_view_packed(block, UPIPE_F32, 8, 2, 64);
    upipe_view row = upipe_view_packed(block, UPIPE_F32, 8, 4, 1);
    memset(g, 0, sizeof *g);
    g->a.q = q, g->a.k = k, g->a.v = k, g->a.o = q, g->a.lse = row;
    g->go = q, g->gq = q, g->delta = row, g->gk = k, g->gv = k;
    g->a.work = work;
    g->a.work_bytes = work_bytes;
}

static void test_refusals(void)
{
    static const int bad_dims[] = {24, 36, 264, 0, -8};
    size_t need_fwd, need_bwd, i;
    float *block = floats(8 * 4 * 64), sink = 0;
    int64_t docs[2] = {0, 8};
    upipe_attn_grad g;
    upipe_ops ops;
    upipe_ctx c;
    void *work;

    attn_ops(&c, &ops);
    valid_call(&g, block, NULL, 0);
    need_fwd = upi_cpu_attn_bytes(&ops, &g.a, 0);
    need_bwd = upi_cpu_attn_bytes(&ops, &g.a, 1);
    work = aligned_alloc(64, need_bwd);
    if (work == NULL) exit(2);

#define REFUSED(change, status, word)                          \
    do {                                                       \
        valid_call(&g, block, work, need_bwd);                 \
        change;                                                \
        CHECK_STATUS(upipe_attn_fwd(&c, &g.a), status, c.err); \
        CHECK_TEXT(c.err.text, word);                          \
        CHECK_STATUS(upipe_attn_bwd(&c, &g), status, c.err);   \
        CHECK_TEXT(c.err.text, word);                          \
    } while (0)
#define REFUSED_BWD(change, status, word)                    \
    do {                                                     \
        valid_call(&g, block, work, need_bwd);               \
        change;                                              \
        CHECK_STATUS(upipe_attn_bwd(&c, &g), status, c.err); \
        CHECK_TEXT(c.err.text, word);                        \
    } while (0)

    valid_call(&g, block, work, need_fwd);
    CHECK_STATUS(upipe_attn_fwd(&c, &g.a), UPIPE_OK, c.err);
    g.a.work_bytes = need_fwd - 1;
    CHECK_STATUS(upipe_attn_fwd(&c, &g.a), UPIPE_ERR_ARG, c.err);
    CHECK_TEXT(c.err.text, "scratch");
    REFUSED_BWD(g.a.work_bytes = need_bwd - 1, UPIPE_ERR_ARG, "scratch");

    ops.f16 = 0;
    ops.name = "this table";
    REFUSED((g.a.q.dtype = UPIPE_F16), UPIPE_ERR_UNSUPPORTED, "this table does not take f16");
    ops.f16 = 1;
    REFUSED(g.a.window = 4, UPIPE_ERR_UNSUPPORTED, "window");
    REFUSED(g.a.softcap = 30, UPIPE_ERR_UNSUPPORTED, "soft-cap");
    REFUSED(g.a.sinks = &sink, UPIPE_ERR_UNSUPPORTED, "sinks");
    REFUSED(g.a.docs = docs, UPIPE_ERR_UNSUPPORTED, "documents");
    REFUSED(g.a.docs_n = 1, UPIPE_ERR_UNSUPPORTED, "documents");
    REFUSED(g.a.v.d = 32, UPIPE_ERR_UNSUPPORTED, "head dim");
    for (i = 0; i < sizeof bad_dims / sizeof *bad_dims; ++i) {
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
    valid_call(&g, block, work, need_bwd);
    g.a.o.n = 9;
    CHECK_STATUS(upipe_attn_fwd(&c, &g.a), UPIPE_ERR_ARG, c.err);
    CHECK_TEXT(c.err.text, "o is");
    REFUSED_BWD(g.go.n = 7, UPIPE_ERR_ARG, "go is");
    REFUSED_BWD(g.gq.dtype = UPIPE_BF16, UPIPE_ERR_ARG, "gq is bf16");
    REFUSED_BWD(g.delta.h = 2, UPIPE_ERR_ARG, "delta is");
    REFUSED_BWD(g.gk.dtype = UPIPE_BF16, UPIPE_ERR_ARG, "gk is bf16");
    REFUSED_BWD(g.gv.data = NULL, UPIPE_ERR_ARG, "gv is NULL");
    REFUSED_BWD(g.a.merge = 1, UPIPE_ERR_ARG, "nothing to merge");
    valid_call(&g, block, work, need_bwd);
    g.a.o.dtype = UPIPE_BF16, g.a.merge = 1;
    CHECK_STATUS(upipe_attn_fwd(&c, &g.a), UPIPE_ERR_ARG, c.err);
    CHECK_TEXT(c.err.text, "o is bf16");
#undef REFUSED
#undef REFUSED_BWD
    free(work);
    free(block);
}

/* A few hundred KiB, and nothing but the head dim decides, on one thread. */
static void test_scratch(void)
{
    const upipe_par par = {workers_backwards, NULL, 3};
    upipe_ops ops;
    float block[1];
    upipe_attn_grad g;
    size_t fwd, bwd;
    memset(&ops, 0, sizeof ops);
    valid_call(&g, block, NULL, 0);
    g.a.q.d = 128;
    fwd = upi_cpu_attn_bytes(NULL, &g.a, 0);
    bwd = upi_cpu_attn_bytes(NULL, &g.a, 1);
    CHECK(fwd % 64 == 0 && fwd <= 400 * 1024 * (UPI_WIDE / 8));
    CHECK(bwd % 64 == 0 && bwd <= 600 * 1024 * (UPI_WIDE / 8));
    g.a.q.n = g.a.k.n = 1 << 20;
    g.a.q.dtype = UPIPE_BF16;
    g.a.causal = 1;
    CHECK_INT(upi_cpu_attn_bytes(NULL, &g.a, 0), fwd);
    CHECK_INT(upi_cpu_attn_bytes(NULL, &g.a, 1), bwd);
    ops.par = &par; /* each worker its own, and in the backward eight bytes a block of 64 keys and group */
    CHECK_INT(upi_cpu_attn_bytes(&ops, &g.a, 0), 3 * fwd);
    CHECK_INT(upi_cpu_attn_bytes(&ops, &g.a, 1), 3 * bwd + (1 << 20) / 64 * 2 * 8);
}

int main(void)
{
    test_exp();
    test_bf16();
    test_lanes();
    test_oracle();
    test_refusals();
    test_scratch();
    test_head_dims();
    test_lengths();
    test_extreme_scores();
    test_merge();
    test_merge_nothing();
    test_same_bits();
    test_workers();
    test_heads_alone();
    test_prefix();
    test_accumulate();
    test_nan();
    test_one_key();
    test_random();
    return test_end("attn");
}

/* test_cuda_attn.c -- the CUDA attention kernels on bf16 against dense attention in f64
 *
 * The yardstick is the naive implementation with the operands of a tensor core (NAIVE_NARROW). Tensors lie in
 * device memory that is full of NaNs elsewhere: a kernel that reads a gap shows it in its results, one that
 * writes to a gap, or around a tensor, is found by looking. Emulated, a case of 300 x 300 takes tenths of a
 * second: shapes are small, and lie around the edges of tiles (16 rows, 32 and 64 keys forward; 32 and 64
 * queries, 64 and 128 keys backward).
 */
#include "oracle.h"
#include "tolerance.h"
#include "upipe/upipe_attn.h"
#include "cuda/device.h"

enum { PACKED, HEAD_MAJOR, GAPS, LAYOUTS, GUARD = 512 };

static device dev;
static upipe_dtype storage = UPIPE_BF16; /* of q, k, v and o */
static uint64_t digest;                  /* of all results: runs with other schedules must repeat it */

/* Packed f32 values of one problem: inputs, or a kernel's results. */
typedef struct values {
    float *q, *k, *v, *go; /* inputs, already rounded to bf16 */
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
    x.q = floats(q_count(t)), x.go = floats(q_count(t));
    x.o = floats(q_count(t)), x.dq = floats(q_count(t));
    x.lse = floats(t->sq * t->h);
    x.k = floats(k_count(t)), x.v = floats(k_count(t));
    x.dk = floats(k_count(t)), x.dv = floats(k_count(t));
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
static values inputs_make(const oracle_attn *t, test_rng *r, double q_size)
{
    values x = values_make(t);
    fill(r, x.q, q_count(t), storage, q_size);
    fill(r, x.k, k_count(t), storage, 1);
    fill(r, x.v, k_count(t), storage, 1);
    fill(r, x.go, q_count(t), storage, 1);
    return x;
}

/* ---- tensors on the device ---- */

typedef struct tensor {
    upipe_view v; /* on the device */
    char *room;   /* what it lies in */
    size_t bytes; /* of the view; a guard lies before and behind it */
} tensor;

static int64_t extent(upipe_view v)
{
    return v.n == 0 ? 0 : (v.n - 1) * v.n_step + (v.h - 1) * v.h_step + v.d;
}

/* The view of the same shape in host memory at `image`. */
static upipe_view on_host(const tensor *t, char *image)
{
    upipe_view v = t->v;
    v.data = image + GUARD;
    return v;
}

/* Rows at multiples of 16 bytes; statistics, with d = 1, anywhere. values (or NULL) is packed. */
static tensor tensor_make(upipe_dtype dtype, int64_t n, int h, int d, int layout, const float *from)
{
    tensor t;
    upipe_view host;
    char *image;
    int64_t i;
    int j, c;
    t.v = upipe_view_packed(NULL, dtype, n, h, d);
    if (layout == HEAD_MAJOR) t.v.n_step = d, t.v.h_step = n * d;
    if (layout == GAPS) t.v.h_step = d + (d > 1 ? 8 : 3), t.v.n_step = h * t.v.h_step + (d > 1 ? 16 : 5);
    t.bytes = (size_t)extent(t.v) * upipe_dtype_bytes(dtype);
    t.room = (char *)device_new(&dev, t.bytes + 2 * GUARD);
    t.v.data = t.room + GUARD;
    image = (char *)malloc(t.bytes + 2 * GUARD);
    if (image == NULL) exit(2);
    memset(image, 0xff, t.bytes + 2 * GUARD);
    host = on_host(&t, image);
    for (i = 0; from != NULL && i < n; ++i)
        for (j = 0; j < h; ++j)
            for (c = 0; c < d; ++c) upi_f1_put(upipe_view_at(host, i, j), dtype, c, *from++);
    device_put(&dev, t.room, image, t.bytes + 2 * GUARD);
    free(image);
    return t;
}

/* Takes the values out, packed (to may be NULL), checks that all else still holds 0xff, and frees. */
static void tensor_take(tensor *t, float *to)
{
    size_t at, bytes = t->bytes + 2 * GUARD, row = (size_t)t->v.d * upipe_dtype_bytes(t->v.dtype);
    char *image = (char *)malloc(bytes);
    upipe_view host = on_host(t, image);
    long spoilt = 0;
    int64_t i;
    int j, c;
    if (image == NULL) exit(2);
    device_get(&dev, image, t->room, bytes);
    for (at = 0; at < bytes; ++at) digest = (digest ^ (unsigned char)image[at]) * 0x100000001b3u;
    for (i = 0; i < t->v.n; ++i)
        for (j = 0; j < t->v.h; ++j) {
            for (c = 0; to != NULL && c < t->v.d; ++c)
                *to++ = upi_f1_get(upipe_view_at(host, i, j), t->v.dtype, c);
            memset(upipe_view_at(host, i, j), 0xff, row);
        }
    for (at = 0; at < bytes; ++at) spoilt += image[at] != (char)0xff;
    CHECK_INT(spoilt, 0);
    free(image);
    device_free(&dev, t->room);
}

static upipe_view heads(const tensor *t, int first, int count)
{
    upipe_view v = t->v;
    v.data = upipe_view_at(v, 0, first);
    v.h = count;
    return v;
}

/* Scratch of exactly the bytes asked for, full of NaNs. */
static void *work_make(upipe_attn *a, int backward)
{
    a->work_bytes = dev.ops.attn_bytes(&dev.ops, a, backward);
    a->work = device_new(&dev, a->work_bytes);
    return a->work;
}

/* ---- the kernels ---- */

static void attn_set(upipe_attn *a, const oracle_attn *t)
{
    memset(a, 0, sizeof *a);
    a->q_pos = t->q_pos;
    a->k_pos = t->k_pos;
    a->pos_step = t->pos_step;
    a->causal = t->causal;
    a->scale = (float)t->scale;
}

/* Forward and backward of `in` in a layout, `heads_per_call` query heads at a time (all, or a divisor of a
 * group). out->dk and out->dv hold the start of the sums. */
static void run_kernels(const oracle_attn *t, int layout, int heads_per_call, const values *in, values *out)
{
    int group = t->h / t->hkv, x, kv_heads = heads_per_call == t->h ? t->hkv : 1;
    tensor q = tensor_make(storage, t->sq, t->h, t->d, layout, in->q);
    tensor k = tensor_make(storage, t->sk, t->hkv, t->d, layout, in->k);
    tensor v = tensor_make(storage, t->sk, t->hkv, t->d, layout, in->v);
    tensor go = tensor_make(storage, t->sq, t->h, t->d, layout, in->go);
    tensor o = tensor_make(storage, t->sq, t->h, t->d, layout, NULL);
    tensor gq = tensor_make(storage, t->sq, t->h, t->d, layout, NULL);
    tensor gk = tensor_make(UPIPE_F32, t->sk, t->hkv, t->d, layout, out->dk);
    tensor gv = tensor_make(UPIPE_F32, t->sk, t->hkv, t->d, layout, out->dv);
    tensor lse = tensor_make(UPIPE_F32, t->sq, t->h, 1, layout, NULL);
    tensor delta = tensor_make(UPIPE_F32, t->sq, t->h, 1, layout, NULL);
    upipe_attn_grad g;
    memset(&g, 0, sizeof g);
    attn_set(&g.a, t);
    for (x = 0; x < t->h; x += heads_per_call) {
        g.a.q = heads(&q, x, heads_per_call);
        g.a.o = heads(&o, x, heads_per_call);
        g.a.lse = heads(&lse, x, heads_per_call);
        g.a.k = heads(&k, x / group, kv_heads);
        g.a.v = heads(&v, x / group, kv_heads);
        work_make(&g.a, 0);
        CHECK_STATUS(upipe_attn_fwd(&dev.c, &g.a), UPIPE_OK, dev.c.err);
        device_free(&dev, g.a.work);
    }
    /* the table's own sum: in f32 it cancels dP of a query that sees one key */
    CHECK_STATUS(dev.ops.rowdot(&dev.c, delta.v, o.v, go.v), UPIPE_OK, dev.c.err);
    tensor_take(&o, out->o);
    g.a.o = upipe_view_packed(NULL, storage, 0, 0, 0);
    for (x = 0; x < t->h; x += heads_per_call) {
        g.a.q = heads(&q, x, heads_per_call);
        g.a.lse = heads(&lse, x, heads_per_call);
        g.a.k = heads(&k, x / group, kv_heads);
        g.a.v = heads(&v, x / group, kv_heads);
        g.go = heads(&go, x, heads_per_call);
        g.delta = heads(&delta, x, heads_per_call);
        g.gq = heads(&gq, x, heads_per_call);
        g.gk = heads(&gk, x / group, kv_heads);
        g.gv = heads(&gv, x / group, kv_heads);
        work_make(&g.a, 1);
        CHECK_STATUS(upipe_attn_bwd(&dev.c, &g), UPIPE_OK, dev.c.err);
        device_free(&dev, g.a.work);
    }
    tensor_take(&q, NULL), tensor_take(&k, NULL), tensor_take(&v, NULL), tensor_take(&go, NULL);
    tensor_take(&gq, out->dq), tensor_take(&gk, out->dk), tensor_take(&gv, out->dv);
    tensor_take(&lse, out->lse), tensor_take(&delta, NULL);
}

/* ---- against the oracle ---- */

static void check_case(const oracle_attn *t, int layout, const values *in)
{
    int64_t nq = q_count(t), nk = k_count(t), rows = t->sq * t->h;
    values got = values_make(t), naive[NAIVE_WAYS];
    oracle_attn shape = *t;
    int way;
    double *q = doubles(in->q, nq), *k = doubles(in->k, nk), *v = doubles(in->v, nk),
           *go = doubles(in->go, nq);
    double *o = doubles(NULL, nq), *lse = doubles(NULL, rows), *dq = doubles(NULL, nq),
           *dk = doubles(NULL, nk), *dv = doubles(NULL, nk);
    long failed = test_failures;

    run_kernels(t, layout, t->h, in, &got);
    oracle_attn_fwd(t, q, k, v, o, lse);
    oracle_attn_bwd(t, q, k, v, go, o, lse, dq, dk, dv);
    for (way = 0; way < NAIVE_WAYS; ++way) {
        values *n = &naive[way];
        *n = values_make(t);
        shape.naive = way | NAIVE_NARROW;
        naive_attn_fwd(&shape, storage, in->q, in->k, in->v, n->o, n->lse);
        naive_attn_bwd(&shape, storage, in->q, in->k, in->v, in->go, n->o, n->lse, n->dq, n->dk, n->dv);
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
                "  layout %d: sq %lld sk %lld h %d hkv %d d %d causal %d q_pos %lld k_pos %lld pos_step %lld "
                "scale %g\n",
                layout, (long long)t->sq, (long long)t->sk, t->h, t->hkv, t->d, t->causal,
                (long long)t->q_pos, (long long)t->k_pos, (long long)t->pos_step, t->scale);
    values_free(&got);
    for (way = 0; way < NAIVE_WAYS; ++way) values_free(&naive[way]);
    free(q), free(k), free(v), free(go), free(o), free(lse), free(dq), free(dk), free(dv);
}

static oracle_attn shape(int64_t sq, int64_t sk, int h, int hkv, int d, int causal, int64_t q_pos,
                         int64_t k_pos)
{
    oracle_attn t;
    memset(&t, 0, sizeof t);
    t.sq = sq, t.sk = sk, t.q_pos = q_pos, t.k_pos = k_pos;
    t.h = h, t.hkv = hkv, t.d = d, t.causal = causal;
    t.scale = (double)(float)(1 / sqrt((double)d));
    return t;
}

static void test_head_dims(void)
{
    static const int dims[] = {32, 40, 64, 72, 96, 128, 136, 200, 256};
    test_rng r = {1};
    int i;
    for (i = 0; i < 9; ++i) {
        oracle_attn t = shape(77, 150, 2, 1, dims[i], i % 2, 80, 0);
        values in = inputs_make(&t, &r, 1);
        check_case(&t, i % LAYOUTS, &in);
        values_free(&in);
    }
}

/* Block edges, no rows, no keys, rows that see nothing, groups of heads. */
static void test_lengths(void)
{
    /* clang-format off */
    static const int64_t cases[][7] = { /* sq, sk, causal, q_pos, k_pos, query heads, key/value heads */
        {1, 1, 0, 0, 0, 1, 1}, {1, 1, 1, 0, 0, 2, 2}, {1, 1, 1, 0, 1, 1, 1},
        {1, 200, 1, 199, 0, 8, 1}, {200, 1, 0, 0, 0, 1, 1}, {0, 5, 0, 0, 0, 1, 1},
        {5, 0, 0, 0, 0, 2, 1}, {70, 0, 1, 0, 0, 1, 1}, {0, 0, 1, 0, 0, 1, 1},
        {63, 127, 1, 64, 0, 1, 1}, {64, 128, 1, 64, 0, 4, 1}, {65, 129, 1, 64, 0, 1, 1},
        {128, 128, 1, 0, 0, 2, 2}, {129, 66, 1, 0, 61, 1, 1}, {127, 257, 0, 0, 0, 1, 1},
        {300, 300, 1, 0, 0, 1, 1}, {200, 100, 1, 0, 90, 6, 3}, {100, 200, 1, 500, 0, 2, 1},
        {50, 70, 1, 0, 1000, 2, 1}, {150, 280, 1, 5, 300, 1, 1},
        {140, 190, 1, 1000000000000, 999999999970, 4, 2}, {40, 90, 1, 0, 39, 1, 1},
        {40, 90, 1, 0, 40, 1, 1}, {300, 140, 1, -100, 30, 1, 1},
    };
    /* clang-format on */
    test_rng r = {2};
    size_t i;
    for (i = 0; i < sizeof cases / sizeof *cases; ++i) {
        const int64_t *x = cases[i];
        oracle_attn t = shape(x[0], x[1], (int)x[5], (int)x[6],
                              i % 5 == 4 ? 104
                              : i % 3    ? 64
                                         : 40,
                              (int)x[2], x[3], x[4]);
        values in = inputs_make(&t, &r, 1);
        check_case(&t, (int)i % LAYOUTS, &in);
        values_free(&in);
    }
}

/* Rows that lie some positions apart, as those of a striped ring: keys ahead of the queries by less than a
 * step, by one and by several, and behind them. */
static void test_pos_steps(void)
{
    /* clang-format off */
    static const int64_t cases[][3] = { /* step, q_pos, k_pos */
        {2, 0, 1}, {2, 1, 0}, {3, 2, 0}, {3, 0, 2}, {3, 0, 3}, {5, 204, 1}, {7, 0, 300}, {1000, 70001, 0},
    };
    /* clang-format on */
    test_rng r = {12};
    size_t i;
    for (i = 0; i < sizeof cases / sizeof *cases; ++i) {
        oracle_attn t = shape(75, 140, 2, 1, i % 2 ? 64 : 40, 1, cases[i][1], cases[i][2]);
        values in = inputs_make(&t, &r, 1);
        t.pos_step = cases[i][0];
        check_case(&t, (int)i % LAYOUTS, &in);
        values_free(&in);
    }
}

/* Scores up to tens of thousands, keys that grow so that every tile moves the maximum, rows that see nothing.
 * The scores are whole numbers, which f32 sums exactly: rounding one of 10,000 would change its weight by
 * 1e-3, and the result would tell more about luck than about the kernel. */
static void test_extreme_scores(void)
{
    static const double sizes[] = {1, 30, 300};
    test_rng r = {3};
    int i, grow;
    for (i = 0; i < 3; ++i)
        for (grow = 0; grow < 2; ++grow) {
            oracle_attn t = shape(150, 170, 2, 1, 64, grow == 0 || i > 1, 0, i > 1 ? 60 : 0);
            values in = inputs_make(&t, &r, 1);
            int64_t e;
            for (e = 0; e < q_count(&t); ++e)
                in.q[e] = naive_store(storage, rintf((float)(sizes[i] * test_normal(&r))));
            for (e = 0; e < k_count(&t); ++e) {
                in.k[e] = rintf((float)(4 * test_normal(&r)));
                if (grow) in.k[e] = naive_store(storage, in.k[e] * (float)(1 + e / t.d / 5));
            }
            check_case(&t, PACKED, &in);
            values_free(&in);
        }
}

/* All scores are so far below zero that the zeros beyond the last key would outweigh every key, and overflow. */
static void test_low_scores(void)
{
    oracle_attn t = shape(70, 150, 2, 1, 64, 0, 0, 0);
    test_rng r = {5};
    values in = inputs_make(&t, &r, 1);
    int64_t e;
    for (e = 0; e < q_count(&t); ++e) in.q[e] = 4;
    for (e = 0; e < k_count(&t); ++e) in.k[e] = naive_store(storage, (float)(-5 - 0.25 * test_normal(&r)));
    check_case(&t, PACKED, &in);
    values_free(&in);
}

static void test_random(void)
{
    static const int groups[][2] = {{1, 1}, {2, 2}, {2, 1}, {4, 2}, {3, 1}, {8, 1}};
    long seed = test_env("UPIPE_SEED", 1), draws = 8 + test_env("UPIPE_DRAWS", 2000) / 2000, i;
    for (i = 0; i < draws; ++i) {
        test_rng r = {(uint64_t)(seed + i)};
        const int *g = groups[test_below(&r, 6)];
        int layout = test_below(&r, LAYOUTS), d = 32 + 8 * test_below(&r, 29);
        int64_t sq = 1 + test_below(&r, 300 / g[0]), sk = 1 + test_below(&r, 300);
        oracle_attn t =
            shape(sq, sk, g[0], g[1], d, test_below(&r, 4) > 0, test_below(&r, 320), test_below(&r, 320));
        long failed = test_failures;
        values in;
        t.scale = (double)(float)(t.scale * 0.25 * (1 + test_below(&r, 8)));
        in = inputs_make(&t, &r, 1);
        check_case(&t, layout, &in);
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
static void check_merge(const oracle_attn *t, upipe_dtype o_dtype, int layout, const values *in,
                        const int64_t *lengths, int parts)
{
    int64_t nq = q_count(t), rows = t->sq * t->h, first = 0, i;
    values got = values_make(t), naive[NAIVE_WAYS], part = values_make(t);
    double *q = doubles(in->q, nq), *k = doubles(in->k, k_count(t)), *v = doubles(in->v, k_count(t)),
           *o = doubles(NULL, nq), *lse = doubles(NULL, rows);
    const float *runs_o[NAIVE_WAYS], *runs_lse[NAIVE_WAYS];
    tensor at_q, at_k, at_v, at_o, at_lse;
    upipe_attn a;
    int way, p;

    for (i = 0; i < rows; ++i) got.lse[i] = -INFINITY;
    attn_set(&a, t);
    a.merge = 1;
    at_q = tensor_make(storage, t->sq, t->h, t->d, layout, in->q);
    at_o = tensor_make(o_dtype, t->sq, t->h, t->d, layout, NULL);
    at_lse = tensor_make(UPIPE_F32, t->sq, t->h, 1, layout, got.lse);
    a.q = at_q.v, a.o = at_o.v, a.lse = at_lse.v;
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
            piece.naive = way | NAIVE_NARROW;
            naive_attn_fwd(&piece, storage, in->q, in->k + at, in->v + at, part.o, part.lse);
            naive_merge(t, o_dtype, naive[way].o, naive[way].lse, part.o, part.lse);
        }
        at_k = tensor_make(storage, lengths[p], t->hkv, t->d, layout, in->k + at);
        at_v = tensor_make(storage, lengths[p], t->hkv, t->d, layout, in->v + at);
        a.k = at_k.v, a.v = at_v.v;
        a.k_pos = piece.k_pos;
        work_make(&a, 0);
        CHECK_STATUS(upipe_attn_fwd(&dev.c, &a), UPIPE_OK, dev.c.err);
        device_free(&dev, a.work);
        tensor_take(&at_k, NULL), tensor_take(&at_v, NULL);
    }
    CHECK_INT(first, t->sk);
    tensor_take(&at_q, NULL), tensor_take(&at_o, got.o), tensor_take(&at_lse, got.lse);
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
        {140, 1, 0, 64, 64, 12},
    };
    /* clang-format on */
    static const int dims[] = {64, 104, 200};
    test_rng r = {10};
    size_t i;
    int narrow;
    for (i = 0; i < sizeof cases / sizeof *cases; ++i)
        for (narrow = 0; narrow < 2; ++narrow) {
            const int64_t *x = cases[i];
            oracle_attn t = shape(x[0], x[3] + x[4] + x[5], 2, 1, dims[i % 3], (int)x[1], x[2], 0);
            values in = inputs_make(&t, &r, 2);
            check_merge(&t, narrow ? storage : UPIPE_F32, (int)i % LAYOUTS, &in, x + 3, 3);
            values_free(&in);
        }
}

/* What is merged with keys that it doesn't see stays as it is, to the bit. */
static void test_merge_nothing(void)
{
    oracle_attn t = shape(30, 20, 2, 1, 40, 1, 0, 100);
    test_rng r = {11};
    values in = inputs_make(&t, &r, 1);
    int keys, narrow;
    for (keys = 0; keys <= 20; keys += 20)
        for (narrow = 0; narrow < 2; ++narrow) {
            tensor q = tensor_make(storage, t.sq, t.h, t.d, GAPS, in.q);
            tensor k = tensor_make(storage, keys, t.hkv, t.d, GAPS, in.k);
            tensor o = tensor_make(narrow ? storage : UPIPE_F32, t.sq, t.h, t.d, GAPS, in.go);
            tensor lse = tensor_make(UPIPE_F32, t.sq, t.h, 1, GAPS, in.q);
            float *got_o = floats(q_count(&t)), *got_lse = floats(t.sq * t.h);
            upipe_attn a;
            attn_set(&a, &t);
            a.q = q.v, a.k = a.v = k.v, a.o = o.v, a.lse = lse.v;
            a.merge = 1;
            work_make(&a, 0);
            CHECK_STATUS(upipe_attn_fwd(&dev.c, &a), UPIPE_OK, dev.c.err);
            device_free(&dev, a.work);
            tensor_take(&q, NULL), tensor_take(&k, NULL), tensor_take(&o, got_o), tensor_take(&lse, got_lse);
            CHECK_BYTES(got_o, in.go, q_count(&t) * 4);
            CHECK_BYTES(got_lse, in.q, t.sq * t.h * 4);
            free(got_o), free(got_lse);
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

static values start_from(const oracle_attn *t, const values *one)
{
    values x = values_make(t);
    memcpy(x.dk, one->dk, (size_t)k_count(t) * 4);
    memcpy(x.dv, one->dv, (size_t)k_count(t) * 4);
    return x;
}

/* Layouts, a group's heads in one call or in several, and one run after another, from a start that is not
 * zero. */
static void test_same_bits(void)
{
    static const int dims[] = {64, 128, 168};
    test_rng r = {4};
    int i;
    for (i = 0; i < 3; ++i) {
        oracle_attn t = shape(140, 210, 4, 1, dims[i], i != 1, 90, 20);
        values in = inputs_make(&t, &r, 3), one = values_make(&t), first, other;
        int calls;
        fill(&r, one.dk, k_count(&t), UPIPE_F32, 1);
        fill(&r, one.dv, k_count(&t), UPIPE_F32, 1);
        first = start_from(&t, &one);
        run_kernels(&t, PACKED, t.h, &in, &first);
        for (calls = 1; calls <= 4; calls *= 2) {
            other = start_from(&t, &one);
            run_kernels(&t, (i + calls) % LAYOUTS, t.h / calls, &in, &other);
            check_same(&t, &first, &other);
            values_free(&other);
        }
        values_free(&in), values_free(&one), values_free(&first);
    }
}

/* Keys that come after every query's position change nothing, to the bit, and get gradients of 0. */
static void test_prefix(void)
{
    static const int64_t longer[] = {1, 40, 129};
    oracle_attn t = shape(150, 150, 2, 1, 64, 1, 0, 0);
    test_rng r = {6};
    int64_t e;
    size_t i;
    for (i = 0; i < sizeof longer / sizeof *longer; ++i) {
        oracle_attn more = t;
        values in, out, got, less = values_make(&t);
        more.sk += longer[i];
        in = inputs_make(&more, &r, 1);
        out = values_make(&more);
        got = values_make(&t);
        memcpy(less.q, in.q, (size_t)q_count(&t) * 4), memcpy(less.go, in.go, (size_t)q_count(&t) * 4);
        memcpy(less.k, in.k, (size_t)k_count(&t) * 4), memcpy(less.v, in.v, (size_t)k_count(&t) * 4);
        run_kernels(&more, PACKED, t.h, &in, &out);
        run_kernels(&t, PACKED, t.h, &less, &got);
        check_same(&t, &got, &out);
        for (e = k_count(&t); e < k_count(&more); ++e) CHECK(out.dk[e] == 0 && out.dv[e] == 0);
        values_free(&in), values_free(&out), values_free(&got), values_free(&less);
    }
}

/* A NaN in a row of q is not swallowed, and stays in its row. */
static void test_nan(void)
{
    int kind;
    for (kind = 0; kind < 4; ++kind) {
        oracle_attn t = shape(40, 70, 1, 1, kind & 1 ? 64 : 128, kind >> 1, 30, 0);
        test_rng r = {8};
        values in = inputs_make(&t, &r, 1), out = values_make(&t);
        int64_t i;
        int e;
        for (e = 0; e < (kind & 1 ? t.d : 1); ++e) in.q[17 * t.d + e] = NAN;
        run_kernels(&t, PACKED, 1, &in, &out);
        for (i = 0; i < t.sq; ++i) {
            int all = 1, any = 0;
            for (e = 0; e < t.d; ++e) {
                int nan_o = isnan(out.o[i * t.d + e]) != 0, nan_q = isnan(out.dq[i * t.d + e]) != 0;
                all &= nan_o && nan_q;
                any |= nan_o || nan_q;
            }
            CHECK_SAY(i == 17 ? all : !any, "kind %d: row %d of o and dq", kind, (int)i);
            CHECK_INT(isnan(out.lse[i]) != 0, i == 17);
        }
        for (i = 0; i < 48 * t.d; ++i) CHECK(isnan(out.dk[i])); /* what row 17 saw */
        values_free(&in), values_free(&out);
    }
}

/* A query that sees one key: o is v and dv is dO, bit for bit. */
static void test_one_key(void)
{
    static const int dims[] = {40, 128, 256};
    size_t k;
    for (k = 0; k < sizeof dims / sizeof *dims; ++k) {
        oracle_attn t = shape(1, 1, 2, 2, dims[k], (int)k & 1, 0, 0);
        test_rng r = {(uint64_t)dims[k]};
        values in = inputs_make(&t, &r, 30), out = values_make(&t);
        run_kernels(&t, PACKED, 2, &in, &out);
        CHECK_BYTES(out.o, in.v, 2 * dims[k] * 4);
        CHECK_BYTES(out.dv, in.go, 2 * dims[k] * 4);
        values_free(&in), values_free(&out);
    }
}

/* ---- what is refused, and scratch ---- */

/* A call that would work: 8 queries, 8 keys, 4 heads over 2, d 64; every pointer into one block. */
static void valid_call(upipe_attn_grad *g, void *block, void *work, size_t work_bytes)
{
    upipe_view q = upipe_view_packed(block, UPIPE_BF16, 8, 4, 64),
               k = upipe_view_packed(block, UPIPE_BF16, 8, 2, 64);
    upipe_view row = upipe_view_packed(block, UPIPE_F32, 8, 4, 1),
               sum = upipe_view_packed(block, UPIPE_F32, 8, 2, 64);
    memset(g, 0, sizeof *g);
    g->a.q = g->a.o = g->go = g->gq = q;
    g->a.k = g->a.v = k;
    g->a.lse = g->delta = row;
    g->gk = g->gv = sum;
    g->a.work = work;
    g->a.work_bytes = work_bytes;
}

static void test_refusals(void)
{
    static const int64_t docs[] = {0, 8}; /* of host memory */
    const size_t bytes = 8 * 4 * 64 * 4;
    char *block = (char *)device_new(&dev, bytes), *image = (char *)malloc(bytes);
    size_t need, at;
    upipe_attn_grad g;
    void *work;
    if (image == NULL) exit(2);
    valid_call(&g, block, NULL, 0);
    need = dev.ops.attn_bytes(&dev.ops, &g.a, 1);
    work = device_new(&dev, need);

#define REFUSED_FWD(change, word)                                                     \
    do {                                                                              \
        valid_call(&g, block, work, need);                                            \
        change;                                                                       \
        CHECK_STATUS(upipe_attn_fwd(&dev.c, &g.a), UPIPE_ERR_UNSUPPORTED, dev.c.err); \
        CHECK_TEXT(dev.c.err.text, word);                                             \
    } while (0)
#define REFUSED_BWD(change, word)                                                   \
    do {                                                                            \
        valid_call(&g, block, work, need);                                          \
        change;                                                                     \
        CHECK_STATUS(upipe_attn_bwd(&dev.c, &g), UPIPE_ERR_UNSUPPORTED, dev.c.err); \
        CHECK_TEXT(dev.c.err.text, word);                                           \
    } while (0)
#define REFUSED(change, word)      \
    do {                           \
        REFUSED_FWD(change, word); \
        REFUSED_BWD(change, word); \
    } while (0)
    REFUSED(g.a.q.data = block + 8, "q at");
    REFUSED(g.a.q.n_step = 260, "steps of 260 and 64 bf16");
    REFUSED(g.a.k.h_step = 68, "k at");
    REFUSED(g.a.v.data = block + 2, "v at");
    REFUSED_FWD(g.a.o.h_step = 70, "o at");
    REFUSED_FWD((g.a.merge = 1, g.a.o.dtype = UPIPE_F32, g.a.o.n_step = 258), "258 and 64 f32");
    REFUSED_BWD(g.go.data = block + 4, "go at");
    REFUSED_BWD(g.gq.n_step = 257, "gq at");
    REFUSED_BWD(g.gk.n_step = 130, "gk at");
    REFUSED_BWD(g.gv.data = block + 4, "gv at");
    REFUSED_FWD(g.a.o.dtype = UPIPE_F32, "o in f32 beside bf16, but nothing to merge");
    REFUSED(g.a.window = 3, "does not know a sliding window yet");
    REFUSED((g.a.docs = docs, g.a.docs_n = 1), "does not know packed documents yet");
    REFUSED(g.a.softcap = 5, "does not know a soft-cap yet");
    REFUSED(g.a.sinks = (const float *)block, "does not know sinks yet");
    REFUSED((g.a.v.d = g.a.o.d = g.go.d = g.gv.d = 40), "does not know a head dim of v that is not q's yet");
    REFUSED_BWD((g.a.merge = 1, g.gq.dtype = UPIPE_F32),
                "does not know a gradient of q that is added to yet");
#undef REFUSED
#undef REFUSED_FWD
#undef REFUSED_BWD
    valid_call(&g, block, work, need - 1);
    CHECK_STATUS(upipe_attn_bwd(&dev.c, &g), UPIPE_ERR_ARG, dev.c.err);
    CHECK_TEXT(dev.c.err.text, "scratch");
    /* steps that are never taken may be anything */
    valid_call(&g, block, work, need);
    g.a.q.n = g.a.o.n = g.a.lse.n = 0;
    g.a.q.n_step = g.a.o.n_step = 1;
    CHECK_STATUS(upipe_attn_fwd(&dev.c, &g.a), UPIPE_OK, dev.c.err);
    device_get(&dev, image, block, bytes);
    for (at = 0; at < bytes; ++at)
        if (!CHECK(image[at] == (char)0xff)) break;
    free(image);
    device_free(&dev, work);
    device_free(&dev, block);
}

/* None forward; backward f32 sums of dQ and a counter for each tile, whatever the keys. */
static void test_scratch(void)
{
    static const int dims[] = {64, 128, 256};
    size_t i;
    for (i = 0; i < 3; ++i) {
        upipe_attn_grad g;
        size_t sums, need;
        valid_call(&g, NULL, NULL, 0);
        g.a.q.d = dims[i];
        g.a.q.n = 1 << 20;
        sums = (size_t)(4 << 20) * (size_t)dims[i] * 4;
        CHECK_INT(dev.ops.attn_bytes(&dev.ops, &g.a, 0), 0);
        need = dev.ops.attn_bytes(&dev.ops, &g.a, 1);
        CHECK_SAY(need > sums && need - sums <= ((4 << 20) / 32 + 16) * 4, "%zu bytes over %zu", need, sums);
        CHECK_INT(need % 64, 0);
        g.a.k.n = 1 << 22;
        g.a.causal = 1;
        CHECK_INT(dev.ops.attn_bytes(&dev.ops, &g.a, 1), need);
        g.a.q.n = INT64_C(1) << 60;
        CHECK(dev.ops.attn_bytes(&dev.ops, &g.a, 1) == SIZE_MAX);
    }
}

int main(void)
{
    int i;
    if (!device_open(&dev)) return test_end("cuda_attn");
    test_refusals();
    test_scratch();
    for (i = 0; i < 2; ++i) { /* other kernels each */
        storage = i == 0 ? UPIPE_BF16 : UPIPE_F32;
        test_head_dims();
        test_lengths();
        test_pos_steps();
        test_extreme_scores();
        test_low_scores();
        test_merge();
        test_merge_nothing();
        test_same_bits();
        test_prefix();
        test_nan();
        test_one_key();
        test_random();
    }
    printf("digest %016llx\n", (unsigned long long)digest);
    device_close(&dev);
    return test_end("cuda_attn");
}

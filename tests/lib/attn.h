/* attn.h -- attention problems for the CPU's kernels: made, run in any layout, and held to the oracle
 *
 *     oracle_attn t = shape(sq, sk, h, hkv, d, causal, q_pos, k_pos);      masks: its other fields
 *     values in = inputs_make(&t, UPIPE_BF16, &r, 1);
 *     check_case(&t, UPIPE_BF16, GAPS, &in);
 *
 * A layout with gaps has NaNs in them: a kernel that reads one shows it in its results, one that writes one
 * is found by looking.
 */
#ifndef UPIPE_TEST_ATTN_H
#define UPIPE_TEST_ATTN_H

#include "upipe/cpu/upipe_cpu_attn_bf16.h"
#include "upipe/cpu/upipe_cpu_rows.h"
#include "bf16.h"
#include "oracle.h"
#include "test.h"
#include "tolerance.h"
#include "workers.h"

enum { PACKED, HEAD_MAJOR, GAPS, LAYOUTS };

static upipe_dtype types[] = {UPIPE_F32, UPIPE_BF16, UPIPE_F16};

/* What takes the products of bf16, where that is what is tested: then all types are bf16. NULL: vectors. */
static const upi_bf16_unit *attn_unit;

static inline void attn_use(const upi_bf16_unit *unit)
{
    attn_unit = unit;
    types[0] = types[1] = types[2] = UPIPE_BF16;
}

/* Of a program's words: bf16 tests the processor's bf16 instructions, in plain C and where it has them, and all
 * behind it leaves nothing out, which in plain C is slow. Returns 0 for other words. */
static inline int attn_units(int argc, char **argv, void (*test)(const upi_bf16_unit *unit, int all))
{
    if (argc < 2 || strcmp(argv[1], "bf16") != 0) return 0;
    test(&plain_units[0], 0);
    test(&plain_units[1], argc > 2 && strcmp(argv[2], "all") == 0);
    if (upi_bf16_here() != NULL) test(upi_bf16_here(), 1);
    return 1;
}

/* The threads that kernels run on; NULL: the caller's alone. */
static const upipe_par *threads;

/* Packed f32 values of one problem: inputs, or a kernel's results. */
typedef struct values {
    float *q, *k, *v, *dout; /* inputs, already rounded to the storage type */
    float *o, *lse, *dq, *dk, *dv, *dsinks;
} values;

static inline int64_t q_count(const oracle_attn *t)
{
    return t->sq * t->h * t->d;
}

static inline int64_t k_count(const oracle_attn *t)
{
    return t->sk * t->hkv * t->d;
}

static inline int64_t v_count(const oracle_attn *t)
{
    return t->sk * t->hkv * oracle_v_dim(t);
}

static inline int64_t o_count(const oracle_attn *t)
{
    return t->sq * t->h * oracle_v_dim(t);
}

/* n zeros; never NULL. */
static inline float *floats(int64_t n)
{
    float *p = (float *)calloc((size_t)n + 1, sizeof *p);
    if (p == NULL) exit(2);
    return p;
}

static inline double *doubles(const float *from, int64_t n)
{
    double *p = (double *)calloc((size_t)n + 1, sizeof *p);
    int64_t i;
    if (p == NULL) exit(2);
    for (i = 0; from != NULL && i < n; ++i) p[i] = (double)from[i];
    return p;
}

static inline values values_make(const oracle_attn *t)
{
    values x;
    x.q = floats(q_count(t));
    x.dout = floats(o_count(t));
    x.o = floats(o_count(t));
    x.dq = floats(q_count(t));
    x.lse = floats(t->sq * t->h);
    x.k = floats(k_count(t));
    x.v = floats(v_count(t));
    x.dk = floats(k_count(t));
    x.dv = floats(v_count(t));
    x.dsinks = floats(t->h);
    return x;
}

static inline void values_free(values *x)
{
    free(x->q), free(x->k), free(x->v), free(x->dout);
    free(x->o), free(x->lse), free(x->dq), free(x->dk), free(x->dv), free(x->dsinks);
}

static inline void fill(test_rng *r, float *x, int64_t n, upipe_dtype dtype, double size)
{
    int64_t i;
    for (i = 0; i < n; ++i) x[i] = naive_store(dtype, (float)(size * test_normal(r)));
}

/* q, k, v, dout; the scores' deviation is about q_size where scale is 1/sqrt(d). */
static inline values inputs_make(const oracle_attn *t, upipe_dtype dtype, test_rng *r, double q_size)
{
    values x = values_make(t);
    fill(r, x.q, q_count(t), dtype, q_size);
    fill(r, x.k, k_count(t), dtype, 1);
    fill(r, x.v, v_count(t), dtype, 1);
    fill(r, x.dout, o_count(t), dtype, 1);
    return x;
}

/* ---- tensors in a layout ---- */

/* Elements between the end of the last row and the start: the block that a view needs. */
static inline int64_t view_extent(upipe_view v)
{
    return v.n == 0 ? 0 : (v.n - 1) * v.n_step + (v.h - 1) * v.h_step + v.d;
}

/* A view of fresh memory in which every byte is 0xff: NaN in both types. values (or NULL) is packed. */
static inline upipe_view tensor_make(upipe_dtype dtype, int64_t n, int h, int d, int layout,
                                     const float *from)
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
            for (c = 0; c < d; ++c) upipe_cpu_put(upipe_view_at(v, i, j), dtype, c, *from++);
    return v;
}

/* Takes the values out, packed (to may be NULL), checks that every gap still holds 0xff, and frees. */
static inline void tensor_read(upipe_view v, float *to)
{
    int64_t size = (int64_t)upipe_dtype_bytes(v.dtype), bytes = view_extent(v) * size, i, spoilt = 0;
    int j, c;
    for (i = 0; i < v.n; ++i)
        for (j = 0; j < v.h; ++j) {
            for (c = 0; to != NULL && c < v.d; ++c) *to++ = upipe_cpu_get(upipe_view_at(v, i, j), v.dtype, c);
            memset(upipe_view_at(v, i, j), 0xff, (size_t)(v.d * size));
        }
    for (i = 0; i < bytes; ++i) spoilt += ((unsigned char *)v.data)[i] != 0xff;
    CHECK_INT(spoilt, 0);
    free(v.data);
}

static inline upipe_view heads(upipe_view v, int first, int count)
{
    if (v.data != NULL) v.data = upipe_view_at(v, 0, first);
    v.h = count;
    return v;
}

/* ---- the kernels ---- */

static upipe_status unit_fwd(upipe_ctx *c, const upipe_attn *a)
{
    return upi_attn_bf16_fwd(c, a, attn_unit);
}

static upipe_status unit_bwd(upipe_ctx *c, const upipe_attn_grad *g)
{
    return upi_attn_bf16_bwd(c, g, attn_unit);
}

static inline void attn_ops(upipe_ctx *c, upipe_ops *ops)
{
    memset(ops, 0, sizeof *ops);
    memset(c, 0, sizeof *c);
    ops->attn_fwd = attn_unit != NULL ? unit_fwd : upi_cpu_attn_fwd;
    ops->attn_bwd = attn_unit != NULL ? unit_bwd : upi_cpu_attn_bwd;
    ops->attn_bytes = attn_unit != NULL ? upi_attn_bf16_bytes : upi_cpu_attn_bytes;
    ops->attn_can = UPI_ATTN_CAN;
    ops->f16 = 1;
    ops->par = threads;
    c->ops = ops;
}

/* Fills a call from the shape, but for its views. */
static inline void attn_set(upipe_attn *a, const oracle_attn *t)
{
    a->q_pos = t->q_pos;
    a->k_pos = t->k_pos;
    a->pos_step = t->pos_step;
    a->mask.causal = t->causal;
    a->mask.window = t->window;
    a->mask.cu_seqlens = t->cu_seqlens;
    a->mask.cu_seqlens_n = t->cu_seqlens_n;
    a->mask.softcap = (float)t->softcap;
    a->mask.sinks = t->sinks;
    a->scale = (float)t->scale;
}

/* Scratch of one call: exactly as much as is asked for, so that a sanitizer sees one element too many. */
static inline void attn_scratch(upipe_attn *a, const upipe_ops *ops, int backward)
{
    a->work_bytes = ops->attn_bytes(ops, a, backward);
    a->work = aligned_alloc(64, a->work_bytes);
    if (a->work == NULL) exit(2);
    memset(a->work, 0xff, a->work_bytes);
}

/* The sinks' gradients, begun at `start`, from the lse and delta that the kernel was given: summed in f64,
 * rounded once, and added. There are too few of them to be held to naive runs. */
static inline void check_sinks(const oracle_attn *t, upipe_view lse, upipe_view delta, const float *start,
                               const float *got)
{
    int64_t i;
    int x;
    for (x = 0; x < t->h; ++x) {
        double sum = 0, size = fabs((double)start[x]);
        for (i = 0; i < t->sq && !isinf(t->sinks[x]); ++i) {
            double term =
                exp((double)t->sinks[x] - (double)upipe_cpu_get(upipe_view_at(lse, i, x), UPIPE_F32, 0)) *
                (double)upipe_cpu_get(upipe_view_at(delta, i, x), UPIPE_F32, 0);
            sum -= term;
            size += fabs(term);
        }
        CHECK_SAY(fabs((double)got[x] - (double)start[x] - sum) <=
                      (double)FLT_EPSILON * size + (double)FLT_MIN,
                  "dsinks: head %d is %.9g, not %.9g + %.9g", x, (double)got[x], (double)start[x], sum);
    }
}

/* Forward and backward of `in` in a layout, `heads_per_call` query heads at a time (all, or a divisor of a
 * group). out->dk, out->dv and out->dsinks hold the start of the sums.
 * Not inlined: gcc would then warn of views with less than nothing in them. */
__attribute__((noinline, unused)) static void run_kernels(const oracle_attn *t, upipe_dtype dtype, int layout,
                                                          int heads_per_call, const values *in, values *out)
{
    int group = t->h / t->hkv, x, kv_heads = heads_per_call == t->h ? t->hkv : 1;
    upipe_view q = tensor_make(dtype, t->sq, t->h, t->d, layout, in->q);
    upipe_view k = tensor_make(dtype, t->sk, t->hkv, t->d, layout, in->k);
    upipe_view v = tensor_make(dtype, t->sk, t->hkv, oracle_v_dim(t), layout, in->v);
    upipe_view dout = tensor_make(dtype, t->sq, t->h, oracle_v_dim(t), layout, in->dout);
    upipe_view o = tensor_make(dtype, t->sq, t->h, oracle_v_dim(t), layout, NULL);
    upipe_view dq = tensor_make(dtype, t->sq, t->h, t->d, layout, NULL);
    upipe_view dk = tensor_make(UPIPE_F32, t->sk, t->hkv, t->d, layout, out->dk);
    upipe_view dv = tensor_make(UPIPE_F32, t->sk, t->hkv, oracle_v_dim(t), layout, out->dv);
    upipe_view lse = tensor_make(UPIPE_F32, t->sq, t->h, 1, layout, NULL);
    upipe_view delta = tensor_make(UPIPE_F32, t->sq, t->h, 1, layout, NULL);
    float *start = floats(t->h);
    upipe_attn_grad g;
    upipe_ops ops;
    upipe_ctx c;
    int backward;

    memcpy(start, out->dsinks, (size_t)t->h * sizeof *start);
    attn_ops(&c, &ops);
    memset(&g, 0, sizeof g);
    attn_set(&g.a, t);
    for (backward = 0; backward < 2; ++backward)
        for (x = 0; x < t->h; x += heads_per_call) {
            g.a.q = heads(q, x, heads_per_call);
            g.a.o = heads(o, x, heads_per_call);
            g.a.lse = heads(lse, x, heads_per_call);
            g.a.k = heads(k, x / group, kv_heads);
            g.a.v = heads(v, x / group, kv_heads);
            g.dout = heads(dout, x, heads_per_call);
            g.delta = heads(delta, x, heads_per_call);
            g.dq = heads(dq, x, heads_per_call);
            g.dk = heads(dk, x / group, kv_heads);
            g.dv = heads(dv, x / group, kv_heads);
            if (t->sinks != NULL) g.a.mask.sinks = t->sinks + x, g.dsinks = out->dsinks + x;
            attn_scratch(&g.a, &ops, backward);
            if (backward)
                CHECK_STATUS(upipe_attn_bwd(&c, &g), UPIPE_OK, c.err);
            else {
                CHECK_STATUS(upipe_attn_fwd(&c, &g.a), UPIPE_OK, c.err);
                CHECK_STATUS(upi_cpu_rowdot(&c, g.delta, g.dout, g.a.o), UPIPE_OK, c.err);
            }
            free(g.a.work);
        }
    if (t->sinks != NULL) check_sinks(t, lse, delta, start, out->dsinks);
    free(start);
    tensor_read(q, NULL), tensor_read(k, NULL), tensor_read(v, NULL), tensor_read(dout, NULL);
    tensor_read(o, out->o), tensor_read(dq, out->dq), tensor_read(dk, out->dk), tensor_read(dv, out->dv);
    tensor_read(lse, out->lse), tensor_read(delta, NULL);
}

/* ---- against the oracle ---- */

static inline void say_case(const oracle_attn *t, upipe_dtype dtype, int layout)
{
    int64_t e;
    fprintf(
        stderr,
        "  %s layout %d: sq %lld sk %lld h %d hkv %d d %d dv %d causal %d q_pos %lld k_pos %lld scale %g\n",
        upipe_dtype_name(dtype), layout, (long long)t->sq, (long long)t->sk, t->h, t->hkv, t->d,
        oracle_v_dim(t), t->causal, (long long)t->q_pos, (long long)t->k_pos, t->scale);
    fprintf(stderr, "  pos_step %lld window %lld softcap %g sinks %d cu_seqlens", (long long)t->pos_step,
            (long long)t->window, t->softcap, t->sinks != NULL);
    for (e = 0; t->cu_seqlens != NULL && e <= t->cu_seqlens_n; ++e)
        fprintf(stderr, " %lld", (long long)t->cu_seqlens[e]);
    fprintf(stderr, "\n");
}

/* A naive run rounds what is multiplied where the kernels do. */
static inline int naive_way(int way)
{
    return attn_unit != NULL ? way | NAIVE_NARROW | NAIVE_LATE : way;
}

/* The reference and the naive runs of one problem. */
typedef struct answers {
    double *q, *k, *v, *dout, *o, *lse, *dq, *dk, *dv, *dsinks;
    values naive[NAIVE_WAYS];
} answers;

static inline answers answers_make(const oracle_attn *t, upipe_dtype dtype, const values *in)
{
    oracle_attn plain = *t;
    answers x;
    int way;
    x.q = doubles(in->q, q_count(t)), x.dq = doubles(NULL, q_count(t));
    x.k = doubles(in->k, k_count(t)), x.dk = doubles(NULL, k_count(t));
    x.v = doubles(in->v, v_count(t)), x.dv = doubles(NULL, v_count(t));
    x.dout = doubles(in->dout, o_count(t)), x.o = doubles(NULL, o_count(t));
    x.lse = doubles(NULL, t->sq * t->h), x.dsinks = doubles(NULL, t->h);
    oracle_attn_fwd(t, x.q, x.k, x.v, x.o, x.lse);
    oracle_attn_bwd(t, x.q, x.k, x.v, x.dout, x.o, x.lse, x.dq, x.dk, x.dv);
    if (t->sinks != NULL) oracle_attn_sinks_bwd(t, x.dout, x.o, x.lse, x.dsinks);
    for (way = 0; way < NAIVE_WAYS; ++way) {
        values *n = &x.naive[way];
        *n = values_make(t);
        plain.naive = naive_way(way);
        naive_attn_fwd(&plain, dtype, in->q, in->k, in->v, n->o, n->lse);
        naive_attn_bwd(&plain, dtype, in->q, in->k, in->v, in->dout, n->o, n->lse, n->dq, n->dk, n->dv);
    }
    return x;
}

static inline void answers_free(answers *x)
{
    int way;
    for (way = 0; way < NAIVE_WAYS; ++way) values_free(&x->naive[way]);
    free(x->q), free(x->k), free(x->v), free(x->dout), free(x->o), free(x->lse);
    free(x->dq), free(x->dk), free(x->dv), free(x->dsinks);
}

static inline void check_answers(const oracle_attn *t, const values *got, const answers *x)
{
#define CLOSE(tensor, count)                                                     \
    do {                                                                         \
        const float *runs[NAIVE_WAYS];                                           \
        int way;                                                                 \
        for (way = 0; way < NAIVE_WAYS; ++way) runs[way] = x->naive[way].tensor; \
        CHECK_CLOSE(got->tensor, runs, NAIVE_WAYS, x->tensor, count, #tensor);   \
    } while (0)
    CLOSE(o, o_count(t));
    CLOSE(lse, t->sq * t->h);
    CLOSE(dq, q_count(t));
    CLOSE(dk, k_count(t));
    CLOSE(dv, v_count(t));
#undef CLOSE
}

static inline void check_case(const oracle_attn *t, upipe_dtype dtype, int layout, const values *in)
{
    values got = values_make(t);
    answers x = answers_make(t, dtype, in);
    long failed = test_failures;
    run_kernels(t, dtype, layout, t->h, in, &got);
    check_answers(t, &got, &x);
    if (test_failures != failed) say_case(t, dtype, layout);
    values_free(&got);
    answers_free(&x);
}

static inline oracle_attn shape(int64_t sq, int64_t sk, int h, int hkv, int d, int causal, int64_t q_pos,
                                int64_t k_pos)
{
    oracle_attn t;
    memset(&t, 0, sizeof t);
    t.sq = sq, t.sk = sk, t.q_pos = q_pos, t.k_pos = k_pos;
    t.h = h, t.hkv = hkv, t.d = d, t.causal = causal;
    t.scale = (double)(float)(1 / sqrt((double)d));
    return t;
}

/* ---- keys in parts ---- */

/* o and lse of keys seen so far, in plain f32, brought up to those of a part; rounded as it is stored. */
static inline void naive_merge(const oracle_attn *t, upipe_dtype o_dtype, float *o, float *lse,
                               const float *o_part, const float *lse_part)
{
    int64_t i;
    int c, d = oracle_v_dim(t);
    for (i = 0; i < t->sq * t->h; ++i) {
        float top = fmaxf(lse[i], lse_part[i]), a, b;
        if (top == -INFINITY) continue;
        a = expf(lse[i] - top), b = expf(lse_part[i] - top);
        for (c = 0; c < d; ++c)
            o[i * d + c] = naive_store(o_dtype, (a * o[i * d + c] + b * o_part[i * d + c]) / (a + b));
        lse[i] = top + logf(a + b);
    }
}

/* The problem with `count` keys alone, from key `first` on; sinks belong to the one with the last keys. */
static inline oracle_attn piece_of(const oracle_attn *t, int64_t first, int64_t count)
{
    oracle_attn piece = *t;
    piece.sk = count;
    piece.k_pos += first * (t->pos_step != 0 ? t->pos_step : 1);
    if (first + count < t->sk || (count == 0 && t->sk > 0)) piece.sinks = NULL;
    return piece;
}

/* The keys in parts, each merged into the result so far: as in one call. lse begins as -inf, and o as NaNs
 * that are not read. */
static inline void check_merge(const oracle_attn *t, upipe_dtype dtype, upipe_dtype o_dtype, int layout,
                               const values *in, const int64_t *lengths, int parts)
{
    int64_t rows = t->sq * t->h, first = 0, i;
    values got = values_make(t), naive[NAIVE_WAYS], part = values_make(t);
    double *q = doubles(in->q, q_count(t)), *k = doubles(in->k, k_count(t)), *v = doubles(in->v, v_count(t)),
           *o = doubles(NULL, o_count(t)), *lse = doubles(NULL, rows);
    const float *runs_o[NAIVE_WAYS], *runs_lse[NAIVE_WAYS];
    upipe_attn a;
    upipe_ops ops;
    upipe_ctx c;
    int way, p;

    for (i = 0; i < rows; ++i) got.lse[i] = -INFINITY;
    attn_ops(&c, &ops);
    memset(&a, 0, sizeof a);
    a.q = tensor_make(dtype, t->sq, t->h, t->d, layout, in->q);
    a.o = tensor_make(o_dtype, t->sq, t->h, oracle_v_dim(t), layout, NULL);
    a.lse = tensor_make(UPIPE_F32, t->sq, t->h, 1, layout, got.lse);
    for (way = 0; way < NAIVE_WAYS; ++way) {
        naive[way] = values_make(t);
        for (i = 0; i < rows; ++i) naive[way].lse[i] = -INFINITY;
        runs_o[way] = naive[way].o, runs_lse[way] = naive[way].lse;
    }
    for (p = 0; p < parts; first += lengths[p++]) {
        int64_t at = first * t->hkv * t->d, v_at = first * t->hkv * oracle_v_dim(t);
        oracle_attn piece = piece_of(t, first, lengths[p]);
        for (way = 0; way < NAIVE_WAYS; ++way) {
            piece.naive = naive_way(way);
            naive_attn_fwd(&piece, UPIPE_F32, in->q, in->k + at, in->v + v_at, part.o, part.lse);
            naive_merge(t, o_dtype, naive[way].o, naive[way].lse, part.o, part.lse);
        }
        a.k = tensor_make(dtype, lengths[p], t->hkv, t->d, layout, in->k + at);
        a.v = tensor_make(dtype, lengths[p], t->hkv, oracle_v_dim(t), layout, in->v + v_at);
        attn_set(&a, &piece);
        a.merge = 1;
        attn_scratch(&a, &ops, 0);
        CHECK_STATUS(upipe_attn_fwd(&c, &a), UPIPE_OK, c.err);
        free(a.work);
        tensor_read(a.k, NULL), tensor_read(a.v, NULL);
    }
    CHECK_INT(first, t->sk);
    tensor_read(a.q, NULL), tensor_read(a.o, got.o), tensor_read(a.lse, got.lse);
    oracle_attn_fwd(t, q, k, v, o, lse);
    CHECK_CLOSE(got.o, runs_o, NAIVE_WAYS, o, o_count(t), "o, merged");
    CHECK_CLOSE(got.lse, runs_lse, NAIVE_WAYS, lse, rows, "lse, merged");
    values_free(&got), values_free(&part);
    for (way = 0; way < NAIVE_WAYS; ++way) values_free(&naive[way]);
    free(q), free(k), free(v), free(o), free(lse);
}

/* ---- the same bits ---- */

static inline void check_same(const oracle_attn *t, const values *a, const values *b)
{
    CHECK_BYTES(a->o, b->o, o_count(t) * 4);
    CHECK_BYTES(a->lse, b->lse, t->sq * t->h * 4);
    CHECK_BYTES(a->dq, b->dq, q_count(t) * 4);
    CHECK_BYTES(a->dk, b->dk, k_count(t) * 4);
    CHECK_BYTES(a->dv, b->dv, v_count(t) * 4);
    CHECK_BYTES(a->dsinks, b->dsinks, t->h * 4);
}

/* ---- refusals ---- */

/* A call that would work: 8 queries, 8 keys, 4 heads over 2, d 64, f32; every pointer into one block. */
static inline void valid_call(upipe_attn_grad *g, float *block, void *work, size_t work_bytes)
{
    upipe_view q = upipe_view_packed(block, UPIPE_F32, 8, 4, 64),
               k = upipe_view_packed(block, UPIPE_F32, 8, 2, 64);
    upipe_view row = upipe_view_packed(block, UPIPE_F32, 8, 4, 1);
    memset(g, 0, sizeof *g);
    g->a.q = q, g->a.k = k, g->a.v = k, g->a.o = q, g->a.lse = row;
    g->dout = q, g->dq = q, g->delta = row, g->dk = k, g->dv = k;
    g->a.work = work;
    g->a.work_bytes = work_bytes;
}

#endif

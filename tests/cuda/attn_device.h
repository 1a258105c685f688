/* attn_device.h -- attention problems for the CUDA kernels: made, run in any layout, and held to the oracle
 *
 *     oracle_attn t = shape(sq, sk, h, hkv, d, causal, q_pos, k_pos);      masks: its other fields
 *     values in = inputs_make(&t, &r, 1);
 *     check_case(&t, GAPS, &in);
 *
 * The yardstick is the naive implementation with the operands of a tensor core (NAIVE_NARROW). Tensors lie in
 * device memory that is full of NaNs elsewhere: a kernel that reads a gap shows it in its results, one that
 * writes to a gap, or around a tensor, is found by looking.
 */
#ifndef UPIPE_TEST_ATTN_DEVICE_H
#define UPIPE_TEST_ATTN_DEVICE_H

#include "../lib/oracle.h"
#include "../lib/tolerance.h"
#include "upipe/upipe_attn.h"
#include "cuda/device.h"

enum { PACKED, HEAD_MAJOR, GAPS, LAYOUTS, GUARD = 512 };

static device dev;
static upipe_dtype storage = UPIPE_BF16; /* of q, k, v and o */
static uint64_t digest;                  /* of all results: runs with other schedules must repeat it */

/* Packed f32 values of one problem: inputs, or a kernel's results. */
typedef struct values {
    float *q, *k, *v, *dout; /* inputs, already rounded to bf16 */
    float *o, *lse, *dq, *dk, *dv, *dsinks;
} values;

/* The f32 kernels ask for no capability: where the fake plays a device of 9.0, the run on that of 8.0 has tried them. */
__attribute__((unused)) static int same_as_before(upipe_dtype dtype)
{
#ifdef FAKE_CUDA_RUNTIME_API_H
    return dtype == UPIPE_F32 && dev.cuda.capability / 10 == 9;
#else
    (void)dtype;
    return 0;
#endif
}

static int64_t q_count(const oracle_attn *t)
{
    return t->sq * t->h * t->d;
}

static int64_t k_count(const oracle_attn *t)
{
    return t->sk * t->hkv * t->d;
}

static int64_t v_count(const oracle_attn *t)
{
    return t->sk * t->hkv * oracle_v_dim(t);
}

static int64_t o_count(const oracle_attn *t)
{
    return t->sq * t->h * oracle_v_dim(t);
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
    x.q = floats(q_count(t)), x.dq = floats(q_count(t));
    x.k = floats(k_count(t)), x.dk = floats(k_count(t));
    x.v = floats(v_count(t)), x.dv = floats(v_count(t));
    x.o = floats(o_count(t)), x.dout = floats(o_count(t));
    x.lse = floats(t->sq * t->h), x.dsinks = floats(t->h);
    return x;
}

static void values_free(values *x)
{
    free(x->q), free(x->k), free(x->v), free(x->dout);
    free(x->o), free(x->lse), free(x->dq), free(x->dk), free(x->dv), free(x->dsinks);
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
    fill(r, x.v, v_count(t), storage, 1);
    fill(r, x.dout, o_count(t), storage, 1);
    return x;
}

/* ---- tensors on the device ---- */

typedef struct tensor {
    upipe_view v; /* on the device */
    char *buf;    /* what it lies in */
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
    t.buf = (char *)device_new(&dev, t.bytes + 2 * GUARD);
    t.v.data = t.buf + GUARD;
    image = (char *)malloc(t.bytes + 2 * GUARD);
    if (image == NULL) exit(2);
    memset(image, 0xff, t.bytes + 2 * GUARD);
    host = on_host(&t, image);
    for (i = 0; from != NULL && i < n; ++i)
        for (j = 0; j < h; ++j)
            for (c = 0; c < d; ++c) upipe_cpu_put(upipe_view_at(host, i, j), dtype, c, *from++);
    device_put(&dev, t.buf, image, t.bytes + 2 * GUARD);
    free(image);
    return t;
}

/* Takes the values out, packed (to may be NULL), checks that all else still holds 0xff, and frees. */
static void tensor_read(tensor *t, float *to)
{
    size_t at, bytes = t->bytes + 2 * GUARD, row = (size_t)t->v.d * upipe_dtype_bytes(t->v.dtype);
    char *image = (char *)malloc(bytes);
    upipe_view host = on_host(t, image);
    long spoilt = 0;
    int64_t i;
    int j, c;
    if (image == NULL) exit(2);
    device_get(&dev, image, t->buf, bytes);
    for (at = 0; at < bytes; ++at) digest = (digest ^ (unsigned char)image[at]) * 0x100000001b3u;
    for (i = 0; i < t->v.n; ++i)
        for (j = 0; j < t->v.h; ++j) {
            for (c = 0; to != NULL && c < t->v.d; ++c)
                *to++ = upipe_cpu_get(upipe_view_at(host, i, j), t->v.dtype, c);
            memset(upipe_view_at(host, i, j), 0xff, row);
        }
    for (at = 0; at < bytes; ++at) spoilt += image[at] != (char)0xff;
    CHECK_INT(spoilt, 0);
    free(image);
    device_free(&dev, t->buf);
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

/* What a call takes from the shape, but for its views and its sinks. The kernels may not look at cu_seqlens when the
 * call has returned: it is `buffer` that they get, and that is spoilt then. */
static void attn_set(upipe_attn *a, const oracle_attn *t, int64_t *buf)
{
    memset(a, 0, sizeof *a);
    a->q_pos = t->q_pos;
    a->k_pos = t->k_pos;
    a->pos_step = t->pos_step;
    a->mask.causal = t->causal;
    a->mask.window = t->window;
    a->mask.cu_seqlens = t->cu_seqlens != NULL ? buf : NULL;
    a->mask.cu_seqlens_n = t->cu_seqlens_n;
    a->mask.softcap = (float)t->softcap;
    a->scale = (float)t->scale;
}

static int64_t *cu_seqlens_alloc(const oracle_attn *t)
{
    int64_t *buf = (int64_t *)malloc(((size_t)t->cu_seqlens_n + 1) * sizeof *buf);
    if (buf == NULL) exit(2);
    return buf;
}

static void cu_seqlens_set(int64_t *buf, const oracle_attn *t)
{
    if (t->cu_seqlens != NULL) memcpy(buf, t->cu_seqlens, ((size_t)t->cu_seqlens_n + 1) * sizeof *buf);
}

static void cu_seqlens_spoil(int64_t *buf, const oracle_attn *t)
{
    memset(buf, 0x7f, ((size_t)t->cu_seqlens_n + 1) * sizeof *buf);
}

/* The call, with scratch and packed sequences of its own. */
static void call_kernel(upipe_attn_grad *g, const oracle_attn *t, int64_t *cu_seqlens, int backward)
{
    cu_seqlens_set(cu_seqlens, t);
    work_make(&g->a, backward);
    CHECK_STATUS(backward ? upipe_attn_bwd(&dev.c, g) : upipe_attn_fwd(&dev.c, &g->a), UPIPE_OK, dev.c.err);
    cu_seqlens_spoil(cu_seqlens, t);
    device_free(&dev, g->a.work);
}

/* The sinks' gradients, begun at `start`, from the lse and delta that the kernel was given: summed in f64, rounded
 * once, and added. There are too few of them to be held to naive runs. */
static void check_sinks(const oracle_attn *t, const float *lse, const float *delta, const float *start,
                        const float *got)
{
    int64_t i;
    int x;
    for (x = 0; x < t->h; ++x) {
        double sum = 0, size = fabs((double)start[x]);
        for (i = 0; i < t->sq && !isinf(t->sinks[x]); ++i) {
            double term = exp((double)t->sinks[x] - (double)lse[i * t->h + x]) * (double)delta[i * t->h + x];
            sum -= term;
            size += fabs(term);
        }
        CHECK_SAY(fabs((double)got[x] - (double)start[x] - sum) <=
                      (double)FLT_EPSILON * size + (double)FLT_MIN,
                  "dsinks: head %d is %.9g, not %.9g + %.9g", x, (double)got[x], (double)start[x], sum);
    }
}

/* Forward and backward of `in` in a layout, `heads_per_call` query heads at a time (all, or a divisor of a
 * group). out->dk, out->dv and out->dsinks hold the start of the sums. */
static void run_kernels(const oracle_attn *t, int layout, int heads_per_call, const values *in, values *out)
{
    int group = t->h / t->hkv, x, backward, kv_heads = heads_per_call == t->h ? t->hkv : 1;
    int d = t->d, v_dim = oracle_v_dim(t);
    tensor q = tensor_make(storage, t->sq, t->h, d, layout, in->q);
    tensor k = tensor_make(storage, t->sk, t->hkv, d, layout, in->k);
    tensor v = tensor_make(storage, t->sk, t->hkv, v_dim, layout, in->v);
    tensor dout = tensor_make(storage, t->sq, t->h, v_dim, layout, in->dout);
    tensor o = tensor_make(storage, t->sq, t->h, v_dim, layout, NULL);
    tensor dq = tensor_make(storage, t->sq, t->h, d, layout, NULL);
    tensor dk = tensor_make(UPIPE_F32, t->sk, t->hkv, d, layout, out->dk);
    tensor dv = tensor_make(UPIPE_F32, t->sk, t->hkv, v_dim, layout, out->dv);
    tensor lse = tensor_make(UPIPE_F32, t->sq, t->h, 1, layout, NULL);
    tensor delta = tensor_make(UPIPE_F32, t->sq, t->h, 1, layout, NULL);
    tensor sinks = tensor_make(UPIPE_F32, 1, 1, t->h, PACKED, t->sinks);
    tensor dsinks = tensor_make(UPIPE_F32, 1, 1, t->h, PACKED, out->dsinks);
    float *start = floats(t->h), *deltas = floats(t->sq * t->h);
    int64_t *cu_seqlens = cu_seqlens_alloc(t);
    upipe_attn_grad g;
    memcpy(start, out->dsinks, (size_t)t->h * sizeof *start);
    memset(&g, 0, sizeof g);
    attn_set(&g.a, t, cu_seqlens);
    for (backward = 0; backward < 2; ++backward) {
        for (x = 0; x < t->h; x += heads_per_call) {
            g.a.q = heads(&q, x, heads_per_call);
            g.a.lse = heads(&lse, x, heads_per_call);
            g.a.k = heads(&k, x / group, kv_heads);
            g.a.v = heads(&v, x / group, kv_heads);
            /* the backward does not read o */
            g.a.o = backward ? upipe_view_packed(NULL, storage, 0, 0, 0) : heads(&o, x, heads_per_call);
            g.dout = heads(&dout, x, heads_per_call);
            g.delta = heads(&delta, x, heads_per_call);
            g.dq = heads(&dq, x, heads_per_call);
            g.dk = heads(&dk, x / group, kv_heads);
            g.dv = heads(&dv, x / group, kv_heads);
            if (t->sinks != NULL) {
                g.a.mask.sinks = (const float *)sinks.v.data + x;
                g.dsinks = (float *)dsinks.v.data + x;
            }
            call_kernel(&g, t, cu_seqlens, backward);
        }
        if (backward) continue;
        /* the table's own sum: in f32 it cancels dP of a query that sees one key */
        CHECK_STATUS(dev.ops.rowdot(&dev.c, delta.v, o.v, dout.v), UPIPE_OK, dev.c.err);
        tensor_read(&o, out->o);
    }
    tensor_read(&q, NULL), tensor_read(&k, NULL), tensor_read(&v, NULL), tensor_read(&dout, NULL);
    tensor_read(&dq, out->dq), tensor_read(&dk, out->dk), tensor_read(&dv, out->dv);
    tensor_read(&lse, out->lse), tensor_read(&delta, deltas);
    tensor_read(&sinks, NULL), tensor_read(&dsinks, out->dsinks);
    if (t->sinks != NULL) check_sinks(t, out->lse, deltas, start, out->dsinks);
    free(start), free(deltas), free(cu_seqlens);
}

/* ---- against the oracle ---- */

static void say_case(const oracle_attn *t, int layout)
{
    int64_t e;
    fprintf(
        stderr,
        "  %s layout %d: sq %lld sk %lld h %d hkv %d d %d dv %d causal %d q_pos %lld k_pos %lld scale %g\n",
        upipe_dtype_name(storage), layout, (long long)t->sq, (long long)t->sk, t->h, t->hkv, t->d,
        oracle_v_dim(t), t->causal, (long long)t->q_pos, (long long)t->k_pos, t->scale);
    fprintf(stderr, "  pos_step %lld window %lld softcap %g sinks %d cu_seqlens", (long long)t->pos_step,
            (long long)t->window, t->softcap, t->sinks != NULL);
    for (e = 0; t->cu_seqlens != NULL && e <= t->cu_seqlens_n; ++e)
        fprintf(stderr, " %lld", (long long)t->cu_seqlens[e]);
    fprintf(stderr, "\n");
}

/* The truth, and what naive runs give, of one problem. */
typedef struct answers {
    double *q, *k, *v, *dout, *o, *lse, *dq, *dk, *dv;
    values naive[NAIVE_WAYS];
    int ways; /* that were run: more are only where these leave too little buffer */
} answers;

/* One more naive run. */
static void answers_more(answers *x, const oracle_attn *t, const values *in)
{
    oracle_attn plain = *t;
    values *n = &x->naive[x->ways];
    *n = values_make(t);
    plain.naive = x->ways++ | NAIVE_NARROW;
    naive_attn_fwd(&plain, storage, in->q, in->k, in->v, n->o, n->lse);
    naive_attn_bwd(&plain, storage, in->q, in->k, in->v, in->dout, n->o, n->lse, n->dq, n->dk, n->dv);
}

static answers answers_make(const oracle_attn *t, const values *in)
{
    answers x;
    x.q = doubles(in->q, q_count(t)), x.dq = doubles(NULL, q_count(t));
    x.k = doubles(in->k, k_count(t)), x.dk = doubles(NULL, k_count(t));
    x.v = doubles(in->v, v_count(t)), x.dv = doubles(NULL, v_count(t));
    x.dout = doubles(in->dout, o_count(t)), x.o = doubles(NULL, o_count(t));
    x.lse = doubles(NULL, t->sq * t->h);
    x.ways = 0;
    oracle_attn_fwd(t, x.q, x.k, x.v, x.o, x.lse);
    oracle_attn_bwd(t, x.q, x.k, x.v, x.dout, x.o, x.lse, x.dq, x.dk, x.dv);
    answers_more(&x, t, in);
    return x;
}

static void answers_free(answers *x)
{
    while (x->ways > 0) values_free(&x->naive[--x->ways]);
    free(x->q), free(x->k), free(x->v), free(x->dout), free(x->o), free(x->lse);
    free(x->dq), free(x->dk), free(x->dv);
}

static void check_answers(const oracle_attn *t, const values *in, const values *got, answers *x)
{
    const struct {
        const char *name;
        const float *got;
        const double *want;
        int64_t count;
    } all[] = {{"o", got->o, x->o, o_count(t)},
               {"lse", got->lse, x->lse, t->sq * t->h},
               {"dq", got->dq, x->dq, q_count(t)},
               {"dk", got->dk, x->dk, k_count(t)},
               {"dv", got->dv, x->dv, v_count(t)}};
    size_t i;
    for (i = 0; i < sizeof all / sizeof *all; ++i)
        for (;;) {
            const float *runs[NAIVE_WAYS];
            tolerance_error naive, own;
            double floor;
            int way;
            for (way = 0; way < x->ways; ++way) {
                const values *n = &x->naive[way];
                const float *of[] = {n->o, n->lse, n->dq, n->dk, n->dv};
                runs[way] = of[i];
            }
            naive = tolerance_naive(runs, x->ways, all[i].want, all[i].count);
            /* the bound only grows with more runs */
            if (x->ways < NAIVE_WAYS &&
                !tolerance_holds(all[i].got, naive, all[i].want, all[i].count, &own, &floor)) {
                answers_more(x, t, in);
                continue;
            }
            CHECK_CLOSE_TO(all[i].got, naive, all[i].want, all[i].count, all[i].name);
            break;
        }
}

static void check_case(const oracle_attn *t, int layout, const values *in)
{
    values got = values_make(t);
    long failed = test_failures;
    run_kernels(t, layout, t->h, in, &got);
    if (compares()) {
        answers x = answers_make(t, in);
        check_answers(t, in, &got, &x);
        answers_free(&x);
    }
    if (test_failures != failed) say_case(t, layout);
    values_free(&got);
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

/* ---- keys in parts ---- */

/* o and lse of keys seen so far, in plain f32, brought up to those of a part; rounded as it is stored. */
static void naive_merge(const oracle_attn *t, upipe_dtype o_dtype, float *o, float *lse, const float *o_part,
                        const float *lse_part)
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
static oracle_attn piece_of(const oracle_attn *t, int64_t first, int64_t count)
{
    oracle_attn piece = *t;
    piece.sk = count;
    piece.k_pos += first * (t->pos_step != 0 ? t->pos_step : 1);
    if (first + count < t->sk || (count == 0 && t->sk > 0)) piece.sinks = NULL;
    return piece;
}

/* The keys in parts, each merged into what came before: as in one call. The first one writes o and lse, or
 * (begun) merges too: lse begins as -inf, and o as NaNs that are not read. */
static void check_merge(const oracle_attn *t, upipe_dtype o_dtype, int layout, int begun, const values *in,
                        const int64_t *lengths, int parts)
{
    int64_t nq = o_count(t), rows = t->sq * t->h, first = 0, i;
    values got = values_make(t), naive[NAIVE_WAYS], part = values_make(t);
    double *q = doubles(in->q, q_count(t)), *k = doubles(in->k, k_count(t)), *v = doubles(in->v, v_count(t)),
           *o = doubles(NULL, nq), *lse = doubles(NULL, rows);
    const float *runs_o[NAIVE_WAYS], *runs_lse[NAIVE_WAYS];
    int64_t *cu_seqlens = cu_seqlens_alloc(t);
    tensor at_q, at_k, at_v, at_o, at_lse, sinks;
    upipe_attn_grad g;
    upipe_attn *a = &g.a;
    int way, p;

    for (i = 0; i < rows; ++i) got.lse[i] = -INFINITY;
    memset(&g, 0, sizeof g);
    at_q = tensor_make(storage, t->sq, t->h, t->d, layout, in->q);
    at_o = tensor_make(o_dtype, t->sq, t->h, oracle_v_dim(t), layout, NULL);
    at_lse = tensor_make(UPIPE_F32, t->sq, t->h, 1, layout, begun ? got.lse : NULL);
    sinks = tensor_make(UPIPE_F32, 1, 1, t->h, PACKED, t->sinks);
    for (way = 0; way < NAIVE_WAYS; ++way) {
        naive[way] = values_make(t);
        for (i = 0; i < rows; ++i) naive[way].lse[i] = -INFINITY;
        runs_o[way] = naive[way].o, runs_lse[way] = naive[way].lse;
    }
    for (p = 0; p < parts; first += lengths[p++]) {
        int64_t at = first * t->hkv * t->d, v_at = first * t->hkv * oracle_v_dim(t);
        oracle_attn piece = piece_of(t, first, lengths[p]);
        for (way = 0; way < NAIVE_WAYS && compares(); ++way) {
            piece.naive = way | NAIVE_NARROW;
            naive_attn_fwd(&piece, storage, in->q, in->k + at, in->v + v_at, part.o, part.lse);
            naive_merge(t, o_dtype, naive[way].o, naive[way].lse, part.o, part.lse);
        }
        at_k = tensor_make(storage, lengths[p], t->hkv, t->d, layout, in->k + at);
        at_v = tensor_make(storage, lengths[p], t->hkv, oracle_v_dim(t), layout, in->v + v_at);
        attn_set(a, &piece, cu_seqlens);
        a->q = at_q.v, a->o = at_o.v, a->lse = at_lse.v;
        a->k = at_k.v, a->v = at_v.v;
        a->mask.sinks = piece.sinks != NULL ? (const float *)sinks.v.data : NULL;
        a->merge = begun || p > 0;
        call_kernel(&g, t, cu_seqlens, 0);
        tensor_read(&at_k, NULL), tensor_read(&at_v, NULL);
    }
    CHECK_INT(first, t->sk);
    tensor_read(&at_q, NULL), tensor_read(&at_o, got.o), tensor_read(&at_lse, got.lse);
    tensor_read(&sinks, NULL);
    if (compares()) {
        oracle_attn_fwd(t, q, k, v, o, lse);
        CHECK_CLOSE(got.o, runs_o, NAIVE_WAYS, o, nq, "o, merged");
        CHECK_CLOSE(got.lse, runs_lse, NAIVE_WAYS, lse, rows, "lse, merged");
    }
    values_free(&got), values_free(&part);
    for (way = 0; way < NAIVE_WAYS; ++way) values_free(&naive[way]);
    free(q), free(k), free(v), free(o), free(lse), free(cu_seqlens);
}

/* ---- the same bits ---- */

static void check_same(const oracle_attn *t, const values *a, const values *b)
{
    CHECK_BYTES(a->o, b->o, o_count(t) * 4);
    CHECK_BYTES(a->lse, b->lse, t->sq * t->h * 4);
    CHECK_BYTES(a->dq, b->dq, q_count(t) * 4);
    CHECK_BYTES(a->dk, b->dk, k_count(t) * 4);
    CHECK_BYTES(a->dv, b->dv, v_count(t) * 4);
    CHECK_BYTES(a->dsinks, b->dsinks, t->h * 4);
}

static values start_from(const oracle_attn *t, const values *one)
{
    values x = values_make(t);
    memcpy(x.dk, one->dk, (size_t)k_count(t) * 4);
    memcpy(x.dv, one->dv, (size_t)v_count(t) * 4);
    memcpy(x.dsinks, one->dsinks, (size_t)t->h * 4);
    return x;
}

#endif

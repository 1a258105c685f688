/* attn.h -- attention problems for any table's kernels: made, run in any layout, and held to the oracle
 *
 *     cpu_place();                                                         or another place's: here
 *     oracle_attn t = shape(sq, sk, h, hkv, d, causal, q_pos, k_pos);      masks: its other fields
 *     values in = inputs_make(&t, UPIPE_BF16, &r, 1);
 *     check_case(&t, UPIPE_BF16, GAPS, &in);
 *     buffers_free(0);
 *
 * `here` is the place whose kernels are checked: attn_cpu.h is the CPU, cuda/attn_place.h a device, emulated or real. All
 * tensors are tensors.h's, so that a kernel that reads a gap shows it in its results, and one that writes one is found
 * by looking. Everything is freed with tensors.h's list.
 */
#ifndef UPIPE_TEST_ATTN_H
#define UPIPE_TEST_ATTN_H

#include "upipe/upipe_attn.h"
#include "oracle.h"
#include "tensors.h"
#include "tolerance.h"

/* Indices of here.layouts; PACKED is 0. */
enum { GAPS = 2, ATTN_LAYOUTS = 3 };

typedef struct place {
    upipe_ctx *c;              /* with the table; its memory is the host's (cuda/staged.h) */
    upipe_dtype types[3];      /* storage types that cases take in turn */
    int layouts[ATTN_LAYOUTS]; /* that the kernels take: packed, heads first, with gaps */
    int naive;                 /* how naive runs round what is multiplied: as the kernels do (oracle.h) */
    int compares;              /* whether results are held to the oracle, or only the accesses count */
    int brief;                 /* a share of the shapes */
} place;

static place here;

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

/* NULL: zeros */
static inline double *doubles(const float *from, int64_t n)
{
    double *p = (double *)listed(calloc((size_t)n + 1, sizeof *p));
    for (int64_t i = 0; from != NULL && i < n; ++i) p[i] = (double)from[i];
    return p;
}

static inline values values_make(const oracle_attn *t)
{
    values x;
    x.q = floats(q_count(t)), x.dq = floats(q_count(t));
    x.k = floats(k_count(t)), x.dk = floats(k_count(t));
    x.v = floats(v_count(t)), x.dv = floats(v_count(t));
    x.o = floats(o_count(t)), x.dout = floats(o_count(t));
    x.lse = floats(t->sq * t->h), x.dsinks = floats(t->h);
    return x;
}

static inline void fill(test_rng *r, float *x, int64_t n, upipe_dtype dtype, double size)
{
    for (int64_t i = 0; i < n; ++i) x[i] = naive_store(dtype, (float)(size * test_normal(r)));
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

/* Zeros, but for the starts of sums. */
static inline values start_from(const oracle_attn *t, const values *one)
{
    values x = values_make(t);
    memcpy(x.dk, one->dk, (size_t)k_count(t) * 4);
    memcpy(x.dv, one->dv, (size_t)v_count(t) * 4);
    memcpy(x.dsinks, one->dsinks, (size_t)t->h * 4);
    return x;
}

static inline oracle_attn shape(int64_t sq, int64_t sk, int h, int hkv, int d, int causal, int64_t q_pos,
                                int64_t k_pos)
{
    oracle_attn t = {0};
    t.sq = sq, t.sk = sk, t.q_pos = q_pos, t.k_pos = k_pos;
    t.h = h, t.hkv = hkv, t.d = d, t.causal = causal;
    t.scale = (double)(float)(1 / sqrt((double)d));
    return t;
}

/* ---- tensors in a layout ---- */

/* Packed values (or NULL: NaNs) in a layout of here. Without rows there is no memory. */
static inline upipe_view placed(upipe_dtype dtype, int64_t n, int h, int d, int layout, const float *from)
{
    upipe_view v = laid_out(dtype, n, h, d, here.layouts[layout]);
    if (n > 0) v.data = buffer(view_bytes(v));
    for (int64_t i = 0; from != NULL && i < n; ++i)
        for (int j = 0; j < h; ++j)
            for (int c = 0; c < d; ++c) upipe_cpu_put(upipe_view_at(v, i, j), dtype, c, *from++);
    return v;
}

/* Takes the values out, packed (to may be NULL), and checks that every gap still holds 0xff. */
static inline void read_back(upipe_view v, float *to)
{
    for (int64_t i = 0; to != NULL && i < v.n; ++i)
        for (int j = 0; j < v.h; ++j)
            for (int c = 0; c < v.d; ++c) *to++ = upipe_cpu_get(upipe_view_at(v, i, j), v.dtype, c);
    CHECK(gaps_whole(v));
}

static inline upipe_view heads(upipe_view v, int first, int count)
{
    if (v.data != NULL) v.data = upipe_view_at(v, 0, first);
    v.h = count;
    return v;
}

/* ---- the kernels ---- */

/* Fills a call from the shape, but for its views. */
static inline void attn_set(upipe_attn *a, const oracle_attn *t)
{
    a->q_pos = t->q_pos;
    a->k_pos = t->k_pos;
    a->pos_step = t->pos_step;
    a->mask.causal = t->causal;
    a->mask.window = t->window;
    a->mask.borders.cu_seqlens = t->cu_seqlens;
    a->mask.borders.cu_seqlens_n = t->cu_seqlens_n;
    a->mask.softcap = (float)t->softcap;
    a->mask.sinks = t->sinks;
    a->scale = (float)t->scale;
}

/* One call, backward or forward, with scratch of its own: exactly as much as is asked for, so that a sanitizer sees one
 * element too many. */
static inline void call_kernel(upipe_attn_grad *g, int backward)
{
    upipe_ctx *c = here.c;
    g->a.work_bytes = c->ops->attn_bytes(c->ops, &g->a, backward);
    g->a.work = NULL;
    if (g->a.work_bytes > 0 && posix_memalign(&g->a.work, 64, g->a.work_bytes) != 0) exit(2);
    if (g->a.work != NULL) memset(g->a.work, 0xff, g->a.work_bytes);
    CHECK_STATUS(backward ? upipe_attn_bwd(c, g) : upipe_attn_fwd(c, &g->a), UPIPE_OK, c->err);
    free(g->a.work);
}

/* The sinks' gradients, begun at `start`, from the lse and delta that the kernel was given: summed in f64,
 * rounded once, and added. There are too few of them to be held to naive runs. */
static inline void check_sinks(const oracle_attn *t, const float *lse, const float *delta, const float *start,
                               const float *got)
{
    for (int x = 0; x < t->h; ++x) {
        double sum = 0, size = fabs((double)start[x]);
        for (int64_t i = 0; i < t->sq && !isinf(t->sinks[x]); ++i) {
            if (oracle_outside(t, i)) continue;
            double term = exp((double)t->sinks[x] - (double)lse[i * t->h + x]) * (double)delta[i * t->h + x];
            sum -= term;
            size += fabs(term);
        }
        CHECK_SAY(fabs((double)got[x] - (double)start[x] - sum) <=
                      (double)FLT_EPSILON * size + (double)FLT_MIN,
                  "dsinks: head %d is %.9g, not %.9g + %.9g", x, (double)got[x], (double)start[x], sum);
    }
}

/* Forward of `in` in a layout, and backward, `heads_per_call` query heads at a time (all, or a divisor of a
 * group). out->dk, out->dv and out->dsinks hold the start of the sums. */
static inline void run_directions(const oracle_attn *t, upipe_dtype dtype, int layout, int heads_per_call,
                                  const values *in, values *out, int directions)
{
    const int group = t->h / t->hkv, kv_heads = heads_per_call == t->h ? t->hkv : 1, mark = buffers_n;
    const int v_dim = oracle_v_dim(t);
    const int64_t sq = directions > 1 ? t->sq : 0, sk = directions > 1 ? t->sk : 0; /* of gradients */
    const upipe_view q = placed(dtype, t->sq, t->h, t->d, layout, in->q);
    const upipe_view k = placed(dtype, t->sk, t->hkv, t->d, layout, in->k);
    const upipe_view v = placed(dtype, t->sk, t->hkv, v_dim, layout, in->v);
    const upipe_view o = placed(dtype, t->sq, t->h, v_dim, layout, NULL);
    const upipe_view lse = placed(UPIPE_F32, t->sq, t->h, 1, layout, NULL);
    const upipe_view dout = placed(dtype, sq, t->h, v_dim, layout, in->dout);
    const upipe_view dq = placed(dtype, sq, t->h, t->d, layout, NULL);
    const upipe_view dk = placed(UPIPE_F32, sk, t->hkv, t->d, layout, out->dk);
    const upipe_view dv = placed(UPIPE_F32, sk, t->hkv, v_dim, layout, out->dv);
    const upipe_view delta = placed(UPIPE_F32, sq, t->h, 1, layout, NULL);
    float *start = (float *)copy_of(out->dsinks, (size_t)t->h * sizeof *start),
          *deltas = floats(t->sq * t->h);
    upipe_attn_grad g = {0};
    attn_set(&g.a, t);
    for (int backward = 0; backward < directions; ++backward) {
        for (int x = 0; x < t->h; x += heads_per_call) {
            g.a.q = heads(q, x, heads_per_call);
            g.a.lse = heads(lse, x, heads_per_call);
            g.a.k = heads(k, x / group, kv_heads);
            g.a.v = heads(v, x / group, kv_heads);
            /* the backward does not read o */
            g.a.o = backward ? upipe_view_packed(NULL, dtype, 0, 0, 0) : heads(o, x, heads_per_call);
            g.dout = heads(dout, x, heads_per_call);
            g.delta = heads(delta, x, heads_per_call);
            g.dq = heads(dq, x, heads_per_call);
            g.dk = heads(dk, x / group, kv_heads);
            g.dv = heads(dv, x / group, kv_heads);
            if (t->sinks != NULL) g.a.mask.sinks = t->sinks + x, g.dsinks = out->dsinks + x;
            call_kernel(&g, backward);
        }
        if (!backward && directions > 1)
            /* the table's own sum: in f32 it cancels dP of a query that sees one key */
            CHECK_STATUS(here.c->ops->rowdot(here.c, delta, o, dout), UPIPE_OK, here.c->err);
    }
    read_back(q, NULL), read_back(k, NULL), read_back(v, NULL);
    read_back(o, out->o), read_back(lse, out->lse);
    if (directions > 1) {
        read_back(dout, NULL), read_back(delta, deltas);
        read_back(dq, out->dq), read_back(dk, out->dk), read_back(dv, out->dv);
        if (t->sinks != NULL) check_sinks(t, out->lse, deltas, start, out->dsinks);
    }
    buffers_free(mark);
}

static inline void run_kernels(const oracle_attn *t, upipe_dtype dtype, int layout, int heads_per_call,
                               const values *in, values *out)
{
    run_directions(t, dtype, layout, heads_per_call, in, out, 2);
}

/* ---- against the oracle ---- */

static inline void say_case(const oracle_attn *t, upipe_dtype dtype, int layout)
{
    fprintf(
        stderr,
        "  %s layout %d: sq %lld sk %lld h %d hkv %d d %d dv %d causal %d q_pos %lld k_pos %lld scale %g\n",
        upipe_dtype_name(dtype), layout, (long long)t->sq, (long long)t->sk, t->h, t->hkv, t->d,
        oracle_v_dim(t), t->causal, (long long)t->q_pos, (long long)t->k_pos, t->scale);
    fprintf(stderr, "  pos_step %lld window %lld softcap %g sinks %d cu_seqlens", (long long)t->pos_step,
            (long long)t->window, t->softcap, t->sinks != NULL);
    for (int64_t e = 0; t->cu_seqlens != NULL && e <= t->cu_seqlens_n; ++e)
        fprintf(stderr, " %lld", (long long)t->cu_seqlens[e]);
    fprintf(stderr, "\n");
}

/* The truth, and what naive runs give, of one problem. */
typedef struct answers {
    const values *in;
    upipe_dtype dtype, sums; /* what naive runs store o in, and dq */
    double *q, *k, *v, *dout, *o, *lse, *dq, *dk, *dv, *dsinks;
    values naive[NAIVE_WAYS];
    int ways, directions;
} answers;

/* What naive runs round sums to that are merged: nothing, but where operands are rounded as they are stored; there it
 * is no more than they are off already. */
static inline upipe_dtype merged_type(upipe_dtype dtype)
{
    return (here.naive & (NAIVE_NARROW | NAIVE_LATE)) == NAIVE_NARROW ? dtype : UPIPE_F32;
}

/* One more naive run. */
static inline void answers_more(answers *x, const oracle_attn *t)
{
    const values *in = x->in;
    oracle_attn plain = *t;
    values *n = &x->naive[x->ways];
    *n = values_make(t);
    plain.naive = x->ways++ | here.naive;
    f32_attn_fwd(&plain, x->dtype, in->q, in->k, in->v, n->o, n->lse);
    if (x->directions > 1)
        f32_attn_bwd(&plain, x->sums, in->q, in->k, in->v, in->dout, n->o, n->lse, n->dq, n->dk, n->dv);
}

static inline answers answers_make(const oracle_attn *t, upipe_dtype dtype, upipe_dtype sums,
                                   const values *in, int directions)
{
    answers x = {0};
    x.in = in, x.dtype = dtype, x.sums = sums, x.directions = directions;
    x.q = doubles(in->q, q_count(t)), x.k = doubles(in->k, k_count(t)), x.v = doubles(in->v, v_count(t));
    x.o = doubles(NULL, o_count(t)), x.lse = doubles(NULL, t->sq * t->h);
    f64_attn_fwd(t, UPIPE_F32, x.q, x.k, x.v, x.o, x.lse);
    if (directions > 1) {
        x.dout = doubles(in->dout, o_count(t)), x.dq = doubles(NULL, q_count(t));
        x.dk = doubles(NULL, k_count(t)), x.dv = doubles(NULL, v_count(t)), x.dsinks = doubles(NULL, t->h);
        f64_attn_bwd(t, UPIPE_F32, x.q, x.k, x.v, x.dout, x.o, x.lse, x.dq, x.dk, x.dv);
        if (t->sinks != NULL) oracle_attn_sinks_bwd(t, x.dout, x.o, x.lse, x.dsinks);
    }
    answers_more(&x, t);
    return x;
}

/* Of dQ and dK whose truth is zero, as where no row sees more than one key: what cancels, 4 eps of it. Each element is a
 * sum of terms dP - delta, and both of these are the same sum of v_dim products, in f32, in two orders. The rule of
 * tolerance.h has no floor there, and of a few rows the naive runs' largest error is a random number. */
static inline double cancelled(const oracle_attn *t, const answers *x, const double *factor, int64_t count)
{
    const int v_dim = oracle_v_dim(t);
    double largest = 0, most = 0;
    for (int64_t i = 0; i < t->sq * t->h; ++i) {
        double sum = 0;
        for (int c = 0; c < v_dim; ++c) sum += fabs(x->o[i * v_dim + c] * x->dout[i * v_dim + c]);
        most = fmax(most, sum);
    }
    for (int64_t i = 0; i < count; ++i) largest = fmax(largest, fabs(factor[i]));
    return 4 * (double)FLT_EPSILON * t->scale * most * largest;
}

static inline int all_zero(const double *x, int64_t n)
{
    while (n > 0 && x[n - 1] == 0) --n;
    return n == 0;
}

/* The rule of tolerance.h. The bounds only grow with more naive runs: those come where fewer are not enough. */
static inline void check_answers(const oracle_attn *t, const values *got, answers *x)
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
    for (int i = 0; i < (x->directions > 1 ? 5 : 2); ++i) {
        if ((i == 2 || i == 3) && t->sq > 0 && t->sk > 0 && all_zero(all[i].want, all[i].count)) {
            const double bound = i == 2 ? cancelled(t, x, x->k, k_count(t))
                                        : cancelled(t, x, x->q, q_count(t)) * (double)(t->sq * t->h / t->hkv);
            const tolerance_error own = tolerance_measure(all[i].got, all[i].want, all[i].count);
            CHECK_SAY(own.impossible == 0 && own.max <= bound,
                      "%s: error max %.3g where all cancels, bound %.3g", all[i].name, own.max, bound);
            continue;
        }
        for (;;) {
            const float *runs[NAIVE_WAYS];
            tolerance_error naive, own;
            double floor;
            for (int way = 0; way < x->ways; ++way) {
                const values *n = &x->naive[way];
                const float *of[] = {n->o, n->lse, n->dq, n->dk, n->dv};
                runs[way] = of[i];
            }
            naive = tolerance_naive(runs, x->ways, all[i].want, all[i].count);
            if (x->ways == NAIVE_WAYS ||
                tolerance_holds(all[i].got, naive, all[i].want, all[i].count, &own, &floor)) {
                CHECK_CLOSE_TO(all[i].got, naive, all[i].want, all[i].count, all[i].name);
                break;
            }
            answers_more(x, t);
        }
    }
}

static inline void check_case(const oracle_attn *t, upipe_dtype dtype, int layout, const values *in)
{
    const int mark = buffers_n;
    const long failed = test_failures;
    values got = values_make(t);
    run_kernels(t, dtype, layout, t->h, in, &got);
    if (here.compares) {
        answers x = answers_make(t, dtype, dtype, in, 2);
        check_answers(t, &got, &x);
    }
    if (test_shown_since(failed)) say_case(t, dtype, layout);
    buffers_free(mark);
}

/* A case of random inputs. */
static inline void check_drawn(const oracle_attn *t, upipe_dtype dtype, int layout, test_rng *r,
                               double q_size)
{
    const int mark = buffers_n;
    const values in = inputs_make(t, dtype, r, q_size);
    check_case(t, dtype, layout, &in);
    buffers_free(mark);
}

/* ---- keys in parts ---- */

/* o and lse of keys seen so far, in plain f32, brought up to those of a part; rounded as it is stored. */
static inline void naive_merge(const oracle_attn *t, upipe_dtype o_dtype, float *o, float *lse,
                               const float *o_part, const float *lse_part)
{
    int d = oracle_v_dim(t);
    for (int64_t i = 0; i < t->sq * t->h; ++i) {
        float top = fmaxf(lse[i], lse_part[i]), a, b;
        if (top == -INFINITY) continue;
        a = expf(lse[i] - top), b = expf(lse_part[i] - top);
        for (int c = 0; c < d; ++c)
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

/* The keys in parts, each merged into the result so far: as in one call. The first one writes o and lse, or
 * (begun) merges too: lse begins as -inf, and o as NaNs that are not read. */
static inline void check_merge(const oracle_attn *t, upipe_dtype dtype, upipe_dtype o_dtype, int layout,
                               int begun, const values *in, const int64_t *lengths, int parts)
{
    const int64_t rows = t->sq * t->h;
    const int mark = buffers_n, v_dim = oracle_v_dim(t);
    values got = values_make(t), naive[NAIVE_WAYS], part = values_make(t);
    const float *runs_o[NAIVE_WAYS], *runs_lse[NAIVE_WAYS];
    upipe_attn_grad g;
    upipe_attn *a = &g.a;
    int64_t first = 0, i;
    for (i = 0; i < rows; ++i) got.lse[i] = -INFINITY;
    memset(&g, 0, sizeof g);
    a->q = placed(dtype, t->sq, t->h, t->d, layout, in->q);
    a->o = placed(o_dtype, t->sq, t->h, v_dim, layout, NULL);
    a->lse = placed(UPIPE_F32, t->sq, t->h, 1, layout, begun ? got.lse : NULL);
    for (int way = 0; way < NAIVE_WAYS; ++way) {
        naive[way] = values_make(t);
        for (i = 0; i < rows; ++i) naive[way].lse[i] = -INFINITY;
        runs_o[way] = naive[way].o, runs_lse[way] = naive[way].lse;
    }
    for (int p = 0; p < parts; first += lengths[p++]) {
        const int64_t at = first * t->hkv * t->d, v_at = first * t->hkv * v_dim;
        oracle_attn piece = piece_of(t, first, lengths[p]);
        for (int way = 0; way < NAIVE_WAYS && here.compares; ++way) {
            piece.naive = way | here.naive;
            f32_attn_fwd(&piece, merged_type(dtype), in->q, in->k + at, in->v + v_at, part.o, part.lse);
            naive_merge(t, o_dtype, naive[way].o, naive[way].lse, part.o, part.lse);
        }
        a->k = placed(dtype, lengths[p], t->hkv, t->d, layout, in->k + at);
        a->v = placed(dtype, lengths[p], t->hkv, v_dim, layout, in->v + v_at);
        attn_set(a, &piece);
        a->merge = begun || p > 0;
        call_kernel(&g, 0);
        read_back(a->k, NULL), read_back(a->v, NULL);
    }
    CHECK_INT(first, t->sk);
    read_back(a->q, NULL), read_back(a->o, got.o), read_back(a->lse, got.lse);
    if (here.compares) {
        double *o = doubles(NULL, o_count(t)), *lse = doubles(NULL, rows);
        f64_attn_fwd(t, UPIPE_F32, doubles(in->q, q_count(t)), doubles(in->k, k_count(t)),
                     doubles(in->v, v_count(t)), o, lse);
        CHECK_CLOSE(got.o, runs_o, NAIVE_WAYS, o, o_count(t), "o, merged");
        CHECK_CLOSE(got.lse, runs_lse, NAIVE_WAYS, lse, rows, "lse, merged");
    }
    buffers_free(mark);
}

/* The backward of the keys in parts, with o and lse of all of them: to the gradients of `got` is added. */
static inline void merge_bwd(const oracle_attn *t, upipe_dtype dtype, int layout, const values *in,
                             const values *all, const int64_t *lengths, int parts, values *got)
{
    const int mark = buffers_n, v_dim = oracle_v_dim(t);
    int64_t first = 0;
    upipe_attn_grad g = {.a.q = placed(dtype, t->sq, t->h, t->d, layout, in->q),
                         .a.lse = placed(UPIPE_F32, t->sq, t->h, 1, layout, all->lse),
                         .a.o = placed(dtype, t->sq, t->h, v_dim, layout, all->o),
                         .dout = placed(dtype, t->sq, t->h, v_dim, layout, in->dout),
                         .delta = placed(UPIPE_F32, t->sq, t->h, 1, layout, NULL),
                         .dq = placed(UPIPE_F32, t->sq, t->h, t->d, layout, got->dq)};
    CHECK_STATUS(here.c->ops->rowdot(here.c, g.delta, g.a.o, g.dout), UPIPE_OK, here.c->err);
    for (int p = 0; p < parts; first += lengths[p++]) {
        const int64_t at = first * t->hkv * t->d, v_at = first * t->hkv * v_dim;
        const oracle_attn piece = piece_of(t, first, lengths[p]);
        attn_set(&g.a, &piece);
        g.a.merge = 1;
        g.dsinks = piece.sinks != NULL ? got->dsinks : NULL;
        g.a.k = placed(dtype, lengths[p], t->hkv, t->d, layout, in->k + at);
        g.a.v = placed(dtype, lengths[p], t->hkv, v_dim, layout, in->v + v_at);
        g.dk = placed(UPIPE_F32, lengths[p], t->hkv, t->d, layout, got->dk + at);
        g.dv = placed(UPIPE_F32, lengths[p], t->hkv, v_dim, layout, got->dv + v_at);
        call_kernel(&g, 1);
        read_back(g.a.k, NULL), read_back(g.a.v, NULL);
        read_back(g.dk, got->dk + at), read_back(g.dv, got->dv + v_at);
    }
    CHECK_INT(first, t->sk);
    read_back(g.a.q, NULL), read_back(g.a.lse, NULL), read_back(g.dout, NULL), read_back(g.a.o, NULL);
    read_back(g.delta, NULL), read_back(g.dq, got->dq);
    buffers_free(mark);
}

static inline void check_merge_bwd(const oracle_attn *t, upipe_dtype dtype, int layout, const values *in,
                                   const int64_t *lengths, int parts)
{
    const int mark = buffers_n;
    values all = values_make(t), got = values_make(t);
    run_kernels(t, dtype, layout, t->h, in, &all);
    merge_bwd(t, dtype, layout, in, &all, lengths, parts, &got);
    CHECK_BYTES(got.dsinks, all.dsinks, t->h * 4);
    got.o = all.o, got.lse = all.lse; /* were not computed here */
    if (here.compares) {
        answers x = answers_make(t, dtype, merged_type(dtype), in, 2);
        check_answers(t, &got, &x);
    }
    buffers_free(mark);
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

/* A call that would work: 8 queries, 8 keys, 4 heads over 2, d 64; every pointer into one block. */
static inline void valid_call(upipe_attn_grad *g, upipe_dtype dtype, void *block, void *work,
                              size_t work_bytes)
{
    const upipe_view q = upipe_view_packed(block, dtype, 8, 4, 64);
    memset(g, 0, sizeof *g);
    g->a.q = g->a.o = g->dout = g->dq = q;
    g->a.k = g->a.v = upipe_view_packed(block, dtype, 8, 2, 64);
    g->a.lse = g->delta = upipe_view_packed(block, UPIPE_F32, 8, 4, 1);
    g->dk = g->dv = upipe_view_packed(block, UPIPE_F32, 8, 2, 64);
    g->a.work = work;
    g->a.work_bytes = work_bytes;
}

#endif

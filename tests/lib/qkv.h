/* qkv.h -- attention of Q, K, V alone: tensors in natural order, and the oracle that results are held to
 *
 *     tensors in, out;
 *     tensors_draw(&shape, &rng, &in);               Q, K, V, dO
 *     tensors_make(&shape, &out);                    O, lse, dQ, dK, dV, dsinks come here
 *     check_oracle(&shape, &in, sinks, 0, &out);
 */
#ifndef UPIPE_TEST_QKV_H
#define UPIPE_TEST_QKV_H

#include "oracle_block.h"
#include "tolerance.h"

enum { TENSORS = 9 };
enum { Q, K, V, O, DOUT, DQ, DK, DV, LSE };
static const char *const names[TENSORS] = {"q", "k", "v", "o", "dout", "dq", "dk", "dv", "lse"};

/* Natural order over the whole batch: [batch][S][heads][dim]. */
typedef struct tensors {
    float *at[TENSORS], *dsinks;
} tensors;

static inline int64_t width(const block_shape *s, int which)
{
    const int64_t v_dim = s->v_dim > 0 ? s->v_dim : s->d;
    if (which == LSE) return s->h;
    if (which == K || which == DK) return (int64_t)s->hkv * s->d;
    if (which == V || which == DV) return s->hkv * v_dim;
    return which == Q || which == DQ ? (int64_t)s->h * s->d : s->h * v_dim;
}

static inline int64_t count(const block_shape *s, int which)
{
    return s->batch * s->tokens * width(s, which);
}

static inline void tensors_make(const block_shape *s, tensors *t)
{
    for (int i = 0; i < TENSORS; ++i) t->at[i] = f32_buf(count(s, i));
    t->dsinks = f32_buf(s->h);
}

/* Q, K, V and dO, as the storage type has them. */
static inline void tensors_draw(const block_shape *s, test_rng *rng, tensors *t)
{
    tensors_make(s, t);
    for (int i = 0; i < TENSORS; ++i)
        for (int64_t n = 0; (i < O || i == DOUT) && n < count(s, i); ++n)
            t->at[i][n] = naive_store(s->dtype, (float)test_normal(rng));
}

static inline double *widen(const float *x, int64_t n)
{
    double *y = f64_buf(n);
    for (int64_t i = 0; i < n; ++i) y[i] = (double)x[i];
    return y;
}

static inline void naive_run(const block_shape *shape, const tensors *in, const float *sinks, int naive,
                             tensors *r)
{
    block_shape s = *shape;
    s.naive = naive;
    tensors_make(&s, r);
    for (int64_t b = 0; b < s.batch; ++b) {
        const oracle_attn a = block_attn(&s, b, sinks);
        float *x[TENSORS];
        for (int i = 0; i < TENSORS; ++i)
            x[i] = (i < O || i == DOUT ? in : r)->at[i] + b * s.tokens * width(&s, i);
        f32_attn_fwd(&a, s.dtype, x[Q], x[K], x[V], x[O], x[LSE]);
        f32_attn_bwd(&a, s.dtype, x[Q], x[K], x[V], x[DOUT], x[O], x[LSE], x[DQ], x[DK], x[DV]);
    }
    for (int i = DK; i <= DV; ++i)
        for (int64_t n = 0; n < count(&s, i); ++n) r->at[i][n] = naive_store(s.dtype, r->at[i][n]);
    if (s.sinks) f32_sinks_bwd(&s, sinks, in->at[DOUT], r->at[O], r->at[LSE], r->dsinks);
}

/* kernels: 0, or NAIVE_NARROW for those on matrix units */
static inline void check_oracle(const block_shape *s, const tensors *in, const float *sinks, int kernels,
                                const tensors *got)
{
    const int mark = buffers_n;
    double *x[TENSORS], *dsinks = f64_buf(s->h);
    tensors naive[NAIVE_WAYS];
    const float *runs[NAIVE_WAYS];
    for (int i = 0; i < TENSORS; ++i)
        x[i] = i < O || i == DOUT ? widen(in->at[i], count(s, i)) : f64_buf(count(s, i));
    for (int64_t b = 0; b < s->batch; ++b) {
        const oracle_attn a = block_attn(s, b, sinks);
        double *at[TENSORS];
        for (int i = 0; i < TENSORS; ++i) at[i] = x[i] + b * s->tokens * width(s, i);
        f64_attn_fwd(&a, UPIPE_F32, at[Q], at[K], at[V], at[O], at[LSE]);
        f64_attn_bwd(&a, UPIPE_F32, at[Q], at[K], at[V], at[DOUT], at[O], at[LSE], at[DQ], at[DK], at[DV]);
    }
    if (s->sinks) f64_sinks_bwd(s, sinks, x[DOUT], x[O], x[LSE], dsinks);
    for (int way = 0; way < NAIVE_WAYS; ++way) naive_run(s, in, sinks, way | kernels, &naive[way]);
    for (int i = O; i < TENSORS; ++i) {
        if (i == DOUT) continue;
        for (int way = 0; way < NAIVE_WAYS; ++way) runs[way] = naive[way].at[i];
        CHECK_CLOSE(got->at[i], runs, NAIVE_WAYS, x[i], count(s, i), names[i]);
    }
    for (int way = 0; way < NAIVE_WAYS; ++way) runs[way] = naive[way].dsinks;
    if (s->sinks) CHECK_CLOSE(got->dsinks, runs, NAIVE_WAYS, dsinks, s->h, "dsinks");
    buffers_free(mark);
}

#endif

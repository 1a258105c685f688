/* oracle_block.h -- the whole attention block on one rank in plain loops: f64, the truth; f32, the naive
 *                   yardstick
 *
 * Natural layouts, no ranks, no stages: x [batch][S][D], wq [H*d][D], wk [Hkv*d][D], wv [Hkv*v_dim][D], wo
 * [D][H*v_dim], wg [H*v_dim][D], o and dout [batch][S][H*v_dim], lse [batch][S][H], norm weights [d], sinks [H]. Every
 * sequence is attended alone; packed sequences lie over the whole batch. The naive run rounds to the storage
 * type what a plain implementation would store: Q, K, V after each step, o, dO, dQ, dK, dV, y, dx.
 *
 *     block_inputs(&shape, seed, &in);                  values that the storage type holds
 *     f64_block_run(&shape, &in64, &want);              in64: the same values, f64_block_widen
 *     f32_block_run(&shape, &in, &naive);
 *
 * In a result, x is dx, wq is dWq and so on; q is dQ, the gradient of the projected queries [batch][S][H*d]. A bare
 * block is attention alone: q, k [batch][S][Hkv*d] and v [batch][S][Hkv*v_dim] are inputs, and in a result gradients.
 */
#ifndef UPIPE_TEST_ORACLE_BLOCK_H
#define UPIPE_TEST_ORACLE_BLOCK_H

#include "oracle_linear.h"
#include "test.h"

typedef struct block_shape {
    int64_t tokens, batch, dim;
    int h, hkv, d, v_dim, full; /* v_dim: 0 = d */
    int rope;                   /* 0 none, 1 halves, 2 interleaved */
    int rope_dims;              /* 0: all d */
    double rope_factor;         /* 0: 1 */
    const double *rope_rates;   /* NULL: by theta */
    int normed;                 /* QK norm */
    int projected;              /* with the output projection */
    int gated;                  /* its input is gated by x, upipe_layer.h */
    int bare;                   /* without projections, upipe_qkv.h */
    int latent, key; /* hkv = h: K and V come of so many numbers a token, upipe_latent.h; 0: are not */
    int q_dim;       /* of a row of x, with a latent and not bare */
    int biased;      /* bq, bk, bv, and bo with the output projection */
    int naive;       /* naive runs alone: how sums run (oracle.h) */
    upipe_dtype dtype;
    double scale, theta, eps;
    /* masks: 0 = without; cu_seqlens_n + 1 positions in the batch, of which position p of sequence b is b *
     * tokens + p */
    int64_t window, cu_seqlens_n;
    const int64_t *cu_seqlens;
    double softcap;
    int sinks;
} block_shape;

/* Of a layer, what has gradients that are sums over tokens; the first five are stored in the storage type. */
#define BLOCK_LAYER_WEIGHTS(X) \
    X(wq) X(wk) X(wv) X(wo) X(wg) X(q_norm_weight) X(k_norm_weight) X(sinks) X(bq) X(bk) X(bv) X(bo)
#define BLOCK_WEIGHTS(X) X(wkv) BLOCK_LAYER_WEIGHTS(X)

/* Results, and (BLOCK_TENSORS) results or inputs; elements in block_count's order. */
#define BLOCK_RESULTS(X) BLOCK_WEIGHTS(X) X(o) X(lse) X(y) X(q) X(k) X(v) X(c) X(kr) X(x)
#define BLOCK_TENSORS(X) BLOCK_RESULTS(X) X(dout) X(dy)

static inline int64_t block_count(const block_shape *s, const char *name)
{
    int64_t in = s->q_dim > 0 ? s->q_dim : s->bare ? 0 : s->dim;
    int64_t rows = s->batch * s->tokens, v_dim = s->v_dim > 0 ? s->v_dim : s->d, hd = (int64_t)s->h * s->d,
            ho = s->h * v_dim, kvd = (int64_t)s->hkv * s->d, kvv = s->hkv * v_dim, dim = s->bare ? 0 : s->dim;
    if (!strcmp(name, "wq")) return hd * in;
    if (!strcmp(name, "wk")) return s->latent > 0 ? 0 : kvd * dim;
    if (!strcmp(name, "wv")) return s->latent > 0 ? 0 : kvv * dim;
    if (!strcmp(name, "wo")) return s->projected ? ho * s->dim : 0;
    if (!strcmp(name, "wg")) return s->gated ? ho * s->dim : 0;
    if (!strcmp(name, "wkv")) return s->h * (s->d - s->key + v_dim) * s->latent;
    if (!strcmp(name, "q_norm_weight") || !strcmp(name, "k_norm_weight")) return s->normed ? s->d : 0;
    if (!strcmp(name, "sinks")) return s->sinks ? s->h : 0;
    if (!strcmp(name, "bq")) return s->biased ? hd : 0;
    if (!strcmp(name, "bk")) return s->biased ? kvd : 0;
    if (!strcmp(name, "bv")) return s->biased ? kvv : 0;
    if (!strcmp(name, "bo")) return s->biased && s->projected ? s->dim : 0;
    if (!strcmp(name, "o") || !strcmp(name, "dout")) return rows * ho;
    if (!strcmp(name, "q")) return rows * hd;
    if (!strcmp(name, "k")) return s->bare && s->latent == 0 ? rows * kvd : 0;
    if (!strcmp(name, "v")) return s->bare && s->latent == 0 ? rows * kvv : 0;
    if (!strcmp(name, "c")) return rows * s->latent;
    if (!strcmp(name, "kr")) return rows * s->key;
    if (!strcmp(name, "lse")) return rows * s->h;
    if (!strcmp(name, "y") || !strcmp(name, "dy")) return s->projected ? rows * s->dim : 0;
    return rows * in; /* x */
}

/* RoPE with what Llama of old has not: a factor of 1.2, `dims` of a head, and rates that are no theta's. */
static inline void block_rope_own(block_shape *s, int dims)
{
    static double rates[128];
    for (int p = 0; p < 128; ++p) rates[p] = p % 5 == 4 ? 0 : 1.3 / (1 + 0.7 * p);
    s->rope_rates = rates;
    s->rope_factor = 1.2;
    s->rope_dims = dims;
}

/* The attention call of sequence b. */
static inline oracle_attn block_attn(const block_shape *s, int64_t b, const float *sinks)
{
    oracle_attn a = {0};
    a.sq = a.sk = s->tokens;
    a.q_pos = a.k_pos = b * s->tokens;
    a.h = s->h;
    a.hkv = s->hkv;
    a.d = s->d;
    a.v_dim = s->v_dim;
    a.causal = !s->full;
    a.naive = s->naive;
    a.scale = s->scale;
    a.window = s->window;
    a.cu_seqlens = s->cu_seqlens;
    a.cu_seqlens_n = s->cu_seqlens_n;
    a.softcap = s->softcap;
    a.sinks = sinks;
    return a;
}

#define ORACLE_PART "oracle_block.inc"
#include "oracle_twice.inc"

static inline void f64_block_widen(const block_shape *s, const f32_block *in, f64_block *out)
{
    int64_t i;
    f64_block_make(s, out);
#define BLOCK_WIDEN(name) \
    for (i = 0; in->name != NULL && i < block_count(s, #name); ++i) out->name[i] = (double)in->name[i];
    BLOCK_TENSORS(BLOCK_WIDEN)
#undef BLOCK_WIDEN
}

/* Random inputs that give scores of order 1; norm weights about 1, in f32. */
static inline void block_inputs(const block_shape *s, uint64_t seed, f32_block *in)
{
    test_rng rng;
    double weight = 1 / sqrt((double)s->dim);
    int64_t i;
    rng.state = seed;
    f32_block_make(s, in);
#define BLOCK_FILL(name, size)                                      \
    for (i = 0; in->name != NULL && i < block_count(s, #name); ++i) \
        in->name[i] = naive_store(s->dtype, (float)((size)*test_normal(&rng)));
    BLOCK_FILL(x, 1)
    BLOCK_FILL(wq, weight)
    BLOCK_FILL(wk, weight)
    BLOCK_FILL(wv, weight)
    BLOCK_FILL(wo, 1 / sqrt((double)s->h * (s->v_dim > 0 ? s->v_dim : s->d)))
    BLOCK_FILL(wg, 2 * weight)
    BLOCK_FILL(dout, 1)
    BLOCK_FILL(dy, 1)
    BLOCK_FILL(bq, 0.5)
    BLOCK_FILL(bk, 0.5)
    BLOCK_FILL(bv, 0.5)
    BLOCK_FILL(bo, 0.5)
    BLOCK_FILL(wkv, 1 / sqrt((double)s->latent))
    BLOCK_FILL(c, 1)
    BLOCK_FILL(kr, 1)
    if (s->bare) {
        BLOCK_FILL(q, 1)
        BLOCK_FILL(k, 1)
        BLOCK_FILL(v, 1)
    }
#undef BLOCK_FILL
    for (i = 0; s->normed && i < s->d; ++i) {
        in->q_norm_weight[i] = (float)(1 + 0.1 * test_normal(&rng));
        in->k_norm_weight[i] = (float)(1 + 0.1 * test_normal(&rng));
    }
    /* few bits, so that a difference of two sinks is exact in f32 too */
    for (i = 0; s->sinks && i < s->h; ++i) in->sinks[i] = (float)(test_below(&rng, 2048) - 1024) / 512;
}

#endif

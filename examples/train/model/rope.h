/* rope.h -- the rates of RoPE, and the factor of what it turns, as a model's configuration says: made once, in f64
 *
 *     llama_rates_make(&rates, &config, tokens);
 *
 * The formulas are those of transformers 5.23 (modeling_rope_utils.py), which makes f32 of them. Two types go by the
 * longest sequence: there by each call's, here by `tokens`, which is that of the training, once.
 */
#ifndef LLAMA_ROPE_H
#define LLAMA_ROPE_H

#include <math.h>
#include <string.h>

#include "config.h"

/* As in upipe_layer: a plain model's are all 0, and its rates are theta's. */
typedef struct llama_rates {
    int own; /* value has the rates, otherwise theta */
    int dims;
    double factor, value[LLAMA_ROPE_PAIRS];
} llama_rates;

static const double llama_circle = 6.283185307179586477;

/* By which positions are more than in the training before. */
static inline double llama_rope_more(const llama_config *c)
{
    return c->rope_factor > 0 ? c->rope_factor : (double)c->rope_positions / (double)c->rope_original;
}

static inline double llama_rope_clamp(double x, double least, double most)
{
    return x < least ? least : x > most ? most : x;
}

/* The part of pair p's rate that is divided: 0 where it turns often within the training's positions, 1 where seldom. */
static inline double llama_rope_llama3(const llama_config *c, double rate)
{
    const double turns = (double)c->rope_original * rate / llama_circle;
    return 1 - llama_rope_clamp((turns - c->rope_low) / (c->rope_high - c->rope_low), 0, 1);
}

/* The pair, a fraction of one, that turns so often within the training's positions. */
static inline double llama_rope_pair(const llama_config *c, double turns)
{
    return llama_rope_dims(c) * log((double)c->rope_original / (turns * llama_circle)) /
           (2 * log(c->rope_theta));
}

static inline double llama_rope_yarn(const llama_config *c, int p)
{
    double low = llama_rope_pair(c, c->rope_beta_fast > 0 ? c->rope_beta_fast : 32);
    double high = llama_rope_pair(c, c->rope_beta_slow > 0 ? c->rope_beta_slow : 1);
    if (!c->rope_untruncated) low = floor(low), high = ceil(high);
    low = low < 0 ? 0 : low;
    high = high > llama_rope_dims(c) - 1 ? llama_rope_dims(c) - 1 : high;
    if (low == high) high += 0.001;
    return llama_rope_clamp((p - low) / (high - low), 0, 1);
}

/* YaRN's: scores of longer sequences are sharpened. */
static inline double llama_rope_sharpened(double more, double by)
{
    return more <= 1 ? 1 : 0.1 * by * log(more) + 1;
}

/* The factor of what turns; 0: 1. */
static inline double llama_rope_factor(const llama_config *c)
{
    double more;
    if (c->rope_type != LLAMA_ROPE_YARN && c->rope_type != LLAMA_ROPE_LONGROPE) return 0;
    if (c->rope_attention > 0) return c->rope_attention;
    more = llama_rope_more(c);
    if (c->rope_type == LLAMA_ROPE_LONGROPE)
        return more <= 1 ? 1 : sqrt(1 + log(more) / log((double)c->rope_original));
    if (c->rope_mscale > 0 && c->rope_mscale_all > 0)
        return llama_rope_sharpened(more, c->rope_mscale) / llama_rope_sharpened(more, c->rope_mscale_all);
    return llama_rope_sharpened(more, 1);
}

/* Dynamic: theta grows with the sequence, so that its slowest pair turns as it did in M positions. */
static inline double llama_rope_theta(const llama_config *c, int64_t tokens)
{
    const int dims = llama_rope_dims(c);
    const double most = (double)c->rope_positions, n = (double)tokens > most ? (double)tokens : most;
    if (c->rope_type != LLAMA_ROPE_DYNAMIC) return c->rope_theta;
    return c->rope_theta * pow(c->rope_factor * n / most - (c->rope_factor - 1), dims / (dims - 2.0));
}

/* llama_rates_make -- for sequences of so many tokens */
static inline void llama_rates_make(llama_rates *r, const llama_config *c, int64_t tokens)
{
    const int dims = llama_rope_dims(c);
    const double theta = llama_rope_theta(c, tokens);
    const double *by = c->rope_type != LLAMA_ROPE_LONGROPE ? NULL
                       : tokens > c->rope_original         ? c->rope_long
                                                           : c->rope_short;
    int p;
    memset(r, 0, sizeof *r);
    r->own = c->rope_type != LLAMA_ROPE_DEFAULT;
    r->dims = dims < c->head_dim ? dims : 0;
    r->factor = llama_rope_factor(c);
    for (p = 0; r->own && p < dims / 2; ++p) {
        const double rate = pow(theta, -2.0 * p / dims);
        const double part = c->rope_type == LLAMA_ROPE_LINEAR   ? 1
                            : c->rope_type == LLAMA_ROPE_LLAMA3 ? llama_rope_llama3(c, rate)
                            : c->rope_type == LLAMA_ROPE_YARN   ? llama_rope_yarn(c, p)
                                                                : 0;
        r->value[p] = by != NULL ? rate / by[p] : rate * (1 - part) + rate / llama_rope_more(c) * part;
    }
}

#endif

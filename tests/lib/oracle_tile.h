/* oracle_tile.h -- the MLP, and head with loss, of all tokens at once in plain loops: f64, the truth; f32,
 *                  the naive yardstick
 *
 * Layouts: x, y, dy [rows][D], gate, up [F][D], down [D][F], head [V][D], norm_weight and post_norm_weight [D], loss
 * [rows]; F or V is the shape's `wide`. The naive run rounds to the storage type what a plain implementation would store:
 * a norm's result, the hidden layer and its factors, their gradients, the gradient of the logits, y, dx.
 *
 *     tile_inputs(&shape, seed, &in);                   values that the storage type holds
 *     f64_tile_run(&shape, &in64, &want);               in64: the same values, f64_tile_widen
 *     f32_tile_run(&shape, &in, &naive);
 *
 * In a result, x is dx, gate is dW_gate and so on.
 */
#ifndef UPIPE_TEST_ORACLE_TILE_H
#define UPIPE_TEST_ORACLE_TILE_H

#include "oracle_linear.h"
#include "test.h"

typedef struct tile_shape {
    int64_t rows, dim, wide;
    const int32_t *targets;       /* [rows]: head and loss; NULL: the MLP */
    int normed, posted, residual; /* posted: a norm of the MLP's result */
    int naive;                    /* naive runs alone: how sums run (oracle.h) */
    upipe_dtype dtype;
    double eps, scale; /* scale of a loss's gradients, as it is */
    double factor;     /* of the MLP's result, or of the logits; 0 = 1 */
    int gelu;          /* in the MLP, by tanh */
    double softcap;    /* of the logits; 0 = none */
} tile_shape;

/* Inputs or results; elements in tile_count's order. */
#define TILE_TENSORS(X) \
    X(x) X(gate) X(up) X(down) X(head) X(norm_weight) X(post_norm_weight) X(y) X(dy) X(loss)

static int64_t tile_count(const tile_shape *s, const char *name)
{
    int mlp = s->targets == NULL;
    if (!strcmp(name, "gate") || !strcmp(name, "up") || !strcmp(name, "down")) return mlp * s->wide * s->dim;
    if (!strcmp(name, "y") || !strcmp(name, "dy")) return mlp * s->rows * s->dim;
    if (!strcmp(name, "head")) return !mlp * s->wide * s->dim;
    if (!strcmp(name, "loss")) return !mlp * s->rows;
    if (!strcmp(name, "norm_weight")) return s->normed ? s->dim : 0;
    if (!strcmp(name, "post_norm_weight")) return s->posted ? s->dim : 0;
    return s->rows * s->dim;
}

#define ORACLE_PART "oracle_tile.inc"
#include "oracle_twice.inc"

static void f64_tile_widen(const tile_shape *s, const f32_tile *in, f64_tile *out)
{
    int64_t i;
    f64_tile_make(s, out);
#define TILE_WIDEN(name) \
    for (i = 0; in->name != NULL && i < tile_count(s, #name); ++i) out->name[i] = (double)in->name[i];
    TILE_TENSORS(TILE_WIDEN)
#undef TILE_WIDEN
}

/* Random inputs that give gates and logits of order 1; norm weights about 1, in f32. */
static void tile_inputs(const tile_shape *s, uint64_t seed, f32_tile *in)
{
    test_rng rng;
    double weight = 1 / sqrt((double)s->dim);
    int64_t i;
    rng.state = seed;
    f32_tile_make(s, in);
#define TILE_FILL(name, size)                                      \
    for (i = 0; in->name != NULL && i < tile_count(s, #name); ++i) \
        in->name[i] = naive_store(s->dtype, (float)((size)*test_normal(&rng)));
    TILE_FILL(x, 1)
    TILE_FILL(gate, weight)
    TILE_FILL(up, weight)
    TILE_FILL(down, 1 / sqrt((double)s->wide))
    TILE_FILL(head, weight)
    TILE_FILL(dy, 1)
#undef TILE_FILL
    for (i = 0; s->normed && i < s->dim; ++i) in->norm_weight[i] = (float)(1 + 0.1 * test_normal(&rng));
    for (i = 0; s->posted && i < s->dim; ++i) in->post_norm_weight[i] = (float)(1 + 0.1 * test_normal(&rng));
}

#endif

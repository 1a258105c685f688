/* upipe_linear_rows.h -- linear attention: what lies around its rule        layer 2, includes borders, ops
 *
 * The arguments of a table's optional entries (upipe_linear_ops): the short causal convolution before the rule, and the
 * gates. upipe_linear_layer.h calls them, and checks before it does. What else a layer has are products and norms of the
 * compute table.
 *
 * Rows of different documents do not see each other. A convolution has a state too: the last taps - 1 rows of what it reads,
 * in f32, which holds every storage type exactly. So a sequence that is cut anywhere has the bits of the whole one.
 */
#ifndef UPIPE_LINEAR_ROWS_H
#define UPIPE_LINEAR_ROWS_H

#include "upipe_borders.h"
#include "upipe_ops.h"

enum { UPIPE_LINEAR_TAPS_MAX = 8 };

/* upipe_linear_conv -- every channel by itself: y_t = silu(sum over j < taps of weight[taps - 1 - j] x_(t-j))
 *   x y      [n][1][channels], of one type; y may be x, in the forward alone
 *   before   f32 [taps - 1][1][channels]: rows before row 0
 *   after    likewise, written: the last taps - 1 rows of `before` and x; data NULL = not wanted. Does not overlap `before`
 *   weight   f32 [channels][taps]
 *   pos      position of row 0 among the borders
 */
typedef struct upipe_linear_conv {
    upipe_view x, y, before, after;
    const float *weight;
    int64_t pos;
    upipe_borders borders;
    int taps;
} upipe_linear_conv;

/* upipe_linear_conv_grad -- its backward
 *   a        the forward's arguments; y and after are not accessed
 *   dy       shape and type of x: the gradient of y, becomes that of x
 *   dstate   shape of before: the gradient of `after`, becomes that of `before`
 *   dweight  f32 [channels][taps], +=; NULL = not wanted
 * An element of dx is one f32 chain, the furthest row's term first, which goes on from dstate: a cut changes no bit.
 */
typedef struct upipe_linear_conv_grad {
    upipe_linear_conv a;
    upipe_view dy, dstate;
    float *dweight;
} upipe_linear_conv_grad;

/* upipe_linear_gates -- g = -e^a_log softplus(a + dt_bias), beta = 1 / (1 + e^-b)
 *   a b      [n][heads][1], of one type
 *   g beta   f32 [n][heads][1]
 *   a_log dt_bias  f32 [heads]
 */
typedef struct upipe_linear_gates {
    upipe_view a, b, g, beta;
    const float *a_log, *dt_bias;
} upipe_linear_gates;

/* upipe_linear_gates_grad -- its backward; g and beta of the forward are not accessed
 *   gates      a and b become their gradients
 *   dg dbeta   f32 [n][heads][1]
 *   da_log ddt_bias  f32 [heads], +=; NULL = not wanted
 */
typedef struct upipe_linear_gates_grad {
    upipe_linear_gates gates;
    upipe_view dg, dbeta;
    float *da_log, *ddt_bias;
} upipe_linear_gates_grad;

#endif

/* upipe_linear.h -- linear attention: one call of its rule, for a rank's tokens and some heads
 *
 * A head keeps a state S, [key_dim][value_dim], which decays and to which every token adds:
 *
 *     gated delta rule   S' = e^g S;  S = S' + k (beta (v - S'^T k))^T        with beta
 *     scalar decay       S' = e^g S;  S = S' + k v^T                          without: Mamba-2, where k = B, v = dt x,
 *                                                                             g = dt A and q = C
 *     output             o = scale S^T q
 *
 *     q k [n][key_heads][key_dim]   v o [n][heads][value_dim]   g beta f32 [n][heads], d = 1
 *
 * Value head h reads key head h / (heads / key_heads). Norms of q and k, gates and the convolution are the host's.
 *
 * The rule goes in chunks of tokens, whose products are those of matrices. A chunk ends at a multiple of `chunk`
 * positions, and at a border of packed documents, where the state begins anew. So a sequence that is cut at a multiple
 * of `chunk` has the bits of the whole one, and a document that begins at one has the bits of the document alone. Bits
 * are promised for one value of chunk, and where the compute table's gemm keeps its own promise.
 *
 *     upipe_linear_ops rules;
 *     upipe_cpu_linear(&rules);                      cpu/upipe_cpu_linear.h; upipe_cuda_linear: cuda/upipe_cuda_linear.h
 *     upipe_linear a = {0};
 *     a.q = q; a.k = k; a.v = v; a.o = o; a.g = g; a.beta = beta;
 *     a.state = before; a.out = behind;
 *     a.work_bytes = upipe_linear_bytes(&ctx, &rules, &a, UPIPE_LINEAR_FWD);
 *     a.work = ...; upipe_linear_fwd(&ctx, &rules, &a);
 *
 * upipe_scan.h brings the state from rank to rank. upipe_linear_layer.h is a layer of both.
 */
#ifndef UPIPE_LINEAR_H
#define UPIPE_LINEAR_H

#include "upipe_attn.h"
#include "upipe_mem.h"

enum { UPIPE_LINEAR_CHUNK = 64, UPIPE_LINEAR_CHUNK_MAX = 256, UPIPE_LINEAR_DIM_MAX = 256 };

/* upipe_linear -- forward
 *   q k v o     one storage type; o does not overlap the others. Strides of what is read may be 0
 *   g           logarithm of the decay, f32: <= 0, -inf included
 *   beta        f32; data NULL: scalar decay
 *   state       f32 [heads][key_dim][value_dim]: before the first token
 *   out         likewise, written: behind the last one. May be state
 *   pos         position of row 0 among the borders, >= 0: chunks are counted from position 0
 *   borders     of packed documents, in host memory
 *   chunk       tokens of a chunk, at most 256; 0 = 64
 *   scale       0 = 1/sqrt(key_dim)
 *   work        work_bytes of scratch, at least upipe_linear_bytes, at a multiple of 64; not accessed where that is 0
 */
typedef struct upipe_linear {
    upipe_view q, k, v, o, g, beta;
    const float *state;
    float *out;
    int64_t pos;
    upipe_borders borders;
    int chunk;
    float scale;
    void *work;
    size_t work_bytes;
} upipe_linear;

/* upipe_linear_grad -- backward; everything between is computed again
 *   a         the forward's arguments; o and out are not read
 *   dout      gradient of o, shape and type of v
 *   dq dk dv  shape and type of q, k, v, written
 *   dg dbeta  f32, written; dbeta is not accessed without beta
 *   dstate    f32 [heads][key_dim][value_dim]: the gradient of out; becomes that of state (0 where a document begins at the
 *             first token)
 */
typedef struct upipe_linear_grad {
    upipe_linear a;
    upipe_view dout, dq, dk, dv, dg, dbeta;
    float *dstate;
} upipe_linear_grad;

/* A direction's scratch. */
typedef enum upipe_linear_direction { UPIPE_LINEAR_FWD, UPIPE_LINEAR_BWD } upipe_linear_direction;

/* ---- what lies around the rule: a short convolution, and gates ---- */

/* The arguments of a table's optional entries (upipe_linear_ops): the short causal convolution before the rule, and the
 * gates. upipe_linear_layer.h calls them, and checks before it does. What else a layer has are products and norms of the
 * compute table.
 *
 * Rows of different documents do not see each other. A convolution has a state too: the last taps - 1 rows of what it reads,
 * in f32, which holds every storage type exactly. So a sequence that is cut anywhere has the bits of the whole one.
 */

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

/* ---- the rules of a backend ---- */

/* upipe_linear_ops -- what a backend implements; arguments are checked, and chunk and scale are set */
typedef struct upipe_linear_ops {
    const char *name;
    int chunk_max; /* tokens of a chunk, at most */
    upipe_status (*fwd)(upipe_ctx *c, const upipe_linear *a);
    upipe_status (*bwd)(upipe_ctx *c, const upipe_linear_grad *g);
    /* Of a call. More chunks never take less. */
    size_t (*bytes)(const upipe_ops *ops, const upipe_linear *a, upipe_linear_direction pass);
    /* Optional, for upipe_linear_layer.h. */
    upipe_status (*conv)(upipe_ctx *c, const upipe_linear_conv *a);
    upipe_status (*conv_bwd)(upipe_ctx *c, const upipe_linear_conv_grad *g);
    upipe_status (*gates)(upipe_ctx *c, const upipe_linear_gates *a);
    upipe_status (*gates_bwd)(upipe_ctx *c, const upipe_linear_gates_grad *g);
} upipe_linear_ops;

/* Row i's chunk ends before this row. */
UPIPE_API int64_t upi_linear_chunk_end(const upipe_linear *a, int64_t i)
{
    const int64_t pos = a->pos + i, border = upi_border_behind(&a->borders, pos) - a->pos;
    const int64_t end = (pos / a->chunk + 1) * a->chunk - a->pos;
    const int64_t first = border < end ? border : end;
    return first < a->q.n ? first : a->q.n;
}

/* Whether a document begins at row i. */
UPIPE_API int upi_linear_begins(const upipe_linear *a, int64_t i)
{
    return upi_border_before(&a->borders, a->pos + i) == a->pos + i;
}

/* ---- dry runs ---- */

UPIPE_API upipe_status upi_linear_dry_fwd(upipe_ctx *c, const upipe_linear *a)
{
    (void)c, (void)a;
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_linear_dry_bwd(upipe_ctx *c, const upipe_linear_grad *g)
{
    (void)c, (void)g;
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_linear_dry_conv(upipe_ctx *c, const upipe_linear_conv *a)
{
    (void)c, (void)a;
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_linear_dry_conv_bwd(upipe_ctx *c, const upipe_linear_conv_grad *g)
{
    (void)c, (void)g;
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_linear_dry_gates(upipe_ctx *c, const upipe_linear_gates *a)
{
    (void)c, (void)a;
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_linear_dry_gates_bwd(upipe_ctx *c, const upipe_linear_gates_grad *g)
{
    (void)c, (void)g;
    return UPIPE_OK;
}

/* upi_linear_rules -- the rules that a context runs: in a dry pool ones with the sizes and limits of the given ones,
 *                     which compute nothing. They lack what the given ones lack, unless those are sizes alone */
UPIPE_API upipe_linear_ops upi_linear_rules(const upipe_ctx *c, const upipe_linear_ops *rules)
{
    upipe_linear_ops own = *rules;
    const int sizes = rules->fwd == NULL;
    if (!c->mem->dry) return own;
    own.fwd = upi_linear_dry_fwd;
    own.bwd = upi_linear_dry_bwd;
    if (sizes || own.conv != NULL) own.conv = upi_linear_dry_conv;
    if (sizes || own.conv_bwd != NULL) own.conv_bwd = upi_linear_dry_conv_bwd;
    if (sizes || own.gates != NULL) own.gates = upi_linear_dry_gates;
    if (sizes || own.gates_bwd != NULL) own.gates_bwd = upi_linear_dry_gates_bwd;
    return own;
}

/* ---- checks ---- */

UPIPE_API upipe_status upi_linear_like(upipe_ctx *c, const char *name, upipe_view v, int64_t n, int32_t h,
                                       int32_t d, upipe_dtype dtype)
{
    if (v.n != n || v.h != h || v.d != d)
        return upipe_fail(&c->err, UPIPE_ERR_ARG,
                          "linear attention: %s is [%lld][%d][%d], not [%lld][%d][%d]", name, (long long)v.n,
                          v.h, v.d, (long long)n, h, d);
    if (upi_enum_number(&v.dtype, sizeof v.dtype) != (int)dtype)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "linear attention: %s is %s, not %s", name,
                          upi_dtype_name_of(&v.dtype), upipe_dtype_name(dtype));
    if (v.data == NULL && n > 0)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "linear attention: %s is NULL", name);
    return UPIPE_OK;
}

/* Shapes and numbers of a call; sets the defaults. */
UPIPE_API upipe_status upi_linear_check(upipe_ctx *c, const upipe_linear_ops *rules, upipe_linear *a)
{
    const upipe_view q = a->q;
    const int dtype = upi_enum_number(&q.dtype, sizeof q.dtype);
    const int32_t h = a->v.h, d = a->v.d;
    if (dtype < 0 || dtype > UPIPE_BF16)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "linear attention: data type %d is neither f32 nor bf16",
                          dtype);
    if (q.n < 0 || q.h < 1 || h < 1 || h % q.h != 0)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "linear attention: %lld tokens, %d heads over %d key heads",
                          (long long)q.n, h, q.h);
    if (q.d < 1 || q.d > UPIPE_LINEAR_DIM_MAX || d < 1 || d > UPIPE_LINEAR_DIM_MAX)
        return upipe_fail(&c->err, UPIPE_ERR_UNSUPPORTED,
                          "linear attention: a state of %d x %d; 1 to %d each are built", q.d, d,
                          UPIPE_LINEAR_DIM_MAX);
    if (a->chunk < 0 || a->chunk > UPIPE_LINEAR_CHUNK_MAX || a->pos < 0 || a->pos > INT64_C(1) << 60 ||
        !(a->scale >= 0) || !__builtin_isfinite(a->scale))
        return upipe_fail(&c->err, UPIPE_ERR_ARG,
                          "linear attention: chunks of %d tokens (at most %d), position %lld, scale %g",
                          a->chunk, UPIPE_LINEAR_CHUNK_MAX, (long long)a->pos, (double)a->scale);
    UPIPE_TRY(upi_linear_like(c, "q", q, q.n, q.h, q.d, q.dtype));
    UPIPE_TRY(upi_linear_like(c, "k", a->k, q.n, q.h, q.d, q.dtype));
    UPIPE_TRY(upi_linear_like(c, "v", a->v, q.n, h, d, q.dtype));
    UPIPE_TRY(upi_linear_like(c, "g", a->g, q.n, h, 1, UPIPE_F32));
    if (a->beta.data != NULL) UPIPE_TRY(upi_linear_like(c, "beta", a->beta, q.n, h, 1, UPIPE_F32));
    if (a->state == NULL) return upipe_fail(&c->err, UPIPE_ERR_ARG, "linear attention: the state is NULL");
    UPIPE_TRY(upi_borders_check(&c->err, &a->borders));
    UPIPE_TRY(upi_borders_cover(&c->err, &a->borders, a->pos, a->pos + q.n));
    if (a->chunk == 0) a->chunk = UPIPE_LINEAR_CHUNK;
    if (a->chunk > rules->chunk_max)
        return upipe_fail(&c->err, UPIPE_ERR_UNSUPPORTED,
                          "linear attention: chunks of %d tokens; the rules %s have at most %d", a->chunk,
                          rules->name, rules->chunk_max);
    if (a->scale == 0) a->scale = (float)(1.0 / __builtin_sqrt((double)q.d));
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_linear_check_work(upipe_ctx *c, const upipe_linear *a, size_t need)
{
    if (need == 0) return UPIPE_OK;
    if (a->work_bytes >= need && a->work != NULL && (uintptr_t)a->work % 64 == 0) return UPIPE_OK;
    return upipe_fail(&c->err, UPIPE_ERR_ARG,
                      "linear attention: %zu bytes of scratch at %p; %zu at a multiple of 64 are needed",
                      a->work_bytes, a->work, need);
}

/* ---- calls ---- */

/* upipe_linear_bytes -- scratch of a call: shapes, positions, borders and chunk of `a` are read, and whether it has beta.
 * 0 for what a call refuses */
UPIPE_API size_t upipe_linear_bytes(upipe_ctx *c, const upipe_linear_ops *rules, const upipe_linear *a,
                                    upipe_linear_direction pass)
{
    upipe_linear call = *a;
    return upi_linear_check(c, rules, &call) == UPIPE_OK ? rules->bytes(c->ops, &call, pass) : 0;
}

/* upipe_linear_fwd -- o and the state behind the last token
 *   errors  ARG (shapes, too little scratch), UNSUPPORTED (dims, a chunk above rules->chunk_max), the gemm's
 *   order   enqueued on ctx->stream
 */
UPIPE_API upipe_status upipe_linear_fwd(upipe_ctx *c, const upipe_linear_ops *rules, const upipe_linear *a)
{
    upipe_linear call;
    if (rules == NULL || a == NULL)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "linear attention: the rules or the call are NULL");
    call = *a;
    UPIPE_TRY(upi_linear_check(c, rules, &call));
    UPIPE_TRY(upi_linear_like(c, "o", a->o, a->q.n, a->v.h, a->v.d, a->q.dtype));
    if (a->out == NULL) return upipe_fail(&c->err, UPIPE_ERR_ARG, "linear attention: out is NULL");
    UPIPE_TRY(upi_linear_check_work(c, a, rules->bytes(c->ops, &call, UPIPE_LINEAR_FWD)));
    return rules->fwd(c, &call);
}

/* upipe_linear_bwd -- gradients of q, k, v, g, beta and of the state. Errors and order as upipe_linear_fwd */
UPIPE_API upipe_status upipe_linear_bwd(upipe_ctx *c, const upipe_linear_ops *rules,
                                        const upipe_linear_grad *g)
{
    upipe_linear_grad call;
    upipe_linear *a = &call.a;
    if (rules == NULL || g == NULL)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "linear attention: the rules or the call are NULL");
    call = *g;
    UPIPE_TRY(upi_linear_check(c, rules, a));
    UPIPE_TRY(upi_linear_like(c, "dout", g->dout, a->q.n, a->v.h, a->v.d, a->q.dtype));
    UPIPE_TRY(upi_linear_like(c, "dq", g->dq, a->q.n, a->q.h, a->q.d, a->q.dtype));
    UPIPE_TRY(upi_linear_like(c, "dk", g->dk, a->q.n, a->q.h, a->q.d, a->q.dtype));
    UPIPE_TRY(upi_linear_like(c, "dv", g->dv, a->q.n, a->v.h, a->v.d, a->q.dtype));
    UPIPE_TRY(upi_linear_like(c, "dg", g->dg, a->q.n, a->v.h, 1, UPIPE_F32));
    if (a->beta.data != NULL) UPIPE_TRY(upi_linear_like(c, "dbeta", g->dbeta, a->q.n, a->v.h, 1, UPIPE_F32));
    if (g->dstate == NULL) return upipe_fail(&c->err, UPIPE_ERR_ARG, "linear attention: dstate is NULL");
    UPIPE_TRY(upi_linear_check_work(c, a, rules->bytes(c->ops, a, UPIPE_LINEAR_BWD)));
    return rules->bwd(c, &call);
}

#endif

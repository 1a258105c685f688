/* upipe_ops.h -- the compute table: what a backend implements
 *
 * A backend's header fills the table (upipe_cpu_ops). A host overrides an entry by assigning it:
 *
 *     upipe_ops ops;
 *     upipe_cpu_ops(&ops);
 *     ops.gemm = my_gemm;
 *
 * An entry of the host may serve some calls and forward the others to the entry that it has replaced. The
 * host keeps the replaced entry, with whatever else its own needs, behind ops.user. attn_can and the *_bytes
 * entries must then hold for whichever entry serves a call (docs/porting.md).
 *
 * Rules for every entry. Work is enqueued on ctx->stream. The caller checks the arguments; a request that the
 * backend does not support returns UPIPE_ERR_UNSUPPORTED with a sentence in ctx->err. An entry allocates
 * nothing: its scratch is (work, work_bytes), at least as large as the matching *_bytes entry asked for,
 * 64-byte aligned. Storage types are read from the views; sums are f32.
 */
#ifndef UPIPE_OPS_H
#define UPIPE_OPS_H

#include "upipe_base.h"

/* Rows of one partial sum where a sum runs over tokens: gradients of weights. Calls that accumulate and begin
 * at a multiple of it have the bits of one call. */
enum { UPIPE_SUM_ROWS = 64 };

struct upipe_attn;      /* upipe_attn.h */
struct upipe_attn_grad; /* upipe_attn.h */

enum {
    UPIPE_GEMM_TRANS_A = 1,    /* a is stored [depth][rows] instead of [rows][depth] */
    UPIPE_GEMM_TRANS_B = 2,    /* b is stored [cols][depth] instead of [depth][cols]: y = x * W^T */
    UPIPE_GEMM_ACCUMULATE = 4, /* c += instead of c =; c must then be f32 */
};

/* See upipe_attn. */
enum {
    UPIPE_ATTN_WINDOW = 1,
    UPIPE_ATTN_CU_SEQLENS = 2,
    UPIPE_ATTN_SOFTCAP = 4,
    UPIPE_ATTN_SINKS = 8,
    UPIPE_ATTN_V_DIM = 16,
    UPIPE_ATTN_ADD_DQ = 32 /* backward with merge */
};

/* upipe_rope -- rotary position embedding, in place
 *   x            [count] blocks of tokens x heads x d of any strides, block i at x.data + i * step elements
 *   pos0         position of token 0 of every block
 *   pos_step     positions between neighbouring tokens; 0 = 1
 *   dims         the first ones of a head are rotated, the others left; 0 = all d
 *   theta        base of the frequencies: pair p of dims/2 is rotated by position * theta^(-2p/dims)
 *   rates        f64 [dims/2], host memory, read before the call returns: pair p is rotated by position * rates[p],
 *                and theta is not read; NULL = by theta
 *   factor       what is rotated is multiplied by it too; 0 = 1
 *   interleaved  pairs are (2p, 2p+1); otherwise (p, p + dims/2), the layout of Hugging Face's Llama
 *   inverse      rotates back, and multiplies by factor as well: the gradient
 */
typedef struct upipe_rope {
    upipe_view x;
    int64_t count, step, pos0, pos_step;
    double theta;
    const double *rates;
    double factor;
    int32_t dims;
    int interleaved, inverse;
} upipe_rope;

/* upipe_gate_kind -- what is done with a gate z before it multiplies
 *   silu     z / (1 + exp(-z))
 *   gelu     by tanh: z / 2 * (1 + tanh(u)) = z / (1 + exp(-2u)), where u = sqrt(2 / pi) * (z + 0.044715 * z^3)
 *   sigmoid  1 / (1 + exp(-z))
 */
typedef enum upipe_gate_kind { UPIPE_GATE_SILU, UPIPE_GATE_GELU, UPIPE_GATE_SIGMOID } upipe_gate_kind;

/* The numbers of gelu: 2u = z * (UPIPE_GELU_ONE + UPIPE_GELU_CUBE * z^2). */
#define UPIPE_GELU_ONE  1.5957691216057308f /* 2 sqrt(2 / pi) */
#define UPIPE_GELU_CUBE 0.0713548162726002f /* of that 0.044715 */

/* upipe_cross_entropy -- softmax cross-entropy of rows of logits, and its gradient
 *   logits   f32 [n][1][V]; consumed
 *   grad     [n][1][V]: scale * (softmax - onehot), 0 in ignored rows; may be logits itself where it is f32,
 *            otherwise does not overlap it. data NULL = not wanted
 *   loss     [n]: log sum exp - logit of the target, not scaled; 0 in ignored rows
 *   softcap  logits are softcap * tanh(logit / softcap) of those given, whose gradient it is; 0 = none
 *   targets  [n], device memory; a negative one ignores its row. A target beyond V - 1 is an error (ARG) if
 *            the backend can tell; otherwise the row's loss is NaN
 */
typedef struct upipe_cross_entropy {
    upipe_view logits, grad;
    float *loss;
    const int32_t *targets;
    float scale, softcap;
} upipe_cross_entropy;

/* upipe_adamw -- one step of AdamW (decoupled weight decay) over n elements
 *
 *     g' = g * grad_scale;   m = beta1 m + (1 - beta1) g';   v = beta2 v + (1 - beta2) g'^2
 *     w = w - rate * (m / (1 - beta1^step) / (sqrt(v / (1 - beta2^step)) + eps) + decay * w)
 *
 *   w m v   f32 [n], updated
 *   g       f32 [n]
 *   copy    [n] elements of copy_dtype: w, rounded; NULL = none
 *   step    1 for the first one
 */
typedef struct upipe_adamw {
    float *w, *m, *v;
    const float *g;
    void *copy;
    int64_t n, step;
    double rate, beta1, beta2, eps, decay, grad_scale;
    upipe_dtype copy_dtype;
} upipe_adamw;

/* upipe_par -- the host's threads, for backends that compute on them
 *   run      calls task(arg, i) once for every i in 0 .. count - 1, in any order and possibly at the same
 *            time. It returns when all calls have returned, and never fails. A call that finds the threads
 *            busy may run every i on the calling thread
 *   self     the host's, passed to run
 *   workers  threads that may run at the same time, >= 1: scratch is asked for that many
 * Results have the same bits whatever run does, and for any number of workers.
 */
typedef struct upipe_par {
    void (*run)(void *self, int32_t count, void (*task)(void *arg, int32_t i), void *arg);
    void *self;
    int32_t workers;
} upipe_par;

typedef struct upipe_ops {
    const char *name; /* "cpu-avx2", "cpu-portable", "cuda", ... */
    void *self;       /* the backend's own (a cuBLAS handle, say) */
    void *user;       /* the host's own, for entries that it has set; the library never looks at it */
    int attn_can;     /* what its attention supports beyond causal masks and equal head dims: UPIPE_ATTN_* */
    int attn_reads_o; /* nonzero: attn_bwd reads O, upipe_attn.o; blocks then keep O, and send it beside dO */
    size_t loss_bytes; /* of the default tile of logits, where it is more than the paper's square */

    /* Set by the host; NULL: a call computes on the calling thread. It is here and not in the context,
     * because the *_bytes entries see the table alone: a dry run asks them before there is a context. */
    const upipe_par *par;

    /* Returns when all that was enqueued on ctx->stream is done. */
    upipe_status (*sync)(upipe_ctx *c);
    /* Copies bytes between any of the device's memory and the host's; dst and src do not overlap. Pageable
     * host memory has been read, or written, when the call returns. Pinned host memory is in use until
     * sync. */
    upipe_status (*copy)(upipe_ctx *c, void *dst, const void *src, size_t bytes);
    upipe_status (*zero)(upipe_ctx *c, void *dst, size_t bytes);
    /* dst = src, element by element, changing the storage type; equal shapes, any strides, those of 0 in src too. */
    upipe_status (*cast)(upipe_ctx *c, upipe_view dst, upipe_view src);

    /* For every j < out.h: out_j (+)= op(a_j) * op(b_j), where out_j is the matrix [out.n][out.d] at head j of
     * the view. All j share an operand with h = 1. Where out has one matrix, and a and b have the same number of
     * several, their products are added up: out (+)= sum over j of op(a_j) * op(b_j). A backend may demand that
     * these lie as one matrix whose depth is longer (upi_gemm_join); the library's do.
     *     The built-in CPU entry alone promises its bits: the depth is cut into sums of a fixed length, from
     * the call's first element on (UPIPE_SUM_ROWS with TRANS_A; one matrix where products are added up, if
     * that is shorter). out is the old out plus these sums, in order. Bits depend neither on the blocking nor on
     * how rows and columns are split over calls, nor on how the depth is, if it is cut between two sums. */
    upipe_status (*gemm)(upipe_ctx *c, upipe_view out, upipe_view a, upipe_view b, int flags, void *work,
                         size_t work_bytes);
    /* Scratch that gemm needs for these shapes; fewer rows never need more. The data pointers are not
     * read. */
    size_t (*gemm_bytes)(const struct upipe_ops *ops, upipe_view out, upipe_view a, upipe_view b, int flags);

    upipe_status (*attn_fwd)(upipe_ctx *c, const struct upipe_attn *a);
    upipe_status (*attn_bwd)(upipe_ctx *c, const struct upipe_attn_grad *g);
    /* Scratch of one call; with backward != 0, of attn_bwd. Depends on shapes and types alone. */
    size_t (*attn_bytes)(const struct upipe_ops *ops, const struct upipe_attn *a, int backward);

    upipe_status (*rope)(upipe_ctx *c, const upipe_rope *r);
    /* y = x * rsqrt(mean(x^2) + eps) * norm_weight[d], over every row of d: a token, or each of its heads. y
     * may be x. */
    upipe_status (*rmsnorm)(upipe_ctx *c, upipe_view y, upipe_view x, const float *weight, float eps);
    /* Its backward: dx = the gradient of x, the norm's input; with accumulate dx +=, otherwise dx may be dy
     * or x. dweight f32 [h][d], one row a head: += partial sums of UPIPE_SUM_ROWS
     * tokens, in order; NULL = not wanted. */
    upipe_status (*rmsnorm_bwd)(upipe_ctx *c, upipe_view dx, upipe_view dy, upipe_view x, const float *weight,
                                float eps, float *dweight, int accumulate);

    /* The gradient of a bias: db f32 [h][d] += sums of dy [n][h][d] over its tokens, in partial sums of
     * UPIPE_SUM_ROWS tokens, in order. (upipe_bias_add adds a bias.) */
    upipe_status (*bias_bwd)(upipe_ctx *c, float *db, upipe_view dy);

    /* out[i][j] = sum over k of a[i][j][k] * b[i][j][k], in f32 and in the order in which attn_bwd sums dO *
     * V, so that the two cancel where they should. out is an f32 view with d = 1. */
    upipe_status (*rowdot)(upipe_ctx *c, upipe_view out, upipe_view a, upipe_view b);
    /* dst (+)= src_0 + src_1 + ... in this order. src_i is at src + i * stride: f32 elements packed in dst's
     * shape. The sum of an element is one f32 chain that starts from 0, or from dst with accumulate (dst is
     * then f32). */
    upipe_status (*sum)(upipe_ctx *c, upipe_view dst, const float *src, int64_t stride, int count,
                        int accumulate);
    /* y += x, element by element, rounded once; equal shapes, any types and strides, those of 0 in x too. */
    upipe_status (*add)(upipe_ctx *c, upipe_view y, upipe_view x);
    /* y = factor * x, element by element, rounded once; equal shapes, any types. y may be x. */
    upipe_status (*scale)(upipe_ctx *c, upipe_view y, upipe_view x, float factor);

    /* y = kind(gate) * up; y may be gate or up. */
    upipe_status (*gate)(upipe_ctx *c, upipe_gate_kind kind, upipe_view y, upipe_view gate, upipe_view up);
    /* Its backward, in place: gate and up become their gradients. */
    upipe_status (*gate_bwd)(upipe_ctx *c, upipe_gate_kind kind, upipe_view gate, upipe_view up,
                             upipe_view dy);
    upipe_status (*cross_entropy)(upipe_ctx *c, const upipe_cross_entropy *x);

    /* x[i] = table[tokens[i]]; x [n][1][D], table [V][1][D] of any types. tokens: the device's memory. */
    upipe_status (*embed)(upipe_ctx *c, upipe_view x, upipe_view table, const int32_t *tokens);
    /* dtable[tokens[i]] += dx[i], for i in order; dtable f32. */
    upipe_status (*embed_bwd)(upipe_ctx *c, upipe_view dtable, upipe_view dx, const int32_t *tokens);

    /* *out = the sum of all elements of x, or of their squares, in f64; out is the device's memory, so that the
     * host waits once for the totals of many. */
    upipe_status (*total)(upipe_ctx *c, double *out, upipe_view x, int squares);
    upipe_status (*adamw)(upipe_ctx *c, const upipe_adamw *a);
} upipe_ops;

/* upipe_bias_add -- y += b, a bias
 *   y       [n][h][d] view
 *   b       f32: head j of y has its d elements from b + j * h_stride on
 *   errors  those of the table's add
 */
UPIPE_API upipe_status upipe_bias_add(upipe_ctx *c, upipe_view y, const float *b, int64_t h_stride)
{
    void *data = (void *)(uintptr_t)b;
    return c->ops->add(c, y, upipe_view_make(data, UPIPE_F32, y.n, 0, y.h, h_stride, y.d));
}

enum { UPIPE_ROPE_DIM_MAX = 256 };

/* ---- a side stream ---- */

/* A rank has a compute stream: ctx->stream, or the calling thread. A side stream runs beside it: on a device
 * it is a second stream, on a CPU a thread. The host makes it (cuda/upipe_cuda_side_stream.h,
 * cpu/upipe_cpu_side_stream.h) and passes it in ctx->side_stream. Plans with desc.overlap use it.
 *
 *     ctx.side_stream = &side;
 */

/* Kinds of points: one stream reaches a point, the other one waits for it. */
enum { UPIPE_SIDE_BEGIN, UPIPE_SIDE_READY, UPIPE_SIDE_DONE, UPIPE_SIDE_POINTS };

/* upipe_side_stream -- what a side stream implements; c is the context of the calling stream, compute or side
 *   ctx    the side stream's context; its maker sets ctx.stream, upi_pipeline_run the rest
 *   ops    the side stream's compute table; NULL: the rank's own, which is then called from both streams.
 *          Scratch sizes are those of the rank's own table for both
 *   self   the maker's
 *   post   runs task(arg) on the side stream, after all tasks posted before; it may run before post returns.
 *          Tasks call the team, upipe_comm_abort included; the compute stream does not until it has joined
 *   mark   records point number n of this kind behind the work that c's stream has so far: n = 1, 2, ...
 *   meet   later work of c's stream waits until the other stream has reached that point. The host calls it
 *          after the mark, or on another thread
 *   join   returns when all tasks have run; what they enqueued precedes later work of c's stream. Points
 *          count from 1 again
 */
typedef struct upipe_side_stream {
    upipe_ctx ctx;
    const struct upipe_ops *ops;
    void *self;
    upipe_status (*post)(upipe_ctx *c, struct upipe_side_stream *side_stream, void (*task)(void *arg),
                         void *arg);
    upipe_status (*mark)(upipe_ctx *c, struct upipe_side_stream *side_stream, int point, int64_t n);
    upipe_status (*meet)(upipe_ctx *c, struct upipe_side_stream *side_stream, int point, int64_t n);
    upipe_status (*join)(upipe_ctx *c, struct upipe_side_stream *side_stream);
} upipe_side_stream;

UPIPE_API upipe_status upi_side_stream_inline_post(upipe_ctx *c, upipe_side_stream *side_stream,
                                                   void (*task)(void *arg), void *arg)
{
    (void)c, (void)side_stream;
    task(arg);
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_side_stream_inline_point(upipe_ctx *c, upipe_side_stream *side_stream, int point,
                                                    int64_t n)
{
    (void)c, (void)side_stream, (void)point, (void)n;
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_side_stream_inline_join(upipe_ctx *c, upipe_side_stream *side_stream)
{
    (void)c, (void)side_stream;
    return UPIPE_OK;
}

/* upipe_side_stream_inline -- a side stream that is the compute stream: each task runs where it is posted
 *   stream  the stream of the tasks
 * Nothing overlaps. For dry runs, and for a pipeline on one stream.
 */
UPIPE_API void upipe_side_stream_inline(upipe_side_stream *side_stream, void *stream)
{
    memset(side_stream, 0, sizeof *side_stream);
    side_stream->ctx.stream = stream;
    side_stream->post = upi_side_stream_inline_post;
    side_stream->mark = side_stream->meet = upi_side_stream_inline_point;
    side_stream->join = upi_side_stream_inline_join;
}

#include "parts/check.h"

#endif

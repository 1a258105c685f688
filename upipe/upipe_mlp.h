/* upipe_mlp.h -- the MLP, and the output head with its loss, by tiles of tokens
 *
 * Everything but attention treats each token by itself. So it runs on a few tokens at a time and holds its
 * intermediate tensors for those alone: the MLP's hidden layer, and the logits, which never exist as a whole.
 * The backward recomputes a tile's intermediates.
 *
 *     upipe_mlp_fwd(&ctx, &mlp, y, x);         y = x + down(silu(gate(n)) * up(n)), n = norm(x)
 *     upipe_loss_bwd(&ctx, &head, dx, &grads, losses, x, targets);     losses, and all their gradients
 *     upipe_mlp_bwd(&ctx, &mlp, dx, &grads, dy, x);            dx may be dy
 *
 * RMS norm and RoPE need no scratch: they are entries of the compute table (rmsnorm, rope), each with its
 * backward.
 *
 * tile_bytes bounds the bytes of a tile, and so its rows. The default is the paper's square: D rows, and for
 * logits D * D elements, or more on a GPU (ops.loss_bytes). Tiles change no bit of a result: sums over tokens are
 * made of partial sums of UPIPE_SUM_ROWS rows, and a tile has a multiple of these rows, or all there are.
 * No call waits for a peer. A failed call frees what it allocated and does not abort the team.
 */
#ifndef UPIPE_MLP_H
#define UPIPE_MLP_H

#include "upipe_mem.h"
#include "upipe_ops.h"

enum { UPIPE_TILE_LOSS_ROWS = 64 }; /* least rows of the default tile of logits */

/* upipe_mlp -- an MLP with a gate; zero fields are defaults
 *   w_gate w_up  [hidden][D], of x's type
 *   w_down       [D][hidden], of x's type
 *   norm_weight  f32 [D]: RMS norm of x before the MLP; NULL = none
 *   post_norm_weight  f32 [D]: RMS norm of the MLP's result, before x is added; NULL = none
 *   norm_eps     of these norms; 0 without any
 *   hidden       width of the hidden layer, F
 *   gelu         nonzero: gelu by tanh of the gate (UPIPE_GATE_GELU), otherwise silu
 *   residual     nonzero: x is added to the result
 *   result_scale the result is multiplied by it before x is added; 0 = 1
 *   tile_bytes   limit of a tile's tensors, without the product's scratch, at least that of UPIPE_SUM_ROWS
 *                rows; 0 = D rows
 */
typedef struct upipe_mlp {
    const void *w_gate, *w_up, *w_down;
    const float *norm_weight, *post_norm_weight;
    int64_t hidden;
    float norm_eps, result_scale;
    int gelu, residual;
    size_t tile_bytes;
} upipe_mlp;

/* Gradients, f32, shapes of the weights, +=; NULL = not wanted. */
typedef struct upipe_mlp_grads {
    float *w_gate, *w_up, *w_down, *norm_weight, *post_norm_weight;
} upipe_mlp_grads;

/* upipe_loss -- final norm, projection to logits, softmax cross-entropy; zero fields are defaults
 *   w           [vocab][D], of x's type
 *   norm_weight norm_eps  as in upipe_mlp
 *   scale       of all gradients, the weights' too: 1 / (valid targets of all ranks) for the gradient of the
 *               mean loss. The losses are not scaled. 0 = 1
 *   logit_scale of the logits; 0 = 1
 *   logit_softcap  then of the logits: softcap * tanh(logit / softcap); 0 = none
 *   tile_bytes  as in upipe_mlp; 0 = D * D / vocab rows, or those of the table's loss_bytes if they are more; at most D,
 *               at least UPIPE_TILE_LOSS_ROWS
 */
typedef struct upipe_loss {
    const void *w;
    const float *norm_weight;
    int64_t vocab;
    float norm_eps, scale, logit_scale, logit_softcap;
    size_t tile_bytes;
} upipe_loss;

/* Gradients, f32, +=; NULL = not wanted. */
typedef struct upipe_loss_grads {
    float *w, *norm_weight;
} upipe_loss_grads;

/* ---- tiles ---- */

/* What a call holds: tensors that grow with the tile's rows, and the scratch of its products. */
typedef struct upi_tiling {
    int64_t rows;      /* of a tile; the last one may have fewer */
    size_t row_bytes;  /* of all tensors */
    size_t work_bytes; /* scratch of its products */
} upi_tiling;

/* Rows of a tile: as many as fit the budget, or the default; never more than there are. Where there are more
 * tiles than one, each begins between two partial sums of UPIPE_SUM_ROWS rows: so tiles change no bit of a
 * gradient of weights. Errors: ARG if the budget is too small for that; OVERFLOW. */
UPIPE_API upipe_status upi_tiles_fit(upi_tiling *t, int64_t rows, int64_t standard, size_t budget,
                                     const char *what, upipe_err *e)
{
    const int64_t least = rows < UPIPE_SUM_ROWS ? rows : (int64_t)UPIPE_SUM_ROWS;
    int64_t fit = budget > 0 ? (int64_t)(budget / t->row_bytes) : standard > least ? standard : least, bytes;
    t->rows = fit < rows ? fit / UPIPE_SUM_ROWS * UPIPE_SUM_ROWS : rows;
    if (fit < least)
        return upipe_fail(e, UPIPE_ERR_ARG, "%s: a tile of %lld rows takes %zu bytes, tile_bytes allows %zu",
                          what, (long long)least, (size_t)least * t->row_bytes, budget);
    if (!upipe_mul(&bytes, t->rows, (int64_t)t->row_bytes))
        return upipe_fail(e, UPIPE_ERR_OVERFLOW, "%s: a tile of %lld rows of %zu bytes", what,
                          (long long)t->rows, t->row_bytes);
    return UPIPE_OK;
}

/* A packed matrix whose shape alone matters yet. */
UPIPE_API upipe_view upi_tiles_shape(upipe_dtype dtype, int64_t rows, int64_t columns)
{
    return upipe_view_packed(NULL, dtype, rows, 1, (int32_t)columns);
}

/* Scratch of y = x * w^T, with w [columns][depth] and y of type `out`. With backward also of dx = dy * w,
 * where dx has type `dx`; of a second such product added to an f32 dx; and of dw += dy^T * x. */
UPIPE_API size_t upi_tiles_product_bytes(const upipe_ops *ops, upipe_dtype out, upipe_dtype dx,
                                         upipe_dtype dtype, int64_t rows, int64_t columns, int64_t depth,
                                         int backward)
{
    upipe_view x = upi_tiles_shape(dtype, rows, depth), w = upi_tiles_shape(dtype, columns, depth);
    upipe_view y = upi_tiles_shape(dtype, rows, columns), sum = upi_tiles_shape(dx, rows, depth);
    upipe_view dw = upi_tiles_shape(UPIPE_F32, columns, depth);
    size_t bytes = ops->gemm_bytes(ops, upi_tiles_shape(out, rows, columns), x, w, UPIPE_GEMM_TRANS_B);
    if (!backward) return bytes;
    bytes = upipe_max_bytes(bytes, ops->gemm_bytes(ops, sum, y, w, 0));
    if (dx == UPIPE_F32)
        bytes = upipe_max_bytes(bytes, ops->gemm_bytes(ops, sum, y, w, UPIPE_GEMM_ACCUMULATE));
    return upipe_max_bytes(bytes, ops->gemm_bytes(ops, dw, y, x, UPIPE_GEMM_TRANS_A | UPIPE_GEMM_ACCUMULATE));
}

/* ARG unless v is a matrix of the same type and shape, and has a buffer. */
UPIPE_API upipe_status upi_tiles_check(upipe_ctx *c, const char *call, const char *name, upipe_view v,
                                       upipe_view like)
{
    const int type = upi_enum_number(&v.dtype, sizeof v.dtype);
    const int typed =
        type >= 0 && type <= UPIPE_BF16 && type == upi_enum_number(&like.dtype, sizeof like.dtype);
    if (v.h == 1 && v.n == like.n && v.d == like.d && typed && v.n >= 0 && v.d >= 1 &&
        (v.data != NULL || v.n == 0))
        return UPIPE_OK;
    return upipe_fail(&c->err, UPIPE_ERR_ARG, "%s: %s is %s [%lld][%d][%d]%s, not %s [%lld][1][%d]", call,
                      name, upi_dtype_name_of(&v.dtype), (long long)v.n, v.h, v.d,
                      v.data == NULL ? " at NULL" : "", upi_dtype_name_of(&like.dtype), (long long)like.n,
                      like.d);
}

/* Views that begin at one address must have one stride: a tile's rows are written before the next tile's are
 * read. */
UPIPE_API upipe_status upi_tiles_check_alias(upipe_ctx *c, const char *call, const char *to, upipe_view y,
                                             const char *from, upipe_view x)
{
    if (x.n < 2 || y.data != x.data || y.n_stride == x.n_stride) return UPIPE_OK;
    return upipe_fail(&c->err, UPIPE_ERR_ARG, "%s: %s, of stride %lld, lies over %s, of stride %lld", call,
                      to, (long long)y.n_stride, from, (long long)x.n_stride);
}

UPIPE_API upipe_status upi_tiles_norm_check(upipe_ctx *c, const char *call, const float *norm_weight,
                                            float eps, const float *norm_weight_grad)
{
    if (!(eps >= 0) || !__builtin_isfinite(eps))
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "%s: norm_eps %g", call, (double)eps);
    if (norm_weight == NULL && (eps != 0 || norm_weight_grad != NULL))
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "%s: %s without the norm weight of a norm", call,
                          eps != 0 ? "norm_eps" : "a gradient of the norm weight");
    return UPIPE_OK;
}

/* Blocks of one call. wide: the MLP's gate, up and hidden layer; or the logits and their gradient. post: the gradient
 * of the MLP's product with w_down where a norm or a factor follows. */
typedef struct upi_tiles_buf {
    void *norm, *wide[3], *post, *sum, *work;
} upi_tiles_buf;

UPIPE_API upipe_status upi_tiles_alloc(upipe_ctx *c, void **out, int64_t rows, int64_t columns,
                                       size_t element, int use, const char *tag)
{
    return upipe_mem_alloc(c->mem, out, (size_t)(rows * columns) * element, use, tag, &c->err);
}

UPIPE_API upipe_status upi_tiles_free(upipe_ctx *c, upi_tiles_buf *buf)
{
    int i;
    UPIPE_TRY(upipe_mem_free(c->mem, buf->norm, &c->err));
    for (i = 0; i < 3; ++i) UPIPE_TRY(upipe_mem_free(c->mem, buf->wide[i], &c->err));
    UPIPE_TRY(upipe_mem_free(c->mem, buf->post, &c->err));
    UPIPE_TRY(upipe_mem_free(c->mem, buf->sum, &c->err));
    return upipe_mem_free(c->mem, buf->work, &c->err);
}

/* ---- MLP ---- */

/* Whether the product with w_down is not yet what is added to x. */
UPIPE_API int upi_mlp_is_changed(const upipe_mlp *m)
{
    return m->post_norm_weight != NULL || m->result_scale != 0;
}

UPIPE_API upipe_status upi_mlp_tile_bytes(upi_tiling *t, const upipe_ops *ops, const upipe_mlp *m,
                                          upipe_view x, int backward, upipe_err *e)
{
    size_t el = upipe_dtype_bytes(x.dtype), dim = (size_t)x.d, hidden = (size_t)m->hidden;
    t->row_bytes = (m->norm_weight != NULL ? dim * el : 0) + (backward ? 3 : 2) * hidden * el + dim * 4;
    if (backward && upi_mlp_is_changed(m)) t->row_bytes += dim * el;
    UPIPE_TRY(upi_tiles_fit(t, x.n, x.d, m->tile_bytes, backward ? "mlp_bwd" : "mlp_fwd", e));
    /* gate and up; then down, whose input's gradient has x's type */
    t->work_bytes = upipe_max_bytes(
        upi_tiles_product_bytes(ops, x.dtype, UPIPE_F32, x.dtype, t->rows, m->hidden, x.d, backward),
        upi_tiles_product_bytes(ops, UPIPE_F32, x.dtype, x.dtype, t->rows, x.d, m->hidden, backward));
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_mlp_check(upipe_ctx *c, const char *call, const upipe_mlp *m, upipe_view x,
                                     const upipe_mlp_grads *g)
{
    upipe_view like = x;
    like.h = 1;
    UPIPE_TRY(upi_tiles_check(c, call, "x", x, like));
    if (m == NULL || m->w_gate == NULL || m->w_up == NULL || m->w_down == NULL)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "%s: the MLP, w_gate, w_up or w_down is NULL", call);
    if (m->hidden < 1 || m->hidden > INT32_MAX)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "%s: a hidden layer of %lld elements", call,
                          (long long)m->hidden);
    if (!__builtin_isfinite(m->result_scale))
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "%s: result_scale %g", call, (double)m->result_scale);
    UPIPE_TRY(upi_tiles_norm_check(c, call, m->post_norm_weight,
                                   m->post_norm_weight != NULL ? m->norm_eps : 0,
                                   g != NULL ? g->post_norm_weight : NULL));
    return upi_tiles_norm_check(c, call, m->norm_weight,
                                m->norm_weight != NULL || m->post_norm_weight == NULL ? m->norm_eps : 0,
                                g != NULL ? g->norm_weight : NULL);
}

/* A weight as a view for the table, whose entries only read it. */
UPIPE_API upipe_view upi_tiles_weight(const void *w, upipe_dtype dtype, int64_t rows, int64_t columns)
{
    return upipe_view_packed((void *)(uintptr_t)w, dtype, rows, 1, (int32_t)columns);
}

UPIPE_API upipe_status upi_mlp_alloc(upipe_ctx *c, upi_tiles_buf *buf, const upipe_mlp *m,
                                     const upi_tiling *t, upipe_view x)
{
    size_t el = upipe_dtype_bytes(x.dtype);
    memset(buf, 0, sizeof *buf);
    if (m->norm_weight != NULL)
        UPIPE_TRY(upi_tiles_alloc(c, &buf->norm, t->rows, x.d, el, UPIPE_USE_MLP, "mlp_norm"));
    UPIPE_TRY(upi_tiles_alloc(c, &buf->wide[0], t->rows, m->hidden, el, UPIPE_USE_MLP, "mlp_gate"));
    UPIPE_TRY(upi_tiles_alloc(c, &buf->wide[1], t->rows, m->hidden, el, UPIPE_USE_MLP, "mlp_up"));
    UPIPE_TRY(upi_tiles_alloc(c, &buf->sum, t->rows, x.d, 4, UPIPE_USE_MLP, "mlp_sum"));
    return upipe_mem_alloc(c->mem, &buf->work, t->work_bytes, UPIPE_USE_MLP, "mlp_work", &c->err);
}

/* Rows of x, normed where there is a norm, and both their projections. */
UPIPE_API upipe_status upi_mlp_project(upipe_ctx *c, const upipe_mlp *m, const upi_tiling *t,
                                       const upi_tiles_buf *buf, upipe_view x, upipe_view *normed,
                                       upipe_view *gate, upipe_view *up)
{
    *normed = x;
    if (m->norm_weight != NULL) {
        *normed = upipe_view_packed(buf->norm, x.dtype, x.n, 1, x.d);
        UPIPE_TRY(c->ops->rmsnorm(c, *normed, x, m->norm_weight, m->norm_eps));
    }
    *gate = upipe_view_packed(buf->wide[0], x.dtype, x.n, 1, (int32_t)m->hidden);
    *up = upipe_view_packed(buf->wide[1], x.dtype, x.n, 1, (int32_t)m->hidden);
    UPIPE_TRY(c->ops->gemm(c, *gate, *normed, upi_tiles_weight(m->w_gate, x.dtype, m->hidden, x.d),
                           UPIPE_GEMM_TRANS_B, buf->work, t->work_bytes));
    return c->ops->gemm(c, *up, *normed, upi_tiles_weight(m->w_up, x.dtype, m->hidden, x.d),
                        UPIPE_GEMM_TRANS_B, buf->work, t->work_bytes);
}

UPIPE_API upipe_gate_kind upi_mlp_kind(const upipe_mlp *m)
{
    return m->gelu ? UPIPE_GATE_GELU : UPIPE_GATE_SILU;
}

UPIPE_API upipe_status upi_mlp_fwd(upipe_ctx *c, const upipe_mlp *m, upipe_view y, upipe_view x)
{
    upi_tiling t;
    upi_tiles_buf buf;
    upipe_mem_tiles at = {0, 0, 0};
    UPIPE_TRY(upi_mlp_tile_bytes(&t, c->ops, m, x, 0, &c->err));
    UPIPE_TRY(upi_mlp_alloc(c, &buf, m, &t, x));
    while (upipe_mem_tiles_next(c->mem, &at, x.n, t.rows)) {
        upipe_view from = upipe_view_rows(x, at.row, at.n), to = upipe_view_rows(y, at.row, at.n);
        upipe_view sum = upipe_view_packed(buf.sum, UPIPE_F32, at.n, 1, x.d), normed, gate, up;
        UPIPE_TRY(upi_mlp_project(c, m, &t, &buf, from, &normed, &gate, &up));
        UPIPE_TRY(c->ops->gate(c, upi_mlp_kind(m), gate, gate, up));
        UPIPE_TRY(c->ops->gemm(c, sum, gate, upi_tiles_weight(m->w_down, x.dtype, x.d, m->hidden),
                               UPIPE_GEMM_TRANS_B, buf.work, t.work_bytes));
        if (m->post_norm_weight != NULL)
            UPIPE_TRY(c->ops->rmsnorm(c, sum, sum, m->post_norm_weight, m->norm_eps));
        if (m->result_scale != 0) UPIPE_TRY(c->ops->scale(c, sum, sum, m->result_scale));
        if (m->residual && to.data != from.data) UPIPE_TRY(c->ops->cast(c, to, from));
        UPIPE_TRY(m->residual ? c->ops->add(c, to, sum) : c->ops->cast(c, to, sum));
    }
    return upi_tiles_free(c, &buf);
}

/* upipe_mlp_fwd -- y = [x +] [result_scale *] [post_norm] down(silu(gate(n)) * up(n)), n = norm(x) or x, or with gelu
 *   y       [rows][1][D] view of x's type, written; may be x, otherwise does not overlap it
 *   x       [rows][1][D] view
 *   bytes   a tile's tensors, as tile_bytes bounds them, and scratch of its products
 *   errors  ARG, MEMORY, the table's; the pool is as before
 *   paper   sections 2.3 (feed-forward) and 4 (tiles)
 */
UPIPE_API upipe_status upipe_mlp_fwd(upipe_ctx *c, const upipe_mlp *m, upipe_view y, upipe_view x)
{
    int64_t mark = upipe_mem_mark(c->mem);
    upipe_status s;
    UPIPE_TRY(upi_mlp_check(c, "mlp_fwd", m, x, NULL));
    UPIPE_TRY(upi_tiles_check(c, "mlp_fwd", "y", y, x));
    UPIPE_TRY(upi_tiles_check_alias(c, "mlp_fwd", "y", y, "x", x));
    if (x.n == 0) return UPIPE_OK;
    s = upi_mlp_fwd(c, m, y, x);
    if (s != UPIPE_OK) upipe_mem_rewind(c->mem, mark);
    return s;
}

/* The gradient of the normed rows, in f32, from those of gate and up; and the gradients of their weights. */
UPIPE_API upipe_status upi_mlp_back(upipe_ctx *c, const upipe_mlp *m, const upi_tiling *t,
                                    const upi_tiles_buf *buf, upipe_view sum, const upipe_mlp_grads *g,
                                    upipe_view normed, upipe_view gate, upipe_view up)
{
    const int into = UPIPE_GEMM_TRANS_A | UPIPE_GEMM_ACCUMULATE;
    if (g->w_gate != NULL)
        UPIPE_TRY(c->ops->gemm(c, upipe_view_packed(g->w_gate, UPIPE_F32, m->hidden, 1, normed.d), gate,
                               normed, into, buf->work, t->work_bytes));
    if (g->w_up != NULL)
        UPIPE_TRY(c->ops->gemm(c, upipe_view_packed(g->w_up, UPIPE_F32, m->hidden, 1, normed.d), up, normed,
                               into, buf->work, t->work_bytes));
    UPIPE_TRY(c->ops->gemm(c, sum, gate, upi_tiles_weight(m->w_gate, normed.dtype, m->hidden, normed.d), 0,
                           buf->work, t->work_bytes));
    return c->ops->gemm(c, sum, up, upi_tiles_weight(m->w_up, normed.dtype, m->hidden, normed.d),
                        UPIPE_GEMM_ACCUMULATE, buf->work, t->work_bytes);
}

/* dy becomes the gradient of the product with w_down, in a block of its own; for a norm the product is made again. */
UPIPE_API upipe_status upi_mlp_post_back(upipe_ctx *c, const upipe_mlp *m, const upi_tiling *t,
                                         const upi_tiles_buf *buf, upipe_view sum, const upipe_mlp_grads *g,
                                         upipe_view *dy, upipe_view hidden)
{
    upipe_view from = *dy;
    *dy = upipe_view_packed(buf->post, from.dtype, from.n, 1, from.d);
    if (m->result_scale != 0) {
        UPIPE_TRY(c->ops->scale(c, *dy, from, m->result_scale));
        from = *dy;
    }
    if (m->post_norm_weight == NULL) return UPIPE_OK;
    UPIPE_TRY(c->ops->gemm(c, sum, hidden, upi_tiles_weight(m->w_down, from.dtype, from.d, m->hidden),
                           UPIPE_GEMM_TRANS_B, buf->work, t->work_bytes));
    return c->ops->rmsnorm_bwd(c, *dy, from, sum, m->post_norm_weight, m->norm_eps, g->post_norm_weight, 0);
}

UPIPE_API upipe_status upi_mlp_bwd(upipe_ctx *c, const upipe_mlp *m, upipe_view dx, const upipe_mlp_grads *g,
                                   upipe_view dy, upipe_view x)
{
    upi_tiling t;
    upi_tiles_buf buf;
    upipe_mem_tiles at = {0, 0, 0};
    UPIPE_TRY(upi_mlp_tile_bytes(&t, c->ops, m, x, 1, &c->err));
    UPIPE_TRY(upi_mlp_alloc(c, &buf, m, &t, x));
    UPIPE_TRY(upi_tiles_alloc(c, &buf.wide[2], t.rows, m->hidden, upipe_dtype_bytes(x.dtype), UPIPE_USE_MLP,
                              "mlp_hidden"));
    if (upi_mlp_is_changed(m))
        UPIPE_TRY(upi_tiles_alloc(c, &buf.post, t.rows, x.d, upipe_dtype_bytes(x.dtype), UPIPE_USE_MLP,
                                  "mlp_post"));
    while (upipe_mem_tiles_next(c->mem, &at, x.n, t.rows)) {
        upipe_view from = upipe_view_rows(x, at.row, at.n), result = upipe_view_rows(dy, at.row, at.n);
        upipe_view below = upipe_view_rows(dx, at.row, at.n), above = result, normed, gate, up;
        upipe_view sum = upipe_view_packed(buf.sum, UPIPE_F32, at.n, 1, x.d);
        upipe_view hidden = upipe_view_packed(buf.wide[2], x.dtype, at.n, 1, (int32_t)m->hidden);
        UPIPE_TRY(upi_mlp_project(c, m, &t, &buf, from, &normed, &gate, &up));
        if (g->w_down != NULL || m->post_norm_weight != NULL)
            UPIPE_TRY(c->ops->gate(c, upi_mlp_kind(m), hidden, gate, up));
        if (upi_mlp_is_changed(m)) UPIPE_TRY(upi_mlp_post_back(c, m, &t, &buf, sum, g, &above, hidden));
        if (g->w_down != NULL)
            UPIPE_TRY(c->ops->gemm(c, upipe_view_packed(g->w_down, UPIPE_F32, x.d, 1, (int32_t)m->hidden),
                                   above, hidden, UPIPE_GEMM_TRANS_A | UPIPE_GEMM_ACCUMULATE, buf.work,
                                   t.work_bytes));
        UPIPE_TRY(c->ops->gemm(c, hidden, above, upi_tiles_weight(m->w_down, x.dtype, x.d, m->hidden), 0,
                               buf.work, t.work_bytes));
        UPIPE_TRY(c->ops->gate_bwd(c, upi_mlp_kind(m), gate, up, hidden));
        UPIPE_TRY(upi_mlp_back(c, m, &t, &buf, sum, g, normed, gate, up));
        if (m->residual && below.data != result.data) UPIPE_TRY(c->ops->cast(c, below, result));
        if (m->norm_weight != NULL)
            UPIPE_TRY(c->ops->rmsnorm_bwd(c, below, sum, from, m->norm_weight, m->norm_eps, g->norm_weight,
                                          m->residual));
        else
            UPIPE_TRY(m->residual ? c->ops->add(c, below, sum) : c->ops->cast(c, below, sum));
    }
    return upi_tiles_free(c, &buf);
}

/* upipe_mlp_bwd -- gradients of upipe_mlp_fwd, whose intermediates it recomputes
 *   dx      [rows][1][D] view of x's type: the gradient of x, written; may be dy, otherwise overlaps neither
 *   grads   of the weights, += over the tokens in order
 *   dy      gradient of y
 *   x       the forward's
 *   bytes   a tile's tensors, as tile_bytes bounds them, and scratch of its products
 *   errors  ARG, MEMORY; the pool is as before, dx and the gradients are undefined
 */
UPIPE_API upipe_status upipe_mlp_bwd(upipe_ctx *c, const upipe_mlp *m, upipe_view dx,
                                     const upipe_mlp_grads *grads, upipe_view dy, upipe_view x)
{
    int64_t mark = upipe_mem_mark(c->mem);
    upipe_status s;
    if (grads == NULL) return upipe_fail(&c->err, UPIPE_ERR_ARG, "mlp_bwd: grads is NULL");
    UPIPE_TRY(upi_mlp_check(c, "mlp_bwd", m, x, grads));
    UPIPE_TRY(upi_tiles_check(c, "mlp_bwd", "dx", dx, x));
    UPIPE_TRY(upi_tiles_check(c, "mlp_bwd", "dy", dy, x));
    UPIPE_TRY(upi_tiles_check_alias(c, "mlp_bwd", "dx", dx, "dy", dy));
    if (x.n == 0) return UPIPE_OK;
    if (dx.data == x.data) return upipe_fail(&c->err, UPIPE_ERR_ARG, "mlp_bwd: dx is x, which is still read");
    s = upi_mlp_bwd(c, m, dx, grads, dy, x);
    if (s != UPIPE_OK) upipe_mem_rewind(c->mem, mark);
    return s;
}

/* ---- head and loss ---- */

/* Logits in f32; their gradient in x's type, in the same buffer if that is f32 too. */
UPIPE_API upipe_status upi_loss_tile_bytes(upi_tiling *t, const upipe_ops *ops, const upipe_loss *h,
                                           upipe_view x, int backward, upipe_err *e)
{
    size_t el = upipe_dtype_bytes(x.dtype), dim = (size_t)x.d, vocab = (size_t)h->vocab;
    int64_t rows = x.d * (int64_t)x.d / h->vocab;
    t->row_bytes = (h->norm_weight != NULL ? dim * el : 0) + vocab * 4;
    if (backward) t->row_bytes += dim * 4 + (el < 4 ? vocab * el : 0);
    rows = (int64_t)upipe_max_bytes((size_t)rows, ops->loss_bytes / t->row_bytes);
    if (rows > x.d) rows = x.d;
    if (rows < UPIPE_TILE_LOSS_ROWS) rows = UPIPE_TILE_LOSS_ROWS;
    UPIPE_TRY(upi_tiles_fit(t, x.n, rows, h->tile_bytes, backward ? "loss_bwd" : "loss_fwd", e));
    t->work_bytes =
        upi_tiles_product_bytes(ops, UPIPE_F32, UPIPE_F32, x.dtype, t->rows, h->vocab, x.d, backward);
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_loss_check(upipe_ctx *c, const char *call, const upipe_loss *h, upipe_view x,
                                      const float *losses, const int32_t *targets,
                                      const float *norm_weight_grad)
{
    upipe_view like = x;
    like.h = 1;
    UPIPE_TRY(upi_tiles_check(c, call, "x", x, like));
    if (h == NULL || h->w == NULL || ((losses == NULL || targets == NULL) && x.n > 0))
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "%s: the head, w, losses or targets is NULL", call);
    if (h->vocab < 1 || h->vocab > INT32_MAX)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "%s: a vocabulary of %lld", call, (long long)h->vocab);
    if (!__builtin_isfinite(h->scale))
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "%s: scale %g", call, (double)h->scale);
    if (!__builtin_isfinite(h->logit_scale))
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "%s: logit_scale %g", call, (double)h->logit_scale);
    if (!(h->logit_softcap >= 0) || !__builtin_isfinite(h->logit_softcap))
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "%s: logit_softcap %g", call, (double)h->logit_softcap);
    return upi_tiles_norm_check(c, call, h->norm_weight, h->norm_eps, norm_weight_grad);
}

/* The entry counts rows from the tile's first one; the sentence of a failure says where the tile begins. */
UPIPE_API upipe_status upi_loss_entropy(upipe_ctx *c, const upipe_cross_entropy *entropy, int64_t row)
{
    upipe_err inner;
    upipe_status s = c->ops->cross_entropy(c, entropy);
    if (s == UPIPE_OK || row == 0) return s;
    inner = c->err;
    return upipe_fail(&c->err, s, "in the tile from row %lld on: %.200s", (long long)row, inner.text);
}

/* Forward and backward: without g the losses alone. */
UPIPE_API upipe_status upi_loss(upipe_ctx *c, const upipe_loss *h, upipe_view dx, const upipe_loss_grads *g,
                                float *losses, upipe_view x, const int32_t *targets)
{
    const upipe_view w = upi_tiles_weight(h->w, x.dtype, h->vocab, x.d);
    const int apart = g != NULL && x.dtype != UPIPE_F32;
    upi_tiling t;
    upi_tiles_buf buf;
    upipe_mem_tiles at = {0, 0, 0};
    memset(&buf, 0, sizeof buf);
    UPIPE_TRY(upi_loss_tile_bytes(&t, c->ops, h, x, g != NULL, &c->err));
    if (h->norm_weight != NULL)
        UPIPE_TRY(upi_tiles_alloc(c, &buf.norm, t.rows, x.d, upipe_dtype_bytes(x.dtype), UPIPE_USE_LOSS,
                                  "loss_norm"));
    UPIPE_TRY(upi_tiles_alloc(c, &buf.wide[0], t.rows, h->vocab, 4, UPIPE_USE_LOSS, "logits"));
    if (apart)
        UPIPE_TRY(upi_tiles_alloc(c, &buf.wide[1], t.rows, h->vocab, upipe_dtype_bytes(x.dtype),
                                  UPIPE_USE_LOSS, "logits_grad"));
    if (g != NULL) UPIPE_TRY(upi_tiles_alloc(c, &buf.sum, t.rows, x.d, 4, UPIPE_USE_LOSS, "loss_sum"));
    UPIPE_TRY(upipe_mem_alloc(c->mem, &buf.work, t.work_bytes, UPIPE_USE_LOSS, "loss_work", &c->err));
    while (upipe_mem_tiles_next(c->mem, &at, x.n, t.rows)) {
        upipe_view from = upipe_view_rows(x, at.row, at.n), normed = from;
        upipe_view sum = upipe_view_packed(buf.sum, UPIPE_F32, at.n, 1, x.d);
        upipe_cross_entropy entropy;
        if (h->norm_weight != NULL) {
            normed = upipe_view_packed(buf.norm, x.dtype, at.n, 1, x.d);
            UPIPE_TRY(c->ops->rmsnorm(c, normed, from, h->norm_weight, h->norm_eps));
        }
        entropy.logits = upipe_view_packed(buf.wide[0], UPIPE_F32, at.n, 1, (int32_t)h->vocab);
        entropy.grad =
            upipe_view_packed(apart ? buf.wide[1] : buf.wide[0], x.dtype, at.n, 1, (int32_t)h->vocab);
        if (g == NULL) entropy.grad.data = NULL;
        entropy.loss = losses + at.row;
        entropy.targets = targets + at.row;
        entropy.scale = h->scale == 0 ? 1.0f : h->scale;
        entropy.softcap = h->logit_softcap;
        UPIPE_TRY(c->ops->gemm(c, entropy.logits, normed, w, UPIPE_GEMM_TRANS_B, buf.work, t.work_bytes));
        if (h->logit_scale != 0) {
            UPIPE_TRY(c->ops->scale(c, entropy.logits, entropy.logits, h->logit_scale));
            entropy.scale *= h->logit_scale;
        }
        UPIPE_TRY(upi_loss_entropy(c, &entropy, at.row));
        if (g == NULL) continue;
        if (g->w != NULL)
            UPIPE_TRY(c->ops->gemm(c, upipe_view_packed(g->w, UPIPE_F32, h->vocab, 1, x.d), entropy.grad,
                                   normed, UPIPE_GEMM_TRANS_A | UPIPE_GEMM_ACCUMULATE, buf.work,
                                   t.work_bytes));
        UPIPE_TRY(c->ops->gemm(c, sum, entropy.grad, w, 0, buf.work, t.work_bytes));
        if (h->norm_weight != NULL)
            UPIPE_TRY(c->ops->rmsnorm_bwd(c, upipe_view_rows(dx, at.row, at.n), sum, from, h->norm_weight,
                                          h->norm_eps, g->norm_weight, 0));
        else
            UPIPE_TRY(c->ops->cast(c, upipe_view_rows(dx, at.row, at.n), sum));
    }
    return upi_tiles_free(c, &buf);
}

/* upipe_loss_fwd -- cross-entropy of every token, through norm and projection, without all logits
 *   losses  f32 [rows], not scaled; 0 where the target is negative
 *   x       [rows][1][D] view
 *   targets [rows], device memory; negative: ignored
 *   bytes   a tile's tensors, as tile_bytes bounds them, and scratch of its products
 *   errors  ARG, MEMORY; the pool is as before
 *   paper   sections 2.3 (cross-entropy) and 4
 */
UPIPE_API upipe_status upipe_loss_fwd(upipe_ctx *c, const upipe_loss *h, float *losses, upipe_view x,
                                      const int32_t *targets)
{
    int64_t mark = upipe_mem_mark(c->mem);
    upipe_status s;
    UPIPE_TRY(upi_loss_check(c, "loss_fwd", h, x, losses, targets, NULL));
    if (x.n == 0) return UPIPE_OK;
    s = upi_loss(c, h, x, NULL, losses, x, targets);
    if (s != UPIPE_OK) upipe_mem_rewind(c->mem, mark);
    return s;
}

/* upipe_loss_bwd -- the losses, and the gradients of head.scale times their sum
 *   dx      [rows][1][D] view of x's type: the gradient of x, written; may be x, otherwise does not overlap
 *           it
 *   grads   += over the tokens in order
 *   losses, x, targets  as upipe_loss_fwd, which need not have run
 *   bytes   a tile's tensors, as tile_bytes bounds them, and scratch of its products
 *   errors  ARG, MEMORY; the pool is as before, dx and the gradients are undefined
 */
UPIPE_API upipe_status upipe_loss_bwd(upipe_ctx *c, const upipe_loss *h, upipe_view dx,
                                      const upipe_loss_grads *grads, float *losses, upipe_view x,
                                      const int32_t *targets)
{
    int64_t mark = upipe_mem_mark(c->mem);
    upipe_status s;
    if (grads == NULL) return upipe_fail(&c->err, UPIPE_ERR_ARG, "loss_bwd: grads is NULL");
    UPIPE_TRY(upi_loss_check(c, "loss_bwd", h, x, losses, targets, grads->norm_weight));
    UPIPE_TRY(upi_tiles_check(c, "loss_bwd", "dx", dx, x));
    UPIPE_TRY(upi_tiles_check_alias(c, "loss_bwd", "dx", dx, "x", x));
    if (x.n == 0) return UPIPE_OK;
    s = upi_loss(c, h, dx, grads, losses, x, targets);
    if (s != UPIPE_OK) upipe_mem_rewind(c->mem, mark);
    return s;
}

#endif

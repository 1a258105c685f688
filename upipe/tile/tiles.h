/* tiles.h -- what calls over tiles of tokens share: sizes, checks, products        part of upipe_tile.h */
#ifndef UPIPE_TILE_TILES_H
#define UPIPE_TILE_TILES_H

#include "../upipe_mem.h"
#include "../upipe_ops.h"

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
    const int type = upipe_enum_number(&v.dtype, sizeof v.dtype);
    const int typed =
        type >= 0 && type <= UPIPE_BF16 && type == upipe_enum_number(&like.dtype, sizeof like.dtype);
    if (v.h == 1 && v.n == like.n && v.d == like.d && typed && v.n >= 0 && v.d >= 1 &&
        (v.data != NULL || v.n == 0))
        return UPIPE_OK;
    return upipe_fail(&c->err, UPIPE_ERR_ARG, "%s: %s is %s [%lld][%d][%d]%s, not %s [%lld][1][%d]", call,
                      name, upipe_dtype_name_of(&v.dtype), (long long)v.n, v.h, v.d,
                      v.data == NULL ? " at NULL" : "", upipe_dtype_name_of(&like.dtype), (long long)like.n,
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

#endif

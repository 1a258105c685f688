/* check.h -- checks of the calls of the compute table, for backends
 *
 * One function an entry checks shapes, storage types, NULLs, and which views may share memory; each breach
 * has its own sentence. No pointer to elements is dereferenced, so they may lie in any device's memory. A check
 * that must read elements (a target beyond the last column, say) is the backend's.
 *
 *     UPIPE_TRY(upi_check_rmsnorm(c, y, x, norm_weight, eps));
 */
#ifndef UPIPE_PARTS_CHECK_H
#define UPIPE_PARTS_CHECK_H

#include <math.h>

/* ---- views ---- */

UPIPE_API upipe_status upi_row_check(upipe_ctx *c, const char *call, const char *name, upipe_view v)
{
    if (v.n < 0 || v.h < 1 || v.d < 1)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "%s: %s is [%lld][%d][%d]", call, name, (long long)v.n, v.h,
                          v.d);
    if (!upi_dtype_built(&v.dtype))
        return upipe_fail(&c->err, UPIPE_ERR_UNSUPPORTED, "%s: %s has storage type %d", call, name,
                          upi_enum_number(&v.dtype, sizeof v.dtype));
    if (v.data == NULL && v.n > 0) return upipe_fail(&c->err, UPIPE_ERR_ARG, "%s: %s is NULL", call, name);
    return UPIPE_OK;
}

/* As above, and v must have these rows of d elements. */
UPIPE_API upipe_status upi_row_check_like(upipe_ctx *c, const char *call, const char *name, upipe_view v,
                                          upipe_view like, int32_t d)
{
    UPIPE_TRY(upi_row_check(c, call, name, v));
    if (v.n != like.n || v.h != like.h || v.d != d)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "%s: %s is [%lld][%d][%d], not [%lld][%d][%d]", call, name,
                          (long long)v.n, v.h, v.d, (long long)like.n, like.h, d);
    return UPIPE_OK;
}

/* Views that begin at one address must be the same elements: then each is read before it is written. */
UPIPE_API upipe_status upi_row_check_alias(upipe_ctx *c, const char *call, const char *a_name, upipe_view a,
                                           const char *b_name, upipe_view b)
{
    int same = a.dtype == b.dtype && (a.n == 1 || a.n_stride == b.n_stride) &&
               (a.h == 1 || a.h_stride == b.h_stride);
    if (a.n == 0 || a.data != b.data || same) return UPIPE_OK;
    return upipe_fail(&c->err, UPIPE_ERR_ARG,
                      "%s: %s (%s, strides %lld, %lld) lies over %s (%s, strides %lld, %lld)", call, a_name,
                      upipe_dtype_name(a.dtype), (long long)a.n_stride, (long long)a.h_stride, b_name,
                      upipe_dtype_name(b.dtype), (long long)b.n_stride, (long long)b.h_stride);
}

/* ---- rows ---- */

/* ARG if dst or src is NULL and bytes > 0. */
UPIPE_API upipe_status upi_check_copy(upipe_ctx *c, const void *dst, const void *src, size_t bytes)
{
    if (bytes > 0 && (dst == NULL || src == NULL))
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "copy: %zu bytes, but %s is NULL", bytes,
                          dst == NULL ? "dst" : "src");
    return UPIPE_OK;
}

/* ARG if dst is NULL and bytes > 0. */
UPIPE_API upipe_status upi_check_zero(upipe_ctx *c, const void *dst, size_t bytes)
{
    if (bytes > 0 && dst == NULL)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "zero: %zu bytes, but dst is NULL", bytes);
    return UPIPE_OK;
}

/* dst and src: equal shapes, any types. */
UPIPE_API upipe_status upi_check_cast(upipe_ctx *c, upipe_view dst, upipe_view src)
{
    UPIPE_TRY(upi_row_check(c, "cast", "dst", dst));
    return upi_row_check_like(c, "cast", "src", src, dst, dst.d);
}

/* x: rows of d, at most UPIPE_ROPE_DIM_MAX (else UNSUPPORTED); an even number of dims; count, positions, theta or
 * rates, and factor in range. */
UPIPE_API upipe_status upi_check_rope(upipe_ctx *c, const upipe_rope *r)
{
    int32_t turned, p;
    if (r == NULL) return upipe_fail(&c->err, UPIPE_ERR_ARG, "rope: the call is NULL");
    UPIPE_TRY(upi_row_check(c, "rope", "x", r->x));
    turned = r->dims != 0 ? r->dims : r->x.d;
    if (turned < 0 || turned % 2 != 0 || turned > r->x.d)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "rope: %d dims of a head dim %d; an even number is rotated",
                          turned, r->x.d);
    if (r->x.d > UPIPE_ROPE_DIM_MAX)
        return upipe_fail(&c->err, UPIPE_ERR_UNSUPPORTED, "rope: head dim %d; those up to %d are built",
                          r->x.d, UPIPE_ROPE_DIM_MAX);
    if (!(r->factor >= 0) || !__builtin_isfinite(r->factor))
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "rope: factor %g; it is above 0, or 0 for 1", r->factor);
    for (p = 0; r->rates != NULL && p < turned / 2; ++p)
        if (!(r->rates[p] >= 0) || !__builtin_isfinite(r->rates[p]))
            return upipe_fail(&c->err, UPIPE_ERR_ARG, "rope: rate %d is %g radians a position", p,
                              r->rates[p]);
    if (r->count < 0 || r->pos0 < 0 || r->pos_step < 0 || (r->rates == NULL && !(r->theta > 0)))
        return upipe_fail(&c->err, UPIPE_ERR_ARG,
                          "rope: %lld blocks from position %lld in steps of %lld, theta %g",
                          (long long)r->count, (long long)r->pos0, (long long)r->pos_step, r->theta);
    return UPIPE_OK;
}

/* y like x, which it may be; weight f32 [d], not NULL; eps >= 0. */
UPIPE_API upipe_status upi_check_rmsnorm(upipe_ctx *c, upipe_view y, upipe_view x, const float *weight,
                                         float eps)
{
    UPIPE_TRY(upi_row_check(c, "rmsnorm", "x", x));
    UPIPE_TRY(upi_row_check_like(c, "rmsnorm", "y", y, x, x.d));
    UPIPE_TRY(upi_row_check_alias(c, "rmsnorm", "y", y, "x", x));
    if (weight == NULL) return upipe_fail(&c->err, UPIPE_ERR_ARG, "rmsnorm: norm weight is NULL");
    if (!(eps >= 0)) return upipe_fail(&c->err, UPIPE_ERR_ARG, "rmsnorm: eps %g", (double)eps);
    return UPIPE_OK;
}

/* dx, dy and x: equal shapes; dx may be dy or x unless it accumulates; weight f32 [d], not NULL; eps >= 0. */
UPIPE_API upipe_status upi_check_rmsnorm_bwd(upipe_ctx *c, upipe_view dx, upipe_view dy, upipe_view x,
                                             const float *weight, float eps, int accumulate)
{
    UPIPE_TRY(upi_row_check(c, "rmsnorm_bwd", "dy", dy));
    UPIPE_TRY(upi_row_check_like(c, "rmsnorm_bwd", "x", x, dy, dy.d));
    UPIPE_TRY(upi_row_check_like(c, "rmsnorm_bwd", "dx", dx, dy, dy.d));
    UPIPE_TRY(upi_row_check_alias(c, "rmsnorm_bwd", "dx", dx, "dy", dy));
    UPIPE_TRY(upi_row_check_alias(c, "rmsnorm_bwd", "dx", dx, "x", x));
    if (accumulate && dx.n > 0 && (dx.data == dy.data || dx.data == x.data))
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "rmsnorm_bwd: dx, which accumulates, is %s",
                          dx.data == dy.data ? "dy" : "x");
    if (weight == NULL) return upipe_fail(&c->err, UPIPE_ERR_ARG, "rmsnorm_bwd: norm weight is NULL");
    if (!(eps >= 0)) return upipe_fail(&c->err, UPIPE_ERR_ARG, "rmsnorm_bwd: eps %g", (double)eps);
    return UPIPE_OK;
}

/* dy: any view; db f32 [h][d]: not NULL. */
UPIPE_API upipe_status upi_check_bias_bwd(upipe_ctx *c, const float *db, upipe_view dy)
{
    UPIPE_TRY(upi_row_check(c, "bias_bwd", "dy", dy));
    if (db == NULL) return upipe_fail(&c->err, UPIPE_ERR_ARG, "bias_bwd: db is NULL");
    return UPIPE_OK;
}

/* a and b: equal shapes; out: f32, the same rows with d = 1. */
UPIPE_API upipe_status upi_check_rowdot(upipe_ctx *c, upipe_view out, upipe_view a, upipe_view b)
{
    UPIPE_TRY(upi_row_check(c, "rowdot", "a", a));
    UPIPE_TRY(upi_row_check_like(c, "rowdot", "b", b, a, a.d));
    UPIPE_TRY(upi_row_check_like(c, "rowdot", "out", out, a, 1));
    if (out.dtype != UPIPE_F32)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "rowdot: out is %s, not f32", upipe_dtype_name(out.dtype));
    return UPIPE_OK;
}

/* dst: f32 if it accumulates (else UNSUPPORTED); src: not NULL if there are terms and rows. */
UPIPE_API upipe_status upi_check_sum(upipe_ctx *c, upipe_view dst, const float *src, int count,
                                     int accumulate)
{
    UPIPE_TRY(upi_row_check(c, "sum", "dst", dst));
    if (count < 0) return upipe_fail(&c->err, UPIPE_ERR_ARG, "sum: %d terms", count);
    if (src == NULL && count > 0 && dst.n > 0) return upipe_fail(&c->err, UPIPE_ERR_ARG, "sum: src is NULL");
    if (accumulate && dst.dtype != UPIPE_F32)
        return upipe_fail(&c->err, UPIPE_ERR_UNSUPPORTED, "sum: accumulates into f32 only, dst is %s",
                          upipe_dtype_name(dst.dtype));
    return UPIPE_OK;
}

/* y and x: equal shapes; both may be the same view. */
UPIPE_API upipe_status upi_check_add(upipe_ctx *c, upipe_view y, upipe_view x)
{
    UPIPE_TRY(upi_row_check(c, "add", "y", y));
    UPIPE_TRY(upi_row_check_like(c, "add", "x", x, y, y.d));
    return upi_row_check_alias(c, "add", "y", y, "x", x);
}

/* y and x: equal shapes; both may be the same view. factor: finite. */
UPIPE_API upipe_status upi_check_scale(upipe_ctx *c, upipe_view y, upipe_view x, float factor)
{
    UPIPE_TRY(upi_row_check(c, "scale", "y", y));
    UPIPE_TRY(upi_row_check_like(c, "scale", "x", x, y, y.d));
    if (!isfinite(factor)) return upipe_fail(&c->err, UPIPE_ERR_ARG, "scale: factor %g", (double)factor);
    return upi_row_check_alias(c, "scale", "y", y, "x", x);
}

/* ---- products ---- */

/* out, a and b: shapes that fit for these flags; heads of a and b are those of out or 1, or out has one and a
 * and b the same; f32 to accumulate. */
UPIPE_API upipe_status upi_check_gemm(upipe_ctx *c, upipe_view out, upipe_view a, upipe_view b, int flags)
{
    const int known = UPIPE_GEMM_TRANS_A | UPIPE_GEMM_TRANS_B | UPIPE_GEMM_ACCUMULATE;
    int trans_a = (flags & UPIPE_GEMM_TRANS_A) != 0, trans_b = (flags & UPIPE_GEMM_TRANS_B) != 0;
    int64_t a_rows = trans_a ? a.d : a.n, a_depth = trans_a ? a.n : a.d;
    int64_t b_depth = trans_b ? b.d : b.n, b_cols = trans_b ? b.n : b.d;
    const int added = out.h == 1 && a.h > 1 && a.h == b.h;
    if ((flags & ~known) != 0)
        return upipe_fail(&c->err, UPIPE_ERR_UNSUPPORTED, "gemm: unknown flags 0x%x", flags & ~known);
    if (out.n < 0 || out.d < 0 || out.h < 1 || a.n < 0 || a.d < 0 || b.n < 0 || b.d < 0)
        return upipe_fail(&c->err, UPIPE_ERR_ARG,
                          "gemm: out [%lld][%d][%d], a [%lld][%d][%d], b [%lld][%d][%d]", (long long)out.n,
                          out.h, out.d, (long long)a.n, a.h, a.d, (long long)b.n, b.h, b.d);
    if (!upi_dtype_built(&out.dtype) || !upi_dtype_built(&a.dtype) || !upi_dtype_built(&b.dtype))
        return upipe_fail(&c->err, UPIPE_ERR_UNSUPPORTED, "gemm: storage type %d, %d or %d",
                          upi_enum_number(&out.dtype, sizeof out.dtype),
                          upi_enum_number(&a.dtype, sizeof a.dtype),
                          upi_enum_number(&b.dtype, sizeof b.dtype));
    if (a_rows != out.n || b_cols != out.d || a_depth != b_depth)
        return upipe_fail(&c->err, UPIPE_ERR_ARG,
                          "gemm: out is %lld x %d, but op(a) is %lld x %lld and op(b) is %lld x %lld",
                          (long long)out.n, out.d, (long long)a_rows, (long long)a_depth, (long long)b_depth,
                          (long long)b_cols);
    if (!added && ((a.h != 1 && a.h != out.h) || (b.h != 1 && b.h != out.h)))
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "gemm: %d matrices of a and %d of b for %d of out", a.h,
                          b.h, out.h);
    if ((flags & UPIPE_GEMM_ACCUMULATE) != 0 && out.dtype != UPIPE_F32)
        return upipe_fail(&c->err, UPIPE_ERR_UNSUPPORTED, "gemm: accumulates into f32 only, out is %s",
                          upipe_dtype_name(out.dtype));
    if (out.n > 0 && out.d > 0 && (out.data == NULL || (a_depth > 0 && (a.data == NULL || b.data == NULL))))
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "gemm: %s is NULL",
                          out.data == NULL ? "out"
                          : a.data == NULL ? "a"
                                           : "b");
    return UPIPE_OK;
}

/* Makes v's matrices one of a longer depth, which runs down its rows or along them. Returns 0, and leaves v,
 * where they do not lie so. */
UPIPE_API int upi_gemm_join_side(upipe_view *v, int down)
{
    if (v->h == 1) return 1;
    if (v->h_stride != (down ? v->n * v->n_stride : v->d) || (!down && v->d > INT32_MAX / v->h)) return 0;
    if (down)
        v->n *= v->h;
    else
        v->d *= v->h;
    v->h = 1;
    return 1;
}

/* upi_gemm_join -- products that are added up (out.h = 1, a.h = b.h) as one product of a longer depth: a and b
 *                  become one matrix each. Other products stay as they are. For backends whose product does
 *                  not add up
 *   flags  UPIPE_GEMM_*
 * Returns 0, and leaves a and b, where the matrices of a or of b do not lie as one.
 */
UPIPE_API int upi_gemm_join(upipe_view out, upipe_view *a, upipe_view *b, int flags)
{
    upipe_view x = *a, y = *b;
    if (out.h > 1) return 1;
    if (!upi_gemm_join_side(&x, (flags & UPIPE_GEMM_TRANS_A) != 0) ||
        !upi_gemm_join_side(&y, (flags & UPIPE_GEMM_TRANS_B) == 0))
        return 0;
    *a = x;
    *b = y;
    return 1;
}

/* ---- training ---- */

UPIPE_API upipe_status upi_check_gate_kind(upipe_ctx *c, const char *call, upipe_gate_kind kind)
{
    const int number = upi_enum_number(&kind, sizeof kind);
    if (number >= 0 && number <= UPIPE_GATE_SIGMOID) return UPIPE_OK;
    return upipe_fail(&c->err, UPIPE_ERR_ARG, "%s: kind %d is none of silu, gelu and sigmoid", call, number);
}

/* y, gate and up: equal shapes; y may be gate or up */
UPIPE_API upipe_status upi_check_gate(upipe_ctx *c, upipe_gate_kind kind, upipe_view y, upipe_view gate,
                                      upipe_view up)
{
    UPIPE_TRY(upi_check_gate_kind(c, "gate", kind));
    UPIPE_TRY(upi_row_check(c, "gate", "y", y));
    UPIPE_TRY(upi_row_check_like(c, "gate", "gate", gate, y, y.d));
    UPIPE_TRY(upi_row_check_like(c, "gate", "up", up, y, y.d));
    UPIPE_TRY(upi_row_check_alias(c, "gate", "y", y, "gate", gate));
    return upi_row_check_alias(c, "gate", "y", y, "up", up);
}

/* gate, up and dy: equal shapes, three different addresses */
UPIPE_API upipe_status upi_check_gate_bwd(upipe_ctx *c, upipe_gate_kind kind, upipe_view gate, upipe_view up,
                                          upipe_view dy)
{
    UPIPE_TRY(upi_check_gate_kind(c, "gate_bwd", kind));
    UPIPE_TRY(upi_row_check(c, "gate_bwd", "dy", dy));
    UPIPE_TRY(upi_row_check_like(c, "gate_bwd", "gate", gate, dy, dy.d));
    UPIPE_TRY(upi_row_check_like(c, "gate_bwd", "up", up, dy, dy.d));
    if (dy.n > 0 && (gate.data == up.data || gate.data == dy.data || up.data == dy.data))
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "gate_bwd: %s are the same memory",
                          gate.data == up.data   ? "gate and up"
                          : gate.data == dy.data ? "gate and dy"
                                                 : "up and dy");
    return UPIPE_OK;
}

/* logits, grad: rows [n][1][V] */
UPIPE_API upipe_status upi_check_cross_entropy(upipe_ctx *c, const upipe_cross_entropy *x)
{
    upipe_view l;
    if (x == NULL) return upipe_fail(&c->err, UPIPE_ERR_ARG, "cross_entropy: the call is NULL");
    l = x->logits;
    UPIPE_TRY(upi_row_check(c, "cross_entropy", "logits", l));
    if (l.h != 1 || l.dtype != UPIPE_F32)
        return upipe_fail(&c->err, UPIPE_ERR_ARG,
                          "cross_entropy: logits are %s [%lld][%d][%d], not f32 with one head",
                          upipe_dtype_name(l.dtype), (long long)l.n, l.h, l.d);
    if (!(x->softcap >= 0) || !__builtin_isfinite(x->softcap))
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "cross_entropy: soft-cap %g", (double)x->softcap);
    if (x->grad.data != NULL) {
        UPIPE_TRY(upi_row_check_like(c, "cross_entropy", "grad", x->grad, l, l.d));
        UPIPE_TRY(upi_row_check_alias(c, "cross_entropy", "grad", x->grad, "logits", l));
    }
    if (l.n > 0 && (x->loss == NULL || x->targets == NULL))
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "cross_entropy: %s is NULL",
                          x->loss == NULL ? "loss" : "targets");
    return UPIPE_OK;
}

/* x [n][1][D], table [V][1][D], tokens [n]; `call` is embed or embed_bwd */
UPIPE_API upipe_status upi_check_embed(upipe_ctx *c, const char *call, upipe_view x, upipe_view table,
                                       const int32_t *tokens)
{
    UPIPE_TRY(upi_row_check(c, call, "x", x));
    UPIPE_TRY(upi_row_check(c, call, "table", table));
    if (x.h != 1 || table.h != 1 || x.d != table.d)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "%s: rows [%lld][%d][%d] of a table [%lld][%d][%d]", call,
                          (long long)x.n, x.h, x.d, (long long)table.n, table.h, table.d);
    if (tokens == NULL && x.n > 0) return upipe_fail(&c->err, UPIPE_ERR_ARG, "%s: tokens is NULL", call);
    return UPIPE_OK;
}

/* As upi_check_embed, with dtable in f32. */
UPIPE_API upipe_status upi_check_embed_bwd(upipe_ctx *c, upipe_view dtable, upipe_view dx,
                                           const int32_t *tokens)
{
    UPIPE_TRY(upi_check_embed(c, "embed_bwd", dx, dtable, tokens));
    if (dtable.dtype != UPIPE_F32)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "embed_bwd: the table's gradient is %s, not f32",
                          upipe_dtype_name(dtable.dtype));
    return UPIPE_OK;
}

/* x: any view; out: not NULL. */
UPIPE_API upipe_status upi_check_total(upipe_ctx *c, const double *out, upipe_view x)
{
    UPIPE_TRY(upi_row_check(c, "total", "x", x));
    if (out == NULL) return upipe_fail(&c->err, UPIPE_ERR_ARG, "total: out is NULL");
    return UPIPE_OK;
}

/* A number that f32 holds, not below `least`. */
UPIPE_API int upi_adamw_number(double x, double least)
{
    return x >= least && isfinite((float)x);
}

/* n >= 0, step >= 1, betas in [0, 1), numbers that f32 holds; no NULLs, no address twice. */
UPIPE_API upipe_status upi_check_adamw(upipe_ctx *c, const upipe_adamw *a)
{
    const void *memory[5];
    int i, j;
    if (a == NULL) return upipe_fail(&c->err, UPIPE_ERR_ARG, "adamw: the call is NULL");
    if (a->n < 0 || a->step < 1)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "adamw: %lld elements, step %lld", (long long)a->n,
                          (long long)a->step);
    if (!(a->beta1 >= 0 && a->beta1 < 1 && a->beta2 >= 0 && a->beta2 < 1))
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "adamw: betas %g, %g, not within 0 .. 1", a->beta1,
                          a->beta2);
    if (!upi_adamw_number(a->rate, 0) || !upi_adamw_number(a->eps, 0) || !upi_adamw_number(a->decay, 0) ||
        !upi_adamw_number(a->grad_scale, -INFINITY))
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "adamw: rate %g, eps %g, decay %g, gradients times %g",
                          a->rate, a->eps, a->decay, a->grad_scale);
    if (a->copy != NULL && !upi_dtype_built(&a->copy_dtype))
        return upipe_fail(&c->err, UPIPE_ERR_UNSUPPORTED, "adamw: copy has storage type %d",
                          upi_enum_number(&a->copy_dtype, sizeof a->copy_dtype));
    if (a->n == 0) return UPIPE_OK;
    memory[0] = a->w;
    memory[1] = a->m;
    memory[2] = a->v;
    memory[3] = a->g;
    memory[4] = a->copy;
    for (i = 0; i < 4; ++i) {
        if (memory[i] == NULL) return upipe_fail(&c->err, UPIPE_ERR_ARG, "adamw: %c is NULL", "wmvg"[i]);
        for (j = i + 1; j < 5; ++j)
            if (memory[i] == memory[j])
                return upipe_fail(&c->err, UPIPE_ERR_ARG, "adamw: %c and %s are the same memory", "wmvg"[i],
                                  j == 4   ? "copy"
                                  : j == 3 ? "g"
                                  : j == 2 ? "v"
                                           : "m");
    }
    return UPIPE_OK;
}

#endif
